/*
 * unpack.h - from the codes of a tile (core/tile.h) to the first operand of a warp's byte product: 16 rows, 32 k.
 *
 * A tile is vectors of 64 bytes. Each byte of a vector holds fields of one or more planes. A 32-bit word is four bytes,
 * the reduced indices r of core/tile.h. Lane 4 g + t loads words 2 g and 2 g + 1 of tile t. Masks and shifts extract
 * the four codes of a plane.
 *
 *     K: tile = 4 channels, word = token of a slab, plane = slab of 16 tokens.  Rows are tokens, k are channels.
 *     V: tile = 16 tokens, word = channel, plane and byte = token.              Rows are channels, k are tokens.
 *
 *     row g = word 2 g, row g + 8 = word 2 g + 1;   k = 4 t .. 4 t + 3: bytes of tile t;   k + 16: next slab (K),
 *     next plane (V)
 *
 * The last vector of an odd width has only 32 bytes. Its fields are those of bytes j and j + 32. So lanes g and g + 4
 * load the same words, and shift the fields of half g / 4 to fixed bits.
 *
 * Codes stay multiplied by 2^(bit of their field), the bit that needs the fewest instructions. K has a sum per
 * plane, which is divided by this factor at the end. V has one sum for all planes, so the weights of a plane's tokens
 * are divided by the factor. This costs bits of the weights. V uses only bits 0 .. 3.
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
 * 128-byte line are permuted by the line's number. The 16 lanes that are served together read one quarter of each of
 * four tiles. Lanes that read different words of a bank wait for each other. Words of a bank, at most, by width:
 *
 *                      1   2   3   4   5   6   8
 *     swizzled         1   1   3   1   4   2   2       (on average over slabs: 2.5 with 3 bits, 3 with 5 bits)
 *     not swizzled     1   2   1   4   1   2   4
 *
 * No permutation that repeats every four lines is best for all widths. A V side has one width, and is not swizzled if
 * that is odd. A K side may have all widths, and is always swizzled. So conflicts remain in K with 3 and 5 bits, and
 * with 6 and 8 bits. */
TKVCU_DEVICE uint32_t tkvcu_swizzle(uint32_t at) { return at ^ (at >> 2 & 0x60u); }

TKVCU_DEVICE tkvcu_u32x2 tkvcu_load_u32x2(const uint8_t *slot, uint32_t place) {
    return *(const tkvcu_u32x2 *)(const void *)(slot + place);
}

TKVCU_DEVICE uint32_t tkvcu_load_u32(const uint8_t *slot, uint32_t place) {
    return *(const uint32_t *)(const void *)(slot + place);
}

/* A lane's words of a tile. */
template <int W> struct tkvcu_tile {
    enum { vectors = (W + 1) / 2 };
    uint32_t word[vectors][2];
    int half; /* whose fields the lane takes from the last vector of an odd width */
};

/* Tells whether vector v has only 32 bytes. */
TKVCU_DEVICE constexpr bool tkvcu_is_half(int width, int v) { return width % 2 && v == width / 2; }

/* Returns the offset of the lane's words in tile 0. */
TKVCU_DEVICE uint32_t tkvcu_find_words(int width, int v, int g) {
    return (uint32_t)(64 * v + 8 * (tkvcu_is_half(width, v) ? g % 4 : g));
}

/* Sets the words of vector v. The lane's fields of 1 bit move to bits 0 .. 3, of the top bits of 5 to bits 4 .. 7. */
template <int W>
TKVCU_DEVICE void tkvcu_set_words(tkvcu_tile<W> &x, int v, const tkvcu_u32x2 &words, int half) {
    const int moved = W != 3 && tkvcu_is_half(W, v);
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const uint32_t y = i ? words.y : words.x;
        x.word[v][i] = !moved ? y : W == 1 ? y >> 4 * half : y << (4 - 4 * half);
    }
    x.half = half;
}

/* Moves a field of each byte from bit From + Step * half to bit To, and clears the other bits. */
template <int From, int Bits, int To, int Step = 0>
TKVCU_DEVICE uint32_t tkvcu_move_field(uint32_t x, int half = 0) {
    constexpr uint32_t mask = ((1u << Bits) - 1u) * 0x01010101u << To;
    static_assert(From >= To || To - From >= Step, "one direction");
    if constexpr (From >= To) return x >> (From - To + Step * half) & mask;
    else return x << (To - From - Step * half) & mask;
}

/* Returns the codes of plane P in word i, multiplied by 2^B. */
template <int W, int P, int B> TKVCU_DEVICE uint32_t tkvcu_take_plane(const tkvcu_tile<W> &x, int i) {
    if constexpr (W == 8) {
        return x.word[P][i];
    } else if constexpr (W >= 4) {
        const uint32_t low = tkvcu_move_field<P % 2 * 4, 4, B>(x.word[P / 2][i]);
        if constexpr (W == 5) return low | tkvcu_move_field<4 + P, 1, B + 4>(x.word[2][i]);
        else if constexpr (W == 6) return low | tkvcu_move_field<2 * P, 2, B + 4>(x.word[2][i]);
        else return low;
    } else if constexpr (W == 3) {
        if constexpr (P < 2) return tkvcu_move_field<3 * P, 3, B>(x.word[0][i]);
        else if constexpr (P == 2) return tkvcu_move_field<0, 3, B, 3>(x.word[1][i], x.half);
        else
            return tkvcu_move_field<6, 2, B>(x.word[0][i]) |
                   tkvcu_move_field<6, 1, B + 2, 1>(x.word[1][i], x.half);
    } else {
        return tkvcu_move_field<W * P, W, B>(x.word[0][i]);
    }
}

/* >>K. Returns the bit of plane p's codes. */
TKVCU_DEVICE constexpr int tkvcu_k_bit(int width, int p) {
    return width == 8   ? 0
           : width == 6 ? p % 2 * 2
           : width == 5 ? p % 2 * 3
           : width == 4 ? p % 2 * 4
           : width == 3 ? (p == 3 ? 5 : 2 * p)
                        : 2 * p;
}

/* A lane's cursor over slabs, two at a time. `codes` is the shared address of the codes, a multiple of 128. Slabs
 * begin at a multiple of 128, too: `from` is the first one's. */
template <int W> struct tkvcu_cursor { tkvcu_address vector[2][tkvcu_tile<W>::vectors]; };

template <int W>
TKVCU_DEVICE void tkvcu_start_cursor(tkvcu_cursor<W> &x, tkvcu_address codes, uint32_t from, int g, int t) {
    int v;
    if (W > 4) t = tkvcu_keep_in_register(t); /* rarely used: saves a register */
    from += (uint32_t)(TKVI_TILE_BYTES(W) * t);
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++) {
        const uint32_t at = from + tkvcu_find_words(W, v, g);
        x.vector[0][v] = codes + tkvcu_swizzle(at);
        /* the swizzle repeats every 512 bytes, and changes by 64 after 256 */
        if (W % 2) x.vector[1][v] = codes + tkvcu_swizzle(at + 128 * W);
        else x.vector[1][v] = (x.vector[0][v] ^ (W % 4 * 32u)) + 128 * W;
    }
}

/* Loads the lane's words of slab s (0 or 1) of the two. */
template <int W>
TKVCU_DEVICE void tkvcu_load_tile(tkvcu_tile<W> &x, const tkvcu_cursor<W> &from, int s, int half) {
    int v;
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++)
        tkvcu_set_words(x, v, tkvcu_load_shared_u32x2(from.vector[s][v]), half);
}

template <int W> TKVCU_DEVICE void tkvcu_advance_cursor(tkvcu_cursor<W> &x) {
    int s, v;
    TKVCU_UNROLL
    for (s = 0; s < 2; s++) TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++)
        x.vector[s][v] = (x.vector[s][v] ^ (W % 2 * 64u)) + 256 * W;
}

/* >>V. Returns the bit of plane p's codes. */
TKVCU_DEVICE constexpr int tkvcu_v_bit(int width, int p) {
    return width == 1 ? p : width == 2 ? p % 2 * 2 : width == 3 && p == 1 ? 3 : 0;
}

template <int W> TKVCU_DEVICE void tkvcu_take_planes(const tkvcu_tile<W> &x, int i, uint32_t plane[4]) {
    plane[0] = tkvcu_take_plane<W, 0, tkvcu_v_bit(W, 0)>(x, i);
    plane[1] = tkvcu_take_plane<W, 1, tkvcu_v_bit(W, 1)>(x, i);
    plane[2] = tkvcu_take_plane<W, 2, tkvcu_v_bit(W, 2)>(x, i);
    plane[3] = tkvcu_take_plane<W, 3, tkvcu_v_bit(W, 3)>(x, i);
}

/* Shared addresses: the codes of V, and a lane's words in slab 0 with 2 and 4 bits. */
struct tkvcu_v_addresses {
    tkvcu_address codes, narrow, wide;
};

TKVCU_DEVICE tkvcu_v_addresses tkvcu_find_v_addresses(tkvcu_address codes, int g, int t) {
    tkvcu_v_addresses x;
    x.codes = codes;
    x.narrow = codes + tkvcu_swizzle((uint32_t)(64 * t + 8 * g));
    x.wide = codes + tkvcu_swizzle((uint32_t)(128 * t + 8 * g));
    return x;
}

/* Shared addresses of a lane's words in slab 0: of the first vector, and of the 32-byte one of an odd width. */
struct tkvcu_v_path {
    tkvcu_address first, half;
};

template <int W> TKVCU_DEVICE tkvcu_v_path tkvcu_find_v_path(const tkvcu_v_addresses &from, int g, int t) {
    tkvcu_v_path x = {0, 0};
    if (W == 2) {
        x.first = from.narrow;
    } else if (W == 4) {
        x.first = from.wide;
    } else {
        const uint32_t at = (uint32_t)(tkvcu_keep_in_register(t) * TKVI_TILE_BYTES(W));
        x.first = from.codes + (W % 2 ? at + 8 * (uint32_t)g : tkvcu_swizzle(at + 8 * (uint32_t)g));
        x.half = from.codes + at + tkvcu_find_words(W, W / 2, g);
    }
    return x;
}

/* Loads the lane's words of slab k of V. A tile of 8 bits has two lines, the first with an even number. */
template <int W>
TKVCU_DEVICE void tkvcu_load_v_tile(tkvcu_tile<W> &x, const tkvcu_v_path &from, int k, int half) {
    int v;
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++) {
        const tkvcu_address place = tkvcu_is_half(W, v) ? from.half
                                    : W == 2            ? from.first ^ (k % 2 * 64u)
                                             : (from.first ^ (v % 2 * 64u + v / 2 * 32u)) + v / 2 * 128u;
        tkvcu_set_words(x, v, tkvcu_load_shared_u32x2(place + (tkvcu_address)(k * 128 * W)), half);
    }
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
template <int P> TKVCU_DEVICE uint32_t tkvcu_merge_pair_codes(const tkvcu_tile<3> &x, int i) {
    return tkvcu_take_plane<3, P, 0>(x, i) | tkvcu_take_plane<3, P + 1, 4>(x, i);
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
