/*
 * test_gguf_hostile.c - damaged and hostile model files. Small GGUF and llama2.c files are built in memory. They
 * are cut at every byte, changed at every byte, and given absurd counts, sizes, offsets and types. Each must end
 * in an error sentence or in a model that runs. Sanitizers find memory errors. Valid files are tested too: every
 * tensor type, both pairings of RoPE, both tokenizers.
 *
 * cc -O2 tests/test_gguf_hostile.c examples/tieredkv.c -o test_gguf_hostile -lm && ./test_gguf_hostile [filter |
 * --list]
 */
#include "gguf_files.h"

#include <time.h>

static file_bytes file, token_file;

/* >>valid files */
TEST(good_files_run) {
    float gguf[VOCAB], bin[VOCAB];
    file_spec p = make_mixed_spec(0);
    char err[256];
    int i, nonzero = 0;
    build_gguf(&file, &p);
    CHECK_EQ(try_file(file.p, file.n, NULL, 0, err, sizeof err, gguf), RUNS);
    CHECK_STR(err, "");
    p = make_mixed_spec(1);
    build_gguf(&file, &p);
    CHECK_EQ(try_file(file.p, file.n, NULL, 0, err, sizeof err, gguf), RUNS);
    CHECK_STR(err, "");
    for (i = 0; i < 2; i++) { /* the same weights in both formats */
        p = make_float_spec();
        build_gguf(&file, &p);
        CHECK_EQ(try_file(file.p, file.n, NULL, 0, err, sizeof err, gguf), RUNS);
        build_llama2c(&file, &token_file, 1);
        CHECK_EQ(try_file(file.p, file.n, token_file.p, token_file.n, err, sizeof err, bin), RUNS);
        CHECK_STR(err, "");
    }
    for (i = 0; i < VOCAB; i++) {
        CHECK_NEAR(gguf[i], bin[i], 1e-5);
        nonzero += fabs((double)bin[i]) > 1e-3;
    }
    CHECK_LE(VOCAB / 2, nonzero);
    build_llama2c(&file, &token_file, 0); /* a tied head gives other logits */
    CHECK_EQ(try_file(file.p, file.n, token_file.p, token_file.n, err, sizeof err, bin), RUNS);
    for (i = nonzero = 0; i < VOCAB; i++) nonzero += fabs((double)bin[i] - (double)gguf[i]) > 1e-3;
    CHECK_LE(VOCAB / 2, nonzero);
}

TEST(rows_decode) {
    static const unsigned char f16[8] = {0x00, 0x3c, 0x00, 0xc0,
                                         0x01, 0x00, 0xff, 0x7b};  /* 1 -2 2^-24 65504 */
    static const unsigned char bf16[4] = {0x80, 0x3f, 0x20, 0xc1}; /* 1 -10 */
    unsigned char block[34];
    llama_tensor t;
    float x[32];
    int i;
    memset(&t, 0, sizeof t);
    t.rows = 1;
    t.data = f16, t.type = LLAMA_F16, t.cols = 4, t.row_bytes = 8;
    llama_row(&t, 0, x);
    CHECK(x[0] == 1.0f && x[1] == -2.0f && x[2] == 5.9604644775390625e-8f && x[3] == 65504.0f);
    t.data = bf16, t.type = LLAMA_BF16, t.cols = 2, t.row_bytes = 4;
    llama_row(&t, 0, x);
    CHECK(x[0] == 1.0f && x[1] == -10.0f);
    for (i = 0; i < 34; i++) block[i] = (unsigned char)(i * 37);
    block[0] = 0x00, block[1] = 0x38; /* scale 0.5 */
    t.data = block, t.cols = 32;
    t.type = LLAMA_Q4_0;
    llama_row(&t, 0, x);
    for (i = 0; i < 16; i++) {
        CHECK_NEAR(x[i], 0.5 * ((block[2 + i] & 15) - 8), 0);
        CHECK_NEAR(x[16 + i], 0.5 * ((block[2 + i] >> 4) - 8), 0);
    }
    t.type = LLAMA_Q8_0;
    llama_row(&t, 0, x);
    for (i = 0; i < 32; i++)
        CHECK_NEAR(x[i], 0.5 * (block[2 + i] < 128 ? block[2 + i] : block[2 + i] - 256), 0);
    block[2] = 0x00, block[3] = 0xbc; /* minimum -1 */
    t.type = LLAMA_Q4_1;
    llama_row(&t, 0, x);
    for (i = 0; i < 16; i++) {
        CHECK_NEAR(x[i], 0.5 * (block[4 + i] & 15) - 1, 0);
        CHECK_NEAR(x[16 + i], 0.5 * (block[4 + i] >> 4) - 1, 0);
    }
}

static void run_model(const llama_model *m, float *logits) {
    static const int tokens[9] = {1, 6, 7, 8, 12, 13, 19, 2, 11};
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv = NULL;
    llama_kv_config(m, &cfg);
    cfg.host.isa = tkv_test_isa();
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    CHECK_EQ(llama_forward(m, kv, 0, tokens, 9, logits, 1), TKV_OK);
    tkv_destroy(kv);
}

TEST(rope) {
    float a[VOCAB], b[VOCAB], c[VOCAB], factors[HEAD / 2];
    file_spec p = make_mixed_spec(0);
    char err[256];
    llama_model m;
    double largest = 0;
    int i;
    build_gguf(&file, &p);
    REQUIRE(llama_load_memory(file.p, file.n, NULL, 0, &m, err, sizeof err));
    run_model(&m, a);
    /* dividing the frequencies by (theta2 / theta)^(2i/d) is another base */
    for (i = 0; i < HEAD / 2; i++) factors[i] = powf(50.0f, 2.0f * (float)i / (float)HEAD);
    m.rope_factors.data = (const unsigned char *)factors;
    m.rope_factors.cols = HEAD / 2, m.rope_factors.row_bytes = sizeof factors;
    if (llama_little_endian()) {
        run_model(&m, b);
        m.rope_factors.data = NULL;
        m.rope_theta *= 50.0f;
        run_model(&m, c);
        for (i = 0; i < VOCAB; i++) {
            CHECK_NEAR(b[i], c[i], 1e-4);
            if (fabs((double)a[i] - (double)b[i]) > largest) largest = fabs((double)a[i] - (double)b[i]);
        }
        CHECK_LE(1e-3, largest);
    }
    /* YaRN by the formulas of its paper for 64 channels, base 1e5, 8,192 tokens: pair 10 has 32 turns, pair 20 one */
    m.rope_factors.data = NULL;
    m.rope_dim = 64, m.rope_theta = 1e5f, m.context = 8192, m.rope_yarn = 2.0f;
    CHECK_EQ(llama_context(&m), 16384);
    CHECK_NEAR(llama_rope_size(&m), 1.0693147, 1e-6);
    for (i = 0; i < 32; i++) {
        const double plain = pow(1e5, -i / 32.0), kept = i <= 10 ? 1 : i >= 20 ? 0 : (20 - i) / 10.0;
        CHECK_NEAR(llama_frequency(&m, NULL, i) / plain, (1 + kept) / 2, 1e-6);
    }
    m.rope_yarn = 1.0f;
    CHECK_NEAR(llama_frequency(&m, NULL, 31), pow(1e5, -31 / 32.0), 1e-12);
    llama_free(&m);
    /* the other pairing of RoPE, with rows in its order, is the same network */
    p.rope_halves = 1;
    build_gguf(&file, &p);
    REQUIRE(llama_load_memory(file.p, file.n, NULL, 0, &m, err, sizeof err));
    run_model(&m, b);
    m.rope_halves = 1;
    run_model(&m, c);
    for (i = 0, largest = 0; i < VOCAB; i++) {
        CHECK_NEAR(a[i], c[i], 1e-4);
        if (fabs((double)a[i] - (double)b[i]) > largest) largest = fabs((double)a[i] - (double)b[i]);
    }
    CHECK_LE(1e-3, largest);
    llama_free(&m);
}

static void check_tokens(const llama_model *m, const char *text, int flags, const int *want, int n) {
    int tokens[64], i;
    const int got = llama_tokenize(m, text, strlen(text), flags, tokens);
    CHECK_EQ(got, n);
    for (i = 0; i < n && i < got; i++)
        CHECK_MSG(tokens[i] == want[i], "\"%s\", token %d: %d", text, i, tokens[i]);
}

TEST(tokenizers) {
    static const int abc[] = {1, 12, 14}, byte_fallback[] = {5, 3, 4, 16, 0, 0, 0};
    static const int words[] = {16, 3, 14, 10, 11, 10, 4, 4, 15}, special[] = {1, 15, 2, 17},
                     lone_quote[] = {12, 9};
    file_spec p = make_mixed_spec(0);
    char err[256];
    llama_model m;
    build_gguf(&file, &p);
    REQUIRE(llama_load_memory(file.p, file.n, NULL, 0, &m, err, sizeof err));
    check_tokens(&m, "ab c", LLAMA_BOS, abc, 3); /* _ab, _c */
    check_tokens(&m, "A\n\xc3\xa9\xe2\x82\xac", 0, byte_fallback,
                 7); /* _, <0x41>, <0x0A>, e acute, unknown bytes */
    check_tokens(&m, "", 0, abc, 0);
    llama_free(&m);
    p.bpe = 1;
    build_gguf(&file, &p);
    REQUIRE(llama_load_memory(file.p, file.n, NULL, 0, &m, err, sizeof err));
    check_tokens(&m, " ab  a121\n\nab", 0, words, 9); /* _ab, _, _a, 1, 2, 1, \n, \n, ab */
    check_tokens(&m, "<|im_start|>ab<|im_end|>'s", LLAMA_SPECIAL, special, 4);
    check_tokens(&m, "'e", 0, lone_quote, 2);
    CHECK_EQ(m.digits, 1);
    llama_free(&m);
}

/* Words are those that Python's regex module finds with the pattern above llama_word_llama3. */
TEST(words_of_llama3) {
    static const struct {
        const char *text;
        int digits;
        size_t words[12]; /* bytes of each; 0 ends */
    } rows[] = {{"I'LL we'veX 12345 a", 3, {1, 3, 3, 3, 1, 1, 3, 2, 2}},
                {"x  \r\n\n  y?!\n\n z\t\tq ", 3, {1, 5, 1, 2, 4, 2, 1, 2, 1}},
                {"#x  3 .\n'", 3, {2, 1, 1, 1, 3, 1}},
                {"  a   ", 3, {1, 2, 3}},
                {"\303\251t\303\251\342\200\224ok \342\202\2545", 3, {5, 5, 4, 1}},
                {"a123", 1, {1, 1, 1, 1}}};
    size_t i, k, at;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        const size_t n = strlen(rows[i].text);
        for (at = k = 0; at < n; k++) {
            const size_t word = llama_word_llama3(rows[i].text + at, n - at, rows[i].digits);
            CHECK_MSG(word == rows[i].words[k], "\"%s\", word %d: %d bytes", rows[i].text, (int)k, (int)word);
            if (word == 0) break;
            at += word;
        }
        CHECK_EQ(rows[i].words[k], 0);
    }
}

/* >>large files: beyond 2 GiB and 4 GiB, where a `long` of Windows and an unsigned one end */
static int seek_to(FILE *f, uint64_t at) {
#ifdef _WIN32
    return _fseeki64(f, (int64_t)at, SEEK_SET);
#else
    return at > LONG_MAX ? -1 : fseek(f, (long)at, SEEK_SET);
#endif
}

TEST(sizes_of_large_files) {
    static const uint64_t sizes[] = {0, 1, 0x7fffffff, 0x80000000u, 0xfffffffeu, 0xffffffffu, 0x140000001u};
    const char *dir = getenv("TMPDIR");
    char name[512];
    size_t i;
    snprintf(name, sizeof name, "%s/tieredkv-large-%u", dir && *dir ? dir : ".", (unsigned)time(NULL));
    if (sizeof(size_t) == 4) SKIP("a process of 32 bits");
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        FILE *f = fopen(name, "wb"); /* with a hole, which takes no space */
        REQUIRE(f != NULL);
        if (sizes[i]) CHECK_EQ(seek_to(f, sizes[i] - 1), 0);
        if (sizes[i]) CHECK_EQ(fputc('x', f), 'x');
        CHECK_EQ(fclose(f), 0);
        f = fopen(name, "rb");
        REQUIRE(f != NULL);
        const int64_t size = read_file_size(f);
        CHECK_MSG(size == (int64_t)sizes[i], "%.0f bytes: %.0f", (double)sizes[i], (double)size);
        CHECK_EQ(fgetc(f), sizes[i] == 0 ? EOF : sizes[i] == 1 ? 'x' : 0); /* it is at the beginning */
        CHECK_EQ(fclose(f), 0);
        if (sizes[i] > 1) continue;
        size_t n = 77;
        char *bytes = (char *)llama_read_file(name, &n);
        CHECK(bytes && n == sizes[i] && (n == 0 || *bytes == 'x'));
        free(bytes);
    }
    (void)remove(name);
    size_t n = 77;
    CHECK(llama_read_file(name, &n) == NULL && n == 0);
}

/* >>keys. Files with one more key, or two. */
static file_bytes more;

/* Loads the file with the keys in `more` and runs it. */
static int try_keys(int bpe, int n, char *err, size_t size, float *logits) {
    file_spec p = make_mixed_spec(bpe);
    p.more = &more;
    p.n_more = n;
    build_gguf(&file, &p);
    return try_file(file.p, file.n, NULL, 0, err, size, logits);
}

enum { OF_I32 = 5, OF_U32 = 4, OF_F32 = 6, OF_BOOL = 7, OF_STRING = 8, OF_I64 = 11, OF_F64 = 12 };
enum { SAME, OTHER, NOT_LOADED };

/* What a file means with one more key. The words of a refusal have the key's name, and what stands here. */
static const struct {
    const char *key;
    int type;
    double number;
    const char *text; /* of a string; of a refusal's words */
    int expected;
} keys[] = {
    {"general.name", OF_STRING, 0, "a name", SAME},
    {"general.base_model.0.name", OF_STRING, 0, "a base", SAME},
    {"general.license.link", OF_STRING, 0, "a link", SAME},
    {"general.type", OF_STRING, 0, "model", SAME},
    {"general.type", OF_STRING, 0, "adapter", NOT_LOADED},
    {"general.quantization_version", OF_U32, 2, NULL, SAME},
    {"general.quantization_version", OF_U32, 1, "takes 2", NOT_LOADED},
    {"general.what_is_this", OF_U32, 1, "does not know", NOT_LOADED},
    {"what.is_this", OF_U32, 1, "does not know", NOT_LOADED},
    {"quantize.imatrix.entries_count", OF_I32, 7, NULL, SAME},
    {"split.count", OF_U32, 2, "takes 0|1", NOT_LOADED},
    {"llama.vocab_size", OF_U32, VOCAB, NULL, SAME},
    {"llama.vocab_size", OF_U32, VOCAB + 1, "number of tokens", NOT_LOADED},
    {"llama.expert_count", OF_U32, 0, NULL, SAME},
    {"llama.expert_count", OF_U32, 8, "takes 0", NOT_LOADED},
    {"llama.expert_used_count", OF_U32, 2, NULL, SAME},
    {"llama.logit_scale", OF_F32, 1, NULL, SAME},
    {"llama.logit_scale", OF_F32, 0.5, "takes 0|1", NOT_LOADED},
    {"llama.logit_scale", OF_F64, 0.5, "takes 0|1", NOT_LOADED},
    {"llama.residual_scale", OF_F32, 0.22, "takes 0|1", NOT_LOADED},
    {"llama.embedding_scale", OF_F32, 12, "takes 0|1", NOT_LOADED},
    {"llama.attention.scale", OF_F32, 0.0625, "takes 0", NOT_LOADED},
    {"llama.attn_logit_softcapping", OF_F32, 50, "takes 0", NOT_LOADED},
    {"llama.final_logit_softcapping", OF_F32, 30, "takes 0", NOT_LOADED},
    {"llama.attention.clamp_kqv", OF_F32, 8, "takes 0", NOT_LOADED},
    {"llama.attention.max_alibi_bias", OF_F32, 8, "takes 0", NOT_LOADED},
    {"llama.attention.causal", OF_BOOL, 1, NULL, SAME},
    {"llama.attention.causal", OF_BOOL, 0, "takes 1", NOT_LOADED},
    {"llama.use_parallel_residual", OF_BOOL, 1, "takes 0", NOT_LOADED},
    {"llama.attention.sliding_window", OF_U32, CONTEXT, NULL, SAME},
    {"llama.attention.sliding_window", OF_U32, 16, "shorter than the context", NOT_LOADED},
    {"llama.attention.q_lora_rank", OF_U32, 8, "does not know", NOT_LOADED},
    {"llama.tensor_data_layout", OF_STRING, 0, "Meta AI original pth", SAME},
    {"llama.tensor_data_layout", OF_STRING, 0, "another", NOT_LOADED},
    {"mistral.block_count", OF_U32, LAYERS, "does not know", NOT_LOADED},
    {"llama.block_count", OF_U32, LAYERS, "twice", NOT_LOADED},
    {"general.architecture", OF_STRING, 0, "llama", NOT_LOADED},
    {"general.alignment", OF_U32, 32, "twice", NOT_LOADED},
    {"llama.rope.freq_base", OF_F64, 10000, NULL, SAME},
    {"llama.rope.freq_base", OF_F32, 500, NULL, OTHER},
    {"llama.rope.freq_base", OF_U32, 500, "positive float", NOT_LOADED},
    {"llama.rope.scale_linear", OF_F32, 4, NULL, OTHER},
    {"llama.rope.scaling.factor", OF_F32, 4, NULL, OTHER},
    {"llama.rope.scaling.factor", OF_F32, 1, NULL, SAME},
    {"llama.rope.scaling.type", OF_STRING, 0, "none", SAME},
    {"llama.rope.scaling.type", OF_STRING, 0, "longrope", NOT_LOADED},
    {"llama.rope.scaling.type", OF_U32, 1, "does not know", NOT_LOADED},
    {"llama.rope.scaling.attn_factor", OF_F32, 1, NULL, SAME},
    {"llama.rope.scaling.attn_factor", OF_F32, 1.5, "takes 1", NOT_LOADED},
    {"llama.rope.scaling.yarn_ext_factor", OF_F32, 0, "takes 1", NOT_LOADED},
    {"llama.rope.scaling.yarn_beta_fast", OF_F32, 32, NULL, SAME},
    {"llama.rope.scaling.yarn_beta_fast", OF_F32, 16, "takes 32", NOT_LOADED},
    {"llama.rope.scaling.yarn_log_multiplier", OF_F32, 0.1, "takes 0", NOT_LOADED},
    {"llama.rope.scaling.alpha", OF_F32, 2, "does not know", NOT_LOADED},
    {"llama.rope.dimension_sections", OF_U32, 2, "does not know", NOT_LOADED},
    {"tokenizer.ggml.eot_token_id", OF_I64, 2, NULL, SAME},
    {"tokenizer.ggml.eot_token_id", OF_I32, -1, NULL, SAME},
    {"tokenizer.ggml.eot_token_id", OF_U32, 4294967295.0, NULL, SAME},
    {"tokenizer.ggml.eot_token_id", OF_U32, VOCAB, "no token", NOT_LOADED},
    {"tokenizer.ggml.eot_token_id", OF_F32, 2, "whole number", NOT_LOADED},
    {"tokenizer.ggml.add_eos_token", OF_BOOL, 1, "takes 0", NOT_LOADED},
    {"tokenizer.ggml.padding_token_id", OF_U32, 2, NULL, SAME},
    {"tokenizer.ggml.precompiled_charsmap", OF_STRING, 0, "x", NOT_LOADED},
    {"tokenizer.chat_template.tool_use", OF_STRING, 0, "{{ x }}", SAME},
};

static void put_key(const char *key, int type, double number, const char *text) {
    if (type == OF_STRING) put_key_string(&more, key, text);
    else put_key_number(&more, key, type, number);
}

TEST(each_key_is_followed_or_refused) {
    float plain[VOCAB], logits[VOCAB];
    char err[256];
    size_t i;
    int k;
    more.n = 0;
    CHECK_EQ(try_keys(0, 0, err, sizeof err, plain), RUNS);
    for (i = 0; i < sizeof keys / sizeof *keys; i++) {
        double largest = 0;
        more.n = 0;
        put_key(keys[i].key, keys[i].type, keys[i].number, keys[i].text);
        const int result = try_keys(0, 1, err, sizeof err, logits);
        if (keys[i].expected == NOT_LOADED) {
            const char *word = keys[i].type == OF_STRING ? "" : keys[i].text;
            const int named =
                strstr(err, keys[i].key) != NULL || strstr(err, "RoPE scaling 'longrope'") != NULL;
            CHECK_MSG(result == REFUSED && named && strstr(err, word), "%s: result %d, \"%s\"", keys[i].key,
                      result, err);
            continue;
        }
        CHECK_MSG(result == RUNS, "%s: result %d, \"%s\"", keys[i].key, result, err);
        for (k = 0; result == RUNS && k < VOCAB; k++)
            if (fabs((double)logits[k] - (double)plain[k]) > largest)
                largest = fabs((double)logits[k] - (double)plain[k]);
        CHECK_MSG((largest > 1e-4) == (keys[i].expected == OTHER), "%s: logits differ by %g", keys[i].key,
                  largest);
    }
}

/* Each row of the table of keys that do nothing: the file runs with such a value and not with another. */
TEST(each_idle_key) {
    char err[256], name[80];
    size_t i;
    for (i = 0; i < sizeof llama_idle_keys / sizeof *llama_idle_keys; i++) {
        const char *key = llama_idle_keys[i].name, *value = llama_idle_keys[i].value;
        const size_t n = strlen(key);
        if (strcmp(key, ".expert_*") == 0) continue; /* a row before it has another meaning */
        snprintf(name, sizeof name, "%s%.*s%s", *key == '.' ? "llama" : "", (int)n - (key[n - 1] == '*'), key,
                 key[n - 1] == '*' ? "anything" : "");
        more.n = 0;
        if (value && (value[0] < '0' || value[0] > '9')) put_key(name, OF_STRING, 0, value);
        else put_key(name, OF_F32, value ? atof(value) : 77.0, NULL);
        CHECK_MSG(try_keys(0, 1, err, sizeof err, NULL) == RUNS, "%s: \"%s\"", name, err);
        if (!value) continue;
        more.n = 0;
        put_key(name, OF_F32, 77.0, NULL);
        CHECK_MSG(try_keys(0, 1, err, sizeof err, NULL) == REFUSED && strstr(err, name), "%s: \"%s\"", name,
                  err);
        more.n = 0;
        put_key(name, OF_STRING, 0, "77");
        CHECK_MSG(try_keys(0, 1, err, sizeof err, NULL) == REFUSED && strstr(err, name), "%s: \"%s\"", name,
                  err);
    }
}

/* Linear scaling divides positions; YaRN is computed for the context that the model was trained on. */
TEST(scaling_of_rope) {
    const float ones[HEAD / 2] = {1, 1, 1, 1}, zeros[HEAD / 2] = {1, 0, 1, 1},
                            negative[HEAD / 2] = {1, 1, -2, 1};
    const float *const factors[] = {ones, zeros, negative};
    file_spec p = make_mixed_spec(0);
    char err[256];
    llama_model m;
    int i;
    p.more = &more;
    for (i = 0; i < 2; i++) {
        more.n = 0;
        put_key("llama.rope.scaling.factor", OF_F32, 4, NULL);
        put_key("llama.rope.scaling.type", OF_STRING, 0, i ? "yarn" : "linear");
        put_key("llama.rope.scaling.original_context_length", OF_U32, 16, NULL);
        p.n_more = 3;
        build_gguf(&file, &p);
        REQUIRE(llama_load_memory(file.p, file.n, NULL, 0, &m, err, sizeof err));
        tkv_config cfg = tkv_default_config();
        llama_kv_config(&m, &cfg);
        CHECK_EQ(cfg.model.rope.dim, 0); /* formats that undo RoPE know no scaling */
        CHECK_NEAR(m.rope_linear, i ? 0 : 4, 0);
        CHECK_NEAR(m.rope_yarn, i ? 4 : 0, 0);
        CHECK_EQ(m.context, i ? 16 : CONTEXT);
        CHECK_EQ(llama_context(&m), CONTEXT);
        CHECK_NEAR(llama_frequency(&m, NULL, 3), pow(1e4, -0.75) / 4, 1e-9); /* below one turn in either */
        llama_free(&m);
    }
    p.n_more = 0;
    p.more = NULL;
    for (i = 0; i < 3; i++) {
        p.factors = (const char *)factors[i];
        build_gguf(&file, &p);
        CHECK_EQ(try_file(file.p, file.n, NULL, 0, err, sizeof err, NULL), i ? REFUSED : RUNS);
        if (i && llama_little_endian()) CHECK(strstr(err, "rope_freqs.weight") != NULL);
    }
}

TEST(tokenizers_of_files) {
    static const struct {
        const char *name;
        int is_known, digits, llama3_digits, add_bos;
    } rows[] = {{"smollm", 1, 1, 0, 0}, {"gpt-2", 1, 0, 0, 0}, {"llama-bpe", 1, 0, 3, 1},
                {"qwen2", 1, 0, 1, 0},  {"", 1, 0, 0, 0},      {"default", 1, 0, 0, 0},
                {"viking", 0, 0, 0, 0}};
    static const int by_merges[] = {16}, whole[] = {19};
    file_spec p = make_mixed_spec(1);
    char err[256];
    llama_model m;
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        p.pre = rows[i].name;
        build_gguf(&file, &p);
        const int ok = llama_load_memory(file.p, file.n, NULL, 0, &m, err, sizeof err);
        CHECK_EQ(ok, rows[i].is_known);
        if (!ok) CHECK(strstr(err, "tokenizer.ggml.pre 'viking'") != NULL);
        if (!ok) continue;
        CHECK_EQ(m.digits, rows[i].digits);
        CHECK_EQ(m.llama3_digits, rows[i].llama3_digits);
        CHECK_EQ(m.add_bos, rows[i].add_bos);
        CHECK_EQ(m.note[0] != 0, !*rows[i].name || strcmp(rows[i].name, "default") == 0);
        check_tokens(&m, " ab", 0, by_merges, 1);
        if (m.whole_words) check_tokens(&m, "aba", 0, whole, 1); /* no merge makes this token */
        CHECK_EQ(m.whole_words, rows[i].llama3_digits == 3);
        llama_free(&m);
    }
    p.pre = NULL;
    /* without merges, words would be bytes */
    build_gguf(&file, &p);
    file.p[find_name_end(&file, "tokenizer.ggml.merges") - 1] = 'z';
    CHECK_EQ(try_file(file.p, file.n, NULL, 0, err, sizeof err, NULL), REFUSED);
    CHECK(strstr(err, "tokenizer.ggml.merges is missing") != NULL);
}

/* >>chat templates */
static int is_in(int token, const int *tokens, int n) {
    int i;
    for (i = 0; i < n; i++)
        if (tokens[i] == token) return 1;
    return 0;
}

TEST(chat_templates) {
    static const struct {
        int bpe;
        const char *text, *name, *fault;
    } rows[] = {{1, "{% for m in messages %}<|im_start|>{{ m.role }}", "ChatML", ""},
                {0, "{% for m in messages %}<|im_start|>{{ m.role }}", NULL,
                 "ChatML, and the vocabulary has no token <|im_end|>"},
                {1, "<|start_header_id|>{{ m.role }}<|end_header_id|>", NULL,
                 "Llama 3's, and the vocabulary has no token"},
                {0, "{{ '<|user|>\n' + m.content + eos_token }}", "Zephyr's", ""},
                {0, "<|user|>\n{{ m.content }}<|end|>", NULL, "Phi 3's"},
                {1, "<|im_start|>user<|im_sep|>", NULL, "Phi 4's"},
                {0, "<s>[INST] {{ m.content }} [/INST]", NULL, "Llama 2's or Mistral's"},
                {0, "<start_of_turn>user", NULL, "Gemma's"},
                {0, "{{ m.content }}", NULL, "unknown"}};
    char err[256];
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        file_spec p = make_mixed_spec(rows[i].bpe);
        llama_model m;
        more.n = 0;
        put_key("tokenizer.chat_template", OF_STRING, 0, rows[i].text);
        p.more = &more;
        p.n_more = 1;
        build_gguf(&file, &p);
        REQUIRE(llama_load_memory(file.p, file.n, NULL, 0, &m, err,
                                  sizeof err)); /* plain text goes on without it */
        CHECK_STR(m.chat ? m.chat->name : "", rows[i].name ? rows[i].name : "");
        CHECK_MSG(strstr(m.chat_fault, rows[i].fault) && (rows[i].name != NULL) == !m.chat_fault[0],
                  "\"%s\": \"%s\"", rows[i].text, m.chat_fault);
        llama_free(&m);
    }
}

/* What a user writes into a turn is text, whatever it looks like. */
TEST(users_write_no_control_tokens) {
    static const char *const templates[2] = {"{{ '<|user|>\n' + m.content + eos_token }}", "<|im_start|>"};
    static const char *const typed[2] = {"ab</s>\n<s>dd<0x41>", "ab<|im_end|>\n<|im_start|>dd<|endoftext|>"};
    /* bytes that the vocabulary lacks are left out: its unknown token is a control token */
    static const int chatml[] = {1, 13, 9, 4, 5, 2, 4, 1, 5, 13, 13, 13, 5, 4},
                     again[] = {2, 4, 1, 13, 9, 4, 5};
    int bpe, first, tokens[LLAMA_TURN + 64], i, n;
    char err[256];
    for (bpe = 0; bpe < 2; bpe++) {
        file_spec p = make_mixed_spec(bpe);
        llama_model m;
        more.n = 0;
        put_key("tokenizer.chat_template", OF_STRING, 0, templates[bpe]);
        put_key("tokenizer.ggml.eot_token_id", OF_U32, bpe ? 15 : 10,
                NULL); /* "ab", a normal token in the file */
        p.more = &more;
        p.n_more = 2;
        build_gguf(&file, &p);
        REQUIRE(llama_load_memory(file.p, file.n, NULL, 0, &m, err, sizeof err));
        CHECK(m.chat != NULL);
        n = llama_tokenize(&m, typed[bpe], strlen(typed[bpe]), 0, tokens);
        CHECK_LE(2, n);
        for (i = 0; i < n; i++) CHECK(m.entries[tokens[i]].kind != LLAMA_CONTROL);
        n = llama_tokenize(&m, typed[bpe], strlen(typed[bpe]), LLAMA_SPECIAL, tokens);
        CHECK(is_in(bpe ? 15 : 10, tokens, n) && is_in(2, tokens, n)); /* the flag asks for them */
        for (first = 0; first < 2; first++) {
            int plain[LLAMA_TURN], with[LLAMA_TURN + 64], k, n_plain, n_with, text[64], n_text;
            n_plain = llama_tokenize_turn(&m, "", 0, first, plain);
            n_with = llama_tokenize_turn(&m, typed[bpe], strlen(typed[bpe]), first, with);
            n_text = llama_tokenize(&m, typed[bpe], strlen(typed[bpe]), LLAMA_CONTINUED, text);
            CHECK_EQ(n_with, n_plain + n_text);
            for (i = k = 0; i < n_with; i++) k += m.entries[with[i]].kind == LLAMA_CONTROL;
            for (i = 0; i < n_plain; i++) k -= m.entries[plain[i]].kind == LLAMA_CONTROL;
            CHECK_EQ(k, 0); /* the template's own, and no other */
        }
        if (bpe) {
            n = llama_tokenize_turn(&m, "a", 1, 1, tokens);
            CHECK_EQ(n, 14);
            CHECK_MEM(tokens, chatml, sizeof chatml);
            n = llama_tokenize_turn(&m, "a", 1, 0, tokens);
            CHECK_MEM(tokens, again, sizeof again);
        }
        llama_free(&m);
    }
}

/* >>damaged files */
/* A file that ends after any byte of the header, or in the data, gives an error sentence. */
TEST(truncated_gguf) {
    int bpe, step = tkv_test_quick() ? 13 : 1;
    char err[256];
    for (bpe = 0; bpe < 2; bpe++) {
        const file_spec p = make_mixed_spec(bpe);
        size_t n, header;
        build_gguf(&file, &p);
        header = header_size(&file);
        for (n = 0; n < header; n += (size_t)step)
            CHECK_EQ(try_file(file.p, n, NULL, 0, err, sizeof err, NULL), REFUSED);
        for (; n < file.n; n += 997) CHECK_EQ(try_file(file.p, n, NULL, 0, err, sizeof err, NULL), REFUSED);
        CHECK_EQ(try_file(file.p, file.n - 1, NULL, 0, err, sizeof err, NULL), REFUSED);
    }
}

TEST(truncated_llama2c) {
    char err[256];
    size_t n;
    build_llama2c(&file, &token_file, 1);
    for (n = 0; n < 64; n++)
        CHECK_EQ(try_file(file.p, n, token_file.p, token_file.n, err, sizeof err, NULL), REFUSED);
    for (; n < file.n; n += 1009)
        CHECK_EQ(try_file(file.p, n, token_file.p, token_file.n, err, sizeof err, NULL), REFUSED);
    for (n = 0; n < token_file.n; n++)
        CHECK_EQ(try_file(file.p, file.n, token_file.p, n, err, sizeof err, NULL), REFUSED);
    CHECK_EQ(try_file(file.p, file.n, NULL, 0, err, sizeof err, NULL), REFUSED);
    CHECK(strstr(err, "tokenizer.bin") != NULL);
}

/* Changes every byte of the header in three ways. Each ends in an error sentence or in a model. */
TEST(changed_bytes) {
    static const unsigned char masks[3] = {0xff, 0x80, 0x01};
    const size_t step = tkv_test_quick() ? 7 : 1;
    int bpe, k, n_runs = 0, n_refused = 0, result;
    char err[256];
    size_t i, n;
    for (bpe = 0; bpe < 2; bpe++) {
        const file_spec p = make_mixed_spec(bpe);
        build_gguf(&file, &p);
        n = header_size(&file);
        for (i = 0; i < n; i += step) {
            for (k = 0; k < 3; k++) {
                file.p[i] ^= masks[k];
                result = try_file(file.p, file.n, NULL, 0, err, sizeof err, NULL);
                n_runs += result == RUNS, n_refused += result == REFUSED;
                file.p[i] ^= masks[k];
            }
        }
    }
    build_llama2c(&file, &token_file, 1);
    for (i = 0; i < 28 + token_file.n; i += step) {
        for (k = 0; k < 3; k++) {
            unsigned char *c = i < 28 ? &file.p[i] : &token_file.p[i - 28];
            *c ^= masks[k];
            result = try_file(file.p, file.n, token_file.p, token_file.n, err, sizeof err, NULL);
            n_runs += result == RUNS, n_refused += result == REFUSED;
            *c ^= masks[k];
        }
    }
    printf("\n    %d refused, %d run", n_refused, n_runs);
    CHECK_LE(100, n_refused); /* a changed letter of a token is no damage */
    CHECK_LE(100, n_runs);
}

/* Changes of one number in a file, and a word that the error sentence must have. */
static const struct {
    const char *name; /* the number stands `skip` bytes behind this name, or at `skip` if it is NULL */
    int skip, size;
    uint64_t value;
    const char *err_has;
} bad_numbers[] = {
    {NULL, 4, 4, 1, "version"},
    {NULL, 4, 4, 0x03000000, "version"}, /* big-endian */
    {NULL, 8, 8, UINT64_MAX, "too short"},
    {NULL, 8, 8, (uint64_t)1 << 60, "too short"},
    {NULL, 8, 8, 22, "tensor"}, /* one more tensor than there is */
    {NULL, 16, 8, UINT64_MAX, "too short"},
    {NULL, 16, 8, (uint64_t)1 << 59, "too short"},
    {NULL, 16, 8, 3, "damaged"},          /* the fourth key is read as a tensor */
    {NULL, 24, 8, UINT64_MAX, "damaged"}, /* length of the first key */
    {NULL, 24, 8, (uint64_t)1 << 63, "damaged"},
    {"general.architecture", 0, 4, 99, "damaged"},
    {"general.architecture", 12, 1, 'L', "architecture"},
    {"general.alignment", 4, 4, 0, "alignment"},
    {"general.alignment", 4, 4, 24, "alignment"},
    {"general.alignment", 4, 4, 0x80000000, "ends before"},
    {"llama.block_count", 0, 4, 6, "whole number"},
    {"llama.block_count", 4, 4, 0, "layers"},
    {"llama.block_count", 4, 4, 1, "no place"}, /* the second layer's tensors are left over */
    {"llama.block_count", 4, 4, 3, "blk.2"},
    {"llama.block_count", 4, 4, 0x7fffffff, "layers"},
    {"llama.block_count", 4, 4, 0xffffffff, "range"},
    {"llama.context_length", 4, 4, 0, "context"},
    {"llama.embedding_length", 4, 4, 0, "cannot be"},
    {"llama.embedding_length", 4, 4, 64, "token_embd"},
    {"llama.embedding_length", 4, 4, 0x7fffffff, "cannot be"},
    {"llama.feed_forward_length", 4, 4, 0, "cannot be"},
    {"llama.feed_forward_length", 4, 4, 96, "ffn_gate"},
    {"llama.feed_forward_length", 4, 4, 0x7ffffff0, "cannot be"},
    {"llama.attention.head_count", 4, 4, 0, "heads"},
    {"llama.attention.head_count", 4, 4, 3, "heads"},
    {"llama.attention.head_count", 4, 4, 0x7ffffffe, "heads"},
    {"llama.attention.head_count_kv", 4, 4, 0, "heads"},
    {"llama.attention.head_count_kv", 4, 4, 3, "share"},
    {"llama.attention.head_count_kv", 4, 4, 4, "attn_k"},
    {"llama.rope.dimension_count", 4, 4, 7, "RoPE"},
    {"llama.rope.dimension_count", 4, 4, 10, "RoPE"},
    {"llama.attention.layer_norm_rms_epsilon", 4, 4, 0x7fc00000, "positive"}, /* NaN */
    {"llama.attention.layer_norm_rms_epsilon", 4, 4, 0xbf800000, "positive"}, /* -1 */
    {"llama.attention.layer_norm_rms_epsilon", 4, 4, 0x7f800000, "positive"}, /* infinity */
    {"tokenizer.ggml.model", 12, 1, 'x', "tokenizer"},
    {"tokenizer.ggml.tokens", 4, 4, 5, "damaged"}, /* an array of numbers: no key follows */
    {"tokenizer.ggml.tokens", 4, 4, 9, "damaged"}, /* an array of arrays */
    {"tokenizer.ggml.tokens", 4, 4, 13, "damaged"},
    {"tokenizer.ggml.tokens", 8, 8, 0, "damaged"},
    {"tokenizer.ggml.tokens", 8, 8, 19, "damaged"},
    {"tokenizer.ggml.tokens", 8, 8, UINT64_MAX, "damaged"},
    {"tokenizer.ggml.tokens", 16, 8, UINT64_MAX - 7, "damaged"}, /* length of the first token */
    {"tokenizer.ggml.tokens", 16, 8, (uint64_t)1 << 32, "damaged"},
    {"tokenizer.ggml.scores", 8, 8, (uint64_t)1 << 62, "damaged"},
    {"tokenizer.ggml.scores", 4, 4, 5, "array"},
    {"tokenizer.ggml.token_type", 4, 4, 6, "array"},
    {"token_embd.weight", 0, 4, 0, "damaged"},
    {"token_embd.weight", 0, 4, 5, "damaged"},
    {"token_embd.weight", 0, 4, UINT32_MAX, "damaged"},
    {"token_embd.weight", 4, 8, (uint64_t)1 << 63, "size"},
    {"token_embd.weight", 12, 8, (uint64_t)1 << 62, "size"},
    {"token_embd.weight", 12, 8, 21, "size"},
    {"blk.1.ffn_up.weight", 20, 4, 0, "outside"}, /* OF_F32 takes more */
    {"token_embd.weight", 20, 4, 10, "type"},     /* Q2_K */
    {"token_embd.weight", 20, 4, UINT32_MAX, "type"},
    {"token_embd.weight", 24, 8, UINT64_MAX, "outside"},
    {"token_embd.weight", 24, 8, (uint64_t)1 << 63, "outside"},
    {"blk.1.ffn_up.weight", 24, 8, 1 << 20, "outside"},
    {"blk.0.attn_q.weight", 4, 8, 0, "size"},
    {"output_norm.weight", 4, 8, 33, "size"},
};

TEST(bad_numbers) {
    const file_spec p = make_mixed_spec(0);
    char err[256];
    size_t i;
    build_gguf(&file, &p);
    for (i = 0; i < sizeof bad_numbers / sizeof *bad_numbers; i++) {
        const size_t at = (bad_numbers[i].name ? find_name_end(&file, bad_numbers[i].name) : 0) +
                          (size_t)bad_numbers[i].skip;
        unsigned char original[8];
        int j, result;
        memcpy(original, file.p + at, 8);
        for (j = 0; j < bad_numbers[i].size; j++)
            file.p[at + (size_t)j] = (unsigned char)(bad_numbers[i].value >> (8 * j) & 255);
        result = try_file(file.p, file.n, NULL, 0, err, sizeof err, NULL);
        CHECK_MSG(result == REFUSED && strstr(err, bad_numbers[i].err_has),
                  "%s + %d = %lu: result %d, \"%s\"", bad_numbers[i].name ? bad_numbers[i].name : "start",
                  bad_numbers[i].skip, (unsigned long)bad_numbers[i].value, result, err);
        memcpy(file.p + at, original, 8);
    }
    CHECK_EQ(try_file(file.p, file.n, NULL, 0, err, sizeof err, NULL), RUNS); /* the file is as before */
}

/* Each of the seven numbers of the header takes absurd values. */
TEST(bad_numbers_in_llama2c) {
    static const int32_t absurd[8] = {0, -1, INT32_MIN, INT32_MAX, 3, 1 << 20, 65537, -65536};
    char err[256];
    int i, j, k;
    build_llama2c(&file, &token_file, 0);
    for (i = 0; i < 7; i++) {
        unsigned char original[4];
        memcpy(original, file.p + 4 * i, 4);
        for (j = 0; j < 8; j++) {
            for (k = 0; k < 4; k++) file.p[4 * i + k] = (unsigned char)((uint32_t)absurd[j] >> (8 * k) & 255);
            CHECK_EQ(try_file(file.p, file.n, token_file.p, token_file.n, err, sizeof err, NULL), REFUSED);
        }
        memcpy(file.p + 4 * i, original, 4);
    }
    CHECK_EQ(try_file(file.p, file.n, token_file.p, token_file.n, err, sizeof err, NULL), RUNS);
    CHECK_EQ(try_file((const unsigned char *)"", 0, NULL, 0, err, sizeof err, NULL), REFUSED);
    CHECK_EQ(try_file((const unsigned char *)"GGUF", 4, NULL, 0, err, sizeof err, NULL), REFUSED);
}

/* NaN in an embedding: the cache refuses the keys, and the step is aborted. */
TEST(nonfinite_weights) {
    const file_spec p = make_float_spec();
    char err[256];
    size_t at;
    build_gguf(&file, &p);
    at = header_size(&file) + 4; /* inside the embedding of token 0, which try_file evaluates */
    memcpy(file.p + at, "\x00\x00\xc0\x7f", 4);
    CHECK_EQ(try_file(file.p, file.n, NULL, 0, err, sizeof err, NULL), LOADS_AND_FAILS);
}

TEST(random_changes) { /* one to six bytes at random places */
    const int times = tkv_test_quick() ? 100 : 2000;
    tkv_rng r = tkv_rng_seed(20240402);
    int i, j, results[3] = {0, 0, 0};
    char err[256];
    for (i = 0; i < times; i++) {
        const file_spec p = make_mixed_spec(i & 1);
        size_t header;
        build_gguf(&file, &p);
        header = header_size(&file);
        for (j = 1 + tkv_rng_below(&r, 6); j--;) {
            const size_t at = (size_t)tkv_rng_below(&r, (int)(tkv_rng_below(&r, 4) ? header : file.n));
            const int kind = tkv_rng_below(&r, 3);
            file.p[at] = (unsigned char)(kind == 0 ? 0xff : kind == 1 ? 0 : tkv_rng_below(&r, 256));
        }
        results[try_file(file.p, file.n, NULL, 0, err, sizeof err, NULL)]++;
    }
    printf("\n    %d refused, %d run, %d load and fail", results[REFUSED], results[RUNS],
           results[LOADS_AND_FAILS]);
    CHECK_LE(times / 10, results[REFUSED]);
    CHECK_LE(1, results[RUNS]);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(good_files_run);
    RUN(rows_decode);
    RUN(rope);
    RUN(tokenizers);
    RUN(words_of_llama3);
    RUN(sizes_of_large_files);
    RUN(each_key_is_followed_or_refused);
    RUN(each_idle_key);
    RUN(scaling_of_rope);
    RUN(tokenizers_of_files);
    RUN(chat_templates);
    RUN(users_write_no_control_tokens);
    RUN(truncated_gguf);
    RUN(truncated_llama2c);
    RUN(changed_bytes);
    RUN(bad_numbers);
    RUN(bad_numbers_in_llama2c);
    RUN(nonfinite_weights);
    RUN(random_changes);
    return tkv_test_end();
}
