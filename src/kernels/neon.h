/*
 * kernels/neon.h - the vector vocabulary for NEON on little-endian AArch64. kernels/simd_x86.h explains the operations.
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
#define TKVI_VECTORS
#include <arm_neon.h>

#define TKVI_FLAT_128 static inline __attribute__((always_inline))
#define TKVI_ISA_128 TKV_ISA_NEON
#define TKVI_NAME_128 "neon"

typedef float32x4_t tkvi_vf;
typedef int32x4_t tkvi_vi;
typedef uint8x16_t tkvi_vb;
typedef uint32x4_t tkvi_vm; /* a mask of lanes */

/* >>floats */
TKVI_FLAT_128 tkvi_vf tkvi_vf_load(const float *p) { return vld1q_f32(p); }
TKVI_FLAT_128 void tkvi_vf_store(float *p, tkvi_vf x) { vst1q_f32(p, x); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_splat(float x) { return vdupq_n_f32(x); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_add(tkvi_vf a, tkvi_vf b) { return vaddq_f32(a, b); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_sub(tkvi_vf a, tkvi_vf b) { return vsubq_f32(a, b); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_mul(tkvi_vf a, tkvi_vf b) { return vmulq_f32(a, b); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_madd(tkvi_vf a, tkvi_vf b, tkvi_vf c) { return vfmaq_f32(c, a, b); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_max(tkvi_vf a, tkvi_vf b) { return vmaxq_f32(a, b); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_abs(tkvi_vf x) { return vabsq_f32(x); }
TKVI_FLAT_128 float tkvi_vf_sum_across(tkvi_vf x) { return vaddvq_f32(x); }
TKVI_FLAT_128 float tkvi_vf_max_across(tkvi_vf x) { return vmaxvq_f32(x); }

TKVI_FLAT_128 tkvi_vf tkvi_vf_round(tkvi_vf x) { return vrndnq_f32(x); } /* ties to even */

/* x log2 e - n. log2 e has two floats, and FMA subtracts n from the exact first product. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_exponent_rest(tkvi_vf x, tkvi_vf n) {
    return vfmaq_f32(vfmaq_f32(vnegq_f32(n), x, vdupq_n_f32(1.44269502f)), x, vdupq_n_f32(1.92596299e-8f));
}

/* y where x >= least, 0 elsewhere. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_zero_below(tkvi_vf y, tkvi_vf x, float least) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(y), vcgeq_f32(x, vdupq_n_f32(least))));
}
TKVI_FLAT_128 tkvi_vf tkvi_vf_swap(tkvi_vf x) { return vrev64q_f32(x); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_load_twice(const float *p) {
    const float32x2_t x = vld1_f32(p);
    return vcombine_f32(vzip1_f32(x, x), vzip2_f32(x, x));
}

/* Transposes 4 x 4 floats. */
TKVI_FLAT_128 void tkvi_transpose_square(const float *x, int x_stride, float *y, int y_stride) {
    const float32x4x2_t a = vzipq_f32(vld1q_f32(x), vld1q_f32(x + 2 * x_stride));
    const float32x4x2_t b = vzipq_f32(vld1q_f32(x + x_stride), vld1q_f32(x + 3 * x_stride));
    vst1q_f32(y, vzip1q_f32(a.val[0], b.val[0]));
    vst1q_f32(y + y_stride, vzip2q_f32(a.val[0], b.val[0]));
    vst1q_f32(y + 2 * y_stride, vzip1q_f32(a.val[1], b.val[1]));
    vst1q_f32(y + 3 * y_stride, vzip2q_f32(a.val[1], b.val[1]));
}

#define tkvi_vf_sum4(to, v) vst1q_f32(to, vpaddq_f32(vpaddq_f32((v)[0], (v)[1]), vpaddq_f32((v)[2], (v)[3])))

#define tkvi_vf_load_finite_f16(p) vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)))

TKVI_FLAT_128 tkvi_vf tkvi_vf_load_f16(const uint8_t *p) { return tkvi_vf_load_finite_f16(p); }

#define tkvi_vf_load_bf16(p) vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16))

#define tkvi_vf_min(a, b) vminq_f32(a, b)
#define tkvi_vf_xor(a, b) vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)))
#define tkvi_vf_hide(x) __asm__("" : "+w"(x)) /* hides how x was computed: no reordering, no FMA */
#define tkvi_vf_store_f16(p, x) vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(x)))

/* Butterflies at distances 1 and 2 (core/rotate.h). Each lane becomes its partner plus or minus itself. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_butterflies(tkvi_vf x) {
    static const float odd[4] = {1.0f, -1.0f, 1.0f, -1.0f}, high[4] = {1.0f, 1.0f, -1.0f, -1.0f};
    x = vfmaq_f32(vrev64q_f32(x), x, vld1q_f32(odd));
    return vfmaq_f32(vextq_f32(x, x, 2), x, vld1q_f32(high));
}

/* >>integers */
TKVI_FLAT_128 tkvi_vi tkvi_vi_load(const int32_t *p) { return vld1q_s32(p); }
TKVI_FLAT_128 void tkvi_vi_store(int32_t *p, tkvi_vi x) { vst1q_s32(p, x); }
TKVI_FLAT_128 tkvi_vi tkvi_vi_splat(int32_t x) { return vdupq_n_s32(x); }
TKVI_FLAT_128 tkvi_vi tkvi_vi_add(tkvi_vi a, tkvi_vi b) { return vaddq_s32(a, b); }
TKVI_FLAT_128 tkvi_vi tkvi_vi_sub(tkvi_vi a, tkvi_vi b) { return vsubq_s32(a, b); }
TKVI_FLAT_128 tkvi_vi tkvi_vi_mul(tkvi_vi a, tkvi_vi b) { return vmulq_s32(a, b); }
TKVI_FLAT_128 int32_t tkvi_sum_ints_across_128(tkvi_vi x) { return vaddvq_s32(x); }
#define tkvi_vi_left(x, n) vshlq_n_s32(x, n)
TKVI_FLAT_128 tkvi_vi tkvi_vi_nearest(tkvi_vf x) { return vcvtnq_s32_f32(x); } /* ties to even */
TKVI_FLAT_128 tkvi_vf tkvi_vi_to_float(tkvi_vi x) { return vcvtq_f32_s32(x); }
TKVI_FLAT_128 tkvi_vf tkvi_vf_of_bits(tkvi_vi x) { return vreinterpretq_f32_s32(x); }

/* Four signed bytes. */
TKVI_FLAT_128 tkvi_vi tkvi_load_bytes4_128(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(x)))));
}

#define tkvi_vf_sqrt(x) vsqrtq_f32(x)
#define tkvi_vf_gt(a, b) vcgtq_f32(a, b)
#define tkvi_vf_where(mask, x)                                                                               \
    vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), mask)) /* 0 elsewhere */
#define tkvi_vm_any(mask) (vmaxvq_u32(mask) != 0)
#define tkvi_vf_select(mask, x, y) vbslq_f32(mask, x, y)
#define tkvi_vi_or(a, b) vorrq_s32(a, b)
#define tkvi_vi_and(a, b) vandq_s32(a, b)
#define tkvi_vi_right(x, n) vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), n))
#define tkvi_vi_min(a, b) vminq_s32(a, b)
#define tkvi_vi_max(a, b) vmaxq_s32(a, b)
#define tkvi_vi_count(x, a, b) vsubq_s32(x, vreinterpretq_s32_u32(vcgtq_s32(a, b))) /* x + (a > b) */
#define tkvi_vi_select(mask, x, y) vbslq_s32(mask, x, y)
#define tkvi_vi_of_bits(x) vreinterpretq_s32_f32(x)
#define tkvi_vi_trunc(x) vcvtq_s32_f32(x)
#define tkvi_vi_floor(x) vcvtmq_s32_f32(x)
#define tkvi_vi_load_u8(p) vandq_s32(tkvi_load_bytes4_128(p), vdupq_n_s32(255))
#define tkvi_vi_scatter4(p, step, x) ((void)(step), vst1q_u8(p, vreinterpretq_u8_s32(x)))

/* >>16-bit halves of 32-bit lanes, as kernels/simd_x86.h */
#define TKVI_HALVES_(x) vreinterpretq_s16_s32(x)
#define TKVI_OF_HALVES_(x) vreinterpretq_s32_s16(x)
#define tkvi_vh_splat(x) TKVI_OF_HALVES_(vdupq_n_s16((int16_t)(x)))
#define tkvi_vh_add(a, b) TKVI_OF_HALVES_(vaddq_s16(TKVI_HALVES_(a), TKVI_HALVES_(b)))
#define tkvi_vh_sub(a, b) TKVI_OF_HALVES_(vsubq_s16(TKVI_HALVES_(a), TKVI_HALVES_(b)))
#define tkvi_vh_min(a, b) TKVI_OF_HALVES_(vminq_s16(TKVI_HALVES_(a), TKVI_HALVES_(b)))
#define tkvi_vh_max(a, b) TKVI_OF_HALVES_(vmaxq_s16(TKVI_HALVES_(a), TKVI_HALVES_(b)))
#define tkvi_vh_pairs(a, b) vsliq_n_s32(a, b, 16)
#define tkvi_vh_pack(a, b) TKVI_OF_HALVES_(vcombine_s16(vmovn_s32(a), vmovn_s32(b)))
#define tkvi_vh_first(x) vmovl_s16(vget_low_s16(TKVI_HALVES_(x)))
#define tkvi_vh_second(x) vmovl_high_s16(TKVI_HALVES_(x))
#define tkvi_vh_zip1(x, y) TKVI_OF_HALVES_(vzip1q_s16(TKVI_HALVES_(x), TKVI_HALVES_(y)))
#define tkvi_vh_zip2(x, y) TKVI_OF_HALVES_(vzip2q_s16(TKVI_HALVES_(x), TKVI_HALVES_(y)))
#define tkvi_vi_dot(x, a, b) vaddq_s32(x, tkvi_vp_total(tkvi_vp_dot(tkvi_vp_zero(), a, b)))
#define tkvi_vi_add_pairs(x, a) vpadalq_s16(x, TKVI_HALVES_(a))
#define TKVI_CUTS 3 /* ranges of K columns that are tried at once: their sums stay in registers */
#define tkvi_vh_sum(sum, a) tkvi_vi_add_pairs(sum, a)
#define tkvi_vh_total(sum) (sum)
#define tkvi_vp tkvi_two_sums
#define tkvi_vp_zero() tkvi_two_sums_128(vdupq_n_s32(0), vdupq_n_s32(0))
#define tkvi_vp_dot(x, a, b)                                                                                 \
    tkvi_two_sums_128(vmlal_s16((x).low, vget_low_s16(TKVI_HALVES_(a)), vget_low_s16(TKVI_HALVES_(b))),      \
                      vmlal_high_s16((x).high, TKVI_HALVES_(a), TKVI_HALVES_(b)))

typedef struct tkvi_two_sums { /* of the lower and the upper half of vectors, or by the limbs of weights */
    int32x4_t low, high;
} tkvi_two_sums;

TKVI_FLAT_128 tkvi_two_sums tkvi_two_sums_128(int32x4_t low, int32x4_t high) {
    tkvi_two_sums x;
    x.low = low;
    x.high = high;
    return x;
}

TKVI_FLAT_128 tkvi_vi tkvi_vp_total(tkvi_two_sums x) { return vpaddq_s32(x.low, x.high); }

TKVI_FLAT_128 tkvi_vf tkvi_vf_div(tkvi_vf a, tkvi_vf b) {
    tkvi_vf_hide(b); /* not one reciprocal for several divisions */
    return vdivq_f32(a, b);
}

/* As tkvi_cut_code. The doubled high half of the product, rounded and shifted by 2. */
TKVI_FLAT_128 tkvi_vi tkvi_vh_cut(tkvi_vi u, tkvi_vi cut, tkvi_vi by, tkvi_vi top) {
    const uint16x8_t x = vqsubq_u16(vreinterpretq_u16_s32(u), vreinterpretq_u16_s32(cut));
    const int16x8_t y = vqdmulhq_s16(vreinterpretq_s16_u16(x), TKVI_HALVES_(by));
    return TKVI_OF_HALVES_(vminq_s16(vrshrq_n_s16(y, 2), TKVI_HALVES_(top)));
}

/* Looks up four lanes in a table of eight. */
TKVI_FLAT_128 tkvi_vi tkvi_vi_look_up8(const int32_t *table, tkvi_vi x) {
    const tkvi_vi at = vmlaq_s32(vdupq_n_s32(0x03020100), x, vdupq_n_s32(0x04040404));
    uint8x16x2_t bytes;
    bytes.val[0] = vreinterpretq_u8_s32(vld1q_s32(table));
    bytes.val[1] = vreinterpretq_u8_s32(vld1q_s32(table + 4));
    return vreinterpretq_s32_u8(vqtbl2q_u8(bytes, vreinterpretq_u8_s32(at)));
}

TKVI_FLAT_128 void tkvi_vi_transpose4(tkvi_vi *v) {
    const int64x2_t a = vreinterpretq_s64_s32(vzip1q_s32(v[0], v[1])),
                    b = vreinterpretq_s64_s32(vzip1q_s32(v[2], v[3]));
    const int64x2_t c = vreinterpretq_s64_s32(vzip2q_s32(v[0], v[1])),
                    d = vreinterpretq_s64_s32(vzip2q_s32(v[2], v[3]));
    v[0] = vreinterpretq_s32_s64(vzip1q_s64(a, b));
    v[1] = vreinterpretq_s32_s64(vzip2q_s64(a, b));
    v[2] = vreinterpretq_s32_s64(vzip1q_s64(c, d));
    v[3] = vreinterpretq_s32_s64(vzip2q_s64(c, d));
}

TKVI_FLAT_128 void tkvi_vb_transpose4(tkvi_vb *v) {
    tkvi_vi x[4];
    int i;
    for (i = 0; i < 4; i++) x[i] = vreinterpretq_s32_u8(v[i]);
    tkvi_vi_transpose4(x);
    for (i = 0; i < 4; i++) v[i] = vreinterpretq_u8_s32(x[i]);
}

TKVI_FLAT_128 tkvi_vi tkvi_vi_pack4(const tkvi_vi *v) {
    const int16x8_t a = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1]));
    const int16x8_t b = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
    return vreinterpretq_s32_s8(vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
}

TKVI_FLAT_128 tkvi_vi tkvi_vi_xor(tkvi_vi a, tkvi_vi b) { return veorq_s32(a, b); }

/* a b >> n, without signs. n: 1 .. 63. */
TKVI_FLAT_128 tkvi_vi tkvi_vi_mul_right(tkvi_vi a, tkvi_vi b, int n) {
    const uint32x4_t x = vreinterpretq_u32_s32(a), y = vreinterpretq_u32_s32(b);
    const uint64x2_t low = vshlq_u64(vmull_u32(vget_low_u32(x), vget_low_u32(y)), vdupq_n_s64(-n));
    const uint64x2_t high = vshlq_u64(vmull_high_u32(x, y), vdupq_n_s64(-n));
    return vreinterpretq_s32_u32(vuzp1q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high)));
}

/* Levels of E4M3, read as fp16. E4M3 has one exponent bit less, so no code becomes infinity or NaN. */
TKVI_FLAT_128 tkvi_vf tkvi_vf_load_e4m3(const uint8_t *p) {
    const int16x4_t x = vshl_n_s16(vmovn_s32(tkvi_load_bytes4_128(p)), 7);
    return vmulq_f32(vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(x, vdup_n_s16((int16_t)0xbfff)))),
                     vdupq_n_f32(4.0f));
}

/* Looks up four codes, the first from bit `from` of p on. */
TKVI_FLAT_128 tkvi_vf tkvi_load_table_floats_128(const float *level, const uint8_t *p, int from, int bits) {
    static const int32_t lane[4] = {0, 1, 2, 3};
    const uint8_t *b = (const uint8_t *)level;
    const int32x4_t shift = vmlaq_s32(vdupq_n_s32(-from), vld1q_s32(lane), vdupq_n_s32(-bits));
    uint8x16x4_t table;
    uint32x4_t x;
    uint32_t word;
    memcpy(&word, p, 4);
    table.val[0] = vld1q_u8(b);
    table.val[1] = vld1q_u8(b + 16);
    table.val[2] = vld1q_u8(b + 32);
    table.val[3] = vld1q_u8(b + 48);
    x = vandq_u32(vshlq_u32(vdupq_n_u32(word), shift), vdupq_n_u32(15));
    x = vmlaq_u32(vdupq_n_u32(0x03020100u), x, vdupq_n_u32(0x04040404u));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(x)));
}

/* >>bytes */
TKVI_FLAT_128 tkvi_vb tkvi_vb_load(const uint8_t *p) { return vld1q_u8(p); }
TKVI_FLAT_128 void tkvi_vb_store(uint8_t *p, tkvi_vb x) { vst1q_u8(p, x); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_splat(int x) { return vdupq_n_u8((uint8_t)x); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_and(tkvi_vb a, tkvi_vb b) { return vandq_u8(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_or(tkvi_vb a, tkvi_vb b) { return vorrq_u8(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_xor_128(tkvi_vb a, tkvi_vb b) { return veorq_u8(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_add(tkvi_vb a, tkvi_vb b) { return vaddq_u8(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_test_128(tkvi_vb a, tkvi_vb b) { return vtstq_u8(a, b); } /* 255 where a & b */
TKVI_FLAT_128 tkvi_vb tkvi_vb_look_up(tkvi_vb table, tkvi_vb x) { return vqtbl1q_u8(table, x); }

/* Interleave the first (zip1) or second (zip2) halves of a and b, by bytes or by pairs of bytes. */
TKVI_FLAT_128 tkvi_vb tkvi_vb_zip1(tkvi_vb a, tkvi_vb b) { return vzip1q_u8(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_zip2(tkvi_vb a, tkvi_vb b) { return vzip2q_u8(a, b); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_zip1_pairs(tkvi_vb a, tkvi_vb b) {
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
TKVI_FLAT_128 tkvi_vb tkvi_vb_zip2_pairs(tkvi_vb a, tkvi_vb b) {
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}

/* Shifts of bytes. n is 0 .. 7; where it is a constant, the compiler takes the immediate form. */
TKVI_FLAT_128 tkvi_vb tkvi_vb_left(tkvi_vb x, int n) { return vshlq_u8(x, vdupq_n_s8((int8_t)n)); }
TKVI_FLAT_128 tkvi_vb tkvi_vb_right(tkvi_vb x, int n) { return vshlq_u8(x, vdupq_n_s8((int8_t)-n)); }

/* x in lanes i with i < n, else y. */
TKVI_FLAT_128 tkvi_vi tkvi_vi_first(int n, tkvi_vi x, tkvi_vi y) {
    static const int32_t lane[4] = {0, 1, 2, 3};
    return vbslq_s32(vcltq_s32(vld1q_s32(lane), vdupq_n_s32(n)), x, y);
}

/* >>products, as kernels/simd_x86.h. Each limb has a sum of its own: weights are 128 * high + low, and low is
 * 0 .. 127. A row of weights is a lane of a vector, as in the drawing. `even` is the codes, and `odd` is not used. */
#define tkvi_use(x) __asm__("" : : "w"(x)); /* orders unrolled steps: gcc otherwise mixes them, and spills */
#define TKVI_HAS_NARROW 1
#define TKVI_BIAS 128 /* the product extension has no unsigned by signed bytes: 8-bit codes become signed */
#ifdef __ARM_FEATURE_DOTPROD
#define TKVI_K_PLANES 4
#define TKVI_V_VECTORS 4
#define TKVI_NARROW_VECTORS 4
#define tkvi_hide(sum) ((void)0)
#else /* a sum takes two registers */
#define TKVI_K_PLANES 2
#define TKVI_V_VECTORS 2
#define TKVI_NARROW_VECTORS 2
#define tkvi_hide(sum) __asm__("" : "+w"((sum).low), "+w"((sum).high)) /* as kernels/simd_avx512.inc */
#endif
#define TKVI_V_SPLIT 0

/* Weights of one limb: [position / 4][row][4]. */
#define TKVI_W_TILE 16
#define tkvi_weights(w, stride, r) vreinterpretq_u8_s8(vld1q_s8(w))
#define tkvi_store_weights_k(w, stride, r, k) tkvi_store_narrow_128((w) + 4 * (r), k)
#define tkvi_store_weights_v(w, stride, r, k) tkvi_store_narrow_128((w) + 4 * (r), k)

#ifdef __ARM_FEATURE_DOTPROD
#define tkvi_narrow_sums int32x4_t
#define tkvi_sums_zero() vdupq_n_s32(0)
#define TKVI_SUM_MAX 0x7fffffff
#define TKVI_V_SUM_MAX TKVI_SUM_MAX
#define tkvi_dot_k(sum, codes, u, r)                                                                         \
    TKVI_DOT_128(0, sum, vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(u), r)
#define tkvi_dot_v(sum, codes, u, r)                                                                         \
    TKVI_DOT_128(1, sum, vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(u), r)
#define tkvi_widen_k(sum) (sum)
#define tkvi_widen_v(sum) (sum)
#else /* 16 sums of 16 bits, which are added up when they are full. In V they have no sign. */
#define tkvi_narrow_sums tkvi_short_sums
#define tkvi_sums_zero() tkvi_short_sums_128(vdupq_n_s16(0), vdupq_n_s16(0))
#define TKVI_SUM_MAX 32767
#define TKVI_V_SUM_MAX 65535
#define tkvi_dot_k(sum, codes, u, r) tkvi_dot_short_128(sum, codes, TKVI_QUAD_128(u, r))
#define tkvi_dot_v(sum, codes, u, r) tkvi_dot_unsigned_128(sum, codes, TKVI_QUAD_128(u, r))
#define tkvi_widen_k(sum) vpaddq_s32(vpaddlq_s16((sum).low), vpaddlq_s16((sum).high))
#define tkvi_widen_v(sum)                                                                                    \
    vreinterpretq_s32_u32(vpaddq_u32(vpaddlq_u16(vreinterpretq_u16_s16((sum).low)),                          \
                                     vpaddlq_u16(vreinterpretq_u16_s16((sum).high))))
#define TKVI_QUAD_128(u, r) vreinterpretq_u8_s32(vdupq_laneq_s32(vreinterpretq_s32_u8(u), (r) % 4))

typedef struct tkvi_short_sums {
    int16x8_t low, high;
} tkvi_short_sums;

TKVI_FLAT_128 tkvi_short_sums tkvi_short_sums_128(int16x8_t low, int16x8_t high) {
    tkvi_short_sums x;
    x.low = low;
    x.high = high;
    return x;
}

TKVI_FLAT_128 tkvi_short_sums tkvi_dot_short_128(tkvi_short_sums sum, tkvi_vb a, tkvi_vb b) {
    const int8x16_t x = vreinterpretq_s8_u8(a), y = vreinterpretq_s8_u8(b);
    return tkvi_short_sums_128(vmlal_s8(sum.low, vget_low_s8(x), vget_low_s8(y)),
                               vmlal_high_s8(sum.high, x, y));
}

TKVI_FLAT_128 tkvi_short_sums tkvi_dot_unsigned_128(tkvi_short_sums sum, tkvi_vb a, tkvi_vb b) {
    const uint16x8_t low = vreinterpretq_u16_s16(sum.low), high = vreinterpretq_u16_s16(sum.high);
    return tkvi_short_sums_128(vreinterpretq_s16_u16(vmlal_u8(low, vget_low_u8(a), vget_low_u8(b))),
                               vreinterpretq_s16_u16(vmlal_high_u8(high, a, b)));
}
#endif
#define tkvi_dot_levels(sum, levels, u, r)                                                                   \
    TKVI_DOT_128(0, sum, vreinterpretq_s8_u8(levels), vreinterpretq_s8_u8(u), r)

/* Weights of two limbs: [position / 4][limb][row][4] bytes. */
#define TKVI_WIDE_TILE 16 /* in int16_t */
#define tkvi_wide_vb tkvi_vb
#define tkvi_wide_none() vdupq_n_u8(0)
#define tkvi_wide_sums tkvi_two_sums
#define tkvi_even(codes) (codes)
#define tkvi_odd(codes) (codes)
#define tkvi_wide_even(w, stride, r) vld1q_u8((const uint8_t *)(w))
#define tkvi_wide_odd(w, stride, r) vld1q_u8((const uint8_t *)(w) + 16)
#define tkvi_dot_wide(sum, even, odd, u, v, r)                                                               \
    ((void)(odd),                                                                                            \
     tkvi_two_sums_128(TKVI_DOT_128(0, (sum).low, vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(v), r),     \
                       TKVI_DOT_128(0, (sum).high, vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(u), r)))
#define tkvi_wide_zero() tkvi_vp_zero()
#define tkvi_widen_wide(sum) vaddq_s32(vshlq_n_s32((sum).high, 7), (sum).low)
#define tkvi_store_wide(w, stride, r, k) tkvi_store_wide_128((int8_t *)(w) + 4 * (r), k)

/* Rows in lanes (kernels/prefill.inc): a vector has the codes of four tokens. u, v: the weights' limbs. */
#define TKVI_ROW_VECTORS 4 /* the most vectors of rows in a pass */
#define TKVI_WIDE_VECTORS 2
#define TKVI_FLOAT_VECTORS 4
#define TKVI_ROW_TOKENS 4
#define TKVI_ROWS_NEW(j) ((j) == 0)
#define tkvi_rows_codes(x) vreinterpretq_u8_s32(vld1q_s32(x))
#define tkvi_rows_dot_k(sum, codes, w, j) tkvi_dot_k(sum, w, codes, j)
#define tkvi_rows_dot_v(sum, codes, w, j) tkvi_dot_v(sum, w, codes, j)
#define tkvi_rows_dot_wide(sum, even, odd, u, v, j)                                                          \
    ((void)(odd),                                                                                            \
     tkvi_two_sums_128(TKVI_DOT_128(0, (sum).low, vreinterpretq_s8_u8(v), vreinterpretq_s8_u8(even), j),     \
                       TKVI_DOT_128(0, (sum).high, vreinterpretq_s8_u8(u), vreinterpretq_s8_u8(even), j)))
#define tkvi_pack_rows_v(x) tkvi_pack_rows_k(x)
#define tkvi_pack_rows_even(x) tkvi_pack_limb_128(x, 1)
#define tkvi_pack_rows_odd(x) tkvi_pack_limb_128(x, 0)

/* The low bytes of four integers each, transposed: lane l has those of x[0][l] .. x[3][l]. */
TKVI_FLAT_128 tkvi_vb tkvi_pack_rows_k(const tkvi_vi *x) {
    static const uint8_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const int16x8_t a = vuzp1q_s16(vreinterpretq_s16_s32(x[0]), vreinterpretq_s16_s32(x[1]));
    const int16x8_t b = vuzp1q_s16(vreinterpretq_s16_s32(x[2]), vreinterpretq_s16_s32(x[3]));
    return vqtbl1q_u8(vuzp1q_u8(vreinterpretq_u8_s16(a), vreinterpretq_u8_s16(b)), vld1q_u8(order));
}

TKVI_FLAT_128 tkvi_vb tkvi_pack_limb_128(const tkvi_vi *x, const int high) {
    tkvi_vi y[4];
    int i;
    for (i = 0; i < 4; i++) y[i] = high ? vshrq_n_s32(x[i], 7) : vandq_s32(x[i], vdupq_n_s32(127));
    return tkvi_pack_rows_k(y);
}

TKVI_FLAT_128 void tkvi_store_four_128(int8_t *w, int16x4_t x) {
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(x, x))), 0);
    memcpy(w, &four, 4);
}

/* Stores 16 weights of a row. */
TKVI_FLAT_128 void tkvi_store_narrow_128(int8_t *w, const tkvi_vi *k) {
    int i;
    for (i = 0; i < 4; i++, w += 16) tkvi_store_four_128(w, vmovn_s32(k[i]));
}

TKVI_FLAT_128 void tkvi_store_wide_128(int8_t *w, const tkvi_vi *k) {
    int i;
    for (i = 0; i < 4; i++, w += 32) {
        const int16x4_t x = vmovn_s32(k[i]);
        tkvi_store_four_128(w, vshr_n_s16(x, 7));
        tkvi_store_four_128(w + 16, vand_s16(x, vdup_n_s16(127)));
    }
}

/* prefill.inc also names rows 4 to 7, in a branch that is never taken here. clang still wants a lane there. */
#ifdef __ARM_FEATURE_DOTPROD
#define TKVI_DOT_128(no_sign, sum, codes, quad, row)                                                         \
    ((no_sign)                                                                                               \
         ? vreinterpretq_s32_u32(vdotq_laneq_u32(vreinterpretq_u32_s32(sum), vreinterpretq_u8_s8(codes),     \
                                                 vreinterpretq_u8_s8(quad), (row) % 4))                      \
         : vdotq_laneq_s32(sum, codes, quad, (row) % 4))
#else
/* Sums of two products fit 16 bits: 2 * 128 * 127 for 8-bit codes, 2 * 127 * 127 for levels. */
TKVI_FLAT_128 tkvi_vi tkvi_dot_128(tkvi_vi sum, int8x16_t c, int8x16_t w) {
    return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(c), vget_low_s8(w)), vmull_high_s8(c, w)));
}
#define TKVI_DOT_128(no_sign, sum, codes, quad, row)                                                         \
    tkvi_dot_128(sum, codes, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(quad), (row) % 4)))
#endif

#endif /* TKVI_NEON */

#endif /* TKVI_KERNELS_NEON_H */
