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

static const tkvi_evict_row tkvi_evict_knorm = {"knorm",           TKV_EVICT_NEEDS_NORMS, 4, 32, 0,
                                                TKV_EVICT_UNIFORM, tkvi_score_norm};

TKV_API tkv_status tkv_evict_key_norms(const float *keys, int n, int n_kv_heads, int head_dim, float *out) {
    int i, h;
    if (!tkvi_keys_are_sound(keys, n, n_kv_heads, head_dim) || (n > 0 && !out)) return TKV_ERR_ARG;
    for (i = 0; i < n; i++) {
        double sum = 0.0;
        for (h = 0; h < n_kv_heads; h++)
            sum += tkvi_key_norm(tkvi_key_of(keys, i, n_kv_heads, h, head_dim), head_dim);
        out[i] = (float)(sum / n_kv_heads);
    }
    return TKV_OK;
}

#endif /* TKVI_RULES_EVICT_KNORM_H */
