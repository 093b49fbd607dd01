/*
 * formats/tiles.h - shared code of all formats made of tiles: codes to tiles and back, decoding through `meta`.
 */
#ifndef TKVI_FORMATS_TILES_H
#define TKVI_FORMATS_TILES_H

#include "core/format.h"

/* Level of a code. upper: 1 for the second channel of a pair. */
TKVI_FN float tkvi_level(const tkvi_side *s, int width, int upper, int code) {
    return (float)(s->levels ? s->levels[tkvi_level_table(s, width, upper) + (code & 15)] : code);
}

/* Unpacked codes of a side, tile by tile. The two functions below find the code of one value. */
typedef uint8_t tkvi_codes[TKV_MAX_HEAD_DIM / 4][TKVI_TILE_CODES];

TKVI_FN uint8_t *tkvi_k_code(tkvi_codes code, int position, int token) {
    unsigned p = (unsigned)position; /* unsigned: divides by a shift */
    return &code[p / 4u][4u * (unsigned)token + p % 4u];
}

TKVI_FN uint8_t *tkvi_v_code(tkvi_codes code, int lane, int token) { /* a pair of channels has one lane */
    unsigned l = (unsigned)lane, t = (unsigned)token;
    return &code[l / 16u * 4u + t / 16u][t % 16u / 4u * 64u + l % 16u * 4u + t % 4u];
}

static void tkvi_pack(const tkvi_side *s, const tkvi_simd_ops *ops, tkvi_codes code, uint8_t *dst) {
    uint8_t *at = dst;
    int width, i, number = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++, number++) {
            ops->pack_tile(at, width, code[number]);
            at += TKVI_TILE_BYTES(width);
        }
}

/* Clears the codes of dead slots in all tiles of a side. */
static void tkvi_clear_tiles(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    uint8_t code[TKVI_TILE_CODES];
    int width, i, t, k;
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++, bytes += TKVI_TILE_BYTES(width)) {
            tkvi_unpack_tile(bytes, width, code);
            for (k = 0; k < TKVI_TILE_CODES; k++) {
                t = s->which == TKV_K ? k / 4 : i % 4 * 16 + k / 64 * 4 + k % 4;
                if (dead_mask >> t & 1) code[k] = 0;
            }
            tkvi_pack_tile(bytes, width, code);
        }
}

/* >>K */
/* Decodes token t at a position, from its tile, scale and zero. */
TKVI_FN float tkvi_k_value(const tkvi_side *s, int width, const uint8_t *tile, int position, int t,
                           float scale, float zero) {
    float product = tkvi_f32(scale * tkvi_level(s, width, 0, tile[4 * t + position % 4])); /* exact */
    return tkvi_f32(product + zero);
}

/* Decodes n tokens of the channel at one position, from its tile. */
static void tkvi_k_values(const tkvi_side *s, int width, const uint8_t *tile, int position, int first, int n,
                          const float *scale, const float *zero, float *x, size_t stride) {
    int channel = tkvi_channel(s, position), t;
    for (t = first; t < first + n && channel < s->dim; t++) {
        int m = t * s->groups / TKVI_BLOCK * s->pad + position;
        x[(size_t)(t - first) * stride + (size_t)channel] =
            tkvi_k_value(s, width, tile, position, t, scale[m], zero[m]);
    }
}

static void tkvi_tiles_k_values(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first,
                                int n, float *x, size_t stride) {
    float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    const uint8_t *at = src;
    int width, i, r, t, position = 0;
    s->format->side[TKV_K].meta(s, src, ops, scale, zero);
    for (width = TKVI_MAX_WIDTH; width >= 0; width--) {
        int tiles = width ? s->tiles.n[width] : (s->pad - position) / 4; /* width 0: channels without codes */
        for (i = 0; i < tiles; i++, position += 4) {
            uint8_t tile[TKVI_TILE_CODES];
            if (width) {
                tkvi_unpack_tile(at, width, tile);
                at += TKVI_TILE_BYTES(width);
            } else {
                memset(tile, 0, sizeof tile);
            }
            for (r = 0; r < 4; r++)
                tkvi_k_values(s, width, tile, position + r, first, n, scale, zero, x, stride);
        }
    }
    if (s->format->rotated)
        for (t = 0; t < n; t++) tkvi_rotate_back(x + (size_t)t * stride, s->dim);
}

/* >>V */
TKVI_FN int tkvi_slab_channels(const tkvi_side *s, int width) { return s->pairs && width == 3 ? 32 : 16; }

/* Decodes token t of channel c of a slab, from its tile, scale and zero. */
TKVI_FN float tkvi_v_value(const tkvi_side *s, int width, const uint8_t *tile, int c, int t, float scale,
                           float zero) {
    int code = tile[t % 16 / 4 * 64 + 4 * (c % 16) + t % 4];
    float product = tkvi_f32(scale * tkvi_level(s, width, c / 16, code)); /* exact */
    return tkvi_f32(product + zero);
}

static void tkvi_tiles_v_values(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first,
                                int n, float *x, size_t stride) {
    float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    const uint8_t *at = src;
    int width, i, t, c, slab = 0;
    s->format->side[TKV_V].meta(s, src, ops, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++) {
            uint8_t tile[TKVI_TILE_CODES];
            int from = i % 4 * 16;
            tkvi_unpack_tile(at, width, tile);
            at += TKVI_TILE_BYTES(width);
            for (t = tkvi_max(first, from); t < tkvi_min(first + n, from + 16); t++)
                for (c = 0; c < tkvi_slab_channels(s, width) && slab + c < s->dim; c++) {
                    int m = (slab + c) / s->group * TKVI_BLOCK + t;
                    x[(size_t)(t - first) * stride + (size_t)(slab + c)] =
                        tkvi_v_value(s, width, tile, c, t, scale[m], zero[m]);
                }
            if (i % 4 == 3) slab += tkvi_slab_channels(s, width);
        }
    if (s->format->rotated)
        for (t = 0; t < n; t++) tkvi_rotate_back(x + (size_t)t * stride, s->dim);
}

/* >>both */
static void tkvi_decode_tiles_scalar(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src,
                                     int first, int n, float *x, size_t stride) {
    if (s->which == TKV_K) tkvi_tiles_k_values(s, ops, src, first, n, x, stride);
    else tkvi_tiles_v_values(s, ops, src, first, n, x, stride);
}

static void tkvi_decode_tiles(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first,
                              int n, float *x, size_t stride) {
    ops->decode_tiles(s, ops, src, first, n, x, stride);
}

#endif /* TKVI_FORMATS_TILES_H */
