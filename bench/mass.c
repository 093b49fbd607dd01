/*
 * mass.c - measures what the collection of attention scores (cfg.importance.sample_every) adds to a decode step,
 * by the same calls with it and without.
 *
 * cc -O2 bench/mass.c -o mass -lm -pthread && ./mass
 *
 *   --ctx 8192,32768  --every 32,16,1  --format tiers    tokens; cfg.importance.sample_every; plan
 *   --heads 32 --kv-heads 8 --dim 128                    one shape instead of two
 *   --isa avx2  --layers 4  --seconds 3  --csv           at most 8 layers; seconds per row
 *   --group mean                                         cfg.importance.heads: mean, max, sum
 *
 * A run appends 32 tokens and attends in every layer. tkv_seq_abort then removes the tokens. Columns:
 *   step us   tkv_attend per token and layer without collection: mean over tokens and layers of each call's least
 *   time more      time that collection adds to it, and the same as a share pairs     the same share as a median
 *   over runs, from all calls of a run with collection and without
 * Times are CPU time. A step of a model also has matrix products, so the share there is smaller.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "bench.h"

enum { STEPS = 32, LAYERS = 8, NEVER = 1 << 30, RUNS = 1000 };

typedef struct subject {
    tkv_cache *kv;
    tkv_config cfg;
    float *values, *q, *out;
    double least[2][STEPS][LAYERS]; /* seconds of each call, without collection and with it */
} subject;

/* Runs 32 tokens; returns the time that collection adds, over the time without it. */
static double run(subject *r, int every) {
    const size_t row = (size_t)(r->cfg.model.n_kv_heads * r->cfg.model.head_dim);
    double sum[2] = {0.0, 0.0};
    bench_must(tkv_seq_begin(r->kv, 0), "tkv_seq_begin");
    for (int i = 0; i < STEPS; i++)
        for (int layer = 0; layer < r->cfg.model.n_layers; layer++) {
            bench_must(tkv_append(r->kv, 0, layer, r->values + (size_t)i * row,
                                  r->values + (size_t)(i + 9) * row, 1),
                       "tkv_append");
            for (int k = -1; k < 2; k++) { /* the first call warms up */
                double *least = &r->least[k == 1][i][layer];
                r->kv->token_scores.every = k == 1 ? every : NEVER;
                double t = bench_seconds(1);
                bench_must(tkv_attend(r->kv, 0, layer, r->q, 1, r->out), "tkv_attend");
                t = bench_seconds(1) - t;
                if (k < 0) continue;
                if (*least <= 0.0 || t < *least) *least = t;
                sum[k] += t;
            }
        }
    bench_must(tkv_seq_abort(r->kv, 0), "tkv_seq_abort");
    return sum[1] / sum[0] - 1.0;
}

static void measure(const tkv_config *shape, const char *plan, int ctx, int every, double seconds, int csv) {
    double mean[2] = {0.0, 0.0};
    uint64_t seed = 1;
    subject r;
    int runs = 0;
    memset(&r, 0, sizeof r);
    r.cfg = *shape;
    r.cfg.importance.sample_every = every;
    if (!bench_plan(&r.cfg, plan)) bench_fail("unknown plan \"%s\", or not for this shape", plan);
    r.values = bench_values(&r.cfg, &seed);
    r.q = bench_queries(&r.cfg, 1, &seed);
    r.out = (float *)bench_alloc((size_t)(r.cfg.model.n_heads * r.cfg.model.head_dim) * sizeof(float));
    bench_must(tkv_create(&r.cfg, &r.kv), "tkv_create");
    for (int layer = 0; layer < r.cfg.model.n_layers; layer++)
        bench_append(r.kv, &r.cfg, layer, ctx, r.values);
    double more[RUNS];
    for (double start = bench_seconds(0); runs < 3 || (runs < RUNS && bench_seconds(0) - start < seconds);
         runs++)
        more[runs] = run(&r, every);
    for (int which = 0; which < 2; which++)
        for (int i = 0; i < STEPS; i++)
            for (int layer = 0; layer < r.cfg.model.n_layers; layer++)
                mean[which] += r.least[which][i][layer] * 1e6 / (double)(STEPS * r.cfg.model.n_layers);
    printf(csv ? "%s,%d,%d,%d,%.2f,%.2f,%.3f,%.3f,%d,%d,%d\n"
               : "%-8s %7d %6d %6d %10.2f %9.2f %7.2f%% %7.2f%%\n",
           plan, ctx, every, runs, mean[0], mean[1] - mean[0], 100.0 * (mean[1] / mean[0] - 1.0),
           100.0 * bench_median(more, runs), shape->model.n_heads, shape->model.n_kv_heads,
           shape->model.head_dim);
    fflush(stdout);
    tkv_destroy(r.kv);
    free(r.values);
    free(r.q);
    free(r.out);
}

int main(int argc, char **argv) {
    static const int shapes[2][3] = {{32, 8, 128}, {9, 3, 64}};
    const char *ctxs = bench_option(argc, argv, "ctx"), *everies = bench_option(argc, argv, "every");
    const char *plan = bench_option(argc, argv, "format"), *group = bench_option(argc, argv, "group");
    const int csv = bench_option(argc, argv, "csv") != NULL;
    const int single = bench_option(argc, argv, "heads") || bench_option(argc, argv, "dim");
    if (csv) printf("format,ctx,every,runs,step_us,more_us,more_percent,pairs_percent,heads,kv_heads,dim\n");
    for (int shape = 0; shape < (single ? 1 : 2); shape++) {
        const char *list = ctxs ? ctxs : "          ";
        tkv_config cfg;
        const char *isa = bench_config(&cfg, argc, argv);
        if (!single) {
            cfg.model.n_heads = shapes[shape][0];
            cfg.model.n_kv_heads = shapes[shape][1];
            cfg.model.head_dim = shapes[shape][2];
        }
        cfg.model.n_layers = bench_number(argc, argv, "layers", 4);
        if (group)
            cfg.importance.heads = group[0] == 's'   ? TKV_IMPORTANCE_SUM
                                   : group[1] == 'a' ? TKV_IMPORTANCE_MAX
                                                     : TKV_IMPORTANCE_MEAN;
        if (cfg.model.n_layers < 1 || cfg.model.n_layers > LAYERS) bench_fail("--layers: 1 to 8");
        if (!csv)
            printf("collecting attention scores: head_dim %d, %d query and %d KV heads, %d layers, 1 thread, "
                   "%s kernels\n"
                   "%-8s %7s %6s %6s %10s %9s %8s %8s\n",
                   cfg.model.head_dim, cfg.model.n_heads, cfg.model.n_kv_heads, cfg.model.n_layers, isa,
                   "format", "ctx", "every", "runs", "step us", "more us", "more", "pairs");
        char ctx[32];
        char every[32];
        while (bench_word(&list, ctx, sizeof ctx))
            for (const char *some = everies ? everies : "32,16,1"; bench_word(&some, every, sizeof every);)
                measure(&cfg, plan ? plan : "tiers", atoi(ctx), atoi(every),
                        (double)bench_number(argc, argv, "seconds", 3), csv);
    }
    return 0;
}
