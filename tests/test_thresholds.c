/*
 * test_thresholds.c - the threshold store: order, lookup and transfer, by hand and against a plain search. Also
 * the text to the byte, and every kind of damage to it.
 */
#include "kit.h"

static const uint32_t NONFINITE[] = {0x7fc00000u, 0x7f800000u, 0xff800000u};

static tkv_threshold make_entry(const char *model, int layer, int context, double score) {
    tkv_threshold e;
    memset(&e, 0, sizeof e);
    memcpy(e.model, model, strlen(model));
    e.layer = layer;
    e.context = context;
    e.hot_tokens = 64;
    e.warm_tokens = 448;
    e.archive = pair_of(TKV_A30, TKV_R30);
    e.score = (float)score;
    e.samples = 100;
    return e;
}

static void put_entry(tkv_thresholds *t, const char *model, int layer, int context, double score) {
    const tkv_threshold e = make_entry(model, layer, context, score);
    CHECK_EQ(tkv_put_threshold(t, &e), TKV_OK);
}

/* Returns the context of the entry that is found, or the status. */
static int find_context(const tkv_thresholds *t, const char *model, int layer, int context) {
    tkv_threshold e, same;
    tkv_status st;
    memset(&e, 0x5a, sizeof e);
    same = e;
    st = tkv_find_thresholds(t, model, layer, context, &e, 1, NULL);
    if (st) CHECK_MEM(&e, &same, sizeof e);
    return st ? (int)st : e.context;
}

/* Returns the number of entries found, at most max_found. */
static int find_entries(const tkv_thresholds *t, const char *model, int layer, int context,
                        tkv_threshold *out, int max_found) {
    int n_found = -1;
    const tkv_status st = tkv_find_thresholds(t, model, layer, context, out, max_found, &n_found);
    CHECK_EQ(st, n_found > 0 ? TKV_OK : TKV_ERR_RANGE);
    CHECK_LE(0, n_found);
    return n_found;
}

static const char *const model_names[] = {"a", "aa",          "b",        "a model with blanks",
                                          "Z", "\303\274ber", "ab/c:q4_0"};

static tkv_threshold random_entry(tkv_rng *r) {
    static const tkv_format k[] = {TKV_FORMAT_DEFAULT, TKV_A15, TKV_SQUAT2, TKV_KIVI2, TKV_F32};
    static const tkv_format v[] = {TKV_FORMAT_DEFAULT, TKV_R10, TKV_KVQUANT2, TKV_FP8_E4M3, TKV_Q8};
    static const int lengths[] = {0, TKV_OFF, TKV_UNLIMITED, 1, 64, 0x3fffffff};
    tkv_threshold e = make_entry(model_names[tkv_rng_below(r, COUNT(model_names))], tkv_rng_below(r, 4),
                                 1 + tkv_rng_below(r, 20), tkv_rng_uniform(r));
    if (e.layer == 3) e.layer = TKV_ALL_LAYERS;
    e.hot_tokens = lengths[tkv_rng_below(r, COUNT(lengths))];
    e.warm_tokens = lengths[tkv_rng_below(r, COUNT(lengths))];
    e.samples = tkv_rng_below(r, 3);
    e.archive = pair_of(k[tkv_rng_below(r, COUNT(k))], v[tkv_rng_below(r, COUNT(v))]);
    return e;
}

static void put_random_entries(tkv_thresholds *t, tkv_rng *r, int times) {
    while (times--) {
        const tkv_threshold e = random_entry(r);
        CHECK_EQ(tkv_put_threshold(t, &e), TKV_OK);
    }
}

/* >>putting */
TEST(puts_in_order) {
    static const char *const names[] = {"a", "a", "a", "b", "b"};
    static const int layers[] = {TKV_ALL_LAYERS, TKV_ALL_LAYERS, 5, 0, 0},
                     contexts[] = {512, 1024, 512, 100, 200};
    tkv_threshold memory[5];
    tkv_thresholds t = {memory, 0, 5};
    tkv_threshold e;
    int i;
    put_entry(&t, "b", 0, 200, .9);
    put_entry(&t, "a", TKV_ALL_LAYERS, 1024, .9);
    put_entry(&t, "b", 0, 100, .9);
    put_entry(&t, "a", 5, 512, .9);
    put_entry(&t, "a", TKV_ALL_LAYERS, 512, .9);
    CHECK_EQ(t.n, 5);
    for (i = 0; i < 5; i++) {
        CHECK_STR(memory[i].model, names[i]);
        CHECK_EQ(memory[i].layer, layers[i]);
        CHECK_EQ(memory[i].context, contexts[i]);
    }
    put_entry(&t, "a", 5, 512, .5); /* replaces an entry, even in a full store */
    CHECK_EQ(t.n, 5);
    CHECK_NEAR(memory[2].score, .5, 0);
    e = make_entry("c", 0, 1, .9);
    CHECK_EQ(tkv_put_threshold(&t, &e), TKV_ERR_CAPACITY);
    CHECK_EQ(t.n, 5);
    CHECK_EQ(tkv_put_threshold(&t, &memory[3]), TKV_OK); /* an entry of the store itself */
}

TEST(scores_are_kept_in_millionths) {
    tkv_threshold memory[1];
    tkv_thresholds t = {memory, 0, 1};
    tkv_rng r = tkv_rng_seed(1);
    int i;
    for (i = 0; i < 1000; i++) {
        const double score = tkv_rng_uniform(&r);
        put_entry(&t, "a", 0, 1, score);
        CHECK_NEAR(memory[0].score, score, 6e-7);
    }
    put_entry(&t, "a", 0, 1, 1);
    CHECK_NEAR(memory[0].score, 1, 0);
    put_entry(&t, "a", 0, 1, 1e-9);
    CHECK_NEAR(memory[0].score, 0, 0);
}

TEST(refuses_bad_entries) {
    static const int layers[] = {-1, -2, 4096}, contexts[] = {0, -1, TKV_UNLIMITED, 0x40000000};
    static const int lengths[] = {-3, 0x40000000};
    static const char *const names[] = {"", " a", "a ", "a\nb", "\t", "\x7f"};
    tkv_threshold memory[4], e;
    tkv_thresholds t = {memory, 0, 4}, bad;
    size_t needed = 7;
    int i, n_not_refused = 0;
    put_entry(&t, "a", 0, 1, .9);
#define BAD(change)                                                                                          \
    do {                                                                                                     \
        e = make_entry("m", 1, 2, .5);                                                                       \
        change;                                                                                              \
        n_not_refused += tkv_put_threshold(&t, &e) != TKV_ERR_ARG;                                           \
    } while (0)
    for (i = 0; i < COUNT(layers); i++) BAD(e.layer = layers[i]);
    for (i = 0; i < COUNT(contexts); i++) BAD(e.context = contexts[i]);
    for (i = 0; i < COUNT(lengths); i++) {
        BAD(e.hot_tokens = lengths[i]);
        BAD(e.warm_tokens = lengths[i]);
    }
    for (i = 0; i < COUNT(names); i++) BAD(memcpy(e.model, names[i], strlen(names[i]) + 1));
    for (i = 0; i < COUNT(NONFINITE); i++) BAD(e.score = tkv_test_float(NONFINITE[i]));
    BAD(e.score = 1.01f);
    BAD(e.score = -.01f);
    BAD(e.samples = -1);
    BAD(e.archive.k = TKV_FORMAT_COUNT);
    BAD(e.archive.k = TKV_R30); /* stores V only */
    BAD(e.archive.v = TKV_A30);
    BAD(memset(e.model, 'x', sizeof e.model)); /* no final zero */
#undef BAD
    CHECK_EQ(n_not_refused, 0);
    CHECK_EQ(t.n, 1);
    e = make_entry("m", 1, 2, .5);
    CHECK_EQ(tkv_put_threshold(NULL, &e), TKV_ERR_ARG);
    CHECK_EQ(tkv_put_threshold(&t, NULL), TKV_ERR_ARG);
    bad = t;
    bad.n = 5;
    CHECK_EQ(tkv_put_threshold(&bad, &e), TKV_ERR_ARG);
    bad.n = -1;
    CHECK_EQ(tkv_put_threshold(&bad, &e), TKV_ERR_ARG);
    bad = t;
    bad.entry = NULL;
    CHECK_EQ(tkv_put_threshold(&bad, &e), TKV_ERR_ARG);
    memset(&bad, 0, sizeof bad); /* a store of capacity 0 */
    CHECK_EQ(tkv_put_threshold(&bad, &e), TKV_ERR_CAPACITY);
    memory[1] = memory[0]; /* an array that the caller filled, with one entry twice */
    t.n = 2;
    CHECK_EQ(tkv_put_threshold(&t, &e), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_thresholds(&t, "a", 0, 1, &e, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_print_thresholds(&t, NULL, 0, &needed), TKV_ERR_ARG);
    CHECK_EQ(needed, 7);
    memory[1].context = 2;
    CHECK_EQ(tkv_print_thresholds(&t, NULL, 0, &needed), TKV_OK);
    CHECK_EQ(tkv_find_thresholds(&t, "a", 0, 1, &e, 1, NULL), TKV_OK);
    memset(memory[1].model, 'x', sizeof memory[1].model);
    CHECK_EQ(tkv_find_thresholds(&t, "a", 0, 1, &e, 1, NULL), TKV_ERR_ARG);
}

/* >>finding */
TEST(finds_the_nearest) {
    tkv_threshold memory[16], e;
    tkv_thresholds t = {memory, 0, 16};
    CHECK_EQ(find_context(&t, "m", 0, 100), TKV_ERR_RANGE);
    put_entry(&t, "m", TKV_ALL_LAYERS, 1000, .9);
    put_entry(&t, "m", TKV_ALL_LAYERS, 4000, .9);
    put_entry(&t, "m", 3, 8000, .9);
    put_entry(&t, "n", TKV_ALL_LAYERS, 2000, .9);
    put_entry(&t, "n", 7, 10, .9);
    CHECK_EQ(find_context(&t, "m", TKV_ALL_LAYERS, 1), 1000);
    CHECK_EQ(find_context(&t, "m", TKV_ALL_LAYERS, 2499), 1000);
    CHECK_EQ(find_context(&t, "m", TKV_ALL_LAYERS, 2501), 4000);
    CHECK_EQ(find_context(&t, "m", TKV_ALL_LAYERS, 0x3fffffff), 4000); /* never an entry of another layer */
    CHECK_EQ(find_context(&t, "m", 2, 9000), 4000);
    CHECK_EQ(find_context(&t, "m", 3, 1000), 8000); /* its own entry before one for all layers */
    CHECK_EQ(find_context(&t, "n", 3, 10), 2000);
    CHECK_EQ(find_context(&t, "M", 3, 10), TKV_ERR_RANGE);
    CHECK_EQ(find_context(&t, "", 3, 10), TKV_ERR_RANGE);
    CHECK_EQ(find_context(&t, "m", TKV_OFF, 10), TKV_ERR_RANGE);
    CHECK_EQ(find_context(&t, "m", TKV_UNLIMITED, 10), TKV_ERR_RANGE); /* a length, not a layer */
    CHECK_EQ(find_context(&t, "m", 4096, 10), TKV_ERR_RANGE);
    CHECK_EQ(find_context(&t, "m", 3, 0), TKV_ERR_RANGE);
    CHECK_EQ(tkv_find_thresholds(&t, NULL, 0, 1, &e, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_thresholds(&t, "m", 0, 1, NULL, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_thresholds(NULL, "m", 0, 1, &e, 1, NULL), TKV_ERR_ARG);
    t.n = 0;
    put_entry(&t, "m", 7, 10, .9); /* an entry of layer 7 is not used for layer 3 */
    CHECK_EQ(find_context(&t, "m", 3, 10), TKV_ERR_RANGE);
    CHECK_EQ(find_context(&t, "m", TKV_ALL_LAYERS, 10), TKV_ERR_RANGE);
}

/* Of two equally near entries, the better score wins, then more samples, then the longer context. */
TEST(ties_of_distance) {
    tkv_threshold memory[2], e;
    tkv_thresholds t = {memory, 0, 2};
    put_entry(&t, "m", 0, 100, .91);
    put_entry(&t, "m", 0, 200, .9);
    CHECK_EQ(find_context(&t, "m", 0, 150), 100);
    CHECK_EQ(find_context(&t, "m", 0, 151), 200);
    put_entry(&t, "m", 0, 200, .92);
    CHECK_EQ(find_context(&t, "m", 0, 150), 200);
    put_entry(&t, "m", 0, 200, .91);
    CHECK_EQ(find_context(&t, "m", 0, 150), 200);
    e = make_entry("m", 0, 100, .91);
    e.samples = 101;
    CHECK_EQ(tkv_put_threshold(&t, &e), TKV_OK);
    CHECK_EQ(find_context(&t, "m", 0, 150), 100);
}

/* Up to ten candidates, by hand and against a search through all entries. */
TEST(candidates) {
    tkv_threshold memory[400], got[TKV_THRESHOLD_CANDIDATES + 1], mark;
    tkv_thresholds t = {memory, 0, 400};
    tkv_rng r = tkv_rng_seed(7);
    int max_found, i, k, round;
    put_entry(&t, "m", 0, 100, .5);
    for (i = 1; i <= 30; i++) put_entry(&t, "m", TKV_ALL_LAYERS, 10 * i, .5);
    CHECK_EQ(find_entries(&t, "m", 0, 155, got, TKV_THRESHOLD_CANDIDATES), 10);
    CHECK_EQ(got[0].layer, 0);
    for (i = 1; i < 10; i++) { /* 160, 150, 170, 140, ...: of equally near contexts the longer one is first */
        CHECK_EQ(got[i].layer, TKV_ALL_LAYERS);
        CHECK_EQ(got[i].context, 155 + (i % 2 ? 5 * i : -5 * (i - 1)));
    }
    t.n = 0;
    put_random_entries(&t, &r, 400);
    memset(&mark, 0x5a, sizeof mark);
    for (round = 0; round < 300; round++) {
        const char *model = model_names[round % COUNT(model_names)];
        const int layer = round % 4 == 3 ? TKV_ALL_LAYERS : round % 4, context = 1 + tkv_rng_below(&r, 22);
        int n, want = 0;
        max_found = 1 + tkv_rng_below(&r, TKV_THRESHOLD_CANDIDATES);
        for (i = 0; i <= TKV_THRESHOLD_CANDIDATES; i++) got[i] = mark;
        n = find_entries(&t, model, layer, context, got, max_found);
        CHECK_MEM(&got[max_found], &mark, sizeof mark);
        for (i = 0; i < t.n; i++) { /* a fitting entry is found, or the last one is as good */
            const tkv_threshold *e = &t.entry[i], *last = &got[n > 0 ? n - 1 : 0];
            int n_copies = 0, d = abs(e->context - context);
            if (strcmp(e->model, model) != 0 || (e->layer != layer && e->layer != TKV_ALL_LAYERS)) continue;
            want++;
            for (k = 0; k < n; k++) n_copies += memcmp(e, &got[k], sizeof *e) == 0;
            CHECK(n_copies == 1 ||
                  (n == max_found && (e->layer != layer || last->layer == layer) &&
                   (last->layer == layer && e->layer != layer ? 1 : d >= abs(last->context - context))));
        }
        CHECK_EQ(n, want < max_found ? want : max_found);
        for (k = 1; k < n; k++) /* in order */
            CHECK(got[k - 1].layer == got[k].layer
                      ? abs(got[k - 1].context - context) <= abs(got[k].context - context)
                      : got[k - 1].layer == layer);
    }
    got[0] = mark;
    CHECK_EQ(find_entries(&t, "nobody", 0, 1, got, TKV_THRESHOLD_CANDIDATES), 0);
    CHECK_EQ(tkv_find_thresholds(&t, "a", 0, 1, got, 0, &i), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_thresholds(&t, "a", 0, 1, got, -1, &i), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_thresholds(&t, "a", 0, 1, NULL, 1, &i), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_thresholds(&t, NULL, 0, 1, got, 1, &i), TKV_ERR_ARG);
    CHECK_EQ(tkv_find_thresholds(NULL, "a", 0, 1, got, 1, &i), TKV_ERR_ARG);
    CHECK_MEM(&got[0], &mark, sizeof mark);
}

/* >>another model */
/* >>applying */
static tkv_config small_config(void) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 3;
    cfg.model.n_heads = 2;
    cfg.model.head_dim = 32;
    return cfg;
}

TEST(applies_to_all_layers) {
    tkv_config cfg = small_config(), want;
    tkv_layer_config layers[3];
    tkv_threshold e = make_entry("a", TKV_ALL_LAYERS, 512, .9);
    char reason[200] = "old";
    memset(layers, 0, sizeof layers);
    layers[1].hot_tokens = 128;
    cfg.layers = layers;
    cfg.tiers.sink_tokens = 8;
    want = cfg;
    e.hot_tokens = 96;
    e.warm_tokens = TKV_OFF;
    e.archive = pair_of(TKV_A25, TKV_R20);
    want.tiers.hot_tokens = 96;
    want.tiers.warm_tokens = TKV_OFF;
    want.tiers.archive = e.archive;
    CHECK_EQ(tkv_apply_threshold(&cfg, NULL, &e, reason, sizeof reason), TKV_OK);
    CHECK_MEM(&cfg, &want, sizeof cfg);
    CHECK_STR(reason, "");
    CHECK_EQ(layers[1].hot_tokens, 128); /* settings of layers stay */
    e.hot_tokens = e.warm_tokens = 0;    /* back to the defaults */
    e.archive = pair_of(TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT);
    want.tiers.hot_tokens = want.tiers.warm_tokens = 0;
    want.tiers.archive = e.archive;
    CHECK_EQ(tkv_apply_threshold(&cfg, layers, &e, NULL, 0), TKV_OK);
    CHECK_MEM(&cfg, &want, sizeof cfg);
}

TEST(applies_to_one_layer) {
    tkv_config cfg = small_config();
    tkv_layer_config layers[3], want[3];
    tkv_threshold e = make_entry("a", 2, 512, .9);
    const tkv_format_pair pair = pair_of(TKV_KIVI4, TKV_KIVI2);
    tkv_layer_info info;
    tkv_cache *kv = NULL;
    e.archive = pair;
    e.hot_tokens = TKV_UNLIMITED;
    memset(layers, 0, sizeof layers);
    layers[2].window = 300;
    memcpy(want, layers, sizeof want);
    want[2].hot_tokens = TKV_UNLIMITED;
    want[2].warm_tokens = 448;
    want[2].archive = pair;
    CHECK_EQ(tkv_apply_threshold(&cfg, layers, &e, NULL, 0), TKV_OK);
    CHECK(cfg.layers == layers);
    CHECK_MEM(layers, want, sizeof want);
    e.layer = 0;
    e.hot_tokens = 64;
    CHECK_EQ(tkv_apply_threshold(&cfg, layers, &e, NULL, 0), TKV_OK); /* beside the first one */
    want[0].hot_tokens = 64;
    want[0].warm_tokens = 448;
    want[0].archive = pair;
    CHECK_MEM(layers, want, sizeof want);
    REQUIRE(tkv_create(&cfg, &kv) == TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.format[TKV_TIER_ARCHIVE].k, TKV_KIVI4);
    CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
    CHECK_EQ(info.format[TKV_TIER_ARCHIVE].k, TKV_A30);
    tkv_destroy(kv);
}

/* Applies an entry and expects an error with this text, and that nothing changes. */
static void refuse_entry(tkv_config *cfg, tkv_layer_config *layers, const tkv_threshold *e, tkv_status st,
                         const char *why) {
    const tkv_config before = *cfg;
    tkv_layer_config layers_before[3];
    char reason[200] = "";
    if (layers) memcpy(layers_before, layers, sizeof layers_before);
    CHECK_EQ(tkv_apply_threshold(cfg, layers, e, reason, sizeof reason), st);
    CHECK_MSG(strstr(reason, why) != NULL, "%s", reason);
    CHECK_MEM(cfg, &before, sizeof before);
    if (layers) CHECK_MEM(layers, layers_before, sizeof layers_before);
    CHECK_EQ(tkv_apply_threshold(cfg, layers, e, NULL, 0), st);
}

TEST(applies_nothing_that_is_wrong) {
    tkv_config cfg = small_config(), empty = tkv_default_config();
    tkv_layer_config layers[3], other[3];
    tkv_threshold e = make_entry("a", TKV_ALL_LAYERS, 512, .9);
    memset(layers, 0, sizeof layers);
    memset(other, 0, sizeof other);
    refuse_entry(&empty, NULL, &e, TKV_ERR_CONFIG, "model.n_layers is 0");
    refuse_entry(&cfg, NULL, NULL, TKV_ERR_ARG, "the entry is missing");
    CHECK_EQ(tkv_apply_threshold(NULL, NULL, &e, NULL, 0), TKV_ERR_ARG);
    e.score = tkv_test_float(NONFINITE[0]);
    refuse_entry(&cfg, layers, &e, TKV_ERR_ARG, "score of the entry must be");
    e.score = .9f;
    e.archive.v = TKV_A30; /* a format of keys */
    refuse_entry(&cfg, layers, &e, TKV_ERR_ARG, "archive.v of the entry must be");
    e.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT3); /* a valid entry, for models with RoPE */
    refuse_entry(&cfg, layers, &e, TKV_ERR_CONFIG, "model.rope.dim");
    e.layer = 1;
    refuse_entry(&cfg, layers, &e, TKV_ERR_CONFIG, "rope.dim");
    e.archive = pair_of(TKV_A30, TKV_R30);
    refuse_entry(&cfg, NULL, &e, TKV_ERR_ARG, "layers must be an array");
    cfg.layers = layers;
    refuse_entry(&cfg, other, &e, TKV_ERR_ARG, "layers must be the array of cfg->layers");
    e.layer = 3;
    refuse_entry(&cfg, layers, &e, TKV_ERR_RANGE, "layer 3; it must be below model.n_layers, 3");
}

TEST(applies_what_was_found) {
    tkv_threshold memory[4], found;
    tkv_thresholds t = {memory, 0, 4};
    tkv_config cfg = small_config();
    put_entry(&t, "a", TKV_ALL_LAYERS, 512, .9);
    put_entry(&t, "a", TKV_ALL_LAYERS, 4096, .9);
    memory[1].hot_tokens = 192;
    CHECK_EQ(tkv_find_thresholds(&t, "a", TKV_ALL_LAYERS, 3000, &found, 1, NULL), TKV_OK);
    CHECK_EQ(tkv_apply_threshold(&cfg, NULL, &found, NULL, 0), TKV_OK);
    CHECK_EQ(cfg.tiers.hot_tokens, 192);
    CHECK_EQ(cfg.tiers.archive.v, TKV_R30);
}

TEST(copies_to_another_model) {
    tkv_threshold memory[8], before[8], e;
    tkv_thresholds t = {memory, 0, 8};
    put_entry(&t, "base", 0, 100, .9);
    put_entry(&t, "base", TKV_ALL_LAYERS, 100, .8);
    put_entry(&t, "base", TKV_ALL_LAYERS, 200, 1);
    put_entry(&t, "other", TKV_ALL_LAYERS, 5, 1);
    put_entry(&t, "tuned", TKV_ALL_LAYERS, 200, .7);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", "tuned", 0), TKV_OK);
    CHECK_EQ(t.n, 7);
    CHECK_EQ(tkv_find_thresholds(&t, "tuned", 0, 100, &e, 1, NULL), TKV_OK);
    CHECK_NEAR(e.score, .81, 1e-6);
    CHECK_EQ(e.samples, 0);
    CHECK_EQ(e.layer, 0);
    CHECK_EQ(e.hot_tokens, 64);
    CHECK_EQ(tkv_find_thresholds(&t, "tuned", 1, 100, &e, 1, NULL), TKV_OK);
    CHECK_NEAR(e.score, .72, 1e-6);
    CHECK_EQ(tkv_find_thresholds(&t, "tuned", 1, 200, &e, 1, NULL), TKV_OK); /* measured, so not replaced */
    CHECK_NEAR(e.score, .7, 1e-6);
    CHECK_EQ(e.samples, 100);
    CHECK_EQ(tkv_find_thresholds(&t, "base", 1, 200, &e, 1, NULL), TKV_OK);
    CHECK_NEAR(e.score, 1, 0);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", "tuned", .5f), TKV_OK); /* all entries have copies */
    CHECK_EQ(t.n, 7);
    memcpy(before, memory, 7 * sizeof *memory);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", "a new one", .5f), TKV_ERR_CAPACITY);
    CHECK_EQ(tkv_copy_thresholds(&t, "nobody", "a new one", .5f), TKV_ERR_RANGE);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", "base", .5f), TKV_ERR_ARG);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", "", .5f), TKV_ERR_ARG);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", "x", 1.5f), TKV_ERR_ARG);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", "x", -.5f), TKV_ERR_ARG);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", "x", tkv_test_float(0x7fc00000u)), TKV_ERR_ARG);
    CHECK_EQ(tkv_copy_thresholds(&t, NULL, "x", 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_copy_thresholds(&t, "base", NULL, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_copy_thresholds(NULL, "base", "x", 1), TKV_ERR_ARG);
    CHECK_EQ(t.n, 7);
    CHECK_MEM(memory, before, 7 * sizeof *memory);
    t.n = 0;
    put_entry(&t, "m", 0, 1, .9);
    put_entry(&t, "m", 0, 2, .9);
    put_entry(&t, "m", 0, 3, .9);
    CHECK_EQ(tkv_copy_thresholds(&t, "m", "a", 1), TKV_OK); /* the copies sort before their sources */
    CHECK_EQ(t.n, 6);
    CHECK_EQ(find_context(&t, "a", 0, 3), 3);
    CHECK_EQ(find_context(&t, "m", 0, 1), 1);
    CHECK_STR(memory[2].model, "a");
    CHECK_STR(memory[3].model, "m");
    t.n = 0;
    put_entry(&t, "m", 0, 1, .9);
    put_entry(&t, "m", 0, 2, .9);
    CHECK_EQ(tkv_copy_thresholds(&t, memory[0].model, "a", 1), TKV_OK); /* a name in an entry that moves */
    CHECK_EQ(t.n, 4);
    CHECK_STR(memory[1].model, "a");
    CHECK_STR(memory[2].model, "m");
}

/* >>the text */
static const char example[] = "tieredkv-thresholds 1\n"
                              "all 4096 64 448 128 a30 r30 0.981200 SmolLM2-135M\n"
                              "all 8192 none all 0 default default 1.000000 SmolLM2-135M\n"
                              "3 512 0 1 2147483647 kivi2 kvquant2 0.000001 a model with blanks\n";

/* Writes a text and its checksum line, without the library. Returns the number of bytes. */
static size_t add_checksum(char *to, const char *text) {
    const size_t n = strlen(text);
    memcpy(to, text, n);
    return n + (size_t)snprintf(to + n, 32, "sum %016llx\n",
                                (unsigned long long)hash_of(HASH_START, (const uint8_t *)text, n));
}

static tkv_status parse_copy(tkv_thresholds *t, const char *text, size_t size, char *reason, size_t room) {
    char *copy = (char *)malloc(size ? size : 1); /* of exactly this size, for ASan */
    tkv_status st;
    if (!copy) exit(2);
    memcpy(copy, text, size);
    st = tkv_parse_thresholds(t, copy, size, reason, room);
    free(copy);
    return st;
}

TEST(text_by_hand) {
    tkv_threshold memory[4], back[4], e;
    tkv_thresholds t = {memory, 0, 4}, u = {back, 0, 4};
    char text[512], want[512], reason[100] = "x";
    size_t n, need = 0;
    put_entry(&t, "SmolLM2-135M", TKV_ALL_LAYERS, 4096, .9812);
    memory[0].samples = 128;
    e = make_entry("SmolLM2-135M", TKV_ALL_LAYERS, 8192, 1);
    e.hot_tokens = TKV_OFF;
    e.warm_tokens = TKV_UNLIMITED;
    e.archive = pair_of(TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT);
    e.samples = 0;
    CHECK_EQ(tkv_put_threshold(&t, &e), TKV_OK);
    e = make_entry("a model with blanks", 3, 512, .000001);
    e.hot_tokens = 0;
    e.warm_tokens = 1;
    e.archive = pair_of(TKV_KIVI2, TKV_KVQUANT2);
    e.samples = 0x7fffffff;
    CHECK_EQ(tkv_put_threshold(&t, &e), TKV_OK);
    n = add_checksum(want, example);
    CHECK_EQ(tkv_print_thresholds(&t, NULL, 0, &need), TKV_OK);
    CHECK_EQ(need, n + 1); /* the final zero counts */
    memset(text, '#', sizeof text);
    CHECK_EQ(tkv_print_thresholds(&t, text, n + 1, NULL), TKV_OK);
    CHECK_STR(text, want);
    CHECK_EQ(text[n + 1], '#');
    memset(text, '#', sizeof text);
    need = 0;
    CHECK_EQ(tkv_print_thresholds(&t, text, n, &need), TKV_ERR_CAPACITY);
    CHECK_EQ(need, n + 1);
    CHECK_EQ(tkv_print_thresholds(&t, text, 0, NULL), TKV_ERR_CAPACITY);
    CHECK_EQ(text[0], '#');
    CHECK_EQ(tkv_print_thresholds(&t, NULL, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_print_thresholds(&t, NULL, sizeof text, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_print_thresholds(NULL, text, sizeof text, &need), TKV_ERR_ARG);
    CHECK_EQ(need, n + 1);
    CHECK_EQ(parse_copy(&u, want, n, reason, sizeof reason), TKV_OK);
    CHECK_STR(reason, "");
    CHECK_EQ(u.n, 3);
    CHECK_MEM(back, memory, 3 * sizeof *memory);
    n = add_checksum(want, "tieredkv-thresholds 1\n"); /* empty */
    CHECK_EQ(parse_copy(&u, want, n, NULL, 0), TKV_OK);
    CHECK_EQ(u.n, 0);
    memset(&u, 0, sizeof u);
    CHECK_EQ(parse_copy(&u, want, n, NULL, 0), TKV_OK); /* no entries need no capacity */
}

/* Printing, parsing and printing again gives the same text. The order in which entries were put does not matter. */
TEST(print_and_parse_again) {
    static tkv_threshold memory[400], back[400];
    static char text[40000], again[40000];
    tkv_rng r = tkv_rng_seed(21);
    int round, i;
    for (round = 0; round < 50; round++) {
        tkv_thresholds t = {memory, 0, 400}, u = {back, 0, 400};
        size_t n = 0, m = 0;
        put_random_entries(&t, &r, tkv_rng_below(&r, 400));
        CHECK_EQ(tkv_print_thresholds(&t, text, sizeof text, &n), TKV_OK);
        CHECK_EQ(n, strlen(text) + 1);
        CHECK_EQ(parse_copy(&u, text, n - 1, NULL, 0), TKV_OK);
        CHECK_EQ(u.n, t.n);
        CHECK_MEM(back, memory, (size_t)t.n * sizeof *memory);
        CHECK_EQ(tkv_print_thresholds(&u, again, sizeof again, &m), TKV_OK);
        CHECK_EQ(m, n);
        CHECK_MEM(again, text, n);
        for (u.n = 0, i = t.n - 1; i >= 0; i--) CHECK_EQ(tkv_put_threshold(&u, &memory[i]), TKV_OK);
        CHECK_MEM(back, memory, (size_t)t.n * sizeof *memory);
    }
}

/* >>damaged texts: they are refused, and leave the store unchanged */
typedef struct guarded_store {
    tkv_threshold memory[8], before[8];
    tkv_thresholds t;
    int n_accepted; /* number of texts that were accepted */
} guarded_store;

static void init_guarded_store(guarded_store *v) {
    memset(v, 0, sizeof *v);
    v->t.entry = v->memory;
    v->t.capacity = 8;
    put_entry(&v->t, "kept", 1, 2, .5);
    memcpy(v->before, v->memory, sizeof v->before);
}

static void check_refused(guarded_store *v, const char *text, size_t size) {
    char reason[160] = "";
    const tkv_status st = parse_copy(&v->t, text, size, reason, sizeof reason);
    v->n_accepted += st == TKV_OK;
    CHECK_EQ(st, TKV_ERR_DATA);
    CHECK(strncmp(reason, "line ", 5) == 0 && strlen(reason) > 10);
    CHECK(v->t.n == 1 && v->t.capacity == 8 && memcmp(v->memory, v->before, sizeof v->before) == 0);
}

TEST(truncated_texts) {
    guarded_store v;
    char text[512];
    size_t n = add_checksum(text, example), i;
    init_guarded_store(&v);
    for (i = 0; i < n; i++) check_refused(&v, text, i);
    CHECK_EQ(tkv_parse_thresholds(&v.t, NULL, 0, NULL, 0), TKV_ERR_DATA);
    CHECK_EQ(tkv_parse_thresholds(&v.t, NULL, 1, NULL, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_parse_thresholds(NULL, text, n, NULL, 0), TKV_ERR_ARG);
    for (i = 0; i < 256; i++) { /* one byte too many */
        text[n] = (char)i;
        check_refused(&v, text, n + 1);
    }
    CHECK_EQ(parse_copy(&v.t, text, n, NULL, 0), TKV_OK);
    CHECK_EQ(v.t.n, 3);
}

/* Every byte takes every other value, and the checksum must detect it. Then the checksum is made to fit: a text
 * that is accepted must print as it was read. */
TEST(changed_bytes) {
    guarded_store v;
    static tkv_threshold memory[8];
    tkv_thresholds t = {memory, 0, 8};
    char text[512], again[512];
    const size_t n = add_checksum(text, example);
    size_t i;
    int x, n_accepted = 0;
    init_guarded_store(&v);
    for (i = 0; i < n; i++)
        for (x = 1; x < 256; x++) {
            text[i] = (char)(text[i] ^ x);
            check_refused(&v, text, n);
            text[i] = (char)(text[i] ^ x);
        }
    for (i = 0; i < strlen(example); i++)
        for (x = 1; x < 256; x++) {
            char changed[512];
            size_t m = 0;
            memcpy(changed, example, sizeof example);
            changed[i] = (char)(changed[i] ^ x);
            if (changed[i] == 0) continue; /* it would end the text */
            (void)add_checksum(text, changed);
            if (parse_copy(&t, text, n, NULL, 0)) continue;
            n_accepted++;
            CHECK_EQ(tkv_print_thresholds(&t, again, sizeof again, &m), TKV_OK);
            CHECK_EQ(m, n + 1);
            CHECK_MEM(again, text, n);
            CHECK_EQ(again[n], 0);
        }
    CHECK(n_accepted > 1000); /* other digits, other names */
}

TEST(hostile_lines) {
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"", "line 1: these bytes are not a threshold store"},
        {"hello", "line 1: these bytes are not a threshold store"},
        {"tieredkv-thresholds 2\n", "line 1: the store is of another version"},
        {"tieredkv-thresholds 10\n", "line 1: the store is of another version"},
        {"tieredkv-thresholds 1\r\n", "line 1: the store is of another version"},
        {"tieredkv-thresholds 1\n\n", "line 2: layer"},
        {"tieredkv-thresholds 1\nnone 1 1 1 1 a30 r30 0.500000 m\n", "line 2: layer"},
        {"tieredkv-thresholds 1\n4096 1 1 1 1 a30 r30 0.500000 m\n", "line 2: layer"},
        {"tieredkv-thresholds 1\n-2 1 1 1 1 a30 r30 0.500000 m\n", "line 2: layer"},
        {"tieredkv-thresholds 1\n+1 1 1 1 1 a30 r30 0.500000 m\n", "line 2: layer"},
        {"tieredkv-thresholds 1\n01 1 1 1 1 a30 r30 0.500000 m\n", "line 2: layer"},
        {"tieredkv-thresholds 1\n 1 1 1 1 1 a30 r30 0.500000 m\n", "line 2: layer"},
        {"tieredkv-thresholds 1\n1 0 1 1 1 a30 r30 0.500000 m\n", "line 2: context"},
        {"tieredkv-thresholds 1\n1 all 1 1 1 a30 r30 0.500000 m\n", "line 2: context"},
        {"tieredkv-thresholds 1\n1 1073741824 1 1 1 a30 r30 0.500000 m\n", "line 2: context"},
        {"tieredkv-thresholds 1\n1 18446744073709551617 1 1 1 a30 r30 0.500000 m\n", "line 2: context"},
        {"tieredkv-thresholds 1\n1 4294967297 1 1 1 a30 r30 0.500000 m\n", "line 2: context"},
        {"tieredkv-thresholds 1\n1  1 1 1 1 a30 r30 0.500000 m\n", "line 2: context"},
        {"tieredkv-thresholds 1\n1 1 1.5 1 1 a30 r30 0.500000 m\n", "line 2: hot_tokens"},
        {"tieredkv-thresholds 1\n1 1 1 0x1 1 a30 r30 0.500000 m\n", "line 2: warm_tokens"},
        {"tieredkv-thresholds 1\n1 1 1 1 2147483648 a30 r30 0.500000 m\n", "line 2: samples"},
        {"tieredkv-thresholds 1\n1 1 1 1 none a30 r30 0.500000 m\n", "line 2: samples"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 r30 r30 0.500000 m\n", "line 2: archive.k"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 A30 r30 0.500000 m\n", "line 2: archive.k"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 a30 0.500000 m\n", "line 2: archive.v"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 nothing 0.500000 m\n", "line 2: archive.v"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 1.000001 m\n", "line 2: score"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 0.5 m\n", "line 2: score"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 0,500000 m\n", "line 2: score"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 nan m\n", "line 2: score"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 -0.50000 m\n", "line 2: score"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 0.500000 \n", "line 2: model"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 0.500000  m\n", "line 2: model"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 0.500000 m\r\n", "line 2: model"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 0.500000\n", "line 2: score"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 0.500000 "
         "1234567890123456789012345678901234567890123456789012345678901234\n",
         "line 2: model"},
        {"tieredkv-thresholds 1\n1 1 1 1 1 a30 r30 0.500000 m\n1 1 1 1 1 a30 r30 0.600000 m\n",
         "line 3: the entry is there twice"},
        {"tieredkv-thresholds 1\n1 2 1 1 1 a30 r30 0.500000 m\n1 1 1 1 1 a30 r30 0.600000 m\n",
         "line 3: the entry is there twice or out of order"},
    };
    guarded_store v;
    char text[600], reason[160];
    int i;
    init_guarded_store(&v);
    for (i = 0; i < COUNT(cases); i++) {
        const size_t n = add_checksum(text, cases[i].text);
        check_refused(&v, text, n);
        reason[0] = 0;
        (void)parse_copy(&v.t, text, n, reason, sizeof reason);
        CHECK_MSG(strncmp(reason, cases[i].says, strlen(cases[i].says)) == 0, "case %d: %s", i, reason);
        CHECK_EQ(tkv_parse_thresholds(&v.t, text, n, reason, 6), TKV_ERR_DATA); /* cuts the reason */
        CHECK_EQ(strlen(reason), 5);
    }
    CHECK_EQ(v.n_accepted, 0);
}

/* Random bytes, and random sequences of pieces of real texts with a checksum that fits. */
TEST(random_bytes) {
    static const char *const pieces[] = {"tieredkv-thresholds 1\n",
                                         "sum ",
                                         "all ",
                                         "none ",
                                         "\n",
                                         " ",
                                         "0 ",
                                         "1 ",
                                         "4096 ",
                                         "a30 ",
                                         "r30 ",
                                         "0.500000 ",
                                         "m",
                                         "default ",
                                         "99999999999 ",
                                         "1 1 1 1 1 a30 r30 0.500000 m\n"};
    const int rounds = tkv_test_quick() ? 2000 : 40000;
    tkv_rng r = tkv_rng_seed(31);
    guarded_store v;
    static tkv_threshold memory[8];
    char text[1200], again[1200];
    int round, i, n_accepted = 0;
    init_guarded_store(&v);
    for (round = 0; round < rounds; round++) {
        char body[1000];
        size_t n = 0, m = 0;
        tkv_thresholds t = {memory, 0, 8};
        if (round % 2) {
            for (i = tkv_rng_below(&r, 200); i > 0; i--) text[n++] = (char)tkv_rng_below(&r, 256);
            check_refused(&v, text, n);
            continue;
        }
        strcpy(body, round % 8 ? pieces[0] : "");
        for (i = tkv_rng_below(&r, 20); i > 0; i--)
            strcat(body, pieces[round % 16 == 2 ? COUNT(pieces) - 1 : tkv_rng_below(&r, COUNT(pieces))]);
        n = add_checksum(text, body);
        if (parse_copy(&t, text, n, NULL, 0)) continue;
        n_accepted++;
        CHECK_EQ(tkv_print_thresholds(&t, again, sizeof again, &m), TKV_OK);
        CHECK_EQ(m, n + 1);
        CHECK_MEM(again, text, n);
        CHECK_EQ(again[n], 0);
    }
    CHECK(n_accepted > 0);
    CHECK_EQ(v.n_accepted, 0);
}

TEST(store_too_small) {
    tkv_threshold memory[2], before[2];
    tkv_thresholds t = {memory, 0, 2};
    char text[512], reason[100];
    const size_t n = add_checksum(text, example);
    put_entry(&t, "kept", 1, 2, .5);
    memory[1] = memory[0];
    memcpy(before, memory, sizeof before);
    CHECK_EQ(parse_copy(&t, text, n, reason, sizeof reason), TKV_ERR_CAPACITY);
    CHECK_STR(reason, "the text has 3 entries, the store has room for 2");
    CHECK_EQ(t.n, 1);
    CHECK_MEM(memory, before, sizeof before);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(puts_in_order);
    RUN(scores_are_kept_in_millionths);
    RUN(refuses_bad_entries);
    RUN(finds_the_nearest);
    RUN(ties_of_distance);
    RUN(candidates);
    RUN(applies_to_all_layers);
    RUN(applies_to_one_layer);
    RUN(applies_nothing_that_is_wrong);
    RUN(applies_what_was_found);
    RUN(copies_to_another_model);
    RUN(text_by_hand);
    RUN(print_and_parse_again);
    RUN(truncated_texts);
    RUN(changed_bytes);
    RUN(hostile_lines);
    RUN(random_bytes);
    RUN(store_too_small);
    return tkv_test_end();
}
