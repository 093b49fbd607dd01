/*
 * kernels/simd_x86.h - the vector vocabulary for AVX2 and AVX-512. kernels/simd_avx2.inc or kernels/simd_avx512.inc
 * opens it: types, sizes and the prefix of intrinsics. kernels/simd_end.inc ends it. The templates kernels/ *.inc are
 * kernels in this vocabulary.
 *
 * Types: tkvi_vf, floats; tkvi_vi, integers of 32 bits; tkvi_vb, bytes; tkvi_vm, a mask of lanes.
 *
 * TKVI_MM(add_ps) is _mm256_add_ps or _mm512_add_ps; TKVI_MM_SI(or_si) is _mm256_or_si256 or _mm512_or_si512. Where
 * the sets differ, TKVI_N(abs) is tkvi_abs_avx2 or tkvi_abs_avx512 of this file.
 */
#ifndef TKVI_KERNELS_SIMD_X86_H
#define TKVI_KERNELS_SIMD_X86_H

#include "kernels/x86.h"

#ifdef TKVI_X86

/* >>floats */
#define tkvi_vf_load(p) TKVI_MM(loadu_ps)(p)
#define tkvi_vf_store(p, x) TKVI_MM(storeu_ps)(p, x)
#define tkvi_vf_splat(x) TKVI_MM(set1_ps)(x)
#define tkvi_vf_add(a, b) TKVI_MM(add_ps)(a, b)
#define tkvi_vf_sub(a, b) TKVI_MM(sub_ps)(a, b)
#define tkvi_vf_mul(a, b) TKVI_MM(mul_ps)(a, b)
#define tkvi_vf_madd(a, b, c) TKVI_MM(fmadd_ps)(a, b, c) /* a b + c */
#define tkvi_vf_div(a, b) TKVI_N(div)(a, b)              /* also under -ffast-math the nearest float */
#define tkvi_vf_sqrt(x) TKVI_MM(sqrt_ps)(x)
#define tkvi_vf_max(a, b) TKVI_MM(max_ps)(a, b)
#define tkvi_vf_min(a, b) TKVI_MM(min_ps)(a, b)
#define tkvi_vf_xor(a, b) TKVI_MM(xor_ps)(a, b)
#define tkvi_vf_abs(x) TKVI_N(abs)(x)
#define tkvi_vf_round(x) TKVI_N(round)(x)
#define tkvi_vf_sum_across(x) TKVI_N(sum_across)(x)
#define tkvi_vf_max_across(x) TKVI_N(max_across)(x)
#define tkvi_vf_sum4(to, v) _mm_storeu_ps(to, TKVI_N(sum4)(v)) /* four horizontal sums */
#define tkvi_vf_max4(to, v) _mm_storeu_ps(to, TKVI_N(max4)(v))
#define tkvi_vf_gt(a, b) TKVI_N(gt)(a, b)
#define tkvi_vm_any(mask) TKVI_N(any)(mask)
#define tkvi_vf_where(mask, x) TKVI_N(where)(mask, x) /* 0 elsewhere */
#define tkvi_vf_select(mask, x, y) TKVI_N(select)(mask, x, y)
#define tkvi_vf_of_bits(x) TKVI_N(as_float)(x)
#define tkvi_vf_first(n, x, y) tkvi_vf_of_bits(tkvi_vi_first(n, tkvi_vi_of_bits(x), tkvi_vi_of_bits(y)))
#define tkvi_vf_load_first(p, n) TKVI_N(load_first)(p, n) /* 0 from lane n on; any n */
#define tkvi_vf_store_first(p, x, n) TKVI_N(store_first)(p, x, n)
#define tkvi_vf_hide(x) TKVI_HIDE_X86(x)              /* hides how x was computed: no reordering, no FMA */
#define tkvi_vf_butterflies(x) TKVI_N(butterflies)(x) /* at distances 1 .. TKVI_VF / 2 (core/rotate.h) */
#define tkvi_vf_swap(x) TKVI_MM(permute_ps)(x, 0xb1)  /* neighbours */
#define tkvi_vf_load_twice(p) TKVI_N(load_twice)(p)   /* TKVI_VF / 2 floats, each in two neighbours */
#define tkvi_vf_load_f16(p) TKVI_MM(cvtph_ps)(tkvi_load_half(p))
#define tkvi_vf_load_finite_f16(p) tkvi_vf_load_f16(p)
#define tkvi_vf_load_bf16(p) tkvi_vf_of_bits(tkvi_vi_left(TKVI_MM(cvtepu16_epi32)(tkvi_load_half(p)), 16))
#define tkvi_vf_store_f16(p, x)                                                                              \
    _mm_storeu_si128((__m128i *)(void *)(p), _mm256_cvtps_ph(x, 0)) /* |x| <= 65504 */
#define tkvi_vf_load_e4m3(p) TKVI_N(load_e4m3)(p)
/* Codes h .. of 2 to 4 bits, looked up in 16 levels. Code 0 begins at p. */
#define tkvi_vf_load_table(level, p, h, bits) TKVI_N(load_table_floats)(level, (p) + (h) / 8 * (bits), bits)
/* x log2 e - n. log2 e has two floats, and FMA subtracts n from the exact first product. */
#define tkvi_vf_exponent_rest(x, n)                                                                          \
    tkvi_vf_madd(x, tkvi_vf_splat(1.92596299e-8f), TKVI_MM(fmsub_ps)(x, tkvi_vf_splat(1.44269502f), n))
/* y 2^n. The exponent of y plus n must be that of a normal number. */
#define tkvi_vf_times_power(y, n) TKVI_N(times_power)(y, n)
#define tkvi_vf_zero_below(y, x, least) TKVI_N(zero_below)(y, x, least) /* y where x >= least, 0 elsewhere */

#define TKVI_SQUARE 8 /* size of the matrix that tkvi_transpose_square transposes */
#define tkvi_transpose_square(x, x_stride, y, y_stride) tkvi_transpose_avx2(x, x_stride, y, y_stride)

/* >>integers */
#define tkvi_vi_load(p) TKVI_MM_SI(loadu_si)((const tkvi_vi *)(const void *)(p))
#define tkvi_vi_store(p, x) TKVI_MM_SI(storeu_si)((tkvi_vi *)(void *)(p), x)
#define tkvi_vi_splat(x) TKVI_MM(set1_epi32)(x)
#define tkvi_vi_add(a, b) TKVI_MM(add_epi32)(a, b)
#define tkvi_vi_sub(a, b) TKVI_MM(sub_epi32)(a, b)
#define tkvi_vi_mul(a, b) TKVI_MM(mullo_epi32)(a, b)
#define tkvi_vi_mul16(a, b) TKVI_MM(madd_epi16)(a, b)         /* |a| < 2^15, 0 <= b < 2^15 */
#define tkvi_vi_mul_right(a, b, n) TKVI_N(mul_right)(a, b, n) /* a b >> n, without signs */
#define tkvi_vi_left(x, n) TKVI_MM(slli_epi32)(x, n)
#define tkvi_vi_right(x, n) TKVI_MM(srli_epi32)(x, n)
#define tkvi_vi_or(a, b) TKVI_MM_SI(or_si)(a, b)
#define tkvi_vi_and(a, b) TKVI_MM_SI(and_si)(a, b)
#define tkvi_vi_xor(a, b) TKVI_MM_SI(xor_si)(a, b)
#define tkvi_vi_min(a, b) TKVI_MM(min_epi32)(a, b)
#define tkvi_vi_max(a, b) TKVI_MM(max_epi32)(a, b)
#define tkvi_vi_count(x, a, b) _mm256_sub_epi32(x, _mm256_cmpgt_epi32(a, b)) /* x + (a > b) */
#define tkvi_vi_nearest(x) TKVI_N(nearest)(x)                                /* ties to even */
#define tkvi_vi_trunc(x) TKVI_MM(cvttps_epi32)(x)
#define tkvi_vi_floor(x) TKVI_N(floor)(x)
#define tkvi_vi_of_bits(x) TKVI_N(as_ints)(x)
#define tkvi_vi_to_float(x) TKVI_MM(cvtepi32_ps)(x)
#define tkvi_vi_sum4(to, v) _mm_storeu_si128((__m128i *)(void *)(to), TKVI_N(isum4)(v))
#define tkvi_vi_first(n, x, y) TKVI_N(first)(n, x, y) /* x in lanes i with i < n, else y */
#define tkvi_vi_select(mask, x, y)                                                                           \
    tkvi_vi_of_bits(tkvi_vf_select(mask, tkvi_vf_of_bits(x), tkvi_vf_of_bits(y)))
#define tkvi_vi_load_i8(p) TKVI_MM(cvtepi8_epi32)(tkvi_load_quarter(p)) /* signed bytes */
#define tkvi_vi_load_first_i8(p, n) TKVI_N(load_first_i8)(p, n) /* of the first n < TKVI_VF; 0 elsewhere */
#define tkvi_vi_load_u8(p) TKVI_MM(cvtepu8_epi32)(tkvi_load_quarter(p))
#define tkvi_vi_store_u8(p, v) tkvi_store_weights_avx2((int8_t *)(p), v, 0) /* 16 lanes as bytes */
#define tkvi_vi_look_up8(table, x) TKVI_N(look_up8)(table, x)
#define tkvi_vi_transpose4(v) TKVI_N(transpose4)(v)               /* of four vectors, in each 16 bytes */
#define tkvi_vi_scatter4(p, step, x) TKVI_N(scatter4)(p, step, x) /* each 16 bytes, `step` bytes apart */
#define tkvi_vi_pack4(v) /* four vectors to bytes: 16 bytes of four lanes, then of the next four */          \
    _mm256_packus_epi16(_mm256_packs_epi32((v)[0], (v)[1]), _mm256_packs_epi32((v)[2], (v)[3]))

/* >>16-bit halves of 32-bit lanes */
#define tkvi_vh_splat(x) TKVI_MM(set1_epi16)((short)(x))
#define tkvi_vh_add(a, b) TKVI_MM(add_epi16)(a, b)
#define tkvi_vh_sub(a, b) TKVI_MM(sub_epi16)(a, b)
#define tkvi_vh_min(a, b) TKVI_MM(min_epi16)(a, b)
#define tkvi_vh_max(a, b) TKVI_MM(max_epi16)(a, b)
#define tkvi_vh_pairs(a, b) TKVI_N(pairs)(a, b)       /* lower halves of a and of b */
#define tkvi_vh_pack(a, b) TKVI_MM(packs_epi32)(a, b) /* two vectors of lanes as halves, in any order */
#define tkvi_vh_first(x) TKVI_MM(srai_epi32)(tkvi_vh_zip1(x, x), 16)  /* the lanes of a */
#define tkvi_vh_second(x) TKVI_MM(srai_epi32)(tkvi_vh_zip2(x, x), 16) /* the lanes of b */
#define tkvi_vh_zip1(x, y)                                                                                   \
    TKVI_MM(unpacklo_epi16)(x, y) /* of two such vectors: lanes of a with halves x and y */
#define tkvi_vh_zip2(x, y) TKVI_MM(unpackhi_epi16)(x, y)
#define tkvi_vh_cut(u, cut, by, top) /* as tkvi_cut_code */                                                  \
    tkvi_vh_min(TKVI_MM(avg_epu16)(TKVI_MM(mulhi_epu16)(TKVI_MM(subs_epu16)(u, cut), by), tkvi_vh_splat(0)), \
                top)
#define tkvi_vi_dot(x, a, b) TKVI_N(dot_16)(x, a, b)                /* x + products of both halves */
#define tkvi_vi_add_pairs(x, a) tkvi_vi_dot(x, a, tkvi_vh_splat(1)) /* x + both halves */
#define tkvi_vh_sum(sum, a) tkvi_vh_add(sum, a)
#define tkvi_vh_total(sum) tkvi_vi_add_pairs(tkvi_vi_splat(0), sum)
#define tkvi_vp tkvi_vi /* sums of products */
#define tkvi_vp_zero() tkvi_vi_splat(0)
#define tkvi_vp_dot(x, a, b) tkvi_vi_dot(x, a, b)
#define tkvi_vp_total(x) (x)

/* >>bytes. Shifts move 16-bit pairs: a mask clears the bits of the neighbour byte. */
#define tkvi_vb_load(p) tkvi_vi_load(p)
#define tkvi_vb_store(p, x) tkvi_vi_store(p, x)
/* The same value in every byte. gcc's _mm512_set1_epi8 is a list of 64 values, copied at every use. */
#define tkvi_vb_splat(x) tkvi_vi_splat((int32_t)((uint32_t)(x)*0x01010101u))
#define tkvi_vb_add(a, b) TKVI_MM(add_epi8)(a, b)
#define tkvi_vb_and(a, b) TKVI_MM_SI(and_si)(a, b)
#define tkvi_vb_or(a, b) TKVI_MM_SI(or_si)(a, b)
#define tkvi_vb_where(a, b) TKVI_N(where_bytes)(a, b) /* b where a > 0 */
#define tkvi_vb_left(x, n) TKVI_MM(slli_epi16)(x, (unsigned char)(n))
#define tkvi_vb_right(x, n) TKVI_MM(srli_epi16)(x, (unsigned char)(n))
/* The 32 bytes of a tile that both halves of a plane share (core/tile.h), and their fields for a half: shifted right by
 * n, and by m more for the second half. */
#define tkvi_vb_tail(p, column) TKVI_N(load_tail)(p, column)
#define tkvi_vb_right_half(x, column, n, m) TKVI_N(right_half)(x, column, n, m)
#define tkvi_vb_flip(x) TKVI_MM_SI(xor_si)(x, tkvi_vb_splat(128)) /* plus or minus 128 */
#define tkvi_vb_table(levels) TKVI_N(load_table)(levels)
#define tkvi_vb_look_up(table, x) TKVI_MM(shuffle_epi8)(table, x)
/* Interleave the first or second halves of each 16 bytes, by bytes or by pairs. tkvi_vb_spread gives the order of words
 * with which the four results of zip and zip_pairs are in order. */
#define tkvi_vb_zip1(a, b) TKVI_MM(unpacklo_epi8)(a, b)
#define tkvi_vb_zip2(a, b) TKVI_MM(unpackhi_epi8)(a, b)
#define tkvi_vb_zip1_pairs(a, b) TKVI_MM(unpacklo_epi16)(a, b)
#define tkvi_vb_zip2_pairs(a, b) TKVI_MM(unpackhi_epi16)(a, b)
#define tkvi_vb_spread(x) TKVI_N(spread)(x)
/* Each 16 bytes from or to another place, `step` bytes apart. */
#define tkvi_vb_gather4(p, step) TKVI_N(load_parts)(p, step)
#define tkvi_vb_scatter4(p, step, x) TKVI_N(scatter4)(p, step, x)
#define tkvi_vb_transpose4(v) TKVI_N(transpose4)(v) /* groups of 4 bytes, as tkvi_vi_transpose4 */

/* Exact types that are used less have less code: two rows are four, two tokens of V go together. */
#define TKVI_EXACT_IS_SHORT(type) ((type) != TKVI_AS_F16)

/* >>products of four codes by four weights. w: the weights, in memory, of row 0. r: a row. */
#define TKVI_HAS_NARROW 1
#define TKVI_BIAS 0      /* products take 8-bit codes minus this */
#define TKVI_V_VECTORS 2 /* vectors of V in a pass */

/* Weights of one limb: bytes, [row][position]. */
#define TKVI_W_TILE 4
#define tkvi_weights(w, stride, r) tkvi_vi_splat(tkvi_load_int_x86((w) + (r) * (stride)))
#define tkvi_store_weights_k(w, stride, r, k) TKVI_N(store_weights)((w) + (r) * (stride), k, 1)
#define tkvi_store_weights_v(w, stride, r, k) TKVI_N(store_weights)((w) + (r) * (stride), k, 0)
#define tkvi_narrow_sums tkvi_vi
#define tkvi_sums_zero() tkvi_vi_splat(0)
#define tkvi_dot_k(sum, codes, u, r) TKVI_N(dot_bytes)(sum, codes, u)
#define tkvi_dot_v(sum, codes, u, r) TKVI_N(dot_bytes)(sum, u, codes)
#define tkvi_widen_k(sum) TKVI_N(widen_signed)(sum)
#define tkvi_widen_v(sum) TKVI_N(widen_unsigned)(sum)
#define tkvi_dot_levels(sum, levels, u, r) TKVI_N(dot_levels)(sum, u, levels) /* weights up to 127 */

/* Weights of two limbs: 16 bits, [row][position], the four of a tile in the order 0 2 1 3. */
#define TKVI_WIDE_TILE 4
#define tkvi_wide_vb tkvi_vi /* weights, loaded */
#define tkvi_wide_none() tkvi_vi_splat(0)
#define tkvi_keep_wide(sum) tkvi_keep_value(sum)
#define tkvi_wide_sums tkvi_vi
#define tkvi_wide_zero() tkvi_vi_splat(0)
#define tkvi_even(codes) tkvi_vi_and(codes, tkvi_vh_splat(255))
#define tkvi_odd(codes) TKVI_MM(srli_epi16)(codes, 8)
#define tkvi_wide_even(w, stride, r) tkvi_vi_splat(tkvi_load_int_x86((w) + (r) * (stride)))
#define tkvi_wide_odd(w, stride, r) tkvi_vi_splat(tkvi_load_int_x86((w) + (r) * (stride) + 2))
#define tkvi_dot_wide(sum, even, odd, u, v, r) tkvi_vi_dot(tkvi_vi_dot(sum, even, u), odd, v)
#define tkvi_widen_wide(sum) (sum)
#define tkvi_store_wide(w, stride, r, k) TKVI_N(store_wide)((w) + (r) * (stride), k)

/* >>rows in lanes (kernels/prefill.inc): codes of a token or channel by weights of TKVI_VF rows. x: codes in memory. */
#define TKVI_ROW_VECTORS 2 /* the most vectors of rows in a pass */
#define TKVI_NARROW_VECTORS 2
#define TKVI_WIDE_VECTORS 2
#define TKVI_FLOAT_VECTORS 2
#define TKVI_ROWS_NEW(j) 1 /* 1: token j needs a vector of codes of its own */
#define tkvi_rows_codes(x) tkvi_vi_splat(*(x))
#define tkvi_rows_dot_k(sum, codes, w, j) TKVI_N(rows_dot_bytes)(sum, codes, w)
#define tkvi_rows_dot_v(sum, codes, w, j) TKVI_N(rows_dot_bytes)(sum, w, codes)
#define tkvi_rows_dot_wide(sum, even, odd, u, v, j) TKVI_N(rows_dot_wide)(sum, even, odd, u, v)
/* Weights of four channels or tokens, as the products take them. */
#define tkvi_pack_rows_k(x) TKVI_N(pack_rows)(x, 1)
#define tkvi_pack_rows_v(x) TKVI_N(pack_rows)(x, 0)
#define tkvi_pack_rows_even(x) tkvi_vh_pairs((x)[0], (x)[2])
#define tkvi_pack_rows_odd(x) tkvi_vh_pairs((x)[1], (x)[3])

/* >>functions, AVX2 */
TKVI_FLAT_AVX2 __m256i tkvi_load_avx2(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* Sixteen or eight bytes, half of a vector or a quarter. */
TKVI_FLAT_AVX2 __m128i tkvi_load_bytes16_avx2(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}
TKVI_FLAT_AVX2 __m128i tkvi_load_bytes8_avx2(const uint8_t *p) {
    return _mm_loadl_epi64((const __m128i *)(const void *)p);
}

TKVI_FLAT int32_t tkvi_load_int_x86(const void *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* Conversions and masks. */
#define tkvi_as_float_avx2(x) _mm256_castsi256_ps(x)
#define tkvi_as_ints_avx2(x) _mm256_castps_si256(x)
#define tkvi_gt_avx2(a, b) _mm256_cmp_ps(a, b, _CMP_GT_OQ)
#define tkvi_any_avx2(mask) (_mm256_movemask_ps(mask) != 0)
#define tkvi_where_avx2(mask, x) _mm256_and_ps(x, mask)
#define tkvi_select_avx2(m, x, y) _mm256_blendv_ps(y, x, m)
#define tkvi_abs_avx2(x) _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)))
#define tkvi_where_bytes_avx2(a, b) _mm256_andnot_si256(_mm256_cmpeq_epi8(a, _mm256_setzero_si256()), b)

/* Rounding and exponents. */
#define tkvi_nearest_avx2(x) _mm256_cvtps_epi32(x)
#define tkvi_floor_avx2(x) _mm256_cvttps_epi32(_mm256_floor_ps(x))
#define tkvi_round_avx2(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
TKVI_FLAT_AVX2 __m256 tkvi_times_power_avx2(__m256 y, __m256 n) {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), shift));
}
#define tkvi_zero_below_avx2(y, x, least)                                                                    \
    _mm256_and_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(least), _CMP_GE_OQ))

/* Mask of the first n of 8 lanes. n can be any number. */
TKVI_FLAT_AVX2 __m256i tkvi_lane_mask_avx2(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

#define tkvi_first_avx2(n, x, y) _mm256_blendv_epi8(y, x, tkvi_lane_mask_avx2(n))
#define tkvi_load_first_avx2(p, n) _mm256_maskload_ps(p, tkvi_lane_mask_avx2(n))
TKVI_FLAT_AVX2 void tkvi_store_first_avx2(float *to, __m256 x, int n) {
    if (n >= 8) _mm256_storeu_ps(to, x);
    else _mm256_maskstore_ps(to, tkvi_lane_mask_avx2(n), x);
}

TKVI_FLAT_AVX2 __m256i tkvi_load_first_i8_avx2(const uint8_t *p, int n) {
    uint8_t first[8] = {0};
    if (n == 4) return _mm256_cvtepi8_epi32(_mm_cvtsi32_si128(tkvi_load_int_x86(p)));
    memcpy(first, p, (size_t)n);
    return _mm256_cvtepi8_epi32(tkvi_load_bytes8_avx2(first));
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

TKVI_FLAT_AVX2 float tkvi_sum_across_avx2(__m256 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

TKVI_FLAT_AVX2 float tkvi_max_across_avx2(__m256 a) {
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

TKVI_FLAT_AVX2 __m256i tkvi_load_table_avx2(const int8_t *levels) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)levels));
}

TKVI_FLAT_AVX2 __m128i tkvi_isum4_avx2(const __m256i *a) {
    const __m256i x = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

/* >>bytes and halves, AVX2 */
#define tkvi_look_up8_avx2(table, x) _mm256_permutevar8x32_epi32(tkvi_load_avx2(table), x)
#define tkvi_pairs_avx2(a, b) _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa)
#define tkvi_spread_avx2(x) _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7))
#define tkvi_load_tail_avx2(p, column) tkvi_load_avx2((p) - (column))
#define tkvi_right_half_avx2(x, column, n, m) _mm256_srli_epi16(x, (n) + (column) / 32 * (m))

/* >>products, AVX2 */
#define tkvi_dot_16_avx2(x, a, b) _mm256_add_epi32(x, _mm256_madd_epi16(a, b))
#define tkvi_dot_bytes_avx2(sum, no_sign, with_sign)                                                         \
    _mm256_add_epi16(sum, _mm256_maddubs_epi16(no_sign, with_sign))
#define tkvi_dot_levels_avx2(sum, weights, levels)                                                           \
    tkvi_dot_16_avx2(sum, _mm256_maddubs_epi16(weights, levels), _mm256_set1_epi16(1))
#define tkvi_widen_signed_avx2(sum) _mm256_madd_epi16(sum, _mm256_set1_epi16(1))
#define tkvi_widen_unsigned_avx2(sum)                                                                        \
    _mm256_add_epi32(_mm256_and_si256(sum, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(sum, 16))

/* Stores 16 weights of a row. */
TKVI_FLAT_AVX2 void tkvi_store_weights_avx2(int8_t *w, const __m256i *k, const int is_signed) {
    const __m256i x = _mm256_packs_epi32(k[0], k[1]);
    const __m256i y = is_signed ? _mm256_packs_epi16(x, x) : _mm256_packus_epi16(x, x);
    _mm_storeu_si128((__m128i *)(void *)w, _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(
                                               y, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5))));
}

TKVI_FLAT_AVX2 void tkvi_store_wide_x86(int16_t *w, __m256i k) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5,
                                           2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm256_storeu_si256((__m256i *)(void *)w, _mm256_shuffle_epi8(k, order));
}
#define tkvi_store_wide_avx2(w, k)                                                                           \
    tkvi_store_wide_x86(w, _mm256_permute4x64_epi64(_mm256_packs_epi32((k)[0], (k)[1]), 0xd8))

/* a + b of sums that live in a loop. gcc otherwise copies them from register to register. */
#if defined(__GNUC__) && !defined(__clang__)
#define TKVI_ADD_IN_PLACE(add, bits, a, b)                                                                   \
    __asm__("vpadd" bits "\t{%1, %0, %0|%0, %0, %1}" : "+x"(a) : "x"(b))
#else
#define TKVI_ADD_IN_PLACE(add, bits, a, b) a = add(a, b)
#endif
TKVI_FLAT_AVX2 __m256i tkvi_rows_dot_bytes_avx2(__m256i sum, __m256i no_sign, __m256i with_sign) {
    const __m256i x = _mm256_maddubs_epi16(no_sign, with_sign);
    TKVI_ADD_IN_PLACE(_mm256_add_epi16, "w", sum, x);
    return sum;
}
TKVI_FLAT_AVX2 __m256i tkvi_rows_dot_wide_avx2(__m256i sum, __m256i even, __m256i odd, __m256i u, __m256i v) {
    const __m256i x = _mm256_add_epi32(_mm256_madd_epi16(even, u), _mm256_madd_epi16(odd, v));
    TKVI_ADD_IN_PLACE(_mm256_add_epi32, "d", sum, x);
    return sum;
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
/* >>functions, AVX-512 */
/* Conversions and masks. */
#define tkvi_as_float_avx512(x) _mm512_castsi512_ps(x)
#define tkvi_as_ints_avx512(x) _mm512_castps_si512(x)
#define tkvi_gt_avx512(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define tkvi_any_avx512(mask) ((mask) != 0)
#define tkvi_where_avx512(m, x) _mm512_maskz_mov_ps(m, x)
#define tkvi_select_avx512(m, x, y) _mm512_mask_blend_ps(m, y, x)
#define tkvi_abs_avx512(x) _mm512_abs_ps(x)
#define tkvi_where_bytes_avx512(a, b) _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(a, a), b)
#define tkvi_sum_across_avx512(x) _mm512_reduce_add_ps(x)
#define tkvi_max_across_avx512(x) _mm512_reduce_max_ps(x)

/* Rounding and exponents. */
TKVI_FLAT_AVX512 __m512i tkvi_nearest_avx512(__m512 x) {
    return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#define tkvi_floor_avx512(x) _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)
#define tkvi_round_avx512(x) _mm512_cvtepi32_ps(tkvi_nearest_avx512(x))
#define tkvi_times_power_avx512(y, n) _mm512_scalef_ps(y, n)
#define tkvi_zero_below_avx512(y, x, least)                                                                  \
    _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ), y)

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
#define TKVI_ACROSS_FOUR_(name, op)                                                                          \
    TKVI_FLAT_AVX512 __m128 tkvi_##name##_avx512(const __m512 *a) {                                          \
        __m512 x = _mm512_##op(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));              \
        __m512 y = _mm512_##op(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));              \
        __m512d xd = _mm512_castps_pd(x), yd = _mm512_castps_pd(y);                                          \
        __m512 z = _mm512_##op(_mm512_castpd_ps(_mm512_unpacklo_pd(xd, yd)),                                 \
                               _mm512_castpd_ps(_mm512_unpackhi_pd(xd, yd)));                                \
        __m256 w = _mm256_##op(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));                     \
        return _mm_##op(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));                             \
    }
TKVI_ACROSS_FOUR_(sum4, add_ps)
TKVI_ACROSS_FOUR_(max4, max_ps)

TKVI_FLAT_AVX512 __m128i tkvi_isum4_avx512(const __m512i *a) {
    __m512i x = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    __m512i y = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    __m512i z = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
    __m256i w = _mm256_add_epi32(_mm512_castsi512_si256(z), _mm512_extracti32x8_epi32(z, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}

/* Mask of the first n of 16 lanes. n can be any number. */
TKVI_FLAT_AVX512 __mmask16 tkvi_lane_mask_avx512(int n) {
    return (__mmask16)((1 << tkvi_max(0, tkvi_min(n, 16))) - 1);
}

TKVI_FLAT_AVX512 __m512i tkvi_first_avx512(int n, __m512i x, __m512i y) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(n)), y, x);
}
#define tkvi_load_first_avx512(p, n) _mm512_maskz_loadu_ps(tkvi_lane_mask_avx512(n), p)
TKVI_FLAT_AVX512 void tkvi_store_first_avx512(float *to, __m512 x, int n) {
    _mm512_mask_storeu_ps(to, tkvi_lane_mask_avx512(n), x);
}

TKVI_FLAT_AVX512 __m512i tkvi_load_first_i8_avx512(const uint8_t *p, int n) {
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

TKVI_FLAT_AVX512 __m512i tkvi_pack_rows_avx512(const __m512i *x, const int is_signed) {
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i a = _mm512_packs_epi32(x[0], x[1]), b = _mm512_packs_epi32(x[2], x[3]);
    return _mm512_shuffle_epi8(is_signed ? _mm512_packs_epi16(a, b) : _mm512_packus_epi16(a, b), order);
}

/* >>bytes and halves, AVX-512 */
#define tkvi_look_up8_avx512(table, x)                                                                       \
    _mm512_permutexvar_epi32(x, _mm512_castsi256_si512(tkvi_load_avx2(table)))
#define tkvi_pairs_avx512(a, b) _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16))
TKVI_FLAT_AVX512 __m512i tkvi_spread_avx512(__m512i x) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, x);
}
#define tkvi_load_tail_avx512(p, column) _mm512_broadcast_i64x4(tkvi_load_avx2((p) + (column)))
TKVI_FLAT_AVX512 __m512i tkvi_right_half_avx512(__m512i x, int column, int n, int m) {
    const __m256i high = _mm256_set1_epi16((short)(n + m));
    (void)column;
    return _mm512_srlv_epi16(x, _mm512_inserti64x4(_mm512_set1_epi16((short)n), high, 1));
}

/* >>products, AVX-512 */
#define tkvi_dot_16_avx512(x, a, b) _mm512_dpwssd_epi32(x, a, b)
#define tkvi_dot_bytes_avx512(sum, no_sign, with_sign) _mm512_dpbusd_epi32(sum, no_sign, with_sign)
#define tkvi_dot_levels_avx512(sum, weights, levels) tkvi_dot_bytes_avx512(sum, weights, levels)
#define tkvi_rows_dot_bytes_avx512(sum, no_sign, with_sign) tkvi_dot_bytes_avx512(sum, no_sign, with_sign)
#define tkvi_rows_dot_wide_avx512(sum, even, odd, u, v) tkvi_dot_wide(sum, even, odd, u, v, 0)
#define tkvi_widen_signed_avx512(sum) (sum)
#define tkvi_widen_unsigned_avx512(sum) (sum)

/* Stores 16 weights of a row. */
TKVI_FLAT_AVX512 void tkvi_store_weights_avx512(int8_t *w, const __m512i *k, const int is_signed) {
    (void)is_signed;
    _mm_storeu_si128((__m128i *)(void *)w, _mm512_cvtepi32_epi8(k[0]));
}
#define tkvi_store_wide_avx512(w, k) tkvi_store_wide_x86(w, _mm512_cvtepi32_epi16((k)[0]))
#endif /* TKVI_AVX512 */

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_SIMD_X86_H */
