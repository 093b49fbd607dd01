/*
 * formats/float.h - FP8 (E4M3, E5M2) and FP4 (E2M1), core/minifloat.h.
 *
 *   FP8   one fp16 scale per token: its largest value becomes the largest finite level (448, 57344). A plain
 *         cast would lose what is below 2^-9 (E4M3) and saturate at 448, where keys with a bias are; a scale
 *         of a byte would save 0.06 bits a value at head_dim 128 and needs a window. 8.125 bits a value
 *         there, 8.25 at 64.
 *   FP4   the levels 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, with two scales as in NVFP4: E4M3 per 16
 *         channels, fp16 per token (there: a float per tensor). 4.625 bits a value at head_dim 128, 4.75 at
 *         64. Mean square error of Gaussian values .0090 of the variance, with one channel in 40 being 12
 *         times as large .0083; MXFP4 (32 channels, powers of two) .0132 and .032 in 4.25 bits, fp16 per 32
 *         channels .0103 and .015 in 4.5.
 *
 * Bytes: formats/token.h.
 */
#ifndef TKVI_FORMATS_FLOAT_H
#define TKVI_FORMATS_FLOAT_H

#include "formats/token.h"

static const tkvi_grid tkvi_grid_e4m3 = {8, TKVI_E4M3_TOP, 0, 0, tkvi_e4m3_code, tkvi_e4m3_level};
static const tkvi_grid tkvi_grid_e5m2 = {8, TKVI_E5M2_TOP, 0, 0, tkvi_e5m2_code, tkvi_e5m2_level};
static const tkvi_grid tkvi_grid_fp4 = {4, 6.0f, 0, 1, tkvi_e2m1_code, tkvi_e2m1_level};

static void tkvi_e4m3_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_e4m3); }

static void tkvi_e5m2_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_e5m2); }

static void tkvi_fp4_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_fp4); }

#endif /* TKVI_FORMATS_FLOAT_H */
