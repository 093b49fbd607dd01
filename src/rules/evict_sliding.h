/*
 * rules/evict_sliding.h - StreamingLLM (arXiv 2309.17453, section 3.2). The first tokens stay as attention sinks,
 * and so do the newest ones.
 *
 *     score of a token = its position
 *
 * "fifo" has the same score and protects neither sinks nor recent tokens. "none" evicts nothing; its row only holds
 * the default lengths of protected tokens.
 */
#ifndef TKVI_RULES_EVICT_SLIDING_H
#define TKVI_RULES_EVICT_SLIDING_H

#include "rules/evict_policy.h"

static void tkvi_score_age(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)cfg;
    (void)recent;
    for (i = 0; i < v->n; i++) out[i] = (float)tkvi_position_of(v, i);
}

static const tkvi_evict_row tkvi_evict_none = {
    "none", 0, 4, 32, 0, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_age)};
static const tkvi_evict_row tkvi_evict_sliding = {
    "sliding", 0, 4, 1, 1, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_age)};
static const tkvi_evict_row tkvi_evict_fifo = {
    "fifo", 0, 0, 0, 1, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_age)};

#endif /* TKVI_RULES_EVICT_SLIDING_H */
