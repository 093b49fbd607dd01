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
 * Bytes of one tile (j = 4 l + r is the byte number 0..63, bit 0 is the lowest):
 *
 *   2 bits   64 bytes          byte j:  | plane 3 | plane 2 | plane 1 | plane 0 |
 *   4 bits   64 + 64 bytes     byte j of the first:  | plane 1 (4 bits) | plane 0 |; of the second: planes 3, 2
 *   6 bits   4-bit part, then a 2-bit part with bits 4 and 5
 *   8 bits   4 x 64 bytes      byte j of vector p: plane p
 *   1 bit    half a 64-byte vector that two tiles share: tile A has bits 0..3 of byte j (plane = bit), tile B 4..7
 *   3, 5     the 2- or 4-bit part, and the top bit as a 1-bit half
 *
 * The tiles of a side are grouped by width, widest first. All 1-bit halves stand together at the end, in the order
 * of their tiles. So every load is a whole aligned 64-byte vector:
 *
 *   [8-bit tiles][6][5 without top bits][4][3 without top bits][2] [1-bit halves of the 5-, 3- and 1-bit tiles]
 */
#ifndef TKVI_CORE_TILE_H
#define TKVI_CORE_TILE_H

#include "core/base.h"

#define TKVI_TILE_CODES 256
#define TKVI_MAX_WIDTH 8 /* widths are 1 2 3 4 5 6 8 */

/* By width: bytes of the wide part (all but the 1-bit half), and 1 if the tile has a 1-bit half. */
TKVI_CONSTANT uint16_t tkvi_wide_bytes[TKVI_MAX_WIDTH + 1] = {0, 0, 64, 64, 128, 128, 192, 0, 256};
TKVI_CONSTANT uint8_t tkvi_has_half[TKVI_MAX_WIDTH + 1] = {0, 1, 0, 1, 0, 1, 0, 0, 0};

/* Number of tiles of each width in the codes of a side. */
typedef struct tkvi_tile_counts {
    uint16_t n[TKVI_MAX_WIDTH + 1];
} tkvi_tile_counts;

/* Cursor of a reader or writer of tiles. tkvi_first_tile starts it, tkvi_next_tile moves it on. */
typedef struct tkvi_tile_at {
    size_t wide, halves; /* byte offsets of this tile's wide part and of the first 1-bit vector */
    int half;            /* number of the next 1-bit half */
} tkvi_tile_at;

TKVI_FN tkvi_tile_at tkvi_first_tile(const tkvi_tile_counts *tiles) {
    tkvi_tile_at at;
    int w;
    at.wide = 0;
    at.halves = 0;
    at.half = 0;
    for (w = 1; w <= TKVI_MAX_WIDTH; w++) at.halves += (size_t)tiles->n[w] * tkvi_wide_bytes[w];
    return at;
}

TKVI_FN void tkvi_next_tile(tkvi_tile_at *at, int width) {
    at->wide += tkvi_wide_bytes[width];
    at->half += tkvi_has_half[width];
}

static size_t tkvi_tiles_bytes(const tkvi_tile_counts *tiles) {
    size_t halves = (size_t)tiles->n[1] + tiles->n[3] + tiles->n[5];
    return tkvi_first_tile(tiles).halves + (halves + 1) / 2 * 64;
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
 * and below, from .. end are the bytes of each vector to write, multiples of 8. */
TKVI_FN void tkvi_pack_planes(uint8_t *dst, const uint8_t *code, int bits, int shift, int from, int end) {
    int per = 8 / bits, v, k, j;
    uint64_t mask = TKVI_EACH_BYTE((1 << bits) - 1);
    for (v = 0; v < 4 / per || v == 0; v++)
        for (j = from; j < end; j += 8) {
            uint64_t x = 0;
            for (k = 0; k < per && k < 4; k++)
                x |= (tkvi_load8(code + 64 * (v * per + k) + j) >> shift & mask) << (k * bits);
            tkvi_store8(dst + 64 * v + j, x);
        }
}

TKVI_FN void tkvi_unpack_planes(const uint8_t *src, uint8_t *code, int bits, int shift, int from, int end) {
    int per = 8 / bits, p, j;
    uint64_t mask = TKVI_EACH_BYTE((1 << bits) - 1);
    for (p = 0; p < 4; p++)
        for (j = from; j < end; j += 8) {
            uint64_t x = tkvi_load8(src + p / per * 64 + j) >> (p % per * bits) & mask;
            tkvi_store8(code + 64 * p + j, tkvi_load8(code + 64 * p + j) | x << shift);
        }
}

/* Packs bit `bit` of a tile's codes into the lower half of each byte at v (up 0), or into the upper half (up 4). */
TKVI_FN void tkvi_pack_half(uint8_t *v, const uint8_t *code, int bit, int up, int from, int end) {
    int p, j;
    for (j = from; j < end; j += 8) {
        uint64_t x = tkvi_load8(v + j) & ~(TKVI_EACH_BYTE(15) << up);
        for (p = 0; p < 4; p++) x |= (tkvi_load8(code + 64 * p + j) >> bit & TKVI_EACH_BYTE(1)) << (up + p);
        tkvi_store8(v + j, x);
    }
}

TKVI_FN void tkvi_unpack_half(const uint8_t *v, uint8_t *code, int bit, int up, int from, int end) {
    int p, j;
    for (p = 0; p < 4; p++)
        for (j = from; j < end; j += 8) {
            uint64_t x = tkvi_load8(v + j) >> (up + p) & TKVI_EACH_BYTE(1);
            tkvi_store8(code + 64 * p + j, tkvi_load8(code + 64 * p + j) | x << bit);
        }
}

TKVI_FN void tkvi_pack_part(uint8_t *codes, const tkvi_tile_at *at, int width, const uint8_t *code, int from,
                            int end) {
    uint8_t *wide = codes + at->wide;
    int low = width == 8 ? 8 : width >= 4 ? 4 : width >= 2 ? 2 : 0;
    if (low == 8) tkvi_pack_planes(wide, code, 8, 0, from, end); /* constant widths optimise better */
    else if (low == 4) tkvi_pack_planes(wide, code, 4, 0, from, end);
    else if (low == 2) tkvi_pack_planes(wide, code, 2, 0, from, end);
    if (width == 6) tkvi_pack_planes(wide + 128, code, 2, 4, from, end);
    if (tkvi_has_half[width])
        tkvi_pack_half(codes + at->halves + at->half / 2 * 64, code, low, at->half % 2 * 4, from, end);
}

static void tkvi_pack_tile(uint8_t *codes, const tkvi_tile_at *at, int width, const uint8_t *code) {
    tkvi_pack_part(codes, at, width, code, 0, 64);
}

/* The caller has cleared `code`. */
TKVI_FN void tkvi_unpack_part(const uint8_t *codes, const tkvi_tile_at *at, int width, uint8_t *code,
                              int from, int end) {
    const uint8_t *wide = codes + at->wide;
    int low = width == 8 ? 8 : width >= 4 ? 4 : width >= 2 ? 2 : 0;
    if (low) tkvi_unpack_planes(wide, code, low, 0, from, end);
    if (width == 6) tkvi_unpack_planes(wide + 128, code, 2, 4, from, end);
    if (tkvi_has_half[width])
        tkvi_unpack_half(codes + at->halves + at->half / 2 * 64, code, low, at->half % 2 * 4, from, end);
}

static void tkvi_unpack_tile(const uint8_t *codes, const tkvi_tile_at *at, int width, uint8_t *code) {
    memset(code, 0, TKVI_TILE_CODES);
    tkvi_unpack_part(codes, at, width, code, 0, 64);
}

#endif /* TKVI_CORE_TILE_H */
