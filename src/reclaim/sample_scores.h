/*
 * reclaim/sample_scores.h - the consumer that collects attention scores of tokens (reclaim/scores.h). It samples
 * queries, and adds the softmax weights of their keys to token_meta.
 */
#ifndef TKVI_RECLAIM_SAMPLE_SCORES_H
#define TKVI_RECLAIM_SAMPLE_SCORES_H

#include "cache/consumers.h"
#include "reclaim/scores.h"

typedef struct tkvi_score_sampling {
    unsigned rows;
    float low[TKVI_ROWS]; /* weights below it count as low */
} tkvi_score_sampling;

/* If query heads are combined first, the heads of a query must be in one work tile. */
static int tkvi_scores_want(const tkv_cache *kv, const tkv_attend_params *p, int stored) {
    (void)p;
    (void)stored;
#if defined(__GNUC__) || defined(__clang__)
    if (kv->pool.token_meta && kv->token_scores.mode)
        return TKVI_WANTS_CALL | (kv->token_scores.heads ? TKVI_WANTS_WHOLE_QUERIES : 0);
#endif
    (void)kv; /* attention scores need atomics */
    return 0;
}

/* Layers and heads sample different positions to spread the work. */
static unsigned tkvi_scores_sample(const tkvi_tile_view *v) {
    const tkvi_token_scores *m = &v->kv->token_scores;
    unsigned rows = 0;
    int r;
    if (!m->mode->fresh)
        return tkvi_rows_every(v, (int64_t)v->kv->tables.plan[v->layer].at.heads + v->head, m->every);
    for (r = 0; r < v->rows && tkvi_counts_now(m, v->list); r++)
        rows |= (unsigned)(v->index[r] >= v->list->len - m->newest) << r;
    return rows;
}

/* Number of live keys that a row sees by causality and window. */
static int tkvi_keys_seen(const tkvi_tile_view *v, int r) {
    int i, t, n = 0;
    for (i = 0; i < v->list->n; i++) {
        const tkvi_entry *e = &v->kv->pool.entry[v->ids[i]];
        const int slots = tkvi_block_tokens(v->kv, v->list, v->ids, i);
        int low, high;
        const uint64_t sinks = tkvi_sinks_beyond(v->kv, v->ids, i, &v->sight);
        tkvi_visible_keys(v, i, r, &low, &high);
        if (tkvi_has_all_slots(e) && !sinks) {
            n += tkvi_max(0, tkvi_min(high, e->start + slots) - tkvi_max(low, e->start));
            continue;
        }
        for (t = 0; t < slots; t++) {
            const int at = tkvi_slot_index(v->kv, v->ids[i], t);
            n += (at >= low || (sinks >> t & 1)) && at < high && (tkvi_live_mask(e, slots) >> t & 1);
        }
    }
    return n;
}

/* An even share of the keys that a row sees is the default of `low`. */
static unsigned tkvi_scores_begin(const tkvi_tile_view *v, unsigned rows, void *state) {
    tkvi_score_sampling *s = (tkvi_score_sampling *)state;
    const tkvi_token_scores *m = &v->kv->token_scores;
    int r;
    s->rows = rows;
    for (r = 0; r < v->rows; r++) {
        s->low[r] = m->importance.low;
        if (rows >> r & 1 && m->mode->need == TKVI_NEEDS_LOW_COUNTS && !(s->low[r] > 0.0f))
            s->low[r] = 1.0f / (float)tkvi_max(1, tkvi_keys_seen(v, r));
    }
    return rows;
}

/* p: [64] softmax weights of row r. Returns 0, with zeros in p, if lse is not finite or the row sees no key. */
static int tkvi_weights_of(const tkvi_tile_view *v, const float *scores, int r, float *p) {
    if (tkvi_is_finite(v->lse[r]) && !TKVI_IS_HIDDEN(v->lse[r])) {
        (void)v->kv->kernels->exp64(scores + r * TKVI_BLOCK, v->lse[r], p);
        return 1;
    }
    memset(p, 0, TKVI_BLOCK * sizeof *p);
    return 0;
}

/* Adds the attention weights of rows first .. last-1 to token_meta of block i. */
static void tkvi_scores_add(const tkvi_tile_view *v, int i, const float *scores, const float *low, int first,
                            int last) {
    TKVI_ALIGNED float p[TKVI_BLOCK], added[TKVI_BLOCK], more[TKVI_BLOCK];
    const tkvi_token_scores *m = &v->kv->token_scores;
    const tkvi_geometry *g = tkvi_geometry_of(v->kv, v->layer);
    const uint64_t gone = v->kv->pool.entry[v->ids[i]].evicted_mask;
    int r, t, end;
    memset(added, 0, sizeof added);
    for (r = first; r < last; r = end) {
        int any = tkvi_weights_of(v, scores, r, p);
        for (end = r + 1; m->heads && end < last && v->index[end] == v->index[r]; end++) {
            any |= tkvi_weights_of(v, scores, end, more);
            m->heads(NULL, more, 0.0f, p);
        }
        if (any) m->mode->say(scores + r * TKVI_BLOCK, p, low[r], added);
    }
    for (t = 0; t < TKVI_BLOCK && gone; t++)
        if (gone >> t & 1) added[t] = 0.0f;
    tkvi_token_score_add(v->kv, v->list, v->ids[i], added,
                         tkvi_token_score_one(m, g->n_heads / g->n_kv_heads));
}

/* Sampled rows that follow one another are added up before their sum is rounded to integers. */
static TKVI_NOINLINE void tkvi_scores_observe(const tkvi_tile_view *v, int i, const float *scores,
                                              void *state) {
    const tkvi_score_sampling *s = (const tkvi_score_sampling *)state;
    int first, last;
    for (first = 0; s->rows >> first; first = last + 1) {
        for (last = first; s->rows >> last & 1;) last++;
        if (last > first) tkvi_scores_add(v, i, scores, s->low, first, last);
    }
}

static const tkvi_consumer tkvi_score_consumer = {TKVI_OBSERVES_BLOCKS,
                                                  sizeof(tkvi_score_sampling),
                                                  tkvi_scores_want,
                                                  tkvi_scores_sample,
                                                  tkvi_scores_begin,
                                                  tkvi_scores_observe,
                                                  NULL};

#endif /* TKVI_RECLAIM_SAMPLE_SCORES_H */
