/*
 * kernels/avx2.h - the kernels of kernels/scalar.h for AVX2, FMA and F16C (Haswell, Zen and later).
 *
 * kernels/avx512.h has the same functions with longer vectors. Read them side by side.
 */
#ifndef TKVI_KERNELS_AVX2_H
#define TKVI_KERNELS_AVX2_H

#include "kernels/decode_x86.h"
#include "kernels/values_x86.h"
#include "kernels/prefill.h"
#include "kernels/tiles.h"

#ifdef TKVI_X86

#include "kernels/simd_avx2.inc"

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

#include "kernels/simd_ops.inc"

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

/* >>decoded: see kernels/decode_x86.h. Tokens are decoded 16 at a time into a buffer, because 16 registers are too
 * few to decode and multiply together. */
/* Levels of eight codes; see kernels/avx512.h. */
TKVI_FLAT_AVX2 __m256 tkvi_e5m2_avx2(__m256i code) {
    const __m256i size = _mm256_and_si256(code, _mm256_set1_epi32(127));
    const __m256i sign = _mm256_slli_epi32(_mm256_sub_epi32(code, size), 24);
    const __m256i large =
        _mm256_add_epi32(_mm256_slli_epi32(size, 21), _mm256_set1_epi32((126 + TKVI_E5M2_LOW + 2) << 23));
    const __m256 subnormal = _mm256_mul_ps(
        _mm256_cvtepi32_ps(size), _mm256_castsi256_ps(_mm256_set1_epi32((127 + TKVI_E5M2_LOW) << 23)));
    const __m256i x = _mm256_blendv_epi8(large, _mm256_castps_si256(subnormal),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(4), size));
    return _mm256_castsi256_ps(_mm256_or_si256(x, sign));
}

TKVI_FLAT_AVX2 __m256 tkvi_e4m3_avx2(__m128i code) {
    __m128i x = _mm_srai_epi16(_mm_slli_epi16(_mm_cvtepu8_epi16(code), 8), 1);
    x = _mm_and_si128(x, _mm_set1_epi16((int16_t)0xbfff));
    return _mm256_mul_ps(_mm256_cvtph_ps(x), _mm256_set1_ps(4.0f));
}

/* Levels of 8 of the 16 channels whose codes begin at p: the first 8, or the last 8 if half is 1. neighbours: 1:
 * RoPE partners are neighbours, so the vector takes every second code. */
TKVI_FLAT_AVX2 __m256 tkvi_load_levels_avx2(const tkvi_code_rows *r, const tkvi_code_kind kind,
                                            const int neighbours, const uint8_t *p, const int half,
                                            __m256i shift) {
    __m256i x;
    __m256 low, high;
    if (kind != TKVI_CODES_TABLE) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(p + 8 * half));
        if (kind == TKVI_CODES_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        return kind == TKVI_CODES_E4M3 ? tkvi_e4m3_avx2(bytes) : tkvi_e5m2_avx2(_mm256_cvtepu8_epi32(bytes));
    }
    p += half * r->bits * (neighbours ? 2 : 1);
    x = _mm256_set1_epi32(tkvi_load_int_x86(p));
    if (neighbours) x = _mm256_inserti128_si256(x, _mm_set1_epi32(tkvi_load_int_x86(p + r->bits)), 1);
    x = _mm256_srlv_epi32(x, shift);
    low = _mm256_permutevar8x32_ps(_mm256_load_ps(r->level), x); /* uses 3 bits of x */
    high = _mm256_permutevar8x32_ps(_mm256_load_ps(r->level + 8), x);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)));
}

static TKVI_TARGET_AVX2 void tkvi_fold_factors_avx2(tkvi_code_rows *r) {
    TKVI_ALIGNED float scale[TKVI_BLOCK];
    int t, c;
    memcpy(scale, r->scale, sizeof scale);
    for (t = 0; t < TKVI_BLOCK * r->scales_per_token; t += 8) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(r->factors + t));
        _mm256_store_ps(r->scale + t, tkvi_e4m3_avx2(bytes));
    }
    for (t = 0; t < TKVI_BLOCK; t++)
        for (c = 0; c < r->scales_per_token; c++) r->scale[t * r->scales_per_token + c] *= scale[t];
}

/* Decodes tokens from .. from + n - 1 to x, [token][16 * n_vectors]. */
TKVI_FLAT_AVX2 void tkvi_codes_to_floats_avx2(const tkvi_code_rows *r, const tkvi_code_kind kind,
                                              const int by_channel, const int neighbours, int from, int n,
                                              float *x) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i step = _mm256_set1_epi32(r->bits * (neighbours ? 2 : 1));
    __m256i shift[2];
    int t, v, h;
    shift[0] = _mm256_mullo_epi32(neighbours ? _mm256_and_si256(lane, _mm256_set1_epi32(3)) : lane, step);
    shift[1] = neighbours ? _mm256_add_epi32(shift[0], _mm256_set1_epi32(r->bits)) : shift[0];
    for (t = from; t < from + n; t++) {
        const uint8_t *row = r->codes + (size_t)t * r->row_bytes;
        const float *by = r->scale + t * r->scales_per_token;
        const __m256 plus = _mm256_set1_ps(r->s->grid ? 0.0f : r->zero[t]);
        tkvi_prefetch_code_row(r, t);
        for (v = 0; v < r->n_vectors; v++) {
            const int spread =
                neighbours &&
                v < r->n_partners; /* the other channels are not rotated, and keep their order */
            TKVI_UNROLL
            for (h = 0; h < 2; h++, x += 8) {
                const int c = 16 * v + 8 * h;
                __m256 y;
                if (spread) y = tkvi_load_levels_avx2(r, kind, 1, row + r->vector_at[v], h, shift[v & 1]);
                else
                    y = tkvi_load_levels_avx2(r, kind, 0, row + r->vector_at[v], h,
                                              _mm256_mullo_epi32(lane, _mm256_set1_epi32(r->bits)));
                if (by_channel)
                    y = _mm256_fmadd_ps(y, _mm256_load_ps(r->scale + c), _mm256_load_ps(r->zero + c));
                else y = _mm256_fmadd_ps(y, _mm256_set1_ps(by[c >> r->shift]), plus);
                _mm256_store_ps(x, y);
            }
        }
    }
}

static TKVI_TARGET_AVX2 void tkvi_decode_code_rows_avx2(const tkvi_code_rows *r, int from, int n, float *x) {
    if (r->kind == TKVI_CODES_INT8) tkvi_codes_to_floats_avx2(r, TKVI_CODES_INT8, 0, 0, from, n, x);
    else if (r->kind == TKVI_CODES_E4M3) tkvi_codes_to_floats_avx2(r, TKVI_CODES_E4M3, 0, 0, from, n, x);
    else if (r->kind == TKVI_CODES_E5M2) tkvi_codes_to_floats_avx2(r, TKVI_CODES_E5M2, 0, 0, from, n, x);
    else if (!r->by_channel) tkvi_codes_to_floats_avx2(r, TKVI_CODES_TABLE, 0, 0, from, n, x);
    else if (r->rope && r->rope->step == 2) tkvi_codes_to_floats_avx2(r, TKVI_CODES_TABLE, 1, 1, from, n, x);
    else tkvi_codes_to_floats_avx2(r, TKVI_CODES_TABLE, 1, 0, from, n, x);
}

/* Rotates a row in the order of the vectors as RoPE does. back: 1: by minus the angle. */
static TKVI_TARGET_AVX2 void tkvi_rope_row_avx2(const tkvi_code_rows *r, const float *cosine,
                                                const float *sine, int back, float *x) {
    const __m256 sign = _mm256_castsi256_ps(
        _mm256_set1_epi32(back ? INT32_MIN : 0)); /* from bits: -ffast-math drops the sign of -0.0f */
    int v, h;
    for (v = 0; v < r->n_partners; v += 2)
        for (h = 0; h < 2; h++) {
            float *at = x + 16 * v + 8 * h;
            const __m256 c = _mm256_loadu_ps(cosine + 8 * v + 8 * h), a = _mm256_load_ps(at);
            const __m256 s = _mm256_xor_ps(_mm256_loadu_ps(sine + 8 * v + 8 * h), sign);
            const __m256 b = _mm256_load_ps(at + 16);
            _mm256_store_ps(at, _mm256_fnmadd_ps(b, s, _mm256_mul_ps(a, c)));
            _mm256_store_ps(at + 16, _mm256_fmadd_ps(a, s, _mm256_mul_ps(b, c)));
        }
}

static TKVI_TARGET_AVX2 void tkvi_decoded_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                                 const float *q, const float *ref, int rows, int n,
                                                 int n_limbs, float *scores) {
    TKVI_ALIGNED float rotated[TKVI_ROWS * TKVI_VECTOR_FLOATS], x[TKVI_AT_ONCE * TKVI_VECTOR_FLOATS];
    TKVI_ALIGNED float first[2][TKV_MAX_HEAD_DIM / 2], none[TKVI_VECTOR_FLOATS], less[TKVI_ROWS];
    float *where[TKVI_AT_ONCE * TKVI_KVQUANT_SLOTS];
    tkvi_code_rows rd;
    tkvi_side plain;
    int from, r, t;
    if (!tkvi_open_code_rows(&rd, s, src, next, &tkvi_simd_ops_avx2)) {
        tkvi_decoded_k(s, src, next, q, ref, rows, n, n_limbs, scores);
        return;
    }
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    memset(none, 0, sizeof none);
    if (rd.factors) tkvi_fold_factors_avx2(&rd);
    tkvi_place_queries(&rd, q, ref, rows, rotated, less);
    tkvi_make_scratch_side(&rd, &plain);
    if (rd.rope) tkvi_rope_start_angles(&rd, first[0], first[1]);
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        const int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_decode_code_rows_avx2(&rd, from, count, x);
        if (rd.slots) (void)tkvi_scatter_outliers_k(&rd, from, count, x, where);
        for (r = 0; r < rows && rd.rope; r++)
            tkvi_rope_row_avx2(&rd, from ? rd.rope->cosine + TKVI_ROPE_NEAR * rd.rope->row : first[0],
                               from ? rd.rope->sine + TKVI_ROPE_NEAR * rd.rope->row : first[1], 1,
                               rotated + 16 * r * rd.n_vectors);
        for (t = 1; t < count && rd.rope; t++)
            tkvi_rope_row_avx2(&rd, rd.rope->cosine + t * rd.rope->row, rd.rope->sine + t * rd.rope->row, 0,
                               x + 16 * t * rd.n_vectors);
        for (r = 0; r < rows; r += 4)
            tkvi_exact_rows_k_avx2(&plain, (const uint8_t *)x, 0, rotated + 16 * r * rd.n_vectors, none,
                                   rows - r, count, scores + r * TKVI_BLOCK + from);
    }
    for (r = 0; r < rows; r++)
        for (t = 0; t < TKVI_BLOCK; t++) scores[r * TKVI_BLOCK + t] -= less[r];
}

static TKVI_TARGET_AVX2 void tkvi_decoded_v_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                                 const float *p, int rows, int n, int n_limbs, float *out) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE * TKVI_VECTOR_FLOATS], sum[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    tkvi_code_rows rd;
    tkvi_side plain;
    float *o = s->grid && s->rotate ? sum : out;
    int from, r, c;
    if (!tkvi_open_code_rows(&rd, s, src, next, &tkvi_simd_ops_avx2)) {
        tkvi_decoded_v(s, src, next, p, rows, n, n_limbs, out);
        return;
    }
    if (rd.factors) tkvi_fold_factors_avx2(&rd);
    if (o == sum) memset(sum, 0, (size_t)(rows * s->pad) * sizeof(float));
    tkvi_make_scratch_side(&rd, &plain);
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        const int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_decode_code_rows_avx2(&rd, from, count, x);
        tkvi_exact_v_avx2(&plain, (const uint8_t *)x, NULL, p + from, rows, count, n_limbs, o);
    }
    for (r = 0; r < rows && o == sum; r++) {
        tkvi_rotate_back(sum + r * s->pad, s->dim);
        for (c = 0; c < s->dim; c++) out[r * s->pad + c] += sum[r * s->pad + c];
    }
    if (rd.slots) tkvi_add_outliers_v(&rd, p, rows, n, out);
}

/* >>tiles */
#include "kernels/tiles.inc"
#include "kernels/prefill.inc"

static int tkvi_softmax_step_avx2(const float *s, int rows, float *m, float *sum, float *p) {
    return tkvi_softmax_rows(tkvi_max64_avx2, tkvi_exp64_avx2, s, rows, m, sum, p);
}

static const tkvi_kernels tkvi_kernels_avx2 = {
    TKV_ISA_AVX2,
    "avx2",
    {tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_tiles_k_avx2,
     TKVI_HAS_CODE_ROWS ? tkvi_decoded_k_avx2 : TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k)},
    {tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_tiles_v_avx2,
     TKVI_HAS_CODE_ROWS ? tkvi_decoded_v_avx2 : TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v)},
    &tkvi_simd_ops_avx2,
    tkvi_exp64_avx2,
    tkvi_max64_avx2,
    tkvi_softmax_step_avx2,
    &tkvi_prefill_avx2,
};

#include "kernels/simd_end.inc"

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_AVX2_H */
