/*
 * persist/place.h - places what persist/verify.h has verified: tables, blocks, entries. Memory for them is provided
 * before (persist/load.h, persist/load_cache.h), so only damaged bytes of a file that has changed meanwhile can fail.
 *
 * Tables are known by their bytes. A table that the layer has already is not stored twice. Without a free version the
 * blocks of one are coded again with the layer's current table: those of the cache first (reclaim/versions.h), else
 * those of the file. A whole cache gets its versions as they were.
 */
#ifndef TKVI_PERSIST_PLACE_H
#define TKVI_PERSIST_PLACE_H

#include "persist/verify.h"
#include "reclaim/versions.h"

/* >>tables */
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
    const int has_table = l->kv->tables.current_version[layer] >= 0, need = tkvi_table_parts(l->kv, layer);
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
                              (is_current && !has_table && need);
        const int is_whole = (t->parts & need) == need;
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
    tkvi_reopen_list(l, layer, &list);
    tkvi_reopen_tables(l, layer, &t);
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
    tkvi_next_table *next = &l->kv->stats.next_table[layer]; /* a layer that needs tables has it */
    if (next->version == version) next->n_heads = 0;         /* heads that were learned ahead are gone */
    tkvi_fill_table(l->kv, layer, version, t->parts, tkvi_saved_table(t, i) + 8);
    tkvi_lay_out_table(l->kv, layer, version);
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
        if (!l->is_cache) tkvi_plan_next_table(l->kv, layer, 0);
    }
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
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        tkvi_reopen_list(&l, layer, &list);
        tkvi_reopen_tables(&l, layer, &t);
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

/* What only a whole cache knows of a block. */
static void tkvi_place_block_history(const tkvi_loader *l, int layer, const tkvi_saved_tables *t,
                                     const uint8_t *run, tkvi_block *b) {
    const int previous = tkvi_load16(run + 26);
    if (previous && tkvi_can_have_layout(l, layer, t, previous - 1)) b->previous_layout = (uint16_t)previous;
    b->n_shared_slots = (uint8_t)tkvi_load16(run + 28);
}

/* >>entries */
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
    list->shift = from->shift;
    list->expired_end = from->expired_end;
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
            tkvi_keep_slots(&r, tkvi_list_of(kv, l->seq, layer), ids, g.i + k);
            if (record != l->from.room) memcpy(l->from.room, record, to.saved->bytes.total);
            tkvi_recode_heads(&r, l->from.room, tkvi_block_bytes(&kv->pool, b));
            l->info.n_recoded++;
        }
    }
    return 1;
}

/* Places tables, entries and blocks of a layer. Returns 0 if a block is damaged. */
static int tkvi_place_layer(tkvi_loader *l, int layer) {
    tkvi_saved_list list;
    tkvi_saved_tables t;
    tkvi_table_map map;
    int i, fits;
    tkvi_reopen_list(l, layer, &list);
    tkvi_reopen_tables(l, layer, &t);
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

/* >>what both loads do */
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

/* Gives the lists of the sequence their shifts, and the ends of expired tokens, where the file has none. In files of
 * former versions lists without blocks had lost them. */
static void tkvi_place_shifts(const tkvi_loader *l) {
    int layer;
    for (layer = 0; layer < l->kv->tables.cfg.model.n_layers && !(l->flags & TKVI_SAVED_HAS_SHIFTS);
         layer++) {
        tkvi_list *list = tkvi_list_of(l->kv, l->seq, layer);
        if (TKVI_HAS_MOVES) (void)tkvi_shift_of_last(l->kv, l->seq, layer, list->len, &list->shift);
        list->is_moved |= list->shift != 0;
        if (list->expired)
            list->expired_end = tkvi_told_expired_end(l->kv, layer, list, tkvi_ids(l->kv, l->seq, layer));
    }
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
        if (l->kv->tables.plan[layer].stored_layer != layer) continue;
        tkvi_reopen_list(l, layer, &list);
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
    if (!tkvi_grow_sources(pool, pool->block_cap ? pool->block_cap : tkvi_cap_for(1)))
        return tkvi_refuse_no_memory(l->kv, "no memory to attach a file to sequence", l->p->seq, "");
    pool->attached[i].bytes = l->from.file.bytes;
    pool->attached[i].size = l->from.file.end;
    pool->attached[i].n_sources = 1;
    l->attached = (uint16_t)(i + 1);
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

#endif /* TKVI_PERSIST_PLACE_H */
