/*
 * attend.c - the speed of attention on caches of each format: one query, one thread, cold keys and values.
 *
 * cc -O2 bench/attend.c -o attend -lm && ./attend
 *
 *   --ctx 4096,32768,262144    tokens
 *   --formats f32,kivi4,tiers  names of formats; "tiers" is the default plan
 *   --heads 32 --kv-heads 8 --dim 128 --queries 1
 *   --isa avx2                 auto, scalar, avx2, avx512, neon, wasm
 *   --mib 96                   a run walks at least so much, over as many layers as that takes
 *   --huge                     Linux: ask for huge pages (an allocator of the caller's can do so)
 *   --csv
 *   --listen                   instead: what collecting statistics for the tables of A and R formats costs
 *
 * Each row first checks its answers against tkv_attend_reference on a short cache of the same shape (column
 * `error`: relative L2). Then a run is one tkv_attend per layer; `ns` is the median over runs, per token and
 * KV head, in thread CPU time. `bytes` is what the tiers hold, metadata included, per token and KV head.
 * `read` is how fast one thread reads 512 MiB just before the row, `share` how much of that the row reaches.
 *
 * --listen: a cache that collects, because it has no tables yet (500 tokens) or after tkv_calibration_refresh,
 * decodes 8 tokens, over and over from the same place. Attention listens to one query in eight; `quiet` is the time
 * of the others per token and layer, append and attend, `listening` of that one, the least of many times;
 * `more` is what it adds to eight tokens. A step of a model has its matrix products besides.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime, madvise */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "bench.h"

#include <math.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

enum { MAX_RUNS = 400, CHUNK = 512 };

typedef struct options {
    int heads, kv_heads, dim, queries, csv, huge;
    size_t bytes;
    tkv_isa isa;
} options;

static void must(tkv_status s, const char *what) {
    if (s == TKV_OK) return;
    fprintf(stderr, "%s: %s\n", what, tkv_status_text(s));
    exit(1);
}

/* >>huge pages: one region for a whole cache, given back at once. */
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
    if (r->p == (unsigned char *)MAP_FAILED || madvise(r->p, n, MADV_HUGEPAGE) != 0) {
        fprintf(stderr, "no huge pages here\n");
        exit(1);
    }
#else
    (void)r;
    (void)n;
    fprintf(stderr, "--huge is for Linux\n");
    exit(1);
#endif
}

static void region_end(region *r) {
#ifdef __linux__
    munmap(r->p, r->n);
#else
    (void)r;
#endif
}

/* A cache that has only this format (sinks and hot tail apart), one for K and one for V as in a30/r20, or the default
 * plan for "tiers". */
static int plan(tkv_config *cfg, const options *o, const char *format, int layers) {
    const char *slash = strchr(format, '/');
    tkv_format f, v = tkv_format_from_name(slash ? slash + 1 : format);
    char k[32];
    snprintf(k, sizeof k, "%.*s", slash ? (int)(slash - format) : (int)strlen(format), format);
    f = tkv_format_from_name(k);
    *cfg = tkv_config_default();
    cfg->n_layers = layers;
    cfg->n_heads = o->heads;
    cfg->n_kv_heads = o->kv_heads;
    cfg->head_dim = o->dim;
    cfg->isa = o->isa;
    if (strcmp(format, "tiers") == 0) return 1;
    if (f == TKV_FORMAT_DEFAULT || v == TKV_FORMAT_DEFAULT) return 0;
    if (f == TKV_F32 || f == TKV_F16 || f == TKV_BF16) {
        cfg->hot.k = cfg->hot.v = f;
        cfg->hot_tokens = TKV_ALL;
    } else {
        cfg->warm.k = cfg->archive.k = f;
        cfg->warm.v = cfg->archive.v = v;
        if (strncmp(format, "kvquant", 7) == 0) cfg->rope.dim = o->dim; /* keys are turned back */
    }
    return 1;
}

/* Appends n tokens to a layer: Gaussian values, one chunk of them over and over, from changing places. The last
 * token comes alone, as in decoding: the chunk before it is then no longer held exact. */
static void append(tkv_cache *kv, const options *o, int layer, int n, const float *values) {
    size_t row = (size_t)(o->kv_heads * o->dim);
    int t, k;
    for (t = 0; t < n; t += k) {
        k = n - t - 1 < CHUNK ? n - t - 1 : CHUNK;
        if (k == 0) k = 1;
        must(tkv_append(kv, 0, layer, values + (size_t)((t / CHUNK * 7 + layer) % CHUNK) * row,
                        values + (size_t)((t / CHUNK * 5 + 3) % CHUNK) * row, k),
             "tkv_append");
    }
}

/* Relative L2 distance from the reference, on 1000 tokens. */
static double check(const options *o, const char *format, const float *values, const float *q) {
    size_t n = (size_t)(o->queries * o->heads * o->dim), i;
    float *a = (float *)bench_alloc(n * sizeof(float)), *b = (float *)bench_alloc(n * sizeof(float));
    double d = 0.0, s = 0.0;
    tkv_attend_params p;
    tkv_config cfg;
    tkv_cache *kv;
    plan(&cfg, o, format, 1);
    must(tkv_create(&cfg, &kv), "tkv_create");
    append(kv, o, 0, 1000, values);
    memset(&p, 0, sizeof p);
    p.n = o->queries;
    p.q = q;
    p.out = a;
    must(tkv_attend_ex(kv, &p), "tkv_attend_ex");
    p.out = b;
    must(tkv_attend_reference(kv, &p), "tkv_attend_reference");
    for (i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        s += (double)b[i] * (double)b[i];
    }
    tkv_destroy(kv);
    free(a);
    free(b);
    return sqrt(d / s);
}

static void measure(const options *o, const char *format, int ctx, const float *values, const float *q,
                    bench_memory *memory) {
    size_t n = (size_t)(o->queries * o->heads * o->dim);
    float *out = (float *)bench_alloc(n * sizeof(float));
    double run[MAX_RUNS], error, bandwidth, bytes, ns, spent = 0.0;
    tkv_memory_info info;
    tkv_config cfg;
    tkv_cache *kv;
    region huge;
    int layer, layers, runs = 0, i;
    fprintf(stderr, "\r%-10s %7d: check   ", format, ctx);
    error = check(o, format, values, q);
    plan(&cfg, o, format, 1);
    must(tkv_estimate(&cfg, ctx, 1, &info), "tkv_estimate");
    layers = (int)(o->bytes / info.total) + 1;
    plan(&cfg, o, format, layers);
    if (o->huge) {
        region_begin(&huge, (size_t)layers * (info.total + info.total / 4) + ((size_t)64 << 20));
        cfg.allocator.user = &huge;
        cfg.allocator.alloc = region_alloc;
        cfg.allocator.release = region_release;
    }
    must(tkv_create(&cfg, &kv), "tkv_create");
    for (layer = 0; layer < layers; layer++) {
        fprintf(stderr, "\r%-10s %7d: fill %d/%d   ", format, ctx, layer + 1, layers);
        append(kv, o, layer, ctx, values);
    }
    must(tkv_memory(kv, &info), "tkv_memory");
    bytes = 0.0;
    for (i = 0; i < TKV_TIER_COUNT; i++) bytes += (double)(info.tier[i].codes + info.tier[i].metadata);
    bytes /= (double)layers * (double)ctx * (double)o->kv_heads;
    fprintf(stderr, "\r%-10s %7d: measure        ", format, ctx);
    bandwidth = bench_bandwidth(memory);
    while (runs < MAX_RUNS && (runs < 7 || (spent < 1.0 && runs < 101))) {
        double t = bench_seconds(1);
        for (layer = 0; layer < layers; layer++)
            must(tkv_attend(kv, 0, layer, q, o->queries, out), "tkv_attend");
        t = bench_seconds(1) - t;
        spent += t;
        run[runs++] = t / ((double)layers * (double)ctx * (double)o->kv_heads) * 1e9;
    }
    ns = bench_median(run, runs);
    fprintf(stderr, "\r%40s\r", "");
    printf(o->csv ? "%s,%d,%.1f,%.2f,%.2f,%.2f,%.1f,%.1f,%.2e,%d,%d\n"
                  : "%-10s %7d %8.1f %8.2f %8.2f %8.2f %7.1f %6.1f%% %10.1e %5d %6d\n",
           format, ctx, bytes, ns, run[0], bytes / ns, bandwidth * 1e-9,
           100.0 * bytes / ns / (bandwidth * 1e-9), error, runs, layers);
    fflush(stdout);
    tkv_destroy(kv);
    if (o->huge) region_end(&huge);
    free(out);
}

/* >>listening */
enum { STEPS = 8 };

/* The least seconds of each of STEPS tokens so far. They are taken away again: the cache stays as it was. */
static void decode(tkv_cache *kv, const options *o, int layers, const float *values, const float *q,
                   float *out, double *least) {
    const size_t row = (size_t)(o->kv_heads * o->dim);
    int i, layer;
    must(tkv_begin(kv, 0), "tkv_begin");
    for (i = 0; i < STEPS; i++) {
        double t = bench_seconds(1);
        for (layer = 0; layer < layers; layer++) {
            must(tkv_append(kv, 0, layer, values + (size_t)i * row, values + (size_t)(i + 9) * row, 1),
                 "tkv_append");
            must(tkv_attend(kv, 0, layer, q, 1, out), "tkv_attend");
        }
        t = bench_seconds(1) - t;
        if (least[i] <= 0.0 || t < least[i]) least[i] = t;
    }
    must(tkv_abort(kv, 0), "tkv_abort");
}

/* A cache that listens: afresh, since it has seen too little for tables, or again. */
static tkv_cache *listening_cache(tkv_cache *kv, const tkv_config *cfg, const options *o, int ctx,
                                  const float *values) {
    int layer;
    if (!kv || tkv_calibrated_layers(kv) == 0) {
        tkv_destroy(kv);
        must(tkv_create(cfg, &kv), "tkv_create");
        for (layer = 0; layer < cfg->n_layers; layer++) append(kv, o, layer, ctx, values);
    }
    if (tkv_calibrated_layers(kv) == 0) return kv;
    must(tkv_calibration_freeze(kv), "tkv_calibration_freeze"); /* forgets how much it has seen since */
    must(tkv_calibration_refresh(kv), "tkv_calibration_refresh");
    return kv;
}

static void measure_listening(const options *o, const char *format, int ctx, const float *values,
                              const float *q) {
    float *out = (float *)bench_alloc((size_t)(o->heads * o->dim) * sizeof(float));
    double least[STEPS] = {0, 0, 0, 0, 0, 0, 0, 0}, quiet = 0.0, listening = 0.0, start = bench_seconds(0);
    tkv_memory_info info;
    tkv_config cfg;
    tkv_cache *kv = NULL;
    int layers, runs, i;
    plan(&cfg, o, format, 1);
    must(tkv_estimate(&cfg, ctx, 1, &info), "tkv_estimate");
    layers = (int)(o->bytes / info.total) + 1;
    plan(&cfg, o, format, layers > 8 ? 8 : layers);
    layers = cfg.n_layers;
    for (runs = 0; runs < MAX_RUNS && (runs < 3 || bench_seconds(0) - start < 10.0); runs++) {
        fprintf(stderr, "\r%-10s %7d: run %d   ", format, ctx, runs + 1);
        kv = listening_cache(kv, &cfg, o, ctx, values);
        decode(kv, o, layers, values, q, out, least);
    }
    for (i = 0; i < STEPS; i++) { /* token ctx + i; learn.h says which ones count */
        if ((ctx + i) % 8 == 7) listening = least[i] / layers * 1e6;
        else quiet += least[i] / layers / (STEPS - 1) * 1e6;
    }
    fprintf(stderr, "\r%40s\r", "");
    printf(o->csv ? "%s,%d,%d,%d,%.3f,%.3f,%.3f\n" : "%-10s %7d %6d %6d %10.2f %10.2f %7.2f%%\n", format, ctx,
           layers, runs, quiet, listening, 100.0 * (listening / quiet - 1.0) / (double)STEPS);
    fflush(stdout);
    tkv_destroy(kv);
    free(out);
}

static void print_head(const options *o, const char *isa, int listen) {
    if (o->csv) {
        printf(listen ? "format,ctx,layers,runs,quiet_us,listening_us,more_percent\n"
                      : "format,ctx,bytes,ns,best_ns,gb_s,read_gb_s,share_percent,error,runs,layers\n");
        return;
    }
    printf("%s: head_dim %d, %d query and %d KV heads, %d quer%s, 1 thread, %s kernels%s\n",
           listen ? "listening" : "attention", o->dim, o->heads, o->kv_heads, o->queries,
           o->queries == 1 ? "y" : "ies", isa, o->huge ? ", huge pages" : "");
    if (listen) {
        printf("microseconds per token and layer, append and attend; more: to eight tokens\n");
        printf("%-10s %7s %6s %6s %10s %10s %8s\n", "format", "ctx", "layers", "runs", "quiet", "listening",
               "more");
    } else {
        printf("per token and KV head; ns: median (best beside it); GB/s of keys and values\n");
        printf("%-10s %7s %8s %8s %8s %8s %7s %7s %10s %5s %6s\n", "format", "ctx", "bytes", "ns", "best",
               "GB/s", "read", "share", "error", "runs", "layers");
    }
}

int main(int argc, char **argv) {
    const char *ctxs = bench_option(argc, argv, "ctx"), *isa = bench_option(argc, argv, "isa"), *formats;
    char ctx[32], format[32];
    uint64_t seed = 1;
    options o;
    bench_memory memory;
    float *values, *q;
    const int listen = bench_option(argc, argv, "listen") != NULL;
    size_t n, i;
    o.heads = bench_number(argc, argv, "heads", 32);
    o.kv_heads = bench_number(argc, argv, "kv-heads", 8);
    o.dim = bench_number(argc, argv, "dim", 128);
    o.queries = bench_number(argc, argv, "queries", 1);
    o.bytes = (size_t)bench_number(argc, argv, "mib", 96) << 20;
    o.csv = bench_option(argc, argv, "csv") != NULL;
    o.huge = bench_option(argc, argv, "huge") != NULL;
    o.isa = TKV_ISA_AUTO;
    if (!isa) isa = "auto";
    for (i = 0; i < TKV_ISA_COUNT && strcmp(isa, tkv_isa_name((tkv_isa)i)) != 0;) i++;
    if (i == TKV_ISA_COUNT || !tkv_isa_available((tkv_isa)i)) {
        fprintf(stderr, "there are no %s kernels here\n", isa);
        return 1;
    }
    o.isa = (tkv_isa)i;
    for (i = TKV_ISA_SCALAR; o.isa == TKV_ISA_AUTO && i < TKV_ISA_COUNT; i++) /* the best, for the title */
        if (tkv_isa_available((tkv_isa)i)) isa = tkv_isa_name((tkv_isa)i);
    if (!ctxs || !*ctxs) ctxs = listen ? "500,4096,32768" : "4096,32768,262144";
    n = (size_t)(2 * CHUNK * o.kv_heads * o.dim);
    values = (float *)bench_alloc(n * sizeof(float));
    bench_fill(&seed, values, n);
    n = (size_t)(o.queries * o.heads * o.dim);
    q = (float *)bench_alloc(n * sizeof(float));
    bench_fill(&seed, q, n);
    fprintf(stderr, "memory ...");
    bench_memory_begin(&memory, listen ? 64 : (size_t)512 << 20);
    fprintf(stderr, "\r%40s\r", "");
    print_head(&o, isa, listen);
    while (bench_word(&ctxs, ctx, sizeof ctx)) {
        formats = bench_option(argc, argv, "formats");
        if (!formats || !*formats)
            formats = listen ? "tiers,a20/r15"
                             : "f32,f16,bf16,q8,kivi4,kivi3,kivi2,a40/r40,a30/r30,a25/r20,a20/r15,tiers";
        while (bench_word(&formats, format, sizeof format)) {
            tkv_config cfg;
            if (atoi(ctx) < 1 || !plan(&cfg, &o, format, 1)) {
                fprintf(stderr, "cannot measure \"%s\" at \"%s\" tokens\n", format, ctx);
                return 1;
            }
            if (listen) measure_listening(&o, format, atoi(ctx), values, q);
            else measure(&o, format, atoi(ctx), values, q, &memory);
        }
    }
    if (!o.csv && !listen)
        printf("one thread reads memory at %.1f to %.1f GB/s\n", memory.least * 1e-9, memory.most * 1e-9);
    free(values);
    free(q);
    free(memory.p);
    return 0;
}
