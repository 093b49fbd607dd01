/*
 * keep.c - what keeping and dropping takes of a decode step: eviction, anchors, blocks outside RAM, promotion. One
 * layer, one thread, the default plan; each row is the same cache with it and without, in turns, token by token.
 *
 * cc -O2 bench/keep.c -o keep -lm -pthread && ./keep
 *
 *   --tokens 4096,16384,32768          tokens of the layer; those that stay
 *   --policies h2o,scissorhands        others: sliding, tova, snapkv, knorm, keydiff, ...
 *   --cycles 15                        of 64 tokens each
 *   --only evict                       one of the tables: evict, anchors, spill, promote
 *   --heads 32 --kv-heads 8 --dim 128 --isa avx2 --csv
 *
 * Of each cycle the mean of 64 appends and attentions counts, of the cycles the median, and `more` is the median
 * of the pairs' differences (CPU time). Eviction goes in batches of 64 tokens: `batch us` is the longest append of
 * a cycle. What matters is random, so that what is left has holes everywhere, and twice as many tokens have come
 * as stay: the worst for eviction, as blocks are decoded and coded again when two fit into one, and for attention,
 * which reads blocks that are half full. The cache without eviction has as many tokens in full blocks.
 *
 * spill: all blocks that may are outside, in memory: what is counted is the library's copying and checking (of each
 * block K and V of all heads), a file's own time comes on top. promote: tkv_promote_important where nothing
 * matters, and for each of eight blocks that come back from such a store.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "bench.h"

enum { CYCLE = 64, CYCLES = 99 };

/* >>a store in memory */
typedef struct store {
    uint8_t *bytes;
    size_t room;
    uint32_t keys;
} store;

static int store_put(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    const store *s = (const store *)user;
    if (key >= s->keys) return 1;
    memcpy(s->bytes + key * s->room + offset, bytes, size);
    return 0;
}

static int store_get(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    const store *s = (const store *)user;
    memcpy(bytes, s->bytes + key * s->room + offset, size);
    return 0;
}

static void store_for(store *s, tkv_config *cfg, int tokens) {
    cfg->offload.write = store_put;
    cfg->offload.read = store_get;
    cfg->offload.user = s;
    bench_must(tkv_get_required_bytes(cfg, NULL, &s->room), "tkv_get_required_bytes");
    s->keys = 2 * ((uint32_t)tokens / 64 + 64);
    s->bytes = (uint8_t *)bench_alloc(s->keys * s->room);
}

/* >>two caches side by side */
typedef struct pair {
    tkv_cache *kv[2]; /* with it, without */
    tkv_config cfg[2];
    float *values, *q, *out, *mass;
    int tokens, t;
    uint64_t seed;
} pair;

/* Random mass for all tokens that are there, so that what goes is anywhere. */
static void stir(pair *p, tkv_cache *kv) {
    const int n = tkv_get_length(kv, 0, 0);
    int i;
    if (!kv->mass.mode) return;
    p->mass = (float *)realloc(p->mass, (size_t)n * sizeof(float));
    if (!p->mass) exit(1);
    for (i = 0; i < n; i++) {
        const float x = bench_gauss(&p->seed);
        p->mass[i] = x * x * .001f;
    }
    bench_must(tkv_add_scores(kv, 0, 0, 0, n, p->mass), "tkv_add_scores");
}

static void fill(pair *p, int which, int tokens) {
    int t, n;
    for (t = 0; t < tokens; t += n) {
        n = tokens - t - 1 < BENCH_CHUNK ? tokens - t - 1 : BENCH_CHUNK;
        if (n < 1) n = 1;
        bench_append_at(p->kv[which], &p->cfg[which], 0, t, n, p->values);
        bench_must(tkv_attend(p->kv[which], 0, 0, p->q, 1, p->out), "tkv_attend");
        stir(p, p->kv[which]);
    }
}

static void pair_begin(pair *p, const tkv_config *with, const tkv_config *without, int tokens) {
    int which;
    memset(p, 0, sizeof *p);
    p->seed = 1;
    p->tokens = tokens;
    p->cfg[0] = *with;
    p->cfg[1] = *without;
    p->values = bench_values(with, &p->seed);
    p->q = bench_queries(with, 1, &p->seed);
    p->out = (float *)bench_alloc((size_t)(with->model.n_heads * with->model.head_dim) * sizeof(float));
    for (which = 0; which < 2; which++) {
        bench_must(tkv_create(&p->cfg[which], &p->kv[which]), "tkv_create");
        fill(p, which, p->cfg[which].evict.keep_tokens ? 2 * tokens : tokens);
    }
}

static void pair_end(pair *p) {
    int which;
    for (which = 0; which < 2; which++) {
        bench_must(tkv_check(p->kv[which], NULL, 0), "tkv_check");
        tkv_destroy(p->kv[which]);
    }
    free(p->values);
    free(p->q);
    free(p->out);
    free(p->mass);
}

/* Microseconds per token. */
typedef struct figures {
    double append[2], append_more, attend[2], attend_more, longest;
} figures;

static double attend(pair *p, int which) {
    double t = bench_seconds(1);
    bench_must(tkv_attend(p->kv[which], 0, 0, p->q, 1, p->out), "tkv_attend");
    return (bench_seconds(1) - t) * 1e6;
}

static void run(pair *p, int cycles, figures *f) {
    double append[3][CYCLES], look[3][CYCLES], longest[CYCLES];
    int c, i, which;
    for (c = 0; c < cycles; c++) {
        for (which = 0; which < 2; which++) {
            append[which][c] = look[which][c] = 0.0;
            stir(p, p->kv[which]);
        }
        longest[c] = 0.0;
        for (i = 0; i < CYCLE; i++, p->t++)
            for (which = 0; which < 2; which++) {
                double t = bench_seconds(1);
                bench_append_at(p->kv[which], &p->cfg[which], 0, p->t, 1, p->values);
                t = (bench_seconds(1) - t) * 1e6;
                append[which][c] += t / (double)CYCLE;
                if (which == 0 && t > longest[c]) longest[c] = t;
                look[which][c] += attend(p, which) / (double)CYCLE;
            }
        append[2][c] = append[0][c] - append[1][c];
        look[2][c] = look[0][c] - look[1][c];
    }
    f->append_more = bench_median(append[2], cycles);
    f->attend_more = bench_median(look[2], cycles);
    f->longest = bench_median(longest, cycles);
    for (which = 0; which < 2; which++) {
        f->append[which] = bench_median(append[which], cycles);
        f->attend[which] = bench_median(look[which], cycles);
    }
}

static void show(const char *what, int tokens, const figures *f, int csv) {
    printf(csv ? "%s,%d,%.3f,%.3f,%.3f,%.1f,%.2f,%.2f,%.2f,%.2f\n"
               : "%-20s %7d %9.2f %9.2f %8.2f %9.1f %10.1f %9.1f %8.1f %7.2f%%\n",
           what, tokens, f->append[0], f->append[1], f->append_more, f->longest, f->attend[0], f->attend[1],
           f->attend_more, 100.0 * f->append_more / f->attend[1]);
    fflush(stdout);
}

static void measure(const char *what, const tkv_config *with, const tkv_config *without, int tokens,
                    int cycles, int csv) {
    figures f;
    pair p;
    pair_begin(&p, with, without, tokens);
    run(&p, cycles, &f);
    pair_end(&p);
    show(what, tokens, &f, csv);
}

/* >>what is fetched: attention with all that may go outside, and none of it */
static void measure_spill(const tkv_config *shape, int tokens, int cycles, int csv) {
    tkv_config with = *shape;
    double look[3][CYCLES];
    store s;
    pair p;
    int c, which, blocks = 0;
    store_for(&s, &with, tokens);
    pair_begin(&p, &with, shape, tokens);
    bench_must(tkv_offload(p.kv[0], 0, 0, 1 << 20, &blocks), "tkv_offload");
    for (c = 0; c < cycles; c++) {
        for (which = 0; which < 2; which++) look[which][c] = attend(&p, which);
        look[2][c] = look[0][c] - look[1][c];
    }
    for (which = 0; which < 3; which++) look[which][0] = bench_median(look[which], cycles);
    printf(csv ? "%s,%d,%d,%.2f,%.2f,%.3f\n" : "%-20s %7d %7d %10.1f %9.1f %13.2f\n", "spill", tokens, blocks,
           look[0][0], look[1][0], look[2][0] / (blocks ? blocks : 1));
    fflush(stdout);
    pair_end(&p);
    free(s.bytes);
}

/* >>what comes back: to look for it, and to bring it */
static void measure_promotion(const tkv_config *shape, int tokens, int cycles, int csv) {
    tkv_config cfg = *shape;
    double scan[CYCLES], bring[CYCLES], t;
    tkv_promotion p;
    store s;
    pair two;
    int c, which, n = 0, came = 0;
    cfg.importance.sample_every = 32;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    cfg.offload.keep_exact = 1;
    store_for(&s, &cfg, tokens);
    pair_begin(&two, &cfg, shape, tokens);
    for (c = 0; c < cycles; c++)
        for (which = 0; which < 2; which++) {
            memset(&p, 0, sizeof p);
            p.by.cfg.threshold = which ? 1e-30f : 1e30f;
            p.by.cfg.cooldown = TKV_OFF;
            t = bench_seconds(1);
            bench_must(tkv_promote_important(two.kv[0], 0, 0, &p), "tkv_promote_important");
            t = (bench_seconds(1) - t) * 1e6;
            if (!which) scan[c] = t;
            else if (p.promoted == 8) bring[n++] = (t - scan[c]) / 8.0; /* until none is left */
            came += p.promoted;
        }
    t = n ? bench_median(bring, n) : 0.0;
    printf(csv ? "%s,%d,%d,%.2f,%.2f\n" : "%-20s %7d %7d %10.1f %13.1f\n", "promote", tokens, came,
           bench_median(scan, cycles), t);
    fflush(stdout);
    pair_end(&two);
    free(s.bytes);
}

/* >>tables */
static void keeping_table(const tkv_config *plain, const char *tokens, const char *policies, int anchors,
                          int cycles, int csv) {
    const char *some;
    char n[32], policy[32];
    tkv_config cfg;
    if (csv)
        printf("what,tokens,append_us,append_without_us,append_more_us,batch_us,attend_us,attend_without_us,"
               "attend_more_us,share_percent\n");
    else
        printf("%-20s %7s %9s %9s %8s %9s %10s %9s %8s %8s\n", "", "tokens", "append us", "without", "more",
               "batch us", "attend us", "without", "more", "share");
    while (bench_word(&tokens, n, sizeof n)) {
        for (some = policies; bench_word(&some, policy, sizeof policy);) {
            cfg = *plain;
            int kind;
            bench_must(tkv_find_name(TKV_NAME_EVICT_POLICY, policy, &kind), policy);
            cfg.evict.policy = (tkv_evict_policy)kind;
            cfg.evict.keep_tokens = atoi(n);
            measure(policy, &cfg, plain, atoi(n), cycles, csv);
        }
        cfg = *plain;
        cfg.tiers.n_anchors = 16;
        if (anchors) measure("16 anchors", &cfg, plain, atoi(n), cycles, csv);
    }
}

int main(int argc, char **argv) {
    const char *tokens = bench_option(argc, argv, "tokens"), *policies = bench_option(argc, argv, "policies");
    const char *only = bench_option(argc, argv, "only"), *isa, *list;
    const int csv = bench_option(argc, argv, "csv") != NULL, cycles = bench_number(argc, argv, "cycles", 15);
    const int evict = !only || strcmp(only, "evict") == 0, anchors = !only || strcmp(only, "anchors") == 0;
    char n[32];
    tkv_config plain;
    isa = bench_config(&plain, argc, argv);
    bench_must(tkv_validate_config(&plain, NULL, 0), "shape");
    if (!tokens) tokens = "4096,16384,32768";
    if (!policies) policies = "h2o,scissorhands";
    if (cycles < 1 || cycles > CYCLES) fprintf(stderr, "--cycles: 1 to %d\n", CYCLES), exit(1);
    for (list = tokens; bench_word(&list, n, sizeof n);)
        if (atoi(n) < 1024) fprintf(stderr, "--tokens: from 1024\n"), exit(1);
    if (!csv)
        printf("keeping: head_dim %d, %d query and %d KV heads, 1 layer, 1 thread, %s kernels\n",
               plain.model.head_dim, plain.model.n_heads, plain.model.n_kv_heads, isa);
    if (evict || anchors) keeping_table(&plain, tokens, evict ? policies : "", anchors, cycles, csv);
    if (!only || strcmp(only, "spill") == 0) {
        if (csv) printf("what,tokens,blocks,attend_us,attend_without_us,us_per_block\n");
        else
            printf("%-20s %7s %7s %10s %9s %13s\n", "", "tokens", "blocks", "attend us", "without",
                   "us per block");
        for (list = tokens; bench_word(&list, n, sizeof n);) measure_spill(&plain, atoi(n), cycles, csv);
    }
    if (!only || strcmp(only, "promote") == 0) {
        if (csv) printf("what,tokens,blocks,look_us,us_per_block\n");
        else printf("%-20s %7s %7s %10s %13s\n", "", "tokens", "blocks", "look us", "us per block");
        for (list = tokens; bench_word(&list, n, sizeof n);) measure_promotion(&plain, atoi(n), cycles, csv);
    }
    return 0;
}
