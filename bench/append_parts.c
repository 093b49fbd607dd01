/*
 * append_parts.c - measures appends in parts (tkv_append_part): a prompt of 16,384 tokens in chunks of 512, one layer
 * with 8 KV heads of 128 channels.
 *
 * cc -O2 bench/append_parts.c examples/tieredkv.c -o append_parts -lm -pthread && ./append_parts [plan ...]
 *
 * Plans are those of bench_plan in bench.h; without one, tiers and kivi.
 *   whole        tkv_append_ex, ms of the prompt
 *   shared       two parts on one thread: the first one encodes what is due
 *   rest         the second one, the last to end, appends
 *   two threads  two parts at the same time. A thread that waits yields
 *   workspace    the largest, in MB
 * Every run does the same work, so each append counts with its least time of all runs.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

#include <pthread.h>
#include <sched.h>

enum { TOKENS = 16384, CHUNK = 512, KV_HEADS = 8, DIM = 128, RUNS = 25, APPENDS = TOKENS / CHUNK, WAYS = 4 };

typedef struct helper { /* a thread that computes part 1 of each append */
    tkv_cache *kv;
    const tkv_append_params *p;
    void *workspace;
    size_t bytes;
    int begun, ended; /* appends; atomic */
} helper;

static void *help(void *arg) {
    helper *h = (helper *)arg;
    for (int i = 1; i <= APPENDS; i++) {
        while (__atomic_load_n(&h->begun, __ATOMIC_ACQUIRE) < i) sched_yield();
        bench_must(tkv_append_part(h->kv, h->p, 1, 2, h->workspace, h->bytes), "tkv_append_part");
        __atomic_store_n(&h->ended, i, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* Appends the prompt once, in run `run`. way: 0 as a whole, 1 parts one after the other, 3 parts at the same time. */
static void append_prompt(const tkv_config *cfg, const float *rows, int way, int run,
                          double least[WAYS][APPENDS], helper *h, size_t *most) {
    tkv_append_params p;
    pthread_t thread;
    memset(&p, 0, sizeof p);
    bench_must(tkv_create(cfg, &h->kv), "tkv_create");
    h->p = &p;
    h->begun = h->ended = 0;
    p.n = CHUNK;
    if (way == 3 && pthread_create(&thread, NULL, help, h)) bench_fail("no thread");
    for (int i = 0; i < APPENDS; i++) {
        double start = bench_seconds(0), between;
        p.k = rows + (size_t)i * CHUNK * KV_HEADS * DIM;
        p.v = rows + (size_t)(APPENDS - 1 - i) * CHUNK * KV_HEADS * DIM;
        if (way == 0) {
            bench_must(tkv_append_ex(h->kv, &p), "tkv_append_ex");
            bench_keep_least(&least[0][i], bench_seconds(0) - start, run);
            continue;
        }
        bench_must(tkv_get_append_bytes(h->kv, &p, &h->bytes), "tkv_get_append_bytes");
        if (h->bytes > *most) *most = h->bytes;
        if (way == 3) __atomic_store_n(&h->begun, i + 1, __ATOMIC_RELEASE);
        bench_must(tkv_append_part(h->kv, &p, 0, 2, h->workspace, h->bytes), "tkv_append_part");
        between = bench_seconds(0);
        if (way == 1) bench_must(tkv_append_part(h->kv, &p, 1, 2, h->workspace, h->bytes), "tkv_append_part");
        else
            while (__atomic_load_n(&h->ended, __ATOMIC_ACQUIRE) <= i) sched_yield();
        if (way == 1) bench_keep_least(&least[1][i], between - start, run);
        bench_keep_least(&least[way == 1 ? 2 : 3][i], bench_seconds(0) - (way == 1 ? between : start), run);
    }
    if (way == 3) pthread_join(thread, NULL);
    tkv_destroy(h->kv);
}

static void measure(const char *plan, const float *rows, void *workspace) {
    static double least[WAYS][APPENDS];
    double sum[WAYS] = {0.0};
    tkv_config cfg = tkv_default_config();
    size_t most = 0;
    helper h;
    memset(least, 0, sizeof least);
    memset(&h, 0, sizeof h);
    h.workspace = workspace;
    cfg.model.n_layers = 1;
    cfg.model.n_heads = 4 * KV_HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    if (!bench_plan(&cfg, plan)) bench_fail("unknown plan \"%s\", or not for this shape", plan);
    for (int run = 0; run < RUNS; run++) {
        append_prompt(&cfg, rows, 0, run, least, &h, &most);
        append_prompt(&cfg, rows, 1, run, least, &h, &most);
        append_prompt(&cfg, rows, 3, run, least, &h, &most);
    }
    for (int w = 0; w < WAYS; w++)
        for (int i = 0; i < APPENDS; i++) sum[w] += 1e3 * least[w][i];
    printf("%-8s %8.1f %8.1f %8.1f %12.1f %10.2f\n", plan, sum[0], sum[1], sum[2], sum[3],
           (double)most / 1e6);
}

int main(int argc, char **argv) {
    const size_t n = (size_t)TOKENS * KV_HEADS * DIM;
    float *rows = (float *)bench_alloc(n * sizeof *rows);
    void *workspace = calloc(1, (size_t)16 << 20);
    if (!workspace) return 1;
    for (size_t i = 0; i < n; i++) rows[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    printf("%-8s %8s %8s %8s %12s %10s\n", "plan", "whole", "shared", "rest", "two threads", "workspace");
    for (int i = 1; i < argc; i++) measure(argv[i], rows, workspace);
    if (argc < 2) measure("tiers", rows, workspace);
    if (argc < 2) measure("kivi", rows, workspace);
    free(rows);
    free(workspace);
    return 0;
}
