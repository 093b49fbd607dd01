/*
 * formats/kivi.h - Q8, KIVI4, KIVI3, KIVI2: asymmetric min/max in groups.
 * KIVI (arXiv 2402.02750, section 3): K per channel, groups of 64 or 32 tokens; V per token, groups of 64 or
 * 32 channels (the last one of a token may be shorter). Scale and zero are fp16; the zero is the real minimum.
 *
 *   scale = f16((max - min) / (2^bits - 1)),  zero = f16(min),  code = clamp(rne((x - zero) / scale))
 *   decoded = scale * code + zero             coded against the rounded scale and zero, half to even
 *
 * scale * code is exact in a float (11 + 8 bits). So the decoded value has one rounding, and is the same with and
 * without FMA. A flat group has scale 0 and decodes to its fp16 value. Values saturate at +-65504. cfg.format.fit
 * chooses other scales and zeros (core/fit.h).
 *
 * Bytes of one side (tiles as in core/tile.h, all of one width):
 *   K: | tiles | scale fp16 [group][pad channels] | zero fp16 [group][pad channels] |   groups = 64 / group
 *   V: | tiles | scale fp16 [group][64 tokens]    | zero fp16 [group][64 tokens]    |   groups = ceil(dim / group)
 * 4 bits in groups of 64: 4.5 bits a value; 2 bits: 2.5; with groups of 32: 5 and 3.
 * k_scales = ..._CHANNEL: a channel of K has one group of 64 tokens, whatever group_size is. v_scales = ..._TOKEN: a
 * token of V has one group, 4.25 bits a value at head_dim 128. No kernel reads a scale per token of K, or per channel
 * of V. SUBSPACE formats with subspaces = 1 and unrotated = 1 have a scale and a zero per token on both sides.
 */
#ifndef TKVI_FORMATS_KIVI_H
#define TKVI_FORMATS_KIVI_H

#include "core/fit.h"
#include "formats/tiles.h"

static const tkvi_word tkvi_words_fit[] = {
    {"clip", TKV_FIT_CLIP}, {"norm", TKV_FIT_NORM}, {"unbiased", TKV_FIT_UNBIASED}, {NULL, 0}};

/* Stores scale and zero for codes 0 .. top. Gives both as rounded to fp16. */
TKVI_FN void tkvi_kivi_put(float low, float range, float top, uint8_t *scale_at, uint8_t *zero_at,
                           float *scale, float *zero) {
    uint16_t a = tkvi_f32_to_f16(tkvi_f32(range / top));
    uint16_t b = tkvi_f32_to_f16(low + 0.0f); /* -0 becomes 0: the order of values does not matter */
    tkvi_store16(scale_at, a);
    tkvi_store16(zero_at, b);
    *scale = tkvi_f16_to_f32(a);
    *zero = tkvi_f16_to_f32(b);
}

TKVI_FN int tkvi_kivi_code(float v, float scale, float zero, float top) {
    float y = scale > 0.0f ? tkvi_f32(tkvi_f32(v - zero) / scale) : 0.0f;
    return tkvi_rne(tkvi_clampf(y, 0.0f, top));
}

/* Codes one group of n >= 1 contiguous values: writes codes, scale and zero. */
static void tkvi_kivi_group(const float *x, int n, int bits, int fit, uint8_t *code, uint8_t *scale_at,
                            uint8_t *zero_at) {
    float lo, hi, range, scale, zero, top = (float)((1 << bits) - 1);
    tkvi_group group;
    int i;
    group.n = 0; /* silences compilers: the group is used only after tkvi_group_init */
    group.low = group.step = 0.0f;
    group.sum_u = group.sum_uu = 0;
    lo = hi = tkvi_clampf(x[0], -TKVI_F16_MAX, TKVI_F16_MAX);
    for (i = 1; i < n; i++) {
        float v = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        lo = v < lo ? v : lo;
        hi = v > hi ? v : hi;
    }
    range = tkvi_f32(hi - lo);
    if (fit && hi > lo && !tkvi_group_init(&group, x, n, lo, hi)) fit = 0;
    if (hi > lo && (fit & TKV_FIT_CLIP)) tkvi_clip(&group, (1 << bits) - 1, &lo, &range);
    tkvi_kivi_put(lo, range, top, scale_at, zero_at, &scale, &zero);
    for (i = 0; i < n; i++)
        code[i] = (uint8_t)tkvi_kivi_code(tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX), scale, zero, top);
    if (hi > lo && (fit & (TKV_FIT_NORM | TKV_FIT_UNBIASED)))
        tkvi_moments(&group, code, fit & TKV_FIT_UNBIASED, scale_at, zero_at);
}

static void tkvi_kivi_k_layout(tkvi_side *s) {
    s->fit = (int8_t)s->options->fit;
    if (s->options->k_scales == TKV_SCALES_CHANNEL) s->group = TKVI_BLOCK;
    s->groups = (int16_t)(TKVI_BLOCK / s->group); /* gcc warns of it with sanitizers */
    s->tiles.n[s->format->bits] = (uint16_t)(s->pad / 4);
    s->code_bytes = tkvi_tiles_bytes(&s->tiles);
    s->meta_bytes = (size_t)(s->groups * s->pad * 4);
}

static void tkvi_kivi_v_layout(tkvi_side *s) {
    s->fit = (int8_t)s->options->fit;
    if (s->options->v_scales == TKV_SCALES_TOKEN) s->group = TKV_MAX_HEAD_DIM;
    s->groups = (int16_t)((s->dim + s->group - 1) / s->group);
    s->tiles.n[s->format->bits] = (uint16_t)(s->pad / 4); /* 4 tiles per 16 channels */
    s->code_bytes = tkvi_tiles_bytes(&s->tiles);
    s->meta_bytes = (size_t)(s->groups * TKVI_BLOCK * 4);
}

/* Codes group g of one channel of K; n: tokens of the block. A group without tokens keeps its zero bytes. */
static void tkvi_kivi_column(const tkvi_side *s, const float *x, size_t stride, int n, int g, int position,
                             tkvi_codes code, uint8_t *meta) {
    float column[TKVI_BLOCK];
    uint8_t coded[TKVI_BLOCK], *scale = meta + 2 * (g * s->pad + position);
    int channel = tkvi_channel(s, position), first = g * s->group, t;
    n = tkvi_min(n - first, s->group);
    if (n < 1) return;
    for (t = 0; t < n; t++) column[t] = x[(size_t)(first + t) * stride + (size_t)channel];
    tkvi_kivi_group(column, n, s->format->bits, s->fit, coded, scale, scale + 2 * s->groups * s->pad);
    for (t = 0; t < n; t++) *tkvi_k_code(code, position, first + t) = coded[t];
}

/* Codes group g of one token of V. */
static void tkvi_kivi_row(const tkvi_side *s, const float *x, int g, int token, tkvi_codes code,
                          uint8_t *meta) {
    int first = g * s->group, count = tkvi_min(s->dim - first, s->group), c;
    uint8_t coded[TKV_MAX_HEAD_DIM], *scale = meta + 2 * (g * TKVI_BLOCK + token);
    tkvi_kivi_group(x + first, count, s->format->bits, s->fit, coded, scale,
                    scale + 2 * s->groups * TKVI_BLOCK);
    for (c = 0; c < count; c++) *tkvi_v_code(code, first + c, token) = coded[c];
}

static void tkvi_encode_groups_scalar(const tkvi_side *s, const float *x, size_t stride, int n,
                                      tkvi_codes code, uint8_t *meta) {
    int i, g;
    for (i = 0; i < s->pad && s->which == TKV_K; i++)
        for (g = 0; g < s->groups && tkvi_channel(s, i) < s->dim; g++)
            tkvi_kivi_column(s, x, stride, n, g, i, code, meta);
    for (i = 0; i < n && s->which == TKV_V; i++)
        for (g = 0; g < s->groups; g++) tkvi_kivi_row(s, x + (size_t)i * stride, g, i, code, meta);
}

static void tkvi_kivi_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride,
                             int n, uint8_t *dst) {
    TKVI_ALIGNED tkvi_codes code;
    memset(dst, 0, s->bytes);
    memset(code, 0, sizeof code);
    ops->encode_groups(s, x, stride, n, code, dst + s->code_bytes);
    tkvi_pack(s, ops, code, dst);
}

/* A group of tokens that has lost them all loses its scale and zero, too. */
static void tkvi_kivi_k_clear(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    const uint64_t group = ~(uint64_t)0 >> (64 - s->group);
    const size_t row = 2 * (size_t)s->pad;
    int g;
    tkvi_clear_tiles(s, dead_mask, bytes);
    for (g = 0; g < s->groups; g++) {
        uint8_t *scale = bytes + s->code_bytes + (size_t)g * row;
        if ((dead_mask >> g * s->group & group) != group) continue;
        memset(scale, 0, row);
        memset(scale + (size_t)s->groups * row, 0, row);
    }
}

static void tkvi_kivi_v_clear(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    int g;
    tkvi_clear_tiles(s, dead_mask, bytes);
    for (g = 0; g < 2 * s->groups; g++)
        tkvi_clear_rows(bytes + s->code_bytes + (size_t)(g * 2 * TKVI_BLOCK), 2, dead_mask);
}

static void tkvi_kivi_meta(const uint8_t *m, int n, const tkvi_simd_ops *ops, float *scale, float *zero) {
    ops->f16_to_f32(m, n, scale);
    ops->f16_to_f32(m + 2 * n, n, zero);
}

static void tkvi_kivi_k_meta(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *ops, float *scale,
                             float *zero) {
    tkvi_kivi_meta(src + s->code_bytes, s->groups * s->pad, ops, scale, zero);
}

static void tkvi_kivi_v_meta(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *ops, float *scale,
                             float *zero) {
    tkvi_kivi_meta(src + s->code_bytes, s->groups * TKVI_BLOCK, ops, scale, zero);
}

#endif /* TKVI_FORMATS_KIVI_H */
