/*
 * moves.c - measures what moved tokens, forks and shared prompts cost. One thread.
 *
 * cc -O2 bench/moves.c examples/tieredkv.c -o moves -lm -pthread && ./moves
 *
 *   --context 32768         tokens of a sequence
 *   --runs 25               rounds; each calls attention once for every row of the table
 *   --only none,1,every     rows of the first table, and no other table
 *   --isa avx2              without it: AVX2, then the best instruction set
 *   --heads 32 --kv-heads 8 --dim 128 --precise --csv
 *
 * Attention: a decode step of one layer with the default plan, all rows on the same tokens. First each row is compared
 * with tkv_attend_reference, which turns keys. Rounds take the rows in turn, so a busy machine disturbs all alike; the
 * least time of each row counts.
 *   none          no token has moved
 *   1, 10, 100    distances, with borders between blocks
 *   every         each block has its own distance, as a sliding chat makes them
 *   inside 100    101 distances, with borders inside of blocks
 *   us, ratio     least CPU time of a call; over that of `none`
 * Instructions, whatever the load:
 *   valgrind --tool=callgrind --toggle-collect=tkv_attend ./moves --isa avx2 --only every --runs 1
 *
 * Forks: least CPU time of tkv_seq_fork into an empty sequence, by block and layer.
 * Prefixes: least time of tkv_seq_adopt_prefix without a store, into an empty sequence among 64, KIVI-4 and KIVI-2.
 * Shared prompts: characters with a common prompt of 512 tokens and 128 of their own, with a table loaded, silent
 * (tkv_seq_flush). ratio: over bytes(512) + 8 (bytes(640) - bytes(512)).
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "bench.h"

enum { N_ROWS = 6, BLOCK = 64, SINKS = 4 };

/* A row: borders between distances, and tokens by which they lie behind the beginning of a block. borders -1: one at
 * each block. */
static const struct moved_row {
    const char *name;
    int borders, inside;
} moved_rows[N_ROWS] = {{"none", 0, 0},  {"1", 1, 0},      {"10", 10, 0},
                        {"100", 100, 0}, {"every", -1, 0}, {"inside 100", 100, 32}};

/* Moves the tokens of a sequence, so that those behind each border have moved farther by 3 positions. */
static void move_tokens(tkv_cache *kv, int seq, const struct moved_row *row) {
    const int len = tkv_get_length(kv, seq, TKV_ALL_LAYERS), blocks = (len - SINKS) / BLOCK;
    const int n = row->borders < 0 ? blocks : row->borders < blocks ? row->borders : blocks;
    for (int i = n; i-- > 0;) {
        const int at = SINKS + BLOCK * (int)((int64_t)i * blocks / n) + row->inside;
        bench_must(tkv_seq_shift(kv, seq, at, TKV_UNLIMITED, 3), "tkv_seq_shift");
    }
}

/* Exits unless attention to a sequence is that of the reference, which turns keys. Returns the distance. */
static double check_row(tkv_cache *kv, int seq, const tkv_config *cfg, const char *name, const float *q) {
    const size_t n = (size_t)(cfg->model.n_heads * cfg->model.head_dim);
    float *out = (float *)bench_alloc(2 * n * sizeof(float));
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.n = 1;
    p.q = q;
    p.out = out;
    bench_must(tkv_attend_ex(kv, &p), "tkv_attend_ex");
    p.out = out + n;
    bench_must(tkv_attend_reference(kv, &p), "tkv_attend_reference");
    const double distance = bench_distance(out, out + n, n);
    free(out);
    if (!(distance <= 0.01)) bench_fail("%s: wrong results, %.1e from the reference", name, distance);
    return distance;
}

static int is_listed(const char *list, const char *name) {
    char word[32];
    while (bench_word(&list, word, sizeof word))
        if (strcmp(word, name) == 0) return 1;
    return 0;
}

/* The table of attention. only: names of rows, or NULL for all; then each row is checked, too. */
static void measure_attention(const tkv_config *shape, const char *isa, int context, int runs,
                              const char *only, int csv, const float *values, const float *q) {
    double best[N_ROWS], error[N_ROWS] = {0.0};
    float *out = (float *)bench_alloc((size_t)(shape->model.n_heads * shape->model.head_dim) * sizeof(float));
    tkv_config cfg = *shape;
    tkv_cache *kv;
    cfg.model.rope.dim = cfg.model.head_dim;
    cfg.limits.max_seqs = N_ROWS;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    bench_append(kv, &cfg, 0, context, values);
    for (int i = 1; i < N_ROWS; i++) {
        bench_must(tkv_seq_fork(kv, 0, i, TKV_UNLIMITED), "tkv_seq_fork");
        move_tokens(kv, i, &moved_rows[i]);
    }
    bench_must(tkv_check(kv, NULL, 0), "tkv_check");
    for (int i = 0; i < N_ROWS && !only; i++) error[i] = check_row(kv, i, &cfg, moved_rows[i].name, q);
    for (int run = 0; run < runs; run++)
        for (int i = 0; i < N_ROWS; i++) {
            if (only && !is_listed(only, moved_rows[i].name)) continue;
            const double begin = bench_seconds(1);
            bench_must(tkv_attend(kv, i, 0, q, 1, out), "tkv_attend");
            const double seconds = bench_seconds(1) - begin;
            if (run == 0 || seconds < best[i]) best[i] = seconds;
        }
    for (int i = 0; i < N_ROWS && !only; i++)
        printf(csv ? "attention,%s,%d,%s,%.1f,%.3f,%.1e\n" : "attention  %-7s %7d %12s %10.1f %7.3f %8.1e\n",
               isa, context, moved_rows[i].name, best[i] * 1e6, best[i] / best[0], error[i]);
    tkv_destroy(kv);
    free(out);
}

/* The least time of a fork, in nanoseconds by block and layer. */
static void measure_forks(const tkv_config *shape, int csv, const float *values) {
    enum { LAYERS = 4, CONTEXT = 8192, FORKS = 200 };
    double best = 0.0;
    tkv_config cfg = *shape;
    tkv_cache *kv;
    cfg.model.n_layers = LAYERS;
    cfg.limits.max_seqs = 2;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    for (int layer = 0; layer < LAYERS; layer++) bench_append(kv, &cfg, layer, CONTEXT, values);
    for (int i = 0; i < FORKS; i++) {
        const double begin = bench_seconds(1);
        bench_must(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), "tkv_seq_fork");
        const double seconds = bench_seconds(1) - begin;
        if (i == 0 || seconds < best) best = seconds;
        bench_must(tkv_check(kv, NULL, 0), "tkv_check");
        if (i + 1 < FORKS) bench_must(tkv_seq_truncate(kv, 1, 0), "tkv_seq_truncate");
    }
    printf(csv ? "fork,%d,%d,%.1f\n" : "fork       %d layers, %d tokens: %.1f ns a block and layer\n", LAYERS,
           CONTEXT, best * 1e9 / (LAYERS * (CONTEXT / BLOCK + 1)));
    tkv_destroy(kv);
}

/* The least time of finding and adopting the prefix of another sequence, which is the last one that is looked at. */
static void measure_prefixes(const tkv_config *shape, int csv, const float *values) {
    enum { LAYERS = 16, CONTEXT = 2048, SEQS = 64, TIMES = 200 };
    static int tokens[CONTEXT];
    double best = 0.0;
    tkv_config cfg = *shape;
    tkv_prefix_params p;
    tkv_prefix_info info;
    tkv_cache *kv;
    cfg.model.n_layers = LAYERS;
    cfg.limits.max_seqs = SEQS;
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4;
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    for (int layer = 0; layer < LAYERS; layer++) bench_append(kv, &cfg, layer, CONTEXT, values);
    bench_must(tkv_seq_fork(kv, 0, SEQS - 1, TKV_UNLIMITED), "tkv_seq_fork");
    for (int i = 0; i < CONTEXT; i++) tokens[i] = 7 * i % 50257;
    memset(&p, 0, sizeof p);
    p.seq = SEQS - 1;
    p.tokens = tokens;
    p.n_tokens = CONTEXT;
    bench_must(tkv_seq_publish_prefix(kv, &p, NULL, &info), "tkv_seq_publish_prefix");
    const int n_pages = info.n_pages;
    p.seq = 1;
    for (int i = 0; i < TIMES; i++) {
        const double begin = bench_seconds(1);
        bench_must(tkv_seq_adopt_prefix(kv, &p, NULL, &info), "tkv_seq_adopt_prefix");
        const double seconds = bench_seconds(1) - begin;
        if (i == 0 || seconds < best) best = seconds;
        if (info.n_pages != n_pages || !n_pages) bench_fail("a prefix was not found");
        bench_must(tkv_check(kv, NULL, 0), "tkv_check");
        bench_must(tkv_seq_reset(kv, 1), "tkv_seq_reset");
    }
    printf(csv ? "prefix,%d,%d,%.1f\n" : "prefix     %d layers, %d tokens of another sequence: %.1f us\n",
           LAYERS, info.n_tokens, best * 1e6);
    tkv_destroy(kv);
}

/* Bytes beyond those of an empty cache with its table. characters 0: of one sequence with n tokens. */
static double bytes_of(const tkv_config *cfg, const void *table, size_t size, int characters, int n,
                       const float *values) {
    const int row = cfg->model.n_kv_heads * cfg->model.head_dim, prompt = characters ? 512 : n;
    tkv_memory_info before, after;
    tkv_cache *kv;
    bench_must(tkv_create(cfg, &kv), "tkv_create");
    bench_must(tkv_load_calibration(kv, table, size), "tkv_load_calibration");
    bench_must(tkv_get_memory(kv, &before), "tkv_get_memory");
    for (int layer = 0; layer < cfg->model.n_layers; layer++) bench_append(kv, cfg, layer, prompt, values);
    for (int i = 1; i < characters; i++) bench_must(tkv_seq_fork(kv, 0, i, TKV_UNLIMITED), "tkv_seq_fork");
    for (int i = 0; i < characters; i++) {
        for (int t = 0; t < n; t++)
            for (int layer = 0; layer < cfg->model.n_layers; layer++)
                bench_must(tkv_append(kv, i, layer, values + (t + 31 * i) % BENCH_CHUNK * row,
                                      values + (t + 17 * i) % BENCH_CHUNK * row, 1),
                           "tkv_append");
        bench_must(tkv_seq_flush(kv, i, TKV_FLUSH_FULL), "tkv_seq_flush");
    }
    bench_must(tkv_check(kv, NULL, 0), "tkv_check");
    bench_must(tkv_get_memory(kv, &after), "tkv_get_memory");
    tkv_destroy(kv);
    return (double)after.total - (double)before.total;
}

static void measure_bytes(const tkv_config *shape, int csv, const float *values) {
    const int characters = 8;
    tkv_config cfg = *shape;
    tkv_cache *kv;
    size_t size;
    cfg.model.n_layers = 8;
    cfg.limits.max_seqs = characters;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    for (int layer = 0; layer < cfg.model.n_layers; layer++) bench_append(kv, &cfg, layer, 1024, values);
    bench_must(tkv_save_calibration(kv, NULL, 0, &size), "tkv_save_calibration");
    void *table = bench_alloc(size);
    bench_must(tkv_save_calibration(kv, table, size, NULL), "tkv_save_calibration");
    tkv_destroy(kv);
    const double prompt = bytes_of(&cfg, table, size, 0, 512, values);
    const double both = bytes_of(&cfg, table, size, 0, 640, values);
    const double shared = bytes_of(&cfg, table, size, characters, 128, values);
    printf(csv ? "prompt,%d,%.0f,%.3f\n"
               : "prompt     %d characters of 512 + 128 tokens: %.0f bytes, ratio %.3f\n",
           characters, shared, shared / (prompt + characters * (both - prompt)));
    free(table);
}

int main(int argc, char **argv) {
    const char *only = bench_option(argc, argv, "only"), *asked = bench_option(argc, argv, "isa");
    const int context = bench_number(argc, argv, "context", 32768),
              runs = bench_number(argc, argv, "runs", 25);
    const int csv = bench_option(argc, argv, "csv") != NULL;
    uint64_t seed = 1;
    tkv_config cfg;
    const char *best = bench_config(&cfg, argc, argv);
    if (context < 256 || runs < 1) bench_fail("--context: from 256; --runs: from 1");
    float *values = bench_values(&cfg, &seed);
    float *q = bench_queries(&cfg, 1, &seed);
    if (!csv && !only)
        printf("moved tokens: head_dim %d, %d query and %d KV heads, 1 thread\n%-10s %-7s %7s %12s %10s %7s "
               "%8s\n",
               cfg.model.head_dim, cfg.model.n_heads, cfg.model.n_kv_heads, "", "kernels", "tokens",
               "distances", "us", "ratio", "error");
    for (int i = 0; i < 2; i++) {
        tkv_config one = cfg;
        const char *isa = i ? best : "avx2";
        if (i == 0 && (asked || strcmp(best, "avx2") == 0 || !bench_isa_available(TKV_ISA_AVX2))) continue;
        if (i == 0) (void)bench_isa(&one, isa);
        measure_attention(&one, isa, context, runs, only, csv, values, q);
    }
    if (!only) {
        measure_forks(&cfg, csv, values);
        measure_prefixes(&cfg, csv, values);
        measure_bytes(&cfg, csv, values);
    }
    free(values);
    free(q);
    return 0;
}
