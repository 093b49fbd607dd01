/*
 * kernels/wasm.h - the vector vocabulary for WebAssembly with -msimd128. kernels/simd_x86.h explains the operations.
 *
 * WebAssembly has no product of bytes. i32x4.dot_i16x8_s multiplies 16-bit integers and adds pairs of products.
 * Shifts widen the even and the odd bytes of a vector of codes. The sums of both belong to the same token. Weights
 * have 16 bits and hold both limbs, so two limbs cost no more than one.
 *
 *     codes   | t0: r0 r1 r2 r3 | t1: r0 r1 r2 r3 | t2 ...  | t3 ...  |   16 bytes: 4 tokens (V: channels) x 4
 *     even    | t0: r0    r2    | t1: r0    r2    | t2 ...  | t3 ...  |   8 x 16 bits
 *     odd     | t0: r1    r3    | t1: r1    r3    | t2 ...  | t3 ...  |
 *     quad    | row 0: r0 r2 r1 r3 | row 1: ...                           16 bits each, in memory
 *     sum     | t0              | t1              | t2      | t3      |   += even . r0 r2, += odd . r1 r3
 *
 * Calls kernels/scalar.h.
 */
#ifndef TKVI_KERNELS_WASM_H
#define TKVI_KERNELS_WASM_H

#include "kernels/scalar.h"

#if !defined(TKV_NO_SIMD) && defined(__wasm_simd128__) && defined(__clang__)
#define TKVI_WASM
#define TKVI_128
#define TKVI_VECTORS
#include <wasm_simd128.h>

#define TKVI_FLAT_128 static inline __attribute__((always_inline))
#define TKVI_ISA_128 TKV_ISA_WASM
#define TKVI_NAME_128 "wasm"

typedef v128_t tkvi_vf;
typedef v128_t tkvi_vi;
typedef v128_t tkvi_vb;
typedef v128_t tkvi_vm; /* a mask of lanes */

/* >>floats */
TKVI_FLAT_128 tkvi_vf tkvi_vf_load(const float *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_vf_store(float *p, tkvi_vf x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_splat(float x) { return wasm_f32x4_splat(x); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_add(tkvi_vf a, tkvi_vf b) { return wasm_f32x4_add(a, b); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_sub(tkvi_vf a, tkvi_vf b) { return wasm_f32x4_sub(a, b); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_mul(tkvi_vf a, tkvi_vf b) { return wasm_f32x4_mul(a, b); }
#define tkvi_vf_madd(a, b, c) wasm_f32x4_add(c, wasm_f32x4_mul(a, b))
TKVI_FLAT_128 tkvi_vf tkvi_vf_max(tkvi_vf a, tkvi_vf b) { return wasm_f32x4_pmax(a, b); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_abs(tkvi_vf x) { return wasm_f32x4_abs(x); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_swap(tkvi_vf x) { return wasm_i32x4_shuffle(x, x, 1, 0, 3, 2); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_load_twice(const float *p) {
    const v128_t x = wasm_v128_load64_zero(p);
    return wasm_i32x4_shuffle(x, x, 0, 0, 1, 1);
}

/* Transposes 4 x 4 floats. */
TKVI_FLAT_128 void tkvi_transpose_square(const float *x, int x_stride, float *y, int y_stride) {
    const v128_t x0 = wasm_v128_load(x), x1 = wasm_v128_load(x + x_stride);
    const v128_t x2 = wasm_v128_load(x + 2 * x_stride), x3 = wasm_v128_load(x + 3 * x_stride);
    const v128_t a = wasm_i32x4_shuffle(x0, x1, 0, 4, 1, 5), b = wasm_i32x4_shuffle(x0, x1, 2, 6, 3, 7);
    const v128_t c = wasm_i32x4_shuffle(x2, x3, 0, 4, 1, 5), d = wasm_i32x4_shuffle(x2, x3, 2, 6, 3, 7);
    wasm_v128_store(y, wasm_i64x2_shuffle(a, c, 0, 2));
    wasm_v128_store(y + y_stride, wasm_i64x2_shuffle(a, c, 1, 3));
    wasm_v128_store(y + 2 * y_stride, wasm_i64x2_shuffle(b, d, 0, 2));
    wasm_v128_store(y + 3 * y_stride, wasm_i64x2_shuffle(b, d, 1, 3));
}

TKVI_FLAT_128 tkvi_vf tkvi_sum4_128(tkvi_vf a, tkvi_vf b, tkvi_vf c, tkvi_vf d) {
    tkvi_vf ab = wasm_f32x4_add(wasm_i32x4_shuffle(a, b, 0, 2, 4, 6), wasm_i32x4_shuffle(a, b, 1, 3, 5, 7));
    tkvi_vf cd = wasm_f32x4_add(wasm_i32x4_shuffle(c, d, 0, 2, 4, 6), wasm_i32x4_shuffle(c, d, 1, 3, 5, 7));
    return wasm_f32x4_add(wasm_i32x4_shuffle(ab, cd, 0, 2, 4, 6), wasm_i32x4_shuffle(ab, cd, 1, 3, 5, 7));
}

#define tkvi_vf_sum4(to, v) tkvi_vf_store(to, tkvi_sum4_128((v)[0], (v)[1], (v)[2], (v)[3]))

TKVI_FLAT_128 float tkvi_vf_sum_across(tkvi_vf x) {
    return wasm_f32x4_extract_lane(tkvi_sum4_128(x, x, x, x), 0);
}

TKVI_FLAT_128 float tkvi_vf_max_across(tkvi_vf x) {
    x = wasm_f32x4_pmax(x, wasm_i32x4_shuffle(x, x, 2, 3, 0, 1));
    return wasm_f32x4_extract_lane(wasm_f32x4_pmax(x, wasm_i32x4_shuffle(x, x, 1, 0, 3, 2)), 0);
}

TKVI_FLAT_128 tkvi_vf tkvi_vf_round(tkvi_vf x) { return wasm_f32x4_nearest(x); } /* ties to even */

/* x log2 e - n, without FMA: (x - n ln 2) log2 e. ln 2 has two floats, and n times the first one is exact. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_exponent_rest(tkvi_vf x, tkvi_vf n) {
    const tkvi_vf r = tkvi_vf_madd(n, wasm_f32x4_const_splat(-0.693359375f), x);
    return wasm_f32x4_mul(tkvi_vf_madd(n, wasm_f32x4_const_splat(2.12194440e-4f), r),
                          wasm_f32x4_const_splat(1.44269504f));
}

/* y where x >= least, 0 elsewhere. */
#define tkvi_vf_zero_below(y, x, least) wasm_v128_and(y, wasm_f32x4_ge(x, wasm_f32x4_splat(least)))

/* Loads finite fp16 values. Shifts their bits into the places of a float, clears the copies of the sign bit, and
 * multiplies by 2^112. This is also right for subnormals. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_load_finite_f16(const uint8_t *p) {
    v128_t x = wasm_v128_and(wasm_i32x4_shl(wasm_i32x4_load16x4(p), 13), wasm_i32x4_const_splat(~0x70000000));
    return wasm_f32x4_mul(x, wasm_i32x4_const_splat(0x77800000));
}

/* Loads any fp16 values. Infinity and NaN come out as 65536 or more in size, and get the largest exponent. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_load_f16(const uint8_t *p) {
    v128_t x = tkvi_vf_load_finite_f16(p);
    v128_t no_number = wasm_f32x4_ge(wasm_f32x4_abs(x), wasm_f32x4_const_splat(65536.0f));
    return wasm_v128_or(x, wasm_v128_and(no_number, wasm_i32x4_const_splat(0x7f800000)));
}

#define tkvi_vf_load_bf16(p) wasm_i32x4_shl(wasm_u32x4_load16x4(p), 16)

#define tkvi_vf_min(a, b) wasm_f32x4_pmin(a, b)
#define tkvi_vf_xor(a, b) wasm_v128_xor(a, b)
#define tkvi_vf_hide(x) __asm__("" : "+r"(x)) /* hides how x was computed: no reordering */

/* Butterflies at distances 1 and 2 (core/rotate.h). Each lane becomes its partner plus or minus itself. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_butterflies(tkvi_vf x) {
    const v128_t odd = wasm_i32x4_const(0, INT32_MIN, 0, INT32_MIN);
    const v128_t high = wasm_i32x4_const(0, 0, INT32_MIN, INT32_MIN);
    x = wasm_f32x4_add(wasm_i32x4_shuffle(x, x, 1, 0, 3, 2), wasm_v128_xor(x, odd));
    return wasm_f32x4_add(wasm_i32x4_shuffle(x, x, 2, 3, 0, 1), wasm_v128_xor(x, high));
}

/* As tkvi_f32_to_f16, for |x| <= 65504. Half a unit aligns the mantissa of a subnormal. */
TKVI_FLAT_128 void tkvi_vf_store_f16(uint8_t *p, tkvi_vf x) {
    const v128_t size = wasm_f32x4_abs(x), half = wasm_f32x4_const_splat(0.5f);
    const v128_t odd = wasm_v128_and(wasm_u32x4_shr(size, 13), wasm_i32x4_const_splat(1));
    const v128_t few = wasm_i32x4_sub(wasm_f32x4_add(size, half), half);
    v128_t y = wasm_i32x4_add(wasm_i32x4_add(size, odd), wasm_i32x4_const_splat(0xfff - 0x38000000));
    y = wasm_v128_bitselect(few, wasm_u32x4_shr(y, 13),
                            wasm_i32x4_lt(size, wasm_i32x4_const_splat(0x38800000)));
    y = wasm_v128_or(y, wasm_v128_and(wasm_u32x4_shr(x, 16), wasm_i32x4_const_splat(0x8000)));
    wasm_v128_store64_lane(p, wasm_u16x8_narrow_i32x4(y, y), 0);
}

/* >>integers */
TKVI_FLAT_128 tkvi_vi tkvi_vi_load(const int32_t *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_vi_store(int32_t *p, tkvi_vi x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_vi tkvi_vi_splat(int32_t x) { return wasm_i32x4_splat(x); }
TKVI_FLAT_128 tkvi_vi tkvi_vi_add(tkvi_vi a, tkvi_vi b) { return wasm_i32x4_add(a, b); }
TKVI_FLAT_128 tkvi_vi tkvi_vi_sub(tkvi_vi a, tkvi_vi b) { return wasm_i32x4_sub(a, b); }
TKVI_FLAT_128 tkvi_vi tkvi_vi_mul(tkvi_vi a, tkvi_vi b) { return wasm_i32x4_mul(a, b); }
#define tkvi_vi_left(x, n) wasm_i32x4_shl(x, n)
TKVI_FLAT_128 tkvi_vf tkvi_vi_to_float(tkvi_vi x) { return wasm_f32x4_convert_i32x4(x); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_of_bits(tkvi_vi x) { return x; }

TKVI_FLAT_128 int32_t tkvi_sum_ints_across_128(tkvi_vi x) {
    x = wasm_i32x4_add(x, wasm_i32x4_shuffle(x, x, 2, 3, 0, 1));
    return wasm_i32x4_extract_lane(x, 0) + wasm_i32x4_extract_lane(x, 1);
}

/* Rounds as tkvi_rne does: a conversion takes many instructions. */
TKVI_FLAT_128 tkvi_vi tkvi_vi_nearest(tkvi_vf x) {
    return wasm_i32x4_sub(wasm_f32x4_add(x, wasm_f32x4_const_splat(12582912.0f)),
                          wasm_i32x4_const_splat(0x4b400000));
}

/* Four signed bytes. */
TKVI_FLAT_128 tkvi_vi tkvi_load_bytes4_128(const uint8_t *p) {
    return wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(wasm_v128_load32_zero(p)));
}

#define tkvi_vf_sqrt(x) wasm_f32x4_sqrt(x)
#define tkvi_vf_gt(a, b) wasm_f32x4_gt(a, b)
#define tkvi_vf_where(mask, x) wasm_v128_and(x, mask) /* 0 elsewhere */
#define tkvi_vm_any(mask) (wasm_v128_any_true(mask))
#define tkvi_vf_select(mask, x, y) wasm_v128_bitselect(x, y, mask)
#define tkvi_vi_or(a, b) wasm_v128_or(a, b)
#define tkvi_vi_and(a, b) wasm_v128_and(a, b)
#define tkvi_vi_right(x, n) wasm_u32x4_shr(x, n)
#define tkvi_vi_min(a, b) wasm_i32x4_min(a, b)
#define tkvi_vi_max(a, b) wasm_i32x4_max(a, b)
#define tkvi_vi_count(x, a, b) wasm_i32x4_sub(x, wasm_i32x4_gt(a, b)) /* x + (a > b) */
#define tkvi_vi_select(mask, x, y) wasm_v128_bitselect(x, y, mask)
#define tkvi_vi_of_bits(x) (x)
#define tkvi_vi_trunc(x)                                                                                     \
    tkvi_vi_nearest(wasm_f32x4_trunc(x)) /* |x| < 2^22: a conversion takes many instructions */
#define tkvi_vi_floor(x) tkvi_vi_nearest(wasm_f32x4_floor(x))
#define tkvi_vi_load_u8(p) wasm_v128_and(tkvi_load_bytes4_128(p), wasm_i32x4_const_splat(255))
#define tkvi_vb_transpose4(v) tkvi_vi_transpose4(v)
#define tkvi_vi_pack4(v) /* four vectors to bytes */                                                         \
    wasm_u8x16_narrow_i16x8(wasm_i16x8_narrow_i32x4((v)[0], (v)[1]), wasm_i16x8_narrow_i32x4((v)[2], (v)[3]))
#define tkvi_vi_scatter4(p, step, x) ((void)(step), wasm_v128_store(p, x))

/* >>16-bit halves of 32-bit lanes, as kernels/simd_x86.h */
#define tkvi_vh_splat(x) wasm_i16x8_splat((int16_t)(x))
#define tkvi_vh_add(a, b) wasm_i16x8_add(a, b)
#define tkvi_vh_sub(a, b) wasm_i16x8_sub(a, b)
#define tkvi_vh_min(a, b) wasm_i16x8_min(a, b)
#define tkvi_vh_max(a, b) wasm_i16x8_max(a, b)
#define tkvi_vh_pairs(a, b)                                                                                  \
    wasm_v128_or(wasm_v128_and(a, wasm_i32x4_const_splat(0xffff)), wasm_i32x4_shl(b, 16))
#define tkvi_vh_pack(a, b) wasm_i16x8_narrow_i32x4(a, b)
#define tkvi_vh_first(x) wasm_i32x4_extend_low_i16x8(x)
#define tkvi_vh_second(x) wasm_i32x4_extend_high_i16x8(x)
#define tkvi_vh_zip1(x, y) wasm_i16x8_shuffle(x, y, 0, 8, 1, 9, 2, 10, 3, 11)
#define tkvi_vh_zip2(x, y) wasm_i16x8_shuffle(x, y, 4, 12, 5, 13, 6, 14, 7, 15)
#define tkvi_vi_dot(x, a, b) wasm_i32x4_add(x, wasm_i32x4_dot_i16x8(a, b))
#define tkvi_vi_add_pairs(x, a) wasm_i32x4_add(x, wasm_i32x4_extadd_pairwise_i16x8(a))
#define TKVI_CUTS 2 /* ranges of K columns that are tried at once: their sums stay in registers */
#define tkvi_vh_sum(sum, a) tkvi_vh_add(sum, a)
#define tkvi_vh_total(sum) tkvi_vi_add_pairs(tkvi_vi_splat(0), sum)
#define tkvi_vp v128_t
#define tkvi_vp_zero() wasm_i32x4_const_splat(0)
#define tkvi_vp_dot(x, a, b) tkvi_vi_dot(x, a, b)
#define tkvi_vp_total(x) (x)

TKVI_FLAT_128 tkvi_vf tkvi_vf_div(tkvi_vf a, tkvi_vf b) {
    tkvi_vf_hide(b); /* not one reciprocal for several divisions */
    return wasm_f32x4_div(a, b);
}

/* As tkvi_cut_code: the high halves of products, halved. */
TKVI_FLAT_128 tkvi_vi tkvi_vh_cut(tkvi_vi u, tkvi_vi cut, tkvi_vi by, tkvi_vi top) {
    const v128_t x = wasm_u16x8_sub_sat(u, cut), zero = wasm_i32x4_const_splat(0);
    const v128_t low = wasm_u32x4_extmul_low_u16x8(x, by), high = wasm_u32x4_extmul_high_u16x8(x, by);
    const v128_t twice = wasm_u16x8_narrow_i32x4(wasm_u32x4_shr(low, 16), wasm_u32x4_shr(high, 16));
    return wasm_i16x8_min(wasm_u16x8_avgr(twice, zero), top);
}

/* Looks up four lanes in a table of eight. An index from 16 on gives 0. */
TKVI_FLAT_128 tkvi_vi tkvi_vi_look_up8(const int32_t *table, tkvi_vi x) {
    const v128_t at = wasm_i32x4_add(wasm_i32x4_mul(x, wasm_i32x4_const_splat(0x04040404)),
                                     wasm_i32x4_const_splat(0x03020100));
    const v128_t second = wasm_i8x16_sub(at, wasm_i8x16_const_splat(16));
    return wasm_v128_or(wasm_i8x16_swizzle(wasm_v128_load(table), at),
                        wasm_i8x16_swizzle(wasm_v128_load(table + 4), second));
}

TKVI_FLAT_128 void tkvi_vi_transpose4(tkvi_vi *v) {
    const v128_t a = wasm_i32x4_shuffle(v[0], v[1], 0, 4, 1, 5),
                 b = wasm_i32x4_shuffle(v[2], v[3], 0, 4, 1, 5);
    const v128_t c = wasm_i32x4_shuffle(v[0], v[1], 2, 6, 3, 7),
                 d = wasm_i32x4_shuffle(v[2], v[3], 2, 6, 3, 7);
    v[0] = wasm_i64x2_shuffle(a, b, 0, 2);
    v[1] = wasm_i64x2_shuffle(a, b, 1, 3);
    v[2] = wasm_i64x2_shuffle(c, d, 0, 2);
    v[3] = wasm_i64x2_shuffle(c, d, 1, 3);
}

TKVI_FLAT_128 tkvi_vi tkvi_vi_xor(tkvi_vi a, tkvi_vi b) { return wasm_v128_xor(a, b); }

/* a b >> n, without signs. n: 1 .. 63. */
TKVI_FLAT_128 tkvi_vi tkvi_vi_mul_right(tkvi_vi a, tkvi_vi b, int n) {
    const v128_t low = wasm_u64x2_shr(wasm_u64x2_extmul_low_u32x4(a, b), (uint32_t)n);
    const v128_t high = wasm_u64x2_shr(wasm_u64x2_extmul_high_u32x4(a, b), (uint32_t)n);
    return wasm_i32x4_shuffle(low, high, 0, 2, 4, 6);
}

/* Levels of E4M3, as tkvi_vf_load_finite_f16: the bits in the places of a float, times 2^114. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_load_e4m3(const uint8_t *p) {
    const v128_t x = wasm_i32x4_shl(tkvi_load_bytes4_128(p), 20);
    return wasm_f32x4_mul(wasm_v128_and(x, wasm_i32x4_const_splat((int32_t)0x87ffffff)),
                          wasm_i32x4_const_splat(0x78800000));
}

/* Looks up four codes, the first from bit `from` of p on. There is no vector instruction for a table of 64 bytes. */
TKVI_FLAT_128 tkvi_vf tkvi_load_table_floats_128(const float *level, const uint8_t *p, int from, int bits) {
    uint32_t x;
    memcpy(&x, p, 4);
    x >>= from;
    return wasm_f32x4_make(level[x & 15], level[x >> bits & 15], level[x >> 2 * bits & 15],
                           level[x >> 3 * bits & 15]);
}

/* >>bytes */
TKVI_FLAT_128 tkvi_vb tkvi_vb_load(const uint8_t *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_vb_store(uint8_t *p, tkvi_vb x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_splat(int x) { return wasm_i8x16_splat((int8_t)x); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_and(tkvi_vb a, tkvi_vb b) { return wasm_v128_and(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_or(tkvi_vb a, tkvi_vb b) { return wasm_v128_or(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_xor_128(tkvi_vb a, tkvi_vb b) { return wasm_v128_xor(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_add(tkvi_vb a, tkvi_vb b) { return wasm_i8x16_add(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_test_128(tkvi_vb a, tkvi_vb b) { /* 255 where a & b */
    return wasm_i8x16_ne(wasm_v128_and(a, b), wasm_i8x16_const_splat(0));
}
TKVI_FLAT_128 tkvi_vb tkvi_vb_look_up(tkvi_vb table, tkvi_vb x) { return wasm_i8x16_swizzle(table, x); }

/* Interleave the first (zip1) or second (zip2) halves of a and b, by bytes or by pairs of bytes. */
#define tkvi_vb_zip1(a, b) wasm_i8x16_shuffle(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define tkvi_vb_zip2(a, b)                                                                                   \
    wasm_i8x16_shuffle(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define tkvi_vb_zip1_pairs(a, b) wasm_i16x8_shuffle(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define tkvi_vb_zip2_pairs(a, b) wasm_i16x8_shuffle(a, b, 4, 12, 5, 13, 6, 14, 7, 15)

TKVI_FLAT_128 tkvi_vb tkvi_vb_left(tkvi_vb x, int n) { return wasm_i8x16_shl(x, (uint32_t)n); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_right(tkvi_vb x, int n) { return wasm_u8x16_shr(x, (uint32_t)n); }

/* x in lanes i with i < n, else y. */
TKVI_FLAT_128 tkvi_vi tkvi_vi_first(int n, tkvi_vi x, tkvi_vi y) {
    return wasm_v128_bitselect(x, y, wasm_i32x4_lt(wasm_i32x4_const(0, 1, 2, 3), wasm_i32x4_splat(n)));
}

/* >>products, as kernels/simd_x86.h. All weights have 16 bits. Engines on x86 have 16 registers: 8 for sums. */
#define tkvi_use(x)
#define TKVI_HAS_NARROW 0
#define TKVI_BIAS 0
#define TKVI_K_PLANES 2
#define TKVI_V_VECTORS 2
#define TKVI_V_SPLIT 0

/* Nothing has weights of one limb. */
#define TKVI_W_TILE 4
#define tkvi_weights(w, stride, r) wasm_v128_load(w)
#define tkvi_store_weights_k(w, stride, r, k) ((void)(k))
#define tkvi_store_weights_v(w, stride, r, k) ((void)(k))
#define tkvi_narrow_sums v128_t
#define tkvi_sums_zero() wasm_i32x4_const_splat(0)
#define TKVI_SUM_MAX 0x7fffffff
#define TKVI_V_SUM_MAX TKVI_SUM_MAX
#define tkvi_dot_k(sum, codes, u, r) ((void)(codes), (void)(u), sum)
#define tkvi_dot_v(sum, codes, u, r) ((void)(codes), (void)(u), sum)
#define tkvi_dot_levels(sum, levels, u, r) ((void)(levels), (void)(u), sum)
#define tkvi_widen_k(sum) (sum)
#define tkvi_widen_v(sum) (sum)

/* [row][position], the four of a tile in the order 0 2 1 3, as in the drawing. */
#define TKVI_WIDE_TILE 4
#define tkvi_wide_vb v128_t
#define tkvi_wide_none() wasm_i32x4_const_splat(0)
#define tkvi_wide_sums v128_t
#define tkvi_wide_zero() wasm_i32x4_const_splat(0)
#define tkvi_even(codes) wasm_v128_and(codes, wasm_i16x8_const_splat(255))
#define tkvi_odd(codes) wasm_u16x8_shr(codes, 8)
#define tkvi_wide_even(w, stride, r) wasm_v128_load32_splat((w) + (r) * (stride))
#define tkvi_wide_odd(w, stride, r) wasm_v128_load32_splat((w) + (r) * (stride) + 2)
#define tkvi_dot_wide(sum, even, odd, u, v, r)                                                               \
    wasm_i32x4_add(wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(even, u)), wasm_i32x4_dot_i16x8(odd, v))
#define tkvi_widen_wide(sum) (sum)
#define tkvi_store_wide(w, stride, r, k) tkvi_store_wide_128((w) + (r) * (stride), k)

/* Rows in lanes (kernels/prefill.inc). */
#define TKVI_ROW_VECTORS 2 /* the most vectors of rows in a pass */
#define TKVI_NARROW_VECTORS 2
#define TKVI_WIDE_VECTORS 2
#define TKVI_FLOAT_VECTORS 2
#define TKVI_ROW_TOKENS 4
#define tkvi_hide(sum) ((void)0)
#define TKVI_ROWS_NEW(j) 1
#define tkvi_rows_codes(x) wasm_v128_load32_splat(x)
#define tkvi_rows_dot_k(sum, codes, w, j) ((void)(codes), (void)(w), sum)
#define tkvi_rows_dot_v(sum, codes, w, j) ((void)(codes), (void)(w), sum)
#define tkvi_rows_dot_wide(sum, even, odd, u, v, j) tkvi_dot_wide(sum, even, odd, u, v, 0)
#define tkvi_pack_rows_k(x) (x)[0]
#define tkvi_pack_rows_v(x) (x)[0]
#define tkvi_pack_rows_even(x) tkvi_pack_pairs_128((x)[0], (x)[2])
#define tkvi_pack_rows_odd(x) tkvi_pack_pairs_128((x)[1], (x)[3])

#define tkvi_pack_pairs_128(a, b) wasm_i16x8_shuffle(a, b, 0, 8, 2, 10, 4, 12, 6, 14)

/* Stores 16 weights of a row. */
TKVI_FLAT_128 void tkvi_store_wide_128(int16_t *w, const tkvi_vi *k) {
    wasm_v128_store(w, wasm_i16x8_shuffle(k[0], k[1], 0, 4, 2, 6, 8, 12, 10, 14));
    wasm_v128_store(w + 8, wasm_i16x8_shuffle(k[2], k[3], 0, 4, 2, 6, 8, 12, 10, 14));
}

#endif /* TKVI_WASM */

#endif /* TKVI_KERNELS_WASM_H */
