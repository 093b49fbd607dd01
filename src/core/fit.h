/*
 * core/fit.h - better scale and zero for a min/max group than minimum and maximum give (tkv_fit). Only the encoder
 * changes: bytes and decoding are those of KIVI.
 *
 *   TKV_FIT_CLIP      tries 12 ranges about the middle, from the full range down to 0.45 of it, and takes the one
 *                     with the least squared error. At 2 bits the error of Gaussian groups falls by a third. At
 *                     4 bits it hardly changes.
 *   TKV_FIT_NORM      codes stay; scale and zero change until mean and variance are those of the values.
 *                     Otherwise coarse groups decode with too much variance, and the softmax gives them too much
 *                     weight beside exact ones.
 *   TKV_FIT_UNBIASED  codes stay; scale and zero change until the mean is right and cov(x^, x) = var(x).
 *
 * Keep the sinks exact. All queries read these tokens most, and a clipped range damages them.
 *
 * Values become integers of 12 bits between minimum and maximum. All sums after that are integers, so every machine
 * gets the same result in any order.
 */
#ifndef TKVI_CORE_FIT_H
#define TKVI_CORE_FIT_H

#include "core/base.h"

#define TKVI_STEPS 4096 /* steps from the minimum of a range to its maximum */
#define TKVI_FIT_TRIES 12
#define TKVI_FIT_CUT 102 /* steps that each try cuts off at each end: a fortieth of the range */

/* A product that no compiler fuses into a sum: not inlined, or on the GPU an intrinsic that is never fused. */
#ifdef __CUDA_ARCH__
TKVI_FN float tkvi_product(float a, float b) { return __fmul_rn(a, b); }
#else
TKVI_FN TKVI_NOINLINE float tkvi_product(float a, float b) { return tkvi_f32(a * b); }
#endif

/* Code 0 .. top of the integer value u, when `cut` steps are cut off at each end of the range. by: tkvi_cut_by.
 * (u - cut) * by / 65536 is twice the code. */
TKVI_FN int tkvi_cut_by(int cut, int top) { return 131072 * top / (TKVI_STEPS - 2 * cut); }

TKVI_FN int tkvi_cut_code(int u, int cut, int by, int top) {
    int twice = u > cut ? (int)((uint32_t)(u - cut) * (uint32_t)by >> 16) : 0;
    return tkvi_min((twice + 1) / 2, top);
}

/* n^2 times the covariance of a and b, from their sums and the sum of their products. With a = b: the variance. */
TKVI_FN float tkvi_covariance(int64_t n, int64_t sum_a, int64_t sum_b, int64_t products) {
    return tkvi_f32((float)(n * products - sum_a * sum_b));
}

typedef struct tkvi_group { /* up to 256 values */
    int n;
    float low, step; /* value = low + step * (u + 1/2), approximately */
    int64_t sum_u, sum_uu;
    uint16_t u[TKV_MAX_HEAD_DIM];
} tkvi_group;

/* Opens a group of n values from low to high. Returns `inverse` for tkvi_group_value, or 0 if floats are too
 * coarse for this range. */
TKVI_FN float tkvi_group_open(tkvi_group *g, int n, float low, float high) {
    float range = tkvi_f32(high - low), inverse = tkvi_f32((float)TKVI_STEPS / range);
    g->n = n;
    g->low = low;
    g->step = tkvi_f32(range / (float)TKVI_STEPS);
    g->sum_u = g->sum_uu = 0;
    return g->step > 0.0f && tkvi_is_finite(inverse) ? inverse : 0.0f;
}

/* The integer of a value. Values outside low .. high count as the nearer end. */
TKVI_FN int tkvi_group_value(float x, float low, float high, float inverse) {
    int u = (int)tkvi_f32(tkvi_f32(tkvi_clampf(x, low, high) - low) * inverse);
    return tkvi_max(0, tkvi_min(TKVI_STEPS - 1, u));
}

/* Needs low < high. Returns 0 if floats are too coarse for the range. */
static int tkvi_group_init(tkvi_group *g, const float *x, int n, float low, float high) {
    float inverse = tkvi_group_open(g, n, low, high);
    int i;
    if (!(inverse > 0.0f)) return 0;
    for (i = 0; i < n; i++) {
        int u = tkvi_group_value(x[i], low, high, inverse);
        g->u[i] = (uint16_t)u;
        g->sum_u += u;
        g->sum_uu += u * u;
    }
    return 1;
}

/* Squared error of n values with `cut` steps cut off at each end, in a unit common to all cuts. */
TKVI_FN int64_t tkvi_cut_error(const uint16_t *u, int n, int cut, int top) {
    int range = TKVI_STEPS - 2 * cut, by = tkvi_cut_by(cut, top), i;
    int64_t sum = 0;
    for (i = 0; i < n; i++) {
        int code = tkvi_cut_code(u[i], cut, by, top);
        int error = (2 * (u[i] - cut) + 1) * top - 2 * code * range; /* below 2^22 */
        sum += (int64_t)error * error;
    }
    return sum;
}

/* Sets the range to that of try number `best`. */
TKVI_FN void tkvi_clip_to(const tkvi_group *g, int best, float *low, float *range) {
    if (best == 0) return;
    *low = tkvi_f32(*low + tkvi_product(g->step, (float)(best * TKVI_FIT_CUT)));
    *range = tkvi_product(g->step, (float)(TKVI_STEPS - 2 * best * TKVI_FIT_CUT));
}

static void tkvi_clip(const tkvi_group *g, int top, float *low, float *range) {
    int64_t least = tkvi_cut_error(g->u, g->n, 0, top);
    int k, best = 0;
    for (k = 1; k < TKVI_FIT_TRIES; k++) {
        int64_t error = tkvi_cut_error(g->u, g->n, k * TKVI_FIT_CUT, top);
        if (error < least) {
            least = error;
            best = k;
        }
    }
    tkvi_clip_to(g, best, low, range);
}

/* Stores the scale and zero that give codes with these sums the moments of the values. Both stay unchanged if
 * that is impossible, or if fp16 misses the zero by more than a quarter of the scale. */
TKVI_FN void tkvi_moments_of(const tkvi_group *g, int64_t sum_c, int64_t sum_cc, int64_t sum_cu, int unbiased,
                             uint8_t *scale_at, uint8_t *zero_at) {
    float var, var_c, cov, scale, zero, mean, off;
    uint16_t half;
    var = tkvi_covariance(g->n, g->sum_u, g->sum_u, g->sum_uu);
    var_c = tkvi_covariance(g->n, sum_c, sum_c, sum_cc);
    cov = tkvi_covariance(g->n, sum_c, g->sum_u, sum_cu);
    if (!(var_c > 0.0f)) return;
    TKVI_ASSERT(var > 0.0f && cov > 0.0f); /* codes rise with values, and the ends of the range differ */
    scale = unbiased ? tkvi_f32(var / cov) : sqrtf(tkvi_f32(var / var_c));
    half = tkvi_f32_to_f16(tkvi_product(scale, g->step));
    scale = tkvi_f16_to_f32(half);
    mean = tkvi_f32((float)(2 * g->sum_u + g->n) / (float)(2 * g->n));
    mean = tkvi_f32(g->low + tkvi_product(g->step, mean));
    zero = tkvi_f32(mean - tkvi_product(scale, tkvi_f32((float)sum_c / (float)g->n)));
    off = tkvi_f32(tkvi_f16_to_f32(tkvi_f32_to_f16(zero)) - zero);
    off = off < 0.0f ? -off : off;
    if (!(scale > 0.0f && off <= 0.25f * scale)) return;
    tkvi_store16(scale_at, half);
    tkvi_store16(zero_at, tkvi_f32_to_f16(zero + 0.0f));
}

static void tkvi_moments(const tkvi_group *g, const uint8_t *code, int unbiased, uint8_t *scale_at,
                         uint8_t *zero_at) {
    int64_t sum_c = 0, sum_cc = 0, sum_cu = 0;
    int i;
    for (i = 0; i < g->n; i++) {
        sum_c += code[i];
        sum_cc += code[i] * code[i];
        sum_cu += (int64_t)code[i] * g->u[i];
    }
    tkvi_moments_of(g, sum_c, sum_cc, sum_cu, unbiased, scale_at, zero_at);
}

#endif /* TKVI_CORE_FIT_H */
