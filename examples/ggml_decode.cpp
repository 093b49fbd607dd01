/*
 * ggml_decode.cpp - a Llama model in ggml whose keys and values are in tieredkv (ggml_tkv.h). It goes on with several
 * prompts in one batch, or gives the loss of a text.
 *
 * cc -O2 -c examples/tieredkv.c &&
 * c++ -std=c++11 -O2 -o ggml_decode examples/ggml_decode.cpp tieredkv.o -lggml -lggml-base -lm && ./ggml_decode MODEL
 *
 * ggml reads the weights of a GGUF file and computes everything but attention, on the processor. Of our own runner
 * (llama.h) the program takes the tokenizer and the sizes. With --check that runner computes each step again, with a
 * cache of its own, and the program prints how far the logits differ. With weights in 4 or 8 bits ggml rounds the
 * vectors that they are multiplied with, and the runner does not. So --check --f32 --plan all:f32 is the strict one.
 *
 * It needs ggml's libraries (-L) and headers (-I); those of llama.cpp v0.5.0 and of ggml 0.20.2 were tried.
 * `./ggml_decode --help` lists the options. In this order: engine, graph, steps, text, main.
 */
#include "ggml_tkv.h"
#include "llama.h"
#include "plan.h"

#include <chrono>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <gguf.h>
#include <string>
#include <vector>

static const char usage[] =
    "ggml_decode MODEL [options]\n"
    "MODEL is a .gguf file of a Llama.\n"
    "\n"
    "  -p TEXT         prompt; several are one batch (Once upon a time)\n"
    "  -n N            tokens to generate for each prompt (64)\n"
    "  --text FILE     gives the loss of a text instead\n"
    "  --tokens N      of its first N tokens (1024)\n"
    "  --threads N     threads of ggml (2); more than are free make it slow\n"
    "  --f32           decodes the weights to F32\n"
    "  --check         compares the logits with those of our own runner\n"
    "  --backends DIR  folder of ggml's libraries for processors, if ggml does not find them\n"
    "  --plan PLAN     plan of the cache, as 'preset=compact sinks=8' or all:f32. Words:\n";

enum { MOST_STEP = 512 }; /* tokens */

struct batch { /* of a step */
    std::vector<int> tokens, seqs, positions;
    std::vector<int> wanted; /* rows whose logits are asked for */
};

struct engine {
    llama_model m; /* sizes and tokenizer; the weights in it serve --check alone */
    tkv_config cfg;
    tkv_cache *kv, *check; /* check: of our own runner; NULL: without --check */
    tkv_ggml ops;
    ggml_backend_t backend;
    ggml_context *weights, *ctx;
    ggml_gallocr_t memory;
    ggml_cgraph *graph;
    ggml_tensor *tokens, *positions, *wanted, *logits; /* of the graph */
    double worst, divergence; /* --check: largest difference of a logit; sum over positions, in nats */
    int n_checked;
};

static void fail(const std::string &why) {
    fprintf(stderr, "ggml_decode: %s\n", why.c_str());
    exit(1);
}

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/* >>engine */
static tkv_cache *create(const tkv_config &cfg) {
    tkv_cache *kv = NULL;
    char reason[200];
    if (tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason)) fail(reason);
    return kv;
}

static void print_error(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static void start_backend(engine &e, const char *folder, int threads) {
    ggml_log_set(print_error, NULL);
    if (folder) ggml_backend_load_all_from_path(folder);
    else ggml_backend_load_all();
    e.backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
    if (!e.backend) fail("ggml finds no library for this processor (--backends)");
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(e.backend));
    void *set = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    reinterpret_cast<ggml_backend_set_n_threads_t>(set)(e.backend, threads);
    e.memory = ggml_gallocr_new(ggml_backend_get_default_buffer_type(e.backend));
}

static void load(engine &e, const char *path) {
    char err[256];
    if (!llama_load(path, NULL, &e.m, err, sizeof err)) fail(std::string(path) + ": " + err);
    const gguf_init_params params = {false, &e.weights};
    gguf_context *file = gguf_init_from_file(path, params);
    if (!file) fail(std::string(path) + ": ggml cannot load it");
    gguf_free(file);
    llama_kv_config(&e.m, &e.cfg);
    if (plan_too_far(&e.cfg)) fail(plan_too_far(&e.cfg));
}

/* Decodes all weights to F32, so that ggml rounds no vector that they are multiplied with. */
static void decode_weights(engine &e) {
    size_t size = 0;
    for (ggml_tensor *t = ggml_get_first_tensor(e.weights); t; t = ggml_get_next_tensor(e.weights, t))
        size += ggml_tensor_overhead() + 64 + (size_t)ggml_nelements(t) * sizeof(float);
    const ggml_init_params params = {size, NULL, false};
    ggml_context *ctx = ggml_init(params);
    for (ggml_tensor *t = ggml_get_first_tensor(e.weights); t; t = ggml_get_next_tensor(e.weights, t)) {
        const ggml_to_float_t to_float = ggml_get_type_traits(t->type)->to_float;
        if (t->type != GGML_TYPE_F32 && !to_float) continue; /* the bytes of the file are a tensor, too */
        ggml_tensor *f = ggml_set_name(ggml_new_tensor(ctx, GGML_TYPE_F32, GGML_MAX_DIMS, t->ne), t->name);
        if (t->type == GGML_TYPE_F32) memcpy(f->data, t->data, ggml_nbytes(t));
        else to_float(t->data, (float *)f->data, ggml_nelements(t));
    }
    ggml_free(e.weights);
    e.weights = ctx;
}

/* >>graph */
static ggml_tensor *weight(const engine &e, int layer, const char *name) {
    char full[64];
    if (layer < 0) snprintf(full, sizeof full, "%s.weight", name);
    else snprintf(full, sizeof full, "blk.%d.%s.weight", layer, name);
    return ggml_get_tensor(e.weights, full);
}

static ggml_tensor *norm(const engine &e, ggml_tensor *x, ggml_tensor *w) {
    return ggml_mul(e.ctx, ggml_rms_norm(e.ctx, x, e.m.eps), w);
}

/* Returns w x, after RoPE: [dim, heads, n]. */
static ggml_tensor *heads(const engine &e, ggml_tensor *w, ggml_tensor *x, int dim, int n_heads,
                          int rotates) {
    ggml_tensor *t = ggml_reshape_3d(e.ctx, ggml_mul_mat(e.ctx, w, x), dim, n_heads, x->ne[1]);
    if (!rotates) return t;
    return ggml_rope_ext(e.ctx, t, e.positions, weight(e, -1, "rope_freqs"), e.m.rope_dim,
                         GGML_ROPE_TYPE_NORMAL, 0, e.m.rope_theta, 1, 0, 1, 0, 0);
}

static ggml_tensor *layer_of(engine &e, ggml_tensor *x, int i) {
    const llama_model &m = e.m;
    ggml_tensor *h = norm(e, x, weight(e, i, "attn_norm"));
    ggml_tensor *q = heads(e, weight(e, i, "attn_q"), h, m.head_dim, m.n_heads, 1);
    ggml_tensor *k = heads(e, weight(e, i, "attn_k"), h, m.head_dim, m.n_kv_heads, 1);
    ggml_tensor *v = heads(e, weight(e, i, "attn_v"), h, m.v_head_dim, m.n_kv_heads, 0);
    ggml_tensor *added = tkv_ggml_append(e.ctx, &e.ops, i, k, v);
    ggml_tensor *out = tkv_ggml_attend(e.ctx, &e.ops, i, q, added, NULL, NULL);
    out = ggml_reshape_2d(e.ctx, out, m.n_heads * m.v_head_dim, x->ne[1]);
    x = ggml_add(e.ctx, x, ggml_mul_mat(e.ctx, weight(e, i, "attn_output"), out));
    h = norm(e, x, weight(e, i, "ffn_norm"));
    h = ggml_swiglu_split(e.ctx, ggml_mul_mat(e.ctx, weight(e, i, "ffn_gate"), h),
                          ggml_mul_mat(e.ctx, weight(e, i, "ffn_up"), h));
    return ggml_add(e.ctx, x, ggml_mul_mat(e.ctx, weight(e, i, "ffn_down"), h));
}

static ggml_tensor *input(const engine &e, int n) {
    ggml_tensor *t = ggml_new_tensor_1d(e.ctx, GGML_TYPE_I32, n);
    ggml_set_input(t);
    return t;
}

/* Builds the graph of n tokens, n_wanted of which give logits. A graph of this shape is used again. */
static void build(engine &e, int n, int n_wanted) {
    if (e.ctx && e.tokens->ne[0] == n && e.wanted->ne[0] == n_wanted) return;
    const size_t n_nodes = 64 + 32 * (size_t)e.m.n_layers;
    const ggml_init_params params = {
        n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false), NULL, true};
    ggml_free(e.ctx);
    e.ctx = ggml_init(params);
    e.graph = ggml_new_graph_custom(e.ctx, n_nodes, false);
    e.tokens = input(e, n);
    e.positions = input(e, n);
    e.wanted = input(e, n_wanted);
    ggml_tensor *x = ggml_get_rows(e.ctx, weight(e, -1, "token_embd"), e.tokens);
    for (int i = 0; i < e.m.n_layers; i++) x = layer_of(e, x, i);
    x = norm(e, ggml_get_rows(e.ctx, x, e.wanted), weight(e, -1, "output_norm"));
    ggml_tensor *head = weight(e, -1, "output");
    e.logits = ggml_mul_mat(e.ctx, head ? head : weight(e, -1, "token_embd"), x);
    ggml_set_output(e.logits);
    ggml_build_forward_expand(e.graph, e.logits);
    if (!ggml_gallocr_alloc_graph(e.memory, e.graph)) fail("no memory for the graph");
}

/* >>steps */
/* Computes the step again by our own runner, sequence by sequence, and compares the logits. */
static void check(engine &e, const batch &b, const float *logits) {
    const int n = (int)b.tokens.size(), vocab = e.m.vocab;
    size_t next = 0; /* of b.wanted */
    for (int first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && b.seqs[(size_t)end] == b.seqs[(size_t)first];) end++;
        const int start = next < b.wanted.size() && b.wanted[next] < end ? b.wanted[next] : end;
        std::vector<float> own((size_t)(end - start) * (size_t)vocab + 1);
        const tkv_status status =
            llama_forward(&e.m, e.check, b.seqs[(size_t)first], &b.tokens[(size_t)first], end - first,
                          own.data(), end - start);
        if (status) fail(std::string("our own runner: ") + tkv_get_status_text(status));
        for (; next < b.wanted.size() && b.wanted[next] < end; next++, logits += vocab, e.n_checked++) {
            const float *want = &own[(size_t)(b.wanted[next] - start) * (size_t)vocab];
            for (int i = 0; i < vocab; i++)
                e.worst = fmax(e.worst, fabs((double)logits[i] - (double)want[i]));
            e.divergence += measure_divergence(want, logits, vocab);
        }
    }
}

/* Computes a step. Returns the logits of the wanted rows. */
static std::vector<float> compute(engine &e, const batch &b) {
    const size_t n = b.tokens.size(), n_wanted = b.wanted.size();
    std::vector<float> logits(n_wanted * (size_t)e.m.vocab);
    build(e, (int)n, (int)n_wanted);
    ggml_backend_tensor_set(e.tokens, b.tokens.data(), 0, n * sizeof(int));
    ggml_backend_tensor_set(e.positions, b.positions.data(), 0, n * sizeof(int));
    ggml_backend_tensor_set(e.wanted, b.wanted.data(), 0, n_wanted * sizeof(int));
    if (tkv_ggml_begin(&e.ops, (int)n, b.seqs.data(), b.positions.data())) fail(e.ops.why);
    const ggml_status status = ggml_backend_graph_compute(e.backend, e.graph);
    if (tkv_ggml_end(&e.ops, status == GGML_STATUS_SUCCESS)) fail(e.ops.why);
    if (status != GGML_STATUS_SUCCESS) fail(ggml_status_to_string(status));
    ggml_backend_tensor_get(e.logits, logits.data(), 0, logits.size() * sizeof(float));
    if (e.check) check(e, b, logits.data());
    return logits;
}

static void add_token(batch &b, int token, int seq, int position, bool wanted) {
    if (wanted) b.wanted.push_back((int)b.tokens.size());
    b.tokens.push_back(token);
    b.seqs.push_back(seq);
    b.positions.push_back(position);
}

static std::vector<int> tokenize(const engine &e, const char *text, size_t size) {
    std::vector<int> tokens(size + 64);
    int n = llama_tokenize(&e.m, text, size, e.m.add_bos ? LLAMA_BOS : 0, tokens.data());
    if (n == 0 && e.m.bos >= 0) tokens[(size_t)n++] = e.m.bos;
    if (n == 0) fail("a text is empty");
    tokens.resize((size_t)n);
    return tokens;
}

/* >>text */
/* Reads the prompts, then generates n tokens of each, all in one batch. The likeliest token is taken. */
static void generate(engine &e, const std::vector<std::string> &prompts, int n) {
    std::vector<int> lengths, next(prompts.size());
    std::vector<std::string> texts(prompts);
    int n_read = 0, n_generated = 0;
    double start = seconds();
    for (int s = 0; s < (int)prompts.size(); s++) {
        const std::vector<int> tokens = tokenize(e, texts[(size_t)s].data(), texts[(size_t)s].size());
        for (int at = 0, length = (int)tokens.size(); at < length;) {
            const int end = length - at > MOST_STEP ? at + MOST_STEP : length;
            batch b;
            for (; at < end; at++) add_token(b, tokens[(size_t)at], s, at, at + 1 == end);
            next[(size_t)s] = llama_argmax(compute(e, b).data(), e.m.vocab);
        }
        lengths.push_back((int)tokens.size());
        n_read += lengths.back();
    }
    const double reading = seconds() - start;
    start = seconds();
    for (int i = 0; i < n; i++) {
        batch b;
        for (size_t s = 0; s < texts.size(); s++) {
            if (next[s] == e.m.eos) continue; /* this sequence has left the batch */
            texts[s].append(e.m.entries[next[s]].text, (size_t)e.m.entries[next[s]].len);
            add_token(b, next[s], (int)s, lengths[s]++, true);
        }
        if (b.tokens.empty()) break;
        const std::vector<float> logits = compute(e, b);
        for (size_t j = 0; j < b.seqs.size(); j++)
            next[(size_t)b.seqs[j]] = llama_argmax(&logits[j * (size_t)e.m.vocab], e.m.vocab);
        n_generated += (int)b.tokens.size();
    }
    for (const std::string &text : texts) printf("%s\n\n", text.c_str());
    printf("read %d tokens at %.1f a second, generated %d at %.1f\n", n_read, n_read / reading, n_generated,
           n_generated / (seconds() - start));
}

/* Gives the loss of the first n tokens of a text. Its chunks are such that each token sees what it would see in
 * decoding token by token. */
static void read_text(engine &e, const char *path, int n) {
    size_t size;
    char *text = (char *)llama_read_file(path, &size);
    if (!text || size > 1 << 28) fail(std::string("cannot read ") + path);
    std::vector<int> tokens = tokenize(e, text, size);
    free(text);
    if (n + 1 > (int)tokens.size()) n = (int)tokens.size() - 1;
    if (n < 1) fail("the text has one token");
    double loss = 0;
    const double start = seconds();
    for (int at = 0; at < n;) {
        batch b;
        const int first = at, end = at + measure_chunk(&e.cfg, at, n - at);
        for (; at < end; at++) add_token(b, tokens[(size_t)at], 0, at, true);
        const std::vector<float> logits = compute(e, b);
        for (int i = first; i < end; i++)
            loss += measure_loss(&logits[(size_t)(i - first) * (size_t)e.m.vocab], e.m.vocab,
                                 tokens[(size_t)i + 1]);
    }
    printf("loss %.4f nats a token over %d tokens, perplexity %.3f, %.1f tokens a second\n", loss / n, n,
           exp(loss / n), n / (seconds() - start));
}

static void report(const engine &e, int n_seqs) {
    tkv_memory_info mem;
    double n_tokens = 0;
    for (int s = 0; s < n_seqs; s++) n_tokens += tkv_get_length(e.kv, s, TKV_ALL_LAYERS);
    if (tkv_get_memory(e.kv, &mem)) fail("no figures");
    printf("cache: %.0f tokens take %.0f bytes, in fp16 %.0f\n", n_tokens, (double)mem.total,
           2 * n_tokens * e.m.n_layers * e.m.n_kv_heads * (e.m.head_dim + e.m.v_head_dim));
    if (e.check)
        printf("our own runner: logits differ by at most %.2e, KL divergence %.2e nats, over %d positions\n",
               e.worst, e.divergence / e.n_checked, e.n_checked);
}

/* >>main */
static void read_number(const std::string &name, const char *value, int *n) {
    if (!plan_count(value, strlen(value), n) || *n < 1)
        fail(name + " " + value + ": it must be a number, at least 1");
}

static void help() {
    printf("%s%s", usage, PLAN_HELP);
    plan_print_names();
    exit(0);
}

int main(int argc, char **argv) {
    const char *path = NULL, *text = NULL, *backends = NULL;
    std::vector<std::string> prompts;
    int n = 64, n_text = 1024, threads = 2, f32 = 0, checks = 0;
    engine e;
    memset(&e, 0, sizeof e);
    for (int i = 1; i < argc; i++) {
        const std::string name = argv[i];
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (name == "--help") help();
        if (name == "--check") checks = 1;
        else if (name == "--f32") f32 = 1;
        else if (name[0] != '-' && !path) path = argv[i];
        else if (!value) fail(name + ": unknown option, or its value is missing (--help)");
        else if (name == "-p") prompts.push_back(value);
        else if (name == "-n") read_number(name, value, &n);
        else if (name == "--text") text = value;
        else if (name == "--tokens") read_number(name, value, &n_text);
        else if (name == "--threads") read_number(name, value, &threads);
        else if (name == "--backends") backends = value;
        else if (name != "--plan") fail(name + ": unknown option (--help)");
        else if (const char *wrong = plan_words(&e.cfg, value)) fail(name + " " + value + ": " + wrong);
        i += name[0] == '-' && name != "--check" && name != "--f32";
    }
    if (!path) fail("a model is needed (--help)");
    if (prompts.empty()) prompts.push_back("Once upon a time");
    const int n_seqs = text ? 1 : (int)prompts.size();
    start_backend(e, backends, threads);
    load(e, path);
    if (f32) decode_weights(e);
    e.cfg.limits.max_seqs = n_seqs;
    e.kv = create(e.cfg);
    if (checks) e.check = create(e.cfg);
    if (tkv_ggml_init(&e.ops, e.kv, n_seqs > MOST_STEP ? n_seqs : MOST_STEP)) fail("out of memory");
    if (text) read_text(e, text, n_text);
    else generate(e, prompts, n);
    report(e, n_seqs);
    tkv_ggml_free(&e.ops);
    tkv_destroy(e.kv);
    tkv_destroy(e.check);
    ggml_free(e.ctx);
    ggml_free(e.weights);
    ggml_gallocr_free(e.memory);
    ggml_backend_free(e.backend);
    plan_free(&e.cfg);
    llama_free(&e.m);
    return 0;
}
