/*
 * persist/save.h - tkv_seq_save, tkv_seq_save_to: write a sequence (persist/saved.h).
 *
 * Each section has a function that emits its bytes. It runs three times: its bytes are counted, written, and hashed for
 * the index. Nothing is stored meanwhile but a table of one layer.
 */
#ifndef TKVI_PERSIST_SAVE_H
#define TKVI_PERSIST_SAVE_H

#include "persist/saved.h"
#include "reclaim/offload.h"

typedef enum tkvi_emit_mode { TKVI_COUNTS, TKVI_WRITES, TKVI_HASHES } tkvi_emit_mode;

typedef struct tkvi_saver {
    tkv_cache *kv;
    const tkv_save_params *p;
    tkvi_emit_mode mode;
    size_t n;       /* bytes of the section so far */
    size_t written; /* bytes of all so far */
    size_t total;   /* of all */
    uint8_t *buf;   /* NULL: `write` takes the bytes */
    tkv_write_bytes write;
    void *user;
    uint8_t *table;            /* room for a saved table; NULL: no layer has one */
    tkvi_xxh64_sum sum, index; /* of the section; of the index */
    tkv_status st;
} tkvi_saver;

static void tkvi_emit(tkvi_saver *s, const void *bytes, size_t n) {
    s->n += n;
    if (s->mode == TKVI_HASHES) tkvi_xxh64_add(&s->sum, (const uint8_t *)bytes, n);
    if (s->mode != TKVI_WRITES || s->st || !n) return;
    if (s->buf) memcpy(s->buf + s->written, bytes, n);
    else if (s->write(s->user, bytes, n))
        s->st = tkvi_fail(s->kv, TKV_ERR_IO, "the write callback failed", 0, NULL);
    s->written += n;
}

static void tkvi_emit_zeros(tkvi_saver *s, size_t n) {
    static const uint8_t zeros[64] = {0};
    TKVI_ASSERT(n <= sizeof zeros);
    tkvi_emit(s, zeros, n);
}

static size_t tkvi_gap_to(size_t at, size_t unit) { return (unit - at % unit) % unit; }

/* >>sections */
static int tkvi_saved_flags(const tkvi_saver *s) {
    if (!TKVI_HAS_EVICT || !s->kv->pool.token_meta) return 0;
    return TKVI_SAVED_HAS_META | (s->p->with_scores ? TKVI_SAVED_HAS_SCORES : 0);
}

static void tkvi_emit_head(tkvi_saver *s, int layer) {
    uint8_t head[TKVI_SAVED_HEAD] = {0};
    (void)layer;
    memcpy(head, "TKVS", 4);
    tkvi_store32(head + 4, TKVI_SAVED_VERSION);
    tkvi_store64(head + 8, (uint64_t)s->total);
    tkvi_store64(head + 16, tkvi_xxh64(0, (const uint8_t *)s->p->model, s->p->model_bytes));
    tkvi_store32(head + 24, (uint32_t)s->kv->tables.cfg.model.n_layers);
    tkvi_store32(head + 28, (uint32_t)tkv_get_length(s->kv, s->p->seq, TKV_ALL_LAYERS));
    tkvi_store32(head + 32, (uint32_t)tkvi_saved_flags(s));
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

static void tkvi_emit_tokens(tkvi_saver *s, int layer) {
    uint8_t at[64];
    int i, k, n;
    (void)layer;
    for (i = 0; i < s->p->n_tokens; i += n) {
        n = tkvi_min(16, s->p->n_tokens - i);
        for (k = 0; k < n; k++) tkvi_store32(at + 4 * k, (uint32_t)s->p->tokens[i + k]);
        tkvi_emit(s, at, (size_t)(4 * n));
    }
}

/* Mask of the versions of a layer's table that its saved blocks have, and the current one. */
static unsigned tkvi_versions_to_save(const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    unsigned mask = 0;
    int i;
    if (tkvi_has_table(kv, layer)) mask = 1u << kv->tables.current_version[layer];
    for (i = 0; i < list->n; i++) {
        const int version = tkvi_version_of(kv, tkvi_block_of(kv, ids[i])->layout);
        if (version >= 0) mask |= 1u << version;
    }
    return mask;
}

static void tkvi_emit_tables(tkvi_saver *s, int layer) {
    const tkv_cache *kv = s->kv;
    const unsigned mask = tkvi_versions_to_save(kv, s->p->seq, layer);
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
        if (s->mode != TKVI_COUNTS) (void)tkvi_save_table(kv, layer, v, parts, s->table);
        tkvi_emit(s, s->table, bytes);
    }
}

static void tkvi_emit_entry(tkvi_saver *s, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_entry *e = &s->kv->pool.entry[ids[i]];
    uint8_t at[TKVI_SAVED_ENTRY] = {0};
    tkvi_store32(at, (uint32_t)tkvi_first_with_block(s->kv, list, ids, i));
    tkvi_store32(at + 4, (uint32_t)e->start);
    tkvi_store64(at + 8, e->evicted_mask);
    tkvi_store64(at + 16, tkvi_sink_mask(&s->kv->pool, ids[i]));
    tkvi_store32(at + 24, (uint32_t)e->shift);
    tkvi_store32(at + 28, (uint32_t)e->turned);
    at[32] = (uint8_t)e->n_packed;
    at[33] = e->first_slot;
    at[34] = e->end_slot;
    at[35] = e->tier;
    at[36] = e->has_anchors;
    tkvi_emit(s, at, sizeof at);
}

static void tkvi_emit_meta(tkvi_saver *s, uint32_t id) {
    const tkvi_token_meta *m = &s->kv->pool.token_meta[id];
    const tkvi_entry *e = &s->kv->pool.entry[id];
    uint8_t at[TKVI_SAVED_META + TKVI_SAVED_SCORES] = {0};
    int t;
    tkvi_store64(at, m->pinned_mask);
    tkvi_store64(at + 8, m->temporary_mask);
    tkvi_store64(at + 16, m->anchored_mask);
    tkvi_store32(at + 24, (uint32_t)m->temporary_until);
    tkvi_store32(at + 28, (uint32_t)m->score_step);
    tkvi_store32(at + 32, (uint32_t)m->moved_at);
    for (t = 0; t < TKVI_ANCHOR_SLOTS && e->has_anchors; t++)
        tkvi_store32(at + 40 + 4 * t, (uint32_t)m->index.any[t]);
    for (t = 0; t < TKVI_BLOCK && !e->has_anchors && e->n_packed; t++)
        tkvi_store16(at + 40 + 2 * t, m->index.after_start[t]);
    for (t = 0; t < TKVI_BLOCK; t++) tkvi_store32(at + TKVI_SAVED_META + 4 * t, m->scores[t]);
    tkvi_emit(s, at, TKVI_SAVED_META + (s->p->with_scores ? (size_t)TKVI_SAVED_SCORES : 0));
}

static void tkvi_emit_list(tkvi_saver *s, int layer) {
    const tkvi_list *list = tkvi_list_of(s->kv, s->p->seq, layer);
    const uint32_t *ids = tkvi_ids(s->kv, s->p->seq, layer);
    const int head[] = {list->n,       list->sinks,           list->archive,
                        list->warm,    tkvi_anchors_of(list), list->len,
                        list->expired, list->chunk_start,     tkvi_has_moved(list)};
    uint8_t at[TKVI_SAVED_LIST] = {0};
    int i, n_blocks = 0;
    for (i = 0; i < (int)(sizeof head / sizeof *head); i++) tkvi_store32(at + 4 * i, (uint32_t)head[i]);
    for (i = 0; i < list->n; i++) n_blocks += tkvi_first_with_block(s->kv, list, ids, i) == i;
    tkvi_store32(at + 36, (uint32_t)n_blocks);
    tkvi_emit(s, at, sizeof at);
    for (i = 0; i < list->n; i++) tkvi_emit_entry(s, list, ids, i);
    for (i = 0; i < list->n && (tkvi_saved_flags(s) & TKVI_SAVED_HAS_META); i++) tkvi_emit_meta(s, ids[i]);
}

/* Emits the record of a block, from RAM or from the store. */
static void tkvi_emit_record(tkvi_saver *s, int layer, uint32_t id, tkvi_fetch_buffer *buffer) {
    const tkv_cache *kv = s->kv;
    const tkvi_block *b = tkvi_block_of(kv, id);
    const tkvi_layout *c = &kv->tables.layout[b->layout];
    int head, side;
    if (s->mode == TKVI_COUNTS) {
        s->n += tkvi_record_bytes(c);
        return;
    }
    if (!tkvi_is_offloaded(b)) {
        tkvi_emit(s, tkvi_block_bytes(&kv->pool, b), tkvi_record_bytes(c));
        return;
    }
    for (head = 0; head < c->n_kv_heads && !s->st; head++)
        for (side = 0; side < 2 && !s->st; side++) {
            const size_t n = side ? c->record[head].v.bytes : c->record[head].k.bytes;
            const uint8_t *bytes = NULL;
            if (!n) continue;
            s->st = tkvi_get_side_bytes(kv, id, head, side ? TKV_V : TKV_K, buffer, &bytes);
            if (s->st) s->st = tkvi_fail(s->kv, s->st, "the store gave no block of layer", layer, "");
            else tkvi_emit(s, bytes, n);
        }
}

static void tkvi_emit_blocks(tkvi_saver *s, int layer) {
    const tkv_cache *kv = s->kv;
    const tkvi_list *list = tkvi_list_of(kv, s->p->seq, layer);
    const uint32_t *ids = tkvi_ids(kv, s->p->seq, layer);
    tkvi_fetch_buffer buffer;
    int i;
    tkvi_empty_buffer(&buffer, s->p->seq, layer);
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const tkvi_layout *c = &kv->tables.layout[b->layout];
        const int version = tkvi_version_of(kv, b->layout);
        uint8_t at[TKVI_SAVED_BLOCK] = {0};
        if (tkvi_first_with_block(kv, list, ids, i) != i) continue;
        at[0] = (uint8_t)c->pair.k;
        at[1] = (uint8_t)c->pair.v;
        at[2] = (uint8_t)c->tokens;
        at[3] = b->tier;
        at[4] = (uint8_t)(version < 0 ? TKVI_NO_VERSION : version);
        tkvi_store32(at + 8, (uint32_t)b->first_position);
        tkvi_emit(s, at, sizeof at);
    }
    tkvi_emit_zeros(s, tkvi_gap_to(s->n, 64));
    for (i = 0; i < list->n && !s->st; i++)
        if (tkvi_first_with_block(kv, list, ids, i) == i) tkvi_emit_record(s, layer, ids[i], &buffer);
}

static void tkvi_emit_states(tkvi_saver *s, int layer) {
    const tkvi_state_list *list = &s->kv->states.list[s->p->seq];
    int i;
    (void)layer;
    for (i = 0; TKVI_HAS_STATES && i < list->n; i++) {
        const tkvi_state *state = list->held[i].state;
        uint8_t at[TKVI_SAVED_STATE];
        tkvi_store32(at, (uint32_t)state->layer);
        tkvi_store32(at + 4, (uint32_t)state->n_tokens);
        tkvi_store64(at + 8, (uint64_t)state->size);
        tkvi_emit(s, at, sizeof at);
        tkvi_emit(s, tkvi_bytes_of_state(state), state->size);
        tkvi_emit_zeros(s, tkvi_gap_to(state->size, 8));
    }
}

typedef void (*tkvi_emitter)(tkvi_saver *s, int layer);

/* In the order of tkvi_saved_kind. */
static const tkvi_emitter tkvi_emitters[TKVI_SAVED_KINDS] = {
    tkvi_emit_head, tkvi_emit_model,  tkvi_emit_tokens, tkvi_emit_tables,
    tkvi_emit_list, tkvi_emit_blocks, tkvi_emit_states};

/* >>the whole */
/* Goes to the next section. kind begins at 0, *layer at -1. Returns 0 behind the last one. */
static int tkvi_next_section(const tkv_cache *kv, int *kind, int *layer) {
    for (++*layer; *kind < TKVI_SAVED_KINDS; ++*kind, *layer = 0) {
        if (!tkvi_is_by_layer(*kind) && *layer == 0) return 1;
        for (; tkvi_is_by_layer(*kind) && *layer < kv->tables.cfg.model.n_layers; ++*layer)
            if (kv->tables.plan[*layer].stored_layer == *layer) return 1;
    }
    return 0;
}

/* Emits all sections in a mode, and in TKVI_HASHES the index. Returns the number of sections. */
static uint32_t tkvi_emit_sections(tkvi_saver *s, tkvi_emit_mode mode, size_t *end) {
    int kind = 0, layer = -1;
    uint32_t n = 0;
    size_t at = 0;
    for (; !s->st && tkvi_next_section(s->kv, &kind, &layer); n++) {
        uint8_t entry[TKVI_SAVED_SECTION];
        const size_t gap = tkvi_gap_to(at, 64);
        s->mode = mode;
        if (mode == TKVI_WRITES) tkvi_emit_zeros(s, gap);
        at += gap;
        s->n = 0;
        memset(&s->sum, 0, sizeof s->sum);
        tkvi_emitters[kind](s, layer);
        tkvi_store32(entry, (uint32_t)kind);
        tkvi_store32(entry + 4, (uint32_t)layer);
        tkvi_store64(entry + 8, (uint64_t)at);
        tkvi_store64(entry + 16, (uint64_t)s->n);
        tkvi_store64(entry + 24, tkvi_xxh64_end(&s->sum));
        at += s->n;
        if (mode != TKVI_HASHES) continue;
        s->mode = TKVI_WRITES;
        tkvi_emit(s, entry, sizeof entry);
        tkvi_xxh64_add(&s->index, entry, sizeof entry);
    }
    *end = at;
    return n;
}

static void tkvi_emit_end(tkvi_saver *s, size_t index_at, uint32_t n) {
    uint8_t end[TKVI_SAVED_END] = {0};
    tkvi_store64(end, (uint64_t)index_at);
    tkvi_store32(end + 8, n);
    tkvi_store32(end + 12, TKVI_SAVED_VERSION);
    tkvi_xxh64_add(&s->index, end, 16);
    tkvi_store64(end + 16, tkvi_xxh64_end(&s->index));
    memcpy(end + 24, "TKVSEND", 7);
    s->mode = TKVI_WRITES;
    tkvi_emit(s, end, sizeof end);
}

static tkv_status tkvi_check_save(tkv_cache *kv, const tkv_save_params *p) {
    int layer;
    if (!tkvi_has_seq(kv, p->seq)) return tkvi_refuse_seq(kv, p->seq);
    if (kv->seq[p->seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence", p->seq, "");
    if (p->n_tokens < 0 || (p->n_tokens > 0 && !p->tokens) || (p->model_bytes && !p->model))
        return tkvi_fail(kv, TKV_ERR_ARG, "tokens or model are missing", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, p->seq, layer);
        const uint32_t *ids = tkvi_ids(kv, p->seq, layer);
        int i;
        for (i = 0; i < list->n; i++)
            if (tkvi_is_discarded(tkvi_block_of(kv, ids[i])))
                return tkvi_fail(kv, TKV_ERR_NO_SOURCE, "a block is discarded; recompute it first: layer",
                                 layer, "");
    }
    return TKV_OK;
}

/* The largest table that tkvi_emit_tables saves. */
static size_t tkvi_most_table_bytes(const tkv_cache *kv) {
    size_t most = 0;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (kv->tables.plan[layer].stored_layer == layer) {
            const size_t bytes = tkvi_parts_bytes(tkvi_geometry_of(kv, layer), tkvi_table_parts(kv, layer));
            most = bytes > most ? bytes : most;
        }
    return most;
}

/* Writes all to s->buf or s->write; `size` bytes are there. Both NULL: counts. */
static tkv_status tkvi_save(tkvi_saver *s, size_t size, size_t *needed) {
    const size_t table = tkvi_most_table_bytes(s->kv);
    size_t index_at;
    const uint32_t n = tkvi_emit_sections(s, TKVI_COUNTS, &index_at);
    index_at += tkvi_gap_to(index_at, 64);
    s->total = index_at + (size_t)n * TKVI_SAVED_SECTION + TKVI_SAVED_END;
    if (needed) *needed = s->total;
    if (!s->buf && !s->write) return TKV_OK;
    if (s->buf && size < s->total)
        return tkvi_fail(s->kv, TKV_ERR_CAPACITY, "the buffer is too small; bytes needed:", (int64_t)s->total,
                         "");
    if (table && !(s->table = (uint8_t *)tkvi_get(&s->kv->heap, table)))
        return tkvi_refuse_no_memory(s->kv, "no memory to save sequence", s->p->seq, "");
    (void)tkvi_emit_sections(s, TKVI_WRITES, &index_at);
    s->mode = TKVI_WRITES;
    tkvi_emit_zeros(s, tkvi_gap_to(index_at, 64));
    index_at += tkvi_gap_to(index_at, 64);
    if (!s->st) (void)tkvi_emit_sections(s, TKVI_HASHES, &size);
    if (!s->st) tkvi_emit_end(s, index_at, n);
    if (table) tkvi_put(&s->kv->heap, s->table, table);
    return s->st ? s->st : tkvi_ok(s->kv);
}

TKV_API tkv_status tkv_seq_save(tkv_cache *kv, const tkv_save_params *p, void *buf, size_t size,
                                size_t *needed) {
    tkvi_saver s;
    tkv_status st;
    if (!kv || !p || (!buf && !needed)) return TKV_ERR_ARG;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    st = tkvi_check_save(kv, p);
    if (st) return st;
    memset(&s, 0, sizeof s);
    s.kv = kv;
    s.p = p;
    s.buf = (uint8_t *)buf;
    return tkvi_save(&s, size, needed);
}

TKV_API tkv_status tkv_seq_save_to(tkv_cache *kv, const tkv_save_params *p, tkv_write_bytes write,
                                   void *user) {
    tkvi_saver s;
    tkv_status st;
    if (!kv || !p || !write) return TKV_ERR_ARG;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    st = tkvi_check_save(kv, p);
    if (st) return st;
    memset(&s, 0, sizeof s);
    s.kv = kv;
    s.p = p;
    s.write = write;
    s.user = user;
    return tkvi_save(&s, 0, NULL);
}

#endif /* TKVI_PERSIST_SAVE_H */
