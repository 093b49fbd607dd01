/*
 * kernels/scalar.h - what attention asks of an instruction set, and the scalar answer, which is the definition.
 *
 * A kernel works on one KV head's record of one block and up to TKVI_ROWS query rows at once (the query
 * heads of a group and several queries), so that each byte of the cache is read and unpacked once for all
 * of them. The other kernel files compute the same with vectors, within rounding of float sums.
 * May call formats and below.
 *
 * Integer attention on tiles (the scales never touch a code):
 *   K: q.k = sum_c q_c (scale_c code_c + zero_c). Fold w_c = q_c scale_c, round w to 8 bits (one plane) or
 *      15 (two planes, hi * 128 + lo), multiply by codes in integers, and take the rest in floats:
 *      step * (sum w code - sum w centre) + sum_c q_c (zero_c - ref_c + centre scale_c)
 *   V: the same with weights p_t scale_t per token, per group of channels; they have no sign, so one plane is
 *      0..255.
 * How many planes? A weight that is rounded to 1/127 of the largest adds an error that grows with the spread of
 * the codes it meets; the format itself errs by a third of a step, however wide. So in K tiles of 5 bits and more
 * (KIVI: 4) always have two planes, the others one, unless a row has a few weights that tower over the rest
 * (TKVI_NEEDS_TWO).
 * The same in V, by whole blocks: a side with wide tiles asks for two planes everywhere.
 * KIVI, and the int8 folding measured in ggml's rivals, describe the fold; centre terms from the float
 * query keep the rounding away from the mean of the codes.
 *
 * `ref` is any key; scores are q.(k - ref), the same for softmax, and large biases that all keys share
 * (Qwen2's reach 900) then cost no precision. The caller adds q.ref where the absolute logit matters.
 *
 * q and ref come in the order of the codes and, for rotated formats, rotated; out of rotated values is rotated.
 */
#ifndef TKVI_KERNELS_SCALAR_H
#define TKVI_KERNELS_SCALAR_H

#include "formats/table.h"

#define TKVI_ROWS 8 /* query rows per pass; a kernel's stack is proportional to it */
#define TKVI_PLANE 127
#define TKVI_PLANE_V 255
#define TKVI_TWO_PLANES (127 * 128)
#define TKVI_WIDE 5 /* bits of tiles that want two planes */

/* `next` is the side that the same kernel reads next (K of the following block, or V), or NULL: its s->bytes
 * are prefetched between the products, a line here and there. A burst of prefetches stalls, and hardware
 * prefetchers stop at the end of a record.
 * scores[row][64] = q[row] . (k[t] - ref). q: [rows][pad], zero beyond dim. ref: [pad]. n: tokens in the block;
 * scores beyond them are finite rubbish. Exact sides have rows for n tokens at least: read no further. */
typedef void (*tkvi_k_kernel)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                              const float *ref, int rows, int n, int planes, float *scores);
/* out[row][pad] += sum_t p[row][t] v[t]. p: [rows][64], not negative, zero beyond n. */
typedef void (*tkvi_v_kernel)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                              int rows, int n, int planes, float *out);

typedef struct tkvi_kernels {
    tkv_isa isa;
    const char *name;
    tkvi_k_kernel k[TKVI_STORAGE_COUNT];
    tkvi_v_kernel v[TKVI_STORAGE_COUNT];
    const tkvi_simd_ops *helpers;
    /* p[t] = exp(s[t] - max) for 64 scores, all <= max; below max - 87 it may be 0. Returns the sum. */
    float (*exp64)(const float *s, float maximum, float *p);
    float (*max64)(const float *s); /* the largest of 64 scores */
    /* The same for rows of scores [row][64]: m[r] grows to the largest, p = exp(s - m), sum[r] of these; a row
     * that sees no key (all TKVI_HIDDEN) gets zeros. Returns 0 if no row sees one. */
    int (*softmax_step)(const float *s, int rows, float *m, float *sum, float *p);
} tkvi_kernels;

#define TKVI_HIDDEN (-1e30f) /* score of a key that a row does not see; no infinities, -ffast-math has none */
#define TKVI_IS_HIDDEN(s) (!((s) > TKVI_HIDDEN))

static int tkvi_softmax_rows(float (*max64)(const float *), float (*exp64)(const float *, float, float *),
                             const float *s, int rows, float *m, float *sum, float *p) {
    int r, seen = 0;
    for (r = 0; r < rows; r++, s += TKVI_BLOCK, p += TKVI_BLOCK) {
        float most = max64(s);
        sum[r] = 0.0f;
        if (TKVI_IS_HIDDEN(most)) {
            memset(p, 0, TKVI_BLOCK * sizeof(float));
            continue;
        }
        m[r] = most > m[r] ? most : m[r];
        sum[r] = exp64(s, m[r], p);
        seen++;
    }
    return seen;
}

/* The planes to ask a kernel for: 2 everywhere, or 1: as few as tiles and weights allow. */
static int tkvi_planes(const tkvi_side *s, int precise) {
    int width;
    if (s->which == TKV_V)
        for (width = TKVI_MAX_WIDTH; width >= TKVI_WIDE; width--)
            if (s->runs.n[width]) return 2;
    return precise ? 2 : 1;
}

/* >>exact tiers: rows [token][pad] */
static void tkvi_exact_k(const tkvi_side *s, float (*load)(const uint8_t *), const uint8_t *src,
                         const float *q, const float *ref, int rows, int n, float *scores) {
    int size = s->format->bits / 8, r, t, c;
    memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++) {
            float k = load(src + (t * s->pad + c) * size) - ref[c];
            for (r = 0; r < rows; r++) scores[r * TKVI_BLOCK + t] += q[r * s->pad + c] * k;
        }
}

static void tkvi_exact_v(const tkvi_side *s, float (*load)(const uint8_t *), const uint8_t *src,
                         const float *p, int rows, int n, float *out) {
    int size = s->format->bits / 8, r, t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++) {
            float v = load(src + (t * s->pad + c) * size);
            for (r = 0; r < rows; r++) out[r * s->pad + c] += p[r * TKVI_BLOCK + t] * v;
        }
}

#define TKVI_EXACT_KERNEL_(t)                                                                                \
    static void tkvi_##t##_k_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next,             \
                                    const float *q, const float *ref, int rows, int n, int planes,           \
                                    float *scores) {                                                         \
        (void)next;                                                                                          \
        (void)planes;                                                                                        \
        tkvi_exact_k(s, tkvi_load_##t, src, q, ref, rows, n, scores);                                        \
    }                                                                                                        \
    static void tkvi_##t##_v_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next,             \
                                    const float *p, int rows, int n, int planes, float *out) {               \
        (void)next;                                                                                          \
        (void)planes;                                                                                        \
        tkvi_exact_v(s, tkvi_load_##t, src, p, rows, n, out);                                                \
    }
TKVI_EXACT_KERNEL_(f32)
TKVI_EXACT_KERNEL_(f16)
TKVI_EXACT_KERNEL_(bf16)
#undef TKVI_EXACT_KERNEL_

/* >>tiles */
/* What a rounded weight's error meets: the variance of codes in units of the format's own error, by width. First of
 * grids that cut off what is rare (A; R, whose values are normal), then of ranges from smallest to largest: there
 * one large key in a block has all its codes at the ends, and exactly; 4 bits, of V alone, between that (340) and
 * normal values (125). Pairs of R15 are like a code of 1.5 bits. */
static const float tkvi_spread[2][TKVI_WIDE] = {{0.0f, 3.0f, 9.0f, 30.0f, 90.0f},
                                                {0.0f, 3.0f, 14.0f, 74.0f, 250.0f}};

/* From so many bits on tiles of K have two planes in any case. */
static int tkvi_wide_k(const tkvi_side *s) { return s->format->shared ? TKVI_WIDE : TKVI_WIDE - 1; }

/* Places with such tiles. */
static int tkvi_wide_places(const tkvi_side *s) {
    int width, n = 0;
    for (width = TKVI_MAX_WIDTH; width >= tkvi_wide_k(s); width--) n += 4 * s->runs.n[width];
    return n;
}

/* The spread that weights of one plane meet in a block: of all channels (K), of 64 tokens (V, codes of a width). */
static float tkvi_coarse_k(const tkvi_side *s) {
    float sum = 0.0f;
    int width;
    for (width = 1; width < tkvi_wide_k(s); width++)
        sum += tkvi_spread[!s->format->shared][width] * (float)(4 * s->runs.n[width]);
    return sum;
}

static float tkvi_coarse_v(const tkvi_side *s, int width) {
    if (s->pairs) width = 2;
    return width < TKVI_WIDE ? tkvi_spread[!s->format->shared][width] * (float)TKVI_BLOCK : 0.0f;
}

/* Would one plane, of weights up to `top`, add more than a tenth of the format's own error in the root mean square?
 * Rounding errs by step^2 spread / 12 a weight, step = most / top, the format by w^2. The rule bounds an
 * expectation: one row can err twice as much. */
#define TKVI_MAY_ERR(top) (0.09f * (float)(top) * (float)(top))
#define TKVI_NEEDS_TWO(coarse, most, squares, top)                                                           \
    ((coarse) * (most) * (most) > TKVI_MAY_ERR(top) * (squares))

/* w times `by` as integers of at most `top`. */
static int tkvi_rounded(float w, float by, int top) {
    return tkvi_max(-top, tkvi_min(top, tkvi_rne(w * by)));
}

static float tkvi_inverse(float top, float most) {
    float inverse = most > 0.0f ? top / most : 0.0f;
    return tkvi_is_finite(inverse) ? inverse : 0.0f; /* weights below 1e-34 contribute nothing */
}

/* Weights of K in units of the second plane; returns their step. */
static float tkvi_round_k(const tkvi_side *s, const float *w, int planes, int *rounded) {
    float most = tkvi_largest(w, s->pad), squares = 0.0f;
    float one = tkvi_inverse((float)TKVI_PLANE, most), two = tkvi_inverse((float)TKVI_TWO_PLANES, most);
    int wide = tkvi_wide_places(s), i;
    for (i = 0; i < s->pad; i++) squares += w[i] * w[i];
    if (planes == 2 || TKVI_NEEDS_TWO(tkvi_coarse_k(s), most, squares, TKVI_PLANE)) wide = s->pad;
    for (i = 0; i < s->pad; i++)
        rounded[i] =
            i < wide ? tkvi_rounded(w[i], two, TKVI_TWO_PLANES) : 128 * tkvi_rounded(w[i], one, TKVI_PLANE);
    return two > 0.0f ? most / (float)TKVI_TWO_PLANES : 0.0f;
}

/* The largest weight of V in one plane. Levels of a table are signed: beside them there is room for seven bits. */
static int tkvi_top_v(const tkvi_side *s) { return s->levels ? TKVI_PLANE : TKVI_PLANE_V; }

static float tkvi_round_v(const tkvi_side *s, const float *w, int width, int planes, int *rounded) {
    float most = tkvi_largest(w, TKVI_BLOCK), squares = 0.0f, by;
    int top = tkvi_top_v(s), t;
    for (t = 0; t < TKVI_BLOCK; t++) squares += w[t] * w[t];
    if (planes == 2 || TKVI_NEEDS_TWO(tkvi_coarse_v(s, width), most, squares, top)) top = TKVI_TWO_PLANES;
    by = tkvi_inverse((float)top, most);
    for (t = 0; t < TKVI_BLOCK; t++) rounded[t] = tkvi_max(0, tkvi_rounded(w[t], by, top));
    return by > 0.0f ? most / (float)top : 0.0f;
}

static void tkvi_tiles_k_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                                const float *ref, int rows, int n, int planes, float *scores) {
    float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    int g, r, t, i, c;
    (void)next;
    s->format->side[TKV_K].meta(s, src, &tkvi_simd_ops_scalar, scale, zero);
    for (r = 0; r < rows; r++)
        for (g = 0; g < s->groups; g++) {
            float folded[TKV_MAX_HEAD_DIM], step, rest = 0.0f, middle = 0.0f;
            int w[TKV_MAX_HEAD_DIM], sum[TKVI_BLOCK], width, position = 0;
            tkvi_tile_at at = tkvi_tiles(&s->runs);
            for (c = 0; c < s->pad; c++) folded[c] = q[r * s->pad + c] * scale[g * s->pad + c];
            step = tkvi_round_k(s, folded, planes, w);
            memset(sum, 0, sizeof sum);
            for (width = TKVI_MAX_WIDTH; width > 0; width--)
                for (i = 0; i < s->runs.n[width]; i++, position += 4) {
                    uint8_t tile[TKVI_TILE_CODES];
                    float centre = tkvi_centre(s, width);
                    tkvi_unpack_tile(src, &at, width, tile);
                    tkvi_next_tile(&at, width);
                    for (c = 0; c < 4; c++) {
                        int m = g * s->pad + position + c;
                        rest += q[r * s->pad + position + c] *
                                ((zero[m] - ref[position + c]) + centre * scale[m]);
                        middle += centre * (float)w[position + c];
                        for (t = 0; t < n; t++) sum[t] += w[position + c] * tile[4 * t + c];
                    }
                }
            for (; position < s->pad; position++) /* channels without codes */
                rest += q[r * s->pad + position] * (zero[g * s->pad + position] - ref[position]);
            for (t = g * s->group; t < tkvi_min((g + 1) * s->group, TKVI_BLOCK); t++)
                scores[r * TKVI_BLOCK + t] = step * ((float)sum[t] - middle) + rest;
        }
}

static void tkvi_tiles_v_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                                int rows, int n, int planes, float *out) {
    float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    int r, t, i, c, width, slab = 0; /* first channel */
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    (void)next;
    s->format->side[TKV_V].meta(s, src, &tkvi_simd_ops_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i += 4) { /* 16 lanes */
            uint8_t tile[4][TKVI_TILE_CODES];
            const float *sc = scale + slab / s->group * TKVI_BLOCK, *z = zero + slab / s->group * TKVI_BLOCK;
            float centre = tkvi_centre(s, width);
            int channels = tkvi_slab_channels(s, width);
            for (c = 0; c < 4; c++) {
                tkvi_unpack_tile(src, &at, width, tile[c]);
                tkvi_next_tile(&at, width);
            }
            for (r = 0; r < rows; r++) {
                float folded[TKVI_BLOCK], step, rest = 0.0f, middle = 0.0f;
                int w[TKVI_BLOCK], sum[32];
                for (t = 0; t < TKVI_BLOCK; t++) folded[t] = t < n ? p[r * TKVI_BLOCK + t] * sc[t] : 0.0f;
                step = tkvi_round_v(s, folded, width, planes, w);
                memset(sum, 0, sizeof sum);
                for (t = 0; t < n; t++) {
                    const uint8_t *codes = tile[t / 16] + t % 16 / 4 * 64 + t % 4;
                    rest += p[r * TKVI_BLOCK + t] * (z[t] + centre * sc[t]);
                    middle += centre * (float)w[t];
                    for (c = 0; c < channels; c++) {
                        int code = codes[4 * (c % 16)];
                        sum[c] +=
                            w[t] *
                            (s->levels ? s->levels[tkvi_level_table(s, width, c / 16) + (code & 15)] : code);
                    }
                }
                for (c = 0; c < channels; c++)
                    out[r * s->pad + slab + c] += step * ((float)sum[c] - middle) + rest;
            }
            slab += channels;
        }
}

/* >>decoded: any format, by its decode alone. x86 falls back to it (kernels/decode_x86.h). */
#define TKVI_AT_ONCE 16 /* tokens: what the stack has room for */

/* n is a multiple of 16: vectors also at -O2. */
static float tkvi_float_dot(const float *a, const float *b, int n) {
    float sum[16] = {0.0f}, all = 0.0f;
    int i, k;
    for (i = 0; i < n; i += 16)
        for (k = 0; k < 16; k++) sum[k] += a[i + k] * b[i + k];
    for (k = 0; k < 16; k++) all += sum[k];
    return all;
}

static void tkvi_decoded_k(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                           const float *ref, int rows, int n, int planes, float *scores) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE * TKV_MAX_HEAD_DIM];
    int from, t, c, r;
    (void)next;
    (void)planes;
    memset(x, 0, sizeof x);
    memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_decode_side(s, src, from, count, x, (size_t)s->pad);
        for (t = 0; t < count; t++) {
            float *k = x + t * s->pad;
            for (c = 0; c < s->dim; c++) k[c] -= ref[c];
            for (r = 0; r < rows; r++)
                scores[r * TKVI_BLOCK + from + t] = tkvi_float_dot(q + r * s->pad, k, s->pad);
        }
    }
}

static void tkvi_decoded_v(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                           int rows, int n, int planes, float *out) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE * TKV_MAX_HEAD_DIM];
    int from, t, c, k, r;
    (void)next;
    (void)planes;
    memset(x, 0, sizeof x);
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_decode_side(s, src, from, count, x, (size_t)s->pad);
        for (r = 0; r < rows; r++)
            for (c = 0; c < s->pad; c += 16) {
                float sum[16], *o = out + r * s->pad + c;
                for (k = 0; k < 16; k++) sum[k] = o[k];
                for (t = 0; t < count; t++) {
                    float w = p[r * TKVI_BLOCK + from + t];
                    for (k = 0; k < 16; k++) sum[k] += w * x[t * s->pad + c + k];
                }
                for (k = 0; k < 16; k++) o[k] = sum[k];
            }
    }
}

static float tkvi_exp64_scalar(const float *s, float maximum, float *p) {
    float sum = 0.0f;
    int t;
    for (t = 0; t < TKVI_BLOCK; t++) {
        float x = s[t] - maximum;
        p[t] = x < -87.0f ? 0.0f : expf(x); /* no subnormals, whatever the flags */
        sum += p[t];
    }
    return sum;
}

static float tkvi_max64_scalar(const float *s) {
    float maximum = s[0];
    int t;
    for (t = 1; t < TKVI_BLOCK; t++) maximum = s[t] > maximum ? s[t] : maximum;
    return maximum;
}

static int tkvi_softmax_step_scalar(const float *s, int rows, float *m, float *sum, float *p) {
    return tkvi_softmax_rows(tkvi_max64_scalar, tkvi_exp64_scalar, s, rows, m, sum, p);
}

static const tkvi_kernels tkvi_kernels_scalar = {
    TKV_ISA_SCALAR,
    "scalar",
    {tkvi_f32_k_scalar, tkvi_f16_k_scalar, tkvi_bf16_k_scalar, tkvi_tiles_k_scalar, tkvi_decoded_k},
    {tkvi_f32_v_scalar, tkvi_f16_v_scalar, tkvi_bf16_v_scalar, tkvi_tiles_v_scalar, tkvi_decoded_v},
    &tkvi_simd_ops_scalar,
    tkvi_exp64_scalar,
    tkvi_max64_scalar,
    tkvi_softmax_step_scalar,
};

#endif /* TKVI_KERNELS_SCALAR_H */
