/*
 * llamacpp.c - measures plans on any model that llama.cpp runs, without a patch: perplexity, KL divergence, bytes.
 *
 * cc -O2 examples/llamacpp.c examples/tieredkv.c -o llamacpp -lllama -lggml -lggml-base -lm && ./llamacpp MODEL TEXT
 *
 * llama.cpp calls cb_eval with the attention of each layer, kqv_out-N, before the rest of the layer reads it. From that
 * tensor the program finds queries, keys, values, scale, soft cap, learned sinks and mask. It appends the new keys and
 * values to tieredkv, and writes tieredkv's attention over that of llama.cpp. So a query reads the tiers of a plan, and
 * errors reach later layers and tokens. llama.cpp's own cache has the same keys and values, in F32.
 *
 * The reference is tieredkv with all tokens in F32, in the same engine. In that run the program compares its attention
 * with llama.cpp's own, which rounds keys and values to F16. If they differ by more than 5 %, it ends. So a model that
 * needs something else is refused. The row "llama.cpp, F16" is the noise floor.
 *
 * It needs the libraries of llama.cpp (-L) and the headers of the same version (-I): v0.5.0, or near. It runs on
 * processors. `./llamacpp --help` lists the options. In this order: tensors, attention, runs, table, main.
 */
#include "../tieredkv.h"

#include "measure.h"
#include "plan.h"
#include "read_file.h"

#include <llama.h>
#include <stdarg.h>

static const char usage[] =
    "llamacpp MODEL TEXT [options]\n"
    "MODEL is a .gguf file that llama.cpp runs, TEXT a file.\n"
    "\n"
    "  --window FROM:TOKENS  piece of the text, in tokens (0:2048)\n"
    "  --from N              first position that is scored (512; half of a window below 1,024 tokens)\n"
    "  --plan PLAN           plan to measure; may be repeated (five plans)\n"
    "  --threads N           threads of llama.cpp (4); more than are free make it slow\n"
    "  --backends DIR        folder of ggml's libraries for processors, if ggml does not find them\n"
    "\n"
    "PLAN is a list of words, or hot,warm,archive, as 'preset=compact sinks=8' and 64,448:kivi4,kivi2. "
    "Words:\n";

enum { MOST_LAYERS = 1024, MOST_RUNS = 64 };

typedef struct run { /* a row of the table */
    const char *name;
    enum { LLAMA, EXACT, PLAN } kind;
    enum ggml_type type; /* LLAMA: of the cache; its run in F16 has F32 too, which attention rounds */
    tkv_config cfg;
    double *kl, *loss; /* [scored positions] in nats */
    double bits, bytes, fp16_bytes;
} run;

static const char *const standard_plans[] = {"preset=quality", "preset=balanced", "preset=compact",
                                             "64,448:kivi4,kivi4", "64,448:kivi4,kivi2"};
static run runs[MOST_RUNS] = {{.name = "llama.cpp, F16", .kind = LLAMA, .type = GGML_TYPE_F16},
                              {.name = "tieredkv, all F32", .kind = EXACT},
                              {.name = "llama.cpp, Q8_0", .kind = LLAMA, .type = GGML_TYPE_Q8_0},
                              {.name = "llama.cpp, Q4_0", .kind = LLAMA, .type = GGML_TYPE_Q4_0}};

static struct {
    struct llama_model *model;
    int vocab, threads;
    int *tokens, n, from; /* tokens of the window, and the one behind it; the first scored position */
    int n_layers;         /* with attention */
    tkv_layer_config layers[MOST_LAYERS]; /* their shapes */
    int numbers[MOST_LAYERS];             /* their numbers in llama.cpp */
    const void *keys[MOST_LAYERS];        /* memory of their keys; layers that share them have the same */
    float scale;                          /* of the first layer */
    tkv_cache *kv;
    int pos, chunk; /* the present chunk */
    double worst;   /* difference of the exact attention from llama.cpp's, relative to its length */
} all;

static void fail(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "llamacpp: ");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n");
    va_end(ap);
    exit(1);
}

static void *allocate(size_t n, size_t size) {
    void *p = calloc(n + 1, size);
    if (!p) fail("out of memory");
    return p;
}

static void check(tkv_status status, const run *r) {
    const char *why = all.kv ? tkv_get_last_error(all.kv) : "";
    if (status) fail("%s, token %d: %s", r->name, all.pos, *why ? why : tkv_get_status_text(status));
}

/* >>tensors */
enum { QUERIES, KEYS, VALUES, MASK, SINKS }; /* inputs of an operation of attention */
enum { SCALE, ALIBI, SOFTCAP };              /* its numbers */

static const struct ggml_tensor *root_of(const struct ggml_tensor *t) {
    while (t->view_src) t = t->view_src;
    return t;
}

/* Returns an input, [channel][token][head]; NULL: there is none. */
static const struct ggml_tensor *input_of(const struct ggml_tensor *t, int i) {
    t = t->src[i];
    while (t && t->op == GGML_OP_CPY) t = t->src[0]; /* as it was before it was rounded to F16 */
    if (!t) return NULL;
    if (!ggml_backend_buffer_is_host(root_of(t)->buffer)) fail("%s is not in host memory", t->name);
    if (t->type != (i == MASK ? GGML_TYPE_F16 : GGML_TYPE_F32))
        fail("%s has type %s", t->name, ggml_type_name(t->type));
    if (t->ne[3] != 1) fail("%s has several sequences", t->name);
    return t;
}

static float number_of(const struct ggml_tensor *t, int i) {
    float x;
    memcpy(&x, &t->op_params[i], sizeof x);
    return x;
}

/* Copies n tokens of a tensor, from `first` on, as [token][head][channel]. */
static void copy_rows(const struct ggml_tensor *t, int first, int n, float *to) {
    const size_t dim = (size_t)t->ne[0];
    for (int i = first; i < first + n; i++)
        for (size_t h = 0; h < (size_t)t->ne[2]; h++, to += dim)
            memcpy(to, (const char *)t->data + (size_t)i * t->nb[1] + h * t->nb[2], dim * sizeof *to);
}

/* Returns how many keys query i of the chunk sees. They must be the newest ones. */
static int keys_seen(const struct ggml_tensor *mask, int i) {
    const char *row = mask ? (const char *)mask->data + (size_t)i * mask->nb[1] : NULL;
    int seen = 0, last = -1;
    for (int j = 0; row && j < (int)mask->ne[0]; j++) {
        uint16_t x;
        memcpy(&x, row + (size_t)j * sizeof x, sizeof x);
        if (x == 0xfc00) continue; /* -inf in F16 */
        if (seen && j != last + 1) fail("token %d: the mask has holes", all.pos + i);
        seen++;
        last = j;
    }
    if (last != all.pos + i) fail("token %d: it is not the newest that it sees", all.pos + i);
    return seen;
}

/* Notes the shape of a layer when it is new, and its window when it first hides a key. */
static void note_layer(const struct ggml_tensor *t, int number, int i) {
    const struct ggml_tensor *q = input_of(t, QUERIES), *k = input_of(t, KEYS), *v = input_of(t, VALUES);
    const int seen = keys_seen(input_of(t, MASK), all.chunk - 1);
    tkv_layer_config *l = &all.layers[i];
    if (seen < all.pos + all.chunk) l->window = seen;
    if (i < all.n_layers) return;
    if (i == MOST_LAYERS) fail("more than %d layers", MOST_LAYERS);
    if (number_of(t, ALIBI) != 0) fail("layer %d: ALiBi is not in this program", number);
    if (i == 0) all.scale = number_of(t, SCALE);
    l->n_heads = (int)q->ne[2];
    l->n_kv_heads = (int)k->ne[2];
    l->head_dim = (int)k->ne[0];
    l->v_head_dim = (int)v->ne[0];
    all.numbers[i] = number;
    all.keys[i] = root_of(k)->data;
    for (int j = 0; j < i && !l->share_kv; j++)
        if (all.keys[j] == all.keys[i]) l->share_kv = 1 + j;
    all.n_layers++;
}

/* >>attention */
/* Compares the chunk's attention with llama.cpp's. The mask must be causal, but for the layer's window. */
static void compare(const struct ggml_tensor *t, const struct ggml_tensor *out, const float *mine,
                    int window) {
    const float *theirs = (const float *)out->data;
    double sum = 1e-30, difference = 0;
    for (int i = 0; i < all.chunk; i++) {
        const int newest = all.pos + i + 1, want = window && window < newest ? window : newest;
        if (keys_seen(input_of(t, MASK), i) != want)
            fail("%s: token %d does not see %d", out->name, newest - 1, want);
    }
    for (size_t i = 0; i < (size_t)all.chunk * (size_t)out->ne[0]; i++) {
        const double x = (double)theirs[i], d = (double)mine[i] - x;
        sum += x * x;
        difference += d * d;
    }
    const double relative = sqrt(difference / sum);
    if (!(relative < 0.05))
        fail("%s, tokens %d to %d: exact attention differs from llama.cpp's by %.3f of its length. The "
             "model's "
             "attention has something that this program does not know",
             out->name, all.pos, all.pos + all.chunk - 1, relative);
    if (relative > all.worst) all.worst = relative;
}

/* Appends the chunk's keys and values of a layer, attends, and writes the result over llama.cpp's. */
static void attend(const run *r, struct ggml_tensor *out, const struct ggml_tensor *t, int i) {
    const tkv_layer_config *l = &all.layers[i];
    const struct ggml_tensor *sinks = input_of(t, SINKS);
    const size_t n = (size_t)all.chunk, out_size = n * (size_t)out->ne[0];
    const size_t q_size = n * (size_t)(l->n_heads * l->head_dim);
    const size_t k_size = n * (size_t)(l->n_kv_heads * l->head_dim);
    const size_t v_size = n * (size_t)(l->n_kv_heads * l->v_head_dim);
    float *q = (float *)allocate(q_size + k_size + v_size + out_size, sizeof *q);
    float *k = q + q_size, *v = k + k_size, *o = v + v_size;
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    copy_rows(input_of(t, QUERIES), 0, all.chunk, q);
    copy_rows(input_of(t, KEYS), all.pos, all.chunk, k); /* one sequence: a token's cell is its position */
    copy_rows(input_of(t, VALUES), all.pos, all.chunk, v);
    if (!l->share_kv) check(tkv_append(all.kv, 0, i, k, v, all.chunk), r);
    p.layer = i;
    p.n = all.chunk;
    p.q = q;
    p.out = o;
    p.scale = number_of(t, SCALE);
    p.softcap = number_of(t, SOFTCAP);
    p.sink_logits = sinks ? (const float *)sinks->data : NULL;
    check(tkv_attend_ex(all.kv, &p), r);
    if (r->kind == EXACT) compare(t, out, o, l->window);
    memcpy(out->data, o, out_size * sizeof *o);
    free(q);
}

/* The function that llama.cpp calls before and after a tensor is computed. */
static bool on_tensor(struct ggml_tensor *out, bool ask, void *user) {
    const run *r = (const run *)user;
    const struct ggml_tensor *t = out;
    int i = 0;
    if (ask || strncmp(out->name, "kqv_out-", 8) != 0) return strncmp(out->name, "kqv_out-", 8) == 0;
    const int number = atoi(out->name + 8);
    while (t && t->op == GGML_OP_RESHAPE) t = t->src[0];
    if (!t || t->op != GGML_OP_FLASH_ATTN_EXT)
        fail("%s is not one operation of attention (MLA, for example)", out->name);
    while (i < all.n_layers && all.numbers[i] != number) i++;
    if (r->kind == LLAMA) note_layer(t, number, i);
    else if (i < all.n_layers) attend(r, out, t, i);
    else fail("%s was not there before", out->name);
    return true;
}

/* >>runs */
static struct llama_context *create_context(run *r) { /* NULL: llama.cpp has no such cache for the model */
    struct llama_context_params p = llama_context_default_params();
    if (p.n_seq_max != 1 || p.cb_eval || p.type_k != GGML_TYPE_F16 || p.type_v != GGML_TYPE_F16)
        fail("the headers are of another version than the library");
    p.n_ctx = (uint32_t)all.n;
    p.n_batch = p.n_ubatch = TKV_BLOCK_TOKENS;
    p.n_threads = p.n_threads_batch = all.threads;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.type_k = p.type_v = ggml_is_quantized(r->type) ? r->type : GGML_TYPE_F32;
    p.offload_kqv = p.op_offload = false;
    p.swa_full = true; /* a sliding window in llama.cpp's cache would move the cells */
    if (!ggml_is_quantized(r->type)) p.cb_eval = on_tensor;
    p.cb_eval_user_data = r;
    return llama_init_from_model(all.model, p);
}

/* Creates the cache of a plan, in the shape that note_layer has found. The model's RoPE is unknown here, so KVQuant
 * formats need kvquant=post-rope. */
static void create_cache(const run *r) {
    tkv_config cfg = r->cfg;
    tkv_layer_config *layers = (tkv_layer_config *)allocate((size_t)all.n_layers, sizeof *layers);
    char reason[400];
    cfg.model.n_layers = all.n_layers;
    cfg.model.n_heads = all.layers[0].n_heads;
    cfg.model.n_kv_heads = all.layers[0].n_kv_heads;
    cfg.model.head_dim = all.layers[0].head_dim;
    cfg.model.v_head_dim = all.layers[0].v_head_dim;
    cfg.model.scale = all.scale;
    if (plan_too_far(&cfg)) fail("%s: %s", r->name, plan_too_far(&cfg));
    for (int i = 0; i < all.n_layers; i++) {
        if (cfg.layers) layers[i] = cfg.layers[i];
        layers[i].n_heads = all.layers[i].n_heads;
        layers[i].share_kv = all.layers[i].share_kv;
        if (layers[i].share_kv) continue;
        layers[i].n_kv_heads = all.layers[i].n_kv_heads;
        layers[i].head_dim = all.layers[i].head_dim;
        layers[i].v_head_dim = all.layers[i].v_head_dim;
        layers[i].window = all.layers[i].window;
    }
    if (!cfg.budget.bytes) measure_align_layers(&cfg, layers);
    cfg.layers = layers;
    if (tkv_validate_config(&cfg, reason, sizeof reason)) fail("%s: %s", r->name, reason);
    check(tkv_create(&cfg, &all.kv), r);
    free(layers);
}

static void destroy_cache(void) {
    tkv_destroy(all.kv);
    all.kv = NULL;
}

/* Notes the bytes at the end of a run, and the bits of an old value. */
static void note_bytes(run *r) {
    double values = 0, old_values = 0;
    tkv_layer_info info;
    tkv_memory_info mem;
    for (int i = 0; i < all.n_layers; i++) {
        const tkv_layer_config *l = &all.layers[i];
        const double of_token = l->share_kv ? 0 : l->n_kv_heads * (l->head_dim + l->v_head_dim);
        values += of_token;
        if (!all.kv || l->share_kv) continue;
        check(tkv_get_layer(all.kv, 0, i, &info), r);
        old_values += of_token * info.tokens[TKV_TIER_ARCHIVE];
    }
    r->fp16_bytes = 2 * values * all.n;
    r->bits = r->kind == EXACT ? 32 : 8.0 * (double)ggml_type_size(r->type) / (double)ggml_blck_size(r->type);
    r->bytes = r->bits / 8 * values * all.n;
    if (!all.kv) return;
    check(tkv_get_memory(all.kv, &mem), r);
    const tkv_tier_bytes *old = &mem.tier[TKV_TIER_ARCHIVE];
    r->bytes = (double)mem.total;
    if (r->kind == PLAN) r->bits = old_values > 0 ? 8 * (double)(old->codes + old->metadata) / old_values : 0;
}

/* Evaluates the window. Compares its logits with those in `other`, and writes them to `to`. Returns 0 if llama.cpp
 * cannot. The exact run is the reference: its divergences are those of the logits in `other` from its own. */
static int evaluate(run *r, FILE *other, FILE *to) {
    const size_t vocab = (size_t)all.vocab;
    struct llama_context *ctx = create_context(r);
    if (!ctx) fprintf(stderr, "llamacpp: llama.cpp has no %s for this model\n", r->name);
    if (!ctx) return 0;
    float *row = (float *)allocate(vocab, sizeof *row);
    r->kl = (double *)allocate(2 * (size_t)(all.n - all.from), sizeof *r->kl);
    r->loss = r->kl + (all.n - all.from);
    if (r->kind != LLAMA) create_cache(r);
    if (other) rewind(other);
    for (all.pos = 0; all.pos < all.n; all.pos += all.chunk) {
        const int left = all.n - all.pos;
        int8_t is_scored[TKV_BLOCK_TOKENS];
        all.chunk = measure_chunk(&r->cfg, all.pos, left < TKV_BLOCK_TOKENS ? left : TKV_BLOCK_TOKENS);
        for (int i = 0; i < all.chunk; i++) is_scored[i] = all.pos + i >= all.from;
        struct llama_batch batch = llama_batch_get_one(all.tokens + all.pos, all.chunk);
        batch.logits = is_scored;
        if (all.kv) check(tkv_seq_begin(all.kv, 0), r);
        if (llama_decode(ctx, batch)) fail("%s, token %d: llama.cpp failed", r->name, all.pos);
        if (all.kv) check(tkv_seq_commit(all.kv, 0), r);
        for (int i = 0; i < all.chunk; i++) {
            if (!is_scored[i]) continue;
            const float *mine = llama_get_logits_ith(ctx, i);
            const int at = all.pos + i;
            r->loss[at - all.from] = measure_loss(mine, all.vocab, all.tokens[at + 1]);
            if (to && fwrite(mine, sizeof *mine, vocab, to) != vocab) fail("cannot write the logits");
            if (!other) continue;
            if (fread(row, sizeof *row, vocab, other) != vocab) fail("cannot read the logits");
            r->kl[at - all.from] =
                measure_divergence(r->kind == EXACT ? mine : row, r->kind == EXACT ? row : mine, all.vocab);
        }
    }
    note_bytes(r);
    destroy_cache();
    llama_free(ctx);
    free(row);
    return 1;
}

/* >>table */
static void print_head(int first) {
    const tkv_layer_config *l = &all.layers[0];
    printf("llama.cpp %s, %d layers with attention, %d query and %d KV heads, head_dim %d; ", llama_version(),
           all.n_layers, l->n_heads, l->n_kv_heads, l->head_dim);
    printf("window %d:%d, positions from %d on\n", first, all.n, all.from);
    printf("exact attention differs from llama.cpp's by at most %.4f of its length\n", all.worst);
    printf("%-30s %5s %8s %6s %9s %9s\n", "plan", "bits", "B/token", "ratio", "ppl", "KL");
}

static void print_row(const run *r, const double *kl) {
    measure_mean loss = {0, 0, 0, 0, 0}, divergence = loss;
    char bits[16] = "-";
    if (r->bits > 0) snprintf(bits, sizeof bits, "%.2f", r->bits);
    measure_add(&loss, r->loss, all.n - all.from);
    printf("%-30s %5s %8.0f %6.2f %9.3f", r->name, bits, r->bytes / all.n, r->fp16_bytes / r->bytes,
           exp(loss.total / loss.n));
    if (kl) measure_add(&divergence, kl, all.n - all.from);
    if (kl) printf(" %9.5f +-%8.5f\n", divergence.total / divergence.n, measure_error(&divergence));
    else printf(" %9s\n", "-");
    fflush(stdout);
}

/* >>main */
static void print_error(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static void add_plan(const char *text, int *n_runs) {
    run *r = &runs[*n_runs];
    if (*n_runs == MOST_RUNS) fail("more than %d rows", MOST_RUNS);
    r->name = text;
    r->kind = PLAN;
    const char *wrong = plan_words(&r->cfg, text);
    if (wrong) fail("--plan %s: %s", text, wrong);
    ++*n_runs;
}

/* Reads the window and the token behind it, with a BOS first if the model expects one. */
static void read_tokens(const char *path, int first) {
    const struct llama_vocab *vocab = llama_model_get_vocab(all.model);
    const int bos = llama_vocab_get_add_bos(vocab), wanted = all.n + 1 - bos;
    size_t size;
    char *text = (char *)read_file(path, &size);
    if (!text) fail("cannot read %s", path);
    if (size > 1 << 28) fail("%s has %.0f bytes, and a text has at most 2^28", path, (double)size);
    int *tokens = (int *)allocate(size + 16, sizeof *tokens);
    const int n = llama_tokenize(vocab, text, (int)size, tokens, (int)size + 16, false, false);
    if (n < 0 || first > n - wanted) fail("--window %d:%d: the text has %d tokens", first, all.n, n);
    all.vocab = llama_vocab_n_tokens(vocab);
    all.tokens = (int *)allocate((size_t)all.n + 1, sizeof *all.tokens);
    all.tokens[0] = llama_vocab_bos(vocab);
    memcpy(all.tokens + bos, tokens + first, (size_t)wanted * sizeof *tokens);
    free(tokens);
    free(text);
}

static void load_model(const char *path, const char *backends) {
    struct llama_model_params p = llama_model_default_params();
    p.n_gpu_layers = 0;
    llama_log_set(print_error, NULL);
    if (backends) ggml_backend_load_all_from_path(backends);
    else ggml_backend_load_all();
    if (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU))
        fail("ggml finds no library for this processor (--backends)");
    all.model = llama_model_load_from_file(path, p);
    if (!all.model) fail("llama.cpp cannot load %s", path);
}

int main(int argc, char **argv) {
    const char *paths[2] = {NULL, NULL}, *backends = NULL;
    int n_runs = 4, n_paths = 0, first = 0;
    runs[1].cfg.tiers.hot_tokens = TKV_UNLIMITED;
    runs[1].cfg.tiers.hot.k = runs[1].cfg.tiers.hot.v = TKV_F32;
    all.n = 2048;
    all.from = -1;
    all.threads = 4;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        int ok = 1;
        if (strcmp(name, "--help") == 0)
            return fputs(usage, stdout), fputs(PLAN_HELP, stdout), plan_print_names(), 0;
        if (name[0] != '-' && n_paths < 2) {
            paths[n_paths++] = name;
            continue;
        }
        if (value && strcmp(name, "--window") == 0)
            ok = sscanf(value, "%d:%d", &first, &all.n) == 2 && first >= 0;
        else if (value && strcmp(name, "--from") == 0) ok = plan_count(value, strlen(value), &all.from);
        else if (value && strcmp(name, "--threads") == 0)
            ok = plan_count(value, strlen(value), &all.threads) && all.threads;
        else if (value && strcmp(name, "--backends") == 0) backends = value;
        else if (value && strcmp(name, "--plan") == 0) add_plan(value, &n_runs);
        else fail("%s: unknown option, or its value is missing (--help)", name);
        if (!ok) fail("%s %s: bad value for this option (--help)", name, value);
        i++;
    }
    if (n_paths < 2) fail("a model and a text are needed (--help)");
    if (all.from < 0) all.from = all.n < 1024 ? all.n / 2 : 512;
    if (all.n > 1 << 24 || all.n <= all.from) fail("--window, --from: no position is scored, or too many");
    const int n_given = n_runs;
    for (size_t i = 0; n_given == 4 && i < sizeof standard_plans / sizeof *standard_plans; i++)
        add_plan(standard_plans[i], &n_runs);
    load_model(paths[0], backends);
    read_tokens(paths[1], first);
    FILE *own = tmpfile(), *exact = tmpfile();
    if (!own || !exact) fail("cannot make a file for logits");
    if (!evaluate(&runs[0], NULL, own)) fail("no reference");
    for (int i = 4; i < n_runs; i++) create_cache(&runs[i]), destroy_cache(); /* names a wrong plan at once */
    if (!evaluate(&runs[1], own, exact)) fail("no reference");
    print_head(first);
    print_row(&runs[1], NULL);
    print_row(&runs[0], runs[1].kl);
    for (int i = 2; i < n_runs; i++)
        if (evaluate(&runs[i], exact, NULL)) print_row(&runs[i], runs[i].kl);
    for (int i = 0; i < n_runs; i++) plan_free(&runs[i].cfg), free(runs[i].kl);
    llama_model_free(all.model);
    return 0;
}
