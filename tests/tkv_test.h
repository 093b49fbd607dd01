/*
 * tkv_test.h - the test frame: it runs tests, prints the values of failed checks, and gives seeded random numbers.
 *
 *     #include "../tieredkv.h"
 *     #include "tkv_test.h"
 *
 *     TEST(lengths) {
 *         CHECK_EQ(1 + 1, 2);
 *     }
 *
 *     int main(int argc, char **argv) {
 *         tkv_test_begin(argc, argv);
 *         RUN(lengths);
 *         return tkv_test_end();
 *     }
 *
 * cc -O2 tests/test_x.c examples/tieredkv.c -o test_x -lm && ./test_x [filter | --list]     from the root of the
 * project
 *
 * Tests use the public interface and link the library, which is compiled once. White-box tests (tests/white_x.c, one
 * for a folder of src) include white.h in the place of tieredkv.h, and call internal functions as well.
 *
 * The filter (or TKV_TEST_FILTER) selects tests whose name contains it. The last line is `N passed, N failed` and
 * counts tests. `, N skipped` follows if tests were skipped. A test without any check fails. Only the thread that
 * runs the test may check: other threads hand their results to it.
 *
 * Environment:
 *     TKV_ISA          auto, scalar, avx2, avx512, neon or wasm: forces the kernels. Tests put tkv_test_isa() into
 *                      cfg.host.isa.
 *     TKV_TEST_FIRST   1: the first failed check ends the program.
 *     TKV_TEST_QUICK   1: slow tests run a smaller version (tkv_test_quick()). Set under emulators.
 *     TKV_TEST_LONG    1: test_model reads all of its text, test_states takes 3.3 GB, test_save saves a growing chat
 *                      10,000 times, test_latents and test_shapes try all pairs of formats with all shapes
 *                      (tkv_test_long()). Set by `EVERY=1 .ci/run` and, for test_model, by `.ci/integrations`.
 *                      test_disk.py tries every call, set by `make soak`.
 *     TKV_SOAK_SECONDS N: test_threads lets readers and a writer run beside each other for N seconds. Set by `make soak`
 *     TKV_DATA         directory of models and texts (tkv_test_data()). Default: ../shared/data
 */
#ifndef TKV_TEST_H
#define TKV_TEST_H

#include "../tieredkv.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef __wasi__ /* clock() needs an extra library there */
#include <time.h>
#endif

enum { TKV_TEST_SHOWN = 10 }; /* failed checks printed per test; more are only counted */

typedef struct tkv_test_state {
    const char *filter;
    int list;                    /* 1: only prints the names of tests */
    int first;                   /* 1: the first failed check ends the program */
    int isa_missing;             /* the instruction set of TKV_ISA is missing, so every test is skipped */
    int passed, failed, skipped; /* tests */
    int n_checks, n_bad;         /* checks, and failed ones, of the running test */
    const char *skip;            /* why the running test is skipped, or NULL */
} tkv_test_state;
static tkv_test_state tkv_test_;

/* >>checks */
#define TEST(name) static void test_##name(void)
#define RUN(name) tkv_test_run_(#name, test_##name)
#define SKIP(why)                                                                                            \
    do {                                                                                                     \
        tkv_test_.skip = (why);                                                                              \
        return;                                                                                              \
    } while (0)

/* Attention collects scores, and the meter measures, only where the compiler has gcc's atomics. */
#if defined(__GNUC__) || defined(__clang__)
#define HAS_ATOMICS 1
#else
#define HAS_ATOMICS 0
#endif
#define NEEDS_ATOMICS                                                                                        \
    if (!HAS_ATOMICS) SKIP("no atomics: no scores of attention, no meter")

#define CHECK(cond) ((void)tkv_test_check_((cond) ? 1 : 0, __FILE__, __LINE__, #cond))
#define REQUIRE(cond) /* CHECK; a failure ends the test */                                                   \
    do {                                                                                                     \
        if (!tkv_test_check_((cond) ? 1 : 0, __FILE__, __LINE__, #cond)) return;                             \
    } while (0)
#define CHECK_MSG(cond, ...) tkv_test_msg_((cond) ? 1 : 0, __FILE__, __LINE__, #cond, __VA_ARGS__)
#define CHECK_EQ(a, b) tkv_test_eq_((long long)(a), (long long)(b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_STR(a, b) tkv_test_str_((a), (b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_MEM(a, b, n) tkv_test_mem_((a), (b), (n), __FILE__, __LINE__, #a " == " #b)
/* Compare numbers as double. NaN always fails, also under -ffast-math. */
#define CHECK_NEAR(a, b, tol)                                                                                \
    tkv_test_near_((double)(a), (double)(b), (double)(tol), __FILE__, __LINE__, #a " ~ " #b)
#define CHECK_LE(a, b) tkv_test_le_((double)(a), (double)(b), __FILE__, __LINE__, #a " <= " #b)

#if defined(__GNUC__) || defined(__clang__)
#define TKV_TEST_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define TKV_TEST_PRINTF(fmt, args)
#endif

#ifdef TKV_TEST_TRACE /* tools/mutate.py: notes which code ran since its last call */
void tkv_test_trace(const char *name);
#endif

/* Counts one check. Returns 1 if the caller must print a failure, after printing where it happened. */
static inline int tkv_test_note_(int ok, const char *file, int line, const char *what) {
    tkv_test_.n_checks++;
    if (ok) return 0;
    if (tkv_test_.n_bad++ == 0) printf("\n");
    if (tkv_test_.n_bad > TKV_TEST_SHOWN) return 0;
    printf("    %s:%d: %s", file, line, what);
    if (tkv_test_.first) exit(1);
    return 1;
}

static inline int tkv_test_check_(int ok, const char *file, int line, const char *what) {
    if (tkv_test_note_(ok, file, line, what)) printf("\n");
    return ok;
}

TKV_TEST_PRINTF(5, 6)
static inline void tkv_test_msg_(int ok, const char *file, int line, const char *what, const char *fmt, ...) {
    if (tkv_test_note_(ok, file, line, what)) {
        va_list ap;
        printf(": ");
        va_start(ap, fmt);
        vprintf(fmt, ap);
        va_end(ap);
        printf("\n");
    }
}

static inline void tkv_test_eq_(long long a, long long b, const char *file, int line, const char *what) {
    if (tkv_test_note_(a == b, file, line, what)) printf(": %lld and %lld\n", a, b);
}

static inline void tkv_test_str_(const char *a, const char *b, const char *file, int line, const char *what) {
    int ok = (a && b) ? strcmp(a, b) == 0 : a == b;
    if (tkv_test_note_(ok, file, line, what))
        printf(": \"%s\" and \"%s\"\n", a ? a : "(null)", b ? b : "(null)");
}

static inline void tkv_test_mem_(const void *a, const void *b, size_t n, const char *file, int line,
                                 const char *what) {
    const unsigned char *x = (const unsigned char *)a, *y = (const unsigned char *)b;
    size_t i = n && memcmp(a, b, n) == 0 ? n : 0; /* fast under a sanitizer, too */
    while (i < n && x[i] == y[i]) i++;
    if (tkv_test_note_(i == n, file, line, what))
        printf(": byte %lu of %lu: 0x%02x and 0x%02x\n", (unsigned long)i, (unsigned long)n, (unsigned)x[i],
               (unsigned)y[i]);
}

static inline float tkv_test_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Tests the bits, because -ffast-math may fold x != x to false. */
static inline int tkv_test_is_nan(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
}
static inline int tkv_test_is_finite(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7ff0000000000000u) != 0x7ff0000000000000u;
}

static inline void tkv_test_near_(double a, double b, double tol, const char *file, int line,
                                  const char *what) {
    int ok = memcmp(&a, &b, sizeof a) == 0; /* equal bits pass, so equal infinities do */
    double d = a > b ? a - b : b - a;
    if (!ok) ok = tkv_test_is_finite(a) && tkv_test_is_finite(b) && d <= tol;
    if (tkv_test_is_nan(a)) ok = 0;
    if (tkv_test_note_(ok, file, line, what))
        printf(": %.9g and %.9g differ by %.3g, allowed %.3g\n", a, b, d, tol);
}

static inline void tkv_test_le_(double a, double b, const char *file, int line, const char *what) {
    int ok = !tkv_test_is_nan(a) && !tkv_test_is_nan(b) && a <= b;
    if (tkv_test_note_(ok, file, line, what)) printf(": %.9g and %.9g\n", a, b);
}

/* >>environment */
static inline int tkv_test_flag_(const char *name) {
    const char *s = getenv(name);
    return s && *s && strcmp(s, "0") != 0;
}
static inline int tkv_test_quick(void) { return tkv_test_flag_("TKV_TEST_QUICK"); }
static inline int tkv_test_long(void) { return tkv_test_flag_("TKV_TEST_LONG"); }
/* A test with many cases takes one of so many: of `quick` in a quick run, of `usual` in a usual one. A long run has all. */
static inline int tkv_test_stride(int quick, int usual) {
    return tkv_test_quick() ? quick : tkv_test_long() ? 1 : usual;
}

/* >>short calls of the public interface */
static inline int is_isa_available(tkv_isa isa) {
    tkv_build_info build;
    return tkv_get_build(NULL, &build) == TKV_OK && (build.isa_mask >> (int)isa & 1u) != 0;
}

static inline int n_calibrated_layers(const tkv_cache *kv) {
    tkv_calibration_info info;
    return tkv_get_calibration(kv, &info) == TKV_OK ? info.n_calibrated : 0;
}

static inline tkv_format find_format(const char *name) { /* TKV_FORMAT_DEFAULT: no format has this name */
    int value = TKV_FORMAT_DEFAULT;
    (void)tkv_find_name(TKV_NAME_FORMAT, name, &value);
    return (tkv_format)value;
}

static inline tkv_isa tkv_test_isa(void) { /* TKV_ISA_COUNT if TKV_ISA is no known name */
    const char *s = getenv("TKV_ISA");
    int isa = TKV_ISA_AUTO;
    if (!s || !*s) return TKV_ISA_AUTO;
    while (isa < TKV_ISA_COUNT && strcmp(s, tkv_get_name(TKV_NAME_ISA, isa)) != 0) isa++;
    return (tkv_isa)isa;
}

/* Lists the instruction sets to test: all that are available, or only the one that TKV_ISA names. Returns the count.
 * list: room for TKV_ISA_COUNT. */
static inline int tkv_test_isas(tkv_isa *list) {
    int isa, n = 0;
    for (isa = TKV_ISA_SCALAR; isa < TKV_ISA_COUNT; isa++)
        if (is_isa_available((tkv_isa)isa) &&
            (tkv_test_isa() == TKV_ISA_AUTO || tkv_test_isa() == (tkv_isa)isa))
            list[n++] = (tkv_isa)isa;
    return n;
}

/* Path of models/x or text/x, or NULL if there is no such file: then SKIP. Valid until the next call. */
static inline const char *tkv_test_data(const char *name) {
    static char path[1024];
    const char *dir = getenv("TKV_DATA");
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", dir && *dir ? dir : "../shared/data", name);
    f = fopen(path, "rb");
    if (!f) return NULL;
    fclose(f);
    return path;
}

/* >>random numbers: a seed gives the same ones on every machine and under all compiler flags (no libm) */
typedef struct tkv_rng {
    uint64_t state;
} tkv_rng;

static inline tkv_rng tkv_rng_seed(uint64_t seed) {
    tkv_rng r;
    r.state = seed;
    return r;
}

static inline uint64_t tkv_rng_u64(tkv_rng *r) { /* splitmix64, Steele, Lea, Flood 2014 */
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline double tkv_rng_uniform(tkv_rng *r) { /* [0, 1) */
    return (double)(tkv_rng_u64(r) >> 11) * (1.0 / 9007199254740992.0);
}

static inline int tkv_rng_below(tkv_rng *r, int n) { /* 0 .. n-1 */
    return (int)(((tkv_rng_u64(r) >> 32) * (uint64_t)n) >> 32);
}

/* Mean 0, standard deviation (sd) 1. The number of ones in 128 random bits is nearly Gaussian, in steps of 0.18 sd.
 * The sum of two uniform numbers joins the steps by straight lines. Tails reach 11 sd. */
static inline double tkv_rng_gauss(tkv_rng *r) {
    int bits = -64, i;
    for (i = 0; i < 2; i++) {
        uint64_t u = tkv_rng_u64(r);
        u -= (u >> 1) & 0x5555555555555555u;
        u = (u & 0x3333333333333333u) + ((u >> 2) & 0x3333333333333333u);
        u = (u + (u >> 4)) & 0x0f0f0f0f0f0f0f0fu;
        bits += (int)((u * 0x0101010101010101u) >> 56);
    }
    /* times 1 / sqrt(32 + 1/6) */
    return ((double)bits + tkv_rng_uniform(r) + tkv_rng_uniform(r) - 1.0) * 0.17631815430712713;
}

static inline void tkv_rng_fill(tkv_rng *r, float *x, size_t n, double sd) { /* Gaussian */
    size_t i;
    for (i = 0; i < n; i++) x[i] = (float)(sd * tkv_rng_gauss(r));
}

/* >>running */
static inline void tkv_test_begin(int argc, char **argv) {
    tkv_isa isa = tkv_test_isa();
    tkv_test_.first = getenv("TKV_TEST_FIRST") != NULL;
    if (argc > 1 && strcmp(argv[1], "--list") == 0) tkv_test_.list = 1;
    else tkv_test_.filter = argc > 1 ? argv[1] : getenv("TKV_TEST_FILTER");
    if (isa == TKV_ISA_COUNT) {
        printf("TKV_ISA is \"%s\": use auto, scalar, avx2, avx512, neon or wasm\n", getenv("TKV_ISA"));
        exit(2);
    }
    if (isa != TKV_ISA_AUTO && !is_isa_available(isa)) {
        tkv_test_.isa_missing = 1;
        if (!tkv_test_.list) printf("%s is not available here\n", tkv_get_name(TKV_NAME_ISA, (int)isa));
    }
}

static inline void tkv_test_run_(const char *name, void (*test)(void)) {
    tkv_test_state *t = &tkv_test_;
#ifndef __wasi__
    clock_t start = clock();
#endif
    if (t->filter && !strstr(name, t->filter)) return;
    if (t->list) {
        printf("%s\n", name);
        return;
    }
    t->n_checks = t->n_bad = 0;
    t->skip = t->isa_missing ? "instruction set" : NULL;
    printf("  %-42s", name);
    fflush(stdout); /* shows the name of a test that crashes */
    if (!t->isa_missing) test();
#ifdef TKV_TEST_TRACE
    tkv_test_trace(name);
#endif
    if (t->n_bad > TKV_TEST_SHOWN) printf("    ... %d more\n", t->n_bad - TKV_TEST_SHOWN);
    if (t->n_bad) {
        t->failed++;
        printf("  FAILED %s: %d of %d checks", name, t->n_bad, t->n_checks);
    } else if (t->skip) {
        t->skipped++;
        printf(" skipped: %s", t->skip);
    } else if (!t->n_checks) {
        t->failed++;
        printf(" FAILED: it checks nothing");
    } else {
        t->passed++;
        printf(" ok, %d checks", t->n_checks);
    }
#ifndef __wasi__
    printf(", %.2f s", (double)(clock() - start) / (double)CLOCKS_PER_SEC);
#endif
    printf("\n");
    fflush(stdout);
}

static inline int tkv_test_end(void) { /* the exit status */
    const tkv_test_state *t = &tkv_test_;
    int found_none = t->passed + t->failed + t->skipped == 0;
    if (t->list) return 0;
    if (found_none) printf("no test has \"%s\" in its name\n", t->filter ? t->filter : "");
    printf("%d passed, %d failed", t->passed, t->failed);
    if (t->skipped) printf(", %d skipped", t->skipped);
    printf("\n");
    return t->failed || found_none;
}

#endif /* TKV_TEST_H */
