/*
 * rules/evict_random.h - random eviction, as a baseline. The score depends on seed and position alone, so a token
 * keeps its score while other tokens come and go.
 *
 *     score of a token = splitmix64(seed + (position + 1) * 0x9e3779b97f4a7c15) / 2^64, cut to 24 bits
 *
 * The constant is 2^64 / golden ratio.
 */
#ifndef TKVI_RULES_EVICT_RANDOM_H
#define TKVI_RULES_EVICT_RANDOM_H

#include "rules/evict_policy.h"

static void tkvi_score_random(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)recent;
    for (i = 0; i < v->n; i++) {
        uint64_t z =
            (uint64_t)(uint32_t)cfg->seed + ((uint64_t)tkvi_position_of(v, i) + 1u) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        out[i] = (float)((z ^ (z >> 31)) >> 40) * 5.9604644775390625e-8f;
    }
}

static const tkvi_evict_row tkvi_evict_random = {
    "random", 0, 0, 0, 0, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_random)};

#endif /* TKVI_RULES_EVICT_RANDOM_H */
