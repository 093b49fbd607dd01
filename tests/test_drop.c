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
static float q_in[CHUNK * HEADS * DIM], out[CHUNK * HEADS * DIM], reference_out[CHUNK * HEADS * DIM];
static float mask[CHUNK * LONGEST];
static tkv_rng rng;

/* >>a cache under test, and a reference that keeps every token exactly */
typedef struct cache_pair {
    tkv_cache *kv, *reference;
} cache_pair;

static tkv_config small_config(void) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.evict.policy = TKV_EVICT_SLIDING;
    return cfg;
}

static cache_pair make_pair(const tkv_config *cfg) {
    tkv_config reference = small_config();
    cache_pair pair;
    reference.evict.policy = TKV_EVICT_NONE;
    reference.tiers.hot_tokens = TKV_UNLIMITED;
    reference.model.window = cfg->model.window;
    pair.kv = create_cache(cfg);
    pair.reference = create_cache(&reference);
    rng = tkv_rng_seed(1);
    return pair;
}

static void destroy_pair(cache_pair *pair) {
    tkv_destroy(pair->kv);
    tkv_destroy(pair->reference);
}

static tkv_status append_tokens(cache_pair *pair, int seq, int n) {
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < LAYERS && !st; layer++) {
        tkv_rng_fill(&rng, k_in, (size_t)(n * ROW), 1.0);
        tkv_rng_fill(&rng, v_in, (size_t)(n * ROW), 1.0);
        st = tkv_append(pair->kv, seq, layer, k_in, v_in, n);
        if (!st) CHECK_EQ(tkv_append(pair->reference, seq, layer, k_in, v_in, n), TKV_OK);
    }
    return st;
}

static int is_live(const tkv_cache *kv, int seq, int layer, int position) {
    uint64_t bit = 0;
    CHECK_EQ(live_mask_of(kv, seq, layer, position, 1, &bit), TKV_OK);
    return (int)bit;
}

static int n_live(const tkv_cache *kv, int seq, int layer) {
    uint64_t live_mask[WORDS];
    int i, n = 0, len = tkv_get_length(kv, seq, layer);
    CHECK_EQ(live_mask_of(kv, seq, layer, 0, len, live_mask), TKV_OK);
    for (i = 0; i < len; i++) n += is_in_mask(live_mask, i);
    return n;
}

/* Number of blocks that would hold the live tokens of a layer if no blocks had been merged. */
static int n_blocks_unmerged(const tkv_cache *kv, int seq, int layer) {
    uint64_t live_mask[WORDS];
    int i, n = 0, last = -1, len = tkv_get_length(kv, seq, layer);
    CHECK_EQ(live_mask_of(kv, seq, layer, 0, len, live_mask), TKV_OK);
    for (i = 0; i < len; i++) {
        const int block = (i + BLOCK - SINKS) / BLOCK; /* the sinks have a block of their own */
        n += is_in_mask(live_mask, i) && block != last;
        if (is_in_mask(live_mask, i)) last = block;
    }
    return n;
}

/* Compares attention of the last n tokens with the reference, where a mask hides the evicted tokens. `options` adds
 * a window, a mask and so on. */
static void check_attention(const cache_pair *pair, int seq, int layer, int n,
                            const tkv_attend_params *options, double bound) {
    uint64_t live_mask[WORDS];
    tkv_attend_params p;
    const int len = tkv_get_length(pair->kv, seq, layer);
    double err_sq = 0.0, sum_sq = 0.0;
    int row, i;
    memset(&p, 0, sizeof p);
    if (options) p = *options;
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.q = q_in;
    p.out = out;
    tkv_rng_fill(&rng, q_in, (size_t)(n * HEADS * DIM), 1.5);
    CHECK_EQ(tkv_attend_ex(pair->kv, &p), TKV_OK);
    CHECK_EQ(live_mask_of(pair->kv, seq, layer, 0, len, live_mask), TKV_OK);
    for (row = 0; row < n; row++)
        for (i = 0; i < len; i++) {
            const float bias =
                options && options->mask ? ((const float *)options->mask)[row * LONGEST + i] : 0.0f;
            mask[row * len + i] = is_in_mask(live_mask, i) ? bias : -1e30f;
        }
    p.mask = mask;
    p.mask_stride = len;
    p.out = reference_out;
    CHECK_EQ(tkv_attend_ex(pair->reference, &p), TKV_OK);
    for (i = 0; i < n * HEADS * DIM; i++) {
        const double diff = (double)out[i] - (double)reference_out[i];
        err_sq += diff * diff;
        sum_sq += (double)reference_out[i] * (double)reference_out[i];
    }
    CHECK_MSG(err_sq <= bound * bound * sum_sq, "sequence %d, layer %d, %d queries: off by %.2e", seq, layer,
              n, sqrt(err_sq / (sum_sq > 0.0 ? sum_sq : 1.0)));
}

/* Each live token must read as it was written. `bound` limits the relative error over all values. Reading an evicted
 * token must fail with TKV_ERR_RANGE. */
static void check_reads(const cache_pair *pair, int seq, int layer, double bound) {
    const int len = tkv_get_length(pair->kv, seq, layer);
    float k[ROW], v[ROW];
    double err_sq = 0.0, sum_sq = 0.0;
    int i, c;
    CHECK_EQ(tkv_read(pair->reference, seq, layer, 0, len, k_out, v_out), TKV_OK);
    for (i = 0; i < len; i++) {
        tkv_tier tier;
        const int live = is_live(pair->kv, seq, layer, i);
        const tkv_status st = tkv_read(pair->kv, seq, layer, i, 1, k, v);
        CHECK_EQ(st, live ? TKV_OK : TKV_ERR_RANGE);
        CHECK_EQ(tier_of(pair->kv, seq, layer, i, &tier), live ? TKV_OK : TKV_ERR_RANGE);
        for (c = 0; c < ROW && !st; c++) {
            const double a = (double)k[c] - (double)k_out[i * ROW + c];
            const double b = (double)v[c] - (double)v_out[i * ROW + c];
            err_sq += a * a + b * b;
            sum_sq += (double)k_out[i * ROW + c] * (double)k_out[i * ROW + c];
        }
    }
    CHECK_MSG(err_sq <= bound * bound * 2.0 * sum_sq, "off by %.2e", sqrt(err_sq / (2.0 * sum_sq)));
}

/* Evicts each token of a layer with a probability of `percent`. */
static void evict_random_tokens(cache_pair *pair, int seq, int layer, int percent) {
    uint64_t victims[WORDS];
    int i, len = tkv_get_length(pair->kv, seq, layer);
    memset(victims, 0, sizeof victims);
    for (i = 0; i < len; i++)
        if (tkv_rng_below(&rng, 100) < percent) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(pair->kv, seq, layer, victims, len), TKV_OK);
    for (i = 0; i < len; i++)
        if (is_in_mask(victims, i)) CHECK(!is_live(pair->kv, seq, layer, i));
    check_cache(pair->kv);
}

/* >>which tokens are evicted */
/* StreamingLLM: the sinks and the newest tokens stay, keep_tokens in all. */
TEST(a_window_slides) {
    tkv_config cfg = small_config();
    cache_pair pair;
    int n, i;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.evict.keep_tokens = 200;
    cfg.evict.batch = 1;
    pair = make_pair(&cfg);
    for (n = 1; n <= 700; n++) {
        CHECK_EQ(append_tokens(&pair, 0, 1), TKV_OK);
        CHECK_EQ(n_live(pair.kv, 0, 0), n < 200 ? n : 200);
    }
    for (i = 0; i < 700; i++) CHECK_EQ(is_live(pair.kv, 0, 0, i), i < 4 || i >= 700 - 196);
    check_attention(&pair, 0, 1, 1, NULL, FAST_MATH ? 1e-3 : 1e-5);
    check_cache(pair.kv);
    destroy_pair(&pair);
}

/* A chunk may have more tokens than keep_tokens. The sinks stay beside it. */
TEST(sinks_outlast_long_chunks) {
    int chunk;
    for (chunk = 32; chunk <= CHUNK; chunk += 32) {
        tkv_config cfg = small_config();
        cache_pair pair;
        int n, i;
        cfg.tiers.hot_tokens = TKV_UNLIMITED;
        cfg.evict.keep_tokens = 128;
        pair = make_pair(&cfg);
        for (n = 0; n < 4; n++) {
            CHECK_EQ(append_tokens(&pair, 0, chunk), TKV_OK);
            for (i = 0; i < 4; i++) CHECK(is_live(pair.kv, 0, 0, i));
            CHECK(n_live(pair.kv, 0, 0) <= (chunk + 5 > 128 ? chunk + 5 : 128));
        }
        check_cache(pair.kv);
        destroy_pair(&pair);
    }
}

/* At most keep_tokens stay. At least keep_tokens less a batch and a chunk stay. */
TEST(eviction_in_batches) {
    tkv_config cfg = small_config();
    cache_pair pair;
    int n, fewest = LONGEST;
    cfg.evict.keep_tokens = 300;
    cfg.evict.policy = TKV_EVICT_KNORM;
    pair = make_pair(&cfg);
    for (n = 0; n < 150; n++) {
        const int more = 1 + tkv_rng_below(&rng, 15);
        int count;
        CHECK_EQ(append_tokens(&pair, 0, more), TKV_OK);
        count = n_live(pair.kv, 0, 2);
        CHECK(count <= 300);
        if (tkv_get_length(pair.kv, 0, TKV_ALL_LAYERS) > 310 && count < fewest) fewest = count;
    }
    CHECK(fewest >= 300 - 64 - 15 && fewest < 300 - 30);
    destroy_pair(&pair);
}

/* The mean of |k| over KV heads, which the policy "knorm" uses. */
static void compute_key_norms(const float *keys, int n, float *norms) {
    int i, h, c;
    for (i = 0; i < n; i++) {
        double sum = 0.0, squares;
        for (h = 0; h < KV_HEADS; h++) {
            const float *key = keys + i * ROW + h * DIM;
            for (c = 0, squares = 0.0; c < DIM; c++) squares += (double)key[c] * (double)key[c];
            sum += sqrt(squares);
        }
        norms[i] = (float)(sum / (int)KV_HEADS);
    }
}

/* tkv_evict must keep the tokens that tkv_select_victims keeps for the same keys. */
static void check_victims(tkv_evict_policy kind, int keep) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    tkv_evict_view v;
    uint64_t victims[WORDS];
    float norms[600], scores[600];
    cache_pair pair;
    int i;
    cfg.evict.policy = kind;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    pair = make_pair(&cfg);
    for (i = 0; i < 3; i++) CHECK_EQ(append_tokens(&pair, 0, 200), TKV_OK);
    CHECK_EQ(tkv_read(pair.reference, 0, 1, 0, 600, k_out, v_out), TKV_OK);
    compute_key_norms(k_out, 600, norms);
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
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
    for (i = 0; i < 600; i++) CHECK_EQ(is_live(pair.kv, 0, 1, i), !is_in_mask(victims, i));
    for (i = 0; i < LAYERS; i++) CHECK_EQ(n_live(pair.kv, 0, i), keep);
    check_attention(&pair, 0, 1, 1, NULL, FAST_MATH ? 1e-3 : 1e-5);
    check_attention(&pair, 0, 1, 100, NULL, FAST_MATH ? 1e-3 : 1e-5);
    check_reads(&pair, 0, 1, 0);
    check_cache(pair.kv);
    destroy_pair(&pair);
}

TEST(tkv_evict_takes_the_selected_victims) {
    check_victims(TKV_EVICT_KNORM, 250);
    check_victims(TKV_EVICT_KEYDIFF, 111);
    check_victims(TKV_EVICT_RANDOM, 65);
    check_victims(TKV_EVICT_FIFO, 1);
}

/* Recoding must not change the norms. */
TEST(knorm_uses_norms_of_the_appended_keys) {
    static const tkv_format_pair formats = {TKV_KIVI2, TKV_KIVI2};
    tkv_config cfg = small_config();
    tkv_evict_params p;
    tkv_evict_view v;
    uint64_t victims[WORDS];
    float norms[600], scores[600];
    cache_pair pair;
    int i;
    cfg.evict.policy = TKV_EVICT_KNORM;
    cfg.tiers.warm = cfg.tiers.archive = formats;
    pair = make_pair(&cfg);
    for (i = 0; i < 3; i++) CHECK_EQ(append_tokens(&pair, 0, 200), TKV_OK);
    CHECK_EQ(tkv_read(pair.reference, 0, 1, 0, 600, k_out, v_out), TKV_OK);
    compute_key_norms(k_out, 600, norms);
    memset(&v, 0, sizeof v);
    v.n = 600;
    v.norms = norms;
    CHECK_EQ(tkv_select_victims(&cfg.evict, &v, 200, scores, victims, NULL), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = 1;
    p.keep = 200;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
    for (i = 0; i < 600; i++) CHECK_EQ(is_live(pair.kv, 0, 1, i), !is_in_mask(victims, i));
    check_cache(pair.kv);
    destroy_pair(&pair);
}

/* The last 40 queries attend almost only to four old tokens. Policies that use attention must keep these four. */
TEST(attended_tokens_stay) {
    NEEDS_ATOMICS;
    static const tkv_evict_policy policies[] = {TKV_EVICT_H2O,          TKV_EVICT_TOVA,
                                                TKV_EVICT_SNAPKV,       TKV_EVICT_PYRAMIDKV,
                                                TKV_EVICT_SCISSORHANDS, TKV_EVICT_SLIDING};
    static const int attended[4] = {30, 77, 140, 201};
    size_t n;
    for (n = 0; n < sizeof policies / sizeof *policies; n++) {
        tkv_config cfg = small_config();
        tkv_evict_config other;
        tkv_evict_params p;
        tkv_cache *kv;
        int i, c, live = 0;
        cfg.evict.policy = policies[n];
        cfg.importance.sample_every = 1;
        cfg.importance.strategy = TKV_IMPORTANCE_RECENCY; /* only the policy needs scores */
        kv = create_cache(&cfg);
        rng = tkv_rng_seed(5);
        tkv_rng_fill(&rng, k_in, 250 * ROW, .1);
        tkv_rng_fill(&rng, v_in, 250 * ROW, 1.0);
        for (i = 0; i < 4; i++)
            for (c = 0; c < ROW; c++) k_in[attended[i] * ROW + c] = c % 2 ? 3.0f : -3.0f;
        for (c = 0; c < HEADS * DIM; c++) q_in[c] = c % 2 ? 1.0f : -1.0f;
        CHECK_EQ(tkv_append(kv, 0, 1, k_in, v_in, 250), TKV_OK);
        for (i = 0; i < 40; i++) {
            CHECK_EQ(tkv_append(kv, 0, 1, k_in + ROW, v_in + ROW, 1), TKV_OK);
            CHECK_EQ(tkv_attend(kv, 0, 1, q_in, 1, out), TKV_OK);
        }
        memset(&p, 0, sizeof p);
        p.layer = 1;
        p.keep = 80;
        memset(&other, 0, sizeof other); /* a policy whose scores are not collected is refused */
        p.evict = &other;
        other.policy = policies[n] == TKV_EVICT_H2O ? TKV_EVICT_TOVA : TKV_EVICT_H2O;
        CHECK_EQ(tkv_evict(kv, &p), TKV_ERR_CONFIG);
        CHECK_EQ(tkv_get_length(kv, 0, 1), 290);
        p.evict = NULL;
        CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
        for (i = 0; i < 290; i++) live += is_live(kv, 0, 1, i);
        if (policies[n] != TKV_EVICT_PYRAMIDKV) CHECK_EQ(live, 80);
        for (i = 0; i < 4; i++)
            CHECK_MSG(is_live(kv, 0, 1, attended[i]) == (policies[n] != TKV_EVICT_SLIDING), "%s: token %d",
                      tkv_get_name(TKV_NAME_EVICT_POLICY, (int)policies[n]), attended[i]);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

TEST(scores_pins_priorities) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    float scores[500];
    signed char priority[500];
    uint64_t pinned[WORDS];
    cache_pair pair;
    int i;
    cfg.evict.policy = TKV_EVICT_SCORES;
    pair = make_pair(&cfg);
    CHECK_EQ(append_tokens(&pair, 1, 250), TKV_OK);
    CHECK_EQ(append_tokens(&pair, 1, 250), TKV_OK);
    memset(&p, 0, sizeof p);
    memset(pinned, 0, sizeof pinned);
    memset(priority, 0, sizeof priority);
    for (i = 0; i < 500; i++) scores[i] = (float)(i * 37 % 500);
    for (i = 100; i < 110; i++) add_to_mask(pinned, i);
    for (i = 50; i < 60; i++) priority[i] = 1;
    CHECK_EQ(tkv_seq_pin(pair.kv, 1, 200, 7, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_pin(pair.kv, 1, 203, 1, TKV_OFF), TKV_OK);
    p.seq = 1;
    p.keep = 60;
    p.pinned_mask = pinned;
    p.priorities = priority;
    p.scores = scores;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK); /* layer 0 only */
    CHECK_EQ(n_live(pair.kv, 1, 0), 60);
    CHECK_EQ(n_live(pair.kv, 1, 1), 500);
    for (i = 50; i < 60; i++) CHECK(is_live(pair.kv, 1, 0, i));
    for (i = 100; i < 110; i++) CHECK(is_live(pair.kv, 1, 0, i));
    for (i = 200; i < 207; i++) CHECK_EQ(is_live(pair.kv, 1, 0, i), i != 203);
    for (i = 0; i < 4; i++) CHECK(is_live(pair.kv, 1, 0, i));
    for (i = 500 - 28; i < 500; i++) CHECK(is_live(pair.kv, 1, 0, i)); /* recent_tokens: half of 60 - 4 */
    { /* the remaining 60 - 4 - 28 - 10 - 10 - 6 = 2 tokens have the highest scores of the unprotected ones */
        int best[2] = {-1, -1};
        for (i = 4; i < 472; i++) {
            if ((i >= 50 && i < 60) || (i >= 100 && i < 110) || (i >= 200 && i < 207 && i != 203)) continue;
            if (best[0] < 0 || scores[i] > scores[best[0]]) best[1] = best[0], best[0] = i;
            else if (best[1] < 0 || scores[i] > scores[best[1]]) best[1] = i;
        }
        CHECK(is_live(pair.kv, 1, 0, best[0]) && is_live(pair.kv, 1, 0, best[1]));
    }
    check_reads(&pair, 1, 0, .2);
    scores[499] = tkv_test_float(0x7fc00000u);
    p.keep = 50;
    p.layer = TKV_ALL_LAYERS;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_ERR_NONFINITE);
    CHECK_EQ(n_live(pair.kv, 1, 0), 60);
    CHECK_EQ(n_live(pair.kv, 1, 1), 500);
    check_cache(pair.kv);
    destroy_pair(&pair);
}

/* Without scores from the caller, TKV_EVICT_SCORES uses importance. */
TEST(default_scores_are_importance) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    float importance[300], lowest_live = 1e30f, highest_evicted = -1e30f, attention[300];
    cache_pair pair;
    int i;
    cfg.evict.policy = TKV_EVICT_SCORES;
    cfg.evict.recent_tokens = TKV_OFF;
    cfg.evict.sink_tokens = TKV_OFF;
    cfg.importance.tau = 300.0f;
    pair = make_pair(&cfg);
    CHECK_EQ(append_tokens(&pair, 0, 100), TKV_OK);
    CHECK_EQ(append_tokens(&pair, 0, 200), TKV_OK);
    for (i = 0; i < 300; i++) attention[i] = (float)(i * 71 % 300) * .002f;
    CHECK_EQ(tkv_add_scores(pair.kv, 0, 1, 0, 300, attention), TKV_OK);
    CHECK_EQ(tkv_get_importance(pair.kv, 0, 1, 0, 300, importance, NULL), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = 1;
    p.keep = 120;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
    for (i = 0; i < 300; i++)
        if (is_live(pair.kv, 0, 1, i))
            lowest_live = importance[i] < lowest_live ? importance[i] : lowest_live;
        else highest_evicted = importance[i] > highest_evicted ? importance[i] : highest_evicted;
    CHECK_EQ(n_live(pair.kv, 0, 1), 120);
    CHECK(highest_evicted <= lowest_live);
    destroy_pair(&pair);
}

static float score_or_infinity(void *user, const tkv_evict_view *v, int i) {
    (void)v;
    return *(int *)user ? tkv_test_float(0x7f800000u) : (float)(i % 7);
}

TEST(a_scorer_of_the_user) {
    tkv_config cfg = small_config();
    cache_pair pair;
    int fails = 0, i;
    cfg.evict.policy = TKV_EVICT_USER;
    cfg.evict.scorer = score_or_infinity;
    cfg.evict.user = &fails;
    cfg.evict.keep_tokens = 128;
    pair = make_pair(&cfg);
    for (i = 0; i < 20; i++) {
        fails = i >= 10; /* a scorer that fails: the cache evicts the oldest tokens instead */
        CHECK_EQ(append_tokens(&pair, 0, 20), TKV_OK);
        CHECK(n_live(pair.kv, 0, 0) <= 128);
    }
    check_cache(pair.kv);
    destroy_pair(&pair);
}

static float count_call(void *user, const tkv_evict_view *v, int i) {
    ++*(int *)user;
    return (float)(v->positions[i] % 7);
}

/* Once for each token, with one layer and with all layers. */
TEST(a_scorer_is_called_once_per_token) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    cache_pair pair;
    int calls = 0, i;
    cfg.evict.policy = TKV_EVICT_USER;
    cfg.evict.scorer = count_call;
    cfg.evict.user = &calls;
    pair = make_pair(&cfg);
    CHECK_EQ(append_tokens(&pair, 0, 200), TKV_OK);
    memset(&p, 0, sizeof p);
    p.keep = 150;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
    CHECK_EQ(calls, 200);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 100;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
    CHECK_EQ(calls, 200 + 150 + (LAYERS - 1) * 200);
    for (i = 0; i < LAYERS; i++) CHECK_EQ(n_live(pair.kv, 0, i), 100);
    check_cache(pair.kv);
    destroy_pair(&pair);
}

/* Each layer keeps fewer tokens than the one before. All layers together keep n_layers * keep. */
TEST(pyramidkv_splits_the_budget) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    cache_pair pair;
    int layer, sum = 0, previous = LONGEST;
    cfg.evict.policy = TKV_EVICT_PYRAMIDKV;
    pair = make_pair(&cfg);
    CHECK_EQ(append_tokens(&pair, 0, 256), TKV_OK);
    CHECK_EQ(append_tokens(&pair, 0, 256), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 200;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++) {
        const int n = n_live(pair.kv, 0, layer);
        CHECK(n < previous);
        previous = n;
        sum += n;
    }
    CHECK_EQ(sum, 600);
    destroy_pair(&pair);
    { /* TKV_OFF protects no recent tokens in the split as well; it is not the default of 8 */
        tkv_evict_budget split;
        int want[LAYERS];
        cfg.evict.recent_tokens = TKV_OFF;
        pair = make_pair(&cfg);
        CHECK_EQ(append_tokens(&pair, 0, 256), TKV_OK);
        p.keep = 20;
        CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
        memset(&split, 0, sizeof split);
        split.shape = TKV_EVICT_PYRAMID;
        split.n_layers = LAYERS;
        split.total = 20 * LAYERS;
        split.n_tokens = 256;
        split.window = TKV_OFF;
        CHECK_EQ(tkv_split_evict_budget(&split, want), TKV_OK);
        for (layer = 0; layer < LAYERS; layer++) CHECK_EQ(n_live(pair.kv, 0, layer), want[layer]);
        destroy_pair(&pair);
    }
}

/* Keys along axes of their own: token i has axis i % 16. A query along an axis gives its tokens all attention. */
static void append_on_axis(tkv_cache *kv, int axis, int n) {
    memset(k_in, 0, sizeof k_in);
    memset(v_in, 0, sizeof v_in);
    for (int i = 0; i < n; i++)
        for (int h = 0; h < KV_HEADS; h++) k_in[i * ROW + h * DIM + (axis + i) % 16] = 1;
    for (int layer = 0; layer < LAYERS; layer++) CHECK_EQ(tkv_append(kv, 0, layer, k_in, v_in, n), TKV_OK);
}

static void ask_for_axis(tkv_cache *kv, int axis, int n) {
    memset(q_in, 0, sizeof q_in);
    for (int i = 0; i < n * HEADS; i++) q_in[i * DIM + axis] = 200;
    for (int layer = 0; layer < LAYERS; layer++) CHECK_EQ(tkv_attend(kv, 0, layer, q_in, n, out), TKV_OK);
}

static int n_live_of_axis(const tkv_cache *kv, int axis) {
    int n = 0;
    for (int i = 16; i < 160; i++) n += i % 16 == axis && is_live(kv, 0, 0, i);
    return n;
}

/* While decoding, the last queries before an eviction decide. Those before them are not looked at. */
TEST(the_last_queries_before_an_eviction_decide) {
    static const tkv_evict_policy policies[] = {TKV_EVICT_TOVA, TKV_EVICT_SNAPKV};
    NEEDS_ATOMICS;
    for (int i = 0; i < COUNT(policies); i++) {
        tkv_config cfg = small_config();
        tkv_layer_info info;
        cfg.evict.policy = policies[i];
        cfg.evict.keep_tokens = 200;
        cfg.evict.batch = 64;
        cfg.evict.pool = 1;
        tkv_cache *kv = create_cache(&cfg);
        append_on_axis(kv, 0, 160);
        ask_for_axis(kv, 3, 160);
        CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
        for (int n = 160; info.evicted == 0 && n < 300; n++) {
            append_on_axis(kv, n, 1);
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
            const int left = 200 - (n + 1); /* appends before the one that evicts */
            if (info.evicted == 0) ask_for_axis(kv, left > 1 ? 5 : 9, 1);
        }
        CHECK_EQ(info.evicted, 64);
        CHECK_EQ(n_live_of_axis(kv, 9), 9);
        CHECK(n_live_of_axis(kv, 5) < 9);
        CHECK(n_live_of_axis(kv, 3) < 9);
        tkv_destroy(kv);
    }
}

/* Tokens behind the last query that counted stay, whatever their scores are. */
TEST(tokens_that_no_query_judged_stay) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    NEEDS_ATOMICS;
    cfg.evict.policy = TKV_EVICT_SNAPKV;
    cfg.evict.recent_tokens = 1;
    cfg.evict.pool = 1;
    tkv_cache *kv = create_cache(&cfg);
    append_on_axis(kv, 0, 160);
    ask_for_axis(kv, 3, 160);
    for (int n = 160; n < 180; n++) {
        append_on_axis(kv, n, 1);
        ask_for_axis(kv, 3, 1);
    }
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 60;
    CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    CHECK_EQ(n_live(kv, 0, 0), 60);
    for (int i = 160; i < 180; i++) CHECK(is_live(kv, 0, 0, i));
    CHECK_EQ(n_live_of_axis(kv, 3), 9);
    tkv_destroy(kv);
}

TEST(layers_keep_tokens_on_a_line) {
    static const tkv_evict_policy policies[] = {TKV_EVICT_SLIDING, TKV_EVICT_H2O, TKV_EVICT_PYRAMIDKV};
    char reason[200];
    for (int i = 0; i < COUNT(policies); i++) {
        tkv_config cfg = small_config();
        tkv_evict_params p;
        cfg.evict.policy = policies[i];
        cfg.evict.keep_first = 300;
        cfg.evict.keep_last = 101;
        cfg.evict.batch = 1;
        cache_pair pair = make_pair(&cfg);
        for (int n = 0; n < 40; n++) CHECK_EQ(append_tokens(&pair, 0, 16), TKV_OK);
        CHECK_EQ(n_live(pair.kv, 0, 0), 301); /* the mean is 201, rounded up from 200.5 */
        CHECK_EQ(n_live(pair.kv, 0, 1), 201);
        CHECK_EQ(n_live(pair.kv, 0, 2), 101);
        memset(&p, 0, sizeof p);
        p.layer = TKV_ALL_LAYERS;
        p.keep = 100; /* the shape stays */
        CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
        CHECK_EQ(n_live(pair.kv, 0, 0), 150);
        CHECK_EQ(n_live(pair.kv, 0, 1), 100);
        CHECK_EQ(n_live(pair.kv, 0, 2), 50);
        destroy_pair(&pair);
        pair =
            make_pair(&cfg); /* shares beyond all tokens evict none, and another config brings its own line */
        CHECK_EQ(append_tokens(&pair, 0, 100), TKV_OK);
        tkv_evict_config own = cfg.evict;
        p.keep = 0x7fffffff;
        CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
        CHECK_EQ(n_live(pair.kv, 0, 0), 100);
        own.keep_first = 40;
        own.keep_last = 20;
        p.evict = &own;
        p.keep = 0;
        CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
        CHECK_EQ(n_live(pair.kv, 0, 0), 40);
        CHECK_EQ(n_live(pair.kv, 0, 2), 20);
        destroy_pair(&pair);
        cfg.evict.keep_last = 0;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK(strstr(reason, "evict.keep_first is 300") != NULL);
        cfg.evict.keep_last = -1;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    }
}

/* >>reads and attention after eviction */
/* A list of indices in any order gives the rows that single reads give. A list with a wrong index changes nothing. */
TEST(tokens_are_read_in_any_order) {
    enum { N = 700 };
    static int list[N];
    static float one_k[ROW], one_v[ROW], k_list[N * ROW], v_list[N * ROW];
    tkv_config cfg = small_config();
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI2);
    cfg.tiers.warm_tokens = 128;
    cache_pair pair = make_pair(&cfg);
    uint64_t gone[N / 64 + 1] = {0};
    tkv_evict_params evict;
    for (int n = 0; n < N; n += 100) CHECK_EQ(append_tokens(&pair, 0, 100), TKV_OK);
    for (int i = 300; i < 340; i++) gone[i / 64] |= (uint64_t)1 << i % 64;
    memset(&evict, 0, sizeof evict);
    evict.layer = TKV_ALL_LAYERS;
    evict.victims = gone;
    evict.n_victims = N;
    CHECK_EQ(tkv_evict(pair.kv, &evict), TKV_OK);
    for (int kind = 0; kind < 4; kind++) {
        for (int i = 0; i < N; i++) {
            const int at = kind == 0   ? N - 1 - i
                           : kind == 1 ? i
                           : kind == 2 ? tkv_rng_below(&rng, N)
                                       : i / 9 * 7;
            list[i] = at >= 300 && at < 340 ? 299 : at;
        }
        CHECK_EQ(
            tkv_read_tokens(pair.kv, 0, 1, list, N, kind == 2 ? NULL : k_list, kind == 3 ? NULL : v_list),
            TKV_OK);
        for (int i = 0; i < N; i++) {
            CHECK_EQ(tkv_read(pair.kv, 0, 1, list[i], 1, one_k, one_v), TKV_OK);
            if (kind != 2) CHECK_MEM(one_k, k_list + i * ROW, sizeof one_k);
            if (kind != 3) CHECK_MEM(one_v, v_list + i * ROW, sizeof one_v);
        }
    }
    memcpy(k_out, k_list, sizeof k_list);
    list[N - 1] = 320;
    CHECK_EQ(tkv_read_tokens(pair.kv, 0, 1, list, N, k_list, v_list), TKV_ERR_RANGE);
    list[N - 1] = N;
    CHECK_EQ(tkv_read_tokens(pair.kv, 0, 1, list, N, k_list, v_list), TKV_ERR_RANGE);
    list[N - 1] = 0x7fffffff;
    CHECK_EQ(tkv_read_tokens(pair.kv, 0, 1, list, N, k_list, v_list), TKV_ERR_RANGE);
    list[N - 1] = -1;
    CHECK_EQ(tkv_read_tokens(pair.kv, 0, 1, list, N, k_list, v_list), TKV_ERR_ARG);
    CHECK_EQ(tkv_read_tokens(pair.kv, 0, 1, NULL, 1, k_list, v_list), TKV_ERR_ARG);
    CHECK_EQ(tkv_read_tokens(pair.kv, 0, 1, NULL, 0, k_list, v_list), TKV_OK);
    CHECK_MEM(k_out, k_list, sizeof k_list);
    destroy_pair(&pair);
}

static void check_after_evictions(tkv_config cfg, double bound) {
    static const int percents[] = {10, 50, 80, 30, 95};
    tkv_attend_params p;
    float slopes[HEADS] = {.5f, .25f, .1f, .01f}, *bias_mask;
    cache_pair pair = make_pair(&cfg);
    const int most = tkv_test_quick() ? 9 : 40; /* queries of a call */
    int i, j;
    bias_mask = (float *)malloc(sizeof(float) * 20 * LONGEST);
    if (!bias_mask) exit(2);
    for (i = 0; i < COUNT(percents); i++) {
        for (j = 0; j < 3; j++) {
            CHECK_EQ(append_tokens(&pair, 0, 100), TKV_OK);
            check_attention(&pair, 0, 1, most * 3 / 4, NULL, bound);
        }
        CHECK_EQ(append_tokens(&pair, 0, 13), TKV_OK);
        evict_random_tokens(&pair, 0, 1, percents[i]);
        check_attention(&pair, 0, 1, 1, NULL, bound);
        check_attention(&pair, 0, 1, 7, NULL, bound);
        check_attention(&pair, 0, 1, most, NULL, bound);
        memset(&p, 0, sizeof p);
        p.window = 150;
        check_attention(&pair, 0, 1, most * 2 / 5, &p, bound);
        p.alibi_slopes = slopes;
        p.softcap = 20.0f;
        check_attention(&pair, 0, 1, 9, &p, bound);
        for (j = 0; j < 20 * LONGEST && i == 0; j++)
            bias_mask[j] = (float)(j % 13) * .1f - (j % 7 == 0 ? 1e30f : 0.0f);
        p.mask = bias_mask;
        p.mask_stride = LONGEST;
        check_attention(&pair, 0, 1, most / 2, &p, bound);
        check_reads(&pair, 0, 1, bound);
        check_attention(&pair, 0, 0, most / 2, NULL, bound); /* layer 0 has no evicted tokens */
    }
    CHECK(n_layer_blocks(pair.kv, 0, 1) < n_layer_blocks(pair.kv, 0, 0) / 2);
    CHECK(n_layer_blocks(pair.kv, 0, 1) < n_blocks_unmerged(pair.kv, 0, 1)); /* neighbours were merged */
    free(bias_mask);
    destroy_pair(&pair);
}

TEST(eviction_from_exact_blocks) {
    tkv_config cfg = small_config();
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    check_after_evictions(cfg, FAST_MATH ? 2e-3 : 2e-5);
    cfg.tiers.sink_tokens = TKV_OFF;
    check_after_evictions(cfg, FAST_MATH ? 2e-3 : 2e-5);
}

/* The bounds cover the errors of blocks that were encoded two or three times. */
TEST(eviction_from_encoded_blocks) {
    static const tkv_format_pair formats[] = {
        {TKV_Q8, TKV_Q8}, {TKV_KIVI4, TKV_KIVI4}, {TKV_A40, TKV_R40}, {TKV_FP8_E4M3, TKV_FP8_E4M3}};
    static const double bounds[] = {.03, .4, .4, .15};
    tkv_config cfg = small_config();
    int i;
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    for (i = 0; i < COUNT(formats); i++) {
        cfg.tiers.warm = cfg.tiers.archive = formats[i];
        check_after_evictions(cfg, bounds[i]);
    }
}

/* Formats that keep keys before RoPE need consecutive positions, so blocks are not merged. */
TEST(keys_before_rope) {
    tkv_config cfg = small_config();
    cache_pair pair;
    int i;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KVQUANT4, TKV_KVQUANT4);
    cfg.model.rope.dim = DIM;
    pair = make_pair(&cfg);
    for (i = 0; i < 8; i++) {
        CHECK_EQ(append_tokens(&pair, 0, 200), TKV_OK);
        evict_random_tokens(&pair, 0, 1, i == 7 ? 97 : 20);
        check_attention(&pair, 0, 1, 1, NULL, .3);
        check_reads(&pair, 0, 1, .25);
    }
    CHECK_EQ(n_layer_blocks(pair.kv, 0, 1), n_blocks_unmerged(pair.kv, 0, 1)); /* no blocks were merged */
    CHECK(n_layer_blocks(pair.kv, 0, 1) < n_layer_blocks(pair.kv, 0, 0));
    destroy_pair(&pair);
}

/* Attention without live tokens gives zeros. The next token is then the only live one. */
TEST(all_tokens_may_be_evicted) {
    tkv_config cfg = small_config();
    cache_pair pair = make_pair(&cfg);
    int i;
    CHECK_EQ(append_tokens(&pair, 0, 200), TKV_OK);
    evict_random_tokens(&pair, 0, 0, 100);
    CHECK_EQ(n_live(pair.kv, 0, 0), 0);
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    CHECK_EQ(tkv_attend(pair.kv, 0, 0, q_in, 1, out), TKV_OK);
    for (i = 0; i < HEADS * DIM; i++) CHECK_NEAR(out[i], 0, 0);
    CHECK_EQ(append_tokens(&pair, 0, 1), TKV_OK);
    CHECK_EQ(n_live(pair.kv, 0, 0), 1);
    check_attention(&pair, 0, 0, 1, NULL, FAST_MATH ? 1e-3 : 1e-5);
    CHECK_EQ(append_tokens(&pair, 0, 250), TKV_OK);
    check_attention(&pair, 0, 0, 250, NULL, FAST_MATH ? 1e-3 : .01);
    check_reads(&pair, 0, 0, .3);
    check_cache(pair.kv);
    destroy_pair(&pair);
}

/* Truncation and abort count positions. Evicted tokens stay evicted. */
TEST(truncation_and_abort_after_eviction) {
    tkv_config cfg = small_config();
    cache_pair pair;
    int i, len = 0, layer;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    pair = make_pair(&cfg);
    for (i = 0; i < 60; i++) {
        const int n = 1 + tkv_rng_below(&rng, 80);
        CHECK_EQ(append_tokens(&pair, 0, n), TKV_OK);
        len += n;
        evict_random_tokens(&pair, 0, i % LAYERS, 20 + i % 70);
        if (i % 3 == 0) {
            len -= tkv_rng_below(&rng, len);
            CHECK_EQ(tkv_seq_truncate(pair.kv, 0, len), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(pair.reference, 0, len), TKV_OK);
        } else if (i % 3 == 1) {
            const int more = 1 + tkv_rng_below(&rng, 100);
            CHECK_EQ(tkv_seq_begin(pair.kv, 0), TKV_OK);
            for (layer = 0; layer < LAYERS; layer++) {
                tkv_rng_fill(&rng, k_in, (size_t)(more * ROW), 1.0);
                CHECK_EQ(tkv_append(pair.kv, 0, layer, k_in, k_in, more), TKV_OK);
            }
            CHECK_EQ(evict_tokens(pair.kv, 0, 0, NULL, 0), TKV_ERR_STATE);
            CHECK_EQ(tkv_seq_abort(pair.kv, 0), TKV_OK);
        }
        check_cache(pair.kv);
        for (layer = 0; layer < LAYERS && len > 0; layer++) {
            CHECK_EQ(tkv_get_length(pair.kv, 0, layer), len);
            check_reads(&pair, 0, layer, 0);
            check_attention(&pair, 0, layer, len < 9 ? len : 9, NULL, FAST_MATH ? 1e-3 : 1e-5);
        }
    }
    CHECK_EQ(tkv_seq_reset(pair.kv, 0), TKV_OK);
    check_cache(pair.kv);
    destroy_pair(&pair);
}

/* >>anchors */
static int is_exact(const cache_pair *pair, int layer, int position) {
    float a[2 * ROW], b[2 * ROW];
    CHECK_EQ(tkv_read(pair->kv, 0, layer, position, 1, a, a + ROW), TKV_OK);
    CHECK_EQ(tkv_read(pair->reference, 0, layer, position, 1, b, b + ROW), TKV_OK);
    return memcmp(a, b, sizeof a) == 0;
}

static int n_anchors_in(const cache_pair *pair, int layer, int from, int to) {
    int i, n = 0;
    for (i = from; i < to; i++) {
        tkv_tier tier = TKV_TIER_HOT;
        CHECK_EQ(tier_of(pair->kv, 0, layer, i, &tier), TKV_OK);
        CHECK_EQ(is_exact(pair, layer, i), tier == TKV_TIER_HOT);
        n += tier == TKV_TIER_HOT;
    }
    return n;
}

/* The tokens with the highest scores become anchors. Tokens with higher scores replace them later, and replaced anchors
 * are read from their recoded blocks again. */
TEST(anchors_stay_exact) {
    static const int first[] = {9, 40, 67, 70, 131}, later[] = {300, 301, 302};
    const float one = 1.0f, two = 2.0f;
    tkv_config cfg = small_config();
    tkv_layer_info tiers;
    cache_pair pair;
    int i;
    cfg.evict.policy = TKV_EVICT_NONE;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.tiers.n_anchors = 5;
    cfg.importance.sample_every = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    pair = make_pair(&cfg);
    CHECK_EQ(append_tokens(&pair, 0, 200), TKV_OK);
    for (i = 0; i < COUNT(first); i++) CHECK_EQ(tkv_add_scores(pair.kv, 0, 1, first[i], 1, &one), TKV_OK);
    for (i = 0; i < 3; i++) CHECK_EQ(append_tokens(&pair, 0, 60), TKV_OK);
    CHECK_EQ(n_anchors_in(&pair, 1, 4, 196), COUNT(first));
    for (i = 0; i < COUNT(first); i++) CHECK(is_exact(&pair, 1, first[i]));
    check_attention(&pair, 0, 1, 1, NULL, .9);
    check_cache(pair.kv);
    for (i = 0; i < COUNT(later); i++) CHECK_EQ(tkv_add_scores(pair.kv, 0, 1, later[i], 1, &two), TKV_OK);
    for (i = 0; i < 4; i++) CHECK_EQ(append_tokens(&pair, 0, 60), TKV_OK);
    CHECK_EQ(n_anchors_in(&pair, 1, 4, 440), COUNT(first));
    for (i = 0; i < COUNT(later); i++) CHECK(is_exact(&pair, 1, later[i]));
    CHECK_EQ(tkv_get_layer(pair.kv, 0, 1, &tiers), TKV_OK);
    CHECK_EQ(tiers.tokens[0] + tiers.tokens[1] + tiers.tokens[2], 620);
    CHECK_EQ(tiers.evicted, 0);
    check_attention(&pair, 0, 1, 1, NULL, .9);
    check_attention(&pair, 0, 1, 100, NULL, .9);
    for (i = 0; i < 620; i++) CHECK(is_live(pair.kv, 0, 1, i));
    check_cache(pair.kv);
    destroy_pair(&pair);
}

/* Queries point at 16 keys. Attention must be closer to exact with these keys as anchors. */
TEST(anchors_reduce_the_error) {
    NEEDS_ATOMICS;
    double err[2];
    int n;
    for (n = 0; n < 2; n++) {
        tkv_config cfg = small_config();
        cache_pair pair;
        double e = 0.0;
        int i, c, step;
        cfg.evict.policy = TKV_EVICT_NONE;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        cfg.tiers.n_anchors = n ? 16 : 0;
        cfg.importance.sample_every = 1;
        pair = make_pair(&cfg);
        for (step = 0; step < 12; step++) {
            CHECK_EQ(append_tokens(&pair, 0, 60), TKV_OK);
            CHECK_EQ(tkv_read(pair.reference, 0, 1, 0, 60 * (step + 1), k_out, v_out), TKV_OK);
            for (i = 0; i < 16; i++) { /* the queries point at the key of token 40 i */
                const int at = 40 * i < 60 * (step + 1) ? 40 * i : 0;
                for (c = 0; c < HEADS * DIM; c++)
                    q_in[c] = 3.0f * k_out[at * ROW + c / (HEADS * DIM / KV_HEADS) * DIM + c % DIM];
                CHECK_EQ(tkv_attend(pair.kv, 0, 1, q_in, 1, out), TKV_OK);
                CHECK_EQ(tkv_attend(pair.reference, 0, 1, q_in, 1, reference_out), TKV_OK);
                for (c = 0; c < HEADS * DIM && step == 11; c++)
                    e += ((double)out[c] - (double)reference_out[c]) *
                         ((double)out[c] - (double)reference_out[c]);
            }
        }
        err[n] = e;
        check_cache(pair.kv);
        destroy_pair(&pair);
    }
    CHECK_MSG(err[1] < .25 * err[0], "%.3g with anchors, %.3g without", err[1], err[0]);
}

/* >>anchors in hundreds. Each token gets a score of its own, from its index and a seed. */
enum { MOST_ANCHORS = 1024 };

static float score_of_token(int i, int seed) {
    return (float)((i + 1) * (7919 + 2 * seed) % 10007) * .001f + .01f;
}

static tkv_config config_of_anchors(int n) {
    tkv_config cfg = small_config();
    cfg.evict.policy = TKV_EVICT_NONE;
    cfg.tiers.warm_tokens = 128;
    cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.tiers.n_anchors = n;
    cfg.importance.sample_every = 1 << 29; /* no query adds a score */
    cfg.host.precise = 1;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    return cfg;
}

static tkv_status append_scored_tokens(cache_pair *pair, int seq, int n, int seed) {
    const int from = tkv_get_length(pair->kv, seq, 0);
    float scores[CHUNK];
    int layer, i;
    const tkv_status st = append_tokens(pair, seq, n);
    for (i = 0; i < n; i++) scores[i] = score_of_token(from + i, seed);
    for (layer = 0; layer < LAYERS && !st; layer++)
        CHECK_EQ(tkv_add_scores(pair->kv, seq, layer, from, n, scores), TKV_OK);
    return st;
}

/* Number of tokens of a layer, from `from` on, that are exact and older than a token that is not. */
static int n_anchors_from(const cache_pair *pair, int seq, int layer, int from) {
    static uint8_t tiers[LONGEST];
    const int len = tkv_get_length(pair->kv, seq, layer);
    int i, n = 0, n_coded = 0;
    CHECK_EQ(tkv_get_tiers(pair->kv, seq, layer, 0, len, tiers), TKV_OK);
    for (i = len; i-- > from;) {
        n_coded += tiers[i] == TKV_TIER_WARM || tiers[i] == TKV_TIER_ARCHIVE;
        n += n_coded > 0 && tiers[i] == TKV_TIER_HOT;
    }
    return n;
}

/* The anchors of a layer must be the n tokens with the highest scores of the coded blocks, and must read exactly. */
static void check_anchors(const cache_pair *pair, int seq, int layer, int n, int seed) {
    static uint8_t tiers[LONGEST];
    const int len = tkv_get_length(pair->kv, seq, layer);
    static float score[LONGEST];
    int i, j, end = len;
    for (i = 0; i < len; i++) score[i] = score_of_token(i, seed);
    CHECK_EQ(tkv_get_tiers(pair->kv, seq, layer, 0, len, tiers), TKV_OK);
    while (end > SINKS && tiers[end - 1] == TKV_TIER_HOT)
        end--; /* the last token of a block may be an anchor */
    end = SINKS + (end - SINKS + BLOCK - 1) / BLOCK * BLOCK;
    CHECK(end > SINKS + n);
    for (i = SINKS; i < end; i++) {
        float a[2 * ROW], b[2 * ROW];
        int n_higher = 0;
        for (j = SINKS; j < end; j++) n_higher += score[j] > score[i];
        CHECK_EQ(tiers[i] == TKV_TIER_HOT, n_higher < n);
        CHECK_EQ(tkv_read(pair->kv, seq, layer, i, 1, a, a + ROW), TKV_OK);
        CHECK_EQ(tkv_read(pair->reference, seq, layer, i, 1, b, b + ROW), TKV_OK);
        CHECK_EQ(memcmp(a, b, sizeof a) == 0, n_higher < n);
    }
}

/* Attention of the last n tokens against the float64 reference over the same blocks. */
static void check_reference(const cache_pair *pair, int seq, int layer, int n) {
    tkv_attend_params p;
    double err_sq = 0.0, sum_sq = 0.0;
    int i;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.q = q_in;
    tkv_rng_fill(&rng, q_in, (size_t)(n * HEADS * DIM), 1.5);
    p.out = out;
    CHECK_EQ(tkv_attend_ex(pair->kv, &p), TKV_OK);
    p.out = reference_out;
    CHECK_EQ(tkv_attend_reference(pair->kv, &p), TKV_OK);
    for (i = 0; i < n * HEADS * DIM; i++) {
        const double d = (double)out[i] - (double)reference_out[i];
        err_sq += d * d;
        sum_sq += (double)reference_out[i] * (double)reference_out[i];
    }
    CHECK_MSG(err_sq <= 4e-6 * sum_sq, "%d queries: off by %.2e", n, sqrt(err_sq / sum_sq));
}

static void check_many_anchors(const cache_pair *pair, int seq, int n, int seed) {
    check_anchors(pair, seq, 1, n, seed);
    check_reference(pair, seq, 1, 1);
    check_reference(pair, seq, 1, 100);
    check_attention(pair, seq, 2, 3, NULL, .9);
    check_cache(pair->kv);
}

TEST(hundreds_of_anchors_stay_exact) {
    static const tkv_isa isas[] = {TKV_ISA_SCALAR, TKV_ISA_AVX2, TKV_ISA_AVX512, TKV_ISA_NEON, TKV_ISA_WASM};
    static const int counts[] = {1,   31,  32,  33,
                                 100, 150, 400, MOST_ANCHORS}; /* of one block and of several */
    int isa, i;
    for (isa = 0; isa < COUNT(isas); isa++)
        for (i = 0; i < COUNT(counts); i++) {
            tkv_config cfg = config_of_anchors(counts[i]);
            cache_pair pair;
            if (!is_isa_available(isas[isa]) || (tkv_test_quick() && (isa + i) % 3)) continue;
            cfg.host.isa = isas[isa];
            pair = make_pair(&cfg);
            while (tkv_get_length(pair.kv, 0, 0) < counts[i] + 400)
                CHECK_EQ(append_scored_tokens(&pair, 0, 100, 1), TKV_OK);
            check_many_anchors(&pair, 0, counts[i], 1);
            destroy_pair(&pair);
        }
}

/* A fork has copies of the anchors, and each sequence goes on with its own. A cut takes the anchors behind it. */
TEST(forks_and_cuts_with_hundreds_of_anchors) {
    const tkv_config cfg = config_of_anchors(150);
    cache_pair pair = make_pair(&cfg);
    float *rows = (float *)malloc(2 * 900 * ROW * sizeof *rows);
    int i;
    REQUIRE(rows != NULL);
    for (i = 0; i < 9; i++) CHECK_EQ(append_scored_tokens(&pair, 0, 100, 1), TKV_OK);
    CHECK_EQ(tkv_seq_fork(pair.kv, 0, 1, 900), TKV_OK);
    CHECK_EQ(tkv_seq_fork(pair.reference, 0, 1, 900), TKV_OK);
    check_many_anchors(&pair, 1, 150, 1);
    CHECK_EQ(tkv_read(pair.kv, 1, 1, 0, 900, rows, rows + 900 * ROW), TKV_OK);
    for (i = 0; i < 6; i++) CHECK_EQ(append_scored_tokens(&pair, 0, 100, 1), TKV_OK);
    CHECK_EQ(n_anchors_from(&pair, 0, 1, SINKS), 150);
    CHECK_LE(1, n_anchors_from(&pair, 0, 1, 900)); /* it chose others; shared blocks have none */
    check_reference(&pair, 0, 1, 100);
    CHECK_EQ(tkv_read(pair.kv, 1, 1, 0, 900, k_out, v_out), TKV_OK);
    CHECK_MEM(k_out, rows, 900 * ROW * sizeof *rows);
    CHECK_MEM(v_out, rows + 900 * ROW, 900 * ROW * sizeof *rows);
    CHECK_EQ(tkv_seq_truncate(pair.kv, 0, 500), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(pair.reference, 0, 500), TKV_OK);
    CHECK_EQ(n_live(pair.kv, 0, 1), 500);
    CHECK_LE(n_anchors_from(&pair, 0, 1, SINKS), 149);
    check_reference(&pair, 0, 1, 50);
    check_reads(&pair, 0, 1, .9);
    check_cache(pair.kv);
    for (i = 0; i < 5; i++) CHECK_EQ(append_tokens(&pair, 0, 100), TKV_OK); /* they fill the free slots */
    CHECK_EQ(n_anchors_from(&pair, 0, 1, SINKS), 150);
    check_reference(&pair, 0, 1, 50);
    CHECK_EQ(tkv_seq_truncate(pair.kv, 1, 2), TKV_OK); /* two sinks, and no anchor */
    CHECK_EQ(tkv_seq_truncate(pair.reference, 1, 2), TKV_OK);
    for (i = 0; i < 8; i++) CHECK_EQ(append_scored_tokens(&pair, 1, 100, 5), TKV_OK);
    check_cache(pair.kv);
    CHECK_EQ(n_anchors_from(&pair, 1, 1, SINKS), 150);
    CHECK_EQ(tkv_seq_reset(pair.kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_reset(pair.reference, 0), TKV_OK);
    for (i = 0; i < 6; i++) CHECK_EQ(append_scored_tokens(&pair, 0, 100, 3), TKV_OK);
    check_many_anchors(&pair, 0, 150, 3);
    destroy_pair(&pair);
    free(rows);
}

/* Under a budget tokens are evicted, but anchors are not. */
TEST(hundreds_of_anchors_under_a_budget) {
    static const tkv_evict_policy policies[] = {TKV_EVICT_H2O, TKV_EVICT_SLIDING, TKV_EVICT_KNORM};
    int which, i;
    for (which = 0; which < COUNT(policies); which += tkv_test_stride(3, 1)) {
        tkv_config cfg = config_of_anchors(200);
        tkv_budget_info budget;
        cache_pair pair;
        cfg.evict.policy = policies[which];
        cfg.budget.bytes = 1150 * 1000;
        pair = make_pair(&cfg);
        for (i = 0; i < 29; i++) {
            CHECK_EQ(append_tokens(&pair, 0, 100), TKV_OK);
            CHECK_LE(n_anchors_from(&pair, 0, 1, SINKS), 200);
            check_reference(&pair, 0, 1, i % tkv_test_stride(7, 1) ? 1 : 20);
            check_cache(pair.kv);
        }
        CHECK_EQ(n_anchors_from(&pair, 0, 1, SINKS), 200);
        CHECK_EQ(tkv_get_budget(pair.kv, &budget), TKV_OK);
        CHECK(budget.evicted > 0);
        CHECK_LE(budget.peak, cfg.budget.bytes);
        check_reads(&pair, 0, 1, .9);
        destroy_pair(&pair);
    }
}

/* In place there is room for the anchors of all sequences. */
TEST(hundreds_of_anchors_in_place) {
    static const size_t budgets[] = {0, 1600 * 1000};
    int which, i, seq;
    for (which = 0; which < COUNT(budgets); which++) {
        tkv_config cfg = config_of_anchors(200);
        guarded_buffer mem;
        cache_pair pair;
        cfg.limits.max_tokens = 1000;
        cfg.limits.max_append = 100;
        cfg.budget.bytes = budgets[which];
        pair = make_pair(&cfg);
        tkv_destroy(pair.kv);
        pair.kv = create_cache_in_place(&cfg, &mem, 3);
        REQUIRE(pair.kv != NULL);
        for (i = 0; i < 6; i++) CHECK_EQ(append_scored_tokens(&pair, 0, 100, 1), TKV_OK);
        CHECK_EQ(tkv_seq_fork(pair.kv, 0, 1, 600), TKV_OK);
        CHECK_EQ(tkv_seq_fork(pair.reference, 0, 1, 600), TKV_OK);
        for (seq = 0; seq < SEQS; seq++)
            for (i = 0; i < 4; i++) CHECK_EQ(append_scored_tokens(&pair, seq, 100, 1), TKV_OK);
        for (seq = 0; seq < SEQS; seq++) {
            check_reference(&pair, seq, 1, 50);
            if (!budgets[which]) CHECK_EQ(n_anchors_from(&pair, seq, 1, SINKS), 200);
        }
        check_cache(pair.kv);
        check_borders(&mem);
        tkv_destroy(pair.reference);
        tkv_destroy(pair.kv);
        free(mem.raw);
    }
}

TEST(estimates_count_blocks_of_anchors) {
    static const int counts[] = {0, 8, 32, 40, 300, MOST_ANCHORS};
    static const int lengths[] = {1, 100, 1000};
    size_t least = 0;
    int i, n, layer, t;
    for (i = 0; i < COUNT(counts); i++)
        for (n = 0; n < COUNT(lengths); n++) {
            tkv_config cfg = config_of_anchors(counts[i]);
            tkv_memory_info e, m;
            tkv_cache *kv = create_cache(&cfg);
            rng = tkv_rng_seed(1);
            for (t = 0; t < lengths[n]; t++)
                for (layer = 0; layer < LAYERS; layer++) {
                    tkv_rng_fill(&rng, k_in, ROW, 1.0);
                    CHECK_EQ(tkv_append(kv, 0, layer, k_in, k_in, 1), TKV_OK);
                }
            CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
            CHECK_EQ(tkv_estimate_memory(&cfg, lengths[n], 1, &e), TKV_OK);
            CHECK_EQ(e.total - e.index, m.total - m.index);
            CHECK_EQ(e.tier[TKV_TIER_HOT].codes, m.tier[TKV_TIER_HOT].codes);
            CHECK_EQ(e.fp16_bytes, m.fp16_bytes);
            CHECK_LE(e.index, m.index); /* the cache's index has grown in larger steps */
            CHECK_LE(m.index, 2 * e.index);
            if (lengths[n] == 1000) {
                CHECK(e.tier[TKV_TIER_HOT].codes > least);
                least = e.tier[TKV_TIER_HOT].codes;
            }
            tkv_destroy(kv);
        }
}

TEST(anchors_need_sinks_and_no_window) {
    tkv_config cfg = small_config();
    tkv_layer_config layers[LAYERS];
    cfg.tiers.n_anchors = MOST_ANCHORS;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_OK);
    cfg.tiers.n_anchors = MOST_ANCHORS + 1;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg.tiers.n_anchors = -1;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg.tiers.n_anchors = 16;
    cfg.model.window = 100;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg.model.window = 0;
    cfg.tiers.sink_tokens = TKV_OFF;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg.tiers.sink_tokens = BLOCK;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_OK);
    memset(layers, 0, sizeof layers);
    layers[2].window = 50;
    cfg.layers = layers;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
}

/* >>memory */
TEST(eviction_frees_memory) {
    tkv_config cfg = small_config();
    tkv_memory_info before, after;
    tkv_layer_info tiers;
    cache_pair pair = make_pair(&cfg);
    int i;
    for (i = 0; i < 8; i++) CHECK_EQ(append_tokens(&pair, 0, 250), TKV_OK);
    CHECK_EQ(tkv_get_memory(pair.kv, &before), TKV_OK);
    for (i = 0; i < LAYERS; i++) evict_random_tokens(&pair, 0, i, 75);
    CHECK_EQ(tkv_get_memory(pair.kv, &after), TKV_OK);
    CHECK(after.total < before.total * 7 / 10);
    CHECK(after.fp16_bytes < before.fp16_bytes * 3 / 10);
    CHECK_EQ(tkv_get_layer(pair.kv, 0, 1, &tiers), TKV_OK);
    CHECK_EQ(tiers.tokens[0] + tiers.tokens[1] + tiers.tokens[2] + tiers.evicted, 2000);
    CHECK_EQ(tiers.tokens[0] + tiers.tokens[1] + tiers.tokens[2], n_live(pair.kv, 0, 1));
    destroy_pair(&pair);
}

/* Exact blocks are merged until they are nearly full, whichever tokens are evicted. */
TEST(exact_blocks_are_merged) {
    tkv_config cfg = small_config();
    cache_pair pair;
    int i, n;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    pair = make_pair(&cfg);
    for (i = 0; i < 8; i++) CHECK_EQ(append_tokens(&pair, 0, 250), TKV_OK);
    for (i = 0; i < 5; i++) {
        evict_random_tokens(&pair, 0, 1, 15);
        n = n_live(pair.kv, 0, 1);
        CHECK_MSG(n_layer_blocks(pair.kv, 0, 1) <= n / (BLOCK * 3 / 4) + 3, "%d tokens in %d blocks", n,
                  n_layer_blocks(pair.kv, 0, 1));
        check_reads(&pair, 0, 1, 0);
        check_attention(&pair, 0, 1, 3, NULL, FAST_MATH ? 1e-3 : 1e-5);
    }
    destroy_pair(&pair);
}

typedef struct eviction_log {
    int n_events, n_tokens, n_wrong, last_seq;
    uint64_t evicted_mask[LAYERS][WORDS];
} eviction_log;

static void log_eviction(void *user, const tkv_event *e) {
    eviction_log *evictions = (eviction_log *)user;
    int i;
    if (e->kind != TKV_EVENT_EVICT) return;
    evictions->n_events++;
    evictions->n_tokens += e->n;
    evictions->last_seq = e->seq;
    for (i = 0; i < e->n; i++) {
        evictions->n_wrong += (i > 0 && e->positions[i] <= e->positions[i - 1]) ||
                              is_in_mask(evictions->evicted_mask[e->layer], e->positions[i]);
        add_to_mask(evictions->evicted_mask[e->layer], e->positions[i]);
    }
}

/* The cache first compresses to the last level. Then it evicts tokens, and no append is refused. Memory never exceeds
 * the budget. */
TEST(eviction_under_a_budget) {
    static const tkv_evict_policy policies[] = {TKV_EVICT_SLIDING, TKV_EVICT_KNORM, TKV_EVICT_RANDOM};
    static eviction_log evictions;
    tkv_budget_info b;
    counting_allocator p;
    int i, k, n;
    for (k = 0; k < COUNT(policies); k++) {
        tkv_config cfg = small_config();
        tkv_memory_info m;
        cache_pair pair;
        int first_eviction = -1;
        memset(&evictions, 0, sizeof evictions);
        cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
        cfg.budget.bytes = 500000;
        cfg.evict.policy = policies[k];
        cfg.host.allocator = counting_allocator_of(&p);
        cfg.host.on_event = log_eviction;
        cfg.host.event_user = &evictions;
        pair = make_pair(&cfg);
        for (n = 0; n < LONGEST - 50;) {
            const int more = 1 + tkv_rng_below(&rng, 40);
            CHECK_EQ(append_tokens(&pair, 0, more), TKV_OK);
            n += more;
            CHECK(p.peak <= cfg.budget.bytes);
            if (evictions.n_tokens && first_eviction < 0) {
                first_eviction = n;
                CHECK_EQ(tkv_get_budget(pair.kv, &b), TKV_OK);
                CHECK_EQ(b.level, b.n_levels - 1);
            }
            if (n % 10 == 0) check_cache(pair.kv);
        }
        CHECK(first_eviction > 0 && first_eviction < LONGEST - 200);
        CHECK_EQ(evictions.n_wrong, 0);
        CHECK_EQ(evictions.last_seq, 0);
        for (i = 0; i < LAYERS; i++)
            for (n = 0; n < tkv_get_length(pair.kv, 0, TKV_ALL_LAYERS); n++)
                CHECK_EQ(is_live(pair.kv, 0, i, n), !is_in_mask(evictions.evicted_mask[i], n));
        CHECK_EQ(tkv_get_budget(pair.kv, &b), TKV_OK);
        CHECK_EQ(b.evicted, (uint64_t)evictions.n_tokens);
        CHECK_EQ(b.refused, 0);
        CHECK_EQ(tkv_get_memory(pair.kv, &m), TKV_OK);
        CHECK(m.total > cfg.budget.bytes / 10 * 7); /* most of the budget is used */
        check_reads(&pair, 0, 1, .75);
        check_cache(pair.kv);
        destroy_pair(&pair);
        CHECK_EQ(p.held, 0);
    }
}

/* Blocks are not merged. Evicting the oldest tokens frees whole blocks. */
TEST(keys_before_rope_under_a_budget) {
    tkv_config cfg = small_config();
    cache_pair pair;
    int n;
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT3);
    cfg.model.rope.dim = DIM;
    cfg.budget.bytes = 500000;
    pair = make_pair(&cfg);
    for (n = 0; n < LONGEST - 60; n += 50) CHECK_EQ(append_tokens(&pair, 0, 50), TKV_OK);
    CHECK(n_live(pair.kv, 0, 1) < n);
    CHECK(is_live(pair.kv, 0, 1, n - 1) && is_live(pair.kv, 0, 1, 0) && !is_live(pair.kv, 0, 1, 10));
    check_cache(pair.kv);
    destroy_pair(&pair);
}

/* The append is then refused, and no token is evicted. */
TEST(protected_tokens_can_exceed_the_budget) {
    tkv_config cfg = small_config();
    cache_pair pair;
    tkv_status st = TKV_OK;
    int n = 0, count;
    cfg.tiers.hot = pair_of(TKV_F16, TKV_F16);
    cfg.budget.bytes = 400000;
    cfg.evict.recent_tokens = LONGEST;
    pair = make_pair(&cfg);
    while (!st && n < LONGEST - 10) {
        count = n_live(pair.kv, 0, LAYERS - 1);
        st = append_tokens(&pair, 0, 10);
        n += st ? 0 : 10;
    }
    CHECK_EQ(st, TKV_ERR_BUDGET);
    CHECK_EQ(count, n);
    CHECK_EQ(n_live(pair.kv, 0, LAYERS - 1), n);
    check_cache(pair.kv);
    destroy_pair(&pair);
}

TEST(wrong_arguments) {
    tkv_config cfg = small_config();
    tkv_evict_params p;
    uint64_t bits[WORDS];
    cache_pair pair = make_pair(&cfg);
    memset(bits, 0xff, sizeof bits);
    memset(&p, 0, sizeof p);
    CHECK_EQ(append_tokens(&pair, 0, 100), TKV_OK);
    CHECK_EQ(tkv_evict(NULL, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_evict(pair.kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_ERR_ARG); /* keep is 0 */
    p.keep = 10;
    p.layer = LAYERS;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_ERR_ARG);
    p.layer = 0;
    p.seq = SEQS;
    CHECK_EQ(tkv_evict(pair.kv, &p), TKV_ERR_ARG);
    p.seq = 0;
    CHECK_EQ(evict_tokens(pair.kv, 0, 0, NULL, 1), TKV_ERR_ARG);
    CHECK_EQ(evict_tokens(pair.kv, -1, 0, bits, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_pin(pair.kv, 0, -1, 1, TKV_UNLIMITED), TKV_ERR_ARG);
    CHECK_EQ(live_mask_of(pair.kv, 0, 0, 0, 101, bits), TKV_ERR_RANGE);
    CHECK_EQ(live_mask_of(pair.kv, 0, LAYERS, 0, 1, bits), TKV_ERR_ARG);
    CHECK_EQ(n_live(pair.kv, 0, 0), 100);
    CHECK_EQ(evict_tokens(pair.reference, 0, 0, bits, 1), TKV_ERR_STATE);
    CHECK_EQ(live_mask_of(pair.reference, 0, 0, 0, 100, bits), TKV_OK);
    CHECK_EQ(bits[0], ~(uint64_t)0);
    CHECK_EQ(bits[1], ((uint64_t)1 << 36) - 1);
    {
        tkv_evict_config none;
        memset(&none, 0, sizeof none); /* the policy that evicts nothing */
        p.evict = &none;
        p.keep = 100;
        CHECK_EQ(tkv_evict(pair.kv, &p), TKV_OK);
        p.keep = 50;
        CHECK_EQ(tkv_evict(pair.kv, &p), TKV_ERR_BUDGET);
        CHECK_MSG(strstr(tkv_get_last_error(pair.kv), "the policy is \"none\"") != NULL, "%s",
                  tkv_get_last_error(pair.kv));
        CHECK_EQ(n_live(pair.kv, 0, 0), 100);
    }
    cfg.evict.pool = 2;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    destroy_pair(&pair);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(a_window_slides);
    RUN(sinks_outlast_long_chunks);
    RUN(eviction_in_batches);
    RUN(tkv_evict_takes_the_selected_victims);
    RUN(knorm_uses_norms_of_the_appended_keys);
    RUN(attended_tokens_stay);
    RUN(scores_pins_priorities);
    RUN(default_scores_are_importance);
    RUN(a_scorer_of_the_user);
    RUN(a_scorer_is_called_once_per_token);
    RUN(pyramidkv_splits_the_budget);
    RUN(the_last_queries_before_an_eviction_decide);
    RUN(tokens_that_no_query_judged_stay);
    RUN(layers_keep_tokens_on_a_line);
    RUN(tokens_are_read_in_any_order);
    RUN(eviction_from_exact_blocks);
    RUN(eviction_from_encoded_blocks);
    RUN(keys_before_rope);
    RUN(all_tokens_may_be_evicted);
    RUN(truncation_and_abort_after_eviction);
    RUN(anchors_stay_exact);
    RUN(anchors_reduce_the_error);
    RUN(anchors_need_sinks_and_no_window);
    RUN(hundreds_of_anchors_stay_exact);
    RUN(forks_and_cuts_with_hundreds_of_anchors);
    RUN(hundreds_of_anchors_under_a_budget);
    RUN(hundreds_of_anchors_in_place);
    RUN(estimates_count_blocks_of_anchors);
    RUN(eviction_frees_memory);
    RUN(exact_blocks_are_merged);
    RUN(eviction_under_a_budget);
    RUN(keys_before_rope_under_a_budget);
    RUN(protected_tokens_can_exceed_the_budget);
    RUN(wrong_arguments);
    return tkv_test_end();
}
