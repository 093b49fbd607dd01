/*
 * core/format.h - defines a format: how one side (K or V) of one head's block becomes bytes.
 *
 * To add a format:
 *   1. Write its scalar code in formats/NAME.h: the functions of tkvi_codec (below) for each side that it can store.
 *      Draw the bytes at the top. If it learns, undoes RoPE or can be left out, it has a tkvi_family (core/family.h).
 *   2. Add its name to tkv_format in api.h, and one row to the table in formats/table.h. Include the file there, and
 *      list it in tieredkv.h. An option of its own is a field of tkv_format_options and a row of tkvi_option_rows.
 * CONTRIBUTING.md shows the whole change for a format that learns.
 *
 * Sizes, demotion, reading, attention, learning, calibrations, texts and the tests go through the table. New formats
 * are of two kinds:
 *   TKVI_AS_TILES     Tiles of core/tile.h. The integer kernels of every instruction set run on them unchanged.
 *                     Widths, channel order and table of levels are free. The format writes layout, encode, meta
 *                     and clear; decode is tkvi_decode_tiles. (A has one token a block in a row of its own,
 *                     formats/a.h: the kernels of K replace its scores.)
 *   TKVI_AS_DECODED   Any bytes. The format writes layout, encode, decode and clear, and attention decodes 16 tokens
 *                     at a time. If each token has a grid and a scale, formats/token.h has all four.
 *                     kernels/code_rows.inc is faster than decode, for the formats that it supports.
 *
 * A side in memory is codes (a multiple of 64 bytes), then metadata, padded to 64 bytes. A record is the K side,
 * then the V side, of one head.
 */
#ifndef TKVI_CORE_FORMAT_H
#define TKVI_CORE_FORMAT_H

#include "core/family.h"
#include "core/field.h"
#include "core/geometry.h"
#include "core/log_scale.h"
#include "core/rotate.h"
#include "core/tile.h"

#define TKVI_BLOCK TKV_BLOCK_TOKENS
#define TKVI_MAX_GROUPS (TKV_MAX_HEAD_DIM / 32) /* for V, along channels; K has at most two, along tokens */

struct tkvi_side;
struct tkvi_columns;
struct tkvi_simd_ops;

/* Decodes tokens first .. first+n-1 of a side. Every machine gets the same bits: a product that enters a sum is
 * exact, or another function computes it (no FMA). */
typedef void (*tkvi_decoder)(const struct tkvi_side *s, const struct tkvi_simd_ops *ops, const uint8_t *src,
                             int first, int n, float *x, size_t stride);

/* >>simd_ops: steps of formats that an instruction set can replace. The scalar functions define them. */
typedef struct tkvi_simd_ops {
    void (*f16_to_f32)(const uint8_t *src, int n, float *dst);
    void (*f32_to_f16)(const float *x, int n, uint8_t *dst);                   /* finite floats */
    void (*decode_log_scales)(const uint8_t *src, int n, int top, float *dst); /* core/log_scale.h */
    /* dst = scale * unit * (offset - middle) + mean. The product is exact. offset: signed bytes */
    void (*decode_zero_points)(const uint8_t *offset, const float *scale, const float *mean, float unit,
                               int middle, int n, float *dst);
    void (*encode_log_scales)(const float *x, int n, int top, uint8_t *dst);
    /* Packs the codes of a tile into cleared bytes (core/tile.h). */
    void (*pack_tile)(uint8_t *tile, int width, const uint8_t *code);
    /* Interleaves four columns of K into the codes of a tile. */
    void (*interleave)(uint8_t (*column)[TKVI_BLOCK], const int16_t *channel, uint8_t *tile);
    /* Formats A: codes of 16 columns of K, then their metadata (formats/a.h). */
    void (*encode_k_columns)(struct tkvi_columns *c);
    /* Formats A: adds to score[token][column] how far the tokens of 16 columns deviate (formats/a.h). */
    void (*score_tokens)(struct tkvi_columns *c, const uint8_t *importance, int32_t (*score)[16]);
    void (*finalize_scales)(struct tkvi_columns *c, int top);
    /* Formats R: codes and scales of n tokens of V (formats/r.h). */
    void (*encode_v_tokens)(const struct tkvi_side *s, const float *x, size_t stride, int n,
                            uint8_t (*code)[TKVI_TILE_CODES], float *scale);
    /* KIVI: codes and metadata of all groups of a side (formats/kivi.h). */
    void (*encode_groups)(const struct tkvi_side *s, const float *x, size_t stride, int n,
                          uint8_t (*code)[TKVI_TILE_CODES], uint8_t *meta);
    tkvi_decoder decode_tiles; /* formats/tiles.h */
    /* Formats stored by tokens. Returns 0 for a side that it does not support. NULL: supports none. */
    int (*decode_rows)(const struct tkvi_side *s, const struct tkvi_simd_ops *ops, const uint8_t *src,
                       int first, int n, float *x, size_t stride);
    void (*turn_rows)(const tkvi_turned_rows *t); /* core/rope.h */
} tkvi_simd_ops;

static const float tkvi_zeros[TKV_MAX_HEAD_DIM] = {0.0f};

#define TKVI_LANES 16 /* columns or tokens that are coded together */

/* 16 neighbouring channels of K. Only the first `lanes` exist; the codes of the others are undefined. */
typedef struct tkvi_columns {
    const float *x; /* in: values, [token][stride]; `lanes` values of a row are read */
    size_t stride;
    int n, lanes;
    const float *mean;    /* [16] */
    const uint8_t *width; /* [16] */
    /* Out, [16] each: codes, 0 beyond n; log-scale byte; offset; mean of the residuals. */
    uint8_t (*code)[TKVI_BLOCK], *log, *offset;
    float *middle;
    uint32_t beyond_mask; /* bit l: column l has bits, but scale and offset cannot reach its mean */
    /* Between the steps: */
    TKVI_ALIGNED int16_t u[TKVI_BLOCK / 2][TKVI_LANES][2]; /* values as integers; order: tkvi_column_u */
    TKVI_ALIGNED float low[TKVI_LANES], step[TKVI_LANES];  /* value = low + step * (u + 1/2), approximately */
    TKVI_ALIGNED int32_t sum_u[TKVI_LANES], sum_uu[TKVI_LANES];
    TKVI_ALIGNED int32_t sum_c[TKVI_LANES], sum_cc[TKVI_LANES], sum_cu[TKVI_LANES]; /* of the codes chosen */
} tkvi_columns;

/* Tokens t and t + 2 share 32 bits, so that one shift puts the codes of four tokens in order. */
static int16_t *tkvi_column_u(tkvi_columns *c, int l, int t) {
    return &c->u[t / 4 * 2 + t % 2][l][t % 4 / 2];
}

static int tkvi_decode_rows(const struct tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src,
                            int first, int n, float *x, size_t stride) {
    return ops->decode_rows && ops->decode_rows(s, ops, src, first, n, x, stride);
}

static void tkvi_f16_to_f32_scalar(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f16_to_f32(tkvi_load16(src + 2 * i));
}

static void tkvi_f32_to_f16_scalar(const float *x, int n, uint8_t *dst) {
    int i;
    for (i = 0; i < n; i++) tkvi_store16(dst + 2 * i, tkvi_f32_to_f16(x[i]));
}

static void tkvi_decode_log_scales_scalar(const uint8_t *src, int n, int top, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_log_value(src[i], top);
}

static void tkvi_encode_log_scales_scalar(const float *x, int n, int top, uint8_t *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = (uint8_t)tkvi_log_code(x[i], top);
}

static void tkvi_interleave_scalar(uint8_t (*column)[TKVI_BLOCK], const int16_t *channel, uint8_t *tile) {
    int t, r;
    for (t = 0; t < TKVI_BLOCK; t++)
        for (r = 0; r < 4; r++) tile[4 * t + r] = column[channel[r]][t];
}

TKVI_FN int tkvi_signed_byte(int b) { return b < 128 ? b : b - 256; }

TKVI_FN float tkvi_zero(int offset, float scale, float mean, float unit, int middle) {
    return tkvi_f32(tkvi_f32(scale * unit * (float)(tkvi_signed_byte(offset) - middle)) + mean);
}

static void tkvi_decode_zero_points_scalar(const uint8_t *offset, const float *scale, const float *mean,
                                           float unit, int middle, int n, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_zero(offset[i], scale[i], mean[i], unit, middle);
}

/* Functions of one side of a format. x is [token][stride] floats; channels from side->dim on are not touched. */
typedef struct tkvi_codec {
    /* Sets tiles (unless a share did), groups, code_bytes, meta_bytes and levels, from dim, pad and group. */
    void (*layout)(struct tkvi_side *s);
    /* Writes the whole side. n: 1 .. 64 tokens; places beyond n get code 0. Same bytes on every machine. */
    void (*encode)(const struct tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride, int n,
                   uint8_t *dst);
    tkvi_decoder decode;
    /* Tile formats: value = scale * level + zero, level = code, or levels[code] if the side has a table. For A's
     * outlier this is a neighbour's value: see tkvi_outlier_of.
     *   K: scale[group][position], groups along tokens, position = place in the channel order
     *   V: scale[group][token], groups along channels
     * NULL for exact formats. */
    void (*meta)(const struct tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *ops, float *scale,
                 float *zero);
    /* Exact formats: writes one token into a side that was cleared at creation. NULL for the others. */
    void (*put)(const struct tkvi_side *s, const tkvi_simd_ops *ops, const float *x, int token, uint8_t *dst);
    /* Writes zeros over what the side holds of single tokens: codes, and scales that one token has. dead_mask: bit per
     * slot. The values of the other tokens stay, bit for bit, so what tokens have in common (scales and means of
     * channels) stays too. */
    void (*clear)(const struct tkvi_side *s, uint64_t dead_mask, uint8_t *bytes);
} tkvi_codec;

/* Exact storage holds floats, so tokens can be added one by one and cut off again. */
typedef enum tkvi_storage {
    TKVI_AS_F32,
    TKVI_AS_F16,
    TKVI_AS_BF16,
    TKVI_AS_TILES,
    TKVI_AS_DECODED, /* any bytes: attention reads them through decode */
    TKVI_STORAGE_COUNT
} tkvi_storage;

typedef struct tkvi_format {
    const char *name;
    int bits;            /* of a code; 16 or 32 for exact formats; A and R: average in quarter bits */
    tkvi_storage stored; /* selects the kernel that reads it */
    int8_t shared;      /* 1: the heads of a layer share its bytes, by the statistics of learn/statistics.h */
    int8_t rotated;     /* 1: attention works on values rotated by core/rotate.h */
    int8_t scales[2];   /* masks of the tkv_scales that K and V can have; 0: the format ignores the option */
    tkvi_codec side[2]; /* TKV_K, TKV_V; all NULL: this format does not store that side */
    const tkvi_family *family;
} tkvi_format;

/* The share of one head's side in its layer's table (learn/statistics.h). A side without one takes equal shares. */
typedef struct tkvi_share {
    tkvi_tile_counts tiles;    /* K: by width */
    int half_bits;             /* V: bits of a value, in half bits */
    int top;                   /* top of its log-scale window (core/log_scale.h) */
    const uint8_t *order;      /* K: channel at each position (tkvi_order_at) */
    const float *mean;         /* K: static mean at each position, [pad]; fp16 values */
    const uint8_t *importance; /* K: see tkvi_head */
    int v_in_k;                /* K: 1: V is inside it, so the outlier has no row */
} tkvi_share;

struct tkvi_grid;

/* Layout of one side. Types are small: a cache has one side for each head of each layer's tiers and versions. */
typedef struct tkvi_side {
    const tkvi_format *format;
    size_t code_bytes, meta_bytes, bytes;
    tkv_side which;
    tkvi_tile_counts tiles; /* by width */
    int16_t dim, pad;       /* channels, and channels rounded up to 16 */
    int16_t first;          /* V inside K: the first channel of V that a prefill kernel sums; 0: all */
    int16_t group;          /* values per scale: 64, 32, or TKV_MAX_HEAD_DIM (one scale a token) */
    int16_t groups;         /* K: along the 64 tokens; V: along the channels */
    int8_t tokens;          /* capacity: 64, or fewer in an exact side */
    int8_t pairs; /* V: 1: a tile of 16 lanes holds 32 channels; levels has 16 more for the second channels */
    int8_t has_share, half_bits; /* 1: a share set tiles or half_bits; V: see tkvi_share */
    int16_t top;                 /* see tkvi_share */
    int8_t fit;                  /* KIVI: see core/fit.h */
    int8_t rotate, center;       /* formats/token.h */
    int8_t tabled;               /* 1: the family's state is in a cache; 0: a block alone */
    int8_t slots;                /* for outliers, per token */
    int8_t has_outlier;          /* formats A: 1: the outlier token has a row of its own (formats/a.h) */
    int32_t start;               /* position of the first token of the block, for RoPE */
    const uint8_t *order;        /* K: channel at each position (tkvi_order_at); NULL: the given order */
    const float *mean;           /* K: see tkvi_share */
    const uint8_t *importance;   /* K: see tkvi_head; NULL: all channels alike */
    const int8_t *levels;        /* V: 16 levels of -127..127, by code (widths up to 4); NULL: level = code */
    const tkv_format_options *options;    /* with defaults filled in; a format reads its own */
    const struct tkvi_grid *grid;         /* formats/token.h */
    const void *layer_state, *head_state; /* what the family has learned; NULL: nothing */
    const tkvi_rope *rope;                /* NULL: keys are coded as given */
} tkvi_side;

TKVI_FN int tkvi_channel(const tkvi_side *s, int position) {
    return s->order ? tkvi_order_at(s->order, s->pad, position) : position;
}

/* Index in `levels` of the 16 levels of a width. Tiles of pairs have width 3. A slab of 16 channels without a
 * partner has plain codes, and its own levels after those of the pairs. */
TKVI_FN int tkvi_level_table(const tkvi_side *s, int width, int upper) {
    return !s->pairs ? 0 : width == 3 ? 16 * upper : 32;
}

/* The middle of the codes of a width. Kernels multiply (code - middle) by rounded weights, and the middle by
 * float weights. So the rounding of weights affects only the spread of the codes, not their mean. */
static float tkvi_centre(const tkvi_side *s, int width) {
    return s->levels ? 0.0f : 0.5f * (float)((1 << width) - 1);
}

static int tkvi_is_exact(const tkvi_format *f) { return f->stored < TKVI_AS_TILES; }

static int tkvi_format_stores(const tkvi_format *f, tkv_side which) { return f->side[which].layout != NULL; }

/* V inside K: a view of K's bytes as V. It has the layout of K and the channels of V, and no bytes of its own. */
static void tkvi_view_k_as_v(tkvi_side *v, const tkvi_side *k, int v_dim) {
    *v = *k;
    v->dim = (int16_t)v_dim;
    v->bytes = 0;
}

TKVI_FN int tkvi_is_view(const tkvi_side *s) { return s->bytes == 0; }

/* Writes one token into an exact side. Views take none: their tokens are those of K. */
static void tkvi_put_token(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, int token,
                           uint8_t *dst) {
    if (!tkvi_is_view(s)) s->format->side[s->which].put(s, ops, x, token, dst);
}

/* The side keeps `options`. tabled: 1 in a cache, 0 for a block alone. v_in_k: see tkvi_share. */
static void tkvi_side_make(tkvi_side *s, const tkvi_format *format, tkv_side which, int dim, int tokens,
                           const tkv_format_options *options, int tabled, int v_in_k,
                           const tkvi_share *share) {
    memset(s, 0, sizeof *s);
    s->format = format;
    s->which = which;
    s->dim = (int16_t)dim;
    s->pad = (int16_t)tkvi_round_up(dim, 16);
    s->tokens = (int8_t)tokens;
    s->options = options;
    s->group = (int16_t)options->group_size;
    s->tabled = (int8_t)tabled;
    s->top = TKVI_LOG_TOP_DEFAULT;
    s->has_outlier = (int8_t)(format->shared && which == TKV_K && !v_in_k);
    if (share) {
        s->has_share = 1;
        s->tiles = share->tiles;
        s->half_bits = (int8_t)share->half_bits;
        s->top = (int16_t)share->top;
        s->order = share->order;
        s->mean = share->mean;
        s->importance = share->importance;
    }
    format->side[which].layout(s);
    s->bytes = tkvi_align_up(s->code_bytes) + tkvi_align_up(s->meta_bytes);
}

/* A side with default options; a token is one part. */
static void tkvi_side_init(tkvi_side *s, const tkvi_format *format, tkv_side which, int dim, int group,
                           int tokens, const tkvi_share *share) {
    static const tkv_format_options standard[2] = {{64, 4, 0, 0, 0, 16, 1, 0, 0, 0, 0, 0, 10},
                                                   {32, 4, 0, 0, 0, 16, 1, 0, 0, 0, 0, 0, 10}};
    tkvi_side_make(s, format, which, dim, tokens, &standard[group == 32], 0, share && share->v_in_k, share);
}

/* >>codes in rows: those of a token follow one another, low bits first */
/* Writes a code of at most 8 bits into a cleared row. */
static void tkvi_put_code(uint8_t *row, int bits, int c, int code) {
    const int at = c * bits, wide = code << (at & 7);
    row[at / 8] = (uint8_t)(row[at / 8] | (wide & 255));
    if (wide > 255) row[at / 8 + 1] = (uint8_t)(row[at / 8 + 1] | wide >> 8);
}

/* Reads the byte behind the code as well. Behind the last row there are metadata. */
static int tkvi_get_code(const uint8_t *row, int bits, int c) {
    const uint8_t *p = row + c * bits / 8;
    return (p[0] | p[1] << 8) >> (c * bits & 7) & ((1 << bits) - 1);
}

/* The option that chooses the scales of a side. */
static int tkvi_scales_of(const tkv_format_options *o, tkv_side side) {
    return side == TKV_K ? o->k_scales : o->v_scales;
}

/* Returns whether a format can have the scales that the options ask for. */
static int tkvi_has_scales(const tkvi_format *f, const tkv_format_options *o, tkv_side side) {
    const int mask = f->scales[side];
    return !mask || (mask >> tkvi_scales_of(o, side) & 1);
}

/* Views are encoded with their K. */
static void tkvi_encode_side(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride,
                             int n, uint8_t *dst) {
    if (!tkvi_is_view(s)) s->format->side[s->which].encode(s, ops, x, stride, n, dst);
}

/* Writes zeros over the dead slots of rows that tokens have one by one. row: bytes of a token. */
static void tkvi_clear_rows(uint8_t *at, size_t row, uint64_t dead_mask) {
    for (; dead_mask; dead_mask >>= 1, at += row)
        if (dead_mask & 1) memset(at, 0, row);
}

/* Writes zeros over the dead slots of a side (tkvi_codec), and over the whole side if no slot is live. */
static void tkvi_clear_slots(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    const uint64_t all = ~(uint64_t)0 >> (64 - s->tokens);
    if (tkvi_is_view(s) || !(dead_mask & all)) return;
    if ((dead_mask & all) == all) memset(bytes, 0, s->bytes);
    else s->format->side[s->which].clear(s, dead_mask & all, bytes);
}

/* The result of tkvi_decode_side in formats/table.h, computed with the given simd_ops. */
static void tkvi_values(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first, int n,
                        float *x, size_t stride) {
    s->format->side[s->which].decode(s, ops, src, first, n, x, stride);
}

/* Rows that are to be coded, or learned from. Numbers of bytes that came from outside may not be finite; here they are:
 * encoders make integers of them. */
static void tkvi_finite_values(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first,
                               int n, float *x, size_t stride) {
    int t, c;
    tkvi_values(s, ops, src, first, n, x, stride);
    for (t = 0; t < n && (TKVI_HAS_OFFLOAD || TKVI_HAS_SAVE); t++) {
        float *row = x + (size_t)t * stride;
        if (tkvi_is_all_finite(row, s->dim)) continue;
        for (c = 0; c < s->dim; c++) row[c] = tkvi_saturate(row[c]);
    }
}

#endif /* TKVI_CORE_FORMAT_H */
