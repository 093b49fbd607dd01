/*
 * reclaim/anchors.h - anchors: the tokens of a layer with the highest attention scores stay exact. When the block
 * of such a token is recoded, the token is copied to the sinks' block. H2O (arXiv 2306.14048) selects tokens by
 * attention. The idea to demote the least important tokens rather than the oldest is from akv-cache.
 *
 *     sinks' block  [s s s s | a b . .]      n_anchors slots after the sinks, each with a position of its own
 *     recoded       [. . A . . .][. B . .]   A, B: marked in evicted_mask and anchored_mask, attention reads a and b
 *
 * A token with a higher score replaces the anchor with the lowest one. Attention then reads the replaced token from
 * its recoded slot again.
 */
#ifndef TKVI_RECLAIM_ANCHORS_H
#define TKVI_RECLAIM_ANCHORS_H

#include "reclaim/scores.h"
#include "reclaim/offload.h"

/* Mask of the used slots of block i: live tokens and anchored tokens. */
static uint64_t tkvi_used_mask(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return tkvi_live_mask(&kv->pool.entry[ids[i]], tkvi_block_tokens(kv, list, ids, i)) |
           (TKVI_HAS_EVICT && kv->pool.token_meta ? kv->pool.token_meta[ids[i]].anchored_mask : 0);
}

/* Slot of a position in block i; -1: none. In a packed block only live and anchored tokens are found. In other
 * blocks an evicted token still has its slot. */
static int tkvi_place_in(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                         int position) {
    const int n = tkvi_block_tokens(kv, list, ids, i);
    const uint64_t kept = tkvi_used_mask(kv, list, ids, i);
    int t = 0;
    if (!TKVI_HAS_EVICT || !kv->pool.entry[ids[i]].n_packed)
        t = position - tkvi_block_start(kv, ids, i) + kv->pool.entry[ids[i]].first_slot;
    else
        while (t < n && !(kept >> t & 1 && tkvi_slot_index(kv, ids[i], t) == position)) t++;
    return t < n ? t : -1;
}

/* Finds a live token. Returns the index of its block and sets *slot. An anchored token is found in the sinks'
 * block, which has index 0. -1: the position has no live token. */
static int tkvi_find_token(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int position,
                           int *slot) {
    int i = tkvi_block_at(kv, list, ids, position);
    if (i < 0) return -1;
    *slot = tkvi_place_in(kv, list, ids, i, position);
    if (TKVI_HAS_EVICT && *slot >= 0 && kv->pool.token_meta &&
        kv->pool.token_meta[ids[i]].anchored_mask >> *slot & 1) {
        i = 0;
        *slot = tkvi_place_in(kv, list, ids, 0, position);
    }
    return *slot >= 0 && !(kv->pool.entry[ids[i]].evicted_mask >> *slot & 1) ? i : -1;
}

/* Makes block i a packed block, which lists its positions. Then its number of tokens does not depend on the start
 * of the next block, and that one may be freed. */
static void tkvi_list_positions(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    tkvi_entry *e = &kv->pool.entry[ids[i]];
    const int n = tkvi_block_tokens(kv, list, ids, i);
    int t;
    for (t = 0; t < n && !e->n_packed; t++)
        tkvi_set_slot_index(kv, ids[i], t, e->start + tkvi_max(0, t - e->first_slot));
    e->n_packed = (int8_t)n;
    e->end_slot = 0;
}

/* Undoes the anchor in this slot of the sinks' block: attention reads its token from the recoded block again. The
 * token takes its attention score back with it. The caller reuses the slot. */
static void tkvi_remove_anchor(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int slot) {
    const int position = tkvi_slot_index(kv, ids[0], slot), i = tkvi_block_at(kv, list, ids, position);
    const int t = i > 0 ? tkvi_place_in(kv, list, ids, i, position) : -1;
    tkvi_token_meta *token_meta;
    if (t < 0) return;
    token_meta = &kv->pool.token_meta[ids[i]];
    if (!(token_meta->anchored_mask >> t & 1)) return;
    token_meta->anchored_mask &= ~((uint64_t)1 << t);
    kv->pool.entry[ids[i]].evicted_mask &= ~((uint64_t)1 << t);
    tkvi_align_steps(kv, ids[0], ids[i]);
    token_meta->scores[t] = kv->pool.token_meta[ids[0]].scores[slot];
}

/* Makes the token in slot t of block i an anchor: copies it to `slot` of the sinks' block. Block i must still be
 * exact. Its slot t is marked as anchored, and attention does not read it. */
static void tkvi_add_anchor(tkv_cache *kv, const uint32_t *ids, int i, int t, int slot) {
    const tkvi_simd_ops *help = kv->kernels->simd_ops;
    tkvi_block *to = tkvi_block_of(kv, ids[0]), *from = tkvi_block_of(kv, ids[i]);
    const tkvi_layout *a = &kv->tables.layout[to->layout], *b = &kv->tables.layout[from->layout];
    uint8_t *dst = tkvi_block_bytes(&kv->pool, to);
    const uint8_t *src = tkvi_block_bytes(&kv->pool, from);
    float row[TKV_MAX_HEAD_DIM];
    int h;
    for (h = 0; h < a->n_kv_heads; h++) {
        const tkvi_record *r = &a->record[h], *s = &b->record[h];
        tkvi_values(&s->k, help, src + s->at, t, 1, row, 0);
        tkvi_put_token(&r->k, help, row, slot, dst + r->at);
        tkvi_values(&s->v, help, src + s->at + s->v_at, t, 1, row, 0);
        tkvi_put_token(&r->v, help, row, slot, dst + r->at + r->v_at);
    }
    tkvi_set_slot_index(kv, ids[0], slot, tkvi_slot_index(kv, ids[i], t));
    kv->pool.entry[ids[0]].evicted_mask &= ~((uint64_t)1 << slot);
    kv->pool.token_meta[ids[0]].scores[slot] = kv->pool.token_meta[ids[i]].scores[t];
    kv->pool.entry[ids[i]].evicted_mask |= (uint64_t)1 << t;
    kv->pool.token_meta[ids[i]].anchored_mask |= (uint64_t)1 << t;
}

/* 1 if the anchor in this slot of the sinks' block has no other copy, because the block of its token is discarded. */
static int tkvi_is_only_copy(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int slot) {
    const int i = tkvi_block_at(kv, list, ids, tkvi_slot_index(kv, ids[0], slot));
    return i > 0 && tkvi_has_no_source(kv, tkvi_block_of(kv, ids[i]));
}

/* Slot for a new anchor, from first to last - 1: a free slot, or that of the anchor with the lowest score; -1: none. a:
 * attention scores of the slots of the sinks' block. */
static int tkvi_anchor_place(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int first,
                             int last, const float *a) {
    const tkvi_entry *sinks = &kv->pool.entry[ids[0]];
    int t, least = -1;
    for (t = first; t < last; t++) {
        if (t >= sinks->n_packed || sinks->evicted_mask >> t & 1) return t;
        if ((least < 0 || a[t] < a[least]) && !tkvi_is_only_copy(kv, list, ids, t)) least = t;
    }
    return least;
}

/* Called before block i is recoded. If the block is still exact, its live tokens take free anchor slots and replace
 * anchors with lower scores. */
static void tkvi_choose_anchors(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_plan *p = &kv->tables.plan[layer];
    const int first = p->sink, last = p->sink + kv->tables.cfg.tiers.n_anchors;
    tkvi_entry *sinks = &kv->pool.entry[ids[0]];
    const tkvi_block *b = tkvi_block_of(kv, ids[i]);
    float a[TKVI_BLOCK], mine[TKVI_BLOCK];
    uint64_t there;
    int t, newest;
    if (!TKVI_HAS_EVICT || first == last || i < list->sinks || list->sinks == 0 || b->refs > 1 ||
        tkvi_block_of(kv, ids[0])->refs > 1)
        return;
    if (!tkvi_is_hot_layout(kv, layer, b->layout)) return;
    there = tkvi_live_mask(&kv->pool.entry[ids[i]], tkvi_block_tokens(kv, list, ids, i));
    tkvi_list_positions(kv, list, ids, 0);
    newest = tkvi_token_score_newest(kv, list, ids);
    tkvi_align_steps(kv, ids[0], ids[i]);
    tkvi_decay_to_now(kv, ids[i], list->len, newest, mine);
    for (t = 0; t < TKVI_BLOCK; t++) {
        int slot;
        if (!(there >> t & 1)) continue;
        tkvi_decay_to_now(kv, ids[0], list->len, newest, a);
        slot = tkvi_anchor_place(kv, list, ids, first, last, a);
        if (slot < 0) return;
        if (slot < sinks->n_packed && !(sinks->evicted_mask >> slot & 1)) {
            if (mine[t] <= a[slot]) continue;
            tkvi_remove_anchor(kv, list, ids, slot);
        }
        for (; sinks->n_packed <= slot; sinks->n_packed++) { /* slots between have no token */
            tkvi_set_slot_index(kv, ids[0], sinks->n_packed, sinks->start);
            sinks->evicted_mask |= (uint64_t)1 << sinks->n_packed;
        }
        tkvi_add_anchor(kv, ids, i, t, slot);
    }
}

#endif /* TKVI_RECLAIM_ANCHORS_H */
