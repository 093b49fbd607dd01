/*
 * rules/evict_knorm.h - "A Simple and Effective L2 Norm-Based Strategy" (arXiv 2406.11430). Keys of a small norm
 * get much attention, so the policy evicts the tokens with the longest keys.
 *
 *     score of token i = - mean over KV heads h of |k_h(i)|
 */
#ifndef TKVI_RULES_EVICT_KNORM_H
#define TKVI_RULES_EVICT_KNORM_H

#include "rules/evict_policy.h"

static void tkvi_score_norm(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->norms, -1.0f, out);
}

static const tkvi_evict_row tkvi_evict_knorm = {
    "knorm", TKVI_NEEDS_NORMS, 4, 32, 0, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_norm)};

#endif /* TKVI_RULES_EVICT_KNORM_H */
