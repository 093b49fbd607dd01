/*
 * step/shrink.h - after a reset or a truncation: gives memory of the index back, and free pages.
 *
 * Appends only let the arrays of the index grow. Here each array moves into a smaller one. It gets the size that the
 * present blocks and reservations would have grown it to. The smaller array exists beside the old one for a moment. If
 * the allocator or the budget has no room for it, the old one stays.
 *
 * Blocks get other numbers, so that the block table can end earlier. A block that the store has, or a copy of it,
 * keeps its number: that is its key.
 */
#ifndef TKVI_STEP_SHRINK_H
#define TKVI_STEP_SHRINK_H

#include "reclaim/demand.h"

/* Gets zeroed memory for `cap` entries of an array with old_cap. Returns 0 if it would not be smaller, or without
 * memory. *smaller: NULL for no entries. */
static int tkvi_get_smaller(tkvi_heap *heap, uint32_t cap, uint32_t old_cap, size_t entry_bytes,
                            void **smaller) {
    *smaller = NULL;
    if (cap >= old_cap) return 0;
    if (cap == 0) return 1;
    *smaller = tkvi_get(heap, cap * entry_bytes);
    if (*smaller) memset(*smaller, 0, cap * entry_bytes);
    return *smaller != NULL;
}

/* The capacity that n entries would have grown an array to. */
static uint32_t tkvi_least_cap(int64_t n) { return n > 0 ? tkvi_cap_for(n) : 0; }

/* Shrinks the block lists of a sequence to its blocks and its reservation. */
static void tkvi_shrink_lists(tkv_cache *kv, int seq) {
    tkvi_seq *s = &kv->seq[seq];
    const size_t layers = (size_t)kv->tables.cfg.model.n_layers;
    tkv_rows row;
    uint32_t cap;
    size_t l;
    void *smaller;
    int most;
    row.seq = seq;
    row.n = tkvi_max(0, s->reserved_len - tkv_get_length(kv, seq, TKV_ALL_LAYERS));
    most = tkvi_n_row_entries(kv, &row, -1);
    for (l = 0; l < layers; l++)
        if (tkvi_list_of(kv, seq, (int)l)->n) most = tkvi_max(most, tkvi_list_of(kv, seq, (int)l)->n + 1);
    cap = tkvi_least_cap(most);
    if (!tkvi_get_smaller(&kv->heap, cap, s->cap, layers * sizeof(uint32_t), &smaller)) return;
    for (l = 0; l < layers && cap; l++)
        memcpy((uint32_t *)smaller + l * cap, s->block + l * s->cap, cap * sizeof(uint32_t));
    tkvi_put(&kv->heap, s->block, layers * s->cap * sizeof(uint32_t));
    s->block = (uint32_t *)smaller;
    s->cap = cap;
}

/* Shrinks the work space of eviction to the longest lists. */
static void tkvi_shrink_choice(tkv_cache *kv) {
    uint32_t cap = 0;
    void *smaller;
    int seq;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        if (kv->seq[seq].cap > cap) cap = kv->seq[seq].cap;
    if (!tkvi_get_smaller(&kv->heap, cap, kv->work.choice_cap, TKVI_CHOICE_BYTES, &smaller)) return;
    tkvi_put(&kv->heap, kv->work.choice, kv->work.choice_cap * TKVI_CHOICE_BYTES);
    kv->work.choice = (uint8_t *)smaller;
    kv->work.choice_cap = cap;
}

/* Entries that the block table must keep: the blocks, reserved ones too, and all up to the last one with a key. */
static int64_t tkvi_n_kept_entries(const tkvi_pool *pool) {
    const tkvi_demand none = tkvi_no_demand();
    const int64_t n_blocks = tkvi_entries_for_demand(pool, &none);
    int64_t n = pool->block_cap;
    for (; n > n_blocks; n--) {
        const tkvi_block *b = &pool->block[n - 1];
        if (b->refs && (b->copy_layout || (tkvi_is_offloaded(b) && !tkvi_is_discarded(b)))) break;
    }
    return n;
}

/* Shrinks the tables of blocks and entries. Those beyond the new end get the first free numbers. */
static void tkvi_shrink_blocks(tkv_cache *kv) {
    tkvi_pool *pool = &kv->pool;
    const tkvi_pool old = *pool;
    const size_t entry = tkvi_block_entry_bytes(&kv->tables.cfg);
    const uint32_t cap = tkvi_least_cap(tkvi_n_kept_entries(pool));
    const int n_layers = kv->tables.cfg.model.n_layers;
    uint32_t id, first_block = 0, first_entry = 0;
    void *smaller;
    int list, i;
    if (!tkvi_get_smaller(pool->heap, cap, old.block_cap, entry, &smaller)) return;
    tkvi_use_block_table(pool, (uint8_t *)smaller, cap);
    for (id = 0; id < cap; id++) pool->block[id].copy_mark = old.block[id].copy_mark; /* the number's own */
    for (id = 0; id < old.block_cap; id++) {
        tkvi_block *b = &old.block[id];
        uint32_t to = id;
        if (id >= cap && b->copy_mark > pool->first_copy_mark) pool->first_copy_mark = b->copy_mark;
        if (!b->refs) continue;
        for (; id >= cap && old.block[first_block].refs; first_block++) {}
        if (id >= cap) to = first_block++;
        pool->block[to] = *b;
        pool->block[to].copy_mark = old.block[to].copy_mark;
        if (!tkvi_is_offloaded(b)) pool->page[b->page].owner[b->slot] = to;
        b->page = to; /* for the entries below */
    }
    for (id = 0; id < old.block_cap; id++) {
        tkvi_entry *e = &old.entry[id];
        uint32_t to = id;
        if (!e->in_use) continue;
        for (; id >= cap && old.entry[first_entry].in_use; first_entry++) {}
        if (id >= cap) to = first_entry++;
        pool->entry[to] = *e;
        pool->entry[to].block = old.block[e->block].page;
        if (TKVI_HAS_EVICT && old.token_meta) pool->token_meta[to] = old.token_meta[id];
        e->block = to; /* for the rings and lists below */
    }
    for (id = 0; id < cap; id++)
        if (pool->entry[id].in_use)
            pool->entry[id].next_holder = old.entry[pool->entry[id].next_holder].block;
    for (list = 0; list < kv->tables.cfg.limits.max_seqs * n_layers; list++)
        for (i = 0; i < kv->list[list].n; i++) {
            uint32_t *number = &tkvi_ids(kv, list / n_layers, list % n_layers)[i];
            *number = old.entry[*number].block;
        }
    pool->free_block = pool->free_entry = TKVI_NIL;
    tkvi_link_free_blocks(pool, 0);
    tkvi_put(pool->heap, old.block, old.block_cap * entry);
}

/* Shrinks the table of sources to the blocks. Without attached files there is none, and no list of files. */
static void tkvi_shrink_sources(tkvi_pool *pool) {
    uint32_t i, n_files = 0;
    void *smaller = NULL;
    for (i = 0; i < pool->n_attached; i++) n_files += pool->attached[i].bytes != NULL;
    if (!n_files) {
        tkvi_put(pool->heap, pool->attached, pool->n_attached * sizeof *pool->attached);
        pool->attached = NULL;
        pool->n_attached = 0;
    }
    if (!tkvi_get_smaller(pool->heap, n_files ? pool->block_cap : 0, pool->source_cap, sizeof *pool->source,
                          &smaller))
        return;
    if (smaller) memcpy(smaller, pool->source, pool->block_cap * sizeof *pool->source);
    tkvi_put(pool->heap, pool->source, pool->source_cap * sizeof *pool->source);
    pool->source = (tkvi_source_place *)smaller;
    pool->source_cap = smaller ? pool->block_cap : 0;
}

/* Shrinks the list of a sequence's states. */
static void tkvi_shrink_states(tkv_cache *kv, int seq) {
    tkvi_state_list *list = &kv->states.list[seq];
    const uint32_t cap = tkvi_least_cap(list->n);
    void *smaller;
    if (kv->pool.keep_all) return;
    if (!tkvi_get_smaller(&kv->heap, cap, list->cap, sizeof *list->held, &smaller)) return;
    if (cap) memcpy(smaller, list->held, (size_t)list->n * sizeof *list->held);
    tkvi_put(&kv->heap, list->held, list->cap * sizeof *list->held);
    list->held = (tkvi_held_state *)smaller;
    list->cap = cap;
}

static void tkvi_shrink_pages(tkvi_pool *pool) {
    const uint32_t cap = tkvi_least_cap(pool->n_pages);
    void *smaller;
    if (!tkvi_get_smaller(pool->heap, cap, pool->page_cap, sizeof *pool->page, &smaller)) return;
    if (cap) memcpy(smaller, pool->page, pool->n_pages * sizeof *pool->page);
    tkvi_put(pool->heap, pool->page, pool->page_cap * sizeof *pool->page);
    pool->page = (tkvi_page *)smaller;
    pool->page_cap = cap;
}

/* Shrinks all that a sequence made the cache allocate. Free pages go first, so a budget has room for the copies. In
 * place nothing shrinks. */
static void tkvi_shrink_index(tkv_cache *kv, int seq) {
    if (kv->pool.keep_all) return;
    tkvi_trim_to(&kv->pool, 0);
    tkvi_shrink_lists(kv, seq);
    tkvi_shrink_choice(kv);
    tkvi_shrink_blocks(kv);
    if (TKVI_HAS_ATTACH) tkvi_shrink_sources(&kv->pool);
    tkvi_shrink_states(kv, seq);
    tkvi_shrink_pages(&kv->pool);
    if (!kv->pool.n_entries) tkvi_free_turns(&kv->turns, &kv->heap);
}

#endif /* TKVI_STEP_SHRINK_H */
