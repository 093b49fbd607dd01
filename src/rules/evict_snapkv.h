/*
 * rules/evict_snapkv.h - SnapKV (arXiv 2404.14469, section 4). The last queries of the prompt form the observation
 * window. A token before the window scores the attention from these queries, averaged over its neighbours. The
 * window itself stays.
 *
 *     score of token i = sum over d = -pool/2 .. pool/2 of observed(i + d) / pool
 *
 * Neighbours beyond the first token or inside the window count as 0, as in the authors' code. So do evicted tokens.
 */
#ifndef TKVI_RULES_EVICT_SNAPKV_H
#define TKVI_RULES_EVICT_SNAPKV_H

#include "rules/evict_policy.h"

static void tkvi_score_pooled(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    const int before = tkvi_max(0, v->n - recent), half = cfg->pool / 2;
    float most = 0.0f;
    int i, j;
    for (i = 0; i < before; i++) {
        const int end = tkvi_min(before, i + half + 1);
        double sum = 0.0;
        for (j = tkvi_max(0, i - half); j < end; j++)
            if (tkvi_is_live(v, j)) sum += (double)v->prompt_scores[j];
        out[i] = (float)(sum / cfg->pool);
        most = out[i] > most ? out[i] : most;
    }
    for (; i < v->n; i++)
        out[i] = most; /* a budget smaller than the window evicts from the window last, oldest first */
}

static const tkvi_evict_row tkvi_evict_snapkv = {"snapkv",
                                                 TKVI_NEEDS_PROMPT_SCORES,
                                                 4,
                                                 32,
                                                 0,
                                                 TKV_EVICT_UNIFORM,
                                                 TKVI_IF(TKVI_HAS_EVICT, tkvi_score_pooled)};

#endif /* TKVI_RULES_EVICT_SNAPKV_H */
