/*
 * formats/token.h - formats that code each token by itself, on a symmetric grid: the shared code of INT8, INT4,
 * FP8 and FP4. A format is a grid (below) and a row in the table.
 *
 *   x^ = scale * level[code]                         scale: largest |x| over the largest level, in fp16
 *   x^ = scale * part * level[code]                  if the grid has parts: an E4M3 factor per 16 channels
 *
 * Products are exact in a float (11 + 4 + 2 or 11 + 8 bits). Two options change the bytes:
 *   cfg.format.rotate    the token is rotated by core/rotate.h before coding and rotated back after decoding. So
 *   large
 *                 channels do not cost the others their bits (QuaRot, arXiv 2404.00456).
 *   cfg.format.center_k  K only: the encoder subtracts the block's mean of each channel first, and decoding adds
 *   it last.
 *                 16 bits per channel and block, 1/4 bit a value. It needs no learning, and a block can be moved
 *                 or sent as it is.
 *
 * Decoding gives plain values, so attention needs no special kernel (TKVI_AS_DECODED). Values saturate at +-65504.
 *
 * Bytes of one side:
 *   | codes [64 tokens][channels] | scale fp16 [64][scales] | part [64][ceil(dim / 16)] | mean fp16 [dim] |
 * A row of codes is padded to a whole byte. Its codes follow one another, low bits first (tkvi_put_code).
 */
#ifndef TKVI_FORMATS_TOKEN_H
#define TKVI_FORMATS_TOKEN_H

#include "core/minifloat.h"
#include "core/format.h"

#define TKVI_PART 16 /* channels of a part */

static const tkvi_word tkvi_words_rotate[] = {{"k", TKV_ROTATE_K}, {"v", TKV_ROTATE_V}, {NULL, 0}};

typedef struct tkvi_grid {
    int bits;             /* of a code: 2 to 8 */
    float top;            /* the largest level */
    int per_group, parts; /* 1: a scale per cfg.format.group_size channels, 0: one a token; 1: has factors */
    int (*code)(float y); /* code of the nearest level, half to even; any finite y */
    float (*level)(int code);
} tkvi_grid;

static void tkvi_token_layout(tkvi_side *s, const tkvi_grid *grid) {
    s->grid = grid;
    s->rotate = s->options->rotate >> s->which & 1;
    s->center = s->options->center_k && s->which == TKV_K;
    if (!grid->per_group || tkvi_scales_of(s->options, s->which) == TKV_SCALES_TOKEN)
        s->group = TKV_MAX_HEAD_DIM;
    s->groups = (int16_t)((s->dim + s->group - 1) / s->group);
    s->code_bytes = (size_t)(TKVI_BLOCK * ((s->dim * grid->bits + 7) / 8));
    s->meta_bytes = (size_t)(TKVI_BLOCK * s->groups * 2);
    if (grid->parts) s->meta_bytes += (size_t)(TKVI_BLOCK * ((s->dim + TKVI_PART - 1) / TKVI_PART));
    if (s->center) s->meta_bytes += (size_t)(2 * s->dim);
}

/* Places in the bytes of a side. Offsets serve reading and writing alike. */
typedef struct tkvi_token_at {
    size_t row, scale, part, mean; /* row: bytes of a token's codes; others: offsets */
    int parts;                     /* per token */
} tkvi_token_at;

static tkvi_token_at tkvi_token_places(const tkvi_side *s) {
    tkvi_token_at at;
    at.parts = s->grid->parts ? (s->dim + TKVI_PART - 1) / TKVI_PART : 0;
    at.row = s->code_bytes / TKVI_BLOCK;
    at.scale = s->code_bytes;
    at.part = at.scale + (size_t)(TKVI_BLOCK * s->groups * 2);
    at.mean = at.part + (size_t)(TKVI_BLOCK * at.parts);
    return at;
}

static float tkvi_largest(const float *x, int n) {
    float most = 0.0f;
    int i;
    for (i = 0; i < n; i++) {
        float a = x[i] < 0.0f ? -x[i] : x[i];
        most = a > most ? a : most;
    }
    return most;
}

static void tkvi_token_mean(const float *x, size_t stride, int n, int dim, uint8_t *mean) {
    int c, t;
    for (c = 0; c < dim; c++) {
        float sum = 0.0f;
        for (t = 0; t < n; t++)
            sum = tkvi_f32(sum + tkvi_clampf(x[(size_t)t * stride + (size_t)c], -TKVI_F16_MAX, TKVI_F16_MAX));
        tkvi_store16(mean + 2 * c, tkvi_f32_to_f16(tkvi_f32(sum / (float)n) + 0.0f));
    }
}

/* Codes n channels with one scale; scale 0 gives codes 0. The caller has cleared the bytes. */
static void tkvi_token_codes(const tkvi_grid *grid, const float *y, int first, int n, float scale,
                             uint8_t *codes) {
    int c;
    if (!(scale > 0.0f)) return;
    for (c = first; c < first + n; c++)
        tkvi_put_code(codes, grid->bits, c, grid->code(tkvi_f32(y[c] / scale)));
}

static void tkvi_token_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride,
                              int n, uint8_t *dst) {
    const tkvi_grid *grid = s->grid;
    tkvi_token_at at = tkvi_token_places(s);
    int t, c, g, p;
    (void)ops;
    memset(dst, 0, s->bytes);
    if (s->center) tkvi_token_mean(x, stride, n, s->dim, dst + at.mean);
    for (t = 0; t < n; t++) {
        float y[TKV_MAX_HEAD_DIM];
        uint8_t *codes = dst + (size_t)t * at.row;
        for (c = 0; c < s->dim; c++) {
            y[c] = tkvi_clampf(x[(size_t)t * stride + (size_t)c], -TKVI_F16_MAX, TKVI_F16_MAX);
            if (s->center) y[c] = tkvi_f32(y[c] - tkvi_f16_to_f32(tkvi_load16(dst + at.mean + 2 * c)));
        }
        if (s->rotate) tkvi_rotate(y, s->dim);
        for (g = 0; g < s->groups; g++) {
            int first = g * s->group, count = tkvi_min(s->dim - first, s->group);
            uint8_t *scale_at = dst + at.scale + 2 * (t * s->groups + g);
            float most = tkvi_largest(y + first, count), scale;
            most = tkvi_f32(most / grid->top);
            if (grid->parts) most = tkvi_f32(most / TKVI_E4M3_TOP);
            tkvi_store16(scale_at, tkvi_f32_to_f16(most));
            scale = tkvi_f16_to_f32(tkvi_load16(scale_at));
            if (!grid->parts) tkvi_token_codes(grid, y, first, count, scale, codes);
            for (p = 0; p < at.parts && scale > 0.0f; p++) {
                int from = p * TKVI_PART, few = tkvi_min(s->dim - from, TKVI_PART);
                float part = tkvi_f32(tkvi_f32(tkvi_largest(y + from, few) / grid->top) / scale);
                int code = tkvi_e4m3_code(part);
                dst[at.part + (size_t)(t * at.parts + p)] = (uint8_t)code;
                tkvi_token_codes(grid, y, from, few, tkvi_f32(scale * tkvi_e4m3_level(code)), codes);
            }
        }
    }
}

static void tkvi_token_clear(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    const tkvi_token_at at = tkvi_token_places(s);
    tkvi_clear_rows(bytes, at.row, dead_mask);
    tkvi_clear_rows(bytes + at.scale, 2 * (size_t)s->groups, dead_mask);
    if (at.parts) tkvi_clear_rows(bytes + at.part, (size_t)at.parts, dead_mask);
}

static void tkvi_token_decode(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first,
                              int n, float *x, size_t stride) {
    const tkvi_grid *grid = s->grid;
    tkvi_token_at at = tkvi_token_places(s);
    float level[256];
    int t, c;
    if (tkvi_decode_rows(s, ops, src, first, n, x, stride)) return;
    for (c = 0; c < 1 << grid->bits; c++) level[c] = grid->level(c);
    for (t = first; t < first + n; t++) {
        const uint8_t *codes = src + (size_t)t * at.row;
        float *y = x + (size_t)(t - first) * stride, scale = 0.0f, part = 1.0f;
        for (c = 0; c < s->dim; c++) {
            const int code = tkvi_get_code(codes, grid->bits, c);
            if (c % s->group == 0)
                scale = tkvi_f16_to_f32(tkvi_load16(src + at.scale + 2 * (t * s->groups + c / s->group)));
            if (at.parts && c % TKVI_PART == 0)
                part = tkvi_e4m3_level(src[at.part + (size_t)(t * at.parts + c / TKVI_PART)]);
            y[c] = tkvi_f32(tkvi_f32(scale * part) * level[code]); /* exact */
        }
        if (s->rotate) tkvi_rotate_back(y, s->dim);
        for (c = 0; c < s->dim && s->center; c++)
            y[c] = tkvi_f32(y[c] + tkvi_f16_to_f32(tkvi_load16(src + at.mean + 2 * c)));
    }
}

static const tkvi_family tkvi_token_family = {
    TKVI_HAS_TOKEN_FORMATS ? NULL : "TKV_NO_TOKEN_FORMATS leaves this format out", NULL, TKVI_LEARNS_NOTHING};

#endif /* TKVI_FORMATS_TOKEN_H */
