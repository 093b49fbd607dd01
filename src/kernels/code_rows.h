/*
 * kernels/code_rows.h - rows of codes: the formats stored by tokens (TKVI_AS_DECODED) as kernels/code_rows.inc reads
 * them. This part has no vectors. It locates codes, levels and scales of a side:
 *
 *     x[c] = level[code[c]] * scale                        formats of formats/token.h, per token
 *     x[c] = level[code[c]] * scale + zero + outliers      KVQUANT (K: per channel; V: per token), SUBSPACE (per token)
 *
 * Scales and zeros per token can differ between parts of 2^shift channels.
 */
#ifndef TKVI_KERNELS_CODE_ROWS_H
#define TKVI_KERNELS_CODE_ROWS_H

#include "kernels/neon.h"
#include "kernels/wasm.h"
#include "kernels/x86.h"

#ifdef TKVI_VECTORS

#define TKVI_MAX_PARTS (TKV_MAX_HEAD_DIM / 32) /* scales of a token; more are decoded by tkvi_decode_side */
#define TKVI_ROW_SLOTS 6                       /* outliers of a token, likewise */

typedef void (*tkvi_f16_loader)(const uint8_t *src, int n, float *dst); /* as in tkvi_simd_ops */

typedef enum tkvi_code_kind {
    TKVI_CODES_TABLE, /* 2 to 4 bits, with a table of levels */
    TKVI_CODES_INT8,
    TKVI_CODES_E4M3,
    TKVI_CODES_E5M2
} tkvi_code_kind;

typedef enum tkvi_code_scales {
    TKVI_SCALE_BY_TOKEN, /* no zeros */
    TKVI_LINE_BY_TOKEN,
    TKVI_LINE_BY_CHANNEL
} tkvi_code_scales;

/* A side as rows of codes. */
typedef struct tkvi_code_rows {
    const tkvi_side *s;
    const uint8_t *codes;
    size_t row_bytes; /* codes of one token */
    tkvi_code_kind kind;
    tkvi_code_scales scales;
    int bits, shift, parts; /* BY_TOKEN: scale[token * parts + (channel >> shift)], zero alike */
    const uint8_t *slots;   /* of outliers, [64][s->slots] (formats/kvquant.h); NULL: there are none */
    const uint8_t *means;   /* fp16, [dim], to be added after the rotation back; NULL: none */
    const uint8_t *factors; /* E4M3, [64][parts], scale is factor * zero[token]; NULL: none */
    int rotated;
    uintptr_t ahead; /* see tkvi_prefetch */
    TKVI_ALIGNED float level[16], outlier[TKVI_BLOCK * TKVI_ROW_SLOTS];
    TKVI_ALIGNED float scale[TKVI_BLOCK * TKVI_MAX_PARTS + 16],
        zero[TKVI_BLOCK * TKVI_MAX_PARTS]; /* + 16: slack */
} tkvi_code_rows;

/* Repeats the 2^bits levels, so that higher bits of an index make no difference. */
static void tkvi_set_levels(tkvi_code_rows *r, const float *level) {
    int i;
    for (i = 0; i < 16; i++) r->level[i] = level[i & ((1 << r->bits) - 1)];
}

static void tkvi_open_token_rows(tkvi_code_rows *r, tkvi_f16_loader load) {
    const tkvi_side *s = r->s;
    const tkvi_token_at at = tkvi_token_places(s);
    float level[16];
    int c;
    r->bits = s->grid->bits;
    r->parts = at.parts ? at.parts : s->groups;
    r->shift = at.parts ? 4 : s->group == 32 ? 5 : s->group == 64 ? 6 : 10;
    r->rotated = s->rotate;
    if (s->center) r->means = r->codes + at.mean;
    if (at.parts) r->factors = r->codes + at.part;
    load(r->codes + at.scale, TKVI_BLOCK * s->groups, at.parts ? r->zero : r->scale);
    if (r->bits <= 4) {
        for (c = 0; c < 1 << r->bits; c++) level[c] = s->grid->level(c);
        tkvi_set_levels(r, level);
    } else {
        r->kind = s->grid == &tkvi_int_grids[6] ? TKVI_CODES_INT8
                  : s->grid == &tkvi_grid_e4m3  ? TKVI_CODES_E4M3
                                                : TKVI_CODES_E5M2;
    }
}

static void tkvi_open_subspace_rows(tkvi_code_rows *r, tkvi_f16_loader load) {
    const tkvi_side *s = r->s;
    const int n = TKVI_BLOCK * s->groups, width = s->dim / s->groups;
    int c;
    for (c = 0; c < 16; c++) r->level[c] = (float)(c & ((1 << r->bits) - 1));
    r->scales = TKVI_LINE_BY_TOKEN;
    r->parts = s->groups;
    r->shift = tkvi_log2_floor(width);
    r->rotated = s->rotate;
    load(r->codes + s->code_bytes, n, r->scale);
    load(r->codes + s->code_bytes + 2 * n, n, r->zero);
}

static void tkvi_open_kvquant_rows(tkvi_code_rows *r, tkvi_f16_loader load) {
    const tkvi_side *s = r->s;
    const uint8_t *slot = r->codes + tkvi_kvquant_places(s).slot;
    const int bytes = tkvi_kvquant_slot_bytes(s);
    uint8_t outlier[2 * TKVI_BLOCK * TKVI_ROW_SLOTS];
    tkvi_kvquant_ranges own;
    tkvi_book standard;
    int i;
    tkvi_set_levels(r, tkvi_kvquant_decoded(s, tkvi_kvquant_book(s, &standard)));
    r->slots = s->slots ? slot : NULL;
    for (i = 0; i < TKVI_BLOCK * s->slots; i++)
        memcpy(outlier + 2 * i, slot + bytes * (i + 1) - 2, 2); /* the last two of each slot */
    load(outlier, TKVI_BLOCK * s->slots, r->outlier);
    r->scales = s->which == TKV_K ? TKVI_LINE_BY_CHANNEL : TKVI_LINE_BY_TOKEN;
    if (s->which == TKV_V) {
        load(r->codes + s->code_bytes, TKVI_BLOCK, r->scale);
        load(r->codes + s->code_bytes + 2 * TKVI_BLOCK, TKVI_BLOCK, r->zero);
        return;
    }
    (void)tkvi_kvquant_ranges_of(s, r->codes, &own);
    memset(r->scale, 0, (size_t)s->pad * sizeof(float));
    memset(r->zero, 0, (size_t)s->pad * sizeof(float));
    memcpy(r->scale, own.radius, (size_t)s->dim * sizeof(float));
    memcpy(r->zero, own.middle, (size_t)s->dim * sizeof(float));
}

/* 1 if kernels/code_rows.inc reads the side; 0: its decode function must do. */
static int tkvi_reads_code_rows(const tkvi_side *s) {
    if (s->dim < 16) return 0;
    if (TKVI_HAS_TOKEN_FORMATS && s->grid)
        return (s->grid->bits <= 4 || s->grid->bits == 8) &&
               tkvi_max(s->groups, tkvi_token_places(s).parts) <= TKVI_MAX_PARTS;
    if (TKVI_HAS_SUBSPACE && s->format->side[s->which].layout == tkvi_subspace_layout) {
        const int width = s->dim / s->groups;
        return width % 16 == 0 && (width & (width - 1)) == 0 && width * s->groups == s->dim;
    }
    return TKVI_HAS_KVQUANT && s->slots <= TKVI_ROW_SLOTS &&
           (s->which == TKV_V || !s->tabled || s->head_state);
}

/* Prepares reading of a side that tkvi_reads_code_rows. */
static void tkvi_open_code_rows(tkvi_code_rows *r, const tkvi_side *s, tkvi_f16_loader load,
                                const uint8_t *src, uintptr_t ahead) {
    r->s = s;
    r->codes = src;
    r->row_bytes = s->code_bytes / TKVI_BLOCK;
    r->kind = TKVI_CODES_TABLE;
    r->scales = TKVI_SCALE_BY_TOKEN;
    r->bits = s->format->bits;
    r->parts = 1;
    r->shift = 10;
    r->slots = r->means = r->factors = NULL;
    r->rotated = 0;
    r->ahead = ahead;
    if (TKVI_HAS_TOKEN_FORMATS && s->grid) tkvi_open_token_rows(r, load);
    else if (TKVI_HAS_SUBSPACE && s->format->side[s->which].layout == tkvi_subspace_layout)
        tkvi_open_subspace_rows(r, load);
    else if (TKVI_HAS_KVQUANT) tkvi_open_kvquant_rows(r, load);
}

/* Adds the outliers of n tokens, from token `from` on. */
static void tkvi_add_outliers(const tkvi_code_rows *r, int from, int n, float *x, size_t stride) {
    const int slots = r->s->slots, dim = r->s->dim, bytes = tkvi_kvquant_slot_bytes(r->s);
    const uint8_t *slot = r->slots + bytes * from * slots;
    const float *by = r->outlier + from * slots;
    int t, i;
    for (t = 0; t < n; t++, x += stride)
        for (i = 0; i < slots; i++, slot += bytes, by++) {
            const int c = tkvi_kvquant_channel_at(r->s, slot);
            if (c < dim) x[c] += *by;
        }
}

/* Position of the first token of the block, for RoPE. */
static int64_t tkvi_code_rows_start(const tkvi_code_rows *r) {
    const uint32_t start = tkvi_load32(r->codes + r->s->code_bytes);
    return start < 0x80000000u ? (int64_t)start : (int64_t)start - ((int64_t)1 << 32);
}

#endif /* TKVI_VECTORS */

#endif /* TKVI_KERNELS_CODE_ROWS_H */
