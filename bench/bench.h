/*
 * bench.h - code that the benchmarks share: clocks, medians, random values, threads, memory bandwidth, options, plans
 * by name, and the check of a plan's results. Include tieredkv.h first.
 */
#ifndef TKV_BENCH_H
#define TKV_BENCH_H

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__GNUC__) || defined(__clang__)
#define BENCH_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define BENCH_PRINTF(fmt, args)
#endif

BENCH_PRINTF(1, 2)
static inline void bench_fail(const char *fmt, ...) { /* prints a message and ends the program */
    va_list ap;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, "\n");
    exit(1);
}

static inline void bench_must(tkv_status s, const char *what) {
    if (s != TKV_OK) bench_fail("%s: %s", what, tkv_get_status_text(s));
}

static inline void bench_clear_line(void) { fprintf(stderr, "\r%60s\r", ""); } /* erases the progress line */

/* >>clocks. cpu 1: CPU time of this thread, if the system has such a clock; other programs disturb it least. */
static inline double bench_seconds(int cpu) {
#if defined(CLOCK_THREAD_CPUTIME_ID) && defined(CLOCK_MONOTONIC)
    struct timespec t;
    clock_gettime(cpu ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#else
    (void)cpu;
    return (double)clock() / (double)CLOCKS_PER_SEC;
#endif
}

/* Keeps the least time of all runs: 0, 1, ... */
static inline void bench_keep_least(double *x, double seconds, int run) {
    if (run == 0 || seconds < *x) *x = seconds;
}

static inline int bench_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static inline double bench_median(double *x, int n) { /* sorts x */
    qsort(x, (size_t)n, sizeof *x, bench_order);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

/* >>values. A seed gives the same values everywhere. */
static inline uint64_t bench_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline double bench_uniform(uint64_t *state) { /* from 0 to 1, without 1 */
    return (double)(bench_random(state) >> 11) / 9007199254740992.0;
}

/* Mean 0, standard deviation 1: the sum of four uniform numbers. */
static inline float bench_gauss(uint64_t *state) {
    const uint64_t z = bench_random(state);
    return ((float)(z & 0xffff) + (float)(z >> 16 & 0xffff) + (float)(z >> 32 & 0xffff) + (float)(z >> 48) -
            131070.0f) *
           (1.7320508f / 65536.0f);
}

static inline void bench_fill(uint64_t *state, float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = bench_gauss(state);
}

static inline void *bench_alloc(size_t n) {
    void *p = malloc(n ? n : 1);
    if (!p) bench_fail("out of memory: %lu bytes", (unsigned long)n);
    return p;
}

/* >>threads: a pool for cfg.host.parallel_for. Workers sleep between jobs. The calling thread also works. */
enum { BENCH_THREADS = 64 };

typedef struct bench_pool {
    pthread_mutex_t lock; /* guards all fields below */
    pthread_cond_t begun, finished;
    pthread_t id[BENCH_THREADS];
    tkv_task task;
    void *ctx;
    int threads, n, next, busy, job, quit;
} bench_pool;

static inline void bench_pool_drain(bench_pool *p) { /* call with the lock held */
    while (p->next < p->n) {
        int i = p->next++;
        pthread_mutex_unlock(&p->lock);
        p->task(p->ctx, i);
        pthread_mutex_lock(&p->lock);
    }
}

static inline void *bench_worker(void *user) {
    bench_pool *p = (bench_pool *)user;
    int seen = 0;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->job == seen && !p->quit) pthread_cond_wait(&p->begun, &p->lock);
        if (p->quit) break;
        seen = p->job;
        bench_pool_drain(p);
        if (--p->busy == 0) pthread_cond_signal(&p->finished);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static inline void bench_parallel(void *user, int n, tkv_task task, void *ctx) {
    bench_pool *p = (bench_pool *)user;
    pthread_mutex_lock(&p->lock);
    p->task = task;
    p->ctx = ctx;
    p->n = n;
    p->next = 0;
    p->busy = p->threads - 1;
    p->job++;
    pthread_cond_broadcast(&p->begun);
    bench_pool_drain(p);
    while (p->busy) pthread_cond_wait(&p->finished, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

static inline void bench_pool_begin(bench_pool *p, int threads) {
    memset(p, 0, sizeof *p);
    p->threads = threads;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->begun, NULL);
    pthread_cond_init(&p->finished, NULL);
    for (int i = 1; i < threads; i++)
        if (pthread_create(&p->id[i], NULL, bench_worker, p) != 0) bench_fail("cannot start a thread");
}

static inline void bench_pool_end(bench_pool *p) {
    pthread_mutex_lock(&p->lock);
    p->quit = 1;
    pthread_cond_broadcast(&p->begun);
    pthread_mutex_unlock(&p->lock);
    for (int i = 1; i < p->threads; i++) pthread_join(p->id[i], NULL);
    pthread_cond_destroy(&p->begun);
    pthread_cond_destroy(&p->finished);
    pthread_mutex_destroy(&p->lock);
}

/* >>memory: the bandwidth at which threads read, with AVX2 where available */
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
__attribute__((target("avx2"))) static inline uint64_t bench_read_avx2(const unsigned char *p, size_t n) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i + 128 <= n; i += 128) {
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(const void *)(p + i)));
        b = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(const void *)(p + i + 32)));
        c = _mm256_xor_si256(c, _mm256_loadu_si256((const __m256i *)(const void *)(p + i + 64)));
        d = _mm256_xor_si256(d, _mm256_loadu_si256((const __m256i *)(const void *)(p + i + 96)));
    }
    uint64_t x[4];
    _mm256_storeu_si256((__m256i *)(void *)x,
                        _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
    return x[0] ^ x[1] ^ x[2] ^ x[3];
}
#endif

static inline int bench_isa_available(tkv_isa isa) {
    tkv_build_info build;
    return tkv_get_build(NULL, &build) == TKV_OK && (build.isa_mask >> (int)isa & 1u) != 0;
}

static inline uint64_t bench_read(const unsigned char *p, size_t n) {
    uint64_t x[8] = {0, 0, 0, 0, 0, 0, 0, 0}, y[8];
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    if (bench_isa_available(TKV_ISA_AVX2)) return bench_read_avx2(p, n);
#endif
    for (size_t i = 0; i + 64 <= n; i += 64) {
        memcpy(y, p + i, 64);
        for (size_t j = 0; j < 8; j++) x[j] ^= y[j];
    }
    for (size_t i = 1; i < 8; i++) x[0] ^= x[i];
    return x[0];
}

typedef struct bench_memory {
    unsigned char *p;
    size_t n;
    int parts;
    uint64_t sink[BENCH_THREADS]; /* keeps the compiler from removing the reads */
} bench_memory;

static inline void bench_memory_begin(bench_memory *m, size_t n) {
    memset(m, 0, sizeof *m);
    m->p = (unsigned char *)bench_alloc(n);
    m->n = n;
    for (size_t i = 0; i < n; i += 8) { /* makes the system map real pages instead of the zero page */
        uint64_t x = i * 0x9e3779b97f4a7c15u;
        memcpy(m->p + i, &x, 8);
    }
}

static inline void bench_read_part(void *ctx, int i) {
    bench_memory *m = (bench_memory *)ctx;
    size_t part = m->n / (size_t)m->parts;
    m->sink[i] ^= bench_read(m->p + (size_t)i * part, part);
}

/* Measures bytes per second, the best of five runs: by CPU time of one thread, or by wall time of several. */
static inline double bench_bandwidth(bench_memory *m, bench_pool *pool) {
    double best = 0.0;
    m->parts = pool->threads;
    for (int i = 0; i < 5; i++) {
        double t = bench_seconds(m->parts == 1);
        if (m->parts == 1) bench_read_part(m, 0);
        else bench_parallel(pool, m->parts, bench_read_part, m);
        t = (double)m->n / (bench_seconds(m->parts == 1) - t);
        if (t > best) best = t;
    }
    return best;
}

/* >>options: --name value, or --name alone. Returns the value ("" if alone); NULL: the option is not given. */
static inline const char *bench_option(int argc, char **argv, const char *name) {
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], "--", 2) == 0 && strcmp(argv[i] + 2, name) == 0)
            return i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0 ? argv[i + 1] : "";
    return NULL;
}

static inline int bench_number(int argc, char **argv, const char *name, int default_value) {
    const char *s = bench_option(argc, argv, name);
    return s && *s ? atoi(s) : default_value;
}

/* Copies the next word of a list "a,b,c", cut to size. Returns 0 at the end of the list. */
static inline int bench_word(const char **list, char *word, size_t size) {
    size_t n = strcspn(*list, ","), k = n < size - 1 ? n : size - 1;
    if (!**list) return 0;
    memcpy(word, *list, k);
    word[k] = 0;
    *list += n + ((*list)[n] == ',');
    return 1;
}

/* >>plans */
enum { BENCH_CHUNK = 512 }; /* tokens of an append */

static inline tkv_format bench_format_named(const char *name) { /* TKV_FORMAT_DEFAULT: the name is unknown */
    int value = TKV_FORMAT_DEFAULT;
    (void)tkv_find_name(TKV_NAME_FORMAT, name, &value);
    return (tkv_format)value;
}

static inline tkv_isa bench_isa_of(const tkv_cache *kv) {
    tkv_build_info build;
    return tkv_get_build(kv, &build) == TKV_OK ? build.isa : TKV_ISA_AUTO;
}

static inline int bench_calibrated_layers(const tkv_cache *kv) {
    tkv_calibration_info info;
    return tkv_get_calibration(kv, &info) == TKV_OK ? info.n_calibrated : 0;
}

/* Sets cfg->host.isa by name and returns the name; for "auto", the name of the best instruction set. */
static inline const char *bench_isa(tkv_config *cfg, const char *name) {
    int i = 0;
    while (i < TKV_ISA_COUNT && strcmp(name, tkv_get_name(TKV_NAME_ISA, (tkv_isa)i)) != 0) i++;
    if (i == TKV_ISA_COUNT || !bench_isa_available((tkv_isa)i))
        bench_fail("no %s kernels on this machine", name);
    cfg->host.isa = (tkv_isa)i;
    for (i = TKV_ISA_SCALAR; cfg->host.isa == TKV_ISA_AUTO && i < TKV_ISA_COUNT; i++)
        if (bench_isa_available((tkv_isa)i)) name = tkv_get_name(TKV_NAME_ISA, (tkv_isa)i);
    return name;
}

/* Reads --heads, --kv-heads, --dim, --latents, --isa and --precise into a config of one layer with the default plan.
 * --latents 512: V is the first 512 channels of K. Returns the name of the kernels. */
static inline const char *bench_config(tkv_config *cfg, int argc, char **argv) {
    const char *isa = bench_option(argc, argv, "isa");
    *cfg = tkv_default_config();
    cfg->model.n_layers = 1;
    cfg->model.n_heads = bench_number(argc, argv, "heads", 32);
    cfg->model.n_kv_heads = bench_number(argc, argv, "kv-heads", 8);
    cfg->model.head_dim = bench_number(argc, argv, "dim", 128);
    cfg->model.v_head_dim = bench_number(argc, argv, "latents", 0);
    cfg->model.v_in_k = cfg->model.v_head_dim > 0;
    cfg->host.precise = bench_option(argc, argv, "precise") != NULL;
    return bench_isa(cfg, isa ? isa : "auto");
}

/* Sets a plan by name: "tiers" (the default plan), a preset, one format, or formats of K and V as in a30/r20. A coded
 * format is for the warm and archive tiers. An exact format is for all tokens. Returns 0 for an unknown name. */
static inline int bench_plan(tkv_config *cfg, const char *name) {
    const char *slash = strchr(name, '/');
    tkv_format k, v = bench_format_named(slash ? slash + 1 : name);
    char word[32];
    snprintf(word, sizeof word, "%.*s", slash ? (int)(slash - name) : (int)strlen(name), name);
    k = bench_format_named(word);
    if (strcmp(name, "tiers") == 0) return 1;
    if (tkv_apply_preset(cfg, name) == TKV_OK) return 1;
    if (k == TKV_FORMAT_DEFAULT || v == TKV_FORMAT_DEFAULT) return 0;
    if (k >= TKV_KVQUANT4 && k <= TKV_KVQUANT2) cfg->model.rope.dim = cfg->model.head_dim;
    if (k == TKV_F32 || k == TKV_F16 || k == TKV_BF16) {
        cfg->tiers.hot.k = k;
        cfg->tiers.hot.v = v;
        cfg->tiers.hot_tokens = TKV_UNLIMITED;
    } else {
        cfg->tiers.warm.k = cfg->tiers.archive.k = k;
        cfg->tiers.warm.v = cfg->tiers.archive.v = v;
    }
    return tkv_validate_config(cfg, NULL, 0) == TKV_OK;
}

/* Returns keys or values of 2 * BENCH_CHUNK tokens. A chunk may begin at any of the first BENCH_CHUNK. */
static inline float *bench_values(const tkv_config *cfg, uint64_t *seed) {
    size_t n = 2 * BENCH_CHUNK * (size_t)cfg->model.n_kv_heads * (size_t)cfg->model.head_dim;
    float *x = (float *)bench_alloc(n * sizeof(float));
    bench_fill(seed, x, n);
    return x;
}

static inline float *bench_queries(const tkv_config *cfg, int queries, uint64_t *seed) {
    size_t n = (size_t)queries * (size_t)cfg->model.n_heads * (size_t)cfg->model.head_dim;
    float *x = (float *)bench_alloc(n * sizeof(float));
    bench_fill(seed, x, n);
    return x;
}

/* Appends the next k tokens to a layer of t tokens, from varying offsets of the values. */
static inline void bench_append_at(tkv_cache *kv, const tkv_config *cfg, int layer, int t, int k,
                                   const float *values) {
    size_t row = (size_t)cfg->model.n_kv_heads * (size_t)cfg->model.head_dim;
    bench_must(tkv_append(kv, 0, layer,
                          values + (size_t)((t / BENCH_CHUNK * 7 + t + layer) % BENCH_CHUNK) * row,
                          values + (size_t)((t / BENCH_CHUNK * 5 + t + 3) % BENCH_CHUNK) * row, k),
               "tkv_append");
}

/* Appends n tokens to an empty layer, the last one alone, as in decoding. That last append demotes the blocks of the
 * chunk before it. */
static inline void bench_append(tkv_cache *kv, const tkv_config *cfg, int layer, int n, const float *values) {
    int k;
    for (int t = 0; t < n; t += k) {
        k = n - t - 1 < BENCH_CHUNK ? n - t - 1 : BENCH_CHUNK;
        if (k == 0) k = 1;
        bench_append_at(kv, cfg, layer, t, k, values);
    }
}

static inline double bench_distance(const float *a, const float *b,
                                    size_t n) { /* relative L2 distance of a from b */
    double d = 0.0, s = 0.0;
    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        s += (double)b[i] * (double)b[i];
    }
    return sqrt(d / s);
}

typedef struct bench_error {
    double arithmetic; /* tkv_attend against tkv_attend_reference (double precision) on the same cache */
    double format;     /* that reference against the reference on an F32 cache */
} bench_error;

/* Checks the results of a plan on 1000 tokens of one KV head. Exits if arithmetic adds more than a tenth of the
 * format's own error and more than 1e-6. */
static inline bench_error bench_check(const tkv_config *shape, const char *plan, int queries,
                                      const float *values, const float *q) {
    const int group = shape->model.n_heads / shape->model.n_kv_heads;
    const int v_dim = shape->model.v_head_dim ? shape->model.v_head_dim : shape->model.head_dim;
    size_t n = (size_t)queries * (size_t)(group * v_dim);
    float *out[3];
    bench_error e = {0.0, 0.0};
    for (int i = 0; i < 3; i++) out[i] = (float *)bench_alloc(n * sizeof(float));
    for (int i = 0; i < 2; i++) {
        tkv_config cfg = *shape;
        cfg.model.n_layers = cfg.model.n_kv_heads = 1;
        cfg.model.n_heads = group;
        if (!bench_plan(&cfg, i == 0 ? plan : "f32")) bench_fail("unknown plan \"%s\"", plan);
        tkv_cache *kv;
        bench_must(tkv_create(&cfg, &kv), "tkv_create");
        bench_append(kv, &cfg, 0, 1000, values);
        tkv_attend_params p;
        memset(&p, 0, sizeof p);
        p.n = queries;
        p.q = q;
        p.out = out[2 * i];
        bench_must(tkv_attend_reference(kv, &p), "tkv_attend_reference");
        p.out = out[1];
        if (i == 0) bench_must(tkv_attend_ex(kv, &p), "tkv_attend_ex");
        tkv_destroy(kv);
        if (i == 0) e.arithmetic = bench_distance(out[1], out[0], n);
    }
    e.format = bench_distance(out[0], out[2], n);
    for (int i = 0; i < 3; i++) free(out[i]);
    if (!(e.arithmetic <= 1e-6 || e.arithmetic <= 0.1 * e.format)) {
        bench_clear_line();
        bench_fail("%s: wrong results, %.1e from the reference, format %.1e", plan, e.arithmetic, e.format);
    }
    return e;
}

/* Figures of n times. */
typedef struct bench_spread {
    double mean, median, p90, p99, most; /* in microseconds */
} bench_spread;

static inline bench_spread bench_spread_of(const double *seconds, int n) {
    double *sorted = (double *)bench_alloc((size_t)n * sizeof(double));
    bench_spread s = {0.0, 0.0, 0.0, 0.0, 0.0};
    for (int i = 0; i < n; i++) {
        sorted[i] = seconds[i] * 1e6;
        s.mean += sorted[i] / n;
    }
    s.median = bench_median(sorted, n);
    s.p90 = sorted[n - 1 - n / 10];
    s.p99 = sorted[n - 1 - n / 100];
    s.most = sorted[n - 1];
    free(sorted);
    return s;
}

/* Seconds that reading the clock takes. */
static inline double bench_clock_cost(void) {
    double x[1001];
    for (int i = 0; i < 1001; i++) {
        double t = bench_seconds(1);
        x[i] = bench_seconds(1) - t;
    }
    return bench_median(x, 1001);
}

#endif /* TKV_BENCH_H */
