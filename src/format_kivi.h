/*
 * format_kivi.h - Q8, KIVI4, KIVI3, KIVI2: asymmetric min/max in groups.
 * KIVI (arXiv 2402.02750, section 3): K per channel, groups of 64 or 32 tokens; V per token, groups of 64 or
 * 32 channels (the last one of a token may be shorter). Scale and zero are fp16, the zero is the real minimum.
 *
 *   scale = f16((max - min) / (2^bits - 1)),  zero = f16(min),  code = clamp(rne((x - zero) / scale))
 *   decoded = scale * code + zero             coded against the rounded scale and zero, half to even
 *
 * scale * code is exact in a float (11 + 8 bits), so the decoded value has one rounding and is the same with
 * and without FMA. A flat group has scale 0 and decodes to its fp16 value. Values saturate at +-65504.
 *
 * Bytes of one side (tiles as in tile.h, all of one width):
 *   K: | tiles | scale fp16 [group][pad channels] | zero fp16 [group][pad channels] |   groups = 64 / group
 *   V: | tiles | scale fp16 [group][64 tokens]    | zero fp16 [group][64 tokens]    |   groups = ceil(dim / group)
 * 4 bits in groups of 64: 4.5 bits a value; 2 bits: 2.5; with groups of 32: 5 and 3.
 */
#ifndef TKVI_FORMAT_KIVI_H
#define TKVI_FORMAT_KIVI_H

#include "format.h"

/* One group whose values stand together: codes, scale, zero. An empty one (tokens not there) has zeros. */
static void tkvi_kivi_group(const float *x, int n, int bits, uint8_t *code, uint8_t *scale_at,
                            uint8_t *zero_at) {
    float lo, hi, scale, zero, top = (float)((1 << bits) - 1);
    int i;
    if (n == 0) {
        tkvi_store16(scale_at, 0);
        tkvi_store16(zero_at, 0);
        return;
    }
    lo = hi = tkvi_clampf(x[0], -TKVI_F16_MAX, TKVI_F16_MAX);
    for (i = 1; i < n; i++) {
        float v = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        lo = v < lo ? v : lo;
        hi = v > hi ? v : hi;
    }
    tkvi_store16(scale_at, tkvi_f32_to_f16(tkvi_f32(tkvi_f32(hi - lo) / top)));
    tkvi_store16(zero_at, tkvi_f32_to_f16(lo + 0.0f)); /* -0 counts as 0, whichever came first */
    scale = tkvi_f16_to_f32(tkvi_load16(scale_at));
    zero = tkvi_f16_to_f32(tkvi_load16(zero_at));
    for (i = 0; i < n; i++) {
        float v = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        float y = scale > 0.0f ? tkvi_f32(tkvi_f32(v - zero) / scale) : 0.0f;
        code[i] = (uint8_t)tkvi_rne(tkvi_clampf(y, 0.0f, top));
    }
}

static void tkvi_kivi_k_layout(tkvi_side *s) {
    s->groups = TKVI_BLOCK / s->group;
    s->runs.n[s->format->bits] = (uint16_t)(s->pad / 4);
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = (size_t)(s->groups * s->pad * 4);
}

static void tkvi_kivi_v_layout(tkvi_side *s) {
    s->groups = (s->dim + s->group - 1) / s->group;
    s->runs.n[s->format->bits] = (uint16_t)(s->pad / 4); /* 4 tiles per 16 channels */
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = (size_t)(s->groups * TKVI_BLOCK * 4);
}

static void tkvi_kivi_k_encode(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst) {
    int bits = s->format->bits, i, r, g, t;
    uint8_t *scale = dst + s->code_bytes, *zero = scale + s->groups * s->pad * 2;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    memset(dst, 0, s->bytes);
    for (i = 0; i < s->pad / 4; i++) {
        uint8_t tile[TKVI_TILE_CODES];
        memset(tile, 0, sizeof tile);
        for (r = 0; r < 4; r++) {
            int position = 4 * i + r, channel = tkvi_channel(s, position);
            for (g = 0; g < s->groups && channel < s->dim; g++) {
                float column[TKVI_BLOCK];
                uint8_t code[TKVI_BLOCK];
                int first = g * s->group, count = tkvi_max(0, tkvi_min(n - first, s->group));
                int m = 2 * (g * s->pad + position);
                for (t = 0; t < count; t++) column[t] = x[(size_t)(first + t) * stride + (size_t)channel];
                tkvi_kivi_group(column, count, bits, code, scale + m, zero + m);
                for (t = 0; t < count; t++) tile[4 * (first + t) + r] = code[t];
            }
        }
        tkvi_pack_tile(dst, &at, bits, tile);
        tkvi_next_tile(&at, bits);
    }
}

static void tkvi_kivi_v_encode(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst) {
    int bits = s->format->bits, slab, q, g, t, c;
    uint8_t code[TKVI_BLOCK][TKV_MAX_HEAD_DIM];
    uint8_t *scale = dst + s->code_bytes, *zero = scale + s->groups * TKVI_BLOCK * 2;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    memset(dst, 0, s->bytes);
    memset(code, 0, sizeof code);
    for (t = 0; t < n; t++)
        for (g = 0; g < s->groups; g++) {
            int first = g * s->group, count = tkvi_min(s->dim - first, s->group),
                m = 2 * (g * TKVI_BLOCK + t);
            tkvi_kivi_group(x + (size_t)t * stride + (size_t)first, count, bits, code[t] + first, scale + m,
                            zero + m);
        }
    for (slab = 0; slab < s->pad / 16; slab++)
        for (q = 0; q < 4; q++) {
            uint8_t tile[TKVI_TILE_CODES];
            for (t = 0; t < 16; t++)
                for (c = 0; c < 16; c++) tile[t / 4 * 64 + 4 * c + t % 4] = code[16 * q + t][16 * slab + c];
            tkvi_pack_tile(dst, &at, bits, tile);
            tkvi_next_tile(&at, bits);
        }
}

static void tkvi_kivi_meta(const uint8_t *m, int n, tkvi_halves halves, float *scale, float *zero) {
    halves(m, n, scale);
    halves(m + 2 * n, n, zero);
}

static void tkvi_kivi_k_meta(const tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale,
                             float *zero) {
    tkvi_kivi_meta(src + s->code_bytes, s->groups * s->pad, halves, scale, zero);
}

static void tkvi_kivi_v_meta(const tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale,
                             float *zero) {
    tkvi_kivi_meta(src + s->code_bytes, s->groups * TKVI_BLOCK, halves, scale, zero);
}

/* Decoding of any format made of tiles, through its own `meta`. */
static float tkvi_level(const tkvi_side *s, int code) {
    return (float)(s->levels ? s->levels[code & 15] : code);
}

static void tkvi_tiles_k_decode(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                                size_t stride) {
    float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, r, t, position = 0;
    s->format->side[TKV_K].meta(s, src, tkvi_halves_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, position += 4) {
            uint8_t tile[TKVI_TILE_CODES];
            tkvi_unpack_tile(src, &at, width, tile);
            tkvi_next_tile(&at, width);
            for (r = 0; r < 4; r++) {
                int channel = tkvi_channel(s, position + r);
                for (t = first; t < first + n && channel < s->dim; t++) {
                    int m = t * s->groups / TKVI_BLOCK * s->pad + position + r;
                    float product = tkvi_f32(scale[m] * tkvi_level(s, tile[4 * t + r])); /* exact */
                    x[(size_t)(t - first) * stride + (size_t)channel] = tkvi_f32(product + zero[m]);
                }
            }
        }
}

static void tkvi_tiles_v_decode(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                                size_t stride) {
    float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, t, c, number = 0;
    s->format->side[TKV_V].meta(s, src, tkvi_halves_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, number++) {
            uint8_t tile[TKVI_TILE_CODES];
            int slab = number / 4, from = number % 4 * 16;
            tkvi_unpack_tile(src, &at, width, tile);
            tkvi_next_tile(&at, width);
            for (t = tkvi_max(first, from); t < tkvi_min(first + n, from + 16); t++)
                for (c = 16 * slab; c < tkvi_min(16 * slab + 16, s->dim); c++) {
                    int m = c / s->group * TKVI_BLOCK + t,
                        code = tile[(t - from) / 4 * 64 + 4 * (c - 16 * slab) + t % 4];
                    float product = tkvi_f32(scale[m] * tkvi_level(s, code));
                    x[(size_t)(t - first) * stride + (size_t)c] = tkvi_f32(product + zero[m]);
                }
        }
}

#endif /* TKVI_FORMAT_KIVI_H */
