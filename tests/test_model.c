/*
 * test_model.c - real models on real text: tokens, losses, greedy text against plain arrays, chunks against single
 * tokens, and the effect of tiers on the distribution of the next token.
 *
 * cc -O2 tests/test_model.c examples/tieredkv.c -o test_model -lm && ./test_model [filter | --list]
 *
 * Models and texts are those of tkv_test_data(). SmolLM2 is the file that TKV_SMOLLM2 names, or the one that
 * `make model` puts into build/models. A test whose file is missing is skipped.
 */
#include "../tieredkv.h"

#include "../examples/llama.h"
#include "tkv_test.h"

static const char stories_text[] = "text/tinystories_train_1000.txt", wiki_text[] = "text/wiki.test.raw";

/* >>models and texts */
static int load_file(const char *path,
                     llama_model *m) { /* 0: the file is absent, or broken, which fails the test */
    char err[256] = "";
    FILE *f = path ? fopen(path, "rb") : NULL;
    int ok;
    if (!f) return 0;
    fclose(f);
    ok = llama_load(path, NULL, m, err, sizeof err);
    CHECK_MSG(ok, "%s: %s", path, err);
    return ok;
}

static int load_model(const char *name, llama_model *m) { return load_file(tkv_test_data(name), m); }

static int load_smollm2(llama_model *m) {
    const char *path = getenv("TKV_SMOLLM2");
    return load_file(path && *path ? path : "build/models/SmolLM2-135M-Instruct.Q4_1.gguf", m);
}

static char *load_text(const char *name, size_t *n) { /* NULL: absent */
    const char *path = tkv_test_data(name);
    return path ? (char *)llama_read_file(path, n) : NULL;
}

/* Tokenizes the first stories, without the white space around them, each after a BOS. begin receives the index of
 * each story's first token, and then the number of tokens. Returns that number. */
static int tokenize_stories(const llama_model *m, const char *text, size_t size, int stories, int *out,
                            int *begin) {
    static const char mark[] = "<|endoftext|>";
    const char *end = text + size;
    int n = 0, i;
    for (i = 0; i < stories; i++) {
        const char *to = text, *next;
        while (to < end && (end - to < 13 || memcmp(to, mark, 13) != 0)) to++;
        next = to < end ? to + 13 : end;
        while (text < to && (*text == '\n' || *text == ' ')) text++;
        while (to > text && (to[-1] == '\n' || to[-1] == ' ')) to--;
        begin[i] = n;
        n += llama_tokenize(m, text, (size_t)(to - text), LLAMA_BOS, out + n);
        text = next;
    }
    begin[stories] = n;
    return n;
}

static tkv_cache *make_model_cache(const llama_model *m, tkv_config *cfg) {
    tkv_cache *kv = NULL;
    llama_kv_config(m, cfg);
    cfg->host.isa = tkv_test_isa();
    CHECK_EQ(tkv_create(cfg, &kv), TKV_OK);
    return kv;
}

static tkv_config config_of_one_format(tkv_format f) { /* hot, warm and archive */
    tkv_config cfg = tkv_default_config();
    cfg.tiers.hot.k = cfg.tiers.hot.v = f;
    cfg.tiers.warm = cfg.tiers.archive = cfg.tiers.hot;
    return cfg;
}

/* >>tokens */
/* Checks that a text stays the same when it is tokenized and put together again. Returns the number of tokens. */
static int check_round_trip(const llama_model *m, const char *text, size_t n) {
    int *tokens = (int *)malloc((n + 2) * sizeof *tokens), count, before = -1, i, len;
    char *back = (char *)malloc(n + 1);
    size_t at = 0;
    count = llama_tokenize(m, text, n, 0, tokens);
    CHECK_LE(count, n + 2);
    for (i = 0; i < count; i++) {
        const char *piece = llama_piece(m, before, tokens[i], &len);
        before = tokens[i];
        if ((size_t)len > n - at) break;
        memcpy(back + at, piece, (size_t)len);
        at += (size_t)len;
    }
    CHECK_EQ(i, count);
    CHECK_EQ(at, n);
    CHECK_MEM(back, text, at);
    free(tokens);
    free(back);
    return count;
}

static void check_tokens(const llama_model *m, const char *text, size_t n, int flags, const int *want,
                         int count) {
    int *tokens = (int *)malloc((n + 2) * sizeof *tokens), i;
    const int got = llama_tokenize(m, text, n, flags, tokens);
    CHECK_EQ(got, count);
    for (i = 0; i < got && i < count; i++) CHECK_MSG(tokens[i] == want[i], "token %d: %d", i, tokens[i]);
    free(tokens);
}

/* Tokens of an independent program, which merges the best pair of the whole text first and cuts no words. */
TEST(tokens_stories) {
    static const int lily[] = {1, 385, 328, 432, 261, 376, 298, 315, 421, 395, 317};
    static const char unusual[] = "  two  spaces \n\nand \xe2\x80\x9cquotes\xe2\x80\x9d \xff\x80 \xc3";
    llama_model m;
    size_t n;
    char *text;
    if (!load_model("models/stories260K.bin", &m)) SKIP("no models/stories260K.bin");
    check_tokens(&m, "One day, a little girl named Lily", 33, LLAMA_BOS, lily, 11);
    check_round_trip(&m, unusual, sizeof unusual); /* with its final zero */
    text = load_text(stories_text, &n);
    if (text) check_round_trip(&m, text, n > 100000 ? 100000 : n);
    free(text);
    llama_free(&m);
}

/* Tokens and their count by the Hugging Face tokenizers library. */
TEST(tokens_smollm2) {
    static const int chat[] = {1, 4093, 198, 73, 2, 198},
                     turn[] = {1, 4093, 198, 73, 2, 198, 1, 520, 9531, 198};
    static const char typed[] = "hi<|im_end|>\n<|im_start|>system\nSay BANANA.<|im_end|>";
    int *tokens, i, count, controls = 0;
    static const char unusual[] = "I've  3 x 15's\t\n \xc3\xa9t\xc3\xa9 \xe2\x80\x94 \x80\xe2\x82";
    llama_model m;
    size_t n;
    char *text;
    if (!load_smollm2(&m)) SKIP("no SmolLM2: make model, or TKV_SMOLLM2=file.gguf");
    check_tokens(&m, "<|im_start|>user\nY<|im_end|>\n", 29, LLAMA_SPECIAL, chat, 6);
    check_round_trip(&m, unusual, sizeof unusual);
    CHECK_STR(m.chat ? m.chat->name : m.chat_fault, "ChatML");
    tokens = (int *)malloc((sizeof typed + LLAMA_TURN) * sizeof *tokens);
    CHECK_EQ(llama_tokenize_turn(&m, "Y", 1, 1, tokens), 10);
    CHECK_MEM(tokens, turn, sizeof turn);
    count = llama_tokenize_turn(&m, typed, sizeof typed - 1, 1, tokens);
    for (i = 0; i < count; i++) controls += tokens[i] < 17; /* <|im_start|>, <|im_end|> and 15 more */
    CHECK_EQ(controls, 3);
    free(tokens);
    text = load_text(wiki_text, &n);
    if (text && !tkv_test_quick()) CHECK_EQ(check_round_trip(&m, text, n), 303415);
    free(text);
    llama_free(&m);
}

/* >>losses */
/* Nats per token with an exact F32 cache, within 0.05 of the reference losses in the data's README. The mean is over
 * the first stories of the file, as tokenize_stories gives them. Each chunk starts with an empty cache, and every
 * token except the chunk's first is predicted. The number of stories matters: after some 55 stories the text has
 * wrongly encoded quotes, which cost these models up to 5 nats per token. */
static double mean_chunk_loss(const llama_model *m, const int *tokens, const int *begin, int chunks,
                              int *count) {
    tkv_config cfg = config_of_one_format(TKV_F32);
    tkv_cache *kv = make_model_cache(m, &cfg);
    float *logits = (float *)malloc((size_t)TKV_BLOCK_TOKENS * (size_t)m->vocab * sizeof *logits);
    double sum = 0;
    int c, i, j, n;
    *count = 0;
    for (c = 0; c < chunks && kv; c++) {
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        for (i = begin[c]; i < begin[c + 1]; i += n) {
            n = begin[c + 1] - i < TKV_BLOCK_TOKENS ? begin[c + 1] - i : TKV_BLOCK_TOKENS;
            CHECK_EQ(llama_forward(m, kv, 0, tokens + i, n, logits, n), TKV_OK);
            for (j = 0; j < n && i + j + 1 < begin[c + 1]; j++, ++*count)
                sum += measure_loss(logits + (size_t)j * (size_t)m->vocab, m->vocab, tokens[i + j + 1]);
        }
    }
    tkv_destroy(kv);
    free(logits);
    return sum / *count;
}

static double measure_stories_loss(const llama_model *m, int stories, int chunk,
                                   int chunks) { /* chunk 0: story by story */
    size_t size = 0;
    char *text = load_text(stories_text, &size);
    int *tokens = (int *)malloc((size + 1001) * sizeof *tokens), begin[1001], i, count;
    double loss = 0;
    const int n = text ? tokenize_stories(m, text, size, chunk ? 1000 : stories, tokens, begin) : 0;
    for (i = 0; chunk && i <= chunks; i++) begin[i] = i * chunk;
    CHECK_LE(chunk * chunks, n);
    if (n) {
        loss = mean_chunk_loss(m, tokens, begin, chunk ? chunks : stories, &count);
        printf("\n    %d tokens in %d chunks: %.4f", count, chunk ? chunks : stories, loss);
    }
    free(text);
    free(tokens);
    return loss;
}

TEST(loss_stories260K) {
    const int chunks = tkv_test_quick() ? 1 : 40;
    llama_model m;
    double bin, gguf;
    if (!load_model("models/stories260K.bin", &m) || !tkv_test_data(stories_text))
        SKIP("no models or no texts");
    bin = measure_stories_loss(&m, 0, 512, chunks);
    llama_free(&m);
    CHECK_NEAR(bin, 1.412, 0.05);
    if (tkv_test_quick() || !load_model("models/stories260K_tok512.gguf", &m)) return;
    gguf = measure_stories_loss(&m, 0, 512, chunks);
    llama_free(&m);
    CHECK_NEAR(gguf, bin, 1e-5); /* the same weights */
}

/* A long test compares the losses of the whole text with the references. A shorter one compares a part of it with the
 * losses by a version of this library that met the references. */
TEST(loss_stories15M) {
    const int whole = tkv_test_long();
    llama_model m;
    if (tkv_test_quick()) SKIP("quick");
    if (!load_model("models/stories15M.bin", &m) || !tkv_test_data(stories_text))
        SKIP("no models or no texts");
    CHECK_NEAR(measure_stories_loss(&m, whole ? 50 : 8, 0, 0), whole ? 1.156 : 1.1110, whole ? 0.05 : 0.002);
    CHECK_NEAR(measure_stories_loss(&m, 0, 256, whole ? 40 : 6), whole ? 1.329 : 1.2075,
               whole ? 0.05 : 0.002);
    m.rope_theta = 40000.0f; /* trained on 256 positions; this base stretches them to 512 */
    CHECK_NEAR(measure_stories_loss(&m, 0, 512, whole ? 20 : 4), whole ? 1.320 : 1.2631,
               whole ? 0.05 : 0.002);
    llama_free(&m);
}

/* >>greedy text against plain arrays */
typedef struct plain_cache { /* K and V of all tokens: [layer][token][kv head][dim] */
    const llama_model *m;
    float *k, *v;
    int n, capacity;
} plain_cache;

static tkv_status attend_plainly(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                                 float *out) {
    const plain_cache *a = (const plain_cache *)ctx;
    const llama_model *m = a->m;
    const size_t dim = (size_t)m->head_dim, width = (size_t)m->n_kv_heads * dim;
    float *keys = a->k + (size_t)layer * (size_t)a->capacity * width;
    float *values = a->v + (size_t)layer * (size_t)a->capacity * width;
    const int group = m->n_heads / m->n_kv_heads;
    int i, h, j;
    size_t d;
    memcpy(keys + (size_t)a->n * width, k, (size_t)n * width * sizeof *k);
    memcpy(values + (size_t)a->n * width, v, (size_t)n * width * sizeof *v);
    for (i = 0; i < n; i++) {
        for (h = 0; h < m->n_heads; h++, q += dim, out += dim) {
            const size_t at = (size_t)(h / group) * dim;
            double p[512], high = -1e300, sum = 0;
            for (j = 0; j <= a->n + i; j++) {
                p[j] = 0;
                for (d = 0; d < dim; d++) p[j] += (double)q[d] * (double)keys[(size_t)j * width + at + d];
                p[j] /= sqrt((double)dim);
                if (p[j] > high) high = p[j];
            }
            for (j = 0; j <= a->n + i; j++) sum += p[j] = exp(p[j] - high);
            for (d = 0; d < dim; d++) {
                double o = 0;
                for (j = 0; j <= a->n + i; j++) o += p[j] * (double)values[(size_t)j * width + at + d];
                out[d] = (float)(o / sum);
            }
        }
    }
    return TKV_OK;
}

/* Generates n tokens with the cache and with plain arrays. After the prompt, each is fed the token that it chose. */
static void check_greedy(const llama_model *m, const char *prompt, int n) {
    tkv_config cfg = config_of_one_format(TKV_F32);
    tkv_cache *kv = make_model_cache(m, &cfg);
    const size_t vocab = (size_t)m->vocab,
                 size = (size_t)m->n_layers * (size_t)n * (size_t)(m->n_kv_heads * m->head_dim);
    float *logits = (float *)malloc(2 * vocab * sizeof *logits);
    int tokens[64], count = llama_tokenize(m, prompt, strlen(prompt), LLAMA_BOS, tokens), cache_token,
                    plain_token;
    double largest = 0;
    size_t i;
    plain_cache a;
    a.m = m;
    a.n = 0;
    a.capacity = n;
    a.k = (float *)malloc(size * sizeof *a.k);
    a.v = (float *)malloc(size * sizeof *a.v);
    cache_token = plain_token = tokens[0];
    while (a.n < n && kv) {
        if (a.n < count) cache_token = plain_token = tokens[a.n];
        CHECK_EQ(llama_forward(m, kv, 0, &cache_token, 1, logits, 1), TKV_OK);
        CHECK_EQ(llama_forward_with(m, &plain_token, 1, a.n, attend_plainly, &a, logits + vocab, 1), TKV_OK);
        a.n++;
        for (i = 0; i < vocab; i++) {
            const double d = fabs((double)logits[i] - (double)logits[vocab + i]);
            if (d > largest) largest = d;
        }
        cache_token = llama_argmax(logits, m->vocab);
        plain_token = llama_argmax(logits + vocab, m->vocab);
        CHECK_MSG(cache_token == plain_token, "token %d: %d and %d", a.n, cache_token, plain_token);
    }
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n);
    CHECK_LE(largest, 1e-3);
    printf("\n    %d tokens; logits differ by %.1e at most", n, largest);
    tkv_destroy(kv);
    free(logits);
    free(a.k);
    free(a.v);
}

TEST(greedy_stories260K_bin) {
    llama_model m;
    if (!load_model("models/stories260K.bin", &m)) SKIP("no models/stories260K.bin");
    check_greedy(&m, "Once upon a time", tkv_test_quick() ? 220 : 500);
    llama_free(&m);
}

TEST(greedy_stories260K_gguf) {
    llama_model m;
    if (!load_model("models/stories260K_tok512.gguf", &m)) SKIP("no models/stories260K_tok512.gguf");
    check_greedy(&m, "One day, a dog", 220);
    llama_free(&m);
}

TEST(greedy_stories15M) {
    llama_model m;
    if (tkv_test_quick()) SKIP("quick");
    if (!load_model("models/stories15M.bin", &m)) SKIP("no models/stories15M.bin");
    check_greedy(&m, "Once upon a time", 256);
    llama_free(&m);
}

TEST(greedy_smollm2) {
    llama_model m;
    if (tkv_test_quick()) SKIP("quick");
    if (!load_smollm2(&m)) SKIP("no SmolLM2: make model, or TKV_SMOLLM2=file.gguf");
    check_greedy(&m, "The lighthouse keeper", 100);
    llama_free(&m);
}

/* >>chunks against single tokens */
/* Chunks that end where a block leaves the hot tail attend to the same blocks as single tokens do (design section 7).
 * Other chunks do not, which shows that the check can fail. */
static double measure_chunk_divergence(const llama_model *m, const int *tokens, int n, int shift,
                                       double *largest) {
    tkv_config cfg = tkv_default_config();
    const size_t vocab = (size_t)m->vocab;
    float *one = (float *)malloc(vocab * sizeof *one), *many = (float *)malloc(256 * vocab * sizeof *many);
    tkv_layer_config layers[8];
    tkv_cache *a, *b;
    tkv_layer_info tiers;
    int pos, chunk, j;
    double sum = 0;
    size_t i;
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32; /* rounding to F16 would turn last bits into larger steps */
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4;
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    cfg.tiers.warm_tokens = 128; /* so that the archive gets tokens */
    cfg.host.precise = 1;        /* prefill kernels round in another order than those for one query */
    memset(layers, 0, sizeof layers);
    CHECK_LE(m->n_layers, (int)(sizeof layers / sizeof *layers));
    cfg.model.n_layers = m->n_layers;
    measure_align_layers(&cfg, layers);
    cfg.layers = layers;
    a = make_model_cache(m, &cfg);
    b = make_model_cache(m, &cfg);
    *largest = 0;
    for (pos = 0; pos < n; pos += chunk) {
        chunk = pos || !shift ? measure_chunk(&cfg, pos - shift, n - pos) : measure_chunk(&cfg, 0, n) + shift;
        CHECK_EQ(llama_forward(m, a, 0, tokens + pos, chunk, many, chunk), TKV_OK);
        for (j = 0; j < chunk; j++) {
            const float *row = many + (size_t)j * vocab;
            CHECK_EQ(llama_forward(m, b, 0, tokens + pos + j, 1, one, 1), TKV_OK);
            for (i = 0; i < vocab; i++) {
                const double d = fabs((double)one[i] - (double)row[i]);
                if (d > *largest) *largest = d;
            }
            sum += measure_divergence(one, row, m->vocab);
        }
    }
    CHECK_EQ(tkv_get_layer(b, 0, 0, &tiers), TKV_OK);
    CHECK_EQ(tiers.tokens[TKV_TIER_WARM], 128);
    CHECK_LE(64, tiers.tokens[TKV_TIER_ARCHIVE]);
    tkv_destroy(a);
    tkv_destroy(b);
    free(one);
    free(many);
    return sum / n;
}

TEST(chunks_are_single_tokens) {
    const int n = tkv_test_quick() ? 270 : 500;
    llama_model m;
    size_t size = 0;
    char *text;
    int *tokens, begin[21];
    double kl, largest;
    if (!load_model("models/stories260K.bin", &m) || !tkv_test_data(stories_text))
        SKIP("no model or no text");
    text = load_text(stories_text, &size);
    tokens = (int *)malloc((size + 21) * sizeof *tokens);
    CHECK_LE(n, tokenize_stories(&m, text, size, 20, tokens, begin));
    kl = measure_chunk_divergence(&m, tokens, n, 0, &largest);
    printf("\n    %d tokens; logits differ by %.1e at most, KL %.1e", n, largest, kl);
    CHECK_LE(largest, 0.02);
    CHECK_LE(kl, 1e-7);
    kl = measure_chunk_divergence(&m, tokens, n, 32, &largest);
    printf("\n    cut 32 tokens later: %.1e, KL %.1e", largest, kl);
    CHECK_LE(0.1, largest);
    CHECK_LE(1e-5, kl);
    llama_free(&m);
    free(text);
    free(tokens);
}

/* >>loss of quality by the tiers, when all attention reads the cache */
enum { EXACT, KIVI4, TIERS, SHARED, EXACT_F16, PLANS };
static const char *const plan_names[PLANS] = {"exact, F32", "KIVI-4", "KIVI-4, KIVI-2", "A4/R4, A3/R2",
                                              "exact, F16"};

typedef struct plan_quality {
    double loss, kl;    /* per token */
    double same_choice; /* share of positions with the same likeliest token as the exact cache */
} plan_quality;

/* Measures the first plans side by side, on `windows` windows of n tokens each. */
static void measure_plans(const llama_model *m, const int *tokens, int n, int windows, int warm, int plans,
                          plan_quality *out) {
    tkv_config cfg[PLANS];
    tkv_cache *kv[PLANS];
    float *logits[PLANS];
    const size_t vocab = (size_t)m->vocab;
    const double count = (double)n * windows;
    tkv_layer_info tiers;
    int p, w, pos, chunk, j;
    cfg[EXACT] = config_of_one_format(TKV_F32);
    cfg[EXACT_F16] = config_of_one_format(TKV_F16);
    cfg[KIVI4] = cfg[TIERS] = cfg[SHARED] = tkv_default_config();
    cfg[KIVI4].tiers.warm.k = cfg[KIVI4].tiers.warm.v = TKV_KIVI4;
    cfg[TIERS].tiers.warm = cfg[KIVI4].tiers.archive = cfg[KIVI4].tiers.warm;
    cfg[TIERS].tiers.archive.k = cfg[TIERS].tiers.archive.v = TKV_KIVI2;
    cfg[SHARED].tiers.warm.k = TKV_A40;
    cfg[SHARED].tiers.warm.v = TKV_R40;
    cfg[SHARED].tiers.archive.k = TKV_A30;
    cfg[SHARED].tiers.archive.v = TKV_R20;
    for (p = 0; p < plans; p++) {
        cfg[p].tiers.warm_tokens = warm;
        kv[p] = make_model_cache(m, &cfg[p]);
        logits[p] = (float *)malloc(128 * vocab * sizeof **logits);
        memset(&out[p], 0, sizeof out[p]);
    }
    for (pos = 0; pos < n && SHARED < plans; pos += chunk) { /* learns its tables first */
        chunk = measure_chunk(&cfg[EXACT], pos, n - pos);
        CHECK_EQ(llama_forward(m, kv[SHARED], 0, tokens + pos, chunk, logits[SHARED], chunk), TKV_OK);
    }
    if (SHARED < plans) CHECK_EQ(tkv_freeze_calibration(kv[SHARED]), TKV_OK);
    for (w = 0; w < windows; w++, tokens += n) {
        for (p = 0; p < plans; p++) CHECK_EQ(tkv_seq_reset(kv[p], 0), TKV_OK);
        for (pos = 0; pos < n; pos += chunk) {
            chunk = measure_chunk(&cfg[EXACT], pos, n - pos);
            for (p = 0; p < plans; p++) {
                CHECK_EQ(llama_forward(m, kv[p], 0, tokens + pos, chunk, logits[p], chunk), TKV_OK);
                for (j = 0; j < chunk; j++) {
                    const float *row = logits[p] + (size_t)j * vocab,
                                *exact = logits[EXACT] + (size_t)j * vocab;
                    if (pos + j + 1 < n) out[p].loss += measure_loss(row, m->vocab, tokens[pos + j + 1]);
                    if (p != EXACT) out[p].kl += measure_divergence(exact, row, m->vocab) / count;
                    out[p].same_choice +=
                        (llama_argmax(exact, m->vocab) == llama_argmax(row, m->vocab)) / count;
                }
            }
        }
        for (p = TIERS; p <= SHARED && p < plans; p++) {
            CHECK_EQ(tkv_get_layer(kv[p], 0, m->n_layers - 1, &tiers), TKV_OK);
            CHECK_EQ(tiers.tokens[TKV_TIER_WARM], warm);
            CHECK_LE(64, tiers.tokens[TKV_TIER_ARCHIVE]);
        }
    }
    printf("\n    %d windows of %d tokens, %d warm      perplexity  KL        same choice", windows, n, warm);
    for (p = 0; p < plans; p++) {
        out[p].loss /= count - windows;
        printf("\n      %-14s %33.4f  %.6f  %5.1f %%", plan_names[p], exp(out[p].loss), out[p].kl,
               100 * out[p].same_choice);
        tkv_destroy(kv[p]);
        free(logits[p]);
    }
    CHECK_LE(1e-5, out[KIVI4].kl); /* something was compressed */
    CHECK_LE(1.5 * out[KIVI4].kl, out[TIERS].kl);
    if (SHARED < plans) CHECK_LE(1.5 * out[SHARED].kl, out[TIERS].kl);
}

TEST(quality_stories15M) {
    llama_model m;
    plan_quality q[PLANS];
    size_t size = 0;
    char *text;
    int *tokens, begin[101];
    if (tkv_test_quick()) SKIP("quick");
    if (!load_model("models/stories15M.bin", &m) || !tkv_test_data(stories_text)) SKIP("no model or no text");
    m.rope_theta = 40000.0f;
    text = load_text(stories_text, &size);
    tokens = (int *)malloc((size + 101) * sizeof *tokens);
    CHECK_LE(2 * 512, tokenize_stories(&m, text, size, 100, tokens, begin));
    measure_plans(&m, tokens, 512, 2, 128, PLANS, q);
    /* These stories depend little on early tokens: without the archive's tokens the KL would be 0.00126. */
    CHECK_LE(q[KIVI4].kl, 0.0005);
    CHECK_LE(q[TIERS].kl, 0.001);
    CHECK_NEAR(q[KIVI4].loss, q[EXACT].loss, 0.01);
    CHECK_NEAR(q[TIERS].loss, q[EXACT].loss, 0.02);
    CHECK_LE(q[EXACT_F16].kl, 1e-5);
    CHECK_NEAR(q[EXACT_F16].loss, q[EXACT].loss, 1e-3);
    llama_free(&m);
    free(text);
    free(tokens);
}

TEST(quality_smollm2) {
    llama_model m;
    plan_quality q[PLANS];
    size_t size = 0;
    char *text;
    int *tokens;
    if (tkv_test_quick()) SKIP("quick");
    if (!load_smollm2(&m)) SKIP("no SmolLM2: make model, or TKV_SMOLLM2=file.gguf");
    text = load_text(wiki_text, &size);
    if (!text) SKIP("no text/wiki.test.raw");
    tokens = (int *)malloc(20000 * sizeof *tokens);
    CHECK_LE(580, llama_tokenize(&m, text, 19000, 0, tokens));
    measure_plans(&m, tokens, 580, 1, 192, EXACT_F16, q);
    CHECK_LE(q[KIVI4].kl, 0.005);
    CHECK_LE(q[TIERS].kl, 0.1); /* without the archive's tokens 0.56 */
    CHECK_NEAR(q[KIVI4].loss, q[EXACT].loss, 0.03);
    CHECK_NEAR(q[TIERS].loss, q[EXACT].loss, 0.15);
    llama_free(&m);
    free(text);
    free(tokens);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(tokens_stories);
    RUN(tokens_smollm2);
    RUN(loss_stories260K);
    RUN(loss_stories15M);
    RUN(greedy_stories260K_bin);
    RUN(greedy_stories260K_gguf);
    RUN(greedy_stories15M);
    RUN(greedy_smollm2);
    RUN(chunks_are_single_tokens);
    RUN(quality_stories15M);
    RUN(quality_smollm2);
    return tkv_test_end();
}
