/*
 * reclaim/budget.h - keeps everything that a cache holds within its budget. When bytes are needed, blocks are
 * recoded into smaller formats, oldest first.
 *
 *     append -> 1. forecast: does the append fit after some reclaim stages?             (tkvi_plan_reclaim)
 *                  If not: TKV_ERR_BUDGET. Nothing is recoded or evicted.
 *            -> 2. if the level's threshold is passed: recode some old blocks           (tkvi_recode_for_append)
 *            -> 3. while the append does not fit, the next of these reclaim stages:     (tkvi_reclaim_bytes)
 *                  a. recode every block that this level recodes, then go to the next level
 *                  b. offload the oldest blocks, if the config has a store (offload.h)
 *                  c. discard blocks that the caller's model can recompute (discard.h)
 *                  d. evict tokens (evict_tokens.h); first of all stages if only that order fits
 *
 * The forecast is arithmetic. A dry run (tkvi_peak) counts the slots that an operation takes. The number of blocks
 * of each size gives the pages in use exactly (cache/pool.h). Only eviction is not known exactly: how many blocks it
 * frees depends on the tokens that the policy chooses. tkvi_bound_eviction computes a lower bound. If the bound does
 * not suffice, tkvi_dry_run_floor is a dry run of the eviction: the policy chooses all victims that it may have. The
 * remaining tokens are merged into as few blocks as possible. The real eviction then does the same.
 *
 * Recoding needs a free page for each block size that it writes. These pages (pool.recode_pages) are held from the
 * first append on, and only recoding uses them. A list stores how many of its blocks the level has recoded
 * (tkvi_list.n_recoded, n_tightest). So the search for the next block looks at one or two blocks of a list.
 *
 * The level rises if the average pressure demands it and this level has nothing left to recode. It also rises in
 * stage a. It falls if the pressure fell and all blocks would fit at the lower level. Blocks then keep their formats.
 */
#ifndef TKVI_RECLAIM_BUDGET_H
#define TKVI_RECLAIM_BUDGET_H

#include "cache/lookup.h"
#include "reclaim/discard.h"
#include "reclaim/evict_tokens.h"

/* >>bytes */
/* Bytes held, without free pages beyond pool.recode_pages. */
static size_t tkvi_used_bytes(const tkv_cache *kv) {
    const size_t recode_pages = (size_t)kv->pool.recode_pages, n_free = kv->pool.n_free_pages;
    return kv->heap.held - (n_free > recode_pages ? n_free - recode_pages : 0) * kv->tables.page_bytes;
}

/* Bytes held, without pages. */
static size_t tkvi_bytes_without_pages(const tkv_cache *kv) {
    return kv->heap.held - (size_t)kv->pool.n_pages * kv->tables.page_bytes;
}

/* Bytes of the new array if `cap` entries cannot hold n_entries, else 0. The old array is not subtracted: it is freed
 * only after the copy. */
static size_t tkvi_growth_bytes(uint32_t cap, int64_t n_entries, size_t entry_bytes) {
    return n_entries > (int64_t)cap ? (size_t)tkvi_cap_for(n_entries) * entry_bytes : 0;
}

/* >>the memory request of a call */
/* Number of tokens that the last block of a list can still take. */
static int tkvi_tail_free_slots(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                                const uint32_t *ids) {
    int last = list->n - 1, capacity;
    if (last < 0) return 0;
    if (last >= list->sinks && tkvi_tier_at(list, last) != TKV_TIER_HOT)
        return 0; /* a flush recoded it before it was full */
    if (TKVI_HAS_EVICT && kv->pool.block[ids[last]].n_packed)
        return 0; /* a packed block: truncation removed the blocks after it */
    capacity = last < list->sinks ? p->sink : TKVI_BLOCK;
    return tkvi_max(0, capacity - (list->len - tkvi_block_start(kv, ids, last)));
}

/* Number of blocks that n more tokens open. *sink: 1 if the sinks' block is one of them. */
static int tkvi_n_new_blocks(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                             const uint32_t *ids, int n, int *sink) {
    int n_tokens = n - tkvi_tail_free_slots(kv, p, list, ids);
    *sink = n_tokens > 0 && list->len == 0 && p->sink > 0;
    if (*sink) n_tokens -= p->sink;
    return *sink + (n_tokens > 0 ? (n_tokens + TKVI_BLOCK - 1) / TKVI_BLOCK : 0);
}

/* Block numbers that a list must hold with n more tokens: its blocks, the new ones, and one more. */
static int tkvi_n_list_entries(const tkv_cache *kv, int seq, int layer, int n) {
    int sink;
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    return list->n +
           tkvi_n_new_blocks(kv, &kv->tables.plan[layer], list, tkvi_ids(kv, seq, layer), n, &sink) + 1;
}

/* Block numbers that the longest list of a row of a memory request must hold. layer < 0: of all layers. uses_n_left:
 * 1 leaves out the blocks that the forecast frees (tkvi_list.n_left). */
static int tkvi_n_row_entries(const tkv_cache *kv, const tkv_rows *row, int layer, int uses_n_left) {
    const int len_after = layer < 0 ? tkv_get_length(kv, row->seq, TKV_ALL_LAYERS) + row->n : 0;
    int l, most = 0;
    if (row->n == 0) return 0;
    for (l = tkvi_max(layer, 0); l <= (layer < 0 ? kv->tables.cfg.model.n_layers - 1 : layer); l++) {
        const tkvi_list *list = tkvi_list_of(kv, row->seq, l);
        const int n_new = layer < 0 ? len_after - list->len : row->n,
                  n_freed = uses_n_left ? list->n - list->n_left : 0;
        if (kv->tables.plan[l].stored_layer == l && n_new > 0)
            most = tkvi_max(most, tkvi_n_list_entries(kv, row->seq, l, n_new) - n_freed);
    }
    return most;
}

/* Bytes of new arrays of the index (block table, lists, space of choices) if there are `blocks` blocks and the
 * memory request is served. uses_n_left: as in tkvi_n_row_entries. */
static size_t tkvi_index_growth_bytes(const tkv_cache *kv, int64_t blocks, int uses_n_left) {
    const tkvi_memory_request *request = &kv->memory_request;
    size_t bytes = tkvi_growth_bytes(kv->pool.block_cap, blocks + request->blocks,
                                     tkvi_block_entry_bytes(&kv->tables.cfg));
    int i, most = 0;
    for (i = 0; i < request->n_rows; i++) {
        const int n_entries = tkvi_n_row_entries(kv, &request->rows[i], request->layer, uses_n_left);
        bytes += tkvi_growth_bytes(kv->seq[request->rows[i].seq].cap, n_entries, sizeof(uint32_t)) *
                 (size_t)kv->tables.cfg.model.n_layers;
        most = tkvi_max(most, n_entries);
    }
    return bytes + tkvi_growth_bytes(kv->choice_cap, most, tkvi_choice_entry_bytes(&kv->tables.cfg));
}

/* Clears the memory request. */
static void tkvi_clear_request(tkv_cache *kv) {
    memset(kv->slot_request, 0, (size_t)kv->tables.n_classes * sizeof *kv->slot_request);
    memset(&kv->memory_request, 0, sizeof kv->memory_request);
}

/* Sets the memory request of an operation: slots from its dry run, tokens of lists from its rows. If the
 * operation gives back slots of a class, the request for that class is 0, not negative. layer: as in
 * tkvi_memory_request. */
static void tkvi_set_request(tkv_cache *kv, const tkvi_peak *dry_run, const tkv_rows *rows, int n_rows,
                             int layer) {
    int64_t blocks = kv->pool.n_offloaded;
    int c;
    for (c = 0; c < kv->tables.n_classes; c++) {
        const int64_t taken = kv->pool.used_slots[c] + kv->pool.reserved_slots[c],
                      n_more = dry_run->live[c] - taken;
        kv->slot_request[c] = n_more > 0 ? n_more : 0;
        blocks += taken + kv->slot_request[c];
    }
    kv->memory_request.rows = rows;
    kv->memory_request.n_rows = n_rows;
    kv->memory_request.layer = layer;
    kv->memory_request.blocks = dry_run->most_blocks - blocks;
}

/* >>forecast */
/* All forecasts share one array of slots (kv->slot_request): a new forecast overwrites the slots of the last one. */
typedef struct tkvi_forecast {
    int64_t *slots;      /* [n_classes] slots in use, reserved or requested */
    int64_t n_offloaded; /* blocks without a slot: offloaded or discarded */
    int uses_n_left;     /* 1: lists have tkvi_list.n_left blocks */
    int64_t extra_pages; /* pages to add, because the classes of the freed slots are unknown */
} tkvi_forecast;

/* Forecast of the present state with the memory request, without any reclaim. */
static tkvi_forecast tkvi_forecast_now(tkv_cache *kv) {
    tkvi_forecast forecast;
    int c;
    forecast.slots = kv->slot_request + kv->tables.n_classes;
    forecast.n_offloaded = kv->pool.n_offloaded;
    forecast.uses_n_left = 0;
    forecast.extra_pages = 0;
    for (c = 0; c < kv->tables.n_classes; c++)
        forecast.slots[c] = kv->pool.used_slots[c] + kv->pool.reserved_slots[c] + kv->slot_request[c];
    return forecast;
}

/* Bytes held in a forecast, with the pages for recoding and new arrays of the index and page table. *index, if not
 * NULL, gets the bytes of these arrays. Returns (size_t)-1 on overflow. */
static size_t tkvi_forecast_bytes(const tkv_cache *kv, const tkvi_forecast *forecast, size_t *index) {
    int64_t pages = kv->pool.recode_pages + forecast->extra_pages, blocks = forecast->n_offloaded;
    size_t bytes, growth;
    int c;
    for (c = 0; c < kv->tables.n_classes; c++) {
        const int64_t slots = forecast->slots[c] > 0 ? forecast->slots[c] : 0;
        pages += tkvi_pages_for(&kv->tables.size_class[c], slots);
        blocks += slots;
    }
    growth = tkvi_index_growth_bytes(kv, blocks, forecast->uses_n_left);
    if (!tkvi_add(growth, tkvi_growth_bytes(kv->pool.page_cap, pages, sizeof(tkvi_page)), &growth))
        return (size_t)-1;
    if (index) *index = growth;
    if ((uint64_t)pages > (size_t)-1 || !tkvi_mul((size_t)pages, kv->tables.page_bytes, &bytes) ||
        !tkvi_add(bytes, tkvi_bytes_without_pages(kv), &bytes) || !tkvi_add(bytes, growth, &bytes))
        return (size_t)-1;
    return bytes;
}

/* Bytes held if the memory request is served without any reclaim. */
static size_t tkvi_requested_bytes(tkv_cache *kv) {
    const tkvi_forecast now = tkvi_forecast_now(kv);
    return tkvi_forecast_bytes(kv, &now, NULL);
}

/* >>stale blocks */
/* A stale block: the tier spec of the level demands a layout with fewer bytes for it. */
typedef struct tkvi_stale {
    int seq, layer, i, layout; /* layout: the smaller one */
    tkv_tier due;
} tkvi_stale;

/* The present layout of a stale block. */
static const tkvi_layout *tkvi_layout_at(const tkv_cache *kv, const tkvi_stale *s) {
    return &kv->tables.layout[kv->pool.block[tkvi_ids(kv, s->seq, s->layer)[s->i]].layout];
}

/* 1 if any sequence has an open step. */
static int tkvi_has_open_step(const tkv_cache *kv) {
    int seq, open = 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) open |= kv->seq[seq].in_step;
    return open;
}

/* The tier that a tier spec demands for a block of a list. TKV_TIER_HOT: the block must stay as it is. start, end:
 * its positions. is_last: 1 for the last block. can_learn: 1 if missing tables can be learned now. Otherwise blocks
 * wait for them. */
static tkv_tier tkvi_due_tier_of(const tkv_cache *kv, int seq, int layer, int start, int end, int is_last,
                                 const tkvi_tier_spec *spec, int can_learn) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    tkv_tier due = tkvi_tier_by_age(spec, spec->hot, end, kv->seq[seq].in_step ? list->step_len : list->len);
    if (end > list->chunk_start || (is_last && end - start < TKVI_BLOCK)) return TKV_TIER_HOT;
    while (spec->needs_table[due] && kv->tables.current_version[layer] < 0 && !can_learn)
        due = due == TKV_TIER_ARCHIVE ? TKV_TIER_WARM : TKV_TIER_HOT;
    return due;
}

/* tkvi_due_tier_of for block i of a list. */
static tkv_tier tkvi_due_tier(const tkv_cache *kv, int seq, int layer, int i, const tkvi_tier_spec *spec,
                              int can_learn) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    return tkvi_due_tier_of(kv, seq, layer, tkvi_block_start(kv, ids, i), tkvi_block_end(kv, list, ids, i),
                            i + 1 == list->n, spec, can_learn);
}

/* Counts block i as recoded for the tier `due`. All blocks before it are counted already. Each tier of a list is a
 * range of consecutive blocks, so only counts change. */
static void tkvi_count_recoded(tkvi_list *list, int i, tkv_tier due) {
    if (i >= list->sinks + list->archive + list->warm) list->warm++;
    if (due == TKV_TIER_ARCHIVE && i >= list->sinks + list->archive) {
        list->warm--;
        list->archive++;
    }
    if (due == TKV_TIER_ARCHIVE) list->n_tightest++;
    list->n_recoded = tkvi_max(list->n_recoded, i + 1 - list->sinks);
}

/* Finds the oldest stale block of a list, first for the archive, then for warm. 0: there is none. Passed
 * blocks that are due but not stale count as recoded from now on. */
static int tkvi_find_stale_in(tkv_cache *kv, int seq, int layer, int can_learn, tkvi_stale *stale) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_tier_spec *spec = &kv->tables.plan[layer].now;
    for (;;) {
        int i = list->sinks + list->n_tightest;
        tkv_tier due = i < list->n ? tkvi_due_tier(kv, seq, layer, i, spec, can_learn) : TKV_TIER_HOT;
        const tkvi_block *b;
        if (due != TKV_TIER_ARCHIVE) {
            i = list->sinks + list->n_recoded;
            due = i < list->n ? tkvi_due_tier(kv, seq, layer, i, spec, can_learn) : TKV_TIER_HOT;
        }
        if (due == TKV_TIER_HOT) return 0;
        b = &kv->pool.block[ids[i]];
        stale->layout = tkvi_layout_of(&kv->tables, layer, due);
        if (b->refs == 1 && !tkvi_is_offloaded(b) && tkvi_is_smaller(kv, b->layout, stale->layout)) {
            stale->seq = seq;
            stale->layer = layer;
            stale->i = i;
            stale->due = due;
            return 1;
        }
        tkvi_count_recoded(list, i, due);
    }
}

/* The slots that a recoded block may take: any; slots in pages that the pool holds; slots in partial pages of its
 * class. */
typedef enum tkvi_where { TKVI_ANYWHERE, TKVI_IN_FREE_PAGES, TKVI_IN_OPEN_PAGES } tkvi_where;

static int tkvi_has_slot(const tkv_cache *kv, int layout, tkvi_where where) {
    if (where == TKVI_ANYWHERE || kv->pool.partial_pages[kv->tables.layout[layout].size_class] != TKVI_NIL)
        return 1;
    return where == TKVI_IN_FREE_PAGES && (int64_t)kv->pool.n_free_pages > tkvi_reserved_pages(&kv->pool);
}

/* Finds the oldest stale block of all lists that has a slot of the kind `where`. 0: there is none. learns: 1
 * includes blocks that wait for a table, because the table can be learned from the present blocks. */
static int tkvi_find_stale(tkv_cache *kv, tkvi_where where, int learns, tkvi_stale *oldest) {
    int seq, layer, found = 0, oldest_age = -1, can_learn = learns && !tkvi_has_open_step(kv);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            tkvi_stale stale;
            int age;
            if (list->n == 0 || !tkvi_find_stale_in(kv, seq, layer, can_learn, &stale)) continue;
            age = list->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), stale.i);
            if (age <= oldest_age || !tkvi_has_slot(kv, stale.layout, where)) continue;
            oldest_age = age;
            *oldest = stale;
            found = 1;
        }
    return found;
}

/* Writes the error of an operation that does not fit even after all reclaim stages. bytes: the fewest bytes found. */
static tkv_status tkvi_refuse_over_budget(tkv_cache *kv, size_t bytes) {
    tkv_status st = tkvi_fail(kv, TKV_ERR_BUDGET, "the last level would need", (int64_t)bytes,
                              " bytes, more than the budget; reset a sequence or raise it");
    if (kv->store_failed)
        st = tkvi_fail(kv, TKV_ERR_BUDGET, "cfg.offload.write failed, and without it there is no room", 0,
                       NULL);
    kv->refused++;
    tkvi_emit_event(kv, TKV_EVENT_BUDGET, TKV_ALL_LAYERS, 0, 0, bytes, kv->error);
    return st;
}

/* >>levels */
/* Offloads the oldest block of all lists that can be offloaded. 0: there is none, or the store failed. */
static int tkvi_offload_oldest(tkv_cache *kv) {
    int seq, layer, oldest_age = -1, oldest_seq = 0, oldest_layer = 0;
    if (!tkvi_can_store(kv)) return 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const int i = tkvi_find_offloadable(kv, seq, layer);
            int age;
            if (i < 0) continue;
            age = tkvi_list_of(kv, seq, layer)->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), i);
            if (age <= oldest_age) continue;
            oldest_age = age;
            oldest_seq = seq;
            oldest_layer = layer;
        }
    return oldest_age >= 0 && tkvi_offload_next(kv, oldest_seq, oldest_layer);
}

/* Ends all reservations. Called when the plan changes without a budget, or when a budget begins or ends. Reserved
 * slots were counted for the old plan. */
static void tkvi_end_reservations(tkv_cache *kv) {
    const size_t n = (size_t)kv->tables.n_classes;
    int seq;
    memset(kv->reserved_slots, 0, (size_t)kv->tables.cfg.limits.max_seqs * n * sizeof *kv->reserved_slots);
    memset(kv->pool.reserved_slots, 0, n * sizeof *kv->pool.reserved_slots);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) kv->seq[seq].reserved_len = 0;
    tkvi_trim(&kv->pool);
}

/* Applies the plans of a level to all layers, also if the plans of the present level changed. All blocks then count
 * as not yet recoded. */
static void tkvi_apply_plans(tkv_cache *kv, int level) {
    size_t i, lists = (size_t)kv->tables.cfg.limits.max_seqs * (size_t)kv->tables.cfg.model.n_layers;
    tkvi_take_level(&kv->tables, level);
    if (!tkvi_has_budget(kv)) tkvi_end_reservations(kv);
    for (i = 0; i < lists; i++) kv->list[i].n_recoded = kv->list[i].n_tightest = 0;
}

/* Changes the level and emits the event. */
static void tkvi_change_level(tkv_cache *kv, int level) {
    const int from = kv->tables.level;
    if (level == from) return;
    tkvi_apply_plans(kv, level);
    kv->relax_at = (size_t)-1;
    tkvi_pressure_move(&kv->pressure.now, level);
    tkvi_emit_event(kv, TKV_EVENT_LEVEL, TKV_ALL_LAYERS, from, level, tkvi_used_bytes(kv),
                    level > from ? "the pressure rose: old tokens get fewer bits"
                                 : "the pressure fell: new tokens get more bits");
}

/* >>reclaim stages */
/* Bits of kv->reclaim_stages. Every forecast at a level recodes all stale blocks, or with TKVI_LOOSEN does the
 * opposite. The other bits add stages. tkvi_reclaim_bytes applies the bits with which the forecast did fit. */
typedef enum tkvi_reclaim_stages {
    TKVI_LOOSEN = 1,          /* forecast only: blocks smaller than the level demands grow to its layout */
    TKVI_OFFLOAD_ALL = 2,     /* offload and discard all blocks that can be */
    TKVI_EVICT = 4,           /* evict tokens, except offloaded and discarded ones */
    TKVI_EVICT_ALL = 8,       /* evict offloaded and discarded tokens as well */
    TKVI_EVICT_TO_FLOOR = 16, /* evict each list to its floor and merge it; a dry run knows the victims */
    TKVI_EVICT_FIRST = 32     /* evict before all other stages */
} tkvi_reclaim_stages;

/* The tokens of a sequence that eviction spares in a forecast with these reclaim stages. spec: of the level. */
static tkvi_spared tkvi_build_spared(const tkv_cache *kv, int seq, const tkvi_tier_spec *spec, int level,
                                     int reclaim_stages) {
    tkvi_spared spared;
    memset(&spared, 0, sizeof spared);
    spared.offloaded = !(reclaim_stages & TKVI_EVICT_ALL);
    if (reclaim_stages & TKVI_OFFLOAD_ALL) spared.tier_spec = spec;
    if (TKVI_HAS_DISCARD && reclaim_stages & TKVI_OFFLOAD_ALL && kv->tables.cfg.budget.discard &&
        tkvi_is_idle(kv, seq))
        spared.discarded_to = tkvi_discardable_to(kv, seq, level);
    return spared;
}

/* 1 if the policy chooses the same victims whether or not blocks are recoded or offloaded before. Otherwise a dry
 * run cannot choose them: policies that read keys would see recoded keys, and a user policy is the caller's. */
static int tkvi_can_forecast_victims(const tkv_cache *kv) {
    const tkv_evict_policy policy = kv->tables.cfg.evict.policy;
    return policy && policy != TKV_EVICT_USER && !(tkvi_evict_needs(policy) & TKVI_NEEDS_KEYS) &&
           (!(tkvi_evict_needs(policy) & TKVI_NEEDS_NORMS) || tkvi_keeps_norms(kv));
}

/* The floor of a list: the number of tokens that TKVI_EVICT_TO_FLOOR leaves. It is the number of tokens that cannot
 * be evicted, and kv->kept_eighths eighths of the others. */
static int tkvi_n_floor_tokens(const tkv_cache *kv, int seq, int layer, const tkvi_spared *spared) {
    const int n_staying = tkvi_n_staying(kv, seq, layer, spared);
    const int64_t n_others = tkvi_max(0, tkvi_n_live(kv, seq, layer) - n_staying);
    return n_staying + (int)(n_others * kv->kept_eighths / 8);
}

/* Evicts one list to its floor and merges its blocks. 0: the list is empty, or its sequence has an open step. */
static int tkvi_evict_to_floor(tkv_cache *kv, int seq, int layer, int offloaded_too) {
    tkvi_spared spared;
    memset(&spared, 0, sizeof spared);
    spared.offloaded = !offloaded_too;
    if (kv->seq[seq].in_step || tkvi_list_of(kv, seq, layer)->n == 0) return 0;
    tkvi_evict_or_oldest(kv, seq, layer, tkvi_n_floor_tokens(kv, seq, layer, &spared), &spared, 1);
    return 1;
}

/* A block in a dry run. */
typedef struct tkvi_planned_block {
    uint64_t anchored;
    int start, tokens, layout;
    tkv_tier tier;
    int shared;    /* 1: several lists hold it, so it cannot be freed, merged or recoded */
    int offloaded; /* 1: it has no slot (offloaded or discarded) */
} tkvi_planned_block;

/* Dry run of tkvi_join_blocks with as many tokens as tkvi_n_joinable allows with `fill`. end: end position of b.
 * Returns 1 if b is empty then. */
static int tkvi_dry_run_join(const tkv_cache *kv, tkvi_planned_block *a, tkvi_planned_block *b, int end) {
    const tkvi_layout *layout = kv->tables.layout;
    const int n_free = TKVI_BLOCK - a->tokens;
    if (a->shared || b->shared || a->offloaded || b->offloaded || a->tier != b->tier ||
        tkvi_has_fixed_slots(kv))
        return 0;
    if (layout[a->layout].key != layout[b->layout].key || end - a->start > 65536) return 0;
    if (b->tokens > n_free && a->anchored | b->anchored) return 0;
    a->anchored |= b->anchored;
    a->tokens += tkvi_min(b->tokens, n_free);
    b->tokens -= tkvi_min(b->tokens, n_free);
    return b->tokens == 0;
}

/* Plans the blocks of a list after eviction to its floor and merging. Returns their number and points *out
 * to them. spec: all blocks are recoded by this tier spec before, and offloaded or discarded as `spared` says. NULL:
 * blocks are as they are now. *out is valid until the next choice of victims, because it lies in kv->choice_space. */
static int tkvi_dry_run_floor(tkv_cache *kv, int seq, int layer, const tkvi_spared *spared,
                              const tkvi_tier_spec *spec, tkvi_planned_block **out) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int can_learn = !tkvi_has_open_step(kv);
    tkvi_planned_block *planned;
    tkvi_choice choice;
    int i, t, token = 0, n = 0;
    tkvi_choose_victims_or_oldest(kv, seq, layer, tkvi_n_floor_tokens(kv, seq, layer, spared), spared,
                                  &choice);
    *out = planned = (tkvi_planned_block *)(void *)choice.score; /* the scores are no longer needed */
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        const uint64_t choosable = tkvi_choosable_mask(kv, list, ids, layer, i);
        uint64_t used = tkvi_used_mask(kv, list, ids, i);
        tkvi_planned_block *block = &planned[n];
        for (t = 0; t < TKVI_BLOCK; t++)
            if (choosable >> t & 1 && tkvi_has(choice.victims, token++)) used &= ~((uint64_t)1 << t);
        block->anchored = kv->pool.token_meta[ids[i]].anchored_mask;
        block->start = tkvi_block_start(kv, ids, i);
        block->tokens = tkvi_n_bits(used);
        block->layout = b->layout;
        block->tier = tkvi_tier_at(list, i);
        block->shared = b->refs > 1;
        block->offloaded = !block->shared && tkvi_has_no_slot(kv, seq, layer, i, spared);
        if (spec && i >= list->sinks && !block->shared && !block->offloaded) {
            const tkv_tier due = tkvi_due_tier(kv, seq, layer, i, spec, can_learn);
            if (due != TKV_TIER_HOT) block->tier = due;
            if (due != TKV_TIER_HOT && tkvi_is_smaller(kv, b->layout, spec->layout[due]))
                block->layout = spec->layout[due];
        }
        if (i + 1 < list->n && block->tokens == 0 && !block->shared && !(n > 0 && block[-1].shared)) continue;
        if (i + 1 < list->n && i > list->sinks && n > 0 &&
            tkvi_dry_run_join(kv, block - 1, block, tkvi_block_end(kv, list, ids, i)))
            continue;
        if (block->tokens < tkvi_n_bits(used)) { /* its first tokens moved: it starts at the next one */
            used &= ~tkvi_first_bits(used, tkvi_n_bits(used) - block->tokens);
            for (t = 0; !(used >> t & 1);) t++;
            block->start = tkvi_slot_position(kv, ids[i], t);
        }
        n++;
    }
    return n;
}

/* Number of sinks' blocks among the n blocks of tkvi_dry_run_floor: 0 or 1. */
static int tkvi_dry_run_sinks(const tkv_cache *kv, int seq, int layer, const tkvi_planned_block *planned,
                              int n) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    return n && list->sinks && planned->start == tkvi_block_start(kv, tkvi_ids(kv, seq, layer), 0);
}

/* Dry run of tkvi_discardable_to after all layers were evicted to their floor. */
static int tkvi_dry_run_discardable_to(tkv_cache *kv, int seq, int level, const tkvi_spared *spared) {
    int layer, i, n, to = TKVI_FOREVER;
    if (!TKVI_HAS_DISCARD || !kv->tables.cfg.budget.discard || !tkvi_is_idle(kv, seq)) return 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const int len = tkvi_list_of(kv, seq, layer)->len;
        const tkvi_tier_spec *spec = &tkvi_tier_specs_of(&kv->tables, layer)[level];
        tkvi_planned_block *planned;
        if (tkvi_list_of(kv, seq, layer)->n == 0) continue;
        n = tkvi_dry_run_floor(kv, seq, layer, spared, NULL, &planned);
        i = tkvi_dry_run_sinks(kv, seq, layer, planned, n);
        while (i + 2 < n && !planned[i].shared && tkvi_is_old(kv, seq, layer, planned[i + 1].start, spec))
            i++;
        to = tkvi_min(to, i < n ? planned[i].start : len);
    }
    return to;
}

/* Replaces a list in a forecast by its blocks at the floor. */
static void tkvi_add_floor(tkv_cache *kv, int seq, int layer, int level, int reclaim_stages,
                           tkvi_forecast *forecast) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_tier_spec *spec = &tkvi_tier_specs_of(&kv->tables, layer)[level];
    const int evicts_first = reclaim_stages & TKVI_EVICT_FIRST;
    const tkvi_spared spared = tkvi_build_spared(
        kv, seq, spec, level, evicts_first ? reclaim_stages & ~TKVI_OFFLOAD_ALL : reclaim_stages);
    const int discarded_to = evicts_first && reclaim_stages & TKVI_OFFLOAD_ALL
                                 ? tkvi_dry_run_discardable_to(kv, seq, level, &spared)
                                 : 0;
    tkvi_planned_block *planned;
    int i, sinks;
    list->n_left = tkvi_dry_run_floor(kv, seq, layer, &spared, evicts_first ? NULL : spec, &planned);
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        if (b->refs > 1) continue;
        if (tkvi_is_offloaded(b)) forecast->n_offloaded--;
        else forecast->slots[kv->tables.layout[b->layout].size_class]--;
    }
    sinks = tkvi_dry_run_sinks(kv, seq, layer, planned, list->n_left);
    for (i = 0; i < list->n_left; i++) {
        tkvi_planned_block *b = &planned[i];
        const int end = i + 1 < list->n_left ? b[1].start : list->len;
        if (b->shared) continue;
        if (evicts_first && reclaim_stages & TKVI_OFFLOAD_ALL && i >= sinks &&
            !b->offloaded) { /* then the other stages */
            const tkv_tier due = tkvi_due_tier_of(kv, seq, layer, b->start, end, i + 1 == list->n_left, spec,
                                                  !tkvi_has_open_step(kv));
            if (due != TKV_TIER_HOT && tkvi_is_smaller(kv, b->layout, spec->layout[due]))
                b->layout = spec->layout[due];
            b->offloaded = end <= discarded_to || (tkvi_can_store(kv) && i + 2 < list->n_left &&
                                                   tkvi_is_old(kv, seq, layer, end, spec));
        }
        if (b->offloaded) forecast->n_offloaded++;
        else forecast->slots[kv->tables.layout[b->layout].size_class]++;
    }
}

/* Lower bounds of what eviction in batches takes from a list, after all other stages. */
typedef struct tkvi_evict_bound {
    int oldest_tokens;    /* tokens in RAM, if the policy evicts the oldest first; else 0 */
    int blocks_in_ram;    /* blocks in RAM for other policies; which blocks is unknown */
    int offloaded_blocks; /* blocks without a slot; each of the other blocks may keep one token */
} tkvi_evict_bound;

/* The tier and the layout of block i after all stale blocks are recoded by a tier spec. */
static tkv_tier tkvi_tier_after_recoding(const tkv_cache *kv, int seq, int layer, int i,
                                         const tkvi_tier_spec *spec, int *layout) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const tkvi_block *b = &kv->pool.block[tkvi_ids(kv, seq, layer)[i]];
    const tkv_tier due = tkvi_due_tier(kv, seq, layer, i, spec, !tkvi_has_open_step(kv));
    *layout = due != TKV_TIER_HOT && tkvi_is_smaller(kv, b->layout, spec->layout[due]) ? spec->layout[due]
                                                                                       : b->layout;
    return due != TKV_TIER_HOT ? due : tkvi_tier_at(list, i);
}

/* Computes these bounds for a list. They are 0 in an open step, or if several lists hold a block of it.
 *
 * Two neighbours that cannot be merged into one block hold more than 64 tokens together. So n_staying tokens leave at
 * most 2 * n_staying / 64 blocks, and one more at the end of each stretch. Blocks merge only within a stretch: a
 * range of one tier and one format, with at most 65536 positions. If tokens cannot move (tkvi_has_fixed_slots),
 * blocks are never merged. If the policy evicts the oldest tokens first, the freed blocks are known. They are
 * unknown if recoding can make anchors before. */
static tkvi_evict_bound tkvi_bound_eviction(const tkv_cache *kv, int seq, int layer,
                                            const tkvi_tier_spec *spec, const tkvi_spared *spared) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int oldest_first =
        tkvi_evict_row_of(kv->tables.cfg.evict.policy)->in_order && !kv->tables.cfg.tiers.n_anchors;
    int i, n_staying, stretches = 1 + list->len / 32768, is_shared = 0, previous_key = -1, n_offloaded = 0,
                      offloaded_tokens = 0, tokens_in_ram = 0;
    tkvi_evict_bound freed = {0, 0, 0};
    tkv_tier previous_tier = TKV_TIER_HOT;
    if (kv->seq[seq].in_step || list->n == 0) return freed;
    n_staying = tkvi_n_staying(kv, seq, layer, spared);
    for (i = 0; i < list->n; i++) {
        const int n_live = tkvi_n_bits(tkvi_live_mask_in(kv, list, ids, i));
        is_shared |= kv->pool.block[ids[i]].refs > 1;
        if (i < list->sinks) continue;
        if (tkvi_has_no_slot(kv, seq, layer, i, spared)) {
            n_offloaded++;
            offloaded_tokens += n_live;
            previous_key = -1;
        } else {
            int layout;
            const tkv_tier tier = tkvi_tier_after_recoding(kv, seq, layer, i, spec, &layout);
            stretches += kv->tables.layout[layout].key != previous_key || tier != previous_tier;
            previous_key = kv->tables.layout[layout].key;
            previous_tier = tier;
            tokens_in_ram += n_live;
        }
    }
    if (is_shared || (tkvi_has_fixed_slots(kv) && !oldest_first)) return freed;
    if (!spared->offloaded) freed.offloaded_blocks = tkvi_max(0, n_offloaded - n_staying);
    else n_staying -= offloaded_tokens;
    if (oldest_first) freed.oldest_tokens = tkvi_max(0, tokens_in_ram - n_staying);
    else
        freed.blocks_in_ram =
            tkvi_max(0, list->n - list->sinks - n_offloaded - stretches - 2 * n_staying / TKVI_BLOCK);
    return freed;
}

/* Frees n blocks of a list in a forecast. n_in_class: the blocks of the list in each class. Which n blocks will be
 * freed is unknown. Assume the smallest (a lower bound). Any class of the list may then have one more page that is
 * not full. These classes are marked in `mixed`. */
static void tkvi_subtract_smallest_blocks(tkv_cache *kv, int n, int64_t *n_in_class,
                                          tkvi_forecast *forecast) {
    int64_t *mixed = kv->slot_request + 3 * kv->tables.n_classes;
    while (n > 0) {
        int c, smallest = -1;
        for (c = 0; c < kv->tables.n_classes; c++)
            if (n_in_class[c] > 0 &&
                (smallest < 0 || kv->tables.size_class[c].slots > kv->tables.size_class[smallest].slots))
                smallest = c;
        if (smallest < 0) return;
        for (c = 0; c < kv->tables.n_classes; c++) mixed[c] |= n_in_class[c] > 0;
        forecast->slots[smallest] -= tkvi_min((int)n_in_class[smallest], n);
        n -= (int)n_in_class[smallest];
        n_in_class[smallest] = 0;
    }
}

/* Replaces the blocks of a list in a forecast by those after recoding at a level and after the reclaim stages. */
static void tkvi_add_list_at(tkv_cache *kv, int seq, int layer, int level, int reclaim_stages,
                             tkvi_forecast *forecast) {
    const tkvi_tables *t = &kv->tables;
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_tier_spec *spec = &tkvi_tier_specs_of(t, layer)[level];
    const tkvi_spared spared = tkvi_build_spared(kv, seq, spec, level, reclaim_stages);
    int64_t *n_in_class = kv->slot_request + 2 * t->n_classes;
    tkvi_evict_bound freed = {0, 0, 0};
    tkv_evict_config evict;
    int i;
    memset(n_in_class, 0, (size_t)t->n_classes * sizeof *n_in_class);
    if (TKVI_HAS_EVICT) (void)tkvi_evict_fill(&t->cfg.evict, &evict);
    if (TKVI_HAS_EVICT && reclaim_stages & TKVI_EVICT)
        freed = tkvi_bound_eviction(kv, seq, layer, spec, &spared);
    list->n_left = list->n - freed.blocks_in_ram;
    for (i = list->sinks; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        int is_freed = 0, layout;
        if (b->refs > 1) continue;
        if (tkvi_has_no_slot(kv, seq, layer, i, &spared)) {
            is_freed = freed.offloaded_blocks-- > 0;
            if (!tkvi_is_offloaded(b)) forecast->slots[t->layout[b->layout].size_class]--;
            forecast->n_offloaded += !is_freed - tkvi_is_offloaded(b);
            list->n_left -= is_freed;
            continue;
        }
        if (TKVI_HAS_EVICT && freed.oldest_tokens > 0) {
            freed.oldest_tokens -= tkvi_n_bits(tkvi_live_mask_in(kv, list, ids, i));
            is_freed = freed.oldest_tokens >= 0 && i + 1 < list->n &&
                       !tkvi_live_pinned_mask(kv, list, ids, i) &&
                       tkvi_block_start(kv, ids, i) >= evict.sink_tokens;
        }
        if (reclaim_stages & TKVI_LOOSEN) {
            layout = spec->layout[tkvi_due_tier(kv, seq, layer, i, spec, !tkvi_has_open_step(kv))];
            if (!tkvi_is_smaller(kv, layout, b->layout)) layout = b->layout;
        } else {
            (void)tkvi_tier_after_recoding(kv, seq, layer, i, spec, &layout);
        }
        forecast->slots[t->layout[b->layout].size_class]--;
        forecast->slots[t->layout[layout].size_class] += !is_freed;
        n_in_class[t->layout[layout].size_class]++;
        list->n_left -= is_freed;
    }
    tkvi_subtract_smallest_blocks(kv, freed.blocks_in_ram, n_in_class, forecast);
}

/* Forecast at a level after these reclaim stages, with the memory request. */
static tkvi_forecast tkvi_forecast_level(tkv_cache *kv, int level, int reclaim_stages) {
    tkvi_forecast forecast = tkvi_forecast_now(kv);
    int64_t *mixed = kv->slot_request + 3 * kv->tables.n_classes;
    int seq, layer, c, n = 0;
    forecast.uses_n_left = 1;
    memset(mixed, 0, (size_t)kv->tables.n_classes * sizeof *mixed);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
            if (TKVI_HAS_EVICT && reclaim_stages & TKVI_EVICT_TO_FLOOR && !kv->seq[seq].in_step &&
                tkvi_list_of(kv, seq, layer)->n)
                tkvi_add_floor(kv, seq, layer, level, reclaim_stages, &forecast);
            else tkvi_add_list_at(kv, seq, layer, level, reclaim_stages, &forecast);
    for (c = 0; c < kv->tables.n_classes; c++) n += mixed[c] != 0;
    forecast.extra_pages = tkvi_max(0, n - 1);
    return forecast;
}

/* 1 if the memory request fits into the budget at the last level after these reclaim stages. *bytes: lowered to the
 * bytes held then. Sets kv->reclaim_stages and kv->kept_eighths. */
static int tkvi_try_stages(tkv_cache *kv, int reclaim_stages, int kept_eighths, size_t budget,
                           size_t *bytes) {
    tkvi_forecast forecast;
    size_t needed;
    kv->reclaim_stages = reclaim_stages;
    kv->kept_eighths = kept_eighths;
    forecast = tkvi_forecast_level(kv, kv->pressure.cfg.max_level, reclaim_stages);
    needed = tkvi_forecast_bytes(kv, &forecast, NULL);
    *bytes = needed < *bytes ? needed : *bytes;
    return needed <= budget;
}

/* 1 if the memory request fits with TKVI_EVICT_TO_FLOOR. Tries three orders: the other stages, then eviction;
 * eviction alone; eviction, then the other stages. It spares offloaded tokens in all orders first, then none. */
static int tkvi_try_floor(tkv_cache *kv, int kept_eighths, size_t budget, size_t *bytes) {
    static const int orders[] = {TKVI_OFFLOAD_ALL, TKVI_EVICT_FIRST, TKVI_OFFLOAD_ALL | TKVI_EVICT_FIRST};
    const int n_orders = (int)(sizeof orders / sizeof *orders);
    int i, fits = 0;
    for (i = 0; i < 2 * n_orders && !fits; i++) {
        /* recoding before the eviction makes anchors, and a dry run does not know them */
        if (kv->tables.cfg.tiers.n_anchors && !(orders[i % n_orders] & TKVI_EVICT_FIRST)) continue;
        fits = tkvi_try_stages(
            kv, TKVI_EVICT | TKVI_EVICT_TO_FLOOR | orders[i % n_orders] | (i < n_orders ? 0 : TKVI_EVICT_ALL),
            kept_eighths, budget, bytes);
    }
    return fits;
}

/* Finds reclaim stages after which the memory request fits into the budget, and sets kv->reclaim_stages. Tries none,
 * then each level that cfg.budget.pressure allows, then more stages at the last level. It tries every level, because
 * the last one need not take the fewest bytes: more block sizes leave more pages that are not full. Returns 1 if it
 * fits. *bytes: the fewest bytes found. */
static int tkvi_choose_stages(tkv_cache *kv, size_t budget, size_t *bytes) {
    const tkv_config *cfg = &kv->tables.cfg;
    int level, kept_eighths;
    kv->reclaim_stages = 0;
    *bytes = tkvi_requested_bytes(kv);
    for (level = kv->tables.level; *bytes > budget && level <= kv->pressure.cfg.max_level; level++) {
        const tkvi_forecast forecast = tkvi_forecast_level(kv, level, 0);
        const size_t needed = tkvi_forecast_bytes(kv, &forecast, NULL);
        *bytes = needed < *bytes ? needed : *bytes;
    }
    if (*bytes <= budget) return 1;
    if ((tkvi_can_store(kv) || (TKVI_HAS_DISCARD && cfg->budget.discard)) &&
        tkvi_try_stages(kv, TKVI_OFFLOAD_ALL, 0, budget, bytes))
        return 1;
    if (!TKVI_HAS_EVICT || !cfg->evict.policy) return 0;
    if (tkvi_try_stages(kv, TKVI_OFFLOAD_ALL | TKVI_EVICT, 0, budget, bytes)) return 1;
    if (tkvi_try_stages(kv, TKVI_OFFLOAD_ALL | TKVI_EVICT | TKVI_EVICT_ALL, 0, budget, bytes)) return 1;
    if (!tkvi_can_forecast_victims(kv) || !tkvi_try_floor(kv, 0, budget, bytes)) return 0;
    for (kept_eighths = 7; kept_eighths > 0 && !tkvi_try_floor(kv, kept_eighths, budget, bytes);)
        kept_eighths--;
    return kept_eighths > 0 || tkvi_try_floor(kv, 0, budget, bytes);
}

/* tkvi_choose_stages at the start of a call. A store that failed in an earlier call is tried again. */
static int tkvi_plan_reclaim(tkv_cache *kv, size_t budget, size_t *bytes) {
    kv->store_failed = 0;
    return tkvi_choose_stages(kv, budget, bytes);
}

/* >>work */
/* Recodes the oldest stale block that has a slot. Returns the bytes freed; 0: no block can be recoded at this
 * level. limit, if not 0: the bytes that may be held. If a block would open a page beyond the limit, a block that
 * opens none is recoded instead. Such a page pays only if more blocks follow. learns: as in tkvi_find_stale. */
static size_t tkvi_recode_oldest(tkv_cache *kv, size_t limit, int learns) {
    tkvi_stale stale;
    size_t old_bytes;
    const int recode_pages = kv->pool.recode_pages;
    if (!tkvi_find_stale(kv, TKVI_IN_FREE_PAGES, learns, &stale)) return 0;
    if (limit && !tkvi_has_slot(kv, stale.layout, TKVI_IN_OPEN_PAGES)) {
        const tkvi_forecast recoded = tkvi_forecast_now(kv);
        recoded.slots[tkvi_layout_at(kv, &stale)->size_class]--;
        recoded.slots[kv->tables.layout[stale.layout].size_class]++;
        if (tkvi_forecast_bytes(kv, &recoded, NULL) > limit &&
            !tkvi_find_stale(kv, TKVI_IN_OPEN_PAGES, learns, &stale))
            return 0;
    }
    old_bytes = tkvi_layout_at(kv, &stale)->bytes.total;
    if (kv->tables.plan[stale.layer].now.needs_table[stale.due] &&
        kv->tables.current_version[stale.layer] < 0) {
        int8_t old_version; /* learns a table from the present blocks, because this block cannot wait */
        if (!tkvi_begin_table(kv, stale.layer, 1, &old_version) ||
            kv->tables.current_version[stale.layer] < 0)
            return 0;
        tkvi_end_table(kv, stale.layer, old_version, 1);
        stale.layout = tkvi_layout_of(&kv->tables, stale.layer, stale.due);
    }
    kv->pool.recode_pages = 0;
    tkvi_demote_block(kv, stale.seq, stale.layer, stale.i, stale.layout, NULL);
    kv->pool.recode_pages = recode_pages;
    tkvi_count_recoded(tkvi_list_of(kv, stale.seq, stale.layer), stale.i, stale.due);
    kv->recoded[kv->tables.level]++;
    return old_bytes - kv->tables.layout[stale.layout].bytes.total;
}

/* Bytes in use above which a level recodes blocks: its threshold of the budget. It is lower if the budget must
 * leave memory for the blocks that all layers of a sequence open at the same token. Level 0 recodes nothing:
 * (size_t)-1. */
static size_t tkvi_soft_limit(const tkv_cache *kv, int level) {
    const size_t budget = kv->tables.cfg.budget.bytes,
                 bytes_per_block = kv->bytes_per_block + kv->bytes_per_block / 4;
    size_t soft;
    if (level == 0) return (size_t)-1;
    soft = tkvi_threshold(&kv->pressure.cfg, level - 1) < 1.0f
               ? (size_t)((double)budget * (double)tkvi_threshold(&kv->pressure.cfg, level - 1))
               : budget;
    return budget > bytes_per_block && budget - bytes_per_block < soft ? budget - bytes_per_block : soft;
}

/* 1 if more bytes are in use than tenths / 10 of the soft limit of the level. */
static int tkvi_is_pressed(const tkv_cache *kv, int tenths) {
    const size_t soft = tkvi_soft_limit(kv, kv->tables.level);
    return kv->tables.level > 0 && tkvi_used_bytes(kv) > (tenths < 10 ? soft / 10 * (size_t)tenths : soft);
}

/* Recodes the oldest stale block if it is time: memory is short (pressed), or the level is
 * cfg.budget.pressure.min_level and not 0. At that level stale blocks are recoded even if memory is free. A
 * table is learned from few tokens only if memory is short. Otherwise blocks wait for it. Returns the bytes freed. */
static size_t tkvi_recode_if_due(tkv_cache *kv, int pressed) {
    const int level = kv->tables.level;
    if (!pressed && (level == 0 || level != kv->pressure.cfg.min_level)) return 0;
    return tkvi_recode_oldest(kv, kv->tables.cfg.budget.bytes, pressed);
}

/* Number of stale blocks at the present level that recoding can reach: in RAM, and held by one list. If memory is not
 * short, blocks at cfg.budget.pressure.min_level that wait for a table are not counted: they are not recoded now. */
static uint64_t tkvi_n_stale_blocks(const tkv_cache *kv) {
    uint64_t n = 0;
    const int waits_for_tables = kv->tables.level == kv->pressure.cfg.min_level && !tkvi_is_pressed(kv, 10);
    const int can_learn = !tkvi_has_open_step(kv) && !waits_for_tables;
    int seq, layer, i;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            for (i = list->sinks + list->n_tightest; i < list->n; i++) {
                tkv_tier due = tkvi_due_tier(kv, seq, layer, i, &kv->tables.plan[layer].now, can_learn);
                const tkvi_block *b = &kv->pool.block[ids[i]];
                if (due == TKV_TIER_HOT) break;
                n += b->refs == 1 && !tkvi_is_offloaded(b) &&
                     tkvi_is_smaller(kv, b->layout, tkvi_layout_of(&kv->tables, layer, due));
            }
        }
    return n;
}

/* 1 if everything held would fit at the level below, under its threshold less the hysteresis. Three more blocks of
 * each layer must fit as well. Otherwise the next blocks could soon bring this level back. */
static int tkvi_can_relax(tkv_cache *kv) {
    const int level = kv->tables.level;
    const tkv_pressure_config *p = &kv->pressure.cfg;
    const double budget = (double)kv->tables.cfg.budget.bytes;
    tkvi_forecast looser;
    double bytes;
    if (tkvi_used_bytes(kv) >= kv->relax_at) return 0;
    looser = tkvi_forecast_level(kv, level - 1, TKVI_LOOSEN);
    bytes = (double)tkvi_forecast_bytes(kv, &looser, NULL);
    if (bytes < budget * (double)tkvi_relax_below(p, level - 1) &&
        bytes + 3.0 * (double)kv->bytes_per_block < budget)
        return 1;
    kv->relax_at = tkvi_used_bytes(kv) - tkvi_used_bytes(kv) / 16; /* this check reads all blocks */
    return 0;
}

/* 1 if a layer has not yet learned a table that some level uses. */
static int tkvi_has_missing_tables(const tkv_cache *kv) {
    int i, missing = 0;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++)
        missing |= kv->tables.plan[i].stored_layer == i && tkvi_plan_learns(&kv->tables.plan[i]) &&
                   kv->tables.current_version[i] < 0;
    return missing;
}

/* Called before a step opens. Learns missing tables now if memory is short, because an open step learns none. */
static void tkvi_learn_missing_tables(tkv_cache *kv) {
    int i;
    if (!tkvi_has_budget(kv) || !tkvi_has_missing_tables(kv) || tkvi_has_open_step(kv)) return;
    if (tkvi_used_bytes(kv) + 2 * kv->bytes_per_block <
        tkvi_soft_limit(kv, kv->tables.level ? kv->tables.level : 1))
        return;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++) {
        const tkvi_plan *p = &kv->tables.plan[i];
        int8_t old_version;
        if (p->stored_layer != i || !tkvi_plan_learns(p) || kv->tables.current_version[i] >= 0) continue;
        if (tkvi_begin_table(kv, i, 1, &old_version)) tkvi_end_table(kv, i, old_version, 1);
    }
}

/* Called with each append. Updates the average pressure and perhaps the level. If memory is short, or at
 * cfg.budget.pressure.min_level, recodes blocks until they have freed 1.5 times the new bytes. So the work is
 * spread evenly over the appends. recode_backlog carries the rest to the next append. */
static void tkvi_recode_for_append(tkv_cache *kv, size_t new_bytes) {
    const tkv_pressure_config *p = &kv->pressure.cfg;
    const float used_pressure = (float)((double)tkvi_used_bytes(kv) / (double)kv->tables.cfg.budget.bytes);
    float reported_pressure;
    int level = kv->tables.level, target;
    tkvi_stale stale;
    tkvi_lock(&kv->pressure.lock);
    reported_pressure = kv->reported_pressure;
    tkvi_unlock(&kv->pressure.lock);
    target = tkvi_pressure_sample(
        &kv->pressure, used_pressure > reported_pressure ? used_pressure : reported_pressure, level);
    if (target < level && tkvi_can_relax(kv)) tkvi_change_level(kv, level - 1);
    level = kv->tables.level;
    kv->recode_backlog += (int64_t)(new_bytes + new_bytes / 2);
    if (kv->recode_backlog > 0 && level < p->max_level &&
        !(tkvi_has_open_step(kv) && tkvi_has_missing_tables(kv)) &&
        (target > level || tkvi_used_bytes(kv) + kv->bytes_per_block > kv->tables.cfg.budget.bytes) &&
        !tkvi_find_stale(kv, TKVI_ANYWHERE, 1, &stale))
        tkvi_change_level(kv, ++level);
    while (kv->recode_backlog > 0) {
        const size_t freed = tkvi_recode_if_due(
            kv, tkvi_is_pressed(kv, 10) || (level > 0 && reported_pressure > tkvi_threshold(p, level - 1)));
        kv->recode_backlog -= (int64_t)freed;
        if (freed) continue;
        /* The search is slow: it reads all lists. It waits for this many new bytes. */
        kv->recode_backlog = -(int64_t)(kv->bytes_per_block / 64);
    }
}

/* Evicts a batch of tokens. With TKVI_EVICT_TO_FLOOR it evicts the next list (number *list) to its floor. 0: there is
 * nothing left to evict. */
static int tkvi_evict_next(tkv_cache *kv, int *list) {
    const int n_layers = kv->tables.cfg.model.n_layers,
              offloaded_too = (kv->reclaim_stages & TKVI_EVICT_ALL) != 0;
    int evicted = 0;
    if (!TKVI_HAS_EVICT || !kv->tables.cfg.evict.policy) return 0;
    if (!(kv->reclaim_stages & TKVI_EVICT_TO_FLOOR))
        return tkvi_evict_batch(kv, 0) || (offloaded_too && tkvi_evict_batch(kv, 1));
    for (; !evicted && *list < kv->tables.cfg.limits.max_seqs * n_layers; (*list)++)
        evicted = tkvi_evict_to_floor(kv, *list / n_layers, *list % n_layers, offloaded_too);
    return evicted;
}

/* Called before the first token is evicted. 0: the store failed, and without it even eviction does not make the
 * memory request fit. */
static int tkvi_can_evict(tkv_cache *kv, size_t budget) {
    size_t bytes;
    return !kv->store_failed || tkvi_choose_stages(kv, budget, &bytes);
}

/* Applies reclaim stages until the memory request fits. tkvi_plan_reclaim must have returned 1. Returns 0 if the
 * store failed, and the request does not fit without it. */
static int tkvi_reclaim_bytes(tkv_cache *kv, size_t budget) {
    int next_list = 0, may_evict = 0;
    for (;;) {
        const tkvi_forecast now = tkvi_forecast_now(kv);
        size_t index_growth;
        if (tkvi_forecast_bytes(kv, &now, &index_growth) <= budget) {
            if (kv->heap.held > budget || index_growth > budget - kv->heap.held)
                tkvi_trim_to(&kv->pool, 0); /* gives free pages back, as the index needs their bytes */
            return 1;
        }
        if (TKVI_HAS_EVICT && kv->reclaim_stages & TKVI_EVICT_FIRST &&
            (may_evict || (may_evict = tkvi_can_evict(kv, budget))) && tkvi_evict_next(kv, &next_list))
            continue;
        if (tkvi_recode_oldest(kv, 0, 1)) continue;
        if (kv->tables.level < kv->pressure.cfg.max_level) tkvi_change_level(kv, kv->tables.level + 1);
        else if (tkvi_offload_oldest(kv) || tkvi_discard_idle(kv)) continue;
        else if (!TKVI_HAS_EVICT) return 0;
        else if (!may_evict && !(may_evict = tkvi_can_evict(kv, budget))) return 0;
        else if (!tkvi_evict_next(kv, &next_list)) return 0;
    }
}

/* >>public */
TKV_API tkv_status tkv_get_budget(const tkv_cache *kv, tkv_budget_info *out) {
    int i;
    if (!kv || !out) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    out->budget = kv->tables.cfg.budget.bytes;
    out->used = tkvi_used_bytes(kv);
    out->peak = kv->heap.peak;
    out->level = kv->tables.level;
    out->n_levels = kv->tables.n_levels;
    out->pressure = kv->pressure.now;
    for (i = 0; i < TKV_MAX_LEVELS; i++) out->recoded[i] = kv->recoded[i];
    out->demoted = kv->demoted;
    out->refused = kv->refused;
    out->offloaded = kv->n_offloaded;
    out->unwritten = kv->n_unwritten;
    out->promoted = kv->n_promoted;
    out->discarded = kv->blocks_discarded;
    out->recomputed = kv->recomputed;
    out->evicted = kv->evicted;
    out->pending = tkvi_has_budget(kv) ? tkvi_n_stale_blocks(kv) : 0;
    return TKV_OK;
}

TKV_API tkv_status tkv_set_budget(tkv_cache *kv, size_t bytes) {
    const size_t old_budget = kv ? kv->tables.cfg.budget.bytes : 0;
    size_t needed;
    if (!kv) return TKV_ERR_ARG;
    if (!kv->tables.recode_pages)
        return tkvi_fail(kv, TKV_ERR_ARG, "the cache was created without a budget", 0, NULL);
    if (kv->pool.keep_all && bytes == 0)
        return tkvi_fail(kv, TKV_ERR_ARG, "in place the budget is the memory that was given", 0, NULL);
    if (kv->pool.keep_all && bytes > kv->heap.held) bytes = kv->heap.held;
    if (bytes == 0 && !old_budget) return tkvi_ok(kv); /* no budget before and none now: reservations stay */
    if (bytes == 0) {
        kv->tables.cfg.budget.bytes = kv->heap.limit = 0;
        tkvi_end_reservations(kv);
        kv->pool.recode_pages = 0;
        kv->pool.kept_free_pages = 0;
        tkvi_trim(&kv->pool);
        return tkvi_ok(kv);
    }
    tkvi_clear_request(kv);
    kv->clock++;
    if (kv->pool.recode_pages == 0) { /* the budget had ended: recoding needs its pages again */
        tkvi_peak dry_run = tkvi_begin_dry_run(kv);
        kv->pool.recode_pages = kv->tables.recode_pages;
        if (!tkvi_allocate_peak(&kv->pool, &dry_run)) {
            kv->pool.recode_pages = 0;
            return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for recoding", 0, NULL);
        }
    }
    if (!tkvi_plan_reclaim(kv, bytes, &needed)) {
        if (!old_budget) kv->pool.recode_pages = 0;
        tkvi_trim(&kv->pool);
        return tkvi_refuse_over_budget(kv, needed);
    }
    kv->tables.cfg.budget.bytes = bytes;
    if (!tkvi_reclaim_bytes(kv, bytes)) {
        kv->tables.cfg.budget.bytes = old_budget;
        if (!old_budget) kv->pool.recode_pages = 0;
        return tkvi_refuse_over_budget(kv, needed);
    }
    if (!old_budget) tkvi_end_reservations(kv); /* reserved slots were counted for recoding by age */
    tkvi_trim(&kv->pool);
    if (kv->pool.keep_all) /* in place, only the number of pages changes */
        kv->pool.max_pages = (int64_t)((bytes - tkvi_bytes_without_pages(kv)) / kv->tables.page_bytes);
    else kv->heap.limit = bytes;
    kv->pool.kept_free_pages = tkvi_free_pages_to_keep(kv);
    kv->relax_at = (size_t)-1;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_set_level(tkv_cache *kv, int level) {
    if (!kv) return TKV_ERR_ARG;
    if (level < kv->pressure.cfg.min_level || level > kv->pressure.cfg.max_level)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no level", level, " within cfg.budget.pressure");
    if (kv->pool.keep_all && !tkvi_has_budget(kv))
        return tkvi_fail(kv, TKV_ERR_ARG, "in place and without a budget the plan is fixed", 0, NULL);
    tkvi_change_level(kv, level);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_set_hot_tokens(tkv_cache *kv, int hot_tokens) {
    size_t i, n;
    if (!kv) return TKV_ERR_ARG;
    if (hot_tokens < 1 || hot_tokens >= TKVI_FOREVER)
        return tkvi_fail(kv, TKV_ERR_ARG, "hot_tokens is", hot_tokens, "; it must be 1 to 2^30 - 2");
    if (kv->pool.keep_all && !tkvi_has_budget(kv))
        return tkvi_fail(kv, TKV_ERR_ARG, "in place and without a budget lengths are fixed", 0, NULL);
    n = (size_t)kv->tables.cfg.model.n_layers * (size_t)kv->tables.n_levels;
    for (i = 0; i < n; i++)
        if (kv->tables.tier_specs[i].hot != TKVI_FOREVER) kv->tables.tier_specs[i].hot = hot_tokens;
    tkvi_apply_plans(kv, kv->tables.level);
    kv->hot_tokens_changed = 1;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_maintain(tkv_cache *kv, int max_work, int *done) {
    int n = 0;
    if (!kv) return TKV_ERR_ARG;
    if (max_work < 0) return tkvi_fail(kv, TKV_ERR_ARG, "max_work is", max_work, "; it must not be negative");
    tkvi_clear_request(kv);
    while (tkvi_has_budget(kv) && n < max_work && tkvi_recode_if_due(kv, tkvi_is_pressed(kv, 9))) n++;
    tkvi_trim(&kv->pool);
    if (done) *done = n;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_report_pressure(tkv_cache *kv, float pressure) {
    if (!kv || !tkvi_is_finite(pressure)) return TKV_ERR_ARG;
    tkvi_lock(&kv->pressure.lock);
    kv->reported_pressure = tkvi_clampf(pressure, 0.0f, 1.0f);
    tkvi_unlock(&kv->pressure.lock);
    return TKV_OK;
}

#endif /* TKVI_RECLAIM_BUDGET_H */
