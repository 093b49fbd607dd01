/*
 * test_drop.c - eviction of tokens: which are evicted, which stay, reads and attention afterwards, and memory.
 *
 * A second cache keeps all the same tokens exactly. Attention in it, with the evicted tokens masked, must be the
 * same.
 */
#include "kit.h"

#include <math.h>

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    SEQS = 2,
    LAYERS = 3,
    KV_HEADS = 2,
    HEADS = 4,
    DIM = 32,
    SINKS = 4, /* the default */
    ROW = KV_HEADS * DIM,
    LONGEST = 3000,
    CHUNK = 256,
    WORDS = LONGEST / 64 + 1
};

static float k_in[LONGEST * ROW], v_in[LONGEST * ROW], k_out[LONGEST * ROW], v_out[LONGEST * ROW];
static float q_in[CHUNK * HEADS * DIM], mine[CHUNK * HEADS * DIM], theirs[CHUNK * HEADS * DIM];
static float mask[CHUNK * LONGEST];
static tkv_rng rng;

/* >>two caches */
typedef struct twins {
    tkv_cache *kv, *whole;
} twins;

static tkv_config small_config(void) {
    tkv_config cfg = shape_of(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.evict.policy = TKV_EVICT_SLIDING;
    return cfg;
}

static twins twins_of(const tkv_config *cfg) {
    tkv_config whole = small_config();
    twins t;
    whole.evict.policy = TKV_EVICT_NONE;
    whole.tiers.hot_tokens = TKV_UNLIMITED;
    whole.model.window = cfg->model.window;
    t.kv = make(cfg);
    t.whole = make(&whole);
    rng = tkv_rng_seed(1);
    return t;
}

static void end_of(twins *t) {
    tkv_destroy(t->kv);
    tkv_destroy(t->whole);
}

static tkv_status grow(twins *t, int seq, int n) {
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < LAYERS && !st; layer++) {
        tkv_rng_fill(&rng, k_in, (size_t)(n * ROW), 1.0);
        tkv_rng_fill(&rng, v_in, (size_t)(n * ROW), 1.0);
        st = tkv_append(t->kv, seq, layer, k_in, v_in, n);
        if (!st) CHECK_EQ(tkv_append(t->whole, seq, layer, k_in, v_in, n), TKV_OK);
    }
    return st;
}

static int is_there(const tkv_cache *kv, int seq, int layer, int position) {
    uint64_t bit = 0;
    CHECK_EQ(live_mask_of(kv, seq, layer, position, 1, &bit), TKV_OK);
    return (int)bit;
}

static int count_of(const tkv_cache *kv, int seq, int layer) {
    uint64_t alive[WORDS];
    int i, n = 0, len = tkv_get_length(kv, seq, layer);
    CHECK_EQ(live_mask_of(kv, seq, layer, 0, len, alive), TKV_OK);
    for (i = 0; i < len; i++) n += in_mask(alive, i);
    return n;
}

/* Blocks that would hold the live tokens of a layer if no tokens had moved to another block. */
static int live_spans(const tkv_cache *kv, int seq, int layer) {
    uint64_t alive[WORDS];
    int i, n = 0, last = -1, len = tkv_get_length(kv, seq, layer);
    CHECK_EQ(live_mask_of(kv, seq, layer, 0, len, alive), TKV_OK);
    for (i = 0; i < len; i++) {
        const int span = (i + BLOCK - SINKS) / BLOCK; /* the sinks are a block of their own */
        n += in_mask(alive, i) && span != last;
        if (in_mask(alive, i)) last = span;
    }
    return n;
}

/* Attention of the last n tokens is that of the whole cache with the same tokens hidden. */
static void attends_alike(const twins *t, int seq, int layer, int n, const tkv_attend_params *like,
                          double bound) {
    uint64_t alive[WORDS];
    tkv_attend_params p;
    const int len = tkv_get_length(t->kv, seq, layer);
    double err = 0.0, all = 0.0;
    int r, i;
    memset(&p, 0, sizeof p);
    if (like) p = *like;
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.q = q_in;
    p.out = mine;
    tkv_rng_fill(&rng, q_in, (size_t)(n * HEADS * DIM), 1.5);
    CHECK_EQ(tkv_attend_ex(t->kv, &p), TKV_OK);
    CHECK_EQ(live_mask_of(t->kv, seq, layer, 0, len, alive), TKV_OK);
    for (r = 0; r < n; r++)
        for (i = 0; i < len; i++) {
            const float given = like && like->mask ? like->mask[r * LONGEST + i] : 0.0f;
            mask[r * len + i] = in_mask(alive, i) ? given : -1e30f;
        }
    p.mask = mask;
    p.mask_stride = len;
    p.out = theirs;
    CHECK_EQ(tkv_attend_ex(t->whole, &p), TKV_OK);
    for (i = 0; i < n * HEADS * DIM; i++) {
        const double d = (double)mine[i] - (double)theirs[i];
        err += d * d;
        all += (double)theirs[i] * (double)theirs[i];
    }
    CHECK_MSG(err <= bound * bound * all, "sequence %d, layer %d, %d queries: off by %.2e", seq, layer, n,
              sqrt(err / (all > 0.0 ? all : 1.0)));
}

/* Every token that is there reads as it was written (within `bound` of all values), others say that they are gone. */
static void reads_alike(const twins *t, int seq, int layer, double bound) {
    const int len = tkv_get_length(t->kv, seq, layer);
    float k[ROW], v[ROW];
    double err = 0.0, all = 0.0;
    int i, c;
    CHECK_EQ(tkv_read(t->whole, seq, layer, 0, len, k_out, v_out), TKV_OK);
    for (i = 0; i < len; i++) {
        tkv_tier tier;
        const int there = is_there(t->kv, seq, layer, i);
        const tkv_status st = tkv_read(t->kv, seq, layer, i, 1, k, v);
        CHECK_EQ(st, there ? TKV_OK : TKV_ERR_RANGE);
        CHECK_EQ(tier_of(t->kv, seq, layer, i, &tier), there ? TKV_OK : TKV_ERR_RANGE);
        for (c = 0; c < ROW && !st; c++) {
            const double a = (double)k[c] - (double)k_out[i * ROW + c];
            const double b = (double)v[c] - (double)v_out[i * ROW + c];
            err += a * a + b * b;
            all += (double)k_out[i * ROW + c] * (double)k_out[i * ROW + c];
        }
    }
    CHECK_MSG(err <= bound * bound * 2.0 * all, "off by %.2e", sqrt(err / (2.0 * all)));
}

/* A part of the tokens of a layer, by lot. */
static void drop_some(twins *t, int seq, int layer, int percent) {
    uint64_t victims[WORDS];
    int i, len = tkv_get_length(t->kv, seq, layer);
    memset(victims, 0, sizeof victims);
    for (i = 0; i < len; i++)
        if (tkv_rng_below(&rng, 100) < percent) add_to_mask(victims, i);
    CHECK_EQ(evict_named(t->kv, seq, layer, victims, len), TKV_OK);
    for (i = 0; i < len; i++)
        if (in_mask(victims, i)) CHECK(!is_there(t->kv, seq, layer, i));
    sound(t->kv);
}

/* >>who goes */
TEST(a_window_slides) { /* StreamingLLM: sinks and the newest, never more than asked for */
    tkv_config cfg = small_config();
    twins t;
    int n, i;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.evict.keep_tokens = 200;
    cfg.evict.batch = 1;
    t = twins_of(&cfg);
    for (n = 1; n <= 700; n++) {
        CHECK_EQ(grow(&t, 0, 1), TKV_OK);
        CHECK_EQ(count_of(t.kv, 0, 0), n < 200 ? n : 200);
    }
    for (i = 0; i < 700; i++) CHECK_EQ(is_there(t.kv, 0, 0, i), i < 4 || i >= 700 - 196);
    attends_alike(&t, 0, 1, 1, NULL, FAST_MATH ? 1e-3 : 1e-5);
    sound(t.kv);
    end_of(&t);
}

TEST(
    sinks_outlast_long_chunks) { /* as many new tokens as may stay, or more: what is protected stays beside them */
    int chunk;
    for (chunk = 32; chunk <= CHUNK; chunk += 32) {
        tkv_config cfg = small_config();
        twins t;
        int n, i;
        cfg.tiers.hot_tokens = TKV_UNLIMITED;
        cfg.evict.keep_tokens = 128;
        t = twins_of(&cfg);
        for (n = 0; n < 4; n++) {
            CHECK_EQ(grow(&t, 0, chunk), TKV_OK);
            for (i = 0; i < 4; i++) CHECK(is_there(t.kv, 0, 0, i));
            CHECK(count_of(t.kv, 0, 0) <= (chunk + 5 > 128 ? chunk + 5 : 128));
        }
        sound(t.kv);
        end_of(&t);
    }
}

TEST(batches) { /* at most evict_tokens, and at least that less a batch */
    tkv_config cfg = small_config();
    twins t;
    int n, least = LONGEST;
    cfg.evict.keep_tokens = 300;
    cfg.evict.policy = TKV_EVICT_KNORM;
    t = twins_of(&cfg);
    for (n = 0; n < 150; n++) {
        const int more = 1 + tkv_rng_below(&rng, 15);
        int count;
        CHECK_EQ(grow(&t, 0, more), TKV_OK);
        count = count_of(t.kv, 0, 2);
        CHECK(count <= 300);
        if (tkv_get_length(t.kv, 0, TKV_ALL_LAYERS) > 310 && count < least) least = count;
    }
    CHECK(least >= 300 - 64 - 15 && least < 300 - 30);
    end_of(&t);
}

/* The mean of |k| over KV heads, as "knorm" takes it. */
static void key_norms(const float *keys, int n, float *out) {
    int i, h, c;
    for (i = 0; i < n; i++) {
        double sum = 0.0, squares;
        for (h = 0; h < KV_HEADS; h++) {
            const float *key = keys + i * ROW + h * DIM;
            for (c = 0, squares = 0.0; c < DIM; c++) squares += (double)key[c] * (double)key[c];
            sum += sqrt(squares);
        }
        out[i] = (float)(sum / KV_HEADS);
    }
}

/* The tokens that the pure function leaves, of the keys as the cache has them. */
static void leaves_what_the_rule_says(tkv_evict_policy kind, int keep) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    tkv_evict_view v;
    uint64_t victims[WORDS];
    float norms[600], scores[600];
    twins t;
    int i;
    cfg.evict.policy = kind;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    t = twins_of(&cfg);
    for (i = 0; i < 3; i++) CHECK_EQ(grow(&t, 0, 200), TKV_OK);
    CHECK_EQ(tkv_read(t.whole, 0, 1, 0, 600, k_out, v_out), TKV_OK);
    key_norms(k_out, 600, norms);
    memset(&v, 0, sizeof v);
    v.n = 600;
    v.norms = norms;
    v.keys = k_out;
    v.n_kv_heads = KV_HEADS;
    v.head_dim = DIM;
    CHECK_EQ(tkv_select_victims(&cfg.evict, &v, keep, scores, victims, NULL), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = keep;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_OK);
    for (i = 0; i < 600; i++) CHECK_EQ(is_there(t.kv, 0, 1, i), !in_mask(victims, i));
    for (i = 0; i < LAYERS; i++) CHECK_EQ(count_of(t.kv, 0, i), keep);
    attends_alike(&t, 0, 1, 1, NULL, FAST_MATH ? 1e-3 : 1e-5);
    attends_alike(&t, 0, 1, 100, NULL, FAST_MATH ? 1e-3 : 1e-5);
    reads_alike(&t, 0, 1, 0);
    sound(t.kv);
    end_of(&t);
}

TEST(rules_of_keys) {
    leaves_what_the_rule_says(TKV_EVICT_KNORM, 250);
    leaves_what_the_rule_says(TKV_EVICT_KEYDIFF, 111);
    leaves_what_the_rule_says(TKV_EVICT_RANDOM, 65);
    leaves_what_the_rule_says(TKV_EVICT_FIFO, 1);
}

TEST(norms_are_those_of_the_keys_that_came) { /* whatever they are coded in by now */
    static const tkv_format_pair tight = {TKV_KIVI2, TKV_KIVI2};
    tkv_config cfg = small_config();
    tkv_evict_params p;
    tkv_evict_view v;
    uint64_t victims[WORDS];
    float norms[600], scores[600];
    twins t;
    int i;
    cfg.evict.policy = TKV_EVICT_KNORM;
    cfg.tiers.warm = cfg.tiers.archive = tight;
    t = twins_of(&cfg);
    for (i = 0; i < 3; i++) CHECK_EQ(grow(&t, 0, 200), TKV_OK);
    CHECK_EQ(tkv_read(t.whole, 0, 1, 0, 600, k_out, v_out), TKV_OK);
    key_norms(k_out, 600, norms);
    memset(&v, 0, sizeof v);
    v.n = 600;
    v.norms = norms;
    CHECK_EQ(tkv_select_victims(&cfg.evict, &v, 200, scores, victims, NULL), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = 1;
    p.keep = 200;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_OK);
    for (i = 0; i < 600; i++) CHECK_EQ(is_there(t.kv, 0, 1, i), !in_mask(victims, i));
    sound(t.kv);
    end_of(&t);
}

/* Who goes by attention: four tokens, far back, get nearly all of it from the last 40 queries. */
TEST(what_is_attended_to_stays) {
    static const tkv_evict_policy kinds[] = {TKV_EVICT_H2O,       TKV_EVICT_TOVA,         TKV_EVICT_SNAPKV,
                                             TKV_EVICT_PYRAMIDKV, TKV_EVICT_SCISSORHANDS, TKV_EVICT_SLIDING};
    static const int heavy[4] = {30, 77, 140, 201};
    size_t n;
    for (n = 0; n < sizeof kinds / sizeof *kinds; n++) {
        tkv_config cfg = small_config();
        tkv_evict_config other;
        tkv_evict_params p;
        tkv_cache *kv;
        int i, c, alive = 0;
        cfg.evict.policy = kinds[n];
        cfg.importance.sample_every = 1;
        cfg.importance.strategy = TKV_IMPORTANCE_RECENCY; /* nothing but what the policy wants */
        kv = make(&cfg);
        rng = tkv_rng_seed(5);
        tkv_rng_fill(&rng, k_in, 250 * ROW, .1);
        tkv_rng_fill(&rng, v_in, 250 * ROW, 1.0);
        for (i = 0; i < 4; i++)
            for (c = 0; c < ROW; c++) k_in[heavy[i] * ROW + c] = c % 2 ? 3.0f : -3.0f;
        for (c = 0; c < HEADS * DIM; c++) q_in[c] = c % 2 ? 1.0f : -1.0f;
        CHECK_EQ(tkv_append(kv, 0, 1, k_in, v_in, 250), TKV_OK);
        for (i = 0; i < 40; i++) {
            CHECK_EQ(tkv_append(kv, 0, 1, k_in + ROW, v_in + ROW, 1), TKV_OK);
            CHECK_EQ(tkv_attend(kv, 0, 1, q_in, 1, mine), TKV_OK);
        }
        memset(&p, 0, sizeof p);
        p.layer = 1;
        p.keep = 80;
        memset(&other, 0, sizeof other); /* what is not gathered is not gone by */
        p.evict = &other;
        other.policy = kinds[n] == TKV_EVICT_H2O ? TKV_EVICT_TOVA : TKV_EVICT_H2O;
        CHECK_EQ(tkv_evict(kv, &p), TKV_ERR_CONFIG);
        CHECK_EQ(tkv_get_length(kv, 0, 1), 290);
        p.evict = NULL;
        CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
        for (i = 0; i < 290; i++) alive += is_there(kv, 0, 1, i);
        if (kinds[n] != TKV_EVICT_PYRAMIDKV) CHECK_EQ(alive, 80);
        for (i = 0; i < 4; i++)
            CHECK_MSG(is_there(kv, 0, 1, heavy[i]) == (kinds[n] != TKV_EVICT_SLIDING), "%s: token %d",
                      tkv_get_name(TKV_NAME_EVICT_POLICY, (int)kinds[n]), heavy[i]);
        sound(kv);
        tkv_destroy(kv);
    }
}

TEST(scores_pins_priorities) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    float scores[500];
    signed char priority[500];
    uint64_t pinned[WORDS];
    twins t;
    int i;
    cfg.evict.policy = TKV_EVICT_SCORES;
    t = twins_of(&cfg);
    CHECK_EQ(grow(&t, 1, 250), TKV_OK);
    CHECK_EQ(grow(&t, 1, 250), TKV_OK);
    memset(&p, 0, sizeof p);
    memset(pinned, 0, sizeof pinned);
    memset(priority, 0, sizeof priority);
    for (i = 0; i < 500; i++) scores[i] = (float)(i * 37 % 500);
    for (i = 100; i < 110; i++) add_to_mask(pinned, i);
    for (i = 50; i < 60; i++) priority[i] = 1;
    CHECK_EQ(tkv_seq_pin(t.kv, 1, 200, 7, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_pin(t.kv, 1, 203, 1, TKV_OFF), TKV_OK);
    p.seq = 1;
    p.keep = 60;
    p.pinned_mask = pinned;
    p.priorities = priority;
    p.scores = scores;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_OK); /* of layer 0 alone */
    CHECK_EQ(count_of(t.kv, 1, 0), 60);
    CHECK_EQ(count_of(t.kv, 1, 1), 500);
    for (i = 50; i < 60; i++) CHECK(is_there(t.kv, 1, 0, i));
    for (i = 100; i < 110; i++) CHECK(is_there(t.kv, 1, 0, i));
    for (i = 200; i < 207; i++) CHECK_EQ(is_there(t.kv, 1, 0, i), i != 203);
    for (i = 0; i < 4; i++) CHECK(is_there(t.kv, 1, 0, i));
    for (i = 500 - 28; i < 500; i++) CHECK(is_there(t.kv, 1, 0, i)); /* half of 60 - 4 */
    { /* the rest: 60 - 4 - 28 - 10 - 10 - 6 = 2 with the highest scores of those that could go */
        int best[2] = {-1, -1};
        for (i = 4; i < 472; i++) {
            if ((i >= 50 && i < 60) || (i >= 100 && i < 110) || (i >= 200 && i < 207 && i != 203)) continue;
            if (best[0] < 0 || scores[i] > scores[best[0]]) best[1] = best[0], best[0] = i;
            else if (best[1] < 0 || scores[i] > scores[best[1]]) best[1] = i;
        }
        CHECK(is_there(t.kv, 1, 0, best[0]) && is_there(t.kv, 1, 0, best[1]));
    }
    reads_alike(&t, 1, 0, .2);
    scores[499] = tkv_test_float(0x7fc00000u);
    p.keep = 50;
    p.layer = TKV_ALL_LAYERS;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_ERR_NONFINITE);
    CHECK_EQ(count_of(t.kv, 1, 0), 60);
    CHECK_EQ(count_of(t.kv, 1, 1), 500);
    sound(t.kv);
    end_of(&t);
}

TEST(scores_of_the_cache_are_importance) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    float importance[300], least = 1e30f, most = -1e30f, mass[300];
    twins t;
    int i;
    cfg.evict.policy = TKV_EVICT_SCORES;
    cfg.evict.recent_tokens = TKV_OFF;
    cfg.evict.sink_tokens = TKV_OFF;
    cfg.importance.tau = 300.0f;
    t = twins_of(&cfg);
    CHECK_EQ(grow(&t, 0, 100), TKV_OK);
    CHECK_EQ(grow(&t, 0, 200), TKV_OK);
    for (i = 0; i < 300; i++) mass[i] = (float)(i * 71 % 300) * .002f;
    CHECK_EQ(tkv_add_scores(t.kv, 0, 1, 0, 300, mass), TKV_OK);
    CHECK_EQ(tkv_get_importance(t.kv, 0, 1, 0, 300, importance, NULL), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = 1;
    p.keep = 120;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_OK);
    for (i = 0; i < 300; i++)
        if (is_there(t.kv, 0, 1, i)) least = importance[i] < least ? importance[i] : least;
        else most = importance[i] > most ? importance[i] : most;
    CHECK_EQ(count_of(t.kv, 0, 1), 120);
    CHECK(most <= least);
    end_of(&t);
}

static float no_number(void *user, const tkv_evict_view *v, int i) {
    (void)v;
    return *(int *)user ? tkv_test_float(0x7f800000u) : (float)(i % 7);
}

TEST(a_scorer_of_the_users) {
    tkv_config cfg = small_config();
    twins t;
    int mad = 0, i;
    cfg.evict.policy = TKV_EVICT_USER;
    cfg.evict.scorer = no_number;
    cfg.evict.user = &mad;
    cfg.evict.keep_tokens = 128;
    t = twins_of(&cfg);
    for (i = 0; i < 20; i++) {
        mad = i >= 10; /* from then on the oldest go: it is no way to fill the memory */
        CHECK_EQ(grow(&t, 0, 20), TKV_OK);
        CHECK(count_of(t.kv, 0, 0) <= 128);
    }
    sound(t.kv);
    end_of(&t);
}

static float counts_calls(void *user, const tkv_evict_view *v, int i) {
    ++*(int *)user;
    return (float)(v->positions[i] % 7);
}

TEST(scorers_are_asked_once) { /* for each token, be it one layer or all */
    tkv_config cfg = small_config();
    tkv_evict_params p;
    twins t;
    int calls = 0, i;
    cfg.evict.policy = TKV_EVICT_USER;
    cfg.evict.scorer = counts_calls;
    cfg.evict.user = &calls;
    t = twins_of(&cfg);
    CHECK_EQ(grow(&t, 0, 200), TKV_OK);
    memset(&p, 0, sizeof p);
    p.keep = 150;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_OK);
    CHECK_EQ(calls, 200);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 100;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_OK);
    CHECK_EQ(calls, 200 + 150 + (LAYERS - 1) * 200);
    for (i = 0; i < LAYERS; i++) CHECK_EQ(count_of(t.kv, 0, i), 100);
    sound(t.kv);
    end_of(&t);
}

TEST(pyramids) { /* budgets of layers fall, and hold together */
    tkv_config cfg = small_config();
    tkv_evict_params p;
    twins t;
    int layer, sum = 0, last = LONGEST;
    cfg.evict.policy = TKV_EVICT_PYRAMIDKV;
    t = twins_of(&cfg);
    CHECK_EQ(grow(&t, 0, 256), TKV_OK);
    CHECK_EQ(grow(&t, 0, 256), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 200;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++) {
        const int n = count_of(t.kv, 0, layer);
        CHECK(n < last);
        last = n;
        sum += n;
    }
    CHECK_EQ(sum, 600);
    end_of(&t);
}

/* >>what is left */
static void holes_in(tkv_config cfg, double bound) {
    static const int percents[] = {10, 50, 80, 30, 95};
    tkv_attend_params p;
    float slopes[HEADS] = {.5f, .25f, .1f, .01f}, *biased;
    twins t = twins_of(&cfg);
    int i, j;
    biased = (float *)malloc(sizeof(float) * 20 * LONGEST);
    if (!biased) exit(2);
    for (i = 0; i < COUNT(percents); i++) {
        for (j = 0; j < 3; j++) {
            CHECK_EQ(grow(&t, 0, 100), TKV_OK);
            attends_alike(&t, 0, 1, 30, NULL, bound);
        }
        CHECK_EQ(grow(&t, 0, 13), TKV_OK);
        drop_some(&t, 0, 1, percents[i]);
        attends_alike(&t, 0, 1, 1, NULL, bound);
        attends_alike(&t, 0, 1, 7, NULL, bound);
        attends_alike(&t, 0, 1, 40, NULL, bound);
        memset(&p, 0, sizeof p);
        p.window = 150;
        attends_alike(&t, 0, 1, 16, &p, bound);
        p.alibi_slopes = slopes;
        p.softcap = 20.0f;
        attends_alike(&t, 0, 1, 9, &p, bound);
        for (j = 0; j < 20 * LONGEST && i < 3; j++)
            biased[j] = (float)(j % 13) * .1f - (j % 7 == 0 ? 1e30f : 0.0f);
        p.mask = biased;
        p.mask_stride = LONGEST;
        attends_alike(&t, 0, 1, 20, &p, bound);
        reads_alike(&t, 0, 1, bound);
        attends_alike(&t, 0, 0, 20, NULL, bound); /* nothing has gone there */
    }
    CHECK(blocks_of(t.kv, 0, 1) < blocks_of(t.kv, 0, 0) / 2);
    CHECK(blocks_of(t.kv, 0, 1) < live_spans(t.kv, 0, 1)); /* neighbours were merged */
    free(biased);
    end_of(&t);
}

TEST(exact_holes) {
    tkv_config cfg = small_config();
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    holes_in(cfg, FAST_MATH ? 2e-3 : 2e-5);
    cfg.tiers.sink_tokens = TKV_OFF;
    holes_in(cfg, FAST_MATH ? 2e-3 : 2e-5);
}

TEST(coded_holes) { /* errors of formats, of blocks that were coded twice or three times */
    static const tkv_format_pair pairs[] = {
        {TKV_Q8, TKV_Q8}, {TKV_KIVI4, TKV_KIVI4}, {TKV_A40, TKV_R40}, {TKV_FP8_E4M3, TKV_FP8_E4M3}};
    static const double bounds[] = {.03, .4, .4, .15};
    tkv_config cfg = small_config();
    int i;
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    for (i = 0; i < COUNT(pairs); i++) {
        cfg.tiers.warm = cfg.tiers.archive = pairs[i];
        holes_in(cfg, bounds[i]);
    }
}

TEST(keys_before_rope) { /* their tokens stay where they are */
    tkv_config cfg = small_config();
    twins t;
    int i;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KVQUANT4, TKV_KVQUANT4);
    cfg.model.rope.dim = DIM;
    t = twins_of(&cfg);
    for (i = 0; i < 8; i++) {
        CHECK_EQ(grow(&t, 0, 200), TKV_OK);
        drop_some(&t, 0, 1, i == 7 ? 97 : 20);
        attends_alike(&t, 0, 1, 1, NULL, .3);
        reads_alike(&t, 0, 1, .25);
    }
    CHECK_EQ(blocks_of(t.kv, 0, 1), live_spans(t.kv, 0, 1)); /* none was merged */
    CHECK(blocks_of(t.kv, 0, 1) < blocks_of(t.kv, 0, 0));
    end_of(&t);
}

TEST(all_may_go) { /* then nobody is attended to, and the next token is the first to be */
    tkv_config cfg = small_config();
    twins t = twins_of(&cfg);
    int i;
    CHECK_EQ(grow(&t, 0, 200), TKV_OK);
    drop_some(&t, 0, 0, 100);
    CHECK_EQ(count_of(t.kv, 0, 0), 0);
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    CHECK_EQ(tkv_attend(t.kv, 0, 0, q_in, 1, mine), TKV_OK);
    for (i = 0; i < HEADS * DIM; i++) CHECK_NEAR(mine[i], 0, 0);
    CHECK_EQ(grow(&t, 0, 1), TKV_OK);
    CHECK_EQ(count_of(t.kv, 0, 0), 1);
    attends_alike(&t, 0, 0, 1, NULL, FAST_MATH ? 1e-3 : 1e-5);
    CHECK_EQ(grow(&t, 0, 250), TKV_OK);
    attends_alike(&t, 0, 0, 250, NULL, FAST_MATH ? 1e-3 : .01);
    reads_alike(&t, 0, 0, .3);
    sound(t.kv);
    end_of(&t);
}

TEST(cuts) { /* truncating and aborting count positions; what went does not come back */
    tkv_config cfg = small_config();
    twins t;
    int i, len = 0, layer;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    t = twins_of(&cfg);
    for (i = 0; i < 60; i++) {
        const int n = 1 + tkv_rng_below(&rng, 80);
        CHECK_EQ(grow(&t, 0, n), TKV_OK);
        len += n;
        drop_some(&t, 0, i % LAYERS, 20 + i % 70);
        if (i % 3 == 0) {
            len -= tkv_rng_below(&rng, len);
            CHECK_EQ(tkv_seq_truncate(t.kv, 0, len), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(t.whole, 0, len), TKV_OK);
        } else if (i % 3 == 1) {
            const int more = 1 + tkv_rng_below(&rng, 100);
            CHECK_EQ(tkv_seq_begin(t.kv, 0), TKV_OK);
            for (layer = 0; layer < LAYERS; layer++) {
                tkv_rng_fill(&rng, k_in, (size_t)(more * ROW), 1.0);
                CHECK_EQ(tkv_append(t.kv, 0, layer, k_in, k_in, more), TKV_OK);
            }
            CHECK_EQ(evict_named(t.kv, 0, 0, NULL, 0), TKV_ERR_STATE);
            CHECK_EQ(tkv_seq_abort(t.kv, 0), TKV_OK);
        }
        sound(t.kv);
        for (layer = 0; layer < LAYERS && len > 0; layer++) {
            CHECK_EQ(tkv_get_length(t.kv, 0, layer), len);
            reads_alike(&t, 0, layer, 0);
            attends_alike(&t, 0, layer, len < 9 ? len : 9, NULL, FAST_MATH ? 1e-3 : 1e-5);
        }
    }
    CHECK_EQ(tkv_seq_reset(t.kv, 0), TKV_OK);
    sound(t.kv);
    end_of(&t);
}

/* >>anchors */
static int reads_exactly(const twins *t, int layer, int position) {
    float a[2 * ROW], b[2 * ROW];
    CHECK_EQ(tkv_read(t->kv, 0, layer, position, 1, a, a + ROW), TKV_OK);
    CHECK_EQ(tkv_read(t->whole, 0, layer, position, 1, b, b + ROW), TKV_OK);
    return memcmp(a, b, sizeof a) == 0;
}

static int anchors_among(const twins *t, int layer, int from, int to) {
    int i, n = 0;
    for (i = from; i < to; i++) {
        tkv_tier tier = TKV_TIER_HOT;
        CHECK_EQ(tier_of(t->kv, 0, layer, i, &tier), TKV_OK);
        CHECK_EQ(reads_exactly(t, layer, i), tier == TKV_TIER_HOT);
        n += tier == TKV_TIER_HOT;
    }
    return n;
}

TEST(anchors_stay_exact) { /* those that got most, and their places are read again when others got more */
    static const int first[] = {9, 40, 67, 70, 131}, later[] = {300, 301, 302};
    const float one = 1.0f, two = 2.0f;
    tkv_config cfg = small_config();
    tkv_layer_info tiers;
    twins t;
    int i;
    cfg.evict.policy = TKV_EVICT_NONE;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.tiers.n_anchors = 5;
    cfg.importance.sample_every = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    t = twins_of(&cfg);
    CHECK_EQ(grow(&t, 0, 200), TKV_OK);
    for (i = 0; i < COUNT(first); i++) CHECK_EQ(tkv_add_scores(t.kv, 0, 1, first[i], 1, &one), TKV_OK);
    for (i = 0; i < 3; i++) CHECK_EQ(grow(&t, 0, 60), TKV_OK);
    CHECK_EQ(anchors_among(&t, 1, 4, 196), COUNT(first));
    for (i = 0; i < COUNT(first); i++) CHECK(reads_exactly(&t, 1, first[i]));
    attends_alike(&t, 0, 1, 1, NULL, .9);
    sound(t.kv);
    for (i = 0; i < COUNT(later); i++) CHECK_EQ(tkv_add_scores(t.kv, 0, 1, later[i], 1, &two), TKV_OK);
    for (i = 0; i < 4; i++) CHECK_EQ(grow(&t, 0, 60), TKV_OK);
    CHECK_EQ(anchors_among(&t, 1, 4, 440), COUNT(first));
    for (i = 0; i < COUNT(later); i++) CHECK(reads_exactly(&t, 1, later[i]));
    CHECK_EQ(tkv_get_layer(t.kv, 0, 1, &tiers), TKV_OK);
    CHECK_EQ(tiers.tokens[0] + tiers.tokens[1] + tiers.tokens[2], 620);
    CHECK_EQ(tiers.evicted, 0);
    attends_alike(&t, 0, 1, 1, NULL, .9);
    attends_alike(&t, 0, 1, 100, NULL, .9);
    for (i = 0; i < 620; i++) CHECK(is_there(t.kv, 0, 1, i));
    sound(t.kv);
    end_of(&t);
}

TEST(anchors_make_it_better) { /* keys that queries look for: 16 exact ones instead of none */
    double err[2];
    int n;
    for (n = 0; n < 2; n++) {
        tkv_config cfg = small_config();
        twins t;
        double e = 0.0;
        int i, c, step;
        cfg.evict.policy = TKV_EVICT_NONE;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        cfg.tiers.n_anchors = n ? 16 : 0;
        cfg.importance.sample_every = 1;
        t = twins_of(&cfg);
        for (step = 0; step < 12; step++) {
            CHECK_EQ(grow(&t, 0, 60), TKV_OK);
            CHECK_EQ(tkv_read(t.whole, 0, 1, 0, 60 * (step + 1), k_out, v_out), TKV_OK);
            for (i = 0; i < 16; i++) { /* each head looks for one of the tokens 40 i */
                const int at = 40 * i < 60 * (step + 1) ? 40 * i : 0;
                for (c = 0; c < HEADS * DIM; c++)
                    q_in[c] = 3.0f * k_out[at * ROW + c / (HEADS * DIM / KV_HEADS) * DIM + c % DIM];
                CHECK_EQ(tkv_attend(t.kv, 0, 1, q_in, 1, mine), TKV_OK);
                CHECK_EQ(tkv_attend(t.whole, 0, 1, q_in, 1, theirs), TKV_OK);
                for (c = 0; c < HEADS * DIM && step == 11; c++)
                    e += ((double)mine[c] - (double)theirs[c]) * ((double)mine[c] - (double)theirs[c]);
            }
        }
        err[n] = e;
        sound(t.kv);
        end_of(&t);
    }
    CHECK_MSG(err[1] < .25 * err[0], "%.3g with anchors, %.3g without", err[1], err[0]);
}

TEST(anchors_want_sinks_and_no_windows) {
    tkv_config cfg = small_config();
    tkv_layer_config layers[LAYERS];
    cfg.tiers.n_anchors = 28;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_OK);
    cfg.tiers.n_anchors = 29;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg.tiers.n_anchors = 16;
    cfg.model.window = 100;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg.model.window = 0;
    cfg.tiers.sink_tokens = 17;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg.tiers.sink_tokens = TKV_OFF;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg.tiers.sink_tokens = 16;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_OK);
    memset(layers, 0, sizeof layers);
    layers[2].window = 50;
    cfg.layers = layers;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
}

/* >>bytes */
TEST(bytes_come_back) {
    tkv_config cfg = small_config();
    tkv_memory_info before, after;
    tkv_layer_info tiers;
    twins t = twins_of(&cfg);
    int i;
    for (i = 0; i < 8; i++) CHECK_EQ(grow(&t, 0, 250), TKV_OK);
    CHECK_EQ(tkv_get_memory(t.kv, &before), TKV_OK);
    for (i = 0; i < LAYERS; i++) drop_some(&t, 0, i, 75);
    CHECK_EQ(tkv_get_memory(t.kv, &after), TKV_OK);
    CHECK(after.total < before.total * 7 / 10);
    CHECK(after.fp16_bytes < before.fp16_bytes * 3 / 10);
    CHECK_EQ(tkv_get_layer(t.kv, 0, 1, &tiers), TKV_OK);
    CHECK_EQ(tiers.tokens[0] + tiers.tokens[1] + tiers.tokens[2] + tiers.evicted, 2000);
    CHECK_EQ(tiers.tokens[0] + tiers.tokens[1] + tiers.tokens[2], count_of(t.kv, 0, 1));
    end_of(&t);
}

TEST(exact_tokens_move_up) { /* no block but the last is much less than full, whoever goes */
    tkv_config cfg = small_config();
    twins t;
    int i, n;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    t = twins_of(&cfg);
    for (i = 0; i < 8; i++) CHECK_EQ(grow(&t, 0, 250), TKV_OK);
    for (i = 0; i < 5; i++) {
        drop_some(&t, 0, 1, 15);
        n = count_of(t.kv, 0, 1);
        CHECK_MSG(blocks_of(t.kv, 0, 1) <= n / (BLOCK * 3 / 4) + 3, "%d tokens in %d blocks", n,
                  blocks_of(t.kv, 0, 1));
        reads_alike(&t, 0, 1, 0);
        attends_alike(&t, 0, 1, 3, NULL, FAST_MATH ? 1e-3 : 1e-5);
    }
    end_of(&t);
}

typedef struct witness {
    int events, tokens, wrong, last_seq;
    uint64_t gone[LAYERS][WORDS];
} witness;

static void sees(void *user, const tkv_event *e) {
    witness *w = (witness *)user;
    int i;
    if (e->kind != TKV_EVENT_EVICT) return;
    w->events++;
    w->tokens += e->n;
    w->last_seq = e->seq;
    for (i = 0; i < e->n; i++) {
        w->wrong +=
            (i > 0 && e->positions[i] <= e->positions[i - 1]) || in_mask(w->gone[e->layer], e->positions[i]);
        add_to_mask(w->gone[e->layer], e->positions[i]);
    }
}

TEST(under_a_budget) { /* tiers first; then tokens go, and no append is refused; never a byte above it */
    static const tkv_evict_policy kinds[] = {TKV_EVICT_SLIDING, TKV_EVICT_KNORM, TKV_EVICT_RANDOM};
    static witness seen;
    tkv_budget_info b;
    counting_allocator p;
    int i, k, n;
    for (k = 0; k < COUNT(kinds); k++) {
        tkv_config cfg = small_config();
        tkv_memory_info m;
        twins t;
        int first = -1;
        memset(&seen, 0, sizeof seen);
        cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
        cfg.budget.bytes = 500000;
        cfg.evict.policy = kinds[k];
        cfg.host.allocator = counting_allocator_of(&p);
        cfg.host.on_event = sees;
        cfg.host.event_user = &seen;
        t = twins_of(&cfg);
        for (n = 0; n < LONGEST - 50;) {
            const int more = 1 + tkv_rng_below(&rng, 40);
            CHECK_EQ(grow(&t, 0, more), TKV_OK);
            n += more;
            CHECK(p.most <= cfg.budget.bytes);
            if (seen.tokens && first < 0) {
                first = n;
                CHECK_EQ(tkv_get_budget(t.kv, &b), TKV_OK);
                CHECK_EQ(b.level, b.n_levels - 1);
            }
            if (n % 10 == 0) sound(t.kv);
        }
        CHECK(first > 0 && first < LONGEST - 200);
        CHECK_EQ(seen.wrong, 0);
        CHECK_EQ(seen.last_seq, 0);
        for (i = 0; i < LAYERS; i++)
            for (n = 0; n < tkv_get_length(t.kv, 0, TKV_ALL_LAYERS); n++)
                CHECK_EQ(is_there(t.kv, 0, i, n), !in_mask(seen.gone[i], n));
        CHECK_EQ(tkv_get_budget(t.kv, &b), TKV_OK);
        CHECK_EQ(b.evicted, (uint64_t)seen.tokens);
        CHECK_EQ(b.refused, 0);
        CHECK_EQ(tkv_get_memory(t.kv, &m), TKV_OK);
        CHECK(m.total > cfg.budget.bytes / 10 * 7); /* it is made use of */
        reads_alike(&t, 0, 1, .75);
        sound(t.kv);
        end_of(&t);
        CHECK_EQ(p.held, 0);
    }
}

TEST(keys_before_rope_under_a_budget) { /* whole blocks go, the oldest first */
    tkv_config cfg = small_config();
    twins t;
    int n;
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT3);
    cfg.model.rope.dim = DIM;
    cfg.budget.bytes = 500000;
    t = twins_of(&cfg);
    for (n = 0; n < LONGEST - 60; n += 50) CHECK_EQ(grow(&t, 0, 50), TKV_OK);
    CHECK(count_of(t.kv, 0, 1) < n);
    CHECK(is_there(t.kv, 0, 1, n - 1) && is_there(t.kv, 0, 1, 0) && !is_there(t.kv, 0, 1, 10));
    sound(t.kv);
    end_of(&t);
}

TEST(what_is_protected_can_be_too_much) { /* then an append is refused, and nothing has gone */
    tkv_config cfg = small_config();
    twins t;
    tkv_status st = TKV_OK;
    int n = 0, count;
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    cfg.budget.bytes = 400000;
    cfg.evict.recent_tokens = LONGEST;
    t = twins_of(&cfg);
    while (!st && n < LONGEST - 10) {
        count = count_of(t.kv, 0, LAYERS - 1);
        st = grow(&t, 0, 10);
        n += st ? 0 : 10;
    }
    CHECK_EQ(st, TKV_ERR_BUDGET);
    CHECK_EQ(count, n);
    CHECK_EQ(count_of(t.kv, 0, LAYERS - 1), n);
    sound(t.kv);
    end_of(&t);
}

TEST(wrong_arguments) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    uint64_t bits[WORDS];
    twins t = twins_of(&cfg);
    memset(bits, 0xff, sizeof bits);
    memset(&p, 0, sizeof p);
    CHECK_EQ(grow(&t, 0, 100), TKV_OK);
    CHECK_EQ(tkv_evict(NULL, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_evict(t.kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_ERR_ARG); /* keep */
    p.keep = 10;
    p.layer = LAYERS;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_ERR_ARG);
    p.layer = 0;
    p.seq = SEQS;
    CHECK_EQ(tkv_evict(t.kv, &p), TKV_ERR_ARG);
    p.seq = 0;
    CHECK_EQ(evict_named(t.kv, 0, 0, NULL, 1), TKV_ERR_ARG);
    CHECK_EQ(evict_named(t.kv, -1, 0, bits, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_pin(t.kv, 0, -1, 1, TKV_UNLIMITED), TKV_ERR_ARG);
    CHECK_EQ(live_mask_of(t.kv, 0, 0, 0, 101, bits), TKV_ERR_RANGE);
    CHECK_EQ(live_mask_of(t.kv, 0, LAYERS, 0, 1, bits), TKV_ERR_ARG);
    CHECK_EQ(count_of(t.kv, 0, 0), 100);
    CHECK_EQ(evict_named(t.whole, 0, 0, bits, 1), TKV_ERR_STATE);
    CHECK_EQ(live_mask_of(t.whole, 0, 0, 0, 100, bits), TKV_OK);
    CHECK_EQ(bits[0], ~(uint64_t)0);
    CHECK_EQ(bits[1], ((uint64_t)1 << 36) - 1);
    cfg.evict.pool = 2;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    end_of(&t);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(a_window_slides);
    RUN(sinks_outlast_long_chunks);
    RUN(batches);
    RUN(rules_of_keys);
    RUN(norms_are_those_of_the_keys_that_came);
    RUN(what_is_attended_to_stays);
    RUN(scores_pins_priorities);
    RUN(scores_of_the_cache_are_importance);
    RUN(a_scorer_of_the_users);
    RUN(scorers_are_asked_once);
    RUN(pyramids);
    RUN(exact_holes);
    RUN(coded_holes);
    RUN(keys_before_rope);
    RUN(all_may_go);
    RUN(cuts);
    RUN(anchors_stay_exact);
    RUN(anchors_make_it_better);
    RUN(anchors_want_sinks_and_no_windows);
    RUN(bytes_come_back);
    RUN(exact_tokens_move_up);
    RUN(under_a_budget);
    RUN(keys_before_rope_under_a_budget);
    RUN(what_is_protected_can_be_too_much);
    RUN(wrong_arguments);
    return tkv_test_end();
}
