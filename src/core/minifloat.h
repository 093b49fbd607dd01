/*
 * core/minifloat.h - floats of 4 and 8 bits: E2M1, E4M3, E5M2 (OCP 8-bit Floating Point 1.0; OCP Microscaling
 * Formats 1.0, section 5.3). Conversion uses the bits of the float, rounds half to even
 * and saturates.
 *
 *   | sign | exponent e | mantissa of m bits |
 *   e = 0: mantissa * 2^(1 - bias - m), else (2^m + mantissa) * 2^(e - bias - m)
 *
 * E4M3 and E5M2 levels are multiplied by 2^-6 and 2^-12. Their largest finite levels are then 7 and 14, so the fp16
 * scale beside them stays far from its subnormals. The encoder never writes the OCP codes for NaN and infinity. The
 * decoder reads such a code as the number that its bits would spell. Zero has one code.
 */
#ifndef TKVI_CORE_MINIFLOAT_H
#define TKVI_CORE_MINIFLOAT_H

#include "core/base.h"

typedef struct tkvi_minifloat {
    int bits, mantissa; /* bits without the sign; bits of the mantissa */
    int low;            /* exponent of the last place of subnormals */
    int most;           /* largest code */
} tkvi_minifloat;

static const tkvi_minifloat tkvi_e2m1 = {3, 1, -1, 7};
static const tkvi_minifloat tkvi_e4m3 = {7, 3, -9 - 6, 0x7e};
#define TKVI_E5M2_LOW (-16 - 12)
static const tkvi_minifloat tkvi_e5m2 = {7, 2, TKVI_E5M2_LOW, 0x7b};
#define TKVI_E4M3_TOP 7.0f
#define TKVI_E5M2_TOP 14.0f

static float tkvi_mini_level(const tkvi_minifloat *f, int code) {
    int exponent = (code & ((1 << f->bits) - 1)) >> f->mantissa, m = code & ((1 << f->mantissa) - 1);
    float place, x;
    if (exponent) m += 1 << f->mantissa;
    place = tkvi_from_bits((uint32_t)(127 + f->low + tkvi_max(exponent, 1) - 1) << 23);
    x = (float)m * place; /* exact */
    return code >> f->bits & 1 ? -x : x;
}

/* The nearest code. */
static int tkvi_mini_code(const tkvi_minifloat *f, float x) {
    uint32_t bits = tkvi_bits(x), a = bits & 0x7fffffffu;
    int octave = (int)(a >> 23) - 127 - (f->low + f->mantissa),
        code; /* octaves above the smallest normal number */
    if (octave < 0) octave = 0;
    if (octave > 32) code = f->most;
    else
        code = (octave << f->mantissa) +
               tkvi_rne(tkvi_from_bits(a) * tkvi_from_bits((uint32_t)(127 - f->low - octave) << 23));
    code = tkvi_min(code, f->most);
    return code && bits >> 31 ? code | 1 << f->bits : code;
}

static float tkvi_e2m1_level(int code) { return tkvi_mini_level(&tkvi_e2m1, code); }

static int tkvi_e2m1_code(float x) { return tkvi_mini_code(&tkvi_e2m1, x); }

static float tkvi_e4m3_level(int code) { return tkvi_mini_level(&tkvi_e4m3, code); }

static int tkvi_e4m3_code(float x) { return tkvi_mini_code(&tkvi_e4m3, x); }

static float tkvi_e5m2_level(int code) { return tkvi_mini_level(&tkvi_e5m2, code); }

static int tkvi_e5m2_code(float x) { return tkvi_mini_code(&tkvi_e5m2, x); }

#endif /* TKVI_CORE_MINIFLOAT_H */
