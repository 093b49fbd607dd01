/*
 * test_text.c - configs as lines, TOML and JSON, in both directions, and random bytes for the parser. Also the report of
 * a cache as JSON and for Prometheus, presets and ages. test_text.py reads texts and reports with independent parsers.
 */
#include "config_texts.h"
#include "kit.h"

enum { REASON = 200, MAX_LAYERS = 8, TEXT_BYTES = 1 << 16 };

static tkv_layer_config layer_array[MAX_LAYERS];
static tkv_level level_array[TKV_MAX_LEVELS];
static float frequency_array[(1 + MAX_LAYERS) * TKV_MAX_HEAD_DIM / 2];
static const tkv_config_arrays arrays = {layer_array,    MAX_LAYERS,      level_array,
                                         TKV_MAX_LEVELS, frequency_array, COUNT(frequency_array)};

static tkv_status parse_config(tkv_config *cfg, const char *text, char *reason) {
    return tkv_parse_config(cfg, &arrays, text, strlen(text), reason, REASON);
}

/* >>reading */
static void check_sample(const tkv_config *c) {
    int i;
    CHECK_EQ(c->model.n_layers, 6);
    CHECK_EQ(c->model.n_heads, 8);
    CHECK_EQ(c->model.n_kv_heads, 2);
    CHECK_EQ(c->model.head_dim, 64);
    CHECK_NEAR(c->model.scale, .125, 0);
    CHECK_EQ(c->limits.max_tokens, 4096);
    CHECK_EQ(c->tiers.hot_tokens, TKV_UNLIMITED);
    CHECK_EQ(c->tiers.sink_tokens, TKV_OFF);
    CHECK_EQ(c->tiers.archive.k, TKV_A25);
    CHECK_EQ(c->tiers.archive.v, TKV_R20);
    CHECK_EQ(c->tiers.warm.k, TKV_KIVI4);
    CHECK_EQ(c->tiers.warm.v, TKV_KIVI4);
    CHECK_EQ(c->format.fit, TKV_FIT_CLIP | TKV_FIT_NORM);
    CHECK_EQ(c->format.rotate, TKV_ROTATE_V);
    CHECK_EQ(c->format.kvquant, TKV_KVQUANT_POST_ROPE | TKV_KVQUANT_DENSE);
    CHECK_EQ(c->format.center_k, 1);
    CHECK_EQ(c->host.nonfinite, TKV_NONFINITE_SATURATE);
    CHECK_EQ(c->host.isa, TKV_ISA_SCALAR);
    CHECK_EQ(c->model.rope.dim, 8);
    REQUIRE(c->model.rope.frequencies == frequency_array);
    CHECK_NEAR(frequency_array[2], .25, 0);
    CHECK_NEAR(frequency_array[3], 1e-3f, 0);
    REQUIRE(c->layers == layer_array);
    for (i = 0; i < 6; i++) CHECK_EQ(layer_array[i].window, i >= 1 && i <= 4 ? 1024 : 0);
    CHECK_EQ(layer_array[5].archive.k, TKV_KIVI2);
    CHECK_EQ(layer_array[5].archive.v, TKV_FORMAT_DEFAULT);
}

TEST(both_syntaxes) {
    char reason[REASON];
    const char *const texts[] = {sample, sample_json};
    int i;
    for (i = 0; i < 2; i++) {
        tkv_config cfg = tkv_default_config();
        memset(layer_array, 0xff, sizeof layer_array);
        cfg.tiers.warm_tokens = 77; /* not in the texts */
        CHECK_MSG(parse_config(&cfg, texts[i], reason) == TKV_OK, "%s", reason);
        CHECK_STR(reason, "");
        check_sample(&cfg);
        CHECK_EQ(cfg.tiers.warm_tokens, 77);
        cfg.tiers.warm_tokens = 0;
        CHECK_MSG(tkv_validate_config(&cfg, reason, REASON) == TKV_OK, "%s", reason);
    }
}

TEST(spellings_read_alike) {
    static char want[1000], said[1000];
    char reason[REASON];
    int i;
    for (i = 0; i < COUNT(spellings); i++) {
        tkv_config cfg = tkv_default_config();
        memset(layer_array, 0x55, sizeof layer_array);
        memset(level_array, 0x55, sizeof level_array);
        CHECK_MSG(parse_config(&cfg, spellings[i], reason) == TKV_OK, "%d: %s", i, reason);
        CHECK_EQ(tkv_print_config(&cfg, TKV_TEXT_LINES, i ? said : want, sizeof said, NULL), TKV_OK);
        if (i) CHECK_STR(said, want);
        CHECK_EQ(cfg.layers[4].rope.dim, 2);
        CHECK_EQ(cfg.layers[3].window + cfg.layers[5].window, 0);
        CHECK_NEAR(frequency_array[1], .5, 0);
    }
}

/* Each style, letter by letter. */
TEST(styles_of_writing) {
    static const char toml[] =
        "[model]\nn_layers = 6\nn_heads = 8\nhead_dim = 64\n\n[model.rope]\ndim = 4\n"
        "frequencies = [1, 0.5]\n\n[tiers]\nhot_tokens = 1024\narchive = \"a25/r20\"\n\n"
        "[host]\nprecise = true\n\n[budget]\nbytes = 65536\nn_levels = 2\n\n"
        "[budget.pressure]\nthreshold = [\"zero\", 0.5]\n\n[budget.ladder.0]\n"
        "hot_tokens = \"unlimited\"\n\n[budget.ladder.1]\nwarm = \"q8\"\n\n"
        "[layers.0]\nwindow = 7\n\n[layers.1]\nwindow = 7\n\n[layers.2]\nwindow = 7\n\n"
        "[layers.4]\nsink_tokens = \"off\"\n\n[layers.4.rope]\ndim = 2\nbase = 500\n";
    static const char nested[] =
        "{\n  \"model\": {\n    \"n_layers\": 6,\n    \"n_heads\": 8,\n    \"head_dim\": 64,\n"
        "    \"rope\": {\n      \"dim\": 4,\n      \"frequencies\": [1, 0.5]\n    }\n  },\n"
        "  \"tiers\": {\n    \"hot_tokens\": 1024,\n    \"archive\": \"a25/r20\"\n  },\n"
        "  \"host\": {\n    \"precise\": true\n  },\n"
        "  \"budget\": {\n    \"bytes\": 65536,\n    \"n_levels\": 2,\n"
        "    \"pressure\": {\n      \"threshold\": [\"zero\", 0.5]\n    },\n"
        "    \"ladder\": {\n      \"0\": {\n        \"hot_tokens\": \"unlimited\"\n      },\n"
        "      \"1\": {\n        \"warm\": \"q8\"\n      }\n    }\n  },\n"
        "  \"layers\": {\n    \"0\": {\n      \"window\": 7\n    },\n    \"1\": {\n      \"window\": 7\n    "
        "},\n"
        "    \"2\": {\n      \"window\": 7\n    },\n    \"4\": {\n      \"sink_tokens\": \"off\",\n"
        "      \"rope\": {\n        \"dim\": 2,\n        \"base\": 500\n      }\n    }\n  }\n}\n";
    static char said[2000];
    tkv_config cfg = tkv_default_config(), none = cfg;
    char reason[REASON];
    CHECK_EQ(parse_config(&cfg, spellings[0], reason), TKV_OK);
    CHECK_EQ(tkv_print_config(&cfg, TKV_TEXT_TOML, said, sizeof said, NULL), TKV_OK);
    CHECK_STR(said, toml);
    CHECK_EQ(tkv_print_config(&cfg, TKV_TEXT_JSON_NESTED, said, sizeof said, NULL), TKV_OK);
    CHECK_STR(said, nested);
    CHECK_EQ(tkv_print_config(&none, TKV_TEXT_TOML, said, sizeof said, NULL), TKV_OK);
    CHECK_STR(said, "");
    CHECK_EQ(tkv_print_config(&none, TKV_TEXT_JSON_NESTED, said, sizeof said, NULL), TKV_OK);
    CHECK_STR(said, "{\n}\n");
    CHECK_EQ(tkv_print_config(&cfg, TKV_TEXT_COUNT, said, sizeof said, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_print_config(&cfg, -1, said, sizeof said, NULL), TKV_ERR_ARG);
    CHECK_STR(said, "{\n}\n");
}

TEST(presets_in_every_style) {
    static char text[2][2000];
    const char *name;
    char reason[REASON];
    int i, style;
    for (i = 0; (name = tkv_get_name(TKV_NAME_PRESET, i)) != NULL; i++)
        for (style = 0; style < TKV_TEXT_COUNT; style++) {
            tkv_config cfg = tkv_default_config(), back = cfg;
            CHECK_EQ(tkv_apply_preset(&cfg, name), TKV_OK);
            CHECK_EQ(tkv_print_config(&cfg, style, text[0], sizeof text[0], NULL), TKV_OK);
            CHECK_MSG(parse_config(&back, text[0], reason) == TKV_OK, "%s: %s\n%s", name, reason, text[0]);
            CHECK_MEM(&cfg.tiers, &back.tiers, sizeof cfg.tiers);
            CHECK_EQ(cfg.budget.n_levels, back.budget.n_levels);
            if (cfg.budget.n_levels)
                CHECK_MEM(cfg.budget.ladder, back.budget.ladder,
                          (size_t)cfg.budget.n_levels * sizeof *cfg.budget.ladder);
            CHECK_EQ(tkv_print_config(&back, style, text[1], sizeof text[1], NULL), TKV_OK);
            CHECK_STR(text[1], text[0]);
        }
    CHECK_LE(20, i);
}

TEST(budgets) {
    static const char text[] = "budget.bytes = 1.5G\nbudget.n_levels = 3\nbudget.ladder[0].hot_tokens = "
                               "unlimited\nbudget.ladder[1-2].warm = q8\n"
                               "budget.ladder[2].archive = a20/r15\nbudget.pressure.threshold = .7, "
                               ".9\nbudget.pressure.max_level = off\n";
    char reason[REASON], printed[600];
    tkv_config cfg = tkv_default_config(), back = cfg;
    CHECK_MSG(parse_config(&cfg, text, reason) == TKV_OK, "%s", reason);
    CHECK_EQ(cfg.budget.bytes, 3u << 29);
    REQUIRE(cfg.budget.ladder == level_array);
    CHECK_EQ(cfg.budget.ladder[0].hot_tokens, TKV_UNLIMITED);
    CHECK_EQ(cfg.budget.ladder[2].warm.v, TKV_Q8);
    CHECK_NEAR(cfg.budget.pressure.threshold[1], .9f, 0);
    CHECK_EQ(tkv_print_config(&cfg, 0, printed, sizeof printed, NULL), TKV_OK);
    CHECK_STR(
        printed,
        "budget.bytes = 1610612736\nbudget.n_levels = 3\nbudget.pressure.threshold = 0.7, "
        "0.9\nbudget.pressure.max_level = off\n"
        "budget.ladder[0].hot_tokens = unlimited\nbudget.ladder[1].warm = q8\nbudget.ladder[2].warm = q8\n"
        "budget.ladder[2].archive = a20/r15\n");
    CHECK_EQ(parse_config(&back, printed, reason), TKV_OK);
    CHECK_MEM(&cfg, &back, sizeof cfg);
    CHECK_EQ(parse_config(&back, "budget.ladder[8].warm = q8", reason), TKV_ERR_CONFIG);
    CHECK_EQ(parse_config(&back, "budget.n_levels = 9\nbudget.ladder[0].warm = q8", reason), TKV_ERR_CONFIG);
}

/* The smallest and the largest whole number can be printed and parsed. */
TEST(limits_of_whole_numbers) {
    tkv_config cfg = tkv_default_config(), back = cfg;
    char text[200], reason[REASON];
    cfg.evict.seed = -2147483647 - 1;
    cfg.model.n_layers = 2147483647;
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, NULL), TKV_OK);
    CHECK_MSG(parse_config(&back, text, reason) == TKV_OK, "%s", reason);
    CHECK_EQ(back.evict.seed, cfg.evict.seed);
    CHECK_EQ(back.model.n_layers, cfg.model.n_layers);
}

TEST(empty_texts) {
    static const char *const texts[] = {
        "",
        "\n\n",
        "format.fit = none\nhost.isa = auto\ntiers.hot = default\nformat.center_k = false\nmodel.scale = 0\n",
        "# nothing",
        "{}",
        "  # a\n {  } # b\n",
        "\xef\xbb\xbf{}",
        "\xef\xbb\xbf# a"};
    int i;
    for (i = 0; i < COUNT(texts); i++) {
        tkv_config cfg = tkv_default_config(), same = cfg;
        CHECK_EQ(tkv_parse_config(&cfg, NULL, texts[i], strlen(texts[i]), NULL, 0), TKV_OK);
        CHECK_MEM(&cfg, &same, sizeof cfg);
    }
}

/* Names of other designs are read, and written by their own names. */
TEST(other_names_of_formats) {
    static const struct {
        const char *name, *written;
        tkv_format format;
    } names[] = {{"fp16", "f16", TKV_F16},
                 {"q8", "q8", TKV_Q8},
                 {"fp8", "fp8-e4m3", TKV_FP8_E4M3},
                 {"q4", "kivi4", TKV_KIVI4}};
    char line[80], want[80], said[80], reason[REASON];
    int i, value = -1;
    for (i = 0; i < COUNT(names); i++) {
        tkv_config cfg = tkv_default_config();
        CHECK_EQ(tkv_find_name(TKV_NAME_FORMAT, names[i].name, &value), TKV_OK);
        CHECK_EQ(value, names[i].format);
        CHECK_STR(tkv_get_name(TKV_NAME_FORMAT, value), names[i].written);
        snprintf(line, sizeof line, "[tiers]\narchive = '%s/a30'", names[i].name);
        snprintf(want, sizeof want, "tiers.archive = %s/a30\n", names[i].written);
        CHECK_MSG(parse_config(&cfg, line, reason) == TKV_OK, "%s", reason);
        CHECK_EQ(tkv_print_config(&cfg, 0, said, sizeof said, NULL), TKV_OK);
        CHECK_STR(said, want);
    }
    CHECK_EQ(tkv_find_name(TKV_NAME_FORMAT, "q2", &value), TKV_ERR_RANGE);
    CHECK_EQ(tkv_find_name(TKV_NAME_PROFILE, "fp16", &value), TKV_ERR_RANGE);
    CHECK_EQ(value, TKV_KIVI4);
}

TEST(presets_come_first) {
    tkv_config cfg = tkv_default_config(), named;
    char reason[REASON];
    CHECK_EQ(parse_config(
                 &cfg,
                 "tiers.archive = q8\ntiers.hot_tokens = 32\npreset = by-context\nlimits.max_tokens = 4096\n",
                 reason),
             TKV_OK);
    CHECK_EQ(cfg.tiers.archive.k, TKV_Q8); /* the key overrides the preset, in any order */
    CHECK_EQ(cfg.tiers.hot_tokens, 32);
    CHECK_EQ(cfg.tiers.warm.k, TKV_KIVI4);
    CHECK_EQ(cfg.limits.max_tokens, 4096);
    cfg = tkv_default_config();
    CHECK_EQ(parse_config(&cfg, "{\"preset\": \"adr\", \"limits.max_tokens\": 4096}", reason), TKV_OK);
    named = tkv_default_config();
    named.limits.max_tokens = 4096;
    CHECK_EQ(tkv_apply_preset(&named, "adr"), TKV_OK);
    CHECK_MEM(&cfg, &named, sizeof cfg);
    CHECK_EQ(cfg.tiers.archive.k, TKV_SQUAT2); /* below 8K: max_tokens is set before the preset */
    /* a preset with a ladder; keys of the ladder replace it */
    cfg = tkv_default_config();
    CHECK_EQ(parse_config(&cfg, "preset = growing\n", reason), TKV_OK);
    REQUIRE(cfg.budget.ladder != NULL && cfg.budget.ladder != level_array);
    CHECK_EQ(cfg.budget.ladder[2].from_tokens, 8192);
    cfg = tkv_default_config();
    CHECK_EQ(parse_config(&cfg,
                          "preset = growing\nbudget.n_levels = 2\nbudget.ladder[1].archive = kivi2\n"
                          "budget.ladder[1].from_tokens = 500\n",
                          reason),
             TKV_OK);
    REQUIRE(cfg.budget.ladder == level_array);
    CHECK_EQ(cfg.budget.n_levels, 2);
    CHECK_EQ(level_array[1].archive.v, TKV_KIVI2);
    CHECK_EQ(level_array[1].from_tokens, 500);
    CHECK_EQ(level_array[0].archive.v, TKV_FORMAT_DEFAULT);
}

TEST(sentences_of_mistakes) {
    static const char *const cases[][2] = {
        {"model.n_layers = 2\nhot_tokenz = 3",
         "line 2: hot_tokenz is no key; the nearest one is tiers.hot_tokens"},
        {"colour = red", "line 1: colour is no key; keys are the fields of the config"},
        {"\n\nmodel.rope_dim = 3", "line 3: model.rope_dim is no key; the nearest one is model.rope.dim"},
        {"layer[3].window = 3",
         "line 1: layer[3].window is no key; the nearest one is layers[i] or [i-j], up to 4095"},
        {"layers[4096].window = 3", "line 1: layers[4096].window is no key"},
        {"layers[3-1].window = 3", "is no key"},
        {"layers[].window = 3", "is no key"},
        {"layers[1]window = 3", "is no key"},
        {"layers[1-].window = 3", "is no key"},
        {"layers[99999999999999999999].window = 3", "is no key"},
        {"layers = 3", "is no key"},
        {"start_canary = 3", "is no key"},
        {"host.allocator = 3", "is no key"},
        {"model.n_layers = two", "line 1: model.n_layers is two; it must be a whole number"},
        {"model.n_layers = [2]", "line 1: model.n_layers is 2; it must be a whole number without [ ]"},
        {"{\"model\": {\"n_layers\": [2]}}", "it must be a whole number without [ ]"},
        {"budget.bytes = [1G]", "64MiB without [ ]"},
        {"preset = [\"balanced\"]", "without [ ]"},
        {"model.n_layers = 2.5", "model.n_layers is 2.5; it must be a whole number"},
        {"model.n_layers = 2147483648", "it must be a whole number"},
        {"model.n_layers = 99999999999999999999999", "it must be a whole number"},
        {"model.n_layers =", "line 1: model.n_layers has no value; it must be a whole number"},
        {"tiers.hot_tokens = some", "it must be a whole number or off, unlimited"},
        {"format.center_k = yes", "it must be a whole number or false, true"},
        {"model.scale = 1e40", "line 1: model.scale is 1e40; it must be a number"},
        {"model.scale = nan", "it must be a number"},
        {"tiers.archive = kivi9", "tiers.archive is kivi9; it must be formats of K and V, such as a30/r20"},
        {"tiers.archive = kivi4/",
         "it must be formats of K and V, such as a30/r20, or one for both: K f32 f16 bf16"},
        {"tiers.archive = a30/r20/r20", "it must be formats"},
        {"tiers.archive = 7", "it must be formats"},
        {"format.fit = clip+", "it must be names joined by +: clip, norm, unbiased"},
        {"format.fit = clip+clip", "it must be names joined by +"},
        {"format.fit = none+clip", "it must be names joined by +"},
        {"format.fit = 3", "it must be names joined by +"},
        {"preset = best", "preset is best; it must be the name of a preset"},
        {"model.n_layers = 2\n\nmodel.n_layers = 2", "line 3: model.n_layers is there for the second time"},
        {"model.n_layers = 8\nlayers[0-3].window = 1\nlayers[3].window = 2",
         "line 3: layers[3].window is there for the second time"},
        {"model.n_layers = 2\nlayers[3].window = 1\nlayers[0].window = 1",
         "line 2: model.n_layers is 2; it must be 4 or more, by the highest"},
        {"layers[0].window = 1", "line 1: model.n_layers is 0; it must be 1 or more"},
        {"model.n_layers = 9\nlayers[0].window = 1",
         "line 2: the program's room for layers is 8; it must be 9 or more"},
        {"model.rope.dim = 8\nmodel.rope.frequencies = 1, 2, 3",
         "line 2: model.rope.dim is 8; it must be 6, two for each"},
        {"model.rope.frequencies = ", "it must be rope.dim / 2 numbers"},
        {"model.rope.frequencies = 1, two", "it must be rope.dim / 2 numbers"},
        {"model.rope.frequencies = 1,", "it must be rope.dim / 2 numbers"},
        {"model.rope.frequencies = ,1", "it must be rope.dim / 2 numbers"},
        {"n_layers 3", "line 1: there is no =; write key = value"},
        {"n_layers\n= 3", "line 1: there is no ="},
        {"= 3", "is no key"},
        {"model.n_layers = \"3\" 4", "line 1: something follows the value"},
        {"model.n_layers = \"3", "line 1: a \" is missing"},
        {"model.scale = [3", "a ] is missing"},
        {"model.scale = {3", "line 1: model.scale is {; it must be a number"},
        {"{", "a key in quotes is missing"},
        {"{\n\n\"n_layers\" 3}", "line 3: a : is missing after the key"},
        {"{\"model.n_layers\": 3 \"model.n_heads\": 3}", "it must be a whole number"},
        {"{\"model.n_layers\": 3\n \"model.n_heads\": 3}", "line 2: a , or a } is missing"},
        {"{\"model.n_layers\": 3", "a , or a } is missing"},
        {"{\"model.n_layers\": 3,", "a key in quotes is missing"},
        {"{\"model.n_layers\": 3,}", "a key in quotes is missing"},
        {"{n_layers: 3}", "a key in quotes is missing"},
        {"{\"model.n_layers\": 3} more", "something follows the object"},
        {"{\"rope\": {\"dim\": 3}}", "line 1: rope is no group of fields; the nearest one is model.rope"},
        {"{\"model\": {\n\"rope\": {\"dimm\": 3}}}",
         "line 2: model.rope.dimm is no key; the nearest one is model.rope.dim"},
        {"{\"tiers\": {\"hot_tokens\": 3},\n\"tiers.hot_tokens\": 3}",
         "line 2: tiers.hot_tokens is there for the second time"},
        {"{\"tiers\": {\"hot_tokens\": 3", "a , or a } is missing"},
        {"{\"tiers\": {\"hot_tokens\": 3}", "a , or a } is missing"},
        {"{\"tiers\": {\"hot_tokens\": 3,}}", "a key in quotes is missing"},
        {"{\"tiers\": {}}}", "something follows the object"},
        {"{\"tears\": {}}", "line 1: tears is no group of fields; the nearest one is tiers"},
        {"{\"colours\": {}}", "colours is no group of fields; groups are model, tiers and the others"},
        {"{\"tiers\": 5}", "line 1: tiers is no key"},
        {"{\"tiers\": [{}]}", "line 1: tiers is no key"},
        {"{\"tiers\": {\"hot\": {\"k\": 1}}}", "tiers.hot is {; it must be formats of K and V"},
        {"{\"\": {\"model.n_layers\": 3}}", "line 1:  is no group of fields"},
        {"{\".model.n_layers\": 3}", ".model.n_layers is no key"},
        {"{\"model.n_layers.\": 3}", "model.n_layers. is no key"},
        {"{\"model..n_layers\": 3}", "model..n_layers is no key"},
        {"{\"layers\": [{\"window\": 1}, 5]}", "line 1: layers[1] is no object; it must be { } or null"},
        {"{\"layers\": [{\"window\": 1} {}]}", "a , or a ] is missing"},
        {"{\"layers\": [{\"window\": 1},]}", "layers[1] is no object"},
        {"{\"layers\": [[{}]]}", "layers[0] is no object"},
        {"{\"layers\": {\"x\": {\"window\": 1}}}", "layers.x is no group of fields"},
        {"{\"layers\": {\"4096\": {\"window\": 1}}}",
         "layers[4096] is no group of fields; the nearest one is layers[i] or [i-j], up to 4095"},
        {"{\"layers\": {\"0-3\": {\"window\": 1},\n \"2\": {\"window\": 1}}, \"model.n_layers\": 4}",
         "line 2: layers[2].window is there for the second time"},
        {"{\"budget\": {\"ladder\": [null, null, null, null, null, null, null, null, null]}}",
         "budget.ladder[8] is no group of fields"},
        {"{\"layers\": [{}, {\"window\": 1}]}",
         "model.n_layers is 0; it must be 2 or more, by the highest one"},
        {"[tiers]\n\nhot_tokenz = 3",
         "line 3: tiers.hot_tokenz is no key; the nearest one is tiers.hot_tokens"},
        {"[tiers]\nmodel.n_layers = 3", "line 2: tiers.model.n_layers is no key"},
        {"[tears]", "line 1: tears is no group of fields; the nearest one is tiers"},
        {"[rope]\ndim = 4", "line 1: rope is no group of fields; the nearest one is model.rope"},
        {"[tiers.hot]", "line 1: tiers.hot is no group of fields"},
        {"[tiers", "line 1: a ] is missing at the end of a [table]"},
        {"[", "a ] is missing at the end"},
        {"[]", "line 1:  is no group of fields"},
        {"[tiers] hot_tokens = 3", "a ] is missing at the end of a [table]"},
        {"[.tiers]", ".tiers is no group of fields"},
        {"[layers]\nwindow = 3", "line 2: layers.window is no key; the nearest one is layers[i] or [i-j]"},
        {"[layers.4096]", "layers[4096] is no group of fields"},
        {"[layers.3-1]", "layers[3-1] is no group of fields"},
        {"[[tiers]]", "line 1: tiers is no list; lists are budget.ladder and layers"},
        {"[[layers]]\nwindow = 1\n[layers.0]\nwindow = 1",
         "line 4: layers[0].window is there for the second"},
        {"tiers.hot_tokens = 3\n[tiers]\n'hot_tokens' = 3",
         "line 3: tiers.hot_tokens is there for the second"},
        {"[tiers]\nhot_tokens = 3\n[model]\n[tiers]\nhot_tokens = 3",
         "line 5: tiers.hot_tokens is there for"},
        {"tiers = { hot_tokens = 3 } warm_tokens = 3", "line 1: something follows the value"},
        {"tiers = { hot_tokens = 3", "a , or a } is missing"},
        {"tiers = { hot_tokens 3 }", "there is no =; write key = value"},
        {"layers = [3]", "line 1: layers[0] is no table; it must be { }"},
        {"layers = [null]", "layers[0] is no table; it must be { }"},
        {"\"model\"n_layers = 3", "is no key"},
        {"\"model.n_layers = 3", "is no key"},
        {"\"\".model.n_layers = 3", ".model.n_layers is no key"},
        {"tiers.archive = 'a30", "line 1: a ' is missing"},
        {"tiers.archive = \"\"\"a30\"\"\"", "something follows the value"},
        {"tiers.hot_tokens = _1", "it must be a whole number"},
        {"tiers.hot_tokens = 1_", "it must be a whole number"},
        {"tiers.hot_tokens = 1__0", "it must be a whole number"},
        {"tiers.hot_tokens = +-1", "it must be a whole number"},
        {"tiers.hot_tokens = 0x10", "it must be a whole number"},
        {"budget.bytes = 64_K", "it must be bytes"},
        {"model.scale = 1_.5", "it must be a number"},
        {"budget.pressure.threshold = [.1 .2]", "it must be numbers"},
        {"budget.pressure.threshold = [.1,,]", "it must be numbers"},
        {"{\"budget.pressure.threshold\": [0.1, 0.2,]}", "it must be numbers"},
        {"{\"preset\": 'kivi'}", "preset is 'kivi'; it must be the name of a preset"},
        {"{\"model.n_layers\": null}", "model.n_layers is null; it must be a whole number"},
        {"{\"n_\\u006cayers\": 3}", "there is a backslash"},
        {"{\"model.scale\": [[1]]}", "it must be a number"},
        {"\x01\x02 = 3", "line 1: ?? is no key"},
        {"a_key_that_is_longer_than_what_a_person_would_want_to_read_in_a_message = 3",
         "a_key_that_is_longer_than_what_a_person_... is no key"},
    };
    static const char layered[] = "model.n_layers = 1\nlayers[0].window = 1";
    tkv_config cfg, same;
    tkv_layer_config layers_before[MAX_LAYERS];
    char reason[REASON];
    int i;
    memset(layer_array, 0x55, sizeof layer_array);
    memcpy(layers_before, layer_array, sizeof layers_before);
    memset(frequency_array, 0x55, sizeof frequency_array);
    memset(&cfg, 0x11, sizeof cfg);
    cfg.model.n_layers = cfg.model.rope.dim = 0;
    same = cfg;
    for (i = 0; i < COUNT(cases); i++) {
        const tkv_status st = parse_config(&cfg, cases[i][0], reason);
        CHECK_MSG(st == TKV_ERR_CONFIG && strstr(reason, cases[i][1]), "%s: %s", cases[i][0], reason);
        CHECK_EQ(parse_config(&cfg, cases[i][0], NULL), TKV_ERR_CONFIG);
    }
    CHECK_MEM(&cfg, &same, sizeof cfg);
    CHECK_MEM(layers_before, layer_array, sizeof layers_before);
    CHECK_EQ(((const uint8_t *)frequency_array)[0], 0x55);
    cfg = tkv_default_config();
    CHECK_EQ(tkv_parse_config(&cfg, NULL, sample, strlen(sample), reason, REASON), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "line 20: the program's room for model.rope.frequencies is 0; it must be 4"),
              "%s", reason);
    CHECK_EQ(tkv_parse_config(&cfg, NULL, layered, strlen(layered), reason, REASON), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "line 2: the program's room for layers is 0; it must be 1 or more"), "%s",
              reason);
    /* a number that only tkv_create refuses: the text names no layer */
    CHECK_EQ(parse_config(&cfg, "model.n_layers = -2147483648", reason), TKV_OK);
    CHECK_EQ(cfg.model.n_layers, -2147483647 - 1);
    CHECK_EQ(parse_config(&cfg, "model.n_layers = -5\nlayers[2].window = 1", reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "line 2: model.n_layers is -5; it must be 3 or more"), "%s", reason);
    CHECK_EQ(tkv_parse_config(NULL, &arrays, "", 0, reason, REASON), TKV_ERR_ARG);
    CHECK_EQ(tkv_parse_config(&cfg, &arrays, NULL, 0, reason, REASON), TKV_ERR_ARG);
    cfg.layers = layers_before; /* a text cannot make the caller's arrays longer */
    cfg.model.rope.frequencies = frequency_array;
    cfg.model.n_layers = cfg.model.rope.dim = 4;
    CHECK_EQ(parse_config(&cfg, "model.n_layers = 3\nmodel.rope.dim = 2", reason), TKV_OK);
    CHECK_EQ(parse_config(&cfg, "model.n_heads = 1\nmodel.n_layers = 4", reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "line 2: model.n_layers is 4; it must be 3 or less"), "%s", reason);
    CHECK_EQ(parse_config(&cfg, "model.rope.base = 5\nmodel.rope.scale = 1\nmodel.rope.dim = 4", reason),
             TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "line 3: model.rope.dim is 4; it must be 2 or less"), "%s", reason);
    CHECK_EQ(
        parse_config(
            &cfg,
            "model.n_layers = 4\nmodel.rope.dim = 4\nlayers[3].window = 2\nmodel.rope.frequencies = 1, 1",
            reason),
        TKV_OK);
    CHECK(cfg.layers == layer_array);
    memset(reason, 'x', sizeof reason); /* a short buffer: the reason is cut */
    CHECK_EQ(tkv_parse_config(&cfg, &arrays, "x = 1", 5, reason, 5), TKV_ERR_CONFIG);
    CHECK_STR(reason, "line");
    CHECK_EQ(reason[5], 'x');
    CHECK_EQ(tkv_parse_config(&cfg, &arrays, "x = 1", 5, reason, 0), TKV_ERR_CONFIG);
    CHECK_EQ(reason[0], 'l');
}

/* Layers have RoPE of their own. Lists of frequencies follow one another in the caller's memory. */
/* Formats of the side that a sentence lists, and of no other. */
static void check_formats_listed(const char *list, tkv_side side) {
    char padded[600], name[32];
    int f;
    snprintf(padded, sizeof padded, "%s ", list);
    for (f = 1; f < TKV_FORMAT_COUNT; f++) {
        tkv_config cfg = make_sized_config(1, 1, 1, 64, 1, 64);
        char reason[600];
        int is_stored;
        cfg.model.rope.dim = 64;
        if (side == TKV_K) cfg.tiers.archive.k = (tkv_format)f;
        else cfg.tiers.archive.v = (tkv_format)f;
        is_stored = tkv_validate_config(&cfg, reason, sizeof reason) == TKV_OK;
        snprintf(name, sizeof name, " %s ", tkv_get_name(TKV_NAME_FORMAT, f));
        CHECK_MSG(!strstr(padded, name) == !is_stored, "%s in %s", name, list);
        if (is_stored) continue;
        CHECK_MSG(strstr(reason, side == TKV_K ? "archive.k is " : "archive.v is "), "%s", reason);
        CHECK_MSG(strstr(reason, side == TKV_K ? "and stores V only; it must be one of: f32 f16 "
                                               : "and stores K only; it must be one of: f32 f16 "),
                  "%s", reason);
        snprintf(name, sizeof name, "which is %s ", tkv_get_name(TKV_NAME_FORMAT, f));
        CHECK_MSG(strstr(reason, name), "%s", reason);
        CHECK_STR(strstr(reason, "one of:") + 7, list);
    }
}

/* A config as text with a format that does not store the side: the sentence has all that do. */
static void check_list_of_text(const tkv_config *cfg, const char *text, const char *begin, tkv_side side) {
    char reason[600];
    const char *list;
    tkv_cache *kv = NULL;
    CHECK_EQ(tkv_create_ex(cfg, text, strlen(text), &kv, reason, sizeof reason), TKV_ERR_CONFIG);
    list = strstr(reason, "; it must be one of:");
    CHECK_MSG(strstr(reason, begin) == reason && list, "%s", reason);
    CHECK(strlen(reason) < 512);
    if (list) check_formats_listed(list + strlen("; it must be one of:"), side);
}

TEST(wrong_names_list_the_right_ones) {
    tkv_config cfg = tkv_default_config();
    char reason[600], *k, *v;
    const char *name;
    int i;
    CHECK_EQ(tkv_parse_config(&cfg, NULL, "preset = best", 13, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "it must be the name of a preset: quality, balanced, compact,"));
    for (i = 0; (name = tkv_get_name(TKV_NAME_PRESET, i)) != NULL; i++)
        CHECK_MSG(strstr(reason, name), "%s in %s", name, reason);
    CHECK(i > 20 && strlen(reason) < 512);
    CHECK_EQ(tkv_parse_config(&cfg, NULL, "tiers.archive = q9", 18, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strlen(reason) < 512);
    k = strstr(reason, ": K ");
    v = strstr(reason, "; V ");
    CHECK(k && v);
    if (!k || !v) return;
    *v = 0;
    check_formats_listed(k + 3, TKV_K);
    check_formats_listed(v + 3, TKV_V);
    cfg = make_sized_config(1, 1, 1, 64, 1, 64);
    cfg.tiers.warm.v = TKV_FORMAT_COUNT;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_EQ(atoi(reason + strlen("tiers.warm.v is ")), TKV_FORMAT_COUNT);
    CHECK(strstr(reason, "; it must be one of: f32 f16 ") && strstr(reason, " r20 "));
    cfg = make_sized_config(1, 1, 1, 64, 1, 64);
    check_list_of_text(&cfg, "tiers.archive = r30", "line 1: tiers.archive.k is ", TKV_K);
    check_list_of_text(&cfg, "layers[0].archive = subspace4/squat4", "line 1: layers[0].archive.v is ",
                       TKV_V);
    check_list_of_text(&cfg, "\nbudget.ladder[1].warm = q8/squat2\nbudget.n_levels = 2",
                       "line 2: budget.ladder[1].warm.v is ", TKV_V);
    cfg.tiers.hot.k = TKV_KIVI4;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strcmp(reason, "tiers.hot.k is 5, which is kivi4; the hot tier takes f32, f16 and bf16") == 0);
}

TEST(rope_of_layers) {
    static const char text[] =
        "model.n_layers = 6\nmodel.n_heads = 2\nmodel.head_dim = 8\nmodel.rope.dim = 8\n"
        "layers[0-2].rope.frequencies = 1, 0.5\nlayers[0-2].rope.dim = 4\n"
        "layers[3].rope.dim = off\nlayers[4].rope.kind = dynamic\n"
        "model.rope.frequencies = 1, 1, 1, .25\n"
        "layers[5].rope.dim = 2\nlayers[5].rope.frequencies = .125\n"
        "layers[5].rope.interleaved = true";
    static const char *const wrong[][2] = {
        {"layers[1].rope.frequencies = 1, 1", "line 1: layers[1].rope.dim is 0; it must be 4, two for each"},
        {"layers[0-1].rope.frequencies = 1, 1\nlayers[0].rope.dim = 4\nlayers[1].rope.dim = 6",
         "line 1: layers[1].rope.dim is 6; it must be 4, two for each of its frequencies"},
        {"layers[0].rope.dim = 2\nlayers[0].rope.frequencies = ", "it must be rope.dim / 2 numbers"},
        {"layers[0].rope.kind = yarn",
         "layers[0].rope.kind is yarn; it must be a whole number or fixed, mrope"},
        {"layers[0].rope_dim = 2", "the nearest one is layers[i] or [i-j], up to 4095, and .rope.dim"}};
    const tkv_config_arrays tight = {layer_array,    MAX_LAYERS,      level_array,
                                     TKV_MAX_LEVELS, frequency_array, 6};
    char reason[REASON], again[1000];
    tkv_config cfg = tkv_default_config(), back = cfg;
    int i;
    CHECK_EQ(tkv_parse_config(&cfg, &tight, text, strlen(text), reason, REASON), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "line 11: the program's room for frequencies is 6; it must be 7"), "%s", reason);
    CHECK_MSG(parse_config(&cfg, text, reason) == TKV_OK, "%s", reason);
    for (i = 0; i < 3; i++) CHECK(layer_array[i].rope.frequencies == frequency_array);
    CHECK_EQ(layer_array[2].rope.dim, 4);
    CHECK_EQ(layer_array[3].rope.dim, TKV_OFF);
    CHECK_EQ(layer_array[4].rope.kind, TKV_ROPE_DYNAMIC);
    CHECK(cfg.model.rope.frequencies == frequency_array + 2);
    CHECK(layer_array[5].rope.frequencies == frequency_array + 6);
    CHECK_NEAR(frequency_array[1], .5, 0);
    CHECK_NEAR(frequency_array[5], .25, 0);
    CHECK_NEAR(frequency_array[6], .125, 0);
    CHECK_MSG(tkv_validate_config(&cfg, reason, REASON) == TKV_OK, "%s", reason);
    CHECK_EQ(tkv_print_config(&cfg, 0, again, sizeof again, NULL), TKV_OK);
    CHECK_STR(again, "model.n_layers = 6\nmodel.n_heads = 2\nmodel.head_dim = 8\nmodel.rope.dim = 8\n"
                     "model.rope.frequencies = 1, 1, 1, 0.25\n"
                     "layers[0].rope.dim = 4\nlayers[0].rope.frequencies = 1, 0.5\n"
                     "layers[1].rope.dim = 4\nlayers[1].rope.frequencies = 1, 0.5\n"
                     "layers[2].rope.dim = 4\nlayers[2].rope.frequencies = 1, 0.5\n"
                     "layers[3].rope.dim = off\nlayers[4].rope.kind = dynamic\n"
                     "layers[5].rope.dim = 2\nlayers[5].rope.interleaved = true\n"
                     "layers[5].rope.frequencies = 0.125\n");
    for (i = 0; i < COUNT(wrong); i++) {
        const tkv_status st = parse_config(&back, wrong[i][0], reason);
        CHECK_MSG(st == TKV_ERR_CONFIG && strstr(reason, wrong[i][1]), "%s: %s", wrong[i][0], reason);
    }
    /* a list that the config still uses stays */
    CHECK_EQ(parse_config(&back, "model.rope.dim = 4\nmodel.rope.frequencies = 1, .5", reason), TKV_OK);
    CHECK_EQ(parse_config(&back,
                          "model.n_layers = 1\nlayers[0].rope.dim = 2\nlayers[0].rope.frequencies = .1",
                          reason),
             TKV_OK);
    CHECK(back.layers[0].rope.frequencies == frequency_array + 2);
    CHECK_NEAR(back.model.rope.frequencies[0], 1, 0);
    /* fields without dim, values out of range, and a format that undoes what is not known */
    CHECK_EQ(parse_config(&cfg, "layers[2].rope.base = 500", reason), TKV_OK);
    CHECK_EQ(tkv_validate_config(&cfg, reason, REASON), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "layers[2].rope.dim is 0; it must be set where another field of rope is"), "%s",
              reason);
    CHECK_EQ(parse_config(&cfg, "layers[2].rope.dim = 4\nlayers[2].rope.scale = 9", reason), TKV_OK);
    CHECK_EQ(tkv_validate_config(&cfg, reason, REASON), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "layers[2].rope.scale is 9; it must be more than 0"), "%s", reason);
    CHECK_EQ(parse_config(&cfg, "tiers.archive = kvquant3\nlayers[1].rope.kind = mrope", reason), TKV_OK);
    CHECK_EQ(tkv_validate_config(&cfg, reason, REASON), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "layers[1].rope.kind is 1; KVQUANT undoes RoPE"), "%s", reason);
    CHECK_EQ(parse_config(&cfg, "layers[1].rope.dim = off", reason), TKV_OK);
    CHECK_MSG(tkv_validate_config(&cfg, reason, REASON) == TKV_OK, "%s", reason);
    CHECK_EQ(parse_config(&cfg, "model.rope.kind = learned", reason), TKV_OK);
    CHECK_EQ(tkv_validate_config(&cfg, reason, REASON), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "model.rope.kind is 3; KVQUANT undoes RoPE"), "%s", reason);
}

/* >>printing and parsing */
static int pick_one(tkv_rng *r, const int *x, int n) { return x[tkv_rng_below(r, n)]; }
#define PICK_ONE(r, list) pick_one(r, list, COUNT(list))

static tkv_format_pair random_pair(tkv_rng *r, int exact) {
    static const tkv_format hot[] = {TKV_FORMAT_DEFAULT, TKV_F32, TKV_F16, TKV_BF16};
    static const tkv_format k[] = {TKV_FORMAT_DEFAULT, TKV_Q8,    TKV_KIVI2, TKV_A175, TKV_A40,
                                   TKV_INT4,           TKV_SQUAT2};
    static const tkv_format v[] = {TKV_FORMAT_DEFAULT, TKV_Q8, TKV_KIVI3, TKV_R10, TKV_R40, TKV_FP4,
                                   TKV_KVQUANT3};
    if (exact) return pair_of(hot[tkv_rng_below(r, COUNT(hot))], hot[tkv_rng_below(r, COUNT(hot))]);
    return pair_of(k[tkv_rng_below(r, COUNT(k))], v[tkv_rng_below(r, COUNT(v))]);
}

/* A float between low and high. About half have two decimals. */
static float random_float(tkv_rng *r, double low, double high) {
    const float x = (float)(low + (high - low) * tkv_rng_uniform(r));
    return tkv_rng_below(r, 2) ? x : (float)((int)(x * 100.0f) / 100.0);
}

static const int lengths[] = {0, 0, 1, 17, 64, 100000, TKV_OFF, TKV_UNLIMITED};
static const int sinks[] = {0, 0, 1, 64, TKV_OFF};
static const int windows[] = {0, 0, 1, 4096, TKV_OFF};

static void random_config(tkv_rng *r, tkv_config *c, tkv_layer_config *layers, float *frequencies) {
    static const int few[] = {0, 1, 3}, groups[] = {0, 32, 64}, units[] = {0, 4, 16}, squats[] = {0, 16, 64};
    static const int fits[] = {0, 1, 2, 3, 4, 5}, isas[] = {0, 1}, tokens[] = {0, 128, 5000},
                     dims[] = {0, 2, 16}, layer_dims[] = {0, 0, 2, 16, TKV_OFF};
    static float own[MAX_LAYERS][8];
    int i, k;
    memset(c, 0, sizeof *c);
    memset(layers, 0, MAX_LAYERS * sizeof *layers);
    c->model.n_layers = 1 + tkv_rng_below(r, MAX_LAYERS);
    c->model.n_kv_heads = PICK_ONE(r, few);
    c->model.n_heads = (c->model.n_kv_heads ? c->model.n_kv_heads : 1) * (1 + tkv_rng_below(r, 9));
    c->model.head_dim = 16 + tkv_rng_below(r, 200);
    c->model.v_head_dim = tkv_rng_below(r, 2) * (1 + tkv_rng_below(r, 200));
    c->model.scale = (float)tkv_rng_below(r, 2) * random_float(r, 0, 3);
    c->limits.max_seqs = PICK_ONE(r, few);
    c->limits.max_tokens = PICK_ONE(r, tokens);
    c->limits.max_append = PICK_ONE(r, few);
    c->limits.max_states = PICK_ONE(r, few);
    c->limits.state_bytes = (size_t)PICK_ONE(r, tokens);
    c->tiers.sink_tokens = PICK_ONE(r, sinks);
    c->tiers.hot_tokens = PICK_ONE(r, lengths);
    c->tiers.warm_tokens = PICK_ONE(r, lengths);
    c->model.window = PICK_ONE(r, windows);
    c->tiers.hot = random_pair(r, 1);
    c->tiers.warm = random_pair(r, 0);
    c->tiers.archive = random_pair(r, 0);
    c->format.group_size = PICK_ONE(r, groups);
    c->format.allocation_unit = PICK_ONE(r, units);
    c->format.fit = PICK_ONE(r, fits);
    c->format.rotate = tkv_rng_below(r, 4);
    c->format.center_k = tkv_rng_below(r, 2);
    c->format.squat_block = PICK_ONE(r, squats);
    c->format.subspaces = tkv_rng_below(r, 17);
    c->format.kvquant = tkv_rng_below(r, 16);
    c->host.nonfinite = (tkv_nonfinite)tkv_rng_below(r, 2);
    c->host.precise = tkv_rng_below(r, 2);
    c->host.wipe_freed = tkv_rng_below(r, 2);
    c->host.isa = (tkv_isa)PICK_ONE(r, isas);
    c->meter.heads = tkv_rng_below(r, 3) * 32;
    c->meter.tokens = PICK_ONE(r, tokens);
    c->meter.every = PICK_ONE(r, few);
    c->model.rope.dim = PICK_ONE(r, dims);
    c->model.rope.interleaved = tkv_rng_below(r, 2);
    c->model.rope.base = (float)tkv_rng_below(r, 2) * (2.0f + random_float(r, 0, 1e6));
    c->model.rope.scale = (float)tkv_rng_below(r, 2) * random_float(r, 0, 4);
    for (i = 0; i < c->model.rope.dim / 2; i++) frequencies[i] = random_float(r, 0, 1);
    if (c->model.rope.dim && tkv_rng_below(r, 2)) c->model.rope.frequencies = frequencies;
    if (tkv_rng_below(r, 2)) return;
    c->layers = layers;
    for (i = 0; i < c->model.n_layers; i++) {
        tkv_layer_config *l = &layers[i];
        if (tkv_rng_below(r, 3) == 0) continue;
        l->sink_tokens = PICK_ONE(r, sinks);
        l->hot_tokens = PICK_ONE(r, lengths);
        l->warm_tokens = PICK_ONE(r, lengths);
        l->window = PICK_ONE(r, windows);
        l->hot = random_pair(r, 1);
        l->archive = random_pair(r, 0);
        l->no_cache = i > 0 && tkv_rng_below(r, 9) == 0;
        l->share_kv = i > 0 && !l->no_cache && tkv_rng_below(r, 5) == 0;
        l->rope.dim = PICK_ONE(r, layer_dims);
        if (l->rope.dim == 0) continue;
        l->rope.interleaved = tkv_rng_below(r, 2);
        l->rope.base = (float)tkv_rng_below(r, 2) * (2.0f + random_float(r, 0, 1e6));
        l->rope.kind = (tkv_rope_kind)(tkv_rng_below(r, 4) ? 0 : tkv_rng_below(r, TKV_ROPE_COUNT));
        for (k = 0; k < l->rope.dim / 2; k++) own[i][k] = random_float(r, 0, 1);
        if (l->rope.dim > 0 && tkv_rng_below(r, 2)) l->rope.frequencies = own[i];
    }
}

/* Compares the fields, and the arrays that they point to. */
static void check_same_config(const tkv_config *a, const tkv_config *b) {
    static tkv_layer_config none[MAX_LAYERS];
    tkv_config x = *a, y = *b;
    const tkv_layer_config *la = a->layers ? a->layers : none, *lb = b->layers ? b->layers : none;
    int i;
    if (a->model.rope.frequencies && b->model.rope.frequencies)
        CHECK_MEM(a->model.rope.frequencies, b->model.rope.frequencies,
                  (size_t)a->model.rope.dim / 2 * sizeof(float));
    CHECK_EQ(!a->model.rope.frequencies, !b->model.rope.frequencies);
    for (i = 0; i < a->model.n_layers; i++) {
        tkv_layer_config p = la[i], q = lb[i];
        CHECK_EQ(!p.rope.frequencies, !q.rope.frequencies);
        if (p.rope.frequencies && q.rope.frequencies)
            CHECK_MEM(p.rope.frequencies, q.rope.frequencies, (size_t)p.rope.dim / 2 * sizeof(float));
        p.rope.frequencies = q.rope.frequencies = NULL;
        CHECK_MEM(&p, &q, sizeof p);
    }
    x.layers = y.layers = NULL;
    x.model.rope.frequencies = y.model.rope.frequencies = NULL;
    CHECK_MEM(&x, &y, sizeof x);
}

TEST(print_and_parse) {
    static char text[TEXT_BYTES], again[TEXT_BYTES];
    tkv_layer_config layers[MAX_LAYERS];
    float frequencies[TKV_MAX_HEAD_DIM / 2];
    tkv_rng r = tkv_rng_seed(2);
    char reason[REASON];
    int i, style, valid = 0;
    for (i = 0; i < (tkv_test_quick() ? 50 : 500); i++) {
        tkv_config cfg, back;
        size_t needed = 0, more = 0;
        random_config(&r, &cfg, layers, frequencies);
        if (tkv_validate_config(&cfg, reason, REASON)) continue;
        valid++;
        for (style = 0; style < TKV_TEXT_COUNT; style++) {
            CHECK_EQ(tkv_print_config(&cfg, style, text, sizeof text, &needed), TKV_OK);
            CHECK_EQ(needed, strlen(text) + 1);
            CHECK_EQ(text[needed - 2], '\n');
            memset(&back, 0, sizeof back);
            CHECK_MSG(parse_config(&back, text, reason) == TKV_OK, "%s\n%s", reason, text);
            check_same_config(&cfg, &back);
            CHECK_EQ(tkv_print_config(&back, style, again, sizeof again, &more), TKV_OK);
            CHECK_STR(text, again);
            CHECK_EQ(needed, more);
        }
    }
    CHECK_LE(i / 2, valid);
}

TEST(print_refuses) {
    char text[64], same[64];
    tkv_config cfg = tkv_default_config();
    tkv_layer_config layer;
    size_t needed = 9, more = 9;
    cfg.model.n_layers = 4096;
    cfg.model.head_dim = 8;
    memset(text, 'x', sizeof text);
    memcpy(same, text, sizeof text);
    CHECK_EQ(tkv_print_config(&cfg, 0, NULL, 0, &needed), TKV_OK);
    CHECK_EQ(needed, strlen("model.n_layers = 4096\nmodel.head_dim = 8\n") + 1);
    CHECK_EQ(tkv_print_config(&cfg, 0, text, needed - 1, NULL), TKV_ERR_CAPACITY);
    CHECK_EQ(tkv_print_config(&cfg, 0, text, 1, &more), TKV_ERR_CAPACITY);
    CHECK_EQ(more, needed);
    CHECK_EQ(tkv_print_config(&cfg, 0, text, 0, NULL), TKV_ERR_CAPACITY);
    CHECK_MEM(text, same, sizeof text);
    CHECK_EQ(tkv_print_config(&cfg, 0, text, needed, NULL), TKV_OK);
    CHECK_STR(text, "model.n_layers = 4096\nmodel.head_dim = 8\n");
    CHECK_EQ(text[needed], 'x');
    CHECK_EQ(tkv_print_config(&cfg, 1, text, sizeof text, NULL), TKV_OK);
    CHECK_STR(text, "{\n  \"model.n_layers\": 4096,\n  \"model.head_dim\": 8\n}\n");
    CHECK_EQ(tkv_print_config(NULL, 0, text, sizeof text, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_print_config(&cfg, 0, NULL, 0, NULL), TKV_ERR_ARG);
    cfg.model.scale = tkv_test_float(0x7fc00000u);
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, &needed), TKV_ERR_CONFIG);
    cfg.model.scale = 0;
    cfg.tiers.archive.k = TKV_FORMAT_COUNT;
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, &needed), TKV_ERR_CONFIG);
    cfg.tiers.archive.k = TKV_FORMAT_DEFAULT;
    cfg.format.fit = 64;
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, &needed), TKV_ERR_CONFIG);
    cfg.format.fit = 0;
    cfg.model.rope.dim = 1 << 20;
    cfg.model.rope.frequencies = frequency_array;
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, &needed), TKV_ERR_CONFIG);
    cfg.model.rope.dim = 0;
    cfg.model.rope.frequencies = NULL;
    memset(&layer, 0, sizeof layer);
    cfg.layers = &layer;
    cfg.model.n_layers = 1 << 30;
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, &needed), TKV_ERR_CONFIG);
    cfg.model.n_layers = -1;
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, &needed), TKV_ERR_CONFIG);
}

/* >>the pressure controller */
TEST(pressure_keys) {
    static char text[600];
    tkv_config cfg = tkv_default_config(), back = cfg, same = cfg;
    tkv_pressure_config *const p = &cfg.budget.pressure, *const q = &back.budget.pressure;
    tkv_pressure controller;
    char reason[REASON];
    tkv_rng r = tkv_rng_seed(3);
    int i, k, style;
    CHECK_EQ(
        parse_config(&cfg, "budget.pressure.alpha = .1\nbudget.pressure.profile = aggressive # then", reason),
        TKV_OK);
    same.budget.pressure.alpha = .1f;
    same.budget.pressure.profile = TKV_PROFILE_AGGRESSIVE;
    CHECK_MEM(&cfg, &same, sizeof cfg); /* the profile sets no other field; tkv_init_pressure does */
    CHECK_MSG(tkv_init_pressure(&controller, p, reason, REASON) == TKV_OK, "%s", reason);
    CHECK_NEAR(controller.cfg.alpha, .1f, 0);
    CHECK_NEAR(controller.cfg.threshold[1], .8f, 0);
    CHECK_EQ(controller.cfg.min_level, 1);
    CHECK_EQ(
        parse_config(&cfg,
                     "{\"budget.pressure.threshold\": [0.5, 0.75], \"budget.pressure.max_level\": \"off\", "
                     "\"budget.pressure.profile\": \"fp16_only\"}",
                     reason),
        TKV_OK);
    CHECK_NEAR(p->threshold[1], .75f, 0);
    CHECK_EQ(p->max_level, TKV_OFF);
    CHECK_EQ(p->profile, TKV_PROFILE_FP16_ONLY);
    CHECK_EQ(parse_config(&back, "budget.pressure.hysteresis = zero\nbudget.pressure.threshold = zero, .5",
                          reason),
             TKV_OK);
    CHECK(q->hysteresis < 0.0f && q->threshold[0] < 0.0f); /* TKV_ZERO */
    CHECK_EQ(parse_config(&back,
                          "{\"budget.pressure.hysteresis\": \"zero\", "
                          "\"budget.pressure.threshold\": [\"zero\", 0.5]}",
                          reason),
             TKV_OK);
    CHECK_NEAR(q->threshold[1], .5, 0);
    CHECK_EQ(tkv_print_config(&back, 0, text, sizeof text, NULL), TKV_OK);
    CHECK_STR(text, "budget.pressure.threshold = zero, 0.5\nbudget.pressure.hysteresis = zero\n");
    CHECK_EQ(parse_config(&back, "budget.pressure.hysteresis = zeros", reason), TKV_ERR_CONFIG);
    same = cfg;
    CHECK_EQ(parse_config(&cfg, "budget.pressure.profile = best", reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, "line 1: budget.pressure.profile is best; it must be a whole number or default, "
                      "fp16_only, aggressive");
    CHECK_EQ(parse_config(&cfg, "budget.pressure.threshold = 1,2,3,4,5,6,7,8", reason), TKV_ERR_CONFIG);
    CHECK_EQ(parse_config(&cfg, "budget.pressure.n_layers = 1", reason), TKV_ERR_CONFIG);
    CHECK_EQ(parse_config(&cfg, "alpha = .1", reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, "line 1: alpha is no key; the nearest one is budget.pressure.alpha");
    CHECK_MEM(&cfg, &same, sizeof cfg);
    for (i = 0; i < 100; i++) {
        memset(&cfg, 0, sizeof cfg);
        p->profile = (tkv_pressure_profile)tkv_rng_below(&r, TKV_PROFILE_COUNT);
        for (k = 0; k < tkv_rng_below(&r, TKV_MAX_LEVELS); k++) p->threshold[k] = random_float(&r, .01, 1);
        if (i % 4 == 0) p->threshold[0] = TKV_ZERO;
        p->hysteresis = i % 3 ? random_float(&r, 0, .1) : TKV_ZERO;
        p->alpha = random_float(&r, 0, 1);
        p->min_level = tkv_rng_below(&r, 3);
        p->max_level = tkv_rng_below(&r, 4) - 1;
        for (style = 0; style < TKV_TEXT_COUNT; style++) {
            CHECK_EQ(tkv_print_config(&cfg, style, text, sizeof text, NULL), TKV_OK);
            memset(&back, 0, sizeof back);
            CHECK_MSG(parse_config(&back, text, reason) == TKV_OK, "%s", reason);
            CHECK_MEM(&cfg, &back, sizeof cfg);
        }
    }
}

/* >>any bytes */
/* Parses a text in memory of exactly its size. An error must change nothing and name the line. Returns whether
 * the text is valid. */
static int parse_exact_copy(const char *bytes, size_t n) {
    char *text = (char *)malloc(n ? n : 1);
    tkv_config cfg, same;
    char reason[REASON];
    tkv_status st;
    if (!text) exit(2);
    memcpy(text, bytes, n);
    memset(&cfg, 0, sizeof cfg);
    same = cfg;
    st = tkv_parse_config(&cfg, &arrays, text, n, reason, REASON);
    CHECK(st == TKV_OK || (st == TKV_ERR_CONFIG && strncmp(reason, "line ", 5) == 0));
    if (st) CHECK_MEM(&cfg, &same, sizeof cfg);
    else (void)tkv_validate_config(&cfg, reason, REASON);
    free(text);
    return st == TKV_OK;
}

TEST(any_bytes_parse) {
    static const char pieces[][16] = {
        "n_layers",    "layers",  "[",         "]",       "[0-4095]", ".",      "rope",     "dim",
        "scale",       "=",       " = ",       ":",       ",",        "\"",     "{",        "}",
        "\n",          "#",       "none",      "all",     "a30/r20",  "1",      "-1",       "1e5",
        "preset",      "adr",     "fit",       "+",       "clip",     "0",      "99999999", "\r\n",
        "frequencies", "off",     "unlimited", "zero",    "model.",   "tiers.", "format.",  "budget.",
        "pressure.",   "profile", "alpha",     "archive", "[[",       "]]",     "]\n[",     "model",
        "tiers",       "ladder",  "0-2",       "null",    "{\"",      "\": {",  "\": [{",   "'",
        "window",      "= {",     "_",         ", "};
    const char *const texts[] = {sample,       sample_json,  pressure_sample, spellings[1],
                                 spellings[2], spellings[3], spellings[4],    spellings[5]};
    tkv_rng r = tkv_rng_seed(4);
    char text[40 * sizeof pieces[0]];
    size_t n, i;
    int text_index, k, n_valid = 0, tries = tkv_test_quick() ? 2000 : 20000;
    for (text_index = 0; text_index < COUNT(texts); text_index++) {
        const size_t size = strlen(texts[text_index]);
        char *copy = (char *)malloc(size);
        if (!copy) exit(2);
        memcpy(copy, texts[text_index], size);
        for (n = 0; n <= size; n++) n_valid += parse_exact_copy(copy, n);
        for (i = 0; i < size; i++)
            for (k = 1 + (int)(i % 11); k < 256; k += tkv_test_quick() ? 62 : 11) {
                copy[i] = (char)(texts[text_index][i] ^ k);
                n_valid += parse_exact_copy(copy, size);
                copy[i] = texts[text_index][i];
            }
        free(copy);
    }
    CHECK_LE(100, n_valid);
    for (k = 0; k < tries; k++) {
        n = (size_t)tkv_rng_below(&r, 40);
        for (i = 0; i < n; i++) text[i] = (char)tkv_rng_below(&r, 256);
        (void)parse_exact_copy(text, n);
        text[0] = 0;
        for (i = 0; i < n; i++) strcat(text, pieces[tkv_rng_below(&r, COUNT(pieces))]);
        (void)parse_exact_copy(text, strlen(text));
    }
}

/* >>presets and ages */
TEST(presets_have_their_tiers) {
    static const struct {
        const char *name;
        int hot, warm;
        tkv_format warm_k, archive_k, archive_v;
    } want[] = {{"adr", 64, 448, TKV_KIVI4, TKV_KVQUANT3, TKV_KVQUANT3},
                {"small", 32, 224, TKV_KIVI4, TKV_KIVI2, TKV_KIVI2},
                {"long_context", 64, 960, TKV_KIVI4, TKV_KIVI2, TKV_KIVI2},
                {"large_context", 128, 896, TKV_KIVI4, TKV_SQUAT2, TKV_KIVI2},
                {"extreme_context", 256, 1792, TKV_KIVI4, TKV_KVQUANT3, TKV_KVQUANT3},
                {"memory_optimized", 32, 224, TKV_KIVI4, TKV_KIVI2, TKV_KIVI2},
                {"akv", 1024, 2048, TKV_KIVI4, TKV_KIVI2, TKV_KIVI2},
                {"akv_quality", 2048, 2048, TKV_KIVI4, TKV_KIVI2, TKV_KIVI2},
                {"aggressive", 512, 4096, TKV_KIVI2, TKV_KIVI2, TKV_KIVI2},
                {"k4v4", 256, TKV_OFF, TKV_KIVI4, TKV_KIVI4, TKV_KIVI4},
                {"k4v3", 128, TKV_OFF, TKV_KIVI4, TKV_KIVI4, TKV_KIVI3},
                {"k4v2", 128, TKV_OFF, TKV_KIVI4, TKV_KIVI4, TKV_KIVI2},
                {"k3v3", 128, TKV_OFF, TKV_KIVI3, TKV_KIVI3, TKV_KIVI3},
                {"k2v2", 64, TKV_OFF, TKV_KIVI2, TKV_KIVI2, TKV_KIVI2},
                {"balanced", 0, 0, TKV_A40, TKV_A30, TKV_R30}};
    static const int contexts[] = {2047, 2048, 8191, 8192};
    static const tkv_format archive_k_of_context[] = {TKV_KIVI2, TKV_SQUAT2, TKV_SQUAT2, TKV_KVQUANT3};
    int i;
    for (i = 0; i < COUNT(want); i++) {
        tkv_config cfg = tkv_default_config();
        cfg.tiers.sink_tokens = cfg.tiers.hot_tokens = cfg.tiers.warm_tokens = 9;
        CHECK_EQ(tkv_apply_preset(&cfg, want[i].name), TKV_OK);
        CHECK_EQ(cfg.tiers.sink_tokens, 0);
        CHECK_EQ(cfg.tiers.hot_tokens, want[i].hot);
        CHECK_EQ(cfg.tiers.warm_tokens, want[i].warm);
        CHECK_EQ(cfg.tiers.warm.k, want[i].warm_k);
        CHECK_EQ(cfg.tiers.archive.k, want[i].archive_k);
        CHECK_EQ(cfg.tiers.archive.v, want[i].archive_v);
    }
    for (i = 0; i < COUNT(contexts); i++) {
        tkv_config cfg = tkv_default_config();
        cfg.limits.max_tokens = contexts[i];
        CHECK_EQ(tkv_apply_preset(&cfg, "adr"), TKV_OK);
        CHECK_EQ(cfg.tiers.archive.k, archive_k_of_context[i]);
    }
}

TEST(tier_for_age) {
    static const struct {
        int age;
        tkv_tier tier;
    } cases[] = {{-1, TKV_TIER_HOT},      {0, TKV_TIER_HOT},
                 {1, TKV_TIER_HOT},       {63, TKV_TIER_HOT},
                 {64, TKV_TIER_WARM},     {65, TKV_TIER_WARM},
                 {511, TKV_TIER_WARM},    {512, TKV_TIER_ARCHIVE},
                 {513, TKV_TIER_ARCHIVE}, {0x7fffffff, TKV_TIER_ARCHIVE}};
    tkv_config cfg = tkv_default_config();
    int i;
    for (i = 0; i < COUNT(cases); i++) {
        CHECK_EQ(tkv_compute_tier(NULL, cases[i].age), cases[i].tier);
        CHECK_EQ(tkv_compute_tier(&cfg, cases[i].age), cases[i].tier);
    }
    cfg.tiers.hot_tokens = TKV_OFF;
    cfg.tiers.warm_tokens = 10;
    CHECK_EQ(tkv_compute_tier(&cfg, 0), TKV_TIER_WARM);
    CHECK_EQ(tkv_compute_tier(&cfg, 10), TKV_TIER_ARCHIVE);
    cfg.tiers.warm_tokens = TKV_UNLIMITED;
    CHECK_EQ(tkv_compute_tier(&cfg, 0x7fffffff - 1), TKV_TIER_ARCHIVE); /* older than any token can be */
    CHECK_EQ(tkv_compute_tier(&cfg, 1000000), TKV_TIER_WARM);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    CHECK_EQ(tkv_compute_tier(&cfg, 1000000), TKV_TIER_HOT);
}

/* A token's tier is that of its age, or of an age up to 64 lower. */
TEST(tiers_follow_ages) {
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv;
    float row[16];
    int n, token;
    cfg.model.n_layers = cfg.model.n_heads = 1;
    cfg.model.head_dim = 16;
    CHECK_EQ(tkv_apply_preset(&cfg, "small"), TKV_OK);
    kv = create_cache(&cfg);
    memset(row, 0, sizeof row);
    for (n = 1; n <= 500; n++) {
        CHECK_EQ(tkv_append(kv, 0, 0, row, row, 1), TKV_OK);
        for (token = 4; token < n && n % 50 == 0; token++) {
            tkv_tier tier = TKV_TIER_COUNT;
            CHECK_EQ(tier_of(kv, 0, 0, token, &tier), TKV_OK);
            CHECK(tier <= tkv_compute_tier(&cfg, n - 1 - token) &&
                  tier >= tkv_compute_tier(&cfg, n - 1 - token - 64));
        }
    }
    tkv_destroy(kv);
}

/* >>reports */
static tkv_cache *make_small_cache(void) {
    tkv_config cfg = tkv_default_config();
    tkv_layer_config layers[3];
    tkv_cache *kv;
    tkv_rng r = tkv_rng_seed(5);
    float k[2 * 16], q[2 * 16], out[2 * 16];
    int n, layer;
    memset(layers, 0, sizeof layers);
    layers[1].no_cache = 1;
    layers[2].share_kv = 1;
    cfg.model.n_layers = 3;
    cfg.layers = layers;
    cfg.model.n_heads = 2;
    cfg.model.head_dim = 16;
    cfg.limits.max_seqs = 4;
    cfg.meter.heads = 1;
    cfg.meter.every = 4;
    kv = create_cache(&cfg);
    for (n = 0; n < 700; n++)
        for (layer = 0; layer < 1; layer++) {
            tkv_rng_fill(&r, k, COUNT(k), 1);
            tkv_rng_fill(&r, q, COUNT(q), 1);
            CHECK_EQ(tkv_append(kv, n % 7 == 6 ? 2 : 0, layer, k, k, 1), TKV_OK);
            CHECK_EQ(tkv_attend(kv, n % 7 == 6 ? 2 : 0, layer, q, 1, out), TKV_OK);
        }
    return kv;
}

/* A report without labels, in memory of exactly the bytes needed. */
static char *print_report(const tkv_cache *kv, tkv_report_kind kind) {
    size_t needed = 0, more = 0;
    char *text;
    CHECK_EQ(tkv_print_report(kv, kind, NULL, NULL, 0, &needed), TKV_OK);
    text = (char *)malloc(needed);
    if (!text) exit(2);
    memset(text, 'x', needed);
    CHECK_EQ(tkv_print_report(kv, kind, NULL, text, needed - 1, &more), TKV_ERR_CAPACITY);
    CHECK_EQ(more, needed);
    CHECK_EQ(tkv_print_report(kv, kind, NULL, text, 0, NULL), TKV_ERR_CAPACITY);
    CHECK_EQ(text[0], 'x');
    CHECK_EQ(tkv_print_report(kv, kind, NULL, text, needed, NULL), TKV_OK);
    CHECK_EQ(strlen(text) + 1, needed);
    return text;
}

TEST(json_report) {
    tkv_cache *kv = make_small_cache();
    char *text = print_report(kv, TKV_REPORT_JSON);
    tkv_config cfg = tkv_default_config();
    char line[200], reason[REASON];
    tkv_memory_info m;
    tkv_layer_info t;
    const char *config = strstr(text, "\"config\": {");
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    snprintf(line, sizeof line, "\"total\": %lu, ", (unsigned long)m.total);
    CHECK(strstr(text, line) != NULL);
    CHECK_EQ(tkv_get_layer(kv, 2, 0, &t), TKV_OK);
    snprintf(line, sizeof line,
             "{\"seq\": 2, \"tokens\": 100, \"length\": [100, null, null], \"hot\": [%d, null, null]",
             t.tokens[TKV_TIER_HOT]);
    CHECK_MSG(strstr(text, line) != NULL, "%s\n%s", line, text);
    CHECK(strstr(text, "\"seq\": 1,") == NULL);
    CHECK(strstr(text, "\"warm\": [\"a40/r40\", null, null]") != NULL);
    REQUIRE(config != NULL); /* it can be parsed */
    config += strlen("\"config\": ");
    CHECK_MSG(tkv_parse_config(&cfg, NULL, config, (size_t)(strchr(config, '}') + 1 - config), reason,
                               REASON) == TKV_OK,
              "%s", reason);
    CHECK_EQ(cfg.model.n_layers, 3);
    CHECK_EQ(cfg.limits.max_append, 512);
    CHECK_EQ(tkv_print_report(NULL, TKV_REPORT_JSON, NULL, text, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_JSON, NULL, NULL, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_COUNT, NULL, text, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(text[0], '{');
    free(text);
    tkv_destroy(kv);
}

TEST(reports_with_a_budget) {
    tkv_config cfg = make_sized_config(1, 1, 1, 16, 1, 64);
    char line[64], *text;
    tkv_cache *kv;
    cfg.budget.bytes = 1 << 20;
    kv = create_cache(&cfg);
    text = print_report(kv, TKV_REPORT_PROMETHEUS);
    CHECK(strstr(text, "\ntkv_level 0\n") != NULL);
    free(text);
    text = print_report(kv, TKV_REPORT_JSON);
    snprintf(line, sizeof line, "\"level\": 0, \"levels\": %d, ", budget_of(kv).n_levels);
    CHECK_MSG(strstr(text, line) != NULL, "%s\n%s", line, text);
    free(text);
    tkv_destroy(kv);
}

TEST(prometheus_lines) {
    tkv_cache *kv = make_small_cache();
    char *text = print_report(kv, TKV_REPORT_PROMETHEUS), buf[8192];
    static const char *const bad[] = {
        "=x",    "model",     "1a=x",       "a-b=x",   "a=x,",  ",a=x",  "tier=x",          "part=x",
        "isa=x", "version=x", "__name__=x", "a=x,a=y", "a=x\\", "a=x,b", "b=x\\\\,a=1,a=2", "a{=x",
        "a`=x",  "a[=x",      "a@=x",       "a:=x",    "a/=x"};
    tkv_quality_info quality;
    tkv_rng r = tkv_rng_seed(6);
    int n_accepted = 0;
    size_t i, needed = 77;
    CHECK(strncmp(text, "# HELP tkv_info ", 16) == 0);
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &quality), TKV_OK);
    CHECK(quality.heads == 0 || /* no atomics here */
          strstr(text, "\n# TYPE tkv_quality_samples_total counter\ntkv_quality_samples_total ") != NULL);
    CHECK(strstr(text, "\n# TYPE tkv_memory_bytes gauge\ntkv_memory_bytes{part=\"codes\",tier=\"hot\"} ") !=
          NULL);
    CHECK(strstr(text, "\ntkv_sequences 2\n") != NULL);
    CHECK(strstr(text, "\ntkv_sequence_tokens_max 600\n") != NULL);
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, "model=SmolLM2 135M,x_1=a\\,b\\\\\"c\nd,_e=", buf,
                              sizeof buf, NULL),
             TKV_OK);
    CHECK(strstr(buf, "\ntkv_sequences{model=\"SmolLM2 135M\",x_1=\"a,b\\\\\\\"c\\nd\",_e=\"\"} 2\n") !=
          NULL);
    CHECK(strstr(buf, "tier=\"hot\",model=\"SmolLM2 135M\",") != NULL);
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        memset(buf, 'x', 16);
        CHECK_MSG(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, bad[i], buf, sizeof buf, &needed) ==
                      TKV_ERR_ARG,
                  "%s", bad[i]);
        CHECK_EQ(buf[0], 'x');
        CHECK_EQ(needed, 77);
    }
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, "b=x\\,a=1,a=2", buf, sizeof buf, NULL), TKV_OK);
    CHECK(strstr(buf, "\ntkv_sequences{b=\"x,a=1\",a=\"2\"} 2\n") != NULL); /* a value names no label */
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, "azAZ_09=x", buf, sizeof buf, NULL), TKV_OK);
    CHECK(strstr(buf, "\ntkv_sequences{azAZ_09=\"x\"} 2\n") != NULL);
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, "", buf, sizeof buf, NULL), TKV_OK);
    CHECK_STR(buf, text);
    for (i = 0; i < 2000; i++) {
        static const char letters[] = "ab_1=,\\\"\n\xc3 ";
        char *labels = (char *)malloc(12);
        int n = tkv_rng_below(&r, 12);
        if (!labels) exit(2);
        labels[n] = 0;
        while (n--) labels[n] = letters[tkv_rng_below(&r, COUNT(letters) - 1)];
        n_accepted += tkv_print_report(kv, TKV_REPORT_PROMETHEUS, labels, NULL, 0, &needed) == TKV_OK;
        free(labels);
    }
    CHECK(n_accepted > 10 && n_accepted < 1000);
    CHECK_EQ(tkv_print_report(NULL, TKV_REPORT_PROMETHEUS, NULL, buf, sizeof buf, NULL), TKV_ERR_ARG);
    free(text);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(both_syntaxes);
    RUN(spellings_read_alike);
    RUN(styles_of_writing);
    RUN(presets_in_every_style);
    RUN(budgets);
    RUN(limits_of_whole_numbers);
    RUN(empty_texts);
    RUN(other_names_of_formats);
    RUN(presets_come_first);
    RUN(sentences_of_mistakes);
    RUN(wrong_names_list_the_right_ones);
    RUN(rope_of_layers);
    RUN(print_and_parse);
    RUN(print_refuses);
    RUN(pressure_keys);
    RUN(any_bytes_parse);
    RUN(presets_have_their_tiers);
    RUN(tier_for_age);
    RUN(tiers_follow_ages);
    RUN(json_report);
    RUN(reports_with_a_budget);
    RUN(prometheus_lines);
    return tkv_test_end();
}
