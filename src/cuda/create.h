/*
 * create.h - the handle, the layout of device memory, and the sides that kernels read.
 *
 * The handle contains a host cache without tokens. Its plans, codings and tables have the same form as in the caches
 * of import and export. Pieces of device memory begin at multiples of 256 bytes:
 *
 *     cache: flags | layers [n_layers] | lists [n_layers][n_seqs] | for each layer with blocks:
 *            versions [n_seqs][max_blocks] | sides | order, importance, mean [TKVI_VERSIONS][n_kv_heads][head_dim] |
 *            regions [n_seqs][ring] blocks
 *     work:  partial results of attention (attend.h)
 */
#ifndef TKVCU_CREATE_H
#define TKVCU_CREATE_H

#include "append.h"
#include "prefill.h"

#define TKVCU_ALIGN 256u

struct tkvcu {
    tkv_cache *host;  /* without tokens */
    tkvcu_view *view; /* [n_layers] */
    /* [n_layers] bit v: blocks may be coded with table version v */
    uint8_t *used_versions;
    /* [n_layers] 1: an append was enqueued; a captured one may run again at any time */
    uint8_t *appended;
    tkvcu_layer *layer; /* device, [n_layers] */
    tkvcu_list *lists;  /* device, [n_layers][n_seqs] */
    uint32_t *flags;    /* device */
    uint8_t *staging;   /* host copy of a layer's sides and tables */
    tkvcu_attend_plan attend_plan;
    tkvcu_prefill_grid prefill[2];
    int n_seqs, max_tokens, max_queries;
    char error[160];
};

/* >>errors */
static tkv_status tkvcu_fail(tkvcu *cu, tkv_status status, const char *what, int64_t number,
                             const char *more) {
    tkvi_text t = tkvi_text_begin(cu->error, sizeof cu->error);
    tkvi_append_text(&t, what);
    if (more) {
        tkvi_append_text(&t, " ");
        tkvi_append_int(&t, number);
        tkvi_append_text(&t, more);
    }
    return status;
}

static tkv_status tkvcu_fail_text(tkvcu *cu, tkv_status status, const char *what, const char *which) {
    tkvi_text t = tkvi_text_begin(cu->error, sizeof cu->error);
    tkvi_append_text(&t, what);
    tkvi_append_text(&t, which);
    return status;
}

/* Stores the runtime's error text. */
static tkv_status tkvcu_check_cuda(tkvcu *cu, cudaError_t e) {
    return e == cudaSuccess ? TKV_OK : tkvcu_fail(cu, TKV_ERR_DEVICE, cudaGetErrorString(e), 0, NULL);
}

static tkv_status tkvcu_check_launch(tkvcu *cu) { return tkvcu_check_cuda(cu, cudaGetLastError()); }

/* >>supported configs */
static tkv_status tkvcu_refuse_config(char *reason, size_t size, const char *why, int layer) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_append_text(&t, why);
    if (layer >= 0) {
        tkvi_append_text(&t, ", layer ");
        tkvi_append_int(&t, layer);
    }
    return TKV_ERR_UNSUPPORTED;
}

/* Returns the kind of a format's sides; -1: not supported. */
static int tkvcu_find_kind(tkv_format f) {
    if (f == TKV_F16 || f == TKV_BF16) return TKVCU_EXACT;
    if (f >= TKV_Q8 && f <= TKV_KIVI2) return TKVCU_KIVI;
    if (f >= TKV_A40 && f <= TKV_A15) return TKVCU_A;
    return f >= TKV_R40 && f <= TKV_R10 ? TKVCU_R : -1;
}

static const char *tkvcu_check_formats(const tkv_config *cfg, tkv_format_pair pair, int exact) {
    const int k = tkvcu_find_kind(pair.k), v = tkvcu_find_kind(pair.v);
    if (k < 0 || v < 0) return "a format without a GPU kernel";
    if (exact != (k == TKVCU_EXACT) || exact != (v == TKVCU_EXACT))
        return "on a GPU, warm and archive tiers take A, R, KIVI and Q8 formats, hot tiers F16 and BF16";
    if ((k == TKVCU_KIVI || v == TKVCU_KIVI) && cfg->format.group_size != 64)
        return "KIVI and Q8 formats need cfg.format.group_size = 64";
    if (v == TKVCU_KIVI && cfg->format.v_scales != TKV_SCALES_GROUP)
        return "KIVI and Q8 formats need cfg.format.v_scales = TKV_SCALES_GROUP";
    return k == TKVCU_A && cfg->format.allocation_unit != 16
               ? "A formats need cfg.format.allocation_unit = 16"
               : NULL;
}

/* 1 if a layer has heads or channels that differ from the model's. */
static int tkvcu_has_mixed_layers(const tkv_config *cfg) {
    const tkvi_geometry model = tkvi_model_geometry(&cfg->model);
    int i;
    for (i = 0; cfg->layers && i < cfg->model.n_layers; i++) {
        const tkvi_geometry g = tkvi_layer_geometry(cfg, i);
        if (g.n_heads != model.n_heads || !tkvi_is_same_geometry(&g, &model)) return 1;
    }
    return 0;
}

/* 1 if a layer sees its sinks beyond its window. */
static int tkvcu_has_window_sinks(const tkv_config *cfg) {
    int i, has = cfg->model.window_sinks == 1;
    for (i = 0; cfg->layers && i < cfg->model.n_layers; i++) has |= cfg->layers[i].window_sinks == 1;
    return has;
}

static const char *tkvcu_check_config(const tkv_config *cfg) {
    const struct {
        int wrong;
        const char *why;
    } rule[] = {
        {cfg->model.head_dim != 64 && cfg->model.head_dim != 128, "head_dim must be 64 or 128"},
        {cfg->model.v_head_dim && cfg->model.v_head_dim != cfg->model.head_dim,
         "v_head_dim must be head_dim"},
        {cfg->model.n_kv_heads > 1024, "n_kv_heads must be at most 1024"},
        {tkvcu_has_mixed_layers(cfg), "all layers must have the heads and channels of the model"},
        {cfg->limits.max_seqs > 65535, "max_seqs must be at most 65535"},
        {cfg->model.n_heads >
             TKVCU_MAX_GROUP * (cfg->model.n_kv_heads ? cfg->model.n_kv_heads : cfg->model.n_heads),
         "a KV head must have at most 16 query heads"},
        {cfg->budget.bytes != 0 || cfg->budget.n_levels != 0 || cfg->budget.adapt,
         "budgets and ladders have no GPU kernels"},
        {cfg->evict.policy != TKV_EVICT_NONE || cfg->tiers.n_anchors || cfg->importance.sample_every,
         "eviction and anchors have no GPU kernels"},
        {cfg->offload.write != NULL || cfg->budget.discard || cfg->recompute.compute != NULL,
         "offloading and recomputation have no GPU kernels"},
        {cfg->model.v_in_k != 0, "V inside K has no GPU kernels"},
        {tkvcu_has_window_sinks(cfg), "sinks beyond a window have no GPU kernels"},
        {cfg->meter.heads != 0, "quality meters have no GPU kernels"},
    };
    size_t i;
    for (i = 0; i < sizeof rule / sizeof *rule; i++)
        if (rule[i].wrong) return rule[i].why;
    return NULL;
}

/* >>layout of device memory */
typedef struct tkvcu_arena {
    uintptr_t base; /* 0: only counts */
    size_t at;
    int full; /* 1: the size exceeds the address space */
} tkvcu_arena;

static void *tkvcu_reserve_piece(tkvcu_arena *a, size_t n, size_t size) {
    const size_t at = a->at;
    const size_t bytes = tkvi_add_sizes(tkvi_multiply_sizes(n, size), TKVCU_ALIGN - 1);
    a->at = tkvi_add_sizes(at, bytes & ~(size_t)(TKVCU_ALIGN - 1));
    if (bytes == TKVI_TOO_MANY || a->at == TKVI_TOO_MANY) a->full = 1;
    return (void *)(a->base + at);
}

/* The tier of each region's blocks. Sinks have their own coding. */
static const tkv_tier tkvcu_tier_of[TKVCU_REGIONS] = {TKV_TIER_ARCHIVE, TKV_TIER_WARM, TKV_TIER_HOT,
                                                      TKV_TIER_HOT};

static int tkvcu_find_key(const tkvi_plan *p, int region) {
    return region == TKVCU_SINKS ? p->sink_layout : p->now.key[tkvcu_tier_of[region]];
}

typedef struct tkvcu_derived_config { /* a tkvcu_config with all defaults resolved */
    tkvi_derived_config shape;
    int n_seqs, max_tokens, max_queries;
    tkvcu_layer *layer;
    tkvcu_list *lists;
    uint32_t *flags;
    size_t staging; /* bytes */
} tkvcu_derived_config;

static size_t tkvcu_n_sides(const tkv_config *cfg) {
    return (size_t)TKVI_VERSIONS * TKVCU_REGIONS * (size_t)cfg->model.n_kv_heads * 2;
}

/* Returns the entries of order, of importance and of mean in a layer. */
static size_t tkvcu_n_table_entries(const tkv_config *cfg) {
    return (size_t)TKVI_VERSIONS * (size_t)cfg->model.n_kv_heads * (size_t)cfg->model.head_dim;
}

/* Fills the view of a layer with blocks, and takes its pieces from the arena. */
static void tkvcu_place_layer(const tkvcu_derived_config *d, int layer, const tkvi_plan *p, tkvcu_arena *a,
                              tkvcu_view *v) {
    const tkv_config *cfg = &d->shape.cfg;
    tkvi_plan whole = *p;
    int64_t most[TKV_TIER_COUNT];
    int r;
    memset(v, 0, sizeof *v);
    whole.kept_window = 0; /* windows free no blocks here */
    tkvi_compute_most_blocks(cfg, &whole, most);
    /* One head's side may enter the warm ring while another thread block still reads a side that leaves it. With
     * another table it has another offset in the block. So new blocks never use the places of blocks that leave. */
    most[TKV_TIER_WARM] += most[TKV_TIER_HOT];
    v->n_seqs = d->n_seqs;
    v->n_heads = cfg->model.n_heads;
    v->n_kv_heads = cfg->model.n_kv_heads;
    v->head_dim = cfg->model.head_dim;
    v->sinks = p->sink;
    v->max_blocks = tkvi_max(1, (d->max_tokens - p->sink + TKVI_BLOCK - 1) / TKVI_BLOCK);
    v->list = d->lists + (size_t)layer * (size_t)d->n_seqs;
    v->version = (uint8_t *)tkvcu_reserve_piece(a, (size_t)d->n_seqs, (size_t)v->max_blocks);
    v->side = (const tkvcu_side *)tkvcu_reserve_piece(a, tkvcu_n_sides(cfg), sizeof *v->side);
    v->order = (const uint8_t *)tkvcu_reserve_piece(a, tkvcu_n_table_entries(cfg), 1);
    v->importance = (const uint8_t *)tkvcu_reserve_piece(a, tkvcu_n_table_entries(cfg), 1);
    v->mean = (const float *)tkvcu_reserve_piece(a, tkvcu_n_table_entries(cfg), sizeof *v->mean);
    for (r = 0; r < TKVCU_REGIONS; r++) {
        const size_t block = d->shape.bytes[tkvcu_find_key(p, r)].total;
        v->ring[r] = r == TKVCU_SINKS ? 1 : (int32_t)tkvi_max(1, (int)most[tkvcu_tier_of[r]]);
        a->full |= block > 0x7fffffffu;
        v->block[r] = (uint32_t)block;
        v->stride[r] = block * (size_t)v->ring[r];
        v->bytes[r] = (uint8_t *)tkvcu_reserve_piece(a, (size_t)d->n_seqs, v->stride[r]);
    }
}

/* Checks a config and lays out the device memory. view: NULL or [n_layers]. */
static tkv_status tkvcu_derive_config(const tkvcu_config *config, tkvcu_derived_config *d, tkvcu_arena *a,
                                      tkvcu_view *view, char *reason, size_t size) {
    tkv_config *cfg = &d->shape.cfg;
    tkv_config mine;
    const char *why;
    tkv_status st;
    int i, r;
    if (!config || !config->cfg) return TKV_ERR_ARG;
    mine = *config->cfg;
    if (config->n_seqs) mine.limits.max_seqs = config->n_seqs;
    if (config->max_tokens) mine.limits.max_tokens = config->max_tokens;
    mine.host.isa = TKV_ISA_SCALAR;
    st = tkvi_validate(&mine, &d->shape, reason, size);
    if (st) return st;
    if (mine.limits.max_tokens == 0)
        return tkvi_bad(reason, size, "max_tokens", 0, "tkvcu_config or tkv_config must set it");
    if (config->max_queries < 0 || config->max_queries > TKVCU_MAX_QUERIES)
        return tkvi_bad(reason, size, "max_queries", config->max_queries, "it must be 1 to 64, or 0 for 1");
    why = tkvcu_check_config(&mine);
    if (why) return tkvcu_refuse_config(reason, size, why, -1);
    d->n_seqs = cfg->limits.max_seqs;
    d->max_tokens = cfg->limits.max_tokens;
    d->max_queries = config->max_queries ? config->max_queries : 1;
    d->flags = (uint32_t *)tkvcu_reserve_piece(a, 1, sizeof *d->flags);
    d->layer = (tkvcu_layer *)tkvcu_reserve_piece(a, (size_t)cfg->model.n_layers, sizeof *d->layer);
    d->lists = (tkvcu_list *)tkvcu_reserve_piece(a, (size_t)cfg->model.n_layers * (size_t)d->n_seqs,
                                                 sizeof *d->lists);
    d->staging = tkvcu_n_sides(cfg) * sizeof(tkvcu_side) + tkvcu_n_table_entries(cfg) * (sizeof(float) + 2);
    for (i = 0; i < cfg->model.n_layers; i++) {
        tkvi_plan p;
        tkvi_tier_spec rule[TKV_MAX_LEVELS];
        tkvcu_view v;
        (void)tkvi_plan_of(&d->shape, i, &p, rule);
        if (p.stored_layer != i) continue;
        for (r = 0; r < TKVCU_REGIONS; r++) {
            why = tkvcu_check_formats(cfg, d->shape.key[tkvcu_find_key(&p, r)].pair, r >= TKVCU_SINKS);
            if (why) return tkvcu_refuse_config(reason, size, why, i);
        }
        tkvcu_place_layer(d, i, &p, a, view ? &view[i] : &v);
    }
    if (a->full)
        return tkvi_bad(reason, size, "max_tokens", d->max_tokens, "the size exceeds the address space");
    return TKV_OK;
}

tkv_status tkvcu_get_required_bytes(const tkvcu_config *config, size_t *cache_bytes, size_t *work_bytes,
                                    char *reason, size_t size) {
    tkvcu_derived_config d;
    tkvcu_arena a = {0, 0, 0};
    tkv_status st;
    if (reason && size) *reason = 0;
    if (!cache_bytes || !work_bytes) return TKV_ERR_ARG;
    st = tkvcu_derive_config(config, &d, &a, NULL, reason, size);
    if (st) return st;
    *cache_bytes = a.at;
    *work_bytes = tkvcu_compute_work_bytes(&d.shape.cfg, d.n_seqs, d.max_queries);
    return TKV_OK;
}

/* >>sides */
static tkvcu_side tkvcu_make_side(const tkvi_side *s, size_t at, int32_t table) {
    tkvcu_side d;
    int w;
    memset(&d, 0, sizeof d);
    d.kind = (uint8_t)tkvcu_find_kind((tkv_format)(s->format - tkvi_formats));
    d.bf16 = s->format->stored == TKVI_AS_BF16;
    d.at = (uint32_t)at;
    d.bytes = (uint32_t)s->bytes;
    d.code_bytes = (uint32_t)s->code_bytes;
    d.top = s->top;
    d.table = s->order ? table : -1;
    if (d.kind == TKVCU_KIVI) {
        d.half_bits = (uint8_t)(2 * s->format->bits);
        d.group = (uint8_t)s->group;
        if (s->format->bits <= 6) d.slabs[s->format->bits] = (uint8_t)(s->pad / 16);
    }
    if (d.kind == TKVCU_R) d.half_bits = (uint8_t)s->half_bits;
    if (d.kind == TKVCU_A) {
        d.slabs[0] = (uint8_t)(s->pad / 16);
        for (w = 1; w <= 6; w++) {
            d.slabs[w] = (uint8_t)(s->tiles.n[w] / 4);
            d.slabs[0] = (uint8_t)(d.slabs[0] - d.slabs[w]);
        }
    }
    return d;
}

/* Returns the coding of a region's blocks with a table version of the layer; NULL: there is no such table. */
static const tkvi_layout *tkvcu_find_coding(const tkv_cache *kv, int layer, int region, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkv_tier tier = tkvcu_tier_of[region];
    const int own = region != TKVCU_SINKS && p->now.needs_table[tier];
    const tkvi_layout *c =
        &kv->tables
             .layout[region == TKVCU_SINKS ? p->sink_layout : p->now.layout[tier] + (own ? version : 0)];
    return c->record && c->record[0].k.format ? c : NULL;
}

static int tkvcu_has_table(const tkv_cache *kv, int layer, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const int region = p->now.needs_table[TKV_TIER_WARM] ? TKVCU_WARM : TKVCU_ARCHIVE;
    return p->allocates && tkvcu_find_coding(kv, layer, region, version) != NULL;
}

/* Copies sides, order, importance and mean of a layer to the device. Waits, because the next layer reuses `staging`. */
static tkv_status tkvcu_upload_layer(tkvcu *cu, int layer, cudaStream_t stream) {
    const tkv_cache *kv = cu->host;
    const tkv_config *cfg = &kv->tables.cfg;
    const tkvcu_view *v = &cu->view[layer];
    const size_t heads = (size_t)cfg->model.n_kv_heads, pad = (size_t)cfg->model.head_dim,
                 n = tkvcu_n_table_entries(cfg);
    tkvcu_side *side = (tkvcu_side *)(void *)cu->staging;
    float *mean = (float *)(void *)(side + tkvcu_n_sides(cfg));
    uint8_t *order = (uint8_t *)(mean + n), *importance = order + n;
    tkvcu_layer info;
    size_t h, at = 0;
    tkv_status st;
    int version, r;
    memset(cu->staging, 0, tkvcu_n_sides(cfg) * sizeof *side + n * (sizeof(float) + 2));
    for (version = 0; version < TKVI_VERSIONS; version++) {
        for (r = 0; r < TKVCU_REGIONS; r++) {
            const tkvi_layout *c = tkvcu_find_coding(kv, layer, r, version);
            for (h = 0; h < heads; h++, at += 2) {
                const int32_t table = (int32_t)(((size_t)version * heads + h) * pad);
                if (!c) continue;
                side[at] = tkvcu_make_side(&c->record[h].k, c->record[h].at, table);
                side[at + 1] = tkvcu_make_side(&c->record[h].v, c->record[h].at + c->record[h].v_at, -1);
            }
        }
        for (h = 0; h < heads && tkvcu_has_table(kv, layer, version); h++) {
            const tkvi_head *head = &tkvi_heads_of(&kv->tables, layer, version)[h];
            const size_t to = ((size_t)version * heads + h) * pad;
            memcpy(order + to, head->order, pad);
            memcpy(importance + to, head->importance, pad);
            memcpy(mean + to, head->mean, pad * sizeof *mean);
        }
    }
    tkvcu_widen_attend_plan(&cu->attend_plan, side, tkvcu_n_sides(cfg), cfg->model.head_dim);
    info.version = tkvi_max(0, kv->tables.current_version[layer]);
    info.sinks = v->sinks;
    st = tkvcu_check_cuda(cu,
                          cudaMemcpyAsync((void *)(uintptr_t)v->side, side, tkvcu_n_sides(cfg) * sizeof *side,
                                          cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_check_cuda(cu, cudaMemcpyAsync((void *)(uintptr_t)v->mean, mean, n * sizeof *mean,
                                                  cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_check_cuda(
            cu, cudaMemcpyAsync((void *)(uintptr_t)v->order, order, n, cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_check_cuda(cu, cudaMemcpyAsync((void *)(uintptr_t)v->importance, importance, n,
                                                  cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_check_cuda(
            cu, cudaMemcpyAsync(&cu->layer[layer], &info, sizeof info, cudaMemcpyHostToDevice, stream));
    return st ? st : tkvcu_check_cuda(cu, cudaStreamSynchronize(stream));
}

/* Makes tables that treat all heads and channels equally. */
static int tkvcu_make_equal_tables(tkv_cache *kv) {
    const tkv_config *cfg = &kv->tables.cfg;
    int layer, head, c;
    if (!kv->tables.any_shared) return 1;
    if (!tkvi_allocate_version(kv, 0)) return 0;
    for (layer = 0; layer < cfg->model.n_layers; layer++) {
        if (!kv->tables.plan[layer].allocates) continue;
        for (head = 0; head < cfg->model.n_kv_heads; head++) {
            const tkvi_head_arrays to = tkvi_head_arrays_of(&kv->tables, layer, 0, head);
            tkvi_head *h = &tkvi_heads_of(&kv->tables, layer, 0)[head];
            h->k_top = h->v_top = TKVI_LOG_TOP_DEFAULT;
            for (c = 0; c < cfg->model.head_dim; c++) {
                to.importance[c] = 255;
                tkvi_set_order(to.order, cfg->model.head_dim, c, c);
            }
        }
        tkvi_table_use(kv, layer, 0);
        tkvi_learned(kv, layer, 0);
    }
    return 1;
}

/* >>life */
void tkvcu_destroy(tkvcu *cu) {
    if (!cu) return;
    tkv_destroy(cu->host);
    free(cu);
}

/* Allocates the handle, in one piece. */
static tkvcu *tkvcu_allocate_handle(const tkvcu_derived_config *d) {
    const size_t layers = (size_t)d->shape.cfg.model.n_layers;
    const size_t head = tkvi_align_up(sizeof(tkvcu)), views = tkvi_align_up(layers * sizeof(tkvcu_view));
    uint8_t *mem = (uint8_t *)malloc(head + views + tkvi_align_up(d->staging) + 2 * layers);
    tkvcu *cu = (tkvcu *)(void *)mem;
    if (!mem) return NULL;
    memset(mem, 0, head + views + tkvi_align_up(d->staging) + 2 * layers);
    cu->view = (tkvcu_view *)(void *)(mem + head);
    cu->staging = mem + head + views;
    cu->used_versions = cu->staging + tkvi_align_up(d->staging);
    cu->appended = cu->used_versions + layers;
    cu->n_seqs = d->n_seqs;
    cu->max_tokens = d->max_tokens;
    cu->max_queries = d->max_queries;
    cu->flags = d->flags;
    cu->layer = d->layer;
    cu->lists = d->lists;
    return cu;
}

/* Initialises the memory that kernels read before they write it. */
static tkv_status tkvcu_clear_memory(tkvcu *cu, cudaStream_t stream) {
    const int layers = cu->host->tables.cfg.model.n_layers;
    tkv_status st = tkvcu_check_cuda(cu, cudaMemsetAsync(cu->flags, 0, sizeof *cu->flags, stream));
    int i, r;
    if (!st)
        st = tkvcu_check_cuda(cu,
                              cudaMemsetAsync(cu->layer, 0xff, (size_t)layers * sizeof *cu->layer, stream));
    if (!st)
        st = tkvcu_check_cuda(
            cu,
            cudaMemsetAsync(cu->lists, 0, (size_t)layers * (size_t)cu->n_seqs * sizeof *cu->lists, stream));
    for (i = 0; i < layers && !st; i++) {
        const tkvcu_view *v = &cu->view[i];
        const size_t seqs = (size_t)cu->n_seqs;
        if (cu->host->tables.plan[i].stored_layer != i) continue;
        st = tkvcu_check_cuda(cu, cudaMemsetAsync(v->version, 0, seqs * (size_t)v->max_blocks, stream));
        for (r = TKVCU_SINKS; r < TKVCU_REGIONS && !st; r++)
            st = tkvcu_check_cuda(cu, cudaMemsetAsync(v->bytes[r], 0, seqs * v->stride[r], stream));
        if (!st) st = tkvcu_upload_layer(cu, i, stream);
    }
    return st;
}

static tkv_status tkvcu_get_attribute(tkvcu *cu, cudaDeviceAttr which, int *x) {
    int device = 0;
    const tkv_status st = tkvcu_check_cuda(cu, cudaGetDevice(&device));
    return st ? st : tkvcu_check_cuda(cu, cudaDeviceGetAttribute(x, which, device));
}

/* Prepares the launches, when the sides are known. Shared memory must be large enough. */
static tkv_status tkvcu_prepare_kernels(tkvcu *cu, const tkv_config *cfg) {
    int max_shared = 0, multiprocessors = 0, fits;
    tkv_status st = tkvcu_get_attribute(cu, cudaDevAttrMaxSharedMemoryPerBlockOptin, &max_shared);
    if (!st) st = tkvcu_get_attribute(cu, cudaDevAttrMultiProcessorCount, &multiprocessors);
    cudaFuncAttributes there;
    if (st) return st;
    fits = tkvcu_select_append_kernel(cfg->model.head_dim).shared <= (size_t)max_shared;
    st = tkvcu_check_cuda(cu, tkvcu_prepare_attend(&cu->attend_plan, cfg,
                                                   tkvi_min(cu->max_queries, TKVCU_DECODE_QUERIES),
                                                   multiprocessors, max_shared, &fits));
    if (!st && cu->max_queries > TKVCU_DECODE_QUERIES)
        st = tkvcu_check_cuda(
            cu, tkvcu_prepare_prefill(cu->prefill, cfg, cu->n_seqs, multiprocessors, max_shared, &fits));
    if (!st && !fits) return TKV_ERR_UNSUPPORTED;
    /* The runtime loads code at the first request. That must not happen during a capture. */
    if (!st) st = tkvcu_check_cuda(cu, cudaFuncGetAttributes(&there, tkvcu_combine_kernel));
    if (!st) st = tkvcu_check_cuda(cu, cudaFuncGetAttributes(&there, tkvcu_truncate_kernel));
    return st ? st
              : tkvcu_check_cuda(
                    cu, cudaFuncSetAttribute(tkvcu_select_append_kernel(cfg->model.head_dim).kernel,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared));
}

tkv_status tkvcu_create(const tkvcu_config *config, void *d_cache, size_t cache_bytes, void *d_work,
                        size_t work_bytes, tkvcu_stream stream, tkvcu **out) {
    tkvcu_derived_config d;
    tkvcu_arena a = {0, 0, 0};
    tkv_config cfg;
    tkvcu *cu;
    tkv_status st;
    int major = 0;
    if (!out || !d_cache || !d_work || ((uintptr_t)d_cache | (uintptr_t)d_work) % TKVCU_ALIGN)
        return TKV_ERR_ARG;
    a.base = (uintptr_t)d_cache;
    st = tkvcu_derive_config(config, &d, &a, NULL, NULL, 0);
    if (st) return st;
    if (cache_bytes < a.at || work_bytes < tkvcu_compute_work_bytes(&d.shape.cfg, d.n_seqs, d.max_queries))
        return TKV_ERR_CAPACITY;
    cu = tkvcu_allocate_handle(&d);
    if (!cu) return TKV_ERR_NOMEM;
    a.at = 0;
    (void)tkvcu_derive_config(config, &d, &a, cu->view, NULL, 0);
    cfg = *config->cfg;
    cfg.limits.max_seqs = 1;
    cfg.limits.max_tokens = d.max_tokens;
    cfg.host.isa = TKV_ISA_SCALAR;
    cfg.host.on_event = NULL;
    cfg.host.parallel_for = NULL;
    st = tkv_create(&cfg, &cu->host);
    if (!st && !tkvcu_make_equal_tables(cu->host)) st = TKV_ERR_NOMEM;
    if (!st) st = tkvcu_get_attribute(cu, cudaDevAttrComputeCapabilityMajor, &major);
    if (!st && major < 8) st = TKV_ERR_UNSUPPORTED;
    cu->attend_plan.partial = (float *)d_work;
    cu->attend_plan.n_seqs = cu->n_seqs;
    if (!st) st = tkvcu_clear_memory(cu, stream);
    if (!st) st = tkvcu_prepare_kernels(cu, &cu->host->tables.cfg);
    if (st) tkvcu_destroy(cu);
    else *out = cu;
    return st;
}

/* Returns the view that a layer reads; NULL: the layer has no cache, or does not exist. */
static const tkvcu_view *tkvcu_find_view(const tkvcu *cu, int layer) {
    const tkvi_tables *t = &cu->host->tables;
    if (layer < 0 || layer >= t->cfg.model.n_layers || t->plan[layer].stored_layer < 0) return NULL;
    return &cu->view[t->plan[layer].stored_layer];
}

#endif /* TKVCU_CREATE_H */
