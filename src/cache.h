/*
 * cache.h - the cache itself: what it consists of, how it is made from an allocator or inside the caller's
 * memory, how it ends. May call pool and below.
 *
 * Memory of a cache: one fixed piece (this struct, tables, sequences, scratch), the block table, the page
 * table, one array of block lists per sequence, and pages. Only the last four grow. In place the same calls
 * are served from the caller's memory, at their largest sizes, before the first token.
 */
#ifndef TKVI_CACHE_H
#define TKVI_CACHE_H

#include "pool.h"

/* Blocks of one layer of one sequence, oldest first: [sinks][archive][warm][hot]. Block i holds the tokens
 * from its start to the next one's. */
typedef struct tkvi_list {
    int n;                    /* blocks */
    int sinks, archive, warm; /* how many of them are of each tier; the rest is hot */
    int len;                  /* tokens ever appended */
    int dropped;              /* of them, the first ones are gone (windows) */
    int step_len;             /* len when the open step began */
} tkvi_list;

typedef struct tkvi_seq {
    uint32_t *block; /* [n_layers][cap] block numbers */
    uint32_t cap;
    int in_step;
    int reserved_len; /* 0, or the length up to which memory is promised */
} tkvi_seq;

/* Parallel attention keeps partial results here; the first caller gets it, others run serially (same bits). */
#define TKVI_MAX_CHUNKS 16 /* of a key range, per KV head */
#define TKVI_MAX_PARTS 128 /* chunks in flight */

struct tkv_cache {
    tkvi_tables tables;
    const tkvi_kernels *kernels;
    tkvi_heap heap;
    tkvi_arena arena;
    tkvi_pool pool;
    tkvi_seq *seq;      /* [max_seqs] */
    tkvi_list *list;    /* [max_seqs][n_layers] */
    int64_t *promised;  /* [max_seqs][n_classes] slots reserved by each sequence */
    int64_t *peak_live; /* [2][n_classes] work space of tkvi_peak */
    float *recode;      /* [64][head_dim], [64][v_head_dim] decoded values on their way to another tier */
    float *parts;       /* partial results of parallel attention, or NULL */
    int parts_taken;
    size_t fixed_bytes, table_bytes, scratch_bytes; /* of the fixed piece */
    char error[160];
};

static tkvi_list *tkvi_list_of(const tkv_cache *kv, int seq, int layer) {
    return kv->list + (size_t)seq * (size_t)kv->tables.cfg.n_layers + (size_t)layer;
}

static uint32_t *tkvi_ids(const tkv_cache *kv, int seq, int layer) {
    const tkvi_seq *s = &kv->seq[seq];
    return s->block ? s->block + (size_t)layer * s->cap : NULL;
}

static int tkvi_block_start(const tkv_cache *kv, const uint32_t *ids, int i) {
    return kv->pool.block[ids[i]].start;
}

/* End position of block i: where the next one starts, or the length. */
static int tkvi_block_end(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return i + 1 < list->n ? tkvi_block_start(kv, ids, i + 1) : list->len;
}

/* Tokens that left every window stay this long, so that a cut of the hot tail finds them. */
static int tkvi_drop_margin(const tkvi_plan *p) { return p->hot == TKVI_FOREVER ? TKVI_BLOCK : p->hot; }

static tkv_tier tkvi_tier_at(const tkvi_list *list, int i) {
    if (i < list->sinks) return TKV_HOT;
    if (i < list->sinks + list->archive) return TKV_ARCHIVE;
    return i < list->sinks + list->archive + list->warm ? TKV_WARM : TKV_HOT;
}

/* >>errors of mutating calls: status and sentence */
static tkv_status tkvi_ok(tkv_cache *kv) {
    kv->error[0] = 0;
    return TKV_OK;
}

static tkv_status tkvi_fail(tkv_cache *kv, tkv_status st, const char *what, int64_t number,
                            const char *more) {
    tkvi_text t = tkvi_text_begin(kv->error, sizeof kv->error);
    tkvi_say(&t, what);
    if (more) {
        tkvi_say(&t, " ");
        tkvi_say_int(&t, number);
        tkvi_say(&t, more);
    }
    return st;
}

/* >>sizes of the fixed piece */
typedef struct tkvi_sizes {
    size_t cache, tables, seqs, lists, counts, recode, parts; /* each rounded up to 64 */
    size_t total;
} tkvi_sizes;

static int tkvi_fixed_sizes(const tkvi_shape *h, tkvi_sizes *s) {
    size_t seqs = (size_t)h->cfg.max_seqs, n;
    int k_pad = tkvi_round_up(h->cfg.head_dim, 16), v_pad = tkvi_round_up(h->cfg.v_head_dim, 16);
    memset(s, 0, sizeof *s);
    s->cache = tkvi_align_up(sizeof(tkv_cache));
    s->tables = tkvi_align_up(tkvi_tables_bytes(h));
    if (!tkvi_mul(seqs, sizeof(tkvi_seq), &n)) return 0;
    s->seqs = tkvi_align_up(n);
    if (!tkvi_mul(seqs, (size_t)h->cfg.n_layers, &n) || !tkvi_mul(n, sizeof(tkvi_list), &n)) return 0;
    s->lists = tkvi_align_up(n);
    if (!tkvi_mul(seqs + 5, (size_t)h->n_classes * sizeof(int64_t), &n)) return 0;
    s->counts = tkvi_align_up(n);
    s->recode = tkvi_align_up((size_t)((k_pad + v_pad) * TKVI_BLOCK) * sizeof(float));
    if (h->cfg.parallel_for)
        s->parts = tkvi_align_up((size_t)(TKVI_MAX_PARTS * TKVI_ROWS * (v_pad + 2)) * sizeof(float));
    s->total = s->cache;
    return tkvi_add(s->total, s->tables, &s->total) && tkvi_add(s->total, s->seqs, &s->total) &&
           tkvi_add(s->total, s->lists, &s->total) && tkvi_add(s->total, s->counts, &s->total) &&
           tkvi_add(s->total, s->recode, &s->total) && tkvi_add(s->total, s->parts, &s->total);
}

/* Builds an empty cache in one fixed piece from the heap. */
static tkv_status tkvi_build(tkvi_shape *h, const tkvi_heap *from, tkv_cache **out) {
    tkvi_heap heap = *from;
    tkvi_sizes s;
    uint8_t *at;
    tkv_cache *kv;
    int c;
    size_t classes = (size_t)h->n_classes;
    const tkvi_kernels *kernels = tkvi_kernels_for(h->cfg.isa);
    if (!kernels) return TKV_ERR_ISA;
    if (!tkvi_fixed_sizes(h, &s)) return TKV_ERR_CONFIG;
    at = (uint8_t *)tkvi_get(&heap, s.total);
    if (!at) return TKV_ERR_NOMEM;
    memset(at, 0, s.total - s.recode - s.parts);
    kv = (tkv_cache *)(void *)at;
    at += s.cache;
    tkvi_tables_build(&kv->tables, h, at);
    at += s.tables;
    kv->seq = (tkvi_seq *)(void *)at;
    at += s.seqs;
    kv->list = (tkvi_list *)(void *)at;
    at += s.lists;
    kv->promised = (int64_t *)(void *)at;
    kv->peak_live = kv->promised + (size_t)h->cfg.max_seqs * classes;
    kv->pool.live = kv->peak_live + 2 * classes;
    kv->pool.promised = kv->pool.live + classes;
    kv->pool.room = (uint32_t *)(void *)(kv->pool.promised + classes);
    at += s.counts;
    kv->recode = (float *)(void *)at;
    at += s.recode;
    kv->parts = s.parts ? (float *)(void *)at : NULL;
    kv->kernels = kernels;
    kv->fixed_bytes = s.total;
    kv->table_bytes = s.tables;
    kv->scratch_bytes = s.recode + s.parts;
    kv->heap = heap;
    kv->pool.heap = &kv->heap;
    kv->pool.tables = &kv->tables;
    kv->pool.free_page = kv->pool.free_block = TKVI_NIL;
    for (c = 0; c < h->n_classes; c++) kv->pool.room[c] = TKVI_NIL;
    *out = kv;
    return TKV_OK;
}

TKV_API tkv_status tkv_create(const tkv_config *cfg, tkv_cache **out) {
    tkvi_heap heap;
    tkvi_shape shape;
    tkv_status st = tkvi_validate(cfg, &shape, NULL, 0);
    if (!out) return TKV_ERR_ARG;
    if (st) return st;
    memset(&heap, 0, sizeof heap);
    heap.from = cfg->allocator;
#ifndef TKV_NO_MALLOC
    if (!heap.from.alloc) {
        heap.from.alloc = tkvi_malloc;
        heap.from.release = tkvi_mfree;
    }
#endif
    if (!heap.from.alloc) return TKV_ERR_CONFIG;
    return tkvi_build(&shape, &heap, out);
}

TKV_API void tkv_destroy(tkv_cache *kv) {
    tkvi_heap heap;
    uint32_t i;
    int s;
    if (!kv) return;
    for (i = 0; i < kv->pool.n_pages; i++) tkvi_put(&kv->heap, kv->pool.page[i].bytes, kv->tables.page_bytes);
    tkvi_put(&kv->heap, kv->pool.page, kv->pool.page_cap * sizeof(tkvi_page));
    tkvi_put(&kv->heap, kv->pool.block, kv->pool.block_cap * sizeof(tkvi_block));
    for (s = 0; s < kv->tables.cfg.max_seqs; s++)
        tkvi_put(&kv->heap, kv->seq[s].block,
                 (size_t)kv->seq[s].cap * (size_t)kv->tables.cfg.n_layers * sizeof(uint32_t));
    heap = kv->heap; /* the cache stands in the last piece */
    if (!kv->pool.keep_all) tkvi_put(&heap, kv, kv->fixed_bytes);
}

/* >>block lists of a sequence: room for `want` blocks per layer */
static uint32_t tkvi_list_cap(uint32_t had, uint32_t want) {
    uint32_t cap = had ? had : 16;
    while (cap < want) cap *= 2;
    return cap;
}

static int tkvi_grow_lists(tkv_cache *kv, int seq, int want) {
    tkvi_seq *s = &kv->seq[seq];
    uint32_t cap = tkvi_list_cap(s->cap, (uint32_t)want), *bigger;
    size_t layers = (size_t)kv->tables.cfg.n_layers, bytes;
    size_t l;
    if (cap == s->cap) return 1;
    if (!tkvi_mul(layers * sizeof(uint32_t), cap, &bytes)) return 0;
    bigger = (uint32_t *)tkvi_get(&kv->heap, bytes);
    if (!bigger) return 0;
    memset(bigger, 0, bytes);
    for (l = 0; l < layers && s->block; l++)
        memcpy(bigger + l * cap, s->block + l * s->cap, s->cap * sizeof(uint32_t));
    tkvi_put(&kv->heap, s->block, layers * s->cap * sizeof(uint32_t));
    s->block = bigger;
    s->cap = cap;
    return 1;
}

/* >>in place: everything at its largest, at once */
/* Most blocks of each tier that one layer of one sequence can hold at max_tokens, sinks apart, if none was
 * flushed short. */
static void tkvi_most_blocks(const tkv_config *cfg, const tkvi_plan *p, int64_t *most) {
    int64_t tokens = cfg->max_tokens - p->sink, all, tier;
    if (tokens < 0) tokens = 0;
    all = (tokens + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_HOT] = ((int64_t)p->hot + TKVI_BLOCK - 1 + cfg->max_append + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_WARM] = ((int64_t)p->warm + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_ARCHIVE] = (tokens - p->warm) / TKVI_BLOCK; /* hot tokens can be flushed */
    if (p->keep && most[TKV_ARCHIVE] > ((int64_t)p->keep + tkvi_drop_margin(p)) / TKVI_BLOCK + 2)
        most[TKV_ARCHIVE] = ((int64_t)p->keep + tkvi_drop_margin(p)) / TKVI_BLOCK + 2;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        if (most[tier] < 0 || (p->hot == TKVI_FOREVER && tier != TKV_HOT)) most[tier] = 0;
        if (most[tier] > all) most[tier] = all;
    }
}

static uint32_t tkvi_cap_for(int64_t n) {
    uint32_t cap = 16;
    while ((int64_t)cap < n) cap *= 2;
    return cap;
}

typedef struct tkvi_most {
    uint32_t page_cap, block_cap, list_cap;
    int64_t pages;
    size_t bytes; /* of everything, each piece at a multiple of 64 */
} tkvi_most;

static tkv_status tkvi_most_of(tkvi_shape *h, tkvi_most *m) {
    int64_t live[TKVI_MAX_CODINGS], most[TKV_TIER_COUNT], blocks = 0;
    tkvi_sizes fixed;
    size_t pages, n;
    int i, c, tier;
    memset(m, 0, sizeof *m);
    memset(live, 0, sizeof live);
    if (!tkvi_fixed_sizes(h, &fixed)) return TKV_ERR_CONFIG;
    for (i = 0; i < h->cfg.n_layers; i++) {
        tkvi_plan p;
        (void)tkvi_plan_of(h, i, &p);
        if (p.stored != i) continue;
        tkvi_most_blocks(&h->cfg, &p, most);
        if (p.sink) live[h->class_of[p.sink_coding]]++;
        for (tier = 0; tier < TKV_TIER_COUNT; tier++) live[h->class_of[p.coding[tier]]] += most[tier];
    }
    for (c = 0; c < h->n_classes; c++) {
        live[c] *= h->cfg.max_seqs;
        blocks += live[c];
        m->pages += tkvi_pages_for(&h->size_class[c], live[c] + 1); /* one more while a block is recoded */
    }
    if (blocks > 0x3fffffff || m->pages > 0x3fffffff) return TKV_ERR_CONFIG;
    m->page_cap = tkvi_cap_for(m->pages);
    m->block_cap = tkvi_cap_for(blocks + h->n_classes);
    m->list_cap = tkvi_cap_for(h->cfg.max_tokens / TKVI_BLOCK + 4);
    if (!tkvi_mul((size_t)m->list_cap * sizeof(uint32_t), (size_t)h->cfg.n_layers, &n) ||
        !tkvi_mul(tkvi_align_up(n), (size_t)h->cfg.max_seqs, &n) ||
        !tkvi_mul((size_t)m->pages, h->page_bytes, &pages) || !tkvi_add(n, fixed.total, &m->bytes) ||
        !tkvi_add(pages, m->bytes, &m->bytes) ||
        !tkvi_add(tkvi_align_up(m->page_cap * sizeof(tkvi_page)), m->bytes, &m->bytes) ||
        !tkvi_add(tkvi_align_up(m->block_cap * sizeof(tkvi_block)) + TKVI_ALIGN, m->bytes, &m->bytes))
        return TKV_ERR_CONFIG;
    return TKV_OK;
}

static tkv_status tkvi_in_place_shape(const tkv_config *cfg, tkvi_shape *h, tkvi_most *m) {
    tkv_status st = tkvi_validate(cfg, h, NULL, 0);
    if (!st && cfg->max_tokens == 0) st = TKV_ERR_CONFIG;
    if (!st) st = tkvi_most_of(h, m);
    return st;
}

TKV_API tkv_status tkv_required_bytes(const tkv_config *cfg, size_t *bytes) {
    tkvi_shape h;
    tkvi_most m;
    tkv_status st = tkvi_in_place_shape(cfg, &h, &m);
    if (!bytes) return TKV_ERR_ARG;
    if (!st) *bytes = m.bytes;
    return st;
}

TKV_API tkv_status tkv_init_in_place(const tkv_config *cfg, void *mem, size_t bytes, tkv_cache **out) {
    tkvi_shape h;
    tkvi_most m;
    tkvi_heap heap;
    tkvi_arena arena;
    tkv_cache *kv;
    size_t skip = (TKVI_ALIGN - (size_t)((uintptr_t)mem & (TKVI_ALIGN - 1u))) & (TKVI_ALIGN - 1u);
    tkv_status st = tkvi_in_place_shape(cfg, &h, &m);
    int i;
    if (!out || !mem) return TKV_ERR_ARG;
    if (st) return st;
    if (bytes < m.bytes) return TKV_ERR_CAPACITY;
    memset(&arena, 0, sizeof arena);
    arena.base = (uint8_t *)mem + skip;
    arena.size = bytes - skip;
    memset(&heap, 0, sizeof heap);
    heap.from.user = &arena;
    heap.from.alloc = tkvi_arena_alloc;
    heap.from.release = tkvi_arena_release;
    st = tkvi_build(&h, &heap, &kv);
    if (st) return st;
    kv->arena = arena;
    kv->heap.from.user = &kv->arena;
    kv->pool.keep_all = 1;
    /* None of these can fail: tkvi_most_of added up the same pieces. */
    if (!tkvi_grow_blocks(&kv->pool, m.block_cap)) return TKV_ERR_CAPACITY;
    for (i = 0; i < h.cfg.max_seqs; i++)
        if (!tkvi_grow_lists(kv, i, (int)m.list_cap)) return TKV_ERR_CAPACITY;
    if (!tkvi_grow_pages(&kv->pool, m.page_cap)) return TKV_ERR_CAPACITY;
    while ((int64_t)kv->pool.n_pages < m.pages)
        if (!tkvi_add_page(&kv->pool)) return TKV_ERR_CAPACITY;
    kv->arena.closed = 1;
    *out = kv;
    return TKV_OK;
}

#endif /* TKVI_CACHE_H */
