/*
 * step/keep.h - tkv_seq_keep: of the newest tokens, which are exact, some stay and close up. So an accepted path of a
 * draft tree stands as if it alone had been appended.
 *
 *     drafted    ... [a b c d e f g - ]         keep from b on: b d g
 *     kept       ... [a b d g - - - - ]         rows of d and g were copied to the slots behind b
 *
 * A row never moves to a later slot, so the rows are copied in order, in place. Kept tokens get the next indices and
 * keep their positions: where these jump, an entry begins.
 */
#ifndef TKVI_STEP_KEEP_H
#define TKVI_STEP_KEEP_H

#include "step/move.h"
#include "step/states.h"

typedef struct tkvi_keep {
    int seq, first, n;
    const int *indices;
} tkvi_keep;

/* Copies the rows of a token to a slot of another block or of the same, with the data of the token. A promoted block
 * can have an exact copy in the store, which does not match it any more. */
static void tkvi_copy_token(tkv_cache *kv, uint32_t from, int from_slot, uint32_t to, int to_slot) {
    const tkvi_block *a = tkvi_block_of(kv, from), *b = tkvi_block_of(kv, to);
    const tkvi_simd_ops *ops = kv->kernels->simd_ops;
    const uint64_t bit = (uint64_t)1 << to_slot;
    float row[TKV_MAX_HEAD_DIM];
    int h;
    tkvi_forget_copy(&kv->pool, kv->pool.entry[to].block);
    for (h = 0; h < kv->tables.layout[a->layout].n_kv_heads; h++) {
        const tkvi_record *r = &kv->tables.layout[a->layout].record[h],
                          *s = &kv->tables.layout[b->layout].record[h];
        const uint8_t *src = tkvi_block_bytes(&kv->pool, a) + r->at;
        uint8_t *dst = tkvi_block_bytes(&kv->pool, b) + s->at;
        tkvi_finite_values(&r->k, ops, src, from_slot, 1, row, 0);
        tkvi_put_token(&s->k, ops, row, to_slot, dst);
        tkvi_finite_values(&r->v, ops, src + r->v_at, from_slot, 1, row, 0);
        tkvi_put_token(&s->v, ops, row, to_slot, dst + s->v_at);
    }
    tkvi_set_sink_mask(&kv->pool, to,
                       (tkvi_sink_mask(&kv->pool, to) & ~bit) |
                           (tkvi_sink_mask(&kv->pool, from) >> from_slot & 1) << to_slot);
    if (TKVI_HAS_EVICT && kv->pool.token_meta) {
        const tkvi_token_meta *m = &kv->pool.token_meta[from];
        tkvi_token_meta *n = &kv->pool.token_meta[to];
        tkvi_align_steps(kv, from, to);
        n->scores[to_slot] = m->scores[from_slot];
        n->pinned_mask = (n->pinned_mask & ~bit) | (m->pinned_mask >> from_slot & 1) << to_slot;
        n->temporary_mask = (n->temporary_mask & ~bit) | (m->temporary_mask >> from_slot & 1) << to_slot;
        if (n->temporary_mask & bit) n->temporary_until = tkvi_max(n->temporary_until, m->temporary_until);
    }
}

/* Checks that the tokens of a layer from `first` on are exact, in RAM, and this sequence's alone. Entries that list
 * their tokens are refused, exact ones too: an eviction merged their block, or freed the one behind it. */
static tkv_status tkvi_check_keep(tkv_cache *kv, int layer, const tkvi_keep *keep) {
    const tkvi_list *list = tkvi_list_of(kv, keep->seq, layer);
    const uint32_t *ids = tkvi_ids(kv, keep->seq, layer);
    int i, slot;
    if (keep->first < list->expired)
        return tkvi_fail(kv, TKV_ERR_STATE, "tokens have expired: index", keep->first, "");
    for (i = list->anchors; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const tkvi_record *r = kv->tables.layout[b->layout].record;
        uint32_t n_own = 1;
        int is_ready;
        if (tkvi_block_end(kv, list, ids, i) <= keep->first) continue;
        while (i >= (int)n_own && tkvi_goes_on(kv, list, ids, i - (int)n_own + 1)) n_own++;
        /* Later entries of the block are no older, but may be packed. */
        is_ready = tkvi_tier_at(list, i) == TKV_TIER_HOT && !kv->pool.entry[ids[i]].n_packed;
        while (i + 1 < list->n && tkvi_goes_on(kv, list, ids, i + 1)) {
            i++;
            n_own++;
            is_ready &= !kv->pool.entry[ids[i]].n_packed;
        }
        if (!is_ready || tkvi_is_offloaded(b) || !tkvi_is_exact(r->k.format) || !tkvi_is_exact(r->v.format))
            return tkvi_fail(kv, TKV_ERR_STATE, "tokens are not exact any more: index",
                             tkvi_max(keep->first, tkvi_block_start(kv, ids, i)), "");
        if (b->refs > n_own)
            return tkvi_fail(kv, TKV_ERR_STATE, "another sequence shares tokens: index",
                             tkvi_max(keep->first, tkvi_block_start(kv, ids, i)), "");
    }
    for (i = 0; i < keep->n; i++)
        if (keep->indices[i] >= list->len || tkvi_find_token(kv, list, ids, keep->indices[i], &slot) < 0)
            return tkvi_fail(kv, TKV_ERR_RANGE, "there is no token with index", keep->indices[i], "");
    return TKV_OK;
}

/* Entries that the kept tokens take at most, in all layers. Returns the length of the longest list then. */
static int tkvi_count_kept(tkv_cache *kv, const void *what, tkvi_demand *demand) {
    const tkvi_keep *keep = (const tkvi_keep *)what;
    int layer, i, longest = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, keep->seq, layer);
        const uint32_t *ids = tkvi_ids(kv, keep->seq, layer);
        int n = 0, next = -1;
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        for (i = 0; i < keep->n; i++) {
            const int position = tkvi_index_position(kv, list, ids, keep->indices[i]);
            n += position != next;
            next = position + 1;
        }
        n += 2 + keep->n / TKVI_BLOCK + (list->sinks > 0); /* blocks that they fill */
        demand->entries += n;
        longest = tkvi_max(longest, list->n + n);
    }
    return longest;
}

/* Where the next kept token goes. */
typedef struct tkvi_keep_cursor {
    int i, slot;  /* an old entry with the block, and the slot there */
    int n_new;    /* new entries, behind the old ones in the array of the list */
    int position; /* that goes on in the last new entry; -1: none does */
} tkvi_keep_cursor;

/* Moves the cursor to the next block if this one is full. */
static void tkvi_find_kept_slot(const tkv_cache *kv, int seq, int layer, tkvi_keep_cursor *to) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer), number = kv->pool.entry[ids[to->i]].block;
    const int capacity = to->i < list->sinks
                             ? kv->tables.plan[layer].sink
                             : kv->tables.layout[tkvi_block_of(kv, ids[to->i])->layout].tokens;
    if (to->slot < capacity) return;
    while (kv->pool.entry[ids[to->i]].block == number) to->i++;
    to->slot = 0;
    to->position = -1;
}

/* Puts a token of an old entry into the next slot. */
static void tkvi_keep_token(tkv_cache *kv, const tkvi_keep *keep, int layer, int index,
                            tkvi_keep_cursor *to) {
    const tkvi_list *list = tkvi_list_of(kv, keep->seq, layer);
    uint32_t *ids = tkvi_ids(kv, keep->seq, layer), *new_ids = ids + list->n;
    int from_slot = -1;
    const int found = tkvi_find_token(kv, list, ids, keep->indices[index], &from_slot);
    TKVI_ASSERT(found >= 0 && from_slot >= 0); /* the call has looked for all tokens before */
    const uint32_t from = ids[found];
    const int at = keep->first + index, shift = kv->pool.entry[from].shift + keep->indices[index] - at;
    const int turned = kv->pool.entry[from].turned;
    tkvi_find_kept_slot(kv, keep->seq, layer, to);
    if (to->position < 0 || kv->pool.entry[new_ids[to->n_new - 1]].shift != shift ||
        kv->pool.entry[new_ids[to->n_new - 1]].turned != turned) {
        const uint32_t id = tkvi_share_entry(&kv->pool, ids[to->i], to->slot + 1);
        tkvi_entry *e = &kv->pool.entry[id];
        new_ids[to->n_new++] = id;
        e->start = at;
        e->shift = shift;
        e->turned = turned;
        e->first_slot = (uint8_t)to->slot;
        e->end_slot = 0;
        e->evicted_mask = 0;
        tkvi_set_sink_mask(&kv->pool, id, 0);
        if (TKVI_HAS_EVICT && kv->pool.token_meta) {
            tkvi_token_meta *meta = &kv->pool.token_meta[id];
            *meta = kv->pool.token_meta[from];
            meta->pinned_mask = meta->temporary_mask = meta->anchored_mask = 0;
            meta->temporary_until = 0;
        }
        to->position = 0;
    }
    tkvi_copy_token(kv, from, from_slot, new_ids[to->n_new - 1], to->slot);
    tkvi_block_of(kv, ids[to->i])->n_shared_slots = (uint8_t)++to->slot;
}

/* 1 if block i of a list, which was just kept, has sinks. */
static int tkvi_are_kept_sinks(const tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    return kv->tables.layout[tkvi_block_of(kv, ids[i])->layout].key == kv->tables.plan[layer].sink_layout &&
           tkvi_can_be_sinks(kv, layer, kv->pool.entry[ids[i]].first_slot, tkvi_block_start(kv, ids, i),
                             tkvi_block_end(kv, list, ids, i));
}

/* Keeps tokens of a layer. There must be room for the entries of tkvi_count_kept. The meter has no copies of their
 * blocks: it copies those that leave the hot tier, and tkvi_check_keep refuses them. */
static void tkvi_keep_in_list(tkv_cache *kv, int layer, const tkvi_keep *keep) {
    tkvi_list *list = tkvi_list_of(kv, keep->seq, layer);
    uint32_t *ids = tkvi_ids(kv, keep->seq, layer);
    const int n_old = list->n, i = tkvi_max(list->anchors, tkvi_block_at(kv, list, ids, keep->first));
    int n_kept = i, t;
    tkvi_keep_cursor to;
    tkvi_drop_ended_pins_in(kv, keep->seq, layer);
    memset(&to, 0, sizeof to);
    to.i = i;
    /* The token of `first` may be gone: then the index is before the first entry, or behind the slots of its entry. */
    to.slot = kv->pool.entry[ids[i]].first_slot + tkvi_max(0, keep->first - tkvi_block_start(kv, ids, i));
    to.slot = tkvi_min(to.slot, tkvi_block_tokens(kv, list, ids, i));
    to.position = -1;
    for (t = 0; t < keep->n; t++) tkvi_keep_token(kv, keep, layer, t, &to);
    if (tkvi_block_start(kv, ids, i) < keep->first) { /* its tokens before `first` stay */
        tkvi_truncate_entry(kv, ids[i], keep->first);
        n_kept++;
    }
    for (t = n_kept; t < n_old; t++) tkvi_release_entry(&kv->pool, ids[t]);
    tkvi_uncount_blocks(list, n_kept, n_old);
    memmove(ids + n_kept, ids + n_old, (size_t)to.n_new * sizeof *ids);
    list->n = n_kept + to.n_new;
    list->len = keep->first + keep->n;
    list->shift = kv->pool.entry[ids[list->n - 1]].shift;
    for (t = list->sinks; t >= n_kept && t < list->n && tkvi_are_kept_sinks(kv, keep->seq, layer, t); t++)
        list->sinks++;
    list->chunk_start = tkvi_min(list->chunk_start, list->len);
    for (t = n_kept; t < list->n; t++)
        list->is_moved |= kv->pool.entry[ids[t]].shift != 0 || kv->pool.entry[ids[t]].turned != 0;
    tkvi_token_score_cut(kv, list, ids);
    if (n_kept > 0 && tkvi_can_unite(kv, list, ids, n_kept - 1))
        tkvi_unite_entries(kv, keep->seq, layer, n_kept - 1);
    for (t = tkvi_max(0, n_kept - 1); t < list->n; t++)
        tkvi_wipe_unused(kv, layer, kv->pool.entry[ids[t]].block, t);
}

TKV_API tkv_status tkv_seq_keep(tkv_cache *kv, int seq, int first, const int *indices, int n) {
    tkvi_keep keep;
    tkv_status st = TKV_OK;
    int layer, i;
    if (!TKVI_HAS_MOVES) return tkvi_refuse_left_out(kv, "TKV_NO_MOVES leaves this out");
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence", seq, "");
    if (first < 0) return tkvi_fail(kv, TKV_ERR_ARG, "first is", first, "; it must not be negative");
    if (n < 0 || (n > 0 && !indices))
        return tkvi_fail(kv, TKV_ERR_ARG, "n is", n, ", or indices are missing");
    for (i = 0; i < n; i++)
        if (i ? indices[i] <= indices[i - 1] : indices[i] < first)
            return tkvi_fail(kv, TKV_ERR_ARG, "indices must rise, from `first` on; one is", indices[i], "");
    if (n == 0) return tkv_seq_truncate(kv, seq, first);
    if (indices[n - 1] >= TKVI_FOREVER)
        return tkvi_fail(kv, TKV_ERR_RANGE, "there is no token with index", indices[n - 1], "");
    if (kv->tables.cfg.tiers.n_anchors && indices[n - 1] != first + n - 1)
        return tkvi_fail(kv, TKV_ERR_UNSUPPORTED,
                         "set tiers.n_anchors to 0: with anchors only tokens in a row can stay, from", first,
                         " on");
    keep.seq = seq;
    keep.first = first;
    keep.indices = indices;
    keep.n = n;
    kv->seq[seq].used = ++kv->call.clock;
    st = tkvi_check_cut(kv, seq, indices[n - 1] + 1); /* the last kept token may see expired ones */
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        if (kv->tables.plan[layer].stored_layer == layer) st = tkvi_check_keep(kv, layer, &keep);
    if (!st)
        st = tkvi_provide_entries_from(kv, seq, seq, tkvi_count_kept, &keep,
                                       "no memory to keep tokens of sequence");
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st;
         layer++) /* a full budget may have coded some */
        if (kv->tables.plan[layer].stored_layer == layer) st = tkvi_check_keep(kv, layer, &keep);
    if (st) return st;
    tkvi_reserve_slots(kv, seq, 0);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (kv->tables.plan[layer].stored_layer == layer) tkvi_keep_in_list(kv, layer, &keep);
    tkvi_forget_tokens(kv, seq, first);
    tkvi_release_unused(kv, seq);
    return tkvi_ok(kv);
}

#endif /* TKVI_STEP_KEEP_H */
