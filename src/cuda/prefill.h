/*
 * prefill.h - attention of more queries than attend.h takes. A key tile's codes are converted to fp16 once, for many
 * rows.
 *
 * Key tiles, their division into ranges and the slots of the workspace are those of attend.h, and combine.h merges
 * them. Rows are the queries of the query heads that share a KV head. A thread block has 64 MT rows, a warp 16 MT,
 * and gridDim.y thread blocks cover all rows. All rows of a thread block share the cost of unpacking a key tile.
 *
 *     global --cp.async--> raw bytes of K and V, during the products of the previous key tile
 *     codes, one word of a tile at a time -> fp16 tiles: K as [token][channel], V as [channel][token]
 *     S = Q K^T, 32 tokens at a time -> softmax in registers -> P = first operand -> O += P V
 *
 * Each tile is in units of a power of two, so fp16 can represent the values of any cache. The unit of K belongs to
 * the key tile. The unit of V belongs to the sums, and grows with them. Each row of queries has its own unit. Terms
 * that are equal for all tokens of a key tile (zeros of KIVI, means of A) are not part of K's tile. They are
 * multiplied by q separately, so that only the difference from them is rounded. A's outlier is a row of K's tile, and
 * has zeros of its own for channels without codes. Values of R stay rotated; combine.h rotates their sum back.
 */
#ifndef TKVCU_PREFILL_H
#define TKVCU_PREFILL_H

#include "append.h"
#include "combine.h"

#ifndef TKVCU_ON_CPU
#define TKVCU_UNROLL_2 _Pragma("unroll 2")
#else
#define TKVCU_UNROLL_2
#endif

#define TKVCU_DECODE_QUERIES 8 /* attend.h takes up to this many */
#define TKVCU_PREFILL_WARPS 4
#define TKVCU_PREFILL_THREADS (32 * TKVCU_PREFILL_WARPS)
#define TKVCU_PREFILL_MAX_ROWS 40960 /* rows of all thread blocks of a grid that the workspace allows */
#define TKVCU_STRIP 32 /* tokens whose scores are computed together, and exact tokens per copy */
#define TKVCU_EXPONENT_MIN (-110)
#define TKVCU_EXPONENT_NONE (-127) /* exponent of sums that are still empty */
/* weights are multiplied by 2^8: small ones stay normal fp16 numbers */
#define TKVCU_P_EXPONENT 8.0f

struct alignas(16) tkvcu_f16x8 { /* fp16 */
    uint32_t w[4];
};

struct tkvcu_slab { /* 16 channels of a coded side (pairs: 32), four tiles */
    int width;
    uint32_t at; /* offset in the side */
};

struct tkvcu_prefill_task {
    tkvcu_visible visible;
    int entry, head, section;
    int tile, left;            /* next key tile in the section; key tiles left in it */
    int region, version;       /* of the key range */
    int first, last;           /* key range: blocks, or groups of 16 exact rows */
    int next_place, end_place; /* in the list of all places */
    int group, all_rows;       /* query heads per KV head; rows of all thread blocks */
    int first_row, n_rows;     /* of this thread block */
};

template <int D, int MT> struct tkvcu_prefill_shared { /* shared memory of a thread block */
    uint16_t q[64 * MT * D];
    uint16_t k[64 * D], v[64 * D];
    uint8_t raw[2][68 * D];  /* 8-bit codes and KIVI's metadata, or 32 exact rows */
    uint16_t scale[2][128];  /* fp16; K by channel in the order of the side, V by [group][token] */
    uint16_t zero[2][128];   /* the same; K: in unit 1 */
    uint16_t zero_rest[D];   /* K: rounding error of zero */
    uint16_t code_offset[D]; /* K: added to a code before the scale */
    uint16_t outlier[D];     /* A: the outlier's values in the unit of K's tile, less the means */
    int outlier_slot;        /* of K's tile; TKVI_NO_OUTLIER: none */
    tkvcu_slab slab[2][D / 16];
    int coded; /* K: slabs that have codes */
    /* R with pairs: coordinates by code, plus 128; of the first and second channels */
    uint32_t pair_table[2][2];
    float q_unit[64 * MT];       /* by row: q was divided by it */
    float mean_product[64 * MT]; /* by row: q * static means, in the same unit */
    float outlier_zero[64 * MT]; /* by row: the outlier's term without codes, in the unit of K's tile */
    int query[64 * MT];          /* by row: position */
    float max_values[2][TKVCU_PREFILL_WARPS];
    int tail;
    tkvcu_side side[2];
    tkvcu_prefill_task task;
};

template <int D, int MT> struct tkvcu_row_partials { /* of a lane: rows g and g + 8 of each m-tile */
    float m[MT][2], l[MT][2];
    float o[MT][D / 8][4];
    int top; /* o is in units of 2^top */
};

/* Tokens that are loaded together. rows = 0: the key range is done. */
typedef struct tkvcu_strip {
    int at, key_tiles; /* in the region: blocks, or groups of 16 exact rows */
    int position, rows;
} tkvcu_strip;

TKVCU_DEVICE float tkvcu_exp2i(int e) {
    return tkvi_from_bits((uint32_t)(127 + tkvi_max(-126, tkvi_min(127, e))) << 23);
}

/* Swizzle: returns the offset of a 16-byte chunk in a row of a tile. 8 neighbour rows, and every second of 16
 * rows, use all banks. The pattern repeats every 16 rows. */
TKVCU_DEVICE int tkvcu_swizzle_row(int row, int chunk) { return 16 * (chunk ^ ((row ^ (row >> 3 & 1)) & 7)); }

/* >>codes to fp16 */
/* Returns 1024 + code as fp16: bytes 0 and 1, or 2 and 3. */
TKVCU_DEVICE uint32_t tkvcu_bytes_to_f16x2(uint32_t bytes, int second) {
    return tkvcu_prmt(bytes, 0x64646464u, second ? 0x4342 : 0x4140);
}

TKVCU_DEVICE uint32_t tkvcu_add_f16x2(uint32_t x, uint32_t y) { return tkvcu_hfma2(x, 0x3c003c00u, y); }

/* Unpacks words 2 g and 2 g + 1 of a tile. 16 lanes that are served together read 64 bytes of two neighbour tiles, or
 * 32. The bytes are not swizzled: two words of a bank with 3, 4, 5 and 8 bits, else one. */
template <int W> TKVCU_DEVICE void tkvcu_unpack_words(uint32_t code[2][4], const uint8_t *tile, int g) {
    tkvcu_tile<W> x;
    int v, i;
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++)
        tkvcu_set_words(x, v, tkvcu_load_u32x2(tile, tkvcu_find_words(W, v, g)), g / 4);
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        code[i][0] = tkvcu_take_plane<W, 0, 0>(x, i);
        code[i][1] = tkvcu_take_plane<W, 1, 0>(x, i);
        code[i][2] = tkvcu_take_plane<W, 2, 0>(x, i);
        code[i][3] = tkvcu_take_plane<W, 3, 0>(x, i);
    }
}

/* Unpacks words 2 g and 2 g + 1 of tile t of a slab. The codes of plane p are the bytes of code[..][p]. */
TKVCU_DEVICE void tkvcu_unpack_slab(uint32_t code[2][4], const tkvcu_slab &slab, const uint8_t *raw, int g,
                                    int t) {
    const uint8_t *tile = raw + slab.at + t * TKVI_TILE_BYTES(slab.width);
    switch (slab.width) {
    case 1: tkvcu_unpack_words<1>(code, tile, g); break;
    case 2: tkvcu_unpack_words<2>(code, tile, g); break;
    case 3: tkvcu_unpack_words<3>(code, tile, g); break;
    case 4: tkvcu_unpack_words<4>(code, tile, g); break;
    case 5: tkvcu_unpack_words<5>(code, tile, g); break;
    case 6: tkvcu_unpack_words<6>(code, tile, g); break;
    default: tkvcu_unpack_words<8>(code, tile, g); break;
    }
}

/* Converts K. Warps take slabs in turn. A lane converts two tokens of each plane, and the four channels of a
 * tile. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_expand_k(tkvcu_prefill_shared<D, MT> &s, int warp, int g, int t) {
    uint8_t *tile = (uint8_t *)s.k;
    int n, i, p;
    TKVCU_ROLL
    for (n = warp; n < s.coded; n += TKVCU_PREFILL_WARPS) {
        const int channel = 16 * n + 4 * t;
        const tkvcu_u32x2 scale = tkvcu_load_u32x2((const uint8_t *)(s.scale[0] + channel), 0);
        const tkvcu_u32x2 fine = tkvcu_load_u32x2((const uint8_t *)(s.code_offset + channel), 0);
        uint32_t code[2][4];
        tkvcu_unpack_slab(code, s.slab[0][n], s.raw[0], g, t);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            const int row = 2 * g + i;
            uint8_t *to = tile + row * (2 * D) + tkvcu_swizzle_row(row, 2 * n + t / 2) + t % 2 * 8;
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) {
                const uint32_t x = tkvcu_add_f16x2(tkvcu_bytes_to_f16x2(code[i][p], 0), 0xe400e400u);
                const uint32_t y = tkvcu_add_f16x2(tkvcu_bytes_to_f16x2(code[i][p], 1), 0xe400e400u);
                tkvcu_u32x2 out;
                out.x = tkvcu_hmul2(tkvcu_add_f16x2(x, fine.x), scale.x);
                out.y = tkvcu_hmul2(tkvcu_add_f16x2(y, fine.y), scale.y);
                *(tkvcu_u32x2 *)(void *)(to + 16 * p * (2 * D)) = out;
            }
        }
        if (s.outlier_slot == TKVI_NO_OUTLIER) continue;
        __syncwarp();
        if (g == 0) {
            const int row = s.outlier_slot;
            *(tkvcu_u32x2 *)(void *)(tile + row * (2 * D) + tkvcu_swizzle_row(row, 2 * n + t / 2) +
                                     t % 2 * 8) = tkvcu_load_u32x2((const uint8_t *)(s.outlier + channel), 0);
        }
    }
}

/* Makes the selector of a table look-up from the codes 0 .. 7 in a word's bytes. */
TKVCU_DEVICE uint32_t tkvcu_make_selector(uint32_t bytes) {
    const uint32_t x = bytes | bytes >> 4;
    return tkvcu_prmt(x, x, 0x0020);
}

/* Converts V. A lane converts two channels of a slab and the 16 tokens of a tile. With pairs, a code gives two
 * channels. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_expand_v(tkvcu_prefill_shared<D, MT> &s, int warp, int g, int t) {
    const tkvcu_side &side = s.side[1];
    const int pairs = side.kind == TKVCU_R && side.half_bits == 3, rotated = side.kind == TKVCU_R;
    const int slabs = pairs ? D / 32 : D / 16;
    /* subtracted from a code's fp16; R: codes are doubled here, so the middle is an integer */
    const float off = pairs ? 1152.0f : rotated ? (float)(1023 + (1 << side.half_bits / 2)) : 1024.0f;
    const uint32_t minus = tkvcu_pack_f16x2(-off, -off);
    uint8_t *tile = (uint8_t *)s.v;
    int n, i, p, h;
    TKVCU_ROLL
    for (n = warp; n < slabs; n += TKVCU_PREFILL_WARPS) {
        const int group = !rotated && n >= 4; /* 64 channels per group */
        const uint16_t *scale = s.scale[1] + 64 * group + 16 * t, *zero = s.zero[1] + 64 * group + 16 * t;
        uint32_t code[2][4];
        tkvcu_unpack_slab(code, s.slab[1][n], s.raw[1], g, t);
        if (rotated && !pairs) {
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) {
                code[0][p] <<= 1;
                code[1][p] <<= 1;
            }
        }
        TKVCU_ROLL
        for (h = 0; h <= pairs; h++) TKVCU_UNROLL
        for (p = 0; p < 4; p += 2) { /* eight tokens */
            const tkvcu_f16x8 by = *(const tkvcu_f16x8 *)(const void *)(scale + 4 * p);
            const tkvcu_f16x8 plus = *(const tkvcu_f16x8 *)(const void *)(zero + 4 * p);
            TKVCU_UNROLL
            for (i = 0; i < 2; i++) {
                const int row = 2 * g + i;
                uint8_t *to = tile + 128 * ((pairs ? 32 : 16) * n + 16 * h + row);
                tkvcu_f16x8 out;
                int k;
                TKVCU_UNROLL
                for (k = 0; k < 4; k++) {
                    uint32_t bytes = code[i][p + k / 2];
                    if (pairs)
                        bytes =
                            tkvcu_prmt(s.pair_table[h][0], s.pair_table[h][1], tkvcu_make_selector(bytes));
                    out.w[k] = tkvcu_hfma2(tkvcu_add_f16x2(tkvcu_bytes_to_f16x2(bytes, k % 2), minus),
                                           by.w[k], plus.w[k]);
                }
                *(tkvcu_f16x8 *)(void *)(to + tkvcu_swizzle_row(row, 2 * t + p / 2)) = out;
            }
        }
    }
}

/* Multiplies two exact values by a power of two. Returns fp16. */
TKVCU_DEVICE uint32_t tkvcu_rescale_f16x2(uint32_t x, int bf16, float by) {
    if (bf16) return tkvcu_pack_f16x2(tkvcu_bf16_lo(x) * by, tkvcu_bf16_hi(x) * by);
    return by == 1.0f ? x : tkvcu_pack_f16x2(tkvcu_f16_lo(x) * by, tkvcu_f16_lo(x >> 16) * by);
}

/* Converts exact rows. Missing rows become zeros: their weights are 0, and 0 * NaN would be NaN. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_expand_exact(tkvcu_prefill_shared<D, MT> &s, int which, int rows, float by, int tid) {
    const int bf16 = s.side[which].bf16;
    const uint8_t *raw = s.raw[which];
    uint8_t *tile = (uint8_t *)(which ? s.v : s.k);
    int i, k;
    TKVCU_ROLL
    for (i = tid; i < TKVCU_STRIP * D / 8; i += TKVCU_PREFILL_THREADS) {
        tkvcu_f16x8 x = {{0, 0, 0, 0}}, y = {{0, 0, 0, 0}};
        if (!which) {
            const int row = i / (D / 8), chunk = i % (D / 8);
            if (row < rows) x = *(const tkvcu_f16x8 *)(const void *)(raw + row * (2 * D) + 16 * chunk);
            TKVCU_UNROLL
            for (k = 0; k < 4; k++) x.w[k] = tkvcu_rescale_f16x2(x.w[k], bf16, by);
            *(tkvcu_f16x8 *)(void *)(tile + row * (2 * D) + tkvcu_swizzle_row(row, chunk)) = x;
        } else if (i < TKVCU_STRIP * D / 16) { /* two channels of eight tokens are transposed */
            const int row = 2 * (i % (D / 2)), chunk = i / (D / 2);
            TKVCU_UNROLL
            for (k = 0; k < 4; k++) {
                const int token = 8 * chunk + 2 * k;
                const uint8_t *at = raw + token * (2 * D) + 2 * row;
                uint32_t a = token < rows ? *(const uint32_t *)(const void *)at : 0;
                uint32_t b = token + 1 < rows ? *(const uint32_t *)(const void *)(at + 2 * D) : 0;
                a = tkvcu_rescale_f16x2(a, bf16, by);
                b = tkvcu_rescale_f16x2(b, bf16, by);
                x.w[k] = tkvcu_prmt(a, b, 0x5410);
                y.w[k] = tkvcu_prmt(a, b, 0x7632);
            }
            *(tkvcu_f16x8 *)(void *)(tile + row * 128 + tkvcu_swizzle_row(row, chunk)) = x;
            *(tkvcu_f16x8 *)(void *)(tile + (row + 1) * 128 + tkvcu_swizzle_row(row + 1, chunk)) = y;
        }
    }
}

/* >>scales of a key tile */
/* Tells whether the unit of a side depends on its values. */
TKVCU_DEVICE int tkvcu_is_measured(const tkvcu_side &side) {
    return side.kind == TKVCU_KIVI || (side.kind == TKVCU_EXACT && side.bf16);
}

/* Returns the exponent of the unit that keeps a side's values below 2^15. Logarithmic scales are below 2^top.
 * Their factors are below 2^6 (A) or 2^3 (R). fp16 sides need no unit. */
TKVCU_DEVICE int tkvcu_find_exponent(const tkvcu_side &side, float most) {
    if (side.kind == TKVCU_A) return side.top - 9;
    if (side.kind == TKVCU_R) return side.top - 12;
    if (!tkvcu_is_measured(side)) return 0;
    return tkvi_max((int)(tkvi_bits(most) >> 23) - 127 - 14, TKVCU_EXPONENT_MIN);
}

TKVCU_DEVICE float tkvcu_load_f16(const uint8_t *p) {
    return tkvcu_f16_lo(*(const uint16_t *)(const void *)p);
}

/* Scale and zero of this thread's channel of K or token of V, and a bound of the values. */
struct tkvcu_side_scale {
    float scale, zero, most;
};

template <int D, int MT>
TKVCU_DEVICE tkvcu_side_scale tkvcu_load_side_scale(tkvcu_prefill_shared<D, MT> &s, int which, int rows,
                                                    int tid) {
    const tkvcu_side &side = s.side[which];
    const uint8_t *meta = s.raw[which] + (side.kind == TKVCU_EXACT ? 0 : side.code_bytes);
    tkvcu_side_scale x = {0.0f, 0.0f, 0.0f};
    int i;
    if (side.kind == TKVCU_KIVI && tid < D) { /* tokens times groups of V = D */
        const float codes = (float)((1 << side.half_bits / 2) - 1);
        x.scale = tkvcu_load_f16(meta + 2 * tid);
        x.zero = tkvcu_load_f16(meta + 2 * D + 2 * tid);
        x.most = x.scale * codes + (which ? fabsf(x.zero) : 0.0f);
        if (!which) { /* K: zero of the middle code */
            s.code_offset[tid] = (uint16_t)tkvcu_pack_f16x2(-0.5f * codes, 0.0f);
            x.zero = fmaf(0.5f * codes, x.scale, x.zero);
        }
    } else if (side.kind == TKVCU_A && tid < D) {
        const int width = s.slab[0][tid / 16].width, low = meta[tid], high = meta[D + tid];
        const float fine =
            (float)tkvi_signed_byte(high) / (float)tkvi_a_unit[width] - 0.5f * (float)((1 << width) - 1);
        x.scale = tkvi_log_value(low, side.top);
        s.code_offset[tid] = (uint16_t)tkvcu_pack_f16x2(fine, 0.0f);
        x.zero = tkvcu_f16_lo((uint32_t)(low | high << 8)); /* channel without codes: its mean */
    } else if (side.kind == TKVCU_R && tid < TKVI_BLOCK) {
        x.scale = tkvi_log_value(meta[tid], side.top) * (side.half_bits == 3 ? 1.0f / 64.0f : 0.5f);
    } else if (side.kind == TKVCU_EXACT && side.bf16) {
        int most = 0;
        TKVCU_ROLL
        for (i = tid; i < rows * D; i += TKVCU_PREFILL_THREADS)
            most = tkvi_max(most, ((const uint16_t *)(const void *)s.raw[which])[i] & 0x7fff);
        x.most = tkvcu_bf16_lo((uint32_t)most);
    }
    return x;
}

/* Reads the outlier of K's side, in units of 1 / by. All lanes of a warp call it. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_load_outlier_row(tkvcu_prefill_shared<D, MT> &s, float by, int tid) {
    const tkvcu_side &side = s.side[0];
    const uint8_t *row = s.raw[0] + side.code_bytes + 2 * D;
    int head = TKVI_NO_OUTLIER;
    if (side.kind == TKVCU_A) {
        head = tkvcu_load_outlier_head(row, tid % 32);
        if (tid < D)
            s.outlier[tid] = (uint16_t)tkvcu_pack_f16x2(
                by * tkvi_outlier_value(row[tid], 0.5f * tkvi_log_value(head >> 7, side.top), 0.0f), 0.0f);
    }
    if (tid == 0) s.outlier_slot = tkvi_min(head & 127, TKVI_NO_OUTLIER);
}

/* Computes the fp16 scales: in units of 2^x for K, where x is returned, and of 2^u.top for V. u.top grows if
 * needed. All threads call it. */
template <int D, int MT>
TKVCU_DEVICE int tkvcu_prepare_scales(tkvcu_prefill_shared<D, MT> &s, tkvcu_row_partials<D, MT> &u, int rows,
                                      int tid) {
    const tkvcu_side_scale k = tkvcu_load_side_scale(s, 0, rows, tid),
                           v = tkvcu_load_side_scale(s, 1, rows, tid);
    float most[2] = {k.most, v.most};
    int which, i, c, mt, exponent[2];
    if (tkvcu_is_measured(s.side[0]) || tkvcu_is_measured(s.side[1])) {
        TKVCU_UNROLL
        for (which = 0; which < 2; which++) {
            TKVCU_UNROLL
            for (i = 1; i < 32; i *= 2)
                most[which] = fmaxf(most[which], __shfl_xor_sync(0xffffffffu, most[which], i));
            if (tid % 32 == 0) s.max_values[which][tid / 32] = most[which];
        }
        __syncthreads();
        TKVCU_UNROLL
        for (which = 0; which < 2; which++) TKVCU_UNROLL
        for (i = 0; i < TKVCU_PREFILL_WARPS; i++) most[which] = fmaxf(most[which], s.max_values[which][i]);
    }
    exponent[0] = tkvcu_find_exponent(s.side[0], most[0]);
    if (tkvcu_is_measured(s.side[0]))
        exponent[0] = tkvi_max(exponent[0],
                               -40); /* smaller units are not needed in fp16; zero * 2^40 must stay finite */
    tkvcu_load_outlier_row(s, tkvcu_exp2i(-exponent[0]), tid);
    exponent[1] = tkvcu_find_exponent(s.side[1], most[1]);
    if (exponent[1] > u.top) {
        const float by = tkvcu_exp2i(u.top - exponent[1]);
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (c = 0; c < D / 8; c++) TKVCU_UNROLL
        for (i = 0; i < 4; i++) u.o[mt][c][i] *= by;
        u.top = exponent[1];
    }
    if (tid < D) {
        const float k_by = tkvcu_exp2i(-exponent[0]), v_by = tkvcu_exp2i(-u.top);
        const uint32_t zero = tkvcu_pack_f16x2(k.zero, 0.0f);
        s.scale[0][tid] = (uint16_t)tkvcu_pack_f16x2(k.scale * k_by, 0.0f);
        s.scale[1][tid] = (uint16_t)tkvcu_pack_f16x2(v.scale * v_by, 0.0f);
        s.zero[0][tid] = (uint16_t)zero;
        s.zero[1][tid] = (uint16_t)tkvcu_pack_f16x2(v.zero * v_by, 0.0f);
        s.zero_rest[tid] = (uint16_t)tkvcu_pack_f16x2(k.zero - tkvcu_f16_lo(zero), 0.0f);
    }
    return exponent[0];
}

/* >>products */
/* Loads second operands of two n-tiles: rows first .. first + 15 of a tile, k = 16 step and on. */
TKVCU_DEVICE void tkvcu_load_operands(uint32_t b[4], const uint16_t *tile, int stride, int first, int step,
                                      int lane) {
    const int row = lane % 8 + lane / 16 * 8;
    tkvcu_ldmatrix_x4(b, (const uint8_t *)tile + first * stride + row * stride +
                             tkvcu_swizzle_row(row, 2 * step + lane / 8 % 2));
}

/* Loads first operands: rows of q, channels 16 step and on. */
template <int D>
TKVCU_DEVICE void tkvcu_load_q_operand(uint32_t a[4], const uint16_t *q, int first, int step, int lane) {
    const int row = lane % 16;
    tkvcu_ldmatrix_x4(a, (const uint8_t *)q + first * (2 * D) + row * (2 * D) +
                             tkvcu_swizzle_row(row, 2 * step + lane / 16));
}

TKVCU_DEVICE uint32_t tkvcu_load_f16x2(const uint16_t *p) { return *(const uint32_t *)(const void *)p; }

/* Multiplies terms that are equal for all tokens of a key tile, in the unit of K's tile. Odd columns of the second
 * operand are the outlier, for channels without codes. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_multiply_zeros(tkvcu_prefill_shared<D, MT> &s, float zeros[MT][2], int first,
                                       float by, int lane) {
    const int coded = s.side[0].kind != TKVCU_EXACT, from = s.side[0].kind == TKVCU_KIVI ? 0 : s.coded;
    const int odd = s.side[0].kind == TKVCU_A && lane / 4 % 2;
    float sum[MT][4];
    int c, mt, i;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) sum[mt][0] = sum[mt][1] = sum[mt][2] = sum[mt][3] = 0.0f;
    TKVCU_ROLL
    for (c = from; coded && c < D / 16; c++) {
        const int at = 16 * c + 2 * (lane % 4);
        const uint16_t *zero = odd ? s.outlier : s.zero[0];
        const uint32_t b[2] = {tkvcu_load_f16x2(zero + at), tkvcu_load_f16x2(zero + at + 8)};
        const uint32_t rest[2] = {odd ? 0 : tkvcu_load_f16x2(s.zero_rest + at),
                                  odd ? 0 : tkvcu_load_f16x2(s.zero_rest + at + 8)};
        uint32_t a[4];
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) {
            tkvcu_load_q_operand<D>(a, s.q, first + 16 * mt, c, lane);
            tkvcu_mma_f16(sum[mt], a, b);
            tkvcu_mma_f16(sum[mt], a, rest);
        }
    }
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const int row = first + 16 * mt + 8 * i + lane / 4;
        zeros[mt][i] = (sum[mt][2 * i] + s.mean_product[row]) * by;
        if (lane % 4 == 0) s.outlier_zero[row] = fmaf(s.mean_product[row], by, sum[mt][2 * i + 1]);
    }
    __syncwarp();
}

/* Updates the running maxima of the rows. They move only if one grows by more than 4. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_update_row_max(tkvcu_row_partials<D, MT> &u, float most[MT][2]) {
    int mt, i, c, grew = 0;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        float x = most[mt][i];
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        most[mt][i] = x;
        grew |= x > u.m[mt][i] + 4.0f;
    }
    if (!__any_sync(0xffffffffu, grew)) return;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const float m = fmaxf(u.m[mt][i], most[mt][i]), by = tkvcu_ex2(u.m[mt][i] - m);
        u.m[mt][i] = m;
        u.l[mt][i] *= by;
        TKVCU_UNROLL
        for (c = 0; c < D / 8; c++) {
            u.o[mt][c][2 * i] *= by;
            u.o[mt][c][2 * i + 1] *= by;
        }
    }
}

/* Attends to the tokens in the tiles, for the rows of this warp. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_attend_strip(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s,
                                     tkvcu_row_partials<D, MT> &u, const tkvcu_strip &strip, int exponent,
                                     int warp, int lane) {
    const tkvcu_prefill_task &task = s.task;
    const int first = 16 * MT * warp, g = lane / 4, t = lane % 4;
    const int oldest = s.query[0], newest = s.query[task.n_rows - 1];
    const int masked = strip.position + strip.rows - 1 > oldest || strip.rows % TKVCU_STRIP ||
                       (j.window && strip.position <= newest - j.window);
    const float units = tkvcu_exp2i(exponent);
    const int slabs = s.coded;
    float zeros[MT][2];
    int at, c, n, mt, i;
    tkvcu_multiply_zeros(s, zeros, first, tkvcu_exp2i(-exponent), lane);
    TKVCU_ROLL
    for (at = 0; at < strip.rows; at += TKVCU_STRIP) {
        float x[MT][TKVCU_STRIP / 8][4], most[MT][2], logit_scale[MT][2];
        uint32_t p[TKVCU_STRIP / 16][MT][4]; /* weights as first operands */
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (n = 0; n < TKVCU_STRIP / 8; n++) TKVCU_UNROLL
        for (i = 0; i < 4; i++) x[mt][n][i] = zeros[mt][i / 2];
        if (at <= s.outlier_slot && s.outlier_slot < at + TKVCU_STRIP) {
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
            for (n = 0; n < TKVCU_STRIP / 8; n++) TKVCU_UNROLL
            for (i = 0; i < 4; i++)
                if (at + 8 * n + 2 * t + i % 2 == s.outlier_slot)
                    x[mt][n][i] = s.outlier_zero[first + 16 * mt + 8 * (i / 2) + g];
        }
        TKVCU_UNROLL_2
        for (c = 0; c < slabs; c++) {
            uint32_t a[MT][4], b[4];
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) tkvcu_load_q_operand<D>(a[mt], s.q, first + 16 * mt, c, lane);
            TKVCU_UNROLL
            for (n = 0; n < TKVCU_STRIP / 8; n += 2) {
                tkvcu_load_operands(b, s.k, 2 * D, at + 8 * n, c, lane);
                TKVCU_UNROLL
                for (mt = 0; mt < MT; mt++) {
                    tkvcu_mma_f16(x[mt][n], a[mt], b);
                    tkvcu_mma_f16(x[mt][n + 1], a[mt], b + 2);
                }
            }
        }
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (i = 0; i < 2; i++) /* not 0: 0 * -inf would be NaN */
            logit_scale[mt][i] = fmaxf(units * s.q_unit[first + 16 * mt + 8 * i + g], 1.2e-38f);
        if (j.softcap > 0.0f) {
            const float cap = fabsf(j.scale) / j.softcap;
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
            for (n = 0; n < TKVCU_STRIP / 8; n++) TKVCU_UNROLL
            for (i = 0; i < 4; i++) x[mt][n][i] = tanhf(x[mt][n][i] * (logit_scale[mt][i / 2] * cap));
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) logit_scale[mt][0] = logit_scale[mt][1] = 1.0f;
        }
        if (masked) {
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
            for (i = 0; i < 2; i++) {
                const int query =
                    s.query[first + 16 * mt + 8 * i + g] - strip.position - at; /* index among the tokens */
                const int last = tkvi_min(query, strip.rows - at - 1),
                          before = query - (j.window ? j.window : query + 1);
                TKVCU_UNROLL
                for (n = 0; n < TKVCU_STRIP / 8; n++) TKVCU_UNROLL
                for (c = 0; c < 2; c++) {
                    const int token = 8 * n + 2 * t + c;
                    if (token > last || token <= before) x[mt][n][2 * i + c] = -INFINITY;
                }
            }
        }
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            float top = fmaxf(x[mt][0][2 * i], x[mt][0][2 * i + 1]);
            TKVCU_UNROLL
            for (n = 1; n < TKVCU_STRIP / 8; n++)
                top = fmaxf(fmaxf(top, x[mt][n][2 * i]), x[mt][n][2 * i + 1]);
            logit_scale[mt][i] *= (j.softcap > 0.0f ? j.softcap : fabsf(j.scale)) * TKVCU_LOG2E;
            most[mt][i] = fmaxf(top * logit_scale[mt][i], TKVCU_MASKED_LOGIT);
        }
        tkvcu_update_row_max(u, most);
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (n = 0; n < TKVCU_STRIP / 8; n++) {
            float w[4];
            TKVCU_UNROLL
            for (i = 0; i < 4; i++) {
                w[i] =
                    tkvcu_ex2(fmaf(x[mt][n][i], logit_scale[mt][i / 2], TKVCU_P_EXPONENT - u.m[mt][i / 2]));
                u.l[mt][i / 2] += w[i];
            }
            p[n / 2][mt][n % 2 * 2] = tkvcu_pack_f16x2(w[0], w[1]);
            p[n / 2][mt][n % 2 * 2 + 1] = tkvcu_pack_f16x2(w[2], w[3]);
        }
        TKVCU_UNROLL
        for (n = 0; n < TKVCU_STRIP / 16; n++) TKVCU_UNROLL
        for (c = 0; c < D / 8; c += 2) {
            uint32_t b[4];
            tkvcu_load_operands(b, s.v, 128, 8 * c, at / 16 + n, lane);
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) {
                tkvcu_mma_f16(u.o[mt][c], p[n][mt], b);
                tkvcu_mma_f16(u.o[mt][c + 1], p[n][mt], b + 2);
            }
        }
    }
}

/* >>key ranges: key tiles of one region and one table version */
/* Stores the queries of the rows, each warp its own. Channels are in the order of K in the key range. The
 * largest of a row is below 2. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_store_queries(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s, int warp,
                                      int lane) {
    const tkvcu_prefill_task &task = s.task;
    const int32_t table = s.side[0].kind == TKVCU_A ? s.side[0].table : -1;
    const uint8_t *order = table >= 0 ? j.view.order + table : NULL;
    const float sign = j.scale < 0.0f ? -1.0f : 1.0f;
    enum { AT_ONCE = 4 }; /* rows: their loads do not wait for each other */
    int first, r, i;
    TKVCU_ROLL
    for (first = 16 * MT * warp; first < 16 * MT * (warp + 1); first += AT_ONCE) {
        float x[AT_ONCE][D / 32];
        TKVCU_UNROLL
        for (r = 0; r < AT_ONCE; r++) {
            const int column = task.first_row + first + r;
            const size_t row = (size_t)task.entry * (size_t)j.n_queries + (size_t)(column / task.group);
            const size_t head = (size_t)(task.head * task.group + column % task.group);
            const size_t at = (row * (size_t)j.view.n_heads + head) * D;
            TKVCU_UNROLL
            for (i = 0; i < D / 32; i++) {
                const int c = lane + 32 * i;
                x[r][i] = column < task.all_rows
                              ? tkvcu_load_element(j.q, j.type, at + (size_t)(order ? order[c] : c))
                              : 0.0f;
            }
        }
        TKVCU_UNROLL
        for (r = 0; r < AT_ONCE; r++) {
            const int mine = first + r;
            float most = 0.0f, bias = 0.0f, by;
            int exponent;
            TKVCU_UNROLL
            for (i = 0; i < D / 32; i++) most = fmaxf(most, fabsf(x[r][i]));
            TKVCU_UNROLL
            for (i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
            exponent = tkvi_max(TKVCU_EXPONENT_MIN, tkvi_min(126, (int)(tkvi_bits(most) >> 23) - 127));
            by = sign * tkvcu_exp2i(-exponent);
            TKVCU_UNROLL
            for (i = 0; i < D / 32; i++) {
                const int c = lane + 32 * i;
                const uint32_t half = tkvcu_pack_f16x2(x[r][i] * by, 0.0f);
                s.q[(mine * (2 * D) + tkvcu_swizzle_row(mine, c / 8)) / 2 + c % 8] = (uint16_t)half;
                if (order)
                    bias += tkvcu_f16_lo(half) * j.view.mean[table + c]; /* q as rounded for the products */
            }
            TKVCU_UNROLL
            for (i = 16; i > 0; i /= 2) bias += __shfl_xor_sync(0xffffffffu, bias, i);
            if (lane == 0) {
                s.q_unit[mine] = tkvcu_exp2i(exponent);
                s.mean_product[mine] = bias;
                s.query[mine] = task.visible.len - j.n_queries + (task.first_row + mine) / task.group;
            }
        }
    }
}

/* Describes a slab of a side: its width and place (core/tile.h). One thread per slab. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_store_slab(tkvcu_prefill_shared<D, MT> &s, int which, int n) {
    const tkvcu_side &side = s.side[which];
    const int own = side.half_bits == 3 ? 3 : side.half_bits / 2; /* KIVI and R: one width */
    const int all = side.half_bits == 3 ? D / 32 : D / 16;
    tkvcu_slab slab = {0, 0};
    int width, before = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int here = side.kind == TKVCU_A ? (width <= 6 ? side.slabs[width] : 0) : width == own ? all : 0;
        const int mine = tkvi_max(0, tkvi_min(n - before, here)); /* slabs of this width before slab n */
        if (n >= before && n < before + here) slab.width = width;
        slab.at += (uint32_t)(4 * mine * TKVI_TILE_BYTES(width));
        before += here;
    }
    s.slab[which][n] = slab;
    if (n == 0 && which == 0) s.coded = side.kind == TKVCU_EXACT ? D / 16 : before;
}

/* Begins the next key range of the section: its sides and queries. All threads call it. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_next_prefill_range(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s, int tid) {
    const tkvcu_prefill_task &k = s.task;
    const tkvcu_list list = j.view.list[k.visible.seq];
    const int coded = list.archive + list.warm;
    int region, first, i, n = k.left, version = 0;
    if (tid == 0) s.tail = 0;
    __syncthreads();
    if (k.section == 2) {
        region = k.tile < k.visible.sink_tiles ? TKVCU_SINKS : TKVCU_HOT;
        first = k.tile;
        if (region == TKVCU_HOT) first += 4 * tkvi_max(k.visible.first_block, coded) - k.visible.sink_tiles;
        else n = tkvi_min(n, k.visible.sink_tiles - k.tile);
    } else {
        const uint8_t *of = j.view.version + (size_t)k.visible.seq * (size_t)j.view.max_blocks;
        region = k.section == 0 ? TKVCU_ARCHIVE : TKVCU_WARM;
        first =
            k.tile + (k.section == 0 ? k.visible.first_block : tkvi_max(k.visible.first_block, list.archive));
        version = of[first];
        TKVCU_ROLL
        for (i = tid; i < n; i += TKVCU_PREFILL_THREADS)
            if (of[first + i] != version) {
                atomicMax(&s.tail, n - i);
                break;
            }
        __syncthreads();
        n -= s.tail;
    }
    if (tid < 2) s.side[tid] = *tkvcu_find_side(&j.view, version, region, k.head, tid);
    __syncthreads();
    if (tid == 0) {
        s.task.region = region;
        s.task.first = first;
        s.task.last = first + n;
        s.task.tile += n;
        s.task.left -= n;
    }
    if (tid < D / 8) tkvcu_store_slab(s, tid / (D / 16), tid % (D / 16));
    if (tid < 4) {
        const int8_t *level = tkvi_r_pairs + tid / 2 * 16 + tid % 2 * 4;
        uint32_t bytes = 0;
        for (i = 0; i < 4; i++) bytes |= (uint32_t)(level[i] + 128) << 8 * i;
        s.pair_table[tid / 2][tid % 2] = bytes;
    }
    tkvcu_store_queries(j, s, tid / 32, tid % 32);
    __syncthreads();
}

/* Finds the next tokens that any row can see, from key tile `at` on. */
template <int D, int MT>
TKVCU_DEVICE tkvcu_strip tkvcu_next_strip(const tkvcu_job &j, const tkvcu_prefill_shared<D, MT> &s, int at) {
    const tkvcu_prefill_task &k = s.task;
    const int exact = k.region >= TKVCU_SINKS, base = k.region == TKVCU_SINKS ? 0 : j.view.sinks;
    const int there =
        k.region == TKVCU_SINKS ? tkvi_min(j.view.sinks, k.visible.len) : k.visible.len - j.view.sinks;
    const int oldest = s.query[0], newest = s.query[k.n_rows - 1];
    tkvcu_strip x = {at, 0, 0, 0};
    for (; x.at < k.last; x.at += x.key_tiles) {
        x.key_tiles = exact ? tkvi_min(TKVCU_STRIP / 16 - x.at % (TKVCU_STRIP / 16), k.last - x.at) : 1;
        x.position = base + (exact ? 16 : TKVI_BLOCK) * x.at;
        x.rows = exact ? tkvi_min(16 * x.key_tiles, there - 16 * x.at) : TKVI_BLOCK;
        if (x.position <= newest && (j.window == 0 || x.position + x.rows - 1 > oldest - j.window)) return x;
    }
    x.rows = 0;
    return x;
}

/* Starts the copy of the bytes of a strip. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_fetch_strip(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s,
                                    const tkvcu_strip &strip, int tid) {
    const tkvcu_prefill_task &k = s.task;
    const int exact = k.region >= TKVCU_SINKS;
    const uint8_t *block =
        tkvcu_find_block(&j.view, k.region, k.visible.seq, exact ? strip.at / (TKVI_BLOCK / 16) : strip.at);
    int which, i;
    if (strip.rows == 0) return;
    TKVCU_UNROLL
    for (which = 0; which < 2; which++) {
        const tkvcu_side &side = s.side[which];
        const uint8_t *from = block + side.at + (exact ? strip.at % (TKVI_BLOCK / 16) * (32 * D) : 0);
        const int bytes = exact ? strip.rows * (2 * D) : (int)side.bytes;
        for (i = 16 * tid; i < bytes; i += 16 * TKVCU_PREFILL_THREADS)
            tkvcu_cp_async16(s.raw[which] + i, from + i);
    }
    tkvcu_cp_async_commit();
}

/* Attends to the task's key range. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_attend_prefill_range(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s,
                                             tkvcu_row_partials<D, MT> &u, int tid) {
    tkvcu_strip strip = tkvcu_next_strip(j, s, s.task.first);
    tkvcu_fetch_strip(j, s, strip, tid);
    TKVCU_ROLL
    while (strip.rows > 0) {
        int exponent, me;
        tkvcu_cp_async_wait<0>();
        __syncthreads();
        exponent = tkvcu_prepare_scales(s, u, strip.rows, tkvcu_block_hoisting(tid));
        __syncthreads();
        me = tkvcu_block_hoisting(tid);
        if (s.task.region >= TKVCU_SINKS) {
            tkvcu_expand_exact(s, 0, strip.rows, tkvcu_exp2i(-exponent), me);
            tkvcu_expand_exact(s, 1, strip.rows, tkvcu_exp2i(-u.top), me);
        } else {
            tkvcu_expand_k(s, me / 32, me % 8, me % 32 / 8);
            tkvcu_expand_v(s, me / 32, me % 8, me % 32 / 8);
        }
        __syncthreads();
        tkvcu_fetch_strip(j, s, tkvcu_next_strip(j, s, strip.at + strip.key_tiles),
                          tkvcu_block_hoisting(tid));
        me = tkvcu_block_hoisting(tid);
        if (16 * MT * (me / 32) < s.task.n_rows)
            tkvcu_attend_strip(j, s, u, strip, exponent, me / 32, me % 32);
        strip = tkvcu_next_strip(j, s, strip.at + strip.key_tiles); /* computed again: saves registers */
    }
    __syncthreads();
}

/* >>sections */
template <int D, int MT> TKVCU_DEVICE void tkvcu_clear_row_partials(tkvcu_row_partials<D, MT> &u) {
    int mt, i, c;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) {
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            u.m[mt][i] = TKVCU_INITIAL_MAX;
            u.l[mt][i] = 0.0f;
        }
        TKVCU_UNROLL
        for (c = 0; c < D / 8; c++) u.o[mt][c][0] = u.o[mt][c][1] = u.o[mt][c][2] = u.o[mt][c][3] = 0.0f;
    }
    u.top = TKVCU_EXPONENT_NONE;
}

/* Writes the partial results of a section to the workspace: [slot][rows of all thread blocks][m, l, o ...]. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_write_row_partials(const tkvcu_job &j, const tkvcu_prefill_shared<D, MT> &s,
                                           const tkvcu_row_partials<D, MT> &u, int tid) {
    const tkvcu_prefill_task &k = s.task;
    const int slot = (int)blockIdx.x + (k.entry * j.view.n_kv_heads + k.head) * TKVCU_SECTIONS + k.section;
    float *out = j.partial + ((size_t)slot * gridDim.y + blockIdx.y) * (size_t)(64 * MT * (D + 2));
    const float unit = tkvcu_exp2i(u.top);
    const int warp = tid / 32, lane = tid % 32;
    int mt, i, c, by;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const int row = 16 * (MT * warp + mt) + 8 * i + lane / 4;
        float *to = out + row * (D + 2), l = u.l[mt][i];
        TKVCU_UNROLL
        for (by = 1; by < 4; by *= 2) l += __shfl_xor_sync(0xffffffffu, l, by);
        if (row >= k.n_rows) continue;
        if (lane % 4 == 0) {
            to[0] = u.m[mt][i] - TKVCU_P_EXPONENT;
            to[1] = l;
        }
        TKVCU_UNROLL
        for (c = 0; c < D / 8; c++) {
            to[2 + 8 * c + 2 * (lane % 4)] = u.o[mt][c][2 * i] * unit;
            to[3 + 8 * c + 2 * (lane % 4)] = u.o[mt][c][2 * i + 1] * unit;
        }
    }
}

/* Thread blocks per multiprocessor that the register limit must allow. */
#define TKVCU_PREFILL_RESIDENT(D, MT) ((D) == 128 && (MT) == 2 ? 2 : 3)

template <int D, int MT>
__global__ void __launch_bounds__(TKVCU_PREFILL_THREADS, TKVCU_PREFILL_RESIDENT(D, MT))
    tkvcu_prefill_kernel(tkvcu_job j) {
    TKVCU_SHARED(uint8_t, shared);
    tkvcu_prefill_shared<D, MT> &s = *(tkvcu_prefill_shared<D, MT> *)(void *)shared;
    int *ends = (int *)(void *)(shared + sizeof s); /* [n_entries] */
    const int tid = (int)threadIdx.x;
    if (tid < 32) tkvcu_find_ends(j, ends, tid);
    __syncthreads();
    if (tid == 0) {
        const int total = ends[j.n_entries - 1];
        tkvcu_prefill_task &k = s.task;
        k.entry = 0;
        k.group = j.view.n_heads / j.view.n_kv_heads;
        k.all_rows = k.group * j.n_queries;
        k.first_row = 64 * MT * (int)blockIdx.y;
        k.n_rows = tkvi_min(64 * MT, k.all_rows - k.first_row);
        k.next_place = tkvcu_find_first_place(total, (int)gridDim.x, (int)blockIdx.x);
        k.end_place = tkvcu_find_first_place(total, (int)gridDim.x, (int)blockIdx.x + 1);
        tkvcu_next_section(j, k, ends);
    }
    __syncthreads();
    while (s.task.left > 0) {
        tkvcu_row_partials<D, MT> u;
        tkvcu_clear_row_partials(u);
        while (s.task.left > 0) {
            tkvcu_next_prefill_range(j, s, tkvcu_block_hoisting(tid));
            tkvcu_attend_prefill_range(j, s, u, tid);
        }
        tkvcu_write_row_partials(j, s, u, tkvcu_block_hoisting(tid));
        __syncthreads();
        if (tid == 0) tkvcu_next_section(j, s.task, ends);
        __syncthreads();
    }
}

/* >>sizes and launch */
typedef struct tkvcu_prefill_grid { /* a launch for 64 or 128 rows per thread block */
    tkvcu_attend_function kernel;
    size_t shared;
    int blocks; /* for all of gridDim.y together */
} tkvcu_prefill_grid;

static int tkvcu_n_m_tiles(const tkv_config *cfg, int n_queries) {
    return cfg->model.n_heads / cfg->model.n_kv_heads * n_queries > 64 ? 2 : 1;
}

static int tkvcu_n_row_tiles(const tkv_config *cfg, int n_queries) {
    const int rows = 64 * tkvcu_n_m_tiles(cfg, n_queries);
    return (cfg->model.n_heads / cfg->model.n_kv_heads * n_queries + rows - 1) / rows;
}

/* Computes the workspace for up to max_queries queries, with the larger need of both kernels. */
static size_t tkvcu_compute_work_bytes(const tkv_config *cfg, int n_seqs, int max_queries) {
    const size_t decode =
        tkvcu_compute_attend_bytes(cfg, n_seqs, tkvi_min(max_queries, TKVCU_DECODE_QUERIES));
    const size_t rows =
        64 * (size_t)(tkvcu_n_m_tiles(cfg, max_queries) * tkvcu_n_row_tiles(cfg, max_queries));
    const size_t slots = (size_t)n_seqs * (size_t)cfg->model.n_kv_heads * TKVCU_SECTIONS;
    const size_t prefill =
        (TKVCU_PREFILL_MAX_ROWS + slots * rows) * (size_t)(cfg->model.head_dim + 2) * sizeof(float);
    return max_queries > TKVCU_DECODE_QUERIES && prefill > decode ? prefill : decode;
}

/* As tkvcu_prepare_attend. */
static cudaError_t tkvcu_prepare_prefill(tkvcu_prefill_grid grid[2], const tkv_config *cfg, int n_seqs,
                                         int multiprocessors, int max_shared, int *fits) {
    const struct {
        tkvcu_attend_function kernel;
        size_t shared;
    } row[2][2] = {{{tkvcu_prefill_kernel<64, 1>, sizeof(tkvcu_prefill_shared<64, 1>)},
                    {tkvcu_prefill_kernel<64, 2>, sizeof(tkvcu_prefill_shared<64, 2>)}},
                   {{tkvcu_prefill_kernel<128, 1>, sizeof(tkvcu_prefill_shared<128, 1>)},
                    {tkvcu_prefill_kernel<128, 2>, sizeof(tkvcu_prefill_shared<128, 2>)}}};
    cudaError_t e = cudaSuccess;
    int i;
    for (i = 0; i < 2 && e == cudaSuccess && *fits; i++) {
        int resident = 1;
        grid[i].kernel = row[cfg->model.head_dim == 128][i].kernel;
        grid[i].shared = row[cfg->model.head_dim == 128][i].shared + sizeof(int) * (size_t)n_seqs;
        *fits = grid[i].shared <= (size_t)max_shared;
        if (!*fits) break;
        e = cudaFuncSetAttribute(grid[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared);
        if (e == cudaSuccess)
            e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, grid[i].kernel,
                                                              TKVCU_PREFILL_THREADS, grid[i].shared);
        grid[i].blocks =
            tkvi_min(TKVCU_PREFILL_MAX_ROWS / (64 * (i + 1)), multiprocessors * tkvi_max(1, resident));
    }
    return e;
}

/* As tkvcu_launch_attend. */
static cudaError_t tkvcu_launch_prefill(const tkvcu_prefill_grid grid[2], const tkvcu_attend_plan *s,
                                        const tkvcu_view *v, const tkvcu_attend_call *c,
                                        const tkv_config *cfg, cudaStream_t stream) {
    const int mt = tkvcu_n_m_tiles(cfg, c->n_queries), row_tiles = tkvcu_n_row_tiles(cfg, c->n_queries);
    tkvcu_job j = tkvcu_make_job(s, v, c);
    j.blocks = tkvi_max(1, grid[mt - 1].blocks / row_tiles);
    TKVCU_LAUNCH(grid[mt - 1].kernel, dim3((unsigned)j.blocks, (unsigned)row_tiles),
                 dim3(TKVCU_PREFILL_THREADS), grid[mt - 1].shared, stream, j);
    TKVCU_LAUNCH(tkvcu_combine_kernel, dim3((unsigned)(s->n_seqs * c->n_queries * v->n_heads)),
                 dim3(TKVCU_COMBINE_THREADS), 0, stream, j, 64 * mt, row_tiles);
    return cudaGetLastError();
}

#endif /* TKVCU_PREFILL_H */
