/*
 * rules/evict_given.h - two policies with scores from the caller. "scores" takes an array for all tokens, such as
 * the result of tkv_update_importance or of KVzip (arXiv 2505.23416). "user" calls cfg.scorer once for each live
 * token.
 */
#ifndef TKVI_RULES_EVICT_GIVEN_H
#define TKVI_RULES_EVICT_GIVEN_H

#include "rules/evict_policy.h"

static void tkvi_score_given(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->user_scores, 1.0f, out);
}

static void tkvi_score_user(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)recent;
    for (i = 0; i < v->n; i++)
        if (tkvi_is_live(v, i)) out[i] = cfg->scorer(cfg->user, v, i);
}

static const tkvi_evict_row tkvi_evict_scores = {
    "scores", TKVI_NEEDS_USER_SCORES, 4, 32, 0, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_given)};
static const tkvi_evict_row tkvi_evict_user = {
    "user", 0, 4, 32, 0, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_user)};

#endif /* TKVI_RULES_EVICT_GIVEN_H */
