/*
 * sequences.h - sequences of tokens that can be generated again: configs, appending, reading, and snapshots of what
 * a caller can read. test_sequence.c and white_cache.c share it.
 */
#ifndef TKV_SEQUENCES_H
#define TKV_SEQUENCES_H

#include "kit.h"

enum { /* one enum, because C++20 deprecates arithmetic between different enums */
       BLOCK = TKV_BLOCK_TOKENS,
       KV_HEADS = 2,
       DIM = 12,
       V_DIM = 5,
       MAX_TOKENS = 2048, /* capacity of the buffers below */
       K_ROW = KV_HEADS * DIM,
       V_ROW = KV_HEADS * V_DIM,
       N_STRIDED = 150, /* tokens with gaps between heads and between tokens */
       K_HEAD_STRIDE = DIM + 3,
       V_HEAD_STRIDE = V_DIM + 2,
       K_TOKEN_STRIDE = KV_HEADS * K_HEAD_STRIDE + 7,
       V_TOKEN_STRIDE = KV_HEADS * V_HEAD_STRIDE + 1
};

static float k_in[MAX_TOKENS * K_ROW], v_in[MAX_TOKENS * V_ROW], k_out[MAX_TOKENS * K_ROW],
    v_out[MAX_TOKENS * V_ROW];
static float k_want[MAX_TOKENS * K_ROW], v_want[MAX_TOKENS * V_ROW];

/* >>configs and caches */
static inline tkv_config make_config(int layers, int seqs) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = layers;
    cfg.model.n_heads = 2 * KV_HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    cfg.model.v_head_dim = V_DIM;
    cfg.limits.max_seqs = seqs;
    cfg.host.isa = tkv_test_isa();
    cfg.tiers.warm.k = cfg.tiers.warm.v =
        TKV_KIVI4; /* these formats need no calibration; white_learn.c tests those that do */
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    return cfg;
}

/* Every tier is F32, so reads have no loss. */
static inline tkv_config make_f32_config(int layers, int seqs) {
    tkv_config cfg = make_config(layers, seqs);
    cfg.tiers.hot.k = cfg.tiers.hot.v = cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k =
        cfg.tiers.archive.v = TKV_F32;
    return cfg;
}

/* Checks the cache with tkv_check. A failure prints `what` and `number`. */
static inline void check_cache_at(const tkv_cache *kv, const char *what, int number) {
    char reason[160];
    tkv_status st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s %d: %s", what, number, reason);
}

static inline int at_least_0(int n) { return n > 0 ? n : 0; }

/* >>tokens */
/* One channel of token t of text `id`. side: 0 is K, 1 is V. It does not depend on the chunks of the appends. */
static inline float channel_of(int id, int layer, int t, int side, int i) {
    tkv_rng r = tkv_rng_seed(((uint64_t)(unsigned)id << 48) ^ ((uint64_t)(unsigned)layer << 40) ^
                             ((uint64_t)(unsigned)t << 12) ^ ((uint64_t)(unsigned)side << 11) ^
                             (uint64_t)(unsigned)i);
    return (float)((double)(tkv_rng_u64(&r) >> 40) * (4.0 / 16777216.0) - 2.0);
}

/* K and V of n tokens of text `id` from token `first` on. */
static inline void fill_rows(int id, int layer, int first, int n, float *k, float *v) {
    int t, i;
    for (t = 0; t < n; t++) {
        for (i = 0; i < K_ROW; i++) k[t * K_ROW + i] = channel_of(id, layer, first + t, 0, i);
        for (i = 0; i < V_ROW; i++) v[t * V_ROW + i] = channel_of(id, layer, first + t, 1, i);
    }
}

/* Appends the next n tokens of text `id` to one layer. */
static inline tkv_status append_tokens(tkv_cache *kv, int seq, int layer, int id, int n) {
    fill_rows(id, layer, tkv_get_length(kv, seq, layer), n, k_in, v_in);
    return tkv_append(kv, seq, layer, k_in, v_in, n);
}

/* Appends n tokens in chunks to every layer that stores its own K and V. */
static inline tkv_status append_to_all_layers(tkv_cache *kv, int seq, int id, int n, int chunk) {
    while (n > 0) {
        int n_new = n < chunk ? n : chunk, layer;
        for (layer = 0; layer < last_config.model.n_layers; layer++) {
            tkv_status st;
            if (!has_own_kv(layer)) continue;
            st = append_tokens(kv, seq, layer, id, n_new);
            if (st) return st;
        }
        n -= n_new;
    }
    return TKV_OK;
}

/* Checks that tokens start .. start+n-1 read back as text `id`, rounded to format `f`. */
static inline void check_read(tkv_cache *kv, int seq, int layer, int id, int start, int n, tkv_format f) {
    int i;
    fill_rows(id, layer, start, n, k_want, v_want);
    for (i = 0; i < n * K_ROW; i++) k_want[i] = as_stored(f, k_want[i]);
    for (i = 0; i < n * V_ROW; i++) v_want[i] = as_stored(f, v_want[i]);
    CHECK_EQ(tkv_read(kv, seq, layer, start, n, k_out, v_out), TKV_OK);
    CHECK_MEM(k_out, k_want, (size_t)(n * K_ROW) * sizeof(float));
    CHECK_MEM(v_out, v_want, (size_t)(n * V_ROW) * sizeof(float));
}

/* Mean squared difference of two arrays, in double. */
static inline double mean_squared_difference(const float *a, const float *b, int n) {
    double sum = 0.0;
    int i;
    for (i = 0; i < n; i++) sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sum / n;
}

/* >>snapshots: everything that a caller can read of sequences, as bytes */
typedef struct snapshot {
    unsigned char *bytes;
    size_t n;
} snapshot;

static inline void add_to_snapshot(snapshot *p, const void *data, size_t n) {
    p->bytes = (unsigned char *)realloc(p->bytes, p->n + n + 1);
    if (!p->bytes) exit(2);
    memcpy(p->bytes + p->n, data, n);
    p->n += n;
}

static inline void add_sequence_to_snapshot(snapshot *p, tkv_cache *kv, int seq) {
    int layer, len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    add_to_snapshot(p, &len, sizeof len);
    for (layer = 0; layer < last_config.model.n_layers; layer++) {
        tkv_layer_info info;
        int from;
        if (tkv_get_layer(kv, seq, layer, &info)) continue; /* no cache */
        len = tkv_get_length(kv, seq, layer);
        add_to_snapshot(p, &len, sizeof len);
        add_to_snapshot(p, &info, sizeof info);
        for (from = info.expired; from < len; from += MAX_TOKENS) {
            int n = len - from < MAX_TOKENS ? len - from : MAX_TOKENS;
            CHECK_EQ(tkv_read(kv, seq, layer, from, n, k_out, v_out), TKV_OK);
            add_to_snapshot(p, k_out, (size_t)(n * K_ROW) * sizeof(float));
            add_to_snapshot(p, v_out, (size_t)(n * V_ROW) * sizeof(float));
        }
    }
}

static inline snapshot snapshot_of(tkv_cache *kv) {
    snapshot p;
    int seq;
    p.bytes = NULL;
    p.n = 0;
    for (seq = 0; seq < last_config.limits.max_seqs; seq++) add_sequence_to_snapshot(&p, kv, seq);
    return p;
}

/* What a failed call must keep: lengths, and which tokens are there. Their values may have been recoded. */
static inline snapshot snapshot_of_tokens(tkv_cache *kv) {
    snapshot p;
    int seq, layer, i;
    p.bytes = NULL;
    p.n = 0;
    for (seq = 0; seq < last_config.limits.max_seqs; seq++)
        for (layer = 0; layer < last_config.model.n_layers; layer++) {
            const int len = tkv_get_length(kv, seq, layer);
            tkv_layer_info info;
            if (tkv_get_layer(kv, seq, layer, &info)) continue; /* no cache */
            add_to_snapshot(&p, &len, sizeof len);
            add_to_snapshot(&p, &info.expired, sizeof info.expired);
            add_to_snapshot(&p, &info.evicted, sizeof info.evicted);
            add_to_snapshot(&p, &info.discarded, sizeof info.discarded);
            for (i = 0; i < len; i++) {
                const tkv_status st = tkv_read(kv, seq, layer, i, 1, k_out, v_out);
                add_to_snapshot(&p, &st, sizeof st);
            }
        }
    return p;
}

static inline snapshot snapshot_of_seq(tkv_cache *kv, int seq) {
    snapshot p;
    p.bytes = NULL;
    p.n = 0;
    add_sequence_to_snapshot(&p, kv, seq);
    return p;
}

static inline int is_same_snapshot(const snapshot *a, const snapshot *b) {
    return a->n == b->n && memcmp(a->bytes, b->bytes, a->n) == 0;
}

static inline void free_snapshot(snapshot *p) {
    free(p->bytes);
    p->bytes = NULL;
}

/* Makes change number i while allocation fail_at and all later ones fail. Without memory it changes nothing. */
static inline tkv_status change_without_memory(tkv_cache *kv, counting_allocator *p, int fail_at,
                                               tkv_status (*change)(tkv_cache *kv, int i), int i) {
    snapshot before = snapshot_of_tokens(kv), after;
    tkv_status st;
    p->fail_at = fail_at;
    st = change(kv, i);
    p->fail_at = 0;
    check_cache_at(kv, "allocation", fail_at);
    if (st) {
        CHECK_EQ(st, TKV_ERR_NOMEM);
        after = snapshot_of_tokens(kv);
        CHECK(is_same_snapshot(&before, &after));
        free_snapshot(&after);
    }
    free_snapshot(&before);
    return st;
}

/* Checks that the cache equals the snapshot `before`, then frees the snapshot. */
static inline void check_unchanged(tkv_cache *kv, snapshot *before, const char *what) {
    snapshot now = snapshot_of(kv);
    CHECK_MSG(is_same_snapshot(&now, before), "%s", what);
    check_cache_at(kv, what, 0);
    free_snapshot(&now);
    free_snapshot(before);
}

#endif /* TKV_SEQUENCES_H */
