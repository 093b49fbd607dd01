/*
 * step/move.h - tkv_seq_remove, tkv_seq_shift and tkv_seq_copy: tokens of a sequence leave it, get other positions, or
 * join another sequence. No byte of a block changes.
 *
 *     list             [ A ][ B ][ C ]            index 0 .. 191, position = index + shift of the entry
 *     remove 70 .. 99  [ A ][ B ][ C ]            30 bits in the mask of B's entry
 *     shift 100 .. by -30
 *                      [ A ][ B ][ B'][ C ]       B' is a second entry of block B with the slots from 36 on.
 *                            +0   -30  -30        Position 100 was index 100, and is position 70 now.
 *
 * The keys of an entry are rotated for the positions at which they were appended. Attention turns the query back by
 * the distance that the entry's tokens have moved since (attention/attend.h): q.R(d)k = (R(-d)q).k. So a token can move
 * any number of times, in any format, and loses nothing. RoPE: arXiv 2104.09864, section 3.4.3.
 */
#ifndef TKVI_STEP_MOVE_H
#define TKVI_STEP_MOVE_H

#include "step/fork.h"
#include "step/turns.h"

/* Positions first .. end - 1. */
typedef struct tkvi_range {
    int first, end;
} tkvi_range;

static int tkvi_clamp_index(int64_t index, int low, int high) {
    return index < low ? low : index > high ? high : (int)index;
}

/* The indices of the tokens of block i that have positions in a range: *from .. *to - 1, none if these are equal. */
static void tkvi_indices_in(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                            const tkvi_range *range, int *from, int *to) {
    const tkvi_entry *e = &kv->pool.entry[ids[i]];
    const int start = tkvi_block_start(kv, ids, i), end = tkvi_block_end(kv, list, ids, i);
    *from = tkvi_clamp_index((int64_t)range->first - e->shift, start, end);
    *to = tkvi_clamp_index((int64_t)range->end - e->shift, *from, end);
}

static tkv_status tkvi_check_range(tkv_cache *kv, int seq, int first, int end, tkvi_range *range) {
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence", seq, "");
    range->first = first;
    range->end = end == TKV_UNLIMITED ? TKVI_POSITIONS : end;
    if (first < 0) return tkvi_fail(kv, TKV_ERR_ARG, "first is", first, "; positions are not negative");
    if (end == TKV_UNLIMITED && first > range->end)
        return tkvi_fail(kv, TKV_ERR_ARG, "first is", first, "; positions are 0 to 2^30 - 1");
    if (range->end < first)
        return tkvi_fail(kv, TKV_ERR_ARG, "end is", end, "; it must not be less than first");
    return TKV_OK;
}

/* >>removal */
/* Bits of the slots of block i with tokens at indices from .. to - 1. Anchored tokens are among them. */
static uint64_t tkvi_slots_between(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                                   int from, int to) {
    const uint64_t used = tkvi_used_mask(kv, list, ids, i);
    uint64_t mask = 0;
    int t;
    for (t = 0; t < TKVI_BLOCK; t++) {
        const int at = used >> t & 1 ? tkvi_slot_index(kv, ids[i], t) : -1;
        if (at >= from && at < to) mask |= (uint64_t)1 << t;
    }
    return mask;
}

/* Narrows the indices *from .. *to - 1 of block i to those from its first token there to its last one. Returns 0 if it
 * has none there. */
static int tkvi_narrow_to_tokens(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                                 int *from, int *to) {
    const uint64_t slots = *from < *to ? tkvi_slots_between(kv, list, ids, i, *from, *to) : 0;
    int t, n_found = 0;
    for (t = 0; t < TKVI_BLOCK; t++) {
        if (!(slots >> t & 1)) continue;
        if (!n_found++) *from = tkvi_slot_index(kv, ids[i], t);
        *to = tkvi_slot_index(kv, ids[i], t) + 1;
    }
    return n_found > 0;
}

/* 1 if the last position of a list is in a range. The next one follows it, also if that token is gone. */
static int tkvi_reaches_end(const tkvi_list *list, const tkvi_range *range) {
    const int64_t next = (int64_t)list->len + list->shift;
    return next > range->first && next <= range->end;
}

/* The number of tokens that stay in front of those that a removal takes from the end of a list. */
static int tkvi_n_before_tail(const tkv_cache *kv, int seq, int layer, const tkvi_range *range) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, t, from, to;
    if (!list->n) return 0;
    if (!tkvi_reaches_end(list, range)) return list->len;
    for (i = list->n; i-- > 0;) {
        uint64_t used = tkvi_used_mask(kv, list, ids, i);
        if (i < list->anchors) used = 0; /* their own blocks have them too */
        tkvi_indices_in(kv, list, ids, i, range, &from, &to);
        if (from < to) used &= ~tkvi_slots_between(kv, list, ids, i, from, to);
        for (t = TKVI_BLOCK; used && t-- > 0;)
            if (used >> t & 1) return tkvi_slot_index(kv, ids[i], t) + 1;
    }
    return 0;
}

/* Removes the anchors of a list with positions in a range. */
static void tkvi_remove_anchors(tkv_cache *kv, int seq, int layer, const tkvi_range *range) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, t;
    for (i = 0; i < list->anchors; i++) {
        const uint64_t live = tkvi_live_mask_in(kv, list, ids, i);
        for (t = 0; t < TKVI_BLOCK; t++) {
            const int at = live >> t & 1 ? tkvi_slot_index(kv, ids[i], t) : -1;
            const int position = at < 0 ? -1 : tkvi_index_position(kv, list, ids, at);
            if (position >= range->first && position < range->end)
                kv->pool.entry[ids[i]].evicted_mask |= (uint64_t)1 << t;
        }
        tkvi_wipe_unused(kv, layer, kv->pool.entry[ids[i]].block, i);
    }
}

/* Removes the tokens of a layer with positions in a range. Blocks without tokens are freed, but not the last one. */
static void tkvi_remove_in_list(tkv_cache *kv, int seq, int layer, const tkvi_range *range) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, from, to;
    tkvi_remove_anchors(kv, seq, layer, range);
    for (i = 0; i < list->n; i++) {
        uint64_t mask;
        tkvi_indices_in(kv, list, ids, i, range, &from, &to);
        mask = from < to ? tkvi_slots_between(kv, list, ids, i, from, to) : 0;
        if (!mask) continue;
        tkvi_forget_meter_copies(kv, seq, layer, tkvi_block_start(kv, ids, i));
        kv->pool.entry[ids[i]].evicted_mask |= mask;
        tkvi_set_sink_mask(&kv->pool, ids[i], kv->pool.entry[ids[i]].sink_mask & ~mask);
        if (TKVI_HAS_EVICT && kv->pool.token_meta) {
            kv->pool.token_meta[ids[i]].anchored_mask &= ~mask;
            kv->pool.token_meta[ids[i]].pinned_mask &= ~mask;
            kv->pool.token_meta[ids[i]].temporary_mask &= ~mask;
        }
        tkvi_wipe_unused(kv, layer, kv->pool.entry[ids[i]].block, i);
        if (i + 1 == list->n || tkvi_used_mask(kv, list, ids, i)) continue;
        if (i > 0) tkvi_end_slots(kv, list, ids, i - 1);
        tkvi_unlist_block(kv, seq, layer, i--);
    }
}

/* The lowest index of a token with a position in a range, of any layer. TKVI_FOREVER: no layer has such a token. */
static int tkvi_first_index_in(const tkv_cache *kv, int seq, const tkvi_range *range) {
    int layer, i, t, from, to, first = TKVI_FOREVER;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            uint64_t mask;
            tkvi_indices_in(kv, list, ids, i, range, &from, &to);
            mask = from < tkvi_min(to, first) ? tkvi_slots_between(kv, list, ids, i, from, to) : 0;
            for (t = 0; mask && t < TKVI_BLOCK; t++)
                if (mask >> t & 1) first = tkvi_min(first, tkvi_slot_index(kv, ids[i], t));
        }
    }
    return first;
}

TKV_API tkv_status tkv_seq_remove(tkv_cache *kv, int seq, int first, int end) {
    tkvi_range range;
    tkv_status st = tkvi_check_range(kv, seq, first, end, &range);
    int layer, len = 0, longest = 0, first_index, reaches_end = 0;
    if (!TKVI_HAS_MOVES) return tkvi_refuse_left_out(kv, "TKV_NO_MOVES leaves this out");
    if (st) return st;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        len = tkvi_max(len, tkvi_n_before_tail(kv, seq, layer, &range));
        longest = tkvi_max(longest, list->len);
        reaches_end |= (int64_t)list->len + list->shift < range.end;
    }
    first_index = tkvi_first_index_in(kv, seq, &range);
    if (first_index == TKVI_FOREVER) {                         /* a tail without tokens is not cut */
        if (reaches_end) tkvi_forget_tokens(kv, seq, longest); /* a state can be ahead of the tokens */
        return tkvi_ok(kv);
    }
    if (len < longest) st = tkv_seq_truncate(kv, seq, len);
    if (st) return st;
    tkvi_reserve_slots(kv, seq, 0); /* it was counted for full blocks */
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        tkvi_remove_in_list(kv, seq, layer, &range);
    tkvi_forget_tokens(kv, seq, first_index); /* those behind have seen a token that is gone */
    tkvi_release_unused(kv, seq);
    return tkvi_ok(kv);
}

/* >>moving */
/* The slot at which block i must be split so that no entry has tokens before and behind index `at`; 0: none has. */
static int tkvi_split_slot(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i, int at) {
    const uint64_t used = tkvi_used_mask(kv, list, ids, i);
    int t, any_before = 0;
    for (t = 0; t < TKVI_BLOCK; t++) {
        if (!(used >> t & 1)) continue;
        if (tkvi_slot_index(kv, ids[i], t) >= at) return any_before ? t : 0;
        any_before = 1;
    }
    return 0;
}

/* Takes the slots before `slot` from an entry. start: index at which the entry begins then. */
static void tkvi_cut_front(tkv_cache *kv, uint32_t id, int slot, int start) {
    tkvi_entry *e = &kv->pool.entry[id];
    const uint64_t kept = ~(uint64_t)0 << slot;
    e->first_slot = (uint8_t)slot;
    e->evicted_mask &= kept;
    tkvi_set_sink_mask(&kv->pool, id, e->sink_mask & kept);
    if (TKVI_HAS_EVICT && kv->pool.token_meta) {
        tkvi_token_meta *meta = &kv->pool.token_meta[id];
        int t;
        for (t = slot; t < e->n_packed; t++)
            meta->index.after_start[t] = (uint16_t)(meta->index.after_start[t] - (start - e->start));
        meta->pinned_mask &= kept;
        meta->temporary_mask &= kept;
    }
    e->start = start;
}

/* Gives the slots of block i from `slot` on an entry of their own, behind it. There must be room for it. */
static void tkvi_split_entry(tkv_cache *kv, int seq, int layer, int i, int slot) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    const uint32_t id = ids[i], new_id = tkvi_share_entry(&kv->pool, id, tkvi_block_tokens(kv, list, ids, i));
    const uint64_t before = tkvi_slots_before(slot);
    const int start = tkvi_slot_index(kv, id, slot);
    tkvi_entry *a = &kv->pool.entry[id];
    TKVI_ASSERT((uint32_t)list->n < kv->seq[seq].cap);
    tkvi_forget_meter_copies(kv, seq, layer, a->start);
    memmove(ids + i + 2, ids + i + 1, (size_t)(list->n - i - 1) * sizeof *ids);
    ids[i + 1] = new_id;
    tkvi_count_split(list, i);
    tkvi_cut_front(kv, new_id, slot, start);
    a->evicted_mask &= before;
    tkvi_set_sink_mask(&kv->pool, id, a->sink_mask & before);
    a->end_slot = 0;
    if (TKVI_HAS_EVICT && kv->pool.token_meta) {
        kv->pool.token_meta[id].pinned_mask &= before;
        kv->pool.token_meta[id].temporary_mask &= before;
    }
    if (a->n_packed) a->n_packed = (int8_t)slot;
}

/* 1 if blocks i and i + 1 are entries of one block that can be one entry again. */
static int tkvi_can_unite(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_entry *a = &kv->pool.entry[ids[i]], *b = &kv->pool.entry[ids[i + 1]];
    return a->block == b->block && tkvi_moved_alike(a, b) && a->tier == b->tier &&
           (i + 1 < list->sinks || i >= list->sinks) &&
           tkvi_block_tokens(kv, list, ids, i) == b->first_slot && !a->end_slot &&
           !a->n_packed == !b->n_packed && tkvi_block_end(kv, list, ids, i + 1) - a->start <= 65536;
}

/* Undoes tkvi_split_entry. */
static void tkvi_unite_entries(tkv_cache *kv, int seq, int layer, int i) {
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const uint32_t id = ids[i], old_id = ids[i + 1];
    tkvi_entry *a = &kv->pool.entry[id];
    const tkvi_entry *b = &kv->pool.entry[old_id];
    const uint64_t of_b = ~(uint64_t)0 << b->first_slot; /* its bits of other slots say nothing */
    tkvi_drop_ended_pins(kv, seq, layer, i);
    tkvi_drop_ended_pins(kv, seq, layer, i + 1);
    a->evicted_mask = (a->evicted_mask & ~of_b) | (b->evicted_mask & of_b);
    tkvi_set_sink_mask(&kv->pool, id, (a->sink_mask & ~of_b) | (b->sink_mask & of_b));
    a->end_slot = b->end_slot;
    if (TKVI_HAS_EVICT && kv->pool.token_meta) {
        tkvi_token_meta *to = &kv->pool.token_meta[id];
        const tkvi_token_meta *from = &kv->pool.token_meta[old_id];
        int t;
        tkvi_align_steps(kv, id, old_id);
        for (t = b->first_slot; t < TKVI_BLOCK; t++) {
            to->index.after_start[t] = (uint16_t)(from->index.after_start[t] + (b->start - a->start));
            to->scores[t] = from->scores[t];
        }
        to->pinned_mask = (to->pinned_mask & ~of_b) | (from->pinned_mask & of_b);
        to->temporary_mask = (to->temporary_mask & ~of_b) | (from->temporary_mask & of_b);
        to->temporary_until = tkvi_max(to->temporary_until, from->temporary_until);
        a->n_packed = b->n_packed;
    }
    tkvi_unlist_block(kv, seq, layer, i + 1);
}

/* A move of tokens of a sequence. */
typedef struct tkvi_move {
    int seq, delta;
    tkvi_range range;
} tkvi_move;

/* Entries that the borders of a move take, in all layers. Returns the length of the longest list then. */
static int tkvi_count_splits(tkv_cache *kv, const void *what, tkvi_demand *demand) {
    const tkvi_move *move = (const tkvi_move *)what;
    int layer, i, from, to, longest = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, move->seq, layer);
        const uint32_t *ids = tkvi_ids(kv, move->seq, layer);
        int n = 0;
        for (i = 0; i < list->n; i++) {
            tkvi_indices_in(kv, list, ids, i, &move->range, &from, &to);
            if (from == to || !tkvi_slots_between(kv, list, ids, i, from, to)) continue;
            n += (tkvi_split_slot(kv, list, ids, i, from) > 0) + (tkvi_split_slot(kv, list, ids, i, to) > 0);
        }
        demand->entries += n;
        longest = tkvi_max(longest, list->n + n);
    }
    return longest;
}

/* expired_end after a move. Expired tokens have no position; they keep their distance where all that is left moves
 * alike. */
static int tkvi_moved_expired_end(const tkvi_list *list, const tkvi_move *move) {
    const int moves = move->range.first <= list->expired_end && tkvi_reaches_end(list, &move->range);
    return tkvi_clamp_index((int64_t)list->expired_end + (moves ? move->delta : 0), -TKVI_POSITIONS,
                            TKVI_POSITIONS);
}

/* Moves the tokens of a layer. There must be room for the entries of tkvi_count_splits. */
static void tkvi_move_in_list(tkv_cache *kv, int layer, const tkvi_move *move) {
    tkvi_list *list = tkvi_list_of(kv, move->seq, layer);
    const uint32_t *ids = tkvi_ids(kv, move->seq, layer);
    int i, from, to, slot;
    list->expired_end = tkvi_moved_expired_end(list, move);
    if (tkvi_reaches_end(list, &move->range))
        list->shift =
            tkvi_clamp_index((int64_t)list->len + list->shift + move->delta, 0, TKVI_POSITIONS) - list->len;
    for (i = 0; i < list->n; i++) {
        tkvi_indices_in(kv, list, ids, i, &move->range, &from, &to);
        if (from == to || !tkvi_slots_between(kv, list, ids, i, from, to)) continue;
        slot = tkvi_split_slot(kv, list, ids, i, to);
        if (slot) tkvi_split_entry(kv, move->seq, layer, i, slot);
        slot = tkvi_split_slot(kv, list, ids, i, from);
        if (slot) tkvi_split_entry(kv, move->seq, layer, i++, slot);
        kv->pool.entry[ids[i]].shift += move->delta;
        if (kv->tables.plan[layer].rope) kv->pool.entry[ids[i]].turned += move->delta;
    }
    list->is_moved = list->shift != 0;
    for (i = 0; i < list->n; i++) {
        while (i + 1 < list->n && tkvi_can_unite(kv, list, ids, i))
            tkvi_unite_entries(kv, move->seq, layer, i);
        list->is_moved |= kv->pool.entry[ids[i]].shift != 0 || kv->pool.entry[ids[i]].turned != 0;
    }
}

/* Checks that the tokens of block i with indices from .. to - 1 can get positions that are higher by delta. Tokens that
 * are gone get none. */
static tkv_status tkvi_check_new_positions(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                                           int from, int to, int delta) {
    const int64_t by = (int64_t)kv->pool.entry[ids[i]].shift + delta;
    const int is_discarded = tkvi_is_discarded(tkvi_block_of(kv, ids[i]));
    if (from == to || (from + by >= 0 && to + by <= TKVI_POSITIONS && !is_discarded)) return TKV_OK;
    if (!tkvi_narrow_to_tokens(kv, list, ids, i, &from, &to)) return TKV_OK;
    if (from + by < 0 || to + by > TKVI_POSITIONS)
        return tkvi_fail(kv, TKV_ERR_RANGE, "a token would get position",
                         from + by < 0 ? from + by : to - 1 + by, "; positions are 0 to 2^30 - 1");
    if (is_discarded)
        return tkvi_fail(kv, TKV_ERR_NO_SOURCE, "a token is discarded; recompute it first: index", from, "");
    return TKV_OK;
}

/* Checks that no token of a layer gets a position that there is not, or comes near expired ones. */
static tkv_status tkvi_check_move(tkv_cache *kv, int layer, const tkvi_move *move) {
    const tkvi_list *list = tkvi_list_of(kv, move->seq, layer);
    const uint32_t *ids = tkvi_ids(kv, move->seq, layer);
    tkv_status st = TKV_OK;
    int i, from, to;
    int64_t first, last;
    for (i = 0; i < list->n && !st; i++) {
        tkvi_indices_in(kv, list, ids, i, &move->range, &from, &to);
        st = tkvi_check_new_positions(kv, list, ids, i, from, to, move->delta);
    }
    if (st) return st;
    if (!list->n || !list->expired) return TKV_OK;
    first = tkvi_moved_expired_end(list, move);
    last = (int64_t)list->len + list->shift;
    if (tkvi_reaches_end(list, &move->range)) last += move->delta;
    if (last - first < kv->tables.plan[layer].kept_window)
        return tkvi_fail(kv, TKV_ERR_RANGE,
                         "tokens of the window have expired; the next token would see them: layer", layer,
                         "");
    return TKV_OK;
}

/* Checks that tokens can get other positions. */
static tkv_status tkvi_check_movable(tkv_cache *kv) {
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (kv->tables.plan[layer].immobile)
            return tkvi_fail(kv, TKV_ERR_UNSUPPORTED, kv->tables.plan[layer].immobile, 0, NULL);
    if (kv->tables.cfg.tiers.n_anchors)
        return tkvi_fail(kv, TKV_ERR_UNSUPPORTED,
                         "set tiers.n_anchors to 0: anchors cannot move, and there are",
                         kv->tables.cfg.tiers.n_anchors, "");
    return TKV_OK;
}

TKV_API tkv_status tkv_seq_shift(tkv_cache *kv, int seq, int first, int end, int delta) {
    tkvi_move move;
    tkv_status st = tkvi_check_range(kv, seq, first, end, &move.range);
    int layer;
    if (!TKVI_HAS_MOVES) return tkvi_refuse_left_out(kv, "TKV_NO_MOVES leaves this out");
    if (!st) st = tkvi_check_movable(kv);
    if (st) return st;
    move.seq = seq;
    move.delta = delta;
    kv->seq[seq].used = ++kv->call.clock;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        st = tkvi_check_move(kv, layer, &move);
    if (!st && delta)
        st = tkvi_provide_entries(kv, seq, tkvi_count_splits, &move, "no memory to move tokens of sequence");
    if (st || !delta) return st ? st : tkvi_ok(kv);
    tkvi_reserve_slots(kv, seq, 0); /* it was counted for a last block that takes more tokens */
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) tkvi_move_in_list(kv, layer, &move);
    tkvi_remember_turns(kv, seq);
    return tkvi_ok(kv);
}

/* >>copying */
typedef struct tkvi_copy {
    int src, dst, delta; /* delta: position in dst less position in src */
    tkvi_range range;    /* positions in src */
} tkvi_copy;

/* Indices from .. to - 1 of a sequence, which have the positions index + shift in all layers. Where a token is gone in
 * all of them, the last one before it tells its shift, or, if there is none, the first one behind. Behind the last
 * token the list does. is_uneven: 1 for a token that the layers were told at other positions; it is a run of its own,
 * and the shift is that of one layer. */
typedef struct tkvi_even_run {
    int from, to, shift, is_uneven;
} tkvi_even_run;

/* 1 if a layer has the token of an index with another shift. */
static int tkvi_is_uneven_at(const tkv_cache *kv, int seq, int index, int shift) {
    int layer, i, slot;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        i = tkvi_find_token(kv, tkvi_list_of(kv, seq, layer), ids, index, &slot);
        if (i >= 0 && kv->pool.entry[ids[i]].shift != shift) return 1;
    }
    return 0;
}

/* Finds the run that begins where *run ends. Returns 0 if there is none. */
static int tkvi_next_run(const tkv_cache *kv, int seq, tkvi_even_run *run) {
    const int from = run->to, first = tkvi_first_index_from(kv, seq, from, -TKVI_POSITIONS, &run->shift);
    int layer, unused;
    run->from = from;
    run->is_uneven = 0;
    if (first < TKVI_FOREVER) {
        run->to = tkvi_is_uneven_at(kv, seq, first, run->shift)
                      ? first
                      : tkvi_first_index_from(kv, seq, first, run->shift, &unused);
        run->is_uneven = run->to == from;
        run->to += run->is_uneven;
        if (run->to < TKVI_FOREVER) return 1;
    }
    run->to = from;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (first < TKVI_FOREVER) {
            const int last = tkvi_last_index(kv, list, tkvi_ids(kv, seq, layer), list->len, &unused);
            run->to = tkvi_max(run->to, last + 1);
        } else if (list->len > run->to) {
            run->to = list->len;
            run->shift = list->shift;
        }
    }
    return run->to > from;
}

/* Index of the first block of a list that can have tokens from an index on. */
static int tkvi_first_block_from(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int index) {
    return tkvi_max(0, tkvi_block_at(kv, list, ids, tkvi_min(index, list->len - 1)));
}

/* Narrows the indices *from .. *to - 1 of src to those of block i. Returns 0 if it has no token there that a copy
 * takes. */
static int tkvi_narrow_to_block(const tkv_cache *kv, const tkvi_copy *copy, int layer, int i, int *from,
                                int *to) {
    const tkvi_list *list = tkvi_list_of(kv, copy->src, layer);
    const uint32_t *ids = tkvi_ids(kv, copy->src, layer);
    int first, end;
    tkvi_indices_in(kv, list, ids, i, &copy->range, &first, &end);
    *from = tkvi_max(*from, first);
    *to = tkvi_min(*to, end);
    return *from < *to && tkvi_slots_between(kv, list, ids, i, *from, *to);
}

/* Number of blocks of a layer with tokens at the indices first .. end - 1 that a copy takes. */
static int tkvi_n_copied_blocks(const tkv_cache *kv, const tkvi_copy *copy, int layer, int first, int end) {
    const tkvi_list *list = tkvi_list_of(kv, copy->src, layer);
    const uint32_t *ids = tkvi_ids(kv, copy->src, layer);
    int i, n = 0;
    for (i = tkvi_first_block_from(kv, list, ids, first); i < list->n && tkvi_block_start(kv, ids, i) < end;
         i++) {
        int from = first, to = end;
        n += tkvi_narrow_to_block(kv, copy, layer, i, &from, &to);
    }
    return n;
}

/* Finds the next run of src, with the indices of it that a copy takes: *from .. *to - 1. A token gets the same index in
 * all layers of dst, whatever is gone in each. Returns 0 if there is none. */
static int tkvi_next_copied(const tkv_cache *kv, const tkvi_copy *copy, tkvi_even_run *run, int *from,
                            int *to) {
    int layer, n = 0;
    if (!tkvi_next_run(kv, copy->src, run)) return 0;
    *from = tkvi_clamp_index((int64_t)copy->range.first - run->shift, run->from, run->to);
    *to = tkvi_clamp_index((int64_t)copy->range.end - run->shift, *from, run->to);
    if (!run->is_uneven) return 1;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        n += tkvi_n_copied_blocks(kv, copy, layer, run->to - 1, run->to);
    *from = run->to - (n > 0);
    *to = run->to;
    return 1;
}

/* Entries that a copy takes, in all layers. Returns the length of the longest list of dst then, or more where its
 * layers have other tokens. */
static int tkvi_count_copies(tkv_cache *kv, const void *what, tkvi_demand *demand) {
    const tkvi_copy *copy = (const tkvi_copy *)what;
    tkvi_even_run run = {0, 0, 0, 0};
    int layer, from, to, longest = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        longest = tkvi_max(longest, tkvi_list_of(kv, copy->dst, layer)->n);
    while (tkvi_next_copied(kv, copy, &run, &from, &to)) {
        int most = 0;
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const int n = tkvi_n_copied_blocks(kv, copy, layer, from, to);
            demand->entries += n;
            most = tkvi_max(most, n);
        }
        longest += most;
    }
    return longest;
}

/* 1 if an entry that holds slots of a block of sinks counts as sinks: its tokens have indices start .. end - 1, from
 * `slot` on. No index is above its slot, so tokens that fill the block later have indices of sinks, too. */
static int tkvi_can_be_sinks(const tkv_cache *kv, int layer, int slot, int start, int end) {
    return start <= slot && end <= kv->tables.plan[layer].sink;
}

/* Gives dst the tokens of block i of src with indices from .. to - 1, at indices from `at` on. */
static void tkvi_copy_entry(tkv_cache *kv, int layer, const tkvi_copy *copy, int i, int from, int to,
                            int at) {
    const tkvi_list *src = tkvi_list_of(kv, copy->src, layer);
    const uint32_t *ids = tkvi_ids(kv, copy->src, layer);
    tkvi_list *dst = tkvi_list_of(kv, copy->dst, layer);
    const uint64_t slots = tkvi_slots_between(kv, src, ids, i, from, to);
    const uint32_t id = tkvi_share_entry(&kv->pool, ids[i], tkvi_block_tokens(kv, src, ids, i));
    tkvi_entry *e = &kv->pool.entry[id];
    int slot = e->n_packed ? 0 : e->first_slot + from - e->start, is_sink;
    is_sink =
        i < src->sinks && dst->n == dst->sinks && tkvi_can_be_sinks(kv, layer, slot, at, at + to - from);
    while (e->n_packed && !(slots >> slot & 1)) slot++;
    kv->pool.n_late -= (uint32_t)(kv->pool.n_late && tkvi_is_late(&kv->pool, id));
    e->tier = TKV_TIER_HOT;
    kv->pool.n_late += (uint32_t)tkvi_is_late(&kv->pool, id);
    tkvi_cut_front(kv, id, slot, from);
    tkvi_truncate_entry(kv, id, to);
    e->start = at;
    e->shift += from - at + copy->delta;
    if (kv->tables.plan[layer].rope) e->turned += copy->delta;
    if (TKVI_HAS_EVICT && kv->pool.token_meta) {
        tkvi_token_meta *meta = &kv->pool.token_meta[id];
        meta->pinned_mask = meta->temporary_mask = 0;
        tkvi_carry_scores(kv, meta, src->len, at + to - from);
    }
    tkvi_ids(kv, copy->dst, layer)[dst->n++] = id;
    dst->sinks += is_sink;
    dst->is_moved |= e->shift != 0 || e->turned != 0;
    dst->len = at + to - from;
    if (dst->n > 1 && tkvi_can_unite(kv, dst, tkvi_ids(kv, copy->dst, layer), dst->n - 2))
        tkvi_unite_entries(kv, copy->dst, layer, dst->n - 2);
}

/* Copies the tokens of a layer with indices first .. end - 1, of one run. There must be room for the entries of
 * tkvi_count_copies. */
static void tkvi_copy_run(tkv_cache *kv, int layer, const tkvi_copy *copy, int first, int end) {
    const tkvi_list *src = tkvi_list_of(kv, copy->src, layer);
    const uint32_t *ids = tkvi_ids(kv, copy->src, layer);
    tkvi_list *dst = tkvi_list_of(kv, copy->dst, layer);
    const int len = dst->len;
    int i;
    for (i = tkvi_first_block_from(kv, src, ids, first); i < src->n && tkvi_block_start(kv, ids, i) < end;
         i++) {
        int from = first, to = end;
        if (!tkvi_narrow_to_block(kv, copy, layer, i, &from, &to)) continue;
        if (dst->n && len + from - first > dst->len)
            tkvi_end_slots(kv, dst, tkvi_ids(kv, copy->dst, layer), dst->n - 1);
        tkvi_copy_entry(kv, layer, copy, i, from, to, len + from - first);
    }
    if (dst->n && len + end - first > dst->len)
        tkvi_end_slots(kv, dst, tkvi_ids(kv, copy->dst, layer), dst->n - 1);
    dst->len = len + end - first;
}

/* Checks that a copy can take the tokens of a layer. */
static tkv_status tkvi_check_copy(tkv_cache *kv, int layer, const tkvi_copy *copy) {
    const tkvi_list *list = tkvi_list_of(kv, copy->src, layer);
    const uint32_t *ids = tkvi_ids(kv, copy->src, layer);
    const tkvi_list *dst = tkvi_list_of(kv, copy->dst, layer);
    tkv_status st = TKV_OK;
    int i, from, to;
    if (list->n && list->expired && list->expired_end > copy->range.first)
        return tkvi_fail(kv, TKV_ERR_RANGE, "tokens of the range have expired: layer", layer, "");
    if (dst->expired)
        return tkvi_fail(kv, TKV_ERR_RANGE, "tokens of dst have expired, so it takes none: layer", layer, "");
    for (i = 0; i < list->n && !st; i++) {
        tkvi_indices_in(kv, list, ids, i, &copy->range, &from, &to);
        st = tkvi_check_new_positions(kv, list, ids, i, from, to, copy->delta);
    }
    return st;
}

TKV_API tkv_status tkv_seq_copy(tkv_cache *kv, int src, int first, int end, int dst, int at) {
    tkvi_copy copy;
    tkvi_demand demand = tkvi_no_demand();
    tkv_status st = tkvi_check_range(kv, src, first, end, &copy.range);
    tkvi_even_run run = {0, 0, 0, 0};
    int layer, from, to, n = 0, len = 0;
    if (!TKVI_HAS_MOVES) return tkvi_refuse_left_out(kv, "TKV_NO_MOVES leaves this out");
    if (st) return st;
    if (!tkvi_has_seq(kv, dst)) return tkvi_refuse_seq(kv, dst);
    if (src == dst) return tkvi_fail(kv, TKV_ERR_ARG, "src and dst are both sequence", src, "");
    if (kv->seq[dst].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence", dst, "");
    if (at < 0) return tkvi_fail(kv, TKV_ERR_ARG, "at is", at, "; positions are not negative");
    copy.src = src;
    copy.dst = dst;
    copy.delta = at - first;
    kv->seq[src].used = kv->seq[dst].used = ++kv->call.clock;
    if (copy.delta && (st = tkvi_check_movable(kv)) != TKV_OK) return st;
    if (kv->tables.cfg.tiers.n_anchors)
        return tkvi_fail(kv, TKV_ERR_UNSUPPORTED, "set tiers.n_anchors to 0: copies have no anchors", 0,
                         NULL);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++) {
        st = tkvi_check_copy(kv, layer, &copy);
        len = tkvi_max(len, tkvi_list_of(kv, dst, layer)->len);
    }
    while (!st && tkvi_next_copied(kv, &copy, &run, &from, &to)) n += to - from;
    if (!st && n > kv->tables.cfg.limits.max_tokens - len)
        st = tkvi_fail(kv, TKV_ERR_CAPACITY, "max_tokens leaves room for",
                       kv->tables.cfg.limits.max_tokens - len, " more tokens");
    if (!st) (void)tkvi_count_copies(kv, &copy, &demand);
    if (!st && demand.entries)
        st = tkvi_provide_entries_from(kv, src, dst, tkvi_count_copies, &copy,
                                       "no memory to copy tokens to sequence");
    if (st || !demand.entries) return st ? st : tkvi_ok(kv);
    tkvi_reserve_slots(kv, src, 0); /* they were counted for blocks that no other list holds */
    tkvi_reserve_slots(kv, dst, 0);
    run.to = 0;
    tkvi_forget_tokens(kv, dst, len); /* states of other tokens */
    while (tkvi_next_copied(kv, &copy, &run, &from, &to))
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
            if (kv->tables.plan[layer].stored_layer == layer) tkvi_copy_run(kv, layer, &copy, from, to);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_list *list = tkvi_list_of(kv, dst, layer);
        (void)tkvi_shift_of_last(kv, dst, layer, list->len, &list->shift);
        list->is_moved |= list->shift != 0;
    }
    tkvi_remember_turns(kv, dst);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_get_positions(const tkv_cache *kv, int seq, int layer, int start, int n,
                                     int *positions) {
    const tkvi_list *list;
    int i;
    layer = tkvi_stored_layer(kv, seq, layer);
    if (layer < 0 || start < 0 || n < 0 || (n > 0 && !positions)) return TKV_ERR_ARG;
    list = tkvi_list_of(kv, seq, layer);
    if (start > list->len || n > list->len - start) return TKV_ERR_RANGE;
    for (i = 0; i < n; i++) positions[i] = tkvi_index_position(kv, list, tkvi_ids(kv, seq, layer), start + i);
    return TKV_OK;
}

#endif /* TKVI_STEP_MOVE_H */
