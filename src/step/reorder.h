/*
 * step/reorder.h - tkv_seq_reorder: sequences go on from what others had, as beams do after each token.
 *
 *     sources        0 0 3 2        sequence 1 is the only one that nobody needs
 *     1. fork        a A c d        0 and 1 need a: the first of them keeps it, the other one's copy goes to 1
 *     2. swap        a A d c        each sequence gets what it shall have; no block is touched
 *
 * Memory for the forks is provided before the first one, so a refused call changes nothing.
 */
#ifndef TKVI_STEP_REORDER_H
#define TKVI_STEP_REORDER_H

#include "step/fork.h"

typedef struct tkvi_reorder {
    int first, n;
    const int *sources;
    int slot; /* the sequence that entries are counted for */
} tkvi_reorder;

/* The sequence that has, after the forks, what sequence first + i shall have. */
static int tkvi_reordered_from(const tkv_cache *kv, const tkvi_reorder *order, int i) {
    return kv->seq[order->first + i].from;
}

/* 1 if what sequence first + i shall have is a fork, made in sequence `from`. */
static int tkvi_is_copy(const tkv_cache *kv, const tkvi_reorder *order, int i) {
    return tkvi_reordered_from(kv, order, i) != order->first + order->sources[i];
}

/* Finds `from` of all sequences. Returns the number of forks. */
static int tkvi_plan_reorder(tkv_cache *kv, const tkvi_reorder *order) {
    tkvi_seq *seq = kv->seq + order->first;
    int i, free_slot = 0, n_copies = 0;
    for (i = 0; i < order->n; i++) {
        seq[i].from = TKV_NO_SEQ;
        seq[i].is_taken = 0;
    }
    /* who keeps a sequence: itself, if it needs it, else the first that does */
    for (i = 0; i < order->n; i++)
        if (order->sources[i] == i) seq[i].is_taken = 1, seq[i].from = order->first + i;
    for (i = 0; i < order->n; i++) {
        const int source = order->sources[i];
        if (seq[i].from != TKV_NO_SEQ || seq[source].is_taken) continue;
        seq[source].is_taken = 1;
        seq[i].from = order->first + source;
    }
    for (i = 0; i < order->n; i++) {
        if (seq[i].from != TKV_NO_SEQ) continue;
        while (seq[free_slot].is_taken) free_slot++;
        seq[i].from = order->first + free_slot++;
        n_copies++;
    }
    return n_copies;
}

/* What the other forks of a reorder add to the request for one of them: the growth of their lists, and a margin for
 * eviction as in tkvi_provide_entries. So the first request makes room for all. */
static void tkvi_add_other_fork(tkv_cache *kv, int dst, int longest, tkvi_demand *demand) {
    const int may_evict = TKVI_HAS_EVICT && kv->tables.cfg.evict.policy && tkvi_has_budget(kv);
    int layer;
    if (longest)
        demand->bytes += tkvi_growth_bytes(kv->seq[dst].cap, longest + 1, sizeof(uint32_t)) *
                         (size_t)kv->tables.cfg.model.n_layers;
    for (layer = 0; may_evict && layer < kv->tables.cfg.model.n_layers; layer++)
        demand->entries += tkvi_list_of(kv, dst, layer)->n + 2;
}

/* Entries, and copies of the blocks of anchors, of all forks together. Returns the longest list of one slot. */
static int tkvi_count_reorder(tkv_cache *kv, const void *what, tkvi_demand *demand) {
    const tkvi_reorder *order = (const tkvi_reorder *)what;
    int i, longest = 0;
    for (i = 0; i < order->n; i++) {
        tkvi_fork fork;
        int n;
        if (!tkvi_is_copy(kv, order, i)) continue;
        fork.src = order->first + order->sources[i];
        fork.dst = tkvi_reordered_from(kv, order, i);
        fork.n_tokens = TKVI_FOREVER;
        n = tkvi_count_fork(kv, &fork, demand);
        if (fork.dst == order->slot) longest = n;
        else tkvi_add_other_fork(kv, fork.dst, n, demand);
    }
    return longest;
}

/* Provides for all forks: first what takes no tokens from others, the lists of states. Eviction for entries makes lists
 * of blocks longer or shorter, so all are asked again until none lacks room. */
static tkv_status tkvi_provide_reorder(tkv_cache *kv, tkvi_reorder *order) {
    int i, is_short = 1;
    tkv_status st = TKV_OK;
    for (i = 0; i < order->n && !st; i++)
        if (tkvi_is_copy(kv, order, i))
            st = tkvi_provide_state_list(
                kv, tkvi_reordered_from(kv, order, i),
                tkvi_n_states_up_to(&kv->states.list[order->first + order->sources[i]], TKVI_FOREVER));
    while (is_short && !st) {
        is_short = 0;
        for (i = 0; i < order->n && !st; i++) {
            order->slot = tkvi_reordered_from(kv, order, i);
            if (tkvi_is_copy(kv, order, i))
                st = tkvi_provide_entries(kv, order->slot, tkvi_count_reorder, order,
                                          "no memory for a fork in sequence");
        }
        for (i = 0; i < order->n; i++) {
            tkvi_demand demand;
            memset(&demand, 0, sizeof demand);
            order->slot = tkvi_reordered_from(kv, order, i);
            if (tkvi_is_copy(kv, order, i))
                is_short |= (uint32_t)tkvi_count_reorder(kv, order, &demand) > kv->seq[order->slot].cap;
        }
    }
    return st;
}

/* Exchanges all that two sequences have. */
static void tkvi_swap_seqs(tkv_cache *kv, int a, int b) {
    const tkvi_seq seq = kv->seq[a];
    const tkvi_state_list states = kv->states.list[a];
    int layer;
    kv->seq[a] = kv->seq[b];
    kv->seq[b] = seq;
    kv->seq[b].from = kv->seq[a].from; /* it belongs to the number */
    kv->seq[a].from = seq.from;
    kv->states.list[a] = kv->states.list[b];
    kv->states.list[b] = states;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list list = *tkvi_list_of(kv, a, layer);
        *tkvi_list_of(kv, a, layer) = *tkvi_list_of(kv, b, layer);
        *tkvi_list_of(kv, b, layer) = list;
    }
    if (!TKVI_HAS_METER || !kv->meter) return;
    if (kv->meter->seq == a) kv->meter->seq = b;
    else if (kv->meter->seq == b) kv->meter->seq = a;
}

static tkv_status tkvi_check_reorder(tkv_cache *kv, const tkvi_reorder *order) {
    const int max_seqs = kv->tables.cfg.limits.max_seqs;
    int i;
    if (order->first < 0 || order->first >= max_seqs) return tkvi_refuse_seq(kv, order->first);
    if (order->n < 0 || order->n > max_seqs - order->first)
        return tkvi_fail(kv, TKV_ERR_ARG, "n is", order->n,
                         "; there are fewer sequences from the first one on");
    if (order->n && !order->sources) return tkvi_fail(kv, TKV_ERR_ARG, "sources are missing", 0, NULL);
    for (i = 0; i < order->n; i++) {
        if (order->sources[i] < 0 || order->sources[i] >= order->n)
            return tkvi_fail(kv, TKV_ERR_ARG, "sources has", order->sources[i], "; it must be 0 to n - 1");
        if (kv->seq[order->first + i].in_step)
            return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence",
                             order->first + i, "");
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_seq_reorder(tkv_cache *kv, int first, const int *sources, int n) {
    tkvi_reorder order;
    tkv_status st;
    int i, n_copies;
    if (!kv) return TKV_ERR_ARG;
    order.first = first;
    order.sources = sources;
    order.n = n;
    order.slot = first;
    st = tkvi_check_reorder(kv, &order);
    if (st) return st;
    n_copies = tkvi_plan_reorder(kv, &order);
    kv->call.clock++;
    for (i = 0; i < n; i++) kv->seq[first + i].used = kv->call.clock;
    st = n_copies ? tkvi_provide_reorder(kv, &order) : TKV_OK;
    for (i = 0; i < n && st; i++)
        if (tkvi_is_copy(kv, &order, i)) tkvi_shrink_index(kv, tkvi_reordered_from(kv, &order, i));
    if (st) return st;
    for (i = 0; i < n; i++) tkvi_reserve_slots(kv, first + i, 0);
    for (i = 0; i < n; i++) /* all before the first fork: what they give back was counted */
        if (tkvi_is_copy(kv, &order, i)) tkvi_clear_seq(kv, tkvi_reordered_from(kv, &order, i));
    for (i = 0; i < n; i++)
        if (tkvi_is_copy(kv, &order, i))
            tkvi_share_seq(kv, first + sources[i], tkvi_reordered_from(kv, &order, i), TKVI_FOREVER);
    for (i = 0; i < n; i++) { /* an earlier swap has moved what was below i */
        int from = tkvi_reordered_from(kv, &order, i);
        while (from < first + i) from = kv->seq[from].from;
        if (from != first + i) tkvi_swap_seqs(kv, from, first + i);
    }
    for (i = 0; i < n && n_copies; i++) tkvi_shrink_index(kv, first + i);
    return tkvi_ok(kv);
}

#endif /* TKVI_STEP_REORDER_H */
