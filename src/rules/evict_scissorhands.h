/*
 * rules/evict_scissorhands.h - persistence of importance (ScissorHands, arXiv 2305.17118, section 4): tokens are
 * counted, in a history window, each time that they get less than an even share; when the budget is full those with
 * the highest counts go, many at once, but for the recent ones.
 *
 *     score of token i = - how many heads of queries j gave p_h(j, i) < 1 / (keys that j sees)
 */
#ifndef TKVI_RULES_EVICT_SCISSORHANDS_H
#define TKVI_RULES_EVICT_SCISSORHANDS_H

#include "rules/evict_policy.h"

static void tkvi_score_lows(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->lows, 1.0f, out);
    for (i = 0; i < v->n; i++)
        if (tkvi_is_alive(v, i) && out[i] > 0.0f) out[i] = -out[i];
}

static const tkvi_evict_row tkvi_evict_scissorhands = {"scissorhands",    TKV_EVICT_NEEDS_LOWS, 4, 32, 0,
                                                       TKV_EVICT_UNIFORM, tkvi_score_lows};

#endif /* TKVI_RULES_EVICT_SCISSORHANDS_H */
