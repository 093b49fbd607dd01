/*
 * kernels/prefill_avx512.h - the kernels of kernels/prefill.h for AVX-512 VNNI. No other instruction set has any.
 *
 * All products have one shape: 8 tokens (K) or channels (V) by 16 or 32 rows. The sums take 8 or 16 registers, of
 * floats or of integers. vpdpbusd multiplies unsigned bytes by signed ones. In K the codes are unsigned and the
 * weights signed. In V the weights are unsigned and the codes signed.
 *
 * nv is the number of vectors of 16 rows, 1 or 2. v is the number of such a vector.
 */
#ifndef TKVI_KERNELS_PREFILL_AVX512_H
#define TKVI_KERNELS_PREFILL_AVX512_H

#include "kernels/prefill.h"

#ifdef TKVI_AVX512

#if defined(__GNUC__) && !defined(__clang__) /* as in kernels/avx512.h */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/* >>products */
#define TKVI_EIGHT_(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

TKVI_FLAT_AVX512 void tkvi_prefill_store_answers_avx512(__m512i sum, const float *by, const float *rest,
                                                        const int add, float *out) {
    __m512 from = _mm512_loadu_ps(rest);
    if (add) from = _mm512_add_ps(from, _mm512_loadu_ps(out));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(by), from));
}

/* a0 .. a7 are the sums of the first 16 rows, b0 .. b7 those of the next 16. As named variables, in a function with
 * one loop, they stay in registers. TKVI_HIDE_ hides their later use as 32-bit lanes from gcc 12. Otherwise gcc
 * converts them inside the loop and keeps two copies of each. */
#define TKVI_HIDE_(j) __asm__("" : "+v"(a##j), "+v"(b##j));
#define TKVI_FROM_(j) __m512i a##j = _mm512_setzero_si512(), b##j = a##j;
#define TKVI_MAC_(j)                                                                                         \
    four = _mm512_set1_epi32(x[j]);                                                                          \
    a##j = keys ? _mm512_dpbusd_epi32(a##j, four, wa) : _mm512_dpbusd_epi32(a##j, wa, four);                 \
    if (nv > 1) b##j = keys ? _mm512_dpbusd_epi32(b##j, four, wb) : _mm512_dpbusd_epi32(b##j, wb, four);
#define TKVI_STEP_                                                                                           \
    wa = tkvi_load_bytes_avx512(w);                                                                          \
    wb = nv > 1 ? tkvi_load_bytes_avx512(w + 64) : wa;                                                       \
    TKVI_EIGHT_(TKVI_MAC_)                                                                                   \
    w += 64 * nv;                                                                                            \
    x += keys ? TKVI_BLOCK : 16;
#define TKVI_OUT_(j)                                                                                         \
    tkvi_prefill_store_answers_avx512(a##j, by, rest, add, out + j * 16 * nv);                               \
    if (nv > 1) tkvi_prefill_store_answers_avx512(b##j, by + 16, rest + 16, add, out + j * 16 * nv + 16);
TKVI_FLAT_AVX512 void tkvi_prefill_eight_avx512(const uint8_t *w, const int32_t *x, int n, const float *by,
                                                const float *rest, float *out, const int keys, const int nv,
                                                const int add) {
    __m512i wa, wb, four;
    int i;
    TKVI_EIGHT_(TKVI_FROM_)
    for (i = 0; i < n; i += keys ? 1 : 4) {
        TKVI_STEP_
        if (!keys) { /* n is a multiple of 4 */
            TKVI_STEP_
            TKVI_STEP_
            TKVI_STEP_
        }
    }
    TKVI_EIGHT_(TKVI_HIDE_)
    TKVI_EIGHT_(TKVI_OUT_)
}
#undef TKVI_HIDE_
#undef TKVI_STEP_
#undef TKVI_FROM_
#undef TKVI_MAC_
#undef TKVI_OUT_

/* The same in floats: out[j][lanes] = sum over i < n of y[i][lanes] x[i * step + j * apart]. add: out += the sum. */
#define TKVI_FROM_(j)                                                                                        \
    __m512 a##j = add ? _mm512_loadu_ps(out + j * 16 * nv) : _mm512_setzero_ps();                            \
    __m512 b##j = add && nv > 1 ? _mm512_loadu_ps(out + j * 16 * nv + 16) : _mm512_setzero_ps();
#define TKVI_MAC_(j)                                                                                         \
    one = _mm512_set1_ps(x[j * apart]);                                                                      \
    a##j = _mm512_fmadd_ps(ya, one, a##j);                                                                   \
    if (nv > 1) b##j = _mm512_fmadd_ps(yb, one, b##j);
#define TKVI_OUT_(j)                                                                                         \
    _mm512_storeu_ps(out + j * 16 * nv, a##j);                                                               \
    if (nv > 1) _mm512_storeu_ps(out + j * 16 * nv + 16, b##j);
TKVI_FLAT_AVX512 void tkvi_prefill_floats_avx512(const float *y, const float *x, int n, const int step,
                                                 const int apart, const int nv, const int add, float *out) {
    __m512 ya, yb, one;
    int i;
    TKVI_EIGHT_(TKVI_FROM_)
    for (i = 0; i < n; i++, y += 16 * nv, x += step) {
        ya = _mm512_loadu_ps(y);
        yb = nv > 1 ? _mm512_loadu_ps(y + 16) : ya;
        TKVI_EIGHT_(TKVI_MAC_)
    }
    TKVI_EIGHT_(TKVI_OUT_)
}
#undef TKVI_FROM_
#undef TKVI_MAC_
#undef TKVI_OUT_
#undef TKVI_EIGHT_

/* Floats from one exact key to the next. A power of 2 would put the same channel of all keys into one cache set. */
enum { TKVI_PREFILL_KEY_STRIDE = TKV_MAX_HEAD_DIM + 16 };

/* Sums of products for eight tokens (K) or channels (V): out[8][lanes] = by * sum + rest. add: out += that.
 * w: [n][lanes][4] weights. x: [n][64 tokens or 16 channels], four codes each; the first eight are read. */
#define TKVI_PREFILL_PRODUCTS_(name, keys, nv, add)                                                          \
    static TKVI_NOINLINE TKVI_TARGET_AVX512 void tkvi_prefill_##name##nv##_avx512(                           \
        const uint8_t *w, const int32_t *x, int n, const float *by, const float *rest, float *out) {         \
        tkvi_prefill_eight_avx512(w, x, n, by, rest, out, keys, nv, add);                                    \
    }
TKVI_PREFILL_PRODUCTS_(scores, 1, 1, 0)
TKVI_PREFILL_PRODUCTS_(scores, 1, 2, 0)
TKVI_PREFILL_PRODUCTS_(add_scores, 1, 1, 1)
TKVI_PREFILL_PRODUCTS_(add_scores, 1, 2, 1)
TKVI_PREFILL_PRODUCTS_(add_values, 0, 1, 1)
TKVI_PREFILL_PRODUCTS_(add_values, 0, 2, 1)
#undef TKVI_PREFILL_PRODUCTS_

#define TKVI_PREFILL_FLOATS_(nv)                                                                             \
    static TKVI_NOINLINE TKVI_TARGET_AVX512 void tkvi_prefill_key##nv##_avx512(                              \
        const float *q, const float *x, int n, float *out) {                                                 \
        tkvi_prefill_floats_avx512(q, x, n, 1, TKVI_PREFILL_KEY_STRIDE, nv, 0, out);                         \
    }                                                                                                        \
    static TKVI_NOINLINE TKVI_TARGET_AVX512 void tkvi_prefill_value##nv##_avx512(                            \
        const float *p, const float *x, int n, float *out) {                                                 \
        tkvi_prefill_floats_avx512(p, x, n, 16, 1, nv, 1, out);                                              \
    }
TKVI_PREFILL_FLOATS_(1)
TKVI_PREFILL_FLOATS_(2)
#undef TKVI_PREFILL_FLOATS_

/* >>exact tiers */
/* 8 tokens at a time. Tokens beyond n repeat the last one. */
static TKVI_TARGET_AVX512 void tkvi_prefill_exact_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                           uintptr_t ahead, const float *q, const float *ref,
                                                           int lanes, int n, float *scores) {
    TKVI_ALIGNED float x[8 * TKVI_PREFILL_KEY_STRIDE];
    const int row_bytes = s->pad * s->format->bits / 8;
    int t, j, c;
    for (t = 0; t < TKVI_BLOCK; t += 8, scores += 8 * lanes) {
        if (t >= n) {
            memset(scores, 0, (size_t)(8 * lanes) * sizeof(float));
            continue;
        }
        for (j = 0; j < 8; j++) {
            const uint8_t *row = src + tkvi_min(t + j, n - 1) * row_bytes;
            tkvi_prefetch_bytes(row, row_bytes, ahead);
            for (c = 0; c < s->pad; c += 16)
                _mm512_storeu_ps(x + j * TKVI_PREFILL_KEY_STRIDE + c,
                                 _mm512_sub_ps(tkvi_load_values_avx512(s->format->stored, row, c),
                                               _mm512_loadu_ps(ref + c)));
        }
        if (lanes > 16) tkvi_prefill_key2_avx512(q, x, s->pad, scores);
        else tkvi_prefill_key1_avx512(q, x, s->pad, scores);
    }
}

static TKVI_TARGET_AVX512 void tkvi_prefill_exact_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                           uintptr_t ahead, const float *p, int lanes, int n,
                                                           float *out) {
    TKVI_ALIGNED float x[16 * TKVI_BLOCK];
    const int row_bytes = s->pad * s->format->bits / 8;
    int t, c, j;
    for (c = 0; c < s->pad; c += 16) {
        for (t = 0; t < n; t++) {
            _mm512_storeu_ps(x + 16 * t, tkvi_load_values_avx512(s->format->stored, src + t * row_bytes, c));
            tkvi_prefetch(src + t * row_bytes + c * s->format->bits / 8, ahead);
        }
        for (j = 0; j < 16; j += 8, out += 8 * lanes) {
            if (lanes > 16) tkvi_prefill_value2_avx512(p, x + j, n, out);
            else tkvi_prefill_value1_avx512(p, x + j, n, out);
        }
    }
}

/* >>tiles */
/* Packs integers 0 .. 255 of four vectors: lane l of the result has the bytes x[0][l], x[1][l], x[2][l], x[3][l]. */
TKVI_FLAT_AVX512 __m512i tkvi_prefill_pack_bytes_avx512(const __m512i *x) {
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)); /* transposes 4 x 4 bytes */
    return _mm512_shuffle_epi8(
        _mm512_packus_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3])), order);
}

/* top / most, or 0 where most is at most 1e-34: such weights contribute nothing. */
TKVI_FLAT_AVX512 __m512 tkvi_prefill_inverse_avx512(__m512 most, float top) {
    return _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, _mm512_set1_ps(1e-34f), _CMP_GT_OQ),
                               _mm512_set1_ps(top), most);
}

/* Bit l is set if row l needs two limbs (TKVI_NEEDS_TWO). */
TKVI_FLAT_AVX512 int tkvi_prefill_needs_two_avx512(float coarse, __m512 most, __m512 squares, int top) {
    return _mm512_cmp_ps_mask(_mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(coarse), most), most),
                              _mm512_mul_ps(_mm512_set1_ps(TKVI_ERR_LIMIT(top)), squares), _CMP_GT_OQ);
}

static const float tkvi_prefill_zeros[TKVI_PREFILL] = {0.0f};

/* Folded and rounded weights of all rows. Index 0 is the high or only limb, 1 the low limb. An answer is
 * by[0] * sum[0] + by[1] * sum[1] + rest, where sum[i] is the sum of the products of limb i. */
typedef struct tkvi_prefill_fold {
    TKVI_ALIGNED uint8_t w[2][TKVI_PREFILL_FLOATS]; /* [tile or quad][lanes][4] */
    TKVI_ALIGNED float by[2][TKVI_PREFILL], rest[TKVI_PREFILL];
    int n_second; /* K: number of leading tiles that have a low limb. V: all quads of tokens, or 0. */
} tkvi_prefill_fold;

TKVI_FLAT_AVX512 void tkvi_prefill_store_steps_avx512(__m512 step, tkvi_prefill_fold *f, int v) {
    _mm512_store_ps(f->by[0] + 16 * v, step);
    _mm512_store_ps(f->by[1] + 16 * v, _mm512_mul_ps(step, _mm512_set1_ps(1.0f / 128.0f)));
}

/* Answers for n tokens (K) or channels (V), from both limbs. */
static void tkvi_prefill_dot_k_avx512(const tkvi_prefill_fold *f, int lanes, int tiles, const int32_t *x,
                                      int n, float *out) {
    for (; n > 0; n -= 8, x += 8, out += 8 * lanes) {
        if (lanes > 16) tkvi_prefill_scores2_avx512(f->w[0], x, tiles, f->by[0], f->rest, out);
        else tkvi_prefill_scores1_avx512(f->w[0], x, tiles, f->by[0], f->rest, out);
        if (!f->n_second) continue;
        if (lanes > 16)
            tkvi_prefill_add_scores2_avx512(f->w[1], x, f->n_second, f->by[1], tkvi_prefill_zeros, out);
        else tkvi_prefill_add_scores1_avx512(f->w[1], x, f->n_second, f->by[1], tkvi_prefill_zeros, out);
    }
}

static void tkvi_prefill_dot_v_avx512(const tkvi_prefill_fold *f, int lanes, int quads, const int32_t *x,
                                      int n, float *out) {
    for (; n > 0; n -= 8, x += 8, out += 8 * lanes) {
        if (lanes > 16) tkvi_prefill_add_values2_avx512(f->w[0], x, quads, f->by[0], f->rest, out);
        else tkvi_prefill_add_values1_avx512(f->w[0], x, quads, f->by[0], f->rest, out);
        if (!f->n_second) continue;
        if (lanes > 16) tkvi_prefill_add_values2_avx512(f->w[1], x, quads, f->by[1], tkvi_prefill_zeros, out);
        else tkvi_prefill_add_values1_avx512(f->w[1], x, quads, f->by[1], tkvi_prefill_zeros, out);
    }
}

/* Subtracts the part that the centre of the codes adds to the answers: half * by * sum of each limb.
 *   K: sum is the sum of w centre2, and half is 0.5
 *   V: sum is the sum of w, and half is 0.5 * middle */
TKVI_FLAT_AVX512 __m512 tkvi_prefill_subtract_middle_avx512(__m512 rest, const tkvi_prefill_fold *f, int v,
                                                            const __m512i *sum, float half) {
    int limb;
    for (limb = 0; limb < 2; limb++)
        rest = _mm512_fnmadd_ps(_mm512_mul_ps(_mm512_load_ps(f->by[limb] + 16 * v), _mm512_set1_ps(half)),
                                _mm512_cvtepi32_ps(sum[limb]), rest);
    return rest;
}

/* One group of tokens of a block. */
typedef struct tkvi_prefill_k_args {
    const tkvi_side *s;
    tkvi_prefill_queries *q;
    const float *scale, *rest; /* by position; rest: see tkvi_prefill_fold_zeros_avx512 */
    const uint8_t *centre2;    /* by position, twice the centre of the codes */
    int coded, wide, n_limbs;  /* coded: number of positions with codes; wide, n_limbs: see tkvi_fold_args */
    float coarse;              /* see tkvi_coarse_k */
} tkvi_prefill_k_args;

/* Weights of K are computed in 16-bit integers: a vector has twice as many of them as floats. A weight is
 * q->folded (the query times the scale of the cached block) times the ratio of this block's scale to that scale.
 * A ratio of 1 is the integer 16384.
 * Layout of q->folded: two vectors for each tile of four channels and 16 rows. Quarter l of the first vector has
 * rows 4 l and 4 l + 1, four channels each. Quarter l of the second has rows 4 l + 2 and 4 l + 3. Packing both to
 * bytes gives all rows in order. */
enum { TKVI_PREFILL_ONE = 16384, TKVI_PREFILL_MIN_RATIO = TKVI_PREFILL_ONE / 16 };

/* by: out, the ratios of this block's scales to the cached ones. Returns 0 if a ratio is outside 1/16 .. 2, or if
 * the number of coded positions differs. */
TKVI_FLAT_AVX512 int tkvi_prefill_scale_ratios_avx512(const tkvi_prefill_k_args *a, int16_t *by) {
    const tkvi_prefill_queries *q = a->q;
    int c;
    if (q->coded != a->coded) return 0;
    for (c = 0; c < a->coded; c += 16) {
        const __m512 scale = _mm512_loadu_ps(a->scale + c), inverse = _mm512_load_ps(q->inverse + c);
        const __m512i x = tkvi_nearest_avx512(_mm512_mul_ps(scale, inverse));
        const __mmask16 none = _mm512_cmp_ps_mask(scale, _mm512_setzero_ps(), _CMP_EQ_OQ);
        const __mmask16 zero = _mm512_cmp_ps_mask(inverse, _mm512_setzero_ps(), _CMP_EQ_OQ);
        const __mmask16 inside = _mm512_cmpge_epi32_mask(x, _mm512_set1_epi32(TKVI_PREFILL_MIN_RATIO)) &
                                 _mm512_cmple_epi32_mask(x, _mm512_set1_epi32(2 * TKVI_PREFILL_ONE - 1));
        const __mmask16 there = (__mmask16)(a->coded - c >= 16 ? 0xffff : (1 << (a->coded - c)) - 1);
        if (there & ~((none & zero) | (inside & ~none))) return 0;
        _mm256_storeu_si256((__m256i *)(void *)(by + c), _mm512_cvtsepi32_epi16(x));
    }
    return 1;
}

/* Folds the queries of row vector v with the scales of this block, and caches them in q->folded. */
static TKVI_TARGET_AVX512 void tkvi_prefill_cache_queries_avx512(const tkvi_prefill_k_args *a, int v) {
    const int lanes = a->q->lanes;
    const uint8_t *order = a->s->order;
    __m512 most = _mm512_setzero_ps(), times;
    int c, j;
    for (c = 0; c < a->coded; c++) {
        const __m512 x = _mm512_loadu_ps(a->q->q + (order ? order[c] : c) * lanes + 16 * v);
        most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_mul_ps(x, _mm512_set1_ps(a->scale[c]))));
    }
    times = tkvi_prefill_inverse_avx512(most, 32767.0f);
    _mm512_store_ps(a->q->unit + 16 * v, _mm512_mul_ps(most, _mm512_set1_ps(2.0f / 32767.0f)));
    for (c = 0; c < a->coded; c += 4) {
        int16_t *to = a->q->folded + c * lanes + 64 * v;
        __m512i x[4], y[2];
        TKVI_UNROLL
        for (j = 0; j < 4; j++) {
            const float *from = a->q->q + (order ? order[c + j] : c + j) * lanes + 16 * v;
            x[j] = tkvi_nearest_avx512(
                _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(a->scale[c + j])), times));
        }
        x[0] = _mm512_packs_epi32(x[0], x[1]);
        x[2] = _mm512_packs_epi32(x[2], x[3]);
        y[0] = _mm512_unpacklo_epi16(x[0], x[2]);
        y[1] = _mm512_unpackhi_epi16(x[0], x[2]);
        _mm512_store_si512((void *)to, _mm512_unpacklo_epi16(y[0], y[1]));
        _mm512_store_si512((void *)(to + 32), _mm512_unpackhi_epi16(y[0], y[1]));
    }
}

/* The weights of 16 rows for one tile, in 16 bits, in the layout of q->folded. */
TKVI_FLAT_AVX512 void tkvi_prefill_rescale_tile_avx512(const int16_t *folded, const int16_t *by, __m512i *y) {
    int64_t four;
    memcpy(&four, by, 8);
    y[0] = _mm512_mulhrs_epi16(_mm512_load_si512((const void *)folded), _mm512_set1_epi64(four));
    y[1] = _mm512_mulhrs_epi16(_mm512_load_si512((const void *)(folded + 32)), _mm512_set1_epi64(four));
}

TKVI_FLAT_AVX512 __m512i tkvi_prefill_load4_avx512(const uint8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

/* Rounds the weights of row vector v. The first `two` positions get two limbs. Returns nonzero if a row needs two
 * limbs everywhere and does not have them. */
static TKVI_TARGET_AVX512 int tkvi_prefill_round_k_avx512(const tkvi_prefill_k_args *a, const int16_t *by,
                                                          int v, int two, tkvi_prefill_fold *f) {
    const int lanes = a->q->lanes;
    const int16_t *folded = a->q->folded + 64 * v;
    const __m512i low = _mm512_set1_epi16(127);
    __m512i most[2], times[2], shift[2], y[2], sum[2], m, squares = _mm512_setzero_si512(), k, b, centre;
    __mmask16 some;
    int c, j;
    most[0] = most[1] = sum[0] = sum[1] = _mm512_setzero_si512();
    for (c = 0; c < a->coded; c += 4) {
        tkvi_prefill_rescale_tile_avx512(folded + lanes * c, by + c, y);
        TKVI_UNROLL
        for (j = 0; j < 2; j++) most[j] = _mm512_max_epu16(most[j], _mm512_abs_epi16(y[j]));
    }
    TKVI_UNROLL
    for (j = 0; j < 2; j++) { /* the largest of the four channels of each row */
        most[j] = _mm512_max_epu16(most[j], _mm512_ror_epi64(most[j], 32));
        most[j] = _mm512_max_epu16(most[j], _mm512_ror_epi64(most[j], 16));
        most[j] = _mm512_and_si512(most[j], _mm512_set1_epi64(0xffff));
    }
    /* m: the largest weights, rows in order. k: shift, so that m << k is 16384 .. 32767.
     * b = 127 * 32768 / (m << k), which is 127 .. 254. Hence w * (b << k) / 32768 is a limb of -127 .. 127. */
    m = _mm512_shuffle_epi32(_mm512_or_si512(most[0], _mm512_slli_epi64(most[1], 32)), _MM_PERM_DBCA);
    m = _mm512_max_epi32(m, _mm512_set1_epi32(128));
    /* the exponent of m, from its bits: gcc 12 warns about _mm512_getexp_ps at -O0 */
    k = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(m)), 23);
    k = _mm512_sub_epi32(_mm512_set1_epi32(127 + 14), k);
    b = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_set1_ps((float)TKVI_LIMB_MAX_K * 32768.0f),
                                          _mm512_cvtepi32_ps(_mm512_sllv_epi32(m, k))));
    tkvi_prefill_store_steps_avx512(
        _mm512_div_ps(_mm512_mul_ps(_mm512_load_ps(a->q->unit + 16 * v), _mm512_set1_ps(32768.0f)),
                      _mm512_cvtepi32_ps(_mm512_sllv_epi32(b, k))),
        f, v);
    b = _mm512_shuffle_epi32(b, _MM_PERM_DBCA);
    k = _mm512_shuffle_epi32(k, _MM_PERM_DBCA);
    TKVI_UNROLL
    for (j = 0; j < 2; j++) { /* copies b and k to all four channels of their row */
        const __m512i all =
            _mm512_broadcast_i32x4(j ? _mm_setr_epi8(4, 5, 4, 5, 4, 5, 4, 5, 12, 13, 12, 13, 12, 13, 12, 13)
                                     : _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9));
        times[j] = _mm512_shuffle_epi8(b, all);
        shift[j] = _mm512_shuffle_epi8(k, all);
    }
    for (c = 0; c < two; c += 4) { /* weight = 128 * hi + lo */
        __m512i lo[2];
        tkvi_prefill_rescale_tile_avx512(folded + lanes * c, by + c, y);
        TKVI_UNROLL
        for (j = 0; j < 2; j++) {
            y[j] = _mm512_mulhrs_epi16(_mm512_sllv_epi16(y[j], shift[j]), _mm512_slli_epi16(times[j], 7));
            lo[j] = _mm512_and_si512(y[j], low);
            y[j] = _mm512_srai_epi16(y[j], 7);
        }
        y[0] = _mm512_packs_epi16(y[0], y[1]);
        lo[0] = _mm512_packs_epi16(lo[0], lo[1]);
        centre = tkvi_prefill_load4_avx512(a->centre2 + c);
        squares = _mm512_dpbusd_epi32(squares, _mm512_abs_epi8(y[0]), _mm512_abs_epi8(y[0]));
        sum[0] = _mm512_dpbusd_epi32(sum[0], centre, y[0]);
        sum[1] = _mm512_dpbusd_epi32(sum[1], centre, lo[0]);
        _mm512_store_si512((void *)(f->w[0] + lanes * c + 64 * v), y[0]);
        _mm512_store_si512((void *)(f->w[1] + lanes * c + 64 * v), lo[0]);
    }
    TKVI_UNROLL
    for (j = 0; j < 2; j++) times[j] = _mm512_sllv_epi16(times[j], shift[j]);
    for (; c < a->coded; c += 4) {
        tkvi_prefill_rescale_tile_avx512(folded + lanes * c, by + c, y);
        y[0] = _mm512_packs_epi16(_mm512_mulhrs_epi16(y[0], times[0]), _mm512_mulhrs_epi16(y[1], times[1]));
        centre = tkvi_prefill_load4_avx512(a->centre2 + c);
        squares = _mm512_dpbusd_epi32(squares, _mm512_abs_epi8(y[0]), _mm512_abs_epi8(y[0]));
        sum[0] = _mm512_dpbusd_epi32(sum[0], centre, y[0]);
        _mm512_store_si512((void *)(f->w[0] + lanes * c + 64 * v), y[0]);
    }
    _mm512_store_ps(f->rest + 16 * v,
                    tkvi_prefill_subtract_middle_avx512(_mm512_setzero_ps(), f, v, sum, 0.5f));
    /* the largest rounded weight of a row is 127, unless all its weights are 0 */
    some = _mm512_test_epi32_mask(squares, squares);
    return two < a->coded && tkvi_prefill_needs_two_avx512(
                                 a->coarse, _mm512_maskz_mov_ps(some, _mm512_set1_ps((float)TKVI_LIMB_MAX_K)),
                                 _mm512_cvtepi32_ps(squares), TKVI_LIMB_MAX_K);
}

/* Adds the part of the answers that does not depend on codes, sum of q rest, for row vector v. */
static TKVI_TARGET_AVX512 void tkvi_prefill_add_rest_avx512(const tkvi_prefill_k_args *a, int v,
                                                            tkvi_prefill_fold *f) {
    const int lanes = a->q->lanes;
    const uint8_t *order = a->s->order;
    __m512 rest[4];
    int c, j;
    TKVI_UNROLL
    for (j = 0; j < 4; j++) rest[j] = _mm512_setzero_ps();
    for (c = 0; c < a->s->pad; c += 4) {
        TKVI_UNROLL
        for (j = 0; j < 4; j++) {
            const float *q = a->q->q + (order ? order[c + j] : c + j) * lanes + 16 * v;
            rest[j] = _mm512_fmadd_ps(_mm512_loadu_ps(q), _mm512_set1_ps(a->rest[c + j]), rest[j]);
        }
    }
    rest[0] = _mm512_add_ps(_mm512_add_ps(rest[0], rest[1]), _mm512_add_ps(rest[2], rest[3]));
    _mm512_store_ps(f->rest + 16 * v, _mm512_add_ps(_mm512_load_ps(f->rest + 16 * v), rest[0]));
}

static TKVI_TARGET_AVX512 void tkvi_prefill_fold_k_avx512(const tkvi_prefill_k_args *a,
                                                          tkvi_prefill_fold *f) {
    TKVI_ALIGNED int16_t by[TKV_MAX_HEAD_DIM];
    const int nv = a->q->lanes / 16;
    int c, v, two = a->n_limbs == 2 ? a->coded : a->wide, two_mask = 0;
    if (!tkvi_prefill_scale_ratios_avx512(a, by)) {
        a->q->coded = a->coded;
        for (v = 0; v < nv; v++) tkvi_prefill_cache_queries_avx512(a, v);
        for (c = 0; c < a->coded; c++) {
            const int some = fabsf(a->scale[c]) > 1e-34f;
            a->q->inverse[c] = some ? (float)TKVI_PREFILL_ONE / a->scale[c] : 0.0f;
            by[c] = some ? TKVI_PREFILL_ONE : 0;
        }
    }
    for (v = 0; v < nv; v++) two_mask |= tkvi_prefill_round_k_avx512(a, by, v, two, f);
    if (two_mask) two = a->coded;
    for (v = 0; v < nv; v++) {
        if (two_mask) (void)tkvi_prefill_round_k_avx512(a, by, v, two, f);
        tkvi_prefill_add_rest_avx512(a, v, f);
    }
    f->n_second = two / 4;
}

/* Codes of the four planes of a tile. */
TKVI_FLAT_AVX512 void tkvi_load_planes_avx512(const int width, const uint8_t *tile, __m512i *y) {
    __m512i x[4];
    int p;
    tkvi_load_tile_avx512(width, 0, 4, tile, 0, x);
    TKVI_UNROLL
    for (p = 0; p < 4; p++) y[p] = tkvi_plane_avx512(width, 0, p, x);
}

#define TKVI_RUN_(width)                                                                                     \
    for (i = 0; i < s->tiles.n[width]; i++, x += TKVI_TILE_CODES) {                                          \
        tkvi_load_planes_avx512(width, tile, y);                                                             \
        tkvi_prefetch_bytes(tile, TKVI_TILE_BYTES(width), ahead);                                            \
        tile += TKVI_TILE_BYTES(width);                                                                      \
        TKVI_UNROLL                                                                                          \
        for (p = 0; p < 4; p++) { _mm512_store_si512((void *)(x + 64 * p), y[p]); }                          \
    }
/* Unpacks all tiles to bytes: [tile][64 tokens][4]. */
static TKVI_TARGET_AVX512 void tkvi_prefill_unpack_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                            uintptr_t ahead, uint8_t *x) {
    const uint8_t *tile = src;
    __m512i y[4];
    int i, p;
    TKVI_RUN_(8)
    TKVI_RUN_(6)
    TKVI_RUN_(5)
    TKVI_RUN_(4)
    TKVI_RUN_(3)
    TKVI_RUN_(2)
    TKVI_RUN_(1)
    tkvi_prefetch_bytes(src + s->code_bytes, (int)s->meta_bytes, ahead);
}
#undef TKVI_RUN_

/* Replaces zero by zero - ref + centre * scale. */
static TKVI_TARGET_AVX512 void tkvi_prefill_fold_zeros_avx512(const tkvi_side *s, const uint8_t *centre2,
                                                              const float *ref, const float *scale,
                                                              float *zero) {
    const __m512 half = _mm512_set1_ps(0.5f);
    int c, g;
    for (c = 0; c < s->pad; c += 16) {
        const __m512 middle = _mm512_mul_ps(half, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(
                                                      (const __m128i *)(const void *)(centre2 + c)))));
        for (g = 0; g < s->groups; g++) {
            float *z = zero + g * s->pad + c;
            _mm512_storeu_ps(z, _mm512_fmadd_ps(_mm512_loadu_ps(scale + g * s->pad + c), middle,
                                                _mm512_sub_ps(_mm512_loadu_ps(z), _mm512_loadu_ps(ref + c))));
        }
    }
}

static TKVI_TARGET_AVX512 void tkvi_prefill_tiles_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                           uintptr_t ahead, tkvi_prefill_queries *q,
                                                           int n_limbs, float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], rest[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t x[TKVI_BLOCK * TKV_MAX_HEAD_DIM / 4];
    TKVI_ALIGNED uint8_t centre2[TKV_MAX_HEAD_DIM];
    const int tokens = TKVI_BLOCK / s->groups;
    tkvi_prefill_fold fold;
    tkvi_prefill_k_args a;
    int width, g, c;
    s->format->side[TKV_K].meta(s, src, &tkvi_simd_ops_avx512, scale, rest);
    tkvi_prefill_unpack_k_avx512(s, src, ahead, (uint8_t *)x);
    for (width = TKVI_MAX_WIDTH, c = 0; width > 0; c += 4 * s->tiles.n[width--])
        memset(centre2 + c, (1 << width) - 1, (size_t)(4 * s->tiles.n[width]));
    memset(centre2 + c, 0, (size_t)(s->pad - c));
    a.coded = c;
    if (q->coded == 0 || q->order != s->order) { /* most blocks of a head have the same order */
        q->order = s->order;
        q->coded = 0;
        for (c = 0; c < s->pad; c++) q->sorted[c] = q->ref[s->order ? s->order[c] : c];
    }
    tkvi_prefill_fold_zeros_avx512(s, centre2, q->sorted, scale, rest);
    a.s = s;
    a.q = q;
    a.centre2 = centre2;
    a.wide = tkvi_n_wide_positions(s);
    a.n_limbs = n_limbs;
    a.coarse = tkvi_coarse_k(s);
    for (g = 0; g < s->groups; g++) {
        a.scale = scale + g * s->pad;
        a.rest = rest + g * s->pad;
        tkvi_prefill_fold_k_avx512(&a, &fold);
        tkvi_prefill_dot_k_avx512(&fold, q->lanes, a.coded / 4, x + g * tokens, tokens,
                                  scores + g * tokens * q->lanes);
    }
}

/* Channels of V that have one width and one group. */
typedef struct tkvi_prefill_v_args {
    const float *p, *scale, *zero;
    float centre; /* tkvi_centre of the codes */
    float middle; /* twice the centre of the signed bytes that are multiplied */
    float coarse; /* see tkvi_coarse_v */
    int n_limbs;  /* see tkvi_n_limbs */
} tkvi_prefill_v_args;

TKVI_FLAT_AVX512 void tkvi_prefill_fold_v_avx512(const tkvi_prefill_v_args *a, const int nv,
                                                 tkvi_prefill_fold *f) {
    const int lanes = 16 * nv;
    TKVI_ALIGNED float rest[TKVI_BLOCK];
    const __m512i ones = tkvi_splat_bytes_avx512(1);
    __m512 most[2], sum[2], squares[2], by[2];
    __m512i all[2][2];
    int t, v, j, two_mask = a->n_limbs == 2, some = 0;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        const __m512 y = _mm512_loadu_ps(a->scale + t);
        const __m512 z = _mm512_fmadd_ps(y, _mm512_set1_ps(a->centre), _mm512_loadu_ps(a->zero + t));
        some |= _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        _mm512_store_ps(rest + t, z);
    }
    TKVI_UNROLL
    for (v = 0; v < nv; v++) most[v] = sum[v] = squares[v] = _mm512_setzero_ps();
    for (t = 0; t < TKVI_BLOCK; t++) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++) {
            const __m512 y =
                _mm512_mul_ps(_mm512_loadu_ps(a->p + t * lanes + 16 * v), _mm512_set1_ps(a->scale[t]));
            most[v] = _mm512_max_ps(most[v], y);
        }
    }
    for (t = 0; t < TKVI_BLOCK && a->coarse > TKVI_ERR_LIMIT(TKVI_LIMB_MAX_V);
         t++) { /* else no row needs two */
        TKVI_UNROLL
        for (v = 0; v < nv; v++) {
            const __m512 y =
                _mm512_mul_ps(_mm512_loadu_ps(a->p + t * lanes + 16 * v), _mm512_set1_ps(a->scale[t]));
            squares[v] = _mm512_fmadd_ps(y, y, squares[v]);
        }
    }
    for (t = 0; t < TKVI_BLOCK && some; t++) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++)
            sum[v] =
                _mm512_fmadd_ps(_mm512_loadu_ps(a->p + t * lanes + 16 * v), _mm512_set1_ps(rest[t]), sum[v]);
    }
    if (a->coarse > TKVI_ERR_LIMIT(TKVI_LIMB_MAX_V)) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++)
            two_mask |= tkvi_prefill_needs_two_avx512(a->coarse, most[v], squares[v], TKVI_LIMB_MAX_V);
    }
    f->n_second = two_mask ? TKVI_BLOCK / 4 : 0;
    TKVI_UNROLL
    for (v = 0; v < nv; v++) {
        const float top = two_mask ? (float)TKVI_TWO_LIMBS_MAX : (float)TKVI_LIMB_MAX_V,
                    first = two_mask ? (float)TKVI_LIMB_MAX_K : (float)TKVI_LIMB_MAX_V;
        by[v] = tkvi_prefill_inverse_avx512(most[v], top);
        tkvi_prefill_store_steps_avx512(_mm512_mul_ps(most[v], _mm512_set1_ps(1.0f / first)), f, v);
        all[v][0] = all[v][1] = _mm512_setzero_si512();
    }
    for (t = 0; t < TKVI_BLOCK; t += 4) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++) {
            __m512i x[4];
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(a->p + (t + j) * lanes + 16 * v),
                                               _mm512_set1_ps(a->scale[t + j]));
                x[j] = tkvi_nearest_avx512(_mm512_mul_ps(y, by[v]));
            }
            if (two_mask) { /* weight = 128 * hi + lo */
                __m512i lo[4];
                TKVI_UNROLL
                for (j = 0; j < 4; j++) {
                    lo[j] = _mm512_and_si512(x[j], _mm512_set1_epi32(127));
                    x[j] = _mm512_srli_epi32(x[j], 7);
                }
                lo[0] = tkvi_prefill_pack_bytes_avx512(lo);
                all[v][1] = _mm512_dpbusd_epi32(all[v][1], lo[0], ones);
                _mm512_store_si512((void *)(f->w[1] + t * lanes + 64 * v), lo[0]);
            }
            x[0] = tkvi_prefill_pack_bytes_avx512(x);
            all[v][0] = _mm512_dpbusd_epi32(all[v][0], x[0], ones);
            _mm512_store_si512((void *)(f->w[0] + t * lanes + 64 * v), x[0]);
        }
    }
    TKVI_UNROLL
    for (v = 0; v < nv; v++)
        _mm512_store_ps(f->rest + 16 * v,
                        tkvi_prefill_subtract_middle_avx512(sum[v], f, v, all[v], 0.5f * a->middle));
}

/* Unpacks a slab of 16 channels, or of 32 if lanes are pairs, to signed bytes:
 * [16 channels][quad of tokens][channel][4 tokens]. */
TKVI_FLAT_AVX512 void tkvi_prefill_unpack_slab_avx512(const tkvi_side *s, const int width,
                                                      const uint8_t *tile, int8_t *x) {
    const int pairs = s->pairs && width == 3, levels = s->levels && width <= 4;
    __m512i y[4], table = _mm512_setzero_si512(), upper = table;
    int i, p;
    if (levels) table = tkvi_load_table_avx512(s->levels + tkvi_level_table(s, width, 0));
    if (pairs) upper = tkvi_load_table_avx512(s->levels + tkvi_level_table(s, width, 1));
    for (i = 0; i < 4; i++, x += TKVI_TILE_CODES) {
        tkvi_load_planes_avx512(width, tile, y);
        tile += TKVI_TILE_BYTES(width);
        TKVI_UNROLL
        for (p = 0; p < 4; p++) {
            int8_t *to = x + 64 * p;
            if (pairs)
                _mm512_store_si512((void *)(to + 4 * TKVI_TILE_CODES), _mm512_shuffle_epi8(upper, y[p]));
            if (levels) y[p] = _mm512_shuffle_epi8(table, y[p]);
            else if (width == 8) y[p] = _mm512_xor_si512(y[p], tkvi_splat_bytes_avx512(128));
            _mm512_store_si512((void *)to, y[p]);
        }
    }
}

#define TKVI_RUN_(bits)                                                                                      \
    case bits: tkvi_prefill_unpack_slab_avx512(s, bits, tile, x); break;
static TKVI_TARGET_AVX512 void tkvi_prefill_unpack_v_avx512(const tkvi_side *s, int width,
                                                            const uint8_t *tile, int8_t *x) {
    switch (width) {
        TKVI_RUN_(1)
        TKVI_RUN_(2)
        TKVI_RUN_(3)
        TKVI_RUN_(4)
        TKVI_RUN_(5)
        TKVI_RUN_(6)
        TKVI_RUN_(8)
    default: break;
    }
}
#undef TKVI_RUN_

static TKVI_TARGET_AVX512 void tkvi_prefill_tiles_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                           uintptr_t ahead, const float *p, int lanes, int n,
                                                           int n_limbs, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED int32_t x[2 * TKVI_TILE_CODES];
    const uint8_t *tile = src;
    tkvi_prefill_fold fold;
    tkvi_prefill_v_args a;
    int width, i, c, slab = 0;
    s->format->side[TKV_V].meta(s, src, &tkvi_simd_ops_avx512, scale, zero);
    a.p = p;
    a.n_limbs = n_limbs;
    tkvi_prefetch_bytes(src + s->code_bytes, (int)s->meta_bytes, ahead);
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int slabs = tkvi_slab_channels(s, width) / 16;
        for (i = 0; i < s->tiles.n[width]; i += 4, slab += slabs) {
            if (i == 0 || slab * 16 % s->group == 0) { /* another width or another group */
                a.scale = scale + slab * 16 / s->group * TKVI_BLOCK;
                a.zero = zero + slab * 16 / s->group * TKVI_BLOCK;
                a.centre = tkvi_centre(s, width);
                a.middle = s->levels ? 0.0f : (float)((1 << width) - 1 - (width == 8 ? 256 : 0));
                a.coarse = tkvi_coarse_v(s, width);
                if (lanes > 16) tkvi_prefill_fold_v_avx512(&a, 2, &fold);
                else tkvi_prefill_fold_v_avx512(&a, 1, &fold);
            }
            tkvi_prefill_unpack_v_avx512(s, width, tile, (int8_t *)x);
            tkvi_prefetch_bytes(tile, 4 * TKVI_TILE_BYTES(width), ahead);
            tile += 4 * TKVI_TILE_BYTES(width);
            for (c = 0; c < slabs; c++, out += 16 * lanes)
                tkvi_prefill_dot_v_avx512(&fold, lanes, (n + 15) / 16 * 4, x + c * TKVI_TILE_CODES, 16, out);
        }
    }
}

/* >>softmax, rotation, layout */
#define TKVI_LOG2E 1.44269502f
/* exp(s - m / log2 e): the caller has multiplied m by log2 e. The result is 0 where s - m / log2 e is below -86.6.
 * It has two multiplications fewer than tkvi_exp_avx512. */
TKVI_FLAT_AVX512 __m512 tkvi_prefill_exp_avx512(__m512 s, __m512 m) {
    const __m512 x = _mm512_fmsub_ps(s, _mm512_set1_ps(TKVI_LOG2E), m);
    const __m512 n = _mm512_cvtepi32_ps(_mm512_cvtps_epi32(x)); /* rounds like vrndscaleps */
    const __m512 r = _mm512_sub_ps(x, n);
    const __m512 y = TKVI_EXP2_FRACTION(_mm512_set1_ps, _mm512_fmadd_ps, r);
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_GE_OQ), y, n);
}

static TKVI_TARGET_AVX512 int tkvi_prefill_softmax_step_avx512(const tkvi_softmax_args *w) {
    const __m512 hidden = _mm512_set1_ps(TKVI_HIDDEN);
    int v, t, k, shrinks = 0;
    for (v = 0; v < w->lanes; v += 16) {
        float *s = w->s + v;
        __m512 tops[4], most, m = _mm512_loadu_ps(w->m + v), by = _mm512_set1_ps(1.0f), sum, top, squares;
        __mmask16 grows, before;
        TKVI_UNROLL
        for (t = 0; t < 4; t++) tops[t] = hidden;
        if (w->low) {
            const __m512i low = _mm512_loadu_si512((const void *)(w->low + v));
            const __m512i high = _mm512_loadu_si512((const void *)(w->high + v));
            for (t = 0; t < TKVI_BLOCK; t++) {
                const __m512i at = _mm512_set1_epi32(t);
                const __mmask16 sees =
                    _mm512_mask_cmp_epi32_mask(_mm512_cmpge_epi32_mask(at, low), at, high, _MM_CMPINT_LT);
                const __m512 x = _mm512_mask_mov_ps(hidden, sees, _mm512_loadu_ps(s + t * w->lanes));
                _mm512_storeu_ps(s + t * w->lanes, x);
                tops[0] = _mm512_max_ps(tops[0], x);
            }
        } else {
            for (t = 0; t < TKVI_BLOCK; t += 4) {
                TKVI_UNROLL
                for (k = 0; k < 4; k++)
                    tops[k] = _mm512_max_ps(tops[k], _mm512_loadu_ps(s + (t + k) * w->lanes));
            }
        }
        most = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
        grows = _mm512_cmp_ps_mask(most, _mm512_add_ps(m, _mm512_set1_ps(TKVI_MAX_SLACK)), _CMP_GT_OQ);
        before = _mm512_mask_cmp_ps_mask(grows, m, hidden, _CMP_GT_OQ);
        if (before) by = _mm512_mask_mov_ps(by, before, tkvi_exp_avx512(_mm512_sub_ps(m, most)));
        _mm512_storeu_ps(w->shrink + v, by);
        shrinks |= before;
        m = _mm512_mask_mov_ps(m, grows, most);
        _mm512_storeu_ps(w->m + v, m);
        /* A row that has seen no key gets the maximum 0: exp(-1e30 - 0) is 0. */
        top = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(m, hidden, _CMP_GT_OQ), m, _mm512_set1_ps(TKVI_LOG2E));
        sum = squares = _mm512_setzero_ps();
        for (t = 0; t < TKVI_BLOCK; t++) {
            const __m512 y = tkvi_prefill_exp_avx512(_mm512_loadu_ps(s + t * w->lanes), top);
            _mm512_storeu_ps(s + t * w->lanes, y);
            sum = _mm512_add_ps(sum, y);
        }
        _mm512_storeu_ps(w->l + v, _mm512_fmadd_ps(_mm512_loadu_ps(w->l + v), by, sum));
        if (!w->far_attention) continue;
        for (t = 0; t < TKVI_BLOCK && w->sampled_lanes; t++) {
            const __m512 y = _mm512_loadu_ps(s + t * w->lanes);
            squares = _mm512_fmadd_ps(y, y, squares);
        }
        if (w->sampled_lanes) squares = _mm512_mul_ps(squares, _mm512_loadu_ps(w->sampled_lanes + v));
        by = _mm512_mul_ps(by, by);
        _mm512_storeu_ps(w->far_attention + v,
                         _mm512_fmadd_ps(_mm512_loadu_ps(w->far_attention + v), by, squares));
    }
    return shrinks != 0;
}

static TKVI_TARGET_AVX512 void tkvi_prefill_shrink_avx512(float *x, int n, int lanes, const float *by) {
    int i, v;
    for (i = 0; i < n; i++, x += lanes)
        for (v = 0; v < lanes; v += 16)
            _mm512_storeu_ps(x + v, _mm512_mul_ps(_mm512_loadu_ps(x + v), _mm512_loadu_ps(by + v)));
}

/* tkvi_butterflies of core/rotate.h, with rows in lanes. */
static TKVI_TARGET_AVX512 void tkvi_prefill_butterflies_avx512(float *x, int n, int lanes) {
    int h, i, j, v;
    for (h = 1; h < n; h *= 2)
        for (i = 0; i < n; i += 2 * h)
            for (j = i; j < i + h; j++)
                for (v = 0; v < lanes; v += 16) {
                    float *at = x + j * lanes + v, *to = at + h * lanes;
                    __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(to);
                    tkvi_butterfly_avx512(&a, &b);
                    _mm512_storeu_ps(at, a);
                    _mm512_storeu_ps(to, b);
                }
}

static TKVI_TARGET_AVX512 void tkvi_prefill_rotate_back_avx512(float *x, int dim, int lanes) {
    const int k = tkvi_log2_floor(dim), n = 1 << k;
    int i, v;
    if (n < dim) {
        tkvi_prefill_butterflies_avx512(x + (dim - n) * lanes, n, lanes);
        for (i = (dim - n) * lanes; i < dim * lanes; i += 16)
            _mm512_storeu_ps(x + i,
                             _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(tkvi_hadamard_norm[k])));
    }
    tkvi_prefill_butterflies_avx512(x, n, lanes);
    for (i = 0; i < dim; i++) {
        const float sign = tkvi_signs[i / 32] >> i % 32 & 1 ? -1.0f : 1.0f;
        const __m512 by = _mm512_set1_ps(i < n ? sign * tkvi_hadamard_norm[k] : sign);
        for (v = i * lanes; v < (i + 1) * lanes; v += 16)
            _mm512_storeu_ps(x + v, _mm512_mul_ps(_mm512_loadu_ps(x + v), by));
    }
}

/* 16 x 16 floats at a time. */
static TKVI_TARGET_AVX512 void tkvi_prefill_transpose_avx512(const float *x, int x_stride, int n, float *y,
                                                             int y_stride) {
    int i, r, k;
    for (i = 0; i < n; i += 16) {
        __m512 a[16], b[16];
        TKVI_UNROLL
        for (r = 0; r < 16; r++) a[r] = _mm512_loadu_ps(x + r * x_stride + i);
        TKVI_UNROLL
        for (r = 0; r < 16; r += 2) {
            b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]);
            b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
        }
        TKVI_UNROLL
        for (r = 0; r < 16; r += 4)
            for (k = 0; k < 2; k++) {
                const __m512d lo = _mm512_castps_pd(b[r + k]), hi = _mm512_castps_pd(b[r + k + 2]);
                a[r + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
                a[r + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
            }
        TKVI_UNROLL
        for (k = 0; k < 4; k++) { /* a[4 q + k] has columns k, 4 + k, 8 + k, 12 + k of rows 4 q .. 4 q + 3 */
            const __m512 s = _mm512_shuffle_f32x4(a[k], a[4 + k], 0x44),
                         t = _mm512_shuffle_f32x4(a[k], a[4 + k], 0xee);
            const __m512 u = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0x44),
                         w = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0xee);
            _mm512_storeu_ps(y + (i + k) * y_stride, _mm512_shuffle_f32x4(s, u, 0x88));
            _mm512_storeu_ps(y + (i + k + 4) * y_stride, _mm512_shuffle_f32x4(s, u, 0xdd));
            _mm512_storeu_ps(y + (i + k + 8) * y_stride, _mm512_shuffle_f32x4(t, w, 0x88));
            _mm512_storeu_ps(y + (i + k + 12) * y_stride, _mm512_shuffle_f32x4(t, w, 0xdd));
        }
    }
}

static void tkvi_prefill_k_avx512(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                  tkvi_prefill_queries *q, int n, int n_limbs, float *scores) {
    const uintptr_t ahead = tkvi_prefetch_distance(src, next);
    if (tkvi_is_exact(s->format))
        tkvi_prefill_exact_k_avx512(s, src, ahead, q->q, q->ref, q->lanes, n, scores);
    else tkvi_prefill_tiles_k_avx512(s, src, ahead, q, n_limbs, scores);
}

static void tkvi_prefill_v_avx512(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                                  int lanes, int n, int n_limbs, float *out) {
    const uintptr_t ahead = tkvi_prefetch_distance(src, next);
    if (tkvi_is_exact(s->format)) tkvi_prefill_exact_v_avx512(s, src, ahead, p, lanes, n, out);
    else tkvi_prefill_tiles_v_avx512(s, src, ahead, p, lanes, n, n_limbs, out);
}

static const tkvi_prefill tkvi_prefill_avx512 = {
    tkvi_prefill_k_avx512,      tkvi_prefill_v_avx512,           tkvi_prefill_softmax_step_avx512,
    tkvi_prefill_shrink_avx512, tkvi_prefill_rotate_back_avx512, tkvi_prefill_transpose_avx512};

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* TKVI_AVX512 */

/* The prefill kernels of an instruction set. NULL: it has none, and the caller uses its kernels for 8 rows. */
static const tkvi_prefill *tkvi_prefill_of(tkv_isa isa) {
#ifdef TKVI_AVX512
    if (isa == TKV_ISA_AVX512) return &tkvi_prefill_avx512;
#endif
    (void)isa;
    return NULL;
}

#endif /* TKVI_KERNELS_PREFILL_AVX512_H */
