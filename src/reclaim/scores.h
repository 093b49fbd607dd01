/*
 * reclaim/scores.h - how much attention each token got: attention/attend.h gathers it while it runs, the blocks'
 * notes keep it (cache/pool.h).
 *
 * What is gathered is a row of a table (rules/score_modes.h). All calls between two appends are one step; its stamp
 * is the list's length. Who comes first to a block in a step decays its numbers, or begins anew.
 *
 * As with the sums of learn/statistics.h, readers of the cache write here, and so under kv->learning. Without atomics
 * (neither gcc nor clang) attention gathers nothing; what a caller adds counts all the same. May call cache and
 * below.
 */
#ifndef TKVI_RECLAIM_SCORES_H
#define TKVI_RECLAIM_SCORES_H

#include "cache/cache.h"

/* Nothing is gathered, and the policy wants norms: then `mass` of a token has the bits of its key's, a float. So they
 * are not decoded for each batch, and are those of the keys that came. */
static int tkvi_keeps_norms(const tkv_cache *kv) {
    return kv->tables.cfg.evict.kind == TKV_EVICT_KNORM && !kv->mass.mode;
}

/* Is what a policy needs of attention what this cache gathers? */
static int tkvi_gathers_for(const tkv_cache *kv, tkv_evict_kind kind) {
    const int attention =
        TKV_EVICT_NEEDS_MASS | TKV_EVICT_NEEDS_OBSERVED | TKV_EVICT_NEEDS_LAST | TKV_EVICT_NEEDS_LOWS;
    const int need = tkv_evict_needs(kind) & attention;
    return !need || (kv->mass.mode && kv->mass.mode->need == need);
}

/* >>notes. len: of the list */
static void tkvi_token_score_fade(uint32_t *mass, double by) {
    int t;
    for (t = 0; t < TKVI_BLOCK && by < 1.0; t++) mass[t] = (uint32_t)tkvi_f64((double)mass[t] * by);
}

/* A block's numbers, brought to a step. */
static void tkvi_decay_to_step(const tkvi_token_scores *m, tkvi_token_meta *n, int step) {
    if (n->step == step || !m->mode) return;
    tkvi_token_score_fade(n->mass,
                          m->mode->fresh ? 0.0 : tkvi_power((double)m->importance.decay, step - n->step));
    n->step = step;
}

/* said: of the block's 64 tokens, 0 where they are gone; one: 1 of it as a whole number. */
static void tkvi_token_score_add(tkv_cache *kv, uint32_t id, int len, const float *said, float one) {
    const tkvi_token_scores *m = &kv->mass;
    tkvi_token_meta *n = &kv->pool.token_meta[id];
    uint32_t more[TKVI_BLOCK], any = 0;
    int t;
    for (t = 0; t < TKVI_BLOCK; t++) any |= more[t] = tkvi_token_score_counted(said[t], one);
    if (!any) return;
    tkvi_lock(&kv->learning);
    tkvi_decay_to_step(m, n, len);
    m->mode->join(n->mass, more);
    tkvi_unlock(&kv->learning);
}

/* The numbers of two blocks that become one are those of one step. */
static void tkvi_align_steps(tkv_cache *kv, uint32_t a, uint32_t b) {
    tkvi_token_meta *n = kv->pool.token_meta;
    tkvi_decay_to_step(&kv->mass, &n[a], tkvi_max(n[a].step, n[b].step));
    tkvi_decay_to_step(&kv->mass, &n[b], n[a].step);
}

/* The step of the newest queries that told, where older ones do not count. */
static int tkvi_token_score_newest(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    int i, step = 0;
    if (!kv->mass.mode || !kv->mass.mode->fresh) return 0;
    tkvi_lock(&kv->learning);
    for (i = 0; i < list->n; i++)
        step = tkvi_max(step, tkvi_min(list->len, kv->pool.token_meta[ids[i]].step));
    tkvi_unlock(&kv->learning);
    return step;
}

/* A block's numbers as of now: what a policy needs of its 64 slots, or the A of rules/importance.h. newest: of the
 * list. */
static void tkvi_decay_to_now(tkv_cache *kv, uint32_t id, int len, int newest, float *a) {
    const tkvi_token_scores *m = &kv->mass;
    tkvi_token_meta n;
    double by = 0.0;
    int t;
    memset(&n, 0, sizeof n);
    if (m->mode) {
        tkvi_lock(&kv->learning);
        n = kv->pool.token_meta[id];
        tkvi_unlock(&kv->learning);
        by = m->mode->fresh ? (n.step == newest ? 1.0 : 0.0)
                            : tkvi_power((double)m->importance.decay, len - n.step);
        by *= (double)m->mode->sign / (double)m->unit;
    }
    for (t = 0; t < TKVI_BLOCK; t++) a[t] = (float)((double)n.mass[t] * by);
}

/* Importance of up to 64 tokens at these positions, from what was gathered of them. */
static void tkvi_weigh_importance(const tkv_cache *kv, const int *position, float *a, int n, int len) {
    tkv_importance token[TKVI_BLOCK];
    int t;
    for (t = 0; t < n; t++) {
        token[t].attention = a[t];
        token[t].step = len - 1;
    }
    (void)tkv_importance_read(&kv->mass.importance, token, position, n, len - 1, a);
}

/* The list was cut to its length: no step lies ahead. (Tokens that come now begin with nothing: tkvi_store.) */
static void tkvi_token_score_cut(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    const tkvi_token_score_mode *mode = kv->mass.mode;
    int i;
    if (!kv->pool.token_meta) return;
    for (i = 0; i < list->n; i++) {
        tkvi_token_meta *n = &kv->pool.token_meta[ids[i]];
        if (n->step > list->len) n->step = mode && mode->fresh ? 0 : list->len;
    }
}

#endif /* TKVI_RECLAIM_SCORES_H */
