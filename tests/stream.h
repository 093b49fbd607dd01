/*
 * stream.h - a stream of tokens and queries for one layer. Keys have large channels and means, queries look into few
 * directions. test_formats_other.c and white_learn.c share it.
 */
#ifndef TKV_STREAM_H
#define TKV_STREAM_H

#include "kit.h"

typedef struct
    stream { /* of one layer; keys have a large channel and a mean, queries look into few directions */
    int heads, kv_heads, dim, v_dim;
    tkv_rng rng;
    float q[8 * 256 * 4], k[8 * 256 * 64], v[8 * 256 * 64], out[8 * 256 * 4];
} stream;

static inline void next_tokens(stream *s, int n) {
    int i;
    for (i = 0; i < n * s->kv_heads * s->dim; i++) {
        int c = i % s->dim;
        s->k[i] = (float)(tkv_rng_gauss(&s->rng) * (c % 11 == 3 ? 4 : 1) + (c % 7 == 2 ? 5 : 0));
    }
    tkv_rng_fill(&s->rng, s->v, (size_t)(n * s->kv_heads * s->v_dim), 1);
}

static inline void next_query(stream *s, int n) { /* n rows */
    int i, h, c;
    for (i = 0; i < n; i++)
        for (h = 0; h < s->heads; h++) {
            double a = tkv_rng_gauss(&s->rng), b = tkv_rng_gauss(&s->rng);
            for (c = 0; c < s->dim; c++)
                s->q[(i * s->heads + h) * s->dim + c] =
                    (float)(a * sin(0.37 * (c + 1)) + b * cos(0.11 * c * c) + 0.1 * tkv_rng_gauss(&s->rng));
        }
}

static stream flow;

static inline stream *stream_of(int heads, int kv_heads, int dim, int v_dim, uint64_t seed) {
    memset(&flow, 0, sizeof flow);
    flow.heads = heads, flow.kv_heads = kv_heads, flow.dim = dim, flow.v_dim = v_dim;
    flow.rng = tkv_rng_seed(seed);
    return &flow;
}

static inline tkv_config config_of(const stream *s, tkv_format k, tkv_format v) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 1, cfg.model.n_heads = s->heads, cfg.model.n_kv_heads = s->kv_heads;
    cfg.model.head_dim = s->dim, cfg.model.v_head_dim = s->v_dim;
    cfg.tiers.hot_tokens = 16;
    cfg.tiers.warm_tokens = TKV_OFF;
    cfg.tiers.archive.k = k, cfg.tiers.archive.v = v;
    cfg.host.isa = tkv_test_isa();
    return cfg;
}

#endif /* TKV_STREAM_H */
