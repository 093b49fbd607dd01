/*
 * keep.c - measures what eviction, anchors, offloaded blocks and promotion add to a decode step. One layer, one
 * thread, the default plan. Each row compares a cache with the feature and one without, in turns, token by token.
 *
 * cc -O2 bench/keep.c -o keep -lm -pthread && ./keep
 *
 *   --tokens 4096,16384,32768          tokens of the layer, after eviction
 *   --policies h2o,scissorhands        also sliding, tova, snapkv, knorm, keydiff, ...
 *   --cycles 15                        cycles of 64 tokens
 *   --only evict                       one of the tables: evict, anchors, spill, promote
 *   --heads 32 --kv-heads 8 --dim 128 --isa avx2 --csv
 *
 * evict, anchors: a cycle counts with the mean of its 64 appends and attentions, and the table has the medians of
 * cycles, in CPU time. `more` is the median of the differences between both caches. `share` is `more` of appends over
 * the attention without the feature. The cache evicts 64 tokens at once; `batch us` is the longest append of a cycle.
 * Attention scores are random, and half of all appended tokens are evicted. This is the worst case for eviction
 * and for attention: all blocks have holes, two half-full blocks are decoded and coded into one, and attention
 * reads half-full blocks. The cache without eviction holds as many tokens in full blocks.
 *
 * spill: attention after all blocks that can be offloaded are, to a store in memory. The time has the library's
 * copying and checking of K and V of all heads of a block. A file adds its own time.
 *
 * promote: `scan us` is tkv_promote_important without a block above the threshold. `us per block` is a promotion from
 * the store in memory, in batches of eight.
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
    size_t slot_bytes;
    uint32_t keys;
} store;

static int store_write(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    const store *s = (const store *)user;
    if (key >= s->keys) return 1;
    memcpy(s->bytes + key * s->slot_bytes + offset, bytes, size);
    return 0;
}

static int store_read(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    const store *s = (const store *)user;
    memcpy(bytes, s->bytes + key * s->slot_bytes + offset, size);
    return 0;
}

static void store_begin(store *s, tkv_config *cfg, int tokens) {
    cfg->offload.write = store_write;
    cfg->offload.read = store_read;
    cfg->offload.user = s;
    bench_must(tkv_get_required_bytes(cfg, NULL, &s->slot_bytes), "tkv_get_required_bytes");
    s->keys = 2 * ((uint32_t)tokens / 64 + 64);
    s->bytes = (uint8_t *)bench_alloc(s->keys * s->slot_bytes);
}

/* >>two caches side by side */
typedef struct pair {
    tkv_cache *kv[2]; /* with the feature, without it */
    tkv_config cfg[2];
    float *values, *q, *out, *scores;
    int tokens, t;
    uint64_t seed;
} pair;

/* Adds random attention scores to all tokens, so that evicted tokens are spread over all blocks. */
static void add_random_scores(pair *p, tkv_cache *kv) {
    const int n = tkv_get_length(kv, 0, 0);
    if (!kv->token_scores.mode) return;
    p->scores = (float *)realloc(p->scores, (size_t)n * sizeof(float));
    if (!p->scores) bench_fail("out of memory");
    for (int i = 0; i < n; i++) {
        const float x = bench_gauss(&p->seed);
        p->scores[i] = x * x * .001f;
    }
    bench_must(tkv_add_scores(kv, 0, 0, 0, n, p->scores), "tkv_add_scores");
}

static void fill(pair *p, int which, int tokens) {
    int n;
    for (int t = 0; t < tokens; t += n) {
        n = tokens - t - 1 < BENCH_CHUNK ? tokens - t - 1 : BENCH_CHUNK;
        if (n < 1) n = 1;
        bench_append_at(p->kv[which], &p->cfg[which], 0, t, n, p->values);
        bench_must(tkv_attend(p->kv[which], 0, 0, p->q, 1, p->out), "tkv_attend");
        add_random_scores(p, p->kv[which]);
    }
}

static void pair_begin(pair *p, const tkv_config *with, const tkv_config *without, int tokens) {
    memset(p, 0, sizeof *p);
    p->seed = 1;
    p->tokens = tokens;
    p->cfg[0] = *with;
    p->cfg[1] = *without;
    p->values = bench_values(with, &p->seed);
    p->q = bench_queries(with, 1, &p->seed);
    p->out = (float *)bench_alloc((size_t)(with->model.n_heads * with->model.head_dim) * sizeof(float));
    for (int which = 0; which < 2; which++) {
        bench_must(tkv_create(&p->cfg[which], &p->kv[which]), "tkv_create");
        fill(p, which, p->cfg[which].evict.keep_tokens ? 2 * tokens : tokens);
    }
}

static void pair_end(pair *p) {
    for (int which = 0; which < 2; which++) {
        bench_must(tkv_check(p->kv[which], NULL, 0), "tkv_check");
        tkv_destroy(p->kv[which]);
    }
    free(p->values);
    free(p->q);
    free(p->out);
    free(p->scores);
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
    double append[3][CYCLES], attention[3][CYCLES], longest[CYCLES];
    for (int c = 0; c < cycles; c++) {
        for (int which = 0; which < 2; which++) {
            append[which][c] = attention[which][c] = 0.0;
            add_random_scores(p, p->kv[which]);
        }
        longest[c] = 0.0;
        for (int i = 0; i < CYCLE; i++, p->t++)
            for (int which = 0; which < 2; which++) {
                double t = bench_seconds(1);
                bench_append_at(p->kv[which], &p->cfg[which], 0, p->t, 1, p->values);
                t = (bench_seconds(1) - t) * 1e6;
                append[which][c] += t / (double)CYCLE;
                if (which == 0 && t > longest[c]) longest[c] = t;
                attention[which][c] += attend(p, which) / (double)CYCLE;
            }
        append[2][c] = append[0][c] - append[1][c];
        attention[2][c] = attention[0][c] - attention[1][c];
    }
    f->append_more = bench_median(append[2], cycles);
    f->attend_more = bench_median(attention[2], cycles);
    f->longest = bench_median(longest, cycles);
    for (int which = 0; which < 2; which++) {
        f->append[which] = bench_median(append[which], cycles);
        f->attend[which] = bench_median(attention[which], cycles);
    }
}

static void print_row(const char *what, int tokens, const figures *f, int csv) {
    printf(csv ? "%s,%d,%.3f,%.3f,%.3f,%.1f,%.2f,%.2f,%.2f,%.2f\n"
               : "%-20s %7d %9.2f %9.2f %8.2f %9.1f %10.1f %9.1f %8.1f %7.2f%%\n",
           what, tokens, f->append[0], f->append[1], f->append_more, f->longest, f->attend[0], f->attend[1],
           f->attend_more, 100.0 * f->append_more / f->attend[1]);
    fflush(stdout);
}

static void measure(const char *what, const tkv_config *with, const tkv_config *without, int tokens,
                    int cycles, int csv) {
    pair p;
    pair_begin(&p, with, without, tokens);
    figures f;
    run(&p, cycles, &f);
    pair_end(&p);
    print_row(what, tokens, &f, csv);
}

/* >>offloading: attention after all blocks that can be offloaded are, and without any */
static void measure_offload(const tkv_config *shape, int tokens, int cycles, int csv) {
    tkv_config with = *shape;
    store s;
    int blocks = 0;
    store_begin(&s, &with, tokens);
    pair p;
    pair_begin(&p, &with, shape, tokens);
    bench_must(tkv_offload(p.kv[0], 0, 0, 1 << 20, &blocks), "tkv_offload");
    double attention[3][CYCLES];
    for (int c = 0; c < cycles; c++) {
        for (int which = 0; which < 2; which++) attention[which][c] = attend(&p, which);
        attention[2][c] = attention[0][c] - attention[1][c];
    }
    for (int which = 0; which < 3; which++) attention[which][0] = bench_median(attention[which], cycles);
    printf(csv ? "%s,%d,%d,%.2f,%.2f,%.3f\n" : "%-20s %7d %7d %10.1f %9.1f %13.2f\n", "spill", tokens, blocks,
           attention[0][0], attention[1][0], attention[2][0] / (blocks ? blocks : 1));
    fflush(stdout);
    pair_end(&p);
    free(s.bytes);
}

/* >>promotion: the scan for important blocks, and the promotion of one */
static void measure_promotion(const tkv_config *shape, int tokens, int cycles, int csv) {
    tkv_config cfg = *shape;
    tkv_promotion p;
    int n = 0, promoted = 0;
    cfg.importance.sample_every = 32;
    cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
    cfg.offload.keep_exact = 1;
    store s;
    store_begin(&s, &cfg, tokens);
    pair two;
    pair_begin(&two, &cfg, shape, tokens);
    double scan[CYCLES];
    double promote[CYCLES];
    double t;
    for (int c = 0; c < cycles; c++)
        for (int which = 0; which < 2; which++) {
            memset(&p, 0, sizeof p);
            p.by.cfg.threshold = which ? 1e-30f : 1e30f;
            p.by.cfg.cooldown = TKV_OFF;
            t = bench_seconds(1);
            bench_must(tkv_promote_important(two.kv[0], 0, 0, &p), "tkv_promote_important");
            t = (bench_seconds(1) - t) * 1e6;
            if (!which) scan[c] = t;
            else if (p.promoted == 8) promote[n++] = (t - scan[c]) / 8.0; /* full batches only */
            promoted += p.promoted;
        }
    t = n ? bench_median(promote, n) : 0.0;
    printf(csv ? "%s,%d,%d,%.2f,%.2f\n" : "%-20s %7d %7d %10.1f %13.1f\n", "promote", tokens, promoted,
           bench_median(scan, cycles), t);
    fflush(stdout);
    pair_end(&two);
    free(s.bytes);
}

/* >>tables */
static void keeping_table(const tkv_config *plain, const char *tokens, const char *policies, int anchors,
                          int cycles, int csv) {
    char policy[32];
    tkv_config cfg;
    if (csv)
        printf("what,tokens,append_us,append_without_us,append_more_us,batch_us,attend_us,attend_without_us,"
               "attend_more_us,share_percent\n");
    else
        printf("%-20s %7s %9s %9s %8s %9s %10s %9s %8s %8s\n", "", "tokens", "append us", "without", "more",
               "batch us", "attend us", "without", "more", "share");
    char n[32];
    while (bench_word(&tokens, n, sizeof n)) {
        for (const char *some = policies; bench_word(&some, policy, sizeof policy);) {
            cfg = *plain;
            int kind;
            bench_must(tkv_find_name(TKV_NAME_EVICT_POLICY, policy, &kind), policy);
            cfg.evict.policy = (tkv_evict_policy)kind;
            cfg.evict.keep_tokens = atoi(n);
            measure(policy, &cfg, plain, atoi(n), cycles, csv);
        }
        static const int n_anchors[] = {16, 128, 1024};
        for (int i = 0; anchors && i < 3; i++) {
            char name[32];
            snprintf(name, sizeof name, "%d anchors", n_anchors[i]);
            cfg = *plain;
            cfg.tiers.n_anchors = n_anchors[i];
            measure(name, &cfg, plain, atoi(n), cycles, csv);
        }
    }
}

int main(int argc, char **argv) {
    const char *tokens = bench_option(argc, argv, "tokens"), *policies = bench_option(argc, argv, "policies");
    const char *only = bench_option(argc, argv, "only"), *isa, *list;
    const int csv = bench_option(argc, argv, "csv") != NULL, cycles = bench_number(argc, argv, "cycles", 15);
    const int evict = !only || strcmp(only, "evict") == 0, anchors = !only || strcmp(only, "anchors") == 0;
    tkv_config plain;
    isa = bench_config(&plain, argc, argv);
    bench_must(tkv_validate_config(&plain, NULL, 0), "shape");
    if (!tokens) tokens = "4096,16384,32768";
    if (!policies) policies = "h2o,scissorhands";
    if (cycles < 1 || cycles > CYCLES) bench_fail("--cycles: 1 to %d", CYCLES);
    char n[32];
    for (list = tokens; bench_word(&list, n, sizeof n);)
        if (atoi(n) < 1024) bench_fail("--tokens: from 1024");
    if (!csv)
        printf("keeping: head_dim %d, %d query and %d KV heads, 1 layer, 1 thread, %s kernels\n",
               plain.model.head_dim, plain.model.n_heads, plain.model.n_kv_heads, isa);
    if (evict || anchors) keeping_table(&plain, tokens, evict ? policies : "", anchors, cycles, csv);
    if (!only || strcmp(only, "spill") == 0) {
        if (csv) printf("what,tokens,blocks,attend_us,attend_without_us,us_per_block\n");
        else
            printf("%-20s %7s %7s %10s %9s %13s\n", "", "tokens", "blocks", "attend us", "without",
                   "us per block");
        for (list = tokens; bench_word(&list, n, sizeof n);) measure_offload(&plain, atoi(n), cycles, csv);
    }
    if (!only || strcmp(only, "promote") == 0) {
        if (csv) printf("what,tokens,blocks,scan_us,us_per_block\n");
        else printf("%-20s %7s %7s %10s %13s\n", "", "tokens", "blocks", "scan us", "us per block");
        for (list = tokens; bench_word(&list, n, sizeof n);) measure_promotion(&plain, atoi(n), cycles, csv);
    }
    return 0;
}
