/*
 * prefill.c - measures attention with many queries. One layer, one thread.
 *
 * cc -O2 bench/prefill.c examples/tieredkv.c -o prefill -lm -pthread && ./prefill
 *
 *   --formats f16,a30/r30,tiers   plans (bench_plan in bench.h)
 *   --tokens 4096 --chunk 512     tokens of the prompt and of a chunk, at most 512
 *   --runs 3
 *   --only chunk                  one of the tables: chunk, prompt
 *   --heads 32 --kv-heads 8 --dim 128 --isa avx2 --precise --csv
 *
 * Chunk: one causal tkv_attend of the last 512 queries over 4,096 tokens. All tokens are coded except sinks and the
 * hot tail. (A chunk is exact until the next append, so one more token was appended alone.) Prompt: 4,096 tokens into
 * an empty cache, an append and an attention for each chunk; `append` is the time of the appends. Times are
 * milliseconds of CPU time, least and median of the runs. GFLOP/s count 4 * head_dim operations for each query head
 * and each key that a query sees.
 *
 * Before measuring, bench_check (bench.h) checks many queries on a short cache; it gives `error` and `own`. After
 * measuring, the last two queries of the last chunk are compared with tkv_attend_reference. They may differ by at
 * most twice `error`, or 1e-6.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

enum { MAX_RUNS = 100, CHECKED = 32, CHECKED_LAST = 2 };

typedef struct options {
    int tokens, chunk, runs, csv;
} options;

/* Checks the last queries. out: [chunk][heads][dim] of the chunk that ends with the cache's last token. */
static void check_last(tkv_cache *kv, const tkv_config *cfg, const options *o, const char *plan,
                       const float *q, const float *out, bench_error error) {
    const size_t row = (size_t)cfg->model.n_heads * (size_t)cfg->model.head_dim,
                 skip = (size_t)(o->chunk - CHECKED_LAST) * row;
    float *want = (float *)bench_alloc(CHECKED_LAST * row * sizeof(float));
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = CHECKED_LAST;
    p.q = q + skip;
    p.out = want;
    bench_must(tkv_attend_reference(kv, &p), "tkv_attend_reference");
    double d = bench_distance(out + skip, want, CHECKED_LAST * row);
    free(want);
    if (!(d <= 1e-6 || d <= 2.0 * error.arithmetic)) {
        bench_clear_line();
        bench_fail("%s: wrong results, %.1e from the reference", plan, d);
    }
}

static void print_row(const tkv_config *cfg, const options *o, const char *plan, double *run, double append,
                      double keys, bench_error error) {
    double median = bench_median(run, o->runs);
    bench_clear_line();
    printf(o->csv ? "%s,%d,%d,%.2f,%.2f,%.2f,%.1f,%.2e,%.2e\n"
                  : "%-10s %7d %6d %9.2f %9.2f %9.2f %8.1f %9.1e %9.1e\n",
           plan, o->tokens, o->chunk, run[0] * 1e3, median * 1e3, append * 1e3,
           4.0 * cfg->model.head_dim * cfg->model.n_heads * keys / run[0] * 1e-9, error.arithmetic,
           error.format);
    fflush(stdout);
}

static void measure_chunk(const tkv_config *cfg, const options *o, const char *plan, const float *values,
                          const float *q, float *out, bench_error error) {
    tkv_cache *kv;
    bench_must(tkv_create(cfg, &kv), "tkv_create");
    bench_append(kv, cfg, 0, o->tokens, values);
    double run[MAX_RUNS];
    for (int i = 0; i < o->runs; i++) {
        fprintf(stderr, "\r%-10s chunk, run %d of %d   ", plan, i + 1, o->runs);
        run[i] = bench_seconds(1);
        bench_must(tkv_attend(kv, 0, 0, q, o->chunk, out), "tkv_attend");
        run[i] = bench_seconds(1) - run[i];
    }
    check_last(kv, cfg, o, plan, q, out, error);
    print_row(cfg, o, plan, run, 0.0, (double)o->chunk * (o->tokens - 0.5 * (o->chunk - 1)), error);
    tkv_destroy(kv);
}

static void measure_prompt(const tkv_config *cfg, const options *o, const char *plan, const float *values,
                           const float *q, float *out, bench_error error) {
    double run[MAX_RUNS], append = 0.0, best = 0.0;
    for (int i = 0; i < o->runs; i++) {
        double appends = 0.0, begin = bench_seconds(1);
        tkv_cache *kv;
        bench_must(tkv_create(cfg, &kv), "tkv_create");
        for (int t = 0; t < o->tokens; t += o->chunk) {
            double s = bench_seconds(1);
            fprintf(stderr, "\r%-10s prompt, run %d of %d, %d tokens   ", plan, i + 1, o->runs, t);
            bench_append_at(kv, cfg, 0, t, o->chunk, values);
            appends += bench_seconds(1) - s;
            bench_must(tkv_attend(kv, 0, 0, q, o->chunk, out), "tkv_attend");
        }
        run[i] = bench_seconds(1) - begin;
        if (i == 0 || run[i] < best) {
            best = run[i];
            append = appends;
        }
        if (i == o->runs - 1) check_last(kv, cfg, o, plan, q, out, error);
        tkv_destroy(kv);
    }
    print_row(cfg, o, plan, run, append, 0.5 * o->tokens * (o->tokens + 1.0), error);
}

int main(int argc, char **argv) {
    const char *formats = bench_option(argc, argv, "formats"), *only = bench_option(argc, argv, "only"), *isa;
    char word[32];
    uint64_t seed = 1;
    tkv_config shape;
    isa = bench_config(&shape, argc, argv);
    bench_must(tkv_validate_config(&shape, NULL, 0), "shape");
    options o;
    o.tokens = bench_number(argc, argv, "tokens", 4096);
    o.chunk = bench_number(argc, argv, "chunk", BENCH_CHUNK);
    o.runs = bench_number(argc, argv, "runs", 3);
    o.csv = bench_option(argc, argv, "csv") != NULL;
    if (o.chunk < CHECKED || o.chunk > BENCH_CHUNK || o.tokens < 2 * o.chunk || o.tokens % o.chunk != 0 ||
        o.runs < 1 || o.runs > MAX_RUNS) {
        fprintf(stderr, "--chunk: %d to %d; --tokens: a multiple of it, at least twice; --runs: 1 to %d\n",
                CHECKED, BENCH_CHUNK, MAX_RUNS);
        return 1;
    }
    float *values = bench_values(&shape, &seed);
    float *q = bench_queries(&shape, o.chunk, &seed);
    float *out;
    out =
        (float *)bench_alloc((size_t)(o.chunk * shape.model.n_heads * shape.model.head_dim) * sizeof(float));
    for (int prompt = 0; prompt < 2; prompt++) {
        const char *list = formats  ? formats
                           : prompt ? "f16,tiers"
                                    : "f16,q8,kivi4,kivi2,a40/r40,a30/r30,a25/r20,tiers";
        if (only && strcmp(only, prompt ? "prompt" : "chunk") != 0) continue;
        if (o.csv) printf("format,tokens,chunk,least_ms,median_ms,append_ms,gflop_s,error,own_error\n");
        else
            printf("%s: head_dim %d, %d query and %d KV heads, 1 layer, 1 thread, %s kernels\n"
                   "%-10s %7s %6s %9s %9s %9s %8s %9s %9s\n",
                   prompt ? "a prompt in chunks" : "one chunk of queries", shape.model.head_dim,
                   shape.model.n_heads, shape.model.n_kv_heads, isa, "format", "tokens", "chunk", "ms",
                   "median", "append", "GFLOP/s", "error", "own");
        while (bench_word(&list, word, sizeof word)) {
            tkv_config cfg = shape;
            fprintf(stderr, "\r%-10s check   ", word);
            bench_error error = bench_check(&shape, word, CHECKED, values, q);
            if (!bench_plan(&cfg, word)) return 1;
            if (prompt) measure_prompt(&cfg, &o, word, values, q, out, error);
            else measure_chunk(&cfg, &o, word, values, q, out, error);
        }
        if (!prompt) printf("\n");
    }
    free(values);
    free(q);
    free(out);
    return 0;
}
