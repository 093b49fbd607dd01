/*
 * meter.c - measures the time and the bytes of the quality meter. One query, one thread, the default plan.
 *
 * cc -O2 bench/meter.c examples/tieredkv.c -o meter -lm && ./meter
 *
 *   --ctx 4096,16384,32768   tokens
 *   --layers 8 --heads 32 --kv-heads 8 --dim 128
 *   --watch 4 --tokens 0     cfg.meter.heads, cfg.meter.tokens
 *   --isa avx2               auto, scalar, avx2, avx512, neon, wasm
 *   --csv
 *
 * The time that a meter adds to a decode step is below the noise of most machines. So this program compares one
 * head at every second position, and times attention to its layer at these positions and between them. Columns:
 *   step ms     median of a whole step: an append and an attention for each layer
 *   a head us   attention to one KV head
 *   compare     time of one comparison: the difference of both medians, in us
 *   cost        share of `heads` comparisons every `every` steps in the time of these steps
 *   bytes       exact copies of the meter
 *   share       the same as a share of all bytes of the cache
 *   coverage    share of the coded tokens that have an exact copy
 *   error, KL, top-1   quality that the meter reports for random values
 * Times are thread CPU time.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

enum { STEPS = 120 };

static void measure(tkv_config *cfg, int ctx, int csv, float *values, const float *q) {
    size_t row = (size_t)cfg->model.n_kv_heads * (size_t)cfg->model.head_dim;
    float *out =
        (float *)bench_alloc((size_t)cfg->model.n_heads * (size_t)cfg->model.head_dim * sizeof(float));
    int watch = cfg->meter.heads, watched = -1, count[2] = {0, 0};
    uint64_t seed = (uint64_t)ctx;
    tkv_memory_info memory;
    bench_must(tkv_estimate_memory(cfg, ctx, 1, &memory), "tkv_estimate_memory");
    tkv_cache *kv;
    bench_must(tkv_create(cfg, &kv), "tkv_create"); /* a cache with the meter of the options, for `every` */
    tkv_quality_info info;
    bench_must(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), "tkv_get_quality");
    tkv_destroy(kv);
    int every = info.every;
    if (every == 0) bench_fail("this build has no meter");
    cfg->meter.heads = 1; /* the cache to measure */
    cfg->meter.every = 2;
    bench_must(tkv_create(cfg, &kv), "tkv_create");
    cfg->meter.heads = watch;
    cfg->meter.every = 0;
    int n;
    for (int layer = 0; layer < cfg->model.n_layers; layer++) {
        fprintf(stderr, "\r%7d: fill %d of %d   ", ctx, layer + 1, cfg->model.n_layers);
        for (int t = 0; t < ctx; t += n) {
            n = ctx - t < BENCH_CHUNK ? ctx - t : BENCH_CHUNK;
            bench_fill(&seed, values, 2 * BENCH_CHUNK * row);
            bench_must(tkv_append(kv, 0, layer, values, values + BENCH_CHUNK * row, n), "tkv_append");
        }
        bench_must(tkv_get_quality(kv, layer, &info), "tkv_get_quality");
        if (info.heads) watched = layer;
    }
    fprintf(stderr, "\r%7d: measure        ", ctx);
    double step[STEPS];
    double attend[2][STEPS];
    for (int t = -4; t < STEPS; t++) { /* the first four steps warm up */
        double begin = bench_seconds(1);
        for (int layer = 0; layer < cfg->model.n_layers; layer++) {
            const float *at = values + (size_t)(((t + 4) * 13 + layer) % BENCH_CHUNK) * row;
            bench_must(tkv_append(kv, 0, layer, at, at + row, 1), "tkv_append");
            double s = bench_seconds(1);
            bench_must(tkv_attend(kv, 0, layer, q + (size_t)((t + 4) % 7) * row, 1, out), "tkv_attend");
            n = (ctx + t + 4) % 2; /* 0: the meter compares at even positions */
            if (t >= 0 && layer == watched) attend[n][count[n]++] = bench_seconds(1) - s;
        }
        if (t >= 0) step[t] = bench_seconds(1) - begin;
    }
    bench_must(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), "tkv_get_quality");
    if (info.samples != (uint64_t)(STEPS + 4) / 2u * (uint64_t)(cfg->model.n_heads / cfg->model.n_kv_heads))
        bench_fail("unexpected number of samples");
    double whole = bench_median(step, STEPS);
    double compare = bench_median(attend[0], count[0]) - bench_median(attend[1], count[1]);
    bench_clear_line();
    printf(csv ? "%d,%d,%d,%.4f,%.1f,%.1f,%.3f,%lu,%.2f,%.3f,%.2e,%.2e,%.4f\n"
               : "%7d %6d %6d %8.3f %9.1f %9.1f %6.2f%% %10lu %6.2f%% %8.3f %9.1e %9.1e %7.4f\n",
           ctx, watch, every, whole * 1e3, bench_median(attend[1], count[1]) / cfg->model.n_kv_heads * 1e6,
           compare * 1e6, 100.0 * compare * watch / every / whole, (unsigned long)memory.exact_copies,
           100.0 * (double)memory.exact_copies / (double)memory.total, info.coverage, info.output_error,
           info.kl, info.top1);
    fflush(stdout);
    tkv_destroy(kv);
    free(out);
}

int main(int argc, char **argv) {
    const char *ctxs = bench_option(argc, argv, "ctx"), *isa;
    int csv = bench_option(argc, argv, "csv") != NULL;
    tkv_config cfg;
    uint64_t seed = 1;
    isa = bench_config(&cfg, argc, argv);
    cfg.model.n_layers = bench_number(argc, argv, "layers", 8);
    cfg.meter.heads = bench_number(argc, argv, "watch", 4);
    cfg.meter.tokens = bench_number(argc, argv, "tokens", 0);
    bench_must(tkv_validate_config(&cfg, NULL, 0), "config");
    if (!ctxs || !*ctxs) ctxs = "4096,16384,32768";
    float *values = bench_values(&cfg, &seed);
    size_t n = (size_t)((7 * cfg.model.n_kv_heads + cfg.model.n_heads) * cfg.model.head_dim);
    float *q = (float *)bench_alloc(n * sizeof(float));
    bench_fill(&seed, q, n);
    if (csv)
        printf("ctx,heads,every,step_ms,head_us,compare_us,cost_percent,bytes,bytes_percent,coverage,"
               "output_error,kl,top1\n");
    else
        printf("quality meter: %d layers, head_dim %d, %d query and %d KV heads, default plan, 1 thread, %s "
               "kernels\n"
               "%7s %6s %6s %8s %9s %9s %7s %10s %7s %8s %9s %9s %7s\n",
               cfg.model.n_layers, cfg.model.head_dim, cfg.model.n_heads, cfg.model.n_kv_heads, isa, "ctx",
               "heads", "every", "step ms", "a head us", "compare", "cost", "bytes", "share", "coverage",
               "error", "KL", "top-1");
    char ctx[32];
    while (bench_word(&ctxs, ctx, sizeof ctx)) {
        if (atoi(ctx) < 1) return 1;
        measure(&cfg, atoi(ctx), csv, values, q);
    }
    free(values);
    free(q);
    return 0;
}
