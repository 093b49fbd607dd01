/*
 * formats/r.h - R40 R30 R20 R15 R10, rotated values. A randomised Hadamard rotation makes the channels of a value
 * look Gaussian and alike (core/rotate.h), so one grid and one scale per token are enough.
 *
 *   x^ = scale * (code - (2^bits - 1) / 2)     whole bits: uniform grid, step best for a Gaussian
 *   x^ = scale * level[code], two channels     R15: 3 bits for a pair of channels, 8 points in two dimensions
 *
 * The steps are those of Max (IRE Trans. IT 6, 1960). The eight points are the Lloyd-Max quantizer of a Gaussian
 * pair: mean square error .201 of the variance; the two-bit grid has .119. The scale makes the norm unbiased:
 * |y|^2 / <y, grid point>, one log-scale byte (core/log_scale.h), 0 for a token of zeros. Attention sums rotated
 * values, and rotates the sum back once per head.
 *
 * The heads of a layer share its bits (core/allocate.h): the number in the name is the average. After the rotation,
 * arithmetic is in integers (12 bits of a token's largest value).
 *
 * Step by step, for one token. Numbers are floats unless they are integers, and each operation is rounded:
 *   1. y = x, cut to +-1e30, rotated (core/rotate.h); most = its largest |y|, at most 1e30. If most is not above
 *      1e-30, scale and codes are 0
 *   2. u = trunc(y * (2047 / most)), cut to +-2047; squares = sum(u^2), at least 1. Beyond 256 channels, 2047 is 1023
 *      here and below
 *   3. unit = 1 / sqrt(squares / head_dim)
 *   4. whole bits: code = floor(u * (unit / step of the table below)) + 2^bits / 2, cut to 0 .. 2^bits - 1;
 *      level = 2 code - (2^bits - 1)
 *   5. R15: slabs of 16 channels are paired, the first with the second and so on: channel c with c + 16, which
 *      counts as 0 beyond head_dim. a, b = floor(u * (unit * (16 * 80.2))) of the two; the code is the first of
 *      the points (x, y) with the largest ax + by - 8 (x^2 + y^2); level = 2x and 2y. A last slab without a
 *      partner follows step 4 with two bits, level = 2 * its level in the table below
 *   6. scale = most / 2047 * (2 squares / sum(u level)); R15 stores 64 times that, as its levels are small
 * Missing tokens have scale and codes 0. A pair takes one lane of a tile: slabs of three bits hold 32 channels,
 * and the two-bit slab is the last.
 *
 * Bytes: | tiles | scale, a byte per token [64] |     2 bits: 2.125 a value at head_dim 64
 */
#ifndef TKVI_FORMATS_R_H
#define TKVI_FORMATS_R_H

#include "core/allocate.h"
#include "formats/tiles.h"

/* The integer of a token's largest value: twice the sum of all squares fits 32 bits. */
TKVI_FN int tkvi_r_most(int dim) { return dim > 256 ? 1023 : 2047; }

/* Step of the best uniform grid for a unit Gaussian, by bits. */
TKVI_CONSTANT float tkvi_r_step[5] = {0.0f, 1.5960f, 0.9955f, 0.5860f, 0.3350f};

/* The eight points, where 127 stands for 1.584: first channels, then second channels. Then a two-bit grid on the
 * same scale, for a slab of 16 channels without a partner. */
#define TKVI_R_UNIT 80.2f
TKVI_CONSTANT int8_t tkvi_r_pairs[48] = {27,   -27, -78, 78,  32,  127, -32,  -127, 0, 0, 0, 0, 0, 0, 0, 0,
                                         27,   -27, 78,  -78, 127, 32,  -127, -32,  0, 0, 0, 0, 0, 0, 0, 0,
                                         -120, -40, 40,  120, 0,   0,   0,    0,    0, 0, 0, 0, 0, 0, 0, 0};

static void tkvi_r_layout(tkvi_side *s) {
    int slabs = s->pad / 16;
    if (!s->has_share) s->half_bits = (int8_t)(s->format->bits / 2);
    memset(&s->tiles, 0, sizeof s->tiles);
    if (s->half_bits == 3) {
        s->tiles.n[3] = (uint16_t)(slabs / 2 * 4);
        s->tiles.n[2] = (uint16_t)(slabs % 2 * 4);
        s->levels = tkvi_r_pairs;
        s->pairs = 1;
    } else {
        s->tiles.n[s->half_bits / 2] = (uint16_t)(slabs * 4);
    }
    s->groups = 1;
    s->group = TKV_MAX_HEAD_DIM;
    s->code_bytes = tkvi_tiles_bytes(&s->tiles);
    s->meta_bytes = TKVI_BLOCK;
}

/* The largest integer <= x, for |x| < 2^30. */
TKVI_FN int tkvi_floor(float x) {
    int i = (int)x;
    return i - ((float)i > x);
}

/* Code of a pair of channels. fine: 1/16 levels per integer. Adds u * level of both channels to the sum (step 5). */
TKVI_FN int tkvi_r_pair(int u, int v, float fine, int32_t *sum) {
    int a = tkvi_floor(tkvi_f32((float)u * fine)),
        b = tkvi_floor(tkvi_f32((float)v * fine)); /* a, b in 1/16 of a level */
    int best = 0, most = -(1 << 30), k;
    for (k = 0; k < 8; k++) {
        int x = tkvi_r_pairs[k], y = tkvi_r_pairs[16 + k], score = a * x + b * y - 8 * (x * x + y * y);
        if (score > most) {
            most = score;
            best = k;
        }
    }
    *sum += 2 * (u * tkvi_r_pairs[best] + v * tkvi_r_pairs[16 + best]);
    return best;
}

/* Code of one channel on the grid of 2^bits points. pairs: 1: levels on the scale of pairs. Adds u * level to
 * the sum (steps 4, 5). */
TKVI_FN int tkvi_r_grid(int u, float fine, int bits, int pairs, int32_t *sum) {
    int top = (1 << bits) - 1, v = tkvi_floor(tkvi_f32((float)u * fine)) + (top + 1) / 2;
    v = tkvi_max(0, tkvi_min(top, v));
    *sum += pairs ? 2 * u * tkvi_r_pairs[32 + v] : u * (2 * v - top);
    return v;
}

/* One over the root mean square of a token's integers. */
TKVI_FN float tkvi_r_unit(int32_t squares, int dim) {
    return tkvi_f32(1.0f / tkvi_f32(sqrtf(tkvi_f32(tkvi_f32((float)squares) / (float)dim))));
}

TKVI_FN float tkvi_r_fine(float unit) { return tkvi_f32(unit * (16.0f * TKVI_R_UNIT)); }

/* Writes the codes of token t with the integers u. Returns the sum of u * level (steps 4 to 6). */
static int32_t tkvi_r_codes(const tkvi_side *s, const int16_t *u, float unit, int t, tkvi_codes code) {
    float fine = tkvi_r_fine(unit);
    int32_t sum = 0;
    int c, lane = 0, bits = s->pairs ? 2 : s->half_bits / 2, pairs = s->pairs ? s->pad / 32 * 32 : 0;
    for (c = 0; c < pairs; c += c % 32 == 15 ? 17 : 1) /* channels c and c + 16 */
        *tkvi_v_code(code, lane++, t) = (uint8_t)tkvi_r_pair(u[c], u[c + 16], fine, &sum);
    fine = tkvi_f32(unit / tkvi_r_step[bits]);
    for (c = pairs; c < s->dim; c++)
        *tkvi_v_code(code, lane++, t) = (uint8_t)tkvi_r_grid(u[c], fine, bits, s->pairs, &sum);
    return sum;
}

/* The factor from a token's values to integers, from its largest |value|; 0 if that is not above 1e-30. */
TKVI_FN float tkvi_r_by(float most, int dim) {
    return most > 1e-30f ? tkvi_f32((float)tkvi_r_most(dim) / most) : 0.0f;
}

TKVI_FN int tkvi_r_integer(float y, float by, int dim) {
    return tkvi_max(-tkvi_r_most(dim), tkvi_min(tkvi_r_most(dim), (int)tkvi_f32(y * by)));
}

/* The scale of a token, from its largest |value|, the sum of squares, and the result of tkvi_r_codes. */
TKVI_FN float tkvi_r_scale(float most, int32_t squares, int32_t sum, int dim) {
    float step = tkvi_f32(most / (float)tkvi_r_most(dim));
    step = tkvi_f32(step * tkvi_f32(tkvi_f32((float)(2 * squares)) / tkvi_f32((float)sum)));
    return most > 1e-30f ? step : 0.0f;
}

/* Writes the codes of token t with the rotated values y. Returns its scale. */
static float tkvi_r_rotated(const tkvi_side *s, const float *y, int t, tkvi_codes code) {
    float most = 0.0f, by;
    int16_t u[TKV_MAX_HEAD_DIM];
    int32_t squares = 0, sum;
    int c;
    memset(u, 0, sizeof u);
    for (c = 0; c < s->dim; c++) {
        float a = fabsf(y[c]); /* no branch: signs are unpredictable */
        most = a > most ? a : most;
    }
    most = most < 1e30f ? most : 1e30f;
    by = tkvi_r_by(most, s->dim);
    for (c = 0; c < s->dim; c++) {
        u[c] = (int16_t)tkvi_r_integer(y[c], by, s->dim);
        squares += u[c] * u[c];
    }
    if (squares == 0) squares = 1;
    sum = tkvi_r_codes(s, u, tkvi_r_unit(squares, s->dim), t, code);
    return tkvi_r_scale(most, squares, sum, s->dim);
}

/* The same for values before the rotation. */
static float tkvi_r_token(const tkvi_side *s, const float *x, int t, tkvi_codes code) {
    float y[TKV_MAX_HEAD_DIM];
    int c;
    for (c = 0; c < s->dim; c++) y[c] = tkvi_clampf(x[c], -1e30f, 1e30f);
    tkvi_rotate(y, s->dim);
    return tkvi_r_rotated(s, y, t, code);
}

static void tkvi_encode_v_tokens_scalar(const tkvi_side *s, const float *x, size_t stride, int n,
                                        tkvi_codes code, float *scale) {
    int t;
    for (t = 0; t < n; t++) scale[t] = tkvi_r_token(s, x + (size_t)t * stride, t, code);
}

/* Clears codes of token t in lanes without a value. Returns its scale as stored. */
TKVI_FN float tkvi_r_finish(const tkvi_side *s, int t, int n, tkvi_codes code, float scale) {
    int lanes = s->pairs ? s->tiles.n[3] * 4 + s->tiles.n[2] * 4 : s->pad;
    int plain = s->pairs && !s->tiles.n[2] ? lanes : lanes - (s->pad - s->dim), l;
    for (l = t < n && scale > 0.0f ? plain : 0; l < lanes; l++) *tkvi_v_code(code, l, t) = 0;
    return s->pairs ? tkvi_f32(scale * 64.0f) : scale; /* pairs have small steps: 64 fits the same window */
}

static void tkvi_r_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride, int n,
                          uint8_t *dst) {
    TKVI_ALIGNED tkvi_codes code;
    TKVI_ALIGNED float scale[TKVI_BLOCK];
    int t;
    memset(dst, 0, s->bytes);
    memset(scale, 0, sizeof scale);
    ops->encode_v_tokens(s, x, stride, n, code, scale);
    for (t = 0; t < TKVI_BLOCK; t++) scale[t] = tkvi_r_finish(s, t, n, code, scale[t]);
    ops->encode_log_scales(scale, TKVI_BLOCK, s->top, dst + s->code_bytes);
    tkvi_pack(s, ops, code, dst);
}

static void tkvi_r_clear(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    tkvi_clear_tiles(s, dead_mask, bytes);
    tkvi_clear_rows(bytes + s->code_bytes, 1, dead_mask);
}

static void tkvi_r_meta(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *ops, float *scale,
                        float *zero) {
    const float middle = s->levels ? 0.0f : 0.5f * (float)((1 << s->half_bits / 2) - 1);
    int t, k;
    ops->decode_log_scales(src + s->code_bytes, TKVI_BLOCK, s->top, scale);
    for (t = 0; t < TKVI_BLOCK; t += 16) { /* local array of 16: vectorises also at -O2 */
        float x[16];
        for (k = 0; k < 16 && s->pairs; k++) scale[t + k] *= 1.0f / 64.0f;
        for (k = 0; k < 16; k++) x[k] = -middle * scale[t + k];
        for (k = 0; k < 16; k++) zero[t + k] = x[k];
    }
}

/* Writes |v|^2 of the 64 tokens of a block, from their scales alone. It is off by a tenth or so. A token of unit
 * variance has scale step / (1 - D), where D is the error of the grid. So each square below is ((1 - D) / step)^2. */
static void tkvi_r_squares(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, float *squares) {
    static const float by_half_bits[9] = {0.0f, 0.0f, 0.159f, 4106.0f, 0.783f, 0.0f, 2.70f, 0.0f, 8.71f};
    const float unit = by_half_bits[s->half_bits] * (float)s->dim;
    TKVI_ALIGNED float scale[TKVI_BLOCK], zero[TKVI_BLOCK];
    int t;
    tkvi_r_meta(s, src, ops, scale, zero);
    for (t = 0; t < TKVI_BLOCK; t++) squares[t] = scale[t] * scale[t] * unit;
}

#endif /* TKVI_FORMATS_R_H */
