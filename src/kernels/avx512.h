/*
 * kernels/avx512.h - the kernels of kernels/scalar.h for AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 and
 * later).
 *
 * Two shapes do the work, each with up to 16 accumulators in registers:
 *   Integers: four vectors of codes by up to 4 weight rows. vpdpbusd multiplies unsigned bytes by signed ones: in K
 *             unsigned codes by signed weights, in V unsigned weights by signed codes. Four weights are broadcast at
 *             a time. Most widths have a loop of their own.
 *   Floats:   four vectors by up to 4 query rows.
 * Both are written once, with the number of rows as a constant argument.
 */
#ifndef TKVI_KERNELS_AVX512_H
#define TKVI_KERNELS_AVX512_H

#include "kernels/avx2.h"

#ifdef TKVI_AVX512

/* g++ 12 finds uninitialised variables in its own header (gcc bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "kernels/simd_avx512.inc"

#include "kernels/codes.inc"
#include "kernels/rotate.inc"
#include "kernels/values.inc"
#include "kernels/convert.inc"
#include "kernels/encode.inc"

/* >>pieces */
/* 16 values of an exact side. The branch is predicted: it goes one way for the whole side. */
TKVI_FLAT_AVX512 __m512 tkvi_load_values_avx512(tkvi_storage type, const uint8_t *row, int at) {
    if (type == TKVI_AS_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * at)));
    if (type == TKVI_AS_BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * at))), 16));
    return _mm512_castsi512_ps(tkvi_load_bytes_avx512(row + 4 * at));
}

static TKVI_TARGET_AVX512 float tkvi_max64_avx512(const float *s) {
    __m512 a = _mm512_max_ps(_mm512_loadu_ps(s), _mm512_loadu_ps(s + 16));
    __m512 b = _mm512_max_ps(_mm512_loadu_ps(s + 32), _mm512_loadu_ps(s + 48));
    return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
}

/* exp(x) for x <= 0, and 0 for x < -87. It is 2^n 2^r with n + r = x log2 e. log2 e has two floats, and FMA subtracts
 * n from the exact first product. */
TKVI_FLAT_AVX512 __m512 tkvi_exp_avx512(__m512 x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    const __m512 log2e = _mm512_set1_ps(1.44269502f);
    const __m512 n = _mm512_cvtepi32_ps(
        _mm512_cvt_roundps_epi32(_mm512_mul_ps(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    const __m512 r = _mm512_fmadd_ps(x, _mm512_set1_ps(1.92596299e-8f), _mm512_fmsub_ps(x, log2e, n));
    const __m512 y = TKVI_EXP2_FRACTION(_mm512_set1_ps, _mm512_fmadd_ps, r);
    return _mm512_maskz_scalef_ps(some, y, n);
}

static TKVI_TARGET_AVX512 float tkvi_exp64_avx512(const float *s, float maximum, float *p) {
    __m512 sum = _mm512_setzero_ps();
    int t;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        const __m512 y = tkvi_exp_avx512(_mm512_sub_ps(_mm512_loadu_ps(s + t), _mm512_set1_ps(maximum)));
        _mm512_storeu_ps(p + t, y);
        sum = _mm512_add_ps(sum, y);
    }
    return _mm512_reduce_add_ps(sum);
}

/* >>exact tiers */
/* Scores of nr rows, 4 tokens at a time. Lanes are 16 channels. Tokens beyond n repeat the last one. */
TKVI_FLAT_AVX512 void tkvi_exact_k4_avx512(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                           const float *q, const float *ref, int rows, int n, const int nr,
                                           float *scores) {
    int row_bytes = s->pad * s->format->bits / 8, t, c, r, j;
    for (t = 0; t < n; t += 4) {
        __m512 acc[4][4];
        const uint8_t *k[4];
        TKVI_UNROLL
        for (j = 0; j < 4; j++) k[j] = src + tkvi_min(t + j, n - 1) * row_bytes;
        tkvi_prefetch_bytes(src + t * row_bytes, 4 * row_bytes, ahead);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
        }
        for (c = 0; c < s->pad; c += 16) {
            __m512 x[4], minus = _mm512_loadu_ps(ref + c);
            TKVI_UNROLL
            for (j = 0; j < 4; j++)
                x[j] = _mm512_sub_ps(tkvi_load_values_avx512(s->format->stored, k[j], c), minus);
            TKVI_UNROLL
            for (r = 0; r < nr; r++) {
                __m512 y = _mm512_loadu_ps(q + tkvi_min(r, rows - 1) * s->pad + c);
                TKVI_UNROLL
                for (j = 0; j < 4; j++) acc[r][j] = _mm512_fmadd_ps(x[j], y, acc[r][j]);
            }
        }
        TKVI_UNROLL
        for (r = 0; r < nr; r++)
            if (r < rows) _mm_storeu_ps(scores + r * TKVI_BLOCK + t, tkvi_sum4_avx512(acc[r]));
    }
}

/* Scores of the first min(left, 4) rows. */
static TKVI_TARGET_AVX512 void tkvi_exact_rows_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                        uintptr_t ahead, const float *q, const float *ref,
                                                        int left, int n, float *scores) {
    if (left == 1) tkvi_exact_k4_avx512(s, src, ahead, q, ref, left, n, 1, scores);
    else if (left == 2) tkvi_exact_k4_avx512(s, src, ahead, q, ref, left, n, 2, scores);
    else tkvi_exact_k4_avx512(s, src, ahead, q, ref, left, n, 4, scores);
}

static TKVI_TARGET_AVX512 void tkvi_exact_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                   const uint8_t *next, const float *q, const float *ref,
                                                   int rows, int n, int n_limbs, float *scores) {
    int r;
    (void)n_limbs;
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (r = 0; r < rows; r += 4)
        tkvi_exact_rows_k_avx512(s, src, tkvi_prefetch_distance(src, next), q + r * s->pad, ref, rows - r, n,
                                 scores + r * TKVI_BLOCK);
}

/* Outputs of nr rows in nv vectors of 16 channels, over all tokens. */
TKVI_FLAT_AVX512 void tkvi_exact_v4_avx512(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                           const float *p, int rows, int n, int first, const int nr,
                                           const int nv, float *out) {
    int row_bytes = s->pad * s->format->bits / 8, t, r, j;
    __m512 acc[4][4];
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        TKVI_UNROLL
        for (j = 0; j < nv; j++) acc[r][j] = _mm512_setzero_ps();
    }
    for (t = 0; t < n; t++, src += row_bytes) {
        __m512 x[4];
        TKVI_UNROLL
        for (j = 0; j < nv; j++) {
            x[j] = tkvi_load_values_avx512(s->format->stored, src, first + 16 * j);
            tkvi_prefetch(src + (first + 16 * j) * s->format->bits / 8, ahead);
        }
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m512 y = _mm512_set1_ps(p[tkvi_min(r, rows - 1) * TKVI_BLOCK + t]);
            TKVI_UNROLL
            for (j = 0; j < nv; j++) acc[r][j] = _mm512_fmadd_ps(x[j], y, acc[r][j]);
        }
    }
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        TKVI_UNROLL
        for (j = 0; j < nv; j++)
            if (r < rows) {
                float *o = out + r * s->pad + first + 16 * j;
                _mm512_storeu_ps(o, _mm512_add_ps(_mm512_loadu_ps(o), acc[r][j]));
            }
    }
}

static TKVI_TARGET_AVX512 void tkvi_exact_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                   const uint8_t *next, const float *p, int rows, int n,
                                                   int n_limbs, float *out) {
    uintptr_t ahead = tkvi_prefetch_distance(src, next);
    int r;
    (void)n_limbs;
    for (r = 0; r < rows; r += 4) {
        const float *x = p + r * TKVI_BLOCK;
        float *o = out + r * s->pad;
        int left = rows - r, c = 0;
        for (; c + 64 <= s->pad; c += 64) {
            if (left == 1) tkvi_exact_v4_avx512(s, src, ahead, x, left, n, c, 1, 4, o);
            else if (left == 2) tkvi_exact_v4_avx512(s, src, ahead, x, left, n, c, 2, 4, o);
            else tkvi_exact_v4_avx512(s, src, ahead, x, left, n, c, 4, 4, o);
        }
        for (; c < s->pad; c += 16) tkvi_exact_v4_avx512(s, src, ahead, x, left, n, c, 4, 1, o);
    }
}

#include "kernels/code_rows.inc"

static const tkvi_simd_ops tkvi_simd_ops_avx512 = {tkvi_f16_to_f32_avx512,
                                                   tkvi_f32_to_f16_avx2,
                                                   tkvi_decode_log_scales_avx512,
                                                   tkvi_decode_zero_points_avx512,
                                                   tkvi_encode_log_scales_avx2,
                                                   tkvi_pack_tile_avx2,
                                                   tkvi_interleave_avx2,
                                                   tkvi_encode_k_columns_avx512,
                                                   tkvi_finalize_scales_avx2,
                                                   tkvi_encode_v_tokens_avx512,
                                                   tkvi_encode_groups_avx2,
                                                   tkvi_decode_tiles_avx512,
                                                   TKVI_IF(TKVI_HAS_DECODED, tkvi_decode_rows_avx512),
                                                   TKVI_IF(TKVI_HAS_MOVES, tkvi_turn_rows_avx512)};

/* >>tiles */
#include "kernels/tiles.inc"

/* Four rows at once. Missing rows repeat the last one. */
static TKVI_TARGET_AVX512 int tkvi_softmax_step_avx512(const float *s, int rows, float *m, float *sum,
                                                       float *p) {
    int first, r, t, seen = 0;
    for (first = 0; first < rows; first += 4) {
        const int nr = tkvi_min(4, rows - first);
        const __mmask8 present = (__mmask8)((1 << nr) - 1);
        const float *row[4];
        TKVI_ALIGNED float top[4];
        __m512 most[4], sums[4];
        __m128 high;
        __mmask8 sees;
        TKVI_UNROLL
        for (r = 0; r < 4; r++) {
            row[r] = s + (first + tkvi_min(r, nr - 1)) * TKVI_BLOCK;
            most[r] =
                _mm512_max_ps(_mm512_max_ps(_mm512_loadu_ps(row[r]), _mm512_loadu_ps(row[r] + 16)),
                              _mm512_max_ps(_mm512_loadu_ps(row[r] + 32), _mm512_loadu_ps(row[r] + 48)));
            sums[r] = _mm512_setzero_ps();
        }
        high = tkvi_max4_avx512(most);
        sees = _mm_mask_cmp_ps_mask(present, high, _mm_set1_ps(TKVI_HIDDEN), _CMP_GT_OQ);
        seen += (int)sees;
        high = _mm_max_ps(high, _mm_maskz_loadu_ps(
                                    present, m + first)); /* a row that sees no key gets exp(-1e30 - 0) = 0 */
        _mm_mask_storeu_ps(m + first, sees, high);
        _mm_store_ps(top, _mm_maskz_mov_ps(sees, high));
        for (r = 0; r < nr; r++)
            for (t = 0; t < TKVI_BLOCK; t += 16) {
                const __m512 y =
                    tkvi_exp_avx512(_mm512_sub_ps(_mm512_loadu_ps(row[r] + t), _mm512_set1_ps(top[r])));
                _mm512_storeu_ps(p + (first + r) * TKVI_BLOCK + t, y);
                sums[r] = _mm512_add_ps(sums[r], y);
            }
        _mm_mask_storeu_ps(sum + first, present, tkvi_sum4_avx512(sums));
    }
    return seen;
}

static const tkvi_kernels tkvi_kernels_avx512 = {
    TKV_ISA_AVX512,
    "avx512",
    {tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_tiles_k_avx512,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k_avx512)},
    {tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_tiles_v_avx512,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v_avx512)},
    &tkvi_simd_ops_avx512,
    tkvi_exp64_avx512,
    tkvi_max64_avx512,
    tkvi_softmax_step_avx512,
};

#include "kernels/simd_end.inc"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* TKVI_AVX512 */

#endif /* TKVI_KERNELS_AVX512_H */
