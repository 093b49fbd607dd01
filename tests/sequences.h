/*
 * sequences.h - sequences of tokens that can be made again: configs, appending, reading, snapshots of what a caller
 * sees. test_sequence.c and white_cache.c share it.
 */
#ifndef TKV_SEQUENCES_H
#define TKV_SEQUENCES_H

#include "kit.h"

enum { /* one enum: C++20 has doubts about sums of two */
       BLOCK = TKV_BLOCK_TOKENS,
       KV_HEADS = 2,
       DIM = 12,
       V_DIM = 5,
       MOST = 2048,
       K_ROW = KV_HEADS * DIM,
       V_ROW = KV_HEADS * V_DIM,
       N_WIDE = 150, /* tokens with gaps between heads and between tokens */
       K_HEAD = DIM + 3,
       V_HEAD = V_DIM + 2,
       K_TOKEN = KV_HEADS * K_HEAD + 7,
       V_TOKEN = KV_HEADS * V_HEAD + 1
};

static float k_in[MOST * K_ROW], v_in[MOST * V_ROW], k_out[MOST * K_ROW], v_out[MOST * V_ROW];
static float k_want[MOST * K_ROW], v_want[MOST * V_ROW];

/* >>configs and caches */
static inline tkv_config config(int layers, int seqs) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = layers;
    cfg.model.n_heads = 2 * KV_HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    cfg.model.v_head_dim = V_DIM;
    cfg.limits.max_seqs = seqs;
    cfg.host.isa = tkv_test_isa();
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4; /* no table to wait for: see white_learn.c */
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    return cfg;
}

/* Reads without loss of any tier: every format F32. */
static inline tkv_config config_f32(int layers, int seqs) {
    tkv_config cfg = config(layers, seqs);
    cfg.tiers.hot.k = cfg.tiers.hot.v = cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k =
        cfg.tiers.archive.v = TKV_F32;
    return cfg;
}

/* The cache is whole; `what` names the step. */
static inline void whole(const tkv_cache *kv, const char *what, int number) {
    char reason[160];
    tkv_status st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s %d: %s", what, number, reason);
}

static inline int at_least_0(int n) { return n > 0 ? n : 0; }

/* >>tokens: the value of one channel of token t of text `id` in a layer, the same in any chunking */
static inline float channel_of(int id, int layer, int t, int side, int i) {
    tkv_rng r = tkv_rng_seed(((uint64_t)(unsigned)id << 48) ^ ((uint64_t)(unsigned)layer << 40) ^
                             ((uint64_t)(unsigned)t << 12) ^ ((uint64_t)(unsigned)side << 11) ^
                             (uint64_t)(unsigned)i);
    return (float)((double)(tkv_rng_u64(&r) >> 40) * (4.0 / 16777216.0) - 2.0);
}

static inline void rows_of(int id, int layer, int first, int n, float *k, float *v) {
    int t, i;
    for (t = 0; t < n; t++) {
        for (i = 0; i < K_ROW; i++) k[t * K_ROW + i] = channel_of(id, layer, first + t, 0, i);
        for (i = 0; i < V_ROW; i++) v[t * V_ROW + i] = channel_of(id, layer, first + t, 1, i);
    }
}

static inline tkv_status feed(tkv_cache *kv, int seq, int layer, int id, int n) {
    rows_of(id, layer, tkv_get_length(kv, seq, layer), n, k_in, v_in);
    return tkv_append(kv, seq, layer, k_in, v_in, n);
}

/* n tokens to every layer in chunks; layers that share or have no cache are left out. */
static inline tkv_status feed_all(tkv_cache *kv, int seq, int id, int n, int chunk) {
    while (n > 0) {
        int some = n < chunk ? n : chunk, layer;
        for (layer = 0; layer < last_config.model.n_layers; layer++) {
            tkv_status st;
            if (!has_own_kv(layer)) continue;
            st = feed(kv, seq, layer, id, some);
            if (st) return st;
        }
        n -= some;
    }
    return TKV_OK;
}

/* Do the tokens start .. start+n-1 come back as they went in, rounded to `f`? */
static inline void reads_as(tkv_cache *kv, int seq, int layer, int id, int start, int n, tkv_format f) {
    int i;
    rows_of(id, layer, start, n, k_want, v_want);
    for (i = 0; i < n * K_ROW; i++) k_want[i] = as_stored(f, k_want[i]);
    for (i = 0; i < n * V_ROW; i++) v_want[i] = as_stored(f, v_want[i]);
    CHECK_EQ(tkv_read(kv, seq, layer, start, n, k_out, v_out), TKV_OK);
    CHECK_MEM(k_out, k_want, (size_t)(n * K_ROW) * sizeof(float));
    CHECK_MEM(v_out, v_want, (size_t)(n * V_ROW) * sizeof(float));
}

/* >>pictures: everything that can be seen of sequences, as bytes */
typedef struct snapshot {
    unsigned char *bytes;
    size_t n;
} snapshot;

static inline void snapshot_add(snapshot *p, const void *data, size_t n) {
    p->bytes = (unsigned char *)realloc(p->bytes, p->n + n + 1);
    if (!p->bytes) exit(2);
    memcpy(p->bytes + p->n, data, n);
    p->n += n;
}

static inline void snapshot_seq(snapshot *p, tkv_cache *kv, int seq) {
    int layer, len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    snapshot_add(p, &len, sizeof len);
    for (layer = 0; layer < last_config.model.n_layers; layer++) {
        tkv_layer_info info;
        int from;
        if (tkv_get_layer(kv, seq, layer, &info)) continue; /* no cache */
        len = tkv_get_length(kv, seq, layer);
        snapshot_add(p, &len, sizeof len);
        snapshot_add(p, &info, sizeof info);
        for (from = info.expired; from < len; from += MOST) {
            int n = len - from < MOST ? len - from : MOST;
            CHECK_EQ(tkv_read(kv, seq, layer, from, n, k_out, v_out), TKV_OK);
            snapshot_add(p, k_out, (size_t)(n * K_ROW) * sizeof(float));
            snapshot_add(p, v_out, (size_t)(n * V_ROW) * sizeof(float));
        }
    }
}

static inline snapshot snapshot_of(tkv_cache *kv) {
    snapshot p;
    int seq;
    p.bytes = NULL;
    p.n = 0;
    for (seq = 0; seq < last_config.limits.max_seqs; seq++) snapshot_seq(&p, kv, seq);
    return p;
}

static inline snapshot snapshot_of_seq(tkv_cache *kv, int seq) {
    snapshot p;
    p.bytes = NULL;
    p.n = 0;
    snapshot_seq(&p, kv, seq);
    return p;
}

static inline int same_picture(const snapshot *a, const snapshot *b) {
    return a->n == b->n && memcmp(a->bytes, b->bytes, a->n) == 0;
}

static inline void snapshot_free(snapshot *p) {
    free(p->bytes);
    p->bytes = NULL;
}

/* Nothing changed since `before` was taken; takes it away. */
static inline void unchanged(tkv_cache *kv, snapshot *before, const char *what) {
    snapshot now = snapshot_of(kv);
    CHECK_MSG(same_picture(&now, before), "%s", what);
    whole(kv, what, 0);
    snapshot_free(&now);
    snapshot_free(before);
}

#endif /* TKV_SEQUENCES_H */
