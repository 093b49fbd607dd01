/*
 * cache/plan.h - derives all tables of a cache from its config, and checks the config.
 *
 *     tkv_config -> tkvi_validate -> tkvi_derived_config -> tkvi_tables_build -> tkvi_tables
 *                   (or a sentence    (needs no memory)                          (in the cache's fixed piece)
 *                    on the error)
 *
 * The tables have the format and the number of tokens of each tier, for each layer and each level of the ladder.
 * They also have the bytes of a block in each pair of formats, and the sizes of pages and slots.
 */
#ifndef TKVI_CACHE_PLAN_H
#define TKVI_CACHE_PLAN_H

#include "core/decimal.h"
#include "formats/families.h"
#include "kernels/dispatch.h"
#include "rules/evict.h"
#include "rules/remat.h"

/* An offloaded piece (reclaim/offload.h): a record, or one side of it, and a checksum. The largest piece is F16 of
 * 256 channels, since attention has a piece on its stack. */
#define TKVI_OFFLOAD_DIM 256
#define TKVI_OFFLOAD_SIDE (2u * TKVI_BLOCK * TKVI_OFFLOAD_DIM)
#define TKVI_OFFLOAD_CHECKSUM 8u
#define TKVI_OFFLOAD_ROOM (TKVI_OFFLOAD_SIDE + 64u)

#define TKVI_FOREVER 0x3fffffff /* a length without end; also the largest length of a sequence */

/* Layout of one KV head in a block: K side, then V side. */
typedef struct tkvi_record {
    tkvi_side k, v;  /* v: a view of k, if V is inside K */
    size_t at, v_at; /* byte offsets: of the record in the block, of the V side in the record */
} tkvi_record;

typedef struct tkvi_bytes { /* bytes of a block, all heads */
    size_t codes, metadata, total;
} tkvi_bytes;

/* Layout of a block in one pair of formats. Blocks refer to it by number (tkvi_block.layout). If the layer has a
 * table, it has layouts of its own, one for each version of the table. All versions have the same size. */
typedef struct tkvi_layout {
    tkv_format_pair pair;
    int key;    /* index into tkvi_derived_config.key */
    int tokens; /* capacity: 64, or that of a block of sinks or anchors */
    int n_kv_heads;
    int size_class;      /* index into size_class */
    tkvi_bytes bytes;    /* all heads */
    tkvi_record *record; /* [n_kv_heads]; heads may differ */
} tkvi_layout;

/* A size class: pages cut into slots for blocks of one size. */
typedef struct tkvi_class {
    size_t slot_bytes;
    int slots; /* per page, at most 64 */
} tkvi_class;

/* The tiers of a layer at one level of the ladder. */
typedef struct tkvi_tier_spec {
    int hot, warm;              /* tokens, with the delays of the layer (tkvi_plan) */
    int key[TKV_TIER_COUNT];    /* index into tkvi_derived_config.key */
    int layout[TKV_TIER_COUNT]; /* number of the layout; with a table, that of version 0 (tkvi_layout_of) */
    int needs_table[TKV_TIER_COUNT]; /* 1: blocks need a table of the layer */
} tkvi_tier_spec;

typedef struct tkvi_plan {
    tkvi_geometry geometry;
    tkvi_places at;
    int stored_layer; /* layer whose K and V this layer reads: itself or an earlier one; -1: no cache */
    int sink, window; /* tokens; window 0: none */
    /* Tokens added to the given lengths, so that layers demote at different tokens (tkvi_delay_layer). */
    int hot_delay, warm_delay;
    int sees_sinks;  /* 1: queries see the sinks beyond their window */
    int kept_window; /* widest window of all layers that read this layer's blocks; 0: no window */
    int keeps_sinks; /* 1: one of these layers sees the sinks beyond its window, so they do not expire */
    int sink_layout; /* number of the layout of the sink block */
    int n_anchor_blocks, anchor_layout; /* blocks of anchors of a list, and the number of their layout */
    tkvi_tier_spec now;                 /* tiers at the current level */
    /* Of the formats of all tiers and levels. allocates: 1: heads share the layer's bytes (core/allocate.h). Others:
     * families that learn from tokens, and from queries, as bits (tkvi_family.part). */
    int allocates, token_parts, query_parts;
    const tkvi_rope
        *rope; /* of the keys that this layer reads; NULL: they are not rotated, or `immobile` is set */
    const char *immobile; /* NULL, or why keys cannot move (tkv_seq_shift) */
} tkvi_plan;

/* Number of blocks that a list of a layer begins with: those of anchors, and that of sinks. */
static int tkvi_n_front_blocks(const tkvi_plan *p) {
    return (TKVI_HAS_EVICT ? p->n_anchor_blocks : 0) + (p->sink > 0);
}

/* Do blocks of this layer need a table at some level? */
static int tkvi_plan_learns(const tkvi_plan *p) {
    return p->allocates || (TKVI_HAS_TOKEN_LEARNERS && p->token_parts);
}

#define TKVI_VERSIONS 4 /* versions of a layer's table that blocks can be coded with */

#define TKVI_MAX_ANCHORS 1024
#define TKVI_ANCHOR_SLOTS 32 /* most anchors of a block: their indices take 32 bits (tkvi_token_meta) */

/* Number of blocks that hold the anchors of a list. */
static int tkvi_n_anchor_blocks(const tkv_config *cfg) {
    return TKVI_HAS_EVICT ? (cfg->tiers.n_anchors + TKVI_ANCHOR_SLOTS - 1) / TKVI_ANCHOR_SLOTS : 0;
}

/* Capacity of each of these blocks. The last one may have more slots than anchors are left. */
static int tkvi_anchor_capacity(const tkv_config *cfg) {
    const int n = tkvi_n_anchor_blocks(cfg);
    return n ? (cfg->tiers.n_anchors + n - 1) / n : 0;
}

#define TKVI_MAX_LAYERS 4096
#define TKVI_MAX_LAYOUTS 128

typedef struct tkvi_layout_key {
    tkv_format_pair pair;
    int tokens;
    int n_kv_heads, head_dim, v_head_dim, v_in_k;
} tkvi_layout_key;

typedef struct tkvi_derived_config {
    tkv_config cfg; /* with defaults filled in */
    int n_keys, n_classes;
    int n_layouts;                          /* one for each key, then those of single layers */
    size_t key_heads;                       /* KV heads of all keys */
    size_t own_heads;                       /* KV heads of the layouts of single layers, in one version */
    tkvi_geometry widest;                   /* the most of each number; n_heads of all layers */
    tkvi_places end;                        /* of all layers */
    size_t n_stored_heads;                  /* KV heads of the layers with blocks of their own */
    int any_shared, any_rotated, any_fixed; /* 1: heads share bytes; rotated V; a family can undo RoPE */
    int token_parts, query_parts;           /* of all layers, as in tkvi_plan */
    const char *needs_rope; /* not NULL: a format undoes RoPE, and that of a layer is not known; the error */
    int needs_rope_layer;   /* that layer */
    int n_ropes;            /* distinct ropes of the layers */
    size_t rope_bytes;      /* of their arrays */
    int rope_lanes;         /* the most of one (tkvi_rope.lanes) */
    int n_stored;           /* layers with blocks of their own */
    int n_levels;           /* levels of the ladder */
    int first_level;        /* level of a new cache */
    int looser_level; /* the first level of the ladder that takes more bytes than the one before; 0: none */
    int recode_pages; /* pages that recoding needs under a budget; 0: no budget */
    tkv_level ladder[TKV_MAX_LEVELS];
    size_t hot_record;                       /* bytes of one KV head of a hot block, in the widest layer */
    tkvi_layout_key key[TKVI_MAX_LAYOUTS];   /* [n_keys] */
    tkvi_bytes bytes[TKVI_MAX_LAYOUTS];      /* [n_keys] */
    int class_of[TKVI_MAX_LAYOUTS];          /* [n_keys] size class */
    tkvi_class size_class[TKVI_MAX_LAYOUTS]; /* [n_classes] */
    size_t page_bytes;
} tkvi_derived_config;

/* One version of the tables of all layers: one piece of memory, allocated when the first layer needs it. */
typedef struct tkvi_version {
    uint8_t *bytes;      /* NULL: not allocated */
    tkvi_record *record; /* [layouts of this version][n_kv_heads of each] */
    /* Formats whose heads share bytes: */
    tkvi_head *head;               /* [n_layers][n_kv_heads], at tkvi_places.heads */
    uint8_t *importance, *channel; /* [n_layers][n_kv_heads][k_pad], at tkvi_places.pads and .orders */
    float *mean;                   /* [n_layers][n_kv_heads][k_pad], at tkvi_places.pads */
    uint8_t *states;               /* of the families of token_parts, at tkvi_places.token_states */
} tkvi_version;

/* Everything derived from a config, in the cache's fixed piece. */
typedef struct tkvi_tables {
    tkv_config cfg; /* with defaults filled in; the pointers layers, ladder and rope.frequencies are NULL */
    int n_keys, n_layouts, n_classes;
    int any_shared, token_parts, query_parts; /* as in tkvi_derived_config */
    size_t page_bytes;
    tkvi_plan *plan;                 /* [n_layers] */
    tkvi_tier_spec *tier_specs;      /* [n_layers][n_levels] */
    int n_levels, level;             /* levels of the ladder; the current one */
    int from_tokens[TKV_MAX_LEVELS]; /* tkv_level.from_tokens */
    int looser_level;                /* as in tkvi_derived_config */
    int recode_pages;                /* pages that recoding needs under a budget; 0: no budget at creation */
    tkvi_layout *layout;             /* [n_layouts] */
    tkvi_class *size_class;
    tkvi_version version[TKVI_VERSIONS];
    size_t version_bytes;    /* bytes of one version; 0: no layer needs tables */
    int *split;              /* [n_kv_heads of the widest layer] work space; NULL: no heads share bytes */
    int8_t *current_version; /* [n_layers] version that new blocks are coded with; -1: no table yet */
    tkvi_places end;         /* of all layers */
    tkvi_rope *rope;         /* [n_ropes] distinct ropes of the layers (tkvi_plan.rope) */
    int n_ropes;
    int has_fixed_slots; /* 1: tokens cannot move to other slots, because a format undoes RoPE */
    int any_rotated;     /* 1: some V format is rotated */
} tkvi_tables;

/* The tier whose format blocks of `tier` get. A level can have fewer tiers than the one that put them there. */
static tkv_tier tkvi_tier_of_level(const tkvi_tier_spec *spec, tkv_tier tier) {
    if (spec->hot == TKVI_FOREVER) return TKV_TIER_HOT;
    return tier == TKV_TIER_ARCHIVE && spec->warm == TKVI_FOREVER ? TKV_TIER_WARM : tier;
}

/* Number of the layout of a layer's tier, with the current table. spec: the layer's tiers at some level. */
static int tkvi_layout_at_level(const tkvi_tables *t, int layer, const tkvi_tier_spec *spec, tkv_tier tier) {
    return spec->layout[tier] +
           (spec->needs_table[tier] && t->current_version[layer] > 0 ? t->current_version[layer] : 0);
}

/* Number of the layout that new blocks of a layer's tier get. */
static int tkvi_layout_of(const tkvi_tables *t, int layer, tkv_tier of) {
    const tkvi_tier_spec *now = &t->plan[layer].now;
    return tkvi_layout_at_level(t, layer, now, tkvi_tier_of_level(now, of));
}

/* The tiers of a layer at each level: an array of n_levels. */
static tkvi_tier_spec *tkvi_tier_specs_of(const tkvi_tables *t, int layer) {
    return t->tier_specs + (size_t)layer * (size_t)t->n_levels;
}

/* Makes `level` the current level of all layers. */
static void tkvi_take_level(tkvi_tables *t, int level) {
    int i;
    t->level = level;
    for (i = 0; i < t->cfg.model.n_layers; i++)
        if (t->plan[i].stored_layer == i) t->plan[i].now = tkvi_tier_specs_of(t, i)[level];
}

/* >>validate */
/* Writes "field is value; want" to `reason`, and returns TKV_ERR_CONFIG. */
static tkv_status tkvi_bad(char *reason, size_t size, const char *field, double value, const char *want) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_append_text(&t, field);
    tkvi_append_text(&t, " is ");
    tkvi_append_double(&t, value);
    tkvi_append_text(&t, "; ");
    tkvi_append_text(&t, want);
    return TKV_ERR_CONFIG;
}

/* Writes the name of a group and a sentence on it to `reason`, and returns TKV_ERR_CONFIG. */
static tkv_status tkvi_bad_text(char *reason, size_t size, const char *group, const char *wrong) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_append_text(&t, group);
    tkvi_append_text(&t, wrong);
    return TKV_ERR_CONFIG;
}

/* The same, with the name of the struct that has the field, such as "tiers." */
static tkv_status tkvi_bad_in(char *reason, size_t size, const char *owner, const char *field, double value,
                              const char *want) {
    char name[64];
    tkvi_text t = tkvi_text_begin(name, sizeof name);
    tkvi_append_text(&t, owner);
    tkvi_append_text(&t, field);
    return tkvi_bad(reason, size, name, value, want);
}

/* The same for a field of a feature that this build leaves out: TKV_ERR_UNSUPPORTED. */
static tkv_status tkvi_bad_here(char *reason, size_t size, const char *field, double value,
                                const char *sentence) {
    (void)tkvi_bad(reason, size, field, value, sentence);
    return TKV_ERR_UNSUPPORTED;
}

/* Refuses fields that need a feature that this build leaves out. Formats: tkvi_validate_tiers. */
static tkv_status tkvi_validate_features(const tkv_config *cfg, char *reason, size_t size) {
    const char *const no_evict = "TKV_NO_EVICT leaves this out";
    if (!TKVI_HAS_EVICT && cfg->evict.policy)
        return tkvi_bad_here(reason, size, "evict.policy", (int)cfg->evict.policy, no_evict);
    if (!TKVI_HAS_EVICT && cfg->tiers.n_anchors)
        return tkvi_bad_here(reason, size, "tiers.n_anchors", cfg->tiers.n_anchors, no_evict);
    if (!TKVI_HAS_EVICT && cfg->importance.sample_every)
        return tkvi_bad_here(reason, size, "importance.sample_every", cfg->importance.sample_every, no_evict);
    if (!TKVI_HAS_OFFLOAD && (cfg->offload.write || cfg->offload.read))
        return tkvi_bad_here(reason, size, "offload.write", 1, "TKV_NO_OFFLOAD leaves this out");
    if ((!TKVI_HAS_EVICT || !TKVI_HAS_OFFLOAD) && cfg->promotion.every)
        return tkvi_bad_here(reason, size, "promotion.every", cfg->promotion.every,
                             TKVI_HAS_EVICT ? "TKV_NO_OFFLOAD leaves this out" : no_evict);
    if (!TKVI_HAS_DISCARD && cfg->recompute.compute)
        return tkvi_bad_here(reason, size, "recompute.compute", 1, "TKV_NO_DISCARD leaves this out");
    if (!TKVI_HAS_DISCARD && cfg->budget.discard)
        return tkvi_bad_here(reason, size, "budget.discard", cfg->budget.discard,
                             "TKV_NO_DISCARD leaves this out");
    if (!TKVI_HAS_METER && cfg->meter.heads)
        return tkvi_bad_here(reason, size, "meter.heads", cfg->meter.heads, "TKV_NO_METER leaves this out");
    if (!TKVI_HAS_METER && cfg->budget.adapt)
        return tkvi_bad_here(reason, size, "budget.adapt", cfg->budget.adapt, "TKV_NO_METER leaves this out");
    return TKV_OK;
}

/* Checks the window of a layer, or of the model. has_sinks: 1 if it has sinks. */
static tkv_status tkvi_validate_window(const tkv_layer_config *c, int has_sinks, const char *owner,
                                       char *reason, size_t size) {
    if (c->window < TKV_OFF || c->window > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, owner, "window", c->window,
                           "it must be 1 to 2^30 - 1, 0 (default) or TKV_OFF");
    if (c->window_sinks < TKV_OFF || c->window_sinks > 1)
        return tkvi_bad_in(reason, size, owner, "window_sinks", c->window_sinks,
                           "it must be 1, 0 (default) or TKV_OFF");
    if (c->window_sinks == 1 && !has_sinks)
        return tkvi_bad_in(reason, size, owner, "window_sinks", c->window_sinks,
                           "it needs sinks, and sink_tokens is TKV_OFF");
    return TKV_OK;
}

/* Appends the names of the formats of this build that store a side. */
static void tkvi_append_formats(tkvi_text *t, tkv_side side) {
    int f;
    for (f = 1; f < TKV_FORMAT_COUNT; f++) {
        if (tkvi_format_left_out((tkv_format)f) || !tkvi_format_stores(&tkvi_formats[f], side)) continue;
        tkvi_append_text(t, " ");
        tkvi_append_text(t, tkvi_format_name((tkv_format)f));
    }
}

/* The same as tkvi_bad_in for a format: with its name and those that are allowed. */
static tkv_status tkvi_bad_format(char *reason, size_t size, const char *owner, const char *field,
                                  tkv_format f, int is_hot, tkv_side side) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_append_text(&t, owner);
    tkvi_append_text(&t, field);
    tkvi_append_text(&t, " is ");
    tkvi_append_int(&t, (int)f);
    if (tkvi_format_known(f)) {
        tkvi_append_text(&t, ", which is ");
        tkvi_append_text(&t, tkvi_format_name(f));
        if (!is_hot) tkvi_append_text(&t, side == TKV_V ? " and stores K only" : " and stores V only");
    }
    tkvi_append_text(&t, is_hot ? "; the hot tier takes f32, f16 and bf16" : "; it must be one of:");
    if (TKVI_HAS_REPORTS && !is_hot) tkvi_append_formats(&t, side);
    return TKV_ERR_CONFIG;
}

/* Checks tiers: those of the config, of one layer, or of one level of the ladder. `owner` as in tkvi_bad_in. */
static tkv_status tkvi_validate_tiers(const tkv_layer_config *c, const char *owner, char *reason,
                                      size_t size) {
    static const char *const pair_name[TKV_TIER_COUNT][2] = {
        {"hot.k", "hot.v"}, {"warm.k", "warm.v"}, {"archive.k", "archive.v"}};
    const tkv_format_pair *pair[TKV_TIER_COUNT];
    int i, side;
    pair[TKV_TIER_HOT] = &c->hot;
    pair[TKV_TIER_WARM] = &c->warm;
    pair[TKV_TIER_ARCHIVE] = &c->archive;
    for (i = 0; i < TKV_TIER_COUNT; i++)
        for (side = 0; side < 2; side++) {
            tkv_format f = side ? pair[i]->v : pair[i]->k;
            if (f != TKV_FORMAT_DEFAULT && !tkvi_format_known(f))
                return tkvi_bad_format(reason, size, owner, pair_name[i][side], f, i == TKV_TIER_HOT,
                                       (tkv_side)side);
            if (tkvi_format_left_out(f)) {
                (void)tkvi_bad_in(reason, size, owner, pair_name[i][side], (int)f, tkvi_format_left_out(f));
                return TKV_ERR_UNSUPPORTED;
            }
            if (f != TKV_FORMAT_DEFAULT && !tkvi_format_stores(&tkvi_formats[f], side ? TKV_V : TKV_K))
                return tkvi_bad_format(reason, size, owner, pair_name[i][side], f, 0, (tkv_side)side);
            if (i == TKV_TIER_HOT && f != TKV_FORMAT_DEFAULT && !tkvi_is_exact(&tkvi_formats[f]))
                return tkvi_bad_format(reason, size, owner, pair_name[i][side], f, 1, (tkv_side)side);
        }
    if (c->sink_tokens < TKV_OFF || c->sink_tokens > TKVI_BLOCK)
        return tkvi_bad_in(reason, size, owner, "sink_tokens", c->sink_tokens,
                           "it must be 1 to 64, 0 (default) or TKV_OFF");
    if (c->hot_tokens < TKV_UNLIMITED || c->hot_tokens > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, owner, "hot_tokens", c->hot_tokens,
                           "it must be 1 to 2^30 - 1, 0 (default), TKV_OFF or TKV_UNLIMITED");
    if (c->warm_tokens < TKV_UNLIMITED || c->warm_tokens > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, owner, "warm_tokens", c->warm_tokens,
                           "it must be 1 to 2^30 - 1, 0 (default), TKV_OFF or TKV_UNLIMITED");
    return TKV_OK;
}

/* The config's values of the fields that a layer can override. */
static tkv_layer_config tkvi_cache_wide(const tkv_config *cfg) {
    tkv_layer_config c;
    memset(&c, 0, sizeof c);
    c.hot = cfg->tiers.hot;
    c.warm = cfg->tiers.warm;
    c.archive = cfg->tiers.archive;
    c.sink_tokens = cfg->tiers.sink_tokens;
    c.hot_tokens = cfg->tiers.hot_tokens;
    c.warm_tokens = cfg->tiers.warm_tokens;
    c.window = cfg->model.window;
    c.window_sinks = cfg->model.window_sinks;
    return c;
}

/* Writes the name of a list's entry, such as "layers[3]." */
static void tkvi_name_entry(char *owner, size_t size, const char *list, int index) {
    tkvi_text t = tkvi_text_begin(owner, size);
    tkvi_append_text(&t, list);
    tkvi_append_int(&t, index);
    tkvi_append_text(&t, "].");
}

/* Checks the RoPE of a layer, or of the model. `owner` as in tkvi_bad_in. */
static tkv_status tkvi_validate_rope(const tkv_rope *rope, int head_dim, const char *owner, char *reason,
                                     size_t size) {
    const char *field;
    double value;
    const char *wrong = tkvi_rope_fault(rope, head_dim, &field, &value);
    return wrong ? tkvi_bad_in(reason, size, owner, field, value, wrong) : TKV_OK;
}

/* 1 if a layer has a RoPE of its own. */
static int tkvi_has_own_rope(const tkv_layer_config *c) { return c->rope.dim != 0 || c->rope.kind != 0; }

static int tkvi_has_own_kv(const tkv_config *cfg, int layer) {
    return !cfg->layers || (!cfg->layers[layer].no_cache && !cfg->layers[layer].share_kv);
}

/* The RoPE of a layer with K and V of its own. */
static const tkv_rope *tkvi_rope_of_layer(const tkv_config *cfg, int layer) {
    return cfg->layers && tkvi_has_own_rope(&cfg->layers[layer]) ? &cfg->layers[layer].rope
                                                                 : &cfg->model.rope;
}

/* Checks heads and channels of a layer. `owner` as in tkvi_bad_in. */
static tkv_status tkvi_validate_geometry(const tkv_config *cfg, int layer, const char *owner, char *reason,
                                         size_t size) {
    const tkv_layer_config *c = &cfg->layers[layer];
    const char *const names[] = {"n_heads", "n_kv_heads", "head_dim", "v_head_dim"};
    int given[4], i;
    if (c->v_in_k < TKV_OFF || c->v_in_k > 1)
        return tkvi_bad_in(reason, size, owner, "v_in_k", c->v_in_k, "it must be 1, 0 (default) or TKV_OFF");
    if (c->v_in_k && (c->no_cache || c->share_kv))
        return tkvi_bad_in(reason, size, owner, "v_in_k", c->v_in_k,
                           "it must be 0 with no_cache or share_kv: the layer stores no K and V");
    given[0] = c->n_heads;
    given[1] = c->n_kv_heads;
    given[2] = c->head_dim;
    given[3] = c->v_head_dim;
    for (i = 0; i < 4; i++) {
        if (given[i] < 0 || given[i] > (i < 2 ? 65536 : TKV_MAX_HEAD_DIM))
            return tkvi_bad_in(reason, size, owner, names[i], given[i],
                               i < 2 ? "it must be 1 to 65536, or 0 for that of the model"
                                     : "it must be 1 to 576, or 0 for that of the model");
        if (given[i] && c->no_cache)
            return tkvi_bad_in(reason, size, owner, names[i], given[i],
                               "it must be 0 with no_cache: the layer has no K and V");
        if (i > 0 && given[i] && c->share_kv)
            return tkvi_bad_in(
                reason, size, owner, names[i], given[i],
                "it must be 0 with share_kv: the layer has the keys and values of the other one");
    }
    return TKV_OK;
}

static tkv_status tkvi_validate_layers(const tkv_config *cfg, char *reason, size_t size) {
    int i, cached = 0;
    for (i = 0; i < cfg->model.n_layers; i++) {
        const tkv_layer_config *c = &cfg->layers[i];
        tkvi_geometry g;
        char owner[32];
        tkv_status st;
        tkvi_name_entry(owner, sizeof owner, "layers[", i);
        st = tkvi_validate_tiers(c, owner, reason, size);
        if (!st)
            st =
                tkvi_validate_window(c, (c->sink_tokens ? c->sink_tokens : cfg->tiers.sink_tokens) != TKV_OFF,
                                     owner, reason, size);
        if (!st) st = tkvi_validate_geometry(cfg, i, owner, reason, size);
        if (st) return st;
        if (!tkvi_has_own_rope(c) && (c->rope.interleaved || c->rope.first || c->rope.base > 0.0f ||
                                      c->rope.scale > 0.0f || c->rope.frequencies))
            return tkvi_bad_in(reason, size, owner, "rope.dim", c->rope.dim,
                               "it must be set where another field of rope is; a layer takes all or none of "
                               "model.rope");
        if (c->no_cache != 0 && c->no_cache != 1)
            return tkvi_bad_in(reason, size, owner, "no_cache", c->no_cache, "it must be 0 or 1");
        if (c->share_kv < 0 || c->share_kv > i)
            return tkvi_bad_in(reason, size, owner, "share_kv", c->share_kv,
                               "it must be 0, or 1 + the index of an earlier layer");
        if (c->share_kv &&
            (c->no_cache || cfg->layers[c->share_kv - 1].no_cache || cfg->layers[c->share_kv - 1].share_kv))
            return tkvi_bad_in(reason, size, owner, "share_kv", c->share_kv,
                               "both layers need a cache, and the other one its own");
        g = tkvi_layer_geometry(cfg, i); /* share_kv is in range */
        if (g.n_heads % g.n_kv_heads)
            return tkvi_bad_in(reason, size, owner, "n_heads", g.n_heads,
                               "it must be a multiple of n_kv_heads");
        if (g.v_in_k && g.v_head_dim > g.head_dim)
            return tkvi_bad_in(reason, size, owner, "v_head_dim", g.v_head_dim,
                               "it must be at most head_dim, where V is inside K");
        st = tkvi_validate_rope(tkvi_has_own_kv(cfg, i) ? tkvi_rope_of_layer(cfg, i) : &c->rope, g.head_dim,
                                owner, reason, size);
        if (st) return st;
        cached += !c->no_cache;
    }
    if (!cached)
        return tkvi_bad(reason, size, "layers", cfg->model.n_layers, "at least one layer must have a cache");
    return TKV_OK;
}

TKV_API tkv_config tkv_default_config(void) {
    tkv_config cfg;
    memset(&cfg, 0, sizeof cfg);
    return cfg;
}

/* >>resolve */
/* A length in tokens: the layer's, else the config's, else the default. TKV_OFF is 0, TKV_UNLIMITED is
 * TKVI_FOREVER. */
static int tkvi_length(int of_layer, int of_cache, int standard) {
    int n = of_layer ? of_layer : of_cache ? of_cache : standard;
    return n == TKV_OFF ? 0 : n == TKV_UNLIMITED ? TKVI_FOREVER : n;
}

static tkv_format_pair tkvi_pair(tkv_format_pair of_layer, tkv_format_pair of_cache, tkv_format k,
                                 tkv_format v) {
    tkv_format_pair p;
    p.k = of_layer.k ? of_layer.k : of_cache.k ? of_cache.k : k;
    p.v = of_layer.v ? of_layer.v : of_cache.v ? of_cache.v : v;
    return p;
}

/* Lengths and format pairs of one layer at a level of the ladder. `pair` gets hot, warm, archive. A value that the
 * layer itself sets holds at every level. */
static tkvi_plan tkvi_resolve(const tkv_config *cfg, const tkv_level *level, int layer,
                              tkv_format_pair *pair) {
    tkv_layer_config wide = tkvi_cache_wide(cfg), none;
    const tkv_layer_config *c = cfg->layers ? &cfg->layers[layer] : &none;
    tkvi_plan p;
    memset(&p, 0, sizeof p);
    memset(&none, 0, sizeof none);
    p.geometry = tkvi_layer_geometry(cfg, layer);
    p.stored_layer = c->no_cache ? -1 : c->share_kv ? c->share_kv - 1 : layer;
    p.sink = tkvi_length(c->sink_tokens, wide.sink_tokens, 4);
    p.now.hot = tkvi_length(c->hot_tokens, level->hot_tokens ? level->hot_tokens : wide.hot_tokens, 64);
    p.now.warm = tkvi_length(c->warm_tokens, level->warm_tokens ? level->warm_tokens : wide.warm_tokens, 448);
    p.window = tkvi_length(c->window, wide.window, TKV_OFF);
    p.sees_sinks = p.sink && (c->window_sinks ? c->window_sinks : wide.window_sinks) == 1;
    wide.warm = tkvi_pair(level->warm, wide.warm, TKV_A40, TKV_R40);
    wide.archive = tkvi_pair(level->archive, wide.archive, TKV_A30, TKV_R30);
    pair[TKV_TIER_HOT] = tkvi_pair(c->hot, wide.hot, TKV_F16, TKV_F16);
    pair[TKV_TIER_WARM] = tkvi_pair(c->warm, wide.warm, TKV_A40, TKV_R40);
    pair[TKV_TIER_ARCHIVE] = tkvi_pair(c->archive, wide.archive, TKV_A30, TKV_R30);
    return p;
}

/* Sets the delays of a layer, number `rank` of the n layers with K and V of their own. All layers fill a block at the
 * same token. Delays spread the 2 n demotions that follow evenly over 64 tokens. Not for a cache with a budget: there
 * need, not age, decides when blocks are recoded. */
static void tkvi_delay_layer(tkvi_plan *p, int rank, int n) {
    const int to_warm = TKVI_BLOCK * rank / n, to_archive = (TKVI_BLOCK * rank + TKVI_BLOCK / 2) / n;
    p->hot_delay = n > 1 ? to_warm : 0; /* one layer: lengths as given */
    p->warm_delay = n > 1 ? to_archive - to_warm : 0;
}

/* Adds a delay to a length in tokens. A tier without tokens and one without end keep their lengths. */
static int tkvi_add_delay(int length, int delay) {
    if (length == 0 || length == TKVI_FOREVER) return length;
    return tkvi_min(length + delay, TKVI_FOREVER - 1);
}

/* The tokens by which the first and the second table of a layer are delayed, without a budget: as many as its hot
 * tier is longer, so that no more blocks wait for the first one. */
static int tkvi_table_delay(const tkvi_plan *p) {
    return tkvi_add_delay(p->now.hot, p->hot_delay) == p->now.hot ? 0 : p->hot_delay;
}

/* 1 if blocks can be outside RAM. */
static int tkvi_may_leave_ram(const tkv_config *cfg) {
    return cfg->offload.write || cfg->budget.discard || cfg->recompute.compute;
}

/* The first layer that has the tables of this layer's RoPE; -1: it needs none. */
static int tkvi_rope_layer(const tkv_config *cfg, int layer) {
    const tkv_rope *rope = tkvi_rope_of_layer(cfg, layer);
    int i;
    if (!TKVI_HAS_MOVES && !TKVI_HAS_ROPE) return -1;
    if (!tkvi_has_own_kv(cfg, layer) || !tkvi_rope_is_known(rope)) return -1;
    for (i = 0; i < layer; i++) {
        const tkv_rope *other = tkvi_rope_of_layer(cfg, i);
        if (tkvi_has_own_kv(cfg, i) && tkvi_rope_is_known(other) && tkvi_is_same_rope(rope, other) &&
            tkvi_layer_geometry(cfg, i).head_dim == tkvi_layer_geometry(cfg, layer).head_dim)
            break;
    }
    return i;
}

/* Why keys with this RoPE cannot move, or NULL. */
static const char *tkvi_why_immobile(const tkv_rope *rope) {
    static const char *const why[TKV_ROPE_COUNT] = {
        "set cfg.model.rope: keys cannot move without the model's RoPE",
        "keys with M-RoPE cannot move: a token has several positions, and a distance has no single rotation",
        "keys with dynamic frequencies cannot move: these change with the length of the sequence",
        "keys with learned positions cannot move: the model added positions before it made the keys"};
    return rope->kind == TKV_ROPE_FIXED && rope->dim != 0 ? NULL : why[rope->kind];
}

/* Copies cfg.recompute.cost to *cost, with the shape of the model and with defaults. Returns NULL, or the reason why it
 * is invalid. */
static const char *tkvi_recompute_cost(const tkv_config *cfg, tkv_remat_config *cost) {
    tkv_remat_config given = cfg->recompute.cost;
    if (!given.n_layers) given.n_layers = cfg->model.n_layers;
    if (!given.n_heads) given.n_heads = cfg->model.n_heads;
    if (!given.head_dim) given.head_dim = cfg->model.head_dim;
    return tkvi_remat_fill(&given, cost);
}

static void tkvi_fill_defaults(tkv_config *cfg) {
    if (!cfg->model.n_kv_heads) cfg->model.n_kv_heads = cfg->model.n_heads;
    if (!cfg->model.v_head_dim) cfg->model.v_head_dim = cfg->model.head_dim;
    if (!cfg->limits.max_seqs) cfg->limits.max_seqs = 1;
    if (!cfg->limits.max_append) cfg->limits.max_append = 512;
    if (!cfg->limits.max_states) cfg->limits.max_states = 64;
    tkvi_fill_options(&cfg->format);
    if (TKVI_HAS_EVICT && cfg->evict.keep_first) cfg->evict.keep_tokens = tkvi_mean_kept(&cfg->evict);
    if (!cfg->limits.max_tokens) cfg->limits.max_tokens = TKVI_FOREVER;
    if (!cfg->meter.tokens) cfg->meter.tokens = 2048;
#if !defined(__GNUC__) && !defined(__clang__)
    cfg->meter.heads = 0; /* the meter needs atomics (cache/meter.h) */
#endif
}

/* >>ladder: the default one. Under a budget, level 0 is exact, and further levels compress more. Without a budget,
 * the only level is the plan of the config. */
static const tkv_level tkvi_ladder_exact = {
    TKV_UNLIMITED, 0, {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, 0};
static const tkv_level tkvi_ladder_steps[] = {
    {0, TKV_UNLIMITED, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0},
    {0, TKV_UNLIMITED, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}, 0},
    {0,
     0,
     {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
     {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
     0}, /* the config's plan */
    {0, 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}, 0},
    {0, 0, {TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}, 0},
};

static int tkvi_adapt_ladder(const tkv_config *cfg, tkv_level *ladder, int *plan);

static int tkvi_levels_of(const tkv_config *cfg) {
    const int steps = (int)(sizeof tkvi_ladder_steps / sizeof *tkvi_ladder_steps);
    tkv_level unused[TKV_MAX_LEVELS];
    int plan;
    if (TKVI_HAS_METER && cfg->budget.adapt) return tkvi_adapt_ladder(cfg, unused, &plan);
    return cfg->budget.ladder ? cfg->budget.n_levels : cfg->budget.bytes ? 1 + steps : 1;
}

/* Fills in the config of the pressure controller for the number of levels. Missing thresholds repeat the last one.
 * Returns NULL, or a sentence on the error. */
static const char *tkvi_pressure_for(const tkv_config *cfg, tkv_pressure_config *full) {
    tkv_pressure_config p = cfg->budget.pressure;
    int steps = tkvi_levels_of(cfg) - 1, i, any = 0, n;
    for (i = 0; i < TKV_MAX_LEVELS - 1; i++) any |= tkvi_bits(p.threshold[i]) != 0;
    for (i = 0; i < 2 && !any; i++) p.threshold[i] = tkvi_profile_of(&p)->threshold[i];
    n = tkvi_pressure_levels(&p);
    for (i = n; i < TKV_MAX_LEVELS - 1; i++)
        if (tkvi_bits(p.threshold[i]) != 0)
            return "thresholds must be above 0 and at most 1, or TKV_ZERO, without gaps";
    TKVI_ASSERT(n > 0);
    for (i = n; i < steps; i++) p.threshold[i] = p.threshold[n - 1];
    for (i = tkvi_max(steps, 1); i < TKV_MAX_LEVELS - 1; i++) p.threshold[i] = 0.0f;
    if (steps == 0) { /* one level: the controller has no choice */
        if (p.max_level > 0 || p.max_level < TKV_OFF || p.min_level != 0)
            return "there is one level only, 0: max_level must be 0 or TKV_OFF, and min_level 0";
        if (tkvi_profile_name(p.profile))
            p.profile = TKV_PROFILE_DEFAULT; /* profiles differ in their levels */
        p.max_level = TKV_OFF;
    }
    return tkvi_pressure_fill(&p, full);
}

/* Fills in h->ladder and h->n_levels. */
static void tkvi_ladder_of(const tkv_config *cfg, tkvi_derived_config *h) {
    int i, steps = (int)(sizeof tkvi_ladder_steps / sizeof *tkvi_ladder_steps);
    h->n_levels = tkvi_levels_of(cfg);
    memset(h->ladder, 0, sizeof h->ladder);
    if (TKVI_HAS_METER && cfg->budget.adapt) (void)tkvi_adapt_ladder(cfg, h->ladder, &h->first_level);
    for (i = 0; i < h->n_levels && cfg->budget.ladder; i++) h->ladder[i] = cfg->budget.ladder[i];
    if (cfg->budget.ladder || !cfg->budget.bytes) return;
    h->ladder[0] = tkvi_ladder_exact;
    for (i = 0; i < steps; i++) h->ladder[i + 1] = tkvi_ladder_steps[i];
}

static tkvi_layout_key tkvi_layout_key_of(const tkvi_geometry *g, tkv_format_pair pair, int tokens) {
    tkvi_layout_key key;
    key.pair = pair;
    if (g->v_in_k) key.pair.v = pair.k;
    key.tokens = tokens;
    key.n_kv_heads = g->n_kv_heads;
    key.head_dim = g->head_dim;
    key.v_head_dim = g->v_head_dim;
    key.v_in_k = g->v_in_k;
    return key;
}

static int tkvi_is_same_key(const tkvi_layout_key *a, const tkvi_layout_key *b) {
    return a->pair.k == b->pair.k && a->pair.v == b->pair.v && a->tokens == b->tokens &&
           a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim && a->v_head_dim == b->v_head_dim &&
           a->v_in_k == b->v_in_k;
}

/* Index of the key for a geometry, a pair and a capacity in tokens. A new key is added. Returns -1 when there are too
 * many. */
static int tkvi_find_key(tkvi_derived_config *h, const tkvi_geometry *g, tkv_format_pair pair, int tokens) {
    const tkvi_layout_key key = tkvi_layout_key_of(g, pair, tokens);
    int i;
    for (i = 0; i < h->n_keys; i++)
        if (tkvi_is_same_key(&h->key[i], &key)) return i;
    if (h->n_keys == TKVI_MAX_LAYOUTS) return -1;
    h->key[h->n_keys] = key;
    h->key_heads += (size_t)key.n_kv_heads;
    return h->n_keys++;
}

/* Places V in a record: behind K, or inside K. */
static void tkvi_place_v(tkvi_record *r, int v_in_k, int v_head_dim) {
    if (v_in_k) tkvi_view_k_as_v(&r->v, &r->k, v_head_dim);
    r->v_at = v_in_k ? 0 : r->k.bytes;
}

/* Layout of one KV head. k, v: its shares from the layer's table, or NULL for equal shares. */
static void tkvi_record_init(tkvi_record *r, const tkv_config *cfg, tkvi_layout_key key, const tkvi_share *k,
                             const tkvi_share *v) {
    const tkv_format_options *o = &cfg->format;
    tkvi_side_make(&r->k, &tkvi_formats[key.pair.k], TKV_K, key.head_dim, key.tokens, o, 1, key.v_in_k, k);
    if (!key.v_in_k)
        tkvi_side_make(&r->v, &tkvi_formats[key.pair.v], TKV_V, key.v_head_dim, key.tokens, o, 1, 0, v);
    r->at = 0;
    tkvi_place_v(r, key.v_in_k, key.v_head_dim);
}

static int tkvi_pair_allocates(tkv_format_pair p) {
    return tkvi_formats[p.k].shared || tkvi_formats[p.v].shared;
}

/* Families of a pair that learn from tokens. */
static int tkvi_pair_token_parts(tkv_format_pair p) {
    const tkvi_family *k = tkvi_formats[p.k].family, *v = tkvi_formats[p.v].family;
    return (k->learn_tokens ? k->part : 0) | (v->learn_tokens ? v->part : 0);
}

/* Bytes of a block, all heads. Where heads share bytes, their sum is fixed, however it is split. Returns 0 if a
 * block is too large. */
static int tkvi_key_bytes(const tkv_config *cfg, tkvi_layout_key key, tkvi_bytes *b) {
    tkvi_record r;
    int64_t heads = key.n_kv_heads, k, v, meta, total;
    tkvi_record_init(&r, cfg, key, NULL, NULL);
    k = heads * (int64_t)r.k.code_bytes;
    v = key.v_in_k ? 0 : heads * (int64_t)r.v.code_bytes;
    meta = heads * (int64_t)(r.k.meta_bytes + (key.v_in_k ? 0 : r.v.meta_bytes));
    total = heads * (int64_t)(r.k.bytes + r.v.bytes);
    if (tkvi_formats[key.pair.k].shared) {
        total -= heads * (int64_t)tkvi_align_up(r.k.code_bytes);
        k = heads * 32 *
            tkvi_head_budget(tkvi_formats[key.pair.k].bits, key.head_dim, cfg->format.allocation_unit / 4,
                             r.k.has_outlier);
        k = (k + 63) / 64 * 64;
        total += k;
    }
    if (tkvi_formats[key.pair.v].shared && !key.v_in_k) {
        total -= v;
        v = tkvi_budget_v(heads, tkvi_formats[key.pair.v].bits, r.v.pad);
        total += v;
    }
    if (total > (int64_t)(((size_t)-1 >> 1) / 5u)) return 0; /* a page can hold four of the largest blocks */
    b->codes = (size_t)(k + v);
    b->metadata = (size_t)meta;
    b->total = (size_t)total;
    return 1;
}

static int tkvi_slots_of(const tkvi_class *c, size_t page) {
    size_t slots = page / c->slot_bytes;
    return slots > 64 ? 64 : (int)slots;
}

/* Bytes of pages that hold no block, for a page size and a number of blocks per class. Counts the unused ends of
 * pages, half a page for each class in use, and the spare pages. */
static uint64_t tkvi_page_cost(const tkvi_class *classes, const int64_t *blocks, int n, int spare,
                               size_t page) {
    uint64_t cost = (uint64_t)spare * page;
    int i;
    for (i = 0; i < n; i++) {
        int slots = tkvi_slots_of(&classes[i], page);
        cost += (uint64_t)blocks[i] * (page - (size_t)slots * classes[i].slot_bytes) / (uint64_t)slots;
        cost += blocks[i] ? page / 2 : 0;
    }
    return cost;
}

/* The page size with the smallest cost. Candidates are the multiples of each slot size, from the largest slot to
 * four times that. */
static size_t tkvi_page_size(const tkvi_class *classes, const int64_t *blocks, int n, int spare) {
    size_t largest = 0, page, best = 0;
    uint64_t best_cost = 0;
    int i;
    for (i = 0; i < n; i++) largest = classes[i].slot_bytes > largest ? classes[i].slot_bytes : largest;
    for (i = 0; i < n; i++)
        for (page = (largest + classes[i].slot_bytes - 1) / classes[i].slot_bytes * classes[i].slot_bytes;
             page <= 4u * largest; page += classes[i].slot_bytes) {
            uint64_t cost = tkvi_page_cost(classes, blocks, n, spare, page);
            if (best == 0 || cost < best_cost || (cost == best_cost && page < best)) {
                best = page;
                best_cost = cost;
            }
        }
    return best;
}

/* Adds to blocks[key] the blocks of one layer at a level, for one sequence of 4096 tokens (or max_tokens, if
 * smaller). The page size is chosen for these numbers. */
static void tkvi_usual_blocks(const tkvi_derived_config *h, const tkvi_plan *p, const tkvi_tier_spec *r,
                              int64_t *blocks) {
    int64_t left = (tkvi_min(h->cfg.limits.max_tokens, 4096) - p->sink + TKVI_BLOCK - 1) / TKVI_BLOCK, n;
    int64_t most[TKV_TIER_COUNT];
    int tier;
    most[TKV_TIER_HOT] = r->hot / TKVI_BLOCK + 1; /* + 1: the partial block */
    most[TKV_TIER_WARM] = (r->warm + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_TIER_ARCHIVE] = TKVI_FOREVER;
    if (p->sink) blocks[p->sink_layout]++;
    if (TKVI_HAS_EVICT) blocks[p->anchor_layout] += p->n_anchor_blocks;
    for (tier = 0; tier < TKV_TIER_COUNT && left > 0; tier++) {
        n = left < most[tier] ? left : most[tier];
        blocks[r->key[tier]] += n;
        left -= n;
    }
}

/* Can blocks ever reach this tier? If not, its format needs no table. A flush can empty the hot tier, unless that
 * tier holds all tokens. A cache created with a budget archives blocks of any age when that is short
 * (call.recodes_young). */
static int tkvi_reached(const tkv_config *cfg, const tkvi_tier_spec *r, int tier) {
    if (tier != TKV_TIER_HOT && r->hot == TKVI_FOREVER) return 0;
    if (tier != TKV_TIER_ARCHIVE) return 1;
    return r->warm < (cfg->budget.bytes ? TKVI_FOREVER : cfg->limits.max_tokens);
}

/* Fills in the ladder of cfg.budget.adapt. *plan: the level of the plan. Returns the number of levels. */
static int tkvi_adapt_ladder(const tkv_config *cfg, tkv_level *ladder, int *plan) {
    static const tkv_format_pair none = {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT};
    static const tkv_format_pair archives[] = {
        {TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}, {TKV_A25, TKV_R20}, {TKV_A20, TKV_R15}};
    const tkvi_geometry g = tkvi_model_geometry(&cfg->model);
    const tkv_format_pair own = tkvi_pair(none, cfg->tiers.archive, TKV_A30, TKV_R30);
    tkv_config full = *cfg;
    tkvi_bytes own_bytes, bytes;
    int i, n = 0, above = 0;
    memset(ladder, 0, TKV_MAX_LEVELS * sizeof *ladder);
    memset(&own_bytes, 0, sizeof own_bytes);
    tkvi_fill_defaults(&full);
    (void)tkvi_key_bytes(&full, tkvi_layout_key_of(&g, own, TKVI_BLOCK), &own_bytes);
    for (i = 0; i < (int)(sizeof archives / sizeof *archives); i++) {
        memset(&bytes, 0, sizeof bytes);
        (void)tkvi_key_bytes(&full, tkvi_layout_key_of(&g, archives[i], TKVI_BLOCK), &bytes);
        if (bytes.total > own_bytes.total) above++;
        if (n == above && bytes.total < own_bytes.total) ladder[n++].archive = own;
        if (bytes.total != own_bytes.total) ladder[n++].archive = archives[i];
        else if (n == above) ladder[n++].archive = own;
    }
    if (n == above) ladder[n++].archive = own;
    *plan = above;
    return n;
}

/* Fills in the tiers of a layer at a level. Adds their format pairs to h->key. Returns 0 if there are too many. */
static int tkvi_tier_spec_of(tkvi_derived_config *h, int layer, int level, tkvi_plan *p, tkvi_tier_spec *r) {
    tkv_format_pair pair[TKV_TIER_COUNT];
    int tier, parts, fits = 1;
    *r = tkvi_resolve(&h->cfg, &h->ladder[level], layer, pair).now;
    r->hot = tkvi_add_delay(r->hot, p->hot_delay);
    r->warm = tkvi_add_delay(r->warm, p->warm_delay);
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        const tkvi_family *k = tkvi_formats[pair[tier].k].family, *v = tkvi_formats[pair[tier].v].family;
        r->key[tier] = r->layout[tier] = tkvi_find_key(h, &p->geometry, pair[tier], TKVI_BLOCK);
        fits &= r->layout[tier] >= 0;
        h->any_rotated |= tkvi_formats[pair[tier].v].rotated;
        if (!tkvi_reached(&h->cfg, r, tier)) continue;
        p->allocates |= tkvi_pair_allocates(pair[tier]);
        parts = tkvi_pair_token_parts(pair[tier]);
        r->needs_table[tier] = tkvi_pair_allocates(pair[tier]) || parts;
        p->token_parts |= parts;
        if (k->learn_queries) p->query_parts |= k->part;
        h->any_fixed |= k->undoes_rope || v->undoes_rope;
        if (k->undoes_rope && k->undoes_rope(&h->cfg.format) && !h->needs_rope &&
            (tkvi_why_immobile(tkvi_rope_of_layer(&h->cfg, layer)) ||
             tkvi_rope_of_layer(&h->cfg, layer)->first)) {
            h->needs_rope = k->needs_rope;
            h->needs_rope_layer = layer;
        }
    }
    return fits;
}

/* Fills in the plan of one layer and its tiers at each level. p->now is that of the first level. */
static tkv_status tkvi_plan_of(tkvi_derived_config *h, int layer, tkvi_plan *p, tkvi_tier_spec *tier_specs) {
    tkv_format_pair unused[TKV_TIER_COUNT], pair[TKV_TIER_COUNT];
    int level, other, rank = 0, n_own = 0, fits = 1;
    *p = tkvi_resolve(&h->cfg, &h->ladder[0], layer, pair);
    if (p->stored_layer != layer)
        return TKV_OK; /* the layer reads another layer's blocks, or none: only its window matters */
    for (other = 0; other < h->cfg.model.n_layers; other++) {
        rank += other < layer && tkvi_has_own_kv(&h->cfg, other);
        n_own += tkvi_has_own_kv(&h->cfg, other);
    }
    if (!h->cfg.budget.bytes) tkvi_delay_layer(p, rank, n_own);
    p->kept_window = p->window;
    p->keeps_sinks = p->sees_sinks;
    for (other = layer + 1; h->cfg.layers && other < h->cfg.model.n_layers; other++)
        if (h->cfg.layers[other].share_kv == layer + 1) {
            const tkvi_plan reader = tkvi_resolve(&h->cfg, &h->ladder[0], other, unused);
            if (p->kept_window && (!reader.window || reader.window > p->kept_window))
                p->kept_window = reader.window;
            p->keeps_sinks |= p->sink && reader.sees_sinks;
        }
    for (level = 0; level < h->n_levels; level++)
        fits &= tkvi_tier_spec_of(h, layer, level, p, &tier_specs[level]);
    p->now = tier_specs[h->first_level];
    p->sink_layout =
        p->sink ? tkvi_find_key(h, &p->geometry, pair[TKV_TIER_HOT], p->sink) : p->now.layout[TKV_TIER_HOT];
    p->n_anchor_blocks = tkvi_n_anchor_blocks(&h->cfg);
    p->anchor_layout = p->n_anchor_blocks
                           ? tkvi_find_key(h, &p->geometry, pair[TKV_TIER_HOT], tkvi_anchor_capacity(&h->cfg))
                           : p->now.layout[TKV_TIER_HOT];
    fits &= p->sink_layout >= 0 && p->anchor_layout >= 0;
    h->any_shared |= p->allocates;
    h->token_parts |= p->token_parts;
    h->query_parts |= p->query_parts;
    return fits ? TKV_OK : TKV_ERR_CONFIG;
}

/* Gives a layer with tables its own layouts: TKVI_VERSIONS for each key. *next is the first free number. Returns how
 * many keys have them. */
static int tkvi_own_layouts(tkvi_tier_spec *tier_specs, int n_levels, int *next) {
    int at, before, n = 0;
    for (at = 0; at < n_levels * TKV_TIER_COUNT; at++) {
        tkvi_tier_spec *r = &tier_specs[at / TKV_TIER_COUNT];
        const int tier = at % TKV_TIER_COUNT;
        if (tier == TKV_TIER_HOT || !r->needs_table[tier]) continue;
        for (before = 0; before < at; before++) {
            const tkvi_tier_spec *b = &tier_specs[before / TKV_TIER_COUNT];
            if (b->needs_table[before % TKV_TIER_COUNT] && b->key[before % TKV_TIER_COUNT] == r->key[tier])
                break;
        }
        if (before < at) {
            r->layout[tier] = tier_specs[before / TKV_TIER_COUNT].layout[before % TKV_TIER_COUNT];
            continue;
        }
        r->layout[tier] = *next;
        *next += TKVI_VERSIONS;
        n++;
    }
    return n;
}

/* Pages that recoding needs at most. At a level, it opens one page for each size class that it writes, before
 * another page becomes free. */
static int tkvi_recode_pages_of(tkvi_derived_config *h) {
    tkvi_tier_spec tier_specs[TKV_MAX_LEVELS];
    uint8_t opens[TKV_MAX_LEVELS][TKVI_MAX_LAYOUTS] = {{0}};
    int level, most = 1, i, c, tier;
    for (i = 0; i < h->cfg.model.n_layers; i++) {
        tkvi_plan p;
        (void)tkvi_plan_of(h, i, &p, tier_specs);
        for (level = 0; level < h->n_levels && p.stored_layer == i; level++)
            for (tier = TKV_TIER_WARM; tier < TKV_TIER_COUNT && tier_specs[level].hot != TKVI_FOREVER; tier++)
                opens[level][h->class_of[tier_specs[level].key[tier]]] = 1;
    }
    for (level = 0; level < h->n_levels; level++) {
        int n = 0;
        for (c = 0; c < h->n_classes; c++) n += opens[level][c];
        most = tkvi_max(most, n);
    }
    return most;
}

/* Finds the first level at which a full sequence takes more bytes than at the level before. 0: the levels go from loose
 * to tight. A sequence without a limit counts with 2^20 tokens. */
static int tkvi_find_looser_level(tkvi_derived_config *h) {
    tkvi_tier_spec specs[TKV_MAX_LEVELS];
    double bytes[TKV_MAX_LEVELS] = {0.0};
    int i, level, tier;
    for (i = 0; i < h->cfg.model.n_layers; i++) {
        tkvi_plan p;
        (void)tkvi_plan_of(h, i, &p, specs);
        for (level = 0; level < h->n_levels && p.stored_layer == i; level++) {
            const tkvi_tier_spec *s = &specs[level];
            int left = h->cfg.limits.max_tokens ? h->cfg.limits.max_tokens : 1 << 20;
            if (p.kept_window) left = tkvi_min(left, p.kept_window);
            for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
                const int most = tier == TKV_TIER_HOT ? s->hot : tier == TKV_TIER_WARM ? s->warm : left;
                bytes[level] += (double)tkvi_min(left, most) * (double)h->bytes[s->key[tier]].total;
                left -= tkvi_min(left, most);
            }
        }
    }
    for (level = 1; level < h->n_levels; level++)
        if (bytes[level] > bytes[level - 1]) return level;
    return 0;
}

/* A bound of the bytes of a KV head in one version of the tables and in the statistics. */
static size_t tkvi_most_head_bytes(const tkvi_derived_config *h) {
    const size_t products = h->query_parts ? tkvi_n_products(h->widest.head_dim) : 0;
    return 65536u + products * (sizeof(int64_t) + sizeof(uint16_t));
}

/* Moves *at behind a layer's parts of the arrays of all layers. */
static void tkvi_skip_layer(tkvi_places *at, const tkv_config *cfg, const tkvi_plan *p) {
    tkvi_skip_places(at, &p->geometry);
    at->token_states += tkvi_states_bytes(&cfg->format, &p->geometry, p->token_parts);
    at->query_states += tkvi_states_bytes(&cfg->format, &p->geometry, p->query_parts);
}

/* Fills in `h`. The fields of the config must be valid. */
static tkv_status tkvi_derive_config(const tkv_config *cfg, tkvi_derived_config *h) {
    int64_t of_key[TKVI_MAX_LAYOUTS] = {0}, of_class[TKVI_MAX_LAYOUTS] = {0};
    int i, c, n, level, learns, hot[TKVI_MAX_LAYOUTS] = {0};
    tkvi_tier_spec tier_specs[TKV_MAX_LEVELS];
    tkvi_plan p;
    memset(h, 0, sizeof *h);
    h->cfg = *cfg;
    tkvi_fill_defaults(&h->cfg);
    tkvi_ladder_of(cfg, h);
    (void)tkvi_pressure_for(cfg, &h->cfg.budget.pressure);
    h->first_level = tkvi_max(h->cfg.budget.pressure.min_level,
                              tkvi_min(h->cfg.budget.pressure.max_level, h->first_level));
    for (i = 0; i < h->cfg.model.n_layers; i++) {
        if (tkvi_plan_of(h, i, &p, tier_specs)) return TKV_ERR_CONFIG;
        tkvi_widen_geometry(&h->widest, &p.geometry);
        tkvi_skip_layer(&h->end, &h->cfg, &p);
        if (p.stored_layer != i) continue;
        h->n_stored_heads += (size_t)p.geometry.n_kv_heads;
        h->own_heads +=
            (size_t)p.geometry.n_kv_heads * (size_t)tkvi_own_layouts(tier_specs, h->n_levels, &h->n_layouts);
        for (level = 0; level < h->n_levels; level++)
            for (n = level == h->first_level && h->cfg.budget.adapt ? h->n_levels : 1; n > 0; n--)
                tkvi_usual_blocks(h, &p, &tier_specs[level], of_key); /* pages suit the given plan most */
        hot[p.now.key[TKV_TIER_HOT]] = 1;
        h->n_stored++;
    }
    for (i = 0; i < h->cfg.model.n_layers; i++) {
        if (tkvi_rope_layer(&h->cfg, i) != i) continue;
        h->n_ropes++;
        h->rope_lanes = tkvi_max(h->rope_lanes, tkvi_rope_lanes(tkvi_rope_of_layer(&h->cfg, i),
                                                                tkvi_layer_geometry(&h->cfg, i).head_dim));
        h->rope_bytes += tkvi_align_up(tkvi_rope_bytes(tkvi_rope_of_layer(&h->cfg, i), h->any_fixed));
    }
    h->n_layouts += h->n_keys;
    learns = h->any_shared || h->token_parts || h->query_parts;
    if (h->n_layouts > 0xffff ||
        (learns && tkvi_multiply_sizes(h->end.heads, tkvi_most_head_bytes(h)) == TKVI_TOO_MANY))
        return TKV_ERR_CONFIG;
    for (i = 0; i < h->n_keys; i++) {
        if (!tkvi_key_bytes(&h->cfg, h->key[i], &h->bytes[i])) return TKV_ERR_CONFIG;
        for (c = 0; c < h->n_classes; c++)
            if (h->size_class[c].slot_bytes == h->bytes[i].total) break;
        h->size_class[c].slot_bytes = h->bytes[i].total;
        if (c == h->n_classes) h->n_classes++;
        h->class_of[i] = c;
        of_class[c] += of_key[i];
        if (hot[i] && h->bytes[i].total / (size_t)h->key[i].n_kv_heads > h->hot_record)
            h->hot_record = h->bytes[i].total / (size_t)h->key[i].n_kv_heads;
    }
    if (h->cfg.budget.ladder) h->looser_level = tkvi_find_looser_level(h);
    for (c = 0; c < h->n_classes; c++) /* blocks, mean of all levels */
        of_class[c] = (of_class[c] + h->n_levels - 1) / h->n_levels;
    h->recode_pages = h->cfg.budget.bytes ? tkvi_recode_pages_of(h) : 0;
    h->page_bytes = tkvi_page_size(h->size_class, of_class, h->n_classes, h->recode_pages);
    for (c = 0; c < h->n_classes; c++)
        h->size_class[c].slots = tkvi_slots_of(&h->size_class[c], h->page_bytes);
    return TKV_OK;
}

/* The reason why from_tokens of a level is wrong, or NULL. */
static const char *tkvi_from_tokens_fault(const tkv_config *cfg, int level) {
    const int n = cfg->budget.ladder[level].from_tokens,
              before = level ? cfg->budget.ladder[level - 1].from_tokens : 0;
    if (!TKVI_HAS_METER) return n ? "TKV_NO_METER leaves this out" : NULL;
    if (n < 0 || n > TKVI_FOREVER) return "it must be 1 to 2^30 - 1, or 0 for none";
    if (n && level == 0) return "it must be 0: a cache without tokens has this level";
    if (n && (n <= before || (level > 1 && before == 0)))
        return "lengths must rise from level 1 on, without gaps";
    return n && cfg->budget.bytes ? "it must be 0 with budget.bytes: there the pressure decides" : NULL;
}

static tkv_status tkvi_validate_ladder(const tkv_config *cfg, char *reason, size_t size) {
    tkv_status st = TKV_OK;
    const char *wrong;
    int i;
    for (i = 0; i < cfg->budget.n_levels && !st; i++) {
        tkv_layer_config c;
        char owner[32];
        memset(&c, 0, sizeof c);
        c.hot_tokens = cfg->budget.ladder[i].hot_tokens;
        c.warm_tokens = cfg->budget.ladder[i].warm_tokens;
        c.warm = cfg->budget.ladder[i].warm;
        c.archive = cfg->budget.ladder[i].archive;
        tkvi_name_entry(owner, sizeof owner, "budget.ladder[", i);
        st = tkvi_validate_tiers(&c, owner, reason, size);
        wrong = st ? NULL : tkvi_from_tokens_fault(cfg, i);
        if (wrong)
            st = tkvi_bad_in(reason, size, owner, "from_tokens", cfg->budget.ladder[i].from_tokens, wrong);
        if (wrong && !TKVI_HAS_METER) st = TKV_ERR_UNSUPPORTED;
    }
    return st;
}

/* Refuses levels that are in no order, and a meter.target that has no levels to choose from. Only lengths may choose
 * among levels that are not in the order of their bytes. */
static tkv_status tkvi_validate_order(const tkvi_derived_config *h, char *reason, size_t size) {
    const tkv_budget_config *b = &h->cfg.budget;
    const int by_length = h->n_levels > 1 && h->ladder[1].from_tokens;
    const char *wrong = NULL;
    if (h->looser_level && !by_length) {
        char level[64], *last = level;
        tkvi_name_entry(level, sizeof level, "budget.ladder[", h->looser_level);
        while (last[1]) last++;
        *last = 0; /* the point of a field */
        return tkvi_bad_text(
            reason, size, level,
            " takes more bytes than the level before it; levels must go from loose to tight");
    }
    if (!TKVI_HAS_METER || tkvi_bits(h->cfg.meter.target) == 0) return TKV_OK;
    if (b->bytes) wrong = "it must be 0 with budget.bytes: there the pressure decides";
    else if (b->pressure.min_level >= b->pressure.max_level)
        wrong = "it needs levels to choose from: budget.adapt, or a ladder of two levels or more";
    else if (h->looser_level) wrong = "it must be 0 where levels by length do not go from loose to tight";
    return wrong ? tkvi_bad(reason, size, "meter.target", (double)h->cfg.meter.target, wrong) : TKV_OK;
}

/* The reason why cfg->tiers.n_anchors is wrong, or NULL. Anchors stand beside the sinks, and they never expire. */
static const char *tkvi_anchor_fault(const tkv_config *cfg) {
    tkv_format_pair unused[TKV_TIER_COUNT];
    tkv_level none;
    int i;
    memset(&none, 0, sizeof none);
    for (i = 0; i < cfg->model.n_layers; i++) {
        const tkvi_plan p = tkvi_resolve(cfg, &none, i, unused);
        if (p.stored_layer < 0) continue;
        if (p.window) return "it must be 0 where a layer has a window";
        if (p.stored_layer == i && p.sink == 0) return "it must be 0 where a layer has no sinks";
    }
    return NULL;
}

/* The reason why a field of cfg->promotion is wrong, or NULL. */
static const char *tkvi_promotion_fault(const tkv_config *cfg, const char **field, double *value) {
    tkv_promotion_state state;
    tkvi_promoting unused;
    memset(&state, 0, sizeof state);
    state.cfg = cfg->promotion;
    *field = "every";
    *value = cfg->promotion.every;
    if (cfg->promotion.every < 0) return "it must be a number of tokens, or 0";
    if (cfg->promotion.every && !cfg->offload.write) return "it needs offload.write, which has the sources";
    if (cfg->promotion.every && !cfg->importance.sample_every) return "it needs importance.sample_every";
    *field = "per_step";
    *value = cfg->promotion.per_step;
    return tkvi_promoting_begin(&unused, &state, 0)
               ? NULL
               : "it must be 0 to 64, threshold a finite number, and cooldown 0, TKV_OFF or steps";
}

/* Checks the fields that show whether the struct itself is usable. */
static tkv_status tkvi_validate_host(const tkv_config *cfg, char *reason, size_t size) {
    if (cfg->start_canary || cfg->end_canary)
        return tkvi_bad(
            reason, size, cfg->start_canary ? "start_canary" : "end_canary", 1,
            "it must be 0: fill the config with zeros before setting fields, and use one header everywhere");
    if (!cfg->host.allocator.alloc != !cfg->host.allocator.release)
        return tkvi_bad(reason, size, "host.allocator", cfg->host.allocator.alloc ? 1 : 0,
                        "alloc and release must both be set, or neither");
    return TKV_OK;
}

/* Finds a format of K that cannot store the heads of a layer. NULL: there is none. *channels: of the heads. Formats of
 * V take all. */
static const char *tkvi_find_too_wide(const tkvi_derived_config *h, int *channels) {
    int i;
    for (i = 0; i < h->n_keys; i++) {
        const char *wrong = tkvi_formats[h->key[i].pair.k].family->too_wide;
        *channels = h->key[i].head_dim;
        if (wrong && *channels > 256) return wrong;
    }
    return NULL;
}

/* Finds a side whose format cannot have the scales of the options, and returns the error. NULL: there is none. */
static const char *tkvi_find_unread_scales(const tkvi_derived_config *h, tkv_side side) {
    int i;
    for (i = 0; i < h->n_keys; i++) {
        const tkvi_format *f = &tkvi_formats[side == TKV_K ? h->key[i].pair.k : h->key[i].pair.v];
        if (tkvi_has_scales(f, &h->cfg.format, side) || (side == TKV_V && h->key[i].v_in_k)) continue;
        return f->scales[side] >> TKV_SCALES_TOKEN & 1
                   ? "no kernel reads a scale per channel of this side: it must be group or token"
                   : "no kernel reads a scale per token of keys in Q8, KIVI and SQUAT: it must be group or "
                     "channel, or take SUBSPACE formats";
    }
    return NULL;
}

/* Finds a format of K that cannot hold V as well. Returns it, or TKV_FORMAT_DEFAULT if there is none. */
static tkv_format tkvi_find_without_v(const tkvi_derived_config *h) {
    int i;
    for (i = 0; i < h->n_keys; i++) {
        const tkvi_format *k = &tkvi_formats[h->key[i].pair.k];
        if (h->key[i].v_in_k && (k->family != &tkvi_plain_family || k->stored == TKVI_AS_DECODED))
            return h->key[i].pair.k;
    }
    return TKV_FORMAT_DEFAULT;
}

/* Checks every field, and fills in the derived config of a valid config. */
static tkv_status tkvi_validate(const tkv_config *cfg, tkvi_derived_config *shape, char *reason,
                                size_t size) {
    const char *wrong, *field;
    const tkvi_row *option;
    double value;
    tkv_layer_config wide;
    tkv_status st;
    if (reason && size) *reason = 0;
    if (!cfg) return tkvi_give_reason(TKV_ERR_ARG, "the config is missing", reason, size);
#define TKVI_RANGE_(field, lo, hi, want)                                                                     \
    if (cfg->field < (lo) || cfg->field > (hi)) return tkvi_bad(reason, size, #field, cfg->field, want)
    st = tkvi_validate_host(cfg, reason, size);
    if (st) return st;
    st = tkvi_validate_features(cfg, reason, size);
    if (st) return st;
    TKVI_RANGE_(model.n_layers, 1, TKVI_MAX_LAYERS, "it must be 1 to 4096");
    TKVI_RANGE_(model.n_heads, 1, 65536, "it must be 1 to 65536");
    TKVI_RANGE_(model.n_kv_heads, 0, 65536, "it must be 1 to 65536, or 0 for as many as model.n_heads");
    if (cfg->model.n_kv_heads && cfg->model.n_heads % cfg->model.n_kv_heads)
        return tkvi_bad(reason, size, "model.n_heads", cfg->model.n_heads,
                        "it must be a multiple of model.n_kv_heads");
    TKVI_RANGE_(model.head_dim, 1, TKV_MAX_HEAD_DIM, "it must be 1 to 576");
    TKVI_RANGE_(model.v_head_dim, 0, TKV_MAX_HEAD_DIM, "it must be 1 to 576, or 0 for model.head_dim");
    TKVI_RANGE_(model.v_in_k, 0, 1, "it must be 0 or 1");
    if (cfg->model.v_in_k && cfg->model.v_head_dim > cfg->model.head_dim)
        return tkvi_bad(reason, size, "model.v_head_dim", cfg->model.v_head_dim,
                        "it must be at most head_dim, where V is inside K");
    if (!tkvi_is_finite(cfg->model.scale) || cfg->model.scale < 0.0f)
        return tkvi_bad(reason, size, "model.scale", (double)cfg->model.scale,
                        "it must be a positive number, or 0 for 1/sqrt(head_dim)");
    TKVI_RANGE_(limits.max_seqs, 0, 1 << 20, "it must be 1 to 2^20, or 0 for 1");
    TKVI_RANGE_(limits.max_tokens, 0, TKVI_FOREVER, "it must be 1 to 2^30 - 1, or 0 to grow");
    TKVI_RANGE_(limits.max_append, 0, 1 << 20, "it must be 1 to 2^20, or 0 for 512");
    TKVI_RANGE_(limits.max_states, 0, 1 << 16, "it must be 1 to 65536, or 0 for 64");
    option = tkvi_find_invalid_option(&cfg->format);
    if (option)
        return tkvi_bad_in(reason, size, "format.", option->name,
                           tkvi_member_int(&cfg->format, option->offset), option->want);
    TKVI_RANGE_(budget.discard, 0, 1, "it must be 0 or 1");
    TKVI_RANGE_(budget.adapt, 0, 1, "it must be 0 or 1");
    if (TKVI_HAS_METER && cfg->budget.adapt && (cfg->budget.bytes || cfg->budget.ladder))
        return tkvi_bad(reason, size, "budget.adapt", 1,
                        cfg->budget.bytes ? "it must be 0 with budget.bytes: there the pressure decides"
                                          : "it must be 0 with a ladder");
    if (TKVI_HAS_METER && tkvi_bits(cfg->meter.target) != 0 &&
        (!tkvi_is_finite(cfg->meter.target) || cfg->meter.target < .01f || cfg->meter.target > .9999f ||
         !cfg->meter.heads))
        return tkvi_bad(reason, size, "meter.target", (double)cfg->meter.target,
                        cfg->meter.heads ? "it must be .01 to .9999, or 0 for none"
                                         : "it must be 0 without meter.heads");
    st = tkvi_validate_rope(&cfg->model.rope, cfg->model.head_dim, "model.", reason, size);
    if (st) return st;
    if ((unsigned)cfg->host.nonfinite > TKV_NONFINITE_SATURATE)
        return tkvi_bad(reason, size, "host.nonfinite", (int)cfg->host.nonfinite,
                        "it must be a tkv_nonfinite");
    TKVI_RANGE_(host.precise, 0, 1, "it must be 0 or 1");
    TKVI_RANGE_(host.wipe_freed, 0, 1, "it must be 0 or 1");
    TKVI_RANGE_(meter.heads, 0, TKV_MAX_METER_HEADS, "it must be 1 to 64, or 0 for no meter");
    if (cfg->meter.tokens != 0 && (cfg->meter.tokens < 2 * TKVI_BLOCK || cfg->meter.tokens > TKVI_FOREVER))
        return tkvi_bad(reason, size, "meter.tokens", cfg->meter.tokens,
                        "it must be 128 to 2^30 - 1, or 0 for 2048");
    TKVI_RANGE_(budget.n_levels, 0, TKV_MAX_LEVELS, "it must be 1 to 8, the entries of ladder");
    if (!cfg->budget.ladder != !cfg->budget.n_levels)
        return tkvi_bad(reason, size, "budget.n_levels", cfg->budget.n_levels,
                        "ladder and n_levels must both be set, or neither");
    TKVI_RANGE_(meter.every, 0, TKVI_FOREVER, "it must be 1 to 2^30 - 1, or 0 for what costs little");
    wrong = tkvi_evict_fault(&cfg->evict, &field, &value);
    if (wrong) return tkvi_bad(reason, size, field, value, wrong);
    TKVI_RANGE_(tiers.n_anchors, 0, TKVI_MAX_ANCHORS, "it must be 1 to 1024, or 0 for none");
    TKVI_RANGE_(importance.sample_every, 0, TKVI_FOREVER,
                "it must be 1 to 2^30 - 1, or 0 for what the policy needs");
    {
        tkv_importance_config importance;
        if (TKVI_HAS_EVICT && !tkvi_importance_fill(&cfg->importance, &importance))
            return tkvi_bad(reason, size, "importance", (int)cfg->importance.strategy,
                            "one of its fields is out of range (tkv_importance_config)");
    }
    if ((unsigned)cfg->host.isa >= TKV_ISA_COUNT)
        return tkvi_bad(reason, size, "host.isa", (int)cfg->host.isa, "it must be a tkv_isa");
#undef TKVI_RANGE_
    if (!cfg->offload.write != !cfg->offload.read)
        return tkvi_bad(reason, size, "offload.write", cfg->offload.write ? 1 : 0,
                        "write and read must both be set, or neither");
    wrong = TKVI_HAS_EVICT && TKVI_HAS_OFFLOAD ? tkvi_promotion_fault(cfg, &field, &value) : NULL;
    if (wrong) return tkvi_bad_in(reason, size, "promotion.", field, value, wrong);
    if (cfg->offload.keep_exact < 0 || cfg->offload.keep_exact > 1)
        return tkvi_bad(reason, size, "offload.keep_exact", cfg->offload.keep_exact, "it must be 0 or 1");
    if (cfg->recompute.compute) {
        tkv_remat_config cost;
        wrong = tkvi_recompute_cost(cfg, &cost);
        if (wrong) return tkvi_bad_text(reason, size, "recompute.cost: ", wrong);
    }
    wide = tkvi_cache_wide(cfg);
    st = tkvi_validate_tiers(&wide, "tiers.", reason, size);
    if (!st) st = tkvi_validate_window(&wide, wide.sink_tokens != TKV_OFF, "model.", reason, size);
    if (!st && cfg->layers) st = tkvi_validate_layers(cfg, reason, size);
    if (!st && cfg->budget.ladder) st = tkvi_validate_ladder(cfg, reason, size);
    if (!st) {
        tkv_pressure_config full;
        wrong = tkvi_pressure_for(cfg, &full);
        if (wrong) st = tkvi_bad_text(reason, size, "budget.pressure: ", wrong);
        if (wrong && tkvi_jump_is_left_out(&cfg->budget.pressure)) st = TKV_ERR_UNSUPPORTED;
    }
    if (TKVI_HAS_EVICT && !st && cfg->tiers.n_anchors && tkvi_anchor_fault(cfg))
        return tkvi_bad(reason, size, "tiers.n_anchors", cfg->tiers.n_anchors, tkvi_anchor_fault(cfg));
    if (!st && tkvi_derive_config(cfg, shape))
        return tkvi_bad(reason, size, "layers", cfg->model.n_layers,
                        "their formats and sinks need too many block layouts, or too large blocks");
    if (!st) {
        int channels, side;
        wrong = tkvi_find_too_wide(shape, &channels);
        if (wrong) return tkvi_bad(reason, size, "head_dim", channels, wrong);
        for (side = TKV_K; side <= TKV_V; side++) {
            wrong = tkvi_find_unread_scales(shape, (tkv_side)side);
            if (wrong)
                return tkvi_bad_in(reason, size, "format.", side == TKV_K ? "k_scales" : "v_scales",
                                   tkvi_scales_of(&cfg->format, (tkv_side)side), wrong);
        }
        if (tkvi_find_without_v(shape))
            return tkvi_bad(
                reason, size, "v_in_k", 1,
                "formats of K in all tiers and layers of it must be F32, F16, BF16, Q8, KIVI or A; "
                "those of V are not used");
    }
    if (!st && shape->needs_rope) {
        const tkv_rope *rope = tkvi_rope_of_layer(cfg, shape->needs_rope_layer);
        char owner[32] = "model.";
        if (rope != &cfg->model.rope)
            tkvi_name_entry(owner, sizeof owner, "layers[", shape->needs_rope_layer);
        if (!tkvi_why_immobile(rope))
            return tkvi_bad_in(reason, size, owner, "rope.first", rope->first,
                               "it must be 0 with formats that undo RoPE");
        return tkvi_bad_in(reason, size, owner, rope->kind ? "rope.kind" : "rope.dim",
                           rope->kind ? (int)rope->kind : rope->dim, shape->needs_rope);
    }
    if (!st) st = tkvi_validate_order(shape, reason, size);
    if (TKVI_HAS_BLOCKS_OUTSIDE_RAM && !st &&
        (cfg->offload.write ||
         cfg->recompute.compute)) { /* attention has a fetch buffer of this size on its stack */
        int i;
        for (i = 0; i < shape->n_keys; i++) {
            tkvi_record r;
            tkvi_record_init(&r, &shape->cfg, shape->key[i], NULL, NULL);
            if (r.k.bytes > TKVI_OFFLOAD_SIDE || r.v.bytes > TKVI_OFFLOAD_SIDE)
                return tkvi_bad(
                    reason, size, cfg->offload.write ? "offload.write" : "recompute.compute", 1,
                    "blocks outside RAM have at most 256 channels of K or V in 16 bits, and 128 in F32");
        }
    }
    return st;
}

/* >>tables: arrays in one piece of memory, each at a multiple of 64 bytes */
typedef struct tkvi_table_sizes {
    size_t plan, tier_specs, layout, size_class, record, split, current, rope;
} tkvi_table_sizes;

static size_t tkvi_table_sizes_of(const tkvi_derived_config *h, tkvi_table_sizes *s) {
    size_t layers = (size_t)h->cfg.model.n_layers;
    s->plan = tkvi_align_up(layers * sizeof(tkvi_plan));
    s->tier_specs = tkvi_align_up(layers * (size_t)h->n_levels * sizeof(tkvi_tier_spec));
    s->layout = tkvi_align_up((size_t)h->n_layouts * sizeof(tkvi_layout));
    s->size_class = tkvi_align_up((size_t)h->n_classes * sizeof(tkvi_class));
    s->record = tkvi_align_up(h->key_heads * sizeof(tkvi_record));
    s->split = h->any_shared ? tkvi_align_up((size_t)h->widest.n_kv_heads * sizeof(int)) : 0;
    s->current = tkvi_align_up(layers);
    s->rope = tkvi_align_up((size_t)h->n_ropes * sizeof(tkvi_rope)) + h->rope_bytes;
    return s->plan + s->tier_specs + s->layout + s->size_class + s->record + s->split + s->current + s->rope;
}

static size_t tkvi_tables_bytes(const tkvi_derived_config *h) {
    tkvi_table_sizes s;
    return tkvi_table_sizes_of(h, &s);
}

/* The same for one version of the learned tables. */
typedef struct tkvi_version_sizes {
    size_t record, head, importance, channel, mean;
} tkvi_version_sizes;

/* own_heads and end: as in tkvi_derived_config. shared: 1 if heads share bytes. */
static size_t tkvi_version_sizes_of(size_t own_heads, const tkvi_places *end, int shared,
                                    tkvi_version_sizes *s) {
    s->record = tkvi_align_up(own_heads * sizeof(tkvi_record));
    s->head = shared ? tkvi_align_up(end->heads * sizeof(tkvi_head)) : 0;
    s->importance = shared ? tkvi_align_up(end->pads) : 0;
    s->channel = shared ? tkvi_align_up(end->orders) : 0;
    s->mean = shared ? tkvi_align_up(end->pads * sizeof(float)) : 0;
    return s->record + s->head + s->importance + s->channel + s->mean + end->token_states;
}

static size_t tkvi_version_bytes(const tkvi_derived_config *h) {
    tkvi_version_sizes s;
    return tkvi_version_sizes_of(h->own_heads, &h->end, h->any_shared, &s);
}

/* The arrays of one head in a version of a layer's table, to be filled in. */
typedef struct tkvi_head_arrays {
    uint8_t *importance, *order; /* [k_pad]; tkvi_order_bytes */
    float *mean;                 /* [k_pad] */
} tkvi_head_arrays;

static tkvi_head_arrays tkvi_head_arrays_of(const tkvi_tables *t, int layer, int version, int head) {
    const tkvi_version *v = &t->version[version];
    const tkvi_plan *p = &t->plan[layer];
    const size_t at = p->at.pads + (size_t)head * (size_t)p->geometry.k_pad;
    tkvi_head_arrays to;
    to.importance = v->importance + at;
    to.order = v->channel + p->at.orders + (size_t)head * tkvi_order_bytes(p->geometry.k_pad);
    to.mean = v->mean + at;
    return to;
}

/* Places the arrays of a version in `mem`, version_bytes of zeros. */
static void tkvi_version_build(tkvi_tables *t, int version, uint8_t *mem) {
    tkvi_version *v = &t->version[version];
    tkvi_version_sizes s;
    int i, layer, head;
    size_t own_heads = 0;
    v->bytes = mem;
    v->record = (tkvi_record *)(void *)mem;
    for (i = t->n_keys + version; i < t->n_layouts; i += TKVI_VERSIONS) {
        t->layout[i].record = v->record + own_heads;
        own_heads += (size_t)t->layout[i].n_kv_heads;
    }
    (void)tkvi_version_sizes_of(own_heads, &t->end, t->any_shared, &s);
    mem += s.record;
    v->states = mem + s.head + s.importance + s.channel + s.mean;
    if (!t->any_shared) return;
    v->head = (tkvi_head *)(void *)mem;
    v->importance = mem + s.head;
    v->channel = v->importance + s.importance;
    v->mean = (float *)(void *)(v->channel + s.channel);
    for (layer = 0; layer < t->cfg.model.n_layers; layer++) {
        const tkvi_plan *p = &t->plan[layer];
        for (head = 0; head < p->geometry.n_kv_heads; head++) {
            const tkvi_head_arrays to = tkvi_head_arrays_of(t, layer, version, head);
            tkvi_head *h = &v->head[p->at.heads + (size_t)head];
            h->importance = to.importance;
            h->order = to.order;
            h->mean = to.mean;
        }
    }
}

/* [n_kv_heads]: the heads in one version of a layer's table. */
static tkvi_head *tkvi_heads_of(const tkvi_tables *t, int layer, int version) {
    return t->version[version].head + t->plan[layer].at.heads;
}

static void tkvi_init_layout(tkvi_layout *c, const tkvi_derived_config *h, int key) {
    c->key = key;
    c->pair = h->key[key].pair;
    c->tokens = h->key[key].tokens;
    c->n_kv_heads = h->key[key].n_kv_heads;
    c->size_class = h->class_of[key];
    c->bytes = h->bytes[key];
}

/* Fills in the records of a layout from a layer's table. heads: [n_kv_heads], or NULL for equal shares. g: of the
 * layer, or of the key. rope: of the layer. */
static void tkvi_share_layout(const tkvi_tables *t, tkvi_layout *c, const tkvi_geometry *g,
                              const tkvi_head *heads, const tkvi_rope *rope) {
    const tkvi_format *k = &tkvi_formats[c->pair.k], *v = &tkvi_formats[c->pair.v];
    const tkv_config *cfg = &t->cfg;
    const int n = c->n_kv_heads, unit = cfg->format.allocation_unit / 4;
    int head;
    size_t at = 0;
    tkvi_record_init(&c->record[0], cfg, tkvi_layout_key_of(g, c->pair, c->tokens), NULL, NULL);
    c->record[0].k.rope = tkvi_undone_rope(k->family, &cfg->format, rope);
    for (head = 1; head < n; head++) c->record[head] = c->record[0];
    if (heads && k->shared) {
        tkvi_share_k(heads, n, k->bits, g->head_dim, g->k_pad, c->record[0].k.has_outlier, unit, t->split);
        for (head = 0; head < n; head++) {
            tkvi_share share;
            memset(&share, 0, sizeof share);
            tkvi_choose_widths(&heads[head], g->k_pad, unit, t->split[head], &share.tiles);
            share.top = heads[head].k_top;
            share.order = heads[head].order;
            share.mean = heads[head].mean;
            share.importance = heads[head].importance;
            share.v_in_k = g->v_in_k;
            tkvi_side_init(&c->record[head].k, k, TKV_K, g->head_dim, cfg->format.group_size, c->tokens,
                           &share);
        }
    }
    if (heads && v->shared && !g->v_in_k) {
        tkvi_share_v(heads, n, v->bits, t->split);
        for (head = 0; head < n; head++) {
            tkvi_share share;
            memset(&share, 0, sizeof share);
            share.half_bits = t->split[head];
            share.top = heads[head].v_top;
            tkvi_side_init(&c->record[head].v, v, TKV_V, g->v_head_dim, cfg->format.group_size, c->tokens,
                           &share);
        }
    }
    for (head = 0; head < n; head++) {
        tkvi_record *r = &c->record[head];
        r->at = at;
        tkvi_place_v(r, g->v_in_k, g->v_head_dim);
        at += r->k.bytes + r->v.bytes;
    }
}

/* The state of a family that learns from tokens, in a version of the layer's table. version -1: without bytes. */
static tkvi_family_state tkvi_table_state_of(const tkvi_tables *t, const tkvi_family *f, int layer,
                                             int version) {
    const tkvi_plan *p = &t->plan[layer];
    uint8_t *states = version < 0 ? NULL : t->version[version].states + p->at.token_states;
    return tkvi_state_of(&t->cfg.format, &p->geometry, p->rope, states, p->token_parts, f);
}

/* Connects the sides of a layout to the states of their families in a version of the layer's table. */
static void tkvi_connect_states(const tkvi_tables *t, tkvi_layout *c, int layer, int version) {
    int i;
    for (i = 0; i < 2 * c->n_kv_heads; i++) {
        tkvi_side *s = i % 2 ? &c->record[i / 2].v : &c->record[i / 2].k;
        const tkvi_family *f = s->format->family;
        tkvi_family_state state;
        if (!TKVI_HAS_TOKEN_LEARNERS || !f->learn_tokens) continue;
        state = tkvi_table_state_of(t, f, layer, version);
        s->layer_state = state.layer;
        s->head_state = tkvi_head_state(&state, f, i / 2);
    }
}

/* Sets the RoPE of a layer's plan. Plans of earlier layers have theirs. *next: memory for the arrays of a new one. */
static void tkvi_place_rope(tkvi_tables *t, const tkvi_derived_config *h, int layer, uint8_t **next) {
    tkvi_plan *p = &t->plan[layer];
    const tkv_rope *rope = tkvi_rope_of_layer(&h->cfg, layer);
    const int first = tkvi_rope_layer(&h->cfg, layer);
    if (p->stored_layer < 0) return;
    if (p->stored_layer != layer) {
        p->rope = t->plan[p->stored_layer].rope;
        p->immobile = t->plan[p->stored_layer].immobile;
        return;
    }
    p->immobile = tkvi_why_immobile(rope);
    if (first < 0) return;
    if (first == layer) {
        tkvi_rope_make(&t->rope[t->n_ropes], rope, p->geometry.head_dim, h->any_fixed, *next);
        *next += tkvi_align_up(tkvi_rope_bytes(rope, h->any_fixed));
    }
    p->rope = first == layer ? &t->rope[t->n_ropes++] : t->plan[first].rope;
}

/* Builds the tables in `mem`, tkvi_tables_bytes of zeros. */
static void tkvi_tables_build(tkvi_tables *t, tkvi_derived_config *h, uint8_t *mem) {
    tkvi_table_sizes s;
    tkvi_record *record;
    tkvi_places end;
    int i, n, v, next = h->n_keys;
    memset(&end, 0, sizeof end);
    (void)tkvi_table_sizes_of(h, &s);
    t->cfg = h->cfg;
    t->end = h->end;
    t->n_keys = h->n_keys;
    t->n_layouts = h->n_layouts;
    t->n_classes = h->n_classes;
    t->any_shared = h->any_shared;
    t->token_parts = h->token_parts;
    t->query_parts = h->query_parts;
    t->version_bytes = tkvi_version_bytes(h);
    t->page_bytes = h->page_bytes;
    t->any_rotated = h->any_rotated;
    t->n_levels = h->n_levels;
    for (i = 0; i < h->n_levels; i++) t->from_tokens[i] = h->ladder[i].from_tokens;
    t->looser_level = h->looser_level;
    t->recode_pages = h->recode_pages;
    t->plan = (tkvi_plan *)(void *)mem;
    t->tier_specs = (tkvi_tier_spec *)(void *)(mem += s.plan);
    t->layout = (tkvi_layout *)(void *)(mem += s.tier_specs);
    t->size_class = (tkvi_class *)(void *)(mem += s.layout);
    record = (tkvi_record *)(void *)(mem += s.size_class);
    mem += s.record;
    t->split = h->any_shared ? (int *)(void *)mem : NULL;
    t->current_version = (int8_t *)(mem += s.split);
    memset(t->current_version, -1, (size_t)h->cfg.model.n_layers);
    t->has_fixed_slots = h->any_fixed;
    t->rope = (tkvi_rope *)(void *)(mem += s.current);
    mem += s.rope - h->rope_bytes;
    for (i = 0; i < h->n_keys; i++) {
        tkvi_init_layout(&t->layout[i], h, i);
        t->layout[i].record = record;
        record += h->key[i].n_kv_heads;
    }
    for (i = 0; i < h->n_classes; i++) t->size_class[i] = h->size_class[i];
    for (i = 0; i < h->cfg.model.n_layers; i++) {
        tkvi_plan *p = &t->plan[i];
        tkvi_tier_spec *tier_specs = tkvi_tier_specs_of(t, i);
        (void)tkvi_plan_of(h, i, p, tier_specs); /* h has all keys, so none is added */
        p->at = end;
        tkvi_skip_layer(&end, &h->cfg, p);
        tkvi_place_rope(t, h, i, &mem);
        if (p->stored_layer != i) continue;
        (void)tkvi_own_layouts(tier_specs, h->n_levels, &next);
        for (n = 0; n < h->n_levels * TKV_TIER_COUNT; n++)
            for (v = 0; v < TKVI_VERSIONS && tier_specs[n / TKV_TIER_COUNT].needs_table[n % TKV_TIER_COUNT];
                 v++)
                tkvi_init_layout(&t->layout[tier_specs[n / TKV_TIER_COUNT].layout[n % TKV_TIER_COUNT] + v], h,
                                 tier_specs[n / TKV_TIER_COUNT].key[n % TKV_TIER_COUNT]);
    }
    tkvi_take_level(t, h->first_level);
    for (i = 0; i < h->n_keys; i++) { /* the others wait for a table */
        tkvi_geometry g;
        memset(&g, 0, sizeof g);
        g.n_kv_heads = h->key[i].n_kv_heads;
        g.head_dim = h->key[i].head_dim;
        g.v_head_dim = h->key[i].v_head_dim;
        g.v_in_k = h->key[i].v_in_k;
        tkvi_set_pads(&g);
        tkvi_share_layout(t, &t->layout[i], &g, NULL, NULL);
    }
    t->cfg.layers = NULL;
    t->cfg.budget.ladder = NULL;
    t->cfg.model.rope.frequencies = NULL;
}

#endif /* TKVI_CACHE_PLAN_H */
