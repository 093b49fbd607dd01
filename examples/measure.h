/*
 * measure.h - what programs that measure the loss of plans share. A model reads a text in chunks, so that every position
 * sees the same coded tokens as in decoding token by token. Then the logits of two runs are compared.
 *
 *     measure_align_layers(&cfg, layers);           before tkv_create
 *     n = measure_chunk(&cfg, pos, n_tokens - pos); the size of the next chunk
 *
 * In this order: chunks, logits, means.
 */
#ifndef TKV_MEASURE_H
#define TKV_MEASURE_H

#include "../tieredkv.h"

#include <math.h>

/* >>chunks */
/* Shortens the tiers of layers[n_layers] by the layers' delays (api.h, hot_tokens). All layers then demote at the same
 * token, as layer 0 does. cfg: lengths in tokens, or 0 for 64 and 448; no budget. A layer's own lengths are kept. */
static inline void measure_align_layers(const tkv_config *cfg, tkv_layer_config *layers) {
    const int n = cfg->model.n_layers, hot = cfg->tiers.hot_tokens ? cfg->tiers.hot_tokens : 64;
    const int warm = cfg->tiers.warm_tokens ? cfg->tiers.warm_tokens : 448;
    for (int i = 0; i < n && n > 1; i++) {
        const int hot_delay = 64 * i / n, warm_delay = (64 * i + 32) / n - hot_delay;
        if (!layers[i].hot_tokens && hot > hot_delay) layers[i].hot_tokens = hot - hot_delay;
        if (!layers[i].warm_tokens && warm > warm_delay) layers[i].warm_tokens = warm - warm_delay;
    }
}

/* Returns the size of the next chunk, at most `left`, after pos tokens. The chunk ends where a block of layer 0 leaves
 * the hot tail. Other layers demote up to 63 tokens later (api.h, hot_tokens), in a chunk at the next chunk. With
 * measure_align_layers, every query sees the same coded tokens as with single tokens. */
static inline int measure_chunk(const tkv_config *cfg, int pos, int left) {
    const int sinks = cfg->tiers.sink_tokens == TKV_OFF ? 0
                      : cfg->tiers.sink_tokens          ? cfg->tiers.sink_tokens
                                                        : 4;
    const int hot = cfg->tiers.hot_tokens < 0 ? 0 : cfg->tiers.hot_tokens ? cfg->tiers.hot_tokens : 64;
    const int most = cfg->limits.max_append ? cfg->limits.max_append : 512;
    int n = sinks + hot - pos;
    if (n <= 0) n = TKV_BLOCK_TOKENS - (-n) % TKV_BLOCK_TOKENS;
    if (n > most) n = most;
    return n < left ? n : left;
}

/* >>logits */
static double measure_log_sum_exp(const float *logits, int n) {
    float high = logits[0];
    double sum = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > high) high = logits[i];
    for (int i = 0; i < n; i++) sum += (double)expf(logits[i] - high);
    return (double)high + log(sum);
}

static inline double measure_loss(const float *logits, int n, int token) { /* -log p(token), in nats */
    return measure_log_sum_exp(logits, n) - (double)logits[token];
}

static inline double measure_divergence(const float *exact, const float *other, int n) { /* KL, in nats */
    const double a = measure_log_sum_exp(exact, n), b = measure_log_sum_exp(other, n);
    double sum = 0;
    for (int i = 0; i < n; i++) {
        const double p = (double)exact[i] - a, q = (double)other[i] - b;
        sum += (double)expf((float)p) * (p - q);
    }
    return sum;
}

/* >>means */
enum { MEASURE_BATCH = 64 }; /* positions */

typedef struct measure_mean {   /* of the positions of one or more windows; zero at first */
    double total, sum, squares; /* of all positions; of the means of batches */
    int n, batches;
} measure_mean;

/* Adds the positions of a window. Each batch lies within one window. */
static inline void measure_add(measure_mean *m, const double *x, int n) {
    const int size = n < MEASURE_BATCH ? n : MEASURE_BATCH;
    for (int b = 0; size && b < n / size; b++) {
        const int to = (b + 1) == n / size ? n : (b + 1) * size;
        double s = 0;
        for (int i = b * size; i < to; i++) s += x[i];
        m->total += s;
        m->n += to - b * size;
        s /= to - b * size;
        m->sum += s;
        m->squares += s * s;
        m->batches++;
    }
}

/* Returns the standard error of the mean. Neighbouring positions are dependent, so it comes from the means of batches. */
static inline double measure_error(const measure_mean *m) {
    const int n = m->batches;
    return n > 1 ? sqrt(fabs(m->squares - m->sum * m->sum / n) / ((double)n * (n - 1))) : 0;
}

#endif /* TKV_MEASURE_H */
