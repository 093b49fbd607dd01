/*
 * budget.c - measures what a byte budget costs while tokens are appended one by one: the times of appends, and how
 * close the bytes come to the budget. All layers, one thread.
 *
 * cc -O2 bench/budget.c examples/tieredkv.c -o budget -lm -pthread && ./budget
 *
 *   --budgets 1000,50,25,18        percent of the FP16 bytes of all tokens; 0: no budget, all tokens exact
 *   --tokens 8192 --runs 3
 *   --layers 30 --heads 9 --kv-heads 3 --dim 64 --isa avx2 --csv       (the shape of SmolLM2-135M)
 *
 * A step is one token: an append to each layer, then attention in each layer. There are no matrix products of a
 * model. Every run does the same work, so each token counts with its least time of all runs (CPU time). Columns:
 *   peak        highest total of bytes over the budget
 *   level       level of the ladder at the end
 *   turns       changes of direction between levels
 *   recoded     blocks recoded for any reason, age included
 *   append us   appends of a token to all layers: mean, median, 99th percentile and maximum
 *   step us     mean of a whole step
 *   worst       the largest time over the median
 * Keys are Gaussian, because the budget's work does not depend on their values.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

enum { MAX_BUDGETS = 16 };

typedef struct level_changes {
    int n, up, turns; /* events; 1: the last one rose; changes of direction */
} level_changes;

static void on_event(void *user, const tkv_event *e) {
    level_changes *l = (level_changes *)user;
    const int up = e->to > e->from;
    if (e->kind != TKV_EVENT_LEVEL) return;
    if (l->n && up != l->up) l->turns++;
    l->up = up;
    l->n++;
}

static void measure(const tkv_config *shape, int percent, int tokens, int runs, int csv, const float *values,
                    const float *q) {
    const size_t token =
        4 * (size_t)shape->model.n_layers * (size_t)shape->model.n_kv_heads * (size_t)shape->model.head_dim;
    double *append = (double *)bench_alloc((size_t)tokens * sizeof *append), *step, mean = 0.0, whole = 0.0;
    float *out = (float *)bench_alloc((size_t)(shape->model.n_heads * shape->model.head_dim) * sizeof(float));
    tkv_config cfg = *shape;
    step = (double *)bench_alloc((size_t)tokens * sizeof *step);
    cfg.budget.bytes = token * (size_t)tokens / 100 * (size_t)percent;
    if (!percent) cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.host.on_event = on_event;
    level_changes l;
    cfg.host.event_user = &l;
    tkv_budget_info b;
    for (int run = 0; run < runs; run++) {
        memset(&l, 0, sizeof l);
        tkv_cache *kv;
        bench_must(tkv_create(&cfg, &kv), "tkv_create");
        for (int t = 0; t < tokens; t++) {
            const float *k =
                values + (size_t)(t % 512) * (size_t)(shape->model.n_kv_heads * shape->model.head_dim);
            double t0 = bench_seconds(1), t1, t2;
            for (int layer = 0; layer < cfg.model.n_layers; layer++)
                bench_must(tkv_append(kv, 0, layer, k, k + shape->model.head_dim, 1), tkv_get_last_error(kv));
            t1 = bench_seconds(1);
            for (int layer = 0; layer < cfg.model.n_layers; layer++)
                bench_must(tkv_attend(kv, 0, layer, q, 1, out), "tkv_attend");
            t2 = bench_seconds(1);
            bench_keep_least(&append[t], t1 - t0, run);
            bench_keep_least(&step[t], t2 - t0, run);
            if (t % 256 == 0)
                fprintf(stderr, "\r%d %%: run %d of %d, %d tokens   ", percent, run + 1, runs, t);
        }
        bench_must(tkv_check(kv, NULL, 0), "tkv_check");
        bench_must(tkv_get_budget(kv, &b), "tkv_get_budget");
        tkv_destroy(kv);
    }
    for (int t = 0; t < tokens; t++) {
        mean += append[t] / tokens;
        whole += step[t] / tokens;
    }
    qsort(append, (size_t)tokens, sizeof *append, bench_order);
    qsort(step, (size_t)tokens, sizeof *step, bench_order);
    bench_clear_line();
    printf(csv ? "%d,%lu,%.4f,%d,%d,%lu,%.1f,%.1f,%.1f,%.1f,%.2f,%.1f,%.2f\n"
               : "%5d %% %11lu %7.4f %6d %5d %8lu %8.1f %8.1f %8.1f %8.1f %7.2f %9.1f %8.2f\n",
           percent, (unsigned long)b.budget, b.budget ? (double)b.peak / (double)b.budget : 0.0, b.level,
           l.turns, (unsigned long)b.demoted, mean * 1e6, append[tokens / 2] * 1e6,
           append[tokens - 1 - tokens / 100] * 1e6, append[tokens - 1] * 1e6,
           append[tokens - 1] / append[tokens / 2], whole * 1e6, step[tokens - 1] / step[tokens / 2]);
    fflush(stdout);
    free(append);
    free(step);
    free(out);
}

int main(int argc, char **argv) {
    const char *budgets = bench_option(argc, argv, "budgets"), *isa;
    const int tokens = bench_number(argc, argv, "tokens", 8192), runs = bench_number(argc, argv, "runs", 3);
    const int csv = bench_option(argc, argv, "csv") != NULL;
    uint64_t seed = 1;
    tkv_config cfg;
    isa = bench_config(&cfg, argc, argv);
    cfg.model.n_layers = bench_number(argc, argv, "layers", 30);
    if (!bench_option(argc, argv, "heads")) cfg.model.n_heads = 9;
    if (!bench_option(argc, argv, "kv-heads")) cfg.model.n_kv_heads = 3;
    if (!bench_option(argc, argv, "dim")) cfg.model.head_dim = 64;
    bench_must(tkv_validate_config(&cfg, NULL, 0), "shape");
    if (tokens < 1024 || runs < 1) bench_fail("--tokens: from 1024; --runs: from 1");
    if (!budgets) budgets = "0,1000,50,25,18";
    float *values = bench_values(&cfg, &seed);
    float *q = bench_queries(&cfg, 1, &seed);
    if (csv)
        printf("percent,bytes,peak,level,turns,demoted,append_us,median_us,p99_us,max_us,worst,step_us,step_"
               "worst\n");
    else
        printf("%d tokens one by one: %d layers, %d query and %d KV heads of %d, 1 thread, %s kernels\n"
               "%7s %11s %7s %6s %5s %8s %8s %8s %8s %8s %7s %9s %8s\n",
               tokens, cfg.model.n_layers, cfg.model.n_heads, cfg.model.n_kv_heads, cfg.model.head_dim, isa,
               "budget", "bytes", "peak", "level", "turns", "recoded", "append us", "median", "p99", "max",
               "worst", "step us", "worst");
    char word[32];
    while (bench_word(&budgets, word, sizeof word)) measure(&cfg, atoi(word), tokens, runs, csv, values, q);
    free(values);
    free(q);
    return 0;
}
