/*
 * reclaim/offload.h - offloads blocks: writes them from RAM to the caller's store (cfg.offload) and reads single
 * records back. Records of discarded blocks come from the caller's model instead (cfg.recompute). Which blocks are
 * offloaded, and when: reclaim/budget.h, step/promote.h.
 *
 * A block is stored in its format, in pieces. Each KV head's record is one piece, or two (K, V) where it is larger
 * than TKVI_OFFLOAD_SIDE bytes. So attention reads only the bytes that it multiplies with.
 *
 *     key 2 * number: the offloaded block;  key 2 * number + 1: its exact copy (cfg.offload.keep_exact)
 *     head h, at offset record[h].at + 16 h: K, [checksum 8,] V, checksum 8, little-endian
 *
 * The checksum of a piece is the XXH64 of its bytes. Its seed is the XXH64 of the key, the head and side, the start
 * and layout of the block, and a mark. It finds damaged bytes, misplaced bytes, and bytes of an earlier block under
 * the same key. Wrong bytes pass with a probability of 2^-64. This protects against accidents, not against
 * deliberate changes of the store.
 *
 * The mark of a block is a counter of 47 bits and never repeats. The mark of a copy counts the copies under one
 * block number, in 16 bits. After 65,536 copies it repeats. Old bytes then pass if the store silently lost the
 * 65,535 copies in between.
 */
#ifndef TKVI_RECLAIM_OFFLOAD_H
#define TKVI_RECLAIM_OFFLOAD_H

#include "core/checksum.h"
#include "cache/cache.h"

/* >>pieces */
typedef struct tkvi_piece {
    uint32_t key;
    size_t at, bytes; /* offset under the key; size without the checksum */
    size_t from;      /* offset in the block */
    uint64_t seed;    /* of the checksum */
} tkvi_piece;

/* Rows that cfg.recompute gives in one call. */
#define TKVI_ROWS_AT_ONCE 16

/* A fetch buffer holds the piece that was read last. Callers ask for K, then for V: a record of one piece is read
 * only once. */
typedef struct tkvi_fetch_buffer {
    TKVI_ALIGNED uint8_t bytes[TKVI_OFFLOAD_ROOM];
    uint32_t key; /* of the block; TKVI_NIL: the buffer is empty */
    uint32_t id;  /* the entry: of a discarded block, it has only the rows of that entry */
    int head, part;
    int seq, layer; /* of all blocks that are read with it */
} tkvi_fetch_buffer;

static void tkvi_empty_buffer(tkvi_fetch_buffer *buffer, int seq, int layer) {
    buffer->key = buffer->id = TKVI_NIL;
    buffer->seq = seq;
    buffer->layer = layer;
}

/* Number of pieces of a record: 1 or 2. */
static int tkvi_n_pieces(const tkvi_record *r) { return 1 + (r->k.bytes + r->v.bytes > TKVI_OFFLOAD_SIDE); }

/* Describes a piece of a block. part: 0 for K, or for K and V in one piece; 1 for V. */
static tkvi_piece tkvi_describe_piece(const tkv_cache *kv, uint32_t id, tkvi_stored_as what, int layout,
                                      uint64_t mark, int head, int part) {
    const tkvi_record *r = &kv->tables.layout[layout].record[head];
    uint8_t seed_bytes[24];
    tkvi_piece piece;
    piece.key = tkvi_store_key(kv->pool.entry[id].block, what);
    piece.from = r->at + (part ? r->v_at : 0);
    piece.at = piece.from + TKVI_OFFLOAD_CHECKSUM * (2u * (size_t)head + (size_t)part);
    piece.bytes = part ? r->v.bytes : r->k.bytes + (tkvi_n_pieces(r) == 1 ? r->v.bytes : 0);
    tkvi_store32(seed_bytes, piece.key);
    tkvi_store32(seed_bytes + 4, 2u * (uint32_t)head + (uint32_t)part);
    tkvi_store32(seed_bytes + 8, (uint32_t)tkvi_block_of(kv, id)->first_position);
    tkvi_store32(seed_bytes + 12, (uint32_t)layout);
    tkvi_store32(seed_bytes + 16, (uint32_t)mark);
    tkvi_store32(seed_bytes + 20, (uint32_t)(mark >> 32));
    piece.seed = tkvi_xxh64(0, seed_bytes, sizeof seed_bytes);
    return piece;
}

/* >>writing */
/* Writes a block that is in RAM to the store. 0: the store failed, and the key was erased. */
static TKVI_NOINLINE int tkvi_store_block(tkv_cache *kv, uint32_t id, tkvi_stored_as what, uint64_t mark) {
    TKVI_ALIGNED uint8_t buffer[TKVI_OFFLOAD_ROOM];
    const tkv_offload_config *store = &kv->tables.cfg.offload;
    const tkvi_block *b = tkvi_block_of(kv, id);
    const tkvi_layout *layout = &kv->tables.layout[b->layout];
    int head, part;
    for (head = 0; head < layout->n_kv_heads; head++)
        for (part = 0; part < tkvi_n_pieces(&layout->record[head]); part++) {
            const tkvi_piece piece = tkvi_describe_piece(kv, id, what, b->layout, mark, head, part);
            memcpy(buffer, tkvi_block_bytes(&kv->pool, b) + piece.from, piece.bytes);
            tkvi_store64(buffer + piece.bytes, tkvi_xxh64(piece.seed, buffer, piece.bytes));
            if (store->write(store->user, piece.key, piece.at, buffer, piece.bytes + TKVI_OFFLOAD_CHECKSUM) ==
                0)
                continue;
            tkvi_erase_key(&kv->pool, kv->pool.entry[id].block, what);
            kv->counts.unwritten++;
            return 0;
        }
    return 1;
}

/* Called before a block is recoded. With cfg.offload.keep_exact it writes a copy of the exact bytes to the store, if
 * the block has none. If the store fails, there is no copy, but the call goes on. */
static void tkvi_store_exact_copy(tkv_cache *kv, int layer, uint32_t id) {
    tkvi_block *b = tkvi_block_of(kv, id);
    if (!TKVI_HAS_OFFLOAD || !kv->tables.cfg.offload.keep_exact || !kv->tables.cfg.offload.write ||
        b->copy_layout)
        return;
    if (!tkvi_is_hot_layout(kv, layer, b->layout)) return;
    b->copy_mark++;
    if (tkvi_store_block(kv, id, TKVI_COPY, b->copy_mark)) b->copy_layout = (uint16_t)(b->layout + 1);
}

/* 1 if there is a store, and it has not failed in this call. */
static int tkvi_can_store(const tkv_cache *kv) {
    return TKVI_HAS_OFFLOAD && kv->tables.cfg.offload.write && !kv->call.store_failed;
}

/* 1 if blocks that end before position `end` are old enough to be offloaded. At least the hot tokens of the tier spec
 * must follow them, and the last append must not have added to them. If the tier spec keeps all tokens hot,
 * cfg.tiers.hot_tokens counts as it was given. Its special values (0, TKV_OFF, TKV_UNLIMITED) set no age. */
static int tkvi_is_old(const tkv_cache *kv, int seq, int layer, int end, const tkvi_tier_spec *spec) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int hot_tokens = spec->hot != TKVI_FOREVER ? spec->hot : kv->tables.cfg.tiers.hot_tokens;
    if (hot_tokens == TKVI_FOREVER) hot_tokens = TKVI_BLOCK; /* given as 2^30 - 1: the newest 64 stay */
    return end <= tkvi_exact_from(kv, seq, layer) &&
           (kv->seq[seq].in_step ? list->step_len : list->len) - end >= hot_tokens;
}

/* 1 if block i of a list is old enough to leave RAM. Sinks stay there. So do the last two blocks, because attention
 * takes its reference key from them. */
static int tkvi_is_block_old(const tkv_cache *kv, int seq, int layer, int i, const tkvi_tier_spec *spec) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    if (i < list->sinks || i + 2 >= list->n) return 0;
    return tkvi_is_old(kv, seq, layer, tkvi_block_end(kv, list, tkvi_ids(kv, seq, layer), i), spec);
}

/* 1 if block i of a list may be offloaded: it is old enough, and one entry alone holds it. */
static int tkvi_can_offload(const tkv_cache *kv, int seq, int layer, int i, const tkvi_tier_spec *spec) {
    return tkvi_block_of(kv, tkvi_ids(kv, seq, layer)[i])->refs == 1 &&
           tkvi_is_block_old(kv, seq, layer, i, spec);
}

/* Index of the oldest block of a list that may be offloaded; -1: none. Also updates the passed run. */
static int tkvi_find_offloadable(tkv_cache *kv, int seq, int layer) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i = list->sinks + list->passed[TKVI_OFFLOADED_RUN];
    while (i < list->n && tkvi_is_offloaded(tkvi_block_of(kv, ids[i]))) i++;
    list->passed[TKVI_OFFLOADED_RUN] = tkvi_max(0, i - list->sinks);
    for (; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        if (!tkvi_is_offloaded(b) && b->refs == 1) break;
    }
    return i < list->n && tkvi_can_offload(kv, seq, layer, i, &kv->tables.plan[layer].now) ? i : -1;
}

/* Offloads the block that tkvi_find_offloadable finds. 0: there is none, or the store failed and the block stays in
 * RAM. */
static int tkvi_offload_next(tkv_cache *kv, int seq, int layer) {
    const int i = tkvi_find_offloadable(kv, seq, layer);
    uint32_t id, page;
    tkvi_block *b;
    int slot;
    if (i < 0) return 0;
    id = tkvi_ids(kv, seq, layer)[i];
    b = tkvi_block_of(kv, id);
    if (!tkvi_store_block(kv, id, TKVI_ITSELF, ++kv->pool.marks)) {
        kv->call.store_failed = 1;
        return 0;
    }
    page = b->page;
    slot = b->slot;
    b->page = TKVI_OFFLOADED | (uint32_t)(kv->pool.marks >> 16);
    b->slot = (uint16_t)(kv->pool.marks & 0xffffu);
    kv->pool.n_offloaded++;
    kv->counts.offloaded++;
    tkvi_record_move(kv, id, tkvi_list_of(kv, seq, layer)->len);
    tkvi_give_slot(&kv->pool, page, slot);
    tkvi_emit_offloaded(kv, seq, layer, i);
    return 1;
}

/* >>reading */
/* Asks the model for the rows of a discarded block and stores them as a piece of the hot format in `buffer`. Returns 0
 * if the model failed, or a row is not finite (cfg.host.nonfinite). */
static TKVI_NOINLINE int tkvi_compute_piece(const tkv_cache *kv, uint32_t id, const tkvi_record *record,
                                            int head, int part, tkvi_fetch_buffer *buffer) {
    const tkv_config *cfg = &kv->tables.cfg;
    const tkvi_list *list = tkvi_list_of(kv, buffer->seq, buffer->layer);
    const uint32_t *ids = tkvi_ids(kv, buffer->seq, buffer->layer);
    const int n = tkvi_block_tokens(kv, list, ids, tkvi_block_at(kv, list, ids, kv->pool.entry[id].start));
    const int wanted[2] = {!part, (part || tkvi_n_pieces(record) == 1) && !tkvi_is_view(&record->v)};
    float row[2][TKVI_ROWS_AT_ONCE * TKVI_OFFLOAD_DIM];
    int position[TKVI_ROWS_AT_ONCE], first, t, s, c;
    for (first = kv->pool.entry[id].first_slot; first < n; first += TKVI_ROWS_AT_ONCE) {
        const int count = tkvi_min(n - first, TKVI_ROWS_AT_ONCE);
        for (t = 0; t < count; t++) position[t] = tkvi_slot_index(kv, id, first + t);
        if (cfg->recompute.compute(cfg->recompute.user, buffer->seq, buffer->layer, head, position, count,
                                   wanted[0] ? row[0] : NULL, wanted[1] ? row[1] : NULL))
            return 0;
        for (s = 0; s < 2; s++) {
            const tkvi_side *side = s ? &record->v : &record->k;
            const int dim = side->dim;
            uint8_t *dst = buffer->bytes + (s && !part ? record->v_at : 0);
            if (!wanted[s]) continue;
            for (c = 0; cfg->host.nonfinite == TKV_NONFINITE_SATURATE && c < count * dim; c++)
                row[s][c] = tkvi_saturate(row[s][c]);
            if (!tkvi_is_all_finite(row[s], count * dim)) return 0;
            for (t = 0; t < count; t++)
                tkvi_put_token(side, kv->kernels->simd_ops, row[s] + t * dim, first + t, dst);
        }
    }
    return 1;
}

/* Where attached bytes have the record of a block, or of its exact copy. */
static const uint8_t *tkvi_attached_bytes(const tkvi_pool *pool, const tkvi_source_place *source) {
    return pool->attached[source->file - 1].bytes + (size_t)source->unit * 64;
}

/* 1 if a reader has verified attached bytes. Compilers without __atomic builtins do not remember it. */
static int tkvi_is_verified(const tkvi_source_place *source) {
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_load_n(&source->is_verified, __ATOMIC_RELAXED);
#else
    (void)source;
    return 0;
#endif
}

/* The record of a block in attached bytes that a reader has verified. NULL: it lies elsewhere, or was not verified. */
static const uint8_t *tkvi_find_verified(const tkvi_pool *pool, uint32_t number) {
    return tkvi_is_attached(pool, number, TKVI_ITSELF) && tkvi_is_verified(&pool->source[number])
               ? tkvi_attached_bytes(pool, &pool->source[number])
               : NULL;
}

/* Finds the record of a block, or of its exact copy, in attached bytes. The first reader compares its checksum, which
 * follows it. Returns NULL if it is damaged. */
static const uint8_t *tkvi_read_attached(const tkvi_pool *pool, uint32_t number, const tkvi_layout *c) {
    tkvi_source_place *source = &pool->source[number];
    const uint8_t *record = tkvi_attached_bytes(pool, source);
    const size_t n = c->bytes.total;
    if (tkvi_is_verified(source)) return record;
    if (tkvi_xxh64(0, record, n) + (uint64_t)source->unit * 64 != tkvi_load64(record + n)) return NULL;
#if defined(__GNUC__) || defined(__clang__)
    __atomic_store_n(&source->is_verified, 1, __ATOMIC_RELAXED);
#endif
    return record;
}

/* tkvi_read_piece of a block whose bytes are attached. */
static tkv_status tkvi_get_attached_side(const tkvi_pool *pool, uint32_t number, const tkvi_layout *c,
                                         int head, tkv_side side, const uint8_t **bytes) {
    const uint8_t *record = tkvi_read_attached(pool, number, c);
    if (!record) return TKV_ERR_DATA;
    *bytes = record + c->record[head].at + (side == TKV_V ? c->record[head].v_at : 0);
    return TKV_OK;
}

/* Reads one side of a head's record of a block outside RAM, or of its exact copy, into `buffer`. *bytes points to it,
 * or to attached bytes, until the next call with this buffer. Errors: TKV_ERR_NO_SOURCE (discarded, and no model gave
 * its rows), TKV_ERR_IO (the store failed), TKV_ERR_DATA (wrong checksum). */
static TKVI_NOINLINE tkv_status tkvi_read_piece(const tkv_cache *kv, uint32_t id, tkvi_stored_as what,
                                                int head, tkv_side side, tkvi_fetch_buffer *buffer,
                                                const uint8_t **bytes) {
    const tkv_offload_config *store = &kv->tables.cfg.offload;
    const tkvi_block *b = tkvi_block_of(kv, id);
    const int layout = what == TKVI_COPY ? b->copy_layout - 1 : b->layout;
    const tkvi_record *record = &kv->tables.layout[layout].record[head];
    const int part = side == TKV_V && tkvi_n_pieces(record) == 2;
    const int is_computed = what == TKVI_ITSELF && tkvi_is_discarded(b);
    tkvi_piece piece;
    if (tkvi_is_attached(&kv->pool, kv->pool.entry[id].block, what))
        return tkvi_get_attached_side(&kv->pool, kv->pool.entry[id].block, &kv->tables.layout[layout], head,
                                      side, bytes);
    if (is_computed && tkvi_has_no_source(kv, b)) return TKV_ERR_NO_SOURCE;
    piece = tkvi_describe_piece(kv, id, what, layout, tkvi_mark_of(b, what), head, part);
    *bytes = buffer->bytes + (side == TKV_V && !part ? record->v_at : 0);
    if (buffer->key == piece.key && buffer->head == head && buffer->part == part &&
        (!is_computed || buffer->id == id))
        return TKV_OK;
    buffer->key = TKVI_NIL;
    if (is_computed) {
        memset(buffer->bytes, 0, piece.bytes); /* values before the entry's tokens: their weights are 0 */
        if (!tkvi_compute_piece(kv, id, record, head, part, buffer)) return TKV_ERR_NO_SOURCE;
    } else {
        if (store->read(store->user, piece.key, piece.at, buffer->bytes, piece.bytes + TKVI_OFFLOAD_CHECKSUM))
            return TKV_ERR_IO;
        if (tkvi_load64(buffer->bytes + piece.bytes) != tkvi_xxh64(piece.seed, buffer->bytes, piece.bytes))
            return TKV_ERR_DATA;
    }
    buffer->key = piece.key;
    buffer->id = id;
    buffer->head = head;
    buffer->part = part;
    return TKV_OK;
}

/* Gets one side of a head's record: in its slot, or read into `buffer` if the block is offloaded. *bytes is valid
 * until the next call with this buffer. Errors: those of tkvi_read_piece. */
static tkv_status tkvi_get_side_bytes(const tkv_cache *kv, uint32_t id, int head, tkv_side side,
                                      tkvi_fetch_buffer *buffer, const uint8_t **bytes) {
    const tkvi_block *b = tkvi_block_of(kv, id);
    const tkvi_record *record = &kv->tables.layout[b->layout].record[head];
    if (tkvi_is_offloaded(b)) return tkvi_read_piece(kv, id, TKVI_ITSELF, head, side, buffer, bytes);
    *bytes = tkvi_block_bytes(&kv->pool, b) + record->at + (side == TKV_K ? 0 : record->v_at);
    return TKV_OK;
}

/* Prefetch: announces to the store that a head's record of this offloaded block will be read soon. */
static void tkvi_prefetch_record(const tkv_cache *kv, uint32_t id, int head) {
    const tkv_offload_config *store = &kv->tables.cfg.offload;
    const tkvi_block *b = tkvi_block_of(kv, id);
    if (store->prefetch && !tkvi_is_attached(&kv->pool, kv->pool.entry[id].block, TKVI_ITSELF)) {
        const tkvi_record *record = &kv->tables.layout[b->layout].record[head];
        store->prefetch(store->user, tkvi_store_key(kv->pool.entry[id].block, TKVI_ITSELF),
                        record->at + TKVI_OFFLOAD_CHECKSUM * 2u * (size_t)head,
                        record->v_at + record->v.bytes + 2u * TKVI_OFFLOAD_CHECKSUM);
    }
}

#endif /* TKVI_RECLAIM_OFFLOAD_H */
