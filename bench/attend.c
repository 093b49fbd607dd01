/*
 * attend.c - measures attention on caches of each format: a decode step of one layer, with keys and values that are
 * not in the processor's caches.
 *
 * cc -O2 bench/attend.c examples/tieredkv.c -o attend -lm -pthread && ./attend
 *
 * Without options, it measures all groups of the table below. With any of the first ten options, it measures one
 * group.
 *
 *   --formats f32,kivi4,a30/r20,tiers   formats, the default plan, presets (bench_plan in bench.h)
 *   --ctx 4096,32768                    tokens
 *   --heads 32 --kv-heads 8 --dim 128 --queries 1 --threads 1
 *   --isa avx2                          auto, scalar, avx2, avx512, neon, wasm
 *   --precise                           cfg.host.precise: hi and lo limbs in every format
 *   --listen                            measures instead the cost of collecting statistics for A and R formats
 *
 *   --mib 96                            a run reads at least this much; it sets the number of layers
 *   --huge                              Linux: huge pages, by an allocator in cfg.host.allocator
 *   --csv
 *
 * Each row first checks its results on a short cache (bench_check in bench.h). Then a run calls tkv_attend once per
 * layer. Columns:
 *   bytes   bytes of the tiers per token and KV head, metadata included
 *   ns      median over runs, per token and KV head: CPU time of one thread, or wall time of several
 *   read    bandwidth in GB/s of reading 512 MiB with as many threads, just before the row
 *   share   bandwidth of the row over `read`
 *   error   error of arithmetic, relative L2
 *   own     error of the format itself on Gaussian values, relative L2
 *
 * --listen: the cache collects statistics, because it has no tables yet (500 tokens) or after
 * tkv_refresh_calibration. It decodes 16 tokens repeatedly from the same length. Attention collects from one query
 * in 16. Columns:
 *   quiet us     append and attend of the other 15 tokens, per token and layer, the least of many times
 *   collecting   the same for the last token
 *   more         time that collecting adds to 16 tokens
 * A step of a model also has matrix products, so the share there is smaller.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime, madvise */
#endif
#include "../tieredkv.h"

#include "bench.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

enum { MAX_RUNS = 400 };

/* Rows of one table. */
typedef struct group {
    const char *formats, *ctxs, *isa;
    int heads, kv_heads, dim, queries, threads, precise;
} group;

static const group groups[] = {
    {"f32,f16,bf16,q8,kivi4,kivi3,kivi2,a40/r40,a30/r30,a30/r20,a25/r20,a20/r15,fp4,kvquant4,kvquant3,tiers",
     "32768", "auto", 32, 8, 128, 1, 1, 0},
    {"f16,q8,kivi4,a40/r40,a30/r30,tiers", "4096", "auto", 32, 8, 128, 1, 1, 0},
    {"f16,kivi4,tiers", "262144", "auto", 32, 8, 128, 1, 1, 0},
    {"tiers", "1048576", "auto", 32, 8, 128, 1, 1, 0},
    {"kivi4,a40/r40,a30/r30,tiers", "32768", "auto", 32, 8, 128, 1, 2, 0},
    {"kivi4,kivi2,a40/r40,a30/r30,a20/r15,tiers", "32768", "auto", 32, 8, 128, 1, 1, 1},
    {"f16,q8,kivi4,kivi2,a40/r40,a30/r30,a25/r20,a20/r15,tiers", "32768", "avx2", 32, 8, 128, 1, 1, 0},
    {"f16,kivi4,a30/r30", "32768", "auto", 32, 8, 64, 1, 1, 0},
    {"f16,kivi4,a30/r30", "32768", "auto", 32, 8, 80, 1, 1, 0},
    {"f16,kivi4,a30/r30", "32768", "auto", 32, 8, 96, 1, 1, 0},
    {"f16,kivi4,a30/r30", "32768", "auto", 64, 8, 128, 1, 1, 0},
    {"f16,kivi4,a30/r30", "32768", "auto", 8, 8, 128, 1, 1, 0},
};

typedef struct options {
    int csv, huge, collect_stats;
    size_t bytes;
} options;

/* >>huge pages: an allocator with one region for a whole cache. Release does nothing; region_end frees all. */
typedef struct region {
    unsigned char *p;
    size_t n, used;
} region;

static void *region_alloc(void *user, size_t size, size_t align) {
    region *r = (region *)user;
    size_t at = (r->used + align - 1) / align * align;
    if (at > r->n || size > r->n - at) return NULL;
    r->used = at + size;
    return r->p + at;
}

static void region_release(void *user, void *p, size_t size, size_t align) {
    (void)user;
    (void)p;
    (void)size;
    (void)align;
}

static void region_begin(region *r, size_t n) {
#ifdef __linux__
    r->n = n;
    r->used = 0;
    r->p = (unsigned char *)mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r->p == (unsigned char *)MAP_FAILED || madvise(r->p, n, MADV_HUGEPAGE) != 0)
        bench_fail("the system gives no huge pages");
#else
    (void)r;
    (void)n;
    bench_fail("--huge needs Linux");
#endif
}

static void region_end(region *r) {
#ifdef __linux__
    munmap(r->p, r->n);
#else
    (void)r;
#endif
}

/* Sets the plan and as many layers as exceed o->bytes together. Returns the bytes of one layer. */
static size_t set_plan(tkv_config *cfg, const options *o, const char *plan, int ctx) {
    if (!bench_plan(cfg, plan)) bench_fail("unknown plan \"%s\", or not for this shape", plan);
    tkv_memory_info info;
    bench_must(tkv_estimate_memory(cfg, ctx, 1, &info), "tkv_estimate_memory");
    cfg->model.n_layers = (int)(o->bytes / info.total) + 1;
    return info.total;
}

static void measure(const options *o, const group *g, const tkv_config *shape, const char *plan, int ctx,
                    const float *values, const float *q, bench_memory *memory, bench_pool *pool) {
    const double per = (double)ctx * (double)g->kv_heads;
    float *out = (float *)bench_alloc((size_t)(g->queries * g->heads * g->dim) * sizeof(float));
    double bytes = 0.0, spent = 0.0;
    tkv_config cfg = *shape;
    int runs = 0;
    fprintf(stderr, "\r%-10s %7d: check   ", plan, ctx);
    bench_error error = bench_check(&cfg, plan, g->queries, values, q);
    size_t size = set_plan(&cfg, o, plan, ctx);
    if (g->threads > 1) {
        cfg.host.parallel_for = bench_parallel;
        cfg.host.parallel_user = pool;
    }
    region huge;
    if (o->huge) {
        region_begin(&huge, (size_t)cfg.model.n_layers * (size + size / 4) + ((size_t)64 << 20));
        cfg.host.allocator.user = &huge;
        cfg.host.allocator.alloc = region_alloc;
        cfg.host.allocator.release = region_release;
    }
    tkv_cache *kv;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    for (int layer = 0; layer < cfg.model.n_layers; layer++) {
        fprintf(stderr, "\r%-10s %7d: fill %d/%d   ", plan, ctx, layer + 1, cfg.model.n_layers);
        bench_append(kv, &cfg, layer, ctx, values);
    }
    tkv_memory_info info;
    bench_must(tkv_get_memory(kv, &info), "tkv_get_memory");
    for (int i = 0; i < TKV_TIER_COUNT; i++) bytes += (double)(info.tier[i].codes + info.tier[i].metadata);
    bytes /= per * (double)cfg.model.n_layers;
    fprintf(stderr, "\r%-10s %7d: measure        ", plan, ctx);
    double bandwidth = bench_bandwidth(memory, pool) * 1e-9;
    double run[MAX_RUNS];
    while (runs < MAX_RUNS && (runs < 3 || (spent < 0.5 && runs < 101))) {
        double t = bench_seconds(g->threads == 1);
        for (int layer = 0; layer < cfg.model.n_layers; layer++)
            bench_must(tkv_attend(kv, 0, layer, q, g->queries, out), "tkv_attend");
        t = bench_seconds(g->threads == 1) - t;
        spent += t;
        run[runs++] = t / (per * (double)cfg.model.n_layers) * 1e9;
    }
    double ns = bench_median(run, runs);
    bench_clear_line();
    if (o->csv)
        printf("%d,%d,%d,%d,%d,%s,%d,%s,", g->heads, g->kv_heads, g->dim, g->queries, g->threads,
               tkv_get_name(TKV_NAME_ISA, bench_isa_of(kv)), g->precise, plan);
    else printf("%-10s ", plan);
    printf(o->csv ? "%d,%.1f,%.2f,%.2f,%.2f,%.1f,%.1f,%.2e,%.2e,%d,%d\n"
                  : "%7d %8.1f %8.2f %8.2f %8.2f %7.1f %6.1f%% %9.1e %9.1e %5d %6d\n",
           ctx, bytes, ns, run[0], bytes / ns, bandwidth, 100.0 * bytes / ns / bandwidth, error.arithmetic,
           error.format, runs, cfg.model.n_layers);
    fflush(stdout);
    tkv_destroy(kv);
    if (o->huge) region_end(&huge);
    free(out);
}

/* >>collecting statistics */
enum { STEPS = 16 };

/* Decodes STEPS tokens and updates the least seconds of each. tkv_seq_abort then removes the tokens. */
static void decode(tkv_cache *kv, const tkv_config *cfg, const float *values, const float *q, float *out,
                   double *least) {
    const size_t row = (size_t)(cfg->model.n_kv_heads * cfg->model.head_dim);
    bench_must(tkv_seq_begin(kv, 0), "tkv_seq_begin");
    for (int i = 0; i < STEPS; i++) {
        double t = bench_seconds(1);
        for (int layer = 0; layer < cfg->model.n_layers; layer++) {
            bench_must(tkv_append(kv, 0, layer, values + (size_t)i * row, values + (size_t)(i + 9) * row, 1),
                       "tkv_append");
            bench_must(tkv_attend(kv, 0, layer, q, 1, out), "tkv_attend");
        }
        t = bench_seconds(1) - t;
        if (least[i] <= 0.0 || t < least[i]) least[i] = t;
    }
    bench_must(tkv_seq_abort(kv, 0), "tkv_seq_abort");
}

/* Returns a cache that collects statistics: a new one without tables, or one with tables after a refresh. */
static tkv_cache *collecting_cache(tkv_cache *kv, const tkv_config *cfg, int ctx, const float *values) {
    if (!kv || bench_calibrated_layers(kv) == 0) {
        tkv_destroy(kv);
        bench_must(tkv_create(cfg, &kv), "tkv_create");
        for (int layer = 0; layer < cfg->model.n_layers; layer++) bench_append(kv, cfg, layer, ctx, values);
    }
    if (bench_calibrated_layers(kv) == 0) return kv;
    bench_must(tkv_freeze_calibration(kv), "tkv_freeze_calibration"); /* resets the count of seen tokens */
    bench_must(tkv_refresh_calibration(kv), "tkv_refresh_calibration");
    return kv;
}

static void measure_collecting(const options *o, const tkv_config *shape, const char *plan, int ctx,
                               const float *values, const float *q) {
    float *out = (float *)bench_alloc((size_t)(shape->model.n_heads * shape->model.head_dim) * sizeof(float));
    double least[STEPS] = {0}, quiet = 0.0, collecting = 0.0, start = bench_seconds(0);
    tkv_config cfg = *shape;
    tkv_cache *kv = NULL;
    set_plan(&cfg, o, plan, ctx);
    if (cfg.model.n_layers > 8) cfg.model.n_layers = 8;
    int runs;
    for (runs = 0; runs < MAX_RUNS && (runs < 3 || bench_seconds(0) - start < 10.0); runs++) {
        fprintf(stderr, "\r%-10s %7d: run %d   ", plan, ctx, runs + 1);
        kv = collecting_cache(kv, &cfg, ctx, values);
        decode(kv, &cfg, values, q, out, least);
    }
    for (int i = 0; i < STEPS;
         i++) { /* token ctx + i; statistics come from positions 15, 31, ... (learn/sample_queries.h) */
        if ((ctx + i) % STEPS == STEPS - 1) collecting = least[i] / cfg.model.n_layers * 1e6;
        else quiet += least[i] / cfg.model.n_layers / (STEPS - 1) * 1e6;
    }
    bench_clear_line();
    printf(o->csv ? "%s,%d,%d,%d,%.3f,%.3f,%.3f\n" : "%-10s %7d %6d %6d %10.2f %10.2f %7.2f%%\n", plan, ctx,
           cfg.model.n_layers, runs, quiet, collecting, 100.0 * (collecting / quiet - 1.0) / (double)STEPS);
    fflush(stdout);
    tkv_destroy(kv);
    free(out);
}

static void measure_group(const options *o, const group *g, bench_memory *memory) {
    const char *ctxs = g->ctxs;
    uint64_t seed = 1;
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 1;
    cfg.model.n_heads = g->heads;
    cfg.model.n_kv_heads = g->kv_heads;
    cfg.model.head_dim = g->dim;
    cfg.host.precise = g->precise;
    const char *isa = bench_isa(&cfg, g->isa);
    bench_must(tkv_validate_config(&cfg, NULL, 0), "shape");
    if (g->queries < 1 || g->threads < 1 || g->threads > BENCH_THREADS)
        bench_fail("--queries: from 1; --threads: 1 to %d", BENCH_THREADS);
    float *values = bench_values(&cfg, &seed);
    float *q = bench_queries(&cfg, g->queries, &seed);
    bench_pool pool;
    bench_pool_begin(&pool, g->threads);
    if (!o->csv) {
        printf("%s: head_dim %d, %d query and %d KV heads, %d quer%s, %d thread%s, %s kernels%s%s\n",
               o->collect_stats ? "collecting statistics" : "attention", g->dim, g->heads, g->kv_heads,
               g->queries, g->queries == 1 ? "y" : "ies", g->threads, g->threads == 1 ? "" : "s", isa,
               g->precise ? ", precise" : "", o->huge ? ", huge pages" : "");
        if (o->collect_stats)
            printf("%-10s %7s %6s %6s %10s %10s %8s\n", "format", "ctx", "layers", "runs", "quiet us",
                   "collecting", "more");
        else
            printf("%-10s %7s %8s %8s %8s %8s %7s %7s %9s %9s %5s %6s\n", "format", "ctx", "bytes", "ns",
                   "best ns", "GB/s", "read", "share", "error", "own", "runs", "layers");
    }
    char ctx[32];
    char plan[32];
    while (bench_word(&ctxs, ctx, sizeof ctx))
        for (const char *formats = g->formats; bench_word(&formats, plan, sizeof plan);) {
            if (atoi(ctx) <= g->queries) bench_fail("too few tokens: \"%s\"", ctx);
            if (o->collect_stats) measure_collecting(o, &cfg, plan, atoi(ctx), values, q);
            else measure(o, g, &cfg, plan, atoi(ctx), values, q, memory, &pool);
        }
    if (!o->csv) printf("\n");
    bench_pool_end(&pool);
    free(values);
    free(q);
}

int main(int argc, char **argv) {
    static const char *const one[] = {"formats", "ctx",     "heads", "kv-heads", "dim",
                                      "queries", "threads", "isa",   "precise",  "listen"};
    const char *formats = bench_option(argc, argv, "formats"), *ctxs = bench_option(argc, argv, "ctx");
    int single = 0;
    options o;
    o.csv = bench_option(argc, argv, "csv") != NULL;
    o.huge = bench_option(argc, argv, "huge") != NULL;
    o.collect_stats = bench_option(argc, argv, "listen") != NULL;
    o.bytes = (size_t)bench_number(argc, argv, "mib", 96) << 20;
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) single |= bench_option(argc, argv, one[i]) != NULL;
    tkv_config cfg;
    bench_config(&cfg, argc, argv);
    group g;
    g.heads = cfg.model.n_heads;
    g.kv_heads = cfg.model.n_kv_heads;
    g.dim = cfg.model.head_dim;
    g.precise = cfg.host.precise;
    g.isa = tkv_get_name(TKV_NAME_ISA, cfg.host.isa);
    g.queries = bench_number(argc, argv, "queries", 1);
    g.threads = bench_number(argc, argv, "threads", 1);
    g.formats = formats ? formats : o.collect_stats ? "tiers,a20/r15" : groups[0].formats;
    g.ctxs = ctxs ? ctxs : o.collect_stats ? "500,4096,32768" : groups[0].ctxs;
    fprintf(stderr, "memory ...");
    bench_memory memory;
    bench_memory_begin(&memory, o.collect_stats ? 64 : (size_t)512 << 20);
    bench_clear_line();
    if (o.csv)
        printf(o.collect_stats
                   ? "format,ctx,layers,runs,quiet_us,collecting_us,more_percent\n"
                   : "heads,kv_heads,dim,queries,threads,isa,precise,format,ctx,bytes,ns,best_ns,gb_s,"
                     "read_gb_s,share_percent,error,own_error,runs,layers\n");
    if (single) measure_group(&o, &g, &memory);
    else
        for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
            if (strcmp(groups[i].isa, "avx2") != 0 || bench_isa_available(TKV_ISA_AVX2))
                measure_group(&o, &groups[i], &memory);
    free(memory.p);
    return 0;
}
