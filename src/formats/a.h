/*
 * formats/a.h - A40 .. A15, allocated keys: more bits for channels that the queries weight more.
 *
 * KIVI gives every channel of K equally many bits. Here the channels of a head stand in the order of
 * E[q_c^2] var(k_c), and each tile of four channels has 0 to 6 bits. core/allocate.h shares out the bits, so that
 * the average, metadata included, is the format's. Reverse water-filling: Cover and Thomas, Elements of Information
 * Theory, 10.3.3. Each channel has 16 bits of metadata per block of 64 tokens:
 *
 *     x^ = scale * (code - middle + offset / unit) + mean      middle = (2^bits - 1) / 2
 *
 *   scale   one byte (core/log_scale.h); offset: one signed byte; unit: 8, or 4 for codes of 6 bits
 *   mean    static, per channel, in the layer's table, not in the block; absorbs large biases of keys (Qwen2)
 *   A channel without bits stores its block mean as fp16 in the same 16 bits.
 *
 * One token of a block, the outlier, has a row of its own, with 7 bits for each channel. Some tokens in the middle of
 * a text are attention sinks: guillemets, line breaks. They have most of a head's attention, their keys are far from
 * those of other tokens, and the few bits of a column hardly hold them. Su et al. keep them exact (Outlier Tokens
 * Tracing, arXiv 2505.10938) and find them by small keys. Here the outlier is the token that deviates most in
 * channels that matter (steps A to C). Its columns code a neighbour in its place. Where V is inside K, no row exists.
 *
 * Encoding a column cuts the residuals x - mean to 12 bits between their smallest and largest. All sums after that
 * are integers, so every machine gets the same result. The encoder tries several ranges, and takes the codes that
 * correlate best with the values. The scale then makes decoded values unbiased, cov(x^, x) = var(x). In channels
 * of one bit it makes the variances agree. A scale of least squares, or of the range, would tilt the softmax
 * between this tier and the exact ones (bench/LOG.md). The offset restores the mean.
 *
 * Step by step. Numbers are floats unless a step names double, and each operation is rounded. n tokens,
 * top = 2^bits - 1. First the outlier, in a block of at least two tokens:
 *   A. u and its sums as in step 1, for each channel. S = (n - 1) (n sum(u^2) - sum(u)^2), in whole numbers;
 *      most = the larger of sum(u) and 4095 n - sum(u); rest = S - most^2 + floor(S / 1024): the variance without the
 *      token that is farthest off. unit = 2^(k / 16), k = 80 + importance - 255 + log8(n - 1) - log8(rest), where
 *      importance is that of the table (255 without one) and log8 is 8 log2, rounded; 0 if S is 0
 *   B. score of a token = sum over channels of min(1023, floor(|n u - sum(u)| unit))^2. The token with the highest
 *      score is the outlier, the first of equals; none if all are 0
 *   C. its residuals are x - mean, cut to +-1e30. step = the largest of their sizes / 61 as a log scale.
 *      code = residual / step, rounded to nearest (floor(2 |residual| (1 / step)) + 1, halved), cut to +-63; 0 if step
 *      is 0. In all that follows, the values of the token before it take its place; for token 0, those of token 1
 * Then the columns:
 *   1. x - mean, cut to +-1e30; low and high are its ends; step = (high - low) / 4096, 0 if not above 1e-36;
 *      u = min(4095, floor((x - low) * (1 / step))), 0 without a step. A token is nearly low + step * (u + 1/2).
 *      The mean is m = low + step * ((2 sum(u) + n) / 2n), with the sum and the last product in double. A channel
 *      without bits stores m as a float, then fp16, and is done
 *   2. for each cut of the table below: by = floor(131072 top / (4096 - 2 cut)),
 *      code = min(top, floor((floor(max(0, u - cut) * by / 65536) + 1) / 2));
 *      score = cov(code, u) / var(code) * cov(code, u), or 0 if var(code) is 0; the first best score wins.
 *      cov and var are n^2 times the usual ones, n sum(ab) - sum(a) sum(b): integers, then floats
 *   3. scale = var(u) / cov(code, u) * step, with one bit sqrt(var(u) / var(code)) * step; 0 if either is 0.
 *      From here on it is the value of its byte
 *   4. offset (double) = (m / scale - (2 sum(code) - n top) / 2n) * unit, cut to +-128, rounded to nearest (ties
 *      up); 0 if scale is 0
 *   5. if offset is beyond +-127, or scale is 0 and m is not: scale = the larger of it and |m| unit / 120 (double,
 *      then float), as a byte;
 *      a first offset = (m / scale - 1/2) * unit, cut to +-127; then anew, in double,
 *      code = floor((low + step * (u + 1/2)) / scale - offset / unit + top / 2 + 1/2), cut to 0 .. top,
 *      and the offset of step 4, cut to +-127. A scale that is still 0 divides to an infinity
 * Missing tokens, and positions without a channel, have code 0. The metadata of positions without a channel is 0.
 * Without a table, positions are channels, means are 0, and tiles have the widths of tkvi_share_equally
 * (core/allocate.h). A head whose channels do not fill its last tile has the bytes of one that fills it.
 *
 * Bytes: | tiles, widest first | scale [pad] | offset [pad] | outlier [pad] |
 *          a channel without bits: fp16 low byte | high byte
 *
 *     outlier   byte p:  bits 1 .. 7 the code, two's complement; bit 0: bit p of  slot + 128 * log scale
 *               slot: 0 .. 63, or 64 for none
 */
#ifndef TKVI_FORMATS_A_H
#define TKVI_FORMATS_A_H

#include "core/fit.h"
#include "core/allocate.h"
#include "formats/tiles.h"

/* By width: offset steps in one step of the code. A byte reaches +-127 offset steps. */
TKVI_CONSTANT uint8_t tkvi_a_unit[7] = {1, 8, 8, 8, 8, 8, 4};

/* One range to try, by width. cut: how many of the 4096 steps to cut off at each end; by: tkvi_cut_by of it. */
typedef struct tkvi_a_range {
    int32_t cut[8], by[8];
} tkvi_a_range;

#define TKVI_A_CUTS 5
#define TKVI_A_BY_(width, cut) (131072 * ((1 << width) - 1) / (TKVI_STEPS - 2 * cut))
#define TKVI_A_RANGE_(a, b, c, d, e, f)                                                                      \
    {                                                                                                        \
        {0, a, b, c, d, e, f, 0}, {                                                                          \
            0, TKVI_A_BY_(1, a), TKVI_A_BY_(2, b), TKVI_A_BY_(3, c), TKVI_A_BY_(4, d), TKVI_A_BY_(5, e),     \
                TKVI_A_BY_(6, f), 0                                                                          \
        }                                                                                                    \
    }
TKVI_CONSTANT tkvi_a_range tkvi_a_ranges[TKVI_A_CUTS] = {
    TKVI_A_RANGE_(0, 0, 0, 0, 0, 0), TKVI_A_RANGE_(384, 300, 200, 120, 80, 60),
    TKVI_A_RANGE_(768, 600, 400, 260, 160, 120), TKVI_A_RANGE_(1152, 900, 650, 420, 260, 200),
    TKVI_A_RANGE_(1536, 1200, 900, 600, 400, 300)};

static void tkvi_a_layout(tkvi_side *s) {
    if (!s->has_share) tkvi_share_equally(s->format->bits, s->dim, s->pad, s->has_outlier, &s->tiles);
    s->groups = 1;
    s->group = TKVI_BLOCK;
    s->code_bytes = tkvi_tiles_bytes(&s->tiles);
    s->meta_bytes = (size_t)((2 + s->has_outlier) * s->pad);
}

/* One column between the steps. Sums are integers, so threads can share its tokens in any order. */
typedef struct tkvi_column {
    int n, width;
    float low, step; /* value = low + step * (u + 1/2), approximately */
    int32_t sum_u, sum_uu;
    int32_t sum_c, sum_cc, sum_cu; /* sums over the best codes */
} tkvi_column;

static tkvi_column tkvi_column_of(const tkvi_columns *c, int l) {
    tkvi_column one;
    one.n = c->n;
    one.width = c->width[l];
    one.low = c->low[l];
    one.step = c->step[l];
    one.sum_u = c->sum_u[l];
    one.sum_uu = c->sum_uu[l];
    one.sum_c = c->sum_c[l];
    one.sum_cc = c->sum_cc[l];
    one.sum_cu = c->sum_cu[l];
    return one;
}

TKVI_FN float tkvi_a_residual(float x, float mean) { return tkvi_clampf(tkvi_f32(x - mean), -1e30f, 1e30f); }

/* The step of residuals from low to high. *inverse: out, for tkvi_a_integer. */
TKVI_FN float tkvi_a_step(float low, float high, float *inverse) {
    float step = tkvi_f32(tkvi_f32(high - low) * (1.0f / TKVI_STEPS));
    *inverse = step > 1e-36f ? tkvi_f32(1.0f / step) : 0.0f;
    return *inverse > 0.0f ? step : 0.0f;
}

TKVI_FN int tkvi_a_integer(float residual, float low, float inverse) {
    return tkvi_min((int)tkvi_f32(tkvi_f32(residual - low) * inverse), TKVI_STEPS - 1);
}

/* Computes range and integers of column l. */
static void tkvi_a_integers(tkvi_columns *c, int l) {
    float x[TKVI_BLOCK], low = 1e30f, high = -1e30f, inverse;
    int t;
    for (t = 0; t < c->n; t++) {
        x[t] = l < c->lanes ? tkvi_a_residual(c->x[(size_t)t * c->stride + (size_t)l], c->mean[l]) : 0.0f;
        low = x[t] < low ? x[t] : low;
        high = x[t] > high ? x[t] : high;
    }
    c->low[l] = low;
    c->step[l] = tkvi_a_step(low, high, &inverse);
    c->sum_u[l] = c->sum_uu[l] = 0;
    for (t = 0; t < TKVI_BLOCK; t++) {
        int v = t < c->n ? tkvi_a_integer(x[t], low, inverse) : 0;
        *tkvi_column_u(c, l, t) = (int16_t)v;
        c->sum_u[l] += v;
        c->sum_uu[l] += v * v;
    }
}

/* Score of codes with these sums: how well they follow the n values. */
TKVI_FN float tkvi_a_score(int n, int sum_u, int sum, int squares, int products) {
    float cov = tkvi_covariance(n, sum, sum_u, products), var = tkvi_covariance(n, sum, sum, squares);
    return var > 0.0f ? tkvi_f32(tkvi_f32(cov / var) * cov) : 0.0f;
}

/* Finds the best range of column l and writes its codes. */
static void tkvi_a_search(tkvi_columns *c, int l) {
    int width = c->width[l], top = (1 << width) - 1, u[TKVI_BLOCK], k, t;
    float most = -1.0f;
    for (t = 0; t < TKVI_BLOCK; t++) u[t] = *tkvi_column_u(c, l, t);
    for (k = 0; k < TKVI_A_CUTS; k++) {
        int cut = tkvi_a_ranges[k].cut[width], by = tkvi_a_ranges[k].by[width];
        int sum = 0, squares = 0, products = 0;
        float score;
        uint8_t code[TKVI_BLOCK];
        for (t = 0; t < TKVI_BLOCK; t++) {
            int v = tkvi_cut_code(u[t], cut, by, top);
            code[t] = (uint8_t)v;
            sum += v;
            squares += v * v;
            products += v * u[t];
        }
        score = tkvi_a_score(c->n, c->sum_u[l], sum, squares, products);
        if (score > most) {
            most = score;
            c->sum_c[l] = sum;
            c->sum_cc[l] = squares;
            c->sum_cu[l] = products;
            memcpy(c->code[l], code, sizeof code);
        }
    }
}

static void tkvi_encode_k_columns_scalar(tkvi_columns *c) {
    int l;
    for (l = 0; l < TKVI_LANES; l++) {
        tkvi_a_integers(c, l);
        tkvi_a_search(c, l);
    }
}

/* >>the outlier */
#define TKVI_NO_OUTLIER TKVI_BLOCK /* its slot */
#define TKVI_OUTLIER_MOST 63       /* the largest code */
#define TKVI_DEVIATION_MOST 1023   /* squares of TKV_MAX_HEAD_DIM channels then fit 30 bits */
#define TKVI_DEVIATION_SIGMA 80    /* a deviation of sigma is 2^(80 / 16) */

/* Step A: the unit of the deviations of a column. */
TKVI_FN float tkvi_deviation_unit(int n, int sum_u, int sum_uu, int importance) {
    const int64_t most = tkvi_max(sum_u, n * (TKVI_STEPS - 1) - sum_u);
    const int64_t spread = (n - 1) * ((int64_t)n * sum_uu - (int64_t)sum_u * sum_u);
    if (importance == 0 || spread <= 0) return 0.0f;
    return tkvi_power16(TKVI_DEVIATION_SIGMA + importance - 255 + tkvi_log8((float)(n - 1)) -
                        tkvi_log8((float)(spread - most * most + (spread >> 10))));
}

/* Step B: the deviation of a token from its column. */
TKVI_FN int tkvi_deviation(int n, int sum_u, int u, float unit) {
    const int d = n * u - sum_u;
    return tkvi_min(TKVI_DEVIATION_MOST, (int)tkvi_f32((float)(d < 0 ? -d : d) * unit));
}

static void tkvi_score_tokens_scalar(tkvi_columns *c, const uint8_t *importance,
                                     int32_t (*score)[TKVI_LANES]) {
    int l, t;
    for (l = 0; l < c->lanes; l++) {
        float unit;
        tkvi_a_integers(c, l);
        unit = tkvi_deviation_unit(c->n, c->sum_u[l], c->sum_uu[l], importance[l]);
        for (t = 0; t < c->n; t++) {
            const int d = tkvi_deviation(c->n, c->sum_u[l], *tkvi_column_u(c, l, t), unit);
            score[t][l] += d * d;
        }
    }
}

/* The slot whose values take the place of the outlier's. */
TKVI_FN int tkvi_outlier_neighbour(int slot) { return slot > 0 ? slot - 1 : 1; }

/* Step C: the byte of the scale, for residuals of at most this size. */
TKVI_FN int tkvi_outlier_log(float most, int top) {
    return tkvi_log_code(tkvi_f32(most * (1.0f / 61.0f)), top);
}

/* Step C: the code of a residual. inverse: 1 / step, or 0. */
TKVI_FN int tkvi_outlier_code(float residual, float inverse) {
    const float twice = tkvi_f32(tkvi_f32(residual + residual) * inverse);
    const int size = (int)tkvi_clampf(twice < 0.0f ? -twice : twice, 0.0f, 2.0f * TKVI_OUTLIER_MOST);
    return twice < 0.0f ? -((size + 1) / 2) : (size + 1) / 2;
}

/* Byte p of the row. head: slot and scale, as the bytes have them. */
TKVI_FN uint8_t tkvi_outlier_byte(int code, int head, int p) {
    return (uint8_t)(((unsigned)code & 127u) << 1 | (p < 15 ? (unsigned)head >> p & 1u : 0u));
}

/* Slot and scale: the lowest bits of 15 bytes. A product brings those of eight bytes together. */
TKVI_FN int tkvi_outlier_head(const uint8_t *row) {
    const uint64_t low = tkvi_load64(row) & 0x0101010101010101u;
    const uint64_t high = tkvi_load64(row + 8) & 0x0101010101010101u;
    return (int)(low * 0x0102040810204080u >> 56 | high * 0x0102040810204080u >> 56 << 8) & 0x7fff;
}

/* The outlier of a side: its slot, or TKVI_NO_OUTLIER; half of its scale, since a byte without bit 0 is twice the code;
 * its bytes by position. */
typedef struct tkvi_outlier {
    int slot;
    float half_step;
    const uint8_t *row;
} tkvi_outlier;

static tkvi_outlier tkvi_outlier_of(const tkvi_side *s, const uint8_t *src) {
    tkvi_outlier o;
    int head;
    o.slot = TKVI_NO_OUTLIER;
    o.half_step = 0.0f;
    o.row = src + s->code_bytes + 2 * (size_t)s->pad;
    if (!s->has_outlier) return o;
    head = tkvi_outlier_head(o.row);
    o.slot = tkvi_min(head & 127, TKVI_NO_OUTLIER); /* any bytes can come from a store */
    o.half_step = 0.5f * tkvi_log_value(head >> 7, s->top);
    return o;
}

/* The value at a position, from its byte of the row. The product is exact. */
TKVI_FN float tkvi_outlier_value(int code, float half_step, float mean) {
    return tkvi_f32(tkvi_f32(half_step * (float)tkvi_signed_byte(code & 254)) + mean);
}

/* Finds the outlier of n tokens. mean, importance: [pad] by channel. */
static int tkvi_find_outlier(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride,
                             int n, const float *mean, const uint8_t *importance) {
    TKVI_ALIGNED int32_t score[TKVI_BLOCK][TKVI_LANES];
    int first, t, l, most = 0, slot = TKVI_NO_OUTLIER;
    tkvi_columns c;
    memset(score, 0, sizeof score);
    c.stride = stride;
    c.n = n;
    for (first = 0; first < s->pad && n > 1; first += TKVI_LANES) {
        c.x = x + first;
        c.lanes = tkvi_min(TKVI_LANES, s->dim - first);
        c.mean = mean + first;
        ops->score_tokens(&c, importance + first, score);
    }
    for (t = 0; t < n; t++) {
        int sum = 0;
        for (l = 0; l < TKVI_LANES; l++) sum += score[t][l];
        if (sum > most) slot = t;
        most = tkvi_max(most, sum);
    }
    return slot;
}

/* Writes the row of the outlier. x: its values, or NULL. channel, mean: of each position, and of each channel. */
static void tkvi_put_outlier(const tkvi_side *s, const float *x, int slot, const int16_t *channel,
                             const float *mean, uint8_t *row) {
    float residual[TKV_MAX_HEAD_DIM], most = 0.0f, step, inverse;
    int p, log, head;
    for (p = 0; p < s->pad; p++) {
        const int from = channel[p];
        residual[p] = x && from < s->dim ? tkvi_a_residual(x[from], mean[from]) : 0.0f;
        most = residual[p] > most ? residual[p] : -residual[p] > most ? -residual[p] : most;
    }
    log = tkvi_outlier_log(most, s->top);
    step = tkvi_log_value(log, s->top);
    inverse = step > 0.0f ? tkvi_f32(1.0f / step) : 0.0f;
    head = slot | log << 7;
    for (p = 0; p < s->pad; p++) row[p] = tkvi_outlier_byte(tkvi_outlier_code(residual[p], inverse), head, p);
}

/* Copies n tokens of 16 channels, with a neighbour in the place of the outlier. */
static void tkvi_without_outlier(const float *x, size_t stride, int n, int lanes, int slot,
                                 float (*to)[TKVI_LANES]) {
    int t;
    for (t = 0; t < n; t++)
        memcpy(to[t], x + (size_t)(t == slot ? tkvi_outlier_neighbour(slot) : t) * stride,
               (size_t)lanes * sizeof *x);
}

/* >>columns */
/* Mean of the residuals. A product of two floats is exact in double, so fusing it into the sum changes nothing. */
TKVI_FN double tkvi_a_mean(const tkvi_column *c) {
    float mean_u = tkvi_f32((float)(2 * c->sum_u + c->n) / (float)(2 * c->n));
    return tkvi_f64((double)c->low + (double)c->step * (double)mean_u);
}

/* The offset that gives this mean to codes with this sum. */
TKVI_FN int tkvi_a_offset(double mean, float scale, int sum_c, int n, int width) {
    double middle = tkvi_f64((double)(2 * sum_c - n * ((1 << width) - 1)) / (double)(2 * n)), v;
    if (!(scale > 0.0f)) return 0;
    v = tkvi_f64(tkvi_f64(mean / (double)scale) - middle) * (double)tkvi_a_unit[width];
    v = v < -128.0 ? -128.0 : v > 128.0 ? 128.0 : v;
    return (int)tkvi_f64(v + 1000.5) - 1000;
}

/* Computes the metadata of a column. Returns 1 if scale and offset cannot reach its mean (step 5). */
TKVI_FN int tkvi_a_finalize_scales(const tkvi_column *c, int top, uint8_t *log, uint8_t *offset,
                                   float *middle) {
    double mean = tkvi_a_mean(c);
    float cov = tkvi_covariance(c->n, c->sum_c, c->sum_u, c->sum_cu), scale = 0.0f;
    float var = tkvi_covariance(c->n, c->sum_u, c->sum_u, c->sum_uu);
    float var_c = tkvi_covariance(c->n, c->sum_c, c->sum_c, c->sum_cc);
    int by;
    if (cov > 0.0f && var > 0.0f) {
        scale = c->width == 1 ? tkvi_f32(sqrtf(tkvi_f32(var / var_c))) : tkvi_f32(var / cov);
        scale = tkvi_f32(scale * c->step);
    }
    *middle = tkvi_f32((float)mean);
    *log = (uint8_t)tkvi_log_code(scale, top);
    by = tkvi_a_offset(mean, tkvi_log_value(*log, top), c->sum_c, c->n, c->width);
    *offset = (uint8_t)by;
    return c->width && (by < -127 || by > 127 || (*log == 0 && mean != 0.0));
}

static void tkvi_finalize_scales_scalar(tkvi_columns *c, int top) {
    int l;
    c->beyond_mask = 0;
    for (l = 0; l < TKVI_LANES; l++) {
        tkvi_column one = tkvi_column_of(c, l);
        int beyond = tkvi_a_finalize_scales(&one, top, &c->log[l], &c->offset[l], &c->middle[l]);
        c->beyond_mask |= (uint32_t)beyond << l;
    }
}

/* The next four functions recode a column whose mean is far from the static one. Only a larger scale lets the offset
 * reach it (step 5). tkvi_a_far returns the byte of that scale. *offset: out, the first offset. */
TKVI_FN int tkvi_a_far(const tkvi_column *c, int log, int top, int *offset) {
    double mean = tkvi_a_mean(c), size = mean < 0.0 ? -mean : mean, unit = (double)tkvi_a_unit[c->width];
    log = tkvi_max(log, tkvi_log_code(tkvi_f32((float)tkvi_f64(size * unit / 120.0)), top));
    *offset = tkvi_a_offset(mean, tkvi_log_value(log, top), 1 << (c->width - 1), 1, c->width);
    *offset = tkvi_max(-127, tkvi_min(127, *offset));
    return log;
}

TKVI_FN int tkvi_a_far_code(const tkvi_column *c, int v, float scale, int offset) {
    int top = (1 << c->width) - 1, k;
    float u = (float)v + 0.5f;
    double x = tkvi_f64((double)c->low + (double)c->step * (double)u), middle = 0.5 * (double)top;
    x = tkvi_f64(tkvi_f64(x / (double)scale) - (double)offset / (double)tkvi_a_unit[c->width]);
    x = tkvi_f64(tkvi_f64(x + middle) + 0.5);
    k = x < 0.0 ? 0 : x > 255.0 ? 255 : (int)x;
    return tkvi_min(k, top);
}

TKVI_FN uint8_t tkvi_a_far_offset(const tkvi_column *c, float scale, int sum_c) {
    int offset = tkvi_a_offset(tkvi_a_mean(c), scale, sum_c, c->n, c->width);
    return (uint8_t)tkvi_max(-127, tkvi_min(127, offset));
}

static void tkvi_a_recode(tkvi_columns *c, int l, int top) {
    tkvi_column one = tkvi_column_of(c, l);
    int offset, log = tkvi_a_far(&one, c->log[l], top, &offset), sum = 0, t;
    float scale = tkvi_log_value(log, top);
    for (t = 0; t < c->n; t++) {
        int k = tkvi_a_far_code(&one, *tkvi_column_u(c, l, t), scale, offset);
        c->code[l][t] = (uint8_t)k;
        sum += k;
    }
    c->log[l] = (uint8_t)log;
    c->offset[l] = tkvi_a_far_offset(&one, scale, sum);
}

/* Writes the metadata of a position. */
TKVI_FN void tkvi_a_put(int width, int log, int by, float middle, uint8_t *scale, uint8_t *offset) {
    int half = tkvi_f32_to_f16(middle);
    *scale = (uint8_t)(width ? log : half & 255);
    *offset = (uint8_t)(width ? by : half >> 8);
}

static void tkvi_a_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride, int n,
                          uint8_t *dst) {
    TKVI_ALIGNED uint8_t column[TKV_MAX_HEAD_DIM][TKVI_BLOCK], tile[TKVI_TILE_CODES]; /* column: by channel */
    TKVI_ALIGNED float others[TKVI_BLOCK][TKVI_LANES];
    int16_t channel[TKV_MAX_HEAD_DIM];
    uint8_t widths[TKV_MAX_HEAD_DIM], log[TKV_MAX_HEAD_DIM], by[TKV_MAX_HEAD_DIM];
    uint8_t importance[TKV_MAX_HEAD_DIM];
    float mean[TKV_MAX_HEAD_DIM], middle[TKV_MAX_HEAD_DIM];
    uint8_t *scale = dst + s->code_bytes, *offset = scale + s->pad;
    uint8_t *at = dst;
    int width, p, first, end, l, outlier = TKVI_NO_OUTLIER;
    tkvi_columns c;
    memset(dst, 0, s->bytes);
    for (width = TKVI_MAX_WIDTH, p = 0; width >= 0; width--)
        for (end = width ? p + 4 * s->tiles.n[width] : s->pad; p < end; p++) {
            int from = tkvi_channel(s, p);
            channel[p] = (int16_t)from;
            widths[from] = (uint8_t)width;
            mean[from] = s->mean ? s->mean[p] : 0.0f;
            importance[from] = s->importance ? s->importance[p] : 255;
        }
    if (s->has_outlier) {
        outlier = tkvi_find_outlier(s, ops, x, stride, n, mean, importance);
        tkvi_put_outlier(s, outlier == TKVI_NO_OUTLIER ? NULL : x + (size_t)outlier * stride, outlier,
                         channel, mean, offset + s->pad);
    }
    c.stride = stride;
    c.n = n;
    for (first = 0; first < s->pad; first += TKVI_LANES) {
        c.x = x + first;
        c.lanes = tkvi_min(TKVI_LANES, s->dim - first);
        if (outlier != TKVI_NO_OUTLIER && c.lanes > 0) {
            tkvi_without_outlier(c.x, stride, n, c.lanes, outlier, others);
            c.x = others[0];
            c.stride = TKVI_LANES;
        }
        c.mean = mean + first;
        c.width = widths + first;
        c.code = column + first;
        c.log = log + first;
        c.offset = by + first;
        c.middle = middle + first;
        ops->encode_k_columns(&c);
        ops->finalize_scales(&c, s->top);
        for (l = 0; c.beyond_mask >> l; l++)
            if (c.beyond_mask >> l & 1u) tkvi_a_recode(&c, l, s->top);
        for (l = c.lanes; l < TKVI_LANES; l++) {
            memset(column[first + l], 0, TKVI_BLOCK);
            log[first + l] = by[first + l] = 0;
            middle[first + l] = 0.0f;
        }
    }
    for (width = TKVI_MAX_WIDTH, p = 0; width > 0; width--) /* packs tiles in the order of positions */
        for (end = p + 4 * s->tiles.n[width]; p < end; p += 4) {
            ops->interleave(column, channel + p, tile);
            ops->pack_tile(at, width, tile);
            at += TKVI_TILE_BYTES(width);
        }
    for (p = 0; p < s->pad; p++) {
        int from = channel[p];
        tkvi_a_put(widths[from], log[from], by[from], middle[from], scale + p, offset + p);
    }
}

/* The columns of the outlier have the codes of a neighbour, so they go with it. */
static void tkvi_a_clear(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    const tkvi_outlier o = tkvi_outlier_of(s, bytes);
    uint8_t *row = bytes + s->code_bytes + 2 * (size_t)s->pad;
    int p;
    if (o.slot != TKVI_NO_OUTLIER) {
        if (dead_mask >> o.slot & 1)
            for (p = 0; p < s->pad; p++) row[p] = tkvi_outlier_byte(0, TKVI_NO_OUTLIER, p);
        else if (dead_mask >> tkvi_outlier_neighbour(o.slot) & 1) dead_mask |= (uint64_t)1 << o.slot;
    }
    tkvi_clear_tiles(s, dead_mask, bytes);
}

static void tkvi_a_meta(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *ops, float *scale,
                        float *zero) {
    const uint8_t *log = src + s->code_bytes, *offset = log + s->pad;
    const float *mean = s->mean ? s->mean : tkvi_zeros;
    int width, p = 0;
    ops->decode_log_scales(log, s->pad, s->top, scale); /* channels without bits are overwritten below */
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        int n = 4 * s->tiles.n[width], unit = width <= 6 ? tkvi_a_unit[width] : 1;
        if (n == 0) continue;
        ops->decode_zero_points(offset + p, scale + p, mean + p, 1.0f / (float)unit,
                                ((1 << width) - 1) * unit / 2, n, zero + p);
        p += n;
    }
    for (; p < s->pad; p++) {
        scale[p] = 0.0f;
        zero[p] = tkvi_f32(tkvi_f16_to_f32((uint16_t)(log[p] | offset[p] << 8)) + mean[p]);
    }
}

static void tkvi_a_decode(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first, int n,
                          float *x, size_t stride) {
    const tkvi_outlier o = tkvi_outlier_of(s, src);
    int p;
    tkvi_decode_tiles(s, ops, src, first, n, x, stride);
    for (p = 0; p < s->pad && o.slot >= first && o.slot < first + n; p++) {
        const int channel = tkvi_channel(s, p);
        if (channel < s->dim)
            x[(size_t)(o.slot - first) * stride + (size_t)channel] =
                tkvi_outlier_value(o.row[p], o.half_step, s->mean ? s->mean[p] : 0.0f);
    }
}

#endif /* TKVI_FORMATS_A_H */
