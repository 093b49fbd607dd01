/*
 * levels.h - numbers of the formats by their definitions, in double: float16, OCP floats, INT8 and INT4, RoPE.
 * Also squared errors of blocks, and inputs of several kinds. Several tests share it.
 */
#ifndef TKV_LEVELS_H
#define TKV_LEVELS_H

#include "kit.h"

/* >>numbers by their definitions; all steps are exact in double */
static inline double round_half_even(double x) { /* |x| < 2^50 */
    double down = floor(x), rest = x - down;
    if (rest > 0.5 || (rest > 0.499999999999 && rest < 0.500000000001 && fmod(down, 2.0) != 0.0)) down += 1.0;
    return down;
}

/* Rounds x to a float with `mantissa` bits and the smallest exponent `min_exponent`. Saturates at `max_value`. */
static inline double round_to_minifloat(double x, int mantissa, int min_exponent, double max_value) {
    double a = x < 0 ? -x : x, ulp;
    int e;
    if (!(a > 0)) return 0;
    (void)frexp(a, &e);
    if (--e < min_exponent) e = min_exponent;
    ulp = ldexp(1.0, e - mantissa);
    a = round_half_even(a / ulp) * ulp;
    if (a > max_value) a = max_value;
    return x < 0 ? -a : a;
}

static inline double round_to_f16(double x) { return round_to_minifloat(x, 10, -14, 65504.0); }

static inline double read_f16(const uint8_t *p) { /* a finite float16 */
    int h = p[0] | p[1] << 8, e = h >> 10 & 31, m = h & 1023;
    double x = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h >> 15 ? -x : x;
}

static const double fp4_values[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};

static inline double value_of_code(tkv_format f, int code) { /* by OCP, or two's complement */
    int e, m;
    double x;
    switch (f) {
    case TKV_INT8: return code < 128 ? code : code - 256;
    case TKV_INT4: return code < 8 ? code : code - 16;
    case TKV_FP4: return code & 8 ? -fp4_values[code & 7] : fp4_values[code];
    case TKV_FP8_E4M3:
        e = code >> 3 & 15, m = code & 7;
        x = e ? ldexp(8 + m, e - 7 - 3) : ldexp(m, 1 - 7 - 3);
        break;
    default: e = code >> 2 & 31, m = code & 3; x = e ? ldexp(4 + m, e - 15 - 2) : ldexp(m, 1 - 15 - 2);
    }
    return code & 128 ? -x : x;
}

static inline double max_value_of(tkv_format f) {
    return f == TKV_INT8 ? 127 : f == TKV_INT4 ? 7 : f == TKV_FP4 ? 6 : f == TKV_FP8_E4M3 ? 448 : 57344;
}

static inline double round_to_format(tkv_format f, double y) {
    double max_value = max_value_of(f);
    if (f == TKV_FP4) return round_to_minifloat(y, 1, 0, 6);
    if (f == TKV_FP8_E4M3) return round_to_minifloat(y, 3, -6, 448);
    if (f == TKV_FP8_E5M2) return round_to_minifloat(y, 2, -14, 57344);
    y = round_half_even(y);
    return y > max_value ? max_value : y < -max_value ? -max_value : y;
}

static inline float as_float(double x) {
    volatile float f = (float)x;
    return f;
}

/* >>RoPE */
static inline tkv_rope rope_of(int dim, double base, int interleaved, double scale) {
    tkv_rope r;
    memset(&r, 0, sizeof r);
    r.dim = dim;
    r.base = (float)base;
    r.interleaved = interleaved;
    r.scale = (float)scale;
    return r;
}

/* Applies RoPE in double. direction: 1 rotates, -1 rotates back. */
static inline void apply_rope_naively(const tkv_rope *r, double position, int direction, const float *x,
                                      double *y, int dim) {
    const double tau = 6.283185307179586477;
    int j, i;
    for (i = 0; i < dim; i++) y[i] = (double)x[i];
    for (j = 0; j < r->dim / 2; j++) {
        int a = r->interleaved ? 2 * j : j, b = r->interleaved ? 2 * j + 1 : j + r->dim / 2;
        double f = pow(r->base > 0 ? (double)r->base : 10000.0, -2.0 * j / r->dim), angle, c, s;
        if (r->frequencies) f = (double)r->frequencies[j];
        f *= r->scale > 0 ? (double)r->scale : 1.0;
        angle = fmod(position * f, tau) * direction;
        c = cos(angle);
        s = sin(angle);
        y[a] = (double)x[a] * c - (double)x[b] * s;
        y[b] = (double)x[b] * c + (double)x[a] * s;
    }
}

/* >>errors and inputs of blocks */
static inline double squared_error(const float *a, const float *b, int n) {
    double sum = 0.0;
    int i;
    for (i = 0; i < n; i++) sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sum;
}

static inline double sum_of_squares(const float *a, int n) {
    double sum = 0.0;
    int i;
    for (i = 0; i < n; i++) sum += (double)a[i] * (double)a[i];
    return sum;
}

/* Random numbers of kind 0 to 5. */
static inline void fill_block(tkv_rng *r, int kind, float *x, int n, int dim) {
    int i;
    for (i = 0; i < n * dim; i++) {
        double g = tkv_rng_gauss(r);
        switch (kind) {
        case 0: x[i] = (float)g; break;
        case 1: x[i] = (float)(g * (i % dim % 13 == 5 ? 40 : 1)); break; /* outlier channels */
        case 2: x[i] = (float)(g * 0.001); break;
        case 3: x[i] = (float)floor(g * 8) / 4; break; /* many ties */
        case 4: x[i] = (float)(g * 50000); break;      /* some saturate in float16 */
        default: x[i] = tkv_rng_below(r, 3) ? 0.0f : (float)g;
        }
    }
}

#endif /* TKV_LEVELS_H */
