/*
 * whole_caches.h - caches of tests/test_save_cache.c and tests/fuzz/load_cache.c: their configs, and scripts of random
 * calls that fill them.
 */
#ifndef TKV_WHOLE_CACHES_H
#define TKV_WHOLE_CACHES_H

#include "saved_files.h"
#include "sequences.h"

enum { LAYERS = 3, SEQS = 5 };

/* >>scripts */
/* One random call. The same number makes the same call, as long as the caches are alike. Returns a hash of its answer.
 */
static inline uint64_t call_number(tkv_cache *kv, int number) {
    static float q[4 * 2 * KV_HEADS * DIM], out[4 * 2 * KV_HEADS * V_DIM];
    tkv_rng rng = tkv_rng_seed(1000 + (uint64_t)number);
    const int seq = tkv_rng_below(&rng, SEQS), other = tkv_rng_below(&rng, SEQS),
              what = tkv_rng_below(&rng, 16), n = 1 + tkv_rng_below(&rng, 90),
              len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    uint64_t hash = 0;
    tkv_status st = TKV_OK;
    if (what < 9 || !len) {
        st = append_to_all_layers(kv, seq, seq + 1, len > 900 ? 1 : n, 64);
        for (int layer = 0; layer < LAYERS && tkv_get_length(kv, seq, layer); layer++) {
            tkv_rng_fill(&rng, q, 4 * 2 * KV_HEADS * DIM, 1.0);
            memset(out, 0, sizeof out);
            (void)tkv_attend(kv, seq, layer, q, len ? 4 : 1, out);
            hash = hash * 31 + xxh64_of((const uint8_t *)out, sizeof out);
        }
    } else if (what < 11 && other != seq) st = tkv_seq_fork(kv, seq, other, 1 + tkv_rng_below(&rng, len));
    else if (what == 11) st = tkv_seq_truncate(kv, seq, len - tkv_rng_below(&rng, len < 40 ? len : 40));
    else if (what == 12) st = tkv_seq_reserve(kv, seq, n);
    else if (what == 13) st = tkv_seq_flush(kv, seq, TKV_FLUSH_DUE);
    else if (what == 14 && number % 2) st = tkv_seq_shift(kv, seq, len / 2, TKV_UNLIMITED, 1 + number % 7);
    else if (what == 14) st = tkv_seq_pin(kv, seq, len / 2, 3, TKV_UNLIMITED);
    else st = number % 3 ? tkv_report_pressure(kv, .5f) : tkv_seq_reset(kv, seq);
    return hash * 31 + (uint64_t)(uint32_t)st;
}

/* Names sinks, pins or evicts tokens of a sequence, by number. */
static inline tkv_status mark_number(tkv_cache *kv, tkv_rng *rng, int seq, int len) {
    const int first = tkv_rng_below(rng, len), n = 1 + tkv_rng_below(rng, 20), what = tkv_rng_below(rng, 4);
    uint64_t victims[4096 / 64] = {0};
    tkv_evict_params evict;
    int i;
    if (what == 0) return tkv_seq_set_sinks(kv, seq, first, 1 + n % 3, 1);
    if (what == 1) return tkv_seq_pin(kv, seq, first, n, n % 2 ? TKV_UNLIMITED : len + 30);
    memset(&evict, 0, sizeof evict);
    evict.seq = seq;
    evict.layer = TKV_ALL_LAYERS;
    evict.victims = victims;
    evict.n_victims = len < 4096 ? len : 4096;
    for (i = first; i < evict.n_victims && i < first + 6 * n; i++)
        if (tkv_rng_below(rng, 4)) victims[i / 64] |= (uint64_t)1 << i % 64;
    return tkv_evict(kv, &evict);
}

/* One random call of those that move, share, cut or mark tokens, or an append. The same number makes the same call, as
 * long as the caches are alike. Returns its status; *seq: a sequence that it changed. */
static inline tkv_status move_number(tkv_cache *kv, int number, int *seq) {
    tkv_rng rng = tkv_rng_seed(77000 + (uint64_t)number);
    const int a = tkv_rng_below(&rng, SEQS), b = (a + 1 + tkv_rng_below(&rng, SEQS - 1)) % SEQS,
              what = tkv_rng_below(&rng, 24), len = tkv_get_length(kv, a, TKV_ALL_LAYERS),
              there = tkv_get_length(kv, b, TKV_ALL_LAYERS);
    int sources[SEQS], indices[8], at = 0, first, n, i;
    tkv_status st;
    *seq = what >= 11 && what < 15 ? b : a;
    if (what < 9 || len < 2) {
        n = 1 + tkv_rng_below(&rng, what < 3 ? 90 : 20);
        return append_to_all_layers(kv, a, a + 1, len > 700 ? 1 : n, 1 + tkv_rng_below(&rng, 64));
    }
    first = tkv_rng_below(&rng, len);
    n = 1 + tkv_rng_below(&rng, 1 + tkv_rng_below(&rng, len - first));
    if (what < 11) return tkv_seq_remove(kv, a, first, what == 9 ? first + n : TKV_UNLIMITED);
    if (what < 13) {
        st = there ? tkv_seq_reset(kv, b) : TKV_OK;
        return st ? st : tkv_seq_fork(kv, a, b, what == 11 ? TKV_UNLIMITED : 1 + first);
    }
    if (what < 15) { /* the tokens behind those of b, at their own positions, or where they follow */
        if (len + there > 1000) return tkv_seq_reset(kv, b);
        if (number % 3 == 0) first = 0; /* whole blocks */
        if (what == 13 || last_config.model.rope.dim == 0) at = first;
        else if (there && tkv_get_positions(kv, b, 0, there - 1, 1, &at) == TKV_OK) at = at < 0 ? 0 : at + 1;
        return tkv_seq_copy(kv, a, first, tkv_rng_below(&rng, 2) ? TKV_UNLIMITED : first + n, b, at);
    }
    if (what == 15) {
        const int from = tkv_rng_below(&rng, SEQS - 1);
        for (i = 0; i < SEQS - from; i++) sources[i] = tkv_rng_below(&rng, SEQS - from);
        return tkv_seq_reorder(kv, from, sources, SEQS - from);
    }
    if (what == 16) { /* the last tokens, most of them */
        first = len - 1 - tkv_rng_below(&rng, len < 24 ? len : 24);
        for (i = first, n = 0; i < len && n < 8; i++)
            if (tkv_rng_below(&rng, 3)) indices[n++] = i;
        return tkv_seq_keep(kv, a, first, indices, n);
    }
    if (what == 17) return tkv_seq_slide(kv, a, 1 + tkv_rng_below(&rng, 64), &at);
    if (what == 18) return tkv_seq_shift(kv, a, first, TKV_UNLIMITED, 1 + tkv_rng_below(&rng, 9));
    if (what == 19) return tkv_seq_truncate(kv, a, len - tkv_rng_below(&rng, len < 90 ? len : 90));
    if (what == 20) return tkv_seq_flush(kv, a, number % 2 ? TKV_FLUSH_DUE : TKV_FLUSH_ALL);
    if (what == 21) return tkv_maintain(kv, 1 + tkv_rng_below(&rng, 8), NULL, NULL, &at);
    return mark_number(kv, &rng, a, len);
}

static inline void run_script(tkv_cache *kv, int first, int n) {
    for (int i = first; i < first + n; i++) (void)call_number(kv, i);
}

/* >>configs */
enum { CONFIGS = 19 };

static inline tkv_config config_number(int i) {
    tkv_config cfg = make_config(LAYERS, SEQS);
    cfg.tiers.warm = pair_of(TKV_A40, TKV_R40);
    cfg.tiers.archive = pair_of(TKV_A30, TKV_R20);
    cfg.tiers.warm_tokens = 128;
    cfg.limits.max_tokens = 3000; /* so that a hostile file reserves no more */
    if (i == 1) cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI2);
    if (i == 2) cfg.tiers.archive = pair_of(TKV_SQUAT2, TKV_KIVI2);
    if (i == 3)
        cfg.tiers.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT2), cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    if (i == 4) cfg.budget.bytes = 700000;
    if (i == 5) cfg.budget.bytes = 600000, cfg.evict.policy = TKV_EVICT_H2O;
    if (i == 6) cfg.evict.policy = TKV_EVICT_SNAPKV, cfg.evict.keep_tokens = 300;
    if (i == 7) cfg.evict.policy = TKV_EVICT_KNORM, cfg.evict.keep_tokens = 256;
    if (i == 8) cfg.tiers.n_anchors = 8, cfg.importance.sample_every = 4;
    if (i == 9) cfg.model.window = 200;
    if (i == 10) cfg.meter.heads = 4, cfg.meter.tokens = 512, cfg.meter.every = 8;
    if (i == 11) cfg.meter.heads = 4, cfg.meter.every = 4, cfg.meter.target = .97f, cfg.budget.adapt = 1;
    if (i == 12) cfg.tiers.hot = pair_of(TKV_BF16, TKV_F16), cfg.tiers.sink_tokens = TKV_OFF;
    if (i == 13) cfg.model.v_in_k = 1;
    if (i == 14) cfg.tiers.archive = pair_of(TKV_SUBSPACE2, TKV_SUBSPACE2), cfg.tiers.hot_tokens = 16;
    if (i == 15) cfg.budget.bytes = 500000, cfg.limits.max_tokens = 1000;
    if (i >= 16) cfg.model.rope.dim = DIM; /* tokens move */
    if (i >= 17) cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI2);
    if (i == 18) cfg.budget.bytes = 313000;
    return cfg;
}

#endif /* TKV_WHOLE_CACHES_H */
