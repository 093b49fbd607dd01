/*
 * test_kernels.c - the kernels of every instruction set this machine has, against the scalar ones and against
 * double precision, on sides filled at random. Memory stands against pages that cannot be touched.
 *
 * cc -O2 tests/test_kernels.c -o test_kernels -lm && ./test_kernels
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "tkv_test.h"

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

/* >>sides made by hand: any widths, an order, levels. Metadata is fp16 scales then fp16 zeros, as KIVI's. */
static void meta_halves(const tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale,
                        float *zero) {
    int n = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK);
    halves(src + s->code_bytes, n, scale);
    halves(src + s->code_bytes + 2 * n, n, zero);
}

/* The same scales, and zeros in eighths of them (8 signed bits): another format with other numbers. */
static void meta_bytes(const tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale,
                       float *zero) {
    int n = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK), i;
    halves(src + s->code_bytes, n, scale);
    for (i = 0; i < n; i++) {
        int byte = src[s->code_bytes + (size_t)(2 * n + i)];
        zero[i] = (float)(byte < 128 ? byte : byte - 256) * 0.125f * scale[i];
    }
}

static const tkvi_format test_formats[2] = {
    {"test halves",
     4,
     TKVI_AS_TILES,
     {{NULL, NULL, NULL, meta_halves, NULL}, {NULL, NULL, NULL, meta_halves, NULL}}},
    {"test bytes",
     4,
     TKVI_AS_TILES,
     {{NULL, NULL, NULL, meta_bytes, NULL}, {NULL, NULL, NULL, meta_bytes, NULL}}},
};

static const int widths[7] = {8, 6, 5, 4, 3, 2, 1};

typedef struct made_side {
    tkvi_side s;
    uint16_t order[TKV_MAX_HEAD_DIM];
    int8_t levels[16];
} made_side;

/* width 0: a mix. Everything but the bytes. */
static void make_side(tkv_rng *rng, made_side *m, tkv_side which, int dim, int group, int width,
                      int with_order, int with_levels) {
    tkvi_side *s = &m->s;
    int unit = which == TKV_K ? 1 : 4, left, i;
    memset(m, 0, sizeof *m);
    s->format = &test_formats[tkv_rng_below(rng, 2)];
    s->which = which;
    s->dim = dim;
    s->pad = (dim + 15) / 16 * 16;
    s->tokens = TKVI_BLOCK;
    s->group = group;
    s->groups = which == TKV_K ? TKVI_BLOCK / group : (s->pad + group - 1) / group;
    for (left = s->pad / 4; left > 0;) {
        int w = width ? width : widths[tkv_rng_below(rng, 7)], n = left;
        while (with_levels && w > 4) w = widths[tkv_rng_below(rng, 7)];
        if (!width) n = unit * (1 + tkv_rng_below(rng, left / unit));
        s->runs.n[w] = (uint16_t)(s->runs.n[w] + n);
        left -= n;
    }
    if (with_order) {
        for (i = 0; i < s->pad; i++) m->order[i] = (uint16_t)i;
        for (i = s->pad - 1; i > 0; i--) {
            int j = tkv_rng_below(rng, i + 1);
            uint16_t t = m->order[i];
            m->order[i] = m->order[j];
            m->order[j] = t;
        }
        s->order = m->order;
    }
    if (with_levels) {
        for (i = 0; i < 16; i++) m->levels[i] = (int8_t)(tkv_rng_below(rng, 255) - 127);
        m->levels[tkv_rng_below(rng, 16)] = 127;
        m->levels[tkv_rng_below(rng, 16)] = -127;
        s->levels = m->levels;
    }
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = (size_t)(s->groups * (which == TKV_K ? s->pad : TKVI_BLOCK) * 4);
    s->bytes = tkvi_align_up(s->code_bytes) + tkvi_align_up(s->meta_bytes);
}

/* Random codes, scales around `scale`, zeros around `zero`; tokens from n on have code 0, as encoders leave
 * them. */
static void fill_side(tkv_rng *rng, const tkvi_side *s, uint8_t *src, int n, double scale, double zero) {
    int count = s->groups * (s->which == TKV_K ? s->pad : TKVI_BLOCK), i, width, t, number = 0;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    memset(src, 0, s->bytes);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, number++) {
            uint8_t code[TKVI_TILE_CODES];
            for (t = 0; t < TKVI_TILE_CODES; t++) {
                int token = s->which == TKV_K ? t / 4 : 16 * (number % 4) + t / 64 * 4 + t % 4;
                code[t] = (uint8_t)(token < n ? tkv_rng_below(rng, 1 << width) : 0);
            }
            tkvi_pack_tile(src, &at, width, code);
            tkvi_next_tile(&at, width);
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
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, j, number = 0;
    s->format->side[s->which].meta(s, src, tkvi_halves_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, number++) {
            uint8_t code[TKVI_TILE_CODES];
            tkvi_unpack_tile(src, &at, width, code);
            tkvi_next_tile(&at, width);
            for (j = 0; j < TKVI_TILE_CODES; j++) {
                int k = s->which == TKV_K, r = j % 4;
                int token = k ? j / 4 : 16 * (number % 4) + j / 64 * 4 + r;
                int position = k ? 4 * number + r : 16 * (number / 4) + j % 64 / 4;
                int channel = k ? tkvi_channel(s, position) : position;
                int m = k ? token / s->group * s->pad + position : position / s->group * TKVI_BLOCK + token;
                d->scale[token][channel] = (double)scale[m];
                d->zero[token][channel] = (double)zero[m];
                d->level[token][channel] = (double)(s->levels ? s->levels[code[j] & 15] : code[j]);
                d->centre[token][channel] = (double)tkvi_centre(s, width);
            }
        }
}

/* >>which kernels */
static int isa_list(tkv_isa *list) { /* those to compare with scalar: TKV_ISA names one, or all */
    int n = 0, i;
    for (i = TKV_ISA_SCALAR; i < TKV_ISA_COUNT; i++)
        if (tkv_isa_available((tkv_isa)i) && (tkv_test_isa() == TKV_ISA_AUTO || tkv_test_isa() == (tkv_isa)i))
            list[n++] = (tkv_isa)i;
    return n;
}

static int rounds(int n) { return tkv_test_quick() ? (n + 7) / 8 : n; }

/* >>one case: a side of tiles and rows of q or p */
typedef struct tile_case {
    int dim, group, width, order, levels, rows, n, planes;
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
    c.planes = 1 + tkv_rng_below(rng, 2);
    c.zero = tkv_rng_below(rng, 4) ? 3.0 : 600.0;
    c.peaked = tkv_rng_below(rng, 3) == 0;
    c.front = tkv_rng_below(rng, 2);
    c.ahead = tkv_rng_below(rng, 3);
    return c;
}

static void say_case(const tile_case *c, const char *side, const char *isa) {
    printf(
        "    %s %s: dim %d group %d width %d order %d levels %d rows %d n %d planes %d zero %g peaked %d\n",
        isa, side, c->dim, c->group, c->width, c->order, c->levels, c->rows, c->n, c->planes, c->zero,
        c->peaked);
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
    static float scalar[TKVI_ROWS * TKVI_BLOCK];
    made_side m;
    fence fs, fq, fr, fo;
    tile_result res;
    const tkvi_side *s = &m.s;
    uint8_t *src;
    float *q, *ref, *out;
    int r, t, ch;
    double scale = c->zero > 100.0 ? 0.5 : 1.0;
    memset(&res, 0, sizeof res);
    res.finite = res.intact = 1;
    make_side(rng, &m, TKV_K, c->dim, c->group, c->width, c->order, c->levels);
    src = (uint8_t *)fence_get(&fs, s->bytes, c->front);
    q = (float *)fence_get(&fq, (size_t)(c->rows * s->pad) * sizeof(float), 0);
    ref = (float *)fence_get(&fr, (size_t)s->pad * sizeof(float), 0);
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
        double near = d.scale[0][ch] * d.level[0][ch] + d.zero[0][ch];
        ref[ch] = ch < s->dim ? (float)near : 0.0f;
    }
    tkvi_kernels_scalar.k[TKVI_AS_TILES](s, src, NULL, q, ref, c->rows, c->n, c->planes, scalar);
    kernels->k[TKVI_AS_TILES](s, src,
                              c->ahead == 0   ? NULL
                              : c->ahead == 1 ? src
                                              : src + 4096,
                              q, ref, c->rows, c->n, c->planes, out);
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
            bound = 0.5 * most / (c->planes == 2 ? TKVI_TWO_PLANES : TKVI_PLANE) * spread + 2e-6 * size;
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
    int r, t, ch, g;
    memset(&res, 0, sizeof res);
    res.finite = 1;
    make_side(rng, &m, TKV_V, c->dim, c->group, c->width, 0, c->levels);
    src = (uint8_t *)fence_get(&fs, s->bytes, c->front);
    p = (float *)fence_get(&fp, (size_t)(c->rows * TKVI_BLOCK) * sizeof(float), 0);
    out = (float *)fence_get(&fo, (size_t)(c->rows * s->pad) * sizeof(float), 0);
    fill_side(rng, s, src, c->n, 0.5, c->zero > 100.0 ? 30.0 : 1.0);
    decode_side(s, src, &d);
    for (r = 0; r < c->rows; r++)
        for (t = 0; t < TKVI_BLOCK; t++) {
            double x = c->peaked ? 1e-4 * tkv_rng_uniform(rng) : tkv_rng_uniform(rng);
            p[r * TKVI_BLOCK + t] = t < c->n ? (float)x : 0.0f;
        }
    if (c->peaked) p[tkv_rng_below(rng, c->n)] = 1.0f;
    tkv_rng_fill(rng, start, (size_t)(c->rows * s->pad), 1.0);
    memcpy(scalar, start, sizeof scalar);
    memcpy(out, start, (size_t)(c->rows * s->pad) * sizeof(float));
    tkvi_kernels_scalar.v[TKVI_AS_TILES](s, src, NULL, p, c->rows, c->n, c->planes, scalar);
    kernels->v[TKVI_AS_TILES](s, src,
                              c->ahead == 0   ? NULL
                              : c->ahead == 1 ? src
                                              : src + 4096,
                              p, c->rows, c->n, c->planes, out);
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
            bound = 0.5 * most / (c->planes == 2 ? TKVI_TWO_PLANES : TKVI_PLANE) * spread + 2e-6 * size;
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
typedef struct tally {
    int cases, large;
} tally;

static void check_case(const tile_case *c, uint64_t seed, tkv_isa isa, tally *answers) {
    int side;
    for (side = 0; side < 2; side++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(isa);
        tkv_rng rng = tkv_rng_seed(seed);
        tile_result res = side ? run_v(&rng, c, kernels) : run_k(&rng, c, kernels);
        int good;
#ifdef __FAST_MATH__
        res.difference = 0.0; /* both round their weights as they like */
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

/* >>tests */
TEST(dispatch) {
    int i;
    CHECK(tkvi_kernels_for(TKV_ISA_AUTO) != NULL);
    CHECK(tkvi_kernels_for(TKV_ISA_SCALAR) == &tkvi_kernels_scalar);
    CHECK(tkvi_kernels_for(TKV_ISA_COUNT) == NULL);
    CHECK(!tkv_isa_available(TKV_ISA_COUNT));
    CHECK(!tkv_isa_available(TKV_ISA_AVX512) || tkv_isa_available(TKV_ISA_AVX2));
    for (i = TKV_ISA_SCALAR; i < TKV_ISA_COUNT; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for((tkv_isa)i);
        CHECK_EQ(kernels != NULL, tkv_isa_available((tkv_isa)i));
        if (!kernels) continue;
        CHECK_EQ(kernels->isa, i);
        CHECK_STR(kernels->name, tkv_isa_name((tkv_isa)i));
        CHECK((int)tkvi_kernels_for(TKV_ISA_AUTO)->isa >= i); /* the best */
    }
    CHECK_STR(tkv_isa_name(TKV_ISA_AUTO), "auto");
    CHECK(tkv_isa_name(TKV_ISA_COUNT) == NULL);
}

TEST(halves) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = isa_list(list), i, h, n;
    static uint8_t src[2 * 65536];
    static float dst[65536];
    for (h = 0; h < 65536; h++) tkvi_store16(src + 2 * h, (uint16_t)h);
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        int wrong = 0;
        kernels->halves(src, 65536, dst);
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
            kernels->halves(s, n, d);
            CHECK_MEM(d, dst + 1000, (size_t)n * sizeof(float));
            CHECK(fence_put(&fs) & fence_put(&fd));
        }
    }
}

TEST(exponentials) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = isa_list(list), i, t, k;
    for (i = 0; i < count; i++) {
        const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
        tkv_rng rng = tkv_rng_seed(11);
        double most = 0.0, sums = 0.0;
        for (k = 0; k < rounds(4000); k++) {
            float s[TKVI_BLOCK], p[TKVI_BLOCK], max, sum;
            int range = k % 3 == 0 ? 1 : k % 3 == 1 ? 20 : 87, offset = tkv_rng_below(&rng, 600) - 300;
            double true_sum = 0.0;
            for (t = 0; t < TKVI_BLOCK; t++) /* in steps of 2^-12, so that s - max has no rounding */
                s[t] = (float)offset - (float)tkv_rng_below(&rng, range * 4096) / 4096.0f;
            max = kernels->max64(s);
            for (t = 0; t < TKVI_BLOCK; t++)
                if (s[t] > max) break;
            CHECK(t == TKVI_BLOCK);
            for (t = 0; t < TKVI_BLOCK && s[t] != max; t++) {}
            CHECK(t < TKVI_BLOCK);
            s[k % TKVI_BLOCK] = max - 87.0f - (float)(k % 7); /* may be 0 */
            if (k % 5 == 0) s[(k + 1) % TKVI_BLOCK] = -1e30f;
            if (k % 5 == 1) s[(k + 1) % TKVI_BLOCK] = max - 1e6f;
            sum = kernels->exp64(s, max, p);
            for (t = 0; t < TKVI_BLOCK; t++) {
                double x = (double)s[t] - (double)max, want = exp(x);
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
    int count = isa_list(list), i, k;
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
                tkvi_side_init(&s, &tkvi_formats[f], side ? TKV_V : TKV_K, dim, 64,
                               n); /* room for n tokens only */
                wide = side ? TKVI_BLOCK : s.pad;
                src = (uint8_t *)fence_get(&fs, s.bytes, k % 3 == 0);
                q = (float *)fence_get(&fq, (size_t)(rows * wide) * sizeof(float), 0);
                ref = (float *)fence_get(&fr, (size_t)s.pad * sizeof(float), 0);
                out =
                    (float *)fence_get(&fo, (size_t)(rows * (side ? s.pad : TKVI_BLOCK)) * sizeof(float), 0);
                for (c = 0; c < n * dim; c++)
                    x[c] = (float)(tkv_rng_gauss(&rng) + bias * (double)(c % dim % 3));
                tkvi_encode_side(&s, x, (size_t)dim, n, src);
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

TEST(tiles_every_width) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = isa_list(list), i, w, k;
    tally answers = {0, 0};
    for (i = 0; i < count; i++)
        for (w = 0; w < 7; w++)
            for (k = 0; k < (tkv_test_quick() ? 4 : 32); k++) {
                tkv_rng rng = tkv_rng_seed((uint64_t)(100 * w + k));
                tile_case c = random_case(&rng);
                c.width = widths[w];
                c.levels = widths[w] <= 4 && k % 4 == 3;
                c.planes = 1 + k % 2;
                c.group = k / 2 % 2 ? 32 : 64;
                c.rows = 1 + k % TKVI_ROWS;
                check_case(&c, (uint64_t)(1000 * w + k), list[i], &answers);
            }
    CHECK_LE(0.9 * answers.cases, answers.large);
}

TEST(tiles_mixed) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = isa_list(list), i, k;
    tally answers = {0, 0};
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

/* All weights and all codes at their largest: nothing may saturate or overflow. */
TEST(tiles_largest) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = isa_list(list), i, w, k;
    static uint8_t src[1 << 18];
    static float q[TKVI_ROWS * TKV_MAX_HEAD_DIM], ref[TKV_MAX_HEAD_DIM], out[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    for (i = 0; i < count; i++)
        for (w = 0; w < 7; w++)
            for (k = 0; k < 32;
                 k++) { /* bits of k: levels, planes, V, sign of the weights, sign of the levels */
                const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
                tkv_rng rng = tkv_rng_seed(1);
                made_side m;
                int width = widths[w], planes = k & 2 ? 2 : 1, r, c, n, terms, levels = (k & 1) != 0;
                float sign = k & 8 ? -1.0f : 1.0f;
                double code, want;
                uint8_t code_bytes[TKVI_TILE_CODES];
                tkvi_tile_at at;
                if (levels && width > 4) continue;
                make_side(&rng, &m, k & 4 ? TKV_V : TKV_K, 256, 64, width, 0, levels);
                for (c = 0; c < 16; c++) m.levels[c] = (int8_t)(k & 16 ? -127 : 127);
                m.s.format = &test_formats[0];
                memset(src, 0, sizeof src);
                at = tkvi_tiles(&m.s.runs);
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
                if (k & 4) kernels->v[TKVI_AS_TILES](&m.s, src, NULL, q, TKVI_ROWS, TKVI_BLOCK, planes, out);
                else kernels->k[TKVI_AS_TILES](&m.s, src, NULL, q, ref, TKVI_ROWS, TKVI_BLOCK, planes, out);
                for (r = 0; r < TKVI_ROWS; r++)
                    for (c = 0; c < (k & 4 ? 256 : TKVI_BLOCK); c++)
                        CHECK_NEAR(out[r * (k & 4 ? 256 : TKVI_BLOCK) + c], want, fabs(want) * 1e-6);
            }
}

/* Zero weights, zero scales, weights too small to be turned over. */
TEST(tiles_nothing) {
    tkv_isa list[TKV_ISA_COUNT];
    int count = isa_list(list), i, k, c;
    static uint8_t src[1 << 16];
    static float q[TKVI_ROWS * TKV_MAX_HEAD_DIM], ref[TKV_MAX_HEAD_DIM], out[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    for (i = 0; i < count; i++)
        for (k = 0; k < 12; k++) { /* K, V  x  zero q, tiny q, zero scales  x  planes */
            const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
            tkv_rng rng = tkv_rng_seed((uint64_t)k);
            made_side m;
            int v = k % 2, kind = k / 2 % 3, planes = 1 + k / 6;
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
            if (v) kernels->v[TKVI_AS_TILES](&m.s, src, NULL, q, TKVI_ROWS, TKVI_BLOCK, planes, out);
            else kernels->k[TKVI_AS_TILES](&m.s, src, NULL, q, ref, TKVI_ROWS, TKVI_BLOCK, planes, out);
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
    double max = -1e300, sum = 0.0;
    int t, c;
    for (t = 0; t < GOAL_TOKENS; t++) {
        s[t] = 0.0;
        for (c = 0; c < GOAL_DIM; c++) s[t] += (double)q[c] * (double)k[t * GOAL_DIM + c];
        if (s[t] > max) max = s[t];
    }
    for (c = 0; c < GOAL_DIM; c++) out[c] = 0.0;
    for (t = 0; t < GOAL_TOKENS; t++) {
        double p = exp(s[t] - max);
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

TEST(goals) {
    static goal_data g;
    static double want[TKVI_ROWS][GOAL_DIM], exact[TKVI_ROWS][GOAL_DIM], got[TKVI_ROWS][GOAL_DIM];
    static const char *const kinds[4] = {"gaussian", "peaked", "channels x16", "key bias 600"};
    tkv_isa list[TKV_ISA_COUNT];
    int count = isa_list(list), kind, i, b, r, t, c, f;
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
        for (f = 1; f < TKV_FORMAT_COUNT; f++) {
            tkvi_side ks, vs;
            double own, bound;
            tkvi_side_init(&ks, &tkvi_formats[f], TKV_K, GOAL_DIM, 64, TKVI_BLOCK);
            tkvi_side_init(&vs, &tkvi_formats[f], TKV_V, GOAL_DIM, 64, TKVI_BLOCK);
            for (b = 0; b < GOAL_BLOCKS; b++) {
                size_t at = (size_t)(b * TKVI_BLOCK * GOAL_DIM);
                tkvi_encode_side(&ks, g.k + at, GOAL_DIM, TKVI_BLOCK, g.ks[b]);
                tkvi_encode_side(&vs, g.v + at, GOAL_DIM, TKVI_BLOCK, g.vs[b]);
                tkvi_decode_side(&ks, g.ks[b], 0, TKVI_BLOCK, g.dk + at, GOAL_DIM);
                tkvi_decode_side(&vs, g.vs[b], 0, TKVI_BLOCK, g.dv + at, GOAL_DIM);
            }
            for (r = 0; r < TKVI_ROWS; r++) {
                goal_attend(g.q + r * GOAL_DIM, g.k, g.v, exact[r]);
                goal_attend(g.q + r * GOAL_DIM, g.dk, g.dv, want[r]);
            }
            own = distance(want[0], exact[0], TKVI_ROWS * GOAL_DIM);
            bound = f == TKV_F32 ? 1e-5 : tkvi_is_exact(&tkvi_formats[f]) ? 2e-3 : 0.1 * own;
            for (i = 0; i < count; i++) {
                const tkvi_kernels *kernels = tkvi_kernels_for(list[i]);
                static float s[GOAL_BLOCKS][TKVI_ROWS * TKVI_BLOCK], p[TKVI_ROWS * TKVI_BLOCK],
                    out[TKVI_ROWS * GOAL_DIM];
                float max[TKVI_ROWS], sum[TKVI_ROWS];
                double error;
                memset(out, 0, sizeof out);
                for (r = 0; r < TKVI_ROWS; r++) {
                    max[r] = -1e30f;
                    sum[r] = 0.0f;
                }
                for (b = 0; b < GOAL_BLOCKS; b++) {
                    kernels->k[ks.format->stored](&ks, g.ks[b], NULL, g.q, g.dk, TKVI_ROWS, TKVI_BLOCK,
                                                  tkvi_planes(&ks, 0), s[b]);
                    for (r = 0; r < TKVI_ROWS; r++) {
                        float m = kernels->max64(s[b] + r * TKVI_BLOCK);
                        if (m > max[r]) max[r] = m;
                    }
                }
                for (b = 0; b < GOAL_BLOCKS; b++) {
                    for (r = 0; r < TKVI_ROWS; r++)
                        sum[r] += kernels->exp64(s[b] + r * TKVI_BLOCK, max[r], p + r * TKVI_BLOCK);
                    kernels->v[vs.format->stored](&vs, g.vs[b], NULL, p, TKVI_ROWS, TKVI_BLOCK,
                                                  tkvi_planes(&vs, 0), out);
                }
                for (r = 0; r < TKVI_ROWS; r++)
                    for (c = 0; c < GOAL_DIM; c++) got[r][c] = (double)(out[r * GOAL_DIM + c] / sum[r]);
                error = distance(got[0], want[0], TKVI_ROWS * GOAL_DIM);
                CHECK_MSG(error <= bound, "%s %s %s: arithmetic %.2e, bound %.2e, format %.2e", kernels->name,
                          kinds[kind], tkvi_formats[f].name, error, bound, own);
                if (getenv("TKV_TEST_VERBOSE"))
                    printf("\n    %-7s %-13s %-6s arithmetic %.2e format %.2e", kernels->name, kinds[kind],
                           tkvi_formats[f].name, error, own);
            }
        }
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(dispatch);
    RUN(halves);
    RUN(exponentials);
    RUN(exact);
    RUN(tiles_every_width);
    RUN(tiles_mixed);
    RUN(tiles_largest);
    RUN(tiles_nothing);
    RUN(goals);
    return tkv_test_end();
}
