/*
 * reclaim/scores.h - attention scores: how much attention each token got. reclaim/sample_scores.h collects them while
 * attention runs. The token_meta of each block stores them (cache/pool.h).
 *
 * A row of a table defines how scores are formed (rules/score_modes.h). All calls between two appends are one step.
 * The stamp of a step is the length of the list. The first call that reaches a block in a step decays the scores of
 * that block, or resets them.
 *
 * Policies that score by the last queries (TOVA, SnapKV, PyramidKV) reset. Behind an append of several tokens their
 * newest queries count. While decoding, the last queries before the next eviction count, which list->evict_len
 * forecasts: one in cfg.importance.sample_every of a batch. Their steps have one stamp, the forecast, so they add up.
 *
 * Readers of the cache write here, as with the sums of learn/statistics.h. So they take the lock kv->learning.
 * Without atomics (neither gcc nor clang) attention collects nothing. Scores that the caller adds count all the
 * same.
 */
#ifndef TKVI_RECLAIM_SCORES_H
#define TKVI_RECLAIM_SCORES_H

#include "cache/cache.h"

/* 1 if `scores` of token_meta holds key norms (the bits of a float) in place of attention scores. This is so if the
 * policy is KNORM and attention scores are not collected. Keys then need not be decoded for each eviction, and the
 * norms are those of the appended keys. */
static int tkvi_keeps_norms(const tkv_cache *kv) {
    return TKVI_HAS_EVICT && kv->tables.cfg.evict.policy == TKV_EVICT_KNORM && !kv->token_scores.mode;
}

/* 1 if this cache collects the attention scores that a policy needs, or if the policy needs none. */
static int tkvi_collects_for(const tkv_cache *kv, tkv_evict_policy kind) {
    const int attention =
        TKVI_NEEDS_TOTAL_SCORES | TKVI_NEEDS_PROMPT_SCORES | TKVI_NEEDS_LAST_SCORES | TKVI_NEEDS_LOW_COUNTS;
    const int need = tkvi_evict_needs(kind) & attention;
    return !need || (kv->token_scores.mode && kv->token_scores.mode->need == need);
}

/* >>token_meta. len: tokens of the list */
/* Multiplies the scores of a block by `by`, if that is below 1. */
static void tkvi_token_score_fade(uint32_t *mass, double by) {
    int t;
    for (t = 0; t < TKVI_BLOCK && by < 1.0; t++) mass[t] = (uint32_t)tkvi_f64((double)mass[t] * by);
}

/* Decays the scores of a block to a step. Modes in which each step begins from zero reset them instead. */
static void tkvi_decay_to_step(const tkvi_token_scores *m, tkvi_token_meta *n, int step) {
    if (n->score_step == step || !m->mode) return;
    tkvi_token_score_fade(
        n->scores, m->mode->fresh ? 0.0 : tkvi_power((double)m->importance.decay, step - n->score_step));
    n->score_step = step;
}

/* 1 if attention must collect scores of a list now, in a mode in which each step begins from zero. */
static int tkvi_counts_now(const tkvi_token_scores *m, const tkvi_list *list) {
    return list->len - list->chunk_start > 1 || list->len > list->evict_len - m->decoded;
}

static int tkvi_score_stamp(const tkvi_token_scores *m, const tkvi_list *list) {
    const int decodes = m->mode->fresh && list->len - list->chunk_start <= 1;
    if (!decodes || !tkvi_counts_now(m, list)) return list->len;
    return tkvi_max(list->len, list->evict_len) + 1; /* + 1: a chunk may end there */
}

/* Joins new scores to those of a block of a list. said: the new scores of its 64 tokens, 0 for evicted ones. one: the
 * integer that stands for a score of 1. */
static void tkvi_token_score_add(tkv_cache *kv, const tkvi_list *list, uint32_t id, const float *said,
                                 float one) {
    const tkvi_token_scores *m = &kv->token_scores;
    tkvi_token_meta *n = &kv->pool.token_meta[id];
    uint32_t more[TKVI_BLOCK], any = 0;
    int t;
    for (t = 0; t < TKVI_BLOCK; t++) any |= more[t] = tkvi_token_score_counted(said[t], one);
    if (!any) return;
    tkvi_lock(&kv->stats.lock);
    tkvi_decay_to_step(m, n, tkvi_score_stamp(m, list));
    m->mode->join(n->scores, more);
    tkvi_unlock(&kv->stats.lock);
}

/* Decays the scores of two blocks to the same step, the later one. Scores can then move from one to the other. */
static void tkvi_align_steps(tkv_cache *kv, uint32_t a, uint32_t b) {
    tkvi_token_meta *n = kv->pool.token_meta;
    tkvi_decay_to_step(&kv->token_scores, &n[a], tkvi_max(n[a].score_step, n[b].score_step));
    tkvi_decay_to_step(&kv->token_scores, &n[b], n[a].score_step);
}

/* Scores of a list of `len` tokens go to a list that then has new_len tokens. They are as old there as here. Where
 * older queries do not count, no query of that list has given them. */
static void tkvi_carry_scores(tkv_cache *kv, tkvi_token_meta *meta, int len, int new_len) {
    const tkvi_token_score_mode *mode = kv->token_scores.mode;
    tkvi_decay_to_step(&kv->token_scores, meta, tkvi_max(meta->score_step, len));
    meta->score_step = mode && mode->fresh ? 0 : new_len;
}

/* The step of the newest sampled queries, in modes where older ones do not count; in other modes 0. */
static int tkvi_token_score_newest(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    int i, step = 0;
    if (!kv->token_scores.mode || !kv->token_scores.mode->fresh) return 0;
    tkvi_lock(&kv->stats.lock);
    for (i = 0; i < list->n; i++)
        step = tkvi_max(step, tkvi_min(list->len, kv->pool.token_meta[ids[i]].score_step));
    tkvi_unlock(&kv->stats.lock);
    return step;
}

/* Writes the scores of the 64 slots of a block, decayed to now, to `a`. They are what a policy needs, or the A of
 * rules/importance.h. newest: result of tkvi_token_score_newest for the list. */
static void tkvi_decay_to_now(tkv_cache *kv, uint32_t id, int len, int newest, float *a) {
    const tkvi_token_scores *m = &kv->token_scores;
    tkvi_token_meta n;
    double by = 0.0;
    int t;
    memset(&n, 0, sizeof n);
    if (m->mode) {
        tkvi_lock(&kv->stats.lock);
        n = kv->pool.token_meta[id];
        tkvi_unlock(&kv->stats.lock);
        by = m->mode->fresh ? (tkvi_min(n.score_step, len) == newest ? 1.0 : 0.0)
                            : tkvi_power((double)m->importance.decay, len - n.score_step);
        by *= (double)m->mode->sign / (double)m->unit;
    }
    for (t = 0; t < TKVI_BLOCK; t++) a[t] = (float)((double)n.scores[t] * by);
}

/* Importance of n tokens, at most 64, at these positions. a: in, their attention scores of now; out, their
 * importance. */
static void tkvi_importance_of_block(const tkv_cache *kv, const int *position, float *a, int n, int len) {
    tkv_token_importance token[TKVI_BLOCK];
    int t;
    for (t = 0; t < n; t++) {
        token[t].attention = a[t];
        token[t].step = len - 1;
    }
    (void)tkv_update_importance(&kv->token_scores.importance, token, position, NULL, n, len - 1, a);
}

/* After a list was cut: no step of its blocks lies beyond its length. New tokens begin with 0 (tkvi_store_tokens). */
static void tkvi_token_score_cut(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    const tkvi_token_score_mode *mode = kv->token_scores.mode;
    int i;
    if (!TKVI_HAS_EVICT || !kv->pool.token_meta) return;
    for (i = 0; i < list->n; i++) {
        tkvi_token_meta *n = &kv->pool.token_meta[ids[i]];
        if (n->score_step > list->len) n->score_step = mode && mode->fresh ? 0 : list->len;
    }
}

#endif /* TKVI_RECLAIM_SCORES_H */
