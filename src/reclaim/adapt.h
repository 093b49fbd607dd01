/*
 * reclaim/adapt.h - applies quality feedback to a cache (tkv_adapt_plan).
 *
 *     quality scores -> advice (learn/feedback.h) -> hot_tokens and the level of the cache (reclaim/budget.h)
 */
#ifndef TKVI_RECLAIM_ADAPT_H
#define TKVI_RECLAIM_ADAPT_H

#include "learn/feedback.h"
#include "reclaim/budget.h"

/* hot_tokens of the current level: that of its first layer that does not keep all tokens exact, without the layer's
 * delay. If the level has no such layer, the nearest level counts, the looser one first. Returns 0 if all levels keep
 * all tokens exact. */
static int tkvi_hot_tokens(const tkv_cache *kv) {
    const int n = kv->tables.n_levels;
    int away, side, layer;
    for (away = 0; away < n; away++)
        for (side = -1; side <= 1; side += 2) {
            const int level = kv->tables.level + side * away;
            for (layer = 0; layer < kv->tables.cfg.model.n_layers && level >= 0 && level < n; layer++) {
                const int hot = tkvi_tier_specs_of(&kv->tables, layer)[level].hot;
                if (kv->tables.plan[layer].stored_layer == layer && hot != TKVI_FOREVER)
                    return tkvi_max(0, hot - kv->tables.plan[layer].hot_delay);
            }
        }
    return 0;
}

/* The level after a step of -1, 0 or 1, within cfg.budget.pressure. Under a budget it does not change: there
 * memory pressure decides the level. */
static int tkvi_level_after_step(const tkv_cache *kv, int step) {
    const tkv_pressure_config *p = &kv->budget.pressure.cfg;
    const int level = kv->tables.level + step;
    return tkvi_has_budget(kv) || level < p->min_level || level > p->max_level ? kv->tables.level : level;
}

TKV_API tkv_status tkv_adapt_plan(tkv_cache *kv, tkv_feedback *f, tkv_advice *out) {
    tkv_advice a;
    int hot;
    tkv_status st;
    if (!TKVI_HAS_METER) return tkvi_refuse_left_out(kv, "TKV_NO_METER leaves this out");
    if (!kv) return TKV_ERR_ARG;
    hot = tkvi_hot_tokens(kv);
    st = tkv_get_advice(f, hot, kv->tables.level, &a);
    if (st) return tkvi_fail(kv, st, "the feedback is missing", 0, NULL);
    if (hot && a.hot_tokens != hot && !(kv->pool.keep_all && !tkvi_has_budget(kv)))
        st = tkv_set_hot_tokens(kv, a.hot_tokens);
    if (!st) tkvi_change_level(kv, tkvi_level_after_step(kv, a.step));
    a.step = kv->tables.level - (a.level - a.step); /* the step that was taken */
    a.level = kv->tables.level;
    a.hot_tokens = tkvi_hot_tokens(kv);
    if (!st && out) *out = a;
    return st ? st : tkvi_ok(kv);
}

#endif /* TKVI_RECLAIM_ADAPT_H */
