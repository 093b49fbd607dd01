/*
 * save.c - measures saved sequences (tkv_seq_save, tkv_seq_load): their bytes, and the speed of both against memcpy of
 * the same bytes, and against reading the prompt again. One thread.
 *
 * cc -O2 bench/save.c examples/tieredkv.c -o save -lm -pthread && ./save model.gguf text.txt
 * With -O3 -march=native the model is faster, and the library is not: it chooses its kernels itself.
 *
 *   --tokens 2048,4096      lengths
 *   --plans f16,quality,balanced,compact,extreme     names of bench_plan in bench.h
 *   --runs 9                saves and loads; each time is the least of them
 *   --keep                  freed memory stays with the program (glibc's mallopt), so a load gets pages that exist
 *   --seqs 1                more: a whole cache (TKV_ALL_SEQS) with this many forks of the sequence, each with up to 64
 *                           random tokens of its own
 *   --write DIR             keeps the saved bytes in DIR/PLAN-TOKENS.tkvs
 *   --csv
 * Without a model, keys and values are random numbers for a shape: --layers 32 --heads 32 --kv-heads 8 --dim 128.
 *
 *   bytes        of the saved sequence, and by token: blocks, tables, lists, index
 *   of FP16      against K and V of the same tokens in plain FP16
 *   save, load   GB of saved bytes in a second of CPU time. A load goes into an emptied sequence of a second cache
 *   memcpy, new  the same for a copy of these bytes from one buffer to another, and to pages that are new (mmap)
 *   one by one   with --seqs: bytes of all sequences, each saved by itself
 *   read again   seconds for the model to read the prompt into an empty cache of this plan, the only run
 *   load ms      and how many times faster that is
 * Before anything is timed, the loaded sequence must give the same bits of attention in all layers, and take as many
 * bytes when it is saved. (Numbers of its tables may differ.)
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime, MAP_ANONYMOUS */
#endif
#include "../tieredkv.h"

#include "../examples/llama.h"
#include "bench.h"

#include <limits.h>
#include <sys/mman.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

typedef struct source { /* of keys and values */
    llama_model m;
    int *tokens, n; /* NULL: random numbers */
} source;

typedef struct result {
    size_t bytes, fp16_bytes, one_by_one;
    double save, load, copy, copy_new, prompt; /* seconds */
} result;

static void read_source(source *s, const char *model, const char *text) {
    char err[300];
    size_t size;
    if (!llama_load(model, NULL, &s->m, err, sizeof err)) bench_fail("save: %s: %s", model, err);
    char *bytes = (char *)llama_read_file(text, &size);
    if (!bytes) bench_fail("save: cannot read %s", text);
    if (size > 1 << 20) size = 1 << 20;
    s->tokens = (int *)bench_alloc((size + 2) * sizeof *s->tokens);
    s->n = llama_tokenize(&s->m, bytes, size, 0, s->tokens);
    free(bytes);
}

/* Fills sequence 0 with n tokens. Returns the seconds. */
static double fill(const source *s, const tkv_config *cfg, tkv_cache *kv, int n) {
    const double start = bench_seconds(1);
    uint64_t seed = 1;
    if (!s->tokens) {
        float *values = bench_values(cfg, &seed), *q = bench_queries(cfg, 1, &seed);
        float *out = (float *)bench_alloc((size_t)(cfg->model.n_heads * cfg->model.head_dim) * sizeof *out);
        for (int t = 0, k; t < n; t += k) {
            k = measure_chunk(cfg, t, n - t);
            for (int layer = 0; layer < cfg->model.n_layers; layer++) {
                bench_append_at(kv, cfg, layer, t, k, values);
                bench_must(tkv_attend(kv, 0, layer, q, 1, out), "tkv_attend");
            }
        }
        free(values);
        free(q);
        free(out);
        return bench_seconds(1) - start;
    }
    for (int pos = 0, k; pos < n; pos += k) {
        k = measure_chunk(cfg, pos, n - pos);
        bench_must(llama_forward(&s->m, kv, 0, s->tokens + pos, k, NULL, 0), "llama_forward");
        fprintf(stderr, "\r%d of %d tokens ", pos + k, n);
    }
    bench_clear_line();
    return bench_seconds(1) - start;
}

/* Exits unless both sequences 0 attend with the same bits. */
static void check_same(const tkv_config *cfg, tkv_cache *a, tkv_cache *b) {
    const size_t n = (size_t)(cfg->model.n_heads * cfg->model.head_dim);
    float *x = (float *)bench_alloc(n * sizeof *x), *y = (float *)bench_alloc(n * sizeof *y);
    uint64_t seed = 7;
    float *q = bench_queries(cfg, 1, &seed);
    for (int layer = 0; layer < cfg->model.n_layers; layer++) {
        bench_must(tkv_attend(a, 0, layer, q, 1, x), "tkv_attend");
        bench_must(tkv_attend(b, 0, layer, q, 1, y), "tkv_attend");
        if (memcmp(x, y, n * sizeof *x)) bench_fail("save: attention over the loaded sequence differs");
    }
    free(x);
    free(y);
    free(q);
}

static void write_bytes(const char *folder, const char *plan, int n, const void *bytes, size_t size) {
    char name[400];
    const int at = snprintf(name, sizeof name, "%s/", folder);
    snprintf(name + at, sizeof name - (size_t)at, "%s-%d.tkvs", plan, n);
    for (char *c = name + at; *c; c++)
        if (*c == '/') *c = '+'; /* a30/r20 */
    FILE *f = fopen(name, "wb");
    if (!f || fwrite(bytes, 1, size, f) != size || fclose(f)) bench_fail("save: cannot write %s", name);
}

/* Seconds of a copy to pages that are new. */
static double copy_to_new(const void *bytes, size_t size) {
    const double start = bench_seconds(1);
    void *to = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (to == MAP_FAILED) bench_fail("save: no memory");
    memcpy(to, bytes, size);
    if (munmap(to, size)) bench_fail("save: munmap");
    return bench_seconds(1) - start;
}

/* Makes sequences 1 and more forks of sequence 0, with tokens of their own. Returns the bytes of all saves. */
static size_t add_forks(const tkv_config *cfg, tkv_cache *kv) {
    size_t bytes, sum = 0;
    uint64_t seed = 3;
    float *values = bench_values(cfg, &seed);
    const int n = cfg->limits.max_append && cfg->limits.max_append < 64 ? cfg->limits.max_append : 64;
    for (int seq = 1; seq < cfg->limits.max_seqs; seq++) {
        bench_must(tkv_seq_fork(kv, 0, seq, TKV_UNLIMITED), "tkv_seq_fork");
        for (int layer = 0; layer < cfg->model.n_layers; layer++)
            bench_must(tkv_append(kv, seq, layer, values, values, n), "tkv_append");
    }
    for (int seq = 0; seq < cfg->limits.max_seqs; seq++) {
        tkv_save_params save;
        memset(&save, 0, sizeof save);
        save.seq = seq;
        bench_must(tkv_seq_save(kv, &save, NULL, 0, &bytes), "tkv_seq_save");
        sum += bytes;
    }
    free(values);
    return sum;
}

/* Empties what a load fills. A whole cache is loaded into a new one. */
static void empty(const tkv_config *cfg, tkv_cache **kv) {
    if (cfg->limits.max_seqs < 2) {
        bench_must(tkv_seq_reset(*kv, 0), "tkv_seq_reset");
        return;
    }
    tkv_destroy(*kv);
    bench_must(tkv_create(cfg, kv), "tkv_create");
}

static result measure(const source *s, const tkv_config *cfg, int n, int runs, const char *folder,
                      const char *plan) {
    tkv_cache *a, *b;
    tkv_save_params save;
    tkv_load_params load;
    tkv_memory_info memory;
    result r;
    double start;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    bench_must(tkv_create(cfg, &a), "tkv_create");
    bench_must(tkv_create(cfg, &b), "tkv_create");
    r.prompt = fill(s, cfg, a, n);
    r.one_by_one = add_forks(cfg, a);
    if (cfg->limits.max_seqs > 1) save.seq = load.seq = TKV_ALL_SEQS;
    bench_must(tkv_get_memory(a, &memory), "tkv_get_memory");
    r.fp16_bytes = memory.fp16_bytes;
    bench_must(tkv_seq_save(a, &save, NULL, 0, &r.bytes), "tkv_seq_save");
    uint8_t *bytes = (uint8_t *)bench_alloc(r.bytes), *copy = (uint8_t *)bench_alloc(r.bytes);
    bench_must(tkv_seq_save(a, &save, bytes, r.bytes, NULL), "tkv_seq_save");
    bench_must(tkv_seq_load(b, &load, bytes, r.bytes, NULL), "tkv_seq_load");
    check_same(cfg, a, b);
    size_t again = 0;
    bench_must(tkv_seq_save(b, &save, copy, r.bytes, &again), "tkv_seq_save");
    if (again != r.bytes) bench_fail("save: the loaded sequence is saved as other bytes");
    if (folder) write_bytes(folder, plan, n, bytes, r.bytes);
    for (int run = 0; run < runs; run++) {
        start = bench_seconds(1);
        bench_must(tkv_seq_save(a, &save, bytes, r.bytes, NULL), "tkv_seq_save");
        bench_keep_least(&r.save, bench_seconds(1) - start, run);
        empty(cfg, &b);
        start = bench_seconds(1);
        bench_must(tkv_seq_load(b, &load, bytes, r.bytes, NULL), "tkv_seq_load");
        bench_keep_least(&r.load, bench_seconds(1) - start, run);
        start = bench_seconds(1);
        memcpy(copy, bytes, r.bytes);
        bench_keep_least(&r.copy, bench_seconds(1) - start, run);
        bench_keep_least(&r.copy_new, copy_to_new(bytes, r.bytes), run);
    }
    free(bytes);
    free(copy);
    tkv_destroy(a);
    tkv_destroy(b);
    return r;
}

static void print_row(const char *plan, int n, int n_seqs, const result *r, int csv) {
    const double gb = (double)r->bytes * 1e-9;
    printf(csv ? "%s,%d,%.0f,%.1f,%.4f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.0f\n"
               : "%-10s %6d %11.0f %11.1f %8.3f %6.2f %6.2f %7.2f %6.2f %11.2f %8.2f %7.0f\n",
           plan, n, (double)r->bytes, (double)r->bytes / n, (double)r->bytes / (double)r->fp16_bytes,
           gb / r->save, gb / r->load, gb / r->copy, gb / r->copy_new, r->prompt, 1e3 * r->load,
           r->prompt / r->load);
    if (n_seqs > 1 && !csv)
        printf("%10s %d sequences; one by one %.0f bytes\n", "", n_seqs, (double)r->one_by_one);
    fflush(stdout);
}

int main(int argc, char **argv) {
    const char *lengths = bench_option(argc, argv, "tokens"), *plans = bench_option(argc, argv, "plans");
    const char *folder = bench_option(argc, argv, "write");
    const int n_seqs = bench_number(argc, argv, "seqs", 1);
    const int runs = bench_number(argc, argv, "runs", 9), csv = bench_option(argc, argv, "csv") != NULL;
    const int has_model = argc > 2 && strncmp(argv[1], "--", 2) != 0 && strncmp(argv[2], "--", 2) != 0;
    char length[16], plan[32];
    source s;
    tkv_config shape;
    memset(&s, 0, sizeof s);
    const char *isa = bench_config(&shape, argc, argv);
    shape.model.n_layers = bench_number(argc, argv, "layers", 32);
    if (has_model) read_source(&s, argv[1], argv[2]);
#ifdef __GLIBC__
    if (bench_option(argc, argv, "keep")) {
        (void)mallopt(M_TRIM_THRESHOLD, INT_MAX);
        (void)mallopt(M_MMAP_THRESHOLD, INT_MAX);
    }
#endif
    if (has_model) llama_kv_config(&s.m, &shape);
    if (!lengths) lengths = "2048,4096";
    if (!csv)
        printf("%d layers, %d query and %d KV heads of %d channels, %s, %s kernels\n", shape.model.n_layers,
               shape.model.n_heads, shape.model.n_kv_heads, shape.model.head_dim,
               has_model ? "a model's keys and values" : "random numbers", isa);
    printf(csv ? "plan,tokens,bytes,bytes_per_token,of_fp16,save_gb,load_gb,memcpy_gb,memcpy_new_gb,read_"
                 "again_s,load_ms,"
                 "times\n"
               : "%-10s %6s %11s %11s %8s %6s %6s %7s %6s %11s %8s %7s\n",
           "plan", "tokens", "bytes", "by token", "of FP16", "save", "load", "memcpy", "new", "read again",
           "load ms", "times");
    while (bench_word(&lengths, length, sizeof length)) {
        const char *rest = plans ? plans : "f16,quality,balanced,compact,extreme";
        const int n = atoi(length);
        if (n < 1 || (has_model && n > s.n)) bench_fail("save: the text has %d tokens", s.n);
        while (bench_word(&rest, plan, sizeof plan)) {
            tkv_config cfg = shape;
            cfg.limits.max_seqs = n_seqs;
            if (!bench_plan(&cfg, plan)) bench_fail("save: unknown plan \"%s\"", plan);
            const result r = measure(&s, &cfg, n, runs, folder, plan);
            print_row(plan, n, n_seqs, &r, csv);
        }
    }
    if (has_model) llama_free(&s.m);
    free(s.tokens);
    return 0;
}
