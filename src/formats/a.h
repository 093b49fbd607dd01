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
 * Encoding a column cuts the residuals x - mean to 12 bits between their smallest and largest. All sums after that
 * are integers, so every machine gets the same result. The encoder tries several ranges, and takes the codes that
 * correlate best with the values. The scale then makes decoded values unbiased, cov(x^, x) = var(x). In channels
 * of one bit it makes the variances agree. A scale of least squares, or of the range, would tilt the softmax
 * between this tier and the exact ones (bench/LOG.md). The offset restores the mean.
 *
 * Step by step. Numbers are floats unless a step names double, and each operation is rounded. n tokens,
 * top = 2^bits - 1:
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
 * (core/allocate.h).
 *
 * Bytes: | tiles, widest first | scale [pad] | offset [pad] |   a channel without bits: fp16 low byte | high byte
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
    if (!s->has_share) tkvi_share_equally(s->format->bits, s->dim, s->pad, &s->tiles);
    s->groups = 1;
    s->group = TKVI_BLOCK;
    s->code_bytes = tkvi_tiles_bytes(&s->tiles);
    s->meta_bytes = (size_t)(2 * s->pad);
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
    int16_t channel[TKV_MAX_HEAD_DIM];
    uint8_t widths[TKV_MAX_HEAD_DIM], log[TKV_MAX_HEAD_DIM], by[TKV_MAX_HEAD_DIM];
    float mean[TKV_MAX_HEAD_DIM], middle[TKV_MAX_HEAD_DIM];
    uint8_t *scale = dst + s->code_bytes, *offset = scale + s->pad;
    uint8_t *at = dst;
    int width, p, first, end, l;
    tkvi_columns c;
    memset(dst, 0, s->bytes);
    for (width = TKVI_MAX_WIDTH, p = 0; width >= 0; width--)
        for (end = width ? p + 4 * s->tiles.n[width] : s->pad; p < end; p++) {
            int from = tkvi_channel(s, p);
            channel[p] = (int16_t)from;
            widths[from] = (uint8_t)width;
            mean[from] = s->mean ? s->mean[p] : 0.0f;
        }
    c.stride = stride;
    c.n = n;
    for (first = 0; first < s->pad; first += TKVI_LANES) {
        c.x = x + first;
        c.lanes = tkvi_min(TKVI_LANES, s->dim - first);
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

#endif /* TKVI_FORMATS_A_H */
