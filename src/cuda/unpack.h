/*
 * unpack.h - from the codes of a tile (core/tile.h) to the first operand of a warp's byte product: 16 rows, 32 k.
 *
 * Each byte of a 64-byte vector holds one field per plane. A 32-bit word is four bytes, the reduced indices r of
 * core/tile.h. Lane 4 g + t loads words 2 g and 2 g + 1 of tile t. One mask extracts the four codes of a plane,
 * multiplied by 2^(bit of the field).
 *
 *     K: tile = 4 channels, word = token of a slab, plane = slab of 16 tokens.  Rows are tokens, k are channels.
 *     V: tile = 16 tokens, word = channel, plane and byte = token.              Rows are channels, k are tokens.
 *
 *     row g = word 2 g, row g + 8 = word 2 g + 1;   k = 4 t .. 4 t + 3: bytes of tile t;   k + 16: next slab (K),
 *     next plane (V)
 *
 * K: each plane has its own sum, so the factor of the field's bit is divided out at the end. Codes of 3, 5 and 6 bits
 * are two fields with separate sums: 2 + 1, 4 + 1, 4 + 2 bits.
 *
 * V: all planes add to one sum, so the two fields are merged first. Each plane keeps the bit position that needs the
 * fewest shifts, and the weights of its tokens are divided by that factor.
 *
 *     byte, 2 bits:  3 3 2 2 1 1 0 0      & 0x03 = code of plane 0, & 0x0c = 4 times the code of plane 1
 */
#ifndef TKVCU_UNPACK_H
#define TKVCU_UNPACK_H

#include "warp.h"

struct alignas(16) tkvcu_u32x4 {
    uint32_t x, y, z, w;
};

/* Swizzle: returns the place of byte `at` of a side in its slot of shared memory. The 32-byte quarters of a
 * 128-byte line are permuted by the line's number. Four lanes that read different tiles then use different
 * banks. */
TKVCU_DEVICE uint32_t tkvcu_swizzle(uint32_t at) { return at ^ (at >> 2 & 0x60u); }

TKVCU_DEVICE tkvcu_u32x2 tkvcu_load_u32x2(const uint8_t *slot, uint32_t place) {
    return *(const tkvcu_u32x2 *)(const void *)(slot + place);
}

TKVCU_DEVICE uint32_t tkvcu_load_u32(const uint8_t *slot, uint32_t place) {
    return *(const uint32_t *)(const void *)(slot + place);
}

/* A lane's words of a W-bit field of a tile: W is 1 (half a vector), 2, 4 or 8. */
template <int W> struct tkvcu_tile {
    enum { n = W < 4 ? 1 : W / 2 };
    uint32_t word[n][2];
};

/* A lane's cursor over slabs, two at a time. `codes` is the shared address of the codes, a multiple of 128.
 * Tiles are STRIDE bytes apart, and their W-bit field begins `from` bytes later. W = 1: two tiles share a
 * vector, so STRIDE is 32. */
template <int W, int STRIDE> struct tkvcu_cursor { tkvcu_address vector[2][tkvcu_tile<W>::n]; };

template <int W, int STRIDE>
TKVCU_DEVICE void tkvcu_start_cursor(tkvcu_cursor<W, STRIDE> &x, tkvcu_address codes, uint32_t from, int g,
                                     int t) {
    int v;
    if (STRIDE > 128) t = tkvcu_keep_in_register(t); /* rarely used: saves a register */
    from += (uint32_t)((W == 1 ? t / 2 * 64 : t * STRIDE) + 8 * g);
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::n; v++) {
        x.vector[0][v] = codes + tkvcu_swizzle(from + (uint32_t)(64 * v));
        if (STRIDE % 128 == 0)
            x.vector[1][v] = x.vector[0][v] + 4 * STRIDE; /* the swizzle repeats every 512 bytes */
        else if (STRIDE == 64) x.vector[1][v] = (x.vector[0][v] ^ 64u) + 4 * STRIDE;
        else x.vector[1][v] = codes + tkvcu_swizzle(from + (uint32_t)(4 * STRIDE + 64 * v));
    }
}

/* Loads the field of slab s (0 or 1) of the two. */
template <int W, int STRIDE>
TKVCU_DEVICE void tkvcu_load_tile(tkvcu_tile<W> &x, const tkvcu_cursor<W, STRIDE> &from, int s, int upper) {
    int v;
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::n; v++) {
        const tkvcu_u32x2 w = tkvcu_load_shared_u32x2(from.vector[s][v]);
        x.word[v][0] = W == 1 ? w.x >> upper : w.x;
        x.word[v][1] = W == 1 ? w.y >> upper : w.y;
    }
}

template <int W, int STRIDE> TKVCU_DEVICE void tkvcu_advance_cursor(tkvcu_cursor<W, STRIDE> &x) {
    int s, v;
    /* STRIDE 32: two slabs are 256 bytes, which changes the swizzle by 64 */
    TKVCU_UNROLL
    for (s = 0; s < 2; s++) TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::n; v++)
        x.vector[s][v] = (x.vector[s][v] ^ (STRIDE == 32 ? 64u : 0)) + 8 * STRIDE;
}

/* >>K. Returns the lowest bit of plane p's field. Codes stay multiplied by 2^bit. */
template <int W> TKVCU_DEVICE constexpr int tkvcu_k_field_bit(int p) { return W == 8 ? 0 : W * p % 8; }

template <int W, int P> TKVCU_DEVICE uint32_t tkvcu_mask_field(const tkvcu_tile<W> &x, int i) {
    const int v = (int)tkvcu_tile<W>::n * P / 4;
    return W == 8 ? x.word[v][i]
                  : x.word[v][i] & (((1u << W % 8) - 1u) * 0x01010101u << tkvcu_k_field_bit<W>(P));
}

/* >>V. Words i of planes 0 to 3; codes stay multiplied by 2^tkvcu_v_field_bit. */
TKVCU_DEVICE constexpr int tkvcu_v_field_bit(int width, int plane) {
    return width == 1 || width == 3 ? plane : width == 2 ? plane % 2 * 2 : 0;
}

template <int W> struct tkvcu_v_tile {
    enum { wide = W == 1 || W == 3 ? 2 : W };
    tkvcu_tile<wide> codes; /* width 3: the lower two bits */
    tkvcu_tile<1> tops;     /* widths 1 and 3; width 3: rotated so that bits 0 .. 3 are at 2 .. 5 */
};

template <int W> TKVCU_DEVICE void tkvcu_split_planes(const tkvcu_v_tile<W> &x, int i, uint32_t plane[4]) {
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
        /* top bits are 2 bits higher: those of plane p are above bits p and p + 1 */
    } else if constexpr (W == 3) {
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

/* A lane's shared addresses in slab 0 of V: of tiles 64 and 128 bytes apart, and of the 1-bit field. `line` does
 * not include the start of the 1-bit field, a multiple of 512. */
struct tkvcu_v_addresses {
    tkvcu_address codes, narrow, wide, line;
};

/* Loads words of slab k of V. `tops` is the offset of the 1-bit vectors. */
template <int W>
TKVCU_DEVICE void tkvcu_load_v_words(tkvcu_v_tile<W> &x, const tkvcu_v_addresses &from, int tops, int k,
                                     int g, int t) {
    enum { wide = tkvcu_v_tile<W>::wide, stride = 32 * wide, n = tkvcu_tile<wide>::n };
    int v;
    TKVCU_UNROLL
    for (v = 0; v < n && W != 1; v++) {
        const tkvcu_address place =
            wide == 2 ? from.narrow ^ (k % 2 * 64u)
            : wide == 4
                ? from.wide ^ (v * 64u)
                : from.codes + tkvcu_swizzle((uint32_t)(tkvcu_keep_in_register(t) * stride + 8 * g + 64 * v));
        const tkvcu_u32x2 w = tkvcu_load_shared_u32x2(place + (tkvcu_address)(k * 4 * stride));
        x.codes.word[v][0] = w.x;
        x.codes.word[v][1] = w.y;
    }
    if (W == 1 || W == 3) {
        const tkvcu_u32x2 w =
            tkvcu_load_shared_u32x2((from.line ^ (k % 4 * 32u)) + (tkvcu_address)(tops + 128 * k));
        x.tops.word[0][0] = tkvcu_rotate_bits(w.x, t % 2 * 4 - (W == 3 ? 2 : 0));
        x.tops.word[0][1] = tkvcu_rotate_bits(w.y, t % 2 * 4 - (W == 3 ? 2 : 0));
    }
}

TKVCU_DEVICE tkvcu_v_addresses tkvcu_find_v_addresses(tkvcu_address codes, int g, int t) {
    tkvcu_v_addresses x;
    x.codes = codes;
    x.narrow = codes + tkvcu_swizzle((uint32_t)(64 * t + 8 * g));
    x.wide = codes + tkvcu_swizzle((uint32_t)(128 * t + 8 * g));
    x.line = codes + (tkvcu_address)(t / 2 * 64 + 8 * g);
    return x;
}

/* >>pairs. R formats with a 3-bit code for two channels (formats/r.h). A table of bytes maps the code to the
 * coordinates of a point, in units of 1/64. Two planes are looked up at a time: their codes are the nibbles of a
 * byte. */
#define TKVCU_PAIR_UNIT 0.015625f

TKVCU_DEVICE tkvcu_u32x2 tkvcu_get_pair_table(int second) {
    tkvcu_u32x2 x;
    x.x = second ? 0xb24ee51bu : 0x4eb2e51bu;
    x.y = second ? 0xe081207fu : 0x81e07f20u;
    return x;
}

/* Returns the codes of planes P and P + 1 (P is 0 or 2) of word i, as nibbles of the bytes. */
template <int P> TKVCU_DEVICE uint32_t tkvcu_merge_pair_codes(const tkvcu_v_tile<3> &x, int i) {
    const uint32_t low = x.codes.word[0][i], top = x.tops.word[0][i];
    return (low >> 2 * P & 0x03030303u) | ((P ? low >> 2 : low << 2) & 0x30303030u) |
           ((P ? top >> 2 : top) & 0x04040404u) | ((P ? top << 1 : top << 3) & 0x40404040u);
}

/* Looks up the first or second channels of the pairs, as a first operand. Its k are byte 0 of both planes, byte
 * 1 of both, and after 16 bytes 2 and 3. tkvcu_reorder_pair_weights permutes a second operand, ordered plane by
 * plane, to match. */
TKVCU_DEVICE void tkvcu_look_up_pairs(const uint32_t code[2], tkvcu_u32x2 points, uint32_t a[4]) {
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        a[i] = tkvcu_prmt(points.x, points.y, code[i]);
        a[2 + i] = tkvcu_prmt(points.x, points.y, code[i] >> 16);
    }
}

TKVCU_DEVICE void tkvcu_reorder_pair_weights(const uint32_t b[2], uint32_t reordered[2]) {
    reordered[0] = tkvcu_prmt(b[0], b[1], 0x5140);
    reordered[1] = tkvcu_prmt(b[0], b[1], 0x7362);
}

#endif /* TKVCU_UNPACK_H */
