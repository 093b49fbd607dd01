/*
 * reclaim/discard.h - blocks that nobody has: their bytes are given back, as the caller's model can compute them
 * again. They stay in their lists, with format, positions and notes, like blocks outside RAM (reclaim/offload.h) that
 * cannot be fetched.
 *
 *     tokens    sinks | 0 ... 63 | 64 .. 127 | 128 . 191 | ........ | the last two, and what is younger than hot
 *     goes      never   1st        2nd         3rd ...                never
 *
 * What goes goes in all layers at once, front to back: a token cannot be computed without its prefix, nor a layer
 * without those below. How it comes back: step/recompute.h. May call spill and below.
 */
#ifndef TKVI_RECLAIM_DISCARD_H
#define TKVI_RECLAIM_DISCARD_H

#include "reclaim/offload.h"

/* Is block i missing? Not where all of its tokens were evicted, or are anchors. */
static int tkvi_missing(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_block *b = &kv->pool.block[ids[i]];
    return tkvi_is_discarded(b) && tkvi_live_mask(b, tkvi_block_tokens(kv, list, ids, i));
}

/* Has a layer blocks with positions from .. to - 1 that nobody has? */
static int tkvi_next_discarded(const tkv_cache *kv, int seq, int layer, int64_t from, int64_t to) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, lacks = 0;
    for (i = 0; kv->pool.n_discarded && i < list->n && !lacks; i++)
        lacks = tkvi_missing(kv, list, ids, i) && tkvi_block_start(kv, ids, i) < to &&
                tkvi_block_end(kv, list, ids, i) > from;
    return lacks;
}

/* Would queries that see positions from `oldest` on miss any? From the last two blocks attention takes what keys
 * have in common, seen or not. */
static int tkvi_misses(const tkv_cache *kv, int seq, int layer, int64_t oldest) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int start;
    if (!kv->pool.n_discarded || list->n == 0) return 0;
    start = tkvi_block_start(kv, tkvi_ids(kv, seq, layer), tkvi_max(0, list->n - 2));
    return tkvi_next_discarded(kv, seq, layer, oldest < start ? oldest : start, list->len);
}

/* Blocks behind the sinks that end here or before may go in all layers, as this level has them. */
static int tkvi_discardable_to(const tkv_cache *kv, int seq, int level) {
    int layer, i, to = TKVI_FOREVER;
    if (kv->seq[seq].in_step) return 0;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        const tkvi_tier_spec *r = &tkvi_rules_of(&kv->tables, layer)[level];
        if (list->n == 0) continue;
        for (i = list->sinks; i < list->n && tkvi_can_offload(kv, seq, layer, i, r);) i++;
        to = tkvi_min(to, i < list->n ? tkvi_block_start(kv, ids, i) : list->len);
    }
    return to;
}

/* The first positions behind the sinks that are in RAM: of one block, the layer's that begins first. 0: none are. */
static int tkvi_first_here(const tkv_cache *kv, int seq, int *start, int *end) {
    int layer, i, found = 0;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = list->sinks; i < list->n && tkvi_is_offloaded(&kv->pool.block[ids[i]]);) i++;
        if (i >= list->n || (found && tkvi_block_start(kv, ids, i) >= *start)) continue;
        found = 1;
        *start = tkvi_block_start(kv, ids, i);
        *end = tkvi_block_end(kv, list, ids, i);
    }
    return found;
}

/* Blocks behind the sinks that end at `to` or before go, in all layers; those outside RAM stay there: they take none,
 * and to fetch is cheaper than to compute. Returns the bytes of what went, or, without `really`, would go; *last:
 * where the last of it ended, if that is further. */
static size_t tkvi_discard_to(tkv_cache *kv, int seq, int to, int really, int *last) {
    size_t freed = 0;
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = list->sinks; i < list->n && tkvi_block_end(kv, list, ids, i) <= to; i++) {
            tkvi_block *b = &kv->pool.block[ids[i]];
            const uint32_t page = b->page;
            const int slot = b->slot;
            if (tkvi_is_offloaded(b)) continue;
            freed += kv->tables.coding[b->coding].bytes.total;
            *last = tkvi_max(*last, tkvi_block_end(kv, list, ids, i));
            if (!really) continue;
            b->page = TKVI_NIL;
            kv->pool.n_offloaded++;
            kv->pool.n_discarded++;
            kv->blocks_discarded++;
            tkvi_give_slot(&kv->pool, page, slot);
        }
    }
    return freed;
}

/* Nobody uses it now. */
static int tkvi_is_idle(const tkv_cache *kv, int seq) {
    return !kv->seq[seq].in_step && kv->seq[seq].used != kv->clock;
}

/* The first block that may go, of the sequence that nobody has used for longest, does, or, where it may not in all
 * layers, what else may. 0: there is none. */
static int tkvi_discard_idle(tkv_cache *kv) {
    int seq, start = 0, end = 0, from = -1, to = 0, last = 0;
    for (seq = 0; kv->tables.cfg.remat && seq < kv->tables.cfg.max_seqs; seq++) {
        if (!tkvi_is_idle(kv, seq) || (from >= 0 && kv->seq[seq].used >= kv->seq[from].used)) continue;
        if (!tkvi_first_here(kv, seq, &start, &end)) continue;
        end = tkvi_min(end, tkvi_discardable_to(kv, seq, kv->tables.level));
        if (!tkvi_discard_to(kv, seq, end, 0, &last)) continue;
        from = seq;
        to = end;
    }
    return from >= 0 && tkvi_discard_to(kv, from, to, 1, &last) > 0;
}

#endif /* TKVI_RECLAIM_DISCARD_H */
