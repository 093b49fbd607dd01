/*
 * white_bounds.c - white-box test of the error bounds in chapter 12 of the manual, by search: it changes blocks of
 * inputs where that raises the error as a share of its bound, and begins again where nothing does.
 *
 *     build/tests/white_bounds                     some thousand blocks a format
 *     build/tests/white_bounds --seconds 120       for so long a format; prints a table (bench/BOUNDS.md, make bounds)
 *
 * Formats are sides of their own, since widths of channels, tables and rotations are internal (white.h).
 */
#include "white.h"
#include "kit.h"

#include <math.h>

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    MOST_VALUES = 160 * 64,
    MOST_BYTES = 4 * MOST_VALUES + 4096,
    PATIENCE = 300
};

static struct {
    double seconds;          /* of each search; 0: `n_blocks` blocks */
    int n_blocks, n_attends; /* of formats and of attention */
    const char *only;        /* searches the rows with this in their names */
} limits;

static double smaller_of(double a, double b) { return a < b ? a : b; }

static double larger_of(double a, double b) { return a > b ? a : b; }

static double size_of(float x) { return fabs((double)x); }

/* >>inputs of a search */
typedef enum input_unit { /* what shares a scale */
                          BY_TOKEN,
                          BY_CHANNEL,
                          ROTATED /* tokens; changes are those of the rotated token too */
} input_unit;

typedef struct input {
    float x[MOST_VALUES]; /* [n][dim] */
    int n, dim;
    input_unit unit;
    double largest; /* |x| is at most this, and with ROTATED the norm of a token */
} input;

/* A value and the distance to the next one of a unit. */
typedef struct strip {
    float *first;
    int n, stride;
} strip;

static strip strip_of(input *in_, int at, int by_channel) {
    strip s;
    s.first = in_->x + (by_channel ? at % in_->dim : at / in_->dim * in_->dim);
    s.n = by_channel ? in_->n : in_->dim;
    s.stride = by_channel ? in_->dim : 1;
    return s;
}

static float *value_at(const strip *s, int i) { return s->first + i * s->stride; }

static float random_size(tkv_rng *r, double largest) {
    const double octaves = log2(larger_of(largest, 1.0));
    const double e =
        tkv_rng_below(r, 3) ? (tkv_rng_uniform(r) - 0.5) * 4.0 : tkv_rng_uniform(r) * (octaves + 20.0) - 20.0;
    return (float)(tkv_rng_gauss(r) * pow(2.0, smaller_of(e, octaves)));
}

/* One change of value `i` of a strip. */
static void change_value(tkv_rng *r, const strip *s, int i, double largest) {
    static const int tops[] = {1, 2, 3, 5, 7, 12, 15, 31, 63, 127, 255};
    float *x = value_at(s, i), a = *value_at(s, tkv_rng_below(r, s->n)),
          b = *value_at(s, tkv_rng_below(r, s->n));
    const int top = tops[tkv_rng_below(r, COUNT(tops))];
    int e;
    uint32_t bits;
    switch (tkv_rng_below(r, 11)) {
    case 0: *x = random_size(r, largest); break;
    case 1: *x = a; break;
    case 2: *x = (float)(tkv_rng_below(r, 3) - 1) * (float)largest; break;
    case 3: /* between two steps of a grid from a to b */
        *x = (float)((double)a + ((double)b - (double)a) * (tkv_rng_below(r, top) + 0.5) / top);
        break;
    case 4: *x = (float)((double)a * (tkv_rng_below(r, 2 * top) + 0.5) / top); break;
    case 5: *x *= (float)(1.0 + tkv_rng_gauss(r) * pow(2.0, -tkv_rng_below(r, 20))); break;
    case 6: /* the next floats */
        memcpy(&bits, x, sizeof bits);
        bits += (uint32_t)(tkv_rng_below(r, 9) - 4);
        memcpy(x, &bits, sizeof bits);
        if (!tkv_test_is_finite((double)*x)) *x = 0.0f;
        break;
    case 7: /* a power of two, and near those */
        (void)frexp((double)*x, &e);
        *x = (float)ldexp(*x < 0.0f ? -1.0 : 1.0, e > -140 ? e : -140);
        if (tkv_rng_below(r, 2)) *x *= (float)(1.0 + ldexp(1.0, -1 - tkv_rng_below(r, 12)));
        break;
    case 8: *x = -*x; break;
    case 9: *x = 0.0f; break;
    default: *x += (float)(tkv_rng_gauss(r) * (double)a * pow(2.0, -tkv_rng_below(r, 12)));
    }
}

/* One change of a whole strip. */
static void change_strip(tkv_rng *r, const strip *s, const strip *other, double largest) {
    const float by = (float)ldexp(tkv_rng_uniform(r) + 0.5, tkv_rng_below(r, 9) - 4),
                add = random_size(r, largest);
    int kind = tkv_rng_below(r, 6), one = tkv_rng_below(r, s->n), i;
    for (i = 0; i < s->n; i++) {
        float *x = value_at(s, i);
        switch (kind) {
        case 0: *x *= by; break;
        case 1: *x = i < other->n ? *value_at(other, i) : 0.0f; break;
        case 2: *x = i == one ? *x : add; break;
        case 3: *x += add; break;
        case 4: *x = i == one ? *x : *x * 0.001f; break;
        default: *x = random_size(r, largest);
        }
    }
}

/* Keeps the inputs within those that the bound is for. */
static void limit_tokens(input *in_, int from, int end) {
    int t, c;
    for (t = from; t < end; t++) {
        float *row = in_->x + t * in_->dim;
        double norm = 0.0, most = 0.0;
        for (c = 0; c < in_->dim; c++) {
            if (!tkv_test_is_finite((double)row[c])) row[c] = 0.0f;
            norm += (double)row[c] * (double)row[c];
            most = larger_of(most, size_of(row[c]));
        }
        norm = in_->unit == ROTATED ? sqrt(norm) : 0.0;
        for (c = 0; c < in_->dim && norm > in_->largest * 0.9999; c++)
            row[c] = (float)((double)row[c] * (in_->largest * 0.9998 / norm));
        for (c = 0; c < in_->dim && most > in_->largest; c++)
            row[c] = (float)larger_of(-in_->largest, smaller_of(in_->largest, (double)row[c]));
    }
}

static void limit_input(input *in_) { limit_tokens(in_, 0, in_->n); }

static void change_input(tkv_rng *r, input *in_) {
    int k, changes = 1 + tkv_rng_below(r, 3), changed[3], n_changed = 0, n_tokens = 0;
    for (k = 0; k < changes; k++) {
        const int at = tkv_rng_below(r, in_->n * in_->dim), other = tkv_rng_below(r, in_->n * in_->dim);
        const int across =
            tkv_rng_below(r, 8) == 0 && in_->unit != ROTATED; /* a strip of the other direction */
        const int by_channel = (in_->unit == BY_CHANNEL) != across;
        const strip s = strip_of(in_, at, by_channel), o = strip_of(in_, other, by_channel);
        const int rotated = in_->unit == ROTATED && tkv_rng_below(r, 4);
        if (rotated) tkvi_rotate(s.first, in_->dim);
        if (tkv_rng_below(r, 12))
            change_value(r, &s, by_channel ? at / in_->dim : at % in_->dim, in_->largest);
        else change_strip(r, &s, &o, in_->largest);
        if (rotated) tkvi_rotate_back(s.first, in_->dim);
        if (by_channel) n_tokens = in_->n;
        else changed[n_changed++] = at / in_->dim;
    }
    if (n_tokens) limit_input(in_);
    else
        for (k = 0; k < n_changed; k++) limit_tokens(in_, changed[k], changed[k] + 1);
}

static void begin_input(tkv_rng *r, input *in_) {
    int i, kind = tkv_rng_below(r, 4), n = in_->n * in_->dim;
    const double spread = pow(2.0, tkv_rng_uniform(r) * log2(larger_of(in_->largest, 1.0)));
    for (i = 0; i < n; i++) {
        in_->x[i] = kind == 0   ? random_size(r, in_->largest)
                    : kind == 1 ? (float)(spread * tkv_rng_gauss(r))
                    : kind == 2 ? (float)(spread * (tkv_rng_uniform(r) - 0.5))
                                : 0.0f;
        if (kind == 3 && tkv_rng_below(r, 20) == 0) in_->x[i] = (float)(spread * tkv_rng_gauss(r));
    }
    limit_input(in_);
}

/* >>formats */
typedef struct share_of_head {
    tkvi_share share;
    uint8_t order[TKV_MAX_HEAD_DIM + TKV_MAX_HEAD_DIM / 8 + 8];
    float mean[TKV_MAX_HEAD_DIM];
} share_of_head;

struct bounds_row;
typedef double (*ratio_of)(const struct bounds_row *row, const tkvi_side *side, const input *in_,
                           const float *y, const uint8_t *coded);

/* A row of the manual's table, or a part of one. */
typedef struct bounds_row {
    const char *name;
    tkv_format format;
    tkv_side side;
    int dim, n; /* tokens of a block; 0: 2 to 64 */
    int bits;
    input_unit unit;
    double largest;
    ratio_of ratio;
    double least; /* the search must find this share of the bound, else it looks in wrong places */
    tkv_format_options options; /* zero: defaults */
} bounds_row;

static double root_mean_square(const double *e, int n) {
    double sum = 0.0;
    int i;
    for (i = 0; i < n; i++) sum += e[i] * e[i];
    return sqrt(sum / n);
}

static double norm_of(const float *x, int n) {
    double sum = 0.0;
    int i;
    for (i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

static double ratio_exact(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                          const uint8_t *coded) {
    double worst = 0.0;
    int i;
    (void)side, (void)coded;
    for (i = 0; i < in_->n * in_->dim; i++) {
        const double x = size_of(in_->x[i]), e = fabs((double)in_->x[i] - (double)y[i]);
        const double bound = row->bits == 32   ? 0.0
                             : row->bits == 11 ? larger_of(x / 2049, ldexp(1.0, -25))
                                               : larger_of(x / 257, ldexp(1.0, -134));
        worst = larger_of(worst, bound > 0.0 ? e / bound : e > 0.0 ? 1e9 : 0.0);
    }
    return worst;
}

/* Values that share a scale: [from, from + n) of a token, or tokens of a channel. */
typedef struct group_of_values {
    double low, high, most, mean;
} group_of_values;

static group_of_values measure_group(const float *x, int n, int stride) {
    group_of_values g;
    int i;
    g.low = g.high = (double)x[0];
    g.mean = 0.0;
    for (i = 0; i < n; i++) {
        g.low = smaller_of(g.low, (double)x[i * stride]);
        g.high = larger_of(g.high, (double)x[i * stride]);
        g.mean += (double)x[i * stride] / n;
    }
    g.most = larger_of(fabs(g.low), fabs(g.high));
    return g;
}

static double worst_error(const float *x, const float *y, int n, int stride) {
    double worst = 0.0;
    int i;
    for (i = 0; i < n; i++) worst = larger_of(worst, fabs((double)x[i * stride] - (double)y[i * stride]));
    return worst;
}

static double deviation_of(const float *x, int n, int stride, double mean) {
    double sum = 0.0;
    int i;
    for (i = 0; i < n; i++) sum += ((double)x[i * stride] - mean) * ((double)x[i * stride] - mean);
    return sqrt(sum / n);
}

static double half_step(double range, int bits) { return range / (ldexp(2.0, bits) - 2.0); }

/* e <= R / (2^(b+1) - 2) + M / 2048 + 2^(b-25); with CLIP .28 R in the place of the first term */
static double ratio_of_group(const bounds_row *row, const float *x, const float *y, int n, int stride) {
    const group_of_values g = measure_group(x, n, stride);
    const double range = g.high - g.low, fp16 = g.most / 2048 + ldexp(1.0, row->bits - 25);
    double error = worst_error(x, y, n, stride), bound = half_step(range, row->bits) + fp16;
    if (row->options.fit & TKV_FIT_CLIP) bound = larger_of(bound, 0.28 * range + fp16);
    if (row->options.fit & TKV_FIT_NORM) {
        double e[TKV_MAX_HEAD_DIM];
        int i;
        for (i = 0; i < n; i++) e[i] = (double)x[i * stride] - (double)y[i * stride];
        error = root_mean_square(e, n);
        bound = 1.5 * deviation_of(x, n, stride, g.mean) + half_step(range, row->bits) + fp16;
    }
    return error / bound;
}

static double ratio_kivi(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                         const uint8_t *coded) {
    double worst = 0.0;
    int c, t, g;
    (void)coded;
    for (c = 0; c < in_->dim && row->side == TKV_K; c++)
        for (g = 0; g < in_->n; g += side->group)
            worst = larger_of(worst, ratio_of_group(row, in_->x + g * in_->dim + c, y + g * in_->dim + c,
                                                    tkvi_min(side->group, in_->n - g), in_->dim));
    for (t = 0; t < in_->n && row->side == TKV_V; t++)
        for (g = 0; g < in_->dim; g += side->group)
            worst = larger_of(worst, ratio_of_group(row, in_->x + t * in_->dim + g, y + t * in_->dim + g,
                                                    tkvi_min(side->group, in_->dim - g), 1));
    return worst;
}

/* SUBSPACE without rotation: the same, in parts of a token. */
static double ratio_parts(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                          const uint8_t *coded) {
    double worst = 0.0;
    int t, g;
    (void)coded;
    for (t = 0; t < in_->n; t++)
        for (g = 0; g < side->groups; g++) {
            const int from = in_->dim * g / side->groups, end = in_->dim * (g + 1) / side->groups;
            worst = larger_of(worst, ratio_of_group(row, in_->x + t * in_->dim + from,
                                                    y + t * in_->dim + from, end - from, 1));
        }
    return worst;
}

/* Rotated tokens: the root mean square of a token's errors against its norm N, `by` N + `of_rms` N / sqrt(dim) + add. */
static double ratio_of_token(const input *in_, const float *y, int t, double by, double of_rms, double add) {
    const float *x = in_->x + t * in_->dim;
    double e[TKV_MAX_HEAD_DIM], norm = norm_of(x, in_->dim);
    int c;
    for (c = 0; c < in_->dim; c++) e[c] = (double)x[c] - (double)y[t * in_->dim + c];
    return root_mean_square(e, in_->dim) / (by * norm + of_rms * norm / sqrt((double)in_->dim) + add);
}

static double ratio_subspace(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                             const uint8_t *coded) {
    const double by = 1.0 / (ldexp(1.0, row->bits) - 1.0) / sqrt(2.0 * side->groups) + 1.0 / 2048;
    double worst = 0.0;
    int t;
    (void)coded;
    for (t = 0; t < in_->n; t++)
        worst = larger_of(worst, ratio_of_token(in_, y, t, by, 0.0, ldexp(1.0, row->bits - 25)));
    return worst;
}

/* INT: e <= 1.001 M / (2^b - 2) + 2^(b-26). Rotated: N in the place of M, for the root mean square. */
static double ratio_int(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                        const uint8_t *coded) {
    const double by = 1.001 / (ldexp(1.0, row->bits) - 2.0), add = ldexp(1.0, row->bits - 26);
    double worst = 0.0;
    int t, g;
    (void)coded;
    for (t = 0; t < in_->n; t++)
        for (g = 0; g < in_->dim && !row->options.rotate; g += side->group) {
            const float *x = in_->x + t * in_->dim + g;
            const int n = tkvi_min(side->group, in_->dim - g);
            worst = larger_of(worst, worst_error(x, y + t * in_->dim + g, n, 1) /
                                         (by * measure_group(x, n, 1).most + add));
        }
    for (t = 0; t < in_->n && row->options.rotate; t++)
        worst = larger_of(worst, ratio_of_token(in_, y, t, by, 1e-5, add));
    return worst;
}

/* FP8: e <= the larger of |x| / (2^(m+1) + 1) and M 2^-low, plus top 2^-25. */
static double ratio_fp8(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                        const uint8_t *coded) {
    const int is_e4m3 = row->format == TKV_FP8_E4M3;
    const double part = is_e4m3 ? 1 / 16.9 : 1 / 8.9, low = is_e4m3 ? 1 / 450000.0 : ldexp(1.0, -32);
    const double add = ldexp(1.0, is_e4m3 ? -22 : -21);
    double worst = 0.0;
    int t, c;
    (void)coded, (void)side;
    for (t = 0; t < in_->n; t++) {
        const float *x = in_->x + t * in_->dim;
        const double most = measure_group(x, in_->dim, 1).most;
        for (c = 0; c < in_->dim && !row->options.rotate; c++)
            worst = larger_of(worst, fabs((double)x[c] - (double)y[t * in_->dim + c]) /
                                         (larger_of(size_of(x[c]) * part, most * low) + add));
        if (row->options.rotate) worst = larger_of(worst, ratio_of_token(in_, y, t, low, part, add));
    }
    return worst;
}

/* FP4: e <= the larger of |x| / 4.6 and P / 22, plus M / 450000 + 2^-19. P: the largest of 16 channels, M: of the token.
 * Rotated: .28 root mean squares of the token, plus N / 450000 + 2^-19. */
static double ratio_fp4(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                        const uint8_t *coded) {
    const double add = ldexp(1.0, -19);
    double worst = 0.0;
    int t, c;
    (void)coded, (void)side;
    for (t = 0; t < in_->n; t++) {
        const float *x = in_->x + t * in_->dim;
        const double most = measure_group(x, in_->dim, 1).most;
        for (c = 0; c < in_->dim && !row->options.rotate; c++) {
            const int part = c / 16 * 16;
            const double largest = measure_group(x + part, tkvi_min(16, in_->dim - part), 1).most;
            worst =
                larger_of(worst, fabs((double)x[c] - (double)y[t * in_->dim + c]) /
                                     (larger_of(size_of(x[c]) / 4.6, largest / 22) + most / 450000 + add));
        }
        if (row->options.rotate) worst = larger_of(worst, ratio_of_token(in_, y, t, 1 / 450000.0, 0.28, add));
    }
    return worst;
}

/* KVQUANT without a table: e <= g R + M / 1024 + 2^-22; R of V without the values that have slots. */
static double range_without_slots(const float *x, int n, int slots) {
    double sorted[TKV_MAX_HEAD_DIM], least;
    int i, k;
    for (i = 0; i < n; i++) {
        for (k = i; k > 0 && sorted[k - 1] > (double)x[i]; k--) sorted[k] = sorted[k - 1];
        sorted[k] = (double)x[i];
    }
    least = sorted[n - 1] - sorted[0];
    for (i = 0; i <= slots; i++) least = smaller_of(least, sorted[n - 1 - slots + i] - sorted[i]);
    return least;
}

static double ratio_kvquant(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                            const uint8_t *coded) {
    static const double normal[] = {0.173, 0.078, 0.048};
    const int is_uniform = row->options.kvquant & TKV_KVQUANT_UNIFORM;
    const double by = is_uniform ? half_step(1.0, row->bits) : normal[row->bits - 2], add = ldexp(1.0, -22);
    double worst = 0.0;
    int t, c;
    (void)coded;
    for (c = 0; c < in_->dim && row->side == TKV_K; c++) {
        const group_of_values g = measure_group(in_->x + c, in_->n, in_->dim);
        worst = larger_of(worst, worst_error(in_->x + c, y + c, in_->n, in_->dim) /
                                     (by * (g.high - g.low) + g.most / 1024 + add));
    }
    for (t = 0; t < in_->n && row->side == TKV_V; t++) {
        const float *x = in_->x + t * in_->dim;
        worst = larger_of(worst, worst_error(x, y + t * in_->dim, in_->dim, 1) /
                                     (by * range_without_slots(x, in_->dim, side->slots) +
                                      measure_group(x, in_->dim, 1).most / 1024 + add));
    }
    return worst;
}

/* R: root mean square of a token's errors <= 1.03 N / (2^b - 1) + .03 N / sqrt(dim); R15: 1.03 N / 4 in the place of
 * the first term. For norms of 1 to 100 without a table. */
static double ratio_r(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                      const uint8_t *coded) {
    static const double factors[] = {0.3, 1.0, 1.0 / 3, 0.15, 0.1}; /* 0: 1.5 bits */
    const double by = factors[row->bits];
    double worst = 0.0;
    int t;
    (void)coded, (void)side;
    for (t = 0; t < in_->n; t++)
        if (norm_of(in_->x + t * in_->dim, in_->dim) >= 1.0)
            worst = larger_of(worst, ratio_of_token(in_, y, t, 1.03 * by, 0.03, 0.0));
    return worst;
}

/* A: root mean square of a channel's errors, without the token that has a row <= c sigma + |m| / 14. m: the channel's
 * mean less the table's. For ranges of .5 to 200 without a table. */
static const double a_factors[] = {1.001, 1.5, 2.2, 1.0, 0.6, 0.6, 0.6};

static double ratio_a(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                      const uint8_t *coded) {
    const int slot = tkvi_outlier_of(side, coded).slot;
    double worst = 0.0;
    int t, c;
    for (c = 0; c < in_->dim; c++) {
        float x[BLOCK];
        double e[BLOCK], sigma;
        group_of_values g;
        for (t = 0; t < in_->n; t++) {
            const int from = t == slot ? tkvi_outlier_neighbour(slot) : t;
            x[t] = in_->x[from * in_->dim + c];
            e[t] = (double)x[t] - (double)y[from * in_->dim + c];
        }
        g = measure_group(x, in_->n, 1);
        sigma = deviation_of(x, in_->n, 1, g.mean);
        if (g.high - g.low < 0.5) continue;
        worst = larger_of(worst,
                          root_mean_square(e, in_->n) / (a_factors[row->bits] * sigma + fabs(g.mean) / 14));
    }
    return worst;
}

/* The row of A's outlier: e <= M / 118. */
static double ratio_a_row(const bounds_row *row, const tkvi_side *side, const input *in_, const float *y,
                          const uint8_t *coded) {
    const int slot = tkvi_outlier_of(side, coded).slot;
    double most;
    (void)row;
    if (slot == TKVI_NO_OUTLIER) return 0.0;
    most = measure_group(in_->x + slot * in_->dim, in_->dim, 1).most;
    if (most < 0.5) return 0.0;
    return worst_error(in_->x + slot * in_->dim, y + slot * in_->dim, in_->dim, 1) / (most / 118);
}

#define GROUP_(size, fit)                                                                                    \
    { size, 0, fit, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define ROTATE_                                                                                              \
    { 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define BITS_(n)                                                                                             \
    { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n, 0, 0 }
#define PARTS_(n, unrotated)                                                                                 \
    { 0, 0, 0, 0, 0, 0, n, 0, 0, 0, 0, unrotated, 0 }
#define KVQUANT_(flags)                                                                                      \
    { 0, 0, 0, 0, 0, 0, 0, flags, 0, 0, 0, 0, 0 }
#define PLAIN_ GROUP_(0, 0)
static const bounds_row rows[] = {
    {"f32", TKV_F32, TKV_K, 16, 1, 32, BY_TOKEN, 3.4e38, ratio_exact, 0, PLAIN_},
    {"f16", TKV_F16, TKV_K, 16, 1, 11, BY_TOKEN, 65504, ratio_exact, 0.9, PLAIN_},
    {"bf16", TKV_BF16, TKV_K, 16, 1, 8, BY_TOKEN, 3.38e38, ratio_exact, 0.9, PLAIN_},
    {"q8 K", TKV_Q8, TKV_K, 16, 0, 8, BY_CHANNEL, 65504, ratio_kivi, 0.6, PLAIN_},
    {"q8 V", TKV_Q8, TKV_V, 80, 2, 8, BY_TOKEN, 65504, ratio_kivi, 0.6, PLAIN_},
    {"kivi4 K", TKV_KIVI4, TKV_K, 16, 0, 4, BY_CHANNEL, 65504, ratio_kivi, 0.6, PLAIN_},
    {"kivi4 K, groups of 32", TKV_KIVI4, TKV_K, 16, 0, 4, BY_CHANNEL, 65504, ratio_kivi, 0.6, GROUP_(32, 0)},
    {"kivi4 V", TKV_KIVI4, TKV_V, 80, 2, 4, BY_TOKEN, 65504, ratio_kivi, 0.6, PLAIN_},
    {"kivi4 V, CLIP", TKV_KIVI4, TKV_V, 64, 1, 4, BY_TOKEN, 65504, ratio_kivi, 0.4, GROUP_(0, TKV_FIT_CLIP)},
    {"kivi3 K", TKV_KIVI3, TKV_K, 16, 0, 3, BY_CHANNEL, 65504, ratio_kivi, 0.6, PLAIN_},
    {"kivi2 K", TKV_KIVI2, TKV_K, 16, 0, 2, BY_CHANNEL, 65504, ratio_kivi, 0.6, PLAIN_},
    {"kivi2 V", TKV_KIVI2, TKV_V, 80, 2, 2, BY_TOKEN, 65504, ratio_kivi, 0.6, PLAIN_},
    {"kivi2 V, CLIP", TKV_KIVI2, TKV_V, 64, 1, 2, BY_TOKEN, 65504, ratio_kivi, 0.4, GROUP_(0, TKV_FIT_CLIP)},
    {"kivi2 V, NORM", TKV_KIVI2, TKV_V, 64, 1, 2, BY_TOKEN, 65504, ratio_kivi, 0.3, GROUP_(0, TKV_FIT_NORM)},
    {"squat4", TKV_SQUAT4, TKV_K, 16, 0, 4, BY_CHANNEL, 65504, ratio_kivi, 0.6, PLAIN_},
    {"squat2", TKV_SQUAT2, TKV_K, 16, 0, 2, BY_CHANNEL, 65504, ratio_kivi, 0.6, PLAIN_},
    {"int8", TKV_INT8, TKV_K, 80, 1, 8, BY_TOKEN, 65504, ratio_int, 0.6, PLAIN_},
    {"int4", TKV_INT4, TKV_V, 80, 1, 4, BY_TOKEN, 65504, ratio_int, 0.6, PLAIN_},
    {"int4 of 2 bits", TKV_INT4, TKV_V, 80, 1, 2, BY_TOKEN, 65504, ratio_int, 0.6, BITS_(2)},
    {"int8 rotated", TKV_INT8, TKV_K, 64, 1, 8, ROTATED, 65504, ratio_int, 0.2, ROTATE_},
    {"int4 rotated", TKV_INT4, TKV_K, 64, 1, 4, ROTATED, 65504, ratio_int, 0.2, ROTATE_},
    {"fp8-e4m3", TKV_FP8_E4M3, TKV_K, 64, 1, 8, BY_TOKEN, 65504, ratio_fp8, 0.6, PLAIN_},
    {"fp8-e4m3 rotated", TKV_FP8_E4M3, TKV_K, 64, 1, 8, ROTATED, 65504, ratio_fp8, 0.2, ROTATE_},
    {"fp8-e5m2", TKV_FP8_E5M2, TKV_K, 64, 1, 8, BY_TOKEN, 65504, ratio_fp8, 0.6, PLAIN_},
    {"fp4", TKV_FP4, TKV_K, 64, 1, 4, BY_TOKEN, 65504, ratio_fp4, 0.6, PLAIN_},
    {"fp4 rotated", TKV_FP4, TKV_K, 64, 1, 4, ROTATED, 65504, ratio_fp4, 0.2, ROTATE_},
    {"subspace4", TKV_SUBSPACE4, TKV_K, 64, 1, 4, ROTATED, 65504, ratio_subspace, 0.2, PLAIN_},
    {"subspace2", TKV_SUBSPACE2, TKV_K, 64, 1, 2, ROTATED, 65504, ratio_subspace, 0.2, PLAIN_},
    {"subspace2 unrotated", TKV_SUBSPACE2, TKV_V, 80, 1, 2, BY_TOKEN, 65504, ratio_parts, 0.6, PARTS_(3, 1)},
    {"kvquant4 K", TKV_KVQUANT4, TKV_K, 16, 0, 4, BY_CHANNEL, 32752, ratio_kvquant, 0.6, KVQUANT_(1)},
    {"kvquant3 K", TKV_KVQUANT3, TKV_K, 16, 0, 3, BY_CHANNEL, 32752, ratio_kvquant, 0.6, KVQUANT_(1)},
    {"kvquant2 K", TKV_KVQUANT2, TKV_K, 16, 0, 2, BY_CHANNEL, 32752, ratio_kvquant, 0.6, KVQUANT_(1)},
    {"kvquant4 V", TKV_KVQUANT4, TKV_V, 64, 1, 4, BY_TOKEN, 32752, ratio_kvquant, 0.6, PLAIN_},
    {"kvquant2 V", TKV_KVQUANT2, TKV_V, 64, 1, 2, BY_TOKEN, 32752, ratio_kvquant, 0.6, PLAIN_},
    {"kvquant3 V, UNIFORM", TKV_KVQUANT3, TKV_V, 64, 1, 3, BY_TOKEN, 32752, ratio_kvquant, 0.6,
     KVQUANT_(TKV_KVQUANT_UNIFORM)},
    {"r40", TKV_R40, TKV_V, 64, 1, 4, ROTATED, 100, ratio_r, 0.2, PLAIN_},
    {"r30", TKV_R30, TKV_V, 64, 1, 3, ROTATED, 100, ratio_r, 0.2, PLAIN_},
    {"r20", TKV_R20, TKV_V, 64, 1, 2, ROTATED, 100, ratio_r, 0.2, PLAIN_},
    {"r15", TKV_R15, TKV_V, 64, 1, 0, ROTATED, 100, ratio_r, 0.2, PLAIN_},
    {"r10", TKV_R10, TKV_V, 64, 1, 1, ROTATED, 100, ratio_r, 0.2, PLAIN_},
    {"a, channels of 6 bits", TKV_A40, TKV_K, 16, 0, 6, BY_CHANNEL, 100, ratio_a, 0.01, PLAIN_},
    {"a, channels of 5 bits", TKV_A40, TKV_K, 16, 0, 5, BY_CHANNEL, 100, ratio_a, 0.01, PLAIN_},
    {"a, channels of 4 bits", TKV_A40, TKV_K, 16, 0, 4, BY_CHANNEL, 100, ratio_a, 0.01, PLAIN_},
    {"a, channels of 3 bits", TKV_A40, TKV_K, 16, 0, 3, BY_CHANNEL, 100, ratio_a, 0.01, PLAIN_},
    {"a, channels of 2 bits", TKV_A40, TKV_K, 16, 0, 2, BY_CHANNEL, 100, ratio_a, 0.01, PLAIN_},
    {"a, channels of 1 bit", TKV_A40, TKV_K, 16, 0, 1, BY_CHANNEL, 100, ratio_a, 0.01, PLAIN_},
    {"a, channels of 0 bits", TKV_A40, TKV_K, 16, 0, 0, BY_CHANNEL, 100, ratio_a, 0.01, PLAIN_},
    {"a, the token with a row", TKV_A40, TKV_K, 16, 0, 4, BY_CHANNEL, 100, ratio_a_row, 0.5, PLAIN_},
};

static void make_side(const bounds_row *row, tkv_format_options *options, share_of_head *of,
                      tkvi_side *side) {
    const int is_a = row->ratio == ratio_a || row->ratio == ratio_a_row;
    *options = row->options;
    tkvi_fill_options(options);
    memset(of, 0, sizeof *of);
    if (is_a && row->bits) of->share.tiles.n[row->bits] = (uint16_t)(row->dim / 4);
    of->share.top = TKVI_LOG_TOP_DEFAULT;
    tkvi_side_make(side, &tkvi_formats[row->format], row->side, row->dim, BLOCK, options, 0, 0,
                   is_a ? &of->share : NULL);
}

/* >>the search */
typedef struct search_result {
    double worst;
    long n_blocks;
} search_result;

static search_result search_row(const bounds_row *row, uint64_t seed) {
    static input now, best;
    static float y[MOST_VALUES];
    static uint8_t coded[MOST_BYTES];
    tkv_format_options options;
    share_of_head of;
    tkvi_side side;
    search_result found;
    tkv_rng r = tkv_rng_seed(seed);
    double here = -1.0;
    int idle = PATIENCE;
    const clock_t start = clock();
    found.worst = 0.0;
    make_side(row, &options, &of, &side);
    for (found.n_blocks = 0;
         limits.seconds > 0.0 ? (double)(clock() - start) < limits.seconds * (double)CLOCKS_PER_SEC
                              : found.n_blocks < limits.n_blocks;
         found.n_blocks++) {
        double ratio;
        int i, finite = 1;
        if (idle >= PATIENCE) {
            now.dim = row->dim;
            now.n = row->n ? row->n : tkv_rng_below(&r, 3) ? BLOCK : 2 + tkv_rng_below(&r, BLOCK - 1);
            now.unit = row->unit;
            now.largest = row->largest;
            begin_input(&r, &now);
            here = -1.0;
            idle = 0;
        } else {
            now = best;
            change_input(&r, &now);
        }
        tkvi_encode_side(&side, &tkvi_simd_ops_scalar, now.x, (size_t)now.dim, now.n, coded);
        tkvi_decode_side(&side, coded, 0, now.n, y, (size_t)now.dim);
        for (i = 0; i < now.n * now.dim; i++) finite &= tkv_test_is_finite((double)y[i]);
        ratio = finite ? row->ratio(row, &side, &now, y, coded) : 1e9;
        idle = ratio > here * 1.0001 ? 0 : idle + 1;
        if (ratio >= here) {
            best = now;
            here = ratio;
        }
        found.worst = larger_of(found.worst, ratio);
    }
    return found;
}

TEST(formats_keep_their_bounds) {
    int i, n = 0;
    for (i = 0; i < COUNT(rows); i++) {
        search_result found;
        if (limits.only && !strstr(rows[i].name, limits.only)) continue;
        n++;
        found = search_row(&rows[i], (uint64_t)i + 1);
        CHECK_MSG(found.worst <= 1.0, "%s: %.6f of the bound", rows[i].name, found.worst);
        CHECK_MSG(found.worst >= rows[i].least, "%s: only %.6f of the bound", rows[i].name, found.worst);
        if (limits.seconds > 0.0)
            printf("| %s | %ld | %.4f |\n", rows[i].name, found.n_blocks, found.worst), fflush(stdout);
    }
    if (!n) SKIP("no row has this name");
}

/* >>attention: the largest error of an output value against tkv_attend_reference <= epsilon (1 + L) V. L: the largest
 * sum of |scale q_c k_c| of a key, V: the largest |value|; both of decoded K and V. */
enum { KEYS = 160, HEAD = 64 };

typedef struct attend_row {
    const char *name;
    tkv_format_pair pair;
    int precise;
    double largest; /* of K and V */
    double epsilon;
} attend_row;

static const attend_row attend_rows[] = {
    {"f32", {TKV_F32, TKV_F32}, 0, 65504, 1e-5},
    {"f16", {TKV_F16, TKV_F16}, 0, 65504, 1e-5},
    {"bf16", {TKV_BF16, TKV_BF16}, 0, 65504, 1e-5},
    {"int4", {TKV_INT4, TKV_INT4}, 0, 65504, 1e-5}, /* decoded before products */
    {"q8, precise", {TKV_Q8, TKV_Q8}, 1, 65504, 5e-3},
    {"kivi4, precise", {TKV_KIVI4, TKV_KIVI4}, 1, 65504, 5e-3},
    {"kivi2, precise", {TKV_KIVI2, TKV_KIVI2}, 1, 65504, 5e-3},
    {"a30/r30, precise", {TKV_A30, TKV_R30}, 1, 100, 5e-3},
    {"q8", {TKV_Q8, TKV_Q8}, 0, 65504, 0.2},
    {"kivi4", {TKV_KIVI4, TKV_KIVI4}, 0, 65504, 0.2},
    {"kivi2", {TKV_KIVI2, TKV_KIVI2}, 0, 65504, 0.2},
    {"a30/r30", {TKV_A30, TKV_R30}, 0, 100, 0.2},
};

typedef struct attend_input {
    input k, v, q; /* q: one token */
} attend_input;

static tkv_cache *make_attend_cache(const attend_row *row, tkv_isa isa) {
    static float x[64 * HEAD];
    tkv_config cfg = make_sized_config(1, 1, 1, HEAD, 1, KEYS);
    tkv_rng r = tkv_rng_seed(5);
    tkv_cache *kv;
    int t;
    cfg.host.isa = isa;
    cfg.host.precise = row->precise;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot = tkvi_is_exact(&tkvi_formats[row->pair.k]) ? row->pair : pair_of(TKV_F32, TKV_F32);
    cfg.tiers.warm = cfg.tiers.archive = row->pair;
    kv = create_cache(&cfg);
    for (t = 0; t < 320; t += 64) { /* tables of formats that learn */
        tkv_rng_fill(&r, x, COUNT(x), 1.0);
        CHECK_EQ(tkv_append(kv, 0, 0, x, x, 64), TKV_OK);
    }
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    return kv;
}

/* The largest sum of |scale q_c k_c| of a key. */
static double largest_logit(const float *q, const float *k, int n) {
    double largest = 0.0;
    int t, c;
    for (t = 0; t < n; t++) {
        double sum = 0.0;
        for (c = 0; c < HEAD; c++) sum += fabs((double)q[c] * (double)k[t * HEAD + c]) / sqrt((double)HEAD);
        largest = larger_of(largest, sum);
    }
    return largest;
}

static double attend_ratio(const attend_row *row, tkv_cache *kv, const attend_input *in_) {
    static float k[KEYS * HEAD], v[KEYS * HEAD];
    float got[HEAD], want[HEAD];
    tkv_attend_params p;
    double most = 0.0, logit, error = 0.0;
    int c;
    memset(&p, 0, sizeof p);
    if (tkv_seq_truncate(kv, 0, 0) || tkv_append(kv, 0, 0, in_->k.x, in_->v.x, in_->k.n) ||
        tkv_seq_flush(kv, 0, TKV_FLUSH_ALL) || tkv_read(kv, 0, 0, 0, in_->k.n, k, v))
        return 1e9;
    p.n = 1;
    p.q = in_->q.x;
    p.out = got;
    if (tkv_attend_ex(kv, &p)) return 1e9;
    p.out = want;
    if (tkv_attend_reference(kv, &p)) return 1e9;
    for (c = 0; c < in_->k.n * HEAD; c++) most = larger_of(most, size_of(v[c]));
    logit = largest_logit(in_->q.x, k, in_->k.n);
    if (!(logit < 1e3)) return 0.0; /* beyond what the bound is for */
    for (c = 0; c < HEAD; c++) {
        if (!tkv_test_is_finite((double)got[c])) return 1e9;
        error = larger_of(error, fabs((double)got[c] - (double)want[c]));
    }
    return most > 0.0 ? error / (row->epsilon * (1.0 + logit) * most) : error > 0.0 ? 1e9 : 0.0;
}

static void begin_attend_input(tkv_rng *r, attend_input *in_, double largest) {
    double logit;
    int c;
    in_->k.dim = in_->v.dim = in_->q.dim = HEAD;
    in_->k.n = in_->v.n = tkv_rng_below(r, 2) ? KEYS : 1 + tkv_rng_below(r, KEYS);
    in_->q.n = 1;
    in_->k.unit = in_->v.unit = BY_TOKEN;
    in_->q.unit = BY_TOKEN;
    in_->k.largest = in_->v.largest = tkv_rng_below(r, 2) ? largest : 4.0;
    in_->q.largest = 1e3;
    begin_input(r, &in_->k);
    begin_input(r, &in_->v);
    begin_input(r, &in_->q);
    if (tkv_rng_below(r, 2)) tkv_rng_fill(r, in_->k.x, (size_t)(in_->k.n * HEAD), 1.0);
    if (tkv_rng_below(r, 2)) tkv_rng_fill(r, in_->q.x, HEAD, 1.0);
    limit_input(&in_->k);
    logit = largest_logit(in_->q.x, in_->k.x, in_->k.n);
    for (c = 0; c < HEAD && logit > 500.0; c++) in_->q.x[c] = (float)((double)in_->q.x[c] * (500.0 / logit));
}

static search_result search_attention(const attend_row *row, tkv_isa isa, uint64_t seed) {
    static attend_input now, best;
    tkv_cache *kv = make_attend_cache(row, isa);
    tkv_rng r = tkv_rng_seed(seed);
    const clock_t start = clock();
    double here = -1.0;
    int idle = PATIENCE, k, changes;
    search_result found;
    found.worst = 0.0;
    for (found.n_blocks = 0;
         limits.seconds > 0.0
             ? (double)(clock() - start) < limits.seconds * (double)CLOCKS_PER_SEC
             : found.n_blocks < (found.worst > 0.0 ? limits.n_attends : 5000); /* one error at least */
         found.n_blocks++) {
        double ratio;
        if (idle >= PATIENCE) {
            begin_attend_input(&r, &now, row->largest);
            here = -1.0;
            idle = 0;
        } else {
            now = best;
            changes = 1 << tkv_rng_below(&r, 5);
            for (k = 0; k < changes; k++)
                change_input(&r, tkv_rng_below(&r, 3) == 0 ? &now.q : tkv_rng_below(&r, 2) ? &now.k : &now.v);
        }
        ratio = attend_ratio(row, kv, &now);
        idle = ratio > here * 1.0001 ? 0 : idle + 1;
        if (ratio >= here) {
            best = now;
            here = ratio;
        }
        found.worst = larger_of(found.worst, ratio);
    }
    tkv_destroy(kv);
    return found;
}

TEST(attention_keeps_its_bounds) {
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int i, isa, n = 0;
    for (isa = 0; isa < n_isas; isa++)
        for (i = 0; i < COUNT(attend_rows); i++) {
            const attend_row *row = &attend_rows[i];
            search_result found;
            if (limits.only && !strstr(row->name, limits.only)) continue;
            n++;
            found = search_attention(row, isas[isa], (uint64_t)i + 1);
            CHECK_MSG(found.worst <= 1.0, "%s: %.6f of the bound", row->name, found.worst);
            CHECK_MSG(found.worst > 0.0, "%s: no error was found", row->name);
            if (limits.seconds > 0.0)
                printf("| %s, %s | %ld | %.6f |\n", row->name, tkv_get_name(TKV_NAME_ISA, (int)isas[isa]),
                       found.n_blocks, found.worst),
                    fflush(stdout);
        }
}

/*     white_bounds --seconds N [formats | attention] [part of a name] */
int main(int argc, char **argv) {
    int formats = 1, attention = 1;
    limits.n_blocks = tkv_test_quick() ? 250 : 1500;
    limits.n_attends = tkv_test_quick() ? 60 : 180;
    if (argc > 2 && strcmp(argv[1], "--seconds") == 0) {
        const char *kind = argc > 3 ? argv[3] : "";
        attention = strcmp(kind, "formats") != 0;
        formats = strcmp(kind, "attention") != 0;
        limits.seconds = atof(argv[2]);
        limits.only = argc > 4 ? argv[4] : formats && attention && argc > 3 ? kind : NULL;
        argc = 1;
    }
    tkv_test_begin(argc, argv);
    if (formats) RUN(formats_keep_their_bounds);
    if (attention) RUN(attention_keeps_its_bounds);
    return tkv_test_end();
}
