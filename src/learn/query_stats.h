/*
 * learn/query_stats.h - statistics of queries, for families of formats that learn from them (tkvi_family). It sums
 * q q^T over the queries of each head group.
 *
 * Attention adds the queries at every fourth position, until the layer has seen TKVI_QUERY_STATS_TOKENS tokens. The
 * sums are integers under the lock of learn/statistics.h, so they do not depend on threads. The families learn their
 * states when the layer has seen 64 tokens, and again each time the number has doubled, the last time at
 * TKVI_QUERY_STATS_TOKENS.
 *
 * Blocks coded before that use a state of zeros. No block waits, because decoding does not need the state.
 */
#ifndef TKVI_LEARN_QUERY_STATS_H
#define TKVI_LEARN_QUERY_STATS_H

#include "learn/statistics.h"

#define TKVI_QUERY_STATS_EVERY 4    /* positions from one sampled query to the next */
#define TKVI_QUERY_STATS_TOKENS 512 /* tokens whose queries count */

/* Adds q q^T of one query [head_dim] that attention has scaled already. The caller holds kv->stats.lock. */
static void tkvi_query_stats_add(tkv_cache *kv, int layer, int head, const float *q) {
    int64_t *sum = tkvi_q_products_of(kv, layer, head);
    int x[TKV_MAX_HEAD_DIM], dim = tkvi_geometry_of(kv, layer)->head_dim, i, j;
    for (i = 0; i < dim; i++) x[i] = (int)tkvi_counted(q[i] * 4096.0f, 1e6f);
    for (j = 0; j < dim; j++)
        for (i = 0; i <= j; i++) *sum++ += (int64_t)x[i] * x[j];
}

/* 1 if the next append learns the states of a layer. */
static int tkvi_are_query_states_due(const tkv_cache *kv, int layer) {
    const tkvi_query_stats *query_stats;
    if (!TKVI_HAS_QUERY_LEARNERS || !kv->tables.plan[layer].query_parts) return 0;
    TKVI_ASSERT(kv->stats.queries);
    query_stats = &kv->stats.queries[layer];
    return query_stats->tokens >=
           tkvi_min(TKVI_QUERY_STATS_TOKENS, tkvi_max(TKVI_BLOCK, 2 * query_stats->used));
}

/* Learns the states of a layer when it is time. Runs between steps and allocates nothing. */
static void tkvi_query_stats_learn(tkv_cache *kv, int layer) {
    const int parts = kv->tables.plan[layer].query_parts;
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const tkvi_family *f = NULL;
    tkvi_query_stats *query_stats;
    int head;
    if (!tkvi_are_query_states_due(kv, layer)) return;
    query_stats = &kv->stats.queries[layer];
    while ((f = tkvi_next_family(parts, f)) != NULL)
        for (head = 0; head < g->n_kv_heads; head++)
            f->learn_queries(&kv->tables.cfg.format, g, tkvi_q_products_of(kv, layer, head), kv->work.solve,
                             tkvi_query_state_of(kv, f, layer, head));
    query_stats->used = tkvi_min(TKVI_QUERY_STATS_TOKENS, query_stats->tokens);
    if (query_stats->tokens >= TKVI_QUERY_STATS_TOKENS) query_stats->tokens = -1;
}

static void tkvi_add_to_count(int *count, int n) {
    if (*count >= 0) *count = tkvi_max(0, tkvi_min(TKVI_FOREVER, *count + n));
}

/* Counts n more tokens of the layer, where it collects statistics. n is negative when a step is aborted. */
static void tkvi_count_seen_tokens(tkv_cache *kv, int layer, int n) {
    if (kv->stats.tokens_seen) tkvi_add_to_count(&kv->stats.tokens_seen[layer], n);
    if (TKVI_HAS_QUERY_LEARNERS && kv->stats.queries) tkvi_add_to_count(&kv->stats.queries[layer].tokens, n);
}

/* Starts collecting again from zero. The old states stay in use until new ones are learned. */
static void tkvi_query_stats_restart(tkv_cache *kv, int layer) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    if (!TKVI_HAS_QUERY_LEARNERS || !kv->stats.queries) return;
    kv->stats.queries[layer].tokens = kv->stats.queries[layer].used = 0;
    memset(tkvi_q_products_of(kv, layer, 0), 0,
           (size_t)g->n_kv_heads * tkvi_n_products(g->head_dim) * sizeof(int64_t));
}

#endif /* TKVI_LEARN_QUERY_STATS_H */
