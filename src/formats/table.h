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
#include "formats/kvquant_tables.h"
#include "formats/int.h"
#include "formats/float.h"

#define TKVI_COLUMNS_ (1 << TKV_SCALES_GROUP | 1 << TKV_SCALES_CHANNEL)
#define TKVI_ROWS_ (1 << TKV_SCALES_GROUP | 1 << TKV_SCALES_TOKEN)
/* Only saves clear slots. */
#define TKVI_CLEAR_(name) TKVI_IF(TKVI_HAS_SAVE, tkvi_##name##_clear)
#define TKVI_EXACT_(t)                                                                                       \
    {                                                                                                        \
        {tkvi_exact_layout, tkvi_##t##_encode, tkvi_##t##_decode, NULL, tkvi_##t##_put, TKVI_CLEAR_(exact)}, \
        {                                                                                                    \
            tkvi_exact_layout, tkvi_##t##_encode, tkvi_##t##_decode, NULL, tkvi_##t##_put,                   \
                TKVI_CLEAR_(exact)                                                                           \
        }                                                                                                    \
    }
#define TKVI_KIVI_                                                                                           \
    {                                                                                                        \
        {tkvi_kivi_k_layout, tkvi_kivi_encode, tkvi_decode_tiles, tkvi_kivi_k_meta, NULL,                    \
         TKVI_CLEAR_(kivi_k)},                                                                               \
        {                                                                                                    \
            tkvi_kivi_v_layout, tkvi_kivi_encode, tkvi_decode_tiles, tkvi_kivi_v_meta, NULL,                 \
                TKVI_CLEAR_(kivi_v)                                                                          \
        }                                                                                                    \
    }

#define TKVI_NO_SIDE_                                                                                        \
    { NULL, NULL, NULL, NULL, NULL, NULL }
#define TKVI_A_                                                                                              \
    { {tkvi_a_layout, tkvi_a_encode, tkvi_a_decode, tkvi_a_meta, NULL, TKVI_CLEAR_(a)}, TKVI_NO_SIDE_ }
#define TKVI_R_                                                                                              \
    {                                                                                                        \
        TKVI_NO_SIDE_, {                                                                                     \
            tkvi_r_layout, tkvi_r_encode, tkvi_decode_tiles, tkvi_r_meta, NULL, TKVI_CLEAR_(r)               \
        }                                                                                                    \
    }

/* Formats that a switch can leave out. Without functions a format keeps its name and stores nothing. */
#define TKVI_TOKEN_SIDE_(t)                                                                                  \
    {                                                                                                        \
        TKVI_IF(TKVI_HAS_TOKEN_FORMATS, tkvi_##t##_layout),                                                  \
            TKVI_IF(TKVI_HAS_TOKEN_FORMATS, tkvi_token_encode),                                              \
            TKVI_IF(TKVI_HAS_TOKEN_FORMATS, tkvi_token_decode), NULL, NULL,                                  \
            TKVI_IF(TKVI_HAS_TOKEN_FORMATS, TKVI_CLEAR_(token))                                              \
    }
#define TKVI_TOKEN_(t)                                                                                       \
    { TKVI_TOKEN_SIDE_(t), TKVI_TOKEN_SIDE_(t) }
#define TKVI_SQUAT_                                                                                          \
    {                                                                                                        \
        {TKVI_IF(TKVI_HAS_SQUAT, tkvi_kivi_k_layout),                                                        \
         TKVI_IF(TKVI_HAS_SQUAT, tkvi_squat_encode),                                                         \
         TKVI_IF(TKVI_HAS_SQUAT, tkvi_decode_tiles),                                                         \
         TKVI_IF(TKVI_HAS_SQUAT, tkvi_kivi_k_meta),                                                          \
         NULL,                                                                                               \
         TKVI_IF(TKVI_HAS_SQUAT, TKVI_CLEAR_(kivi_k))},                                                      \
            TKVI_NO_SIDE_                                                                                    \
    }
#define TKVI_SUBSPACE_SIDE_                                                                                  \
    {                                                                                                        \
        TKVI_IF(TKVI_HAS_SUBSPACE, tkvi_subspace_layout), TKVI_IF(TKVI_HAS_SUBSPACE, tkvi_subspace_encode),  \
            TKVI_IF(TKVI_HAS_SUBSPACE, tkvi_subspace_decode), NULL, NULL,                                    \
            TKVI_IF(TKVI_HAS_SUBSPACE, TKVI_CLEAR_(subspace))                                                \
    }
#define TKVI_SUBSPACE_                                                                                       \
    { TKVI_SUBSPACE_SIDE_, TKVI_SUBSPACE_SIDE_ }
#define TKVI_KVQUANT_SIDE_(which)                                                                            \
    {                                                                                                        \
        TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_layout),                                                      \
            TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_##which##_encode),                                        \
            TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_##which##_decode), NULL, NULL,                            \
            TKVI_IF(TKVI_HAS_KVQUANT, TKVI_CLEAR_(kvquant))                                                  \
    }
#define TKVI_KVQUANT_                                                                                        \
    { TKVI_KVQUANT_SIDE_(k), TKVI_KVQUANT_SIDE_(v) }

static const tkvi_simd_ops tkvi_simd_ops_scalar = {tkvi_f16_to_f32_scalar,
                                                   tkvi_f32_to_f16_scalar,
                                                   tkvi_decode_log_scales_scalar,
                                                   tkvi_decode_zero_points_scalar,
                                                   tkvi_encode_log_scales_scalar,
                                                   tkvi_pack_tile,
                                                   tkvi_interleave_scalar,
                                                   tkvi_encode_k_columns_scalar,
                                                   tkvi_score_tokens_scalar,
                                                   tkvi_finalize_scales_scalar,
                                                   tkvi_encode_v_tokens_scalar,
                                                   tkvi_encode_groups_scalar,
                                                   tkvi_decode_tiles_scalar,
                                                   NULL,
                                                   TKVI_IF(TKVI_HAS_MOVES, tkvi_turn_rows_scalar)};

/* In the order of tkv_format. */
static const tkvi_format tkvi_formats[TKV_FORMAT_COUNT] = {
    {NULL,
     0,
     TKVI_AS_TILES,
     0,
     0,
     {0, 0},
     {TKVI_NO_SIDE_, TKVI_NO_SIDE_},
     &tkvi_plain_family}, /* TKV_FORMAT_DEFAULT */
    {"f32", 32, TKVI_AS_F32, 0, 0, {0, 0}, TKVI_EXACT_(f32), &tkvi_plain_family},
    {"f16", 16, TKVI_AS_F16, 0, 0, {0, 0}, TKVI_EXACT_(f16), &tkvi_plain_family},
    {"bf16", 16, TKVI_AS_BF16, 0, 0, {0, 0}, TKVI_EXACT_(bf16), &tkvi_plain_family},
    {"q8", 8, TKVI_AS_TILES, 0, 0, {TKVI_COLUMNS_, TKVI_ROWS_}, TKVI_KIVI_, &tkvi_plain_family},
    {"kivi4", 4, TKVI_AS_TILES, 0, 0, {TKVI_COLUMNS_, TKVI_ROWS_}, TKVI_KIVI_, &tkvi_plain_family},
    {"kivi3", 3, TKVI_AS_TILES, 0, 0, {TKVI_COLUMNS_, TKVI_ROWS_}, TKVI_KIVI_, &tkvi_plain_family},
    {"kivi2", 2, TKVI_AS_TILES, 0, 0, {TKVI_COLUMNS_, TKVI_ROWS_}, TKVI_KIVI_, &tkvi_plain_family},
    {"a40", 16, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"a35", 14, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"a30", 12, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"a275", 11, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"a25", 10, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"a225", 9, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"a20", 8, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"a175", 7, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"a15", 6, TKVI_AS_TILES, 1, 0, {0, 0}, TKVI_A_, &tkvi_plain_family},
    {"r40", 16, TKVI_AS_TILES, 1, 1, {0, 0}, TKVI_R_, &tkvi_plain_family},
    {"r30", 12, TKVI_AS_TILES, 1, 1, {0, 0}, TKVI_R_, &tkvi_plain_family},
    {"r20", 8, TKVI_AS_TILES, 1, 1, {0, 0}, TKVI_R_, &tkvi_plain_family},
    {"r15", 6, TKVI_AS_TILES, 1, 1, {0, 0}, TKVI_R_, &tkvi_plain_family},
    {"r10", 4, TKVI_AS_TILES, 1, 1, {0, 0}, TKVI_R_, &tkvi_plain_family},
    {"int8", 8, TKVI_AS_DECODED, 0, 0, {TKVI_ROWS_, TKVI_ROWS_}, TKVI_TOKEN_(int), &tkvi_token_family},
    {"int4", 4, TKVI_AS_DECODED, 0, 0, {TKVI_ROWS_, TKVI_ROWS_}, TKVI_TOKEN_(int), &tkvi_token_family},
    {"fp8-e4m3", 8, TKVI_AS_DECODED, 0, 0, {0, 0}, TKVI_TOKEN_(e4m3), &tkvi_token_family},
    {"fp8-e5m2", 8, TKVI_AS_DECODED, 0, 0, {0, 0}, TKVI_TOKEN_(e5m2), &tkvi_token_family},
    {"fp4", 4, TKVI_AS_DECODED, 0, 0, {0, 0}, TKVI_TOKEN_(fp4), &tkvi_token_family},
    {"squat4", 4, TKVI_AS_TILES, 0, 0, {TKVI_COLUMNS_, 0}, TKVI_SQUAT_, &tkvi_squat_family},
    {"squat2", 2, TKVI_AS_TILES, 0, 0, {TKVI_COLUMNS_, 0}, TKVI_SQUAT_, &tkvi_squat_family},
    {"subspace4", 4, TKVI_AS_DECODED, 0, 0, {0, 0}, TKVI_SUBSPACE_, &tkvi_subspace_family},
    {"subspace2", 2, TKVI_AS_DECODED, 0, 0, {0, 0}, TKVI_SUBSPACE_, &tkvi_subspace_family},
    {"kvquant4", 4, TKVI_AS_DECODED, 0, 0, {0, 0}, TKVI_KVQUANT_, &tkvi_kvquant_family},
    {"kvquant3", 3, TKVI_AS_DECODED, 0, 0, {0, 0}, TKVI_KVQUANT_, &tkvi_kvquant_family},
    {"kvquant2", 2, TKVI_AS_DECODED, 0, 0, {0, 0}, TKVI_KVQUANT_, &tkvi_kvquant_family},
};
#undef TKVI_COLUMNS_
#undef TKVI_ROWS_
#undef TKVI_A_
#undef TKVI_R_
#undef TKVI_NO_SIDE_
#undef TKVI_EXACT_
#undef TKVI_CLEAR_
#undef TKVI_KIVI_
#undef TKVI_TOKEN_SIDE_
#undef TKVI_TOKEN_
#undef TKVI_SQUAT_
#undef TKVI_SUBSPACE_SIDE_
#undef TKVI_SUBSPACE_
#undef TKVI_KVQUANT_SIDE_
#undef TKVI_KVQUANT_

/* 1: a family in the table undoes RoPE, learns from tokens, learns from queries. 0 leaves out the code for that. */
#define TKVI_HAS_ROPE TKVI_HAS_KVQUANT
#define TKVI_HAS_TOKEN_LEARNERS TKVI_HAS_KVQUANT
#define TKVI_TOKEN_LEARNERS_LEFT_OUT "TKV_NO_KVQUANT leaves this out"
#define TKVI_HAS_QUERY_LEARNERS TKVI_HAS_SQUAT

/* Scalar decoding: it defines the values that a side holds. */
static void tkvi_decode_side(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                             size_t stride) {
    tkvi_values(s, &tkvi_simd_ops_scalar, src, first, n, x, stride);
}

static int tkvi_format_known(tkv_format f) { return f > TKV_FORMAT_DEFAULT && f < TKV_FORMAT_COUNT; }

/* The sentence for a format that this build leaves out; NULL: it has the format. */
static const char *tkvi_format_left_out(tkv_format f) {
    return tkvi_format_known(f) ? tkvi_formats[f].family->left_out : NULL;
}

static const char *tkvi_format_name(tkv_format f) {
    return tkvi_format_known(f) ? tkvi_formats[f].name : NULL;
}

static tkv_format tkvi_format_from_name(const char *name) {
    int f;
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        if (strcmp(name, tkvi_formats[f].name) == 0) return (tkv_format)f;
    return TKV_FORMAT_DEFAULT;
}

#ifndef TKV_NO_REPORTS
/* Finds a format by its name, or by another one that is read and never written. q4 is KIVI4: its groups are those of
 * Q8, it errs less than INT4 and FP4, and every build has it. */
static tkv_format tkvi_find_format(const char *name) {
    static const struct {
        const char *name;
        tkv_format format;
    } others[] = {{"fp16", TKV_F16}, {"fp8", TKV_FP8_E4M3}, {"q4", TKV_KIVI4}};
    int i;
    for (i = 0; i < 3; i++)
        if (strcmp(name, others[i].name) == 0) return others[i].format;
    return tkvi_format_from_name(name);
}
#endif

static const tkvi_word tkvi_words_scales[] = {
    {"group", TKV_SCALES_GROUP}, {"token", TKV_SCALES_TOKEN}, {"channel", TKV_SCALES_CHANNEL}, {NULL, 0}};

/* >>options: the fields of tkv_format_options, in their order */
static const tkvi_row tkvi_option_rows[] = {
    TKVI_OPTION(group_size, TKVI_INT, NULL, 64, 32, 64, 32, "it must be 64 or 32"),
    TKVI_OPTION(allocation_unit, TKVI_INT, NULL, 4, 4, 16, 12, "it must be 4 or 16"),
    TKVI_OPTION(fit, TKVI_FLAGS, tkvi_words_fit, 0, 1, 5, 1,
                "it must be bits of tkv_fit, NORM and UNBIASED not together"),
    TKVI_OPTION(rotate, TKVI_FLAGS, tkvi_words_rotate, 0, 1, 3, 1,
                "it must be TKV_ROTATE_K, TKV_ROTATE_V, both or 0"),
    TKVI_OPTION(center_k, TKVI_INT, tkvi_words_switch, 0, 1, 1, 1, "it must be 0 or 1"),
    TKVI_OPTION(squat_block, TKVI_INT, NULL, 16, 16, 64, 48, "it must be 16 or 64"),
    TKVI_OPTION(subspaces, TKVI_INT, NULL, 4, 1, 16, 1, "it must be 1 to 16, or 0 for 4"),
    TKVI_OPTION(kvquant, TKVI_FLAGS, tkvi_words_kvquant, 0, 1, 63, 1, "it must be bits of tkv_kvquant"),
    TKVI_OPTION(k_scales, TKVI_INT, tkvi_words_scales, TKV_SCALES_GROUP, 1, TKV_SCALES_CHANNEL, 1,
                "it must be a tkv_scales"),
    TKVI_OPTION(v_scales, TKVI_INT, tkvi_words_scales, TKV_SCALES_GROUP, 1, TKV_SCALES_CHANNEL, 1,
                "it must be a tkv_scales"),
    TKVI_OPTION(int_bits, TKVI_INT, NULL, 0, 2, 8, 1, "it must be 2 to 8, or 0 for those of the format"),
    TKVI_OPTION(unrotated, TKVI_INT, tkvi_words_switch, 0, 1, 1, 1, "it must be 0 or 1"),
    TKVI_OPTION(kvquant_outliers, TKVI_INT, NULL, 10, 1, 30, 1,
                "it must be 1 to 30 thousandths, or 0 for 10"),
};
#define TKVI_OPTIONS ((int)(sizeof tkvi_option_rows / sizeof *tkvi_option_rows))

/* Returns the row of the first option with an invalid value, or NULL. */
static const tkvi_row *tkvi_find_invalid_option(const tkv_format_options *o) {
    int i;
    for (i = 0; i < TKVI_OPTIONS; i++) {
        const tkvi_row *row = &tkvi_option_rows[i];
        const int x = tkvi_member_int(o, row->offset);
        if (x && (x < row->least || x > row->most || (x - row->least) % row->step)) return row;
    }
    return NULL;
}

/* 1 if an option decides what the bytes of a block mean. `fit` and `squat_block` are choices of encoders. */
static int tkvi_is_option_of_bytes(const tkvi_row *row) {
    return row->offset != offsetof(tkv_format_options, fit) &&
           row->offset != offsetof(tkv_format_options, squat_block);
}

static void tkvi_fill_options(tkv_format_options *o) {
    int i;
    for (i = 0; i < TKVI_OPTIONS; i++)
        if (!tkvi_member_int(o, tkvi_option_rows[i].offset))
            tkvi_set_member_int(o, tkvi_option_rows[i].offset, tkvi_option_rows[i].standard);
}

/* >>codec */

/* Makes the side of a codec. options: memory of the caller, which the side uses. Returns 0 if the codec is invalid. */
static int tkvi_codec_side(const tkv_codec *c, tkv_format_options *options, tkvi_side *s) {
    if (!c || !tkvi_format_known(c->format) || (c->side != TKV_K && c->side != TKV_V)) return 0;
    if (!tkvi_format_stores(&tkvi_formats[c->format], c->side)) return 0;
    if (c->head_dim < 1 || c->head_dim > TKV_MAX_HEAD_DIM || c->position < 0) return 0;
    if (c->head_dim > 256 && tkvi_formats[c->format].family->too_wide) return 0;
    if (tkvi_find_invalid_option(&c->options)) return 0;
    if (!tkvi_has_scales(&tkvi_formats[c->format], &c->options, c->side)) return 0;
    if (c->side == TKV_K && tkvi_rope_has_fault(&c->rope, c->head_dim)) return 0;
    *options = c->options;
    tkvi_fill_options(options);
    if (c->side == TKV_K && c->rope.first && tkvi_formats[c->format].family->undoes_rope) return 0;
    tkvi_side_make(s, &tkvi_formats[c->format], c->side, c->head_dim, TKVI_BLOCK, options, 0, 0, NULL);
    s->start = c->position;
    return 1;
}

/* Sets the RoPE of a side, if its format codes keys before RoPE. */
static void tkvi_codec_rope(const tkv_codec *c, tkvi_side *s, tkvi_own_rope *rope) {
    if (!TKVI_HAS_ROPE || c->side != TKV_K || !tkvi_rope_is_known(&c->rope)) return;
    if (!s->format->family->undoes_rope) return;
    s->rope = tkvi_undone_rope(s->format->family, s->options, tkvi_own_rope_make(rope, &c->rope));
}

TKV_API size_t tkv_get_block_bytes(const tkv_codec *c) {
    tkv_format_options options;
    tkvi_side s;
    return tkvi_codec_side(c, &options, &s) ? s.bytes : 0;
}

TKV_API tkv_status tkv_encode_block(const tkv_codec *c, const float *x, ptrdiff_t stride, int n_tokens,
                                    void *dst, size_t size) {
    tkv_format_options options;
    tkvi_side s;
    tkvi_own_rope rope;
    int t, i;
    if (c && tkvi_format_left_out(c->format)) return TKV_ERR_UNSUPPORTED;
    if (!x || !dst || !tkvi_codec_side(c, &options, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK ||
        size < s.bytes)
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
    tkv_format_options options;
    tkvi_side s;
    tkvi_own_rope rope;
    if (c && tkvi_format_left_out(c->format)) return TKV_ERR_UNSUPPORTED;
    if (!x || !src || !tkvi_codec_side(c, &options, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK ||
        size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    tkvi_codec_rope(c, &s, &rope);
    tkvi_decode_side(&s, (const uint8_t *)src, 0, n_tokens, x, (size_t)stride);
    return TKV_OK;
}

#endif /* TKVI_FORMATS_TABLE_H */
