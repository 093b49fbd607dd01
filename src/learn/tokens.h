/*
 * learn/tokens.h - the tokens that a family of formats learns from (tkvi_tokens): those of a layer's blocks, or samples
 * of the caller.
 */
#ifndef TKVI_LEARN_TOKENS_H
#define TKVI_LEARN_TOKENS_H

#include "cache/cache.h"

typedef struct tkvi_tokens_of {
    tkv_cache *kv;
    const tkv_samples *samples; /* NULL: the blocks of the layer */
    int layer;
    const tkvi_rope *rope; /* keys are visited without it; NULL: as given */
} tkvi_tokens_of;

typedef struct tkvi_token_walk {
    const tkvi_tokens_of *from;
    tkv_side side;
    tkvi_token_visit visit;
    void *ctx;
} tkvi_token_walk;

static void tkvi_walk_block(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n,
                            uint64_t dead_mask) {
    const tkvi_token_walk *w = (const tkvi_token_walk *)ctx;
    const tkvi_simd_ops *help = w->from->kv->kernels->simd_ops;
    int t, dim = w->side == TKV_K ? r->k.dim : r->v.dim;
    float *x = w->from->kv->work.recode, y[TKV_MAX_HEAD_DIM];
    if (w->side == TKV_K) tkvi_finite_values(&r->k, help, bytes, 0, n, x, (size_t)dim);
    else tkvi_finite_values(&r->v, help, bytes + r->v_at, 0, n, x, (size_t)dim);
    for (t = 0; t < n; t++) {
        if (dead_mask >> t & 1) continue;
        tkvi_take_token(w->side == TKV_K ? w->from->rope : NULL, x + t * dim, dim, (int64_t)start + t, y);
        w->visit(w->ctx, y, NULL);
    }
}

/* Calls visit for each token of a head (tkvi_tokens.walk). */
static void tkvi_walk(const void *tokens, tkv_side side, int head, tkvi_token_visit visit, void *ctx) {
    const tkvi_tokens_of *from = (const tkvi_tokens_of *)tokens;
    const tkv_samples *s = from->samples;
    const tkvi_geometry *g = tkvi_geometry_of(from->kv, from->layer);
    size_t dim = (size_t)(side == TKV_K ? g->head_dim : g->v_head_dim);
    tkvi_token_walk w;
    float y[TKV_MAX_HEAD_DIM];
    int t;
    w.from = from;
    w.side = side;
    w.visit = visit;
    w.ctx = ctx;
    if (!s) (void)tkvi_visit_newest_blocks(from->kv, from->layer, head, tkvi_walk_block, &w);
    for (t = 0; s && t < s->n; t++) {
        size_t at = ((size_t)t * (size_t)g->n_kv_heads + (size_t)head) * dim;
        const float *weight = side == TKV_K ? s->k_weight : s->v_weight;
        int64_t position = (int64_t)s->start + (s->length ? t % s->length : t);
        tkvi_take_token(side == TKV_K ? from->rope : NULL, (side == TKV_K ? s->k : s->v) + at, (int)dim,
                        position, y);
        visit(ctx, y, weight ? weight + at : NULL);
    }
}

/* Learns the states of a version of the layer's table. samples: as in tkvi_tokens_of. */
static void tkvi_learn_tokens(tkv_cache *kv, int layer, int version, const tkv_samples *samples) {
    const tkvi_family *f = NULL;
    tkvi_tokens_of from;
    tkvi_tokens tokens;
    if (!TKVI_HAS_TOKEN_LEARNERS) return;
    from.kv = kv;
    from.samples = samples;
    from.layer = layer;
    tokens.from = &from;
    tokens.walk = tkvi_walk;
    while ((f = tkvi_next_family(kv->tables.plan[layer].token_parts, f)) != NULL) {
        const tkvi_family_state to = tkvi_table_state_of(&kv->tables, f, layer, version);
        from.rope = to.rope;
        f->learn_tokens(&to, &tokens);
    }
}

#endif /* TKVI_LEARN_TOKENS_H */
