/*
 * step/promotion.h - importance and promotion in one call: finds the blocks of a layer that matter enough to come
 * back, and brings them back. Threshold, limit per step and cool-down: rules/importance.h.
 *
 *     block     exact   coded + copy   offloaded   coded   discarded
 *     source      -     the copy       itself      none    the caller's model, or a copy
 */
#ifndef TKVI_STEP_PROMOTION_H
#define TKVI_STEP_PROMOTION_H

#include "step/promote.h"
#include "step/ranking.h"

/* *score is the importance of the block's most important token. Returns 0 if the block has no live tokens. */
static int tkvi_block_matters(const tkvi_ranking *r, int i, float *score) {
    float x[TKVI_BLOCK];
    int position[TKVI_BLOCK], t, n = tkvi_ranking_block(r, i, position, x);
    for (t = 0; t < n; t++) *score = t == 0 || x[t] > *score ? x[t] : *score;
    return n > 0;
}

/* Offers the blocks behind the sinks that are not exact in RAM as candidates for promotion. */
static void tkvi_offer_blocks(const tkvi_ranking *r, int layer, const tkv_promotion *p,
                              tkvi_promoting *best) {
    int i;
    for (i = r->list->sinks; i < r->list->n; i++) {
        const tkvi_block *b = tkvi_block_of(r->kv, r->ids[i]);
        const int moved = r->kv->pool.token_meta[r->ids[i]].moved_at;
        float score = 0.0f;
        if (!tkvi_is_offloaded(b) && tkvi_is_hot_layout(r->kv, layer, b->layout)) continue;
        if (!tkvi_block_matters(r, i, &score)) continue;
        /* After a cut, moved_at can lie behind the end of the list. */
        tkvi_promoting_offer(best, (int)r->ids[i], score,
                             tkvi_better_source(b) >= 0 || (p->compute && tkvi_is_discarded(b)),
                             moved ? tkvi_min(moved - 1, best->now) : TKV_NEVER);
    }
}

/* The index of a block in its list; -1: the list does not hold it any more. */
static int tkvi_place_of_block(const tkvi_ranking *r, uint32_t id) {
    int i;
    for (i = 0; i < r->list->n; i++)
        if (r->ids[i] == id) return i;
    return -1;
}

/* Promotes the candidates in order until one fails; *done counts the promoted blocks. Discarded blocks come back by
 * one tkv_seq_recompute. Under a budget, making room for them may recode, offload, discard or evict other blocks. */
static tkv_status tkvi_promote_candidates(const tkvi_ranking *r, int seq, int layer, const tkv_promotion *p,
                                          const tkvi_promoting *best, int *done) {
    tkv_cache *kv = r->kv;
    tkv_status st = TKV_OK;
    int j, i, asked = 0;
    for (j = 0; j < best->found && !st; j++) {
        const uint32_t id = (uint32_t)best->out[j];
        if ((i = tkvi_place_of_block(r, id)) < 0) continue;
        if (tkvi_better_source(tkvi_block_of(kv, id)) >= 0) {
            st = tkvi_promote_block(kv, seq, layer, i, tkvi_block_start(kv, r->ids, i));
            *done += !st;
            continue;
        }
        TKVI_ASSERT(p->compute || !tkvi_is_discarded(tkvi_block_of(kv, id))); /* else it was no candidate */
        if (tkvi_is_discarded(tkvi_block_of(kv, id)) && !asked++)
            st = tkv_seq_recompute(kv, seq, p->remat, tkvi_max(best->now, p->remat->step), p->compute,
                                   p->user, NULL);
        if (tkvi_is_discarded(tkvi_block_of(kv, id))) continue;
        TKVI_ASSERT(asked); /* nothing else brings a block back, or takes its source away */
        tkvi_record_move(kv, id, r->list->len);
        ++*done;
    }
    return st;
}

/* Codes promoted blocks again that matter less than half of the threshold, at most `most` of them. */
static void tkvi_return_blocks(const tkvi_ranking *r, int seq, int layer, const tkvi_promoting *p, int most) {
    const tkvi_list *list = r->list;
    int i;
    for (i = list->sinks; i < list->sinks + list->archive + list->warm && most > 0; i++) {
        const tkvi_block *b = tkvi_block_of(r->kv, r->ids[i]);
        const int moved = r->kv->pool.token_meta[r->ids[i]].moved_at;
        float score = 0.0f;
        if (!b->copy_layout || b->refs > 1 || b->tier == TKV_TIER_HOT || tkvi_is_offloaded(b) ||
            !tkvi_is_hot_layout(r->kv, layer, b->layout) || tkvi_has_named_sinks(&r->kv->pool, r->ids[i]))
            continue;
        if (moved && p->now - (moved - 1) < p->cooldown) continue;
        if (tkvi_block_matters(r, i, &score) && score >= .5f * p->threshold) continue;
        if (!tkvi_demote_block(r->kv, seq, layer, i,
                               tkvi_layout_of(&r->kv->tables, layer, (tkv_tier)b->tier)))
            return;
        most--;
    }
}

/* Promotion by cfg.promotion, after the tokens from index `from` on were appended to a layer. A block stays as it is if
 * memory is short, or if the store fails. */
static void tkvi_promote_by_itself(tkv_cache *kv, int seq, int layer, int from) {
    const tkv_promotion_config *cfg = &kv->tables.cfg.promotion;
    tkvi_ranking r;
    tkvi_promoting best;
    tkv_promotion p;
    int done = 0;
    if (!TKVI_HAS_EVICT || !TKVI_HAS_OFFLOAD || !cfg->every) return;
    if (tkvi_has_budget(kv) ? tkvi_is_pressed(kv, 9) : kv->pool.keep_all) return;
    if (tkvi_list_of(kv, seq, layer)->len / cfg->every == from / cfg->every || tkvi_has_reservation(kv))
        return;
    TKVI_ASSERT(kv->pool.token_meta);
    memset(&p, 0, sizeof p);
    p.by.cfg = *cfg;
    r = tkvi_ranking_of(kv, seq, layer);
    (void)tkvi_promoting_begin(&best, &p.by, r.list->len); /* a cache has a valid config */
    if (!tkvi_has_budget(kv)) tkvi_return_blocks(&r, seq, layer, &best, best.room);
    tkvi_offer_blocks(&r, layer, &p, &best);
    (void)tkvi_promote_candidates(&r, seq, layer, &p, &best, &done);
}

TKV_API tkv_status tkv_promote_important(tkv_cache *kv, int seq, int layer, tkv_promotion *p) {
    tkvi_ranking r;
    tkvi_promoting best;
    tkv_status st;
    int done = 0;
    if (!TKVI_HAS_EVICT) return tkvi_refuse_left_out(kv, "TKV_NO_EVICT leaves this out");
    if (!TKVI_HAS_BLOCKS_OUTSIDE_RAM) return tkvi_refuse_left_out(kv, "TKV_NO_OFFLOAD leaves this out");
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (!tkvi_has_own_layer(kv, seq, layer)) return tkvi_refuse_layer(kv, layer);
    if (!p || p->by.used < 0 || !p->compute != !p->remat)
        return tkvi_fail(kv, TKV_ERR_ARG, "p is missing, or it has compute without remat or the reverse", 0,
                         NULL);
    st = tkvi_ranking_init(&r, kv, seq, layer, 1);
    if (st) return st;
    if (r.list->len < p->by.step) p->by.step = p->by.used = 0; /* the list was cut: start the count anew */
    if (!tkvi_promoting_begin(&best, &p->by, r.list->len))
        return tkvi_fail(kv, TKV_ERR_CONFIG, "threshold, per_step or cooldown is out of range, per_step is",
                         p->by.cfg.per_step, "");
    p->promoted = p->waiting = p->no_source = 0;
    if (kv->pool.token_meta) tkvi_offer_blocks(&r, layer, p, &best);
    st = tkvi_promote_candidates(&r, seq, layer, p, &best, &done);
    tkvi_promoting_end(&best, &p->by, done);
    p->promoted = done;
    p->waiting = best.waiting + best.found - done;
    p->no_source = best.no_source;
    if (st) return st;
    if (p->no_source && !p->promoted && !p->waiting)
        return tkvi_fail(kv, TKV_ERR_NO_SOURCE, "no better source is kept of important blocks:", p->no_source,
                         " (cfg.offload.keep_exact keeps it)");
    return tkvi_ok(kv);
}

#endif /* TKVI_STEP_PROMOTION_H */
