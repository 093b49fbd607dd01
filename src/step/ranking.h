/*
 * step/ranking.h - importance of the tokens of a cache. rules/importance.h computes it from the attention scores
 * that attention collected (reclaim/scores.h). A caller can read it, add attention scores of its own, and ask for
 * the k most important tokens.
 */
#ifndef TKVI_STEP_RANKING_H
#define TKVI_STEP_RANKING_H

#include "cache/lookup.h"
#include "reclaim/budget.h"

/* One layer of one sequence. newest: tkvi_token_score_newest of its list. */
typedef struct tkvi_ranking {
    tkv_cache *kv;
    const tkvi_list *list;
    const uint32_t *ids;
    int newest;
} tkvi_ranking;

static tkvi_ranking tkvi_ranking_of(tkv_cache *kv, int seq, int layer) {
    tkvi_ranking r;
    r.kv = kv;
    r.list = tkvi_list_of(kv, seq, layer);
    r.ids = tkvi_ids(kv, seq, layer);
    r.newest = tkvi_token_score_newest(kv, r.list, r.ids);
    return r;
}

/* Begins a call. needs_scores 0: a strategy without attention scores will do, which is recency: it depends on age
 * alone. */
static tkv_status tkvi_ranking_init(tkvi_ranking *r, tkv_cache *kv, int seq, int layer, int needs_scores) {
    const int stored = tkvi_stored_layer(kv, seq, layer);
    if (stored < 0) return tkvi_refuse_reading(kv, seq, layer);
    if (!kv->token_scores.mode &&
        (needs_scores || kv->token_scores.importance.strategy != TKV_IMPORTANCE_RECENCY))
        return tkvi_fail_reader(
            kv, TKV_ERR_CONFIG,
            "no attention scores are collected: set cfg.importance.sample_every, or a strategy or "
            "policy that counts attention",
            0, NULL);
    *r = tkvi_ranking_of(kv, seq, stored);
    return TKV_OK;
}

/* Checks that n numbers are given or wanted, those of the tokens from `start` on. */
static tkv_status tkvi_check_numbers(const tkvi_ranking *r, int start, int n, const float *numbers) {
    if (n < 0 || (n > 0 && !numbers))
        return tkvi_fail_reader(r->kv, TKV_ERR_ARG, "the array must have n numbers, and n is", n, "");
    if (start < 0 || start > r->list->len || n > r->list->len - start)
        return tkvi_fail_reader(r->kv, TKV_ERR_RANGE, "the layer has", r->list->len,
                                " tokens; start + n goes beyond");
    return TKV_OK;
}

/* Positions and importance of the live tokens of block i; returns their number (at most 64). */
static int tkvi_ranking_block(const tkvi_ranking *r, int i, int *position, float *out) {
    const int slots = tkvi_block_tokens(r->kv, r->list, r->ids, i);
    const uint64_t there = tkvi_live_mask(&r->kv->pool.entry[r->ids[i]], slots);
    float a[TKVI_BLOCK];
    int t, n = 0;
    tkvi_decay_to_now(r->kv, r->ids[i], r->list->len, r->newest, a);
    for (t = 0; t < slots; t++) {
        if (!(there >> t & 1)) continue;
        position[n] = tkvi_slot_index(r->kv, r->ids[i], t);
        out[n++] = a[t];
    }
    tkvi_importance_of_block(r->kv, position, out, n, r->list->len);
    return n;
}

TKV_API tkv_status tkv_get_importance(tkv_cache *kv, int seq, int layer, int start, int n, float *out,
                                      uint64_t *missing) {
    tkvi_ranking r;
    tkv_status st;
    int i, t;
    if (!TKVI_HAS_EVICT) return tkvi_refuse_left_out(kv, "TKV_NO_EVICT leaves this out");
    st = tkvi_ranking_init(&r, kv, seq, layer, 0);
    if (!st) st = tkvi_check_numbers(&r, start, n, out);
    if (st) return st;
    for (i = 0; i < n; i++) out[i] = 0.0f;
    for (i = 0; i < n && missing; i++) {
        if (i % 64 == 0) missing[i / 64] = 0;
        tkvi_mark(missing, i);
    }
    for (i = 0; i < r.list->n; i++) {
        float x[TKVI_BLOCK];
        int position[TKVI_BLOCK], found;
        if (tkvi_block_index_end(kv, r.list, r.ids, i) <= start) continue;
        if (tkvi_block_start(kv, r.ids, i) - start >= n) break;
        found = tkvi_ranking_block(&r, i, position, x);
        for (t = 0; t < found; t++) {
            const int at = position[t] - start;
            if (at < 0 || at >= n) continue;
            out[at] = x[t];
            if (missing) missing[at >> 6] &= ~((uint64_t)1 << (at & 63));
        }
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_add_scores(tkv_cache *kv, int seq, int layer, int start, int n, const float *scores) {
    tkvi_ranking r;
    tkv_status st;
    float low;
    int i, t;
    if (!TKVI_HAS_EVICT) return tkvi_refuse_left_out(kv, "TKV_NO_EVICT leaves this out");
    st = tkvi_ranking_init(&r, kv, seq, layer, 1);
    if (!st) st = tkvi_check_numbers(&r, start, n, scores);
    if (st) return st;
    for (i = 0; i < n; i++)
        if (!tkvi_within(scores[i], 0.0f, FLT_MAX))
            return tkvi_fail(kv, TKV_ERR_NONFINITE, "scores must be finite and not negative; entry", i,
                             " is not");
    low = tkvi_or(kv->token_scores.importance.low, 1.0f / (float)tkvi_max(1, n));
    for (i = 0; i < r.list->n; i++) {
        const int slots = tkvi_block_tokens(kv, r.list, r.ids, i);
        const uint64_t there = tkvi_live_mask(&kv->pool.entry[r.ids[i]], slots);
        float s[TKVI_BLOCK], p[TKVI_BLOCK], said[TKVI_BLOCK];
        memset(said, 0, sizeof said);
        for (t = 0; t < TKVI_BLOCK; t++) {
            const int at = t < slots && (there >> t & 1) ? tkvi_slot_index(kv, r.ids[i], t) - start : -1;
            s[t] = at >= 0 && at < n ? 0.0f : TKVI_HIDDEN;
            p[t] = at >= 0 && at < n ? tkvi_clampf(scores[at], 0.0f, TKVI_TOKEN_SCORE_MOST) : 0.0f;
        }
        kv->token_scores.mode->say(s, p, low, said);
        tkvi_token_score_add(kv, r.list, r.ids[i], said, kv->token_scores.unit);
    }
    return tkvi_ok(kv);
}

/* Is a worse than b: less important, or equally important and younger? */
static int tkvi_worse(const tkv_ranked *a, const tkv_ranked *b) {
    return a->importance < b->importance || (!(b->importance < a->importance) && a->position > b->position);
}

TKV_API tkv_status tkv_find_top_tokens(tkv_cache *kv, int seq, int layer, int k, int protect, tkv_ranked *out,
                                       int *count) {
    tkvi_ranking r;
    tkv_evict_config evict;
    tkv_status st;
    int i, t, low, high, found = 0;
    if (!TKVI_HAS_EVICT) return tkvi_refuse_left_out(kv, "TKV_NO_EVICT leaves this out");
    st = tkvi_ranking_init(&r, kv, seq, layer, 0);
    if (st) return st;
    if (k < 0 || (k > 0 && !out) || !count)
        return tkvi_fail_reader(kv, TKV_ERR_ARG, "out or count is missing, or k is negative: k is", k, "");
    (void)tkvi_evict_fill(&kv->tables.cfg.evict, &evict);
    low = protect ? evict.sink_tokens : 0;
    high = protect ? r.list->len - evict.recent_tokens : r.list->len;
    for (i = r.list->n; i-- > 0;) { /* newest first: with recency, few then move up past earlier ones */
        float x[TKVI_BLOCK];
        int position[TKVI_BLOCK], n = tkvi_ranking_block(&r, i, position, x);
        for (t = n; t-- > 0;) {
            tkv_ranked token;
            int from = 0, to = found;
            token.position = position[t];
            token.importance = x[t];
            if (position[t] < low || position[t] >= high) continue;
            if (found == k && (k == 0 || tkvi_worse(&token, &out[k - 1]))) continue;
            while (from < to) { /* binary search for the first worse entry */
                const int mid = from + (to - from) / 2;
                if (tkvi_worse(&token, &out[mid])) from = mid + 1;
                else to = mid;
            }
            if (found < k) found++;
            memmove(out + from + 1, out + from, (size_t)(found - 1 - from) * sizeof *out);
            out[from] = token;
        }
    }
    *count = found;
    return TKV_OK;
}

#endif /* TKVI_STEP_RANKING_H */
