/*
 * core/log_scale.h - scales in one byte: 16 steps to the octave, 16 octaves, and zero.
 *
 *   code 0: 0;  code 1 + i: m[i % 16] / 1024 * 2^(top - 16 + i / 16)      i = 0 .. 254
 *
 * m[k] = 1024 * 2^(k/16), rounded. A scale takes the code whose exact step, before that rounding, is nearest in
 * the logarithm. Borders between codes are 2^((2k+1)/32), rounded to the 23 mantissa bits of a float. A scale on a
 * border takes the upper code. Scales below the window have code 1, those above it 255; 0 stays 0.
 *
 * Every value has 11 significant bits, as an fp16 scale has, so that scale * code is exact in a float. Each side
 * has its own `top`, which moves the window to the scales of its head. No function calls log or exp: the code
 * compares and composes bits, so every machine gets the same result.
 */
#ifndef TKVI_CORE_LOG_SCALE_H
#define TKVI_CORE_LOG_SCALE_H

#include "core/base.h"

#define TKVI_LOG_TOP 96        /* tops are -96 .. 96 */
#define TKVI_LOG_TOP_DEFAULT 8 /* without statistics: scales from 2^-8 to 2^8 */

TKVI_CONSTANT uint16_t tkvi_log_mantissa[16] = {1024, 1069, 1117, 1166, 1218, 1272, 1328, 1387,
                                                1448, 1512, 1579, 1649, 1722, 1798, 1878, 1961};
/* The 23 mantissa bits from which the next step is nearer (in the logarithm). */
TKVI_CONSTANT uint32_t tkvi_log_border[16] = {183687,  563215,  959546,  1373424, 1805626, 2256963,
                                              2728283, 3220470, 3734447, 4271181, 4831678, 5416990,
                                              6028216, 6666503, 7333050, 8029107};

TKVI_FN float tkvi_log_value(int code, int top) {
    int i = code - 1;
    if (code == 0) return 0.0f;
    return tkvi_from_bits((uint32_t)(127 + top - 16 + i / 16) << 23 |
                          ((uint32_t)tkvi_log_mantissa[i % 16] - 1024u) << 13);
}

/* The nearest code. Scales outside the window take its end; only s <= 0 has code 0. */
TKVI_FN int tkvi_log_code(float s, int top) {
    uint32_t bits = tkvi_bits(s), mantissa = bits & 0x7fffffu;
    int octave = (int)(bits >> 23) - 127 - (top - 16), step, code;
    if (!(s > 0.0f)) return 0;
    step = (int)(mantissa >> 19); /* first guess: borders are not evenly spaced, so loops correct it */
    while (step > 0 && mantissa < tkvi_log_border[step - 1]) step--;
    while (step < 16 && mantissa >= tkvi_log_border[step]) step++;
    code = 1 + 16 * octave + step;
    return code < 1 ? 1 : code > 255 ? 255 : code;
}

/* >>logarithms in 1/8 octaves, powers in 1/16 octaves */
#define TKVI_LOG8_NONE (-1200)
TKVI_CONSTANT uint32_t tkvi_log8_border[8] = {371395,  1164243, 2028850, 2971711,
                                              3999908, 5121164, 6343903, 7677309};

/* Returns 8 log2(x), rounded, by comparing bits; TKVI_LOG8_NONE for 0, negative numbers and NaN. */
TKVI_FN int tkvi_log8(float x) {
    uint32_t bits = tkvi_bits(x);
    int step = 0;
    if (!(x > 0.0f)) return TKVI_LOG8_NONE;
    while (step < 8 && (bits & 0x7fffffu) >= tkvi_log8_border[step]) step++;
    return 8 * ((int)(bits >> 23) - 127) + step;
}

/* Returns 2^(k / 16) with 11 significant bits, for k from -2016 to 2015. */
TKVI_FN float tkvi_power16(int k) {
    return tkvi_from_bits((uint32_t)(k + 16 * 127) / 16u << 23 |
                          ((uint32_t)tkvi_log_mantissa[(k + 16 * 127) % 16] - 1024u) << 13);
}

/* A top for the largest known scale `most`, with about two octaves of headroom. Without a scale above 0 the top
 * is TKVI_LOG_TOP_DEFAULT. */
static int tkvi_log_top(float most) {
    int top = most > 0.0f ? (int)(tkvi_bits(most) >> 23) - 127 + 3 : TKVI_LOG_TOP_DEFAULT;
    return top < -TKVI_LOG_TOP ? -TKVI_LOG_TOP : top > TKVI_LOG_TOP ? TKVI_LOG_TOP : top;
}

#endif /* TKVI_CORE_LOG_SCALE_H */
