/*
 * kernels/vectors_128.h - the kernels of kernels/scalar.h with vectors of 128 bits, for NEON and WebAssembly.
 *
 * Types and operations that end in _128 come from kernels/neon.h or kernels/wasm.h. The target of the compiler
 * selects one of them.
 *
 * A tile is unpacked to bytes, in the order of its codes. Then these bytes are multiplied for all rows. So only
 * unpacking depends on the width and the table of levels, and one loop of products serves K and V. A step of it
 * multiplies two vectors of 16 codes (four lanes of four) by four weights of each row:
 *
 *     K: a step is a tile.        lanes: tokens 16p + 4b .. + 3, p = 2h and 2h + 1;  weights of its 4 channels
 *     V: a step is four tokens.   lanes: channels 4b .. + 3, b = 2h and 2h + 1;      weights of its 4 tokens
 *
 * 8-bit codes become signed: code - 128. These kernels do not prefetch `next`, because no machine to measure it
 * was available.
 */
#ifndef TKVI_KERNELS_VECTORS_128_H
#define TKVI_KERNELS_VECTORS_128_H

#include "kernels/neon.h"
#include "kernels/wasm.h"

#ifdef TKVI_128

/* >>simd_ops: conversions of metadata. Encoding uses the scalar functions. */
static void tkvi_f16_to_f32_128(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 4 <= n; i += 4) tkvi_store_128(dst + i, tkvi_load_f16_128(src + 2 * i));
    tkvi_f16_to_f32_scalar(src + 2 * i, n - i, dst + i);
}

/* tkvi_log_value, byte by byte. The bytes of the float are 0, m << 5, e << 7 | m >> 3, e >> 1. Here e is the biased
 * exponent, and m the upper ten bits of the mantissa. */
static void tkvi_decode_log_scales_128(const uint8_t *src, int n, int top, float *dst) {
    uint8_t tables[2][16], *bytes = (uint8_t *)dst;
    tkvi_b16 table1, table2;
    int i;
    for (i = 0; i < 16; i++) {
        int m = tkvi_log_mantissa[i] - 1024;
        tables[0][i] = (uint8_t)(m << 5 & 255);
        tables[1][i] = (uint8_t)(m >> 3);
    }
    table1 = tkvi_load_bytes_128(tables[0]);
    table2 = tkvi_load_bytes_128(tables[1]);
    for (i = 0; i + 16 <= n; i += 16, bytes += 64) {
        tkvi_b16 code = tkvi_load_bytes_128(src + i), some = tkvi_test_128(code, code);
        tkvi_b16 x = tkvi_add_bytes_128(code, tkvi_splat_bytes_128(-1));
        tkvi_b16 k = tkvi_and_128(x, tkvi_splat_bytes_128(15));
        tkvi_b16 e = tkvi_add_bytes_128(TKVI_RIGHT_128(x, 4), tkvi_splat_bytes_128(127 + top - 16));
        tkvi_b16 b1 = tkvi_and_128(tkvi_look_up_128(table1, k), some);
        tkvi_b16 b2 = tkvi_or_128(tkvi_look_up_128(table2, k), TKVI_LEFT_128(e, 7));
        tkvi_b16 b3 = tkvi_and_128(TKVI_RIGHT_128(e, 1), some), zero = tkvi_splat_bytes_128(0);
        b2 = tkvi_and_128(b2, some);
        x = tkvi_zip1_128(zero, b1);
        k = tkvi_zip1_128(b2, b3);
        tkvi_store_bytes_128(bytes, tkvi_zip1_pairs_128(x, k));
        tkvi_store_bytes_128(bytes + 16, tkvi_zip2_pairs_128(x, k));
        x = tkvi_zip2_128(zero, b1);
        k = tkvi_zip2_128(b2, b3);
        tkvi_store_bytes_128(bytes + 32, tkvi_zip1_pairs_128(x, k));
        tkvi_store_bytes_128(bytes + 48, tkvi_zip2_pairs_128(x, k));
    }
    tkvi_decode_log_scales_scalar(src + i, n - i, top, dst + i);
}

static void tkvi_decode_zero_points_128(const uint8_t *offset, const float *scale, const float *mean,
                                        float unit, int middle, int n, float *dst) {
    int i;
    for (i = 0; i + 4 <= n; i += 4) {
        tkvi_i4 by = tkvi_sub_ints_128(tkvi_load_bytes4_128(offset + i), tkvi_splat_ints_128(middle));
        tkvi_f4 x = tkvi_mul_128(tkvi_load_128(scale + i), tkvi_splat_128(unit));
        tkvi_store_128(dst + i, tkvi_madd_128(tkvi_load_128(mean + i), x, tkvi_to_float_128(by)));
    }
    tkvi_decode_zero_points_scalar(offset + i, scale + i, mean + i, unit, middle, n - i, dst + i);
}

static const tkvi_simd_ops tkvi_simd_ops_128 = {tkvi_f16_to_f32_128,
                                                tkvi_f32_to_f16_scalar,
                                                tkvi_decode_log_scales_128,
                                                tkvi_decode_zero_points_128,
                                                tkvi_encode_log_scales_scalar,
                                                tkvi_pack_tile,
                                                tkvi_interleave_scalar,
                                                tkvi_encode_k_columns_scalar,
                                                tkvi_finalize_scales_scalar,
                                                tkvi_encode_v_tokens_scalar,
                                                tkvi_encode_groups_scalar,
                                                tkvi_decode_tiles_scalar,
                                                TKVI_IF(TKVI_HAS_MOVES, tkvi_turn_rows_scalar)};

static float tkvi_max64_128(const float *s) {
    tkvi_f4 m = tkvi_load_128(s);
    int t;
    for (t = 4; t < TKVI_BLOCK; t += 4) m = tkvi_max_128(m, tkvi_load_128(s + t));
    return tkvi_max_across_128(m);
}

/* exp(x) = 2^n exp(r), |r| <= ln 2 / 2. The polynomial is from expf of Cephes. */
static float tkvi_exp64_128(const float *s, float maximum, float *p) {
    static const float factors[5] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                     5.0000001201e-1f};
    tkvi_f4 sum = tkvi_splat_128(0.0f);
    int t, k;
    for (t = 0; t < TKVI_BLOCK; t += 4) {
        tkvi_f4 from = tkvi_sub_128(tkvi_load_128(s + t), tkvi_splat_128(maximum)), r, f, y;
        tkvi_f4 x = tkvi_max_128(from, tkvi_splat_128(-87.0f)); /* 2^n stays a normal number */
        tkvi_i4 n = tkvi_nearest_128(tkvi_mul_128(x, tkvi_splat_128(1.44269504f)));
        f = tkvi_to_float_128(n);
        r = tkvi_madd_128(x, f, tkvi_splat_128(-0.693359375f));
        r = tkvi_madd_128(r, f, tkvi_splat_128(2.12194440e-4f));
        y = tkvi_splat_128(1.9875691500e-4f);
        for (k = 0; k < 5; k++) y = tkvi_madd_128(tkvi_splat_128(factors[k]), y, r);
        y = tkvi_madd_128(tkvi_add_128(r, tkvi_splat_128(1.0f)), y, tkvi_mul_128(r, r));
        n = TKVI_LEFT_INTS_128(tkvi_add_ints_128(n, tkvi_splat_ints_128(127)), 23);
        y = tkvi_zero_below_128(tkvi_mul_128(y, tkvi_as_float_128(n)), from, -87.0f);
        tkvi_store_128(p + t, y);
        sum = tkvi_add_128(sum, y);
    }
    return tkvi_sum_across_128(sum);
}

/* Rows in the next pass: the largest power of 2 that is at most `left` and `most`. */
static int tkvi_rows_in_pass_128(int left, int most) {
    int n = most;
    while (n > left) n /= 2;
    return n;
}

/* >>exact tiers: x0 .. x3 hold 4 channels of 4 tokens (K), or 16 channels of one token (V). */
#define TKVI_ROWS4_(X) X(0) X(1) X(2) X(3)
#define TKVI_NONE4_(r) tkvi_f4 a##r = tkvi_splat_128(0.0f), b##r = a##r, c##r = a##r, d##r = a##r;
#define TKVI_MADD4_(r, from)                                                                                 \
    if (r < nr) {                                                                                            \
        y = from;                                                                                            \
        a##r = tkvi_madd_128(a##r, x0, y);                                                                   \
        b##r = tkvi_madd_128(b##r, x1, y);                                                                   \
        c##r = tkvi_madd_128(c##r, x2, y);                                                                   \
        d##r = tkvi_madd_128(d##r, x3, y);                                                                   \
    }
#define TKVI_MADD4_K_(r) TKVI_MADD4_(r, tkvi_load_128(q + r * pad + i))
#define TKVI_MADD4_V_(r) TKVI_MADD4_(r, tkvi_splat_128(p[r * TKVI_BLOCK + t]))
#define TKVI_SAVE4_K_(r)                                                                                     \
    if (r < nr) tkvi_store_128(scores + r * TKVI_BLOCK + t, tkvi_sum4_128(a##r, b##r, c##r, d##r));
#define TKVI_SAVE4_V_(r)                                                                                     \
    if (r < nr) {                                                                                            \
        o = out + r * pad + i;                                                                               \
        tkvi_store_128(o, tkvi_add_128(tkvi_load_128(o), a##r));                                             \
        tkvi_store_128(o + 4, tkvi_add_128(tkvi_load_128(o + 4), b##r));                                     \
        tkvi_store_128(o + 8, tkvi_add_128(tkvi_load_128(o + 8), c##r));                                     \
        tkvi_store_128(o + 12, tkvi_add_128(tkvi_load_128(o + 12), d##r));                                   \
    }

/* Values i .. i + 3 of a row. */
TKVI_FLAT_128 tkvi_f4 tkvi_load_values_128(const tkvi_storage type, const uint8_t *row, int i) {
    if (type == TKVI_AS_F16) return tkvi_load_finite_f16_128(row + 2 * i);
    if (type == TKVI_AS_BF16) return tkvi_load_bf16_128(row + 2 * i);
    return tkvi_load_128((const float *)(const void *)(row + 4 * i));
}

/* Tokens beyond n repeat the last one. */
TKVI_FLAT_128 void tkvi_exact_k4_128(const tkvi_storage type, const int nr, const tkvi_side *s,
                                     const uint8_t *src, const float *q, const float *ref, int n,
                                     float *scores) {
    const int pad = s->pad, bytes = pad * (type == TKVI_AS_F32 ? 4 : 2);
    int t, i;
    for (t = 0; t < n; t += 4) {
        const uint8_t *k0 = src + t * bytes, *k1 = src + tkvi_min(t + 1, n - 1) * bytes;
        const uint8_t *k2 = src + tkvi_min(t + 2, n - 1) * bytes, *k3 = src + tkvi_min(t + 3, n - 1) * bytes;
        TKVI_ROWS4_(TKVI_NONE4_)
        for (i = 0; i < pad; i += 4) {
            tkvi_f4 y = tkvi_load_128(ref + i);
            tkvi_f4 x0 = tkvi_sub_128(tkvi_load_values_128(type, k0, i), y);
            tkvi_f4 x1 = tkvi_sub_128(tkvi_load_values_128(type, k1, i), y);
            tkvi_f4 x2 = tkvi_sub_128(tkvi_load_values_128(type, k2, i), y);
            tkvi_f4 x3 = tkvi_sub_128(tkvi_load_values_128(type, k3, i), y);
            TKVI_ROWS4_(TKVI_MADD4_K_)
        }
        TKVI_ROWS4_(TKVI_SAVE4_K_)
    }
}

TKVI_FLAT_128 void tkvi_exact_v4_128(const tkvi_storage type, const int nr, const tkvi_side *s,
                                     const uint8_t *src, const float *p, int n, float *out) {
    const int pad = s->pad, bytes = pad * (type == TKVI_AS_F32 ? 4 : 2);
    int t, i;
    for (i = 0; i < pad; i += 16) {
        const uint8_t *v = src;
        float *o;
        TKVI_ROWS4_(TKVI_NONE4_)
        for (t = 0; t < n; t++, v += bytes) {
            tkvi_f4 x0 = tkvi_load_values_128(type, v, i), x1 = tkvi_load_values_128(type, v, i + 4);
            tkvi_f4 x2 = tkvi_load_values_128(type, v, i + 8), x3 = tkvi_load_values_128(type, v, i + 12), y;
            TKVI_ROWS4_(TKVI_MADD4_V_)
        }
        TKVI_ROWS4_(TKVI_SAVE4_V_)
    }
}

#define TKVI_EXACT_128_(t, type)                                                                             \
    static void tkvi_##t##_k_128(const tkvi_side *s, const uint8_t *src, const uint8_t *next,                \
                                 const float *q, const float *ref, int rows, int n, int n_limbs,             \
                                 float *scores) {                                                            \
        int r, pass;                                                                                         \
        (void)next;                                                                                          \
        (void)n_limbs;                                                                                       \
        if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));                  \
        for (r = 0; r < rows; r += pass, q += pass * s->pad, scores += pass * TKVI_BLOCK) {                  \
            pass = tkvi_rows_in_pass_128(rows - r, 4);                                                       \
            if (pass == 4) tkvi_exact_k4_128(type, 4, s, src, q, ref, n, scores);                            \
            else if (pass == 2) tkvi_exact_k4_128(type, 2, s, src, q, ref, n, scores);                       \
            else tkvi_exact_k4_128(type, 1, s, src, q, ref, n, scores);                                      \
        }                                                                                                    \
    }                                                                                                        \
    static void tkvi_##t##_v_128(const tkvi_side *s, const uint8_t *src, const uint8_t *next,                \
                                 const float *p, int rows, int n, int n_limbs, float *out) {                 \
        int r, pass;                                                                                         \
        (void)next;                                                                                          \
        (void)n_limbs;                                                                                       \
        for (r = 0; r < rows; r += pass, p += pass * TKVI_BLOCK, out += pass * s->pad) {                     \
            pass = tkvi_rows_in_pass_128(rows - r, 4);                                                       \
            if (pass == 4) tkvi_exact_v4_128(type, 4, s, src, p, n, out);                                    \
            else if (pass == 2) tkvi_exact_v4_128(type, 2, s, src, p, n, out);                               \
            else tkvi_exact_v4_128(type, 1, s, src, p, n, out);                                              \
        }                                                                                                    \
    }
TKVI_EXACT_128_(f32, TKVI_AS_F32)
TKVI_EXACT_128_(f16, TKVI_AS_F16)
TKVI_EXACT_128_(bf16, TKVI_AS_BF16)
#undef TKVI_EXACT_128_
#undef TKVI_ROWS4_
#undef TKVI_NONE4_
#undef TKVI_MADD4_
#undef TKVI_MADD4_K_
#undef TKVI_MADD4_V_
#undef TKVI_SAVE4_K_
#undef TKVI_SAVE4_V_

/* >>tiles */
/* Adds the top bit to the codes of four planes. Plane p has it where x & (from << p); it is worth `bit`. */
TKVI_FLAT_128 void tkvi_tops_128(tkvi_b16 *c, tkvi_b16 x, int from, int bit) {
    const tkvi_b16 to = tkvi_splat_bytes_128(bit);
    c[0] = tkvi_or_128(c[0], tkvi_and_128(tkvi_test_128(x, tkvi_splat_bytes_128(from)), to));
    c[1] = tkvi_or_128(c[1], tkvi_and_128(tkvi_test_128(x, tkvi_splat_bytes_128(2 * from)), to));
    c[2] = tkvi_or_128(c[2], tkvi_and_128(tkvi_test_128(x, tkvi_splat_bytes_128(4 * from)), to));
    c[3] = tkvi_or_128(c[3], tkvi_and_128(tkvi_test_128(x, tkvi_splat_bytes_128(8 * from)), to));
}

TKVI_FLAT_128 void tkvi_store_codes_128(uint8_t *code, const tkvi_b16 *c) {
    tkvi_store_bytes_128(code, c[0]);
    tkvi_store_bytes_128(code + 64, c[1]);
    tkvi_store_bytes_128(code + 128, c[2]);
    tkvi_store_bytes_128(code + 192, c[3]);
}

/* Unpacks codes j .. j + 15 of each plane. 8-bit codes become signed. */
TKVI_FLAT_128 void tkvi_unpack4_128(const int width, const uint8_t *wide, const uint8_t *tops, int from,
                                    int j, tkvi_b16 *c) {
    const tkvi_b16 two = tkvi_splat_bytes_128(3), four = tkvi_splat_bytes_128(15),
                   six = tkvi_splat_bytes_128(48);
    tkvi_b16 x = tkvi_splat_bytes_128(128), y;
    c[0] = c[1] = c[2] = c[3] = tkvi_splat_bytes_128(0);
    if (width == 8) {
        c[0] = tkvi_xor_128(tkvi_load_bytes_128(wide + j), x);
        c[1] = tkvi_xor_128(tkvi_load_bytes_128(wide + j + 64), x);
        c[2] = tkvi_xor_128(tkvi_load_bytes_128(wide + j + 128), x);
        c[3] = tkvi_xor_128(tkvi_load_bytes_128(wide + j + 192), x);
    } else if (width >= 4) {
        x = tkvi_load_bytes_128(wide + j);
        y = tkvi_load_bytes_128(wide + j + 64);
        c[0] = tkvi_and_128(x, four);
        c[1] = TKVI_RIGHT_128(x, 4);
        c[2] = tkvi_and_128(y, four);
        c[3] = TKVI_RIGHT_128(y, 4);
    } else if (width >= 2) {
        x = tkvi_load_bytes_128(wide + j);
        c[0] = tkvi_and_128(x, two);
        c[1] = tkvi_and_128(TKVI_RIGHT_128(x, 2), two);
        c[2] = tkvi_and_128(TKVI_RIGHT_128(x, 4), two);
        c[3] = TKVI_RIGHT_128(x, 6);
    }
    if (width == 6) {
        x = tkvi_load_bytes_128(wide + j + 128);
        c[0] = tkvi_or_128(c[0], tkvi_and_128(TKVI_LEFT_128(x, 4), six));
        c[1] = tkvi_or_128(c[1], tkvi_and_128(TKVI_LEFT_128(x, 2), six));
        c[2] = tkvi_or_128(c[2], tkvi_and_128(x, six));
        c[3] = tkvi_or_128(c[3], tkvi_and_128(TKVI_RIGHT_128(x, 2), six));
    }
    if (width & 1)
        tkvi_tops_128(c, tkvi_load_bytes_128(tops + j), from, width == 1 ? 1 : width == 3 ? 4 : 16);
}

TKVI_FLAT_128 void tkvi_unpack_width_128(const int width, const uint8_t *wide, const uint8_t *tops, int from,
                                         uint8_t *code) {
    tkvi_b16 c[4];
    int j;
    for (j = 0; j < 64; j += 16) {
        tkvi_unpack4_128(width, wide, tops, from, j, c);
        tkvi_store_codes_128(code + j, c);
    }
}

static void tkvi_unpack_tile_128(const uint8_t *codes, const tkvi_tile_at *at, int width, uint8_t *code) {
    const uint8_t *wide = codes + at->wide, *tops = codes + at->halves + at->half / 2 * 64;
    const int from = at->half % 2 ? 16 : 1;
    switch (width) {
    case 1: tkvi_unpack_width_128(1, wide, tops, from, code); break;
    case 2: tkvi_unpack_width_128(2, wide, tops, from, code); break;
    case 3: tkvi_unpack_width_128(3, wide, tops, from, code); break;
    case 4: tkvi_unpack_width_128(4, wide, tops, from, code); break;
    case 5: tkvi_unpack_width_128(5, wide, tops, from, code); break;
    case 6: tkvi_unpack_width_128(6, wide, tops, from, code); break;
    default: tkvi_unpack_width_128(8, wide, tops, from, code); break;
    }
}

/* Replaces n codes by their levels. */
static void tkvi_codes_to_levels_128(const int8_t *levels, const uint8_t *code, int n, uint8_t *level) {
    const tkvi_b16 table = tkvi_load_bytes_128((const uint8_t *)levels), mask = tkvi_splat_bytes_128(15);
    int j;
    for (j = 0; j < n; j += 16)
        tkvi_store_bytes_128(level + j,
                             tkvi_look_up_128(table, tkvi_and_128(tkvi_load_bytes_128(code + j), mask)));
}

/* Twice the centre of the bytes that are multiplied. */
static int tkvi_centre2_128(const tkvi_side *s, int width) {
    return s->levels ? 0 : width == 8 ? -1 : (1 << width) - 1;
}

/* zero + centre * scale, for four values. */
TKVI_FLAT_128 tkvi_f4 tkvi_centred_128(tkvi_f4 zero, const float *scale, float centre) {
    return tkvi_madd_128(zero, tkvi_load_128(scale), tkvi_splat_128(centre));
}

/* A folded row. Its answer is half_step * (2 * sum w code - middle) + rest.
 * middle = sum w centre2; rest = sum x zero. */
typedef struct tkvi_fold_128 {
    int32_t middle;
    float half_step, rest;
    float most; /* the largest weight before it is rounded */
    int wide;   /* number of leading weights with two limbs */
} tkvi_fold_128;

/* Parameters of folding. zero includes centre * scale (tkvi_centred_128). n is a multiple of 16. */
typedef struct tkvi_fold_args_128 {
    const float *scale, *zero;
    const int32_t *centre2;
    int n, n_limbs, top,
        wide;     /* top: the largest weight of one limb; wide: leading weights always with two */
    float coarse; /* see TKVI_NEEDS_TWO */
    int unit; /* value of 1 in a one-limb weight beside two-limb ones: 128 in K. V: 1, because rows do not mix */
} tkvi_fold_args_128;

/* Weights of a step: four of each weight row. A load may read rows that its pass does not use. */
#define TKVI_QUAD_128 (4 * 2 * TKVI_ROWS)

/* y = x * scale, and the fields of *f that rounding needs. */
static void tkvi_scale_row_128(const tkvi_fold_args_128 *a, const float *x, float *y, tkvi_fold_128 *f) {
    tkvi_f4 most = tkvi_splat_128(0.0f), rest = most, squares = most;
    float all;
    int i;
    for (i = 0; i < a->n; i += 4) {
        tkvi_f4 v = tkvi_load_128(x + i), u = tkvi_mul_128(v, tkvi_load_128(a->scale + i));
        most = tkvi_max_128(most, tkvi_abs_128(u));
        rest = tkvi_madd_128(rest, v, tkvi_load_128(a->zero + i));
        squares = tkvi_madd_128(squares, u, u);
        tkvi_store_128(y + i, u);
    }
    f->most = tkvi_max_across_128(most);
    f->rest = tkvi_sum_across_128(rest);
    all = tkvi_sum_across_128(squares);
    f->wide = a->n_limbs == 2 || TKVI_NEEDS_TWO(a->coarse, f->most, all, a->top) ? a->n : a->wide;
}

/* Rounds y. two: 1 if some row of the call needs two limbs; then all rows are stored with two. */
TKVI_FLAT_128 void tkvi_round_row_128(const tkvi_fold_args_128 *a, const float *y, const int two,
                                      tkvi_weight *w, tkvi_fold_128 *f) {
    const int unit = two ? a->unit : 1;
    const int steps =
        f->wide == a->n ? TKVI_TWO_LIMBS_MAX : unit * a->top; /* the largest weight, in units of the sums */
    const int some = f->most > 1e-34f;                        /* smaller ones contribute nothing */
    const tkvi_f4 fine = tkvi_splat_128(some ? (float)TKVI_TWO_LIMBS_MAX / f->most : 0.0f);
    const tkvi_f4 coarse = tkvi_splat_128(some ? (float)a->top / f->most : 0.0f);
    tkvi_i4 middle = tkvi_splat_ints_128(0);
    int i, k;
    for (i = 0; i < a->n; i += 8, w += 2 * TKVI_QUAD_128) {
        tkvi_i4 v[2];
        for (k = 0; k < 2; k++) { /* the four weights of a tile have equally many limbs */
            const int wide = i + 4 * k < f->wide;
            v[k] = tkvi_nearest_128(tkvi_mul_128(tkvi_load_128(y + i + 4 * k), wide ? fine : coarse));
            if (!wide && unit > 1) v[k] = TKVI_LEFT_INTS_128(v[k], 7);
            middle = tkvi_add_ints_128(middle,
                                       tkvi_mul_ints_128(v[k], tkvi_load_ints_128(a->centre2 + i + 4 * k)));
        }
        tkvi_store_weights_128(w, TKVI_QUAD_128, v[0], v[1], two ? 2 : 1);
    }
    f->middle = tkvi_sum_ints_across_128(middle);
    f->half_step = 0.5f * f->most / (float)steps;
}

/* Folds and rounds all rows. x: [row][n]. two: 1 demands two limbs. Returns the number of limbs. */
static int tkvi_fold_rows_128(const tkvi_fold_args_128 *a, const float *x, int rows, int two, tkvi_weight *w,
                              tkvi_fold_128 *f) {
    TKVI_ALIGNED float y[TKVI_ROWS][TKV_MAX_HEAD_DIM];
    int r;
    for (r = 0; r < rows; r++) {
        tkvi_scale_row_128(a, x + r * a->n, y[r], f + r);
        two |= f[r].wide > 0;
    }
    for (r = 0; r < rows; r++, w += 4 * tkvi_weight_rows_128(1 + two)) {
        if (two) tkvi_round_row_128(a, y[r], 1, w, f + r);
        else tkvi_round_row_128(a, y[r], 0, w, f + r);
    }
    return 1 + two;
}

/* Parameters of a loop of products, in the steps of the drawing at the top. */
typedef struct tkvi_dots_128 {
    const uint8_t *codes;
    int step, apart,
        steps;            /* bytes between steps; bytes between the two vectors of a step; number of steps */
    const tkvi_weight *w; /* [step][TKVI_QUAD_128] */
    int32_t *sum;         /* [weight row][TKVI_BLOCK] */
    int sum_apart, add;   /* distance between the sums of both vectors; add: sum += products, else sum = */
    int no_sign;          /* 1: codes and weights are unsigned; weights are at most 255 */
} tkvi_dots_128;

#define TKVI_ROWS8_(X)                                                                                       \
    X(0, low, 0) X(1, low, 1) X(2, low, 2) X(3, low, 3) X(4, up, 0) X(5, up, 1) X(6, up, 2) X(7, up, 3)
#define TKVI_BEGIN8_(r, quad, lane)                                                                          \
    tkvi_i4 a##r = tkvi_splat_ints_128(0), b##r = a##r;                                                      \
    if (r < nw && d->add) {                                                                                  \
        a##r = tkvi_load_ints_128(sum + r * TKVI_BLOCK);                                                     \
        b##r = tkvi_load_ints_128(sum + r * TKVI_BLOCK + apart);                                             \
    }
#define TKVI_DOT8_(r, quad, lane)                                                                            \
    if (r < nw) {                                                                                            \
        a##r = TKVI_DOT_128(no_sign, a##r, c, quad, lane);                                                   \
        b##r = TKVI_DOT_128(no_sign, b##r, e, quad, lane);                                                   \
    }
#define TKVI_END8_(r, quad, lane)                                                                            \
    if (r < nw) {                                                                                            \
        tkvi_store_ints_128(sum + r * TKVI_BLOCK, a##r);                                                     \
        tkvi_store_ints_128(sum + r * TKVI_BLOCK + apart, b##r);                                             \
    }

TKVI_FLAT_128 void tkvi_dot_rows_128(const tkvi_dots_128 *d, const tkvi_weight *w, int32_t *sum, const int nw,
                                     const int no_sign) {
    const uint8_t *codes = d->codes;
    const int step = d->step, second = d->apart, apart = d->sum_apart;
    int i;
    TKVI_ROWS8_(TKVI_BEGIN8_)
    for (i = 0; i < d->steps; i++, codes += step, w += TKVI_QUAD_128) {
        const tkvi_codes_128 c = tkvi_load_codes_128(codes), e = tkvi_load_codes_128(codes + second);
        const tkvi_quad_128 low = tkvi_load_quad_128(w), up = nw > 4 ? tkvi_load_quad_128(w + 16) : low;
        TKVI_ROWS8_(TKVI_DOT8_)
    }
    TKVI_ROWS8_(TKVI_END8_)
}
#undef TKVI_ROWS8_
#undef TKVI_BEGIN8_
#undef TKVI_DOT8_
#undef TKVI_END8_

TKVI_FLAT_128 void tkvi_dot_pass_128(const tkvi_dots_128 *d, const tkvi_weight *w, int32_t *sum, int pass,
                                     const int no_sign) {
    if (pass == 4) tkvi_dot_rows_128(d, w, sum, 4, no_sign);
    else if (pass == 2) tkvi_dot_rows_128(d, w, sum, 2, no_sign);
    else if (pass == 1) tkvi_dot_rows_128(d, w, sum, 1, no_sign);
#if TKVI_MAX_PASS_128 == 8
    else tkvi_dot_rows_128(d, w, sum, 8, no_sign);
#endif
}

static void tkvi_dot_all_128(const tkvi_dots_128 *d, int weight_rows) {
    int r, pass;
    for (r = 0; r < weight_rows; r += pass) {
        const tkvi_weight *w = d->w + 4 * r;
        int32_t *sum = d->sum + r * TKVI_BLOCK;
        pass = tkvi_rows_in_pass_128(weight_rows - r, TKVI_MAX_PASS_128);
        if (d->no_sign) tkvi_dot_pass_128(d, w, sum, pass, 1);
        else tkvi_dot_pass_128(d, w, sum, pass, 0);
    }
}

/* Converts n sums of row r to answers. n is a multiple of 4. add: out += answers. */
static void tkvi_store_answers_128(const int32_t *sum, int r, int n_limbs, const tkvi_fold_128 *f, int n,
                                   int add, float *out) {
    const tkvi_f4 half_step = tkvi_splat_128(f[r].half_step), rest = tkvi_splat_128(f[r].rest);
    const tkvi_i4 middle = tkvi_splat_ints_128(f[r].middle);
    const int split = tkvi_weight_rows_128(n_limbs) == 2;
    int i;
    sum += r * tkvi_weight_rows_128(n_limbs) * TKVI_BLOCK;
    for (i = 0; i < n; i += 4) {
        tkvi_i4 x = tkvi_load_ints_128(sum + i);
        tkvi_f4 y;
        if (split) x = tkvi_add_ints_128(TKVI_LEFT_INTS_128(x, 7), tkvi_load_ints_128(sum + TKVI_BLOCK + i));
        y = tkvi_to_float_128(tkvi_sub_ints_128(TKVI_LEFT_INTS_128(x, 1), middle));
        y = tkvi_madd_128(rest, y, half_step);
        tkvi_store_128(out + i, add ? tkvi_add_128(y, tkvi_load_128(out + i)) : y);
    }
}

#define TKVI_BATCH_128 32 /* tiles that are unpacked at a time: 8 KB */

/* Products of K for tiles first .. first + n - 1, unpacked at `code`. */
static void tkvi_batch_k_128(const uint8_t *code, int first, int n, const tkvi_weight *w, int w_group,
                             int weight_rows, int32_t *sum) {
    tkvi_dots_128 d;
    int b, h;
    d.step = TKVI_TILE_CODES;
    d.apart = 64;
    d.steps = n;
    d.sum_apart = 16;
    d.add = first > 0;
    d.no_sign = 0;
    for (h = 0; h < 2; h++)
        for (b = 0; b < 4; b++) {
            d.codes = code + 128 * h + 16 * b;
            d.w = w + h * w_group + first * TKVI_QUAD_128;
            d.sum = sum + 32 * h + 4 * b;
            tkvi_dot_all_128(&d, weight_rows);
        }
}

static void tkvi_tiles_k_128(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                             const float *ref, int rows, int n, int n_limbs, float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t centre2[TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED uint8_t code[TKVI_BATCH_128 * TKVI_TILE_CODES];
    TKVI_ALIGNED tkvi_weight w[2][TKV_MAX_HEAD_DIM / 4 * TKVI_QUAD_128];
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS * TKVI_BLOCK];
    const int tokens = TKVI_BLOCK / s->groups;
    const int w_group = s->groups == 2 ? (int)(sizeof w[0] / sizeof w[0][0]) : 0;
    tkvi_fold_128 fold[2][TKVI_ROWS];
    tkvi_tile_at at = tkvi_first_tile(&s->tiles);
    int width, i, g, r, c = 0, first = 0, here = 0, weight_rows;
    tkvi_fold_args_128 a;
    (void)next;
    (void)n;
    s->format->side[TKV_K].meta(s, src, &tkvi_simd_ops_128, scale, zero);
    for (width = TKVI_MAX_WIDTH; width >= 0; width--) { /* 0: channels without codes */
        const int centre2_here = width ? tkvi_centre2_128(s, width) : 0;
        const float centre = width ? tkvi_centre(s, width) : 0.0f;
        for (i = width ? s->tiles.n[width] : (s->pad - c) / 4; i > 0; i--, c += 4) {
            tkvi_store_ints_128(centre2 + c, tkvi_splat_ints_128(centre2_here));
            for (g = 0; g < s->groups; g++) {
                float *z = zero + g * s->pad + c;
                const tkvi_f4 x = tkvi_sub_128(tkvi_load_128(z), tkvi_load_128(ref + c));
                tkvi_store_128(z, tkvi_centred_128(x, scale + g * s->pad + c, centre));
            }
        }
    }
    a.centre2 = centre2;
    a.n = s->pad;
    a.n_limbs = n_limbs;
    a.top = TKVI_LIMB_MAX_K;
    a.unit = 128;
    a.wide = tkvi_n_wide_positions(s);
    a.coarse = tkvi_coarse_k(s);
    n_limbs = 1;
    for (g = 0; g < s->groups; g++) {
        int had = n_limbs;
        a.scale = scale + g * s->pad;
        a.zero = zero + g * s->pad;
        n_limbs = tkvi_fold_rows_128(&a, q, rows, had == 2, w[g], fold[g]);
        if (g && n_limbs > had) { /* all groups must have equally many limbs */
            a.scale = scale;
            a.zero = zero;
            tkvi_fold_rows_128(&a, q, rows, 1, w[0], fold[0]);
        }
    }
    weight_rows = rows * tkvi_weight_rows_128(n_limbs);
    memset(sum, 0,
           (size_t)(weight_rows * TKVI_BLOCK) * sizeof sum[0]); /* a side without codes has no products */
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++) {
            uint8_t *to = code + here * TKVI_TILE_CODES;
            tkvi_unpack_tile_128(src, &at, width, to);
            tkvi_next_tile(&at, width);
            if (++here < TKVI_BATCH_128) continue;
            tkvi_batch_k_128(code, first, here, w[0], w_group, weight_rows, sum);
            first += here;
            here = 0;
        }
    if (here) tkvi_batch_k_128(code, first, here, w[0], w_group, weight_rows, sum);
    for (r = 0; r < rows; r++)
        for (g = 0; g < s->groups; g++)
            tkvi_store_answers_128(sum + g * tokens, r, n_limbs, fold[g], tokens, 0,
                                   scores + r * TKVI_BLOCK + g * tokens);
}

/* Products and answers of V for 16 channels. */
static void tkvi_slab_v_128(const uint8_t *code, int n, const tkvi_weight *w, const tkvi_fold_128 *fold,
                            int rows, int n_limbs, int no_sign, int pad, float *out) {
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS * TKVI_BLOCK];
    tkvi_dots_128 d;
    int h, r;
    d.step = 64;
    d.apart = 16;
    d.steps = (n + 3) / 4; /* tokens beyond n have no weight */
    d.w = w;
    d.sum_apart = 4;
    d.add = 0;
    d.no_sign = no_sign;
    for (h = 0; h < 2; h++) {
        d.codes = code + 32 * h;
        d.sum = sum + 8 * h;
        tkvi_dot_all_128(&d, rows * tkvi_weight_rows_128(n_limbs));
    }
    for (r = 0; r < rows; r++) tkvi_store_answers_128(sum, r, n_limbs, fold, 16, 1, out + r * pad);
}

static void tkvi_tiles_v_128(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                             int rows, int n, int n_limbs, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED float z[TKVI_BLOCK];
    TKVI_ALIGNED int32_t centre2[TKVI_BLOCK];
    TKVI_ALIGNED uint8_t code[4 * TKVI_TILE_CODES], level[4 * TKVI_TILE_CODES];
    TKVI_ALIGNED tkvi_weight w[TKVI_BLOCK / 4 * TKVI_QUAD_128];
    tkvi_fold_128 fold[TKVI_ROWS];
    tkvi_tile_at at = tkvi_first_tile(&s->tiles);
    int width, i, k, t, g, two = 1, slab = 0; /* first channel */
    tkvi_fold_args_128 a;
    (void)next;
    a.zero = z;
    a.centre2 = centre2;
    a.n = TKVI_BLOCK;
    a.n_limbs = n_limbs;
    a.top = tkvi_top_v(s);
    a.unit = 1;
    a.wide = 0;
    s->format->side[TKV_V].meta(s, src, &tkvi_simd_ops_128, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0, g = -1; i < s->tiles.n[width]; i += 4) {
            const int channels = tkvi_slab_channels(s, width);
            if (g != slab / s->group) {
                const float *sc = scale + slab / s->group * TKVI_BLOCK, *ze = zero + (sc - scale);
                g = slab / s->group;
                for (t = 0; t < TKVI_BLOCK; t += 4) {
                    const tkvi_f4 x = tkvi_load_128(ze + t);
                    tkvi_store_128(z + t, tkvi_centred_128(x, sc + t, tkvi_centre(s, width)));
                    tkvi_store_ints_128(centre2 + t, tkvi_splat_ints_128(tkvi_centre2_128(s, width)));
                }
                a.scale = sc;
                a.coarse = tkvi_coarse_v(s, width);
                two = tkvi_fold_rows_128(&a, p, rows, 0, w, fold);
            }
            for (k = 0; k < 4; k++) {
                if (16 * k < n) tkvi_unpack_tile_128(src, &at, width, code + k * TKVI_TILE_CODES);
                tkvi_next_tile(&at, width);
            }
            for (k = 0; k < channels; k += 16) { /* pairs: 32 channels, with a table for each 16 */
                const uint8_t *from = code;
                if (s->levels) {
                    tkvi_codes_to_levels_128(s->levels + tkvi_level_table(s, width, k / 16), code,
                                             tkvi_round_up(n, 4) * 16, level);
                    from = level;
                }
                tkvi_slab_v_128(from, n, w, fold, rows, two, !s->levels && width < 8, s->pad, out + slab + k);
            }
            slab += channels;
        }
}

static int tkvi_softmax_step_128(const float *s, int rows, float *m, float *sum, float *p) {
    return tkvi_softmax_rows(tkvi_max64_128, tkvi_exp64_128, s, rows, m, sum, p);
}

static const tkvi_kernels tkvi_kernels_128 = {
    TKVI_ISA_128,
    TKVI_NAME_128,
    {tkvi_f32_k_128, tkvi_f16_k_128, tkvi_bf16_k_128, tkvi_tiles_k_128,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k)},
    {tkvi_f32_v_128, tkvi_f16_v_128, tkvi_bf16_v_128, tkvi_tiles_v_128,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v)},
    &tkvi_simd_ops_128,
    tkvi_exp64_128,
    tkvi_max64_128,
    tkvi_softmax_step_128,
};

#endif /* TKVI_128 */

#endif /* TKVI_KERNELS_VECTORS_128_H */
