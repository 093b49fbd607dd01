/*
 * test_sequence.c - configs, tiers by age, appends, steps, reservations, truncation, windows.
 *
 * The expected tier of each token is computed here from the rules of the manual. The expected values of a coded
 * tier come from tkv_encode_block and tkv_decode_block. Reads are compared by bits.
 */
#include "sequences.h"

/* Checks that a call returned `want`, that its message contains `word`, and that nothing changed. Frees
 * `before`. */
static void check_refusal(tkv_cache *kv, tkv_status got, tkv_status want, const char *word,
                          snapshot *before) {
    const char *message = tkv_get_last_error(kv);
    CHECK_MSG(got == want, "%s instead of %s", tkv_get_status_text(got), tkv_get_status_text(want));
    CHECK_MSG(message && strstr(message, word), "\"%s\" does not contain \"%s\"", message, word);
    check_unchanged(kv, before, word);
}

/* >>config */
static void check_bad_config(const tkv_config *cfg, const char *field, const char *value) {
    char reason[200], create_reason[200], short_buf[12];
    size_t bytes = 77, size;
    char mem[64];
    tkv_memory_info info;
    tkv_cache *kv = (tkv_cache *)(void *)mem;
    CHECK_MSG(tkv_validate_config(cfg, reason, sizeof reason) == TKV_ERR_CONFIG, "%s %s", field, value);
    CHECK_MSG(strncmp(reason, field, strlen(field)) == 0, "\"%s\" does not begin with %s", reason, field);
    CHECK_MSG(strstr(reason, value) != NULL, "\"%s\" does not name the value %s", reason, value);
    CHECK_MSG(strlen(reason) > strlen(field) + 12, "\"%s\" does not say what is allowed", reason);
    CHECK_EQ(tkv_validate_config(cfg, NULL, 0), TKV_ERR_CONFIG);
    /* a short buffer gets the beginning and no byte beyond its size */
    for (size = 0; size < sizeof short_buf; size++) {
        memset(short_buf, '#', sizeof short_buf);
        CHECK_EQ(tkv_validate_config(cfg, short_buf, size), TKV_ERR_CONFIG);
        CHECK(size == 0 || (strlen(short_buf) == size - 1 && strncmp(short_buf, reason, size - 1) == 0));
        CHECK(short_buf[size] == '#');
    }
    CHECK_EQ(tkv_create(cfg, &kv), TKV_ERR_CONFIG);
    CHECK_EQ(tkv_create_ex(cfg, NULL, 0, &kv, create_reason, sizeof create_reason), TKV_ERR_CONFIG);
    CHECK_STR(create_reason, reason);
    CHECK((void *)kv == (void *)mem); /* not written */
    CHECK_EQ(tkv_get_required_bytes(cfg, &bytes, NULL), TKV_ERR_CONFIG);
    CHECK_EQ(bytes, 77);
    CHECK_EQ(tkv_create_in_place(cfg, mem, sizeof mem, &kv, NULL, 0), TKV_ERR_CONFIG);
    memset(&info, 0x5a, sizeof info);
    CHECK_EQ(tkv_estimate_memory(cfg, 1, 1, &info), TKV_ERR_CONFIG);
    CHECK(((unsigned char *)&info)[0] == 0x5a);
}

static void check_good_config(const tkv_config *cfg, const char *what) {
    char reason[200];
    tkv_status st = tkv_validate_config(cfg, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s: %s", what, reason);
    CHECK_STR(reason, "");
}

/* Checks each value in this field of a config that is otherwise valid. */
#define BAD(field, type, ...)                                                                                \
    do {                                                                                                     \
        static const int values_[] = {__VA_ARGS__};                                                          \
        int i_;                                                                                              \
        for (i_ = 0; i_ < COUNT(values_); i_++) {                                                            \
            tkv_config c_ = make_config(2, 1);                                                               \
            c_.field = (type)values_[i_];                                                                    \
            snprintf(text, sizeof text, "%d", values_[i_]);                                                  \
            check_bad_config(&c_, #field, text);                                                             \
        }                                                                                                    \
    } while (0)
#define GOOD(field, type, ...)                                                                               \
    do {                                                                                                     \
        static const int values_[] = {__VA_ARGS__};                                                          \
        int i_;                                                                                              \
        for (i_ = 0; i_ < COUNT(values_); i_++) {                                                            \
            tkv_config c_ = make_config(2, 1);                                                               \
            c_.field = (type)values_[i_];                                                                    \
            check_good_config(&c_, #field);                                                                  \
        }                                                                                                    \
    } while (0)

TEST(config_each_field) {
    char text[32];
    tkv_config cfg = make_config(2, 1);
    check_good_config(&cfg, "plain");
    CHECK_EQ(tkv_validate_config(NULL, text, sizeof text), TKV_ERR_ARG);
    CHECK_EQ(tkv_create(&cfg, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_create(NULL, NULL), TKV_ERR_ARG);
    BAD(model.n_layers, int, 0, -1, 4097);
    GOOD(model.n_layers, int, 1, 4096);
    BAD(model.n_heads, int, 0, -4, 65537, 3);
    GOOD(model.n_heads, int, KV_HEADS, 65536);
    BAD(model.n_kv_heads, int, -1, 65537);
    GOOD(model.n_kv_heads, int, 0, 1, 4);
    BAD(model.head_dim, int, 0, -1, 577);
    GOOD(model.head_dim, int, 1, 256);
    BAD(model.v_head_dim, int, -1, 577);
    GOOD(model.v_head_dim, int, 0, 1, 256);
    BAD(limits.max_seqs, int, -1, (1 << 20) + 1);
    GOOD(limits.max_seqs, int, 0, 1 << 20);
    BAD(limits.max_tokens, int, -1, 1 << 30);
    GOOD(limits.max_tokens, int, 1, (1 << 30) - 1);
    BAD(limits.max_append, int, -1, (1 << 20) + 1);
    GOOD(limits.max_append, int, 1, 1 << 20);
    BAD(tiers.sink_tokens, int, -2, 65);
    GOOD(tiers.sink_tokens, int, TKV_OFF, 1, 64);
    BAD(tiers.hot_tokens, int, -3, 1 << 30);
    GOOD(tiers.hot_tokens, int, TKV_OFF, TKV_UNLIMITED, (1 << 30) - 1);
    BAD(tiers.warm_tokens, int, -3, 1 << 30);
    GOOD(tiers.warm_tokens, int, TKV_OFF, TKV_UNLIMITED, 1);
    BAD(format.group_size, int, -1, 1, 16, 128);
    GOOD(format.group_size, int, 32, 64);
    BAD(model.window, int, -2, 1 << 30);
    GOOD(model.window, int, TKV_OFF, 1, (1 << 30) - 1);
    BAD(tiers.hot.k, tkv_format, -1, TKV_FORMAT_COUNT, TKV_Q8);
    BAD(tiers.hot.v, tkv_format, TKV_KIVI4, 99);
    BAD(tiers.warm.k, tkv_format, 99, TKV_FORMAT_COUNT);
    BAD(tiers.warm.v, tkv_format, -2);
    BAD(tiers.archive.k, tkv_format, TKV_FORMAT_COUNT);
    BAD(tiers.archive.v, tkv_format, TKV_FORMAT_COUNT);
    GOOD(tiers.hot.k, tkv_format, TKV_F32);
    GOOD(tiers.hot.v, tkv_format, TKV_BF16);
    GOOD(tiers.warm.k, tkv_format, TKV_F32, TKV_KIVI2);
    GOOD(tiers.archive.v, tkv_format, TKV_Q8);
    BAD(host.nonfinite, tkv_nonfinite, -1, 2);
    GOOD(host.nonfinite, tkv_nonfinite, TKV_NONFINITE_SATURATE);
    BAD(model.v_in_k, int, -1, 2);
    BAD(model.window_sinks, int, -2, 2);
    BAD(limits.max_states, int, -1, 65537);
    BAD(tiers.n_anchors, int, -1, 1025);
    BAD(importance.sample_every, int, -1, 1 << 30);
    BAD(budget.discard, int, -1, 2);
    BAD(budget.adapt, int, -1, 2);
    BAD(budget.n_levels, int, -1, 1, 9); /* 1: without a ladder */
    BAD(meter.heads, int, -1, 65);
    BAD(meter.tokens, int, -1, 127, 1 << 30);
    BAD(meter.every, int, -1, 1 << 30);
    BAD(offload.keep_exact, int, -1, 2);
    BAD(host.precise, int, -1, 2);
    BAD(host.wipe_freed, int, -1, 2);
    GOOD(host.precise, int, 1);
    BAD(host.isa, tkv_isa, -1, TKV_ISA_COUNT);
    /* valid in a config; tkv_create returns TKV_ERR_ISA where it is missing */
    GOOD(host.isa, tkv_isa, TKV_ISA_AVX512);
    cfg.model.scale = -0.5f;
    check_bad_config(&cfg, "model.scale", "");
    cfg.model.scale = tkv_test_float(0x7fc00000u);
    check_bad_config(&cfg, "model.scale", "");
    cfg.model.scale = tkv_test_float(0x7f800000u);
    check_bad_config(&cfg, "model.scale", "");
    cfg = make_config(2, 1);
    cfg.start_canary = 1;
    check_bad_config(&cfg, "start_canary", "0");
    cfg = make_config(2, 1);
    cfg.end_canary = 0x80000000u;
    check_bad_config(&cfg, "end_canary", "0");
    cfg = make_config(2, 1);
    cfg.host.allocator.alloc = counting_alloc;
    check_bad_config(&cfg, "host.allocator", "alloc");
    cfg = make_config(2, 1);
    cfg.host.allocator.release = counting_release;
    check_bad_config(&cfg, "host.allocator", "release");
}

#define BAD_LAYER(field, type, ...)                                                                          \
    do {                                                                                                     \
        static const int values_[] = {__VA_ARGS__};                                                          \
        int i_;                                                                                              \
        for (i_ = 0; i_ < COUNT(values_); i_++) {                                                            \
            tkv_config c_ = make_config(3, 1);                                                               \
            memset(layers, 0, sizeof layers);                                                                \
            c_.layers = layers;                                                                              \
            layers[1].field = (type)values_[i_];                                                             \
            snprintf(text, sizeof text, "%d", values_[i_]);                                                  \
            check_bad_config(&c_, "layers[1]." #field, text);                                                \
        }                                                                                                    \
    } while (0)

TEST(config_each_layer) {
    tkv_layer_config layers[3];
    char text[32];
    tkv_config cfg = make_config(3, 1);
    memset(layers, 0, sizeof layers);
    cfg.layers = layers;
    check_good_config(&cfg, "layers of zeros");
    BAD_LAYER(sink_tokens, int, 65, -2);
    BAD_LAYER(hot_tokens, int, -3);
    BAD_LAYER(warm_tokens, int, -3, 1 << 30);
    BAD_LAYER(window, int, -2, 1 << 30);
    BAD_LAYER(window_sinks, int, -2, 2);
    BAD_LAYER(v_in_k, int, -2, 2);
    BAD_LAYER(n_heads, int, -1, 65537);
    BAD_LAYER(n_kv_heads, int, -1, 65537);
    BAD_LAYER(head_dim, int, -1, 577);
    BAD_LAYER(v_head_dim, int, -1, 577);
    BAD_LAYER(hot.k, tkv_format, TKV_KIVI2);
    BAD_LAYER(hot.v, tkv_format, 99);
    BAD_LAYER(warm.k, tkv_format, -1);
    BAD_LAYER(warm.v, tkv_format, TKV_FORMAT_COUNT);
    BAD_LAYER(archive.k, tkv_format, 50);
    BAD_LAYER(archive.v, tkv_format, -7);
    BAD_LAYER(no_cache, int, 2, -1);
    BAD_LAYER(share_kv, int, -1, 2, 3); /* 2: the layer itself; 3: a later layer */
    memset(layers, 0, sizeof layers);
    layers[1].share_kv = 1;
    check_good_config(&cfg, "a share of an earlier layer");
    layers[2].share_kv = 2; /* layer 1 itself shares */
    check_bad_config(&cfg, "layers[2].share_kv", "2");
    layers[2].share_kv = 1;
    check_good_config(&cfg, "two shares of one layer");
    layers[0].no_cache = 1; /* layer 0 has no cache */
    check_bad_config(&cfg, "layers[1].share_kv", "1");
    memset(layers, 0, sizeof layers);
    layers[1].share_kv = 1;
    layers[1].no_cache = 1;
    check_bad_config(&cfg, "layers[1].share_kv", "1");
    layers[0].no_cache = layers[1].no_cache = layers[2].no_cache = 1;
    layers[1].share_kv = 0;
    check_bad_config(&cfg, "layers", "3"); /* no layer has a cache */
}

/* A layer that stores no K and V has no V inside K, and the RoPE of a layer is whole. */
TEST(config_fields_of_a_layer_that_need_others) {
    static const float frequencies[DIM / 2] = {1.0f};
    tkv_layer_config layers[2];
    tkv_config cfg = make_config(2, 1);
    int i;
    cfg.layers = layers;
    for (i = 0; i < 2; i++) {
        memset(layers, 0, sizeof layers);
        layers[1].v_in_k = 1;
        layers[1].no_cache = i == 0;
        layers[1].share_kv = i == 1;
        check_bad_config(&cfg, "layers[1].v_in_k", "1");
    }
    for (i = 0; i < 5; i++) {
        memset(layers, 0, sizeof layers);
        layers[1].rope.interleaved = i == 0;
        layers[1].rope.first = i == 1;
        layers[1].rope.base = i == 2 ? 1e4f : 0.0f;
        layers[1].rope.scale = i == 3 ? 2.0f : 0.0f;
        layers[1].rope.frequencies = i == 4 ? frequencies : NULL;
        check_bad_config(&cfg, "layers[1].rope.dim", "0");
    }
    memset(layers, 0, sizeof layers);
    cfg.tiers.n_anchors = 1;
    layers[0].no_cache = 1;
    check_good_config(&cfg, "a layer without a cache has no anchors");
    layers[0].no_cache = 0;
    layers[1].share_kv = 1;
    layers[1].sink_tokens = TKV_OFF;
    check_good_config(&cfg, "the anchors of a layer that shares K and V are those of the other one");
    layers[1].share_kv = 0;
    check_bad_config(&cfg, "tiers.n_anchors", "layer has no sinks");
}

TEST(config_pressure_of_one_level) {
    static const tkv_level level = {0, 0, {TKV_Q8, TKV_Q8}, {TKV_KIVI2, TKV_KIVI2}, 0};
    tkv_config cfg = make_config(2, 1);
    int i;
    cfg.budget.bytes = 4 << 20;
    cfg.budget.ladder = &level;
    cfg.budget.n_levels = 1;
    cfg.budget.pressure.max_level = TKV_OFF;
    check_good_config(&cfg, "max_level TKV_OFF");
    for (i = 0; i < 3; i++) {
        cfg.budget.pressure.max_level = i == 0 ? 1 : i == 1 ? TKV_OFF - 1 : 0;
        cfg.budget.pressure.min_level = i == 2;
        check_bad_config(&cfg, "budget.pressure: ", "one level only");
    }
    cfg.budget.pressure.min_level = 0;
    cfg.budget.pressure.profile = (tkv_pressure_profile)(96 + i);
    check_bad_config(&cfg, "budget.pressure: ", "profile");
}

/* A config that was never zeroed is refused. */
TEST(config_of_garbage_is_refused) {
    static const int bytes[] = {0x01, 0x5a, 0xcd, 0xff};
    tkv_rng rng = tkv_rng_seed(11);
    char reason[120];
    int i, round;
    size_t j;
    for (i = 0; i < COUNT(bytes); i++) {
        tkv_config cfg;
        memset(&cfg, bytes[i], sizeof cfg);
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_MSG(strncmp(reason, "start_canary", 12) == 0, "%s", reason);
    }
    /* canaries are zero, and every second config has plausible sizes */
    for (round = 0; round < 2000; round++) {
        tkv_config cfg;
        unsigned char *at = (unsigned char *)&cfg;
        tkv_status st;
        for (j = 0; j < sizeof cfg; j++) at[j] = (unsigned char)tkv_rng_below(&rng, 256);
        cfg.start_canary = cfg.end_canary = 0;
        cfg.layers = NULL;
        if (round % 2) {
            cfg.model.n_layers = 1 + tkv_rng_below(&rng, 4);
            cfg.model.n_heads = cfg.model.n_kv_heads = 1;
            cfg.model.head_dim = 1 + tkv_rng_below(&rng, 300);
        }
        st = tkv_validate_config(&cfg, reason, sizeof reason);
        CHECK_EQ(st, TKV_ERR_CONFIG);
        CHECK(strlen(reason) > 10);
    }
}

/* tkv_validate_config must explain each config that tkv_create refuses. */
TEST(validate_config_explains_refusals) {
    tkv_layer_config layers[200];
    tkv_config cfg = make_config(200, 1);
    tkv_cache *kv = NULL;
    char reason[160];
    size_t bytes;
    tkv_status created, validated;
    int i;
    memset(layers, 0, sizeof layers);
    cfg.layers = layers;
    for (i = 0; i < 200; i++) { /* 64 lengths of sinks, 4 pairs of hot formats */
        layers[i].sink_tokens = 1 + i % 64;
        layers[i].hot.k = (tkv_format)(TKV_F32 + i / 64 % 3);
        layers[i].hot.v = (tkv_format)(TKV_F32 + i / 64 / 3);
    }
    validated = tkv_validate_config(&cfg, reason, sizeof reason);
    created = tkv_create(&cfg, &kv);
    CHECK_MSG(validated == created, "too many kinds of blocks: create says \"%s\", validate \"%s\"",
              tkv_get_status_text(created), tkv_get_status_text(validated));
    if (!created) tkv_destroy(kv);
    memset(layers, 0, sizeof layers);
    cfg = make_config(2, 1);
    cfg.layers = layers;
    layers[1].v_in_k = 2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, "layers[1].v_in_k is 2; it must be 1, 0 (default) or TKV_OFF");
    layers[1].v_in_k = 1;
    layers[1].v_head_dim = DIM + 4;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "layers[1].v_head_dim is 16; it must be at most head_dim") == reason, "%s",
              reason);
    memset(layers, 0, sizeof layers);
    cfg.budget.bytes = 4 << 20;
    cfg.budget.pressure.threshold[0] = .8f;
    cfg.budget.pressure.threshold[2] = .9f; /* [1] is missing */
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "without gaps") != NULL, "%s", reason);
    cfg = make_config(1, 1);
    cfg.model.head_dim = 576;
    cfg.model.rope.dim = 514;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "rope.dim is 514; it must be at most 510") != NULL, "%s", reason);
    { /* 4096 layers with tables of their own, and eight formats */
        static const tkv_format k[] = {TKV_A40, TKV_A35,  TKV_A30, TKV_A275,
                                       TKV_A25, TKV_A225, TKV_A20, TKV_A175};
        static tkv_level ladder[COUNT(k)];
        cfg = make_config(4096, 1);
        for (i = 0; i < COUNT(k); i++) {
            ladder[i].archive.k = k[i];
            ladder[i].archive.v = TKV_R20;
        }
        cfg.budget.ladder = ladder;
        cfg.budget.n_levels = COUNT(k);
        cfg.budget.bytes = (size_t)1 << 30;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_MSG(strstr(reason, "layers is 4096; their formats") == reason, "%s", reason);
        cfg.model.n_layers = 64;
        check_good_config(&cfg, "64 layers with eight formats");
    }
    cfg = make_config(1, 1); /* max_tokens is 0: only caches in place need it */
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_ERR_CONFIG);
    cfg = make_config(1, 1);
    cfg.model.n_heads = cfg.model.n_kv_heads = 65536;
    cfg.model.head_dim = cfg.model.v_head_dim = 256;
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
    validated = tkv_validate_config(&cfg, reason, sizeof reason);
    if (sizeof(size_t) == 4) CHECK_EQ(validated, TKV_ERR_CONFIG); /* a block has 8 GiB */
}

TEST(config_presets) {
    int i, k;
    tkv_config cfg = make_config(1, 0), same;
    for (i = 0; tkv_get_name(TKV_NAME_PRESET, i); i++) {
        tkv_cache *kv;
        cfg = make_config(1, 0);
        cfg.tiers.warm_tokens = 7;
        cfg.tiers.hot.k = TKV_BF16;
        CHECK_EQ(tkv_apply_preset(&cfg, tkv_get_name(TKV_NAME_PRESET, i)), TKV_OK);
        CHECK(cfg.tiers.warm_tokens != 7);
        CHECK_EQ(cfg.tiers.hot.k, TKV_FORMAT_DEFAULT);
        CHECK(cfg.tiers.warm.k && cfg.tiers.warm.v && cfg.tiers.archive.k && cfg.tiers.archive.v);
        cfg.format.kvquant = TKV_KVQUANT_POST_ROPE; /* the config has no RoPE */
        kv = create_cache(&cfg);
        for (k = 0; k < 3; k++) CHECK_EQ(append_tokens(kv, 0, 0, 1, 512), TKV_OK);
        CHECK_EQ(tkv_check(kv, NULL, 0), TKV_OK);
        tkv_destroy(kv);
    }
    CHECK(i >= 6);
    CHECK(tkv_get_name(TKV_NAME_PRESET, -1) == NULL);
    same = cfg;
    CHECK_EQ(tkv_apply_preset(&cfg, "Quality"), TKV_ERR_ARG);
    CHECK_EQ(tkv_apply_preset(&cfg, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_apply_preset(NULL, "quality"), TKV_ERR_ARG);
    CHECK_MEM(&cfg, &same, sizeof cfg);
    { /* "by-context" chooses formats by max_tokens */
        static const int tokens[] = {0, 2047, 2048, 8191, 8192};
        static const tkv_format wanted[] = {TKV_KVQUANT3, TKV_KIVI2, TKV_SQUAT2, TKV_SQUAT2, TKV_KVQUANT3};
        for (i = 0; i < COUNT(tokens); i++) {
            tkv_config sized = tkv_default_config();
            sized.limits.max_tokens = tokens[i];
            CHECK_EQ(tkv_apply_preset(&sized, "by-context"), TKV_OK);
            CHECK_EQ(sized.tiers.archive.k, wanted[i]);
        }
    }
    { /* "by-length" and "growing" bring a ladder, which a later preset removes; one of the program stays */
        static const tkv_level own = {0, 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0};
        tkv_config by_length = tkv_default_config();
        CHECK_EQ(tkv_apply_preset(&by_length, "by-length"), TKV_OK);
        REQUIRE(by_length.budget.n_levels == 3);
        for (i = 0; i < 3; i++)
            CHECK_EQ(by_length.budget.ladder[i].from_tokens, i == 0 ? 0 : i == 1 ? 2048 : 8192);
        CHECK_EQ(by_length.budget.ladder[2].archive.v, TKV_KVQUANT3);
        CHECK_EQ(tkv_apply_preset(&by_length, "growing"), TKV_OK);
        REQUIRE(by_length.budget.n_levels == 3);
        CHECK_EQ(by_length.budget.ladder[2].archive.k, TKV_A25);
        CHECK_EQ(tkv_apply_preset(&by_length, "balanced"), TKV_OK);
        CHECK(by_length.budget.ladder == NULL && by_length.budget.n_levels == 0);
        by_length.budget.ladder = &own;
        by_length.budget.n_levels = 1;
        CHECK_EQ(tkv_apply_preset(&by_length, "compact"), TKV_OK);
        CHECK(by_length.budget.ladder == &own && by_length.budget.n_levels == 1);
    }
}

/* A config of zeros gives the tiers of the preset "balanced". */
TEST(config_zero_is_balanced) {
    tkv_config cfg = tkv_default_config(), named;
    tkv_cache *a, *b;
    tkv_tier tier;
    cfg.model.n_layers = cfg.model.n_heads = 1;
    cfg.model.head_dim = 32;
    named = cfg;
    CHECK_EQ(tkv_apply_preset(&named, "balanced"), TKV_OK);
    a = create_cache(&cfg);
    b = create_cache(&named);
    for (tier = TKV_TIER_HOT; tier < TKV_TIER_COUNT; tier = (tkv_tier)(tier + 1)) {
        tkv_format_pair x = {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, y = x;
        CHECK_EQ(get_tier_formats(a, 0, tier, &x), TKV_OK);
        CHECK_EQ(get_tier_formats(b, 0, tier, &y), TKV_OK);
        CHECK_EQ(x.k, y.k);
        CHECK_EQ(x.v, y.v);
    }
    CHECK_EQ(get_tier_formats(a, 9, TKV_TIER_HOT, NULL), TKV_ERR_ARG);
    tkv_destroy(a);
    tkv_destroy(b);
}

TEST(config_defaults) {
    tkv_config cfg = tkv_default_config(), zero;
    tkv_cache *kv;
    tkv_layer_info info;
    snapshot before;
    memset(&zero, 0, sizeof zero);
    CHECK_MEM(&cfg, &zero, sizeof zero);
    cfg = make_config(1, 0);
    kv = create_cache(&cfg);
    CHECK_EQ(append_tokens(kv, 0, 0, 1, 512), TKV_OK);
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 0, 0, 1, 513), TKV_ERR_CAPACITY, "512", &before); /* max_append */
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 1, 0, 1, 1), TKV_ERR_ARG, "1", &before); /* max_seqs */
    CHECK_EQ(append_tokens(kv, 0, 0, 1, 512), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 0, 1, 1), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    /* Tokens were last aged at length 1024. Whole blocks after the sinks that end by 960 left the tail.
     * Those that end by 512 left the warm tier. */
    CHECK_EQ(info.tokens[TKV_TIER_ARCHIVE], (512 - 4) / 64 * 64);
    CHECK_EQ(info.tokens[TKV_TIER_WARM], (960 - 4) / 64 * 64 - (512 - 4) / 64 * 64);
    CHECK_EQ(info.tokens[TKV_TIER_HOT], 1025 - (960 - 4) / 64 * 64);
    check_read(kv, 0, 0, 1, 0, 4, TKV_F16);
    check_read(kv, 0, 0, 1, 1025 - 64, 64, TKV_F16);
    CHECK_STR(tkv_get_name(TKV_NAME_FORMAT, (int)info.format[TKV_TIER_WARM].k), "kivi4");
    CHECK_STR(tkv_get_name(TKV_NAME_FORMAT, (int)info.format[TKV_TIER_ARCHIVE].v), "kivi2");
    tkv_destroy(kv);
    tkv_destroy(NULL);
}

/* >>tiers by age */
typedef struct plan {
    int sink, hot, warm; /* as written in a config */
} plan;

static const plan plans[] = {{0, 0, 0},
                             {TKV_OFF, 0, 0},
                             {0, 0, TKV_OFF},
                             {0, 0, TKV_UNLIMITED},
                             {0, TKV_UNLIMITED, 0},
                             {TKV_OFF, TKV_OFF, TKV_OFF},
                             {0, TKV_OFF, 0},
                             {1, 1, 1},
                             {64, 64, 64},
                             {63, 100, 130},
                             {5, 200, TKV_OFF},
                             {TKV_OFF, 64, TKV_UNLIMITED},
                             {17, 65, 63}};

static int resolve_length(int written, int standard) {
    return written == 0 ? standard : written == TKV_OFF ? 0 : written == TKV_UNLIMITED ? 1 << 29 : written;
}

/* Predicts the tokens and blocks of each tier for n tokens, in one of n_layers layers. The last append began at length
 * `chunk_start`. */
static tkv_layer_info predict_tiers(plan p, int layer, int n_layers, int n, int chunk_start) {
    tkv_layer_info e;
    int sink = resolve_length(p.sink, 4);
    int hot = add_delay(resolve_length(p.hot, 64), hot_delay_of(layer, n_layers), 1 << 29);
    int warm = add_delay(resolve_length(p.warm, 448), warm_delay_of(layer, n_layers), 1 << 29);
    int coded = at_least_0(chunk_start - hot - sink) / BLOCK,
        archive = at_least_0(chunk_start - hot - warm - sink) / BLOCK;
    int rest = at_least_0(n - sink) - coded * BLOCK;
    memset(&e, 0, sizeof e);
    e.blocks[TKV_TIER_ARCHIVE] = archive;
    e.blocks[TKV_TIER_WARM] = coded - archive;
    e.blocks[TKV_TIER_HOT] = (n > 0 && sink > 0) + (rest + BLOCK - 1) / BLOCK;
    e.tokens[TKV_TIER_ARCHIVE] = archive * BLOCK;
    e.tokens[TKV_TIER_WARM] = (coded - archive) * BLOCK;
    e.tokens[TKV_TIER_HOT] = (n < sink ? n : sink) + rest;
    return e;
}

static void check_tier_counts(tkv_cache *kv, int seq, int layer, const tkv_layer_info *want, const char *what,
                              int n) {
    tkv_layer_info got;
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &got), TKV_OK);
    CHECK_MSG(memcmp(got.tokens, want->tokens, sizeof got.tokens) == 0 &&
                  memcmp(got.blocks, want->blocks, sizeof got.blocks) == 0 && got.expired == want->expired &&
                  got.offloaded == want->offloaded && got.evicted == want->evicted &&
                  got.discarded == want->discarded,
              "%s at %d: hot %d warm %d archive %d tokens in %d %d %d blocks, not %d %d %d in %d %d %d", what,
              n, got.tokens[0], got.tokens[1], got.tokens[2], got.blocks[0], got.blocks[1], got.blocks[2],
              want->tokens[0], want->tokens[1], want->tokens[2], want->blocks[0], want->blocks[1],
              want->blocks[2]);
}

/* Checks that each token is in one tier, in the order sinks, archive, warm, tail. */
static void check_token_tiers(tkv_cache *kv, int seq, int layer, int sink) {
    tkv_layer_info info;
    static uint8_t tiers[4096];
    int count[3] = {0, 0, 0}, n = tkv_get_length(kv, seq, layer), t;
    tkv_tier tier = TKV_TIER_HOT;
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    REQUIRE(n <= COUNT(tiers));
    CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, n, tiers), TKV_OK);
    for (t = info.expired; t < n; t++) {
        int archive_to = sink + info.tokens[TKV_TIER_ARCHIVE],
            warm_to = archive_to + info.tokens[TKV_TIER_WARM];
        tkv_tier want = t < sink         ? TKV_TIER_HOT
                        : t < archive_to ? TKV_TIER_ARCHIVE
                        : t < warm_to    ? TKV_TIER_WARM
                                         : TKV_TIER_HOT;
        CHECK_EQ(tiers[t], want);
        count[want]++;
        if (t % 29) continue; /* one alone takes a search */
        CHECK_EQ(tier_of(kv, seq, layer, t, &tier), TKV_OK);
        CHECK_EQ(tier, want);
    }
    CHECK(count[0] == info.tokens[0] && count[1] == info.tokens[1] && count[2] == info.tokens[2]);
    CHECK_EQ(count[0] + count[1] + count[2] + info.expired, n);
    CHECK_EQ(tier_of(kv, seq, layer, n, &tier), TKV_ERR_RANGE);
    CHECK_EQ(tier_of(kv, seq, layer, -1, &tier), TKV_ERR_RANGE);
}

TEST(tiers_token_by_token) {
    int i, n, longest = tkv_test_quick() ? 600 : 1200;
    for (i = 0; i < COUNT(plans); i++) {
        tkv_config cfg = make_config(1, 1);
        tkv_cache *kv;
        int sink = resolve_length(plans[i].sink, 4);
        char what[64];
        snprintf(what, sizeof what, "sinks %d hot %d warm %d", plans[i].sink, plans[i].hot, plans[i].warm);
        cfg.tiers.sink_tokens = plans[i].sink;
        cfg.tiers.hot_tokens = plans[i].hot;
        cfg.tiers.warm_tokens = plans[i].warm;
        kv = create_cache(&cfg);
        for (n = 0; n <= longest; n++) {
            tkv_layer_info want = predict_tiers(plans[i], 0, 1, n, at_least_0(n - 1));
            int edge = (n - sink + BLOCK) % BLOCK;
            if (n && append_tokens(kv, 0, 0, 1, 1)) break;
            check_tier_counts(kv, 0, 0, &want, what, n);
            if (edge < 2 || edge == BLOCK - 1 || n % BLOCK < 2 || n % BLOCK == BLOCK - 1) {
                check_token_tiers(kv, 0, 0, sink);
                check_cache_at(kv, what, n);
            }
        }
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), longest);
        tkv_destroy(kv);
    }
}

TEST(tiers_in_chunks) {
    tkv_rng rng = tkv_rng_seed(5);
    int i, round, rounds = tkv_test_quick() ? 1 : 6;
    for (i = 0; i < COUNT(plans); i++)
        for (round = 0; round < rounds; round++) {
            tkv_config cfg = make_config(1, 1);
            tkv_cache *kv;
            int n = 0, max_chunk = round % 3 == 0 ? 512 : round % 3 == 1 ? 130 : 65;
            cfg.tiers.sink_tokens = plans[i].sink;
            cfg.tiers.hot_tokens = plans[i].hot;
            cfg.tiers.warm_tokens = plans[i].warm;
            kv = create_cache(&cfg);
            while (n < 1500) {
                int chunk = 1 + tkv_rng_below(&rng, max_chunk);
                tkv_layer_info want = predict_tiers(plans[i], 0, 1, n + chunk, n);
                CHECK_EQ(append_tokens(kv, 0, 0, 1, chunk), TKV_OK);
                n += chunk;
                check_tier_counts(kv, 0, 0, &want, "chunks", n);
                check_token_tiers(kv, 0, 0, resolve_length(plans[i].sink, 4));
                check_cache_at(kv, "chunks", n);
            }
            tkv_destroy(kv);
        }
}

/* Appends n steps of one token in all layers. Returns the most blocks that a step demoted; *total: those of all. */
static int most_demoted(tkv_cache *kv, int n, int *total) {
    int most = 0;
    for (*total = 0; n > 0; n--) {
        const uint64_t before = budget_of(kv).demoted;
        int demoted;
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1, 1), TKV_OK);
        demoted = (int)(budget_of(kv).demoted - before);
        *total += demoted;
        if (demoted > most) most = demoted;
    }
    return most;
}

TEST(layers_take_turns_to_demote) {
    static const int n_layers[] = {1, 2, 7, 16, 32, 40};
    int i;
    for (i = 0; i < COUNT(n_layers); i++) {
        const int n = n_layers[i], most = n == 1 ? 2 : (2 * n + 63) / 64;
        tkv_layer_config layers[42];
        tkv_config cfg = make_config(n + 2, 1);
        tkv_cache *kv;
        int total;
        memset(layers, 0, sizeof layers);
        layers[1].no_cache = 1; /* neither of these layers has a turn */
        layers[n + 1].share_kv = 1;
        cfg.layers = layers;
        kv = create_cache(&cfg);
        CHECK_LE(most_demoted(kv, 700, &total), most);
        CHECK_EQ(most_demoted(kv, 128, &total), most);
        CHECK_EQ(total, 4 * n);
        CHECK_EQ(tkv_set_hot_tokens(kv, 100), TKV_OK);
        (void)most_demoted(kv, 128, &total);
        CHECK_LE(most_demoted(kv, 128, &total), n == 1 ? 2 : most + 1); /* 100 is no multiple of 64 */
        CHECK_EQ(total, 4 * n);
        check_cache(kv);
        tkv_destroy(kv);
    }
}

/* >>values read from the tiers */
/* Encodes and decodes the tokens first .. first+n-1 of k_want and v_want, all heads. Both are
 * [token][head][channel]. */
static void encode_and_decode(tkv_format fk, tkv_format fv, int group, int first, int n) {
    static uint8_t bytes[4 * BLOCK * 64 + 4096];
    int h;
    for (h = 0; h < KV_HEADS; h++) {
        tkv_codec k, v;
        memset(&k, 0, sizeof k);
        memset(&v, 0, sizeof v);
        k.format = fk;
        k.side = TKV_K;
        k.head_dim = DIM;
        k.options.group_size = v.options.group_size = group;
        v.format = fv;
        v.side = TKV_V;
        v.head_dim = V_DIM;
        CHECK_EQ(tkv_encode_block(&k, k_want + first * K_ROW + h * DIM, K_ROW, n, bytes, sizeof bytes),
                 TKV_OK);
        CHECK_EQ(tkv_decode_block(&k, bytes, sizeof bytes, n, k_want + first * K_ROW + h * DIM, K_ROW),
                 TKV_OK);
        CHECK_EQ(tkv_encode_block(&v, v_want + first * V_ROW + h * V_DIM, V_ROW, n, bytes, sizeof bytes),
                 TKV_OK);
        CHECK_EQ(tkv_decode_block(&v, bytes, sizeof bytes, n, v_want + first * V_ROW + h * V_DIM, V_ROW),
                 TKV_OK);
    }
}

typedef struct tier_formats {
    tkv_format_pair hot, warm, archive;
    int group;
} tier_formats;

static const tier_formats format_sets[] = {
    {{TKV_F32, TKV_F32}, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 64},
    {{TKV_F16, TKV_F16}, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 32},
    {{TKV_BF16, TKV_F32}, {TKV_Q8, TKV_KIVI3}, {TKV_KIVI3, TKV_KIVI2}, 64},
    {{TKV_F32, TKV_BF16}, {TKV_F16, TKV_BF16}, {TKV_Q8, TKV_Q8}, 32},
    /* both tiers have the same formats */
    {{TKV_F32, TKV_F32}, {TKV_KIVI2, TKV_KIVI2}, {TKV_KIVI2, TKV_KIVI2}, 64},
    {{TKV_F32, TKV_F32}, {TKV_F32, TKV_F32}, {TKV_F32, TKV_F32}, 64}};

TEST(reads_equal_decoded_blocks) {
    int i, j, t, longest = 900;
    for (i = 0; i < COUNT(format_sets); i++)
        for (j = 0; j < 3; j++) {
            tkv_config cfg = make_config(1, 1);
            tkv_cache *kv;
            int sink = j == 0 ? 4 : j == 1 ? 0 : 33, archive, warm, at;
            tkv_layer_info info;
            cfg.tiers.sink_tokens = j == 1 ? TKV_OFF : sink;
            cfg.tiers.hot = format_sets[i].hot;
            cfg.tiers.warm = format_sets[i].warm;
            cfg.tiers.archive = format_sets[i].archive;
            cfg.format.group_size = format_sets[i].group;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 7, longest, 1), TKV_OK);
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
            archive = sink + info.tokens[TKV_TIER_ARCHIVE];
            warm = archive + info.tokens[TKV_TIER_WARM];
            CHECK(archive > sink && warm > archive && warm < longest - 64);
            fill_rows(7, 0, 0, longest, k_want, v_want);
            for (t = 0; t < longest * K_ROW; t++) k_want[t] = as_stored(cfg.tiers.hot.k, k_want[t]);
            for (t = 0; t < longest * V_ROW; t++) v_want[t] = as_stored(cfg.tiers.hot.v, v_want[t]);
            for (at = sink; at < warm; at += BLOCK) {
                encode_and_decode(cfg.tiers.warm.k, cfg.tiers.warm.v, cfg.format.group_size, at, BLOCK);
                /* a block is recoded only if the tiers have different formats */
                if (at < archive &&
                    (cfg.tiers.warm.k != cfg.tiers.archive.k || cfg.tiers.warm.v != cfg.tiers.archive.v))
                    encode_and_decode(cfg.tiers.archive.k, cfg.tiers.archive.v, cfg.format.group_size, at,
                                      BLOCK);
            }
            CHECK_EQ(tkv_read(kv, 0, 0, 0, longest, k_out, v_out), TKV_OK);
            CHECK_MEM(k_out, k_want, (size_t)(longest * K_ROW) * sizeof(float));
            CHECK_MEM(v_out, v_want, (size_t)(longest * V_ROW) * sizeof(float));
            for (t = 0; t < longest; t += 7) { /* reads parts, K or V alone; nothing beyond them is written */
                int n = t % 150 < longest - t ? t % 150 : longest - t;
                memset(k_out, 0xff, sizeof k_out);
                memset(v_out, 0xff, sizeof v_out);
                CHECK_EQ(tkv_read(kv, 0, 0, t, n, t % 3 == 1 ? NULL : k_out, t % 3 == 2 ? NULL : v_out),
                         TKV_OK);
                if (t % 3 != 1) CHECK_MEM(k_out, k_want + t * K_ROW, (size_t)(n * K_ROW) * sizeof(float));
                if (t % 3 != 2) CHECK_MEM(v_out, v_want + t * V_ROW, (size_t)(n * V_ROW) * sizeof(float));
                CHECK(bits_of(k_out[t % 3 == 1 ? 0 : n * K_ROW]) == 0xffffffffu);
                CHECK(bits_of(v_out[t % 3 == 2 ? 0 : n * V_ROW]) == 0xffffffffu);
            }
            CHECK_EQ(tkv_read(kv, 0, 0, longest, 1, k_out, v_out), TKV_ERR_RANGE);
            CHECK_EQ(tkv_read(kv, 0, 0, 0, longest + 1, k_out, v_out), TKV_ERR_RANGE);
            CHECK_EQ(tkv_read(kv, 0, 0, longest, 0, k_out, v_out), TKV_OK);
            CHECK_EQ(tkv_read(kv, 0, 0, 1, 0x7fffffff, k_out, v_out), TKV_ERR_RANGE);
            CHECK_EQ(tkv_read(kv, 0, 0, -1, 1, k_out, v_out), TKV_ERR_ARG);
            CHECK_EQ(tkv_read(kv, 0, 0, 0, -1, k_out, v_out), TKV_ERR_ARG);
            CHECK_EQ(tkv_read(kv, 1, 0, 0, 0, k_out, v_out), TKV_ERR_ARG);
            CHECK_EQ(tkv_read(kv, 0, 1, 0, 0, k_out, v_out), TKV_ERR_ARG);
            tkv_destroy(kv);
        }
}

TEST(exact_tokens_stay_exact) {
    static const tkv_format formats[] = {TKV_F32, TKV_F16, TKV_BF16};
    int i, n;
    for (i = 0; i < COUNT(formats); i++) {
        tkv_config cfg = make_config(1, 1);
        tkv_cache *kv;
        cfg.tiers.hot.k = cfg.tiers.hot.v = formats[i];
        cfg.tiers.sink_tokens = 7;
        cfg.tiers.hot_tokens = 70;
        cfg.tiers.warm_tokens = 128;
        kv = create_cache(&cfg);
        for (n = 1; n <= 700; n++) {
            CHECK_EQ(append_tokens(kv, 0, 0, 3, 1), TKV_OK);
            if (n % 31) continue;
            check_read(kv, 0, 0, 3, 0, n < 7 ? n : 7, formats[i]);
            check_read(kv, 0, 0, 3, at_least_0(n - 70), n < 70 ? n : 70, formats[i]);
        }
        tkv_destroy(kv);
    }
}

/* Chunks of 64, aligned with demotions, give the same contents and attention as single tokens. */
TEST(aligned_chunks_equal_single_tokens) {
    static float q[BLOCK * 2 * KV_HEADS * DIM], out_single[2 * KV_HEADS * V_DIM],
        out_chunk[BLOCK * 2 * KV_HEADS * V_DIM];
    tkv_config cfg = make_config(1, 1);
    tkv_cache *chunked = create_cache(&cfg), *single = create_cache(&cfg);
    tkv_rng rng = tkv_rng_seed(1);
    int n = 0, chunks = tkv_test_quick() ? 11 : 16, c, t;
    size_t row = 2 * KV_HEADS * V_DIM;
    tkv_rng_fill(&rng, q, sizeof q / sizeof *q, 1.0);
    for (c = 0; c < chunks; c++) {
        int n_new = c == 0 ? 68 : BLOCK, n_queries = c % 3 == 0 ? 9 : 2;
        tkv_attend_params p;
        snapshot a, b;
        memset(&p, 0, sizeof p);
        CHECK_EQ(append_tokens(chunked, 0, 0, 2, n_new), TKV_OK);
        p.q = q;
        p.out = out_chunk;
        p.n = n_queries;
        CHECK_EQ(tkv_attend_reference(chunked, &p), TKV_OK);
        for (t = 0; t < n_new; t++) {
            CHECK_EQ(append_tokens(single, 0, 0, 2, 1), TKV_OK);
            if (t < n_new - n_queries) continue;
            p.q = q + (size_t)(t - (n_new - n_queries)) * (2 * KV_HEADS * DIM);
            p.out = out_single;
            p.n = 1;
            CHECK_EQ(tkv_attend_reference(single, &p), TKV_OK);
            CHECK_MEM(out_single, out_chunk + (size_t)(t - (n_new - n_queries)) * row, row * sizeof(float));
        }
        n += n_new;
        a = snapshot_of(chunked);
        b = snapshot_of(single);
        CHECK_MSG(is_same_snapshot(&a, &b), "at %d", n);
        free_snapshot(&a);
        free_snapshot(&b);
    }
    tkv_destroy(chunked);
    tkv_destroy(single);
}

/* >>many sequences */
/* A sequence in a cache of many equals the same sequence alone in a cache. */
TEST(sequences_are_independent) {
    enum { SEQS = 6 };
    tkv_rng rng = tkv_rng_seed(77);
    tkv_config cfg = make_config(2, SEQS), alone = make_config(2, 1);
    tkv_cache *kv = create_cache(&cfg), *own[SEQS];
    int i, s, step, steps = tkv_test_quick() ? 40 : 300;
    for (s = 0; s < SEQS; s++) own[s] = create_cache(&alone);
    for (step = 0; step < steps; step++) {
        s = tkv_rng_below(&rng, SEQS);
        if (tkv_rng_below(&rng, 40) == 0) {
            CHECK_EQ(tkv_seq_reset(kv, s), TKV_OK);
            CHECK_EQ(tkv_seq_reset(own[s], 0), TKV_OK);
        } else if (tkv_rng_below(&rng, 25) == 0) {
            tkv_flush_mode mode = (tkv_flush_mode)tkv_rng_below(&rng, 3);
            CHECK_EQ(tkv_seq_flush(kv, s, mode), TKV_OK);
            CHECK_EQ(tkv_seq_flush(own[s], 0, mode), TKV_OK);
        } else {
            int n = tkv_rng_below(&rng, 3) ? 1 + tkv_rng_below(&rng, 30) : 1 + tkv_rng_below(&rng, 300);
            if (tkv_get_length(kv, s, TKV_ALL_LAYERS) + n > MAX_TOKENS - 1) continue;
            CHECK_EQ(append_to_all_layers(kv, s, s, n, n), TKV_OK);
            CHECK_EQ(append_to_all_layers(own[s], 0, s, n, n), TKV_OK);
        }
        check_cache_at(kv, "step", step);
        if (step % 20 && step + 1 < steps) continue;
        for (i = 0; i < SEQS; i++) {
            snapshot a = snapshot_of_seq(kv, i), b = snapshot_of_seq(own[i], 0);
            CHECK_MSG(is_same_snapshot(&a, &b), "sequence %d after step %d", i, step);
            free_snapshot(&a);
            free_snapshot(&b);
        }
    }
    for (s = 0; s < SEQS; s++) tkv_destroy(own[s]);
    tkv_destroy(kv);
}

/* Fills k_in and v_in with the tokens of a batch, in its order. Sequence s gets text s. Returns the number
 * of tokens. */
static int fill_batch(tkv_cache *kv, int layer, const tkv_rows *rows, int n_rows) {
    int i, at = 0;
    for (i = 0; i < n_rows; i++) {
        fill_rows(rows[i].seq, layer, tkv_get_length(kv, rows[i].seq, layer), rows[i].n, k_in + at * K_ROW,
                  v_in + at * V_ROW);
        at += rows[i].n;
    }
    return at;
}

static tkv_append_params make_batch_params(int layer, const tkv_rows *rows, int n_rows) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.layer = layer;
    p.batch = rows;
    p.n_batch = n_rows;
    p.k = k_in;
    p.v = v_in;
    p.seq = -5; /* ignored, and so is n */
    p.n = -7;
    return p;
}

TEST(batch_equals_single_appends) {
    enum { SEQS = 5 };
    tkv_rng rng = tkv_rng_seed(21);
    tkv_config cfg = make_config(2, SEQS);
    tkv_cache *kv = create_cache(&cfg), *one = create_cache(&cfg);
    int step, layer, i, steps = tkv_test_quick() ? 15 : 120;
    for (step = 0; step < steps; step++) {
        tkv_rows rows[SEQS];
        int order[SEQS], n_rows = 1 + tkv_rng_below(&rng, SEQS);
        snapshot a, b;
        for (i = 0; i < SEQS; i++) order[i] = i;
        for (i = SEQS - 1; i > 0; i--) {
            int j = tkv_rng_below(&rng, i + 1), t = order[i];
            order[i] = order[j];
            order[j] = t;
        }
        for (i = 0; i < n_rows; i++) {
            rows[i].seq = order[i];
            rows[i].n = step == 0                ? 100
                        : tkv_rng_below(&rng, 4) ? tkv_rng_below(&rng, 90)
                                                 : tkv_rng_below(&rng, 2);
            if (tkv_get_length(kv, order[i], TKV_ALL_LAYERS) + rows[i].n > MAX_TOKENS / 2)
                CHECK_EQ(tkv_seq_reset(kv, order[i]), TKV_OK);
            if (tkv_get_length(kv, order[i], TKV_ALL_LAYERS) == 0)
                CHECK_EQ(tkv_seq_reset(one, order[i]), TKV_OK);
        }
        for (layer = 0; layer < 2; layer++) {
            tkv_append_params p = make_batch_params(layer, rows, n_rows);
            fill_batch(kv, layer, rows, n_rows);
            CHECK_EQ(tkv_append_ex(kv, &p), TKV_OK);
            for (i = 0; i < n_rows; i++)
                CHECK_EQ(append_tokens(one, rows[i].seq, layer, rows[i].seq, rows[i].n), TKV_OK);
        }
        check_cache_at(kv, "batch", step);
        if (step % 10 && step + 1 < steps) continue;
        a = snapshot_of(kv);
        b = snapshot_of(one);
        /* a row of 0 tokens is not an append: no token changes its tier */
        CHECK_MSG(is_same_snapshot(&a, &b), "after batch %d", step);
        free_snapshot(&a);
        free_snapshot(&b);
    }
    tkv_destroy(kv);
    tkv_destroy(one);
}

/* Rows of a batch are counted by int. More are refused before anything is read. */
TEST(batch_of_too_many_rows) {
    enum { ROWS = 1024 };
    static tkv_rows rows[ROWS];
    tkv_config cfg = make_config(1, ROWS);
    tkv_append_params a;
    tkv_cache *kv;
    int i;
    cfg.limits.max_append = 1 << 20;
    kv = create_cache(&cfg);
    for (i = 0; i < ROWS; i++) {
        rows[i].seq = i;
        rows[i].n = 1 << 20;
    }
    a = make_batch_params(0, rows, ROWS);
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_ERR_CAPACITY);
    CHECK_STR(tkv_get_last_error(kv), "the batch has more tokens than 1073741823");
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 0);
    tkv_destroy(kv);
}

TEST(batch_is_all_or_nothing) {
    counting_allocator p;
    tkv_config cfg = make_config(1, 4);
    tkv_cache *kv;
    tkv_rows rows[5];
    tkv_append_params a;
    snapshot before, after;
    int i;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.limits.max_append = 100;
    cfg.limits.max_tokens = 400;
    kv = create_cache(&cfg);
    for (i = 0; i < 4; i++) CHECK_EQ(append_to_all_layers(kv, i, i, 90 + 100 * i, 50), TKV_OK);
    for (i = 0; i < 5; i++) {
        rows[i].seq = i;
        rows[i].n = 10;
    }
    a = make_batch_params(0, rows, 4);
    fill_batch(kv, 0, rows, 4);
    before = snapshot_of(kv);
    rows[3].seq = 4;
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "4", &before);
    before = snapshot_of(kv);
    rows[3].seq = -1;
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "-1", &before);
    before = snapshot_of(kv);
    rows[3].seq = 1;
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "twice", &before);
    rows[3].seq = 3;
    rows[3].n = -1;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "-1", &before);
    rows[3].n = 11; /* the sequence has 390 tokens of at most 400 */
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_CAPACITY, "max_tokens leaves room for 10", &before);
    rows[3].n = 10;
    rows[0].n = 101;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_CAPACITY, "max_append leaves room for 100", &before);
    rows[0].n = 10;
    a.n_batch = 5;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "n_batch", &before);
    a.n_batch = -1;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "n_batch", &before);
    a.n_batch = 4;
    a.layer = 1;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "layer 1", &before);
    a.layer = 0;
    a.k = NULL;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "missing", &before);
    a.k = k_in;
    k_in[39 * K_ROW + 3] = tkv_test_float(0x7f800000u); /* the last token of the last sequence */
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_NONFINITE, "layer 0", &before);
    k_in[39 * K_ROW + 3] = 0.0f;
    a.k_type = (tkv_type)3;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_ARG, "k_type", &before);
    a.k_type = TKV_TYPE_F32;
    for (i = 0; i < 4; i++) rows[i].n = i == 3 ? 10 : 100; /* needs new pages */
    fill_batch(kv, 0, rows, 4);
    p.fail_at = 1;
    before = snapshot_of_tokens(kv);
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_ERR_NOMEM);
    CHECK(strstr(tkv_get_last_error(kv), "310"));
    after = snapshot_of_tokens(kv); /* blocks of rows may have been recoded */
    CHECK(is_same_snapshot(&before, &after));
    check_cache_at(kv, "a batch without memory", 0);
    free_snapshot(&before);
    free_snapshot(&after);
    p.fail_at = 0;
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_OK);
    CHECK_STR(tkv_get_last_error(kv), "");
    for (i = 0; i < 4; i++) CHECK_EQ(tkv_get_length(kv, i, TKV_ALL_LAYERS), i == 3 ? 400 : 190 + 100 * i);
    check_cache_at(kv, "batch", 0);
    rows[0].n = rows[1].n = rows[2].n = rows[3].n = 0;
    a.k = a.v = NULL; /* 0 tokens need no pointers */
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_OK);
    a.n_batch = 0;
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_OK);
    CHECK_EQ(tkv_append_ex(NULL, &a), TKV_ERR_ARG);
    CHECK_EQ(tkv_append_ex(kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_append(NULL, 0, 0, k_in, v_in, 1), TKV_ERR_ARG);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* >>positions: an append at a position other than the next one is refused */
static tkv_status append_tokens_at(tkv_cache *kv, int seq, int layer, int position, int n) {
    fill_rows(seq, layer, position, n, k_in, v_in);
    return append_at(kv, seq, layer, position, k_in, v_in, n);
}

/* Checks that each position other than `len` is refused, with a message that names both. */
static void check_wrong_positions(tkv_cache *kv, int seq, int layer, int len) {
    static const int wrong[] = {-2147483647 - 1, -1, 0, 0x7fffffff};
    char word[160];
    int i;
    for (i = 0; i < COUNT(wrong) + 2; i++) {
        const int position = i < COUNT(wrong) ? wrong[i] : i == COUNT(wrong) ? len - 1 : len + 1;
        snapshot before;
        if (position == len) continue;
        before = snapshot_of(kv);
        snprintf(word, sizeof word,
                 "sequence %d, layer %d holds %d tokens, so the next position is %d, not %d: ", seq, layer,
                 len, len, position);
        check_refusal(kv, append_at(kv, seq, layer, position, k_in, v_in, 3), TKV_ERR_RANGE, word, &before);
        CHECK(strstr(tkv_get_last_error(kv), position < len ? "tkv_seq_reset" : "before it") != NULL);
    }
}

TEST(positions_of_appends) {
    tkv_config cfg = make_config(3, 2);
    tkv_layer_config layers[3];
    tkv_cache *kv;
    int i;
    memset(layers, 0, sizeof layers);
    layers[1].share_kv = 1;
    cfg.layers = layers;
    cfg.limits.max_append = 100;
    cfg.limits.max_tokens = 400;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    kv = create_cache(&cfg);
    check_wrong_positions(kv, 0, 0, 0);
    for (i = 0; i < 200; i += 50) { /* layers grow in turn, so their lengths differ */
        CHECK_EQ(append_tokens_at(kv, 0, 0, i, 50), TKV_OK);
        check_wrong_positions(kv, 0, 0, i + 50);
        check_wrong_positions(kv, 0, 2, i);
        CHECK_EQ(append_tokens_at(kv, 0, 2, i, 50), TKV_OK);
    }
    CHECK_EQ(append_tokens_at(kv, 0, 1, 200, 1), TKV_ERR_ARG); /* a layer that shares is never appended to */
    CHECK_EQ(append_tokens_at(kv, 0, 1, 0, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_length(kv, 0, 1), 200);
    CHECK_EQ(append_tokens_at(kv, 0, 0, 200, 0), TKV_OK); /* the position is checked also with 0 tokens */
    CHECK_EQ(append_tokens_at(kv, 0, 0, 199, 0), TKV_ERR_RANGE);
    CHECK_EQ(append_tokens_at(kv, 0, 0, 0, 101), TKV_ERR_RANGE); /* reported before the other error */
    CHECK_EQ(append_tokens_at(kv, 1, 0, 0, 10), TKV_OK);         /* another sequence has its own length */
    check_wrong_positions(kv, 1, 0, 10);

    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK); /* inside a step, its tokens count */
    check_wrong_positions(kv, 0, 0, 200);
    CHECK_EQ(append_tokens_at(kv, 0, 0, 200, 5), TKV_OK);
    check_wrong_positions(kv, 0, 0, 205);
    CHECK_EQ(append_tokens_at(kv, 0, 0, 205, 1), TKV_OK);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    check_wrong_positions(kv, 0, 0, 200);

    CHECK_EQ(tkv_seq_truncate(kv, 0, 180), TKV_OK);
    check_wrong_positions(kv, 0, 0, 180);
    CHECK_EQ(append_tokens_at(kv, 0, 0, 180, 20), TKV_OK);
    check_read(kv, 0, 0, 0, 140, 60, TKV_F32);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    check_wrong_positions(kv, 0, 0, 0);
    CHECK_EQ(append_tokens_at(kv, 0, 0, 0, 7), TKV_OK);
    check_read(kv, 0, 0, 0, 0, 7, TKV_F32);
    check_cache_at(kv, "positions", 0);
    tkv_destroy(kv);
}

TEST(positions_in_a_batch) {
    tkv_config cfg = make_config(1, 3);
    tkv_cache *kv = create_cache(&cfg);
    tkv_rows rows[3];
    int positions[3] = {90, 40, 0}, i;
    tkv_append_params a;
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 90, 50), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 2, 2, 40, 50), TKV_OK);
    for (i = 0; i < 3; i++) {
        rows[i].seq = i == 0 ? 0 : 3 - i; /* not in the order of sequence numbers */
        rows[i].n = 10;
    }
    a = make_batch_params(0, rows, 3);
    a.positions = positions;
    fill_batch(kv, 0, rows, 3);
    for (i = 0; i < 3; i++) { /* one wrong position refuses the whole batch */
        const int right = positions[i];
        snapshot before = snapshot_of(kv);
        char word[160];
        positions[i] = right + 1;
        snprintf(word, sizeof word, "sequence %d, layer 0 holds %d tokens", rows[i].seq, right);
        check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_RANGE, word, &before);
        before = snapshot_of(kv);
        positions[i] = -1;
        check_refusal(kv, tkv_append_ex(kv, &a), TKV_ERR_RANGE, "not -1", &before);
        positions[i] = right;
    }
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_OK);
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_ERR_RANGE); /* a second time, the positions are wrong */
    for (i = 0; i < 3; i++) CHECK_EQ(tkv_get_length(kv, rows[i].seq, 0), positions[i] + 10);
    a.positions = NULL;
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_OK);
    tkv_destroy(kv);
}

/* The blocks of each batch need several pages. */
TEST(batch_over_many_pages) {
    enum { SEQS = 8 };
    counting_allocator p;
    tkv_config cfg = make_config(1, SEQS);
    tkv_cache *kv;
    tkv_rows rows[SEQS];
    int round, i;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
    kv = create_cache(&cfg);
    for (round = 0; round < 12; round++) {
        tkv_append_params a = make_batch_params(0, rows, SEQS);
        for (i = 0; i < SEQS; i++) {
            rows[i].seq = (i + round) % SEQS;
            rows[i].n = 130;
        }
        fill_batch(kv, 0, rows, SEQS);
        CHECK_EQ(tkv_append_ex(kv, &a), TKV_OK);
        check_cache_at(kv, "round", round);
        for (i = 0; i < SEQS; i++) {
            CHECK_EQ(tkv_get_length(kv, i, TKV_ALL_LAYERS), 130 * (round + 1));
            check_read(kv, i, 0, i, 130 * round, 130, TKV_F32);
        }
    }
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* >>input types and strides */
static uint16_t round_to_half(tkv_type type, float x) {
    return type == TKV_TYPE_F16 ? f16_of(x) : bf16_of(x);
}

TEST(input_types_and_strides) {
    static float k_wide[N_STRIDED * K_TOKEN_STRIDE], v_wide[N_STRIDED * V_TOKEN_STRIDE];
    static uint16_t k_half[N_STRIDED * K_TOKEN_STRIDE], v_half[N_STRIDED * V_TOKEN_STRIDE];
    int kt, vt, strided, t, h, i;
    for (kt = 0; kt < 3; kt++)
        for (vt = 0; vt < 3; vt++)
            for (strided = 0; strided < 3; strided++) { /* packed; with gaps; head-major */
                tkv_config cfg = make_f32_config(1, 1);
                tkv_cache *kv = create_cache(&cfg);
                tkv_append_params p;
                ptrdiff_t k_token = strided == 1 ? K_TOKEN_STRIDE : strided == 2 ? DIM : K_ROW;
                ptrdiff_t v_token = strided == 1 ? V_TOKEN_STRIDE : strided == 2 ? V_DIM : V_ROW;
                ptrdiff_t k_head = strided == 1 ? K_HEAD_STRIDE : strided == 2 ? N_STRIDED * DIM : DIM;
                ptrdiff_t v_head = strided == 1 ? V_HEAD_STRIDE : strided == 2 ? N_STRIDED * V_DIM : V_DIM;
                memset(k_wide, 0xff, sizeof k_wide); /* NaN in the gaps: refused if read */
                memset(v_wide, 0xff, sizeof v_wide);
                memset(k_half, 0xff, sizeof k_half);
                memset(v_half, 0xff, sizeof v_half);
                fill_rows(4, 0, 0, N_STRIDED, k_want, v_want);
                for (t = 0; t < N_STRIDED; t++)
                    for (h = 0; h < KV_HEADS; h++) {
                        for (i = 0; i < DIM; i++) {
                            float *x = &k_want[t * K_ROW + h * DIM + i];
                            if (kt) {
                                uint16_t u = round_to_half((tkv_type)kt, *x);
                                k_half[t * k_token + h * k_head + i] = u;
                                *x = kt == 1 ? float_of_f16(u) : float_of_bf16(u);
                            }
                            k_wide[t * k_token + h * k_head + i] = *x;
                        }
                        for (i = 0; i < V_DIM; i++) {
                            float *x = &v_want[t * V_ROW + h * V_DIM + i];
                            if (vt) {
                                uint16_t u = round_to_half((tkv_type)vt, *x);
                                v_half[t * v_token + h * v_head + i] = u;
                                *x = vt == 1 ? float_of_f16(u) : float_of_bf16(u);
                            }
                            v_wide[t * v_token + h * v_head + i] = *x;
                        }
                    }
                memset(&p, 0, sizeof p);
                p.n = N_STRIDED;
                p.k = kt ? (const void *)k_half : (const void *)k_wide;
                p.v = vt ? (const void *)v_half : (const void *)v_wide;
                p.k_type = (tkv_type)kt;
                p.v_type = (tkv_type)vt;
                if (strided) {
                    p.k_token_stride = k_token;
                    p.v_token_stride = v_token;
                    p.k_head_stride = k_head;
                    p.v_head_stride = v_head;
                }
                CHECK_EQ(tkv_append_ex(kv, &p), TKV_OK);
                CHECK_EQ(tkv_read(kv, 0, 0, 0, N_STRIDED, k_out, v_out), TKV_OK);
                CHECK_MEM(k_out, k_want, N_STRIDED * K_ROW * sizeof(float));
                CHECK_MEM(v_out, v_want, N_STRIDED * V_ROW * sizeof(float));
                p.n = 3; /* the last three tokens, backwards */
                p.k = kt ? (const void *)(k_half + (N_STRIDED - 1) * k_token)
                         : (const void *)(k_wide + (N_STRIDED - 1) * k_token);
                p.v = vt ? (const void *)(v_half + (N_STRIDED - 1) * v_token)
                         : (const void *)(v_wide + (N_STRIDED - 1) * v_token);
                p.k_token_stride = -k_token;
                p.v_token_stride = -v_token;
                CHECK_EQ(tkv_append_ex(kv, &p), TKV_OK);
                for (t = 0; t < 3; t++) {
                    CHECK_EQ(tkv_read(kv, 0, 0, N_STRIDED + t, 1, k_out, v_out), TKV_OK);
                    CHECK_MEM(k_out, k_want + (N_STRIDED - 1 - t) * K_ROW, K_ROW * sizeof(float));
                    CHECK_MEM(v_out, v_want + (N_STRIDED - 1 - t) * V_ROW, V_ROW * sizeof(float));
                }
                tkv_destroy(kv);
            }
}

/* >>NaN, infinity, and values beyond float16 */
TEST(nonfinite_and_overflow) {
    static const uint32_t bad[] = {0x7fc00000u, 0xffc00001u, 0x7f800001u, 0x7f800000u, 0xff800000u};
    static const float saturated[] = {0.0f, 0.0f, 0.0f, 65504.0f, -65504.0f};
    int i, side, hot, at;
    for (i = 0; i < COUNT(bad); i++)
        for (side = 0; side < 2; side++)
            for (hot = TKV_F32; hot <= TKV_BF16; hot++)
                for (at = 0; at < 2; at++) { /* the first and the last channel of 5 tokens */
                    tkv_config cfg = make_config(1, 1);
                    tkv_cache *kv;
                    snapshot before;
                    float *x, want;
                    cfg.tiers.hot.k = cfg.tiers.hot.v = (tkv_format)hot;
                    kv = create_cache(&cfg);
                    CHECK_EQ(append_tokens(kv, 0, 0, 1, 70), TKV_OK);
                    fill_rows(1, 0, 70, 5, k_in, v_in);
                    x = side ? &v_in[at ? 5 * V_ROW - 1 : 0] : &k_in[at ? 5 * K_ROW - 1 : 0];
                    *x = tkv_test_float(bad[i]);
                    before = snapshot_of(kv);
                    check_refusal(kv, tkv_append(kv, 0, 0, k_in, v_in, 5), TKV_ERR_NONFINITE, "NaN", &before);
                    tkv_destroy(kv);
                    cfg.host.nonfinite = TKV_NONFINITE_SATURATE;
                    kv = create_cache(&cfg);
                    CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 5), TKV_OK);
                    CHECK_EQ(tkv_read(kv, 0, 0, 0, 5, k_out, v_out), TKV_OK);
                    want = as_stored((tkv_format)hot, saturated[i]);
                    CHECK_NEAR(side ? v_out[at ? 5 * V_ROW - 1 : 0] : k_out[at ? 5 * K_ROW - 1 : 0], want, 0);
                    CHECK_NEAR(k_out[1], as_stored((tkv_format)hot, k_in[1]), 0);
                    tkv_destroy(kv);
                }
    { /* finite values beyond float16 */
        tkv_config cfg = make_config(1, 1);
        tkv_cache *kv = create_cache(&cfg);
        fill_rows(1, 0, 0, 200, k_in, v_in);
        k_in[0] = 1e6f, k_in[1] = -3e38f, k_in[2] = 65504.0f, k_in[3] = 65520.0f, v_in[0] = -70000.0f;
        k_in[100 * K_ROW] = 1e30f, v_in[100 * V_ROW] = -1e30f; /* token 100 goes through warm and archive */
        CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 200), TKV_OK);
        CHECK_EQ(tkv_read(kv, 0, 0, 0, 200, k_out, v_out), TKV_OK);
        CHECK(k_out[0] == 65504.0f && k_out[1] == -65504.0f && k_out[2] == 65504.0f && k_out[3] == 65504.0f);
        CHECK(v_out[0] == -65504.0f);
        CHECK(k_out[100 * K_ROW] == 65504.0f && v_out[100 * V_ROW] == -65504.0f);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1000, 1), TKV_OK);
        CHECK_EQ(tkv_read(kv, 0, 0, 0, 1200, k_out, v_out), TKV_OK);
        /* scales are rounded to float16, so decoded values can lie slightly beyond 65504 */
        for (i = 0; i < 1200 * K_ROW; i++) CHECK(k_out[i] >= -65568.0f && k_out[i] <= 65568.0f);
        for (i = 0; i < 1200 * V_ROW; i++) CHECK(v_out[i] >= -65568.0f && v_out[i] <= 65568.0f);
        CHECK_NEAR(k_out[100 * K_ROW], 65504.0f, 100.0);
        tkv_destroy(kv);
    }
}

/* >>limits and lengths */
TEST(limits) {
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv;
    snapshot before;
    int i;
    cfg.limits.max_append = 30;
    cfg.limits.max_tokens = 200;
    kv = create_cache(&cfg);
    CHECK_STR(tkv_get_last_error(kv), "");
    CHECK_STR(tkv_get_last_error(NULL), "");
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 0, 0, 1, 31), TKV_ERR_CAPACITY, "max_append leaves room for 30",
                  &before);
    CHECK_EQ(append_tokens(kv, 0, 0, 1, 30), TKV_OK);
    CHECK_STR(tkv_get_last_error(kv), "");
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 0); /* layer 1 has no tokens yet */
    CHECK_EQ(tkv_get_length(kv, 0, 0), 30);
    CHECK_EQ(tkv_get_length(kv, 0, 1), 0);
    CHECK_EQ(append_tokens(kv, 0, 1, 1, 11), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 11);
    CHECK_EQ(append_tokens(kv, 0, 1, 1, 19), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 30);
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 0, 0, 1, -1), TKV_ERR_ARG, "-1", &before);
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 2, 0, 1, 1), TKV_ERR_ARG, "2", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append(kv, 0, 2, k_in, v_in, 1), TKV_ERR_ARG, "2", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append(kv, 0, -1, k_in, v_in, 1), TKV_ERR_ARG, "-1", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_append(kv, 0, 0, k_in, NULL, 1), TKV_ERR_ARG, "v", &before);
    CHECK_EQ(tkv_append(kv, 0, 0, NULL, NULL, 0), TKV_OK);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 0, 1, 20), TKV_OK);
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 0, 0, 1, 11), TKV_ERR_CAPACITY, "max_append leaves room for 10",
                  &before);
    CHECK_EQ(append_tokens(kv, 0, 1, 1, 30), TKV_OK); /* each layer has its own limit */
    CHECK_EQ(append_tokens(kv, 0, 0, 1, 10), TKV_OK);
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 0, 0, 1, 1), TKV_ERR_CAPACITY, "max_append leaves room for 0",
                  &before);
    CHECK_EQ(append_tokens(kv, 1, 0, 1, 30), TKV_OK); /* each sequence has its own limit */
    CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 139, 30), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 199);
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 0, 0, 1, 2), TKV_ERR_CAPACITY, "max_tokens leaves room for 1",
                  &before);
    CHECK_EQ(append_tokens(kv, 0, 0, 1, 1), TKV_OK);
    before = snapshot_of(kv);
    check_refusal(kv, append_tokens(kv, 0, 0, 1, 1), TKV_ERR_CAPACITY, "max_tokens leaves room for 0",
                  &before);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 190), TKV_OK); /* the truncation leaves room for 10 */
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 10, 10), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 200);
    for (i = -3; i < 5; i++) { /* unknown sequences and layers have length 0 */
        if (i < 0 || i > 1) CHECK_EQ(tkv_get_length(kv, i, TKV_ALL_LAYERS), 0);
        if ((i < 0 && i != TKV_ALL_LAYERS) || i > 1) CHECK_EQ(tkv_get_length(kv, 0, i), 0);
    }
    CHECK_EQ(tkv_get_length(NULL, 0, TKV_ALL_LAYERS), 0);
    CHECK_EQ(tkv_get_length(NULL, 0, 0), 0);
    check_cache_at(kv, "limits", 0);
    tkv_destroy(kv);
}

/* >>steps */
/* tkv_seq_abort restores what tkv_seq_begin left, bit for bit. */
TEST(abort_restores) {
    tkv_rng rng = tkv_rng_seed(3);
    int round, rounds = tkv_test_quick() ? 12 : 120;
    for (round = 0; round < rounds; round++) {
        counting_allocator p;
        tkv_config cfg = round % 2 ? make_f32_config(3, 2) : make_config(3, 2);
        tkv_cache *kv;
        snapshot before;
        int n_before = round < 4 ? round : tkv_rng_below(&rng, 400), layer, i, left;
        cfg.host.allocator = counting_allocator_of(&p);
        cfg.tiers.hot_tokens = round % 5 == 0 ? TKV_OFF : 1 + tkv_rng_below(&rng, 80);
        cfg.tiers.sink_tokens = round % 7 == 0 ? TKV_OFF : 1 + tkv_rng_below(&rng, 64);
        cfg.model.window = round % 3 == 0 ? 1 + tkv_rng_below(&rng, 100) : 0;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 1, 9, 100, 37), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, n_before, 41), TKV_OK);
        if (round % 4 == 1) CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
        for (i = 0; i < 3; i++) {
            CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
            before = snapshot_of(kv);
            for (layer = 0; layer < 3; layer++)
                for (left = tkv_rng_below(&rng, 150); left > 0;) {
                    int n = 1 + tkv_rng_below(&rng, left);
                    CHECK_EQ(append_tokens(kv, 0, layer, 2, n), TKV_OK);
                    left -= n;
                }
            check_cache_at(kv, "in step", round);
            CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
            check_unchanged(kv, &before, "abort");
        }
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK); /* another step works */
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 70, 33), TKV_OK);
        CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n_before + 70);
        check_read(kv, 0, 1, 1, n_before, 70, round % 2 ? TKV_F32 : TKV_F16);
        check_cache_at(kv, "after", round);
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
    }
}

/* A committed step equals the same appends without a step. */
TEST(steps_equal_appends) {
    tkv_config cfg = make_config(2, 1);
    tkv_cache *kv = create_cache(&cfg), *plain = create_cache(&cfg);
    tkv_rng rng = tkv_rng_seed(8);
    int step, layer;
    for (step = 0; step < 40; step++) {
        int n = 1 + tkv_rng_below(&rng, 60), first_part = tkv_rng_below(&rng, n);
        snapshot a, b;
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        for (layer = 0; layer < 2; layer++) { /* in two parts; no token changes its tier between them */
            CHECK_EQ(append_tokens(kv, 0, layer, 1, first_part), TKV_OK);
            CHECK_EQ(append_tokens(kv, 0, layer, 1, n - first_part), TKV_OK);
            CHECK_EQ(append_tokens(plain, 0, layer, 1, n), TKV_OK);
        }
        a = snapshot_of(kv);
        CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
        b = snapshot_of(kv);
        CHECK(is_same_snapshot(&a, &b));
        free_snapshot(&a);
        a = snapshot_of(plain);
        CHECK_MSG(is_same_snapshot(&a, &b), "step %d", step);
        free_snapshot(&a);
        free_snapshot(&b);
    }
    tkv_destroy(kv);
    tkv_destroy(plain);
}

TEST(steps_out_of_order) {
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv = create_cache(&cfg);
    snapshot before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_commit(kv, 0), TKV_ERR_STATE, "no step", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_abort(kv, 0), TKV_ERR_STATE, "no step", &before);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK); /* an empty step is allowed */
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 80, 80), TKV_OK);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_STR(tkv_get_last_error(kv), "");
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_begin(kv, 0), TKV_ERR_STATE, "open", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_ERR_STATE, "open", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_truncate(kv, 0, 79), TKV_ERR_STATE, "open", &before);
    CHECK_EQ(append_tokens(kv, 0, 0, 1, 5), TKV_OK);
    before = snapshot_of(kv);
    /* lengths of layers differ; the step stays open */
    check_refusal(kv, tkv_seq_commit(kv, 0), TKV_ERR_STATE, "layer 1", &before);
    CHECK_EQ(append_tokens(kv, 0, 1, 1, 4), TKV_OK);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_commit(kv, 0), TKV_ERR_STATE, "layer 1", &before);
    CHECK_EQ(append_tokens(kv, 0, 1, 1, 1), TKV_OK);
    CHECK_EQ(tkv_seq_begin(kv, 1), TKV_OK); /* steps of two sequences are independent */
    CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_abort(kv, 1), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 85);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK); /* a reset ends the step */
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_commit(kv, 0), TKV_ERR_STATE, "no step", &before);
    CHECK_EQ(tkv_seq_begin(kv, 5), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_commit(kv, -1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_abort(kv, 2), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_begin(NULL, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_commit(NULL, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_abort(NULL, 0), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* >>reservations */
/* Appends n tokens to every layer, in random chunks and a random order of layers. */
static tkv_status append_in_random_order(tkv_cache *kv, int seq, int id, int n, tkv_rng *rng) {
    int layers = last_config.model.n_layers, goal = tkv_get_length(kv, seq, TKV_ALL_LAYERS) + n,
        n_unfinished = layers, layer;
    while (n_unfinished > 0) {
        int len, chunk;
        tkv_status st;
        layer = tkv_rng_below(rng, layers);
        len = tkv_get_length(kv, seq, layer);
        if (len >= goal) {
            for (n_unfinished = layer = 0; layer < layers; layer++)
                n_unfinished += tkv_get_length(kv, seq, layer) < goal;
            continue;
        }
        chunk = 1 + tkv_rng_below(rng, goal - len);
        st = append_tokens(kv, seq, layer, id, chunk);
        if (st) return st;
    }
    return TKV_OK;
}

static tkv_config make_random_config(tkv_rng *rng, int layers, int seqs) {
    static const int hots[] = {0, TKV_OFF, 1, 64, 130, TKV_UNLIMITED},
                     warms[] = {0, TKV_OFF, 64, 100, TKV_UNLIMITED};
    static const int sinks[] = {0, TKV_OFF, 1, 64, 30}, windows[] = {0, 0, 0, 1, 90, 300};
    tkv_config cfg = tkv_rng_below(rng, 4) ? make_config(layers, seqs) : make_f32_config(layers, seqs);
    cfg.tiers.hot_tokens = hots[tkv_rng_below(rng, COUNT(hots))];
    cfg.tiers.warm_tokens = warms[tkv_rng_below(rng, COUNT(warms))];
    cfg.tiers.sink_tokens = sinks[tkv_rng_below(rng, COUNT(sinks))];
    cfg.model.window = windows[tkv_rng_below(rng, COUNT(windows))];
    return cfg;
}

TEST(reserved_appends_succeed) {
    tkv_rng rng = tkv_rng_seed(2024);
    int round, rounds = tkv_test_quick() ? 40 : 400;
    for (round = 0; round < rounds; round++) {
        counting_allocator p;
        tkv_config cfg = make_random_config(&rng, 1 + tkv_rng_below(&rng, 3), 2);
        tkv_cache *kv;
        int n_before = tkv_rng_below(&rng, 3) ? tkv_rng_below(&rng, 900) : 0, n, step = round % 3 == 0;
        tkv_status st;
        cfg.host.allocator = counting_allocator_of(&p);
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 1, 5, tkv_rng_below(&rng, 200), 61), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, n_before, 1 + tkv_rng_below(&rng, 300)), TKV_OK);
        n = tkv_rng_below(&rng, 4) ? 1 + tkv_rng_below(&rng, 512) : 1 + tkv_rng_below(&rng, 5);
        CHECK_EQ(tkv_seq_reserve(kv, 0, n), TKV_OK);
        CHECK_STR(tkv_get_last_error(kv), "");
        check_cache_at(kv, "reserved", round);
        p.fail_at = 1;
        if (step) CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        st = append_in_random_order(kv, 0, 2, n, &rng);
        CHECK_MSG(st == TKV_OK, "round %d: %d tokens at %d: %s", round, n, n_before, tkv_get_last_error(kv));
        if (step) CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
        check_cache_at(kv, "used", round);
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n_before + n);
        p.fail_at = 0;
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 100), TKV_OK);
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
    }
}

/* Other sequences append until the allocator refuses. The reserved memory stays available. */
TEST(reservation_not_used_by_other_sequences) {
    tkv_rng rng = tkv_rng_seed(9);
    int round, rounds = tkv_test_quick() ? 10 : 80;
    for (round = 0; round < rounds; round++) {
        counting_allocator p;
        tkv_config cfg = make_random_config(&rng, 2, 3);
        tkv_cache *kv;
        tkv_status st = TKV_OK;
        int n = 1 + tkv_rng_below(&rng, 300), i, n_refused = 0;
        cfg.host.allocator = counting_allocator_of(&p);
        kv = create_cache(&cfg);
        for (i = 0; i < 3; i++)
            CHECK_EQ(append_to_all_layers(kv, i, i, tkv_rng_below(&rng, 300), 64), TKV_OK);
        CHECK_EQ(tkv_seq_reserve(kv, 0, n), TKV_OK);
        for (i = 0; i < 10; i++) { /* while the allocator gives memory, others do not use the reservation */
            CHECK_EQ(append_to_all_layers(kv, 1 + i % 2, i, 1 + tkv_rng_below(&rng, 60), 64), TKV_OK);
            if (i == 5) CHECK_EQ(tkv_seq_flush(kv, 1, TKV_FLUSH_FULL), TKV_OK);
        }
        p.fail_at = 1;
        for (i = 0; i < 400 && n_refused < 2; i++) {
            n_refused = 0;
            n_refused += append_tokens(kv, 1, i % 2, 1, 20) == TKV_ERR_NOMEM;
            n_refused += append_tokens(kv, 2, i % 2, 1, 20) == TKV_ERR_NOMEM;
            if (tkv_get_length(kv, 1, 0) > 1500 || tkv_get_length(kv, 2, 0) > 1500) break;
        }
        CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK); /* sequence 1 may use what a reset releases */
        for (i = 0; i < 400 && !append_tokens(kv, 1, i % 2, 1, 20); i++) {}
        check_cache_at(kv, "out of memory", round);
        st = append_in_random_order(kv, 0, 0, n, &rng);
        CHECK_MSG(st == TKV_OK, "round %d: %d tokens: %s", round, n, tkv_get_last_error(kv));
        check_cache_at(kv, "used", round);
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
    }
}

/* A batch has the sequence with the reservation and another one. The other one must not use the
 * reservation. */
TEST(reservation_not_used_by_other_rows) {
    int empty;
    for (empty = 0; empty < 2; empty++) {
        counting_allocator p;
        tkv_config cfg = make_config(1, 2);
        tkv_cache *kv;
        tkv_rows rows[2];
        tkv_append_params a = make_batch_params(0, rows, 2);
        tkv_status st;
        cfg.host.allocator = counting_allocator_of(&p);
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 68, 68), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 1, 1, 68, 68), TKV_OK);
        CHECK_EQ(tkv_seq_reserve(kv, 0, 512), TKV_OK);
        p.fail_at = 1;
        rows[0].seq = 0;
        rows[0].n = empty ? 0 : 1;
        rows[1].seq = 1;
        rows[1].n = 500;
        fill_batch(kv, 0, rows, 2);
        st = tkv_append_ex(kv, &a);
        CHECK_MSG(st == TKV_ERR_NOMEM, "the other's 500 tokens came out of the reservation: %s",
                  tkv_get_status_text(st));
        p.fail_at = st != TKV_OK; /* after a failed check, the next one gets memory */
        while (tkv_get_length(kv, 0, TKV_ALL_LAYERS) < 68 + 512 && !(st = append_tokens(kv, 0, 0, 0, 1))) {}
        CHECK_MSG(st == TKV_OK, "at %d: %s", tkv_get_length(kv, 0, TKV_ALL_LAYERS), tkv_get_last_error(kv));
        tkv_destroy(kv);
    }
}

/* Layer 0 appends more than was reserved. The memory reserved for layer 1 stays available. */
TEST(reservation_not_used_by_other_layers) {
    counting_allocator p;
    tkv_config cfg = make_config(2, 1);
    tkv_cache *kv;
    tkv_status st;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 68, 68), TKV_OK);
    CHECK_EQ(tkv_seq_reserve(kv, 0, 200), TKV_OK);
    p.fail_at = 1;
    while (tkv_get_length(kv, 0, 0) < 1000 && !append_tokens(kv, 0, 0, 0, 10)) {}
    st = append_tokens(kv, 0, 1, 0, 200);
    CHECK_MSG(st == TKV_OK, "layer 0 has %d tokens, and layer 1: %s", tkv_get_length(kv, 0, 0),
              tkv_get_last_error(kv));
    tkv_destroy(kv);
}

/* The index grows before blocks expire, beside the pages of a reservation. So the append asks for its bytes first. */
TEST(the_index_grows_beside_a_reservation) {
    int budget, n, i, n_done = 0, n_refused = 0;
    for (budget = 230000; budget <= 290000; budget += 4000)
        for (n = 222; n < 240; n += 3) { /* the next token opens a block, or ends one */
            static tkv_layer_config layers[2];
            tkv_config cfg = make_config(2, 3);
            tkv_append_params p;
            int positions[13];
            counting_allocator memory;
            tkv_cache *kv;
            tkv_status st;
            memset(layers, 0, sizeof layers);
            layers[1].window = 90;
            cfg.layers = layers;
            cfg.model.rope.dim = 8;
            cfg.importance.sample_every = 2;
            cfg.budget.bytes = (size_t)budget;
            cfg.host.allocator = counting_allocator_of(&memory);
            kv = create_cache(&cfg);
            st = append_to_all_layers(kv, 0, 0, 480, 96);
            if (!st) st = append_to_all_layers(kv, 1, 1, 120, 96);
            if (!st) st = append_to_all_layers(kv, 2, 2, n, 96);
            if (!st) st = tkv_seq_reserve(kv, 0, 57);
            for (i = 0; i < COUNT(positions); i++) positions[i] = n + 10 * (i / 3) + i;
            memset(&p, 0, sizeof p);
            p.seq = 2;
            p.layer = 1;
            p.n = COUNT(positions);
            p.k = k_in;
            p.v = v_in;
            p.token_positions = positions;
            if (!st) st = tkv_append_ex(kv, &p);
            CHECK_MSG(st == TKV_OK || st == TKV_ERR_BUDGET, "budget %d, %d tokens: %s", budget, n,
                      tkv_get_last_error(kv));
            CHECK_EQ(memory.n_refused, 0);
            check_cache_at(kv, "budget", budget);
            n_done += !st;
            n_refused += st != TKV_OK;
            tkv_destroy(kv);
        }
    CHECK(n_done > 20 && n_refused > 0);
    printf(" %d appends, %d refused ", n_done, n_refused);
}

/* A reservation lasts until its tokens are appended or the sequence is reset. Other calls do not end it. */
TEST(reservation_survives_other_calls) {
    static const char *const how[] = {"nothing",
                                      "a smaller reservation",
                                      "an abort of part of it",
                                      "an abort of all of it",
                                      "a truncation",
                                      "a flush of due blocks",
                                      "a failed larger reservation",
                                      "a reset of another sequence"};
    int i;
    for (i = 0; i < COUNT(how); i++) {
        counting_allocator p;
        tkv_config cfg = make_config(2, 2);
        tkv_cache *kv;
        tkv_status st = TKV_OK;
        int goal = 350 + 200;
        cfg.host.allocator = counting_allocator_of(&p);
        cfg.tiers.hot_tokens = 200;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 1, 0, 300, 100), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 350, 50), TKV_OK);
        CHECK_EQ(tkv_seq_reserve(kv, 0, 200), TKV_OK);
        if (i == 1) CHECK_EQ(tkv_seq_reserve(kv, 0, 1), TKV_OK);
        p.fail_at = 1;
        if (i == 2 || i == 3) {
            CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, i == 2 ? 150 : 200, 64), TKV_OK);
            CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
        } else if (i == 4) {
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 150, 64), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(kv, 0, 350), TKV_OK);
        } else if (i == 5) {
            CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_DUE), TKV_OK);
        } else if (i == 6) {
            CHECK_EQ(tkv_seq_reserve(kv, 0, 512), TKV_ERR_NOMEM);
            CHECK_STR(tkv_get_last_error(kv), "no memory to reserve 512 tokens");
        } else if (i == 7) {
            CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        }
        check_cache_at(kv, how[i], 0);
        st = append_to_all_layers(kv, 0, 0, goal - tkv_get_length(kv, 0, TKV_ALL_LAYERS), 64);
        CHECK_MSG(st == TKV_OK, "after %s, at %d of %d: %s", how[i], tkv_get_length(kv, 0, TKV_ALL_LAYERS),
                  goal, tkv_get_last_error(kv));
        tkv_destroy(kv);
    }
}

TEST(reserve_limits) {
    counting_allocator p;
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv;
    tkv_memory_info m;
    size_t empty;
    snapshot before;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.limits.max_append = 100;
    cfg.limits.max_tokens = 250;
    kv = create_cache(&cfg);
    empty = p.held;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_reserve(kv, 0, 101), TKV_ERR_ARG, "101", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_reserve(kv, 0, 0), TKV_ERR_ARG, "0", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_reserve(kv, 0, -1), TKV_ERR_ARG, "-1", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_reserve(kv, 2, 1), TKV_ERR_ARG, "2", &before);
    CHECK_EQ(tkv_seq_reserve(NULL, 0, 1), TKV_ERR_ARG);
    p.fail_at = 1;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_reserve(kv, 0, 100), TKV_ERR_NOMEM, "100", &before);
    p.fail_at = 0;
    CHECK_EQ(tkv_seq_reserve(kv, 0, 100), TKV_OK);
    CHECK(p.held > empty);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 0);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_EQ(m.total, p.held);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_EQ(m.slack, m.total - m.tables - m.index - m.scratch); /* no page is in use */
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 200, 100), TKV_OK);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_reserve(kv, 0, 51), TKV_ERR_CAPACITY, "max_tokens leaves room for 50", &before);
    CHECK_EQ(tkv_seq_reserve(kv, 0, 50), TKV_OK);
    p.fail_at = 1;
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 50, 7), TKV_OK);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* >>truncation */
/* The shortest length that a truncation may leave: sinks and coded tokens, or 0 if no token is coded. */
static int min_length(plan p, int n, int chunk_start) {
    tkv_layer_info e = predict_tiers(p, 0, 1, n, chunk_start);
    int coded = e.tokens[TKV_TIER_WARM] + e.tokens[TKV_TIER_ARCHIVE];
    return coded ? resolve_length(p.sink, 4) + coded : 0;
}

TEST(truncate_the_tail) {
    tkv_rng rng = tkv_rng_seed(31);
    int i, round, rounds = tkv_test_quick() ? 3 : 12;
    for (i = 0; i < COUNT(plans); i++)
        for (round = 0; round < rounds; round++) {
            tkv_config cfg = make_config(2, 1);
            tkv_cache *kv;
            int n = 1 + tkv_rng_below(&rng, 900), chunk = round % 2 ? 1 : 1 + tkv_rng_below(&rng, 200);
            int chunk_start = (n - 1) / chunk * chunk, n_coded = min_length(plans[i], n, chunk_start), keep;
            snapshot before;
            cfg.tiers.sink_tokens = plans[i].sink;
            cfg.tiers.hot_tokens = plans[i].hot;
            cfg.tiers.warm_tokens = plans[i].warm;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 1, n, chunk), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(kv, 0, n + 5), TKV_OK); /* nothing to truncate */
            CHECK_EQ(tkv_seq_truncate(kv, 0, n), TKV_OK);
            CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n);
            before = snapshot_of(kv);
            check_refusal(kv, tkv_seq_truncate(kv, 0, -1), TKV_ERR_ARG, "-1", &before);
            keep = round % 3 == 0 ? n_coded + tkv_rng_below(&rng, n - n_coded + 1)
                                  : tkv_rng_below(&rng, n_coded + 1); /* into the coded tokens */
            fill_rows(1, 0, 0, n, k_want, v_want);
            CHECK_EQ(tkv_read(kv, 0, 0, 0, n, k_want, v_want), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(kv, 0, keep), TKV_OK);
            check_cache_at(kv, "truncated to", keep);
            CHECK_EQ(tkv_get_length(kv, 0, 0), keep);
            CHECK_EQ(tkv_get_length(kv, 0, 1), keep);
            CHECK_EQ(tkv_read(kv, 0, 0, 0, keep, k_out, v_out), TKV_OK);
            CHECK_MEM(k_out, k_want, (size_t)(keep * K_ROW) * sizeof(float));
            CHECK_MEM(v_out, v_want, (size_t)(keep * V_ROW) * sizeof(float));
            CHECK_EQ(append_to_all_layers(kv, 0, 2, 1 + n / 2, chunk), TKV_OK); /* through the tiers again */
            check_cache_at(kv, "appended after", keep);
            keep = tkv_rng_below(&rng, keep + n / 2 + 2);
            CHECK_EQ(tkv_seq_truncate(kv, 0, keep), TKV_OK);
            check_cache_at(kv, "truncated to", keep);
            CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), keep);
            tkv_destroy(kv);
        }
}

/* Rolls back 300 tokens into coded ones and writes others. The error of all tokens is that of a cache that never had
 * the tokens cut, within a tenth. */
TEST(roll_back_into_coded_tokens) {
    static const tkv_format warm[] = {TKV_KIVI4, TKV_Q8, TKV_A40},
                            archive[] = {TKV_KIVI2, TKV_KIVI2, TKV_A30};
    enum { KEPT = 777, CUT = 300, AFTER = 1100 };
    int i;
    for (i = 0; i < COUNT(warm); i++) {
        tkv_config cfg = make_config(1, 1);
        tkv_cache *kv, *reference;
        double error, want;
        cfg.tiers.warm.k = warm[i];
        cfg.tiers.archive.k = archive[i];
        cfg.tiers.hot_tokens = 128;
        cfg.tiers.warm_tokens = 256;
        reference = create_cache(&cfg);
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, KEPT, 1), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 9, CUT, 1), TKV_OK);
        CHECK_EQ(tkv_seq_truncate(kv, 0, KEPT), TKV_OK);
        check_cache_at(kv, "rolled back to", KEPT);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, AFTER, 1), TKV_OK);
        check_cache_at(kv, "written again to", KEPT + AFTER);
        CHECK_EQ(append_to_all_layers(reference, 0, 1, KEPT + AFTER, 1), TKV_OK);
        fill_rows(1, 0, 0, KEPT + AFTER, k_want, v_want);
        CHECK_EQ(tkv_read(reference, 0, 0, 0, KEPT + AFTER, k_out, v_out), TKV_OK);
        want = mean_squared_difference(k_out, k_want, (KEPT + AFTER) * K_ROW) +
               mean_squared_difference(v_out, v_want, (KEPT + AFTER) * V_ROW);
        CHECK_EQ(tkv_read(kv, 0, 0, 0, KEPT + AFTER, k_out, v_out), TKV_OK);
        error = mean_squared_difference(k_out, k_want, (KEPT + AFTER) * K_ROW) +
                mean_squared_difference(v_out, v_want, (KEPT + AFTER) * V_ROW);
        CHECK_MSG(error <= 1.1 * want, "format %d: mean squared error %.5f after a cut, %.5f without", i,
                  error, want);
        tkv_destroy(kv);
        tkv_destroy(reference);
    }
}

/* Tokens that were truncated leave no trace in the tokens that follow. */
TEST(truncate_and_append_again) {
    tkv_rng rng = tkv_rng_seed(13);
    int round, rounds = tkv_test_quick() ? 8 : 60;
    for (round = 0; round < rounds; round++) {
        tkv_config cfg = make_config(1, 1);
        tkv_cache *kv, *reference;
        int n = 70 + tkv_rng_below(&rng, 700), n_cut = 1 + tkv_rng_below(&rng, round % 2 ? 64 : 5), i;
        snapshot a, b;
        kv = create_cache(&cfg);
        reference = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, n, 1), TKV_OK);
        for (i = 0; i < 3; i++) { /* drafted tokens that are rejected */
            CHECK_EQ(tkv_seq_truncate(kv, 0, n - n_cut), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 0, 100 + i, n_cut, 1), TKV_OK);
        }
        CHECK_EQ(tkv_seq_truncate(kv, 0, n - n_cut), TKV_OK);
        CHECK_EQ(append_to_all_layers(reference, 0, 1, n - n_cut, 1), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 2, n_cut + 1, 1), TKV_OK);
        CHECK_EQ(append_to_all_layers(reference, 0, 2, n_cut + 1, 1), TKV_OK);
        for (i = 0; i < 2; i++) {
            a = snapshot_of(kv);
            b = snapshot_of(reference);
            CHECK_MSG(is_same_snapshot(&a, &b), "round %d: %d tokens, %d of them truncated", round, n, n_cut);
            free_snapshot(&a);
            free_snapshot(&b);
            CHECK_EQ(append_to_all_layers(kv, 0, 3, 640, 1), TKV_OK); /* through all tiers */
            CHECK_EQ(append_to_all_layers(reference, 0, 3, 640, 1), TKV_OK);
        }
        check_cache_at(kv, "round", round);
        tkv_destroy(kv);
        tkv_destroy(reference);
    }
}

/* Tier lengths that are no multiples of 64. After a truncation, fewer tokens follow the oldest blocks. */
TEST(check_after_truncation) {
    static const int warms[] = {100, 65, 63, 1, 130};
    int i, n, mode;
    for (mode = 0; mode < 3; mode++) /* 1: after a full flush; 2: with a short block that was flushed */
        for (i = 0; i < COUNT(warms); i++)
            for (n = 200; n < 330; n += tkv_test_quick() ? 11 : 3) {
                tkv_config cfg = make_config(1, 1);
                tkv_cache *kv;
                tkv_layer_info info;
                cfg.tiers.sink_tokens = TKV_OFF;
                cfg.tiers.warm_tokens = warms[i];
                kv = create_cache(&cfg);
                CHECK_EQ(append_to_all_layers(kv, 0, 1, mode == 2 ? 74 : n, 1), TKV_OK);
                if (mode) CHECK_EQ(tkv_seq_flush(kv, 0, mode == 2 ? TKV_FLUSH_ALL : TKV_FLUSH_FULL), TKV_OK);
                CHECK_EQ(append_to_all_layers(kv, 0, 1, mode == 2 ? n - 74 : 10, 1), TKV_OK);
                CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
                CHECK_EQ(tkv_seq_truncate(kv, 0, info.tokens[TKV_TIER_WARM] + info.tokens[TKV_TIER_ARCHIVE]),
                         TKV_OK);
                check_cache_at(kv, "truncated at", n);
                CHECK_EQ(append_to_all_layers(kv, 0, 1, 200, 1), TKV_OK);
                check_cache_at(kv, "appended after", n);
                tkv_destroy(kv);
            }
}

TEST(reset) {
    counting_allocator p;
    tkv_config cfg = make_config(2, 3);
    tkv_cache *kv, *fresh;
    size_t held_with_one_seq;
    tkv_memory_info before, after;
    snapshot a, b;
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 300, 100), TKV_OK);
    held_with_one_seq = p.held;
    CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 700, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 2, 2, 700, 100), TKV_OK);
    CHECK_EQ(tkv_seq_reserve(kv, 2, 300), TKV_OK);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    a = snapshot_of_seq(kv, 1);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 0);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    check_cache_at(kv, "reset", 0);
    CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
    CHECK_MEM(&after.tier, &before.tier, sizeof after.tier);
    CHECK_EQ(after.slack, before.slack); /* pages are released; tables that have grown stay */
    CHECK(p.held - held_with_one_seq == after.index - before.index);
    b = snapshot_of_seq(kv, 1);
    CHECK(is_same_snapshot(&a, &b));
    free_snapshot(&a);
    free_snapshot(&b);
    CHECK_EQ(append_to_all_layers(kv, 0, 3, 400, 1), TKV_OK); /* equals a new sequence */
    fresh = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(fresh, 0, 3, 400, 1), TKV_OK);
    a = snapshot_of_seq(kv, 0);
    b = snapshot_of_seq(fresh, 0);
    CHECK(is_same_snapshot(&a, &b));
    free_snapshot(&a);
    free_snapshot(&b);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK); /* the sequence is empty */
    CHECK_EQ(tkv_seq_reset(kv, 3), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_reset(kv, -1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_reset(NULL, 0), TKV_ERR_ARG);
    tkv_destroy(fresh);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* >>flush */
TEST(flush_due) {
    int i, n;
    for (i = 0; i < COUNT(plans); i++)
        for (n = 0; n < 700; n += tkv_test_quick() ? 99 : 23) {
            tkv_config cfg = make_config(2, 1);
            tkv_cache *kv;
            const tkv_layer_info want[2] = {predict_tiers(plans[i], 0, 2, n, n),
                                            predict_tiers(plans[i], 1, 2, n, n)};
            snapshot before;
            cfg.tiers.sink_tokens = plans[i].sink;
            cfg.tiers.hot_tokens = plans[i].hot;
            cfg.tiers.warm_tokens = plans[i].warm;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 1, n, 300), TKV_OK);
            CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_DUE), TKV_OK);
            check_tier_counts(kv, 0, 0, &want[0], "flushed", n);
            check_tier_counts(kv, 0, 1, &want[1], "flushed", n);
            before = snapshot_of(kv);
            CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_DUE), TKV_OK); /* the second flush changes nothing */
            check_unchanged(kv, &before, "flushed twice");
            before = snapshot_of(kv);
            CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK); /* tkv_seq_begin flushes, too */
            check_unchanged(kv, &before, "flushed and begun");
            tkv_destroy(kv);
        }
}

TEST(flush_full_and_all) {
    int i, n, mode;
    for (mode = 1; mode < 3; mode++)
        for (i = 0; i < COUNT(plans); i++)
            for (n = 1; n < 900; n += tkv_test_quick() ? 222 : 61) {
                tkv_config cfg = make_config(1, 1);
                tkv_cache *kv;
                tkv_layer_info got;
                int sink = resolve_length(plans[i].sink, 4), warm = resolve_length(plans[i].warm, 448), from,
                    t;
                int rest = at_least_0(n - sink), tail = rest % BLOCK,
                    blocks = rest / BLOCK + (mode == 2 && tail);
                snapshot before;
                cfg.tiers.sink_tokens = plans[i].sink;
                cfg.tiers.hot_tokens = plans[i].hot;
                cfg.tiers.warm_tokens = plans[i].warm;
                kv = create_cache(&cfg);
                CHECK_EQ(append_to_all_layers(kv, 0, 1, n, 1), TKV_OK);
                if (plans[i].hot == TKV_UNLIMITED) { /* all tokens stay exact */
                    before = snapshot_of(kv);
                    CHECK_EQ(tkv_seq_flush(kv, 0, (tkv_flush_mode)mode), TKV_OK);
                    check_unchanged(kv, &before, "flush of an exact cache");
                    tkv_destroy(kv);
                    continue;
                }
                CHECK_EQ(tkv_seq_flush(kv, 0, (tkv_flush_mode)mode), TKV_OK);
                check_cache_at(kv, "flushed", n);
                CHECK_EQ(tkv_get_layer(kv, 0, 0, &got), TKV_OK);
                CHECK_EQ(got.blocks[TKV_TIER_WARM] + got.blocks[TKV_TIER_ARCHIVE], blocks);
                CHECK_EQ(got.tokens[TKV_TIER_HOT], n - rest + (mode == 2 ? 0 : tail));
                CHECK_EQ(got.tokens[TKV_TIER_HOT] + got.tokens[TKV_TIER_WARM] + got.tokens[TKV_TIER_ARCHIVE],
                         n);
                /* a block is archived if at least warm_tokens tokens follow it */
                for (from = sink + BLOCK, t = 0; from <= n; from += BLOCK) t += n - from >= warm;
                CHECK_EQ(got.blocks[TKV_TIER_ARCHIVE], t + (mode == 2 && tail && warm == 0));
                before = snapshot_of(kv);
                CHECK_EQ(tkv_seq_flush(kv, 0, (tkv_flush_mode)mode), TKV_OK);
                check_unchanged(kv, &before, "flushed twice");
                if (n <= sink) {
                    tkv_destroy(kv);
                    continue;
                }
                if (mode == 2 && tail) { /* the short block is encoded with its `tail` tokens */
                    int hot_k = TKV_F16;
                    fill_rows(1, 0, 0, n, k_want, v_want);
                    for (t = 0; t < n * K_ROW; t++) k_want[t] = as_stored((tkv_format)hot_k, k_want[t]);
                    for (t = 0; t < n * V_ROW; t++) v_want[t] = as_stored((tkv_format)hot_k, v_want[t]);
                    from = n - tail;
                    if (warm) encode_and_decode(TKV_KIVI4, TKV_KIVI4, 64, from, tail);
                    else encode_and_decode(TKV_KIVI2, TKV_KIVI2, 64, from, tail);
                    CHECK_EQ(tkv_read(kv, 0, 0, from, tail, k_out, v_out), TKV_OK);
                    CHECK_MEM(k_out, k_want + from * K_ROW, (size_t)(tail * K_ROW) * sizeof(float));
                    CHECK_MEM(v_out, v_want + from * V_ROW, (size_t)(tail * V_ROW) * sizeof(float));
                }
                CHECK_EQ(append_to_all_layers(kv, 0, 2, 130, 1),
                         TKV_OK); /* the next token begins a new block */
                check_read(kv, 0, 0, 2, n + 130 - (resolve_length(plans[i].hot, 64) < 65 ? 1 : 65), 1,
                           TKV_F16);
                check_cache_at(kv, "appended after", n);
                CHECK_EQ(append_to_all_layers(kv, 0, 2, 600, 100), TKV_OK);
                check_cache_at(kv, "appended after", n);
                CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n + 730);
                tkv_destroy(kv);
            }
}

TEST(flush_refusals) {
    int below = -1;
    counting_allocator p;
    tkv_config cfg = make_config(2, 1);
    tkv_cache *kv;
    snapshot before;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.tiers.hot_tokens = 1000;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK); /* nothing to flush */
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 800, 100), TKV_OK);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_flush(kv, 0, (tkv_flush_mode)3), TKV_ERR_ARG, "mode", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_flush(kv, 0, (tkv_flush_mode)below), TKV_ERR_ARG, "mode", &before);
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_flush(kv, 1, TKV_FLUSH_ALL), TKV_ERR_ARG, "1", &before);
    CHECK_EQ(tkv_seq_flush(NULL, 0, TKV_FLUSH_ALL), TKV_ERR_ARG);
    p.fail_at = 1;
    before = snapshot_of(kv);
    check_refusal(kv, tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_ERR_NOMEM, "memory", &before);
    p.fail_at = 0;
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
    check_cache_at(kv, "flushed", 0);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* >>windows, layers that share, layers without a cache, layers with plans of their own */
/* Checks that two layers give the newest n tokens the same attention. The call for layer_b sets the
 * window. */
static void check_same_attention(tkv_cache *a, int layer_a, tkv_cache *b, int layer_b, int n, int window) {
    static float q[40 * 2 * KV_HEADS * DIM], out_a[40 * 2 * KV_HEADS * V_DIM],
        out_b[40 * 2 * KV_HEADS * V_DIM];
    tkv_attend_params p;
    tkv_rng rng = tkv_rng_seed(4);
    tkv_rng_fill(&rng, q, sizeof q / sizeof *q, 2.0);
    memset(&p, 0, sizeof p);
    p.layer = layer_a;
    p.n = n;
    p.q = q;
    p.out = out_a;
    CHECK_EQ(tkv_attend_reference(a, &p), TKV_OK);
    p.layer = layer_b;
    p.window = window;
    p.out = out_b;
    CHECK_EQ(tkv_attend_reference(b, &p), TKV_OK);
    CHECK_MEM(out_a, out_b, (size_t)(n * 2 * KV_HEADS * V_DIM) * sizeof(float));
}

TEST(windows_expire_old_tokens) {
    static const int windows[] = {1, 2, 63, 64, 65, 100, 300}, hots[] = {0, TKV_OFF, 1, 100, TKV_UNLIMITED};
    static const int sinks[] = {0, TKV_OFF, 64};
    int i, j, s, longest = tkv_test_quick() ? 180 : 460;
    for (i = 0; i < COUNT(windows); i++)
        for (j = 0; j < COUNT(hots); j++)
            for (s = 0; s < COUNT(sinks); s++) {
                tkv_config cfg = make_f32_config(1, 1), no_window = make_f32_config(1, 1);
                tkv_cache *kv, *reference = create_cache(&no_window);
                int n, chunk = j % 2 ? 1 : 7, hot = resolve_length(hots[j], 64), n_expired = 0, n_truncated;
                tkv_tier tier;
                cfg.model.window = windows[i];
                cfg.tiers.hot_tokens = hots[j];
                cfg.tiers.sink_tokens = sinks[s];
                kv = create_cache(&cfg);
                if (hots[j] == TKV_UNLIMITED) hot = 64;
                for (n = chunk; n <= longest; n += chunk) {
                    tkv_layer_info info;
                    CHECK_EQ(append_tokens(kv, 0, 0, 1, chunk), TKV_OK);
                    CHECK_EQ(append_tokens(reference, 0, 0, 1, chunk), TKV_OK);
                    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
                    CHECK(info.expired >= n_expired);
                    n_expired = info.expired;
                    CHECK_EQ(n_expired + info.tokens[0] + info.tokens[1] + info.tokens[2], n);
                    /* A truncation of hot_tokens must leave a complete window. Older tokens expire in
                     * whole blocks. */
                    CHECK_LE(n_expired, at_least_0(n - chunk - hot - windows[i]));
                    CHECK_LE(n - n_expired, windows[i] + hot + BLOCK + chunk + resolve_length(sinks[s], 4));
                    if (n % 21 >= chunk) continue;
                    check_cache_at(kv, "window", n);
                    check_same_attention(kv, 0, reference, 0, chunk, windows[i]);
                    if (n_expired) {
                        CHECK_EQ(tkv_read(kv, 0, 0, n_expired - 1, 1, k_out, v_out), TKV_ERR_RANGE);
                        CHECK_EQ(tier_of(kv, 0, 0, n_expired - 1, &tier), TKV_ERR_RANGE);
                        CHECK_EQ(tier_of(kv, 0, 0, n_expired, &tier), TKV_OK);
                    }
                    check_read(kv, 0, 0, 1, n_expired, n - n_expired, TKV_F32);
                }
                n = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
                n_truncated = hots[j] == TKV_UNLIMITED ? 64 : hot;
                if (n_truncated > n) n_truncated = n;
                CHECK_EQ(tkv_seq_truncate(kv, 0, n - n_truncated),
                         TKV_OK); /* hot_tokens can always be truncated */
                CHECK_EQ(append_tokens(kv, 0, 0, 2, 3), TKV_OK);
                tkv_destroy(reference);
                reference = create_cache(&no_window);
                CHECK_EQ(append_to_all_layers(reference, 0, 1, n - n_truncated, 100), TKV_OK);
                CHECK_EQ(append_tokens(reference, 0, 0, 2, 3), TKV_OK);
                check_same_attention(kv, 0, reference, 0, 3, windows[i]);
                check_cache_at(kv, "truncated in a window", n);
                tkv_destroy(kv);
                tkv_destroy(reference);
            }
}

/* Truncates as far as a window allows. The next token's attention is right, also where every token before
 * it expired. */
TEST(windows_and_the_longest_truncation) {
    static const int windows[] = {1, 2, 40}, hots[] = {TKV_OFF, TKV_UNLIMITED, 0};
    int i, j, n;
    for (i = 0; i < COUNT(windows); i++)
        for (j = 0; j < COUNT(hots); j++)
            for (n = 60; n < 400; n += 7) {
                tkv_config cfg = make_f32_config(1, 1), no_window = make_f32_config(1, 1);
                tkv_cache *kv, *reference;
                int keep = 1;
                tkv_layer_info info;
                cfg.model.window = windows[i];
                cfg.tiers.hot_tokens = hots[j];
                cfg.tiers.sink_tokens = TKV_OFF;
                kv = create_cache(&cfg);
                CHECK_EQ(append_to_all_layers(kv, 0, 1, n, 1), TKV_OK);
                while (tkv_seq_truncate(kv, 0, keep) == TKV_ERR_RANGE) keep++;
                CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), keep);
                check_cache_at(kv, "longest truncation", n);
                CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
                CHECK_EQ(info.expired + info.tokens[0] + info.tokens[1] + info.tokens[2], keep);
                reference = create_cache(&no_window);
                CHECK_EQ(append_to_all_layers(reference, 0, 1, keep, 100), TKV_OK);
                CHECK_EQ(append_tokens(kv, 0, 0, 2, 1), TKV_OK);
                CHECK_EQ(append_tokens(reference, 0, 0, 2, 1), TKV_OK);
                check_same_attention(kv, 0, reference, 0, 1, windows[i]);
                check_cache_at(kv, "appended after", n);
                tkv_destroy(kv);
                tkv_destroy(reference);
            }
}

TEST(layers_that_share_or_have_no_cache) {
    tkv_layer_config layers[6];
    tkv_config cfg = make_f32_config(6, 2), plain = make_f32_config(1, 1);
    tkv_cache *kv, *alone = create_cache(&plain);
    tkv_layer_info info, other;
    tkv_tier tier;
    snapshot before;
    tkv_memory_info m;
    int n;
    memset(layers, 0, sizeof layers);
    layers[0].no_cache = 1;
    layers[1].window = 50;
    layers[2].share_kv = 2; /* shares with layer 1, and has a larger window */
    layers[2].window = 150;
    layers[3].window = 60; /* layer 4 shares with it and has no window: nothing expires */
    layers[4].share_kv = 4;
    layers[5].no_cache = 1;
    cfg.layers = layers;
    kv = create_cache(&cfg);
    for (n = 1; n <= 500; n++) {
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1, 1), TKV_OK);
        if (n % 50) continue;
        check_cache_at(kv, "shares", n);
        CHECK_EQ(append_tokens(alone, 0, 0, 1, 50), TKV_OK);
        check_same_attention(kv, 1, kv, 2, 1, 50);
        check_same_attention(kv, 3, kv, 4, 1, 60);
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n);
        CHECK_EQ(tkv_get_length(kv, 0, 2), n);
        CHECK_EQ(tkv_get_length(kv, 0, 4), n);
        CHECK_EQ(tkv_get_length(kv, 0, 0), 0);
        CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
        CHECK_EQ(tkv_get_layer(kv, 0, 2, &other), TKV_OK);
        CHECK_MEM(&info, &other, sizeof info);
        CHECK_LE(info.expired, at_least_0(n - 150 - 64));
        CHECK(n < 400 || info.expired > 0);
        CHECK_EQ(tkv_get_layer(kv, 0, 3, &info), TKV_OK);
        CHECK_EQ(info.expired, 0);
    }
    check_read(kv, 0, 3, 1, 0, 0, TKV_F32);
    CHECK_EQ(tkv_read(kv, 0, 3, 0, 500, k_want, v_want), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 4, 0, 500, k_out, v_out), TKV_OK);
    CHECK_MEM(k_out, k_want, 500 * K_ROW * sizeof(float));
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 0, k_out, v_out), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_ERR_ARG);
    CHECK_EQ(tier_of(kv, 0, 5, 0, &tier), TKV_ERR_ARG);
    for (n = 0; n < 6; n++) {
        if (n == 1 || n == 3) continue;
        before = snapshot_of(kv);
        check_refusal(kv, tkv_append(kv, 0, n, k_in, v_in, 1), TKV_ERR_ARG, "no K and V of its own", &before);
    }
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK); /* a step counts the layers with K and V of their own */
    CHECK_EQ(append_tokens(kv, 0, 1, 1, 2), TKV_OK);
    CHECK_EQ(tkv_seq_commit(kv, 0), TKV_ERR_STATE);
    CHECK_EQ(append_tokens(kv, 0, 3, 1, 2), TKV_OK);
    CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
    CHECK_EQ(m.tier[0].tokens + m.tier[1].tokens + m.tier[2].tokens, 2 * 502 - info.expired);
    tkv_destroy(kv);
    tkv_destroy(alone);
}

TEST(layers_with_their_own_plans) {
    tkv_layer_config layers[COUNT(plans)];
    tkv_config cfg = make_config(COUNT(plans), 1);
    tkv_cache *kv;
    int i, n, t;
    memset(layers, 0, sizeof layers);
    cfg.tiers.sink_tokens = 9; /* used where a field of a layer is 0 */
    cfg.tiers.hot_tokens = 40;
    cfg.tiers.warm_tokens = 90;
    cfg.tiers.warm.k = TKV_Q8;
    for (i = 0; i < COUNT(plans); i++) {
        layers[i].sink_tokens = plans[i].sink;
        layers[i].hot_tokens = plans[i].hot;
        layers[i].warm_tokens = plans[i].warm;
        if (i % 2) layers[i].warm.k = TKV_KIVI3;
        if (i % 3 == 0) layers[i].hot.v = TKV_F32;
    }
    cfg.layers = layers;
    kv = create_cache(&cfg);
    memset(layers, 0xff, sizeof layers); /* tkv_create copied what it needs */
    for (n = 100; n <= 700; n += 100) {
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 100), TKV_OK);
        check_cache_at(kv, "own plans", n);
        for (i = 0; i < COUNT(plans); i++) {
            plan p = plans[i];
            tkv_layer_info want;
            if (!p.sink) p.sink = 9;
            if (!p.hot) p.hot = 40;
            if (!p.warm) p.warm = 90;
            want = predict_tiers(p, i, COUNT(plans), n, n - 100);
            check_tier_counts(kv, 0, i, &want, "own plans", n);
            check_token_tiers(kv, 0, i, resolve_length(p.sink, 4));
        }
    }
    for (i = 0; i < COUNT(plans); i++) { /* checks the formats by the newest token and a warm block */
        tkv_layer_info info;
        int sink = resolve_length(plans[i].sink, 9), from;
        CHECK_EQ(tkv_get_layer(kv, 0, i, &info), TKV_OK);
        CHECK_EQ(tkv_read(kv, 0, i, 699, 1, k_out, v_out), TKV_OK);
        fill_rows(1, i, 699, 1, k_want, v_want);
        CHECK_NEAR(k_out[0], as_stored(TKV_F16, k_want[0]), 0);
        CHECK_NEAR(v_out[0], as_stored(i % 3 == 0 ? TKV_F32 : TKV_F16, v_want[0]), 0);
        if (!info.blocks[TKV_TIER_WARM] || info.blocks[TKV_TIER_ARCHIVE]) continue;
        from = sink + (info.blocks[TKV_TIER_WARM] - 1) * BLOCK;
        fill_rows(1, i, 0, from + BLOCK, k_want, v_want);
        for (t = 0; t < (from + BLOCK) * K_ROW; t++) k_want[t] = as_stored(TKV_F16, k_want[t]);
        for (t = 0; t < (from + BLOCK) * V_ROW && i % 3; t++) v_want[t] = as_stored(TKV_F16, v_want[t]);
        encode_and_decode(i % 2 ? TKV_KIVI3 : TKV_Q8, TKV_KIVI4, 64, from, BLOCK);
        CHECK_EQ(tkv_read(kv, 0, i, from, BLOCK, k_out, v_out), TKV_OK);
        CHECK_MEM(k_out, k_want + from * K_ROW, BLOCK * K_ROW * sizeof(float));
        CHECK_MEM(v_out, v_want + from * V_ROW, BLOCK * V_ROW * sizeof(float));
    }
    tkv_destroy(kv);
}

TEST(last_error_is_empty_after_success) {
    tkv_config cfg = make_config(1, 1);
    tkv_cache *kv = create_cache(&cfg);
    int i;
    for (i = 0; i < 9; i++) {
        tkv_status st = TKV_OK;
        CHECK_EQ(tkv_append(kv, 0, 9, k_in, v_in, 1), TKV_ERR_ARG);
        CHECK(tkv_get_last_error(kv)[0] != 0);
        (void)tkv_read(kv, 0, 0, 99, 1, k_out, v_out); /* neither call changes the message */
        (void)tkv_check(kv, NULL, 0);
        CHECK(tkv_get_last_error(kv)[0] != 0);
        if (i == 0) st = append_tokens(kv, 0, 0, 1, 10);
        if (i == 1) st = tkv_append(kv, 0, 0, NULL, NULL, 0);
        if (i == 2) st = tkv_seq_reserve(kv, 0, 4);
        if (i == 3) st = tkv_seq_begin(kv, 0);
        if (i == 4) st = tkv_seq_commit(kv, 0);
        if (i == 5) st = tkv_seq_truncate(kv, 0, 5);
        if (i == 6) st = tkv_seq_flush(kv, 0, TKV_FLUSH_ALL);
        if (i == 7) st = tkv_seq_begin(kv, 0) ? TKV_ERR_STATE : tkv_seq_abort(kv, 0);
        if (i == 8) st = tkv_seq_reset(kv, 0);
        CHECK_EQ(st, TKV_OK);
        CHECK_STR(tkv_get_last_error(kv), "");
    }
    tkv_destroy(kv);
}

/* >>idle time */
static int stop_after(void *user) { return (*(int *)user)-- <= 0; }

static tkv_config maintain_config(int kind) {
    tkv_config cfg = make_config(3, 1);
    cfg.tiers.hot_tokens = 100;
    cfg.tiers.warm_tokens = 192;
    if (kind == 1) cfg.model.window = 300;
    if (kind == 2) cfg.evict.policy = TKV_EVICT_SLIDING, cfg.evict.keep_tokens = 500;
    if (kind == 3) { /* tables are learned at 512 and 2,048 tokens */
        cfg.tiers.warm.k = TKV_A40, cfg.tiers.warm.v = TKV_R40;
        cfg.tiers.archive.k = TKV_A30, cfg.tiers.archive.v = TKV_R30;
    }
    return cfg;
}

/* Without a budget, tkv_maintain before an append changes nothing after it, however much work it did. */
TEST(maintain_does_the_work_of_the_next_append) {
    int kind;
    for (kind = 0; kind < 4; kind++) {
        const tkv_config cfg = maintain_config(kind);
        tkv_cache *plain = create_cache(&cfg), *kv = create_cache(&cfg);
        tkv_rng rng = tkv_rng_seed((uint64_t)kind);
        int n_done = 0, n_steps = tkv_test_quick() ? 30 : 100;
        while (n_steps-- > 0) {
            const int n = 1 + tkv_rng_below(&rng, 60), max_work = tkv_rng_below(&rng, 8);
            int done = -1, layer, time_left = tkv_rng_below(&rng, 16);
            tkv_layer_info a, b;
            CHECK_EQ(append_to_all_layers(plain, 0, 0, n, n), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, n, n), TKV_OK);
            if (kind != 2 && n_steps % 8 == 0) {
                snapshot now = snapshot_of(plain);
                check_unchanged(kv, &now, "maintained");
            }
            for (layer = 0; layer < 3; layer++) {
                CHECK_EQ(tkv_get_layer(plain, 0, layer, &a), TKV_OK);
                CHECK_EQ(tkv_get_layer(kv, 0, layer, &b), TKV_OK);
                CHECK_MEM(&a, &b, sizeof a);
            }
            CHECK_EQ(tkv_maintain(kv, max_work, n_steps % 2 ? stop_after : NULL, &time_left, &done), TKV_OK);
            CHECK(done >= 0 && done <= max_work);
            n_done += done;
            check_cache_at(kv, "maintained", n_steps);
        }
        CHECK(n_done > (tkv_test_quick() ? 10 : 40));
        tkv_destroy(plain);
        tkv_destroy(kv);
    }
}

/* With all its work done, the next append recodes nothing. */
TEST(appends_after_maintain_recode_nothing) {
    const tkv_config cfg = maintain_config(3);
    tkv_cache *kv = create_cache(&cfg);
    int t, done, time_left = 2;
    for (t = 0; t < 2200; t++) {
        const uint64_t before = budget_of(kv).demoted;
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 1, 1), TKV_OK);
        CHECK_EQ(budget_of(kv).demoted, before);
        CHECK_EQ(tkv_maintain(kv, 1000, NULL, NULL, &done), TKV_OK);
        CHECK_EQ(budget_of(kv).demoted, before + (uint64_t)done);
    }
    CHECK(budget_of(kv).demoted > 100);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 512, 512), TKV_OK);
    CHECK_EQ(tkv_maintain(kv, 1000, NULL, NULL, &done), TKV_OK);
    CHECK(done > 0);
    check_read(kv, 0, 1, 0, 2200, 512, TKV_F16); /* the last append stays exact */
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 1, 1), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 1, 1), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 512, 512), TKV_OK);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_maintain(kv, 1000, NULL, NULL, &done), TKV_OK);
    CHECK_EQ(done, 0); /* a step is open */
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 512, 512), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 0, 0, 1), TKV_OK);
    CHECK_EQ(tkv_maintain(kv, 1000, stop_after, &time_left, &done), TKV_OK);
    CHECK_LE(done, 2);
    CHECK_LE(time_left, 0);
    tkv_destroy(kv);
}

/* >>wiping */
enum { WIPE_BYTES = 8 << 20, PATTERN = 0x5a3c };

typedef struct keeping_allocator { /* never gives freed memory out again */
    uint8_t *bytes;
    size_t used;
} keeping_allocator;

static void *keep_alloc(void *user, size_t size, size_t align) {
    keeping_allocator *p = (keeping_allocator *)user;
    const size_t at = (p->used + align - 1) / align * align;
    if (at + size > WIPE_BYTES) return NULL;
    p->used = at + size;
    return p->bytes + at;
}

static void keep_release(void *user, void *ptr, size_t size, size_t align) {
    (void)user;
    (void)ptr;
    (void)size;
    (void)align;
}

/* Places where the pattern stands twice, as F16 or as the float that it stands for. */
static int count_pattern(const uint8_t *bytes, size_t n) {
    const uint16_t f16[2] = {PATTERN, PATTERN};
    const float f32 = float_of_f16(PATTERN);
    uint32_t as_f16 = 0, as_f32 = 0, last = 0; /* four bytes, the first one lowest */
    size_t i;
    int found = 0;
    for (i = 0; i < 4; i++) {
        as_f16 |= (uint32_t)((const uint8_t *)f16)[i] << 8 * i;
        as_f32 |= (uint32_t)((const uint8_t *)&f32)[i] << 8 * i;
    }
    for (i = 0; i < n; i++) {
        last = last >> 8 | (uint32_t)bytes[i] << 24;
        found += i >= 3 && (last == as_f16 || last == as_f32);
    }
    return found;
}

static void append_pattern(tkv_cache *kv, int seq, int n, int chunk) {
    int i, layer;
    for (i = 0; i < chunk * K_ROW; i++) k_in[i] = float_of_f16(PATTERN);
    for (i = 0; i < chunk * V_ROW; i++) v_in[i] = float_of_f16(PATTERN);
    for (; n > 0; n -= chunk)
        for (layer = 0; layer < 2; layer++) CHECK_EQ(tkv_append(kv, seq, layer, k_in, v_in, chunk), TKV_OK);
}

/* With cfg.host.wipe_freed, no row of a sequence is in memory after its reset, nor one that was cut off. */
TEST(wiping_leaves_nothing) {
    int kind;
    for (kind = 0; kind < 10; kind++) {
        const int in_place = kind % 5 == 1, wipes = kind < 5;
        tkv_config cfg = make_config(2, 2);
        keeping_allocator p;
        tkv_cache *kv = NULL;
        size_t bytes = WIPE_BYTES;
        p.bytes = (uint8_t *)calloc(1, WIPE_BYTES);
        p.used = 0;
        if (!p.bytes) exit(2);
        cfg.tiers.hot_tokens = 100;
        cfg.limits.max_tokens = 2048;
        cfg.host.wipe_freed = wipes;
        cfg.host.allocator.user = &p;
        cfg.host.allocator.alloc = keep_alloc;
        cfg.host.allocator.release = keep_release;
        if (kind % 5 == 2) cfg.budget.bytes = 200 * 1000;
        if (kind % 5 == 3) cfg.evict.policy = TKV_EVICT_SLIDING, cfg.evict.keep_tokens = 400;
        if (kind % 5 == 4) cfg.meter.heads = 1;
        if (in_place) CHECK_EQ(tkv_create_in_place(&cfg, p.bytes, bytes, &kv, NULL, 0), TKV_OK);
        else kv = create_cache(&cfg);
        note_config(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 1, 1, 300, 50), TKV_OK);
        append_pattern(kv, 1, 40, 20);
        CHECK(count_pattern(p.bytes, WIPE_BYTES) > 0);
        CHECK_EQ(tkv_seq_truncate(kv, 1, 300), TKV_OK);
        CHECK_EQ(count_pattern(p.bytes, WIPE_BYTES) == 0, wipes);
        CHECK_EQ(tkv_seq_begin(kv, 1), TKV_OK);
        append_pattern(kv, 1, 40, 20);
        CHECK_EQ(tkv_seq_abort(kv, 1), TKV_OK);
        CHECK_EQ(count_pattern(p.bytes, WIPE_BYTES) == 0, wipes);
        append_pattern(kv, 0, 700, 50);
        CHECK_EQ(append_to_all_layers(kv, 1, 1, 300, 50), TKV_OK);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        CHECK_EQ(count_pattern(p.bytes, WIPE_BYTES) == 0, wipes);
        check_cache_at(kv, "wiped", kind);
        append_pattern(kv, 0, 700, 50);
        tkv_destroy(kv);
        CHECK_EQ(count_pattern(p.bytes, WIPE_BYTES) == 0, wipes);
        free(p.bytes);
    }
}

/* Tokens with values of their own, in F32, so that memory shows which are there. */
typedef struct marked_cache {
    keeping_allocator p;
    tkv_cache *kv;
    int appended; /* tokens, of all sequences */
} marked_cache;

static float value_of_token(int token) { return 1000.5f + (float)token; }

static void append_marked(marked_cache *m, int seq, int n) {
    float x[16];
    int i, c;
    for (i = 0; i < n; i++, m->appended++) {
        for (c = 0; c < 16; c++) x[c] = value_of_token(m->appended);
        CHECK_EQ(tkv_append(m->kv, seq, 0, x, x, 1), TKV_OK);
    }
}

static void make_marked_with(marked_cache *m, int n_anchors, int window, tkv_evict_policy policy) {
    tkv_config cfg = make_sized_config(1, 1, 1, 16, 3, 512);
    m->p.bytes = (uint8_t *)calloc(1, WIPE_BYTES);
    m->p.used = 0;
    m->appended = 0;
    if (!m->p.bytes) exit(2);
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.model.rope.dim = TKV_OFF;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.tiers.n_anchors = n_anchors;
    cfg.model.window = window;
    cfg.limits.max_tokens = 600;
    if (n_anchors) { /* all other tokens are coded at once */
        cfg.tiers.hot_tokens = 1;
        cfg.importance.sample_every = 1;
    }
    cfg.evict.policy = policy;
    cfg.host.wipe_freed = 1;
    cfg.host.allocator.user = &m->p;
    cfg.host.allocator.alloc = keep_alloc;
    cfg.host.allocator.release = keep_release;
    m->kv = create_cache(&cfg);
}

static void make_marked(marked_cache *m, int n_anchors, int window) {
    make_marked_with(m, n_anchors, window, TKV_EVICT_NONE);
}

static void destroy_marked(marked_cache *m) {
    check_cache(m->kv);
    tkv_destroy(m->kv);
    free(m->p.bytes);
}

/* Tokens from .. to - 1 that are anywhere in memory. */
static int n_in_memory(const marked_cache *m, int from, int to) {
    int n = 0;
    for (; from < to; from++) {
        const float x = value_of_token(from);
        size_t i;
        for (i = 0; i + 4 <= m->p.used; i += 4)
            if (!memcmp(m->p.bytes + i, &x, 4)) break;
        n += i + 4 <= m->p.used;
    }
    return n;
}

/* Checks that sequence `seq` holds the tokens from .. to - 1, from index `at` on. */
static void check_marked(marked_cache *m, int seq, int at, int from, int to) {
    float k[16], v[16];
    for (; from < to; from++, at++) {
        CHECK_EQ(tkv_read(m->kv, seq, 0, at, 1, k, v), TKV_OK);
        CHECK_NEAR(k[0], value_of_token(from), 0.0);
        CHECK_NEAR(v[15], value_of_token(from), 0.0);
    }
}

/* A block can have several holders. A token goes when none of them has it any more, and not before. */
TEST(wiping_knows_who_holds_a_token) {
    enum { N = 140 };
    int kept[30], i, n;
    marked_cache m;
    make_marked(&m, 0, 0); /* a shift has split the block: both parts are this sequence's */
    append_marked(&m, 0, N);
    CHECK_EQ(tkv_seq_shift(m.kv, 0, 80, TKV_UNLIMITED, 3), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(m.kv, 0, 100), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 100, N), 0);
    CHECK_EQ(tkv_seq_remove(m.kv, 0, 90, 93), TKV_OK); /* 87 .. 89 */
    CHECK_EQ(n_in_memory(&m, 87, 90), 0);
    CHECK_EQ(tkv_seq_truncate(m.kv, 0, 75), TKV_OK); /* the second part goes, the first one stays */
    CHECK_EQ(n_in_memory(&m, 75, N), 0);
    check_marked(&m, 0, 0, 0, 75);
    destroy_marked(&m);

    make_marked(&m, 0, 0); /* kept tokens move to other slots */
    append_marked(&m, 0, N);
    for (i = 0; i < 10; i++) kept[i] = 110 + i;
    CHECK_EQ(tkv_seq_keep(m.kv, 0, 100, kept, 10), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 100, 110) + n_in_memory(&m, 120, N), 0);
    check_marked(&m, 0, 0, 0, 100);
    check_marked(&m, 0, 100, 110, 120);
    for (i = 0; i < 5; i++) kept[i] = 20 + 17 * i; /* with gaps, from the first blocks on */
    CHECK_EQ(tkv_seq_keep(m.kv, 0, 20, kept, 5), TKV_OK);
    for (i = n = 0; i < N; i++) n += n_in_memory(&m, i, i + 1);
    CHECK_EQ(n, 25);
    check_marked(&m, 0, 0, 0, 20);
    check_marked(&m, 0, 22, 54, 55);
    destroy_marked(&m);

    make_marked(&m, 0, 0); /* another sequence has the first 100 of them */
    append_marked(&m, 0, N);
    CHECK_EQ(tkv_seq_fork(m.kv, 0, 1, 100), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(m.kv, 0, 80), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 100, N), 0);
    check_marked(&m, 1, 0, 0, 100);
    CHECK_EQ(tkv_seq_remove(m.kv, 1, 30, 40), TKV_OK); /* the first one still has them */
    check_marked(&m, 0, 0, 0, 80);
    CHECK_EQ(tkv_seq_reset(m.kv, 0), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 30, 40), 0);
    check_marked(&m, 1, 0, 0, 30);
    check_marked(&m, 1, 40, 40, 100);
    CHECK_EQ(tkv_seq_truncate(m.kv, 1, 0), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 0, N), 0);
    destroy_marked(&m);

    make_marked(&m, 0, 0); /* a fork goes on in the shared block, the other one gets a copy */
    append_marked(&m, 0, 100);
    CHECK_EQ(tkv_seq_fork(m.kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    append_marked(&m, 1, 20);
    append_marked(&m, 0, 20);
    check_marked(&m, 1, 0, 0, 120);
    check_marked(&m, 0, 100, 120, 140);
    CHECK_EQ(tkv_seq_reset(m.kv, 1), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 100, 120), 0);
    check_marked(&m, 0, 0, 0, 100);
    check_marked(&m, 0, 100, 120, 140);
    destroy_marked(&m);

    make_marked(&m, 0, 0); /* one that gets a copy leaves tokens behind that only it had */
    append_marked(&m, 0, N);
    CHECK_EQ(tkv_seq_fork(m.kv, 0, 1, 100), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(m.kv, 0, 110), TKV_OK);
    append_marked(&m, 0, 1);
    CHECK_EQ(tkv_seq_reset(m.kv, 0), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 100, N + 1), 0);
    check_marked(&m, 1, 0, 0, 100);
    destroy_marked(&m);

    make_marked(&m, 0, 0); /* tokens copied back: the list holds their block twice */
    append_marked(&m, 0, N);
    CHECK_EQ(tkv_seq_fork(m.kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_copy(m.kv, 1, 10, 40, 0, 500), TKV_OK);
    CHECK_EQ(tkv_seq_reset(m.kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_remove(m.kv, 0, 20, 30), TKV_OK);
    check_marked(&m, 0, N, 10, 40);
    CHECK_EQ(tkv_seq_remove(m.kv, 0, 510, 520), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 20, 30), 0);
    check_marked(&m, 0, N, 10, 20);
    check_marked(&m, 0, 30, 30, N);
    destroy_marked(&m);
}

/* A slide takes tokens out of blocks that stay, and out of blocks that another sequence holds. */
TEST(slides_and_windows_wipe) {
    marked_cache m;
    int n;
    make_marked(&m, 0, 0);
    append_marked(&m, 0, 600);
    CHECK_EQ(tkv_seq_fork(m.kv, 0, 1, 140), TKV_OK);
    CHECK_EQ(tkv_seq_remove(m.kv, 1, 50, 60), TKV_OK);
    CHECK_EQ(tkv_seq_remove(m.kv, 0, 140, 150), TKV_OK);
    CHECK_EQ(tkv_seq_slide(m.kv, 0, 64, &n), TKV_OK);
    CHECK_EQ(n, 64);
    CHECK_EQ(n_in_memory(&m, 50, 60), 0);
    check_marked(&m, 1, 0, 0, 50);
    CHECK_EQ(tkv_seq_slide(m.kv, 0, 512, &n), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 140, 4 + 64 + n), 0);
    check_marked(&m, 0, 4, 4 + 64 + n, 600);
    check_marked(&m, 1, 60, 60, 140);
    destroy_marked(&m);

    make_marked(&m, 0, 100);
    append_marked(&m, 0, 140);
    CHECK_EQ(tkv_seq_fork(m.kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_remove(m.kv, 1, 50, 60), TKV_OK);
    append_marked(&m, 0, 300);
    CHECK_EQ(n_in_memory(&m, 50, 60), 0); /* they expired in the other one */
    check_marked(&m, 1, 60, 60, 140);
    destroy_marked(&m);
}

/* Several shared blocks expire in one call. Another sequence holds them too, at other places of its list, and keeps its
 * tokens. removed: block that it removed before. n_first: tokens of a third sequence. They change the numbers of blocks. */
static void check_expiry_of_shared_blocks(int removed, int n_first) {
    enum { SINKS = 4, N_BLOCKS = 5, N = SINKS + 64 * N_BLOCKS, EXPIRED = N - 64 };
    const int from = SINKS + 64 * removed;
    marked_cache m;
    int done;
    make_marked(&m, 0, 300);
    append_marked(&m, 0, N);
    CHECK_EQ(tkv_seq_fork(m.kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_reset(m.kv, 0), TKV_OK);
    append_marked(&m, 0, n_first);
    CHECK_EQ(tkv_seq_fork(m.kv, 1, 2, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_shift(m.kv, 1, N - 20, TKV_UNLIMITED, 304), TKV_OK);
    CHECK_EQ(tkv_seq_remove(m.kv, 2, from, from + 64), TKV_OK);
    CHECK_EQ(tkv_maintain(m.kv, 10, NULL, NULL, &done), TKV_OK);
    CHECK_EQ(tkv_read(m.kv, 1, 0, EXPIRED - 1, 1, k_out, v_out), TKV_ERR_RANGE);
    check_marked(&m, 1, EXPIRED, EXPIRED, N);
    check_marked(&m, 2, 0, 0, from);
    check_marked(&m, 2, from + 64, from + 64, N);
    CHECK_EQ(n_in_memory(&m, from, from + 64), 0);
    CHECK_EQ(tkv_seq_reset(m.kv, 2), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 0, EXPIRED), 0);
    destroy_marked(&m);
}

/* Behind a jump of positions a block goes on in another entry of its list. The first of these expire, the others stay. */
static void check_expiry_before_jumps(void) {
    static const int jumps[] = {24, 44, 88, 108,
                                132}; /* indices. Behind the sinks the first block has 4 .. 67. */
    marked_cache m;
    tkv_append_params p;
    int i, j, position = 0;
    make_marked(&m, 0, 300);
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.k = k_in;
    p.v = v_in;
    p.token_positions = &position;
    for (i = 0; i <= 132; i++, position++, m.appended++) {
        for (j = 0; j < COUNT(jumps); j++) position += jumps[j] != i ? 0 : i == 132 ? 320 : 5;
        for (j = 0; j < 16; j++) k_in[j] = v_in[j] = value_of_token(i);
        CHECK_EQ(tkv_append_ex(m.kv, &p), TKV_OK);
    }
    CHECK_EQ(tkv_seq_remove(m.kv, 0, 29, 49), TKV_OK); /* 24 .. 43, and their entry */
    CHECK_EQ(tkv_maintain(m.kv, 10, NULL, NULL, &i), TKV_OK);
    CHECK_EQ(tkv_read(m.kv, 0, 0, 87, 1, k_out, v_out), TKV_ERR_RANGE);
    check_marked(&m, 0, 88, 88, 133);
    CHECK_EQ(n_in_memory(&m, 0, 88), 0);
    destroy_marked(&m);
}

TEST(expired_blocks_are_wiped_for_their_last_holder) {
    int removed, n_first;
    check_expiry_before_jumps();
    for (removed = 0; removed < 4; removed++)
        for (n_first = 1; n_first < 140; n_first += 64) check_expiry_of_shared_blocks(removed, n_first);
}

/* After an eviction, exact tokens of a block fill the block before it. No copy stays where they were. */
TEST(tokens_that_fill_another_block_are_wiped) {
    uint64_t victims[4] = {0, 0, 0, 0};
    marked_cache m;
    tkv_layer_info info;
    int t;
    make_marked_with(&m, 0, 0, TKV_EVICT_H2O);
    append_marked(&m, 0, 200);
    for (t = 4; t < 52; t++) add_to_mask(victims, t);
    CHECK_EQ(evict_tokens(m.kv, 0, TKV_ALL_LAYERS, victims, 200), TKV_OK);
    CHECK_EQ(tkv_get_layer(m.kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.evicted, 48);
    check_marked(&m, 0, 52, 52, 200);
    CHECK_EQ(n_in_memory(&m, 4, 52), 0); /* their block was written again */
    CHECK_EQ(tkv_seq_remove(m.kv, 0, 60, 180), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 60, 180), 0);
    check_marked(&m, 0, 52, 52, 60);
    check_marked(&m, 0, 180, 180, 200);
    destroy_marked(&m);
}

/* Anchors have exact copies in blocks of their own. */
TEST(removed_anchors_are_wiped) {
    enum { N = 300 };
    static float q[N * 16], out[N * 16];
    marked_cache m;
    int i, n_anchors = 0;
    make_marked(&m, 32, 0);
    for (i = 0; i < N * 16; i++) q[i] = 1.0f;
    append_marked(&m, 0, N);
    CHECK_EQ(tkv_attend(m.kv, 0, 0, q, N, out), TKV_OK);
    append_marked(&m, 0, N);
    for (i = 4; i < 2 * N - 130; i++) n_anchors += n_in_memory(&m, i, i + 1);
    CHECK_EQ(n_anchors, 32);
    CHECK_EQ(tkv_seq_remove(m.kv, 0, 4, 2 * N - 130), TKV_OK);
    CHECK_EQ(n_in_memory(&m, 4, 2 * N - 130), 0);
    destroy_marked(&m);
}

/* Cuts into coded tokens leave short blocks. They merge when there are too many, and in tkv_maintain. */
TEST(short_blocks_merge) {
    int meta, round, layer;
    for (meta = 0; meta < 2; meta++) {
        tkv_config cfg = make_config(2, 1);
        tkv_memory_info torn, fresh;
        tkv_layer_info info;
        tkv_cache *kv;
        cfg.tiers.hot_tokens = 1; /* nearly all tokens are coded */
        cfg.tiers.warm_tokens = 200;
        if (meta) cfg.importance.sample_every = 1;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 200, 50), TKV_OK);
        for (round = 0; round < 80; round++) { /* 10 tokens stay of each 200 */
            CHECK_EQ(append_to_all_layers(kv, 0, 1, 200, 50), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(kv, 0, 210 + 10 * round), TKV_OK);
            check_cache_at(kv, "cut", round);
            for (layer = 0; layer < 2; layer++) {
                CHECK_EQ(tkv_get_layer(kv, 0, layer, &info), TKV_OK);
                CHECK_LE(info.blocks[TKV_TIER_HOT] + info.blocks[TKV_TIER_WARM] +
                             info.blocks[TKV_TIER_ARCHIVE],
                         2 * ((info.length + 63) / 64) + 2);
            }
        }
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 50), TKV_OK);
        CHECK_EQ(tkv_maintain(kv, 1000, NULL, NULL, NULL), TKV_OK);
        check_cache_at(kv, "maintained", meta);
        CHECK_EQ(tkv_get_memory(kv, &torn), TKV_OK);
        CHECK_EQ(tkv_read(kv, 0, 1, 0, 1100, k_out, v_out), TKV_OK);
        fill_rows(1, 1, 0, 1100, k_want, v_want);
        CHECK_LE(mean_squared_difference(k_out, k_want, 1100 * K_ROW), 0.5);
        CHECK_LE(mean_squared_difference(v_out, v_want, 1100 * V_ROW), 0.5);
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 1100, 50), TKV_OK);
        CHECK_EQ(tkv_get_memory(kv, &fresh), TKV_OK);
        CHECK_LE(torn.total, 1.3 * (double)fresh.total);
        tkv_destroy(kv);
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(config_each_field);
    RUN(config_each_layer);
    RUN(config_fields_of_a_layer_that_need_others);
    RUN(config_pressure_of_one_level);
    RUN(config_of_garbage_is_refused);
    RUN(validate_config_explains_refusals);
    RUN(config_presets);
    RUN(config_zero_is_balanced);
    RUN(config_defaults);
    RUN(tiers_token_by_token);
    RUN(tiers_in_chunks);
    RUN(layers_take_turns_to_demote);
    RUN(reads_equal_decoded_blocks);
    RUN(exact_tokens_stay_exact);
    RUN(aligned_chunks_equal_single_tokens);
    RUN(sequences_are_independent);
    RUN(batch_equals_single_appends);
    RUN(batch_of_too_many_rows);
    RUN(batch_is_all_or_nothing);
    RUN(positions_of_appends);
    RUN(positions_in_a_batch);
    RUN(batch_over_many_pages);
    RUN(input_types_and_strides);
    RUN(nonfinite_and_overflow);
    RUN(limits);
    RUN(abort_restores);
    RUN(steps_equal_appends);
    RUN(steps_out_of_order);
    RUN(reserved_appends_succeed);
    RUN(reservation_not_used_by_other_sequences);
    RUN(reservation_not_used_by_other_rows);
    RUN(reservation_not_used_by_other_layers);
    RUN(the_index_grows_beside_a_reservation);
    RUN(reservation_survives_other_calls);
    RUN(reserve_limits);
    RUN(truncate_the_tail);
    RUN(roll_back_into_coded_tokens);
    RUN(truncate_and_append_again);
    RUN(short_blocks_merge);
    RUN(check_after_truncation);
    RUN(reset);
    RUN(flush_due);
    RUN(flush_full_and_all);
    RUN(flush_refusals);
    RUN(maintain_does_the_work_of_the_next_append);
    RUN(appends_after_maintain_recode_nothing);
    RUN(wiping_leaves_nothing);
    RUN(wiping_knows_who_holds_a_token);
    RUN(slides_and_windows_wipe);
    RUN(expired_blocks_are_wiped_for_their_last_holder);
    RUN(tokens_that_fill_another_block_are_wiped);
    RUN(removed_anchors_are_wiped);
    RUN(windows_expire_old_tokens);
    RUN(windows_and_the_longest_truncation);
    RUN(layers_that_share_or_have_no_cache);
    RUN(layers_with_their_own_plans);
    RUN(last_error_is_empty_after_success);
    return tkv_test_end();
}
