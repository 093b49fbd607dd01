/*
 * kernels/avx2.h - the kernels of kernels/scalar.h for AVX2, FMA and F16C (Haswell, Zen and later).
 *
 * kernels/avx512.h has the same functions with longer vectors. Read them side by side.
 */
#ifndef TKVI_KERNELS_AVX2_H
#define TKVI_KERNELS_AVX2_H

#include "kernels/code_rows.h"
#include "kernels/simd_x86.h"
#include "kernels/tiles.h"

#ifdef TKVI_X86

#include "kernels/simd_avx2.inc"

#include "kernels/codes.inc"
#include "kernels/rotate.inc"
#include "kernels/values.inc"
#include "kernels/convert.inc"
#include "kernels/encode.inc"
#include "kernels/pack.inc"
#include "kernels/groups.inc"

/* >>pieces */
/* 8 values of an exact side. The branch is predicted: it goes one way for the whole side. */
TKVI_FLAT_AVX2 __m256 tkvi_load_values_avx2(tkvi_storage type, const uint8_t *row, int at) {
    if (type == TKVI_AS_F16) return _mm256_cvtph_ps(tkvi_load_bytes16_avx2(row + 2 * at));
    if (type == TKVI_AS_BF16)
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(tkvi_load_bytes16_avx2(row + 2 * at)), 16));
    return _mm256_castsi256_ps(tkvi_load_bytes_avx2(row + 4 * at));
}

static TKVI_TARGET_AVX2 float tkvi_max64_avx2(const float *s) {
    __m256 m = _mm256_loadu_ps(s);
    int t;
    for (t = 8; t < TKVI_BLOCK; t += 8) m = _mm256_max_ps(m, _mm256_loadu_ps(s + t));
    return tkvi_max_avx2(m);
}

/* exp(x) is 2^n 2^r with n + r = x log2 e, as in kernels/avx512.h. 2^n is added to the exponent: 2^r is 0.7 .. 1.5,
 * and n is above -127. */
static TKVI_TARGET_AVX2 float tkvi_exp64_avx2(const float *s, float maximum, float *p) {
    const __m256 log2e = _mm256_set1_ps(1.44269502f), least = _mm256_set1_ps(-87.0f);
    __m256 sum = _mm256_setzero_ps();
    int t;
    for (t = 0; t < TKVI_BLOCK; t += 8) {
        const __m256 x = _mm256_sub_ps(_mm256_loadu_ps(s + t), _mm256_set1_ps(maximum));
        const __m256 z = _mm256_max_ps(x, least);
        const __m256 n = _mm256_round_ps(_mm256_mul_ps(z, log2e), 8);
        const __m256 r = _mm256_fmadd_ps(z, _mm256_set1_ps(1.92596299e-8f), _mm256_fmsub_ps(z, log2e, n));
        __m256 y = TKVI_EXP2_FRACTION(_mm256_set1_ps, _mm256_fmadd_ps, r);
        y = _mm256_castsi256_ps(
            _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
        y = _mm256_and_ps(y, _mm256_cmp_ps(x, least, _CMP_GE_OQ));
        _mm256_storeu_ps(p + t, y);
        sum = _mm256_add_ps(sum, y);
    }
    return tkvi_sum_avx2(sum);
}

/* >>exact tiers */
/* Scores of nr rows, nt tokens at a time. Lanes are 8 channels. Tokens beyond n repeat the last one. */
TKVI_FLAT_AVX2 void tkvi_exact_k4_avx2(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                       const float *q, const float *ref, int rows, int n, const int nr,
                                       const int nt, float *scores) {
    int row_bytes = s->pad * s->format->bits / 8, t, c, r, j;
    for (t = 0; t < n; t += nt) {
        __m256 acc[4][4];
        const uint8_t *k[4];
        TKVI_UNROLL
        for (j = 0; j < nt; j++) k[j] = src + tkvi_min(t + j, n - 1) * row_bytes;
        tkvi_prefetch_bytes(src + t * row_bytes, nt * row_bytes, ahead);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < nt; j++) acc[r][j] = _mm256_setzero_ps();
        }
        for (c = 0; c < s->pad; c += 8) {
            __m256 x[4], minus = _mm256_loadu_ps(ref + c);
            TKVI_UNROLL
            for (j = 0; j < nt; j++)
                x[j] = _mm256_sub_ps(tkvi_load_values_avx2(s->format->stored, k[j], c), minus);
            TKVI_UNROLL
            for (r = 0; r < nr; r++) {
                __m256 y = _mm256_loadu_ps(q + tkvi_min(r, rows - 1) * s->pad + c);
                TKVI_UNROLL
                for (j = 0; j < nt; j++) acc[r][j] = _mm256_fmadd_ps(x[j], y, acc[r][j]);
            }
        }
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < nt; j++)
                if (r < rows) scores[r * TKVI_BLOCK + t + j] = tkvi_sum_avx2(acc[r][j]);
        }
    }
}

/* Scores of the first min(left, 4) rows. */
static TKVI_TARGET_AVX2 void tkvi_exact_rows_k_avx2(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                                    const float *q, const float *ref, int left, int n,
                                                    float *scores) {
    if (left == 1) tkvi_exact_k4_avx2(s, src, ahead, q, ref, left, n, 1, 4, scores);
    else if (left == 2) tkvi_exact_k4_avx2(s, src, ahead, q, ref, left, n, 2, 4, scores);
    else tkvi_exact_k4_avx2(s, src, ahead, q, ref, left, n, 4, 2, scores);
}

static TKVI_TARGET_AVX2 void tkvi_exact_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                               const float *q, const float *ref, int rows, int n, int n_limbs,
                                               float *scores) {
    int r;
    (void)n_limbs;
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (r = 0; r < rows; r += 4)
        tkvi_exact_rows_k_avx2(s, src, tkvi_prefetch_distance(src, next), q + r * s->pad, ref, rows - r, n,
                               scores + r * TKVI_BLOCK);
}

/* Outputs of nr rows in 16 channels, over all tokens. */
TKVI_FLAT_AVX2 void tkvi_exact_v4_avx2(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                       const float *p, int rows, int n, int first, const int nr, float *out) {
    int row_bytes = s->pad * s->format->bits / 8, t, r, j;
    __m256 acc[4][2];
    TKVI_UNROLL
    for (r = 0; r < nr; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (t = 0; t < n; t++, src += row_bytes) {
        __m256 x[2];
        tkvi_prefetch(src + first * s->format->bits / 8, ahead);
        TKVI_UNROLL
        for (j = 0; j < 2; j++) x[j] = tkvi_load_values_avx2(s->format->stored, src, first + 8 * j);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m256 y = _mm256_set1_ps(p[tkvi_min(r, rows - 1) * TKVI_BLOCK + t]);
            TKVI_UNROLL
            for (j = 0; j < 2; j++) acc[r][j] = _mm256_fmadd_ps(x[j], y, acc[r][j]);
        }
    }
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        TKVI_UNROLL
        for (j = 0; j < 2; j++)
            if (r < rows) {
                float *o = out + r * s->pad + first + 8 * j;
                _mm256_storeu_ps(o, _mm256_add_ps(_mm256_loadu_ps(o), acc[r][j]));
            }
    }
}

static TKVI_TARGET_AVX2 void tkvi_exact_v_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                               const float *p, int rows, int n, int n_limbs, float *out) {
    uintptr_t ahead = tkvi_prefetch_distance(src, next);
    int r, c;
    (void)n_limbs;
    for (r = 0; r < rows; r += 4)
        for (c = 0; c < s->pad; c += 16) {
            const float *x = p + r * TKVI_BLOCK;
            float *o = out + r * s->pad;
            int left = rows - r;
            if (left == 1) tkvi_exact_v4_avx2(s, src, ahead, x, left, n, c, 1, o);
            else if (left == 2) tkvi_exact_v4_avx2(s, src, ahead, x, left, n, c, 2, o);
            else tkvi_exact_v4_avx2(s, src, ahead, x, left, n, c, 4, o);
        }
}

#include "kernels/code_rows.inc"

static const tkvi_simd_ops tkvi_simd_ops_avx2 = {tkvi_f16_to_f32_avx2,
                                                 tkvi_f32_to_f16_avx2,
                                                 tkvi_decode_log_scales_avx2,
                                                 tkvi_decode_zero_points_avx2,
                                                 tkvi_encode_log_scales_avx2,
                                                 tkvi_pack_tile_avx2,
                                                 tkvi_interleave_avx2,
                                                 tkvi_encode_k_columns_avx2,
                                                 tkvi_finalize_scales_avx2,
                                                 tkvi_encode_v_tokens_avx2,
                                                 tkvi_encode_groups_avx2,
                                                 tkvi_decode_tiles_avx2,
                                                 TKVI_IF(TKVI_HAS_DECODED, tkvi_decode_rows_avx2),
                                                 TKVI_IF(TKVI_HAS_MOVES, tkvi_turn_rows_avx2)};

/* >>tiles */
#include "kernels/tiles.inc"

static int tkvi_softmax_step_avx2(const float *s, int rows, float *m, float *sum, float *p) {
    return tkvi_softmax_rows(tkvi_max64_avx2, tkvi_exp64_avx2, s, rows, m, sum, p);
}

static const tkvi_kernels tkvi_kernels_avx2 = {
    TKV_ISA_AVX2,
    "avx2",
    {tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_tiles_k_avx2,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k_avx2)},
    {tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_tiles_v_avx2,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v_avx2)},
    &tkvi_simd_ops_avx2,
    tkvi_exp64_avx2,
    tkvi_max64_avx2,
    tkvi_softmax_step_avx2,
};

#include "kernels/simd_end.inc"

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_AVX2_H */
