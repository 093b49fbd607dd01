/*
 * core/tile.h - the unit that is packed, unpacked and multiplied: 256 codes of 1 to 6 or 8 bits.
 *
 * The functions here are the scalar definition. The vector kernels read the same bytes.
 *
 * A tile is four planes of 64 codes. Code (plane p, lane l, reduced index r) has number 64 p + 4 l + r, with
 * p 0..3, l 0..15, r 0..3. A kernel multiplies the four codes of one (p, l) by four weights and sums the products.
 * That is one 32-bit lane of vpdpbusd, of vpmaddubsw + vpmaddwd, of sdot.
 *
 *   K of one head: tile i holds channels 4i .. 4i+3 (in the head's order) of all 64 tokens.
 *                  token = 16 p + l, channel = 4 i + r. head_dim / 4 tiles, one weight set per tile.
 *   V of one head: 16 channels (a slab) of 16 tokens; four tiles per slab, slabs one after the other.
 *                  channel = 16 slab + l, token = 16 (tile in slab) + 4 p + r. No padding for any multiple of 16.
 *
 * A tile of w bits takes 32 w bytes. Byte j = 4 l + r is 0..63 in each plane; bit 0 is the lowest:
 *
 *   2 bits   64 bytes          byte j:  | plane 3 | plane 2 | plane 1 | plane 0 |
 *   4 bits   64 + 64 bytes     byte j of the first:  | plane 1 (4 bits) | plane 0 |; of the second: planes 3, 2
 *   6 bits   4-bit part, then a 2-bit part with bits 4 and 5
 *   8 bits   4 x 64 bytes      byte j of vector p: plane p
 *   1 bit    32 bytes          byte j:  | planes 3 2 1 0 of j + 32 (1 bit each) | planes 3 2 1 0 of j |
 *   5 bits   4-bit part, then a 1-bit part with bit 4
 *   3 bits   64 + 32 bytes     byte j of the first:  | bits 1 0 of plane 3 | plane 1 (3 bits) | plane 0 |
 *                              of the second:  | bit 2 of plane 3 of j + 32 | of j | plane 2 of j + 32 | of j |
 *
 * Three bits could be a 2-bit and a 1-bit part too. But then a vector of codes takes twice the instructions.
 *
 * The tiles of a side are grouped by width, widest first, without gaps. The codes end at a multiple of 64 bytes.
 */
#ifndef TKVI_CORE_TILE_H
#define TKVI_CORE_TILE_H

#include "core/base.h"

#define TKVI_TILE_CODES 256
#define TKVI_MAX_WIDTH 8 /* widths are 1 2 3 4 5 6 8 */
#define TKVI_TILE_BYTES(width) (32 * (width))

/* Number of tiles of each width in the codes of a side. */
typedef struct tkvi_tile_counts {
    uint16_t n[TKVI_MAX_WIDTH + 1];
} tkvi_tile_counts;

static size_t tkvi_tiles_bytes(const tkvi_tile_counts *tiles) {
    size_t n = 0;
    int w;
    for (w = 1; w <= TKVI_MAX_WIDTH; w++) n += (size_t)(tiles->n[w] * TKVI_TILE_BYTES(w));
    return (n + 63) / 64 * 64;
}

/* The functions below handle eight codes at a time, as bytes of a word. No byte carries into the next. */
#ifdef __CUDA_ARCH__ /* src/cuda aligns them all to 8; a GPU would load single bytes otherwise */
#define TKVI_EIGHT(p) __builtin_assume_aligned(p, 8)
#else
#define TKVI_EIGHT(p) (p)
#endif
TKVI_FN uint64_t tkvi_load8(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, TKVI_EIGHT(p), 8);
    return x;
}

TKVI_FN void tkvi_store8(uint8_t *p, uint64_t x) { memcpy(TKVI_EIGHT(p), &x, 8); }

#define TKVI_EACH_BYTE(b) ((uint64_t)(b)*0x0101010101010101u)

/* Packs `bits` bits of each code, from bit `shift` up, into vectors of 64 bytes with 8 / bits planes each. Here
 * and below, from .. end - 1 are bytes of each half of a plane, multiples of 8 up to 32. */
TKVI_FN void tkvi_pack_planes(uint8_t *dst, const uint8_t *code, int bits, int shift, int from, int end) {
    const int per = 8 / bits;
    const uint64_t mask = TKVI_EACH_BYTE((1 << bits) - 1);
    int v, k, j, b;
    for (v = 0; v < 4 / per || v == 0; v++)
        for (b = 0; b < 64; b += 32)
            for (j = b + from; j < b + end; j += 8) {
                uint64_t x = 0;
                for (k = 0; k < per && k < 4; k++)
                    x |= (tkvi_load8(code + 64 * (v * per + k) + j) >> shift & mask) << (k * bits);
                tkvi_store8(dst + 64 * v + j, x);
            }
}

TKVI_FN void tkvi_unpack_planes(const uint8_t *src, uint8_t *code, int bits, int shift, int from, int end) {
    const int per = 8 / bits;
    const uint64_t mask = TKVI_EACH_BYTE((1 << bits) - 1);
    int p, j, b;
    for (p = 0; p < 4; p++)
        for (b = 0; b < 64; b += 32)
            for (j = b + from; j < b + end; j += 8) {
                uint64_t x = tkvi_load8(src + p / per * 64 + j) >> (p % per * bits) & mask;
                tkvi_store8(code + 64 * p + j, tkvi_load8(code + 64 * p + j) | x << shift);
            }
}

/* Packs bit `bit` of each code into 32 bytes. */
TKVI_FN void tkvi_pack_tops(uint8_t *dst, const uint8_t *code, int bit, int from, int end) {
    int p, j;
    for (j = from; j < end; j += 8) {
        uint64_t x = 0;
        for (p = 0; p < 8; p++)
            x |= (tkvi_load8(code + 64 * (p % 4) + 32 * (p / 4) + j) >> bit & TKVI_EACH_BYTE(1)) << p;
        tkvi_store8(dst + j, x);
    }
}

TKVI_FN void tkvi_unpack_tops(const uint8_t *src, uint8_t *code, int bit, int from, int end) {
    int p, j;
    for (p = 0; p < 8; p++)
        for (j = from; j < end; j += 8) {
            uint8_t *to = code + 64 * (p % 4) + 32 * (p / 4) + j;
            tkvi_store8(to, tkvi_load8(to) | (tkvi_load8(src + j) >> p & TKVI_EACH_BYTE(1)) << bit);
        }
}

/* The 3-bit tile: the codes of planes 0, 1 and 3, and then of plane 2 and the top bit of plane 3. */
TKVI_FN void tkvi_pack_three(uint8_t *dst, const uint8_t *code, int from, int end) {
    const uint64_t seven = TKVI_EACH_BYTE(7);
    int j, b;
    for (j = from; j < end; j += 8) {
        uint64_t rest = 0;
        for (b = 0; b < 2; b++) {
            const uint8_t *c = code + 32 * b + j;
            const uint64_t three = tkvi_load8(c + 192);
            tkvi_store8(dst + 32 * b + j, (tkvi_load8(c) & seven) | (tkvi_load8(c + 64) & seven) << 3 |
                                              (three & TKVI_EACH_BYTE(3)) << 6);
            rest |= (tkvi_load8(c + 128) & seven) << 3 * b | (three >> 2 & TKVI_EACH_BYTE(1)) << (6 + b);
        }
        tkvi_store8(dst + 64 + j, rest);
    }
}

TKVI_FN void tkvi_unpack_three(const uint8_t *src, uint8_t *code, int from, int end) {
    const uint64_t seven = TKVI_EACH_BYTE(7);
    int j, b;
    for (j = from; j < end; j += 8)
        for (b = 0; b < 2; b++) {
            const uint64_t x = tkvi_load8(src + 32 * b + j), rest = tkvi_load8(src + 64 + j);
            uint8_t *c = code + 32 * b + j;
            tkvi_store8(c, x & seven);
            tkvi_store8(c + 64, x >> 3 & seven);
            tkvi_store8(c + 128, rest >> 3 * b & seven);
            tkvi_store8(c + 192, (x >> 6 & TKVI_EACH_BYTE(3)) | (rest >> (4 + b) & TKVI_EACH_BYTE(4)));
        }
}

TKVI_FN void tkvi_pack_part(uint8_t *tile, int width, const uint8_t *code, int from, int end) {
    if (width == 8) tkvi_pack_planes(tile, code, 8, 0, from, end); /* constant widths optimise better */
    else if (width >= 4) tkvi_pack_planes(tile, code, 4, 0, from, end);
    else if (width == 3) tkvi_pack_three(tile, code, from, end);
    else if (width == 2) tkvi_pack_planes(tile, code, 2, 0, from, end);
    else tkvi_pack_tops(tile, code, 0, from, end);
    if (width == 6) tkvi_pack_planes(tile + 128, code, 2, 4, from, end);
    if (width == 5) tkvi_pack_tops(tile + 128, code, 4, from, end);
}

static void tkvi_pack_tile(uint8_t *tile, int width, const uint8_t *code) {
    tkvi_pack_part(tile, width, code, 0, 32);
}

/* The caller has cleared `code`. */
TKVI_FN void tkvi_unpack_part(const uint8_t *tile, int width, uint8_t *code, int from, int end) {
    if (width == 8) tkvi_unpack_planes(tile, code, 8, 0, from, end);
    else if (width >= 4) tkvi_unpack_planes(tile, code, 4, 0, from, end);
    else if (width == 3) tkvi_unpack_three(tile, code, from, end);
    else if (width == 2) tkvi_unpack_planes(tile, code, 2, 0, from, end);
    else tkvi_unpack_tops(tile, code, 0, from, end);
    if (width == 6) tkvi_unpack_planes(tile + 128, code, 2, 4, from, end);
    if (width == 5) tkvi_unpack_tops(tile + 128, code, 4, from, end);
}

static void tkvi_unpack_tile(const uint8_t *tile, int width, uint8_t *code) {
    memset(code, 0, TKVI_TILE_CODES);
    tkvi_unpack_part(tile, width, code, 0, 32);
}

#endif /* TKVI_CORE_TILE_H */
