/*
 * formats/float.h - FP8 (E4M3, E5M2) and FP4 (E2M1), core/minifloat.h.
 *
 *   FP8   one fp16 scale per token: its largest value becomes the largest finite level (448, 57344). A plain cast
 *         would lose values below 2^-9 (E4M3), and saturate at 448, where keys with a bias are. A scale of one
 *         byte would save 0.06 bits a value at head_dim 128, but needs a window. 8.125 bits a value at head_dim
 *         128, 8.25 at 64.
 *   FP4   the levels 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, with two scales as in NVFP4: E4M3 per 16
 *         channels, fp16 per token (NVFP4: a float per tensor). 4.625 bits a value at head_dim 128, 4.75 at 64.
 *
 * Mean square error as a part of the variance, for Gaussian values, and with one channel in 40 that is 12 times
 * larger:
 *
 *         FP4                                  .0090   .0083
 *         MXFP4 (32 channels, powers of two)   .0132   .032     4.25 bits
 *         fp16 scale per 32 channels           .0103   .015     4.5 bits
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
