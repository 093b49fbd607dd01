/*
 * test_threads.c - attention with workers: the bits must not depend on them. Run it under -fsanitize=thread.
 *
 * The workers are real threads that take tasks in a random order. A worker takes its next task as soon as it has
 * finished its last.
 */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 600
#endif
#include "../tieredkv.h"
#include "tkv_test.h"

#if !defined(__wasm__)
#include <pthread.h>
#define HAVE_THREADS 1
#else
#define HAVE_THREADS 0
#endif

#if HAVE_THREADS

/* >>workers */
enum {
    TILE_ROWS = 8,
    PREFILL_ROWS = 32
}; /* query rows of a work tile (src/attention/attend.h, kernels/prefill.h) */
enum { MAX_WORKERS = 7, MAX_TASKS = 8192 };

typedef struct workers { /* of one cache; calls may run at the same time */
    pthread_mutex_t lock;
    int n;                 /* threads per call */
    tkv_rng rng;           /* random order of tasks */
    int calls, most_tasks; /* number of calls, most tasks of a call */
} workers;

typedef struct job {
    pthread_mutex_t lock;
    tkv_task task;
    void *ctx;
    int next, n, done;
    int order[MAX_TASKS];
} job;

static void *run_tasks(void *arg) {
    job *j = (job *)arg;
    for (;;) {
        int at;
        pthread_mutex_lock(&j->lock);
        at = j->next < j->n ? j->order[j->next++] : -1;
        pthread_mutex_unlock(&j->lock);
        if (at < 0) return NULL;
        j->task(j->ctx, at);
        pthread_mutex_lock(&j->lock);
        j->done++;
        pthread_mutex_unlock(&j->lock);
    }
}

static void exit_with_message(const char *what) {
    printf("%s\n", what);
    exit(2);
}

static void parallel_for(void *user, int n_tasks, tkv_task task, void *ctx) {
    workers *w = (workers *)user;
    pthread_t thread[MAX_WORKERS];
    job *j = (job *)calloc(1, sizeof *j);
    int i;
    if (!j || n_tasks > MAX_TASKS) exit_with_message("too many tasks");
    pthread_mutex_init(&j->lock, NULL);
    j->task = task;
    j->ctx = ctx;
    j->n = n_tasks;
    pthread_mutex_lock(&w->lock);
    w->calls++;
    if (n_tasks > w->most_tasks) w->most_tasks = n_tasks;
    for (i = 0; i < n_tasks; i++) {
        int at = tkv_rng_below(&w->rng, i + 1);
        j->order[i] = j->order[at];
        j->order[at] = i;
    }
    pthread_mutex_unlock(&w->lock);
    for (i = 0; i < w->n; i++)
        if (pthread_create(&thread[i], NULL, run_tasks, j)) exit_with_message("no thread");
    for (i = 0; i < w->n; i++) pthread_join(thread[i], NULL);
    if (j->done != n_tasks) exit_with_message("tasks were lost");
    pthread_mutex_destroy(&j->lock);
    free(j);
}

static void init_workers(workers *w, int n) {
    memset(w, 0, sizeof *w);
    pthread_mutex_init(&w->lock, NULL);
    w->n = n;
    w->rng = tkv_rng_seed((uint64_t)n);
}

/* >>caches of equal content, with and without workers */
enum { HEADS = 8, KV_HEADS = 2, DK = 32, DV = 24, MAX_ROWS = 50 };

typedef struct contents {
    int tokens[3]; /* tokens of each sequence */
    tkv_format hot, warm, archive;
    int shared;       /* 1: warm and archive have A and R formats, which need tables */
    int meter;        /* 1: the quality meter watches all heads */
    int sample_every; /* cfg.importance.sample_every */
    int offloaded;    /* 1: old blocks are offloaded if there are workers */
} contents;

/* The store of offloaded blocks. */
static uint8_t offload_store[96][80 << 10];

static int write_offloaded(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    (void)user;
    if (key >= 96 || offset + size > sizeof offload_store[0]) return 1;
    memcpy(offload_store[key] + offset, bytes, size);
    return 0;
}

static int read_offloaded(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    (void)user;
    memcpy(bytes, offload_store[key] + offset, size);
    return 0;
}

static tkv_cache *make_filled_cache(const contents *c, workers *w) {
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv = NULL;
    tkv_rng rng = tkv_rng_seed(8);
    float *k, *v;
    int seq, i;
    cfg.model.n_layers = 1;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DK;
    cfg.model.v_head_dim = DV;
    cfg.limits.max_seqs = 3;
    cfg.tiers.hot_tokens = 50;
    cfg.tiers.warm_tokens = 200;
    cfg.tiers.hot.k = cfg.tiers.hot.v = c->hot;
    cfg.tiers.warm.k = cfg.tiers.warm.v = c->warm;
    cfg.tiers.archive.k = cfg.tiers.archive.v = c->archive;
    if (c->shared) {
        cfg.tiers.warm.k = TKV_A40;
        cfg.tiers.warm.v = TKV_R40;
        cfg.tiers.archive.k = TKV_A25;
        cfg.tiers.archive.v = TKV_R15;
    }
    if (c->meter) {
        cfg.meter.heads = KV_HEADS;
        cfg.meter.every = 1;
        cfg.meter.tokens = 512; /* some blocks have no copy */
    }
    cfg.importance.sample_every = c->sample_every;
    cfg.host.isa = tkv_test_isa();
    if (w) {
        cfg.host.parallel_for = parallel_for;
        cfg.host.parallel_user = w;
    }
    if (w && c->offloaded) cfg.offload.write = write_offloaded, cfg.offload.read = read_offloaded;
    if (tkv_create(&cfg, &kv) != TKV_OK) exit_with_message("no cache");
    k = (float *)calloc(100 * KV_HEADS * DK, sizeof(float));
    v = (float *)calloc(100 * KV_HEADS * DV, sizeof(float));
    if (!k || !v) exit_with_message("no memory");
    for (seq = 0; seq < 3; seq++)
        for (i = 0; i < c->tokens[seq]; i += 100) {
            int n = c->tokens[seq] - i < 100 ? c->tokens[seq] - i : 100;
            tkv_rng_fill(&rng, k, (size_t)(n * KV_HEADS * DK), 1.0);
            tkv_rng_fill(&rng, v, (size_t)(n * KV_HEADS * DV), 1.0);
            CHECK_EQ(tkv_append(kv, seq, 0, k, v, n), TKV_OK);
        }
    free(k);
    free(v);
    for (seq = 0; seq < 3 && w && c->offloaded; seq++) {
        CHECK_EQ(tkv_offload(kv, seq, 0, 100, &i), TKV_OK);
        CHECK(seq > 0 || i > 8);
    }
    return kv;
}

/* >>calls: their outputs, with zeros where a call writes nothing */
typedef struct outputs {
    float out[MAX_ROWS * HEADS * DV], lse[MAX_ROWS * HEADS], scores[3 * 3000];
} outputs;

enum { DECODE, DECODE_SCORES, SMALL, PREFILL, BATCH, N_CALLS };

static const char *const call_name[N_CALLS] = {"1 query", "1 query with scores", "5 queries",
                                               "50 queries with scores",
                                               "batch with scores, softcap, window"};

static int prefill_rows = MAX_ROWS; /* fewer in one quick test */

static tkv_status make_call(tkv_cache *kv, int which, const float *q, outputs *o) {
    static const tkv_rows rows[3] = {{1, 9}, {0, 20}, {2, 1}};
    tkv_attend_params p;
    memset(o, 0, sizeof *o);
    memset(&p, 0, sizeof p);
    p.q = q;
    p.out = o->out;
    p.n = which == SMALL ? 5 : which == PREFILL ? prefill_rows : 1;
    p.lse = o->lse;
    if (which != DECODE && which != SMALL) p.scores = o->scores;
    if (which == BATCH) {
        p.batch = rows;
        p.n_batch = 3;
        p.softcap = 4.0f;
        p.window = 500;
        p.score_stride = 3000;
    }
    return tkv_attend_ex(kv, &p);
}

static int is_same_output(const outputs *a, const outputs *b) { return memcmp(a, b, sizeof *a) == 0; }

static int has_nonzero_outputs(const outputs *o) {
    int i, n = 0;
    for (i = 0; i < HEADS * DV; i++) n += o->out[i] != 0.0f;
    return n > HEADS * DV / 2;
}

static const contents many_tiers = {{800, 333, 90}, TKV_F16, TKV_KIVI4, TKV_KIVI2, 0, 0, 0, 0};
static const contents all_exact = {{900, 64, 700}, TKV_F32, TKV_BF16, TKV_F16, 0, 0, 0, 0};
static const contents mixed = {{1900, 1000, 1}, TKV_BF16, TKV_Q8, TKV_KIVI3, 0, 0, 0, 0};
static const contents few_tokens = {{140, 9, 1}, TKV_F32, TKV_F32, TKV_F32, 0, 0, 0, 0};
static const contents shared = {{800, 333, 90}, TKV_F16, TKV_F16, TKV_F16, 1, 0, 0, 0};
static const contents no_table_yet = {{200, 44, 10}, TKV_F16, TKV_F16, TKV_F16, 1, 0, 0, 0};
static const contents metered = {{800, 333, 90}, TKV_F16, TKV_KIVI4, TKV_KIVI2, 0, 1, 0, 0};
static const contents offloaded = {{1200, 333, 90}, TKV_F16, TKV_KIVI4, TKV_KIVI2, 0, 0, 0, 1};
static const contents metered_shared = {{900, 333, 90}, TKV_F32, TKV_F16, TKV_F16, 1, 1, 0, 0};
static const contents scored = {{800, 333, 90}, TKV_F16, TKV_KIVI4, TKV_KIVI2, 0, 0, 3, 0};

static float *make_queries(void) {
    float *q = (float *)calloc(MAX_ROWS * HEADS * DK, sizeof(float));
    tkv_rng rng = tkv_rng_seed(4);
    if (!q) exit_with_message("no memory");
    tkv_rng_fill(&rng, q, MAX_ROWS * HEADS * DK, 1.5);
    return q;
}

static void check_threads(const contents *c) {
    static const int threads[] = {1, 2, 3, 7};
    static outputs serial[N_CALLS], o;
    tkv_cache *plain = make_filled_cache(c, NULL);
    float *q = make_queries();
    int i, which, again;
    for (which = 0; which < N_CALLS; which++) {
        CHECK_EQ(make_call(plain, which, q, &serial[which]), TKV_OK);
        CHECK(has_nonzero_outputs(&serial[which]));
    }
    for (i = 0; i < 4; i++) {
        workers w;
        if (tkv_test_quick() && threads[i] != 3) continue;
        tkv_cache *kv;
        init_workers(&w, threads[i]);
        kv = make_filled_cache(c, &w);
        CHECK_EQ(w.calls, 0);
        for (which = 0; which < N_CALLS; which++) /* the second time, tasks have another order */
            for (again = 0; again < (tkv_test_quick() ? 1 : 2); again++) {
                w.calls = 0;
                CHECK_EQ(make_call(kv, which, q, &o), TKV_OK);
                CHECK_MSG(is_same_output(&o, &serial[which]),
                          "%s, %d threads, %d tokens: output differs from the one without threads",
                          call_name[which], threads[i], c->tokens[0]);
                CHECK_MSG(w.calls > 0, "%s, %d tokens: the workers got no task", call_name[which],
                          c->tokens[0]);
            }
        CHECK_EQ(tkv_check(kv, NULL, 0), TKV_OK);
        tkv_destroy(kv);
        pthread_mutex_destroy(&w.lock);
    }
    tkv_destroy(plain);
    free(q);
}

TEST(threads_many_tiers) { check_threads(&many_tiers); }
TEST(threads_exact) { check_threads(&all_exact); }
TEST(threads_mixed) {
    if (tkv_test_quick()) SKIP("long");
    check_threads(&mixed);
}
TEST(threads_few_tokens) { check_threads(&few_tokens); }
TEST(threads_shared) { check_threads(&shared); }
TEST(threads_offloaded) { check_threads(&offloaded); }

/* A decoding call splits the keys of its only query. Prefill splits the queries. */
TEST(decode_splits_keys_prefill_splits_queries) {
    workers w;
    static outputs o;
    tkv_cache *kv;
    float *q = make_queries();
    init_workers(&w, 3);
    kv = make_filled_cache(&many_tiers, &w);
    CHECK_EQ(make_call(kv, DECODE, q, &o), TKV_OK);
    /* with splits more than the work tiles, which are one for each KV head; without atomics there are no splits */
    CHECK(HAS_ATOMICS ? w.most_tasks > KV_HEADS : w.most_tasks == KV_HEADS);
    CHECK_EQ(w.most_tasks % KV_HEADS, 0);
    w.most_tasks = 0;
    CHECK_EQ(make_call(kv, PREFILL, q, &o), TKV_OK);
    CHECK(w.most_tasks == KV_HEADS * ((MAX_ROWS * HEADS / KV_HEADS + TILE_ROWS - 1) / TILE_ROWS) ||
          w.most_tasks == KV_HEADS * ((MAX_ROWS * HEADS / KV_HEADS + PREFILL_ROWS - 1) / PREFILL_ROWS));
    tkv_destroy(kv);
    pthread_mutex_destroy(&w.lock);
    free(q);
}

/* >>callers side by side on one cache, between writes */
enum { CALLERS = 4, GROWTH = 17 };

typedef struct caller {
    pthread_t thread;
    tkv_cache *kv;
    const float *q;
    const outputs *want;
    outputs *o;
    int number, rounds, tokens, n_wrong, n_errors;
} caller;

static void *run_caller(void *arg) {
    caller *c = (caller *)arg;
    tkv_quality_info quality;
    float k[KV_HEADS * DK], weights[100];
    int i;
    for (i = 0; i < c->rounds; i++) {
        int which = (c->number + i) % N_CALLS;
        tkv_status st;
        c->n_errors += make_call(c->kv, which, c->q, c->o) != TKV_OK;
        c->n_wrong += !is_same_output(c->o, &c->want[which]);
        c->n_errors += tkv_read(c->kv, 0, 0, 40 * i % c->tokens, 1, k, NULL) != TKV_OK;
        st = tkv_get_importance(c->kv, 0, 0, 30 * i % (c->tokens - 99), 100, weights, NULL);
        c->n_errors += st != TKV_OK && st != TKV_ERR_CONFIG; /* no scores are collected */
        c->n_errors += tkv_get_length(c->kv, 0, 0) != c->tokens;
        c->n_errors += tkv_get_quality(c->kv, TKV_ALL_LAYERS, &quality) != TKV_OK || quality.top1 > 1.0;
    }
    return NULL;
}

static void run_callers(tkv_cache *kv, const float *q, const outputs *want, int tokens) {
    static outputs o[CALLERS];
    caller c[CALLERS];
    int i;
    memset(c, 0, sizeof c);
    for (i = 0; i < CALLERS; i++) {
        c[i].kv = kv;
        c[i].q = q;
        c[i].want = want;
        c[i].o = &o[i];
        c[i].number = i;
        c[i].rounds = tkv_test_quick() ? 2 : 2 * N_CALLS;
        c[i].tokens = tokens;
        if (pthread_create(&c[i].thread, NULL, run_caller, &c[i])) exit_with_message("no thread");
    }
    for (i = 0; i < CALLERS; i++) {
        pthread_join(c[i].thread, NULL);
        CHECK_EQ(c[i].n_wrong, 0);
        CHECK_EQ(c[i].n_errors, 0);
    }
}

/* n_workers: threads of parallel_for, or 0. Callers start after a write and are joined before the next. */
static void check_callers(int n_workers) {
    static outputs want[N_CALLS];
    workers w;
    tkv_cache *plain = make_filled_cache(&many_tiers, NULL), *kv;
    float *q = make_queries(), k[GROWTH * KV_HEADS * DK], v[GROWTH * KV_HEADS * DV];
    tkv_rng rng = tkv_rng_seed(17);
    int step, which, tokens = many_tiers.tokens[0];
    init_workers(&w, n_workers);
    kv = make_filled_cache(&many_tiers, n_workers ? &w : NULL);
    for (step = 0; step < (tkv_test_quick() ? 1 : 4); step++) {
        for (which = 0; which < N_CALLS; which++) {
            CHECK_EQ(make_call(plain, which, q, &want[which]), TKV_OK);
            CHECK(has_nonzero_outputs(&want[which]));
        }
        run_callers(kv, q, want, tokens);
        tkv_rng_fill(&rng, k, GROWTH * KV_HEADS * DK, 1.0);
        tkv_rng_fill(&rng, v, GROWTH * KV_HEADS * DV, 1.0);
        CHECK_EQ(tkv_append(kv, 0, 0, k, v, GROWTH), TKV_OK);
        CHECK_EQ(tkv_append(plain, 0, 0, k, v, GROWTH), TKV_OK);
        tokens += GROWTH;
    }
    CHECK(!n_workers || w.calls > 0);
    CHECK_EQ(tkv_check(kv, NULL, 0), TKV_OK);
    tkv_destroy(kv);
    tkv_destroy(plain);
    pthread_mutex_destroy(&w.lock);
    free(q);
}

TEST(concurrent_callers) {
    if (tkv_test_quick()) SKIP("long");
    check_callers(0);
}
TEST(concurrent_callers_with_workers) { check_callers(3); }

/* Learned tables do not depend on workers, nor on the order of concurrent calls. */
enum { TABLE = 8192 };

static size_t save_table(tkv_cache *kv, uint8_t *table) {
    float k[2 * KV_HEADS * DK], v[2 * KV_HEADS * DV];
    size_t bytes = 0;
    memset(k, 0, sizeof k);
    memset(v, 0, sizeof v);
    CHECK_EQ(n_calibrated_layers(kv), 0);
    CHECK_EQ(tkv_append(kv, 1, 0, k, v, 2), TKV_OK); /* the 256th token; the next append makes the table */
    CHECK_EQ(tkv_append(kv, 1, 0, k, v, 1), TKV_OK);
    CHECK_EQ(n_calibrated_layers(kv), 1);
    CHECK_EQ(tkv_save_calibration(kv, table, TABLE, &bytes), TKV_OK);
    return bytes;
}

TEST(tables_do_not_depend_on_threads) {
    static const int threads[] = {1, 2, 3, 7};
    static outputs want[N_CALLS], o;
    static uint8_t first[TABLE], table[TABLE], without_attention[TABLE];
    tkv_cache *plain = make_filled_cache(&no_table_yet, NULL), *kv;
    float *q = make_queries();
    int i, which, round, rounds = tkv_test_quick() ? 2 : 2 * N_CALLS;
    size_t bytes;
    for (round = 0; round < CALLERS * rounds; round++) {
        which = (round / rounds + round % rounds) % N_CALLS; /* the calls that all callers make together */
        CHECK_EQ(make_call(plain, which, q, &want[which]), TKV_OK);
    }
    bytes = save_table(plain, first);
    tkv_destroy(plain);
    /* each call would change the statistics, so each expected output has its own cache */
    for (which = 0; which < N_CALLS; which++) {
        tkv_cache *other = make_filled_cache(&no_table_yet, NULL);
        CHECK_EQ(make_call(other, which, q, &want[which]), TKV_OK);
        tkv_destroy(other);
    }
    kv = make_filled_cache(&no_table_yet, NULL);
    CHECK_EQ(save_table(kv, without_attention), bytes);
    if (HAS_ATOMICS) CHECK(memcmp(first, without_attention, bytes) != 0); /* attention changes the table */
    tkv_destroy(kv);
    for (i = 0; i < 5; i++) {
        workers w;
        init_workers(&w, i < 4 ? threads[i] : 3);
        kv = make_filled_cache(&no_table_yet, &w);
        if (i == 4) {
            run_callers(kv, q, want, no_table_yet.tokens[0]);
        } else {
            for (round = 0; round < CALLERS * rounds; round++)
                CHECK_EQ(make_call(kv, (round / rounds + round % rounds) % N_CALLS, q, &o), TKV_OK);
        }
        CHECK_EQ(save_table(kv, table), bytes);
        CHECK_MEM(table, first, bytes);
        tkv_destroy(kv);
        pthread_mutex_destroy(&w.lock);
    }
    free(q);
}

/* Quality measurements do not depend on threads. Outputs are the same with a meter and without. */
static void check_quality(const contents *c) {
    static const int threads[] = {1, 2, 7};
    static outputs want[N_CALLS], o;
    contents unmetered = *c;
    tkv_cache *plain = make_filled_cache(c, NULL), *without_meter, *kv;
    float *q = make_queries();
    tkv_quality_info first, info;
    int i, which, round, rounds = tkv_test_quick() ? 2 : 2 * N_CALLS;
    unmetered.meter = 0;
    without_meter = make_filled_cache(&unmetered, NULL);
    for (which = 0; which < N_CALLS; which++) {
        CHECK_EQ(make_call(without_meter, which, q, &want[which]), TKV_OK);
        CHECK(has_nonzero_outputs(&want[which]));
    }
    tkv_destroy(without_meter);
    for (round = 0; round < CALLERS * rounds; round++) {
        which = (round / rounds + round % rounds) % N_CALLS; /* the calls that all callers make together */
        CHECK_EQ(make_call(plain, which, q, &o), TKV_OK);
        CHECK(is_same_output(&o, &want[which]));
    }
    memset(&first, 0, sizeof first);
    memset(&info, 0, sizeof info);
    CHECK_EQ(tkv_get_quality(plain, TKV_ALL_LAYERS, &first), TKV_OK);
    CHECK(first.samples > 0 && first.kl > 0.0 && first.coverage > 0.1 && first.coverage < 1.0);
    tkv_destroy(plain);
    for (i = 0; i < 4; i++) {
        workers w;
        init_workers(&w, i < 3 ? threads[i] : 3);
        kv = make_filled_cache(c, &w);
        if (i == 3) {
            run_callers(kv, q, want, c->tokens[0]);
        } else {
            for (round = 0; round < CALLERS * rounds; round++) {
                which = (round / rounds + round % rounds) % N_CALLS;
                CHECK_EQ(make_call(kv, which, q, &o), TKV_OK);
                CHECK(is_same_output(&o, &want[which]));
            }
        }
        CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
        CHECK_MEM(&info, &first, sizeof info);
        CHECK_EQ(tkv_check(kv, NULL, 0), TKV_OK);
        tkv_destroy(kv);
        pthread_mutex_destroy(&w.lock);
    }
    free(q);
}

TEST(quality_does_not_depend_on_threads) {
    NEEDS_ATOMICS;
    check_quality(&metered);
    if (!tkv_test_quick()) check_quality(&metered_shared);
}

/* Attention scores do not depend on threads. Outputs are the same with scores and without. */
TEST(importance_does_not_depend_on_threads) {
    NEEDS_ATOMICS;
    static const int threads[] = {1, 2, 7};
    static outputs want[N_CALLS], o;
    static float first[800], now[800];
    contents unscored = scored;
    tkv_cache *kv = make_filled_cache(&scored, NULL), *without_scores;
    float *q = make_queries();
    int i, which, round, rounds = tkv_test_quick() ? 2 : 2 * N_CALLS;
    unscored.sample_every = 0;
    without_scores = make_filled_cache(&unscored, NULL);
    for (which = 0; which < N_CALLS; which++)
        CHECK_EQ(make_call(without_scores, which, q, &want[which]), TKV_OK);
    tkv_destroy(without_scores);
    for (round = 0; round < CALLERS * rounds; round++) {
        which = (round / rounds + round % rounds) % N_CALLS; /* the calls that all callers make together */
        CHECK_EQ(make_call(kv, which, q, &o), TKV_OK);
        CHECK(is_same_output(&o, &want[which]));
    }
    CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, 800, first, NULL), TKV_OK);
    CHECK(first[10] > .001f); /* such an old token gets no score for its age */
    tkv_destroy(kv);
    for (i = 0; i < 4; i++) {
        workers w;
        init_workers(&w, i < 3 ? threads[i] : 3);
        kv = make_filled_cache(&scored, &w);
        if (i == 3) {
            run_callers(kv, q, want, scored.tokens[0]);
        } else {
            for (round = 0; round < CALLERS * rounds; round++) {
                which = (round / rounds + round % rounds) % N_CALLS;
                CHECK_EQ(make_call(kv, which, q, &o), TKV_OK);
                CHECK(is_same_output(&o, &want[which]));
            }
        }
        CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, 800, now, NULL), TKV_OK);
        CHECK_MEM(now, first, sizeof first);
        CHECK_EQ(tkv_check(kv, NULL, 0), TKV_OK);
        tkv_destroy(kv);
        pthread_mutex_destroy(&w.lock);
    }
    free(q);
}

/* >>quality scores from many threads, while another one requests advice */
enum { SCORE_THREADS = 6, SCORES_EACH = 5000 };

static void *observe_scores(void *arg) {
    tkv_feedback *f = (tkv_feedback *)arg;
    tkv_rng r = tkv_rng_seed(5);
    int n;
    for (n = 0; n < SCORES_EACH; n++) (void)tkv_observe_score(f, (float)(.94 + .06 * tkv_rng_uniform(&r)));
    return NULL;
}

TEST(scores_from_many_threads) {
    NEEDS_ATOMICS;
    pthread_t thread[SCORE_THREADS];
    tkv_feedback f;
    tkv_feedback_info info;
    tkv_advice a;
    int i, n, bad = 0, hot = 64, level = 1, finer = 0, cheaper = 0;
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
    for (i = 0; i < SCORE_THREADS; i++)
        if (pthread_create(&thread[i], NULL, observe_scores, &f)) exit_with_message("no thread");
    for (n = 0; n < 2000; n++) { /* each result must be consistent */
        bad += tkv_get_advice(&f, hot, level, &a) != TKV_OK;
        finer += a.kind == TKV_ADVICE_FINER;
        cheaper += a.kind == TKV_ADVICE_CHEAPER;
        hot = a.hot_tokens;
        level = a.level;
        bad += tkv_get_feedback(&f, 1000, &info) != TKV_OK;
        bad += info.n > 0 && (info.least < .94f || info.least > info.average || info.average > info.most);
        bad += (uint64_t)info.n != (info.scores < 1000 ? info.scores : 1000);
    }
    for (i = 0; i < SCORE_THREADS; i++) CHECK_EQ(pthread_join(thread[i], NULL), 0);
    CHECK_EQ(bad, 0);
    CHECK_EQ(tkv_get_feedback(&f, 0, &info), TKV_OK);
    CHECK_EQ(info.scores, SCORE_THREADS * SCORES_EACH);
    CHECK_EQ(info.finer, finer);
    CHECK_EQ(info.cheaper, cheaper);
}

/* >>memory pressure reported by other threads during appends */
static void *report_pressure(void *user) {
    int i;
    for (i = 0; i < 3000; i++)
        if (tkv_report_pressure((tkv_cache *)user, (float)(i % 100) / 100.0f) != TKV_OK)
            exit_with_message("tkv_report_pressure failed");
    return NULL;
}

TEST(pressure_from_many_threads) {
    NEEDS_ATOMICS;
    static float k[32], v[32];
    pthread_t thread[SCORE_THREADS];
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv = NULL;
    int i, bad = 0;
    cfg.model.n_layers = cfg.model.n_heads = 1;
    cfg.model.head_dim = 32;
    cfg.budget.bytes = 1000 * 1000;
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    for (i = 0; i < SCORE_THREADS; i++)
        if (pthread_create(&thread[i], NULL, report_pressure, kv)) exit_with_message("no thread");
    for (i = 0; i < 1500; i++) bad += tkv_append(kv, 0, 0, k, v, 1) != TKV_OK;
    for (i = 0; i < SCORE_THREADS; i++) CHECK_EQ(pthread_join(thread[i], NULL), 0);
    CHECK_EQ(bad, 0);
    CHECK_EQ(tkv_check(kv, NULL, 0), TKV_OK);
    tkv_destroy(kv);
}

/* >>everything at once: attention, reports, observers and rules from many threads, beside a writer. TKV_SOAK_SECONDS=N
 * goes on for N seconds (make soak). */
enum { ATTENDERS = 8, CROWD_SEQS = 4, MOST_TOKENS = 1500 };

/* A lock for readers or one writer. A writer that waits goes first. */
typedef struct crowd {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int n_readers, is_writing, ends;
    int n_calls; /* of the present version of the cache */
    tkv_cache *kv;
    const float *q;
    outputs want[N_CALLS]; /* of the present version */
    tkv_pressure pressure;
    tkv_feedback feedback;
    long n_versions, n_attended, n_reports, n_observed, n_wrong,
        n_errors; /* totals, when the threads have ended */
} crowd;

typedef struct member { /* a thread */
    pthread_t thread;
    crowd *all;
    int number;
    outputs o;
    long n_done, n_wrong, n_errors;
} member;

/* Returns 0 when it is time to end. */
static int begin_reading(crowd *c) {
    int goes_on;
    pthread_mutex_lock(&c->lock);
    while (c->is_writing) pthread_cond_wait(&c->changed, &c->lock);
    goes_on = !c->ends;
    c->n_readers += goes_on;
    pthread_mutex_unlock(&c->lock);
    return goes_on;
}

static void end_reading(crowd *c, int n_calls) {
    pthread_mutex_lock(&c->lock);
    c->n_readers--;
    c->n_calls += n_calls;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* Waits for so many calls on the present version, and then for all readers. */
static void begin_writing(crowd *c, int n_calls) {
    pthread_mutex_lock(&c->lock);
    while (c->n_calls < n_calls) pthread_cond_wait(&c->changed, &c->lock);
    c->is_writing = 1;
    while (c->n_readers) pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
}

static void end_writing(crowd *c, int ends) {
    pthread_mutex_lock(&c->lock);
    c->is_writing = 0;
    c->ends = ends;
    c->n_calls = 0;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static int is_over(crowd *c) {
    int ends;
    pthread_mutex_lock(&c->lock);
    ends = c->ends;
    pthread_mutex_unlock(&c->lock);
    return ends;
}

/* The first of the calls, in parts. */
static tkv_status decode_in_parts(tkv_cache *kv, const float *q, outputs *o) {
    tkv_attend_params p;
    size_t bytes = 0;
    tkv_status st;
    void *space;
    memset(o, 0, sizeof *o);
    memset(&p, 0, sizeof p);
    p.q = q;
    p.out = o->out;
    p.lse = o->lse;
    p.n = 1;
    st = tkv_get_attend_bytes(kv, &p, &bytes);
    space = calloc(1, bytes + 1);
    if (!space) exit_with_message("no memory");
    for (int part = 2; part >= 0 && !st; part--) st = tkv_attend_part(kv, &p, part, 3, space, bytes);
    free(space);
    return st;
}

static void rest(void) { /* leaves the processor to the others */
    const struct timespec a_while = {0, 200000};
    nanosleep(&a_while, NULL);
}

static void *run_attender(void *arg) {
    member *m = (member *)arg;
    crowd *c = m->all;
    for (int i = m->number; begin_reading(c); i++) {
        const int which = i % N_CALLS, in_parts = which == DECODE && i % 2;
        m->n_errors +=
            (in_parts ? decode_in_parts(c->kv, c->q, &m->o) : make_call(c->kv, which, c->q, &m->o)) != TKV_OK;
        m->n_wrong += !is_same_output(&m->o, &c->want[which]);
        m->n_done++;
        end_reading(c, 1);
    }
    return NULL;
}

static void *run_reporter(void *arg) {
    enum { TEXT = 1 << 17 };
    member *m = (member *)arg;
    crowd *c = m->all;
    char *text = (char *)malloc(TEXT);
    if (!text) exit_with_message("no memory");
    while (begin_reading(c)) {
        const tkv_cache *kv = c->kv;
        const int n = tkv_get_length(kv, 0, 0);
        tkv_memory_info memory;
        tkv_budget_info budget;
        tkv_layer_info layer;
        tkv_seq_memory_info of_seq;
        tkv_quality_info quality;
        float weights[64], k[KV_HEADS * DK];
        uint8_t tiers[64];
        const tkv_status read = tkv_read(c->kv, 0, 0, n - 1, 1, k, NULL);
        m->n_errors += read != TKV_OK;
        m->n_errors += tkv_check(kv, text, TEXT) != TKV_OK;
        m->n_errors += tkv_get_memory(kv, &memory) != TKV_OK || memory.total > memory.peak;
        m->n_errors += tkv_get_budget(kv, &budget) != TKV_OK || budget.used > budget.budget;
        for (int seq = 0; seq < CROWD_SEQS; seq++) {
            m->n_errors += tkv_get_layer(kv, seq, 0, &layer) != TKV_OK;
            m->n_errors += tkv_seq_get_memory(kv, seq, &of_seq) != TKV_OK || of_seq.share > of_seq.shared;
        }
        m->n_errors += tkv_get_tiers(kv, 0, 0, n - 50, 50, tiers) != TKV_OK;
        m->n_errors += tkv_get_importance(c->kv, 0, 0, n - 50, 50, weights, NULL) != TKV_OK;
        m->n_errors += tkv_get_quality(kv, TKV_ALL_LAYERS, &quality) != TKV_OK || quality.top1 > 1.0;
        for (int kind = 0; kind < TKV_REPORT_COUNT; kind++)
            m->n_errors += tkv_print_report(kv, (tkv_report_kind)kind, NULL, text, TEXT, NULL) != TKV_OK;
        m->n_done++;
        end_reading(c, 0);
    }
    free(text);
    return NULL;
}

/* These calls are allowed at any time, also beside a write. */
static void *run_observer(void *arg) {
    member *m = (member *)arg;
    crowd *c = m->all;
    tkv_rng r = tkv_rng_seed(3);
    while (!is_over(c)) {
        const float x = (float)tkv_rng_uniform(&r);
        tkv_pressure_info pressure;
        tkv_feedback_info feedback;
        m->n_errors += tkv_report_pressure(c->kv, .7f * x) != TKV_OK;
        m->n_errors += tkv_observe_pressure(&c->pressure, x) < 0;
        m->n_errors += tkv_get_pressure(&c->pressure, &pressure) != TKV_OK || pressure.last > 1.0f;
        m->n_errors += tkv_observe_score(&c->feedback, .9f + .1f * x) != TKV_OK;
        m->n_errors += tkv_get_feedback(&c->feedback, 100, &feedback) != TKV_OK;
        m->n_done++;
        rest();
    }
    return NULL;
}

/* Rules are pure functions of the caller's arrays. */
static void *run_rules(void *arg) {
    enum { N = 256, KEEP = 100 };
    member *m = (member *)arg;
    crowd *c = m->all;
    tkv_rng r = tkv_rng_seed(4);
    int hot = 64, level = 1;
    while (!is_over(c)) {
        float scores[N], out[N];
        uint64_t victims[N / 64];
        tkv_evict_config evict;
        tkv_evict_view view;
        tkv_evict_result result;
        tkv_advice advice;
        memset(&evict, 0, sizeof evict);
        memset(&view, 0, sizeof view);
        for (int i = 0; i < N; i++) scores[i] = (float)tkv_rng_uniform(&r);
        evict.policy = TKV_EVICT_H2O;
        view.n = N;
        view.total_scores = scores;
        m->n_errors +=
            tkv_select_victims(&evict, &view, KEEP, out, victims, &result) != TKV_OK || result.kept != KEEP;
        m->n_errors += tkv_get_advice(&c->feedback, hot, level, &advice) != TKV_OK;
        hot = advice.hot_tokens;
        level = advice.level;
        m->n_done++;
        rest();
    }
    return NULL;
}

static tkv_status append_random(tkv_cache *kv, int seq, int n, tkv_rng *rng) {
    float k[GROWTH * KV_HEADS * DK], v[GROWTH * KV_HEADS * DV];
    tkv_status st = TKV_OK;
    for (; n > 0 && !st; n -= GROWTH) {
        tkv_rng_fill(rng, k, GROWTH * KV_HEADS * DK, 1.0);
        tkv_rng_fill(rng, v, GROWTH * KV_HEADS * DV, 1.0);
        st = tkv_append(kv, seq, 0, k, v, GROWTH);
    }
    return st;
}

/* Saves sequence 3, and loads it again. */
static tkv_status save_and_load(tkv_cache *kv) {
    tkv_save_params save;
    tkv_load_params load;
    size_t n = 0;
    void *bytes;
    tkv_status st;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    save.seq = load.seq = 3;
    st = tkv_seq_save(kv, &save, NULL, 0, &n);
    bytes = malloc(n + 1);
    if (!bytes) exit_with_message("no memory");
    if (!st) st = tkv_seq_save(kv, &save, bytes, n, NULL);
    if (!st) st = tkv_seq_reset(kv, 3);
    if (!st) st = tkv_seq_load(kv, &load, bytes, n, NULL);
    free(bytes);
    return st;
}

/* One change of the cache. Sequences 0 to 2 keep the tokens that the calls need. */
static void change_crowd(crowd *c, long number, tkv_rng *rng) {
    tkv_cache *kv = c->kv;
    const int seq = (int)(number % 3);
    tkv_status st = TKV_OK;
    tkv_evict_params evict;
    int done;
    memset(&evict, 0, sizeof evict);
    evict.seq = seq;
    evict.keep = 300;
    if (tkv_get_length(kv, seq, 0) > MOST_TOKENS) {
        st = tkv_seq_reset(kv, seq);
        if (!st) st = append_random(kv, seq, 4 * GROWTH, rng);
    }
    CHECK_MSG(st == TKV_OK, "version %ld: %s", number, tkv_get_last_error(kv));
    switch (number % 8) {
    case 1: st = tkv_seq_fork(kv, seq, 3, TKV_UNLIMITED); break;
    case 2: st = tkv_offload(kv, seq, 0, 3, &done); break;
    case 3: st = tkv_get_length(kv, 3, 0) ? save_and_load(kv) : TKV_OK; break;
    case 4: st = tkv_seq_truncate(kv, seq, tkv_get_length(kv, seq, 0) - 3); break;
    case 5: st = tkv_evict(kv, &evict); break;
    case 6: st = tkv_maintain(kv, 8, NULL, NULL, &done); break;
    case 7: st = tkv_adapt_plan(kv, &c->feedback, NULL); break;
    default: break;
    }
    CHECK_MSG(st == TKV_OK || (st == TKV_ERR_IO && number % 8 == 2), "version %ld: %s, %s", number,
              tkv_get_status_text(st), tkv_get_last_error(kv));
    st = append_random(kv, seq, GROWTH * (1 + (int)(number % 4)), rng);
    CHECK_MSG(st == TKV_OK, "version %ld: %s", number, tkv_get_last_error(kv));
    for (int which = 0; which < N_CALLS; which++)
        CHECK_EQ(make_call(kv, which, c->q, &c->want[which]), TKV_OK);
}

static void create_crowd(crowd *c) {
    tkv_config cfg = tkv_default_config();
    memset(c, 0, sizeof *c);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    CHECK_EQ(tkv_init_pressure(&c->pressure, NULL, NULL, 0), TKV_OK);
    CHECK_EQ(tkv_init_feedback(&c->feedback, NULL, NULL, 0), TKV_OK);
    cfg.model.n_layers = 1;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DK;
    cfg.model.v_head_dim = DV;
    cfg.limits.max_seqs = CROWD_SEQS;
    cfg.tiers.hot_tokens = 50;
    cfg.tiers.warm_tokens = 200;
    cfg.budget.bytes = 700 * 1000;
    cfg.evict.policy = TKV_EVICT_H2O;
    cfg.importance.sample_every = 3;
    cfg.meter.heads = KV_HEADS;
    cfg.meter.every = 2;
    cfg.meter.tokens = 256;
    cfg.offload.write = write_offloaded;
    cfg.offload.read = read_offloaded;
    cfg.host.isa = tkv_test_isa();
    if (tkv_create(&cfg, &c->kv) != TKV_OK) exit_with_message("no cache");
}

static double monotonic_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

TEST(everything_at_once) {
    NEEDS_ATOMICS;
    static void *(*const runs[])(void *) = {run_reporter, run_observer, run_rules};
    enum { MEMBERS = ATTENDERS + 3 };
    static crowd c;
    static member members[MEMBERS];
    const char *seconds = getenv("TKV_SOAK_SECONDS");
    const double end = seconds ? monotonic_seconds() + atof(seconds) : 0.0;
    const long versions = tkv_test_quick() ? 9 : 25;
    float *q = make_queries();
    tkv_rng rng = tkv_rng_seed(9);
    create_crowd(&c);
    if (tkv_test_quick()) prefill_rows = 12;
    c.q = q;
    for (int seq = 0; seq < 3; seq++) CHECK_EQ(append_random(c.kv, seq, 20 * GROWTH, &rng), TKV_OK);
    change_crowd(&c, 0, &rng);
    memset(members, 0, sizeof members);
    for (int i = 0; i < MEMBERS; i++) {
        members[i].all = &c;
        members[i].number = i;
        if (pthread_create(&members[i].thread, NULL, i < ATTENDERS ? run_attender : runs[i - ATTENDERS],
                           &members[i]))
            exit_with_message("no thread");
    }
    for (c.n_versions = 1; seconds ? monotonic_seconds() < end : c.n_versions < versions; c.n_versions++) {
        begin_writing(&c, tkv_test_quick() ? 8 : 16);
        change_crowd(&c, c.n_versions, &rng);
        end_writing(&c, 0);
    }
    begin_writing(&c, 1);
    end_writing(&c, 1);
    for (int i = 0; i < MEMBERS; i++) {
        const member *m = &members[i];
        CHECK_EQ(pthread_join(m->thread, NULL), 0);
        CHECK_MSG(m->n_wrong == 0 && m->n_errors == 0, "thread %d: %ld wrong, %ld errors", i, m->n_wrong,
                  m->n_errors);
        if (i < ATTENDERS) c.n_attended += m->n_done;
        else if (i == ATTENDERS) c.n_reports = m->n_done;
        else c.n_observed += m->n_done;
    }
    CHECK(c.n_attended > 0 && c.n_reports > 0 && c.n_observed > 0);
    if (seconds)
        printf("%s s: %ld versions, %ld calls of attention by %d threads, %ld rounds of reports, %ld of "
               "observers; ",
               seconds, c.n_versions, c.n_attended, (int)ATTENDERS, c.n_reports, c.n_observed);
    CHECK_EQ(tkv_check(c.kv, NULL, 0), TKV_OK);
    tkv_destroy(c.kv);
    pthread_cond_destroy(&c.changed);
    pthread_mutex_destroy(&c.lock);
    free(q);
    prefill_rows = MAX_ROWS;
}

#else /* no threads on this platform */
#define NO_THREADS_(name)                                                                                    \
    TEST(name) { SKIP("no threads on this platform"); }
NO_THREADS_(threads_many_tiers)
NO_THREADS_(threads_exact)
NO_THREADS_(threads_mixed)
NO_THREADS_(threads_few_tokens)
NO_THREADS_(threads_shared)
NO_THREADS_(threads_offloaded)
NO_THREADS_(importance_does_not_depend_on_threads)
NO_THREADS_(tables_do_not_depend_on_threads)
NO_THREADS_(quality_does_not_depend_on_threads)
NO_THREADS_(decode_splits_keys_prefill_splits_queries)
NO_THREADS_(concurrent_callers)
NO_THREADS_(concurrent_callers_with_workers)
NO_THREADS_(scores_from_many_threads)
NO_THREADS_(pressure_from_many_threads)
NO_THREADS_(everything_at_once)
#endif

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(threads_many_tiers);
    RUN(threads_exact);
    RUN(threads_mixed);
    RUN(threads_few_tokens);
    RUN(threads_shared);
    RUN(threads_offloaded);
    RUN(decode_splits_keys_prefill_splits_queries);
    RUN(concurrent_callers);
    RUN(concurrent_callers_with_workers);
    RUN(tables_do_not_depend_on_threads);
    RUN(quality_does_not_depend_on_threads);
    RUN(importance_does_not_depend_on_threads);
    RUN(scores_from_many_threads);
    RUN(pressure_from_many_threads);
    RUN(everything_at_once);
    return tkv_test_end();
}
