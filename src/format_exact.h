/*
 * format_exact.h - F32, F16, BF16: tokens as they came. The hot tier, the sinks, and whole exact caches.
 *
 *   K and V: [token][channel], channels padded to 16 with zeros, values little-endian, no metadata
 *
 * Rows, so that an append is one contiguous write, a cut is a smaller count, and a side can have room for
 * fewer than 64 tokens (side->tokens): that of the sinks has just theirs.
 */
#ifndef TKVI_FORMAT_EXACT_H
#define TKVI_FORMAT_EXACT_H

#include "format.h"

static void tkvi_exact_layout(tkvi_side *s) {
    s->groups = 0;
    s->code_bytes = (size_t)(s->pad * s->tokens) * (size_t)(s->format->bits / 8);
}

typedef struct tkvi_exact_type {
    void (*store)(uint8_t *dst, float x);
    float (*load)(const uint8_t *src);
} tkvi_exact_type;

static void tkvi_store_f32(uint8_t *dst, float x) { tkvi_store32(dst, tkvi_bits(x)); }

static float tkvi_load_f32(const uint8_t *src) { return tkvi_from_bits(tkvi_load32(src)); }

static void tkvi_store_f16(uint8_t *dst, float x) { tkvi_store16(dst, tkvi_f32_to_f16(x)); }

static float tkvi_load_f16(const uint8_t *src) { return tkvi_f16_to_f32(tkvi_load16(src)); }

static void tkvi_store_bf16(uint8_t *dst, float x) { tkvi_store16(dst, tkvi_f32_to_bf16(x)); }

static float tkvi_load_bf16(const uint8_t *src) { return tkvi_bf16_to_f32(tkvi_load16(src)); }

static const tkvi_exact_type tkvi_type_f32 = {tkvi_store_f32, tkvi_load_f32};
static const tkvi_exact_type tkvi_type_f16 = {tkvi_store_f16, tkvi_load_f16};
static const tkvi_exact_type tkvi_type_bf16 = {tkvi_store_bf16, tkvi_load_bf16};

static void tkvi_exact_put(const tkvi_side *s, const tkvi_exact_type *type, const float *x, int token,
                           uint8_t *dst) {
    int size = s->format->bits / 8, c;
    uint8_t *row = dst + token * s->pad * size;
    for (c = 0; c < s->pad; c++) type->store(row + c * size, c < s->dim ? x[c] : 0.0f);
}

static void tkvi_exact_encode(const tkvi_side *s, const tkvi_exact_type *type, const float *x, size_t stride,
                              int n, uint8_t *dst) {
    int t;
    memset(dst, 0, s->bytes);
    for (t = 0; t < n; t++) tkvi_exact_put(s, type, x + (size_t)t * stride, t, dst);
}

static void tkvi_exact_decode(const tkvi_side *s, const tkvi_exact_type *type, const uint8_t *src, int first,
                              int n, float *x, size_t stride) {
    int size = s->format->bits / 8, t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++)
            x[(size_t)t * stride + (size_t)c] = type->load(src + ((first + t) * s->pad + c) * size);
}

#define TKVI_EXACT_CODEC_(t)                                                                                 \
    static void tkvi_##t##_encode(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst) {  \
        tkvi_exact_encode(s, &tkvi_type_##t, x, stride, n, dst);                                             \
    }                                                                                                        \
    static void tkvi_##t##_decode(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,        \
                                  size_t stride) {                                                           \
        tkvi_exact_decode(s, &tkvi_type_##t, src, first, n, x, stride);                                      \
    }                                                                                                        \
    static void tkvi_##t##_put(const tkvi_side *s, const float *x, int token, uint8_t *dst) {                \
        tkvi_exact_put(s, &tkvi_type_##t, x, token, dst);                                                    \
    }
TKVI_EXACT_CODEC_(f32)
TKVI_EXACT_CODEC_(f16)
TKVI_EXACT_CODEC_(bf16)
#undef TKVI_EXACT_CODEC_

#endif /* TKVI_FORMAT_EXACT_H */
