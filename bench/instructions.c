/*
 * instructions.c - fills a cache of one layer and calls tkv_attend for its last token. bench/instructions.sh counts the
 * instructions of that call. Such counts do not depend on the load of the machine.
 *
 * cc -O2 bench/instructions.c examples/tieredkv.c -o instructions -lm && ./instructions --format tiers
 *
 *   --format a30/r20        a format, the default plan (tiers), a preset (bench_plan in bench.h)
 *   --ctx 8192              tokens
 *   --heads 4 --kv-heads 1 --dim 128 --queries 1 --isa avx2 --precise
 *   --dim 576 --latents 512 V is the first 512 channels of K
 *   --calls 1               attention runs this many times
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

int main(int argc, char **argv) {
    const char *plan = bench_option(argc, argv, "format");
    const int ctx = bench_number(argc, argv, "ctx", 8192), calls = bench_number(argc, argv, "calls", 1);
    const int queries = bench_number(argc, argv, "queries", 1);
    uint64_t seed = 1;
    tkv_config cfg;
    bench_config(&cfg, argc, argv);
    if (!bench_option(argc, argv, "heads")) cfg.model.n_heads = 4;
    if (!bench_option(argc, argv, "kv-heads")) cfg.model.n_kv_heads = 1;
    if (!plan) plan = "tiers";
    bench_must(tkv_validate_config(&cfg, NULL, 0), "shape");
    float *values = bench_values(&cfg, &seed), *q = bench_queries(&cfg, queries, &seed);
    float *out =
        (float *)bench_alloc((size_t)(queries * cfg.model.n_heads * cfg.model.head_dim) * sizeof(float));
    bench_error error = bench_check(&cfg, plan, queries, values, q);
    if (!bench_plan(&cfg, plan)) bench_fail("unknown plan \"%s\", or not for this shape", plan);
    tkv_cache *kv;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    bench_append(kv, &cfg, 0, ctx, values);
    for (int i = 0; i < calls; i++) bench_must(tkv_attend(kv, 0, 0, q, queries, out), "tkv_attend");
    printf("%s: %d tokens, %d KV head%s, error of arithmetic %.1e, of the format %.1e\n", plan, ctx,
           cfg.model.n_kv_heads, cfg.model.n_kv_heads == 1 ? "" : "s", error.arithmetic, error.format);
    tkv_destroy(kv);
    free(values);
    free(q);
    free(out);
    return 0;
}
