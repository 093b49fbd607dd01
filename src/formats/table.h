/*
 * formats/table.h - the table of formats, and on top of it the standalone codec of the interface.
 * All code that stores or reads tokens goes through tkvi_formats.
 */
#ifndef TKVI_FORMATS_TABLE_H
#define TKVI_FORMATS_TABLE_H

#include "formats/exact.h"
#include "formats/kivi.h"
#include "formats/squat.h"
#include "formats/subspace.h"
#include "formats/a.h"
#include "formats/r.h"
#include "formats/kvquant.h"
#include "formats/int.h"
#include "formats/float.h"

#define TKVI_EXACT_(t)                                                                                       \
    {                                                                                                        \
        {tkvi_exact_layout, tkvi_##t##_encode, tkvi_##t##_decode, NULL, tkvi_##t##_put}, {                   \
            tkvi_exact_layout, tkvi_##t##_encode, tkvi_##t##_decode, NULL, tkvi_##t##_put                    \
        }                                                                                                    \
    }
#define TKVI_KIVI_                                                                                           \
    {                                                                                                        \
        {tkvi_kivi_k_layout, tkvi_kivi_encode, tkvi_decode_tiles, tkvi_kivi_k_meta, NULL}, {                 \
            tkvi_kivi_v_layout, tkvi_kivi_encode, tkvi_decode_tiles, tkvi_kivi_v_meta, NULL                  \
        }                                                                                                    \
    }

#define TKVI_NO_SIDE_                                                                                        \
    { NULL, NULL, NULL, NULL, NULL }
#define TKVI_A_                                                                                              \
    { {tkvi_a_layout, tkvi_a_encode, tkvi_decode_tiles, tkvi_a_meta, NULL}, TKVI_NO_SIDE_ }
#define TKVI_R_                                                                                              \
    {                                                                                                        \
        TKVI_NO_SIDE_, { tkvi_r_layout, tkvi_r_encode, tkvi_decode_tiles, tkvi_r_meta, NULL }                \
    }

/* Formats that a switch can leave out. Without functions a format keeps its name and stores nothing. */
#define TKVI_TOKEN_SIDE_(t)                                                                                  \
    {                                                                                                        \
        TKVI_IF(TKVI_HAS_TOKEN_FORMATS, tkvi_##t##_layout),                                                  \
            TKVI_IF(TKVI_HAS_TOKEN_FORMATS, tkvi_token_encode),                                              \
            TKVI_IF(TKVI_HAS_TOKEN_FORMATS, tkvi_token_decode), NULL, NULL                                   \
    }
#define TKVI_TOKEN_(t)                                                                                       \
    { TKVI_TOKEN_SIDE_(t), TKVI_TOKEN_SIDE_(t) }
#define TKVI_SQUAT_                                                                                          \
    {                                                                                                        \
        {TKVI_IF(TKVI_HAS_SQUAT, tkvi_kivi_k_layout), TKVI_IF(TKVI_HAS_SQUAT, tkvi_squat_encode),            \
         TKVI_IF(TKVI_HAS_SQUAT, tkvi_decode_tiles), TKVI_IF(TKVI_HAS_SQUAT, tkvi_kivi_k_meta), NULL},       \
            TKVI_NO_SIDE_                                                                                    \
    }
#define TKVI_SUBSPACE_SIDE_                                                                                  \
    {                                                                                                        \
        TKVI_IF(TKVI_HAS_SUBSPACE, tkvi_subspace_layout), TKVI_IF(TKVI_HAS_SUBSPACE, tkvi_subspace_encode),  \
            TKVI_IF(TKVI_HAS_SUBSPACE, tkvi_subspace_decode), NULL, NULL                                     \
    }
#define TKVI_SUBSPACE_                                                                                       \
    { TKVI_SUBSPACE_SIDE_, TKVI_SUBSPACE_SIDE_ }
#define TKVI_KVQUANT_SIDE_(which)                                                                            \
    {                                                                                                        \
        TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_layout),                                                      \
            TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_##which##_encode),                                        \
            TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_##which##_decode), NULL, NULL                             \
    }
#define TKVI_KVQUANT_                                                                                        \
    { TKVI_KVQUANT_SIDE_(k), TKVI_KVQUANT_SIDE_(v) }

static const tkvi_simd_ops tkvi_simd_ops_scalar = {
    tkvi_f16_to_f32_scalar,         tkvi_f32_to_f16_scalar,        tkvi_decode_log_scales_scalar,
    tkvi_decode_zero_points_scalar, tkvi_encode_log_scales_scalar, tkvi_pack_tile,
    tkvi_interleave_scalar,         tkvi_encode_k_columns_scalar,  tkvi_finalize_scales_scalar,
    tkvi_encode_v_tokens_scalar,    tkvi_encode_groups_scalar,     tkvi_decode_tiles_scalar};

/* In the order of tkv_format. */
static const tkvi_format tkvi_formats[TKV_FORMAT_COUNT] = {
    {NULL, 0, TKVI_AS_TILES, 0, 0, {TKVI_NO_SIDE_, TKVI_NO_SIDE_}}, /* TKV_FORMAT_DEFAULT */
    {"f32", 32, TKVI_AS_F32, 0, 0, TKVI_EXACT_(f32)},
    {"f16", 16, TKVI_AS_F16, 0, 0, TKVI_EXACT_(f16)},
    {"bf16", 16, TKVI_AS_BF16, 0, 0, TKVI_EXACT_(bf16)},
    {"q8", 8, TKVI_AS_TILES, 0, 0, TKVI_KIVI_},
    {"kivi4", 4, TKVI_AS_TILES, 0, 0, TKVI_KIVI_},
    {"kivi3", 3, TKVI_AS_TILES, 0, 0, TKVI_KIVI_},
    {"kivi2", 2, TKVI_AS_TILES, 0, 0, TKVI_KIVI_},
    {"a40", 16, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a35", 14, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a30", 12, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a275", 11, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a25", 10, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a225", 9, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a20", 8, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a175", 7, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a15", 6, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"r40", 16, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"r30", 12, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"r20", 8, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"r15", 6, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"r10", 4, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"int8", 8, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(int8)},
    {"int4", 4, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(int4)},
    {"fp8-e4m3", 8, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(e4m3)},
    {"fp8-e5m2", 8, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(e5m2)},
    {"fp4", 4, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(fp4)},
    {"squat4", 4, TKVI_AS_TILES, 0, 0, TKVI_SQUAT_},
    {"squat2", 2, TKVI_AS_TILES, 0, 0, TKVI_SQUAT_},
    {"subspace4", 4, TKVI_AS_DECODED, 0, 0, TKVI_SUBSPACE_},
    {"subspace2", 2, TKVI_AS_DECODED, 0, 0, TKVI_SUBSPACE_},
    {"kvquant4", 4, TKVI_AS_DECODED, 0, 0, TKVI_KVQUANT_},
    {"kvquant3", 3, TKVI_AS_DECODED, 0, 0, TKVI_KVQUANT_},
    {"kvquant2", 2, TKVI_AS_DECODED, 0, 0, TKVI_KVQUANT_},
};
#undef TKVI_A_
#undef TKVI_R_
#undef TKVI_NO_SIDE_
#undef TKVI_EXACT_
#undef TKVI_KIVI_
#undef TKVI_TOKEN_SIDE_
#undef TKVI_TOKEN_
#undef TKVI_SQUAT_
#undef TKVI_SUBSPACE_SIDE_
#undef TKVI_SUBSPACE_
#undef TKVI_KVQUANT_SIDE_
#undef TKVI_KVQUANT_

/* Scalar decoding: it defines the values that a side holds. */
static void tkvi_decode_side(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                             size_t stride) {
    tkvi_values(s, &tkvi_simd_ops_scalar, src, first, n, x, stride);
}

static int tkvi_format_known(tkv_format f) { return f > TKV_FORMAT_DEFAULT && f < TKV_FORMAT_COUNT; }

/* The sentence for a format that this build leaves out; NULL: it has the format. */
static const char *tkvi_format_left_out(tkv_format f) {
    if (!TKVI_HAS_TOKEN_FORMATS && f >= TKV_INT8 && f <= TKV_FP4)
        return "TKV_NO_TOKEN_FORMATS leaves this format out";
    if (!TKVI_HAS_SQUAT && f >= TKV_SQUAT4 && f <= TKV_SQUAT2) return "TKV_NO_SQUAT leaves this format out";
    if (!TKVI_HAS_SUBSPACE && f >= TKV_SUBSPACE4 && f <= TKV_SUBSPACE2)
        return "TKV_NO_SUBSPACE leaves this format out";
    if (!TKVI_HAS_KVQUANT && f >= TKV_KVQUANT4 && f <= TKV_KVQUANT2)
        return "TKV_NO_KVQUANT leaves this format out";
    return NULL;
}

/* True if the encoder needs statistics of queries (learn/squat_queries.h). */
static int tkvi_is_squat(tkv_format f) {
    return TKVI_HAS_SQUAT && tkvi_formats[f].side[TKV_K].encode == tkvi_squat_encode;
}

/* True if the format uses a table of the layer (learn/kvquant_tables.h). */
static int tkvi_is_kvquant(tkv_format f) {
    return TKVI_HAS_KVQUANT && tkvi_formats[f].side[TKV_V].encode == tkvi_kvquant_v_encode;
}

static const char *tkvi_format_name(tkv_format f) {
    return tkvi_format_known(f) ? tkvi_formats[f].name : NULL;
}

static tkv_format tkvi_format_from_name(const char *name) {
    int f;
    for (f = 1; name && f < TKV_FORMAT_COUNT; f++)
        if (strcmp(name, tkvi_formats[f].name) == 0) return (tkv_format)f;
    return TKV_FORMAT_DEFAULT;
}

/* >>codec */
static int tkvi_bad_fit(int fit) { return (fit & ~7) || ((fit & TKV_FIT_NORM) && (fit & TKV_FIT_UNBIASED)); }

static int tkvi_codec_side(const tkv_codec *c, tkvi_side *s) {
    tkvi_options o;
    if (!c || !tkvi_format_known(c->format) || (c->side != TKV_K && c->side != TKV_V)) return 0;
    if (!tkvi_format_stores(&tkvi_formats[c->format], c->side)) return 0;
    memset(&o, 0, sizeof o);
    o.group = c->options.group_size ? c->options.group_size : 64;
    o.fit = c->options.fit;
    o.rotate = c->options.rotate;
    o.center_k = c->options.center_k;
    o.parts = c->options.subspaces ? c->options.subspaces : 4;
    o.kvquant = c->options.kvquant;
    if (c->head_dim < 1 || c->head_dim > TKV_MAX_HEAD_DIM || (o.group != 64 && o.group != 32)) return 0;
    if (tkvi_bad_fit(o.fit) || (o.rotate & ~3) || (o.center_k & ~1) || o.parts < 1 || o.parts > 16) return 0;
    if ((o.kvquant & ~15) || c->position < 0) return 0;
    if (c->side == TKV_K && tkvi_rope_has_fault(&c->rope, c->head_dim)) return 0;
    tkvi_side_make(s, &tkvi_formats[c->format], c->side, c->head_dim, TKVI_BLOCK, &o, NULL);
    s->start = c->position;
    return 1;
}

/* Sets the RoPE of a side, if its format codes keys before RoPE. */
static void tkvi_codec_rope(const tkv_codec *c, tkvi_side *s, tkvi_rope *rope) {
    if (c->side != TKV_K || !c->rope.dim || !tkvi_is_kvquant(c->format)) return;
    if (c->options.kvquant & TKV_KVQUANT_POST_ROPE) return;
    tkvi_rope_make(rope, &c->rope);
    s->rope = rope;
}

TKV_API size_t tkv_get_block_bytes(const tkv_codec *c) {
    tkvi_side s;
    return tkvi_codec_side(c, &s) ? s.bytes : 0;
}

TKV_API tkv_status tkv_encode_block(const tkv_codec *c, const float *x, ptrdiff_t stride, int n_tokens,
                                    void *dst, size_t size) {
    tkvi_side s;
    tkvi_rope rope;
    int t, i;
    if (c && tkvi_format_left_out(c->format)) return TKV_ERR_UNSUPPORTED;
    if (!x || !dst || !tkvi_codec_side(c, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK || size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    for (t = 0; t < n_tokens; t++)
        for (i = 0; i < s.dim; i++)
            if (!tkvi_is_finite(x[t * stride + i])) return TKV_ERR_NONFINITE;
    tkvi_codec_rope(c, &s, &rope);
    tkvi_encode_side(&s, &tkvi_simd_ops_scalar, x, (size_t)stride, n_tokens, (uint8_t *)dst);
    return TKV_OK;
}

TKV_API tkv_status tkv_decode_block(const tkv_codec *c, const void *src, size_t size, int n_tokens, float *x,
                                    ptrdiff_t stride) {
    tkvi_side s;
    tkvi_rope rope;
    if (c && tkvi_format_left_out(c->format)) return TKV_ERR_UNSUPPORTED;
    if (!x || !src || !tkvi_codec_side(c, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK || size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    tkvi_codec_rope(c, &s, &rope);
    tkvi_decode_side(&s, (const uint8_t *)src, 0, n_tokens, x, (size_t)stride);
    return TKV_OK;
}

#endif /* TKVI_FORMATS_TABLE_H */
