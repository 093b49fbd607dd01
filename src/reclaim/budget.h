/*
 * reclaim/budget.h - keeps everything that a cache holds within its budget. When bytes are needed, blocks are
 * recoded into smaller formats, oldest first.
 *
 *     append -> forecast: would it fit with all old blocks recoded at some level, or after the stages below?
 *               no: TKV_ERR_BUDGET, nothing has changed                              (tkvi_fits_somewhere)
 *            -> more in use than the level allows: recode what the new bytes require      (tkvi_keep_pace)
 *            -> still too little memory, stage by stage until it suffices:                (tkvi_make_room)
 *               1. recode all that this level recodes, then go to the next level
 *               2. offload the oldest blocks, if the config has a store (offload.h)
 *               3. discard blocks that the caller's model can recompute (discard.h)
 *               4. evict tokens (evict_tokens.h)
 *
 * How many blocks eviction frees depends on which tokens the policy chooses. A look at each list gives a lower
 * bound (tkvi_bound_eviction). If the bound is too low, a dry run plays the eviction through (tkvi_dry_run_floor).
 * In it the policy chooses for each list all tokens that may be evicted. The others are merged into as few blocks
 * as possible. The eviction comes after the other stages or before them. The real eviction then does the same.
 *
 * Before an operation a dry run (tkvi_peak) counts the slots that it takes. The pages in use follow exactly from
 * the number of blocks of each size (cache/pool.h). So it is arithmetic whether an operation fits. Recoding needs a
 * free page for each block size that it writes. These pages (pool.spare) are held from the first append on, and
 * nothing else uses them. A list remembers how many of its blocks are recoded as the level demands
 * (tkvi_list.tight). So one look at each list finds the next block.
 *
 * The cache goes to a tighter level if the average pressure asks for it and this level has nothing left to recode.
 * It also goes there if memory cannot be found otherwise. It goes to a looser level if the pressure fell and
 * everything held would fit there. Its blocks keep their formats then.
 */
#ifndef TKVI_RECLAIM_BUDGET_H
#define TKVI_RECLAIM_BUDGET_H

#include "cache/lookup.h"
#include "reclaim/discard.h"
#include "reclaim/evict_tokens.h"

/* >>bytes */
/* Bytes held, without the free pages beyond those for recoding (pool.spare). */
static size_t tkvi_in_use(const tkv_cache *kv) {
    const size_t spare = (size_t)kv->pool.recode_pages, n_free = kv->pool.n_free_pages;
    return kv->heap.held - (n_free > spare ? n_free - spare : 0) * kv->tables.page_bytes;
}

/* Bytes held, without pages. */
static size_t tkvi_bytes_without_pages(const tkv_cache *kv) {
    return kv->heap.held - (size_t)kv->pool.n_pages * kv->tables.page_bytes;
}

/* Bytes of the larger array if `cap` entries cannot hold `want`, else 0. They come on top of the old array, which
 * is freed only afterwards. */
static size_t tkvi_growth(uint32_t cap, int64_t want, size_t item) {
    return want > (int64_t)cap ? (size_t)tkvi_cap_for(want) * item : 0;
}

/* >>the memory request of a call */
/* Number of tokens that the last block of a list still takes. */
static int tkvi_tail_free_slots(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                                const uint32_t *ids) {
    int last = list->n - 1, room;
    if (last < 0) return 0;
    if (last >= list->sinks && tkvi_tier_at(list, last) != TKV_TIER_HOT)
        return 0;                                                       /* flushed before it was full */
    if (TKVI_HAS_EVICT && kv->pool.block[ids[last]].n_packed) return 0; /* the blocks after it were cut off */
    room = last < list->sinks ? p->sink : TKVI_BLOCK;
    return tkvi_max(0, room - (list->len - tkvi_block_start(kv, ids, last)));
}

/* Number of blocks that n more tokens open. *sink: 1 if the sinks' block is one of them. */
static int tkvi_new_blocks(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                           const uint32_t *ids, int n, int *sink) {
    int rest = n - tkvi_tail_free_slots(kv, p, list, ids);
    *sink = rest > 0 && list->len == 0 && p->sink > 0;
    if (*sink) rest -= p->sink;
    return *sink + (rest > 0 ? (rest + TKVI_BLOCK - 1) / TKVI_BLOCK : 0);
}

/* Entries that a list needs for n more tokens: its blocks, the new ones, and one more. */
static int tkvi_list_entries(const tkv_cache *kv, int seq, int layer, int n) {
    int sink;
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    return list->n + tkvi_new_blocks(kv, &kv->tables.plan[layer], list, tkvi_ids(kv, seq, layer), n, &sink) +
           1;
}

/* Entries of the longest list that a row of a memory request needs. layer < 0: of all layers. on_dry_run: 1 leaves
 * out the blocks that the forecast frees (tkvi_list.left). */
static int tkvi_row_entries(const tkv_cache *kv, const tkv_rows *row, int layer, int on_dry_run) {
    const int to = layer < 0 ? tkv_get_length(kv, row->seq, TKV_ALL_LAYERS) + row->n : 0;
    int l, want = 0;
    if (row->n == 0) return 0;
    for (l = tkvi_max(layer, 0); l <= (layer < 0 ? kv->tables.cfg.model.n_layers - 1 : layer); l++) {
        const tkvi_list *list = tkvi_list_of(kv, row->seq, l);
        const int more = layer < 0 ? to - list->len : row->n, gone = on_dry_run ? list->n - list->n_left : 0;
        if (kv->tables.plan[l].stored_layer == l && more > 0)
            want = tkvi_max(want, tkvi_list_entries(kv, row->seq, l, more) - gone);
    }
    return want;
}

/* Bytes that the index takes in addition if it has `blocks` blocks and serves the memory request. Old arrays are
 * freed only after the new ones exist. */
static size_t tkvi_index_growth(const tkv_cache *kv, int64_t blocks, int on_dry_run) {
    const tkvi_memory_request *o = &kv->memory_request;
    size_t bytes = tkvi_growth(kv->pool.block_cap, blocks + o->blocks, tkvi_block_entry(&kv->tables.cfg));
    int i, most = 0;
    for (i = 0; i < o->n_rows; i++) {
        const int want = tkvi_row_entries(kv, &o->rows[i], o->layer, on_dry_run);
        bytes += tkvi_growth(kv->seq[o->rows[i].seq].cap, want, sizeof(uint32_t)) *
                 (size_t)kv->tables.cfg.model.n_layers;
        most = tkvi_max(most, want);
    }
    return bytes + tkvi_growth(kv->choice_cap, most, tkvi_choice_entry(&kv->tables.cfg));
}

/* Clears the memory request. */
static void tkvi_clear_request(tkv_cache *kv) {
    memset(kv->slot_request, 0, (size_t)kv->tables.n_classes * sizeof *kv->slot_request);
    memset(&kv->memory_request, 0, sizeof kv->memory_request);
}

/* Sets the memory request of an operation: slots from its dry run, tokens for lists from its rows. Slots that the
 * operation gives back do not count. layer: as in tkvi_memory_request. */
static void tkvi_set_request(tkv_cache *kv, const tkvi_peak *dry_run, const tkv_rows *rows, int n_rows,
                             int layer) {
    int64_t blocks = kv->pool.n_offloaded;
    int c;
    for (c = 0; c < kv->tables.n_classes; c++) {
        const int64_t now = kv->pool.used_slots[c] + kv->pool.reserved_slots[c],
                      more = dry_run->live[c] - now;
        kv->slot_request[c] = more > 0 ? more : 0;
        blocks += now + kv->slot_request[c];
    }
    kv->memory_request.rows = rows;
    kv->memory_request.n_rows = n_rows;
    kv->memory_request.layer = layer;
    kv->memory_request.blocks = dry_run->most_blocks - blocks;
}

/* >>forecast */
typedef struct tkvi_forecast {
    int64_t *slots;  /* [n_classes] slots in use, reserved or requested */
    int64_t outside; /* blocks without a slot: offloaded or discarded */
    int on_dry_run;  /* 1: lists have tkvi_list.left blocks */
    int64_t more;    /* pages to add, because the classes of the freed slots are unknown */
} tkvi_forecast;

/* Forecast of the present state with the memory request, without any reclaim. */
static tkvi_forecast tkvi_now(tkv_cache *kv) {
    tkvi_forecast o;
    int c;
    o.slots = kv->slot_request + kv->tables.n_classes;
    o.outside = kv->pool.n_offloaded;
    o.on_dry_run = 0;
    o.more = 0;
    for (c = 0; c < kv->tables.n_classes; c++)
        o.slots[c] = kv->pool.used_slots[c] + kv->pool.reserved_slots[c] + kv->slot_request[c];
    return o;
}

/* Bytes held in a forecast, with the pages for recoding and the growth of the index. *index, if not NULL, gets that
 * growth. Returns (size_t)-1 on overflow. */
static size_t tkvi_bytes_with(const tkv_cache *kv, const tkvi_forecast *o, size_t *index) {
    int64_t pages = kv->pool.recode_pages + o->more, blocks = o->outside;
    size_t bytes, more;
    int c;
    for (c = 0; c < kv->tables.n_classes; c++) {
        const int64_t slots = o->slots[c] > 0 ? o->slots[c] : 0;
        pages += tkvi_pages_for(&kv->tables.size_class[c], slots);
        blocks += slots;
    }
    more = tkvi_index_growth(kv, blocks, o->on_dry_run);
    if (!tkvi_add(more, tkvi_growth(kv->pool.page_cap, pages, sizeof(tkvi_page)), &more)) return (size_t)-1;
    if (index) *index = more;
    if ((uint64_t)pages > (size_t)-1 || !tkvi_mul((size_t)pages, kv->tables.page_bytes, &bytes) ||
        !tkvi_add(bytes, tkvi_bytes_without_pages(kv), &bytes) || !tkvi_add(bytes, more, &bytes))
        return (size_t)-1;
    return bytes;
}

static size_t tkvi_bytes_now(tkv_cache *kv) {
    const tkvi_forecast now = tkvi_now(kv);
    return tkvi_bytes_with(kv, &now, NULL);
}

/* >>stale blocks: blocks that the level's rule recodes into fewer bytes */
typedef struct tkvi_stale {
    int seq, layer, i, layout; /* layout: the smaller one */
    tkv_tier due;
} tkvi_stale;

/* The present layout of a stale block. */
static const tkvi_layout *tkvi_layout_at(const tkv_cache *kv, const tkvi_stale *s) {
    return &kv->tables.layout[kv->pool.block[tkvi_ids(kv, s->seq, s->layer)[s->i]].layout];
}

/* 1 if any sequence has an open step. */
static int tkvi_any_step(const tkv_cache *kv) {
    int seq, any = 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) any |= kv->seq[seq].in_step;
    return any;
}

/* The tier that rule r demands for a block of a list; TKV_TIER_HOT: it must stay as it is. start, end: its positions.
 * last: 1 for the last block. tables: 1 if missing tables can be learned now; else blocks wait for them. */
static tkv_tier tkvi_due_from(const tkv_cache *kv, int seq, int layer, int start, int end, int last,
                              const tkvi_tier_spec *r, int tables) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    tkv_tier due = tkvi_tier_due(r, r->hot, end, kv->seq[seq].in_step ? list->step_len : list->len);
    if (end > list->chunk_start || (last && end - start < TKVI_BLOCK)) return TKV_TIER_HOT;
    while (r->needs_table[due] && kv->tables.current_version[layer] < 0 && !tables)
        due = due == TKV_TIER_ARCHIVE ? TKV_TIER_WARM : TKV_TIER_HOT;
    return due;
}

/* The same for block i of a list. */
static tkv_tier tkvi_due(const tkv_cache *kv, int seq, int layer, int i, const tkvi_tier_spec *r,
                         int tables) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    return tkvi_due_from(kv, seq, layer, tkvi_block_start(kv, ids, i), tkvi_block_end(kv, list, ids, i),
                         i + 1 == list->n, r, tables);
}

/* Counts block i as recoded for the tier `due`. It is the first one of its list that was not. Each tier of a list
 * is a range of consecutive blocks, so only counts change. */
static void tkvi_count_recoded(tkvi_list *list, int i, tkv_tier due) {
    if (i >= list->sinks + list->archive + list->warm) list->warm++;
    if (due == TKV_TIER_ARCHIVE && i >= list->sinks + list->archive) {
        list->warm--;
        list->archive++;
    }
    if (due == TKV_TIER_ARCHIVE) list->n_tightest++;
    list->n_recoded = tkvi_max(list->n_recoded, i + 1 - list->sinks);
}

/* Finds the oldest stale block of a list, first for the archive, then for warm. 0: there is none. Blocks on the way
 * that are not stale count as recoded from now on. */
static int tkvi_stale_in(tkv_cache *kv, int seq, int layer, int tables, tkvi_stale *s) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_tier_spec *r = &kv->tables.plan[layer].now;
    for (;;) {
        int i = list->sinks + list->n_tightest;
        tkv_tier due = i < list->n ? tkvi_due(kv, seq, layer, i, r, tables) : TKV_TIER_HOT;
        const tkvi_block *b;
        if (due != TKV_TIER_ARCHIVE) {
            i = list->sinks + list->n_recoded;
            due = i < list->n ? tkvi_due(kv, seq, layer, i, r, tables) : TKV_TIER_HOT;
        }
        if (due == TKV_TIER_HOT) return 0;
        b = &kv->pool.block[ids[i]];
        s->layout = tkvi_layout_of(&kv->tables, layer, due);
        if (b->refs == 1 && !tkvi_is_offloaded(b) && tkvi_is_smaller(kv, b->layout, s->layout)) {
            s->seq = seq;
            s->layer = layer;
            s->i = i;
            s->due = due;
            return 1;
        }
        tkvi_count_recoded(list, i, due);
    }
}

/* Which slots a recoded block may take: any; those that need no new memory; those in pages of its class that are
 * open already. */
typedef enum tkvi_where { TKVI_ANYWHERE, TKVI_IN_FREE_PAGES, TKVI_IN_OPEN_PAGES } tkvi_where;

static int tkvi_has_slot(const tkv_cache *kv, int layout, tkvi_where where) {
    if (where == TKVI_ANYWHERE || kv->pool.partial_pages[kv->tables.layout[layout].size_class] != TKVI_NIL)
        return 1;
    return where == TKVI_IN_FREE_PAGES && (int64_t)kv->pool.n_free_pages > tkvi_reserved_pages(&kv->pool);
}

/* Finds the oldest stale block of all lists that has a slot of the kind `where`. 0: there is none. early: 1
 * includes blocks that wait for a table, as one can be learned from the present blocks. */
static int tkvi_next_stale(tkv_cache *kv, tkvi_where where, int early, tkvi_stale *oldest) {
    int seq, layer, found = 0, most = -1, tables = early && !tkvi_any_step(kv);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            tkvi_stale s;
            int age;
            if (list->n == 0 || !tkvi_stale_in(kv, seq, layer, tables, &s)) continue;
            age = list->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), s.i);
            if (age <= most || !tkvi_has_slot(kv, s.layout, where)) continue;
            most = age;
            *oldest = s;
            found = 1;
        }
    return found;
}

/* Error for an operation that does not fit at the last level either. bytes: the fewest that it would take. */
static tkv_status tkvi_over_budget(tkv_cache *kv, size_t bytes) {
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
/* Offloads the oldest block of all lists that may be offloaded. 0: there is none, or the store failed. */
static int tkvi_offload_oldest(tkv_cache *kv) {
    int seq, layer, most = -1, of_seq = 0, of_layer = 0;
    if (!tkvi_can_store(kv)) return 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const int i = tkvi_next_to_offload(kv, seq, layer);
            int age;
            if (i < 0) continue;
            age = tkvi_list_of(kv, seq, layer)->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), i);
            if (age <= most) continue;
            most = age;
            of_seq = seq;
            of_layer = layer;
        }
    return most >= 0 && tkvi_offload_next(kv, of_seq, of_layer);
}

/* Ends all reservations. Called when the plan changes without a budget, or when a budget begins or ends: their
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
static void tkvi_take_plans(tkv_cache *kv, int level) {
    size_t i, lists = (size_t)kv->tables.cfg.limits.max_seqs * (size_t)kv->tables.cfg.model.n_layers;
    tkvi_take_level(&kv->tables, level);
    if (!tkvi_has_budget(kv)) tkvi_end_reservations(kv);
    for (i = 0; i < lists; i++) kv->list[i].n_recoded = kv->list[i].n_tightest = 0;
}

/* Changes the level and emits the event. */
static void tkvi_go_to_level(tkv_cache *kv, int level) {
    const int from = kv->tables.level;
    if (level == from) return;
    tkvi_take_plans(kv, level);
    kv->relax_at = (size_t)-1;
    tkvi_pressure_move(&kv->pressure.now, level);
    tkvi_emit_event(kv, TKV_EVENT_LEVEL, TKV_ALL_LAYERS, from, level, tkvi_in_use(kv),
                    level > from ? "the pressure rose: old tokens get fewer bits"
                                 : "the pressure fell: new tokens get more bits");
}

/* >>reclaim stages: bits. A forecast at a level recodes all stale blocks. TKVI_LOOSEN replaces that. The other bits
 * add stages. tkvi_make_room follows the bits that the forecast needed (kv->reclaim_stages). */
typedef enum tkvi_reclaim_stages {
    TKVI_LOOSEN = 1,    /* blocks that are smaller than the level's format get that format */
    TKVI_OUT = 2,       /* all blocks that may be offloaded or discarded are */
    TKVI_EVICT = 4,     /* eviction frees blocks; it spares offloaded tokens */
    TKVI_EVICT_ALL = 8, /* eviction does not spare offloaded tokens */
    TKVI_FLOOR = 16,    /* evicts each list to its floor at once and merges it, so the victims are known */
    TKVI_FIRST = 32     /* eviction comes before all other stages */
} tkvi_reclaim_stages;

/* The tokens of a sequence that eviction spares in a forecast at a level with these reclaim stages. */
static tkvi_spared tkvi_spared_by(const tkv_cache *kv, int seq, const tkvi_tier_spec *rule, int level,
                                  int reclaim_stages) {
    tkvi_spared s;
    memset(&s, 0, sizeof s);
    s.outside = !(reclaim_stages & TKVI_EVICT_ALL);
    if (reclaim_stages & TKVI_OUT) s.rule = rule;
    if (TKVI_HAS_DISCARD && reclaim_stages & TKVI_OUT && kv->tables.cfg.budget.discard &&
        tkvi_is_idle(kv, seq))
        s.vacant = tkvi_discardable_to(kv, seq, level);
    return s;
}

/* 1 if the policy chooses the same victims whether or not blocks are recoded or offloaded before. Only then a dry
 * run can choose them. */
static int tkvi_has_floor(const tkv_cache *kv) {
    const tkv_evict_policy kind = kv->tables.cfg.evict.policy;
    return kind && kind != TKV_EVICT_USER && !(tkvi_evict_needs(kind) & TKVI_NEEDS_KEYS) &&
           (!(tkvi_evict_needs(kind) & TKVI_NEEDS_NORMS) || tkvi_keeps_norms(kv));
}

/* The floor of a list: the number of tokens that TKVI_FLOOR leaves. They are those that stay in any case, and
 * kv->share eighths of the others. */
static int tkvi_floor_of(const tkv_cache *kv, int seq, int layer, const tkvi_spared *spared) {
    const int stay = tkvi_n_staying(kv, seq, layer, spared);
    const int64_t more = tkvi_max(0, tkvi_count(kv, seq, layer) - stay);
    return stay + (int)(more * kv->kept_eighths / 8);
}

/* Evicts one list to its floor and merges its blocks. 0: the list is empty, or its sequence has an open step. */
static int tkvi_go_to_floor(tkv_cache *kv, int seq, int layer, int outside_too) {
    tkvi_spared s;
    memset(&s, 0, sizeof s);
    s.outside = !outside_too;
    if (kv->seq[seq].in_step || tkvi_list_of(kv, seq, layer)->n == 0) return 0;
    tkvi_evict_or_oldest(kv, seq, layer, tkvi_floor_of(kv, seq, layer, &s), &s, 1);
    return 1;
}

/* A block in a dry run. */
typedef struct tkvi_planned_block {
    uint64_t anchored;
    int start, tokens, layout;
    tkv_tier tier;
    int stays; /* 1: it has several holders, so it cannot be freed, merged or recoded */
    int away;  /* 1: it has no slot (offloaded or discarded) */
} tkvi_planned_block;

/* Moves tokens of block b to block a, as tkvi_may_join allows with press. end: the end position of b. 1: b is empty
 * then. */
static int tkvi_dry_run_join(const tkv_cache *kv, tkvi_planned_block *a, tkvi_planned_block *b, int end) {
    const tkvi_layout *layout = kv->tables.layout;
    const int room = TKVI_BLOCK - a->tokens;
    if (a->stays || b->stays || a->away || b->away || a->tier != b->tier || tkvi_has_fixed_slots(kv))
        return 0;
    if (layout[a->layout].key != layout[b->layout].key || end - a->start > 65536) return 0;
    if (b->tokens > room && a->anchored | b->anchored) return 0;
    a->anchored |= b->anchored;
    a->tokens += tkvi_min(b->tokens, room);
    b->tokens -= tkvi_min(b->tokens, room);
    return b->tokens == 0;
}

/* Plans the blocks of a list after eviction to its floor and merging. Returns their number and sets *out to them. r
 * not NULL: all blocks are recoded by this rule before, and offloaded or discarded according to `spared`. NULL:
 * they are as they are now. */
static int tkvi_dry_run_floor(tkv_cache *kv, int seq, int layer, const tkvi_spared *spared,
                              const tkvi_tier_spec *r, tkvi_planned_block **out) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int tables = !tkvi_any_step(kv);
    tkvi_planned_block *dry_run;
    tkvi_choice c;
    int i, t, at = 0, n = 0;
    tkvi_choose_or_oldest(kv, seq, layer, tkvi_floor_of(kv, seq, layer, spared), spared, &c);
    *out = dry_run = (tkvi_planned_block *)(void *)c.score; /* reuses memory of the scores */
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        const uint64_t there = tkvi_choosable_mask(kv, list, ids, layer, i);
        uint64_t left = tkvi_used_mask(kv, list, ids, i);
        tkvi_planned_block *mine = &dry_run[n];
        for (t = 0; t < TKVI_BLOCK; t++)
            if (there >> t & 1 && tkvi_has(c.victims, at++)) left &= ~((uint64_t)1 << t);
        mine->anchored = kv->pool.token_meta[ids[i]].anchored_mask;
        mine->start = tkvi_block_start(kv, ids, i);
        mine->tokens = tkvi_bits_in(left);
        mine->layout = b->layout;
        mine->tier = tkvi_tier_at(list, i);
        mine->stays = b->refs > 1;
        mine->away = !mine->stays && tkvi_has_no_slot(kv, seq, layer, i, spared);
        if (r && i >= list->sinks && !mine->stays && !mine->away) {
            const tkv_tier due = tkvi_due(kv, seq, layer, i, r, tables);
            if (due != TKV_TIER_HOT) mine->tier = due;
            if (due != TKV_TIER_HOT && tkvi_is_smaller(kv, b->layout, r->layout[due]))
                mine->layout = r->layout[due];
        }
        if (i + 1 < list->n && mine->tokens == 0 && !mine->stays && !(n > 0 && mine[-1].stays)) continue;
        if (i + 1 < list->n && i > list->sinks && n > 0 &&
            tkvi_dry_run_join(kv, mine - 1, mine, tkvi_block_end(kv, list, ids, i)))
            continue;
        if (mine->tokens < tkvi_bits_in(left)) { /* some tokens moved: it starts at the next one */
            left &= ~tkvi_first_bits(left, tkvi_bits_in(left) - mine->tokens);
            for (t = 0; !(left >> t & 1);) t++;
            mine->start = tkvi_slot_position(kv, ids[i], t);
        }
        n++;
    }
    return n;
}

/* Number of sinks' blocks in a plan of tkvi_dry_run_floor: 0 or 1. */
static int tkvi_dry_run_sinks(const tkv_cache *kv, int seq, int layer, const tkvi_planned_block *dry_run,
                              int n) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    return n && list->sinks && dry_run->start == tkvi_block_start(kv, tkvi_ids(kv, seq, layer), 0);
}

/* tkvi_discardable_to for the case that all layers are at their floor. */
static int tkvi_dry_run_discardable_to(tkv_cache *kv, int seq, int level, const tkvi_spared *spared) {
    int layer, i, n, to = TKVI_FOREVER;
    if (!TKVI_HAS_DISCARD || !kv->tables.cfg.budget.discard || !tkvi_is_idle(kv, seq)) return 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const int len = tkvi_list_of(kv, seq, layer)->len;
        const tkvi_tier_spec *r = &tkvi_tier_specs_of(&kv->tables, layer)[level];
        tkvi_planned_block *dry_run;
        if (tkvi_list_of(kv, seq, layer)->n == 0) continue;
        n = tkvi_dry_run_floor(kv, seq, layer, spared, NULL, &dry_run);
        i = tkvi_dry_run_sinks(kv, seq, layer, dry_run, n);
        while (i + 2 < n && !dry_run[i].stays && tkvi_is_old(kv, seq, layer, dry_run[i + 1].start, r)) i++;
        to = tkvi_min(to, i < n ? dry_run[i].start : len);
    }
    return to;
}

/* Replaces a list in a forecast by its blocks at the floor. */
static void tkvi_add_floor(tkv_cache *kv, int seq, int layer, int level, int reclaim_stages,
                           tkvi_forecast *o) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_tier_spec *r = &tkvi_tier_specs_of(&kv->tables, layer)[level];
    const int first = reclaim_stages & TKVI_FIRST;
    const tkvi_spared spared =
        tkvi_spared_by(kv, seq, r, level, first ? reclaim_stages & ~TKVI_OUT : reclaim_stages);
    const int vacant =
        first && reclaim_stages & TKVI_OUT ? tkvi_dry_run_discardable_to(kv, seq, level, &spared) : 0;
    tkvi_planned_block *dry_run;
    int i, sinks;
    list->n_left = tkvi_dry_run_floor(kv, seq, layer, &spared, first ? NULL : r, &dry_run);
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        if (b->refs > 1) continue;
        if (tkvi_is_offloaded(b)) o->outside--;
        else o->slots[kv->tables.layout[b->layout].size_class]--;
    }
    sinks = tkvi_dry_run_sinks(kv, seq, layer, dry_run, list->n_left);
    for (i = 0; i < list->n_left; i++) {
        tkvi_planned_block *b = &dry_run[i];
        const int end = i + 1 < list->n_left ? b[1].start : list->len;
        if (b->stays) continue;
        if (first && reclaim_stages & TKVI_OUT && i >= sinks && !b->away) { /* now the other stages */
            const tkv_tier due =
                tkvi_due_from(kv, seq, layer, b->start, end, i + 1 == list->n_left, r, !tkvi_any_step(kv));
            if (due != TKV_TIER_HOT && tkvi_is_smaller(kv, b->layout, r->layout[due]))
                b->layout = r->layout[due];
            b->away = end <= vacant ||
                      (tkvi_can_store(kv) && i + 2 < list->n_left && tkvi_is_old(kv, seq, layer, end, r));
        }
        if (b->away) o->outside++;
        else o->slots[kv->tables.layout[b->layout].size_class]++;
    }
}

/* Lower bounds of what eviction in batches takes from a list, after all other stages. */
typedef struct tkvi_evict_bound {
    int oldest;  /* tokens in RAM, if the policy evicts the oldest first */
    int here;    /* for other policies: blocks in RAM; which ones is unknown */
    int outside; /* blocks without a slot; each of the others may keep one token */
} tkvi_evict_bound;

/* The tier and the layout of block i after all stale blocks are recoded by rule r. */
static tkv_tier tkvi_tier_after_recoding(const tkv_cache *kv, int seq, int layer, int i,
                                         const tkvi_tier_spec *r, int *layout) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const tkvi_block *b = &kv->pool.block[tkvi_ids(kv, seq, layer)[i]];
    const tkv_tier due = tkvi_due(kv, seq, layer, i, r, !tkvi_any_step(kv));
    *layout =
        due != TKV_TIER_HOT && tkvi_is_smaller(kv, b->layout, r->layout[due]) ? r->layout[due] : b->layout;
    return due != TKV_TIER_HOT ? due : tkvi_tier_at(list, i);
}

/* Computes these bounds for a list. They are 0 in an open step, or if a block has several holders.
 *
 * Two neighbours that may be merged but do not fit into one block hold more than 64 tokens together. So `stay`
 * tokens leave at most 2 * stay / 64 blocks, and one more at the end of each stretch. A stretch is a range of one
 * tier and format; the end of the list and the span of 65536 positions end one, too. If tokens cannot move
 * (tkvi_has_fixed_slots), blocks are never merged. If the policy evicts the oldest tokens first, the freed blocks
 * are known, unless recoding makes anchors before. */
static tkvi_evict_bound tkvi_bound_eviction(const tkv_cache *kv, int seq, int layer, const tkvi_tier_spec *r,
                                            const tkvi_spared *spared) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int in_order =
        tkvi_evict_row_of(kv->tables.cfg.evict.policy)->in_order && !kv->tables.cfg.tiers.n_anchors;
    int i, stay, stretches = 1 + list->len / 32768, shared = 0, key = -1, out = 0, tokens_out = 0, tokens = 0;
    tkvi_evict_bound go = {0, 0, 0};
    tkv_tier was = TKV_TIER_HOT;
    if (kv->seq[seq].in_step || list->n == 0) return go;
    stay = tkvi_n_staying(kv, seq, layer, spared);
    for (i = 0; i < list->n; i++) {
        const int there = tkvi_bits_in(tkvi_live_mask_in(kv, list, ids, i));
        shared |= kv->pool.block[ids[i]].refs > 1;
        if (i < list->sinks) continue;
        if (tkvi_has_no_slot(kv, seq, layer, i, spared)) {
            out++;
            tokens_out += there;
            key = -1;
        } else {
            int layout;
            const tkv_tier tier = tkvi_tier_after_recoding(kv, seq, layer, i, r, &layout);
            stretches += kv->tables.layout[layout].key != key || tier != was;
            key = kv->tables.layout[layout].key;
            was = tier;
            tokens += there;
        }
    }
    if (shared || (tkvi_has_fixed_slots(kv) && !in_order)) return go;
    if (!spared->outside) go.outside = tkvi_max(0, out - stay);
    else stay -= tokens_out;
    if (in_order) go.oldest = tkvi_max(0, tokens - stay);
    else go.here = tkvi_max(0, list->n - list->sinks - out - stretches - 2 * stay / TKVI_BLOCK);
    return go;
}

/* Frees n blocks of a list in a forecast. has: the blocks of the list in each class. Which n blocks will be freed
 * is unknown. Assume the smallest (a lower bound). If others are freed, other pages are not full: the classes that
 * count for that are marked (`mixed`). */
static void tkvi_subtract_smallest_blocks(tkv_cache *kv, int n, int64_t *has, tkvi_forecast *o) {
    int64_t *mixed = kv->slot_request + 3 * kv->tables.n_classes;
    while (n > 0) {
        int c, least = -1;
        for (c = 0; c < kv->tables.n_classes; c++)
            if (has[c] > 0 &&
                (least < 0 || kv->tables.size_class[c].slots > kv->tables.size_class[least].slots))
                least = c;
        if (least < 0) return;
        for (c = 0; c < kv->tables.n_classes; c++) mixed[c] |= has[c] > 0;
        o->slots[least] -= tkvi_min((int)has[least], n);
        n -= (int)has[least];
        has[least] = 0;
    }
}

/* Replaces the blocks of a list in a forecast by those after recoding at a level and after the reclaim stages. */
static void tkvi_add_list_at(tkv_cache *kv, int seq, int layer, int level, int reclaim_stages,
                             tkvi_forecast *o) {
    const tkvi_tables *t = &kv->tables;
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_tier_spec *r = &tkvi_tier_specs_of(t, layer)[level];
    const tkvi_spared spared = tkvi_spared_by(kv, seq, r, level, reclaim_stages);
    int64_t *has = kv->slot_request + 2 * t->n_classes;
    tkvi_evict_bound go = {0, 0, 0};
    tkv_evict_config full;
    int i;
    memset(has, 0, (size_t)t->n_classes * sizeof *has);
    if (TKVI_HAS_EVICT) (void)tkvi_evict_fill(&t->cfg.evict, &full);
    if (TKVI_HAS_EVICT && reclaim_stages & TKVI_EVICT) go = tkvi_bound_eviction(kv, seq, layer, r, &spared);
    list->n_left = list->n - go.here;
    for (i = list->sinks; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        int gone = 0, layout;
        if (b->refs > 1) continue;
        if (tkvi_has_no_slot(kv, seq, layer, i, &spared)) {
            gone = go.outside-- > 0;
            if (!tkvi_is_offloaded(b)) o->slots[t->layout[b->layout].size_class]--;
            o->outside += !gone - tkvi_is_offloaded(b);
            list->n_left -= gone;
            continue;
        }
        if (TKVI_HAS_EVICT && go.oldest > 0) {
            go.oldest -= tkvi_bits_in(tkvi_live_mask_in(kv, list, ids, i));
            gone = go.oldest >= 0 && i + 1 < list->n && !tkvi_held_in(kv, list, ids, i) &&
                   tkvi_block_start(kv, ids, i) >= full.sink_tokens;
        }
        if (reclaim_stages & TKVI_LOOSEN) {
            layout = r->layout[tkvi_due(kv, seq, layer, i, r, !tkvi_any_step(kv))];
            if (!tkvi_is_smaller(kv, layout, b->layout)) layout = b->layout;
        } else {
            (void)tkvi_tier_after_recoding(kv, seq, layer, i, r, &layout);
        }
        o->slots[t->layout[b->layout].size_class]--;
        o->slots[t->layout[layout].size_class] += !gone;
        has[t->layout[layout].size_class]++;
        list->n_left -= gone;
    }
    tkvi_subtract_smallest_blocks(kv, go.here, has, o);
}

/* Forecast at a level after these reclaim stages, with the memory request. */
static tkvi_forecast tkvi_at_level(tkv_cache *kv, int level, int reclaim_stages) {
    tkvi_forecast o = tkvi_now(kv);
    int64_t *mixed = kv->slot_request + 3 * kv->tables.n_classes;
    int seq, layer, c, n = 0;
    o.on_dry_run = 1;
    memset(mixed, 0, (size_t)kv->tables.n_classes * sizeof *mixed);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
            if (TKVI_HAS_EVICT && reclaim_stages & TKVI_FLOOR && !kv->seq[seq].in_step &&
                tkvi_list_of(kv, seq, layer)->n)
                tkvi_add_floor(kv, seq, layer, level, reclaim_stages, &o);
            else tkvi_add_list_at(kv, seq, layer, level, reclaim_stages, &o);
    for (c = 0; c < kv->tables.n_classes; c++) n += mixed[c] != 0;
    o.more = tkvi_max(0, n - 1);
    return o;
}

/* 1 if the memory request fits into the budget at the last level after these reclaim stages. share: as in
 * tkvi_floor_of. *bytes: lowered to the bytes held then. Sets kv->reclaim_stages and kv->share. */
static int tkvi_stages_fit(tkv_cache *kv, int reclaim_stages, int share, size_t budget, size_t *bytes) {
    tkvi_forecast o;
    size_t then;
    kv->reclaim_stages = reclaim_stages;
    kv->kept_eighths = share;
    o = tkvi_at_level(kv, kv->pressure.cfg.max_level, reclaim_stages);
    then = tkvi_bytes_with(kv, &o, NULL);
    *bytes = then < *bytes ? then : *bytes;
    return then <= budget;
}

/* 1 if the memory request fits with TKVI_FLOOR and this share. Tries three ways: eviction last; first and alone;
 * first, then the other stages. Each is tried with offloaded tokens spared, then with none spared. */
static int tkvi_floor_fits(tkv_cache *kv, int share, size_t budget, size_t *bytes) {
    static const int ways[] = {TKVI_OUT, TKVI_FIRST, TKVI_OUT | TKVI_FIRST};
    const int n = (int)(sizeof ways / sizeof *ways);
    int i, fits = 0;
    for (i = 0; i < 2 * n && !fits; i++) {
        /* recoding before the eviction makes anchors, which are not known yet */
        if (kv->tables.cfg.tiers.n_anchors && !(ways[i % n] & TKVI_FIRST)) continue;
        fits = tkvi_stages_fit(kv, TKVI_EVICT | TKVI_FLOOR | ways[i % n] | (i < n ? 0 : TKVI_EVICT_ALL),
                               share, budget, bytes);
    }
    return fits;
}

/* 1 if the memory request fits into the budget: as things are, at a level that cfg.budget.pressure allows, or at
 * the last level after more reclaim stages, in their order. It tries every level, because the last one need not
 * take the fewest bytes: more block sizes leave more pages that are not full. Sets kv->reclaim_stages. *bytes: the
 * fewest bytes found. */
static int tkvi_still_fits(tkv_cache *kv, size_t budget, size_t *bytes) {
    const tkv_config *cfg = &kv->tables.cfg;
    int level, share;
    kv->reclaim_stages = 0;
    *bytes = tkvi_bytes_now(kv);
    for (level = kv->tables.level; *bytes > budget && level <= kv->pressure.cfg.max_level; level++) {
        const tkvi_forecast o = tkvi_at_level(kv, level, 0);
        const size_t then = tkvi_bytes_with(kv, &o, NULL);
        *bytes = then < *bytes ? then : *bytes;
    }
    if (*bytes <= budget) return 1;
    if ((tkvi_can_store(kv) || (TKVI_HAS_DISCARD && cfg->budget.discard)) &&
        tkvi_stages_fit(kv, TKVI_OUT, 0, budget, bytes))
        return 1;
    if (!TKVI_HAS_EVICT || !cfg->evict.policy) return 0;
    if (tkvi_stages_fit(kv, TKVI_OUT | TKVI_EVICT, 0, budget, bytes)) return 1;
    if (tkvi_stages_fit(kv, TKVI_OUT | TKVI_EVICT | TKVI_EVICT_ALL, 0, budget, bytes)) return 1;
    if (!tkvi_has_floor(kv) || !tkvi_floor_fits(kv, 0, budget, bytes)) return 0;
    for (share = 7; share > 0 && !tkvi_floor_fits(kv, share, budget, bytes);) share--;
    return share > 0 || tkvi_floor_fits(kv, 0, budget, bytes);
}

/* tkvi_still_fits at the start of a call: a store that failed in an earlier call may be tried again. */
static int tkvi_fits_somewhere(tkv_cache *kv, size_t budget, size_t *bytes) {
    kv->store_failed = 0;
    return tkvi_still_fits(kv, budget, bytes);
}

/* >>work */
/* Recodes the oldest stale block that has a slot. Returns the bytes freed; 0: no block can be recoded at this
 * level. within, if not 0: a limit in bytes. A block that would open a page for which the limit leaves no memory is
 * passed over for one that opens none. Later blocks would free pages in turn, but there may be no later blocks.
 * early: as in tkvi_next_stale. */
static size_t tkvi_recode_oldest(tkv_cache *kv, size_t within, int early) {
    tkvi_stale s;
    size_t had;
    const int spare = kv->pool.recode_pages;
    if (!tkvi_next_stale(kv, TKVI_IN_FREE_PAGES, early, &s)) return 0;
    if (within && !tkvi_has_slot(kv, s.layout, TKVI_IN_OPEN_PAGES)) {
        const tkvi_forecast then = tkvi_now(kv);
        then.slots[tkvi_layout_at(kv, &s)->size_class]--;
        then.slots[kv->tables.layout[s.layout].size_class]++;
        if (tkvi_bytes_with(kv, &then, NULL) > within && !tkvi_next_stale(kv, TKVI_IN_OPEN_PAGES, early, &s))
            return 0;
    }
    had = tkvi_layout_at(kv, &s)->bytes.total;
    if (kv->tables.plan[s.layer].now.needs_table[s.due] && kv->tables.current_version[s.layer] < 0) {
        int8_t before; /* learns a table from the present blocks: this one cannot wait */
        if (!tkvi_begin_table(kv, s.layer, 1, &before) || kv->tables.current_version[s.layer] < 0) return 0;
        tkvi_end_table(kv, s.layer, before, 1);
        s.layout = tkvi_layout_of(&kv->tables, s.layer, s.due);
    }
    kv->pool.recode_pages = 0;
    tkvi_demote(kv, s.seq, s.layer, s.i, s.layout, NULL);
    kv->pool.recode_pages = spare;
    tkvi_count_recoded(tkvi_list_of(kv, s.seq, s.layer), s.i, s.due);
    kv->recoded[kv->tables.level]++;
    return had - kv->tables.layout[s.layout].bytes.total;
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
    return kv->tables.level > 0 && tkvi_in_use(kv) > (tenths < 10 ? soft / 10 * (size_t)tenths : soft);
}

/* Recodes the oldest stale block if it is time: memory is short (pressed), or the level is
 * cfg.budget.pressure.min_level and not 0. At that level stale blocks are recoded even if memory is free. Only
 * pressure learns a table from few tokens; else blocks wait for their table. Returns the bytes freed. */
static size_t tkvi_recode_if_due(tkv_cache *kv, int pressed) {
    const int level = kv->tables.level;
    if (!pressed && (level == 0 || level != kv->pressure.cfg.min_level)) return 0;
    return tkvi_recode_oldest(kv, kv->tables.cfg.budget.bytes, pressed);
}

/* Number of stale blocks at the present level: those in RAM with one holder. Without pressure,
 * cfg.budget.pressure.min_level does not count blocks that wait for a table: no work of now would recode them. */
static uint64_t tkvi_pending(const tkv_cache *kv) {
    uint64_t n = 0;
    const int waits_for_tables = kv->tables.level == kv->pressure.cfg.min_level && !tkvi_is_pressed(kv, 10);
    const int tables = !tkvi_any_step(kv) && !waits_for_tables;
    int seq, layer, i;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            for (i = list->sinks + list->n_tightest; i < list->n; i++) {
                tkv_tier due = tkvi_due(kv, seq, layer, i, &kv->tables.plan[layer].now, tables);
                const tkvi_block *b = &kv->pool.block[ids[i]];
                if (due == TKV_TIER_HOT) break;
                n += b->refs == 1 && !tkvi_is_offloaded(b) &&
                     tkvi_is_smaller(kv, b->layout, tkvi_layout_of(&kv->tables, layer, due));
            }
        }
    return n;
}

/* 1 if everything held would fit at the next looser level, below its threshold less the hysteresis. Three more
 * blocks of each layer must fit as well. Else the next blocks could soon bring this level back. */
static int tkvi_may_relax(tkv_cache *kv) {
    const int level = kv->tables.level;
    const tkv_pressure_config *p = &kv->pressure.cfg;
    const double budget = (double)kv->tables.cfg.budget.bytes;
    tkvi_forecast looser;
    double bytes;
    if (tkvi_in_use(kv) >= kv->relax_at) return 0;
    looser = tkvi_at_level(kv, level - 1, TKVI_LOOSEN);
    bytes = (double)tkvi_bytes_with(kv, &looser, NULL);
    if (bytes < budget * (double)tkvi_relax_below(p, level - 1) &&
        bytes + 3.0 * (double)kv->bytes_per_block < budget)
        return 1;
    kv->relax_at = tkvi_in_use(kv) - tkvi_in_use(kv) / 16; /* the check walks over all blocks */
    return 0;
}

/* 1 if a layer has not yet learned a table that some level uses. */
static int tkvi_needs_tables(const tkv_cache *kv) {
    int i, lacks = 0;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++)
        lacks |= kv->tables.plan[i].stored_layer == i && tkvi_plan_learns(&kv->tables.plan[i]) &&
                 kv->tables.current_version[i] < 0;
    return lacks;
}

/* Called before a step opens. No table is learned in an open step, so missing ones are learned now if memory is
 * short. */
static void tkvi_learn_early(tkv_cache *kv) {
    int i;
    if (!tkvi_has_budget(kv) || !tkvi_needs_tables(kv) || tkvi_any_step(kv)) return;
    if (tkvi_in_use(kv) + 2 * kv->bytes_per_block <
        tkvi_soft_limit(kv, kv->tables.level ? kv->tables.level : 1))
        return;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++) {
        const tkvi_plan *p = &kv->tables.plan[i];
        int8_t had;
        if (p->stored_layer != i || !tkvi_plan_learns(p) || kv->tables.current_version[i] >= 0) continue;
        if (tkvi_begin_table(kv, i, 1, &had)) tkvi_end_table(kv, i, had, 1);
    }
}

/* Called with each append. Updates the average pressure and perhaps the level. If memory is short, or at
 * cfg.budget.pressure.min_level, blocks are recoded until they have freed 1.5 times the new bytes. So the work is
 * spread over the tokens. */
static void tkvi_keep_pace(tkv_cache *kv, size_t new_bytes) {
    const tkv_pressure_config *p = &kv->pressure.cfg;
    const float own = (float)((double)tkvi_in_use(kv) / (double)kv->tables.cfg.budget.bytes);
    float outside;
    int level = kv->tables.level, target;
    tkvi_stale s;
    tkvi_lock(&kv->pressure.lock);
    outside = kv->reported_pressure;
    tkvi_unlock(&kv->pressure.lock);
    target = tkvi_pressure_sample(&kv->pressure, own > outside ? own : outside, level);
    if (target < level && tkvi_may_relax(kv)) tkvi_go_to_level(kv, level - 1);
    level = kv->tables.level;
    kv->recode_backlog += (int64_t)(new_bytes + new_bytes / 2);
    if (kv->recode_backlog > 0 && level < p->max_level && !(tkvi_any_step(kv) && tkvi_needs_tables(kv)) &&
        (target > level || tkvi_in_use(kv) + kv->bytes_per_block > kv->tables.cfg.budget.bytes) &&
        !tkvi_next_stale(kv, TKVI_ANYWHERE, 1, &s))
        tkvi_go_to_level(kv, ++level);
    while (kv->recode_backlog > 0) {
        const size_t won = tkvi_recode_if_due(kv, tkvi_is_pressed(kv, 10) ||
                                                      (level > 0 && outside > tkvi_threshold(p, level - 1)));
        kv->recode_backlog -= (int64_t)won;
        if (won) continue;
        /* The search walks over all lists, so it waits until some new bytes have come. */
        kv->recode_backlog = -(int64_t)(kv->bytes_per_block / 64);
    }
}

/* Evicts a batch of tokens, or with TKVI_FLOOR the next list (number *list) to its floor. 0: there is nothing left
 * to evict. */
static int tkvi_evict_next(tkv_cache *kv, int *list) {
    const int n = kv->tables.cfg.model.n_layers, all = (kv->reclaim_stages & TKVI_EVICT_ALL) != 0;
    int went = 0;
    if (!TKVI_HAS_EVICT || !kv->tables.cfg.evict.policy) return 0;
    if (!(kv->reclaim_stages & TKVI_FLOOR))
        return tkvi_evict_batch(kv, 0) || (all && tkvi_evict_batch(kv, 1));
    for (; !went && *list < kv->tables.cfg.limits.max_seqs * n; (*list)++)
        went = tkvi_go_to_floor(kv, *list / n, *list % n, all);
    return went;
}

/* Called before the first token is evicted. If the store failed, 1 only if the memory request still fits without
 * it. */
static int tkvi_may_evict(tkv_cache *kv, size_t budget) {
    size_t bytes;
    return !kv->store_failed || tkvi_still_fits(kv, budget, &bytes);
}

/* Frees memory until the memory request fits. tkvi_fits_somewhere must have returned 1. 0: the store failed, and
 * without it the request does not fit. */
static int tkvi_make_room(tkv_cache *kv, size_t budget) {
    int list = 0, evicts = 0;
    for (;;) {
        const tkvi_forecast now = tkvi_now(kv);
        size_t index;
        if (tkvi_bytes_with(kv, &now, &index) <= budget) {
            if (kv->heap.held > budget || index > budget - kv->heap.held)
                tkvi_trim_to(&kv->pool, 0); /* gives memory of free pages to the index */
            return 1;
        }
        if (TKVI_HAS_EVICT && kv->reclaim_stages & TKVI_FIRST &&
            (evicts || (evicts = tkvi_may_evict(kv, budget))) && tkvi_evict_next(kv, &list))
            continue;
        if (tkvi_recode_oldest(kv, 0, 1)) continue;
        if (kv->tables.level < kv->pressure.cfg.max_level) tkvi_go_to_level(kv, kv->tables.level + 1);
        else if (tkvi_offload_oldest(kv) || tkvi_discard_idle(kv)) continue;
        else if (!TKVI_HAS_EVICT) return 0;
        else if (!evicts && !(evicts = tkvi_may_evict(kv, budget))) return 0;
        else if (!tkvi_evict_next(kv, &list)) return 0;
    }
}

/* >>public */
TKV_API tkv_status tkv_get_budget(const tkv_cache *kv, tkv_budget_info *out) {
    int i;
    if (!kv || !out) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    out->budget = kv->tables.cfg.budget.bytes;
    out->used = tkvi_in_use(kv);
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
    out->pending = tkvi_has_budget(kv) ? tkvi_pending(kv) : 0;
    return TKV_OK;
}

TKV_API tkv_status tkv_set_budget(tkv_cache *kv, size_t bytes) {
    const size_t had = kv ? kv->tables.cfg.budget.bytes : 0;
    size_t takes;
    if (!kv) return TKV_ERR_ARG;
    if (!kv->tables.recode_pages)
        return tkvi_fail(kv, TKV_ERR_ARG, "the cache was created without a budget", 0, NULL);
    if (kv->pool.keep_all && bytes == 0)
        return tkvi_fail(kv, TKV_ERR_ARG, "in place the budget is the memory that was given", 0, NULL);
    if (kv->pool.keep_all && bytes > kv->heap.held) bytes = kv->heap.held;
    if (bytes == 0 && !had) return tkvi_ok(kv); /* no budget before and none now: reservations stay */
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
        if (!tkvi_peak_ready(&kv->pool, &dry_run)) {
            kv->pool.recode_pages = 0;
            return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for recoding", 0, NULL);
        }
    }
    if (!tkvi_fits_somewhere(kv, bytes, &takes)) {
        if (!had) kv->pool.recode_pages = 0;
        tkvi_trim(&kv->pool);
        return tkvi_over_budget(kv, takes);
    }
    kv->tables.cfg.budget.bytes = bytes;
    if (!tkvi_make_room(kv, bytes)) {
        kv->tables.cfg.budget.bytes = had;
        if (!had) kv->pool.recode_pages = 0;
        return tkvi_over_budget(kv, takes);
    }
    if (!had) tkvi_end_reservations(kv); /* their slots were counted for recoding by age */
    tkvi_trim(&kv->pool);
    if (kv->pool.keep_all) /* in place, only pages are counted: the other bytes held do not change */
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
    tkvi_go_to_level(kv, level);
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
    tkvi_take_plans(kv, kv->tables.level);
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
