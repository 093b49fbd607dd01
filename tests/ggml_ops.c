/*
 * ggml_ops.c - graphs of examples/ggml_tkv.h with random tensors, for tests/test_ggml.py.
 *
 *     ggml_ops CASE FOLDER       FOLDER: of ggml's libraries for processors
 *
 * It ends with 0 if the case holds, and else prints what differs.
 */
#include "../examples/ggml_tkv.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>

enum {
    LAYERS = 2,
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 32,
    ROWS = HEADS + 2 * KV_HEADS,
    TOKEN = ROWS * DIM,
    MOST = 700
};

typedef struct rig { /* a cache, and a graph on it */
    tkv_cache *kv;
    tkv_ggml ops;
    ggml_backend_t backend;
    struct ggml_context *ctx;
    struct ggml_cgraph *graph;
    ggml_gallocr_t memory;
    struct ggml_tensor *in[LAYERS], *out[LAYERS];
    int n; /* tokens of the graph */
} rig;

typedef struct kind { /* of a graph */
    enum ggml_type k_type, v_type;
    int packed;         /* 1: q, k and v are copies; 0: views of one tensor */
    int k_heads, q_dim; /* 0: as they should be */
    int no_v, shares;   /* no_v: V is in K; shares: layer 1 appends nothing */
    const tkv_attend_params *options;
    const float *sinks;
} kind;

static const kind plain = {GGML_TYPE_F32, GGML_TYPE_F32, 0, 0, 0, 0, 0, NULL, NULL};
static int n_failed;

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            printf("line %d: %s\n", __LINE__, #condition);                                                   \
            n_failed++;                                                                                      \
        }                                                                                                    \
    } while (0)

static void must(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "ggml_ops: %s\n", what);
    exit(2);
}

static void print_error(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

/* >>data */
static tkv_config config(void) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    cfg.limits.max_seqs = 3;
    return cfg;
}

/* Returns q, k and v of n tokens: [layer][token][head][channel], from -1 to 1. */
static float *numbers(int n, unsigned seed) {
    const size_t size = (size_t)n * LAYERS * TOKEN;
    float *x = (float *)malloc(size * sizeof *x);
    must(x != NULL, "out of memory");
    for (size_t i = 0; i < size; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    return x;
}

/* >>graphs */
static rig start(const tkv_config *cfg, int threads) {
    rig r;
    memset(&r, 0, sizeof r);
    r.backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
    must(r.backend != NULL, "ggml has no backend for processors");
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(r.backend));
    void *p = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    ggml_backend_set_n_threads_t set;
    memcpy(&set, &p, sizeof set);
    set(r.backend, threads);
    must(tkv_create(cfg, &r.kv) == TKV_OK, "no cache");
    return r;
}

static void forget_graph(rig *r) {
    ggml_gallocr_free(r->memory);
    ggml_free(r->ctx);
    r->memory = NULL;
    r->ctx = NULL;
}

static void end(rig *r) {
    forget_graph(r);
    tkv_ggml_free(&r->ops);
    tkv_destroy(r->kv);
    ggml_backend_free(r->backend);
}

static struct ggml_tensor *part(rig *r, struct ggml_tensor *in, int first, int heads, int dim,
                                enum ggml_type type, int packed) {
    struct ggml_tensor *t =
        ggml_view_3d(r->ctx, in, dim, heads, r->n, in->nb[1], in->nb[2], (size_t)first * in->nb[1]);
    if (type != GGML_TYPE_F32) return ggml_cast(r->ctx, t, type);
    return packed ? ggml_cont(r->ctx, t) : t;
}

static void build(rig *r, int n, const kind *k) {
    const struct ggml_init_params params = {1 << 20, NULL, true};
    struct ggml_tensor *sinks = NULL, *added = NULL;
    if (r->ctx) forget_graph(r);
    if (!r->ops.kv) must(tkv_ggml_init(&r->ops, r->kv, MOST) == TKV_OK, "no operations");
    r->ctx = ggml_init(params);
    r->n = n;
    r->graph = ggml_new_graph(r->ctx);
    if (k->sinks) {
        sinks = ggml_new_tensor_1d(r->ctx, GGML_TYPE_F32, HEADS);
        ggml_set_input(sinks);
    }
    for (int i = 0; i < LAYERS; i++) {
        struct ggml_tensor *in = ggml_new_tensor_3d(r->ctx, GGML_TYPE_F32, DIM, ROWS, n);
        ggml_set_input(in);
        struct ggml_tensor *q = part(r, in, 0, HEADS, k->q_dim ? k->q_dim : DIM, GGML_TYPE_F32, k->packed);
        struct ggml_tensor *key =
            part(r, in, HEADS, k->k_heads ? k->k_heads : KV_HEADS, DIM, k->k_type, k->packed);
        struct ggml_tensor *value =
            k->no_v ? NULL : part(r, in, HEADS + KV_HEADS, KV_HEADS, DIM, k->v_type, k->packed);
        if (i == 0 || !k->shares) added = tkv_ggml_append(r->ctx, &r->ops, i, key, value);
        r->in[i] = in;
        r->out[i] = tkv_ggml_attend(r->ctx, &r->ops, i, q, added, sinks, k->options);
        ggml_set_output(r->out[i]);
        ggml_build_forward_expand(r->graph, r->out[i]);
    }
    r->memory = ggml_gallocr_new(ggml_backend_get_default_buffer_type(r->backend));
    must(ggml_gallocr_alloc_graph(r->memory, r->graph), "no memory for the graph");
    if (sinks) ggml_backend_tensor_set(sinks, k->sinks, 0, HEADS * sizeof(float));
}

/* Computes a step of the graph's tokens: x[first ..] of n. out: [layer][token][head][channel]. */
static tkv_status step(rig *r, const float *x, int n, int first, const int *seqs, const int *positions,
                       float *out) {
    const size_t in_size = (size_t)r->n * TOKEN, out_size = (size_t)r->n * HEADS * DIM;
    if (!tkv_ggml_begin(&r->ops, r->n, seqs, positions)) {
        for (int i = 0; i < LAYERS; i++)
            ggml_backend_tensor_set(r->in[i], x + ((size_t)i * (size_t)n + (size_t)first) * TOKEN, 0,
                                    in_size * sizeof *x);
        must(ggml_backend_graph_compute(r->backend, r->graph) == GGML_STATUS_SUCCESS, "the graph failed");
        for (int i = 0; i < LAYERS; i++)
            ggml_backend_tensor_get(r->out[i], out + (size_t)i * out_size, 0, out_size * sizeof *out);
    }
    return tkv_ggml_end(&r->ops, 1);
}

/* The same step by calls of the library. */
static void step_by_calls(tkv_cache *kv, const tkv_rows *runs, int n_runs, const float *x, int n, int first,
                          const tkv_attend_params *options, int shares, float *out) {
    size_t count = 0;
    for (int i = 0; i < n_runs; i++) {
        count += (size_t)runs[i].n;
        must(tkv_seq_begin(kv, runs[i].seq) == TKV_OK, "begin");
    }
    for (int i = 0; i < LAYERS; i++) {
        const float *in = x + ((size_t)i * (size_t)n + (size_t)first) * TOKEN;
        tkv_append_params a;
        tkv_attend_params p;
        memset(&a, 0, sizeof a);
        memset(&p, 0, sizeof p);
        if (options) p = *options;
        a.batch = p.batch = runs;
        a.n_batch = p.n_batch = n_runs;
        a.layer = p.layer = i;
        a.k = in + HEADS * DIM;
        a.v = in + (HEADS + KV_HEADS) * DIM;
        a.k_token_stride = a.v_token_stride = p.q_row_stride = TOKEN;
        p.q = in;
        p.out = out + (size_t)i * count * HEADS * DIM;
        if (i == 0 || !shares) must(tkv_append_ex(kv, &a) == TKV_OK, "append");
        must(tkv_attend_ex(kv, &p) == TKV_OK, "attend");
    }
    for (int i = 0; i < n_runs; i++) must(tkv_seq_commit(kv, runs[i].seq) == TKV_OK, "commit");
}

static float *outputs(void) { return (float *)calloc((size_t)MOST * LAYERS * HEADS * DIM, sizeof(float)); }

static int same(const float *a, const float *b, int n) { /* n tokens of all layers */
    return memcmp(a, b, (size_t)n * LAYERS * HEADS * DIM * sizeof *a) == 0;
}

static int is_zero(const float *a, int n) {
    for (size_t i = 0; i < (size_t)n * HEADS * DIM; i++)
        if (a[i] != 0) return 0;
    return 1;
}

/* >>cases */
/* Steps of 1 to 512 tokens give the bits of plain calls, with any number of threads, as views or copies. */
static void test_steps(void) {
    static const int sizes[] = {200, 1, 1, 64, 512, 300, 1};
    const tkv_config cfg = config();
    kind kinds[2] = {plain, plain};
    const int n = 1079;
    kinds[1].packed = 1;
    float *x = numbers(n, 1), *out = outputs(), *want = outputs();
    for (int threads = 1; threads <= 2; threads++) {
        rig r = start(&cfg, threads);
        tkv_cache *kv;
        int at = 0;
        must(tkv_create(&cfg, &kv) == TKV_OK, "no cache");
        for (int i = 0; i < 7; i++) {
            build(&r, sizes[i], &kinds[(i + threads) % 2]);
            CHECK(step(&r, x, n, at, NULL, NULL, out) == TKV_OK);
            const tkv_rows run = {0, sizes[i]};
            step_by_calls(kv, &run, 1, x, n, at, NULL, 0, want);
            CHECK(same(out, want, sizes[i]));
            at += sizes[i];
        }
        CHECK(at == n && tkv_get_length(r.kv, 0, TKV_ALL_LAYERS) == n);
        CHECK(tkv_check(r.kv, NULL, 0) == TKV_OK);
        tkv_destroy(kv);
        end(&r);
    }
    free(x);
    free(out);
    free(want);
}

/* Two steps by a graph of two threads on numbers x, and by calls on numbers `rounded`, give the same. */
static void compare_step(const tkv_config *cfg, const kind *k, const float *x, const float *rounded,
                         const tkv_attend_params *options) {
    enum { N = 300 };
    const tkv_rows run = {0, N};
    float *out = outputs(), *want = outputs();
    rig r = start(cfg, 2);
    tkv_cache *kv;
    must(tkv_create(cfg, &kv) == TKV_OK, "no cache");
    build(&r, N, k);
    for (int at = 0; at < 2 * N; at += N) {
        CHECK(step(&r, x, 2 * N, at, NULL, NULL, out) == TKV_OK);
        step_by_calls(kv, &run, 1, rounded, 2 * N, at, options, k->shares, want);
        CHECK(same(out, want, N) && !is_zero(out, N));
    }
    tkv_destroy(kv);
    end(&r);
    free(out);
    free(want);
}

/* Keys and values of other types are those of a caller that rounds them before. */
static void test_types(void) {
    const tkv_config cfg = config();
    const enum ggml_type types[3] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16};
    const size_t size = (size_t)600 * LAYERS * ROWS;
    float *x = numbers(600, 2), *rounded = numbers(600, 2);
    for (int i = 0; i < 9; i++) {
        kind k = plain;
        k.k_type = types[i % 3];
        k.v_type = types[i / 3];
        for (size_t row = 0; row < size; row++) {
            const size_t head = row % ROWS;
            const enum ggml_type type = head < HEADS              ? GGML_TYPE_F32
                                        : head < HEADS + KV_HEADS ? k.k_type
                                                                  : k.v_type;
            float *to = rounded + row * DIM;
            uint16_t bits[DIM];
            memcpy(to, x + row * DIM, DIM * sizeof *to);
            if (type == GGML_TYPE_F32) continue;
            if (type == GGML_TYPE_F16) ggml_fp32_to_fp16_row(to, bits, DIM);
            else ggml_fp32_to_bf16_row(to, (ggml_bf16_t *)bits, DIM);
            ggml_get_type_traits(type)->to_float(bits, to, DIM);
        }
        compare_step(&cfg, &k, x, rounded, NULL);
    }
    free(x);
    free(rounded);
}

/* Scale, soft cap, window, learned sinks, V in K, and a layer that reads the keys of another. */
static void test_options(void) {
    static const float sinks[HEADS] = {0.5f, -1, 2, 0};
    static const float slopes[HEADS] = {0.1f, 0.2f, 0.3f, 0.4f};
    tkv_config cfg = config();
    tkv_layer_config layers[LAYERS];
    tkv_attend_params options;
    float *x = numbers(600, 3);
    kind k = plain;
    memset(&options, 0, sizeof options);
    options.scale = 0.3f;
    options.softcap = 1.5f;
    options.window = 100;
    options.alibi_slopes = slopes;
    k.options = &options;
    compare_step(&cfg, &k, x, x, &options);
    k.sinks = sinks;
    options.sink_logits = sinks;
    compare_step(&cfg, &k, x, x, &options);
    k = plain;
    memset(layers, 0, sizeof layers);
    layers[1].share_kv = 1;
    cfg.layers = layers;
    k.shares = 1;
    compare_step(&cfg, &k, x, x, NULL);
    cfg = config();
    cfg.model.v_in_k = 1;
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_Q8;
    cfg.tiers.archive = cfg.tiers.warm;
    k = plain;
    k.no_v = 1;
    compare_step(&cfg, &k, x, x, NULL);
    free(x);
}

/* Tokens of three sequences in one batch give the bits of a batch by calls, and what each sequence gives alone. */
static void test_sequences(void) {
    static const tkv_rows runs[6] = {{2, 70}, {0, 5}, {1, 140}, {1, 1}, {2, 1}, {0, 1}};
    const tkv_config cfg = config();
    float *x = numbers(218, 4), *out = outputs(), *want = outputs();
    int seqs[216], positions[216], lengths[3] = {0, 0, 0};
    double worst = 0;
    rig r = start(&cfg, 2);
    tkv_cache *kv, *together;
    must(tkv_create(&cfg, &kv) == TKV_OK && tkv_create(&cfg, &together) == TKV_OK, "no cache");
    for (int first = 0, at = 0; first < 6; first += 3) { /* two steps */
        int n = 0;
        for (int i = first; i < first + 3; i++)
            for (int j = 0; j < runs[i].n; j++, n++) {
                seqs[n] = runs[i].seq;
                positions[n] = lengths[runs[i].seq]++;
            }
        build(&r, n, &plain);
        CHECK(step(&r, x, 218, at, seqs, positions, out) == TKV_OK);
        step_by_calls(together, runs + first, 3, x, 218, at, NULL, 0, want);
        CHECK(same(out, want, n));
        for (int i = first, row = 0; i < first + 3; row += runs[i++].n) {
            step_by_calls(kv, runs + i, 1, x, 218, at + row, NULL, 0, want);
            for (int l = 0; l < LAYERS; l++)
                for (int j = 0; j < runs[i].n * HEADS * DIM; j++) {
                    const double d = (double)out[(l * n + row) * HEADS * DIM + j] -
                                     (double)want[l * runs[i].n * HEADS * DIM + j];
                    worst = d > worst ? d : -d > worst ? -d : worst;
                }
        }
        at += n;
    }
    printf("alone, outputs differ by at most %.1e\n", worst);
    CHECK(worst < 1e-5);
    for (int s = 0; s < 3; s++) CHECK(tkv_get_length(r.kv, s, TKV_ALL_LAYERS) == lengths[s]);
    tkv_destroy(kv);
    tkv_destroy(together);
    end(&r);
    free(x);
    free(out);
    free(want);
}

/* Positions that jump are an error, or recorded. */
static void test_positions(void) {
    static const int next[3] = {0, 1, 2}, behind[3] = {3, 4, 5}, too_far[3] = {13, 14, 15},
                     holes[3] = {20, 20, 30};
    const tkv_config cfg = config();
    float *x = numbers(3, 5), *out = outputs();
    int got[6];
    rig r = start(&cfg, 2);
    build(&r, 3, &plain);
    CHECK(step(&r, x, 3, 0, NULL, next, out) == TKV_OK);
    CHECK(step(&r, x, 3, 0, NULL, next, out) == TKV_ERR_RANGE);
    CHECK(strstr(r.ops.why, "layer 0: sequence 0, layer 0 holds 3 tokens, so the next position is 3, not 0"));
    CHECK(step(&r, x, 3, 0, NULL, too_far, out) == TKV_ERR_RANGE &&
          strstr(r.ops.why, "next position is 3, not 13"));
    CHECK(step(&r, x, 3, 0, NULL, holes, out) == TKV_ERR_RANGE);
    CHECK(strcmp(r.ops.why, "token 1: sequence 0 has position 20 behind 20 (see ops.jumps)") == 0);
    CHECK(step(&r, x, 3, 0, NULL, behind, out) == TKV_OK);
    r.ops.jumps = 1;
    CHECK(step(&r, x, 3, 0, NULL, holes, out) == TKV_OK);
    CHECK(tkv_get_positions(r.kv, 0, 1, 3, 6, got) == TKV_OK);
    CHECK(got[0] == 3 && got[2] == 5 && got[3] == 20 && got[4] == 20 && got[5] == 30);
    end(&r);
    free(x);
    free(out);
}

/* Computes a step that must fail with this sentence, and give zeros from a layer on. No token stays, and with a good
 * graph the next step is as if it had not been. */
static void fail_step(const tkv_config *cfg, const kind *k, int layer, tkv_status status, const char *why) {
    const tkv_rows run = {0, 9};
    for (int threads = 1; threads <= 3; threads++) {
        float *x = numbers(20, 6), *out = outputs(), *want = outputs();
        rig r = start(cfg, threads);
        tkv_cache *kv;
        must(tkv_create(cfg, &kv) == TKV_OK, "no cache");
        build(&r, 9, k);
        memset(out, 1, 9 * LAYERS * HEADS * DIM * sizeof *out);
        const tkv_status got = step(&r, x, 20, 0, NULL, NULL, out);
        CHECK(got == status && strcmp(r.ops.why, why) == 0);
        if (got != status || strcmp(r.ops.why, why) != 0) printf("%d: %s\n", (int)got, r.ops.why);
        for (int i = layer; i < LAYERS; i++) CHECK(is_zero(out + i * 9 * HEADS * DIM, 9));
        CHECK(tkv_get_length(r.kv, 0, 0) == 0 && tkv_check(r.kv, NULL, 0) == TKV_OK);
        build(&r, 9, &plain);
        CHECK(step(&r, x, 20, 9, NULL, NULL, out) == TKV_OK && r.ops.why[0] == 0);
        step_by_calls(kv, &run, 1, x, 20, 9, NULL, 0, want);
        CHECK(same(out, want, 9));
        tkv_destroy(kv);
        end(&r);
        free(x);
        free(out);
        free(want);
    }
}

static void test_errors(void) {
    const tkv_config cfg = config();
    tkv_attend_params options;
    kind k = plain;
    k.k_heads = 1;
    fail_step(&cfg, &k, 0, TKV_ERR_ARG, "layer 0: k has the shape [32, 1, 9, 1]; it should be [32, 2, 9]");
    k = plain;
    k.q_dim = 16;
    fail_step(&cfg, &k, 0, TKV_ERR_ARG, "layer 0: q has the shape [16, 4, 9, 1]; it should be [32, 4, 9]");
    k = plain;
    k.v_type = GGML_TYPE_Q8_0;
    fail_step(&cfg, &k, 0, TKV_ERR_ARG, "layer 0: v has type q8_0; it can be f32, f16 or bf16");
    k = plain;
    memset(&options, 0, sizeof options);
    options.softcap = -1;
    k.options = &options; /* an error of all threads */
    fail_step(&cfg, &k, 0, TKV_ERR_ARG, "layer 0: attention: softcap is negative or not finite");
}

/* Batches that cannot be, and graphs that are computed in spite of it. */
static void test_batches(void) {
    static const int mixed[4] = {0, 1, 0, 1}, unknown[4] = {0, 0, 7, 7};
    tkv_config cfg = config();
    float *x = numbers(8, 7), *out = outputs();
    cfg.limits.max_tokens = 6;
    rig r = start(&cfg, 2);
    build(&r, 4, &plain);
    CHECK(step(&r, x, 8, 0, mixed, NULL, out) == TKV_ERR_ARG);
    CHECK(strcmp(r.ops.why, "token 2: sequence 0 has tokens further up; sort the batch") == 0);
    must(ggml_backend_graph_compute(r.backend, r.graph) == GGML_STATUS_SUCCESS, "the graph failed");
    ggml_backend_tensor_get(r.out[1], out, 0, 4 * HEADS * DIM * sizeof *out);
    CHECK(is_zero(out, 4));
    CHECK(step(&r, x, 8, 0, unknown, NULL, out) == TKV_ERR_ARG && r.ops.why[0]);
    CHECK(tkv_ggml_begin(&r.ops, MOST + 1, NULL, NULL) == TKV_ERR_CAPACITY);
    CHECK(strcmp(r.ops.why, "a step has 701 tokens; it can have 1 to 700") == 0);
    CHECK(tkv_ggml_begin(&r.ops, 0, NULL, NULL) == TKV_ERR_CAPACITY);
    CHECK(tkv_ggml_end(&r.ops, 1) == TKV_ERR_CAPACITY);
    CHECK(step(&r, x, 8, 0, NULL, NULL, out) == TKV_OK);
    CHECK(step(&r, x, 8, 4, NULL, NULL, out) == TKV_ERR_CAPACITY); /* in the first layer */
    CHECK(strcmp(r.ops.why, "layer 0: max_tokens leaves room for 2 more tokens") == 0 && is_zero(out, 8));
    CHECK(tkv_ggml_begin(&r.ops, 4, NULL, NULL) == TKV_OK);
    CHECK(tkv_ggml_begin(&r.ops, 4, NULL, NULL) == TKV_ERR_STATE && r.ops.why[0]); /* a step was open */
    CHECK(tkv_seq_abort(r.kv, 0) == TKV_OK);
    CHECK(tkv_ggml_begin(&r.ops, 2, NULL, NULL) == TKV_OK); /* of another length than the graph */
    must(ggml_backend_graph_compute(r.backend, r.graph) == GGML_STATUS_SUCCESS, "the graph failed");
    CHECK(tkv_ggml_end(&r.ops, 1) == TKV_ERR_ARG);
    CHECK(strcmp(r.ops.why, "layer 0: k has the shape [32, 2, 4, 1]; it should be [32, 2, 2]") == 0);
    build(&r, 2, &plain);
    CHECK(tkv_ggml_begin(&r.ops, 2, NULL, NULL) == TKV_OK);
    must(ggml_backend_graph_compute(r.backend, r.graph) == GGML_STATUS_SUCCESS, "the graph failed");
    CHECK(tkv_ggml_end(&r.ops, 0) == TKV_OK &&
          tkv_get_length(r.kv, 0, 0) == 4); /* as after an aborted graph */
    CHECK(step(&r, x, 8, 4, NULL, NULL, out) == TKV_OK && tkv_get_length(r.kv, 0, TKV_ALL_LAYERS) == 6);
    end(&r);
    free(x);
    free(out);
}

/* A budget that fills up, in whatever layer: the step goes, and those before it stay. */
static void test_budget(void) {
    tkv_config cfg = config();
    float *x = numbers(64, 8), *out = outputs();
    int n_steps = 0;
    cfg.budget.bytes = 400000;
    rig r = start(&cfg, 2);
    build(&r, 64, &plain);
    tkv_status status = TKV_OK;
    for (; n_steps < 1000 && !status; n_steps += !status) status = step(&r, x, 64, 0, NULL, NULL, out);
    printf("%d steps, then: %s\n", n_steps, r.ops.why);
    CHECK(n_steps > 5 && status == TKV_ERR_BUDGET && strstr(r.ops.why, "udget"));
    CHECK(tkv_get_length(r.kv, 0, 0) == 64 * n_steps && tkv_get_length(r.kv, 0, 1) == 64 * n_steps);
    CHECK(tkv_check(r.kv, NULL, 0) == TKV_OK);
    CHECK(tkv_seq_truncate(r.kv, 0, 64) == TKV_OK && step(&r, x, 64, 0, NULL, NULL, out) == TKV_OK);
    end(&r);
    free(x);
    free(out);
}

static int write_nowhere(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    (void)user, (void)key, (void)offset, (void)bytes, (void)size;
    return 0;
}

static int read_nothing(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    (void)user, (void)key, (void)offset, (void)bytes, (void)size;
    return 1;
}

/* A store that fails while attention reads it: the last thread to end gets the error. */
static void test_store(void) {
    for (int threads = 1; threads <= 3; threads++) {
        tkv_config cfg = config();
        float *x = numbers(600, 9), *out = outputs();
        int n_blocks = 0;
        cfg.offload.write = write_nowhere;
        cfg.offload.read = read_nothing;
        rig r = start(&cfg, threads);
        build(&r, 250, &plain);
        CHECK(step(&r, x, 600, 0, NULL, NULL, out) == TKV_OK);
        CHECK(step(&r, x, 600, 250, NULL, NULL, out) == TKV_OK);
        CHECK(tkv_offload(r.kv, 0, 1, 100, &n_blocks) == TKV_OK && n_blocks > 1);
        build(&r, 50, &plain);
        for (int i = 0; i < 2; i++) {
            CHECK(step(&r, x, 600, 500, NULL, NULL, out) == TKV_ERR_IO);
            CHECK(strstr(r.ops.why, "layer 1: attention: cfg.offload failed"));
            CHECK(!is_zero(out, 50) && is_zero(out + 50 * HEADS * DIM, 50));
            CHECK(tkv_get_length(r.kv, 0, TKV_ALL_LAYERS) == 500);
        }
        end(&r);
        free(x);
        free(out);
    }
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"steps", test_steps},         {"types", test_types},         {"options", test_options},
                 {"sequences", test_sequences}, {"positions", test_positions}, {"errors", test_errors},
                 {"batches", test_batches},     {"budget", test_budget},       {"store", test_store}};
    must(argc == 3, "ggml_ops CASE FOLDER");
    ggml_log_set(print_error, NULL);
    ggml_backend_load_all_from_path(argv[2]);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strcmp(cases[i].name, argv[1]) == 0) {
            cases[i].run();
            return n_failed != 0;
        }
    must(0, "no such case");
    return 2;
}
