/*
 * learn/squat_queries.h - what the queries of each head group look like, for formats that turn their errors away from
 * them (SQUAT4, SQUAT2): sums of q q^T, from time to time the factors that follow from them (formats/squat.h).
 *
 * Attention adds whole numbers, of the queries at every fourth position, until the layer has seen TKVI_LEARN
 * tokens (the lock and the count of threads: learn/statistics.h). The factors are made anew when the layer has 64
 * tokens, and whenever it has twice as many. Blocks that come earlier are coded as KIVI's; nothing waits, as
 * decoding needs none of this. The paper takes the queries of the prompt, once. May call cache and below.
 */
#ifndef TKVI_LEARN_SQUAT_QUERIES_H
#define TKVI_LEARN_SQUAT_QUERIES_H

#include "learn/statistics.h"

#define TKVI_METRIC_EVERY 4

/* Adds one query, scaled as attention has it. The caller has the lock. */
static void tkvi_metric_add(tkv_cache *kv, int layer, int head, const float *q) {
    int64_t *sum = tkvi_metric_of(kv, layer, head);
    int x[TKV_MAX_HEAD_DIM], dim = kv->tables.cfg.head_dim, i, j;
    for (i = 0; i < dim; i++) x[i] = (int)tkvi_counted(q[i] * 4096.0f, 1e6f);
    for (j = 0; j < dim; j++)
        for (i = 0; i <= j; i++) *sum++ += (int64_t)x[i] * x[j];
}

static void tkvi_metric_use(tkv_cache *kv, int layer, int head) {
    const int64_t *sum = tkvi_metric_of(kv, layer, head);
    int dim = kv->tables.cfg.head_dim, i, j;
    double trace = 0.0;
    float *p = kv->solve;
    for (i = 0; i < dim; i++) trace += (double)sum[tkvi_packed(i, i)];
    if (!(trace > 0.0)) return;
    for (j = 0; j < dim; j++)
        for (i = 0; i <= j; i++) {
            double c = (double)sum[tkvi_packed(i, j)] * (TKVI_SQUAT_ETA * (double)dim) / trace;
            p[tkvi_packed(i, j)] = (float)(i == j ? 1.0 + c : c);
        }
    tkvi_feedback_from(p, dim, kv->tables.cfg.squat_block);
    tkvi_feedback_store(p, dim, kv->tables.cfg.squat_block, tkvi_feedback_of(kv, layer, head));
}

/* Called between steps. Needs no memory. */
static void tkvi_metric_learn(tkv_cache *kv, int layer) {
    tkvi_query_stats *query_stats = kv->query_stats ? &kv->query_stats[layer] : NULL;
    int head;
    if (!query_stats || !kv->tables.plan[layer].squat) return;
    if (query_stats->tokens < tkvi_min(TKVI_LEARN, tkvi_max(TKVI_BLOCK, 2 * query_stats->used))) return;
    for (head = 0; head < kv->tables.cfg.n_kv_heads; head++) tkvi_metric_use(kv, layer, head);
    query_stats->used = tkvi_min(TKVI_LEARN, query_stats->tokens);
    if (query_stats->tokens >= TKVI_LEARN) query_stats->tokens = -1;
}

/* n more tokens. */
static void tkvi_metric_count(tkv_cache *kv, int layer, int n) {
    if (kv->query_stats && kv->query_stats[layer].tokens >= 0)
        kv->query_stats[layer].tokens =
            tkvi_min(TKVI_FOREVER, kv->query_stats[layer].tokens + n); /* an abort takes its part back */
}

/* Listens again, from nothing; the factors stay until there are others. */
static void tkvi_metric_restart(tkv_cache *kv, int layer) {
    size_t heads = (size_t)kv->tables.cfg.n_kv_heads, dim = (size_t)kv->tables.cfg.head_dim;
    if (!kv->query_stats) return;
    kv->query_stats[layer].tokens = kv->query_stats[layer].used = 0;
    memset(tkvi_metric_of(kv, layer, 0), 0, heads * (dim * (dim + 1) / 2) * sizeof(int64_t));
}

#endif /* TKVI_LEARN_SQUAT_QUERIES_H */
