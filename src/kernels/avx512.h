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

/* >>pieces */
static TKVI_TARGET_AVX512 void tkvi_f16_to_f32_avx512(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 16 <= n; i += 16)
        _mm512_storeu_ps(dst + i,
                         _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(src + 2 * i))));
    if (i < n) { /* no scalar code, which is slow while the upper halves of registers are in use */
        const __mmask16 m = (__mmask16)((1 << (n - i)) - 1);
        _mm512_mask_storeu_ps(dst + i, m, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, src + 2 * i)));
    }
}

static TKVI_TARGET_AVX512 void tkvi_decode_log_scales_avx512(const uint8_t *src, int n, int top, float *dst) {
    const __m512i table = _mm512_slli_epi32(
        _mm512_sub_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)tkvi_log_mantissa)),
            _mm512_set1_epi32(1024)),
        13);
    const __m512i low = _mm512_set1_epi32(127 + top - 16);
    int i;
    for (i = 0; i < n; i += 16) {
        const __mmask16 m = (__mmask16)(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(m, src + i));
        __m512i x = _mm512_sub_epi32(code, _mm512_set1_epi32(1));
        __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_srai_epi32(x, 4), low), 23);
        bits = _mm512_or_si512(bits, _mm512_permutexvar_epi32(x, table)); /* uses 4 bits of x */
        bits = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(code, code), bits);
        _mm512_mask_storeu_ps(dst + i, m, _mm512_castsi512_ps(bits));
    }
}

static TKVI_TARGET_AVX512 void tkvi_decode_zero_points_avx512(const uint8_t *offset, const float *scale,
                                                              const float *mean, float unit, int middle,
                                                              int n, float *dst) {
    int i;
    for (i = 0; i < n; i += 16) {
        const __mmask16 m = (__mmask16)(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        __m512i by = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m, offset + i));
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, scale + i), _mm512_set1_ps(unit));
        by = _mm512_sub_epi32(by, _mm512_set1_epi32(middle));
        x = _mm512_fmadd_ps(x, _mm512_cvtepi32_ps(by), _mm512_maskz_loadu_ps(m, mean + i));
        _mm512_mask_storeu_ps(dst + i, m, x);
    }
}

/* >>encoding: see kernels/avx2.h */
/* K columns: a 32-bit lane is a column and has two tokens. */
typedef struct tkvi_range_avx512 {
    __m512i cut, by, top; /* each value stands in both halves of its lane */
} tkvi_range_avx512;

TKVI_FLAT_AVX512 __m512i tkvi_repeat16_avx512(__m512i x) {
    return _mm512_or_si512(x, _mm512_slli_epi32(x, 16));
}

TKVI_FLAT_AVX512 tkvi_range_avx512 tkvi_range_of_avx512(int k, __m512i width) {
    const tkvi_a_range *r = &tkvi_a_ranges[k];
    tkvi_range_avx512 range;
    __m512i both = _mm512_loadu_si512((const void *)r->cut); /* cut, then by */
    range.cut = tkvi_repeat16_avx512(_mm512_permutexvar_epi32(width, both));
    range.by =
        tkvi_repeat16_avx512(_mm512_permutexvar_epi32(_mm512_add_epi32(width, _mm512_set1_epi32(8)), both));
    range.top = _mm512_sub_epi32(_mm512_sllv_epi32(_mm512_set1_epi32(1), width), _mm512_set1_epi32(1));
    range.top = tkvi_repeat16_avx512(range.top);
    return range;
}

TKVI_FLAT_AVX512 __m512i tkvi_cut_codes_avx512(__m512i u, const tkvi_range_avx512 *r) { /* as tkvi_cut_code */
    __m512i v = _mm512_mulhi_epu16(_mm512_subs_epu16(u, r->cut), r->by);
    return _mm512_min_epi16(_mm512_avg_epu16(v, _mm512_setzero_si512()), r->top);
}

TKVI_FLAT_AVX512 __m512 tkvi_covariance_avx512(int n, __m512i a, __m512i b, __m512i products) {
    return _mm512_cvtepi32_ps(
        _mm512_sub_epi32(_mm512_mullo_epi32(_mm512_set1_epi32(n), products), _mm512_mullo_epi32(a, b)));
}

/* Computes range and integers of all columns. Returns 0 if a residual is beyond +-1e30, which this code does not
 * clamp. */
TKVI_FLAT_AVX512 int tkvi_columns_to_ints_avx512(tkvi_columns *c) {
    const __m512 lowest = _mm512_set1_ps(-1e30f), highest = _mm512_set1_ps(1e30f);
    const __m512 mean = _mm512_loadu_ps(c->mean);
    const __mmask16 lanes = (__mmask16)((1 << c->lanes) - 1);
    __m512 low = highest, high = lowest, step, inverse;
    __m512i sum = _mm512_setzero_si512(), squares = sum;
    TKVI_ALIGNED float residual[TKVI_BLOCK][TKVI_LANES];
    __mmask16 some;
    int t;
    for (t = 0; t < c->n; t++) {
        __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, c->x + (size_t)t * c->stride), mean);
        _mm512_store_ps(residual[t], x);
        low = _mm512_min_ps(x, low);
        high = _mm512_max_ps(x, high);
    }
    if (_mm512_cmp_ps_mask(low, lowest, _CMP_LT_OQ) | _mm512_cmp_ps_mask(high, highest, _CMP_GT_OQ)) return 0;
    for (; t < TKVI_BLOCK; t++) _mm512_store_ps(residual[t], low); /* u = 0 */
    step = _mm512_mul_ps(_mm512_sub_ps(high, low), _mm512_set1_ps(1.0f / TKVI_STEPS));
    some = _mm512_cmp_ps_mask(step, _mm512_set1_ps(1e-36f), _CMP_GT_OQ);
    inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), step);
    _mm512_store_ps(c->low, low);
    _mm512_store_ps(c->step, _mm512_maskz_mov_ps(some, step));
    for (t = 0; t < TKVI_BLOCK / 2; t++) {
        const float *x = residual[t / 2 * 4 + t % 2]; /* in the order of tkvi_column_u */
        __m512 a = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(x), low), inverse);
        __m512 b = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(x + 2 * TKVI_LANES), low), inverse);
        __m512i u = _mm512_or_si512(_mm512_cvttps_epi32(a), _mm512_slli_epi32(_mm512_cvttps_epi32(b), 16));
        u = _mm512_min_epi16(u, _mm512_set1_epi16(TKVI_STEPS - 1));
        sum = _mm512_dpwssd_epi32(sum, u, _mm512_set1_epi16(1));
        squares = _mm512_dpwssd_epi32(squares, u, u);
        _mm512_store_si512((void *)c->u[t], u);
    }
    _mm512_store_si512((void *)c->sum_u, sum);
    _mm512_store_si512((void *)c->sum_uu, squares);
    return 1;
}

static TKVI_TARGET_AVX512 void tkvi_encode_k_columns_avx512(tkvi_columns *c) {
    const __m512i width = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)c->width));
    __m512i sum_c, sum_cc, sum_cu;
    __m512 most = _mm512_set1_ps(-1.0f);
    tkvi_range_avx512 best = tkvi_range_of_avx512(0, width);
    TKVI_ALIGNED int32_t four[TKVI_BLOCK / 4][TKVI_LANES];
    int t, k;
    if (!tkvi_columns_to_ints_avx512(c)) {
        tkvi_encode_k_columns_scalar(c);
        return;
    }
    sum_c = sum_cc = sum_cu = _mm512_setzero_si512();
    for (k = 0; k < TKVI_A_CUTS; k++) {
        const tkvi_range_avx512 range = tkvi_range_of_avx512(k, width);
        __m512i sum = _mm512_setzero_si512(), squares = sum, products = sum;
        __m512 cov, var, score;
        __mmask16 better;
        for (t = 0; t < TKVI_BLOCK / 2; t++) {
            __m512i u = _mm512_load_si512((const void *)c->u[t]), v = tkvi_cut_codes_avx512(u, &range);
            sum = _mm512_add_epi16(sum, v);
            squares = _mm512_dpwssd_epi32(squares, v, v);
            products = _mm512_dpwssd_epi32(products, v, u);
        }
        sum = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
        cov = tkvi_covariance_avx512(c->n, sum, _mm512_load_si512((const void *)c->sum_u), products);
        var = tkvi_covariance_avx512(c->n, sum, sum, squares);
        score = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(var, _mm512_setzero_ps(), _CMP_GT_OQ), cov, var);
        score = _mm512_mul_ps(score, cov);
        better = _mm512_cmp_ps_mask(score, most, _CMP_GT_OQ);
        most = _mm512_mask_mov_ps(most, better, score);
        best.cut = _mm512_mask_mov_epi32(best.cut, better, range.cut);
        best.by = _mm512_mask_mov_epi32(best.by, better, range.by);
        sum_c = _mm512_mask_mov_epi32(sum_c, better, sum);
        sum_cc = _mm512_mask_mov_epi32(sum_cc, better, squares);
        sum_cu = _mm512_mask_mov_epi32(sum_cu, better, products);
    }
    _mm512_store_si512((void *)c->sum_c, sum_c);
    _mm512_store_si512((void *)c->sum_cc, sum_cc);
    _mm512_store_si512((void *)c->sum_cu, sum_cu);
    for (t = 0; t < TKVI_BLOCK / 4; t++) {
        __m512i a = tkvi_cut_codes_avx512(_mm512_load_si512((const void *)c->u[2 * t]), &best);
        __m512i b = tkvi_cut_codes_avx512(_mm512_load_si512((const void *)c->u[2 * t + 1]), &best);
        _mm512_store_si512((void *)four[t], _mm512_or_si512(a, _mm512_slli_epi32(b, 8)));
    }
    tkvi_transpose_codes_avx2(c->code, four);
}

/* V tokens: see kernels/avx2.h. */
TKVI_FLAT_AVX512 float tkvi_rotate_token_avx512(const tkvi_side *s, int log2n, const float *x,
                                                const float *flip, float *y) {
    const int n = 1 << log2n, end = tkvi_round_up(s->dim, 32);
    __m512 most;
    int c;
    for (c = n; c < end; c += 16) {
        __mmask16 some = (__mmask16)(c + 16 <= s->dim ? 0xffff : c < s->dim ? (1 << (s->dim - c)) - 1 : 0);
        _mm512_storeu_ps(y + c, tkvi_flip_avx512(_mm512_maskz_loadu_ps(some, x + c), flip + c));
    }
    most = tkvi_window_avx512(x, flip, y, log2n);
    if (n == s->dim) return _mm512_reduce_max_ps(most);
    most = tkvi_window_avx512(y + s->dim - n, NULL, y + s->dim - n, log2n);
    for (c = 0; c < s->dim - n; c += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(y + c)));
    return _mm512_reduce_max_ps(most);
}

/* Converts a token to integers. A vector of u has channels c .. c + 15 and c + 16 .. c + 31, interleaved as
 * _mm512_packs_epi32 leaves them. Returns the sum of squares. */
TKVI_FLAT_AVX512 int32_t tkvi_token_to_ints_avx512(const float *y, float by, int end, int16_t *u) {
    const __m512 inverse = _mm512_set1_ps(by);
    const __m512i most = _mm512_set1_epi16(TKVI_R_MOST), least = _mm512_set1_epi16(-TKVI_R_MOST);
    __m512i squares = _mm512_setzero_si512();
    int c;
    for (c = 0; c < end; c += 32) {
        __m512i a = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_load_ps(y + c), inverse));
        __m512i b = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_load_ps(y + c + 16), inverse));
        a = _mm512_max_epi16(_mm512_min_epi16(_mm512_packs_epi32(a, b), most), least);
        squares = _mm512_dpwssd_epi32(squares, a, a);
        _mm512_store_si512((void *)(u + c), a);
    }
    return _mm512_reduce_add_epi32(squares);
}

TKVI_FLAT_AVX512 __m512i tkvi_floor_avx512(__m512i u, __m512 by) {
    return _mm512_cvt_roundps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(u), by),
                                    _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

/* Channels c .. c + 15 (first) and c + 16 .. c + 31 (second) of such a vector. */
TKVI_FLAT_AVX512 __m512i tkvi_first_avx512(__m512i u) {
    return _mm512_srai_epi32(_mm512_unpacklo_epi16(u, u), 16);
}

TKVI_FLAT_AVX512 __m512i tkvi_second_avx512(__m512i u) {
    return _mm512_srai_epi32(_mm512_unpackhi_epi16(u, u), 16);
}

/* Joins two vectors of 16-bit values into one vector of pairs. */
TKVI_FLAT_AVX512 __m512i tkvi_make_pairs_avx512(__m512i a, __m512i b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
}

/* Codes of a uniform grid for 16 + 16 channels, in the order of u. Adds u * level to *sum. */
TKVI_FLAT_AVX512 __m512i tkvi_encode_grid_avx512(const int16_t *u, float fine, int top, __m512i *sum) {
    const __m512i tops = _mm512_set1_epi16((short)top);
    const __m512 by = _mm512_set1_ps(fine);
    __m512i x = _mm512_load_si512((const void *)u), v;
    v = _mm512_packs_epi32(tkvi_floor_avx512(tkvi_first_avx512(x), by),
                           tkvi_floor_avx512(tkvi_second_avx512(x), by));
    v = _mm512_add_epi16(v, _mm512_set1_epi16((short)((top + 1) / 2)));
    v = _mm512_max_epi16(_mm512_min_epi16(v, tops), _mm512_setzero_si512());
    *sum = _mm512_dpwssd_epi32(*sum, x, _mm512_sub_epi16(_mm512_add_epi16(v, v), tops));
    return v;
}

/* Codes 0 .. 7 of 16 pairs. Adds half of u * level to *sum (formats/r.h, step 5). One maximum of
 * 8 * score + 7 - code finds the best score and the first code that reaches it. */
TKVI_FLAT_AVX512 __m512i tkvi_encode_pairs_avx512(const int16_t *u, float fine, __m512i *sum) {
    const __m512 by = _mm512_set1_ps(fine);
    const __m128i *point_at = (const __m128i *)(const void *)tkvi_r_pairs;
    const __m512i level = tkvi_make_pairs_avx512(_mm512_cvtepi8_epi32(_mm_loadu_si128(point_at)),
                                                 _mm512_cvtepi8_epi32(_mm_loadu_si128(point_at + 1)));
    __m512i x = _mm512_load_si512((const void *)u), a = tkvi_first_avx512(x), b = tkvi_second_avx512(x);
    __m512i best = _mm512_set1_epi32(INT32_MIN), code;
    int k;
    x = tkvi_make_pairs_avx512(tkvi_floor_avx512(a, by), tkvi_floor_avx512(b, by));
    TKVI_UNROLL
    for (k = 0; k < 8; k++) {
        const int px = tkvi_r_pairs[k], py = tkvi_r_pairs[16 + k];
        const __m512i point = _mm512_set1_epi32((8 * px & 0xffff) | (int)((uint32_t)(8 * py) << 16));
        const __m512i from = _mm512_set1_epi32(-64 * (px * px + py * py) + 7 - k);
        best = _mm512_max_epi32(best, _mm512_dpwssd_epi32(from, x, point));
    }
    code = _mm512_andnot_si512(best, _mm512_set1_epi32(7));
    *sum = _mm512_dpwssd_epi32(*sum, tkvi_make_pairs_avx512(a, b), _mm512_permutexvar_epi32(code, level));
    return code;
}

/* Codes of four tokens. sum: out, the sum of u * level of each (formats/r.h, step 6). u: [token][TKV_MAX_HEAD_DIM].
 * fine: [2][16], factors of u for the grid and for pairs. */
TKVI_FLAT_AVX512 void tkvi_encode_four_tokens_avx512(const tkvi_side *s, const int16_t *u, const float *fine,
                                                     uint8_t *code, int32_t *sum) {
    const int pairs = s->pairs ? s->pad / 32 * 32 : 0, bits = s->pairs ? 2 : s->half_bits / 2;
    const int top = (1 << bits) - 1;
    __m512i grid[4], pair[4], v[4];
    int c, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) grid[r] = pair[r] = _mm512_setzero_si512();
    for (c = 0; c < pairs; c += 32, code += 4 * TKVI_TILE_CODES) {
        TKVI_UNROLL
        for (r = 0; r < 4; r++)
            v[r] = tkvi_encode_pairs_avx512(u + r * TKV_MAX_HEAD_DIM + c, fine[TKVI_LANES + r], &pair[r]);
        v[0] = _mm512_or_si512(v[0], _mm512_slli_epi32(v[1], 8));
        v[2] = _mm512_or_si512(v[2], _mm512_slli_epi32(v[3], 8));
        _mm512_storeu_si512((void *)code, _mm512_or_si512(v[0], _mm512_slli_epi32(v[2], 16)));
    }
    for (; c < s->dim; c += 32, code += 8 * TKVI_TILE_CODES) { /* two slabs */
        TKVI_UNROLL
        for (r = 0; r < 4; r++)
            v[r] = tkvi_encode_grid_avx512(u + r * TKV_MAX_HEAD_DIM + c, fine[r], top, &grid[r]);
        v[0] = _mm512_or_si512(v[0], _mm512_slli_epi16(v[1], 8));
        v[2] = _mm512_or_si512(v[2], _mm512_slli_epi16(v[3], 8));
        _mm512_storeu_si512((void *)code, _mm512_unpacklo_epi16(v[0], v[2]));
        if (c + 16 < s->dim)
            _mm512_storeu_si512((void *)(code + 4 * TKVI_TILE_CODES), _mm512_unpackhi_epi16(v[0], v[2]));
    }
    TKVI_UNROLL
    for (r = 0; r < 4; r++) /* beside pairs, level = 2 * 40 * (2 code - 3) */
        sum[r] =
            2 * _mm512_reduce_add_epi32(pair[r]) + (s->pairs ? 80 : 1) * _mm512_reduce_add_epi32(grid[r]);
}

/* Each step runs over 16 tokens before the next step starts. So divisions and horizontal sums of several tokens
 * overlap. */
static TKVI_TARGET_AVX512 void tkvi_encode_v_tokens_avx512(const tkvi_side *s, const float *x, size_t stride,
                                                           int n, tkvi_codes code, float *scale) {
    TKVI_ALIGNED float y[TKVI_LANES][TKV_MAX_HEAD_DIM], most[TKVI_LANES], by[TKVI_LANES], fine[2][TKVI_LANES];
    TKVI_ALIGNED int16_t u[TKVI_LANES][TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t squares[TKVI_LANES], sum[TKVI_LANES];
    const __m512 grid = _mm512_set1_ps(tkvi_r_step[s->pairs ? 2 : s->half_bits / 2]);
    const int log2n = tkvi_log2_floor(s->dim);
    TKVI_ALIGNED float flip[TKV_MAX_HEAD_DIM];
    int first, t;
    if (s->dim < 16) {
        tkvi_encode_v_tokens_scalar(s, x, stride, n, code, scale);
        return;
    }
    tkvi_flips_avx2(flip, tkvi_round_up(s->dim, 32));
    for (first = 0; first < n; first += TKVI_LANES) {
        const int count = tkvi_min(TKVI_LANES, n - first), fours = tkvi_round_up(count, 4);
        const __mmask16 present = (__mmask16)((1 << count) - 1);
        __m512 m, v;
        __mmask16 some;
        for (t = 0; t < fours; t++) /* missing tokens repeat the last one; the caller clears their codes */
            most[t] = tkvi_rotate_token_avx512(
                s, log2n, x + (size_t)(first + tkvi_min(t, count - 1)) * stride, flip, y[t]);
        m = _mm512_min_ps(_mm512_maskz_loadu_ps(present, most), _mm512_set1_ps(1e30f));
        some = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
        _mm512_store_ps(by, _mm512_maskz_div_ps(some, _mm512_set1_ps((float)TKVI_R_MOST), m));
        for (t = 0; t < fours; t++)
            squares[t] = tkvi_token_to_ints_avx512(y[t], by[t], tkvi_round_up(s->dim, 32), u[t]);
        v = _mm512_cvtepi32_ps(
            _mm512_max_epi32(_mm512_maskz_loadu_epi32(present, squares), _mm512_set1_epi32(1)));
        v = _mm512_sqrt_ps(_mm512_div_ps(v, _mm512_set1_ps((float)s->dim)));
        v = _mm512_div_ps(_mm512_set1_ps(1.0f), v);
        _mm512_store_ps(fine[0], _mm512_div_ps(v, grid));
        _mm512_store_ps(fine[1], _mm512_mul_ps(v, _mm512_set1_ps(16.0f * TKVI_R_UNIT)));
        for (t = 0; t < fours; t += 4)
            tkvi_encode_four_tokens_avx512(s, u[t], fine[0] + t, code[first / 16] + 16 * t, sum + t);
        v = _mm512_cvtepi32_ps(_mm512_slli_epi32(_mm512_maskz_loadu_epi32(some, squares), 1));
        v = _mm512_div_ps(v, _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(some, sum)));
        m = _mm512_div_ps(m, _mm512_set1_ps((float)TKVI_R_MOST));
        _mm512_mask_storeu_ps(scale + first, present, _mm512_maskz_mul_ps(some, m, v));
    }
}

/* TKVI_ROUNDED_X86 for all registers. This file is for gcc and clang only. */
#define TKVI_ROUNDED_AVX512(x) __asm__("" : "+v"(x))

/* For up to 64 lanes; cosine and sine are looked up in registers. */
static TKVI_TARGET_AVX512 void tkvi_turn_rows_avx512(const tkvi_turned_rows *t) {
    const __m512 scale = _mm512_set1_ps(t->scale);
    __m512 cosine[4], sine[4];
    int i, k, r;
    if (t->lanes > 64) {
        tkvi_turn_rows_avx2(t);
        return;
    }
    for (k = 0; k < 4; k++) {
        const int at = tkvi_min(16 * k, t->lanes - 16);
        cosine[k] = _mm512_loadu_ps(t->cosine + at);
        sine[k] = _mm512_loadu_ps(t->sine + at);
    }
    for (i = 0; i < t->n; i += 16) {
        const __m512i pair =
            _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(t->pair + i)));
        const __mmask16 high = _mm512_test_epi32_mask(pair, _mm512_set1_epi32(32));
        const __m512 c = _mm512_mask_blend_ps(high, _mm512_permutex2var_ps(cosine[0], pair, cosine[1]),
                                              _mm512_permutex2var_ps(cosine[2], pair, cosine[3]));
        const __m512 s = _mm512_mask_blend_ps(high, _mm512_permutex2var_ps(sine[0], pair, sine[1]),
                                              _mm512_permutex2var_ps(sine[2], pair, sine[3]));
        for (r = 0; r <= t->n_rows; r++) {
            __m512 x = _mm512_mul_ps(_mm512_loadu_ps(t->plain + r * t->n + i), c);
            __m512 y = _mm512_mul_ps(_mm512_loadu_ps(t->partner + r * t->n + i), s);
            TKVI_ROUNDED_AVX512(x);
            TKVI_ROUNDED_AVX512(y);
            x = _mm512_add_ps(x, y);
            if (r < t->n_rows) _mm512_storeu_ps(t->out + r * t->n + i, _mm512_mul_ps(x, scale));
            else _mm512_storeu_ps(t->last + i, x);
        }
    }
}

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
                                                   TKVI_IF(TKVI_HAS_MOVES, tkvi_turn_rows_avx512)};

#include "kernels/exact.inc"
#include "kernels/softmax.inc"
#include "kernels/tiles.inc"

/* >>decoded: see kernels/decode_x86.h */
/* Levels of E5M2. Normal codes get the exponent of a float. Subnormal codes are normal numbers as floats, so they are
 * converted from integers. */
TKVI_FLAT_AVX512 __m512 tkvi_e5m2_avx512(__m512i code) {
    const __m512i size = _mm512_and_si512(code, _mm512_set1_epi32(127));
    const __m512i sign = _mm512_slli_epi32(_mm512_sub_epi32(code, size), 24);
    const __m512i large =
        _mm512_add_epi32(_mm512_slli_epi32(size, 21), _mm512_set1_epi32((126 + TKVI_E5M2_LOW + 2) << 23));
    const __m512 subnormal = _mm512_mul_ps(
        _mm512_cvtepi32_ps(size), _mm512_castsi512_ps(_mm512_set1_epi32((127 + TKVI_E5M2_LOW) << 23)));
    const __m512i x = _mm512_mask_mov_epi32(large, _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(4)),
                                            _mm512_castps_si512(subnormal));
    return _mm512_castsi512_ps(_mm512_or_si512(x, sign));
}

/* Levels of E4M3, read as fp16. E4M3 has one exponent bit less, so no code becomes infinity or NaN. */
TKVI_FLAT_AVX512 __m512 tkvi_e4m3_avx512(__m128i code) {
    __m256i x = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(code), 8), 1);
    x = _mm256_and_si256(x, _mm256_set1_epi16((int16_t)0xbfff));
    return _mm512_mul_ps(_mm512_cvtph_ps(x), _mm512_set1_ps(4.0f));
}

/* Positions of the codes of a vector: the two bytes that hold each code (pick), and its shift in them. Index 0 and 1:
 * first and second RoPE partners. Index 2: 16 neighbours. */
typedef struct tkvi_code_fields_avx512 {
    __m512i pick[3], shift[3];
    __m512 level;
} tkvi_code_fields_avx512;

TKVI_FLAT_AVX512 void tkvi_code_fields_of_avx512(const tkvi_code_rows *r, tkvi_code_fields_avx512 *a) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int k;
    for (k = 0; k < 3; k++) {
        const int step = k < 2 && r->rope ? r->rope->step : 1;
        __m512i bit = _mm512_mullo_epi32(lane, _mm512_set1_epi32(r->bits * step)), at;
        if (step == 2) bit = _mm512_add_epi32(bit, _mm512_set1_epi32(k * r->bits));
        at = _mm512_srli_epi32(bit, 3);
        a->shift[k] = _mm512_and_si512(bit, _mm512_set1_epi32(7));
        a->pick[k] = _mm512_add_epi32(at, _mm512_slli_epi32(at, 8));
        a->pick[k] = _mm512_add_epi32(a->pick[k], _mm512_set1_epi32((int32_t)0x80800100u));
    }
    a->level = _mm512_load_ps(r->level);
}

/* 16 levels. Lanes beyond the last channel have no meaning. The branches are predicted: kind is one for a side. */
TKVI_FLAT_AVX512 __m512 tkvi_load_levels_avx512(tkvi_code_kind kind, const uint8_t *p,
                                                const tkvi_code_fields_avx512 *a, const int k) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)p);
    __m512i x;
    if (kind == TKVI_CODES_INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    if (kind == TKVI_CODES_E4M3) return tkvi_e4m3_avx512(bytes);
    if (kind == TKVI_CODES_E5M2) return tkvi_e5m2_avx512(_mm512_cvtepu8_epi32(bytes));
    x = _mm512_srlv_epi32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), a->pick[k]), a->shift[k]);
    return _mm512_permutexvar_ps(x, a->level); /* uses 4 bits of x */
}

/* Multiplies the factors of 16 channels into the scales of tokens. */
static TKVI_TARGET_AVX512 void tkvi_fold_factors_avx512(tkvi_code_rows *r) {
    TKVI_ALIGNED float scale[TKVI_BLOCK];
    int t;
    memcpy(scale, r->scale, sizeof scale);
    for (t = 0; t < TKVI_BLOCK; t++) { /* the next token overwrites the lanes beyond this one's factors */
        const __mmask16 some = (__mmask16)((1 << r->scales_per_token) - 1);
        const __m512 x = tkvi_e4m3_avx512(_mm_maskz_loadu_epi8(some, r->factors + t * r->scales_per_token));
        _mm512_storeu_ps(r->scale + t * r->scales_per_token, _mm512_mul_ps(x, _mm512_set1_ps(scale[t])));
    }
}

/* Scores of nr rows with tokens from .. from + n - 1, in the shape of tkvi_exact_k_pass_avx512. more: outliers, added
 * to the keys. roped: 1: rotates the keys by RoPE. */
TKVI_FLAT_AVX512 void tkvi_decoded_k4_avx512(const tkvi_code_rows *rd, tkvi_code_kind kind,
                                             const int by_channel, const int roped, int from, int n,
                                             const float *q, const float *more, int rows, const int nr,
                                             float *scores) {
    tkvi_code_fields_avx512 apart;
    int t, v, r, j;
    tkvi_code_fields_of_avx512(rd, &apart);
    for (t = 0; t < n; t += 4) { /* may read tokens beyond n: a record has 64 rows */
        __m512 acc[4][4];
        const uint8_t *const k = rd->codes + (size_t)(from + t) * rd->row_bytes;
        const float *by = rd->scale + (from + t) * rd->scales_per_token, *m = more + 16 * t * rd->n_vectors;
        const float *cosine = roped ? rd->rope->cosine + t * rd->rope->row : NULL;
        const float *sine = roped ? rd->rope->sine + t * rd->rope->row : NULL;
        TKVI_UNROLL
        for (j = 0; j < 4; j++) tkvi_prefetch_code_row(rd, from + t + j);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
        }
        v = 0;
        for (; v < (roped ? rd->n_partners : 0); v += 2, cosine += 16, sine += 16, m += 32) {
            const __m512 by0 = _mm512_load_ps(rd->scale + 16 * v),
                         by1 = _mm512_load_ps(rd->scale + 16 * v + 16);
            const __m512 plus0 = _mm512_load_ps(rd->zero + 16 * v);
            const __m512 plus1 = _mm512_load_ps(rd->zero + 16 * v + 16);
            __m512 a[4], b[4];
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                const __m512 c = _mm512_loadu_ps(cosine + j * rd->rope->row);
                const __m512 d = _mm512_loadu_ps(sine + j * rd->rope->row);
                const uint8_t *kj = k + (size_t)j * rd->row_bytes;
                const float *mj = m + 16 * j * rd->n_vectors;
                __m512 x = tkvi_load_levels_avx512(TKVI_CODES_TABLE, kj + rd->vector_at[v], &apart, 0);
                __m512 y = tkvi_load_levels_avx512(TKVI_CODES_TABLE, kj + rd->vector_at[v + 1], &apart, 1);
                x = _mm512_add_ps(_mm512_fmadd_ps(x, by0, plus0), _mm512_load_ps(mj));
                y = _mm512_add_ps(_mm512_fmadd_ps(y, by1, plus1), _mm512_load_ps(mj + 16));
                a[j] = _mm512_fnmadd_ps(y, d, _mm512_mul_ps(x, c));
                b[j] = _mm512_fmadd_ps(x, d, _mm512_mul_ps(y, c));
            }
            TKVI_UNROLL
            for (r = 0; r < nr; r++) {
                const float *y = q + 16 * tkvi_min(r, rows - 1) * rd->n_vectors + 16 * v;
                const __m512 y0 = _mm512_load_ps(y), y1 = _mm512_load_ps(y + 16);
                TKVI_UNROLL
                for (j = 0; j < 4; j++)
                    acc[r][j] = _mm512_fmadd_ps(b[j], y1, _mm512_fmadd_ps(a[j], y0, acc[r][j]));
            }
        }
        for (; v < rd->n_vectors; v++, m += 16) {
            const uint8_t *kv = k + rd->vector_at[v];
            const float *bv = by + (16 * v >> rd->shift);
            __m512 x[4];
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                x[j] = tkvi_load_levels_avx512(kind, kv + (size_t)j * rd->row_bytes, &apart, 2);
                if (by_channel) {
                    x[j] = _mm512_fmadd_ps(x[j], _mm512_load_ps(rd->scale + 16 * v),
                                           _mm512_load_ps(rd->zero + 16 * v));
                    x[j] = _mm512_add_ps(x[j], _mm512_load_ps(m + 16 * j * rd->n_vectors));
                } else x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(bv[j * rd->scales_per_token]));
            }
            TKVI_UNROLL
            for (r = 0; r < nr; r++) {
                __m512 y = _mm512_load_ps(q + 16 * tkvi_min(r, rows - 1) * rd->n_vectors + 16 * v);
                TKVI_UNROLL
                for (j = 0; j < 4; j++) acc[r][j] = _mm512_fmadd_ps(x[j], y, acc[r][j]);
            }
        }
        TKVI_UNROLL
        for (r = 0; r < nr; r++)
            if (r < rows) _mm_storeu_ps(scores + r * TKVI_BLOCK + t, tkvi_sum4_avx512(acc[r]));
    }
}

/* Kernels for codes with a table of levels, for codes of whole bytes, and for keys of KVQuant without and with
 * RoPE. */
#define TKVI_DECODED_K_(name, kind, by_channel, roped)                                                       \
    static TKVI_TARGET_AVX512 void tkvi_##name##_k_avx512(const tkvi_code_rows *rd, int from, int n,         \
                                                          const float *q, const float *more, int rows,       \
                                                          float *scores) {                                   \
        if (rows == 1)                                                                                       \
            tkvi_decoded_k4_avx512(rd, kind, by_channel, roped, from, n, q, more, rows, 1, scores);          \
        else tkvi_decoded_k4_avx512(rd, kind, by_channel, roped, from, n, q, more, rows, 4, scores);         \
    }
TKVI_DECODED_K_(table, TKVI_CODES_TABLE, 0, 0)
TKVI_DECODED_K_(bytes, rd->kind, 0, 0)
TKVI_DECODED_K_(channels, TKVI_CODES_TABLE, 1, 0)
TKVI_DECODED_K_(rope, TKVI_CODES_TABLE, 1, 1)
#undef TKVI_DECODED_K_

/* Inverts RoPE on a row in the order of the vectors. */
TKVI_FLAT_AVX512 void tkvi_rope_row_back_avx512(const tkvi_code_rows *r, const float *cosine,
                                                const float *sine, float *x) {
    int v;
    for (v = 0; v < r->n_partners; v += 2, x += 32) {
        __m512 c = _mm512_loadu_ps(cosine + 8 * v), s = _mm512_loadu_ps(sine + 8 * v);
        __m512 a = _mm512_load_ps(x), b = _mm512_load_ps(x + 16);
        _mm512_store_ps(x, _mm512_fmadd_ps(b, s, _mm512_mul_ps(a, c)));
        _mm512_store_ps(x + 16, _mm512_fnmadd_ps(a, s, _mm512_mul_ps(b, c)));
    }
}

static TKVI_TARGET_AVX512 void tkvi_decoded_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                     const uint8_t *next, const float *q, const float *ref,
                                                     int rows, int n, int n_limbs, float *scores) {
    static void (*const kinds[4])(const tkvi_code_rows *rd, int from, int n, const float *q,
                                  const float *more, int rows, float *scores) = {
        tkvi_table_k_avx512, tkvi_bytes_k_avx512, tkvi_channels_k_avx512, tkvi_rope_k_avx512};
    TKVI_ALIGNED float x[TKVI_ROWS * TKVI_VECTOR_FLOATS], less[TKVI_ROWS];
    TKVI_ALIGNED float more[TKVI_ROPE_NEAR * TKVI_VECTOR_FLOATS]; /* outliers */
    float *where[TKVI_ROPE_NEAR * TKVI_KVQUANT_SLOTS];
    TKVI_ALIGNED float first[2][TKV_MAX_HEAD_DIM / 2]; /* cosine and sine of the block's start */
    tkvi_code_rows rd;
    int from, r, t, step, kind;
    if (!tkvi_open_code_rows(&rd, s, src, next, &tkvi_simd_ops_avx512)) {
        tkvi_decoded_k(s, src, next, q, ref, rows, n, n_limbs, scores);
        return;
    }
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    if (rd.factors) tkvi_fold_factors_avx512(&rd);
    tkvi_place_queries(&rd, q, ref, rows, x, less);
    kind = rd.rope ? 3 : rd.by_channel ? 2 : rd.kind != TKVI_CODES_TABLE;
    step = rd.by_channel ? TKVI_ROPE_NEAR : TKVI_BLOCK;
    if (rd.by_channel) memset(more, 0, (size_t)(16 * 16 * rd.n_vectors) * sizeof *more);
    if (rd.rope) tkvi_rope_start_angles(&rd, first[0], first[1]);
    for (from = 0; from < n; from += step) {
        const int count = tkvi_min(step, n - from);
        int out = rd.slots ? tkvi_scatter_outliers_k(&rd, from, count, more, where) : 0;
        for (r = 0; r < rows && rd.rope; r++)
            tkvi_rope_row_back_avx512(&rd, from ? rd.rope->cosine + step * rd.rope->row : first[0],
                                      from ? rd.rope->sine + step * rd.rope->row : first[1],
                                      x + 16 * r * rd.n_vectors);
        for (r = 0; r < rows; r += 4)
            kinds[kind](&rd, from, count, x + 16 * r * rd.n_vectors, more, rows - r,
                        scores + r * TKVI_BLOCK + from);
        while (out > 0) *where[--out] = 0.0f;
    }
    for (r = 0; r < rows; r++)
        for (t = 0; t < TKVI_BLOCK; t += 16) {
            float *at = scores + r * TKVI_BLOCK + t;
            _mm512_storeu_ps(at, _mm512_sub_ps(_mm512_loadu_ps(at), _mm512_set1_ps(less[r])));
        }
}

/* Outputs of nr rows in nv vectors of 16 channels, over all tokens. */
TKVI_FLAT_AVX512 void tkvi_decoded_v4_avx512(const tkvi_code_rows *rd, tkvi_code_kind kind, const float *p,
                                             int rows, int n, int first, const int nr, const int nv,
                                             float *out) {
    const uint8_t *src = rd->codes + first * rd->bits / 8;
    const float *by = rd->scale;
    tkvi_code_fields_avx512 apart;
    int t, r, j;
    __m512 acc[4][4];
    tkvi_code_fields_of_avx512(rd, &apart);
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        TKVI_UNROLL
        for (j = 0; j < nv; j++) acc[r][j] = _mm512_setzero_ps();
    }
    for (t = 0; t < n; t++, src += rd->row_bytes, by += rd->scales_per_token) {
        __m512 x[4];
        if (first == 0) tkvi_prefetch_code_row(rd, t);
        TKVI_UNROLL
        for (j = 0; j < nv; j++) {
            x[j] = tkvi_load_levels_avx512(kind, src + 2 * j * rd->bits, &apart, 2);
            x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(by[(first + 16 * j) >> rd->shift]));
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
                float *o = out + r * rd->s->pad + first + 16 * j;
                _mm512_storeu_ps(o, _mm512_add_ps(_mm512_loadu_ps(o), acc[r][j]));
            }
    }
}

#define TKVI_DECODED_V_(name, kind)                                                                          \
    static TKVI_TARGET_AVX512 void tkvi_##name##_v_avx512(const tkvi_code_rows *rd, const float *p,          \
                                                          int rows, int n, float *out) {                     \
        int c = 0;                                                                                           \
        for (; c + 64 <= rd->s->pad; c += 64) {                                                              \
            if (rows == 1) tkvi_decoded_v4_avx512(rd, kind, p, rows, n, c, 1, 4, out);                       \
            else tkvi_decoded_v4_avx512(rd, kind, p, rows, n, c, 4, 4, out);                                 \
        }                                                                                                    \
        for (; c < rd->s->pad; c += 16) tkvi_decoded_v4_avx512(rd, kind, p, rows, n, c, 4, 1, out);          \
    }
TKVI_DECODED_V_(table, TKVI_CODES_TABLE)
TKVI_DECODED_V_(bytes, rd->kind)
#undef TKVI_DECODED_V_

static TKVI_TARGET_AVX512 void tkvi_decoded_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                     const uint8_t *next, const float *p, int rows, int n,
                                                     int n_limbs, float *out) {
    static void (*const kinds[2])(const tkvi_code_rows *rd, const float *p, int rows, int n,
                                  float *out) = {tkvi_table_v_avx512, tkvi_bytes_v_avx512};
    TKVI_ALIGNED float sum[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    tkvi_code_rows rd;
    float *o = s->grid && s->rotate ? sum : out;
    int r, c, t;
    if (!tkvi_open_code_rows(&rd, s, src, next, &tkvi_simd_ops_avx512)) {
        tkvi_decoded_v(s, src, next, p, rows, n, n_limbs, out);
        return;
    }
    if (rd.factors) tkvi_fold_factors_avx512(&rd);
    if (o == sum) memset(sum, 0, (size_t)(rows * s->pad) * sizeof(float));
    for (r = 0; r < rows; r += 4)
        kinds[rd.kind != TKVI_CODES_TABLE](&rd, p + r * TKVI_BLOCK, rows - r, n, o + r * s->pad);
    for (r = 0; r < rows && o == sum; r++) {
        tkvi_rotate_back(sum + r * s->pad, s->dim);
        for (c = 0; c < s->dim; c++) out[r * s->pad + c] += sum[r * s->pad + c];
    }
    if (rd.slots) tkvi_add_outliers_v(&rd, p, rows, n, out);
    for (r = 0; r < rows && !s->grid; r++) { /* KVQuant: adds the zero points of the tokens */
        __m512 plus = _mm512_setzero_ps();
        for (t = 0; t < TKVI_BLOCK; t += 16)
            plus =
                _mm512_fmadd_ps(_mm512_load_ps(rd.zero + t), _mm512_loadu_ps(p + r * TKVI_BLOCK + t), plus);
        plus = _mm512_set1_ps(_mm512_reduce_add_ps(plus));
        for (c = 0; c < s->pad; c += 16)
            _mm512_storeu_ps(out + r * s->pad + c,
                             _mm512_add_ps(_mm512_loadu_ps(out + r * s->pad + c), plus));
    }
}

static const tkvi_kernels tkvi_kernels_avx512 = {
    TKV_ISA_AVX512,
    "avx512",
    {tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_tiles_k_avx512,
     TKVI_HAS_CODE_ROWS ? tkvi_decoded_k_avx512 : TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k)},
    {tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_tiles_v_avx512,
     TKVI_HAS_CODE_ROWS ? tkvi_decoded_v_avx512 : TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v)},
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
