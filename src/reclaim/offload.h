/*
 * reclaim/offload.h - blocks outside RAM: how they go to the caller's store and how single records come back.
 *
 * A block goes out as it is coded, in pieces, one for each KV head's record (two where K and V are too large for
 * one), so that attention fetches what it multiplies with and nothing else. Behind each piece stands the XXH64 of its
 * bytes. The seed is the XXH64 of the key, the head, the start and the coding of the block, and a mark. So bytes that
 * are damaged, misplaced or of an earlier block of that number are found out: a change passes with a chance of 2^-64.
 * This protects against accidents, not against someone who writes to the store on purpose. Marks of blocks are 47
 * bits and never come again; those of copies count the copies of a block's number, so one comes again when a store
 * has lost the 65,535 between without a word.
 *
 *     key 2 * number: the block itself, while it has no slot;  2 * number + 1: its exact copy (cfg.spill.keep_exact)
 *     head h: at record[h].at + 16 h: K, [checksum 8,] V, checksum 8, little-endian
 *
 * Which blocks go and when: reclaim/budget.h, step/promote.h. May call cache and below.
 */
#ifndef TKVI_RECLAIM_OFFLOAD_H
#define TKVI_RECLAIM_OFFLOAD_H

#include "core/checksum.h"
#include "cache/cache.h"

/* >>pieces */
typedef struct tkvi_piece {
    uint32_t key;
    size_t at, bytes; /* in what is stored, without the checksum */
    size_t from;      /* in the block */
    uint64_t seed;
} tkvi_piece;

/* Where a piece that was fetched stands, and which one it is: K and V are asked for one after the other. */
typedef struct tkvi_fetch_buffer {
    TKVI_ALIGNED uint8_t bytes[TKVI_OFFLOAD_ROOM];
    uint32_t key; /* TKVI_NIL: none */
    int head, part;
} tkvi_fetch_buffer;

/* Pieces of a record: 1 or 2. */
static int tkvi_pieces(const tkvi_record *r) { return 1 + (r->k.bytes + r->v.bytes > TKVI_OFFLOAD_SIDE); }

static tkvi_piece tkvi_piece_of(const tkv_cache *kv, uint32_t id, tkvi_stored_as what, int coding,
                                uint64_t mark, int head, int part) {
    const tkvi_record *r = &kv->tables.coding[coding].record[head];
    uint8_t text[24];
    tkvi_piece p;
    p.key = tkvi_store_key(id, what);
    p.from = r->at + (part ? r->v_at : 0);
    p.at = p.from + TKVI_OFFLOAD_CHECKSUM * (2u * (size_t)head + (size_t)part);
    p.bytes = part ? r->v.bytes : r->k.bytes + (tkvi_pieces(r) == 1 ? r->v.bytes : 0);
    tkvi_store32(text, p.key);
    tkvi_store32(text + 4, 2u * (uint32_t)head + (uint32_t)part);
    tkvi_store32(text + 8, (uint32_t)kv->pool.block[id].start);
    tkvi_store32(text + 12, (uint32_t)coding);
    tkvi_store32(text + 16, (uint32_t)mark);
    tkvi_store32(text + 20, (uint32_t)(mark >> 32));
    p.seed = tkvi_xxh64(0, text, sizeof text);
    return p;
}

/* >>out */
/* What is in RAM of a block goes to the store. 0: that failed, and the store has nothing of it. */
static TKVI_NOINLINE int tkvi_store_block(tkv_cache *kv, uint32_t id, tkvi_stored_as what, uint64_t mark) {
    TKVI_ALIGNED uint8_t room[TKVI_OFFLOAD_ROOM];
    const tkv_spill_config *s = &kv->tables.cfg.spill;
    const tkvi_block *b = &kv->pool.block[id];
    const tkvi_coding *c = &kv->tables.coding[b->coding];
    int head, part;
    for (head = 0; head < kv->tables.cfg.n_kv_heads; head++)
        for (part = 0; part < tkvi_pieces(&c->record[head]); part++) {
            const tkvi_piece p = tkvi_piece_of(kv, id, what, b->coding, mark, head, part);
            memcpy(room, tkvi_block_bytes(&kv->pool, b) + p.from, p.bytes);
            tkvi_store64(room + p.bytes, tkvi_xxh64(p.seed, room, p.bytes));
            if (s->store(s->user, p.key, p.at, room, p.bytes + TKVI_OFFLOAD_CHECKSUM) == 0) continue;
            tkvi_erase_key(&kv->pool, id, what);
            kv->unstored++;
            return 0;
        }
    return 1;
}

/* A block that leaves the hot tier for the first time: its exact bytes are kept, if somebody wants them. Where
 * the store fails there is no copy, and that is all. */
static void tkvi_keep_copy(tkv_cache *kv, int layer, uint32_t id) {
    tkvi_block *b = &kv->pool.block[id];
    if (!kv->tables.cfg.spill.keep_exact || !kv->tables.cfg.spill.store || b->copy || b->refs > 1) return;
    if (!tkvi_is_hot_coding(kv, layer, b->coding)) return;
    b->copy_mark++;
    if (tkvi_store_block(kv, id, TKVI_COPY, b->copy_mark)) b->copy = (uint16_t)(b->coding + 1);
}

/* Is there a place outside, as far as is known? */
static int tkvi_can_store(const tkv_cache *kv) { return kv->tables.cfg.spill.store && !kv->store_failed; }

/* Is what ends here as old as what leaves the hot tier by rule r, and not of the last append? */
static int tkvi_is_old(const tkv_cache *kv, int seq, int layer, int end, const tkvi_tier_spec *r) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int hot = r->hot != TKVI_FOREVER ? r->hot : kv->tables.cfg.hot_tokens;
    if (hot == TKVI_FOREVER) hot = TKVI_BLOCK; /* all is hot: then what is not the newest */
    return end <= list->chunk && (kv->seq[seq].in_step ? list->step_len : list->len) - end >= hot;
}

/* May block i of a list go out by rule r? Of one holder, and old; no sinks, and not the last two, from which attention
 * takes what keys have in common. */
static int tkvi_can_offload(const tkv_cache *kv, int seq, int layer, int i, const tkvi_tier_spec *r) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    if (i < list->sinks || i + 2 >= list->n || kv->pool.block[ids[i]].refs > 1) return 0;
    return tkvi_is_old(kv, seq, layer, tkvi_block_end(kv, list, ids, i), r);
}

/* The oldest block of a list that may go out next; -1: there is none. */
static int tkvi_next_out(tkv_cache *kv, int seq, int layer) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i = list->sinks + list->out;
    while (i < list->n && tkvi_is_offloaded(&kv->pool.block[ids[i]])) i++;
    list->out = tkvi_max(0, i - list->sinks);
    while (i < list->n && (tkvi_is_offloaded(&kv->pool.block[ids[i]]) || kv->pool.block[ids[i]].refs > 1))
        i++;
    return i < list->n && tkvi_can_offload(kv, seq, layer, i, &kv->tables.plan[layer].now) ? i : -1;
}

/* It goes. 0: there is none, or the store failed and it stays. */
static int tkvi_offload_next(tkv_cache *kv, int seq, int layer) {
    const int i = tkvi_next_out(kv, seq, layer);
    uint32_t id, page;
    tkvi_block *b;
    int slot;
    if (i < 0) return 0;
    id = tkvi_ids(kv, seq, layer)[i];
    b = &kv->pool.block[id];
    if (!tkvi_store_block(kv, id, TKVI_ITSELF, ++kv->pool.marks)) {
        kv->store_failed = 1;
        return 0;
    }
    page = b->page;
    slot = b->slot;
    b->page = TKVI_OUTSIDE | (uint32_t)(kv->pool.marks >> 16);
    b->slot = (uint16_t)(kv->pool.marks & 0xffffu);
    kv->pool.n_offloaded++;
    kv->spilled++;
    tkvi_note_move(kv, id, tkvi_list_of(kv, seq, layer)->len);
    tkvi_give_slot(&kv->pool, page, slot);
    tkvi_emit_offloaded(kv, seq, layer, i);
    return 1;
}

/* >>back */
/* A side of a head's record of a block that is outside, in `room`. */
static TKVI_NOINLINE tkv_status tkvi_fetch(const tkv_cache *kv, uint32_t id, tkvi_stored_as what, int head,
                                           tkv_side side, tkvi_fetch_buffer *room, const uint8_t **bytes) {
    const tkv_spill_config *s = &kv->tables.cfg.spill;
    const tkvi_block *b = &kv->pool.block[id];
    const int coding = what == TKVI_COPY ? b->copy - 1 : b->coding;
    const tkvi_record *r = &kv->tables.coding[coding].record[head];
    const int part = side == TKV_V && tkvi_pieces(r) == 2;
    const tkvi_piece p = tkvi_piece_of(kv, id, what, coding, tkvi_mark_of(b, what), head, part);
    if (what == TKVI_ITSELF && tkvi_is_discarded(b)) return TKV_ERR_NO_SOURCE;
    *bytes = room->bytes + (side == TKV_V && !part ? r->v_at : 0);
    if (room->key == p.key && room->head == head && room->part == part) return TKV_OK;
    room->key = TKVI_NIL;
    if (s->fetch(s->user, p.key, p.at, room->bytes, p.bytes + TKVI_OFFLOAD_CHECKSUM)) return TKV_ERR_IO;
    if (tkvi_load64(room->bytes + p.bytes) != tkvi_xxh64(p.seed, room->bytes, p.bytes)) return TKV_ERR_DATA;
    room->key = p.key;
    room->head = head;
    room->part = part;
    return TKV_OK;
}

/* One side of a head's record, where it is or, from outside, in `room`: valid until another is asked for. */
static tkv_status tkvi_side_bytes(const tkv_cache *kv, uint32_t id, int head, tkv_side side,
                                  tkvi_fetch_buffer *room, const uint8_t **bytes) {
    const tkvi_block *b = &kv->pool.block[id];
    const tkvi_record *r = &kv->tables.coding[b->coding].record[head];
    if (tkvi_is_offloaded(b)) return tkvi_fetch(kv, id, TKVI_ITSELF, head, side, room, bytes);
    *bytes = tkvi_block_bytes(&kv->pool, b) + r->at + (side == TKV_K ? 0 : r->v_at);
    return TKV_OK;
}

/* A record of it will be asked for soon. */
static void tkvi_fetch_ahead(const tkv_cache *kv, uint32_t id, int head) {
    const tkv_spill_config *s = &kv->tables.cfg.spill;
    const tkvi_block *b = &kv->pool.block[id];
    if (s->ahead) {
        const tkvi_record *r = &kv->tables.coding[b->coding].record[head];
        s->ahead(s->user, tkvi_store_key(id, TKVI_ITSELF), r->at + TKVI_OFFLOAD_CHECKSUM * 2u * (size_t)head,
                 r->v_at + r->v.bytes + 2u * TKVI_OFFLOAD_CHECKSUM);
    }
}

#endif /* TKVI_RECLAIM_OFFLOAD_H */
