/*
 * target.h - what fuzz targets share: the input, and a main that makes a plain program of a target.
 *
 *     ./TARGET --runs N [--seed 1] [--bytes N]     N random inputs
 *     ./TARGET FILE ...
 */
#ifndef TKV_FUZZ_TARGET_H
#define TKV_FUZZ_TARGET_H

#include "../kit.h"

#include <signal.h>

/* >>input */
static const uint8_t *in_bytes;
static size_t n_in;

static int next_byte(void) {
    if (!n_in) return 0;
    n_in--;
    return *in_bytes++;
}

static int next_below(int n) {
    const int high = n <= 256 ? 0 : next_byte();
    return (high * 256 + next_byte()) % n;
}

/* >>results */

/* Begins an input: no check of it has failed. */
static void begin_input(const uint8_t *data, size_t size) {
    in_bytes = data;
    n_in = size;
    tkv_test_.n_bad = tkv_test_.n_checks = 0;
}

/* Ends an input. After a failed check the program ends. */
static void end_input(void) {
    fflush(stdout);
    if (tkv_test_.n_bad) abort();
}

/* >>plain program */
#ifdef __cplusplus
extern "C"
#endif
    int
    LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#ifdef TKV_FUZZ_MAIN
static const char *run_target;
static char run_name[300]; /* the arguments that run this input again */

/* Says how to run an input again, at a failed check, an assertion, or a fault. */
static void print_run(int number) {
    fprintf(stderr, "    found by: ./%s %s\n", run_target, run_name);
    signal(number, SIG_DFL);
    raise(number);
}

/* Writes a random input of about n_bytes. Returns its bytes, at most 65,536. */
typedef int (*random_input)(int seed, int n_bytes, uint8_t *bytes);

/* A random input of `least` bytes, and fewer than n_bytes others: `standard`, if that is out of range. */
static inline int random_bytes(int seed, int least, int n_bytes, int standard, uint8_t *bytes) {
    tkv_rng rng = tkv_rng_seed((uint64_t)seed);
    const int n = least + tkv_rng_below(&rng, n_bytes < 1 || n_bytes > 60000 ? standard : n_bytes);
    int i, k;
    for (i = 0; i < n; i += 8) {
        const uint64_t x = tkv_rng_u64(&rng);
        for (k = 0; k < 8; k++) bytes[i + k] = (uint8_t)(x >> 8 * k & 255u);
    }
    return n;
}

static int run_file(const char *target, const char *name) {
    static uint8_t bytes[1 << 20];
    FILE *f = fopen(name, "rb");
    size_t n;
    if (!f) {
        fprintf(stderr, "%s: cannot read %s; give files, or --runs N\n", target, name);
        return 1;
    }
    n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    sprintf(run_name, "%.290s", name);
    (void)LLVMFuzzerTestOneInput(bytes, n);
    return 0;
}

/* Runs the files and the random inputs that the arguments name: without arguments 1,000 of about n_bytes. logs_seeds:
 * prints each seed. *n_runs: random inputs. Returns the status of the program. */
static int run_inputs(int argc, char **argv, const char *target, random_input make, int n_bytes,
                      int logs_seeds, int *n_runs) {
    static uint8_t bytes[1 << 16];
    int first = 1, i, status = 0;
    *n_runs = argc > 1 ? 0 : 1000;
    run_target = target;
    signal(SIGABRT, print_run);
    signal(SIGSEGV, print_run);
    signal(SIGFPE, print_run);
    for (i = 1; i < argc && !status; i++) {
        const int has_value = i + 1 < argc;
        if (strcmp(argv[i], "--runs") == 0 && has_value) *n_runs = atoi(argv[++i]);
        else if (strcmp(argv[i], "--seed") == 0 && has_value) first = atoi(argv[++i]);
        else if (strcmp(argv[i], "--bytes") == 0 && has_value) n_bytes = atoi(argv[++i]);
        else status = run_file(target, argv[i]);
    }
    for (i = 0; i < *n_runs; i++) {
        const int seed = first + i, n = make(seed, n_bytes, bytes);
        if (logs_seeds) fprintf(stderr, "seed %d\n", seed);
        sprintf(run_name, "--runs 1 --seed %d --bytes %d", seed, n_bytes);
        (void)LLVMFuzzerTestOneInput(bytes, (size_t)n);
    }
    return status;
}
#endif

#endif /* TKV_FUZZ_TARGET_H */
