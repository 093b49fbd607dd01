/*
 * core/geometry.h - the shape of a layer: its heads and their channels. Layers of a cache may differ in it
 * (tkv_layer_config).
 */
#ifndef TKVI_CORE_GEOMETRY_H
#define TKVI_CORE_GEOMETRY_H

#include "core/base.h"

typedef struct tkvi_geometry {
    int n_heads, n_kv_heads;
    int head_dim, v_head_dim; /* channels of K and of V */
    int v_in_k;               /* 1: V is the first channels of K, and is not stored */
    int k_pad, v_pad;         /* the same, rounded up to 16 */
    float scale;              /* of scores, if a call gives none */
} tkvi_geometry;

/* Where the parts of a layer begin in arrays over all layers: sums over the layers before it. */
typedef struct tkvi_places {
    size_t heads;                      /* KV heads */
    size_t channels;                   /* head_dim of each KV head */
    size_t pads;                       /* k_pad of each KV head */
    size_t orders;                     /* tkvi_order_bytes of each KV head */
    size_t products;                   /* pairs of channels of each KV head (tkvi_n_products) */
    size_t token_states, query_states; /* bytes of the states of families (formats/families.h) */
} tkvi_places;

/* >>an order of channels: a byte for each position, and with more than 256 positions their high bytes behind them */
TKVI_FN int tkvi_order_at(const uint8_t *order, int pad, int position) {
    return pad > 256 ? order[position] | order[pad + position] << 8 : order[position];
}

static void tkvi_set_order(uint8_t *order, int pad, int position, int channel) {
    order[position] = (uint8_t)(channel & 255);
    if (pad > 256) order[pad + position] = (uint8_t)(channel >> 8);
}

static size_t tkvi_order_bytes(int pad) { return (size_t)(pad > 256 ? 2 * pad : pad); }

/* Pairs of channels i <= j: the numbers in a sum of q q^T. */
static size_t tkvi_n_products(int head_dim) { return (size_t)head_dim * ((size_t)head_dim + 1) / 2; }

static void tkvi_set_pads(tkvi_geometry *g) {
    g->k_pad = tkvi_round_up(g->head_dim, 16);
    g->v_pad = tkvi_round_up(g->v_head_dim, 16);
}

/* The geometry of the model, for layers that set none. */
static tkvi_geometry tkvi_model_geometry(const tkv_model_config *m) {
    tkvi_geometry g;
    g.n_heads = m->n_heads;
    g.n_kv_heads = m->n_kv_heads ? m->n_kv_heads : m->n_heads;
    g.head_dim = m->head_dim;
    g.v_head_dim = m->v_head_dim ? m->v_head_dim : m->head_dim;
    g.v_in_k = m->v_in_k == 1;
    g.scale = m->scale;
    tkvi_set_pads(&g);
    return g;
}

/* The geometry of a layer. One that reads the K and V of another layer has the KV heads of that one. */
static tkvi_geometry tkvi_layer_geometry(const tkv_config *cfg, int layer) {
    tkvi_geometry g = tkvi_model_geometry(&cfg->model);
    const tkv_layer_config *c = cfg->layers ? &cfg->layers[layer] : NULL,
                           *stored = c && c->share_kv ? &cfg->layers[c->share_kv - 1] : c;
    if (c) {
        if (c->n_heads) g.n_heads = c->n_heads;
        if (stored->n_kv_heads) g.n_kv_heads = stored->n_kv_heads;
        if (stored->head_dim) g.head_dim = g.v_head_dim = stored->head_dim;
        if (stored->v_head_dim) g.v_head_dim = stored->v_head_dim;
        if (stored->v_in_k) g.v_in_k = stored->v_in_k == 1;
        tkvi_set_pads(&g);
    }
    if (!(g.scale > 0.0f)) g.scale = (float)(1.0 / sqrt((double)g.head_dim));
    return g;
}

/* 1 if two layers have K and V of the same shape. Their query heads may differ. */
static int tkvi_is_same_geometry(const tkvi_geometry *a, const tkvi_geometry *b) {
    return a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim && a->v_head_dim == b->v_head_dim &&
           a->v_in_k == b->v_in_k;
}

/* Makes each number of *most at least that of g. */
static void tkvi_widen_geometry(tkvi_geometry *most, const tkvi_geometry *g) {
    most->n_heads = tkvi_max(most->n_heads, g->n_heads);
    most->n_kv_heads = tkvi_max(most->n_kv_heads, g->n_kv_heads);
    most->head_dim = tkvi_max(most->head_dim, g->head_dim);
    most->v_head_dim = tkvi_max(most->v_head_dim, g->v_head_dim);
    tkvi_set_pads(most);
}

static void tkvi_skip_places(tkvi_places *at, const tkvi_geometry *g) {
    const size_t heads = (size_t)g->n_kv_heads;
    at->heads += heads;
    at->channels += heads * (size_t)g->head_dim;
    at->pads += heads * (size_t)g->k_pad;
    at->orders += heads * tkvi_order_bytes(g->k_pad);
    at->products += heads * tkvi_n_products(g->head_dim);
}

#endif /* TKVI_CORE_GEOMETRY_H */
