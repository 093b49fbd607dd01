/*
 * formats/subspace.h - SUBSPACE4, SUBSPACE2: an orthogonal basis, and coordinates in cfg.format.subspaces parts per
 * token, each part with its own minimum and maximum. Some caches call this method SQuat. The SQuat paper describes
 * another one (formats/squat.h).
 *
 *     y = rotate(x)  (core/rotate.h)    y^ = scale * code + zero, per token and part    x^ = rotate back (y^)
 *
 * Those caches need a learned basis. This basis needs no data, and makes the parts alike. Where a learned basis
 * works best, it is multiplied with such a rotation anyway (OSCAR, arXiv 2605.17757). Groups are coded as in KIVI,
 * with cfg.format.fit. With cfg.format.unrotated the basis is that of the channels. With one part, this is a
 * minimum and a maximum per token and head. The metadata add up: at head_dim 128, 2 bits in 4 parts are 3 bits a
 * value, and in 8 parts 4.
 *
 * Bytes: | codes [64 tokens][channels], low bits first, whole bytes | scale fp16 [64][parts] |
 *        zero fp16 [64][parts] |
 * Part p is coordinates dim p / parts up to dim (p + 1) / parts. Attention decodes (TKVI_AS_DECODED).
 */
#ifndef TKVI_FORMATS_SUBSPACE_H
#define TKVI_FORMATS_SUBSPACE_H

#include "formats/kivi.h"

static void tkvi_subspace_layout(tkvi_side *s) {
    s->groups = (int16_t)tkvi_min(s->options->subspaces, s->dim);
    s->fit = (int8_t)s->options->fit;
    s->rotate = !s->options->unrotated;
    s->code_bytes = (size_t)(TKVI_BLOCK * ((s->dim * s->format->bits + 7) / 8));
    s->meta_bytes = (size_t)(TKVI_BLOCK * s->groups * 4);
}

static void tkvi_subspace_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride,
                                 int n, uint8_t *dst) {
    size_t row = s->code_bytes / TKVI_BLOCK;
    int per = 8 / s->format->bits, t, c, g;
    (void)ops;
    TKVI_ASSERT(s->groups > 0);
    memset(dst, 0, s->bytes);
    for (t = 0; t < n; t++) {
        float y[TKV_MAX_HEAD_DIM];
        uint8_t code[TKV_MAX_HEAD_DIM], *to = dst + (size_t)t * row;
        for (c = 0; c < s->dim; c++)
            y[c] = tkvi_clampf(x[(size_t)t * stride + (size_t)c], -TKVI_F16_MAX, TKVI_F16_MAX);
        if (s->rotate) tkvi_rotate(y, s->dim);
        for (g = 0; g < s->groups; g++) {
            int from = s->dim * g / s->groups, end = s->dim * (g + 1) / s->groups;
            uint8_t *scale = dst + s->code_bytes + 2 * (t * s->groups + g);
            tkvi_kivi_group(y + from, end - from, s->format->bits, s->fit, code + from, scale,
                            scale + TKVI_BLOCK * s->groups * 2);
        }
        for (c = 0; c < s->dim; c++)
            to[c / per] = (uint8_t)(to[c / per] | code[c] << c % per * s->format->bits);
    }
}

static void tkvi_subspace_clear(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    const size_t row = 2 * (size_t)s->groups;
    tkvi_clear_rows(bytes, s->code_bytes / TKVI_BLOCK, dead_mask);
    tkvi_clear_rows(bytes + s->code_bytes, row, dead_mask);
    tkvi_clear_rows(bytes + s->code_bytes + TKVI_BLOCK * row, row, dead_mask);
}

static void tkvi_subspace_decode(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first,
                                 int n, float *x, size_t stride) {
    size_t row = s->code_bytes / TKVI_BLOCK;
    int bits = s->format->bits, per = 8 / bits, t, c, g;
    if (tkvi_decode_rows(s, ops, src, first, n, x, stride)) return;
    for (t = first; t < first + n; t++) {
        const uint8_t *codes = src + (size_t)t * row;
        float *y = x + (size_t)(t - first) * stride;
        for (g = 0; g < s->groups; g++) {
            const uint8_t *meta = src + s->code_bytes + 2 * (t * s->groups + g);
            float scale = tkvi_f16_to_f32(tkvi_load16(meta));
            float zero = tkvi_f16_to_f32(tkvi_load16(meta + TKVI_BLOCK * s->groups * 2));
            for (c = s->dim * g / s->groups; c < s->dim * (g + 1) / s->groups; c++) {
                int code = codes[c / per] >> c % per * bits & ((1 << bits) - 1);
                y[c] = tkvi_f32(tkvi_f32(scale * (float)code) + zero); /* the product is exact */
            }
        }
        if (s->rotate) tkvi_rotate_back(y, s->dim);
    }
}

static const tkvi_family tkvi_subspace_family = {
    TKVI_HAS_SUBSPACE ? NULL : "TKV_NO_SUBSPACE leaves this format out", NULL, TKVI_LEARNS_NOTHING};

#endif /* TKVI_FORMATS_SUBSPACE_H */
