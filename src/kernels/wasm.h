/*
 * kernels/wasm.h - the types and operations of kernels/vectors_128.h for WebAssembly, compiled with -msimd128.
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
#include <wasm_simd128.h>

#define TKVI_FLAT_128 static inline __attribute__((always_inline))
#define TKVI_ISA_128 TKV_ISA_WASM
#define TKVI_NAME_128 "wasm"

typedef v128_t tkvi_f4;
typedef v128_t tkvi_i4;
typedef v128_t tkvi_b16;

/* >>floats */
TKVI_FLAT_128 tkvi_f4 tkvi_load_128(const float *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_store_128(float *p, tkvi_f4 x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_f4 tkvi_splat_128(float x) { return wasm_f32x4_splat(x); }
TKVI_FLAT_128 tkvi_f4 tkvi_add_128(tkvi_f4 a, tkvi_f4 b) { return wasm_f32x4_add(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_sub_128(tkvi_f4 a, tkvi_f4 b) { return wasm_f32x4_sub(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_mul_128(tkvi_f4 a, tkvi_f4 b) { return wasm_f32x4_mul(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_madd_128(tkvi_f4 a, tkvi_f4 x, tkvi_f4 y) {
    return wasm_f32x4_add(a, wasm_f32x4_mul(x, y));
}
TKVI_FLAT_128 tkvi_f4 tkvi_max_128(tkvi_f4 a, tkvi_f4 b) { return wasm_f32x4_pmax(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_abs_128(tkvi_f4 x) { return wasm_f32x4_abs(x); }

/* Four horizontal sums. */
TKVI_FLAT_128 tkvi_f4 tkvi_sum4_128(tkvi_f4 a, tkvi_f4 b, tkvi_f4 c, tkvi_f4 d) {
    tkvi_f4 ab = wasm_f32x4_add(wasm_i32x4_shuffle(a, b, 0, 2, 4, 6), wasm_i32x4_shuffle(a, b, 1, 3, 5, 7));
    tkvi_f4 cd = wasm_f32x4_add(wasm_i32x4_shuffle(c, d, 0, 2, 4, 6), wasm_i32x4_shuffle(c, d, 1, 3, 5, 7));
    return wasm_f32x4_add(wasm_i32x4_shuffle(ab, cd, 0, 2, 4, 6), wasm_i32x4_shuffle(ab, cd, 1, 3, 5, 7));
}

TKVI_FLAT_128 float tkvi_sum_across_128(tkvi_f4 x) {
    return wasm_f32x4_extract_lane(tkvi_sum4_128(x, x, x, x), 0);
}

TKVI_FLAT_128 float tkvi_max_across_128(tkvi_f4 x) {
    x = wasm_f32x4_pmax(x, wasm_i32x4_shuffle(x, x, 2, 3, 0, 1));
    return wasm_f32x4_extract_lane(wasm_f32x4_pmax(x, wasm_i32x4_shuffle(x, x, 1, 0, 3, 2)), 0);
}

TKVI_FLAT_128 tkvi_f4 tkvi_round_128(tkvi_f4 x) { return wasm_f32x4_nearest(x); } /* ties to even */

/* x log2 e - n, without FMA: (x - n ln 2) log2 e. ln 2 has two floats, and n times the first one is exact. */
TKVI_FLAT_128 tkvi_f4 tkvi_exponent_rest_128(tkvi_f4 x, tkvi_f4 n) {
    const tkvi_f4 r = tkvi_madd_128(x, n, wasm_f32x4_const_splat(-0.693359375f));
    return wasm_f32x4_mul(tkvi_madd_128(r, n, wasm_f32x4_const_splat(2.12194440e-4f)),
                          wasm_f32x4_const_splat(1.44269504f));
}

/* y where x >= least, 0 elsewhere. */
TKVI_FLAT_128 tkvi_f4 tkvi_zero_below_128(tkvi_f4 y, tkvi_f4 x, float least) {
    return wasm_v128_and(y, wasm_f32x4_ge(x, wasm_f32x4_splat(least)));
}

/* Loads finite fp16 values. Shifts their bits into the places of a float, clears the copies of the sign bit, and
 * multiplies by 2^112. This is also right for subnormals. */
TKVI_FLAT_128 tkvi_f4 tkvi_load_finite_f16_128(const uint8_t *p) {
    v128_t x = wasm_v128_and(wasm_i32x4_shl(wasm_i32x4_load16x4(p), 13), wasm_i32x4_const_splat(~0x70000000));
    return wasm_f32x4_mul(x, wasm_i32x4_const_splat(0x77800000));
}

/* Loads any fp16 values. Infinity and NaN come out as 65536 or more in size, and get the largest exponent. */
TKVI_FLAT_128 tkvi_f4 tkvi_load_f16_128(const uint8_t *p) {
    v128_t x = tkvi_load_finite_f16_128(p);
    v128_t no_number = wasm_f32x4_ge(wasm_f32x4_abs(x), wasm_f32x4_const_splat(65536.0f));
    return wasm_v128_or(x, wasm_v128_and(no_number, wasm_i32x4_const_splat(0x7f800000)));
}

TKVI_FLAT_128 tkvi_f4 tkvi_load_bf16_128(const uint8_t *p) {
    return wasm_i32x4_shl(wasm_u32x4_load16x4(p), 16);
}

/* >>integers */
TKVI_FLAT_128 tkvi_i4 tkvi_load_ints_128(const int32_t *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_store_ints_128(int32_t *p, tkvi_i4 x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_i4 tkvi_splat_ints_128(int32_t x) { return wasm_i32x4_splat(x); }
TKVI_FLAT_128 tkvi_i4 tkvi_add_ints_128(tkvi_i4 a, tkvi_i4 b) { return wasm_i32x4_add(a, b); }
TKVI_FLAT_128 tkvi_i4 tkvi_sub_ints_128(tkvi_i4 a, tkvi_i4 b) { return wasm_i32x4_sub(a, b); }
TKVI_FLAT_128 tkvi_i4 tkvi_mul_ints_128(tkvi_i4 a, tkvi_i4 b) { return wasm_i32x4_mul(a, b); }
#define TKVI_LEFT_INTS_128(x, n) wasm_i32x4_shl(x, n)
TKVI_FLAT_128 tkvi_f4 tkvi_to_float_128(tkvi_i4 x) { return wasm_f32x4_convert_i32x4(x); }
TKVI_FLAT_128 tkvi_f4 tkvi_as_float_128(tkvi_i4 x) { return x; }
TKVI_FLAT_128 tkvi_i4 tkvi_as_ints_128(tkvi_f4 x) { return x; }

TKVI_FLAT_128 int32_t tkvi_sum_ints_across_128(tkvi_i4 x) {
    x = wasm_i32x4_add(x, wasm_i32x4_shuffle(x, x, 2, 3, 0, 1));
    return wasm_i32x4_extract_lane(x, 0) + wasm_i32x4_extract_lane(x, 1);
}

/* Rounds as tkvi_rne does: a conversion takes many instructions. */
TKVI_FLAT_128 tkvi_i4 tkvi_nearest_128(tkvi_f4 x) {
    return wasm_i32x4_sub(wasm_f32x4_add(x, wasm_f32x4_const_splat(12582912.0f)),
                          wasm_i32x4_const_splat(0x4b400000));
}

/* Four signed bytes. */
TKVI_FLAT_128 tkvi_i4 tkvi_load_bytes4_128(const uint8_t *p) {
    return wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(wasm_v128_load32_zero(p)));
}

/* >>bytes */
TKVI_FLAT_128 tkvi_b16 tkvi_load_bytes_128(const uint8_t *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_store_bytes_128(uint8_t *p, tkvi_b16 x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_b16 tkvi_splat_bytes_128(int x) { return wasm_i8x16_splat((int8_t)x); }
TKVI_FLAT_128 tkvi_b16 tkvi_and_128(tkvi_b16 a, tkvi_b16 b) { return wasm_v128_and(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_or_128(tkvi_b16 a, tkvi_b16 b) { return wasm_v128_or(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_xor_128(tkvi_b16 a, tkvi_b16 b) { return wasm_v128_xor(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_add_bytes_128(tkvi_b16 a, tkvi_b16 b) { return wasm_i8x16_add(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_test_128(tkvi_b16 a, tkvi_b16 b) { /* 255 where a & b */
    return wasm_i8x16_ne(wasm_v128_and(a, b), wasm_i8x16_const_splat(0));
}
TKVI_FLAT_128 tkvi_b16 tkvi_look_up_128(tkvi_b16 table, tkvi_b16 x) { return wasm_i8x16_swizzle(table, x); }
#define TKVI_RIGHT_128(x, n) wasm_u8x16_shr(x, n)
#define TKVI_LEFT_128(x, n) wasm_i8x16_shl(x, n)

/* Interleave the first (zip1) or second (zip2) halves of a and b, by bytes or by pairs of bytes. */
TKVI_FLAT_128 tkvi_b16 tkvi_zip1_128(tkvi_b16 a, tkvi_b16 b) {
    return wasm_i8x16_shuffle(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
TKVI_FLAT_128 tkvi_b16 tkvi_zip2_128(tkvi_b16 a, tkvi_b16 b) {
    return wasm_i8x16_shuffle(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
TKVI_FLAT_128 tkvi_b16 tkvi_zip1_pairs_128(tkvi_b16 a, tkvi_b16 b) {
    return wasm_i16x8_shuffle(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
TKVI_FLAT_128 tkvi_b16 tkvi_zip2_pairs_128(tkvi_b16 a, tkvi_b16 b) {
    return wasm_i16x8_shuffle(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

TKVI_FLAT_128 tkvi_b16 tkvi_left_bytes_128(tkvi_b16 x, int n) { return wasm_i8x16_shl(x, (uint32_t)n); }
TKVI_FLAT_128 tkvi_b16 tkvi_right_bytes_128(tkvi_b16 x, int n) { return wasm_u8x16_shr(x, (uint32_t)n); }

/* x in lanes i with i < n, else y. */
TKVI_FLAT_128 tkvi_i4 tkvi_first_128(int n, tkvi_i4 x, tkvi_i4 y) {
    return wasm_v128_bitselect(x, y, wasm_i32x4_lt(wasm_i32x4_const(0, 1, 2, 3), wasm_i32x4_splat(n)));
}

/* >>products, as kernels/simd_avx2.inc. All weights have 16 bits. Engines on x86 have 16 registers: 8 for sums. */
#define tkvi_use(x)
#define TKVI_HAS_NARROW 0
#define TKVI_BIAS 0
#define TKVI_K_PLANES 2
#define TKVI_K_PASSES 8
#define TKVI_K_FIRST(pass) ((pass) / 4 * 2)
#define TKVI_K_COLUMN(pass) ((pass) % 4 * 16)
#define TKVI_V_VECTORS 2
#define TKVI_V_SLABS 1
#define TKVI_V_PARTS 2
#define TKVI_V_COLUMN(v, part) (32 * (part) + 16 * (v))
#define TKVI_V_SPLIT 0

/* Nothing has weights of one limb. */
#define TKVI_W_TILE 4
#define tkvi_weights(w, stride, r) wasm_v128_load(w)
#define tkvi_store_weights_k(w, stride, r, k) ((void)(k))
#define tkvi_store_weights_v(w, stride, r, k) ((void)(k))
#define tkvi_sums v128_t
#define tkvi_sums_zero() wasm_i32x4_const_splat(0)
#define TKVI_SUM_MAX 0x7fffffff
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

/* Stores 16 weights of a row. */
TKVI_FLAT_128 void tkvi_store_wide_128(int16_t *w, const tkvi_i4 *k) {
    wasm_v128_store(w, wasm_i16x8_shuffle(k[0], k[1], 0, 4, 2, 6, 8, 12, 10, 14));
    wasm_v128_store(w + 8, wasm_i16x8_shuffle(k[2], k[3], 0, 4, 2, 6, 8, 12, 10, 14));
}

#endif /* TKVI_WASM */

#endif /* TKVI_KERNELS_WASM_H */
