/*
 * test_spill.c - offloaded blocks. Attention with them is the same to the bit. A call in which the store fails returns
 * an error, and the cache stays intact. Damaged bytes are detected. Promotion restores the bytes that were written.
 */
#if defined(__unix__) || defined(__APPLE__)
#include "../examples/spill_file.h" /* before system headers */

#include <signal.h>
#include <sys/resource.h>
#define HAVE_FILES 1
#else
#define HAVE_FILES 0
#endif
#include "kit.h"

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    LAYERS = 2,
    SEQS = 2,
    KV_HEADS = 2,
    HEADS = 6,
    DIM = 32,
    ROW = KV_HEADS * DIM,
    CHUNK = 96,
    LAST_CHUNK = 129, /* of one test: more than two blocks */
    LONGEST = 4000
};

/* >>caches */
static tkv_rng rng;
static float k_in[SEQS * CHUNK * ROW], v_in[SEQS * CHUNK * ROW], q_in[CHUNK * HEADS * DIM];
static float out_a[CHUNK * HEADS * DIM], out_b[CHUNK * HEADS * DIM];
static float k_a[LONGEST * ROW], v_a[LONGEST * ROW], k_b[LONGEST * ROW], v_b[LONGEST * ROW];

static tkv_config small_config(void) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    cfg.tiers.warm_tokens = 2 * BLOCK;
    return cfg;
}

static void fill_random_tokens(int n) {
    tkv_rng_fill(&rng, k_in, (size_t)(n * ROW), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * ROW), 1.0);
}

/* Appends the same random tokens to all layers of a, and of b unless it is NULL. */
static tkv_status append_to_both(tkv_cache *a, tkv_cache *b, int seq, int n) {
    tkv_status st = TKV_OK;
    int l;
    for (l = 0; l < LAYERS && !st; l++) {
        fill_random_tokens(n);
        st = tkv_append(a, seq, l, k_in, v_in, n);
        if (!st && b) st = tkv_append(b, seq, l, k_in, v_in, n);
    }
    return st;
}

/* Returns the key of the offloaded block that holds this token of sequence 0; STORE_KEYS if the block is in RAM. */
static uint32_t find_key(tkv_cache *kv, test_store *store, int layer, int token) {
    const int n_reads = store->n_reads;
    CHECK_EQ(tkv_read(kv, 0, layer, token, 1, k_a, v_a), TKV_OK);
    return store->n_reads > n_reads ? store->last_key : (uint32_t)STORE_KEYS;
}

static int offload_all(tkv_cache *kv, int seq) {
    int n_blocks = 0;
    CHECK_EQ(tkv_offload(kv, seq, TKV_ALL_LAYERS, LONGEST, &n_blocks), TKV_OK);
    check_cache(kv);
    return n_blocks;
}

static int n_offloaded(const tkv_cache *kv, int seq, int layer) {
    tkv_layer_info info;
    memset(&info, 0, sizeof info);
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    return info.offloaded;
}

/* Attention and reads of two caches with the same tokens in the same formats must agree to the bit. */
static void check_same(tkv_cache *a, tkv_cache *b, int seq, int n) {
    int l, len = tkv_get_length(a, seq, TKV_ALL_LAYERS);
    CHECK_EQ(tkv_get_length(b, seq, TKV_ALL_LAYERS), len);
    if (n > len) n = len;
    for (l = 0; l < LAYERS; l++) {
        size_t out_size = (size_t)n * HEADS * DIM * sizeof(float),
               kv_size = (size_t)len * ROW * sizeof(float);
        tkv_rng_fill(&rng, q_in, (size_t)(n * HEADS * DIM), 1.0);
        CHECK_EQ(tkv_attend(a, seq, l, q_in, n, out_a), TKV_OK);
        CHECK_EQ(tkv_attend(b, seq, l, q_in, n, out_b), TKV_OK);
        CHECK_MEM(out_a, out_b, out_size);
        CHECK_EQ(tkv_read(a, seq, l, 0, len, k_a, v_a), TKV_OK);
        CHECK_EQ(tkv_read(b, seq, l, 0, len, k_b, v_b), TKV_OK);
        CHECK_MEM(k_a, k_b, kv_size);
        CHECK_MEM(v_a, v_b, kv_size);
    }
}

/* >>attention with offloaded blocks */
static const tkv_format_pair formats[] = {{TKV_F16, TKV_F16},
                                          {TKV_F32, TKV_BF16},
                                          {TKV_Q8, TKV_Q8},
                                          {TKV_KIVI4, TKV_KIVI2},
                                          {TKV_A40, TKV_R40},
                                          {TKV_A25, TKV_R15},
                                          {TKV_INT8, TKV_INT4},
                                          {TKV_FP8_E4M3, TKV_FP4},
                                          {TKV_SQUAT4, TKV_KIVI3},
                                          {TKV_SUBSPACE4, TKV_SUBSPACE2},
                                          {TKV_KVQUANT4, TKV_KVQUANT3}};

TEST(attention_is_bit_identical) {
    const int queries[] = {1, 3, 11,
                           tkv_test_quick() ? 32 : CHUNK}; /* the last: prefill kernels, where they exist */
    int i, n, seq;
    for (i = 0; i < COUNT(formats); i += i && tkv_test_quick() ? 2 : 1) { /* the same formats in both tiers */
        tkv_config cfg = small_config(), cfg_with_store;
        tkv_cache *a, *b;
        test_store store;
        if (i % 2 || i == 0) cfg.tiers.warm = formats[i]; /* offloaded blocks are not recoded later */
        cfg.tiers.archive = formats[i];
        cfg.model.rope.dim = DIM;
        cfg.meter.heads = i % 3;
        cfg.meter.every = 1;
        cfg_with_store = cfg;
        attach_test_store(&store, &cfg_with_store);
        a = create_cache(&cfg);
        b = create_cache(&cfg_with_store);
        for (n = 0; n < 8; n++)
            for (seq = 0; seq < SEQS; seq++) CHECK_EQ(append_to_both(a, b, seq, 60 + 30 * seq), TKV_OK);
        for (n = 0; n < 3; n++) /* until blocks leave the hot tier */
            for (seq = 0; seq < SEQS; seq++) CHECK_EQ(append_to_both(a, b, seq, 50), TKV_OK);
        CHECK(offload_all(b, 1) > LAYERS * 6);
        CHECK_EQ(n_offloaded(b, 0, 0), 0);
        CHECK(n_offloaded(b, 1, 1) > 6);
        for (n = 0; n < COUNT(queries); n++)
            for (seq = 0; seq < SEQS && (n < COUNT(queries) - 1 || i % tkv_test_stride(3, 1) == 0); seq++)
                check_same(a, b, seq, queries[n]);
        CHECK_MSG(store.n_prefetches > 0 && store.n_reads > 0, "%d prefetches, %d reads", store.n_prefetches,
                  store.n_reads);
        for (n = 0; n < 40; n++) /* appends still work */
            for (seq = 0; seq < SEQS; seq++) CHECK_EQ(append_to_both(a, b, seq, 1), TKV_OK);
        if (!i) check_same(a, b, 1, 5);
        check_cache(b);
        CHECK_EQ(n_stored_keys(&store),
                 n_offloaded(b, 0, 0) + n_offloaded(b, 0, 1) + n_offloaded(b, 1, 0) + n_offloaded(b, 1, 1));
        CHECK_EQ(tkv_seq_reset(b, 1), TKV_OK);
        CHECK_EQ(n_stored_keys(&store), 0);
        check_cache(b);
        tkv_destroy(a);
        tkv_destroy(b);
        destroy_test_store(&store);
    }
}

TEST(all_attention_options) {
    static float mask[CHUNK * LONGEST], lse_a[CHUNK * HEADS], lse_b[CHUNK * HEADS], scores_a[LONGEST],
        scores_b[LONGEST];
    tkv_config cfg = small_config(), cfg_with_store;
    tkv_attend_params p;
    float alibi[HEADS], sinks[HEADS];
    tkv_cache *a, *b;
    test_store store;
    int n, options;
    cfg_with_store = cfg;
    attach_test_store(&store, &cfg_with_store);
    a = create_cache(&cfg);
    b = create_cache(&cfg_with_store);
    for (n = 0; n < 9; n++) CHECK_EQ(append_to_both(a, b, 0, CHUNK), TKV_OK);
    CHECK(offload_all(b, 0) > 0);
    tkv_rng_fill(&rng, mask, (size_t)(CHUNK * tkv_get_length(a, 0, TKV_ALL_LAYERS)), 3.0);
    tkv_rng_fill(&rng, q_in, (size_t)(CHUNK * HEADS * DIM), 1.0);
    for (n = 0; n < HEADS; n++) {
        alibi[n] = 0.01f * (float)n;
        sinks[n] = 1.0f;
    }
    for (options = 0; options < 64; options += tkv_test_quick() ? 3 : 1) { /* bits */
        memset(&p, 0, sizeof p);
        p.n = options % 2 ? 5 : 70;
        p.q = q_in;
        p.lse = lse_a;
        if (options & 2) p.mask = mask;
        if (options & 4) p.window = 300;
        if (options & 8) p.scores = scores_a;
        if (options & 16) p.alibi_slopes = alibi, p.softcap = 20.0f;
        if (options & 32) p.sink_logits = sinks, p.non_causal = 1;
        p.out = out_a;
        CHECK_EQ(tkv_attend_ex(a, &p), TKV_OK);
        p.out = out_b;
        p.lse = lse_b;
        if (p.scores) p.scores = scores_b;
        CHECK_EQ(tkv_attend_ex(b, &p), TKV_OK);
        CHECK_MEM(out_a, out_b, (size_t)p.n * HEADS * DIM * sizeof(float));
        CHECK_MEM(lse_a, lse_b, (size_t)p.n * HEADS * sizeof(float));
        if (p.scores)
            CHECK_MEM(scores_a, scores_b, (size_t)tkv_get_length(a, 0, TKV_ALL_LAYERS) * sizeof(float));
        if (options % 8) continue;
        p.n = 2;
        CHECK_EQ(tkv_attend_reference(b, &p), TKV_OK);
        p.out = out_a;
        p.lse = lse_a;
        CHECK_EQ(tkv_attend_reference(a, &p), TKV_OK);
        CHECK_MEM(out_a, out_b, 2 * HEADS * DIM * sizeof(float));
    }
    n = store.n_reads;
    p.n = 1;
    p.window = 100;
    p.non_causal = 0;
    CHECK_EQ(tkv_attend_ex(b, &p), TKV_OK);
    CHECK_EQ(store.n_reads, n); /* blocks outside the window are not read */
    tkv_destroy(a);
    tkv_destroy(b);
    destroy_test_store(&store);
}

/* What tkv_offload leaves in RAM: the last two blocks at least, what the last append has added to, and tokens younger than
 * hot_tokens. Where 2^30 - 1 says that all tokens are hot, these are the newest 64, also if a move has split the last
 * block. Other special values of a plan that keeps all tokens hot set no age. Tokens of an open step do not count. */
TEST(blocks_that_stay_in_ram) {
    static const struct {
        int hot_tokens, rest; /* rest: tokens of the last block */
        int last;             /* tokens of the last append, 0: 1; the others came one by one */
        int in_step;          /* 1: the last append is in an open step */
        int moved;            /* of the last block, by a shift */
        int n_offloaded;
    } cases[] = {{1, 1, 0, 0, 0, 5},
                 {1, 63, 0, 0, 0, 5},
                 {1, 64, 0, 0, 0, 5},
                 {1, 64, 128, 0, 0, 5}, /* the last append begins where the fifth block ends */
                 {1, 64, 129, 0, 0, 4},
                 {65, 1, 0, 0, 0, 5},
                 {66, 1, 0, 0, 0, 4},
                 {128, 64, 0, 0, 0, 5},
                 {129, 64, 0, 0, 0, 4},
                 {66, 1, 1, 1, 0, 4},
                 {65, 2, 1, 1, 0, 5},
                 {65, 40, 40, 1, 0, 4},
                 {65, 41, 40, 1, 0, 5},
                 {TKV_UNLIMITED, 1, 0, 0, 0, 5},
                 {TKV_UNLIMITED, 20, 0, 0, 10, 6}, /* two parts of the last block are the last two */
                 {(1 << 30) - 1, 1, 0, 0, 0, 5},
                 {(1 << 30) - 1, 64, 0, 0, 0, 5},
                 {(1 << 30) - 1, 20, 0, 0, 10, 5},
                 {(1 << 30) - 1, 63, 0, 0, 10, 5},
                 {(1 << 30) - 1, 64, 0, 0, 10, 6}};
    int i, n, t;
    for (i = 0; i < COUNT(cases); i++) {
        tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, 1, LAST_CHUNK);
        const int len = 4 + 6 * BLOCK + cases[i].rest, last = cases[i].last ? cases[i].last : 1;
        test_store store;
        tkv_cache *kv;
        cfg.model.rope.dim = DIM;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        cfg.tiers.hot_tokens = cases[i].hot_tokens;
        attach_test_store(&store, &cfg);
        kv = create_cache(&cfg);
        fill_random_tokens(LAST_CHUNK);
        for (t = 0; t < len - last; t++) CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 1), TKV_OK);
        if (cases[i].in_step) CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, last), TKV_OK);
        if (cases[i].moved) CHECK_EQ(tkv_seq_shift(kv, 0, len - cases[i].moved, TKV_UNLIMITED, 1), TKV_OK);
        CHECK_EQ(tkv_offload(kv, 0, 0, LONGEST, &n), TKV_OK);
        CHECK_MSG(n == cases[i].n_offloaded, "case %d: %d blocks", i, n);
        CHECK_EQ(n_offloaded(kv, 0, 0), n);
        check_cache(kv);
        tkv_destroy(kv);
        destroy_test_store(&store);
    }
}

/* Blocks that a fork holds too stay in RAM, with one fork and with two. Those behind them are offloaded. */
TEST(shared_blocks_are_passed_over) {
    int n_forks, n, t, seq;
    for (n_forks = 0; n_forks <= 2; n_forks++) {
        tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, 3, CHUNK);
        test_store store;
        tkv_cache *kv;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        cfg.tiers.hot_tokens = BLOCK;
        attach_test_store(&store, &cfg);
        kv = create_cache(&cfg);
        for (t = 0; t < 4 + 8 * BLOCK; t += n) {
            n = t ? BLOCK : 4 + BLOCK;
            fill_random_tokens(n);
            CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, n), TKV_OK);
            for (seq = 1; t == 2 * BLOCK + 4 && seq <= n_forks; seq++)
                CHECK_EQ(tkv_seq_fork(kv, 0, seq, TKV_UNLIMITED), TKV_OK); /* three blocks */
        }
        CHECK_EQ(tkv_offload(kv, 0, 0, LONGEST, &n), TKV_OK);
        CHECK_EQ(n, n_forks ? 3 : 6);
        CHECK_EQ(tkv_offload(kv, 1, 0, LONGEST, &n), TKV_OK);
        CHECK_EQ(n, 0);
        for (seq = 1; seq <= n_forks; seq++) CHECK_EQ(tkv_seq_reset(kv, seq), TKV_OK);
        CHECK_EQ(tkv_offload(kv, 0, 0, LONGEST, &n), TKV_OK);
        CHECK_EQ(n, n_forks ? 3 : 0);
        check_cache(kv);
        tkv_destroy(kv);
        destroy_test_store(&store);
    }
}

TEST(wide_heads) {
    static const int dims[][2] = {{256, 256}, {80, 64}, {128, 192}};
    static float k[CHUNK * 256], v[CHUNK * 256], q[2 * 256], x[2 * 256], y[2 * 256];
    int i, n;
    for (i = 0; i < COUNT(dims); i++) {
        tkv_config cfg = tkv_default_config(), cfg_with_store;
        tkv_cache *a, *b;
        test_store store;
        cfg.model.n_layers = 1;
        cfg.model.n_heads = 2;
        cfg.model.n_kv_heads = 1;
        cfg.model.head_dim = dims[i][0];
        cfg.model.v_head_dim = dims[i][1];
        cfg.tiers.hot_tokens = i == 0 ? TKV_UNLIMITED : 64; /* exact blocks are the largest */
        cfg_with_store = cfg;
        attach_test_store(&store, &cfg_with_store);
        a = create_cache(&cfg);
        b = create_cache(&cfg_with_store);
        for (n = 0; n < 8; n++) {
            tkv_rng_fill(&rng, k, CHUNK * 256, 1.0);
            tkv_rng_fill(&rng, v, CHUNK * 256, 1.0);
            CHECK_EQ(tkv_append(a, 0, 0, k, v, CHUNK), TKV_OK);
            CHECK_EQ(tkv_append(b, 0, 0, k, v, CHUNK), TKV_OK);
        }
        CHECK(offload_all(b, 0) > 6);
        tkv_rng_fill(&rng, q, 2 * 256, 1.0);
        CHECK_EQ(tkv_attend(a, 0, 0, q, 1, x), TKV_OK);
        CHECK_EQ(tkv_attend(b, 0, 0, q, 1, y), TKV_OK);
        CHECK_MEM(x, y, 2u * (size_t)dims[i][1] * sizeof(float));
        tkv_destroy(a);
        tkv_destroy(b);
        destroy_test_store(&store);
    }
}

/* >>under a budget */
TEST(exact_tokens_beyond_the_budget) {
    tkv_config cfg = small_config(), cfg_with_store;
    tkv_cache *a, *b;
    tkv_memory_info m;
    counting_allocator allocator;
    test_store store;
    int n, n_new;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg_with_store = small_config();
    /* Without compression, exact blocks are offloaded, and results stay identical. */
    cfg_with_store.budget.pressure.max_level = TKV_OFF;
    cfg_with_store.budget.bytes = 210 * 1000;
    cfg_with_store.host.allocator = counting_allocator_of(&allocator);
    attach_test_store(&store, &cfg_with_store);
    a = create_cache(&cfg);
    b = create_cache(&cfg_with_store);
    for (n = 0; n < 3900; n += n_new) {
        n_new = 1 + tkv_rng_below(&rng, n % 5 ? 3 : 20);
        if (n + n_new > LONGEST) break;
        CHECK_EQ(append_to_both(a, b, 0, n_new), TKV_OK);
        CHECK_LE(allocator.peak, cfg_with_store.budget.bytes);
        check_cache(b);
    }
    check_same(a, b, 0, 4);
    CHECK_EQ(tkv_get_memory(b, &m), TKV_OK);
    printf("\n    %d tokens, %lu bytes as FP16 in %lu of %lu, %d blocks offloaded", n,
           (unsigned long)m.fp16_bytes, (unsigned long)m.total, (unsigned long)cfg_with_store.budget.bytes,
           n_stored_keys(&store));
    CHECK_LE(10.0 * 0.45, m.ratio);
    CHECK_EQ(m.offloaded.codes + m.offloaded.metadata, (size_t)n_stored_keys(&store) * BLOCK * ROW * 2 * 2);
    CHECK_EQ(m.offloaded.tokens, (size_t)n_stored_keys(&store) * BLOCK);
    CHECK_EQ(budget_of(b).offloaded, n_stored_keys(&store));
    CHECK_EQ(budget_of(b).refused, 0);
    n = tkv_get_length(b, 0, TKV_ALL_LAYERS) - 66;
    CHECK_EQ(tkv_seq_truncate(a, 0, n), TKV_OK);
    if (tkv_seq_truncate(b, 0, n) == TKV_OK) check_same(a, b, 0, 4);
    check_cache(b);
    tkv_destroy(a);
    tkv_destroy(b);
    CHECK_EQ(allocator.held, 0);
    destroy_test_store(&store);
}

TEST(offload_follows_compression) {
    tkv_config cfg = small_config();
    tkv_budget_info info;
    tkv_cache *kv;
    counting_allocator allocator;
    test_store store;
    int n, seq, l, i;
    cfg.budget.bytes = 330 * 1000;
    cfg.host.allocator = counting_allocator_of(&allocator);
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    for (n = 0; n < 3900; n += 30)
        for (seq = 0; seq < SEQS; seq++) {
            CHECK_EQ(append_to_both(kv, NULL, seq, 30), TKV_OK);
            check_cache(kv);
            if (store.n_writes == 0) continue;
            info = budget_of(kv);
            CHECK_EQ(info.level, info.n_levels - 1); /* offload comes after all levels */
        }
    CHECK(n_stored_keys(&store) > 20);
    CHECK_LE(allocator.peak, cfg.budget.bytes);
    for (l = 0; l < LAYERS; l++) { /* the oldest blocks, about as many of both sequences */
        CHECK(n_offloaded(kv, 0, l) > 5);
        CHECK_LE(n_offloaded(kv, 0, l) - n_offloaded(kv, 1, l), 2);
        CHECK_LE(n_offloaded(kv, 1, l) - n_offloaded(kv, 0, l), 2);
        for (i = 1; i <= n_offloaded(kv, 0, l); i++) CHECK(find_key(kv, &store, l, i * BLOCK) < STORE_KEYS);
        tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
        CHECK_EQ(tkv_attend(kv, 0, l, q_in, 1, out_a), TKV_OK);
        {
            tkv_attend_params r;
            memset(&r, 0, sizeof r);
            r.layer = l;
            r.n = 1;
            r.q = q_in;
            r.out = out_b;
            CHECK_EQ(tkv_attend_reference(kv, &r), TKV_OK);
        }
        for (i = 0; i < HEADS * DIM; i++) CHECK_NEAR(out_a[i], out_b[i], 0.01);
    }
    CHECK_EQ(tkv_seq_reserve(kv, 0, 60), TKV_OK);
    check_cache(kv);
    CHECK_EQ(append_to_both(kv, NULL, 0, 60), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes * 9 / 10), TKV_OK);
    check_cache(kv);
    CHECK_LE(allocator.held, cfg.budget.bytes * 9 / 10);
    tkv_destroy(kv);
    CHECK_EQ(allocator.held, 0);
    destroy_test_store(&store);
}

TEST(eviction_if_the_store_is_full) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    test_store store;
    int n, evicted, n_stored;
    cfg.budget.bytes = 420 * 1000;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    cfg.tiers.hot_tokens = 256;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    for (n = 0; n < 2000; n += 20) {
        CHECK_EQ(append_to_both(kv, NULL, 0, 20), TKV_OK);
        check_cache(kv);
    }
    n_stored = n_stored_keys(&store);
    CHECK(n_stored > 20);
    CHECK_EQ(budget_of(kv).evicted, 0);
    /* Now tokens in RAM are evicted. Offloaded tokens stay, because they take no memory. */
    store.is_full = 1;
    for (n = 0; n < 600; n += 20) {
        CHECK_EQ(append_to_both(kv, NULL, 0, 20), TKV_OK);
        check_cache(kv);
    }
    evicted = (int)budget_of(kv).evicted;
    CHECK(evicted > 300);
    CHECK_EQ(n_stored_keys(&store), n_stored);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 4 + BLOCK * n_offloaded(kv, 0, 0), k_a, v_a), TKV_OK);
    store.is_full = 0;
    for (n = 0; n < 600; n += 20) {
        CHECK_EQ(append_to_both(kv, NULL, 0, 20), TKV_OK);
        check_cache(kv);
    }
    CHECK(n_stored_keys(&store) > n_stored);
    CHECK_EQ(budget_of(kv).evicted, evicted);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

TEST(steps) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    test_store store;
    int n, len;
    cfg.budget.bytes = 300 * 1000;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    for (n = 0; n < 60; n++) {
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        len = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
        CHECK_EQ(append_to_both(kv, NULL, 0, 40), TKV_OK);
        CHECK_EQ(append_to_both(kv, NULL, 0, 40), TKV_OK);
        check_cache(kv);
        if (n % 3) CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
        else CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n % 3 ? len + 80 : len);
        check_cache(kv);
        tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, tkv_get_length(kv, 0, TKV_ALL_LAYERS) > 0, out_a), TKV_OK);
    }
    CHECK(n_stored_keys(&store) > 0);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

typedef struct offload_log {
    int n_events, n_wrong, next[LAYERS];
    size_t bytes;
} offload_log;

static void log_offload(void *user, const tkv_event *e) {
    offload_log *log = (offload_log *)user;
    if (e->kind != TKV_EVENT_OFFLOAD) return;
    log->n_events++;
    log->bytes += e->bytes;
    if (e->seq != 1 || e->from != log->next[e->layer] || e->to != e->from + BLOCK || !e->text) log->n_wrong++;
    log->next[e->layer] = e->to;
}

/* 1 if the Prometheus report has the line "name n". */
static int has_report_line(const tkv_cache *kv, const char *name, int n) {
    static char text[16384];
    char line[100];
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, NULL, text, sizeof text, NULL), TKV_OK);
    snprintf(line, sizeof line, "\n%s %d\n", name, n);
    return strstr(text, line) != NULL;
}

/* Each offloaded block causes an event, and reports count it. */
TEST(events_and_reports) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    offload_log log;
    tkv_memory_info m;
    test_store store;
    int n, n_blocks;
    memset(&log, 0, sizeof log);
    for (n = 0; n < LAYERS; n++) log.next[n] = 4; /* after the sinks */
    cfg.host.on_event = log_offload;
    cfg.host.event_user = &log;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    for (n = 0; n < 9; n++) CHECK_EQ(append_to_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK(has_report_line(kv, "tkv_blocks_offloaded_total", 0));
    n_blocks = offload_all(kv, 1);
    CHECK(n_blocks > 10);
    CHECK_EQ(log.n_events, n_blocks);
    CHECK_EQ(log.n_wrong, 0);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_LE(m.offloaded.codes + m.offloaded.metadata, log.bytes);
    CHECK(has_report_line(kv, "tkv_blocks_offloaded_total", n_blocks));
    CHECK(has_report_line(kv, "tkv_tokens_offloaded", n_blocks * BLOCK));
    CHECK(has_report_line(kv, "tkv_tokens_discarded", 0));
    CHECK_EQ(append_to_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK_EQ(append_to_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK_EQ(tkv_seq_discard(kv, 1, LONGEST, &n), TKV_OK);
    CHECK(n > 0);
    CHECK(has_report_line(kv, "tkv_tokens_discarded", n * LAYERS));
    CHECK(has_report_line(kv, "tkv_blocks_discarded_total", n * LAYERS / BLOCK));
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* >>a store that fails */
TEST(write_fails) {
    int at, n_refused = 0;
    for (at = 1; at < 12; at++) {
        tkv_config cfg = small_config();
        tkv_cache *kv;
        test_store store;
        int n, len = 0;
        cfg.budget.bytes = 230 * 1000;
        cfg.budget.pressure.max_level = TKV_OFF;
        attach_test_store(&store, &cfg);
        kv = create_cache(&cfg);
        store.fail_write = at;
        while (len < 1200) {
            for (n = 0; n < LAYERS; n++) { /* a refused append adds no tokens */
                tkv_status st;
                int old_len = tkv_get_length(kv, 0, n);
                fill_random_tokens(20);
                st = tkv_append(kv, 0, n, k_in, v_in, 20);
                CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
                CHECK_EQ(tkv_get_length(kv, 0, n), st ? old_len : old_len + 20);
                check_cache(kv);
                if (!st) continue;
                n_refused++;
                CHECK_MSG(strstr(tkv_get_last_error(kv), "cfg.offload.write") != NULL, "%s",
                          tkv_get_last_error(kv));
                CHECK_EQ(budget_of(kv).unwritten, 1);
                CHECK_EQ(store.n_writes, at);
                CHECK_EQ(tkv_append(kv, 0, n, k_in, v_in, 20), TKV_OK);
            }
            len += 20;
        }
        CHECK(store.n_writes > 0);
        check_cache(kv);
        CHECK_EQ(tkv_set_budget(kv, 900 * 1000), TKV_OK);
        for (n = 0; n < 4; n++) CHECK_EQ(append_to_both(kv, NULL, 0, CHUNK), TKV_OK);
        store.fail_write = 1;
        CHECK_EQ(tkv_offload(kv, 0, TKV_ALL_LAYERS, 3, &n), TKV_ERR_IO);
        CHECK_EQ(n, 0);
        check_cache(kv);
        store.fail_write = KV_HEADS + 1;
        CHECK_EQ(tkv_offload(kv, 0, 0, 3, &n), TKV_ERR_IO);
        CHECK_EQ(n, 1);
        check_cache(kv);
        store.fail_write = 0;
        tkv_destroy(kv);
        destroy_test_store(&store);
    }
    CHECK(n_refused > 3);
}

/* >>a store that returns wrong bytes */
/* Makes a cache and offloads as many blocks of sequence 0 as possible. */
static tkv_cache *make_offloaded_cache(tkv_config *cfg, test_store *store) {
    tkv_cache *kv;
    int n;
    attach_test_store(store, cfg);
    kv = create_cache(cfg);
    for (n = 0; n < 7; n++) CHECK_EQ(append_to_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK(offload_all(kv, 0) > 0);
    tkv_rng_fill(&rng, q_in, (size_t)(CHUNK * HEADS * DIM), 1.0);
    return kv;
}

/* Every function that reads offloaded blocks must return `expected`. The cache must pass its self-check. */
static void check_readers(tkv_cache *kv, tkv_status expected) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = q_in;
    p.out = out_b;
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_b), expected);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, CHUNK, out_b), expected);
    CHECK_EQ(tkv_attend_reference(kv, &p), expected);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, tkv_get_length(kv, 0, TKV_ALL_LAYERS), k_b, v_b), expected);
    check_cache(kv);
}

TEST(read_fails) {
    tkv_config cfg = small_config();
    test_store store;
    tkv_cache *kv = make_offloaded_cache(&cfg, &store);
    int at, n_reads;
    const int n = tkv_test_quick() ? 20 : 70; /* queries */
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, n, out_a), TKV_OK);
    store.n_reads = 0;
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, n, out_b), TKV_OK);
    n_reads = store.n_reads;
    CHECK(n_reads > 20);
    for (at = 1; at <= n_reads; at += 1 + at / 8) {
        store.fail_read = at;
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, n, out_b), TKV_ERR_IO);
        CHECK_EQ(store.fail_read, 0);
        check_cache(kv);
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, n, out_b), TKV_OK);
        CHECK_MEM(out_a, out_b, (size_t)n * HEADS * DIM * sizeof(float));
    }
    store.fail_read = 3;
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 400, k_b, v_b), TKV_ERR_IO);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 400, k_b, v_b), TKV_OK);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

TEST(bytes_are_checked) {
    tkv_config cfg = small_config();
    test_store store;
    tkv_cache *kv;
    stored_key *key, *other;
    uint8_t *saved;
    int i, k;
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4; /* heads of equal size, to be swapped */
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    kv = make_offloaded_cache(&cfg, &store);
    key = &store.key[find_key(kv, &store, 0, 2 * BLOCK)];
    other = &store.key[find_key(kv, &store, 0, 3 * BLOCK)];
    saved = (uint8_t *)malloc(store.key_bytes);
    if (!saved) exit(2);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK);
    CHECK_EQ(key->n_parts, KV_HEADS);
    memcpy(saved, key->bytes, store.key_bytes);
    for (i = 0; i < KV_HEADS; i++)
        for (k = 0; k < 20; k++) { /* flips a bit anywhere, also in the hash */
            size_t at =
                key->at[i] + (k == 19 ? key->size[i] - 1 : (size_t)tkv_rng_below(&rng, (int)key->size[i]));
            key->bytes[at] = (uint8_t)(key->bytes[at] ^ 1 << k % 8);
            check_readers(kv, TKV_ERR_DATA);
            memcpy(key->bytes, saved, store.key_bytes);
        }
    /* Flips three bits that would cancel in a hash of lanes without rotations: bit 63 of a word, bits 63 and 31 of
     * the word 32 bytes later. */
    for (i = 0; i < KV_HEADS; i++)
        for (k = 0; k + 40 <= (int)key->size[i] - 8; k += 8) {
            uint8_t *word = key->bytes + key->at[i] + k;
            word[7] ^= 0x80;
            word[39] ^= 0x80;
            word[35] ^= 0x80;
            CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_b), TKV_ERR_DATA);
            memcpy(key->bytes, saved, store.key_bytes);
        }
    CHECK_EQ(key->size[0], key->size[1]); /* heads swapped */
    memcpy(key->bytes + key->at[0], saved + key->at[1], key->size[0]);
    memcpy(key->bytes + key->at[1], saved + key->at[0], key->size[0]);
    check_readers(kv, TKV_ERR_DATA);
    memcpy(key->bytes, other->bytes, store.key_bytes); /* the bytes of another block */
    check_readers(kv, TKV_ERR_DATA);
    memset(key->bytes, 0, store.key_bytes); /* zeros, as from a hole in a file */
    check_readers(kv, TKV_ERR_DATA);
    memcpy(key->bytes, saved, store.key_bytes);
    check_readers(kv, TKV_OK);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_b), TKV_OK);
    CHECK_MEM(out_a, out_b, HEADS * DIM * sizeof(float));
    free(saved);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

TEST(stale_records) {
    tkv_config cfg = small_config();
    test_store store;
    tkv_cache *kv = make_offloaded_cache(&cfg, &store);
    int n;
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK); /* blocks will get the same numbers and positions again */
    CHECK_EQ(n_stored_keys(&store), 0);
    store.discards_writes = 1; /* writes keep nothing: the store holds the old bytes */
    for (n = 0; n < 7; n++) CHECK_EQ(append_to_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK(offload_all(kv, 0) > 0);
    check_readers(kv, TKV_ERR_DATA);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* A store can still hold the bytes of an earlier run, where each write of the present one was lost. Bytes of the same run
 * are right. They are wrong if they are those of another tier, position, head, side, block or order of offloading, also
 * where all else is the same. */
TEST(bytes_of_another_run) {
    enum { SAME, WARM, MOVED, NUMBER, ORDER, RUNS };
    static const char *const name[RUNS] = {"the same", "another tier", "other positions", "other numbers",
                                           "another order"};
    static float x[6 * CHUNK * ROW], y[2 * CHUNK * ROW];
    test_store store[RUNS];
    tkv_cache *kv[RUNS];
    uint32_t key[RUNS];
    int run, n, l;
    tkv_rng_fill(&rng, x, COUNT(x), 1.0);
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    for (run = 0; run < RUNS; run++) {
        tkv_config cfg = small_config();
        cfg.model.rope.dim = DIM;
        cfg.tiers.warm = pair_of(TKV_INT8, TKV_INT8);
        cfg.tiers.archive = pair_of(TKV_FP8_E4M3, TKV_FP8_E4M3); /* as many bytes */
        cfg.tiers.warm_tokens = run == WARM ? 4000 : 1;
        attach_test_store(&store[run], &cfg);
        kv[run] = create_cache(&cfg);
        if (run == NUMBER)
            CHECK_EQ(tkv_append(kv[run], 1, 0, x, x, BLOCK), TKV_OK); /* it takes the first ones */
        for (n = 0; n < 6; n++)
            for (l = 0; l < LAYERS; l++) {
                int positions[CHUNK], t;
                tkv_append_params p;
                for (t = 0; t < CHUNK; t++) positions[t] = n * CHUNK + t + (run == MOVED ? 1 : 0);
                memset(&p, 0, sizeof p);
                p.layer = l;
                p.n = CHUNK;
                p.k = p.v = x + n * CHUNK * ROW;
                p.token_positions = positions;
                CHECK_EQ(tkv_append_ex(kv[run], &p), TKV_OK);
            }
        /* The oldest block of layer 0 is the first one in the store. */
        CHECK_EQ(tkv_offload(kv[run], 0, run == ORDER ? 1 : 0, 1, &n), TKV_OK);
        CHECK_EQ(n, 1);
        if (run == ORDER) CHECK_EQ(tkv_offload(kv[run], 0, 0, 1, NULL), TKV_OK);
        key[run] = find_key(kv[run], &store[run], 0, 20);
        CHECK(key[run] < STORE_KEYS);
        CHECK_EQ(store[run].key[key[run]].n_parts, store[SAME].key[key[SAME]].n_parts);
        CHECK_EQ(store[run].key[key[run]].size[0], store[SAME].key[key[SAME]].size[0]);
    }
    CHECK(key[WARM] == key[SAME] && key[MOVED] == key[SAME] && key[ORDER] == key[SAME]);
    CHECK(key[NUMBER] != key[SAME]);
    CHECK_EQ(tkv_read(kv[SAME], 0, 0, 0, 2 * CHUNK, y, NULL), TKV_OK);
    for (run = SAME; run < RUNS; run++) { /* the bytes of a run where SAME wrote its own */
        uint8_t *bytes = store[SAME].key[key[SAME]].bytes, *saved = (uint8_t *)malloc(store[SAME].key_bytes);
        if (!saved) exit(2);
        memcpy(saved, bytes, store[SAME].key_bytes);
        memcpy(bytes, store[run].key[key[run]].bytes, store[SAME].key_bytes);
        CHECK_MSG(tkv_read(kv[SAME], 0, 0, 0, 2 * CHUNK, k_a, NULL) == (run == SAME ? TKV_OK : TKV_ERR_DATA),
                  "%s", name[run]);
        CHECK_MSG(tkv_attend(kv[SAME], 0, 0, q_in, 1, out_a) == (run == SAME ? TKV_OK : TKV_ERR_DATA), "%s",
                  name[run]);
        if (run == SAME) CHECK_MEM(k_a, y, sizeof y);
        memcpy(bytes, saved, store[SAME].key_bytes);
        free(saved);
        check_cache(kv[SAME]);
    }
    for (run = 0; run < RUNS; run++) {
        tkv_destroy(kv[run]);
        destroy_test_store(&store[run]);
    }
}

/* The number of a write is in the seed. It has more bits than a slot's number, which remembers the low ones. */
TEST(a_block_is_written_70000_times) {
    enum { NARROW = 4, TIMES = 70000 };
    static float x[CHUNK * NARROW], before[CHUNK * NARROW], after[CHUNK * NARROW];
    tkv_config cfg = make_sized_config(1, 1, 1, NARROW, 1, CHUNK);
    test_store store;
    tkv_cache *kv;
    int i, n, bad = 0;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    tkv_rng_fill(&rng, x, COUNT(x), 1.0);
    for (i = 0; i < 3; i++) CHECK_EQ(tkv_append(kv, 0, 0, x, x, CHUNK), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, CHUNK, before, NULL), TKV_OK);
    for (i = 0; i < TIMES; i++) {
        bad += tkv_offload(kv, 0, 0, 1, &n) != TKV_OK || n != 1;
        if (i + 1 < TIMES) bad += tkv_promote(kv, 0, 0, 10) != TKV_OK;
        if (bad) break;
    }
    CHECK_EQ(i, TIMES);
    CHECK_EQ(n_stored_keys(&store), 1);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, CHUNK, after, NULL), TKV_OK);
    CHECK_MEM(after, before, sizeof after);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* Heads that are as wide as this are stored as two parts of equal size, K and V. Each is accepted in its place alone. */
TEST(sides_that_are_swapped) {
    enum { WIDE = 256 };
    static float k[CHUNK * WIDE], v[CHUNK * WIDE], q[WIDE], x[WIDE];
    static uint8_t k_part[1 << 16];
    tkv_config cfg = make_sized_config(1, 1, 1, WIDE, 1, CHUNK);
    test_store store;
    tkv_cache *kv;
    stored_key *key;
    int n;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    tkv_rng_fill(&rng, k, COUNT(k), 1.0);
    tkv_rng_fill(&rng, v, COUNT(v), 1.0);
    tkv_rng_fill(&rng, q, WIDE, 1.0);
    for (n = 0; n < 4; n++) CHECK_EQ(tkv_append(kv, 0, 0, k, v, CHUNK), TKV_OK);
    CHECK_EQ(tkv_offload(kv, 0, 0, 1, &n), TKV_OK);
    CHECK_EQ(n, 1);
    CHECK_EQ(tkv_attend(kv, 0, 0, q, 1, x), TKV_OK);
    key = &store.key[store.last_key];
    REQUIRE(key->n_parts == 2 && key->size[0] == key->size[1] && key->size[0] <= sizeof k_part);
    memcpy(k_part, key->bytes + key->at[0], key->size[0]);
    memcpy(key->bytes + key->at[0], key->bytes + key->at[1], key->size[0]);
    memcpy(key->bytes + key->at[1], k_part, key->size[0]);
    CHECK_EQ(tkv_attend(kv, 0, 0, q, 1, x), TKV_ERR_DATA);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* >>each key is erased once */
TEST(keys_are_erased) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    test_store store;
    int n, most_keys = 0;
    cfg.model.window = 300;
    cfg.offload.keep_exact = 1;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    for (n = 0; n < 40; n++) {
        CHECK_EQ(append_to_both(kv, NULL, n % 2, CHUNK), TKV_OK);
        (void)offload_all(kv, n % 2);
        if (n_stored_keys(&store) > most_keys) most_keys = n_stored_keys(&store);
        CHECK_EQ(tkv_attend(kv, n % 2, 0, q_in, 1, out_a), TKV_OK);
    }
    CHECK(store.n_erased > most_keys); /* expired blocks are erased */
    CHECK_LE(most_keys, 2 * SEQS * LAYERS * (300 / BLOCK + 4));
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    check_cache(kv);
    CHECK(n_stored_keys(&store) > 0);
    tkv_destroy(kv);
    destroy_test_store(&store);
    /* truncation of exact blocks */
    cfg = small_config();
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    for (n = 0; n < 6; n++) CHECK_EQ(append_to_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK(offload_all(kv, 0) > 0);
    n = n_stored_keys(&store);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 4 + BLOCK * n_offloaded(kv, 0, 0)), TKV_OK);
    CHECK_EQ(n_stored_keys(&store), n);
    check_cache(kv);
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK); /* the last block is offloaded now */
    CHECK_EQ(append_to_both(kv, NULL, 0, 10), TKV_OK);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 10, out_a), TKV_OK);
    check_cache(kv);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* >>promotion */
TEST(promotion_restores) {
    tkv_config exact = small_config(), cfg = small_config();
    tkv_cache *a, *b;
    tkv_tier tier = TKV_TIER_HOT;
    test_store store;
    int n, l, at, len;
    exact.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.offload.keep_exact = 1;
    attach_test_store(&store, &cfg);
    a = create_cache(&exact);
    b = create_cache(&cfg);
    for (n = 0; n < 8; n++) CHECK_EQ(append_to_both(a, b, 0, CHUNK), TKV_OK);
    len = tkv_get_length(b, 0, TKV_ALL_LAYERS);
    CHECK_EQ(tkv_offload(b, 0, TKV_ALL_LAYERS, 3, NULL), TKV_OK); /* besides the exact copies */
    check_cache(b);
    CHECK(n_stored_keys(&store) > LAYERS * (8 + 3));
    CHECK_EQ(tkv_promote(b, 0, 0, len - 1), TKV_ERR_NO_SOURCE); /* already exact */
    CHECK_EQ(tkv_promote(b, 0, 0, 0), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_promote(b, 0, 0, len), TKV_ERR_RANGE);
    CHECK_EQ(tkv_promote(b, 0, LAYERS, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote(b, SEQS, 0, 0), TKV_ERR_ARG);
    store.fail_read = 2;
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_ERR_IO);
    check_cache(b);
    for (l = 0; l < LAYERS; l++)
        for (at = 4; at < len; at += BLOCK) {
            tkv_status st = tkv_promote(b, 0, l, at + at % BLOCK);
            CHECK_EQ(tier_of(b, 0, l, at, &tier), TKV_OK);
            CHECK_EQ(st, tier == TKV_TIER_HOT ? TKV_ERR_NO_SOURCE : TKV_OK);
            CHECK_EQ(tkv_promote(b, 0, l, at), TKV_ERR_NO_SOURCE);
            check_cache(b);
        }
    CHECK_EQ(n_offloaded(b, 0, 0), 0);
    check_same(a, b, 0, 7); /* all blocks are exact again */
    CHECK_EQ(budget_of(b).promoted > 8 * LAYERS, 1);
    CHECK(offload_all(b, 0) > 0); /* and can be offloaded again */
    check_same(a, b, 0, 7);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_OK);
    check_same(a, b, 0, 7);
    tkv_destroy(b);
    destroy_test_store(&store);
    /* without an exact copy, promotion brings back the offloaded format */
    cfg = small_config();
    attach_test_store(&store, &cfg);
    b = create_cache(&cfg);
    for (n = 0; n < 8; n++) CHECK_EQ(append_to_both(b, NULL, 0, CHUNK), TKV_OK);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_ERR_NO_SOURCE);
    CHECK_MSG(strstr(tkv_get_last_error(b), "keep_exact") != NULL, "%s", tkv_get_last_error(b));
    CHECK_EQ(tkv_read(b, 0, 0, 0, len, k_a, v_a), TKV_OK);
    CHECK(offload_all(b, 0) > 0);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_OK);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_read(b, 0, 0, 0, len, k_b, v_b), TKV_OK);
    CHECK_MEM(k_a, k_b, (size_t)len * ROW * sizeof(float));
    CHECK_MEM(v_a, v_b, (size_t)len * ROW * sizeof(float));
    check_cache(b);
    n = n_offloaded(b, 0, 0);
    CHECK_EQ(tkv_offload(b, 0, 0, 1, NULL), TKV_OK);
    CHECK_EQ(n_offloaded(b, 0, 0), n + 1);
    tkv_destroy(a);
    tkv_destroy(b);
    destroy_test_store(&store);
}

TEST(promotion_under_a_budget) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    counting_allocator allocator;
    test_store store;
    int n, at, n_promoted = 0, n_refused = 0;
    cfg.budget.bytes = 330 * 1000;
    cfg.host.allocator = counting_allocator_of(&allocator);
    cfg.offload.keep_exact = 1;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    for (n = 0; n < 3900; n += 50) CHECK_EQ(append_to_both(kv, NULL, 0, 50), TKV_OK);
    for (at = 4; at < 1000; at += BLOCK) {
        tkv_status st = tkv_promote(kv, 0, 0, at);
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
        n_promoted += st == TKV_OK;
        n_refused += st == TKV_ERR_BUDGET;
        check_cache(kv);
        CHECK_LE(allocator.peak, cfg.budget.bytes);
    }
    CHECK(n_refused > 0);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, 2 * cfg.budget.bytes), TKV_OK);
    for (at = 4; at < 1000; at += BLOCK) n_promoted += tkv_promote(kv, 0, 1, at) == TKV_OK;
    CHECK(n_promoted > 10);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes), TKV_OK); /* memory shrinks to the old budget */
    check_cache(kv);
    CHECK_LE(allocator.held, cfg.budget.bytes);
    for (n = 0; n < 40; n++) CHECK_EQ(append_to_both(kv, NULL, 1, 5), TKV_OK);
    check_cache(kv);
    tkv_destroy(kv);
    CHECK_EQ(allocator.held, 0);
    destroy_test_store(&store);
}

/* >>allocations that fail, memory of the caller */
TEST(every_allocation_fails_once) {
    int nth, n_refused = 0;
    for (nth = 1; nth < 60; nth++) {
        tkv_config cfg = small_config();
        tkv_cache *kv = NULL;
        tkv_status st;
        counting_allocator allocator;
        test_store store;
        int n, l, refused = 0;
        cfg.budget.bytes = nth % 2 ? 300 * 1000 : 0;
        cfg.host.allocator = counting_allocator_of(&allocator);
        cfg.offload.keep_exact = nth % 3 == 0;
        attach_test_store(&store, &cfg);
        allocator.fail_at = nth;
        st = tkv_create(&cfg, &kv);
        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM);
        for (n = 0; n < 50 && kv; n++) {
            for (l = 0; l < LAYERS; l++) {
                int old_len = tkv_get_length(kv, 0, l);
                fill_random_tokens(20);
                st = tkv_append(kv, 0, l, k_in, v_in, 20);
                CHECK(st == TKV_OK || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET);
                CHECK_EQ(tkv_get_length(kv, 0, l), st ? old_len : old_len + 20);
                if (allocator.fail_at == 1) refused = 1, allocator.fail_at = 0;
                if (st) CHECK_EQ(tkv_append(kv, 0, l, k_in, v_in, 20), TKV_OK);
            }
            if (n % 4 == 0) CHECK_EQ(tkv_offload(kv, 0, TKV_ALL_LAYERS, 1, NULL), TKV_OK);
            if (n % 7 == 6) {
                st = tkv_promote(kv, 0, 0, 4);
                CHECK(st == TKV_OK || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET || st == TKV_ERR_NO_SOURCE);
                if (allocator.fail_at == 1) refused = 1, allocator.fail_at = 0;
            }
            check_cache(kv);
            CHECK(cfg.budget.bytes == 0 || allocator.peak <= cfg.budget.bytes);
        }
        n_refused += refused || !kv;
        tkv_destroy(kv);
        CHECK_EQ(allocator.held, 0);
        destroy_test_store(&store);
    }
    CHECK(n_refused > 10);
}

TEST(in_place) {
    tkv_config cfg = small_config();
    tkv_cache *kv = NULL, *a;
    size_t bytes = 0;
    uint8_t *raw;
    test_store store;
    int n, i;
    cfg.budget.pressure.max_level = TKV_OFF;
    cfg.limits.max_seqs = 1;
    cfg.limits.max_tokens = LONGEST;
    cfg.budget.bytes = 240 * 1000;
    attach_test_store(&store, &cfg);
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    raw = (uint8_t *)malloc(bytes + 128);
    if (!raw) exit(2);
    memset(raw, 0xa5, bytes + 128);
    CHECK_EQ(tkv_create_in_place(&cfg, raw + 64, bytes, &kv, NULL, 0), TKV_OK);
    if (!kv) return;
    cfg = small_config();
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    a = create_cache(&cfg);
    for (n = 0; n + 25 <= LONGEST; n += 25) {
        CHECK_EQ(append_to_both(a, kv, 0, 25), TKV_OK);
        if (n % 200 == 0) check_cache(kv);
    }
    check_same(a, kv, 0, 3);
    CHECK(n_stored_keys(&store) > 50);
    for (i = 0; i < 64; i++) CHECK(raw[i] == 0xa5 && raw[bytes + 64 + (size_t)i] == 0xa5);
    CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 25), TKV_ERR_CAPACITY); /* max_tokens */
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(n_stored_keys(&store), 0);
    tkv_destroy(kv);
    tkv_destroy(a);
    free(raw);
    destroy_test_store(&store);
}

/* >>the store of examples/spill_file.h */
#if HAVE_FILES
/* Limits the size of files, as a full disk does: a write beyond it is cut short, then refused. 0: no limit. */
static void limit_file_size(rlim_t bytes) {
    struct rlimit r;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &r), 0);
    r.rlim_cur = bytes ? bytes : r.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &r), 0);
}

static uint32_t last_read; /* key of the last read */
static int read_and_record_key(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    last_read = key;
    return spill_file_fetch(user, key, offset, bytes, size);
}

TEST(a_file) {
    tkv_config cfg = small_config(), cfg_with_store;
    spill_file file;
    tkv_cache *a, *b;
    size_t bytes;
    char bad = 0x77;
    int n, n_blocks = 0, n_before;
    cfg_with_store = cfg;
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, &bytes), TKV_OK);
    CHECK_EQ(spill_file_open(&file, "/nowhere/at/all", bytes), -1);
    REQUIRE(spill_file_open(&file, NULL, bytes) == 0);
    cfg_with_store.offload = spill_file_config(&file);
    cfg_with_store.offload.read = read_and_record_key;
    a = create_cache(&cfg);
    b = create_cache(&cfg_with_store);
    for (n = 0; n < 8; n++) CHECK_EQ(append_to_both(a, b, 0, CHUNK), TKV_OK);
    (void)signal(SIGXFSZ, SIG_IGN);
    limit_file_size(5 * file.bytes + 1000); /* in the middle of a block */
    CHECK_EQ(tkv_offload(b, 0, 0, 100, &n_blocks), TKV_ERR_IO);
    CHECK(n_blocks > 0 && n_blocks < 8);
    limit_file_size(0);
    check_cache(b);
    check_same(a, b, 0, 3); /* nothing is lost */
    n_before = n_blocks;
    CHECK_EQ(tkv_offload(b, 0, TKV_ALL_LAYERS, 100, &n_blocks), TKV_OK);
    CHECK(n_blocks + n_before > 14);
    check_same(a, b, 0, 3);
    CHECK(spill_file_size(&file) > 0);
    CHECK_EQ(tkv_read(b, 0, 0, 3 * BLOCK, 1, k_b, v_b), TKV_OK);
    n = (int)last_read;
    CHECK_EQ(pwrite(file.fd, &bad, 1, (off_t)n * (off_t)file.bytes + 77), 1);
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_DATA);
    CHECK_EQ(ftruncate(file.fd, (off_t)n * (off_t)file.bytes + 300), 0); /* reads are cut short */
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_IO);
    CHECK_EQ(tkv_read(b, 0, 0, 0, tkv_get_length(b, 0, TKV_ALL_LAYERS), k_b, v_b), TKV_ERR_IO);
    check_cache(b);
    CHECK_EQ(tkv_seq_reset(b, 0), TKV_OK); /* the store still works */
    CHECK_EQ(tkv_seq_reset(a, 0), TKV_OK);
    for (n = 0; n < 8; n++) CHECK_EQ(append_to_both(a, b, 0, CHUNK), TKV_OK);
    CHECK(offload_all(b, 0) > 14);
    check_same(a, b, 0, 3);
    tkv_destroy(a);
    tkv_destroy(b);
    spill_file_close(&file);
}
#else
TEST(a_file) { SKIP("no POSIX files"); }
#endif

/* >>configs and arguments that are refused */
/* What an estimate counts as offloaded are whole blocks, of one format. */
TEST(estimates_with_offloaded_blocks) {
    test_store store;
    tkv_config cfg = small_config();
    const size_t bytes = KV_HEADS * BLOCK * 2 * DIM * 2 / 8; /* codes of 2 bits */
    tkv_memory_info one, two;
    tkv_level level;
    attach_test_store(&store, &cfg);
    memset(&level, 0, sizeof level);
    level.warm = level.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.budget.bytes = 300 * 1000;
    cfg.budget.ladder = &level;
    cfg.budget.n_levels = 1;
    CHECK_EQ(tkv_estimate_memory(&cfg, 3000, 1, &one), TKV_OK);
    CHECK_EQ(tkv_estimate_memory(&cfg, 3000, 2, &two), TKV_OK);
    CHECK_LE(LAYERS * 10 * BLOCK, one.offloaded.tokens);
    CHECK_LE(one.offloaded.tokens, LAYERS * 3000);
    CHECK_EQ(one.offloaded.tokens % BLOCK, 0);
    CHECK_EQ(one.offloaded.codes, one.offloaded.tokens / BLOCK * bytes);
    CHECK_EQ(two.offloaded.codes, two.offloaded.tokens / BLOCK * bytes);
    CHECK(two.offloaded.tokens > one.offloaded.tokens);
    CHECK_LE(two.offloaded.tokens, LAYERS * 2 * 3000);
    destroy_test_store(&store);
}

TEST(wrong_configs_and_arguments) {
    tkv_config cfg = small_config();
    char reason[200];
    size_t bytes = 0;
    test_store store;
    tkv_cache *kv;
    int i;
    attach_test_store(&store, &cfg);
    cfg.offload.read = NULL;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "offload.") == reason, "%s", reason);
    cfg.offload.read = test_store_read;
    cfg.offload.keep_exact = 2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    cfg.offload.keep_exact = 0;
    cfg.model.head_dim = 160;
    cfg.tiers.hot.k = TKV_F32;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "16 bits") != NULL, "%s", reason);
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, &bytes), TKV_ERR_CONFIG);
    cfg.model.head_dim = 128;
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, &bytes), TKV_OK);
    CHECK_EQ(bytes, (size_t)KV_HEADS * (BLOCK * 128 * (4 + 2) + 16));
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, NULL), TKV_ERR_ARG);
    cfg = small_config();
    cfg.offload.keep_exact = 1; /* without a store, no copies are kept */
    kv = create_cache(&cfg);
    for (i = 0; i < 4; i++) CHECK_EQ(append_to_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK_EQ(tkv_promote(kv, 0, 0, 10), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_promote(kv, 0, 0, LONGEST), TKV_ERR_RANGE);
    CHECK_EQ(tkv_offload(kv, 0, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_offload(kv, 5, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_offload(NULL, 0, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote(NULL, 0, 0, 0), TKV_ERR_ARG);
    tkv_destroy(kv);
    destroy_test_store(&store);
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK_EQ(tkv_offload(kv, 0, 0, 0, &i), TKV_OK);
    CHECK_EQ(i, 0);
    CHECK_EQ(tkv_offload(kv, 0, 0, -1, &i), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "n_blocks is -1; it must not be negative");
    tkv_destroy(kv);
    destroy_test_store(&store);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(17);
    RUN(attention_is_bit_identical);
    RUN(all_attention_options);
    RUN(blocks_that_stay_in_ram);
    RUN(shared_blocks_are_passed_over);
    RUN(wide_heads);
    RUN(exact_tokens_beyond_the_budget);
    RUN(offload_follows_compression);
    RUN(eviction_if_the_store_is_full);
    RUN(steps);
    RUN(write_fails);
    RUN(read_fails);
    RUN(bytes_are_checked);
    RUN(stale_records);
    RUN(bytes_of_another_run);
    RUN(a_block_is_written_70000_times);
    RUN(sides_that_are_swapped);
    RUN(keys_are_erased);
    RUN(promotion_restores);
    RUN(promotion_under_a_budget);
    RUN(every_allocation_fails_once);
    RUN(in_place);
    RUN(a_file);
    RUN(estimates_with_offloaded_blocks);
    RUN(wrong_configs_and_arguments);
    RUN(events_and_reports);
    return tkv_test_end();
}
