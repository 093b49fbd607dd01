/*
 * step/fork.h - tkv_seq_fork: gives a sequence the first tokens of another one. No byte of a block is copied.
 *
 *     before    src   [A][B][C][D    ]
 *     fork      src   [A][B][C][D    ]      dst has an entry of its own for each block; the blocks have two holders
 *               dst   [A][B][C][D    ]
 *     append    dst   [A][B][C][D' x ]      D is not full and has two holders: dst gets a copy before it writes
 *
 * A block with several holders is coded again once, for all of them, when the last one has it in a colder tier
 * (reclaim/age.h). Masks, pins, scores and packed positions belong to the entry, so each holder has its own.
 */
#ifndef TKVI_STEP_FORK_H
#define TKVI_STEP_FORK_H

#include "step/sequence.h"

/* Number of blocks of a layer that hold any of the first n_tokens. */
static int tkvi_n_blocks_before(const tkv_cache *kv, int seq, int layer, int n_tokens) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int n = list->n;
    while (n > 0 && tkvi_block_start(kv, ids, n - 1) >= n_tokens) n--;
    return n;
}

/* 1 if the sinks' block of a layer is copied at once: anchors will be written to it (reclaim/anchors.h). */
static int tkvi_copies_sinks(const tkv_cache *kv, int seq, int layer) {
    return TKVI_HAS_EVICT && kv->tables.cfg.tiers.n_anchors > 0 && tkvi_list_of(kv, seq, layer)->sinks > 0;
}

/* What a fork needs: entries beyond those that dst gives back, copies of sinks' blocks, longer lists. Returns the
 * number of blocks that the longest list will have. */
static int tkvi_demand_fork(const tkv_cache *kv, int src, int dst, int n_tokens, tkv_rows *row,
                            tkvi_request *request) {
    int layer, longest = 0, entries = 0;
    *request = tkvi_no_request();
    request->layer = -1;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const int n = tkvi_n_blocks_before(kv, src, layer, n_tokens);
        const tkvi_plan *p = &kv->tables.plan[layer];
        longest = tkvi_max(longest, n);
        entries += n - tkvi_list_of(kv, dst, layer)->n;
        if (n && tkvi_copies_sinks(kv, src, layer))
            request->fixed.slots[kv->tables.layout[p->sink_layout].size_class]++;
    }
    request->fixed.entries = tkvi_max(0, entries);
    row->seq = dst;
    row->n = tkvi_min(TKVI_BLOCK * longest, TKVI_FOREVER); /* tokens that need lists of this length */
    request->rows = row;
    request->n_rows = (uint32_t)longest + 1 > kv->seq[dst].cap;
    return longest;
}

/* Makes a layer of dst, which is empty, see the first n_tokens of src. Cannot fail: its entries are provided. */
static void tkvi_share_list(tkv_cache *kv, int src, int dst, int layer, int n_tokens) {
    const tkvi_list *from = tkvi_list_of(kv, src, layer);
    const uint32_t *ids = tkvi_ids(kv, src, layer);
    tkvi_list *to = tkvi_list_of(kv, dst, layer);
    uint32_t *new_ids = tkvi_ids(kv, dst, layer);
    const int n = tkvi_n_blocks_before(kv, src, layer, n_tokens);
    int i;
    for (i = 0; i < n; i++)
        new_ids[i] = tkvi_share_entry(&kv->pool, ids[i], tkvi_block_tokens(kv, from, ids, i));
    *to = *from;
    tkvi_uncount_blocks(to, n, from->n);
    if (n && tkvi_copies_sinks(kv, dst, layer)) tkvi_copy_shared(kv, new_ids[0]);
    if (to->len > n_tokens) tkvi_truncate_list(kv, dst, layer, n_tokens);
}

TKV_API tkv_status tkv_seq_fork(tkv_cache *kv, int src, int dst, int n_tokens) {
    tkvi_request request;
    tkv_rows row;
    tkv_status st;
    int layer, longest;
    if (!tkvi_has_seq(kv, src)) return tkvi_refuse_seq(kv, src);
    if (!tkvi_has_seq(kv, dst)) return tkvi_refuse_seq(kv, dst);
    if (src == dst) return tkvi_fail(kv, TKV_ERR_ARG, "src and dst are both sequence", src, "");
    if (n_tokens == TKV_UNLIMITED) n_tokens = TKVI_FOREVER;
    st = tkvi_check_cut(kv, dst, 0);
    if (!st) st = tkvi_check_cut(kv, src, n_tokens);
    if (st) return st;
    kv->seq[src].used = kv->seq[dst].used = ++kv->call.clock;
    longest = tkvi_demand_fork(kv, src, dst, n_tokens, &row, &request);
    if (tkvi_has_budget(kv)) {
        st = tkvi_check_request(kv, &request, kv->tables.cfg.budget.bytes);
        if (!st) st = tkvi_reclaim(kv, &request, kv->tables.cfg.budget.bytes);
        if (!st)
            longest = tkvi_demand_fork(kv, src, dst, n_tokens, &row, &request); /* lists may be shorter */
    }
    if (!st && !(tkvi_provide_request(kv, &request) && tkvi_grow_lists(kv, dst, longest + 1)))
        st = tkvi_refuse_no_memory(kv, "no memory for a fork of sequence", src, "");
    if (st) {
        tkvi_trim(&kv->pool);
        return st;
    }
    tkvi_clear_seq(kv, dst);
    tkvi_reserve_slots(kv, src, 0); /* it was counted for blocks that src holds alone */
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        tkvi_share_list(kv, src, dst, layer, n_tokens);
    tkvi_shrink_index(kv, dst);
    return tkvi_ok(kv);
}

#endif /* TKVI_STEP_FORK_H */
