/*
 * white_rules.c - white-box test of src/rules, which choose tokens and blocks: importance and promotion, eviction,
 * rematerialization. Tests compare each policy with hand-made examples of the definition in its paper, check limits,
 * and compare both selections with a plain sort.
 *
 * It calls internal functions (white.h), and checks that the public functions give the same results.
 */
#include "white.h"
#include "kit.h"

#include <math.h>

enum { MAX_TOKENS = 700 };
#define NAN_ tkv_test_float(0x7fc00000u)
#define INF_ tkv_test_float(0x7f800000u)

/* >>importance */
static tkv_importance_config importance_config_of(tkv_importance_strategy s) {
    tkv_importance_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.strategy = s;
    return cfg;
}

/* out: importance after `steps` steps of attention [steps][n], read `late` steps after the last one. */
static void compute_scores(const tkv_importance_config *cfg, const float *attention, int steps, int n,
                           int late, float *out) {
    tkv_token_importance tokens[8];
    int s;
    memset(tokens, 0, sizeof tokens);
    for (s = 0; s < steps; s++)
        CHECK_EQ(tkv_update_importance(cfg, tokens, NULL, attention + s * n, n, n - 1 + s, NULL), TKV_OK);
    CHECK_EQ(tkv_update_importance(cfg, tokens, NULL, NULL, n, n - 2 + steps + late, out), TKV_OK);
}

TEST(strategies) {
    static const float attention[] = {.5f, .25f, .25f, .1f, .1f, .8f};
    tkv_importance_config cfg = importance_config_of(TKV_IMPORTANCE_ACCUMULATION);
    float x[3];
    int i;
    compute_scores(&cfg, attention, 2, 3, 0, x);
    CHECK_NEAR(x[0], .6, 1e-6);
    CHECK_NEAR(x[1], .35, 1e-6);
    CHECK_NEAR(x[2], 1.05, 1e-6);
    cfg = importance_config_of(TKV_IMPORTANCE_HEAVY_HITTER);
    compute_scores(&cfg, attention, 2, 3, 5, x);
    CHECK_NEAR(x[0], .5, 1e-6);
    CHECK_NEAR(x[1], .25, 1e-6);
    CHECK_NEAR(x[2], .8, 1e-6);
    cfg = importance_config_of(TKV_IMPORTANCE_PERSISTENCE); /* an even share is 1/3 */
    compute_scores(&cfg, attention, 2, 3, 0, x);
    CHECK_NEAR(x[0], -1, 0);
    CHECK_NEAR(x[1], -2, 0);
    CHECK_NEAR(x[2], -1, 0);
    cfg.low = .25f; /* a score equal to low is not below it */
    compute_scores(&cfg, attention, 2, 3, 0, x);
    CHECK_NEAR(x[1], -1, 0);
    cfg = importance_config_of(TKV_IMPORTANCE_RECENCY); /* read at 5: ages 5, 4, 3 */
    compute_scores(&cfg, attention, 2, 3, 2, x);
    for (i = 0; i < 3; i++) CHECK_NEAR(x[i], exp(-(5.0 - i) / 64), 1e-6);
    cfg = importance_config_of(TKV_IMPORTANCE_HYBRID); /* read one step after the last, ages 4, 3, 2 */
    cfg.tau = 10;
    compute_scores(&cfg, attention, 2, 3, 1, x);
    for (i = 0; i < 3; i++)
        CHECK_NEAR(x[i],
                   .7 * .95 * (.95 * (double)attention[i] + (double)attention[3 + i]) +
                       .3 * exp(-(4.0 - i) / 10),
                   1e-6);
    CHECK_STR(tkv_get_name(TKV_NAME_IMPORTANCE, TKV_IMPORTANCE_HYBRID), "hybrid");
    CHECK_STR(tkv_get_name(TKV_NAME_IMPORTANCE, TKV_IMPORTANCE_PERSISTENCE), "persistence");
    CHECK(!tkv_get_name(TKV_NAME_IMPORTANCE, TKV_IMPORTANCE_COUNT));
}

/* A token that is updated rarely has the same score as one that gets zeros in between. */
TEST(decay_is_lazy) {
    tkv_importance_config cfg = importance_config_of(TKV_IMPORTANCE_HYBRID);
    tkv_token_importance often[MAX_TOKENS], seldom[MAX_TOKENS];
    static float attention[MAX_TOKENS], zero[MAX_TOKENS], a[MAX_TOKENS], b[MAX_TOKENS];
    tkv_rng r = tkv_rng_seed(3);
    int step, i;
    memset(often, 0, sizeof often);
    memset(seldom, 0, sizeof seldom);
    for (step = 0; step < 300; step++) {
        for (i = 0; i < MAX_TOKENS; i++) attention[i] = (float)tkv_rng_uniform(&r);
        CHECK_EQ(tkv_update_importance(&cfg, often, NULL, zero, MAX_TOKENS, MAX_TOKENS + step, NULL), TKV_OK);
        if (step % 17) continue;
        CHECK_EQ(tkv_update_importance(&cfg, often, NULL, attention, MAX_TOKENS, MAX_TOKENS + step, NULL),
                 TKV_OK);
        CHECK_EQ(tkv_update_importance(&cfg, seldom, NULL, attention, MAX_TOKENS, MAX_TOKENS + step, NULL),
                 TKV_OK);
    }
    CHECK_EQ(tkv_update_importance(&cfg, often, NULL, NULL, MAX_TOKENS, MAX_TOKENS + 300, a), TKV_OK);
    CHECK_EQ(tkv_update_importance(&cfg, seldom, NULL, NULL, MAX_TOKENS, MAX_TOKENS + 300, b), TKV_OK);
    for (i = 0; i < MAX_TOKENS; i++) CHECK_NEAR(a[i], b[i], 1e-5);
}

/* The attention of a step may be added in pieces, in any order. The bits are the same. */
TEST(order_is_irrelevant) {
    tkv_importance_config cfg = importance_config_of(TKV_IMPORTANCE_HYBRID);
    tkv_token_importance a[MAX_TOKENS], b[MAX_TOKENS];
    static float attention[MAX_TOKENS], x[MAX_TOKENS], y[MAX_TOKENS];
    static int position[MAX_TOKENS];
    tkv_rng r = tkv_rng_seed(4);
    int step, i;
    memset(a, 0, sizeof a);
    memset(b, 0, sizeof b);
    for (step = 0; step < 50; step++) {
        const int cut = tkv_rng_below(&r, MAX_TOKENS);
        for (i = 0; i < MAX_TOKENS; i++) attention[i] = (float)tkv_rng_uniform(&r);
        CHECK_EQ(tkv_update_importance(&cfg, a, NULL, attention, MAX_TOKENS, MAX_TOKENS + step, NULL),
                 TKV_OK);
        CHECK_EQ(tkv_update_importance(&cfg, b + cut, NULL, attention + cut, MAX_TOKENS - cut,
                                       MAX_TOKENS + step, NULL),
                 TKV_OK);
        CHECK_EQ(tkv_update_importance(&cfg, b, NULL, attention, cut, MAX_TOKENS + step, NULL), TKV_OK);
    }
    CHECK_MEM(a, b, sizeof a);
    for (i = 0; i < MAX_TOKENS; i++) position[i] = i;
    CHECK_EQ(tkv_update_importance(&cfg, a, NULL, NULL, MAX_TOKENS, 1000, x), TKV_OK);
    for (i = 0; i < MAX_TOKENS; i += 100)
        CHECK_EQ(tkv_update_importance(&cfg, b + i, position + i, NULL, 100, 1000, y + i), TKV_OK);
    CHECK_MEM(x, y, sizeof x);
}

/* One call that adds and computes does the same as one call for each. Without scores nothing is added. */
TEST(update_adds_and_computes) {
    static const int position[] = {2, 5, 6};
    tkv_token_importance both[3], apart[3], same[3];
    tkv_rng r = tkv_rng_seed(6);
    float attention[3], x[3], y[3];
    int step, i;
    memset(both, 0, sizeof both);
    memset(apart, 0, sizeof apart);
    for (step = 6; step < 40; step += 1 + tkv_rng_below(&r, 3)) {
        const tkv_importance_config cfg =
            importance_config_of((tkv_importance_strategy)(step % TKV_IMPORTANCE_COUNT));
        const int *at = step % 2 ? position : NULL;
        for (i = 0; i < 3; i++) attention[i] = (float)tkv_rng_uniform(&r);
        CHECK_EQ(tkv_update_importance(&cfg, both, at, attention, 3, step, x), TKV_OK);
        CHECK_EQ(tkvi_add_importance(&cfg, apart, attention, 3, step), TKV_OK);
        CHECK_EQ(tkvi_compute_importance(&cfg, apart, at, 3, step, y), TKV_OK);
        CHECK_MEM(both, apart, sizeof both);
        CHECK_MEM(x, y, sizeof x);
        memcpy(same, both, sizeof same);
        CHECK_EQ(tkv_update_importance(&cfg, both, at, NULL, 3, step, y), TKV_OK);
        CHECK_MEM(x, y, sizeof x);
        CHECK_MEM(both, same, sizeof both);
    }
}

/* A call that adds and computes changes nothing if it fails for any reason. */
TEST(a_failed_update_changes_nothing) {
    static const int late[] = {0, 9}, negative[] = {-1, 1};
    tkv_importance_config cfg = importance_config_of(TKV_IMPORTANCE_HYBRID), bad = cfg;
    tkv_token_importance t[2], same[2];
    float attention[2] = {.5f, .5f}, out[2] = {9, 9};
    memset(t, 0, sizeof t);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, 7, NULL), TKV_OK);
    memcpy(same, t, sizeof t);
    CHECK_EQ(tkv_update_importance(&cfg, t, late, attention, 2, 8, out),
             TKV_ERR_ARG); /* position 9 at step 8 */
    CHECK_EQ(tkv_update_importance(&cfg, t, negative, attention, 2, 8, out), TKV_ERR_ARG);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, 6, out), TKV_ERR_ARG);
    bad.tau = .5f;
    CHECK_EQ(tkv_update_importance(&bad, t, NULL, attention, 2, 8, out), TKV_ERR_CONFIG);
    attention[1] = NAN_;
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, 8, out), TKV_ERR_NONFINITE);
    CHECK_MEM(t, same, sizeof t);
    CHECK(out[0] == 9 && out[1] == 9);
}

TEST(score_bounds) {
    static const float q[] = {2, -1, .5f}, low[] = {-1, -3, 0}, high[] = {1, 4, 0};
    static float key[3], query[3], min_key[3], max_key[3];
    tkv_rng r = tkv_rng_seed(2);
    int i, c, t;
    CHECK_NEAR(tkv_bound_score(q, low, high, 3), 5, 1e-6);
    CHECK_NEAR(tkv_bound_score(q, low, high, 1), 2, 1e-6);
    CHECK_EQ(tkv_bound_score(NULL, low, high, 3), 0);
    CHECK_EQ(tkv_bound_score(q, NULL, high, 3), 0);
    CHECK_EQ(tkv_bound_score(q, low, NULL, 3), 0);
    for (i = 0; i < 200; i++) { /* no key within the bounds scores higher */
        float bound;
        for (c = 0; c < 3; c++) {
            query[c] = (float)tkv_rng_gauss(&r);
            min_key[c] = (float)tkv_rng_gauss(&r);
            max_key[c] = min_key[c] + (float)tkv_rng_uniform(&r);
        }
        bound = tkv_bound_score(query, min_key, max_key, 3);
        for (t = 0; t < 20; t++) {
            double dot = 0;
            for (c = 0; c < 3; c++) {
                key[c] = min_key[c] + (max_key[c] - min_key[c]) * (float)tkv_rng_uniform(&r);
                dot += (double)key[c] * (double)query[c];
            }
            CHECK_LE(dot, (double)bound + 1e-5);
        }
    }
}

TEST(invalid_importance_is_refused) {
    tkv_importance_config cfg = importance_config_of(TKV_IMPORTANCE_HYBRID), bad;
    tkv_token_importance t[2], same[2];
    float attention[2], out[2];
    int i;
    memset(t, 0, sizeof t);
    attention[0] = attention[1] = .5f;
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, 7, NULL), TKV_OK);
    memcpy(same, t, sizeof t);
    out[0] = out[1] = 9;
    for (i = 0; i < 4; i++) {
        attention[1] = i == 0 ? NAN_ : i == 1 ? INF_ : i == 2 ? -1.0f : .5f;
        CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, i == 3 ? 6 : 8, NULL),
                 i == 3 ? TKV_ERR_ARG : TKV_ERR_NONFINITE);
    }
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 8, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_update_importance(&cfg, NULL, NULL, attention, 2, 8, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_update_importance(&cfg, NULL, NULL, NULL, 2, 8, out), TKV_ERR_ARG);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, -1, 8, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, -1, NULL), TKV_ERR_ARG);
    for (i = 0; i < 16; i++) {
        bad = cfg;
        if (i == 0) bad.decay = 1.5f;
        if (i == 1) bad.decay = -.5f;
        if (i == 2) bad.decay = NAN_;
        if (i == 3) bad.strategy = TKV_IMPORTANCE_COUNT;
        if (i == 4) bad.tau = .5f;
        if (i == 5) bad.attention = -1;
        if (i == 6) bad.low = INF_;
        if (i == 7) memset(&bad.strategy, 0xff, sizeof bad.strategy); /* -1 */
        if (i == 8) memset(&bad.heads, 0xff, sizeof bad.heads);
        if (i == 9) bad.heads = (tkv_importance_heads)(TKV_IMPORTANCE_SUM + 1);
        if (i == 10) bad.sample_every = -1;
        if (i == 11) bad.sample_every = 1 << 30;
        if (i == 12) bad.recency = -1;
        if (i == 13) bad.recency = 2e6f;
        if (i == 14) bad.tau = 2e9f;
        if (i == 15) bad.low = -1;
        CHECK_EQ(tkv_update_importance(&bad, t, NULL, attention, 2, 8, NULL), TKV_ERR_CONFIG);
        CHECK_EQ(tkv_update_importance(&bad, t, NULL, NULL, 2, 8, out), TKV_ERR_CONFIG);
    }
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 6, out), TKV_ERR_ARG);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 8, NULL), TKV_ERR_ARG);
    CHECK_MEM(t, same, sizeof t);
    CHECK(out[0] == 9 && out[1] == 9);
    CHECK_EQ(tkv_update_importance(NULL, t, NULL, attention, 0, 8, NULL),
             TKV_OK); /* NULL: the default config; 0 tokens */
    CHECK_EQ(tkv_update_importance(NULL, NULL, NULL, NULL, 0, 8, NULL), TKV_OK);
    t[0].step = t[1].step = 0; /* after very many steps the score is 0, without overflow */
    t[0].attention = 3e38f;
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 2147483647, out), TKV_OK);
    CHECK_EQ(out[0], 0);
    t[0].step = -1;
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, 9, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 9, out), TKV_ERR_ARG);
    t[0].step = 0;
    t[0].attention = NAN_;
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, 9, NULL), TKV_ERR_NONFINITE);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 9, out), TKV_ERR_NONFINITE);
}

/* Sums saturate, and a decay far below the smallest double is 0. */
TEST(importance_saturates) {
    static const float largest[] = {FLT_MAX, 0, 0};
    tkv_importance_config cfg = importance_config_of(TKV_IMPORTANCE_ACCUMULATION);
    tkv_token_importance t[3];
    float out[3];
    int i;
    memset(t, 0, sizeof t);
    for (i = 0; i < 2; i++) CHECK_EQ(tkv_update_importance(&cfg, t, NULL, largest, 3, 2 + i, NULL), TKV_OK);
    CHECK_NEAR(t[0].attention, FLT_MAX, 0);
    cfg.attention = 1e6f;
    t[1].attention = -FLT_MAX;
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 3, 3, out), TKV_OK);
    CHECK_NEAR(out[0], FLT_MAX, 0);
    CHECK_NEAR(out[1], -FLT_MAX, 0);
    CHECK_NEAR(out[2], 0, 0);
    for (i = 0; i < 20; i++) {
        const double x = tkvi_power(1e-30, i);
        if (i <= 6) CHECK_NEAR(x * pow(10, 30 * i), 1, 1e-12);
        else CHECK_NEAR(x, 0, 0);
    }
}

/* >>promotion */
/* One step of promotion. Offers all slots, promotes the whole list, and stores the step in moved. Returns the number
 * of promotions in out; -1: the config is invalid. */
static int promote(tkv_promotion_state *p, const float *score, const uint64_t *source, int *moved, int n,
                   int now, int *out) {
    tkvi_promoting best;
    int i;
    if (!tkvi_promoting_begin(&best, p, now)) return -1;
    for (i = 0; i < n; i++) tkvi_promoting_offer(&best, i, score[i], source && tkvi_has(source, i), moved[i]);
    for (i = 0; i < best.found; i++) {
        out[i] = best.out[i];
        moved[out[i]] = now;
    }
    tkvi_promoting_end(&best, p, best.found);
    return best.found;
}

/* TKV_ZERO sets a weight or a threshold to 0. */
TEST(named_zero) {
    tkv_importance_config cfg = importance_config_of(TKV_IMPORTANCE_HYBRID);
    tkv_token_importance t[2];
    tkv_promotion_state p;
    float attention[2] = {.5f, 0.0f}, out[2];
    const float score[2] = {0.0f, .06f};
    const uint64_t source = 3;
    int moved[2] = {TKV_NEVER, TKV_NEVER}, which[TKV_MAX_PROMOTIONS];
    memset(t, 0, sizeof t);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, attention, 2, 1, NULL), TKV_OK);
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 1, out), TKV_OK);
    CHECK_NEAR(out[0], .7 * .5 + .3 * exp(-1.0 / 64), 1e-6);
    CHECK_NEAR(out[1], .3, 1e-6);
    cfg.attention = TKV_ZERO;
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 1, out), TKV_OK);
    CHECK_NEAR(out[0], .3 * exp(-1.0 / 64), 1e-6);
    cfg.attention = 0.0f;
    cfg.recency = TKV_ZERO;
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 1, out), TKV_OK);
    CHECK_NEAR(out[0], .7 * .5, 1e-6);
    CHECK(out[1] >= 0.0f && out[1] <= 0.0f);
    cfg.tau = TKV_ZERO; /* tau cannot be 0 */
    CHECK_EQ(tkv_update_importance(&cfg, t, NULL, NULL, 2, 1, out), TKV_ERR_CONFIG);
    memset(&p, 0, sizeof p);
    CHECK_EQ(promote(&p, score, &source, moved, 2, 1, which), 1);
    moved[0] = moved[1] = TKV_NEVER;
    p.cfg.threshold = TKV_ZERO;
    CHECK_EQ(promote(&p, score, &source, moved, 2, 2, which), 2);
}

TEST(promotion) {
    tkv_promotion_state p;
    static float score[70];
    uint64_t source[2] = {~(uint64_t)0, ~(uint64_t)0};
    int moved[70], out[TKV_MAX_PROMOTIONS], i;
    memset(&p, 0, sizeof p);
    for (i = 0; i < 70; i++) moved[i] = TKV_NEVER;
    score[3] = .2f, score[69] = .9f, score[5] = .2f, score[8] = .05f, score[9] = .049f, score[64] = .5f;
    source[1] &= ~(uint64_t)1; /* slot 64 has no source */
    /* slot 8 is at the threshold, slot 9 below it */
    CHECK_EQ(promote(&p, score, source, moved, 70, 10, out), 4);
    CHECK(out[0] == 69 && out[1] == 3 && out[2] == 5 && out[3] == 8);
    CHECK(moved[69] == 10 && moved[8] == 10 && moved[9] == TKV_NEVER && moved[64] == TKV_NEVER);
    CHECK_EQ(p.promoted, 4);
    CHECK_EQ(p.no_source, 1);
    for (i = 11; i < 14; i++) /* all are in cooldown */
        CHECK_EQ(promote(&p, score, source, moved, 70, i, out), 0);
    CHECK_EQ(promote(&p, score, source, moved, 70, 14, out), 4);
    CHECK_EQ(p.waiting, 12);
    CHECK_EQ(promote(&p, score, NULL, moved, 70, 30, out), 0); /* no slot has a source */
}

TEST(promotion_budget) {
    tkv_promotion_state p;
    tkvi_promoting best;
    static float score[100];
    uint64_t source[2] = {~(uint64_t)0, ~(uint64_t)0};
    int moved[100], out[TKV_MAX_PROMOTIONS], i, step, n_all = 0;
    memset(&p, 0, sizeof p);
    for (i = 0; i < 100; i++) {
        moved[i] = TKV_NEVER;
        score[i] = 1.0f + (float)(i * 37 % 100);
    }
    CHECK_EQ(promote(&p, score, source, moved, 50, 1, out), 8);
    for (i = 1; i < 8; i++) CHECK(score[out[i - 1]] > score[out[i]]);
    CHECK_EQ(promote(&p, score + 50, source, moved + 50, 50, 1, out),
             0); /* the step has no more promotions */
    CHECK_EQ(promote(&p, score + 50, source, moved + 50, 50, 2, out), 8);
    memset(&p, 0, sizeof p);
    p.cfg.per_step = 3;
    p.cfg.cooldown = 40;
    for (i = 0; i < 100; i++) moved[i] = TKV_NEVER;
    for (step = 0; step < 33; step++) { /* each once, the best first */
        const int count = promote(&p, score, source, moved, 100, step, out);
        CHECK_EQ(count, 3);
        for (i = 0; i < count; i++, n_all++) CHECK_EQ(score[out[i]], 100 - n_all);
    }
    CHECK_EQ(p.promoted, 99);
    CHECK(tkvi_promoting_begin(&best, &p, 99)); /* only the first 2 of its list are promoted */
    for (i = 0; i < 5; i++) tkvi_promoting_offer(&best, i, 1.0f + (float)i, 1, TKV_NEVER);
    CHECK_EQ(best.found, 3);
    p.waiting = 0;
    tkvi_promoting_end(&best, &p, 2);
    CHECK_EQ(p.promoted, 101);
    CHECK_EQ(p.waiting, 2 + 1);
    CHECK(tkvi_promoting_begin(&best, &p, 99)); /* the third is still allowed at this step */
    CHECK_EQ(best.room, 1);
}

TEST(promotion_configs) {
    tkv_promotion_state p, same;
    tkvi_promoting best;
    int i;
    for (i = 0; i < 7; i++) {
        memset(&p, 0, sizeof p);
        if (i == 0) p.cfg.per_step = 65;
        if (i == 1) p.cfg.per_step = -1;
        if (i == 2) p.cfg.cooldown = -2;
        if (i == 3) p.cfg.threshold = NAN_;
        if (i == 4) p.cfg.threshold = INF_;
        if (i == 5) p.cfg.per_step = 64;
        if (i == 6) p.cfg.cooldown = TKV_OFF;
        same = p;
        CHECK_EQ(tkvi_promoting_begin(&best, &p, 99), i >= 5);
        CHECK_MEM(&p, &same, sizeof p);
    }
    CHECK_EQ(best.cooldown, 0);
    tkvi_promoting_offer(&best, 1, 1, 1, 99); /* moved at the same step */
    CHECK_EQ(best.found, 1);
}

static const float *sorted_by;
static int compare_best_first(const void *a, const void *b) {
    const int i = *(const int *)a, j = *(const int *)b;
    const float x = sorted_by[i], y = sorted_by[j];
    return x > y ? -1 : x < y ? 1 : i < j ? -1 : i > j;
}

/* Compares the list with a plain sort: many equal scores, both zeros, slots without a source, any capacity. */
TEST(promotion_against_a_sort) {
    static float score[MAX_TOKENS];
    static int want[MAX_TOKENS];
    tkv_rng r = tkv_rng_seed(5);
    uint64_t no_source_mask[(MAX_TOKENS + 63) / 64];
    int round, i;
    for (round = 0; round < 200; round++) {
        const int n = 1 + tkv_rng_below(&r, MAX_TOKENS), capacity = 1 + tkv_rng_below(&r, TKV_MAX_PROMOTIONS);
        const int n_values = round % 2 ? 6 : 1000000; /* many equal scores */
        tkv_promotion_state p;
        tkvi_promoting best;
        int n_eligible = 0, n_above = 0;
        memset(&p, 0, sizeof p);
        p.cfg.per_step = capacity;
        p.cfg.threshold = round % 4 < 2 ? -3e38f : 1e-5f;
        for (i = 0; i < COUNT(no_source_mask); i++) no_source_mask[i] = tkv_rng_u64(&r) & tkv_rng_u64(&r);
        CHECK(tkvi_promoting_begin(&best, &p, round));
        for (i = 0; i < n; i++) {
            const int source = round % 5 >= 2 || !tkvi_has(no_source_mask, i);
            score[i] = (float)(tkv_rng_below(&r, n_values) - n_values / 2) * (round % 3 ? 1e-3f : 1e30f);
            if (tkv_rng_below(&r, 9) == 0) score[i] = tkv_test_float(tkv_rng_below(&r, 2) ? 0x80000000u : 0u);
            n_above += score[i] >= p.cfg.threshold;
            if (source && score[i] >= p.cfg.threshold) want[n_eligible++] = i;
            tkvi_promoting_offer(&best, i, score[i], source, TKV_NEVER);
        }
        sorted_by = score;
        qsort(want, (size_t)n_eligible, sizeof *want, compare_best_first);
        CHECK_EQ(best.found, capacity < n_eligible ? capacity : n_eligible);
        CHECK_EQ(best.waiting, n_eligible - best.found);
        CHECK_EQ(best.no_source, n_above - n_eligible);
        CHECK_MEM(best.out, want, (size_t)best.found * sizeof *want);
    }
}

/* >>eviction: hand-made examples */
static tkv_evict_config evict_config_of(tkv_evict_policy kind, int sinks, int recent) {
    tkv_evict_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.policy = kind;
    cfg.sink_tokens = sinks ? sinks : TKV_OFF;
    cfg.recent_tokens = recent ? recent : TKV_OFF;
    return cfg;
}

static tkv_evict_view view_of(int n) {
    tkv_evict_view v;
    memset(&v, 0, sizeof v);
    v.n = n;
    return v;
}

/* Scores and selects. Checks that tkv_select_victims gives the same results in one call. */
static tkv_evict_result select_victims(const tkv_evict_config *cfg, const tkv_evict_view *v, int keep,
                                       uint64_t *victims) {
    static float score[MAX_TOKENS], again[MAX_TOKENS];
    static uint64_t same[(MAX_TOKENS + 63) / 64];
    tkv_evict_result r, both;
    memset(&r, 0, sizeof r);
    memset(&both, 0, sizeof both);
    CHECK_EQ(tkvi_score_tokens(cfg, v, score), TKV_OK);
    CHECK_EQ(tkvi_select_victims(cfg, v, score, keep, victims, &r), TKV_OK);
    CHECK_EQ(tkv_select_victims(cfg, v, keep, again, same, &both), TKV_OK);
    CHECK_MEM(score, again, (size_t)v->n * sizeof *score);
    CHECK_MEM(victims, same, (size_t)((v->n + 63) / 64) * sizeof *same);
    CHECK_MEM(&r, &both, sizeof r);
    return r;
}

TEST(select_victims) {
    float attention[] = {5, 1, 3, 4}, score[4];
    const uint64_t live_mask = 11;
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_H2O, 0, 0), no_policy;
    tkv_evict_view v = view_of(4);
    tkv_evict_result r;
    uint64_t victims = 99;
    v.total_scores = attention;
    CHECK_EQ(tkv_select_victims(&cfg, &v, 2, score, &victims, NULL), TKV_OK); /* counts are optional */
    CHECK_EQ(victims, 2 | 4);
    CHECK_MEM(score, attention, sizeof attention);
    v.live_mask = &live_mask;
    CHECK_EQ(tkv_select_victims(&cfg, &v, 2, score, &victims, &r), TKV_OK);
    CHECK_EQ(victims, 2);
    CHECK_EQ(score[2], 0); /* this token is not live */
    CHECK_EQ(r.evicted, 1);
    CHECK_EQ(r.kept, 2);
    v.live_mask = NULL;
    victims = 99;
    CHECK_EQ(tkv_select_victims(&cfg, &v, -1, score, &victims, &r), TKV_ERR_ARG);
    CHECK_EQ(tkv_select_victims(&cfg, &v, 2, NULL, &victims, &r), TKV_ERR_ARG);
    CHECK_EQ(tkv_select_victims(&cfg, &v, 2, score, NULL, &r), TKV_ERR_ARG);
    CHECK_EQ(tkv_select_victims(&cfg, NULL, 2, score, &victims, &r), TKV_ERR_ARG);
    CHECK_EQ(tkv_select_victims(NULL, &v, 2, score, &victims, &r), TKV_ERR_CONFIG);
    cfg.pool = 4;
    CHECK_EQ(tkv_select_victims(&cfg, &v, 2, score, &victims, &r), TKV_ERR_CONFIG);
    cfg.pool = 0;
    v.total_scores = NULL; /* the policy's input is missing */
    CHECK_EQ(tkv_select_victims(&cfg, &v, 2, score, &victims, &r), TKV_ERR_ARG);
    v.total_scores = attention;
    memset(&no_policy, 0, sizeof no_policy);
    CHECK_EQ(tkv_select_victims(&no_policy, &v, 3, score, &victims, &r), TKV_ERR_BUDGET);
    attention[2] = NAN_;
    CHECK_EQ(tkv_select_victims(&cfg, &v, 2, score, &victims, &r), TKV_ERR_NONFINITE);
    CHECK_EQ(victims, 99);
    CHECK_EQ(r.kept, 2); /* as before the failed call */
    CHECK_EQ(tkv_select_victims(&no_policy, &v, 4, score, &victims, &r), TKV_OK);
    CHECK_EQ(victims, 0);
    v = view_of(0);
    CHECK_EQ(tkv_select_victims(&cfg, &v, 0, NULL, NULL, &r), TKV_OK);
    CHECK_EQ(r.kept, 0);
}

TEST(h2o) { /* the lowest score is evicted */
    static const float attention[] = {5, 1, 3, 4};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_H2O, 0, 0);
    tkv_evict_view v = view_of(4);
    tkv_evict_result r;
    uint64_t victims;
    v.total_scores = attention;
    r = select_victims(&cfg, &v, 3, &victims);
    CHECK_EQ(victims, 2);
    CHECK_EQ(r.evicted, 1);
    CHECK_EQ(r.kept, 3);
    CHECK_EQ(r.over, 0);
    select_victims(&cfg, &v, 1, &victims);
    CHECK_EQ(victims, 14);
    cfg.sink_tokens = 2; /* now 1 is a sink */
    select_victims(&cfg, &v, 3, &victims);
    CHECK_EQ(victims, 4);
}

/* The newest token has no score yet. If that evicted it, the cache would keep the first tokens for ever. */
TEST(h2o_new_token_survives) {
    static const float attention[] = {9, 8, 7, 6, 5, 4, 3, 0};
    tkv_evict_config cfg;
    tkv_evict_view v = view_of(8);
    uint64_t victims;
    memset(&cfg, 0, sizeof cfg);
    cfg.policy = TKV_EVICT_H2O;
    v.total_scores = attention;
    select_victims(&cfg, &v, 7, &victims); /* 4 sinks, 1 recent: the lowest of 4, 5 and 6 */
    CHECK_EQ(victims, 1 << 6);
    select_victims(&cfg, &v, 4, &victims); /* 3 sinks and the newest stay */
    CHECK_EQ(victims, 0x78);
    cfg = evict_config_of(TKV_EVICT_H2O, 0, 3);
    select_victims(&cfg, &v, 4, &victims);
    CHECK_EQ(victims, 0x1e);
    select_victims(&cfg, &v, 1, &victims); /* the newest stays with any budget */
    CHECK_EQ(victims, 0x7f);
}

TEST(sliding) { /* 5 of 10 tokens stay: 0, 1, 7, 8, 9 */
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_SLIDING, 2, 3);
    tkv_evict_view v = view_of(10);
    tkv_evict_result r;
    uint64_t victims;
    r = select_victims(&cfg, &v, 5, &victims);
    CHECK_EQ(victims, 0x7c);
    CHECK_EQ(r.evicted, 5);
    cfg = evict_config_of(TKV_EVICT_SLIDING, 4, 64); /* sinks and window are more than the budget */
    r = select_victims(&cfg, &v, 8, &victims);
    CHECK_EQ(victims, 0x30);
    CHECK_EQ(r.kept, 8);
    CHECK_EQ(r.sinks, 4);
    CHECK_EQ(r.recent, 4);
    r = select_victims(&cfg, &v, 3, &victims); /* the newest stays first, then sinks */
    CHECK_EQ(victims, 0x1fc);
    CHECK_EQ(r.sinks, 2);
    cfg = evict_config_of(TKV_EVICT_FIFO, 0, 0);
    cfg.sink_tokens = 0;
    select_victims(&cfg, &v, 5, &victims);
    CHECK_EQ(victims, 0x1f);
}

TEST(tova) { /* weights of the last query, with that of the newest token */
    static const float last[] = {.3f, .05f, .2f, .05f, .4f};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_TOVA, 0, 0);
    tkv_evict_view v = view_of(5);
    uint64_t victims;
    v.last_scores = last;
    select_victims(&cfg, &v, 4, &victims);
    CHECK_EQ(victims, 2); /* of equal weights, the older is evicted */
    select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 2 | 4 | 8);
}

TEST(snapkv) {
    static const float observed[] = {0, 9, 0, 0, 0, 3, 3, 0, 0, 0};
    static const double pooled[] = {3, 3, 3, 0, 1, 2, 2, 3, 3, 3};
    const uint64_t live_mask = 0x3f7;
    float with_hole[10];
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_SNAPKV, 0, 3);
    tkv_evict_view v = view_of(10);
    float score[10];
    uint64_t victims;
    int i;
    v.prompt_scores = observed;
    cfg.pool = 3;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    for (i = 0; i < 10; i++) CHECK_NEAR(score[i], pooled[i], 1e-6);
    select_victims(&cfg, &v, 7, &victims);
    CHECK_EQ(victims, 0x38);
    for (i = 0; i < 10; i++) with_hole[i] = observed[i] / 16; /* scores below 1 are pooled alike */
    v.prompt_scores = with_hole;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    for (i = 0; i < 10; i++) CHECK_NEAR(score[i], pooled[i] / 16, 1e-6);
    v.prompt_scores = observed;
    cfg.pool = 1; /* without pooling, the neighbours of 1 are evicted */
    select_victims(&cfg, &v, 7, &victims);
    CHECK_EQ(victims, 0x0d);
    cfg.pool = 0; /* the default of 5 reaches two neighbours */
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    CHECK_NEAR(score[3], 12. / 5, 1e-6);
    CHECK_NEAR(score[4], 6. / 5, 1e-6);
    CHECK_NEAR(score[6], 6. / 5, 1e-6);
    memcpy(with_hole, observed, sizeof with_hole); /* evicted tokens do not count */
    with_hole[3] = NAN_;
    v.prompt_scores = with_hole;
    v.live_mask = &live_mask;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    CHECK_NEAR(score[4], 6. / 5, 1e-6);
    v.prompt_scores = observed;
    v.live_mask = NULL;
    cfg.policy = TKV_EVICT_PYRAMIDKV; /* the same choice, with another budget */
    select_victims(&cfg, &v, 5, &victims);
    CHECK_EQ(victims, 0x73);
    for (i = 0; i < 3; i++) {
        cfg.pool = i == 0 ? 4 : i == 1 ? -1 : 65;
        CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_CONFIG);
    }
}

/* out: norms of keys [n][heads][dim], averaged over the KV heads. */
static void compute_mean_norms(const float *keys, int n, int heads, int dim, float *out) {
    int i, h, c;
    for (i = 0; i < n; i++) {
        double mean = 0;
        for (h = 0; h < heads; h++) {
            const float *k = keys + (i * heads + h) * dim;
            double square = 0;
            for (c = 0; c < dim; c++) square += (double)k[c] * (double)k[c];
            CHECK_NEAR(tkvi_key_norm(tkvi_key_of(keys, i, heads, h, dim), dim), sqrt(square), 1e-12);
            mean += sqrt(square) / heads;
        }
        out[i] = (float)mean;
    }
}

TEST(knorm) { /* the longest key is evicted; heads count by their mean norm */
    static const float keys[] = {3, 4, 0, 1, /**/ 1, 0, 0, 1, /**/ 0, 0, 6, 8, /**/ 2, 0, 0, 0};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_KNORM, 0, 0);
    tkv_evict_view v = view_of(4);
    float norms[4];
    uint64_t victims;
    compute_mean_norms(keys, 4, 2, 2, norms);
    CHECK_NEAR(norms[0], 3, 1e-6);
    CHECK_NEAR(norms[1], 1, 1e-6);
    CHECK_NEAR(norms[2], 5, 1e-6);
    CHECK_NEAR(norms[3], 1, 1e-6);
    v.norms = norms;
    select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 5);
    select_victims(&cfg, &v, 1, &victims);
    CHECK_EQ(victims, 7);
}

/* The anchor is the mean of directions, so a long key does not dominate it. Keys 1 and 2 are equal, key 0 differs. */
TEST(keydiff) {
    static const float keys[] = {10, 0, 0, 1, 0, 1};
    static const float two[] = {1, 0, 0, 2, /**/ 0, 0, 1, 1, /**/ 1, 0, 0, 3};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_KEYDIFF, 0, 0);
    tkv_evict_view v = view_of(3);
    float score[3];
    uint64_t victims;
    v.keys = keys;
    v.n_kv_heads = 1;
    v.head_dim = 2;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    CHECK_NEAR(score[0], -.4472136, 1e-6);
    CHECK_NEAR(score[1], -.8944272, 1e-6);
    CHECK_NEAR(score[2], -.8944272, 1e-6);
    select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 2);
    v.keys = two;
    v.n_kv_heads = 2;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK); /* a key of zeros has similarity 0 */
    CHECK_NEAR(score[0], -(1 + (2 + sqrt(.5)) / sqrt(5 + 2 * sqrt(2.))) / 2, 1e-6);
    CHECK_NEAR(score[1], -(sqrt(.5) * (2 + 2 * sqrt(.5)) / sqrt(5 + 2 * sqrt(2.))) / 2, 1e-6);
    v.head_dim = TKV_MAX_HEAD_DIM + 1;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_ARG);
    v.head_dim = 2;
    v.n_kv_heads = 0;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_ARG);
}

/* A history window of three steps; an even share is a quarter. */
TEST(scissorhands) {
    static const float attention[] = {.7f, .1f, .1f, .1f, .1f, .6f, .2f, .1f, .3f, .1f, .5f, .1f};
    tkv_importance_config count = importance_config_of(TKV_IMPORTANCE_PERSISTENCE);
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_SCISSORHANDS, 0, 0);
    tkv_evict_view v = view_of(4);
    float low_counts[4];
    uint64_t victims;
    int i;
    compute_scores(&count, attention, 3, 4, 0, low_counts);
    CHECK(low_counts[0] == -1 && low_counts[1] == -2 && low_counts[2] == -2 && low_counts[3] == -3);
    v.low_counts = low_counts;
    select_victims(&cfg, &v, 2, &victims); /* two at once */
    CHECK_EQ(victims, 8 | 2);
    for (i = 0; i < 4; i++) low_counts[i] = -low_counts[i];
    select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 8 | 2);
    cfg.recent_tokens = 1;
    select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 4 | 2);
}

static float score_odd_positions(void *user, const tkv_evict_view *v, int i) {
    ++*(int *)user;
    return (float)(v->positions[i] % 2);
}

TEST(user_and_scores) {
    static const int position[] = {2, 3, 5, 8, 13};
    static const float given[] = {0, 1, .5f, .25f, -7};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_USER, 0, 0);
    tkv_evict_view v = view_of(5);
    uint64_t victims;
    int calls = 0;
    float score[5];
    v.positions = position;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_CONFIG);
    cfg.scorer = score_odd_positions;
    cfg.user = &calls;
    select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 1 | 8 | 2);
    CHECK_EQ(calls, 2 * 5); /* evict scores twice */
    cfg = evict_config_of(TKV_EVICT_SCORES, 0, 0);
    v.user_scores = given;
    select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 1 | 8 | 16);
    cfg.sink_tokens = 3; /* sinks are positions 0 to 2; only 2 is present */
    select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 4 | 8 | 16);
}

TEST(
    random_scores) { /* scores depend on seed and position, not on other tokens: splitmix64, the upper 24 bits */
    static const int first[] = {0xe220a8, 0x6e789e, 0x06c45d}; /* as published for the seed 0 */
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_RANDOM, 0, 0);
    tkv_evict_view v = view_of(MAX_TOKENS), few = view_of(MAX_TOKENS / 2);
    static float a[MAX_TOKENS], b[MAX_TOKENS];
    static int position[MAX_TOKENS / 2];
    double mean = 0;
    int i, n_same = 0;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, a), TKV_OK);
    for (i = 0; i < MAX_TOKENS / 2; i++) position[i] = 2 * i + 1;
    few.positions = position;
    CHECK_EQ(tkvi_score_tokens(&cfg, &few, b), TKV_OK);
    for (i = 0; i < MAX_TOKENS / 2; i++) CHECK_NEAR(b[i], a[2 * i + 1], 0);
    for (i = 0; i < 3; i++) CHECK_NEAR(a[i], first[i] / 16777216.0, 0);
    for (i = 0; i < MAX_TOKENS; i++) mean += (double)a[i] / (int)MAX_TOKENS;
    CHECK_NEAR(mean, .5, .05);
    cfg.seed = 1;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, b), TKV_OK);
    for (i = 0; i < MAX_TOKENS; i++) n_same += a[i] <= b[i] && a[i] >= b[i];
    CHECK_LE(n_same, 2);
}

/* >>pins, priorities, limits */
TEST(pins_and_priorities) {
    static const float attention[] = {1, 2, 3, 4, 5, 6};
    const signed char priority[] = {0, -128, 0, 0, 127, 0};
    const uint64_t pinned = 1 | 4, all_mask = 63, live_mask = 0x36;
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_H2O, 0, 0);
    tkv_evict_view v = view_of(6);
    tkv_evict_result r;
    uint64_t victims;
    v.total_scores = attention;
    v.pinned_mask = &pinned;
    r = select_victims(&cfg, &v, 3, &victims);
    CHECK_EQ(victims, 2 | 8 | 16);
    r = select_victims(&cfg, &v, 1, &victims); /* pins exceed the budget: over counts the excess */
    CHECK_EQ(victims, 2 | 8 | 16 | 32);
    CHECK_EQ(r.kept, 2);
    CHECK_EQ(r.over, 1);
    v.pinned_mask = &all_mask;
    r = select_victims(&cfg, &v, 0, &victims);
    CHECK_EQ(victims, 0);
    CHECK_EQ(r.evicted, 0);
    CHECK_EQ(r.over, 6);
    v.pinned_mask = NULL;
    v.priorities = priority;
    select_victims(&cfg, &v, 5, &victims);
    CHECK_EQ(victims, 2);
    select_victims(&cfg, &v, 1, &victims);
    CHECK_EQ(victims, 63 - 16);
    v.priorities = NULL;
    v.live_mask = &live_mask; /* 0 and 3 are evicted already */
    r = select_victims(&cfg, &v, 2, &victims);
    CHECK_EQ(victims, 2 | 4);
    CHECK_EQ(r.kept, 2);
}

TEST(eviction_limits) {
    static const float attention[] = {1, 1, 1, 1, 1};
    float score[5] = {1, 1, 1, 1, 1};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_H2O, 0, 0);
    tkv_evict_view v = view_of(0);
    tkv_evict_result r;
    uint64_t victims = 99;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, NULL), TKV_OK);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, NULL, 3, NULL, &r), TKV_OK);
    CHECK_EQ(r.kept, 0);
    v = view_of(1);
    v.total_scores = attention;
    r = select_victims(&cfg, &v, 1, &victims); /* a single token stays */
    CHECK_EQ(victims, 0);
    r = select_victims(&cfg, &v, 0, &victims);
    CHECK_EQ(victims, 1);
    cfg = evict_config_of(TKV_EVICT_H2O, 4, 32);
    r = select_victims(&cfg, &v, 0, &victims); /* a budget of 0 evicts sinks, too */
    CHECK_EQ(victims, 1);
    CHECK_EQ(r.sinks + r.recent, 0);
    v = view_of(5);
    v.total_scores = attention;
    r = select_victims(&cfg, &v, 5, &victims);
    CHECK_EQ(victims, 0);
    r = select_victims(&cfg, &v, 2000000000, &victims);
    CHECK_EQ(victims, 0);
    CHECK_EQ(r.kept, 5);
    cfg = evict_config_of(TKV_EVICT_H2O, 0, 0);
    r = select_victims(&cfg, &v, 2, &victims); /* equal scores: the oldest are evicted */
    CHECK_EQ(victims, 7);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, score, -1, &victims, &r), TKV_ERR_ARG);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, score, 2, NULL, &r), TKV_ERR_ARG);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, NULL, 2, &victims, &r), TKV_ERR_ARG);
    CHECK_EQ(tkvi_select_victims(&cfg, NULL, score, 2, &victims, &r), TKV_ERR_ARG);
    CHECK_EQ(tkvi_select_victims(NULL, &v, score, 2, &victims, &r), TKV_ERR_CONFIG);
    cfg.policy = TKV_EVICT_COUNT;
    CHECK_EQ(tkvi_select_victims(&cfg, &v, score, 2, &victims, &r), TKV_ERR_CONFIG);
    cfg = evict_config_of(TKV_EVICT_H2O, -5, 0);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, score, 2, &victims, &r), TKV_ERR_CONFIG);
    CHECK_EQ(victims, 7);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, score, 2, &victims, NULL), TKV_ERR_CONFIG);
}

static float score_of_slot(void *user, const tkv_evict_view *v, int slot) {
    (void)v;
    ((int *)user)[slot]++;
    return (float)slot;
}

/* No policy reads the inputs of a slot without a live token: a NaN there does no harm. Its score is 0. */
TEST(empty_slots_are_not_read) {
    enum { N = 40, EMPTY = 30 };
    float x[N], keys[N * 2], score[N];
    int policy, i, asked[N];
    uint64_t live_mask = (((uint64_t)1 << N) - 1) & ~((uint64_t)1 << EMPTY), victims;
    for (i = 0; i < N; i++) {
        x[i] = i == EMPTY ? NAN_ : (float)(i % 7);
        keys[2 * i] = x[i];
        keys[2 * i + 1] = 1;
    }
    for (policy = TKV_EVICT_NONE + 1; policy < TKV_EVICT_COUNT; policy++) {
        tkv_evict_config cfg = evict_config_of((tkv_evict_policy)policy, 0, 0);
        tkv_evict_view v = view_of(N);
        memset(asked, 0, sizeof asked);
        cfg.scorer = score_of_slot;
        cfg.user = asked;
        v.total_scores = v.prompt_scores = v.last_scores = v.norms = v.low_counts = v.user_scores = x;
        v.keys = keys;
        v.n_kv_heads = 1;
        v.head_dim = 2;
        v.live_mask = &live_mask;
        CHECK_MSG(tkvi_score_tokens(&cfg, &v, score) == TKV_OK, "%s", tkvi_evict_name(cfg.policy));
        CHECK_NEAR(score[EMPTY], 0, 0);
        CHECK_EQ(asked[EMPTY], 0);
        CHECK_EQ(asked[0], policy == TKV_EVICT_USER);
        CHECK_EQ(select_victims(&cfg, &v, 30, &victims).evicted, N - 1 - 30);
        CHECK_EQ(victims >> EMPTY & 1, 0);
    }
}

/* A key is finite and its norm is not: an error of the caller, too. */
TEST(long_keys) {
    static const float keys[] = {3e38f, 3e38f, 1, 1};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_KEYDIFF, 0, 0);
    tkv_evict_view v = view_of(2);
    float score[2];
    v.keys = keys;
    v.n_kv_heads = 1;
    v.head_dim = 2;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_NONFINITE);
}

/* Both zeros are equal: the older is evicted. */
TEST(zeros_are_equal) {
    static const float zeros[] = {0.0f, -0.0f, 0.0f, -0.0f};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_SCORES, 0, 0);
    tkv_evict_view v = view_of(4);
    uint64_t victims;
    v.user_scores = zeros;
    CHECK_EQ(select_victims(&cfg, &v, 2, &victims).evicted, 2);
    CHECK_EQ(victims, 3);
}

/* A score that is not finite is an error of the caller. Nothing is evicted. */
TEST(nonfinite_scores) {
    float attention[4] = {1, 2, 3, 4};
    const uint64_t live_mask = 11;
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_H2O, 0, 0);
    tkv_evict_view v = view_of(4);
    tkv_evict_result r;
    float score[4];
    uint64_t victims = 99;
    int i;
    v.total_scores = attention;
    for (i = 0; i < 3; i++) {
        attention[2] = i == 0 ? NAN_ : i == 1 ? INF_ : -INF_;
        CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_NONFINITE);
        CHECK_EQ(tkvi_select_victims(&cfg, &v, attention, 2, &victims, &r), TKV_ERR_NONFINITE);
    }
    CHECK_EQ(victims, 99);
    v.live_mask = &live_mask; /* scores of evicted tokens are not read */
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, attention, 2, &victims, &r), TKV_OK);
    CHECK_EQ(victims, 1);
}

/* What a policy needs must be there, and keys must have a size that memory can have. */
TEST(views_are_checked) {
    static const float keys[3 * 2] = {1, 2, 3, 4, 5, 6};
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_KEYDIFF, 0, 0);
    tkv_evict_view good = view_of(3), v;
    float score[3];
    int i;
    good.keys = keys;
    good.n_kv_heads = 1;
    good.head_dim = 2;
    CHECK_EQ(tkvi_score_tokens(&cfg, &good, score), TKV_OK);
    for (i = 0; i < 8; i++) {
        v = good;
        if (i == 0) v.n_kv_heads = 0;
        if (i == 1) v.head_dim = 0;
        if (i == 2) v.head_dim = TKV_MAX_HEAD_DIM + 1;
        if (i == 3) v.keys = NULL;
        if (i == 4) v.n = -1;
        if (i == 5) v.n = 1 << 30;
        if (i == 6) v.n_kv_heads = -1;
        if (i == 7) { /* more bytes than an address has */
            v.n = (1 << 30) - 1;
            v.n_kv_heads = 2147483647;
            v.head_dim = TKV_MAX_HEAD_DIM;
        }
        CHECK_MSG(tkvi_score_tokens(&cfg, &v, score) == TKV_ERR_ARG, "case %d", i);
    }
    CHECK_EQ(tkvi_score_tokens(&cfg, NULL, score), TKV_ERR_ARG);
    CHECK_EQ(tkvi_score_tokens(&cfg, &good, NULL), TKV_ERR_ARG);
    v = good;
    v.n = 1;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, NULL), TKV_ERR_ARG);
    v.keys = NULL;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_ARG);
    cfg = evict_config_of(TKV_EVICT_SCORES, 0, 0);
    CHECK_EQ(tkvi_score_tokens(&cfg, &good, score), TKV_ERR_ARG); /* no user_scores */
}

/* Each field of a config has two ends. */
TEST(eviction_configs) {
    static const struct {
        const char *field;
        double value;
    } want[] = {{"keep_tokens", -1},   {"keep_tokens", 1 << 30},
                {"keep_first", -1},    {"keep_first", 1 << 30},
                {"keep_first", 1},     {"keep_first", 0},
                {"keep_last", -1},     {"keep_last", 1 << 30},
                {"policy", -1},        {"policy", TKV_EVICT_COUNT},
                {"batch", -1},         {"batch", 1 << 30},
                {"sink_tokens", -2},   {"sink_tokens", 1 << 30},
                {"recent_tokens", -2}, {"recent_tokens", 1 << 30},
                {"pool", -1},          {"pool", 2},
                {"pool", 65},          {"trigger", 2},
                {"trigger", -1},       {"scorer", 0}};
    const tkv_evict_config good = evict_config_of(TKV_EVICT_H2O, 0, 0);
    const char *field = NULL;
    double value = 0;
    int i;
    CHECK(!tkvi_evict_fault(&good, &field, &value));
    for (i = 0; i < COUNT(want); i++) {
        tkv_evict_config bad = good;
        const int x = (int)want[i].value;
        if (i < 2) bad.keep_tokens = x;
        if (i == 2 || i == 3) bad.keep_first = x, bad.keep_last = 1;
        if (i == 4) bad.keep_first = 1; /* one without the other */
        if (i == 5) bad.keep_last = 1;
        if (i == 6 || i == 7) bad.keep_first = 1, bad.keep_last = x;
        if (i == 8 || i == 9) bad.policy = (tkv_evict_policy)x;
        if (i == 10 || i == 11) bad.batch = x;
        if (i == 12 || i == 13) bad.sink_tokens = x;
        if (i == 14 || i == 15) bad.recent_tokens = x;
        if (i >= 16 && i <= 18) bad.pool = x;
        if (i == 19 || i == 20) bad.trigger = (float)x;
        if (i == 21) bad.policy = TKV_EVICT_USER;
        CHECK_MSG(tkvi_evict_fault(&bad, &field, &value) != NULL, "case %d", i);
        CHECK_STR(field + strlen("evict."), want[i].field);
        CHECK_NEAR(value, want[i].value, 0);
    }
}

TEST(positions_are_checked) {
    static const int rising[] = {0, 4, 9}, flat[] = {0, 4, 4}, negative[] = {-1, 4, 9};
    const uint64_t live_mask = 5;
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_FIFO, 0, 0);
    tkv_evict_view v = view_of(3);
    float score[3];
    v.positions = rising;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    CHECK_NEAR(score[2], 9, 0);
    v.positions = negative;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_ARG);
    v.positions = flat;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_ARG);
    v.live_mask = &live_mask;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    v.n = -1;
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_ERR_ARG);
}

TEST(names_and_needs) {
    tkv_evict_view v = view_of(3);
    float score[3];
    int i, kind = -1;
    for (i = 0; i < TKV_EVICT_COUNT; i++) {
        const char *name = tkv_get_name(TKV_NAME_EVICT_POLICY, i);
        tkv_evict_config cfg = evict_config_of((tkv_evict_policy)i, 0, 0);
        REQUIRE(name != NULL);
        CHECK_EQ(tkv_find_name(TKV_NAME_EVICT_POLICY, name, &kind), TKV_OK);
        CHECK_EQ(kind, i);
        cfg.scorer = score_odd_positions;
        if (i != TKV_EVICT_USER) /* a missing input is an error */
            CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), tkvi_evict_needs(cfg.policy) ? TKV_ERR_ARG : TKV_OK);
    }
    CHECK(!tkv_get_name(TKV_NAME_EVICT_POLICY, TKV_EVICT_COUNT));
    CHECK_EQ(tkv_find_name(TKV_NAME_EVICT_POLICY, "best", &kind), TKV_ERR_RANGE);
    CHECK_EQ(tkv_find_name(TKV_NAME_EVICT_POLICY, NULL, &kind), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_name(TKV_NAME_EVICT_POLICY, "h2o", NULL), TKV_ERR_ARG);
    CHECK_EQ(kind, TKV_EVICT_COUNT - 1); /* the last one found */
    CHECK_EQ(tkvi_evict_needs(TKV_EVICT_H2O), TKVI_NEEDS_TOTAL_SCORES);
    CHECK_EQ(tkvi_evict_needs(TKV_EVICT_KEYDIFF), TKVI_NEEDS_KEYS);
    CHECK_EQ(tkvi_evict_needs(TKV_EVICT_COUNT), 0);
}

TEST(no_policy_fails_at_capacity) {
    tkv_evict_config cfg;
    tkv_evict_view v = view_of(5);
    float score[5];
    uint64_t victims = 99;
    memset(&cfg, 0, sizeof cfg);
    CHECK_EQ(tkvi_score_tokens(&cfg, &v, score), TKV_OK);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, score, 4, &victims, NULL), TKV_ERR_BUDGET);
    CHECK_EQ(victims, 99);
    CHECK_EQ(tkvi_select_victims(&cfg, &v, score, 5, &victims, NULL), TKV_OK);
    CHECK_EQ(victims, 0);
}

/* >>a model of a small cache: arrays with an entry per token, compacted by evictions */
typedef struct small_cache {
    int n, position[400];
    float total_score[400], last[400], norms[400], keys[400 * 2], low_count[400];
} small_cache;

static tkv_evict_view view_of_small_cache(const small_cache *s) {
    tkv_evict_view v = view_of(s->n);
    v.positions = s->position;
    v.total_scores = v.prompt_scores = v.user_scores = s->total_score;
    v.last_scores = s->last;
    v.norms = s->norms;
    v.keys = s->keys;
    v.low_counts = s->low_count;
    v.n_kv_heads = 1;
    v.head_dim = 2;
    return v;
}

static float by_total_score(void *user, const tkv_evict_view *v, int i) {
    (void)user;
    return v->total_scores[i];
}

/* Moves the entries that stay to the front of an array of n. Returns their number. */
static int compact(const uint64_t *victims, int n, void *array, size_t size) {
    char *bytes = (char *)array;
    int i, n_kept = 0;
    for (i = 0; i < n; i++) {
        if (tkvi_has(victims, i)) continue;
        memmove(bytes + (size_t)n_kept++ * size, bytes + (size_t)i * size, size);
    }
    return n_kept;
}

static void evict_from_small_cache(small_cache *s, const uint64_t *victims) {
    const int n = s->n;
    s->n = compact(victims, n, s->position, sizeof(int));
    CHECK_EQ(compact(victims, n, s->total_score, sizeof(float)), s->n);
    CHECK_EQ(compact(victims, n, s->last, sizeof(float)), s->n);
    CHECK_EQ(compact(victims, n, s->norms, sizeof(float)), s->n);
    CHECK_EQ(compact(victims, n, s->keys, 2 * sizeof(float)), s->n);
    CHECK_EQ(compact(victims, n, s->low_count, sizeof(float)), s->n);
}

/* The second channel of a token's key. */
static float key_at(int position) { return (float)(position * 37 % 101) / 50.0f - 1.0f; }

/* Appends and evicts, and checks that the cache stays within its budget. The newest token always stays. Sinks stay if
 * the policy protects them. Positions stay in order. */
static void check_budget_holds(tkv_evict_policy kind, int budget, int steps, int chunk, int batch) {
    tkv_rng r = tkv_rng_seed(11);
    tkv_evict_config cfg;
    small_cache s;
    uint64_t victims[8];
    int step, i, next_position = 0;
    memset(&s, 0, sizeof s);
    memset(&cfg, 0, sizeof cfg);
    cfg.policy = kind;
    cfg.scorer = by_total_score;
    cfg.batch = batch;
    for (step = 0; step < steps; step++) {
        const int due = tkvi_evict_due(&cfg, s.n, chunk, budget);
        if (due > 0) {
            const tkv_evict_view v = view_of_small_cache(&s);
            const tkv_evict_result res = select_victims(&cfg, &v, s.n - due, victims);
            CHECK_EQ(res.evicted, due);
            evict_from_small_cache(&s, victims);
            CHECK_EQ(s.n, res.kept);
        }
        for (i = 0; i < chunk; i++) {
            const int slot = s.n++;
            s.position[slot] = next_position++;
            s.total_score[slot] = 0;
            s.norms[slot] = (float)tkv_rng_uniform(&r);
            s.keys[2 * slot] = (float)tkv_rng_gauss(&r);
            s.keys[2 * slot + 1] = key_at(s.position[slot]);
            s.low_count[slot] = 0;
        }
        for (i = 0; i < s.n; i++) {
            s.last[i] = (float)tkv_rng_uniform(&r);
            s.total_score[i] += s.last[i];
            s.low_count[i] += (float)(s.last[i] < .5f);
            CHECK(s.keys[2 * i + 1] == key_at(s.position[i])); /* rows moved with their tokens */
            if (i > 0) CHECK(s.position[i] > s.position[i - 1]);
        }
        CHECK_LE(s.n, budget);
        CHECK_EQ(s.position[s.n - 1], next_position - 1);
        if (kind != TKV_EVICT_FIFO && kind != TKV_EVICT_RANDOM && budget - chunk > 4)
            for (i = 0; i < 4 && i < s.n; i++) CHECK_EQ(s.position[i], i);
    }
}

TEST(budget_holds_for_every_policy) {
    int kind;
    for (kind = TKV_EVICT_SLIDING; kind < TKV_EVICT_COUNT; kind++) {
        check_budget_holds((tkv_evict_policy)kind, 8, 12, 1, 1);
        check_budget_holds((tkv_evict_policy)kind, 8, 50, 3, 0);
        check_budget_holds((tkv_evict_policy)kind, 300, 60, 20, 0);
        check_budget_holds((tkv_evict_policy)kind, 300, 60, 20, 100);
        check_budget_holds((tkv_evict_policy)kind, 1, 5, 1, 0);
    }
}

/* Every query attends to one token, the needle, and a little to the others. Policies that use attention keep the
 * needle for 600 tokens with a budget of 64. Policies that use age do not. */
TEST(attention_keeps_a_needle) {
    static const struct {
        tkv_evict_policy kind;
        tkv_importance_strategy strategy;
        int stays;
    } cases[] = {{TKV_EVICT_SLIDING, TKV_IMPORTANCE_HYBRID, 0},
                 {TKV_EVICT_FIFO, TKV_IMPORTANCE_HYBRID, 0},
                 {TKV_EVICT_H2O, TKV_IMPORTANCE_HYBRID, 1},
                 {TKV_EVICT_TOVA, TKV_IMPORTANCE_HYBRID, 1},
                 {TKV_EVICT_SCISSORHANDS, TKV_IMPORTANCE_HYBRID, 1},
                 {TKV_EVICT_SCORES, TKV_IMPORTANCE_HYBRID, 1},
                 {TKV_EVICT_SCORES, TKV_IMPORTANCE_ACCUMULATION, 1},
                 {TKV_EVICT_SCORES, TKV_IMPORTANCE_HEAVY_HITTER, 1},
                 {TKV_EVICT_SCORES, TKV_IMPORTANCE_PERSISTENCE, 1},
                 {TKV_EVICT_SCORES, TKV_IMPORTANCE_RECENCY, 0}};
    static const tkv_token_importance fresh = {0, 0};
    enum { NEEDLE = 20, BUDGET = 64, STEPS = 600 };
    int c;
    for (c = 0; c < COUNT(cases); c++) {
        tkv_importance_config importance_cfg = importance_config_of(cases[c].strategy);
        tkv_evict_config cfg;
        tkv_token_importance tokens[BUDGET + 1];
        float scores[BUDGET + 1];
        small_cache s;
        uint64_t victims[2];
        tkv_rng r = tkv_rng_seed(77);
        int step, i, has_needle = 0;
        memset(&s, 0, sizeof s);
        memset(&cfg, 0, sizeof cfg);
        cfg.policy = cases[c].kind;
        for (step = 0; step < STEPS; step++) {
            if (tkvi_evict_due(&cfg, s.n, 1, BUDGET) > 0) {
                tkv_evict_view v = view_of_small_cache(&s);
                const int n = s.n;
                CHECK_EQ(tkv_update_importance(&importance_cfg, tokens, s.position, NULL, n, step, scores),
                         TKV_OK);
                v.user_scores = scores;
                select_victims(&cfg, &v, n - tkvi_evict_due(&cfg, n, 1, BUDGET), victims);
                evict_from_small_cache(&s, victims);
                CHECK_EQ(compact(victims, n, tokens, sizeof *tokens), s.n);
            }
            s.position[s.n] = step;
            s.total_score[s.n] = s.low_count[s.n] = 0;
            tokens[s.n++] = fresh;
            for (i = 0; i < s.n; i++) {
                s.last[i] = (float)tkv_rng_uniform(&r) * 1.2f / (float)s.n;
                if (s.position[i] == NEEDLE) s.last[i] = .4f;
                s.total_score[i] += s.last[i];
                s.low_count[i] += (float)(s.last[i] < 1.0f / (float)s.n);
            }
            CHECK_EQ(tkv_update_importance(&importance_cfg, tokens, NULL, s.last, s.n, step, NULL), TKV_OK);
        }
        for (i = 0; i < s.n; i++) has_needle |= s.position[i] == NEEDLE;
        CHECK_MSG(has_needle == cases[c].stays, "%s, %s",
                  tkv_get_name(TKV_NAME_EVICT_POLICY, (int)cases[c].kind),
                  tkv_get_name(TKV_NAME_IMPORTANCE, (int)cases[c].strategy));
    }
}

TEST(tokens_due_for_eviction) {
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_H2O, 0, 0);
    CHECK_EQ(tkvi_evict_due(&cfg, 999, 1, 1000), 0);
    CHECK_EQ(tkvi_evict_due(&cfg, 1000, 1, 1000), 64);
    CHECK_EQ(tkvi_evict_due(&cfg, 1000, 100, 1000), 100);
    CHECK_EQ(tkvi_evict_due(&cfg, 80, 1, 80), 10); /* an eighth */
    CHECK_EQ(tkvi_evict_due(&cfg, 5, 1, 5), 1);
    CHECK_EQ(tkvi_evict_due(&cfg, 3, 100, 5), 3); /* the cache has no more */
    CHECK_EQ(tkvi_evict_due(&cfg, 10, 0, 0), 10);
    cfg.trigger = .9f; /* akv-cache: at nine tenths, 64 at once */
    cfg.batch = 64;
    CHECK_EQ(tkvi_evict_due(&cfg, 899, 1, 1000), 0);
    CHECK_EQ(tkvi_evict_due(&cfg, 900, 1, 1000), 64);
    CHECK_EQ(tkvi_evict_due(&cfg, 2147483647, 2147483647, 1), 2147483647);
}

TEST(batches_equal_single_evictions) { /* with fixed scores */
    static float attention[MAX_TOKENS];
    static int position[MAX_TOKENS];
    static uint64_t victims[11], live_mask[11], victim[11];
    tkv_evict_config cfg = evict_config_of(TKV_EVICT_H2O, 4, 32);
    tkv_evict_view v = view_of(MAX_TOKENS);
    tkv_rng r = tkv_rng_seed(8);
    int i, n_left = MAX_TOKENS;
    for (i = 0; i < MAX_TOKENS; i++) {
        attention[i] = (float)tkv_rng_below(&r, 40);
        position[i] = i;
    }
    v.total_scores = attention;
    v.positions = position;
    select_victims(&cfg, &v, 300, victims);
    memset(live_mask, 0xff, sizeof live_mask);
    v.live_mask = live_mask;
    while (n_left > 300) {
        select_victims(&cfg, &v, --n_left, victim);
        for (i = 0; i < 11; i++) live_mask[i] &= ~victim[i];
    }
    for (i = 0; i < MAX_TOKENS; i++)
        CHECK_EQ(victims[i / 64] >> (i % 64) & 1, 1 - (live_mask[i / 64] >> (i % 64) & 1));
}

/* >>selection of victims against a sort */
static const tkv_evict_view *sorted_view;
static int compare_victims(const void *a, const void *b) {
    const int i = *(const int *)a, j = *(const int *)b;
    const float x = sorted_by[i], y = sorted_by[j];
    if (sorted_view->priorities && sorted_view->priorities[i] != sorted_view->priorities[j])
        return sorted_view->priorities[i] < sorted_view->priorities[j] ? -1 : 1;
    return x < y ? -1 : x > y ? 1 : i < j ? -1 : i > j;
}

TEST(selection_against_a_sort) {
    static float score[MAX_TOKENS];
    static signed char priority[MAX_TOKENS];
    static int position[MAX_TOKENS], order[MAX_TOKENS];
    uint64_t live_mask[12], pinned[12], victims[12], want[12];
    tkv_rng r = tkv_rng_seed(17);
    int round, i;
    for (round = 0; round < 1500; round++) {
        const int n = tkv_rng_below(&r, MAX_TOKENS), keep = tkv_rng_below(&r, n + 2);
        const int n_values = 1 + tkv_rng_below(&r, 1 + tkv_rng_below(&r, 1000));
        tkv_evict_config cfg = evict_config_of(TKV_EVICT_SCORES, tkv_rng_below(&r, 6), tkv_rng_below(&r, 40));
        tkv_evict_view v = view_of(n);
        tkv_evict_result res;
        int n_live = 0, n_candidates = 0, n_seen = 0, sinks = 0, n_evicted, next_position = 0;
        for (i = 0; i < 12; i++) {
            live_mask[i] = tkv_rng_u64(&r) | tkv_rng_u64(&r);
            pinned[i] = tkv_rng_u64(&r) & tkv_rng_u64(&r) & tkv_rng_u64(&r);
            want[i] = 0;
        }
        for (i = 0; i < n; i++) {
            score[i] = ((float)tkv_rng_below(&r, n_values) - (float)n_values / 2) * 1e-4f;
            priority[i] = (signed char)(tkv_rng_below(&r, 3) == 0 ? tkv_rng_below(&r, 256) - 128 : 0);
            next_position += 1 + (tkv_rng_below(&r, 4) == 0);
            position[i] = next_position - 1;
        }
        if (round % 3) v.live_mask = live_mask;
        if (round % 4) v.pinned_mask = pinned;
        if (round % 5) v.priorities = priority;
        if (round % 7) v.positions = position;
        CHECK_EQ(tkvi_select_victims(&cfg, &v, score, keep, victims, &res), TKV_OK);
        for (i = 0; i < n; i++) {
            const int is_live = !v.live_mask || (live_mask[i / 64] >> (i % 64) & 1);
            n_live += is_live;
            sinks += is_live && (v.positions ? position[i] : i) < cfg.sink_tokens;
        }
        CHECK_EQ(res.sinks, sinks < keep - (cfg.recent_tokens > 0) ? sinks
                            : keep > 0                             ? keep - (cfg.recent_tokens > 0)
                                                                   : 0);
        for (i = 0; i < n; i++) {
            if (v.live_mask && !(live_mask[i / 64] >> (i % 64) & 1)) continue;
            n_seen++;
            if (n_live - n_seen < res.recent || n_seen <= res.sinks) continue;
            if (v.pinned_mask && pinned[i / 64] >> (i % 64) & 1) continue;
            order[n_candidates++] = i;
        }
        CHECK_LE(res.sinks + res.recent, keep);
        sorted_by = score;
        sorted_view = &v;
        qsort(order, (size_t)n_candidates, sizeof *order, compare_victims);
        n_evicted = n_live - keep < n_candidates ? n_live - keep : n_candidates;
        n_evicted = n_evicted > 0 ? n_evicted : 0;
        for (i = 0; i < n_evicted; i++) want[order[i] / 64] |= (uint64_t)1 << (order[i] % 64);
        CHECK_EQ(res.evicted, n_evicted);
        CHECK_EQ(res.kept, n_live - n_evicted);
        CHECK_EQ(res.over, n_live - n_evicted > keep ? n_live - n_evicted - keep : 0);
        CHECK_MEM(victims, want, (size_t)((n + 63) / 64) * 8);
    }
}

/* >>budgets of layers */
static int64_t split_budget(tkv_evict_shape shape, int layers, int64_t total, int n, int window, int beta,
                            int *out) {
    tkv_evict_budget b;
    int64_t sum = 0;
    int l;
    memset(&b, 0, sizeof b);
    b.shape = shape;
    b.n_layers = layers;
    b.total = total;
    b.n_tokens = n;
    b.window = window;
    b.beta = beta;
    CHECK_EQ(tkv_split_evict_budget(&b, out), TKV_OK);
    for (l = 0; l < layers; l++) sum += out[l];
    return sum;
}

#define FOUR(a, b, c, d)                                                                                     \
    CHECK_MSG(x[0] == (a) && x[1] == (b) && x[2] == (c) && x[3] == (d), "%d %d %d %d", x[0], x[1], x[2], x[3])

TEST(pyramid_budgets) {
    int x[4];
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4, 400, 1000, 8, 4, x), 400); /* C 100: min 23, max 161 */
    FOUR(169, 123, 77, 31);
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4, 2048, 100000, 0, 0, x), 2048); /* min 25.2, max 982.8 */
    FOUR(991, 672, 352, 33);
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4, 400, 140, 8, 4, x), 400); /* max cut to 132, min 52 */
    FOUR(140, 113, 87, 60);
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4, 400, 1000, 8, 20, x), 400); /* min 4.6 is below the window */
    FOUR(100, 100, 100, 100);
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4, 400, 90, 8, 4, x), 400); /* more than the tokens: uniform */
    FOUR(100, 100, 100, 100);
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4, 30, 1000, 8, 4, x), 30); /* less than the windows */
    FOUR(8, 8, 7, 7);
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4, 400, 7, 8, 4, x), 400); /* fewer tokens than the window */
    FOUR(100, 100, 100, 100);
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4, 43, 1000, TKV_OFF, 1, x), 43); /* beta 1: no pyramid */
    FOUR(11, 11, 11, 10);
    CHECK_EQ(split_budget(TKV_EVICT_UNIFORM, 4, 10, 0, 0, 0, x), 10);
    FOUR(3, 3, 2, 2);
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 1, 77, 1000, 0, 0, x), 77);
}

TEST(linear_budgets) { /* shares 4 : 3 : 2 : 1, which add up to the total */
    int x[4];
    CHECK_EQ(split_budget(TKV_EVICT_LINEAR, 4, 100, 0, 0, 0, x), 100);
    FOUR(40, 30, 20, 10);
    CHECK_EQ(split_budget(TKV_EVICT_LINEAR, 4, 103, 0, 0, 0, x), 103); /* 41.2 30.9 20.6 10.3 */
    FOUR(41, 31, 21, 10);
    CHECK_EQ(split_budget(TKV_EVICT_LINEAR, 4, 4, 0, 0, 0, x), 4);
    FOUR(1, 1, 1, 1);
    CHECK_EQ(split_budget(TKV_EVICT_LINEAR, 4, 5, 0, 0, 0, x), 5);
    FOUR(2, 1, 1, 1);
    CHECK_EQ(split_budget(TKV_EVICT_LINEAR, 1, 9, 0, 0, 0, x), 9);
}

/* Checks sums, order and rounding for many shapes, and the largest budgets. */
TEST(random_layer_budgets) {
    static int x[4096];
    tkv_rng r = tkv_rng_seed(23);
    tkv_evict_budget b;
    int round, l;
    for (round = 0; round < 3000; round++) {
        const int layers = 1 + tkv_rng_below(&r, 80), n = tkv_rng_below(&r, 100000);
        const int window = 1 + tkv_rng_below(&r, 64), beta = 1 + tkv_rng_below(&r, 100);
        const int64_t total = layers + tkv_rng_below(&r, layers * 4000);
        const tkv_evict_shape shape = (tkv_evict_shape)(round % 3);
        const double c = (double)total / layers;
        double min_budget = (c - window) / beta, max_budget = 2 * (c - window) - min_budget;
        CHECK_EQ(split_budget(shape, layers, total, n, window, beta, x), total);
        for (l = 1; l < layers; l++) CHECK(x[l] <= x[l - 1]);
        CHECK_LE(shape == TKV_EVICT_LINEAR ? 1 : 0, x[layers - 1]);
        if (max_budget > n - window) {
            max_budget = n - window;
            min_budget = 2 * (c - window) - max_budget;
        }
        if (fabs(max_budget - min_budget) < 1e-9 || fabs(min_budget - window) < 1e-9) continue;
        if (shape != TKV_EVICT_PYRAMID || layers < 2 || max_budget < min_budget || min_budget < window) {
            max_budget = min_budget = c - window; /* uniform */
        } else {
            CHECK_LE(x[0], n);
        }
        for (l = 0; l < layers && shape != TKV_EVICT_LINEAR; l++)
            CHECK_NEAR(x[l],
                       window + max_budget - (layers > 1 ? l * (max_budget - min_budget) / (layers - 1) : 0),
                       1);
    }
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4096, 4096 * (int64_t)((1 << 30) - 1), (1 << 30) - 1, 8, 100, x),
             4096 * (int64_t)((1 << 30) - 1));
    CHECK_EQ(split_budget(TKV_EVICT_PYRAMID, 4096, 4096 * (int64_t)(1 << 28), (1 << 30) - 1, 8, 100, x),
             4096 * (int64_t)(1 << 28));
    CHECK(x[0] > x[4095]);
    memset(&b, 0, sizeof b);
    b.n_layers = 4;
    b.total = 3;
    for (l = 0; l < 15; l++) {
        tkv_evict_budget bad = b;
        if (l == 0) bad.n_layers = 0;
        if (l == 1) bad.n_layers = 4097;
        if (l == 2) bad.total = -1;
        if (l == 3) bad.total = (int64_t)1 << 40;
        if (l == 4) bad.shape = (tkv_evict_shape)3;
        if (l == 5) bad.shape = TKV_EVICT_LINEAR; /* less than one each */
        if (l == 6) bad.beta = 101;
        if (l == 7) bad.window = -7;
        if (l == 8) bad.n_tokens = -1;
        if (l == 9)
            bad.shape = TKV_EVICT_LINEAR, bad.total = 4 * (int64_t)((1 << 30) - 1); /* exceeds an int */
        if (l == 10) memset(&bad.shape, 0xff, sizeof bad.shape);                    /* -1 */
        if (l == 11) bad.beta = -1;
        if (l == 12) bad.window = 1 << 30;
        if (l == 13) bad.n_tokens = 1 << 30;
        if (l == 14) bad.total = 4 * (int64_t)((1 << 30) - 1) + 1;
        x[0] = 5;
        CHECK_EQ(tkv_split_evict_budget(&bad, x), TKV_ERR_ARG);
        CHECK_EQ(x[0], 5);
    }
    CHECK_EQ(tkv_split_evict_budget(NULL, x), TKV_ERR_ARG);
    CHECK_EQ(tkv_split_evict_budget(&b, NULL), TKV_ERR_ARG);
}

/* >>rematerialization */
static tkv_remat_config model_config(void) {
    tkv_remat_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.n_layers = 2;
    cfg.n_heads = 2;
    cfg.head_dim = 4;
    cfg.layer_params = 1000;
    return cfg;
}

static tkv_remat open_remat(const tkv_remat_config *cfg) {
    tkv_remat r;
    char reason[200] = "x";
    const tkv_status st = tkv_init_remat(&r, cfg, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s", reason);
    CHECK_STR(reason, "");
    return r;
}

enum { BLOCKS = 16 };

static void init_blocks(tkv_remat_block *b, size_t bytes, size_t quantized) {
    int i;
    memset(b, 0, BLOCKS * sizeof *b);
    for (i = 0; i < BLOCKS; i++) {
        b[i].start = 64 * i;
        b[i].end = 64 * i + 64;
        b[i].bytes = bytes;
        b[i].quantized_bytes = quantized;
    }
}

/* Returns the actions as text: k keep, e discard, q quantize. */
static const char *actions_text(const tkv_remat_action *a) {
    static char text[BLOCKS + 1];
    int i;
    for (i = 0; i < BLOCKS; i++)
        text[i] = a[i] == TKV_REMAT_KEEP ? 'k' : a[i] == TKV_REMAT_DISCARD ? 'e' : 'q';
    return text;
}

static const char *decide(tkv_remat *r, const tkv_remat_block *b, double pressure, size_t need,
                          size_t *freed) {
    tkv_remat_action a[BLOCKS];
    CHECK_EQ(tkv_decide_discard(r, b, BLOCKS, 1023, (float)pressure, need, a, freed), TKV_OK);
    return actions_text(a);
}

TEST(remat_flops) {
    tkv_remat_config cfg = model_config();
    tkv_remat r = open_remat(&cfg);
    CHECK_NEAR(tkvi_remat_flops(&r.cfg, 64, 128, 0), 64 * 2 * (2000 + 4 * 2 * 4 * 96.0), 0);
    CHECK_NEAR(tkvi_remat_flops(&r.cfg, 64, 128, 1), 64 * (2000 + 4 * 2 * 4 * 96.0), 0); /* layer 1 only */
    CHECK_NEAR(tkvi_remat_flops(&r.cfg, 0, 128, 0),
               tkvi_remat_flops(&r.cfg, 0, 64, 0) + tkvi_remat_flops(&r.cfg, 64, 128, 0), 0);
    CHECK(tkvi_remat_flops(&r.cfg, 64, 128, 0) <
          tkvi_remat_flops(&r.cfg, 128, 192, 0)); /* early ones are cheaper */
    CHECK_NEAR(tkvi_remat_flops(&r.cfg, 5, 5, 0), 0, 0);
}

TEST(remat_decisions) {
    tkv_remat_config cfg = model_config();
    tkv_remat r = open_remat(&cfg);
    tkv_remat_block b[BLOCKS];
    size_t freed;
    int i;
    init_blocks(b, 1000, 400);
    CHECK_STR(decide(&r, b, .89, 5000, &freed), "kkkkkkkkkkkkkkkk"); /* below the threshold */
    CHECK_EQ(freed, 0);
    CHECK_STR(decide(&r, b, .9, 0, &freed), "kkkkkkkkkkkkkkkk");
    CHECK_STR(decide(&r, b, .95, 1500, &freed), "kqqqkkkkkkkkkkkk"); /* quantizing first; sinks stay */
    CHECK_EQ(freed, 1800);
    CHECK_STR(decide(&r, b, .95, 12000, &freed), "keeeeeeeeqqqqqqq"); /* quantizing is not enough */
    CHECK_EQ(freed, 8 * 1000 + 7 * 600);
    CHECK_STR(decide(&r, b, .95, 100000, &freed), "keeeeeeeeqqqqqqq"); /* 512 tokens stay */
    init_blocks(b, 1000, 1000);
    CHECK_STR(decide(&r, b, 1, 1500, &freed), "keekkkkkkkkkkkkk"); /* no smaller format: discard */
    CHECK_EQ(freed, 2000);
    CHECK_EQ(r.info.discarded, 8 + 8 + 2);
    CHECK_EQ(r.info.quantized, 3 + 7 + 7);
    CHECK_EQ(r.info.kept, 16 * 6 - 18 - 17);
    init_blocks(b, 1000, 400);
    cfg.quantize_price = 1e6; /* discarding is cheaper than quantizing */
    r = open_remat(&cfg);
    CHECK_STR(decide(&r, b, 1, 2500, &freed), "keeekkkkkkkkkkkk");
    cfg.quantize_price = 400; /* age halves the price of block 1, 649 a byte; 911 become 473 for block 2 */
    cfg.age_tokens = 896;
    r = open_remat(&cfg);
    CHECK_STR(decide(&r, b, 1, 2500, &freed), "keqqqkkkkkkkkkkk");
    cfg.quantize_price = 0;
    cfg.age_tokens = 0;
    r = open_remat(&cfg);
    for (i = 1; i < 3; i++) b[i].use = -1; /* attention does not use these two */
    CHECK_STR(decide(&r, b, 1, 2500, &freed), "keeqkkkkkkkkkkkk");
    b[1].discarded = b[2].discarded = 1; /* discarded already: the next ones follow */
    b[1].bytes = b[2].bytes = 0;
    b[1].quantized_bytes = b[2].quantized_bytes = 0;
    CHECK_STR(decide(&r, b, 1, 100000, &freed), "kkkeeeeeeqqqqqqq");
    b[4].discarded = 1; /* sinks are longer than a block; no minimum */
    init_blocks(b, 10, 10);
    cfg.sink_tokens = 65;
    cfg.min_materialized = TKV_OFF;
    r = open_remat(&cfg);
    CHECK_STR(decide(&r, b, 1, 100000, &freed), "kkeeeeeeeeeeeeee");
}

/* A block whose recomputation costs more than the budget of a step is quantized, not discarded. */
TEST(remat_step_budget) {
    tkv_remat_config cfg = model_config();
    tkv_remat r;
    tkv_remat_block b[BLOCKS];
    tkv_remat_action a[BLOCKS];
    size_t freed;
    int first, count;
    init_blocks(b, 1000, 400);
    cfg.quantize_price = 1e9;
    r = open_remat(&cfg);
    cfg.step_flops = tkvi_remat_flops(&r.cfg, 192, 256, 0);
    r = open_remat(&cfg);
    CHECK_STR(decide(&r, b, 1, 5000, &freed), "keeeqqqqkkkkkkkk");
    CHECK_EQ(r.info.over_budget, 1);
    b[1].discarded = b[2].discarded = b[3].discarded = 1;
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 7, &first, &count), TKV_OK);
    CHECK_EQ(first, 1);
    CHECK_EQ(count, 1);
    CHECK_NEAR(r.spent, tkvi_remat_flops(&r.cfg, 64, 128, 0), 0);
    b[1].discarded = 0;
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 7, &first, &count), TKV_OK);
    CHECK_EQ(count, 0); /* this step has no budget left */
    CHECK_EQ(r.info.waited, 2 + 2);
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 8, &first, &count), TKV_OK);
    CHECK_EQ(first, 2);
    CHECK_EQ(count, 1);
    b[2].discarded = 0;
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 9, &first, &count), TKV_OK);
    CHECK_EQ(count, 1); /* every block fits into a step */
    CHECK_EQ(r.info.restored, 3);
    CHECK_NEAR(r.info.flops, tkvi_remat_flops(&r.cfg, 64, 256, 0), 0);
    b[3].discarded = 0;
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 9, &first, &count), TKV_OK);
    CHECK_EQ(count, 0);
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 8, &first, &count), TKV_ERR_ARG);
    b[5].start++;
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 9, &first, &count), TKV_ERR_ARG);
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
    b[5].start--;
    b[5].use = NAN_;
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
    b[5].use = 0;
    b[5].layers = 3;
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
    b[5].layers = -1;
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
    b[5].layers = 0;
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1022, 1, 1, a, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, NAN_, 1, a, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 1, 1, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_decide_discard(&r, NULL, 0, 0, 1, 1, NULL, &freed), TKV_OK);
    CHECK_EQ(freed, 0);
    b[3].bytes = (size_t)-1;
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
}

/* Random blocks and configs. freed is the sum over the actions. Discarded blocks are a run from the front, within all
 * limits. No block is quantized without need. */
TEST(remat_limits_hold) {
    tkv_rng g = tkv_rng_seed(31);
    int round, i;
    for (round = 0; round < 3000; round++) {
        tkv_remat_config cfg = model_config();
        tkv_remat_block b[BLOCKS];
        tkv_remat_action a[BLOCKS];
        tkv_remat r;
        size_t freed = 0, sum = 0, min_saved = (size_t)-1, need = (size_t)tkv_rng_below(&g, 20000);
        int n_held = 0, gap = 0, n_quantized = 0;
        cfg.min_materialized = tkv_rng_below(&g, 1000);
        cfg.sink_tokens = tkv_rng_below(&g, 100);
        cfg.quantize_price = tkv_rng_uniform(&g) * 2000;
        cfg.step_flops = tkv_rng_below(&g, 2) ? 0 : tkv_rng_uniform(&g) * 5e6;
        r = open_remat(&cfg);
        init_blocks(b, 0, 0);
        for (i = 0; i < BLOCKS; i++) {
            b[i].discarded = tkv_rng_below(&g, 5) == 0;
            b[i].bytes = b[i].discarded ? 0 : (size_t)tkv_rng_below(&g, 2000);
            b[i].quantized_bytes = (size_t)tkv_rng_below(&g, 2000);
            b[i].use = (float)(tkv_rng_uniform(&g) * 2 - 1);
            b[i].layers = tkv_rng_below(&g, 3);
        }
        CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1100, .9f, need, a, &freed), TKV_OK);
        for (i = 0; i < BLOCKS; i++) {
            const size_t saved = b[i].quantized_bytes < b[i].bytes ? b[i].bytes - b[i].quantized_bytes : 0;
            if (!b[i].discarded && a[i] != TKV_REMAT_DISCARD) n_held += 64;
            if (a[i] == TKV_REMAT_QUANTIZE) {
                CHECK(saved > 0);
                sum += saved;
                n_quantized++;
                if (saved < min_saved) min_saved = saved;
            }
            if (a[i] == TKV_REMAT_DISCARD) {
                CHECK(!gap && !b[i].discarded && b[i].start >= r.cfg.sink_tokens);
                if (cfg.step_flops > 0)
                    CHECK_LE(tkvi_remat_flops(&r.cfg, b[i].start, b[i].end, b[i].layers), cfg.step_flops);
                sum += b[i].bytes;
            } else if (!b[i].discarded && b[i].start >= r.cfg.sink_tokens) gap = 1;
        }
        CHECK_EQ(freed, sum);
        if (r.info.discarded) CHECK_LE(r.cfg.min_materialized, n_held);
        if (n_quantized && freed >= need) CHECK(freed - need < min_saved);
        CHECK_EQ(r.info.freed, freed);
    }
}

TEST(remat_configs) {
    tkv_remat_config cfg = model_config(), bad;
    tkv_remat r = open_remat(&cfg), same = r;
    char reason[200];
    static const char *const want[] = {
        "n_layers",  "n_heads",          "head_dim",    "layer_params", "layer_params",   "threshold",
        "threshold", "min_materialized", "sink_tokens", "age_tokens",   "quantize_price", "step_flops",
        "n_layers",  "n_heads",          "head_dim",    "threshold",    "n_heads",        "step_flops"};
    int i;
    CHECK_NEAR(r.cfg.threshold, .9, 1e-6);
    CHECK_EQ(r.cfg.min_materialized, 512);
    CHECK_EQ(r.cfg.sink_tokens, 4);
    for (i = 0; i < COUNT(want); i++) {
        bad = cfg;
        if (i == 0) bad.n_layers = 0;
        if (i == 1) bad.n_heads = -2;
        if (i == 2) bad.head_dim = TKV_MAX_HEAD_DIM + 1;
        if (i == 3) bad.layer_params = 0;
        if (i == 4) bad.layer_params = (double)NAN_;
        if (i == 5) bad.threshold = 1.5f;
        if (i == 6) bad.threshold = NAN_;
        if (i == 7) bad.min_materialized = -2;
        if (i == 8) bad.sink_tokens = -9;
        if (i == 9) bad.age_tokens = -1;
        if (i == 10) bad.quantize_price = -1;
        if (i == 11) bad.step_flops = (double)INF_;
        if (i == 12) bad.n_layers = 4097;
        if (i == 13) bad.n_heads = 65537;
        if (i == 14) bad.head_dim = 0;
        if (i == 15) bad.threshold = -.5f;
        if (i == 16) bad.n_heads = 0;
        if (i == 17) bad.step_flops = -1;
        CHECK_EQ(tkv_init_remat(&r, &bad, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_MSG(strstr(reason, want[i]) != NULL, "case %d: %s", i, reason);
    }
    for (i = 0; i < 6; i++) { /* the least and the greatest */
        tkv_remat any;
        bad = cfg;
        if (i < 2) bad.n_layers = i ? 4096 : 1;
        else if (i < 4) bad.n_heads = i % 2 ? 65536 : 1;
        else bad.head_dim = i % 2 ? TKV_MAX_HEAD_DIM : 1;
        CHECK_MSG(tkv_init_remat(&any, &bad, reason, sizeof reason) == TKV_OK, "%d: %s", i, reason);
    }
    CHECK_MEM(&r, &same, sizeof r);
    CHECK_EQ(tkv_init_remat(&r, NULL, NULL, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_init_remat(NULL, &cfg, reason, sizeof reason), TKV_ERR_ARG);
    cfg.n_heads = TKV_OFF; /* recomputing takes no attention */
    cfg.threshold = TKV_ZERO;
    cfg.min_materialized = cfg.sink_tokens = TKV_OFF;
    cfg.quantize_price = .5;
    r = open_remat(&cfg);
    CHECK_NEAR(tkvi_remat_flops(&r.cfg, 64, 128, 0), 64 * 2 * 2000, 0);
    CHECK_EQ(r.cfg.min_materialized + r.cfg.sink_tokens, 0);
    CHECK_NEAR(r.cfg.quantize_price, .5, 0);
    CHECK_NEAR(same.cfg.quantize_price, 8, 0);
}

/* The price falls with the age, which is 0 for the newest block, and with the probability of a use. */
TEST(remat_prices) {
    tkv_remat_config cfg = model_config();
    tkv_remat_block b[BLOCKS];
    tkv_remat r;
    double flops;
    cfg.age_tokens = 100;
    r = open_remat(&cfg);
    init_blocks(b, 1000, 300);
    flops = tkvi_remat_flops(&r.cfg, 64, 128, 0);
    CHECK_NEAR(tkvi_remat_expected(&r.cfg, b + 1, 127), flops, 1e-9 * flops);
    CHECK_NEAR(tkvi_remat_expected(&r.cfg, b + 1, 227), flops / 2, 1e-9 * flops);
    b[1].use = .25f;
    CHECK_NEAR(tkvi_remat_expected(&r.cfg, b + 1, 227), flops / 8, 1e-9 * flops);
    b[1].use = -1;
    CHECK_NEAR(tkvi_remat_expected(&r.cfg, b + 1, 127), -flops, 1e-9 * flops);
}

/* Blocks must follow one another, with fields in range, and the arguments of each call must be there. */
TEST(remat_blocks) {
    const tkv_remat_config cfg = model_config();
    tkv_remat r = open_remat(&cfg);
    const tkv_remat same = r;
    tkv_remat_block b[BLOCKS];
    tkv_remat_action a[BLOCKS];
    int i, first = -5, count = -5;
    for (i = 0; i < 9; i++) {
        init_blocks(b, 1000, 300);
        if (i == 0) b[0].start = -1;
        if (i == 1) b[BLOCKS - 1].end = b[BLOCKS - 1].start;
        if (i == 2) b[3].end--;
        if (i == 3) b[4].layers = -1;
        if (i == 4) b[4].layers = cfg.n_layers + 1;
        if (i == 5) b[4].use = 1.5f;
        if (i == 6) b[4].use = -INF_;
        if (i == 7) b[4].use = NAN_;
        if (i == 8) b[0].end--;
        CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
        CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 0, &first, &count), TKV_ERR_ARG);
    }
    init_blocks(b, 1000, 300);
    CHECK_EQ(tkv_decide_discard(NULL, b, BLOCKS, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_decide_discard(&r, NULL, BLOCKS, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_decide_discard(&r, b, -1, 1023, 1, 1, a, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_decide_discard(&r, NULL, 0, -1, 1, 1, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 0, NULL, &count), TKV_ERR_ARG);
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 0, &first, NULL), TKV_ERR_ARG);
    CHECK(first == -5 && count == -5);
    CHECK_MEM(&r, &same, sizeof r);
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 0, &first, &count), TKV_OK); /* none is discarded */
    CHECK_EQ(first, BLOCKS);
    CHECK_EQ(count, 0);
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 1, 1000, a, NULL), TKV_OK); /* freed is not asked for */
    CHECK_STR(actions_text(a), "kqqkkkkkkkkkkkkk");
    for (i = 1; i < 9; i++) b[i].discarded = 1;
    CHECK_EQ(tkvi_remat_restore(&r, b, BLOCKS, 0, &first, &count), TKV_OK); /* no step_flops: all at once */
    CHECK_EQ(first, 1);
    CHECK_EQ(count, 8);
    r = same; /* discarded blocks count as nothing */
    CHECK_EQ(tkv_decide_discard(&r, b, BLOCKS, 1023, 0, 1000, a, NULL), TKV_OK);
    CHECK_EQ(r.info.kept, BLOCKS - 8);
    CHECK_EQ(r.info.discarded + r.info.quantized, 0);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(strategies);
    RUN(decay_is_lazy);
    RUN(order_is_irrelevant);
    RUN(update_adds_and_computes);
    RUN(a_failed_update_changes_nothing);
    RUN(score_bounds);
    RUN(invalid_importance_is_refused);
    RUN(importance_saturates);
    RUN(named_zero);
    RUN(promotion);
    RUN(promotion_budget);
    RUN(promotion_configs);
    RUN(promotion_against_a_sort);
    RUN(select_victims);
    RUN(h2o);
    RUN(h2o_new_token_survives);
    RUN(sliding);
    RUN(tova);
    RUN(snapkv);
    RUN(knorm);
    RUN(keydiff);
    RUN(scissorhands);
    RUN(user_and_scores);
    RUN(random_scores);
    RUN(pins_and_priorities);
    RUN(eviction_limits);
    RUN(empty_slots_are_not_read);
    RUN(long_keys);
    RUN(zeros_are_equal);
    RUN(nonfinite_scores);
    RUN(views_are_checked);
    RUN(eviction_configs);
    RUN(positions_are_checked);
    RUN(names_and_needs);
    RUN(no_policy_fails_at_capacity);
    RUN(budget_holds_for_every_policy);
    RUN(attention_keeps_a_needle);
    RUN(tokens_due_for_eviction);
    RUN(batches_equal_single_evictions);
    RUN(selection_against_a_sort);
    RUN(pyramid_budgets);
    RUN(linear_budgets);
    RUN(random_layer_budgets);
    RUN(remat_flops);
    RUN(remat_decisions);
    RUN(remat_step_budget);
    RUN(remat_limits_hold);
    RUN(remat_configs);
    RUN(remat_prices);
    RUN(remat_blocks);
    return tkv_test_end();
}
