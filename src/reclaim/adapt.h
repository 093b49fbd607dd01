/*
 * reclaim/adapt.h - applies quality feedback to a cache (tkv_adapt_plan).
 *
 *     quality scores -> advice (learn/feedback.h) -> hot_tokens and the level of the cache (reclaim/budget.h)
 *
 * With cfg.meter.target an append does so itself (tkvi_follow_meter): scores come from the meter, and only the level
 * moves.
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

/* The level after a step of -1, 0 or 1, within cfg.budget.pressure. It does not change under a budget, where memory
 * pressure decides the level, nor in place, where the memory is that of the plan. */
static int tkvi_level_after_step(const tkv_cache *kv, int step) {
    const tkv_pressure_config *p = &kv->budget.pressure.cfg;
    const int level = kv->tables.level + step;
    const int is_fixed = tkvi_has_budget(kv) || kv->pool.keep_all;
    return is_fixed || level < p->min_level || level > p->max_level ? kv->tables.level : level;
}

TKV_API tkv_status tkv_adapt_plan(tkv_cache *kv, tkv_feedback *f, tkv_advice *out) {
    tkv_advice a;
    int hot;
    tkv_status st;
    if (!TKVI_HAS_METER) return tkvi_refuse_left_out(kv, "TKV_NO_METER leaves this out");
    if (!kv) return TKV_ERR_ARG;
    if (kv->tables.looser_level)
        return tkvi_fail(kv, TKV_ERR_UNSUPPORTED,
                         "quality cannot choose among levels that do not go from loose to tight: see level",
                         kv->tables.looser_level, " of the ladder");
    hot = tkvi_hot_tokens(kv);
    st = tkv_get_advice(f, hot, kv->tables.level, &a);
    if (st) return tkvi_fail(kv, st, "the feedback is missing", 0, NULL);
    if (hot && a.hot_tokens != hot && !(kv->pool.keep_all && !tkvi_has_budget(kv)))
        (void)tkv_set_hot_tokens(kv,
                                 tkvi_min(a.hot_tokens, TKVI_FOREVER - 1)); /* advice may go one further */
    tkvi_change_level(kv, tkvi_level_after_step(kv, a.step));
    a.step = kv->tables.level - (a.level - a.step); /* the step that was taken */
    a.level = kv->tables.level;
    a.hot_tokens = tkvi_hot_tokens(kv);
    if (out) *out = a;
    return tkvi_ok(kv);
}

/* Starts the controller of cfg.meter.target. It advises on the level alone: `hot` is the least and the most. */
static void tkvi_start_following(const tkv_cache *kv, tkv_feedback *f, int hot) {
    const tkv_pressure_config *p = &kv->budget.pressure.cfg;
    tkv_feedback_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.target = kv->tables.cfg.meter.target;
    cfg.min_hot = cfg.max_hot = tkvi_max(1, hot);
    cfg.min_level = p->min_level;
    cfg.max_level = p->max_level ? p->max_level : TKV_OFF;
    (void)tkv_init_feedback(f, &cfg, NULL, 0);
}

/* Makes a score of what the meter measured since the last one, if that is two samples of each probe, and follows the
 * advice on the level. For an append; not while memory is reserved, since it was counted for the present plan. */
static void tkvi_follow_meter(tkv_cache *kv) {
    tkvi_meter *m = kv->meter;
    tkvi_error_sums sum;
    tkv_quality_info info;
    tkv_score_params params;
    tkv_advice advice;
    float score;
    int i, hot;
    if (!TKVI_HAS_METER || !m || !m->feedback) return;
    TKVI_ASSERT(!tkvi_has_budget(kv) && !kv->pool.keep_all); /* meter.target is refused there */
    memset(&sum, 0, sizeof sum);
    for (i = 0; i < m->n; i++) tkvi_error_sums_add(&sum, &m->head_probe[i].sum);
    if (sum.samples < m->scored.samples) memset(&m->scored, 0, sizeof m->scored); /* tkv_reset_quality */
    if (sum.samples - m->scored.samples < 2u * (unsigned)m->n || tkvi_has_reservation(kv)) return;
    memset(&info, 0, sizeof info);
    memset(&params, 0, sizeof params);
    info.samples = sum.samples - m->scored.samples;
    if (sum.keys > m->scored.keys) /* else no coded key was seen, and the score says nothing of the plan */
        info.coverage = (double)(sum.kept - m->scored.kept) / (double)(sum.keys - m->scored.keys);
    info.output_error = (double)(sum.error - m->scored.error) / TKVI_METER_ONE / (double)info.samples;
    m->scored = sum;
    params.meter = &info;
    hot = tkvi_hot_tokens(kv);
    if (m->feedback->cfg.target <= 0.0f) tkvi_start_following(kv, m->feedback, hot);
    if (tkv_compute_score(&params, &score)) return;
    (void)tkv_observe_score(m->feedback, score);
    if (tkv_get_advice(m->feedback, tkvi_max(1, hot), kv->tables.level, &advice)) return;
    tkvi_change_level(kv, tkvi_level_after_step(kv, advice.step));
}

#endif /* TKVI_RECLAIM_ADAPT_H */
