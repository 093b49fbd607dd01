/*
 * reclaim/budget.h - keeps everything that a cache holds within its budget. When bytes are needed, blocks are
 * recoded into smaller formats, oldest first.
 *
 *     append -> validate
 *            -> reclaim   1. bytes that all stages together can free at most (tkvi_least_bytes). If they do not
 *                            suffice: TKV_ERR_BUDGET, and nothing has changed.
 *                         2. thin states to an eighth of limits.max_states (cache/states.h); recode every block
 *                            that this level recodes; discard blocks that cfg.recompute gives again for less than
 *                            quantizing costs (discard.h); go to the next level
 *                         3. thin states to the newest ones; offload the oldest blocks, if the config has a store
 *                            (offload.h); discard the other blocks that cfg.recompute gives again
 *                         4. bytes that stages 5 and 6 free at least (tkvi_bound_loss). If they do not suffice:
 *                            TKV_ERR_BUDGET. No token was lost; blocks stay recoded and offloaded.
 *                         5. discard blocks of idle sequences, which tkv_seq_recompute brings back (discard.h)
 *                         6. evict tokens (evict_tokens.h)
 *                         7. in the place of a refusal by stage 4: recode blocks of any age for the archive, but
 *                            not the last append
 *            -> age -> store
 *
 * States come first, because one of them can take more bytes than all tokens, and going back seldom needs the ones that
 * are thinned out. Some stay until tokens are at the last level: without any, each step back computes all tokens
 * again. The rest goes before offloading, which slows every step. Spare states do not count as pressure.
 *
 * Each stage goes on until the request fits. All memory that the request needs is allocated before stage 5. So a call
 * that discards or evicts cannot fail afterwards.
 *
 * The level rises if the average pressure demands it and this level has nothing left to recode. It also rises in
 * stage 2. It falls if the pressure fell and all blocks would fit at the lower level. Blocks then keep their formats.
 */
#ifndef TKVI_RECLAIM_BUDGET_H
#define TKVI_RECLAIM_BUDGET_H

#include "reclaim/discard.h"
#include "reclaim/evict_tokens.h"
#include "reclaim/stale.h"

/* The largest part of what is held: its name, and its bytes. */
static const char *tkvi_find_largest_part(const tkv_cache *kv, size_t *bytes) {
    static const char *const names[] = {"exact (sinks, hot tails, last append)",
                                        "encoded tokens",
                                        "tables",
                                        "states",
                                        "work space, index and free pages",
                                        "exact, as this level codes nothing"};
    size_t parts[] = {0, 0, 0, 0, 0};
    int seq, layer, i, largest = 0, codes_nothing = 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            codes_nothing |= list->n && kv->tables.plan[layer].now.hot == TKVI_FOREVER;
            for (i = 0; i < list->n; i++) {
                const tkvi_block *b = tkvi_block_of(kv, tkvi_ids(kv, seq, layer)[i]);
                if (!tkvi_is_offloaded(b))
                    parts[tkvi_tier_at(list, i) != TKV_TIER_HOT] +=
                        kv->tables.layout[b->layout].bytes.total / b->refs;
            }
        }
    parts[2] = tkvi_table_bytes(&kv->sizes) + tkvi_learning_bytes(kv);
    parts[3] = kv->states.region ? kv->states.region_bytes : kv->states.held_bytes;
    parts[4] = kv->heap.held - parts[0] - parts[1] - parts[2] - parts[3];
    for (i = 1; i < 5; i++)
        if (parts[i] > parts[largest]) largest = i;
    *bytes = parts[largest];
    return names[largest == 0 && codes_nothing ? 5 : largest];
}

/* Writes the error of a call that does not fit even after all stages. bytes: the least that it would take
 * then. */
static tkv_status tkvi_refuse_over_budget(tkv_cache *kv, size_t bytes) {
    tkvi_text t = tkvi_text_begin(kv->call.error, sizeof kv->call.error);
    size_t largest;
    const char *part = tkvi_find_largest_part(kv, &largest);
    if (kv->call.store_failed) {
        tkvi_append_text(&t, "cfg.offload.write failed, and without it there is no room");
    } else {
        tkvi_append_text(&t, "the call needs at least ");
        tkvi_append_digits(&t, (uint64_t)bytes);
        tkvi_append_text(&t, " bytes, over the budget; ");
        tkvi_append_digits(&t, (uint64_t)largest);
        tkvi_append_text(&t, " held are ");
        tkvi_append_text(&t, part);
        tkvi_append_text(&t, "; raise it, reset a sequence, append less");
    }
    kv->counts.refused++;
    tkvi_emit_event(kv, TKV_EVENT_BUDGET, TKV_ALL_LAYERS, 0, 0, bytes, kv->call.error);
    return TKV_ERR_BUDGET;
}

/* >>levels */
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
    for (i = 0; i < lists; i++) kv->list[i].passed[TKVI_RECODED] = kv->list[i].passed[TKVI_TIGHTEST] = 0;
}

/* Changes the level and emits the event. */
static void tkvi_change_level(tkv_cache *kv, int level) {
    const int from = kv->tables.level;
    if (level == from) return;
    tkvi_apply_plans(kv, level);
    kv->budget.relax_at = (size_t)-1;
    tkvi_pressure_move(&kv->budget.pressure.now, level);
    tkvi_emit_event(kv, TKV_EVENT_LEVEL, TKV_ALL_LAYERS, from, level, tkvi_used_bytes(kv),
                    !tkvi_has_budget(kv) ? "the plan changed: tokens that age get other formats"
                    : level > from       ? "the pressure rose: old tokens get fewer bits"
                                         : "the pressure fell: new tokens get more bits");
}

/* 1 if memory is reserved for a sequence. */
static int tkvi_has_reservation(const tkv_cache *kv) {
    int seq, any = 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) any |= kv->seq[seq].reserved_len != 0;
    return any;
}

/* Goes to the level that the longest sequence demands (tkv_level.from_tokens), before an append or a reservation of
 * rows. Only the first layer with K and V of its own decides, so that all layers of a step see one level. */
static void tkvi_follow_length(tkv_cache *kv, int layer, const tkv_rows *rows, int n_rows) {
    const int *from = kv->tables.from_tokens;
    int i, longest = 0, level = 0;
    if (!TKVI_HAS_METER || !from[1]) return;
    for (i = 0; i < layer; i++)
        if (kv->tables.plan[i].stored_layer == i) return;
    for (i = 0; i < kv->tables.cfg.limits.max_seqs; i++)
        longest = tkvi_max(longest, tkvi_list_of(kv, i, layer)->len);
    for (i = 0; i < n_rows; i++)
        longest = tkvi_max(longest, tkvi_list_of(kv, rows[i].seq, layer)->len + rows[i].n);
    while (level + 1 < kv->tables.n_levels && from[level + 1] && longest >= from[level + 1]) level++;
    if (level == kv->budget.length_level || tkvi_has_reservation(kv)) return;
    kv->budget.length_level = level;
    tkvi_change_level(
        kv, tkvi_max(kv->budget.pressure.cfg.min_level, tkvi_min(kv->budget.pressure.cfg.max_level, level)));
}

/* >>offloading */
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

/* >>bounds */
/* A layout that a block of a list could have; -1: no slot. */
typedef int (*tkvi_choose_layout)(tkv_cache *kv, int seq, int layer, int i);

/* Changes a demand as if each block behind the sinks that is in RAM had another layout. Its first holder chooses. */
static void tkvi_exchange_blocks(tkv_cache *kv, tkvi_choose_layout choose, tkvi_demand *demand) {
    int seq, layer, i;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            for (i = list->sinks; i < list->n; i++) {
                const tkvi_block *b = tkvi_block_of(kv, tkvi_ids(kv, seq, layer)[i]);
                const int own = b->layout;
                int layout;
                if (tkvi_is_offloaded(b) || !kv->pool.entry[tkvi_ids(kv, seq, layer)[i]].is_first) continue;
                layout = choose(kv, seq, layer, i);
                tkvi_demand_blocks(&kv->pool, own, -1, demand);
                if (layout >= 0) tkvi_demand_blocks(&kv->pool, layout, 1, demand);
            }
        }
}

/* The smallest layout that block i can get by any stage; -1: a stage may free its slot. */
static int tkvi_least_layout(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_tier_spec *specs = tkvi_tier_specs_of(&kv->tables, layer);
    const int max_level = kv->budget.pressure.cfg.max_level, can_learn = !tkvi_has_open_step(kv);
    const uint32_t id = tkvi_ids(kv, seq, layer)[i];
    const int has_sinks = tkvi_has_named_sinks(&kv->pool, id);
    int level, least = tkvi_block_of(kv, tkvi_ids(kv, seq, layer)[i])->layout;
    if (TKVI_HAS_EVICT && kv->tables.cfg.evict.policy && !kv->call.keeps_tokens && !kv->seq[seq].in_step &&
        i + 1 < tkvi_list_of(kv, seq, layer)->n)
        return -1;
    for (level = kv->tables.level; level <= max_level; level++) {
        const tkv_tier due = tkvi_due_tier(kv, seq, layer, i, &specs[level], can_learn);
        if ((tkvi_can_store(kv) || (kv->tables.cfg.recompute.compute && !has_sinks) ||
             (TKVI_HAS_DISCARD && kv->tables.cfg.budget.discard && !kv->call.keeps_tokens &&
              tkvi_is_idle(kv, seq) && !has_sinks)) &&
            tkvi_can_offload(kv, seq, layer, i, &specs[level]))
            return -1;
        if (due != TKV_TIER_HOT && !has_sinks && tkvi_is_smaller(kv, least, specs[level].layout[due]))
            least = specs[level].layout[due];
    }
    return least;
}

/* Lower bound of the bytes held after all stages, with the request: each block at its smallest, pages all full, spare
 * states gone. */
static size_t tkvi_least_bytes(tkv_cache *kv, const tkvi_request *request) {
    tkvi_demand demand = tkvi_demand_of(kv, request);
    size_t bytes = tkvi_bytes_without_pages(kv) - tkvi_spare_state_bytes(kv) + demand.bytes +
                   (size_t)kv->pool.recode_pages * kv->tables.page_bytes;
    int c;
    kv->call.recodes_young = 1;
    tkvi_exchange_blocks(kv, tkvi_least_layout, &demand);
    kv->call.recodes_young = 0;
    for (c = 0; c < kv->tables.n_classes; c++) {
        const int64_t slots = kv->pool.used_slots[c] + kv->pool.reserved_slots[c] + demand.slots[c];
        if (slots > 0) bytes += (size_t)slots * kv->tables.size_class[c].slot_bytes;
    }
    return bytes;
}

/* 1 if a policy evicts the same tokens in one batch as in many. Policies that pool scores see other neighbours in each
 * batch. Those that read keys see other keys after blocks are merged. A user policy is the caller's. */
static int tkvi_has_known_victims(const tkv_cache *kv) {
    const tkv_evict_policy policy = kv->tables.cfg.evict.policy;
    const int needs = tkvi_evict_needs(policy);
    return policy && policy != TKV_EVICT_USER && !(needs & (TKVI_NEEDS_KEYS | TKVI_NEEDS_PROMPT_SCORES)) &&
           (!(needs & TKVI_NEEDS_NORMS) || tkvi_keeps_norms(kv));
}

/* A stretch: neighbours in RAM with one tier, one format and one shift. Only within a stretch blocks are merged, also
 * those that were coded with other versions of a table. */
typedef struct tkvi_stretch {
    int n_blocks, n_used; /* blocks; used slots after eviction */
    int first, layout;    /* first position */
    int is_anchored;      /* 1: neighbours merge only if all tokens fit */
    tkv_tier tier;
    const tkvi_entry *entry; /* the first one */
} tkvi_stretch;

/* Ends a stretch at position `end`: subtracts the blocks that eviction and merging surely free. Merged blocks are
 * full, except the last one, and span at most 65536 positions. n_staying: tokens of the list that may stay; -1: n_used
 * is exact. */
static void tkvi_end_stretch(const tkv_cache *kv, tkvi_stretch *stretch, int end, int n_staying,
                             tkvi_demand *demand) {
    const int n_used = n_staying < 0 ? stretch->n_used : tkvi_min(stretch->n_used, n_staying);
    const int n_full =
        stretch->is_anchored ? 2 * n_used / TKVI_BLOCK + 1 : (n_used + TKVI_BLOCK - 1) / TKVI_BLOCK;
    const int n_kept = n_full + (end - stretch->first) / 32768;
    if (stretch->n_blocks > n_kept && !tkvi_has_fixed_slots(kv))
        tkvi_demand_blocks(&kv->pool, stretch->layout, n_kept - stretch->n_blocks, demand);
    memset(stretch, 0, sizeof *stretch);
}

/* Number of blocks, from tkvi_first_to_expire on, that the demand of a request counts as expired. */
static int tkvi_n_expired_by(const tkv_cache *kv, const tkvi_request *request, int seq, int layer) {
    int i, n = 0;
    for (i = 0; i < request->n_rows && request->layer == layer; i++)
        if (request->rows[i].seq == seq && request->rows[i].n && !kv->seq[seq].in_step)
            n = tkvi_n_expiring(kv, seq, layer);
    return n;
}

/* Adds a block to a demand again that was counted as expired. */
static void tkvi_demand_again(const tkv_cache *kv, const tkvi_block *b, tkvi_demand *demand) {
    demand->entries++;
    if (b->refs == 1 && !tkvi_is_offloaded(b)) demand->slots[kv->tables.layout[b->layout].size_class]++;
}

/* Subtracts from a demand what stage 6 surely frees of a list: eviction of all tokens that may be evicted, and merging.
 * victims: those of the policy, or NULL. Without them each stretch may keep all n_staying tokens. n_expired: blocks
 * that the demand counts as expired. One of them may stay, as it can get the tokens or positions of the next one. */
static void tkvi_subtract_evicted(tkv_cache *kv, int seq, int layer, int n_expired, int discarded_to,
                                  int n_staying, const tkvi_choice *victims, tkvi_demand *demand) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int first_expired = tkvi_first_to_expire(kv, layer, list, ids),
              end_expired = first_expired + n_expired;
    tkvi_stretch stretch;
    int i, t, token = 0, n_outside = 0, last_expired = -1;
    memset(&stretch, 0, sizeof stretch);
    for (i = list->anchors; i + 1 < list->n; i++) { /* the last block stays as it is */
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const uint64_t choosable = tkvi_choosable_mask(kv, list, ids, i);
        const int in_ram =
            !tkvi_is_offloaded(b) && (i < list->sinks || tkvi_block_end(kv, list, ids, i) > discarded_to ||
                                      !tkvi_is_discardable(kv, ids[i]));
        const int is_own = in_ram && b->refs == 1; /* its slot becomes free */
        uint64_t used = tkvi_used_mask(kv, list, ids, i);
        for (t = 0; t < TKVI_BLOCK && victims; t++)
            if (choosable >> t & 1 && tkvi_has(victims->victims, token++)) used &= ~((uint64_t)1 << t);
        if (i >= first_expired && i < end_expired && !tkvi_outlasts_window(kv, layer, ids[i])) {
            if (victims && used) last_expired = i;
            /* which one stays is unknown: one of each format */
            if (!victims && (i + 1 == end_expired || b->layout != tkvi_block_of(kv, ids[i + 1])->layout))
                tkvi_demand_again(kv, b, demand);
            continue;
        }
        if (stretch.n_blocks && (!is_own || i == end_expired ||
                                 kv->tables.layout[b->layout].key != kv->tables.layout[stretch.layout].key ||
                                 tkvi_tier_at(list, i) != stretch.tier ||
                                 !tkvi_moved_alike(stretch.entry, &kv->pool.entry[ids[i]])))
            tkvi_end_stretch(kv, &stretch, tkvi_block_start(kv, ids, i), victims ? -1 : n_staying, demand);
        if (victims && !used) { /* empty blocks are freed first */
            demand->entries--;
            if (is_own) demand->slots[kv->tables.layout[b->layout].size_class]--;
            continue;
        }
        if (i < list->sinks) continue;
        n_outside += !is_own;
        if (!is_own) continue;
        if (!stretch.n_blocks) {
            stretch.first = tkvi_block_start(kv, ids, i);
            stretch.entry = &kv->pool.entry[ids[i]];
        }
        stretch.n_blocks++;
        stretch.n_used += tkvi_n_bits(used);
        stretch.layout = b->layout;
        stretch.tier = tkvi_tier_at(list, i);
        stretch.is_anchored |= kv->pool.token_meta[ids[i]].anchored_mask != 0;
    }
    if (stretch.n_blocks) tkvi_end_stretch(kv, &stretch, list->len, victims ? -1 : n_staying, demand);
    if (last_expired >= 0) tkvi_demand_again(kv, tkvi_block_of(kv, ids[last_expired]), demand);
    if (!victims) demand->entries -= tkvi_max(0, n_outside - n_staying);
}

/* Subtracts what stages 5 and 6 surely free of a list. n_expired: as above. knows_victims: 1 asks the policy which
 * tokens it evicts. */
static void tkvi_subtract_loss(tkv_cache *kv, int seq, int layer, int n_expired, int knows_victims,
                               tkvi_demand *demand) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, n_staying, discarded_to = 0;
    tkvi_choice choice;
    if (TKVI_HAS_DISCARD && kv->tables.cfg.budget.discard && tkvi_is_idle(kv, seq))
        discarded_to = tkvi_discardable_to(kv, seq, kv->tables.level);
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        if (i >= list->sinks && tkvi_is_discardable(kv, ids[i]) &&
            tkvi_block_end(kv, list, ids, i) <= discarded_to)
            demand->slots[kv->tables.layout[b->layout].size_class]--;
    }
    if (!TKVI_HAS_EVICT || !kv->tables.cfg.evict.policy || kv->seq[seq].in_step || !list->n) return;
    n_staying = tkvi_n_staying(kv, seq, layer, 0);
    if (knows_victims) tkvi_choose_victims_or_oldest(kv, seq, layer, n_staying, 0, &choice);
    tkvi_subtract_evicted(kv, seq, layer, n_expired, discarded_to, n_staying, knows_victims ? &choice : NULL,
                          demand);
}

/* Block numbers that the longest list of a row needs when stage 6 surely freed blocks. */
static int tkvi_n_entries_after(tkv_cache *kv, const tkv_rows *row, int layer, int knows_victims) {
    int l, most = 0;
    for (l = tkvi_max(layer, 0); l <= (layer < 0 ? kv->tables.cfg.model.n_layers - 1 : layer); l++) {
        tkvi_demand demand = tkvi_no_demand();
        if (tkvi_list_of(kv, row->seq, l)->n) tkvi_subtract_loss(kv, row->seq, l, 0, knows_victims, &demand);
        most = tkvi_max(most, tkvi_n_row_entries(kv, row, l) + (int)demand.entries);
    }
    return most;
}

static int tkvi_n_entries_by_counts(tkv_cache *kv, const tkv_rows *row, int layer) {
    return tkvi_n_entries_after(kv, row, layer, 0);
}

static int tkvi_n_entries_by_victims(tkv_cache *kv, const tkv_rows *row, int layer) {
    return tkvi_n_entries_after(kv, row, layer, 1);
}

/* What stages 5 and 6 surely leave. */
typedef struct tkvi_bounds_after_loss {
    int64_t entries, pages; /* of the block table; with the request */
    tkvi_row_need row_need; /* block numbers of the lists then */
    size_t growth;          /* bytes of larger index arrays that are needed even then */
    size_t bytes;           /* other bytes of the request */
} tkvi_bounds_after_loss;

static tkvi_bounds_after_loss tkvi_bound_loss(tkv_cache *kv, const tkvi_request *request, int knows_victims) {
    tkvi_bounds_after_loss bounds;
    tkvi_demand demand = tkvi_demand_of(kv, request);
    int seq, layer;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
            tkvi_subtract_loss(kv, seq, layer, tkvi_n_expired_by(kv, request, seq, layer), knows_victims,
                               &demand);
    bounds.row_need = knows_victims ? tkvi_n_entries_by_victims : tkvi_n_entries_by_counts;
    bounds.pages = tkvi_pages_for_demand(&kv->pool, &demand);
    bounds.entries = tkvi_entries_for_demand(&kv->pool, &demand);
    bounds.growth = tkvi_index_growth_bytes(kv, request, bounds.entries, bounds.row_need);
    bounds.bytes = demand.bytes;
    return bounds;
}

/* Called after stage 4. If stages 5 and 6 surely make the request fit, allocates the larger index arrays that it needs
 * even then, in the place of free pages. So those stages need no allocation. Returns TKV_ERR_BUDGET if they may not
 * suffice. */
static tkv_status tkvi_prepare_loss(tkv_cache *kv, const tkvi_request *request, size_t budget,
                                    int knows_victims) {
    const tkvi_bounds_after_loss bounds = tkvi_bound_loss(kv, request, knows_victims);
    const size_t page = kv->tables.page_bytes;
    size_t without_pages = tkvi_bytes_without_pages(kv);
    int64_t n_pages;
    without_pages = tkvi_add_sizes(tkvi_add_sizes(without_pages, bounds.growth), bounds.bytes);
    if (without_pages > budget) return TKV_ERR_BUDGET;
    n_pages = (int64_t)((budget - without_pages) / page);
    if (bounds.pages > n_pages || bounds.pages > (int64_t)kv->pool.n_pages) return TKV_ERR_BUDGET;
    if (!bounds.growth) return TKV_OK;
    if ((int64_t)kv->pool.n_pages - n_pages > (int64_t)kv->pool.n_free_pages) return TKV_ERR_BUDGET;
    tkvi_free_pages_above(&kv->pool, n_pages);
    return tkvi_grow_index(kv, request, bounds.entries, bounds.row_need) ? TKV_OK : TKV_ERR_NOMEM;
}

/* tkvi_prepare_loss by counts alone, then with the victims of the policy. */
static tkv_status tkvi_prepare_any_loss(tkv_cache *kv, const tkvi_request *request, size_t budget) {
    tkv_status st = TKV_ERR_NOMEM;
    if (tkvi_provide_within_limit(kv, request)) st = tkvi_prepare_loss(kv, request, budget, 0);
    if (st == TKV_ERR_BUDGET && tkvi_has_known_victims(kv)) st = tkvi_prepare_loss(kv, request, budget, 1);
    return st;
}

/* >>work spread over appends */
/* Bytes in use above which a level recodes blocks: its threshold of the budget. It is lower if the budget must
 * leave memory for the blocks that all layers of a sequence open at the same token. Level 0 recodes nothing:
 * (size_t)-1. */
static size_t tkvi_soft_limit(const tkv_cache *kv, int level) {
    const size_t budget = kv->tables.cfg.budget.bytes,
                 bytes_per_block = kv->budget.bytes_per_block + kv->budget.bytes_per_block / 4;
    size_t soft;
    if (level == 0) return (size_t)-1;
    soft = tkvi_threshold(&kv->budget.pressure.cfg, level - 1) < 1.0f
               ? (size_t)((double)budget * (double)tkvi_threshold(&kv->budget.pressure.cfg, level - 1))
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
    if (!pressed && (level == 0 || level != kv->budget.pressure.cfg.min_level)) return 0;
    return tkvi_recode_oldest(kv, kv->tables.cfg.budget.bytes, pressed);
}

/* Number of stale blocks at the present level that recoding can reach in RAM. A shared block counts with its last
 * holder to come. If memory is not short, blocks at cfg.budget.pressure.min_level that wait for a table are not
 * counted: they are not recoded now. */
static uint64_t tkvi_n_stale_blocks(const tkv_cache *kv) {
    uint64_t n = 0;
    const int waits_for_tables =
        kv->tables.level == kv->budget.pressure.cfg.min_level && !tkvi_is_pressed(kv, 10);
    const int can_learn = !tkvi_has_open_step(kv) && !waits_for_tables;
    int seq, layer, i;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            for (i = list->sinks + list->passed[TKVI_TIGHTEST]; i < list->n; i++) {
                tkv_tier due = tkvi_due_tier(kv, seq, layer, i, &kv->tables.plan[layer].now, can_learn);
                const tkvi_block *b = tkvi_block_of(kv, ids[i]);
                if (due == TKV_TIER_HOT) break;
                due = tkvi_hottest_tier(&kv->pool, ids[i], due);
                n += due != TKV_TIER_HOT && !tkvi_is_offloaded(b) &&
                     tkvi_is_smaller(kv, b->layout, tkvi_layout_of(&kv->tables, layer, due));
            }
        }
    return n;
}

/* The layout that block i of a list would have at the level below. */
static int tkvi_looser_layout(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_tier_spec *spec = &tkvi_tier_specs_of(&kv->tables, layer)[kv->tables.level - 1];
    const int own = tkvi_block_of(kv, tkvi_ids(kv, seq, layer)[i])->layout,
              due = spec->layout[tkvi_due_tier(kv, seq, layer, i, spec, !tkvi_has_open_step(kv))];
    return tkvi_is_smaller(kv, due, own) ? due : own;
}

/* 1 if everything held would fit at the level below, under its threshold less the hysteresis. Three more blocks of
 * each layer must fit as well. Otherwise the next blocks could soon bring this level back. */
static int tkvi_can_relax(tkv_cache *kv, const tkvi_request *request) {
    const int level = kv->tables.level;
    const tkv_pressure_config *p = &kv->budget.pressure.cfg;
    const double budget = (double)kv->tables.cfg.budget.bytes;
    tkvi_demand looser;
    double bytes;
    if (tkvi_used_bytes(kv) >= kv->budget.relax_at) return 0;
    looser = tkvi_demand_of(kv, request);
    tkvi_exchange_blocks(kv, tkvi_looser_layout, &looser);
    bytes = (double)(tkvi_bytes_for_demand(kv, request, &looser) - tkvi_spare_state_bytes(kv));
    if (bytes < budget * (double)tkvi_relax_below(p, level - 1) &&
        bytes + 3.0 * (double)kv->budget.bytes_per_block < budget)
        return 1;
    kv->budget.relax_at = tkvi_used_bytes(kv) - tkvi_used_bytes(kv) / 16; /* this check reads all blocks */
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
    if (tkvi_used_bytes(kv) + 2 * kv->budget.bytes_per_block <
        tkvi_soft_limit(kv, kv->tables.level ? kv->tables.level : 1))
        return;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++) {
        const tkvi_plan *p = &kv->tables.plan[i];
        if (p->stored_layer != i || !tkvi_plan_learns(p) || kv->tables.current_version[i] >= 0) continue;
        (void)tkvi_make_due_table(kv, i, TKVI_ANY_TOKENS);
    }
}

/* 1 if the next block of every layer does not fit. */
static int tkvi_is_full(const tkv_cache *kv) {
    return tkvi_used_bytes(kv) + kv->budget.bytes_per_block > kv->tables.cfg.budget.bytes;
}

/* Goes to the next level if this one has nothing left to recode. Returns 1 if it did. An open step learns no tables, so
 * it waits if one is missing. */
static int tkvi_raise_level(tkv_cache *kv) {
    tkvi_stale stale;
    if (kv->tables.level >= kv->budget.pressure.cfg.max_level ||
        (tkvi_has_open_step(kv) && tkvi_has_missing_tables(kv)) ||
        tkvi_find_stale(kv, TKVI_ANYWHERE, 1, &stale))
        return 0;
    tkvi_change_level(kv, kv->tables.level + 1);
    return 1;
}

/* Recodes a block in idle time: if it is time, or if the next block of every layer does not fit. The level can rise for
 * that. Returns 0 if there is nothing to do. */
static int tkvi_recode_in_idle_time(tkv_cache *kv) {
    if (!tkvi_has_budget(kv)) return 0;
    if (tkvi_recode_if_due(kv, tkvi_is_pressed(kv, 9))) return 1;
    while (tkvi_is_full(kv)) {
        if (tkvi_recode_oldest(kv, kv->tables.cfg.budget.bytes, 1)) return 1;
        if (tkvi_discard_recomputable(kv, 1)) return 1;
        if (!tkvi_raise_level(kv)) return 0;
    }
    return 0;
}

/* Called with each append. Updates the average pressure and perhaps the level. If memory is short, or at
 * cfg.budget.pressure.min_level, recodes blocks until they have freed 1.5 times the new bytes. So the work is
 * spread evenly over the appends. recode_backlog carries the rest to the next append. */
static void tkvi_recode_for_append(tkv_cache *kv, const tkvi_request *request, size_t new_bytes) {
    const tkv_pressure_config *p = &kv->budget.pressure.cfg;
    const float used_pressure = (float)((double)tkvi_used_bytes(kv) / (double)kv->tables.cfg.budget.bytes);
    float reported_pressure;
    int level = kv->tables.level, target;
    tkvi_lock(&kv->budget.pressure.lock);
    reported_pressure = kv->budget.reported_pressure;
    tkvi_unlock(&kv->budget.pressure.lock);
    target = tkvi_pressure_sample(
        &kv->budget.pressure, used_pressure > reported_pressure ? used_pressure : reported_pressure, level);
    if (target < level && tkvi_can_relax(kv, request)) tkvi_change_level(kv, level - 1);
    if (TKVI_HAS_METER && p->jump && target > level + 1 &&
        !(tkvi_has_open_step(kv) && tkvi_has_missing_tables(kv)))
        tkvi_change_level(kv, target);
    level = kv->tables.level;
    kv->budget.recode_backlog += (int64_t)(new_bytes + new_bytes / 2);
    if (kv->budget.recode_backlog > 0 && (target > level || tkvi_is_full(kv))) {
        const size_t freed = tkvi_discard_recomputable(kv, 1);
        kv->budget.recode_backlog -= (int64_t)freed;
        if (!freed) level += tkvi_raise_level(kv);
    }
    while (kv->budget.recode_backlog > 0) {
        const size_t freed = tkvi_recode_if_due(
            kv, tkvi_is_pressed(kv, 10) || (level > 0 && reported_pressure > tkvi_threshold(p, level - 1)));
        kv->budget.recode_backlog -= (int64_t)freed;
        if (freed) continue;
        /* The search is slow: it reads all lists. It waits for this many new bytes. */
        kv->budget.recode_backlog = -(int64_t)(kv->budget.bytes_per_block / 64);
    }
}

/* >>reclaim */
/* Merges the blocks of the first list in which that frees a block. 0: no list has such blocks. */
static int tkvi_fill_next(tkv_cache *kv) {
    int seq, layer, frees = 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs && !frees; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers && !frees && !kv->seq[seq].in_step; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const int n_before = list->n;
            tkvi_compact_blocks(kv, seq, layer, 1);
            frees = list->n < n_before;
        }
    return frees;
}

/* Evicts a batch of tokens, or merges blocks. needs_pages: 1 evicts tokens in RAM before offloaded ones, because those
 * take bytes only in the index. 0: there is nothing left. */
static int tkvi_evict_next(tkv_cache *kv, int needs_pages) {
    if (!TKVI_HAS_EVICT || !kv->tables.cfg.evict.policy) return 0;
    return (needs_pages && tkvi_evict_batch(kv, 0)) || tkvi_evict_batch(kv, 1) || tkvi_fill_next(kv);
}

/* 1 if the pages of a demand exceed the budget, or those that the pool has. 0: at most the index is too small. */
static int tkvi_is_short_of_pages(tkv_cache *kv, const tkvi_request *request, const tkvi_demand *demand,
                                  size_t budget) {
    const size_t growth =
        tkvi_index_growth_bytes(kv, request, tkvi_entries_for_demand(&kv->pool, demand), tkvi_n_row_entries);
    return tkvi_pages_for_demand(&kv->pool, demand) > (int64_t)kv->pool.n_pages ||
           tkvi_bytes_for_demand(kv, request, demand) - growth > budget;
}

/* Refuses a request that all stages together cannot serve. Nothing has changed then. */
static tkv_status tkvi_check_request(tkv_cache *kv, const tkvi_request *request, size_t budget) {
    size_t least;
    kv->call.store_failed = 0; /* a store that failed in an earlier call is tried again */
    if (tkvi_bytes_for(kv, request) <= budget) return TKV_OK;
    if (!kv->pool.keep_all) tkvi_free_turns(&kv->turns, &kv->heap); /* attention can do without them */
    least = tkvi_least_bytes(kv, request);
    return least <= budget ? TKV_OK : tkvi_refuse_over_budget(kv, least);
}

/* Positions of states that a sequence keeps until the last level has recoded all tokens. */
static int tkvi_n_states_before_recoding(const tkv_cache *kv) {
    return tkvi_max(1, kv->tables.cfg.limits.max_states / 8);
}

/* Stages 2 and 3. n_kept: positions of states that a sequence keeps in stage 2. Returns 1 if the request fits then. */
static int tkvi_reclaim_without_loss(tkv_cache *kv, const tkvi_request *request, size_t budget, int n_kept) {
    while (tkvi_bytes_for(kv, request) > budget) {
        if (!kv->pool.keep_all && tkvi_thin_next(&kv->states, n_kept)) continue;
        if (tkvi_recode_oldest(kv, 0, 1) || tkvi_discard_recomputable(kv, 1)) continue;
        if (kv->tables.level < kv->budget.pressure.cfg.max_level) tkvi_change_level(kv, kv->tables.level + 1);
        else if (!(!kv->pool.keep_all && tkvi_thin_next(&kv->states, 1)) && !tkvi_offload_oldest(kv) &&
                 !tkvi_discard_recomputable(kv, 0))
            return 0;
    }
    return 1;
}

/* Makes `bytes` of other memory fit into the budget. Discards and evicts no token: the allocator could still refuse
 * the bytes, and the tokens would be lost for a call that fails. Returns 0 if stages 2 and 3 do not suffice. If that is
 * known before, nothing has changed. *needed: bytes that it would take. */
static int tkvi_provide_bytes(tkv_cache *kv, size_t bytes, size_t *needed) {
    const size_t budget = kv->tables.cfg.budget.bytes;
    tkvi_request request = tkvi_no_request();
    int fits = 1;
    if (!tkvi_has_budget(kv) || kv->pool.keep_all) return 1;
    request.fixed.bytes = bytes;
    kv->call.store_failed = 0;
    kv->call.keeps_tokens = 1;
    if (tkvi_bytes_for(kv, &request) > budget) {
        *needed = tkvi_least_bytes(kv, &request);
        fits = *needed <= budget && tkvi_reclaim_without_loss(kv, &request, budget, 1);
        if (*needed <= budget) *needed = tkvi_bytes_for(kv, &request);
    }
    kv->call.keeps_tokens = 0;
    if (fits && bytes > budget - kv->heap.held) tkvi_trim_to(&kv->pool, 0);
    return fits;
}

/* Frees bytes, stage by stage, until the request fits into the budget. tkvi_check_request comes before. After stage 4
 * the request needs no allocation any more. Returns TKV_ERR_BUDGET or TKV_ERR_NOMEM before a token is lost. */
static tkv_status tkvi_reclaim(tkv_cache *kv, const tkvi_request *request, size_t budget) {
    tkv_status st;
    if (tkvi_reclaim_without_loss(kv, request, budget, tkvi_n_states_before_recoding(kv))) return TKV_OK;
    st = tkvi_prepare_any_loss(kv, request, budget);
    if (st == TKV_ERR_BUDGET) {
        kv->call.recodes_young = 1;
        while (tkvi_bytes_for(kv, request) > budget && tkvi_recode_oldest(kv, 0, 1)) {}
        kv->call.recodes_young = 0;
        if (tkvi_bytes_for(kv, request) <= budget) return TKV_OK;
        st = tkvi_prepare_any_loss(kv, request, budget);
    }
    if (st == TKV_ERR_BUDGET) return tkvi_refuse_over_budget(kv, tkvi_bytes_for(kv, request));
    if (st && kv->pool.keep_all)
        return tkvi_fail(kv, TKV_ERR_CAPACITY,
                         "the memory given to tkv_create_in_place has no room for entries", 0, NULL);
    if (st) return tkvi_fail(kv, st, "the allocator gave no memory within the budget", 0, NULL);
    for (;;) {
        const tkvi_demand demand = tkvi_demand_of(kv, request);
        const size_t bytes = tkvi_bytes_for_demand(kv, request, &demand);
        int found;
        if (bytes <= budget) {
            (void)tkvi_provide_within_limit(
                kv, request); /* if the allocator fails, more blocks are freed instead */
            if (tkvi_is_provided(kv, request, &demand)) return TKV_OK;
        }
        found = tkvi_discard_idle(kv) ||
                tkvi_evict_next(kv, tkvi_is_short_of_pages(kv, request, &demand, budget));
        TKVI_ASSERT(found); /* tkvi_prepare_loss checked a lower bound */
        if (!found) return tkvi_refuse_over_budget(kv, tkvi_bytes_for(kv, request));
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
    out->pressure = kv->budget.pressure.now;
    for (i = 0; i < TKV_MAX_LEVELS; i++) out->recoded[i] = kv->counts.recoded[i];
    out->demoted = kv->counts.demoted;
    out->refused = kv->counts.refused;
    out->offloaded = kv->counts.offloaded;
    out->unwritten = kv->counts.unwritten;
    out->promoted = kv->counts.promoted;
    out->discarded = kv->counts.discarded;
    out->recomputed = kv->counts.recomputed;
    out->evicted = kv->counts.evicted;
    out->thinned = kv->states.n_thinned;
    out->pending = tkvi_has_budget(kv) ? tkvi_n_stale_blocks(kv) : 0;
    return TKV_OK;
}

TKV_API tkv_status tkv_set_budget(tkv_cache *kv, size_t bytes) {
    const size_t old_budget = kv ? kv->tables.cfg.budget.bytes : 0;
    const tkvi_request none = tkvi_no_request();
    tkv_status st;
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
    kv->call.clock++;
    if (kv->pool.recode_pages == 0) { /* the budget had ended: recoding needs its pages again */
        kv->pool.recode_pages = kv->tables.recode_pages;
        if (!tkvi_provide(&kv->pool, &none.fixed)) {
            kv->pool.recode_pages = 0;
            return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for recoding", 0, NULL);
        }
    }
    st = tkvi_check_request(kv, &none, bytes);
    kv->tables.cfg.budget.bytes = bytes; /* reclaim works towards it */
    if (!st) st = tkvi_reclaim(kv, &none, bytes);
    if (st) {
        kv->tables.cfg.budget.bytes = old_budget;
        if (!old_budget) kv->pool.recode_pages = 0;
        tkvi_trim(&kv->pool);
        return st;
    }
    if (kv->heap.held > bytes) tkvi_trim_to(&kv->pool, 0);
    if (!old_budget) tkvi_end_reservations(kv); /* reserved slots were counted for recoding by age */
    tkvi_trim(&kv->pool);
    if (kv->pool.keep_all) /* in place, only the number of pages changes */
        kv->pool.max_pages = (int64_t)((bytes - tkvi_bytes_without_pages(kv)) / kv->tables.page_bytes);
    else kv->heap.limit = bytes;
    kv->pool.kept_free_pages = tkvi_free_pages_to_keep(kv);
    kv->budget.relax_at = (size_t)-1;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_set_level(tkv_cache *kv, int level) {
    if (!kv) return TKV_ERR_ARG;
    if (level < kv->budget.pressure.cfg.min_level || level > kv->budget.pressure.cfg.max_level)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no level", level, " within cfg.budget.pressure");
    if (kv->pool.keep_all && !tkvi_has_budget(kv))
        return tkvi_fail(kv, TKV_ERR_ARG, "in place and without a budget the plan is fixed", 0, NULL);
    tkvi_change_level(kv, level);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_set_hot_tokens(tkv_cache *kv, int hot_tokens) {
    int layer, level;
    if (!kv) return TKV_ERR_ARG;
    if (hot_tokens < 1 || hot_tokens >= TKVI_FOREVER)
        return tkvi_fail(kv, TKV_ERR_ARG, "hot_tokens is", hot_tokens, "; it must be 1 to 2^30 - 2");
    if (kv->pool.keep_all && !tkvi_has_budget(kv))
        return tkvi_fail(kv, TKV_ERR_ARG, "in place and without a budget lengths are fixed", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        for (level = 0; level < kv->tables.n_levels; level++) {
            tkvi_tier_spec *spec = &tkvi_tier_specs_of(&kv->tables, layer)[level];
            if (spec->hot != TKVI_FOREVER)
                spec->hot = tkvi_add_delay(hot_tokens, kv->tables.plan[layer].hot_delay);
        }
    tkvi_apply_plans(kv, kv->tables.level);
    kv->budget.hot_tokens_changed = 1;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_report_pressure(tkv_cache *kv, float pressure) {
    if (!kv || !tkvi_is_finite(pressure)) return TKV_ERR_ARG;
    tkvi_lock(&kv->budget.pressure.lock);
    kv->budget.reported_pressure = tkvi_clampf(pressure, 0.0f, 1.0f);
    tkvi_unlock(&kv->budget.pressure.lock);
    return TKV_OK;
}

#endif /* TKVI_RECLAIM_BUDGET_H */
