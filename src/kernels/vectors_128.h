/*
 * kernels/vectors_128.h - the kernels of kernels/scalar.h with vectors of 128 bits, for NEON and WebAssembly.
 *
 * Types and operations that end in _128 come from kernels/neon.h or kernels/wasm.h. The target of the compiler
 * selects one of them.
 *
 * No machine to measure prefetching of `next` was available, so these kernels do without it.
 */
#ifndef TKVI_KERNELS_VECTORS_128_H
#define TKVI_KERNELS_VECTORS_128_H

#include "kernels/code_rows.h"
#include "kernels/neon.h"
#include "kernels/tiles.h"
#include "kernels/wasm.h"

#ifdef TKVI_128

#include "kernels/simd_128.inc"
#include "kernels/codes.inc"
#include "kernels/convert.inc"
#include "kernels/rotate.inc"
#include "kernels/values.inc"
#include "kernels/encode.inc"
#include "kernels/pack.inc"
#include "kernels/groups.inc"

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

/* Scores of up to 4 rows. */
static void tkvi_exact_rows_k_128(const tkvi_side *s, const uint8_t *src, uintptr_t ahead, const float *q,
                                  const float *ref, int left, int n, float *scores) {
    (void)ahead;
    if (left >= 4) tkvi_exact_k4_128(TKVI_AS_F32, 4, s, src, q, ref, n, scores);
    else
        for (; left > 0; left--, q += s->pad, scores += TKVI_BLOCK)
            tkvi_exact_k4_128(TKVI_AS_F32, 1, s, src, q, ref, n, scores);
}
#define tkvi_exact_v_128 tkvi_f32_v_128
#include "kernels/code_rows.inc"

static const tkvi_simd_ops tkvi_simd_ops_128 = {tkvi_f16_to_f32_128,
                                                tkvi_f32_to_f16_128,
                                                tkvi_decode_log_scales_128,
                                                tkvi_decode_zero_points_128,
                                                tkvi_encode_log_scales_128,
                                                tkvi_pack_tile_128,
                                                tkvi_interleave_128,
                                                tkvi_encode_k_columns_128,
                                                tkvi_finalize_scales_128,
                                                tkvi_encode_v_tokens_128,
                                                tkvi_encode_groups_128,
                                                tkvi_decode_tiles_128,
                                                TKVI_IF(TKVI_HAS_DECODED, tkvi_decode_rows_128),
                                                TKVI_IF(TKVI_HAS_MOVES, tkvi_turn_rows_128)};

#include "kernels/tiles.inc"

static int tkvi_softmax_step_128(const float *s, int rows, float *m, float *sum, float *p) {
    return tkvi_softmax_rows(tkvi_max64_128, tkvi_exp64_128, s, rows, m, sum, p);
}

static const tkvi_kernels tkvi_kernels_128 = {
    TKVI_ISA_128,
    TKVI_NAME_128,
    {tkvi_f32_k_128, tkvi_f16_k_128, tkvi_bf16_k_128, tkvi_tiles_k_128,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k_128)},
    {tkvi_f32_v_128, tkvi_f16_v_128, tkvi_bf16_v_128, tkvi_tiles_v_128,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v_128)},
    &tkvi_simd_ops_128,
    tkvi_exp64_128,
    tkvi_max64_128,
    tkvi_softmax_step_128,
};

#include "kernels/simd_end.inc"

#endif /* TKVI_128 */

#endif /* TKVI_KERNELS_VECTORS_128_H */
