/*
 * append.c - measures decode steps, the share of tkv_append in them, and tkv_read. One layer, one thread.
 *
 * cc -O2 bench/append.c examples/tieredkv.c -o append -lm -pthread && ./append
 *
 *   --formats tiers,extreme,kivi,f16   plans (bench_plan in bench.h)
 *   --tokens 8192                      length of the run, at least 1536
 *   --runs 3
 *   --read a30/r20,kivi4               formats of the second table
 *   --only steps                       one of the tables: steps, read
 *   --heads 32 --kv-heads 8 --dim 128 --isa avx2 --precise --csv
 *
 * Steps: tokens are appended one by one. A step is an append, with all encoding and recoding that is due, and an
 * attention. Every run does the same work, so each token counts with its least time of all runs. Times are CPU time,
 * less the time of the clock itself.
 *   append us    mean, median, 99th percentile and maximum of appends over the whole run; includes making the
 *   tables at
 *                512 and 2,048 tokens
 *   step us      the same figures of the last 1,024 steps
 *   share        appends as a share of these steps
 *   p99/median   99th percentile of these steps over their median
 * A model computes other layers and matrix products between two steps, so processor caches are colder there.
 *
 * Read: tkv_read of 1,024 coded tokens, all heads. `least ms` and `median` are of 25 calls. `error K` and `error
 * V` are relative L2 distances from the appended values. A cache with scalar kernels must return the same bits.
 *
 * bench_check (bench.h) checks the results of a plan before it is measured; it gives `error` and `own`.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

enum { LAST = 1024, READ = 1024, READ_START = 64, READS = 25 };

static void least(double *x, double seconds, int run) {
    bench_keep_least(x, seconds < 0.0 ? 0.0 : seconds, run);
}

static void measure_steps(const tkv_config *shape, const char *plan, int tokens, int runs, int csv,
                          const float *values, const float *q) {
    double *append = (double *)bench_alloc((size_t)tokens * sizeof(double));
    double *step = (double *)bench_alloc(LAST * sizeof(double)), sum = 0.0;
    float *out = (float *)bench_alloc((size_t)(shape->model.n_heads * shape->model.head_dim) * sizeof(float));
    tkv_config cfg = *shape;
    fprintf(stderr, "\r%-10s check   ", plan);
    bench_error error = bench_check(shape, plan, 1, values, q);
    if (!bench_plan(&cfg, plan)) bench_fail("unknown plan \"%s\", or not for this shape", plan);
    for (int run = 0; run < runs; run++) {
        const double tick = bench_clock_cost();
        tkv_cache *kv;
        bench_must(tkv_create(&cfg, &kv), "tkv_create");
        for (int t = 0; t < tokens; t++) {
            const int at = t - (tokens - LAST);
            double t0 = bench_seconds(1), t1;
            bench_append_at(kv, &cfg, 0, t, 1, values);
            t1 = bench_seconds(1);
            least(&append[t], t1 - t0 - tick, run);
            if (t % 512 == 0) fprintf(stderr, "\r%-10s run %d of %d, %d tokens   ", plan, run + 1, runs, t);
            if (at < 0 && t % 8 != 7) continue; /* only these queries feed the tables (learn/statistics.h) */
            t1 = bench_seconds(1);
            bench_must(tkv_attend(kv, 0, 0, q, 1, out), "tkv_attend");
            t1 = bench_seconds(1) - t1;
            if (at >= 0) least(&step[at], t1 - tick, run);
        }
        bench_must(tkv_check(kv, NULL, 0), "tkv_check");
        tkv_destroy(kv);
    }
    bench_spread a = bench_spread_of(append, tokens);
    for (int t = 0; t < LAST; t++) {
        step[t] += append[tokens - LAST + t];
        sum += append[tokens - LAST + t] * 1e6;
    }
    bench_spread s = bench_spread_of(step, LAST);
    bench_clear_line();
    printf(csv ? "%s,%d,%.2f,%.2f,%.2f,%.1f,%.1f,%.1f,%.1f,%.1f,%.3f,%.2f,%.2e,%.2e\n"
               : "%-10s %6d %8.2f %7.2f %7.2f %8.1f %9.1f %8.1f %8.1f %8.1f %6.2f%% %10.2f %9.1e %8.1e\n",
           plan, tokens, a.mean, a.median, a.p99, a.most, s.mean, s.median, s.p99, s.most,
           100.0 * sum / (double)LAST / s.mean, s.p99 / s.median, error.arithmetic, error.format);
    fflush(stdout);
    free(append);
    free(step);
    free(out);
}

/* Reads K and V of READ tokens. *best and *median are of READS calls, in seconds. */
static void read_back(const tkv_config *shape, const char *format, tkv_isa isa, const float *values, float *k,
                      float *v, double *best, double *median) {
    tkv_config cfg = *shape;
    cfg.host.isa = isa;
    if (!bench_plan(&cfg, format)) bench_fail("unknown format \"%s\", or not for this shape", format);
    tkv_cache *kv;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    for (int t = 0; t < READ_START + READ + 192; t++) bench_append_at(kv, &cfg, 0, t, 1, values);
    double run[READS];
    for (int i = 0; i < READS; i++) {
        double s = bench_seconds(1);
        bench_must(tkv_read(kv, 0, 0, READ_START, READ, k, v), "tkv_read");
        run[i] = bench_seconds(1) - s;
    }
    *median = bench_median(run, READS);
    *best = run[0];
    tkv_destroy(kv);
}

static void measure_read(const tkv_config *shape, const char *format, int csv, const float *values) {
    const size_t n = (size_t)READ * (size_t)shape->model.n_kv_heads * (size_t)shape->model.head_dim;
    float *x[6];
    tkv_config exact = *shape;
    for (int i = 0; i < 6; i++) x[i] = (float *)bench_alloc(n * sizeof(float));
    fprintf(stderr, "\r%-20s   ", format);
    double best;
    double median;
    read_back(shape, format, shape->host.isa, values, x[0], x[1], &best, &median);
    double ignored;
    read_back(shape, format, TKV_ISA_SCALAR, values, x[2], x[3], &ignored, &ignored);
    read_back(&exact, "f32", shape->host.isa, values, x[4], x[5], &ignored, &ignored);
    bench_clear_line();
    if (memcmp(x[0], x[2], n * sizeof(float)) != 0 || memcmp(x[1], x[3], n * sizeof(float)) != 0)
        bench_fail("%s: tkv_read differs from scalar code", format);
    printf(csv ? "%s,%.3f,%.3f,%.2e,%.2e\n" : "%-22s %9.3f %9.3f %9.1e %9.1e\n", format, best * 1e3,
           median * 1e3, bench_distance(x[0], x[4], n), bench_distance(x[1], x[5], n));
    fflush(stdout);
    for (int i = 0; i < 6; i++) free(x[i]);
}

int main(int argc, char **argv) {
    const char *formats = bench_option(argc, argv, "formats"), *reads = bench_option(argc, argv, "read");
    const char *only = bench_option(argc, argv, "only"), *isa;
    int tokens = bench_number(argc, argv, "tokens", 8192), runs = bench_number(argc, argv, "runs", 3);
    int csv = bench_option(argc, argv, "csv") != NULL;
    uint64_t seed = 1;
    tkv_config cfg;
    isa = bench_config(&cfg, argc, argv);
    bench_must(tkv_validate_config(&cfg, NULL, 0), "shape");
    if (tokens < 1536 || runs < 1) bench_fail("--tokens: from 1536; --runs: from 1");
    if (!formats) formats = "f16,tiers,extreme,kivi,kivi4";
    if (!reads)
        reads = "f32,f16,bf16,q8,kivi4,kivi3,kivi2,a40/r40,a30/r30,a30/r20,a25/r20,a20/r15,a15/"
                "r10,int8,int4,fp8-e4m3,"
                "fp8-e5m2,fp4,squat4/kivi4,squat2/kivi2,subspace4,subspace2,kvquant4,kvquant3,kvquant2";
    float *values = bench_values(&cfg, &seed);
    float *q = bench_queries(&cfg, 1, &seed);
    char word[32];
    if (!only || strcmp(only, "steps") == 0) {
        if (csv)
            printf("format,tokens,append_mean_us,append_median_us,append_p99_us,append_max_us,step_mean_us,"
                   "step_median_us,step_p99_us,step_max_us,append_percent,p99_median,error,own_error\n");
        else
            printf("decode steps: head_dim %d, %d query and %d KV heads, 1 layer, 1 thread, %s kernels\n"
                   "%-10s %6s %8s %7s %7s %8s %9s %8s %8s %8s %7s %10s %9s %8s\n",
                   cfg.model.head_dim, cfg.model.n_heads, cfg.model.n_kv_heads, isa, "format", "tokens",
                   "append us", "median", "p99", "max", "step us", "median", "p99", "max", "share",
                   "p99/median", "error", "own");
        while (bench_word(&formats, word, sizeof word))
            measure_steps(&cfg, word, tokens, runs, csv, values, q);
        printf("\n");
    }
    if (!only || strcmp(only, "read") == 0) {
        if (csv) printf("format,least_ms,median_ms,error_k,error_v\n");
        else
            printf("reading %d tokens: head_dim %d, %d KV heads, 1 layer, 1 thread, %s kernels\n"
                   "%-22s %9s %9s %9s %9s\n",
                   READ, cfg.model.head_dim, cfg.model.n_kv_heads, isa, "format", "least ms", "median",
                   "error K", "error V");
        while (bench_word(&reads, word, sizeof word)) measure_read(&cfg, word, csv, values);
    }
    free(values);
    free(q);
    return 0;
}
