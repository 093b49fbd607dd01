/*
 * persist/save.h - tkv_seq_save, tkv_seq_save_to: write a sequence or a whole cache, or what changed since a former
 * save (persist/saved.h).
 *
 * Each section has a function that emits its bytes. It runs twice. At first its bytes are counted. Behind a former save
 * they are hashed too, and a section that the former one has is not written again. Then they are written and hashed.
 */
#ifndef TKVI_PERSIST_SAVE_H
#define TKVI_PERSIST_SAVE_H

#include "persist/saved.h"
#include "persist/scratch.h"
#include "persist/whole.h"
#include "step/promote.h"
#include "step/sequence.h"

typedef enum tkvi_emit_mode { TKVI_COUNTS, TKVI_HASHES, TKVI_WRITES } tkvi_emit_mode;

typedef struct tkvi_saver {
    tkv_cache *kv;
    const tkv_save_params *p;
    tkvi_emit_mode mode;
    int kind;     /* of the section */
    size_t n;     /* bytes of the section so far */
    size_t at;    /* where the next byte comes in the file */
    size_t end;   /* of this save */
    size_t whole; /* bytes of a save without former ones */
    uint8_t *buf; /* of the byte at `start`; NULL: `write` takes the bytes */
    size_t start; /* where this save begins in the file */
    tkv_write_bytes write;
    void *user;
    tkvi_saved_file former; /* bytes NULL: this save is whole */
    uint8_t *room;          /* for a saved table, or for a block */
    uint8_t *index;         /* the index to come; NULL: sizes are counted only */
    uint8_t *record_at; /* [blocks of all layers] u64 where their records are; NULL: one behind the other */
    uint32_t n_sections;
    tkvi_xxh64_sum sum; /* of the section, unless it is of records */
    tkv_save_info info;
    tkv_status st;
    int is_cache;           /* 1: all sequences are saved, and the state of the cache */
    int has_shifts;         /* 1: lists tell the next position, as the tokens that are there do not */
    tkvi_save_place *place; /* [block_cap] of a whole cache: by entry */
    /* the list of the section */
    int seq, layer;
    tkvi_list list;
    uint32_t *ids;
    size_t first_block;  /* of the layer, among those of all layers */
    size_t records_from; /* where its first record is */
} tkvi_saver;

static void tkvi_emit(tkvi_saver *s, const void *bytes, size_t n) {
    s->n += n;
    if (s->mode != TKVI_COUNTS) tkvi_xxh64_add(&s->sum, (const uint8_t *)bytes, n);
    if (s->mode != TKVI_WRITES || s->st || !n) return;
    if (s->buf) memcpy(s->buf + (s->at - s->start), bytes, n);
    else if (s->write(s->user, bytes, n))
        s->st = tkvi_fail(s->kv, TKV_ERR_IO, "the write callback failed", 0, NULL);
    s->at += n;
}

static void tkvi_emit_zeros(tkvi_saver *s, size_t n) {
    static const uint8_t zeros[64] = {0};
    TKVI_ASSERT(n <= sizeof zeros);
    tkvi_emit(s, zeros, n);
}

/* >>what is saved of a layer */
/* Index in a list of the first entry that holds the block of entry i. */
static int tkvi_first_with_block(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    uint32_t other = kv->pool.entry[ids[i]].next_holder;
    int first = i;
    for (; other != ids[i]; other = kv->pool.entry[other].next_holder) {
        const int at = tkvi_block_at(kv, list, ids, kv->pool.entry[other].start);
        if (at >= 0 && at < first && ids[at] == other) first = at;
    }
    return first;
}

/* The first entry that is saved with the block of entry i. */
static tkvi_saved_holder tkvi_first_saved_holder(const tkvi_saver *s, int i) {
    tkvi_saved_holder first;
    first.seq = s->is_cache ? s->seq : 0;
    first.i = i;
    if (s->kv->pool.block[s->kv->pool.entry[s->ids[i]].block].refs == 1) return first;
    if (s->is_cache) return s->place[s->place[s->ids[i]].first].holder;
    first.i = tkvi_first_with_block(s->kv, &s->list, s->ids, i);
    return first;
}

static int tkvi_is_first_with_block(const tkvi_saver *s, int i) {
    const tkvi_saved_holder first = tkvi_first_saved_holder(s, i);
    return first.i == i && (!s->is_cache || first.seq == s->seq);
}

/* Finds where each entry of the cache is saved, and the first entry with its block. */
static void tkvi_place_all_entries(tkvi_saver *s) {
    const tkv_cache *kv = s->kv;
    int seq, layer, i;
    memset(s->place, 0, kv->pool.block_cap * sizeof *s->place);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            for (i = 0; i < tkvi_list_of(kv, seq, layer)->n; i++) {
                uint32_t other = ids[i];
                s->place[other].holder.seq = seq;
                s->place[other].holder.i = i;
                for (; !s->place[other].has_first; other = kv->pool.entry[other].next_holder) {
                    s->place[other].first = ids[i];
                    s->place[other].has_first = 1;
                }
                s->place[s->place[ids[i]].first].slots |=
                    tkvi_used_mask(kv, tkvi_list_of(kv, seq, layer), ids, i);
            }
        }
}

/* Looks at the list of a layer, or at the part of it with the first tokens. */
static void tkvi_view_layer(tkvi_saver *s, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(s->kv, seq, layer);
    s->seq = seq;
    s->layer = layer;
    s->list = *list;
    s->ids = tkvi_ids(s->kv, seq, layer);
    if (!s->p->length || s->p->length >= list->len) return;
    tkvi_uncount_blocks(&s->list, tkvi_n_blocks_before(s->kv, seq, layer, s->p->length), list->n);
    s->list.shift = tkvi_shift_after_cut(s->kv, seq, layer, s->p->length);
    s->list.len = s->p->length;
    s->list.expired = tkvi_min(list->expired, s->p->length);
    s->list.chunk_start = tkvi_min(list->chunk_start, s->p->length);
}

/* 1 if the tokens that are saved do not tell the next position of a layer, as the last ones are gone in all layers, or
 * the positions of expired ones. */
static int tkvi_must_save_shifts(tkvi_saver *s) {
    const tkv_cache *kv = s->kv;
    int seq = s->is_cache ? 0 : s->p->seq, layer, told, must = 0;
    const int end = s->is_cache ? kv->tables.cfg.limits.max_seqs : seq + 1;
    for (; TKVI_HAS_MOVES && seq < end; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers && !must; layer++) {
            tkvi_view_layer(s, seq, layer);
            (void)tkvi_shift_of_last(kv, seq, layer, s->list.len, &told);
            must = s->list.shift != told ||
                   (s->list.expired &&
                    s->list.expired_end != tkvi_told_expired_end(kv, layer, &s->list, s->ids));
        }
    return must;
}

/* Entry i as it is saved. *m: its token_meta, if the cache has any. */
static tkvi_entry tkvi_view_entry(const tkvi_saver *s, int i, tkvi_token_meta *m) {
    const tkvi_pool *pool = &s->kv->pool;
    tkvi_entry e = pool->entry[s->ids[i]];
    const int has_meta = TKVI_HAS_EVICT && pool->token_meta;
    if (has_meta) *m = pool->token_meta[s->ids[i]];
    else memset(m, 0, sizeof *m);
    if (m->temporary_until <= tkvi_list_of(s->kv, s->seq, s->layer)->len)
        m->temporary_mask = 0; /* pins that have ended */
    if (s->p->length && (i == s->list.n - 1 || i < tkvi_anchors_of(&s->list)))
        tkvi_cut_entry(&e, has_meta ? m : NULL, s->list.len);
    return e;
}

/* Bits of the slots in which an entry has tokens, as it is saved. */
static uint64_t tkvi_saved_tokens_of(const tkvi_saver *s, int i) {
    tkvi_token_meta m;
    const tkvi_entry e = tkvi_view_entry(s, i, &m);
    const int end = i + 1 < s->list.n ? tkvi_block_start(s->kv, s->ids, i + 1) : s->list.len;
    return tkvi_live_mask(&e, e.n_packed   ? e.n_packed
                              : e.end_slot ? e.end_slot
                                           : tkvi_min(TKVI_BLOCK, e.first_slot + end - e.start)) |
           m.anchored_mask;
}

/* Bits of the slots of a block in which some token of the save is. i: the first entry with the block. */
static uint64_t tkvi_saved_slots(const tkvi_saver *s, int i) {
    const tkvi_pool *pool = &s->kv->pool;
    const uint32_t number = pool->entry[s->ids[i]].block;
    uint64_t slots = 0;
    uint32_t n = 0;
    if (s->is_cache) return s->place[s->place[s->ids[i]].first].slots;
    for (; i < s->list.n && ~slots && n < pool->block[number].refs; i++) {
        if (pool->entry[s->ids[i]].block != number) continue;
        slots |= tkvi_saved_tokens_of(s, i);
        n++;
    }
    return slots;
}

/* A record with zeros in the slots without a token of the save: those had tokens that were removed, or that are not
 * saved. */
static const uint8_t *tkvi_clear_other_slots(tkvi_saver *s, const tkvi_layout *c, const uint8_t *record,
                                             int i) {
    const uint64_t others = tkvi_slots_before(c->tokens) & ~tkvi_saved_slots(s, i);
    int h;
    if (!others) return record;
    if (record != s->room) memcpy(s->room, record, tkvi_record_end(c));
    for (h = 0; h < c->n_kv_heads; h++) {
        const tkvi_record *r = &c->record[h];
        tkvi_clear_slots(&r->k, others, s->room + r->at);
        tkvi_clear_slots(&r->v, others, s->room + r->at + r->v_at);
    }
    return s->room;
}

/* The record of the block of entry i, which lies in RAM, in attached bytes or in the store. NULL after an error. */
static const uint8_t *tkvi_get_record(tkvi_saver *s, int layer, int i) {
    const tkv_cache *kv = s->kv;
    const uint32_t number = kv->pool.entry[s->ids[i]].block;
    const tkvi_block *b = &kv->pool.block[number];
    const tkvi_layout *c = &kv->tables.layout[b->layout];
    if (!tkvi_is_offloaded(b)) return tkvi_clear_other_slots(s, c, tkvi_block_bytes(&kv->pool, b), i);
    if (tkvi_is_attached(&kv->pool, number, TKVI_ITSELF)) {
        const uint8_t *record = tkvi_read_attached(&kv->pool, number, c);
        if (record) return tkvi_clear_other_slots(s, c, record, i);
        s->st = tkvi_fail(s->kv, TKV_ERR_DATA, "attached bytes are damaged in a block of layer", layer, "");
        return NULL;
    }
    s->st = tkvi_fetch_block(kv, s->ids[i], TKVI_ITSELF, b->layout, s->room);
    if (!s->st) return tkvi_clear_other_slots(s, c, s->room, i);
    s->st = tkvi_fail(s->kv, s->st, "the store gave no block of layer", layer, "");
    return NULL;
}

/* Emits a record, with zeros in the unused end of its slot. Returns the XXH64 of these bytes. */
static uint64_t tkvi_emit_record(tkvi_saver *s, const tkvi_layout *c, const uint8_t *record) {
    const size_t end = tkvi_record_end(c);
    size_t left = c->bytes.total - end;
    memset(&s->sum, 0, sizeof s->sum);
    tkvi_emit(s, record, end);
    for (; left > 64; left -= 64) tkvi_emit_zeros(s, 64);
    tkvi_emit_zeros(s, left);
    return tkvi_xxh64_end(&s->sum);
}

/* >>sections */
static int tkvi_saved_flags(const tkvi_saver *s) {
    const int flags = (s->is_cache ? TKVI_SAVED_IS_CACHE : 0) | (s->has_shifts ? TKVI_SAVED_HAS_SHIFTS : 0);
    if (!tkvi_keeps_token_meta(&s->kv->tables.cfg)) return flags;
    return flags | TKVI_SAVED_HAS_META | (s->p->with_scores || s->is_cache ? TKVI_SAVED_HAS_SCORES : 0);
}

static void tkvi_emit_head(tkvi_saver *s, int layer) {
    uint8_t head[TKVI_SAVED_HEAD] = {0};
    const int len = s->is_cache ? 0 : tkv_get_length(s->kv, s->p->seq, TKV_ALL_LAYERS);
    (void)layer;
    memcpy(head, "TKVS", 4);
    tkvi_store32(head + 4, TKVI_SAVED_VERSION);
    tkvi_store64(head + 8, (uint64_t)s->end);
    tkvi_store64(head + 16, tkvi_xxh64(0, (const uint8_t *)s->p->model, s->p->model_bytes));
    tkvi_store32(head + 24, (uint32_t)s->kv->tables.cfg.model.n_layers);
    tkvi_store32(head + 28, (uint32_t)(s->p->length ? tkvi_min(s->p->length, len) : len));
    tkvi_store32(head + 32, (uint32_t)tkvi_saved_flags(s));
    tkvi_store32(head + 36, (uint32_t)s->p->n_tokens);
    tkvi_emit(s, head, sizeof head);
}

static void tkvi_emit_model(tkvi_saver *s, int layer) {
    const tkv_cache *kv = s->kv;
    uint8_t at[24];
    int i;
    (void)layer;
    tkvi_store32(at, (uint32_t)TKVI_OPTIONS);
    tkvi_emit(s, at, 4);
    for (i = 0; i < TKVI_OPTIONS; i++) {
        tkvi_store32(at, (uint32_t)tkvi_member_int(&kv->tables.cfg.format, tkvi_option_rows[i].offset));
        tkvi_emit(s, at, 4);
    }
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++) {
        const tkvi_plan *p = &kv->tables.plan[i];
        tkvi_store32(at, (uint32_t)p->stored_layer);
        tkvi_store_geometry(at + 4, &p->geometry);
        tkvi_store64(at + 16, tkvi_rope_hash(p->rope));
        tkvi_emit(s, at, sizeof at);
    }
}

static void tkvi_emit_tokens(tkvi_saver *s, int section) {
    const int first = section * TKVI_SAVED_TOKENS_AT_ONCE,
              end = tkvi_min(s->p->n_tokens - first, TKVI_SAVED_TOKENS_AT_ONCE) + first;
    uint8_t at[64];
    int i, k, n;
    for (i = first; i < end; i += n) {
        n = tkvi_min(16, end - i);
        for (k = 0; k < n; k++) tkvi_store32(at + 4 * k, (uint32_t)s->p->tokens[i + k]);
        tkvi_emit(s, at, (size_t)(4 * n));
    }
}

/* Mask of the versions of a layer's table that its saved blocks have, and the current one. */
static unsigned tkvi_versions_to_save(const tkvi_saver *s, int layer) {
    const tkv_cache *kv = s->kv;
    unsigned mask = 0;
    int i, seq = s->is_cache ? 0 : s->p->seq;
    const int end = s->is_cache ? kv->tables.cfg.limits.max_seqs : seq + 1;
    if (tkvi_has_table(kv, layer)) mask = 1u << kv->tables.current_version[layer];
    for (; seq < end; seq++) {
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        const int length = s->p->length,
                  n = length ? tkvi_n_blocks_before(kv, seq, layer, length) : tkvi_list_of(kv, seq, layer)->n;
        for (i = 0; i < n; i++) {
            const int version = tkvi_version_of(kv, tkvi_block_of(kv, ids[i])->layout);
            if (version >= 0) mask |= 1u << version;
        }
    }
    return mask;
}

static void tkvi_emit_tables(tkvi_saver *s, int layer) {
    const tkv_cache *kv = s->kv;
    const unsigned mask = tkvi_versions_to_save(s, layer);
    const int parts = tkvi_table_parts(kv, layer);
    const size_t bytes = tkvi_parts_bytes(tkvi_geometry_of(kv, layer), parts);
    uint8_t at[8];
    int v;
    tkvi_store32(at, (uint32_t)parts);
    tkvi_store32(at + 4, (uint32_t)tkvi_n_bits(mask));
    tkvi_emit(s, at, 8);
    for (v = 0; v < TKVI_VERSIONS; v++) {
        if (!(mask >> v & 1)) continue;
        tkvi_store32(at, (uint32_t)v);
        tkvi_store32(at + 4, kv->tables.current_version[layer] == v);
        tkvi_emit(s, at, 8);
        if (s->mode != TKVI_COUNTS) (void)tkvi_save_table(kv, layer, v, parts, s->room);
        tkvi_emit(s, s->room, bytes);
    }
}

/* Where the record of block k of the layer is. *next: behind the record of the block before. */
static size_t tkvi_record_place(const tkvi_saver *s, size_t k, const tkvi_layout *c, size_t *next) {
    const size_t at =
        s->record_at ? (size_t)tkvi_load64(s->record_at + 8 * (s->first_block + k)) : s->records_from + *next;
    *next += tkvi_saved_record_bytes(c);
    return at;
}

/* Where the former save has the same record. 0: it has none. It goes on with the former list where it was. */
static size_t tkvi_find_former_record(const tkvi_saver *s, const tkvi_saved_list *list,
                                      tkvi_block_cursor *from, int *left, const tkvi_block *b, uint64_t sum) {
    const tkvi_layout *c = &s->kv->tables.layout[b->layout];
    const size_t n = c->bytes.total;
    uint64_t at;
    while (*left && tkvi_saved_first_position(from, 0) < b->first_position) {
        if (--*left) tkvi_next_saved_block(list, from);
    }
    if (!*left || tkvi_saved_first_position(from, 0) != b->first_position ||
        from->run[0] != (uint8_t)c->pair.k || from->run[1] != (uint8_t)c->pair.v ||
        from->run[2] != (uint8_t)c->tokens)
        return 0;
    at = tkvi_saved_record_at(from, 0, c);
    if (at < 64 || at % 64 || at >= s->former.end || n + 8 > s->former.end - (size_t)at) return 0;
    return tkvi_load64(s->former.bytes + (size_t)at + n) == sum + at ? (size_t)at : 0;
}

/* The number of the list's sections. */
static int tkvi_saved_list_number(const tkvi_saver *s) {
    return s->is_cache ? s->seq * s->kv->tables.cfg.model.n_layers + s->layer : s->layer;
}

/* Looks for the records of a layer in the former save. Those that it does not have come behind s->records_from. */
static void tkvi_place_new_records(tkvi_saver *s, int layer) {
    const tkvi_section head = tkvi_find_section(&s->former, TKVI_SAVED_HEAD_KIND, 0, NULL);
    tkvi_saved_list list;
    tkvi_block_cursor from = {NULL, 0, 0};
    int i, left = 0;
    size_t k = 0;
    if (head.n == TKVI_SAVED_HEAD && !tkvi_open_saved_list(tkvi_find_section(&s->former, TKVI_SAVED_LISTS,
                                                                             tkvi_saved_list_number(s), NULL),
                                                           (int)tkvi_load32(head.at + 32), s->seq, &list))
        left = list.n_blocks;
    if (left) tkvi_next_saved_block(&list, &from);
    for (i = 0; i < s->list.n; i++) {
        const tkvi_block *b = tkvi_block_of(s->kv, s->ids[i]);
        const tkvi_layout *c = &s->kv->tables.layout[b->layout];
        const uint8_t *record;
        const size_t n = s->n;
        size_t at;
        if (!tkvi_is_first_with_block(s, i)) continue;
        record = tkvi_get_record(s, layer, i);
        if (!record) return;
        s->info.n_blocks++;
        at = tkvi_find_former_record(s, &list, &from, &left, b, tkvi_emit_record(s, c, record));
        s->n = n;
        s->whole += tkvi_saved_record_bytes(c);
        if (!at) {
            at = s->records_from + s->n;
            s->n += tkvi_saved_record_bytes(c);
            s->info.n_new_blocks++;
        }
        tkvi_store64(s->record_at + 8 * (s->first_block + k++), (uint64_t)at);
    }
}

static void tkvi_emit_records(tkvi_saver *s, int layer) {
    size_t k = 0, next = 0;
    int i;
    if (s->mode == TKVI_HASHES) {
        tkvi_place_new_records(s, layer);
        return;
    }
    for (i = 0; i < s->list.n && !s->st; i++) {
        const tkvi_layout *c = &s->kv->tables.layout[tkvi_block_of(s->kv, s->ids[i])->layout];
        const size_t padded = tkvi_saved_record_bytes(c), at = s->at;
        const uint8_t *record;
        uint8_t sum[8];
        if (!tkvi_is_first_with_block(s, i)) continue;
        if (s->mode == TKVI_COUNTS) {
            s->n += padded;
            s->info.n_blocks++;
            s->info.n_new_blocks++;
            continue;
        }
        if (tkvi_record_place(s, k++, c, &next) != at) continue; /* a former save has it */
        record = tkvi_get_record(s, layer, i);
        if (!record) return;
        tkvi_store64(sum, tkvi_emit_record(s, c, record) + (uint64_t)at);
        tkvi_emit(s, sum, 8);
        tkvi_emit_zeros(s, padded - c->bytes.total - 8);
    }
}

/* A run of entries or of blocks, while it grows. */
typedef struct tkvi_run_writer {
    uint8_t at[TKVI_SAVED_RUN_MOST], last[TKVI_SAVED_RUN_MOST];
    int repeat, n;  /* n: runs before this one */
    int is_counted; /* 1: no run is emitted */
} tkvi_run_writer;

static void tkvi_end_run(tkvi_saver *s, tkvi_run_writer *w, size_t bytes) {
    if (!w->repeat) return;
    tkvi_store32(w->at + 12, (uint32_t)w->repeat);
    if (!w->is_counted) tkvi_emit(s, w->at, bytes);
    w->repeat = 0;
    w->n++;
}

/* Adds an entry or a block of `size` bytes to a run, or ends the run and begins one with it. is_alike: it differs from
 * the last one by `step`, which is as wide as before; step_at: where the run has it. */
static void tkvi_add_to_run(tkvi_saver *s, tkvi_run_writer *w, const uint8_t *item, size_t size, int is_alike,
                            int64_t step, int step_at) {
    is_alike = is_alike && w->repeat && (w->repeat == 1 || step == w->at[step_at]);
    if (!is_alike) {
        tkvi_end_run(s, w, size);
        memcpy(w->at, item, size);
    } else {
        w->at[step_at] = (uint8_t)step;
    }
    memcpy(w->last, item, size);
    w->repeat++;
}

/* 1 if the holders that two entries of a whole cache name follow each other. An entry that names an earlier one of its
 * own list makes a run of its own, as in the file of one sequence. */
static int tkvi_do_holders_follow(const tkvi_saver *s, const uint8_t *last, const uint8_t *entry) {
    const int is_own_list = tkvi_load32(entry + 48) == (uint32_t)s->seq;
    return (!is_own_list || tkvi_load32(entry + 4) == tkvi_load32(entry)) &&
           memcmp(entry + 48, last + 48, 8) == 0 && tkvi_load32(entry + 4) == tkvi_load32(last + 4) + 1 &&
           tkvi_load32(entry + 56) == tkvi_load32(last + 56) + 1 &&
           tkvi_load32(entry + 60) == tkvi_load32(last + 60);
}

static void tkvi_add_saved_entry(tkvi_saver *s, tkvi_run_writer *w, const uint8_t *entry) {
    const int64_t step = (int64_t)tkvi_saved_int(entry + 8) - tkvi_saved_int(w->last + 8);
    const int is_alike = (s->is_cache ? tkvi_do_holders_follow(s, w->last, entry)
                                      : tkvi_load32(entry + 4) == tkvi_load32(entry) &&
                                            tkvi_load32(w->last + 4) == tkvi_load32(w->last)) &&
                         step >= 1 && step <= TKVI_BLOCK && memcmp(entry + 16, w->last + 16, 32) == 0;
    tkvi_add_to_run(s, w, entry, tkvi_entry_run_bytes(s->is_cache), is_alike, step, 29);
}

/* The part of an entry that only a whole cache has. */
static void tkvi_save_holders(const tkvi_saver *s, int i, const tkvi_saved_holder *first, uint8_t *at) {
    const tkvi_entry *e = &s->kv->pool.entry[s->ids[i]];
    const tkvi_saved_holder next = s->place[e->next_holder].holder;
    tkvi_store32(at, (uint32_t)first->seq);
    tkvi_store32(at + 4, (uint32_t)next.seq);
    tkvi_store32(at + 8, (uint32_t)next.i);
    tkvi_store32(at + 12, e->is_first);
}

static int tkvi_emit_entry_runs(tkvi_saver *s, int is_counted) {
    tkvi_run_writer w;
    int i;
    memset(&w, 0, sizeof w);
    w.is_counted = is_counted;
    for (i = 0; i < s->list.n; i++) {
        tkvi_token_meta m;
        const tkvi_entry e = tkvi_view_entry(s, i, &m);
        const tkvi_saved_holder first = tkvi_first_saved_holder(s, i);
        uint8_t at[TKVI_SAVED_RUN_MOST] = {0};
        tkvi_store32(at, (uint32_t)i);
        tkvi_store32(at + 4, (uint32_t)first.i);
        tkvi_store32(at + 8, (uint32_t)e.start);
        tkvi_store32(at + 16, (uint32_t)e.shift);
        tkvi_store32(at + 20, (uint32_t)e.turned);
        at[24] = (uint8_t)e.n_packed;
        at[25] = e.first_slot;
        at[26] = e.end_slot;
        at[27] = (uint8_t)tkvi_tier_at(&s->list, i);
        at[28] = e.has_anchors;
        tkvi_store64(at + 32, e.evicted_mask);
        tkvi_store64(at + 40, TKVI_HAS_EVICT ? e.sink_mask : 0);
        if (s->is_cache) tkvi_save_holders(s, i, &first, at + 48);
        if (i == s->list.sinks) tkvi_end_run(s, &w, tkvi_entry_run_bytes(s->is_cache));
        tkvi_add_saved_entry(s, &w, at);
    }
    tkvi_end_run(s, &w, tkvi_entry_run_bytes(s->is_cache));
    return w.n;
}

/* bytes: of its record. */
static void tkvi_add_saved_block(tkvi_saver *s, tkvi_run_writer *w, const uint8_t *block, size_t bytes) {
    const int64_t step = (int64_t)tkvi_saved_int(block + 8) - tkvi_saved_int(w->last + 8);
    const int is_alike = step >= 0 && step <= 255 && memcmp(block, w->last, 5) == 0 &&
                         memcmp(block + 24, w->last + 24, 8) == 0 &&
                         tkvi_load64(block + 16) == tkvi_load64(w->last + 16) + (uint64_t)bytes;
    tkvi_add_to_run(s, w, block, tkvi_block_run_bytes(s->is_cache), is_alike, step, 5);
}

/* Emits the runs of blocks. *n_blocks: their blocks. Returns the number of runs. */
static int tkvi_emit_block_runs(tkvi_saver *s, int is_counted, int *n_blocks) {
    tkvi_run_writer w;
    size_t k = 0, next = 0;
    int i;
    memset(&w, 0, sizeof w);
    w.is_counted = is_counted;
    for (i = 0; i < s->list.n; i++) {
        const tkvi_block *b = tkvi_block_of(s->kv, s->ids[i]);
        const tkvi_layout *c = &s->kv->tables.layout[b->layout];
        const int version = tkvi_version_of(s->kv, b->layout);
        uint8_t at[TKVI_SAVED_RUN_MOST] = {0};
        if (!tkvi_is_first_with_block(s, i)) continue;
        at[0] = (uint8_t)c->pair.k;
        at[1] = (uint8_t)c->pair.v;
        at[2] = (uint8_t)c->tokens;
        at[3] = b->tier;
        at[4] = (uint8_t)(version < 0 ? TKVI_NO_VERSION : version);
        at[6] = (uint8_t)tkvi_sharing_rule(s->kv, s->layer, (int)c->pair.k);
        tkvi_store32(at + 8, (uint32_t)b->first_position);
        tkvi_store64(at + 16, (uint64_t)tkvi_record_place(s, k++, c, &next));
        if (s->is_cache) {
            tkvi_store16(at + 24, b->layout);
            /* only recomputation asks for it; a load forgets one whose table the file lacks */
            tkvi_store16(at + 26, s->kv->tables.cfg.recompute.compute ? b->previous_layout : (uint16_t)0);
            tkvi_store16(at + 28, b->n_shared_slots);
        }
        tkvi_add_saved_block(s, &w, at, tkvi_saved_record_bytes(c));
    }
    tkvi_end_run(s, &w, tkvi_block_run_bytes(s->is_cache));
    *n_blocks = (int)k;
    return w.n;
}

static void tkvi_emit_meta(tkvi_saver *s, int i) {
    tkvi_token_meta m;
    const tkvi_entry e = tkvi_view_entry(s, i, &m);
    uint8_t at[TKVI_SAVED_META + TKVI_SAVED_SCORES] = {0};
    const uint64_t slots = tkvi_saved_tokens_of(s, i);
    int t;
    tkvi_store64(at, m.pinned_mask & slots);
    tkvi_store64(at + 8, m.temporary_mask & slots);
    tkvi_store64(at + 16, m.anchored_mask);
    tkvi_store32(at + 24, (uint32_t)m.temporary_until);
    tkvi_store32(at + 28, (uint32_t)m.score_step);
    tkvi_store32(at + 32, (uint32_t)m.moved_at);
    for (t = 0; t < TKVI_BLOCK; t++) {
        if (!(slots >> t & 1)) continue;
        if (e.has_anchors && t < TKVI_ANCHOR_SLOTS) tkvi_store32(at + 40 + 4 * t, (uint32_t)m.index.any[t]);
        if (e.n_packed && !e.has_anchors) tkvi_store16(at + 40 + 2 * t, m.index.after_start[t]);
        tkvi_store32(at + TKVI_SAVED_META + 4 * t, m.scores[t]);
    }
    tkvi_emit(s, at,
              TKVI_SAVED_META +
                  (tkvi_saved_flags(s) & TKVI_SAVED_HAS_SCORES ? (size_t)TKVI_SAVED_SCORES : 0));
}

static void tkvi_emit_list(tkvi_saver *s, int layer) {
    int i, n_blocks = 0;
    const int n_entry_runs = tkvi_emit_entry_runs(s, 1), n_block_runs = tkvi_emit_block_runs(s, 1, &n_blocks);
    const tkvi_list *list = &s->list;
    const int head[] = {list->n,       list->sinks,           list->archive,
                        list->warm,    tkvi_anchors_of(list), list->len,
                        list->expired, list->chunk_start,     tkvi_has_moved(list),
                        n_blocks,      n_entry_runs,          n_block_runs};
    uint8_t at[TKVI_SAVED_LIST];
    (void)layer;
    for (i = 0; i < (int)(sizeof head / sizeof *head); i++) tkvi_store32(at + 4 * i, (uint32_t)head[i]);
    tkvi_emit(s, at, sizeof at);
    (void)tkvi_emit_entry_runs(s, 0);
    (void)tkvi_emit_block_runs(s, 0, &n_blocks);
    for (i = 0; i < list->n && (tkvi_saved_flags(s) & TKVI_SAVED_HAS_META); i++) tkvi_emit_meta(s, i);
    tkvi_store32(at, (uint32_t)list->shift);
    tkvi_store32(at + 4, (uint32_t)list->expired_end);
    if (s->has_shifts) tkvi_emit(s, at, 8);
}

/* The first sequence of a whole cache that holds a state: seq, or one before it. */
static int tkvi_first_with_state(const tkv_cache *kv, int seq, const tkvi_state *state) {
    int first = state->n_holders > 1 ? 0 : seq, at;
    while (first < seq &&
           tkvi_find_state(&kv->states.list[first], state->layer, state->n_tokens, &at) != state)
        first++;
    return first;
}

static void tkvi_emit_states(tkvi_saver *s, int seq) {
    const tkvi_state_list *list = &s->kv->states.list[seq];
    int i;
    for (i = 0; TKVI_HAS_STATES && i < list->n; i++) {
        const tkvi_state *state = list->held[i].state;
        const int first = s->is_cache ? tkvi_first_with_state(s->kv, seq, state) : seq;
        uint8_t at[TKVI_SAVED_STATE];
        if (s->p->length && state->n_tokens > s->p->length) continue;
        tkvi_store32(at, (uint32_t)state->layer);
        tkvi_store32(at + 4, (uint32_t)state->n_tokens);
        tkvi_store64(at + 8, first < seq ? TKVI_SHARED_STATE + (uint64_t)first : (uint64_t)state->size);
        tkvi_emit(s, at, sizeof at);
        if (first < seq) continue;
        tkvi_emit(s, tkvi_bytes_of_state(state), state->size);
        tkvi_emit_zeros(s, tkvi_gap_to(state->size, 8));
    }
}

static void tkvi_emit_number(void *saver, const void *bytes, size_t n) {
    tkvi_emit((tkvi_saver *)saver, bytes, n);
}

static void tkvi_emit_cache(tkvi_saver *s, int number) {
    tkvi_numbers io;
    (void)number;
    memset(&io, 0, sizeof io);
    io.kv = s->kv;
    io.mode = TKVI_SAVES_NUMBERS;
    io.emit = tkvi_emit_number;
    io.saver = s;
    io.room = s->room;
    tkvi_visit_cache(&io);
}

typedef void (*tkvi_emitter)(tkvi_saver *s, int number);

/* In the order of tkvi_saved_kind. */
static const tkvi_emitter tkvi_emitters[TKVI_SAVED_KINDS] = {
    tkvi_emit_head,    tkvi_emit_model, tkvi_emit_tokens, tkvi_emit_tables,
    tkvi_emit_records, tkvi_emit_list,  tkvi_emit_states, tkvi_emit_cache};

/* >>the whole */
/* Number of the sections of a kind, those of layers without blocks of their own counted too. */
static int tkvi_n_sections_of(const tkvi_saver *s, int kind) {
    const int n_layers = s->kv->tables.cfg.model.n_layers,
              n_seqs = s->is_cache ? s->kv->tables.cfg.limits.max_seqs : 1;
    switch (kind) {
    case TKVI_SAVED_TOKENS:
        return (s->p->n_tokens + TKVI_SAVED_TOKENS_AT_ONCE - 1) / TKVI_SAVED_TOKENS_AT_ONCE;
    case TKVI_SAVED_TABLES: return n_layers;
    case TKVI_SAVED_RECORDS:
    case TKVI_SAVED_LISTS: return n_layers * n_seqs;
    case TKVI_SAVED_STATES: return n_seqs;
    case TKVI_SAVED_CACHE: return s->is_cache;
    default: return 1;
    }
}

/* Goes to the next section. kind begins at 0, *number at -1. Returns 0 behind the last one. A sequence of a whole cache
 * that has no tokens and no states has no sections. */
static int tkvi_next_section(const tkvi_saver *s, int *kind, int *number) {
    const tkv_cache *kv = s->kv;
    const int n_layers = kv->tables.cfg.model.n_layers;
    for (++*number; *kind < TKVI_SAVED_KINDS; ++*kind, *number = 0)
        for (; *number < tkvi_n_sections_of(s, *kind); ++*number) {
            const int layer = *number % n_layers, seq = *number / n_layers;
            if (tkvi_is_by_layer(*kind) && kv->tables.plan[layer].stored_layer != layer) continue;
            if (s->is_cache && (*kind == TKVI_SAVED_RECORDS || *kind == TKVI_SAVED_LISTS) &&
                !tkvi_list_of(kv, seq, layer)->len)
                continue;
            if (s->is_cache && *kind == TKVI_SAVED_STATES && !kv->states.list[*number].n) continue;
            return 1;
        }
    return 0;
}

/* Where the records of a list begin, of those that have been planned. */
static size_t tkvi_planned_records(const tkvi_saver *s, int number) {
    uint32_t low = 0, high = s->index ? s->n_sections : 0;
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2,
                       kind = tkvi_load32(s->index + (size_t)mid * TKVI_SAVED_SECTION);
        const uint8_t *entry = s->index + (size_t)mid * TKVI_SAVED_SECTION;
        if (kind == TKVI_SAVED_RECORDS && tkvi_load32(entry + 4) == (uint32_t)number)
            return (size_t)tkvi_load64(entry + 8);
        if (kind < TKVI_SAVED_RECORDS ||
            (kind == TKVI_SAVED_RECORDS && tkvi_load32(entry + 4) < (uint32_t)number))
            low = mid + 1;
        else high = mid;
    }
    return 0;
}

/* Begins a section at a place of the file. */
static void tkvi_begin_section(tkvi_saver *s, tkvi_emit_mode mode, int kind, int number, size_t at) {
    const int n_layers = s->kv->tables.cfg.model.n_layers;
    s->mode = mode;
    s->n = 0;
    memset(&s->sum, 0, sizeof s->sum);
    if (s->kind != kind) s->first_block = 0;
    s->kind = kind;
    if (kind != TKVI_SAVED_RECORDS && kind != TKVI_SAVED_LISTS) return;
    tkvi_view_layer(s, s->is_cache ? number / n_layers : s->p->seq, number % n_layers);
    s->records_from = kind == TKVI_SAVED_RECORDS ? at : tkvi_planned_records(s, number);
}

/* Emits the section that was begun. */
static void tkvi_emit_section(tkvi_saver *s, int kind, int number) {
    if (kind == TKVI_SAVED_RECORDS || kind == TKVI_SAVED_LISTS) number = s->layer;
    if (kind == TKVI_SAVED_STATES && !s->is_cache) number = s->p->seq;
    tkvi_emitters[kind](s, number);
}

/* Ends a section: the next one is of the layer behind. */
static void tkvi_end_section(tkvi_saver *s, int kind) {
    int i;
    if (kind != TKVI_SAVED_LISTS && kind != TKVI_SAVED_RECORDS) return;
    for (i = 0; i < s->list.n; i++) s->first_block += (size_t)tkvi_is_first_with_block(s, i);
}

/* The section of the former save with the bytes that were hashed. at NULL: it has none. */
static tkvi_section tkvi_find_former_section(const tkvi_saver *s, int kind, int layer) {
    tkvi_section former = {NULL, 0};
    const uint64_t sum = tkvi_xxh64_end(&s->sum);
    uint64_t saved = 0;
    if (s->mode != TKVI_HASHES || kind == TKVI_SAVED_RECORDS || kind == TKVI_SAVED_HEAD_KIND) return former;
    former = tkvi_find_section(&s->former, kind, layer, &saved);
    if (former.at && (former.n != s->n || saved != sum || tkvi_xxh64(0, former.at, former.n) != sum))
        former.at = NULL;
    return former;
}

/* Counts the bytes of all sections and plans the index. Behind a former save, sections that it has stay there. */
static void tkvi_plan_save(tkvi_saver *s) {
    const tkvi_emit_mode mode = s->former.bytes ? TKVI_HASHES : TKVI_COUNTS;
    int kind = 0, layer = -1;
    size_t at = s->start;
    s->n_sections = 0;
    s->whole = 0;
    s->kind = -1;
    memset(&s->info, 0, sizeof s->info);
    for (; !s->st && tkvi_next_section(s, &kind, &layer); s->n_sections++) {
        const size_t gap = tkvi_gap_to(at, 64);
        uint8_t *entry = s->index ? s->index + (size_t)s->n_sections * TKVI_SAVED_SECTION : NULL;
        tkvi_section former;
        tkvi_begin_section(s, mode, kind, layer, at + gap);
        tkvi_emit_section(s, kind, layer);
        tkvi_end_section(s, kind);
        former = tkvi_find_former_section(s, kind, layer);
        if (kind != TKVI_SAVED_RECORDS || mode == TKVI_COUNTS) s->whole += s->n + tkvi_gap_to(s->n, 64);
        if (entry) {
            tkvi_store32(entry, (uint32_t)kind);
            tkvi_store32(entry + 4, (uint32_t)layer);
            tkvi_store64(entry + 8, (uint64_t)(former.at ? (size_t)(former.at - s->former.bytes) : at + gap));
            tkvi_store64(entry + 16, (uint64_t)s->n);
            tkvi_store64(entry + 24, former.at ? tkvi_xxh64_end(&s->sum) : 0);
        }
        if (!former.at) at += gap + s->n;
    }
    at += (size_t)s->n_sections * TKVI_SAVED_SECTION + TKVI_SAVED_END;
    s->end = at + tkvi_gap_to(at, 64);
    s->whole += (size_t)s->n_sections * TKVI_SAVED_SECTION + TKVI_SAVED_END;
    s->whole += tkvi_gap_to(s->whole, 64);
}

/* Writes the sections that no former save has, the index and the end. */
static void tkvi_write_save(tkvi_saver *s) {
    uint8_t end[TKVI_SAVED_END] = {0};
    const size_t index_bytes = (size_t)s->n_sections * TKVI_SAVED_SECTION,
                 index_at = s->end - index_bytes - TKVI_SAVED_END;
    tkvi_xxh64_sum sum;
    int kind = 0, layer = -1;
    uint32_t i;
    s->at = s->start;
    s->kind = -1;
    for (i = 0; !s->st && tkvi_next_section(s, &kind, &layer); i++) {
        uint8_t *entry = s->index + (size_t)i * TKVI_SAVED_SECTION;
        const size_t at = (size_t)tkvi_load64(entry + 8);
        s->mode = TKVI_WRITES;
        if (at >= s->start) tkvi_emit_zeros(s, at - s->at);
        tkvi_begin_section(s, TKVI_WRITES, kind, layer, at);
        if (at >= s->start) {
            tkvi_emit_section(s, kind, layer);
            if (kind != TKVI_SAVED_RECORDS) tkvi_store64(entry + 24, tkvi_xxh64_end(&s->sum));
        }
        tkvi_end_section(s, kind);
    }
    if (s->st) return;
    tkvi_emit_zeros(s, index_at - s->at);
    tkvi_emit(s, s->index, index_bytes);
    tkvi_store64(end, (uint64_t)index_at);
    tkvi_store64(end + 8, (uint64_t)s->start);
    tkvi_store32(end + 16, s->n_sections);
    tkvi_store32(end + 20, TKVI_SAVED_VERSION);
    memset(&sum, 0, sizeof sum);
    tkvi_xxh64_add(&sum, s->index, index_bytes);
    tkvi_xxh64_add(&sum, end, 24);
    tkvi_store64(end + 24, tkvi_xxh64_end(&sum));
    memcpy(end + 32, "TKVSEND", 7);
    tkvi_emit(s, end, sizeof end);
}

/* Refuses a sequence that cannot be saved, or cannot be cut to `length` tokens. */
static tkv_status tkvi_check_saved_seq(tkv_cache *kv, int seq, int length) {
    tkv_status st = tkvi_check_cut(kv, seq, length);
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++) {
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        const int n = length ? tkvi_n_blocks_before(kv, seq, layer, length) : tkvi_list_of(kv, seq, layer)->n;
        for (i = 0; i < n && !st; i++)
            if (tkvi_is_discarded(tkvi_block_of(kv, ids[i])))
                st = tkvi_fail(kv, TKV_ERR_NO_SOURCE, "a block is discarded; recompute it first: layer",
                               layer, "");
    }
    return st;
}

static tkv_status tkvi_check_save(tkv_cache *kv, const tkv_save_params *p) {
    const int is_cache = p->seq == TKV_ALL_SEQS;
    tkv_status st = TKV_OK;
    int seq = is_cache ? 0 : p->seq, end;
    if (!is_cache && !tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (is_cache && p->length)
        return tkvi_fail(kv, TKV_ERR_ARG, "length is", p->length, "; a whole cache is saved with all tokens");
    if (p->n_tokens < 0 || (p->n_tokens > 0 && !p->tokens) || (p->model_bytes && !p->model) ||
        (p->former_bytes && !p->former))
        return tkvi_fail(kv, TKV_ERR_ARG, "tokens, model or former are missing", 0, NULL);
    end = is_cache ? kv->tables.cfg.limits.max_seqs : seq + 1;
    for (; seq < end && !st; seq++) st = tkvi_check_saved_seq(kv, seq, p->length);
    return st;
}

/* Bytes of the largest table of a layer; 0: no layer has one. */
static size_t tkvi_room_for_table(const tkv_cache *kv) {
    size_t most = 0;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (kv->tables.plan[layer].stored_layer == layer && tkvi_table_parts(kv, layer)) {
            const size_t bytes = tkvi_parts_bytes(tkvi_geometry_of(kv, layer), tkvi_table_parts(kv, layer));
            most = bytes > most ? bytes : most;
        }
    return most;
}

/* Bytes of the largest block or table of a layer. */
static size_t tkvi_room_for_piece(const tkv_cache *kv) {
    size_t most = tkvi_room_for_table(kv);
    int i;
    for (i = 0; i < kv->tables.n_layouts; i++) {
        const size_t slot = kv->tables.size_class[kv->tables.layout[i].size_class].slot_bytes;
        most = slot > most ? slot : most;
    }
    return most + tkvi_gap_to(most, 64);
}

/* Plans a save behind the former one, or a whole one if the file would have more than twice the bytes of that. */
static void tkvi_choose_save(tkvi_saver *s, const tkvi_saved_file *former, uint8_t *record_at) {
    s->former = *former;
    s->start = former->bytes ? former->end : 0;
    s->record_at = former->bytes ? record_at : NULL;
    tkvi_plan_save(s);
    if (s->st || !former->bytes || s->end / 2 <= s->whole) return;
    memset(&s->former, 0, sizeof s->former);
    s->start = 0;
    s->record_at = NULL;
    tkvi_plan_save(s);
}

/* Room for a block or table, the index, the places of entries, and of blocks behind a former save. */
typedef struct tkvi_save_room {
    size_t piece, index, places, records, total;
} tkvi_save_room;

static tkvi_save_room tkvi_room_to_save(const tkvi_saver *s) {
    const tkv_cache *kv = s->kv;
    tkvi_save_room room;
    int kind = 0, number = -1, layer;
    memset(&room, 0, sizeof room);
    room.piece = tkvi_room_for_piece(kv);
    while (tkvi_next_section(s, &kind, &number)) room.index += TKVI_SAVED_SECTION;
    if (s->is_cache) room.places = kv->pool.block_cap * sizeof(tkvi_save_place);
    if (s->p->former_bytes && s->is_cache) room.records = 8u * (size_t)kv->pool.n_entries;
    for (layer = 0; s->p->former_bytes && !s->is_cache && layer < kv->tables.cfg.model.n_layers; layer++)
        room.records += 8u * (size_t)tkvi_list_of(kv, s->p->seq, layer)->n;
    room.places += tkvi_gap_to(room.places, 8);
    room.total = room.piece + room.index + room.places + room.records;
    return room;
}

/* Saves to `buf` of `size` bytes, or through s->write. Without both it counts. */
static tkv_status tkvi_save(tkvi_saver *s, void *buf, size_t size, size_t *needed) {
    const tkvi_save_room need = tkvi_room_to_save(s);
    tkvi_scratch scratch = tkvi_scratch_of(s->kv, s->p->scratch, s->p->scratch_bytes);
    tkvi_saved_file former;
    const char *fault = NULL;
    tkv_status st;
    memset(&former, 0, sizeof former);
    if (s->p->former_bytes)
        fault = tkvi_open_last_save(&former, (const uint8_t *)s->p->former, s->p->former_bytes);
    if (fault) return tkvi_fail(s->kv, TKV_ERR_DATA, fault, 0, NULL);
    s->has_shifts = tkvi_must_save_shifts(s);
    if (buf || s->write || former.bytes || s->is_cache) {
        st = tkvi_take_scratch(&scratch, need.total, &s->room);
        if (st) return st;
        s->index = s->room + need.piece;
        if (s->is_cache) {
            s->place = (tkvi_save_place *)(void *)(s->index + need.index);
            tkvi_place_all_entries(s);
        }
        tkvi_choose_save(s, &former, s->index + need.index + need.places);
    } else {
        tkvi_plan_save(s);
    }
    s->info.bytes = s->end - s->start;
    s->info.at = s->start;
    s->info.live = s->whole;
    if (!s->st && needed) *needed = s->info.bytes;
    if (!s->st && s->p->info) *s->p->info = s->info;
    if (!s->st && buf && size < s->info.bytes)
        s->st = tkvi_fail(s->kv, TKV_ERR_CAPACITY,
                          "the buffer is too small; bytes needed:", (int64_t)s->info.bytes, "");
    s->buf = (uint8_t *)buf;
    if (!s->st && (buf || s->write)) tkvi_write_save(s);
    tkvi_give_back(&scratch, 0);
    return s->st ? s->st : tkvi_ok(s->kv);
}

TKV_API tkv_status tkv_seq_save(tkv_cache *kv, const tkv_save_params *p, void *buf, size_t size,
                                size_t *needed) {
    tkvi_saver s;
    tkv_status st;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    if (!kv || !p || (!buf && !needed))
        return tkvi_refuse_missing(kv, "the parameters, or buf and needed, are missing");
    st = tkvi_check_save(kv, p);
    if (st) return st;
    memset(&s, 0, sizeof s);
    s.kv = kv;
    s.p = p;
    s.is_cache = p->seq == TKV_ALL_SEQS;
    return tkvi_save(&s, buf, size, needed);
}

TKV_API tkv_status tkv_seq_save_to(tkv_cache *kv, const tkv_save_params *p, tkv_write_bytes write,
                                   void *user) {
    tkvi_saver s;
    tkv_status st;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    if (!kv || !p || !write) return tkvi_refuse_missing(kv, "the parameters or write are missing");
    st = tkvi_check_save(kv, p);
    if (st) return st;
    memset(&s, 0, sizeof s);
    s.kv = kv;
    s.p = p;
    s.is_cache = p->seq == TKV_ALL_SEQS;
    s.write = write;
    s.user = user;
    return tkvi_save(&s, NULL, 0, NULL);
}

#endif /* TKVI_PERSIST_SAVE_H */
