/*
 * persist/verify.h - verifies a saved sequence or a whole cache before a load changes anything: frame, checksums,
 * model, then every number of every list, table and state.
 */
#ifndef TKVI_PERSIST_VERIFY_H
#define TKVI_PERSIST_VERIFY_H

#include "persist/reader.h"
#include "report/info.h"

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
        if (here != saved && (l->is_cache || tkvi_is_option_of_bytes(row)))
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
    if (l->flags & ~(TKVI_SAVED_HAS_META | TKVI_SAVED_HAS_SCORES | TKVI_SAVED_IS_CACHE |
                     (TKVI_HAS_MOVES ? TKVI_SAVED_HAS_SHIFTS : 0)))
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

/* Opens a list that was verified. */
static void tkvi_reopen_list(tkvi_loader *l, int layer, tkvi_saved_list *out) {
    const tkv_status st = tkvi_open_list(l, layer, out);
    TKVI_ASSERT(!st);
    (void)st;
}

/* Returns the fault of one saved entry, or NULL. tier: by its place in the list. */
static const char *tkvi_find_entry_fault(tkvi_saved_list *list, int i, int tier) {
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
        if (!tkvi_is_same_holder(&other, &first)) return "an entry names no block, layer";
    }
    if (e.start < 0 || (i >= list->anchors && end <= e.start)) /* -1: it was out of range */
        return "entries are out of order, layer";
    if (tokens < 1 || tokens > TKVI_BLOCK || e.first_slot >= tokens)
        return "an entry has slots that no token can have, layer";
    if ((e.n_packed || e.has_anchors) && !list->meta) return "a list of indices was not saved, layer";
    if (e.shift < -TKVI_FOREVER || e.shift > TKVI_FOREVER || e.turned < -TKVI_FOREVER ||
        e.turned > TKVI_FOREVER || (!list->is_moved && (e.shift || e.turned)))
        return "a token has moved too far, layer";
    return NULL;
}

/* Returns what this cache or build lacks for a saved entry, or NULL. */
static const char *tkvi_find_lack(const tkvi_loader *l, tkvi_saved_list *list, int i) {
    tkvi_saved_holder first;
    const tkvi_entry e = tkvi_read_entry(list, i, &first);
    if ((e.n_packed || e.has_anchors) && !tkvi_keeps_token_meta(&l->kv->tables.cfg))
        return "a list of indices needs cfg.evict or cfg.importance.sample_every here, layer";
    if (!TKVI_HAS_EVICT && e.sink_mask) return "a named sink needs a build with eviction, layer";
    return (e.shift || e.turned) && !TKVI_HAS_MOVES ? "moved tokens need a build with moves, layer" : NULL;
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
static const char *tkvi_find_run_fault(tkvi_saved_list *list, int i, int *n_blocks) {
    const uint8_t *at = tkvi_run_of_entry(list, i);
    const int n = tkvi_saved_int(at + 12), last = i + n - 1;
    const char *fault = tkvi_find_entry_fault(list, i, tkvi_saved_tier(list, i));
    tkvi_saved_holder first;
    int k;
    if (fault) return fault;
    (void)tkvi_read_entry(list, i, &first);
    if (n > 1) {
        const int names_earlier = first.seq == list->seq && first.i != i;
        if ((i < list->sinks) != (last < list->sinks) || at[28] || (names_earlier && !list->is_cache))
            return "entries that repeat are not alike, layer";
        /* Former versions of the library wrote runs that name earlier entries of their list: each one is checked. */
        for (k = i; names_earlier && !fault && ++k < last;)
            fault = tkvi_find_entry_fault(list, k, tkvi_saved_tier(list, k));
        if (!fault) fault = tkvi_find_entry_fault(list, last, tkvi_saved_tier(list, last));
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
    int layout, rule;
    if (run[3] >= TKV_TIER_COUNT || (run[4] >= TKVI_VERSIONS && run[4] != TKVI_NO_VERSION) ||
        (repeat == 1 && run[5]) || run[7] ||
        (list->is_cache && (tkvi_load16(run + 26) > l->kv->tables.n_layouts ||
                            tkvi_load16(run + 28) > run[2] || tkvi_load16(run + 30))))
        return tkvi_refuse_saved_layer(l, "a block has a number that it cannot have, layer", layer);
    layout = tkvi_layout_of_saved(l->kv, layer, run, list->is_cache);
    if (layout < 0)
        return tkvi_refuse_saved_model(l, "no level of this cache has the formats of a saved block, layer",
                                       layer);
    rule = tkvi_sharing_rule(l->kv, layer, run[0]);
    if (run[6] > rule)
        return tkvi_refuse_saved_layer(l, "a block has a number that it cannot have, layer", layer);
    if (run[6] < rule)
        return tkvi_refuse_saved_model(
            l, "an older version coded keys of this head_dim with fewer bits, layer", layer);
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
    const char *fault = NULL, *lack = NULL;
    tkv_status st = tkvi_open_list(l, layer, &list);
    int i, n_blocks = 0;
    if (st) return st;
    if (list.len > kv->tables.cfg.limits.max_tokens)
        return tkvi_fail(l->kv, TKV_ERR_CAPACITY, "the sequence has more tokens than max_tokens:", list.len,
                         "");
    if ((int64_t)list.sinks + list.archive + list.warm > list.n || list.anchors > list.sinks ||
        list.expired > list.len || list.chunk_start > list.len || list.is_moved > 1 ||
        (list.n && list.expired == list.len) || list.expired_end < -TKVI_POSITIONS ||
        list.expired_end > TKVI_POSITIONS || list.shift < -TKVI_POSITIONS || list.shift > TKVI_POSITIONS ||
        (list.shift && !list.is_moved))
        return tkvi_refuse_saved_layer(l, "counts of the list do not fit in layer", layer);
    /* A list that lost all its tokens, but not its length, has lost its anchors too. */
    if (list.anchors != (list.n && TKVI_HAS_EVICT ? p->n_anchor_blocks : 0) &&
        (list.anchors || !tkvi_saved_start(&list, 0)))
        return tkvi_refuse_saved_model(l, "the sequence was saved with another number of anchors, layer",
                                       layer);
    for (i = 0; i < list.n && !fault; i += tkvi_saved_int(tkvi_run_of_entry(&list, i) + 12)) {
        fault = tkvi_find_run_fault(&list, i, &n_blocks);
        if (!fault && tkvi_saved_int(tkvi_run_of_entry(&list, i) + 20) && !p->rope)
            fault = "a key has moved, but nothing is known of the RoPE, layer";
        if (!lack) lack = tkvi_find_lack(l, &list, i);
    }
    for (i = 0; i < list.n && !fault && list.meta; i++) fault = tkvi_find_meta_fault(&list, i);
    if (!fault && n_blocks != list.n_blocks) fault = "blocks are miscounted in layer";
    if (fault) return tkvi_refuse_saved_layer(l, fault, layer);
    if (lack) return tkvi_refuse_saved_model(l, lack, layer);
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

/* Opens tables that were verified. */
static void tkvi_reopen_tables(tkvi_loader *l, int layer, tkvi_saved_tables *out) {
    const tkv_status st = tkvi_open_saved_tables(l, layer, out);
    TKVI_ASSERT(!st);
    (void)st;
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
static void tkvi_count_saved_blocks(tkvi_loader *l, int layer, int64_t *n) {
    tkvi_saved_list list;
    int v;
    memset(n, 0, (TKVI_VERSIONS + 1) * sizeof *n);
    for (l->seq = tkvi_first_loaded_seq(l); l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        tkvi_reopen_list(l, layer, &list);
        n[TKVI_VERSIONS] += list.n_blocks - tkvi_n_blocks_of_version(&list, TKVI_NO_VERSION);
        for (v = 0; v < TKVI_VERSIONS; v++) n[v] += tkvi_n_blocks_of_version(&list, (uint32_t)v);
    }
}

static tkv_status tkvi_check_saved_tables(tkvi_loader *l, int layer) {
    const int need = tkvi_table_parts(l->kv, layer);
    int64_t n_blocks[TKVI_VERSIONS + 1], n = 0;
    tkvi_saved_tables t;
    const tkv_status st = tkvi_open_saved_tables(l, layer, &t);
    int i, current = 0;
    unsigned seen = 0;
    if (st) return st;
    tkvi_count_saved_blocks(l, layer, n_blocks);
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
    if (current != (t.n > 0)) /* a load may code blocks again, with the current one */
        return tkvi_refuse_saved_layer(l, "not one of the tables is the current one, layer", layer);
    return n != n_blocks[TKVI_VERSIONS]
               ? tkvi_refuse_saved_layer(l, "blocks name a table that was not saved, layer", layer)
               : TKV_OK;
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

/* The state at *at of a verified section. Goes to the next one. */
static tkvi_saved_state tkvi_next_saved_state(const tkvi_section *s, size_t *at) {
    tkvi_saved_state state;
    memset(&state, 0, sizeof state);
    const int is_read = tkvi_read_saved_state(s, at, &state);
    TKVI_ASSERT(is_read);
    (void)is_read;
    return state;
}

/* Checks the states of the sequence. */
static tkv_status tkvi_check_saved_states(tkvi_loader *l) {
    const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_STATES, l->is_cache ? l->seq : 0);
    tkvi_saved_state state;
    size_t at = 0;
    int position = 0, n_positions = TKVI_FOREVER;
    if (l->is_cache) /* thinning leaves so many: max_states beside one, the newest of each layer, a complete one */
        n_positions = l->kv->tables.cfg.limits.max_states + 2 + l->kv->tables.cfg.model.n_layers;
    if (!s.at)
        return l->is_cache ? TKV_OK : tkvi_refuse_file(l, "the saved sequence has no section of states");
    if (s.n && !TKVI_HAS_STATES)
        return tkvi_refuse_saved_model(l, "TKV_NO_STATES leaves out the states of this file", -1);
    for (; at < s.n; position = state.n_tokens)
        if (!tkvi_read_saved_state(&s, &at, &state) || state.layer < 0 ||
            state.layer >= l->kv->tables.cfg.model.n_layers || state.n_tokens < 1 ||
            state.n_tokens > l->kv->tables.cfg.limits.max_tokens ||
            (state.shared_with < 0 ? !state.size : !l->is_cache || state.shared_with >= l->seq) ||
            (n_positions -= state.n_tokens != position) < 0)
            return tkvi_refuse_file(l, "a saved state is not valid");
    return TKV_OK;
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

/* >>numbers of a whole cache */
/* The numbers of a whole cache, to be read. */
static tkvi_numbers tkvi_saved_numbers(const tkvi_loader *l) {
    const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_CACHE, 0);
    tkvi_numbers io;
    memset(&io, 0, sizeof io);
    io.kv = l->kv;
    io.mode = TKVI_CHECKS_NUMBERS;
    io.at = s.at;
    io.end = s.at ? s.at + s.n : NULL;
    if (!s.at) io.is_wrong = 1;
    return io;
}

/* Entries of all lists in the file. */
static int64_t tkvi_n_saved_entries(tkvi_loader *l) {
    tkvi_saved_list list;
    int64_t n = 0;
    int layer;
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l); l->seq++)
        for (layer = 0; layer < l->kv->tables.cfg.model.n_layers; layer++) {
            if (l->kv->tables.plan[layer].stored_layer != layer) continue;
            tkvi_reopen_list(l, layer, &list);
            n += list.n;
        }
    return n;
}

static tkv_status tkvi_refuse_numbers(tkvi_loader *l) {
    const tkvi_numbers *io = &l->numbers;
    if (io->is_wrong || !io->is_other)
        return tkvi_refuse_file(l, "the numbers of the saved cache are not valid");
    return tkvi_refuse_saved_model(
        l, io->other ? io->other : "the cache was saved with another config; create this one with the same",
        -1);
}

/* Compares the config before the lists, which may not fit another one. The other numbers follow it. */
static tkv_status tkvi_check_saved_config(tkvi_loader *l) {
    tkvi_numbers *io = &l->numbers;
    *io = tkvi_saved_numbers(l);
    if (!io->is_wrong) tkvi_visit_config(io);
    return io->is_wrong || io->is_other ? tkvi_refuse_numbers(l) : TKV_OK;
}

static tkv_status tkvi_check_saved_cache(tkvi_loader *l) {
    const tkvi_pool *pool = &l->kv->pool;
    tkvi_numbers *io = &l->numbers;
    io->most_entries = 16 * tkvi_n_saved_entries(l) + 4096 + (int64_t)pool->block_cap + pool->page_cap +
                       l->kv->work.choice_cap;
    tkvi_visit_behind_config(io);
    return io->is_wrong || io->is_other || io->at != io->end ? tkvi_refuse_numbers(l) : TKV_OK;
}

/* >>the whole */
/* Verifies the last save. */
static tkv_status tkvi_verify_save(tkvi_loader *l, size_t size) {
    tkv_status st = tkvi_check_frame(l, size);
    int layer;
    if (!st) st = tkvi_check_model(l);
    if (!st) st = tkvi_check_saved_tokens(l);
    if (!st && l->is_cache) st = tkvi_check_saved_config(l);
    for (layer = 0; layer < l->kv->tables.cfg.model.n_layers && !st; layer++) {
        if (l->kv->tables.plan[layer].stored_layer != layer) continue;
        for (l->seq = tkvi_first_loaded_seq(l); !st && l->seq < tkvi_loaded_seqs_end(l); l->seq++)
            st = tkvi_check_saved_list(l, layer);
        if (!st) st = tkvi_check_saved_tables(l, layer);
    }
    for (l->seq = tkvi_first_loaded_seq(l); !st && l->seq < tkvi_loaded_seqs_end(l); l->seq++)
        st = tkvi_check_saved_states(l);
    if (!st && l->is_cache) st = tkvi_check_saved_cache(l);
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

#endif /* TKVI_PERSIST_VERIFY_H */
