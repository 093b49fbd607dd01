/*
 * persist/load.h - tkv_seq_load: reads a saved sequence (persist/saved.h) into an empty one.
 *
 *     verify     frame, checksums, model, then every number of every list and table; nothing has changed until then
 *     provide    versions for the tables, entries, slots, states; a failure changes no token
 *     place      tables, blocks, entries, states; tkv_check's rules for lists have the last word
 *
 * Tables are known by their bytes. A table that the layer has already is not stored twice. Without a free version the
 * blocks of one are coded again with the layer's current table: those of the cache first (reclaim/versions.h), else
 * those of the file.
 */
#ifndef TKVI_PERSIST_LOAD_H
#define TKVI_PERSIST_LOAD_H

#include "persist/save.h"
#include "report/info.h"
#include "step/fork.h"
#include "step/turns.h"

typedef struct tkvi_section {
    const uint8_t *at;
    size_t n;
} tkvi_section;

typedef struct tkvi_loader {
    tkv_cache *kv;
    const tkv_load_params *p;
    const uint8_t *bytes, *index;
    size_t size;
    uint32_t n_sections;
    int flags;
    uint8_t *room; /* for a table, or for a block */
    size_t room_bytes;
    tkv_load_info info;
} tkvi_loader;

static tkv_status tkvi_refuse_file(tkvi_loader *l, const char *why) {
    return tkvi_fail(l->kv, TKV_ERR_DATA, why, 0, NULL);
}

static tkv_status tkvi_refuse_saved_layer(tkvi_loader *l, const char *why, int layer) {
    return tkvi_fail(l->kv, TKV_ERR_DATA, why, layer, "");
}

static int tkvi_saved_int(const uint8_t *at) {
    const uint32_t x = tkvi_load32(at);
    return x < 0x80000000u ? (int)x : -(int)(0xffffffffu - x) - 1;
}

/* >>frame */
static int tkvi_are_zeros(const uint8_t *p, size_t n) {
    while (n && !*p) p++, n--;
    return n == 0;
}

static const uint8_t *tkvi_saved_entry_of_index(const tkvi_loader *l, uint32_t i) {
    return l->index + (size_t)i * TKVI_SAVED_SECTION;
}

/* Checks the index: sections in order, one behind the other, with right checksums. */
static tkv_status tkvi_check_sections(tkvi_loader *l) {
    const size_t index_at = (size_t)(l->index - l->bytes);
    uint64_t before = 0;
    size_t at = 0;
    uint32_t i;
    for (i = 0; i < l->n_sections; i++) {
        const uint8_t *e = tkvi_saved_entry_of_index(l, i);
        const uint64_t name = (uint64_t)tkvi_load32(e) << 32 | tkvi_load32(e + 4), n = tkvi_load64(e + 16);
        const size_t gap = tkvi_gap_to(at, 64);
        if (tkvi_load32(e) >= TKVI_SAVED_KINDS || (i && name <= before) || gap > index_at - at ||
            tkvi_load64(e + 8) != at + gap || n > index_at - at - gap || !tkvi_are_zeros(l->bytes + at, gap))
            return tkvi_refuse_file(l, "the saved sequence has a section where none can be");
        before = name;
        at += gap;
        if (tkvi_xxh64(0, l->bytes + at, (size_t)n) != tkvi_load64(e + 24))
            return tkvi_refuse_file(l, "the saved sequence was damaged: the checksum of a section is wrong");
        at += (size_t)n;
    }
    if (index_at != at + tkvi_gap_to(at, 64) || !tkvi_are_zeros(l->bytes + at, index_at - at))
        return tkvi_refuse_file(l, "the saved sequence has bytes in no section");
    return TKV_OK;
}

static tkv_status tkvi_check_frame(tkvi_loader *l) {
    const uint8_t *end;
    uint64_t index_at;
    if (l->size < TKVI_SAVED_HEAD + TKVI_SAVED_END || memcmp(l->bytes, "TKVS", 4) != 0)
        return tkvi_refuse_file(l, "these bytes are no saved sequence");
    if (tkvi_load32(l->bytes + 4) != TKVI_SAVED_VERSION)
        return tkvi_refuse_file(l, "the sequence was saved by a newer version of this library");
    end = l->bytes + l->size - TKVI_SAVED_END;
    index_at = tkvi_load64(end);
    l->n_sections = tkvi_load32(end + 8);
    if (memcmp(end + 24, "TKVSEND", 8) != 0 || tkvi_load64(l->bytes + 8) != l->size ||
        index_at < TKVI_SAVED_HEAD || index_at > l->size - TKVI_SAVED_END ||
        (l->size - TKVI_SAVED_END - (size_t)index_at) != (uint64_t)l->n_sections * TKVI_SAVED_SECTION)
        return tkvi_refuse_file(l, "the saved sequence was cut, or is longer than it should be");
    l->index = l->bytes + (size_t)index_at;
    if (tkvi_xxh64(0, l->index, l->size - (size_t)index_at - 16) != tkvi_load64(end + 16) ||
        tkvi_load32(end + 12) != TKVI_SAVED_VERSION)
        return tkvi_refuse_file(l, "the saved sequence was damaged: the checksum of its index is wrong");
    return tkvi_check_sections(l);
}

/* The section of a kind and layer; at NULL: there is none. */
static tkvi_section tkvi_find_section(const tkvi_loader *l, int kind, int layer) {
    const uint64_t name = (uint64_t)(uint32_t)kind << 32 | (uint32_t)layer;
    uint32_t low = 0, high = l->n_sections;
    tkvi_section found = {NULL, 0};
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        const uint8_t *e = tkvi_saved_entry_of_index(l, mid);
        const uint64_t at = (uint64_t)tkvi_load32(e) << 32 | tkvi_load32(e + 4);
        if (at == name) {
            found.at = l->bytes + (size_t)tkvi_load64(e + 8);
            found.n = (size_t)tkvi_load64(e + 16);
            return found;
        }
        if (at < name) low = mid + 1;
        else high = mid;
    }
    return found;
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
    const tkvi_section head = tkvi_find_section(l, TKVI_SAVED_HEAD_KIND, 0),
                       model = tkvi_find_section(l, TKVI_SAVED_MODEL, 0);
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
    return l->flags & ~(TKVI_SAVED_HAS_META | TKVI_SAVED_HAS_SCORES) ? tkvi_refuse_file(l, "unknown flags")
                                                                     : TKV_OK;
}

/* >>lists */
typedef struct tkvi_saved_list {
    const uint8_t *entries, *meta; /* meta NULL: none */
    size_t meta_bytes;             /* of an entry */
    int n, sinks, archive, warm, anchors, len, expired, chunk_start, is_moved, n_blocks;
    const uint8_t *blocks, *records;
    size_t record_bytes; /* of all records */
} tkvi_saved_list;

/* Reads an entry. *first: the first entry with its block. */
static tkvi_entry tkvi_read_entry(const tkvi_saved_list *list, int i, int *first) {
    const uint8_t *at = list->entries + (size_t)i * TKVI_SAVED_ENTRY;
    tkvi_entry e;
    memset(&e, 0, sizeof e);
    *first = tkvi_saved_int(at);
    e.start = tkvi_saved_int(at + 4);
    e.evicted_mask = tkvi_load64(at + 8);
    e.sink_mask = tkvi_load64(at + 16);
    e.shift = tkvi_saved_int(at + 24);
    e.turned = tkvi_saved_int(at + 28);
    e.n_packed = (int8_t)(at[32] & 127);
    e.first_slot = at[33];
    e.end_slot = at[34];
    e.tier = at[35];
    e.has_anchors = at[36];
    e.in_use = 1;
    return e;
}

static int tkvi_saved_start(const tkvi_saved_list *list, int i) {
    return tkvi_saved_int(list->entries + (size_t)i * TKVI_SAVED_ENTRY + 4);
}

/* Slots in use of a saved entry, as tkvi_block_tokens. */
static int64_t tkvi_saved_tokens(const tkvi_saved_list *list, int i, const tkvi_entry *e) {
    const int64_t end = i + 1 < list->n ? tkvi_saved_start(list, i + 1) : list->len;
    if (e->n_packed) return e->n_packed;
    return e->end_slot ? e->end_slot : e->first_slot + end - e->start;
}

/* Finds the sections of a layer, and checks their sizes. */
static tkv_status tkvi_open_saved_list(tkvi_loader *l, int layer, tkvi_saved_list *out) {
    const tkvi_section s = tkvi_find_section(l, TKVI_SAVED_LISTS, layer),
                       blocks = tkvi_find_section(l, TKVI_SAVED_BLOCKS, layer);
    int field[10], i;
    size_t entries, heads;
    memset(out, 0, sizeof *out);
    if (s.n < TKVI_SAVED_LIST || !blocks.at)
        return tkvi_refuse_saved_layer(l, "there are no blocks of layer", layer);
    for (i = 0; i < 10; i++) {
        field[i] = tkvi_saved_int(s.at + 4 * i);
        if (field[i] < 0 || field[i] > TKVI_FOREVER)
            return tkvi_refuse_saved_layer(l, "a number is too large in layer", layer);
    }
    out->n = field[0];
    out->sinks = field[1];
    out->archive = field[2];
    out->warm = field[3];
    out->anchors = field[4];
    out->len = field[5];
    out->expired = field[6];
    out->chunk_start = field[7];
    out->is_moved = field[8];
    out->n_blocks = field[9];
    out->meta_bytes =
        !(l->flags & TKVI_SAVED_HAS_META)
            ? 0
            : TKVI_SAVED_META + (l->flags & TKVI_SAVED_HAS_SCORES ? (size_t)TKVI_SAVED_SCORES : 0u);
    entries = (s.n - TKVI_SAVED_LIST) / (TKVI_SAVED_ENTRY + out->meta_bytes);
    if ((size_t)out->n != entries || (s.n - TKVI_SAVED_LIST) % (TKVI_SAVED_ENTRY + out->meta_bytes) ||
        !tkvi_are_zeros(s.at + 40, 8))
        return tkvi_refuse_saved_layer(l, "the list has another size than its entries, layer", layer);
    out->entries = s.at + TKVI_SAVED_LIST;
    out->meta = out->meta_bytes ? out->entries + entries * TKVI_SAVED_ENTRY : NULL;
    heads = (size_t)out->n_blocks * TKVI_SAVED_BLOCK;
    if (out->n_blocks > out->n || heads > blocks.n || tkvi_gap_to(heads, 64) > blocks.n - heads)
        return tkvi_refuse_saved_layer(l, "the blocks have another size than their list, layer", layer);
    out->blocks = blocks.at;
    out->records = blocks.at + heads + tkvi_gap_to(heads, 64);
    out->record_bytes = blocks.n - heads - tkvi_gap_to(heads, 64);
    return TKV_OK;
}

/* The layout of saved block k in this cache, of version 0 if it has a table. -1: it has none. */
static int tkvi_layout_of_saved(const tkv_cache *kv, int layer, const uint8_t *block) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_tier_spec *specs = tkvi_tier_specs_of(&kv->tables, layer);
    int i, tier;
    if (block[4] != TKVI_NO_VERSION) {
        for (i = 0; i < kv->tables.n_levels; i++)
            for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
                const tkvi_layout *c = &kv->tables.layout[specs[i].layout[tier]];
                if (specs[i].needs_table[tier] && c->pair.k == (tkv_format)block[0] &&
                    c->pair.v == (tkv_format)block[1] && c->tokens == block[2])
                    return specs[i].layout[tier];
            }
        return -1;
    }
    for (i = 0; i < kv->tables.n_keys; i++) {
        const tkvi_layout *c = &kv->tables.layout[i];
        const tkvi_side *k = &c->record[0].k;
        if (c->pair.k == (tkv_format)block[0] && c->pair.v == (tkv_format)block[1] && c->tokens == block[2] &&
            c->n_kv_heads == p->geometry.n_kv_heads && k->dim == p->geometry.head_dim &&
            c->record[0].v.dim == p->geometry.v_head_dim &&
            tkvi_is_view(&c->record[0].v) == p->geometry.v_in_k &&
            !(tkvi_formats[c->pair.k].shared || tkvi_formats[c->pair.v].shared))
            return i;
    }
    return -1;
}

/* Returns the fault of one saved entry, or NULL. tier: by its place in the list. */
static const char *tkvi_find_entry_fault(const tkvi_loader *l, const tkvi_saved_list *list, int i, int tier) {
    int first, other;
    const tkvi_entry e = tkvi_read_entry(list, i, &first);
    const uint8_t *at = list->entries + (size_t)i * TKVI_SAVED_ENTRY;
    const int64_t end = i + 1 < list->n ? tkvi_saved_start(list, i + 1) : list->len,
                  tokens = tkvi_saved_tokens(list, i, &e);
    if (at[32] > TKVI_BLOCK || e.first_slot > TKVI_BLOCK || e.end_slot > TKVI_BLOCK || e.has_anchors > 1 ||
        !tkvi_are_zeros(at + 37, 3))
        return "an entry has a number that it cannot have, layer";
    if (e.tier != tier || e.has_anchors != (i < list->anchors)) return "an entry is not in its tier, layer";
    if (first < 0 || first > i) return "an entry names no block, layer";
    if (first < i) {
        (void)tkvi_read_entry(list, first, &other);
        if (other != first || e.has_anchors) return "an entry names no block, layer";
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
static const char *tkvi_find_meta_fault(const tkvi_saved_list *list, int i) {
    const uint8_t *at = list->meta + (size_t)i * list->meta_bytes;
    int first, t;
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

/* Checks all numbers of a layer's list, and that the cache has the layouts of its blocks. */
static tkv_status tkvi_check_saved_list(tkvi_loader *l, int layer) {
    const tkv_cache *kv = l->kv;
    const tkvi_plan *p = &kv->tables.plan[layer];
    tkvi_saved_list list;
    const char *fault = NULL;
    tkv_status st = tkvi_open_saved_list(l, layer, &list);
    int i, first, n_blocks = 0;
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
    for (i = 0; i < list.n && !fault; i++) {
        const int tier = i < list.sinks                              ? TKV_TIER_HOT
                         : i < list.sinks + list.archive             ? TKV_TIER_ARCHIVE
                         : i < list.sinks + list.archive + list.warm ? TKV_TIER_WARM
                                                                     : TKV_TIER_HOT;
        fault = tkvi_find_entry_fault(l, &list, i, tier);
        if (!fault && list.meta) fault = tkvi_find_meta_fault(&list, i);
        if (!fault && tkvi_read_entry(&list, i, &first).turned && !p->rope)
            fault = "a key has moved, but nothing is known of the RoPE, layer";
        n_blocks += !fault && first == i;
    }
    if (!fault && n_blocks != list.n_blocks) fault = "blocks are miscounted in layer";
    if (fault) return tkvi_refuse_saved_layer(l, fault, layer);
    for (i = 0; i < list.n_blocks; i++) {
        const uint8_t *b = list.blocks + (size_t)i * TKVI_SAVED_BLOCK;
        if (b[3] >= TKV_TIER_COUNT || (b[4] >= TKVI_VERSIONS && b[4] != TKVI_NO_VERSION) ||
            !tkvi_are_zeros(b + 5, 3))
            return tkvi_refuse_saved_layer(l, "a block has a number that it cannot have, layer", layer);
        if (tkvi_layout_of_saved(kv, layer, b) < 0)
            return tkvi_refuse_saved_model(
                l, "no level of this cache has the formats of a saved block, layer", layer);
    }
    return TKV_OK;
}

/* >>tables */
typedef struct tkvi_saved_tables {
    int parts, n;
    const uint8_t *at; /* of the first: u32 version, u32 1: current, bytes */
    size_t bytes;      /* of the parts of one */
} tkvi_saved_tables;

static tkv_status tkvi_open_saved_tables(tkvi_loader *l, int layer, tkvi_saved_tables *out) {
    const tkvi_section s = tkvi_find_section(l, TKVI_SAVED_TABLES, layer);
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
    for (i = 0; i < list->n_blocks; i++) n += list->blocks[(size_t)i * TKVI_SAVED_BLOCK + 4] == version;
    return n;
}

static tkv_status tkvi_check_saved_tables(tkvi_loader *l, int layer) {
    const int need = tkvi_table_parts(l->kv, layer);
    tkvi_saved_list list;
    tkvi_saved_tables t;
    tkv_status st = tkvi_open_saved_list(l, layer, &list);
    int i, n = 0, current = 0;
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
        n += tkvi_n_blocks_of_version(&list, v);
        if ((t.parts & need) != need && tkvi_n_blocks_of_version(&list, v))
            return tkvi_refuse_saved_model(l, "the sequence was saved without a part of the tables of layer",
                                           layer);
    }
    for (i = 0; i < list.n_blocks; i++) n -= list.blocks[(size_t)i * TKVI_SAVED_BLOCK + 4] != TKVI_NO_VERSION;
    return n || current > 1
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
static int tkvi_is_same_table(tkvi_loader *l, int layer, int version, const tkvi_saved_tables *t, int i) {
    if (!l->kv->tables.version[version].bytes || t->parts != tkvi_table_parts(l->kv, layer)) return 0;
    (void)tkvi_save_table(l->kv, layer, version, t->parts, l->room);
    return memcmp(l->room, tkvi_saved_table(t, i) + 8, t->bytes) == 0;
}

/* Chooses versions. In a layer without a table the file's current one comes first. */
static tkvi_table_map tkvi_map_tables(tkvi_loader *l, int layer, const tkvi_saved_list *list,
                                      const tkvi_saved_tables *t) {
    const int has_table = l->kv->tables.current_version[layer] >= 0;
    unsigned used = tkvi_used_versions(l->kv, layer), known = used;
    tkvi_table_map map;
    int i, v, pass;
    memset(&map, 0, sizeof map);
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
    map.room = -1;
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
    if (tkvi_open_saved_list(l, layer, &list) || tkvi_open_saved_tables(l, layer, &t)) return TKV_ERR_DATA;
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
/* Number of the saved table that a block has; -1: none. */
static int tkvi_table_of_saved(const tkvi_saved_tables *t, const uint8_t *block) {
    int i;
    for (i = 0; block[4] != TKVI_NO_VERSION && i < t->n; i++)
        if (tkvi_load32(tkvi_saved_table(t, i)) == block[4]) return i;
    return -1;
}

/* The layout that saved block `block` gets here. */
static int tkvi_layout_here(const tkvi_loader *l, int layer, const tkvi_saved_tables *t,
                            const tkvi_table_map *map, const uint8_t *block) {
    const int base = tkvi_layout_of_saved(l->kv, layer, block), table = tkvi_table_of_saved(t, block);
    if (table < 0) return base;
    return base + (map->version[table] >= 0 ? map->version[table] : l->kv->tables.current_version[layer]);
}

/* Adds the entries and slots of a file to a demand (tkvi_count_entries). */
static int tkvi_count_saved(tkv_cache *kv, const void *what, tkvi_demand *demand) {
    tkvi_loader l = *(const tkvi_loader *)what;
    int layer, i, longest = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_saved_list list;
        if (kv->tables.plan[layer].stored_layer != layer || tkvi_open_saved_list(&l, layer, &list)) continue;
        longest = tkvi_max(longest, list.n);
        demand->entries += list.n;
        for (i = 0; i < list.n_blocks; i++)
            demand->slots[kv->tables
                              .layout[tkvi_layout_of_saved(kv, layer,
                                                           list.blocks + (size_t)i * TKVI_SAVED_BLOCK)]
                              .size_class]++;
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
    m->score_step = tkvi_min(tkvi_saved_int(at + 28), list->len);
    m->moved_at = tkvi_min(tkvi_saved_int(at + 32), list->len + 1);
    for (t = 0; t < TKVI_ANCHOR_SLOTS && l->kv->pool.entry[id].has_anchors; t++)
        m->index.any[t] = tkvi_saved_int(at + 40 + 4 * t);
    for (t = 0; t < TKVI_BLOCK && !l->kv->pool.entry[id].has_anchors; t++)
        m->index.after_start[t] = tkvi_load16(at + 40 + 2 * t);
    for (t = 0; t < TKVI_BLOCK && (l->flags & TKVI_SAVED_HAS_SCORES); t++)
        m->scores[t] = tkvi_load32(at + TKVI_SAVED_META + 4 * t);
}

/* Makes the entries of a layer, and their blocks without bytes. Cannot fail: all is provided. */
static void tkvi_place_entries(tkvi_loader *l, int layer, const tkvi_saved_list *from,
                               const tkvi_saved_tables *t, const tkvi_table_map *map) {
    tkv_cache *kv = l->kv;
    tkvi_list *list = tkvi_list_of(kv, l->p->seq, layer);
    uint32_t *ids = tkvi_ids(kv, l->p->seq, layer);
    int i, first, n_blocks = 0;
    for (i = 0; i < from->n; i++) {
        const tkvi_entry e = tkvi_read_entry(from, i, &first);
        const int tokens = (int)tkvi_saved_tokens(from, i, &e);
        if (first == i) {
            const uint8_t *b = from->blocks + (size_t)n_blocks++ * TKVI_SAVED_BLOCK;
            ids[i] = tkvi_take_entry(&kv->pool);
            kv->pool.entry[ids[i]] = e;
            tkvi_new_block(&kv->pool, ids[i], tkvi_layout_here(l, layer, t, map, b), tkvi_saved_int(b + 8));
            tkvi_block_of(kv, ids[i])->tier = b[3];
            tkvi_block_of(kv, ids[i])->n_shared_slots = (uint8_t)tokens;
        } else {
            const int had = tkvi_block_of(kv, ids[first])->n_shared_slots;
            tkvi_entry *mine;
            uint32_t next;
            ids[i] = tkvi_share_entry(&kv->pool, ids[first], had);
            mine = &kv->pool.entry[ids[i]];
            next = mine->next_holder;
            *mine = e;
            mine->next_holder = next;
            mine->block = kv->pool.entry[ids[first]].block;
            tkvi_block_of(kv, ids[i])->n_shared_slots = (uint8_t)tkvi_max(had, tokens);
        }
        list->n = i + 1;
        tkvi_place_meta(l, from, i, ids[i]);
    }
    list->sinks = from->sinks;
    list->archive = from->archive;
    list->warm = from->warm;
    if (TKVI_HAS_EVICT) list->anchors = from->anchors;
    list->len = list->step_len = from->len;
    list->expired = from->expired;
    list->chunk_start = from->chunk_start;
    list->is_moved = from->is_moved;
}

/* table -1: copies the records of all blocks whose table has a version here, or that need none. Else codes the blocks
 * of this saved table again; map->room holds it. Returns 0 if the records have another size. */
static int tkvi_place_records(tkvi_loader *l, int layer, const tkvi_saved_list *from,
                              const tkvi_saved_tables *t, const tkvi_table_map *map, int table) {
    tkv_cache *kv = l->kv;
    const uint32_t *ids = tkvi_ids(kv, l->p->seq, layer);
    size_t at = 0;
    int i, first, n_blocks = 0;
    for (i = 0; i < from->n; i++) {
        const tkvi_entry e = tkvi_read_entry(from, i, &first);
        const uint8_t *saved = from->blocks + (size_t)n_blocks * TKVI_SAVED_BLOCK;
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const int of = tkvi_table_of_saved(t, saved), again = of >= 0 && map->version[of] < 0;
        const tkvi_layout *to = &kv->tables.layout[b->layout], *c = to;
        size_t n;
        if (first != i) continue;
        n_blocks++;
        if (again) c = &kv->tables.layout[tkvi_layout_of_saved(kv, layer, saved) + map->room];
        n = tkvi_record_bytes(c);
        if (n > from->record_bytes - at || n > l->room_bytes) return 0;
        if (!again && table < 0) {
            uint8_t *slot = tkvi_block_bytes(&kv->pool, b);
            memset(slot, 0, kv->tables.size_class[to->size_class].slot_bytes);
            memcpy(slot, from->records + at, n);
        } else if (again && of == table) {
            tkvi_recoding r;
            r.kv = kv;
            r.from = c;
            r.to = to;
            r.layer = layer;
            r.start = tkvi_saved_int(saved + 8);
            r.live_mask = tkvi_slots_before((int)tkvi_saved_tokens(from, i, &e));
            memcpy(l->room, from->records + at, n);
            memset(tkvi_block_bytes(&kv->pool, b), 0, kv->tables.size_class[to->size_class].slot_bytes);
            tkvi_recode_heads(&r, l->room, tkvi_block_bytes(&kv->pool, b));
            l->info.n_recoded++;
        }
        at += n;
    }
    return at == from->record_bytes;
}

/* Places tables, entries and blocks of a layer. Returns 0 if a record has a wrong size. */
static int tkvi_place_layer(tkvi_loader *l, int layer) {
    tkv_cache *kv = l->kv;
    const int had = kv->tables.current_version[layer];
    tkvi_saved_list list;
    tkvi_saved_tables t;
    tkvi_table_map map;
    int i, fits = 1;
    if (tkvi_open_saved_list(l, layer, &list) || tkvi_open_saved_tables(l, layer, &t)) return 0;
    map = tkvi_map_tables(l, layer, &list, &t);
    for (i = 0; i < t.n; i++) {
        if (!map.is_new[i]) continue;
        tkvi_place_table(l, layer, &t, i, map.version[i]);
        l->info.n_tables++;
        if (had >= 0 || tkvi_load32(tkvi_saved_table(&t, i) + 4) != 1) continue;
        tkvi_table_use(kv, layer, map.version[i]);
        if (kv->stats.tokens_seen) tkvi_plan_next_table(kv, layer, 0);
    }
    tkvi_place_entries(l, layer, &list, &t, &map);
    for (i = 0; i < t.n && fits; i++) {
        if (map.version[i] != -1) continue;
        tkvi_place_table(l, layer, &t, i, map.room);
        fits = tkvi_place_records(l, layer, &list, &t, &map, i);
    }
    for (i = 0; i < t.n; i++)
        if (map.is_new[i] && map.version[i] == map.room) tkvi_place_table(l, layer, &t, i, map.room);
    return fits && tkvi_place_records(l, layer, &list, &t, &map, -1);
}

/* >>states and tokens */
/* Reads the state at *at. Returns 0 if it does not fit into the section. */
static int tkvi_read_saved_state(const tkvi_section *s, size_t *at, int *layer, int *n_tokens,
                                 const uint8_t **bytes, size_t *size) {
    uint64_t n;
    if (s->n - *at < TKVI_SAVED_STATE) return 0;
    *layer = tkvi_saved_int(s->at + *at);
    *n_tokens = tkvi_saved_int(s->at + *at + 4);
    n = tkvi_load64(s->at + *at + 8);
    *at += TKVI_SAVED_STATE;
    if (n > s->n - *at || tkvi_gap_to((size_t)n, 8) > s->n - *at - (size_t)n) return 0;
    *bytes = s->at + *at;
    *size = (size_t)n;
    *at += (size_t)n + tkvi_gap_to((size_t)n, 8);
    return 1;
}

static tkv_status tkvi_check_saved_states(tkvi_loader *l) {
    const tkvi_section s = tkvi_find_section(l, TKVI_SAVED_STATES, 0);
    const uint8_t *bytes;
    size_t at = 0, size;
    int layer, n_tokens;
    if (!s.at) return tkvi_refuse_file(l, "the saved sequence has no section of states");
    if (s.n && !TKVI_HAS_STATES)
        return tkvi_refuse_saved_model(l, "TKV_NO_STATES leaves out the states of this file", -1);
    while (at < s.n)
        if (!tkvi_read_saved_state(&s, &at, &layer, &n_tokens, &bytes, &size) || layer < 0 ||
            layer >= l->kv->tables.cfg.model.n_layers || n_tokens < 1 ||
            n_tokens > l->kv->tables.cfg.limits.max_tokens || !size)
            return tkvi_refuse_file(l, "a saved state is not valid");
    return TKV_OK;
}

static tkv_status tkvi_place_states(tkvi_loader *l) {
    const tkvi_section s = tkvi_find_section(l, TKVI_SAVED_STATES, 0);
    const uint8_t *bytes;
    size_t at = 0, size;
    int layer, n_tokens;
    tkv_status st = TKV_OK;
    while (!st && at < s.n && tkvi_read_saved_state(&s, &at, &layer, &n_tokens, &bytes, &size))
        st = tkv_seq_put_state(l->kv, l->p->seq, layer, n_tokens, bytes, size);
    return st;
}

static tkv_status tkvi_check_saved_tokens(tkvi_loader *l) {
    const tkvi_section s = tkvi_find_section(l, TKVI_SAVED_TOKENS, 0);
    if (!s.at || s.n % 4 || s.n / 4 > (size_t)TKVI_FOREVER)
        return tkvi_refuse_file(l, "saved tokens have a wrong size");
    l->info.n_saved_tokens = (int)(s.n / 4);
    if (l->p->tokens && l->p->token_capacity < l->info.n_saved_tokens)
        return tkvi_fail(l->kv, TKV_ERR_CAPACITY,
                         "token_capacity is too small; tokens saved:", l->info.n_saved_tokens, "");
    return TKV_OK;
}

/* >>the whole */
static tkv_status tkvi_verify_file(tkvi_loader *l) {
    tkv_status st = tkvi_check_frame(l);
    int layer;
    if (!st) st = tkvi_check_model(l);
    if (!st) st = tkvi_check_saved_tokens(l);
    for (layer = 0; layer < l->kv->tables.cfg.model.n_layers && !st; layer++) {
        if (l->kv->tables.plan[layer].stored_layer != layer) continue;
        st = tkvi_check_saved_list(l, layer);
        if (!st) st = tkvi_check_saved_tables(l, layer);
    }
    return st ? st : tkvi_check_saved_states(l);
}

/* Checks what was placed by the rules of tkv_check. */
static tkv_status tkvi_check_placed(tkvi_loader *l) {
    tkvi_checker k;
    tkv_status st = TKV_OK;
    char reason[96] = "";
    int layer;
    k.kv = l->kv;
    k.reason = reason;
    k.size = sizeof reason;
    for (layer = 0; layer < l->kv->tables.cfg.model.n_layers && !st; layer++) {
        st = tkvi_check_ids(&k, l->p->seq, layer);
        if (!st) st = tkvi_check_list(&k, l->p->seq, layer);
    }
    return st ? tkvi_refuse_file(l, reason) : TKV_OK;
}

static tkv_status tkvi_place_file(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    const int hot_tokens_changed = kv->budget.hot_tokens_changed, seq = l->p->seq;
    tkv_status st = TKV_OK;
    int layer, i;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        if (kv->tables.plan[layer].stored_layer == layer && !tkvi_place_layer(l, layer))
            st = tkvi_refuse_saved_layer(l, "blocks have another size than their formats, layer", layer);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < tkvi_list_of(kv, seq, layer)->n; i++)
            kv->pool.n_late += kv->pool.entry[ids[i]].is_first && tkvi_is_late(&kv->pool, ids[i]);
    }
    kv->budget.hot_tokens_changed = 1; /* the file may be of a plan with longer tiers */
    if (!st) st = tkvi_check_placed(l);
    if (!st) st = tkvi_place_states(l);
    if (!st) return TKV_OK;
    kv->budget.hot_tokens_changed = hot_tokens_changed;
    tkvi_clear_seq(kv, seq);
    return st;
}

/* Provides all that the file needs. On failure no token has changed. */
static tkv_status tkvi_provide_file(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    tkv_status st = TKV_OK;
    int layer, i;
    for (i = 0; i < kv->tables.n_layouts; i++) {
        const size_t slot = kv->tables.size_class[kv->tables.layout[i].size_class].slot_bytes;
        l->room_bytes = slot > l->room_bytes ? slot : l->room_bytes;
    }
    if (tkvi_most_table_bytes(kv) > l->room_bytes) l->room_bytes = tkvi_most_table_bytes(kv);
    l->room = (uint8_t *)tkvi_get(&kv->heap, l->room_bytes);
    if (!l->room) return tkvi_refuse_no_memory(kv, "no memory to load sequence", l->p->seq, "");
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        if (kv->tables.plan[layer].stored_layer == layer && tkvi_table_parts(kv, layer))
            st = tkvi_provide_tables(l, layer);
    if (!st) st = tkvi_provide_entries(kv, l->p->seq, tkvi_count_saved, l, "no memory to load sequence");
    return st;
}

static tkv_status tkvi_check_load(tkv_cache *kv, const tkv_load_params *p, const void *bytes) {
    int layer, seq;
    if (!tkvi_has_seq(kv, p->seq)) return tkvi_refuse_seq(kv, p->seq);
    if (!bytes || (p->model_bytes && !p->model) || p->token_capacity < 0)
        return tkvi_fail(kv, TKV_ERR_ARG, "bytes or model are missing", 0, NULL);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        if (kv->seq[seq].in_step)
            return tkvi_fail(kv, TKV_ERR_STATE, "a step is open in sequence", seq,
                             "; commit or abort it first");
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_list_of(kv, p->seq, layer)->len)
            return tkvi_fail(kv, TKV_ERR_STATE, "reset it before a load: tokens are in sequence", p->seq, "");
    if (TKVI_HAS_STATES && kv->states.list[p->seq].n)
        return tkvi_fail(kv, TKV_ERR_STATE, "reset it before a load: states are in sequence", p->seq, "");
    return TKV_OK;
}

TKV_API tkv_status tkv_seq_load(tkv_cache *kv, const tkv_load_params *p, const void *bytes, size_t size,
                                tkv_load_info *out) {
    tkvi_loader l;
    tkvi_section tokens;
    tkv_status st;
    int i;
    if (!kv || !p) return TKV_ERR_ARG;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    st = tkvi_check_load(kv, p, bytes);
    if (st) return st;
    memset(&l, 0, sizeof l);
    l.kv = kv;
    l.p = p;
    l.bytes = (const uint8_t *)bytes;
    l.size = size;
    st = tkvi_verify_file(&l);
    if (st) return st;
    kv->seq[p->seq].used = ++kv->call.clock;
    st = tkvi_provide_file(&l);
    if (!st) st = tkvi_place_file(&l);
    if (l.room) tkvi_put(&kv->heap, l.room, l.room_bytes);
    tkvi_shrink_index(kv, p->seq);
    tkvi_trim(&kv->pool);
    if (st) return st;
    tkvi_remember_turns(kv, p->seq);
    tokens = tkvi_find_section(&l, TKVI_SAVED_TOKENS, 0);
    for (i = 0; i < l.info.n_saved_tokens && p->tokens; i++)
        p->tokens[i] = tkvi_saved_int(tokens.at + 4 * (size_t)i);
    l.info.n_tokens = tkv_get_length(kv, p->seq, TKV_ALL_LAYERS);
    if (out) *out = l.info;
    return tkvi_ok(kv);
}

#endif /* TKVI_PERSIST_LOAD_H */
