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
    CHUNK = 128
};

/* >>what was appended, to be read again */
typedef struct model_sequence {
    int len;
    float k[LONGEST][ROW], v[LONGEST][ROW];
} model_sequence;

static model_sequence told[SEQS][LAYERS];
static float k_in[SEQS * CHUNK * ROW], v_in[SEQS * CHUNK * ROW], k_out[LONGEST * ROW], v_out[LONGEST * ROW];
static tkv_rng rng;

static float halved(float x) { return float_of_f16(f16_of(x)); }

static void forget(int seq) {
    int l;
    for (l = 0; l < LAYERS; l++) told[seq][l].len = 0;
}

static void forget_all(void) {
    int s;
    for (s = 0; s < SEQS; s++) forget(s);
}

static void fresh(int n) {
    tkv_rng_fill(&rng, k_in, (size_t)(n * ROW), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * ROW), 1.0);
}

static void tell(int seq, int layer, int from, int n) {
    model_sequence *s = &told[seq][layer];
    int t, c;
    for (t = 0; t < n; t++, s->len++)
        for (c = 0; c < ROW; c++) {
            s->k[s->len][c] = halved(k_in[(from + t) * ROW + c]);
            s->v[s->len][c] = halved(v_in[(from + t) * ROW + c]);
        }
}

static tkv_status append(tkv_cache *kv, int seq, int layer, int n) {
    tkv_status st;
    if (told[seq][layer].len + n > LONGEST) return TKV_ERR_CAPACITY; /* the story's end */
    fresh(n);
    st = tkv_append(kv, seq, layer, k_in, v_in, n);
    if (!st) tell(seq, layer, 0, n);
    return st;
}

/* One token, or n, to all layers; the first status that is not ok. */
static tkv_status append_all(tkv_cache *kv, int seq, int n) {
    tkv_status st = TKV_OK;
    int l;
    for (l = 0; l < LAYERS && !st; l++) st = append(kv, seq, l, n);
    return st;
}

/* Reads all of a list: exact tokens are what was told, to the bit; the others resemble it. Returns those exact. */
static int reads_well(const tkv_cache *kv, int seq, int layer) {
    const model_sequence *s = &told[seq][layer];
    double err = 0.0, all = 0.0;
    int t, c, exact = 0, len = tkv_get_length(kv, seq, layer);
    CHECK_EQ(len, s->len);
    if (len != s->len || len == 0) return 0;
    CHECK_EQ(tkv_read((tkv_cache *)(uintptr_t)kv, seq, layer, 0, len, k_out, v_out), TKV_OK);
    for (t = 0; t < len; t++) {
        tkv_tier tier = TKV_TIER_HOT;
        int same = memcmp(k_out + t * ROW, s->k[t], sizeof s->k[t]) == 0 &&
                   memcmp(v_out + t * ROW, s->v[t], sizeof s->v[t]) == 0;
        exact += same;
        CHECK_EQ(tier_of(kv, seq, layer, t, &tier), TKV_OK);
        if (tier == TKV_TIER_HOT)
            CHECK_MSG(same, "sequence %d, layer %d: exact token %d changed", seq, layer, t);
        for (c = 0; c < ROW; c++) {
            double a = (double)k_out[t * ROW + c] - (double)s->k[t][c];
            double b = (double)v_out[t * ROW + c] - (double)s->v[t][c];
            err += a * a + b * b;
            all += (double)s->k[t][c] * (double)s->k[t][c] + (double)s->v[t][c] * (double)s->v[t][c];
        }
    }
    CHECK_MSG(err <= 0.6 * all, "sequence %d, layer %d: errors are %.2f of the values", seq, layer,
              err / all);
    return exact;
}

static int all_read_well(const tkv_cache *kv) {
    int s, l, exact = 0;
    for (s = 0; s < SEQS; s++)
        for (l = 0; l < LAYERS; l++) exact += reads_well(kv, s, l);
    return exact;
}

static tkv_config small_config(size_t budget) {
    tkv_config cfg = shape_of(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    cfg.budget.bytes = budget;
    return cfg;
}

/* >>growth */
static void check_growth(size_t budget, int chunk) {
    tkv_config cfg = small_config(budget);
    tkv_cache *kv;
    counting_allocator p;
    int l = 0, level = 0, most_level = 0, tokens = 0, context, len[LAYERS];
    tkv_status st = TKV_OK;
    forget_all();
    cfg.host.allocator = counting_allocator_of(&p);
    kv = make(&cfg);
    CHECK_EQ(tkv_estimate_context(&cfg, 1, &context), TKV_OK);
    while (!st && tokens + chunk <= LONGEST) {
        for (l = 0; l < LAYERS && !st; l++) {
            st = append(kv, 0, l, chunk);
            CHECK_LE(p.most, budget);
        }
        if (!st) tokens += chunk;
        CHECK_LE(level, budget_of(kv).level); /* never looser while it grows */
        level = budget_of(kv).level;
        if (level > most_level) {
            most_level = level;
            sound(kv);
        }
    }
    sound(kv);
    (void)all_read_well(kv);
    printf("\n    %lu bytes, chunks of %d: %d tokens of %d, level %d", (unsigned long)budget, chunk, tokens,
           context, most_level);
    if (st) { /* full at last: everything as it was, and again and again */
        const tkv_budget_info b = budget_of(kv);
        CHECK_EQ(st, TKV_ERR_BUDGET);
        CHECK_EQ(level, b.n_levels - 1);
        CHECK(strstr(tkv_get_last_error(kv), "budget") != NULL);
        if (chunk == 1) CHECK_LE(context, tokens + 1);
        if (chunk == 1)
            CHECK_LE(tokens, context + context / 10 + BLOCK); /* it counts on the worst growth of the index */
        for (l = 0; l < LAYERS; l++) len[l] = tkv_get_length(kv, 0, l);
        CHECK_EQ(append(kv, 0, LAYERS - 1, len[0] - len[LAYERS - 1] + chunk > chunk ? chunk : chunk),
                 TKV_ERR_BUDGET);
        for (l = 0; l < LAYERS; l++) CHECK_EQ(tkv_get_length(kv, 0, l), len[l]);
        CHECK_EQ(budget_of(kv).refused, b.refused + 1);
        (void)all_read_well(kv);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        forget(0);
        sound(kv);
        CHECK_EQ(append_all(kv, 0, chunk), TKV_OK);
        (void)all_read_well(kv);
        CHECK_LE(p.most, budget);
    }
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

TEST(growth_stays_within) {
    check_growth(1300 * 1000, 1);
    check_growth(1000 * 1000, 7);
    check_growth(900 * 1000, 64);
    check_growth(1100 * 1000, CHUNK);
    check_growth(500 * 1000, 1);
    check_growth(500 * 1000, 64);
}

/* Exact until a level is needed; then a level at a time. white_reclaim.c tests that the oldest come first. */
TEST(oldest_first) {
    tkv_config cfg = small_config(800 * 1000);
    tkv_cache *kv = make(&cfg);
    int t, level = 0;
    forget_all();
    for (t = 0; t < 3200; t++) {
        tkv_budget_info b;
        CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
        b = budget_of(kv);
        CHECK_LE(b.level, level + 1); /* one at a time */
        if (level == 0 && b.level == 0 && t % 100 == 0) CHECK_EQ(reads_well(kv, 0, 1), t + 1);
        if (level == 0 && b.level == 1) CHECK_LE(0.79 * 800e3, b.used);
        level = b.level;
    }
    CHECK(level >= 3);
    sound(kv);
    tkv_destroy(kv);
}

/* >>events and levels */
typedef struct event_log {
    int n, level[64], refused, tables, wrong;
} event_log;

static void note(void *user, const tkv_event *e) {
    event_log *d = (event_log *)user;
    if (!e->text || !e->text[0]) d->wrong++;
    if (e->kind == TKV_EVENT_BUDGET) d->refused++;
    if (e->kind == TKV_EVENT_TABLE) d->tables++;
    if (e->kind != TKV_EVENT_LEVEL || d->n == 64) return;
    if (e->from != (d->n ? d->level[d->n - 1] : 0)) d->wrong++;
    d->level[d->n++] = e->to;
}

/* Relaxes when sequences end, not before all would fit; then tightens again. */
TEST(relaxes_when_all_fits) {
    tkv_config cfg = small_config(800 * 1000);
    event_log d;
    tkv_cache *kv;
    int i, t, turns = 0;
    memset(&d, 0, sizeof d);
    forget_all();
    cfg.host.on_event = note;
    cfg.host.event_user = &d;
    kv = make(&cfg);
    for (t = 0; t < 3000; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    for (i = 0; i < d.n; i++) CHECK_EQ(d.level[i], i + 1); /* constant growth: never back */
    CHECK_LE(3, d.n);
    for (t = 0; t < 300; t++) CHECK_EQ(append_all(kv, 1, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    forget(0);
    for (t = 0; t < 200; t++) CHECK_EQ(append_all(kv, 1, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 0);
    CHECK_EQ(d.wrong, 0);
    CHECK_LE(LAYERS, d.tables);
    for (t = 0; t < 1500; t++) CHECK_EQ(append_all(kv, 2, 1), TKV_OK);
    CHECK(budget_of(kv).level > 1);
    for (i = 1; i + 1 < d.n; i++) turns += (d.level[i + 1] > d.level[i]) != (d.level[i] > d.level[i - 1]);
    CHECK_LE(turns, 2);
    CHECK_EQ(d.wrong, 0);
    CHECK_EQ(budget_of(kv).pressure.tightened - budget_of(kv).pressure.relaxed,
             (uint64_t)budget_of(kv).level);
    sound(kv);
    (void)all_read_well(kv);
    tkv_destroy(kv);
}

/* Blocks that leave every window are not counted on twice, and the largest context is one that all smaller ones
 * fit. */
TEST(windows_fit_too) {
    int budget;
    for (budget = 440; budget < 700; budget += 20) {
        tkv_config cfg = small_config((size_t)budget * 1000);
        tkv_cache *kv;
        tkv_status st = TKV_OK;
        int context = -1, t;
        forget_all();
        cfg.model.window = 1024;
        cfg.limits.max_tokens = 20000;
        CHECK_EQ(tkv_estimate_context(&cfg, 1, &context), TKV_OK);
        kv = make(&cfg);
        for (t = 0; t < 3000 && !st; t++) {
            int l;
            fresh(1);
            for (l = 0; l < LAYERS && !st; l++) st = tkv_append(kv, 0, l, k_in, v_in, 1);
        }
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
        if (st) CHECK_LE(context, t - 1);
        sound(kv);
        tkv_destroy(kv);
    }
}

/* A reservation ends when its plan does: nothing it counted on is there twice. */
TEST(plans_change_under_reservations) {
    int how, t;
    for (how = 0; how < 3; how++) {
        tkv_config cfg = small_config(how == 2 ? 4000 * 1000 : 0);
        tkv_cache *kv;
        static const tkv_level two[] = {{2000, 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}},
                                        {1, 64, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}}};
        cfg.tiers.hot_tokens = how == 2 ? 64 : 2000;
        cfg.tiers.warm_tokens = 64;
        cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        if (how == 1) cfg.budget.ladder = two, cfg.budget.n_levels = 2;
        forget_all();
        kv = make(&cfg);
        for (t = 0; t < 900; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
        CHECK_EQ(tkv_seq_reserve(kv, 0, 100), TKV_OK);
        for (t = 0; t < 99; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
        if (how == 0) CHECK_EQ(tkv_set_hot_tokens(kv, 1), TKV_OK);
        if (how == 1) CHECK_EQ(tkv_set_level(kv, 1), TKV_OK);
        if (how == 2) {
            CHECK_EQ(tkv_set_level(kv, 3), TKV_OK);
            CHECK_EQ(tkv_set_budget(kv, 0), TKV_OK);
        }
        for (t = 0; t < 10; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
        sound(kv);
        (void)all_read_well(kv);
        tkv_destroy(kv);
    }
}

/* Refused, everything is as it was; and the last append stays exact, also when a batch has a row of no tokens. */
TEST(refused_keeps_the_last_append) {
    tkv_config cfg = small_config(800 * 1000);
    tkv_cache *kv;
    tkv_append_params p;
    tkv_rows rows[2];
    tkv_status st = TKV_OK;
    int l, t;
    cfg.limits.max_append = 384;
    forget_all();
    kv = make(&cfg);
    memset(&p, 0, sizeof p);
    p.k = k_in;
    p.v = v_in;
    for (l = 0; l < LAYERS; l++) CHECK_EQ(append(kv, 0, l, 384), TKV_OK);
    for (t = 0; t < LONGEST && !st; t++) st = append_all(kv, 1, 1);
    CHECK_EQ(st, TKV_ERR_BUDGET);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(append(kv, 0, l, 384), TKV_ERR_BUDGET);
    rows[0].seq = 0;
    rows[0].n = 0;
    rows[1].seq = 2;
    rows[1].n = 1;
    p.batch = rows;
    p.n_batch = 2;
    (void)tkv_append_ex(kv, &p);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    for (t = 0, st = TKV_OK; t < 400 && !st; t++) st = append_all(kv, 1, 1);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(reads_well(kv, 0, l), 384);
    sound(kv);
    tkv_destroy(kv);
}

/* With steps and without, small budgets hold what tkv_estimate_context says, and levels do not go to and fro. */
TEST(steps_reach_as_far) {
    static const size_t budgets[] = {900 * 1000, 1024 * 1000, 1258 * 1000, 1433 * 1000};
    int i, steps, l, t;
    for (i = 0; i < COUNT(budgets); i++)
        for (steps = 0; steps < 2; steps++) {
            tkv_config cfg = small_config(budgets[i]);
            event_log d;
            tkv_cache *kv;
            tkv_status st = TKV_OK;
            int context = -1;
            memset(&d, 0, sizeof d);
            cfg.limits.max_seqs = 1;
            cfg.model.head_dim = 2 * DIM;
            cfg.host.on_event = note;
            cfg.host.event_user = &d;
            CHECK_EQ(tkv_estimate_context(&cfg, 1, &context), TKV_OK);
            kv = make(&cfg);
            for (t = 0; t < 4000 && !st; t++) {
                fresh(2);
                if (steps) st = tkv_seq_begin(kv, 0);
                for (l = 0; l < LAYERS && !st; l++) st = tkv_append(kv, 0, l, k_in, v_in, 1);
                if (steps && !st) st = tkv_seq_commit(kv, 0);
            }
            if (st) {
                CHECK_EQ(st, TKV_ERR_BUDGET);
                CHECK_LE(context, t - 1);
                CHECK_LE(t - 1, context + context / 10 + BLOCK);
            } else {
                CHECK_LE(4000, context);
            }
            for (l = 0; l < d.n; l++) CHECK_EQ(d.level[l], l + 1);
            CHECK_EQ(d.wrong, 0);
            if (steps) (void)tkv_seq_abort(kv, 0);
            sound(kv);
            tkv_destroy(kv);
        }
}

/* What came with the last append stays exact until the sequence's next one, whoever presses. */
TEST(last_append_is_exact) {
    tkv_config cfg = small_config(1000 * 1000);
    tkv_cache *kv = make(&cfg);
    int t, l, n;
    forget_all();
    for (l = 0; l < LAYERS; l++) CHECK_EQ(append(kv, 0, l, CHUNK), TKV_OK);
    for (t = 0; t < 1200; t++) CHECK_EQ(append_all(kv, 1, 1), TKV_OK);
    CHECK(budget_of(kv).level > 0);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(reads_well(kv, 0, l), CHUNK);
    for (l = 0; l < LAYERS; l++) CHECK_EQ(append(kv, 0, l, 100), TKV_OK);
    for (t = 0; t < 1500; t++) CHECK_EQ(append_all(kv, 1, 1), TKV_OK);
    for (l = 0, n = 0; l < LAYERS; l++) n += CHUNK + 100 - reads_well(kv, 0, l);
    CHECK(n > 0); /* of the first ones some are coded now */
    sound(kv);
    tkv_destroy(kv);
}

TEST(profiles_and_ladders) {
    static const tkv_level eight[] = {
        {TKV_UNLIMITED,
         0,
         {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
         {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}},
        {32, TKV_UNLIMITED, {TKV_FP8_E4M3, TKV_FP8_E4M3}, {TKV_FP8_E4M3, TKV_FP8_E4M3}},
        {32, 64, {TKV_FP8_E4M3, TKV_FP8_E4M3}, {TKV_KIVI2, TKV_KIVI2}}};
    tkv_config cfg = small_config(900 * 1000);
    tkv_layer_config layers[LAYERS];
    tkv_cache *kv;
    tkv_layer_info info;
    int t;
    tkv_status st = TKV_OK;
    forget_all();
    cfg.budget.pressure.profile = TKV_PROFILE_FP16_ONLY;
    kv = make(&cfg);
    for (t = 0; t < LONGEST && !st; t++) st = append_all(kv, 0, 1);
    CHECK_EQ(st, TKV_ERR_BUDGET);
    CHECK_EQ(budget_of(kv).demoted, 0);
    CHECK_EQ(all_read_well(kv), told[0][0].len + told[0][1].len + told[0][2].len);
    tkv_destroy(kv);
    /* the caller's ladder, and a layer that says something of itself */
    memset(layers, 0, sizeof layers);
    layers[1].hot_tokens = TKV_UNLIMITED;
    cfg = small_config(950 * 1000);
    cfg.budget.ladder = eight;
    cfg.budget.n_levels = COUNT(eight);
    cfg.layers = layers;
    forget_all();
    kv = make(&cfg);
    for (t = 0, st = TKV_OK; t < 1800 && !st; t++) st = append_all(kv, 0, 1);
    CHECK_EQ(st, TKV_OK);
    CHECK_EQ(budget_of(kv).level, 2);
    CHECK_EQ(reads_well(kv, 0, 1), told[0][1].len);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.tokens[TKV_TIER_ARCHIVE] > 500);
    sound(kv);
    tkv_destroy(kv);
    /* from the first threshold on, not from level 0 */
    cfg = small_config(1000 * 1000);
    cfg.budget.pressure.profile = TKV_PROFILE_AGGRESSIVE;
    forget_all();
    kv = make(&cfg);
    CHECK_EQ(budget_of(kv).level, 1);
    for (t = 0; t < 900; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK(budget_of(kv).recoded[1] > 0);
    CHECK_LE(budget_of(kv).pending, 3); /* above its threshold of a half, everything old is at 8 bits */
    tkv_destroy(kv);
}

/* At cfg.budget.pressure.min_level nothing that is old stays looser, however much memory is free. */
static void check_min_level(int min_level, int chunk) {
    tkv_config cfg = small_config((size_t)64 << 20);
    tkv_layer_info tiers;
    tkv_cache *kv;
    int seq, l, done;
    cfg.budget.pressure.min_level = min_level;
    forget_all();
    kv = make(&cfg);
    for (seq = 0; seq < 2; seq++)
        while (told[seq][LAYERS - 1].len + chunk <= 1280) {
            CHECK_EQ(append_all(kv, seq, chunk), TKV_OK);
            if (told[seq][0].len % 64) continue; /* also before there are tables */
            CHECK_LE(budget_of(kv).pending,
                     LAYERS * (3 + chunk / BLOCK) + (told[seq][0].len < 1024 ? 24 : 0));
            CHECK_EQ(tkv_maintain(kv, 1000, &done), TKV_OK);
            CHECK_EQ(budget_of(kv).pending, 0);
        }
    CHECK_EQ(budget_of(kv).level, min_level);
    CHECK_EQ(tkv_maintain(kv, 1000, &done), TKV_OK);
    CHECK_EQ(done, 0);
    for (seq = 0; seq < 2; seq++)
        for (l = 0; l < LAYERS; l++) {
            CHECK_EQ(tkv_get_layer(kv, seq, l, &tiers), TKV_OK);
            CHECK_LE(tiers.tokens[TKV_TIER_HOT],
                     4 + 64 + BLOCK + chunk); /* sinks, hot_tokens, what waits for its block */
            CHECK_LE(min_level == 3 ? 500 : 0, tiers.tokens[TKV_TIER_ARCHIVE]);
        }
    sound(kv);
    (void)all_read_well(kv);
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
    int t, exact;
    size_t least;
    forget_all();
    cfg.host.allocator = counting_allocator_of(&p);
    kv = make(&cfg);
    for (t = 0; t < 1300; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 0);
    CHECK_EQ(tkv_set_budget(kv, 1000 * 1000), TKV_OK);
    CHECK_LE(p.held, 1000 * 1000);
    CHECK(budget_of(kv).level > 0);
    sound(kv);
    exact = all_read_well(kv);
    CHECK_EQ(tkv_set_budget(kv, 100 * 1000), TKV_ERR_BUDGET);
    CHECK_EQ(all_read_well(kv), exact);
    CHECK_EQ(budget_of(kv).budget, 1000 * 1000);
    for (least = 1000 * 1000; tkv_set_budget(kv, least) == TKV_OK; least -= 10 * 1000)
        CHECK_LE(p.held, least);
    CHECK_LE(least, 900 * 1000);
    sound(kv);
    CHECK_EQ(tkv_set_budget(kv, 4000 * 1000), TKV_OK);
    p.most = p.held;
    for (t = 0; t < 800; t++) CHECK_EQ(append_all(kv, 1, 1), TKV_OK);
    CHECK_LE(p.most, 4000 * 1000);
    CHECK_EQ(budget_of(kv).level, 0);
    CHECK_EQ(reads_well(kv, 1, 0), 800); /* looser again */
    CHECK_EQ(tkv_set_budget(kv, 0), TKV_OK);
    for (t = 0; t < 300; t++) CHECK_EQ(append_all(kv, 1, 1), TKV_OK);
    sound(kv);
    CHECK_EQ(tkv_set_budget(kv, 2500 * 1000), TKV_OK);
    sound(kv);
    (void)all_read_well(kv);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    cfg = small_config(0);
    kv = make(&cfg);
    CHECK_EQ(tkv_set_budget(kv, 1000 * 1000), TKV_ERR_ARG);
    CHECK_EQ(tkv_set_level(kv, 1), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* A budget ends, and the plan has looser formats than the budget's levels. */
TEST(what_is_coded_stays_coded) {
    tkv_config cfg = small_config(900 * 1000);
    tkv_cache *kv;
    int t, flush;
    forget_all();
    cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_F16;
    cfg.tiers.hot_tokens = 1;
    cfg.tiers.warm_tokens = 16 * BLOCK;
    cfg.meter.heads = 2;
    cfg.meter.tokens = 8 * BLOCK;
    kv = make(&cfg);
    for (t = 0; t < 12 * BLOCK; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK(budget_of(kv).recoded[budget_of(kv).level] > 0);
    CHECK_EQ(tkv_set_budget(kv, 0), TKV_OK);
    CHECK_EQ(tkv_set_level(kv, 3), TKV_OK); /* the plan: all in F16 */
    for (t = 0; t < 12 * BLOCK; t++)
        CHECK_EQ(append_all(kv, 0, 1), TKV_OK); /* some are due for the archive */
    for (flush = TKV_FLUSH_DUE; flush <= TKV_FLUSH_ALL; flush++) {
        CHECK_EQ(tkv_seq_flush(kv, 0, (tkv_flush_mode)flush), TKV_OK);
        sound(kv); /* copies of the meter are of blocks that are coded */
    }
    (void)all_read_well(kv);
    tkv_destroy(kv);
}

TEST(idle_time_is_used) {
    tkv_config cfg = small_config(1000 * 1000);
    tkv_cache *kv = make(&cfg);
    int t, done = 0, sum = 0;
    uint64_t before;
    forget_all();
    for (t = 0; t < 900; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK_EQ(tkv_maintain(kv, 0, &done), TKV_OK);
    CHECK_EQ(done, 0);
    do {
        CHECK_EQ(tkv_maintain(kv, 2, &done), TKV_OK);
        CHECK_LE(done, 2);
        sum += done;
    } while (done);
    CHECK(sum > 4);
    before = budget_of(kv).demoted;
    for (t = 0; t < 20; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).demoted, before);
    sound(kv);
    CHECK_EQ(tkv_maintain(NULL, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_maintain(kv, -1, NULL), TKV_ERR_ARG);
    tkv_destroy(kv);
}

TEST(pressure_from_outside) {
    tkv_config cfg = small_config(8000 * 1000);
    tkv_cache *kv = make(&cfg);
    int t;
    forget_all();
    for (t = 0; t < 300; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).demoted, 0);
    CHECK_EQ(tkv_report_pressure(kv, tkv_test_float(0x7fc00000u)), TKV_ERR_ARG);
    CHECK_EQ(tkv_report_pressure(kv, 0.9f), TKV_OK);
    for (t = 0; t < 20; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 1);
    CHECK(budget_of(kv).recoded[1] > 0);
    CHECK_EQ(tkv_report_pressure(kv, 0.0f), TKV_OK);
    for (t = 0; t < 20; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 0);
    sound(kv);
    tkv_destroy(kv);
}

TEST(hot_tokens_and_level_by_hand) {
    tkv_config cfg = small_config(1000 * 1000);
    tkv_cache *kv = make(&cfg);
    tkv_layer_info info;
    int t;
    forget_all();
    CHECK_EQ(tkv_set_hot_tokens(kv, 200), TKV_OK);
    CHECK_EQ(tkv_set_hot_tokens(kv, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_set_level(kv, 99), TKV_ERR_ARG);
    for (t = 0; t < 1000; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_LE(200, info.tokens[TKV_TIER_HOT]);
    CHECK(budget_of(kv).level > 0);
    CHECK_EQ(tkv_set_level(kv, 4), TKV_OK);
    CHECK_EQ(budget_of(kv).level, 4);
    CHECK(budget_of(kv).pending > 0);
    for (t = 0; t < 100; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
    sound(kv);
    (void)all_read_well(kv);
    tkv_destroy(kv);
    /* a ladder without a budget: the plan of a level, by age */
    {
        static const tkv_level two[] = {{0, 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}},
                                        {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}}};
        tkv_format_pair pair = {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT};
        cfg = small_config(0);
        cfg.budget.ladder = two;
        cfg.budget.n_levels = 2;
        forget_all();
        kv = make(&cfg);
        for (t = 0; t < 700; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
        CHECK_EQ(tkv_set_level(kv, 1), TKV_OK);
        CHECK_EQ(pair_now(kv, 0, TKV_TIER_ARCHIVE, &pair), TKV_OK);
        CHECK_EQ(pair.k, TKV_KIVI2);
        for (t = 0; t < 700; t++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
        sound(kv);
        (void)all_read_well(kv);
        tkv_destroy(kv);
    }
}

TEST(steps_and_reservations) {
    tkv_config cfg = small_config(560 * 1000);
    counting_allocator p;
    tkv_cache *kv;
    int t, l, i, kept = 0;
    tkv_status st = TKV_OK;
    forget_all();
    cfg.host.allocator = counting_allocator_of(&p);
    kv = make(&cfg);
    for (t = 0; t < 1600 && !st && told[0][0].len + 9 <= LONGEST; t++) {
        int n = 1 + tkv_rng_below(&rng, 9), abort = tkv_rng_below(&rng, 3) == 0, len[LAYERS];
        for (l = 0; l < LAYERS; l++) len[l] = told[0][l].len;
        if (tkv_rng_below(&rng, 4) == 0) {
            st = tkv_seq_reserve(kv, 0, n);
            kept += st == TKV_OK;
        } else if (kept) {
            kept--;
        }
        if (st) break;
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        for (l = 0; l < LAYERS && !st; l++) st = append(kv, 0, l, n);
        if (st || abort) {
            CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
            for (l = 0; l < LAYERS; l++) told[0][l].len = len[l];
        } else {
            CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
        }
        CHECK_LE(p.most, 560 * 1000);
        if (t % 40 == 0) sound(kv);
    }
    sound(kv);
    CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
    (void)all_read_well(kv);
    /* what is reserved is there, whatever the others do */
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    forget(0);
    for (i = 0; i < 300; i++) CHECK_EQ(append_all(kv, 1, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reserve(kv, 1, 100), TKV_OK);
    for (st = TKV_OK; !st;) st = append_all(kv, 2, 3);
    CHECK_EQ(st, TKV_ERR_BUDGET);
    for (i = 0; i < 100; i++) CHECK_EQ(append_all(kv, 1, 1), TKV_OK);
    sound(kv);
    CHECK_LE(p.most, 560 * 1000);
    tkv_destroy(kv);
}

/* >>memory that fails */
static tkv_status scenario(tkv_cache *kv, int *steps) {
    tkv_status st = TKV_OK;
    int t;
    for (t = 0; t < 20 && !st; t++, ++*steps) st = append_all(kv, 0, 60);
    for (t = 0; t < 8 && !st; t++, ++*steps) st = append_all(kv, 1, 40);
    return st;
}

TEST(every_allocation_fails_once) {
    int fail, failed = 0, last = 1;
    for (fail = 1; last; fail++) {
        tkv_config cfg = small_config(1000 * 1000);
        tkv_cache *kv = NULL;
        counting_allocator p;
        int steps = 0, s, l;
        tkv_status st;
        forget_all();
        cfg.host.allocator = counting_allocator_of(&p);
        p.closed = fail + 1;
        st = tkv_create(&cfg, &kv);
        if (!st) st = scenario(kv, &steps);
        last = p.closed == 1; /* it came to that */
        if (st) CHECK_EQ(st, TKV_ERR_NOMEM);
        if (!last)
            CHECK_EQ(st, TKV_OK); /* a second table is only better than the first: without memory it waits */
        failed += st != TKV_OK;
        p.closed = 0;
        if (kv) {
            sound(kv);
            (void)all_read_well(kv);
            for (s = 0; s < 2; s++)
                for (l = 0; l < LAYERS; l++) { /* and it goes on */
                    int behind = told[s][0].len - told[s][l].len;
                    if (behind) CHECK_EQ(append(kv, s, l, behind), TKV_OK);
                }
            CHECK_EQ(append_all(kv, 0, 30), TKV_OK);
            sound(kv);
            CHECK_LE(p.most, 1000 * 1000);
            tkv_destroy(kv);
        }
        CHECK_EQ(p.held, 0);
    }
    printf("\n    %d allocations failed", failed);
    CHECK(failed > 10);
}

/* >>in place: bytes with borders */
TEST(in_place_is_filled_to_the_end) {
    size_t off;
    for (off = 0; off < 64; off += 21) {
        tkv_config cfg = small_config(1100 * 1000 + off * 1000);
        guarded_buffer p;
        tkv_cache *kv;
        tkv_status st = TKV_OK;
        int t;
        cfg.limits.max_tokens = LONGEST;
        forget_all();
        kv = make_in(&cfg, &p, off);
        if (!kv) return;
        for (t = 0; t < LONGEST && !st; t++) {
            st = append_all(kv, t / 500 % 2, 1);
            if (t % 200 == 0) sound(kv);
        }
        CHECK(t > 1500);
        sound(kv);
        (void)all_read_well(kv);
        borders(&p);
        CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes + 1), TKV_OK);
        CHECK_LE(budget_of(kv).budget, cfg.budget.bytes);
        CHECK_LE((double)cfg.budget.bytes * 0.85, budget_of(kv).budget);
        CHECK_EQ(tkv_set_budget(kv, 0), TKV_ERR_ARG);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        forget(0);
        CHECK_EQ(append_all(kv, 0, CHUNK), TKV_OK);
        sound(kv);
        borders(&p);
        tkv_destroy(kv);
        borders(&p);
        free(p.raw);
    }
}

/* >>quality feedback: what a level is worth to a model that is simulated, on a cache that is not */
static const tkv_level four[] = {{0, 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}},
                                 {0, 0, {TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}},
                                 {0, 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}},
                                 {0, 0, {TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}}};

/* Runs until the plan has stayed for 120 scores; returns how many scores it took to come there. */
static int settle(tkv_cache *kv, tkv_feedback *f, const float *loss, int *changes, int *hot) {
    int n, quiet = 0, last = 0;
    *changes = 0;
    for (n = 0; n < 700 && quiet < 120; n++) {
        const tkv_budget_info b = budget_of(kv);
        tkv_advice a;
        const float score = 1.0f - loss[b.level] + 0.004f * ((float)tkv_rng_uniform(&rng) - 0.5f);
        CHECK_EQ(tkv_observe_score(f, score), TKV_OK);
        CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
        CHECK_EQ(tkv_adapt_plan(kv, f, &a), TKV_OK);
        CHECK_EQ(a.level, budget_of(kv).level);
        *hot = a.hot_tokens;
        quiet++;
        if (a.level == b.level) continue;
        ++*changes;
        quiet = 0;
        last = n + 1;
    }
    return last;
}

TEST(feedback_moves_the_plan) {
    static const float easy[] = {.002f, .004f, .008f, .015f}, hard[] = {.004f, .02f, .06f, .2f};
    tkv_config cfg = small_config(0);
    tkv_feedback f;
    tkv_cache *kv;
    tkv_format_pair pair = {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT};
    int changes, scores, hot = 0;
    cfg.budget.ladder = four;
    cfg.budget.n_levels = COUNT(four);
    cfg.budget.pressure.min_level = 0;
    forget_all();
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK); /* target .97 */
    kv = make(&cfg);
    CHECK_EQ(tkv_set_level(kv, 3), TKV_OK);
    scores = settle(kv, &f, hard, &changes, &hot);
    printf("\n    hard: level %d after %d scores, %d changes", budget_of(kv).level, scores, changes);
    CHECK_EQ(budget_of(kv).level, 1);
    CHECK_LE(scores, 100);
    CHECK_EQ(changes, 2);
    CHECK_EQ(pair_now(kv, 0, TKV_TIER_ARCHIVE, &pair), TKV_OK);
    CHECK_EQ(pair.k, TKV_A30);
    CHECK(hot > 64);
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
    scores = settle(kv, &f, easy, &changes, &hot);
    printf("; easy: level %d after %d scores", budget_of(kv).level, scores);
    CHECK(budget_of(kv).level > 1);
    sound(kv);
    (void)all_read_well(kv);
    CHECK_EQ(tkv_adapt_plan(kv, NULL, NULL), TKV_ERR_ARG);
    tkv_destroy(kv);
    /* under a budget: not finer than memory allows, never cheaper than it must be */
    cfg = small_config(480 * 1000);
    forget_all();
    kv = make(&cfg);
    for (scores = 0; scores < 1200; scores++) CHECK_EQ(append_all(kv, 0, 1), TKV_OK);
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
    sound(kv);
    tkv_destroy(kv);
}

/* >>what cannot be */
TEST(config_says_what_is_wrong) {
    static const struct {
        int which;
        const char *field;
    } cases[] = {
        {0, "n_levels"},        {1, "n_levels"},        {2, "ladder[1].warm.k"}, {3, "ladder[0].hot_tokens"},
        {4, "budget.pressure"}, {5, "budget.pressure"}, {6, "budget.pressure"}};
    tkv_level two[2];
    int i, n;
    size_t bytes;
    tkv_cache *kv = NULL;
    tkv_config cfg;
    for (i = 0; i < COUNT(cases); i++) {
        char reason[200];
        memset(two, 0, sizeof two);
        cfg = small_config(1000 * 1000);
        cfg.budget.ladder = two;
        cfg.budget.n_levels = 2;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
        if (cases[i].which == 0) cfg.budget.ladder = NULL;
        if (cases[i].which == 1) cfg.budget.n_levels = TKV_MAX_LEVELS + 1;
        if (cases[i].which == 2) two[1].warm.k = TKV_R20;
        if (cases[i].which == 3) two[0].hot_tokens = -7;
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

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(11);
    RUN(growth_stays_within);
    RUN(oldest_first);
    RUN(relaxes_when_all_fits);
    RUN(windows_fit_too);
    RUN(plans_change_under_reservations);
    RUN(refused_keeps_the_last_append);
    RUN(steps_reach_as_far);
    RUN(last_append_is_exact);
    RUN(profiles_and_ladders);
    RUN(min_level_holds_while_memory_is_free);
    RUN(budget_goes_down_and_up);
    RUN(what_is_coded_stays_coded);
    RUN(idle_time_is_used);
    RUN(pressure_from_outside);
    RUN(hot_tokens_and_level_by_hand);
    RUN(steps_and_reservations);
    RUN(every_allocation_fails_once);
    RUN(in_place_is_filled_to_the_end);
    RUN(feedback_moves_the_plan);
    RUN(config_says_what_is_wrong);
    return tkv_test_end();
}
