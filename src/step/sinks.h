/*
 * step/sinks.h - tkv_seq_set_sinks: the caller names tokens that are attention sinks, at any index. Each entry has a
 * mask of its named sinks (tkvi_entry.sink_mask). A block with such a token stays in the hot format, whole, for all its
 * holders.
 *
 *     list       [sinks][ archive ][ archive ][ archive ][ warm ][ hot ]
 *     formats     exact   A30/R30   exact      A30/R30    A40     exact
 *                                   . . S . .             S: a named sink
 *
 * Other parts ask for the mask: demotion (tkvi_hottest_tier), eviction (tkvi_pinned_mask_of), discard, expiry
 * (tkvi_outlasts_window) and attention (tkvi_sinks_beyond).
 */
#ifndef TKVI_STEP_SINKS_H
#define TKVI_STEP_SINKS_H

#include "step/sequence.h"

/* Bits of the slots of block i that have live tokens with indices start .. end - 1. */
static uint64_t tkvi_live_between(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                                  int start, int end) {
    uint64_t mask = tkvi_live_mask_in(kv, list, ids, i);
    int t;
    for (t = 0; t < TKVI_BLOCK && mask >> t; t++) {
        const int at = mask >> t & 1 ? tkvi_slot_index(kv, ids[i], t) : start;
        if (at < start || at >= end) mask &= ~((uint64_t)1 << t);
    }
    return mask;
}

/* Checks that a layer has the tokens start .. end - 1, and has them exact. A window that hides sinks can have expired
 * some of them. */
static tkv_status tkvi_check_sinks(tkv_cache *kv, int seq, int layer, int start, int end) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_plan *p = &kv->tables.plan[layer];
    int n = p->keeps_sinks ? 0 : tkvi_max(0, tkvi_min(list->expired, end) - start), i;
    if (end > list->len)
        return tkvi_fail(kv, TKV_ERR_RANGE, "there is no token with index", tkvi_max(start, list->len), "");
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const uint64_t found = tkvi_live_between(kv, list, ids, i, start, end);
        if (!found) continue;
        n += tkvi_n_bits(found);
        if (tkvi_is_discarded(b))
            return tkvi_fail(kv, TKV_ERR_NO_SOURCE, "a token is discarded; recompute it first: index",
                             tkvi_max(start, tkvi_block_start(kv, ids, i)), "");
        if (!tkvi_is_hot_layout(kv, layer, b->layout) &&
            kv->tables.layout[b->layout].key != (int)p->sink_layout)
            return tkvi_fail(kv, TKV_ERR_NO_SOURCE,
                             "a token is not exact any more; promote its block first: index",
                             tkvi_max(start, tkvi_block_start(kv, ids, i)), "");
    }
    if (n < end - start)
        return tkvi_fail(kv, TKV_ERR_RANGE, "tokens were evicted or have expired: layer", layer, "");
    return TKV_OK;
}

/* Makes the tokens start .. end - 1 of a layer named sinks, or takes that from them. Cannot fail. */
static void tkvi_set_sinks_in_list(tkv_cache *kv, int seq, int layer, int start, int end, int on) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    for (i = 0; i < list->n; i++) {
        const uint64_t found = tkvi_live_between(kv, list, ids, i, start, end);
        const uint64_t mask = tkvi_sink_mask(&kv->pool, ids[i]);
        if (!found || (on ? mask | found : mask & ~found) == mask) continue;
        tkvi_set_sink_mask(&kv->pool, ids[i], on ? mask | found : mask & ~found);
        tkvi_search_again(list, i);
        if (on || !kv->tables.plan[layer].keeps_sinks || i < list->sinks ||
            tkvi_block_start(kv, ids, i) >= list->expired)
            continue;
        kv->pool.entry[ids[i]].evicted_mask |= found; /* the window has passed them */
        if (tkvi_live_mask_in(kv, list, ids, i)) continue;
        if (i > 0) tkvi_end_slots(kv, list, ids, i - 1);
        tkvi_unlist_block(kv, seq, layer, i--);
    }
}

TKV_API tkv_status tkv_seq_set_sinks(tkv_cache *kv, int seq, int start, int n, int on) {
    tkv_status st = TKV_OK;
    int layer;
    if (!TKVI_HAS_EVICT) return tkvi_refuse_left_out(kv, "TKV_NO_EVICT leaves this out");
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence", seq, "");
    if (start < 0 || n < 0 || n > TKVI_FOREVER - start)
        return tkvi_fail(kv, TKV_ERR_ARG, "start and n must be indices; the wrong one is",
                         start < 0 ? start : n, "");
    if (on != 0 && on != 1) return tkvi_fail(kv, TKV_ERR_ARG, "on is", on, "; it must be 0 or 1");
    if (kv->tables.cfg.tiers.n_anchors)
        return tkvi_fail(kv, TKV_ERR_UNSUPPORTED,
                         "set tiers.n_anchors to 0: with anchors no sinks can be named; there are",
                         kv->tables.cfg.tiers.n_anchors, "");
    if (kv->pool.keep_all && !tkvi_has_budget(kv))
        return tkvi_fail(kv, TKV_ERR_UNSUPPORTED,
                         "in place without a budget there is no memory for more exact blocks", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st && on && n; layer++)
        if (kv->tables.plan[layer].stored_layer == layer)
            st = tkvi_check_sinks(kv, seq, layer, start, start + n);
    if (st) return st;
    tkvi_reserve_slots(kv, seq, 0); /* it was counted for blocks that give their exact slots back */
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        tkvi_set_sinks_in_list(kv, seq, layer, start, start + n, on);
    tkvi_release_unused(kv, seq);
    return tkvi_ok(kv);
}

#endif /* TKVI_STEP_SINKS_H */
