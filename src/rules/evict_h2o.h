/*
 * rules/evict_h2o.h - heavy hitters (H2O, arXiv 2306.14048, section 4). Evicts the tokens with the lowest
 * accumulated attention score. p_h(j, i) is the attention weight that query j of head h gives to token i.
 *
 *     score of token i = sum over queries j >= i and heads h of p_h(j, i)
 *
 * Recent tokens are protected, because only few queries have seen them.
 */
#ifndef TKVI_RULES_EVICT_H2O_H
#define TKVI_RULES_EVICT_H2O_H

#include "rules/evict_policy.h"

static void tkvi_score_attention(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent,
                                 float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->total_scores, 1.0f, out);
}

static const tkvi_evict_row tkvi_evict_h2o = {"h2o",
                                              TKVI_NEEDS_TOTAL_SCORES,
                                              4,
                                              32,
                                              0,
                                              TKV_EVICT_UNIFORM,
                                              TKVI_IF(TKVI_HAS_EVICT, tkvi_score_attention)};

#endif /* TKVI_RULES_EVICT_H2O_H */
