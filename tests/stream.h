/*
 * stream.h - a model sequence: random tokens and queries of one layer that resemble those of a model. Some channels
 * of keys are large, some have a mean. Queries vary along two directions. test_formats_other.c and white_learn.c
 * share it.
 */
#ifndef TKV_STREAM_H
#define TKV_STREAM_H

#include "kit.h"

typedef struct model_sequence {
    int heads, kv_heads, dim, v_dim;
    tkv_rng rng;
    float q[8 * 256 * 4], k[8 * 256 * 64], v[8 * 256 * 64]; /* of the last call */
    float out[8 * 256 * 4];                                 /* for the output of attention */
} model_sequence;

/* K and V of the next n tokens. */
static inline void generate_tokens(model_sequence *s, int n) {
    int i;
    for (i = 0; i < n * s->kv_heads * s->dim; i++) {
        int c = i % s->dim;
        s->k[i] = (float)(tkv_rng_gauss(&s->rng) * (c % 11 == 3 ? 4 : 1) + (c % 7 == 2 ? 5 : 0));
    }
    tkv_rng_fill(&s->rng, s->v, (size_t)(n * s->kv_heads * s->v_dim), 1);
}

/* The queries of n tokens. */
static inline void generate_queries(model_sequence *s, int n) {
    int i, h, c;
    for (i = 0; i < n; i++)
        for (h = 0; h < s->heads; h++) {
            double a = tkv_rng_gauss(&s->rng), b = tkv_rng_gauss(&s->rng);
            for (c = 0; c < s->dim; c++)
                s->q[(i * s->heads + h) * s->dim + c] =
                    (float)(a * sin(0.37 * (c + 1)) + b * cos(0.11 * c * c) + 0.1 * tkv_rng_gauss(&s->rng));
        }
}

static model_sequence current_sequence;

/* Ends the sequence of the last call: all callers use one buffer. */
static inline model_sequence *start_model_sequence(int heads, int kv_heads, int dim, int v_dim,
                                                   uint64_t seed) {
    memset(&current_sequence, 0, sizeof current_sequence);
    current_sequence.heads = heads;
    current_sequence.kv_heads = kv_heads;
    current_sequence.dim = dim;
    current_sequence.v_dim = v_dim;
    current_sequence.rng = tkv_rng_seed(seed);
    return &current_sequence;
}

static inline tkv_config config_of(const model_sequence *s, tkv_format k, tkv_format v) {
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
