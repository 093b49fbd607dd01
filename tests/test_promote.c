/*
 * test_promote.c - promotion by importance (tkv_promote_important). The promoted blocks are compared with a
 * plain sort of the results of tkv_get_importance. Sources: exact copies, the store of offloaded blocks, a model.
 * Also limits, cool-down, errors.
 */
#include "../tieredkv.h"
#include "kit.h"

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    LAYERS = 2,
    KV_HEADS = 2,
    HEADS = 4,
    DIM = 32,
    ROW = KV_HEADS * DIM,
    CHUNK = 64,
    MAX_LEN = 2048
};

static tkv_rng rng;
static float model_k[LAYERS][MAX_LEN * ROW],
    model_v[LAYERS][MAX_LEN * ROW]; /* K and V as a model would compute them */
static float k_in[MAX_LEN * ROW], v_in[MAX_LEN * ROW], read_before[MAX_LEN * ROW];

static tkv_config make_config(test_store *store, int keep_exact) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, 0, CHUNK);
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.importance.sample_every = 1 << 20; /* only tkv_add_scores changes scores */
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    attach_test_store(store, &cfg);
    cfg.offload.keep_exact = keep_exact;
    return cfg;
}

static void append_tokens(tkv_cache *kv, int n) {
    int l;
    for (l = 0; l < LAYERS; l++) {
        const int at = tkv_get_length(kv, 0, l) * ROW;
        tkv_rng_fill(&rng, model_k[l] + at, (size_t)(n * ROW), 1.0);
        tkv_rng_fill(&rng, model_v[l] + at, (size_t)(n * ROW), 1.0);
        CHECK_EQ(tkv_append(kv, 0, l, model_k[l] + at, model_v[l] + at, n), TKV_OK);
    }
}

static tkv_cache *make_filled_cache(const tkv_config *cfg, int n) {
    tkv_cache *kv = create_cache(cfg);
    for (; n > 0; n -= CHUNK) append_tokens(kv, n < CHUNK ? n : CHUNK);
    return kv;
}

/* First token of a block of layer 0. Blocks begin after the 4 sinks. */
static int block_start(int block) { return 4 + block * BLOCK; }

/* Adds `score` to one token of a block of layer 0 and 1% of it to the other tokens of that block. */
static void add_block_score(tkv_cache *kv, int block, float score) {
    float scores[BLOCK];
    int i;
    for (i = 0; i < BLOCK; i++) scores[i] = i == (block * 7 + 3) % BLOCK ? score : score * .01f;
    CHECK_EQ(tkv_add_scores(kv, 0, 0, block_start(block), BLOCK, scores), TKV_OK);
}

static int is_exact(tkv_cache *kv, int block) { /* compares bits */
    const int at = block_start(block);
    CHECK_EQ(tkv_read(kv, 0, 0, at, BLOCK, k_in, v_in), TKV_OK);
    return memcmp(k_in, model_k[0] + at * ROW, BLOCK * ROW * sizeof(float)) == 0 &&
           memcmp(v_in, model_v[0] + at * ROW, BLOCK * ROW * sizeof(float)) == 0;
}

static tkv_promotion default_promotion(void) {
    tkv_promotion p;
    memset(&p, 0, sizeof p);
    return p;
}

static void destroy_cache_and_store(tkv_cache *kv, test_store *store) {
    check_cache(kv);
    tkv_destroy(kv);
    destroy_test_store(store);
}

/* >>exact copies: at most eight blocks per step, best first, none below the threshold */
TEST(best_blocks_first) {
    test_store store;
    tkv_config cfg = make_config(&store, 1);
    tkv_cache *kv = make_filled_cache(&cfg, 24 * BLOCK);
    tkv_promotion p = default_promotion();
    float score[20];
    int i, step;
    for (i = 0; i < 20; i++) {
        score[i] = i == 5 ? .04f : .06f + (float)(i * 7 % 20) * .01f;
        add_block_score(kv, i, score[i]);
        CHECK(!is_exact(kv, i));
    }
    for (i = 0; i < 4; i++) append_tokens(kv, 1); /* the cool-down after demotion */
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 8);
    CHECK_EQ(p.waiting, 11);
    CHECK_EQ(p.no_source, 0);
    for (i = 0; i < 20; i++) CHECK_EQ(is_exact(kv, i), score[i] > .165f);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK); /* the limit of this step is reached */
    CHECK_EQ(p.promoted, 0);
    CHECK_EQ(p.waiting, 11);
    for (step = 0; step < 3; step++) {
        append_tokens(kv, 1);
        CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
        CHECK_EQ(p.promoted, step == 0 ? 8 : step == 1 ? 3 : 0);
    }
    for (i = 0; i < 20; i++) CHECK_EQ(is_exact(kv, i), i != 5);
    CHECK_EQ((int)p.by.promoted, 19);
    CHECK_EQ((int)p.by.no_source, 0);
    p.by.cfg.threshold = .03f;
    p.by.cfg.per_step = 1;
    append_tokens(kv, 1);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    CHECK(is_exact(kv, 5));
    CHECK_EQ(tkv_promote_important(kv, 0, 1, &p), TKV_OK); /* layer 1 has no scores */
    CHECK_EQ(p.promoted + p.waiting + p.no_source, 0);
    destroy_cache_and_store(kv, &store);
}

/* >>cool-down: a block that has just moved is not promoted for some steps */
TEST(cooldown) {
    test_store store;
    tkv_config cfg = make_config(&store, 1);
    tkv_cache *kv = make_filled_cache(&cfg, 10 * BLOCK);
    tkv_promotion p = default_promotion();
    int step, done = 0, len;
    for (step = 0; step < 5; step++) append_tokens(kv, 1);
    add_block_score(kv, 0, 1.0f);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    CHECK_EQ(tkv_offload(kv, 0, 0, 1, &done), TKV_OK); /* offloads the exact block */
    CHECK_EQ(done, 1);
    for (step = 0; step < 6; step++) {
        append_tokens(kv, 1);
        CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
        CHECK_EQ(p.promoted, step == 3);
        CHECK_EQ(p.waiting, step < 3);
    }
    /* A move recorded beyond the truncated end counts as just made. */
    CHECK_EQ(tkv_offload(kv, 0, 0, 1, &done), TKV_OK);
    len = tkv_get_length(kv, 0, TKV_ALL_LAYERS) - 3;
    CHECK_EQ(tkv_seq_truncate(kv, 0, len), TKV_OK);
    for (step = 0; step < 4; step++) {
        CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
        CHECK_EQ(p.promoted, 0);
        append_tokens(kv, 1);
    }
    p.by.cfg.cooldown = TKV_OFF;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    destroy_cache_and_store(kv, &store);
}

/* >>offloaded blocks: they return as they were written; one that cannot be read stays offloaded */
TEST(offloaded_blocks) {
    test_store store;
    tkv_config cfg = make_config(&store, 0);
    tkv_cache *kv = make_filled_cache(&cfg, 16 * BLOCK);
    tkv_promotion p = default_promotion();
    int i, done = 0;
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 12 * BLOCK, read_before, NULL), TKV_OK);
    add_block_score(kv, 1, .3f);
    add_block_score(kv, 2, .4f);
    add_block_score(kv, 3, .2f);
    add_block_score(kv, 9, .9f); /* compressed, in RAM */
    for (i = 0; i < 4; i++) append_tokens(kv, 1);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NO_SOURCE);
    CHECK_MSG(strstr(tkv_get_last_error(kv), "keep_exact") != NULL, "%s", tkv_get_last_error(kv));
    CHECK_EQ(p.no_source, 4);
    CHECK_EQ(tkv_offload(kv, 0, 0, 6, &done), TKV_OK);
    CHECK_EQ(done, 6);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK); /* they have just moved: cool-down */
    CHECK_EQ(p.waiting, 3);
    CHECK_EQ(p.no_source, 1);
    for (i = 0; i < 4; i++) append_tokens(kv, 1);
    store.fail_read = 5; /* the first block takes four reads */
    store.n_reads = 0;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_IO);
    CHECK(p.promoted >= 1 && p.promoted < 3);
    CHECK_EQ(p.promoted + p.waiting, 3);
    CHECK_EQ(p.by.used, p.promoted);
    check_cache(kv);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 12 * BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, read_before, sizeof(float) * 12 * BLOCK * ROW);
    i = p.promoted;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 3 - i);
    CHECK_EQ(p.no_source, 1 + i); /* promoted blocks are compressed, and no better copy exists */
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 12 * BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, read_before, sizeof(float) * 12 * BLOCK * ROW);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NO_SOURCE);
    destroy_cache_and_store(kv, &store);
}

/* >>cfg.promotion: appends promote by themselves */
static tkv_config self_promoting_config(test_store *store) {
    tkv_config cfg = make_config(store, 1);
    cfg.promotion.every = 8;
    cfg.promotion.per_step = 2;
    return cfg;
}

/* Appends promote what tkv_promote_important would, at every eighth token. Blocks whose scores fade go back. */
TEST(appends_promote_by_themselves) {
    test_store store;
    tkv_config cfg = self_promoting_config(&store);
    tkv_cache *kv, *plain;
    tkv_memory_info m[2];
    int i, step;
    cfg.importance.decay = .9f; /* per token */
    cfg.promotion.threshold = .3f;
    kv = make_filled_cache(&cfg, 12 * BLOCK);
    for (i = 0; i < 4; i++) add_block_score(kv, i, 3.0f + (float)i);
    for (step = 0; step < 8; step++) {
        CHECK_EQ(is_exact(kv, 2) + is_exact(kv, 3), 0);
        append_tokens(kv, 1);
    }
    for (i = 0; i < 12 * BLOCK / BLOCK - 2; i++)
        CHECK_EQ(is_exact(kv, i), i == 2 || i == 3); /* the best two */
    CHECK_EQ(budget_of(kv).promoted, 2);
    append_tokens(kv, 8); /* scores of .55 and .74 */
    CHECK(is_exact(kv, 0) && is_exact(kv, 1) && is_exact(kv, 2) && is_exact(kv, 3));
    CHECK_EQ(tkv_get_memory(kv, &m[0]), TKV_OK);
    append_tokens(kv, 24); /* below half of the threshold: coded again, two at a time */
    CHECK_EQ(is_exact(kv, 0) + is_exact(kv, 1) + is_exact(kv, 2) + is_exact(kv, 3), 2);
    append_tokens(kv, 8);
    CHECK_EQ(is_exact(kv, 0) + is_exact(kv, 1) + is_exact(kv, 2) + is_exact(kv, 3), 0);
    CHECK_EQ(budget_of(kv).promoted, 4);
    check_cache(kv);
    cfg.promotion.every = 0; /* the same bytes as a cache that never promoted */
    memset(&cfg.offload, 0, sizeof cfg.offload);
    plain = create_cache(&cfg);
    for (i = 0; i < 12 * BLOCK + 48; i += 16)
        for (step = 0; step < LAYERS; step++)
            CHECK_EQ(tkv_append(plain, 0, step, model_k[step] + i * ROW, model_v[step] + i * ROW, 16),
                     TKV_OK);
    CHECK_EQ(tkv_read(plain, 0, 0, 0, 11 * BLOCK, read_before, NULL), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 11 * BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, read_before, sizeof(float) * 11 * BLOCK * ROW);
    CHECK_EQ(budget_of(plain).promoted, 0);
    CHECK_EQ(tkv_get_memory(kv, &m[0]), TKV_OK);
    CHECK_EQ(tkv_get_memory(plain, &m[1]), TKV_OK);
    CHECK_EQ(m[0].tier[TKV_TIER_ARCHIVE].codes, m[1].tier[TKV_TIER_ARCHIVE].codes);
    tkv_destroy(plain);
    destroy_cache_and_store(kv, &store);
}

/* A store that fails, an allocator without memory and a full budget leave the append as it is. Steps promote when they
 * begin, and nothing is promoted while memory is reserved. */
TEST(promotion_never_fails_an_append) {
    test_store store;
    tkv_config cfg = self_promoting_config(&store);
    counting_allocator p;
    tkv_cache *kv = make_filled_cache(&cfg, 12 * BLOCK);
    int i, l;
    add_block_score(kv, 1, 5.0f);
    store.fail_read = 1;
    store.n_reads = 0;
    append_tokens(kv, 8);
    CHECK(!is_exact(kv, 1));
    CHECK_STR(tkv_get_last_error(kv), "");
    store.fail_read = 0;
    CHECK_EQ(tkv_seq_reserve(kv, 0, 16), TKV_OK);
    append_tokens(kv, 8);
    CHECK(!is_exact(kv, 1));
    append_tokens(kv, 9);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK(is_exact(kv, 1));
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    destroy_cache_and_store(kv, &store);
    cfg = self_promoting_config(&store); /* the allocator */
    cfg.host.allocator = counting_allocator_of(&p);
    kv = make_filled_cache(&cfg, 12 * BLOCK + 4);
    for (i = 0; i < 8; i++) add_block_score(kv, i, 5.0f);
    for (i = 0; i < 64; i += 8) {
        p.fail_at = 1;
        for (l = 0; l < LAYERS; l++) (void)tkv_append(kv, 0, l, model_k[0], model_v[0], 8);
        p.fail_at = 0;
        check_cache(kv);
    }
    destroy_cache_and_store(kv, &store);
    cfg = self_promoting_config(&store); /* the budget */
    cfg.budget.bytes = 500000;
    kv = make_filled_cache(&cfg, 24 * BLOCK);
    for (i = 0; i < 8; i++) add_block_score(kv, i, 5.0f);
    append_tokens(kv, 64);
    CHECK_LE(budget_of(kv).peak, cfg.budget.bytes);
    destroy_cache_and_store(kv, &store);
}

/* A faded block needs a slot of the coded format. Without memory for a page it stays exact, until a later append. */
TEST(blocks_go_back_when_memory_comes) {
    enum { MOST = 12 };
    int extra, step, l, n_stayed = 0;
    for (extra = 1; extra < MOST; extra++) {
        test_store store;
        tkv_config cfg = self_promoting_config(&store);
        counting_allocator p;
        tkv_status st = TKV_OK;
        tkv_cache *kv;
        cfg.host.allocator = counting_allocator_of(&p);
        cfg.importance.decay = .9f;
        cfg.promotion.threshold = .3f;
        kv = make_filled_cache(&cfg, 8 * BLOCK + 40);
        add_block_score(kv, 2, 3.0f);
        append_tokens(kv, 8);
        CHECK(is_exact(kv, 2));
        for (step = 0; step < extra * BLOCK / 8; step++) { /* other blocks take its slot */
            append_tokens(kv, 8);
            add_block_score(kv, 2, 3.0f);
        }
        for (step = 0; step < 4; step++) append_tokens(kv, 8);
        CHECK(is_exact(kv, 2));
        p.fail_at = 1;
        for (l = 0; l < LAYERS && !st; l++) st = tkv_append(kv, 0, l, model_k[0], model_v[0], 8);
        p.fail_at = 0;
        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM); /* one in many needs a larger index */
        check_cache(kv);
        n_stayed += st == TKV_OK && is_exact(kv, 2);
        append_tokens(kv, 8);
        CHECK(!is_exact(kv, 2));
        destroy_cache_and_store(kv, &store);
    }
    CHECK(n_stayed > 0 && n_stayed < MOST - 1);
}

/* Blocks stay exact that a fork holds too, that have named sinks, that have just come back, or that were offloaded. */
TEST(promoted_blocks_that_do_not_go_back) {
    int way, step, i, n;
    for (way = 0; way < 5; way++) {
        test_store store;
        tkv_config cfg = self_promoting_config(&store);
        tkv_cache *kv;
        cfg.limits.max_seqs = 2;
        cfg.importance.decay = .9f;
        cfg.promotion.threshold = .3f;
        if (way == 3) cfg.promotion.cooldown = 40;
        kv = make_filled_cache(&cfg, 12 * BLOCK);
        if (way == 3)
            for (step = 0; step < 40; step++) append_tokens(kv, 1);
        add_block_score(kv, 2, 3.0f);
        append_tokens(kv, 8);
        CHECK(is_exact(kv, 2));
        if (way == 1) CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        if (way == 2)
            CHECK_EQ(tkv_promote(kv, 0, 1, block_start(2)), TKV_OK); /* sinks are exact in all layers */
        if (way == 2) CHECK_EQ(tkv_seq_set_sinks(kv, 0, block_start(2) + 5, 1, 1), TKV_OK);
        for (step = 0; step < 2; step++) append_tokens(kv, 8); /* the score fades */
        if (way == 4) CHECK_EQ(tkv_offload(kv, 0, 0, 3, &n), TKV_OK);
        for (step = 0; step < 2; step++) append_tokens(kv, 8);
        CHECK_EQ(is_exact(kv, 2), way > 0);
        if (way == 1) CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        if (way == 2) CHECK_EQ(tkv_seq_set_sinks(kv, 0, block_start(2) + 5, 1, 0), TKV_OK);
        for (i = 0; i < 3; i++) append_tokens(kv, 8);
        CHECK_EQ(is_exact(kv, 2), way == 4);
        destroy_cache_and_store(kv, &store);
    }
}

/* A sequence has a copied block of another, exact again. When tokens of it move to other slots, its exact copy is no
 * source any more. */
TEST(kept_tokens_need_a_new_exact_copy) {
    test_store store;
    tkv_config cfg = make_config(&store, 1);
    tkv_cache *kv;
    int kept[100], i, layer, n;
    cfg.limits.max_seqs = 2;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = 2 * BLOCK;
    cfg.model.rope.dim = DIM;
    kv = make_filled_cache(&cfg, 8 * BLOCK);
    CHECK_EQ(tkv_seq_copy(kv, 0, 0, BLOCK, 1, 0), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++) {
        CHECK_EQ(tkv_promote(kv, 1, layer, 5), TKV_OK);
        CHECK_EQ(tkv_append(kv, 1, layer, model_k[layer], model_v[layer], BLOCK), TKV_OK);
    }
    for (i = 0; i < COUNT(kept); i++) kept[i] = 20 + i;
    CHECK_EQ(tkv_seq_keep(kv, 1, 0, kept, COUNT(kept)), TKV_OK);
    CHECK_EQ(tkv_read(kv, 1, 0, 0, BLOCK, read_before, NULL), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++)
        for (i = 0; i < 10; i++)
            CHECK_EQ(tkv_append(kv, 1, layer, model_k[layer], model_v[layer], BLOCK), TKV_OK);
    CHECK_EQ(tkv_read(kv, 1, 0, 0, BLOCK, k_in, NULL), TKV_OK);
    CHECK(memcmp(k_in, read_before, sizeof(float) * BLOCK * ROW) != 0); /* coded for the archive */
    CHECK_EQ(tkv_offload(kv, 1, 0, 1, &n), TKV_OK);
    CHECK_EQ(n, 1);
    CHECK_EQ(tkv_promote(kv, 1, 0, 15), TKV_OK);
    CHECK_EQ(tkv_read(kv, 1, 0, 0, BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, read_before, sizeof(float) * BLOCK * ROW);
    destroy_cache_and_store(kv, &store);
}

/* A block that a fork holds too is not brought back, with one fork and with two. Without them it is. */
TEST(shared_blocks_are_not_promoted) {
    int n_forks, seq;
    for (n_forks = 1; n_forks <= 2; n_forks++) {
        test_store store;
        tkv_config cfg = make_config(&store, 1);
        tkv_cache *kv;
        cfg.limits.max_seqs = 3;
        kv = make_filled_cache(&cfg, 8 * BLOCK);
        for (seq = 1; seq <= n_forks; seq++) CHECK_EQ(tkv_seq_fork(kv, 0, seq, TKV_UNLIMITED), TKV_OK);
        for (seq = 0; seq <= n_forks; seq++)
            CHECK_EQ(tkv_promote(kv, seq, 0, block_start(1)), TKV_ERR_NO_SOURCE);
        CHECK(!is_exact(kv, 1));
        for (seq = 1; seq <= n_forks; seq++) CHECK_EQ(tkv_seq_reset(kv, seq), TKV_OK);
        CHECK_EQ(tkv_promote(kv, 0, 0, block_start(1)), TKV_OK);
        CHECK(is_exact(kv, 1));
        destroy_cache_and_store(kv, &store);
    }
}

/* Evicts the tokens first .. end - 1 of layer 0, but each n-th. */
static void evict_most(tkv_cache *kv, int first, int end, int n) {
    uint64_t victims[MAX_LEN / 64] = {0};
    int i;
    for (i = first; i < end; i++)
        if ((i - first) % n) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, 0, 0, victims, end), TKV_OK);
}

/* Checks the live tokens first .. end - 1 of layer 0 against the model, and that no better source of them is kept: a
 * promotion is refused, and changes no bit. */
static void check_no_copy(tkv_cache *kv, int first, int end, double bound) {
    int i, n = 0;
    check_cache(kv);
    for (i = first; i < end; i++) {
        float after[ROW];
        tkv_tier tier;
        if (tier_of(kv, 0, 0, i, &tier)) continue;
        CHECK_EQ(tkv_read(kv, 0, 0, i, 1, read_before, NULL), TKV_OK);
        CHECK_EQ(tkv_promote(kv, 0, 0, i), TKV_ERR_NO_SOURCE);
        CHECK_EQ(tkv_read(kv, 0, 0, i, 1, after, NULL), TKV_OK);
        CHECK_MEM(after, read_before, sizeof after);
        CHECK_LE(float_difference(after, model_k[0] + i * ROW, ROW), bound);
        n++;
    }
    CHECK(n > 10);
}

/* Tokens that change their slots are not those of the exact copy any more: where a block is packed as it is coded again,
 * and where two blocks become one. */
TEST(packed_tokens_have_no_exact_copy) {
    int way;
    for (way = 0; way < 2; way++) {
        test_store store;
        tkv_config cfg = make_config(&store, 1);
        tkv_cache *kv;
        int i, n_keys;
        cfg.evict.policy = TKV_EVICT_SLIDING;
        cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.tiers.hot_tokens = BLOCK;
        cfg.tiers.warm_tokens = 4 * BLOCK;
        kv = make_filled_cache(&cfg, 5 * BLOCK);
        n_keys = n_stored_keys(&store);
        if (way == 0) {
            CHECK_EQ(tkv_promote(kv, 0, 0, block_start(0)), TKV_OK);
            CHECK(is_exact(kv, 0));
            CHECK_EQ(n_stored_keys(&store), n_keys); /* the copy stays */
            evict_most(kv, block_start(0), block_start(1), 2);
            for (i = 0; i < 4; i++) append_tokens(kv, CHUNK);
            check_no_copy(kv, block_start(0), block_start(1), .7);
        } else { /* 26 of 128 tokens */
            evict_most(kv, block_start(0), block_start(2), 5);
            CHECK(n_layer_blocks(kv, 0, 0) < n_layer_blocks(kv, 0, 1));
            CHECK_EQ(n_stored_keys(&store), n_keys - 2);
            check_no_copy(kv, block_start(0), block_start(2), .3);
        }
        CHECK_EQ(tkv_promote(kv, 0, 1, block_start(0)),
                 TKV_OK); /* the other layer has all tokens, and its copy */
        destroy_cache_and_store(kv, &store);
    }
}

/* The tokens of the first coded block are all anchors: it is no candidate, whatever the threshold. */
TEST(blocks_of_anchors_alone_stay) {
    test_store store;
    tkv_config cfg = make_config(&store, 1);
    tkv_promotion p = default_promotion();
    tkv_layer_info info;
    tkv_cache *kv;
    int i;
    cfg.tiers.n_anchors = BLOCK;
    cfg.tiers.warm_tokens = BLOCK;
    kv = make_filled_cache(&cfg, 10 * BLOCK);
    for (i = 0; i < 4; i++) append_tokens(kv, 1);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    p.by.cfg.threshold = TKV_ZERO;
    p.by.cfg.per_step = 64;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, info.blocks[TKV_TIER_WARM] + info.blocks[TKV_TIER_ARCHIVE] - 1);
    CHECK(p.promoted > 4);
    for (i = 0; i <= p.promoted; i++) CHECK(is_exact(kv, i));
    destroy_cache_and_store(kv, &store);
}

/* Nothing is known of the moves of loaded blocks: they are candidates at once. */
TEST(loaded_blocks_need_no_cooldown) {
    static unsigned char memory[(1 << 20) + 64];
    unsigned char *file = memory + (64 - (uintptr_t)memory % 64) % 64;
    test_store store;
    tkv_config cfg = make_config(&store, 0), plain = cfg;
    tkv_promotion p = default_promotion();
    tkv_save_params save;
    tkv_load_params load;
    tkv_cache *kv;
    size_t bytes = 0;
    memset(&plain.importance, 0, sizeof plain.importance);
    memset(&plain.offload, 0, sizeof plain.offload);
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    kv = make_filled_cache(&plain, 12 * BLOCK);
    CHECK_EQ(tkv_seq_save(kv, &save, file, 1 << 20, &bytes), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 8 * BLOCK, read_before, NULL), TKV_OK);
    tkv_destroy(kv);
    kv = create_cache(&cfg);
    load.attach = 1;
    CHECK_EQ(tkv_seq_load(kv, &load, file, bytes, NULL), TKV_OK);
    add_block_score(kv, 1, .5f);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    CHECK_EQ(p.waiting, 0);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 8 * BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, read_before, sizeof(float) * 8 * BLOCK * ROW);
    destroy_cache_and_store(kv, &store);
}

/* Attached blocks can have the hot tier's format. One that comes into RAM keeps its bytes in the file as its exact copy,
 * which serves when the block was discarded. */
TEST(attached_exact_blocks) {
    static unsigned char memory[(1 << 20) + 64];
    unsigned char *file = memory + (64 - (uintptr_t)memory % 64) % 64;
    test_store store;
    tkv_config cfg = make_config(&store, 0);
    tkv_save_params save;
    tkv_load_params load;
    tkv_load_info info;
    tkv_cache *kv;
    size_t bytes = 0;
    int n = 0;
    memset(&cfg.importance, 0, sizeof cfg.importance);
    memset(&cfg.offload, 0, sizeof cfg.offload);
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    cfg.tiers.warm = cfg.tiers.archive = cfg.tiers.hot;
    cfg.tiers.warm_tokens = BLOCK;
    kv = make_filled_cache(&cfg, 12 * BLOCK);
    CHECK_EQ(tkv_seq_save(kv, &save, file, 1 << 20, &bytes), TKV_OK);
    tkv_destroy(kv);
    kv = create_cache(&cfg);
    load.attach = 1;
    CHECK_EQ(tkv_seq_load(kv, &load, file, bytes, &info), TKV_OK);
    CHECK(info.n_attached >= 8 * LAYERS);
    CHECK_EQ(tkv_promote(kv, 0, 0, block_start(1)), TKV_OK);
    CHECK(is_exact(kv, 1));
    check_cache(kv);
    CHECK_EQ(tkv_promote(kv, 0, 0, block_start(1)), TKV_ERR_NO_SOURCE); /* it is in RAM, and exact */
    CHECK_EQ(tkv_seq_discard(kv, 0, block_start(2), &n), TKV_OK);
    CHECK(n > 0);
    CHECK_EQ(tkv_read(kv, 0, 0, block_start(1), BLOCK, k_in, v_in), TKV_ERR_NO_SOURCE);
    check_cache(kv);
    CHECK_EQ(tkv_promote(kv, 0, 0, block_start(1)), TKV_OK);
    CHECK(is_exact(kv, 1));
    destroy_cache_and_store(kv, &store);
}

TEST(wrong_configs_of_promotion) {
    static const struct {
        int every, per_step, has_store, samples;
        float threshold;
        const char *sentence;
    } cases[] = {{-1, 0, 1, 1, 0, "promotion.every is -1; it must be a number of tokens"},
                 {8, 0, 0, 1, 0, "promotion.every is 8; it needs offload.write"},
                 {8, 0, 1, 0, 0, "promotion.every is 8; it needs importance.sample_every"},
                 {8, 65, 1, 1, 0, "promotion.per_step is 65; it must be 0 to 64"},
                 {8, -1, 1, 1, 0, "promotion.per_step is -1; it must be 0 to 64"},
                 {0, 8, 0, 0, .5f, ""},
                 {8, 0, 1, 1, 0, ""}};
    test_store store;
    char reason[200];
    int i;
    for (i = 0; i < COUNT(cases); i++) {
        tkv_config cfg = make_config(&store, 1);
        destroy_test_store(&store);
        cfg.promotion.every = cases[i].every;
        cfg.promotion.per_step = cases[i].per_step;
        cfg.promotion.threshold = cases[i].threshold;
        if (!cases[i].has_store) memset(&cfg.offload, 0, sizeof cfg.offload);
        if (!cases[i].samples) cfg.importance.sample_every = 0;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason),
                 cases[i].sentence[0] ? TKV_ERR_CONFIG : TKV_OK);
        CHECK_MSG(strncmp(reason, cases[i].sentence, strlen(cases[i].sentence)) == 0, "%s", reason);
    }
}

/* >>recomputation by a model */
typedef struct model {
    int calls, tokens, fails;
} model;

static tkv_status recompute_tokens(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers,
                                   int start, int n) {
    model *m = (model *)user;
    tkv_status st = TKV_OK;
    int l;
    m->calls++;
    if (m->fails && --m->fails == 0) return TKV_ERR_NOMEM;
    for (l = first_layer; l < first_layer + n_layers && !st; l++)
        st = tkv_restore(kv, seq, l, start, model_k[l] + start * ROW, model_v[l] + start * ROW, n);
    m->tokens += n;
    return st;
}

static tkv_remat make_remat(double step_blocks) {
    tkv_remat_config cfg;
    tkv_remat r;
    memset(&cfg, 0, sizeof cfg);
    cfg.n_layers = LAYERS;
    cfg.n_heads = HEADS;
    cfg.head_dim = DIM;
    cfg.layer_params = 1e8;
    CHECK_EQ(tkv_init_remat(&r, &cfg, NULL, 0), TKV_OK);
    cfg.step_flops = step_blocks * flops_of(&r, BLOCK) * 1.01;
    CHECK_EQ(tkv_init_remat(&r, &cfg, NULL, 0), TKV_OK);
    return r;
}

TEST(recomputed_blocks) {
    test_store store;
    tkv_config cfg = make_config(&store, 0);
    tkv_cache *kv;
    tkv_promotion p = default_promotion();
    tkv_remat r = make_remat(2);
    model m;
    int i, start = 0, n = 0, n_discarded = 0;
    memset(&m, 0, sizeof m);
    memset(&cfg.offload, 0, sizeof cfg.offload);
    kv = make_filled_cache(&cfg, 16 * BLOCK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 12 * BLOCK, read_before, NULL), TKV_OK);
    add_block_score(kv, 0, .1f);
    add_block_score(kv, 3, .5f);
    CHECK_EQ(tkv_seq_discard(kv, 0, 5 * BLOCK, &n_discarded), TKV_OK);
    CHECK_EQ(n_discarded, 5 * BLOCK);
    for (i = 0; i < 4; i++) append_tokens(kv, 1);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NO_SOURCE);
    CHECK_EQ(p.no_source, 2);
    p.compute = recompute_tokens;
    p.user = &m;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_ARG);
    p.remat = &r;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK); /* in order of positions, two blocks per step */
    CHECK_EQ(p.promoted, 1);
    CHECK_EQ(p.waiting, 1);
    CHECK_EQ(m.tokens, 2 * BLOCK);
    CHECK_EQ(tkv_seq_find_discarded(kv, 0, &start, &n), TKV_OK);
    CHECK_EQ(start, block_start(2));
    append_tokens(kv, 1);
    m.fails = 1;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NOMEM);
    CHECK_EQ(p.promoted, 0);
    append_tokens(kv, 1);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    CHECK_EQ(p.no_source, 1); /* block 0 is in RAM, compressed */
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 4 * BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, read_before, sizeof(float) * 4 * BLOCK * ROW);
    CHECK_EQ(m.tokens, 4 * BLOCK);
    append_tokens(kv, 1); /* block 4 is still discarded and has no score */
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NO_SOURCE);
    CHECK_EQ(m.tokens, 4 * BLOCK);
    CHECK_EQ(tkv_seq_find_discarded(kv, 0, &start, &n), TKV_OK);
    CHECK_EQ(start, block_start(4));
    destroy_cache_and_store(kv, &store);
}

/* A discarded block with an exact copy comes back without the model. */
TEST(copies_of_discarded_blocks) {
    test_store store;
    tkv_config cfg = make_config(&store, 1);
    tkv_cache *kv = make_filled_cache(&cfg, 16 * BLOCK);
    tkv_promotion p = default_promotion();
    tkv_remat r = make_remat(2);
    model m;
    int i;
    memset(&m, 0, sizeof m);
    CHECK_EQ(tkv_seq_discard(kv, 0, 2 * BLOCK, NULL), TKV_OK);
    add_block_score(kv, 0, .3f);
    add_block_score(kv, 1, .4f);
    for (i = 0; i < 4; i++) append_tokens(kv, 1);
    p.compute = recompute_tokens;
    p.user = &m;
    p.remat = &r;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 2);
    CHECK_EQ(m.calls, 0);
    CHECK(is_exact(kv, 0) && is_exact(kv, 1));
    destroy_cache_and_store(kv, &store);
}

/* One recomputation serves all candidates. Those that it leaves wait, and offloaded ones do not need it. */
TEST(one_recomputation_serves_all) {
    test_store store;
    tkv_config cfg = make_config(&store, 0);
    tkv_cache *kv = make_filled_cache(&cfg, 16 * BLOCK);
    tkv_promotion p = default_promotion();
    tkv_remat r = make_remat(2);
    model m;
    int i, n = 0;
    memset(&m, 0, sizeof m);
    CHECK_EQ(tkv_seq_discard(kv, 0, 3 * BLOCK, NULL), TKV_OK);
    CHECK_EQ(tkv_offload(kv, 0, 0, 2, &n), TKV_OK); /* blocks 3 and 4 */
    CHECK_EQ(n, 2);
    add_block_score(kv, 1, .9f);
    add_block_score(kv, 2, .8f);
    add_block_score(kv, 4, .5f);
    add_block_score(kv, 3, .4f);
    for (i = 0; i < 4; i++) append_tokens(kv, 1);
    p.compute = recompute_tokens;
    p.user = &m;
    p.remat = &r;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(m.calls, 1);
    CHECK_EQ(m.tokens, 2 * BLOCK); /* blocks 0 and 1 */
    CHECK_EQ(p.promoted, 3);
    CHECK_EQ(p.waiting, 1); /* block 2 */
    CHECK_EQ(budget_of(kv).promoted, 2);
    destroy_cache_and_store(kv, &store);
}

/* >>budget: memory never exceeds it, also when promoted blocks are compressed again */
TEST(within_the_budget) {
    test_store store;
    tkv_config cfg = make_config(&store, 1);
    tkv_cache *kv;
    tkv_promotion p = default_promotion();
    tkv_memory_info info;
    counting_allocator allocator;
    int n, n_promoted = 0, n_refused = 0;
    cfg.host.allocator = counting_allocator_of(&allocator);
    cfg.budget.bytes = 400000;
    kv = create_cache(&cfg);
    for (n = 0; n < 1200; n++) {
        tkv_status st;
        append_tokens(kv, 1);
        if (n >= 300 && n % 64 == 0) add_block_score(kv, n / 64 - 4, .5f);
        st = tkv_promote_important(kv, 0, 0, &p);
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET || st == TKV_ERR_NO_SOURCE);
        n_refused += st == TKV_ERR_BUDGET;
        n_promoted += p.promoted;
        CHECK_LE(allocator.held, cfg.budget.bytes);
        if (n % 97 == 0) check_cache(kv);
    }
    CHECK_EQ(tkv_get_memory(kv, &info), TKV_OK);
    CHECK_EQ(info.total, allocator.held);
    CHECK(n_promoted > 0);
    CHECK(n_refused > 0);
    destroy_cache_and_store(kv, &store);
    CHECK_EQ(allocator.held, 0);
}

TEST(wrong_arguments) {
    test_store store;
    tkv_config cfg = make_config(&store, 1);
    tkv_cache *kv = create_cache(&cfg);
    tkv_promotion p = default_promotion();
    CHECK_EQ(tkv_promote_important(NULL, 0, 0, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, 1, 0, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, -1, 0, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, 0, LAYERS, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK); /* empty */
    append_tokens(kv, 3 * BLOCK / 4);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    p.by.cfg.per_step = TKV_MAX_PROMOTIONS + 1;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_CONFIG);
    p = default_promotion();
    p.by.used = -1;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_ARG);
    p = default_promotion();
    p.by.cfg.threshold = tkv_test_float(0x7fc00000u);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_CONFIG);
    tkv_destroy(kv);
    cfg.importance.sample_every = 0;
    kv = create_cache(&cfg);
    p = default_promotion();
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(tkv_get_last_error(kv), "sample_every") != NULL, "%s", tkv_get_last_error(kv));
    tkv_destroy(kv);
    cfg.importance.sample_every = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_RECENCY; /* it collects no scores */
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_CONFIG);
    destroy_cache_and_store(kv, &store);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(1);
    RUN(best_blocks_first);
    RUN(cooldown);
    RUN(offloaded_blocks);
    RUN(appends_promote_by_themselves);
    RUN(promotion_never_fails_an_append);
    RUN(blocks_go_back_when_memory_comes);
    RUN(promoted_blocks_that_do_not_go_back);
    RUN(kept_tokens_need_a_new_exact_copy);
    RUN(shared_blocks_are_not_promoted);
    RUN(packed_tokens_have_no_exact_copy);
    RUN(blocks_of_anchors_alone_stay);
    RUN(loaded_blocks_need_no_cooldown);
    RUN(attached_exact_blocks);
    RUN(wrong_configs_of_promotion);
    RUN(recomputed_blocks);
    RUN(copies_of_discarded_blocks);
    RUN(one_recomputation_serves_all);
    RUN(within_the_budget);
    RUN(wrong_arguments);
    return tkv_test_end();
}
