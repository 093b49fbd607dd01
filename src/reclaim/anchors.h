/*
 * reclaim/anchors.h - anchors: the tokens of a layer with the highest attention scores stay exact. When the block
 * of such a token is recoded, the token is copied to a block of anchors. H2O (arXiv 2306.14048) selects tokens by
 * attention. The idea to demote the least important tokens rather than the oldest is from akv-cache.
 *
 *     anchors     [A D . .][B C . .]               in front of the list; each slot has an index of its own
 *     recoded     [. . A . . .][. B C . . .][D ..] marked in evicted_mask and anchored_mask; attention reads the copies
 *
 * A token with a higher score replaces the anchor with the lowest one. Attention then reads the replaced token from
 * its recoded slot again. A list gets all its blocks of anchors with its first token, so later nothing can fail.
 */
#ifndef TKVI_RECLAIM_ANCHORS_H
#define TKVI_RECLAIM_ANCHORS_H

#include "reclaim/scores.h"
#include "reclaim/offload.h"

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

/* Finds a live token. Returns the index of its block and sets *slot. An anchored token is found in a block of anchors.
 * -1: the position has no live token. */
static int tkvi_find_token(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int position,
                           int *slot) {
    int i = tkvi_block_at(kv, list, ids, position);
    if (i < 0) return -1;
    *slot = tkvi_place_in(kv, list, ids, i, position);
    if (TKVI_HAS_EVICT && *slot >= 0 && kv->pool.token_meta &&
        kv->pool.token_meta[ids[i]].anchored_mask >> *slot & 1) {
        i = 0;
        while ((*slot = tkvi_place_in(kv, list, ids, i, position)) < 0 && i + 1 < list->anchors) i++;
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

/* A slot of a block of anchors. */
typedef struct tkvi_anchor_slot {
    int block, slot; /* block: index in the list; -1: none */
    int is_free;     /* 1: it has no anchor */
    float score;     /* attention score of its anchor */
} tkvi_anchor_slot;

/* Undoes the anchor in a slot: attention reads its token from the recoded block again. The token takes its attention
 * score back with it. The caller reuses the slot. */
static void tkvi_remove_anchor(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids,
                               const tkvi_anchor_slot *at) {
    const uint32_t id = ids[at->block];
    const int position = tkvi_slot_index(kv, id, at->slot), i = tkvi_block_at(kv, list, ids, position);
    const int t = i >= 0 ? tkvi_place_in(kv, list, ids, i, position) : -1;
    tkvi_token_meta *token_meta;
    if (t < 0) return;
    token_meta = &kv->pool.token_meta[ids[i]];
    if (!(token_meta->anchored_mask >> t & 1)) return;
    token_meta->anchored_mask &= ~((uint64_t)1 << t);
    kv->pool.entry[ids[i]].evicted_mask &= ~((uint64_t)1 << t);
    tkvi_align_steps(kv, id, ids[i]);
    token_meta->scores[t] = kv->pool.token_meta[id].scores[at->slot];
}

/* Makes the token in slot t of block i an anchor: copies it to a slot without one. Block i must still be exact. Its
 * slot t is marked as anchored, and attention does not read it. */
static void tkvi_add_anchor(tkv_cache *kv, const uint32_t *ids, int i, int t, const tkvi_anchor_slot *at) {
    const tkvi_simd_ops *help = kv->kernels->simd_ops;
    const uint32_t id = ids[at->block];
    tkvi_entry *e = &kv->pool.entry[id];
    tkvi_block *to = tkvi_block_of(kv, id), *from = tkvi_block_of(kv, ids[i]);
    const tkvi_layout *a = &kv->tables.layout[to->layout], *b = &kv->tables.layout[from->layout];
    uint8_t *dst = tkvi_block_bytes(&kv->pool, to);
    const uint8_t *src = tkvi_block_bytes(&kv->pool, from);
    float row[TKV_MAX_HEAD_DIM];
    int h;
    for (h = 0; h < a->n_kv_heads; h++) {
        const tkvi_record *r = &a->record[h], *s = &b->record[h];
        tkvi_finite_values(&s->k, help, src + s->at, t, 1, row, 0);
        tkvi_put_token(&r->k, help, row, at->slot, dst + r->at);
        tkvi_finite_values(&s->v, help, src + s->at + s->v_at, t, 1, row, 0);
        tkvi_put_token(&r->v, help, row, at->slot, dst + r->at + r->v_at);
    }
    for (; e->n_packed <= at->slot; e->n_packed++) { /* slots between have no token */
        tkvi_set_slot_index(kv, id, e->n_packed, 0);
        e->evicted_mask |= (uint64_t)1 << e->n_packed;
    }
    tkvi_set_slot_index(kv, id, at->slot, tkvi_slot_index(kv, ids[i], t));
    tkvi_align_steps(kv, id, ids[i]);
    e->evicted_mask &= ~((uint64_t)1 << at->slot);
    kv->pool.token_meta[id].scores[at->slot] = kv->pool.token_meta[ids[i]].scores[t];
    kv->pool.entry[ids[i]].evicted_mask |= (uint64_t)1 << t;
    kv->pool.token_meta[ids[i]].anchored_mask |= (uint64_t)1 << t;
}

/* 1 if the anchor in this slot has no other copy, because the block of its token is discarded. */
static int tkvi_is_only_copy(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, uint32_t id,
                             int slot) {
    const int i = kv->pool.n_discarded ? tkvi_block_at(kv, list, ids, tkvi_slot_index(kv, id, slot)) : -1;
    return i >= 0 && tkvi_has_no_source(kv, tkvi_block_of(kv, ids[i]));
}

/* Finds the slot for a new anchor: a free one, or that of the anchor with the lowest score. newest: result of
 * tkvi_token_score_newest for the list. Cost: reads the scores of all anchors. */
static tkvi_anchor_slot tkvi_find_anchor_slot(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids,
                                              int newest) {
    const int n_anchors = kv->tables.cfg.tiers.n_anchors, capacity = tkvi_anchor_capacity(&kv->tables.cfg);
    tkvi_anchor_slot least = {-1, 0, 0, 0.0f};
    float a[TKVI_BLOCK];
    int i, t;
    for (i = 0; i < list->anchors && !least.is_free; i++) {
        const tkvi_entry *e = &kv->pool.entry[ids[i]];
        const int n = tkvi_min(capacity, n_anchors - i * capacity);
        tkvi_decay_to_now(kv, ids[i], list->len, newest, a);
        for (t = 0; t < n && !least.is_free; t++) {
            const int is_free = t >= e->n_packed || e->evicted_mask >> t & 1;
            if (!is_free &&
                ((least.block >= 0 && a[t] >= least.score) || tkvi_is_only_copy(kv, list, ids, ids[i], t)))
                continue;
            least.block = i;
            least.slot = t;
            least.is_free = is_free;
            least.score = a[t];
        }
    }
    return least;
}

/* Called before block i is recoded. If the block is still exact, its live tokens take free anchor slots and replace
 * anchors with lower scores. Cost: reads the scores of all anchors once for each new anchor. */
static void tkvi_choose_anchors(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_block *b = tkvi_block_of(kv, ids[i]);
    tkvi_anchor_slot at;
    float mine[TKVI_BLOCK];
    uint64_t there;
    int t, newest;
    TKVI_ASSERT(i >= list->sinks); /* sinks are not recoded */
    if (!TKVI_HAS_EVICT || !list->anchors || b->refs > 1 || !tkvi_is_hot_layout(kv, layer, b->layout)) return;
    there = tkvi_live_mask(&kv->pool.entry[ids[i]], tkvi_block_tokens(kv, list, ids, i));
    newest = tkvi_token_score_newest(kv, list, ids);
    tkvi_decay_to_now(kv, ids[i], list->len, newest, mine);
    at = tkvi_find_anchor_slot(kv, list, ids, newest);
    for (t = 0; t < TKVI_BLOCK && at.block >= 0; t++) {
        if (!(there >> t & 1) || (!at.is_free && mine[t] <= at.score)) continue;
        TKVI_ASSERT(tkvi_block_of(kv, ids[at.block])->refs == 1); /* a fork copies these blocks */
        if (!at.is_free) tkvi_remove_anchor(kv, list, ids, &at);
        tkvi_add_anchor(kv, ids, i, t, &at);
        at = tkvi_find_anchor_slot(kv, list, ids, newest);
    }
}

#endif /* TKVI_RECLAIM_ANCHORS_H */
