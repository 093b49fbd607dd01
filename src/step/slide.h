/*
 * step/slide.h - tkv_seq_slide: a sequence without end. The oldest tokens behind the sinks go, and all later ones move
 * up, in index and in position (StreamingLLM, arXiv 2309.17453, section 3.2).
 *
 *     before    [sinks 0 .. 3][4 .. 67][68 .. 131][132 .. 195] ...
 *     after     [sinks 0 .. 3]         [ 4 ..  67][ 68 .. 131] ...    both blocks have turned by -64
 *
 * No byte of a block changes: entries get another start, and attention turns its queries (step/move.h). A token that
 * has moved up a thousand times is as precise as in the beginning.
 */
#ifndef TKVI_STEP_SLIDE_H
#define TKVI_STEP_SLIDE_H

#include "step/move.h"
#include "step/states.h"

/* Indices from .. to - 1 go. */
typedef struct tkvi_gone {
    int from, to;
} tkvi_gone;

/* The index that follows from `index` when a span has gone. */
static int tkvi_move_up(const tkvi_gone *gone, int index) {
    return index >= gone->to ? index - (gone->to - gone->from) : tkvi_min(index, gone->from);
}

/* Moves the stamps of an entry, which are lengths of the list: the list loses n tokens. Scores older than that age to
 * n first. Where older queries do not count, they stay. */
static void tkvi_move_stamps_up(tkv_cache *kv, uint32_t id, int n) {
    const tkvi_token_score_mode *mode = kv->token_scores.mode;
    tkvi_token_meta *meta = &kv->pool.token_meta[id];
    if (mode && !mode->fresh && meta->score_step < n) tkvi_decay_to_step(&kv->token_scores, meta, n);
    meta->score_step = tkvi_max(0, meta->score_step - n);
    if (meta->temporary_mask) meta->temporary_until -= n; /* of pins that have not ended */
    if (meta->moved_at) meta->moved_at = tkvi_max(1, meta->moved_at - n);
}

/* The slot from which on tokens of entry i are behind a span, if it has tokens before it too; else 0. An entry of a
 * merged block can have both. It must be split, since only the tokens behind the span turn. */
static int tkvi_slot_behind(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                            const tkvi_gone *gone) {
    const int start = tkvi_block_start(kv, ids, i);
    if (start >= gone->from || !tkvi_slots_between(kv, list, ids, i, start, gone->from)) return 0;
    return tkvi_split_slot(kv, list, ids, i, gone->to);
}

/* A slide of a sequence. */
typedef struct tkvi_slide {
    int seq;
    tkvi_gone gone;
} tkvi_slide;

/* Entries that splits take, in all layers. Returns the length of the longest list then. */
static int tkvi_count_slide_splits(tkv_cache *kv, const void *what, tkvi_demand *demand) {
    const tkvi_slide *slide = (const tkvi_slide *)what;
    int layer, i, longest = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, slide->seq, layer);
        const uint32_t *ids = tkvi_ids(kv, slide->seq, layer);
        int n = 0;
        for (i = 0; i < list->n; i++) n += tkvi_slot_behind(kv, list, ids, i, &slide->gone) > 0;
        demand->entries += n;
        longest = tkvi_max(longest, list->n + n);
    }
    return longest;
}

/* Takes a span out of entry i of a list. The entries behind it have not moved yet. Returns 0 if no token is left. */
static int tkvi_take_out(tkv_cache *kv, int seq, int layer, int i, const tkvi_gone *gone) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int start = tkvi_block_start(kv, ids, i), end = tkvi_block_end(kv, list, ids, i);
    const int n = gone->to - gone->from;
    tkvi_entry *e = &kv->pool.entry[ids[i]];
    uint64_t kept;
    int slot = 0;
    if (end < gone->from) return 1;
    if (start >= gone->to) {
        e->start -= n;
        if (kv->tables.plan[layer].rope) e->turned -= n;
        return 1;
    }
    kept = end > gone->to ? tkvi_slots_between(kv, list, ids, i, gone->to, end) : 0;
    if (start < gone->from && !kept) {
        tkvi_end_slots(kv, list, ids, i); /* the next entry may begin later than this one ends */
        if (!e->n_packed) e->end_slot = (uint8_t)tkvi_min(e->end_slot, e->first_slot + gone->from - start);
        else tkvi_truncate_entry(kv, ids[i], gone->from);
        if (!e->n_packed)
            tkvi_set_sink_mask(&kv->pool, ids[i], e->sink_mask & tkvi_slots_before(e->end_slot));
        /* Of a block that outlasts its window, only named sinks are left. */
        return i < list->sinks || start >= list->expired || tkvi_sink_mask(&kv->pool, ids[i]);
    }
    if (!kept && i + 1 < list->n) return 0;
    while (kept && !(kept >> slot & 1)) slot++;
    if (kept) {
        tkvi_cut_front(kv, ids[i], slot, tkvi_slot_index(kv, ids[i], slot));
    } else { /* the last entry tells the next position, also without tokens */
        e->evicted_mask = ~(uint64_t)0;
        tkvi_set_sink_mask(&kv->pool, ids[i], 0);
        e->n_packed = 0;
        e->end_slot = (uint8_t)(e->first_slot + 1);
        e->start = gone->to;
    }
    e->start -= n;
    if (kv->tables.plan[layer].rope) e->turned -= n;
    return 1;
}

/* Takes a span out of a list. There must be room for the entries of tkvi_count_slide_splits. */
static void tkvi_slide_list(tkv_cache *kv, int seq, int layer, const tkvi_gone *gone) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, slot;
    tkvi_forget_meter_copies_in(kv, seq, layer, 0, TKVI_FOREVER);
    tkvi_drop_ended_pins_in(kv, seq, layer);
    for (i = 0; TKVI_HAS_EVICT && kv->pool.token_meta && i < list->n; i++)
        tkvi_move_stamps_up(kv, ids[i], gone->to - gone->from);
    for (i = 0; i < list->n; i++)
        if (tkvi_block_start(kv, ids, i) >= gone->from && tkvi_block_end(kv, list, ids, i) <= gone->to)
            tkvi_wipe_before_release(kv, seq, layer, i);
    for (i = 0; i < list->n; i++) {
        slot = tkvi_slot_behind(kv, list, ids, i, gone);
        if (slot) tkvi_split_entry(kv, seq, layer, i, slot);
    }
    for (i = 0; i < list->n; i++)
        if (!tkvi_take_out(kv, seq, layer, i, gone)) {
            if (i > 0) tkvi_end_slots(kv, list, ids, i - 1);
            tkvi_unlist_block(kv, seq, layer, i--);
        }
    list->len = tkvi_move_up(gone, list->len);
    list->chunk_start = tkvi_move_up(gone, list->chunk_start);
    list->step_len = tkvi_move_up(gone, list->step_len);
    list->evict_len = tkvi_move_up(gone, list->evict_len);
    /* Where all tokens behind the sinks that expired are among those that go, later queries may come near them: what is
     * missing there is gone because the caller wished it. */
    list->expired = list->expired > gone->to ? tkvi_move_up(gone, list->expired) : 0;
    list->expired_end = list->expired ? list->expired_end - (gone->to - gone->from) : 0;
    list->is_moved = list->n > 0 || list->shift;
    for (i = 0; i < list->n; i++) tkvi_wipe_unused(kv, layer, kv->pool.entry[ids[i]].block, i);
}

/* Number of tokens that a sequence may hold. */
static int tkvi_most_held(const tkv_cache *kv) {
    const tkv_config *cfg = &kv->tables.cfg;
    const int keep = tkvi_max(cfg->evict.keep_tokens, tkvi_max(cfg->evict.keep_first, cfg->evict.keep_last));
    return cfg->evict.policy == TKV_EVICT_SLIDING && keep ? tkvi_min(keep, cfg->limits.max_tokens)
                                                          : cfg->limits.max_tokens;
}

/* 1 if the next token of a sequence begins a block in each layer. */
static int tkvi_is_tail_full(const tkv_cache *kv, int seq) {
    int layer, is_full = 1;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (kv->tables.plan[layer].stored_layer == layer)
            is_full &= !tkvi_tail_free_slots(kv, &kv->tables.plan[layer], tkvi_list_of(kv, seq, layer),
                                             tkvi_ids(kv, seq, layer));
    return is_full;
}

/* Checks that the tokens behind a span can move up. */
static tkv_status tkvi_check_slide(tkv_cache *kv, int seq, const tkvi_gone *gone) {
    tkv_status st = tkvi_check_movable(kv);
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n && !st; i++) {
            const int end = tkvi_block_end(kv, list, ids, i),
                      from = tkvi_max(gone->to, tkvi_block_start(kv, ids, i));
            if (from < end) st = tkvi_check_new_positions(kv, list, ids, i, from, end, gone->from - gone->to);
        }
    }
    return st;
}

/* Names the field that has the limit. */
static tkv_status tkvi_refuse_slide(tkv_cache *kv, int most) {
    const tkv_config *cfg = &kv->tables.cfg;
    return tkvi_fail(kv, TKV_ERR_CAPACITY,
                     most == cfg->limits.max_tokens
                         ? "nothing would stay behind the sinks: raise limits.max_tokens; it is"
                     : most == cfg->evict.keep_tokens
                         ? "nothing would stay behind the sinks: raise evict.keep_tokens; it is"
                         : "nothing would stay behind the sinks: raise the larger of "
                           "evict.keep_first and keep_last; it is",
                     most, "");
}

TKV_API tkv_status tkv_seq_slide(tkv_cache *kv, int seq, int n, int *n_removed) {
    const tkv_config *cfg;
    tkvi_demand splits = tkvi_no_demand();
    tkvi_slide slide;
    tkv_status st;
    int layer, len = 0, excess;
    if (!TKVI_HAS_MOVES) return tkvi_refuse_left_out(kv, "TKV_NO_MOVES leaves this out");
    if (n_removed) *n_removed = 0;
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    cfg = &kv->tables.cfg;
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence", seq, "");
    if (n < 0 || n > cfg->limits.max_append)
        return tkvi_fail(kv, TKV_ERR_ARG, "n is", n, "; it must be 0 to max_append");
    for (layer = 0; layer < cfg->model.n_layers; layer++)
        len = tkvi_max(len, tkvi_list_of(kv, seq, layer)->len);
    /* Best while the last block is full: then all of its tokens have one entry. */
    excess = len - (tkvi_most_held(kv) - (tkvi_is_tail_full(kv, seq) ? tkvi_max(n, TKVI_BLOCK) : n));
    if (excess <= 0) return tkvi_ok(kv);
    slide.gone.from = 0;
    for (layer = 0; layer < cfg->model.n_layers; layer++)
        if (kv->tables.plan[layer].stored_layer == layer)
            slide.gone.from = tkvi_max(slide.gone.from, kv->tables.plan[layer].sink);
    slide.gone.to = slide.gone.from + tkvi_round_up(excess, TKVI_BLOCK);
    for (layer = 0; layer < cfg->model.n_layers; layer++) /* a layer may lag behind the others */
        if (tkvi_list_of(kv, seq, layer)->len > 0) len = tkvi_min(len, tkvi_list_of(kv, seq, layer)->len);
    if (slide.gone.to >= len) return tkvi_refuse_slide(kv, tkvi_most_held(kv));
    st = tkvi_check_slide(kv, seq, &slide.gone);
    slide.seq = seq;
    (void)tkvi_count_slide_splits(kv, &slide, &splits);
    if (!st && splits.entries)
        st = tkvi_provide_entries(kv, seq, tkvi_count_slide_splits, &slide, "no memory to slide sequence");
    if (st) return st;
    tkvi_reserve_slots(kv, seq, 0);
    for (layer = 0; layer < cfg->model.n_layers; layer++) tkvi_slide_list(kv, seq, layer, &slide.gone);
    tkvi_forget_tokens(kv, seq, slide.gone.from);
    tkvi_remember_turns(kv, seq);
    tkvi_release_unused(kv, seq);
    if (n_removed) *n_removed = slide.gone.to - slide.gone.from;
    return tkvi_ok(kv);
}

#endif /* TKVI_STEP_SLIDE_H */
