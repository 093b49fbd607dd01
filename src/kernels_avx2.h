/*
 * kernels_avx2.h - the kernels of kernels.h for AVX2 + FMA + F16C (Haswell, Zen and later). kernels_avx512.h
 * has the same functions with longer vectors; read them side by side. Calls kernels_x86.h.
 */
#ifndef TKVI_KERNELS_AVX2_H
#define TKVI_KERNELS_AVX2_H

#include "kernels_x86.h"

#ifdef TKVI_X86

/* >>pieces */
TKVI_FLAT_AVX2 __m256i tkvi_bytes_avx2(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

TKVI_FLAT_AVX2 __m256i tkvi_ints_avx2(const int32_t *p) {
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

TKVI_FLAT_AVX2 __m128i tkvi_bytes16_avx2(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

TKVI_FLAT_AVX2 float tkvi_sum_avx2(__m256 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

TKVI_FLAT_AVX2 float tkvi_most_avx2(__m256 a) {
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

/* 8 values of an exact side. The branch goes the same way all the time. */
TKVI_FLAT_AVX2 __m256 tkvi_values_avx2(tkvi_storage type, const uint8_t *row, int at) {
    if (type == TKVI_AS_F16) return _mm256_cvtph_ps(tkvi_bytes16_avx2(row + 2 * at));
    if (type == TKVI_AS_BF16)
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(tkvi_bytes16_avx2(row + 2 * at)), 16));
    return _mm256_castsi256_ps(tkvi_bytes_avx2(row + 4 * at));
}

static TKVI_TARGET_AVX2 void tkvi_halves_avx2(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(tkvi_bytes16_avx2(src + 2 * i)));
    tkvi_halves_scalar(src + 2 * i, n - i, dst + i);
}

static TKVI_TARGET_AVX2 float tkvi_max64_avx2(const float *s) {
    __m256 m = _mm256_loadu_ps(s);
    int t;
    for (t = 8; t < TKVI_BLOCK; t += 8) m = _mm256_max_ps(m, _mm256_loadu_ps(s + t));
    return tkvi_most_avx2(m);
}

/* exp(x) = 2^n exp(r), |r| <= ln 2 / 2; the polynomial is that of Cephes' expf, error 1e-7. */
static TKVI_TARGET_AVX2 float tkvi_exp64_avx2(const float *s, float max, float *p) {
    __m256 sum = _mm256_setzero_ps();
    int t;
    for (t = 0; t < TKVI_BLOCK; t += 8) {
        __m256 x = _mm256_sub_ps(_mm256_loadu_ps(s + t), _mm256_set1_ps(max)), n, r, y;
        __m256 some = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_GE_OQ);
        x = _mm256_max_ps(x, _mm256_set1_ps(-87.0f)); /* n stays above -127: 2^n is a normal number */
        n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), 8);
        r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
        r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
        y = _mm256_fmadd_ps(_mm256_set1_ps(1.9875691500e-4f), r, _mm256_set1_ps(1.3981999507e-3f));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(8.3334519073e-3f));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(4.1665795894e-2f));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.6666665459e-1f));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(5.0000001201e-1f));
        y = _mm256_fmadd_ps(y, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
        n = _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
        y = _mm256_and_ps(_mm256_mul_ps(y, n), some);
        _mm256_storeu_ps(p + t, y);
        sum = _mm256_add_ps(sum, y);
    }
    return tkvi_sum_avx2(sum);
}

/* >>exact tiers */
/* nt tokens x nr rows; lanes are 8 channels. Tokens beyond n repeat the last one. */
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
                x[j] = _mm256_sub_ps(tkvi_values_avx2(s->format->stored, k[j], c), minus);
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

static TKVI_TARGET_AVX2 void tkvi_exact_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                               const float *q, const float *ref, int rows, int n, int planes,
                                               float *scores) {
    uintptr_t ahead = tkvi_ahead(src, next);
    int r;
    (void)planes;
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (r = 0; r < rows; r += 4) {
        const float *x = q + r * s->pad;
        float *o = scores + r * TKVI_BLOCK;
        int left = rows - r;
        if (left == 1) tkvi_exact_k4_avx2(s, src, ahead, x, ref, left, n, 1, 4, o);
        else if (left == 2) tkvi_exact_k4_avx2(s, src, ahead, x, ref, left, n, 2, 4, o);
        else tkvi_exact_k4_avx2(s, src, ahead, x, ref, left, n, 4, 2, o);
    }
}

/* 16 channels x nr rows, over all tokens. */
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
        for (j = 0; j < 2; j++) x[j] = tkvi_values_avx2(s->format->stored, src, first + 8 * j);
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
                                               const float *p, int rows, int n, int planes, float *out) {
    uintptr_t ahead = tkvi_ahead(src, next);
    int r, c;
    (void)planes;
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

/* >>tiles */
TKVI_FLAT_AVX2 __m256i tkvi_levels_avx2(const int8_t *levels) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)levels));
}

/* 16-bit shifts move bits into the neighbour byte, the masks take them away. */
TKVI_FLAT_AVX2 void tkvi_merge_avx2(__m256i *codes, __m256i a, __m256i b, int mask) {
    codes[0] = _mm256_or_si256(codes[0], _mm256_and_si256(a, _mm256_set1_epi8((char)mask)));
    codes[1] = _mm256_or_si256(codes[1], _mm256_and_si256(b, _mm256_set1_epi8((char)mask)));
}

TKVI_FLAT_AVX2 __m256i tkvi_shifted_avx2(const uint8_t *p, int right) {
    return _mm256_srl_epi16(tkvi_bytes_avx2(p), _mm_cvtsi32_si128(right));
}

/* Half b (bytes 32b .. 32b + 31) of the codes of planes 2h and 2h + 1 of one tile, as bytes; see tile.h for
 * what stands where. Of 8-bit codes `part` says which four bits: whole ones would overflow 16-bit sums. */
TKVI_FLAT_AVX2 void tkvi_codes_avx2(int width, const uint8_t *wide, const uint8_t *tops, int half, int h,
                                    int b, int part, __m256i *codes) {
    __m256i x;
    codes[0] = codes[1] = _mm256_setzero_si256();
    wide += 32 * b;
    if (width == 8) {
        x = tkvi_shifted_avx2(wide + 128 * h, 4 * part);
        tkvi_merge_avx2(codes, x, tkvi_shifted_avx2(wide + 128 * h + 64, 4 * part), 15);
        return;
    }
    if (width >= 4) {
        x = tkvi_bytes_avx2(wide + 64 * h);
        tkvi_merge_avx2(codes, x, _mm256_srli_epi16(x, 4), 15);
        if (width == 6) {
            x = tkvi_shifted_avx2(wide + 128, 4 * h);
            tkvi_merge_avx2(codes, _mm256_slli_epi16(x, 4), _mm256_slli_epi16(x, 2), 48);
        }
    } else if (width >= 2) {
        x = tkvi_shifted_avx2(wide, 4 * h);
        tkvi_merge_avx2(codes, x, _mm256_srli_epi16(x, 2), 3);
    }
    if (width & 1) {
        x = tkvi_shifted_avx2(tops + (half >> 1) * 64 + 32 * b, (half & 1) * 4 + 2 * h);
        if (width == 1) tkvi_merge_avx2(codes, x, _mm256_srli_epi16(x, 1), 1);
        else if (width == 3) tkvi_merge_avx2(codes, _mm256_slli_epi16(x, 2), _mm256_slli_epi16(x, 1), 4);
        else tkvi_merge_avx2(codes, _mm256_slli_epi16(x, 4), _mm256_slli_epi16(x, 3), 16);
    }
}

/* Four rows go together so that their horizontal sums do. */
TKVI_FLAT_AVX2 void tkvi_fold4_avx2(const tkvi_folding *a, int first, const int nr, tkvi_fold *f) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m128 top = _mm_set1_ps(a->planes == 2 ? (float)TKVI_TWO_PLANES : (float)TKVI_PLANE);
    const float *x = a->x + first * a->n;
    __m256 most[4], rest[4];
    __m256i middle[4];
    __m128 m, inverse;
    float by[4];
    int i, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) {
        most[r] = rest[r] = _mm256_setzero_ps();
        middle[r] = _mm256_setzero_si256();
    }
    for (i = 0; i < a->n; i += 8) {
        __m256 scale = _mm256_loadu_ps(a->scale + i);
        __m256i twice =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(a->centre2 + i)));
        __m256 centre = _mm256_mul_ps(_mm256_cvtepi32_ps(twice), _mm256_set1_ps(a->half));
        __m256 zero = _mm256_loadu_ps(a->zero + i);
        if (a->ref) zero = _mm256_sub_ps(zero, _mm256_loadu_ps(a->ref + i));
        zero = _mm256_fmadd_ps(centre, scale, zero);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m256 v = _mm256_loadu_ps(x + r * a->n + i), y = _mm256_mul_ps(v, scale);
            most[r] = _mm256_max_ps(most[r], _mm256_and_ps(y, no_sign));
            rest[r] = _mm256_fmadd_ps(v, zero, rest[r]);
        }
    }
    m = tkvi_max4_avx2(most);
    inverse = _mm_and_ps(_mm_div_ps(top, m), _mm_cmpgt_ps(m, _mm_set1_ps(1e-34f))); /* as if smaller were 0 */
    _mm_storeu_ps(by, inverse);
    _mm_storeu_ps(f->half_step + first, _mm_div_ps(_mm_mul_ps(m, _mm_set1_ps(0.5f)), top));
    _mm_storeu_ps(f->rest + first, tkvi_sum4_avx2(rest));
    for (i = 0; i < a->n; i += 16) {
        __m256 scale0 = _mm256_loadu_ps(a->scale + i), scale1 = _mm256_loadu_ps(a->scale + i + 8);
        __m256i c = _mm256_cvtepu8_epi16(tkvi_bytes16_avx2(a->centre2 + i));
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            int8_t *w = a->w + (first + r) * a->planes * a->w_stride + i;
            __m256 u = _mm256_mul_ps(_mm256_loadu_ps(x + r * a->n + i), scale0);
            __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + r * a->n + i + 8), scale1);
            __m256 y = _mm256_set1_ps(by[r]);
            __m256i k = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(u, y)),
                                           _mm256_cvtps_epi32(_mm256_mul_ps(v, y)));
            k = _mm256_permute4x64_epi64(k, 0xd8); /* 16 weights of 16 bits in order */
            middle[r] = _mm256_add_epi32(middle[r], _mm256_madd_epi16(k, c));
            if (a->planes == 2) { /* k = 128 hi + lo, lo 0..127 */
                __m256i lo = _mm256_and_si256(k, _mm256_set1_epi16(127));
                _mm_storeu_si128(
                    (__m128i *)(void *)(w + a->w_stride),
                    _mm_packs_epi16(_mm256_castsi256_si128(lo), _mm256_extracti128_si256(lo, 1)));
                k = _mm256_srai_epi16(k, 7);
            }
            _mm_storeu_si128((__m128i *)(void *)w,
                             _mm_packs_epi16(_mm256_castsi256_si128(k), _mm256_extracti128_si256(k, 1)));
        }
    }
    middle[0] =
        _mm256_hadd_epi32(_mm256_hadd_epi32(middle[0], middle[1]), _mm256_hadd_epi32(middle[2], middle[3]));
    _mm_storeu_si128(
        (__m128i *)(void *)(f->middle + first),
        _mm_add_epi32(_mm256_castsi256_si128(middle[0]), _mm256_extracti128_si256(middle[0], 1)));
}

static TKVI_TARGET_AVX2 void tkvi_fold_avx2(const tkvi_folding *a, int rows, tkvi_fold *f) {
    int r, left = rows * a->planes % 4;
    for (r = 0; r < rows; r += 4) {
        if (rows - r == 1) tkvi_fold4_avx2(a, r, 1, f);
        else if (rows - r == 2) tkvi_fold4_avx2(a, r, 2, f);
        else if (rows - r == 3) tkvi_fold4_avx2(a, r, 3, f);
        else tkvi_fold4_avx2(a, r, 4, f);
    }
    if (left == 3) memset(a->w + rows * a->planes * a->w_stride, 0, (size_t)a->w_stride);
}

static TKVI_TARGET_AVX2 void tkvi_unfold_avx2(const int32_t *sum, int planes, const tkvi_fold *f, int r,
                                              int n, int add, float *out) {
    const __m256 half_step = _mm256_set1_ps(f->half_step[r]), rest = _mm256_set1_ps(f->rest[r]);
    const __m256i middle = _mm256_set1_epi32(f->middle[r]);
    int i;
    for (i = 0; i < n; i += 8) {
        __m256i x = tkvi_ints_avx2(sum + i);
        __m256 y;
        if (planes == 2) x = _mm256_add_epi32(_mm256_slli_epi32(x, 7), tkvi_ints_avx2(sum + TKVI_BLOCK + i));
        y = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_slli_epi32(x, 1), middle));
        y = _mm256_fmadd_ps(y, half_step, rest);
        _mm256_storeu_ps(out + i, add ? _mm256_add_ps(y, _mm256_loadu_ps(out + i)) : y);
    }
}

/* The products of one step: codes c (of 4 channels or tokens) by weights u, codes e (of the next 4) by
 * weights v; c[0] and e[0] add to accumulator a, c[1] and e[1] to b. Two pairs fit 16 bits: 4 * 127 * 63.
 * With a table, levels are the signed operand and the size of a weight the unsigned one, 2 * 127 * 127: each
 * pair of products goes to 32 bits by itself. `unit` is 1, or 16 for the high nibbles of 8-bit codes. */
TKVI_FLAT_AVX2 __m256i tkvi_two_avx2(__m256i c, __m256i u, __m256i e, __m256i v, __m256i unit) {
    return _mm256_madd_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(c, u), _mm256_maddubs_epi16(e, v)), unit);
}

TKVI_FLAT_AVX2 __m256i tkvi_leveled_avx2(__m256i c, __m256i u, __m256i table) {
    __m256i x = _mm256_sign_epi8(_mm256_shuffle_epi8(table, c), u);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(u), x), _mm256_set1_epi16(1));
}

/* Accumulators a0..a3 and b0..b3: named ones stay in registers with every compiler. */
#define TKVI_ROWS4_(X) X(0) X(1) X(2) X(3)
#define TKVI_ZERO4_(r) __m256i a##r = _mm256_setzero_si256(), b##r = a##r;
#define TKVI_MAC4_(r)                                                                                        \
    if (r < nw) {                                                                                            \
        u = _mm256_set1_epi32(tkvi_four(w + r * stride));                                                    \
        v = _mm256_set1_epi32(tkvi_four(w + r * stride + 4 * both));                                         \
        a##r = _mm256_add_epi32(a##r, tkvi_two_avx2(c[0], u, e[0], v, unit));                                \
        b##r = _mm256_add_epi32(b##r, tkvi_two_avx2(c[1], u, e[1], v, unit));                                \
    }
#define TKVI_LEVELED4_(r)                                                                                    \
    if (r < nw) {                                                                                            \
        u = _mm256_set1_epi32(tkvi_four(w + r * stride));                                                    \
        v = _mm256_set1_epi32(tkvi_four(w + r * stride + 4 * both));                                         \
        a##r = _mm256_add_epi32(a##r, tkvi_leveled_avx2(c[0], u, table));                                    \
        b##r = _mm256_add_epi32(b##r, tkvi_leveled_avx2(c[1], u, table));                                    \
        if (both) {                                                                                          \
            a##r = _mm256_add_epi32(a##r, tkvi_leveled_avx2(e[0], v, table));                                \
            b##r = _mm256_add_epi32(b##r, tkvi_leveled_avx2(e[1], v, table));                                \
        }                                                                                                    \
    }
#define TKVI_SAVE4_(r)                                                                                       \
    if (r < nw) {                                                                                            \
        _mm256_storeu_si256((__m256i *)(void *)(sum + r * TKVI_BLOCK), a##r);                                \
        _mm256_storeu_si256((__m256i *)(void *)(sum + r * TKVI_BLOCK + apart), b##r);                        \
    }

/* K: lanes are 8 tokens from 32h + 8b and 8 from 32h + 16 + 8b; nw weight rows, sum[weight row][64].
 * Two tiles a step. */
TKVI_FLAT_AVX2 void tkvi_dot_kq_avx2(tkvi_products *d, int h, int b, const int nw) {
    const tkvi_side *s = d->s;
    const int stride = TKV_MAX_HEAD_DIM, apart = 16;
    const uint8_t *wide = d->wide;
    const int8_t *w0 = d->w + h * d->w_group;
    int32_t *sum = d->sum + 32 * h + 8 * b;
    __m256i c[2], e[2], u, v, unit, table = unit = _mm256_setzero_si256();
    int half = d->half, width, i, part;
    TKVI_ROWS4_(TKVI_ZERO4_)
    if (s->levels) table = tkvi_levels_avx2(s->levels);
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int bytes = tkvi_wide_bytes[width], has_half = tkvi_has_half[width], n = s->runs.n[width];
        for (part = 0; part < 1 + (width == 8); part++) {
            const uint8_t *tile = wide;
            const int8_t *w = w0;
            unit = _mm256_set1_epi16(part ? 16 : 1);
            for (i = 0; i < n; i += 2, w += 8, tile += 2 * bytes) {
                const int both = i + 1 < n;
                if (h == 0 && b == 0) {
                    tkvi_prefetch_bytes(tile, 2 * bytes, d->ahead);
                    tkvi_prefetch_rest(d);
                    tkvi_prefetch_rest(d);
                }
                tkvi_codes_avx2(width, tile, d->tops, half + i * has_half, h, b, part, c);
                e[0] = e[1] = _mm256_setzero_si256();
                if (both)
                    tkvi_codes_avx2(width, tile + bytes, d->tops, half + (i + 1) * has_half, h, b, part, e);
                if (s->levels) {
                    TKVI_ROWS4_(TKVI_LEVELED4_)
                } else {
                    TKVI_ROWS4_(TKVI_MAC4_)
                }
            }
        }
        wide += n * bytes;
        half += n * has_half;
        w0 += 4 * n;
    }
    TKVI_ROWS4_(TKVI_SAVE4_)
}

TKVI_FLAT_AVX2 void tkvi_dot_k_avx2(tkvi_products *d, const int nw) {
    int q;
    for (q = 0; q < 4; q++) tkvi_dot_kq_avx2(d, q / 2, q % 2, nw);
}

/* V: lanes are channels 0 .. 7 and 8 .. 15 of one slab, which starts `skip` tiles on. */
TKVI_FLAT_AVX2 void tkvi_dot_vs_avx2(tkvi_products *d, int skip, int32_t *sum, const int nw) {
    const int width = d->width, n = d->n, has_half = tkvi_has_half[width], bytes = tkvi_wide_bytes[width];
    const int stride = TKVI_BLOCK, apart = 8, both = 1;
    const int8_t *levels = d->s->levels;
    __m256i c[2], e[2], u, v, unit, table = unit = _mm256_setzero_si256();
    int t, h, part;
    TKVI_ROWS4_(TKVI_ZERO4_)
    if (levels) table = tkvi_levels_avx2(levels);
    for (part = 0; part < 1 + (width == 8); part++) {
        const uint8_t *tile = d->wide + skip * bytes;
        const int8_t *w = d->w;
        int half = d->half + skip * has_half;
        unit = _mm256_set1_epi16(part ? 16 : 1);
        for (t = 0; t < n; t += 16) { /* a tile has 16 tokens, a plane four */
            tkvi_prefetch_bytes(tile, bytes, d->ahead);
            tkvi_prefetch_rest(d);
            for (h = 0; h < 2; h++, w += 8) {
                tkvi_codes_avx2(width, tile, d->tops, half, h, 0, part, c);
                tkvi_codes_avx2(width, tile, d->tops, half, h, 1, part, e);
                u = c[1];
                c[1] = e[0];
                e[0] = u;
                if (levels) {
                    TKVI_ROWS4_(TKVI_LEVELED4_)
                } else {
                    TKVI_ROWS4_(TKVI_MAC4_)
                }
            }
            tile += bytes;
            half += has_half;
        }
    }
    TKVI_ROWS4_(TKVI_SAVE4_)
}

TKVI_FLAT_AVX2 void tkvi_dot_v_avx2(tkvi_products *d, const int nw) {
    int slab;
    for (slab = 0; slab < d->slabs; slab++) tkvi_dot_vs_avx2(d, 4 * slab, d->sum + 16 * slab, nw);
}

#define TKVI_DOTS_AVX2_(nw)                                                                                  \
    static TKVI_TARGET_AVX2 void tkvi_dot_k##nw##_avx2(tkvi_products *d) { tkvi_dot_k_avx2(d, nw); }         \
    static TKVI_TARGET_AVX2 void tkvi_dot_v##nw##_avx2(tkvi_products *d) { tkvi_dot_v_avx2(d, nw); }
TKVI_DOTS_AVX2_(1)
TKVI_DOTS_AVX2_(2)
TKVI_DOTS_AVX2_(4)
#undef TKVI_DOTS_AVX2_
#undef TKVI_ROWS4_
#undef TKVI_ZERO4_
#undef TKVI_MAC4_
#undef TKVI_LEVELED4_
#undef TKVI_SAVE4_

/* All weight rows, in the passes that registers allow: 1, 2 or 4. A row beyond the last one is zero. */
static void tkvi_multiply_avx2(tkvi_products *d, int weight_rows) {
    static const tkvi_dot dots[2][3] = {
        {tkvi_dot_k1_avx2, tkvi_dot_k2_avx2, tkvi_dot_k4_avx2},
        {tkvi_dot_v1_avx2, tkvi_dot_v2_avx2, tkvi_dot_v4_avx2},
    };
    int left;
    for (left = weight_rows; left > 0; left -= 4) {
        dots[d->s->which][tkvi_min(left - 1, 2)](d);
        d->w += 4 * d->w_stride;
        d->sum += 4 * TKVI_BLOCK;
    }
}

static const tkvi_steps tkvi_steps_avx2 = {tkvi_halves_avx2, tkvi_fold_avx2, tkvi_multiply_avx2,
                                           tkvi_unfold_avx2, 0};

static void tkvi_tiles_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                              const float *ref, int rows, int n, int planes, float *scores) {
    (void)n;
    tkvi_tiles_k(&tkvi_steps_avx2, s, src, next, q, ref, rows, planes, scores);
}

static void tkvi_tiles_v_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                              int rows, int n, int planes, float *out) {
    tkvi_tiles_v(&tkvi_steps_avx2, s, src, next, p, rows, n, planes, out);
}

static const tkvi_kernels tkvi_kernels_avx2 = {
    TKV_ISA_AVX2,
    "avx2",
    {tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_tiles_k_avx2},
    {tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_tiles_v_avx2},
    tkvi_halves_avx2,
    tkvi_exp64_avx2,
    tkvi_max64_avx2,
};

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_AVX2_H */
