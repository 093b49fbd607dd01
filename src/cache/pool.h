/*
 * cache/pool.h - the memory of blocks: pages cut into slots, with the tables of blocks and entries on top.
 *
 *     list -> entry: block number, tokens -> block: page, slot -> page: [slot 0][slot 1] ... all of one size class
 *
 * All pages have one size. A page in use serves one size class: its slots fit blocks of one size. The free slots of
 * a class never add up to a whole page. When they would, tkvi_compact moves the blocks of the sparsest page into
 * the other pages. That page is then free for any class, or goes back to the allocator. Only the writer moves
 * blocks, while no reader runs.
 *
 * So the pages in use are exactly the sum over classes of ceil(blocks / slots), whatever the history. Blocks of
 * different sizes cannot fragment the memory, nor an arena. And the pages that new blocks will need can be computed
 * before they are stored (tkvi_pages_for_demand).
 *
 * Blocks have a number, and their bytes may move. An entry says what one list sees of a block. Entries of several lists
 * may hold the same block (tkv_seq_fork). They form a ring. Such a block is coded for the hottest tier among its
 * holders, so it is coded again once for all of them.
 */
#ifndef TKVI_CACHE_POOL_H
#define TKVI_CACHE_POOL_H

#include "cache/plan.h"

#define TKVI_NIL 0xffffffffu
#define TKVI_OFFLOADED 0x80000000u /* bit of tkvi_block.page: offloaded. Page numbers stay below it */

typedef struct tkvi_page {
    uint8_t *bytes;
    uint64_t taken;         /* bit per slot: 1 in use */
    uint32_t owner[64];     /* block number in each slot */
    uint32_t before, after; /* neighbours in the partial-page list; of a free page, only `after` */
    int size_class;         /* -1: free */
    int used;               /* slots in use */
} tkvi_page;

/* The bytes of up to 64 tokens of one layer. Several entries may hold a block; all of them see the same bytes. */
typedef struct tkvi_block {
    uint32_t refs; /* entries that hold the block; 0: this number is free */
    /* Page number; of a free number, the next free one; TKVI_NIL: discarded (reclaim/discard.h). With
     * TKVI_OFFLOADED, page and slot hold the mark of the offloaded bytes (reclaim/offload.h). */
    uint32_t page;
    uint16_t slot, layout;    /* layout: number of the block's layout in tkvi_tables.layout */
    int first_position;       /* of slot 0 when the block was coded; it seeds the checksums of stored bytes */
    uint16_t previous_layout; /* 0, or 1 + the layout before this one, if not hot (step/recompute.h) */
    uint16_t copy_layout;     /* 0, or 1 + the layout of an exact copy in the store */
    uint16_t copy_mark;       /* mark of the last copy made for this block number; it outlives the block */
    uint8_t tier;             /* the tier that it was last coded for, of its list or of the hottest holder */
    uint8_t n_shared_slots;   /* slots that some holder may see, while there are several holders */
} tkvi_block;

/* What one list sees of a block: which tokens, and where. */
typedef struct tkvi_entry {
    uint32_t block; /* block number; of a free entry, the next free one */
    int start;      /* index of the first token; the entry covers indices up to the start of the next entry */
    /* bit per slot, oldest first: evicted, removed, truncated, or now in a block of anchors */
    uint64_t evicted_mask;
    uint64_t sink_mask;   /* bit per slot: a live token that the caller named a sink (step/sinks.h) */
    uint32_t next_holder; /* ring of the entries that hold the block */
    int shift;            /* positions of the tokens less their indices (step/move.h) */
    int turned;           /* positions by which the tokens moved since they were appended */
    /* 0: slot first_slot + i has index start + i. Else the number of slots in use, whose indices are in token_meta
     * (tkvi_slot_index). */
    int8_t n_packed;
    uint8_t first_slot; /* slots before this one belong to another entry, or to none */
    uint8_t end_slot;   /* not 0: slots from here on too, so indices up to the next entry have no token */
    uint8_t tier;       /* tier of the block in this list (tkvi_tier_at) */
    uint8_t is_first;   /* 1 for one entry of each ring: what counts a block once counts it with this entry */
    uint8_t has_anchors; /* 1: its tokens are anchors, which can have any index (reclaim/anchors.h) */
    uint8_t in_use;      /* 0: this entry is free */
} tkvi_entry;

/* Data of an entry's tokens, for eviction, importance and anchors (tkvi_keeps_token_meta). */
typedef struct tkvi_token_meta {
    union {                             /* of a packed block (tkvi_slot_index) */
        uint16_t after_start[64];       /* indices, less the start of the entry */
        int32_t any[TKVI_ANCHOR_SLOTS]; /* has_anchors: indices */
    } index;
    uint32_t scores[64];     /* attention scores, or norms of keys (reclaim/scores.h) */
    uint64_t pinned_mask;    /* bits: these tokens are never evicted */
    uint64_t temporary_mask; /* bits: these tokens stay while the list is shorter than temporary_until */
    /* bits, also in evicted_mask: exact in a block of anchors; the slot here stays reserved */
    uint64_t anchored_mask;
    uint64_t victim_mask; /* bits: victims of a pending eviction (reclaim/evict_tokens.h) */
    int temporary_until;  /* end of the temporary pins, a length of the list */
    int score_step;       /* length of the list when `scores` were last updated */
    int moved_at;         /* 0, or 1 + the length of the list when the block last changed its tier */
} tkvi_token_meta;

/* Saved bytes of the caller's, which blocks are read from where they lie (tkv_load_params.attach). */
typedef struct tkvi_attached {
    const uint8_t *bytes; /* NULL: this place is free */
    size_t size;
    uint32_t n_sources; /* blocks that have it as their source */
    void (*release)(void *user, const void *bytes, size_t size);
    void *user;
} tkvi_attached;

/* Where attached bytes have a block, or the exact copy of a block in RAM. */
typedef struct tkvi_source_place {
    uint32_t unit;       /* of 64 bytes: where the record begins */
    uint16_t file;       /* 1 + its place in tkvi_pool.attached; 0: no source */
    uint8_t what;        /* tkvi_stored_as */
    uint8_t is_verified; /* 1: its checksum was right; set by readers (tkvi_read_attached) */
} tkvi_source_place;

typedef struct tkvi_pool {
    tkvi_heap *heap;
    const tkvi_tables *tables;
    int keep_all;            /* 1 in place: pages never go back to the allocator */
    int recode_pages;        /* free pages that only recoding may use */
    int64_t kept_free_pages; /* free pages that do not go back to the allocator, as they are needed soon */
    int64_t max_pages;       /* in place: most pages, recode_pages included (tkv_set_budget); 0: no limit */
    tkvi_page *page;
    uint32_t n_pages, page_cap;       /* entries in use are 0 .. n_pages-1, each with bytes */
    uint32_t free_page, n_free_pages; /* first of the list of free pages; its length */
    tkvi_block *block;                /* [block_cap] */
    tkvi_entry *entry;                /* [block_cap], behind the blocks; no block is without entry */
    tkvi_token_meta *token_meta;      /* [block_cap], per entry, behind the entries; NULL: not needed */
    uint32_t n_entries, n_blocks, block_cap; /* those in use; both tables have block_cap numbers */
    uint32_t free_entry, free_block;         /* first free numbers */
    uint32_t n_offloaded;                    /* live blocks without bytes in RAM, discarded ones included */
    uint32_t n_discarded;                    /* live blocks that must be recomputed */
    uint32_t n_late;           /* blocks that wait to be coded for their holders (tkvi_is_late) */
    uint16_t first_copy_mark;  /* copy_mark of new entries: the last one of the entries that were freed */
    uint64_t marks;            /* last mark given out, 47 bits (reclaim/offload.h) */
    tkvi_source_place *source; /* [source_cap] by block number; NULL: nothing was attached */
    tkvi_attached *attached;   /* [n_attached] */
    uint32_t source_cap, n_attached;
    uint32_t *partial_pages; /* per class: first page of the partial-page list */
    int64_t *used_slots;     /* per class: slots in use */
    int64_t *reserved_slots; /* per class: slots reserved by tkv_seq_reserve, all sequences */
} tkvi_pool;

/* >>pages */
/* Pages that this many blocks of a class need. */
static int64_t tkvi_pages_for(const tkvi_class *c, int64_t blocks) {
    return (blocks + c->slots - 1) / c->slots;
}

/* Puts page i into the partial-page list of its class. */
static void tkvi_link_partial_page(tkvi_pool *pool, uint32_t i) {
    tkvi_page *p = &pool->page[i];
    uint32_t *head = &pool->partial_pages[p->size_class];
    p->before = TKVI_NIL;
    p->after = *head;
    if (*head != TKVI_NIL) pool->page[*head].before = i;
    *head = i;
}

static void tkvi_unlink_partial_page(tkvi_pool *pool, uint32_t i) {
    tkvi_page *p = &pool->page[i];
    if (p->before != TKVI_NIL) pool->page[p->before].after = p->after;
    else pool->partial_pages[p->size_class] = p->after;
    if (p->after != TKVI_NIL) pool->page[p->after].before = p->before;
}

static void tkvi_free_page(tkvi_pool *pool, uint32_t i) {
    tkvi_page *p = &pool->page[i];
    p->size_class = -1;
    p->before = TKVI_NIL;
    p->after = pool->free_page;
    pool->free_page = i;
    pool->n_free_pages++;
}

/* >>growth. Each function allocates first and changes the pool only when it has the memory. 0: no memory. */
/* Capacity of a table that must hold n_entries. It grows in steps of a quarter, so that little of it is unused.
 * Beyond 2^31 it grows no more: nobody gets so many. */
static uint32_t tkvi_cap_for(int64_t n_entries) {
    uint32_t cap = 16;
    while ((int64_t)cap < n_entries && cap <= 0x7fffffffu) cap += cap / 4;
    return cap;
}

static int tkvi_keeps_token_meta(const tkv_config *cfg) {
    return TKVI_HAS_EVICT && (cfg->evict.policy != TKV_EVICT_NONE || cfg->importance.sample_every > 0 ||
                              cfg->tiers.n_anchors > 0);
}

/* Bytes of one number of the tables: a block, an entry and its token_meta. */
static size_t tkvi_block_entry_bytes(const tkv_config *cfg) {
    return sizeof(tkvi_block) + sizeof(tkvi_entry) +
           (tkvi_keeps_token_meta(cfg) ? sizeof(tkvi_token_meta) : 0);
}

/* Uses `bytes` as tables of `cap` blocks and entries. */
static void tkvi_use_block_table(tkvi_pool *pool, uint8_t *bytes, uint32_t cap) {
    uint8_t *entries = cap ? bytes + cap * sizeof(tkvi_block) : NULL;
    pool->block = (tkvi_block *)(void *)bytes;
    pool->entry = (tkvi_entry *)(void *)entries;
    pool->token_meta = cap && tkvi_keeps_token_meta(&pool->tables->cfg)
                           ? (tkvi_token_meta *)(void *)(entries + cap * sizeof(tkvi_entry))
                           : NULL;
    pool->block_cap = cap;
}

/* Puts the free numbers from `from` on before the lists of free blocks and entries. */
static void tkvi_link_free_blocks(tkvi_pool *pool, uint32_t from) {
    uint32_t i;
    for (i = pool->block_cap; i-- > from;) {
        if (!pool->block[i].refs) {
            pool->block[i].page = pool->free_block;
            pool->free_block = i;
        }
        if (!pool->entry[i].in_use) {
            pool->entry[i].block = pool->free_entry;
            pool->free_entry = i;
        }
    }
}

/* Makes the table of sources as long as that of blocks. */
static int tkvi_grow_sources(tkvi_pool *pool, uint32_t cap) {
    tkvi_source_place *longer;
    if (cap <= pool->source_cap) return 1;
    longer = (tkvi_source_place *)tkvi_get(pool->heap, cap * sizeof *longer);
    if (!longer) return 0;
    memset(longer, 0, cap * sizeof *longer);
    if (pool->source) memcpy(longer, pool->source, pool->source_cap * sizeof *longer);
    tkvi_put(pool->heap, pool->source, pool->source_cap * sizeof *longer);
    pool->source = longer;
    pool->source_cap = cap;
    return 1;
}

static int tkvi_grow_blocks(tkvi_pool *pool, uint32_t n_entries) {
    const size_t entry = tkvi_block_entry_bytes(&pool->tables->cfg);
    const uint32_t old_cap = pool->block_cap, cap = tkvi_cap_for(n_entries);
    const tkvi_pool old = *pool;
    uint32_t i;
    const size_t bytes = tkvi_multiply_sizes(cap, entry);
    uint8_t *bigger;
    if (n_entries <= old_cap) return 1;
    if (TKVI_HAS_ATTACH && pool->source && !tkvi_grow_sources(pool, cap)) return 0;
    bigger = (uint8_t *)tkvi_get(pool->heap, bytes);
    if (!bigger) return 0;
    memset(bigger, 0, bytes);
    tkvi_use_block_table(pool, bigger, cap);
    if (old_cap) memcpy(pool->block, old.block, old_cap * sizeof *old.block);
    if (old_cap) memcpy(pool->entry, old.entry, old_cap * sizeof *old.entry);
    if (TKVI_HAS_EVICT && old_cap && old.token_meta)
        memcpy(pool->token_meta, old.token_meta, old_cap * sizeof *old.token_meta);
    tkvi_put(pool->heap, old.block, old_cap * entry);
    for (i = old_cap; i < cap; i++) pool->block[i].copy_mark = pool->first_copy_mark;
    tkvi_link_free_blocks(pool, old_cap);
    return 1;
}

static int tkvi_grow_pages(tkvi_pool *pool, uint32_t n_entries) {
    const uint32_t cap = tkvi_cap_for(n_entries);
    tkvi_page *bigger;
    const size_t bytes = tkvi_multiply_sizes(cap, sizeof *bigger);
    if (n_entries <= pool->page_cap) return 1;
    bigger = (tkvi_page *)tkvi_get(pool->heap, bytes);
    if (!bigger) return 0;
    memset(bigger, 0, bytes);
    if (pool->page) memcpy(bigger, pool->page, pool->page_cap * sizeof *bigger);
    tkvi_put(pool->heap, pool->page, pool->page_cap * sizeof *bigger);
    pool->page = bigger;
    pool->page_cap = cap;
    return 1;
}

static int tkvi_add_page(tkvi_pool *pool) {
    uint8_t *bytes;
    tkvi_page *p;
    if (!tkvi_grow_pages(pool, pool->n_pages + 1)) return 0;
    bytes = (uint8_t *)tkvi_get(pool->heap, pool->tables->page_bytes);
    if (!bytes) return 0;
    p = &pool->page[pool->n_pages];
    memset(p, 0, sizeof *p);
    p->bytes = bytes;
    tkvi_free_page(pool, pool->n_pages++);
    return 1;
}

/* Pages that reservations will need in addition to the pages in use. */
static int64_t tkvi_reserved_pages(const tkvi_pool *pool) {
    int64_t pages = 0;
    int c;
    for (c = 0; c < pool->tables->n_classes; c++) {
        const tkvi_class *k = &pool->tables->size_class[c];
        pages += tkvi_pages_for(k, pool->used_slots[c] + pool->reserved_slots[c]) -
                 tkvi_pages_for(k, pool->used_slots[c]);
    }
    return pages;
}

/* Gives free pages back to the allocator while there are more than n_kept pages. The last entry of the page table
 * moves into the hole. */
static void tkvi_free_pages_above(tkvi_pool *pool, int64_t n_kept) {
    while (pool->n_free_pages > 0 && (int64_t)pool->n_pages > n_kept) {
        uint32_t i = pool->free_page, last = pool->n_pages - 1;
        tkvi_page *p = &pool->page[i];
        pool->free_page = p->after;
        pool->n_free_pages--;
        pool->n_pages--;
        tkvi_put(pool->heap, p->bytes, pool->tables->page_bytes);
        if (i == last) continue;
        *p = pool->page[last];
        if (p->size_class < 0) { /* a free page: find the link to it */
            uint32_t *link = &pool->free_page;
            while (*link != last) link = &pool->page[*link].after;
            *link = i;
        } else {
            int s;
            for (s = 0; s < 64; s++)
                if (p->taken >> s & 1) pool->block[p->owner[s]].page = i;
            if (p->used < pool->tables->size_class[p->size_class].slots) {
                if (p->before != TKVI_NIL) pool->page[p->before].after = i;
                else pool->partial_pages[p->size_class] = i;
                if (p->after != TKVI_NIL) pool->page[p->after].before = i;
            }
        }
    }
}

/* Gives free pages back to the allocator. Keeps the pages of reservations, recode_pages and `kept_free_pages`; without
 * blocks and reservations none. */
static void tkvi_trim_to(tkvi_pool *pool, int64_t kept_free_pages) {
    const int64_t n_taken = (int64_t)pool->n_pages - (int64_t)pool->n_free_pages + tkvi_reserved_pages(pool);
    if (pool->keep_all) return;
    tkvi_free_pages_above(pool, n_taken ? n_taken + pool->recode_pages + kept_free_pages : 0);
}

static void tkvi_trim(tkvi_pool *pool) { tkvi_trim_to(pool, pool->kept_free_pages); }

/* >>slots */
static uint8_t *tkvi_slot_bytes(const tkvi_pool *pool, uint32_t page, int slot) {
    const tkvi_page *p = &pool->page[page];
    return p->bytes + (size_t)slot * pool->tables->size_class[p->size_class].slot_bytes;
}

static uint8_t *tkvi_block_bytes(const tkvi_pool *pool, const tkvi_block *b) {
    return tkvi_slot_bytes(pool, b->page, b->slot);
}

/* Takes a slot of a class for block `owner`. There must be one (tkvi_provide, tkvi_provide_slot). */
static void tkvi_take_slot(tkvi_pool *pool, int size_class, uint32_t owner, uint32_t *page, int *slot) {
    int slots = pool->tables->size_class[size_class].slots, s = 0;
    uint32_t i = pool->partial_pages[size_class];
    tkvi_page *p;
    if (i == TKVI_NIL) {
        i = pool->free_page;
        TKVI_ASSERT(i != TKVI_NIL);
        pool->free_page = pool->page[i].after;
        pool->n_free_pages--;
        pool->page[i].size_class = size_class;
        tkvi_link_partial_page(pool, i);
    }
    p = &pool->page[i];
    while (p->taken >> s & 1) s++;
    p->taken |= (uint64_t)1 << s;
    p->owner[s] = owner;
    if (++p->used == slots) tkvi_unlink_partial_page(pool, i);
    pool->used_slots[size_class]++;
    *page = i;
    *slot = s;
}

/* Overwrites a slot before it is free (cfg.host.wipe_freed). So free pages hold no keys and values either. */
static void tkvi_wipe_slot(tkvi_pool *pool, uint32_t page, int slot) {
    if (pool->tables->cfg.host.wipe_freed)
        tkvi_wipe(tkvi_slot_bytes(pool, page, slot),
                  pool->tables->size_class[pool->page[page].size_class].slot_bytes);
}

static void tkvi_clear_slot(tkvi_pool *pool, uint32_t page, int slot) {
    tkvi_page *p = &pool->page[page];
    int size_class = p->size_class;
    tkvi_wipe_slot(pool, page, slot);
    if (p->used == pool->tables->size_class[size_class].slots) tkvi_link_partial_page(pool, page);
    p->taken &= ~((uint64_t)1 << slot);
    p->used--;
    pool->used_slots[size_class]--;
    if (p->used == 0) {
        tkvi_unlink_partial_page(pool, page);
        tkvi_free_page(pool, page);
    }
}

/* Moves the blocks of a class's sparsest page into its other pages, if they have enough free slots. Frees that
 * page. */
static void tkvi_compact(tkvi_pool *pool, int size_class) {
    const tkvi_class *c = &pool->tables->size_class[size_class];
    uint32_t i, sparse = pool->partial_pages[size_class];
    int holes = 0, s;
    tkvi_page *p;
    for (i = sparse; i != TKVI_NIL; i = pool->page[i].after) {
        holes += c->slots - pool->page[i].used;
        if (pool->page[i].used < pool->page[sparse].used) sparse = i;
    }
    if (holes < c->slots) return;
    tkvi_unlink_partial_page(pool, sparse); /* so tkvi_take_slot takes none here */
    p = &pool->page[sparse];
    for (s = 0; s < c->slots; s++) {
        tkvi_block *b;
        uint32_t to;
        int to_slot;
        if (!(p->taken >> s & 1)) continue;
        b = &pool->block[p->owner[s]];
        tkvi_take_slot(pool, size_class, p->owner[s], &to, &to_slot);
        memcpy(tkvi_slot_bytes(pool, to, to_slot), tkvi_slot_bytes(pool, sparse, s), c->slot_bytes);
        tkvi_wipe_slot(pool, sparse, s);
        b->page = to;
        b->slot = (uint16_t)to_slot;
        pool->used_slots[size_class]--; /* tkvi_take_slot counted the moved block again */
    }
    p->taken = 0;
    p->used = 0;
    tkvi_free_page(pool, sparse);
}

static void tkvi_give_slot(tkvi_pool *pool, uint32_t page, int slot) {
    int size_class = pool->page[page].size_class;
    const tkvi_class *c = &pool->tables->size_class[size_class];
    tkvi_clear_slot(pool, page, slot);
    /* Only now can the free slots fill a whole page. If this page itself became free, no free slot is left. */
    if (pool->used_slots[size_class] % c->slots == 0) tkvi_compact(pool, size_class);
}

/* >>blocks and entries */
/* Takes a number for a new block, which entry `holder` holds alone. There is a free number: no block is without entry,
 * and this entry holds none or shared one. */
static uint32_t tkvi_new_number(tkvi_pool *pool, uint32_t holder, int layout, int first_position) {
    const uint32_t id = pool->free_block;
    tkvi_block *b = &pool->block[id];
    tkvi_entry *e = &pool->entry[holder];
    TKVI_ASSERT(id != TKVI_NIL);
    pool->free_block = b->page;
    b->refs = 1;
    b->layout = (uint16_t)layout;
    b->first_position = first_position;
    b->previous_layout = 0;
    b->copy_layout = 0;
    b->tier = e->tier;
    b->n_shared_slots = 0;
    pool->n_blocks++;
    e->block = id;
    e->next_holder = holder;
    e->is_first = 1;
    return id;
}

/* Takes a number and a slot for a new block, which entry `holder` holds alone. */
static void tkvi_new_block(tkvi_pool *pool, uint32_t holder, int layout, int first_position) {
    const uint32_t id = tkvi_new_number(pool, holder, layout, first_position);
    uint32_t page;
    int slot;
    tkvi_take_slot(pool, pool->tables->layout[layout].size_class, id, &page, &slot);
    pool->block[id].page = page;
    pool->block[id].slot = (uint16_t)slot;
}

static uint32_t tkvi_take_entry(tkvi_pool *pool) {
    const uint32_t id = pool->free_entry;
    TKVI_ASSERT(id != TKVI_NIL);
    pool->free_entry = pool->entry[id].block;
    pool->entry[id].in_use = 1;
    pool->n_entries++;
    return id;
}

/* Makes an entry of the hot tier with a new block. */
static uint32_t tkvi_new_entry(tkvi_pool *pool, int layout, int start, int shift) {
    const uint32_t id = tkvi_take_entry(pool);
    tkvi_entry *e = &pool->entry[id];
    e->start = start;
    e->evicted_mask = e->sink_mask = 0;
    e->shift = shift;
    e->turned = 0;
    e->n_packed = 0;
    e->first_slot = e->end_slot = 0;
    e->tier = TKV_TIER_HOT;
    e->has_anchors = 0;
    tkvi_new_block(pool, id, layout, start + shift);
    if (TKVI_HAS_EVICT && pool->token_meta) memset(&pool->token_meta[id], 0, sizeof *pool->token_meta);
    return id;
}

/* Makes an entry that holds the block of another one, and sees the same tokens. n_tokens: slots that `from` sees. */
static uint32_t tkvi_share_entry(tkvi_pool *pool, uint32_t from, int n_tokens) {
    const uint32_t id = tkvi_take_entry(pool);
    tkvi_entry *e = &pool->entry[from];
    tkvi_block *b = &pool->block[e->block];
    if (b->refs++ == 1) b->n_shared_slots = (uint8_t)n_tokens;
    pool->entry[id] = *e;
    pool->entry[id].is_first = 0;
    e->next_holder = id;
    if (TKVI_HAS_EVICT && pool->token_meta) pool->token_meta[id] = pool->token_meta[from];
    return id;
}

/* Bits of the slots with named sinks of an entry. */
static uint64_t tkvi_sink_mask(const tkvi_pool *pool, uint32_t id) {
    return TKVI_HAS_EVICT ? pool->entry[id].sink_mask : 0;
}

/* 1 if the block of an entry has named sinks, of any holder. Then it is not coded again. */
static int tkvi_has_named_sinks(const tkvi_pool *pool, uint32_t id) {
    uint64_t sinks = tkvi_sink_mask(pool, id);
    uint32_t i = pool->entry[id].next_holder;
    for (; i != id; i = pool->entry[i].next_holder) sinks |= tkvi_sink_mask(pool, i);
    return sinks != 0;
}

/* The hottest tier among the holders of an entry's block. tier: that of the entry itself. */
static tkv_tier tkvi_hottest_tier(const tkvi_pool *pool, uint32_t id, tkv_tier tier) {
    uint32_t i = pool->entry[id].next_holder;
    if (tkvi_has_named_sinks(pool, id)) return TKV_TIER_HOT;
    for (; i != id; i = pool->entry[i].next_holder)
        if (pool->entry[i].tier < (int)tier) tier = (tkv_tier)pool->entry[i].tier;
    return tier;
}

/* The tier that the block of an entry should be coded for. */
static tkv_tier tkvi_tier_for_all(const tkvi_pool *pool, uint32_t id) {
    return tkvi_hottest_tier(pool, id, (tkv_tier)pool->entry[id].tier);
}

/* 1 if the block of an entry was coded for a tier that no holder has it in any more: the last one that had it there
 * left. The next append of any holder's layer codes it again (reclaim/age.h). */
static int tkvi_is_late(const tkvi_pool *pool, uint32_t id) {
    return pool->block[pool->entry[id].block].tier < (int)tkvi_tier_for_all(pool, id);
}

/* Sets the named sinks of an entry. */
static void tkvi_set_sink_mask(tkvi_pool *pool, uint32_t id, uint64_t mask) {
    if (!TKVI_HAS_EVICT || pool->entry[id].sink_mask == mask) return;
    pool->n_late -= (uint32_t)(pool->n_late && tkvi_is_late(pool, id));
    pool->entry[id].sink_mask = mask;
    pool->n_late += (uint32_t)tkvi_is_late(pool, id);
}

/* Moves a block that one list holds to a slot of another layout. `write` computes the new bytes from the old ones. */
typedef void (*tkvi_rewrite)(void *ctx, const uint8_t *from, uint8_t *to);

static void tkvi_recode_block(tkvi_pool *pool, uint32_t id, int layout, tkvi_rewrite write, void *ctx) {
    tkvi_block *b = &pool->block[id];
    uint32_t page, old_page = b->page;
    int slot, old_slot = b->slot;
    tkvi_take_slot(pool, pool->tables->layout[layout].size_class, id, &page, &slot);
    write(ctx, tkvi_slot_bytes(pool, old_page, old_slot), tkvi_slot_bytes(pool, page, slot));
    b->page = page;
    b->slot = (uint16_t)slot;
    b->layout = (uint16_t)layout;
    tkvi_give_slot(pool, old_page, old_slot);
}

/* >>offloaded blocks. The store has a block under key 2 * number, and its exact copy under 2 * number + 1. */
typedef enum tkvi_stored_as { TKVI_ITSELF = 0, TKVI_COPY = 1 } tkvi_stored_as;

static int tkvi_is_offloaded(const tkvi_block *b) {
    return TKVI_HAS_BLOCKS_OUTSIDE_RAM && (b->page & TKVI_OFFLOADED) != 0;
}

/* Discarded: the store has no bytes of it either, and the caller's model must recompute them. */
static int tkvi_is_discarded(const tkvi_block *b) { return TKVI_HAS_DISCARD && b->page == TKVI_NIL; }

/* The mark of the stored block or copy; part of its checksum's seed (reclaim/offload.h). */
static uint64_t tkvi_mark_of(const tkvi_block *b, tkvi_stored_as what) {
    return what == TKVI_COPY ? b->copy_mark : (uint64_t)(b->page & ~TKVI_OFFLOADED) << 16 | b->slot;
}

static uint32_t tkvi_store_key(uint32_t id, tkvi_stored_as what) { return 2 * id + (uint32_t)what; }

static void tkvi_erase_key(const tkvi_pool *pool, uint32_t id, tkvi_stored_as what) {
    const tkv_offload_config *s = &pool->tables->cfg.offload;
    if (TKVI_HAS_OFFLOAD && s->erase) s->erase(s->user, tkvi_store_key(id, what));
}

/* 1 if the block or its exact copy lies in attached bytes. */
static int tkvi_is_attached(const tkvi_pool *pool, uint32_t id, tkvi_stored_as what) {
    return TKVI_HAS_ATTACH && pool->source && pool->source[id].file && pool->source[id].what == (uint8_t)what;
}

/* A block does not need its attached bytes any more. The last one gives them back to the caller. */
static void tkvi_forget_source(tkvi_pool *pool, uint32_t id) {
    tkvi_source_place *source = &pool->source[id];
    tkvi_attached *file = &pool->attached[source->file - 1];
    const tkvi_attached was = *file;
    memset(source, 0, sizeof *source);
    if (--file->n_sources) return;
    memset(file, 0, sizeof *file);
    if (was.release) was.release(was.user, was.bytes, was.size);
}

/* Erases the exact copy in the store. Needed when tokens of the block move to other slots, or the block dies. */
static void tkvi_forget_copy(tkvi_pool *pool, uint32_t id) {
    if (TKVI_HAS_OFFLOAD && pool->block[id].copy_layout) {
        if (tkvi_is_attached(pool, id, TKVI_COPY)) tkvi_forget_source(pool, id);
        else tkvi_erase_key(pool, id, TKVI_COPY);
    }
    pool->block[id].copy_layout = 0;
}

/* Erases an offloaded block in the store and updates the counts. Needed when it is in RAM again, or dies. */
static void tkvi_forget_offloaded(tkvi_pool *pool, uint32_t id) {
    if (tkvi_is_discarded(&pool->block[id])) pool->n_discarded--;
    else if (tkvi_is_attached(pool, id, TKVI_ITSELF)) tkvi_forget_source(pool, id);
    else tkvi_erase_key(pool, id, TKVI_ITSELF);
    pool->n_offloaded--;
}

/* Ends the hold of an entry on its block. The last holder frees it. */
static void tkvi_leave_block(tkvi_pool *pool, uint32_t id) {
    tkvi_entry *e = &pool->entry[id];
    const uint32_t number = e->block;
    tkvi_block *b = &pool->block[number];
    uint32_t before = id;
    pool->n_late -= (uint32_t)(pool->n_late && tkvi_is_late(pool, id));
    if (--b->refs) {
        while (pool->entry[before].next_holder != id) before = pool->entry[before].next_holder;
        pool->entry[before].next_holder = e->next_holder;
        pool->entry[before].is_first |= e->is_first;
        pool->n_late += (uint32_t)tkvi_is_late(pool, before);
        return;
    }
    if (tkvi_is_offloaded(b)) tkvi_forget_offloaded(pool, number);
    else tkvi_give_slot(pool, b->page, b->slot);
    tkvi_forget_copy(pool, number);
    b->page = pool->free_block;
    pool->free_block = number;
    pool->n_blocks--;
}

static void tkvi_release_entry(tkvi_pool *pool, uint32_t id) {
    tkvi_entry *e = &pool->entry[id];
    tkvi_leave_block(pool, id);
    e->in_use = 0;
    e->block = pool->free_entry;
    pool->free_entry = id;
    pool->n_entries--;
}

/* >>memory for blocks to come */
/* Slots and block entries that a call will take, beyond those in use and reserved. A class that it gives back before
 * it takes others counts below 0. */
typedef struct tkvi_demand {
    int64_t slots[TKVI_MAX_LAYOUTS]; /* [n_classes] */
    int64_t entries;
    size_t bytes; /* other memory: of states (step/states.h) */
} tkvi_demand;

static tkvi_demand tkvi_no_demand(void) {
    tkvi_demand none;
    memset(&none, 0, sizeof none);
    return none;
}

/* Adds n new blocks of a layout. n < 0: that many blocks are freed before. */
static void tkvi_demand_blocks(const tkvi_pool *pool, int layout, int n, tkvi_demand *demand) {
    demand->slots[pool->tables->layout[layout].size_class] += n;
    demand->entries += n;
}

/* Pages that the pool must hold to serve a demand: those in use and reserved afterwards, and recode_pages. */
static int64_t tkvi_pages_for_demand(const tkvi_pool *pool, const tkvi_demand *demand) {
    int64_t pages = pool->recode_pages;
    int c;
    for (c = 0; c < pool->tables->n_classes; c++) {
        const int64_t slots = pool->used_slots[c] + pool->reserved_slots[c] + demand->slots[c];
        if (slots > 0) pages += tkvi_pages_for(&pool->tables->size_class[c], slots);
    }
    return pages;
}

/* Block entries that the pool must hold to serve a demand. */
static int64_t tkvi_entries_for_demand(const tkvi_pool *pool, const tkvi_demand *demand) {
    int64_t entries = (int64_t)pool->n_entries + demand->entries;
    int c;
    for (c = 0; c < pool->tables->n_classes; c++) entries += pool->reserved_slots[c];
    return entries;
}

/* Allocates what a demand needs. Returns 0 without memory or page allowance. Then no block has changed. */
static int tkvi_provide(tkvi_pool *pool, const tkvi_demand *demand) {
    const int64_t pages = tkvi_pages_for_demand(pool, demand),
                  entries = tkvi_entries_for_demand(pool, demand);
    if (entries > (int64_t)0x7fffffff) return 0;
    if (pool->max_pages && pages > pool->max_pages) return 0;
    if (entries > 0 && !tkvi_grow_blocks(pool, (uint32_t)entries)) return 0;
    while ((int64_t)pool->n_pages < pages)
        if (!tkvi_add_page(pool)) {
            tkvi_trim(pool);
            return 0;
        }
    return 1;
}

/* Free pages that may be used. In place the others are beyond a smaller budget. */
static int64_t tkvi_n_usable_pages(const tkvi_pool *pool) {
    const int64_t n_beyond = pool->max_pages ? (int64_t)pool->n_pages - pool->max_pages : 0;
    return (int64_t)pool->n_free_pages - n_beyond;
}

/* 1 if a block can take a slot of this class now, so that reservations keep their pages. recode_pages count as free. */
static int tkvi_has_slot(const tkvi_pool *pool, int size_class) {
    const tkvi_class *c = &pool->tables->size_class[size_class];
    const int64_t slots = pool->used_slots[size_class] + pool->reserved_slots[size_class];
    const int64_t n_opened = tkvi_pages_for(c, slots + 1) - tkvi_pages_for(c, slots);
    return tkvi_n_usable_pages(pool) - tkvi_reserved_pages(pool) >= n_opened;
}

/* Makes tkvi_has_slot true. Returns 0 without memory or page allowance. */
static int tkvi_provide_slot(tkvi_pool *pool, int size_class) {
    if (tkvi_has_slot(pool, size_class)) return 1;
    return !(pool->max_pages && (int64_t)pool->n_pages >= pool->max_pages) && tkvi_add_page(pool);
}

#endif /* TKVI_CACHE_POOL_H */
