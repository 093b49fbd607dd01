/*
 * kernels_avx512.h - the kernels of kernels.h for AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 and later).
 *
 * Two shapes do the work.
 *   Integers:  two vectors of codes x up to 8 weight rows = 16 accumulators in registers. A weight row is one
 *              plane of one query row; a plane is a row more, nothing else. vpdpbusd multiplies unsigned codes
 *              by signed weights, four weights broadcast at a time.
 *   Floats:    4 vectors x up to 4 query rows.
 * Both are written once with the number of rows as a constant argument, and instantiated by a switch. The
 * width of a tile is looked at once per 16 products, by a branch that goes the same way for a whole run.
 *
 * Levels are signed, codes must be unsigned here: the table is biased by 127 and the bias comes off with
 * the centre. (Levels as the signed operand would ask for unsigned weights: one bit less of them.)
 */
#ifndef TKVI_KERNELS_AVX512_H
#define TKVI_KERNELS_AVX512_H

#include "kernels_avx2.h"

#ifdef TKVI_AVX512

/* g++ 12 finds uninitialised variables in its own header (gcc bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/* >>pieces */
TKVI_FLAT_AVX512 __m512i tkvi_bytes_avx512(const uint8_t *p) { return _mm512_loadu_si512((const void *)p); }

/* 16 values of an exact side. The branch goes the same way all the time. */
TKVI_FLAT_AVX512 __m512 tkvi_values_avx512(tkvi_storage type, const uint8_t *row, int at) {
    if (type == TKVI_AS_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * at)));
    if (type == TKVI_AS_BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * at))), 16));
    return _mm512_castsi512_ps(tkvi_bytes_avx512(row + 4 * at));
}

static TKVI_TARGET_AVX512 void tkvi_halves_avx512(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 16 <= n; i += 16)
        _mm512_storeu_ps(dst + i,
                         _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(src + 2 * i))));
    tkvi_halves_scalar(src + 2 * i, n - i, dst + i);
}

static TKVI_TARGET_AVX512 float tkvi_max64_avx512(const float *s) {
    __m512 a = _mm512_max_ps(_mm512_loadu_ps(s), _mm512_loadu_ps(s + 16));
    __m512 b = _mm512_max_ps(_mm512_loadu_ps(s + 32), _mm512_loadu_ps(s + 48));
    return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
}

/* exp(x) = 2^n exp(r), |r| <= ln 2 / 2; the polynomial is that of Cephes' expf, error 1e-7. */
static TKVI_TARGET_AVX512 float tkvi_exp64_avx512(const float *s, float max, float *p) {
    __m512 sum = _mm512_setzero_ps();
    int t;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        __m512 x = _mm512_sub_ps(_mm512_loadu_ps(s + t), _mm512_set1_ps(max)), n, r, y;
        __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
        n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
        r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
        r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
        y = _mm512_fmadd_ps(_mm512_set1_ps(1.9875691500e-4f), r, _mm512_set1_ps(1.3981999507e-3f));
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
        y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
        y = _mm512_maskz_scalef_ps(some, y, n);
        _mm512_storeu_ps(p + t, y);
        sum = _mm512_add_ps(sum, y);
    }
    return _mm512_reduce_add_ps(sum);
}

/* >>exact tiers */
/* Lane by lane the sums of four vectors: 4 x 16 -> 4. */
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

/* 4 tokens x up to 4 rows; lanes are 16 channels. Tokens beyond n repeat the last one. */
TKVI_FLAT_AVX512 void tkvi_exact_k4_avx512(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                           const float *q, const float *ref, int rows, int n, const int nr,
                                           float *scores) {
    int row_bytes = s->pad * s->format->bits / 8, t, c, r, j;
    for (t = 0; t < n; t += 4) {
        __m512 acc[4][4];
        const uint8_t *k[4];
        TKVI_UNROLL
        for (j = 0; j < 4; j++) k[j] = src + tkvi_min(t + j, n - 1) * row_bytes;
        for (c = 0; c < 4 * row_bytes; c += 64) tkvi_prefetch(src + t * row_bytes + c, ahead);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
        }
        for (c = 0; c < s->pad; c += 16) {
            __m512 x[4], minus = _mm512_loadu_ps(ref + c);
            TKVI_UNROLL
            for (j = 0; j < 4; j++)
                x[j] = _mm512_sub_ps(tkvi_values_avx512(s->format->stored, k[j], c), minus);
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

static TKVI_TARGET_AVX512 void tkvi_exact_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                   const uint8_t *next, const float *q, const float *ref,
                                                   int rows, int n, int planes, float *scores) {
    uintptr_t ahead = tkvi_ahead(src, next);
    (void)planes;
    for (; rows > 0; rows -= 4, q += 4 * s->pad, scores += 4 * TKVI_BLOCK) {
        memset(scores, 0, (size_t)(tkvi_min(rows, 4) * TKVI_BLOCK) * sizeof(float));
        if (rows == 1) tkvi_exact_k4_avx512(s, src, ahead, q, ref, rows, n, 1, scores);
        else if (rows == 2) tkvi_exact_k4_avx512(s, src, ahead, q, ref, rows, n, 2, scores);
        else tkvi_exact_k4_avx512(s, src, ahead, q, ref, rows, n, 4, scores);
    }
}

/* nv vectors of 16 channels x up to 4 rows, over all tokens. */
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
            x[j] = tkvi_values_avx512(s->format->stored, src, first + 16 * j);
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
                                                   int planes, float *out) {
    uintptr_t ahead = tkvi_ahead(src, next);
    (void)planes;
    for (; rows > 0; rows -= 4, p += 4 * TKVI_BLOCK, out += 4 * s->pad) {
        int c = 0;
        for (; c + 64 <= s->pad; c += 64) {
            if (rows == 1) tkvi_exact_v4_avx512(s, src, ahead, p, rows, n, c, 1, 4, out);
            else if (rows == 2) tkvi_exact_v4_avx512(s, src, ahead, p, rows, n, c, 2, 4, out);
            else tkvi_exact_v4_avx512(s, src, ahead, p, rows, n, c, 4, 4, out);
        }
        for (; c < s->pad; c += 16) tkvi_exact_v4_avx512(s, src, ahead, p, rows, n, c, 4, 1, out);
    }
}

/* >>tiles */
/* Codes of planes 2h and 2h + 1 of one tile, as bytes; see tile.h for what stands where. 16-bit shifts move bits
 * into the neighbour byte, the masks take them away. */
TKVI_FLAT_AVX512 void tkvi_codes_avx512(int width, const uint8_t *src, const tkvi_tile_at *at, int h,
                                        uintptr_t ahead, const __m512i *table, __m512i *codes) {
    const uint8_t *wide = src + at->wide, *top = src + at->halves + at->half / 2 * 64;
    __m512i a, b, x;
    if (width == 8) {
        tkvi_prefetch(wide + 128 * h, ahead);
        tkvi_prefetch(wide + 128 * h + 64, ahead);
        codes[0] = tkvi_bytes_avx512(wide + 128 * h);
        codes[1] = tkvi_bytes_avx512(wide + 128 * h + 64);
        return;
    }
    if (width >= 4) {
        tkvi_prefetch(wide + 64 * h, ahead);
        x = tkvi_bytes_avx512(wide + 64 * h);
        a = _mm512_and_si512(x, _mm512_set1_epi8(15));
        b = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
        if (width == 6) {
            if (h) tkvi_prefetch(wide + 128, ahead);
            x = _mm512_srl_epi16(tkvi_bytes_avx512(wide + 128), _mm_cvtsi32_si128(4 * h));
            a = _mm512_or_si512(a, _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi8(48)));
            b = _mm512_or_si512(b, _mm512_and_si512(_mm512_slli_epi16(x, 2), _mm512_set1_epi8(48)));
        }
    } else if (width >= 2) {
        if (h) tkvi_prefetch(wide, ahead);
        x = _mm512_srl_epi16(tkvi_bytes_avx512(wide), _mm_cvtsi32_si128(4 * h));
        a = _mm512_and_si512(x, _mm512_set1_epi8(3));
        b = _mm512_and_si512(_mm512_srli_epi16(x, 2), _mm512_set1_epi8(3));
    } else a = b = _mm512_setzero_si512();
    if (width & 1) { /* the top bit, to be moved to place width - 1 */
        __m128i place = _mm_cvtsi32_si128(width - 1);
        __m512i bit = _mm512_set1_epi8((char)(1 << (width - 1)));
        if (h) tkvi_prefetch(top, ahead);
        x = _mm512_srl_epi16(tkvi_bytes_avx512(top), _mm_cvtsi32_si128(at->half % 2 * 4 + 2 * h));
        a = _mm512_or_si512(a, _mm512_and_si512(_mm512_sll_epi16(x, place), bit));
        b = _mm512_or_si512(b, _mm512_and_si512(_mm512_sll_epi16(_mm512_srli_epi16(x, 1), place), bit));
    }
    if (table) {
        a = _mm512_shuffle_epi8(*table, a);
        b = _mm512_shuffle_epi8(*table, b);
    }
    codes[0] = a;
    codes[1] = b;
}

/* The 16 biased levels in each 128-bit quarter. */
TKVI_FLAT_AVX512 __m512i tkvi_levels_avx512(const int8_t *levels) {
    __m512i x = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)levels));
    return _mm512_add_epi8(x, _mm512_set1_epi8(TKVI_BIAS));
}

/* Folds the scales into n values (a multiple of 16) of nr rows of q or p, and rounds; see tkvi_fold. Four rows go
 * together so that their horizontal sums do, four vectors so that they pack into one of bytes. */
TKVI_FLAT_AVX512 void tkvi_fold4_avx512(const tkvi_folding *a, int first, const int nr, tkvi_fold *f) {
    const __m128 top = _mm_set1_ps(a->planes == 2 ? (float)TKVI_TWO_PLANES : (float)TKVI_PLANE);
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const float *x = a->x + first * a->x_stride;
    TKVI_ALIGNED float folded[4][TKV_MAX_HEAD_DIM];
    __m512 most[4], rest[4];
    __m512i middle[4], middle_hi[4];
    __m128 m, inverse;
    float by[4];
    int i, j, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) {
        most[r] = rest[r] = _mm512_setzero_ps();
        middle[r] = middle_hi[r] = _mm512_setzero_si512();
    }
    for (i = 0; i < a->n; i += 16) {
        __m512 scale = _mm512_loadu_ps(a->scale + i);
        __m512 zero = _mm512_fmadd_ps(scale, _mm512_set1_ps(a->centre), _mm512_loadu_ps(a->zero + i));
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m512 v = _mm512_loadu_ps(x + r * a->x_stride + i), y = _mm512_mul_ps(v, scale);
            most[r] = _mm512_range_ps(most[r], y, 11); /* the larger size, positive */
            rest[r] = _mm512_fmadd_ps(v, zero, rest[r]);
            _mm512_store_ps(folded[r] + i, y);
        }
    }
    for (; i % 64 != 0; i += 16) {
        TKVI_UNROLL
        for (r = 0; r < nr; r++) _mm512_store_ps(folded[r] + i, _mm512_setzero_ps());
    }
    m = tkvi_max4_avx512(most);
    inverse = _mm_maskz_div_ps(_mm_cmp_ps_mask(m, _mm_set1_ps(1e-34f), _CMP_GT_OQ), top, m);
    _mm_storeu_ps(by, inverse);
    _mm_storeu_ps(f->half_step + first, _mm_div_ps(_mm_mul_ps(m, _mm_set1_ps(0.5f)), top));
    _mm_storeu_ps(f->rest + first, tkvi_sum4_avx512(rest));
    for (i = 0; i < a->n; i += 64) {
        __m512i c = tkvi_bytes_avx512(a->centre2 + i);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            int8_t *w = a->w + (first + r) * a->planes * a->w_stride + i;
            __m512i v[4], hi;
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                __m512 y = _mm512_mul_ps(_mm512_load_ps(folded[r] + i + 16 * j), _mm512_set1_ps(by[r]));
                v[j] = _mm512_cvt_roundps_epi32(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            }
            v[0] = _mm512_packs_epi32(v[0], v[1]);
            v[1] = _mm512_packs_epi32(v[2], v[3]);
            if (a->planes == 2) { /* v = 128 hi + lo, lo 0..127 */
                hi = _mm512_packs_epi16(_mm512_srai_epi16(v[0], 7), _mm512_srai_epi16(v[1], 7));
                hi = _mm512_permutexvar_epi32(in_order, hi);
                _mm512_storeu_si512((void *)w, hi);
                middle_hi[r] = _mm512_dpbusd_epi32(middle_hi[r], c, hi);
                v[0] = _mm512_and_si512(v[0], _mm512_set1_epi16(127));
                v[1] = _mm512_and_si512(v[1], _mm512_set1_epi16(127));
                w += a->w_stride;
            }
            v[0] = _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(v[0], v[1]));
            _mm512_storeu_si512((void *)w, v[0]);
            middle[r] = _mm512_dpbusd_epi32(middle[r], c, v[0]);
        }
    }
    TKVI_UNROLL
    for (r = 0; r < nr; r++) middle[r] = _mm512_add_epi32(middle[r], _mm512_slli_epi32(middle_hi[r], 7));
    _mm_storeu_si128((__m128i *)(void *)(f->middle + first), tkvi_isum4_avx512(middle));
}

static TKVI_TARGET_AVX512 void tkvi_fold_avx512(const tkvi_folding *a, int rows, tkvi_fold *f) {
    int r;
    for (r = 0; r < rows; r += 4) {
        if (rows - r == 1) tkvi_fold4_avx512(a, r, 1, f);
        else if (rows - r == 2) tkvi_fold4_avx512(a, r, 2, f);
        else if (rows - r == 3) tkvi_fold4_avx512(a, r, 3, f);
        else tkvi_fold4_avx512(a, r, 4, f);
    }
    if (rows * a->planes % 2) memset(a->w + rows * a->planes * a->w_stride, 0, (size_t)a->w_stride);
}

/* step * (sum w (code - centre)) + rest for 16 lanes; sums of two planes stand 64 apart. */
TKVI_FLAT_AVX512 __m512 tkvi_unfold_avx512(const int32_t *sum, int planes, float half_step, int32_t middle,
                                           float rest) {
    __m512i d = _mm512_loadu_si512((const void *)sum);
    if (planes == 2)
        d = _mm512_add_epi32(_mm512_slli_epi32(d, 7), _mm512_loadu_si512((const void *)(sum + TKVI_BLOCK)));
    d = _mm512_sub_epi32(_mm512_slli_epi32(d, 1), _mm512_set1_epi32(middle));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), _mm512_set1_ps(half_step), _mm512_set1_ps(rest));
}

/* How many weight rows to take at once: 1, 2, 4, 6 or 8. The rows beyond the last one are zero. */
TKVI_FLAT int tkvi_pass(int left) { return left == 1 ? 1 : left > 6 ? 8 : (left + 1) / 2 * 2; }

/* K: lanes are tokens 32h .. 32h + 31; nw weight rows, sum[weight row][64]. */
TKVI_FLAT_AVX512 void tkvi_dot_k_avx512(const tkvi_side *s, const uint8_t *src, int h, uintptr_t ahead,
                                        const int8_t *w, const int nw, int32_t *sum) {
    __m512i acc[8][2], table = _mm512_setzero_si512();
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, r, j;
    if (s->levels) table = tkvi_levels_avx512(s->levels);
    TKVI_UNROLL
    for (r = 0; r < nw; r++) {
        TKVI_UNROLL
        for (j = 0; j < 2; j++) acc[r][j] = _mm512_setzero_si512();
    }
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, w += 4) {
            __m512i c[2];
            tkvi_codes_avx512(width, src, &at, h, ahead, s->levels ? &table : NULL, c);
            tkvi_next_tile(&at, width);
            TKVI_UNROLL
            for (r = 0; r < nw; r++) {
                __m512i four = _mm512_set1_epi32(tkvi_four(w + r * TKV_MAX_HEAD_DIM));
                TKVI_UNROLL
                for (j = 0; j < 2; j++) acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], c[j], four);
            }
        }
    TKVI_UNROLL
    for (r = 0; r < nw; r++) {
        TKVI_UNROLL
        for (j = 0; j < 2; j++)
            _mm512_storeu_si512((void *)(sum + r * TKVI_BLOCK + 32 * h + 16 * j), acc[r][j]);
    }
}

static TKVI_TARGET_AVX512 void tkvi_tiles_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                   const uint8_t *next, const float *q, const float *ref,
                                                   int rows, int n, int planes, float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED float ordered[(TKVI_ROWS + 1) * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED uint8_t centre2[TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int8_t w[2][2 * TKVI_ROWS][TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS][TKVI_BLOCK];
    tkvi_fold fold[2];
    tkvi_folding a;
    uintptr_t ahead = tkvi_ahead(src, next);
    int weight_rows = rows * planes, nw, r, g, h, c;
    (void)n;
    s->format->side[TKV_K].meta(s, src, tkvi_halves_avx512, scale, zero);
    tkvi_prefetch_meta(s, src, ahead);
    if (s->order) tkvi_order(s, &q, &ref, rows, ordered);
    tkvi_centres(s, centre2);
    for (g = 0; g < s->groups; g++) {
        for (c = 0; c < s->pad; c += 16) { /* zero - ref + centre * scale, the same for all rows */
            int m = g * s->pad + c;
            __m512 z = _mm512_sub_ps(_mm512_loadu_ps(zero + m), _mm512_loadu_ps(ref + c));
            __m512i twice =
                _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(centre2 + c)));
            __m512 half = _mm512_mul_ps(_mm512_cvtepi32_ps(twice), _mm512_set1_ps(s->levels ? 0.0f : 0.5f));
            _mm512_storeu_ps(zero + m, _mm512_fmadd_ps(half, _mm512_loadu_ps(scale + m), z));
        }
        tkvi_folding_set(&a, q, s->pad, scale + g * s->pad, zero + g * s->pad, 0.0f, centre2, planes, w[g][0],
                         TKV_MAX_HEAD_DIM);
        tkvi_fold_avx512(&a, rows, &fold[g]);
    }
    for (r = 0; r < weight_rows; r += nw) {
        nw = tkvi_pass(weight_rows - r);
        for (h = 0; h < 2; h++) {
            const int8_t *weights = w[s->groups == 2 ? h : 0][r];
            switch (nw) {
            case 8: tkvi_dot_k_avx512(s, src, h, ahead, weights, 8, sum[r]); break;
            case 6: tkvi_dot_k_avx512(s, src, h, ahead, weights, 6, sum[r]); break;
            case 4: tkvi_dot_k_avx512(s, src, h, ahead, weights, 4, sum[r]); break;
            case 2: tkvi_dot_k_avx512(s, src, h, ahead, weights, 2, sum[r]); break;
            default: tkvi_dot_k_avx512(s, src, h, ahead, weights, 1, sum[r]);
            }
        }
    }
    for (r = 0; r < rows; r++)
        for (c = 0; c < TKVI_BLOCK; c += 16) {
            const tkvi_fold *f = &fold[s->groups == 2 ? c / 32 : 0];
            _mm512_storeu_ps(
                scores + r * TKVI_BLOCK + c,
                tkvi_unfold_avx512(sum[r * planes] + c, planes, f->half_step[r], f->middle[r], f->rest[r]));
        }
}

/* V: lanes are 16 channels of one slab, or of two neighbours; sum[weight row][64], a slab takes 16 of them. */
TKVI_FLAT_AVX512 void tkvi_dot_v_avx512(const tkvi_side *s, const uint8_t *src, int width,
                                        const tkvi_tile_at *first, const tkvi_tile_at *second, int n,
                                        uintptr_t ahead, const int8_t *w, const int nw, int32_t *sum) {
    __m512i acc[8][2], table = _mm512_setzero_si512();
    tkvi_tile_at a = *first, b = *second;
    int t, h, p, r, j;
    if (s->levels) table = tkvi_levels_avx512(s->levels);
    TKVI_UNROLL
    for (r = 0; r < nw; r++) {
        TKVI_UNROLL
        for (j = 0; j < 2; j++) acc[r][j] = _mm512_setzero_si512();
    }
    for (t = 0; t < n; t += 16) { /* a tile has 16 tokens, a plane four */
        for (h = 0; h < 2; h++, w += 8) {
            __m512i c[2][2];
            tkvi_codes_avx512(width, src, &a, h, ahead, s->levels ? &table : NULL, c[0]);
            tkvi_codes_avx512(width, src, &b, h, ahead, s->levels ? &table : NULL, c[1]);
            TKVI_UNROLL
            for (p = 0; p < 2; p++) {
                TKVI_UNROLL
                for (r = 0; r < nw; r++) {
                    __m512i four = _mm512_set1_epi32(tkvi_four(w + r * TKVI_BLOCK + 4 * p));
                    TKVI_UNROLL
                    for (j = 0; j < 2; j++) acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], c[j][p], four);
                }
            }
        }
        tkvi_next_tile(&a, width);
        tkvi_next_tile(&b, width);
    }
    TKVI_UNROLL
    for (r = 0; r < nw; r++) {
        TKVI_UNROLL
        for (j = 0; j < 2; j++) _mm512_storeu_si512((void *)(sum + r * TKVI_BLOCK + 16 * j), acc[r][j]);
    }
}

static TKVI_TARGET_AVX512 void tkvi_tiles_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                   const uint8_t *next, const float *p, int rows, int n,
                                                   int planes, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED int8_t w[2 * TKVI_ROWS][TKVI_BLOCK];
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS][TKVI_BLOCK];
    tkvi_folding a;
    tkvi_fold f;
    TKVI_ALIGNED uint8_t ones[TKVI_BLOCK];
    uintptr_t ahead = tkvi_ahead(src, next);
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int weight_rows = rows * planes, width, i, j, r, g, nw, slab = 0;
    s->format->side[TKV_V].meta(s, src, tkvi_halves_avx512, scale, zero);
    tkvi_prefetch_meta(s, src, ahead);
    memset(ones, 1, sizeof ones);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0, g = -1; i < s->runs.n[width];) {
            int slabs = slab % 2 == 0 && i + 4 < s->runs.n[width] ? 2 : 1;
            tkvi_tile_at one = at;
            for (j = 0; j < 4; j++) tkvi_next_tile(&at, width);
            if (g != 16 * slab / s->group) {
                g = 16 * slab / s->group;
                tkvi_folding_set(&a, p, TKVI_BLOCK, scale + g * TKVI_BLOCK, zero + g * TKVI_BLOCK,
                                 tkvi_centre(s, width), ones, planes, w[0], TKVI_BLOCK);
                tkvi_fold_avx512(&a, rows, &f);
            }
            for (r = 0; r < weight_rows; r += nw) {
                const tkvi_tile_at *two = slabs == 2 ? &at : &one;
                nw = tkvi_pass(weight_rows - r);
                switch (nw) {
                case 8: tkvi_dot_v_avx512(s, src, width, &one, two, n, ahead, w[r], 8, sum[r]); break;
                case 6: tkvi_dot_v_avx512(s, src, width, &one, two, n, ahead, w[r], 6, sum[r]); break;
                case 4: tkvi_dot_v_avx512(s, src, width, &one, two, n, ahead, w[r], 4, sum[r]); break;
                case 2: tkvi_dot_v_avx512(s, src, width, &one, two, n, ahead, w[r], 2, sum[r]); break;
                default: tkvi_dot_v_avx512(s, src, width, &one, two, n, ahead, w[r], 1, sum[r]);
                }
            }
            if (slabs == 2)
                for (j = 0; j < 4; j++) tkvi_next_tile(&at, width);
            for (r = 0; r < rows; r++)
                for (j = 0; j < slabs; j++) {
                    float *o = out + r * s->pad + 16 * (slab + j);
                    __m512 d = tkvi_unfold_avx512(sum[r * planes] + 16 * j, planes, f.half_step[r],
                                                  tkvi_centre2(s, width) * f.middle[r], f.rest[r]);
                    _mm512_storeu_ps(o, _mm512_add_ps(_mm512_loadu_ps(o), d));
                }
            i += 4 * slabs;
            slab += slabs;
        }
}

static const tkvi_kernels tkvi_kernels_avx512 = {
    TKV_ISA_AVX512,
    "avx512",
    {tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_tiles_k_avx512},
    {tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_tiles_v_avx512},
    tkvi_halves_avx512,
    tkvi_exp64_avx512,
    tkvi_max64_avx512,
};

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* TKVI_AVX512 */

#endif /* TKVI_KERNELS_AVX512_H */
