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

/* >>products */
#define TKVI_MAX_PASS_128 8 /* weight rows in a pass: 16 sums in registers */
TKVI_FLAT_128 int tkvi_weight_rows_128(int n_limbs) { return n_limbs; }
typedef int8_t tkvi_weight;
typedef int8x16_t tkvi_codes_128;
typedef int8x16_t tkvi_quad_128;

TKVI_FLAT_128 tkvi_codes_128 tkvi_load_codes_128(const uint8_t *p) {
    return vreinterpretq_s8_u8(vld1q_u8(p));
}
TKVI_FLAT_128 tkvi_quad_128 tkvi_load_quad_128(const tkvi_weight *w) { return vld1q_s8(w); }

/* Stores the weights of two steps of a row; the second step is `further` weights on. With two limbs, a weight is
 * 128 * high + low, low is 0 .. 127, and the low limbs follow the high ones. */
TKVI_FLAT_128 void tkvi_store_weights_128(tkvi_weight *w, int further, tkvi_i4 a, tkvi_i4 b,
                                          const int n_limbs) {
    const int16x8_t k = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
    if (n_limbs == 2) {
        const int32x2_t high = vreinterpret_s32_s8(vshrn_n_s16(k, 7));
        const int32x2_t low = vreinterpret_s32_s8(vmovn_s16(vandq_s16(k, vdupq_n_s16(127))));
        vst1_s8(w, vreinterpret_s8_s32(vzip1_s32(high, low)));
        vst1_s8(w + further, vreinterpret_s8_s32(vzip2_s32(high, low)));
    } else {
        const int32x2_t x = vreinterpret_s32_s8(vmovn_s16(k));
        const int32_t first = vget_lane_s32(x, 0), second = vget_lane_s32(x, 1);
        memcpy(w, &first, 4);
        memcpy(w + further, &second, 4);
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
TKVI_FLAT_128 tkvi_i4 tkvi_dot_128(const int no_sign, tkvi_i4 sum, tkvi_codes_128 c, tkvi_codes_128 w) {
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
