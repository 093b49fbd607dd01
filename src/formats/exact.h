/*
 * formats/exact.h - F32, F16, BF16: tokens as plain floats. For the hot tier, the sinks, and whole exact caches.
 *
 *   K and V: [token][channel], channels padded to 16 with zeros, values little-endian, no metadata
 *
 * In rows, an append is one contiguous write, and cutting off tokens only lowers a count. A side can also hold fewer
 * than 64 tokens (side->tokens): the side of the sinks has space for the sinks only.
 */
#ifndef TKVI_FORMATS_EXACT_H
#define TKVI_FORMATS_EXACT_H

#include "core/format.h"

static void tkvi_exact_layout(tkvi_side *s) {
    s->groups = 0;
    s->code_bytes = (size_t)(s->pad * s->tokens) * (size_t)(s->format->bits / 8);
}

static void tkvi_store_f32(uint8_t *dst, float x) { tkvi_store32(dst, tkvi_bits(x)); }

static float tkvi_load_f32(const uint8_t *src) { return tkvi_from_bits(tkvi_load32(src)); }

static float tkvi_load_f16(const uint8_t *src) { return tkvi_f16_to_f32(tkvi_load16(src)); }

static void tkvi_store_bf16(uint8_t *dst, float x) { tkvi_store16(dst, tkvi_f32_to_bf16(x)); }

static float tkvi_load_bf16(const uint8_t *src) { return tkvi_bf16_to_f32(tkvi_load16(src)); }

/* Write and read n values of a row. Reading goes 16 at a time into a local array: gcc -O2 vectorises only loops
 * of known length whose target cannot alias other memory. */
#define TKVI_EXACT_ROW_(t, size)                                                                             \
    static void tkvi_##t##_save(const tkvi_simd_ops *ops, const float *x, int n, uint8_t *dst) {             \
        int c;                                                                                               \
        (void)ops;                                                                                           \
        for (c = 0; c < n; c++) tkvi_store_##t(dst + c * (size), x[c]);                                      \
    }                                                                                                        \
    static void tkvi_##t##_read(const tkvi_simd_ops *ops, const uint8_t *src, int n, float *x) {             \
        float y[16];                                                                                         \
        int c, k;                                                                                            \
        (void)ops;                                                                                           \
        for (c = 0; c + 16 <= n; c += 16) {                                                                  \
            for (k = 0; k < 16; k++) y[k] = tkvi_load_##t(src + (c + k) * (size));                           \
            memcpy(x + c, y, sizeof y);                                                                      \
        }                                                                                                    \
        for (; c < n; c++) x[c] = tkvi_load_##t(src + c * (size));                                           \
    }
TKVI_EXACT_ROW_(f32, 4)
TKVI_EXACT_ROW_(bf16, 2)
#undef TKVI_EXACT_ROW_

static void tkvi_f16_save(const tkvi_simd_ops *ops, const float *x, int n, uint8_t *dst) {
    ops->f32_to_f16(x, n, dst);
}

static void tkvi_f16_read(const tkvi_simd_ops *ops, const uint8_t *src, int n, float *x) {
    ops->f16_to_f32(src, n, x);
}

static void tkvi_exact_clear(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    tkvi_clear_rows(bytes, s->code_bytes / (size_t)s->tokens, dead_mask);
}

/* The functions of tkvi_codec for a type of `size` bytes. */
#define TKVI_EXACT_CODEC_(t, size)                                                                           \
    static void tkvi_##t##_put(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, int token,      \
                               uint8_t *dst) {                                                               \
        uint8_t *row = dst + token * s->pad * (size);                                                        \
        tkvi_##t##_save(ops, x, s->dim, row);                                                                \
        memset(row + s->dim * (size), 0, (size_t)((s->pad - s->dim) * (size)));                              \
    }                                                                                                        \
    static void tkvi_##t##_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x,              \
                                  size_t stride, int n, uint8_t *dst) {                                      \
        int i;                                                                                               \
        memset(dst, 0, s->bytes);                                                                            \
        for (i = 0; i < n; i++) tkvi_##t##_put(s, ops, x + (size_t)i * stride, i, dst);                      \
    }                                                                                                        \
    static void tkvi_##t##_decode(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src,          \
                                  int first, int n, float *x, size_t stride) {                               \
        int i;                                                                                               \
        for (i = 0; i < n; i++)                                                                              \
            tkvi_##t##_read(ops, src + (first + i) * s->pad * (size), s->dim, x + (size_t)i * stride);       \
    }
TKVI_EXACT_CODEC_(f32, 4)
TKVI_EXACT_CODEC_(f16, 2)
TKVI_EXACT_CODEC_(bf16, 2)
#undef TKVI_EXACT_CODEC_

#endif /* TKVI_FORMATS_EXACT_H */
