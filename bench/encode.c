/*
 * encode.c - measures the encoding of one block (64 tokens) of one head. One thread.
 *
 * cc -O2 bench/encode.c -o encode -lm && ./encode
 *
 *   --formats a30,r20,kivi4    names of formats
 *   --isa avx512               only this instruction set
 *   --dim 128 --tokens 64
 *   --runs 400                 a run encodes eight blocks, which fit into the L2 cache
 *   --csv
 *
 * Each instruction set must give the bytes of the scalar code before it is measured. Times are microseconds per block
 * and head in thread CPU time: the least of all runs and the median. Other programs can only raise a time, so the
 * least is the best estimate. `bytes` is the size of one block. Keys of A formats use a table similar to a learned
 * one: a shuffled order of channels, means, and tiles of several widths.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "bench.h"

enum { BLOCKS = 8, MAX_RUNS = 10000 };

/* A table as calibration makes it, for a head whose channels differ in importance by eight octaves. */
typedef struct table {
    uint8_t order[TKV_MAX_HEAD_DIM], importance[TKV_MAX_HEAD_DIM];
    float mean[TKV_MAX_HEAD_DIM];
    tkvi_share share;
} table;

static const tkvi_share *make_table(table *t, const tkvi_format *f, tkv_side which, int dim) {
    int pad = (dim + 15) / 16 * 16, i;
    uint64_t rng = 7;
    if (!f->shared) return NULL;
    memset(t, 0, sizeof *t);
    tkvi_head head;
    memset(&head, 0, sizeof head);
    for (i = 0; i < pad; i++) {
        t->order[i] = (uint8_t)i;
        t->importance[i] = (uint8_t)(i < dim ? 100 - 64 * i / dim : 0);
    }
    for (i = dim - 1; i > 0; i--) {
        int j = (int)((bench_gauss(&rng) + 4.0f) * 1000.0f) % (i + 1);
        uint8_t kept = t->order[i];
        t->order[i] = t->order[j];
        t->order[j] = kept;
    }
    for (i = 0; i < dim; i++) t->mean[i] = tkvi_f16_to_f32(tkvi_f32_to_f16(bench_gauss(&rng)));
    head.importance = t->importance;
    t->share.top = TKVI_LOG_TOP_DEFAULT;
    t->share.half_bits = f->bits / 2;
    if (which == TKV_K) {
        tkvi_choose_widths(&head, pad, 1, tkvi_head_budget(f->bits, dim, pad, 1), &t->share.tiles);
        t->share.order = t->order;
        t->share.mean = t->mean;
        t->share.importance = t->importance;
    }
    return &t->share;
}

static void encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, int n, uint8_t *dst) {
    for (int b = 0; b < BLOCKS; b++)
        tkvi_encode_side(s, ops, x + b * TKVI_BLOCK * s->dim, (size_t)s->dim, n, dst + (size_t)b * s->bytes);
}

static void measure(const char *name, tkv_format format, tkv_side which, const char *only, int dim, int n,
                    int runs, int csv, const float *x) {
    const tkvi_format *f = &tkvi_formats[format];
    double run[MAX_RUNS];
    tkvi_side s;
    table t;
    tkvi_side_init(&s, f, which, dim, 64, TKVI_BLOCK, make_table(&t, f, which, dim));
    uint8_t *want = (uint8_t *)bench_alloc(BLOCKS * s.bytes);
    uint8_t *got = (uint8_t *)bench_alloc(BLOCKS * s.bytes);
    printf(csv ? "%s,%s,%d" : "%-8s %s %8d", name, which == TKV_K ? "K" : "V", (int)s.bytes);
    encode(&s, &tkvi_simd_ops_scalar, x, n, want);
    for (int isa = TKV_ISA_SCALAR; isa < TKV_ISA_COUNT; isa++) {
        const tkvi_kernels *kernels = tkvi_kernels_for((tkv_isa)isa);
        if (!kernels || (only && strcmp(only, kernels->name) != 0)) continue;
        const tkvi_simd_ops *ops = kernels->simd_ops;
        encode(&s, ops, x, n, got);
        if (memcmp(want, got, BLOCKS * s.bytes) != 0)
            bench_fail("%s: bytes differ from the scalar code", tkv_get_name(TKV_NAME_ISA, (tkv_isa)isa));
        for (int i = 0; i < runs; i++) {
            double start = bench_seconds(1);
            encode(&s, ops, x, n, got);
            run[i] = (bench_seconds(1) - start) * 1e6 / (double)BLOCKS;
        }
        {
            double median = bench_median(run, runs);
            printf(csv ? ",%.2f,%.2f" : " %8.2f %8.2f", run[0], median);
        }
    }
    printf("\n");
    fflush(stdout);
    free(want);
    free(got);
}

int main(int argc, char **argv) {
    const char *formats = bench_option(argc, argv, "formats"), *only = bench_option(argc, argv, "isa");
    int dim = bench_number(argc, argv, "dim", 128), n = bench_number(argc, argv, "tokens", TKVI_BLOCK);
    int runs = bench_number(argc, argv, "runs", 400), csv = bench_option(argc, argv, "csv") != NULL, isa;
    uint64_t seed = 1;
    if (dim < 1 || dim > TKV_MAX_HEAD_DIM || n < 1 || n > TKVI_BLOCK || runs < 1 || runs > MAX_RUNS) {
        fprintf(stderr, "--dim: 1 to %d; --tokens: 1 to %d; --runs: 1 to %d\n", TKV_MAX_HEAD_DIM, TKVI_BLOCK,
                MAX_RUNS);
        return 1;
    }
    float *x = (float *)bench_alloc((size_t)(BLOCKS * TKVI_BLOCK * dim) * sizeof(float));
    bench_fill(&seed, x, (size_t)(BLOCKS * TKVI_BLOCK * dim));
    if (!csv)
        printf("encoding: head_dim %d, %d tokens, 1 thread; us per block and head: least, median\n", dim, n);
    printf(csv ? "format,side,bytes" : "format       bytes");
    for (isa = TKV_ISA_SCALAR; isa < TKV_ISA_COUNT; isa++)
        if (bench_isa_available((tkv_isa)isa) &&
            (!only || strcmp(only, tkv_get_name(TKV_NAME_ISA, (tkv_isa)isa)) == 0))
            printf(csv ? ",%s_least,%s_median" : " %8s %8s", tkv_get_name(TKV_NAME_ISA, (tkv_isa)isa),
                   csv ? tkv_get_name(TKV_NAME_ISA, (tkv_isa)isa) : "");
    printf("\n");
    if (!formats || !*formats) formats = "a40,a30,a25,a20,r40,r30,r20,r15,kivi4,kivi2";
    char word[32];
    while (bench_word(&formats, word, sizeof word)) {
        tkv_format f = bench_format_named(word);
        int some = 0;
        for (int side = TKV_K; f != TKV_FORMAT_DEFAULT && side <= TKV_V; side++)
            if (tkvi_format_stores(&tkvi_formats[f], (tkv_side)side)) {
                measure(word, f, (tkv_side)side, only, dim, n, runs, csv, x);
                some = 1;
            }
        if (!some) {
            fprintf(stderr, "unknown format \"%s\"\n", word);
            return 1;
        }
    }
    free(x);
    return 0;
}
