/*
 * formats/squat.h - SQUAT4, SQUAT2: keys whose quantization errors are nearly orthogonal to the queries. K only.
 * SQuat (arXiv 2503.24358, section 3). Bytes and decoding are those of KIVI4 and KIVI2; only the encoder differs:
 *
 *     P = I + eta C / (tr C / dim)          C: mean of q q^T over the head group's queries (learn/query_stats.h)
 *     for each 16 channels:                 code them as KIVI does; error e = decoded - value
 *         later channels += U e             U = - P_ff^-1 P_fb   f: the later channels, b: these 16
 *
 * This makes e^T P e of the whole token small: the part of the error that a query sees, and the error itself. It is
 * error feedback as in GPTQ (arXiv 2210.17323), with the queries in the place of the calibration data.
 *
 * The paper cuts C to its largest directions, and adds lambda Q^T Q with lambda .001. C itself needs no
 * eigenvectors, and eta does not depend on the number of queries. The result is flat between eta 1 and 10. Blocks
 * of 16 are better than the authors' 64 (cfg.format.squat_block) at the same cost.
 *
 * U is fp16: for each channel, its factors on all channels after its block, channel after channel. Products and
 * their sums are computed in different functions, so that no compiler fuses them. So U is the same on every
 * machine.
 */
#ifndef TKVI_FORMATS_SQUAT_H
#define TKVI_FORMATS_SQUAT_H

#include "formats/kivi.h"

#define TKVI_SQUAT_ETA 5.0

/* >>U */
static size_t tkvi_feedback_count(int dim, int unit) {
    int from, n = 0;
    for (from = 0; from + unit < dim; from += unit) n += unit * (dim - from - unit);
    return (size_t)n;
}

/* Element i <= j of a symmetric matrix, packed by columns. */
static int tkvi_packed(int i, int j) { return j * (j + 1) / 2 + i; }

static TKVI_NOINLINE void tkvi_multiply_by(float *dst, const float *x, float by, int n) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f32(x[i] * by);
}

/* Replaces P by R, upper triangular, with P = R R^T. Cholesky runs from the end, so that R_ff belongs to P_ff. */
static void tkvi_factor(float *p, int dim) {
    int i, j, k;
    for (j = dim - 1; j >= 0; j--) {
        float *column = p + tkvi_packed(0, j), root;
        for (k = j + 1; k < dim; k++) {
            const float *r = p + tkvi_packed(0, k);
            float product[TKV_MAX_HEAD_DIM];
            tkvi_multiply_by(product, r, r[j], j + 1);
            for (i = 0; i <= j; i++) column[i] = tkvi_f32(column[i] - product[i]);
        }
        root =
            tkvi_f32(sqrtf(column[j] > 1e-3f ? column[j] : 1e-3f)); /* P >= I: only rounding comes near 0 */
        for (i = 0; i < j; i++) column[i] = tkvi_f32(column[i] / root);
        column[j] = root;
    }
}

/* Replaces P by U. Element (c, f) is the factor of the error of c on channel f of a later block; others are
 * undefined. */
static void tkvi_feedback_from(float *p, int dim, int unit) {
    int from, c, f, k;
    tkvi_factor(p, dim);
    for (from = 0; from + unit < dim; from += unit)
        for (c = from; c < from + unit; c++) { /* R_ff^T u = -R_cf */
            float u[TKV_MAX_HEAD_DIM], product[TKV_MAX_HEAD_DIM];
            int end = from + unit;
            for (f = end; f < dim; f++) {
                float *r = p + tkvi_packed(0, f), sum = -r[c];
                tkvi_multiply(product, r + end, u + end, f - end);
                for (k = 0; k < f - end; k++) sum = tkvi_f32(sum - product[k]);
                r[c] = u[f] = tkvi_f32(sum / r[f]);
            }
        }
}

static void tkvi_feedback_store(const float *p, int dim, int unit, uint16_t *u) {
    int from, c, f;
    for (from = 0; from + unit < dim; from += unit)
        for (c = from; c < from + unit; c++)
            for (f = from + unit; f < dim; f++) *u++ = tkvi_f32_to_f16(p[tkvi_packed(c, f)]);
}

/* >>encoder */
/* Adds the errors of channels c .. end-1 to all channels from `end` on, in n rows. Returns the next place in u. */
static const uint16_t *tkvi_feed_back(float *x, int stride, int n, int c, int end, int dim,
                                      const uint16_t *u) {
    int f, t, later = dim - end;
    for (; c < end; c++) {
        float factor[TKV_MAX_HEAD_DIM], product[TKV_MAX_HEAD_DIM];
        for (f = 0; f < later; f++) factor[f] = tkvi_f16_to_f32(*u++);
        for (t = 0; t < n; t++) {
            float *row = x + t * stride;
            tkvi_multiply_by(product, factor, row[c], later);
            for (f = 0; f < later; f++) row[end + f] = tkvi_f32(row[end + f] + product[f]);
        }
    }
    return u;
}

static void tkvi_squat_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride,
                              int n, uint8_t *dst) {
    tkvi_codes code;
    float y[TKVI_BLOCK * 256]; /* values; for coded channels their errors */
    int g, c, t, from;
    if (!s->head_state) {
        tkvi_kivi_encode(s, ops, x, stride, n, dst);
        return;
    }
    memset(dst, 0, s->bytes);
    memset(code, 0, sizeof code);
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++)
            y[t * s->pad + c] = tkvi_clampf(x[(size_t)t * stride + (size_t)c], -TKVI_F16_MAX, TKVI_F16_MAX);
    for (g = 0; g < s->groups && g * s->group < n; g++) {
        const uint16_t *u = (const uint16_t *)s->head_state;
        int first = g * s->group, count = tkvi_min(n - first, s->group);
        for (from = 0; from < s->dim; from += s->options->squat_block) {
            int end = tkvi_min(s->dim, from + s->options->squat_block);
            for (c = from; c < end; c++) {
                const uint8_t *meta = dst + s->code_bytes + 2 * (g * s->pad + c);
                float scale, zero;
                tkvi_kivi_column(s, y, (size_t)s->pad, n, g, c, code, dst + s->code_bytes);
                scale = tkvi_f16_to_f32(tkvi_load16(meta));
                zero = tkvi_f16_to_f32(tkvi_load16(meta + 2 * s->groups * s->pad));
                for (t = first; t < first + count; t++) {
                    float product = tkvi_f32(scale * (float)*tkvi_k_code(code, c, t)); /* exact */
                    y[t * s->pad + c] = tkvi_f32(tkvi_f32(product + zero) - y[t * s->pad + c]);
                }
            }
            if (end < s->dim) u = tkvi_feed_back(y + first * s->pad, s->pad, count, from, end, s->dim, u);
        }
    }
    tkvi_pack(s, ops, code, dst);
}

/* >>learning */
static size_t tkvi_squat_head_bytes(const tkv_format_options *o, const tkvi_geometry *g) {
    return tkvi_feedback_count(g->head_dim, o->squat_block) * sizeof(uint16_t);
}

/* Computes U of one head: P = I + eta C / (tr C / dim). Sums of 0 leave U as it is. */
static void tkvi_squat_learn(const tkv_format_options *o, const tkvi_geometry *g, const int64_t *products,
                             float *work, void *head) {
    int dim = g->head_dim, i, j;
    double trace = 0.0;
    for (i = 0; i < dim; i++) trace += (double)products[tkvi_packed(i, i)];
    if (!(trace > 0.0)) return;
    for (j = 0; j < dim; j++)
        for (i = 0; i <= j; i++) {
            double c = (double)products[tkvi_packed(i, j)] * (TKVI_SQUAT_ETA * (double)dim) / trace;
            work[tkvi_packed(i, j)] = (float)(i == j ? 1.0 + c : c);
        }
    tkvi_feedback_from(work, dim, o->squat_block);
    tkvi_feedback_store(work, dim, o->squat_block, (uint16_t *)head);
}

/* The state of a head is U; zeros until it is known. */
static const tkvi_family tkvi_squat_family = {TKVI_HAS_SQUAT ? NULL : "TKV_NO_SQUAT leaves this format out",
                                              "SQUAT formats take heads of at most 256 channels",
                                              NULL,
                                              NULL,
                                              4,
                                              0,
                                              TKVI_IF(TKVI_HAS_SQUAT, tkvi_squat_head_bytes),
                                              TKVI_IF(TKVI_HAS_SQUAT, tkvi_squat_learn),
                                              NULL,
                                              NULL,
                                              NULL,
                                              NULL,
                                              NULL};

#endif /* TKVI_FORMATS_SQUAT_H */
