/*
 * kernels/neon.h - the types and operations of kernels/vectors_128.h for NEON on little-endian AArch64.
 *
 * With the dot product extension, sdot computes a step in one instruction. Compilers use it with
 * -march=armv8.2-a+dotprod or -mcpu=native, and by default for Apple. Other targets use widening products.
 *
 * Weights are bytes. Each limb of a query row has a weight row of its own. One vector, `quad`, has the four
 * neighbouring weights of four weight rows. sdot selects the row by its lane.
 *
 *     codes   | t0: r0 r1 r2 r3 | t1: r0 r1 r2 r3 | t2 ...  | t3 ...  |   16 bytes: 4 tokens (V: channels) x 4
 *     quad    | row 0: r0 .. r3 | row 1           | row 2   | row 3   |
 *     sum     | t0              | t1              | t2      | t3      |   += codes . quad[row]
 *
 * Calls kernels/scalar.h.
 */
#ifndef TKVI_KERNELS_NEON_H
#define TKVI_KERNELS_NEON_H

#include "kernels/scalar.h"

#if !defined(TKV_NO_SIMD) && defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__) &&       \
    (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
#define TKVI_NEON
#define TKVI_128
#include <arm_neon.h>

#define TKVI_FLAT_128 static inline __attribute__((always_inline))
#define TKVI_ISA_128 TKV_ISA_NEON
#define TKVI_NAME_128 "neon"

typedef float32x4_t tkvi_f4;
typedef int32x4_t tkvi_i4;
typedef uint8x16_t tkvi_b16;

/* >>floats */
TKVI_FLAT_128 tkvi_f4 tkvi_load_128(const float *p) { return vld1q_f32(p); }
TKVI_FLAT_128 void tkvi_store_128(float *p, tkvi_f4 x) { vst1q_f32(p, x); }
TKVI_FLAT_128 tkvi_f4 tkvi_splat_128(float x) { return vdupq_n_f32(x); }
TKVI_FLAT_128 tkvi_f4 tkvi_add_128(tkvi_f4 a, tkvi_f4 b) { return vaddq_f32(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_sub_128(tkvi_f4 a, tkvi_f4 b) { return vsubq_f32(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_mul_128(tkvi_f4 a, tkvi_f4 b) { return vmulq_f32(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_madd_128(tkvi_f4 a, tkvi_f4 x, tkvi_f4 y) { return vfmaq_f32(a, x, y); }
TKVI_FLAT_128 tkvi_f4 tkvi_max_128(tkvi_f4 a, tkvi_f4 b) { return vmaxq_f32(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_abs_128(tkvi_f4 x) { return vabsq_f32(x); }
TKVI_FLAT_128 float tkvi_sum_across_128(tkvi_f4 x) { return vaddvq_f32(x); }
TKVI_FLAT_128 float tkvi_max_across_128(tkvi_f4 x) { return vmaxvq_f32(x); }

TKVI_FLAT_128 tkvi_f4 tkvi_round_128(tkvi_f4 x) { return vrndnq_f32(x); } /* ties to even */

/* x log2 e - n. log2 e has two floats, and FMA subtracts n from the exact first product. */
TKVI_FLAT_128 tkvi_f4 tkvi_exponent_rest_128(tkvi_f4 x, tkvi_f4 n) {
    return vfmaq_f32(vfmaq_f32(vnegq_f32(n), x, vdupq_n_f32(1.44269502f)), x, vdupq_n_f32(1.92596299e-8f));
}

/* y where x >= least, 0 elsewhere. */
TKVI_FLAT_128 tkvi_f4 tkvi_zero_below_128(tkvi_f4 y, tkvi_f4 x, float least) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(y), vcgeq_f32(x, vdupq_n_f32(least))));
}

/* Four horizontal sums. */
TKVI_FLAT_128 tkvi_f4 tkvi_sum4_128(tkvi_f4 a, tkvi_f4 b, tkvi_f4 c, tkvi_f4 d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

TKVI_FLAT_128 tkvi_f4 tkvi_load_finite_f16_128(const uint8_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

TKVI_FLAT_128 tkvi_f4 tkvi_load_f16_128(const uint8_t *p) { return tkvi_load_finite_f16_128(p); }

TKVI_FLAT_128 tkvi_f4 tkvi_load_bf16_128(const uint8_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}

/* >>integers */
TKVI_FLAT_128 tkvi_i4 tkvi_load_ints_128(const int32_t *p) { return vld1q_s32(p); }
TKVI_FLAT_128 void tkvi_store_ints_128(int32_t *p, tkvi_i4 x) { vst1q_s32(p, x); }
TKVI_FLAT_128 tkvi_i4 tkvi_splat_ints_128(int32_t x) { return vdupq_n_s32(x); }
TKVI_FLAT_128 tkvi_i4 tkvi_add_ints_128(tkvi_i4 a, tkvi_i4 b) { return vaddq_s32(a, b); }
TKVI_FLAT_128 tkvi_i4 tkvi_sub_ints_128(tkvi_i4 a, tkvi_i4 b) { return vsubq_s32(a, b); }
TKVI_FLAT_128 tkvi_i4 tkvi_mul_ints_128(tkvi_i4 a, tkvi_i4 b) { return vmulq_s32(a, b); }
TKVI_FLAT_128 int32_t tkvi_sum_ints_across_128(tkvi_i4 x) { return vaddvq_s32(x); }
#define TKVI_LEFT_INTS_128(x, n) vshlq_n_s32(x, n)
TKVI_FLAT_128 tkvi_i4 tkvi_nearest_128(tkvi_f4 x) { return vcvtnq_s32_f32(x); } /* ties to even */
TKVI_FLAT_128 tkvi_f4 tkvi_to_float_128(tkvi_i4 x) { return vcvtq_f32_s32(x); }
TKVI_FLAT_128 tkvi_f4 tkvi_as_float_128(tkvi_i4 x) { return vreinterpretq_f32_s32(x); }
TKVI_FLAT_128 tkvi_i4 tkvi_as_ints_128(tkvi_f4 x) { return vreinterpretq_s32_f32(x); }

/* Four signed bytes. */
TKVI_FLAT_128 tkvi_i4 tkvi_load_bytes4_128(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(x)))));
}

/* >>bytes */
TKVI_FLAT_128 tkvi_b16 tkvi_load_bytes_128(const uint8_t *p) { return vld1q_u8(p); }
TKVI_FLAT_128 void tkvi_store_bytes_128(uint8_t *p, tkvi_b16 x) { vst1q_u8(p, x); }
TKVI_FLAT_128 tkvi_b16 tkvi_splat_bytes_128(int x) { return vdupq_n_u8((uint8_t)x); }
TKVI_FLAT_128 tkvi_b16 tkvi_and_128(tkvi_b16 a, tkvi_b16 b) { return vandq_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_or_128(tkvi_b16 a, tkvi_b16 b) { return vorrq_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_xor_128(tkvi_b16 a, tkvi_b16 b) { return veorq_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_add_bytes_128(tkvi_b16 a, tkvi_b16 b) { return vaddq_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_test_128(tkvi_b16 a, tkvi_b16 b) { return vtstq_u8(a, b); } /* 255 where a & b */
TKVI_FLAT_128 tkvi_b16 tkvi_look_up_128(tkvi_b16 table, tkvi_b16 x) { return vqtbl1q_u8(table, x); }
#define TKVI_RIGHT_128(x, n) vshrq_n_u8(x, n)
#define TKVI_LEFT_128(x, n) vshlq_n_u8(x, n)

/* Interleave the first (zip1) or second (zip2) halves of a and b, by bytes or by pairs of bytes. */
TKVI_FLAT_128 tkvi_b16 tkvi_zip1_128(tkvi_b16 a, tkvi_b16 b) { return vzip1q_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_zip2_128(tkvi_b16 a, tkvi_b16 b) { return vzip2q_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_zip1_pairs_128(tkvi_b16 a, tkvi_b16 b) {
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
TKVI_FLAT_128 tkvi_b16 tkvi_zip2_pairs_128(tkvi_b16 a, tkvi_b16 b) {
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}

/* Shifts of bytes. n is 0 .. 7; where it is a constant, the compiler takes the immediate form. */
TKVI_FLAT_128 tkvi_b16 tkvi_left_bytes_128(tkvi_b16 x, int n) { return vshlq_u8(x, vdupq_n_s8((int8_t)n)); }
TKVI_FLAT_128 tkvi_b16 tkvi_right_bytes_128(tkvi_b16 x, int n) { return vshlq_u8(x, vdupq_n_s8((int8_t)-n)); }

/* x in lanes i with i < n, else y. */
TKVI_FLAT_128 tkvi_i4 tkvi_first_128(int n, tkvi_i4 x, tkvi_i4 y) {
    static const int32_t lane[4] = {0, 1, 2, 3};
    return vbslq_s32(vcltq_s32(vld1q_s32(lane), vdupq_n_s32(n)), x, y);
}

/* >>products, as kernels/simd_avx2.inc. Each limb has a sum of its own: weights are 128 * high + low, and low is
 * 0 .. 127. A row of weights is a lane of a vector, as in the drawing. `even` is the codes, and `odd` is not used. */
#define tkvi_use(x) __asm__("" : : "w"(x)); /* orders unrolled steps: gcc otherwise mixes them, and spills */
#define TKVI_HAS_NARROW 1
#define TKVI_BIAS 128 /* the product extension has no unsigned by signed bytes: 8-bit codes become signed */
#define TKVI_K_PLANES 4
#define TKVI_K_PASSES 4
#define TKVI_K_FIRST(pass) 0
#define TKVI_K_COLUMN(pass) (16 * (pass))
#define TKVI_V_VECTORS 4
#define TKVI_V_SLABS 1
#define TKVI_V_PARTS 1
#define TKVI_V_COLUMN(v, part) (16 * (v))
#define TKVI_V_SPLIT 0

/* Weights of one limb: [position / 4][row][4]. */
#define TKVI_W_TILE 16
#define tkvi_weights(w, stride, r) vreinterpretq_u8_s8(vld1q_s8(w))
#define tkvi_store_weights_k(w, stride, r, k) tkvi_store_narrow_128((w) + 4 * (r), k)
#define tkvi_store_weights_v(w, stride, r, k) tkvi_store_narrow_128((w) + 4 * (r), k)

#define tkvi_sums int32x4_t
#define tkvi_sums_zero() vdupq_n_s32(0)
#define TKVI_SUM_MAX 0x7fffffff
#define tkvi_dot_k(sum, codes, u, r)                                                                         \
    TKVI_DOT_128(0, sum, vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(u), r)
#define tkvi_dot_v(sum, codes, u, r)                                                                         \
    TKVI_DOT_128(1, sum, vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(u), r)
#define tkvi_dot_levels(sum, levels, u, r) tkvi_dot_k(sum, levels, u, r)
#define tkvi_widen_k(sum) (sum)
#define tkvi_widen_v(sum) (sum)

/* Weights of two limbs: [position / 4][limb][row][4] bytes. */
#define TKVI_WIDE_TILE 16 /* in int16_t */
#define tkvi_wide_vb tkvi_b16
#define tkvi_wide_none() vdupq_n_u8(0)
#define tkvi_wide_sums tkvi_limb_sums
#define tkvi_even(codes) (codes)
#define tkvi_odd(codes) (codes)
#define tkvi_wide_even(w, stride, r) vld1q_u8((const uint8_t *)(w))
#define tkvi_wide_odd(w, stride, r) vld1q_u8((const uint8_t *)(w) + 16)
#define tkvi_dot_wide(sum, even, odd, u, v, r)                                                               \
    ((void)(odd),                                                                                            \
     tkvi_limbs_128(TKVI_DOT_128(0, (sum).high, vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(u), r),       \
                    TKVI_DOT_128(0, (sum).low, vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(v), r)))
#define tkvi_wide_zero() tkvi_limbs_128(vdupq_n_s32(0), vdupq_n_s32(0))
#define tkvi_widen_wide(sum) vaddq_s32(vshlq_n_s32((sum).high, 7), (sum).low)
#define tkvi_store_wide(w, stride, r, k) tkvi_store_wide_128((int8_t *)(w) + 4 * (r), k)

typedef struct tkvi_limb_sums {
    int32x4_t high, low;
} tkvi_limb_sums;

TKVI_FLAT_128 tkvi_limb_sums tkvi_limbs_128(int32x4_t high, int32x4_t low) {
    tkvi_limb_sums x;
    x.high = high;
    x.low = low;
    return x;
}

TKVI_FLAT_128 void tkvi_store_four_128(int8_t *w, int16x4_t x) {
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(x, x))), 0);
    memcpy(w, &four, 4);
}

/* Stores 16 weights of a row. */
TKVI_FLAT_128 void tkvi_store_narrow_128(int8_t *w, const tkvi_i4 *k) {
    int i;
    for (i = 0; i < 4; i++, w += 16) tkvi_store_four_128(w, vmovn_s32(k[i]));
}

TKVI_FLAT_128 void tkvi_store_wide_128(int8_t *w, const tkvi_i4 *k) {
    int i;
    for (i = 0; i < 4; i++, w += 32) {
        const int16x4_t x = vmovn_s32(k[i]);
        tkvi_store_four_128(w, vshr_n_s16(x, 7));
        tkvi_store_four_128(w + 16, vand_s16(x, vdup_n_s16(127)));
    }
}

#ifdef __ARM_FEATURE_DOTPROD
#define TKVI_DOT_128(no_sign, sum, codes, quad, row)                                                         \
    ((no_sign)                                                                                               \
         ? vreinterpretq_s32_u32(vdotq_laneq_u32(vreinterpretq_u32_s32(sum), vreinterpretq_u8_s8(codes),     \
                                                 vreinterpretq_u8_s8(quad), row))                            \
         : vdotq_laneq_s32(sum, codes, quad, row))
#else
/* Sums of two products fit 16 bits: 2 * 128 * 127 for 8-bit codes, 2 * 127 * 127 for levels, and 2 * 63 * 255
 * without signs. */
TKVI_FLAT_128 tkvi_i4 tkvi_dot_128(const int no_sign, tkvi_i4 sum, int8x16_t c, int8x16_t w) {
    const uint8x16_t x = vreinterpretq_u8_s8(c), y = vreinterpretq_u8_s8(w);
    if (no_sign)
        return vreinterpretq_s32_u32(
            vpadalq_u16(vreinterpretq_u32_s32(sum),
                        vpaddq_u16(vmull_u8(vget_low_u8(x), vget_low_u8(y)), vmull_high_u8(x, y))));
    return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(c), vget_low_s8(w)), vmull_high_s8(c, w)));
}
#define TKVI_DOT_128(no_sign, sum, codes, quad, row)                                                         \
    tkvi_dot_128(no_sign, sum, codes, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(quad), row)))
#endif

#endif /* TKVI_NEON */

#endif /* TKVI_KERNELS_NEON_H */
