/*
 * formats/int.h - INT8, INT4: integers -127 .. 127 and -7 .. 7, with one fp16 scale per token and 64 or 32
 * channels (cfg.format.group_size): largest |x| / 127 or / 7. This is the symmetric grid of QuaRot and of most int8
 * caches. -128 and -8 are never written. A code is two's complement in a byte or half a byte. 8.25 and 4.25 bits a
 * value in groups of 64, 8.5 and 4.5 in groups of 32. Use cfg.format.rotate with INT4, because large channels ruin
 * their group otherwise.
 *
 * Bytes: formats/token.h.
 */
#ifndef TKVI_FORMATS_INT_H
#define TKVI_FORMATS_INT_H

#include "formats/token.h"

static int tkvi_int8_code(float y) { return tkvi_rne(tkvi_clampf(y, -127.0f, 127.0f)) & 255; }

static float tkvi_int8_level(int code) { return (float)tkvi_signed_byte(code); }

static int tkvi_int4_code(float y) { return tkvi_rne(tkvi_clampf(y, -7.0f, 7.0f)) & 15; }

static float tkvi_int4_level(int code) { return (float)((code ^ 8) - 8); }

static const tkvi_grid tkvi_grid_int8 = {8, 127.0f, 1, 0, tkvi_int8_code, tkvi_int8_level};
static const tkvi_grid tkvi_grid_int4 = {4, 7.0f, 1, 0, tkvi_int4_code, tkvi_int4_level};

static void tkvi_int8_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_int8); }

static void tkvi_int4_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_int4); }

#endif /* TKVI_FORMATS_INT_H */
