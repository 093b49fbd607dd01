/*
 * steps.c - measures how even decode steps are. A step appends one token to all layers and attends in all layers. One
 * thread.
 *
 * cc -O2 bench/steps.c examples/tieredkv.c -o steps -lm -pthread && ./steps
 *
 *   --layers 16,32          numbers of layers
 *   --formats tiers         plans (bench_plan in bench.h)
 *   --context 3072          tokens at the end of the run
 *   --steps 256             the last steps are measured
 *   --runs 5
 *   --list                  prints each measured step: its token, append us, step us
 *   --heads 32 --kv-heads 8 --dim 128 --isa avx2 --precise --csv
 *
 * All runs do the same work, so each step counts with its least time of all runs. Times are CPU time, less the time of
 * the clock itself. All tokens are appended one by one, so tables are made as in decoding.
 *   append us    appends of a step, all layers: median, 90th and 99th percentile, worst
 *   p99/median   of these appends
 *   step us      appends and attention of a step: the same figures
 *   worst/median of these steps. Attention grows with the context: over 256 steps before 3,072 by a twelfth
 * A model computes matrix products between two layers, so processor caches are colder there.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

/* Runs one sequence to `context` tokens. append, step: [n] times of the last n steps, least of all runs so far. */
static void run_once(const tkv_config *cfg, int context, int n, int run, const float *values, const float *q,
                     float *out, double *append, double *step) {
    const double tick = bench_clock_cost();
    tkv_cache *kv;
    bench_must(tkv_create(cfg, &kv), "tkv_create");
    for (int t = 0; t < context; t++) {
        const int at = t - (context - n);
        double appends = 0.0, attention = 0.0;
        for (int layer = 0; layer < cfg->model.n_layers; layer++) {
            const double begin = bench_seconds(1);
            bench_append_at(kv, cfg, layer, t, 1, values);
            const double middle = bench_seconds(1);
            if (at >= 0 || t % 8 == 7) /* only these queries feed the tables (learn/statistics.h) */
                bench_must(tkv_attend(kv, 0, layer, q, 1, out), "tkv_attend");
            appends += middle - begin - tick;
            attention += bench_seconds(1) - middle - tick;
        }
        if (at < 0) continue;
        bench_keep_least(&append[at], appends, run);
        bench_keep_least(&step[at], appends + attention, run);
    }
    bench_must(tkv_check(kv, NULL, 0), "tkv_check");
    tkv_destroy(kv);
}

static void measure(const tkv_config *shape, const char *plan, int layers, int context, int n, int runs,
                    int csv, int list, const float *values, const float *q) {
    double *append = (double *)bench_alloc((size_t)n * sizeof(double));
    double *step = (double *)bench_alloc((size_t)n * sizeof(double));
    float *out = (float *)bench_alloc((size_t)(shape->model.n_heads * shape->model.head_dim) * sizeof(float));
    tkv_config cfg = *shape;
    cfg.model.n_layers = layers;
    if (!bench_plan(&cfg, plan)) bench_fail("unknown plan \"%s\", or not for this shape", plan);
    bench_error error = bench_check(shape, plan, 1, values, q);
    for (int run = 0; run < runs; run++) {
        fprintf(stderr, "\r%-10s %d layers, run %d of %d   ", plan, layers, run + 1, runs);
        run_once(&cfg, context, n, run, values, q, out, append, step);
    }
    const bench_spread a = bench_spread_of(append, n), s = bench_spread_of(step, n);
    bench_clear_line();
    printf(csv ? "%s,%d,%d,%.1f,%.1f,%.1f,%.1f,%.2f,%.1f,%.1f,%.1f,%.1f,%.3f,%.2e\n"
               : "%-10s %6d %7d %9.1f %7.1f %7.1f %7.1f %10.2f %8.1f %8.1f %8.1f %8.1f %12.3f %8.1e\n",
           plan, layers, context, a.median, a.p90, a.p99, a.most, a.p99 / a.median, s.median, s.p90, s.p99,
           s.most, s.most / s.median, error.arithmetic);
    for (int i = 0; list && i < n; i++)
        printf("token,%d,%.1f,%.1f\n", context - n + i, append[i] * 1e6, step[i] * 1e6);
    fflush(stdout);
    free(append);
    free(step);
    free(out);
}

int main(int argc, char **argv) {
    const char *formats = bench_option(argc, argv, "formats"), *layers = bench_option(argc, argv, "layers");
    const int context = bench_number(argc, argv, "context", 3072), n = bench_number(argc, argv, "steps", 256);
    const int runs = bench_number(argc, argv, "runs", 5);
    const int csv = bench_option(argc, argv, "csv") != NULL, list = bench_option(argc, argv, "list") != NULL;
    uint64_t seed = 1;
    tkv_config cfg;
    const char *isa = bench_config(&cfg, argc, argv);
    if (n < 64 || context < n || runs < 1) bench_fail("--steps: 64 to --context; --runs: from 1");
    if (!formats) formats = "tiers";
    if (!layers) layers = "16,32";
    float *values = bench_values(&cfg, &seed);
    float *q = bench_queries(&cfg, 1, &seed);
    if (csv)
        printf("format,layers,context,append_median_us,append_p90_us,append_p99_us,append_worst_us,"
               "append_p99_median,step_median_us,step_p90_us,step_p99_us,step_worst_us,step_worst_median,"
               "error\n");
    else
        printf("decode steps of all layers: head_dim %d, %d query and %d KV heads, last %d steps, 1 thread, "
               "%s kernels\n%-10s %6s %7s %9s %7s %7s %7s %10s %8s %8s %8s %8s %12s %8s\n",
               cfg.model.head_dim, cfg.model.n_heads, cfg.model.n_kv_heads, n, isa, "format", "layers",
               "context", "append us", "p90", "p99", "worst", "p99/median", "step us", "p90", "p99", "worst",
               "worst/median", "error");
    char word[32];
    while (bench_word(&formats, word, sizeof word)) {
        char count[32];
        for (const char *rest = layers; bench_word(&rest, count, sizeof count);)
            measure(&cfg, word, atoi(count), context, n, runs, csv, list, values, q);
    }
    free(values);
    free(q);
    return 0;
}
