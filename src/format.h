/*
 * format.h - what a format is: how one side (K or V) of one head's block becomes bytes.
 *
 * To add a format:
 *   1. write its scalar code in a file format_NAME.h: the functions of tkvi_codec (below) for each side
 *      it can store, with the bytes drawn at the top;
 *   2. add its name to tkv_format in api.h and one line to the table in format_table.h.
 * Nothing else has to know it: sizes, demotion, reading, attention and the tests go through the table. A
 * format whose codes are tiles (tile.h) runs on the integer kernels of every instruction set as it is,
 * whatever its widths, channel order and level table; only `meta` is its own.
 *
 * A side in memory: codes (a multiple of 64 bytes), then metadata, padded to 64 bytes. A record is the K
 * side, then the V side, of one head. May call tile and base.
 */
#ifndef TKVI_FORMAT_H
#define TKVI_FORMAT_H

#include "tile.h"

#define TKVI_BLOCK TKV_BLOCK_TOKENS
#define TKVI_MAX_GROUPS (TKV_MAX_HEAD_DIM / 32) /* of V along channels; of K along tokens it is two */

struct tkvi_side;

typedef void (*tkvi_halves)(const uint8_t *src, int n, float *dst);

static void tkvi_halves_scalar(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f16_to_f32(tkvi_load16(src + 2 * i));
}

/* One side of a format. `x` is [token][stride] floats; channels beyond side->dim are neither read nor written. */
typedef struct tkvi_codec {
    /* Sets runs, groups, code_bytes, meta_bytes (and order, levels) from dim, pad and group. */
    void (*layout)(struct tkvi_side *s);
    /* Writes the whole side. n tokens, 1..64; those beyond n get code 0. Same bytes on every machine. */
    void (*encode)(const struct tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst);
    /* Tokens first .. first+n-1. Same bits on every machine: at most one rounding per value. */
    void (*decode)(const struct tkvi_side *s, const uint8_t *src, int first, int n, float *x, size_t stride);
    /* Tile formats: value = scale * level + zero, level = code, or levels[code] if the side has a table.
     *   K: scale[group][position], groups along tokens, position = place in the channel order
     *   V: scale[group][token], groups along channels
     * `halves` turns fp16 into float as fast as this machine can. NULL for exact formats. */
    void (*meta)(const struct tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale,
                 float *zero);
    /* Exact formats: writes one token of a side that was cleared when it was made. NULL for the others. */
    void (*put)(const struct tkvi_side *s, const float *x, int token, uint8_t *dst);
} tkvi_codec;

/* Exact ones are floats: tokens can be added one by one and cut off again. */
typedef enum tkvi_storage {
    TKVI_AS_F32,
    TKVI_AS_F16,
    TKVI_AS_BF16,
    TKVI_AS_TILES,
    TKVI_STORAGE_COUNT
} tkvi_storage;

typedef struct tkvi_format {
    const char *name;
    int bits;            /* of a code; 16 or 32 for exact formats */
    tkvi_storage stored; /* how, and so by which kernel it is read */
    tkvi_codec side[2];  /* TKV_K, TKV_V */
} tkvi_format;

typedef struct tkvi_side {
    const tkvi_format *format;
    tkv_side which;
    int dim, pad;          /* channels, and channels rounded up to 16 */
    int tokens;            /* room: 64, or fewer in an exact side */
    int group;             /* values per scale: 64 or 32 */
    int groups;            /* K: along the 64 tokens; V: along the channels */
    tkvi_runs runs;        /* tiles by width */
    const uint16_t *order; /* K: channel at each position, `pad` of them; NULL: as they come */
    const int8_t *levels;  /* 16 levels of -127..127 by code (widths up to 4); NULL: the code itself */
    size_t code_bytes, meta_bytes, bytes;
} tkvi_side;

static int tkvi_channel(const tkvi_side *s, int position) { return s->order ? s->order[position] : position; }

/* What the codes of a width lie around: kernels multiply codes minus this by rounded weights, and take the
 * rest from the float ones, so that rounding meets the spread of the codes and not their mean. */
static float tkvi_centre(const tkvi_side *s, int width) {
    return s->levels ? 0.0f : 0.5f * (float)((1 << width) - 1);
}

static int tkvi_is_exact(const tkvi_format *f) { return f->stored != TKVI_AS_TILES; }

static void tkvi_side_init(tkvi_side *s, const tkvi_format *format, tkv_side which, int dim, int group,
                           int tokens) {
    memset(s, 0, sizeof *s);
    s->format = format;
    s->which = which;
    s->dim = dim;
    s->pad = tkvi_round_up(dim, 16);
    s->tokens = tokens;
    s->group = group;
    format->side[which].layout(s);
    s->bytes = tkvi_align_up(s->code_bytes) + tkvi_align_up(s->meta_bytes);
}

static void tkvi_encode_side(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst) {
    s->format->side[s->which].encode(s, x, stride, n, dst);
}

static void tkvi_decode_side(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                             size_t stride) {
    s->format->side[s->which].decode(s, src, first, n, x, stride);
}

#endif /* TKVI_FORMAT_H */
