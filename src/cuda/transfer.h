/*
 * transfer.h - copies tables and sequences from a cache of tieredkv.h to the device and back. The bytes of blocks do
 * not change. Errors other than those of the runtime are found before anything changes. All calls wait for the
 * stream, because they use host memory.
 */
#ifndef TKVCU_TRANSFER_H
#define TKVCU_TRANSFER_H

#include "create.h"

/* >>comparison of configs */
static const char *tkvcu_find_difference(const tkvi_tables *a, const tkvi_tables *b, int layer) {
    const tkvi_plan *p = &a->plan[layer], *q = &b->plan[layer];
    const tkvi_geometry *g = &p->geometry, *h = &q->geometry;
    int r;
    if (p->stored_layer != q->stored_layer || g->n_heads != h->n_heads || !tkvi_is_same_geometry(g, h))
        return "cfg.layers";
    if (p->stored_layer != layer) return NULL;
    if (p->sink != q->sink || p->now.hot != q->now.hot || p->now.warm != q->now.warm)
        return "the tiers' lengths";
    for (r = 0; r < TKVCU_REGIONS; r++) {
        const tkvi_layout *c = &a->layout[tkvcu_find_key(p, r)], *d = &b->layout[tkvcu_find_key(q, r)];
        if (c->pair.k != d->pair.k || c->pair.v != d->pair.v || c->tokens != d->tokens ||
            c->bytes.total != d->bytes.total)
            return "the formats";
    }
    return NULL;
}

static tkv_status tkvcu_check_same_config(tkvcu *cu, const tkv_cache *kv) {
    const tkvi_tables *a, *b;
    const char *what = NULL;
    int i;
    if (!kv) return tkvcu_fail(cu, TKV_ERR_ARG, "the cache is missing", 0, NULL);
    a = &cu->host->tables;
    b = &kv->tables;
    if (a->cfg.model.n_layers != b->cfg.model.n_layers || a->cfg.model.n_heads != b->cfg.model.n_heads ||
        a->cfg.model.n_kv_heads != b->cfg.model.n_kv_heads ||
        a->cfg.model.head_dim != b->cfg.model.head_dim || a->cfg.model.v_head_dim != b->cfg.model.v_head_dim)
        return tkvcu_fail(cu, TKV_ERR_CONFIG, "the cache is of another model", 0, NULL);
    if (a->cfg.format.group_size != b->cfg.format.group_size ||
        a->cfg.format.allocation_unit != b->cfg.format.allocation_unit)
        what = "group_size or allocation_unit";
    for (i = 0; i < a->cfg.model.n_layers && !what; i++) what = tkvcu_find_difference(a, b, i);
    if (what) return tkvcu_fail_text(cu, TKV_ERR_CONFIG, "the cache has another plan: ", what);
    what = tkvcu_check_config(&b->cfg);
    return what ? tkvcu_fail_text(cu, TKV_ERR_UNSUPPORTED, "the cache uses something unsupported: ", what)
                : TKV_OK;
}

/* >>tables */
static int tkvcu_is_same_table(const tkv_cache *a, const tkv_cache *b, int layer, int version) {
    const tkvi_head *x = tkvi_heads_of(&a->tables, layer, version),
                    *y = tkvi_heads_of(&b->tables, layer, version);
    const size_t pad = (size_t)a->tables.cfg.model.head_dim;
    int h;
    for (h = 0; h < a->tables.cfg.model.n_kv_heads; h++, x++, y++)
        if (x->reach != y->reach || x->k_weight != y->k_weight || x->k_top != y->k_top ||
            x->v_top != y->v_top || memcmp(x->importance, y->importance, pad) != 0 ||
            memcmp(x->order, y->order, pad) != 0 || memcmp(x->mean, y->mean, pad * sizeof(float)) != 0)
            return 0;
    return 1;
}

/* Copies a table version of a layer. It becomes the current one. */
static void tkvcu_copy_table(tkv_cache *to, const tkv_cache *from, int layer, int version) {
    const size_t pad = (size_t)to->tables.cfg.model.head_dim, heads = (size_t)to->tables.cfg.model.n_kv_heads;
    const size_t at = (size_t)layer * heads * pad;
    const tkvi_version *x = &from->tables.version[version];
    tkvi_version *y = &to->tables.version[version];
    size_t h;
    for (h = (size_t)layer * heads; h < (size_t)(layer + 1) * heads; h++) {
        y->head[h].reach = x->head[h].reach;
        y->head[h].k_weight = x->head[h].k_weight;
        y->head[h].k_top = x->head[h].k_top;
        y->head[h].v_top = x->head[h].v_top;
    }
    memcpy(y->importance + at, x->importance + at, heads * pad);
    memcpy(y->channel + at, x->channel + at, heads * pad);
    memcpy(y->mean + at, x->mean + at, heads * pad * sizeof(float));
    tkvi_table_use(to, layer, version);
}

/* Tells whether a layer of kv has tables to copy. */
static int tkvcu_has_learned(const tkv_cache *kv, int layer) {
    return kv->tables.plan[layer].stored_layer == layer && kv->tables.plan[layer].allocates &&
           kv->tables.current_version[layer] >= 0;
}

/* Allocates the versions, and checks that no block here needs other tables. */
static tkv_status tkvcu_check_tables(tkvcu *cu, const tkv_cache *kv) {
    int layer, v;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        for (v = 0; v < TKVI_VERSIONS && tkvcu_has_learned(kv, layer); v++) {
            if (!tkvcu_has_table(kv, layer, v)) continue;
            if (!tkvi_allocate_version(cu->host, v))
                return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for tables", 0, NULL);
            if ((cu->used_versions[layer] >> v & 1) && !tkvcu_is_same_table(cu->host, kv, layer, v))
                return tkvcu_fail(cu, TKV_ERR_STATE, "blocks here may be coded with another table of layer",
                                  layer, "; take over tables before the first append");
        }
    return TKV_OK;
}

static tkv_status tkvcu_take_tables(tkvcu *cu, const tkv_cache *kv, cudaStream_t stream) {
    tkv_status st = TKV_OK;
    int layer, v;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++) {
        int changed = 0;
        if (!tkvcu_has_learned(kv, layer)) continue;
        for (v = 0; v < TKVI_VERSIONS; v++) {
            if (!tkvcu_has_table(kv, layer, v)) continue;
            if (tkvcu_has_table(cu->host, layer, v) && tkvcu_is_same_table(cu->host, kv, layer, v)) continue;
            tkvcu_copy_table(cu->host, kv, layer, v);
            changed = 1;
        }
        changed |= cu->host->tables.current_version[layer] != kv->tables.current_version[layer];
        cu->host->tables.current_version[layer] = kv->tables.current_version[layer];
        if (cu->appended[layer])
            cu->used_versions[layer] |= (uint8_t)(1u << kv->tables.current_version[layer]);
        if (changed) st = tkvcu_upload_layer(cu, layer, stream);
    }
    return st;
}

tkv_status tkvcu_load_calibration(tkvcu *cu, const tkv_cache *kv, tkvcu_stream stream) {
    tkv_status st;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_check_same_config(cu, kv);
    if (!st) st = tkvcu_check_tables(cu, kv);
    return st ? st : tkvcu_take_tables(cu, kv, stream);
}

/* >>sequences */
static tkv_status tkvcu_check_seqs(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq) {
    if (seq < 0 || seq >= cu->n_seqs)
        return tkvcu_fail(cu, TKV_ERR_ARG, "there is no sequence", seq, " here");
    if (host_seq < 0 || host_seq >= kv->tables.cfg.limits.max_seqs)
        return tkvcu_fail(cu, TKV_ERR_ARG, "there is no sequence", host_seq, " in the cache");
    if (kv->seq[host_seq].in_step)
        return tkvcu_fail(cu, TKV_ERR_STATE, "a step is open; commit or abort it first", 0, NULL);
    return TKV_OK;
}

/* Returns the region of block i of a host list, and its number after the sinks. */
static int tkvcu_find_region(const tkvi_list *list, int i, int *block) {
    *block = i - list->sinks;
    if (*block < 0) *block = 0;
    if (i < list->sinks) return TKVCU_SINKS;
    if (*block < list->archive) return TKVCU_ARCHIVE;
    return *block < list->archive + list->warm ? TKVCU_WARM : TKVCU_HOT;
}

/* Returns a reason why a layer cannot be stored here, or NULL. */
static const char *tkvcu_find_list_fault(const tkvcu *cu, const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_plan *p = &kv->tables.plan[layer];
    int i, block;
    if (list->expired) return "tokens have expired behind a window";
    if (p->sink + TKVI_BLOCK * (list->archive + list->warm) > list->len && list->archive + list->warm)
        return "a flush made a block short";
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const tkvi_entry *e = &kv->pool.entry[ids[i]];
        const int region = tkvcu_find_region(list, i, &block);
        if (tkvi_is_offloaded(b)) return "a block is offloaded";
        if (!tkvi_has_all_slots(e) || e->end_slot) return "tokens were evicted or removed";
        if (e->shift || e->turned) return "tokens were moved";
        if (tkvi_sink_mask(&kv->pool, ids[i])) return "sinks were named";
        if (e->start != (region == TKVCU_SINKS ? 0 : p->sink + TKVI_BLOCK * block))
            return "a flush made a block short";
        if (kv->tables.layout[b->layout].key != tkvcu_find_key(p, region))
            return "a block has another format";
        if (block >= cu->view[layer].max_blocks) return "the sequence is too long";
    }
    return NULL;
}

/* Returns a reason why a layer is too large here, or NULL. On the host, more blocks may wait for a table or for
 * the next append. */
static const char *tkvcu_find_capacity_fault(const tkvcu *cu, const tkvi_list *list, int layer) {
    const int32_t *ring = cu->view[layer].ring;
    if (list->len > cu->max_tokens) return "the sequence is too long";
    if (list->archive > ring[TKVCU_ARCHIVE])
        return "too many blocks are in the archive: the sequence was flushed";
    if (list->warm > ring[TKVCU_WARM] - ring[TKVCU_HOT])
        return "too many blocks are warm: tkv_seq_begin and tkv_seq_commit demote them";
    if (list->n - list->sinks - list->archive - list->warm > ring[TKVCU_HOT])
        return "too many blocks are hot: tkv_seq_begin and tkv_seq_commit demote them, after "
               "tkv_freeze_calibration if they wait for a table";
    return NULL;
}

/* Copies a block to the device. n_tokens: tokens of its list from its start on. Free slots of a hot block become 0,
 * because kernels here multiply them by 0. On the host they are not set. */
static tkv_status tkvcu_import_block(tkvcu *cu, const tkvcu_view *v, int region, uint8_t *to,
                                     const uint8_t *from, int n_tokens, cudaStream_t stream) {
    const size_t sides = 2 * (size_t)v->n_kv_heads, side_bytes = v->block[region] / sides;
    tkv_status st;
    if (region != TKVCU_HOT || n_tokens >= TKVI_BLOCK)
        return tkvcu_check_cuda(cu,
                                cudaMemcpyAsync(to, from, v->block[region], cudaMemcpyHostToDevice, stream));
    st = tkvcu_check_cuda(cu, cudaMemsetAsync(to, 0, v->block[region], stream));
    if (st) return st;
    return tkvcu_check_cuda(cu, cudaMemcpy2DAsync(to, side_bytes, from, side_bytes,
                                                  side_bytes / TKVI_BLOCK * (size_t)n_tokens, sides,
                                                  cudaMemcpyHostToDevice, stream));
}

/* Copies a layer of a sequence to the device: blocks, versions, state. */
static tkv_status tkvcu_import_layer(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, int layer,
                                     uint8_t *version, cudaStream_t stream) {
    const tkvi_list *list = tkvi_list_of(kv, host_seq, layer);
    const uint32_t *ids = tkvi_ids(kv, host_seq, layer);
    const tkvcu_view *v = &cu->view[layer];
    tkvcu_list state;
    tkv_status st = TKV_OK;
    int i, block;
    memset(version, 0, (size_t)v->max_blocks);
    for (i = 0; i < list->n && !st; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const int region = tkvcu_find_region(list, i, &block);
        if (b->layout >= kv->tables.n_keys) {
            version[block] = (uint8_t)((b->layout - kv->tables.n_keys) % TKVI_VERSIONS);
            cu->used_versions[layer] |= (uint8_t)(1u << version[block]);
        }
        st = tkvcu_import_block(cu, v, region, tkvcu_find_block(v, region, seq, block),
                                tkvi_block_bytes(&kv->pool, b), list->len - tkvi_block_start(kv, ids, i),
                                stream);
    }
    if (!st)
        st = tkvcu_check_cuda(cu, cudaMemcpyAsync(v->version + (size_t)seq * (size_t)v->max_blocks, version,
                                                  (size_t)v->max_blocks, cudaMemcpyHostToDevice, stream));
    state.len = list->len;
    state.archive = list->archive;
    state.warm = list->warm;
    state.tickets = 0;
    if (!st)
        st = tkvcu_check_cuda(
            cu, cudaMemcpyAsync(&v->list[seq], &state, sizeof state, cudaMemcpyHostToDevice, stream));
    return st ? st
              : tkvcu_check_cuda(
                    cu,
                    cudaStreamSynchronize(
                        stream)); /* waits, because `state` is on this stack and the next layer reuses `version` */
}

/* Returns the largest max_blocks of all layers. */
static int tkvcu_find_max_blocks(const tkvcu *cu) {
    int i, max_blocks = 1;
    for (i = 0; i < cu->host->tables.cfg.model.n_layers; i++)
        max_blocks = tkvi_max(max_blocks, cu->view[i].max_blocks);
    return max_blocks;
}

tkv_status tkvcu_import_seq(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, tkvcu_stream stream) {
    uint8_t *version;
    tkv_status st;
    int layer;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_check_same_config(cu, kv);
    if (!st) st = tkvcu_check_seqs(cu, seq, kv, host_seq);
    if (!st) st = tkvcu_check_tables(cu, kv);
    for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++) {
        const char *why;
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        why = tkvcu_find_capacity_fault(cu, tkvi_list_of(kv, host_seq, layer), layer);
        if (why) return tkvcu_fail(cu, TKV_ERR_CAPACITY, why, 0, NULL);
        why = tkvcu_find_list_fault(cu, kv, host_seq, layer);
        if (why) return tkvcu_fail(cu, TKV_ERR_UNSUPPORTED, why, 0, NULL);
    }
    if (st) return st;
    version = (uint8_t *)malloc((size_t)tkvcu_find_max_blocks(cu));
    if (!version) return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for versions", 0, NULL);
    st = tkvcu_take_tables(cu, kv, stream);
    for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++)
        if (kv->tables.plan[layer].stored_layer == layer)
            st = tkvcu_import_layer(cu, seq, kv, host_seq, layer, version, stream);
    free(version);
    return st;
}

/* >>export */
typedef struct tkvcu_seq_state { /* state of a sequence, copied from the device */
    tkvcu_list *list;            /* [n_layers] */
    uint8_t *version;            /* [n_layers][max_blocks] */
    int max_blocks;
} tkvcu_seq_state;

static tkv_status tkvcu_download_state(tkvcu *cu, int seq, tkvcu_seq_state *t, cudaStream_t stream) {
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < cu->host->tables.cfg.model.n_layers && !st; layer++) {
        const tkvcu_view *v = &cu->view[layer];
        if (cu->host->tables.plan[layer].stored_layer != layer) continue;
        st = tkvcu_check_cuda(cu, cudaMemcpyAsync(&t->list[layer], &v->list[seq], sizeof *t->list,
                                                  cudaMemcpyDeviceToHost, stream));
        if (!st)
            st = tkvcu_check_cuda(cu, cudaMemcpyAsync(t->version + (size_t)layer * (size_t)t->max_blocks,
                                                      v->version + (size_t)seq * (size_t)v->max_blocks,
                                                      (size_t)v->max_blocks, cudaMemcpyDeviceToHost, stream));
    }
    return st ? st : tkvcu_check_cuda(cu, cudaStreamSynchronize(stream));
}

/* Makes the host's list of a layer. The ids are filled in later. */
static tkvi_list tkvcu_make_host_list(const tkvi_plan *p, const tkvcu_list *l) {
    tkvi_list list;
    const int behind = l->len - p->sink;
    memset(&list, 0, sizeof list);
    list.sinks = l->len > 0 && p->sink > 0;
    list.n = list.sinks + (behind > 0 ? (behind + TKVI_BLOCK - 1) / TKVI_BLOCK : 0);
    list.archive = l->archive;
    list.warm = l->warm;
    list.len = list.chunk_start = l->len;
    return list;
}

/* Returns the host's coding of a block. */
static int tkvcu_find_host_coding(const tkv_cache *kv, int layer, int region, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkv_tier tier = tkvcu_tier_of[region];
    if (region == TKVCU_SINKS) return p->sink_layout;
    return p->now.layout[tier] + (p->now.needs_table[tier] ? version : 0);
}

/* Tells whether coded blocks of a layer use a table that kv lacks, or has in another form. */
static int tkvcu_has_table_clash(const tkvcu *cu, const tkv_cache *kv, int layer, const tkvcu_seq_state *t) {
    const uint8_t *version = t->version + (size_t)layer * (size_t)t->max_blocks;
    int i;
    for (i = 0; i < t->list[layer].archive + t->list[layer].warm; i++)
        if (!tkvcu_has_table(kv, layer, version[i]) || !tkvcu_is_same_table(cu->host, kv, layer, version[i]))
            return 1;
    return 0;
}

/* Allocates memory for tables and blocks of the sequence. On an error, no token or table has changed. */
static tkv_status tkvcu_reserve_export(tkvcu *cu, tkv_cache *kv, int host_seq, const tkvcu_seq_state *t) {
    tkvi_demand demand = tkvi_no_demand();
    int layer, i, block, v, want = 1;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_plan *p = &kv->tables.plan[layer];
        const tkvi_list list = tkvcu_make_host_list(p, &t->list[layer]);
        if (p->stored_layer != layer) continue;
        if (list.len > kv->tables.cfg.limits.max_tokens)
            return tkvcu_fail(cu, TKV_ERR_CAPACITY, "the cache's sequences have at most",
                              kv->tables.cfg.limits.max_tokens, " tokens");
        if (p->allocates && kv->tables.current_version[layer] >= 0 && tkvcu_has_table_clash(cu, kv, layer, t))
            return tkvcu_fail(cu, TKV_ERR_STATE, "the cache has another table in layer", layer, "");
        for (v = 0; v < TKVI_VERSIONS && p->allocates && kv->tables.current_version[layer] < 0; v++)
            if (tkvcu_has_table(cu->host, layer, v) && !tkvi_allocate_version(kv, v))
                return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for tables", 0, NULL);
        for (i = 0; i < list.n; i++) {
            const int region = tkvcu_find_region(&list, i, &block);
            tkvi_demand_blocks(&kv->pool, tkvcu_find_host_coding(kv, layer, region, 0), 1, &demand);
        }
        want = tkvi_max(want, list.n + 1);
    }
    if (!tkvi_grow_lists(kv, host_seq, want) || !tkvi_provide(&kv->pool, &demand))
        return tkvcu_fail(cu, kv->pool.keep_all ? TKV_ERR_CAPACITY : TKV_ERR_NOMEM, "no memory for blocks", 0,
                          NULL);
    return TKV_OK;
}

static tkv_status tkvcu_export_layer(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, int layer,
                                     const tkvcu_seq_state *t, cudaStream_t stream) {
    const tkvcu_view *v = &cu->view[layer];
    const tkvi_list list = tkvcu_make_host_list(&kv->tables.plan[layer], &t->list[layer]);
    uint32_t *ids = tkvi_ids(kv, host_seq, layer);
    tkv_status st = TKV_OK;
    int i, block, version;
    if (kv->tables.plan[layer].allocates && kv->tables.current_version[layer] < 0) {
        for (version = 0; version < TKVI_VERSIONS; version++)
            if (tkvcu_has_table(cu->host, layer, version)) tkvcu_copy_table(kv, cu->host, layer, version);
        kv->tables.current_version[layer] = cu->host->tables.current_version[layer];
        tkvi_learned(kv, layer, 0);
    }
    for (i = 0; i < list.n; i++) {
        const int region = tkvcu_find_region(&list, i, &block), first = region == TKVCU_SINKS;
        const int start = first ? 0 : v->sinks + TKVI_BLOCK * block;
        version = first ? 0 : t->version[(size_t)layer * (size_t)t->max_blocks + (size_t)block];
        ids[i] = tkvi_new_entry(&kv->pool, tkvcu_find_host_coding(kv, layer, region, version), start, 0);
        if (!st)
            st = tkvcu_check_cuda(cu, cudaMemcpyAsync(tkvi_block_bytes(&kv->pool, tkvi_block_of(kv, ids[i])),
                                                      tkvcu_find_block(v, region, seq, block),
                                                      v->block[region], cudaMemcpyDeviceToHost, stream));
    }
    for (i = 0; i < list.n; i++)
        kv->pool.entry[ids[i]].tier = tkvi_block_of(kv, ids[i])->tier = (uint8_t)tkvi_tier_at(&list, i);
    *tkvi_list_of(kv, host_seq, layer) = list;
    return st;
}

tkv_status tkvcu_export_seq(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, tkvcu_stream stream) {
    tkvcu_seq_state t;
    size_t layers;
    tkv_status st;
    int layer;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_check_same_config(cu, kv);
    if (!st) st = tkvcu_check_seqs(cu, seq, kv, host_seq);
    for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_list_of(kv, host_seq, layer)->n)
            st = tkvcu_fail(cu, TKV_ERR_STATE, "sequence", host_seq, " of the cache is not empty");
    if (st) return st;
    layers = (size_t)kv->tables.cfg.model.n_layers;
    t.max_blocks = tkvcu_find_max_blocks(cu);
    t.list = (tkvcu_list *)calloc(layers, sizeof *t.list);
    t.version = (uint8_t *)calloc(layers, (size_t)t.max_blocks);
    st = t.list && t.version ? tkvcu_download_state(cu, seq, &t, stream)
                             : tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for versions", 0, NULL);
    if (!st) st = tkvcu_reserve_export(cu, kv, host_seq, &t);
    if (!st) {
        for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++)
            if (kv->tables.plan[layer].stored_layer == layer)
                st = tkvcu_export_layer(cu, seq, kv, host_seq, layer, &t, stream);
        if (!st) st = tkvcu_check_cuda(cu, cudaStreamSynchronize(stream));
        if (st) (void)tkv_seq_reset(kv, host_seq); /* the copy is incomplete */
        else tkvi_release_unused(kv, host_seq);
    }
    free(t.list);
    free(t.version);
    return st;
}

#endif /* TKVCU_TRANSFER_H */
