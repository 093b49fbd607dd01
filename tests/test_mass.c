/*
 * test_mass.c - attention scores that a cache collects. In every score mode they are compared with weights computed
 * here in double from the keys that tkv_read gives. Other tests: collecting must not change the output. Importance,
 * scores from the caller, top tokens, memory.
 */
#include "kit.h"

#include <math.h>

enum { LAYERS = 2, HEADS = 4, DIM = 32, MAX_TOKENS = 1100, CHUNK = 256, LAYER = 1, Q_ROW = HEADS * DIM };

static float k_in[CHUNK * Q_ROW], v_in[CHUNK * Q_ROW], q_in[CHUNK * Q_ROW], keys[MAX_TOKENS * Q_ROW];
static float out[CHUNK * Q_ROW], lse[CHUNK * HEADS], per_token[MAX_TOKENS], scores_a[MAX_TOKENS],
    scores_b[MAX_TOKENS];
static tkv_rng rng;

/* Makes importance equal to the attention score: recency has no weight. */
static void set_importance_to_scores(tkv_config *cfg) {
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
    cfg.importance.heads = TKV_IMPORTANCE_SUM; /* each query head adds its own weights */
    set_importance_to_scores(&cfg);
    return cfg;
}

static tkv_config exact_config(int kv_heads, int every) {
    tkv_config cfg = config(kv_heads, every);
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    return cfg;
}

static int n_appended; /* tokens of the last append */

static void append_tokens(tkv_cache *kv, int layer, int n) {
    const int row = last_config.model.n_kv_heads * DIM;
    tkv_rng_fill(&rng, k_in, (size_t)(n * row), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * row), 1.0);
    CHECK_EQ(tkv_append(kv, 0, layer, k_in, v_in, n), TKV_OK);
    n_appended = n;
}

static tkv_attend_params make_params(int n) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.layer = LAYER;
    p.n = n;
    p.q = q_in;
    p.out = out;
    return p;
}

static void attend_random_queries(tkv_cache *kv, const tkv_attend_params *p) {
    tkv_rng_fill(&rng, q_in, (size_t)(p->n * Q_ROW), 1.5);
    CHECK_EQ(tkv_attend_ex(kv, p), TKV_OK);
}

/* Attention scores of all positions of the layer. They are its importance, because recency has no weight. */
static void read_scores(tkv_cache *kv, int layer, float *found) {
    memset(found, 0, MAX_TOKENS * sizeof *found);
    CHECK_EQ(tkv_get_importance(kv, 0, layer, 0, tkv_get_length(kv, 0, layer), found, NULL), TKV_OK);
}

static int n_expired(const tkv_cache *kv) {
    tkv_layer_info info;
    memset(&info, 0, sizeof info);
    CHECK_EQ(tkv_get_layer(kv, 0, LAYER, &info), TKV_OK);
    return info.expired;
}

/* >>expected scores, in double */
/* Per token: sum of weights, largest weight, minus the number of low weights, sum over the newest queries. */
typedef enum score_mode { SUM, LARGEST, LOW_COUNTS, NEWEST } score_mode;

typedef struct expectation {
    score_mode mode;
    int every,
        n_newest;  /* n_newest: number of queries that NEWEST sums over, behind an append of several tokens */
    int n_decoded; /* number before an eviction, behind appends of single tokens; 0: 1 */
    double decay, low; /* low: weights below it are low; 0: an even share */
    int combine;       /* 0: each query head counts; TKV_IMPORTANCE_MAX, _SUM: of the heads of a KV head */
    double factor;     /* of each weight; 0: 1 */
    int len,
        n_sampled; /* length at the last call, or NEWEST: at the coming eviction; sampled rows (queries times heads) so far */
    double want[MAX_TOKENS], tolerance[MAX_TOKENS]; /* LOW_COUNTS: weights close to `low` may count or not */
} expectation;

static expectation expected;

static void expect_mode(score_mode mode, int every, double decay) {
    memset(&expected, 0, sizeof expected);
    expected.mode = mode;
    expected.every = every;
    expected.decay = decay;
}

static void add_expected_row(const double *p, const char *seen, int len) {
    const int is_scaled =
        expected.mode == SUM || expected.mode == LOW_COUNTS; /* a sampled query counts as `every` queries */
    const double factor = (expected.factor > 0.0 ? expected.factor : 1.0) * (is_scaled ? expected.every : 1);
    double low = expected.low;
    int j, n = 0;
    expected.n_sampled++;
    for (j = 0; j < len; j++) n += seen[j];
    if (low <= 0.0) low = 1.0 / n;
    for (j = 0; j < len; j++) {
        if (!seen[j]) continue;
        if (expected.mode == LARGEST)
            expected.want[j] = factor * p[j] > expected.want[j] ? factor * p[j] : expected.want[j];
        else if (expected.mode == LOW_COUNTS) expected.want[j] -= p[j] < low ? factor : 0.0;
        else expected.want[j] += factor * p[j];
        if (expected.mode == LOW_COUNTS && fabs(p[j] - low) < 1e-3 * low) expected.tolerance[j] += factor;
    }
}

/* Computes the weights of a call's sampled rows, and adds them to the expected scores. */
static void add_expected_call(tkv_cache *kv, const tkv_attend_params *q) {
    static double p[MAX_TOKENS], combined[MAX_TOKENS];
    static char seen[MAX_TOKENS];
    const tkv_config *cfg = &last_config;
    const int len = tkv_get_length(kv, 0, LAYER), from = n_expired(kv);
    const int group = cfg->model.n_heads / cfg->model.n_kv_heads, row = cfg->model.n_kv_heads * DIM;
    int i, h, j, c;
    CHECK_EQ(tkv_read(kv, 0, LAYER, from, len - from, keys + from * row, NULL), TKV_OK);
    int stamp = len;
    if (expected.mode == NEWEST && n_appended == 1) { /* an eviction may come when a block is full */
        stamp = (len + 63) / 64 * 64;
        if (len <= stamp - (expected.n_decoded ? expected.n_decoded : 1)) return;
        stamp++; /* a chunk may end there */
    }
    if (expected.len != stamp)
        for (j = 0; j < len; j++)
            expected.want[j] *= expected.mode == NEWEST ? 0.0 : pow(expected.decay, len - expected.len);
    expected.len = stamp;
    for (i = 0; i < q->n; i++)
        for (h = 0; h < cfg->model.n_heads; h++) {
            const int at = len - q->n + i, window = q->window > 0 ? q->window : MAX_TOKENS;
            double max_logit = q->sink_logits ? (double)q->sink_logits[h] : -1e300, sum = 0.0;
            if (expected.mode == NEWEST
                    ? at < len - expected.n_newest
                    : (at + LAYER * cfg->model.n_kv_heads + h / group) % expected.every != 0)
                continue;
            for (j = 0; j < len; j++) {
                const int bit = j - (len - q->n_mask_bits);
                double s = 0.0;
                seen[j] = (char)(j >= from && (q->non_causal || j <= at) && at - j < window);
                if (q->mask && ((const float *)q->mask)[i * len + j] < -1e29f) seen[j] = 0;
                if (q->mask_bits && bit >= 0 && !(q->mask_bits[i] >> bit & 1)) seen[j] = 0;
                if (!seen[j]) continue;
                for (c = 0; c < DIM; c++)
                    s += (double)q_in[i * Q_ROW + h * DIM + c] * (double)keys[j * row + h / group * DIM + c];
                s *= (double)cfg->model.scale;
                if (q->softcap > 0.0f) s = (double)q->softcap * tanh(s / (double)q->softcap);
                if (q->alibi_slopes) s += (double)q->alibi_slopes[h] * (j - at);
                if (q->mask) s += (double)((const float *)q->mask)[i * len + j];
                p[j] = s;
                max_logit = s > max_logit ? s : max_logit;
            }
            for (j = 0; j < len; j++) sum += seen[j] ? p[j] = exp(p[j] - max_logit) : 0.0;
            if (q->sink_logits) sum += exp((double)q->sink_logits[h] - max_logit);
            if (!(sum > 0.0)) continue; /* the row sees no key */
            for (j = 0; j < len; j++) {
                p[j] /= sum;
                if (h % group == 0) combined[j] = 0.0;
                if (expected.combine == TKV_IMPORTANCE_MAX)
                    combined[j] = p[j] > combined[j] ? p[j] : combined[j];
                else combined[j] += p[j];
            }
            if (!expected.combine) add_expected_row(p, seen, len);
            else if (h % group == group - 1) add_expected_row(combined, seen, len);
        }
}

/* must_have: 1 if some score must differ from 0 */
static void check_scores(tkv_cache *kv, const char *label, int must_have) {
    const double scale = expected.mode == SUM || expected.mode == LOW_COUNTS ? expected.every : 1;
    const double tol = scale * (1e-5 * (expected.n_sampled + 1) + (expected.decay < 1.0 ? 2e-5 : 0.0));
    double worst_error = 0.0, total = 0.0;
    int j, worst_token = 0;
    read_scores(kv, LAYER, scores_a);
    for (j = 0; j < MAX_TOKENS; j++) {
        const double error = fabs((double)scores_a[j] - expected.want[j]) - expected.tolerance[j];
        if (error > worst_error) worst_error = error, worst_token = j;
        total += fabs(expected.want[j]);
    }
    CHECK(total > 0.0 || !must_have);
    CHECK_MSG(worst_error <= tol, "%s: %.8f instead of %.8f at %d; %d sampled rows", label,
              (double)scores_a[worst_token], expected.want[worst_token], worst_token, expected.n_sampled);
}

/* Appends single tokens and chunks, and attends to each in one call. Compares scores after every third one. */
static void check_collection(const tkv_config *cfg, const tkv_attend_params *params, const char *label) {
    static const int chunks[] = {1, 1, 1, 64, 1, 1, 100, 5, 9, 194, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    tkv_cache *kv = create_cache(cfg);
    int i;
    for (i = 0; i < COUNT(chunks); i++) {
        tkv_attend_params p = *params;
        p.n = chunks[i];
        append_tokens(kv, LAYER, chunks[i]);
        attend_random_queries(kv, &p);
        add_expected_call(kv, &p);
        if (i % 3 == 2) check_scores(kv, label, 0);
    }
    check_scores(kv, label, 1);
    check_cache(kv);
    tkv_destroy(kv);
}

/* >>score modes */
TEST(sums_of_weights) {
    const tkv_attend_params p = make_params(0);
    static const int kv_heads[] = {1, 2, 4}, every[] = {1, 3, 16};
    int i, j;
    NEEDS_ATOMICS;
    for (i = 0; i < 3; i++)
        for (j = 0; j < 3; j++) {
            const tkv_config cfg = exact_config(kv_heads[i], every[j]);
            expect_mode(SUM, every[j], 1.0);
            check_collection(&cfg, &p, "sum");
        }
}

TEST(decay) {
    const tkv_attend_params p = make_params(0);
    tkv_config cfg = exact_config(2, 2);
    NEEDS_ATOMICS;
    cfg.importance.strategy = TKV_IMPORTANCE_HYBRID; /* its decay is .95 */
    expect_mode(SUM, 2, .95);
    check_collection(&cfg, &p, "hybrid");
    cfg.importance.strategy = TKV_IMPORTANCE_HEAVY_HITTER;
    cfg.importance.heads = TKV_IMPORTANCE_MAX;
    cfg.importance.decay = .5f;
    expect_mode(LARGEST, 2, .5);
    check_collection(&cfg, &p, "largest, decayed");
    memset(&cfg.importance, 0, sizeof cfg.importance);
    set_importance_to_scores(&cfg);
    cfg.importance.sample_every = 2;
    cfg.importance.heads = TKV_IMPORTANCE_SUM;
    cfg.evict.policy = TKV_EVICT_H2O; /* no decay, as in its paper, although the default strategy decays */
    expect_mode(SUM, 2, 1.0);
    check_collection(&cfg, &p, "h2o");
    cfg.importance.decay = .9f;
    expect_mode(SUM, 2, (double)cfg.importance.decay);
    check_collection(&cfg, &p, "h2o, decayed");
}

TEST(other_score_modes) {
    const tkv_attend_params p = make_params(0);
    tkv_config cfg = exact_config(2, 1);
    NEEDS_ATOMICS;
    cfg.importance.strategy = TKV_IMPORTANCE_HEAVY_HITTER;
    cfg.importance.heads = TKV_IMPORTANCE_MAX;
    expect_mode(LARGEST, 1, 1.0);
    check_collection(&cfg, &p, "largest");
    cfg.importance.strategy = TKV_IMPORTANCE_PERSISTENCE;
    cfg.importance.heads = TKV_IMPORTANCE_SUM;
    expect_mode(LOW_COUNTS, 1, 1.0);
    check_collection(&cfg, &p, "low counts");
    cfg.importance.low = .01f;
    expect_mode(LOW_COUNTS, 1, 1.0);
    expected.low = (double)cfg.importance.low;
    check_collection(&cfg, &p, "below .01");
    memset(&cfg.importance, 0, sizeof cfg.importance);
    set_importance_to_scores(&cfg);
    cfg.importance.sample_every = 1;
    cfg.importance.heads = TKV_IMPORTANCE_SUM;
    cfg.evict.policy = TKV_EVICT_SCISSORHANDS;
    expect_mode(LOW_COUNTS, 1, 1.0);
    check_collection(&cfg, &p, "scissorhands");
    cfg.evict.policy = TKV_EVICT_TOVA;
    cfg.importance.sample_every = 16; /* tova uses the newest query */
    expect_mode(NEWEST, 0, 1.0);
    expected.n_newest = 1;
    check_collection(&cfg, &p, "tova");
    cfg.evict.policy = TKV_EVICT_SNAPKV;
    expect_mode(NEWEST, 0, 1.0);
    expected.n_newest = 32;
    expected.n_decoded = 4; /* 64 / 16 */
    check_collection(&cfg, &p, "snapkv");
    cfg.evict.policy = TKV_EVICT_PYRAMIDKV;
    cfg.evict.recent_tokens = 5;
    expect_mode(NEWEST, 0, 1.0);
    expected.n_newest = 5;
    expected.n_decoded = 4;
    check_collection(&cfg, &p, "pyramidkv");
}

/* Mean, max and sum over the query heads of a KV head, in each mode. With 3 query heads, a work tile still holds whole
 * queries. */
TEST(query_heads_are_combined) {
    static const tkv_importance_strategy strategies[] = {
        TKV_IMPORTANCE_ACCUMULATION, TKV_IMPORTANCE_HEAVY_HITTER, TKV_IMPORTANCE_PERSISTENCE};
    static const score_mode modes[] = {SUM, LARGEST, LOW_COUNTS};
    static const int shapes[][2] = {{4, 2}, {4, 1}, {3, 1}};
    int i, s, heads;
    NEEDS_ATOMICS;
    for (i = 0; i < COUNT(shapes); i++)
        for (s = 0; s < COUNT(strategies); s++)
            for (heads = TKV_IMPORTANCE_MEAN; heads <= TKV_IMPORTANCE_SUM; heads++) {
                tkv_config cfg = exact_config(shapes[i][1], 2);
                tkv_attend_params p = make_params(0);
                const int group = shapes[i][0] / shapes[i][1], is_max = heads == TKV_IMPORTANCE_MAX;
                p.q_row_stride = Q_ROW;
                cfg.model.n_heads = shapes[i][0];
                cfg.importance.strategy = strategies[s];
                cfg.importance.heads = (tkv_importance_heads)heads;
                expect_mode(modes[s], 2, 1.0);
                if (is_max != (modes[s] == LARGEST))
                    expected.combine = is_max ? TKV_IMPORTANCE_MAX : TKV_IMPORTANCE_SUM;
                if (heads == TKV_IMPORTANCE_MEAN) expected.factor = 1.0 / group;
                check_collection(&cfg, &p, is_max ? "max" : heads ? "sum" : "mean");
            }
}

/* Mean and sum differ by a constant factor. Without recency they rank tokens alike. */
TEST(mean_and_sum_rank_alike) {
    tkv_ranked best[2][50];
    double ratio;
    tkv_config wrong = exact_config(1, 1);
    int is_sum, i, count;
    wrong.importance.heads = (tkv_importance_heads)3;
    CHECK_EQ(tkv_validate_config(&wrong, NULL, 0), TKV_ERR_CONFIG);
    NEEDS_ATOMICS;
    for (is_sum = 0; is_sum < 2; is_sum++) {
        tkv_config cfg = exact_config(1, 1);
        tkv_attend_params p = make_params(1);
        tkv_cache *kv;
        rng = tkv_rng_seed(5);
        cfg.importance.heads = is_sum ? TKV_IMPORTANCE_SUM : TKV_IMPORTANCE_MEAN;
        kv = create_cache(&cfg);
        append_tokens(kv, LAYER, 200);
        for (i = 0; i < 20; i++) {
            append_tokens(kv, LAYER, 1);
            attend_random_queries(kv, &p);
        }
        CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, 50, 0, best[is_sum], &count), TKV_OK);
        CHECK_EQ(count, 50);
        tkv_destroy(kv);
    }
    for (i = 0; i < 50; i++) {
        CHECK_EQ(best[0][i].position, best[1][i].position);
        ratio = (double)best[1][i].importance / (double)best[0][i].importance;
        CHECK_NEAR(ratio, HEADS, 1e-3);
    }
}

/* Combining query heads must not change the output, although work tiles may be smaller. */
TEST(combining_query_heads_keeps_the_output) {
    static float first[CHUNK * Q_ROW];
    int is_max, n;
    for (n = 1; n <= 190; n += 63)
        for (is_max = 0; is_max < 2; is_max++) {
            tkv_config cfg = config(1, 1);
            tkv_attend_params p = make_params(n);
            tkv_cache *kv;
            rng = tkv_rng_seed(6);
            cfg.model.n_heads = 3;
            cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
            cfg.importance.heads = is_max ? TKV_IMPORTANCE_MAX : TKV_IMPORTANCE_SUM;
            kv = create_cache(&cfg);
            append_tokens(kv, LAYER, 200);
            append_tokens(kv, LAYER, 200);
            memset(out, 0, sizeof out);
            attend_random_queries(kv, &p);
            if (!is_max) memcpy(first, out, sizeof out);
            else CHECK_MEM(first, out, sizeof out);
            tkv_destroy(kv);
        }
}

/* >>sampling rates */
enum { HEAVY = 30, RECENT = 8, RATE_TOKENS = 320, RATE_FROM = 192 };

/* Decodes tokens. Token HEAVY gets a third of all attention, and the other keys share the rest evenly. Returns
 * importance, averaged over the last 128 steps: of HEAVY, of the next token, and of the token RECENT steps back. */
static void check_rate(const tkv_config *cfg, double *heavy, double *ordinary, double *recent) {
    const int row = cfg->model.n_kv_heads * DIM;
    tkv_cache *kv = create_cache(cfg);
    int n, h, c;
    *heavy = *ordinary = *recent = 0.0;
    memset(q_in, 0, sizeof q_in);
    for (h = 0; h < HEADS; h++) q_in[h * DIM] = 1.0f;
    for (n = 0; n < RATE_TOKENS; n++) {
        memset(k_in, 0, (size_t)row * sizeof *k_in);
        for (c = 0; c < row; c++) v_in[c] = 1.0f;
        CHECK_EQ(tkv_append(kv, 0, LAYER, k_in, v_in, 1), TKV_OK);
        if (n > HEAVY) {
            tkv_attend_params p = make_params(1);
            memset(per_token, 0, sizeof per_token);
            per_token[HEAVY] = logf((float)n / 2.0f); /* a third of all attention for every n */
            p.mask = per_token;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
        }
        if (n < RATE_FROM) continue;
        CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, n + 1, scores_a, NULL), TKV_OK);
        *heavy += (double)scores_a[HEAVY] / (RATE_TOKENS - RATE_FROM);
        *ordinary += (double)scores_a[HEAVY + 1] / (RATE_TOKENS - RATE_FROM);
        *recent += (double)scores_a[n - RECENT] / (RATE_TOKENS - RATE_FROM);
    }
    tkv_destroy(kv);
}

TEST(importance_is_independent_of_the_rate) {
    static const tkv_importance_strategy strategy[] = {TKV_IMPORTANCE_HYBRID, TKV_IMPORTANCE_ACCUMULATION,
                                                       TKV_IMPORTANCE_HEAVY_HITTER,
                                                       TKV_IMPORTANCE_PERSISTENCE};
    static const int every[] = {1, 8, 32};
    double heavy[3], ordinary[3], recent[3];
    int s, i, heads;
    NEEDS_ATOMICS;
    for (s = 0; s < COUNT(strategy); s++)
        for (heads = 1; heads <= 4; heads *= 4) {
            for (i = 0; i < COUNT(every); i++) {
                tkv_config cfg = exact_config(heads, every[i]);
                cfg.importance.strategy = strategy[s];
                cfg.importance.heads = TKV_IMPORTANCE_MEAN;
                check_rate(&cfg, &heavy[i], &ordinary[i], &recent[i]);
            }
            printf("\n      %-13s %d KV heads, one in 1, 8, 32: a third of the attention %.3f %.3f %.3f, "
                   "recent %.3f %.3f %.3f",
                   tkv_get_name(TKV_NAME_IMPORTANCE, (int)strategy[s]), heads, heavy[0], heavy[1], heavy[2],
                   recent[0], recent[1], recent[2]);
            for (i = 1; i < COUNT(every); i++) {
                CHECK_NEAR(heavy[i] - heavy[0], 0.0, 0.1 * fabs(heavy[0]));
                CHECK_NEAR(recent[i] - recent[0], 0.0, 0.05 * fabs(heavy[0]) + 0.02 * fabs(recent[0]));
                CHECK_NEAR(ordinary[i] - ordinary[0], 0.0, 0.05 * fabs(heavy[0]) + 0.1 * fabs(ordinary[0]));
            }
            for (i = 0; i < COUNT(every) && strategy[s] == TKV_IMPORTANCE_HYBRID; i++)
                CHECK_LE(recent[i] * 3, heavy[i]); /* attention outweighs recency */
        }
    printf("\n     ");
}

/* A sampled query counts as sample_every queries, at most 4096. Position 0 is sampled at every rate. */
TEST(largest_rates) {
    static const int every[] = {1,       255,     256,           257,     4096,         4097,
                                1 << 20, 1 << 22, (1 << 23) - 1, 1 << 23, (1 << 30) - 1};
    int i, heads;
    NEEDS_ATOMICS;
    for (i = 0; i < COUNT(every); i++)
        for (heads = 0; heads < 2; heads++) {
            tkv_config cfg = exact_config(1, every[i]);
            tkv_attend_params p = make_params(1);
            tkv_cache *kv;
            const double want = (every[i] < 4096 ? every[i] : 4096.0) * (heads ? HEADS : 1);
            cfg.importance.heads = heads ? TKV_IMPORTANCE_SUM : TKV_IMPORTANCE_MEAN;
            kv = create_cache(&cfg);
            p.layer = 0;
            append_tokens(kv, 0, 1);
            attend_random_queries(kv, &p);
            CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, 1, scores_a, NULL), TKV_OK);
            CHECK_NEAR(scores_a[0], want, 1e-5 * want);
            check_cache(kv);
            tkv_destroy(kv);
        }
}

/* Scores from the caller count the same at every sampling rate. */
TEST(scores_from_the_caller_at_any_rate) {
    static const int every[] = {1, 8, 32, 256, 257, 1000, 1 << 20, (1 << 30) - 1};
    int i, t;
    for (i = 0; i < COUNT(every); i++) {
        const double step = every[i] <= 256 ? every[i] / 1048576.0 : 1.0 / 4096; /* as api.h says */
        tkv_config cfg = exact_config(2, every[i]);
        tkv_cache *kv = create_cache(&cfg);
        append_tokens(kv, LAYER, 100);
        for (t = 0; t < 100; t++) per_token[t] = 0.01f * (float)t;
        CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 100, per_token), TKV_OK);
        CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 100, scores_a, NULL), TKV_OK);
        for (t = 0; t < 100; t++) CHECK_NEAR(scores_a[t], per_token[t], 0.5 * step + 1e-6);
        tkv_destroy(kv);
    }
}

/* Attention calls between two appends are one step and add up. The first call of the next step starts again. */
TEST(many_calls_in_one_step) {
    tkv_config cfg = exact_config(2, 1);
    tkv_cache *kv;
    tkv_attend_params p = make_params(1);
    NEEDS_ATOMICS;
    cfg.evict.policy = TKV_EVICT_TOVA;
    kv = create_cache(&cfg);
    expect_mode(NEWEST, 0, 1.0);
    expected.n_newest = 1;
    append_tokens(kv, LAYER, 100);
    attend_random_queries(kv, &p);
    add_expected_call(kv, &p);
    attend_random_queries(kv, &p);
    add_expected_call(kv, &p);
    check_scores(kv, "twice", 1);
    append_tokens(kv, LAYER, 2); /* no query in this step yet: scores are those of the last query */
    check_scores(kv, "before the next", 1);
    p.window = 20; /* blocks outside the window are not visited; their scores must read as 0 */
    attend_random_queries(kv, &p);
    add_expected_call(kv, &p);
    check_scores(kv, "a window", 1);
    tkv_destroy(kv);
}

TEST(softcap_sinks_biases_and_masks) {
    static const float alibi[HEADS] = {.02f, .01f, .005f, .0f}, sinks[HEADS] = {2.0f, -1.0f, 5.0f, 0.0f};
    static float mask[40 * MAX_TOKENS];
    static const uint64_t bits[4] = {1, 3, 5, 9};
    tkv_config cfg = exact_config(2, 1);
    tkv_attend_params p = make_params(0);
    tkv_cache *kv;
    int i;
    NEEDS_ATOMICS;
    p.softcap = 3.0f;
    p.sink_logits = sinks;
    expect_mode(SUM, 1, 1.0);
    check_collection(&cfg, &p, "softcap, sinks");
    p.softcap = 0.0f;
    expect_mode(SUM, 1, 1.0);
    check_collection(&cfg, &p, "sinks");
    p.sink_logits = NULL;
    p.alibi_slopes = alibi;
    p.window = 70;
    expect_mode(SUM, 1, 1.0);
    check_collection(&cfg, &p, "alibi, window");
    cfg.importance.strategy = TKV_IMPORTANCE_PERSISTENCE;
    expect_mode(LOW_COUNTS, 1, 1.0);
    check_collection(&cfg, &p, "low counts in a window");
    p.window = 0;
    p.non_causal = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_HEAVY_HITTER;
    cfg.importance.heads = TKV_IMPORTANCE_MAX;
    expect_mode(LARGEST, 1, 1.0);
    check_collection(&cfg, &p, "not causal");
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    cfg.importance.heads = TKV_IMPORTANCE_SUM;
    p = make_params(40);
    expect_mode(SUM, 1, 1.0);
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 130);
    for (i = 0; i < 40 * 130; i++) mask[i] = i % 7 == 3 ? -1e30f : (float)(i % 5) * .3f;
    for (i = 0; i < 130; i++) mask[3 * 130 + i] = -1e30f; /* a row that sees no key adds no scores */
    p.mask = mask;
    attend_random_queries(kv, &p);
    add_expected_call(kv, &p);
    check_scores(kv, "mask", 1);
    tkv_destroy(kv);
    kv = create_cache(&cfg);
    expect_mode(SUM, 1, 1.0);
    append_tokens(kv, LAYER, 130);
    p = make_params(4);
    p.mask_bits = bits;
    p.n_mask_bits = 4;
    p.non_causal = 1;
    attend_random_queries(kv, &p);
    add_expected_call(kv, &p);
    check_scores(kv, "a tree", 1);
    tkv_destroy(kv);
}

/* In encoded tiers, collected scores equal the sums of tkv_attend_params.scores. */
TEST(encoded_tiers) {
    static const tkv_format formats[][2] = {
        {TKV_A30, TKV_R30}, {TKV_KIVI4, TKV_KIVI4}, {TKV_INT8, TKV_INT8}, {TKV_SQUAT2, TKV_KIVI2}};
    int i, j, n;
    NEEDS_ATOMICS;
    for (i = 0; i < COUNT(formats); i++) {
        tkv_config cfg = config(2, 1);
        tkv_attend_params p = make_params(1);
        tkv_cache *kv;
        double worst_error = 0.0, total = 0.0;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(formats[i][0], formats[i][1]);
        cfg.tiers.warm_tokens = 128;
        kv = create_cache(&cfg);
        for (n = 0; n < 4; n++) append_tokens(kv, LAYER, 200);
        p.lse = lse;
        p.scores = per_token;
        memset(scores_b, 0, sizeof scores_b);
        for (n = 0; n < 30; n++) {
            p.n = n < 28 ? 1 : 60;
            append_tokens(kv, LAYER, p.n);
            attend_random_queries(kv, &p);
            for (j = 0; j < tkv_get_length(kv, 0, LAYER); j++) scores_b[j] += per_token[j];
        }
        read_scores(kv, LAYER, scores_a);
        for (j = 0; j < MAX_TOKENS; j++) {
            const double error = fabs((double)scores_a[j] - (double)scores_b[j]);
            worst_error = error > worst_error ? error : worst_error;
            total += (double)scores_a[j];
        }
        CHECK_LE(worst_error, 1e-5 * 148);
        CHECK_NEAR(total, 148.0 * (int)HEADS, .1);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

/* Prompt chunks, which some instruction sets compute with prefill kernels. */
TEST(prefill) {
    static const int kv_heads[] = {1, 4};
    int i, j, c;
    NEEDS_ATOMICS;
    for (i = 0; i < 2; i++) {
        tkv_config cfg = config(kv_heads[i], 3);
        tkv_cache *kv[2];
        double worst_error = 0.0, total = 0.0;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.host.precise = 1;
        for (c = 0; c < 2; c++) {
            tkv_attend_params p = make_params(190);
            rng = tkv_rng_seed(77);
            kv[c] = create_cache(&cfg);
            if (c) p.lse = lse, p.scores = per_token; /* p.scores rules out the prefill kernels */
            for (j = 0; j < 5; j++) {
                append_tokens(kv[c], LAYER, 190);
                attend_random_queries(kv[c], &p);
            }
        }
        read_scores(kv[0], LAYER, scores_a);
        read_scores(kv[1], LAYER, scores_b);
        for (j = 0; j < MAX_TOKENS; j++) {
            const double error = fabs((double)scores_a[j] - (double)scores_b[j]);
            worst_error = error > worst_error ? error : worst_error;
            total += (double)scores_a[j];
        }
        CHECK_LE(worst_error, 2e-4 * (double)scores_b[0] + 1e-2);
        CHECK_NEAR(total, 950.0 * (int)HEADS, 3 * ((int)HEADS + .5));
        for (c = 0; c < 2; c++) tkv_destroy(kv[c]);
    }
}

/* >>independence of threads and instruction sets */
static void run_backwards(void *user, int n, tkv_task task, void *ctx) {
    int i;
    (void)user;
    for (i = n; i-- > 0;) task(ctx, i);
}

static void run_in_three_turns(void *user, int n, tkv_task task,
                               void *ctx) { /* an order that 3 workers may produce */
    int i, k;
    (void)user;
    for (k = 2; k >= 0; k--)
        for (i = k; i < n; i += 3) task(ctx, i);
}

/* Runs the same tokens and queries each time. Returns hashes of the output and of the collected scores. */
static void run_and_hash(const tkv_config *cfg, int queries, uint64_t *out_hash, uint64_t *score_hash) {
    tkv_cache *kv = create_cache(cfg);
    tkv_attend_params p = make_params(queries);
    int i;
    rng = tkv_rng_seed(5);
    *out_hash = *score_hash = HASH_START;
    for (i = 0; i < 4; i++) append_tokens(kv, LAYER, 200);
    for (i = 0; i < 17; i++) {
        append_tokens(kv, LAYER, i % 2 ? 1 : 1 + queries);
        attend_random_queries(kv, &p);
        *out_hash = hash_of_floats(*out_hash, out, queries * Q_ROW);
    }
    if (cfg->evict.policy || cfg->importance.sample_every) {
        read_scores(kv, LAYER, scores_a);
        *score_hash = hash_of_floats(*score_hash, scores_a, MAX_TOKENS);
    }
    tkv_destroy(kv);
}

TEST(threads_do_not_change_scores) {
    static const int queries[] = {1, 3, 18};
    static const tkv_evict_policy policies[] = {TKV_EVICT_NONE, TKV_EVICT_SCISSORHANDS, TKV_EVICT_TOVA};
    static const tkv_parallel_for orders[] = {NULL, run_backwards, run_in_three_turns};
    int i, j, k;
    NEEDS_ATOMICS;
    for (i = 0; i < 3; i++)
        for (j = 0; j < 3; j++) {
            uint64_t out_hash[3], score_hash[3], plain_hash, unused;
            tkv_config cfg = config(2, 4);
            cfg.importance.strategy = TKV_IMPORTANCE_HYBRID;
            cfg.importance.heads = (tkv_importance_heads)((i + j) % 3);
            cfg.evict.policy = policies[j];
            for (k = 0; k < 3; k++) {
                cfg.host.parallel_for = orders[k];
                run_and_hash(&cfg, queries[i], &out_hash[k], &score_hash[k]);
            }
            CHECK(out_hash[1] == out_hash[0] && out_hash[2] == out_hash[0]);
            CHECK(score_hash[1] == score_hash[0] && score_hash[2] == score_hash[0]);
            CHECK(score_hash[0] !=
                  hash_of_floats(HASH_START, (float *)memset(scores_a, 0, sizeof scores_a), MAX_TOKENS));
            memset(&cfg.evict, 0, sizeof cfg.evict);
            cfg.importance.sample_every = 0;
            run_and_hash(&cfg, queries[i], &plain_hash, &unused);
            CHECK(plain_hash == out_hash[0]); /* collecting scores does not change the output */
        }
}

TEST(instruction_sets_agree) {
    tkv_config cfg = config(2, 2);
    uint64_t out_hash, score_hash;
    int isa, j;
    NEEDS_ATOMICS;
    cfg.host.isa = TKV_ISA_SCALAR;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    run_and_hash(&cfg, 2, &out_hash, &score_hash);
    memcpy(scores_b, scores_a, sizeof scores_b);
    for (isa = TKV_ISA_SCALAR; isa < TKV_ISA_COUNT; isa++) {
        double worst_error = 0.0;
        if (!is_isa_available((tkv_isa)isa)) continue;
        cfg.host.isa = (tkv_isa)isa;
        run_and_hash(&cfg, 2, &out_hash, &score_hash);
        for (j = 0; j < MAX_TOKENS; j++) {
            const double error = fabs((double)scores_a[j] - (double)scores_b[j]);
            worst_error = error > worst_error ? error : worst_error;
        }
        CHECK_LE(worst_error, 1e-5 * 68);
    }
}

/* Scores are collected only if the policy or cfg.importance.sample_every needs them. */
TEST(scores_are_collected_only_if_needed) {
    tkv_config cfg = config(2, 0);
    tkv_attend_params p = make_params(64);
    tkv_cache *kv;
    int kind, j;
    NEEDS_ATOMICS;
    cfg.evict.scorer = (float (*)(void *, const struct tkv_evict_view *, int))0;
    for (kind = 0; kind < TKV_EVICT_USER; kind++) {
        const int needs_scores = kind == TKV_EVICT_SCORES || kind == TKV_EVICT_H2O ||
                                 kind == TKV_EVICT_SNAPKV || kind == TKV_EVICT_PYRAMIDKV ||
                                 kind == TKV_EVICT_TOVA || kind == TKV_EVICT_SCISSORHANDS;
        int has_scores = 0;
        cfg.evict.policy = (tkv_evict_policy)kind;
        kv = create_cache(&cfg);
        append_tokens(kv, LAYER, 64);
        attend_random_queries(kv, &p);
        memset(scores_a, 0, sizeof scores_a);
        CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 64, scores_a, NULL),
                 needs_scores ? TKV_OK : TKV_ERR_CONFIG);
        for (j = 0; j < 64; j++) has_scores |= scores_a[j] > 0.0f || scores_a[j] < 0.0f;
        CHECK_MSG(has_scores == needs_scores, "%s: scores collected: %d",
                  tkv_get_name(TKV_NAME_EVICT_POLICY, kind), has_scores);
        tkv_destroy(kv);
    }
    cfg.evict.policy = TKV_EVICT_SLIDING; /* needs no scores, but sample_every requests them */
    cfg.importance.sample_every = 1;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 64);
    attend_random_queries(kv, &p);
    read_scores(kv, LAYER, scores_a);
    CHECK(scores_a[0] > 1.0f);
    tkv_destroy(kv);
}

TEST(nonfinite_queries) {
    tkv_config cfg = exact_config(2, 1);
    tkv_attend_params p = make_params(2);
    tkv_cache *kv;
    int i, n_valid = 0;
    NEEDS_ATOMICS;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 100);
    for (i = 0; i < 2 * Q_ROW; i++) q_in[i] = tkv_test_float(i % 3 ? 0x7fc00000u : 0x7f800000u);
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    read_scores(kv, LAYER, scores_a);
    for (i = 0; i < 100; i++) n_valid += tkv_test_is_finite((double)scores_a[i]) && scores_a[i] >= 0.0f;
    CHECK_EQ(n_valid, 100);
    attend_random_queries(kv, &p); /* the next, finite queries count */
    read_scores(kv, LAYER, scores_b);
    CHECK(scores_b[0] > scores_a[0]);
    tkv_destroy(kv);
}

/* A token at a truncated position starts with score 0. */
TEST(truncation_and_abort) {
    tkv_config cfg = exact_config(2, 1);
    tkv_attend_params p = make_params(1);
    tkv_cache *kv;
    NEEDS_ATOMICS;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 100);
    attend_random_queries(kv, &p);
    read_scores(kv, LAYER, scores_b);
    CHECK(scores_b[89] > 0.0f && scores_b[90] > 0.0f);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 90), TKV_OK);
    append_tokens(kv, LAYER, 10);
    read_scores(kv, LAYER, scores_a);
    CHECK_MEM(scores_a, scores_b, 90 * sizeof *scores_a);
    CHECK_NEAR(scores_a[90], 0.0, 0.0);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    append_tokens(kv, LAYER, 30);
    attend_random_queries(kv, &p);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    append_tokens(kv, LAYER, 30);
    read_scores(kv, LAYER, scores_a);
    CHECK_NEAR(scores_a[100], 0.0, 0.0);
    CHECK_NEAR(scores_a[129], 0.0, 0.0);
    CHECK(scores_a[90] > 0.0f); /* tokens from before the step keep the scores of its queries */
    check_cache(kv);
    tkv_destroy(kv);
}

/* Truncates below the last sampled step. The scores of that step must not return at the same length. */
TEST(truncation_with_newest_queries) {
    tkv_config cfg = exact_config(2, 1);
    tkv_attend_params p = make_params(1);
    tkv_cache *kv;
    NEEDS_ATOMICS;
    cfg.evict.policy = TKV_EVICT_TOVA;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 100);
    attend_random_queries(kv, &p);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 98), TKV_OK);
    append_tokens(kv, LAYER, 2);
    expect_mode(NEWEST, 0, 1.0);
    expected.n_newest = 1;
    attend_random_queries(kv, &p);
    add_expected_call(kv, &p);
    check_scores(kv, "sampled again", 1);
    tkv_destroy(kv);
}

/* >>importance of a cache's tokens */
TEST(importance) {
    tkv_config cfg = exact_config(2, 1);
    tkv_attend_params p = make_params(1);
    tkv_token_importance token[300];
    uint64_t removed_mask[5];
    float want[300], some[70];
    const tkv_rng saved_rng = rng;
    tkv_cache *kv;
    int i;
    NEEDS_ATOMICS;
    cfg.importance.strategy = TKV_IMPORTANCE_HYBRID;
    cfg.importance.tau = 50.0f;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 256);
    attend_random_queries(kv, &p);
    append_tokens(kv, LAYER, 44);
    read_scores(kv, LAYER, scores_b);
    for (i = 0; i < 300; i++) {
        token[i].attention = scores_b[i]; /* already decayed */
        token[i].step = 299;
    }
    tkv_destroy(kv);
    rng = saved_rng; /* the same tokens again, with the weights of the strategy */
    cfg.importance.attention = cfg.importance.recency = 0.0f;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 256);
    attend_random_queries(kv, &p);
    append_tokens(kv, LAYER, 44);
    CHECK_EQ(tkv_update_importance(&cfg.importance, token, NULL, NULL, 300, 299, want), TKV_OK);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 300, scores_a, removed_mask), TKV_OK);
    CHECK_MEM(scores_a, want, sizeof want);
    for (i = 0; i < 5; i++) CHECK(removed_mask[i] == 0);
    CHECK_NEAR(scores_a[299], .3, 1e-6); /* no query since its append: recency only */
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 60, 70, some, removed_mask), TKV_OK);
    CHECK_MEM(some, want + 60, sizeof some);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 300, 0, some, removed_mask), TKV_OK);
    CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, 0, some, removed_mask), TKV_OK); /* a layer without tokens */
    memcpy(per_token, scores_a, sizeof per_token);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 301, scores_a, removed_mask), TKV_ERR_RANGE);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, -1, 1, scores_a, removed_mask), TKV_ERR_RANGE);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 2147483647, 2147483647, scores_a, removed_mask), TKV_ERR_RANGE);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, -1, scores_a, removed_mask), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 1, NULL, removed_mask), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_importance(kv, 1, LAYER, 0, 1, some, removed_mask), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYERS, 0, 1, some, removed_mask), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_importance(NULL, 0, LAYER, 0, 1, some, removed_mask), TKV_ERR_ARG);
    CHECK_MEM(scores_a, per_token, sizeof per_token); /* errors write nothing */
    tkv_destroy(kv);
    cfg.importance.sample_every = 0;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 10);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 10, some, removed_mask), TKV_ERR_CONFIG);
    tkv_destroy(kv);
    cfg.importance.strategy = TKV_IMPORTANCE_RECENCY; /* needs no scores */
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 10);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 10, some, removed_mask), TKV_OK);
    CHECK_NEAR(some[9], 1.0, 1e-6);
    CHECK_NEAR(some[4], exp(-.1), 1e-6);
    tkv_destroy(kv);
}

/* Expired and evicted tokens have importance 0 and a bit in the mask. */
TEST(expired_and_evicted_tokens) {
    tkv_config cfg = config(2, 1);
    tkv_attend_params p = make_params(1);
    const float added[3] = {5.0f, 6.0f, 7.0f};
    tkv_ranked best[4];
    uint64_t removed_mask[16];
    tkv_cache *kv;
    int i, expired, n = 0, count;
    NEEDS_ATOMICS;
    cfg.model.window = 100;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    for (i = 0; i < 6; i++) append_tokens(kv, LAYER, 100);
    attend_random_queries(kv, &p);
    expired = n_expired(kv);
    REQUIRE(expired > 64 && expired < 600);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 600, scores_a, removed_mask), TKV_OK);
    for (i = 0; i < 600; i++) n += (int)(removed_mask[i / 64] >> i % 64 & 1);
    CHECK_EQ(n, expired);
    CHECK(removed_mask[0] == ~(uint64_t)0 && removed_mask[9] == 0);
    CHECK_NEAR(scores_a[0], 0.0, 0.0);
    CHECK(scores_a[590] > 0.0f);
    i = 4 + 9 * 64; /* start of the newest block; its second token is evicted */
    memset(removed_mask, 0, sizeof removed_mask);
    add_to_mask(removed_mask, i + 1);
    CHECK_EQ(evict_tokens(kv, 0, LAYER, removed_mask, 600), TKV_OK);
    CHECK_EQ(tkv_get_importance(kv, 0, LAYER, i, 3, scores_a, removed_mask), TKV_OK);
    CHECK(removed_mask[0] == 2 && scores_a[0] > 0.0f && !(scores_a[1] > 0.0f) && scores_a[2] > 0.0f);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, i, 3, added), TKV_OK); /* skips the evicted token */
    read_scores(kv, LAYER, scores_b);
    CHECK(scores_b[i] > 5.0f && scores_b[i + 1] < 1.0f && scores_b[i + 2] > 7.0f);
    CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, 4, 0, best, &count), TKV_OK);
    CHECK_EQ(best[0].position, i + 2);
    CHECK_EQ(best[1].position, i);
    for (n = 0; n < count; n++) CHECK(best[n].position != i + 1 && best[n].position >= expired);
    attend_random_queries(kv, &p); /* evicted tokens get no scores */
    memcpy(per_token, scores_b, sizeof per_token);
    read_scores(kv, LAYER, scores_b);
    CHECK(scores_b[i] > per_token[i] && !(scores_b[i + 1] > per_token[i + 1]));
    tkv_destroy(kv);
}

/* After eviction and merging of blocks, live tokens keep their scores and get new ones. */
TEST(scores_after_eviction) {
    static const tkv_evict_policy policies[] = {TKV_EVICT_H2O, TKV_EVICT_TOVA, TKV_EVICT_SCISSORHANDS};
    static float before[MAX_TOKENS];
    int i, j, n;
    NEEDS_ATOMICS;
    for (i = 0; i < COUNT(policies); i++) {
        tkv_config cfg = config(2, 1);
        tkv_attend_params p = make_params(1);
        uint64_t live_mask[MAX_TOKENS / 64 + 1], odd[10];
        double worst_error = 0.0, total = 0.0, kept = 0.0;
        tkv_cache *kv;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.tiers.warm_tokens = 128;
        cfg.evict.policy = policies[i];
        cfg.importance.decay = .999f;
        kv = create_cache(&cfg);
        for (n = 0; n < 5; n++) {
            append_tokens(kv, LAYER, 150);
            p.window = n == 4 ? 240 : 0; /* blocks outside the window are a step behind */
            attend_random_queries(kv, &p);
        }
        read_scores(kv, LAYER, before);
        for (n = 0; n < 10; n++) odd[n] = 0xaaaaaaaaaaaaaaaau;
        CHECK_EQ(evict_tokens(kv, 0, LAYER, odd, 640), TKV_OK);
        CHECK(n_layer_blocks(kv, 0, LAYER) < 750 / 64 + 1);
        CHECK_EQ(live_mask_of(kv, 0, LAYER, 0, 750, live_mask), TKV_OK);
        read_scores(kv, LAYER, scores_a);
        for (j = n = 0; j < 750; j++) {
            if (!(live_mask[j / 64] >> j % 64 & 1)) continue;
            n++;
            CHECK_NEAR(scores_a[j], before[j], policies[i] == TKV_EVICT_SCISSORHANDS ? 1.0 / 256.0 : 2e-5);
            kept += fabs((double)before[j]);
        }
        CHECK_EQ(n, 430);
        CHECK(kept > 0.0);
        append_tokens(kv, LAYER, 2);
        read_scores(kv, LAYER, before);
        p.window = 0;
        p.lse = lse;
        p.scores = per_token;
        attend_random_queries(kv, &p);
        read_scores(kv, LAYER, scores_a);
        CHECK_EQ(tkv_get_importance(kv, 0, LAYER, 0, 752, scores_b, live_mask), TKV_OK);
        for (j = n = 0; j < 752; j++) {
            const int live = !(live_mask[j / 64] >> j % 64 & 1);
            const double old = policies[i] == TKV_EVICT_TOVA ? 0.0 : (double)before[j];
            const double error = fabs((double)scores_a[j] - old - (double)per_token[j]);
            n += live;
            if (!live) CHECK(!(per_token[j] > 0.0f) && bits_of(scores_b[j]) == 0);
            if (!live || policies[i] == TKV_EVICT_SCISSORHANDS) continue;
            worst_error = error > worst_error ? error : worst_error;
            total += (double)per_token[j];
        }
        CHECK_EQ(n, 432);
        CHECK_LE(worst_error, 2e-5 * (int)HEADS);
        if (policies[i] != TKV_EVICT_SCISSORHANDS) CHECK_NEAR(total, HEADS, 1e-2);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

TEST(scores_from_the_caller) {
    tkv_config cfg = exact_config(2, 1);
    float added[200];
    tkv_cache *kv;
    int i;
    cfg.importance.decay = .5f;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 200);
    for (i = 0; i < 200; i++) added[i] = (float)i * .01f;
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 200, added), TKV_OK);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 50, 100, added), TKV_OK);
    read_scores(kv, LAYER, scores_a);
    CHECK_NEAR(scores_a[49], .49, 1e-6);
    CHECK_NEAR(scores_a[50], .50, 1e-6);
    CHECK_NEAR(scores_a[149], 1.49 + .99, 1e-6);
    CHECK_NEAR(scores_a[150], 1.5, 1e-6);
    append_tokens(kv, LAYER, 2);
    read_scores(kv, LAYER, scores_a);
    CHECK_NEAR(scores_a[149], 2.48 / 4.0, 1e-6);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 149, 1, added + 100), TKV_OK);
    read_scores(kv, LAYER, scores_a);
    CHECK_NEAR(scores_a[149], 2.48 / 4.0 + 1.0, 1e-5);
    added[0] = 1e30f; /* sums saturate */
    for (i = 0; i < 3; i++) CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 7, 1, added), TKV_OK);
    read_scores(kv, LAYER, scores_a);
    CHECK_NEAR(scores_a[7], 4096.0, .01);
    memcpy(scores_b, scores_a, sizeof scores_b);
    added[1] = tkv_test_float(0x7fc00000u);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 2, added), TKV_ERR_NONFINITE);
    CHECK(strstr(tkv_get_last_error(kv), "entry 1") != NULL);
    added[1] = -.001f;
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 2, added), TKV_ERR_NONFINITE);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 100, 103, added), TKV_ERR_RANGE);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, -1, 1, added), TKV_ERR_RANGE);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, -1, added), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(kv, 3, LAYER, 0, 1, added), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(kv, 0, -1, 0, 1, added), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(NULL, 0, 0, 0, 1, added), TKV_ERR_ARG);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 0, NULL), TKV_OK);
    read_scores(kv, LAYER, scores_a);
    CHECK_MEM(scores_a, scores_b, sizeof scores_a);
    check_cache(kv);
    tkv_destroy(kv);
    cfg.importance.sample_every = 0;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 2);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 1, added), TKV_ERR_CONFIG);
    CHECK(strstr(tkv_get_last_error(kv), "sample_every") != NULL);
    tkv_destroy(kv);
    cfg.evict.policy = TKV_EVICT_SCISSORHANDS;
    cfg.importance.low = .5f;
    kv = create_cache(&cfg);
    append_tokens(kv, LAYER, 100);
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 2, 98, added + 2), TKV_OK);
    read_scores(kv, LAYER, scores_a);
    CHECK_NEAR(scores_a[1], 0.0, 0.0);
    CHECK_NEAR(scores_a[49], -1.0, 0.0);
    CHECK_NEAR(scores_a[51], 0.0, 0.0);
    tkv_destroy(kv);
}

TEST(top_tokens) {
    tkv_config cfg = exact_config(2, 1);
    tkv_ranked best[400];
    float added[300];
    int order[300], i, j, k, n, protect, count = 0;
    tkv_cache *kv = create_cache(&cfg);
    CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, 5, 0, best, &count), TKV_OK);
    CHECK_EQ(count, 0);
    append_tokens(kv, LAYER, 200);
    append_tokens(kv, LAYER, 100);
    rng = tkv_rng_seed(3);
    for (i = 0; i < 300; i++) added[i] = (float)tkv_rng_below(&rng, 100) * .03125f; /* many are equal */
    CHECK_EQ(tkv_add_scores(kv, 0, LAYER, 0, 300, added), TKV_OK);
    for (protect = 0; protect < 2; protect++) {
        for (i = n = 0; i < 300; i++) { /* insertion sort: highest score first, then the older token */
            if (protect && (i < 4 || i >= 300 - 32)) continue;
            for (j = n++; j > 0 && added[order[j - 1]] < added[i]; j--) order[j] = order[j - 1];
            order[j] = i;
        }
        for (k = 0; k <= 400; k += k < 5 ? 1 : 79) {
            count = -1;
            CHECK_EQ(tkv_find_top_tokens(kv, 0, LAYER, k, protect, best, &count), TKV_OK);
            CHECK_EQ(count, k < n ? k : n);
            for (i = 0; i < count; i++) {
                CHECK_EQ(best[i].position, order[i]);
                CHECK_NEAR(best[i].importance, added[order[i]], 1e-6);
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
    tkv_attend_params p = make_params(1);
    tkv_memory_info info, estimate, without_scores;
    tkv_cache *kv;
    size_t bytes = 0;
    void *mem;
    counting_allocator allocator;
    int i, n_requests, layer;
    cfg.limits.max_tokens = 1000;
    cfg.host.allocator = counting_allocator_of(&allocator);
    kv = create_cache(&cfg);
    for (i = 0; i < 1000; i++)
        for (layer = 0; layer < LAYERS; layer++) append_tokens(kv, layer, 1);
    n_requests = allocator.n_requests;
    attend_random_queries(kv, &p);
    CHECK_EQ(allocator.n_requests, n_requests); /* attention requests no memory */
    CHECK_EQ(tkv_get_memory(kv, &info), TKV_OK);
    CHECK_EQ(info.total, allocator.held);
    CHECK_EQ(tkv_estimate_memory(&cfg, 1000, 1, &estimate), TKV_OK);
    CHECK_EQ(estimate.total - estimate.index, info.total - info.index);
    CHECK_LE(estimate.index, info.index); /* the cache's index has grown in larger steps */
    CHECK_LE(info.index, 2 * estimate.index);
    cfg.importance.sample_every = 0;
    CHECK_EQ(tkv_estimate_memory(&cfg, 1000, 1, &without_scores), TKV_OK);
    CHECK_LE(without_scores.index + (size_t)(LAYERS * n_layer_blocks(kv, 0, LAYER)) * 432, estimate.index);
    check_cache(kv);
    tkv_destroy(kv);
    CHECK_EQ(allocator.held, 0);
    cfg = config(2, 1);
    cfg.limits.max_tokens = 1000;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    mem = malloc(bytes);
    REQUIRE(mem != NULL);
    CHECK_EQ(tkv_create_in_place(&cfg, mem, bytes, &kv, NULL, 0), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++)
        for (i = 0; i < 10; i++) append_tokens(kv, layer, 100);
    attend_random_queries(kv, &p);
    read_scores(kv, LAYER, scores_a);
    for (i = 0; i < 1000; i++) scores_a[0] += i ? scores_a[i] : 0.0f;
#if defined(__GNUC__) || defined(__clang__)
    CHECK_NEAR(scores_a[0], HEADS, 1e-2);
#endif
    check_cache(kv);
    tkv_destroy(kv);
    free(mem);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(1);
    RUN(sums_of_weights);
    RUN(decay);
    RUN(other_score_modes);
    RUN(query_heads_are_combined);
    RUN(mean_and_sum_rank_alike);
    RUN(combining_query_heads_keeps_the_output);
    RUN(importance_is_independent_of_the_rate);
    RUN(largest_rates);
    RUN(scores_from_the_caller_at_any_rate);
    RUN(many_calls_in_one_step);
    RUN(softcap_sinks_biases_and_masks);
    RUN(encoded_tiers);
    RUN(prefill);
    RUN(threads_do_not_change_scores);
    RUN(instruction_sets_agree);
    RUN(scores_are_collected_only_if_needed);
    RUN(nonfinite_queries);
    RUN(truncation_and_abort);
    RUN(truncation_with_newest_queries);
    RUN(importance);
    RUN(expired_and_evicted_tokens);
    RUN(scores_after_eviction);
    RUN(scores_from_the_caller);
    RUN(top_tokens);
    RUN(memory);
    return tkv_test_end();
}
