/*
 * rules/evict_scissorhands.h - persistence of importance (ScissorHands, arXiv 2305.17118, section 4). Within a
 * history window, a token's count rises each time its attention weight is below an even share. When the budget is
 * full, a batch of tokens with the highest counts is evicted. Recent tokens are protected.
 *
 *     score of token i = - number of pairs (query j, head h) with p_h(j, i) < 1 / (number of keys that j sees)
 */
#ifndef TKVI_RULES_EVICT_SCISSORHANDS_H
#define TKVI_RULES_EVICT_SCISSORHANDS_H

#include "rules/evict_policy.h"

/* Negates the counts. The caller's counts may be negated already. */
static void tkvi_score_lows(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->low_counts, 1.0f, out);
    for (i = 0; i < v->n; i++)
        if (tkvi_is_live(v, i) && out[i] > 0.0f) out[i] = -out[i];
}

static const tkvi_evict_row tkvi_evict_scissorhands = {"scissorhands",
                                                       TKVI_NEEDS_LOW_COUNTS,
                                                       4,
                                                       32,
                                                       0,
                                                       TKV_EVICT_UNIFORM,
                                                       TKVI_IF(TKVI_HAS_EVICT, tkvi_score_lows)};

#endif /* TKVI_RULES_EVICT_SCISSORHANDS_H */
