/*
 * white_kernels.c - white-box test of src/kernels: compares the kernels of every instruction set of this machine with
 * the scalar kernels and with double precision, on random sides. Inaccessible pages around the memory catch reads
 * and writes beyond it. It calls internal functions (white.h).
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#endif
#include "white.h"

#include "tkv_test.h"

#include <float.h>

#include <math.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

/* >>guarded memory */
typedef struct guarded_memory {
    unsigned char *base, *p;
    size_t total_size, size;
} guarded_memory;

enum { GUARD_BYTE = 0xa5, GUARD_MARGIN = 256 };

/* Allocates size bytes. On Linux they end, or with front begin, at a page without access. */
static void *guard_alloc(guarded_memory *f, size_t size, int front) {
#ifdef __linux__
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (size + page - 1) / page * page;
    f->total_size = inner + 2 * page;
    f->base = (unsigned char *)mmap(NULL, f->total_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                                    -1, 0);
    if (f->base == (unsigned char *)MAP_FAILED) exit(2);
    memset(f->base, GUARD_BYTE, f->total_size);
    if (mprotect(f->base, page, PROT_NONE) || mprotect(f->base + page + inner, page, PROT_NONE)) exit(2);
    f->p = f->base + page + (front ? 0 : inner - size);
#else
    (void)front;
    f->total_size = size + 2 * GUARD_MARGIN;
    f->base = (unsigned char *)malloc(f->total_size);
    if (!f->base) exit(2);
    memset(f->base, GUARD_BYTE, f->total_size);
    f->p = f->base + GUARD_MARGIN;
#endif
    f->size = size;
    return f->p;
}

/* Frees the memory. Returns 1 if nothing around it was written. */
static int guard_free(guarded_memory *f) {
    size_t from = 0, to = f->total_size, i;
    int intact = 1;
#ifdef __linux__
    from = (size_t)sysconf(_SC_PAGESIZE);
    to -= from;
#endif
    for (i = from; i < to; i++) {
        const unsigned char *b = f->base + i;
        if ((b < f->p || b >= f->p + f->size) && *b != GUARD_BYTE) intact = 0;
    }
#ifdef __linux__
    munmap(f->base, f->total_size);
#else
    free(f->base);
#endif
    return intact;
}

/* >>random sides: any widths, an order, levels (V). Metadata is fp16 scales, then fp16 zero points, as in KIVI. */
static void decode_meta_f16(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *ops, float *scale,
                            float *zero) {
    int n = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK);
    ops->f16_to_f32(src + s->code_bytes, n, scale);
    ops->f16_to_f32(src + s->code_bytes + 2 * n, n, zero);
}

/* Metadata of a second format: fp16 scales, and zero points of 8 signed bits in eighths of the scale. */
static void decode_meta_int8(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *ops, float *scale,
                             float *zero) {
    int n = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK), i;
    ops->f16_to_f32(src + s->code_bytes, n, scale);
    for (i = 0; i < n; i++) {
        int byte = src[s->code_bytes + (size_t)(2 * n + i)];
        zero[i] = (float)(byte < 128 ? byte : byte - 256) * 0.125f * scale[i];
    }
}

static const tkvi_format test_formats[2] = {
    {"test halves",
     4,
     TKVI_AS_TILES,
     0,
     0,
     {0, 0},
     {{NULL, NULL, NULL, decode_meta_f16, NULL, NULL}, {NULL, NULL, NULL, decode_meta_f16, NULL, NULL}},
     NULL},
    {"test bytes",
     4,
     TKVI_AS_TILES,
     0,
     0,
     {0, 0},
     {{NULL, NULL, NULL, decode_meta_int8, NULL, NULL}, {NULL, NULL, NULL, decode_meta_int8, NULL, NULL}},
     NULL},
};

static const int widths[7] = {8, 6, 5, 4, 3, 2, 1};

typedef struct random_side {
    tkvi_side s;
    uint8_t order[2 * TKV_MAX_HEAD_DIM]; /* see tkvi_order_at */
    int8_t levels[16];
    float mean[TKV_MAX_HEAD_DIM];
} random_side;

static void make_order(tkv_rng *rng, uint8_t *order, int dim, int pad) { /* padding stays at the end */
    int i;
    for (i = 0; i < pad; i++) tkvi_set_order(order, pad, i, i);
    for (i = dim - 1; i > 0; i--) {
        const int j = tkv_rng_below(rng, i + 1), t = tkvi_order_at(order, pad, i);
        tkvi_set_order(order, pad, i, tkvi_order_at(order, pad, j));
        tkvi_set_order(order, pad, j, t);
    }
}

/* Initialises a side without its bytes. width 0: mixed widths. */
static void init_random_side(tkv_rng *rng, random_side *m, tkv_side which, int dim, int group, int width,
                             int with_order, int with_levels) {
    tkvi_side *s = &m->s;
    int unit = which == TKV_K ? 1 : 4, left, i;
    memset(m, 0, sizeof *m);
    s->format = &test_formats[tkv_rng_below(rng, 2)];
    s->which = which;
    s->dim = (int16_t)dim;
    s->pad = (int16_t)((dim + 15) / 16 * 16);
    s->tokens = TKVI_BLOCK;
    s->group = (int16_t)group;
    s->groups = (int16_t)(which == TKV_K ? TKVI_BLOCK / group : (s->pad + group - 1) / group);
    for (left = s->pad / 4; left > 0;) {
        int w = width ? width : widths[tkv_rng_below(rng, 7)], n = left;
        while (with_levels && which == TKV_V && w > 4) w = widths[tkv_rng_below(rng, 7)];
        if (!width) n = unit * (1 + tkv_rng_below(rng, left / unit));
        s->tiles.n[w] = (uint16_t)(s->tiles.n[w] + n);
        left -= n;
    }
    if (with_order) {
        make_order(rng, m->order, s->pad, s->pad);
        s->order = m->order;
    }
    if (with_levels && which == TKV_V) {
        for (i = 0; i < 16; i++) m->levels[i] = (int8_t)(tkv_rng_below(rng, 255) - 127);
        m->levels[tkv_rng_below(rng, 16)] = 127;
        m->levels[tkv_rng_below(rng, 16)] = -127;
        s->levels = m->levels;
    }
    s->code_bytes = tkvi_tiles_bytes(&s->tiles);
    s->meta_bytes = (size_t)(s->groups * (which == TKV_K ? s->pad : TKVI_BLOCK) * 4);
    s->bytes = tkvi_align_up(s->code_bytes) + tkvi_align_up(s->meta_bytes);
}

/* Initialises a side of an A format (K) or of an R format (V). K: width 0 mixes widths, no bits included. V: width is
 * in half bits. mean: standard deviation of the static means. */
static void init_shared_side(tkv_rng *rng, random_side *m, tkv_side which, int dim, int width, double mean) {
    tkvi_share share;
    int pad = (dim + 15) / 16 * 16, left = pad / 4, i;
    memset(m, 0, sizeof *m);
    memset(&share, 0, sizeof share);
    share.top = tkv_rng_below(rng, 9) - 4; /* scales around 1 fit in all of these windows */
    if (which == TKV_V) {
        share.half_bits = width;
        tkvi_side_init(&m->s, &tkvi_formats[TKV_R20], TKV_V, dim, 64, TKVI_BLOCK, &share);
        return;
    }
    while (left > 0) {
        int w = width ? width : tkv_rng_below(rng, 7), n = width ? left : 1 + tkv_rng_below(rng, left);
        if (w) share.tiles.n[w] = (uint16_t)(share.tiles.n[w] + n);
        left -= n;
    }
    make_order(rng, m->order, dim, pad);
    for (i = 0; i < dim; i++)
        m->mean[i] = tkvi_f16_to_f32(tkvi_f32_to_f16((float)(mean * tkv_rng_gauss(rng))));
    share.order = m->order;
    share.mean = m->mean;
    tkvi_side_init(&m->s, &tkvi_formats[TKV_A25], TKV_K, dim, 64, TKVI_BLOCK, &share);
}

/* Fills metadata of A and R: scales near `scale`, a few of them 0; any offsets; block means of size `zero`. */
static void fill_shared_meta(tkv_rng *rng, const tkvi_side *s, uint8_t *meta, double scale, double zero) {
    int n = s->which == TKV_K ? s->pad : TKVI_BLOCK, n_coded = 0, width, i;
    for (width = 1; width <= TKVI_MAX_WIDTH; width++) n_coded += 4 * s->tiles.n[width];
    if (s->which == TKV_V) n_coded = n;
    for (i = 0; i < n; i++) {
        double size = tkv_rng_below(rng, 20) == 0 ? 0.0 : scale * (0.1 + tkv_rng_uniform(rng));
        uint16_t half = tkvi_f32_to_f16((float)(zero * tkv_rng_gauss(rng)));
        if (s->which == TKV_K && i >= s->dim) break; /* encoders leave the padding 0 */
        meta[i] = (uint8_t)(i < n_coded ? tkvi_log_code((float)size, s->top) : half & 255);
        if (s->which == TKV_K)
            meta[s->pad + i] = (uint8_t)(i < n_coded ? tkv_rng_below(rng, 256) : half >> 8);
    }
}

/* Fills the row of the outlier: one of the n tokens, or none, which stores say in many ways; any codes. */
static void fill_outlier(tkv_rng *rng, const tkvi_side *s, uint8_t *row, int n, double scale) {
    const int slot = tkv_rng_below(rng, 4) ? tkv_rng_below(rng, n) : 64 + tkv_rng_below(rng, 64);
    const int head = slot | tkvi_log_code((float)(scale * (0.01 + 0.1 * tkv_rng_uniform(rng))), s->top) << 7;
    int p;
    for (p = 0; p < s->pad; p++) {
        const int code = tkv_rng_below(rng, 2 * TKVI_OUTLIER_MOST + 1) - TKVI_OUTLIER_MOST;
        row[p] = tkvi_outlier_byte(p < s->dim ? code : 0, head, p);
    }
}

/* Fills a side with random codes, scales near `scale` and zero points of size `zero`. Tokens from n on have code 0, as
 * encoders write them. */
static void fill_side(tkv_rng *rng, const tkvi_side *s, uint8_t *src, int n, double scale, double zero) {
    int count = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK), i, width, t, number = 0;
    uint8_t *at = src;
    memset(src, 0, s->bytes);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++, number++) {
            uint8_t code[TKVI_TILE_CODES];
            for (t = 0; t < TKVI_TILE_CODES; t++) {
                int token = s->which == TKV_K ? t / 4 : 16 * (number % 4) + t / 64 * 4 + t % 4;
                code[t] = (uint8_t)(token < n ? tkv_rng_below(rng, 1 << width) : 0);
            }
            tkvi_pack_tile(at, width, code);
            at += TKVI_TILE_BYTES(width);
        }
    if (s->format->shared) {
        fill_shared_meta(rng, s, src + s->code_bytes, scale, zero);
        if (s->has_outlier) fill_outlier(rng, s, src + s->code_bytes + 2 * s->pad, n, scale);
        return;
    }
    for (i = 0; i < count; i++) {
        double size = tkv_rng_below(rng, 20) == 0 ? 0.0 : scale * (0.1 + tkv_rng_uniform(rng));
        tkvi_store16(src + s->code_bytes + 2 * i, tkvi_f32_to_f16((float)size));
        tkvi_store16(src + s->code_bytes + 2 * (count + i),
                     tkvi_f32_to_f16((float)(zero * tkv_rng_gauss(rng))));
    }
}

/* A side in double: scale, zero point, level and centre of each value, [token][channel]. */
typedef struct decoded {
    double scale[TKVI_BLOCK][TKV_MAX_HEAD_DIM], zero[TKVI_BLOCK][TKV_MAX_HEAD_DIM];
    double level[TKVI_BLOCK][TKV_MAX_HEAD_DIM], centre[TKVI_BLOCK][TKV_MAX_HEAD_DIM];
} decoded;

static void decode_side(const tkvi_side *s, const uint8_t *src, decoded *d) {
    static float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    const uint8_t *at = src;
    int width, i, j, t, number = 0, slab = 0, k = s->which == TKV_K;
    s->format->side[s->which].meta(s, src, &tkvi_simd_ops_scalar, scale, zero);
    memset(d, 0, sizeof *d);
    for (t = 0; t < TKVI_BLOCK; t++) /* channels without codes have nothing else */
        for (j = 0; j < s->pad; j++) {
            int m = k ? t / s->group * s->pad + j : j / s->group * TKVI_BLOCK + t;
            d->scale[t][k ? tkvi_channel(s, j) : j] = (double)scale[m];
            d->zero[t][k ? tkvi_channel(s, j) : j] = (double)zero[m];
        }
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++, number++) {
            uint8_t code[TKVI_TILE_CODES];
            int channels = k ? 0 : tkvi_slab_channels(s, width);
            tkvi_unpack_tile(at, width, code);
            at += TKVI_TILE_BYTES(width);
            for (j = 0; j < TKVI_TILE_CODES; j++) {
                int r = j % 4, upper = 0;
                int token = k ? j / 4 : 16 * (number % 4) + j / 64 * 4 + r;
                int channel = k ? tkvi_channel(s, 4 * number + r) : slab + j % 64 / 4;
                for (; upper == 0 || 16 * upper < channels; upper++, channel += 16) {
                    d->level[token][channel] = (double)code[j];
                    if (s->levels) /* a code of a pair has two levels */
                        d->level[token][channel] =
                            (double)s->levels[(s->pairs ? width == 3 ? 16 * upper : 32 : 0) + (code[j] & 15)];
                    d->centre[token][channel] = (double)tkvi_centre(s, width);
                }
            }
            if (i % 4 == 3) slab += channels;
        }
    if (s->has_outlier) {
        const uint8_t *row = src + s->code_bytes + 2 * s->pad;
        const int head = tkvi_outlier_head(row), slot = head & 127;
        for (j = 0; j < s->pad && slot < TKVI_BLOCK; j++) { /* its columns do not count */
            const int channel = tkvi_channel(s, j), code = (row[j] >> 1) - (row[j] > 127 ? 128 : 0);
            d->scale[slot][channel] = d->level[slot][channel] = d->centre[slot][channel] = 0.0;
            d->zero[slot][channel] =
                code * (double)tkvi_log_value(head >> 7, s->top) + (s->mean ? (double)s->mean[j] : 0.0);
        }
    }
}

/* >>number of cases */
static int n_rounds(int n) { return tkv_test_quick() ? (n + 7) / 8 : n; }

/* >>one case: a side of tiles and rows of q or p */
typedef struct tile_case {
    int dim, group, width, order, levels, rows, n, n_limbs;
    int shared; /* 1: a side of A (width 0: mixed) or R (width in half bits); 0: a random side */
    double zero;
    int peaked;          /* one weight far above the rest */
    int front, prefetch; /* prefetch: 0 none, 1 this side, 2 other memory */
} tile_case;

static tile_case random_case(tkv_rng *rng) {
    static const int dims[11] = {16, 48, 64, 80, 96, 112, 128, 192, 256, 512, 576};
    tile_case c;
    memset(&c, 0, sizeof c);
    c.dim = tkv_rng_below(rng, 3) ? dims[tkv_rng_below(rng, 11)] : 1 + tkv_rng_below(rng, TKV_MAX_HEAD_DIM);
    c.group = tkv_rng_below(rng, 2) ? 64 : 32;
    c.width = tkv_rng_below(rng, 3) ? widths[tkv_rng_below(rng, 7)] : 0;
    c.order = tkv_rng_below(rng, 3) == 0;
    c.levels = (c.width == 0 || c.width <= 4) && tkv_rng_below(rng, 3) == 0;
    c.rows = 1 + tkv_rng_below(rng, tkvi_rows_of((c.dim + 15) / 16 * 16));
    c.n = tkv_rng_below(rng, 2) ? TKVI_BLOCK : 1 + tkv_rng_below(rng, TKVI_BLOCK);
    c.n_limbs = 1 + tkv_rng_below(rng, 2);
    c.zero = tkv_rng_below(rng, 4) ? 3.0 : 600.0;
    c.peaked = tkv_rng_below(rng, 3) == 0;
    c.front = tkv_rng_below(rng, 2);
    c.prefetch = tkv_rng_below(rng, 3);
    return c;
}

static void print_case(const tile_case *c, const char *side, const char *isa) {
    printf("    %s %s: dim %d group %d width %d order %d levels %d rows %d n %d n_limbs %d shared %d zero %g "
           "peaked %d\n",
           isa, side, c->dim, c->group, c->width, c->order, c->levels, c->rows, c->n, c->n_limbs, c->shared,
           c->zero, c->peaked);
}

/* Each is the largest one, divided by its bound. error: against double. difference: from the scalar kernels. answer:
 * the result itself, by the bound of the error. If answers were small, a kernel that returns zeros would pass. */
typedef struct tile_result {
    double error, difference, answer;
    int finite, intact;
} tile_result;

static void raise_max(double *largest, double value) {
    if (!(value <= *largest)) *largest = value;
}

/* Runs a K kernel: sum q (scale level + zero - ref). The bound assumes weights rounded by at most half a step. */
static tile_result run_k(tkv_rng *rng, const tile_case *c, const tkvi_kernels *kernels) {
    static decoded d;
    static float scalar[TKVI_ROWS * TKVI_BLOCK], by_channel[(TKVI_ROWS + 1) * TKV_MAX_HEAD_DIM];
    random_side m;
    guarded_memory fs, fq, fr, fo;
    tile_result res;
    const tkvi_side *s = &m.s;
    uint8_t *src;
    float *q = by_channel, *ref, *sorted, *sorted_ref, *out;
    int r, t, ch;
    double scale = c->zero > 100.0 ? 0.5 : 1.0;
    memset(&res, 0, sizeof res);
    res.finite = res.intact = 1;
    if (c->shared) init_shared_side(rng, &m, TKV_K, c->dim, c->width, c->zero);
    else init_random_side(rng, &m, TKV_K, c->dim, c->group, c->width, c->order, c->levels);
    src = (uint8_t *)guard_alloc(&fs, s->bytes, c->front);
    sorted = (float *)guard_alloc(&fq, (size_t)(c->rows * s->pad) * sizeof(float), 0);
    sorted_ref = (float *)guard_alloc(&fr, (size_t)s->pad * sizeof(float), 0);
    ref = q + c->rows * s->pad;
    out = (float *)guard_alloc(&fo, (size_t)(c->rows * TKVI_BLOCK) * sizeof(float), 0);
    fill_side(rng, s, src, c->n, scale, c->zero);
    decode_side(s, src, &d);
    for (r = 0; r < c->rows; r++)
        for (ch = 0; ch < s->pad; ch++) {
            double x = tkv_rng_gauss(rng) * (ch % 13 == 5 ? 16.0 : 1.0);
            if (c->peaked) x *= 1e-3;
            q[r * s->pad + ch] = ch < s->dim ? (float)x : 0.0f;
        }
    if (c->peaked) q[tkv_rng_below(rng, s->dim)] = 30.0f;
    for (ch = 0; ch < s->pad; ch++) {
        double key = d.scale[0][ch] * d.level[0][ch] + d.zero[0][ch];
        ref[ch] = ch < s->dim ? (float)key : 0.0f;
    }
    for (r = 0; r <= c->rows; r++) /* kernels read channels in the order of the codes */
        for (ch = 0; ch < s->pad; ch++)
            (r < c->rows ? sorted + r * s->pad : sorted_ref)[ch] = q[r * s->pad + tkvi_channel(s, ch)];
    tkvi_kernels_scalar.k[TKVI_AS_TILES](s, src, NULL, sorted, sorted_ref, c->rows, c->n, c->n_limbs, scalar);
    kernels->k[TKVI_AS_TILES](s, src,
                              c->prefetch == 0   ? NULL
                              : c->prefetch == 1 ? src
                                                 : src + 4096,
                              sorted, sorted_ref, c->rows, c->n, c->n_limbs, out);
    for (r = 0; r < c->rows; r++)
        for (t = 0; t < TKVI_BLOCK; t++) {
            double want = 0.0, spread = 0.0, size = 0.0, largest = 0.0, bound;
            double got = (double)out[r * TKVI_BLOCK + t], from_scalar = (double)scalar[r * TKVI_BLOCK + t];
            if (!tkv_test_is_finite(got)) res.finite = 0;
            if (t >= c->n) continue;
            for (ch = 0; ch < s->pad; ch++) {
                double x = (double)q[r * s->pad + ch], w = fabs(x) * d.scale[t][ch];
                double zero = d.zero[t][ch] + d.centre[t][ch] * d.scale[t][ch] - (double)ref[ch];
                want += x * (d.scale[t][ch] * (d.level[t][ch] - d.centre[t][ch]) + zero);
                spread += fabs(d.level[t][ch] - d.centre[t][ch]);
                size += w * (s->levels ? 127.0 : 2.0 * d.centre[t][ch]);
                size += fabs(x) * (fabs(d.zero[t][ch]) * 0.06 + fabs(zero)); /* rounding of zero - ref */
                if (w > largest) largest = w;
            }
            bound = 0.5 * largest / (c->n_limbs == 2 ? TKVI_TWO_LIMBS_MAX : TKVI_LIMB_MAX_K) * spread +
                    2e-6 * size;
            if (bound == 0.0) bound = 1e-30;
            raise_max(&res.error, fabs(got - want) / bound);
            raise_max(&res.answer, fabs(want) / bound);
            raise_max(&res.difference, fabs(got - from_scalar) / (2e-6 * size + 1e-30));
        }
    res.intact = guard_free(&fs) & guard_free(&fq) & guard_free(&fr) & guard_free(&fo);
    return res;
}

/* Runs a V kernel: out += sum p (scale level + zero). */
static tile_result run_v(tkv_rng *rng, const tile_case *c, const tkvi_kernels *kernels) {
    static decoded d;
    static float scalar[TKVI_ROWS * TKV_MAX_HEAD_DIM], start[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    random_side m;
    guarded_memory fs, fp, fo;
    tile_result res;
    const tkvi_side *s = &m.s;
    uint8_t *src;
    float *p, *out;
    int r, t, ch, intact, n_limbs = c->n_limbs;
    memset(&res, 0, sizeof res);
    res.finite = 1;
    if (c->shared) init_shared_side(rng, &m, TKV_V, c->dim, c->width, 0.0);
    else init_random_side(rng, &m, TKV_V, c->dim, c->group, c->width, 0, c->levels);
    src = (uint8_t *)guard_alloc(&fs, s->bytes, c->front);
    p = (float *)guard_alloc(&fp, (size_t)(c->rows * TKVI_BLOCK) * sizeof(float), 0);
    out = (float *)guard_alloc(&fo, (size_t)(c->rows * s->pad) * sizeof(float), 0);
    fill_side(rng, s, src, c->n, 0.5, c->zero > 100.0 ? 30.0 : 1.0);
    decode_side(s, src, &d);
    if (n_limbs < tkvi_n_limbs(s, 0)) n_limbs = tkvi_n_limbs(s, 0); /* callers use no fewer */
    for (r = 0; r < c->rows; r++)
        for (t = 0; t < TKVI_BLOCK; t++) {
            double x = c->peaked ? 1e-4 * tkv_rng_uniform(rng) : tkv_rng_uniform(rng);
            p[r * TKVI_BLOCK + t] = t < c->n ? (float)x : 0.0f;
        }
    if (c->peaked) p[tkv_rng_below(rng, c->n)] = 1.0f;
    tkv_rng_fill(rng, start, (size_t)(c->rows * s->pad), 1.0);
    memcpy(scalar, start, sizeof scalar);
    memcpy(out, start, (size_t)(c->rows * s->pad) * sizeof(float));
    tkvi_kernels_scalar.v[TKVI_AS_TILES](s, src, NULL, p, c->rows, c->n, n_limbs, scalar);
    kernels->v[TKVI_AS_TILES](s, src,
                              c->prefetch == 0   ? NULL
                              : c->prefetch == 1 ? src
                                                 : src + 4096,
                              p, c->rows, c->n, n_limbs, out);
    for (r = 0; r < c->rows; r++)
        for (ch = 0; ch < s->pad; ch++) {
            double want = 0.0, spread = 0.0, size = fabs((double)start[r * s->pad + ch]), largest = 0.0,
                   bound;
            double got = (double)out[r * s->pad + ch], from_scalar = (double)scalar[r * s->pad + ch];
            for (t = 0; t < c->n; t++) {
                double x = (double)p[r * TKVI_BLOCK + t];
                want += x * (d.scale[t][ch] * d.level[t][ch] + d.zero[t][ch]);
                spread += fabs(d.level[t][ch] - d.centre[t][ch]);
                size +=
                    x * (d.scale[t][ch] * (s->levels ? 127.0 : 2.0 * d.centre[t][ch]) + fabs(d.zero[t][ch]));
                if (x * d.scale[t][ch] > largest) largest = x * d.scale[t][ch];
            }
            bound =
                0.5 * largest / (n_limbs == 2 ? TKVI_TWO_LIMBS_MAX : tkvi_top_v(s)) * spread + 2e-6 * size;
            if (!tkv_test_is_finite(got)) res.finite = 0;
            raise_max(&res.error, fabs(got - (double)start[r * s->pad + ch] - want) / bound);
            raise_max(&res.answer, fabs(want) / bound);
            raise_max(&res.difference, fabs(got - from_scalar) / (2e-6 * size));
        }
    intact = guard_free(&fs) & guard_free(&fp);
    res.intact = intact & guard_free(&fo);
    return res;
}

/* large: cases with answers so far above the bound that zeros, or half the answers, would fail. */
typedef struct answer_counts {
    int n_cases, n_large;
} answer_counts;

static void check_side(const tile_case *c, int first, int last, uint64_t seed, tkv_isa isa,
                       answer_counts *answers) {
    int side;
    for (side = first; side <= last; side++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(isa);
        tkv_rng rng = tkv_rng_seed(seed);
        tile_result res = side ? run_v(&rng, c, kernels) : run_k(&rng, c, kernels);
        int good;
#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0 /* x87 */
        res.difference = 0.0;                      /* both may round their weights differently */
#endif
        good = res.error <= 1.0 && res.difference <= 1.0 && res.finite && res.intact;
        if (!good) print_case(c, side ? "V" : "K", kernels->name);
        CHECK_LE(res.error, 1.0);
        CHECK_LE(res.difference, 1.0);
        CHECK(res.finite);
        CHECK(res.intact);
        answers->n_cases++;
        answers->n_large += res.answer > 4.0;
    }
}

static void check_case(const tile_case *c, uint64_t seed, tkv_isa isa, answer_counts *answers) {
    check_side(c, 0, 1, seed, isa, answers);
}

/* >>tests */
TEST(dispatch) {
    int i;
    CHECK(tkvi_kernels_for(TKV_ISA_AUTO) != NULL);
    CHECK(tkvi_kernels_for(TKV_ISA_SCALAR) == &tkvi_kernels_scalar);
    CHECK(tkvi_kernels_for(TKV_ISA_COUNT) == NULL);
    CHECK(!is_isa_available(TKV_ISA_COUNT));
    CHECK(!is_isa_available(TKV_ISA_AVX512) || is_isa_available(TKV_ISA_AVX2));
    for (i = TKV_ISA_SCALAR; i < TKV_ISA_COUNT; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for((tkv_isa)i);
        CHECK_EQ(kernels != NULL, is_isa_available((tkv_isa)i));
        if (!kernels) continue;
        CHECK_EQ(kernels->isa, i);
        CHECK_STR(kernels->name, tkv_get_name(TKV_NAME_ISA, i));
        CHECK((int)tkvi_kernels_for(TKV_ISA_AUTO)->isa >= i); /* auto is the best */
    }
    CHECK_STR(tkv_get_name(TKV_NAME_ISA, TKV_ISA_AUTO), "auto");
    CHECK(tkv_get_name(TKV_NAME_ISA, TKV_ISA_COUNT) == NULL);
}

#ifdef TKVI_X86
/* Each bit that an instruction set needs is looked at: without it the next lower set is chosen. */
TEST(dispatch_of_other_processors) {
    static const int one_bits[] = {12, 28, 29}, avx512_bits[] = {16, 17, 30, 31}, avx512_state[] = {5, 6, 7};
    const tkvi_cpu none = {0, 0, 0, 0}, newest = {~0u, ~0u, ~0u, ~0u};
    const uint32_t leaf[4] = {~0u, ~0u, ~0u, ~0u};
    const tkvi_cpu old = tkvi_cpu_of(6, leaf, leaf), read = tkvi_cpu_of(7, leaf, leaf);
    tkvi_cpu cpu = newest;
    unsigned i;
    CHECK(old.one == 0 && old.seven_b == 0 && old.seven_c == 0 && old.xcr0 == 0);
    CHECK(read.one == ~0u && read.seven_b == ~0u && read.seven_c == ~0u && read.xcr0 == 0);
    CHECK_EQ(tkvi_isa_of_cpu(&none), TKV_ISA_SCALAR);
    CHECK_EQ(tkvi_isa_of_cpu(&newest), TKV_ISA_AVX512);
    for (i = 0; i < sizeof one_bits / sizeof *one_bits; i++) {
        cpu.one = ~(1u << one_bits[i]);
        CHECK_EQ(tkvi_isa_of_cpu(&cpu), TKV_ISA_SCALAR);
    }
    cpu = newest;
    cpu.seven_b = ~(1u << 5);
    CHECK_EQ(tkvi_isa_of_cpu(&cpu), TKV_ISA_SCALAR);
    cpu = newest;
    for (i = 1; i < 3; i++) {
        cpu.xcr0 = ~(1u << i);
        CHECK_EQ(tkvi_isa_of_cpu(&cpu), TKV_ISA_SCALAR);
    }
    for (i = 0; i < sizeof avx512_state / sizeof *avx512_state; i++) {
        cpu.xcr0 = ~(1u << avx512_state[i]);
        CHECK_EQ(tkvi_isa_of_cpu(&cpu), TKV_ISA_AVX2);
    }
    cpu = newest;
    for (i = 0; i < sizeof avx512_bits / sizeof *avx512_bits; i++) {
        cpu.seven_b = ~(1u << avx512_bits[i]);
        CHECK_EQ(tkvi_isa_of_cpu(&cpu), TKV_ISA_AVX2);
    }
    cpu = newest;
    cpu.seven_c = ~(1u << 11);
    CHECK_EQ(tkvi_isa_of_cpu(&cpu), TKV_ISA_AVX2);
    CHECK(tkvi_kernels_up_to(TKV_ISA_SCALAR, TKV_ISA_AVX2) == NULL);
    CHECK(tkvi_kernels_up_to(TKV_ISA_AVX2, TKV_ISA_AVX512) == NULL);
    CHECK(tkvi_kernels_up_to(TKV_ISA_SCALAR, TKV_ISA_AUTO)->isa == TKV_ISA_SCALAR);
    CHECK(tkvi_kernels_up_to(TKV_ISA_AVX2, TKV_ISA_AUTO)->isa == TKV_ISA_AVX2);
    CHECK(tkvi_kernels_up_to(TKV_ISA_AVX512, TKV_ISA_SCALAR)->isa == TKV_ISA_SCALAR);
    CHECK(tkvi_kernels_up_to(TKV_ISA_AVX512, TKV_ISA_AVX2)->isa == TKV_ISA_AVX2);
#ifdef TKVI_AVX512
    CHECK(tkvi_kernels_up_to(TKV_ISA_AVX512, TKV_ISA_AUTO)->isa == TKV_ISA_AVX512);
    CHECK(tkvi_kernels_up_to(TKV_ISA_AVX512, TKV_ISA_AVX512)->isa == TKV_ISA_AVX512);
#endif
}
#endif

TEST(f16_to_f32) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, h, n;
    static uint8_t src[2 * 65536];
    static float dst[65536];
    for (h = 0; h < 65536; h++) tkvi_store16(src + 2 * h, (uint16_t)h);
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        int wrong = 0;
        kernels->simd_ops->f16_to_f32(src, 65536, dst);
        for (h = 0; h < 65536; h++) {
            int nan = (h & 0x7fff) > 0x7c00; /* a signalling NaN may become quiet */
            if (nan ? !tkv_test_is_nan((double)dst[h])
                    : tkvi_bits(dst[h]) != tkvi_bits(tkvi_f16_to_f32((uint16_t)h)))
                wrong++;
        }
        CHECK_EQ(wrong, 0);
        for (n = 0; n < 70; n++) { /* any length; no access beyond */
            guarded_memory fs, fd;
            uint8_t *s = (uint8_t *)guard_alloc(&fs, (size_t)(2 * n), 0);
            float *d = (float *)guard_alloc(&fd, (size_t)n * sizeof(float), 0);
            memcpy(s, src + 2 * 1000, (size_t)(2 * n));
            kernels->simd_ops->f16_to_f32(s, n, d);
            CHECK_MEM(d, dst + 1000, (size_t)n * sizeof(float));
            CHECK(guard_free(&fs) & guard_free(&fd));
        }
    }
}

/* Converts every finite fp16 value, the middles between neighbours, the floats beside middles, and FLT_MAX. */
TEST(f32_to_f16) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, h, n;
    static float x[4 * 0x7c01];
    static uint8_t got[8 * 0x7c01];
    for (h = 0; h <= 0x7c00; h++) {
        uint32_t here = tkvi_bits(tkvi_f16_to_f32((uint16_t)tkvi_min(h, 0x7bff)));
        float next = h < 0x7bff ? tkvi_f16_to_f32((uint16_t)(h + 1)) : 65536.0f;
        float half = (tkvi_from_bits(here) + next) * 0.5f;
        x[4 * h] = h < 0x7c00 ? tkvi_from_bits(here) : FLT_MAX;
        x[4 * h + 1] = -half;
        x[4 * h + 2] = tkvi_from_bits(tkvi_bits(half) - 1);
        x[4 * h + 3] = tkvi_from_bits((tkvi_bits(half) + 1) | (uint32_t)(h & 1) << 31);
    }
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *ops = tkvi_kernels_for(list[i])->simd_ops;
        int wrong = 0;
        ops->f32_to_f16(x, 4 * 0x7c01, got);
        for (h = 0; h < 4 * 0x7c01; h++) wrong += tkvi_load16(got + 2 * h) != tkvi_f32_to_f16(x[h]);
        CHECK_EQ(wrong, 0);
        for (n = 0; n < 70; n++) { /* any length; no access beyond */
            guarded_memory fs, fd;
            float *s = (float *)guard_alloc(&fs, (size_t)n * sizeof(float), 0);
            uint8_t *d = (uint8_t *)guard_alloc(&fd, (size_t)(2 * n), 0);
            memcpy(s, x + 4 * 0x3c00, (size_t)n * sizeof(float));
            ops->f32_to_f16(s, n, d);
            CHECK_MEM(d, got + 8 * 0x3c00, (size_t)(2 * n));
            CHECK(guard_free(&fs) & guard_free(&fd));
        }
    }
}

/* All windows of scales; any length; no access beyond. */
TEST(logarithmic_scales) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, top, n;
    uint8_t src[256];
    float want[256], got[256];
    for (k = 0; k < 256; k++) src[k] = (uint8_t)k;
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *ops = tkvi_kernels_for(list[i])->simd_ops;
        for (top = -TKVI_LOG_TOP; top <= TKVI_LOG_TOP; top++) {
            for (k = 0; k < 256; k++) /* as defined in core/log_scale.h */
                want[k] = k == 0 ? 0.0f
                                 : (float)ldexp((double)tkvi_log_mantissa[(k - 1) % 16] / 1024.0,
                                                top - 16 + (k - 1) / 16);
            ops->decode_log_scales(src, 256, top, got);
            CHECK_MEM(got, want, sizeof want);
        }
        for (n = 0; n < 70; n++) {
            guarded_memory fs, fd;
            uint8_t *s = (uint8_t *)guard_alloc(&fs, (size_t)n, 0);
            float *d = (float *)guard_alloc(&fd, (size_t)n * sizeof(float), 0);
            memcpy(s, src + 30, (size_t)n);
            ops->decode_log_scales(s, n, 8, d);
            tkvi_decode_log_scales_scalar(src + 30, n, 8, want);
            CHECK_MEM(d, want, (size_t)n * sizeof(float));
            CHECK(guard_free(&fs) & guard_free(&fd));
        }
    }
}

/* A zero point is scale * (offset - middle) / unit + mean, with the same bits if multiply and add are fused. */
TEST(zero_points_of_a_formats) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, n;
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *ops = tkvi_kernels_for(list[i])->simd_ops;
        tkv_rng rng = tkv_rng_seed(13);
        for (k = 0; k < n_rounds(1400); k++) {
            static const int units[3] = {8, 4, 1};
            int unit = units[k % 3], middle = ((1 << (1 + tkv_rng_below(&rng, 6))) - 1) * unit / 2, j;
            int top = tkv_rng_below(&rng, 2 * TKVI_LOG_TOP + 1) - TKVI_LOG_TOP;
            guarded_memory fo, fs, fm, fd;
            uint8_t *offset;
            float *scale, *mean, *dst;
            n = k % 70;
            offset = (uint8_t *)guard_alloc(&fo, (size_t)n, k % 2);
            scale = (float *)guard_alloc(&fs, (size_t)n * sizeof(float), k / 2 % 2);
            mean = (float *)guard_alloc(&fm, (size_t)n * sizeof(float), k / 4 % 2);
            dst = (float *)guard_alloc(&fd, (size_t)n * sizeof(float), 0);
            for (j = 0; j < n; j++) {
                offset[j] = (uint8_t)tkv_rng_below(&rng, 256);
                scale[j] = tkvi_log_value(tkv_rng_below(&rng, 256), top);
                mean[j] = tkvi_f16_to_f32(tkvi_f32_to_f16((float)(600.0 * tkv_rng_gauss(&rng))));
            }
            ops->decode_zero_points(offset, scale, mean, 1.0f / (float)unit, middle, n, dst);
            for (j = 0; j < n; j++) { /* the product has 20 bits, so only the sum rounds */
                double product = (double)scale[j] * (tkvi_signed_byte(offset[j]) - middle) / unit;
                float want = (float)product + mean[j];
                CHECK_EQ(tkvi_bits(dst[j]), tkvi_bits(want));
            }
            CHECK(guard_free(&fo) & guard_free(&fs));
            CHECK(guard_free(&fm) & guard_free(&fd));
        }
    }
}

/* Rows are turned, in any order of channels, to the bits of the rotation of one vector, and then scaled. */
TEST(rows_are_turned_as_vectors) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *ops = tkvi_kernels_for(list[i])->simd_ops;
        tkv_rng rng = tkv_rng_seed(14);
        for (k = 0; k < n_rounds(300); k++) {
            const int n = 16 * (1 + tkv_rng_below(&rng, 16)), rows = tkv_rng_below(&rng, 9);
            const int turned = tkv_rng_below(&rng, 1 << 20) - (1 << 19);
            static float x[9 * 256], y[256], plain[9 * 256], partner[9 * 256], out[9 * 256];
            uint8_t pair[256], order[256];
            tkv_rope r;
            tkvi_own_rope own;
            const tkvi_rope *rope;
            tkvi_turned_rows t;
            tkvi_turn turn;
            float sign;
            int c, row, at, wrong = 0;
            memset(&r, 0, sizeof r);
            r.dim = 2 * (1 + tkv_rng_below(&rng, n / 2));
            r.interleaved = k % 2;
            rope = tkvi_own_rope_make(&own, &r);
            tkv_rng_fill(&rng, x, (size_t)((rows + 1) * n), 1.0);
            for (c = 0; c < n; c++) order[c] = (uint8_t)c;
            for (c = n; c-- > 1;) {
                const int with = tkv_rng_below(&rng, c + 1);
                const uint8_t was = order[c];
                order[c] = order[with];
                order[with] = was;
            }
            for (c = 0; c < n; c++) {
                const int other = tkvi_partner_of(rope, order[c], &at, &sign);
                pair[c] = (uint8_t)at;
                for (row = 0; row <= rows; row++) {
                    plain[row * n + c] = x[row * n + order[c]];
                    partner[row * n + c] = sign * x[row * n + other];
                }
            }
            tkvi_turn_make(rope, turned, 1, turn.cosine, turn.sine);
            t.plain = plain, t.partner = partner, t.pair = pair;
            t.cosine = turn.cosine, t.sine = turn.sine, t.lanes = rope->lanes;
            t.n_rows = rows, t.n = n, t.scale = 0.3f, t.out = out, t.last = out + rows * n;
            ops->turn_rows(&t);
            for (row = 0; row <= rows; row++) {
                memcpy(y, x + row * n, (size_t)n * sizeof *y);
                CHECK_EQ(tkv_rotate_rope(&r, n, -turned, y), TKV_OK);
                for (c = 0; c < n; c++) {
                    const volatile float want =
                        y[order[c]] * (row < rows ? 0.3f : 1.0f); /* x87 keeps more bits */
                    wrong += !(out[row * n + c] >= want && out[row * n + c] <= want);
                }
            }
            CHECK_MSG(wrong == 0, "%s: %d of %d channels, %d rows", tkv_get_name(TKV_NAME_ISA, (int)list[i]),
                      wrong, n, rows);
        }
    }
}

TEST(exponentials) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, t, k;
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        tkv_rng rng = tkv_rng_seed(11);
        double max_error = 0.0, max_sum_error = 0.0;
        for (k = 0; k < n_rounds(4000); k++) {
            float s[TKVI_BLOCK], p[TKVI_BLOCK], maximum, sum;
            int range = k % 3 == 0 ? 1 : k % 3 == 1 ? 20 : 87, offset = tkv_rng_below(&rng, 600) - 300;
            double true_sum = 0.0;
            for (t = 0; t < TKVI_BLOCK; t++) /* in steps of 2^-12, so that s - max has no rounding */
                s[t] = (float)offset - (float)tkv_rng_below(&rng, range * 4096) / 4096.0f;
            maximum = kernels->max64(s);
            for (t = 0; t < TKVI_BLOCK; t++)
                if (s[t] > maximum) break;
            CHECK(t == TKVI_BLOCK);
            for (t = 0; t < TKVI_BLOCK && s[t] != maximum; t++) {}
            CHECK(t < TKVI_BLOCK);
            s[k % TKVI_BLOCK] = maximum - 87.0f - (float)(k % 7); /* may be 0 */
            if (k % 5 == 0) s[(k + 1) % TKVI_BLOCK] = -1e30f;
            if (k % 5 == 1) s[(k + 1) % TKVI_BLOCK] = maximum - 1e6f;
            sum = kernels->exp64(s, maximum, p);
            for (t = 0; t < TKVI_BLOCK; t++) {
                double x = (double)s[t] - (double)maximum, want = exp(x);
                if (x < -87.0) {
                    CHECK(p[t] >= 0.0f && (double)p[t] <= 1.2e-38);
                } else raise_max(&max_error, fabs((double)p[t] - want) / want);
                true_sum += (double)p[t];
            }
            raise_max(&max_sum_error, fabs((double)sum - true_sum) / true_sum);
        }
        CHECK_LE(max_error, 3e-7);
        CHECK_LE(max_sum_error, 4e-6);
    }
}

TEST(exact_formats) {
    tkv_isa list[TKV_ISA_COUNT];
    static const tkv_format formats[3] = {TKV_F32, TKV_F16, TKV_BF16};
    static float x[TKVI_BLOCK * TKV_MAX_HEAD_DIM], y[TKVI_BLOCK * TKV_MAX_HEAD_DIM];
    int count = tkv_test_isas(list), i, k;
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        tkv_rng rng = tkv_rng_seed(12);
        for (k = 0; k < n_rounds(300); k++) {
            int dim = 1 + tkv_rng_below(&rng, TKV_MAX_HEAD_DIM),
                rows = 1 + tkv_rng_below(&rng, tkvi_rows_of((dim + 15) / 16 * 16));
            int n = k % 2 ? TKVI_BLOCK : 1 + tkv_rng_below(&rng, TKVI_BLOCK), r, t, c, side;
            tkv_format f = formats[k % 3];
            double bias = k % 4 == 0 ? 600.0 : 0.0;
            for (side = 0; side < 2; side++) {
                tkvi_side s;
                guarded_memory fs, fq, fr, fo;
                uint8_t *src;
                float *q, *ref, *out;
                double error = 0.0;
                int intact, row_len;
                tkvi_side_init(&s, &tkvi_formats[f], side ? TKV_V : TKV_K, dim, 64, n,
                               NULL); /* a block of n tokens */
                row_len = side ? TKVI_BLOCK : s.pad;
                src = (uint8_t *)guard_alloc(&fs, s.bytes, k % 3 == 0);
                q = (float *)guard_alloc(&fq, (size_t)(rows * row_len) * sizeof(float), 0);
                ref = (float *)guard_alloc(&fr, (size_t)s.pad * sizeof(float), 0);
                out = (float *)guard_alloc(&fo, (size_t)(rows * (side ? s.pad : TKVI_BLOCK)) * sizeof(float),
                                           0);
                for (c = 0; c < n * dim; c++)
                    x[c] = (float)(tkv_rng_gauss(&rng) + bias * (double)(c % dim % 3));
                tkvi_encode_side(&s, &tkvi_simd_ops_scalar, x, (size_t)dim, n, src);
                tkvi_decode_side(&s, src, 0, n, y, (size_t)dim);
                for (r = 0; r < rows; r++)
                    for (c = 0; c < row_len; c++)
                        q[r * row_len + c] = c < (side ? n : dim) ? (float)tkv_rng_gauss(&rng) : 0.0f;
                for (c = 0; c < s.pad; c++) ref[c] = c < dim ? y[c] : 0.0f;
                if (side) {
                    for (c = 0; c < rows * s.pad; c++) out[c] = (float)c;
                    kernels->v[s.format->stored](&s, src, k % 5 ? NULL : src + s.bytes, q, rows, n, 1, out);
                } else {
                    kernels->k[s.format->stored](&s, src, k % 5 ? NULL : src + s.bytes, q, ref, rows, n, 1,
                                                 out);
                }
                for (r = 0; r < rows; r++)
                    for (c = 0; c < (side ? s.pad : TKVI_BLOCK); c++) {
                        double got = (double)out[r * (side ? s.pad : TKVI_BLOCK) + c], want = 0.0, size = 0.0;
                        if (side) {
                            want = size = (double)(r * s.pad + c);
                            for (t = 0; t < n && c < dim; t++) {
                                double v = (double)q[r * row_len + t] * (double)y[t * dim + c];
                                want += v;
                                size += fabs(v);
                            }
                        } else {
                            CHECK(tkv_test_is_finite(got));
                            if (c >= n) continue;
                            for (t = 0; t < dim; t++) {
                                double v =
                                    (double)q[r * row_len + t] * ((double)y[c * dim + t] - (double)ref[t]);
                                want += v;
                                size += fabs(v);
                            }
                        }
                        raise_max(&error, fabs(got - want) / (size + 1e-30));
                    }
                CHECK_LE(error, 2e-6);
                intact = guard_free(&fs) & guard_free(&fq);
                CHECK(intact & guard_free(&fr) & guard_free(&fo));
            }
        }
    }
}

/* Decoding any tokens of any side gives the bits of the scalar code and writes nothing else. */
typedef struct decode_case {
    int dim, kind, width, first, n, stride;
} decode_case;

/* A side of a format stored by tokens, with random options and RoPE. */
static void init_row_side(tkv_rng *rng, const decode_case *c, tkv_side which, random_side *m) {
    static const tkv_format formats[10] = {TKV_INT8,     TKV_INT4,      TKV_FP8_E4M3,  TKV_FP8_E5M2,
                                           TKV_FP4,      TKV_SUBSPACE4, TKV_SUBSPACE2, TKV_KVQUANT4,
                                           TKV_KVQUANT3, TKV_KVQUANT2};
    static tkv_format_options options;
    static tkvi_own_rope rope;
    tkv_rope r;
    memset(m, 0, sizeof *m);
    memset(&options, 0, sizeof options);
    options.group_size = tkv_rng_below(rng, 2) ? 64 : 32;
    options.rotate = tkv_rng_below(rng, 4);
    options.center_k = tkv_rng_below(rng, 2);
    options.subspaces = 1 + tkv_rng_below(rng, 16);
    options.kvquant = 2 * tkv_rng_below(rng, 8);
    options.kvquant_outliers = 1 + tkv_rng_below(rng, 30);
    tkvi_side_make(&m->s, &tkvi_formats[formats[tkv_rng_below(rng, 10)]], which, c->dim, TKVI_BLOCK, &options,
                   0, 0, NULL);
    m->s.start = (int32_t)tkv_rng_below(rng, 200000) - 100000;
    memset(&r, 0, sizeof r);
    r.dim = 2 * tkv_rng_below(rng, c->dim / 2 + 1);
    if (tkv_rng_below(rng, 2)) r.dim = c->dim / 2 * 2;
    r.interleaved = tkv_rng_below(rng, 2);
    if (which == TKV_K && r.dim > 0 && m->s.format->family->undoes_rope)
        m->s.rope = tkvi_own_rope_make(&rope, &r);
}

/* Kinds: 0 a random side, 1 a random side with rotated values, 2 A or R, 3 an exact format, 4 a format stored by
 * tokens. */
static void init_decode_side(tkv_rng *rng, const decode_case *c, tkv_side which, random_side *m,
                             tkvi_format *rotated) {
    if (c->kind == 2) {
        static const int half_bits[5] = {2, 3, 4, 6, 8};
        init_shared_side(rng, m, which, c->dim, which == TKV_V ? half_bits[tkv_rng_below(rng, 5)] : 0, 3.0);
    } else if (c->kind == 4) {
        init_row_side(rng, c, which, m);
    } else if (c->kind == 3) {
        static const tkv_format exact[3] = {TKV_F32, TKV_F16, TKV_BF16};
        memset(m, 0, sizeof *m);
        tkvi_side_init(&m->s, &tkvi_formats[exact[c->width % 3]], which, c->dim, 64, c->first + c->n, NULL);
    } else {
        const int levels = (c->width == 0 || c->width <= 4) && tkv_rng_below(rng, 3) == 0;
        init_random_side(rng, m, which, c->dim, tkv_rng_below(rng, 2) ? 64 : 32, c->width,
                         tkv_rng_below(rng, 2), levels);
        *rotated = *m->s.format;
        rotated->side[TKV_K].decode = rotated->side[TKV_V].decode = tkvi_decode_tiles;
        rotated->rotated = (int8_t)c->kind;
        m->s.format = rotated;
    }
}

static int decodes_like_scalar(const tkvi_simd_ops *ops, const decode_case *c, tkv_side which,
                               uint64_t seed) {
    static float want[TKVI_BLOCK * (TKV_MAX_HEAD_DIM + 9)];
    tkv_rng rng = tkv_rng_seed(seed);
    tkvi_format rotated;
    random_side m;
    guarded_memory fs, fx;
    uint8_t *src;
    float *x;
    size_t size = (size_t)((c->n - 1) * c->stride + c->dim), i;
    int same;
    init_decode_side(&rng, c, which, &m, &rotated);
    src = (uint8_t *)guard_alloc(&fs, m.s.bytes, (int)(seed % 2));
    x = (float *)guard_alloc(&fx, size * sizeof(float), (int)(seed / 2 % 2));
    for (i = 0; i < size; i++) want[i] = x[i] = -77.0f;
    if (c->kind < 3) fill_side(&rng, &m.s, src, TKVI_BLOCK, seed % 3 ? 1.0 : 30.0, seed % 5 ? 3.0 : 600.0);
    for (i = 0; c->kind == 3 && i < m.s.bytes; i++)
        src[i] = (uint8_t)tkv_rng_below(&rng, 120); /* all values are finite */
    if (c->kind == 4) {
        static float values[TKVI_BLOCK * TKV_MAX_HEAD_DIM];
        for (i = 0; i < (size_t)(TKVI_BLOCK * c->dim); i++)
            values[i] = (float)(tkv_rng_gauss(&rng) * (tkv_rng_below(&rng, 40) ? 1.0 : 30.0));
        tkvi_encode_side(&m.s, &tkvi_simd_ops_scalar, values, (size_t)c->dim, TKVI_BLOCK, src);
        for (i = 0; i < m.s.code_bytes; i++) src[i] = (uint8_t)tkv_rng_below(&rng, 256); /* all codes */
        for (i = 0; seed % 4 == 0 && i < (size_t)(TKVI_BLOCK * m.s.slots);
             i += 3) { /* of a channel too many */
            const size_t bytes = (size_t)tkvi_kvquant_slot_bytes(&m.s);
            memset(src + tkvi_kvquant_places(&m.s).slot + i * bytes, 255, bytes - 2);
        }
    }
    tkvi_values(&m.s, ops, src, c->first, c->n, x, (size_t)c->stride);
    tkvi_decode_side(&m.s, src, c->first, c->n, want, (size_t)c->stride);
    same = memcmp(x, want, size * sizeof(float)) == 0;
    return same & guard_free(&fs) & guard_free(&fx);
}

TEST(decode_any_tokens) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        tkv_rng rng = tkv_rng_seed(23);
        for (k = 0; k < n_rounds(4000); k++) {
            static const int dims[10] = {64, 128, 80, 96, 112, 192, 256, 16, 512, 576};
            const tkv_side which = k % 2 ? TKV_V : TKV_K;
            decode_case c;
            c.dim = k % 3 ? dims[tkv_rng_below(&rng, 10)] : 1 + tkv_rng_below(&rng, TKV_MAX_HEAD_DIM);
            c.kind = tkv_rng_below(&rng, 5);
            c.width = tkv_rng_below(&rng, 3) ? widths[tkv_rng_below(&rng, 7)] : 0;
            c.first = tkv_rng_below(&rng, 3) ? 0 : tkv_rng_below(&rng, TKVI_BLOCK);
            c.n =
                tkv_rng_below(&rng, 3) ? TKVI_BLOCK - c.first : 1 + tkv_rng_below(&rng, TKVI_BLOCK - c.first);
            c.stride = c.dim + (tkv_rng_below(&rng, 2) ? tkv_rng_below(&rng, 9) : 0);
            CHECK_MSG(decodes_like_scalar(kernels->simd_ops, &c, which, (uint64_t)k),
                      "%s %s: dim %d kind %d width %d first %d n %d stride %d", kernels->name,
                      which == TKV_K ? "K" : "V", c.dim, c.kind, c.width, c.first, c.n, c.stride);
        }
    }
}

/* 64 channels in 4 equal parts: kernels read them. Of 66 channels the parts have 16 and 17, and decode alike. */
TEST(parts_of_subspaces) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, c;
    for (i = 0; i < count; i++)
        for (k = 0; k < 4; k++) {
            static float x[TKVI_BLOCK * 66], got[TKVI_BLOCK * 66], want[TKVI_BLOCK * 66];
            static uint8_t bytes[TKVI_BLOCK * 128];
            const int dim = 64 + 2 * (k / 2);
            const tkvi_simd_ops *ops = tkvi_kernels_for(list[i])->simd_ops;
            tkv_rng rng = tkv_rng_seed((uint64_t)k);
            tkv_format_options options;
            tkvi_side s;
            memset(&options, 0, sizeof options);
            options.subspaces = 4;
            tkvi_fill_options(&options);
            tkvi_side_make(&s, &tkvi_formats[TKV_SUBSPACE4], k % 2 ? TKV_V : TKV_K, dim, TKVI_BLOCK, &options,
                           0, 0, NULL);
            REQUIRE(s.bytes <= sizeof bytes);
#ifdef TKVI_VECTORS
            CHECK_EQ(tkvi_reads_code_rows(&s), dim == 64);
#endif
            tkv_rng_fill(&rng, x, (size_t)(TKVI_BLOCK * dim), 1.0);
            tkvi_encode_side(&s, &tkvi_simd_ops_scalar, x, (size_t)dim, TKVI_BLOCK, bytes);
            tkvi_values(&s, ops, bytes, 0, TKVI_BLOCK, got, (size_t)dim);
            tkvi_decode_side(&s, bytes, 0, TKVI_BLOCK, want, (size_t)dim);
            CHECK_MEM(got, want, (size_t)(TKVI_BLOCK * dim) * sizeof *got);
            for (c = 0; c < TKVI_BLOCK * dim; c++) CHECK_NEAR(got[c], x[c], .7);
        }
}

TEST(tiles_every_width) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, w, k;
    answer_counts answers = {0, 0};
    for (i = 0; i < count; i++)
        for (w = 0; w < 7; w++)
            for (k = 0; k < (tkv_test_quick() ? 4 : 32); k++) {
                tkv_rng rng = tkv_rng_seed((uint64_t)(100 * w + k));
                tile_case c = random_case(&rng);
                c.width = widths[w];
                c.levels = widths[w] <= 4 && k % 4 == 3;
                c.n_limbs = 1 + k % 2;
                c.group = k / 2 % 2 ? 32 : 64;
                c.rows = 1 + k % tkvi_rows_of((c.dim + 15) / 16 * 16);
                check_case(&c, (uint64_t)(1000 * w + k), list[i], &answers);
            }
    CHECK_LE(0.9 * answers.n_cases, answers.n_large);
}

TEST(tiles_mixed) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    answer_counts answers = {0, 0};
    for (i = 0; i < count; i++)
        for (k = 0; k < n_rounds(240); k++) {
            tkv_rng rng = tkv_rng_seed((uint64_t)(5000 + k));
            tile_case c = random_case(&rng);
            c.width = 0;
            c.levels = k % 3 == 0;
            c.order = k % 2;
            check_case(&c, (uint64_t)(7000 + k), list[i], &answers);
        }
    CHECK_LE(0.9 * answers.n_cases, answers.n_large);
}

/* K of A formats: runs of 6 to 1 bits, then channels without codes, in a random order, with means far from 0. */
TEST(keys_of_a_formats) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    answer_counts answers = {0, 0};
    for (i = 0; i < count; i++)
        for (k = 0; k < n_rounds(320); k++) {
            tkv_rng rng = tkv_rng_seed((uint64_t)(9000 + k));
            tile_case c = random_case(&rng);
            c.shared = 1;
            c.width = k % 4 == 0 ? 1 + k / 4 % 6 : 0;
            check_side(&c, 0, 0, (uint64_t)(11000 + k), list[i], &answers);
        }
    CHECK_LE(0.9 * answers.n_cases, answers.n_large);
}

/* V of R formats: 1, 2, 3 and 4 bits, and pairs, with and without a slab that has no partner. */
TEST(values_of_r_formats) {
    static const int half_bits[5] = {2, 3, 4, 6, 8};
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    answer_counts answers = {0, 0};
    for (i = 0; i < count; i++)
        for (k = 0; k < n_rounds(320); k++) {
            tkv_rng rng = tkv_rng_seed((uint64_t)(13000 + k));
            tile_case c = random_case(&rng);
            c.shared = 1;
            c.width = k % 3 == 0 ? 3 : half_bits[k % 5];
            check_side(&c, 1, 1, (uint64_t)(15000 + k), list[i], &answers);
        }
    CHECK_LE(0.9 * answers.n_cases, answers.n_large);
}

/* Encodes scales at and beside each border between codes, and zero, negative, smallest and largest scales. */
TEST(codes_of_logarithmic_scales) {
    static float x[4096];
    static uint8_t want[4096];
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, top, n = 0;
    for (k = 0; k < 16; k++)
        for (i = -1; i < 2; i++)
            for (top = 0; top < 255; top += 3)
                x[n++] = tkvi_from_bits(((uint32_t)top << 23 | tkvi_log_border[k]) + (uint32_t)i);
    x[n++] = 0.0f;
    x[n++] = -0.0f;
    x[n++] = -1.0f;
    x[n++] = tkvi_from_bits(1);
    x[n++] = FLT_MAX;
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *ops = tkvi_kernels_for(list[i])->simd_ops;
        for (k = 0; k < 70; k++) {
            guarded_memory fs, fd;
            float *s = (float *)guard_alloc(&fs, (size_t)k * sizeof(float), 0);
            uint8_t *d = (uint8_t *)guard_alloc(&fd, (size_t)k, 0);
            memcpy(s, x + 50 * k, (size_t)k * sizeof(float));
            tkvi_encode_log_scales_scalar(s, k, 8, want);
            ops->encode_log_scales(s, k, 8, d);
            CHECK_MEM(d, want, (size_t)k);
            CHECK(guard_free(&fs) & guard_free(&fd));
        }
        for (top = -TKVI_LOG_TOP; top <= TKVI_LOG_TOP; top += 8) {
            static uint8_t got[4096];
            tkvi_encode_log_scales_scalar(x, n, top, want);
            ops->encode_log_scales(x, n, top, got);
            CHECK_MEM(got, want, (size_t)n);
        }
    }
}

/* Interleaves columns to tiles, and packs tiles of all widths. Half vectors of two widths may share a vector. */
TEST(packing) {
    static const int widths_down[7] = {8, 6, 5, 4, 3, 2, 1};
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, w, j;
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *ops = tkvi_kernels_for(list[i])->simd_ops;
        for (k = 0; k < n_rounds(200); k++) {
            static uint8_t column[TKV_MAX_HEAD_DIM][TKVI_BLOCK], want[8192];
            uint8_t tile[TKVI_TILE_CODES], interleaved[TKVI_TILE_CODES], *got;
            int16_t channel[4];
            tkv_rng rng = tkv_rng_seed((uint64_t)(19000 + k));
            tkvi_tile_counts runs;
            uint8_t *want_at, *got_at;
            size_t bytes;
            guarded_memory fd;
            memset(&runs, 0, sizeof runs);
            for (w = 0; w < 7; w++) runs.n[widths_down[w]] = (uint16_t)tkv_rng_below(&rng, 4);
            bytes = tkvi_tiles_bytes(&runs);
            got = (uint8_t *)guard_alloc(&fd, bytes, k % 2);
            memset(want, 0, sizeof want);
            if (bytes) memset(got, 0, bytes);
            for (j = 0; j < TKV_MAX_HEAD_DIM * TKVI_BLOCK; j++)
                column[j / TKVI_BLOCK][j % TKVI_BLOCK] = (uint8_t)tkv_rng_below(&rng, 256);
            want_at = want;
            got_at = got;
            for (w = 0; w < 7; w++)
                for (j = 0; j < 4 * runs.n[widths_down[w]]; j++) {
                    channel[j % 4] = (int16_t)tkv_rng_below(&rng, TKV_MAX_HEAD_DIM);
                    if (j % 4 < 3) continue;
                    tkvi_interleave_scalar(column, channel, tile);
                    ops->interleave(column, channel, interleaved);
                    CHECK_MEM(interleaved, tile, sizeof tile);
                    tkvi_pack_tile(want_at, widths_down[w], tile);
                    ops->pack_tile(got_at, widths_down[w], tile);
                    want_at += TKVI_TILE_BYTES(widths_down[w]);
                    got_at += TKVI_TILE_BYTES(widths_down[w]);
                }
            CHECK_MEM(got, want, bytes);
            CHECK(guard_free(&fd));
        }
    }
}

/* Kinds of values that are difficult for an encoder. */
enum { KINDS = 11 };

static float hard_value(tkv_rng *rng, int kind, int t, int c) {
    double x = tkv_rng_gauss(rng);
    switch (kind) {
    case 1: return tkv_rng_below(rng, 3) ? 0.0f : (float)x;
    case 2: return c % 3 == 0 ? 5.0f : (float)(x * ldexp(1.0, t % 9 - 4));
    case 3: return (float)(x + (c % 2 ? 600.0 : -3.0));
    case 4: return (float)(x * 1e-30);
    case 5: return (float)(x * 60000.0);
    case 6: return t % 5 == 0 && c % 2 ? -0.0f : 0.0f;
    case 7: return (float)(tkv_rng_uniform(rng) < 0.5 ? -3.4e38 : x * 5e37);
    case 8: return tkvi_from_bits((uint32_t)tkv_rng_below(rng, 1 << 20) | (x < 0.0 ? 1u << 31 : 0u));
    case 9: return t == 3 ? (float)(x * 1e33) : (float)x;
    case 10: return (float)tkv_rng_below(rng, 9); /* many ties */
    default: return (float)x;
    }
}

/* Encodes n tokens with the scalar code and with an instruction set. The bytes must be equal. The encoder may not read
 * beyond the tokens or write beyond the block. */
static void check_encoding(tkv_rng *rng, const tkvi_side *s, const tkvi_simd_ops *ops, int kind, int n,
                           int stride, int front) {
    static uint8_t want[1 << 18];
    guarded_memory fx, fd;
    float *x = (float *)guard_alloc(&fx, (size_t)((n - 1) * stride + s->dim) * sizeof(float), front & 1);
    uint8_t *dst = (uint8_t *)guard_alloc(&fd, s->bytes, front >> 1 & 1);
    int t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++) x[t * stride + c] = hard_value(rng, kind, t, c);
    memset(want, 0x5a, sizeof want);
    tkvi_encode_side(s, &tkvi_simd_ops_scalar, x, (size_t)stride, n, want);
    memset(dst, 0xa5, s->bytes);
    tkvi_encode_side(s, ops, x, (size_t)stride, n, dst);
    CHECK_MSG(memcmp(dst, want, s->bytes) == 0, "%s %s, head_dim %d, %d tokens, values %d", s->format->name,
              s->which == TKV_K ? "K" : "V", s->dim, n, kind);
    CHECK(guard_free(&fx) & guard_free(&fd));
}

/* A and R with learned tables: all widths, shuffled channels, small and large means. */
TEST(encoding_with_tables) {
    static const int half_bits[5] = {2, 3, 4, 6, 8};
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
#ifdef __FAST_MATH__
    SKIP("-ffast-math: the bytes may differ");
#endif
    for (i = 0; i < count; i++)
        for (k = 0; k < n_rounds(1600); k++) {
            tkv_rng rng = tkv_rng_seed((uint64_t)(17000 + k));
            tile_case c = random_case(&rng);
            int v = k % 2, kind = k / 2 % KINDS, n = k % 13 == 0 ? 1 : c.n;
            random_side m;
            init_shared_side(&rng, &m, v ? TKV_V : TKV_K, c.dim, v ? half_bits[k / 2 % 5] : k / 2 % 8 % 7,
                             c.zero);
            check_encoding(&rng, &m.s, tkvi_kernels_for(list[i])->simd_ops, kind, n,
                           c.dim + (k % 5 == 0 ? 7 : 0), k / 4);
        }
}

/* Every format without learned tables. An A or R format takes every third head_dim, so three formats take all. */
TEST(encoding_of_every_format) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, f, which;
#ifdef __FAST_MATH__
    SKIP("-ffast-math: the bytes may differ");
#endif
    for (i = 0; i < count; i++)
        for (f = TKV_F32; f < TKV_FORMAT_COUNT; f++)
            for (which = TKV_K; which <= TKV_V; which++) {
                const tkvi_format *format = &tkvi_formats[f];
                int kivi = format->side[which].encode == tkvi_kivi_encode;
                int n_all = format->shared ? TKV_MAX_HEAD_DIM / 3 : kivi ? 120 : 24;
                if (!tkvi_format_stores(format, (tkv_side)which)) continue;
                for (k = 1; k <= n_rounds(n_all); k++) {
                    tkv_rng rng = tkv_rng_seed((uint64_t)(23000 + 500 * f + k));
                    int dim = format->shared ? 3 * k - f % 3 : 1 + tkv_rng_below(&rng, TKV_MAX_HEAD_DIM);
                    int n = k % 3 ? TKVI_BLOCK : 1 + tkv_rng_below(&rng, TKVI_BLOCK), kind = k % KINDS;
                    tkvi_side s;
                    tkvi_side_init(&s, format, (tkv_side)which, dim, k % 2 ? 64 : 32, TKVI_BLOCK, NULL);
                    if (s.bytes == 0) continue;
                    check_encoding(&rng, &s, tkvi_kernels_for(list[i])->simd_ops, kind, n, dim, k / 2);
                }
            }
}

/* The table that vector code reads matches its definition. */
TEST(range_table_of_a_formats) {
    int k, width;
    for (k = 0; k < TKVI_A_CUTS; k++)
        for (width = 0; width <= 6; width++)
            CHECK_EQ(tkvi_a_ranges[k].by[width], tkvi_cut_by(tkvi_a_ranges[k].cut[width], (1 << width) - 1));
}

/* All weights and all codes at their largest: nothing may saturate or overflow. */
TEST(tiles_with_largest_codes) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, w, k;
    static uint8_t src[1 << 18];
    static float q[TKVI_ROWS * TKV_MAX_HEAD_DIM], ref[TKV_MAX_HEAD_DIM], out[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    for (i = 0; i < count; i++)
        for (w = 0; w < 7; w++)
            for (k = 0; k < 32;
                 k++) { /* bits of k: levels, n_limbs, V, sign of the weights of K, sign of the levels */
                const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
                tkv_rng rng = tkv_rng_seed(1);
                random_side m;
                int width = widths[w], n_limbs = k & 2 ? 2 : 1, r, c, n, terms, levels = (k & 1) != 0;
                float sign = (k & 12) == 8 ? -1.0f : 1.0f;
                double code, want;
                uint8_t code_bytes[TKVI_TILE_CODES];
                uint8_t *at;
                if (levels && (width > 4 || !(k & 4))) continue;
                init_random_side(&rng, &m, k & 4 ? TKV_V : TKV_K, 256, 64, width, 0, levels);
                for (c = 0; c < 16; c++) m.levels[c] = (int8_t)(k & 16 ? -127 : 127);
                m.s.format = &test_formats[0];
                memset(src, 0, sizeof src);
                at = src;
                for (c = 0; c < TKVI_TILE_CODES; c++) code_bytes[c] = (uint8_t)((1 << width) - 1);
                for (c = 0; c < m.s.pad / 4; c++) {
                    tkvi_pack_tile(at, width, code_bytes);
                    at += TKVI_TILE_BYTES(width);
                }
                n = m.s.groups * (k & 4 ? TKVI_BLOCK : m.s.pad);
                for (c = 0; c < n; c++)
                    tkvi_store16(src + m.s.code_bytes + 2 * c, 0x3c00); /* scale 1, zero 0 */
                for (c = 0; c < TKVI_ROWS * TKV_MAX_HEAD_DIM; c++) q[c] = sign;
                memset(out, 0, sizeof out);
                code = levels ? (k & 16 ? -127.0 : 127.0) : (double)((1 << width) - 1);
                terms = k & 4 ? TKVI_BLOCK : 256;
                want = (double)sign * code * terms;
                n_limbs = tkvi_max(n_limbs, tkvi_n_limbs(&m.s, 0));
                if (k & 4) kernels->v[TKVI_AS_TILES](&m.s, src, NULL, q, TKVI_ROWS, TKVI_BLOCK, n_limbs, out);
                else kernels->k[TKVI_AS_TILES](&m.s, src, NULL, q, ref, TKVI_ROWS, TKVI_BLOCK, n_limbs, out);
                for (r = 0; r < TKVI_ROWS; r++)
                    for (c = 0; c < (k & 4 ? 256 : TKVI_BLOCK); c++)
                        CHECK_NEAR(out[r * (k & 4 ? 256 : TKVI_BLOCK) + c], want, fabs(want) * 1e-6);
            }
}

/* Zero weights, zero scales, and weights so small that their reciprocals overflow. */
TEST(tiles_with_zeros) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, c;
    static uint8_t src[1 << 16];
    static float q[TKVI_ROWS * TKV_MAX_HEAD_DIM], ref[TKV_MAX_HEAD_DIM], out[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    for (i = 0; i < count; i++)
        for (k = 0; k < 12; k++) { /* K, V  x  zero q, tiny q, zero scales  x  n_limbs */
            const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
            tkv_rng rng = tkv_rng_seed((uint64_t)k);
            random_side m;
            int v = k % 2, kind = k / 2 % 3, n_limbs = 1 + k / 6;
            double want;
            init_random_side(&rng, &m, v ? TKV_V : TKV_K, 128, 64, 4, 0, 0);
            m.s.format = &test_formats[0];
            fill_side(&rng, &m.s, src, TKVI_BLOCK, kind == 2 ? 0.0 : 1.0, 0.0);
            for (c = 0; c < TKVI_ROWS * TKV_MAX_HEAD_DIM; c++) {
                q[c] = kind == 0 ? 0.0f : kind == 1 ? 1e-36f : 1.0f;
                out[c] = v ? 5.0f : 1e9f;
            }
            for (c = 0; c < m.s.pad; c++) ref[c] = kind == 2 ? -1.0f : 0.0f;
            want = v ? 5.0 : kind == 2 ? 128.0 : 0.0;
            if (v) kernels->v[TKVI_AS_TILES](&m.s, src, NULL, q, TKVI_ROWS, TKVI_BLOCK, n_limbs, out);
            else kernels->k[TKVI_AS_TILES](&m.s, src, NULL, q, ref, TKVI_ROWS, TKVI_BLOCK, n_limbs, out);
            for (c = 0; c < TKVI_ROWS * (v ? 128 : TKVI_BLOCK); c++)
                CHECK_NEAR(out[c], want, 1e-30 + want * 1e-6);
        }
}

/* >>accuracy: the error of arithmetic is at most a tenth of the format's error. One head, 8 blocks, 8 rows. */
enum { GOAL_BLOCKS = 8, GOAL_TOKENS = GOAL_BLOCKS * TKVI_BLOCK, GOAL_DIM = 128 };

typedef struct goal_data {
    float k[GOAL_TOKENS * GOAL_DIM], v[GOAL_TOKENS * GOAL_DIM];
    float dk[GOAL_TOKENS * GOAL_DIM], dv[GOAL_TOKENS * GOAL_DIM];
    float q[TKVI_ROWS * GOAL_DIM];
    uint8_t ks[GOAL_BLOCKS][TKVI_BLOCK * GOAL_DIM * 4], vs[GOAL_BLOCKS][TKVI_BLOCK * GOAL_DIM * 4];
} goal_data;

static void attend_in_double(const float *q, const float *k, const float *v, double *out) { /* reference */
    static double s[GOAL_TOKENS];
    double maximum = -1e300, sum = 0.0;
    int t, c;
    for (t = 0; t < GOAL_TOKENS; t++) {
        s[t] = 0.0;
        for (c = 0; c < GOAL_DIM; c++) s[t] += (double)q[c] * (double)k[t * GOAL_DIM + c];
        if (s[t] > maximum) maximum = s[t];
    }
    for (c = 0; c < GOAL_DIM; c++) out[c] = 0.0;
    for (t = 0; t < GOAL_TOKENS; t++) {
        double p = exp(s[t] - maximum);
        sum += p;
        for (c = 0; c < GOAL_DIM; c++) out[c] += p * (double)v[t * GOAL_DIM + c];
    }
    for (c = 0; c < GOAL_DIM; c++) out[c] /= sum;
}

static double relative_error(const double *a, const double *b, int n) { /* relative L2 */
    double d = 0.0, s = 0.0;
    int i;
    for (i = 0; i < n; i++) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        s += b[i] * b[i];
    }
    return sqrt(d / s);
}

/* Pairs of formats. A stores only K and R only V, so they form pairs. */
static const tkv_format_pair goal_pairs[] = {
    {TKV_F32, TKV_F32},     {TKV_F16, TKV_F16},     {TKV_BF16, TKV_BF16},   {TKV_Q8, TKV_Q8},
    {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI3, TKV_KIVI3}, {TKV_KIVI2, TKV_KIVI2}, {TKV_A40, TKV_R40},
    {TKV_A35, TKV_R40},     {TKV_A30, TKV_R30},     {TKV_A275, TKV_R30},    {TKV_A25, TKV_R20},
    {TKV_A225, TKV_R20},    {TKV_A20, TKV_R20},     {TKV_A175, TKV_R15},    {TKV_A15, TKV_R10},
};

TEST(accuracy) {
    static goal_data g;
    static float sorted[(TKVI_ROWS + 1) * GOAL_DIM], mean[GOAL_DIM];
    static uint8_t order[GOAL_DIM];
    static double want[TKVI_ROWS][GOAL_DIM], exact[TKVI_ROWS][GOAL_DIM], got[TKVI_ROWS][GOAL_DIM];
    static const char *const kinds[4] = {"gaussian", "peaked", "channels x16", "key bias 600"};
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), kind, i, b, r, t, c, f;
    for (kind = 0; kind < 4; kind++) {
        tkv_rng rng = tkv_rng_seed((uint64_t)(40 + kind));
        double sd = kind == 1 ? 4.0 : 1.0; /* of the logits */
        for (t = 0; t < GOAL_TOKENS; t++)
            for (c = 0; c < GOAL_DIM; c++) {
                double x = tkv_rng_gauss(&rng) * (kind == 2 && c % 32 == 3 ? 16.0 : 1.0);
                g.k[t * GOAL_DIM + c] = (float)(x + (kind == 3 && c % 32 == 7 ? 600.0 : 0.0));
                g.v[t * GOAL_DIM + c] = (float)tkv_rng_gauss(&rng);
            }
        for (c = 0; c < TKVI_ROWS * GOAL_DIM; c++) {
            double x = tkv_rng_gauss(&rng) * sd / sqrt((double)GOAL_DIM);
            g.q[c] = (float)(kind == 2 && c % 32 == 3 ? x / 16.0 : x);
        }
        make_order(&rng, order, GOAL_DIM, GOAL_DIM);
        for (c = 0; c < GOAL_DIM; c++) mean[c] = kind == 3 && order[c] % 32 == 7 ? 600.0f : 0.0f;
        for (f = 0; f < (int)(sizeof goal_pairs / sizeof *goal_pairs); f++) {
            const tkvi_format *kf = &tkvi_formats[goal_pairs[f].k], *vf = &tkvi_formats[goal_pairs[f].v];
            tkvi_side ks, vs;
            tkvi_share share;
            double format_error, bound;
            memset(&share, 0, sizeof share);
            if (kf->shared) tkvi_share_equally(kf->bits, GOAL_DIM, GOAL_DIM, 1, &share.tiles);
            share.top = 8;
            share.order = order;
            share.mean = mean;
            tkvi_side_init(&ks, kf, TKV_K, GOAL_DIM, 64, TKVI_BLOCK, kf->shared ? &share : NULL);
            tkvi_side_init(&vs, vf, TKV_V, GOAL_DIM, 64, TKVI_BLOCK, NULL);
            for (b = 0; b < GOAL_BLOCKS; b++) {
                size_t at = (size_t)(b * TKVI_BLOCK * GOAL_DIM);
                tkvi_encode_side(&ks, &tkvi_simd_ops_scalar, g.k + at, GOAL_DIM, TKVI_BLOCK, g.ks[b]);
                tkvi_encode_side(&vs, &tkvi_simd_ops_scalar, g.v + at, GOAL_DIM, TKVI_BLOCK, g.vs[b]);
                tkvi_decode_side(&ks, g.ks[b], 0, TKVI_BLOCK, g.dk + at, GOAL_DIM);
                tkvi_decode_side(&vs, g.vs[b], 0, TKVI_BLOCK, g.dv + at, GOAL_DIM);
            }
            for (r = 0; r < TKVI_ROWS; r++) {
                attend_in_double(g.q + r * GOAL_DIM, g.k, g.v, exact[r]);
                attend_in_double(g.q + r * GOAL_DIM, g.dk, g.dv, want[r]);
            }
            format_error = relative_error(want[0], exact[0], TKVI_ROWS * GOAL_DIM);
            bound = goal_pairs[f].k == TKV_F32 ? 1e-5 : tkvi_is_exact(kf) ? 2e-3 : 0.1 * format_error;
            for (r = 0; r <= TKVI_ROWS; r++)
                for (c = 0; c < GOAL_DIM; c++)
                    sorted[r * GOAL_DIM + c] =
                        (r < TKVI_ROWS ? g.q + r * GOAL_DIM : g.dk)[tkvi_channel(&ks, c)];
            for (i = 0; i < count; i++) {
                const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
                static float s[GOAL_BLOCKS][TKVI_ROWS * TKVI_BLOCK], p[TKVI_ROWS * TKVI_BLOCK],
                    out[TKVI_ROWS * GOAL_DIM];
                float maximum[TKVI_ROWS], sum[TKVI_ROWS];
                double error;
                memset(out, 0, sizeof out);
                for (r = 0; r < TKVI_ROWS; r++) {
                    maximum[r] = -1e30f;
                    sum[r] = 0.0f;
                }
                for (b = 0; b < GOAL_BLOCKS; b++) {
                    kernels->k[kf->stored](&ks, g.ks[b], NULL, sorted, sorted + TKVI_ROWS * GOAL_DIM,
                                           TKVI_ROWS, TKVI_BLOCK, tkvi_n_limbs(&ks, 0), s[b]);
                    for (r = 0; r < TKVI_ROWS; r++) {
                        float m = kernels->max64(s[b] + r * TKVI_BLOCK);
                        if (m > maximum[r]) maximum[r] = m;
                    }
                }
                for (b = 0; b < GOAL_BLOCKS; b++) {
                    for (r = 0; r < TKVI_ROWS; r++)
                        sum[r] += kernels->exp64(s[b] + r * TKVI_BLOCK, maximum[r], p + r * TKVI_BLOCK);
                    kernels->v[vf->stored](&vs, g.vs[b], NULL, p, TKVI_ROWS, TKVI_BLOCK, tkvi_n_limbs(&vs, 0),
                                           out);
                }
                for (r = 0; r < TKVI_ROWS && vf->rotated; r++) tkvi_rotate_back(out + r * GOAL_DIM, GOAL_DIM);
                for (r = 0; r < TKVI_ROWS; r++)
                    for (c = 0; c < GOAL_DIM; c++) got[r][c] = (double)(out[r * GOAL_DIM + c] / sum[r]);
                error = relative_error(got[0], want[0], TKVI_ROWS * GOAL_DIM);
                CHECK_MSG(error <= bound, "%s %s %s %s: arithmetic %.2e, bound %.2e, format %.2e",
                          kernels->name, kinds[kind], kf->name, vf->name, error, bound, format_error);
                if (getenv("TKV_TEST_VERBOSE"))
                    printf("\n    %-7s %-13s %-5s %-5s arithmetic %.2e format %.2e", kernels->name,
                           kinds[kind], kf->name, vf->name, error, format_error);
            }
        }
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(dispatch);
#ifdef TKVI_X86
    RUN(dispatch_of_other_processors);
#endif
    RUN(f16_to_f32);
    RUN(f32_to_f16);
    RUN(logarithmic_scales);
    RUN(zero_points_of_a_formats);
    RUN(rows_are_turned_as_vectors);
    RUN(exponentials);
    RUN(exact_formats);
    RUN(decode_any_tokens);
    RUN(parts_of_subspaces);
    RUN(tiles_every_width);
    RUN(tiles_mixed);
    RUN(keys_of_a_formats);
    RUN(values_of_r_formats);
    RUN(codes_of_logarithmic_scales);
    RUN(packing);
    RUN(encoding_with_tables);
    RUN(encoding_of_every_format);
    RUN(range_table_of_a_formats);
    RUN(tiles_with_largest_codes);
    RUN(tiles_with_zeros);
    RUN(accuracy);
    return tkv_test_end();
}
