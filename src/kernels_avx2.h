/*
 * kernels_avx2.h - what the x86 kernels share, and the kernels of kernels.h for AVX2 + FMA + F16C (Haswell, Zen).
 *
 * Everything is compiled in one translation unit without any -m flag: each function that touches a vector, helpers
 * included, carries its target. Table entries are plain static functions; the pieces they are made of are inlined
 * by force, with the number of rows as a constant, so that accumulators stay in registers.
 * Calls kernels.h and below. kernels_avx512.h has the same functions with longer vectors: read them side by side.
 */
#ifndef TKVI_KERNELS_AVX2_H
#define TKVI_KERNELS_AVX2_H

#include "kernels.h"

/* >>compilers */
#if !defined(TKV_NO_SIMD) && (defined(__x86_64__) || defined(__i386__) || defined(_M_X64) || defined(_M_IX86))
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 8 && !defined(__TINYC__))
#define TKVI_X86
#define TKVI_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TKVI_FLAT static inline __attribute__((always_inline))
#define TKVI_ALIGNED __attribute__((aligned(64)))
#ifndef TKV_NO_AVX512
#define TKVI_AVX512
#if (defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ >= 18 &&                     \
     __clang_major__ <= 21) ||                                                                               \
    (!defined(__clang__) && (__GNUC__ == 14 || __GNUC__ == 15))
#define TKVI_TARGET_AVX512                                                                                   \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,evex512")))
#else
#define TKVI_TARGET_AVX512                                                                                   \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#endif
#endif
#elif defined(                                                                                               \
    _MSC_VER) /* intrinsics need no flag; its AVX-512 has leaked into AVX2 code, so only when asked for */
#define TKVI_X86
#define TKVI_TARGET_AVX2
#define TKVI_FLAT static __forceinline
#define TKVI_ALIGNED __declspec(align(64))
#if defined(TKV_MSVC_AVX512) && !defined(TKV_NO_AVX512)
#define TKVI_AVX512
#define TKVI_TARGET_AVX512
#endif
#endif
#endif

#ifdef TKVI_X86
#include <immintrin.h>

#if defined(__clang__)
#define TKVI_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define TKVI_UNROLL _Pragma("GCC unroll 8")
#else
#define TKVI_UNROLL
#endif
#define TKVI_FLAT_AVX2 TKVI_FLAT TKVI_TARGET_AVX2
#define TKVI_FLAT_AVX512 TKVI_FLAT TKVI_TARGET_AVX512

/* >>shared pieces, without vectors */
/* Prefetching: what stands at p in this side stands at p + ahead in the next one. */
TKVI_FLAT uintptr_t tkvi_ahead(const uint8_t *src, const uint8_t *next) {
    return next ? (uintptr_t)next - (uintptr_t)src : 0u;
}

/* Into L2: a core has few requests for L1 under way (Zen 4: 12 GB/s), far more for L2 (20 GB/s and up). */
TKVI_FLAT void tkvi_prefetch(const uint8_t *p, uintptr_t ahead) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch((const void *)((uintptr_t)p + ahead), 0, 2);
#else
    _mm_prefetch((const char *)((uintptr_t)p + ahead), _MM_HINT_T1);
#endif
}

TKVI_FLAT void tkvi_prefetch_meta(const tkvi_side *s, const uint8_t *src, uintptr_t ahead) {
    size_t i;
    for (i = s->code_bytes; i < s->bytes; i += 64) tkvi_prefetch(src + i, ahead);
}

/* Four weights of neighbouring channels or tokens, to be broadcast. */
TKVI_FLAT int32_t tkvi_four(const int8_t *w) {
    int32_t x;
    memcpy(&x, w, 4);
    return x;
}

#define TKVI_BIAS 127 /* makes levels unsigned */

/* Twice the centre of the codes as the integer kernels see them. */
static int tkvi_centre2(const tkvi_side *s, int width) {
    return s->levels ? 2 * TKVI_BIAS : (1 << width) - 1;
}

static void tkvi_centres(const tkvi_side *s, uint8_t *centre2) { /* by position in K */
    int width;
    memset(centre2, 0, TKV_MAX_HEAD_DIM);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        if (s->runs.n[width]) {
            memset(centre2, tkvi_centre2(s, width), (size_t)(4 * s->runs.n[width]));
            centre2 += 4 * s->runs.n[width];
        }
}

/* q and ref in the order of the codes; `room` for rows + 1 of them. */
static void tkvi_order(const tkvi_side *s, const float **q, const float **ref, int rows, float *room) {
    int r, c;
    for (r = 0; r <= rows; r++)
        for (c = 0; c < s->pad; c++)
            room[r * s->pad + c] = r < rows ? (*q)[r * s->pad + s->order[c]] : (*ref)[s->order[c]];
    *q = room;
    *ref = room + rows * s->pad;
}

/* Folding scales into rows of q (by channel) or p (by token), for one group. */
typedef struct tkvi_folding {
    const float *x, *scale, *zero; /* x: [row][x_stride], n values used of each */
    float centre;                  /* zero + centre * scale is what stands for zero */
    const uint8_t *centre2;
    int8_t *w; /* rounded weights [row][plane][w_stride], room for one more row than there are */
    int x_stride, w_stride, n, planes;
} tkvi_folding;

/* What it gives besides the rounded weights. The answer of row r is
 *   half_step * (2 sum w code - middle) + rest,  middle = sum w centre2,  rest = sum x (zero + centre scale). */
typedef struct tkvi_fold {
    float half_step[TKVI_ROWS], rest[TKVI_ROWS];
    int32_t middle[TKVI_ROWS];
} tkvi_fold;

static void tkvi_folding_set(tkvi_folding *a, const float *x, int n, const float *scale, const float *zero,
                             float centre, const uint8_t *centre2, int planes, int8_t *w, int w_stride) {
    a->x = x;
    a->scale = scale;
    a->zero = zero;
    a->centre = centre;
    a->centre2 = centre2;
    a->w = w;
    a->x_stride = a->n = n;
    a->w_stride = w_stride;
    a->planes = planes;
}

/* >>pieces */
TKVI_FLAT_AVX2 __m256i tkvi_bytes_avx2(const uint8_t *p) {
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
        for (c = 0; c < nt * row_bytes; c += 64) tkvi_prefetch(src + t * row_bytes + c, ahead);
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
    (void)planes;
    for (; rows > 0; rows -= 4, q += 4 * s->pad, scores += 4 * TKVI_BLOCK) {
        memset(scores, 0, (size_t)(tkvi_min(rows, 4) * TKVI_BLOCK) * sizeof(float));
        if (rows == 1) tkvi_exact_k4_avx2(s, src, ahead, q, ref, rows, n, 1, 4, scores);
        else if (rows == 2) tkvi_exact_k4_avx2(s, src, ahead, q, ref, rows, n, 2, 4, scores);
        else tkvi_exact_k4_avx2(s, src, ahead, q, ref, rows, n, 4, 2, scores);
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
    int c;
    (void)planes;
    for (; rows > 0; rows -= 4, p += 4 * TKVI_BLOCK, out += 4 * s->pad)
        for (c = 0; c < s->pad; c += 16) {
            if (rows == 1) tkvi_exact_v4_avx2(s, src, ahead, p, rows, n, c, 1, out);
            else if (rows == 2) tkvi_exact_v4_avx2(s, src, ahead, p, rows, n, c, 2, out);
            else tkvi_exact_v4_avx2(s, src, ahead, p, rows, n, c, 4, out);
        }
}

/* >>tiles */
/* One half (bytes 32b .. 32b + 31) of planes 2h and 2h + 1 of one tile, as bytes; see tile.h for what stands where.
 * 16-bit shifts move bits into the neighbour byte, the masks take them away. Of 8-bit codes `part` says which four
 * bits: whole ones would overflow the 16-bit sums. */
TKVI_FLAT_AVX2 void tkvi_codes_avx2(int width, const uint8_t *src, const tkvi_tile_at *at, int h, int b,
                                    int part, uintptr_t ahead, __m256i *codes) {
    const uint8_t *wide = src + at->wide + 32 * b, *top = src + at->halves + at->half / 2 * 64 + 32 * b;
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i x;
    codes[0] = codes[1] = _mm256_setzero_si256();
    if (width == 8) {
        __m128i place = _mm_cvtsi32_si128(4 * part);
        if (b == 0 && part == 0) {
            tkvi_prefetch(wide + 128 * h, ahead);
            tkvi_prefetch(wide + 128 * h + 64, ahead);
        }
        codes[0] = _mm256_and_si256(_mm256_srl_epi16(tkvi_bytes_avx2(wide + 128 * h), place), nibble);
        codes[1] = _mm256_and_si256(_mm256_srl_epi16(tkvi_bytes_avx2(wide + 128 * h + 64), place), nibble);
    } else if (width >= 4) {
        if (b == 0) tkvi_prefetch(wide + 64 * h, ahead);
        x = tkvi_bytes_avx2(wide + 64 * h);
        codes[0] = _mm256_and_si256(x, nibble);
        codes[1] = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
        if (width == 6) {
            const __m256i bits = _mm256_set1_epi8(48);
            if (b == 0 && h) tkvi_prefetch(wide + 128, ahead);
            x = _mm256_srl_epi16(tkvi_bytes_avx2(wide + 128), _mm_cvtsi32_si128(4 * h));
            codes[0] = _mm256_or_si256(codes[0], _mm256_and_si256(_mm256_slli_epi16(x, 4), bits));
            codes[1] = _mm256_or_si256(codes[1], _mm256_and_si256(_mm256_slli_epi16(x, 2), bits));
        }
    } else if (width >= 2) {
        if (b == 0 && h) tkvi_prefetch(wide, ahead);
        x = _mm256_srl_epi16(tkvi_bytes_avx2(wide), _mm_cvtsi32_si128(4 * h));
        codes[0] = _mm256_and_si256(x, _mm256_set1_epi8(3));
        codes[1] = _mm256_and_si256(_mm256_srli_epi16(x, 2), _mm256_set1_epi8(3));
    }
    if (width & 1) { /* the top bit, to be moved to place width - 1 */
        __m128i place = _mm_cvtsi32_si128(width - 1);
        __m256i bit = _mm256_set1_epi8((char)(1 << (width - 1)));
        if (b == 0 && h) tkvi_prefetch(top, ahead);
        x = _mm256_srl_epi16(tkvi_bytes_avx2(top), _mm_cvtsi32_si128(at->half % 2 * 4 + 2 * h));
        codes[0] = _mm256_or_si256(codes[0], _mm256_and_si256(_mm256_sll_epi16(x, place), bit));
        x = _mm256_srli_epi16(x, 1);
        codes[1] = _mm256_or_si256(codes[1], _mm256_and_si256(_mm256_sll_epi16(x, place), bit));
    }
}

/* acc += codes * weights, four by four. Pairs of products fit 16 bits: 2 * 127 * 63. With a table the levels are the
 * signed operand and the size of the weights the unsigned one: 2 * 127 * 127. `unit` is 1, or 16 for high nibbles. */
TKVI_FLAT_AVX2 __m256i tkvi_dot_avx2(__m256i acc, __m256i codes, __m256i four, __m256i unit,
                                     const __m256i *table) {
    __m256i pairs = table ? _mm256_maddubs_epi16(_mm256_abs_epi8(four),
                                                 _mm256_sign_epi8(_mm256_shuffle_epi8(*table, codes), four))
                          : _mm256_maddubs_epi16(codes, four);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, unit));
}

/* Folds the scales into n values (a multiple of 16) of nr rows of q or p, and rounds; see tkvi_fold. Four rows go
 * together so that their horizontal sums do. */
TKVI_FLAT_AVX2 void tkvi_fold4_avx2(const tkvi_folding *a, int first, const int nr, tkvi_fold *f) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m128 top = _mm_set1_ps(a->planes == 2 ? (float)TKVI_TWO_PLANES : (float)TKVI_PLANE);
    const float *x = a->x + first * a->x_stride;
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
        __m256 zero = _mm256_fmadd_ps(scale, _mm256_set1_ps(a->centre), _mm256_loadu_ps(a->zero + i));
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m256 v = _mm256_loadu_ps(x + r * a->x_stride + i), y = _mm256_mul_ps(v, scale);
            most[r] = _mm256_max_ps(most[r], _mm256_and_ps(y, no_sign));
            rest[r] = _mm256_fmadd_ps(v, zero, rest[r]);
        }
    }
    m = tkvi_max4_avx2(most);
    inverse = _mm_and_ps(_mm_div_ps(top, m),
                         _mm_cmpgt_ps(m, _mm_set1_ps(1e-34f))); /* smaller: contributes nothing */
    _mm_storeu_ps(by, inverse);
    _mm_storeu_ps(f->half_step + first, _mm_div_ps(_mm_mul_ps(m, _mm_set1_ps(0.5f)), top));
    _mm_storeu_ps(f->rest + first, tkvi_sum4_avx2(rest));
    for (i = 0; i < a->n; i += 16) {
        __m256 scale0 = _mm256_loadu_ps(a->scale + i), scale1 = _mm256_loadu_ps(a->scale + i + 8);
        __m256i c = _mm256_cvtepu8_epi16(tkvi_bytes16_avx2(a->centre2 + i));
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            int8_t *w = a->w + (first + r) * a->planes * a->w_stride + i;
            __m256 u = _mm256_mul_ps(_mm256_loadu_ps(x + r * a->x_stride + i), scale0);
            __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + r * a->x_stride + i + 8), scale1);
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

/* step * (sum w (code - centre)) + rest for 8 lanes; sums of two planes stand 64 apart. */
TKVI_FLAT_AVX2 __m256 tkvi_unfold_avx2(const int32_t *sum, int planes, float half_step, int32_t middle,
                                       float rest) {
    __m256i d = _mm256_loadu_si256((const __m256i *)(const void *)sum);
    if (planes == 2)
        d = _mm256_add_epi32(_mm256_slli_epi32(d, 7),
                             _mm256_loadu_si256((const __m256i *)(const void *)(sum + TKVI_BLOCK)));
    d = _mm256_sub_epi32(_mm256_slli_epi32(d, 1), _mm256_set1_epi32(middle));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(d), _mm256_set1_ps(half_step), _mm256_set1_ps(rest));
}

/* K: lanes are 8 tokens from 32h + 8b and 8 from 32h + 16 + 8b; nw weight rows, sum[weight row][64]. */
TKVI_FLAT_AVX2 void tkvi_dot_k_avx2(const tkvi_side *s, const uint8_t *src, int h, int b, uintptr_t ahead,
                                    const int8_t *w, const int nw, int32_t *sum) {
    __m256i acc[4][2], table = _mm256_setzero_si256();
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, r, j, part;
    if (s->levels)
        table = _mm256_broadcastsi128_si256(tkvi_bytes16_avx2((const uint8_t *)(const void *)s->levels));
    TKVI_UNROLL
    for (r = 0; r < nw; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, w += 4) {
            for (part = 0; part < 1 + (width == 8); part++) {
                __m256i c[2], unit = _mm256_set1_epi16(part ? 16 : 1);
                tkvi_codes_avx2(width, src, &at, h, b, part, ahead, c);
                TKVI_UNROLL
                for (r = 0; r < nw; r++) {
                    __m256i four = _mm256_set1_epi32(tkvi_four(w + r * TKV_MAX_HEAD_DIM));
                    TKVI_UNROLL
                    for (j = 0; j < 2; j++)
                        acc[r][j] = tkvi_dot_avx2(acc[r][j], c[j], four, unit, s->levels ? &table : NULL);
                }
            }
            tkvi_next_tile(&at, width);
        }
    TKVI_UNROLL
    for (r = 0; r < nw; r++) {
        TKVI_UNROLL
        for (j = 0; j < 2; j++)
            _mm256_storeu_si256((__m256i *)(void *)(sum + r * TKVI_BLOCK + 32 * h + 16 * j + 8 * b),
                                acc[r][j]);
    }
}

static TKVI_TARGET_AVX2 void tkvi_tiles_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                               const float *q, const float *ref, int rows, int n, int planes,
                                               float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED float ordered[(TKVI_ROWS + 1) * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED uint8_t centre2[TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int8_t w[2][2 * TKVI_ROWS][TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS][TKVI_BLOCK];
    tkvi_fold fold[2];
    tkvi_folding a;
    uintptr_t ahead = tkvi_ahead(src, next);
    int weight_rows = rows * planes, r, g, h, b, c;
    (void)n;
    s->format->side[TKV_K].meta(s, src, tkvi_halves_avx2, scale, zero);
    tkvi_prefetch_meta(s, src, ahead);
    if (s->order) tkvi_order(s, &q, &ref, rows, ordered);
    tkvi_centres(s, centre2);
    for (g = 0; g < s->groups; g++) {
        for (c = 0; c < s->pad; c += 8) { /* zero - ref + centre * scale, the same for all rows */
            int m = g * s->pad + c;
            __m256 z = _mm256_sub_ps(_mm256_loadu_ps(zero + m), _mm256_loadu_ps(ref + c));
            __m128i twice = _mm_loadl_epi64((const __m128i *)(const void *)(centre2 + c));
            __m256 half = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(twice)),
                                        _mm256_set1_ps(s->levels ? 0.0f : 0.5f));
            _mm256_storeu_ps(zero + m, _mm256_fmadd_ps(half, _mm256_loadu_ps(scale + m), z));
        }
        tkvi_folding_set(&a, q, s->pad, scale + g * s->pad, zero + g * s->pad, 0.0f, centre2, planes, w[g][0],
                         TKV_MAX_HEAD_DIM);
        tkvi_fold_avx2(&a, rows, &fold[g]);
    }
    for (r = 0; r < weight_rows; r += 4)
        for (h = 0; h < 2; h++)
            for (b = 0; b < 2; b++) {
                const int8_t *weights = w[s->groups == 2 ? h : 0][r];
                int left = weight_rows - r;
                if (left == 1) tkvi_dot_k_avx2(s, src, h, b, ahead, weights, 1, sum[r]);
                else if (left == 2) tkvi_dot_k_avx2(s, src, h, b, ahead, weights, 2, sum[r]);
                else tkvi_dot_k_avx2(s, src, h, b, ahead, weights, 4, sum[r]);
            }
    for (r = 0; r < rows; r++)
        for (c = 0; c < TKVI_BLOCK; c += 8) {
            const tkvi_fold *f = &fold[s->groups == 2 ? c / 32 : 0];
            _mm256_storeu_ps(scores + r * TKVI_BLOCK + c,
                             tkvi_unfold_avx2(sum[r * planes] + c, planes, f->half_step[r],
                                              s->levels ? 0 : f->middle[r], f->rest[r]));
        }
}

/* V: lanes are the 16 channels of one slab; sum[weight row][64], of which 16 are used. */
TKVI_FLAT_AVX2 void tkvi_dot_v_avx2(const tkvi_side *s, const uint8_t *src, int width,
                                    const tkvi_tile_at *first, int n, uintptr_t ahead, const int8_t *w,
                                    const int nw, int32_t *sum) {
    __m256i acc[4][2], table = _mm256_setzero_si256();
    tkvi_tile_at at = *first;
    int t, h, p, r, j, part;
    if (s->levels)
        table = _mm256_broadcastsi128_si256(tkvi_bytes16_avx2((const uint8_t *)(const void *)s->levels));
    TKVI_UNROLL
    for (r = 0; r < nw; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (t = 0; t < n; t += 16) { /* a tile has 16 tokens, a plane four */
        for (h = 0; h < 2; h++, w += 8)
            for (part = 0; part < 1 + (width == 8); part++) {
                __m256i c[2][2], unit = _mm256_set1_epi16(part ? 16 : 1);
                tkvi_codes_avx2(width, src, &at, h, 0, part, ahead, c[0]);
                tkvi_codes_avx2(width, src, &at, h, 1, part, ahead, c[1]);
                TKVI_UNROLL
                for (p = 0; p < 2; p++) {
                    TKVI_UNROLL
                    for (r = 0; r < nw; r++) {
                        __m256i four = _mm256_set1_epi32(tkvi_four(w + r * TKVI_BLOCK + 4 * p));
                        TKVI_UNROLL
                        for (j = 0; j < 2; j++)
                            acc[r][j] =
                                tkvi_dot_avx2(acc[r][j], c[j][p], four, unit, s->levels ? &table : NULL);
                    }
                }
            }
        tkvi_next_tile(&at, width);
    }
    TKVI_UNROLL
    for (r = 0; r < nw; r++) {
        TKVI_UNROLL
        for (j = 0; j < 2; j++)
            _mm256_storeu_si256((__m256i *)(void *)(sum + r * TKVI_BLOCK + 8 * j), acc[r][j]);
    }
}

static TKVI_TARGET_AVX2 void tkvi_tiles_v_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                               const float *p, int rows, int n, int planes, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED int8_t w[2 * TKVI_ROWS][TKVI_BLOCK];
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS][TKVI_BLOCK];
    tkvi_folding a;
    tkvi_fold f;
    TKVI_ALIGNED uint8_t ones[TKVI_BLOCK];
    uintptr_t ahead = tkvi_ahead(src, next);
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int weight_rows = rows * planes, width, i, j, r, g, slab = 0;
    s->format->side[TKV_V].meta(s, src, tkvi_halves_avx2, scale, zero);
    tkvi_prefetch_meta(s, src, ahead);
    memset(ones, 1, sizeof ones);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0, g = -1; i < s->runs.n[width]; i += 4, slab++) {
            int32_t centre2 = s->levels ? 0 : tkvi_centre2(s, width);
            if (g != 16 * slab / s->group) {
                g = 16 * slab / s->group;
                tkvi_folding_set(&a, p, TKVI_BLOCK, scale + g * TKVI_BLOCK, zero + g * TKVI_BLOCK,
                                 tkvi_centre(s, width), ones, planes, w[0], TKVI_BLOCK);
                tkvi_fold_avx2(&a, rows, &f);
            }
            for (r = 0; r < weight_rows; r += 4) {
                int left = weight_rows - r;
                if (left == 1) tkvi_dot_v_avx2(s, src, width, &at, n, ahead, w[r], 1, sum[r]);
                else if (left == 2) tkvi_dot_v_avx2(s, src, width, &at, n, ahead, w[r], 2, sum[r]);
                else tkvi_dot_v_avx2(s, src, width, &at, n, ahead, w[r], 4, sum[r]);
            }
            for (j = 0; j < 4; j++) tkvi_next_tile(&at, width);
            for (r = 0; r < rows; r++)
                for (j = 0; j < 2; j++) {
                    float *o = out + r * s->pad + 16 * slab + 8 * j;
                    __m256 d = tkvi_unfold_avx2(sum[r * planes] + 8 * j, planes, f.half_step[r],
                                                centre2 * f.middle[r], f.rest[r]);
                    _mm256_storeu_ps(o, _mm256_add_ps(_mm256_loadu_ps(o), d));
                }
        }
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
