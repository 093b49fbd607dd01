/*
 * persist/load.h - tkv_seq_load, tkv_seq_load_from: read a saved sequence (persist/saved.h) into an empty one, or a
 * whole cache into a new one.
 *
 *     verify     frame, checksums, model, then every number of every list and table; nothing has changed until then
 *     provide    versions for the tables, entries, slots, states; a failure changes no token
 *     place      tables, blocks, entries, states; tkv_check's rules for lists have the last word
 *
 * Tables are known by their bytes. A table that the layer has already is not stored twice. Without a free version the
 * blocks of one are coded again with the layer's current table: those of the cache first (reclaim/versions.h), else
 * those of the file. A whole cache gets its versions as they were.
 */
#ifndef TKVI_PERSIST_LOAD_H
#define TKVI_PERSIST_LOAD_H

#include "persist/reader.h"
#include "report/info.h"
#include "step/fork.h"
#include "step/turns.h"

typedef struct tkvi_loader {
    tkv_cache *kv;
    const tkv_load_params *p;
    tkvi_reader from;
    int flags, n_tokens;  /* of the head */
    int is_cache;         /* 1: a whole cache is loaded */
    int seq;              /* the sequence that is being loaded */
    uint16_t attached;    /* 1 + place of the file in tkvi_pool.attached; 0: nothing is attached */
    tkvi_numbers numbers; /* of a whole cache */
    tkv_load_info info;
} tkvi_loader;

static tkv_status tkvi_refuse_file(tkvi_loader *l, const char *why) {
    return tkvi_fail(l->kv, TKV_ERR_DATA, why, 0, NULL);
}

static tkv_status tkvi_refuse_saved_layer(tkvi_loader *l, const char *why, int layer) {
    return tkvi_fail(l->kv, TKV_ERR_DATA, why, layer, "");
}

static tkvi_section tkvi_loaded_section(const tkvi_loader *l, int kind, int number) {
    return tkvi_find_section(&l->from.file, kind, number, NULL);
}

/* The first sequence to load, and the end of those to load. */
static int tkvi_first_loaded_seq(const tkvi_loader *l) { return l->is_cache ? 0 : l->p->seq; }
static int tkvi_loaded_seqs_end(const tkvi_loader *l) {
    return l->is_cache ? l->kv->tables.cfg.limits.max_seqs : l->p->seq + 1;
}

/* Opens the last save, and checks all sections. info.end is 0 if there is none. */
static tkv_status tkvi_check_frame(tkvi_loader *l, size_t size) {
    const uint8_t *bytes = l->from.bytes;
    const char *fault = NULL;
    tkv_status st = TKV_OK;
    if (!bytes) st = tkvi_keep_last_save(&l->from, size, l->p->recover, &fault);
    else if (l->p->recover) fault = tkvi_open_last_save(&l->from.file, bytes, size);
    else fault = tkvi_open_save(&l->from.file, bytes, size);
    if (st) return st;
    l->info.end = fault ? 0 : l->from.file.end;
    if (!fault && bytes) fault = tkvi_find_section_fault(&l->from.file);
    return fault ? tkvi_refuse_file(l, fault) : TKV_OK;
}

/* >>model */
static tkv_status tkvi_refuse_saved_model(tkvi_loader *l, const char *why, int layer) {
    return tkvi_fail(l->kv, TKV_ERR_CONFIG, why, layer, layer < 0 ? NULL : "");
}

/* Compares the options of formats. *n: how many the file has. Options that it lacks had their defaults. */
static tkv_status tkvi_check_saved_options(tkvi_loader *l, const tkvi_section *s, size_t *n) {
    const uint32_t count = s->n < 4 ? 257 : tkvi_load32(s->at);
    int i;
    if (count > 256 || s->n < 4u + 4u * (size_t)count)
        return tkvi_refuse_file(l, "the saved sequence has no options");
    *n = (size_t)count;
    for (i = 0; i < TKVI_OPTIONS; i++) {
        const tkvi_row *row = &tkvi_option_rows[i];
        const int here = tkvi_member_int(&l->kv->tables.cfg.format, row->offset);
        const int saved = i < (int)count ? tkvi_saved_int(s->at + 4 + 4 * i) : row->standard;
        if (here != saved && tkvi_is_option_of_bytes(row))
            return tkvi_fail(l->kv, TKV_ERR_CONFIG, row->name, here,
                             " in format options here, and another value where the sequence was saved");
    }
    for (i = TKVI_OPTIONS; i < (int)count; i++)
        if (tkvi_load32(s->at + 4 + 4 * i))
            return tkvi_refuse_saved_model(l, "it was saved with an option of formats that is unknown here",
                                           -1);
    return TKV_OK;
}

static tkv_status tkvi_check_model(tkvi_loader *l) {
    const tkv_cache *kv = l->kv;
    const int n_layers = kv->tables.cfg.model.n_layers;
    const tkvi_section head = tkvi_loaded_section(l, TKVI_SAVED_HEAD_KIND, 0),
                       model = tkvi_loaded_section(l, TKVI_SAVED_MODEL, 0);
    const uint8_t *at;
    size_t n = 0;
    tkv_status st;
    int i;
    if (head.n != TKVI_SAVED_HEAD || !model.at) return tkvi_refuse_file(l, "the saved sequence has no head");
    if (tkvi_load64(head.at + 16) != tkvi_xxh64(0, (const uint8_t *)l->p->model, l->p->model_bytes))
        return tkvi_refuse_saved_model(l, "the sequence was saved with another model", -1);
    if (tkvi_load32(head.at + 24) != (uint32_t)n_layers)
        return tkvi_refuse_saved_model(l, "the sequence was saved with another number of layers", -1);
    st = tkvi_check_saved_options(l, &model, &n);
    if (st) return st;
    at = model.at + 4 + 4 * n;
    if (model.n != 4 + 4 * n + 24u * (size_t)n_layers)
        return tkvi_refuse_file(l, "the saved model has a wrong size");
    for (i = 0; i < n_layers; i++, at += 24) {
        const tkvi_plan *p = &kv->tables.plan[i];
        if ((int)tkvi_load32(at) != p->stored_layer || !tkvi_has_geometry(at + 4, &p->geometry))
            return tkvi_refuse_saved_model(l, "the sequence was saved with other heads or channels in layer",
                                           i);
        if (tkvi_load64(at + 16) != tkvi_rope_hash(p->rope))
            return tkvi_refuse_saved_model(l, "the sequence was saved with another RoPE in layer", i);
    }
    l->flags = (int)tkvi_load32(head.at + 32);
    l->n_tokens = tkvi_saved_int(head.at + 36);
    if (l->flags & ~(TKVI_SAVED_HAS_META | TKVI_SAVED_HAS_SCORES | TKVI_SAVED_IS_CACHE))
        return tkvi_refuse_file(l, "unknown flags");
    if (((l->flags & TKVI_SAVED_IS_CACHE) != 0) != l->is_cache)
        return tkvi_refuse_saved_model(l,
                                       l->is_cache ? "one sequence was saved: load it as a sequence"
                                                   : "a whole cache was saved: load it with TKV_ALL_SEQS",
                                       -1);
    return TKV_OK;
}

/* >>lists */
/* Finds the list of a layer of the sequence, and checks its sizes. In a whole cache an empty one has no section. */
static tkv_status tkvi_open_list(tkvi_loader *l, int layer, tkvi_saved_list *out) {
    const int number = l->is_cache ? l->seq * l->kv->tables.cfg.model.n_layers + layer : layer;
    const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_LISTS, number);
    const char *fault;
    memset(out, 0, sizeof *out);
    out->is_cache = l->is_cache;
    out->seq = l->seq;
    if (l->is_cache && !s.at) return TKV_OK;
    fault = tkvi_open_saved_list(s, l->flags, l->seq, out);
    return fault ? tkvi_refuse_saved_layer(l, fault, layer) : TKV_OK;
}

/* Returns the fault of one saved entry, or NULL. tier: by its place in the list. */
static const char *tkvi_find_entry_fault(const tkvi_loader *l, tkvi_saved_list *list, int i, int tier) {
    tkvi_saved_holder first, other;
    const tkvi_entry e = tkvi_read_entry(list, i, &first);
    const uint8_t *at = tkvi_run_of_entry(list, i);
    const int64_t end = i + 1 < list->n ? tkvi_saved_start(list, i + 1) : list->len,
                  tokens = tkvi_saved_tokens(list, i, &e);
    if (at[24] > TKVI_BLOCK || e.first_slot > TKVI_BLOCK || e.end_slot > TKVI_BLOCK || e.has_anchors > 1 ||
        !tkvi_are_zeros(at + 30, 2) || (tkvi_saved_int(at + 12) == 1 ? at[29] > 0 : at[29] < 1))
        return "an entry has a number that it cannot have, layer";
    if (e.tier != tier || e.has_anchors != (i < list->anchors)) return "an entry is not in its tier, layer";
    if (first.i < 0 || first.seq < 0 || first.seq > list->seq || (first.seq == list->seq && first.i > i))
        return "an entry names no block, layer";
    if (!tkvi_is_own_block(list, i, &first) && e.has_anchors) return "an entry names no block, layer";
    if (first.seq == list->seq && first.i < i) {
        (void)tkvi_read_entry(list, first.i, &other);
        if (!list->is_cache && !tkvi_is_same_holder(&other, &first)) return "an entry names no block, layer";
    }
    if (e.start < 0 || e.start > TKVI_FOREVER || (i >= list->anchors && end <= e.start))
        return "entries are out of order, layer";
    if (tokens < 1 || tokens > TKVI_BLOCK || e.first_slot >= tokens)
        return "an entry has slots that no token can have, layer";
    if ((e.n_packed || e.has_anchors) && (!tkvi_keeps_token_meta(&l->kv->tables.cfg) || !list->meta))
        return "a list of indices needs cfg.evict or cfg.importance.sample_every here, layer";
    if (!TKVI_HAS_EVICT && e.sink_mask) return "a named sink needs a build with eviction, layer";
    if ((e.shift || e.turned) && !TKVI_HAS_MOVES) return "moved tokens need a build with moves, layer";
    if (e.shift < -TKVI_FOREVER || e.shift > TKVI_FOREVER || e.turned < -TKVI_FOREVER ||
        e.turned > TKVI_FOREVER || (!list->is_moved && (e.shift || e.turned)))
        return "a token has moved too far, layer";
    return NULL;
}

/* Returns the fault of the token_meta of a saved entry, or NULL. */
static const char *tkvi_find_meta_fault(tkvi_saved_list *list, int i) {
    const uint8_t *at = list->meta + (size_t)i * list->meta_bytes;
    tkvi_saved_holder first;
    int t;
    const tkvi_entry e = tkvi_read_entry(list, i, &first);
    for (t = 0; t < e.n_packed && e.has_anchors; t++)
        if (t >= TKVI_ANCHOR_SLOTS || tkvi_saved_int(at + 40 + 4 * t) < 0 ||
            tkvi_saved_int(at + 40 + 4 * t) >= list->len)
            return "an anchor has an index that no token has, layer";
    if (tkvi_saved_int(at + 24) < 0 || tkvi_saved_int(at + 28) < 0 || tkvi_saved_int(at + 32) < 0 ||
        tkvi_load32(at + 36))
        return "an entry has a number that it cannot have, layer";
    return NULL;
}

/* The tier of entry i by its place in the list. */
static int tkvi_saved_tier(const tkvi_saved_list *list, int i) {
    i -= list->sinks;
    return i < 0 || i >= list->archive + list->warm ? TKV_TIER_HOT
           : i < list->archive                      ? TKV_TIER_ARCHIVE
                                                    : TKV_TIER_WARM;
}

/* Checks a run of entries from i on: the first and the last one. Those between them are as these are. */
static const char *tkvi_find_run_fault(const tkvi_loader *l, tkvi_saved_list *list, int i, int *n_blocks) {
    const uint8_t *at = tkvi_run_of_entry(list, i);
    const int n = tkvi_saved_int(at + 12), last = i + n - 1;
    const char *fault = tkvi_find_entry_fault(l, list, i, tkvi_saved_tier(list, i));
    tkvi_saved_holder first;
    if (fault) return fault;
    (void)tkvi_read_entry(list, i, &first);
    if (n > 1) {
        if ((i < list->sinks) != (last < list->sinks) || at[28] || (first.seq == list->seq && first.i != i))
            return "entries that repeat are not alike, layer";
        fault = tkvi_find_entry_fault(l, list, last, tkvi_saved_tier(list, last));
    }
    *n_blocks += tkvi_is_own_block(list, i, &first) ? n : 0;
    return fault;
}

/* 1 if blocks of a tier age no further, at any level: reclaim may change the level while the file is placed. */
static int tkvi_is_last_tier(const tkv_cache *kv, int layer, int tier) {
    const tkvi_tier_spec *specs = tkvi_tier_specs_of(&kv->tables, layer);
    int i, is_last = 1;
    for (i = 0; i < kv->tables.n_levels && tier != TKV_TIER_ARCHIVE; i++)
        is_last &= (tier == TKV_TIER_HOT ? specs[i].hot : specs[i].warm) == TKVI_FOREVER;
    return is_last;
}

/* 1 if a saved block stays in the file. i: the first entry with it. Blocks that age further must be in RAM, and so
 * must sinks and the two newest blocks. */
static int tkvi_stays_in_file(const tkvi_loader *l, int layer, const tkvi_saved_list *list, int i) {
    return TKVI_HAS_ATTACH && l->p->attach && i >= list->sinks && i + 2 < list->n &&
           tkvi_is_last_tier(l->kv, layer, tkvi_saved_tier(list, i));
}

/* A record, where it lies or in the room. Checks its checksum, and the zeros behind it. Returns NULL if they are wrong,
 * or if it cannot be read. */
static const uint8_t *tkvi_verify_record(tkvi_loader *l, const tkvi_layout *c, uint64_t at) {
    const size_t n = c->bytes.total, all = tkvi_saved_record_bytes(c);
    const uint8_t *record = tkvi_bytes_at(&l->from, (size_t)at, all);
    return record && tkvi_xxh64(0, record, n) + at == tkvi_load64(record + n) &&
                   tkvi_are_zeros(record + n + 8, all - n - 8)
               ? record
               : NULL;
}

static tkv_status tkvi_refuse_damaged_block(tkvi_loader *l, int layer) {
    return l->from.has_failed
               ? tkvi_fail(l->kv, TKV_ERR_IO, "the read callback failed at a block of layer", layer, "")
               : tkvi_refuse_saved_layer(l, "the checksum of a block is wrong in layer", layer);
}

/* Checks the numbers of a run of blocks, that this cache has their layout, and where their records lie. */
static tkv_status tkvi_check_saved_blocks(tkvi_loader *l, int layer, const tkvi_saved_list *list, int i) {
    const uint8_t *run = tkvi_saved_blocks(list, i);
    const int64_t repeat = tkvi_saved_repeat(run);
    const uint64_t at = tkvi_load64(run + 16);
    int layout;
    if (run[3] >= TKV_TIER_COUNT || (run[4] >= TKVI_VERSIONS && run[4] != TKVI_NO_VERSION) ||
        (repeat == 1 && run[5]) || !tkvi_are_zeros(run + 6, 2) ||
        (list->is_cache && (tkvi_load16(run + 26) > l->kv->tables.n_layouts ||
                            tkvi_load16(run + 28) > run[2] || tkvi_load16(run + 30))))
        return tkvi_refuse_saved_layer(l, "a block has a number that it cannot have, layer", layer);
    layout = tkvi_layout_of_saved(l->kv, layer, run, list->is_cache);
    if (layout < 0)
        return tkvi_refuse_saved_model(l, "no level of this cache has the formats of a saved block, layer",
                                       layer);
    if (at % 64 || at > l->from.file.end ||
        (l->from.file.end - (size_t)at) / tkvi_saved_record_bytes(&l->kv->tables.layout[layout]) <
            (size_t)repeat)
        return tkvi_refuse_saved_layer(l, "a block lies beyond the end of the file, layer", layer);
    return TKV_OK;
}

/* Checks the records of blocks that do not stay in the file. */
static tkv_status tkvi_check_saved_records(tkvi_loader *l, int layer, tkvi_saved_list *list) {
    tkvi_saved_group g;
    int k;
    memset(&g, 0, sizeof g);
    while (tkvi_next_group(list, &g)) {
        const tkvi_layout *c;
        if (!g.is_own || tkvi_stays_in_file(l, layer, list, g.i)) continue;
        c = &l->kv->tables.layout[tkvi_layout_of_saved(l->kv, layer, g.c.run, list->is_cache)];
        for (k = 0; k < g.n; k++)
            if (!tkvi_verify_record(l, c, tkvi_saved_record_at(&g.c, k, c)))
                return tkvi_refuse_damaged_block(l, layer);
    }
    return TKV_OK;
}

/* Checks all numbers of a layer's list, its records, and that the cache has the layouts of its blocks. */
static tkv_status tkvi_check_saved_list(tkvi_loader *l, int layer) {
    const tkv_cache *kv = l->kv;
    const tkvi_plan *p = &kv->tables.plan[layer];
    tkvi_saved_list list;
    const char *fault = NULL;
    tkv_status st = tkvi_open_list(l, layer, &list);
    int i, n_blocks = 0;
    if (st) return st;
    if (list.len > kv->tables.cfg.limits.max_tokens)
        return tkvi_fail(l->kv, TKV_ERR_CAPACITY, "the sequence has more tokens than max_tokens:", list.len,
                         "");
    if ((int64_t)list.sinks + list.archive + list.warm > list.n || list.anchors > list.sinks ||
        list.expired > list.len || list.chunk_start > list.len || list.is_moved > 1 ||
        (list.n && list.expired == list.len))
        return tkvi_refuse_saved_layer(l, "counts of the list do not fit in layer", layer);
    if (TKVI_HAS_EVICT ? list.anchors != (list.n ? p->n_anchor_blocks : 0) : list.anchors > 0)
        return tkvi_refuse_saved_model(l, "the sequence was saved with another number of anchors, layer",
                                       layer);
    for (i = 0; i < list.n && !fault; i += tkvi_saved_int(tkvi_run_of_entry(&list, i) + 12)) {
        fault = tkvi_find_run_fault(l, &list, i, &n_blocks);
        if (!fault && tkvi_saved_int(tkvi_run_of_entry(&list, i) + 20) && !p->rope)
            fault = "a key has moved, but nothing is known of the RoPE, layer";
    }
    for (i = 0; i < list.n && !fault && list.meta; i++) fault = tkvi_find_meta_fault(&list, i);
    if (!fault && n_blocks != list.n_blocks) fault = "blocks are miscounted in layer";
    if (fault) return tkvi_refuse_saved_layer(l, fault, layer);
    for (i = 0; i < list.n_block_runs && !st; i++) st = tkvi_check_saved_blocks(l, layer, &list, i);
    return st ? st : tkvi_check_saved_records(l, layer, &list);
}

/* >>tables */
typedef struct tkvi_saved_tables {
    int parts, n;
    const uint8_t *at; /* of the first: u32 version, u32 1: current, bytes */
    size_t bytes;      /* of the parts of one */
} tkvi_saved_tables;

static tkv_status tkvi_open_saved_tables(tkvi_loader *l, int layer, tkvi_saved_tables *out) {
    const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_TABLES, layer);
    memset(out, 0, sizeof *out);
    if (s.n < 8 || tkvi_load32(s.at) & ~(uint32_t)tkvi_known_parts() || tkvi_load32(s.at + 4) > TKVI_VERSIONS)
        return tkvi_refuse_saved_layer(l, "there are no tables of layer", layer);
    out->parts = (int)tkvi_load32(s.at);
    out->n = (int)tkvi_load32(s.at + 4);
    out->at = s.at + 8;
    out->bytes = tkvi_parts_bytes(tkvi_geometry_of(l->kv, layer), out->parts);
    return s.n == 8 + (size_t)out->n * (8 + out->bytes)
               ? TKV_OK
               : tkvi_refuse_saved_layer(l, "tables have a wrong size, layer", layer);
}

static const uint8_t *tkvi_saved_table(const tkvi_saved_tables *t, int i) {
    return t->at + (size_t)i * (8 + t->bytes);
}

/* Number of saved blocks with a version of the table. */
static int tkvi_n_blocks_of_version(const tkvi_saved_list *list, uint32_t version) {
    int i, n = 0;
    for (i = 0; i < list->n_block_runs; i++)
        if (tkvi_saved_blocks(list, i)[4] == version) n += tkvi_saved_repeat(tkvi_saved_blocks(list, i));
    return n;
}

/* Counts the blocks of a layer in the file by the version of their table. n[TKVI_VERSIONS]: those with a table. */
static tkv_status tkvi_count_saved_blocks(tkvi_loader *l, int layer, int64_t *n) {
    tkvi_saved_list list;
    int v;
    memset(n, 0, (TKVI_VERSIONS + 1) * sizeof *n);
    for (l->seq = tkvi_first_loaded_seq(l); l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        const tkv_status st = tkvi_open_list(l, layer, &list);
        if (st) return st;
        n[TKVI_VERSIONS] += list.n_blocks - tkvi_n_blocks_of_version(&list, TKVI_NO_VERSION);
        for (v = 0; v < TKVI_VERSIONS; v++) n[v] += tkvi_n_blocks_of_version(&list, (uint32_t)v);
    }
    return TKV_OK;
}

static tkv_status tkvi_check_saved_tables(tkvi_loader *l, int layer) {
    const int need = tkvi_table_parts(l->kv, layer);
    int64_t n_blocks[TKVI_VERSIONS + 1], n = 0;
    tkvi_saved_tables t;
    tkv_status st = tkvi_count_saved_blocks(l, layer, n_blocks);
    int i, current = 0;
    unsigned seen = 0;
    if (!st) st = tkvi_open_saved_tables(l, layer, &t);
    if (st) return st;
    for (i = 0; i < t.n; i++) {
        const uint8_t *at = tkvi_saved_table(&t, i);
        const uint32_t v = tkvi_load32(at);
        const char *fault;
        if (v >= TKVI_VERSIONS || (seen >> v & 1) || tkvi_load32(at + 4) > 1)
            return tkvi_refuse_saved_layer(l, "a table has a wrong version, layer", layer);
        seen |= 1u << v;
        current += (int)tkvi_load32(at + 4);
        fault = tkvi_find_table_fault(l->kv, layer, t.parts, at + 8);
        if (fault) return tkvi_refuse_saved_layer(l, "a saved table is not valid, layer", layer);
        n += n_blocks[v];
        if ((t.parts & need) != need && n_blocks[v])
            return tkvi_refuse_saved_model(l, "the sequence was saved without a part of the tables of layer",
                                           layer);
    }
    if (l->is_cache && t.n && (!need || t.parts != need))
        return tkvi_refuse_saved_model(l, "the cache was saved with other parts of the tables of layer",
                                       layer);
    return n != n_blocks[TKVI_VERSIONS] || current > 1
               ? tkvi_refuse_saved_layer(l, "blocks name a table that was not saved, layer", layer)
               : TKV_OK;
}

/* Where the tables of a layer go. */
typedef struct tkvi_table_map {
    int8_t version
        [TKVI_VERSIONS]; /* by saved table: version here; -1: its blocks are coded again; -2: it is not needed */
    uint8_t is_new[TKVI_VERSIONS]; /* by saved table: 1 must be filled */
    int room;                      /* a free version, to decode the blocks of tables with -1; -1: none */
} tkvi_table_map;

/* 1 if a version of the layer's table has the bytes of a saved one. */
static int tkvi_is_same_table(const tkvi_loader *l, int layer, int version, const tkvi_saved_tables *t,
                              int i) {
    if (!l->kv->tables.version[version].bytes || t->parts != tkvi_table_parts(l->kv, layer)) return 0;
    (void)tkvi_save_table(l->kv, layer, version, t->parts, l->from.room);
    return memcmp(l->from.room, tkvi_saved_table(t, i) + 8, t->bytes) == 0;
}

/* Chooses versions. In a layer without a table the file's current one comes first. */
static tkvi_table_map tkvi_map_tables(const tkvi_loader *l, int layer, const tkvi_saved_list *list,
                                      const tkvi_saved_tables *t) {
    const int has_table = l->kv->tables.current_version[layer] >= 0;
    unsigned used = tkvi_used_versions(l->kv, layer), known = used;
    tkvi_table_map map;
    int i, v, pass;
    memset(&map, 0, sizeof map);
    map.room = -1;
    for (i = 0; i < t->n && l->is_cache; i++) {
        map.version[i] = (int8_t)tkvi_load32(tkvi_saved_table(t, i));
        map.is_new[i] = 1;
    }
    if (l->is_cache) return map;
    for (i = 0; i < t->n; i++) {
        const int is_current = (int)tkvi_load32(tkvi_saved_table(t, i) + 4);
        const int is_needed = tkvi_n_blocks_of_version(list, tkvi_load32(tkvi_saved_table(t, i))) > 0 ||
                              (is_current && !has_table);
        const int is_whole = (t->parts & tkvi_table_parts(l->kv, layer)) == tkvi_table_parts(l->kv, layer);
        map.version[i] = (int8_t)(is_needed && is_whole ? -1 : -2);
        for (v = 0; v < TKVI_VERSIONS && map.version[i] == -1; v++)
            if ((known >> v & 1) && tkvi_is_same_table(l, layer, v, t, i)) map.version[i] = (int8_t)v;
    }
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < t->n; i++) {
            const int is_first = !has_table && tkvi_load32(tkvi_saved_table(t, i) + 4) == 1;
            if (map.version[i] != -1 || is_first == pass) continue;
            v = tkvi_version_outside(used);
            if (v < 0) continue;
            map.version[i] = (int8_t)v;
            map.is_new[i] = 1;
            used |= 1u << v;
        }
    for (i = 0; i < t->n; i++)
        if (map.is_new[i]) map.room = map.version[i]; /* it is filled with its own table last */
    return map;
}

static int tkvi_lacks_version(const tkvi_table_map *map, const tkvi_saved_tables *t) {
    int i, lacks = 0;
    for (i = 0; i < t->n; i++) lacks |= map->version[i] == -1;
    return lacks;
}

/* Provides the versions of a layer. */
static tkv_status tkvi_provide_tables(tkvi_loader *l, int layer) {
    tkvi_saved_list list;
    tkvi_saved_tables t;
    tkvi_table_map map;
    int i;
    if (tkvi_open_list(l, layer, &list) || tkvi_open_saved_tables(l, layer, &t)) return TKV_ERR_DATA;
    map = tkvi_map_tables(l, layer, &list, &t);
    for (i = 0; i < TKVI_VERSIONS && tkvi_lacks_version(&map, &t); i++) {
        tkvi_retire_version(l->kv, layer);
        map = tkvi_map_tables(l, layer, &list, &t);
    }
    if (tkvi_lacks_version(&map, &t) && map.room < 0)
        return tkvi_fail(l->kv, TKV_ERR_CAPACITY, "blocks use every version of the table of layer", layer,
                         "; reset the sequences that hold the oldest");
    for (i = 0; i < t.n; i++)
        if (map.is_new[i] && !tkvi_allocate_version(l->kv, map.version[i])) return tkvi_no_table(l->kv);
    return TKV_OK;
}

static void tkvi_place_table(tkvi_loader *l, int layer, const tkvi_saved_tables *t, int i, int version) {
    tkvi_next_table *next = l->kv->stats.next_table ? &l->kv->stats.next_table[layer] : NULL;
    if (next && next->version == version) next->n_heads = 0; /* heads that were learned ahead are gone */
    tkvi_fill_table(l->kv, layer, version, t->parts, tkvi_saved_table(t, i) + 8);
    tkvi_lay_out_table(l->kv, layer, version);
}

/* >>blocks */
/* Number of the saved table that a run of blocks has; -1: none. */
static int tkvi_table_of_saved(const tkvi_saved_tables *t, const uint8_t *run) {
    int i;
    for (i = 0; run[4] != TKVI_NO_VERSION && i < t->n; i++)
        if (tkvi_load32(tkvi_saved_table(t, i)) == run[4]) return i;
    return -1;
}

/* What a load makes of the blocks of a group. */
typedef struct tkvi_landing {
    const tkvi_layout *saved; /* with the table of version map->room, where the block is coded again */
    int layout;               /* here */
    int table;                /* number of the saved table, of blocks that are coded again; else -1 */
    int is_attached;
} tkvi_landing;

static tkvi_landing tkvi_landing_of(const tkvi_loader *l, int layer, const tkvi_saved_list *list,
                                    const tkvi_saved_tables *t, const tkvi_table_map *map,
                                    const tkvi_saved_group *g) {
    const int base = tkvi_layout_of_saved(l->kv, layer, g->c.run, l->is_cache),
              table = tkvi_table_of_saved(t, g->c.run);
    const int version = table < 0 ? 0 : map->version[table];
    tkvi_landing to;
    to.layout = base + (version >= 0 ? version : l->kv->tables.current_version[layer]);
    to.table = version < 0 ? table : -1;
    to.saved = &l->kv->tables.layout[base + (version >= 0 ? version : map->room)];
    to.is_attached = version >= 0 && tkvi_stays_in_file(l, layer, list, g->i);
    return to;
}

/* Adds the entries and slots of a file to a demand (tkvi_count_entries). The versions of tables are provided. */
static int tkvi_count_saved(tkv_cache *kv, const void *what, tkvi_demand *demand) {
    tkvi_loader l = *(const tkvi_loader *)what;
    int layer, longest = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_saved_group g;
        tkvi_saved_list list;
        tkvi_saved_tables t;
        tkvi_table_map map;
        if (kv->tables.plan[layer].stored_layer != layer || tkvi_open_list(&l, layer, &list) ||
            tkvi_open_saved_tables(&l, layer, &t))
            continue;
        map = tkvi_map_tables(&l, layer, &list, &t);
        longest = tkvi_max(longest, list.n);
        demand->entries += list.n;
        memset(&g, 0, sizeof g);
        while (tkvi_next_group(&list, &g)) {
            tkvi_landing to;
            if (!g.is_own) continue;
            to = tkvi_landing_of(&l, layer, &list, &t, &map, &g);
            if (!to.is_attached) demand->slots[kv->tables.layout[to.layout].size_class] += g.n;
        }
    }
    return longest;
}

static void tkvi_place_meta(tkvi_loader *l, const tkvi_saved_list *list, int i, uint32_t id) {
    tkvi_token_meta *m = l->kv->pool.token_meta ? &l->kv->pool.token_meta[id] : NULL;
    const uint8_t *at = list->meta ? list->meta + (size_t)i * list->meta_bytes : NULL;
    int t;
    if (!TKVI_HAS_EVICT || !m) return;
    memset(m, 0, sizeof *m);
    if (!at) return;
    m->pinned_mask = tkvi_load64(at);
    m->temporary_mask = tkvi_load64(at + 8);
    m->anchored_mask = tkvi_load64(at + 16);
    m->temporary_until = tkvi_saved_int(at + 24);
    m->score_step = l->is_cache ? tkvi_saved_int(at + 28) : tkvi_min(tkvi_saved_int(at + 28), list->len);
    m->moved_at = l->is_cache ? tkvi_saved_int(at + 32) : tkvi_min(tkvi_saved_int(at + 32), list->len + 1);
    for (t = 0; t < TKVI_ANCHOR_SLOTS && l->kv->pool.entry[id].has_anchors; t++)
        m->index.any[t] = tkvi_saved_int(at + 40 + 4 * t);
    for (t = 0; t < TKVI_BLOCK && !l->kv->pool.entry[id].has_anchors; t++)
        m->index.after_start[t] = tkvi_load16(at + 40 + 2 * t);
    for (t = 0; t < TKVI_BLOCK && (l->flags & TKVI_SAVED_HAS_SCORES); t++)
        m->scores[t] = tkvi_load32(at + TKVI_SAVED_META + 4 * t);
}

/* A block gets its bytes in the file as its source, of itself or of its exact copy. */
static void tkvi_place_source(tkvi_loader *l, uint32_t number, tkvi_stored_as what, uint64_t at) {
    tkvi_source_place *source = &l->kv->pool.source[number];
    source->unit = (uint32_t)(at / 64);
    source->file = l->attached;
    source->what = (uint8_t)what;
    source->is_verified = 0;
    l->kv->pool.attached[l->attached - 1].n_sources++;
}

/* 1 if blocks of a layer can have a layout. Its table, if it has one, is in the file. */
static int tkvi_can_have_layout(const tkvi_loader *l, int layer, const tkvi_saved_tables *t, int layout) {
    const tkvi_tier_spec *specs = tkvi_tier_specs_of(&l->kv->tables, layer);
    int i, k, can = 0;
    for (i = 0; i < l->kv->tables.n_levels * TKV_TIER_COUNT; i++) {
        const int base = specs[i / TKV_TIER_COUNT].layout[i % TKV_TIER_COUNT];
        can |= layout == base && !specs[i / TKV_TIER_COUNT].needs_table[i % TKV_TIER_COUNT];
        for (k = 0; k < t->n && specs[i / TKV_TIER_COUNT].needs_table[i % TKV_TIER_COUNT]; k++)
            can |= layout == base + (int)tkvi_load32(tkvi_saved_table(t, k));
    }
    return can;
}

/* Copies a record that was verified. From a callback it is read again, and verified again. Returns 0 if it is wrong. */
static int tkvi_copy_record(tkvi_loader *l, const tkvi_layout *c, uint64_t at, uint8_t *to) {
    const uint8_t *record = l->from.bytes ? l->from.bytes + (size_t)at : tkvi_verify_record(l, c, at);
    if (record) memcpy(to, record, c->bytes.total);
    return record != NULL;
}

/* Makes block k of a group, for its entry. Its record is copied, unless it stays in the file or is to be coded anew.
 * Returns 0 if it is damaged. */
static int tkvi_place_block(tkvi_loader *l, int layer, const tkvi_landing *to, const tkvi_saved_group *g,
                            int k, uint32_t id) {
    tkvi_pool *pool = &l->kv->pool;
    const tkvi_layout *layout = &l->kv->tables.layout[to->layout];
    const uint64_t at = tkvi_saved_record_at(&g->c, k, to->saved);
    const int position = tkvi_saved_first_position(&g->c, k);
    uint32_t number;
    int fits = 1;
    if (to->is_attached) {
        number = tkvi_new_number(pool, id, to->layout, position);
        pool->block[number].page = TKVI_OFFLOADED;
        pool->block[number].slot = 0;
        pool->n_offloaded++;
        tkvi_place_source(l, number, TKVI_ITSELF, at);
        l->info.n_attached++;
    } else {
        uint8_t *slot;
        tkvi_new_block(pool, id, to->layout, position);
        number = pool->entry[id].block;
        slot = tkvi_block_bytes(pool, &pool->block[number]);
        memset(slot, 0, l->kv->tables.size_class[layout->size_class].slot_bytes);
        if (to->table < 0) fits = tkvi_copy_record(l, layout, at, slot);
        if (l->attached && to->table < 0 && tkvi_is_hot_layout(l->kv, layer, to->layout) &&
            !pool->entry[id].has_anchors) {
            tkvi_place_source(l, number, TKVI_COPY, at);
            pool->block[number].copy_layout = (uint16_t)(to->layout + 1);
        }
    }
    pool->block[number].tier = g->c.run[3];
    return fits;
}

/* Makes an entry for a block that an earlier entry of the list has. */
static uint32_t tkvi_place_shared(tkvi_pool *pool, uint32_t first, const tkvi_entry *e, int tokens) {
    const int had = pool->block[pool->entry[first].block].n_shared_slots;
    const uint32_t id = tkvi_share_entry(pool, first, had);
    tkvi_entry *mine = &pool->entry[id];
    const uint32_t next = mine->next_holder;
    *mine = *e;
    mine->next_holder = next;
    mine->block = pool->entry[first].block;
    pool->block[mine->block].n_shared_slots = (uint8_t)tkvi_max(had, tokens);
    return id;
}

/* The entry that was placed for one of the file. TKVI_NIL: there is none yet. */
static uint32_t tkvi_placed_entry(const tkvi_loader *l, int layer, const tkvi_saved_holder *h) {
    const int seq = l->is_cache ? h->seq : l->seq;
    if (seq < 0 || seq >= l->kv->tables.cfg.limits.max_seqs || h->i < 0 ||
        h->i >= tkvi_list_of(l->kv, seq, layer)->n)
        return TKVI_NIL;
    return tkvi_ids(l->kv, seq, layer)[h->i];
}

/* What only a whole cache knows of a block. */
static void tkvi_place_block_history(const tkvi_loader *l, int layer, const tkvi_saved_tables *t,
                                     const uint8_t *run, tkvi_block *b) {
    const int previous = tkvi_load16(run + 26);
    if (previous && tkvi_can_have_layout(l, layer, t, previous - 1)) b->previous_layout = (uint16_t)previous;
    b->n_shared_slots = (uint8_t)tkvi_load16(run + 28);
}

/* Makes the entries of a layer, and their blocks. Those to be coded again have no bytes yet. All memory is provided.
 * Returns 0 if an entry names no block, or a block is damaged. */
static int tkvi_place_entries(tkvi_loader *l, int layer, tkvi_saved_list *from, const tkvi_saved_tables *t,
                              const tkvi_table_map *map) {
    tkv_cache *kv = l->kv;
    tkvi_list *list = tkvi_list_of(kv, l->seq, layer);
    uint32_t *ids = tkvi_ids(kv, l->seq, layer);
    tkvi_saved_group g;
    int k, fits = 1;
    memset(&g, 0, sizeof g);
    while (tkvi_next_group(from, &g)) {
        tkvi_landing to;
        if (g.is_own) to = tkvi_landing_of(l, layer, from, t, map, &g);
        for (k = 0; k < g.n; k++) {
            tkvi_entry e = g.e;
            uint32_t *id = &ids[g.i + k];
            int tokens;
            e.start += k * g.step;
            tokens = (int)tkvi_saved_tokens(from, g.i + k, &e);
            if (!g.is_own) {
                const uint32_t first = tkvi_placed_entry(l, layer, &g.first);
                if (first == TKVI_NIL) return 0;
                *id = tkvi_place_shared(&kv->pool, first, &e, tokens);
            } else {
                *id = tkvi_take_entry(&kv->pool);
                kv->pool.entry[*id] = e;
                fits &= tkvi_place_block(l, layer, &to, &g, k, *id);
                tkvi_block_of(kv, *id)->n_shared_slots = (uint8_t)tokens;
                if (l->is_cache) tkvi_place_block_history(l, layer, t, g.c.run, tkvi_block_of(kv, *id));
            }
            list->n = g.i + k + 1;
            tkvi_place_meta(l, from, g.i + k, *id);
        }
    }
    list->sinks = from->sinks;
    list->archive = from->archive;
    list->warm = from->warm;
    if (TKVI_HAS_EVICT) list->anchors = from->anchors;
    list->len = list->step_len = from->len;
    list->expired = from->expired;
    list->chunk_start = from->chunk_start;
    list->is_moved = from->is_moved;
    return fits;
}

/* Codes the blocks of a saved table again; version map->room has it. Returns 0 if one is damaged. */
static int tkvi_recode_saved(tkvi_loader *l, int layer, tkvi_saved_list *from, const tkvi_saved_tables *t,
                             const tkvi_table_map *map, int table) {
    tkv_cache *kv = l->kv;
    const uint32_t *ids = tkvi_ids(kv, l->seq, layer);
    tkvi_saved_group g;
    int k;
    memset(&g, 0, sizeof g);
    while (tkvi_next_group(from, &g)) {
        tkvi_landing to;
        if (!g.is_own) continue;
        to = tkvi_landing_of(l, layer, from, t, map, &g);
        for (k = 0; k < g.n && to.table == table; k++) {
            const tkvi_block *b = tkvi_block_of(kv, ids[g.i + k]);
            const uint8_t *record = tkvi_verify_record(l, to.saved, tkvi_saved_record_at(&g.c, k, to.saved));
            tkvi_recoding r;
            if (!record) return 0;
            r.kv = kv;
            r.from = to.saved;
            r.to = &kv->tables.layout[to.layout];
            r.layer = layer;
            r.start = b->first_position;
            r.live_mask =
                tkvi_slots_before((int)tkvi_saved_tokens(from, g.i + k, &kv->pool.entry[ids[g.i + k]]));
            if (record != l->from.room) memcpy(l->from.room, record, to.saved->bytes.total);
            tkvi_recode_heads(&r, l->from.room, tkvi_block_bytes(&kv->pool, b));
            l->info.n_recoded++;
        }
    }
    return 1;
}

/* Places the new tables of a layer. had: version of the current table before, or -1. */
static void tkvi_place_new_tables(tkvi_loader *l, int layer, const tkvi_saved_tables *t,
                                  const tkvi_table_map *map, int had) {
    int i;
    for (i = 0; i < t->n; i++) {
        if (!map->is_new[i]) continue;
        tkvi_place_table(l, layer, t, i, map->version[i]);
        l->info.n_tables++;
        if (had >= 0 || tkvi_load32(tkvi_saved_table(t, i) + 4) != 1) continue;
        tkvi_table_use(l->kv, layer, map->version[i]);
        if (l->kv->stats.tokens_seen && !l->is_cache) tkvi_plan_next_table(l->kv, layer, 0);
    }
}

/* Places tables, entries and blocks of a layer. Returns 0 if a block is damaged. */
static int tkvi_place_layer(tkvi_loader *l, int layer) {
    tkvi_saved_list list;
    tkvi_saved_tables t;
    tkvi_table_map map;
    int i, fits;
    if (tkvi_open_list(l, layer, &list) || tkvi_open_saved_tables(l, layer, &t)) return 0;
    map = tkvi_map_tables(l, layer, &list, &t);
    tkvi_place_new_tables(l, layer, &t, &map, l->kv->tables.current_version[layer]);
    fits = tkvi_place_entries(l, layer, &list, &t, &map);
    for (i = 0; i < t.n && fits; i++) {
        if (map.version[i] != -1) continue;
        tkvi_place_table(l, layer, &t, i, map.room);
        fits = tkvi_recode_saved(l, layer, &list, &t, &map, i);
    }
    for (i = 0; i < t.n; i++)
        if (map.is_new[i] && map.version[i] == map.room) tkvi_place_table(l, layer, &t, i, map.room);
    return fits;
}

/* >>a whole cache */
/* Links the holders of each shared block of a layer as they were. Returns 0 if the file names no rings. */
static int tkvi_place_rings(tkvi_loader *l, int layer) {
    tkvi_pool *pool = &l->kv->pool;
    int64_t n_shared = 0, n_first = 0;
    int i;
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        const uint32_t *ids = tkvi_ids(l->kv, l->seq, layer);
        tkvi_saved_list list;
        if (tkvi_open_list(l, layer, &list)) return 0;
        for (i = 0; i < list.n; i++) {
            tkvi_entry *e = &pool->entry[ids[i]];
            tkvi_saved_holder next = tkvi_saved_next_holder(&list, i), first;
            const uint32_t id = tkvi_placed_entry(l, layer, &next),
                           is_first = tkvi_load32(tkvi_run_of_entry(&list, i) + 60);
            if (id == TKVI_NIL || pool->entry[id].block != e->block || is_first > 1) return 0;
            if (pool->block[e->block].refs == 1) continue;
            (void)tkvi_read_entry(&list, i, &first);
            n_shared += tkvi_is_own_block(&list, i, &first);
            n_first += is_first;
            e->next_holder = id;
            e->is_first = (uint8_t)is_first;
        }
    }
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l); l->seq++)
        for (i = 0; i < tkvi_list_of(l->kv, l->seq, layer)->n; i++) {
            const uint32_t id = tkvi_ids(l->kv, l->seq, layer)[i];
            uint32_t n = 1, other = pool->entry[id].next_holder;
            if (!pool->entry[id].is_first) continue;
            for (; other != id && !pool->entry[other].is_first; n++) {
                if (n >= pool->block[pool->entry[id].block].refs) return 0;
                other = pool->entry[other].next_holder;
            }
            if (other != id || n != pool->block[pool->entry[id].block].refs) return 0;
        }
    return n_first == n_shared;
}

static int tkvi_place_layer_of_all(tkvi_loader *l, int layer) {
    tkvi_saved_list list;
    tkvi_saved_tables t;
    tkvi_table_map map;
    l->seq = 0;
    if (tkvi_open_list(l, layer, &list) || tkvi_open_saved_tables(l, layer, &t)) return 0;
    map = tkvi_map_tables(l, layer, &list, &t);
    tkvi_place_new_tables(l, layer, &t, &map, -1);
    for (; l->seq < tkvi_loaded_seqs_end(l); l->seq++)
        if (tkvi_open_list(l, layer, &list) || !tkvi_place_entries(l, layer, &list, &t, &map)) return 0;
    return tkvi_place_rings(l, layer);
}

/* The numbers of a whole cache, to be read. n_entries: of the lists in the file. */
static tkvi_numbers tkvi_saved_numbers(const tkvi_loader *l, int64_t n_entries) {
    const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_CACHE, 0);
    const tkvi_pool *pool = &l->kv->pool;
    tkvi_numbers io;
    memset(&io, 0, sizeof io);
    io.kv = l->kv;
    io.mode = TKVI_CHECKS_NUMBERS;
    io.at = s.at;
    io.end = s.at ? s.at + s.n : NULL;
    io.most_entries =
        16 * n_entries + 4096 + (int64_t)pool->block_cap + pool->page_cap + l->kv->work.choice_cap;
    if (!s.at) io.is_wrong = 1;
    return io;
}

/* Entries of all lists in the file. */
static int64_t tkvi_n_saved_entries(tkvi_loader *l) {
    tkvi_saved_list list;
    int64_t n = 0;
    int layer;
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l); l->seq++)
        for (layer = 0; layer < l->kv->tables.cfg.model.n_layers; layer++)
            if (l->kv->tables.plan[layer].stored_layer == layer && !tkvi_open_list(l, layer, &list))
                n += list.n;
    return n;
}

static tkv_status tkvi_check_saved_cache(tkvi_loader *l, tkvi_numbers *io) {
    *io = tkvi_saved_numbers(l, tkvi_n_saved_entries(l));
    if (!io->is_wrong) tkvi_visit_cache(io);
    if (!io->is_wrong && io->is_other)
        return tkvi_refuse_saved_model(
            l, "the cache was saved with another config; create this one with the same", -1);
    if (io->is_wrong || io->at != io->end)
        return tkvi_refuse_file(l, "the numbers of the saved cache are not valid");
    io->mode = TKVI_PROVIDES_NUMBERS;
    return TKV_OK;
}

/* Visits the numbers again, from the first. */
static void tkvi_visit_again(const tkvi_loader *l, tkvi_numbers *io, tkvi_number_mode mode) {
    io->mode = mode;
    io->at = tkvi_loaded_section(l, TKVI_SAVED_CACHE, 0).at;
    tkvi_visit_cache(io);
}

/* Empties a cache that a whole load has begun to fill, in which rings may be broken. */
static void tkvi_empty_cache(tkvi_loader *l, unsigned had_versions) {
    tkv_cache *kv = l->kv;
    tkvi_pool *pool = &kv->pool;
    const int n_layers = kv->tables.cfg.model.n_layers;
    uint32_t i;
    int seq, v, c;
    memset(kv->list, 0, (size_t)kv->tables.cfg.limits.max_seqs * (size_t)n_layers * sizeof *kv->list);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) tkvi_drop_states(&kv->states, seq, 0);
    memset(kv->states.is_stateful, 0, (size_t)n_layers);
    kv->states.n_stateful = 0;
    for (i = 0; i < pool->block_cap; i++) pool->block[i].refs = pool->entry[i].in_use = 0;
    pool->n_entries = pool->n_blocks = pool->n_offloaded = pool->n_late = 0;
    pool->free_block = pool->free_entry = pool->free_page = TKVI_NIL;
    tkvi_link_free_blocks(pool, 0);
    pool->n_free_pages = 0;
    for (i = 0; i < pool->n_pages; i++) {
        if (kv->tables.cfg.host.wipe_freed) tkvi_wipe(pool->page[i].bytes, kv->tables.page_bytes);
        pool->page[i].taken = 0;
        pool->page[i].used = 0;
        tkvi_free_page(pool, i);
    }
    for (c = 0; c < kv->tables.n_classes; c++) {
        pool->used_slots[c] = 0;
        pool->partial_pages[c] = TKVI_NIL;
    }
    if (pool->source) memset(pool->source, 0, pool->source_cap * sizeof *pool->source);
    if (l->attached) pool->attached[l->attached - 1].n_sources = 1;
    memset(kv->tables.current_version, -1, (size_t)n_layers);
    for (v = 0; v < TKVI_VERSIONS; v++) {
        if (had_versions >> v & 1) continue;
        tkvi_put(&kv->heap, kv->tables.version[v].bytes, kv->tables.version_bytes);
        memset(&kv->tables.version[v], 0, sizeof kv->tables.version[v]);
    }
}

/* >>states and tokens */
typedef struct tkvi_saved_state {
    int layer, n_tokens;
    int shared_with; /* of a whole cache: the sequence that has its bytes; -1: they are here */
    const uint8_t *bytes;
    size_t size;
} tkvi_saved_state;

/* Reads the state at *at. Returns 0 if it does not fit into the section. */
static int tkvi_read_saved_state(const tkvi_section *s, size_t *at, tkvi_saved_state *out) {
    uint64_t n;
    if (s->n - *at < TKVI_SAVED_STATE) return 0;
    out->layer = tkvi_saved_int(s->at + *at);
    out->n_tokens = tkvi_saved_int(s->at + *at + 4);
    out->shared_with = -1;
    out->size = 0;
    n = tkvi_load64(s->at + *at + 8);
    *at += TKVI_SAVED_STATE;
    if (n >= TKVI_SHARED_STATE && n - TKVI_SHARED_STATE < TKVI_FOREVER) {
        out->shared_with = (int)(n - TKVI_SHARED_STATE);
        return 1;
    }
    if (n > s->n - *at || tkvi_gap_to((size_t)n, 8) > s->n - *at - (size_t)n) return 0;
    out->bytes = s->at + *at;
    out->size = (size_t)n;
    *at += (size_t)n + tkvi_gap_to((size_t)n, 8);
    return 1;
}

/* Checks the states of the sequence. */
static tkv_status tkvi_check_saved_states(tkvi_loader *l) {
    const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_STATES, l->is_cache ? l->seq : 0);
    tkvi_saved_state state;
    size_t at = 0;
    if (!s.at)
        return l->is_cache ? TKV_OK : tkvi_refuse_file(l, "the saved sequence has no section of states");
    if (s.n && !TKVI_HAS_STATES)
        return tkvi_refuse_saved_model(l, "TKV_NO_STATES leaves out the states of this file", -1);
    while (at < s.n)
        if (!tkvi_read_saved_state(&s, &at, &state) || state.layer < 0 ||
            state.layer >= l->kv->tables.cfg.model.n_layers || state.n_tokens < 1 ||
            state.n_tokens > l->kv->tables.cfg.limits.max_tokens ||
            (state.shared_with < 0 ? !state.size : !l->is_cache || state.shared_with >= l->seq))
            return tkvi_refuse_file(l, "a saved state is not valid");
    return TKV_OK;
}

static tkv_status tkvi_place_states(tkvi_loader *l) {
    const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_STATES, 0);
    tkvi_saved_state state;
    size_t at = 0;
    tkv_status st = TKV_OK;
    while (!st && at < s.n && tkvi_read_saved_state(&s, &at, &state))
        st = tkv_seq_put_state(l->kv, l->seq, state.layer, state.n_tokens, state.bytes, state.size);
    return st;
}

/* Places a state of a whole cache. Nothing makes room for it: the saved cache had room. */
static tkv_status tkvi_place_state_of_all(tkvi_loader *l, const tkvi_saved_state *from) {
    tkvi_states *s = &l->kv->states;
    tkvi_state *state;
    int at;
    if (!tkvi_grow_state_list(s, l->seq, s->list[l->seq].n + 1))
        return tkvi_refuse_no_memory(l->kv, "no memory for the states of sequence", l->seq, "");
    if (from->shared_with >= 0) {
        state = tkvi_find_state(&s->list[from->shared_with], from->layer, from->n_tokens, &at);
        if (!state) return tkvi_refuse_file(l, "a saved state is not valid");
    } else {
        const size_t bytes = tkvi_state_bytes(from->size);
        state = bytes && bytes <= s->limit - s->held_bytes ? tkvi_new_state(s, from->size) : NULL;
        if (!state) return tkvi_refuse_no_memory(l->kv, "no memory for the states of sequence", l->seq, "");
        state->layer = from->layer;
        state->n_tokens = from->n_tokens;
        memcpy(tkvi_bytes_of_state(state), from->bytes, from->size);
    }
    tkvi_list_state(s, l->seq, state);
    return TKV_OK;
}

static tkv_status tkvi_place_states_of_all(tkvi_loader *l) {
    tkvi_saved_state state;
    tkv_status st = TKV_OK;
    for (l->seq = 0; TKVI_HAS_STATES && l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_STATES, l->seq);
        size_t at = 0;
        while (!st && at < s.n && tkvi_read_saved_state(&s, &at, &state))
            st = tkvi_place_state_of_all(l, &state);
    }
    return st;
}

/* Copies the caller's tokens, if they are asked for. */
static void tkvi_take_tokens(const tkvi_loader *l) {
    tkvi_section s = {NULL, 0};
    int i;
    for (i = 0; i < l->n_tokens && l->p->tokens; i++) {
        const int within = i % TKVI_SAVED_TOKENS_AT_ONCE;
        if (!within) s = tkvi_loaded_section(l, TKVI_SAVED_TOKENS, i / TKVI_SAVED_TOKENS_AT_ONCE);
        l->p->tokens[i] = tkvi_saved_int(s.at + 4 * (size_t)within);
    }
}

static tkv_status tkvi_check_saved_tokens(tkvi_loader *l) {
    const int most = TKVI_SAVED_TOKENS_AT_ONCE;
    int i;
    if (l->n_tokens < 0) return tkvi_refuse_file(l, "saved tokens have a wrong size");
    for (i = 0; i <= (l->n_tokens - 1) / most && l->n_tokens; i++)
        if (tkvi_loaded_section(l, TKVI_SAVED_TOKENS, i).n !=
            4u * (size_t)tkvi_min(most, l->n_tokens - i * most))
            return tkvi_refuse_file(l, "saved tokens have a wrong size");
    if (tkvi_loaded_section(l, TKVI_SAVED_TOKENS, i).at)
        return tkvi_refuse_file(l, "saved tokens have a wrong size");
    l->info.n_saved_tokens = l->n_tokens;
    if (l->p->tokens && l->p->token_capacity < l->n_tokens)
        return tkvi_fail(l->kv, TKV_ERR_CAPACITY, "token_capacity is too small; tokens saved:", l->n_tokens,
                         "");
    return TKV_OK;
}

/* >>the whole */
/* Verifies the last save. */
static tkv_status tkvi_verify_save(tkvi_loader *l, size_t size) {
    tkv_status st = tkvi_check_frame(l, size);
    int layer;
    if (!st) st = tkvi_check_model(l);
    if (!st) st = tkvi_check_saved_tokens(l);
    for (layer = 0; layer < l->kv->tables.cfg.model.n_layers && !st; layer++) {
        if (l->kv->tables.plan[layer].stored_layer != layer) continue;
        for (l->seq = tkvi_first_loaded_seq(l); !st && l->seq < tkvi_loaded_seqs_end(l); l->seq++)
            st = tkvi_check_saved_list(l, layer);
        if (!st) st = tkvi_check_saved_tables(l, layer);
    }
    for (l->seq = tkvi_first_loaded_seq(l); !st && l->seq < tkvi_loaded_seqs_end(l); l->seq++)
        st = tkvi_check_saved_states(l);
    if (!st && l->is_cache) st = tkvi_check_saved_cache(l, &l->numbers);
    l->seq = tkvi_first_loaded_seq(l);
    return st;
}

/* Verifies the last save or, with `recover`, the last one that is not damaged. After a crash the end of a save can be
 * in a file, and parts before it not. */
static tkv_status tkvi_verify_file(tkvi_loader *l, size_t size) {
    tkv_status st = tkvi_verify_save(l, size);
    while (st == TKV_ERR_DATA && l->p->recover && l->info.end) st = tkvi_verify_save(l, l->info.end - 64);
    return st;
}

/* Checks what was placed of the sequence by the rules of tkv_check: of a group the first and the last entry, or all
 * with token_meta. */
static tkv_status tkvi_check_placed(tkvi_loader *l) {
    tkvi_checker k;
    tkv_status st = TKV_OK;
    char reason[96] = "";
    int layer, i;
    k.kv = l->kv;
    k.reason = reason;
    k.size = sizeof reason;
    for (layer = 0; layer < l->kv->tables.cfg.model.n_layers && !st; layer++) {
        tkvi_saved_group g;
        tkvi_saved_list list;
        if (l->kv->tables.plan[layer].stored_layer != layer || tkvi_open_list(l, layer, &list)) continue;
        st = tkvi_check_ids(&k, l->seq, layer);
        if (!st) st = tkvi_check_counts(&k, l->seq, layer);
        memset(&g, 0, sizeof g);
        while (!st && tkvi_next_group(&list, &g))
            for (i = 0; i < g.n && !st; i += list.meta ? 1 : tkvi_max(1, g.n - 1))
                st = tkvi_check_entry(&k, l->seq, layer, g.i + i);
    }
    return st ? tkvi_refuse_file(l, reason) : TKV_OK;
}

/* Counts the late blocks of the sequence, each with one of its entries. */
static void tkvi_count_late_blocks(tkv_cache *kv, int seq) {
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < tkvi_list_of(kv, seq, layer)->n; i++)
            kv->pool.n_late += kv->pool.entry[ids[i]].is_first && tkvi_is_late(&kv->pool, ids[i]);
    }
}

static tkv_status tkvi_place_file(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    const int had_loaded = kv->budget.has_loaded, seq = l->p->seq;
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        if (kv->tables.plan[layer].stored_layer == layer && !tkvi_place_layer(l, layer))
            st = tkvi_refuse_damaged_block(l, layer);
    tkvi_count_late_blocks(kv, seq);
    kv->budget.has_loaded = 1;
    if (!st) st = tkvi_check_placed(l);
    if (!st) st = tkvi_place_states(l);
    if (!st) return TKV_OK;
    kv->budget.has_loaded = had_loaded;
    tkvi_clear_seq(kv, seq);
    return st;
}

/* Provides the tables of sources and attached files. The file counts as a source of one block until the load ends. */
static tkv_status tkvi_provide_attached(tkvi_loader *l) {
    tkvi_pool *pool = &l->kv->pool;
    uint32_t i = 0;
    tkvi_attached *longer;
    while (i < pool->n_attached && pool->attached[i].bytes) i++;
    if (i == pool->n_attached) {
        const size_t n = (size_t)i + 4;
        if (n > 0xffff) return tkvi_fail(l->kv, TKV_ERR_CAPACITY, "too many files are attached", 0, NULL);
        longer = (tkvi_attached *)tkvi_get(pool->heap, n * sizeof *longer);
        if (!longer)
            return tkvi_refuse_no_memory(l->kv, "no memory to attach a file to sequence", l->p->seq, "");
        memset(longer, 0, n * sizeof *longer);
        if (pool->attached) memcpy(longer, pool->attached, pool->n_attached * sizeof *longer);
        tkvi_put(pool->heap, pool->attached, pool->n_attached * sizeof *longer);
        pool->attached = longer;
        pool->n_attached = (uint32_t)n;
    }
    if (!tkvi_grow_sources(pool, pool->block_cap ? pool->block_cap : 1))
        return tkvi_refuse_no_memory(l->kv, "no memory to attach a file to sequence", l->p->seq, "");
    pool->attached[i].bytes = l->from.file.bytes;
    pool->attached[i].size = l->from.file.end;
    pool->attached[i].n_sources = 1;
    l->attached = (uint16_t)(i + 1);
    return TKV_OK;
}

/* Provides all that a whole cache had. Nothing is recoded for it: the saved cache had room. */
static tkv_status tkvi_provide_cache(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    tkvi_pool *pool = &kv->pool;
    tkvi_demand demand = tkvi_no_demand();
    tkv_status st = TKVI_HAS_ATTACH && l->p->attach ? tkvi_provide_attached(l) : TKV_OK;
    int64_t pages, n_pages, most_pages;
    int provided = 1, layer;
    if (st) return st;
    tkvi_visit_again(l, &l->numbers, TKVI_PROVIDES_NUMBERS);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_saved_tables t;
        int i;
        if (kv->tables.plan[layer].stored_layer != layer || tkvi_open_saved_tables(l, layer, &t)) continue;
        for (i = 0; i < t.n; i++)
            provided &= tkvi_allocate_version(kv, (int)tkvi_load32(tkvi_saved_table(&t, i)));
    }
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        const int longest = tkvi_count_saved(kv, l, &demand);
        if (longest) provided &= tkvi_grow_lists(kv, l->seq, longest);
    }
    if (demand.entries)
        provided &= demand.entries < TKVI_FOREVER && tkvi_grow_blocks(pool, (uint32_t)demand.entries);
    pages = demand.entries ? tkvi_pages_for_demand(pool, &demand) : 0;
    most_pages = pages + pool->kept_free_pages + l->numbers.n_reserved;
    if (demand.entries + l->numbers.n_reserved && l->numbers.n_pages > pages)
        n_pages = l->numbers.n_pages < most_pages ? l->numbers.n_pages : most_pages;
    else n_pages = pages;
    while (provided && !pool->keep_all && pool->n_pages < n_pages) provided = tkvi_add_page(pool);
    if (provided && !l->numbers.lacks_memory && pages <= pool->n_pages &&
        (!pool->max_pages || pages <= pool->max_pages))
        return TKV_OK;
    return tkvi_refuse_no_memory(kv, "no memory to load a cache of blocks:", demand.entries, "");
}

/* Reserves again what sequences had reserved. The pages for it are there, unless a file says otherwise. */
static void tkvi_reserve_again(tkv_cache *kv) {
    const tkvi_demand none = tkvi_no_demand();
    int seq;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        if (!kv->seq[seq].reserved_len) continue;
        tkvi_reserve_slots(kv, seq, kv->seq[seq].reserved_len);
        if (!tkvi_provide(&kv->pool, &none)) tkvi_reserve_slots(kv, seq, 0);
    }
}

/* Places a whole cache. After an error it is as new. */
static tkv_status tkvi_place_cache(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    tkvi_checker k;
    char reason[96] = "";
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        if (kv->tables.plan[layer].stored_layer == layer && !tkvi_place_layer_of_all(l, layer))
            st = l->from.has_failed
                     ? tkvi_refuse_damaged_block(l, layer)
                     : tkvi_refuse_saved_layer(l, "blocks and their holders do not fit in layer", layer);
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l) && !st; l->seq++) {
        tkvi_count_late_blocks(kv, l->seq);
        kv->budget.has_loaded = 1;
        st = tkvi_check_placed(l);
    }
    if (!st) st = tkvi_place_states_of_all(l);
    if (st) return st;
    tkvi_visit_again(l, &l->numbers, TKVI_STORES_NUMBERS);
    tkvi_reserve_again(kv);
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        tkvi_remember_turns(kv, l->seq);
        if (TKVI_HAS_STATES) tkvi_mark_states(&kv->states, l->seq);
    }
    k.kv = kv;
    k.reason = reason;
    k.size = sizeof reason;
    if (TKVI_HAS_METER && kv->meter && tkvi_check_meter(&k)) tkvi_meter_clear(kv->meter);
    return TKV_OK;
}

/* Ends the load's hold on an attached file. After an error the caller was never told to keep its bytes. */
static void tkvi_release_attached(tkvi_loader *l, tkv_status st) {
    tkvi_attached *file;
    if (!TKVI_HAS_ATTACH || !l->attached) return;
    file = &l->kv->pool.attached[l->attached - 1];
    if (!st) {
        file->release = l->p->release;
        file->user = l->p->release_user;
    }
    if (--file->n_sources) return;
    memset(file, 0, sizeof *file);
    if (!st && l->p->release) l->p->release(l->p->release_user, l->from.file.bytes, l->from.file.end);
}

/* Provides all that the file needs. On failure no token has changed. */
static tkv_status tkvi_provide_file(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    tkv_status st = TKVI_HAS_ATTACH && l->p->attach ? tkvi_provide_attached(l) : TKV_OK;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        if (kv->tables.plan[layer].stored_layer == layer && tkvi_table_parts(kv, layer))
            st = tkvi_provide_tables(l, layer);
    if (!st) st = tkvi_provide_entries(kv, l->p->seq, tkvi_count_saved, l, "no memory to load sequence");
    return st;
}

/* A layer without a table learns from loaded tokens as from appended ones: a talk that is loaded again and again gets
 * its first table as early. */
static void tkvi_count_loaded_tokens(tkv_cache *kv, int seq) {
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && kv->stats.tokens_seen; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (kv->tables.current_version[layer] < 0)
            tkvi_add_to_count(&kv->stats.tokens_seen[layer], list->len - list->expired);
    }
}

/* 1 if nothing was appended, loaded or learned since the cache was created. */
static int tkvi_is_new_cache(const tkv_cache *kv) {
    int i, is_new = !kv->pool.n_entries && !kv->states.held_bytes;
    for (i = 0; i < kv->tables.cfg.limits.max_seqs * kv->tables.cfg.model.n_layers; i++)
        is_new &= !kv->list[i].len;
    for (i = 0; i < kv->tables.cfg.limits.max_seqs; i++) is_new &= !kv->seq[i].reserved_len;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++)
        is_new &=
            kv->tables.current_version[i] < 0 && (!kv->stats.tokens_seen || kv->stats.tokens_seen[i] < 1);
    return is_new;
}

/* bytes NULL: a callback gives them. */
static tkv_status tkvi_check_load(tkv_cache *kv, const tkv_load_params *p, const void *bytes, size_t size) {
    const int is_cache = p->seq == TKV_ALL_SEQS;
    int layer, seq;
    if (!is_cache && !tkvi_has_seq(kv, p->seq)) return tkvi_refuse_seq(kv, p->seq);
    if ((p->model_bytes && !p->model) || p->token_capacity < 0)
        return tkvi_fail(kv, TKV_ERR_ARG, "model is missing, or token_capacity is below 0", 0, NULL);
    if (p->attach && !TKVI_HAS_ATTACH) return tkvi_refuse_left_out(kv, "TKV_NO_OFFLOAD leaves out attach");
    if (p->attach && !bytes) return tkvi_fail(kv, TKV_ERR_ARG, "attached bytes must be in memory", 0, NULL);
    if (p->attach && (uintptr_t)bytes % 64)
        return tkvi_fail(kv, TKV_ERR_ARG, "attached bytes must begin at a multiple of 64", 0, NULL);
    if (p->attach && size / 64 > 0xffffffffu)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "an attached file has at most 256 GiB", 0, NULL);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        if (kv->seq[seq].in_step)
            return tkvi_fail(kv, TKV_ERR_STATE, "a step is open in sequence", seq,
                             "; commit or abort it first");
    if (is_cache)
        return tkvi_is_new_cache(kv)
                   ? TKV_OK
                   : tkvi_fail(kv, TKV_ERR_STATE,
                               "a whole cache is loaded into a new one, just after its creation", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_list_of(kv, p->seq, layer)->len)
            return tkvi_fail(kv, TKV_ERR_STATE, "reset it before a load: tokens are in sequence", p->seq, "");
    if (TKVI_HAS_STATES && kv->states.list[p->seq].n)
        return tkvi_fail(kv, TKV_ERR_STATE, "reset it before a load: states are in sequence", p->seq, "");
    return TKV_OK;
}

/* Loads the sequence of a verified file. */
static tkv_status tkvi_load_seq(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    const int seq = l->p->seq;
    tkv_status st;
    kv->seq[seq].used = ++kv->call.clock;
    st = tkvi_provide_file(l);
    if (!st) st = tkvi_place_file(l);
    if (!st) tkvi_take_tokens(l);
    tkvi_give_back(&l->from, 0);
    tkvi_release_attached(l, st); /* the caller may free the bytes now */
    tkvi_release_unused(kv, seq);
    tkvi_shrink_index(kv, seq);
    if (st) return st;
    tkvi_remember_turns(kv, seq);
    tkvi_count_loaded_tokens(kv, seq);
    l->info.n_tokens = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    return TKV_OK;
}

/* Loads the whole cache of a verified file. */
static tkv_status tkvi_load_cache(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    const unsigned had_versions = tkvi_allocated_versions(kv);
    const tkvi_pool had = kv->pool;
    const size_t had_limit = kv->heap.limit;
    tkv_status st = tkvi_provide_cache(l);
    int seq;
    if (!st) st = tkvi_place_cache(l);
    if (st) {
        kv->heap.limit = had_limit;
        kv->pool.recode_pages = had.recode_pages;
        kv->pool.kept_free_pages = had.kept_free_pages;
        kv->pool.max_pages = had.max_pages;
        kv->budget.has_loaded = 0;
        tkvi_empty_cache(l, had_versions);
    } else {
        tkvi_take_tokens(l);
    }
    tkvi_release_attached(l, st);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs && st; seq++) tkvi_shrink_index(kv, seq);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs && !st; seq++)
        l->info.n_tokens = tkvi_min(TKVI_FOREVER, l->info.n_tokens + tkv_get_length(kv, seq, TKV_ALL_LAYERS));
    return st;
}

/* Loads from the bytes or the callback of l->from. */
static tkv_status tkvi_load(tkvi_loader *l, tkv_cache *kv, const tkv_load_params *p, size_t size,
                            tkv_load_info *out) {
    tkv_status st = tkvi_check_load(kv, p, l->from.bytes, size);
    if (st) return st;
    l->kv = l->from.kv = kv;
    l->p = p;
    l->is_cache = p->seq == TKV_ALL_SEQS;
    l->from.scratch = (uint8_t *)p->scratch;
    l->from.scratch_bytes = p->scratch_bytes;
    if (!l->from.bytes) st = tkvi_take_memory(&l->from, tkvi_room_for_piece(kv) + 128, &l->from.room);
    if (!st) st = tkvi_verify_file(l, size);
    /* a whole cache in memory needs no room: it may fill its budget */
    if (!st && l->from.bytes && !l->is_cache)
        st = tkvi_take_memory(&l->from, tkvi_room_for_piece(kv), &l->from.room);
    if (!st) st = l->is_cache ? tkvi_load_cache(l) : tkvi_load_seq(l);
    tkvi_give_back(&l->from, 0);
    if (st) return st;
    if (out) *out = l->info;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_seq_load(tkv_cache *kv, const tkv_load_params *p, const void *bytes, size_t size,
                                tkv_load_info *out) {
    tkvi_loader l;
    if (!kv || !p) return TKV_ERR_ARG;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    if (!bytes) return tkvi_fail(kv, TKV_ERR_ARG, "bytes are missing", 0, NULL);
    memset(&l, 0, sizeof l);
    l.from.bytes = (const uint8_t *)bytes;
    return tkvi_load(&l, kv, p, size, out);
}

TKV_API tkv_status tkv_seq_load_from(tkv_cache *kv, const tkv_load_params *p, size_t size,
                                     tkv_read_bytes read, void *user, tkv_load_info *out) {
    tkvi_loader l;
    if (!kv || !p || !read) return TKV_ERR_ARG;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    memset(&l, 0, sizeof l);
    l.from.read = read;
    l.from.user = user;
    return tkvi_load(&l, kv, p, size, out);
}

#endif /* TKVI_PERSIST_LOAD_H */
