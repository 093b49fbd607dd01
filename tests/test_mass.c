/*
 * test_mass.c - attention scores that a cache collects. They are compared, in every counting mode, with weights
 * computed here in double from the keys that tkv_read gives. Also: what collecting must not change, importance of
 * a cache's tokens, attention scores from the caller, the best tokens.
 */
#include "kit.h"

#include <math.h>

#if defined(__GNUC__) || defined(__clang__)
#define NEEDS_ATOMICS
#else
#define NEEDS_ATOMICS SKIP("no atomics, nothing is gathered")
#endif

enum { LAYERS = 2, HEADS = 4, DIM = 32, MOST = 1100, CHUNK = 256, LAYER = 1, Q_ROW = HEADS * DIM };

static float k_in[CHUNK * Q_ROW], v_in[CHUNK * Q_ROW], q_in[CHUNK * Q_ROW], keys[MOST * Q_ROW];
static float out[CHUNK * Q_ROW], lse[CHUNK * HEADS], mass[MOST], a_now[MOST], b_now[MOST];
static tkv_rng rng;

/* The importance of a token is its attention score; its age weighs nothing. */
static void gathered_alone(tkv_config *cfg) {
    cfg->importance.attention = 1.0f;
    cfg->importance.recency = TKV_ZERO;
}

static tkv_config config(int kv_heads, int every) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = kv_heads;
    cfg.model.head_dim = DIM;
    cfg.limits.max_append = CHUNK;
    cfg.host.isa = tkv_test_isa();
    cfg.importance.sample_every = every;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    cfg.importance.heads = TKV_IMPORTANCE_SUM; /* each query head tells by itself */
    gathered_alone(&cfg);
    return cfg;
}

static tkv_config exact(int kv_heads, int every) {
    tkv_config cfg = config(kv_heads, every);
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    return cfg;
}

static void feed(tkv_cache *kv, int layer, int n) {
    const int row = last_config.model.n_kv_heads * DIM;
    tkv_rng_fill(&rng, k_in, (size_t)(n * row), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * row), 1.0);
    CHECK_EQ(tkv_append(kv, 0, layer, k_in, v_in, n), TKV_OK);
}

static tkv_attend_params ask_of(int n) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.layer = LAYER;
    p.n = n;
    p.q = q_in;
    p.out = out;
    return p;
}

static void ask(tkv_cache *kv, const tkv_attend_params *p) {
    tkv_rng_fill(&rng, q_in, (size_t)(p->n * Q_ROW), 1.5);
    CHECK_EQ(tkv_attend_ex(kv, p), TKV_OK);
}

/* Attention scores that were gathered of each position of the layer: its importance, as age weighs nothing. */
static void gathered(tkv_cache *kv, int layer, float *a) {
    memset(a, 0, MOST * sizeof *a);
    CHECK_EQ(tkv_get_importance(kv, 0, layer, 0, tkv_get_length(kv, 0, layer), a, NULL), TKV_OK);
}

static int expired_in(const tkv_cache *kv) {
    tkv_layer_info info;
    memset(&info, 0, sizeof info);
    CHECK_EQ(tkv_get_layer(kv, 0, LAYER, &info), TKV_OK);
    return info.expired;
}

/* >>the oracle */
typedef enum way { SUM, LARGEST, LOWS, NEWEST } way;

typedef struct oracle {
    way how;
    int every, newest; /* newest: of so many queries, where how is NEWEST */
    double decay, low; /* low 0: an even share */
    int together;      /* 0: query heads tell one by one; else MAX or SUM of a KV head's, then that */
    double part;       /* 0: 1; of what is told, so much counts */
    int step, told;    /* told: rows and heads that did */
    double want[MOST], unsure[MOST];
} oracle;

static oracle o;

static void expect(way how, int every, double decay) {
    memset(&o, 0, sizeof o);
    o.how = how;
    o.every = every;
    o.decay = decay;
}

static void expect_row(const double *p, const char *seen, int len) {
    const int scaled = o.how == SUM || o.how == LOWS; /* one query that tells stands for `every` of them */
    const double part = (o.part > 0.0 ? o.part : 1.0) * (scaled ? o.every : 1);
    double low = o.low;
    int j, n = 0;
    o.told++;
    for (j = 0; j < len; j++) n += seen[j];
    if (low <= 0.0) low = 1.0 / n;
    for (j = 0; j < len; j++) {
        if (!seen[j]) continue;
        if (o.how == LARGEST) o.want[j] = part * p[j] > o.want[j] ? part * p[j] : o.want[j];
        else if (o.how == LOWS) o.want[j] -= p[j] < low ? part : 0.0;
        else o.want[j] += part * p[j];
        if (o.how == LOWS && fabs(p[j] - low) < 1e-3 * low) o.unsure[j] += part;
    }
}

/* Weights of the call's rows, in double, and what they come to. */
static void expect_call(tkv_cache *kv, const tkv_attend_params *q) {
    static double p[MOST], all[MOST];
    static char seen[MOST];
    const tkv_config *cfg = &last_config;
    const int len = tkv_get_length(kv, 0, LAYER), from = expired_in(kv);
    const int group = cfg->model.n_heads / cfg->model.n_kv_heads, row = cfg->model.n_kv_heads * DIM;
    int i, h, j, c;
    CHECK_EQ(tkv_read(kv, 0, LAYER, from, len - from, keys + from * row, NULL), TKV_OK);
    if (o.step != len)
        for (j = 0; j < len; j++) o.want[j] *= o.how == NEWEST ? 0.0 : pow(o.decay, len - o.step);
    o.step = len;
    for (i = 0; i < q->n; i++)
        for (h = 0; h < cfg->model.n_heads; h++) {
            const int at = len - q->n + i, window = q->window > 0 ? q->window : MOST;
            double top = q->sink_logits ? (double)q->sink_logits[h] : -1e300, sum = 0.0;
            if (o.how == NEWEST ? at < len - o.newest
                                : (at + LAYER * cfg->model.n_kv_heads + h / group) % o.every != 0)
                continue;
            for (j = 0; j < len; j++) {
                const int bit = j - (len - q->n_mask_bits);
                double s = 0.0;
                seen[j] = (char)(j >= from && (q->non_causal || j <= at) && at - j < window);
                if (q->mask && q->mask[i * len + j] < -1e29f) seen[j] = 0;
                if (q->mask_bits && bit >= 0 && !(q->mask_bits[i] >> bit & 1)) seen[j] = 0;
                if (!seen[j]) continue;
                for (c = 0; c < DIM; c++)
                    s += (double)q_in[i * Q_ROW + h * DIM + c] * (double)keys[j * row + h / group * DIM + c];
                s *= (double)cfg->model.scale;
                if (q->softcap > 0.0f) s = (double)q->softcap * tanh(s / (double)q->softcap);
                if (q->alibi_slopes) s += (double)q->alibi_slopes[h] * (j - at);
                if (q->mask) s += (double)q->mask[i * len + j];
                p[j] = s;
                top = s > top ? s : top;
            }
            for (j = 0; j < len; j++) sum += seen[j] ? p[j] = exp(p[j] - top) : 0.0;
            if (q->sink_logits) sum += exp((double)q->sink_logits[h] - top);
            if (!(sum > 0.0)) continue; /* it sees no key */
            for (j = 0; j < len; j++) {
                p[j] /= sum;
                if (h % group == 0) all[j] = 0.0;
                if (o.together == TKV_IMPORTANCE_MAX) all[j] = p[j] > all[j] ? p[j] : all[j];
                else all[j] += p[j];
            }
            if (!o.together) expect_row(p, seen, len);
            else if (h % group == group - 1) expect_row(all, seen, len);
        }
}

/* must: something has been told */
static void compare(tkv_cache *kv, const char *what, int must) {
    const double scale = o.how == SUM || o.how == LOWS ? o.every : 1;
    const double tol = scale * (1e-5 * (o.told + 1) + (o.decay < 1.0 ? 2e-5 : 0.0));
    double most = 0.0, all = 0.0;
    int j, worst = 0;
    gathered(kv, LAYER, a_now);
    for (j = 0; j < MOST; j++) {
        const double e = fabs((double)a_now[j] - o.want[j]) - o.unsure[j];
        if (e > most) most = e, worst = j;
        all += fabs(o.want[j]);
    }
    CHECK(all > 0.0 || !must);
    CHECK_MSG(most <= tol, "%s: %.8f instead of %.8f at %d; %d told", what, (double)a_now[worst],
              o.want[worst], worst, o.told);
}

/* Decodes token by token, then a prompt's chunks, each attended to in one call; compares now and then. */
static void follow(const tkv_config *cfg, const tkv_attend_params *question, const char *what) {
    static const int chunks[] = {1, 1, 1, 64, 1, 1, 100, 5, 9, 200, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    tkv_cache *kv = make(cfg);
    int i;
    for (i = 0; i < COUNT(chunks); i++) {
        tkv_attend_params p = *question;
        p.n = chunks[i];
        feed(kv, LAYER, chunks[i]);
        ask(kv, &p);
        expect_call(kv, &p);
        if (i % 3 == 2) compare(kv, what, 0);
    }
    compare(kv, what, 1);
    sound(kv);
    tkv_destroy(kv);
}

/* >>what is gathered */
TEST(sums) {
    const tkv_attend_params p = ask_of(0);
    static const int kv_heads[] = {1, 2, 4}, every[] = {1, 3, 16};
    int i, j;
    NEEDS_ATOMICS;
    for (i = 0; i < 3; i++)
        for (j = 0; j < 3; j++) {
            const tkv_config cfg = exact(kv_heads[i], every[j]);
            expect(SUM, every[j], 1.0);
            follow(&cfg, &p, "sum");
        }
}

TEST(decay) {
    const tkv_attend_params p = ask_of(0);
    tkv_config cfg = exact(2, 2);
    NEEDS_ATOMICS;
    cfg.importance.strategy = TKV_IMPORTANCE_HYBRID; /* .95 */
    expect(SUM, 2, .95);
    follow(&cfg, &p, "hybrid");
    cfg.importance.strategy = TKV_IMPORTANCE_HEAVY_HITTER;
    cfg.importance.heads = TKV_IMPORTANCE_MAX;
    cfg.importance.decay = .5f;
    expect(LARGEST, 2, .5);
    follow(&cfg, &p, "largest, decayed");
    memset(&cfg.importance, 0, sizeof cfg.importance);
    gathered_alone(&cfg);
    cfg.importance.sample_every = 2;
    cfg.importance.heads = TKV_IMPORTANCE_SUM;
    cfg.evict.policy = TKV_EVICT_H2O; /* as its paper counts, though hybrid would decay */
    expect(SUM, 2, 1.0);
    follow(&cfg, &p, "h2o");
    cfg.importance.decay = .9f;
    expect(SUM, 2, (double)cfg.importance.decay);
    follow(&cfg, &p, "h2o, decayed");
}

TEST(other_ways) {
    const tkv_attend_params p = ask_of(0);
    tkv_config cfg = exact(2, 1);
    NEEDS_ATOMICS;
    cfg.importance.strategy = TKV_IMPORTANCE_HEAVY_HITTER;
    cfg.importance.heads = TKV_IMPORTANCE_MAX;
    expect(LARGEST, 1, 1.0);
    follow(&cfg, &p, "largest");
    cfg.importance.strategy = TKV_IMPORTANCE_PERSISTENCE;
    cfg.importance.heads = TKV_IMPORTANCE_SUM;
    expect(LOWS, 1, 1.0);
    follow(&cfg, &p, "lows");
    cfg.importance.low = .01f;
    expect(LOWS, 1, 1.0);
    o.low = (double)cfg.importance.low;
    follow(&cfg, &p, "below .01");
    memset(&cfg.importance, 0, sizeof cfg.importance);
    gathered_alone(&cfg);
    cfg.importance.sample_every = 1;
    cfg.importance.heads = TKV_IMPORTANCE_SUM;
    cfg.evict.policy = TKV_EVICT_SCISSORHANDS;
    expect(LOWS, 1, 1.0);
    follow(&cfg, &p, "scissorhands");
    cfg.evict.policy = TKV_EVICT_TOVA;
    cfg.importance.sample_every = 16; /* no matter */
    expect(NEWEST, 0, 1.0);
    o.newest = 1;
    follow(&cfg, &p, "tova");
    cfg.evict.policy = TKV_EVICT_SNAPKV;
    expect(NEWEST, 0, 1.0);
    o.newest = 32;
    follow(&cfg, &p, "snapkv");
    cfg.evict.policy = TKV_EVICT_PYRAMIDKV;
    cfg.evict.recent_tokens = 5;
    expect(NEWEST, 0, 1.0);
    o.newest = 5;
    follow(&cfg, &p, "pyramidkv");
}

/* Mean, max and sum of the query heads of a KV head, for each way of counting; with 3 of them, tiles of queries hold
 * whole ones. */
TEST(query_heads) {
    static const tkv_importance_strategy strategies[] = {
        TKV_IMPORTANCE_ACCUMULATION, TKV_IMPORTANCE_HEAVY_HITTER, TKV_IMPORTANCE_PERSISTENCE};
    static const way ways[] = {SUM, LARGEST, LOWS};
    static const int shapes[][2] = {{4, 2}, {4, 1}, {3, 1}};
    int i, s, how;
    NEEDS_ATOMICS;
    for (i = 0; i < COUNT(shapes); i++)
        for (s = 0; s < COUNT(strategies); s++)
            for (how = TKV_IMPORTANCE_MEAN; how <= TKV_IMPORTANCE_SUM; how++) {
                tkv_config cfg = exact(shapes[i][1], 2);
                tkv_attend_params p = ask_of(0);
                const int group = shapes[i][0] / shapes[i][1], is_max = how == TKV_IMPORTANCE_MAX;
                p.q_row_stride = Q_ROW;
                cfg.model.n_heads = shapes[i][0];
                cfg.importance.strategy = strategies[s];
                cfg.importance.heads = (tkv_importance_heads)how;
                expect(ways[s], 2, 1.0);
                if (is_max != (ways[s] == LARGEST))
                    o.together = is_max ? TKV_IMPORTANCE_MAX : TKV_IMPORTANCE_SUM;
                if (how == TKV_IMPORTANCE_MEAN) o.part = 1.0 / group;
                follow(&cfg, &p, is_max ? "max" : how ? "sum" : "mean");
            }
}

/* A mean is a sum but for a constant: the same tokens are the best. With recency it is another weight. */
TEST(mean_and_sum) {
    tkv_ranked best[2][50];
    double ratio;
    tkv_config wrong = exact(1, 1);
    int how, i, count;
    wrong.importance.heads = (tkv_importance_heads)3;
    CHECK_EQ(tkv_validate_config(&wrong, NULL, 0), TKV_ERR_CONFIG);
    NEEDS_ATOMICS;
    for (how = 0; how < 2; how++) {
        tkv_config cfg = exact(1, 1);
        tkv_attend_params p = ask_of(1);
        tkv_cache *kv;
        rng = tkv_rng_seed(5);
        cfg.importance.heads = how ? TKV_IMPORTANCE_SUM : TKV_IMPORTANCE_MEAN;
        kv = make(&cfg);
        feed(kv, LAYER, 200);
        for (i = 0; i < 20; i++) {
            feed(kv, LAYER, 1);
            ask(kv, &p);
        }
        CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, 50, 0, best[how], &count), TKV_OK);
        CHECK_EQ(count, 50);
        tkv_destroy(kv);
    }
    for (i = 0; i < 50; i++) {
        CHECK_EQ(best[0][i].position, best[1][i].position);
        ratio = (double)best[1][i].importance / (double)best[0][i].importance;
        CHECK_NEAR(ratio, HEADS, 1e-3);
    }
}

/* The answers do not depend on it, though tiles of queries may be smaller. */
TEST(query_heads_change_no_answer) {
    static float first[CHUNK * Q_ROW];
    int how, n;
    for (n = 1; n <= 190; n += 63)
        for (how = 0; how < 2; how++) {
            tkv_config cfg = config(1, 1);
            tkv_attend_params p = ask_of(n);
            tkv_cache *kv;
            rng = tkv_rng_seed(6);
            cfg.model.n_heads = 3;
            cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
            cfg.importance.heads = how ? TKV_IMPORTANCE_MAX : TKV_IMPORTANCE_SUM;
            kv = make(&cfg);
            feed(kv, LAYER, 200);
            feed(kv, LAYER, 200);
            memset(out, 0, sizeof out);
            ask(kv, &p);
            if (!how) memcpy(first, out, sizeof out);
            else CHECK_MEM(first, out, sizeof out);
            tkv_destroy(kv);
        }
}

/* >>rates: importance means the same, however few queries tell */
enum { FAMOUS = 30, YOUNG = 8, RATE_TOKENS = 320, RATE_FROM = 192 };

/* Decodes tokens of which FAMOUS gets a third of all attention and each other key an even share of the rest. Averages
 * of the last 128 steps: the importance of FAMOUS, of a key that is as old, and of one that came YOUNG tokens ago. */
static void check_rate(const tkv_config *cfg, double *famous, double *other, double *young) {
    const int row = cfg->model.n_kv_heads * DIM;
    tkv_cache *kv = make(cfg);
    int n, h, c;
    *famous = *other = *young = 0.0;
    memset(q_in, 0, sizeof q_in);
    for (h = 0; h < HEADS; h++) q_in[h * DIM] = 1.0f;
    for (n = 0; n < RATE_TOKENS; n++) {
        memset(k_in, 0, (size_t)row * sizeof *k_in);
        for (c = 0; c < row; c++) v_in[c] = 1.0f;
        CHECK_EQ(tkv_append(kv, 0, LAYER, k_in, v_in, 1), TKV_OK);
        if (n > FAMOUS) {
            tkv_attend_params p = ask_of(1);
            memset(mass, 0, sizeof mass);
            mass[FAMOUS] = logf((float)n / 2.0f); /* a third, whatever n is */
            p.mask = mass;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
        }
        if (n < RATE_FROM) continue;
        CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, n + 1, a_now, NULL), TKV_OK);
        *famous += (double)a_now[FAMOUS] / (RATE_TOKENS - RATE_FROM);
        *other += (double)a_now[FAMOUS + 1] / (RATE_TOKENS - RATE_FROM);
        *young += (double)a_now[n - YOUNG] / (RATE_TOKENS - RATE_FROM);
    }
    tkv_destroy(kv);
}

TEST(rates_mean_the_same) {
    static const tkv_importance_strategy strategy[] = {TKV_IMPORTANCE_HYBRID, TKV_IMPORTANCE_ACCUMULATION,
                                                       TKV_IMPORTANCE_HEAVY_HITTER,
                                                       TKV_IMPORTANCE_PERSISTENCE};
    static const int every[] = {1, 8, 32};
    double famous[3], other[3], young[3];
    int s, i, heads;
    NEEDS_ATOMICS;
    for (s = 0; s < COUNT(strategy); s++)
        for (heads = 1; heads <= 4; heads *= 4) {
            for (i = 0; i < COUNT(every); i++) {
                tkv_config cfg = exact(heads, every[i]);
                cfg.importance.strategy = strategy[s];
                cfg.importance.heads = TKV_IMPORTANCE_MEAN;
                check_rate(&cfg, &famous[i], &other[i], &young[i]);
            }
            printf("\n      %-13s %d KV heads, one in 1, 8, 32: a third of the attention %.3f %.3f %.3f, "
                   "young %.3f %.3f %.3f",
                   tkv_get_name(TKV_NAME_IMPORTANCE, (int)strategy[s]), heads, famous[0], famous[1],
                   famous[2], young[0], young[1], young[2]);
            for (i = 1; i < COUNT(every); i++) {
                CHECK_NEAR(famous[i] - famous[0], 0.0, 0.1 * fabs(famous[0]));
                CHECK_NEAR(young[i] - young[0], 0.0, 0.05 * fabs(famous[0]) + 0.02 * fabs(young[0]));
                CHECK_NEAR(other[i] - other[0], 0.0, 0.05 * fabs(famous[0]) + 0.1 * fabs(other[0]));
            }
            for (i = 0; i < COUNT(every) && strategy[s] == TKV_IMPORTANCE_HYBRID; i++)
                CHECK_LE(young[i] * 3, famous[i]); /* what is looked at matters more than what is new */
        }
    printf("\n     ");
}

/* One sampled query stands for importance_every queries, at the largest rates too. Position 0 is sampled at any
 * rate. */
TEST(largest_rates) {
    static const int every[] = {1,       255,     256,           257,     4096,         4097,
                                1 << 20, 1 << 22, (1 << 23) - 1, 1 << 23, (1 << 30) - 1};
    int i, heads;
    NEEDS_ATOMICS;
    for (i = 0; i < COUNT(every); i++)
        for (heads = 0; heads < 2; heads++) {
            tkv_config cfg = exact(1, every[i]);
            tkv_attend_params p = ask_of(1);
            tkv_cache *kv;
            const double want = (every[i] < 4096 ? every[i] : 4096.0) * (heads ? HEADS : 1);
            cfg.importance.heads = heads ? TKV_IMPORTANCE_SUM : TKV_IMPORTANCE_MEAN;
            kv = make(&cfg);
            p.layer = 0;
            feed(kv, 0, 1);
            ask(kv, &p);
            CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, 1, a_now, NULL), TKV_OK);
            CHECK_NEAR(a_now[0], want, 1e-5 * want);
            sound(kv);
            tkv_destroy(kv);
        }
}

/* What a caller adds counts alike at every rate, also where attention hardly ever tells. */
TEST(mass_from_elsewhere_at_any_rate) {
    static const int every[] = {1, 8, 32, 256, 257, 1000, 1 << 20, (1 << 30) - 1};
    int i, t;
    for (i = 0; i < COUNT(every); i++) {
        const double step = every[i] <= 256 ? every[i] / 1048576.0 : 1.0 / 4096; /* as api.h says */
        tkv_config cfg = exact(2, every[i]);
        tkv_cache *kv = make(&cfg);
        feed(kv, LAYER, 100);
        for (t = 0; t < 100; t++) mass[t] = 0.01f * (float)t;
        CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 100, mass), TKV_OK);
        CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 100, a_now, NULL), TKV_OK);
        for (t = 0; t < 100; t++) CHECK_NEAR(a_now[t], mass[t], 0.5 * step + 1e-6);
        tkv_destroy(kv);
    }
}

/* Calls between two appends are one step; those of the next one begin anew, and so do the readers. */
TEST(one_step_many_calls) {
    tkv_config cfg = exact(2, 1);
    tkv_cache *kv;
    tkv_attend_params p = ask_of(1);
    NEEDS_ATOMICS;
    cfg.evict.policy = TKV_EVICT_TOVA;
    kv = make(&cfg);
    expect(NEWEST, 0, 1.0);
    o.newest = 1;
    feed(kv, LAYER, 100);
    ask(kv, &p);
    expect_call(kv, &p);
    ask(kv, &p);
    expect_call(kv, &p);
    compare(kv, "twice", 1);
    feed(kv, LAYER, 1); /* asked for now is still what the newest query that told has looked at */
    compare(kv, "before the next", 1);
    p.window = 20; /* blocks that it does not reach know nothing new */
    ask(kv, &p);
    expect_call(kv, &p);
    compare(kv, "a window", 1);
    tkv_destroy(kv);
}

TEST(what_changes_logits) {
    static const float alibi[HEADS] = {.02f, .01f, .005f, .0f}, sinks[HEADS] = {2.0f, -1.0f, 5.0f, 0.0f};
    static float mask[40 * MOST];
    static const uint64_t bits[4] = {1, 3, 5, 9};
    tkv_config cfg = exact(2, 1);
    tkv_attend_params p = ask_of(0);
    tkv_cache *kv;
    int i;
    NEEDS_ATOMICS;
    p.softcap = 3.0f;
    p.sink_logits = sinks;
    expect(SUM, 1, 1.0);
    follow(&cfg, &p, "softcap, sinks");
    p.softcap = 0.0f;
    expect(SUM, 1, 1.0);
    follow(&cfg, &p, "sinks");
    p.sink_logits = NULL;
    p.alibi_slopes = alibi;
    p.window = 70;
    expect(SUM, 1, 1.0);
    follow(&cfg, &p, "alibi, window");
    cfg.importance.strategy = TKV_IMPORTANCE_PERSISTENCE;
    expect(LOWS, 1, 1.0);
    follow(&cfg, &p, "lows in a window");
    p.window = 0;
    p.non_causal = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_HEAVY_HITTER;
    cfg.importance.heads = TKV_IMPORTANCE_MAX;
    expect(LARGEST, 1, 1.0);
    follow(&cfg, &p, "not causal");
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    cfg.importance.heads = TKV_IMPORTANCE_SUM;
    p = ask_of(40);
    expect(SUM, 1, 1.0);
    kv = make(&cfg);
    feed(kv, LAYER, 130);
    for (i = 0; i < 40 * 130; i++) mask[i] = i % 7 == 3 ? -1e30f : (float)(i % 5) * .3f;
    for (i = 0; i < 130; i++) mask[3 * 130 + i] = -1e30f; /* a row that sees nothing tells nothing */
    p.mask = mask;
    ask(kv, &p);
    expect_call(kv, &p);
    compare(kv, "mask", 1);
    tkv_destroy(kv);
    kv = make(&cfg);
    expect(SUM, 1, 1.0);
    feed(kv, LAYER, 130);
    p = ask_of(4);
    p.mask_bits = bits;
    p.n_mask_bits = 4;
    p.non_causal = 1;
    ask(kv, &p);
    expect_call(kv, &p);
    compare(kv, "a tree", 1);
    tkv_destroy(kv);
}

/* Coded tiers: the same scores as tkv_attend_params.mass has. */
TEST(coded_tiers) {
    static const tkv_format formats[][2] = {
        {TKV_A30, TKV_R30}, {TKV_KIVI4, TKV_KIVI4}, {TKV_INT8, TKV_INT8}, {TKV_SQUAT2, TKV_KIVI2}};
    int i, j, n;
    NEEDS_ATOMICS;
    for (i = 0; i < COUNT(formats); i++) {
        tkv_config cfg = config(2, 1);
        tkv_attend_params p = ask_of(1);
        tkv_cache *kv;
        double worst = 0.0, all = 0.0;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(formats[i][0], formats[i][1]);
        cfg.tiers.warm_tokens = 128;
        kv = make(&cfg);
        for (n = 0; n < 4; n++) feed(kv, LAYER, 200);
        p.lse = lse;
        p.scores = mass;
        memset(b_now, 0, sizeof b_now);
        for (n = 0; n < 30; n++) {
            p.n = n < 28 ? 1 : 60;
            feed(kv, LAYER, p.n);
            ask(kv, &p);
            for (j = 0; j < tkv_get_length(kv, 0, LAYER); j++) b_now[j] += mass[j];
        }
        gathered(kv, LAYER, a_now);
        for (j = 0; j < MOST; j++) {
            const double e = fabs((double)a_now[j] - (double)b_now[j]);
            worst = e > worst ? e : worst;
            all += (double)a_now[j];
        }
        CHECK_LE(worst, 1e-5 * 148);
        CHECK_NEAR(all, 148.0 * HEADS, .1);
        sound(kv);
        tkv_destroy(kv);
    }
}

/* Prompts in chunks, where instruction sets have kernels for many queries at once. */
TEST(many_queries) {
    static const int kv_heads[] = {1, 4};
    int i, j, c;
    NEEDS_ATOMICS;
    for (i = 0; i < 2; i++) {
        tkv_config cfg = config(kv_heads[i], 3);
        tkv_cache *kv[2];
        double worst = 0.0, all = 0.0;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.host.precise = 1;
        for (c = 0; c < 2; c++) {
            tkv_attend_params p = ask_of(190);
            rng = tkv_rng_seed(77);
            kv[c] = make(&cfg);
            if (c) p.lse = lse, p.scores = mass; /* not with those kernels then */
            for (j = 0; j < 5; j++) {
                feed(kv[c], LAYER, 190);
                ask(kv[c], &p);
            }
        }
        gathered(kv[0], LAYER, a_now);
        gathered(kv[1], LAYER, b_now);
        for (j = 0; j < MOST; j++) {
            const double e = fabs((double)a_now[j] - (double)b_now[j]);
            worst = e > worst ? e : worst;
            all += (double)a_now[j];
        }
        CHECK_LE(worst, 2e-4 * (double)b_now[0] + 1e-2);
        CHECK_NEAR(all, 950.0 * HEADS, 3 * (HEADS + .5));
        for (c = 0; c < 2; c++) tkv_destroy(kv[c]);
    }
}

/* >>what it must not change, or depend on */
static void backwards(void *user, int n, tkv_task task, void *ctx) {
    int i;
    (void)user;
    for (i = n; i-- > 0;) task(ctx, i);
}

static void three_by_turns(void *user, int n, tkv_task task, void *ctx) { /* what 3 workers may come to */
    int i, k;
    (void)user;
    for (k = 2; k >= 0; k--)
        for (i = k; i < n; i += 3) task(ctx, i);
}

/* Hashes of all output, and of what was gathered; the same tokens and queries each time. */
static void life(const tkv_config *cfg, int queries, uint64_t *said, uint64_t *found) {
    tkv_cache *kv = make(cfg);
    tkv_attend_params p = ask_of(queries);
    int i;
    rng = tkv_rng_seed(5);
    *said = *found = HASH_START;
    for (i = 0; i < 4; i++) feed(kv, LAYER, 200);
    for (i = 0; i < 17; i++) {
        feed(kv, LAYER, i % 2 ? 1 : queries);
        ask(kv, &p);
        *said = hash_of_floats(*said, out, queries * Q_ROW);
    }
    if (cfg->evict.policy || cfg->importance.sample_every) {
        gathered(kv, LAYER, a_now);
        *found = hash_of_floats(*found, a_now, MOST);
    }
    tkv_destroy(kv);
}

TEST(threads_change_nothing) {
    static const int queries[] = {1, 3, 18};
    static const tkv_evict_policy kinds[] = {TKV_EVICT_NONE, TKV_EVICT_SCISSORHANDS, TKV_EVICT_TOVA};
    static const tkv_parallel_for how[] = {NULL, backwards, three_by_turns};
    int i, j, k;
    NEEDS_ATOMICS;
    for (i = 0; i < 3; i++)
        for (j = 0; j < 3; j++) {
            uint64_t said[3], found[3], quiet, none;
            tkv_config cfg = config(2, 4);
            cfg.importance.strategy = TKV_IMPORTANCE_HYBRID;
            cfg.importance.heads = (tkv_importance_heads)((i + j) % 3);
            cfg.evict.policy = kinds[j];
            for (k = 0; k < 3; k++) {
                cfg.host.parallel_for = how[k];
                life(&cfg, queries[i], &said[k], &found[k]);
            }
            CHECK(said[1] == said[0] && said[2] == said[0]);
            CHECK(found[1] == found[0] && found[2] == found[0]);
            CHECK(found[0] != hash_of_floats(HASH_START, (float *)memset(a_now, 0, sizeof a_now), MOST));
            memset(&cfg.evict, 0, sizeof cfg.evict);
            cfg.importance.sample_every = 0;
            life(&cfg, queries[i], &quiet, &none);
            CHECK(quiet == said[0]); /* nor does gathering change the output */
        }
}

TEST(instruction_sets_agree) {
    tkv_config cfg = config(2, 2);
    uint64_t said, found;
    int isa, j;
    NEEDS_ATOMICS;
    cfg.host.isa = TKV_ISA_SCALAR;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    life(&cfg, 2, &said, &found);
    memcpy(b_now, a_now, sizeof b_now);
    for (isa = TKV_ISA_SCALAR; isa < TKV_ISA_COUNT; isa++) {
        double worst = 0.0;
        if (!isa_available((tkv_isa)isa)) continue;
        cfg.host.isa = (tkv_isa)isa;
        life(&cfg, 2, &said, &found);
        for (j = 0; j < MOST; j++) {
            const double e = fabs((double)a_now[j] - (double)b_now[j]);
            worst = e > worst ? e : worst;
        }
        CHECK_LE(worst, 1e-5 * 68);
    }
}

/* Who needs nothing gathers nothing, unless asked to; memory for notes comes with the config alone. */
TEST(only_where_it_is_wanted) {
    tkv_config cfg = config(2, 0);
    tkv_attend_params p = ask_of(64);
    tkv_cache *kv;
    int kind, j;
    NEEDS_ATOMICS;
    cfg.evict.scorer = (float (*)(void *, const struct tkv_evict_view *, int))0;
    for (kind = 0; kind < TKV_EVICT_USER; kind++) {
        const int wants = kind == TKV_EVICT_SCORES || kind == TKV_EVICT_H2O || kind == TKV_EVICT_SNAPKV ||
                          kind == TKV_EVICT_PYRAMIDKV || kind == TKV_EVICT_TOVA ||
                          kind == TKV_EVICT_SCISSORHANDS;
        int some = 0;
        cfg.evict.policy = (tkv_evict_policy)kind;
        kv = make(&cfg);
        feed(kv, LAYER, 64);
        ask(kv, &p);
        memset(a_now, 0, sizeof a_now);
        CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 64, a_now, NULL), wants ? TKV_OK : TKV_ERR_CONFIG);
        for (j = 0; j < 64; j++) some |= a_now[j] > 0.0f || a_now[j] < 0.0f;
        CHECK_MSG(some == wants, "%s gathers %d", tkv_get_name(TKV_NAME_EVICT_POLICY, kind), some);
        tkv_destroy(kv);
    }
    cfg.evict.policy = TKV_EVICT_SLIDING; /* but asked for it does */
    cfg.importance.sample_every = 1;
    kv = make(&cfg);
    feed(kv, LAYER, 64);
    ask(kv, &p);
    gathered(kv, LAYER, a_now);
    CHECK(a_now[0] > 1.0f);
    tkv_destroy(kv);
}

TEST(queries_that_are_no_numbers) {
    tkv_config cfg = exact(2, 1);
    tkv_attend_params p = ask_of(2);
    tkv_cache *kv;
    int i, sum = 0;
    NEEDS_ATOMICS;
    kv = make(&cfg);
    feed(kv, LAYER, 100);
    for (i = 0; i < 2 * Q_ROW; i++) q_in[i] = tkv_test_float(i % 3 ? 0x7fc00000u : 0x7f800000u);
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    gathered(kv, LAYER, a_now);
    for (i = 0; i < 100; i++) sum += tkv_test_is_finite((double)a_now[i]) && a_now[i] >= 0.0f;
    CHECK_EQ(sum, 100);
    ask(kv, &p); /* and the next ones count */
    gathered(kv, LAYER, b_now);
    CHECK(b_now[0] > a_now[0]);
    tkv_destroy(kv);
}

/* Tokens that come where others were cut begin with nothing. */
TEST(cuts) {
    tkv_config cfg = exact(2, 1);
    tkv_attend_params p = ask_of(1);
    tkv_cache *kv;
    NEEDS_ATOMICS;
    kv = make(&cfg);
    feed(kv, LAYER, 100);
    ask(kv, &p);
    gathered(kv, LAYER, b_now);
    CHECK(b_now[89] > 0.0f && b_now[90] > 0.0f);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 90), TKV_OK);
    feed(kv, LAYER, 10);
    gathered(kv, LAYER, a_now);
    CHECK_MEM(a_now, b_now, 90 * sizeof *a_now);
    CHECK_NEAR(a_now[90], 0.0, 0.0);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    feed(kv, LAYER, 30);
    ask(kv, &p);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    feed(kv, LAYER, 30);
    gathered(kv, LAYER, a_now);
    CHECK_NEAR(a_now[100], 0.0, 0.0);
    CHECK_NEAR(a_now[129], 0.0, 0.0);
    CHECK(a_now[90] > 0.0f); /* what was there before the step keeps what it got in it */
    sound(kv);
    tkv_destroy(kv);
}

/* A cut back behind the step that told last: its numbers do not come back at that length. */
TEST(cuts_of_the_newest) {
    tkv_config cfg = exact(2, 1);
    tkv_attend_params p = ask_of(1);
    tkv_cache *kv;
    NEEDS_ATOMICS;
    cfg.evict.policy = TKV_EVICT_TOVA;
    kv = make(&cfg);
    feed(kv, LAYER, 100);
    ask(kv, &p);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 99), TKV_OK);
    feed(kv, LAYER, 1);
    expect(NEWEST, 0, 1.0);
    o.newest = 1;
    ask(kv, &p);
    expect_call(kv, &p);
    compare(kv, "told again", 1);
    tkv_destroy(kv);
}

/* >>importance of a cache's tokens */
TEST(importance) {
    tkv_config cfg = exact(2, 1);
    tkv_attend_params p = ask_of(1);
    tkv_token_importance token[300];
    uint64_t gone[5];
    float want[300], part[70];
    const tkv_rng was = rng;
    tkv_cache *kv;
    int i;
    NEEDS_ATOMICS;
    cfg.importance.strategy = TKV_IMPORTANCE_HYBRID;
    cfg.importance.tau = 50.0f;
    kv = make(&cfg);
    feed(kv, LAYER, 256);
    ask(kv, &p);
    feed(kv, LAYER, 44);
    gathered(kv, LAYER, b_now);
    for (i = 0; i < 300; i++) {
        token[i].attention = b_now[i]; /* decayed already */
        token[i].step = 299;
    }
    tkv_destroy(kv);
    rng = was; /* the same again, with the weights of the strategy */
    cfg.importance.attention = cfg.importance.recency = 0.0f;
    kv = make(&cfg);
    feed(kv, LAYER, 256);
    ask(kv, &p);
    feed(kv, LAYER, 44);
    CHECK_EQ(tkv_update_importance(&cfg.importance, token, NULL, NULL, 300, 299, want), TKV_OK);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 300, a_now, gone), TKV_OK);
    CHECK_MEM(a_now, want, sizeof want);
    for (i = 0; i < 5; i++) CHECK(gone[i] == 0);
    CHECK_NEAR(a_now[299], .3, 1e-6); /* nobody asked since it came: its age alone */
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 60, 70, part, gone), TKV_OK);
    CHECK_MEM(part, want + 60, sizeof part);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 300, 0, part, gone), TKV_OK);
    CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, 0, part, gone), TKV_OK); /* a layer without tokens */
    memcpy(mass, a_now, sizeof mass);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 301, a_now, gone), TKV_ERR_RANGE);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, -1, 1, a_now, gone), TKV_ERR_RANGE);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 2147483647, 2147483647, a_now, gone), TKV_ERR_RANGE);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, -1, a_now, gone), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 1, NULL, gone), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_importance(kv, 1, LAYER, 0, 1, part, gone), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYERS, 0, 1, part, gone), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_importance(NULL, 0, LAYER, 0, 1, part, gone), TKV_ERR_ARG);
    CHECK_MEM(a_now, mass, sizeof mass); /* errors write nothing */
    tkv_destroy(kv);
    cfg.importance.sample_every = 0;
    kv = make(&cfg);
    feed(kv, LAYER, 10);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 10, part, gone), TKV_ERR_CONFIG);
    tkv_destroy(kv);
    cfg.importance.strategy = TKV_IMPORTANCE_RECENCY; /* needs nothing */
    kv = make(&cfg);
    feed(kv, LAYER, 10);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 10, part, gone), TKV_OK);
    CHECK_NEAR(part[9], 1.0, 1e-6);
    CHECK_NEAR(part[4], exp(-.1), 1e-6);
    tkv_destroy(kv);
}

/* Tokens that left a window, or that the cache dropped, are 0 and say so. */
TEST(gone_tokens) {
    tkv_config cfg = config(2, 1);
    tkv_attend_params p = ask_of(1);
    const float some[3] = {5.0f, 6.0f, 7.0f};
    tkv_ranked best[4];
    uint64_t gone[16];
    tkv_cache *kv;
    int i, left, n = 0, count;
    NEEDS_ATOMICS;
    cfg.model.window = 100;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = make(&cfg);
    for (i = 0; i < 6; i++) feed(kv, LAYER, 100);
    ask(kv, &p);
    left = expired_in(kv);
    REQUIRE(left > 64 && left < 600);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 600, a_now, gone), TKV_OK);
    for (i = 0; i < 600; i++) n += (int)(gone[i / 64] >> i % 64 & 1);
    CHECK_EQ(n, left);
    CHECK(gone[0] == ~(uint64_t)0 && gone[9] == 0);
    CHECK_NEAR(a_now[0], 0.0, 0.0);
    CHECK(a_now[590] > 0.0f);
    i = 4 + 9 * 64; /* the newest block: its second token goes, too */
    memset(gone, 0, sizeof gone);
    add_to_mask(gone, i + 1);
    CHECK_EQ(evict_named(kv, 0, LAYER, gone, 600), TKV_OK);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, i, 3, a_now, gone), TKV_OK);
    CHECK(gone[0] == 2 && a_now[0] > 0.0f && !(a_now[1] > 0.0f) && a_now[2] > 0.0f);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, i, 3, some), TKV_OK); /* passes over it */
    gathered(kv, LAYER, b_now);
    CHECK(b_now[i] > 5.0f && b_now[i + 1] < 1.0f && b_now[i + 2] > 7.0f);
    CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, 4, 0, best, &count), TKV_OK);
    CHECK_EQ(best[0].position, i + 2);
    CHECK_EQ(best[1].position, i);
    for (n = 0; n < count; n++) CHECK(best[n].position != i + 1 && best[n].position >= left);
    ask(kv, &p); /* what is gone gets nothing any more */
    memcpy(mass, b_now, sizeof mass);
    gathered(kv, LAYER, b_now);
    CHECK(b_now[i] > mass[i] && !(b_now[i + 1] > mass[i + 1]));
    tkv_destroy(kv);
}

/* Where tokens were dropped and blocks have joined, those that stay keep what they got, and get what is theirs. */
TEST(after_eviction) {
    static const tkv_evict_policy kinds[] = {TKV_EVICT_H2O, TKV_EVICT_TOVA, TKV_EVICT_SCISSORHANDS};
    static float before[MOST];
    int i, j, n;
    NEEDS_ATOMICS;
    for (i = 0; i < COUNT(kinds); i++) {
        tkv_config cfg = config(2, 1);
        tkv_attend_params p = ask_of(1);
        uint64_t alive[MOST / 64 + 1], odd[10];
        double worst = 0.0, all = 0.0, kept = 0.0;
        tkv_cache *kv;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.tiers.warm_tokens = 128;
        cfg.evict.policy = kinds[i];
        cfg.importance.decay = .999f;
        kv = make(&cfg);
        for (n = 0; n < 5; n++) {
            feed(kv, LAYER, 150);
            p.window = n == 4 ? 240 : 0; /* blocks that it does not reach are a step behind */
            ask(kv, &p);
        }
        gathered(kv, LAYER, before);
        for (n = 0; n < 10; n++) odd[n] = 0xaaaaaaaaaaaaaaaau;
        CHECK_EQ(evict_named(kv, 0, LAYER, odd, 640), TKV_OK);
        CHECK(blocks_of(kv, 0, LAYER) < 750 / 64 + 1);
        CHECK_EQ(live_mask_of(kv, 0, LAYER, 0, 750, alive), TKV_OK);
        gathered(kv, LAYER, a_now);
        for (j = n = 0; j < 750; j++) {
            if (!(alive[j / 64] >> j % 64 & 1)) continue;
            n++;
            CHECK_NEAR(a_now[j], before[j], kinds[i] == TKV_EVICT_SCISSORHANDS ? 1.0 / 256.0 : 2e-5);
            kept += fabs((double)before[j]);
        }
        CHECK_EQ(n, 430);
        CHECK(kept > 0.0);
        feed(kv, LAYER, 1);
        gathered(kv, LAYER, before);
        p.window = 0;
        p.lse = lse;
        p.scores = mass;
        ask(kv, &p);
        gathered(kv, LAYER, a_now);
        CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 751, b_now, alive), TKV_OK);
        for (j = n = 0; j < 751; j++) {
            const int there = !(alive[j / 64] >> j % 64 & 1);
            const double old = kinds[i] == TKV_EVICT_TOVA ? 0.0 : (double)before[j];
            const double e = fabs((double)a_now[j] - old - (double)mass[j]);
            n += there;
            if (!there) CHECK(!(mass[j] > 0.0f) && bits_of(b_now[j]) == 0);
            if (!there || kinds[i] == TKV_EVICT_SCISSORHANDS) continue;
            worst = e > worst ? e : worst;
            all += (double)mass[j];
        }
        CHECK_EQ(n, 431);
        CHECK_LE(worst, 2e-5 * HEADS);
        if (kinds[i] != TKV_EVICT_SCISSORHANDS) CHECK_NEAR(all, HEADS, 1e-2);
        sound(kv);
        tkv_destroy(kv);
    }
}

TEST(mass_from_elsewhere) {
    tkv_config cfg = exact(2, 1);
    float some[200];
    tkv_cache *kv;
    int i;
    cfg.importance.decay = .5f;
    kv = make(&cfg);
    feed(kv, LAYER, 200);
    for (i = 0; i < 200; i++) some[i] = (float)i * .01f;
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 200, some), TKV_OK);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 50, 100, some), TKV_OK);
    gathered(kv, LAYER, a_now);
    CHECK_NEAR(a_now[49], .49, 1e-6);
    CHECK_NEAR(a_now[50], .50, 1e-6);
    CHECK_NEAR(a_now[149], 1.49 + .99, 1e-6);
    CHECK_NEAR(a_now[150], 1.5, 1e-6);
    feed(kv, LAYER, 2);
    gathered(kv, LAYER, a_now);
    CHECK_NEAR(a_now[149], 2.48 / 4.0, 1e-6);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 149, 1, some + 100), TKV_OK);
    gathered(kv, LAYER, a_now);
    CHECK_NEAR(a_now[149], 2.48 / 4.0 + 1.0, 1e-5);
    some[0] = 1e30f; /* sums end somewhere */
    for (i = 0; i < 3; i++) CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 7, 1, some), TKV_OK);
    gathered(kv, LAYER, a_now);
    CHECK_NEAR(a_now[7], 4096.0, .01);
    memcpy(b_now, a_now, sizeof b_now);
    some[1] = tkv_test_float(0x7fc00000u);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 2, some), TKV_ERR_NONFINITE);
    CHECK(strstr(tkv_get_last_error(kv), "entry 1") != NULL);
    some[1] = -.001f;
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 2, some), TKV_ERR_NONFINITE);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 100, 103, some), TKV_ERR_RANGE);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, -1, 1, some), TKV_ERR_RANGE);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, -1, some), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(kv, 3, LAYER, 0, 1, some), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(kv, 0, -1, 0, 1, some), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(NULL, 0, 0, 0, 1, some), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 0, NULL), TKV_OK);
    gathered(kv, LAYER, a_now);
    CHECK_MEM(a_now, b_now, sizeof a_now);
    sound(kv);
    tkv_destroy(kv);
    cfg.importance.sample_every = 0;
    kv = make(&cfg);
    feed(kv, LAYER, 2);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 1, some), TKV_ERR_CONFIG);
    CHECK(strstr(tkv_get_last_error(kv), "sample_every") != NULL);
    tkv_destroy(kv);
    cfg.evict.policy = TKV_EVICT_SCISSORHANDS;
    cfg.importance.low = .5f;
    kv = make(&cfg);
    feed(kv, LAYER, 100);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 2, 98, some + 2), TKV_OK);
    gathered(kv, LAYER, a_now);
    CHECK_NEAR(a_now[1], 0.0, 0.0);
    CHECK_NEAR(a_now[49], -1.0, 0.0);
    CHECK_NEAR(a_now[51], 0.0, 0.0);
    tkv_destroy(kv);
}

TEST(top_tokens) {
    tkv_config cfg = exact(2, 1);
    tkv_ranked best[400];
    float some[300];
    int order[300], i, j, k, n, protect, count = 0;
    tkv_cache *kv = make(&cfg);
    CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, 5, 0, best, &count), TKV_OK);
    CHECK_EQ(count, 0);
    feed(kv, LAYER, 200);
    feed(kv, LAYER, 100);
    rng = tkv_rng_seed(3);
    for (i = 0; i < 300; i++) some[i] = (float)tkv_rng_below(&rng, 100) * .03125f; /* many are equal */
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 300, some), TKV_OK);
    for (protect = 0; protect < 2; protect++) {
        for (i = n = 0; i < 300; i++) { /* insertion: best first, of equals the older */
            if (protect && (i < 4 || i >= 300 - 32)) continue;
            for (j = n++; j > 0 && some[order[j - 1]] < some[i]; j--) order[j] = order[j - 1];
            order[j] = i;
        }
        for (k = 0; k <= 400; k += k < 5 ? 1 : 79) {
            count = -1;
            CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, k, protect, best, &count), TKV_OK);
            CHECK_EQ(count, k < n ? k : n);
            for (i = 0; i < count; i++) {
                CHECK_EQ(best[i].position, order[i]);
                CHECK_NEAR(best[i].importance, some[order[i]], 1e-6);
            }
        }
    }
    CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, -1, 0, best, &count), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, 1, 0, NULL, &count), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, 1, 0, best, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYERS, 1, 0, best, &count), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_top_tokens(NULL, 0, 0, 1, 0, best, &count), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* >>memory */
TEST(memory) {
    tkv_config cfg = config(2, 1);
    tkv_attend_params p = ask_of(1);
    tkv_memory_info info, guess, plain;
    tkv_cache *kv;
    size_t bytes = 0;
    void *mem;
    counting_allocator money;
    int i, asked, layer;
    cfg.limits.max_tokens = 1000;
    cfg.host.allocator = counting_allocator_of(&money);
    kv = make(&cfg);
    for (i = 0; i < 1000; i++)
        for (layer = 0; layer < LAYERS; layer++) feed(kv, layer, 1);
    asked = money.asked;
    ask(kv, &p);
    CHECK_EQ(money.asked, asked); /* attention asks for nothing */
    CHECK_EQ(tkv_get_memory(kv, &info), TKV_OK);
    CHECK_EQ(info.total, money.held);
    CHECK_EQ(tkv_estimate_memory(&cfg, 1000, 1, &guess), TKV_OK);
    CHECK_EQ(guess.total - guess.index, info.total - info.index);
    CHECK_LE(guess.index, info.index); /* which has grown for a moment */
    CHECK_LE(info.index, 2 * guess.index);
    cfg.importance.sample_every = 0;
    CHECK_EQ(tkv_estimate_memory(&cfg, 1000, 1, &plain), TKV_OK);
    CHECK_LE(plain.index + (size_t)(LAYERS * blocks_of(kv, 0, LAYER)) * 432, guess.index);
    sound(kv);
    tkv_destroy(kv);
    CHECK_EQ(money.held, 0);
    cfg = config(2, 1);
    cfg.limits.max_tokens = 1000;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    mem = malloc(bytes);
    REQUIRE(mem != NULL);
    CHECK_EQ(tkv_create_in_place(&cfg, mem, bytes, &kv), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++)
        for (i = 0; i < 10; i++) feed(kv, layer, 100);
    ask(kv, &p);
    gathered(kv, LAYER, a_now);
    for (i = 0; i < 1000; i++) a_now[0] += i ? a_now[i] : 0.0f;
#if defined(__GNUC__) || defined(__clang__)
    CHECK_NEAR(a_now[0], HEADS, 1e-2);
#endif
    sound(kv);
    tkv_destroy(kv);
    free(mem);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(1);
    RUN(sums);
    RUN(decay);
    RUN(other_ways);
    RUN(query_heads);
    RUN(mean_and_sum);
    RUN(query_heads_change_no_answer);
    RUN(rates_mean_the_same);
    RUN(largest_rates);
    RUN(mass_from_elsewhere_at_any_rate);
    RUN(one_step_many_calls);
    RUN(what_changes_logits);
    RUN(coded_tiers);
    RUN(many_queries);
    RUN(threads_change_nothing);
    RUN(instruction_sets_agree);
    RUN(only_where_it_is_wanted);
    RUN(queries_that_are_no_numbers);
    RUN(cuts);
    RUN(cuts_of_the_newest);
    RUN(importance);
    RUN(gone_tokens);
    RUN(after_eviction);
    RUN(mass_from_elsewhere);
    RUN(top_tokens);
    RUN(memory);
    return tkv_test_end();
}
