/*
 * white_kernels.c - white-box test of src/kernels: the kernels of every instruction set of this machine, against the
 * scalar kernels and against double precision, on sides filled at random. Inaccessible pages around the memory
 * catch reads and writes beyond it. It calls internal functions (white.h).
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

/* >>memory with a fence on both sides */
typedef struct fence {
    unsigned char *base, *p;
    size_t room, size;
} fence;

enum { FENCE_BYTE = 0xa5, FENCE_MARGIN = 256 };

/* size bytes; on Linux their end, or with `front` their beginning, touches a page without access. */
static void *fence_get(fence *f, size_t size, int front) {
#ifdef __linux__
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (size + page - 1) / page * page;
    f->room = inner + 2 * page;
    f->base =
        (unsigned char *)mmap(NULL, f->room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (f->base == (unsigned char *)MAP_FAILED) exit(2);
    memset(f->base, FENCE_BYTE, f->room);
    if (mprotect(f->base, page, PROT_NONE) || mprotect(f->base + page + inner, page, PROT_NONE)) exit(2);
    f->p = f->base + page + (front ? 0 : inner - size);
#else
    (void)front;
    f->room = size + 2 * FENCE_MARGIN;
    f->base = (unsigned char *)malloc(f->room);
    if (!f->base) exit(2);
    memset(f->base, FENCE_BYTE, f->room);
    f->p = f->base + FENCE_MARGIN;
#endif
    f->size = size;
    return f->p;
}

/* Gives the memory back; 1 if nothing around it was written. */
static int fence_put(fence *f) {
    size_t from = 0, to = f->room, i;
    int intact = 1;
#ifdef __linux__
    from = (size_t)sysconf(_SC_PAGESIZE);
    to -= from;
#endif
    for (i = from; i < to; i++) {
        const unsigned char *b = f->base + i;
        if ((b < f->p || b >= f->p + f->size) && *b != FENCE_BYTE) intact = 0;
    }
#ifdef __linux__
    munmap(f->base, f->room);
#else
    free(f->base);
#endif
    return intact;
}

/* >>sides made by hand: any widths, an order, levels (V). Metadata is fp16 scales then fp16 zeros, as KIVI's. */
static void meta_halves(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *help, float *scale,
                        float *zero) {
    int n = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK);
    help->f16_to_f32(src + s->code_bytes, n, scale);
    help->f16_to_f32(src + s->code_bytes + 2 * n, n, zero);
}

/* The same scales, and zeros in eighths of them (8 signed bits): another format with other numbers. */
static void meta_bytes(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *help, float *scale,
                       float *zero) {
    int n = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK), i;
    help->f16_to_f32(src + s->code_bytes, n, scale);
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
     {{NULL, NULL, NULL, meta_halves, NULL}, {NULL, NULL, NULL, meta_halves, NULL}}},
    {"test bytes",
     4,
     TKVI_AS_TILES,
     0,
     0,
     {{NULL, NULL, NULL, meta_bytes, NULL}, {NULL, NULL, NULL, meta_bytes, NULL}}},
};

static const int widths[7] = {8, 6, 5, 4, 3, 2, 1};

typedef struct made_side {
    tkvi_side s;
    uint8_t order[TKV_MAX_HEAD_DIM];
    int8_t levels[16];
    float mean[TKV_MAX_HEAD_DIM];
} made_side;

static void make_order(tkv_rng *rng, uint8_t *order, int dim, int pad) { /* padding stays behind */
    int i;
    for (i = 0; i < pad; i++) order[i] = (uint8_t)i;
    for (i = dim - 1; i > 0; i--) {
        int j = tkv_rng_below(rng, i + 1);
        uint8_t t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

/* width 0: a mix. Everything but the bytes. */
static void make_side(tkv_rng *rng, made_side *m, tkv_side which, int dim, int group, int width,
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

/* A side of an A format (K: a mix of widths with channels that have none, or all of one `width`), or of an R
 * format (V: `width` half bits). `mean`: how large the static means are. */
static void make_shared(tkv_rng *rng, made_side *m, tkv_side which, int dim, int width, double mean) {
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

/* Metadata of A and R: scales around `scale`, a few of them 0; any offsets; block means around `zero`. */
static void fill_shared_meta(tkv_rng *rng, const tkvi_side *s, uint8_t *meta, double scale, double zero) {
    int n = s->which == TKV_K ? s->pad : TKVI_BLOCK, coded = 0, width, i;
    for (width = 1; width <= TKVI_MAX_WIDTH; width++) coded += 4 * s->tiles.n[width];
    if (s->which == TKV_V) coded = n;
    for (i = 0; i < n; i++) {
        double size = tkv_rng_below(rng, 20) == 0 ? 0.0 : scale * (0.1 + tkv_rng_uniform(rng));
        uint16_t half = tkvi_f32_to_f16((float)(zero * tkv_rng_gauss(rng)));
        if (s->which == TKV_K && i >= s->dim) break; /* encoders leave the padding 0 */
        meta[i] = (uint8_t)(i < coded ? tkvi_log_code((float)size, s->top) : half & 255);
        if (s->which == TKV_K) meta[s->pad + i] = (uint8_t)(i < coded ? tkv_rng_below(rng, 256) : half >> 8);
    }
}

/* Random codes, scales around `scale`, zeros around `zero`; tokens from n on have code 0, as encoders leave
 * them. */
static void fill_side(tkv_rng *rng, const tkvi_side *s, uint8_t *src, int n, double scale, double zero) {
    int count = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK), i, width, t, number = 0;
    tkvi_tile_at at = tkvi_first_tile(&s->tiles);
    memset(src, 0, s->bytes);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++, number++) {
            uint8_t code[TKVI_TILE_CODES];
            for (t = 0; t < TKVI_TILE_CODES; t++) {
                int token = s->which == TKV_K ? t / 4 : 16 * (number % 4) + t / 64 * 4 + t % 4;
                code[t] = (uint8_t)(token < n ? tkv_rng_below(rng, 1 << width) : 0);
            }
            tkvi_pack_tile(src, &at, width, code);
            tkvi_next_tile(&at, width);
        }
    if (s->format->shared) {
        fill_shared_meta(rng, s, src + s->code_bytes, scale, zero);
        return;
    }
    for (i = 0; i < count; i++) {
        double size = tkv_rng_below(rng, 20) == 0 ? 0.0 : scale * (0.1 + tkv_rng_uniform(rng));
        tkvi_store16(src + s->code_bytes + 2 * i, tkvi_f32_to_f16((float)size));
        tkvi_store16(src + s->code_bytes + 2 * (count + i),
                     tkvi_f32_to_f16((float)(zero * tkv_rng_gauss(rng))));
    }
}

/* The side in double: scale, zero and level of each value, [token][channel]. */
typedef struct decoded {
    double scale[TKVI_BLOCK][TKV_MAX_HEAD_DIM], zero[TKVI_BLOCK][TKV_MAX_HEAD_DIM];
    double level[TKVI_BLOCK][TKV_MAX_HEAD_DIM], centre[TKVI_BLOCK][TKV_MAX_HEAD_DIM];
} decoded;

static void decode_side(const tkvi_side *s, const uint8_t *src, decoded *d) {
    static float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    tkvi_tile_at at = tkvi_first_tile(&s->tiles);
    int width, i, j, t, number = 0, slab = 0, k = s->which == TKV_K;
    s->format->side[s->which].meta(s, src, &tkvi_simd_ops_scalar, scale, zero);
    memset(d, 0, sizeof *d);
    for (t = 0; t < TKVI_BLOCK; t++) /* of channels without codes this is all */
        for (j = 0; j < s->pad; j++) {
            int m = k ? t / s->group * s->pad + j : j / s->group * TKVI_BLOCK + t;
            d->scale[t][k ? tkvi_channel(s, j) : j] = (double)scale[m];
            d->zero[t][k ? tkvi_channel(s, j) : j] = (double)zero[m];
        }
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++, number++) {
            uint8_t code[TKVI_TILE_CODES];
            int channels = k ? 0 : tkvi_slab_channels(s, width);
            tkvi_unpack_tile(src, &at, width, code);
            tkvi_next_tile(&at, width);
            for (j = 0; j < TKVI_TILE_CODES; j++) {
                int r = j % 4, upper = 0;
                int token = k ? j / 4 : 16 * (number % 4) + j / 64 * 4 + r;
                int channel = k ? tkvi_channel(s, 4 * number + r) : slab + j % 64 / 4;
                for (; upper == 0 || 16 * upper < channels; upper++, channel += 16) {
                    d->level[token][channel] = (double)code[j];
                    if (s->levels) /* a pair has two of them */
                        d->level[token][channel] =
                            (double)s->levels[(s->pairs ? width == 3 ? 16 * upper : 32 : 0) + (code[j] & 15)];
                    d->centre[token][channel] = (double)tkvi_centre(s, width);
                }
            }
            if (i % 4 == 3) slab += channels;
        }
}

/* >>which kernels */
static int rounds(int n) { return tkv_test_quick() ? (n + 7) / 8 : n; }

/* >>one case: a side of tiles and rows of q or p */
typedef struct tile_case {
    int dim, group, width, order, levels, rows, n, n_limbs;
    int shared; /* a side of A (width 0: a mix) or R (width: half bits) instead of one made by hand */
    double zero;
    int peaked; /* one weight far above the rest */
    int front, ahead;
} tile_case;

static tile_case random_case(tkv_rng *rng) {
    static const int dims[9] = {16, 48, 64, 80, 96, 112, 128, 192, 256};
    tile_case c;
    memset(&c, 0, sizeof c);
    c.dim = tkv_rng_below(rng, 3) ? dims[tkv_rng_below(rng, 9)] : 1 + tkv_rng_below(rng, TKV_MAX_HEAD_DIM);
    c.group = tkv_rng_below(rng, 2) ? 64 : 32;
    c.width = tkv_rng_below(rng, 3) ? widths[tkv_rng_below(rng, 7)] : 0;
    c.order = tkv_rng_below(rng, 3) == 0;
    c.levels = (c.width == 0 || c.width <= 4) && tkv_rng_below(rng, 3) == 0;
    c.rows = 1 + tkv_rng_below(rng, TKVI_ROWS);
    c.n = tkv_rng_below(rng, 2) ? TKVI_BLOCK : 1 + tkv_rng_below(rng, TKVI_BLOCK);
    c.n_limbs = 1 + tkv_rng_below(rng, 2);
    c.zero = tkv_rng_below(rng, 4) ? 3.0 : 600.0;
    c.peaked = tkv_rng_below(rng, 3) == 0;
    c.front = tkv_rng_below(rng, 2);
    c.ahead = tkv_rng_below(rng, 3);
    return c;
}

static void say_case(const tile_case *c, const char *side, const char *isa) {
    printf("    %s %s: dim %d group %d width %d order %d levels %d rows %d n %d n_limbs %d shared %d zero %g "
           "peaked %d\n",
           isa, side, c->dim, c->group, c->width, c->order, c->levels, c->rows, c->n, c->n_limbs, c->shared,
           c->zero, c->peaked);
}

/* Largest error against double in units of its bound, largest difference from scalar in units of its own, and
 * the largest answer in units of the first bound (if that were small, zeros would pass). */
typedef struct tile_result {
    double error, difference, answer;
    int finite, intact;
} tile_result;

static void worst(double *most, double value) {
    if (!(value <= *most)) *most = value;
}

/* sum q (scale level + zero - ref), and bounds: a weight is rounded by half a step at most. */
static tile_result run_k(tkv_rng *rng, const tile_case *c, const tkvi_kernels *kernels) {
    static decoded d;
    static float scalar[TKVI_ROWS * TKVI_BLOCK], by_channel[(TKVI_ROWS + 1) * TKV_MAX_HEAD_DIM];
    made_side m;
    fence fs, fq, fr, fo;
    tile_result res;
    const tkvi_side *s = &m.s;
    uint8_t *src;
    float *q = by_channel, *ref, *sorted, *sorted_ref, *out;
    int r, t, ch;
    double scale = c->zero > 100.0 ? 0.5 : 1.0;
    memset(&res, 0, sizeof res);
    res.finite = res.intact = 1;
    if (c->shared) make_shared(rng, &m, TKV_K, c->dim, c->width, c->zero);
    else make_side(rng, &m, TKV_K, c->dim, c->group, c->width, c->order, c->levels);
    src = (uint8_t *)fence_get(&fs, s->bytes, c->front);
    sorted = (float *)fence_get(&fq, (size_t)(c->rows * s->pad) * sizeof(float), 0);
    sorted_ref = (float *)fence_get(&fr, (size_t)s->pad * sizeof(float), 0);
    ref = q + c->rows * s->pad;
    out = (float *)fence_get(&fo, (size_t)(c->rows * TKVI_BLOCK) * sizeof(float), 0);
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
    for (r = 0; r <= c->rows; r++) /* kernels get them in the order of the codes */
        for (ch = 0; ch < s->pad; ch++)
            (r < c->rows ? sorted + r * s->pad : sorted_ref)[ch] = q[r * s->pad + tkvi_channel(s, ch)];
    tkvi_kernels_scalar.k[TKVI_AS_TILES](s, src, NULL, sorted, sorted_ref, c->rows, c->n, c->n_limbs, scalar);
    kernels->k[TKVI_AS_TILES](s, src,
                              c->ahead == 0   ? NULL
                              : c->ahead == 1 ? src
                                              : src + 4096,
                              sorted, sorted_ref, c->rows, c->n, c->n_limbs, out);
    for (r = 0; r < c->rows; r++)
        for (t = 0; t < TKVI_BLOCK; t++) {
            double want = 0.0, spread = 0.0, size = 0.0, most = 0.0, bound;
            double got = (double)out[r * TKVI_BLOCK + t], old = (double)scalar[r * TKVI_BLOCK + t];
            if (!tkv_test_is_finite(got)) res.finite = 0;
            if (t >= c->n) continue;
            for (ch = 0; ch < s->pad; ch++) {
                double x = (double)q[r * s->pad + ch], w = fabs(x) * d.scale[t][ch];
                double zero = d.zero[t][ch] + d.centre[t][ch] * d.scale[t][ch] - (double)ref[ch];
                want += x * (d.scale[t][ch] * (d.level[t][ch] - d.centre[t][ch]) + zero);
                spread += fabs(d.level[t][ch] - d.centre[t][ch]);
                size += w * (s->levels ? 127.0 : 2.0 * d.centre[t][ch]);
                size += fabs(x) * (fabs(d.zero[t][ch]) * 0.06 + fabs(zero)); /* zero - ref cancels, rounded */
                if (w > most) most = w;
            }
            bound =
                0.5 * most / (c->n_limbs == 2 ? TKVI_TWO_LIMBS_MAX : TKVI_LIMB_MAX_K) * spread + 2e-6 * size;
            if (bound == 0.0) bound = 1e-30;
            worst(&res.error, fabs(got - want) / bound);
            worst(&res.answer, fabs(want) / bound);
            worst(&res.difference, fabs(got - old) / (2e-6 * size + 1e-30));
        }
    res.intact = fence_put(&fs) & fence_put(&fq) & fence_put(&fr) & fence_put(&fo);
    return res;
}

/* out += sum p (scale level + zero) */
static tile_result run_v(tkv_rng *rng, const tile_case *c, const tkvi_kernels *kernels) {
    static decoded d;
    static float scalar[TKVI_ROWS * TKV_MAX_HEAD_DIM], start[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    made_side m;
    fence fs, fp, fo;
    tile_result res;
    const tkvi_side *s = &m.s;
    uint8_t *src;
    float *p, *out;
    int r, t, ch, g, n_limbs = c->n_limbs;
    memset(&res, 0, sizeof res);
    res.finite = 1;
    if (c->shared) make_shared(rng, &m, TKV_V, c->dim, c->width, 0.0);
    else make_side(rng, &m, TKV_V, c->dim, c->group, c->width, 0, c->levels);
    src = (uint8_t *)fence_get(&fs, s->bytes, c->front);
    p = (float *)fence_get(&fp, (size_t)(c->rows * TKVI_BLOCK) * sizeof(float), 0);
    out = (float *)fence_get(&fo, (size_t)(c->rows * s->pad) * sizeof(float), 0);
    fill_side(rng, s, src, c->n, 0.5, c->zero > 100.0 ? 30.0 : 1.0);
    decode_side(s, src, &d);
    if (n_limbs < tkvi_n_limbs(s, 0)) n_limbs = tkvi_n_limbs(s, 0); /* fewer are not asked for */
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
                              c->ahead == 0   ? NULL
                              : c->ahead == 1 ? src
                                              : src + 4096,
                              p, c->rows, c->n, n_limbs, out);
    for (r = 0; r < c->rows; r++)
        for (ch = 0; ch < s->pad; ch++) {
            double want = 0.0, spread = 0.0, size = fabs((double)start[r * s->pad + ch]), most = 0.0, bound;
            double got = (double)out[r * s->pad + ch], old = (double)scalar[r * s->pad + ch];
            for (t = 0; t < c->n; t++) {
                double x = (double)p[r * TKVI_BLOCK + t];
                want += x * (d.scale[t][ch] * d.level[t][ch] + d.zero[t][ch]);
                spread += fabs(d.level[t][ch] - d.centre[t][ch]);
                size +=
                    x * (d.scale[t][ch] * (s->levels ? 127.0 : 2.0 * d.centre[t][ch]) + fabs(d.zero[t][ch]));
                if (x * d.scale[t][ch] > most) most = x * d.scale[t][ch];
            }
            bound = 0.5 * most / (n_limbs == 2 ? TKVI_TWO_LIMBS_MAX : tkvi_top_v(s)) * spread + 2e-6 * size;
            if (!tkv_test_is_finite(got)) res.finite = 0;
            worst(&res.error, fabs(got - (double)start[r * s->pad + ch] - want) / bound);
            worst(&res.answer, fabs(want) / bound);
            worst(&res.difference, fabs(got - old) / (2e-6 * size));
        }
    g = fence_put(&fs) & fence_put(&fp);
    res.intact = g & fence_put(&fo);
    return res;
}

/* How many cases have answers so far above the bound that zeros, or half of them, would fail. */
typedef struct error_sums {
    int cases, large;
} error_sums;

static void check_side(const tile_case *c, int first, int last, uint64_t seed, tkv_isa isa,
                       error_sums *answers) {
    int side;
    for (side = first; side <= last; side++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(isa);
        tkv_rng rng = tkv_rng_seed(seed);
        tile_result res = side ? run_v(&rng, c, kernels) : run_k(&rng, c, kernels);
        int good;
#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0 /* x87 */
        res.difference = 0.0;                      /* both round their weights as they like */
#endif
        good = res.error <= 1.0 && res.difference <= 1.0 && res.finite && res.intact;
        if (!good) say_case(c, side ? "V" : "K", kernels->name);
        CHECK_LE(res.error, 1.0);
        CHECK_LE(res.difference, 1.0);
        CHECK(res.finite);
        CHECK(res.intact);
        answers->cases++;
        answers->large += res.answer > 4.0;
    }
}

static void check_case(const tile_case *c, uint64_t seed, tkv_isa isa, error_sums *answers) {
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
        CHECK((int)tkvi_kernels_for(TKV_ISA_AUTO)->isa >= i); /* the best */
    }
    CHECK_STR(tkv_get_name(TKV_NAME_ISA, TKV_ISA_AUTO), "auto");
    CHECK(tkv_get_name(TKV_NAME_ISA, TKV_ISA_COUNT) == NULL);
}

TEST(halves) {
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
            int nan = (h & 0x7fff) > 0x7c00; /* a signalling one may come out quiet */
            if (nan ? !tkv_test_is_nan((double)dst[h])
                    : tkvi_bits(dst[h]) != tkvi_bits(tkvi_f16_to_f32((uint16_t)h)))
                wrong++;
        }
        CHECK_EQ(wrong, 0);
        for (n = 0; n < 70; n++) { /* any length, nothing beyond */
            fence fs, fd;
            uint8_t *s = (uint8_t *)fence_get(&fs, (size_t)(2 * n), 0);
            float *d = (float *)fence_get(&fd, (size_t)n * sizeof(float), 0);
            memcpy(s, src + 2 * 1000, (size_t)(2 * n));
            kernels->simd_ops->f16_to_f32(s, n, d);
            CHECK_MEM(d, dst + 1000, (size_t)n * sizeof(float));
            CHECK(fence_put(&fs) & fence_put(&fd));
        }
    }
}

/* Finite floats to halves: every half, what lies halfway to the next one and just beside that, the largest. */
TEST(to_halves) {
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
        const tkvi_simd_ops *help = tkvi_kernels_for(list[i])->simd_ops;
        int wrong = 0;
        help->f32_to_f16(x, 4 * 0x7c01, got);
        for (h = 0; h < 4 * 0x7c01; h++) wrong += tkvi_load16(got + 2 * h) != tkvi_f32_to_f16(x[h]);
        CHECK_EQ(wrong, 0);
        for (n = 0; n < 70; n++) { /* any length, nothing beyond */
            fence fs, fd;
            float *s = (float *)fence_get(&fs, (size_t)n * sizeof(float), 0);
            uint8_t *d = (uint8_t *)fence_get(&fd, (size_t)(2 * n), 0);
            memcpy(s, x + 4 * 0x3c00, (size_t)n * sizeof(float));
            help->f32_to_f16(s, n, d);
            CHECK_MEM(d, got + 8 * 0x3c00, (size_t)(2 * n));
            CHECK(fence_put(&fs) & fence_put(&fd));
        }
    }
}

/* The windows of all scales, any length, nothing beyond. */
TEST(logarithmic_scales) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, top, n;
    uint8_t src[256];
    float want[256], got[256];
    for (k = 0; k < 256; k++) src[k] = (uint8_t)k;
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *help = tkvi_kernels_for(list[i])->simd_ops;
        for (top = -TKVI_LOG_TOP; top <= TKVI_LOG_TOP; top++) {
            for (k = 0; k < 256; k++) /* as drawn in core/log_scale.h */
                want[k] = k == 0 ? 0.0f
                                 : (float)ldexp((double)tkvi_log_mantissa[(k - 1) % 16] / 1024.0,
                                                top - 16 + (k - 1) / 16);
            help->decode_log_scales(src, 256, top, got);
            CHECK_MEM(got, want, sizeof want);
        }
        for (n = 0; n < 70; n++) {
            fence fs, fd;
            uint8_t *s = (uint8_t *)fence_get(&fs, (size_t)n, 0);
            float *d = (float *)fence_get(&fd, (size_t)n * sizeof(float), 0);
            memcpy(s, src + 30, (size_t)n);
            help->decode_log_scales(s, n, 8, d);
            tkvi_decode_log_scales_scalar(src + 30, n, 8, want);
            CHECK_MEM(d, want, (size_t)n * sizeof(float));
            CHECK(fence_put(&fs) & fence_put(&fd));
        }
    }
}

/* scale unit (offset - middle) + mean with one rounding, fused or not. */
TEST(zeros_of_allocated_keys) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, n;
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *help = tkvi_kernels_for(list[i])->simd_ops;
        tkv_rng rng = tkv_rng_seed(13);
        for (k = 0; k < rounds(1400); k++) {
            static const int units[3] = {8, 4, 1};
            int unit = units[k % 3], middle = ((1 << (1 + tkv_rng_below(&rng, 6))) - 1) * unit / 2, j;
            int top = tkv_rng_below(&rng, 2 * TKVI_LOG_TOP + 1) - TKVI_LOG_TOP;
            fence fo, fs, fm, fd;
            uint8_t *offset;
            float *scale, *mean, *dst;
            n = k % 70;
            offset = (uint8_t *)fence_get(&fo, (size_t)n, k % 2);
            scale = (float *)fence_get(&fs, (size_t)n * sizeof(float), k / 2 % 2);
            mean = (float *)fence_get(&fm, (size_t)n * sizeof(float), k / 4 % 2);
            dst = (float *)fence_get(&fd, (size_t)n * sizeof(float), 0);
            for (j = 0; j < n; j++) {
                offset[j] = (uint8_t)tkv_rng_below(&rng, 256);
                scale[j] = tkvi_log_value(tkv_rng_below(&rng, 256), top);
                mean[j] = tkvi_f16_to_f32(tkvi_f32_to_f16((float)(600.0 * tkv_rng_gauss(&rng))));
            }
            help->decode_zero_points(offset, scale, mean, 1.0f / (float)unit, middle, n, dst);
            for (j = 0; j < n;
                 j++) { /* exact in double: 20 bits, 11 bits, while they are not too far apart */
                double product = (double)scale[j] * (tkvi_signed_byte(offset[j]) - middle) / unit;
                float want = (float)product + mean[j];
                CHECK_EQ(tkvi_bits(dst[j]), tkvi_bits(want));
            }
            CHECK(fence_put(&fo) & fence_put(&fs));
            CHECK(fence_put(&fm) & fence_put(&fd));
        }
    }
}

TEST(exponentials) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, t, k;
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        tkv_rng rng = tkv_rng_seed(11);
        double most = 0.0, sums = 0.0;
        for (k = 0; k < rounds(4000); k++) {
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
                } else worst(&most, fabs((double)p[t] - want) / want);
                true_sum += (double)p[t];
            }
            worst(&sums, fabs((double)sum - true_sum) / true_sum);
        }
        CHECK_LE(most, 3e-7);
        CHECK_LE(sums, 4e-6);
    }
}

TEST(exact) {
    tkv_isa list[TKV_ISA_COUNT];
    static const tkv_format formats[3] = {TKV_F32, TKV_F16, TKV_BF16};
    static float x[TKVI_BLOCK * TKV_MAX_HEAD_DIM], y[TKVI_BLOCK * TKV_MAX_HEAD_DIM];
    int count = tkv_test_isas(list), i, k;
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        tkv_rng rng = tkv_rng_seed(12);
        for (k = 0; k < rounds(300); k++) {
            int dim = 1 + tkv_rng_below(&rng, TKV_MAX_HEAD_DIM), rows = 1 + tkv_rng_below(&rng, TKVI_ROWS);
            int n = k % 2 ? TKVI_BLOCK : 1 + tkv_rng_below(&rng, TKVI_BLOCK), r, t, c, side;
            tkv_format f = formats[k % 3];
            double bias = k % 4 == 0 ? 600.0 : 0.0;
            for (side = 0; side < 2; side++) {
                tkvi_side s;
                fence fs, fq, fr, fo;
                uint8_t *src;
                float *q, *ref, *out;
                double error = 0.0;
                int intact, wide;
                tkvi_side_init(&s, &tkvi_formats[f], side ? TKV_V : TKV_K, dim, 64, n,
                               NULL); /* room for n tokens only */
                wide = side ? TKVI_BLOCK : s.pad;
                src = (uint8_t *)fence_get(&fs, s.bytes, k % 3 == 0);
                q = (float *)fence_get(&fq, (size_t)(rows * wide) * sizeof(float), 0);
                ref = (float *)fence_get(&fr, (size_t)s.pad * sizeof(float), 0);
                out =
                    (float *)fence_get(&fo, (size_t)(rows * (side ? s.pad : TKVI_BLOCK)) * sizeof(float), 0);
                for (c = 0; c < n * dim; c++)
                    x[c] = (float)(tkv_rng_gauss(&rng) + bias * (double)(c % dim % 3));
                tkvi_encode_side(&s, &tkvi_simd_ops_scalar, x, (size_t)dim, n, src);
                tkvi_decode_side(&s, src, 0, n, y, (size_t)dim);
                for (r = 0; r < rows; r++)
                    for (c = 0; c < wide; c++)
                        q[r * wide + c] = c < (side ? n : dim) ? (float)tkv_rng_gauss(&rng) : 0.0f;
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
                                double v = (double)q[r * wide + t] * (double)y[t * dim + c];
                                want += v;
                                size += fabs(v);
                            }
                        } else {
                            CHECK(tkv_test_is_finite(got));
                            if (c >= n) continue;
                            for (t = 0; t < dim; t++) {
                                double v =
                                    (double)q[r * wide + t] * ((double)y[c * dim + t] - (double)ref[t]);
                                want += v;
                                size += fabs(v);
                            }
                        }
                        worst(&error, fabs(got - want) / (size + 1e-30));
                    }
                CHECK_LE(error, 2e-6);
                intact = fence_put(&fs) & fence_put(&fq);
                CHECK(intact & fence_put(&fr) & fence_put(&fo));
            }
        }
    }
}

/* Any side of tiles as floats, any of its tokens, with the scalar code's bits; nothing beyond. */
typedef struct decode_case {
    int dim, kind, width, first, n, stride;
} decode_case;

/* Kinds: sides made by hand, their values rotated or not; A or R; any exact format. */
static void decode_side_of(tkv_rng *rng, const decode_case *c, tkv_side which, made_side *m,
                           tkvi_format *rotated) {
    if (c->kind == 2) {
        static const int half_bits[5] = {2, 3, 4, 6, 8};
        make_shared(rng, m, which, c->dim, which == TKV_V ? half_bits[tkv_rng_below(rng, 5)] : 0, 3.0);
    } else if (c->kind == 3) {
        static const tkv_format exact[3] = {TKV_F32, TKV_F16, TKV_BF16};
        memset(m, 0, sizeof *m);
        tkvi_side_init(&m->s, &tkvi_formats[exact[c->width % 3]], which, c->dim, 64, c->first + c->n, NULL);
    } else {
        const int levels = (c->width == 0 || c->width <= 4) && tkv_rng_below(rng, 3) == 0;
        make_side(rng, m, which, c->dim, tkv_rng_below(rng, 2) ? 64 : 32, c->width, tkv_rng_below(rng, 2),
                  levels);
        *rotated = *m->s.format;
        rotated->side[TKV_K].decode = rotated->side[TKV_V].decode = tkvi_decode_tiles;
        rotated->rotated = c->kind;
        m->s.format = rotated;
    }
}

static int decodes_alike(const tkvi_simd_ops *help, const decode_case *c, tkv_side which, uint64_t seed) {
    static float want[TKVI_BLOCK * (TKV_MAX_HEAD_DIM + 9)];
    tkv_rng rng = tkv_rng_seed(seed);
    tkvi_format rotated;
    made_side m;
    fence fs, fx;
    uint8_t *src;
    float *x;
    size_t size = (size_t)((c->n - 1) * c->stride + c->dim), i;
    int same;
    decode_side_of(&rng, c, which, &m, &rotated);
    src = (uint8_t *)fence_get(&fs, m.s.bytes, (int)(seed % 2));
    x = (float *)fence_get(&fx, size * sizeof(float), (int)(seed / 2 % 2));
    for (i = 0; i < size; i++) want[i] = x[i] = -77.0f;
    if (c->kind < 3) fill_side(&rng, &m.s, src, TKVI_BLOCK, seed % 3 ? 1.0 : 30.0, seed % 5 ? 3.0 : 600.0);
    for (i = 0; c->kind == 3 && i < m.s.bytes; i++)
        src[i] = (uint8_t)tkv_rng_below(&rng, 120); /* all finite */
    tkvi_values(&m.s, help, src, c->first, c->n, x, (size_t)c->stride);
    tkvi_decode_side(&m.s, src, c->first, c->n, want, (size_t)c->stride);
    same = memcmp(x, want, size * sizeof(float)) == 0;
    return same & fence_put(&fs) & fence_put(&fx);
}

TEST(values_of_tokens) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        tkv_rng rng = tkv_rng_seed(23);
        for (k = 0; k < rounds(4000); k++) {
            static const int dims[8] = {64, 128, 80, 96, 112, 192, 256, 16};
            const tkv_side which = k % 2 ? TKV_V : TKV_K;
            decode_case c;
            c.dim = k % 3 ? dims[tkv_rng_below(&rng, 8)] : 1 + tkv_rng_below(&rng, TKV_MAX_HEAD_DIM);
            c.kind = tkv_rng_below(&rng, 4);
            c.width = tkv_rng_below(&rng, 3) ? widths[tkv_rng_below(&rng, 7)] : 0;
            c.first = tkv_rng_below(&rng, 3) ? 0 : tkv_rng_below(&rng, TKVI_BLOCK);
            c.n =
                tkv_rng_below(&rng, 3) ? TKVI_BLOCK - c.first : 1 + tkv_rng_below(&rng, TKVI_BLOCK - c.first);
            c.stride = c.dim + (tkv_rng_below(&rng, 2) ? tkv_rng_below(&rng, 9) : 0);
            CHECK_MSG(decodes_alike(kernels->simd_ops, &c, which, (uint64_t)k),
                      "%s %s: dim %d kind %d width %d first %d n %d stride %d", kernels->name,
                      which == TKV_K ? "K" : "V", c.dim, c.kind, c.width, c.first, c.n, c.stride);
        }
    }
}

TEST(tiles_every_width) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, w, k;
    error_sums answers = {0, 0};
    for (i = 0; i < count; i++)
        for (w = 0; w < 7; w++)
            for (k = 0; k < (tkv_test_quick() ? 4 : 32); k++) {
                tkv_rng rng = tkv_rng_seed((uint64_t)(100 * w + k));
                tile_case c = random_case(&rng);
                c.width = widths[w];
                c.levels = widths[w] <= 4 && k % 4 == 3;
                c.n_limbs = 1 + k % 2;
                c.group = k / 2 % 2 ? 32 : 64;
                c.rows = 1 + k % TKVI_ROWS;
                check_case(&c, (uint64_t)(1000 * w + k), list[i], &answers);
            }
    CHECK_LE(0.9 * answers.cases, answers.large);
}

TEST(tiles_mixed) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    error_sums answers = {0, 0};
    for (i = 0; i < count; i++)
        for (k = 0; k < rounds(240); k++) {
            tkv_rng rng = tkv_rng_seed((uint64_t)(5000 + k));
            tile_case c = random_case(&rng);
            c.width = 0;
            c.levels = k % 3 == 0;
            c.order = k % 2;
            check_case(&c, (uint64_t)(7000 + k), list[i], &answers);
        }
    CHECK_LE(0.9 * answers.cases, answers.large);
}

/* Records of A: runs of 6, 5, ..., 1 bits, then channels without, in an order of their own, far from 0. */
TEST(allocated_keys) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    error_sums answers = {0, 0};
    for (i = 0; i < count; i++)
        for (k = 0; k < rounds(320); k++) {
            tkv_rng rng = tkv_rng_seed((uint64_t)(9000 + k));
            tile_case c = random_case(&rng);
            c.shared = 1;
            c.width = k % 4 == 0 ? 1 + k / 4 % 6 : 0;
            check_side(&c, 0, 0, (uint64_t)(11000 + k), list[i], &answers);
        }
    CHECK_LE(0.9 * answers.cases, answers.large);
}

/* Records of R: 1, 2, 3, 4 bits, and pairs with and without a slab that found no partner. */
TEST(rotated_values) {
    static const int half_bits[5] = {2, 3, 4, 6, 8};
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
    error_sums answers = {0, 0};
    for (i = 0; i < count; i++)
        for (k = 0; k < rounds(320); k++) {
            tkv_rng rng = tkv_rng_seed((uint64_t)(13000 + k));
            tile_case c = random_case(&rng);
            c.shared = 1;
            c.width = k % 3 == 0 ? 3 : half_bits[k % 5];
            check_side(&c, 1, 1, (uint64_t)(15000 + k), list[i], &answers);
        }
    CHECK_LE(0.9 * answers.cases, answers.large);
}

/* Nearest codes at every border and beside it, and of what has none. */
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
        const tkvi_simd_ops *help = tkvi_kernels_for(list[i])->simd_ops;
        for (k = 0; k < 70; k++) {
            fence fs, fd;
            float *s = (float *)fence_get(&fs, (size_t)k * sizeof(float), 0);
            uint8_t *d = (uint8_t *)fence_get(&fd, (size_t)k, 0);
            memcpy(s, x + 50 * k, (size_t)k * sizeof(float));
            tkvi_encode_log_scales_scalar(s, k, 8, want);
            help->encode_log_scales(s, k, 8, d);
            CHECK_MEM(d, want, (size_t)k);
            CHECK(fence_put(&fs) & fence_put(&fd));
        }
        for (top = -TKVI_LOG_TOP; top <= TKVI_LOG_TOP; top += 8) {
            static uint8_t got[4096];
            tkvi_encode_log_scales_scalar(x, n, top, want);
            help->encode_log_scales(x, n, top, got);
            CHECK_MEM(got, want, (size_t)n);
        }
    }
}

/* Tiles from columns; tiles to bytes, all widths one behind the other: halves meet those of other widths. */
TEST(packing) {
    static const int widths_up[7] = {8, 6, 5, 4, 3, 2, 1};
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, w, j;
    for (i = 0; i < count; i++) {
        const tkvi_simd_ops *help = tkvi_kernels_for(list[i])->simd_ops;
        for (k = 0; k < rounds(200); k++) {
            static uint8_t column[TKV_MAX_HEAD_DIM][TKVI_BLOCK], want[8192];
            uint8_t channel[4], tile[TKVI_TILE_CODES], woven[TKVI_TILE_CODES], *got;
            tkv_rng rng = tkv_rng_seed((uint64_t)(19000 + k));
            tkvi_tile_counts runs;
            tkvi_tile_at at;
            size_t bytes;
            fence fd;
            memset(&runs, 0, sizeof runs);
            for (w = 0; w < 7; w++) runs.n[widths_up[w]] = (uint16_t)tkv_rng_below(&rng, 4);
            bytes = tkvi_tiles_bytes(&runs);
            got = (uint8_t *)fence_get(&fd, bytes, k % 2);
            memset(want, 0, sizeof want);
            if (bytes) memset(got, 0, bytes);
            for (j = 0; j < TKV_MAX_HEAD_DIM * TKVI_BLOCK; j++)
                column[j / TKVI_BLOCK][j % TKVI_BLOCK] = (uint8_t)tkv_rng_below(&rng, 256);
            at = tkvi_first_tile(&runs);
            for (w = 0; w < 7; w++)
                for (j = 0; j < 4 * runs.n[widths_up[w]]; j++) {
                    channel[j % 4] = (uint8_t)tkv_rng_below(&rng, TKV_MAX_HEAD_DIM);
                    if (j % 4 < 3) continue;
                    tkvi_interleave_scalar(column, channel, tile);
                    help->interleave(column, channel, woven);
                    CHECK_MEM(woven, tile, sizeof tile);
                    tkvi_pack_tile(want, &at, widths_up[w], tile);
                    help->pack_tile(got, &at, widths_up[w], tile);
                    tkvi_next_tile(&at, widths_up[w]);
                }
            CHECK_MEM(got, want, bytes);
            CHECK(fence_put(&fd));
        }
    }
}

/* Values of a block, in several ways that are hard on an encoder. */
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
    case 10: return (float)tkv_rng_below(rng, 9); /* codes and scores that tie */
    default: return (float)x;
    }
}

/* Encodes n tokens with the scalar steps and with those of an instruction set: the same bytes, no token that
 * is not there read, nothing beyond written. */
static void check_encoding(tkv_rng *rng, const tkvi_side *s, const tkvi_simd_ops *help, int kind, int n,
                           int stride, int front) {
    static uint8_t want[1 << 18];
    fence fx, fd;
    float *x = (float *)fence_get(&fx, (size_t)((n - 1) * stride + s->dim) * sizeof(float), front & 1);
    uint8_t *dst = (uint8_t *)fence_get(&fd, s->bytes, front >> 1 & 1);
    int t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++) x[t * stride + c] = hard_value(rng, kind, t, c);
    memset(want, 0x5a, sizeof want);
    tkvi_encode_side(s, &tkvi_simd_ops_scalar, x, (size_t)stride, n, want);
    memset(dst, 0xa5, s->bytes);
    tkvi_encode_side(s, help, x, (size_t)stride, n, dst);
    CHECK_MSG(memcmp(dst, want, s->bytes) == 0, "%s %s, head_dim %d, %d tokens, values %d", s->format->name,
              s->which == TKV_K ? "K" : "V", s->dim, n, kind);
    CHECK(fence_put(&fx) & fence_put(&fd));
}

/* A and R with learned tables: all widths, shuffled channels, means near and far. */
TEST(encoding) {
    static const int half_bits[5] = {2, 3, 4, 6, 8};
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k;
#ifdef __FAST_MATH__
    SKIP("-ffast-math: the bytes may differ");
#endif
    for (i = 0; i < count; i++)
        for (k = 0; k < rounds(1600); k++) {
            tkv_rng rng = tkv_rng_seed((uint64_t)(17000 + k));
            tile_case c = random_case(&rng);
            int v = k % 2, kind = k / 2 % KINDS, n = k % 13 == 0 ? 1 : c.n;
            made_side m;
            make_shared(&rng, &m, v ? TKV_V : TKV_K, c.dim, v ? half_bits[k / 2 % 5] : k / 2 % 8 % 7, c.zero);
            check_encoding(&rng, &m.s, tkvi_kernels_for(list[i])->simd_ops, kind, n,
                           c.dim + (k % 5 == 0 ? 7 : 0), k / 4);
        }
}

/* Every format without a table; for A and R every third head_dim, and each of them in one format of three. */
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
                int all = format->shared ? TKV_MAX_HEAD_DIM / 3 : kivi ? 120 : 24;
                if (!tkvi_format_stores(format, (tkv_side)which)) continue;
                for (k = 1; k <= rounds(all); k++) {
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

/* The numbers that vectors look up are those of the definition. */
TEST(ranges_of_allocated_keys) {
    int k, width;
    for (k = 0; k < TKVI_A_CUTS; k++)
        for (width = 0; width <= 6; width++)
            CHECK_EQ(tkvi_a_ranges[k].by[width], tkvi_cut_by(tkvi_a_ranges[k].cut[width], (1 << width) - 1));
}

/* All weights and all codes at their largest: nothing may saturate or overflow. */
TEST(tiles_largest) {
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
                made_side m;
                int width = widths[w], n_limbs = k & 2 ? 2 : 1, r, c, n, terms, levels = (k & 1) != 0;
                float sign = (k & 12) == 8 ? -1.0f : 1.0f;
                double code, want;
                uint8_t code_bytes[TKVI_TILE_CODES];
                tkvi_tile_at at;
                if (levels && (width > 4 || !(k & 4))) continue;
                make_side(&rng, &m, k & 4 ? TKV_V : TKV_K, 256, 64, width, 0, levels);
                for (c = 0; c < 16; c++) m.levels[c] = (int8_t)(k & 16 ? -127 : 127);
                m.s.format = &test_formats[0];
                memset(src, 0, sizeof src);
                at = tkvi_first_tile(&m.s.tiles);
                for (c = 0; c < TKVI_TILE_CODES; c++) code_bytes[c] = (uint8_t)((1 << width) - 1);
                for (c = 0; c < m.s.pad / 4; c++) {
                    tkvi_pack_tile(src, &at, width, code_bytes);
                    tkvi_next_tile(&at, width);
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

/* Zero weights, zero scales, weights too small to be turned over. */
TEST(tiles_nothing) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = tkv_test_isas(list), i, k, c;
    static uint8_t src[1 << 16];
    static float q[TKVI_ROWS * TKV_MAX_HEAD_DIM], ref[TKV_MAX_HEAD_DIM], out[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    for (i = 0; i < count; i++)
        for (k = 0; k < 12; k++) { /* K, V  x  zero q, tiny q, zero scales  x  n_limbs */
            const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
            tkv_rng rng = tkv_rng_seed((uint64_t)k);
            made_side m;
            int v = k % 2, kind = k / 2 % 3, n_limbs = 1 + k / 6;
            double want;
            make_side(&rng, &m, v ? TKV_V : TKV_K, 128, 64, 4, 0, 0);
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

/* >>the goal: arithmetic at most a tenth of the format's own error. One head, eight blocks, eight rows. */
enum { GOAL_BLOCKS = 8, GOAL_TOKENS = GOAL_BLOCKS * TKVI_BLOCK, GOAL_DIM = 128 };

typedef struct goal_data {
    float k[GOAL_TOKENS * GOAL_DIM], v[GOAL_TOKENS * GOAL_DIM];
    float dk[GOAL_TOKENS * GOAL_DIM], dv[GOAL_TOKENS * GOAL_DIM];
    float q[TKVI_ROWS * GOAL_DIM];
    uint8_t ks[GOAL_BLOCKS][TKVI_BLOCK * GOAL_DIM * 4], vs[GOAL_BLOCKS][TKVI_BLOCK * GOAL_DIM * 4];
} goal_data;

static void goal_attend(const float *q, const float *k, const float *v, double *out) { /* in double */
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

static double distance(const double *a, const double *b, int n) { /* relative L2 */
    double d = 0.0, s = 0.0;
    int i;
    for (i = 0; i < n; i++) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        s += b[i] * b[i];
    }
    return sqrt(d / s);
}

/* Pairs that attention meets. A and R only go with each other: each stores one side. */
static const tkv_format_pair goal_pairs[] = {
    {TKV_F32, TKV_F32},     {TKV_F16, TKV_F16},     {TKV_BF16, TKV_BF16},   {TKV_Q8, TKV_Q8},
    {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI3, TKV_KIVI3}, {TKV_KIVI2, TKV_KIVI2}, {TKV_A40, TKV_R40},
    {TKV_A35, TKV_R40},     {TKV_A30, TKV_R30},     {TKV_A275, TKV_R30},    {TKV_A25, TKV_R20},
    {TKV_A225, TKV_R20},    {TKV_A20, TKV_R20},     {TKV_A175, TKV_R15},    {TKV_A15, TKV_R10},
};

TEST(goals) {
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
            double own, bound;
            memset(&share, 0, sizeof share);
            if (kf->shared) tkvi_share_equally(kf->bits, GOAL_DIM, GOAL_DIM, &share.tiles);
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
                goal_attend(g.q + r * GOAL_DIM, g.k, g.v, exact[r]);
                goal_attend(g.q + r * GOAL_DIM, g.dk, g.dv, want[r]);
            }
            own = distance(want[0], exact[0], TKVI_ROWS * GOAL_DIM);
            bound = goal_pairs[f].k == TKV_F32 ? 1e-5 : tkvi_is_exact(kf) ? 2e-3 : 0.1 * own;
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
                error = distance(got[0], want[0], TKVI_ROWS * GOAL_DIM);
                CHECK_MSG(error <= bound, "%s %s %s %s: arithmetic %.2e, bound %.2e, format %.2e",
                          kernels->name, kinds[kind], kf->name, vf->name, error, bound, own);
                if (getenv("TKV_TEST_VERBOSE"))
                    printf("\n    %-7s %-13s %-5s %-5s arithmetic %.2e format %.2e", kernels->name,
                           kinds[kind], kf->name, vf->name, error, own);
            }
        }
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(dispatch);
    RUN(halves);
    RUN(to_halves);
    RUN(logarithmic_scales);
    RUN(zeros_of_allocated_keys);
    RUN(exponentials);
    RUN(exact);
    RUN(values_of_tokens);
    RUN(tiles_every_width);
    RUN(tiles_mixed);
    RUN(allocated_keys);
    RUN(rotated_values);
    RUN(codes_of_logarithmic_scales);
    RUN(packing);
    RUN(encoding);
    RUN(encoding_of_every_format);
    RUN(ranges_of_allocated_keys);
    RUN(tiles_largest);
    RUN(tiles_nothing);
    RUN(goals);
    return tkv_test_end();
}
