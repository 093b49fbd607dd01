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
    LONGEST = 2048
};

static tkv_rng rng;
static float k_of[LAYERS][LONGEST * ROW], v_of[LAYERS][LONGEST * ROW]; /* what the model would compute */
static float k_in[LONGEST * ROW], v_in[LONGEST * ROW], was[LONGEST * ROW];

static tkv_config config(test_store *d, int keep_exact) {
    tkv_config cfg = shape_of(LAYERS, HEADS, KV_HEADS, DIM, 0, CHUNK);
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.importance.sample_every = 1 << 20; /* what matters is what the test says */
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    test_store_for(d, &cfg);
    cfg.offload.keep_exact = keep_exact;
    return cfg;
}

static void append(tkv_cache *kv, int n) {
    int l;
    for (l = 0; l < LAYERS; l++) {
        const int at = tkv_get_length(kv, 0, l) * ROW;
        tkv_rng_fill(&rng, k_of[l] + at, (size_t)(n * ROW), 1.0);
        tkv_rng_fill(&rng, v_of[l] + at, (size_t)(n * ROW), 1.0);
        CHECK_EQ(tkv_append(kv, 0, l, k_of[l] + at, v_of[l] + at, n), TKV_OK);
    }
}

static tkv_cache *filled(const tkv_config *cfg, int n) {
    tkv_cache *kv = make(cfg);
    for (; n > 0; n -= CHUNK) append(kv, n < CHUNK ? n : CHUNK);
    return kv;
}

/* Blocks begin behind the 4 sinks. */
static int start_of(int block) { return 4 + block * BLOCK; }

/* A token of this block of layer 0 gets so much; others of it less. */
static void matters(tkv_cache *kv, int block, float mass) {
    float x[BLOCK];
    int i;
    for (i = 0; i < BLOCK; i++) x[i] = i == (block * 7 + 3) % BLOCK ? mass : mass * .01f;
    CHECK_EQ(tkv_add_scores(kv, 0, 0, start_of(block), BLOCK, x), TKV_OK);
}

static int is_exact(tkv_cache *kv, int block) { /* by its bits */
    const int at = start_of(block);
    CHECK_EQ(tkv_read(kv, 0, 0, at, BLOCK, k_in, v_in), TKV_OK);
    return memcmp(k_in, k_of[0] + at * ROW, BLOCK * ROW * sizeof(float)) == 0 &&
           memcmp(v_in, v_of[0] + at * ROW, BLOCK * ROW * sizeof(float)) == 0;
}

static tkv_promotion none_yet(void) {
    tkv_promotion p;
    memset(&p, 0, sizeof p);
    return p;
}

static void end(tkv_cache *kv, test_store *d) {
    sound(kv);
    tkv_destroy(kv);
    test_store_end(d);
}

/* >>from copies: the eight best at a step, never below the threshold */
TEST(the_best_come_first) {
    test_store d;
    tkv_config cfg = config(&d, 1);
    tkv_cache *kv = filled(&cfg, 24 * BLOCK);
    tkv_promotion p = none_yet();
    float score[20];
    int i, step;
    for (i = 0; i < 20; i++) {
        score[i] = i == 5 ? .04f : .06f + (float)(i * 7 % 20) * .01f;
        matters(kv, i, score[i]);
        CHECK(!is_exact(kv, i));
    }
    for (i = 0; i < 4; i++) append(kv, 1); /* since they were coded */
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 8);
    CHECK_EQ(p.waiting, 11);
    CHECK_EQ(p.no_source, 0);
    for (i = 0; i < 20; i++) CHECK_EQ(is_exact(kv, i), score[i] > .165f);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK); /* the step's are used up */
    CHECK_EQ(p.promoted, 0);
    CHECK_EQ(p.waiting, 11);
    for (step = 0; step < 3; step++) {
        append(kv, 1);
        CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
        CHECK_EQ(p.promoted, step == 0 ? 8 : step == 1 ? 3 : 0);
    }
    for (i = 0; i < 20; i++) CHECK_EQ(is_exact(kv, i), i != 5);
    CHECK_EQ((int)p.by.promoted, 19);
    CHECK_EQ((int)p.by.no_source, 0);
    p.by.cfg.threshold = .03f;
    p.by.cfg.per_step = 1;
    append(kv, 1);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    CHECK(is_exact(kv, 5));
    CHECK_EQ(tkv_promote_important(kv, 0, 1, &p), TKV_OK); /* nothing matters there */
    CHECK_EQ(p.promoted + p.waiting + p.no_source, 0);
    end(kv, &d);
}

/* >>what has just moved stays where it is for a while */
TEST(cooling_down) {
    test_store d;
    tkv_config cfg = config(&d, 1);
    tkv_cache *kv = filled(&cfg, 10 * BLOCK);
    tkv_promotion p = none_yet();
    int step, done = 0, len;
    for (step = 0; step < 5; step++) append(kv, 1);
    matters(kv, 0, 1.0f);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    CHECK_EQ(tkv_offload(kv, 0, 0, 1, &done), TKV_OK); /* outside, exact as it is */
    CHECK_EQ(done, 1);
    for (step = 0; step < 6; step++) {
        append(kv, 1);
        CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
        CHECK_EQ(p.promoted, step == 3);
        CHECK_EQ(p.waiting, step < 3);
    }
    /* after a cut time goes on from there */
    CHECK_EQ(tkv_offload(kv, 0, 0, 1, &done), TKV_OK);
    len = tkv_get_length(kv, 0, TKV_ALL_LAYERS) - 3;
    CHECK_EQ(tkv_seq_truncate(kv, 0, len), TKV_OK);
    for (step = 0; step < 4; step++) {
        CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
        CHECK_EQ(p.promoted, 0);
        append(kv, 1);
    }
    p.by.cfg.cooldown = TKV_OFF;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    end(kv, &d);
}

/* >>from outside, as they went; one that cannot be fetched stays there */
TEST(from_outside) {
    test_store d;
    tkv_config cfg = config(&d, 0);
    tkv_cache *kv = filled(&cfg, 16 * BLOCK);
    tkv_promotion p = none_yet();
    int i, done = 0;
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 12 * BLOCK, was, NULL), TKV_OK);
    matters(kv, 1, .3f);
    matters(kv, 2, .4f);
    matters(kv, 3, .2f);
    matters(kv, 9, .9f); /* coded, in RAM */
    for (i = 0; i < 4; i++) append(kv, 1);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NO_SOURCE);
    CHECK_MSG(strstr(tkv_get_last_error(kv), "keep_exact") != NULL, "%s", tkv_get_last_error(kv));
    CHECK_EQ(p.no_source, 4);
    CHECK_EQ(tkv_offload(kv, 0, 0, 6, &done), TKV_OK);
    CHECK_EQ(done, 6);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK); /* just moved: they wait */
    CHECK_EQ(p.waiting, 3);
    CHECK_EQ(p.no_source, 1);
    for (i = 0; i < 4; i++) append(kv, 1);
    d.fetch_fails = 5; /* the fourth fetch brought the last piece of the first */
    d.fetches = 0;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_IO);
    CHECK(p.promoted >= 1 && p.promoted < 3);
    CHECK_EQ(p.promoted + p.waiting, 3);
    CHECK_EQ(p.by.used, p.promoted);
    sound(kv);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 12 * BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, was, sizeof(float) * 12 * BLOCK * ROW);
    i = p.promoted;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 3 - i);
    CHECK_EQ(p.no_source, 1 + i); /* those that came are coded, and nothing better is kept of them */
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 12 * BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, was, sizeof(float) * 12 * BLOCK * ROW);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NO_SOURCE);
    end(kv, &d);
}

/* >>from a model */
typedef struct model {
    int calls, tokens, fails;
} model;

static tkv_status compute(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers, int start,
                          int n) {
    model *m = (model *)user;
    tkv_status st = TKV_OK;
    int l;
    m->calls++;
    if (m->fails && --m->fails == 0) return TKV_ERR_NOMEM;
    for (l = first_layer; l < first_layer + n_layers && !st; l++)
        st = tkv_restore(kv, seq, l, start, k_of[l] + start * ROW, v_of[l] + start * ROW, n);
    m->tokens += n;
    return st;
}

static tkv_remat remat_of(double step_blocks) {
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

TEST(from_a_model) {
    test_store d;
    tkv_config cfg = config(&d, 0);
    tkv_cache *kv;
    tkv_promotion p = none_yet();
    tkv_remat r = remat_of(2);
    model m;
    int i, start = 0, n = 0, dropped = 0;
    memset(&m, 0, sizeof m);
    memset(&cfg.offload, 0, sizeof cfg.offload);
    kv = filled(&cfg, 16 * BLOCK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 12 * BLOCK, was, NULL), TKV_OK);
    matters(kv, 0, .1f);
    matters(kv, 3, .5f);
    CHECK_EQ(tkv_seq_discard(kv, 0, 5 * BLOCK, &dropped), TKV_OK);
    CHECK_EQ(dropped, 5 * BLOCK);
    for (i = 0; i < 4; i++) append(kv, 1);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NO_SOURCE);
    CHECK_EQ(p.no_source, 2);
    p.compute = compute;
    p.user = &m;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_ARG);
    p.remat = &r;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK); /* front to back, two blocks a step */
    CHECK_EQ(p.promoted, 1);
    CHECK_EQ(p.waiting, 1);
    CHECK_EQ(m.tokens, 2 * BLOCK);
    CHECK_EQ(tkv_seq_find_discarded(kv, 0, &start, &n), TKV_OK);
    CHECK_EQ(start, start_of(2));
    append(kv, 1);
    m.fails = 1;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NOMEM);
    CHECK_EQ(p.promoted, 0);
    append(kv, 1);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    CHECK_EQ(p.promoted, 1);
    CHECK_EQ(p.no_source, 1); /* block 0 is there, coded */
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 4 * BLOCK, k_in, NULL), TKV_OK);
    CHECK_MEM(k_in, was, sizeof(float) * 4 * BLOCK * ROW);
    CHECK_EQ(m.tokens, 4 * BLOCK);
    append(kv, 1); /* the last one matters to nobody */
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_NO_SOURCE);
    CHECK_EQ(m.tokens, 4 * BLOCK);
    CHECK_EQ(tkv_seq_find_discarded(kv, 0, &start, &n), TKV_OK);
    CHECK_EQ(start, start_of(4));
    end(kv, &d);
}

/* >>under a budget: no byte above it, and a promoted block that is compressed again waits */
TEST(within_the_budget) {
    test_store d;
    tkv_config cfg = config(&d, 1);
    tkv_cache *kv;
    tkv_promotion p = none_yet();
    tkv_memory_info info;
    counting_allocator money;
    int n, came = 0, refused = 0;
    cfg.host.allocator = counting_allocator_of(&money);
    cfg.budget.bytes = 400000;
    kv = make(&cfg);
    for (n = 0; n < 1200; n++) {
        tkv_status st;
        append(kv, 1);
        if (n >= 300 && n % 64 == 0) matters(kv, n / 64 - 4, .5f);
        st = tkv_promote_important(kv, 0, 0, &p);
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET || st == TKV_ERR_NO_SOURCE);
        refused += st == TKV_ERR_BUDGET;
        came += p.promoted;
        CHECK_LE(money.held, cfg.budget.bytes);
        if (n % 97 == 0) sound(kv);
    }
    CHECK_EQ(tkv_get_memory(kv, &info), TKV_OK);
    CHECK_EQ(info.total, money.held);
    CHECK(came > 0);
    CHECK(refused > 0);
    end(kv, &d);
    CHECK_EQ(money.held, 0);
}

TEST(wrong_arguments) {
    test_store d;
    tkv_config cfg = config(&d, 1);
    tkv_cache *kv = make(&cfg);
    tkv_promotion p = none_yet();
    CHECK_EQ(tkv_promote_important(NULL, 0, 0, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, 1, 0, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, -1, 0, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, 0, LAYERS, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK); /* empty */
    append(kv, 3 * BLOCK / 4);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_OK);
    p.by.cfg.per_step = TKV_MAX_PROMOTIONS + 1;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_CONFIG);
    p = none_yet();
    p.by.used = -1;
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_ARG);
    p = none_yet();
    p.by.cfg.threshold = tkv_test_float(0x7fc00000u);
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_CONFIG);
    tkv_destroy(kv);
    cfg.importance.sample_every = 0;
    kv = make(&cfg);
    p = none_yet();
    CHECK_EQ(tkv_promote_important(kv, 0, 0, &p), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(tkv_get_last_error(kv), "sample_every") != NULL, "%s", tkv_get_last_error(kv));
    end(kv, &d);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(1);
    RUN(the_best_come_first);
    RUN(cooling_down);
    RUN(from_outside);
    RUN(from_a_model);
    RUN(within_the_budget);
    RUN(wrong_arguments);
    return tkv_test_end();
}
