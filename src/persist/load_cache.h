/*
 * persist/load_cache.h - loads a whole cache into a new one.
 *
 *     provide    arrays, versions of tables and pages as the saved cache had them; nothing is recoded for them
 *     place      tables, blocks, entries and states; then the holders of shared blocks are linked as they were
 *     store      the numbers of persist/whole.h; cannot fail
 *
 * After an error the cache is emptied, and is as new.
 */
#ifndef TKVI_PERSIST_LOAD_CACHE_H
#define TKVI_PERSIST_LOAD_CACHE_H

#include "persist/place.h"
#include "step/turns.h"

/* 1 if nothing was appended, loaded or learned since the cache was created. */
static int tkvi_is_new_cache(const tkv_cache *kv) {
    int i,
        is_new = !kv->pool.n_entries && !kv->states.held_bytes && !kv->states.n_stateful && !kv->call.clock;
    for (i = 0; i < kv->tables.cfg.limits.max_seqs * kv->tables.cfg.model.n_layers; i++)
        is_new &= !kv->list[i].len;
    for (i = 0; i < kv->tables.cfg.limits.max_seqs; i++) is_new &= !kv->seq[i].reserved_len;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++)
        is_new &=
            kv->tables.current_version[i] < 0 && (!kv->stats.tokens_seen || kv->stats.tokens_seen[i] < 1);
    return is_new;
}

/* >>provide */
/* Visits the numbers again, from the first. */
static void tkvi_visit_again(const tkvi_loader *l, tkvi_numbers *io, tkvi_number_mode mode) {
    io->mode = mode;
    io->at = tkvi_loaded_section(l, TKVI_SAVED_CACHE, 0).at;
    tkvi_visit_cache(io);
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
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        tkvi_reopen_tables(l, layer, &t);
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
    /* The free pages of the saved cache too, since a budget counts them. But no more than it can have had. */
    most_pages = pages + pool->kept_free_pages + l->numbers.n_reserved;
    if (demand.entries + l->numbers.n_reserved && l->numbers.n_pages > pages)
        n_pages = l->numbers.n_pages < most_pages ? l->numbers.n_pages : most_pages;
    else n_pages = pages;
    while (provided && !pool->keep_all && pool->n_pages < n_pages) provided = tkvi_add_page(pool);
    if (kv->heap.limit && kv->heap.held > kv->heap.limit) { /* by the budget in the file */
        kv->heap.at_limit = 1;
        provided = 0;
    }
    if (provided && !l->numbers.lacks_memory && pages <= pool->n_pages &&
        (!pool->max_pages || pages <= pool->max_pages))
        return TKV_OK;
    return tkvi_refuse_no_memory(kv,
                                 l->from.bytes
                                     ? "no memory; blocks from a store must fit too, unless attached:"
                                     : "no memory to load; give scratch outside the budget. Blocks:",
                                 demand.entries, "");
}

/* >>place */
/* Links the holders of each shared block of a layer as they were. Returns 0 if the file names no rings. */
static int tkvi_place_rings(tkvi_loader *l, int layer) {
    tkvi_pool *pool = &l->kv->pool;
    int64_t n_shared = 0, n_first = 0;
    int i;
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        const uint32_t *ids = tkvi_ids(l->kv, l->seq, layer);
        tkvi_saved_list list;
        tkvi_reopen_list(l, layer, &list);
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
    tkvi_reopen_list(l, layer, &list);
    tkvi_reopen_tables(l, layer, &t);
    map = tkvi_map_tables(l, layer, &list, &t);
    tkvi_place_new_tables(l, layer, &t, &map, -1);
    for (; l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        tkvi_reopen_list(l, layer, &list);
        if (!tkvi_place_entries(l, layer, &list, &t, &map)) return 0;
    }
    return tkvi_place_rings(l, layer);
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
        state = bytes <= s->limit - s->held_bytes ? tkvi_new_state(s, from->size) : NULL;
        if (!state) return tkvi_refuse_no_memory(l->kv, "no memory for the states of sequence", l->seq, "");
        state->layer = from->layer;
        state->n_tokens = from->n_tokens;
        memcpy(tkvi_bytes_of_state(state), from->bytes, from->size);
    }
    tkvi_list_state(s, l->seq, state);
    return TKV_OK;
}

static tkv_status tkvi_place_states_of_all(tkvi_loader *l) {
    tkv_status st = TKV_OK;
    for (l->seq = 0; TKVI_HAS_STATES && l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_STATES, l->seq);
        size_t at = 0;
        while (!st && at < s.n) {
            const tkvi_saved_state state = tkvi_next_saved_state(&s, &at);
            st = tkvi_place_state_of_all(l, &state);
        }
    }
    return st;
}

/* Reserves again what sequences had reserved. Pages, entries and room in the lists are there, unless a file says
 * otherwise: then they are provided, or the reservation ends. */
static void tkvi_reserve_again(tkv_cache *kv) {
    const tkvi_demand none = tkvi_no_demand();
    int seq;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        const int len = kv->seq[seq].reserved_len;
        tkvi_request request = tkvi_no_request();
        tkv_rows row;
        int64_t n_entries;
        if (!len) continue;
        row.seq = seq;
        row.n = tkvi_max(0, len - tkv_get_length(kv, seq, TKV_ALL_LAYERS));
        request.rows = &row;
        request.n_rows = 1;
        request.layer = -1;
        kv->seq[seq].reserved_len = 0;
        tkvi_demand_reservation(kv, seq, len, &request);
        n_entries = tkvi_entries_for_demand(&kv->pool, &request.fixed);
        if (!tkvi_grow_index(kv, &request, n_entries, tkvi_n_row_entries)) continue;
        tkvi_reserve_slots(kv, seq, len);
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
    kv->budget.has_loaded = 1;
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l) && !st; l->seq++) {
        tkvi_place_shifts(l);
        tkvi_count_late_blocks(kv, l->seq);
        st = tkvi_check_placed(l);
    }
    if (!st) st = tkvi_place_states_of_all(l);
    if (st) return st;
    tkvi_visit_again(l, &l->numbers, TKVI_STORES_NUMBERS);
    tkvi_reserve_again(kv);
    for (l->seq = 0; l->seq < tkvi_loaded_seqs_end(l); l->seq++) {
        if (TKVI_HAS_STATES) tkvi_mark_states(&kv->states, l->seq);
    }
    k.kv = kv;
    k.reason = reason;
    k.size = sizeof reason;
    if (TKVI_HAS_METER && kv->meter && tkvi_check_meter(&k)) tkvi_meter_clear(kv->meter);
    return TKV_OK;
}

/* >>the whole */
/* Empties a cache that a whole load has begun to fill, in which rings may be broken. */
static void tkvi_empty_cache(tkvi_loader *l, unsigned had_versions) {
    tkv_cache *kv = l->kv;
    tkvi_pool *pool = &kv->pool;
    const int n_layers = kv->tables.cfg.model.n_layers;
    uint32_t i;
    int seq, v, c;
    memset(kv->list, 0, (size_t)kv->tables.cfg.limits.max_seqs * (size_t)n_layers * sizeof *kv->list);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) tkvi_forget_beside(kv, seq, 0);
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

#endif /* TKVI_PERSIST_LOAD_CACHE_H */
