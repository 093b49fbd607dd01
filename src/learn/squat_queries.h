/*
 * learn/squat_queries.h - query statistics for SQUAT4 and SQUAT2, formats whose errors avoid the directions of the
 * queries. It sums q q^T over the queries of each head group and derives from it the factors of formats/squat.h.
 *
 * Attention adds the queries at every fourth position, until the layer has seen TKVI_FIRST_TABLE_TOKENS tokens. The
 * sums are integers under the lock of learn/statistics.h, so they do not depend on threads. Factors are computed
 * when the layer has seen 64 tokens, and again each time the number has doubled, the last time at
 * TKVI_FIRST_TABLE_TOKENS.
 *
 * Blocks coded before the first factors use the encoder of KIVI. No block waits, because decoding does not need the
 * factors. The paper (SQuat, arXiv 2503.24358) uses the queries of the prompt, once.
 */
#ifndef TKVI_LEARN_SQUAT_QUERIES_H
#define TKVI_LEARN_SQUAT_QUERIES_H

#include "learn/statistics.h"

#define TKVI_QUERY_STATS_EVERY 4 /* positions from one sampled query to the next */

/* Adds q q^T of one query [head_dim] that attention has scaled already. The caller holds kv->learning. */
static void tkvi_query_stats_add(tkv_cache *kv, int layer, int head, const float *q) {
    int64_t *sum = tkvi_q_products_of(kv, layer, head);
    int x[TKV_MAX_HEAD_DIM], dim = kv->tables.cfg.model.head_dim, i, j;
    for (i = 0; i < dim; i++) x[i] = (int)tkvi_counted(q[i] * 4096.0f, 1e6f);
    for (j = 0; j < dim; j++)
        for (i = 0; i <= j; i++) *sum++ += (int64_t)x[i] * x[j];
}

/* Computes one head's factors from its sums: P = I + eta C / (tr C / dim). Sums of 0 leave the factors as they
 * are. */
static void tkvi_query_stats_use(tkv_cache *kv, int layer, int head) {
    const int64_t *sum = tkvi_q_products_of(kv, layer, head);
    int dim = kv->tables.cfg.model.head_dim, i, j;
    double trace = 0.0;
    float *p = kv->solve;
    for (i = 0; i < dim; i++) trace += (double)sum[tkvi_packed(i, i)];
    if (!(trace > 0.0)) return;
    for (j = 0; j < dim; j++)
        for (i = 0; i <= j; i++) {
            double c = (double)sum[tkvi_packed(i, j)] * (TKVI_SQUAT_ETA * (double)dim) / trace;
            p[tkvi_packed(i, j)] = (float)(i == j ? 1.0 + c : c);
        }
    tkvi_feedback_from(p, dim, kv->tables.cfg.format.squat_block);
    tkvi_feedback_store(p, dim, kv->tables.cfg.format.squat_block, tkvi_squat_factors_of(kv, layer, head));
}

/* Computes the factors of a layer when it is time. Runs between steps and allocates nothing. */
static void tkvi_query_stats_learn(tkv_cache *kv, int layer) {
    tkvi_query_stats *query_stats = kv->query_stats ? &kv->query_stats[layer] : NULL;
    int head;
    if (!TKVI_HAS_SQUAT || !query_stats || !kv->tables.plan[layer].squat) return;
    if (query_stats->tokens < tkvi_min(TKVI_FIRST_TABLE_TOKENS, tkvi_max(TKVI_BLOCK, 2 * query_stats->used)))
        return;
    for (head = 0; head < kv->tables.cfg.model.n_kv_heads; head++) tkvi_query_stats_use(kv, layer, head);
    query_stats->used = tkvi_min(TKVI_FIRST_TABLE_TOKENS, query_stats->tokens);
    if (query_stats->tokens >= TKVI_FIRST_TABLE_TOKENS) query_stats->tokens = -1;
}

/* Counts n more tokens of the layer while it collects. */
static void tkvi_query_stats_count(tkv_cache *kv, int layer, int n) {
    if (TKVI_HAS_SQUAT && kv->query_stats && kv->query_stats[layer].tokens >= 0)
        kv->query_stats[layer].tokens =
            tkvi_min(TKVI_FOREVER, kv->query_stats[layer].tokens + n); /* tkv_seq_abort subtracts its part */
}

/* Starts collecting again from zero. The old factors stay in use until new ones are computed. */
static void tkvi_query_stats_restart(tkv_cache *kv, int layer) {
    size_t heads = (size_t)kv->tables.cfg.model.n_kv_heads, dim = (size_t)kv->tables.cfg.model.head_dim;
    if (!TKVI_HAS_SQUAT || !kv->query_stats) return;
    kv->query_stats[layer].tokens = kv->query_stats[layer].used = 0;
    memset(tkvi_q_products_of(kv, layer, 0), 0, heads * (dim * (dim + 1) / 2) * sizeof(int64_t));
}

#endif /* TKVI_LEARN_SQUAT_QUERIES_H */
