/*
 * spill.c - a cache ten times as large as its RAM budget. Older blocks are offloaded to a file, and attention still
 * reads all tokens.
 *
 * cc -O2 examples/spill.c examples/tieredkv.c -o spill -lm && ./spill
 *
 *     ./spill [--tokens N] [--budget BYTES] [--heads N] [--dim N] [--file PATH]
 *
 * Numbers may end in K or M (1024, 1024^2): ./spill --tokens 1M. Keys and values are random numbers. First, a small
 * cache computes attention in RAM, and again after all blocks that can be offloaded are. Both outputs must have the
 * same bits. Then the large cache runs under its budget. A line shows the progress, and a table of bytes and times
 * follows. Without --file the file is temporary and disappears with the program. Copy spill_file.h into your program.
 */
#include "spill_file.h" /* before system headers: it defines _XOPEN_SOURCE */

#include "../tieredkv.h"

#ifdef _WIN32
#include <io.h>
#define isatty _isatty
#else
#include <time.h>
#endif

enum { CHUNK = 256, GROUP = 4, ROUNDS = 8 }; /* tokens per append; query heads per KV head; timed calls */

typedef struct settings {
    long tokens, budget, heads, dim;
    const char *file;
} settings;

static void fail(const char *what, const char *reason) {
    fprintf(stderr, "spill: %s: %s\n", what, reason);
    exit(1);
}

static void check(const char *what, tkv_status status, const tkv_cache *kv) {
    if (status == TKV_OK) return;
    fail(what, kv && *tkv_get_last_error(kv) ? tkv_get_last_error(kv) : tkv_get_status_text(status));
}

static double seconds(void) {
#ifdef _WIN32
    LARGE_INTEGER count, rate;
    (void)QueryPerformanceCounter(&count);
    (void)QueryPerformanceFrequency(&rate);
    return (double)count.QuadPart / (double)rate.QuadPart;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#endif
}

/* >>options */
static long parse_number(const char *name, const char *text, long least, long most) {
    char *end;
    long n = strtol(text, &end, 10), unit = 1;
    if (*end == 'k' || *end == 'K') unit = 1024;
    else if (*end == 'm' || *end == 'M') unit = 1024 * 1024;
    if (unit > 1) end++;
    if (end == text || *end || n < least / unit || n > most / unit || n * unit < least)
        fail(name, "not a number, or out of range");
    return n * unit;
}

static settings parse_options(int argc, char **argv) {
    settings w = {128 * 1024, 0, 2, 64, NULL};
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--help") == 0 || !value) {
            printf("spill [--tokens N] [--budget BYTES] [--heads N] [--dim N] [--file PATH]\n");
            exit(value || strcmp(name, "--help") == 0 ? 0 : 1);
        }
        if (strcmp(name, "--tokens") == 0) w.tokens = parse_number(name, value, 4096, 1L << 28);
        else if (strcmp(name, "--budget") == 0) w.budget = parse_number(name, value, 1, 1L << 30);
        else if (strcmp(name, "--heads") == 0) w.heads = parse_number(name, value, 1, 64);
        else if (strcmp(name, "--dim") == 0) w.dim = parse_number(name, value, 16, 256);
        else if (strcmp(name, "--file") == 0) w.file = value;
        else fail(name, "unknown option; --help lists all options");
    }
    return w;
}

/* >>random keys, values and queries. Every 16th channel is larger than the others, as in real keys. */
static uint64_t state;

static void fill(float *x, int n, int dim) {
    for (int i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = ((float)(state >> 40) / 8388608.0f - 1.0f) * (i % dim % 16 == 0 ? 4.0f : 1.0f);
    }
}

static float *floats(int n) {
    float *x = (float *)malloc((size_t)n * sizeof *x);
    if (!x) fail("memory", "out of memory");
    return x;
}

static tkv_config config_of(const settings *w) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 1;
    cfg.model.n_kv_heads = (int)w->heads;
    cfg.model.n_heads = GROUP * cfg.model.n_kv_heads;
    cfg.model.head_dim = (int)w->dim;
    cfg.limits.max_append = CHUNK;
    return cfg;
}

static void append(tkv_cache *kv, const tkv_config *cfg, float *k, float *v, int n) {
    const int row = cfg->model.n_kv_heads * cfg->model.head_dim;
    fill(k, n * row, cfg->model.head_dim);
    fill(v, n * row, cfg->model.head_dim);
    check("append", tkv_append(kv, 0, 0, k, v, n), kv);
}

/* >>the small cache: attention in RAM, then after offloading */
static void compare(const settings *w, float *k, float *v, float *q, float *a, float *b) {
    tkv_config cfg = config_of(w);
    const int n_out = cfg.model.n_heads * cfg.model.head_dim;
    size_t bytes;
    int done = 0, same = 1;
    check("config", tkv_get_required_bytes(&cfg, NULL, &bytes), NULL);
    spill_file file;
    if (spill_file_open(&file, NULL, bytes)) fail("file", strerror(errno));
    cfg.offload = spill_file_config(&file);
    tkv_cache *kv;
    check("create", tkv_create(&cfg, &kv), NULL);
    state = 1;
    for (int i = 0; i < 4096; i += CHUNK) append(kv, &cfg, k, v, CHUNK);
    fill(q, n_out, cfg.model.head_dim);
    check("attend", tkv_attend(kv, 0, 0, q, 1, a), kv);
    check("offload", tkv_offload(kv, 0, TKV_ALL_LAYERS, 4096, &done), kv);
    check("attend", tkv_attend(kv, 0, 0, q, 1, b), kv);
    for (int i = 0; i < n_out; i++) same &= memcmp(&a[i], &b[i], sizeof *a) == 0;
    printf("4096 tokens, %d of their blocks in the file: output %s\n", done,
           same ? "the same to the bit" : "DIFFERS"); /* .ci/run looks for this text */
    tkv_destroy(kv);
    spill_file_close(&file);
    if (!same) exit(1);
}

/* >>the large cache */
static void print_table(const tkv_cache *kv, const settings *w, const spill_file *file, double took,
                        double best, double worst) {
    tkv_memory_info m;
    check("memory", tkv_get_memory(kv, &m), NULL);
    tkv_layer_info t;
    check("tiers", tkv_get_layer(kv, 0, 0, &t), NULL);
    printf("\n%ld tokens, appended in %.1f s\n", w->tokens, took);
    printf("  as FP16                       %12.0f bytes\n", (double)m.fp16_bytes);
    printf("  in RAM, all memory counted    %12.0f bytes; peak %.0f, budget %.0f\n", (double)m.total,
           (double)m.peak, (double)w->budget);
    printf("    index and tables in RAM     %12.0f bytes\n", (double)(m.index + m.tables));
    printf("  offloaded                     %12.0f bytes, %d of %d blocks; the file takes %.0f\n",
           (double)(m.offloaded.codes + m.offloaded.metadata), t.offloaded,
           t.blocks[0] + t.blocks[1] + t.blocks[2], spill_file_size(file));
    printf("  RAM and file together         %12.1f times the budget\n",
           ((double)(m.offloaded.codes + m.offloaded.metadata) + (double)m.total) / (double)w->budget);
    printf("  attention over all tokens     %12.1f ms best, %.1f worst\n", 1e3 * best, 1e3 * worst);
}

static void run(settings *w, float *k, float *v, float *q, float *out) {
    tkv_config cfg = config_of(w);
    const int on_terminal = isatty(1);
    double took = 0.0, best = 1e9, worst = 0.0;
    tkv_memory_info m;
    if (!w->budget) { /* a tenth of the bytes that the preset "extreme" would take in RAM */
        (void)tkv_apply_preset(&cfg, "extreme");
        check("estimate", tkv_estimate_memory(&cfg, (int)w->tokens, 1, &m), NULL);
        w->budget = (long)(m.total / 10);
        cfg = config_of(w);
    }
    cfg.budget.bytes = (size_t)w->budget;
    size_t bytes;
    check("config", tkv_get_required_bytes(&cfg, NULL, &bytes), NULL);
    spill_file file;
    if (spill_file_open(&file, w->file, bytes)) fail(w->file ? w->file : "file", strerror(errno));
    cfg.offload = spill_file_config(&file);
    tkv_cache *kv;
    check("create (try a larger --budget or more --tokens)", tkv_create(&cfg, &kv), NULL);
    double begun;
    for (long n = 0; n < w->tokens; n += CHUNK) {
        begun = seconds();
        append(kv, &cfg, k, v, CHUNK);
        took += seconds() - begun;
        if (n % (w->tokens / 16 / CHUNK * CHUNK)) continue;
        check("memory", tkv_get_memory(kv, &m), NULL);
        fill(q, cfg.model.n_heads * cfg.model.head_dim, cfg.model.head_dim);
        begun = seconds();
        check("attend", tkv_attend(kv, 0, 0, q, 1, out), kv);
        printf("%s%9ld tokens, %9.0f bytes in RAM, %11.0f offloaded, attention %8.2f ms%s",
               on_terminal ? "\r" : "", n + CHUNK, (double)m.total,
               (double)(m.offloaded.codes + m.offloaded.metadata), 1e3 * (seconds() - begun),
               on_terminal ? "" : "\n");
        fflush(stdout);
    }
    for (int i = 0; i < ROUNDS; i++) {
        fill(q, cfg.model.n_heads * cfg.model.head_dim, cfg.model.head_dim);
        begun = seconds();
        check("attend", tkv_attend(kv, 0, 0, q, 1, out), kv);
        begun = seconds() - begun;
        if (begun < best) best = begun;
        if (begun > worst) worst = begun;
    }
    print_table(kv, w, &file, took, best, worst);
    tkv_destroy(kv);
    spill_file_close(&file);
}

int main(int argc, char **argv) {
    settings w = parse_options(argc, argv);
    const int row = (int)(w.heads * w.dim), out = GROUP * row;
    float *k = floats(CHUNK * row), *v = floats(CHUNK * row), *q = floats(out), *a = floats(out),
          *b = floats(out);
    compare(&w, k, v, q, a, b);
    run(&w, k, v, q, a);
    free(k);
    free(v);
    free(q);
    free(a);
    free(b);
    return 0;
}
