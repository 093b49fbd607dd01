/*
 * reclaim/anchors.h - the tokens of a layer that got most attention stay exact: they join the sinks' block when their
 * own is compressed. Selection by attention: H2O (arXiv 2306.14048); to demote what matters least rather than what is
 * oldest: akv-cache. May call mass, spill and below.
 *
 *     sinks' block  [s s s s | a b . .]      room for n_anchors, each with a position of its own
 *     coded         [. . A . . .][. B . .]   A, B: their bits are `gone` and `anchored`, attention reads a and b
 *
 * A newcomer that matters more takes the place of the anchor that matters least; that one's coded place is read
 * again.
 */
#ifndef TKVI_RECLAIM_ANCHORS_H
#define TKVI_RECLAIM_ANCHORS_H

#include "reclaim/scores.h"
#include "reclaim/offload.h"

/* Tokens whose places in block i are not free: those that are there, and those that are anchored. */
static uint64_t tkvi_kept(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return tkvi_live_mask(&kv->pool.block[ids[i]], tkvi_block_tokens(kv, list, ids, i)) |
           (kv->pool.token_meta ? kv->pool.token_meta[ids[i]].anchored : 0);
}

/* The block that covers a position; -1: none does. */
static int tkvi_block_at(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int position) {
    int low = 0, high = list->n;
    if (position >= list->len) return -1;
    while (low < high) { /* the first that begins behind it */
        const int mid = low + (high - low) / 2;
        if (tkvi_block_start(kv, ids, mid) > position) high = mid;
        else low = mid + 1;
    }
    return low - 1;
}

/* The place of a position in block i; -1: it has none. In a packed block, of those that are there or anchored. */
static int tkvi_place_in(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                         int position) {
    const int n = tkvi_block_tokens(kv, list, ids, i);
    const uint64_t kept = tkvi_kept(kv, list, ids, i);
    int t = 0;
    if (!kv->pool.block[ids[i]].packed) t = position - tkvi_block_start(kv, ids, i);
    else
        while (t < n && !(kept >> t & 1 && tkvi_at(kv, ids[i], t) == position)) t++;
    return t < n ? t : -1;
}

/* Where a token is: the block, and the place in it. -1: it is gone. */
static int tkvi_find(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int position,
                     int *slot) {
    int i = tkvi_block_at(kv, list, ids, position);
    if (i < 0) return -1;
    *slot = tkvi_place_in(kv, list, ids, i, position);
    if (*slot >= 0 && kv->pool.token_meta && kv->pool.token_meta[ids[i]].anchored >> *slot & 1) {
        i = 0;
        *slot = tkvi_place_in(kv, list, ids, 0, position);
    }
    return *slot >= 0 && !(kv->pool.block[ids[i]].gone >> *slot & 1) ? i : -1;
}

/* Block i lists its positions, so that those behind it may go. */
static void tkvi_list_positions(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    tkvi_block *b = &kv->pool.block[ids[i]];
    const int n = tkvi_block_tokens(kv, list, ids, i);
    int t;
    for (t = 0; t < n && !b->packed; t++) tkvi_set_at(kv, ids[i], t, b->start + t);
    b->packed = (int16_t)n;
}

/* The token at this position is read from its coded place again. */
static void tkvi_anchor_leaves(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int slot) {
    const int position = tkvi_at(kv, ids[0], slot), i = tkvi_block_at(kv, list, ids, position);
    const int t = i > 0 ? tkvi_place_in(kv, list, ids, i, position) : -1;
    tkvi_token_meta *token_meta;
    if (t < 0) return;
    token_meta = &kv->pool.token_meta[ids[i]];
    if (!(token_meta->anchored >> t & 1)) return;
    token_meta->anchored &= ~((uint64_t)1 << t);
    kv->pool.block[ids[i]].gone &= ~((uint64_t)1 << t);
    tkvi_align_steps(kv, ids[0], ids[i]);
    token_meta->mass[t] = kv->pool.token_meta[ids[0]].mass[slot];
}

/* The token at place t of block i, which is exact, joins the sinks at a place. */
static void tkvi_anchor_joins(tkv_cache *kv, const uint32_t *ids, int i, int t, int slot) {
    const tkv_config *cfg = &kv->tables.cfg;
    const tkvi_simd_ops *help = kv->kernels->helpers;
    tkvi_block *to = &kv->pool.block[ids[0]], *from = &kv->pool.block[ids[i]];
    const tkvi_coding *a = &kv->tables.coding[to->coding], *b = &kv->tables.coding[from->coding];
    uint8_t *dst = tkvi_block_bytes(&kv->pool, to);
    const uint8_t *src = tkvi_block_bytes(&kv->pool, from);
    float row[TKV_MAX_HEAD_DIM];
    int h;
    for (h = 0; h < cfg->n_kv_heads; h++) {
        const tkvi_record *r = &a->record[h], *s = &b->record[h];
        tkvi_values(&s->k, help, src + s->at, t, 1, row, 0);
        r->k.format->side[r->k.which].put(&r->k, help, row, slot, dst + r->at);
        tkvi_values(&s->v, help, src + s->at + s->v_at, t, 1, row, 0);
        r->v.format->side[r->v.which].put(&r->v, help, row, slot, dst + r->at + r->v_at);
    }
    tkvi_set_at(kv, ids[0], slot, tkvi_at(kv, ids[i], t));
    to->gone &= ~((uint64_t)1 << slot);
    kv->pool.token_meta[ids[0]].mass[slot] = kv->pool.token_meta[ids[i]].mass[t];
    from->gone |= (uint64_t)1 << t;
    kv->pool.token_meta[ids[i]].anchored |= (uint64_t)1 << t;
}

/* The place for an anchor: one that is free, or that of the one that matters least. a: what they all got. */
static int tkvi_anchor_place(const tkvi_block *sinks, int first, int last, const float *a) {
    int t, least = first;
    for (t = first; t < last; t++) {
        if (t >= sinks->packed || sinks->gone >> t & 1) return t;
        if (a[t] < a[least]) least = t;
    }
    return least;
}

/* Block i is exact for the last time. */
static void tkvi_choose_anchors(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_plan *p = &kv->tables.plan[layer];
    const int first = p->sink, last = p->sink + kv->tables.cfg.n_anchors;
    tkvi_block *sinks = &kv->pool.block[ids[0]], *b = &kv->pool.block[ids[i]];
    float a[TKVI_BLOCK], mine[TKVI_BLOCK];
    uint64_t there;
    int t, newest;
    if (first == last || i < list->sinks || list->sinks == 0 || sinks->refs > 1 || b->refs > 1) return;
    if (!tkvi_is_hot_coding(kv, layer, b->coding)) return;
    there = tkvi_live_mask(b, tkvi_block_tokens(kv, list, ids, i));
    tkvi_list_positions(kv, list, ids, 0);
    newest = tkvi_token_score_newest(kv, list, ids);
    tkvi_align_steps(kv, ids[0], ids[i]);
    tkvi_decay_to_now(kv, ids[i], list->len, newest, mine);
    for (t = 0; t < TKVI_BLOCK; t++) {
        int slot;
        if (!(there >> t & 1)) continue;
        tkvi_decay_to_now(kv, ids[0], list->len, newest, a);
        slot = tkvi_anchor_place(sinks, first, last, a);
        if (slot < sinks->packed && !(sinks->gone >> slot & 1)) {
            if (mine[t] <= a[slot]) continue;
            tkvi_anchor_leaves(kv, list, ids, slot);
        }
        sinks->packed = (int16_t)tkvi_max(sinks->packed, slot + 1);
        tkvi_anchor_joins(kv, ids, i, t, slot);
    }
}

#endif /* TKVI_RECLAIM_ANCHORS_H */
