/*
 * kernels/rotate_x86.h - the rotation of core/rotate.h with AVX2 and AVX-512. The results have the bits of the scalar
 * code.
 *
 * Encoders rotate (kernels/avx2.h, kernels/avx512.h), and decoding rotates back (kernels/values.inc). A lane is a
 * channel. AVX2 needs 8 channels or more, AVX-512 needs 16.
 */
#ifndef TKVI_KERNELS_ROTATE_X86_H
#define TKVI_KERNELS_ROTATE_X86_H

#include "kernels/x86.h"

#ifdef TKVI_X86

/* gcc treats intrinsics for sums as plain sums, and -ffast-math reorders the sums of several stages. This macro hides
 * how x was computed, so its sums keep their order. */
#if defined(__GNUC__) || defined(__clang__)
#define TKVI_KEEP_ORDER(x) __asm__("" : "+v"(x))
#else
#define TKVI_KEEP_ORDER(x) ((void)0)
#endif

/* >>AVX2 */
TKVI_FLAT_AVX2 void tkvi_butterfly_avx2(__m256 *a, __m256 *b) {
    __m256 sum = _mm256_add_ps(*a, *b), difference = _mm256_sub_ps(*a, *b);
    TKVI_KEEP_ORDER(sum);
    TKVI_KEEP_ORDER(difference);
    *a = sum;
    *b = difference;
}

/* Butterflies of n vectors at distance h. */
TKVI_FLAT_AVX2 void tkvi_stage_avx2(__m256 *v, const int h, const int n) {
    int i;
    TKVI_UNROLL
    for (i = 0; i < n / 2; i++) {
        __m256 *a = v + i / h * h + i;
        tkvi_butterfly_avx2(a, a + h);
    }
}

/* Butterflies within a vector: each lane becomes its partner plus or minus itself. The products are exact. */
TKVI_FLAT_AVX2 __m256 tkvi_within_avx2(__m256 x) {
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 1));
}

/* Clamps x to +-1e30, as formats do, and changes its sign where flip is -0. */
TKVI_FLAT_AVX2 __m256 tkvi_flip_avx2(__m256 x, const float *flip) {
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-1e30f)), _mm256_set1_ps(1e30f));
    return _mm256_xor_ps(x, _mm256_loadu_ps(flip));
}

/* Butterflies over 8 n neighbours, n up to 8, in registers, from x to y. flip: sign changes before them, or NULL.
 * last: 1: these butterflies end the window. The results are then multiplied by `by`, and their largest sizes
 * returned. */
TKVI_FLAT_AVX2 __m256 tkvi_hadamard_avx2(const float *x, const float *flip, float *y, float by, const int n,
                                         const int last) {
    __m256 v[8], most = _mm256_setzero_ps();
    int i;
    TKVI_UNROLL
    for (i = 0; i < n; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        if (flip) v[i] = tkvi_flip_avx2(v[i], flip + 8 * i);
        v[i] = tkvi_within_avx2(v[i]);
    }
    if (n > 1) tkvi_stage_avx2(v, 1, n);
    if (n > 2) tkvi_stage_avx2(v, 2, n);
    if (n > 4) tkvi_stage_avx2(v, 4, n);
    TKVI_UNROLL
    for (i = 0; i < n; i++) {
        if (last) {
            v[i] = _mm256_mul_ps(v[i], _mm256_set1_ps(by));
            most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v[i]));
        }
        _mm256_storeu_ps(y + 8 * i, v[i]);
    }
    return most;
}

/* tkvi_hadamard_avx2 for `end` values, 8 n at a time. Each size is a function: clang unrolls these. */
#define TKVI_HADAMARD_AVX2_(name, n, last)                                                                   \
    static TKVI_TARGET_AVX2 __m256 tkvi_hadamard##name##_avx2(const float *x, const float *flip, float *y,   \
                                                              float by, int end) {                           \
        __m256 most = _mm256_setzero_ps();                                                                   \
        int i;                                                                                               \
        for (i = 0; i < end; i += 8 * n)                                                                     \
            most =                                                                                           \
                _mm256_max_ps(most, tkvi_hadamard_avx2(x + i, flip ? flip + i : NULL, y + i, by, n, last));  \
        return most;                                                                                         \
    }
TKVI_HADAMARD_AVX2_(1, 1, 1)
TKVI_HADAMARD_AVX2_(2, 2, 1)
TKVI_HADAMARD_AVX2_(4, 4, 1)
TKVI_HADAMARD_AVX2_(8, 8, 1)
TKVI_HADAMARD_AVX2_(8_first, 8, 0)
#undef TKVI_HADAMARD_AVX2_

/* Butterflies at distance h over 2h values, multiplied by `by`. h is a multiple of 8. Returns the largest sizes. */
TKVI_FLAT_AVX2 __m256 tkvi_across_avx2(float *x, float by, int h) {
    __m256 most = _mm256_setzero_ps(), scale = _mm256_set1_ps(by), sign = _mm256_set1_ps(-0.0f);
    int i;
    for (i = 0; i < h; i += 8) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + h + i);
        tkvi_butterfly_avx2(&a, &b);
        a = _mm256_mul_ps(a, scale);
        b = _mm256_mul_ps(b, scale);
        most = _mm256_max_ps(most, _mm256_max_ps(_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b)));
        _mm256_storeu_ps(x + i, a);
        _mm256_storeu_ps(x + h + i, b);
    }
    return most;
}

/* tkvi_window of core/rotate.h, from x to y, for 8 channels or more. flip: sign changes first, or NULL. Returns the
 * largest sizes, by lane. */
static TKVI_NOINLINE TKVI_TARGET_AVX2 __m256 tkvi_window_avx2(const float *x, const float *flip, float *y,
                                                              int log2n) {
    const float by = tkvi_hadamard_norm[log2n];
    const int n = 1 << log2n;
    __m256 most = _mm256_setzero_ps();
    int i;
    switch (log2n) {
    case 3: return tkvi_hadamard1_avx2(x, flip, y, by, 8);
    case 4: return tkvi_hadamard2_avx2(x, flip, y, by, 16);
    case 5: return tkvi_hadamard4_avx2(x, flip, y, by, 32);
    case 6: return tkvi_hadamard8_avx2(x, flip, y, by, 64);
    default: break;
    }
    tkvi_hadamard8_first_avx2(x, flip, y, 1.0f, n);
    for (i = 0; i < n; i += 128)
        most = _mm256_max_ps(most, tkvi_across_avx2(y + i, n == 128 ? by : 1.0f, 64));
    return n == 128 ? most : tkvi_across_avx2(y, by, 128);
}

/* flip: out, -0 where core/rotate.h changes the sign, 0 elsewhere. */
static TKVI_TARGET_AVX2 void tkvi_flips_avx2(float *flip, int n) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    int c;
    for (c = 0; c < n; c += 8) {
        __m256i sign = _mm256_set1_epi32((int32_t)(tkvi_signs[c / 32] >> c % 32 & 255u));
        sign = _mm256_slli_epi32(_mm256_cmpeq_epi32(_mm256_and_si256(sign, bit), bit), 31);
        _mm256_storeu_ps(flip + c, _mm256_castsi256_ps(sign));
    }
}

/* >>AVX-512 */
#ifdef TKVI_AVX512
/* g++ 12 finds uninitialised variables in its own header (gcc bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

TKVI_FLAT_AVX512 void tkvi_butterfly_avx512(__m512 *a, __m512 *b) {
    __m512 sum = _mm512_add_ps(*a, *b), difference = _mm512_sub_ps(*a, *b);
    TKVI_KEEP_ORDER(sum);
    TKVI_KEEP_ORDER(difference);
    *a = sum;
    *b = difference;
}

/* Butterflies of n vectors at distance h. */
TKVI_FLAT_AVX512 void tkvi_stage_avx512(__m512 *v, const int h, const int n) {
    int i;
    TKVI_UNROLL
    for (i = 0; i < n / 2; i++) {
        __m512 *a = v + i / h * h + i;
        tkvi_butterfly_avx512(a, a + h);
    }
}

TKVI_FLAT_AVX512 __m512 tkvi_plus_minus_avx512(__mmask16 minus) {
    return _mm512_mask_blend_ps(minus, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
}

/* Butterflies within a vector: each lane becomes its partner plus or minus itself. */
TKVI_FLAT_AVX512 __m512 tkvi_within_avx512(__m512 x) {
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xaaaa), _mm512_permute_ps(x, 0xb1));
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xcccc), _mm512_permute_ps(x, 0x4e));
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xf0f0), _mm512_shuffle_f32x4(x, x, 0xb1));
    return _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xff00), _mm512_shuffle_f32x4(x, x, 0x4e));
}

TKVI_FLAT_AVX512 __m512 tkvi_flip_avx512(__m512 x, const float *flip) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-1e30f)), _mm512_set1_ps(1e30f));
    return _mm512_xor_ps(x, _mm512_loadu_ps(flip));
}

TKVI_FLAT_AVX512 __m512 tkvi_hadamard_avx512(const float *x, const float *flip, float *y, float by,
                                             const int n, const int last) {
    __m512 v[8], most = _mm512_setzero_ps();
    int i;
    TKVI_UNROLL
    for (i = 0; i < n; i++) {
        v[i] = _mm512_loadu_ps(x + 16 * i);
        if (flip) v[i] = tkvi_flip_avx512(v[i], flip + 16 * i);
        v[i] = tkvi_within_avx512(v[i]);
    }
    if (n > 1) tkvi_stage_avx512(v, 1, n);
    if (n > 2) tkvi_stage_avx512(v, 2, n);
    if (n > 4) tkvi_stage_avx512(v, 4, n);
    TKVI_UNROLL
    for (i = 0; i < n; i++) {
        if (last) {
            v[i] = _mm512_mul_ps(v[i], _mm512_set1_ps(by));
            most = _mm512_max_ps(most, _mm512_abs_ps(v[i]));
        }
        _mm512_storeu_ps(y + 16 * i, v[i]);
    }
    return most;
}

/* tkvi_hadamard_avx512 for `end` values, 16 n at a time. */
#define TKVI_HADAMARD_AVX512_(name, n, last)                                                                 \
    static TKVI_TARGET_AVX512 __m512 tkvi_hadamard##name##_avx512(const float *x, const float *flip,         \
                                                                  float *y, float by, int end) {             \
        __m512 most = _mm512_setzero_ps();                                                                   \
        int i;                                                                                               \
        for (i = 0; i < end; i += 16 * n)                                                                    \
            most = _mm512_max_ps(most,                                                                       \
                                 tkvi_hadamard_avx512(x + i, flip ? flip + i : NULL, y + i, by, n, last));   \
        return most;                                                                                         \
    }
TKVI_HADAMARD_AVX512_(1, 1, 1)
TKVI_HADAMARD_AVX512_(2, 2, 1)
TKVI_HADAMARD_AVX512_(4, 4, 1)
TKVI_HADAMARD_AVX512_(8, 8, 1)
TKVI_HADAMARD_AVX512_(8_first, 8, 0)
#undef TKVI_HADAMARD_AVX512_

static TKVI_NOINLINE TKVI_TARGET_AVX512 __m512 tkvi_window_avx512(const float *x, const float *flip, float *y,
                                                                  int log2n) {
    const float by = tkvi_hadamard_norm[log2n];
    __m512 most = _mm512_setzero_ps();
    int i;
    switch (log2n) {
    case 4: return tkvi_hadamard1_avx512(x, flip, y, by, 16);
    case 5: return tkvi_hadamard2_avx512(x, flip, y, by, 32);
    case 6: return tkvi_hadamard4_avx512(x, flip, y, by, 64);
    case 7: return tkvi_hadamard8_avx512(x, flip, y, by, 128);
    default: break;
    }
    tkvi_hadamard8_first_avx512(x, flip, y, 1.0f, 256);
    for (i = 0; i < 128; i += 16) {
        __m512 a = _mm512_loadu_ps(y + i), b = _mm512_loadu_ps(y + 128 + i);
        tkvi_butterfly_avx512(&a, &b);
        a = _mm512_mul_ps(a, _mm512_set1_ps(by));
        b = _mm512_mul_ps(b, _mm512_set1_ps(by));
        most = _mm512_max_ps(most, _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        _mm512_storeu_ps(y + i, a);
        _mm512_storeu_ps(y + 128 + i, b);
    }
    return most;
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif /* TKVI_AVX512 */

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_ROTATE_X86_H */
