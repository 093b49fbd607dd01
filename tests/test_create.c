/*
 * test_create.c - creation from a config and from a text, with a sentence about every error. test_sequence.c has a
 * check for every field that validation refuses: creation gives the same sentence.
 */
#include "../tieredkv.h"
#include "kit.h"

enum { LAYERS = 4 };

static tkv_config make_config(void) {
    tkv_config cfg = make_sized_config(LAYERS, 4, 2, 32, 2, 64);
    cfg.limits.max_tokens = 4096;
    return cfg;
}

/* Checks that creation returns `expected`, gives a reason with `word` in it and does not change *out. */
static void check_refused(const tkv_config *cfg, tkv_status expected, const char *word) {
    char reason[200] = "#", short_buf[12], not_a_cache;
    tkv_cache *kv = (tkv_cache *)(void *)&not_a_cache;
    size_t size;
    const tkv_status st = tkv_create_ex(cfg, NULL, 0, &kv, reason, sizeof reason);
    CHECK_MSG(st == expected, "%s instead of %s", tkv_get_status_text(st), tkv_get_status_text(expected));
    CHECK_MSG(strstr(reason, word) != NULL, "\"%s\" does not say \"%s\"", reason, word);
    CHECK((void *)kv == (void *)&not_a_cache);
    CHECK_EQ(tkv_create_ex(cfg, NULL, 0, &kv, NULL, 0), expected);
    CHECK_EQ(tkv_create_ex(cfg, NULL, 0, &kv, NULL, 99), expected);
    CHECK_EQ(tkv_create(cfg, &kv), expected);
    for (size = 0; size < sizeof short_buf; size++) { /* cut, nothing written behind it */
        memset(short_buf, '#', sizeof short_buf);
        CHECK_EQ(tkv_create_ex(cfg, NULL, 0, &kv, short_buf, size), expected);
        CHECK(size == 0 || (strlen(short_buf) == size - 1 && strncmp(short_buf, reason, size - 1) == 0));
        CHECK(short_buf[size] == '#');
    }
    CHECK((void *)kv == (void *)&not_a_cache);
}

TEST(every_error_has_a_sentence) {
    tkv_config cfg = make_config();
    tkv_cache *kv = NULL;
    char reason[200] = "#";
    int isa;
    CHECK_EQ(tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason), TKV_OK);
    CHECK_STR(reason, "");
    check_cache(kv);
    tkv_destroy(kv);
    CHECK_EQ(tkv_create_ex(&cfg, NULL, 0, NULL, reason, sizeof reason), TKV_ERR_ARG);
    CHECK_STR(reason, "out is missing");
    check_refused(NULL, TKV_ERR_ARG, "config is missing");
    cfg.model.n_heads = 3;
    check_refused(&cfg, TKV_ERR_CONFIG, "model.n_heads is 3; it must be a multiple of model.n_kv_heads");
    cfg = make_config();
    for (isa = 1; isa < TKV_ISA_COUNT; isa++) {
        if (is_isa_available((tkv_isa)isa)) continue;
        cfg.host.isa = (tkv_isa)isa;
        check_refused(&cfg, TKV_ERR_ISA, tkv_get_name(TKV_NAME_ISA, isa));
        check_refused(&cfg, TKV_ERR_ISA, "host.isa is ");
    }
    cfg = make_config();
    cfg.budget.bytes = 1000;
    check_refused(&cfg, TKV_ERR_BUDGET, "budget.bytes is 1000; it must be at least ");
}

/* The reason for refusing a budget names the smallest budget that works. */
/* Sizes beyond the address space are refused with their number, or say which limits are too large. */
TEST(huge_sizes_in_place_are_named) {
    static unsigned char memory[4096];
    const size_t most = (size_t)-1;
    int i;
    for (i = 0; i < 5; i++) {
        tkv_config cfg = make_sized_config(2, 2, 1, 16, 1, 64);
        char reason[200] = "", digits[32];
        tkv_cache *kv = NULL;
        tkv_status st;
        cfg.limits.max_tokens = i < 3 ? 1000 : (1 << 30) - 1;
        if (i == 0) cfg.budget.bytes = most;
        if (i == 1) cfg.limits.state_bytes = most / 2 + 1;
        if (i == 2) cfg.limits.state_bytes = most;
        if (i >= 3) cfg.limits.max_seqs = 1 << 20;
        if (i == 4) cfg.budget.bytes = most / 2;
        st = tkv_create_in_place(&cfg, memory, sizeof memory, &kv, reason, sizeof reason);
        CHECK(kv == NULL && reason[0] && !strchr(reason, '-'));
        if (i >= 2) {
            CHECK_EQ(st, TKV_ERR_CONFIG);
            CHECK(strstr(reason, "are too large in place") != NULL);
            continue;
        }
        CHECK_EQ(st, TKV_ERR_CAPACITY);
        sprintf(digits, sizeof most > 4 ? "%.4s" : "%.2s",
                sizeof most > 4 ? (i ? "9223" : "1844") : (i ? "21" : "42"));
        CHECK_MSG(strstr(reason, digits) != NULL, "%s", reason);
    }
}

TEST(smallest_budget_is_named) {
    tkv_config cfg = make_config();
    tkv_cache *kv = NULL;
    char reason[200];
    const char *number;
    cfg.budget.bytes = 1000;
    CHECK_EQ(tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason), TKV_ERR_BUDGET);
    number = strstr(reason, "at least ");
    REQUIRE(number != NULL);
    cfg.budget.bytes = (size_t)strtoul(number + 9, NULL, 10);
    REQUIRE(cfg.budget.bytes > 1000);
    CHECK_MSG(tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason) == TKV_OK, "%s", reason);
    tkv_destroy(kv);
    cfg.budget.bytes--;
    CHECK_EQ(tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason), TKV_ERR_BUDGET);
}

/* Creates a cache again and again; attempt n gets n - 1 allocations. One before `limit` must succeed. */
static void fail_each_allocation(const char *text, tkv_config cfg, int limit) {
    counting_allocator allocator;
    int n, n_refusals = 0;
    cfg.host.allocator = counting_allocator_of(&allocator);
    for (n = 1; n < limit; n++) {
        char reason[200] = "#", not_a_cache;
        tkv_cache *kv = (tkv_cache *)(void *)&not_a_cache;
        tkv_status st;
        allocator.fail_at = n;
        st = text ? tkv_create_ex(&cfg, text, strlen(text), &kv, reason, sizeof reason)
                  : tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason);
        allocator.fail_at = 0;
        if (st == TKV_OK) {
            CHECK_STR(reason, "");
            check_cache(kv);
            tkv_destroy(kv);
            break;
        }
        n_refusals++;
        CHECK_EQ(st, TKV_ERR_NOMEM);
        CHECK_MSG(strncmp(reason, "the allocator gave no memory", 28) == 0, "\"%s\"", reason);
        CHECK((void *)kv == (void *)&not_a_cache);
        CHECK_EQ(allocator.held, 0);
    }
    CHECK(n < limit && n_refusals > 0);
    CHECK_EQ(allocator.held, 0);
}

static const char many_layers[] = "model.n_layers = 60\n"
                                  "model.n_heads = 2\n"
                                  "model.head_dim = 16\n"
                                  "layers[0-29].window = 128\n"
                                  "layers[59].no_cache = true\n";

TEST(allocations_fail_one_by_one) {
    tkv_config cfg = make_config();
    fail_each_allocation(NULL, cfg, 10);
    cfg.meter.heads = 2;
    fail_each_allocation(NULL, cfg, 10);
    cfg = make_config();
    cfg.budget.bytes = 4 << 20;
    fail_each_allocation(NULL, cfg, 10);
    fail_each_allocation("model.n_layers = 5", make_config(), 10);
    fail_each_allocation(many_layers, make_config(), 10);
}

/* >>from a text */
/* Checks that the JSON reports of two caches, which include every field of the config, are equal. */
static void check_same_report(const tkv_cache *a, const tkv_cache *b) {
    char *text_a, *text_b;
    size_t size_a = 0, size_b = 0;
    CHECK_EQ(tkv_print_report(a, TKV_REPORT_JSON, NULL, NULL, 0, &size_a), TKV_OK);
    CHECK_EQ(tkv_print_report(b, TKV_REPORT_JSON, NULL, NULL, 0, &size_b), TKV_OK);
    text_a = (char *)malloc(size_a);
    text_b = (char *)malloc(size_b);
    if (!text_a || !text_b) exit(2);
    CHECK_EQ(tkv_print_report(a, TKV_REPORT_JSON, NULL, text_a, size_a, NULL), TKV_OK);
    CHECK_EQ(tkv_print_report(b, TKV_REPORT_JSON, NULL, text_b, size_b, NULL), TKV_OK);
    CHECK_STR(text_a, text_b);
    free(text_a);
    free(text_b);
}

/* Appends 768 tokens to the first three layers, so that reports show their tiers. */
static void append_many_tokens(tkv_cache *kv) {
    static float x[64 * 64];
    tkv_rng rng = tkv_rng_seed(7);
    int i, l;
    for (i = 0; i < 12; i++)
        for (l = 0; l < 3; l++) {
            tkv_rng_fill(&rng, x, 64 * 64, 1.0);
            CHECK_EQ(tkv_append(kv, 0, l, x, x, 64), TKV_OK);
        }
}

static tkv_cache *create_from_text(const char *text, const tkv_config *host) {
    tkv_cache *kv = NULL;
    char reason[200] = "#";
    const tkv_status st = tkv_create_ex(host, text, strlen(text), &kv, reason, sizeof reason);
    if (st) printf("%s: %s\n", tkv_get_status_text(st), reason);
    if (st) exit(2);
    CHECK_STR(reason, "");
    return kv;
}

TEST(text_equals_config) {
    static const char text[] = "# a plan with lists\n"
                               "model.n_layers = 4\n"
                               "model.n_heads = 4\n"
                               "model.n_kv_heads = 2\n"
                               "model.head_dim = 32\n"
                               "limits.max_seqs = 2\n"
                               "limits.max_append = 64\n"
                               "limits.max_tokens = 4096\n"
                               "tiers.archive = kvquant3/kvquant3\n"
                               "model.rope.dim = 4\n"
                               "model.rope.frequencies = [1, 0.5]\n"
                               "budget.n_levels = 2\n"
                               "budget.ladder[0].hot_tokens = 128\n"
                               "budget.ladder[1].archive = kivi2\n"
                               "layers[1-2].hot_tokens = 256\n"
                               "layers[3].share_kv = 1\n";
    static const char toml[] = "[limits]\nmax_seqs = 2\nmax_append = 64\nmax_tokens = 4_096\n"
                               "[tiers]\narchive = 'kvquant3'\n[budget]\nn_levels = 2\n"
                               "[[budget.ladder]]\nhot_tokens = 128\n[[budget.ladder]]\narchive = \"kivi2\"\n"
                               "[layers.1-2]\nhot_tokens = 256\n[layers.3]\nshare_kv = 1\n"
                               "[model]\nn_layers = 4\nn_heads = 4\nn_kv_heads = 2\nhead_dim = 32\n"
                               "rope = { dim = 4, frequencies = [1.0, 0.5] }\n";
    static const float frequencies[2] = {1.0f, 0.5f};
    tkv_layer_config layers[LAYERS];
    tkv_level ladder[2];
    tkv_config cfg = make_config(), host = tkv_default_config();
    tkv_cache *a = create_from_text(text, NULL), *b, *c;
    memset(layers, 0, sizeof layers);
    memset(ladder, 0, sizeof ladder);
    cfg.host.isa = TKV_ISA_AUTO;
    cfg.tiers.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT3);
    cfg.model.rope.dim = 4;
    cfg.model.rope.frequencies = frequencies;
    cfg.budget.ladder = ladder;
    cfg.budget.n_levels = 2;
    ladder[0].hot_tokens = 128;
    ladder[1].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.layers = layers;
    layers[1].hot_tokens = layers[2].hot_tokens = 256;
    layers[3].share_kv = 1;
    b = create_cache(&cfg);
    check_same_report(a, b);
    append_many_tokens(a);
    append_many_tokens(b);
    check_same_report(a, b);
    c = create_from_text(text, &host);
    append_many_tokens(c);
    check_same_report(a, c);
    tkv_destroy(c);
    c = create_from_text(toml, NULL);
    append_many_tokens(c);
    check_same_report(a, c);
    tkv_destroy(c);
    c = create_from_text("{\"model.n_kv_heads\": 2}", &cfg); /* lists not in the text come from cfg */
    append_many_tokens(c);
    check_same_report(b, c);
    tkv_destroy(a);
    tkv_destroy(b);
    tkv_destroy(c);
}

static int n_level_events;

static void on_event(void *user, const tkv_event *e) {
    (void)user;
    n_level_events += e->kind == TKV_EVENT_LEVEL;
}

TEST(host_fields_of_the_config_apply) {
    counting_allocator allocator;
    tkv_config host = tkv_default_config();
    tkv_cache *kv;
    test_store store;
    int done = 0, i;
    static float x[64 * 32];
    host.host.allocator = counting_allocator_of(&allocator);
    host.host.on_event = on_event;
    host.model.n_layers = 1;
    host.model.n_heads = 2;
    host.model.head_dim = 16;
    attach_test_store(&store, &host);
    host.model.n_layers = 7;
    kv = create_from_text(
        "model.n_layers = 1\nbudget.n_levels = 2\nbudget.ladder[1].hot_tokens = 9\ntiers.warm = "
        "kivi4\ntiers.archive = kivi2\n",
        &host);
    CHECK(allocator.n_requests > 0 && allocator.held > 0);
    for (i = 0; i < 10; i++) CHECK_EQ(tkv_append(kv, 0, 0, x, x, 64), TKV_OK);
    CHECK_EQ(tkv_append(kv, 0, 1, x, x, 1), TKV_ERR_ARG); /* the text sets one layer */
    CHECK_EQ(tkv_set_level(kv, 1), TKV_OK);
    CHECK_EQ(n_level_events, 1);
    CHECK_EQ(tkv_offload(kv, 0, 0, 1, &done), TKV_OK);
    CHECK_EQ(done, 1);
    CHECK(store.n_writes > 0);
    tkv_destroy(kv);
    destroy_test_store(&store);
    CHECK_EQ(allocator.held, 0);
}

/* Checks that creation from `text` returns `expected` and a reason that begins with `begin`. */
static void check_bad_text(const char *text, const tkv_config *host, tkv_status expected, const char *begin) {
    char reason[200] = "#", short_buf[8], not_a_cache;
    tkv_cache *kv = (tkv_cache *)(void *)&not_a_cache;
    const size_t n = strlen(text);
    tkv_status st = tkv_create_ex(host, text, n, &kv, reason, sizeof reason);
    CHECK_MSG(st == expected, "%s instead of %s: %s", tkv_get_status_text(st), tkv_get_status_text(expected),
              reason);
    CHECK_MSG(strncmp(reason, begin, strlen(begin)) == 0, "\"%s\" does not begin with \"%s\"", reason, begin);
    CHECK_MSG(strlen(reason) > strlen("line 3: ") + 20, "\"%s\" does not say what is allowed", reason);
    CHECK_EQ(tkv_create_ex(host, text, n, &kv, NULL, 0), expected);
    memset(short_buf, '#', sizeof short_buf);
    CHECK_EQ(tkv_create_ex(host, text, n, &kv, short_buf, 5), expected);
    CHECK(strlen(short_buf) == 4 && strncmp(short_buf, reason, 4) == 0 && short_buf[5] == '#');
    CHECK((void *)kv == (void *)&not_a_cache);
}

#define HEAD "model.n_layers = 3\nmodel.n_heads = 4\n"

TEST(errors_name_their_line) {
    check_bad_text(HEAD "head_dims = 16\n", NULL, TKV_ERR_CONFIG,
                   "line 3: head_dims is no key; the nearest one is");
    check_bad_text(HEAD "model.head_dim = much\n", NULL, TKV_ERR_CONFIG,
                   "line 3: model.head_dim is much; it must be");
    check_bad_text(HEAD "head_dim\n", NULL, TKV_ERR_CONFIG, "line 3: there is no =");
    check_bad_text(HEAD "model.n_heads = 4\n", NULL, TKV_ERR_CONFIG,
                   "line 3: model.n_heads is there for the second time");
    check_bad_text(HEAD "layers[3].window = 9\nmodel.head_dim = 16\n", NULL, TKV_ERR_CONFIG,
                   "line 3: model.n_layers is 3");
    check_bad_text(HEAD "layers[4095].window = 9\nmodel.head_dim = 16\n", NULL, TKV_ERR_CONFIG,
                   "line 3: model.n_layers is 3");
    check_bad_text(HEAD "budget.ladder[1].hot_tokens = 9\nmodel.head_dim = 16\n", NULL, TKV_ERR_CONFIG,
                   "line 3: budget.n_levels is 0");
    /* errors that only the validation of the complete config finds */
    check_bad_text(HEAD "model.head_dim = 700\n", NULL, TKV_ERR_CONFIG,
                   "line 3: model.head_dim is 700; it must be 1 to 576");
    check_bad_text(HEAD "tiers.archive = r20/r20\nmodel.head_dim = 16\n", NULL, TKV_ERR_CONFIG,
                   "line 3: tiers.archive.k is");
    check_bad_text(HEAD "layers[0-2].no_cache = 2\nmodel.head_dim = 16\n", NULL, TKV_ERR_CONFIG,
                   "line 3: layers[0].no_cache is 2; it must be 0 or 1");
    check_bad_text(HEAD "layers[1-2].no_cache = 1\nlayers[0].no_cache = 2\nmodel.head_dim = 16\n", NULL,
                   TKV_ERR_CONFIG, "line 4: layers[0].no_cache is 2; it must be 0 or 1");
    check_bad_text(HEAD "layers[0-1].no_cache = 1\nlayers[2].no_cache = 2\nmodel.head_dim = 16\n", NULL,
                   TKV_ERR_CONFIG, "line 4: layers[2].no_cache is 2; it must be 0 or 1");
    check_bad_text("model.head_dim = 16\n" HEAD "layers[1-2].hot.k = f16\n", NULL, TKV_ERR_CONFIG,
                   "line 4: ");
    check_bad_text(HEAD "layers[1].share_kv = 3\nmodel.head_dim = 16\n", NULL, TKV_ERR_CONFIG,
                   "line 3: layers[1].share_kv is 3");
    check_bad_text(HEAD "budget.bytes = 1K\nmodel.head_dim = 16\n", NULL, TKV_ERR_BUDGET,
                   "line 3: budget.bytes is 1024");
    check_bad_text("{\n\"model.n_heads\": 4,\n\"model.head_dim\": 700, \"model.n_layers\": 1}", NULL,
                   TKV_ERR_CONFIG, "line 3: model.head_dim is 700");
    check_bad_text("model.n_heads = 4\nmodel.head_dim = 16\nmodel.n_layers = 5000\nlayers[0].window = 9\n",
                   NULL, TKV_ERR_CONFIG, "line 3: model.n_layers is 5000; it must be 1 to 4096");
    check_bad_text("model.n_heads = 4\nmodel.head_dim = 16\nlayers[0].window = 9\n", NULL, TKV_ERR_CONFIG,
                   "line 3: model.n_layers is 0");
    check_bad_text("[model]\nn_heads = 4\nhead_dim = 700\nn_layers = 1\n", NULL, TKV_ERR_CONFIG,
                   "line 3: model.head_dim is 700; it must be 1 to 576");
    check_bad_text(
        "[layers.0-2]\nwindow = 5\nno_cache = 2\n[model]\nn_layers = 3\nn_heads = 4\nhead_dim = 16\n", NULL,
        TKV_ERR_CONFIG, "line 3: layers[0].no_cache is 2; it must be 0 or 1");
    check_bad_text("{\"layers\": [null, {\"window\": 5,\n\n\"share_kv\": 3}], \"model\": {\"n_layers\": 2,\n"
                   "\"n_heads\": 4, \"head_dim\": 16}}",
                   NULL, TKV_ERR_CONFIG, "line 3: layers[1].share_kv is 3");
}

TEST(errors_without_a_line) {
    tkv_config host = tkv_default_config();
    tkv_cache *kv = NULL;
    char reason[200];
    counting_allocator allocator;
    check_bad_text(HEAD, NULL, TKV_ERR_CONFIG, "model.head_dim is 0; it must be");
    check_bad_text("", NULL, TKV_ERR_CONFIG, "model.n_layers is 0; it must be");
    host.start_canary = 7;
    check_bad_text("model.n_layers = 1", &host, TKV_ERR_CONFIG, "start_canary is 1; ");
    host = tkv_default_config();
    host.host.allocator = counting_allocator_of(&allocator);
    host.host.allocator.release = NULL;
    check_bad_text(many_layers, &host, TKV_ERR_CONFIG, "host.allocator is 1; ");
    CHECK_EQ(allocator.n_requests, 0);
    host = tkv_default_config();
    host.model.n_layers = 9;
    host.format.kvquant = 99;
    check_bad_text("model.n_heads = 2\nmodel.head_dim = 16", &host, TKV_ERR_CONFIG, "format.kvquant is 99; ");
    CHECK_EQ(tkv_create_ex(NULL, NULL, 0, &kv, reason, sizeof reason), TKV_ERR_ARG);
    CHECK_STR(reason, "the config is missing");
    CHECK_EQ(tkv_create_ex(NULL, "", 0, NULL, reason, sizeof reason), TKV_ERR_ARG);
    CHECK_STR(reason, "out is missing");
    CHECK(kv == NULL);
}

/* Creation from a bad text releases all memory that it requested. */
TEST(bad_texts_leak_no_memory) {
    static const char *const ends[] = {"",
                                       "x",
                                       "layers[61].window = 1",
                                       "model.head_dim = 2",
                                       "format.kvquant = 99\n",
                                       "model.rope.dim = 6\nmodel.rope.frequencies = [1, 2]\n"};
    counting_allocator allocator;
    int i;
    for (i = 0; i < COUNT(ends); i++) {
        char text[400], reason[200];
        tkv_cache *kv = NULL;
        tkv_config host = tkv_default_config();
        tkv_status st;
        host.host.allocator = counting_allocator_of(&allocator);
        snprintf(text, sizeof text, "%s%s", many_layers, ends[i]);
        st = tkv_create_ex(&host, text, strlen(text), &kv, reason, sizeof reason);
        CHECK_MSG((st == TKV_OK) == (i == 0), "%s: %s", ends[i], reason);
        if (!st) tkv_destroy(kv);
        CHECK_EQ(allocator.held, 0);
    }
}

/* Reasons name fields of eviction with their values. Without a ladder there is only level 0. */
TEST(errors_name_their_field) {
    static const struct {
        const char *text, *reason_start;
    } cases[] = {
        {"evict.policy = snapkv\nevict.pool = 4", "line 2: evict.pool is 4; it must be odd"},
        {"evict.policy = h2o\nevict.batch = -1", "line 2: evict.batch is -1; it must be 1"},
        {"evict.policy = user", "evict.scorer is 0; it must be set"},
        {"evict.trigger = 1.5", "line 1: evict.trigger is 1.5; it must be 1e-6 to 1"},
        {"model.scale = -0.25", "line 1: model.scale is -0.25; it must be a positive number"},
        {"model.rope.dim = 32\nmodel.rope.base = 1.5", "line 2: model.rope.base is 1.5; it must be 2 to 1e9"},
        {"evict.keep_tokens = 2147483647", "line 1: evict.keep_tokens is 2147483647; it must be 1"},
        {"budget.pressure.max_level = -2", "budget.pressure: there is one level only, 0"}};
    int i;
    for (i = 0; i < COUNT(cases); i++) {
        char reason[200], text[200];
        tkv_cache *kv = NULL;
        snprintf(text, sizeof text, "%s\nmodel.n_layers = 1\nmodel.n_heads = 1\nmodel.head_dim = 32",
                 cases[i].text);
        CHECK_EQ(tkv_create_ex(NULL, text, strlen(text), &kv, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_MSG(strncmp(reason, cases[i].reason_start, strlen(cases[i].reason_start)) == 0, "%s", reason);
    }
    {
        char reason[200];
        tkv_config cfg = tkv_default_config();
        cfg.model.n_layers = cfg.model.n_heads = 1;
        cfg.model.head_dim = 32;
        cfg.budget.pressure.profile = TKV_PROFILE_AGGRESSIVE; /* without a ladder it changes nothing */
        CHECK_MSG(tkv_validate_config(&cfg, reason, sizeof reason) == TKV_OK, "%s", reason);
        CHECK_EQ(tkv_validate_config(NULL, reason, sizeof reason), TKV_ERR_ARG);
        CHECK_STR(reason, "the config is missing");
    }
}

/* A config with its defaults makes the same cache again. */
TEST(config_is_reported) {
    tkv_config cfg = tkv_default_config(), got, again;
    tkv_cache *kv = NULL, *other = NULL;
    char reason[160] = "";
    cfg.model.n_layers = 3;
    cfg.model.n_heads = 8;
    cfg.model.head_dim = 64;
    cfg.tiers.sink_tokens = 7;
    cfg.host.isa = tkv_test_isa();
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    CHECK_EQ(tkv_get_config(kv, &got), TKV_OK);
    CHECK_EQ(got.model.n_layers, 3);
    CHECK_EQ(got.model.n_kv_heads, 8);
    CHECK_EQ(got.model.v_head_dim, 64);
    CHECK_EQ(got.limits.max_seqs, 1);
    CHECK_EQ(got.limits.max_append, 512);
    CHECK_EQ(got.limits.max_tokens, (1 << 30) - 1);
    CHECK_EQ(got.tiers.sink_tokens, 7);
    CHECK(!got.layers && !got.budget.ladder && !got.model.rope.frequencies);
    CHECK_EQ(tkv_create(&got, &other), TKV_OK);
    CHECK_EQ(tkv_get_config(other, &again), TKV_OK);
    CHECK_MEM(&again, &got, sizeof got);
    tkv_destroy(kv);
    tkv_destroy(other);
    kv = other = NULL;
    cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    CHECK_EQ(tkv_apply_preset(&cfg, "by-length"), TKV_OK); /* a ladder, which is not kept */
    CHECK_MSG(tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason) == TKV_OK, "%s", reason);
    CHECK_EQ(tkv_get_config(kv, &got), TKV_OK);
    CHECK_EQ(tkv_create(&got, &other), TKV_OK);
    CHECK_EQ(tkv_get_config(NULL, &got), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_config(kv, NULL), TKV_ERR_ARG);
    tkv_destroy(kv);
    tkv_destroy(other);
}

TEST(build_is_reported) {
    tkv_build_info build;
    CHECK_EQ(tkv_get_build(NULL, &build), TKV_OK);
    CHECK_EQ(build.version, TKV_VERSION);
    CHECK_EQ(build.config_bytes, sizeof(tkv_config));
    CHECK(build.isa_mask >> TKV_ISA_SCALAR & 1u);
    CHECK_EQ(build.isa, TKV_ISA_AUTO);
    CHECK_EQ(tkv_get_build(NULL, NULL), TKV_ERR_ARG);
}

/* The table of chapter 17 of the manual, which tests/test_manual.py compares: bytes of the public structs with 64-bit
 * pointers, and on i386. Another size is another ABI. */
#define SIZE(name, on_lp64, on_i386)                                                                         \
    { #name, (int)sizeof(tkv_##name), on_lp64, on_i386 }

TEST(sizes_of_public_structs) {
    static const struct {
        const char *name;
        int bytes, on_lp64, on_i386;
    } sizes[] = {SIZE(allocator, 24, 12),
                 SIZE(format_pair, 8, 8),
                 SIZE(rope, 32, 28),
                 SIZE(layer_config, 104, 100),
                 SIZE(level, 28, 28),
                 SIZE(pressure_config, 52, 52),
                 SIZE(importance_config, 32, 32),
                 SIZE(promotion_config, 16, 16),
                 SIZE(evict_config, 56, 48),
                 SIZE(event, 56, 36),
                 SIZE(offload_config, 48, 24),
                 SIZE(remat_config, 56, 52),
                 SIZE(recompute_config, 72, 60),
                 SIZE(model_config, 72, 64),
                 SIZE(limits_config, 24, 20),
                 SIZE(tiers_config, 40, 40),
                 SIZE(format_options, 52, 52),
                 SIZE(budget_config, 80, 72),
                 SIZE(meter_config, 16, 16),
                 SIZE(host_config, 72, 44),
                 SIZE(config, 608, 500),
                 SIZE(rows, 8, 8),
                 SIZE(append_params, 112, 64),
                 SIZE(attend_params, 264, 148),
                 SIZE(save_info, 32, 20),
                 SIZE(save_params, 88, 48),
                 SIZE(load_params, 80, 44),
                 SIZE(load_info, 32, 24),
                 SIZE(prefix_hash, 32, 32),
                 SIZE(prefix_extra, 24, 12),
                 SIZE(prefix_params, 88, 48),
                 SIZE(prefix_store, 32, 16),
                 SIZE(prefix_info, 24, 20),
                 SIZE(tier_bytes, 24, 12),
                 SIZE(memory_info, 184, 100),
                 SIZE(seq_memory_info, 24, 12),
                 SIZE(pressure_info, 56, 56),
                 SIZE(budget_info, 232, 220),
                 SIZE(level_info, 48, 44),
                 SIZE(layer_info, 280, 192),
                 SIZE(evict_params, 64, 36),
                 SIZE(ranked, 8, 8),
                 SIZE(remat_block, 40, 28),
                 SIZE(remat_info, 64, 64),
                 SIZE(remat, 136, 128),
                 SIZE(promotion_state, 48, 48),
                 SIZE(promotion, 88, 72),
                 SIZE(calibration_info, 8, 8),
                 SIZE(samples, 48, 32),
                 SIZE(quality_info, 64, 60),
                 SIZE(feedback_config, 24, 24),
                 SIZE(advice, 32, 28),
                 SIZE(feedback_info, 72, 68),
                 SIZE(feedback, 4112, 4112),
                 SIZE(score_params, 40, 32),
                 SIZE(threshold, 96, 96),
                 SIZE(thresholds, 16, 12),
                 SIZE(codec, 104, 96),
                 SIZE(build_info, 24, 16),
                 SIZE(config_arrays, 48, 24),
                 SIZE(pressure, 112, 112),
                 SIZE(token_importance, 8, 8),
                 SIZE(evict_view, 104, 56),
                 SIZE(evict_result, 20, 20),
                 SIZE(evict_budget, 32, 28)};
#if defined(__i386__) && !defined(_WIN32) /* elsewhere 8 bytes are aligned otherwise */
    const int is_i386 = 1;
#else
    const int is_i386 = 0;
#endif
    int i;
    if (sizeof(void *) != 8 && !is_i386) SKIP("sizes are known with 64-bit pointers, and on i386");
    for (i = 0; i < COUNT(sizes); i++) {
        const int want = is_i386 ? sizes[i].on_i386 : sizes[i].on_lp64;
        CHECK_MSG(sizes[i].bytes == want, "tkv_%s has %d bytes, not %d", sizes[i].name, sizes[i].bytes, want);
    }
}
#undef SIZE

/* Each status has a text of its own, and other numbers have one in common. */
TEST(statuses_have_texts) {
#define STATUS_VALUE_(name, value, text) name,
    static const tkv_status all[] = {TKV_STATUS_LIST(STATUS_VALUE_)};
#undef STATUS_VALUE_
    int i, k;
    for (i = 0; i < COUNT(all); i++)
        for (k = 0; k < i; k++) CHECK(strcmp(tkv_get_status_text(all[i]), tkv_get_status_text(all[k])) != 0);
    CHECK_STR(tkv_get_status_text(TKV_STATUS_LAST_), "unknown status");
    CHECK_STR(tkv_get_status_text(TKV_OK), "ok");
}

TEST(reports_of_nothing_are_refused) {
    tkv_config cfg = make_config();
    tkv_cache *kv = create_cache(&cfg);
    float row[2 * 32] = {0};
    tkv_memory_info memory;
    tkv_layer_info layer;
    tkv_build_info build;
    uint8_t tier = 0;
    int n = 0;
    CHECK_EQ(tkv_get_memory(NULL, &memory), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_memory(kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_layer(kv, 0, LAYERS, &layer), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_config(NULL, &cfg), TKV_ERR_ARG);
    CHECK_EQ(tkv_append(kv, 0, 0, row, row, 1), TKV_OK);
    CHECK_EQ(tkv_get_tiers(kv, 0, 0, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_tiers(kv, 0, 0, 0, 1, &tier), TKV_OK);
    CHECK_EQ(tier, TKV_TIER_HOT);
    CHECK_EQ(tkv_get_tiers(kv, 0, 0, 0, 0, NULL), TKV_OK);
    CHECK_EQ(tkv_get_build(kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_build(kv, &build), TKV_OK);
    CHECK(build.isa_mask >> (int)build.isa & 1u);
    CHECK(build.isa != TKV_ISA_AUTO);
    CHECK_EQ(tkv_check(kv, NULL, 9), TKV_OK);
    CHECK_EQ(tkv_check(NULL, NULL, 0), TKV_ERR_ARG);
    tkv_destroy(kv);
    CHECK_EQ(tkv_estimate_context(&cfg, 1, &n), TKV_ERR_ARG); /* no budget */
    cfg.budget.bytes = 4 << 20;
    CHECK_EQ(tkv_estimate_context(&cfg, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_estimate_context(&cfg, 0, &n), TKV_ERR_ARG);
    CHECK_EQ(tkv_estimate_context(&cfg, 3, &n), TKV_ERR_ARG);
    CHECK_EQ(tkv_estimate_context(&cfg, 2, &n), TKV_OK);
    cfg.model.n_heads = 3;
    CHECK_EQ(tkv_estimate_context(&cfg, 1, &n), TKV_ERR_CONFIG);
    CHECK_EQ(tkv_estimate_memory(&cfg, 1, 1, &memory), TKV_ERR_CONFIG);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(every_error_has_a_sentence);
    RUN(huge_sizes_in_place_are_named);
    RUN(smallest_budget_is_named);
    RUN(allocations_fail_one_by_one);
    RUN(text_equals_config);
    RUN(host_fields_of_the_config_apply);
    RUN(errors_name_their_line);
    RUN(errors_without_a_line);
    RUN(bad_texts_leak_no_memory);
    RUN(errors_name_their_field);
    RUN(config_is_reported);
    RUN(build_is_reported);
    RUN(sizes_of_public_structs);
    RUN(statuses_have_texts);
    RUN(reports_of_nothing_are_refused);
    return tkv_test_end();
}
