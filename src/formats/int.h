/*
 * formats/int.h - INT8, INT4: integers -127 .. 127 and -7 .. 7, with one fp16 scale per token and 64 or 32
 * channels (cfg.format.group_size): largest |x| / 127 or / 7. This is the symmetric grid of QuaRot and of most int8
 * caches. -128 and -8 are never written. A code is two's complement. 8.25 and 4.25 bits a
 * value in groups of 64, 8.5 and 4.5 in groups of 32. Use cfg.format.rotate with INT4, because large channels ruin
 * their group otherwise.
 *
 * Two options change the bytes:
 *   cfg.format.int_bits              both formats have codes of so many bits, 2 to 8: -1 .. 1 to -127 .. 127
 *   k_scales, v_scales = ..._TOKEN   a token of a head has one scale: INT4 takes 4.125 bits a value at head_dim 128
 *
 * Attention and reading have vectors for codes of 2, 3, 4 and 8 bits. Others are decoded one by one.
 *
 * Bytes: formats/token.h.
 */
#ifndef TKVI_FORMATS_INT_H
#define TKVI_FORMATS_INT_H

#include "formats/token.h"

static int tkvi_int_code(float y, int bits) {
    const float top = (float)((1 << (bits - 1)) - 1);
    return tkvi_rne(tkvi_clampf(y, -top, top)) & ((1 << bits) - 1);
}

static float tkvi_int_level(int code, int bits) {
    const int sign = 1 << (bits - 1);
    return (float)((code ^ sign) - sign);
}

#define TKVI_INT_GRID_(bits)                                                                                 \
    static int tkvi_int##bits##_code(float y) { return tkvi_int_code(y, bits); }                             \
    static float tkvi_int##bits##_level(int code) { return tkvi_int_level(code, bits); }
TKVI_INT_GRID_(2)
TKVI_INT_GRID_(3)
TKVI_INT_GRID_(4)
TKVI_INT_GRID_(5)
TKVI_INT_GRID_(6)
TKVI_INT_GRID_(7)
TKVI_INT_GRID_(8)
#undef TKVI_INT_GRID_

static const tkvi_grid tkvi_int_grids[] = {/* by bits - 2 */
                                           {2, 1.0f, 1, 0, tkvi_int2_code, tkvi_int2_level},
                                           {3, 3.0f, 1, 0, tkvi_int3_code, tkvi_int3_level},
                                           {4, 7.0f, 1, 0, tkvi_int4_code, tkvi_int4_level},
                                           {5, 15.0f, 1, 0, tkvi_int5_code, tkvi_int5_level},
                                           {6, 31.0f, 1, 0, tkvi_int6_code, tkvi_int6_level},
                                           {7, 63.0f, 1, 0, tkvi_int7_code, tkvi_int7_level},
                                           {8, 127.0f, 1, 0, tkvi_int8_code, tkvi_int8_level}};

static void tkvi_int_layout(tkvi_side *s) {
    const int bits = s->options->int_bits ? s->options->int_bits : s->format->bits;
    tkvi_token_layout(s, &tkvi_int_grids[bits - 2]);
}

#endif /* TKVI_FORMATS_INT_H */
