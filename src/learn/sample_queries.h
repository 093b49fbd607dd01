/*
 * learn/sample_queries.h - the two consumers that learn from the queries of attention: statistics for tables
 * (learn/statistics.h), and q q^T for families of formats that learn from queries (learn/query_stats.h).
 *
 * Both take what the first pass has anyway. A second pass over the keys could also add up far attention, but its
 * sums round differently, and it takes longer (bench/LOG.md, Consumers of attention).
 */
#ifndef TKVI_LEARN_SAMPLE_QUERIES_H
#define TKVI_LEARN_SAMPLE_QUERIES_H

#include "cache/consumers.h"
#include "learn/query_stats.h"

/* Positions from one query that is sampled for statistics to the next: while a layer has no table, and later. The first
 * table has few tokens to learn from. Its far values are exact, and reading their norms takes longer. */
#define TKVI_STATS_EVERY 8
#define TKVI_STATS_EVERY_LATER 16

/* Statistics need atomics. Without them tables come from the keys alone. */
#if defined(__GNUC__) || defined(__clang__)
#define TKVI_CAN_SAMPLE_QUERIES 1
#else
#define TKVI_CAN_SAMPLE_QUERIES 0
#endif

/* >>statistics for tables */
static int tkvi_stats_want(const tkv_cache *kv, const tkv_attend_params *p, int stored) {
    (void)p;
    if (!TKVI_CAN_SAMPLE_QUERIES || !kv->tables.plan[stored].allocates || kv->stats.tokens_seen[stored] < 0)
        return 0;
    return TKVI_WANTS_CALL | TKVI_WANTS_FAR_SUMS;
}

static unsigned tkvi_stats_sample(const tkvi_tile_view *v) {
    return tkvi_rows_every(
        v, 1, v->kv->tables.current_version[v->stored] < 0 ? TKVI_STATS_EVERY : TKVI_STATS_EVERY_LATER);
}

/* Adds the sampled rows to the layer's statistics. Integer sums do not depend on the order of threads. */
static TKVI_NOINLINE unsigned tkvi_stats_begin(const tkvi_tile_view *v, unsigned rows, void *state) {
    tkv_cache *kv = v->kv;
    int dim = tkvi_geometry_of(kv, v->stored)->head_dim, r, c;
    int64_t *asked = tkvi_q_sq_sum_of(kv, v->stored, v->head);
    const float *l = v->sums->l;
    (void)state;
    tkvi_lock(&kv->stats.lock);
    for (r = 0; r < v->rows; r++) {
        if (!(rows >> r & 1)) continue;
        ++*tkvi_n_sampled_of(kv, v->stored, v->head);
        for (c = 0; c < dim; c++) {
            float x = v->q[r * v->q_stride + c]; /* queries can have NaN; the clamp keeps squares finite */
            x = tkvi_is_finite(x) ? tkvi_clampf(x, -1e6f, 1e6f) : 0.0f;
            asked[c] += tkvi_counted(x * x * 16777216.0f, 1e12f);
        }
        if (l[r] > 0.0f)
            tkvi_add_to_wide_sum(tkvi_far_attention_of(kv, v->stored, v->head),
                                 v->sums->far_attention[r] / (l[r] * l[r]));
    }
    tkvi_unlock(&kv->stats.lock);
    return 0;
}

static const tkvi_consumer tkvi_stats_consumer = {
    TKVI_OBSERVES_QUERIES, 0, tkvi_stats_want, tkvi_stats_sample, tkvi_stats_begin, NULL, NULL};

/* >>query statistics */
static int tkvi_query_stats_want(const tkv_cache *kv, const tkv_attend_params *p, int stored) {
    (void)p;
    return TKVI_CAN_SAMPLE_QUERIES && kv->tables.plan[stored].query_parts &&
                   kv->stats.queries[stored].tokens >= 0
               ? TKVI_WANTS_CALL
               : 0;
}

static unsigned tkvi_query_stats_sample(const tkvi_tile_view *v) {
    return tkvi_rows_every(v, 0, TKVI_QUERY_STATS_EVERY);
}

/* Adds q q^T of the sampled rows to the layer's statistics of queries. */
static TKVI_NOINLINE unsigned tkvi_query_stats_begin(const tkvi_tile_view *v, unsigned rows, void *state) {
    int r;
    (void)state;
    tkvi_lock(&v->kv->stats.lock);
    for (r = 0; r < v->rows; r++)
        if (rows >> r & 1) tkvi_query_stats_add(v->kv, v->stored, v->head, v->q + r * v->q_stride);
    tkvi_unlock(&v->kv->stats.lock);
    return 0;
}

static const tkvi_consumer tkvi_query_stats_consumer = {TKVI_OBSERVES_QUERIES,
                                                        0,
                                                        tkvi_query_stats_want,
                                                        tkvi_query_stats_sample,
                                                        tkvi_query_stats_begin,
                                                        NULL,
                                                        NULL};

#endif /* TKVI_LEARN_SAMPLE_QUERIES_H */
