/*
 * unpack.h - from the codes of a tile (tile.h) to the first operand of a warp's matrix product, 16 rows of 16 halves.
 *
 * A word of a 64-byte vector has four bytes (reduced codes r) with the fields of its planes p. Lane 4 g + t takes words
 * 2 g and 2 g + 1 of one of four tiles, tile t: 256 bytes one after the other for the warp, or as many for each vector.
 *
 *   K: tile = 4 channels, word = token of a slab, plane = slab of 16 tokens.  Rows are tokens, k are channels
 *   V: tile = 16 tokens, word = channel, plane and byte = token.              Rows are channels, k are tokens
 *
 *   row g = word 2 g, row g + 8 = word 2 g + 1;   k = 2 t, 2 t + 1: bytes 0, 2 of tile t;   k + 8: bytes 1, 3
 *
 * So one product takes a plane of four tiles. A field of bits b .. in the mantissa of 1024.0 makes 1024 + 2^b code:
 * one instruction for two codes, with every plane where it lies; 2^b, the factor of width and plane, is taken out by
 * whoever uses it, the 1024 as well. Fields are moved up as far as all planes stay within the ten bits: the less is
 * lost beside the 1024.
 *
 *        half word, 2 bits:  . . . . . . 3 3 2 2 1 1 0 0 . .    after  << 2 (bytes 0, 2) or >> 6 (bytes 1, 3)
 */
#ifndef TKVCU_UNPACK_H
#define TKVCU_UNPACK_H

#include "warp.h"

#define TKVCU_MAGIC 0x64006400u /* 1024.0, twice */

struct alignas(8) tkvcu_words {
    uint32_t x, y;
};

/* Where the fields of a width lie in a half word after the shifts below: plane 0, step to the next plane, planes that
 * share a word; vectors of 64 bytes of the wide part. */
template <int W> struct tkvcu_field;
template <> struct tkvcu_field<1> {
    enum { up = 6, step = 1, share = 4, vectors = 0, half = 1, wide = 0 };
};
template <> struct tkvcu_field<2> {
    enum { up = 2, step = 2, share = 4, vectors = 1, half = 0, wide = 2 };
};
template <> struct tkvcu_field<3> { /* planes 0, 2 and 1, 3 are put together: tkvcu_fetch */
    enum { up = 0, step = 2, share = 4, vectors = 1, half = 1, wide = 2 };
};
template <> struct tkvcu_field<4> {
    enum { up = 2, step = 4, share = 2, vectors = 2, half = 0, wide = 4 };
};
template <> struct tkvcu_field<5> {
    enum { up = 1, step = 4, share = 2, vectors = 2, half = 1, wide = 4 };
};
template <> struct tkvcu_field<6> {
    enum { up = 0, step = 4, share = 2, vectors = 3, half = 0, wide = 4 };
};
template <> struct tkvcu_field<8> {
    enum { up = 2, step = 0, share = 1, vectors = 4, half = 0, wide = 8 };
};

/* The lowest bit of plane p's field. */
template <int W> TKVCU_DEVICE constexpr int tkvcu_bit(int p) {
    return W == 3 ? 1 + p / 2 * 4
                  : (int)tkvcu_field<W>::up + (int)tkvcu_field<W>::step * (p % (int)tkvcu_field<W>::share);
}

/* 2^-bit: undoes the factor of a plane. */
template <int W> TKVCU_DEVICE float tkvcu_unfactor(int p) { return 1.0f / (float)(1 << tkvcu_bit<W>(p)); }

/* One lane's words of a tile, bytes 0 and 2 (even) and 1 and 3 (odd) of words 2 g and 2 g + 1, where the fields lie as
 * above. extra: top bits of widths 1, 3 and 5, or the two of width 6. */
template <int W> struct tkvcu_tile {
    enum {
        n = W == 3                      ? 2
            : tkvcu_field<W>::wide == 8 ? 4
            : tkvcu_field<W>::wide == 4 ? 2
            : tkvcu_field<W>::wide == 2 ? 1
                                        : 0
    };
    uint32_t even[n + 1][2], odd[n + 1][2];
    uint32_t even_extra[2], odd_extra[2];
};

TKVCU_DEVICE tkvcu_words tkvcu_two(const uint8_t *vector, int g) {
    return *(const tkvcu_words *)(const void *)(vector + 8 * g);
}

/* wide: the tile's wide part; half: the 64-byte vector with its top bits, in bits 0..3 or (upper = 4) 4..7. */
template <int W>
TKVCU_DEVICE void tkvcu_fetch(tkvcu_tile<W> &t, const uint8_t *wide, const uint8_t *half, int upper, int g) {
    typedef tkvcu_field<W> f;
    int v, i;
    if constexpr (W == 3) { /* bits 1..3 and 5..7 of each byte: planes 0 and 2, then 1 and 3 */
        const tkvcu_words w = tkvcu_two(wide, g), h = tkvcu_two(half, g);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            const uint32_t low = i ? w.y : w.x, top = (i ? h.y : h.x) >> upper;
            const uint32_t x =
                tkvcu_choose(top << 5, tkvcu_choose(low << 1, top << 3, 0x66666666u), 0x80808080u);
            const uint32_t y =
                tkvcu_choose(top << 4, tkvcu_choose(low >> 1, top << 2, 0x66666666u), 0x80808080u);
            t.even[0][i] = x;
            t.even[1][i] = y;
            t.odd[0][i] = x >> 8;
            t.odd[1][i] = y >> 8;
        }
    } else {
        TKVCU_UNROLL
        for (v = 0; v < (int)tkvcu_tile<W>::n; v++) {
            const tkvcu_words w = tkvcu_two(wide + 64 * v, g);
            t.even[v][0] = w.x << f::up;
            t.even[v][1] = w.y << f::up;
            t.odd[v][0] = w.x >> (8 - f::up);
            t.odd[v][1] = w.y >> (8 - f::up);
        }
        if (f::half == 1) { /* bit p of it comes to bit p + up + the fields' own width */
            const int to = (int)f::up + (int)f::wide;
            const tkvcu_words w = tkvcu_two(half, g);
            /* to - upper may be negative: via the left, one shift more, for the even bytes */
            t.even_extra[0] = (w.x << to) >> upper;
            t.even_extra[1] = (w.y << to) >> upper;
            t.odd_extra[0] = w.x >> (8 - to + upper);
            t.odd_extra[1] = w.y >> (8 - to + upper);
        } else if (W == 6) {
            const tkvcu_words w = tkvcu_two(wide + 128, g);
            t.even_extra[0] = w.x;
            t.even_extra[1] = w.y;
            t.odd_extra[0] = w.x >> 8;
            t.odd_extra[1] = w.y >> 8;
        }
    }
}

template <int N> TKVCU_DEVICE uint32_t tkvcu_move(uint32_t x) {
    return N >= 0 ? x << (N & 31) : x >> (-N & 31);
}

/* Plane P of it: 1024 + factor * code, as a matrix product's first operand. magic: TKVCU_MAGIC, out of memory. */
template <int W, int P>
TKVCU_DEVICE void tkvcu_fragment(const tkvcu_tile<W> &t, uint32_t a[4], uint32_t magic) {
    typedef tkvcu_field<W> f;
    const int v = f::wide > 0 ? P / f::share : 0;
    const int bit = f::up + f::step * (P % f::share);
    const uint32_t mask = f::wide > 0 ? ((1u << f::wide) - 1u) * 0x00010001u << bit : 0;
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        uint32_t even = magic, odd = magic;
        if (W == 3) {
            even = tkvcu_pick(t.even[P % 2][i], 0x000e000eu << P / 2 * 4, even);
            odd = tkvcu_pick(t.odd[P % 2][i], 0x000e000eu << P / 2 * 4, odd);
        } else if (f::wide > 0) {
            even = tkvcu_pick(t.even[v][i], mask, even);
            odd = tkvcu_pick(t.odd[v][i], mask, odd);
        }
        if (f::half == 1 && W != 3) { /* the bit is at up + wide + P and belongs to bit + wide */
            enum { by = f::step * (P % f::share) - P };
            const uint32_t one = 0x00010001u << (bit + f::wide);
            even = tkvcu_pick(tkvcu_move<by>(t.even_extra[i]), one, even);
            odd = tkvcu_pick(tkvcu_move<by>(t.odd_extra[i]), one, odd);
        } else if (W == 6) {
            enum { by = 4 + 4 * (P % 2) - 2 * P };
            const uint32_t two = 0x00030003u << (bit + 4);
            even = tkvcu_pick(tkvcu_move<by>(t.even_extra[i]), two, even);
            odd = tkvcu_pick(tkvcu_move<by>(t.odd_extra[i]), two, odd);
        }
        a[i] = even;
        a[2 + i] = odd;
    }
}

/* >>pairs: R formats with 3 bits for two channels (format_r.h). A code is looked up in a table of bytes: the point's
 * coordinates plus 128, in units of 1/64. Two planes at a time: their codes are the nibbles of a byte. */
#define TKVCU_PAIR_BITS 6
#define TKVCU_PAIR_MINUS 0xe480e480u /* -(1024 + 128), twice */

TKVCU_DEVICE tkvcu_words tkvcu_pair_points(int second) {
    tkvcu_words x;
    x.x = second ? 0x32ce659bu : 0xce32659bu;
    x.y = second ? 0x6001a0ffu : 0x0160ffa0u;
    return x;
}

/* One lane's words 2 g and 2 g + 1 of a tile, bytes in the order 0, 2, 1, 3. */
struct tkvcu_pair_tile {
    uint32_t wide[2], half[2];
};

TKVCU_DEVICE void tkvcu_fetch_pairs(tkvcu_pair_tile &x, const uint8_t *wide, const uint8_t *half, int upper,
                                    int g) {
    const tkvcu_words w = tkvcu_two(wide, g), h = tkvcu_two(half, g);
    x.wide[0] = tkvcu_prmt(w.x, 0, 0x3120);
    x.wide[1] = tkvcu_prmt(w.y, 0, 0x3120);
    x.half[0] = tkvcu_prmt(h.x >> upper, 0, 0x3120);
    x.half[1] = tkvcu_prmt(h.y >> upper, 0, 0x3120);
}

/* Codes of planes P and P + 1 (0 or 2) of word i: nibbles of the bytes. */
template <int P> TKVCU_DEVICE uint32_t tkvcu_pair_codes(const tkvcu_pair_tile &x, int i) {
    return (tkvcu_move<-2 * P>(x.wide[i]) & 0x03030303u) | (tkvcu_move<2 - 2 * P>(x.wide[i]) & 0x30303030u) |
           (tkvcu_move<2 - P>(x.half[i]) & 0x04040404u) | (tkvcu_move<5 - P>(x.half[i]) & 0x40404040u);
}

/* Their first or second channels as first operands: 1024 + 128 + 64 times the coordinate. */
TKVCU_DEVICE void tkvcu_pair_fragments(const uint32_t code[2], tkvcu_words points, uint32_t a[2][4]) {
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const uint32_t even = tkvcu_prmt(points.x, points.y, code[i]);
        const uint32_t odd = tkvcu_prmt(points.x, points.y, code[i] >> 16);
        a[0][i] = tkvcu_prmt(even, 0x64646464u, 0x4240);
        a[1][i] = tkvcu_prmt(even, 0x64646464u, 0x4341);
        a[0][2 + i] = tkvcu_prmt(odd, 0x64646464u, 0x4240);
        a[1][2 + i] = tkvcu_prmt(odd, 0x64646464u, 0x4341);
    }
}

/* Where the tiles of a side lie: runs of widths, widest first, then the 1-bit vectors (tile.h). */
struct tkvcu_tiles {
    uint32_t wide, halves; /* bytes from the side's start */
    int half;              /* number of the next 1-bit half */
};

#endif /* TKVCU_UNPACK_H */
