/*
 * bench.h - what the benchmarks share: clocks, medians, random values, the speed of memory, options.
 * Include tieredkv.h first.
 */
#ifndef TKV_BENCH_H
#define TKV_BENCH_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* >>clocks. CPU time of this thread where there is such a clock: neighbours disturb it least. */
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

static inline int bench_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static inline double bench_median(double *x, int n) { /* sorts x */
    qsort(x, (size_t)n, sizeof *x, bench_order);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

/* >>values: mean 0, sd 1, from the sum of four uniforms. The same ones from a seed everywhere. */
static inline float bench_gauss(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return ((float)(z & 0xffff) + (float)(z >> 16 & 0xffff) + (float)(z >> 32 & 0xffff) + (float)(z >> 48) -
            131070.0f) *
           (1.7320508f / 65536.0f);
}

static inline void bench_fill(uint64_t *state, float *x, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) x[i] = bench_gauss(state);
}

static inline void *bench_alloc(size_t n) {
    void *p = malloc(n ? n : 1);
    if (!p) {
        fprintf(stderr, "out of memory: %lu bytes\n", (unsigned long)n);
        exit(1);
    }
    return p;
}

/* >>memory: how fast one thread reads, with the widest vectors there are and nothing else to do. */
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
__attribute__((target("avx2"))) static inline uint64_t bench_read_avx2(const unsigned char *p, size_t n) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    uint64_t x[4];
    size_t i;
    for (i = 0; i + 128 <= n; i += 128) {
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(const void *)(p + i)));
        b = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(const void *)(p + i + 32)));
        c = _mm256_xor_si256(c, _mm256_loadu_si256((const __m256i *)(const void *)(p + i + 64)));
        d = _mm256_xor_si256(d, _mm256_loadu_si256((const __m256i *)(const void *)(p + i + 96)));
    }
    _mm256_storeu_si256((__m256i *)(void *)x,
                        _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
    return x[0] ^ x[1] ^ x[2] ^ x[3];
}
#endif

static inline uint64_t bench_read(const unsigned char *p, size_t n) {
    uint64_t x[8] = {0, 0, 0, 0, 0, 0, 0, 0}, y[8];
    size_t i, j;
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    if (tkv_isa_available(TKV_ISA_AVX2)) return bench_read_avx2(p, n);
#endif
    for (i = 0; i + 64 <= n; i += 64) {
        memcpy(y, p + i, 64);
        for (j = 0; j < 8; j++) x[j] ^= y[j];
    }
    for (i = 1; i < 8; i++) x[0] ^= x[i];
    return x[0];
}

typedef struct bench_memory {
    unsigned char *p;
    size_t n;
    double least, most; /* bytes per second, of all calls so far */
    volatile uint64_t sink;
} bench_memory;

static inline void bench_memory_begin(bench_memory *m, size_t n) {
    size_t i;
    m->p = (unsigned char *)bench_alloc(n);
    m->n = n;
    m->least = m->most = 0.0;
    m->sink = 0;
    for (i = 0; i < n; i += 8) { /* real pages, not the zero page */
        uint64_t x = i * 0x9e3779b97f4a7c15u;
        memcpy(m->p + i, &x, 8);
    }
}

static inline double bench_bandwidth(bench_memory *m) { /* bytes per second now: the best of three */
    double best = 0.0;
    int i;
    for (i = 0; i < 3; i++) {
        double t = bench_seconds(1);
        m->sink = m->sink ^ bench_read(m->p, m->n);
        t = (double)m->n / (bench_seconds(1) - t);
        if (t > best) best = t;
    }
    if (m->least == 0.0 || best < m->least) m->least = best;
    if (best > m->most) m->most = best;
    return best;
}

/* >>options: --name value, or --name alone. NULL, or the value ("" for one alone). */
static inline const char *bench_option(int argc, char **argv, const char *name) {
    int i;
    for (i = 1; i < argc; i++)
        if (strncmp(argv[i], "--", 2) == 0 && strcmp(argv[i] + 2, name) == 0)
            return i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0 ? argv[i + 1] : "";
    return NULL;
}

static inline int bench_number(int argc, char **argv, const char *name, int otherwise) {
    const char *s = bench_option(argc, argv, name);
    return s && *s ? atoi(s) : otherwise;
}

/* The next word of a list "a,b,c" into word (cut to size); 0 at its end. */
static inline int bench_word(const char **list, char *word, size_t size) {
    size_t n = strcspn(*list, ","), k = n < size - 1 ? n : size - 1;
    if (!**list) return 0;
    memcpy(word, *list, k);
    word[k] = 0;
    *list += n + ((*list)[n] == ',');
    return 1;
}

#endif /* TKV_BENCH_H */
