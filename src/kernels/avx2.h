/*
 * kernels/avx2.h - the kernels of kernels/scalar.h for AVX2, FMA and F16C (Haswell, Zen and later).
 *
 * kernels/avx512.h has the same functions with longer vectors. Read them side by side.
 */
#ifndef TKVI_KERNELS_AVX2_H
#define TKVI_KERNELS_AVX2_H

#include "kernels/decode_x86.h"
#include "kernels/groups_x86.h"
#include "kernels/values_x86.h"
#include "kernels/tiles.h"

#ifdef TKVI_X86

#include "kernels/simd_avx2.inc"

/* >>pieces */
static TKVI_TARGET_AVX2 void tkvi_f16_to_f32_avx2(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(tkvi_load_bytes16_avx2(src + 2 * i)));
    if (i < n) { /* no scalar code, which is slow while the upper halves of registers are in use */
        uint8_t bytes[16] = {0};
        float x[8];
        memcpy(bytes, src + 2 * i, 2u * (size_t)(n - i));
        _mm256_storeu_ps(x, _mm256_cvtph_ps(tkvi_load_bytes16_avx2(bytes)));
        memcpy(dst + i, x, (size_t)(n - i) * sizeof *x);
    }
}

static TKVI_TARGET_AVX2 void tkvi_f32_to_f16_avx2(const float *x, int n, uint8_t *dst) {
    const __m256 most = _mm256_set1_ps(TKVI_F16_MAX), least = _mm256_set1_ps(-TKVI_F16_MAX);
    int i;
    for (i = 0; i + 8 <= n; i += 8) {
        const __m256 y = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(x + i), most), least);
        _mm_storeu_si128((__m128i *)(void *)(dst + 2 * i), _mm256_cvtps_ph(y, 0)); /* half to even */
    }
    tkvi_f32_to_f16_scalar(x + i, n - i, dst + 2 * i);
}

TKVI_FLAT_AVX2 __m128i tkvi_load_bytes4_avx2(const uint8_t *src) {
    int32_t x;
    memcpy(&x, src, 4);
    return _mm_cvtsi32_si128(x);
}

/* tkvi_log_value of eight bytes. */
TKVI_FLAT_AVX2 __m256 tkvi_decode_8_log_scales_avx2(__m128i bytes, int top) {
    const __m256i base = _mm256_set1_epi32(1024), one = _mm256_set1_epi32(1);
    const uint8_t *mantissa = (const uint8_t *)tkvi_log_mantissa;
    __m256i code = _mm256_cvtepu8_epi32(bytes), x = _mm256_sub_epi32(code, one);
    __m256i bits = _mm256_add_epi32(_mm256_srai_epi32(x, 4), _mm256_set1_epi32(127 + top - 16));
    /* looks up 16 mantissas as two tables of eight; bit 3 of x selects the table */
    __m256i low = _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(tkvi_load_bytes16_avx2(mantissa)), x);
    __m256i high =
        _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(tkvi_load_bytes16_avx2(mantissa + 16)), x);
    x = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high),
                                             _mm256_castsi256_ps(_mm256_slli_epi32(x, 28))));
    bits = _mm256_or_si256(_mm256_slli_epi32(bits, 23), _mm256_slli_epi32(_mm256_sub_epi32(x, base), 13));
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()), bits));
}

static TKVI_TARGET_AVX2 void tkvi_decode_log_scales_avx2(const uint8_t *src, int n, int top, float *dst) {
    int i;
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, tkvi_decode_8_log_scales_avx2(
                                      _mm_loadl_epi64((const __m128i *)(const void *)(src + i)), top));
    if (i + 4 <= n) {
        _mm_storeu_ps(dst + i, _mm256_castps256_ps128(
                                   tkvi_decode_8_log_scales_avx2(tkvi_load_bytes4_avx2(src + i), top)));
        i += 4;
    }
    tkvi_decode_log_scales_scalar(src + i, n - i, top, dst + i);
}

static TKVI_TARGET_AVX2 void tkvi_decode_zero_points_avx2(const uint8_t *offset, const float *scale,
                                                          const float *mean, float unit, int middle, int n,
                                                          float *dst) {
    int i;
    for (i = 0; i + 8 <= n; i += 8) {
        const __m256i by = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(offset + i)));
        const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(scale + i), _mm256_set1_ps(unit));
        _mm256_storeu_ps(
            dst + i, _mm256_fmadd_ps(x, _mm256_cvtepi32_ps(_mm256_sub_epi32(by, _mm256_set1_epi32(middle))),
                                     _mm256_loadu_ps(mean + i)));
    }
    for (; i + 4 <= n; i += 4) {
        __m128i by =
            _mm_sub_epi32(_mm_cvtepi8_epi32(tkvi_load_bytes4_avx2(offset + i)), _mm_set1_epi32(middle));
        __m128 x = _mm_mul_ps(_mm_loadu_ps(scale + i), _mm_set1_ps(unit));
        _mm_storeu_ps(dst + i, _mm_fmadd_ps(x, _mm_cvtepi32_ps(by), _mm_loadu_ps(mean + i)));
    }
    tkvi_decode_zero_points_scalar(offset + i, scale + i, mean + i, unit, middle, n - i, dst + i);
}

static TKVI_TARGET_AVX2 void tkvi_encode_log_scales_avx2(const float *x, int n, int top, uint8_t *dst) {
    int i, k;
    for (i = 0; i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        __m256i bits = _mm256_castps_si256(v), mantissa = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
        __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127 + top - 16));
        __m128i low;
        code = _mm256_add_epi32(_mm256_slli_epi32(code, 4), _mm256_set1_epi32(1));
        for (k = 0; k < 16; k++) /* adds 1 for each border that the mantissa reaches */
            code = _mm256_sub_epi32(
                code, _mm256_cmpgt_epi32(mantissa, _mm256_set1_epi32((int32_t)tkvi_log_border[k] - 1)));
        code = _mm256_min_epi32(_mm256_max_epi32(code, _mm256_set1_epi32(1)), _mm256_set1_epi32(255));
        code = _mm256_and_si256(code, _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_GT_OQ)));
        low = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
        _mm_storel_epi64((__m128i *)(void *)(dst + i), _mm_packus_epi16(low, low));
    }
    tkvi_encode_log_scales_scalar(x + i, n - i, top, dst + i);
}

/* >>encoding: gives the bytes of the scalar code, because integers are the same and floats have the same order of
 * operations. AVX-512 has its own versions of the two slow steps, K columns and V tokens, and shares the others. */
/* Joins n planes of codes into bytes: bits shift .. shift + bits - 1 of plane p go to bit p * bits of each byte. */
TKVI_FLAT_AVX2 __m256i tkvi_join_planes_avx2(const __m256i *code, const int shift, const int bits,
                                             const int n) {
    const __m256i mask = tkvi_splat_bytes_avx2((1 << bits) - 1);
    __m256i x = _mm256_and_si256(_mm256_srli_epi16(code[0], shift), mask);
    int p;
    TKVI_UNROLL
    for (p = 1; p < n; p++)
        x = _mm256_or_si256(
            x, _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(code[p], shift), mask), bits * p));
    return x;
}

static TKVI_TARGET_AVX2 void tkvi_pack_tile_avx2(uint8_t *tile, int width, const uint8_t *code) {
    __m256i c[2][4]; /* half of the planes, plane */
    int b, p;
    TKVI_UNROLL
    for (b = 0; b < 2; b++) {
        TKVI_UNROLL
        for (p = 0; p < 4; p++) c[b][p] = tkvi_load_bytes_avx2(code + 64 * p + 32 * b);
        if (width == 8) {
            TKVI_UNROLL
            for (p = 0; p < 4; p++) tkvi_store_bytes_avx2(tile + 64 * p + 32 * b, c[b][p]);
        } else if (width >= 4) {
            tkvi_store_bytes_avx2(tile + 32 * b, tkvi_join_planes_avx2(c[b], 0, 4, 2));
            tkvi_store_bytes_avx2(tile + 64 + 32 * b, tkvi_join_planes_avx2(c[b] + 2, 0, 4, 2));
            if (width == 6) tkvi_store_bytes_avx2(tile + 128 + 32 * b, tkvi_join_planes_avx2(c[b], 4, 2, 4));
        } else if (width == 3) {
            const __m256i low = _mm256_slli_epi16(_mm256_and_si256(c[b][3], tkvi_splat_bytes_avx2(3)), 6);
            tkvi_store_bytes_avx2(tile + 32 * b, _mm256_or_si256(tkvi_join_planes_avx2(c[b], 0, 3, 2), low));
        } else if (width == 2) {
            tkvi_store_bytes_avx2(tile + 32 * b, tkvi_join_planes_avx2(c[b], 0, 2, 4));
        }
    }
    if (width == 3) {
        c[0][0] = c[0][2];
        c[0][1] = c[1][2];
        c[1][0] = c[0][3];
        c[1][1] = c[1][3];
        tkvi_store_bytes_avx2(tile + 64,
                              _mm256_or_si256(tkvi_join_planes_avx2(c[0], 0, 3, 2),
                                              _mm256_slli_epi16(tkvi_join_planes_avx2(c[1], 2, 1, 2), 6)));
    } else if (width == 5 || width == 1) {
        const int bit = width - 1;
        tkvi_store_bytes_avx2(tile + 32 * bit,
                              _mm256_or_si256(tkvi_join_planes_avx2(c[0], bit, 1, 4),
                                              _mm256_slli_epi16(tkvi_join_planes_avx2(c[1], bit, 1, 4), 4)));
    }
}

static TKVI_TARGET_AVX2 void tkvi_interleave_avx2(uint8_t (*column)[TKVI_BLOCK], const uint8_t *channel,
                                                  uint8_t *tile) {
    int j;
    for (j = 0; j < TKVI_BLOCK; j += 16) {
        __m128i a = tkvi_load_bytes16_avx2(column[channel[0]] + j),
                b = tkvi_load_bytes16_avx2(column[channel[1]] + j);
        __m128i c = tkvi_load_bytes16_avx2(column[channel[2]] + j),
                d = tkvi_load_bytes16_avx2(column[channel[3]] + j);
        __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d),
                *to = (__m128i *)(void *)(tile + 4 * j);
        _mm_storeu_si128(to, _mm_unpacklo_epi16(ab, cd));
        _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(ab, cd));
        ab = _mm_unpackhi_epi8(a, b);
        cd = _mm_unpackhi_epi8(c, d);
        _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(ab, cd));
        _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(ab, cd));
    }
}

/* Transposes codes: four[q][l] has tokens 4q .. 4q + 3 of column l. Takes 8 x 8 of these words at a time. */
static TKVI_TARGET_AVX2 void tkvi_transpose_codes_avx2(uint8_t (*code)[TKVI_BLOCK],
                                                       int32_t (*four)[TKVI_LANES]) {
    int part, i;
    for (part = 0; part < 4; part++) {
        int l = part % 2 * 8, q = part / 2 * 8;
        __m256i a[8], b[8];
        TKVI_UNROLL
        for (i = 0; i < 8; i++) a[i] = tkvi_load_ints_avx2(four[q + i] + l);
        TKVI_UNROLL
        for (i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
        }
        TKVI_UNROLL
        for (i = 0; i < 8; i += 4) { /* a[i + k]: columns k and k + 4, rows i .. i + 3 */
            a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        TKVI_UNROLL
        for (i = 0; i < 4; i++) {
            tkvi_store_bytes_avx2(code[l + i] + 4 * q, _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
            tkvi_store_bytes_avx2(code[l + i + 4] + 4 * q, _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
        }
    }
}

/* tkvi_covariance of core/fit.h, four at a time. The integers are below 2^53, so doubles are exact. */
TKVI_FLAT_AVX2 __m128 tkvi_covariance_avx2(__m256d n, __m128i a, __m128i b, __m128i products) {
    __m256d x = _mm256_mul_pd(n, _mm256_cvtepi32_pd(products));
    return _mm256_cvtpd_ps(_mm256_sub_pd(x, _mm256_mul_pd(_mm256_cvtepi32_pd(a), _mm256_cvtepi32_pd(b))));
}

TKVI_FLAT_AVX2 __m128i tkvi_load_ints4_avx2(const int32_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

static TKVI_TARGET_AVX2 void tkvi_finalize_scales_avx2(tkvi_columns *c, int top) {
    const __m256d n = _mm256_set1_pd((double)c->n), n2 = _mm256_set1_pd((double)(2 * c->n));
    const __m128 none = _mm_setzero_ps();
    const __m128i one = _mm_set1_epi32(1), count = _mm_set1_epi32(c->n);
    TKVI_ALIGNED float scale[TKVI_LANES], unit[TKVI_LANES];
    int l;
    for (l = 0; l < TKVI_LANES; l++) unit[l] = (float)tkvi_a_unit[c->width[l]];
    c->beyond_mask = 0;
    for (l = 0; l < TKVI_LANES; l += 4) {
        __m128i u = tkvi_load_ints4_avx2(c->sum_u + l), k = tkvi_load_ints4_avx2(c->sum_c + l);
        __m128i width = _mm_cvtepu8_epi32(tkvi_load_bytes4_avx2(c->width + l));
        __m128 var = tkvi_covariance_avx2(n, u, u, tkvi_load_ints4_avx2(c->sum_uu + l));
        __m128 var_c = tkvi_covariance_avx2(n, k, k, tkvi_load_ints4_avx2(c->sum_cc + l));
        __m128 cov = tkvi_covariance_avx2(n, k, u, tkvi_load_ints4_avx2(c->sum_cu + l));
        __m128 x = _mm_blendv_ps(_mm_div_ps(var, cov), _mm_sqrt_ps(_mm_div_ps(var, var_c)),
                                 _mm_castsi128_ps(_mm_cmpeq_epi32(width, one)));
        x = _mm_mul_ps(x, _mm_loadu_ps(c->step + l));
        x = _mm_and_ps(x, _mm_and_ps(_mm_cmpgt_ps(cov, none), _mm_cmpgt_ps(var, none)));
        _mm_storeu_ps(scale + l, x);
    }
    tkvi_encode_log_scales_avx2(scale, TKVI_LANES, top, c->log);
    tkvi_decode_log_scales_avx2(c->log, TKVI_LANES, top, scale);
    for (l = 0; l < TKVI_LANES; l += 4) {
        __m128i u = tkvi_load_ints4_avx2(c->sum_u + l), k = tkvi_load_ints4_avx2(c->sum_c + l);
        __m128i width = _mm_cvtepu8_epi32(tkvi_load_bytes4_avx2(c->width + l));
        __m128i tops = _mm_sub_epi32(_mm_sllv_epi32(one, width), one);
        __m128 by = _mm_loadu_ps(scale + l);
        __m128 mean_u = _mm_cvtepi32_ps(_mm_add_epi32(_mm_add_epi32(u, u), count));
        __m256d mean, v, some = _mm256_cmp_pd(_mm256_cvtps_pd(by), _mm256_setzero_pd(), _CMP_GT_OQ);
        int32_t four, beyond;
        mean_u = _mm_div_ps(mean_u, _mm_set1_ps((float)(2 * c->n)));
        mean = _mm256_mul_pd(_mm256_cvtps_pd(_mm_loadu_ps(c->step + l)), _mm256_cvtps_pd(mean_u));
        mean = _mm256_add_pd(mean, _mm256_cvtps_pd(_mm_loadu_ps(c->low + l)));
        _mm_storeu_ps(c->middle + l, _mm256_cvtpd_ps(mean));
        beyond =
            _mm256_movemask_pd(_mm256_andnot_pd(some, _mm256_cmp_pd(mean, _mm256_setzero_pd(), _CMP_NEQ_UQ)));
        k = _mm_sub_epi32(_mm_add_epi32(k, k), _mm_mullo_epi32(count, tops));
        v = _mm256_div_pd(_mm256_cvtepi32_pd(k), n2);
        v = _mm256_mul_pd(_mm256_sub_pd(_mm256_div_pd(mean, _mm256_cvtps_pd(by)), v),
                          _mm256_cvtps_pd(_mm_loadu_ps(unit + l)));
        v = _mm256_min_pd(_mm256_max_pd(v, _mm256_set1_pd(-128.0)), _mm256_set1_pd(128.0));
        v = _mm256_add_pd(_mm256_and_pd(v, some), _mm256_set1_pd(1000.5));
        k = _mm_sub_epi32(_mm256_cvttpd_epi32(v), _mm_set1_epi32(1000));
        beyond |= _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(_mm_abs_epi32(k), _mm_set1_epi32(127))));
        beyond &= _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(width, _mm_setzero_si128())));
        c->beyond_mask |= (uint32_t)beyond << l;
        four = _mm_cvtsi128_si32(_mm_shuffle_epi8(k, _mm_set1_epi32(0x0c080400)));
        memcpy(c->offset + l, &four, 4);
    }
}

/* K columns: a 32-bit lane is a column and has two tokens. Eight of the 16 columns go together. */
typedef struct tkvi_range_avx2 {
    __m256i cut, by, top; /* each value stands in both halves of its lane */
} tkvi_range_avx2;

TKVI_FLAT_AVX2 __m256i tkvi_repeat16_avx2(__m256i x) { return _mm256_or_si256(x, _mm256_slli_epi32(x, 16)); }

TKVI_FLAT_AVX2 tkvi_range_avx2 tkvi_range_of_avx2(int k, __m256i width) {
    const tkvi_a_range *r = &tkvi_a_ranges[k];
    const __m256i one = _mm256_set1_epi32(1);
    tkvi_range_avx2 range;
    range.cut = tkvi_repeat16_avx2(_mm256_permutevar8x32_epi32(tkvi_load_ints_avx2(r->cut), width));
    range.by = tkvi_repeat16_avx2(_mm256_permutevar8x32_epi32(tkvi_load_ints_avx2(r->by), width));
    range.top = tkvi_repeat16_avx2(_mm256_sub_epi32(_mm256_sllv_epi32(one, width), one));
    return range;
}

TKVI_FLAT_AVX2 __m256i tkvi_cut_codes_avx2(__m256i u, const tkvi_range_avx2 *r) { /* as tkvi_cut_code */
    __m256i v = _mm256_mulhi_epu16(_mm256_subs_epu16(u, r->cut), r->by);
    return _mm256_min_epi16(_mm256_avg_epu16(v, _mm256_setzero_si256()), r->top);
}

TKVI_FLAT_AVX2 __m256i tkvi_select_avx2(__m256i a, __m256i b, __m256 mask) { /* b where the mask is set */
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), mask));
}

/* Computes range and integers of columns l .. l + 7. Returns 0 if a residual is beyond +-1e30, which this code does
 * not clamp. */
TKVI_FLAT_AVX2 int tkvi_columns_to_ints_avx2(tkvi_columns *c, int l) {
    const __m256 lowest = _mm256_set1_ps(-1e30f), highest = _mm256_set1_ps(1e30f);
    const __m256 mean = _mm256_loadu_ps(c->mean + l);
    const __m256i lanes = tkvi_lane_mask_avx2(c->lanes - l);
    __m256 low = highest, high = lowest, step, inverse, some;
    __m256i sum = _mm256_setzero_si256(), squares = sum;
    TKVI_ALIGNED float residual[TKVI_BLOCK][8];
    int t;
    for (t = 0; t < c->n; t++) {
        __m256 x = _mm256_sub_ps(_mm256_maskload_ps(c->x + (size_t)t * c->stride + l, lanes), mean);
        _mm256_storeu_ps(residual[t], x);
        low = _mm256_min_ps(x, low);
        high = _mm256_max_ps(x, high);
    }
    some = _mm256_or_ps(_mm256_cmp_ps(low, lowest, _CMP_LT_OQ), _mm256_cmp_ps(high, highest, _CMP_GT_OQ));
    if (_mm256_movemask_ps(some)) return 0;
    for (; t < TKVI_BLOCK; t++) _mm256_storeu_ps(residual[t], low); /* u = 0 */
    step = _mm256_mul_ps(_mm256_sub_ps(high, low), _mm256_set1_ps(1.0f / TKVI_STEPS));
    some = _mm256_cmp_ps(step, _mm256_set1_ps(1e-36f), _CMP_GT_OQ);
    inverse = _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1.0f), step), some);
    _mm256_storeu_ps(c->low + l, low);
    _mm256_storeu_ps(c->step + l, _mm256_and_ps(step, some));
    for (t = 0; t < TKVI_BLOCK / 2; t++) {
        const float *x = residual[t / 2 * 4 + t % 2]; /* in the order of tkvi_column_u */
        __m256 a = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x), low), inverse);
        __m256 b = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + 16), low), inverse);
        __m256i u = _mm256_or_si256(_mm256_cvttps_epi32(a), _mm256_slli_epi32(_mm256_cvttps_epi32(b), 16));
        u = _mm256_min_epi16(u, _mm256_set1_epi16(TKVI_STEPS - 1));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(u, _mm256_set1_epi16(1)));
        squares = _mm256_add_epi32(squares, _mm256_madd_epi16(u, u));
        _mm256_storeu_si256((__m256i *)(void *)c->u[t][l], u);
    }
    tkvi_store_ints_avx2(c->sum_u + l, sum);
    tkvi_store_ints_avx2(c->sum_uu + l, squares);
    return 1;
}

TKVI_FLAT_AVX2 void tkvi_search_range_avx2(tkvi_columns *c, int l, int32_t (*four)[TKVI_LANES]) {
    const __m256i n = _mm256_set1_epi32(c->n), sum_u = tkvi_load_ints_avx2(c->sum_u + l);
    const __m256i width =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(c->width + l)));
    __m256i sum_c = _mm256_setzero_si256(), sum_cc = sum_c, sum_cu = sum_c;
    __m256 most = _mm256_set1_ps(-1.0f);
    tkvi_range_avx2 best = tkvi_range_of_avx2(0, width);
    int t, k;
    for (k = 0; k < TKVI_A_CUTS; k++) {
        const tkvi_range_avx2 range = tkvi_range_of_avx2(k, width);
        __m256i sum = _mm256_setzero_si256(), squares = sum, products = sum, a, b;
        __m256 cov, var, score, better;
        for (t = 0; t < TKVI_BLOCK / 2; t++) {
            __m256i u = _mm256_loadu_si256((const __m256i *)(const void *)c->u[t][l]);
            __m256i v = tkvi_cut_codes_avx2(u, &range);
            sum = _mm256_add_epi16(sum, v);
            squares = _mm256_add_epi32(squares, _mm256_madd_epi16(v, v));
            products = _mm256_add_epi32(products, _mm256_madd_epi16(v, u));
        }
        sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        a = _mm256_sub_epi32(_mm256_mullo_epi32(n, products), _mm256_mullo_epi32(sum, sum_u));
        b = _mm256_sub_epi32(_mm256_mullo_epi32(n, squares), _mm256_mullo_epi32(sum, sum));
        cov = _mm256_cvtepi32_ps(a);
        var = _mm256_cvtepi32_ps(b);
        score = _mm256_mul_ps(_mm256_div_ps(cov, var), cov);
        score = _mm256_and_ps(score, _mm256_cmp_ps(var, _mm256_setzero_ps(), _CMP_GT_OQ));
        better = _mm256_cmp_ps(score, most, _CMP_GT_OQ);
        most = _mm256_blendv_ps(most, score, better);
        best.cut = tkvi_select_avx2(best.cut, range.cut, better);
        best.by = tkvi_select_avx2(best.by, range.by, better);
        sum_c = tkvi_select_avx2(sum_c, sum, better);
        sum_cc = tkvi_select_avx2(sum_cc, squares, better);
        sum_cu = tkvi_select_avx2(sum_cu, products, better);
    }
    tkvi_store_ints_avx2(c->sum_c + l, sum_c);
    tkvi_store_ints_avx2(c->sum_cc + l, sum_cc);
    tkvi_store_ints_avx2(c->sum_cu + l, sum_cu);
    for (t = 0; t < TKVI_BLOCK / 4; t++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)c->u[2 * t][l]);
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)c->u[2 * t + 1][l]);
        b = _mm256_slli_epi32(tkvi_cut_codes_avx2(b, &best), 8);
        tkvi_store_ints_avx2(four[t] + l, _mm256_or_si256(tkvi_cut_codes_avx2(a, &best), b));
    }
}

static TKVI_TARGET_AVX2 void tkvi_encode_k_columns_avx2(tkvi_columns *c) {
    TKVI_ALIGNED int32_t four[TKVI_BLOCK / 4][TKVI_LANES];
    int l;
    for (l = 0; l < TKVI_LANES; l += 8) {
        if (!tkvi_columns_to_ints_avx2(c, l)) {
            tkvi_encode_k_columns_scalar(c);
            return;
        }
        tkvi_search_range_avx2(c, l, four);
    }
    tkvi_transpose_codes_avx2(c->code, four);
}

/* V tokens: a 32-bit lane is a channel. */
/* Rotates a token, and fills y with zeros to a multiple of 32 channels. Returns the largest |y|. */
TKVI_FLAT_AVX2 float tkvi_rotate_token_avx2(const tkvi_side *s, int log2n, const float *x, const float *flip,
                                            float *y) {
    const int n = 1 << log2n, end = tkvi_round_up(s->dim, 32);
    __m256 most;
    int c;
    for (c = n; c < end; c += 8) /* channels beyond the first window */
        _mm256_storeu_ps(
            y + c, tkvi_flip_avx2(_mm256_maskload_ps(x + c, tkvi_lane_mask_avx2(s->dim - c)), flip + c));
    most = tkvi_window_avx2(x, flip, y, log2n);
    if (n == s->dim) return tkvi_max_avx2(most);
    most = tkvi_window_avx2(y + s->dim - n, NULL, y + s->dim - n, log2n);
    for (c = 0; c < s->dim - n; c += 8) /* may read channels of the last window again */
        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(y + c)));
    return tkvi_max_avx2(most);
}

TKVI_FLAT_AVX2 int32_t tkvi_sum_ints_avx2(__m256i a) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

/* Converts a token to integers. A vector of u has channels c .. c + 7 and c + 16 .. c + 23, interleaved as
 * _mm256_packs_epi32 leaves them. Returns the sum of squares. */
TKVI_FLAT_AVX2 int32_t tkvi_token_to_ints_avx2(const float *y, float by, int end, int16_t *u) {
    const __m256 inverse = _mm256_set1_ps(by);
    const __m256i most = _mm256_set1_epi16(TKVI_R_MOST), least = _mm256_set1_epi16(-TKVI_R_MOST);
    __m256i squares = _mm256_setzero_si256();
    int c;
    for (c = 0; c < end; c += c % 32 ? 24 : 8, u += 16) {
        __m256i a = _mm256_cvttps_epi32(_mm256_mul_ps(_mm256_loadu_ps(y + c), inverse));
        __m256i b = _mm256_cvttps_epi32(_mm256_mul_ps(_mm256_loadu_ps(y + c + 16), inverse));
        a = _mm256_max_epi16(_mm256_min_epi16(_mm256_packs_epi32(a, b), most), least);
        squares = _mm256_add_epi32(squares, _mm256_madd_epi16(a, a));
        _mm256_storeu_si256((__m256i *)(void *)u, a);
    }
    return tkvi_sum_ints_avx2(squares);
}

TKVI_FLAT_AVX2 __m256i tkvi_floor_avx2(__m256i u, __m256 by) {
    return _mm256_cvttps_epi32(_mm256_floor_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(u), by)));
}

/* Channels c .. c + 7 (first) and c + 16 .. c + 23 (second) of such a vector. */
TKVI_FLAT_AVX2 __m256i tkvi_first_avx2(__m256i u) {
    return _mm256_srai_epi32(_mm256_unpacklo_epi16(u, u), 16);
}

TKVI_FLAT_AVX2 __m256i tkvi_second_avx2(__m256i u) {
    return _mm256_srai_epi32(_mm256_unpackhi_epi16(u, u), 16);
}

/* Joins two vectors of 16-bit values into one vector of pairs. */
TKVI_FLAT_AVX2 __m256i tkvi_make_pairs_avx2(__m256i a, __m256i b) {
    return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
}

/* Codes of a uniform grid for 8 + 8 channels, in the order of u. Adds u * level to *sum. */
TKVI_FLAT_AVX2 __m256i tkvi_encode_grid_avx2(const int16_t *u, float fine, int top, __m256i *sum) {
    const __m256i tops = _mm256_set1_epi16((short)top);
    const __m256 by = _mm256_set1_ps(fine);
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)u), v;
    v = _mm256_packs_epi32(tkvi_floor_avx2(tkvi_first_avx2(x), by), tkvi_floor_avx2(tkvi_second_avx2(x), by));
    v = _mm256_add_epi16(v, _mm256_set1_epi16((short)((top + 1) / 2)));
    v = _mm256_max_epi16(_mm256_min_epi16(v, tops), _mm256_setzero_si256());
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(x, _mm256_sub_epi16(_mm256_add_epi16(v, v), tops)));
    return v;
}

/* Codes 0 .. 7 of 8 pairs. Adds half of u * level to *sum (formats/r.h, step 5). One maximum of
 * 8 * score + 7 - code finds the best score and the first code that reaches it. */
TKVI_FLAT_AVX2 __m256i tkvi_encode_pairs_avx2(const int16_t *u, float fine, __m256i *sum) {
    const __m256 by = _mm256_set1_ps(fine);
    const __m128i *point = (const __m128i *)(const void *)tkvi_r_pairs;
    const __m256i level = tkvi_make_pairs_avx2(_mm256_cvtepi8_epi32(_mm_loadu_si128(point)),
                                               _mm256_cvtepi8_epi32(_mm_loadu_si128(point + 1)));
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)u), a = tkvi_first_avx2(x);
    __m256i b = tkvi_second_avx2(x), best = _mm256_set1_epi32(INT32_MIN), code;
    int k;
    x = tkvi_make_pairs_avx2(tkvi_floor_avx2(a, by), tkvi_floor_avx2(b, by));
    TKVI_UNROLL
    for (k = 0; k < 8; k++) {
        const int px = tkvi_r_pairs[k], py = tkvi_r_pairs[16 + k];
        const __m256i p = _mm256_set1_epi32((8 * px & 0xffff) | (int32_t)((uint32_t)(8 * py) << 16));
        const __m256i from = _mm256_set1_epi32(-64 * (px * px + py * py) + 7 - k);
        best = _mm256_max_epi32(best, _mm256_add_epi32(from, _mm256_madd_epi16(x, p)));
    }
    code = _mm256_andnot_si256(best, _mm256_set1_epi32(7));
    x = _mm256_madd_epi16(tkvi_make_pairs_avx2(a, b), _mm256_permutevar8x32_epi32(level, code));
    *sum = _mm256_add_epi32(*sum, x);
    return code;
}

/* Codes of four tokens. sum: out, the sum of u * level of each (formats/r.h, step 6). u: [token][TKV_MAX_HEAD_DIM].
 * fine: [2][16], factors of u for the grid and for pairs. */
TKVI_FLAT_AVX2 void tkvi_encode_four_tokens_avx2(const tkvi_side *s, const int16_t *u, const float *fine,
                                                 uint8_t *code, int32_t *sum) {
    const int pairs = s->pairs ? s->pad / 32 * 32 : 0, bits = s->pairs ? 2 : s->half_bits / 2;
    const int top = (1 << bits) - 1, second = 4 * TKVI_TILE_CODES;
    __m256i grid[4], pair[4], v[4];
    int c, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) grid[r] = pair[r] = _mm256_setzero_si256();
    for (c = 0; c < pairs; c += 16, code += c % 32 ? 32 : second - 32) { /* 8 of the 16 lanes of a slab */
        TKVI_UNROLL
        for (r = 0; r < 4; r++)
            v[r] = tkvi_encode_pairs_avx2(u + r * TKV_MAX_HEAD_DIM + c, fine[TKVI_LANES + r], &pair[r]);
        v[0] = _mm256_or_si256(v[0], _mm256_slli_epi32(v[1], 8));
        v[2] = _mm256_or_si256(v[2], _mm256_slli_epi32(v[3], 8));
        tkvi_store_bytes_avx2(code, _mm256_or_si256(v[0], _mm256_slli_epi32(v[2], 16)));
    }
    for (; c < tkvi_round_up(s->dim, 32);
         c += 16, code += c % 32 ? 32 : 2 * second - 32) { /* 8 lanes of each of two slabs */
        TKVI_UNROLL
        for (r = 0; r < 4; r++)
            v[r] = tkvi_encode_grid_avx2(u + r * TKV_MAX_HEAD_DIM + c, fine[r], top, &grid[r]);
        v[0] = _mm256_or_si256(v[0], _mm256_slli_epi16(v[1], 8));
        v[2] = _mm256_or_si256(v[2], _mm256_slli_epi16(v[3], 8));
        tkvi_store_bytes_avx2(code, _mm256_unpacklo_epi16(v[0], v[2]));
        if (c / 32 * 32 + 16 < s->pad)
            tkvi_store_bytes_avx2(code + second, _mm256_unpackhi_epi16(v[0], v[2]));
    }
    TKVI_UNROLL
    for (r = 0; r < 4; r++) /* beside pairs, level = 2 * 40 * (2 code - 3) */
        sum[r] = 2 * tkvi_sum_ints_avx2(pair[r]) + (s->pairs ? 80 : 1) * tkvi_sum_ints_avx2(grid[r]);
}

/* Each step runs over 16 tokens before the next step starts. So divisions and horizontal sums of several tokens
 * overlap. */
static TKVI_TARGET_AVX2 void tkvi_encode_v_tokens_avx2(const tkvi_side *s, const float *x, size_t stride,
                                                       int n, tkvi_codes code, float *scale) {
    TKVI_ALIGNED float y[TKVI_LANES][TKV_MAX_HEAD_DIM], most[TKVI_LANES], by[TKVI_LANES], fine[2][TKVI_LANES];
    TKVI_ALIGNED int16_t u[TKVI_LANES][TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t squares[TKVI_LANES], sum[TKVI_LANES];
    const __m256 whole = _mm256_set1_ps((float)TKVI_R_MOST), dim = _mm256_set1_ps((float)s->dim);
    const __m256 grid = _mm256_set1_ps(tkvi_r_step[s->pairs ? 2 : s->half_bits / 2]);
    const int log2n = tkvi_log2_floor(s->dim);
    TKVI_ALIGNED float flip[TKV_MAX_HEAD_DIM];
    int first, t;
    if (s->dim < 8) {
        tkvi_encode_v_tokens_scalar(s, x, stride, n, code, scale);
        return;
    }
    tkvi_flips_avx2(flip, tkvi_round_up(s->dim, 32));
    for (first = 0; first < n; first += TKVI_LANES) {
        const int count = tkvi_min(TKVI_LANES, n - first), fours = tkvi_round_up(count, 4);
        memset(most, 0, sizeof most);
        memset(squares, 0, sizeof squares);
        memset(sum, 0, sizeof sum);
        for (t = 0; t < fours; t++) /* missing tokens repeat the last one; the caller clears their codes */
            most[t] = tkvi_rotate_token_avx2(s, log2n, x + (size_t)(first + tkvi_min(t, count - 1)) * stride,
                                             flip, y[t]);
        for (t = 0; t < TKVI_LANES; t += 8) {
            __m256 m = _mm256_min_ps(_mm256_loadu_ps(most + t), _mm256_set1_ps(1e30f));
            __m256 some = _mm256_cmp_ps(m, _mm256_set1_ps(1e-30f), _CMP_GT_OQ);
            _mm256_storeu_ps(by + t, _mm256_and_ps(_mm256_div_ps(whole, m), some));
            _mm256_storeu_ps(most + t, _mm256_and_ps(m, some));
        }
        for (t = 0; t < fours; t++)
            squares[t] = tkvi_token_to_ints_avx2(y[t], by[t], tkvi_round_up(s->dim, 32), u[t]);
        for (t = 0; t < TKVI_LANES; t += 8) {
            __m256i v = _mm256_max_epi32(tkvi_load_ints_avx2(squares + t), _mm256_set1_epi32(1));
            __m256 unit = _mm256_sqrt_ps(_mm256_div_ps(_mm256_cvtepi32_ps(v), dim));
            unit = _mm256_div_ps(_mm256_set1_ps(1.0f), unit);
            _mm256_storeu_ps(fine[0] + t, _mm256_div_ps(unit, grid));
            _mm256_storeu_ps(fine[1] + t, _mm256_mul_ps(unit, _mm256_set1_ps(16.0f * TKVI_R_UNIT)));
        }
        for (t = 0; t < fours; t += 4)
            tkvi_encode_four_tokens_avx2(s, u[t], fine[0] + t, code[first / 16] + 16 * t, sum + t);
        for (t = 0; t < TKVI_LANES; t += 8) {
            __m256i v = tkvi_load_ints_avx2(squares + t);
            __m256 m = _mm256_loadu_ps(most + t), some = _mm256_cmp_ps(m, _mm256_setzero_ps(), _CMP_GT_OQ), w;
            w = _mm256_div_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(v, v)),
                              _mm256_cvtepi32_ps(tkvi_load_ints_avx2(sum + t)));
            w = _mm256_and_ps(_mm256_mul_ps(_mm256_div_ps(m, whole), w), some);
            _mm256_maskstore_ps(scale + first + t, tkvi_lane_mask_avx2(count - t), w);
        }
    }
}

/* Keeps the compiler from fusing a product into a sum: tkvi_turn_rows_scalar rounds each. */
#if defined(__GNUC__) || defined(__clang__)
#define TKVI_ROUNDED_X86(x) __asm__("" : "+x"(x))
#else
#define TKVI_ROUNDED_X86(x) (void)(x)
#endif

static TKVI_TARGET_AVX2 void tkvi_turn_rows_avx2(const tkvi_turned_rows *t) {
    TKVI_ALIGNED float cosine[TKV_MAX_HEAD_DIM], sine[TKV_MAX_HEAD_DIM];
    const __m256 scale = _mm256_set1_ps(t->scale);
    int i, k, r;
    for (i = 0; i < t->n; i += 4)
        for (k = 0; k < 4; k++) {
            const int pair = t->pair[i + k];
            cosine[i + k] = t->cosine[pair];
            sine[i + k] = t->sine[pair];
        }
    for (i = 0; i < t->n; i += 8) {
        const __m256 c = _mm256_load_ps(cosine + i), s = _mm256_load_ps(sine + i);
        for (r = 0; r <= t->n_rows; r++) {
            __m256 x = _mm256_mul_ps(_mm256_loadu_ps(t->plain + r * t->n + i), c);
            __m256 y = _mm256_mul_ps(_mm256_loadu_ps(t->partner + r * t->n + i), s);
            TKVI_ROUNDED_X86(x);
            TKVI_ROUNDED_X86(y);
            x = _mm256_add_ps(x, y);
            if (r < t->n_rows) _mm256_storeu_ps(t->out + r * t->n + i, _mm256_mul_ps(x, scale));
            else _mm256_storeu_ps(t->last + i, x);
        }
    }
}

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
                                                 TKVI_IF(TKVI_HAS_MOVES, tkvi_turn_rows_avx2)};

#include "kernels/exact.inc"
#include "kernels/softmax.inc"
#include "kernels/tiles.inc"

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
};

#include "kernels/simd_end.inc"

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_AVX2_H */
