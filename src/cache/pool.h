/*
 * cache/pool.h - where blocks live: pages cut into slots, and the block table on top.
 *
 * All pages have one size; a page in use serves one size class (slots of one block size). Free slots of a
 * class never add up to a whole page: when they would, the sparsest page is emptied into the others (only
 * the writer moves blocks, readers are not running then) and is free for any class or goes back to the
 * allocator. So the pages in use are exactly sum over classes of ceil(blocks / slots), whatever the history:
 * blocks of different sizes cannot fragment the memory, an arena's neither, and what an operation will
 * need can be computed before it changes anything (tkvi_peak_*).
 *
 * Blocks are reference-counted and known by number; their bytes may move. May call plan and below.
 */
#ifndef TKVI_CACHE_POOL_H
#define TKVI_CACHE_POOL_H

#include "cache/plan.h"

#define TKVI_NIL 0xffffffffu
#define TKVI_OUTSIDE 0x80000000u /* a bit of a block's page; no pool has so many */

typedef struct tkvi_page {
    uint8_t *bytes;
    uint64_t taken;         /* bit per slot */
    uint32_t owner[64];     /* block in each slot */
    uint32_t before, after; /* in the list of its class's pages with room, or (after only) of free pages */
    int size_class;         /* -1: free */
    int used;
} tkvi_page;

typedef struct tkvi_block {
    uint32_t refs; /* lists that hold it; 0: this entry is free */
    uint32_t page; /* or the next free entry; TKVI_NIL: nobody has it (reclaim/discard.h); */
    uint16_t slot,
        coding;    /* TKVI_OUTSIDE: page and slot have the mark of what was stored (reclaim/offload.h) */
    int start;     /* it covers positions from here to the next block's start */
    uint64_t gone; /* bit per token in it, oldest first: it was dropped */
    int16_t
        packed; /* 0: its tokens are at start, start + 1, ...; else it has so many, at start + notes' where[i] */
    uint16_t
        previous_coding; /* 0, or 1 + the coding between the hot format and this one (step/recompute.h) */
    uint16_t copy;      /* 0, or 1 + the coding of an exact copy outside */
    uint16_t copy_mark; /* of the last one of this number, in whatever life */
} tkvi_block;

/* What is kept of a block's tokens where some may be dropped, or their importance counts. */
typedef struct tkvi_token_meta {
    uint16_t where[64];      /* positions, of a packed block (tkvi_at) */
    uint32_t mass[64];       /* attention that they got, or norms of their keys (reclaim/scores.h) */
    uint64_t pinned;         /* bits: they stay */
    uint64_t temporary_pins; /* bits: they stay while the list is shorter than `until` */
    uint64_t anchored;       /* bits, also in `gone`: exact in the sinks' block, their place here is kept */
    uint64_t chosen; /* bits: they go when it is sure that all may that shall (reclaim/evict_tokens.h) */
    int until;
    int step;  /* when mass was last added to */
    int moved; /* 0, or 1 + the list's length when the block last changed its tier */
} tkvi_token_meta;

typedef struct tkvi_pool {
    tkvi_heap *heap;
    const tkvi_tables *tables;
    int keep_all;            /* in place: pages are never given back */
    int spare;               /* free pages that only recoding may use */
    int64_t kept_free_pages; /* free pages that are not given back: they would be asked for again soon */
    int64_t allowed; /* pages that an operation may come to in place, with the spare ones; 0: all there are */
    tkvi_page *page;
    uint32_t n_pages, page_cap; /* entries in use are 0 .. n_pages-1, each with bytes */
    uint32_t free_page, n_free_pages;
    tkvi_block *block;
    tkvi_token_meta *token_meta;              /* of each block, behind them; NULL: nobody asks for any */
    uint32_t n_blocks, block_cap, free_block; /* n_blocks: live ones */
    uint32_t n_offloaded;                     /* of them, those whose bytes are not in RAM ... */
    uint32_t n_discarded;                     /* ... and of these, those that nobody has */
    uint64_t marks;                           /* what was stored last (reclaim/offload.h): 47 bits */
    uint32_t *room;                           /* per class: first page with room */
    int64_t *live;                            /* per class: blocks */
    int64_t *promised;                        /* per class: slots that tkv_reserve holds, all sequences */
} tkvi_pool;

/* >>pages needed for given numbers of blocks */
static int64_t tkvi_pages_for(const tkvi_class *c, int64_t blocks) {
    return (blocks + c->slots - 1) / c->slots;
}

static void tkvi_link_room(tkvi_pool *pool, uint32_t i) {
    tkvi_page *p = &pool->page[i];
    uint32_t *head = &pool->room[p->size_class];
    p->before = TKVI_NIL;
    p->after = *head;
    if (*head != TKVI_NIL) pool->page[*head].before = i;
    *head = i;
}

static void tkvi_unlink_room(tkvi_pool *pool, uint32_t i) {
    tkvi_page *p = &pool->page[i];
    if (p->before != TKVI_NIL) pool->page[p->before].after = p->after;
    else pool->room[p->size_class] = p->after;
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

/* >>growth. Each gets the memory first and changes the pool only when it has it. */
/* Entries of a table that must hold `want`: a quarter more each time, so that it is never far from full. */
static uint32_t tkvi_cap_for(int64_t want) {
    uint32_t cap = 16;
    while ((int64_t)cap < want) cap += cap / 4;
    return cap;
}

static int tkvi_keeps_token_meta(const tkv_config *cfg) {
    return cfg->evict.kind != TKV_EVICT_NONE || cfg->importance_every > 0 || cfg->n_anchors > 0;
}

/* Bytes of an entry of the block table, its notes included. */
static size_t tkvi_block_entry(const tkv_config *cfg) {
    return sizeof(tkvi_block) + (tkvi_keeps_token_meta(cfg) ? sizeof(tkvi_token_meta) : 0);
}

static int tkvi_grow_blocks(tkvi_pool *pool, uint32_t want) {
    const size_t entry = tkvi_block_entry(&pool->tables->cfg);
    const uint32_t had = pool->block_cap, cap = tkvi_cap_for(want);
    uint32_t i;
    size_t bytes;
    uint8_t *bigger;
    if (want <= had) return 1;
    if (!tkvi_mul(cap, entry, &bytes)) return 0;
    bigger = (uint8_t *)tkvi_get(pool->heap, bytes);
    if (!bigger) return 0;
    memset(bigger, 0, bytes);
    if (had) memcpy(bigger, pool->block, had * sizeof(tkvi_block));
    if (had && pool->token_meta)
        memcpy(bigger + cap * sizeof(tkvi_block), pool->token_meta, had * sizeof(tkvi_token_meta));
    tkvi_put(pool->heap, pool->block, had * entry);
    pool->block = (tkvi_block *)(void *)bigger;
    pool->token_meta = tkvi_keeps_token_meta(&pool->tables->cfg)
                           ? (tkvi_token_meta *)(void *)(bigger + cap * sizeof(tkvi_block))
                           : NULL;
    pool->block_cap = cap;
    for (i = cap; i-- > had;) {
        pool->block[i].page = pool->free_block;
        pool->free_block = i;
    }
    return 1;
}

static int tkvi_grow_pages(tkvi_pool *pool, uint32_t want) {
    const uint32_t cap = tkvi_cap_for(want);
    tkvi_page *bigger;
    size_t bytes;
    if (want <= pool->page_cap) return 1;
    if (!tkvi_mul(cap, sizeof *bigger, &bytes)) return 0;
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

/* Pages that reservations will need beside those in use. */
static int64_t tkvi_promised_pages(const tkvi_pool *pool) {
    int64_t pages = 0;
    int c;
    for (c = 0; c < pool->tables->n_classes; c++) {
        const tkvi_class *k = &pool->tables->size_class[c];
        pages += tkvi_pages_for(k, pool->live[c] + pool->promised[c]) - tkvi_pages_for(k, pool->live[c]);
    }
    return pages;
}

/* Free pages beyond what reservations need, and beyond the cushion, go back. The last entry of the page table moves
 * into the hole. */
static void tkvi_trim_to(tkvi_pool *pool, int64_t kept_free_pages) {
    const int64_t keep = pool->spare + kept_free_pages + tkvi_promised_pages(pool);
    if (pool->keep_all) return;
    while ((int64_t)pool->n_free_pages > keep) {
        uint32_t i = pool->free_page, last = pool->n_pages - 1;
        tkvi_page *p = &pool->page[i];
        pool->free_page = p->after;
        pool->n_free_pages--;
        pool->n_pages--;
        tkvi_put(pool->heap, p->bytes, pool->tables->page_bytes);
        if (i == last) continue;
        *p = pool->page[last];
        if (p->size_class < 0) { /* free: find who points to it */
            uint32_t *link = &pool->free_page;
            while (*link != last) link = &pool->page[*link].after;
            *link = i;
        } else {
            int s;
            for (s = 0; s < 64; s++)
                if (p->taken >> s & 1) pool->block[p->owner[s]].page = i;
            if (p->used < pool->tables->size_class[p->size_class].slots) {
                if (p->before != TKVI_NIL) pool->page[p->before].after = i;
                else pool->room[p->size_class] = i;
                if (p->after != TKVI_NIL) pool->page[p->after].before = i;
            }
        }
    }
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

/* A slot of a class for block `owner`. There must be one: tkvi_peak_ready said so. */
static void tkvi_take_slot(tkvi_pool *pool, int size_class, uint32_t owner, uint32_t *page, int *slot) {
    int slots = pool->tables->size_class[size_class].slots, s = 0;
    uint32_t i = pool->room[size_class];
    tkvi_page *p;
    if (i == TKVI_NIL) {
        i = pool->free_page;
        pool->free_page = pool->page[i].after;
        pool->n_free_pages--;
        pool->page[i].size_class = size_class;
        tkvi_link_room(pool, i);
    }
    p = &pool->page[i];
    while (p->taken >> s & 1) s++;
    p->taken |= (uint64_t)1 << s;
    p->owner[s] = owner;
    if (++p->used == slots) tkvi_unlink_room(pool, i);
    pool->live[size_class]++;
    *page = i;
    *slot = s;
}

static void tkvi_clear_slot(tkvi_pool *pool, uint32_t page, int slot) {
    tkvi_page *p = &pool->page[page];
    int size_class = p->size_class;
    if (p->used == pool->tables->size_class[size_class].slots) tkvi_link_room(pool, page);
    p->taken &= ~((uint64_t)1 << slot);
    p->used--;
    pool->live[size_class]--;
    if (p->used == 0) {
        tkvi_unlink_room(pool, page);
        tkvi_free_page(pool, page);
    }
}

/* Empties the sparsest page of a class into the others, if they have room for it. */
static void tkvi_compact(tkvi_pool *pool, int size_class) {
    const tkvi_class *c = &pool->tables->size_class[size_class];
    uint32_t i, sparse = pool->room[size_class];
    int holes = 0, s;
    tkvi_page *p;
    for (i = sparse; i != TKVI_NIL; i = pool->page[i].after) {
        holes += c->slots - pool->page[i].used;
        if (pool->page[i].used < pool->page[sparse].used) sparse = i;
    }
    if (holes < c->slots) return;
    tkvi_unlink_room(pool, sparse); /* take no slots here */
    p = &pool->page[sparse];
    for (s = 0; s < c->slots; s++) {
        tkvi_block *b;
        uint32_t to;
        int to_slot;
        if (!(p->taken >> s & 1)) continue;
        b = &pool->block[p->owner[s]];
        tkvi_take_slot(pool, size_class, p->owner[s], &to, &to_slot);
        memcpy(tkvi_slot_bytes(pool, to, to_slot), tkvi_slot_bytes(pool, sparse, s), c->slot_bytes);
        b->page = to;
        b->slot = (uint16_t)to_slot;
        pool->live[size_class]--; /* moved, not added */
    }
    p->taken = 0;
    p->used = 0;
    tkvi_free_page(pool, sparse);
}

static void tkvi_give_slot(tkvi_pool *pool, uint32_t page, int slot) {
    int size_class = pool->page[page].size_class;
    const tkvi_class *c = &pool->tables->size_class[size_class];
    tkvi_clear_slot(pool, page, slot);
    /* Holes can have reached a page's worth only now; if the page itself emptied, there are none. */
    if (pool->live[size_class] % c->slots == 0) tkvi_compact(pool, size_class);
}

/* >>blocks */
static uint32_t tkvi_new_block(tkvi_pool *pool, int coding, int start) {
    uint32_t id = pool->free_block, page;
    tkvi_block *b = &pool->block[id];
    int slot;
    pool->free_block = b->page;
    tkvi_take_slot(pool, pool->tables->coding[coding].size_class, id, &page, &slot);
    b->refs = 1;
    b->page = page;
    b->slot = (uint16_t)slot;
    b->coding = (uint16_t)coding;
    b->start = start;
    b->gone = 0;
    b->packed = 0;
    b->previous_coding = 0;
    b->copy = 0;
    if (pool->token_meta) memset(&pool->token_meta[id], 0, sizeof *pool->token_meta);
    pool->n_blocks++;
    return id;
}

/* Moves a block that has one holder to another coding: `write` fills the new bytes from the old ones. */
typedef void (*tkvi_rewrite)(void *ctx, const uint8_t *from, uint8_t *to);

static void tkvi_recode_block(tkvi_pool *pool, uint32_t id, int coding, tkvi_rewrite write, void *ctx) {
    tkvi_block *b = &pool->block[id];
    uint32_t page, old_page = b->page;
    int slot, old_slot = b->slot;
    tkvi_take_slot(pool, pool->tables->coding[coding].size_class, id, &page, &slot);
    write(ctx, tkvi_slot_bytes(pool, old_page, old_slot), tkvi_slot_bytes(pool, page, slot));
    b->page = page;
    b->slot = (uint16_t)slot;
    b->coding = (uint16_t)coding;
    tkvi_give_slot(pool, old_page, old_slot);
}

/* >>outside: what the caller's store has of a block, under key 2 * number + this */
typedef enum tkvi_stored_as { TKVI_ITSELF = 0, TKVI_COPY = 1 } tkvi_stored_as;

static int tkvi_is_offloaded(const tkvi_block *b) { return (b->page & TKVI_OUTSIDE) != 0; }

/* Not even outside: a model must compute it again. */
static int tkvi_is_discarded(const tkvi_block *b) { return b->page == TKVI_NIL; }

/* The mark of what was stored of it. */
static uint64_t tkvi_mark_of(const tkvi_block *b, tkvi_stored_as what) {
    return what == TKVI_COPY ? b->copy_mark : (uint64_t)(b->page & ~TKVI_OUTSIDE) << 16 | b->slot;
}

static uint32_t tkvi_store_key(uint32_t id, tkvi_stored_as what) { return 2 * id + (uint32_t)what; }

static void tkvi_erase_key(const tkvi_pool *pool, uint32_t id, tkvi_stored_as what) {
    const tkv_spill_config *s = &pool->tables->cfg.spill;
    if (s->drop) s->drop(s->user, tkvi_store_key(id, what));
}

/* Its tokens are no longer where the exact copy has them, or it dies. */
static void tkvi_forget_copy(tkvi_pool *pool, uint32_t id) {
    if (pool->block[id].copy) tkvi_erase_key(pool, id, TKVI_COPY);
    pool->block[id].copy = 0;
}

/* It is in RAM again, or dies. */
static void tkvi_forget_offloaded(tkvi_pool *pool, uint32_t id) {
    if (tkvi_is_discarded(&pool->block[id])) pool->n_discarded--;
    else tkvi_erase_key(pool, id, TKVI_ITSELF);
    pool->n_offloaded--;
}

static void tkvi_release_block(tkvi_pool *pool, uint32_t id) {
    tkvi_block *b = &pool->block[id];
    if (--b->refs) return;
    if (tkvi_is_offloaded(b)) tkvi_forget_offloaded(pool, id);
    else tkvi_give_slot(pool, b->page, b->slot);
    tkvi_forget_copy(pool, id);
    b->page = pool->free_block;
    pool->free_block = id;
    pool->n_blocks--;
}

/* >>peak: what a series of takes and gives will need at most, before any of it happens */
typedef struct tkvi_peak {
    const tkvi_tables *tables;
    int64_t *live;                   /* [n_classes] slots in use or promised, as the series goes on */
    int64_t most_pages, most_blocks; /* at any moment; a block being recoded counts twice */
    int64_t outside;                 /* blocks without a slot */
} tkvi_peak;

static void tkvi_peak_note(tkvi_peak *k) {
    int64_t pages = 0, blocks = k->outside;
    int c;
    for (c = 0; c < k->tables->n_classes; c++) {
        pages += tkvi_pages_for(&k->tables->size_class[c], k->live[c]);
        blocks += k->live[c];
    }
    if (pages > k->most_pages) k->most_pages = pages;
    if (blocks > k->most_blocks) k->most_blocks = blocks;
}

static void tkvi_peak_take(tkvi_peak *k, int coding) {
    k->live[k->tables->coding[coding].size_class]++;
    tkvi_peak_note(k);
}

static void tkvi_peak_give(tkvi_peak *k, int coding) { k->live[k->tables->coding[coding].size_class]--; }

/* Gets everything that the peak needs, and keeps the spare pages. On failure nothing that a caller can see has
 * changed. */
static int tkvi_peak_ready(tkvi_pool *pool, const tkvi_peak *k) {
    if (k->most_blocks > (int64_t)0x7fffffff) return 0;
    if (pool->allowed && k->most_pages + pool->spare > pool->allowed) return 0;
    if (!tkvi_grow_blocks(pool, (uint32_t)k->most_blocks)) return 0;
    while ((int64_t)pool->n_pages < k->most_pages + pool->spare)
        if (!tkvi_add_page(pool)) {
            tkvi_trim(pool);
            return 0;
        }
    return 1;
}

#endif /* TKVI_CACHE_POOL_H */
