/*
 * reclaim/discard.h - discards blocks: frees their bytes, as the caller's model can recompute them. Discarded
 * blocks stay in their lists, with format, positions and token_meta. They are like offloaded blocks
 * (reclaim/offload.h) that cannot be read back.
 *
 *     tokens     sinks | 0 ... 63 | 64 .. 127 | 128 . 191 | ........ | last two blocks, newest hot_tokens
 *     discarded  never   1st        2nd         3rd ...                never
 *
 * Blocks are discarded front to back, in all layers at once. The reason: a token cannot be computed without its
 * prefix, nor a layer without the layers below it. Recomputing them: step/recompute.h.
 */
#ifndef TKVI_RECLAIM_DISCARD_H
#define TKVI_RECLAIM_DISCARD_H

#include "reclaim/offload.h"

/* 1 if block i is discarded and has live tokens. If all its tokens are evicted or anchored, nothing is missing. */
static int tkvi_needs_recompute(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_block *b = &kv->pool.block[ids[i]];
    return tkvi_is_discarded(b) && tkvi_live_mask(b, tkvi_block_tokens(kv, list, ids, i));
}

/* 1 if a discarded block of a layer covers any of the positions from .. to - 1. */
static int tkvi_has_discarded(const tkv_cache *kv, int seq, int layer, int64_t from, int64_t to) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, found = 0;
    for (i = 0; TKVI_HAS_DISCARD && kv->pool.n_discarded && i < list->n && !found; i++)
        found = tkvi_needs_recompute(kv, list, ids, i) && tkvi_block_start(kv, ids, i) < to &&
                tkvi_block_end(kv, list, ids, i) > from;
    return found;
}

/* 1 if queries that see the positions from `oldest` on need a discarded block. The last two blocks always count,
 * because attention takes its reference key from them. */
static int tkvi_sees_discarded(const tkv_cache *kv, int seq, int layer, int64_t oldest) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int start;
    if (!TKVI_HAS_DISCARD || !kv->pool.n_discarded || list->n == 0) return 0;
    start = tkvi_block_start(kv, tkvi_ids(kv, seq, layer), tkvi_max(0, list->n - 2));
    return tkvi_has_discarded(kv, seq, layer, oldest < start ? oldest : start, list->len);
}

/* The position up to which the blocks behind the sinks may be discarded in all layers. level: its tier specs
 * decide which blocks are old enough. 0 in an open step; TKVI_FOREVER for an empty sequence. */
static int tkvi_discardable_to(const tkv_cache *kv, int seq, int level) {
    int layer, i, to = TKVI_FOREVER;
    if (kv->seq[seq].in_step) return 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        const tkvi_tier_spec *spec = &tkvi_tier_specs_of(&kv->tables, layer)[level];
        if (list->n == 0) continue;
        for (i = list->sinks; i < list->n && tkvi_can_offload(kv, seq, layer, i, spec);) i++;
        to = tkvi_min(to, i < list->n ? tkvi_block_start(kv, ids, i) : list->len);
    }
    return to;
}

/* Positions *start .. *end - 1 of the first block behind the sinks that is in RAM. Layers can differ: the block
 * with the lowest start counts. Returns 0 if no layer has such a block. */
static int tkvi_first_in_ram(const tkv_cache *kv, int seq, int *start, int *end) {
    int layer, i, found = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
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

/* Discards the blocks behind the sinks that end at or before `to`, in all layers. Offloaded blocks stay offloaded:
 * they take no slots, and reading them is cheaper than recomputing them. really: 0 only counts. Returns the bytes
 * freed. *last: raised to the end of the last block that is discarded. */
static size_t tkvi_discard_to(tkv_cache *kv, int seq, int to, int really, int *last) {
    size_t freed = 0;
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = list->sinks; i < list->n && tkvi_block_end(kv, list, ids, i) <= to; i++) {
            tkvi_block *b = &kv->pool.block[ids[i]];
            const uint32_t page = b->page;
            const int slot = b->slot;
            if (tkvi_is_offloaded(b)) continue;
            freed += kv->tables.layout[b->layout].bytes.total;
            *last = tkvi_max(*last, tkvi_block_end(kv, list, ids, i));
            if (!really) continue;
            b->page = TKVI_NIL;
            kv->pool.n_offloaded++;
            kv->pool.n_discarded++;
            kv->counts.discarded++;
            tkvi_give_slot(&kv->pool, page, slot);
        }
    }
    return freed;
}

/* 1 if the sequence has no open step and the call in progress does not use it. */
static int tkvi_is_idle(const tkv_cache *kv, int seq) {
    return !kv->seq[seq].in_step && kv->seq[seq].used != kv->call.clock;
}

/* Takes the idle sequence that was used longest ago and has blocks to discard. Discards its first block in RAM, in
 * all layers. If not all layers may discard up to its end, only the blocks before their common limit are discarded.
 * 0: there is nothing to discard. */
static int tkvi_discard_idle(tkv_cache *kv) {
    int seq, start = 0, end = 0, from = -1, to = 0, last = 0;
    if (!TKVI_HAS_DISCARD) return 0;
    for (seq = 0; kv->tables.cfg.budget.discard && seq < kv->tables.cfg.limits.max_seqs; seq++) {
        if (!tkvi_is_idle(kv, seq) || (from >= 0 && kv->seq[seq].used >= kv->seq[from].used)) continue;
        if (!tkvi_first_in_ram(kv, seq, &start, &end)) continue;
        end = tkvi_min(end, tkvi_discardable_to(kv, seq, kv->tables.level));
        if (!tkvi_discard_to(kv, seq, end, 0, &last)) continue;
        from = seq;
        to = end;
    }
    return from >= 0 && tkvi_discard_to(kv, from, to, 1, &last) > 0;
}

#endif /* TKVI_RECLAIM_DISCARD_H */
