/*
 * kernels/groups_x86.h - encodes the groups of KIVI (formats/kivi.h) with AVX2. Codes, scales and zeros have the
 * bytes of the scalar code. K: a lane is a channel. V: four tokens go together, because their codes share 32 bits
 * of a tile.
 */
#ifndef TKVI_KERNELS_GROUPS_X86_H
#define TKVI_KERNELS_GROUPS_X86_H

#include "kernels/rotate_x86.h"
#include "kernels/simd_x86.h"

#ifdef TKVI_X86

/* -ffast-math divides vectors by a reciprocal, but not floats. These bytes would then differ from those of
 * tkv_encode_block, so the scalar code is used. */
#if defined(__FAST_MATH__) || defined(_M_FP_FAST)
#define TKVI_INEXACT_DIVISION 1
#else
#define TKVI_INEXACT_DIVISION 0
#endif

/* Mask of the first n of 8 lanes. n can be any number. */
TKVI_FLAT_AVX2 __m256i tkvi_lane_mask_avx2(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Clamps to the range of fp16. */
TKVI_FLAT_AVX2 __m256 tkvi_clamp_f16_avx2(__m256 x) {
    const __m256 most = _mm256_set1_ps(TKVI_F16_MAX), least = _mm256_set1_ps(-TKVI_F16_MAX);
    return _mm256_max_ps(_mm256_min_ps(x, most), least);
}

/* Loads up to eight values, in the lanes of the mask. */
TKVI_FLAT_AVX2 __m256 tkvi_load_group_avx2(const float *p, __m256i lanes) {
    return tkvi_clamp_f16_avx2(_mm256_maskload_ps(p, lanes));
}

/* Codes as 32-bit integers. A scale of 0 gives code 0. */
TKVI_FLAT_AVX2 __m256i tkvi_group_to_codes_avx2(__m256 x, __m256 scale, __m256 zero, float top) {
    const __m256 none = _mm256_setzero_ps();
    __m256 y = _mm256_div_ps(_mm256_sub_ps(x, zero), scale);
    y = _mm256_and_ps(y, _mm256_cmp_ps(scale, none, _CMP_GT_OQ));
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(y, none), _mm256_set1_ps(top)));
}

/* Encodes group g of channels c .. c + 7 of K. n: tokens of the block. */
TKVI_FLAT_AVX2 void tkvi_encode_group_k_avx2(const tkvi_side *s, const float *x, size_t stride, int n, int g,
                                             int c, tkvi_codes code, uint8_t *meta) {
    const __m256i lanes = tkvi_lane_mask_avx2(s->dim - c);
    const float top = (float)((1 << s->format->bits) - 1);
    const int from = g * s->group, end = tkvi_min(n, from + s->group);
    uint8_t *at = meta + 2 * (g * s->pad + c);
    __m256 lo, hi, scale, zero;
    __m128i half;
    int t, k;
    x += c;
    lo = hi = tkvi_load_group_avx2(x + (size_t)from * stride, lanes);
    for (t = from + 1; t < end; t++) {
        const __m256 v = tkvi_load_group_avx2(x + (size_t)t * stride, lanes);
        lo = _mm256_min_ps(v, lo);
        hi = _mm256_max_ps(v, hi);
    }
    half = _mm256_cvtps_ph(_mm256_div_ps(_mm256_sub_ps(hi, lo), _mm256_set1_ps(top)), 0);
    scale = _mm256_cvtph_ps(half);
    _mm_storeu_si128((__m128i *)(void *)at, half);
    half = _mm256_cvtps_ph(_mm256_add_ps(lo, _mm256_setzero_ps()), 0);
    zero = _mm256_cvtph_ps(half);
    _mm_storeu_si128((__m128i *)(void *)(at + 2 * s->groups * s->pad), half);
    for (t = from; t < end; t += 4) {
        __m256i v[4];
        TKVI_UNROLL
        for (k = 0; k < 4; k++) {
            v[k] = _mm256_setzero_si256();
            if (t + k < end)
                v[k] = tkvi_group_to_codes_avx2(tkvi_load_group_avx2(x + (size_t)(t + k) * stride, lanes),
                                                scale, zero, top);
        }
        v[0] = _mm256_packus_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        _mm_storeu_si128((__m128i *)(void *)(code[c / 4] + 4 * t), _mm256_castsi256_si128(v[0]));
        _mm_storeu_si128((__m128i *)(void *)(code[c / 4 + 1] + 4 * t), _mm256_extracti128_si256(v[0], 1));
    }
}

/* out: op over all lanes of each of four vectors. op is a minimum or maximum. */
#define TKVI_ACROSS_FOUR_(op, x, out)                                                                        \
    do {                                                                                                     \
        __m128 a_ = op(_mm256_castps256_ps128((x)[0]), _mm256_extractf128_ps((x)[0], 1));                    \
        __m128 b_ = op(_mm256_castps256_ps128((x)[1]), _mm256_extractf128_ps((x)[1], 1));                    \
        __m128 c_ = op(_mm256_castps256_ps128((x)[2]), _mm256_extractf128_ps((x)[2], 1));                    \
        __m128 d_ = op(_mm256_castps256_ps128((x)[3]), _mm256_extractf128_ps((x)[3], 1));                    \
        _MM_TRANSPOSE4_PS(a_, b_, c_, d_);                                                                   \
        out = op(op(a_, b_), op(c_, d_));                                                                    \
    } while (0)

/* Encodes group g of tokens t .. t + 3 of V. Only the first n_tokens exist; rows of the others repeat the last one,
 * and their scales and zeros become 0. */
TKVI_FLAT_AVX2 void tkvi_encode_group_v_avx2(const tkvi_side *s, const float *const *row, int n_tokens, int g,
                                             int t, tkvi_codes code, uint8_t *meta) {
    const float top = (float)((1 << s->format->bits) - 1);
    const int from = g * s->group, end = tkvi_min(s->dim, from + s->group);
    const __m128i some = _mm_cmpgt_epi32(_mm_set1_epi32(n_tokens), _mm_setr_epi32(0, 1, 2, 3));
    uint8_t *at = meta + 2 * (g * TKVI_BLOCK + t);
    TKVI_ALIGNED float scales[4], zeros[4];
    __m256 lo[4], hi[4];
    __m128 least, most;
    __m128i half;
    int c, k;
    TKVI_UNROLL
    for (k = 0; k < 4; k++) lo[k] = hi[k] = tkvi_clamp_f16_avx2(_mm256_broadcast_ss(row[k] + from));
    for (c = from; c < end; c += 8) {
        const __m256i lanes = tkvi_lane_mask_avx2(end - c);
        TKVI_UNROLL
        for (k = 0; k < 4; k++) {
            const __m256 v = tkvi_load_group_avx2(row[k] + c, lanes), mask = _mm256_castsi256_ps(lanes);
            lo[k] = _mm256_blendv_ps(lo[k], _mm256_min_ps(v, lo[k]), mask);
            hi[k] = _mm256_blendv_ps(hi[k], _mm256_max_ps(v, hi[k]), mask);
        }
    }
    TKVI_ACROSS_FOUR_(_mm_min_ps, lo, least);
    TKVI_ACROSS_FOUR_(_mm_max_ps, hi, most);
    half = _mm_cvtps_ph(
        _mm_and_ps(_mm_div_ps(_mm_sub_ps(most, least), _mm_set1_ps(top)), _mm_castsi128_ps(some)), 0);
    _mm_store_ps(scales, _mm_cvtph_ps(half));
    _mm_storel_epi64((__m128i *)(void *)at, half);
    half = _mm_cvtps_ph(_mm_and_ps(_mm_add_ps(least, _mm_setzero_ps()), _mm_castsi128_ps(some)), 0);
    _mm_store_ps(zeros, _mm_cvtph_ps(half));
    _mm_storel_epi64((__m128i *)(void *)(at + 2 * s->groups * TKVI_BLOCK), half);
    for (c = from; c < end; c += 8) {
        const __m256i lanes = tkvi_lane_mask_avx2(end - c);
        __m256i v[4];
        TKVI_UNROLL
        for (k = 0; k < 4; k++)
            v[k] = tkvi_group_to_codes_avx2(tkvi_load_group_avx2(row[k] + c, lanes),
                                            _mm256_set1_ps(scales[k]), _mm256_set1_ps(zeros[k]), top);
        v[0] = _mm256_or_si256(v[0], _mm256_slli_epi32(v[1], 8));
        v[2] = _mm256_or_si256(v[2], _mm256_slli_epi32(v[3], 8));
        v[0] = _mm256_and_si256(_mm256_or_si256(v[0], _mm256_slli_epi32(v[2], 16)), lanes);
        _mm256_storeu_si256((__m256i *)(void *)(code[c / 16 * 4 + t / 16] + t % 16 / 4 * 64 + c % 16 * 4),
                            v[0]);
    }
}

static TKVI_TARGET_AVX2 void tkvi_encode_groups_avx2(const tkvi_side *s, const float *x, size_t stride, int n,
                                                     tkvi_codes code, uint8_t *meta) {
    int g, c, t, k;
    if (s->fit || s->order || TKVI_INEXACT_DIVISION) {
        tkvi_encode_groups_scalar(s, x, stride, n, code, meta);
        return;
    }
    for (c = 0; c < s->dim && s->which == TKV_K; c += 8)
        for (g = 0; g * s->group < n && g < s->groups; g++)
            tkvi_encode_group_k_avx2(s, x, stride, n, g, c, code, meta);
    for (t = 0; t < n && s->which == TKV_V; t += 4) {
        const float *row[4];
        for (k = 0; k < 4; k++) row[k] = x + (size_t)tkvi_min(t + k, n - 1) * stride;
        for (g = 0; g < s->groups; g++) tkvi_encode_group_v_avx2(s, row, n - t, g, t, code, meta);
    }
}

#undef TKVI_ACROSS_FOUR_
#undef TKVI_INEXACT_DIVISION

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_GROUPS_X86_H */
