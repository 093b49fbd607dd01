/*
 * white_reclaim.c - white-box test of src/reclaim: block sizes by age under a budget, pins of evicted tokens, stale
 * records of the store, memory for attention scores, the level that follows the meter.
 *
 * It reads and changes the fields of a cache (white.h).
 */
#include "white.h"
#include "kit.h"

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    LAYERS = 3,
    SEQS = 2,
    KV_HEADS = 2,
    HEADS = 4,
    DIM = 32,
    ROW = KV_HEADS * DIM,
    CHUNK = 256
};

static float k_in[CHUNK * ROW], v_in[CHUNK * ROW], q_in[HEADS * DIM], out[HEADS * DIM];
static tkv_rng rng;

static tkv_status append(tkv_cache *kv, int seq, int layer, int n) {
    tkv_rng_fill(&rng, k_in, (size_t)(n * ROW), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * ROW), 1.0);
    return tkv_append(kv, seq, layer, k_in, v_in, n);
}

static tkv_status append_layers(tkv_cache *kv, int seq, int n) {
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < LAYERS && !st; layer++) st = append(kv, seq, layer, n);
    return st;
}

/* The oldest blocks are recoded first, so no block is larger than a newer one. */
TEST(no_block_is_larger_than_a_newer_one) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    tkv_cache *kv;
    int t, l, i;
    cfg.budget.bytes = 800 * 1000;
    kv = create_cache(&cfg);
    for (t = 0; t < 3200; t++) {
        CHECK_EQ(append_layers(kv, 0, 1), TKV_OK);
        for (l = 0; l < LAYERS && t % 50 == 0; l++) {
            const tkvi_list *list = tkvi_list_of(kv, 0, l);
            const uint32_t *ids = tkvi_ids(kv, 0, l);
            for (i = list->sinks + 1; i < list->n; i++)
                CHECK(kv->tables.layout[tkvi_block_of(kv, ids[i - 1])->layout].bytes.total <=
                      kv->tables.layout[tkvi_block_of(kv, ids[i])->layout].bytes.total);
        }
    }
    CHECK(budget_of(kv).level >= 3);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Blocks that tokens open: the sinks have one of their own, and 64 tokens fill the others exactly. */
TEST(tokens_open_no_more_blocks_than_they_fill) {
    static const struct {
        int had, n, blocks, front;
    } rows[] = {{0, 0, 0, 0},   {0, 4, 1, 1},   {0, 5, 2, 1},   {0, 68, 2, 1},  {0, 69, 3, 1},
                {68, 64, 1, 0}, {68, 65, 2, 0}, {69, 63, 0, 0}, {69, 64, 1, 0}, {69, 127, 1, 0}};
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    int i, front;
    for (i = 0; i < COUNT(rows); i++) {
        tkv_cache *kv = create_cache(&cfg);
        if (rows[i].had) CHECK_EQ(append_layers(kv, 0, rows[i].had), TKV_OK);
        CHECK_EQ(tkvi_n_new_blocks(kv, &kv->tables.plan[0], tkvi_list_of(kv, 0, 0), tkvi_ids(kv, 0, 0),
                                   rows[i].n, &front),
                 rows[i].blocks);
        CHECK_EQ(front, rows[i].front);
        tkv_destroy(kv);
    }
}

/* A block that was counted as expired and stays takes its slot again, unless another list holds it anyway. */
TEST(a_block_that_stays_is_demanded_again) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    tkv_cache *kv = create_cache(&cfg);
    int shared, c;
    CHECK_EQ(append_layers(kv, 0, 100), TKV_OK);
    for (shared = 0; shared < 2; shared++) {
        const tkvi_block *b = tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[1]);
        tkvi_demand demand = tkvi_no_demand();
        int64_t n = 0;
        tkvi_demand_again(kv, b, &demand);
        for (c = 0; c < kv->tables.n_classes; c++) n += demand.slots[c];
        CHECK_EQ(demand.entries, 1);
        CHECK_EQ(n, 1 - shared);
        CHECK_EQ(demand.slots[kv->tables.layout[b->layout].size_class], 1 - shared);
        if (!shared) CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    }
    tkv_destroy(kv);
}

/* A demand of more bytes than there are addresses is the largest number. So it fits into no budget. */
TEST(a_demand_beyond_all_addresses) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    const tkvi_request none = tkvi_no_request();
    tkvi_demand demand = none.fixed;
    tkv_cache *kv = create_cache(&cfg);
    CHECK_EQ(append_layers(kv, 0, 100), TKV_OK);
    CHECK_EQ(tkvi_bytes_for_demand(kv, &none, &demand), kv->heap.held);
    demand.bytes = 1000;
    CHECK_EQ(tkvi_bytes_for_demand(kv, &none, &demand), kv->heap.held + 1000);
    demand.bytes = (size_t)-1;
    CHECK(tkvi_bytes_for_demand(kv, &none, &demand) == TKVI_TOO_MANY);
    demand.bytes = 0;
    demand.slots[0] = (int64_t)1 << 60;
    CHECK(tkvi_bytes_for_demand(kv, &none, &demand) == TKVI_TOO_MANY);
    CHECK(tkvi_cap_for((int64_t)1 << 60) > 0x7fffffffu);
    tkv_destroy(kv);
}

static tkv_config stale_config(tkv_level *level, tkv_format_pair warm, tkv_format_pair archive) {
    tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, 3, CHUNK);
    memset(level, 0, sizeof *level);
    level->hot_tokens = BLOCK;
    level->warm_tokens = BLOCK / 2;
    level->warm = warm;
    level->archive = archive;
    cfg.budget.ladder = level;
    cfg.budget.n_levels = 1;
    cfg.budget.bytes = 8000000;
    return cfg;
}

/* A shared block stays as its hottest holder has it. When that one leaves, the block is late: it is recoded before
 * others, unless its format needs a table that is not there. */
TEST(late_blocks_are_recoded_first) {
    int needs_table;
    for (needs_table = 0; needs_table < 2; needs_table++) {
        tkv_level level;
        tkv_config cfg =
            stale_config(&level, pair_of(TKV_KIVI4, TKV_KIVI4),
                         needs_table ? pair_of(TKV_A20, TKV_R20) : pair_of(TKV_KIVI2, TKV_KIVI2));
        tkv_cache *kv = create_cache(&cfg);
        tkvi_stale stale;
        int n;
        CHECK_EQ(append(kv, 0, 0, 100), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        for (n = 0; n < 2; n++) CHECK_EQ(append(kv, 0, 0, 75), TKV_OK);
        CHECK_EQ(tkvi_find_stale_in(kv, 0, 0, 1, &stale), 0); /* the due blocks are those of sequence 1 */
        CHECK_EQ(kv->pool.n_late, 0);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        CHECK(kv->pool.n_late > 0);
        CHECK_EQ(tkvi_find_late(kv, 0, 0, 0), needs_table ? -1 : 1);
        CHECK_EQ(tkvi_find_late(kv, 0, 0, 1), 1);
        CHECK_EQ(tkvi_find_stale_in(kv, 0, 0, 1, &stale), 1);
        CHECK_EQ(stale.i, 1);
        CHECK_EQ(stale.tier, TKV_TIER_ARCHIVE);
        while (tkvi_recode_oldest(kv, 0, 1)) continue;
        CHECK_EQ(kv->pool.n_late, 0);
        CHECK_EQ(tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[1])->tier, TKV_TIER_ARCHIVE);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

/* A block that is due for the archive, and that another list has in the warm tier, waits for the table of the warm format. */
TEST(shared_blocks_wait_for_the_table_of_the_other_list) {
    tkv_level level;
    tkv_config cfg = stale_config(&level, pair_of(TKV_A40, TKV_R40), pair_of(TKV_KIVI2, TKV_KIVI2));
    tkv_cache *kv = create_cache(&cfg);
    tkvi_stale stale;
    int n;
    for (n = 0; n < 2; n++) CHECK_EQ(append(kv, 0, 0, 75), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkvi_find_stale_in(kv, 1, 0, 1, &stale), 0); /* sequence 0 has them in the hot tier */
    CHECK_EQ(tkvi_tier_at(tkvi_list_of(kv, 1, 0), 1), TKV_TIER_WARM);
    for (n = 0; n < 2; n++) CHECK_EQ(append(kv, 0, 0, 45), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], -1);
    CHECK_EQ(tkvi_find_stale_in(kv, 0, 0, 1, &stale),
             1); /* with a table it could be coded for the warm tier */
    CHECK(stale.due == TKV_TIER_ARCHIVE && stale.tier == TKV_TIER_WARM);
    n = stale.i;
    CHECK_EQ(tkvi_find_stale_in(kv, 0, 0, 0, &stale), 0);
    CHECK_EQ(tkvi_tier_at(tkvi_list_of(kv, 0, 0), n), TKV_TIER_ARCHIVE);
    CHECK(tkvi_is_hot_layout(kv, 0, tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[n])->layout));
    check_cache(kv);
    tkv_destroy(kv);
}

/* A block that must be recoded does not wait until enough tokens were seen: the first table is made from those that are
 * there. */
TEST(recoding_makes_the_first_table) {
    tkv_level level;
    tkv_config cfg = stale_config(&level, pair_of(TKV_A40, TKV_R40), pair_of(TKV_A20, TKV_R20));
    tkv_cache *kv = create_cache(&cfg);
    int n;
    for (n = 0; n < 2; n++) CHECK_EQ(append(kv, 0, 0, 120), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], -1);
    CHECK_EQ(tkvi_recode_oldest(kv, 0, 0), 0);
    CHECK_EQ(kv->counts.demoted, 0);
    CHECK(tkvi_recode_oldest(kv, 0, 1) > 0);
    CHECK_EQ(kv->counts.demoted, 1);
    CHECK_EQ(kv->tables.current_version[0], 0);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Coding the blocks of a version again needs a slot. Without it they keep their version. */
TEST(a_version_stays_without_memory) {
    tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, 1, CHUNK);
    counting_allocator memory;
    tkv_cache *kv;
    int n, i, was, n_left = 0;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_A30, TKV_R30);
    cfg.host.allocator = counting_allocator_of(&memory);
    kv = create_cache(&cfg);
    for (n = 0; n < 12; n++) CHECK_EQ(append(kv, 0, 0, 100), TKV_OK);
    was = kv->tables.current_version[0] - 1;
    REQUIRE(was >= 0);
    for (n = 0; n < 100; n++) { /* until a block needs a new page */
        const int layout = tkvi_layout_of(&kv->tables, 0, TKV_TIER_WARM);
        if (!tkvi_has_slot(&kv->pool, kv->tables.layout[layout].size_class)) break;
        CHECK_EQ(append(kv, 0, 0, 10), TKV_OK);
        was = kv->tables.current_version[0] - 1;
    }
    CHECK(n < 100);
    memory.fail_at = 1;
    CHECK_EQ(tkvi_recode_version(kv, 0, was), 0);
    memory.fail_at = 0;
    for (i = 0; i < tkvi_list_of(kv, 0, 0)->n; i++)
        n_left += tkvi_version_of(kv, tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[i])->layout) == was;
    CHECK(n_left > 0);
    CHECK_EQ(tkvi_recode_version(kv, 0, was), 1);
    for (i = 0, n = 0; i < tkvi_list_of(kv, 0, 0)->n; i++)
        n += tkvi_version_of(kv, tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[i])->layout) == was;
    CHECK_EQ(n, 0);
    check_cache(kv);
    tkv_destroy(kv);
}

/* The keys that a row sees, counted one by one: within its window, or named sinks beyond it. */
TEST(rows_count_the_keys_that_they_see) {
    enum { N = 400, WINDOW = 150 };
    tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, 1, CHUNK);
    static const int named[] = {9, 70, 230, 390};
    uint64_t victims[7] = {0};
    uint8_t tiers[N];
    tkvi_tile_view v;
    tkv_cache *kv;
    int i, sees_sinks, row;
    cfg.model.window = WINDOW;
    cfg.model.window_sinks = 1;
    cfg.evict.policy = TKV_EVICT_SCISSORHANDS;
    kv = create_cache(&cfg);
    for (i = 0; i < N; i += 100) {
        CHECK_EQ(append(kv, 0, 0, 100), TKV_OK);
        CHECK_EQ(tkv_seq_set_sinks(kv, 0, named[i / 100], 1, 1), TKV_OK);
    }
    for (i = 301; i < 360; i += 3) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, 0, 0, victims, N), TKV_OK);
    CHECK_EQ(tkv_get_tiers(kv, 0, 0, 0, N, tiers), TKV_OK);
    memset(&v, 0, sizeof v);
    v.kv = kv;
    v.list = tkvi_list_of(kv, 0, 0);
    v.ids = tkvi_ids(kv, 0, 0);
    v.rows = 1;
    v.sight.window = WINDOW;
    v.sight.sinks = v.list->sinks;
    for (sees_sinks = 0; sees_sinks < 2; sees_sinks++)
        for (row = N - 100; row < N; row += 33) {
            int n = 0;
            v.sight.sees_sinks = sees_sinks;
            v.sight.first_query = v.index[0] = v.position[0] = row;
            v.end[0] = row + 1;
            for (i = 0; i <= row; i++) {
                const int is_named = i == named[0] || i == named[1] || i == named[2] || i == named[3];
                n += tiers[i] != TKV_TOKEN_GONE && (i > row - WINDOW || i < 4 || (is_named && sees_sinks));
            }
            CHECK_MSG(tkvi_keys_seen(&v, 0) == n, "row %d: %d keys, and %d", row, tkvi_keys_seen(&v, 0), n);
        }
    tkv_destroy(kv);
}

/* The next eviction: when the layer has its share, or under a budget when an append needs a block, if that is sooner. */
TEST(evictions_are_forecast) {
    static const int lengths[] = {100, 296}; /* 64 divides neither; the second one is close to the share */
    int i, has_budget;
    for (i = 0; i < COUNT(lengths); i++) {
        int evict_len[2];
        for (has_budget = 0; has_budget < 2; has_budget++) {
            tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, 1, 300);
            tkv_cache *kv;
            cfg.evict.policy = TKV_EVICT_TOVA;
            cfg.evict.keep_tokens = 300;
            if (has_budget) cfg.budget.bytes = 8000000;
            kv = create_cache(&cfg);
            CHECK_EQ(append(kv, 0, 0, 40), TKV_OK);
            CHECK_EQ(append(kv, 0, 0, lengths[i] / 2 - 40), TKV_OK);
            CHECK_EQ(append(kv, 0, 0, lengths[i] / 2), TKV_OK);
            evict_len[has_budget] = tkvi_list_of(kv, 0, 0)->evict_len;
            tkv_destroy(kv);
        }
        CHECK_LE(300, evict_len[0]);
        CHECK_EQ(evict_len[1], tkvi_min(evict_len[0], (lengths[i] + BLOCK - 1) / BLOCK * BLOCK));
    }
}

TEST(pins_of_evicted_tokens_keep_nothing) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    uint64_t victim_mask[8], live_mask[8];
    tkv_cache *kv;
    int i, n_before, n_live = 0;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    cfg.budget.bytes = 500000;
    kv = create_cache(&cfg);
    CHECK_EQ(append_layers(kv, 0, 250), TKV_OK);
    CHECK_EQ(append_layers(kv, 0, 250), TKV_OK);
    memset(victim_mask, 0, sizeof victim_mask);
    for (i = 0; i < 500; i++)
        if (tkv_rng_below(&rng, 100) < 50) add_to_mask(victim_mask, i);
    CHECK_EQ(evict_tokens(kv, 0, 1, victim_mask, 500), TKV_OK);
    CHECK_EQ(live_mask_of(kv, 0, 1, 0, 500, live_mask), TKV_OK);
    for (i = 0; i < 500; i++) {
        n_live += is_in_mask(live_mask, i);
        if (is_in_mask(victim_mask, i)) CHECK(!is_in_mask(live_mask, i));
    }
    check_cache(kv);
    n_before = tkvi_n_staying(kv, 0, 1, 0);
    CHECK_EQ(tkv_seq_pin(kv, 0, 0, 500, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkvi_n_staying(kv, 0, 1, 0), n_before + n_live);
    tkv_destroy(kv);
}

static void fill_layer(tkv_cache *kv, test_store *d, int discards_writes) {
    int n;
    d->discards_writes = discards_writes;
    for (n = 0; n < 7; n++) CHECK_EQ(append(kv, 0, 0, 96), TKV_OK);
}

TEST(stale_records_are_refused) {
    /* The mark of a stored block is a counter of writes. The block keeps it in two fields. The stale record has a mark
     * that is 65,536 lower, so that the lower field is equal. The lazy store keeps nothing, so it returns the stale
     * records. */
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    test_store d;
    tkv_cache *kv;
    int n;
    cfg.tiers.warm_tokens = 2 * BLOCK;
    attach_test_store(&d, &cfg);
    cfg.offload.keep_exact = 1;
    kv = create_cache(&cfg);
    fill_layer(kv, &d, 0);
    CHECK_EQ(tkv_offload(kv, 0, 0, 4000, &n), TKV_OK);
    CHECK(n > 3);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK); /* the next blocks have the same keys in the store */
    kv->pool.marks = 1 << 16;
    fill_layer(kv, &d, 1);
    CHECK_EQ(tkv_promote(kv, 0, 0, 70), TKV_ERR_DATA); /* reads a stale exact copy */
    CHECK_EQ(tkv_offload(kv, 0, 0, 4000, &n), TKV_OK);
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out), TKV_ERR_DATA);
    tkv_destroy(kv);
    destroy_test_store(&d);
}

/* A policy needs token metadata. Combining query heads by their maximum needs a buffer of scores. */
TEST(scores_allocate_what_they_need) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, 1, DIM, SEQS, CHUNK);
    tkv_cache *kv;
    int policy, by_max;
    NEEDS_ATOMICS;
    for (policy = 0; policy < TKV_EVICT_USER; policy++) {
        cfg.evict.policy = (tkv_evict_policy)policy;
        kv = create_cache(&cfg);
        CHECK_EQ(append(kv, 0, 1, 64), TKV_OK);
        CHECK_EQ(kv->pool.token_meta != NULL, policy != TKV_EVICT_NONE);
        tkv_destroy(kv);
    }
    cfg.evict.policy = TKV_EVICT_NONE;
    cfg.importance.sample_every = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    for (by_max = 0; by_max < 2; by_max++) {
        cfg.importance.heads = by_max ? TKV_IMPORTANCE_MAX : TKV_IMPORTANCE_SUM;
        kv = create_cache(&cfg);
        CHECK_EQ(append(kv, 0, 1, 200), TKV_OK);
        CHECK_EQ(kv->token_scores.heads != NULL, by_max);
        tkv_destroy(kv);
    }
}

/* >>the level by the meter (cfg.meter.target). The test writes what the meter would have measured. */
static void measure(tkv_cache *kv, unsigned samples, unsigned n_keys, double error) {
    tkvi_error_sums *sum = &kv->meter->head_probe[1].sum;
    sum->samples += samples;
    sum->keys += n_keys;
    sum->kept += n_keys;
    sum->error += (uint64_t)(error * samples * TKVI_METER_ONE);
    tkvi_follow_meter(kv);
}

TEST(scores_of_the_meter_move_the_level) {
    NEEDS_ATOMICS;
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    int n, most, scores;
    for (most = 0; most < 2; most++) {
        tkv_cache *kv;
        cfg.budget.adapt = 1;
        cfg.budget.pressure.max_level = most ? 0 : 1; /* 0: the last level */
        cfg.meter.heads = 2;
        cfg.meter.target = .9f;
        kv = create_cache(&cfg);
        REQUIRE(kv->meter != NULL && kv->meter->n == 2);
        tkvi_follow_meter(kv); /* nothing was measured */
        measure(kv, 3, 300, 0.0);
        CHECK_EQ(kv->meter->scored.samples, 0); /* two samples of each probe make a score */
        CHECK_EQ(tkv_seq_reserve(kv, 0, 100), TKV_OK);
        measure(kv, 1, 100, 0.0);
        CHECK_EQ(kv->meter->scored.samples, 0); /* memory is reserved for this plan */
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        measure(kv, 0, 0, 0.0);
        CHECK_EQ(kv->meter->scored.samples, 4);
        CHECK_EQ(kv->meter->feedback->scores, 1);
        measure(kv, 4, 0, 0.0); /* no coded key was seen: that says nothing of the plan */
        CHECK_EQ(kv->meter->scored.samples, 8);
        CHECK_EQ(kv->meter->feedback->scores, 1);
        CHECK_EQ(kv->meter->feedback->cfg.max_level, most ? kv->tables.n_levels - 1 : 1);
        for (n = 0; n < 40; n++) measure(kv, 4, 400, 0.0);
        CHECK(most ? kv->tables.level > 1 : kv->tables.level == 1);
        for (n = 0; n < 200; n++) measure(kv, 4, 400, .5);
        CHECK_EQ(kv->tables.level, 0);
        CHECK_EQ(tkv_reset_quality(kv), TKV_OK);
        scores = (int)kv->meter->feedback->scores;
        measure(kv, 4, 400, .5); /* counts from 0 on */
        CHECK_EQ(kv->meter->feedback->scores, scores + 1);
        CHECK_EQ(kv->meter->scored.samples, 4);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

/* The meter copies exact blocks of the sequence that it watches. A block that goes from warm to the archive is none. */
TEST(the_meter_copies_exact_blocks) {
    NEEDS_ATOMICS;
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    tkvi_head_probe *probe;
    const uint32_t *ids;
    tkv_cache *kv;
    int n;
    cfg.meter.heads = 2;
    kv = create_cache(&cfg);
    REQUIRE(kv->meter != NULL);
    CHECK_EQ(append_layers(kv, 0, CHUNK), TKV_OK);
    CHECK_EQ(append_layers(kv, 0, CHUNK), TKV_OK);
    CHECK_EQ(append_layers(kv, 1, CHUNK), TKV_OK);
    probe = &kv->meter->head_probe[0];
    ids = tkvi_ids(kv, 0, probe->layer);
    n = tkvi_list_of(kv, 0, probe->layer)->n;
    CHECK(kv->meter->seq == 0 && probe->n > 1 && probe->stride == 1);
    CHECK(!tkvi_is_hot_layout(kv, probe->layer, tkvi_block_of(kv, ids[2])->layout));
    CHECK(tkvi_is_hot_layout(kv, probe->layer, tkvi_block_of(kv, ids[n - 1])->layout));
    probe->n = 0;
    tkvi_copy_for_meter(kv, 0, probe->layer, ids[2]);
    CHECK_EQ(probe->n, 0);
    tkvi_copy_for_meter(kv, 1, probe->layer, tkvi_ids(kv, 1, probe->layer)[3]);
    CHECK_EQ(probe->n, 0);
    tkvi_copy_for_meter(kv, 0, probe->layer, ids[n - 1]);
    CHECK_EQ(probe->n, 1);
    CHECK_EQ(probe->start[0], tkvi_block_start(kv, ids, n - 1));
    tkv_destroy(kv);
}

/* A shared block that another sequence recodes is copied if the sequence that the meter watches holds it, too. */
TEST(the_meter_copies_shared_blocks_of_its_sequence) {
    NEEDS_ATOMICS;
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, 3, CHUNK);
    tkvi_head_probe *probe;
    tkv_cache *kv;
    int watched;
    cfg.meter.heads = 2;
    for (watched = 0; watched < 2; watched++) {
        kv = create_cache(&cfg);
        REQUIRE(kv->meter != NULL);
        CHECK_EQ(append_layers(kv, 0, 100), TKV_OK); /* this sequence is watched */
        CHECK_EQ(append_layers(kv, 1, 100), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, watched ? 0 : 1, 2, TKV_UNLIMITED), TKV_OK);
        probe = &kv->meter->head_probe[0];
        CHECK(kv->meter->seq == 0 && probe->n == 0);
        tkvi_copy_for_meter(kv, 2, probe->layer, tkvi_ids(kv, 2, probe->layer)[1]);
        CHECK_EQ(probe->n, watched);
        tkv_destroy(kv);
    }
}

/* A file of a whole cache has what the controller knows. */
TEST(the_controller_of_the_meter_is_saved) {
    NEEDS_ATOMICS;
    static unsigned char file[1 << 20], scratch[1 << 16];
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    tkv_save_params save;
    tkv_load_params load;
    tkv_cache *kv, *twin;
    const tkv_feedback *f, *g;
    size_t bytes = 0;
    int n;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    save.seq = load.seq = TKV_ALL_SEQS;
    save.scratch = scratch;
    save.scratch_bytes = sizeof scratch;
    cfg.budget.adapt = 1;
    cfg.meter.heads = 2;
    cfg.meter.target = .9f;
    kv = create_cache(&cfg);
    twin = create_cache(&cfg);
    REQUIRE(kv->meter != NULL && twin->meter != NULL);
    f = kv->meter->feedback;
    g = twin->meter->feedback;
    for (n = 0; n < 40; n++) measure(kv, 4, 400, 0.0);
    for (n = 0; n < 200 && !f->finer; n++) measure(kv, 4, 400, .5);
    CHECK(f->finer == 1 && f->low > 0.0f && f->gain == -1.0f);
    CHECK_EQ(tkv_seq_save(kv, &save, file, sizeof file, &bytes), TKV_OK);
    CHECK_EQ(tkv_seq_load(twin, &load, file, bytes, NULL), TKV_OK);
    CHECK_NEAR(g->low, f->low, 0.0);
    CHECK_NEAR(g->gain, f->gain, 0.0);
    CHECK_EQ(g->hot, f->hot);
    CHECK_EQ(g->level, f->level);
    CHECK_EQ(g->moved, f->moved);
    CHECK(g->since == f->since && g->gained_at == f->gained_at && g->sum == f->sum);
    CHECK(g->squares == f->squares && g->scores == f->scores && g->refused == f->refused);
    CHECK(g->finer == f->finer && g->cheaper == f->cheaper);
    CHECK_MEM(g->history, f->history, sizeof f->history);
    CHECK_MEM(&g->cfg, &f->cfg, sizeof f->cfg);
    tkv_destroy(kv);
    tkv_destroy(twin);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(11);
    RUN(no_block_is_larger_than_a_newer_one);
    RUN(tokens_open_no_more_blocks_than_they_fill);
    RUN(a_block_that_stays_is_demanded_again);
    RUN(a_demand_beyond_all_addresses);
    RUN(late_blocks_are_recoded_first);
    RUN(shared_blocks_wait_for_the_table_of_the_other_list);
    RUN(recoding_makes_the_first_table);
    RUN(a_version_stays_without_memory);
    RUN(rows_count_the_keys_that_they_see);
    RUN(evictions_are_forecast);
    RUN(pins_of_evicted_tokens_keep_nothing);
    RUN(stale_records_are_refused);
    RUN(scores_allocate_what_they_need);
    RUN(scores_of_the_meter_move_the_level);
    RUN(the_meter_copies_exact_blocks);
    RUN(the_meter_copies_shared_blocks_of_its_sequence);
    RUN(the_controller_of_the_meter_is_saved);
    return tkv_test_end();
}
