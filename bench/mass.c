/*
 * mass.c - what gathering attention mass (cfg.importance_every) takes of a decode step: two caches with the same
 * tokens, one that gathers and one that does not, take turns.
 *
 * cc -O2 bench/mass.c -o mass -lm -pthread && ./mass
 *
 *   --ctx 8192,32768  --every 16,4,1  --format tiers  --kind h2o    tokens; cfg.importance_every; plan; cfg.evict.kind
 *   --heads 32 --kv-heads 8 --dim 128 --isa avx2                    one shape instead of two
 *   --layers 4  --seconds 5                                         of each cache; per row
 *
 * A run is 16 tokens, appended and attended to in every layer and taken away again (tkv_abort). `step` is the time of
 * tkv_attend per token and layer without gathering, `more` what gathering adds to it: means over the 16 tokens of the
 * least time of each. The rest of a model's step, its matrix products, would make the share smaller.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "bench.h"

enum { STEPS = 16 };

static void decode(tkv_cache *kv, const tkv_config *cfg, const float *values, const float *q, float *out,
                   double *least) {
    const size_t row = (size_t)(cfg->n_kv_heads * cfg->head_dim);
    int i, layer;
    bench_must(tkv_begin(kv, 0), "tkv_begin");
    for (i = 0; i < STEPS; i++) {
        double spent = 0.0;
        for (layer = 0; layer < cfg->n_layers; layer++) {
            double t;
            bench_must(tkv_append(kv, 0, layer, values + (size_t)i * row, values + (size_t)(i + 9) * row, 1),
                       "tkv_append");
            t = bench_seconds(1);
            bench_must(tkv_attend(kv, 0, layer, q, 1, out), "tkv_attend");
            spent += bench_seconds(1) - t;
        }
        if (least[i] <= 0.0 || spent < least[i]) least[i] = spent;
    }
    bench_must(tkv_abort(kv, 0), "tkv_abort");
}

static void measure(const tkv_config *shape, const char *plan, int ctx, int every, double seconds) {
    double least[2][STEPS], mean[2] = {0.0, 0.0}, start;
    tkv_config cfg = *shape;
    tkv_cache *kv[2];
    float *values, *q, *out;
    uint64_t seed = 1;
    int i, which, layer, runs = 0;
    if (!bench_plan(&cfg, plan)) fprintf(stderr, "there is no plan \"%s\" for this shape\n", plan), exit(1);
    memset(least, 0, sizeof least);
    values = bench_values(&cfg, &seed);
    q = bench_queries(&cfg, 1, &seed);
    out = (float *)bench_alloc((size_t)(cfg.n_heads * cfg.head_dim) * sizeof(float));
    for (which = 0; which < 2; which++) {
        tkv_config one = cfg;
        if (which == 0) memset(&one.evict, 0, sizeof one.evict);
        else one.importance_every = every;
        bench_must(tkv_create(&one, &kv[which]), "tkv_create");
        for (layer = 0; layer < cfg.n_layers; layer++) bench_append(kv[which], &one, layer, ctx, values);
    }
    for (start = bench_seconds(0); runs < 3 || bench_seconds(0) - start < seconds; runs++)
        for (which = 0; which < 2; which++) decode(kv[which], &cfg, values, q, out, least[which]);
    for (which = 0; which < 2; which++) {
        for (i = 0; i < STEPS; i++) mean[which] += least[which][i] / STEPS / cfg.n_layers * 1e6;
        tkv_destroy(kv[which]);
    }
    bench_clear_line();
    printf("%-8s %7d %6d %6d %10.2f %9.2f %7.2f%%\n", plan, ctx, every, runs, mean[0], mean[1] - mean[0],
           100.0 * (mean[1] / mean[0] - 1.0));
    fflush(stdout);
    free(values);
    free(q);
    free(out);
}

int main(int argc, char **argv) {
    static const int shapes[2][3] = {{32, 8, 128}, {9, 3, 64}};
    const char *ctxs = bench_option(argc, argv, "ctx"), *everies = bench_option(argc, argv, "every");
    const char *plan = bench_option(argc, argv, "format"), *kind = bench_option(argc, argv, "kind");
    const int single = bench_option(argc, argv, "heads") || bench_option(argc, argv, "dim");
    int shape;
    for (shape = 0; shape < (single ? 1 : 2); shape++) {
        const char *list = ctxs ? ctxs : "8192,32768", *some;
        char ctx[32], every[32];
        tkv_config cfg;
        bench_config(&cfg, argc, argv);
        if (!single) {
            cfg.n_heads = shapes[shape][0];
            cfg.n_kv_heads = shapes[shape][1];
            cfg.head_dim = shapes[shape][2];
        }
        cfg.n_layers = bench_number(argc, argv, "layers", 4);
        if (kind && tkv_evict_from_name(kind, &cfg.evict.kind))
            fprintf(stderr, "there is no policy \"%s\"\n", kind), exit(1);
        printf("gathering: head_dim %d, %d query and %d KV heads, %d layers, 1 thread, %s kernels%s%s\n",
               cfg.head_dim, cfg.n_heads, cfg.n_kv_heads, cfg.n_layers, tkv_isa_name(cfg.isa),
               kind ? ", " : "", kind ? kind : "");
        printf("%-8s %7s %6s %6s %10s %9s %8s\n", "format", "ctx", "every", "runs", "step us", "more us",
               "more");
        while (bench_word(&list, ctx, sizeof ctx))
            for (some = everies ? everies : "16,1"; bench_word(&some, every, sizeof every);)
                measure(&cfg, plan ? plan : "tiers", atoi(ctx), atoi(every),
                        (double)bench_number(argc, argv, "seconds", 5));
    }
    return 0;
}
