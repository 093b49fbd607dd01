/*
 * claims.c - computes figures of CLAIMS.md that need no model: bytes, errors of formats, the pressure controller's
 * time.
 *
 * cc -O2 bench/claims.c examples/tieredkv.c -o claims -lm -pthread && ./claims
 *
 *   ./claims bytes     tkv_estimate_memory for shapes of models that other designs compute by hand
 *   ./claims archive   bits per value of the archive tier by tkv_estimate_memory, and 16 over them
 *   ./claims lengths   what layers that take turns (chapter 8) hold at lengths of SmolLM2, beside aligned layers
 *   ./claims errors    codes and decodes blocks of 64 tokens of 128 normal values. Prints the root mean square error
 *                      over that of the values, and over the mean range of 64 values that share a scale. For A
 *                      formats see `append --only read`: they need a cache
 *   ./claims time      tkv_observe_pressure: least of 40 runs of 100,000 calls, in ns of CPU time per call
 *   ./claims           all tables
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "../examples/measure.h"
#include "../examples/plan.h"
#include "bench.h"

enum { TOKENS = 64, DIM = 128, CALLS = 100000, RUNS = 40, BLOCKS = 100 };

/* >>bytes */
typedef struct shape {
    const char *name;
    int layers, heads, kv_heads, dim, tokens, seqs;
} shape;

static const shape shapes[] = {
    {"540B, one KV head per query head", 118, 48, 48, 128, 2048, 512},
    {"540B, one KV head", 118, 48, 1, 256, 2048, 512},
    {"70B, 64 KV heads", 80, 64, 64, 128, 32768, 8},
    {"70B, 8 KV heads", 80, 64, 8, 128, 32768, 8},
    {"70B, 8 KV heads", 80, 64, 8, 128, 32768, 1},
    {"8B, 8 KV heads", 32, 32, 8, 128, 131072, 1},
    {"8B, 8 KV heads", 32, 32, 8, 128, 4096, 1},
    {"7B, 32 KV heads", 32, 32, 32, 128, 2048, 1},
    {"7B, 32 KV heads", 32, 32, 32, 128, 4096, 1},
    {"7B, 32 KV heads", 32, 32, 32, 128, 16384, 1},
};

static const char *const plans[] = {"balanced", "compact",         "extreme",        "kivi",
                                    "akv",      "64,none,a20/r15", "64,none,a15/r10"};

static void set_plan(tkv_config *cfg, const char *plan) { /* a preset, or hot,warm,archive */
    const char *wrong = NULL;
    if (!strchr(plan, ',')) bench_must(tkv_apply_preset(cfg, plan), plan);
    else wrong = plan_three(cfg, plan);
    if (wrong) bench_fail("%s: %s", plan, wrong);
}

static void print_bytes(void) {
    printf("tkv_estimate_memory in GB (1e9 bytes), and times below FP16, all memory counted\n");
    printf("%-34s %6s %5s %9s", "shape", "tokens", "seqs", "FP16");
    for (size_t p = 0; p < sizeof plans / sizeof *plans; p++) printf(" %17s", plans[p]);
    printf("\n");
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const shape *m = &shapes[s];
        for (size_t p = 0; p < sizeof plans / sizeof *plans; p++) {
            tkv_config cfg = tkv_default_config();
            set_plan(&cfg, plans[p]);
            cfg.model.n_layers = m->layers;
            cfg.model.n_heads = m->heads;
            cfg.model.n_kv_heads = m->kv_heads;
            cfg.model.head_dim = m->dim;
            cfg.limits.max_seqs = m->seqs;
            tkv_memory_info info;
            bench_must(tkv_estimate_memory(&cfg, m->tokens, m->seqs, &info), plans[p]);
            if (p == 0)
                printf("%-34s %6d %5d %9.3f", m->name, m->tokens, m->seqs, (double)info.fp16_bytes / 1e9);
            printf(" %9.3f (%5.2f)", (double)info.total / 1e9, info.ratio);
        }
        printf("\n");
    }
}

/* >>archive: bytes of that tier only */
static void print_archive(void) {
    static const char *const pairs[] = {"q8",       "kivi4",   "kivi3",   "kivi2",   "squat2/kivi2",
                                        "kvquant3", "int4",    "fp4",     "a40/r40", "a30/r30",
                                        "a30/r20",  "a25/r20", "a20/r15", "a15/r15", "a15/r10"};
    printf("the archive tier only, head_dim 128, 8 KV heads: bits per value, codes and metadata\n");
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        tkv_config cfg = tkv_default_config();
        tkv_memory_info info;
        const tkv_tier_bytes *archive = &info.tier[TKV_TIER_ARCHIVE];
        char plan[64];
        snprintf(plan, sizeof plan, "64,none,%s", pairs[i]);
        set_plan(&cfg, plan);
        cfg.model.n_layers = 1;
        cfg.model.n_heads = 32;
        cfg.model.n_kv_heads = 8;
        cfg.model.head_dim = DIM;
        cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
        bench_must(tkv_estimate_memory(&cfg, 65536, 1, &info), plan);
        double bits;
        bits = 8.0 * (double)(archive->codes + archive->metadata) /
               ((double)archive->tokens * 2.0 * 8.0 * (double)DIM);
        printf("%-13s %5.2f bits, %5.2f times below FP16\n", pairs[i], bits, 16.0 / bits);
    }
}

/* >>lengths */
/* Bytes of SmolLM2's cache with n tokens. Aligned: as bench/quality measures it (measure_align_layers). */
static double bytes_at(const char *preset, int n, int aligned) {
    enum { LAYERS = 30 };
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = tkv_default_config();
    tkv_memory_info info;
    memset(layers, 0, sizeof layers);
    set_plan(&cfg, preset);
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = 9;
    cfg.model.n_kv_heads = 3;
    cfg.model.head_dim = 64;
    cfg.layers = layers;
    if (aligned) measure_align_layers(&cfg, layers);
    bench_must(tkv_estimate_memory(&cfg, n, 1, &info), preset);
    return (double)info.total;
}

static void print_lengths(void) {
    static const int lengths[] = {1024, 2048, 4096, 8192};
    const double fp16 = 30 * 2 * 3 * 64 * 2; /* bytes of a token */
    printf("SmolLM2: times below FP16 at a length, layers in turns and aligned; the same in the mean of the "
           "64 lengths\n"
           "around it; at most, how much more than aligned layers those in turns take there\n");
    for (size_t p = 0; p < sizeof plans / sizeof *plans; p++) {
        if (strchr(plans[p], ',') || strcmp(plans[p], "akv") == 0) continue;
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            const int n = lengths[i];
            double sums[2] = {0.0, 0.0}, most = 0.0;
            for (int at = n - TOKENS / 2; at < n + TOKENS / 2; at++) {
                const double turns = bytes_at(plans[p], at, 0), aligned = bytes_at(plans[p], at, 1);
                sums[0] += turns;
                sums[1] += aligned;
                most = turns / aligned > most ? turns / aligned : most;
            }
            printf("%-9s %5d  %5.2f %5.2f  %5.2f %5.2f  %5.1f %%\n", plans[p], n,
                   fp16 * n / bytes_at(plans[p], n, 0), fp16 * n / bytes_at(plans[p], n, 1),
                   fp16 * n * (double)TOKENS / sums[0], fp16 * n * (double)TOKENS / sums[1],
                   100.0 * (most - 1.0));
        }
    }
}

/* >>errors */
static tkv_codec codec_of(tkv_format format, tkv_side side) {
    tkv_codec c;
    memset(&c, 0, sizeof c);
    c.format = format;
    c.side = side;
    c.head_dim = DIM;
    c.options.kvquant = TKV_KVQUANT_POST_ROPE;
    return c;
}

typedef struct error_sums {
    double error, value, range;
    int n_ranges;
} error_sums;

/* Adds the errors of a block. A group of 64 has a channel's tokens for K, and half of a token's channels for V. */
static void add_block(error_sums *s, const float *x, const float *y, tkv_side side) {
    for (int g = 0; g < TOKENS * DIM / 64; g++) {
        const int start = side == TKV_K ? g : g * 64, step = side == TKV_K ? DIM : 1;
        float least = x[start], most = x[start];
        for (int i = 0; i < 64; i++) {
            const int at = start + i * step;
            double d = (double)(y[at] - x[at]);
            s->error += d * d;
            s->value += (double)(x[at] * x[at]);
            least = x[at] < least ? x[at] : least;
            most = x[at] > most ? x[at] : most;
        }
        s->range += (double)(most - least);
        s->n_ranges++;
    }
}

static void print_errors(void) {
    static const char *const names[] = {"q8",       "kivi4",    "kivi3", "kivi2", "int8", "int4",    "fp4",
                                        "fp8-e4m3", "fp8-e5m2", "r40",   "r30",   "r20",  "kvquant3"};
    static float x[TOKENS * DIM], y[TOKENS * DIM];
    static unsigned char bytes[65536];
    printf("normal values, %d blocks: error of K and V over the size of values, and over the range of 64\n",
           BLOCKS);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        printf("%-9s", names[i]);
        for (int side = 0; side < 2; side++) {
            tkv_codec c = codec_of(bench_format_named(names[i]), side ? TKV_V : TKV_K);
            error_sums s = {0.0, 0.0, 0.0, 0};
            uint64_t state = 7;
            size_t size = tkv_get_block_bytes(&c);
            if (size == 0 || size > sizeof bytes) {
                printf("  %s -                ", side ? "V" : "K");
                continue;
            }
            for (int b = 0; b < BLOCKS; b++) {
                bench_fill(&state, x, TOKENS * DIM);
                bench_must(tkv_encode_block(&c, x, 0, TOKENS, bytes, size), names[i]);
                bench_must(tkv_decode_block(&c, bytes, size, TOKENS, y, 0), names[i]);
                add_block(&s, x, y, side ? TKV_V : TKV_K);
            }
            printf("  %s %6.2f %%, %6.3f %%", side ? "V" : "K", 100.0 * sqrt(s.error / s.value),
                   100.0 * sqrt(s.error / (BLOCKS * TOKENS * DIM)) / (s.range / s.n_ranges));
        }
        printf("\n");
    }
}

/* >>time */
static void print_time(void) {
    tkv_pressure controller;
    double least = 1.0;
    int levels = 0;
    bench_must(tkv_init_pressure(&controller, NULL, NULL, 0), "tkv_init_pressure");
    for (int run = 0; run < RUNS; run++) {
        double t = bench_seconds(1);
        for (int i = 0; i < CALLS; i++)
            levels += tkv_observe_pressure(&controller, (float)(i & 1023) / 1024.0f);
        t = (bench_seconds(1) - t) / (double)CALLS;
        least = t < least ? t : least;
    }
    printf("tkv_observe_pressure: %.1f ns per call, least of %d runs (sum of levels: %d)\n", 1e9 * least,
           RUNS, levels);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (!*what || strcmp(what, "bytes") == 0) print_bytes();
    if (!*what || strcmp(what, "archive") == 0) print_archive();
    if (!*what || strcmp(what, "lengths") == 0) print_lengths();
    if (!*what || strcmp(what, "errors") == 0) print_errors();
    if (!*what || strcmp(what, "time") == 0) print_time();
    return 0;
}
