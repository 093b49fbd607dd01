/*
 * format_table.h - the table of formats, and the standalone codec of the interface on top of it.
 * May call the format files. Everything that stores or reads tokens goes through tkvi_formats.
 */
#ifndef TKVI_FORMAT_TABLE_H
#define TKVI_FORMAT_TABLE_H

#include "format_exact.h"
#include "format_kivi.h"

#define TKVI_EXACT_(t)                                                                                       \
    {                                                                                                        \
        {tkvi_exact_layout, tkvi_##t##_encode, tkvi_##t##_decode, NULL, tkvi_##t##_put}, {                   \
            tkvi_exact_layout, tkvi_##t##_encode, tkvi_##t##_decode, NULL, tkvi_##t##_put                    \
        }                                                                                                    \
    }
#define TKVI_KIVI_                                                                                           \
    {                                                                                                        \
        {tkvi_kivi_k_layout, tkvi_kivi_k_encode, tkvi_tiles_k_decode, tkvi_kivi_k_meta, NULL}, {             \
            tkvi_kivi_v_layout, tkvi_kivi_v_encode, tkvi_tiles_v_decode, tkvi_kivi_v_meta, NULL              \
        }                                                                                                    \
    }

/* In the order of tkv_format. */
static const tkvi_format tkvi_formats[TKV_FORMAT_COUNT] = {
    {NULL,
     0,
     TKVI_AS_TILES,
     {{NULL, NULL, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}}}, /* TKV_FORMAT_DEFAULT */
    {"f32", 32, TKVI_AS_F32, TKVI_EXACT_(f32)},
    {"f16", 16, TKVI_AS_F16, TKVI_EXACT_(f16)},
    {"bf16", 16, TKVI_AS_BF16, TKVI_EXACT_(bf16)},
    {"q8", 8, TKVI_AS_TILES, TKVI_KIVI_},
    {"kivi4", 4, TKVI_AS_TILES, TKVI_KIVI_},
    {"kivi3", 3, TKVI_AS_TILES, TKVI_KIVI_},
    {"kivi2", 2, TKVI_AS_TILES, TKVI_KIVI_},
};
#undef TKVI_EXACT_
#undef TKVI_KIVI_

static int tkvi_format_known(tkv_format f) { return f > TKV_FORMAT_DEFAULT && f < TKV_FORMAT_COUNT; }

TKV_API const char *tkv_format_name(tkv_format f) {
    return tkvi_format_known(f) ? tkvi_formats[f].name : NULL;
}

TKV_API tkv_format tkv_format_from_name(const char *name) {
    int f;
    for (f = 1; name && f < TKV_FORMAT_COUNT; f++)
        if (strcmp(name, tkvi_formats[f].name) == 0) return (tkv_format)f;
    return TKV_FORMAT_DEFAULT;
}

/* >>codec */
static int tkvi_codec_side(const tkv_codec *c, tkvi_side *s) {
    int group = c && c->group_size ? c->group_size : 64;
    if (!c || !tkvi_format_known(c->format) || (c->side != TKV_K && c->side != TKV_V)) return 0;
    if (c->head_dim < 1 || c->head_dim > TKV_MAX_HEAD_DIM || (group != 64 && group != 32)) return 0;
    tkvi_side_init(s, &tkvi_formats[c->format], c->side, c->head_dim, group, TKVI_BLOCK);
    return 1;
}

TKV_API size_t tkv_encoded_size(const tkv_codec *c) {
    tkvi_side s;
    return tkvi_codec_side(c, &s) ? s.bytes : 0;
}

TKV_API double tkv_format_bits(const tkv_codec *c) {
    tkvi_side s;
    return tkvi_codec_side(c, &s) ? 8.0 * (double)s.bytes / ((double)s.dim * TKVI_BLOCK) : 0.0;
}

TKV_API tkv_status tkv_encode(const tkv_codec *c, const float *x, ptrdiff_t stride, int n_tokens, void *dst,
                              size_t size) {
    tkvi_side s;
    int t, i;
    if (!x || !dst || !tkvi_codec_side(c, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK || size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    for (t = 0; t < n_tokens; t++)
        for (i = 0; i < s.dim; i++)
            if (!tkvi_is_finite(x[t * stride + i])) return TKV_ERR_NONFINITE;
    tkvi_encode_side(&s, x, (size_t)stride, n_tokens, (uint8_t *)dst);
    return TKV_OK;
}

TKV_API tkv_status tkv_decode(const tkv_codec *c, const void *src, size_t size, int n_tokens, float *x,
                              ptrdiff_t stride) {
    tkvi_side s;
    if (!x || !src || !tkvi_codec_side(c, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK || size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    tkvi_decode_side(&s, (const uint8_t *)src, 0, n_tokens, x, (size_t)stride);
    return TKV_OK;
}

#endif /* TKVI_FORMAT_TABLE_H */
