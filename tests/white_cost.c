/*
 * white_cost.c - white-box test of the most blocks that calls code, merge and read: the table of chapter 8 of the
 * manual. It counts with the counters of a cache (coded, merged) and with the reads of a store (white.h).
 */
#include "white.h"
#include "kit.h"

enum { DIM = 16, HEADS = 4, KV_HEADS = 2, LAYERS = 2, SEQS = 4, MOST_APPEND = 100, BLOCK = TKV_BLOCK_TOKENS };

static float rows[MOST_APPEND * HEADS * DIM], out[MOST_APPEND * HEADS * DIM];
static unsigned char saved[4 << 20];

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
}

static tkv_status append(tkv_cache *kv, int seq, int layer, int n) {
    return tkv_append(kv, seq, layer, rows, rows, n);
}

static void append_to_all(tkv_cache *kv, int seq, int n, int chunk) {
    int done, layer;
    for (done = 0; done < n; done += chunk)
        for (layer = 0; layer < LAYERS; layer++)
            CHECK_EQ(append(kv, seq, layer, n - done < chunk ? n - done : chunk), TKV_OK);
}

/* Blocks coded and blocks merged since the last call. */
typedef struct work_done {
    int coded, merged;
} work_done;

static work_done work_since(const tkv_cache *kv) {
    static uint64_t coded, merged;
    work_done w;
    w.coded = (int)(kv->counts.demoted - coded);
    w.merged = (int)(kv->counts.merged - merged);
    coded = kv->counts.demoted;
    merged = kv->counts.merged;
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
    (void)work_since(kv);
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
    (void)work_since(kv);
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
    (void)work_since(kv);
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
    (void)work_since(kv);
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
    (void)work_since(kv);
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
        (void)work_since(kv);
        CHECK_EQ(tkv_seq_flush(kv, 0, (tkv_flush_mode)mode), TKV_OK);
        w = work_since(kv);
        CHECK_LE(w.coded, n_blocks_of(kv, 0));
        if (mode) CHECK_LE(1, w.coded);
    }
    tkv_destroy(kv);
}

TEST(changes_of_a_sequence_code_nothing) {
    static const int indices[] = {1302, 1305, 1311}, sources[] = {1, 0};
    tkv_config cfg = make_config();
    tkv_cache *kv = create_cache(&cfg);
    tkv_save_params save;
    size_t n_bytes;
    work_done w;
    int n;
    fill_rows(6);
    append_to_all(kv, 0, 1320, 100);
    (void)work_since(kv);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 1000), TKV_OK);
    CHECK_EQ(tkv_seq_reorder(kv, 0, sources, 2), TKV_OK);
    CHECK_EQ(tkv_seq_reorder(kv, 0, sources, 2), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 1300, indices, 3), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 500, TKV_UNLIMITED, 7), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 0, 600, 800, 2, 0), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 620, 640), TKV_OK);
    CHECK_EQ(tkv_seq_slide(kv, 0, MOST_APPEND, &n), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 700), TKV_OK);
    CHECK_EQ(tkv_set_level(kv, 0), TKV_OK);
    CHECK_EQ(tkv_set_hot_tokens(kv, 100), TKV_OK);
    memset(&save, 0, sizeof save);
    CHECK_EQ(tkv_seq_save(kv, &save, saved, sizeof saved, &n_bytes), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    w = work_since(kv);
    CHECK_EQ(w.coded + w.merged, 0);
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
    (void)work_since(kv);
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

/* tkv_evict merges; each merge removes a block or fills one. */
TEST(evictions) {
    tkv_config cfg = make_config();
    tkv_evict_params p;
    tkv_cache *kv;
    work_done w;
    int blocks;
    cfg.evict.policy = TKV_EVICT_RANDOM;
    kv = create_cache(&cfg);
    fill_rows(8);
    append_to_all(kv, 0, 2000, 100);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
    blocks = n_blocks_of(kv, 0);
    (void)work_since(kv);
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 700;
    CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    w = work_since(kv);
    CHECK_EQ(w.coded, 0);
    CHECK_LE(w.merged, 2 * blocks);
    CHECK_LE(10, w.merged);
    tkv_destroy(kv);
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
    (void)work_since(kv);
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
    (void)work_since(kv);
    CHECK_EQ(tkv_set_budget(kv, info.used - info.used / 10), TKV_OK);
    i = work_since(kv).coded;
    CHECK_LE(i, n_blocks_of(kv, 0) * info.n_levels);
    CHECK_LE(2, i);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(appends);
    RUN(appends_after_cuts);
    RUN(maintenance);
    RUN(steps_and_flushes);
    RUN(changes_of_a_sequence_code_nothing);
    RUN(reads);
    RUN(evictions);
    RUN(budgets);
    return tkv_test_end();
}
