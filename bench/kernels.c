/*
 * kernels.c - measures only the kernels of each instruction set: scores, exponentials and values of one block (64
 * tokens) of one KV head. The block stays in the processor's cache. One thread.
 *
 * cc -O2 bench/kernels.c -o kernels -lm && ./kernels
 *
 *   --formats kivi4+kivi4,a30+r20    pairs of formats for K and V
 *   --isa avx512                     only this instruction set
 *   --dim 128 --rows 4               head_dim, query heads per KV head
 *   --runs 400                       a run has 16 blocks
 *   --blocks 1000                    computes this many blocks and measures nothing, for tools that count
 *   instructions --csv
 *
 * Each result is compared with the scalar one before it is measured. Times are ns per token and KV head in thread CPU
 * time, the least of all runs. Channels of A formats get equal bits, without an order and without means.
 *
 * To count instructions per token under qemu, run n and m blocks, and divide the difference of the counts by 64 (m -
 * n):
 *
 *   cc -O2 -shared -fPIC tools/qemu_count.c -o qemu_count.so
 *   qemu-aarch64 -plugin ./qemu_count.so kernels --formats a30+r20 --isa neon --blocks n (then m)
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "bench.h"

enum { BLOCKS = 16, MAX_RUNS = 10000 };

typedef struct block { /* a coded block, and queries that attend to it */
    tkvi_side k, v;
    uint8_t *keys, *values;
    float q[TKVI_ROWS * TKV_MAX_HEAD_DIM], ref[TKV_MAX_HEAD_DIM];
    float scores[TKVI_ROWS * TKVI_BLOCK], out[TKVI_ROWS * TKV_MAX_HEAD_DIM];
} block;

static uint8_t *encode_random(tkvi_side *s, tkv_format f, tkv_side which, int dim, uint64_t *seed) {
    float *x = (float *)bench_alloc((size_t)(TKVI_BLOCK * dim) * sizeof(float));
    tkvi_side_init(s, &tkvi_formats[f], which, dim, 64, TKVI_BLOCK, NULL);
    uint8_t *bytes = (uint8_t *)bench_alloc(s->bytes);
    bench_fill(seed, x, (size_t)(TKVI_BLOCK * dim));
    tkvi_encode_side(s, &tkvi_simd_ops_scalar, x, (size_t)dim, TKVI_BLOCK, bytes);
    free(x);
    return bytes;
}

/* Attends to a block as attention does, without the update of an earlier maximum. */
static void attend(const tkvi_kernels *kernels, block *b, int rows) {
    kernels->k[b->k.format->stored](&b->k, b->keys, NULL, b->q, b->ref, rows, TKVI_BLOCK,
                                    tkvi_n_limbs(&b->k, 0), b->scores);
    for (int r = 0; r < rows; r++) {
        float *s = b->scores + r * TKVI_BLOCK;
        kernels->exp64(s, kernels->max64(s), s);
    }
    kernels->v[b->v.format->stored](&b->v, b->values, NULL, b->scores, rows, TKVI_BLOCK,
                                    tkvi_n_limbs(&b->v, 0), b->out);
}

static void check(const tkvi_kernels *kernels, block *b, int rows) {
    static float want[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    float most = 0.0f, error = 0.0f;
    int n = rows * b->v.pad;
    memset(b->out, 0, sizeof b->out);
    attend(&tkvi_kernels_scalar, b, rows);
    memcpy(want, b->out, sizeof want);
    memset(b->out, 0, sizeof b->out);
    attend(kernels, b, rows);
    for (int i = 0; i < n; i++) {
        most = fabsf(want[i]) > most ? fabsf(want[i]) : most;
        error = fabsf(want[i] - b->out[i]) > error ? fabsf(want[i] - b->out[i]) : error;
    }
    if (!(error <= 1e-4f * most)) bench_fail("%s: results differ from the scalar code", kernels->name);
}

static double measure(const tkvi_kernels *kernels, block *b, int rows, int runs) {
    double least = 1e30;
    for (int i = 0; i < runs; i++) {
        double start = bench_seconds(1), s;
        for (int j = 0; j < BLOCKS; j++) attend(kernels, b, rows);
        s = bench_seconds(1) - start;
        least = s < least ? s : least;
    }
    return least * 1e9 / (BLOCKS * TKVI_BLOCK);
}

static tkv_format format_of(char *name, const char *pair, tkv_side which) {
    tkv_format f = bench_format_named(name);
    if (f == TKV_FORMAT_DEFAULT || !tkvi_format_stores(&tkvi_formats[f], which))
        bench_fail("\"%s\" is not a pair of formats for K and V", pair);
    return f;
}

int main(int argc, char **argv) {
    const char *formats = bench_option(argc, argv, "formats"), *only = bench_option(argc, argv, "isa");
    int dim = bench_number(argc, argv, "dim", 128), rows = bench_number(argc, argv, "rows", 4);
    int runs = bench_number(argc, argv, "runs", 400), blocks = bench_number(argc, argv, "blocks", 0);
    int csv = bench_option(argc, argv, "csv") != NULL, isa, i;
    static block b;
    if (dim < 1 || dim > TKV_MAX_HEAD_DIM || rows < 1 || rows > TKVI_ROWS || runs < 1 || runs > MAX_RUNS) {
        fprintf(stderr, "--dim: 1 to %d; --rows: 1 to %d; --runs: 1 to %d\n", TKV_MAX_HEAD_DIM, TKVI_ROWS,
                MAX_RUNS);
        return 1;
    }
    if (!csv) printf("kernels: head_dim %d, %d rows, 1 thread; ns per token and KV head\n", dim, rows);
    printf(csv ? "formats" : "formats       ");
    for (isa = TKV_ISA_SCALAR; isa < TKV_ISA_COUNT; isa++)
        if (bench_isa_available((tkv_isa)isa) &&
            (!only || strcmp(only, tkv_get_name(TKV_NAME_ISA, (tkv_isa)isa)) == 0))
            printf(csv ? ",%s" : " %8s", tkv_get_name(TKV_NAME_ISA, (tkv_isa)isa));
    printf("\n");
    if (!formats || !*formats)
        formats = "f32+f32,f16+f16,bf16+bf16,q8+q8,kivi4+kivi4,kivi3+kivi3,kivi2+kivi2,a40+r40,a30+r30,"
                  "a30+r20,a25+r20,a20+r15";
    char pair[64];
    while (bench_word(&formats, pair, sizeof pair)) {
        uint64_t seed = 1;
        char *plus = strchr(pair, '+'), name[2][64];
        strcpy(name[0], pair);
        strcpy(name[1], plus ? plus + 1 : "");
        if (plus) name[0][plus - pair] = 0;
        b.keys = encode_random(&b.k, format_of(name[0], pair, TKV_K), TKV_K, dim, &seed);
        b.values = encode_random(&b.v, format_of(name[1], pair, TKV_V), TKV_V, dim, &seed);
        bench_fill(&seed, b.q, (size_t)(rows * b.k.pad));
        for (i = 0; i < rows * b.k.pad; i++) b.q[i] = i % b.k.pad < dim ? 0.1f * b.q[i] : 0.0f;
        printf(csv ? "%s" : "%-14s", pair);
        for (isa = TKV_ISA_SCALAR; isa < TKV_ISA_COUNT; isa++) {
            const tkvi_kernels *kernels = tkvi_kernels_for((tkv_isa)isa);
            if (!kernels || (only && strcmp(only, kernels->name) != 0)) continue;
            check(kernels, &b, rows);
            for (i = 0; i < blocks; i++) attend(kernels, &b, rows);
            if (!blocks) printf(csv ? ",%.2f" : " %8.2f", measure(kernels, &b, rows, runs));
        }
        printf("\n");
        fflush(stdout);
        free(b.keys);
        free(b.values);
    }
    return 0;
}
