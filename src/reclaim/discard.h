/*
 * reclaim/discard.h - discards blocks: frees their bytes, as the caller's model can recompute them. Discarded
 * blocks stay in their lists, with format, positions and token_meta. They are like offloaded blocks
 * (reclaim/offload.h) that cannot be read back.
 *
 *     tokens     sinks | 0 ... 63 | 64 .. 127 | 128 . 191 | ........ | last two blocks, newest hot_tokens
 *     discarded  never   1st        2nd         3rd ...                never
 *
 * Blocks are discarded front to back, in all layers at once. The reason: a token cannot be computed without its
 * prefix, nor a layer without the layers below it. Recomputing them: step/recompute.h. Blocks that other entries hold
 * too stay in RAM, as discarding them would take tokens from another sequence. Those behind them can go.
 *
 * With cfg.recompute the model gives the rows of a discarded block whenever they are read (reclaim/offload.h). Then a
 * sequence in use discards its own oldest blocks as well, by the costs of rules/remat.h.
 */
#ifndef TKVI_RECLAIM_DISCARD_H
#define TKVI_RECLAIM_DISCARD_H

#include "cache/lookup.h"
#include "reclaim/offload.h"

/* 1 if block i is discarded and has live tokens. If all its tokens are evicted or anchored, nothing is missing. */
static int tkvi_needs_recompute(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_block *b = tkvi_block_of(kv, ids[i]);
    return tkvi_is_discarded(b) &&
           tkvi_live_mask(&kv->pool.entry[ids[i]], tkvi_block_tokens(kv, list, ids, i));
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

/* 1 if queries that see the indices oldest .. end - 1 need a discarded block that nothing gives. The last two blocks
 * always count, because attention takes its reference key from them. */
static int tkvi_sees_discarded(const tkv_cache *kv, int seq, int layer, int64_t oldest, int64_t end) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int start;
    if (!TKVI_HAS_DISCARD || !kv->pool.n_discarded || list->n == 0) return 0;
    if (kv->tables.cfg.recompute.compute) return 0;
    start = tkvi_block_start(kv, tkvi_ids(kv, seq, layer), tkvi_max(0, list->n - 2));
    return tkvi_has_discarded(kv, seq, layer, oldest, end) ||
           tkvi_has_discarded(kv, seq, layer, start, list->len);
}

/* 1 if a block can be discarded once it is old: it is in RAM, one entry alone holds it, and it has no named sinks. */
static int tkvi_is_discardable(const tkv_cache *kv, uint32_t id) {
    const tkvi_block *b = tkvi_block_of(kv, id);
    return !tkvi_is_offloaded(b) && b->refs == 1 && !tkvi_sink_mask(&kv->pool, id);
}

/* The position up to which blocks behind the sinks may be discarded in all layers, if tkvi_is_discardable says so.
 * level: its tier specs decide which blocks are old enough. TKVI_FOREVER for an empty sequence. */
static int tkvi_discardable_to(const tkv_cache *kv, int seq, int level) {
    int layer, i, to = TKVI_FOREVER;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        const tkvi_tier_spec *spec = &tkvi_tier_specs_of(&kv->tables, layer)[level];
        if (list->n == 0) continue;
        for (i = list->sinks; i < list->n && tkvi_is_block_old(kv, seq, layer, i, spec);) i++;
        to = tkvi_min(to, i < list->n ? tkvi_block_start(kv, ids, i) : list->len);
    }
    return to;
}

/* Positions *start .. *end - 1 of the first block behind the sinks that can be discarded (tkvi_is_discardable). Layers
 * can differ: the block with the lowest start counts. Returns 0 if no layer has such a block. */
static int tkvi_first_in_ram(const tkv_cache *kv, int seq, int *start, int *end) {
    int layer, i, found = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        i = list->sinks;
        while (i < list->n && !tkvi_is_discardable(kv, ids[i])) i++;
        if (i >= list->n || (found && tkvi_block_start(kv, ids, i) >= *start)) continue;
        found = 1;
        *start = tkvi_block_start(kv, ids, i);
        *end = tkvi_block_end(kv, list, ids, i);
    }
    return found;
}

/* Discards the blocks behind the sinks that end at or before `to`, in all layers, if tkvi_is_discardable says so.
 * Offloaded blocks stay offloaded: they take no slots, and reading them is cheaper than recomputing them. really: 0
 * only counts. Returns the bytes freed. *most: raised to the number of tokens of the layer that discards most. */
static size_t tkvi_discard_to(tkv_cache *kv, int seq, int to, int really, int *most) {
    size_t freed = 0;
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        int n = 0;
        for (i = list->sinks; i < list->n && tkvi_block_end(kv, list, ids, i) <= to; i++) {
            tkvi_block *b = tkvi_block_of(kv, ids[i]);
            const uint32_t page = b->page;
            const int slot = b->slot;
            if (!tkvi_is_discardable(kv, ids[i])) continue;
            freed += kv->tables.layout[b->layout].bytes.total;
            n += tkvi_block_end(kv, list, ids, i) - tkvi_block_start(kv, ids, i);
            *most = tkvi_max(*most, n);
            if (!really) continue;
            b->page = TKVI_NIL;
            if (kv->tables.cfg.recompute.compute) { /* it is read in the hot format */
                b->layout = (uint16_t)kv->tables.plan[layer].now.layout[TKV_TIER_HOT];
                b->previous_layout = 0;
                tkvi_forget_meter_copies(kv, seq, layer,
                                         tkvi_block_start(kv, ids, i)); /* exact blocks need none */
            }
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
 * Returns the bytes freed; 0: there is nothing to discard. */
static size_t tkvi_discard_idle(tkv_cache *kv) {
    int seq, start = 0, end = 0, from = -1, to = 0, n = 0;
    if (!TKVI_HAS_DISCARD) return 0;
    for (seq = 0; kv->tables.cfg.budget.discard && seq < kv->tables.cfg.limits.max_seqs; seq++) {
        if (!tkvi_is_idle(kv, seq) || (from >= 0 && kv->seq[seq].used >= kv->seq[from].used)) continue;
        if (!tkvi_first_in_ram(kv, seq, &start, &end)) continue;
        end = tkvi_min(end, tkvi_discardable_to(kv, seq, kv->tables.level));
        if (!tkvi_discard_to(kv, seq, end, 0, &n)) continue;
        from = seq;
        to = end;
    }
    return from >= 0 ? tkvi_discard_to(kv, from, to, 1, &n) : 0;
}

/* Finds the block, in all layers, that a sequence with cfg.recompute may discard next. cheap: as in
 * tkvi_remat_may_discard. *price: its FLOPs per byte freed. Returns its end; 0: none. */
static int tkvi_recomputable_to(tkv_cache *kv, int seq, const tkv_remat_config *cost, int cheap,
                                double *price) {
    const int len = tkv_get_length(kv, seq, TKV_ALL_LAYERS), now = tkvi_max(0, len - 1);
    int n = 0, first = TKVI_FOREVER, layer;
    tkv_remat_block block;
    memset(&block, 0, sizeof block);
    if (!tkvi_first_in_ram(kv, seq, &block.start, &block.end)) return 0;
    if (block.start < cost->sink_tokens || block.end > tkvi_discardable_to(kv, seq, kv->tables.level))
        return 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (list->n > list->sinks)
            first = tkvi_min(first, tkvi_block_start(kv, tkvi_ids(kv, seq, layer), list->sinks));
    }
    block.bytes = tkvi_discard_to(kv, seq, block.end, 0, &n);
    TKVI_ASSERT(block.bytes > 0); /* the block is in RAM */
    if (!tkvi_remat_fits_step(cost, first, block.end, 0) ||
        !tkvi_remat_may_discard(cost, &block, (int64_t)len - (block.start - first),
                                tkvi_max(now, block.end - 1), cheap))
        return 0;
    *price = tkvi_remat_expected(cost, &block, tkvi_max(now, block.end - 1)) / (double)block.bytes;
    return block.end;
}

/* With cfg.recompute: discards the block, in all layers, whose recomputation costs the fewest FLOPs per byte freed.
 * cheap: 1 only if that is less than cost.quantize_price, from the pressure cost.threshold on. Returns the bytes freed;
 * 0: nothing is discarded. */
static size_t tkvi_discard_recomputable(tkv_cache *kv, int cheap) {
    const tkv_config *cfg = &kv->tables.cfg;
    tkv_remat_config cost;
    double least = 0.0, price;
    int seq, from = -1, to = 0, n = 0;
    if (!TKVI_HAS_DISCARD || !cfg->recompute.compute) return 0;
    const char *const fault = tkvi_recompute_cost(cfg, &cost);
    TKVI_ASSERT(!fault); /* the config was validated */
    (void)fault;
    if (cheap && (double)(kv->heap.held - tkvi_spare_state_bytes(kv)) <
                     (double)tkvi_number(cost.threshold) * (double)cfg->budget.bytes)
        return 0;
    for (seq = 0; seq < cfg->limits.max_seqs; seq++) {
        const int end = tkvi_recomputable_to(kv, seq, &cost, cheap, &price);
        if (!end || (from >= 0 && price >= least)) continue;
        from = seq;
        to = end;
        least = price;
    }
    return from >= 0 ? tkvi_discard_to(kv, from, to, 1, &n) : 0;
}

#endif /* TKVI_RECLAIM_DISCARD_H */
