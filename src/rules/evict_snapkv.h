/*
 * rules/evict_snapkv.h - SnapKV (arXiv 2404.14469, section 4): attention that the last queries of the prompt, the
 * observation window, give to what is before it, averaged over neighbours; the window itself stays.
 *
 *     score of token i = sum over d = -pool/2 .. pool/2 of observed(i + d) / pool
 *
 * Beyond the ends there are zeros, as the authors' code has it.
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
            if (tkvi_is_alive(v, j)) sum += (double)v->observed[j];
        out[i] = (float)(sum / cfg->pool);
        most = out[i] > most ? out[i] : most;
    }
    for (; i < v->n; i++)
        out[i] = most; /* where the budget is smaller than the window, the oldest of it go last */
}

static const tkvi_evict_row tkvi_evict_snapkv = {"snapkv",          TKV_EVICT_NEEDS_OBSERVED, 4, 32, 0,
                                                 TKV_EVICT_UNIFORM, tkvi_score_pooled};

#endif /* TKVI_RULES_EVICT_SNAPKV_H */
