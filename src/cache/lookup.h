/*
 * cache/lookup.h - checks the numbers of sequences and layers, and returns their lengths. Every public function
 * that takes a sequence or a layer calls these checks first.
 */
#ifndef TKVI_CACHE_LOOKUP_H
#define TKVI_CACHE_LOOKUP_H

#include "cache/cache.h"

static int tkvi_has_seq(const tkv_cache *kv, int seq) {
    return kv && seq >= 0 && seq < kv->tables.cfg.limits.max_seqs;
}

static tkv_status tkvi_refuse_seq(tkv_cache *kv, int seq) {
    return kv ? tkvi_fail(kv, TKV_ERR_ARG, "there is no sequence", seq, "") : TKV_ERR_ARG;
}

/* The layer whose blocks `layer` reads. Returns -1 for a bad sequence or layer, and for a layer without a cache. */
static int tkvi_stored_layer(const tkv_cache *kv, int seq, int layer) {
    if (!tkvi_has_seq(kv, seq) || layer < 0 || layer >= kv->tables.cfg.model.n_layers) return -1;
    return kv->tables.plan[layer].stored_layer;
}

/* Do sequence and layer exist, and does this layer store K and V itself? */
static int tkvi_has_own_layer(const tkv_cache *kv, int seq, int layer) {
    return layer >= 0 && tkvi_stored_layer(kv, seq, layer) == layer;
}

static tkv_status tkvi_refuse_layer(tkv_cache *kv, int layer) {
    return tkvi_fail(kv, TKV_ERR_ARG, "there is no layer", layer, " with K and V of its own");
}

/* Refuses a call that reads a layer, and that several threads may make. kv may be NULL. */
static tkv_status tkvi_refuse_reading(tkv_cache *kv, int seq, int layer) {
    if (kv && !tkvi_has_seq(kv, seq))
        return tkvi_fail_reader(kv, TKV_ERR_ARG, "there is no sequence", seq, "");
    return tkvi_fail_reader(kv, TKV_ERR_ARG, "there is no layer", layer, " with a cache");
}

TKV_API int tkv_get_length(const tkv_cache *kv, int seq, int layer) {
    int i, least = TKVI_FOREVER;
    if (layer != TKV_ALL_LAYERS) {
        layer = tkvi_stored_layer(kv, seq, layer);
        return layer < 0 ? 0 : tkvi_list_of(kv, seq, layer)->len;
    }
    if (!tkvi_has_seq(kv, seq)) return 0;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++)
        if (kv->tables.plan[i].stored_layer == i) least = tkvi_min(least, tkvi_list_of(kv, seq, i)->len);
    return least;
}

#endif /* TKVI_CACHE_LOOKUP_H */
