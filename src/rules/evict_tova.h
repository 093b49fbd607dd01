/*
 * rules/evict_tova.h - "Token Omission Via Attention" (TOVA, arXiv 2401.06104). Evicts the tokens with the lowest
 * attention weight of the newest query.
 *
 *     score of token i = mean over the layer's heads h of p_h(newest, i)
 */
#ifndef TKVI_RULES_EVICT_TOVA_H
#define TKVI_RULES_EVICT_TOVA_H

#include "rules/evict_policy.h"

static void tkvi_score_last(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->last_scores, 1.0f, out);
}

static const tkvi_evict_row tkvi_evict_tova = {
    "tova", TKVI_NEEDS_LAST_SCORES, 4, 32, 0, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_last)};

#endif /* TKVI_RULES_EVICT_TOVA_H */
