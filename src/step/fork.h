/*
 * step/fork.h - tkv_seq_fork: gives a sequence the first tokens of another one. Blocks are not copied, except those of
 * anchors.
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

#include "step/states.h"

/* >>room */
/* Adds the entries and slots that an operation takes to a demand. Returns the length of the longest list then. */
typedef int (*tkvi_count_entries)(tkv_cache *kv, const void *what, tkvi_demand *demand);

static tkvi_request tkvi_request_entries(tkv_cache *kv, int seq, tkvi_count_entries count, const void *what,
                                         tkv_rows *row, int *longest) {
    tkvi_request request = tkvi_no_request();
    request.layer = -1;
    *longest = count(kv, what, &request.fixed);
    if (request.fixed.entries < 0) request.fixed.entries = 0;
    row->seq = seq;
    row->n = tkvi_min(TKVI_BLOCK * *longest, TKVI_FOREVER); /* tokens that need lists of this length */
    request.rows = row;
    request.n_rows = *longest && (uint32_t)*longest + 1 > kv->seq[seq].cap; /* empty lists take no bytes */
    return request;
}

/* Provides entries, slots and longer lists for a sequence. On failure nothing has changed, but with a budget blocks may
 * be coded again. */
static tkv_status tkvi_provide_entries(tkv_cache *kv, int seq, tkvi_count_entries count, const void *what,
                                       const char *refusal) {
    tkv_rows row;
    int longest;
    tkvi_request request = tkvi_request_entries(kv, seq, count, what, &row, &longest);
    tkv_status st = TKV_OK;
    const int may_evict = TKVI_HAS_EVICT && kv->tables.cfg.evict.policy && tkvi_has_budget(kv) &&
                          tkvi_bytes_for(kv, &request) > kv->tables.cfg.budget.bytes;
    int layer;
    /* Eviction may free entries of seq that were counted as given back, or merge blocks that must be split then. */
    for (layer = 0; may_evict && layer < kv->tables.cfg.model.n_layers; layer++)
        request.fixed.entries += tkvi_list_of(kv, seq, layer)->n + 2;
    if (tkvi_has_budget(kv)) {
        st = tkvi_check_request(kv, &request, kv->tables.cfg.budget.bytes);
        if (!st) st = tkvi_reclaim(kv, &request, kv->tables.cfg.budget.bytes);
        if (!st)
            request = tkvi_request_entries(kv, seq, count, what, &row, &longest); /* lists may be shorter */
    }
    if (!st && !(tkvi_provide_request(kv, &request) && (!longest || tkvi_grow_lists(kv, seq, longest + 1))))
        st = tkvi_refuse_no_memory(kv, refusal, seq, "");
    if (st) tkvi_trim(&kv->pool);
    return st;
}

/* Provides the entries of a call that reads the tokens of src. src counts as in a step meanwhile, so that reclaim
 * evicts none of its tokens: a refused call loses none. */
static tkv_status tkvi_provide_entries_from(tkv_cache *kv, int src, int seq, tkvi_count_entries count,
                                            const void *what, const char *refusal) {
    tkv_status st;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_list *list = tkvi_list_of(kv, src, layer);
        list->step_len = list->len;
    }
    kv->seq[src].in_step = 1;
    st = tkvi_provide_entries(kv, seq, count, what, refusal);
    kv->seq[src].in_step = 0;
    return st;
}

/* >>fork */
typedef struct tkvi_fork {
    int src, dst, n_tokens;
} tkvi_fork;

/* Entries beyond those that dst gives back, and copies of the blocks of anchors. */
static int tkvi_count_fork(tkv_cache *kv, const void *what, tkvi_demand *demand) {
    const tkvi_fork *fork = (const tkvi_fork *)what;
    int layer, longest = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const int n = tkvi_n_blocks_before(kv, fork->src, layer, fork->n_tokens);
        const tkvi_plan *p = &kv->tables.plan[layer];
        longest = tkvi_max(longest, n);
        demand->entries += n - tkvi_list_of(kv, fork->dst, layer)->n;
        if (TKVI_HAS_EVICT && n)
            demand->slots[kv->tables.layout[p->anchor_layout].size_class] +=
                tkvi_list_of(kv, fork->src, layer)->anchors;
    }
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
    TKVI_ASSERT((uint32_t)n <= kv->seq[dst].cap);
    tkvi_drop_ended_pins_in(kv, src, layer); /* dst may be shorter than their ends */
    for (i = 0; i < n; i++)
        new_ids[i] = tkvi_share_entry(&kv->pool, ids[i], tkvi_block_tokens(kv, from, ids, i));
    *to = *from;
    tkvi_uncount_blocks(to, n, from->n);
    for (i = 0; i < tkvi_anchors_of(to); i++)
        tkvi_copy_shared(kv, dst, layer, i); /* each sequence chooses its own */
    if (to->len > n_tokens)
        tkvi_truncate_list(kv, dst, layer, n_tokens, tkvi_shift_after_cut(kv, src, layer, n_tokens));
}

/* Makes dst, which is empty, see the first n_tokens of src in all layers, with their states. Cannot fail. */
static void tkvi_share_seq(tkv_cache *kv, int src, int dst, int n_tokens) {
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        tkvi_share_list(kv, src, dst, layer, n_tokens);
    tkvi_share_states(&kv->states, src, dst, n_tokens);
}

TKV_API tkv_status tkv_seq_fork(tkv_cache *kv, int src, int dst, int n_tokens) {
    tkvi_fork fork;
    tkv_status st;
    if (!tkvi_has_seq(kv, src)) return tkvi_refuse_seq(kv, src);
    if (!tkvi_has_seq(kv, dst)) return tkvi_refuse_seq(kv, dst);
    if (src == dst) return tkvi_fail(kv, TKV_ERR_ARG, "src and dst are both sequence", src, "");
    if (n_tokens == TKV_UNLIMITED) n_tokens = TKVI_FOREVER;
    st = tkvi_check_cut(kv, dst, 0);
    if (!st) st = tkvi_check_cut(kv, src, n_tokens);
    if (st) return st;
    kv->seq[src].used = kv->seq[dst].used = ++kv->call.clock;
    fork.src = src;
    fork.dst = dst;
    fork.n_tokens = n_tokens;
    st = tkvi_provide_state_list(kv, dst, tkvi_n_states_up_to(&kv->states.list[src], n_tokens));
    if (!st) st = tkvi_provide_entries(kv, dst, tkvi_count_fork, &fork, "no memory for a fork in sequence");
    if (st) tkvi_shrink_states(kv, dst);
    if (st) return st;
    tkvi_clear_seq(kv, dst);
    tkvi_reserve_slots(kv, src, 0); /* it was counted for blocks that src holds alone */
    tkvi_share_seq(kv, src, dst, n_tokens);
    tkvi_shrink_index(kv, dst);
    return tkvi_ok(kv);
}

#endif /* TKVI_STEP_FORK_H */
