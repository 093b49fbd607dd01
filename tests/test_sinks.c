/*
 * test_sinks.c - tkv_seq_set_sinks: named sinks stay exact and are seen beyond windows. Attention is compared with
 * double precision, over the tokens that a query sees by the rules of api.h.
 *
 * Named sinks under random calls of all kinds: test_everything.c.
 */
#include "sequences.h"

#include <math.h>

enum { LAYERS = 3, WINDOW = 100, LEN = 900, QUERIES = 40, HEADS = 2 * KV_HEADS };

static const int named[] = {70, 200, 201, 333};
static tkv_layer_config layers[LAYERS];

static int is_named(int i) {
    int n;
    for (n = 0; n < COUNT(named); n++)
        if (named[n] == i) return 1;
    return 0;
}

/* Layer 0 has no window. Queries of layer 1 see sinks beyond their window, those of layer 2 do not. */
static tkv_config make_sinks_config(int seqs) {
    tkv_config cfg = make_config(LAYERS, seqs);
    memset(layers, 0, sizeof layers);
    layers[1].window = layers[2].window = WINDOW;
    layers[1].window_sinks = 1;
    cfg.layers = layers;
    cfg.tiers.warm_tokens = 64;
    cfg.host.precise = 1;
    return cfg;
}

/* Appends tokens up to a length, and names each sink of the list after the append that brings it. */
static void append_with_sinks(tkv_cache *kv, int seq, int len, int chunk) {
    int at = tkv_get_length(kv, seq, 0), i;
    while (at < len) {
        const int n = len - at < chunk ? len - at : chunk;
        CHECK_EQ(append_to_all_layers(kv, seq, 1, n, n), TKV_OK);
        for (i = at; i < at + n; i++)
            if (is_named(i)) CHECK_EQ(tkv_seq_set_sinks(kv, seq, i, 1, 1), TKV_OK);
        at += n;
    }
    check_cache(kv);
}

/* Checks that the named sinks of a layer below `end` read as they were appended. */
static void check_sinks(tkv_cache *kv, int seq, int layer, int end) {
    tkv_tier tier;
    int i;
    for (i = 0; i < COUNT(named); i++) {
        if (named[i] >= end) continue;
        check_read(kv, seq, layer, 1, named[i], 1, TKV_F16);
        CHECK_EQ(tier_of(kv, seq, layer, named[i], &tier), TKV_OK);
        CHECK_EQ(tier, TKV_TIER_HOT);
    }
}

/* Attention of n queries from index `first` on: of the cache, of the reference, and in double over the keys that the
 * rules allow. Returns the largest difference. */
static double attention_error(tkv_cache *kv, int seq, int layer, int first, int n) {
    static float q[QUERIES * HEADS * DIM], out[2][QUERIES * HEADS * V_DIM];
    static double weight[LEN];
    const int len = tkv_get_length(kv, seq, layer), window = layer ? WINDOW : LEN;
    uint8_t tier[LEN];
    tkv_attend_params p;
    tkv_rng rng = tkv_rng_seed(5);
    double worst = 0.0;
    int r, h, i, c;
    tkv_rng_fill(&rng, q, COUNT(q), 2.0);
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.q = q;
    if (first + n < len) p.first_queries = &first;
    p.out = out[0];
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.out = out[1];
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
    CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, len, tier), TKV_OK);
    for (i = 0; i < len; i++)
        if (tier[i] < TKV_TIER_COUNT)
            CHECK_EQ(tkv_read(kv, seq, layer, i, 1, k_out + i * K_ROW, v_out + i * V_ROW), TKV_OK);
    for (r = 0; r < n; r++)
        for (h = 0; h < HEADS; h++) {
            const int at = first + r, g = h / 2;
            double sum = 0.0, want[V_DIM] = {0.0};
            for (i = 0; i <= at; i++) {
                double s = 0.0;
                weight[i] = 0.0;
                if (tier[i] >= TKV_TIER_COUNT) continue;
                if (at - i >= window && !(layer == 1 && (i < 4 || is_named(i)))) continue;
                for (c = 0; c < DIM; c++)
                    s += (double)q[(r * HEADS + h) * DIM + c] * (double)k_out[i * K_ROW + g * DIM + c];
                weight[i] = exp(s / sqrt((double)DIM));
                sum += weight[i];
            }
            for (i = 0; i <= at; i++)
                for (c = 0; c < V_DIM && weight[i] > 0.0; c++)
                    want[c] += weight[i] * (double)v_out[i * V_ROW + g * V_DIM + c];
            for (c = 0; c < V_DIM; c++)
                for (i = 0; i < 2; i++) {
                    const double d = (double)out[i][(r * HEADS + h) * V_DIM + c] - want[c] / sum;
                    if (fabs(d) > worst) worst = fabs(d);
                }
        }
    return worst;
}

/* >>what named sinks are */
TEST(named_sinks_stay_exact) {
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int isa, layer, i, n;
    for (isa = 0; isa < n_isas; isa++) {
        tkv_config cfg = make_sinks_config(1);
        tkv_layer_info info;
        tkv_cache *kv;
        uint8_t tier[LEN];
        cfg.host.isa = isas[isa];
        kv = create_cache(&cfg);
        append_with_sinks(kv, 0, LEN, 33);
        for (layer = 0; layer < 2; layer++) {
            check_sinks(kv, 0, layer, LEN);
            CHECK_EQ(tkv_get_layer(kv, 0, layer, &info), TKV_OK);
            CHECK_EQ(info.named_sinks, COUNT(named));
            CHECK_EQ(info.evicted, 0);
        }
        CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK); /* three blocks, and the tail */
        CHECK(info.blocks[TKV_TIER_ARCHIVE] > 4);
        CHECK_EQ(tkv_get_tiers(kv, 0, 0, 0, LEN, tier), TKV_OK);
        for (i = 68; i < 132; i++) CHECK_EQ(tier[i], TKV_TIER_HOT);
        for (i = 132; i < 196; i++) CHECK_EQ(tier[i], TKV_TIER_ARCHIVE);
        CHECK_EQ(tkv_get_tiers(kv, 0, 1, 0, LEN, tier), TKV_OK); /* the window took all others */
        for (i = 4; i < 600; i++) CHECK_EQ(tier[i] == TKV_TOKEN_GONE, !is_named(i));
        CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
        CHECK_EQ(info.tokens[TKV_TIER_HOT] + info.tokens[TKV_TIER_WARM] + info.tokens[TKV_TIER_ARCHIVE] +
                     info.expired,
                 LEN);
        CHECK_EQ(tkv_get_layer(kv, 0, 2, &info), TKV_OK);
        CHECK_EQ(info.named_sinks, 0); /* they have expired */
        for (layer = 0; layer < LAYERS; layer++)
            for (n = 1; n <= QUERIES; n += QUERIES - 1) {
                CHECK_LE(attention_error(kv, 0, layer, LEN - n, n), 2e-3);
                CHECK_LE(attention_error(kv, 0, layer, LEN - n - 7, n), 2e-3);
            }
        for (i = 0; i < COUNT(named); i++) /* of a layer without a window, old queries too */
            CHECK_LE(attention_error(kv, 0, 0, named[i] - 5, QUERIES), 2e-3);
        tkv_destroy(kv);
    }
}

/* While a window still reaches them, at its edge, and behind it: at each length. */
TEST(windows_pass_named_sinks) {
    tkv_config cfg = make_sinks_config(1);
    tkv_cache *kv = create_cache(&cfg);
    int len, layer;
    append_with_sinks(kv, 0, 180, 60);
    for (len = 181; len < 560; len++) {
        append_with_sinks(kv, 0, len, 1);
        for (layer = 1; layer < LAYERS; layer++) CHECK_LE(attention_error(kv, 0, layer, len - 1, 1), 2e-3);
        if (len % 20 == 0) CHECK_LE(attention_error(kv, 0, 1, len - QUERIES, QUERIES), 2e-3);
        check_sinks(kv, 0, 1, len);
    }
    tkv_destroy(kv);
}

/* Blocks shrink by eviction and merge. One that a window has passed, but for its named sinks, stays apart from the next. */
TEST(blocks_of_passed_sinks_do_not_merge_with_later_ones) {
    enum { N = 560 };
    tkv_config cfg = make_sinks_config(1);
    uint64_t victims[(N + 63) / 64];
    tkv_cache *kv;
    int i;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    append_with_sinks(kv, 0, N, 20);
    memset(victims, 0, sizeof victims);
    for (i = 8; i < N - 40; i++)
        if (i % 16) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, N), TKV_OK);
    check_cache(kv);
    check_sinks(kv, 0, 1, N); /* pinned by their name */
    CHECK(n_layer_blocks(kv, 0, 0) < 6);
    CHECK_LE(attention_error(kv, 0, 1, N - QUERIES, QUERIES), 2e-3);
    append_with_sinks(kv, 0, N + 200, 20);
    check_sinks(kv, 0, 1, N);
    tkv_destroy(kv);
}

/* >>refusals */
TEST(naming_is_refused_with_a_reason) {
    tkv_config cfg = make_sinks_config(2);
    tkv_cache *kv = create_cache(&cfg);
    guarded_buffer arena;
    snapshot before, after;
    memset(&arena, 0, sizeof arena);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 150, 50), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 400, 50), TKV_OK);
    before = snapshot_of_tokens(kv);
    CHECK_EQ(tkv_seq_set_sinks(kv, 2, 0, 1, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, -1, 1, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 0, -1, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 0, 1, 2), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 149, 2, 1), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_set_sinks(kv, 1, 80, 1, 1), TKV_ERR_NO_SOURCE);
    CHECK(strstr(tkv_get_last_error(kv), "80") != NULL);
    CHECK_EQ(tkv_seq_set_sinks(kv, 1, 200, 190, 1), TKV_ERR_NO_SOURCE); /* the newest ones are exact */
    CHECK_EQ(tkv_seq_set_sinks(kv, 1, 1000, 0, 1), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 1, 0, 1000, 0), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 1, 3, 1, 1), TKV_OK); /* the first tokens are sinks already */
    CHECK_EQ(tkv_seq_set_sinks(kv, 1, 3, 1, 0), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 140, 141), TKV_OK);
    free_snapshot(&before);
    before = snapshot_of_tokens(kv);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 139, 3, 1), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 149, 1, 1), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    after = snapshot_of_tokens(kv);
    CHECK(is_same_snapshot(&before, &after));
    free_snapshot(&before);
    free_snapshot(&after);
    check_cache(kv);
    CHECK_EQ(tkv_seq_discard(kv, 1, 70, NULL), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 1, 10, 1, 1), TKV_ERR_NO_SOURCE);
    CHECK(strstr(tkv_get_last_error(kv), "a token is discarded; recompute it first: index 10") != NULL);
    check_cache(kv);
    tkv_destroy(kv);
    cfg.limits.max_tokens = 400;
    kv = create_cache_in_place(&cfg, &arena, 0);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 50), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 99, 1, 1), TKV_ERR_UNSUPPORTED);
    CHECK(strstr(tkv_get_last_error(kv), "budget") != NULL);
    tkv_destroy(kv);
    free(arena.raw);
    cfg = make_config(1, 1);
    cfg.tiers.n_anchors = 2;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 50), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 99, 1, 1), TKV_ERR_UNSUPPORTED);
    CHECK(strstr(tkv_get_last_error(kv), "n_anchors") != NULL);
    tkv_destroy(kv);
}

/* A compressed token becomes exact from the copy that was kept, and then a sink. */
TEST(promoted_tokens_can_be_named) {
    tkv_config cfg = make_config(1, 1);
    test_store store;
    tkv_cache *kv;
    attach_test_store(&store, &cfg);
    cfg.offload.keep_exact = 1;
    cfg.tiers.warm_tokens = 64;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 400, 40), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 100, 1, 1), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_promote(kv, 0, 0, 100), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 100, 1, 1), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 400, 40), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    check_read(kv, 0, 0, 1, 100, 1, TKV_F16);
    check_cache(kv);
    tkv_destroy(kv);
    destroy_test_store(&store);
}

/* >>pressure */
/* Under a budget that is too small for all tokens: each level, then eviction by each policy whose victims are known
 * before. The others can refuse the append (api.h, "eviction in a cache"). */
TEST(named_sinks_survive_a_budget) {
    int policy;
    for (policy = TKV_EVICT_SLIDING; policy < TKV_EVICT_SCORES; policy++) {
        tkv_config cfg = make_sinks_config(1);
        tkv_layer_info info;
        tkv_cache *kv;
        int layer;
        if (policy == TKV_EVICT_SNAPKV || policy == TKV_EVICT_PYRAMIDKV || policy == TKV_EVICT_KEYDIFF)
            continue;
        layers[1].window_sinks = layers[1].window = layers[2].window = 0;
        cfg.budget.bytes = 300000;
        cfg.evict.policy = (tkv_evict_policy)policy;
        kv = create_cache(&cfg);
        append_with_sinks(kv, 0, 1800, 30);
        CHECK_EQ(budget_of(kv).level, budget_of(kv).n_levels - 1);
        for (layer = 0; layer < LAYERS; layer++) {
            check_sinks(kv, 0, layer, LEN);
            CHECK_EQ(tkv_get_layer(kv, 0, layer, &info), TKV_OK);
            CHECK_EQ(info.named_sinks, COUNT(named));
            CHECK(info.evicted > 300);
        }
        check_cache(kv);
        tkv_destroy(kv);
    }
}

/* Without eviction a full budget refuses tokens. More sinks leave it room for fewer. */
TEST(named_sinks_count_in_the_budget) {
    int n_named, len[2];
    for (n_named = 0; n_named < 2; n_named++) {
        tkv_config cfg = make_config(LAYERS, 1);
        tkv_cache *kv;
        tkv_status st = TKV_OK;
        int i, layer;
        cfg.budget.bytes = 200000;
        kv = create_cache(&cfg);
        while (!st && tkv_get_length(kv, 0, TKV_ALL_LAYERS) < MAX_TOKENS - 10) {
            st = append_to_all_layers(kv, 0, 1, 10, 10);
            if (!st && n_named) {
                const int at = tkv_get_length(kv, 0, TKV_ALL_LAYERS) - 1;
                CHECK_EQ(tkv_seq_set_sinks(kv, 0, at, 1, 1), TKV_OK);
            }
        }
        CHECK_EQ(st, TKV_ERR_BUDGET);
        len[n_named] = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
        for (i = 9; i < len[n_named] && n_named; i += 10)
            for (layer = 0; layer < LAYERS; layer++) check_read(kv, 0, layer, 1, i, 1, TKV_F16);
        check_cache(kv);
        tkv_destroy(kv);
    }
    CHECK(len[1] > 200 && len[1] < len[0]);
}

/* Offloaded sinks keep their bits. Discarding leaves their blocks. */
TEST(named_sinks_are_offloaded_and_not_discarded) {
    tkv_config cfg = make_config(2, 1);
    test_store store;
    tkv_layer_info info;
    tkv_cache *kv;
    int done, layer, n;
    attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    append_with_sinks(kv, 0, LEN, 33);
    CHECK_EQ(tkv_offload(kv, 0, TKV_ALL_LAYERS, 5, &done), TKV_OK);
    CHECK_EQ(done, 10);
    for (layer = 0; layer < 2; layer++) check_sinks(kv, 0, layer, LEN);
    CHECK_EQ(tkv_seq_discard(kv, 0, LEN, &n), TKV_OK);
    CHECK(n > 0);
    for (layer = 0; layer < 2; layer++) {
        CHECK_EQ(tkv_get_layer(kv, 0, layer, &info), TKV_OK);
        CHECK(info.discarded > 200);
        check_sinks(kv, 0, layer, LEN);
    }
    check_cache(kv);
    tkv_destroy(kv);
    destroy_test_store(&store);
    cfg = make_config(2, 1);
    cfg.host.precise = 1;
    kv = create_cache(&cfg);
    append_with_sinks(kv, 0, LEN, 33);
    CHECK_EQ(tkv_seq_discard(kv, 0, LEN, &n), TKV_OK);
    for (layer = 0; layer < 2; layer++) {
        CHECK_EQ(tkv_get_layer(kv, 0, layer, &info), TKV_OK);
        CHECK(info.discarded > 400);
        CHECK_EQ(info.named_sinks, COUNT(named));
        check_sinks(kv, 0, layer, LEN);
    }
    check_cache(kv);
    while (tkv_seq_find_discarded(kv, 0, &done, &n) == TKV_OK && n)
        for (layer = 0; layer < 2; layer++) { /* the runs between the sinks */
            fill_rows(1, layer, done, n, k_in, v_in);
            CHECK_EQ(tkv_restore(kv, 0, layer, done, k_in, v_in, n), TKV_OK);
        }
    check_cache(kv);
    CHECK_LE(attention_error(kv, 0, 0, LEN - 1, 1), 2e-3);
    tkv_destroy(kv);
}

/* >>sequences */
/* A fork has the sinks of its source. A block stays exact while any of both has one in it. */
TEST(forks_share_named_sinks) {
    tkv_config cfg = make_sinks_config(3);
    tkv_cache *kv = create_cache(&cfg);
    tkv_layer_info info;
    tkv_tier tier;
    int layer;
    append_with_sinks(kv, 0, 210, 30);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    append_with_sinks(kv, 1, LEN, 30);
    append_with_sinks(kv, 0, 600, 30);
    for (layer = 0; layer < 2; layer++) {
        check_sinks(kv, 0, layer, 600);
        check_sinks(kv, 1, layer, LEN);
        CHECK_LE(attention_error(kv, 0, layer, 560, QUERIES), 2e-3);
        CHECK_LE(attention_error(kv, 1, layer, LEN - 1, 1), 2e-3);
    }
    CHECK_EQ(tkv_seq_set_sinks(kv, 1, 0, LEN, 0), TKV_OK); /* they remain with sequence 0 */
    append_with_sinks(kv, 1, LEN + 30, 30);
    check_sinks(kv, 0, 0, 600);
    check_read(kv, 1, 0, 1, 70, 1, TKV_F16); /* so the block is exact for the other, too */
    CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 0);
    CHECK_EQ(tkv_get_tiers(kv, 1, 1, 200, 1, (uint8_t *)k_in), TKV_OK);
    CHECK_EQ(*(uint8_t *)k_in, TKV_TOKEN_GONE); /* the window had passed it */
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    append_with_sinks(kv, 1, LEN + 90, 30); /* nobody has sinks now: the next appends code the blocks */
    CHECK_EQ(tier_of(kv, 1, 0, 70, &tier), TKV_OK);
    CHECK_EQ(tier, TKV_TIER_ARCHIVE);
    CHECK_EQ(tkv_read(kv, 1, 0, 70, 1, k_out, NULL), TKV_OK);
    fill_rows(1, 0, 70, 1, k_want, v_want);
    CHECK(fabs((double)k_out[0] - (double)k_want[0]) > 1e-3);
    check_cache(kv);
    CHECK_EQ(tkv_seq_fork(kv, 1, 2, 100), TKV_ERR_RANGE); /* windows have expired */
    tkv_destroy(kv);
}

/* Tokens after a cut in the middle of a block with sinks are no sinks. */
TEST(cuts_forget_named_sinks) {
    tkv_config cfg = make_config(1, 2);
    tkv_cache *kv = create_cache(&cfg);
    tkv_layer_info info;
    append_with_sinks(kv, 0, 340, 40);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 201), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 2); /* 70, 200 */
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 300, 20), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 2);
    check_read(kv, 1, 0, 1, 200, 1, TKV_F16);
    CHECK_EQ(tkv_seq_remove(kv, 0, 200, 202), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 333), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 1);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 300, 20), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 1);
    check_read(kv, 0, 0, 1, 70, 1, TKV_F16);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Moves and copies take the sinks along. Sliding removes them as other tokens. */
TEST(named_sinks_move) {
    tkv_config cfg = make_config(1, 2);
    tkv_cache *kv;
    tkv_layer_info info;
    int n;
    cfg.model.rope.dim = DIM;
    cfg.limits.max_tokens = 640;
    kv = create_cache(&cfg);
    append_with_sinks(kv, 0, 500, 40);
    CHECK_EQ(tkv_seq_copy(kv, 0, 190, 400, 1, 0), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 3);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 7, 300, 50), TKV_OK);
    CHECK_EQ(tkv_read(kv, 1, 0, 143, 1, NULL, v_out), TKV_OK); /* values do not turn: they keep their bits */
    fill_rows(1, 0, 333, 1, k_want, v_want);
    for (n = 0; n < V_ROW; n++) CHECK_EQ(bits_of(v_out[n]), bits_of(as_stored(TKV_F16, v_want[n])));
    CHECK_EQ(tkv_seq_shift(kv, 1, 11, 12, -1), TKV_OK); /* one of two sinks of a block */
    check_cache(kv);
    CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 3);
    CHECK_EQ(append_to_all_layers(kv, 1, 7, 90, 45), TKV_OK);
    CHECK_EQ(tkv_seq_slide(kv, 1, 100, &n), TKV_OK);
    CHECK_EQ(n, 64); /* indices 4 to 67 */
    CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 1);
    CHECK_EQ(tkv_read(kv, 1, 0, 143 - 64, 1, NULL, v_out), TKV_OK);
    for (n = 0; n < V_ROW; n++) CHECK_EQ(bits_of(v_out[n]), bits_of(as_stored(TKV_F16, v_want[n])));
    check_cache(kv);
    tkv_destroy(kv);
}

/* The first block behind one sink begins before the span of a slide, which is that of four sinks in another layer. Beyond
 * the window it has named sinks alone: it goes if they are in the span. */
TEST(slides_past_sinks_beyond_a_window) {
    int sink, i;
    for (sink = 2; sink < 40; sink += 30) {
        tkv_config cfg = make_sinks_config(1);
        uint8_t tier[300];
        tkv_cache *kv;
        int n = 0;
        layers[1].sink_tokens = 1;
        cfg.model.rope.dim = DIM;
        cfg.limits.max_tokens = 400;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 50, 50), TKV_OK);
        CHECK_EQ(tkv_seq_set_sinks(kv, 0, sink, 1, 1), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 310, 31), TKV_OK);
        check_read(kv, 0, 1, 1, sink, 1, TKV_F16);
        CHECK_EQ(tkv_seq_slide(kv, 0, 64, &n), TKV_OK);
        CHECK_EQ(n, BLOCK);
        check_cache_at(kv, "slid past a sink", sink);
        CHECK_EQ(tkv_get_tiers(kv, 0, 1, 0, 296, tier), TKV_OK);
        for (i = 0; i < 60; i++) CHECK_EQ(tier[i] == TKV_TIER_HOT, i == 0 || (i == 2 && sink == 2));
        if (sink == 2) check_read(kv, 0, 1, 1, 2, 1, TKV_F16);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 64, 16), TKV_OK);
        check_cache_at(kv, "appended after a slide", sink);
        tkv_destroy(kv);
    }
}

/* A sink beyond the window that is none any more has expired. The others of its block stay, and so do tokens that the
 * window has not passed. */
TEST(sinks_lose_their_names_one_by_one) {
    tkv_config cfg = make_sinks_config(1);
    tkv_cache *kv = create_cache(&cfg);
    uint8_t tier[400];
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 50, 50), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 20, 2, 1), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 350, 50), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 390, 1, 1), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 20, 1, 0), TKV_OK);
    CHECK_EQ(tkv_get_tiers(kv, 0, 1, 0, 400, tier), TKV_OK);
    CHECK(tier[20] == TKV_TOKEN_GONE && tier[21] == TKV_TIER_HOT);
    check_read(kv, 0, 1, 1, 21, 1, TKV_F16);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 390, 1, 0), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 21, 1, 0), TKV_OK);
    CHECK_EQ(tkv_get_tiers(kv, 0, 1, 0, 400, tier), TKV_OK);
    CHECK(tier[21] == TKV_TOKEN_GONE && tier[390] == TKV_TIER_HOT);
    check_cache(kv);
    tkv_destroy(kv);
}

/* The path of a draft that stays takes its sinks along, to other indices. */
TEST(kept_paths_keep_named_sinks) {
    const int indices[] = {102, 104, 105};
    tkv_config cfg = make_config(1, 1);
    tkv_cache *kv = create_cache(&cfg);
    tkv_layer_info info;
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 110, 110), TKV_OK);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 103, 2, 1), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 101, indices, 3), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, 1);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 600, 50), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 102, 1, k_out, NULL), TKV_OK);
    fill_rows(1, 0, 104, 1, k_want, v_want);
    CHECK_EQ(bits_of(k_out[0]), bits_of(as_stored(TKV_F16, k_want[0])));
    check_cache(kv);
    tkv_destroy(kv);
}

/* All other tokens are evicted: blocks with a few sinks merge, and keep their bits. */
TEST(blocks_of_named_sinks_merge) {
    tkv_config cfg = make_config(1, 1);
    uint64_t victims[16];
    tkv_layer_info info;
    tkv_cache *kv;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    append_with_sinks(kv, 0, LEN, 33);
    memset(victims, 0xff, sizeof victims);
    CHECK_EQ(evict_tokens(kv, 0, 0, victims, 700), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.named_sinks, COUNT(named));
    CHECK_EQ(info.evicted, 700 - COUNT(named));
    CHECK_EQ(info.tokens[TKV_TIER_HOT] + info.tokens[TKV_TIER_WARM] + info.tokens[TKV_TIER_ARCHIVE],
             200 + COUNT(named));
    CHECK(n_layer_blocks(kv, 0, 0) < 8); /* three blocks of sinks became one */
    check_sinks(kv, 0, 0, LEN);
    check_cache(kv);
    CHECK_LE(attention_error(kv, 0, 0, LEN - QUERIES, QUERIES), 2e-3);
    tkv_destroy(kv);
}

/* Tokens that are no sinks any more are compressed with the next appends, as all others. */
TEST(forgotten_sinks_are_compressed) {
    tkv_config cfg = make_config(2, 1);
    tkv_cache *kv = create_cache(&cfg), *plain = create_cache(&cfg);
    tkv_memory_info a, b;
    append_with_sinks(kv, 0, LEN, 33);
    CHECK_EQ(append_to_all_layers(plain, 0, 1, LEN, 33), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &a), TKV_OK);
    CHECK_EQ(tkv_get_memory(plain, &b), TKV_OK);
    CHECK(a.total > b.total);
    CHECK_EQ(tkv_seq_set_sinks(kv, 0, 0, LEN, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 33, 33), TKV_OK);
    CHECK_EQ(append_to_all_layers(plain, 0, 1, 33, 33), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &a), TKV_OK);
    CHECK_EQ(tkv_get_memory(plain, &b), TKV_OK);
    CHECK_EQ(a.total - a.index, b.total - b.index); /* the index keeps the size to which it grew */
    check_cache(kv);
    tkv_destroy(plain);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(named_sinks_stay_exact);
    RUN(windows_pass_named_sinks);
    RUN(blocks_of_passed_sinks_do_not_merge_with_later_ones);
    RUN(naming_is_refused_with_a_reason);
    RUN(promoted_tokens_can_be_named);
    RUN(named_sinks_survive_a_budget);
    RUN(named_sinks_count_in_the_budget);
    RUN(named_sinks_are_offloaded_and_not_discarded);
    RUN(forks_share_named_sinks);
    RUN(cuts_forget_named_sinks);
    RUN(named_sinks_move);
    RUN(slides_past_sinks_beyond_a_window);
    RUN(sinks_lose_their_names_one_by_one);
    RUN(kept_paths_keep_named_sinks);
    RUN(blocks_of_named_sinks_merge);
    RUN(forgotten_sinks_are_compressed);
    return tkv_test_end();
}
