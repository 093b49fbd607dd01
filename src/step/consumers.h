/*
 * step/consumers.h - the table of the consumers of attention (cache/consumers.h), and the public calls that run
 * attention with it.
 */
#ifndef TKVI_STEP_CONSUMERS_H
#define TKVI_STEP_CONSUMERS_H

#include "attention/compare.h"
#include "attention/score_output.h"
#include "learn/sample_queries.h"
#include "reclaim/sample_scores.h"

static const tkvi_consumer *const tkvi_consumers[] = {
    &tkvi_stats_consumer, /* statistics for tables of formats (learn/sample_queries.h) */
    TKVI_IF(TKVI_HAS_QUERY_LEARNERS,
            &tkvi_query_stats_consumer), /* q q^T for formats that learn from it (learn/sample_queries.h) */
    TKVI_IF(TKVI_HAS_METER, &tkvi_comparison_consumer), /* the quality meter (attention/compare.h) */
    TKVI_IF(TKVI_HAS_EVICT, &tkvi_score_consumer), /* attention scores of tokens (reclaim/sample_scores.h) */
    &tkvi_score_output_consumer, /* the call's own output of attention scores (attention/score_output.h) */
};

enum { TKVI_N_CONSUMERS = sizeof tkvi_consumers / sizeof *tkvi_consumers };

/* Fails to compile if there are more rows than attention can serve. */
typedef char tkvi_consumers_fit[TKVI_N_CONSUMERS <= TKVI_MAX_CONSUMERS ? 1 : -1];

TKV_API tkv_status tkv_attend_ex(tkv_cache *kv, const tkv_attend_params *p) {
    return tkvi_attend(kv, p, tkvi_consumers, TKVI_N_CONSUMERS);
}

TKV_API tkv_status tkv_get_attend_bytes(const tkv_cache *kv, const tkv_attend_params *p, size_t *bytes) {
    tkvi_call c;
    tkvi_work w;
    tkv_status st;
    if (!kv || !bytes) return TKV_ERR_ARG;
    st = tkvi_plan_work((tkv_cache *)(uintptr_t)kv, p, tkvi_consumers, TKVI_N_CONSUMERS, &c,
                        &w); /* only reads */
    if (!st) *bytes = tkvi_parts_bytes_of(&w);
    return st;
}

TKV_API tkv_status tkv_attend_part(tkv_cache *kv, const tkv_attend_params *p, int part, int n_parts,
                                   void *workspace, size_t bytes) {
    return tkvi_attend_part(kv, p, tkvi_consumers, TKVI_N_CONSUMERS, part, n_parts, workspace, bytes);
}

TKV_API tkv_status tkv_attend(tkv_cache *kv, int seq, int layer, const float *q, int n, float *out) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.q = q;
    p.out = out;
    return tkv_attend_ex(kv, &p);
}

#endif /* TKVI_STEP_CONSUMERS_H */
