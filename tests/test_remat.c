/*
 * test_remat.c - blocks that are discarded and recomputed. Attention with a discarded block is refused.
 * Recomputing restores the same bits. A call that fails changes nothing. Under a budget, blocks of idle sequences
 * are discarded for the running one. With cfg.recompute, a sequence discards its own blocks, and attention gets their
 * rows from the model. The "model" that recomputes keeps every key and value that it appended.
 */
#include "../tieredkv.h"
#include "kit.h"

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    LAYERS = 2,
    SEQS = 3,
    KV_HEADS = 2,
    HEADS = 4,
    DIM = 32,
    ROW = KV_HEADS * DIM,
    CHUNK = 96,
    LONGEST = 2048
};

static tkv_rng rng;
static float q_in[CHUNK * HEADS * DIM], out_a[CHUNK * HEADS * DIM], out_b[CHUNK * HEADS * DIM];
static float k_a[LONGEST * ROW], v_a[LONGEST * ROW], k_b[LONGEST * ROW], v_b[LONGEST * ROW];
/* keys and values that the model computes */
static float k_model[SEQS][LAYERS][LONGEST * ROW], v_model[SEQS][LAYERS][LONGEST * ROW];

static tkv_config small_config(void) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    cfg.tiers.warm_tokens = 2 * BLOCK;
    return cfg;
}

static int count_discarded(const tkv_cache *kv, int seq, int layer) {
    tkv_layer_info t;
    memset(&t, 0, sizeof t);
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &t), TKV_OK);
    CHECK_EQ(t.tokens[0] + t.tokens[1] + t.tokens[2] + t.expired + t.evicted + t.discarded,
             tkv_get_length(kv, seq, layer));
    return t.discarded;
}

static int find_discarded(const tkv_cache *kv, int seq, int *start) {
    int n = -1;
    CHECK_EQ(tkv_seq_find_discarded(kv, seq, start, &n), TKV_OK);
    return n;
}

/* Appends the same random tokens to all layers of one cache or two. k_model and v_model keep them. */
static tkv_status append_to_both(tkv_cache *a, tkv_cache *b, int seq, int n) {
    tkv_status st = TKV_OK;
    int l, len = tkv_get_length(a, seq, TKV_ALL_LAYERS);
    for (l = 0; l < LAYERS && !st; l++) {
        float *k = k_model[seq][l] + len * ROW, *v = v_model[seq][l] + len * ROW;
        tkv_rng_fill(&rng, k, (size_t)(n * ROW), 1.0);
        tkv_rng_fill(&rng, v, (size_t)(n * ROW), 1.0);
        st = tkv_append(a, seq, l, k, v, n);
        if (!st && b) CHECK_EQ(tkv_append(b, seq, l, k, v, n), TKV_OK);
    }
    return st;
}

static tkv_status restore_tokens(tkv_cache *kv, int seq, int layer, int start, int n) {
    return tkv_restore(kv, seq, layer, start, k_model[seq][layer] + start * ROW,
                       v_model[seq][layer] + start * ROW, n);
}

/* Restores all discarded tokens. */
static void restore_all(tkv_cache *kv, int seq) {
    int start, n, l;
    while ((n = find_discarded(kv, seq, &start)) > 0)
        for (l = 0; l < LAYERS; l++) {
            const tkv_status st = restore_tokens(kv, seq, l, start, n);
            CHECK_MSG(st == TKV_OK, "%d: %s", (int)st, tkv_get_last_error(kv));
            if (st) return;
        }
    check_cache(kv);
}

static int discard_tokens(tkv_cache *kv, int seq, int n) {
    int n_discarded = -1;
    CHECK_EQ(tkv_seq_discard(kv, seq, n, &n_discarded), TKV_OK);
    check_cache(kv);
    return n_discarded;
}

static void check_same(tkv_cache *a, tkv_cache *b, int seq, int n) {
    int l, len = tkv_get_length(a, seq, TKV_ALL_LAYERS);
    CHECK_EQ(tkv_get_length(b, seq, TKV_ALL_LAYERS), len);
    for (l = 0; l < LAYERS; l++) {
        tkv_rng_fill(&rng, q_in, (size_t)(n * HEADS * DIM), 1.0);
        CHECK_EQ(tkv_attend(a, seq, l, q_in, n, out_a), TKV_OK);
        CHECK_EQ(tkv_attend(b, seq, l, q_in, n, out_b), TKV_OK);
        CHECK_MEM(out_a, out_b, (size_t)(n * HEADS * DIM) * sizeof(float));
        CHECK_EQ(tkv_read(a, seq, l, 0, len, k_a, v_a), TKV_OK);
        CHECK_EQ(tkv_read(b, seq, l, 0, len, k_b, v_b), TKV_OK);
        CHECK_MEM(k_a, k_b, (size_t)(len * ROW) * sizeof(float));
        CHECK_MEM(v_a, v_b, (size_t)(len * ROW) * sizeof(float));
    }
}

/* Checks that calls that need discarded tokens fail and write nothing. */
static void check_attention_refused(tkv_cache *kv, int seq) {
    const float mark = 123.0f;
    int l;
    for (l = 0; l < LAYERS; l++) {
        out_a[0] = k_a[0] = mark;
        CHECK_EQ(tkv_attend(kv, seq, l, q_in, 1, out_a), TKV_ERR_NO_SOURCE);
        CHECK_EQ(tkv_read(kv, seq, l, 0, tkv_get_length(kv, seq, TKV_ALL_LAYERS), k_a, v_a),
                 TKV_ERR_NO_SOURCE);
        CHECK(memcmp(out_a, &mark, sizeof mark) == 0 && memcmp(k_a, &mark, sizeof mark) == 0);
        CHECK_EQ(tkv_read(kv, seq, l, 0, 4, k_a, v_a), TKV_OK); /* the sinks */
    }
}

static const tkv_format_pair warm_of[] = {{TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
                                          {TKV_KIVI4, TKV_KIVI4},
                                          {TKV_A40, TKV_R40},
                                          {TKV_A30, TKV_R20},
                                          {TKV_INT8, TKV_FP8_E4M3},
                                          {TKV_F32, TKV_F16},
                                          {TKV_BF16, TKV_F32},
                                          {TKV_KIVI4, TKV_KIVI4}};
static const tkv_format_pair archive_of[] = {{TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
                                             {TKV_KIVI2, TKV_KIVI2},
                                             {TKV_A25, TKV_R15},
                                             {TKV_A30, TKV_R20},
                                             {TKV_FP4, TKV_INT4},
                                             {TKV_F32, TKV_F16},
                                             {TKV_F16, TKV_F16}, /* as the hot tier */
                                             {TKV_F16, TKV_F16}};

/* >>restored blocks */
TEST(restored_blocks_are_the_same) {
    const int most = tkv_test_quick() ? 12 : CHUNK; /* queries of a call */
    int i, n, seq, start;
    for (i = 0; i <= COUNT(warm_of); i++) {
        tkv_config cfg = small_config();
        tkv_cache *a, *b;
        if (i < COUNT(warm_of)) cfg.tiers.warm = warm_of[i], cfg.tiers.archive = archive_of[i];
        else cfg.tiers.hot_tokens = TKV_UNLIMITED;
        a = create_cache(&cfg);
        b = create_cache(&cfg);
        for (n = 0; n < 12; n++) {
            for (seq = 0; seq < 2; seq++) CHECK_EQ(append_to_both(a, b, seq, 70), TKV_OK);
            if (n != 1) continue; /* restored blocks have the newest table: there is one */
            CHECK_EQ(tkv_freeze_calibration(a), TKV_OK);
            CHECK_EQ(tkv_freeze_calibration(b), TKV_OK);
        }
        n = discard_tokens(b, 0, 300);
        CHECK_EQ(n, 256);
        CHECK_EQ(find_discarded(b, 0, &start), 256);
        CHECK_EQ(start, 4);
        CHECK_EQ(count_discarded(b, 0, 1), 256);
        CHECK_EQ(count_discarded(b, 1, 1), 0);
        check_attention_refused(b, 0);
        check_same(a, b, 1, 3);
        n = discard_tokens(b, 0, LONGEST); /* all other blocks that may be discarded */
        CHECK(n > 256);
        CHECK_EQ(find_discarded(b, 0, &start), 256 + n);
        CHECK_EQ(discard_tokens(b, 0, LONGEST), 0);
        CHECK_EQ(restore_tokens(b, 0, 0, 4, 128), TKV_OK); /* in parts, and fewer in layer 1 */
        check_cache(b);
        check_attention_refused(b, 0);
        CHECK_EQ(restore_tokens(b, 0, 1, 4, 64), TKV_OK);
        check_cache(b);
        CHECK_EQ(find_discarded(b, 0, &start), 256 + n - 64);
        CHECK_EQ(start, 68);
        restore_all(b, 0);
        CHECK_EQ(find_discarded(b, 0, &start), 0);
        for (n = 1; n <= most; n += most - 1)
            for (seq = 0; seq < 2; seq++) check_same(a, b, seq, n);
        CHECK_EQ((int)budget_of(b).discarded, (int)budget_of(b).recomputed);
        for (n = 0; n < 6; n++) { /* tokens are appended, and age, while blocks are discarded */
            CHECK_EQ(discard_tokens(b, 0, 256 + 64 * n), 256 + 64 * n);
            CHECK_EQ(append_to_both(a, b, 0, 50), TKV_OK);
            check_cache(b);
            check_attention_refused(b, 0);
            restore_all(b, 0);
            check_same(a, b, 0, 2);
        }
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

TEST(tiers_change_while_blocks_are_discarded) {
    int f;
    for (f = 0; f < COUNT(warm_of); f++) {
        tkv_config cfg = small_config();
        tkv_cache *a, *b;
        int n, seq = 0;
        cfg.tiers.warm = warm_of[f];
        cfg.tiers.archive = archive_of[f];
        a = create_cache(&cfg);
        b = create_cache(&cfg);
        for (n = 0; n < 10; n++) CHECK_EQ(append_to_both(a, b, seq, 70), TKV_OK);
        CHECK(discard_tokens(b, seq, LONGEST) >= 192); /* blocks of all three tiers */
        for (n = 0; n < 4; n++) CHECK_EQ(append_to_both(a, b, seq, 70), TKV_OK);
        check_cache(b);
        restore_all(b, seq);
        check_same(a, b, seq, 5);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* >>wrong calls */
TEST(wrong_restores_change_nothing) {
    tkv_config cfg = small_config();
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    float saved;
    int n, start, len;
    for (n = 0; n < 8; n++) CHECK_EQ(append_to_both(a, b, 0, 90), TKV_OK);
    CHECK_EQ(discard_tokens(b, 0, 320), 320);
    len = tkv_get_length(b, 0, TKV_ALL_LAYERS);
    CHECK_EQ(restore_tokens(b, 0, 0, 68, 64), TKV_ERR_STATE); /* not the first discarded block */
    CHECK(strstr(tkv_get_last_error(b), "front to back") != NULL);
    CHECK_EQ(restore_tokens(b, 0, 0, 4, 63), TKV_ERR_RANGE);
    CHECK_EQ(restore_tokens(b, 0, 0, 4, 65), TKV_ERR_RANGE);
    CHECK_EQ(restore_tokens(b, 0, 0, 5, 63), TKV_ERR_RANGE);
    CHECK_EQ(restore_tokens(b, 0, 0, len - 1, 2), TKV_ERR_RANGE);
    CHECK_EQ(restore_tokens(b, 0, 0, 4, -1), TKV_ERR_ARG);
    CHECK_EQ(tkv_restore(b, 0, 0, -4, k_a, v_a, 64), TKV_ERR_ARG);
    CHECK_EQ(tkv_restore(b, 0, 0, 4, NULL, v_a, 64), TKV_ERR_ARG);
    CHECK_EQ(tkv_restore(b, 0, 0, 4, k_a, NULL, 64), TKV_ERR_ARG);
    CHECK_EQ(tkv_restore(b, 0, LAYERS, 4, k_a, v_a, 64), TKV_ERR_ARG);
    CHECK_EQ(tkv_restore(b, SEQS, 0, 4, k_a, v_a, 64), TKV_ERR_ARG);
    CHECK_EQ(tkv_restore(NULL, 0, 0, 4, k_a, v_a, 64), TKV_ERR_ARG);
    CHECK_EQ(tkv_restore(b, 0, 0, 0x3fffffff, k_a, v_a, 0x3fffffff), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_discard(b, 0, -1, &n), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_discard(b, -1, 64, &n), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_find_discarded(b, -1, &start, &n), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_find_discarded(b, 0, NULL, &n), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_find_discarded(b, 0, &start, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_list_blocks(b, 0, NULL, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_list_blocks(b, 0, NULL, 1, &n), TKV_ERR_ARG);
    for (n = 0; n < 2; n++) {
        float *x = &(n ? v_model : k_model)[0][1][70 * ROW + 3];
        saved = *x;
        *x = tkv_test_float(0x7fc00000u);
        CHECK_EQ(restore_tokens(b, 0, 1, 4, 128), TKV_ERR_NONFINITE);
        *x = saved;
    }
    CHECK_EQ(tkv_seq_begin(b, 0), TKV_OK);
    CHECK_EQ(restore_tokens(b, 0, 0, 4, 64), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_discard(b, 0, 64, &n), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_abort(b, 0), TKV_OK);
    CHECK_EQ(tkv_seq_flush(a, 0, TKV_FLUSH_DUE), TKV_OK); /* tkv_seq_begin did the same to b */
    CHECK_EQ(find_discarded(b, 0, &start), 320);
    CHECK_EQ(start, 4);
    CHECK_EQ(restore_tokens(b, 0, 0, 0, 4), TKV_OK); /* none of these tokens is discarded */
    CHECK_EQ(find_discarded(b, 0, &start), 320);
    CHECK_EQ(restore_tokens(b, 0, 0, 0, 68), TKV_OK); /* includes tokens that are not discarded */
    CHECK_EQ(count_discarded(b, 0, 0), 256);
    restore_all(b, 0);
    check_same(a, b, 0, 7);
    tkv_destroy(a);
    tkv_destroy(b);
}

TEST(failed_allocations_change_nothing) {
    tkv_config cfg = small_config(), counted;
    tkv_cache *a, *b;
    counting_allocator p;
    int n, start, n_failed = 0, l = 0;
    cfg.tiers.warm = pair_of(TKV_A40, TKV_R40);
    cfg.tiers.archive = pair_of(TKV_A30, TKV_R30);
    counted = cfg;
    counted.host.allocator = counting_allocator_of(&p);
    a = create_cache(&cfg);
    b = create_cache(&counted);
    for (n = 0; n < 10; n++) CHECK_EQ(append_to_both(a, b, 0, 90), TKV_OK);
    CHECK_EQ(discard_tokens(b, 0, 640), 640);
    for (n = 1; l < LAYERS; n++) {
        tkv_status st;
        p.fail_at = n;
        st = restore_tokens(b, 0, l, 4, 640);
        p.fail_at = 0;
        check_cache(b);
        if (st == TKV_OK) {
            CHECK_EQ(count_discarded(b, 0, l), 0);
            l++, n = 0;
            continue;
        }
        n_failed++;
        CHECK_EQ(st, TKV_ERR_NOMEM);
        CHECK_EQ(count_discarded(b, 0, l), 640);
    }
    CHECK(n_failed > 4);
    CHECK_EQ(find_discarded(b, 0, &start), 0);
    check_same(a, b, 0, 5);
    tkv_destroy(a);
    tkv_destroy(b);
    CHECK_EQ(p.held, 0);
}

/* >>windows, truncation, flushes, eviction, anchors */
TEST(windows) {
    tkv_config cfg = small_config();
    tkv_layer_config layers[LAYERS];
    tkv_attend_params p;
    tkv_cache *a, *b;
    int n, start;
    memset(layers, 0, sizeof layers);
    layers[1].window = 200;
    cfg.layers = layers;
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    for (n = 0; n < 10; n++) CHECK_EQ(append_to_both(a, b, 0, 60), TKV_OK);
    CHECK_EQ(discard_tokens(b, 0, 256), 256);
    tkv_rng_fill(&rng, q_in, (size_t)(2 * HEADS * DIM), 1.0);
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 2, out_b), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_attend(b, 0, 1, q_in, 2, out_b), TKV_OK); /* its window has no discarded token */
    CHECK_EQ(tkv_attend(a, 0, 1, q_in, 2, out_a), TKV_OK);
    CHECK_MEM(out_a, out_b, 2 * HEADS * DIM * sizeof(float));
    memset(&p, 0, sizeof p);
    p.n = 2;
    p.q = q_in;
    for (p.window = 400; p.window > 100; p.window -= 100) {
        const int is_discarded_seen = 600 - 1 - p.window + 1 < 260;
        p.out = out_b;
        CHECK_EQ(tkv_attend_ex(b, &p), is_discarded_seen ? TKV_ERR_NO_SOURCE : TKV_OK);
        CHECK_EQ(tkv_attend_reference(b, &p), is_discarded_seen ? TKV_ERR_NO_SOURCE : TKV_OK);
        CHECK_EQ(tkv_attend_ex(b, &p), is_discarded_seen ? TKV_ERR_NO_SOURCE : TKV_OK);
        if (is_discarded_seen) continue;
        p.out = out_a;
        CHECK_EQ(tkv_attend_ex(a, &p), TKV_OK);
        CHECK_MEM(out_a, out_b, 2 * HEADS * DIM * sizeof(float));
    }
    for (n = 0; n < 8; n++) { /* discarded blocks leave the window */
        CHECK_EQ(append_to_both(a, b, 0, 60), TKV_OK);
        check_cache(b);
    }
    CHECK_EQ(count_discarded(b, 0, 1), 0);
    restore_all(b, 0);
    CHECK_EQ(find_discarded(b, 0, &start), 0);
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 2, out_b), TKV_OK);
    CHECK_EQ(tkv_attend(a, 0, 0, q_in, 2, out_a), TKV_OK);
    CHECK_MEM(out_a, out_b, 2 * HEADS * DIM * sizeof(float));
    tkv_destroy(a);
    tkv_destroy(b);
}

TEST(truncations_flushes_resets) {
    tkv_config cfg = small_config();
    tkv_cache *a, *b;
    int n, start, mode;
    cfg.tiers.hot_tokens = 256;
    for (mode = TKV_FLUSH_DUE; mode <= TKV_FLUSH_ALL; mode++) {
        a = create_cache(&cfg);
        b = create_cache(&cfg);
        for (n = 0; n < 8; n++) CHECK_EQ(append_to_both(a, b, 0, 90), TKV_OK);
        n = discard_tokens(b, 0, LONGEST);
        CHECK_EQ(n, 384);
        CHECK_EQ(tkv_seq_truncate(b, 0, 4 + 448), TKV_OK); /* keeps the discarded blocks */
        CHECK_EQ(tkv_seq_truncate(a, 0, 4 + 448), TKV_OK);
        check_cache(b);
        check_attention_refused(b, 0);
        CHECK_EQ(tkv_read(b, 0, 0, 452, 0, k_b, v_b), TKV_OK);
        CHECK_EQ(append_to_both(a, b, 0, 80), TKV_OK);
        CHECK_EQ(append_to_both(a, b, 0, 80), TKV_OK);
        CHECK_EQ(tkv_seq_flush(b, 0, (tkv_flush_mode)mode), TKV_OK);
        if (mode == TKV_FLUSH_DUE) CHECK_EQ(tkv_seq_flush(a, 0, TKV_FLUSH_DUE), TKV_OK);
        check_cache(b);
        check_attention_refused(b, 0);
        restore_all(b, 0);
        if (mode == TKV_FLUSH_DUE) check_same(a, b, 0, 4);
        n = discard_tokens(b, 0, LONGEST);
        CHECK(n > 0);
        CHECK_EQ(tkv_seq_reset(b, 0), TKV_OK);
        check_cache(b);
        CHECK_EQ(find_discarded(b, 0, &start), 0);
        CHECK_EQ(tkv_seq_reset(a, 0), TKV_OK);
        CHECK_EQ(append_to_both(a, b, 0, 90), TKV_OK);
        check_same(a, b, 0, 4);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

TEST(evicted_tokens) {
    tkv_config cfg = small_config();
    uint64_t victims[LONGEST / 64];
    tkv_cache *a, *b;
    int n, i, start, n_live = 0;
    uint64_t live_mask[LONGEST / 64];
    cfg.evict.policy = TKV_EVICT_H2O;
    /* exact tokens: packed blocks, too, are restored with the same bits */
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    for (n = 0; n < 9; n++) CHECK_EQ(append_to_both(a, b, 0, 90), TKV_OK);
    memset(victims, 0, sizeof victims);
    for (i = 10; i < 600; i++)
        if (tkv_rng_below(&rng, 5) < 2) victims[i / 64] |= (uint64_t)1 << i % 64;
    CHECK_EQ(evict_tokens(a, 0, 0, victims, 600), TKV_OK); /* each layer evicts other tokens */
    CHECK_EQ(evict_tokens(b, 0, 0, victims, 600), TKV_OK);
    for (i = 0; i < COUNT(victims); i++) victims[i] &= (uint64_t)0x0fffffffffffffffu >> i % 8;
    CHECK_EQ(evict_tokens(a, 0, 1, victims, 400), TKV_OK);
    CHECK_EQ(evict_tokens(b, 0, 1, victims, 400), TKV_OK);
    n = discard_tokens(b, 0, LONGEST);
    CHECK(n > 300);
    CHECK(count_discarded(b, 0, 0) < count_discarded(b, 0, 1));
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_a), TKV_ERR_NO_SOURCE);
    memset(victims, 0, sizeof victims); /* evicts more tokens, also of discarded blocks */
    for (i = 70; i < 240; i++) victims[i / 64] |= (uint64_t)1 << i % 64;
    CHECK_EQ(evict_tokens(a, 0, TKV_ALL_LAYERS, victims, 240), TKV_OK);
    CHECK_EQ(evict_tokens(b, 0, TKV_ALL_LAYERS, victims, 240), TKV_OK);
    check_cache(b);
    restore_all(b, 0);
    CHECK_EQ(find_discarded(b, 0, &start), 0);
    for (n = 0; n < LAYERS; n++) {
        CHECK_EQ(live_mask_of(b, 0, n, 0, tkv_get_length(b, 0, TKV_ALL_LAYERS), live_mask), TKV_OK);
        for (i = 0; i < tkv_get_length(b, 0, TKV_ALL_LAYERS); i++) {
            if (!(live_mask[i / 64] >> i % 64 & 1)) continue;
            n_live++;
            CHECK_EQ(tkv_read(a, 0, n, i, 1, k_a, v_a), TKV_OK);
            CHECK_EQ(tkv_read(b, 0, n, i, 1, k_b, v_b), TKV_OK);
            CHECK_MEM(k_a, k_b, ROW * sizeof(float));
            CHECK_MEM(v_a, v_b, ROW * sizeof(float));
        }
    }
    CHECK(n_live > 600);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* The largest difference of a held token from the model's rows. Adds the number of held tokens to n_held. */
static double worst_of_held(tkv_cache *kv, int seq, int *n_held) {
    uint64_t live_mask[LONGEST / 64];
    double worst = 0.0, e;
    int l, i;
    for (l = 0; l < LAYERS; l++) {
        CHECK_EQ(live_mask_of(kv, seq, l, 0, tkv_get_length(kv, seq, l), live_mask), TKV_OK);
        for (i = 0; i < tkv_get_length(kv, seq, l); i++) {
            if (!(live_mask[i / 64] >> i % 64 & 1)) continue;
            if (tkv_read(kv, seq, l, i, 1, k_a, v_a) != TKV_OK) continue; /* discarded */
            ++*n_held;
            e = float_difference(k_a, k_model[seq][l] + i * ROW, ROW);
            if (e > worst) worst = e;
            e = float_difference(v_a, v_model[seq][l] + i * ROW, ROW);
            if (e > worst) worst = e;
        }
    }
    return worst;
}

/* Restores the discarded tokens of all layers, at most `most` of them a call. The rows end with the tokens, so that
 * sanitizers see a read behind them. Returns the number of calls that evicted tokens. */
static int restore_in_pieces(tkv_cache *kv, int seq, int most) {
    int start, n, l, n_evicting = 0;
    while ((n = find_discarded(kv, seq, &start)) > 0)
        for (l = 0, n = n < most ? n : most; l < LAYERS; l++) {
            const size_t bytes = (size_t)(n * ROW) * sizeof(float);
            const uint64_t evicted = budget_of(kv).evicted;
            float *k = (float *)malloc(bytes), *v = (float *)malloc(bytes);
            int n_held = 0;
            tkv_status st;
            if (!k || !v) exit(2);
            memcpy(k, k_model[seq][l] + start * ROW, bytes);
            memcpy(v, v_model[seq][l] + start * ROW, bytes);
            st = tkv_restore(kv, seq, l, start, k, v, n);
            free(k);
            free(v);
            check_cache(kv);
            CHECK_LE(worst_of_held(kv, seq, &n_held), 0.01);
            CHECK(n_held > 0);
            n_evicting += budget_of(kv).evicted > evicted;
            if (!st) continue;
            CHECK_EQ(st, TKV_ERR_RANGE); /* after evictions 64 tokens need not be whole blocks */
            return n_evicting;
        }
    return n_evicting;
}

/* In a full budget a restore evicts tokens of its own sequence, also those that it was to restore. Their block leaves
 * the list, and the next one must not take the rows. */
TEST(restores_that_evict) {
    tkv_config cfg = small_config();
    tkv_level level;
    int size, most, n_evicting = 0;
    memset(&level, 0, sizeof level);
    level.hot_tokens = cfg.tiers.hot_tokens = TKV_UNLIMITED;
    level.warm.k = level.warm.v = level.archive.k = level.archive.v = TKV_F16;
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F16;
    cfg.evict.policy = TKV_EVICT_FIFO;
    cfg.budget.ladder = &level; /* no level recodes: tokens go, or they are exact */
    cfg.budget.n_levels = 1;
    for (size = 60; size <= 200; size += 8)
        for (most = BLOCK; most <= LONGEST; most += LONGEST - BLOCK) {
            tkv_cache *kv;
            cfg.budget.bytes = (size_t)size * 4096;
            kv = create_cache(&cfg);
            while (tkv_get_length(kv, 0, 0) < 480) CHECK_EQ(append_to_both(kv, NULL, 0, 48), TKV_OK);
            (void)discard_tokens(kv, 0, 2 * BLOCK);
            while (tkv_get_length(kv, 0, 0) < 960) CHECK_EQ(append_to_both(kv, NULL, 0, 48), TKV_OK);
            n_evicting += restore_in_pieces(kv, 0, most);
            tkv_destroy(kv);
        }
    CHECK(n_evicting > 10);
}

/* The block of the sinks keeps the anchors. The blocks that they came from can be discarded and restored. */
TEST(anchors) {
    tkv_config cfg = small_config();
    tkv_cache *a, *b;
    tkv_tier tier;
    int n, i, l, n_anchors = 0, n_discarded = 0;
    cfg.tiers.n_anchors = 12;
    cfg.importance.sample_every = 1;
    cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    for (n = 0; n < 12; n++) {
        CHECK_EQ(append_to_both(a, b, 0, 70), TKV_OK);
        for (l = 0; l < LAYERS; l++) {
            tkv_rng_fill(&rng, q_in, (size_t)(70 * HEADS * DIM), 3.0);
            CHECK_EQ(tkv_attend(a, 0, l, q_in, 70, out_a), TKV_OK);
            CHECK_EQ(tkv_attend(b, 0, l, q_in, 70, out_b), TKV_OK);
        }
    }
    CHECK_EQ(discard_tokens(b, 0, 448), 448);
    for (i = 4; i < 452; i++) {
        const tkv_status st = tier_of(b, 0, 0, i, &tier);
        n_anchors += st == TKV_OK && tier == TKV_TIER_HOT;
        n_discarded += st == TKV_ERR_NO_SOURCE;
    }
    CHECK_MSG(n_anchors > 0 && n_anchors <= 12 && n_anchors + n_discarded == 448, "%d anchors, %d discarded",
              n_anchors, n_discarded);
    check_attention_refused(b, 0);
    restore_all(b, 0);
    check_same(a, b, 0, 3);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* >>offloaded blocks */
TEST(offloaded_blocks_and_copies) {
    tkv_config cfg = small_config(), offloading;
    tkv_cache *a, *b;
    int n, start, n_offloaded;
    test_store d;
    offloading = cfg;
    attach_test_store(&d, &offloading);
    offloading.offload.keep_exact = 1;
    a = create_cache(&cfg);
    b = create_cache(&offloading);
    for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(a, b, 0, 70), TKV_OK);
    CHECK_EQ(tkv_offload(b, 0, TKV_ALL_LAYERS, 2, &n_offloaded), TKV_OK);
    CHECK_EQ(n_offloaded, 2 * LAYERS);
    n = discard_tokens(b, 0, 256);
    CHECK_EQ(n, 256);
    CHECK_EQ(find_discarded(b, 0, &start), 256);
    CHECK_EQ(start, 132); /* after the offloaded blocks */
    CHECK_EQ(tkv_offload(b, 0, TKV_ALL_LAYERS, 2, &n_offloaded),
             TKV_OK); /* discarded blocks cannot be offloaded */
    check_cache(b);
    check_attention_refused(b, 0);
    restore_all(b, 0);
    check_same(a, b, 0, 6);
    CHECK_EQ(discard_tokens(b, 0, 128), 128);
    CHECK_EQ(tkv_promote(b, 0, 0, 140), TKV_OK); /* from the exact copy */
    check_cache(b);
    CHECK_EQ(count_discarded(b, 0, 0), 64);
    CHECK_EQ(count_discarded(b, 0, 1), 128);
    CHECK_EQ(find_discarded(b, 0, &start), 128);
    CHECK_EQ(tkv_seq_reset(b, 0), TKV_OK);
    check_cache(b);
    CHECK_EQ(n_stored_keys(&d), 0);
    offloading.offload.keep_exact = 0;
    tkv_destroy(b);
    b = create_cache(&offloading);
    for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(b, NULL, 0, 70), TKV_OK);
    CHECK_EQ(discard_tokens(b, 0, 128), 128);
    CHECK_EQ(tkv_promote(b, 0, 0, 10), TKV_ERR_NO_SOURCE);
    check_cache(b);
    tkv_destroy(a);
    tkv_destroy(b);
    destroy_test_store(&d);
}

/* >>recomputation by a model */
typedef struct model {
    int calls, tokens;        /* number of calls, and of tokens requested */
    int fail_in, skips_layer; /* n: the n-th call from now on fails; 1: restores all layers but the last */
} model;

static tkv_status recompute_tokens(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers,
                                   int start, int n) {
    model *m = (model *)user;
    tkv_status st = TKV_OK;
    int l;
    m->calls++;
    m->tokens += n;
    if (m->fail_in && --m->fail_in == 0) return TKV_ERR_NOMEM;
    for (l = first_layer; l < first_layer + n_layers - m->skips_layer && !st; l++)
        st = restore_tokens(kv, seq, l, start, n);
    return st;
}

static tkv_remat make_remat(double step_blocks) {
    tkv_remat_config cfg;
    tkv_remat r;
    memset(&cfg, 0, sizeof cfg);
    cfg.n_layers = LAYERS;
    cfg.n_heads = HEADS;
    cfg.head_dim = DIM;
    cfg.layer_params = 1e8; /* makes the FLOPs of attention negligible */
    cfg.min_materialized = 128;
    CHECK_EQ(tkv_init_remat(&r, &cfg, NULL, 0), TKV_OK);
    cfg.step_flops = step_blocks * flops_of(&r, BLOCK) * 1.01;
    CHECK_EQ(tkv_init_remat(&r, &cfg, NULL, 0), TKV_OK);
    return r;
}

TEST(recomputing_in_steps) {
    tkv_config cfg = small_config();
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    tkv_remat r = make_remat(2), other;
    model m;
    int n, left;
    memset(&m, 0, sizeof m);
    for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(a, b, 0, 70), TKV_OK);
    CHECK_EQ(discard_tokens(b, 0, 320), 320);
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 7, recompute_tokens, &m, &left), TKV_OK);
    CHECK_EQ(left, 192);
    /* the FLOPs of step 7 are used up */
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 7, recompute_tokens, &m, &left), TKV_OK);
    CHECK_EQ(left, 192);
    CHECK_EQ(m.calls, 1);
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 6, recompute_tokens, &m, &left), TKV_ERR_ARG);
    other = r;
    other.cfg.n_layers = 1;
    CHECK_EQ(tkv_seq_recompute(b, 0, &other, 8, recompute_tokens, &m, &left), TKV_ERR_ARG);
    CHECK_MSG(strstr(tkv_get_last_error(b), "a model with fewer layers than") != NULL, "%s",
              tkv_get_last_error(b));
    m.fail_in = 1;
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 8, recompute_tokens, &m, &left), TKV_ERR_NOMEM);
    CHECK_EQ(left, 192);
    m.skips_layer = 1;
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 9, recompute_tokens, &m, &left), TKV_ERR_STATE);
    check_cache(b);
    m.skips_layer = 0;
    check_attention_refused(b, 0);
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 10, recompute_tokens, &m, &left), TKV_OK);
    CHECK_EQ(left, 64);
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 11, recompute_tokens, &m, NULL), TKV_OK);
    check_cache(b);
    check_same(a, b, 0, 3);
    CHECK_EQ((int)r.info.restored, 9); /* 5 blocks, and 2 more in each of the two calls that failed */
    CHECK(r.info.waited >= 4 && r.info.flops > 0.0);
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 12, recompute_tokens, &m, &left), TKV_OK); /* nothing to recompute */
    CHECK_EQ(left, 0);
    CHECK_EQ(m.calls, 5);
    CHECK_EQ(tkv_seq_recompute(b, 0, NULL, 12, recompute_tokens, &m, &left), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_recompute(b, 0, &r, 12, NULL, &m, &left), TKV_ERR_ARG);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* A discarded block whose tokens are all anchors misses nothing. Rows of it restore it, and need not be given. Until
 * then these anchors are the only copies: more important tokens do not take their places. */
TEST(anchors_of_a_whole_block) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    tkv_tier tier = TKV_TIER_COUNT;
    int n, i, l, start, n_hot[LAYERS] = {0};
    cfg.tiers.n_anchors = BLOCK;
    cfg.importance.sample_every = 1;
    cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    kv = create_cache(&cfg);
    for (n = 0; n < 12; n++)
        CHECK_EQ(append_to_both(kv, NULL, 0, 70), TKV_OK); /* no scores: the oldest ones */
    CHECK_EQ(discard_tokens(kv, 0, 192), 192);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(count_discarded(kv, 0, l), 128);
    CHECK_EQ(find_discarded(kv, 0, &start), 128);
    CHECK_EQ(start, 68);
    CHECK_EQ(tkv_read(kv, 0, 0, 4, 64, k_a, v_a), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 4, 65, k_a, v_a), TKV_ERR_NO_SOURCE);
    CHECK_EQ(restore_tokens(kv, 0, 0, 4, 63), TKV_OK); /* not the whole block: it stays discarded */
    CHECK_EQ(restore_tokens(kv, 0, 0, 4, 128), TKV_OK);
    CHECK_EQ(restore_tokens(kv, 0, 1, 68, 64), TKV_OK); /* in this layer it stays discarded */
    restore_all(kv, 0);
    for (n = 0; n < 8; n++) {
        for (l = 0; l < LAYERS; l++) {
            tkv_rng_fill(&rng, q_in, (size_t)(70 * HEADS * DIM), 3.0);
            CHECK_EQ(tkv_attend(kv, 0, l, q_in, 70, out_a), TKV_OK);
        }
        CHECK_EQ(append_to_both(kv, NULL, 0, 70), TKV_OK);
    }
    check_cache(kv);
    for (l = 0; l < LAYERS; l++)
        for (i = 4; i < 68; i++) n_hot[l] += tier_of(kv, 0, l, i, &tier) == TKV_OK && tier == TKV_TIER_HOT;
    CHECK_MSG(n_hot[0] < BLOCK && n_hot[1] == BLOCK, "%d and %d", n_hot[0], n_hot[1]);
    CHECK_EQ(tkv_read(kv, 0, 1, 4, 64, k_a, v_a), TKV_OK);
    tkv_destroy(kv);
}

/* A block with a named sink stays between discarded ones. Rows from the first to the last of them restore these. */
TEST(a_named_sink_stays_between_discarded_blocks) {
    tkv_config cfg = small_config();
    tkv_cache *a, *b;
    tkv_tier tier = TKV_TIER_COUNT;
    int n, l, start;
    cfg.host.nonfinite = TKV_NONFINITE_SATURATE;
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    for (n = 0; n < 12; n++) {
        CHECK_EQ(append_to_both(a, b, 0, 70), TKV_OK);
        if (n != 2) continue;
        CHECK_EQ(tkv_seq_set_sinks(a, 0, 200, 1, 1), TKV_OK);
        CHECK_EQ(tkv_seq_set_sinks(b, 0, 200, 1, 1), TKV_OK);
    }
    discard_tokens(b, 0, 448);
    CHECK_EQ(tier_of(b, 0, 0, 200, &tier), TKV_OK);
    CHECK_EQ(tier, TKV_TIER_HOT);
    CHECK_EQ(find_discarded(b, 0, &start), 192);
    CHECK_EQ(start, 4);
    CHECK_EQ(tier_of(b, 0, 0, 260, &tier), TKV_ERR_NO_SOURCE);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(restore_tokens(b, 0, l, 4, 448), TKV_OK);
    CHECK_EQ(find_discarded(b, 0, &start), 0);
    check_same(a, b, 0, 3);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Blocks that another sequence holds too stay in RAM, and so does one that a shift has split. Those behind them go. */
TEST(shared_blocks_stay_before_discarded_ones) {
    static const struct {
        int fork, shift;
        int discarded, first, n; /* tokens; the first run of discarded ones */
    } cases[] = {{0, 0, 960, 4, 960}, {260, 0, 704, 260, 704}, {300, 0, 704, 324, 704}, {0, 100, 896, 4, 64}};
    int i, l, n, start;
    for (i = 0; i < COUNT(cases); i++) {
        const int fork = cases[i].fork, seq = fork > 0;
        tkv_config cfg = small_config();
        tkv_cache *a, *b;
        cfg.model.rope.dim = DIM;
        cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        a = create_cache(&cfg);
        b = create_cache(&cfg);
        for (n = 0; n < 5; n++) CHECK_EQ(append_to_both(a, b, 0, fork ? fork / 5 : 52), TKV_OK);
        if (fork) {
            CHECK_EQ(tkv_seq_fork(a, 0, 1, TKV_UNLIMITED), TKV_OK);
            CHECK_EQ(tkv_seq_fork(b, 0, 1, TKV_UNLIMITED), TKV_OK);
            memcpy(k_model[1], k_model[0], sizeof k_model[0]);
            memcpy(v_model[1], v_model[0], sizeof v_model[0]);
        }
        for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(a, b, seq, 70), TKV_OK);
        if (cases[i].shift) {
            CHECK_EQ(tkv_seq_shift(a, 0, cases[i].shift, TKV_UNLIMITED, 5), TKV_OK);
            CHECK_EQ(tkv_seq_shift(b, 0, cases[i].shift, TKV_UNLIMITED, 5), TKV_OK);
        }
        n = discard_tokens(b, seq, 1000000);
        CHECK_MSG(n == cases[i].discarded, "case %d: %d tokens", i, n);
        for (l = 0; l < LAYERS; l++) CHECK_EQ(count_discarded(b, seq, l), n);
        CHECK_EQ(find_discarded(b, seq, &start), cases[i].n);
        CHECK_EQ(start, cases[i].first);
        check_attention_refused(b, seq);
        if (fork) check_same(a, b, 0, 3); /* the other sequence lacks nothing */
        restore_all(b, seq);
        check_same(a, b, seq, 3);
        CHECK_EQ(discard_tokens(b, seq, 130), cases[i].shift ? 64 : 128);
        restore_all(b, seq);
        check_same(a, b, seq, 3);
        if (fork) { /* once the blocks are its own, the first ones go too */
            CHECK_EQ(tkv_seq_reset(b, 0), TKV_OK);
            CHECK_EQ(discard_tokens(b, seq, 64), 64);
            CHECK_EQ(find_discarded(b, seq, &start), 64);
            CHECK_EQ(start, 4);
            restore_all(b, seq);
        }
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* Freeing bytes of a fork passes over the blocks that are shared: they would free nothing. */
TEST(free_bytes_passes_over_shared_blocks) {
    tkv_remat_block blocks[32];
    tkv_remat_action actions[32];
    tkv_remat r = make_remat(100);
    tkv_config cfg = small_config();
    tkv_cache *kv;
    size_t freed;
    int n, start;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    kv = create_cache(&cfg);
    for (n = 0; n < 4; n++) CHECK_EQ(append_to_both(kv, NULL, 0, 65), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(kv, NULL, 1, 70), TKV_OK);
    CHECK_EQ(tkv_seq_list_blocks(kv, 1, blocks, 32, &n), TKV_OK);
    CHECK_EQ(tkv_seq_free_bytes(kv, 1, &r, 0.95f, 3 * blocks[3].bytes - 5, blocks, actions, 32, &freed),
             TKV_OK);
    CHECK_EQ((int)freed, 3 * BLOCK * ROW * 2 * 2 * LAYERS);
    CHECK_EQ((int)r.info.freed, (int)freed);
    CHECK_EQ((int)r.info.discarded, 3);
    CHECK_EQ(find_discarded(kv, 1, &start), 192);
    CHECK_EQ(start, 260);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Under a budget an idle sequence with a shared prompt gives its own blocks, so that the active one gets at least as far
 * as beside an idle one that read the prompt itself. */
TEST(idle_forks_are_discarded) {
    int length[2], fork, l;
    for (fork = 0; fork < 2; fork++) {
        tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, 2, CHUNK);
        tkv_cache *kv;
        tkv_status st = TKV_OK;
        cfg.budget.bytes = 560 * 1000;
        cfg.budget.discard = 1;
        kv = create_cache(&cfg);
        for (l = 0; l < 4; l++) CHECK_EQ(append_to_both(kv, NULL, 0, 64), TKV_OK);
        if (fork) CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        else
            for (l = 0; l < 4; l++) CHECK_EQ(append_to_both(kv, NULL, 1, 64), TKV_OK);
        while (tkv_get_length(kv, 1, TKV_ALL_LAYERS) < 1536)
            CHECK_EQ(append_to_both(kv, NULL, 1, 64), TKV_OK);
        CHECK_EQ((int)budget_of(kv).discarded, 0);
        while (!st) { /* all rows alike: only their number matters */
            for (l = 0; l < LAYERS && !st; l++) st = tkv_append(kv, 0, l, k_model[0][l], v_model[0][l], 64);
            check_cache(kv);
        }
        CHECK_EQ(st, TKV_ERR_BUDGET);
        length[fork] = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
        CHECK(budget_of(kv).discarded > 10);
        CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 1536);
        tkv_destroy(kv);
    }
    printf("\n    refused at %d tokens beside a sequence, at %d beside a fork", length[0], length[1]);
    CHECK(length[0] > 1000 && length[1] >= length[0]);
}

TEST(free_bytes_discards_blocks) {
    tkv_remat_block blocks[32];
    tkv_remat_action actions[32];
    tkv_remat r = make_remat(100);
    tkv_config cfg = small_config();
    tkv_cache *a, *b;
    tkv_layer_info layer_info;
    tkv_memory_info m;
    size_t freed, want, bytes_before;
    int n, i, start;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    a = create_cache(&cfg);
    b = create_cache(&cfg);
    for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(a, b, 0, 70), TKV_OK);
    CHECK_EQ(tkv_seq_list_blocks(b, 0, NULL, 0, &n), TKV_OK);
    CHECK_EQ(n, 15);
    CHECK_EQ(tkv_seq_list_blocks(b, 0, blocks, 32, &n), TKV_OK);
    CHECK_EQ(blocks[0].end, 4);
    for (i = 1; i < n; i++) CHECK_EQ(blocks[i].start, blocks[i - 1].end);
    CHECK_EQ(blocks[n - 1].end, 840);
    CHECK_EQ((int)blocks[3].bytes, LAYERS * BLOCK * ROW * 2 * 2);
    /* without a ladder no block can be quantized */
    CHECK_EQ((int)blocks[3].quantized_bytes, (int)blocks[3].bytes);
    want = 3 * blocks[3].bytes - 5;
    CHECK_EQ(tkv_seq_free_bytes(b, 0, &r, 0.5f, want, blocks, actions, 32, &freed), TKV_OK);
    CHECK_EQ((int)freed, 0); /* the pressure is below the threshold */
    CHECK_EQ(tkv_get_layer(b, 0, 0, &layer_info), TKV_OK);
    m = layer_info.memory;
    bytes_before = m.total;
    CHECK_EQ(tkv_seq_free_bytes(b, 0, &r, 0.95f, want, blocks, actions, n - 1, &freed), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(b),
              "blocks is missing or too short: the sequence has 15 blocks (tkv_seq_list_blocks)");
    CHECK_EQ(tkv_seq_free_bytes(b, 0, &r, 0.95f, want, blocks, actions, -1, &freed), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_free_bytes(b, 0, NULL, 0.95f, want, blocks, actions, 32, &freed), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(b), "r is missing"); /* the message gives no number of blocks */
    freed = 1;
    CHECK_EQ(tkv_seq_free_bytes(b, 0, &r, tkv_test_float(0x7fc00000u), want, blocks, actions, 32, &freed),
             TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(b), "pressure is not finite, or actions are missing");
    CHECK_EQ((int)freed, 0);
    CHECK_EQ(tkv_seq_free_bytes(b, 0, &r, 0.95f, want, blocks, actions, 32, &freed), TKV_OK);
    CHECK_EQ((int)freed, 3 * BLOCK * ROW * 2 * 2 * LAYERS);
    CHECK_EQ(tkv_get_layer(b, 0, 0, &layer_info), TKV_OK);
    m = layer_info.memory;
    CHECK_EQ((int)(bytes_before - m.total), (int)freed / LAYERS);
    CHECK_EQ(find_discarded(b, 0, &start), 192);
    CHECK_EQ((int)r.info.discarded, 3);
    CHECK_EQ(tkv_seq_list_blocks(b, 0, blocks, 32, &n), TKV_OK);
    CHECK_EQ(n, 15);
    for (i = 0; i < n; i++) CHECK_EQ(blocks[i].discarded, i >= 1 && i <= 3);
    CHECK_EQ(tkv_seq_free_bytes(b, 0, &r, 0.95f, 100u << 20, blocks, actions, 32, NULL), TKV_OK);
    check_cache(b);
    CHECK_LE(128, 840 - count_discarded(b, 0, 0)); /* at least min_materialized tokens stay */
    CHECK(count_discarded(b, 0, 0) >= 640);
    restore_all(b, 0);
    check_same(a, b, 0, 3);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* With a ladder, tkv_seq_free_bytes quantizes blocks. It discards them when the ladder frees too little. */
TEST(free_bytes_quantizes_blocks) {
    tkv_remat_block blocks[64];
    tkv_remat_action actions[64];
    tkv_remat r = make_remat(100);
    tkv_config cfg = small_config();
    tkv_cache *kv;
    size_t freed, used;
    int n, i, start, n_smaller = 0, n_shared = 0;
    cfg.budget.bytes = 4 * 1000 * 1000;
    kv = create_cache(&cfg);
    for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(kv, NULL, 0, 90), TKV_OK);
    CHECK_EQ(tkv_seq_list_blocks(kv, 0, blocks, 64, &n), TKV_OK);
    for (i = 0; i < n; i++) n_smaller += blocks[i].quantized_bytes < blocks[i].bytes;
    CHECK(n_smaller > 8);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 300), TKV_OK); /* blocks that are shared are not quantized */
    CHECK_EQ(tkv_seq_list_blocks(kv, 0, blocks, 64, &n), TKV_OK);
    for (i = 0; i < n; i++) n_shared += blocks[i].end < 300 && blocks[i].quantized_bytes == blocks[i].bytes;
    CHECK_EQ(n_shared, 5);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    used = budget_of(kv).used;
    CHECK_EQ(tkv_seq_free_bytes(kv, 0, &r, 0.95f, 20000, blocks, actions, 64, &freed), TKV_OK);
    check_cache(kv);
    CHECK_EQ(find_discarded(kv, 0, &start), 0);
    CHECK_EQ(budget_of(kv).level, 1);
    CHECK_LE(20000, freed);
    CHECK(budget_of(kv).used < used);
    CHECK((int)r.info.quantized > 1 && r.info.discarded == 0);
    for (i = 0; i < 8; i++) /* more than the ladder can free: blocks are discarded */
        CHECK_EQ(tkv_seq_free_bytes(kv, 0, &r, 0.95f, 10000000, blocks, actions, 64, &freed), TKV_OK);
    check_cache(kv);
    CHECK(find_discarded(kv, 0, &start) > 640);
    restore_all(kv, 0);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 3, out_a), TKV_OK);
    tkv_destroy(kv);
}

/* The newest token has age 0. The price of quantizing is between those at which blocks of this age, and of blocks that
 * are one token older, would be discarded. */
TEST(ages_count_from_the_newest_token) {
    tkv_remat_block blocks[64];
    tkv_remat_action actions[64];
    tkv_remat r = make_remat(100);
    tkv_config cfg = small_config();
    double price[2];
    tkv_cache *kv;
    size_t freed;
    int n, len, older, start, step, i;
    cfg.budget.bytes = 4 * 1000 * 1000;
    kv = create_cache(&cfg);
    for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(kv, NULL, 0, 90), TKV_OK);
    len = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
    CHECK_EQ(tkv_seq_list_blocks(kv, 0, blocks, 64, &n), TKV_OK);
    for (older = 0; older < 2; older++) {
        double low = 0.0, high = 1e18;
        for (step = 0; step < 120; step++) {
            tkv_remat one = r;
            int n_discarded = 0;
            one.cfg.quantize_price = step == 0 ? high : low + (high - low) / 2;
            CHECK_EQ(tkv_decide_discard(&one, blocks, n, len - 1 + older, .95f, 20000, actions, NULL),
                     TKV_OK);
            for (i = 0; i < n; i++) n_discarded += actions[i] == TKV_REMAT_DISCARD;
            if (step == 0) CHECK(n_discarded > 0);
            if (n_discarded) high = one.cfg.quantize_price;
            else low = one.cfg.quantize_price;
        }
        price[older] = high;
    }
    CHECK(price[1] < price[0]);
    r.cfg.quantize_price = price[1] + (price[0] - price[1]) / 2;
    CHECK_EQ(tkv_seq_free_bytes(kv, 0, &r, .95f, 20000, blocks, actions, 64, &freed), TKV_OK);
    CHECK_EQ((int)r.info.discarded, 0);
    CHECK_EQ(find_discarded(kv, 0, &start), 0);
    CHECK_LE(20000, freed);
    tkv_destroy(kv);
}

/* >>under a budget */
TEST(idle_sequences_are_discarded) {
    tkv_config cfg = small_config(), budgeted;
    tkv_cache *a, *b;
    tkv_remat r = make_remat(1000);
    model m;
    counting_allocator p;
    int n, seq, round, left, start, n_with_discards = 0;
    memset(&m, 0, sizeof m);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    budgeted = small_config();
    budgeted.budget.pressure.max_level = TKV_OFF; /* tokens stay exact */
    budgeted.budget.bytes = 700 * 1000;
    budgeted.budget.discard = 1;
    budgeted.host.allocator = counting_allocator_of(&p);
    a = create_cache(&cfg);
    b = create_cache(&budgeted);
    for (round = 0; round < 7; round++)
        for (seq = 0; seq < SEQS; seq++) {
            CHECK_EQ(tkv_seq_recompute(b, seq, &r, round, recompute_tokens, &m, &left), TKV_OK);
            CHECK_EQ(left, 0);
            for (n = 0; n < 4; n++) {
                CHECK_EQ(append_to_both(b, NULL, seq, 23), TKV_OK);
                CHECK_EQ(find_discarded(b, seq, &start), 0);
                check_cache(b);
            }
            for (n = tkv_get_length(b, seq, TKV_ALL_LAYERS) - 92; n < tkv_get_length(b, seq, TKV_ALL_LAYERS);
                 n += 23) {
                int l;
                for (l = 0; l < LAYERS; l++)
                    CHECK_EQ(tkv_append(a, seq, l, k_model[seq][l] + n * ROW, v_model[seq][l] + n * ROW, 23),
                             TKV_OK);
            }
            check_same(a, b, seq, 2);
            CHECK_LE(p.peak, budgeted.budget.bytes);
            /* the sequence used longest ago loses blocks first */
            n_with_discards += find_discarded(b, (seq + 1) % SEQS, &start) > 0;
            if (find_discarded(b, (seq + 2) % SEQS, &start) > 0)
                CHECK(count_discarded(b, (seq + 1) % SEQS, 0) > 0);
        }
    CHECK(n_with_discards > 6);
    CHECK(m.tokens > 1000);
    CHECK_EQ((int)budget_of(b).refused, 0);
    CHECK_EQ(budget_of(b).level, 0);
    budgeted.budget.discard = 0; /* without discards, the budget is too small */
    tkv_destroy(b);
    CHECK_EQ(p.held, 0);
    b = create_cache(&budgeted);
    for (n = 0, left = 0; n < 28 && !left; n++)
        for (seq = 0; seq < SEQS; seq++) left |= append_to_both(b, NULL, seq, 23);
    CHECK_EQ(left, TKV_ERR_BUDGET);
    check_cache(b);
    tkv_destroy(a);
    tkv_destroy(b);
}

TEST(levels_come_before_discards) {
    tkv_config cfg = small_config();
    tkv_budget_info info;
    tkv_cache *kv;
    counting_allocator p;
    int n, seq, len_before_discards = 0, st = 0;
    cfg.budget.bytes = 500 * 1000;
    cfg.budget.discard = 1;
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    for (n = 0; n < 40 && !st; n++)
        for (seq = 0; seq < SEQS && !st; seq++) {
            if (tkv_get_length(kv, seq, TKV_ALL_LAYERS) + 45 > LONGEST) continue;
            st = append_to_both(kv, NULL, seq, 45);
            check_cache(kv);
            info = budget_of(kv);
            if (info.discarded == 0) len_before_discards = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
            else CHECK_EQ(info.level, info.n_levels - 1);
        }
    CHECK_EQ(st, TKV_OK);
    CHECK_LE(p.peak, cfg.budget.bytes);
    CHECK(len_before_discards > 400 && budget_of(kv).discarded > 6);
    st = 0; /* restored blocks need memory: blocks of other sequences are discarded */
    restore_all(kv, 0);
    CHECK(count_discarded(kv, 1, 0) + count_discarded(kv, 2, 0) > 0);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 3, out_a), TKV_OK);
    CHECK_LE(p.peak, cfg.budget.bytes);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

TEST(no_memory_to_restore) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    counting_allocator p;
    int n, start, n_discarded, st = TKV_OK;
    cfg.budget.bytes = 400 * 1000;
    cfg.budget.pressure.max_level = TKV_OFF;
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    for (n = 0; n < 5; n++) CHECK_EQ(append_to_both(kv, NULL, 0, 90), TKV_OK);
    CHECK_EQ(discard_tokens(kv, 0, 256), 256);
    while (!st) st = append_to_both(kv, NULL, 1, 10);
    CHECK_EQ(st, TKV_ERR_BUDGET);
    n_discarded = find_discarded(kv, 0, &start);
    CHECK_EQ(restore_tokens(kv, 0, 0, start, n_discarded), TKV_ERR_BUDGET);
    check_cache(kv);
    CHECK_EQ(find_discarded(kv, 0, &start), n_discarded);
    CHECK_LE(p.peak, cfg.budget.bytes);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    restore_all(kv, 0);
    CHECK_EQ(find_discarded(kv, 0, &start), 0);
    CHECK_LE(p.peak, cfg.budget.bytes);
    tkv_destroy(kv);
}

TEST(in_place) {
    tkv_config cfg = small_config();
    size_t bytes = 0;
    int n, seq, start, pass;
    for (pass = 0; pass < 2; pass++) {
        tkv_cache *kv = NULL, *a;
        void *mem;
        cfg.limits.max_tokens = LONGEST;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
        a = create_cache(&cfg);
        if (pass) cfg.budget.bytes = 600 * 1000, cfg.budget.discard = 1;
        CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
        mem = malloc(bytes);
        REQUIRE(mem);
        CHECK_EQ(tkv_create_in_place(&cfg, mem, bytes, &kv, NULL, 0), TKV_OK);
        for (n = 0; n < 8; n++)
            for (seq = 0; seq < SEQS; seq++) CHECK_EQ(append_to_both(kv, NULL, seq, 60), TKV_OK);
        CHECK(discard_tokens(kv, 0, 256) <= 256);
        CHECK(find_discarded(kv, 0, &start) >= 256);
        for (n = 0; n < 8; n++) CHECK_EQ(append_to_both(kv, NULL, 1, 60), TKV_OK);
        check_cache(kv);
        restore_all(kv, 0);
        for (n = 0; n < 480; n += 60)
            for (seq = 0; seq < LAYERS; seq++)
                CHECK_EQ(tkv_append(a, 0, seq, k_model[0][seq] + n * ROW, v_model[0][seq] + n * ROW, 60),
                         TKV_OK);
        if (!pass) check_same(a, kv, 0, 2);
        tkv_destroy(kv);
        tkv_destroy(a);
        free(mem);
    }
}

/* >>rows that a model gives when attention reads them (cfg.recompute) */
typedef struct row_model {
    int calls, fail_in;     /* n: the n-th call from now on fails */
    uint32_t first_bits;    /* bits of the float that replaces the first value of each call; 0: none */
    uint64_t seen_mask[32]; /* positions that were asked for, below LONGEST */
} row_model;

static int compute_rows(void *user, int seq, int layer, int head, const int *positions, int n, float *k,
                        float *v) {
    row_model *m = (row_model *)user;
    int t;
    m->calls++;
    if (m->fail_in && --m->fail_in == 0) return 1;
    CHECK(n >= 1 && n <= 16 && (k || v));
    for (t = 0; t < n; t++) {
        const int at = positions[t] * ROW + head * DIM;
        m->seen_mask[positions[t] / 64] |= (uint64_t)1 << positions[t] % 64;
        if (k) memcpy(k + t * DIM, k_model[seq][layer] + at, DIM * sizeof *k);
        if (v) memcpy(v + t * DIM, v_model[seq][layer] + at, DIM * sizeof *v);
    }
    if (m->first_bits && k) k[0] = tkv_test_float(m->first_bits);
    if (m->first_bits && v) v[0] = tkv_test_float(m->first_bits);
    return 0;
}

static void attach_row_model(row_model *m, tkv_config *cfg) {
    memset(m, 0, sizeof *m);
    cfg->recompute.compute = compute_rows;
    cfg->recompute.user = m;
    cfg->recompute.cost.layer_params = 1000.0;
    cfg->recompute.cost.n_heads = TKV_OFF;
    cfg->recompute.cost.min_materialized = 128;
}

TEST(rows_are_given_at_access) {
    tkv_config exact = small_config(), with_model;
    tkv_cache *a, *b;
    row_model m;
    int n, seq, start, c;
    exact.tiers.hot_tokens = TKV_UNLIMITED;
    with_model = exact;
    attach_row_model(&m, &with_model);
    a = create_cache(&exact);
    b = create_cache(&with_model);
    for (n = 0; n < 12; n++)
        for (seq = 0; seq < 2; seq++) CHECK_EQ(append_to_both(a, b, seq, 70), TKV_OK);
    for (seq = 0; seq < 2; seq++) {
        CHECK_EQ(discard_tokens(b, seq, 500), 448);
        CHECK_EQ(count_discarded(b, seq, 1), 448);
        for (n = 0; n < 32; n++) m.seen_mask[n] = 0;
        check_same(a, b, seq, 1);
        check_same(a, b, seq, 70);
        for (n = 4; n < 452; n++) CHECK(m.seen_mask[n / 64] >> n % 64 & 1);
        CHECK(!(m.seen_mask[0] & 15) && !(m.seen_mask[8] & ~(uint64_t)0)); /* no other position */
        CHECK_EQ(append_to_both(a, b, seq, 30), TKV_OK);
        check_same(a, b, seq, 30);
    }
    check_cache(b);
    for (c = 1; c < 40; c += 3) { /* a model that fails */
        m.fail_in = c;
        CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_NO_SOURCE);
        m.fail_in = 1;
        CHECK_EQ(tkv_read(b, 0, 0, 400, 20, k_b, v_b), TKV_ERR_NO_SOURCE);
    }
    m.first_bits = 0x7f800000u;
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_NO_SOURCE);
    m.first_bits = 0x7fc00000u;
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_NO_SOURCE);
    m.first_bits = 0;
    check_same(a, b, 0, 4);
    restore_all(b, 0); /* by hand: the blocks return in the hot format */
    CHECK_EQ(find_discarded(b, 0, &start), 0);
    m.calls = 0;
    check_same(a, b, 0, 4);
    CHECK_EQ(m.calls, 0);
    CHECK_EQ(tkv_seq_reset(b, 1), TKV_OK);
    check_cache(b);
    tkv_destroy(a);
    tkv_destroy(b);
    with_model.host.nonfinite = TKV_NONFINITE_SATURATE;
    b = create_cache(&with_model);
    for (n = 0; n < 12; n++) CHECK_EQ(append_to_both(b, NULL, 0, 70), TKV_OK);
    CHECK_EQ(discard_tokens(b, 0, 500), 448);
    m.first_bits = 0x7f800000u;
    CHECK_EQ(tkv_read(b, 0, 0, 4, 1, k_b, v_b), TKV_OK);
    CHECK(k_b[0] == 65504.0f && v_b[0] == 65504.0f);
    tkv_destroy(b);
}

/* Appends LONGEST tokens of one sequence. Checks each step: the bytes, and attention against an exact cache. Returns
 * the highest level, or -1 when an append fails. */
static int run_long_sequence(tkv_config *cfg, tkv_cache **out, double *worst) {
    tkv_config exact = small_config();
    counting_allocator memory;
    tkv_cache *a, *b;
    tkv_budget_info info;
    int l, i, n, level = 0;
    exact.tiers.hot_tokens = TKV_UNLIMITED;
    cfg->host.allocator = counting_allocator_of(&memory);
    a = create_cache(&exact);
    b = create_cache(cfg);
    *worst = 0.0;
    for (n = 0; n + 64 <= LONGEST; n += 64) {
        const tkv_status st = append_to_both(b, a, 0, 64);
        if (st) level = -1;
        if (st) break;
        CHECK(memory.peak <= cfg->budget.bytes);
        CHECK_EQ(tkv_get_budget(b, &info), TKV_OK);
        level = info.level > level ? info.level : level;
        for (l = 0; l < LAYERS; l++) {
            tkv_rng_fill(&rng, q_in, (size_t)(2 * HEADS * DIM), 1.0);
            CHECK_EQ(tkv_attend(a, 0, l, q_in, 2, out_a), TKV_OK);
            CHECK_EQ(tkv_attend(b, 0, l, q_in, 2, out_b), TKV_OK);
            for (i = 0; i < 2 * HEADS * DIM; i++) {
                const double e = fabs((double)out_a[i] - (double)out_b[i]);
                *worst = e > *worst ? e : *worst;
            }
        }
    }
    check_cache(b);
    tkv_destroy(a);
    if (out) *out = b;
    else tkv_destroy(b);
    return level;
}

/* One sequence discards its own oldest blocks, when that costs less than the next level of the ladder, or else after
 * the last level. No token is lost. */
/* Of several sequences the one discards first whose rows cost the fewest FLOPs per byte: the longest one, as its first
 * tokens are the oldest. A layer that shares the keys of another one has no blocks. */
TEST(the_oldest_tokens_of_all_sequences_are_discarded) {
    static const int lengths[SEQS] = {320, 960, 640};
    tkv_config cfg = small_config();
    tkv_layer_config layers[LAYERS];
    tkv_memory_info before;
    tkv_cache *kv;
    row_model m;
    int seq, n;
    memset(layers, 0, sizeof layers);
    layers[1].share_kv = 1;
    cfg.layers = layers;
    cfg.budget.bytes = 8000000;
    attach_row_model(&m, &cfg);
    cfg.recompute.cost.threshold = TKV_ZERO;
    cfg.recompute.cost.quantize_price = 1e9;
    kv = create_cache(&cfg);
    for (seq = 0; seq < SEQS; seq++)
        for (n = 0; n < lengths[seq]; n += 64) {
            float *k = k_model[seq][0] + n * ROW, *v = v_model[seq][0] + n * ROW;
            tkv_rng_fill(&rng, k, (size_t)(64 * ROW), 1.0);
            tkv_rng_fill(&rng, v, (size_t)(64 * ROW), 1.0);
            CHECK_EQ(tkv_append(kv, seq, 0, k, v, 64), TKV_OK);
        }
    CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, before.total), TKV_OK);
    while (!budget_of(kv).discarded) { /* the slack of free pages goes first */
        CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
        REQUIRE(tkv_set_budget(kv, before.total - 4096) == TKV_OK);
    }
    CHECK_EQ(count_discarded(kv, 0, 0), 0);
    CHECK(count_discarded(kv, 1, 0) >= BLOCK);
    CHECK_EQ(count_discarded(kv, 2, 0), 0);
    check_cache(kv);
    CHECK_EQ(tkv_read(kv, 1, 0, 0, 960, k_a, v_a), TKV_OK); /* from the model */
    CHECK(float_difference(k_a, k_model[1][0], 960 * ROW) < 1e-3);
    tkv_destroy(kv);
}

TEST(one_long_sequence_discards_its_oldest_blocks) {
    tkv_config cfg = small_config();
    double cheap_worst, dear_worst;
    tkv_budget_info info;
    tkv_cache *kv;
    row_model m;
    int discarded_when_cheap, held;
    cfg.budget.bytes = 256000;
    CHECK_EQ(run_long_sequence(&cfg, NULL, &cheap_worst), -1); /* no model: the budget is full */
    attach_row_model(&m, &cfg);
    cfg.recompute.cost.threshold = TKV_ZERO;
    cfg.recompute.cost.quantize_price = 1e9;
    CHECK_EQ(run_long_sequence(&cfg, &kv, &cheap_worst), 0);
    discarded_when_cheap = count_discarded(kv, 0, 0);
    CHECK_EQ(tkv_get_budget(kv, &info), TKV_OK);
    CHECK(discarded_when_cheap > 1000 && info.discarded > 20 && info.evicted == 0);
    CHECK(cheap_worst < 1e-3); /* all tokens exact, those of the model too */
    tkv_destroy(kv);
    cfg.recompute.cost.quantize_price = 1e-9;
    CHECK_EQ(run_long_sequence(&cfg, &kv, &dear_worst), 5); /* the last level of the default ladder */
    CHECK(count_discarded(kv, 0, 0) > 500 && count_discarded(kv, 0, 0) < discarded_when_cheap);
    CHECK(dear_worst > 10.0 * cheap_worst && dear_worst < 0.5);
    tkv_destroy(kv);
    cfg.recompute.cost.min_materialized = 1800; /* more than the budget holds */
    CHECK_EQ(run_long_sequence(&cfg, &kv, &dear_worst), -1);
    held = tkv_get_length(kv, 0, 0) - count_discarded(kv, 0, 0);
    CHECK(held >= 1800 || count_discarded(kv, 0, 0) == 0);
    tkv_destroy(kv);
    cfg.recompute.cost.min_materialized = 128;
    cfg.recompute.cost.step_flops = 400.0 * (int)LAYERS * 2.0 * 1000.0; /* of 400 tokens: 6 blocks */
    CHECK_EQ(run_long_sequence(&cfg, &kv, &dear_worst), -1);
    CHECK_EQ(count_discarded(kv, 0, 0), 6 * BLOCK);
    tkv_destroy(kv);
}

/* An estimate counts the blocks that a model gives, as far as cost.step_flops and cost.min_materialized allow. A cache
 * holds what was estimated. */
TEST(estimates_count_blocks_of_a_model) {
    int context[4], way;
    for (way = 0; way < 4; way++) {
        tkv_config cfg = small_config();
        tkv_memory_info memory;
        size_t in_ram = 0;
        row_model m;
        tkv_cache *kv;
        int tier;
        cfg.limits.max_tokens = LONGEST - 16;
        cfg.budget.bytes = 216000;
        if (way) attach_row_model(&m, &cfg);
        if (way == 1) cfg.recompute.cost.min_materialized = LONGEST;
        if (way == 2)
            cfg.recompute.cost.step_flops = 400.0 * (int)LAYERS * 2.0 * 1000.0; /* of 400 tokens: 6 blocks */
        CHECK_EQ(tkv_estimate_context(&cfg, 1, &context[way]), TKV_OK);
        CHECK_EQ(tkv_estimate_memory(&cfg, context[way], 1, &memory), TKV_OK);
        CHECK_LE(memory.peak, cfg.budget.bytes);
        for (tier = 0; tier < TKV_TIER_COUNT; tier++) in_ram += memory.tier[tier].tokens;
        CHECK_EQ(in_ram<(size_t)(LAYERS * context[way]), way> 1);
        if (way == 2) CHECK_EQ((size_t)(LAYERS * context[way]) - in_ram, LAYERS * 6 * BLOCK);
        kv = create_cache(&cfg);
        while (tkv_get_length(kv, 0, 0) < context[way]) {
            const tkv_status st = append_to_both(kv, NULL, 0, 1);
            CHECK_MSG(st == TKV_OK, "%d of %d tokens: %s", tkv_get_length(kv, 0, 0), context[way],
                      tkv_get_last_error(kv));
            if (st) break;
        }
        check_cache(kv);
        tkv_destroy(kv);
    }
    CHECK_EQ(context[1], context[0]);
    CHECK(context[2] >= context[0] + 5 * BLOCK && context[3] > context[2]);
}

TEST(recompute_configs) {
    tkv_config cfg = small_config();
    char reason[200];
    row_model m;
    attach_row_model(&m, &cfg);
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    cfg.recompute.cost.layer_params = 0.0;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "recompute.cost: layer_params") != NULL, "%s", reason);
    cfg.recompute.compute = NULL; /* without a model nothing reads the cost */
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    attach_row_model(&m, &cfg);
    cfg.recompute.cost.n_heads = -2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    attach_row_model(&m, &cfg);
    cfg.model.head_dim = 256;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "recompute.compute") != NULL, "%s", reason);
}

/* The model of a config with one KV head of ROW channels. */
static int compute_single_head(void *user, int seq, int layer, int head, const int *positions, int n,
                               float *k, float *v) {
    int t;
    (void)user;
    (void)head;
    for (t = 0; t < n; t++) {
        if (k) memcpy(k + t * ROW, k_model[seq][layer] + positions[t] * ROW, ROW * sizeof *k);
        if (v) memcpy(v + t * ROW, v_model[seq][layer] + positions[t] * ROW, ROW * sizeof *v);
    }
    return 0;
}

/* Fills memory that the next call has on its stack with bytes that are no numbers. */
static void fill_stack(void) {
    volatile unsigned char x[200000];
    int i;
    for (i = 0; i < (int)sizeof x; i++) x[i] = 0xff;
}

/* Attention is that of double precision, for few queries and many. Queries are random. */
static void check_attention_computes(tkv_cache *kv, int seq, int heads, int dim) {
    int n;
    for (n = 1; n <= 16; n += 15) {
        tkv_attend_params p;
        memset(&p, 0, sizeof p);
        p.seq = seq;
        p.n = n;
        p.q = q_in;
        p.out = out_a;
        tkv_rng_fill(&rng, q_in, (size_t)(n * heads * dim), 1.0);
        fill_stack();
        CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
        p.out = out_b;
        CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
        CHECK_LE(float_difference(out_a, out_b, n * heads * dim), 1e-4);
    }
}

/* A move that needs memory discards a block, and then splits it. Each part gets its rows from the model, also in one
 * read. */
TEST(rows_of_a_moved_part_are_given) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, 1, ROW, SEQS, CHUNK);
    tkv_memory_info memory;
    row_model m;
    tkv_cache *kv;
    int l, t, n, before;
    cfg.model.rope.dim = ROW;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.budget.bytes = 600000;
    cfg.budget.pressure.max_level = TKV_OFF;
    attach_row_model(&m, &cfg);
    cfg.recompute.compute = compute_single_head;
    cfg.recompute.cost.threshold = TKV_ZERO;
    kv = create_cache(&cfg);
    for (t = 0; t < 12; t++) CHECK_EQ(append_to_both(kv, NULL, 0, 70), TKV_OK);
    n = tkv_get_length(kv, 0, 0);
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, memory.total), TKV_OK); /* a longer index takes bytes of blocks */
    before = count_discarded(kv, 0, 0);
    CHECK_EQ(tkv_seq_shift(kv, 0, before + 40, before + 130, 1), TKV_OK); /* from the first block in RAM on */
    CHECK(count_discarded(kv, 0, 0) > before);
    check_cache(kv);
    for (l = 0; l < LAYERS; l++) {
        CHECK_EQ(tkv_read(kv, 0, l, 0, n, k_a, v_a), TKV_OK);
        CHECK_MEM(v_a, v_model[0][l], (size_t)(n * ROW) * sizeof *v_a);
        for (t = 0; t < n; t++) CHECK_EQ(tkv_read(kv, 0, l, t, 1, k_b + t * ROW, NULL), TKV_OK);
        CHECK_MEM(k_a, k_b, (size_t)(n * ROW) * sizeof *k_a);
    }
    check_attention_computes(kv, 0, HEADS, ROW);
    tkv_destroy(kv);
}

/* A sequence can hold the last tokens of a block alone. The model gives no rows for the first ones. */
TEST(attention_on_a_part_of_a_discarded_block) {
    tkv_config cfg = small_config();
    row_model m;
    tkv_cache *kv;
    int i, n = 0;
    cfg.tiers.hot = cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F32, TKV_F32);
    attach_row_model(&m, &cfg);
    kv = create_cache(&cfg);
    for (i = 0; i < 4; i++) CHECK_EQ(append_to_both(kv, NULL, 0, BLOCK), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 0, BLOCK / 2, TKV_UNLIMITED, 1, BLOCK / 2), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK); /* the block has one holder */
    for (i = 0; i < 4; i++) CHECK_EQ(append_to_both(kv, NULL, 1, BLOCK), TKV_OK);
    CHECK_EQ(tkv_seq_discard(kv, 1, 2 * BLOCK, &n), TKV_OK);
    CHECK(n > BLOCK / 2);
    check_cache(kv);
    check_attention_computes(kv, 1, HEADS, DIM);
    tkv_destroy(kv);
}

/* A sequence can hold a part of a block. The caller has no rows for its other slots, so what lies before the rows
 * does not change the restored tokens. */
TEST(rows_before_a_part_are_not_read) {
    enum { FIRST = 4 + BLOCK / 2, N = 10 * BLOCK - FIRST }; /* FIRST: in the middle of a block */
    static float k[(BLOCK + LONGEST) * ROW], v[(BLOCK + LONGEST) * ROW];
    float *const read_k[2] = {k_a, k_b}, *const read_v[2] = {v_a, v_b};
    tkv_config cfg = small_config();
    int l, i, start = 0, n, pass;
    tkv_cache *kv;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2); /* tokens of a block share scales */
    kv = create_cache(&cfg);
    for (i = 0; i < 10; i++) CHECK_EQ(append_to_both(kv, NULL, 0, BLOCK), TKV_OK);
    CHECK_EQ(append_to_both(kv, NULL, 1, 4), TKV_OK); /* the sinks */
    CHECK_EQ(tkv_seq_copy(kv, 0, FIRST, TKV_UNLIMITED, 1, FIRST), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK); /* the block has one holder */
    CHECK_EQ(append_to_both(kv, NULL, 1, 1), TKV_OK);
    for (pass = 0; pass < 2; pass++) {
        CHECK(discard_tokens(kv, 1, N) > 0);
        n = find_discarded(kv, 1, &start);
        CHECK(n > BLOCK / 2 && start == 4);
        for (l = 0; l < LAYERS; l++) {
            for (i = 0; i < BLOCK * ROW; i++) k[i] = v[i] = pass ? 1000.0f : 0.0f;
            memcpy(k + BLOCK * ROW, k_model[0][l] + FIRST * ROW, (size_t)(n * ROW) * sizeof *k);
            memcpy(v + BLOCK * ROW, v_model[0][l] + FIRST * ROW, (size_t)(n * ROW) * sizeof *v);
            CHECK_EQ(tkv_restore(kv, 1, l, start, k + BLOCK * ROW, v + BLOCK * ROW, n), TKV_OK);
        }
        check_cache(kv);
        CHECK_EQ(tkv_read(kv, 1, 0, 4, N, read_k[pass], read_v[pass]), TKV_OK);
    }
    CHECK_MEM(k_a, k_b, (size_t)(N * ROW) * sizeof *k_a);
    CHECK_MEM(v_a, v_b, (size_t)(N * ROW) * sizeof *v_a);
    for (i = 0; i < N * ROW; i++) CHECK(fabs((double)k_a[i] - (double)k_model[0][0][FIRST * ROW + i]) < 2.0);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(20);
    RUN(restored_blocks_are_the_same);
    RUN(rows_of_a_moved_part_are_given);
    RUN(attention_on_a_part_of_a_discarded_block);
    RUN(rows_before_a_part_are_not_read);
    RUN(tiers_change_while_blocks_are_discarded);
    RUN(wrong_restores_change_nothing);
    RUN(failed_allocations_change_nothing);
    RUN(windows);
    RUN(truncations_flushes_resets);
    RUN(evicted_tokens);
    RUN(restores_that_evict);
    RUN(anchors);
    RUN(offloaded_blocks_and_copies);
    RUN(recomputing_in_steps);
    RUN(anchors_of_a_whole_block);
    RUN(a_named_sink_stays_between_discarded_blocks);
    RUN(shared_blocks_stay_before_discarded_ones);
    RUN(free_bytes_passes_over_shared_blocks);
    RUN(idle_forks_are_discarded);
    RUN(free_bytes_discards_blocks);
    RUN(free_bytes_quantizes_blocks);
    RUN(ages_count_from_the_newest_token);
    RUN(idle_sequences_are_discarded);
    RUN(levels_come_before_discards);
    RUN(no_memory_to_restore);
    RUN(in_place);
    RUN(rows_are_given_at_access);
    RUN(the_oldest_tokens_of_all_sequences_are_discarded);
    RUN(one_long_sequence_discards_its_oldest_blocks);
    RUN(estimates_count_blocks_of_a_model);
    RUN(recompute_configs);
    return tkv_test_end();
}
