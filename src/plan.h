/*
 * plan.h - from a config to plans: which format and how many tokens each tier of each layer has, how big a
 * block is in each format pair, and in which page and slot sizes blocks are kept. Also: what is wrong with
 * a config, in a sentence. May call kernels (for the ISA) and below.
 */
#ifndef TKVI_PLAN_H
#define TKVI_PLAN_H

#include "dispatch.h"

#define TKVI_FOREVER 0x3fffffff /* a length that no sequence reaches; also the most tokens of a sequence */

/* One KV head of a block: K side, V side, where it begins. */
typedef struct tkvi_record {
    tkvi_side k, v;
    size_t at, v_at; /* byte offset of the record in the block, of its V side in the record */
} tkvi_record;

/* A block's bytes in one pair of formats: the same for every block that names it. */
typedef struct tkvi_coding {
    tkv_pair pair;
    int tokens;          /* room: 64, or the sinks */
    int size_class;      /* into classes */
    size_t block_bytes;  /* all heads */
    tkvi_record *record; /* [n_kv_heads]; heads may differ */
} tkvi_coding;

/* Blocks of one size share pages that are cut into slots of that size. */
typedef struct tkvi_class {
    size_t slot_bytes;
    int slots; /* per page, at most 64 */
} tkvi_class;

typedef struct tkvi_plan {
    int stored; /* layer whose K and V this one reads: its own number, or an earlier one; -1: no cache */
    int sink, hot, warm, window; /* tokens; window 0: none */
    int keep;                    /* widest window of all layers that read this one's blocks; 0: none */
    int sink_coding;
    int coding[TKV_TIER_COUNT];
} tkvi_plan;

/* What can be said of a config without any memory: pairs in use, sizes of blocks, classes, the page. */
#define TKVI_MAX_CODINGS 128

typedef struct tkvi_key {
    tkv_pair pair;
    int tokens;
} tkvi_key;

typedef struct tkvi_shape {
    tkv_config cfg; /* with defaults filled in */
    int n_codings, n_classes;
    tkvi_key key[TKVI_MAX_CODINGS];
    size_t block_bytes[TKVI_MAX_CODINGS];
    int class_of[TKVI_MAX_CODINGS];
    tkvi_class size_class[TKVI_MAX_CODINGS];
    size_t page_bytes;
} tkvi_shape;

/* Everything derived from a config, in the cache's fixed piece. */
typedef struct tkvi_tables {
    tkv_config cfg; /* with defaults filled in; `layers` is not kept */
    int n_codings, n_classes;
    size_t page_bytes;
    tkvi_plan *plan;     /* [n_layers] */
    tkvi_coding *coding; /* [n_codings] */
    tkvi_class *size_class;
} tkvi_tables;

/* >>validate */
static tkv_status tkvi_bad(char *reason, size_t size, const char *field, int64_t value, const char *want) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_say(&t, field);
    tkvi_say(&t, " is ");
    tkvi_say_int(&t, value);
    tkvi_say(&t, "; ");
    tkvi_say(&t, want);
    return TKV_ERR_CONFIG;
}

/* The same for a field of layers[i] (i >= 0). */
static tkv_status tkvi_bad_in(char *reason, size_t size, int layer, const char *field, int64_t value,
                              const char *want) {
    char name[64];
    tkvi_text t = tkvi_text_begin(name, sizeof name);
    if (layer >= 0) {
        tkvi_say(&t, "layers[");
        tkvi_say_int(&t, layer);
        tkvi_say(&t, "].");
    }
    tkvi_say(&t, field);
    return tkvi_bad(reason, size, name, value, want);
}

/* Fields that a layer can override, checked for the cache (layer -1) and for each layer. */
static tkv_status tkvi_validate_tiers(const tkv_layer_config *c, int layer, char *reason, size_t size) {
    static const char *const pair_name[TKV_TIER_COUNT][2] = {
        {"hot.k", "hot.v"}, {"warm.k", "warm.v"}, {"archive.k", "archive.v"}};
    const tkv_pair *pair[TKV_TIER_COUNT];
    int i, side;
    pair[TKV_HOT] = &c->hot;
    pair[TKV_WARM] = &c->warm;
    pair[TKV_ARCHIVE] = &c->archive;
    for (i = 0; i < TKV_TIER_COUNT; i++)
        for (side = 0; side < 2; side++) {
            tkv_format f = side ? pair[i]->v : pair[i]->k;
            if (f != TKV_FORMAT_DEFAULT && !tkvi_format_known(f))
                return tkvi_bad_in(reason, size, layer, pair_name[i][side], (int)f,
                                   "it must be a tkv_format");
            if (i == TKV_HOT && f != TKV_FORMAT_DEFAULT && !tkvi_is_exact(&tkvi_formats[f]))
                return tkvi_bad_in(reason, size, layer, pair_name[i][side], (int)f,
                                   "the hot tier takes TKV_F32, TKV_F16 or TKV_BF16");
        }
    if (c->sink_tokens < TKV_NONE || c->sink_tokens > TKVI_BLOCK)
        return tkvi_bad_in(reason, size, layer, "sink_tokens", c->sink_tokens,
                           "it must be 1 to 64, 0 (default) or TKV_NONE");
    if (c->hot_tokens < TKV_ALL || c->hot_tokens > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, layer, "hot_tokens", c->hot_tokens,
                           "it must be 1 to 2^30 - 1, 0 (default), TKV_NONE or TKV_ALL");
    if (c->warm_tokens < TKV_ALL || c->warm_tokens > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, layer, "warm_tokens", c->warm_tokens,
                           "it must be 1 to 2^30 - 1, 0 (default), TKV_NONE or TKV_ALL");
    if (c->window < TKV_NONE || c->window > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, layer, "window", c->window,
                           "it must be 1 to 2^30 - 1, 0 (default) or TKV_NONE");
    return TKV_OK;
}

static tkv_layer_config tkvi_cache_wide(const tkv_config *cfg) {
    tkv_layer_config c;
    memset(&c, 0, sizeof c);
    c.hot = cfg->hot;
    c.warm = cfg->warm;
    c.archive = cfg->archive;
    c.sink_tokens = cfg->sink_tokens;
    c.hot_tokens = cfg->hot_tokens;
    c.warm_tokens = cfg->warm_tokens;
    c.window = cfg->window;
    return c;
}

static tkv_status tkvi_validate_layers(const tkv_config *cfg, char *reason, size_t size) {
    int i, cached = 0;
    for (i = 0; i < cfg->n_layers; i++) {
        const tkv_layer_config *c = &cfg->layers[i];
        tkv_status st = tkvi_validate_tiers(c, i, reason, size);
        if (st) return st;
        if (c->no_cache != 0 && c->no_cache != 1)
            return tkvi_bad_in(reason, size, i, "no_cache", c->no_cache, "it must be 0 or 1");
        if (c->share_kv < 0 || c->share_kv > i)
            return tkvi_bad_in(reason, size, i, "share_kv", c->share_kv,
                               "it must be 0, or 1 + the index of an earlier layer");
        if (c->share_kv &&
            (c->no_cache || cfg->layers[c->share_kv - 1].no_cache || cfg->layers[c->share_kv - 1].share_kv))
            return tkvi_bad_in(reason, size, i, "share_kv", c->share_kv,
                               "both layers need a cache, and the other one its own");
        cached += !c->no_cache;
    }
    if (!cached)
        return tkvi_bad(reason, size, "layers", cfg->n_layers, "at least one layer must have a cache");
    return TKV_OK;
}

TKV_API tkv_config tkv_config_default(void) {
    tkv_config cfg;
    memset(&cfg, 0, sizeof cfg);
    return cfg;
}

/* >>resolve */
static int tkvi_length(int of_layer, int of_cache, int standard) {
    int n = of_layer ? of_layer : of_cache ? of_cache : standard;
    return n == TKV_NONE ? 0 : n == TKV_ALL ? TKVI_FOREVER : n;
}

static tkv_pair tkvi_pair(tkv_pair of_layer, tkv_pair of_cache, tkv_format standard) {
    tkv_pair p;
    p.k = of_layer.k ? of_layer.k : of_cache.k ? of_cache.k : standard;
    p.v = of_layer.v ? of_layer.v : of_cache.v ? of_cache.v : standard;
    return p;
}

/* One layer's lengths and pairs; `pair` gets hot, warm, archive. */
static tkvi_plan tkvi_resolve(const tkv_config *cfg, int layer, tkv_pair *pair) {
    tkv_layer_config wide = tkvi_cache_wide(cfg), none;
    const tkv_layer_config *c = cfg->layers ? &cfg->layers[layer] : &none;
    tkvi_plan p;
    memset(&p, 0, sizeof p);
    memset(&none, 0, sizeof none);
    p.stored = c->no_cache ? -1 : c->share_kv ? c->share_kv - 1 : layer;
    p.sink = tkvi_length(c->sink_tokens, wide.sink_tokens, 4);
    p.hot = tkvi_length(c->hot_tokens, wide.hot_tokens, 64);
    p.warm = tkvi_length(c->warm_tokens, wide.warm_tokens, 448);
    p.window = tkvi_length(c->window, wide.window, TKV_NONE);
    pair[TKV_HOT] = tkvi_pair(c->hot, wide.hot, TKV_F16);
    pair[TKV_WARM] = tkvi_pair(c->warm, wide.warm, TKV_KIVI4);
    pair[TKV_ARCHIVE] = tkvi_pair(c->archive, wide.archive, TKV_KIVI2);
    return p;
}

static void tkvi_fill_defaults(tkv_config *cfg) {
    if (!cfg->n_kv_heads) cfg->n_kv_heads = cfg->n_heads;
    if (!cfg->v_head_dim) cfg->v_head_dim = cfg->head_dim;
    if (!(cfg->scale > 0.0f)) cfg->scale = (float)(1.0 / sqrt((double)cfg->head_dim));
    if (!cfg->max_seqs) cfg->max_seqs = 1;
    if (!cfg->max_append) cfg->max_append = 512;
    if (!cfg->group_size) cfg->group_size = 64;
    if (!cfg->max_tokens) cfg->max_tokens = TKVI_FOREVER;
}

/* Number of the coding for a pair and a room, added if new; -1 when there are too many. */
static int tkvi_find_key(tkvi_shape *h, tkv_pair pair, int tokens) {
    int i;
    for (i = 0; i < h->n_codings; i++)
        if (h->key[i].pair.k == pair.k && h->key[i].pair.v == pair.v && h->key[i].tokens == tokens) return i;
    if (h->n_codings == TKVI_MAX_CODINGS) return -1;
    h->key[h->n_codings].pair = pair;
    h->key[h->n_codings].tokens = tokens;
    return h->n_codings++;
}

static void tkvi_record_init(tkvi_record *r, const tkv_config *cfg, tkvi_key key) {
    tkvi_side_init(&r->k, &tkvi_formats[key.pair.k], TKV_K, cfg->head_dim, cfg->group_size, key.tokens);
    tkvi_side_init(&r->v, &tkvi_formats[key.pair.v], TKV_V, cfg->v_head_dim, cfg->group_size, key.tokens);
    r->at = 0;
    r->v_at = r->k.bytes;
}

/* The page size: the smallest from the largest slot up that wastes at most 1/16 in any class, or the least
 * wasteful of those tried (up to four of the largest slots). A class of tiny slots (the sinks) fills at
 * most 64 of them and is left out. */
static size_t tkvi_page_size(const tkvi_class *classes, int n) {
    size_t largest = 0, page, step, best = 0, best_waste = (size_t)-1;
    int i;
    for (i = 0; i < n; i++) largest = classes[i].slot_bytes > largest ? classes[i].slot_bytes : largest;
    step = tkvi_align_up(largest / 64 + 1);
    for (page = largest; page <= 4 * largest; page += step) {
        size_t worst = 0;
        for (i = 0; i < n; i++) {
            size_t waste = (page % classes[i].slot_bytes) * 1024 / page;
            if (classes[i].slot_bytes * 64 > page && waste > worst) worst = waste;
        }
        if (worst <= 64) return page;
        if (worst < best_waste) {
            best_waste = worst;
            best = page;
        }
    }
    return best;
}

/* The plan of one layer; its codings become keys of the shape. */
static tkv_status tkvi_plan_of(tkvi_shape *h, int layer, tkvi_plan *p) {
    tkv_pair pair[TKV_TIER_COUNT], unused[TKV_TIER_COUNT];
    int tier, other, few = 0;
    *p = tkvi_resolve(&h->cfg, layer, pair);
    if (p->stored != layer)
        return TKV_OK; /* reads another layer's blocks, or none; only its window is its own */
    p->keep = p->window;
    for (other = layer + 1; h->cfg.layers && p->keep && other < h->cfg.n_layers; other++)
        if (h->cfg.layers[other].share_kv == layer + 1) {
            int window = tkvi_resolve(&h->cfg, other, unused).window;
            p->keep = window && window < p->keep ? p->keep : window;
        }
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        p->coding[tier] = tkvi_find_key(h, pair[tier], TKVI_BLOCK);
        few |= p->coding[tier] < 0;
    }
    p->sink_coding = p->sink ? tkvi_find_key(h, pair[TKV_HOT], p->sink) : p->coding[TKV_HOT];
    few |= p->sink_coding < 0;
    return few ? TKV_ERR_CONFIG : TKV_OK;
}

/* The config must be valid. */
static tkv_status tkvi_shape_of(const tkv_config *cfg, tkvi_shape *h) {
    int i, c;
    tkvi_plan p;
    memset(h, 0, sizeof *h);
    h->cfg = *cfg;
    tkvi_fill_defaults(&h->cfg);
    for (i = 0; i < h->cfg.n_layers; i++)
        if (tkvi_plan_of(h, i, &p)) return TKV_ERR_CONFIG;
    for (i = 0; i < h->n_codings; i++) {
        tkvi_record r;
        tkvi_record_init(&r, &h->cfg, h->key[i]);
        /* a page is up to four of the largest blocks */
        if (!tkvi_mul((size_t)h->cfg.n_kv_heads * 5u, r.k.bytes + r.v.bytes, &h->block_bytes[i]))
            return TKV_ERR_CONFIG;
        h->block_bytes[i] /= 5u;
        for (c = 0; c < h->n_classes; c++)
            if (h->size_class[c].slot_bytes == h->block_bytes[i]) break;
        h->size_class[c].slot_bytes = h->block_bytes[i];
        if (c == h->n_classes) h->n_classes++;
        h->class_of[i] = c;
    }
    h->page_bytes = tkvi_page_size(h->size_class, h->n_classes);
    for (c = 0; c < h->n_classes; c++) {
        size_t slots = h->page_bytes / h->size_class[c].slot_bytes;
        h->size_class[c].slots = slots > 64 ? 64 : (int)slots;
    }
    return TKV_OK;
}

/* Every field; the shape is that of the valid config. */
static tkv_status tkvi_validate(const tkv_config *cfg, tkvi_shape *shape, char *reason, size_t size) {
    tkv_layer_config wide;
    tkv_status st;
    if (reason && size) *reason = 0;
    if (!cfg) return TKV_ERR_ARG;
#define TKVI_RANGE_(field, lo, hi, want)                                                                     \
    if (cfg->field < (lo) || cfg->field > (hi)) return tkvi_bad(reason, size, #field, cfg->field, want)
    if (cfg->start_canary || cfg->end_canary)
        return tkvi_bad(
            reason, size, cfg->start_canary ? "start_canary" : "end_canary", 1,
            "it must be 0: fill the config with zeros before setting fields, and use one header everywhere");
    TKVI_RANGE_(n_layers, 1, 4096, "it must be 1 to 4096");
    TKVI_RANGE_(n_heads, 1, 65536, "it must be 1 to 65536");
    TKVI_RANGE_(n_kv_heads, 0, 65536, "it must be 1 to 65536, or 0 for as many as n_heads");
    if (cfg->n_kv_heads && cfg->n_heads % cfg->n_kv_heads)
        return tkvi_bad(reason, size, "n_heads", cfg->n_heads, "it must be a multiple of n_kv_heads");
    TKVI_RANGE_(head_dim, 1, TKV_MAX_HEAD_DIM, "it must be 1 to 256");
    TKVI_RANGE_(v_head_dim, 0, TKV_MAX_HEAD_DIM, "it must be 1 to 256, or 0 for head_dim");
    if (!tkvi_is_finite(cfg->scale) || cfg->scale < 0.0f)
        return tkvi_bad(reason, size, "scale", -1, "it must be a positive number, or 0 for 1/sqrt(head_dim)");
    TKVI_RANGE_(max_seqs, 0, 1 << 20, "it must be 1 to 2^20, or 0 for 1");
    TKVI_RANGE_(max_tokens, 0, TKVI_FOREVER, "it must be 1 to 2^30 - 1, or 0 to grow");
    TKVI_RANGE_(max_append, 0, 1 << 20, "it must be 1 to 2^20, or 0 for 512");
    if (cfg->group_size != 0 && cfg->group_size != 32 && cfg->group_size != 64)
        return tkvi_bad(reason, size, "group_size", cfg->group_size, "it must be 64 or 32");
    if ((unsigned)cfg->nonfinite > TKV_NONFINITE_SATURATE)
        return tkvi_bad(reason, size, "nonfinite", (int)cfg->nonfinite, "it must be a tkv_nonfinite");
    TKVI_RANGE_(precise, 0, 1, "it must be 0 or 1");
    if ((unsigned)cfg->isa >= TKV_ISA_COUNT)
        return tkvi_bad(reason, size, "isa", (int)cfg->isa, "it must be a tkv_isa");
#undef TKVI_RANGE_
    if (!cfg->allocator.alloc != !cfg->allocator.release)
        return tkvi_bad(reason, size, "allocator", cfg->allocator.alloc ? 1 : 0,
                        "alloc and release must both be set, or neither");
    wide = tkvi_cache_wide(cfg);
    st = tkvi_validate_tiers(&wide, -1, reason, size);
    if (!st && cfg->layers) st = tkvi_validate_layers(cfg, reason, size);
    if (!st && tkvi_shape_of(cfg, shape))
        return tkvi_bad(reason, size, "layers", cfg->n_layers,
                        "their formats and sinks make too many kinds of blocks, or blocks of too many bytes");
    return st;
}

TKV_API tkv_status tkv_config_validate(const tkv_config *cfg, char *reason, size_t size) {
    tkvi_shape shape;
    return tkvi_validate(cfg, &shape, reason, size);
}

static size_t tkvi_tables_bytes(const tkvi_shape *h) {
    return tkvi_align_up((size_t)h->cfg.n_layers * sizeof(tkvi_plan)) +
           (size_t)h->n_codings * (tkvi_align_up(sizeof(tkvi_coding)) + tkvi_align_up(sizeof(tkvi_class)) +
                                   tkvi_align_up((size_t)h->cfg.n_kv_heads * sizeof(tkvi_record)));
}

static void tkvi_tables_build(tkvi_tables *t, tkvi_shape *h, uint8_t *mem) {
    uint8_t *records;
    int i, head;
    t->cfg = h->cfg;
    t->n_codings = h->n_codings;
    t->n_classes = h->n_classes;
    t->page_bytes = h->page_bytes;
    t->plan = (tkvi_plan *)(void *)mem;
    mem += tkvi_align_up((size_t)h->cfg.n_layers * sizeof(tkvi_plan));
    t->coding = (tkvi_coding *)(void *)mem;
    mem += (size_t)h->n_codings * tkvi_align_up(sizeof(tkvi_coding));
    t->size_class = (tkvi_class *)(void *)mem;
    records = mem + (size_t)h->n_codings * tkvi_align_up(sizeof(tkvi_class));
    for (i = 0; i < h->n_codings; i++) {
        tkvi_coding *c = &t->coding[i];
        size_t at = 0;
        c->pair = h->key[i].pair;
        c->tokens = h->key[i].tokens;
        c->size_class = h->class_of[i];
        c->block_bytes = h->block_bytes[i];
        c->record = (tkvi_record *)(void *)records;
        records += tkvi_align_up((size_t)h->cfg.n_kv_heads * sizeof(tkvi_record));
        for (head = 0; head < h->cfg.n_kv_heads; head++) {
            tkvi_record *r = &c->record[head];
            tkvi_record_init(r, &h->cfg, h->key[i]);
            r->at = at;
            at += r->k.bytes + r->v.bytes;
        }
    }
    for (i = 0; i < h->n_classes; i++) t->size_class[i] = h->size_class[i];
    for (i = 0; i < h->cfg.n_layers; i++)
        (void)tkvi_plan_of(h, i, &t->plan[i]); /* all keys are known by now */
    t->cfg.layers = NULL;
}

#endif /* TKVI_PLAN_H */
