/*
 * unpack.h - from the codes of a tile (core/tile.h) to the first operand of a warp's product of bytes, 16 rows of
 * 32 k.
 *
 * A word of a 64-byte vector has four bytes (reduced codes r) with the fields of its planes p. Lane 4 g + t
 * takes words 2 g and 2 g + 1 of tile t: one mask makes four codes of them, each where its field lies, times
 * 2^(the field's bit).
 *
 * K: tile = 4 channels, word = token of a slab, plane = slab of 16 tokens.  Rows are tokens, k are channels
 * V: tile = 16 tokens, word = channel, plane and byte = token.              Rows are channels, k are tokens
 *
 * row g = word 2 g, row g + 8 = word 2 g + 1;   k = 4 t .. 4 t + 3: bytes of tile t;   k + 16: another slab
 * or plane
 *
 * K's planes are sums of their own, so what the field's place multiplies by is taken out at the end, and a
 * code of 3, 5 or 6 bits is two parts that are added up apart: 2 + 1, 4 + 1, 4 + 2 bits. All of V's planes
 * come into one sum: there the parts are put together, a plane's codes stand where that takes the fewest
 * shifts, and the weights of its tokens are so much smaller.
 *
 *        byte, 2 bits:  3 3 2 2 1 1 0 0      & 0x03 = code of plane 0, & 0x0c = 4 times that of plane 1
 */
#ifndef TKVCU_UNPACK_H
#define TKVCU_UNPACK_H

#include "warp.h"

struct alignas(16) tkvcu_quad {
    uint32_t x, y, z, w;
};

/* Where byte `at` of a side lies in its slot of shared memory: lines of 128 bytes, their quarters turned
 * about by the line's number, so that the tiles that four lanes read at a time have different banks. */
TKVCU_DEVICE uint32_t tkvcu_place(uint32_t at) { return at ^ (at >> 2 & 0x60u); }

TKVCU_DEVICE tkvcu_words tkvcu_two(const uint8_t *slot, uint32_t place) {
    return *(const tkvcu_words *)(const void *)(slot + place);
}

TKVCU_DEVICE uint32_t tkvcu_one(const uint8_t *slot, uint32_t place) {
    return *(const uint32_t *)(const void *)(slot + place);
}

/* One lane's words of a part of W bits of a tile: 1 (half a vector), 2, 4, 8. */
template <int W> struct tkvcu_tile {
    enum { n = W < 4 ? 1 : W / 2 };
    uint32_t word[n][2];
};

/* A lane's way through slabs, two at a time. codes: where they begin in shared memory, a multiple of 128. Tiles stand
 * STRIDE bytes apart, their part of W bits begins `from` bytes on; W = 1: two tiles to a vector, so STRIDE is 32. */
template <int W, int STRIDE> struct tkvcu_path { tkvcu_at vector[2][tkvcu_tile<W>::n]; };

template <int W, int STRIDE>
TKVCU_DEVICE void tkvcu_path_start(tkvcu_path<W, STRIDE> &x, tkvcu_at codes, uint32_t from, int g, int t) {
    int v;
    if (STRIDE > 128) t = tkvcu_kept(t); /* seldom: no register shall wait for it */
    from += (uint32_t)((W == 1 ? t / 2 * 64 : t * STRIDE) + 8 * g);
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::n; v++) {
        x.vector[0][v] = codes + tkvcu_place(from + (uint32_t)(64 * v));
        if (STRIDE % 128 == 0)
            x.vector[1][v] = x.vector[0][v] + 4 * STRIDE; /* its lines are turned as those */
        else if (STRIDE == 64) x.vector[1][v] = (x.vector[0][v] ^ 64u) + 4 * STRIDE;
        else x.vector[1][v] = codes + tkvcu_place(from + (uint32_t)(4 * STRIDE + 64 * v));
    }
}

/* Slab s of the two. */
template <int W, int STRIDE>
TKVCU_DEVICE void tkvcu_path_take(tkvcu_tile<W> &x, const tkvcu_path<W, STRIDE> &from, int s, int upper) {
    int v;
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::n; v++) {
        const tkvcu_words w = tkvcu_read_words(from.vector[s][v]);
        x.word[v][0] = W == 1 ? w.x >> upper : w.x;
        x.word[v][1] = W == 1 ? w.y >> upper : w.y;
    }
}

template <int W, int STRIDE> TKVCU_DEVICE void tkvcu_path_next(tkvcu_path<W, STRIDE> &x) {
    int s, v;
    TKVCU_UNROLL
    for (s = 0; s < 2; s++) TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::n; v++)
        x.vector[s][v] =
            (x.vector[s][v] ^ (STRIDE == 32 ? 64u : 0)) + 8 * STRIDE; /* 256: another line's turn */
}

/* >>K: the field's lowest bit, and codes times 2^bit. */
template <int W> TKVCU_DEVICE constexpr int tkvcu_bit(int p) { return W == 8 ? 0 : W * p % 8; }

template <int W, int P> TKVCU_DEVICE uint32_t tkvcu_field(const tkvcu_tile<W> &x, int i) {
    const int v = (int)tkvcu_tile<W>::n * P / 4;
    return W == 8 ? x.word[v][i] : x.word[v][i] & (((1u << W % 8) - 1u) * 0x01010101u << tkvcu_bit<W>(P));
}

/* >>V: words i of planes 0 .. 3, codes times 2^(tkvcu_v_bit). */
TKVCU_DEVICE constexpr int tkvcu_v_bit(int width, int plane) {
    return width == 1 || width == 3 ? plane : width == 2 ? plane % 2 * 2 : 0;
}

template <int W> struct tkvcu_v_tile {
    enum { wide = W == 1 || W == 3 ? 2 : W };
    tkvcu_tile<wide> codes; /* of 3 bits, the lower two */
    tkvcu_tile<1> tops;     /* of 1 and 3 bits, for which bits 0 .. 3 are to be at 2 .. 5 */
};

template <int W> TKVCU_DEVICE void tkvcu_planes(const tkvcu_v_tile<W> &x, int i, uint32_t plane[4]) {
    const uint32_t low = W == 1 ? x.tops.word[0][i] : x.codes.word[0][i];
    if constexpr (W == 1) {
        plane[0] = low & 0x01010101u;
        plane[1] = low & 0x02020202u;
        plane[2] = low & 0x04040404u;
        plane[3] = low & 0x08080808u;
    } else if constexpr (W == 2) {
        plane[0] = low & 0x03030303u;
        plane[1] = low & 0x0c0c0c0cu;
        plane[2] = low >> 4 & 0x03030303u;
        plane[3] = low >> 4 & 0x0c0c0c0cu;
    } else if constexpr (W == 3) { /* top bits stand two bits up: those of plane p above bits p and p + 1 */
        const uint32_t top = x.tops.word[0][i];
        plane[0] = (low & 0x03030303u) | (top & 0x04040404u);
        plane[1] = (low >> 1 & 0x06060606u) | (top & 0x08080808u);
        plane[2] = (low >> 2 & 0x0c0c0c0cu) | (top & 0x10101010u);
        plane[3] = (low >> 3 & 0x18181818u) | (top & 0x20202020u);
    } else if constexpr (W == 4) {
        plane[0] = low & 0x0f0f0f0fu;
        plane[1] = low >> 4 & 0x0f0f0f0fu;
        plane[2] = x.codes.word[1][i] & 0x0f0f0f0fu;
        plane[3] = x.codes.word[1][i] >> 4 & 0x0f0f0f0fu;
    } else {
        int p;
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) plane[p] = x.codes.word[p][i];
    }
}

/* Where a lane's words of slab 0 of V lie in shared memory: of tiles 64 and 128 bytes apart, of the 1-bit part
 * (before the bytes that it begins at, a multiple of 512). */
struct tkvcu_v_at {
    tkvcu_at codes, narrow, wide, line;
};

/* Words of slab k of V; `tops`: where the vectors of the 1-bit part begin. */
template <int W>
TKVCU_DEVICE void tkvcu_fetch_v(tkvcu_v_tile<W> &x, const tkvcu_v_at &from, int tops, int k, int g, int t) {
    enum { wide = tkvcu_v_tile<W>::wide, stride = 32 * wide, n = tkvcu_tile<wide>::n };
    int v;
    TKVCU_UNROLL
    for (v = 0; v < n && W != 1; v++) {
        const tkvcu_at place =
            wide == 2   ? from.narrow ^ (k % 2 * 64u)
            : wide == 4 ? from.wide ^ (v * 64u)
                        : from.codes + tkvcu_place((uint32_t)(tkvcu_kept(t) * stride + 8 * g + 64 * v));
        const tkvcu_words w = tkvcu_read_words(place + (tkvcu_at)(k * 4 * stride));
        x.codes.word[v][0] = w.x;
        x.codes.word[v][1] = w.y;
    }
    if (W == 1 || W == 3) {
        const tkvcu_words w = tkvcu_read_words((from.line ^ (k % 4 * 32u)) + (tkvcu_at)(tops + 128 * k));
        x.tops.word[0][0] = tkvcu_rotate(w.x, t % 2 * 4 - (W == 3 ? 2 : 0));
        x.tops.word[0][1] = tkvcu_rotate(w.y, t % 2 * 4 - (W == 3 ? 2 : 0));
    }
}

TKVCU_DEVICE tkvcu_v_at tkvcu_v_at_of(tkvcu_at codes, int g, int t) {
    tkvcu_v_at x;
    x.codes = codes;
    x.narrow = codes + tkvcu_place((uint32_t)(64 * t + 8 * g));
    x.wide = codes + tkvcu_place((uint32_t)(128 * t + 8 * g));
    x.line = codes + (tkvcu_at)(t / 2 * 64 + 8 * g);
    return x;
}

/* >>pairs: R formats with 3 bits for two channels (formats/r.h). A code is looked up in a table of bytes: the
 * point's coordinates in units of 1/64. Two planes at a time: their codes are the nibbles of a byte. */
#define TKVCU_PAIR_UNIT 0.015625f

TKVCU_DEVICE tkvcu_words tkvcu_pair_points(int second) {
    tkvcu_words x;
    x.x = second ? 0xb24ee51bu : 0x4eb2e51bu;
    x.y = second ? 0xe081207fu : 0x81e07f20u;
    return x;
}

/* Codes of planes P and P + 1 (0 or 2) of word i: nibbles of the bytes. */
template <int P> TKVCU_DEVICE uint32_t tkvcu_pair_codes(const tkvcu_v_tile<3> &x, int i) {
    const uint32_t low = x.codes.word[0][i], top = x.tops.word[0][i];
    return (low >> 2 * P & 0x03030303u) | ((P ? low >> 2 : low << 2) & 0x30303030u) |
           ((P ? top >> 2 : top) & 0x04040404u) | ((P ? top << 1 : top << 3) & 0x40404040u);
}

/* Their first or second channels as a first operand: k are byte 0 of both planes, byte 1 of both, and behind
 * 16 bytes 2 and 3. tkvcu_pair_weights: the second operand that goes with it, of one whose k are bytes of
 * plane after plane. */
TKVCU_DEVICE void tkvcu_pair_fragment(const uint32_t code[2], tkvcu_words points, uint32_t a[4]) {
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        a[i] = tkvcu_prmt(points.x, points.y, code[i]);
        a[2 + i] = tkvcu_prmt(points.x, points.y, code[i] >> 16);
    }
}

TKVCU_DEVICE void tkvcu_pair_weights(const uint32_t b[2], uint32_t turned[2]) {
    turned[0] = tkvcu_prmt(b[0], b[1], 0x5140);
    turned[1] = tkvcu_prmt(b[0], b[1], 0x7362);
}

#endif /* TKVCU_UNPACK_H */
