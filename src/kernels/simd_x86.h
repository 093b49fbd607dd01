/*
 * kernels/simd_x86.h - the functions of the vocabularies kernels/simd_avx2.inc and kernels/simd_avx512.inc.
 */
#ifndef TKVI_KERNELS_SIMD_X86_H
#define TKVI_KERNELS_SIMD_X86_H

#include "kernels/x86.h"

#ifdef TKVI_X86

TKVI_FLAT_AVX2 __m256i tkvi_load_bytes_avx2(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

TKVI_FLAT_AVX2 __m256i tkvi_load_ints_avx2(const int32_t *p) {
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

TKVI_FLAT_AVX2 __m128i tkvi_load_bytes16_avx2(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

/* Mask of the first n of 8 lanes. n can be any number. */
TKVI_FLAT_AVX2 __m256i tkvi_lane_mask_avx2(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

TKVI_FLAT_AVX2 void tkvi_store_first_avx2(float *to, __m256 x, int n) {
    if (n >= 8) _mm256_storeu_ps(to, x);
    else _mm256_maskstore_ps(to, tkvi_lane_mask_avx2(n), x);
}

TKVI_FLAT_AVX2 __m256i tkvi_load_signed_avx2(const uint8_t *p, int n) {
    uint8_t first[8] = {0};
    int32_t four;
    if (n >= 8) return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
    if (n == 4) {
        memcpy(&four, p, 4);
        return _mm256_cvtepi8_epi32(_mm_cvtsi32_si128(four));
    }
    memcpy(first, p, (size_t)n);
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)first));
}

/* -ffast-math makes a vector division an estimate, but not one of floats. */
TKVI_FLAT_AVX2 __m256 tkvi_div_avx2(__m256 a, __m256 b) {
#if defined(__FAST_MATH__) && (defined(__GNUC__) || defined(__clang__))
    __m256 x;
    __asm__("vdivps {%2, %1, %0|%0, %1, %2}" : "=x"(x) : "x"(a), "x"(b));
    return x;
#else
    return _mm256_div_ps(a, b);
#endif
}

TKVI_FLAT_AVX2 void tkvi_scatter4_avx2(uint8_t *p, int step, __m256i x) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(x));
    _mm_storeu_si128((__m128i *)(void *)(p + step), _mm256_extracti128_si256(x, 1));
}

/* Transposes the 4 x 4 lanes in each 16 bytes of four vectors. */
TKVI_FLAT_AVX2 void tkvi_transpose4_avx2(__m256i *v) {
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
    const __m256i c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a, b);
    v[1] = _mm256_unpackhi_epi64(a, b);
    v[2] = _mm256_unpacklo_epi64(c, d);
    v[3] = _mm256_unpackhi_epi64(c, d);
}

/* Each lane becomes its partner plus or minus itself. The products are exact. */
TKVI_FLAT_AVX2 __m256 tkvi_butterflies_avx2(__m256 x) {
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 1));
}

TKVI_FLAT int32_t tkvi_load_int_x86(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

TKVI_FLAT_AVX2 __m128i tkvi_load_bytes8_avx2(const uint8_t *p) {
    return _mm_loadl_epi64((const __m128i *)(const void *)p);
}

/* Levels of E4M3, read as fp16. E4M3 has one exponent bit less, so no code becomes infinity or NaN. */
TKVI_FLAT_AVX2 __m256 tkvi_load_e4m3_avx2(const uint8_t *p) {
    __m128i x = _mm_srai_epi16(_mm_slli_epi16(_mm_cvtepu8_epi16(tkvi_load_bytes8_avx2(p)), 8), 1);
    x = _mm_and_si128(x, _mm_set1_epi16((int16_t)0xbfff));
    return _mm256_mul_ps(_mm256_cvtph_ps(x), _mm256_set1_ps(4.0f));
}

TKVI_FLAT_AVX2 __m256 tkvi_load_table_floats_avx2(const float *level, const uint8_t *p, int bits) {
    const __m256i step =
        _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bits));
    const __m256i x = _mm256_srlv_epi32(_mm256_set1_epi32(tkvi_load_int_x86(p)), step);
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(level), x); /* uses 3 bits of x */
    if (bits < 4) return low;
    return _mm256_blendv_ps(low, _mm256_permutevar8x32_ps(_mm256_loadu_ps(level + 8), x),
                            _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)));
}

typedef struct tkvi_8_floats {
    float x[8];
} tkvi_8_floats;

TKVI_FLAT_AVX2 __m256 tkvi_load_twice_avx2(const float *p) {
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)),
                                    _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

/* n: 1 .. 63 */
TKVI_FLAT_AVX2 __m256i tkvi_mul_right_avx2(__m256i a, __m256i b, const int n) {
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), n);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, n > 32 ? _mm256_srli_epi64(odd, n - 32) : _mm256_slli_epi64(odd, 32 - n),
                              0xaa);
}

TKVI_FLAT_AVX2 __m256i tkvi_load_parts_avx2(const uint8_t *p, int distance) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(tkvi_load_bytes16_avx2(p)),
                                   tkvi_load_bytes16_avx2(p + distance), 1);
}

TKVI_FLAT_AVX2 float tkvi_sum_avx2(__m256 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

TKVI_FLAT_AVX2 float tkvi_max_avx2(__m256 a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

/* Horizontal sums and maxima of four vectors. */
TKVI_FLAT_AVX2 __m128 tkvi_sum4_avx2(const __m256 *a) {
    __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

TKVI_FLAT_AVX2 __m128 tkvi_max4_avx2(const __m256 *a) {
    __m256 x = _mm256_max_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    __m256 y = _mm256_max_ps(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    x = _mm256_max_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
    return _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

TKVI_FLAT_AVX2 void tkvi_store_bytes_avx2(uint8_t *p, __m256i x) {
    _mm256_storeu_si256((__m256i *)(void *)p, x);
}

TKVI_FLAT_AVX2 void tkvi_store_ints_avx2(int32_t *p, __m256i x) {
    _mm256_storeu_si256((__m256i *)(void *)p, x);
}

TKVI_FLAT_AVX2 __m256i tkvi_load_table_avx2(const int8_t *levels) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)levels));
}

TKVI_FLAT_AVX2 __m128i tkvi_isum4_avx2(const __m256i *a) {
    const __m256i x = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

/* Stores 16 weights of a row. */
TKVI_FLAT_AVX2 void tkvi_store_weights_avx2(int8_t *w, const __m256i *k, const int is_signed) {
    const __m256i x = _mm256_packs_epi32(k[0], k[1]);
    const __m256i y = is_signed ? _mm256_packs_epi16(x, x) : _mm256_packus_epi16(x, x);
    _mm_storeu_si128((__m128i *)(void *)w, _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(
                                               y, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5))));
}

TKVI_FLAT_AVX2 void tkvi_store_wide_avx2(int16_t *w, const __m256i *k) {
    const __m256i x = _mm256_permute4x64_epi64(_mm256_packs_epi32(k[0], k[1]), 0xd8);
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5,
                                           2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm256_storeu_si256((__m256i *)(void *)w, _mm256_shuffle_epi8(x, order));
}

/* a + b of sums that live in a loop. gcc otherwise copies them from register to register. */
#if defined(__GNUC__) && !defined(__clang__)
#define TKVI_ADD_IN_PLACE(add, bits, a, b)                                                                   \
    __asm__("vpadd" bits "\t{%1, %0, %0|%0, %0, %1}" : "+x"(a) : "x"(b))
#else
#define TKVI_ADD_IN_PLACE(add, bits, a, b) a = add(a, b)
#endif
TKVI_FLAT_AVX2 __m256i tkvi_add_16_avx2(__m256i a, __m256i b) {
    TKVI_ADD_IN_PLACE(_mm256_add_epi16, "w", a, b);
    return a;
}

TKVI_FLAT_AVX2 __m256i tkvi_add_32_avx2(__m256i a, __m256i b) {
    TKVI_ADD_IN_PLACE(_mm256_add_epi32, "d", a, b);
    return a;
}

/* Joins weights of four channels or tokens: lane l of the result has the bytes x[0][l], x[1][l], x[2][l], x[3][l]. */
TKVI_FLAT_AVX2 __m256i tkvi_pack_rows_avx2(const __m256i *x, const int is_signed) {
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12,
                                           1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i a = _mm256_packs_epi32(x[0], x[1]), b = _mm256_packs_epi32(x[2], x[3]);
    return _mm256_shuffle_epi8(is_signed ? _mm256_packs_epi16(a, b) : _mm256_packus_epi16(a, b), order);
}

/* Transposes 8 x 8 floats. */
TKVI_FLAT_AVX2 void tkvi_transpose_avx2(const float *x, int x_stride, float *y, int y_stride) {
    __m256 a[8], b[8];
    int i;
    TKVI_UNROLL
    for (i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(x + i * x_stride);
    TKVI_UNROLL
    for (i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    TKVI_UNROLL
    for (i = 0; i < 8; i += 4) { /* a[i + k]: columns k and k + 4, rows i .. i + 3 */
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    TKVI_UNROLL
    for (i = 0; i < 4; i++) {
        _mm256_storeu_ps(y + i * y_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(y + (i + 4) * y_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

#ifdef TKVI_AVX512
TKVI_FLAT_AVX512 __m512i tkvi_load_bytes_avx512(const uint8_t *p) {
    return _mm512_loadu_si512((const void *)p);
}

TKVI_FLAT_AVX512 __m512 tkvi_load_e4m3_avx512(const uint8_t *p) {
    __m256i x = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(tkvi_load_bytes16_avx2(p)), 8), 1);
    x = _mm256_and_si256(x, _mm256_set1_epi16((int16_t)0xbfff));
    return _mm512_mul_ps(_mm512_cvtph_ps(x), _mm512_set1_ps(4.0f));
}

/* Reads 16 bytes. Picks the two bytes that hold a code, and shifts them. */
TKVI_FLAT_AVX512 __m512 tkvi_load_table_floats_avx512(const float *level, const uint8_t *p, int bits) {
    const __m512i bit = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(bits));
    const __m512i at = _mm512_mullo_epi32(_mm512_srli_epi32(bit, 3), _mm512_set1_epi32(0x0101));
    const __m512i pick = _mm512_add_epi32(at, _mm512_set1_epi32((int32_t)0x80800100u));
    const __m512i x = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(tkvi_load_bytes16_avx2(p)), pick);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(x, _mm512_and_si512(bit, _mm512_set1_epi32(7))),
                                 _mm512_loadu_ps(level)); /* uses 4 bits of the index */
}

TKVI_FLAT_AVX512 __m512 tkvi_load_twice_avx512(const float *p) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                 _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}

/* n: 1 .. 63 */
TKVI_FLAT_AVX512 __m512i tkvi_mul_right_avx512(__m512i a, __m512i b, const int n) {
    const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(a, b), (unsigned char)n);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    return _mm512_mask_mov_epi32(even, 0xaaaa,
                                 n > 32 ? _mm512_srli_epi64(odd, (unsigned char)(n - 32))
                                        : _mm512_slli_epi64(odd, (unsigned char)(32 - n)));
}

TKVI_FLAT_AVX512 __m512i tkvi_load_parts_avx512(const uint8_t *p, int distance) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(tkvi_load_parts_avx2(p, distance)),
                              tkvi_load_parts_avx2(p + 2 * distance, distance), 1);
}

/* Horizontal sums and maxima of four vectors. */
TKVI_FLAT_AVX512 __m128 tkvi_sum4_avx512(const __m512 *a) {
    __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512d xd = _mm512_castps_pd(x), yd = _mm512_castps_pd(y);
    __m512 z = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(xd, yd)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(xd, yd)));
    __m256 w = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
    return _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
}

TKVI_FLAT_AVX512 __m128 tkvi_max4_avx512(const __m512 *a) {
    __m512 x = _mm512_max_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 y = _mm512_max_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512d xd = _mm512_castps_pd(x), yd = _mm512_castps_pd(y);
    __m512 z = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(xd, yd)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(xd, yd)));
    __m256 w = _mm256_max_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
    return _mm_max_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
}

TKVI_FLAT_AVX512 __m128i tkvi_isum4_avx512(const __m512i *a) {
    __m512i x = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    __m512i y = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    __m512i z = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
    __m256i w = _mm256_add_epi32(_mm512_castsi512_si256(z), _mm512_extracti32x8_epi32(z, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}

/* Mask of the first n of 16 lanes. n can be any number. */
TKVI_FLAT_AVX512 __mmask16 tkvi_lane_mask_avx512(int n) {
    return (__mmask16)(n >= 16 ? 0xffff : n < 0 ? 0 : (1 << n) - 1);
}

TKVI_FLAT_AVX512 __m512i tkvi_load_signed_avx512(const uint8_t *p, int n) {
    return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(tkvi_lane_mask_avx512(n), p));
}

TKVI_FLAT_AVX512 __m512 tkvi_div_avx512(__m512 a, __m512 b) {
#ifdef __FAST_MATH__
    __m512 x;
    __asm__("vdivps {%2, %1, %0|%0, %1, %2}" : "=v"(x) : "v"(a), "v"(b));
    return x;
#else
    return _mm512_div_ps(a, b);
#endif
}

TKVI_FLAT_AVX512 void tkvi_scatter4_avx512(uint8_t *p, int step, __m512i x) {
    tkvi_scatter4_avx2(p, step, _mm512_castsi512_si256(x));
    tkvi_scatter4_avx2(p + 2 * step, step, _mm512_extracti64x4_epi64(x, 1));
}

/* Looks up a table of up to 64 lanes in registers: a turn of five rows takes 70 ns in the place of 118. */
TKVI_FLAT_AVX512 void tkvi_gather_avx512(float *to, const float *table, int lanes, const uint8_t *at, int n) {
    __m512 part[4];
    int i;
    for (i = 0; i < 4; i++) part[i] = _mm512_loadu_ps(table + tkvi_min(16 * i, lanes - 16));
    for (i = 0; i < n; i += 16) {
        const __m512i x = _mm512_cvtepu8_epi32(tkvi_load_bytes16_avx2(at + i));
        const __mmask16 high = _mm512_test_epi32_mask(x, _mm512_set1_epi32(32));
        _mm512_storeu_ps(to + i, _mm512_mask_blend_ps(high, _mm512_permutex2var_ps(part[0], x, part[1]),
                                                      _mm512_permutex2var_ps(part[2], x, part[3])));
    }
}

TKVI_FLAT_AVX512 void tkvi_transpose4_avx512(__m512i *v) {
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
    const __m512i c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(a, b);
    v[1] = _mm512_unpackhi_epi64(a, b);
    v[2] = _mm512_unpacklo_epi64(c, d);
    v[3] = _mm512_unpackhi_epi64(c, d);
}

TKVI_FLAT_AVX512 __m512 tkvi_plus_minus_avx512(__mmask16 minus) {
    return _mm512_mask_blend_ps(minus, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
}

/* Each lane becomes its partner plus or minus itself. The products are exact. */
TKVI_FLAT_AVX512 __m512 tkvi_butterflies_avx512(__m512 x) {
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xaaaa), _mm512_permute_ps(x, 0xb1));
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xcccc), _mm512_permute_ps(x, 0x4e));
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xf0f0), _mm512_shuffle_f32x4(x, x, 0xb1));
    return _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xff00), _mm512_shuffle_f32x4(x, x, 0x4e));
}

/* Loads the 16 levels into each 128-bit quarter. */
TKVI_FLAT_AVX512 __m512i tkvi_load_table_avx512(const int8_t *levels) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)levels));
}

TKVI_FLAT_AVX512 __m512i tkvi_nearest_avx512(__m512 x) {
    return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

TKVI_FLAT_AVX512 __m512i tkvi_pack_rows_avx512(const __m512i *x, const int is_signed) {
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i a = _mm512_packs_epi32(x[0], x[1]), b = _mm512_packs_epi32(x[2], x[3]);
    return _mm512_shuffle_epi8(is_signed ? _mm512_packs_epi16(a, b) : _mm512_packus_epi16(a, b), order);
}

/* Stores 16 weights of a row. */
TKVI_FLAT_AVX512 void tkvi_store_wide_avx512(int16_t *w, const __m512i *k) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5,
                                           2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm256_storeu_si256((__m256i *)(void *)w, _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(k[0]), order));
}
#endif /* TKVI_AVX512 */

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_SIMD_X86_H */
