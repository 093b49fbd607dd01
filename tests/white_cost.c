/*
 * white_cost.c - white-box test of the most blocks that calls code, merge, read and write: the table of chapter 8 of
 * the manual. It counts with the counters of a cache (coded, merged), with kernels that count the encodings and
 * decodings of keys, and with the reads and writes of a store (white.h).
 */
#include "white.h"
#include "kit.h"

enum {
    DIM = 16, /* one call of encode_k_columns for a head */
    HEADS = 4,
    KV_HEADS = 2,
    LAYERS = 2,
    SEQS = 4,
    MOST_APPEND = 100,
    LONG_APPEND = 2200,
    BLOCK = TKV_BLOCK_TOKENS
};

static float rows[MOST_APPEND * HEADS * DIM], out[MOST_APPEND * HEADS * DIM]; /* of queries */
static float tokens[LONG_APPEND * KV_HEADS * DIM];                            /* K and V that are appended */
static TKVI_ALIGNED unsigned char saved[4 << 20];

static tkv_config make_config(void) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, MOST_APPEND);
    cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4); /* they need no table */
    cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.limits.max_tokens = 4096;
    cfg.model.rope.dim = DIM;
    return cfg;
}

static void fill_rows(uint64_t seed) {
    tkv_rng r = tkv_rng_seed(seed);
    tkv_rng_fill(&r, rows, COUNT(rows), 1.0);
    tkv_rng_fill(&r, tokens, COUNT(tokens), 1.0);
}

static tkv_status append(tkv_cache *kv, int seq, int layer, int n) {
    return tkv_append(kv, seq, layer, tokens, tokens, n);
}

static void append_to_all(tkv_cache *kv, int seq, int n, int chunk) {
    int done, layer;
    for (done = 0; done < n; done += chunk)
        for (layer = 0; layer < LAYERS; layer++)
            CHECK_EQ(append(kv, seq, layer, n - done < chunk ? n - done : chunk), TKV_OK);
}

/* >>counting. A cache gets kernels that count: heads of blocks whose keys are encoded, keys that are decoded from tiles
 * (in tokens), and rows of exact blocks that are read. */
static const tkvi_simd_ops *plain_ops;
static int n_encoded, n_decoded, n_rows_read;

static void count_groups(const tkvi_side *s, const float *x, size_t stride, int n,
                         uint8_t (*code)[TKVI_TILE_CODES], uint8_t *meta) {
    n_encoded += s->which == TKV_K;
    plain_ops->encode_groups(s, x, stride, n, code, meta);
}

static void count_columns(tkvi_columns *c) {
    n_encoded++;
    plain_ops->encode_k_columns(c);
}

static void count_tiles(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first, int n,
                        float *x, size_t stride) {
    n_decoded += s->which == TKV_K ? n : 0;
    plain_ops->decode_tiles(s, ops, src, first, n, x, stride);
}

static void count_rows(const uint8_t *src, int n, float *x) {
    n_rows_read++;
    plain_ops->f16_to_f32(src, n, x);
}

/* What calls did since the last count of a cache, in blocks. demoted, merged, restored: by the counters of the cache.
 * encoded: by its kernels. */
typedef struct work_done {
    int coded, merged, restored, encoded;
} work_done;

static work_done counted;

static work_done count_of(const tkv_cache *kv) {
    work_done w;
    w.coded = (int)kv->counts.demoted;
    w.merged = (int)kv->counts.merged;
    w.restored = (int)kv->counts.recomputed;
    w.encoded = n_encoded / KV_HEADS;
    CHECK_EQ(n_encoded % KV_HEADS, 0);
    return w;
}

/* Begins to count the work of a cache. */
static void count_from_here(tkv_cache *kv) {
    static tkvi_kernels kernels;
    static tkvi_simd_ops ops;
    if (kv->kernels != &kernels) {
        plain_ops = kv->kernels->simd_ops;
        kernels = *kv->kernels;
        ops = *plain_ops;
        ops.encode_groups = count_groups;
        ops.encode_k_columns = count_columns;
        ops.decode_tiles = count_tiles;
        ops.f16_to_f32 = count_rows;
        kernels.simd_ops = &ops;
        kv->kernels = &kernels;
    }
    n_encoded = n_decoded = n_rows_read = 0;
    counted = count_of(kv);
}

/* The work since the last count. */
static work_done work_since(tkv_cache *kv) {
    const work_done now = count_of(kv);
    work_done w;
    w.coded = now.coded - counted.coded;
    w.merged = now.merged - counted.merged;
    w.restored = now.restored - counted.restored;
    w.encoded = now.encoded - counted.encoded;
    CHECK_LE(w.coded, w.encoded); /* a block is encoded once; of exact blocks that merge, none is */
    CHECK_LE(w.encoded, w.coded + w.merged + 3 * w.restored);
    count_from_here(kv);
    return w;
}

static int n_blocks_of(const tkv_cache *kv, int seq) {
    tkv_layer_info info;
    int layer, tier, n = 0;
    for (layer = 0; layer < LAYERS; layer++) {
        CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
        for (tier = 0; tier < TKV_TIER_COUNT; tier++) n += info.blocks[tier];
    }
    return n;
}

static int larger_of(int a, int b) { return a > b ? a : b; }

/* An append of n tokens behind one of `last`: 2 + (last + n) / 16 blocks of its layer. Where no block is left from
 * before: those that became due. */
static int most_of_append(int last, int n) { return 2 + (last + n) / 16; }

TEST(appends) {
    tkv_config cfg = make_config();
    tkv_cache *kv = create_cache(&cfg);
    tkv_rng r = tkv_rng_seed(1);
    int i, last = 0, most = 0, most_of_one = 0, reached = 0;
    fill_rows(2);
    count_from_here(kv);
    for (i = 0; i < 600 && tkv_get_length(kv, 0, 0) < 3900;
         i++) { /* no backlog: one token codes at most two blocks */
        const int n = i % 3 ? 1 : 1 + tkv_rng_below(&r, MOST_APPEND);
        work_done w;
        CHECK_EQ(append(kv, 0, 0, n), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded, most_of_append(last, n));
        CHECK_LE(w.coded, 2 * (1 + (last + n) / BLOCK));
        CHECK_EQ(w.merged, 0);
        if (n == 1 && last == 1) most_of_one = larger_of(most_of_one, w.coded);
        most = larger_of(most, w.coded);
        last = n;
    }
    CHECK_LE(2, most);
    CHECK_EQ(most_of_one, 1);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(tkv_set_hot_tokens(kv, 3000), TKV_OK);
    append_to_all(kv, 0, 2900, 100);
    CHECK_EQ(tkv_set_hot_tokens(kv, 64), TKV_OK); /* 44 blocks of each layer are due at once */
    count_from_here(kv);
    for (i = 0, last = 100; i < 200; i++, last = 1) {
        work_done w;
        CHECK_EQ(append(kv, 0, 0, 1), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded, most_of_append(last, 1));
        reached |= w.coded == most_of_append(last, 1);
    }
    CHECK(reached); /* the bound is tight */
    tkv_destroy(kv);
}

/* Flushes of partial blocks, as cuts, leave short blocks. An append that codes a block merges them all, if they are half
 * as many again as needed. */
static void make_short_blocks(tkv_cache *kv, int seq) {
    int i;
    for (i = 0; i < 40; i++) {
        append_to_all(kv, seq, 20, 20);
        CHECK_EQ(tkv_seq_flush(kv, seq, TKV_FLUSH_ALL), TKV_OK);
    }
}

TEST(appends_after_cuts) {
    tkv_config cfg = make_config();
    tkv_cache *kv = create_cache(&cfg);
    int i, blocks, most = 0;
    fill_rows(3);
    make_short_blocks(kv, 0);
    blocks = n_blocks_of(kv, 0) / LAYERS;
    count_from_here(kv);
    for (i = 0; i < 200; i++) {
        work_done w;
        CHECK_EQ(append(kv, 0, 0, 1), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded, most_of_append(1, 1));
        CHECK_LE(w.merged, blocks);
        most = larger_of(most, w.merged);
    }
    CHECK_LE(10, most);
    tkv_destroy(kv);
}

TEST(maintenance) {
    tkv_config cfg = make_config();
    tkv_cache *kv = create_cache(&cfg);
    int work, done, total = 0, merges = 0;
    fill_rows(4);
    make_short_blocks(kv, 0);
    append_to_all(kv, 1, 1500, 100);
    count_from_here(kv);
    for (work = 0; work < 12; work++) {
        work_done w;
        CHECK_EQ(tkv_maintain(kv, work % 4, NULL, NULL, &done), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded + w.merged, work % 4);
        CHECK_EQ(done, w.coded + w.merged);
        total += done;
        merges += w.merged;
    }
    CHECK_LE(12, total);
    CHECK_LE(6, merges);
    tkv_destroy(kv);
}

TEST(steps_and_flushes) {
    tkv_config cfg = make_config();
    tkv_cache *kv = create_cache(&cfg);
    int i, mode, layer, most = 0;
    fill_rows(5);
    count_from_here(kv);
    for (i = 0; i < 300; i++) {
        work_done w;
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded, LAYERS * most_of_append(1, 1));
        most = larger_of(most, w.coded);
        for (layer = 0; layer < LAYERS; layer++) CHECK_EQ(append(kv, 0, layer, 1), TKV_OK);
        CHECK_EQ(i % 5 ? tkv_seq_commit(kv, 0) : tkv_seq_abort(kv, 0), TKV_OK);
        CHECK_EQ(tkv_seq_reserve(kv, 0, 10), TKV_OK);
        w = work_since(kv);
        CHECK_EQ(w.coded + w.merged, 0);
    }
    CHECK_LE(1, most);
    append_to_all(kv, 0, 2000, 100);
    for (mode = TKV_FLUSH_DUE; mode <= TKV_FLUSH_ALL; mode++) {
        work_done w;
        count_from_here(kv);
        CHECK_EQ(tkv_seq_flush(kv, 0, (tkv_flush_mode)mode), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded, n_blocks_of(kv, 0));
        if (mode) CHECK_LE(1, w.coded);
    }
    tkv_destroy(kv);
}

TEST(other_calls_code_nothing) {
    static const int indices[] = {1302, 1305, 1311}, sources[] = {1, 0};
    static float values[64];
    static tkv_feedback feedback;
    tkv_config cfg = make_config();
    tkv_cache *kv;
    tkv_save_params save;
    tkv_advice advice;
    tkv_ranked top[4];
    tkv_budget_info budget;
    tkv_memory_info memory;
    tkv_remat_block list[4];
    uint8_t tiers[64];
    char bytes[64];
    size_t n_bytes;
    work_done w;
    int n, i, positions[64];
    cfg.evict.policy = TKV_EVICT_H2O;
    cfg.budget.adapt = 1;
    kv = create_cache(&cfg);
    fill_rows(6);
    append_to_all(kv, 0, 1320, 100);
    count_from_here(kv);
    CHECK_EQ(tkv_seq_pin(kv, 0, 100, 64, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, 64, values, NULL), TKV_OK);
    CHECK_EQ(tkv_add_scores(kv, 0, 0, 0, 64, values), TKV_OK);
    CHECK_EQ(tkv_find_top_tokens(kv, 0, 0, 4, 0, top, &n), TKV_OK);
    CHECK_EQ(tkv_get_positions(kv, 0, 0, 0, 64, positions), TKV_OK);
    CHECK_EQ(tkv_get_tiers(kv, 0, 0, 0, 64, tiers), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    CHECK_EQ(tkv_get_budget(kv, &budget), TKV_OK);
    CHECK_EQ(tkv_seq_list_blocks(kv, 0, list, COUNT(list), &n), TKV_OK);
    CHECK_EQ(tkv_init_feedback(&feedback, NULL, NULL, 0), TKV_OK);
    for (i = 0; i < 50; i++) CHECK_EQ(tkv_observe_score(&feedback, .8f), TKV_OK);
    CHECK_EQ(tkv_adapt_plan(kv, &feedback, &advice), TKV_OK);
    CHECK_EQ(advice.kind, TKV_ADVICE_FINER);
    CHECK_EQ(tkv_set_level(kv, 0), TKV_OK);
    CHECK_EQ(tkv_set_hot_tokens(kv, 100), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 1301, 2, 1), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 1301, 2, 0), TKV_OK);
    CHECK_EQ(tkv_seq_put_state(kv, 0, 1, 1200, values, sizeof bytes), TKV_OK);
    CHECK_EQ(tkv_seq_get_state(kv, 0, 1, 1200, bytes, sizeof bytes, NULL), TKV_OK);
    CHECK_EQ(tkv_seq_find_state(kv, 0, TKV_UNLIMITED), 1200);
    check_cache(kv);
    CHECK_EQ(n_decoded + n_rows_read, 0); /* they read no keys and values either */
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 1000), TKV_OK);
    CHECK_EQ(tkv_seq_reorder(kv, 0, sources, 2), TKV_OK);
    CHECK_EQ(tkv_seq_reorder(kv, 0, sources, 2), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 1300, indices, 3), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 500, TKV_UNLIMITED, 7), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 0, 600, 800, 2, 0), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 620, 640), TKV_OK);
    CHECK_EQ(tkv_seq_slide(kv, 0, MOST_APPEND, &n), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 700), TKV_OK);
    memset(&save, 0, sizeof save);
    CHECK_EQ(tkv_seq_save(kv, &save, saved, sizeof saved, &n_bytes), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    w = work_since(kv);
    CHECK_EQ(w.coded + w.merged + w.encoded, 0);
    tkv_destroy(kv);
}

/* Attention reads a block once for each KV head and each 8 rows; tkv_read once for each KV head. */
TEST(reads) {
    static const int queries[] = {1, 4, 5, 9, 40};
    static float k[300 * KV_HEADS * DIM], v[300 * KV_HEADS * DIM];
    tkv_config cfg = make_config();
    test_store store;
    tkv_cache *kv;
    tkv_layer_info info;
    int i, n;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    fill_rows(7);
    append_to_all(kv, 0, 1500, 100);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
    CHECK_EQ(tkv_offload(kv, 0, 0, 1000, &n), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_LE(20, info.offloaded);
    count_from_here(kv);
    for (i = 0; i < COUNT(queries); i++) {
        const int tiles = (queries[i] * HEADS / KV_HEADS + 7) / 8, before = store.n_reads;
        CHECK_EQ(tkv_attend(kv, 0, 0, rows, queries[i], out), TKV_OK);
        CHECK_LE(store.n_reads - before, info.offloaded * KV_HEADS * tiles);
        CHECK_LE(info.offloaded, store.n_reads - before);
    }
    n = store.n_reads;
    CHECK_EQ(tkv_read(kv, 0, 0, 100, 200, k, v), TKV_OK); /* at most 5 blocks */
    CHECK_LE(store.n_reads - n, 5 * KV_HEADS);
    CHECK_LE(1, store.n_reads - n);
    n = store.n_reads;
    CHECK_EQ(tkv_promote(kv, 0, 0, 100), TKV_OK);
    CHECK_LE(store.n_reads - n, KV_HEADS + 1);
    CHECK_EQ(work_since(kv).coded, 0);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* tkv_evict merges, with and without a budget. Each merge empties a block, which goes, or fills one, which stays. Coded
 * blocks are filled only where that empties another. */
TEST(evictions) {
    int way;
    for (way = 0; way < 4; way++) {
        const int is_exact = way % 2;
        tkv_config cfg = make_config();
        tkv_evict_params p;
        tkv_cache *kv;
        work_done w;
        int blocks;
        cfg.evict.policy = TKV_EVICT_RANDOM;
        cfg.budget.bytes = way < 2 ? 0 : 8 << 20;
        if (is_exact) cfg.tiers.hot_tokens = TKV_UNLIMITED;
        kv = create_cache(&cfg);
        fill_rows(8);
        append_to_all(kv, 0, 2000, 100);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
        blocks = n_blocks_of(kv, 0);
        count_from_here(kv);
        memset(&p, 0, sizeof p);
        p.layer = TKV_ALL_LAYERS;
        p.keep = 300;
        CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
        w = work_since(kv);
        CHECK_EQ(w.coded, 0);
        CHECK_LE(w.merged, blocks);
        CHECK_LE(blocks * 7 / 10, w.merged);
        tkv_destroy(kv);
    }
}

/* A budget: an append codes each block at most once for each level. */
TEST(budgets) {
    tkv_config cfg = make_config();
    tkv_budget_info info;
    tkv_cache *kv;
    int i, most = 0;
    cfg.budget.bytes = 600000;
    kv = create_cache(&cfg);
    fill_rows(9);
    count_from_here(kv);
    for (i = 0; i < 3000; i++) {
        const int blocks = n_blocks_of(kv, 0);
        work_done w;
        if (append(kv, 0, i % LAYERS, 1)) break;
        w = work_since(kv);
        CHECK_EQ(tkv_get_budget(kv, &info), TKV_OK);
        CHECK_LE(w.coded, blocks * info.n_levels);
        most = larger_of(most, w.coded);
    }
    CHECK_LE(1, most);
    CHECK_EQ(tkv_get_budget(kv, &info), TKV_OK);
    count_from_here(kv);
    CHECK_EQ(tkv_set_budget(kv, info.used - info.used / 10), TKV_OK);
    i = work_since(kv).coded;
    CHECK_LE(i, n_blocks_of(kv, 0) * info.n_levels);
    CHECK_LE(2, i);
    tkv_destroy(kv);
}

/* >>appends as parts: they share the first 128 blocks */
TEST(appends_as_parts) {
    enum { PARTS = 3, MOST_SHARED = 128 };
    static unsigned char workspace[2 << 20];
    tkv_config cfg = make_config();
    tkv_append_params p;
    tkv_cache *kv;
    work_done w;
    size_t bytes;
    int i, shared = 0;
    cfg.limits.max_tokens = 16384;
    cfg.limits.max_append = LONG_APPEND;
    kv = create_cache(&cfg);
    fill_rows(10);
    CHECK_EQ(tkv_set_hot_tokens(kv, 12000), TKV_OK);
    for (i = 0; i < 9; i++) CHECK_EQ(append(kv, 0, 0, 1000), TKV_OK);
    CHECK_EQ(tkv_set_hot_tokens(kv, 64), TKV_OK); /* 139 blocks are due */
    memset(&p, 0, sizeof p);
    p.n = LONG_APPEND;
    p.k = p.v = tokens;
    CHECK_EQ(tkv_get_append_bytes(kv, &p, &bytes), TKV_OK);
    REQUIRE(bytes <= sizeof workspace);
    count_from_here(kv);
    for (i = 0; i < PARTS; i++) {
        shared = n_encoded / KV_HEADS;
        CHECK_EQ(tkv_append_part(kv, &p, i, PARTS, workspace, bytes), TKV_OK);
    }
    CHECK_EQ(shared, MOST_SHARED); /* the last part appends, and codes the others */
    w = work_since(kv);
    CHECK_EQ(w.encoded, w.coded); /* no block is coded twice */
    CHECK_LE(w.coded, most_of_append(1000, LONG_APPEND));
    CHECK_LE(MOST_SHARED + 10, w.coded);
    tkv_destroy(kv);
}

/* >>tables: a layer learns from its 16 newest blocks */
enum { LEARNED = 16 };

/* Blocks of n_layers layers whose K or V was decoded from F16. */
static int n_sides_read(int n_layers) { return n_rows_read / (n_layers * KV_HEADS * BLOCK); }

TEST(tables_decode_16_blocks) {
    static const tkv_format_pair pairs[] = {{TKV_A30, TKV_R30}, {TKV_KVQUANT4, TKV_KVQUANT3}};
    static const int times[] = {3, 6}; /* that a side is decoded: keys twice, values once; both three times */
    tkv_samples samples;
    size_t n_bytes;
    int i, t;
    fill_rows(11);
    for (i = 0; i < COUNT(pairs); i++) {
        tkv_config cfg = make_config();
        tkv_cache *kv;
        int most = 0;
        cfg.tiers.warm = cfg.tiers.archive = pairs[i];
        cfg.tiers.hot_tokens = 4000;
        kv = create_cache(&cfg);
        for (t = 0; t < 39; t++) {
            count_from_here(kv);
            CHECK_EQ(append(kv, 0, 0, 100), TKV_OK);
            CHECK_LE(n_sides_read(1), times[i] * LEARNED);
            most = larger_of(most, n_sides_read(1));
            CHECK_EQ(work_since(kv).encoded, 0);
        }
        CHECK_LE(times[i] * LEARNED * 8 / 10, most);
        append_to_all(kv, 1, 100, 100);
        count_from_here(kv);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK); /* the table of layer 1, of two blocks */
        CHECK_LE(n_sides_read(1), times[i] * 2);
        CHECK_LE(1, n_sides_read(1));
        count_from_here(kv);
        CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &n_bytes), TKV_OK);
        CHECK_EQ(tkv_load_calibration(kv, saved, n_bytes), TKV_OK);
        CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
        memset(&samples, 0, sizeof samples);
        samples.n = 500;
        samples.k = samples.v = tokens;
        CHECK_EQ(tkv_fit_calibration(kv, &samples), i ? TKV_OK : TKV_ERR_ARG); /* KVQUANT alone */
        CHECK_EQ(n_rows_read + n_decoded + n_encoded, 0);
        tkv_destroy(kv);
    }
}

static int n_coded_blocks(const tkv_cache *kv, int seq, int layer) {
    tkv_layer_info info;
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    return info.blocks[TKV_TIER_WARM] + info.blocks[TKV_TIER_ARCHIVE];
}

/* A sequence with four tables. About as many blocks are coded with each of the first three, and none with the last. */
static tkv_cache *make_four_tables(uint64_t seed) {
    tkv_config cfg = make_config();
    tkv_cache *kv;
    int table, t;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_A30, TKV_R30);
    cfg.limits.max_append = LONG_APPEND;
    kv = create_cache(&cfg);
    for (table = 0; table < 4; table++) {
        fill_rows(seed + (uint64_t)table);
        CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
        for (t = 0; t < 10; t++) {
            append_to_all(kv, 0, 64, 64);
            if (kv->tables.current_version[LAYERS - 1] != table) continue;
            CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
            if (table == 3) CHECK_EQ(tkv_set_hot_tokens(kv, 3000), TKV_OK);
        }
    }
    return kv;
}

/* A fifth table takes the place of the one that the fewest blocks have, not the newest one. They are coded again. */
TEST(a_fifth_table) {
    enum { APPEND, BEGIN, FLUSH, MAINTAIN, WAYS };
    int way, layer;
    for (way = 0; way < WAYS; way++) {
        tkv_cache *kv = make_four_tables(12);
        work_done w;
        int done, n = 0;
        CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
        append_to_all(kv, 0, 260, 130);
        for (layer = 0; layer < LAYERS; layer++) n += n_coded_blocks(kv, 0, layer);
        count_from_here(kv);
        if (way == APPEND) append_to_all(kv, 0, 100, 100);
        if (way == BEGIN) CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        if (way == FLUSH) CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_DUE), TKV_OK);
        if (way == MAINTAIN)
            CHECK_EQ(tkv_maintain(kv, 1, NULL, NULL, &done), TKV_OK); /* it does not count them */
        w = count_of(kv);
        n = way == MAINTAIN ? n / LAYERS : n; /* the work ends after the table of one layer */
        CHECK_LE(w.encoded - (w.coded - counted.coded), n / 3);
        CHECK_LE(n * 3 / 10, w.encoded - (w.coded - counted.coded));
        tkv_destroy(kv);
    }
}

/* >>blocks that come back, through all formats that they had */
static tkv_status restore_rows(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers, int start,
                               int n) {
    tkv_status st = TKV_OK;
    int layer;
    (void)user;
    for (layer = first_layer; layer < first_layer + n_layers && !st; layer++)
        st = tkv_restore(kv, seq, layer, start, tokens, tokens, n);
    return st;
}

static tkv_remat make_remat(void) {
    tkv_remat r;
    tkv_remat_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.n_layers = LAYERS;
    cfg.n_heads = HEADS;
    cfg.head_dim = DIM;
    cfg.layer_params = 1e9; /* blocks are quantized before they are discarded */
    CHECK_EQ(tkv_init_remat(&r, &cfg, NULL, 0), TKV_OK);
    return r;
}

TEST(blocks_that_return) {
    tkv_level ladder[2];
    tkv_config cfg = make_config();
    tkv_remat r = make_remat();
    tkv_cache *kv;
    int way, n, start;
    memset(ladder, 0, sizeof ladder);
    ladder[0].archive = pair_of(TKV_KIVI3, TKV_KIVI3);
    ladder[1].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.budget.ladder = ladder;
    cfg.budget.n_levels = 2;
    cfg.tiers.warm_tokens = 128;
    kv = create_cache(&cfg);
    fill_rows(13);
    for (way = 0; way < 4; way++) {
        const int level_rises = way % 2;
        work_done w;
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        CHECK_EQ(tkv_set_level(kv, 0), TKV_OK);
        append_to_all(kv, 0, 1500, 100);
        count_from_here(kv);
        CHECK_EQ(tkv_seq_discard(kv, 0, 1000, &n), TKV_OK);
        CHECK_LE(900, n);
        CHECK_EQ(tkv_set_level(kv, level_rises), TKV_OK);
        CHECK_EQ(work_since(kv).encoded, 0);
        if (way < 2) {
            CHECK_EQ(tkv_seq_find_discarded(kv, 0, &start, &n), TKV_OK);
            CHECK_EQ(restore_rows(NULL, kv, 0, 0, LAYERS, start, n), TKV_OK);
        } else {
            CHECK_EQ(tkv_seq_recompute(kv, 0, &r, way, restore_rows, NULL, NULL), TKV_OK);
        }
        w = work_since(kv);
        CHECK_EQ(w.restored, LAYERS * (n / BLOCK));
        CHECK_EQ(w.coded, 0);
        CHECK_EQ(w.encoded, (level_rises ? 3 : 2) * w.restored); /* F16, KIVI4, KIVI3, KIVI2 */
    }
    tkv_destroy(kv);
}

TEST(freed_bytes) {
    static tkv_remat_block blocks[100];
    static tkv_remat_action actions[100];
    tkv_config cfg = make_config();
    tkv_remat r = make_remat();
    tkv_cache *kv;
    int i, n, most = 0;
    cfg.budget.bytes = 4 << 20;
    kv = create_cache(&cfg);
    fill_rows(14);
    append_to_all(kv, 0, 2000, 100);
    append_to_all(kv, 1, 300, 100);
    n = n_blocks_of(kv, 0);
    count_from_here(kv);
    for (i = 0; i < 4; i++) {
        work_done w;
        CHECK_EQ(tkv_seq_free_bytes(kv, 0, &r, .95f, 200000, blocks, actions, COUNT(blocks), NULL), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded, n);
        most = larger_of(most, w.coded);
    }
    CHECK_LE(n * 8 / 10, most);
    tkv_destroy(kv);
}

/* >>blocks of a store. A record of a head is one piece. */
static int n_blocks_read(const test_store *store) { return (store->n_reads + KV_HEADS - 1) / KV_HEADS; }

static int n_blocks_written(const test_store *store) { return (store->n_writes + KV_HEADS - 1) / KV_HEADS; }

/* A cache with a store, of 1,500 coded tokens. */
static tkv_cache *make_stored(tkv_config *cfg, test_store *store, uint64_t seed) {
    const int every = cfg->promotion.every; /* without a store the config is not valid */
    tkv_cache *kv;
    cfg->promotion.every = 0;
    attach_test_store(store, cfg);
    cfg->promotion.every = every;
    kv = create_cache(cfg);
    fill_rows(seed);
    count_from_here(kv);
    append_to_all(kv, 0, 1500, 100);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
    return kv;
}

TEST(offloads_and_promotions) {
    enum { PER_STEP = 8 };
    tkv_config cfg = make_config();
    test_store store;
    tkv_promotion p;
    tkv_cache *kv;
    int i, n, before, most = 0;
    cfg.offload.keep_exact = 1;
    cfg.importance.sample_every = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    kv = make_stored(&cfg, &store, 15);
    n = work_since(kv).coded;
    CHECK_LE(n_blocks_written(&store), n); /* exact copies of the blocks that were exact */
    CHECK_LE(n / 2, n_blocks_written(&store));
    before = n_blocks_written(&store);
    CHECK_EQ(tkv_offload(kv, 0, TKV_ALL_LAYERS, 7, &n), TKV_OK);
    CHECK_EQ(n, 7 * LAYERS);
    CHECK_EQ(n_blocks_written(&store) - before, n);
    for (i = 0; i < 4; i++) CHECK_EQ(append(kv, 0, 0, 1), TKV_OK); /* the cool-down */
    CHECK_EQ(tkv_attend(kv, 0, 0, rows, 1, out), TKV_OK);
    memset(&p, 0, sizeof p);
    p.by.cfg.threshold = TKV_ZERO;
    count_from_here(kv);
    for (i = 0; i < 3; i++) {
        before = n_blocks_read(&store);
        CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
        CHECK_LE(n_blocks_read(&store) - before, PER_STEP);
        most = larger_of(most, n_blocks_read(&store) - before);
        CHECK_EQ(work_since(kv).encoded, 0);
        CHECK_EQ(append(kv, 0, 0, 1), TKV_OK);
        count_from_here(kv);
    }
    CHECK_EQ(most, PER_STEP);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

TEST(appends_that_promote) {
    enum { PER_STEP = 8 };
    static float scores[1500];
    tkv_config cfg = make_config();
    test_store store;
    tkv_cache *kv;
    int i, t, most_read = 0, most_coded = 0;
    cfg.offload.keep_exact = 1;
    cfg.importance.sample_every = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    cfg.importance.decay = .5f;
    cfg.promotion.every = 1;
    kv = make_stored(&cfg, &store, 15);
    count_from_here(kv);
    for (i = 0; i < 60; i++) {
        const int before = n_blocks_read(&store);
        work_done w;
        for (t = 0; t < COUNT(scores); t++) scores[t] = i % 10 ? 0.0f : 1.0f;
        CHECK_EQ(tkv_add_scores(kv, 0, 0, 0, COUNT(scores), scores), TKV_OK);
        CHECK_EQ(append(kv, 0, 0, 1), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded, most_of_append(1, 1) + PER_STEP);
        CHECK_LE(n_blocks_read(&store) - before, PER_STEP);
        most_coded = larger_of(most_coded, w.coded);
        most_read = larger_of(most_read, n_blocks_read(&store) - before);
    }
    CHECK_EQ(most_read, PER_STEP);
    CHECK_LE(PER_STEP, most_coded);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* Each run of indices reads its blocks. */
TEST(reads_of_lists) {
    static float k[40 * KV_HEADS * DIM], v[40 * KV_HEADS * DIM];
    int indices[40], i, n, before;
    tkv_config cfg = make_config();
    test_store store;
    tkv_cache *kv = make_stored(&cfg, &store, 15);
    CHECK_EQ(tkv_offload(kv, 0, 0, 1000, &n), TKV_OK);
    for (i = 0; i < COUNT(indices); i++) indices[i] = i % 2 ? 300 : 100 + i;
    before = n_blocks_read(&store);
    CHECK_EQ(tkv_read_tokens(kv, 0, 0, indices, COUNT(indices), k, v), TKV_OK);
    CHECK_EQ(n_blocks_read(&store) - before, COUNT(indices));
    for (i = 0; i < COUNT(indices); i++) indices[i] = 200 + i;
    before = n_blocks_read(&store);
    CHECK_EQ(tkv_read_tokens(kv, 0, 0, indices, COUNT(indices), k, v), TKV_OK);
    CHECK_LE(n_blocks_read(&store) - before, 2);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* >>evictions: policies that read keys, and appends */
TEST(evictions_by_keys) {
    static const tkv_evict_policy policies[] = {TKV_EVICT_KNORM, TKV_EVICT_KEYDIFF};
    int i, n;
    fill_rows(16);
    for (i = 0; i < COUNT(policies); i++) {
        tkv_config cfg = make_config();
        tkv_evict_params p;
        tkv_cache *kv;
        cfg.evict.policy = policies[i];
        cfg.importance.sample_every = 1000; /* else knorm keeps norms */
        kv = create_cache(&cfg);
        append_to_all(kv, 0, 2000, 100);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
        count_from_here(kv);
        memset(&p, 0, sizeof p);
        p.layer = TKV_ALL_LAYERS;
        p.keep = 1999; /* no blocks merge */
        CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
        n = n_decoded / (KV_HEADS * BLOCK);
        CHECK_LE(n, (i + 1) * n_blocks_of(kv, 0));
        CHECK_LE((i + 1) * n_blocks_of(kv, 0) * 9 / 10, n);
        CHECK_EQ(work_since(kv).merged, 0);
        tkv_destroy(kv);
    }
}

static int n_batches; /* evictions, one layer each */

static void count_batches(void *user, const tkv_event *event) {
    (void)user;
    n_batches += event->kind == TKV_EVENT_EVICT;
}

/* Without a budget an append evicts one batch of its layer, in a full budget as many as it needs. */
TEST(appends_that_evict) {
    static const int batches[] = {64, 900};
    int way, i;
    fill_rows(17);
    for (way = 0; way < 4; way++) {
        tkv_config cfg = make_config();
        tkv_cache *kv;
        double most = 0; /* part of the bound */
        cfg.evict.policy = TKV_EVICT_RANDOM;
        cfg.evict.batch = batches[way % 2];
        if (way < 2) cfg.evict.keep_tokens = 1000;
        else cfg.budget.bytes = 400000;
        cfg.limits.max_tokens = 1 << 20;
        cfg.host.on_event = count_batches;
        kv = create_cache(&cfg);
        count_from_here(kv);
        for (i = 0; i < 600; i++) {
            const int layer = i / 7 % LAYERS;
            const int blocks = larger_of(n_layer_blocks(kv, 0, 0), n_layer_blocks(kv, 0, 1));
            work_done w;
            n_batches = 0;
            CHECK_EQ(append(kv, 0, layer, 30), TKV_OK);
            w = work_since(kv);
            CHECK_LE(w.merged, n_batches * blocks);
            if (way < 2) CHECK_LE(n_batches, 1);
            if (n_batches && w.merged > most * n_batches * blocks)
                most = w.merged / (double)(n_batches * blocks);
        }
        CHECK_LE(way == 1 ? .7 : .05, most);
        tkv_destroy(kv);
    }
}

/* >>files: a load codes blocks only if a layer has no version for their tables */
static size_t n_file_bytes; /* read or written by callbacks */

static int read_saved(void *user, size_t at, void *bytes, size_t size) {
    (void)user;
    n_file_bytes += size;
    memcpy(bytes, saved + at, size);
    return 0;
}

static int write_nowhere(void *user, const void *bytes, size_t size) {
    (void)user;
    (void)bytes;
    n_file_bytes += size;
    return 0;
}

/* Attached blocks that were read: the first reader verifies them. */
static int n_verified(const tkv_cache *kv) {
    uint32_t i;
    int n = 0;
    for (i = 0; kv->pool.source && i < kv->pool.n_blocks; i++) n += kv->pool.source[i].is_verified != 0;
    return n;
}

TEST(saves_and_loads) {
    tkv_config plain = make_config(), cfg = plain;
    test_store store;
    tkv_save_params save;
    tkv_load_params load;
    tkv_load_info info;
    tkv_cache *from = make_stored(&cfg, &store, 18), *kv = create_cache(&plain);
    size_t n_bytes = 0;
    int n, before;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    CHECK_EQ(tkv_offload(from, 0, TKV_ALL_LAYERS, 1000, &n), TKV_OK);
    count_from_here(from);
    before = n_blocks_read(&store);
    CHECK_EQ(tkv_seq_save(from, &save, NULL, 0, &n_bytes), TKV_OK);
    CHECK_EQ(n_blocks_read(&store), before);
    CHECK_EQ(tkv_seq_save(from, &save, saved, sizeof saved, &n_bytes), TKV_OK);
    CHECK_EQ(n_blocks_read(&store) - before, n);
    n_file_bytes = 0;
    before = n_blocks_read(&store);
    CHECK_EQ(tkv_seq_save_to(from, &save, write_nowhere, NULL), TKV_OK);
    CHECK_EQ(n_blocks_read(&store) - before, n);
    CHECK_EQ(n_file_bytes, n_bytes);
    CHECK_EQ(work_since(from).encoded, 0);
    count_from_here(kv);
    CHECK_EQ(tkv_seq_load(kv, &load, saved, n_bytes, NULL), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    n_file_bytes = 0;
    CHECK_EQ(tkv_seq_load_from(kv, &load, n_bytes, read_saved, NULL, NULL), TKV_OK);
    CHECK_LE(n_file_bytes, 2 * n_bytes);
    CHECK_LE(2 * n_bytes * 9 / 10, n_file_bytes);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    load.attach = 1;
    CHECK_EQ(tkv_seq_load(kv, &load, saved, n_bytes, &info), TKV_OK);
    CHECK_EQ(n_verified(kv), 0); /* no attached block was read */
    CHECK_LE(20, info.n_attached);
    CHECK_EQ(tkv_attend(kv, 0, 0, rows, 1, out), TKV_OK);
    CHECK_EQ(n_verified(kv), info.n_attached / LAYERS);
    CHECK_EQ(work_since(kv).encoded, 0);
    tkv_destroy(from);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

TEST(loads_with_many_tables) {
    tkv_cache *kv = make_four_tables(30), *from = make_four_tables(40);
    tkv_save_params save;
    tkv_load_params load;
    tkv_load_info info;
    size_t n_bytes = 0;
    int layer, n = 0, n_here = 0;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    load.seq = 1;
    for (layer = 0; layer < LAYERS; layer++) {
        n += n_coded_blocks(from, 0, layer);
        n_here += n_coded_blocks(kv, 0, layer);
    }
    CHECK_EQ(tkv_seq_save(from, &save, saved, sizeof saved, &n_bytes), TKV_OK);
    count_from_here(kv);
    CHECK_EQ(tkv_seq_load(kv, &load, saved, n_bytes, &info), TKV_OK);
    CHECK_LE(info.n_recoded, n); /* all but those of the one table that takes the place of one here */
    CHECK_LE(n * 6 / 10, info.n_recoded);
    CHECK_LE(n_encoded / KV_HEADS - info.n_recoded, n_here / 3);
    CHECK_LE(n_here * 3 / 10, n_encoded / KV_HEADS - info.n_recoded);
    tkv_destroy(from);
    tkv_destroy(kv);
}

/* >>prefixes: a store of one publication */
enum { PAGES = 8 };

typedef struct page_store {
    tkv_prefix_hash hash[PAGES];
    size_t at[PAGES], size[PAGES], end;
    int n;
} page_store;

static int get_pages(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes, size_t *sizes) {
    const page_store *s = (const page_store *)user;
    int i, k;
    for (i = 0; i < n; i++) {
        for (k = 0; k < s->n && memcmp(&s->hash[k], &hashes[i], sizeof *hashes) != 0;) k++;
        if (k == s->n) break;
        bytes[i] = saved + s->at[k];
        sizes[i] = s->size[k];
    }
    return i;
}

static int put_page(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
    page_store *s = (page_store *)user;
    if (s->n == PAGES || size > sizeof saved - s->end) return 1;
    s->hash[s->n] = *hash;
    s->at[s->n] = s->end;
    s->size[s->n++] = size;
    memcpy(saved + s->end, bytes, size);
    s->end += size;
    return 0;
}

TEST(prefixes) {
    static int text[1500];
    static page_store pages;
    tkv_config cfg = make_config();
    test_store store;
    tkv_prefix_store prefixes;
    tkv_prefix_params p;
    tkv_prefix_info info;
    tkv_prefix_hash hash;
    tkv_cache *kv = make_stored(&cfg, &store, 19);
    int i, n, before;
    memset(&prefixes, 0, sizeof prefixes);
    prefixes.user = &pages;
    prefixes.get = get_pages;
    prefixes.put = put_page;
    memset(&p, 0, sizeof p);
    p.spare = 3;
    p.tokens = text;
    p.n_tokens = COUNT(text);
    CHECK_EQ(tkv_offload(kv, 0, TKV_ALL_LAYERS, 1000, &n), TKV_OK);
    count_from_here(kv);
    CHECK_EQ(tkv_get_prefix_hash(kv, &p, 1, &hash), TKV_OK);
    for (i = 0; i < 2; i++) { /* 1: without a store */
        p.seq = 0;
        before = n_blocks_read(&store);
        CHECK_EQ(tkv_seq_publish_prefix(kv, &p, i ? NULL : &prefixes, &info), TKV_OK);
        CHECK_EQ(info.n_put, 5);
        CHECK_EQ(n_blocks_read(&store) - before, i ? 0 : LAYERS * info.n_put * TKV_PAGE_TOKENS / BLOCK);
        p.seq = 1;
        before = n_blocks_read(&store);
        CHECK_EQ(tkv_seq_adopt_prefix(kv, &p, i ? NULL : &prefixes, &info), TKV_OK);
        CHECK_EQ(info.n_pages, 5);
        CHECK_EQ(n_blocks_read(&store), before);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    }
    CHECK_EQ(work_since(kv).encoded, 0);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* >>forms of attention: what reads blocks a second time */
static int n_computed; /* rows of a KV head that the model gave */

static int compute_zeros(void *user, int seq, int layer, int head, const int *positions, int n, float *k,
                         float *v) {
    (void)user, (void)seq, (void)layer, (void)head, (void)positions;
    if (k) memset(k, 0, (size_t)(n * DIM) * sizeof *k);
    if (v) memset(v, 0, (size_t)(n * DIM) * sizeof *v);
    n_computed += n;
    return 0;
}

TEST(forms_of_attention) {
    enum { SCORES = 1, SAMPLES = 2, METERED = 4, FORMS = 8, QUERIES = 9, PARTS = 5 };
    static unsigned char workspace[TKV_MAX_ATTEND_BYTES];
    static float scores[2048], lse[QUERIES * HEADS];
    const int tiles = (QUERIES * HEADS / KV_HEADS + 7) / 8;
    int form, i, n, before, most_of_parts = 0;
    for (form = 0; form < FORMS; form++) {
        const int times = form ? 2 : 1, times_of_parts = form > METERED ? 3 : times;
        tkv_config cfg = make_config();
        test_store store;
        tkv_attend_params p;
        tkv_cache *kv;
        cfg.importance.sample_every = form & SAMPLES ? 1 : 0;
        cfg.meter.heads = form & METERED ? LAYERS * KV_HEADS : 0;
        cfg.meter.every = form & METERED ? 1 : 0;
        kv = make_stored(&cfg, &store, 21);
        CHECK_EQ(tkv_offload(kv, 0, 0, 1000, &n), TKV_OK);
        memset(&p, 0, sizeof p);
        p.n = QUERIES;
        p.q = rows;
        p.out = out;
        p.lse = lse;
        p.scores = form & SCORES ? scores : NULL;
        before = store.n_reads;
        CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
        CHECK_EQ(store.n_reads - before, times * n * KV_HEADS * tiles);
        before = store.n_reads;
        for (i = 0; i < PARTS; i++)
            CHECK_EQ(tkv_attend_part(kv, &p, i, PARTS, workspace, sizeof workspace), TKV_OK);
        CHECK_LE(store.n_reads - before, times_of_parts * n * KV_HEADS * tiles);
        most_of_parts = larger_of(most_of_parts, (store.n_reads - before) / (n * KV_HEADS * tiles));
        if (form < 2) {
            before = store.n_reads;
            CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
            CHECK_EQ(store.n_reads - before, (form ? 3 : 2) * n * KV_HEADS * QUERIES);
        }
        tkv_destroy(kv);
        destroy_test_store(&store);
    }
    CHECK_EQ(most_of_parts, 3);
}

TEST(rows_from_a_model) {
    tkv_config cfg = make_config();
    tkv_cache *kv;
    int n;
    fill_rows(22);
    cfg.recompute.compute = compute_zeros;
    cfg.recompute.cost.layer_params = 1.0;
    kv = create_cache(&cfg);
    append_to_all(kv, 0, 1500, 100);
    CHECK_EQ(tkv_seq_discard(kv, 0, 1000, &n), TKV_OK);
    CHECK_LE(900, n);
    n_computed = 0;
    CHECK_EQ(tkv_attend(kv, 0, 0, rows, 5, out), TKV_OK);
    CHECK_EQ(n_computed, n * KV_HEADS * 2); /* 10 rows of query heads */
    tkv_destroy(kv);
}

/* >>copies: a last block that a fork shares, and anchors */
static int n_distinct_blocks(const tkv_cache *kv) {
    static unsigned char is_seen[4096];
    int seq, layer, i, n = 0;
    memset(is_seen, 0, sizeof is_seen);
    for (seq = 0; seq < SEQS; seq++)
        for (layer = 0; layer < LAYERS; layer++)
            for (i = 0; i < tkvi_list_of(kv, seq, layer)->n; i++) {
                const uint32_t number = kv->pool.entry[tkvi_ids(kv, seq, layer)[i]].block;
                if (number >= sizeof is_seen) exit(2);
                n += !is_seen[number];
                is_seen[number] = 1;
            }
    return n;
}

TEST(copies) {
    tkv_config cfg = make_config();
    tkv_cache *kv;
    int layer, n;
    fill_rows(23);
    cfg.tiers.n_anchors = 70; /* three blocks of 32 in each layer */
    cfg.importance.sample_every = 1;
    kv = create_cache(&cfg);
    append_to_all(kv, 0, 500, 100);
    for (layer = 0; layer < LAYERS; layer++) CHECK_EQ(append(kv, 0, layer, 30), TKV_OK);
    n = n_distinct_blocks(kv);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(n_distinct_blocks(kv) - n, LAYERS * 3);
    n = n_distinct_blocks(kv);
    CHECK_EQ(append(kv, 1, 0, 1), TKV_OK);
    CHECK_LE(n_distinct_blocks(kv), n); /* the first one goes on in the last block */
    n = n_distinct_blocks(kv);
    CHECK_EQ(append(kv, 0, 0, 1), TKV_OK);
    CHECK_EQ(n_distinct_blocks(kv) - n, 1);
    tkv_destroy(kv);
}

/* >>calls that take memory from a full budget: any block may be coded for it, once a level */
TEST(full_budgets) {
    enum { RESERVE, LOAD, LOAD_FROM, RESTORE, FORK, PUT_STATE, SET_BUDGET, CALLS };
    int call, i, n;
    size_t n_bytes = 0;
    tkv_config cfg = make_config();
    tkv_cache *from = create_cache(&cfg);
    tkv_save_params save;
    tkv_load_params load;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    load.seq = 3;
    cfg.limits.max_append = 3000;
    cfg.budget.bytes = 800000;
    cfg.importance.sample_every = 1; /* larger entries */
    for (i = 0; i < COUNT(cfg.budget.pressure.threshold); i++) cfg.budget.pressure.threshold[i] = 1.0f;
    fill_rows(24);
    append_to_all(from, 0, 1500, 100);
    CHECK_EQ(tkv_seq_save(from, &save, saved, sizeof saved, &n_bytes), TKV_OK);
    for (call = 0; call < CALLS; call++) {
        tkv_cache *kv = create_cache(&cfg);
        tkv_budget_info info;
        int discarded = 0, start, layer;
        work_done w;
        append_to_all(kv, 0, 1000, 100);
        if (call == RESTORE) CHECK_EQ(tkv_seq_discard(kv, 0, 600, &discarded), TKV_OK);
        do { /* until there is no page left */
            for (layer = 0; layer < LAYERS; layer++) CHECK_EQ(append(kv, 1, layer, 1), TKV_OK);
            CHECK_EQ(tkv_get_budget(kv, &info), TKV_OK);
        } while (info.level == 0);
        n = n_blocks_of(kv, 0) + n_blocks_of(kv, 1);
        count_from_here(kv);
        for (i = 3000; call == RESERVE && tkv_seq_reserve(kv, 0, i);) i -= 50; /* the most that fits */
        if (call == LOAD) CHECK_EQ(tkv_seq_load(kv, &load, saved, n_bytes, NULL), TKV_OK);
        if (call == LOAD_FROM)
            CHECK_EQ(tkv_seq_load_from(kv, &load, n_bytes, read_saved, NULL, NULL), TKV_OK);
        if (call == FORK) CHECK_EQ(tkv_seq_fork(kv, 0, 2, TKV_UNLIMITED), TKV_OK);
        if (call == PUT_STATE) CHECK_EQ(tkv_seq_put_state(kv, 0, 0, 100, saved, 200000), TKV_OK);
        if (call == SET_BUDGET) CHECK_EQ(tkv_set_budget(kv, info.used * 6 / 10), TKV_OK);
        if (call == RESTORE) {
            CHECK_EQ(tkv_seq_find_discarded(kv, 0, &start, &discarded), TKV_OK);
            CHECK_EQ(restore_rows(NULL, kv, 0, 0, LAYERS, start, discarded), TKV_OK);
        }
        w = work_since(kv);
        CHECK_LE(w.coded, n * (info.n_levels - 1));
        if (call != PUT_STATE && call != FORK) CHECK_LE(n / 3, w.coded);
        CHECK_LE(call == RESERVE ? n * 3 : 5, w.coded);
        tkv_destroy(kv);
    }
    tkv_destroy(from);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(appends);
    RUN(appends_after_cuts);
    RUN(maintenance);
    RUN(steps_and_flushes);
    RUN(other_calls_code_nothing);
    RUN(reads);
    RUN(evictions);
    RUN(budgets);
    RUN(appends_as_parts);
    RUN(tables_decode_16_blocks);
    RUN(a_fifth_table);
    RUN(blocks_that_return);
    RUN(freed_bytes);
    RUN(offloads_and_promotions);
    RUN(appends_that_promote);
    RUN(reads_of_lists);
    RUN(evictions_by_keys);
    RUN(appends_that_evict);
    RUN(saves_and_loads);
    RUN(loads_with_many_tables);
    RUN(prefixes);
    RUN(forms_of_attention);
    RUN(rows_from_a_model);
    RUN(copies);
    RUN(full_budgets);
    return tkv_test_end();
}
