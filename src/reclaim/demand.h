/*
 * reclaim/demand.h - the memory that a call needs: slots of new blocks, block entries, longer lists. It computes the
 * bytes that the cache would hold, and allocates them.
 *
 * The numbers of blocks of each size give the pages in use exactly (cache/pool.h). So the bytes are exact too.
 */
#ifndef TKVI_RECLAIM_DEMAND_H
#define TKVI_RECLAIM_DEMAND_H

#include "cache/lookup.h"
#include "reclaim/age.h"

/* What a call needs: tokens at the ends of lists, and other slots. */
typedef struct tkvi_request {
    const tkv_rows *rows; /* sequences and the tokens that their lists must take */
    int n_rows, layer;    /* layer of the lists; -1: all, each up to rows[0].n tokens beyond the shortest */
    int n_jumps;       /* entries that a list may take beside those of its blocks, for jumps of positions */
    tkvi_demand fixed; /* other blocks and bytes; with layer -1 the blocks of the rows too */
} tkvi_request;

static tkvi_request tkvi_no_request(void) {
    tkvi_request none;
    memset(&none, 0, sizeof none);
    return none;
}

/* >>bytes */
/* Bytes held, without pages. */
static size_t tkvi_bytes_without_pages(const tkv_cache *kv) {
    return kv->heap.held - (size_t)kv->pool.n_pages * kv->tables.page_bytes;
}

/* Bytes held, without free pages beyond pool.recode_pages, and without states that thinning can free. */
static size_t tkvi_used_bytes(const tkv_cache *kv) {
    const int64_t n_usable = tkvi_n_usable_pages(&kv->pool), n_recode = kv->pool.recode_pages;
    const int64_t n_taken = (int64_t)kv->pool.n_pages - (int64_t)kv->pool.n_free_pages;
    return tkvi_bytes_without_pages(kv) - tkvi_spare_state_bytes(kv) +
           (size_t)(n_taken + (n_usable < n_recode ? n_usable : n_recode)) * kv->tables.page_bytes;
}

/* Bytes of the new array if `cap` entries cannot hold n_entries, else 0. The old array is not subtracted: it is freed
 * only after the copy. */
static size_t tkvi_growth_bytes(uint32_t cap, int64_t n_entries, size_t entry_bytes) {
    return n_entries > (int64_t)cap ? (size_t)tkvi_cap_for(n_entries) * entry_bytes : 0;
}

/* >>new tokens */
/* A last block with this many tokens that other lists hold too is not copied: the next token begins a new block. Below
 * that it is copied, or a list forked at every token would have a block for each. */
#define TKVI_FULL_ENOUGH (TKVI_BLOCK / 4 * 3)

/* 1 if entry i of a list sees the slots of its block that follow those of entry i - 1. */
static int tkvi_goes_on(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_entry *before = &kv->pool.entry[ids[i - 1]], *e = &kv->pool.entry[ids[i]];
    return before->block == e->block && tkvi_block_tokens(kv, list, ids, i - 1) <= e->first_slot;
}

/* 1 if others hold the block of the last entry of a list too. Entries before it that see other slots of the block,
 * because their positions differ, do not count. */
static int tkvi_is_tail_shared(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    int first = list->n - 1;
    while (first > 0 && tkvi_goes_on(kv, list, ids, first)) first--;
    return tkvi_block_of(kv, ids[first])->refs > (uint32_t)(list->n - first);
}

/* 1 if the last block lies in attached bytes, whole. */
static int tkvi_is_tail_attached(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    const uint32_t number = kv->pool.entry[ids[list->n - 1]].block;
    return tkvi_is_attached(&kv->pool, number, TKVI_ITSELF) &&
           tkvi_read_attached(&kv->pool, number, &kv->tables.layout[kv->pool.block[number].layout]);
}

/* 1 if the last block must be copied before a token is stored there: it lies in attached bytes, or an entry of another
 * list has its next slot. */
static int tkvi_must_copy_tail(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    const int last = list->n - 1;
    if (tkvi_is_tail_attached(kv, list, ids)) return 1;
    return tkvi_is_tail_shared(kv, list, ids) &&
           tkvi_block_of(kv, ids[last])->n_shared_slots != tkvi_block_tokens(kv, list, ids, last);
}

/* Number of tokens that the last block of a list could take if no other list held it. */
static int tkvi_tail_room(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                          const uint32_t *ids) {
    const int last = list->n - 1;
    const int capacity =
        last < list->sinks ? p->sink : kv->tables.layout[tkvi_block_of(kv, ids[last])->layout].tokens;
    return tkvi_max(0, capacity - tkvi_block_tokens(kv, list, ids, last));
}

/* Number of tokens that the last block of a list can still take. */
static int tkvi_tail_free_slots(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                                const uint32_t *ids) {
    const int last = list->n - 1;
    if (last < 0) return 0;
    if (last >= list->sinks && tkvi_block_of(kv, ids[last])->tier != TKV_TIER_HOT)
        return 0; /* a flush recoded it before it was full, or it was copied from older tokens */
    if (last >= list->sinks && tkvi_tier_at(list, last) != TKV_TIER_HOT)
        return 0; /* it is shared, and aged */
    if (kv->pool.entry[ids[last]].n_packed || kv->pool.entry[ids[last]].end_slot)
        return 0; /* truncation or removal took the blocks after it */
    if (tkvi_is_offloaded(tkvi_block_of(kv, ids[last])) && !tkvi_is_tail_attached(kv, list, ids))
        return 0; /* truncation removed the blocks after it */
    if (!kv->pool.keep_all && last >= list->sinks && tkvi_is_tail_shared(kv, list, ids) &&
        tkvi_must_copy_tail(kv, list, ids) && list->len - tkvi_block_start(kv, ids, last) >= TKVI_FULL_ENOUGH)
        return 0; /* in place, lists have no room for short blocks */
    return tkvi_tail_room(kv, p, list, ids);
}

/* 1 if a token that went into the last block would take a new entry: the tokens there have moved, and new ones have
 * not. Or they are gone, and the next one does not follow them. */
static int tkvi_has_tail_moved(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    const tkvi_entry *last = list->n ? &kv->pool.entry[ids[list->n - 1]] : NULL;
    return TKVI_HAS_MOVES && last && (last->turned != 0 || last->shift != tkvi_max(list->shift, -list->len));
}

/* 1 if the next token takes a new entry in the last block. */
static int tkvi_tail_needs_entry(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                                 const uint32_t *ids) {
    return tkvi_tail_free_slots(kv, p, list, ids) && tkvi_has_tail_moved(kv, list, ids);
}

/* Number of blocks that n more tokens open. *n_front: those of them that the list begins with (tkvi_n_front_blocks). */
static int tkvi_n_new_blocks(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                             const uint32_t *ids, int n, int *n_front) {
    int n_tokens = n - tkvi_tail_free_slots(kv, p, list, ids);
    *n_front = n_tokens > 0 && list->len == 0 ? tkvi_n_front_blocks(p) : 0;
    if (*n_front) n_tokens -= p->sink;
    return *n_front + (n_tokens > 0 ? (n_tokens + TKVI_BLOCK - 1) / TKVI_BLOCK : 0);
}

/* Adds the blocks that n more tokens of a list take, less the blocks that expire before. */
static void tkvi_demand_tokens(const tkv_cache *kv, int seq, int layer, int n, tkvi_demand *demand) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int n_front, i, n_blocks = tkvi_n_new_blocks(kv, p, list, ids, n, &n_front);
    if (n_front) tkvi_demand_blocks(&kv->pool, p->sink_layout, p->sink > 0, demand);
    if (TKVI_HAS_EVICT && n_front)
        tkvi_demand_blocks(&kv->pool, p->anchor_layout, p->n_anchor_blocks, demand);
    if (tkvi_tail_needs_entry(kv, p, list, ids)) n_blocks++; /* as a block of its own */
    tkvi_demand_blocks(&kv->pool, p->now.layout[TKV_TIER_HOT], n_blocks - n_front, demand);
    if (tkvi_tail_free_slots(kv, p, list, ids) && tkvi_must_copy_tail(kv, list, ids))
        demand->slots[kv->tables.layout[tkvi_block_of(kv, ids[list->n - 1])->layout].size_class]++;
    for (i = kv->seq[seq].in_step ? 0 : tkvi_n_expiring(kv, seq, layer); i-- > 0;) {
        const uint32_t id = ids[tkvi_first_to_expire(kv, layer, list, ids) + i];
        const tkvi_block *b = tkvi_block_of(kv, id);
        if (tkvi_outlasts_window(kv, layer, id)) continue;
        demand->entries--;
        if (b->refs == 1 && !tkvi_is_offloaded(b)) demand->slots[kv->tables.layout[b->layout].size_class]--;
    }
}

/* Block numbers that the longest list of a row must hold: its blocks, the new ones, and one more. layer < 0: of all
 * layers. */
static int tkvi_n_row_entries(tkv_cache *kv, const tkv_rows *row, int layer) {
    const int len_after = layer < 0 ? tkv_get_length(kv, row->seq, TKV_ALL_LAYERS) + row->n : 0;
    int l, most = 0;
    for (l = tkvi_max(layer, 0); l <= (layer < 0 ? kv->tables.cfg.model.n_layers - 1 : layer); l++) {
        const tkvi_plan *p = &kv->tables.plan[l];
        const tkvi_list *list = tkvi_list_of(kv, row->seq, l);
        const int n = layer < 0 ? len_after - list->len : row->n;
        int n_front;
        if (p->stored_layer == l && n > 0)
            most =
                tkvi_max(most, list->n + 1 + tkvi_tail_needs_entry(kv, p, list, tkvi_ids(kv, row->seq, l)) +
                                   tkvi_n_new_blocks(kv, p, list, tkvi_ids(kv, row->seq, l), n, &n_front));
    }
    return most;
}

/* >>a request */
/* The demand of a request in the present state of the lists. */
static tkvi_demand tkvi_demand_of(const tkv_cache *kv, const tkvi_request *request) {
    tkvi_demand demand = request->fixed;
    int i;
    for (i = 0; i < request->n_rows && request->layer >= 0; i++)
        if (request->rows[i].n)
            tkvi_demand_tokens(kv, request->rows[i].seq, request->layer, request->rows[i].n, &demand);
    return demand;
}

/* Block numbers that the longest list of a row must hold: tkvi_n_row_entries, or fewer after blocks are freed. */
typedef int (*tkvi_row_need)(tkv_cache *kv, const tkv_rows *row, int layer);

/* The same for row i of a request, with jumps of positions. 0: the row needs none. */
static int tkvi_n_list_entries(tkv_cache *kv, const tkvi_request *request, int i, tkvi_row_need row_need) {
    const int n = row_need(kv, &request->rows[i], request->layer);
    return n ? n + request->n_jumps : 0;
}

/* Bytes of new arrays of the index (block table, lists, space of choices) that serve a request. n_entries: of the block
 * table. */
static size_t tkvi_index_growth_bytes(tkv_cache *kv, const tkvi_request *request, int64_t n_entries,
                                      tkvi_row_need row_need) {
    size_t bytes = tkvi_growth_bytes(kv->pool.block_cap, n_entries, tkvi_block_entry_bytes(&kv->tables.cfg));
    int i, most = 0;
    if (TKVI_HAS_ATTACH && kv->pool.source)
        bytes += tkvi_growth_bytes(kv->pool.source_cap, n_entries, sizeof *kv->pool.source);
    for (i = 0; i < request->n_rows; i++) {
        const int n = tkvi_n_list_entries(kv, request, i, row_need);
        bytes += tkvi_growth_bytes(kv->seq[request->rows[i].seq].cap, n, sizeof(uint32_t)) *
                 (size_t)kv->tables.cfg.model.n_layers;
        most = tkvi_max(most, n);
    }
    return bytes + tkvi_growth_bytes(kv->work.choice_cap, most, tkvi_choice_entry_bytes(&kv->tables.cfg));
}

/* Allocates those arrays. Returns 0 without memory. */
static int tkvi_grow_index(tkv_cache *kv, const tkvi_request *request, int64_t n_entries,
                           tkvi_row_need row_need) {
    int i;
    if (n_entries > 0x7fffffff || (n_entries > 0 && !tkvi_grow_blocks(&kv->pool, (uint32_t)n_entries)))
        return 0;
    for (i = 0; i < request->n_rows; i++)
        if (request->rows[i].n &&
            !tkvi_grow_lists(kv, request->rows[i].seq, tkvi_n_list_entries(kv, request, i, row_need)))
            return 0;
    return 1;
}

/* Bytes held if this demand of a request is served, with the pages for recoding. New arrays count beside the old
 * ones. */
static size_t tkvi_bytes_for_demand(tkv_cache *kv, const tkvi_request *request, const tkvi_demand *demand) {
    const size_t growth =
        tkvi_index_growth_bytes(kv, request, tkvi_entries_for_demand(&kv->pool, demand), tkvi_n_row_entries);
    const int64_t n_taken = (int64_t)kv->pool.n_pages - (int64_t)kv->pool.n_free_pages +
                            tkvi_reserved_pages(&kv->pool) + kv->pool.recode_pages; /* as tkvi_trim_to */
    int64_t pages = tkvi_pages_for_demand(&kv->pool, demand);
    size_t bytes;
    if (growth && pages < n_taken) pages = n_taken; /* the index grows before blocks expire */
    bytes = (uint64_t)pages < TKVI_TOO_MANY ? (size_t)pages : TKVI_TOO_MANY;
    bytes = tkvi_multiply_sizes(bytes, kv->tables.page_bytes);
    bytes = tkvi_add_sizes(tkvi_add_sizes(bytes, tkvi_bytes_without_pages(kv)), demand->bytes);
    return tkvi_add_sizes(bytes, growth + tkvi_growth_bytes(kv->pool.page_cap, pages, sizeof(tkvi_page)));
}

static size_t tkvi_bytes_for(tkv_cache *kv, const tkvi_request *request) {
    const tkvi_demand demand = tkvi_demand_of(kv, request);
    return tkvi_bytes_for_demand(kv, request, &demand);
}

/* 1 if a demand of a request needs no further allocation. */
static int tkvi_is_provided(tkv_cache *kv, const tkvi_request *request, const tkvi_demand *demand) {
    const int64_t pages = tkvi_pages_for_demand(&kv->pool, demand);
    return pages <= (int64_t)kv->pool.n_pages && (!kv->pool.max_pages || pages <= kv->pool.max_pages) &&
           tkvi_index_growth_bytes(kv, request, tkvi_entries_for_demand(&kv->pool, demand),
                                   tkvi_n_row_entries) == 0;
}

/* The most bytes that the heap may hold. In place no more memory comes. */
static size_t tkvi_heap_limit(const tkv_cache *kv) {
    if (kv->pool.keep_all) return kv->heap.held;
    return kv->heap.limit ? kv->heap.limit : (size_t)-1;
}

/* Allocates what a request needs, as far as tkvi_heap_limit allows. First gives free pages back where the index needs
 * their bytes. Returns 0 if the allocator failed; then no block has changed. */
static int tkvi_provide_within_limit(tkv_cache *kv, const tkvi_request *request) {
    const tkvi_demand demand = tkvi_demand_of(kv, request);
    const int64_t n_entries = tkvi_entries_for_demand(&kv->pool, &demand),
                  pages = tkvi_pages_for_demand(&kv->pool, &demand);
    const size_t limit = tkvi_heap_limit(kv),
                 growth = tkvi_index_growth_bytes(kv, request, n_entries, tkvi_n_row_entries);
    size_t page_table;
    TKVI_ASSERT(kv->heap.held <= limit);
    if (growth > limit - kv->heap.held) tkvi_trim_to(&kv->pool, 0);
    if (growth && growth <= limit - kv->heap.held &&
        !tkvi_grow_index(kv, request, n_entries, tkvi_n_row_entries))
        return 0;
    /* At once: in steps the last array but one would stand beside the last, and the forecast counts the present one. */
    page_table = tkvi_growth_bytes(kv->pool.page_cap, pages, sizeof(tkvi_page));
    if (page_table && page_table <= limit - kv->heap.held && !tkvi_grow_pages(&kv->pool, (uint32_t)pages))
        return 0;
    while ((int64_t)kv->pool.n_pages < pages) {
        const size_t page = kv->tables.page_bytes +
                            tkvi_growth_bytes(kv->pool.page_cap, kv->pool.n_pages + 1, sizeof(tkvi_page));
        if (page > limit - kv->heap.held) return 1;
        if (!tkvi_add_page(&kv->pool)) return 0;
    }
    return 1;
}

/* Allocates all that a request needs. Returns 0 without memory; then no block has changed. */
static int tkvi_provide_request(tkv_cache *kv, const tkvi_request *request) {
    const tkvi_demand demand = tkvi_demand_of(kv, request);
    return tkvi_provide_within_limit(kv, request) && tkvi_is_provided(kv, request, &demand);
}

/* Writes the error of a call without memory. what, number, more: as in tkvi_fail. */
static tkv_status tkvi_refuse_no_memory(tkv_cache *kv, const char *what, int64_t number, const char *more) {
    if (kv->pool.keep_all ? tkvi_has_budget(kv) : kv->heap.at_limit)
        return tkvi_fail(kv, TKV_ERR_BUDGET, what, number, more);
    return tkvi_fail(kv, kv->pool.keep_all ? TKV_ERR_CAPACITY : TKV_ERR_NOMEM, what, number, more);
}

#endif /* TKVI_RECLAIM_DEMAND_H */
