/*
 * step/promote.h - offloads blocks on request (tkv_offload) and brings single blocks back into RAM (tkv_promote).
 *
 * An offloaded block comes back in the format that it had. If an exact copy was kept (reclaim/offload.h), the block
 * comes back exact. A coded block in RAM without a copy stays as it is: decoding it would restore nothing.
 */
#ifndef TKVI_STEP_PROMOTE_H
#define TKVI_STEP_PROMOTE_H

#include "cache/lookup.h"
#include "reclaim/budget.h"

TKV_API tkv_status tkv_offload(tkv_cache *kv, int seq, int layer, int n_blocks, int *done) {
    int l, i, n = 0;
    if (done) *done = 0;
    if (!TKVI_HAS_OFFLOAD) return tkvi_refuse_left_out(kv, "TKV_NO_OFFLOAD leaves this out");
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (!kv->tables.cfg.offload.write)
        return tkvi_fail(kv, TKV_ERR_ARG, "the cache was created without cfg.offload", 0, NULL);
    if (n_blocks < 0) return tkvi_fail(kv, TKV_ERR_ARG, "n_blocks is", n_blocks, "; it must not be negative");
    if (layer != TKV_ALL_LAYERS && !tkvi_has_own_layer(kv, seq, layer)) return tkvi_refuse_layer(kv, layer);
    kv->call.store_failed = 0;
    for (l = 0; l < kv->tables.cfg.model.n_layers; l++) {
        if (layer != TKV_ALL_LAYERS && l != layer) continue;
        for (i = 0; i < n_blocks && tkvi_offload_next(kv, seq, l); i++) n++;
        if (kv->call.store_failed) break;
    }
    tkvi_trim(&kv->pool);
    if (done) *done = n;
    if (kv->call.store_failed)
        return tkvi_fail(kv, TKV_ERR_IO, "cfg.offload.write failed; the number of blocks offloaded is", n,
                         "");
    return tkvi_ok(kv);
}

/* Gets memory for one more block of this layout. It recodes, offloads and evicts nothing for that: a full budget
 * gives TKV_ERR_BUDGET. */
static tkv_status tkvi_promote_ready(tkv_cache *kv, int layout) {
    tkvi_request request = tkvi_no_request();
    request.fixed.slots[kv->tables.layout[layout].size_class] = 1; /* the block has its entry already */
    if (tkvi_has_budget(kv) && tkvi_bytes_for(kv, &request) > kv->tables.cfg.budget.bytes)
        return tkvi_fail(kv, TKV_ERR_BUDGET, "the budget has no room for a block in a better format", 0,
                         NULL);
    if (tkvi_provide_request(kv, &request)) return TKV_OK;
    return tkvi_refuse_no_memory(kv, "no memory for a block in a better format", 0, NULL);
}

/* Fetches all pieces of an offloaded block, or of its exact copy, into `to`, a slot of layout `layout`. */
static TKVI_NOINLINE tkv_status tkvi_fetch_block(const tkv_cache *kv, uint32_t id, tkvi_stored_as what,
                                                 int layout, uint8_t *to) {
    const tkvi_layout *c = &kv->tables.layout[layout];
    tkvi_fetch_buffer room;
    int i;
    tkvi_empty_buffer(&room, TKV_NO_SEQ, TKV_ALL_LAYERS); /* stored blocks need neither */
    memset(to, 0, c->bytes.total);
    for (i = 0; i < 2 * c->n_kv_heads; i++) {
        const tkvi_record *r = &c->record[i / 2];
        const uint8_t *bytes;
        const tkv_status st = tkvi_read_piece(kv, id, what, i / 2, (tkv_side)(i % 2), &room, &bytes);
        if (st) return st;
        memcpy(to + r->at + (i % 2 ? r->v_at : 0), bytes, i % 2 ? r->v.bytes : r->k.bytes);
    }
    return TKV_OK;
}

/* Which stored bytes would improve the block: TKVI_COPY (its exact copy) or TKVI_ITSELF (the offloaded block).
 * -1: none, or other lists hold the block too. */
static int tkvi_better_source(const tkvi_block *b) {
    if (!TKVI_HAS_OFFLOAD || b->refs > 1) return -1;
    if (b->copy_layout && (b->copy_layout - 1 != b->layout || tkvi_is_discarded(b))) return TKVI_COPY;
    return tkvi_is_offloaded(b) && !tkvi_is_discarded(b) ? TKVI_ITSELF : -1;
}

/* 1 if the attached bytes of a block that comes into RAM serve as its exact copy from then on. */
static int tkvi_keeps_source(const tkv_cache *kv, int layer, uint32_t number) {
    return tkvi_is_attached(&kv->pool, number, TKVI_ITSELF) &&
           tkvi_is_hot_layout(kv, layer, kv->pool.block[number].layout);
}

/* Brings block i back into RAM or to its exact format. position: one of its positions, for error messages. */
static tkv_status tkvi_promote_block(tkv_cache *kv, int seq, int layer, int i, int position) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t id = tkvi_ids(kv, seq, layer)[i];
    const uint32_t number = kv->pool.entry[id].block;
    tkvi_block *b = &kv->pool.block[number];
    const int what = tkvi_better_source(b);
    tkv_status st;
    uint32_t page, old_page;
    int layout, slot, old_slot;
    if (!TKVI_HAS_OFFLOAD || what < 0)
        return tkvi_fail(kv, TKV_ERR_NO_SOURCE, "no better source is kept of the block at position", position,
                         " (cfg.offload.keep_exact keeps it)");
    layout = what == TKVI_COPY ? b->copy_layout - 1 : b->layout;
    st = tkvi_promote_ready(kv, layout);
    if (st) return st;
    tkvi_take_slot(&kv->pool, kv->tables.layout[layout].size_class, number, &page, &slot);
    st = tkvi_fetch_block(kv, id, (tkvi_stored_as)what, layout, tkvi_slot_bytes(&kv->pool, page, slot));
    if (st) {
        tkvi_give_slot(&kv->pool, page, slot);
        tkvi_trim(&kv->pool);
        return tkvi_fail(kv, st,
                         st == TKV_ERR_IO
                             ? "cfg.offload.read failed for the block at position"
                             : "cfg.offload.read or attached bytes are damaged, in the block at position",
                         position, "; it stays as it is");
    }
    old_page = b->page;
    old_slot = b->slot;
    if (what == TKVI_ITSELF && tkvi_keeps_source(kv, layer, number)) {
        kv->pool.source[number].what = TKVI_COPY;
        kv->pool.n_offloaded--;
        b->copy_layout = (uint16_t)(layout + 1);
    } else if (tkvi_is_offloaded(b)) {
        tkvi_forget_offloaded(&kv->pool, number);
    }
    b->page = page;
    b->slot = (uint16_t)slot;
    b->layout = (uint16_t)layout;
    if (what == TKVI_COPY) b->previous_layout = 0;
    if (!(old_page & TKVI_OFFLOADED)) tkvi_give_slot(&kv->pool, old_page, old_slot);
    tkvi_search_again(list, i);
    tkvi_record_move(kv, id, list->len);
    kv->counts.promoted++;
    tkvi_trim(&kv->pool);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_promote(tkv_cache *kv, int seq, int layer, int position) {
    const tkvi_list *list;
    int i, place;
    if (!TKVI_HAS_OFFLOAD) return tkvi_refuse_left_out(kv, "TKV_NO_OFFLOAD leaves this out");
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (!tkvi_has_own_layer(kv, seq, layer)) return tkvi_refuse_layer(kv, layer);
    list = tkvi_list_of(kv, seq, layer);
    if (position < 0 || position >= list->len)
        return tkvi_fail(kv, TKV_ERR_RANGE, "no token is held with index", position, "");
    i = tkvi_block_at(kv, list, tkvi_ids(kv, seq, layer), position);
    place = i < 0 ? -1 : tkvi_place_in(kv, list, tkvi_ids(kv, seq, layer), i, position);
    if (place < 0 || !(tkvi_used_mask(kv, list, tkvi_ids(kv, seq, layer), i) >> place & 1))
        return tkvi_fail(kv, TKV_ERR_RANGE, "evicted or expired: the token with index", position, "");
    return tkvi_promote_block(kv, seq, layer, i, position);
}

#endif /* TKVI_STEP_PROMOTE_H */
