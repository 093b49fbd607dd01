/*
 * blocks.h - blocks of the formats as core/tile.h and formats/kivi.h draw them, read by code of the tests' own, and
 * inputs of many kinds. test_format.c and white_formats.c share it.
 */
#ifndef TKV_BLOCKS_H
#define TKV_BLOCKS_H

#include "kit.h"

enum { BLOCK = TKV_BLOCK_TOKENS, MOST = BLOCK * TKV_MAX_HEAD_DIM };
enum { WIDE = MOST + 8 * BLOCK }; /* floats, with some room between rows */
enum { ROOM = 4 * MOST + 128 };   /* bytes of the largest block, and some behind it */

static float in[WIDE], out[WIDE], want[WIDE];
static uint8_t bytes[ROOM], other[ROOM];

static const tkv_format grids[] = {TKV_Q8, TKV_KIVI4, TKV_KIVI3, TKV_KIVI2};
static const tkv_format exacts[] = {TKV_F32, TKV_F16, TKV_BF16};
static const int dims[] = {1, 5, 16, 31, 48, 64, 80, 96, 112, 128, 192, 255, 256};

static inline tkv_codec codec(tkv_format format, int side, int dim, int group) {
    tkv_codec c;
    memset(&c, 0, sizeof c);
    c.format = format;
    c.side = side ? TKV_V : TKV_K;
    c.head_dim = dim;
    c.options.group_size = group;
    return c;
}

static inline int up(int n, int to) { return (n + to - 1) / to * to; }

static inline void poison(void *p, size_t n) { /* as floats: NaN */
    memset(p, 0xff, n);
}

static inline const char *describe(const tkv_codec *c, int n) {
    static char text[96];
    const char *name = tkv_get_name(TKV_NAME_FORMAT, (int)c->format);
    snprintf(text, sizeof text, "%s %c, head_dim %d, group %d, %d tokens", name ? name : "?",
             c->side == TKV_K ? 'K' : 'V', c->head_dim, c->options.group_size, n);
    return text;
}

/* >>tiles, as drawn in core/tile.h */
typedef struct bit_place {
    int byte, bit;
} bit_place;

static inline int wide_part(int width) {
    return width == 8 ? 256 : width == 6 ? 192 : width >= 4 ? 128 : width >= 2 ? 64 : 0;
}

static inline int has_half(int width) { return width < 6 && width % 2 == 1; }

/* Where bit `bit` of code q of one tile is, in a run of tiles of these widths. */
static inline bit_place place(const int *widths, int n_tiles, int tile, int q, int bit) {
    int plane = q / 64, j = q % 64, width = widths[tile], wide = 0, halves = 0, half = 0, i;
    bit_place at;
    for (i = 0; i < n_tiles; i++) {
        if (i < tile) {
            wide += wide_part(widths[i]);
            half += has_half(widths[i]);
        }
        halves += wide_part(widths[i]);
    }
    if (width == 8) {
        at.byte = wide + 64 * plane + j;
        at.bit = bit;
    } else if (width >= 4 && bit < 4) {
        at.byte = wide + 64 * (plane / 2) + j;
        at.bit = 4 * (plane % 2) + bit;
    } else if (width == 6) {
        at.byte = wide + 128 + j;
        at.bit = 2 * plane + bit - 4;
    } else if ((width == 2 || width == 3) && bit < 2) {
        at.byte = wide + j;
        at.bit = 2 * plane + bit;
    } else { /* the top bit of 5 and 3, the only one of 1 */
        at.byte = halves + half / 2 * 64 + j;
        at.bit = half % 2 * 4 + plane;
    }
    return at;
}

static inline int run_bytes(const int *widths, int n_tiles) {
    int i, wide = 0, halves = 0;
    for (i = 0; i < n_tiles; i++) {
        wide += wide_part(widths[i]);
        halves += has_half(widths[i]);
    }
    return wide + (halves + 1) / 2 * 64;
}

static inline int get_code(const uint8_t *p, const int *widths, int n_tiles, int tile, int q) {
    int code = 0, b;
    for (b = 0; b < widths[tile]; b++) {
        bit_place at = place(widths, n_tiles, tile, q, b);
        code |= (p[at.byte] >> at.bit & 1) << b;
    }
    return code;
}

static inline void put_code(uint8_t *p, const int *widths, int n_tiles, int tile, int q, int code) {
    int b;
    for (b = 0; b < widths[tile]; b++) {
        bit_place at = place(widths, n_tiles, tile, q, b);
        p[at.byte] = (uint8_t)(p[at.byte] | (code >> b & 1) << at.bit);
    }
}

static const int all_widths[] = {8, 6, 5, 4, 3, 2, 1};

/* Tiles widest first, as in a record. */
static inline int random_widths(tkv_rng *r, int *widths, int most) {
    int n = 0, i, k;
    for (i = 0; i < COUNT(all_widths); i++)
        for (k = tkv_rng_below(r, 4); k > 0 && n < most; k--) widths[n++] = all_widths[i];
    if (n == 0) widths[n++] = 1;
    return n;
}

/* >>blocks of Q8 and KIVI formats, as drawn in formats/kivi.h */
typedef struct drawing {
    int k, bits, top, dim, group, groups, pad, tiles, row;
    int scale, zero, size; /* byte offsets */
    int widths[TKV_MAX_HEAD_DIM / 4];
} drawing;

static inline drawing draw(const tkv_codec *c) {
    drawing d;
    int i;
    d.k = c->side == TKV_K;
    d.bits = c->format == TKV_Q8 ? 8 : c->format == TKV_KIVI4 ? 4 : c->format == TKV_KIVI3 ? 3 : 2;
    d.top = (1 << d.bits) - 1;
    d.dim = c->head_dim;
    d.group = c->options.group_size ? c->options.group_size : 64;
    d.pad = up(d.dim, 16);
    d.tiles = d.pad / 4;
    d.groups = d.k ? BLOCK / d.group : up(d.dim, d.group) / d.group;
    d.row = d.k ? d.pad : BLOCK;
    for (i = 0; i < d.tiles; i++) d.widths[i] = d.bits;
    d.scale = run_bytes(d.widths, d.tiles);
    d.zero = d.scale + 2 * d.groups * d.row;
    d.size = up(d.zero + 2 * d.groups * d.row, 64);
    return d;
}

static inline int code_of(const drawing *d, const uint8_t *p, int token, int channel) {
    int tile = d->k ? channel / 4 : channel / 16 * 4 + token / 16;
    int q = d->k ? 64 * (token / 16) + 4 * (token % 16) + channel % 4
                 : 64 * (token % 16 / 4) + 4 * (channel % 16) + token % 4;
    return get_code(p, d->widths, d->tiles, tile, q);
}

static inline int half_at(const uint8_t *p) { return p[0] | p[1] << 8; }

static inline double half_value(int h) { /* of a finite half */
    int e = h >> 10 & 31, m = h & 1023;
    double x = e ? ldexp((double)(m + 1024), e - 25) : ldexp((double)m, -24);
    return h >> 15 ? -x : x;
}

static inline double half_place(int h) { /* what its last bit is worth */
    int e = h >> 10 & 31;
    return ldexp(1.0, (e ? e : 1) - 25);
}

/* Halves of scale and zero of this value. */
static inline int scale_of(const drawing *d, const uint8_t *p, int token, int channel) {
    return half_at(p + d->scale +
                   2 * (d->k ? token / d->group * d->row + channel : channel / d->group * d->row + token));
}

static inline int zero_of(const drawing *d, const uint8_t *p, int token, int channel) {
    return scale_of(d, p + (d->zero - d->scale), token, channel);
}

/* scale * code + zero: exact in double, so that the float is the one rounding. */
static inline float value_of(const drawing *d, const uint8_t *p, int token, int channel) {
    double s = half_value(scale_of(d, p, token, channel)), z = half_value(zero_of(d, p, token, channel));
    volatile double x = s * code_of(d, p, token, channel) + z;
    return (float)x;
}

/* Any bytes are a block, as long as scales and zeros are finite. */
static inline void random_block(tkv_rng *r, const drawing *d, uint8_t *p) {
    int i;
    for (i = 0; i < d->size; i++) p[i] = (uint8_t)(tkv_rng_u64(r) & 0xffu);
    for (i = d->scale; i < d->zero + (d->zero - d->scale); i += 2) {
        if ((p[i + 1] & 0x7c) == 0x7c) p[i + 1] = (uint8_t)(p[i + 1] & ~0x40);
        if (i < d->zero) p[i + 1] = (uint8_t)(p[i + 1] & 0x7f);
    }
}

/* >>inputs */
enum { GAUSSIAN, UNIFORM, OUTLIERS, BIAS, SCALES, TINY_RANGE, LARGE, SMALL, SPARSE, KINDS };

static inline void fill(int kind, tkv_rng *r, int n, int dim, float *x) {
    double base = (double)(tkv_rng_below(r, 1201) - 600);
    int t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < dim; c++) {
            double v = tkv_rng_gauss(r);
            switch (kind) {
            case UNIFORM: v = 2 * tkv_rng_uniform(r) - 1; break;
            case OUTLIERS: v *= tkv_rng_below(r, 50) ? 1 : 16; break;
            case BIAS: v += c % 2 ? 600 : -600; break;
            case SCALES: v *= ldexp(1.0, c % 21 - 10); break;
            case TINY_RANGE: v = base + v * ldexp(1.0, -c % 24); break;
            case LARGE: v *= 40000; break;
            case SMALL: v = ldexp(v, -10 - tkv_rng_below(r, 135)); break;
            case SPARSE: v = tkv_rng_below(r, 4) ? 0 : v; break;
            default: break;
            }
            x[t * dim + c] = (float)v;
        }
}

#endif /* TKV_BLOCKS_H */
