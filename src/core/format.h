/*
 * core/format.h - what a format is: how one side (K or V) of one head's block becomes bytes.
 *
 * To add a format:
 *   1. write its scalar code in a file format_NAME.h: the functions of tkvi_codec (below) for each side
 *      it can store, with the bytes drawn at the top;
 *   2. add its name to tkv_format in api.h and one line to the table in formats/table.h.
 * Nothing else has to know it: sizes, demotion, reading, attention and the tests go through the table. A format
 * whose codes are tiles (core/tile.h) runs on the integer kernels of every instruction set as it is, whatever its
 * widths, channel order and level table; only `meta` is its own. One that is stored as TKVI_AS_DECODED needs
 * layout, encode and decode and nothing more: attention decodes 16 tokens at a time; on x86 those with rows of
 * codes and a table of levels can be read by vectors, if kernels/decode_x86.h knows where they are. If each token
 * has a grid and a scale, formats/token.h has all three.
 *
 * A side in memory: codes (a multiple of 64 bytes), then metadata, padded to 64 bytes. A record is the K
 * side, then the V side, of one head. May call tile and base.
 */
#ifndef TKVI_CORE_FORMAT_H
#define TKVI_CORE_FORMAT_H

#include "core/log_scale.h"
#include "core/rotate.h"
#include "core/tile.h"

#define TKVI_BLOCK TKV_BLOCK_TOKENS
#define TKVI_MAX_GROUPS (TKV_MAX_HEAD_DIM / 32) /* of V along channels; of K along tokens it is two */

struct tkvi_side;
struct tkvi_columns;
struct tkvi_rope;
struct tkvi_kvquant;
struct tkvi_simd_ops;

/* Tokens first .. first+n-1 of a side. Same bits on every machine: at most one rounding per value. */
typedef void (*tkvi_decoder)(const struct tkvi_side *s, const struct tkvi_simd_ops *help, const uint8_t *src,
                             int first, int n, float *x, size_t stride);

/* >>helpers: steps that formats ask of the instruction set. What stands here is their definition. */
typedef struct tkvi_simd_ops {
    void (*halves)(const uint8_t *src, int n, float *dst);        /* fp16 to float */
    void (*to_halves)(const float *x, int n, uint8_t *dst);       /* finite floats to fp16 */
    void (*logs)(const uint8_t *src, int n, int top, float *dst); /* core/log_scale.h */
    /* dst = scale * unit * (offset - middle) + mean; the product is exact. offset: signed bytes */
    void (*zeros)(const uint8_t *offset, const float *scale, const float *mean, float unit, int middle, int n,
                  float *dst);
    void (*log_codes)(const float *x, int n, int top, uint8_t *dst); /* core/log_scale.h */
    /* Encoding. A tile's codes to its bytes, which were cleared (core/tile.h); a tile of K from its columns. */
    void (*pack_tile)(uint8_t *codes, const tkvi_tile_at *at, int width, const uint8_t *code);
    void (*interleave)(uint8_t (*column)[TKVI_BLOCK], const uint8_t *channel, uint8_t *tile);
    /* Codes, then metadata of 16 columns of K (formats/a.h); codes and scales of V (formats/r.h). */
    void (*columns)(struct tkvi_columns *c);
    void (*settle)(struct tkvi_columns *c, int top);
    void (*tokens)(const struct tkvi_side *s, const float *x, size_t stride, int n,
                   uint8_t (*code)[TKVI_TILE_CODES], float *scale);
    /* Codes and metadata of KIVI (formats/kivi.h). */
    void (*groups)(const struct tkvi_side *s, const float *x, size_t stride, int n,
                   uint8_t (*code)[TKVI_TILE_CODES], uint8_t *meta);
    tkvi_decoder tiles; /* a side of tiles (formats/tiles.h) */
} tkvi_simd_ops;

#define TKVI_LANES 16 /* columns or tokens that are coded together */

/* 16 neighbouring channels of K. `lanes` of them are there; the others have a rubbish code. */
typedef struct tkvi_columns {
    const float *x; /* in: values, [token][stride], `lanes` of them are read */
    size_t stride;
    int n, lanes;
    const float *mean;    /* [16] */
    const uint8_t *width; /* [16] */
    /* Out, [16] each: codes, 0 beyond n; byte of the scale; offset; mean of the residuals. */
    uint8_t (*code)[TKVI_BLOCK], *log, *offset;
    float *middle;
    uint32_t beyond_mask; /* bit l: column l has bits, but its mean is beyond this scale and offset */
    /* Between the steps: */
    TKVI_ALIGNED int16_t u[TKVI_BLOCK / 2][TKVI_LANES][2]; /* values as integers; which: tkvi_column_u */
    TKVI_ALIGNED float low[TKVI_LANES], step[TKVI_LANES];  /* value = low + step * (u + 1/2), nearly */
    TKVI_ALIGNED int32_t sum_u[TKVI_LANES], sum_uu[TKVI_LANES];
    TKVI_ALIGNED int32_t sum_c[TKVI_LANES], sum_cc[TKVI_LANES], sum_cu[TKVI_LANES]; /* of the codes chosen */
} tkvi_columns;

/* Tokens t and t + 2 share 32 bits: codes of four tokens then fall into place with one shift. */
static int16_t *tkvi_column_u(tkvi_columns *c, int l, int t) {
    return &c->u[t / 4 * 2 + t % 2][l][t % 4 / 2];
}

static void tkvi_halves_scalar(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f16_to_f32(tkvi_load16(src + 2 * i));
}

static void tkvi_to_halves_scalar(const float *x, int n, uint8_t *dst) {
    int i;
    for (i = 0; i < n; i++) tkvi_store16(dst + 2 * i, tkvi_f32_to_f16(x[i]));
}

static void tkvi_logs_scalar(const uint8_t *src, int n, int top, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_log_value(src[i], top);
}

static void tkvi_log_codes_scalar(const float *x, int n, int top, uint8_t *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = (uint8_t)tkvi_log_code(x[i], top);
}

static void tkvi_interleave_scalar(uint8_t (*column)[TKVI_BLOCK], const uint8_t *channel, uint8_t *tile) {
    int t, r;
    for (t = 0; t < TKVI_BLOCK; t++)
        for (r = 0; r < 4; r++) tile[4 * t + r] = column[channel[r]][t];
}

TKVI_FN int tkvi_signed_byte(int b) { return b < 128 ? b : b - 256; }

TKVI_FN float tkvi_zero(int offset, float scale, float mean, float unit, int middle) {
    return tkvi_f32(tkvi_f32(scale * unit * (float)(tkvi_signed_byte(offset) - middle)) + mean);
}

static void tkvi_zeros_scalar(const uint8_t *offset, const float *scale, const float *mean, float unit,
                              int middle, int n, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_zero(offset[i], scale[i], mean[i], unit, middle);
}

/* One side of a format. `x` is [token][stride] floats; channels beyond side->dim are neither read nor written. */
typedef struct tkvi_codec {
    /* Sets runs (if no share did), groups, code_bytes, meta_bytes, levels from dim, pad and group. */
    void (*layout)(struct tkvi_side *s);
    /* Writes the whole side. n tokens, 1..64; those beyond n get code 0. Same bytes on every machine. */
    void (*encode)(const struct tkvi_side *s, const tkvi_simd_ops *help, const float *x, size_t stride, int n,
                   uint8_t *dst);
    tkvi_decoder decode;
    /* Tile formats: value = scale * level + zero, level = code, or levels[code] if the side has a table.
     *   K: scale[group][position], groups along tokens, position = place in the channel order
     *   V: scale[group][token], groups along channels
     * NULL for exact formats. */
    void (*meta)(const struct tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *help, float *scale,
                 float *zero);
    /* Exact formats: writes one token of a side that was cleared when it was made. NULL for the others. */
    void (*put)(const struct tkvi_side *s, const tkvi_simd_ops *help, const float *x, int token,
                uint8_t *dst);
} tkvi_codec;

/* Exact ones are floats: tokens can be added one by one and cut off again. */
typedef enum tkvi_storage {
    TKVI_AS_F32,
    TKVI_AS_F16,
    TKVI_AS_BF16,
    TKVI_AS_TILES,
    TKVI_AS_DECODED, /* anything: kernels know its decode alone */
    TKVI_STORAGE_COUNT
} tkvi_storage;

typedef struct tkvi_format {
    const char *name;
    int bits;            /* of a code; 16 or 32 for exact formats; A and R: average in quarter bits */
    tkvi_storage stored; /* how, and so by which kernel it is read */
    int shared;          /* 1: the heads of a layer share its bytes, by what learn/statistics.h learns */
    int rotated;         /* 1: attention on it happens behind the rotation of core/rotate.h */
    tkvi_codec side[2];  /* TKV_K, TKV_V; without functions: this format does not store that side */
} tkvi_format;

/* What a layer's table says of one head's side (learn/statistics.h). A side without one takes equal shares. */
typedef struct tkvi_share {
    tkvi_runs runs;       /* K: tiles by width */
    int half_bits;        /* V: of each value, in half bits */
    int top;              /* window of its logarithmic scales */
    const uint8_t *order; /* K: channel at each position, [pad] */
    const float *mean;    /* K: static mean at each position, [pad]; fp16 values */
} tkvi_share;

/* What the caller chose for the formats that know of it. */
typedef struct tkvi_options {
    int group;
    int fit;    /* bits of tkv_fit */
    int rotate; /* bits of tkv_rotate */
    int center_k;
    int feedback_unit; /* channels that SQuat codes together */
    int parts;         /* of a token in SUBSPACE formats */
    int kvquant;       /* bits of tkv_kvquant */
    int tabled;        /* KVQUANT: ranges are in a table of the layer */
} tkvi_options;

struct tkvi_grid;

/* Small types: a cache has one for each head of each layer's tiers and versions. */
typedef struct tkvi_side {
    const tkvi_format *format;
    size_t code_bytes, meta_bytes, bytes;
    tkv_side which;
    tkvi_runs runs;   /* tiles by width */
    int16_t dim, pad; /* channels, and channels rounded up to 16 */
    int16_t group;    /* values per scale: 64 or 32 */
    int16_t groups;   /* K: along the 64 tokens; V: along the channels */
    int8_t tokens;    /* room: 64, or fewer in an exact side */
    int8_t pairs;     /* V: 1: a tile of 16 lanes holds 32 channels; levels has 16 more for the upper half */
    int8_t given, half_bits; /* 1: a share set runs or half_bits; V: see tkvi_share */
    int16_t top;             /* the same */
    int8_t fit;              /* KIVI: see core/fit.h */
    int8_t rotate, center;   /* formats/token.h */
    int8_t parts;            /* formats/subspace.h */
    int8_t feedback_unit;    /* SQuat: channels coded together (formats/squat.h) */
    int8_t kvquant, tabled,
        slots;            /* formats/kvquant.h: options; 1: of a cache, with a table; outliers of a token */
    int32_t start;        /* the same: of the block that is encoded */
    const uint8_t *order; /* K: channel at each position, `pad` of them; NULL: as they come */
    const float *mean;    /* K: see tkvi_share */
    const int8_t *levels; /* of V: 16 levels of -127..127 by code (widths up to 4); NULL: the code itself */
    const struct tkvi_grid *grid; /* formats/token.h */
    const uint16_t
        *feedback; /* SQuat: what errors do to later channels; NULL: nothing is known of the queries */
    const struct tkvi_kvquant *table; /* KVQUANT: from the layer's table */
    const float *radius, *middle;     /* of each channel of K */
    const struct tkvi_rope *rope;     /* NULL: keys are coded as they come */
} tkvi_side;

TKVI_FN int tkvi_channel(const tkvi_side *s, int position) {
    return s->order ? s->order[position] : position;
}

/* Where in `levels` the 16 levels of a width stand. Tiles of pairs have width 3; a slab of 16 channels that found
 * no partner has plain codes, and levels of its own behind those of the pairs. */
TKVI_FN int tkvi_level_table(const tkvi_side *s, int width, int upper) {
    return !s->pairs ? 0 : width == 3 ? 16 * upper : 32;
}

/* What the codes of a width lie around: kernels multiply codes minus this by rounded weights, and take the
 * rest from the float ones, so that rounding meets the spread of the codes and not their mean. */
static float tkvi_centre(const tkvi_side *s, int width) {
    return s->levels ? 0.0f : 0.5f * (float)((1 << width) - 1);
}

static int tkvi_is_exact(const tkvi_format *f) { return f->stored < TKVI_AS_TILES; }

static int tkvi_format_stores(const tkvi_format *f, tkv_side which) { return f->side[which].layout != NULL; }

static void tkvi_side_make(tkvi_side *s, const tkvi_format *format, tkv_side which, int dim, int tokens,
                           const tkvi_options *o, const tkvi_share *share) {
    memset(s, 0, sizeof *s);
    s->format = format;
    s->which = which;
    s->dim = (int16_t)dim;
    s->pad = (int16_t)tkvi_round_up(dim, 16);
    s->tokens = (int8_t)tokens;
    s->group = (int16_t)o->group;
    s->fit = (int8_t)o->fit;
    s->rotate = o->rotate >> which & 1;
    s->center = o->center_k && which == TKV_K;
    s->feedback_unit = (int8_t)o->feedback_unit;
    s->parts = (int8_t)o->parts;
    s->kvquant = (int8_t)o->kvquant;
    s->tabled = (int8_t)o->tabled;
    s->top = TKVI_LOG_TOP_ALIKE;
    if (share) {
        s->given = 1;
        s->runs = share->runs;
        s->half_bits = (int8_t)share->half_bits;
        s->top = (int16_t)share->top;
        s->order = share->order;
        s->mean = share->mean;
    }
    format->side[which].layout(s);
    s->bytes = tkvi_align_up(s->code_bytes) + tkvi_align_up(s->meta_bytes);
}

/* Without options, tokens in one part. */
static void tkvi_side_init(tkvi_side *s, const tkvi_format *format, tkv_side which, int dim, int group,
                           int tokens, const tkvi_share *share) {
    tkvi_options o;
    memset(&o, 0, sizeof o);
    o.group = group;
    o.parts = 1;
    tkvi_side_make(s, format, which, dim, tokens, &o, share);
}

static void tkvi_encode_side(const tkvi_side *s, const tkvi_simd_ops *help, const float *x, size_t stride,
                             int n, uint8_t *dst) {
    s->format->side[s->which].encode(s, help, x, stride, n, dst);
}

/* What tkvi_decode_side in formats/table.h gives, by `help`. */
static void tkvi_values(const tkvi_side *s, const tkvi_simd_ops *help, const uint8_t *src, int first, int n,
                        float *x, size_t stride) {
    s->format->side[s->which].decode(s, help, src, first, n, x, stride);
}

#endif /* TKVI_CORE_FORMAT_H */
