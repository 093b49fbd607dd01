/*
 * test_budget.c - the memory budget. It is never exceeded by a byte. Blocks stay exact as long as it allows, and
 * the oldest are coded first. A refused call changes nothing. Counting allocators and guarded buffers check this.
 */
#include "kit.h"

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    SEQS = 3,
    LAYERS = 3,
    KV_HEADS = 2,
    HEADS = 4,
    DIM = 32,
    ROW = KV_HEADS * DIM,
    TOKEN = 2 * ROW * 2, /* bytes of a token and layer in FP16, K and V */
    LONGEST = 4000,
    CHUNK = 128,
    HOPELESS = 1024 /* an append of this many tokens fits in no small budget */
};

/* >>model of what was appended */
typedef struct model_sequence {
    int len;
    float k[LONGEST][ROW], v[LONGEST][ROW];
} model_sequence;

static model_sequence model[SEQS][LAYERS];
static float k_in[HOPELESS * ROW], v_in[HOPELESS * ROW], k_out[LONGEST * ROW], v_out[LONGEST * ROW];
static tkv_rng rng;

enum { N_VALUES = 1 << 14 };
static float some_values[N_VALUES]; /* exact in F16: rows of inputs are parts of them */

static void reset_model(int seq) {
    int l;
    for (l = 0; l < LAYERS; l++) model[seq][l].len = 0;
}

static void reset_models(void) {
    int s;
    for (s = 0; s < SEQS; s++) reset_model(s);
}

static void make_values(void) {
    tkv_rng fill = tkv_rng_seed(2);
    int i;
    tkv_rng_fill(&fill, some_values, N_VALUES, 1.0);
    for (i = 0; i < N_VALUES; i++) some_values[i] = float_of_f16(f16_of(some_values[i]));
}

static void fill_inputs(int n) {
    int t;
    for (t = 0; t < n; t++) {
        memcpy(k_in + t * ROW, some_values + tkv_rng_below(&rng, N_VALUES - ROW), ROW * sizeof *k_in);
        memcpy(v_in + t * ROW, some_values + tkv_rng_below(&rng, N_VALUES - ROW), ROW * sizeof *v_in);
    }
}

static void add_to_model(int seq, int layer, int from, int n) {
    model_sequence *s = &model[seq][layer];
    memcpy(s->k[s->len], k_in + from * ROW, (size_t)n * sizeof s->k[0]);
    memcpy(s->v[s->len], v_in + from * ROW, (size_t)n * sizeof s->v[0]);
    s->len += n;
}

static tkv_status append_tokens(tkv_cache *kv, int seq, int layer, int n) {
    tkv_status st;
    if (model[seq][layer].len + n > LONGEST) return TKV_ERR_CAPACITY; /* the model is full */
    fill_inputs(n);
    st = tkv_append(kv, seq, layer, k_in, v_in, n);
    if (!st) add_to_model(seq, layer, 0, n);
    return st;
}

/* Appends n tokens to all layers. Returns the first status that is not TKV_OK. */
static tkv_status append_to_all_layers(tkv_cache *kv, int seq, int n) {
    tkv_status st = TKV_OK;
    int l;
    for (l = 0; l < LAYERS && !st; l++) st = append_tokens(kv, seq, l, n);
    return st;
}

/* Checks all tokens of a layer against the model. Tokens of the hot tier must be equal, others similar.
 * Returns the number of equal tokens. */
static int check_reads(const tkv_cache *kv, int seq, int layer) {
    const model_sequence *s = &model[seq][layer];
    double err = 0.0, energy = 0.0;
    int t, c, n_equal = 0, len = tkv_get_length(kv, seq, layer);
    CHECK_EQ(len, s->len);
    if (len != s->len || len == 0) return 0;
    CHECK_EQ(tkv_read((tkv_cache *)(uintptr_t)kv, seq, layer, 0, len, k_out, v_out), TKV_OK);
    for (t = 0; t < len; t++) {
        tkv_tier tier = TKV_TIER_HOT;
        int same = memcmp(k_out + t * ROW, s->k[t], sizeof s->k[t]) == 0 &&
                   memcmp(v_out + t * ROW, s->v[t], sizeof s->v[t]) == 0;
        n_equal += same;
        CHECK_EQ(tier_of(kv, seq, layer, t, &tier), TKV_OK);
        if (tier == TKV_TIER_HOT)
            CHECK_MSG(same, "sequence %d, layer %d: exact token %d changed", seq, layer, t);
        for (c = 0; c < ROW; c++) {
            double a = (double)k_out[t * ROW + c] - (double)s->k[t][c];
            double b = (double)v_out[t * ROW + c] - (double)s->v[t][c];
            err += a * a + b * b;
            energy += (double)s->k[t][c] * (double)s->k[t][c] + (double)s->v[t][c] * (double)s->v[t][c];
        }
    }
    CHECK_MSG(err <= 0.6 * energy, "sequence %d, layer %d: errors are %.2f of the values", seq, layer,
              err / energy);
    return n_equal;
}

static int check_all_reads(const tkv_cache *kv) {
    int s, l, n_equal = 0;
    for (s = 0; s < SEQS; s++)
        for (l = 0; l < LAYERS; l++) n_equal += check_reads(kv, s, l);
    return n_equal;
}

static tkv_config small_config(size_t budget) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    cfg.budget.bytes = budget;
    return cfg;
}

/* >>growth */
/* The smallest cache of six layers: fixed costs and the hot tail leave room for 150 tokens. */
TEST(a_small_budget_holds_150_tokens) {
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv;
    static float row[288];
    tkv_status st = TKV_OK;
    unsigned long largest;
    int l, t;
    cfg.model.n_layers = 6;
    cfg.model.n_heads = 6;
    cfg.model.head_dim = 48;
    cfg.budget.bytes = 1000 * 1000;
    kv = create_cache(&cfg);
    for (t = 0; t < 1000 && !st; t++)
        for (l = 0; l < 6 && !st; l++) {
            tkv_rng_fill(&rng, row, 288, 1.0);
            st = tkv_append(kv, 0, l, row, row, 1);
        }
    CHECK_EQ(st, TKV_ERR_BUDGET);
    CHECK_LE(150, t - 1);
    CHECK(strstr(tkv_get_last_error(kv), " held are "));
    CHECK(strstr(tkv_get_last_error(kv), "append less"));
    largest = strtoul(strchr(tkv_get_last_error(kv), ';') + 1, NULL, 10);
    CHECK_LE(cfg.budget.bytes / 5, largest); /* of five parts */
    CHECK_LE(largest, cfg.budget.bytes);
    check_cache(kv);
    tkv_destroy(kv);
}

static void check_growth(size_t budget, int chunk) {
    tkv_config cfg = small_config(budget);
    tkv_cache *kv;
    counting_allocator p;
    int l = 0, level = 0, max_level = 0, tokens = 0, context, len[LAYERS];
    tkv_status st = TKV_OK;
    reset_models();
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.limits.max_append = HOPELESS;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_estimate_context(&cfg, 1, &context), TKV_OK);
    while (!st && tokens + chunk <= LONGEST) {
        for (l = 0; l < LAYERS && !st; l++) {
            st = append_tokens(kv, 0, l, chunk);
            CHECK_LE(p.peak, budget);
        }
        if (!st) tokens += chunk;
        CHECK_LE(level, budget_of(kv).level); /* the level never falls during growth */
        level = budget_of(kv).level;
        if (level > max_level) {
            max_level = level;
            check_cache(kv);
        }
    }
    check_cache(kv);
    (void)check_all_reads(kv);
    printf("\n    %lu bytes, chunks of %d: %d tokens of %d, level %d", (unsigned long)budget, chunk, tokens,
           context, max_level);
    if (st) { /* the budget is used up: refused appends change nothing */
        const tkv_budget_info b = budget_of(kv);
        CHECK_EQ(st, TKV_ERR_BUDGET);
        CHECK_EQ(level, b.n_levels - 1);
        CHECK(strstr(tkv_get_last_error(kv), "budget") != NULL);
        if (chunk == 1) CHECK_LE(context, tokens + 1);
        if (chunk == 1)
            CHECK_LE(tokens, context + context / 10 + BLOCK); /* the estimate assumes the largest index */
        for (l = 0; l < LAYERS; l++) len[l] = tkv_get_length(kv, 0, l);
        CHECK_EQ(tkv_append(kv, 0, LAYERS - 1, k_in, v_in, HOPELESS), TKV_ERR_BUDGET);
        for (l = 0; l < LAYERS; l++) CHECK_EQ(tkv_get_length(kv, 0, l), len[l]);
        CHECK_EQ(budget_of(kv).refused, b.refused + 1);
        (void)check_all_reads(kv);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        reset_model(0);
        check_cache(kv);
        CHECK_EQ(append_to_all_layers(kv, 0, chunk), TKV_OK);
        (void)check_all_reads(kv);
        CHECK_LE(p.peak, budget);
    }
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

TEST(growth_stays_within_the_budget) {
    check_growth(1300 * 1000, 1);
    check_growth(1000 * 1000, 7);
    check_growth(900 * 1000, 64);
    check_growth(1100 * 1000, CHUNK);
    check_growth(500 * 1000, 1);
    check_growth(500 * 1000, 64);
}

/* Tokens are exact while level 0 suffices. Levels then rise one at a time. white_reclaim.c tests that the
 * oldest blocks are coded first. */
TEST(levels_rise_one_at_a_time) {
    tkv_config cfg = small_config(800 * 1000);
    tkv_cache *kv = create_cache(&cfg);
    int t, level = 0;
    reset_models();
    for (t = 0; t < 3200; t++) {
        tkv_budget_info b;
        CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        b = budget_of(kv);
        CHECK_LE(b.level, level + 1);
        if (level == 0 && b.level == 0 && t % 100 == 0) CHECK_EQ(check_reads(kv, 0, 1), t + 1);
        if (level == 0 && b.level == 1) CHECK_LE(0.79 * 800e3, b.used);
        level = b.level;
    }
    CHECK(level >= 3);
    check_cache(kv);
    tkv_destroy(kv);
}

/* >>events and levels */
typedef struct event_log {
    int n, level[64], refused, tables, n_errors;
} event_log;

static void log_event(void *user, const tkv_event *e) {
    event_log *d = (event_log *)user;
    if (!e->text || !e->text[0]) d->n_errors++;
    if (e->kind == TKV_EVENT_BUDGET) d->refused++;
    if (e->kind == TKV_EVENT_TABLE) d->tables++;
    if (e->kind != TKV_EVENT_LEVEL || d->n == 64) return;
    if (e->from != (d->n ? d->level[d->n - 1] : 0)) d->n_errors++;
    d->level[d->n++] = e->to;
}

/* The level falls when sequences end and all tokens fit. Then it rises again. */
TEST(level_falls_when_all_fits) {
    tkv_config cfg = small_config(800 * 1000);
    event_log d;
    tkv_cache *kv;
    int i, t, n_reversals = 0;
    memset(&d, 0, sizeof d);
    reset_models();
    cfg.host.on_event = log_event;
    cfg.host.event_user = &d;
    kv = create_cache(&cfg);
    for (t = 0; t < 3000; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    for (i = 0; i < d.n; i++) CHECK_EQ(d.level[i], i + 1); /* the level never falls during growth */
    CHECK_LE(3, d.n);
    for (t = 0; t < 300; t++) CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    reset_model(0);
    for (t = 0; t < 200; t++) CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 0);
    CHECK_EQ(d.n_errors, 0);
    CHECK_LE(LAYERS, d.tables);
    for (t = 0; t < 1500; t++) CHECK_EQ(append_to_all_layers(kv, 2, 1), TKV_OK);
    CHECK(budget_of(kv).level > 1);
    for (i = 1; i + 1 < d.n; i++)
        n_reversals += (d.level[i + 1] > d.level[i]) != (d.level[i] > d.level[i - 1]);
    CHECK_LE(n_reversals, 2);
    CHECK_EQ(d.n_errors, 0);
    CHECK_EQ(budget_of(kv).pressure.tightened - budget_of(kv).pressure.relaxed,
             (uint64_t)budget_of(kv).level);
    check_cache(kv);
    (void)check_all_reads(kv);
    tkv_destroy(kv);
}

/* A context that tkv_estimate_context gives for layers with a window fits into the budget. */
TEST(estimated_context_fits_with_windows) {
    int budget;
    for (budget = 440; budget < 700; budget += 20) {
        tkv_config cfg = small_config((size_t)budget * 1000);
        tkv_cache *kv;
        tkv_status st = TKV_OK;
        int context = -1, t;
        reset_models();
        cfg.model.window = 1024;
        cfg.limits.max_tokens = 20000;
        CHECK_EQ(tkv_estimate_context(&cfg, 1, &context), TKV_OK);
        kv = create_cache(&cfg);
        for (t = 0; t < 3000 && !st; t++) {
            int l;
            fill_inputs(1);
            for (l = 0; l < LAYERS && !st; l++) st = tkv_append(kv, 0, l, k_in, v_in, 1);
        }
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
        if (st) CHECK_LE(context, t - 1);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

/* A change of the plan ends a reservation. */
TEST(plans_change_during_reservations) {
    int variant, t;
    for (variant = 0; variant < 3; variant++) {
        tkv_config cfg = small_config(variant == 2 ? 4000 * 1000 : 0);
        tkv_cache *kv;
        static const tkv_level two_levels[] = {{2000, 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0},
                                               {1, 64, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}};
        cfg.tiers.hot_tokens = variant == 2 ? 64 : 2000;
        cfg.tiers.warm_tokens = 64;
        cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        if (variant == 1) cfg.budget.ladder = two_levels, cfg.budget.n_levels = 2;
        reset_models();
        kv = create_cache(&cfg);
        for (t = 0; t < 900; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        CHECK_EQ(tkv_seq_reserve(kv, 0, 100), TKV_OK);
        for (t = 0; t < 99; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        if (variant == 0) CHECK_EQ(tkv_set_hot_tokens(kv, 1), TKV_OK);
        if (variant == 1) CHECK_EQ(tkv_set_level(kv, 1), TKV_OK);
        if (variant == 2) {
            CHECK_EQ(tkv_set_level(kv, 3), TKV_OK);
            CHECK_EQ(tkv_set_budget(kv, 0), TKV_OK);
        }
        for (t = 0; t < 10; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        check_cache(kv);
        (void)check_all_reads(kv);
        tkv_destroy(kv);
    }
}

/* A request that no reclaim stage can serve changes nothing: the last append stays exact, also when a batch has a row
 * of 0 tokens. */
TEST(refusal_keeps_the_last_append) {
    tkv_config cfg = small_config(800 * 1000);
    tkv_cache *kv;
    tkv_append_params p;
    tkv_rows rows[2];
    tkv_status st = TKV_OK;
    int l, t;
    cfg.limits.max_append = HOPELESS;
    reset_models();
    kv = create_cache(&cfg);
    memset(&p, 0, sizeof p);
    p.k = k_in;
    p.v = v_in;
    for (l = 0; l < LAYERS; l++) CHECK_EQ(append_tokens(kv, 0, l, 384), TKV_OK);
    for (t = 0; t < LONGEST && !st; t++) st = append_to_all_layers(kv, 1, 1);
    CHECK_EQ(st, TKV_ERR_BUDGET);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(tkv_append(kv, 0, l, k_in, v_in, HOPELESS), TKV_ERR_BUDGET);
    rows[0].seq = 0;
    rows[0].n = 0;
    rows[1].seq = 2;
    rows[1].n = 1;
    p.batch = rows;
    p.n_batch = 2;
    (void)tkv_append_ex(kv, &p);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    for (t = 0, st = TKV_OK; t < 400 && !st; t++) st = append_to_all_layers(kv, 1, 1);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(check_reads(kv, 0, l), 384);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Small budgets hold the tokens that tkv_estimate_context gives, with steps and without. The level only
 * rises. */
TEST(steps_reach_the_estimated_context) {
    static const size_t budgets[] = {900 * 1000, 1024 * 1000, 1258 * 1000, 1433 * 1000};
    int i, steps, l, t;
    for (i = 0; i < COUNT(budgets); i++)
        for (steps = 0; steps < 2; steps++) {
            tkv_config cfg = small_config(budgets[i]);
            event_log d;
            tkv_cache *kv;
            tkv_status st = TKV_OK;
            int context = -1;
            if (tkv_test_quick() && (i + steps) % 2) continue;
            memset(&d, 0, sizeof d);
            cfg.limits.max_seqs = 1;
            cfg.model.head_dim = 2 * DIM;
            cfg.host.on_event = log_event;
            cfg.host.event_user = &d;
            CHECK_EQ(tkv_estimate_context(&cfg, 1, &context), TKV_OK);
            kv = create_cache(&cfg);
            for (t = 0; t < 4000 && !st; t++) {
                fill_inputs(2);
                if (steps) st = tkv_seq_begin(kv, 0);
                for (l = 0; l < LAYERS && !st; l++) st = tkv_append(kv, 0, l, k_in, v_in, 1);
                if (steps && !st) st = tkv_seq_commit(kv, 0);
            }
            if (st) {
                CHECK_EQ(st, TKV_ERR_BUDGET);
                CHECK_LE(context, t - 1);
                CHECK_LE(t - 1, context + context / 10 + BLOCK);
            } else {
                CHECK_LE(4000, context + context / 10 + BLOCK);
            }
            for (l = 0; l < d.n; l++) CHECK_EQ(d.level[l], l + 1);
            CHECK_EQ(d.n_errors, 0);
            if (steps) (void)tkv_seq_abort(kv, 0);
            check_cache(kv);
            tkv_destroy(kv);
        }
}

/* The last append of a sequence stays exact until its next append, while others need memory. */
TEST(last_append_stays_exact) {
    tkv_config cfg = small_config(1000 * 1000);
    tkv_cache *kv = create_cache(&cfg);
    int t, l, n_coded;
    reset_models();
    for (l = 0; l < LAYERS; l++) CHECK_EQ(append_tokens(kv, 0, l, CHUNK), TKV_OK);
    for (t = 0; t < 1200; t++) CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    CHECK(budget_of(kv).level > 0);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(check_reads(kv, 0, l), CHUNK);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(append_tokens(kv, 0, l, 100), TKV_OK);
    for (t = 0; t < 1500; t++) CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    for (l = 0, n_coded = 0; l < LAYERS; l++) n_coded += CHUNK + 100 - check_reads(kv, 0, l);
    CHECK(n_coded > 0); /* some tokens of the first append are coded */
    check_cache(kv);
    tkv_destroy(kv);
}

TEST(profiles_and_ladders) {
    static const tkv_level three_levels[] = {
        {TKV_UNLIMITED,
         0,
         {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
         {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
         0},
        {32, TKV_UNLIMITED, {TKV_FP8_E4M3, TKV_FP8_E4M3}, {TKV_FP8_E4M3, TKV_FP8_E4M3}, 0},
        {32, 64, {TKV_FP8_E4M3, TKV_FP8_E4M3}, {TKV_KIVI2, TKV_KIVI2}, 0}};
    tkv_config cfg = small_config(900 * 1000);
    tkv_layer_config layers[LAYERS];
    tkv_cache *kv;
    tkv_layer_info info;
    int t;
    tkv_status st = TKV_OK;
    reset_models();
    cfg.budget.pressure.profile = TKV_PROFILE_FP16_ONLY;
    kv = create_cache(&cfg);
    for (t = 0; t < LONGEST && !st; t++) st = append_to_all_layers(kv, 0, 1);
    CHECK_EQ(st, TKV_ERR_BUDGET);
    CHECK_EQ(budget_of(kv).demoted, 0);
    CHECK_EQ(check_all_reads(kv), model[0][0].len + model[0][1].len + model[0][2].len);
    tkv_destroy(kv);
    /* the caller's ladder, and a layer with its own hot_tokens */
    memset(layers, 0, sizeof layers);
    layers[1].hot_tokens = TKV_UNLIMITED;
    cfg = small_config(950 * 1000);
    cfg.budget.ladder = three_levels;
    cfg.budget.n_levels = COUNT(three_levels);
    cfg.layers = layers;
    reset_models();
    kv = create_cache(&cfg);
    for (t = 0, st = TKV_OK; t < 1800 && !st; t++) st = append_to_all_layers(kv, 0, 1);
    CHECK_EQ(st, TKV_OK);
    CHECK_EQ(budget_of(kv).level, 2);
    CHECK_EQ(check_reads(kv, 0, 1), model[0][1].len);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.tokens[TKV_TIER_ARCHIVE] > 500);
    check_cache(kv);
    tkv_destroy(kv);
    /* this profile begins at level 1 */
    cfg = small_config(1000 * 1000);
    cfg.budget.pressure.profile = TKV_PROFILE_AGGRESSIVE;
    reset_models();
    kv = create_cache(&cfg);
    CHECK_EQ(budget_of(kv).level, 1);
    for (t = 0; t < 900; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK(budget_of(kv).recoded[1] > 0);
    CHECK_LE(budget_of(kv).pending, 3); /* above its threshold of a half, nearly all old blocks are coded */
    tkv_destroy(kv);
}

/* >>levels by length */
static const tkv_level levels_by_length[] = {{0, 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0},
                                             {0, 0, {TKV_Q8, TKV_Q8}, {TKV_KIVI4, TKV_KIVI4}, 600},
                                             {0, 0, {TKV_Q8, TKV_Q8}, {TKV_KIVI2, TKV_KIVI2}, 1200}};

static tkv_config length_config(void) {
    tkv_config cfg = small_config(0);
    cfg.budget.ladder = levels_by_length;
    cfg.budget.n_levels = COUNT(levels_by_length);
    cfg.tiers.hot_tokens = cfg.tiers.warm_tokens = 64;
    return cfg;
}

/* The archive's bytes per token and layer, which show the formats of its blocks. */
static double archive_bytes(const tkv_cache *kv) {
    tkv_memory_info m;
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    return (double)(m.tier[TKV_TIER_ARCHIVE].codes + m.tier[TKV_TIER_ARCHIVE].metadata) /
           (double)m.tier[TKV_TIER_ARCHIVE].tokens;
}

/* The first layer with K and V decides on the level, which may be a later one. */
TEST(the_level_follows_a_later_layer) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = length_config();
    tkv_cache *kv;
    int t, l;
    memset(layers, 0, sizeof layers);
    layers[0].no_cache = 1;
    cfg.layers = layers;
    reset_models();
    kv = create_cache(&cfg);
    for (t = 1; t <= 1300; t++)
        for (l = 1; l < LAYERS; l++) {
            CHECK_EQ(append_tokens(kv, 0, l, 1), TKV_OK);
            CHECK_EQ(budget_of(kv).level, t < 600 ? 0 : t < 1200 ? 1 : 2);
        }
    check_cache(kv);
    tkv_destroy(kv);
}

/* An open step learns no tables. Those of layers that learn are made before it; other layers have none. */
TEST(steps_of_layers_of_all_kinds) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = small_config(330 * 1000);
    tkv_cache *kv;
    int t;
    memset(layers, 0, sizeof layers);
    layers[1].share_kv = 1;
    layers[2].warm = layers[2].archive = pair_of(TKV_KIVI4, TKV_KIVI2);
    cfg.layers = layers;
    reset_models();
    kv = create_cache(&cfg);
    for (t = 0; t < 1000; t += 5) {
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        CHECK_EQ(append_tokens(kv, 0, 0, 5), TKV_OK);
        CHECK_EQ(append_tokens(kv, 0, 2, 5), TKV_OK);
        CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
    }
    CHECK_EQ(n_calibrated_layers(kv), 1);
    CHECK(budget_of(kv).level > 0);
    CHECK_LE(budget_of(kv).peak, cfg.budget.bytes);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Tokens that age get the format of today's length, in all layers alike. Stored ones keep their bytes. */
TEST(the_level_follows_the_longest_sequence) {
    enum { OLD = 128 };
    static float before[OLD * ROW];
    tkv_config cfg = length_config();
    tkv_cache *kv;
    double bytes[3];
    int t, l, level;
    reset_models();
    kv = create_cache(&cfg);
    for (t = 1; t <= 1400; t++) {
        for (l = 0; l < LAYERS; l++) {
            CHECK_EQ(append_tokens(kv, 0, l, 1), TKV_OK);
            CHECK_EQ(budget_of(kv).level, t < 600 ? 0 : t < 1200 ? 1 : 2);
        }
        if (t == 599)
            for (l = 0; l < 1; l++) CHECK_EQ(tkv_read(kv, 0, 2, 64, OLD, before, NULL), TKV_OK);
        if (t == 598 || t == 1198 || t == 1400) bytes[t / 600] = archive_bytes(kv);
    }
    CHECK_EQ(tkv_read(kv, 0, 2, 64, OLD, k_out, NULL), TKV_OK);
    CHECK_MEM(k_out, before, sizeof before);
    CHECK(bytes[0] > 1.1 * bytes[1] && bytes[1] > bytes[2]);
    (void)check_all_reads(kv);
    check_cache(kv);
    /* a second sequence does not lower the level; the first append after a cut does */
    CHECK_EQ(append_to_all_layers(kv, 1, 100), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 2);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    reset_model(0);
    CHECK_EQ(budget_of(kv).level, 2);
    for (level = 0; level < 2; level++) {
        for (l = 0; l < LAYERS; l++) CHECK_EQ(append_tokens(kv, 1, l, 100), TKV_OK);
        CHECK_EQ(budget_of(kv).level, level ? 1 : 0);
        /* the caller's level holds until the next length */
        CHECK_EQ(tkv_set_level(kv, level ? 0 : 1), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 1, 100), TKV_OK);
        CHECK_EQ(budget_of(kv).level, level ? 0 : 1);
        while (!level && model[1][0].len < 500) CHECK_EQ(append_to_all_layers(kv, 1, 20), TKV_OK);
    }
    (void)check_all_reads(kv);
    check_cache(kv);
    tkv_destroy(kv);
}

/* What was reserved was counted for the plan of that time. The level waits until it is used. */
TEST(a_level_by_length_waits_for_reservations) {
    tkv_config cfg = length_config();
    counting_allocator p;
    tkv_cache *kv;
    int t;
    int requests;
    reset_models();
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    for (t = 0; t < 57; t++) CHECK_EQ(append_to_all_layers(kv, 0, 10), TKV_OK);
    CHECK_EQ(tkv_seq_reserve(kv, 0, 60), TKV_OK); /* to 630 */
    CHECK_EQ(budget_of(kv).level, 1);             /* of the reserved length */
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    for (t = 570; t < 1190; t += 10) {
        requests = p.n_requests;
        CHECK_EQ(append_to_all_layers(kv, 0, 10), TKV_OK);
        if (t < 630) CHECK_EQ(p.n_requests, requests);
    }
    CHECK_EQ(tkv_seq_reserve(kv, 0, 5), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 0, 20), TKV_OK); /* longer than reserved */
    CHECK_EQ(budget_of(kv).level, 1);
    CHECK_EQ(append_tokens(kv, 0, 1, 20), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 2, 20), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 20), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 2);
    check_cache(kv);
    tkv_destroy(kv);
}

TEST(wrong_lengths_of_levels) {
    static const struct {
        int from[3];
        size_t budget;
        const char *sentence;
    } cases[] = {{{5, 600, 1200}, 0, "budget.ladder[0].from_tokens is 5; it must be 0"},
                 {{0, 600, 600}, 0, "budget.ladder[2].from_tokens is 600; lengths must rise"},
                 {{0, 0, 600}, 0, "budget.ladder[2].from_tokens is 600; lengths must rise"},
                 {{0, -1, 0}, 0, "budget.ladder[1].from_tokens is -1; it must be 1 to 2^30 - 1"},
                 {{0, 600, 0}, 4000 * 1000, "budget.ladder[1].from_tokens is 600; it must be 0 with budget"},
                 {{0, 600, 0}, 0, ""}};
    tkv_level level[3];
    tkv_config cfg;
    char reason[200];
    size_t bytes;
    int i, j;
    for (i = 0; i < COUNT(cases); i++) {
        cfg = length_config();
        memcpy(level, levels_by_length, sizeof level);
        for (j = 0; j < 3; j++) level[j].from_tokens = cases[i].from[j];
        cfg.budget.ladder = level;
        cfg.budget.bytes = cases[i].budget;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason),
                 cases[i].sentence[0] ? TKV_ERR_CONFIG : TKV_OK);
        CHECK_MSG(strncmp(reason, cases[i].sentence, strlen(cases[i].sentence)) == 0, "%s", reason);
    }
    cfg.limits.max_tokens = 1000; /* in place the plan is fixed */
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_ERR_CONFIG);
    cfg.budget.ladder = NULL;
    cfg.budget.n_levels = 0;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
}

/* With cfg.budget.pressure.min_level, old blocks are coded although memory is free. */
static void check_min_level(int min_level, int chunk) {
    tkv_config cfg = small_config((size_t)64 << 20);
    tkv_layer_info tiers;
    tkv_cache *kv;
    int seq, l, done;
    cfg.budget.pressure.min_level = min_level;
    reset_models();
    kv = create_cache(&cfg);
    for (seq = 0; seq < 2; seq++)
        while (model[seq][LAYERS - 1].len + chunk <= 1280) {
            CHECK_EQ(append_to_all_layers(kv, seq, chunk), TKV_OK);
            if (model[seq][0].len % 64) continue; /* also before layers have tables */
            CHECK_LE(budget_of(kv).pending,
                     LAYERS * (3 + chunk / BLOCK) + (model[seq][0].len < 1024 ? 24 : 0));
            CHECK_EQ(tkv_maintain(kv, 1000, NULL, NULL, &done), TKV_OK);
            CHECK_EQ(budget_of(kv).pending, 0);
        }
    CHECK_EQ(budget_of(kv).level, min_level);
    CHECK_EQ(tkv_maintain(kv, 1000, NULL, NULL, &done), TKV_OK);
    CHECK_EQ(done, 0);
    for (seq = 0; seq < 2; seq++)
        for (l = 0; l < LAYERS; l++) {
            CHECK_EQ(tkv_get_layer(kv, seq, l, &tiers), TKV_OK);
            CHECK_LE(tiers.tokens[TKV_TIER_HOT],
                     4 + 64 + BLOCK + chunk); /* sinks, hot_tokens, and tokens that do not fill a block */
            CHECK_LE(min_level == 3 ? 500 : 0, tiers.tokens[TKV_TIER_ARCHIVE]);
        }
    check_cache(kv);
    (void)check_all_reads(kv);
    tkv_destroy(kv);
}

TEST(min_level_holds_while_memory_is_free) {
    static const int chunk[] = {1, 64, CHUNK};
    int level, i;
    for (level = 1; level <= 3; level++)
        for (i = 0; i < COUNT(chunk); i++) check_min_level(level, chunk[i]);
}

/* >>changes at run time */
TEST(budget_goes_down_and_up) {
    tkv_config cfg = small_config(1700 * 1000);
    counting_allocator p;
    tkv_cache *kv;
    int t, n_equal;
    size_t least;
    reset_models();
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    for (t = 0; t < 1300; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 0);
    CHECK_EQ(tkv_set_budget(kv, 1000 * 1000), TKV_OK);
    CHECK_LE(p.held, 1000 * 1000);
    CHECK(budget_of(kv).level > 0);
    check_cache(kv);
    n_equal = check_all_reads(kv);
    CHECK_EQ(tkv_set_budget(kv, 100 * 1000), TKV_ERR_BUDGET);
    CHECK_EQ(check_all_reads(kv), n_equal);
    CHECK_EQ(budget_of(kv).budget, 1000 * 1000);
    for (least = 1000 * 1000; tkv_set_budget(kv, least) == TKV_OK; least -= 10 * 1000)
        CHECK_LE(p.held, least);
    CHECK_LE(least, 900 * 1000);
    check_cache(kv);
    CHECK_EQ(tkv_set_budget(kv, 4000 * 1000), TKV_OK);
    p.peak = p.held;
    for (t = 0; t < 800; t++) CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    CHECK_LE(p.peak, 4000 * 1000);
    CHECK_EQ(budget_of(kv).level, 0);
    CHECK_EQ(check_reads(kv, 1, 0), 800); /* level 0: all tokens are exact */
    CHECK_EQ(tkv_set_budget(kv, 0), TKV_OK);
    for (t = 0; t < 300; t++) CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    check_cache(kv);
    CHECK_EQ(tkv_set_budget(kv, 2500 * 1000), TKV_OK);
    check_cache(kv);
    (void)check_all_reads(kv);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    cfg = small_config(0);
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_set_budget(kv, 1000 * 1000), TKV_ERR_ARG);
    CHECK_EQ(tkv_set_level(kv, 1), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* A cache without its budget has a plan with larger formats than the budget's levels. */
TEST(coded_blocks_stay_coded) {
    tkv_config cfg = small_config(900 * 1000);
    tkv_cache *kv;
    int t, flush;
    reset_models();
    cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_F16;
    cfg.tiers.hot_tokens = 1;
    cfg.tiers.warm_tokens = 16 * BLOCK;
    cfg.meter.heads = 2;
    cfg.meter.tokens = 8 * BLOCK;
    kv = create_cache(&cfg);
    for (t = 0; t < 12 * BLOCK; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK(budget_of(kv).recoded[budget_of(kv).level] > 0);
    CHECK_EQ(tkv_set_budget(kv, 0), TKV_OK);
    CHECK_EQ(tkv_set_level(kv, 3), TKV_OK); /* the plan has all tiers in F16 */
    for (t = 0; t < 12 * BLOCK; t++)
        CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK); /* some blocks are due for the archive */
    for (flush = TKV_FLUSH_DUE; flush <= TKV_FLUSH_ALL; flush++) {
        CHECK_EQ(tkv_seq_flush(kv, 0, (tkv_flush_mode)flush), TKV_OK);
        check_cache(kv); /* the meter's copies belong to coded blocks */
    }
    (void)check_all_reads(kv);
    tkv_destroy(kv);
}

TEST(maintain_uses_idle_time) {
    tkv_config cfg = small_config(1000 * 1000);
    tkv_cache *kv = create_cache(&cfg);
    int t, done = 0, sum = 0;
    uint64_t before;
    reset_models();
    for (t = 0; t < 900; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK_EQ(tkv_maintain(kv, 0, NULL, NULL, &done), TKV_OK);
    CHECK_EQ(done, 0);
    do {
        CHECK_EQ(tkv_maintain(kv, 2, NULL, NULL, &done), TKV_OK);
        CHECK_LE(done, 2);
        sum += done;
    } while (done);
    CHECK(sum > 4);
    before = budget_of(kv).demoted;
    for (t = 0; t < 20; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).demoted, before);
    check_cache(kv);
    CHECK_EQ(tkv_maintain(NULL, 1, NULL, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_maintain(kv, -1, NULL, NULL, NULL), TKV_ERR_ARG);
    tkv_destroy(kv);
}

TEST(reported_pressure_raises_the_level) {
    tkv_config cfg = small_config(8000 * 1000);
    tkv_cache *kv = create_cache(&cfg);
    int t;
    reset_models();
    for (t = 0; t < 300; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).demoted, 0);
    CHECK_EQ(tkv_report_pressure(kv, tkv_test_float(0x7fc00000u)), TKV_ERR_ARG);
    CHECK_EQ(tkv_report_pressure(kv, 0.9f), TKV_OK);
    for (t = 0; t < 20; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 1);
    CHECK(budget_of(kv).recoded[1] > 0);
    CHECK_EQ(tkv_report_pressure(kv, 0.0f), TKV_OK);
    for (t = 0; t < 20; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 0);
    check_cache(kv);
    tkv_destroy(kv);
}

/* With pressure.jump, one append goes to the level of the pressure. Without it, levels come one by one. */
TEST(a_high_pressure_jumps_over_levels) {
    int jump, t;
    for (jump = 0; jump < 2; jump++) {
        tkv_config cfg = small_config(8000 * 1000);
        tkv_cache *kv;
        char reason[200];
        for (t = 0; t < 5; t++) cfg.budget.pressure.threshold[t] = (float)(.5 + .1 * t);
        cfg.budget.pressure.jump = 2;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_STR(reason, "budget.pressure: jump must be 0 or 1");
        cfg.budget.pressure.jump = jump;
        kv = create_cache(&cfg);
        reset_models();
        for (t = 0; t < 300; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        CHECK_EQ(budget_of(kv).level, 0);
        CHECK_EQ(tkv_report_pressure(kv, 0.85f), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        CHECK_EQ(budget_of(kv).level, jump ? 4 : 0);
        CHECK_EQ(budget_of(kv).pressure.tightened, jump ? 4 : 0);
        for (t = 0; t < 60; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        CHECK_EQ(budget_of(kv).recoded[1] == 0, jump);
        CHECK(budget_of(kv).recoded[jump ? 4 : 1] > 0);
        check_cache(kv);
        (void)check_all_reads(kv);
        CHECK_EQ(tkv_report_pressure(kv, 0.0f), TKV_OK);
        for (t = 0; t < 60; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        CHECK_EQ(budget_of(kv).level, 0);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

/* >>levels by name */
/* Bytes of a block of 64 tokens of one KV head, by the standalone codec. */
static double codec_bytes(tkv_format_pair pair, int head_dim) {
    tkv_codec c;
    double bytes;
    memset(&c, 0, sizeof c);
    c.head_dim = head_dim;
    c.format = pair.k;
    bytes = (double)tkv_get_block_bytes(&c);
    c.side = TKV_V;
    c.format = pair.v;
    return bytes + (double)tkv_get_block_bytes(&c);
}

/* The default ladder. Bits per value of 64 channels, metadata included: 16, 8.5, 4.0625, 3.0625, 2.3125, 1.8125. */
TEST(levels_of_a_budget_have_tags) {
    static const struct {
        const char *tag;
        double bits;
    } want[] = {{"f16", 16},         {"q8", 8.5},         {"a40/r40", 4.0625},
                {"a30/r30", 3.0625}, {"a25/r20", 2.3125}, {"a20/r15", 1.8125}};
    tkv_config cfg = make_sized_config(4, 8, 8, 64, 1, 64);
    tkv_level_info info;
    tkv_cache *kv;
    int i, level = 9;
    cfg.budget.bytes = (size_t)64 << 20;
    kv = create_cache(&cfg);
    CHECK_EQ(budget_of(kv).n_levels, COUNT(want));
    for (i = 0; i < COUNT(want); i++) {
        CHECK_EQ(tkv_get_level(kv, i, &info), TKV_OK);
        CHECK_EQ(info.level, i);
        CHECK_STR(info.tag, want[i].tag);
        CHECK_NEAR(info.memory_factor, want[i].bits / 16, 1e-12);
        CHECK_EQ(tkv_find_level(kv, want[i].tag, &level), TKV_OK);
        CHECK_EQ(level, i);
    }
    CHECK_EQ(tkv_find_level(kv, "fp16", &level), TKV_OK);
    CHECK_EQ(level, 0);
    CHECK_EQ(tkv_find_level(kv, "q8/q8", &level), TKV_OK);
    CHECK_EQ(level, 1);
    CHECK_EQ(tkv_find_level(kv, "q4", &level), TKV_ERR_RANGE); /* the ladder has no KIVI4 */
    CHECK_EQ(tkv_find_level(kv, "a30", &level), TKV_ERR_RANGE);
    CHECK_EQ(tkv_find_level(kv, "", &level), TKV_ERR_RANGE);
    CHECK_EQ(tkv_find_level(kv, "default", &level), TKV_ERR_RANGE);
    CHECK_EQ(tkv_find_level(kv, NULL, &level), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_level(NULL, "q8", &level), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_level(kv, "q8", NULL), TKV_ERR_ARG);
    CHECK_EQ(level, 1);
    CHECK_EQ(tkv_get_level(NULL, 0, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_level(kv, 0, NULL), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* The ladder of the EWMA design, fp16, q8, fp8, q4, with a layer of another shape and one with formats of its own. The
 * factors are sums of the codec's bytes. */
TEST(levels_of_any_ladder_have_tags) {
    static const tkv_level ladder[] = {{TKV_UNLIMITED, 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0},
                                       {0, TKV_UNLIMITED, {TKV_Q8, TKV_Q8}, {TKV_KIVI2, TKV_KIVI2}, 0},
                                       {0, 0, {TKV_Q8, TKV_Q8}, {TKV_FP8_E4M3, TKV_FP8_E4M3}, 0},
                                       {0, 0, {TKV_Q8, TKV_Q8}, {TKV_KIVI4, TKV_INT8}, 0},
                                       {0, 0, {TKV_Q8, TKV_Q8}, {TKV_KIVI4, TKV_KIVI4}, 0},
                                       {32, 0, {TKV_Q8, TKV_Q8}, {TKV_KIVI4, TKV_KIVI4}, 0}};
    static const tkv_format_pair pairs[] = {{TKV_F16, TKV_F16},           {TKV_Q8, TKV_Q8},
                                            {TKV_FP8_E4M3, TKV_FP8_E4M3}, {TKV_KIVI4, TKV_INT8},
                                            {TKV_KIVI4, TKV_KIVI4},       {TKV_KIVI4, TKV_KIVI4}};
    static const char *const tags[] = {"f16", "q8", "fp8-e4m3", "kivi4/int8", "kivi4", "kivi4"};
    static const char *const names[] = {"fp16", "q8", "fp8", "q4/int8", "q4", "kivi4"};
    static const int found[] = {0, 1, 2, 3, 4, 4};
    tkv_config cfg = make_sized_config(5, 8, 4, 64, 1, 64);
    tkv_layer_config layers[5];
    tkv_level_info info;
    tkv_cache *kv;
    int i;
    memset(layers, 0, sizeof layers);
    layers[0].archive = pair_of(TKV_Q8, TKV_Q8); /* the first layer has a better archive */
    layers[2].n_kv_heads = 2;
    layers[2].head_dim = 128;
    layers[3].no_cache = 1;
    layers[4].share_kv = 2;
    cfg.layers = layers;
    cfg.budget.ladder = ladder;
    cfg.budget.n_levels = COUNT(ladder);
    kv = create_cache(&cfg);
    for (i = 0; i < COUNT(ladder); i++) {
        const double first = codec_bytes(pairs[i < 2 ? i : 1], 64);
        const double bytes = 4 * first + 4 * codec_bytes(pairs[i], 64) + 2 * codec_bytes(pairs[i], 128);
        int level = -1;
        CHECK_EQ(tkv_get_level(kv, i, &info), TKV_OK);
        CHECK_STR(info.tag, tags[i]);
        CHECK_EQ(info.formats.k, pairs[i].k);
        CHECK_EQ(info.formats.v, pairs[i].v);
        CHECK_NEAR(info.memory_factor, bytes / (64.0 * 2 * 2 * (4 * 64 + 4 * 64 + 2 * 128)), 1e-12);
        CHECK_EQ(tkv_find_level(kv, names[i], &level), TKV_OK);
        CHECK_EQ(level, found[i]);
        CHECK_EQ(tkv_find_level(kv, tags[i], &level), TKV_OK);
        CHECK_EQ(level, found[i]);
    }
    tkv_destroy(kv);
}

TEST(set_hot_tokens_and_level) {
    tkv_config cfg = small_config(1000 * 1000);
    tkv_cache *kv = create_cache(&cfg);
    tkv_layer_info info;
    int t;
    reset_models();
    CHECK_EQ(tkv_set_hot_tokens(kv, 200), TKV_OK);
    CHECK_EQ(tkv_set_hot_tokens(kv, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_set_level(kv, 99), TKV_ERR_ARG);
    for (t = 0; t < 1000; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_LE(200, info.tokens[TKV_TIER_HOT]);
    CHECK(budget_of(kv).level > 0);
    CHECK_EQ(tkv_set_level(kv, 4), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 4);
    CHECK(budget_of(kv).pending > 0);
    for (t = 0; t < 100; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    check_cache(kv);
    (void)check_all_reads(kv);
    tkv_destroy(kv);
    /* a ladder without a budget: the level selects the plan, and tokens age */
    {
        static const tkv_level two_levels[] = {{0, 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0},
                                               {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}};
        tkv_format_pair pair = {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT};
        cfg = small_config(0);
        cfg.budget.ladder = two_levels;
        cfg.budget.n_levels = 2;
        reset_models();
        kv = create_cache(&cfg);
        for (t = 0; t < 700; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        CHECK_EQ(tkv_set_level(kv, 1), TKV_OK);
        CHECK_EQ(get_tier_formats(kv, 0, TKV_TIER_ARCHIVE, &pair), TKV_OK);
        CHECK_EQ(pair.k, TKV_KIVI2);
        for (t = 0; t < 700; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        check_cache(kv);
        (void)check_all_reads(kv);
        tkv_destroy(kv);
    }
}

static void run_steps_and_reservations(uint64_t seed) {
    tkv_config cfg = small_config(560 * 1000);
    counting_allocator p;
    tkv_cache *kv;
    int t, l, i, n_reservations = 0;
    tkv_status st = TKV_OK;
    reset_models();
    rng = tkv_rng_seed(seed);
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    for (t = 0; t < 1600 && !st && model[0][0].len + 9 <= LONGEST; t++) {
        int n = 1 + tkv_rng_below(&rng, 9), abort = tkv_rng_below(&rng, 3) == 0, len[LAYERS];
        for (l = 0; l < LAYERS; l++) len[l] = model[0][l].len;
        if (tkv_rng_below(&rng, 4) == 0) {
            st = tkv_seq_reserve(kv, 0, n);
            n_reservations += st == TKV_OK;
        } else if (n_reservations) {
            n_reservations--;
        }
        if (st) break;
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        for (l = 0; l < LAYERS && !st; l++) st = append_tokens(kv, 0, l, n);
        if (st || abort) {
            CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
            for (l = 0; l < LAYERS; l++) model[0][l].len = len[l];
        } else {
            CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
        }
        CHECK_LE(p.peak, 560 * 1000);
        if (t % 40 == 0) check_cache(kv);
    }
    check_cache(kv);
    CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
    (void)check_all_reads(kv);
    /* reserved memory stays available while others fill the budget */
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    reset_model(0);
    for (i = 0; i < 300; i++) CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reserve(kv, 1, 100), TKV_OK);
    for (st = TKV_OK; !st;) st = append_to_all_layers(kv, 2, 3);
    CHECK_EQ(st, TKV_ERR_BUDGET);
    for (i = 0; i < 100; i++) CHECK_EQ(append_to_all_layers(kv, 1, 1), TKV_OK);
    check_cache(kv);
    CHECK_LE(p.peak, 560 * 1000);
    tkv_destroy(kv);
}

/* In the second run a step learns a table while memory is reserved: the table takes no reserved page. */
TEST(steps_and_reservations) {
    run_steps_and_reservations(1);
    run_steps_and_reservations(13812787482494109963u);
}

/* Long appends are reserved before, while other sequences and the pressure take what they can. Seeds where a new table,
 * or recoding, would take pages of the reservation. */
TEST(reserved_appends_keep_their_pages) {
    static const int seeds[] = {25, 38, 65, 98};
    enum { MOST = 512 };
    int i, t, l, m, n_reserved = 0;
    for (i = 0; i < COUNT(seeds); i++) {
        tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, MOST);
        tkv_status st = TKV_OK;
        tkv_cache *kv;
        rng = tkv_rng_seed((uint64_t)seeds[i]);
        cfg.budget.bytes = 700000 + (size_t)tkv_rng_below(&rng, 300) * 1000;
        kv = create_cache(&cfg);
        fill_inputs(HOPELESS);
        for (t = 0; t < 400 && !st; t++) {
            const int n = 1 + tkv_rng_below(&rng, MOST), is_reserved = tkv_rng_below(&rng, 2);
            if (is_reserved) {
                st = tkv_seq_reserve(kv, 0, n);
                if (st) break;
                n_reserved++;
                for (m = tkv_rng_below(&rng, 3) ? 0 : 3; m > 0; m--) {
                    tkv_status other = TKV_OK;
                    for (l = 0; l < LAYERS && !other; l++)
                        other = tkv_append(kv, 1, l, k_in, v_in, 1 + tkv_rng_below(&rng, 20));
                }
                if (!tkv_rng_below(&rng, 3))
                    CHECK_EQ(tkv_report_pressure(kv, (float)tkv_rng_uniform(&rng)), TKV_OK);
            }
            for (l = 0; l < LAYERS && !st; l++) st = tkv_append(kv, 0, l, k_in, v_in, n);
            if (is_reserved) CHECK_EQ(st, TKV_OK);
            check_cache(kv);
        }
        CHECK_EQ(st, TKV_ERR_BUDGET);
        CHECK_LE(budget_of(kv).peak, cfg.budget.bytes);
        tkv_destroy(kv);
    }
    CHECK(n_reserved > 8);
}

/* >>failed allocations */
static tkv_status run_scenario(tkv_cache *kv, int *steps) {
    tkv_status st = TKV_OK;
    int t;
    for (t = 0; t < 20 && !st; t++, ++*steps) st = append_to_all_layers(kv, 0, 60);
    for (t = 0; t < 8 && !st; t++, ++*steps) st = append_to_all_layers(kv, 1, 40);
    return st;
}

/* A reservation holds memory for the first table too. */
TEST(every_allocation_of_a_reservation_fails_once) {
    tkv_config cfg = small_config(0);
    counting_allocator p;
    int i, n_refused = 0;
    cfg.host.allocator = counting_allocator_of(&p);
    for (i = 1; i < 100; i++) {
        tkv_cache *kv = create_cache(&cfg);
        tkv_status st;
        reset_models();
        CHECK_EQ(append_to_all_layers(kv, 0, 10), TKV_OK);
        p.fail_at = i;
        st = tkv_seq_reserve(kv, 0, 100);
        p.fail_at = 0;
        check_cache(kv);
        if (st) CHECK_EQ(st, TKV_ERR_NOMEM);
        if (st)
            CHECK_MSG(strstr(tkv_get_last_error(kv), "no memory to reserve") != NULL, "%s",
                      tkv_get_last_error(kv));
        n_refused += st != TKV_OK;
        CHECK_EQ(tkv_seq_reserve(kv, 0, 100), TKV_OK);
        p.fail_at = 1;
        CHECK_EQ(append_to_all_layers(kv, 0, 100), TKV_OK);
        p.fail_at = 0;
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
        if (!st) break;
    }
    CHECK(n_refused > 2);
}

TEST(every_allocation_fails_once) {
    int fail_at, n_failed = 0, is_closed = 1;
    for (fail_at = 1; is_closed; fail_at++) {
        tkv_config cfg = small_config(1000 * 1000);
        tkv_cache *kv = NULL;
        counting_allocator p;
        int steps = 0, s, l;
        tkv_status st;
        reset_models();
        cfg.host.allocator = counting_allocator_of(&p);
        p.fail_at = fail_at + 1;
        st = tkv_create(&cfg, &kv);
        if (!st) st = run_scenario(kv, &steps);
        is_closed = p.fail_at == 1; /* 1: fail_at allocations were made, and all others are refused */
        if (st) CHECK_EQ(st, TKV_ERR_NOMEM);
        if (!is_closed)
            CHECK_EQ(st, TKV_OK); /* otherwise it can be TKV_OK, too: a second table waits for memory */
        n_failed += st != TKV_OK;
        p.fail_at = 0;
        if (kv) {
            check_cache(kv);
            (void)check_all_reads(kv);
            for (s = 0; s < 2; s++)
                for (l = 0; l < LAYERS; l++) { /* further appends work */
                    int n_behind = model[s][0].len - model[s][l].len;
                    if (n_behind) CHECK_EQ(append_tokens(kv, s, l, n_behind), TKV_OK);
                }
            CHECK_EQ(append_to_all_layers(kv, 0, 30), TKV_OK);
            check_cache(kv);
            CHECK_LE(p.peak, 1000 * 1000);
            tkv_destroy(kv);
        }
        CHECK_EQ(p.held, 0);
    }
    printf("\n    %d allocations failed", n_failed);
    CHECK(n_failed > 10);
}

/* >>in place */
TEST(in_place_is_filled_completely) {
    size_t offset;
    for (offset = 0; offset < 64; offset += 21) {
        tkv_config cfg = small_config(1100 * 1000 + offset * 1000);
        guarded_buffer p;
        tkv_cache *kv;
        tkv_status st = TKV_OK;
        int t;
        cfg.limits.max_tokens = LONGEST;
        reset_models();
        kv = create_cache_in_place(&cfg, &p, offset);
        if (!kv) return;
        for (t = 0; t < LONGEST && !st; t++) {
            st = append_to_all_layers(kv, t / 500 % 2, 1);
            if (t % 200 == 0) check_cache(kv);
        }
        CHECK(t > 1500);
        check_cache(kv);
        (void)check_all_reads(kv);
        check_borders(&p);
        CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes + 1), TKV_OK);
        CHECK_LE(budget_of(kv).budget, cfg.budget.bytes);
        CHECK_LE((double)cfg.budget.bytes * 0.85, budget_of(kv).budget);
        CHECK_EQ(tkv_set_budget(kv, 0), TKV_ERR_ARG);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        reset_model(0);
        CHECK_EQ(append_to_all_layers(kv, 0, CHUNK), TKV_OK);
        check_cache(kv);
        check_borders(&p);
        tkv_destroy(kv);
        check_borders(&p);
        free(p.raw);
    }
}

/* >>quality feedback: simulated scores of the levels, on a real cache */
static const tkv_level four_levels[] = {{0, 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}, 0},
                                        {0, 0, {TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}, 0},
                                        {0, 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}, 0},
                                        {0, 0, {TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}, 0}};

/* Runs until the level has not changed for 120 scores. Returns the number of scores up to the last change. */
static int run_until_stable(tkv_cache *kv, tkv_feedback *f, const float *loss, int *changes, int *hot) {
    int n, n_unchanged = 0, last_change = 0;
    *changes = 0;
    for (n = 0; n < 700 && n_unchanged < 120; n++) {
        const tkv_budget_info b = budget_of(kv);
        tkv_advice a;
        const float score = 1.0f - loss[b.level] + 0.004f * ((float)tkv_rng_uniform(&rng) - 0.5f);
        CHECK_EQ(tkv_observe_score(f, score), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, f, &a), TKV_OK);
        CHECK_EQ(a.level, budget_of(kv).level);
        *hot = a.hot_tokens;
        n_unchanged++;
        if (a.level == b.level) continue;
        ++*changes;
        n_unchanged = 0;
        last_change = n + 1;
    }
    return last_change;
}

TEST(feedback_changes_the_level) {
    static const float easy[] = {.002f, .004f, .008f, .015f}, hard[] = {.004f, .02f, .06f, .2f};
    tkv_config cfg = small_config(0);
    tkv_feedback f;
    tkv_cache *kv;
    tkv_format_pair pair = {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT};
    int changes, scores, hot = 0;
    cfg.budget.ladder = four_levels;
    cfg.budget.n_levels = COUNT(four_levels);
    cfg.budget.pressure.min_level = 0;
    reset_models();
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK); /* the target score is .97 */
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_set_level(kv, 3), TKV_OK);
    scores = run_until_stable(kv, &f, hard, &changes, &hot);
    printf("\n    hard: level %d after %d scores, %d changes", budget_of(kv).level, scores, changes);
    CHECK_EQ(budget_of(kv).level, 1);
    CHECK_LE(scores, 100);
    CHECK_EQ(changes, 2);
    CHECK_EQ(get_tier_formats(kv, 0, TKV_TIER_ARCHIVE, &pair), TKV_OK);
    CHECK_EQ(pair.k, TKV_A30);
    CHECK(hot > 64);
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
    scores = run_until_stable(kv, &f, easy, &changes, &hot);
    printf("; easy: level %d after %d scores", budget_of(kv).level, scores);
    CHECK(budget_of(kv).level > 1);
    check_cache(kv);
    (void)check_all_reads(kv);
    CHECK_EQ(tkv_adapt_plan(kv, NULL, NULL), TKV_ERR_ARG);
    tkv_destroy(kv);
    /* under a budget, feedback does not change the level */
    cfg = small_config(480 * 1000);
    reset_models();
    kv = create_cache(&cfg);
    for (scores = 0; scores < 1200; scores++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
    {
        const int level = budget_of(kv).level;
        tkv_advice advice;
        CHECK(level > 1);
        for (scores = 0; scores < 60; scores++) {
            CHECK_EQ(tkv_observe_score(&f, .5f), TKV_OK);
            CHECK_EQ(tkv_adapt_plan(kv, &f, &advice), TKV_OK);
        }
        CHECK_EQ(budget_of(kv).level, level);
        CHECK(advice.hot_tokens > 64);
        CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
        for (scores = 0; scores < 60; scores++) {
            CHECK_EQ(tkv_observe_score(&f, 1.0f), TKV_OK);
            CHECK_EQ(tkv_adapt_plan(kv, &f, NULL), TKV_OK);
        }
        CHECK_EQ(budget_of(kv).level, level);
    }
    check_cache(kv);
    tkv_destroy(kv);
}

/* hot_tokens of a plan are those of its first level that codes tokens. Without one, or at their largest, they stay. The
 * level stays within cfg.budget.pressure, whatever the limits of the controller. */
TEST(advice_on_the_ends_of_hot_tokens) {
    static const tkv_level exact_first[] = {{TKV_UNLIMITED, 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}, 0},
                                            {200, 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}, 0}};
    tkv_layer_config layers[LAYERS];
    tkv_feedback_config limits;
    int way, n;
    memset(&limits, 0, sizeof limits);
    memset(layers, 0, sizeof layers);
    limits.max_hot = (1 << 30) - 1;
    layers[1].share_kv = 1;
    for (way = 0; way < 6; way++) {
        tkv_config cfg = small_config(0);
        tkv_advice advice;
        tkv_feedback f;
        tkv_cache *kv;
        cfg.layers = layers;
        cfg.tiers.hot_tokens = way == 0 ? TKV_UNLIMITED : (1 << 30) - 2;
        if (way > 1) {
            cfg.budget.ladder = exact_first;
            cfg.budget.n_levels = COUNT(exact_first);
            cfg.budget.pressure.min_level = way >= 4;
        }
        if (way == 5) layers[0].hot_tokens = layers[2].hot_tokens = TKV_UNLIMITED;
        kv = create_cache(&cfg);
        CHECK_EQ(tkv_init_feedback(&f, &limits, NULL, 0), TKV_OK);
        for (n = 0; n < 16; n++) CHECK_EQ(tkv_observe_score(&f, way == 3 ? 1.0f : .5f), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, &f, &advice), TKV_OK);
        CHECK_STR(tkv_get_last_error(kv), "");
        if (way == 0 || way == 5) CHECK_EQ(advice.hot_tokens, 0); /* all levels are exact */
        if (way == 1) CHECK_EQ(advice.hot_tokens, (1 << 30) - 2);
        if (way == 2) CHECK_EQ(advice.hot_tokens, 240);
        if (way == 3) CHECK_EQ(advice.hot_tokens, 180);
        if (way == 4) CHECK_EQ(advice.hot_tokens, 240);
        CHECK_EQ(advice.level, way >= 3);
        CHECK_EQ(advice.step, way == 3);
        CHECK_EQ(budget_of(kv).level, way >= 3);
        for (n = 0; n < 30; n++) CHECK_EQ(tkv_observe_score(&f, way == 3 ? 1.0f : .5f), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, &f, &advice), TKV_OK);
        CHECK_EQ(advice.step, 0);
        CHECK_EQ(advice.level, way >= 3);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

/* In place the memory is that of the plan, so advice on hot_tokens needs a budget. */
TEST(advice_in_place) {
    int has_budget, n;
    for (has_budget = 0; has_budget < 2; has_budget++) {
        tkv_config cfg = small_config(has_budget ? 1 << 20 : 0);
        guarded_buffer memory;
        tkv_advice advice;
        tkv_feedback f;
        tkv_cache *kv;
        cfg.limits.max_tokens = 300;
        kv = create_cache_in_place(&cfg, &memory, 0);
        CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
        for (n = 0; n < 16; n++) CHECK_EQ(tkv_observe_score(&f, .5f), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, &f, &advice), TKV_OK);
        CHECK_EQ(advice.hot_tokens > 64, has_budget);
        CHECK_EQ(advice.step, 0);
        check_cache(kv);
        tkv_destroy(kv);
        check_borders(&memory);
        free(memory.raw);
    }
}

TEST(calls_without_a_cache) {
    tkv_config cfg = small_config(0);
    tkv_cache *kv = create_cache(&cfg);
    tkv_budget_info info;
    tkv_feedback f;
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
    CHECK_EQ(tkv_get_budget(NULL, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_budget(kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_set_budget(NULL, 1 << 20), TKV_ERR_ARG);
    CHECK_EQ(tkv_set_level(NULL, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_set_hot_tokens(NULL, 64), TKV_ERR_ARG);
    CHECK_EQ(tkv_report_pressure(NULL, .5f), TKV_ERR_ARG);
    CHECK_EQ(tkv_report_pressure(kv, tkv_test_float(0x7fc00000u)), TKV_ERR_ARG);
    CHECK_EQ(tkv_adapt_plan(NULL, &f, NULL), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* >>cfg.budget.adapt: a ladder around the plan */
TEST(the_default_ladder_stands_around_the_plan) {
    static const struct {
        const char *preset;
        int n_levels, level;
    } cases[] = {{"quality", 4, 0}, {"balanced", 4, 1}, {"compact", 4, 2}, {"extreme", 4, 3}, {"kivi", 5, 2}};
    tkv_format_pair last = {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, own, pair;
    int i, level;
    for (i = 0; i < COUNT(cases); i++) {
        tkv_config cfg = small_config(0);
        tkv_cache *kv;
        double bytes = 1e9;
        tkv_codec codec;
        memset(&codec, 0, sizeof codec);
        CHECK_EQ(tkv_apply_preset(&cfg, cases[i].preset), TKV_OK);
        own = cfg.tiers.archive;
        cfg.budget.adapt = 1;
        kv = create_cache(&cfg);
        CHECK_EQ(budget_of(kv).n_levels, cases[i].n_levels);
        CHECK_EQ(budget_of(kv).level, cases[i].level);
        CHECK_EQ(budget_of(kv).pressure.level, cases[i].level);
        CHECK_EQ(get_tier_formats(kv, 0, TKV_TIER_ARCHIVE, &pair), TKV_OK);
        CHECK(pair.k == own.k && pair.v == own.v);
        for (level = 0; level < cases[i].n_levels; level++) { /* bytes fall from level to level */
            double now;
            CHECK_EQ(tkv_set_level(kv, level), TKV_OK);
            CHECK_EQ(get_tier_formats(kv, 0, TKV_TIER_ARCHIVE, &pair), TKV_OK);
            codec.head_dim = DIM;
            codec.format = pair.k;
            codec.side = TKV_K;
            now = (double)tkv_get_block_bytes(&codec);
            codec.format = pair.v;
            codec.side = TKV_V;
            now += (double)tkv_get_block_bytes(&codec);
            CHECK(now < bytes && (pair.k != last.k || pair.v != last.v));
            bytes = now;
            last = pair;
        }
        CHECK_EQ(tkv_set_level(kv, cases[i].n_levels), TKV_ERR_ARG);
        tkv_destroy(kv);
    }
    { /* the bounds of the pressure hold */
        tkv_config cfg = small_config(0);
        tkv_cache *kv;
        cfg.budget.adapt = 1;
        cfg.budget.pressure.min_level = 2;
        kv = create_cache(&cfg);
        CHECK_EQ(budget_of(kv).level, 2);
        tkv_destroy(kv);
    }
}

/* Until the level moves, tokens have the bytes of a cache without the ladder. */
TEST(the_default_ladder_changes_no_byte) {
    enum { N = 1500 };
    static float plain[2][N * ROW];
    tkv_config cfg = small_config(0);
    tkv_memory_info m[2];
    tkv_advice advice;
    tkv_feedback f;
    tkv_cache *kv;
    int with, t, n;
    for (with = 0; with < 2; with++) {
        reset_models();
        rng = tkv_rng_seed(5);
        cfg.budget.adapt = with;
        kv = create_cache(&cfg);
        for (t = 0; t < N; t++) CHECK_EQ(append_to_all_layers(kv, 0, 1), TKV_OK);
        CHECK_EQ(tkv_read(kv, 0, 1, 0, N, k_out, v_out), TKV_OK);
        if (!with) memcpy(plain[0], k_out, sizeof plain[0]), memcpy(plain[1], v_out, sizeof plain[1]);
        CHECK_MEM(k_out, plain[0], sizeof plain[0]);
        CHECK_MEM(v_out, plain[1], sizeof plain[1]);
        CHECK_EQ(tkv_get_memory(kv, &m[with]), TKV_OK);
        if (with)
            printf("\n    %zu bytes more for four levels of %d layers", m[1].total - m[0].total, LAYERS);
        if (with) break;
        tkv_destroy(kv);
    }
    CHECK_LE(m[1].tables, m[0].tables + 40000);
    /* tkv_adapt_plan moves the bits of later tokens, without a ladder of the caller's */
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
    for (n = 0; n < 100 && budget_of(kv).level < 3; n++) {
        CHECK_EQ(tkv_observe_score(&f, 1.0f), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, &f, &advice), TKV_OK);
    }
    CHECK_EQ(budget_of(kv).level, 3);
    for (n = 0; n < 100 && budget_of(kv).level > 0; n++) {
        CHECK_EQ(tkv_observe_score(&f, .5f), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, &f, &advice), TKV_OK);
    }
    CHECK_EQ(budget_of(kv).level, 0);
    check_cache(kv);
    tkv_destroy(kv);
}

/* In place the memory is that of the plan: the level stays. */
TEST(in_place_the_level_stays) {
    tkv_config cfg = small_config(0);
    tkv_feedback f;
    char reason[200];
    size_t bytes = 0;
    tkv_cache *kv;
    void *memory;
    int n;
    cfg.limits.max_tokens = 600;
    cfg.budget.adapt = 1; /* it would do nothing */
    CHECK_EQ(tkv_create_in_place(&cfg, &f, sizeof f, &kv, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, "budget.adapt is 1; it must be 0 in place: there the plan is fixed");
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_ERR_CONFIG);
    cfg.budget.adapt = 0;
    cfg.budget.ladder = four_levels;
    cfg.budget.n_levels = COUNT(four_levels);
    cfg.budget.pressure.min_level = 1;
    cfg.meter.heads = 1;
    cfg.meter.target = .5f;
    CHECK_EQ(tkv_create_in_place(&cfg, &f, sizeof f, &kv, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, "meter.target is 0.5; it must be 0 in place: there the plan is fixed");
    cfg.meter.target = 0.0f;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    memory = malloc(bytes);
    REQUIRE(memory != NULL);
    CHECK_EQ(tkv_create_in_place(&cfg, memory, bytes, &kv, NULL, 0), TKV_OK);
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
    for (n = 0; n < 40; n++) {
        CHECK_EQ(tkv_observe_score(&f, 1.0f), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, &f, NULL), TKV_OK);
    }
    CHECK_EQ(budget_of(kv).level, 1);
    CHECK_EQ(tkv_set_level(kv, 2), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "in place and without a budget the plan is fixed");
    CHECK_EQ(tkv_set_hot_tokens(kv, 100), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "in place and without a budget lengths are fixed");
    CHECK_EQ(budget_of(kv).level, 1);
    tkv_destroy(kv);
    free(memory);
}

/* A budget that begins again needs pages for recoding. Without memory, or if it is too small, there is none as before. */
TEST(a_budget_that_cannot_begin_again) {
    tkv_config cfg = small_config(900 * 1000);
    counting_allocator p;
    tkv_cache *kv;
    int n;
    cfg.host.allocator = counting_allocator_of(&p);
    reset_models();
    kv = create_cache(&cfg);
    for (n = 0; n < 20; n++) CHECK_EQ(append_to_all_layers(kv, 0, 50), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, 0), TKV_OK);
    for (n = 0; n < 5; n++) CHECK_EQ(append_to_all_layers(kv, 0, 50), TKV_OK);
    p.fail_at = 1;
    CHECK_EQ(tkv_set_budget(kv, 900 * 1000), TKV_ERR_NOMEM);
    CHECK_STR(tkv_get_last_error(kv), "the allocator gave no memory for recoding");
    p.fail_at = 0;
    CHECK_EQ(budget_of(kv).budget, 0);
    check_cache(kv);
    CHECK_EQ(tkv_set_budget(kv, 200 * 1000), TKV_ERR_BUDGET);
    CHECK_EQ(budget_of(kv).budget, 0);
    check_cache(kv);
    for (n = 0; n < 5; n++) CHECK_EQ(append_to_all_layers(kv, 0, 50), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, 900 * 1000), TKV_OK);
    CHECK_LE(p.held, 900 * 1000);
    check_cache(kv);
    (void)check_all_reads(kv);
    tkv_destroy(kv);
}

/* >>cfg.meter.target: the cache follows its own meter */
static int level_at_target(float target, int *n_changes) {
    static float q[HEADS * DIM], out[HEADS * DIM];
    tkv_config cfg = small_config(0);
    tkv_cache *kv;
    int t, l, level;
    reset_models();
    rng = tkv_rng_seed(6);
    cfg.budget.adapt = 1;
    cfg.meter.heads = 6;
    cfg.meter.every = 1;
    cfg.meter.target = target;
    kv = create_cache(&cfg);
    *n_changes = 0;
    for (t = 0; t < 1200; t++) {
        level = budget_of(kv).level;
        for (l = 0; l < LAYERS; l++) {
            CHECK_EQ(append_tokens(kv, 0, l, 1), TKV_OK);
            tkv_rng_fill(&rng, q, HEADS * DIM, 1.0);
            CHECK_EQ(tkv_attend(kv, 0, l, q, 1, out), TKV_OK);
        }
        *n_changes += budget_of(kv).level != level;
        if (t == 900) CHECK_EQ(tkv_reset_quality(kv), TKV_OK); /* the caller's own reading */
    }
    level = budget_of(kv).level;
    check_cache(kv);
    tkv_destroy(kv);
    return level;
}

TEST(the_level_follows_the_meter) {
    int changes[3], level[3];
    if (tkv_test_quick()) SKIP("slow under emulators");
    level[0] = level_at_target(.9999f, &changes[0]);
    level[1] = level_at_target(.5f, &changes[1]);
    level[2] = level_at_target(0.0f, &changes[2]);
    printf("\n    target .9999: level %d; .5: level %d", level[0], level[1]);
    CHECK(level[0] == 0 && changes[0] == 1);
    CHECK(level[1] == 3 && changes[1] == 2);
    CHECK(level[2] == 1 && changes[2] == 0);
}

/* >>wrong configs */
TEST(wrong_configs_of_adapting) {
    static const struct {
        int adapt, has_ladder, heads;
        size_t budget;
        float target;
        const char *sentence;
    } cases[] = {
        {2, 0, 0, 0, 0, "budget.adapt is 2; it must be 0 or 1"},
        {1, 0, 0, 4000 * 1000, 0, "budget.adapt is 1; it must be 0 with budget.bytes"},
        {1, 1, 0, 0, 0, "budget.adapt is 1; it must be 0 with a ladder"},
        {0, 0, 0, 0, .5f, "meter.target is 0.5; it must be 0 without meter.heads"},
        {0, 0, 1, 0, 1.0f, "meter.target is 1; it must be .01 to .9999"},
        {0, 0, 1, 0, -.5f, "meter.target is -0.5; it must be .01 to .9999"},
        {0, 0, 1, 0, .5f, "meter.target is 0.5; it needs levels to choose from: budget.adapt, or a ladder"},
        {0, 1, 1, 4000 * 1000, .5f, "meter.target is 0.5; it must be 0 with budget.bytes"},
        {1, 0, 1, 0, .5f, ""},
        {0, 1, 1, 0, .5f, ""}};
    char reason[200];
    int i;
    for (i = 0; i < COUNT(cases); i++) {
        tkv_config cfg = small_config(cases[i].budget);
        cfg.budget.adapt = cases[i].adapt;
        cfg.budget.ladder = cases[i].has_ladder ? four_levels : NULL;
        cfg.budget.n_levels = cases[i].has_ladder ? COUNT(four_levels) : 0;
        cfg.meter.heads = cases[i].heads;
        cfg.meter.target = cases[i].target;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason),
                 cases[i].sentence[0] ? TKV_ERR_CONFIG : TKV_OK);
        CHECK_MSG(strncmp(reason, cases[i].sentence, strlen(cases[i].sentence)) == 0, "%s", reason);
    }
}

/* Levels go from loose to tight. One that takes more bytes than the level before it is refused, with and without a
 * budget. Lengths may choose among levels in another order, but quality may not: poor quality would lead to fewer bits. */
TEST(levels_that_are_in_no_order) {
    static const struct {
        tkv_level level[3];
        int max_tokens, window;
        const char *sentence;
    } cases[] = {
        {{{0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0},
          {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI4, TKV_KIVI4}, 0},
          {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}},
         0,
         0,
         "budget.ladder[1] takes more bytes than the level before it; levels must go from loose to tight"},
        {{{0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI4, TKV_KIVI4}, 0},
          {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0},
          {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI3}, 0}},
         0,
         0,
         "budget.ladder[2] takes more bytes"},
        /* the same archive, and a larger warm tier or more exact tokens */
        {{{0, 64, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0},
          {0, 128, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0},
          {0, 64, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}},
         0,
         0,
         "budget.ladder[1] takes more bytes"},
        {{{64, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0},
          {64, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0},
          {TKV_UNLIMITED, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}},
         0,
         0,
         "budget.ladder[2] takes more bytes"},
        /* more exact tokens and a tighter archive: in order for long sequences, but not for short ones */
        {{{64, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI3, TKV_KIVI3}, 0},
          {64, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI3, TKV_KIVI3}, 0},
          {640, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}},
         0,
         0,
         ""},
        {{{64, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI3, TKV_KIVI3}, 0},
          {64, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI3, TKV_KIVI3}, 0},
          {640, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}},
         1000,
         0,
         "budget.ladder[2] takes more bytes"},
        {{{64, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI3, TKV_KIVI3}, 0},
          {64, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI3, TKV_KIVI3}, 0},
          {640, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0}},
         0,
         1000,
         "budget.ladder[2] takes more bytes"}};
    char reason[200];
    int i, n;
    for (i = 0; i < COUNT(cases); i++)
        for (n = 0; n < 2; n++) {
            tkv_config cfg = small_config(n ? 4000 * 1000 : 0);
            cfg.tiers.hot_tokens = cfg.tiers.warm_tokens = 0;
            cfg.budget.ladder = cases[i].level;
            cfg.budget.n_levels = 3;
            cfg.limits.max_tokens = cases[i].max_tokens;
            cfg.model.window = cases[i].window;
            CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason),
                     cases[i].sentence[0] ? TKV_ERR_CONFIG : TKV_OK);
            CHECK_MSG(strncmp(reason, cases[i].sentence, strlen(cases[i].sentence)) == 0, "%d: %s", i,
                      reason);
        }
}

TEST(quality_chooses_no_level_by_length) {
    static const char *const presets[] = {"by-length", "growing"};
    int i, n;
    for (i = 0; i < COUNT(presets); i++) {
        tkv_config cfg = small_config(0);
        char reason[200];
        tkv_feedback f;
        tkv_advice advice;
        tkv_cache *kv;
        cfg.model.rope.dim = DIM;
        CHECK_EQ(tkv_apply_preset(&cfg, presets[i]), TKV_OK);
        cfg.meter.heads = 1;
        cfg.meter.target = .9f;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), i ? TKV_OK : TKV_ERR_CONFIG);
        CHECK_STR(
            reason,
            i ? ""
              : "meter.target is 0.9; it must be 0 where levels by length do not go from loose to tight");
        cfg.meter.target = 0.0f;
        kv = create_cache(&cfg);
        CHECK_EQ(tkv_set_level(kv, 2), TKV_OK);
        CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
        for (n = 0; n < 40; n++) CHECK_EQ(tkv_observe_score(&f, .5f), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, &f, &advice), i ? TKV_OK : TKV_ERR_UNSUPPORTED);
        CHECK_EQ(budget_of(kv).level, i ? 1 : 2); /* "by-length" would have gone from 3.5 bits to 2.5 */
        CHECK_STR(tkv_get_last_error(kv), i ? ""
                                            : "quality cannot choose among levels that do not go from loose "
                                              "to tight: see level 2 of the ladder");
        tkv_destroy(kv);
    }
}

TEST(config_names_the_wrong_field) {
    static const struct {
        int which;
        const char *field;
    } cases[] = {
        {0, "n_levels"},        {1, "n_levels"},        {2, "ladder[1].warm.k"}, {3, "ladder[0].hot_tokens"},
        {4, "budget.pressure"}, {5, "budget.pressure"}, {6, "budget.pressure"}};
    tkv_level two_levels[2];
    int i, n;
    size_t bytes;
    tkv_cache *kv = NULL;
    tkv_config cfg;
    for (i = 0; i < COUNT(cases); i++) {
        char reason[200];
        memset(two_levels, 0, sizeof two_levels);
        cfg = small_config(1000 * 1000);
        cfg.budget.ladder = two_levels;
        cfg.budget.n_levels = 2;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
        if (cases[i].which == 0) cfg.budget.ladder = NULL;
        if (cases[i].which == 1) cfg.budget.n_levels = TKV_MAX_LEVELS + 1;
        if (cases[i].which == 2) two_levels[1].warm.k = TKV_R20;
        if (cases[i].which == 3) two_levels[0].hot_tokens = -7;
        if (cases[i].which == 4) cfg.budget.pressure.max_level = 2;
        if (cases[i].which == 5) cfg.budget.pressure.alpha = 2.0f;
        if (cases[i].which == 6) cfg.budget.pressure.threshold[0] = tkv_test_float(0x7fc00000u);
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_MSG(strstr(reason, cases[i].field) != NULL, "%s", reason);
    }
    cfg = small_config(1000);
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_ERR_BUDGET);
    cfg.limits.max_tokens = 100;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_ERR_BUDGET);
    CHECK_EQ(tkv_estimate_context(&cfg, 1, &n), TKV_OK);
    CHECK_EQ(n, 0);
    cfg.budget.bytes = 0;
    CHECK_EQ(tkv_estimate_context(&cfg, 1, &n), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_budget(NULL, NULL), TKV_ERR_ARG);
}

/* Sequences that end before the age of the archive reach it under pressure. Their codes need tables as well: without
 * one, heads of 12 channels overlapped. */
/* >>the budgets that a sentence names: the least, of an empty cache, and one that is enough for 128 tokens of one
 * sequence, one at a time; with a policy for any number */
enum { LEAST_PLANS = 20, LEAST_LAYERS = 6 };

static void run_in_order(void *user, int n, tkv_task task, void *ctx) {
    (void)user;
    while (n-- > 0) task(ctx, n);
}

/* Plans of many kinds. layers, ladder: memory that the config points to. */
static tkv_config make_least_plan(int i, tkv_layer_config *layers, tkv_level *ladder) {
    tkv_config cfg =
        make_sized_config(1 + i % LEAST_LAYERS, 4, 1 + i % 2, 16 * (1 + i % 4), 1 + i % 3, 1 + 63 * (i % 2));
    memset(layers, 0, LEAST_LAYERS * sizeof *layers);
    memset(ladder, 0, 2 * sizeof *ladder);
    cfg.model.rope.dim = 16;
    switch (i) {
    case 1: cfg.host.parallel_for = run_in_order; break;
    case 2: CHECK_EQ(tkv_apply_preset(&cfg, "kvquant-3"), TKV_OK); break;
    case 3: cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2); break;
    case 4: cfg.meter.heads = 2; break;
    case 5:
        cfg.layers = layers;
        layers[1].window = 100;
        layers[2].no_cache = 1;
        layers[3].share_kv = 1;
        layers[4].n_kv_heads = 4;
        layers[5].head_dim = 16;
        break;
    case 6: cfg.limits.max_tokens = 100; break;
    case 7: cfg.tiers.sink_tokens = TKV_OFF; break;
    case 8: cfg.tiers.sink_tokens = 64; break;
    case 9: cfg.tiers.n_anchors = 40; break;
    case 10: CHECK_EQ(tkv_apply_preset(&cfg, "squat"), TKV_OK); break;
    case 11: cfg.tiers.hot = pair_of(TKV_F32, TKV_F32); break;
    case 12: cfg.tiers.archive = pair_of(TKV_SUBSPACE2, TKV_SUBSPACE2); break;
    case 13:
        cfg.budget.ladder = ladder;
        cfg.budget.n_levels = 2;
        ladder[0].warm = ladder[0].archive = pair_of(TKV_Q8, TKV_Q8);
        ladder[1].warm = ladder[1].archive = pair_of(TKV_INT4, TKV_FP4);
        break;
    case 14: cfg.budget.pressure.profile = TKV_PROFILE_FP16_ONLY; break;
    case 15: cfg.importance.sample_every = 1; break;
    case 16: cfg.model.n_layers = 40, cfg.model.n_kv_heads = 1; break;
    case 17: cfg.limits.max_seqs = 50; break;
    case 18: cfg.tiers.hot_tokens = TKV_UNLIMITED; break;
    case 19: cfg.limits.max_tokens = 200; break;
    default: break;
    }
    return cfg;
}

/* The number that a sentence has behind `word`. */
static size_t number_behind(const char *sentence, const char *word) {
    const char *at = strstr(sentence, word);
    CHECK_MSG(at, "%s", sentence);
    return at ? (size_t)strtoull(at + strlen(word), NULL, 10) : 0;
}

static void check_named_budgets(int plan, tkv_evict_policy policy, int begins_with_least, int *n_refused) {
    tkv_layer_config layers[LEAST_LAYERS];
    tkv_level ladder[2];
    tkv_config cfg = make_least_plan(plan, layers, ladder);
    const int max_tokens = cfg.limits.max_tokens ? cfg.limits.max_tokens : 1 << 30;
    int promised = policy ? 256 : 128; /* at least */
    const int most = policy ? tkv_test_quick() ? 500 : 1500 : 4000;
    char reason[200], again[200];
    size_t least, enough, raised;
    counting_allocator p;
    tkv_cache *kv;
    int t, l, tries, refused = 0;
    cfg.evict.policy = policy;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.budget.bytes = 1000;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_BUDGET);
    CHECK_EQ(tkv_create_ex(&cfg, NULL, 0, &kv, again, sizeof again), TKV_ERR_BUDGET);
    CHECK_STR(reason, again);
    if (promised > max_tokens) promised = max_tokens;
    CHECK_LE(promised, number_behind(reason, "for the first "));
    promised = (int)number_behind(reason, "for the first ");
    CHECK(policy ? promised <= max_tokens : promised <= 128);
    least = number_behind(reason, "it must be at least ");
    enough = number_behind(reason, "for an empty cache; ");
    CHECK(least > 0 && least < enough);
    cfg.budget.bytes = least - 1;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_BUDGET);
    cfg.budget.bytes = raised = begins_with_least ? least : enough;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    kv = create_cache(&cfg);
    for (t = 0; t < most && t < max_tokens && refused < 3; t++)
        for (l = 0; l < cfg.model.n_layers; l++) {
            tkv_status st;
            if (cfg.layers && (cfg.layers[l].no_cache || cfg.layers[l].share_kv)) continue;
            st = tkv_append(kv, 0, l, k_in + t % 200 * 64, v_in + t % 190 * 64, 1);
            if (st) {
                CHECK_MSG(st == TKV_ERR_BUDGET && (begins_with_least || (!policy && t >= promised)),
                          "plan %d, policy %d: token %d, %s", plan, (int)policy, t, tkv_get_last_error(kv));
                refused++;
            }
            for (tries = 0; st == TKV_ERR_BUDGET && tries < 4; tries++) { /* it says what it needs at least */
                const size_t needed = number_behind(tkv_get_last_error(kv), "the call needs at least ");
                CHECK(needed > raised && needed <= enough + 100000);
                raised = needed;
                CHECK_EQ(tkv_set_budget(kv, raised), TKV_OK);
                st = tkv_append(kv, 0, l, k_in + t % 200 * 64, v_in + t % 190 * 64, 1);
            }
            CHECK_MSG(!st, "plan %d: token %d, %.0f bytes: %s", plan, t, (double)raised,
                      tkv_get_last_error(kv));
            CHECK(p.held <= raised);
        }
    *n_refused += refused;
    check_cache(kv);
    tkv_destroy(kv);
}

TEST(named_budgets_are_enough) {
    static const tkv_evict_policy policies[] = {TKV_EVICT_NONE, TKV_EVICT_SLIDING, TKV_EVICT_H2O};
    int plan, i, n_refused = 0;
    fill_inputs(HOPELESS);
    for (plan = 0; plan < LEAST_PLANS; plan++)
        for (i = 0; i < COUNT(policies); i++) {
            if (plan == 18)
                continue; /* under a budget the ladder codes, so hot_tokens without end is refused */
            check_named_budgets(plan, policies[i], 0, &n_refused);
            check_named_budgets(plan, policies[i], 1, &n_refused);
        }
    CHECK(n_refused > 150);
}

TEST(short_sequences_are_archived) {
    enum { N = 96, SMALL_ROW = KV_HEADS * 12 };
    tkv_config cfg = make_sized_config(2, KV_HEADS, KV_HEADS, 12, SEQS, N);
    tkv_cache *kv;
    tkv_layer_info info;
    int i, seq, layer, n_wrong = 0;
    cfg.limits.max_tokens = 4 * N;
    cfg.budget.bytes = 200000;
    kv = create_cache(&cfg);
    for (i = 0; i < SEQS * 4 * 2; i++) {
        fill_inputs(N);
        CHECK_EQ(tkv_append(kv, i / 8, i % 2, k_in, v_in, N), TKV_OK);
    }
    CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
    CHECK(info.blocks[TKV_TIER_ARCHIVE] > 0);
    check_cache(kv);
    for (seq = 0; seq < SEQS; seq++)
        for (layer = 0; layer < 2; layer++) {
            CHECK_EQ(tkv_read(kv, seq, layer, 0, 4 * N, k_out, v_out), TKV_OK);
            for (i = 0; i < 4 * N * SMALL_ROW; i++)
                n_wrong += fabs((double)k_out[i]) > 20.0 || fabs((double)v_out[i]) > 20.0;
        }
    CHECK_EQ(n_wrong, 0);
    tkv_destroy(kv);
}

/* A tier whose blocks would take as many bytes as exact ones codes nothing: they stay as they are, and are sound. */
TEST(a_tier_of_no_fewer_bytes) {
    tkv_config cfg = make_sized_config(1, 2, 2, 8, 1, 64);
    tkv_level level;
    tkv_cache *kv;
    tkv_layer_info info;
    int t;
    memset(&level, 0, sizeof level);
    level.warm = pair_of(TKV_BF16, TKV_F16);
    level.archive = pair_of(TKV_BF16, TKV_FP4);
    cfg.tiers.hot_tokens = 28;
    cfg.budget.ladder = &level;
    cfg.budget.n_levels = 1;
    cfg.budget.bytes = 200000;
    kv = create_cache(&cfg);
    fill_inputs(64);
    for (t = 0; t < 2000 && tkv_append(kv, 0, 0, k_in, v_in, 1) == TKV_OK; t++)
        if (t % 64 == 0) check_cache(kv);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.blocks[TKV_TIER_ARCHIVE] > 0);
    check_cache(kv);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    make_values();
    rng = tkv_rng_seed(11);
    RUN(a_small_budget_holds_150_tokens);
    RUN(growth_stays_within_the_budget);
    RUN(levels_rise_one_at_a_time);
    RUN(level_falls_when_all_fits);
    RUN(estimated_context_fits_with_windows);
    RUN(plans_change_during_reservations);
    RUN(refusal_keeps_the_last_append);
    RUN(steps_reach_the_estimated_context);
    RUN(last_append_stays_exact);
    RUN(profiles_and_ladders);
    RUN(the_level_follows_a_later_layer);
    RUN(steps_of_layers_of_all_kinds);
    RUN(the_level_follows_the_longest_sequence);
    RUN(a_level_by_length_waits_for_reservations);
    RUN(wrong_lengths_of_levels);
    RUN(min_level_holds_while_memory_is_free);
    RUN(budget_goes_down_and_up);
    RUN(coded_blocks_stay_coded);
    RUN(maintain_uses_idle_time);
    RUN(reported_pressure_raises_the_level);
    RUN(a_high_pressure_jumps_over_levels);
    RUN(levels_of_a_budget_have_tags);
    RUN(levels_of_any_ladder_have_tags);
    RUN(set_hot_tokens_and_level);
    RUN(steps_and_reservations);
    RUN(reserved_appends_keep_their_pages);
    RUN(every_allocation_of_a_reservation_fails_once);
    RUN(every_allocation_fails_once);
    RUN(in_place_is_filled_completely);
    RUN(feedback_changes_the_level);
    RUN(advice_on_the_ends_of_hot_tokens);
    RUN(advice_in_place);
    RUN(calls_without_a_cache);
    RUN(the_default_ladder_stands_around_the_plan);
    RUN(the_default_ladder_changes_no_byte);
    RUN(in_place_the_level_stays);
    RUN(a_budget_that_cannot_begin_again);
    RUN(the_level_follows_the_meter);
    RUN(wrong_configs_of_adapting);
    RUN(levels_that_are_in_no_order);
    RUN(quality_chooses_no_level_by_length);
    RUN(config_names_the_wrong_field);
    RUN(named_budgets_are_enough);
    RUN(a_tier_of_no_fewer_bytes);
    RUN(short_sequences_are_archived);
    return tkv_test_end();
}
