/*
 * latents.c - measures attention on latents (V inside K, 576 and 512 channels) as one call and as two parts on two
 * threads (tkv_attend_part). One sequence of 16,384 tokens, one query.
 *
 * cc -O2 bench/latents.c examples/tieredkv.c -o latents -lm -pthread && ./latents [format ...]
 *
 *   call         tkv_attend_ex, ms
 *   two parts    from the start of both until the last one has merged, ms; by the pool of bench.h
 *   bits         "same": both give the same output
 *   workspace    of the parts, in MB
 * Times are the least of all runs.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

enum { TOKENS = 16384, CHUNK = 512, DIM = 576, V_DIM = 512, MAX_HEADS = 128, RUNS = 40 };

typedef struct call { /* of attention */
    tkv_cache *kv;
    tkv_attend_params p;
    void *workspace;
    size_t bytes;
} call;

static void run_part(void *ctx, int part) {
    call *c = (call *)ctx;
    bench_must(tkv_attend_part(c->kv, &c->p, part, 2, c->workspace, c->bytes), "tkv_attend_part");
}

static void measure(const char *format, int heads, bench_pool *pool) {
    static float rows[CHUNK * DIM], q[MAX_HEADS * DIM], out[MAX_HEADS * V_DIM], out2[MAX_HEADS * V_DIM];
    tkv_config cfg = tkv_default_config();
    uint64_t seed = 1;
    double whole = 0.0, parts = 0.0;
    call c;
    memset(&c, 0, sizeof c);
    cfg.model.n_layers = 1;
    cfg.model.n_heads = heads;
    cfg.model.n_kv_heads = 1;
    cfg.model.head_dim = DIM;
    cfg.model.v_head_dim = V_DIM;
    cfg.model.v_in_k = 1;
    cfg.model.rope.dim = TKV_OFF;
    cfg.tiers.warm.k = cfg.tiers.archive.k = bench_format_named(format);
    cfg.tiers.warm.v = cfg.tiers.archive.v = TKV_FORMAT_DEFAULT;
    bench_must(tkv_create(&cfg, &c.kv), "tkv_create");
    for (int t = 0; t < TOKENS; t += CHUNK) {
        bench_fill(&seed, rows, CHUNK * DIM);
        bench_must(tkv_append(c.kv, 0, 0, rows, NULL, CHUNK), "tkv_append");
    }
    bench_fill(&seed, q, (size_t)(heads * DIM));
    c.p.n = 1;
    c.p.q = q;
    c.p.out = out;
    for (int run = 0; run < RUNS; run++) {
        const double start = bench_seconds(0);
        bench_must(tkv_attend_ex(c.kv, &c.p), "tkv_attend_ex");
        bench_keep_least(&whole, bench_seconds(0) - start, run);
    }
    c.p.out = out2;
    bench_must(tkv_get_attend_bytes(c.kv, &c.p, &c.bytes), "tkv_get_attend_bytes");
    if (!(c.workspace = calloc(1, c.bytes))) bench_fail("no memory");
    for (int run = 0; run < RUNS; run++) {
        const double start = bench_seconds(0);
        bench_parallel(pool, 2, run_part, &c);
        bench_keep_least(&parts, bench_seconds(0) - start, run);
    }
    printf("%-8s %6d %8.2f %10.2f %8s %10.2f\n", format, heads, 1e3 * whole, 1e3 * parts,
           memcmp(out, out2, (size_t)(heads * V_DIM) * sizeof *out) ? "OTHER" : "same",
           (double)c.bytes / 1e6);
    fflush(stdout);
    free(c.workspace);
    tkv_destroy(c.kv);
}

int main(int argc, char **argv) {
    bench_pool pool;
    static const char *const formats[] = {"a30", "kivi4", "q8", "f16"};
    printf("%-8s %6s %8s %10s %8s %10s\n", "format", "heads", "call", "two parts", "bits", "workspace");
    bench_pool_begin(&pool, 2);
    for (int heads = 16; heads <= MAX_HEADS; heads *= 8) {
        for (int i = 1; i < argc; i++) measure(argv[i], heads, &pool);
        for (int i = 0; argc < 2 && i < 4; i++) measure(formats[i], heads, &pool);
    }
    bench_pool_end(&pool);
    return 0;
}
