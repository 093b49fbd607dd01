/*
 * threads.h - what the three examples of threads share: a cache with a long context, one decode step of attention, and
 * the comparison of the answers. The threads themselves are in threads_openmp.c, threads_std.cpp and threads_queue.c.
 */
#ifndef THREADS_H
#define THREADS_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#endif

#include "../tieredkv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TOKENS = 16384, CHUNK = 512, HEADS = 16, KV_HEADS = 4, DIM = 128, STEPS = 200 };

typedef struct example {
    tkv_cache *kv;
    float *q, *out, *whole; /* [HEADS][DIM]; whole: the answer of tkv_attend_ex */
    tkv_attend_params call;
    void *workspace;
    size_t bytes;
} example;

static inline void check(tkv_status status) {
    if (status == TKV_OK) return;
    fprintf(stderr, "%s\n", tkv_get_status_text(status));
    exit(1);
}

static inline float *make_floats(int n) { /* random numbers stand in for a model */
    float *x = (float *)malloc((size_t)n * sizeof *x);
    int i;
    if (!x) exit(1);
    for (i = 0; i < n; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return x;
}

static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef tkv_status (*append_function)(void *user, tkv_cache *kv, const tkv_append_params *p);

static inline tkv_status append_whole(void *user, tkv_cache *kv, const tkv_append_params *p) {
    (void)user;
    return tkv_append_ex(kv, p);
}

/* Makes a cache with the prompt, chunk by chunk. seconds: that the appends took. */
static inline tkv_cache *make_prompt(append_function append, void *user, double *seconds) {
    tkv_config cfg = tkv_default_config();
    tkv_append_params p;
    tkv_cache *kv;
    int i;
    cfg.model.n_layers = 1;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    check(tkv_create(&cfg, &kv));
    memset(&p, 0, sizeof p);
    p.n = CHUNK;
    srand(1); /* each time the same prompt */
    for (i = 0, *seconds = 0.0; i < TOKENS; i += CHUNK) {
        float *k = make_floats(CHUNK * KV_HEADS * DIM), *v = make_floats(CHUNK * KV_HEADS * DIM);
        double start;
        p.k = k;
        p.v = v;
        start = seconds_now();
        check(append(user, kv, &p));
        *seconds += seconds_now() - start;
        free(k);
        free(v);
    }
    return kv;
}

static inline example begin_example(void) {
    example e;
    double seconds;
    memset(&e, 0, sizeof e);
    e.kv = make_prompt(append_whole, NULL, &seconds);
    e.q = make_floats(HEADS * DIM);
    e.out = make_floats(HEADS * DIM);
    e.whole = make_floats(HEADS * DIM);
    e.call.n = 1;
    e.call.q = e.q;
    e.call.out = e.whole;
    check(tkv_attend_ex(e.kv, &e.call));
    e.call.out = e.out;
    /* One workspace serves all calls of this shape and length. Its first 128 bytes are 0 before a call, and after it. */
    check(tkv_get_attend_bytes(e.kv, &e.call, &e.bytes));
    e.workspace = calloc(1, e.bytes);
    if (!e.workspace) exit(1);
    printf("%d tokens, %d query heads, %d KV heads of %d channels; a workspace of %.0f KB\n", TOKENS, HEADS,
           KV_HEADS, DIM, (double)e.bytes / 1e3);
    return e;
}

/* Prints the time of a step, and whether the answer has the bits of the call without parts. */
static inline int report_steps(const example *e, const char *how, int n_parts, double seconds) {
    const int same = memcmp(e->out, e->whole, HEADS * DIM * sizeof *e->out) == 0;
    printf("%s, %d parts: %.0f us a step, %s\n", how, n_parts, 1e6 * seconds / (double)STEPS,
           same ? "the same bits as one call" : "OTHER BITS THAN ONE CALL");
    return !same;
}

static inline void end_example(example *e) {
    tkv_destroy(e->kv);
    free(e->q);
    free(e->out);
    free(e->whole);
    free(e->workspace);
}

#endif /* THREADS_H */
