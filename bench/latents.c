/*
 * latents.c - measures attention on latents (V inside K, 576 and 512 channels) as one call and as two parts on two
 * threads (tkv_attend_part). One sequence of 16,384 tokens, one query.
 *
 * cc -O2 bench/latents.c examples/tieredkv.c -o latents -lm -pthread && ./latents [format ...]
 *
 *   call         tkv_attend_ex, ms
 *   two parts    from the start of both until the last one has merged, ms; threads wait at a barrier
 *   bits         "same": both give the same output
 *   workspace    of the parts, in MB
 * Times are the least of all runs.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* pthread_barrier_t, clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

#include <pthread.h>

enum { TOKENS = 16384, CHUNK = 512, DIM = 576, V_DIM = 512, MAX_HEADS = 128, RUNS = 40 };

typedef struct helper { /* a thread that computes part 1 */
    tkv_cache *kv;
    tkv_attend_params p;
    void *workspace;
    size_t bytes;
    pthread_barrier_t begin, end;
} helper;

static void *help(void *arg) {
    helper *h = (helper *)arg;
    for (int run = 0; run < RUNS; run++) {
        pthread_barrier_wait(&h->begin);
        bench_must(tkv_attend_part(h->kv, &h->p, 1, 2, h->workspace, h->bytes), "tkv_attend_part");
        pthread_barrier_wait(&h->end);
    }
    return NULL;
}

static double least_of(double least, double seconds) {
    return least > 0.0 && least < seconds ? least : seconds;
}

static void measure(const char *format, int heads) {
    static float rows[CHUNK * DIM], q[MAX_HEADS * DIM], out[MAX_HEADS * V_DIM], out2[MAX_HEADS * V_DIM];
    tkv_config cfg = tkv_default_config();
    uint64_t seed = 1;
    double call = 0.0, parts = 0.0;
    pthread_t thread;
    helper h;
    memset(&h, 0, sizeof h);
    cfg.model.n_layers = 1;
    cfg.model.n_heads = heads;
    cfg.model.n_kv_heads = 1;
    cfg.model.head_dim = DIM;
    cfg.model.v_head_dim = V_DIM;
    cfg.model.v_in_k = 1;
    cfg.model.rope.dim = TKV_OFF;
    cfg.tiers.warm.k = cfg.tiers.archive.k = bench_format_named(format);
    cfg.tiers.warm.v = cfg.tiers.archive.v = TKV_FORMAT_DEFAULT;
    bench_must(tkv_create(&cfg, &h.kv), "tkv_create");
    for (int t = 0; t < TOKENS; t += CHUNK) {
        bench_fill(&seed, rows, CHUNK * DIM);
        bench_must(tkv_append(h.kv, 0, 0, rows, NULL, CHUNK), "tkv_append");
    }
    bench_fill(&seed, q, (size_t)(heads * DIM));
    h.p.n = 1;
    h.p.q = q;
    h.p.out = out;
    for (int run = 0; run < RUNS; run++) {
        const double start = bench_seconds(0);
        bench_must(tkv_attend_ex(h.kv, &h.p), "tkv_attend_ex");
        call = least_of(call, bench_seconds(0) - start);
    }
    h.p.out = out2;
    bench_must(tkv_get_attend_bytes(h.kv, &h.p, &h.bytes), "tkv_get_attend_bytes");
    if (!(h.workspace = calloc(1, h.bytes))) bench_fail("no memory");
    pthread_barrier_init(&h.begin, NULL, 2);
    pthread_barrier_init(&h.end, NULL, 2);
    if (pthread_create(&thread, NULL, help, &h)) bench_fail("no thread");
    for (int run = 0; run < RUNS; run++) {
        const double start = bench_seconds(0);
        pthread_barrier_wait(&h.begin);
        bench_must(tkv_attend_part(h.kv, &h.p, 0, 2, h.workspace, h.bytes), "tkv_attend_part");
        pthread_barrier_wait(&h.end);
        parts = least_of(parts, bench_seconds(0) - start);
    }
    pthread_join(thread, NULL);
    printf("%-8s %6d %8.2f %10.2f %8s %10.2f\n", format, heads, 1e3 * call, 1e3 * parts,
           memcmp(out, out2, (size_t)(heads * V_DIM) * sizeof *out) ? "OTHER" : "same",
           (double)h.bytes / 1e6);
    fflush(stdout);
    free(h.workspace);
    tkv_destroy(h.kv);
}

int main(int argc, char **argv) {
    static const char *const formats[] = {"a30", "kivi4", "q8", "f16"};
    printf("%-8s %6s %8s %10s %8s %10s\n", "format", "heads", "call", "two parts", "bits", "workspace");
    for (int heads = 16; heads <= MAX_HEADS; heads *= 8) {
        for (int i = 1; i < argc; i++) measure(argv[i], heads);
        for (int i = 0; argc < 2 && i < 4; i++) measure(formats[i], heads);
    }
    return 0;
}
