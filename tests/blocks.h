/*
 * blocks.h - reads blocks by the layouts documented in core/tile.h and formats/kivi.h, without code of the library.
 * Also inputs of several kinds. test_format.c and white_formats.c share it.
 */
#ifndef TKV_BLOCKS_H
#define TKV_BLOCKS_H

#include "kit.h"

enum { BLOCK = TKV_BLOCK_TOKENS, MAX_VALUES = BLOCK * TKV_MAX_HEAD_DIM };
enum { BUFFER_FLOATS = MAX_VALUES + 8 * BLOCK }; /* floats of a block with gaps between rows */
enum { BUFFER_BYTES = 4 * MAX_VALUES + 128 };    /* the largest block and a border behind it */

static float in[BUFFER_FLOATS], out[BUFFER_FLOATS], want[BUFFER_FLOATS];
static uint8_t bytes[BUFFER_BYTES], other[BUFFER_BYTES];

static const tkv_format grid_formats[] = {TKV_Q8, TKV_KIVI4, TKV_KIVI3, TKV_KIVI2};
static const tkv_format exact_formats[] = {TKV_F32, TKV_F16, TKV_BF16};
static const int head_dims[] = {1, 5, 16, 31, 48, 64, 80, 96, 112, 128, 192, 255, 256};

static inline tkv_codec make_codec(tkv_format format, int side, int dim, int group) {
    tkv_codec c;
    memset(&c, 0, sizeof c);
    c.format = format;
    c.side = side ? TKV_V : TKV_K;
    c.head_dim = dim;
    c.options.group_size = group;
    return c;
}

static inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

static inline void fill_nan(void *p, size_t n) { /* n bytes of 0xff: a float is NaN */
    memset(p, 0xff, n);
}

static inline const char *describe_codec(const tkv_codec *c, int n) {
    static char text[96];
    const char *name = tkv_get_name(TKV_NAME_FORMAT, (int)c->format);
    snprintf(text, sizeof text, "%s %c, head_dim %d, group %d, %d tokens", name ? name : "?",
             c->side == TKV_K ? 'K' : 'V', c->head_dim, c->options.group_size, n);
    return text;
}

/* >>tiles, by the layout in core/tile.h */
typedef struct bit_position {
    int byte, bit;
} bit_position;

/* The position of bit `bit` of code q of one tile, in a run of tiles of these widths. */
static inline bit_position find_bit(const int *widths, int tile, int q, int bit) {
    int plane = q / 64, j = q % 64, width = widths[tile], offset = 0, i;
    bit_position at;
    for (i = 0; i < tile; i++) offset += 32 * widths[i];
    if (width == 8) {
        at.byte = offset + 64 * plane + j;
        at.bit = bit;
    } else if (width >= 4 && bit < 4) {
        at.byte = offset + 64 * (plane / 2) + j;
        at.bit = 4 * (plane % 2) + bit;
    } else if (width == 6) {
        at.byte = offset + 128 + j;
        at.bit = 2 * plane + bit - 4;
    } else if (width == 2) {
        at.byte = offset + j;
        at.bit = 2 * plane + bit;
    } else if (width == 3 && plane < 2) {
        at.byte = offset + j;
        at.bit = 3 * plane + bit;
    } else if (width == 3 && plane == 3 && bit < 2) {
        at.byte = offset + j;
        at.bit = 6 + bit;
    } else if (width == 3) { /* plane 2, and the last bit of plane 3 */
        at.byte = offset + 64 + j % 32;
        at.bit = plane == 2 ? 3 * (j / 32) + bit : 6 + j / 32;
    } else { /* width 1, and the last bit of width 5 */
        at.byte = offset + (width == 5 ? 128 : 0) + j % 32;
        at.bit = 4 * (j / 32) + plane;
    }
    return at;
}

static inline int run_bytes(const int *widths, int n_tiles) {
    int i, n_bytes = 0;
    for (i = 0; i < n_tiles; i++) n_bytes += 32 * widths[i];
    return (n_bytes + 63) / 64 * 64;
}

static inline int get_code(const uint8_t *p, const int *widths, int tile, int q) {
    int code = 0, b;
    for (b = 0; b < widths[tile]; b++) {
        bit_position at = find_bit(widths, tile, q, b);
        code |= (p[at.byte] >> at.bit & 1) << b;
    }
    return code;
}

static inline void put_code(uint8_t *p, const int *widths, int tile, int q, int code) {
    int b;
    for (b = 0; b < widths[tile]; b++) {
        bit_position at = find_bit(widths, tile, q, b);
        p[at.byte] = (uint8_t)(p[at.byte] | (code >> b & 1) << at.bit);
    }
}

static const int all_widths[] = {8, 6, 5, 4, 3, 2, 1};

/* Tiles are sorted, the widest first, as in a record. */
static inline int random_widths(tkv_rng *r, int *widths, int max_tiles) {
    int n = 0, i, k;
    for (i = 0; i < COUNT(all_widths); i++)
        for (k = tkv_rng_below(r, 4); k > 0 && n < max_tiles; k--) widths[n++] = all_widths[i];
    if (n == 0) widths[n++] = 1;
    return n;
}

/* >>blocks of Q8 and KIVI formats, by the layout in formats/kivi.h */
typedef struct block_layout {
    int is_k, bits, max_code, dim, group, n_groups, padded_dim, n_tiles;
    int row;                     /* scales of one group */
    int scale_at, zero_at, size; /* byte offsets; size: of the block */
    int widths[TKV_MAX_HEAD_DIM / 4];
} block_layout;

static inline block_layout layout_of(const tkv_codec *c) {
    block_layout d;
    int i;
    d.is_k = c->side == TKV_K;
    d.bits = c->format == TKV_Q8 ? 8 : c->format == TKV_KIVI4 ? 4 : c->format == TKV_KIVI3 ? 3 : 2;
    d.max_code = (1 << d.bits) - 1;
    d.dim = c->head_dim;
    d.group = c->options.group_size ? c->options.group_size : 64;
    d.padded_dim = round_up(d.dim, 16);
    d.n_tiles = d.padded_dim / 4;
    d.n_groups = d.is_k ? BLOCK / d.group : round_up(d.dim, d.group) / d.group;
    d.row = d.is_k ? d.padded_dim : BLOCK;
    for (i = 0; i < d.n_tiles; i++) d.widths[i] = d.bits;
    d.scale_at = run_bytes(d.widths, d.n_tiles);
    d.zero_at = d.scale_at + 2 * d.n_groups * d.row;
    d.size = round_up(d.zero_at + 2 * d.n_groups * d.row, 64);
    return d;
}

static inline int code_of(const block_layout *d, const uint8_t *p, int token, int channel) {
    int tile = d->is_k ? channel / 4 : channel / 16 * 4 + token / 16;
    int q = d->is_k ? 64 * (token / 16) + 4 * (token % 16) + channel % 4
                    : 64 * (token % 16 / 4) + 4 * (channel % 16) + token % 4;
    return get_code(p, d->widths, tile, q);
}

static inline int read_f16_bits(const uint8_t *p) { return p[0] | p[1] << 8; }

static inline double f16_to_double(int h) { /* of a finite float16 */
    int e = h >> 10 & 31, m = h & 1023;
    double x = e ? ldexp((double)(m + 1024), e - 25) : ldexp((double)m, -24);
    return h >> 15 ? -x : x;
}

static inline double f16_ulp(int h) { /* the value of its last bit */
    int e = h >> 10 & 31;
    return ldexp(1.0, (e ? e : 1) - 25);
}

/* The bits of the float16 scale, and below of the zero point, that belong to one value. */
static inline int scale_of(const block_layout *d, const uint8_t *p, int token, int channel) {
    return read_f16_bits(
        p + d->scale_at +
        2 * (d->is_k ? token / d->group * d->row + channel : channel / d->group * d->row + token));
}

static inline int zero_of(const block_layout *d, const uint8_t *p, int token, int channel) {
    return scale_of(d, p + (d->zero_at - d->scale_at), token, channel);
}

/* scale * code + zero. The sum is exact in double, so only the conversion to float rounds. */
static inline float value_of(const block_layout *d, const uint8_t *p, int token, int channel) {
    double s = f16_to_double(scale_of(d, p, token, channel)),
           z = f16_to_double(zero_of(d, p, token, channel));
    volatile double x = s * code_of(d, p, token, channel) + z;
    return (float)x;
}

/* A valid block of random bytes: scales are finite and not negative, zero points are finite. */
static inline void random_block(tkv_rng *r, const block_layout *d, uint8_t *p) {
    int i;
    for (i = 0; i < d->size; i++) p[i] = (uint8_t)(tkv_rng_u64(r) & 0xffu);
    for (i = d->scale_at; i < d->zero_at + (d->zero_at - d->scale_at); i += 2) {
        if ((p[i + 1] & 0x7c) == 0x7c) p[i + 1] = (uint8_t)(p[i + 1] & ~0x40);
        if (i < d->zero_at) p[i + 1] = (uint8_t)(p[i + 1] & 0x7f);
    }
}

/* >>inputs */
enum { GAUSSIAN, UNIFORM, OUTLIERS, BIAS, SCALES, TINY_RANGE, LARGE, SMALL, SPARSE, N_KINDS };

static inline void fill_input(int kind, tkv_rng *r, int n, int dim, float *x) {
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
