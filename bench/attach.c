/*
 * attach.c - measures attached files: a sequence is saved, mapped and attached (tkv_load_params.attach), and attention
 * reads it where it lies. One thread. POSIX.
 *
 * cc -O2 bench/attach.c examples/tieredkv.c -o attach -lm -pthread && ./attach
 *
 *   --tokens 131072    length; 1048576 takes 5 GB of disk for the default shape, and minutes to make
 *   --layers 30 --heads 9 --kv-heads 3 --dim 64     the shape: that of SmolLM2-135M
 *   --plan balanced    a name of bench_plan in bench.h
 *   --file attach.tkv  where the sequence is saved; it is deleted at the end
 *   --runs 5
 *
 * attach: milliseconds by the clock until the sequence is ready, the first time, when its tables are new to the cache
 * and the file's pages to the program, and the least of the later times. index: bytes of the file that are no blocks,
 * for each block. attend: milliseconds for a query in layer 0: the first time, when each block is verified, the least
 * of later times, and over the same sequence in RAM. Outputs must be the same bits.
 */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 /* clock_gettime, mmap */
#endif
#include "../tieredkv.h"

#include "../examples/map_file.h"
#include "bench.h"

enum { CHUNK = 512 };

static int write_bytes(void *file, const void *bytes, size_t size) {
    return fwrite(bytes, 1, size, (FILE *)file) != size;
}

static void make_sequence(tkv_cache *kv, const tkv_config *cfg, int tokens) {
    uint64_t seed = 1;
    float *values = bench_values(cfg, &seed);
    int n, layer;
    for (n = 0; n < tokens; n += CHUNK) {
        for (layer = 0; layer < cfg->model.n_layers; layer++)
            bench_must(tkv_append(kv, 0, layer, values, values, CHUNK), "tkv_append");
        if (n % (16 * CHUNK) == 0) fprintf(stderr, "\r%d of %d tokens", n, tokens);
    }
    bench_clear_line();
    free(values);
}

/* Milliseconds of attention in layer 0. */
static double attend(tkv_cache *kv, const float *q, float *out) {
    const double start = bench_seconds(0);
    bench_must(tkv_attend(kv, 0, 0, q, 1, out), "tkv_attend");
    return 1e3 * (bench_seconds(0) - start);
}

/* The bytes of the sections that are no records. */
static double index_bytes(const map_file *f) {
    const unsigned char *end = (const unsigned char *)f->bytes + f->size - 40, *e;
    double n = (double)f->size;
    uint64_t at = 0, bytes;
    int i;
    for (i = 0; i < 8; i++) at |= (uint64_t)end[i] << 8 * i;
    for (e = (const unsigned char *)f->bytes + at; e < end; e += 32) {
        for (i = 0, bytes = 0; i < 8; i++) bytes |= (uint64_t)e[16 + i] << 8 * i;
        if (e[0] == 4) n -= (double)bytes;
    }
    return n;
}

int main(int argc, char **argv) {
    const char *plan = bench_option(argc, argv, "plan"), *path = bench_option(argc, argv, "file");
    const int tokens = bench_number(argc, argv, "tokens", 131072), runs = bench_number(argc, argv, "runs", 5);
    tkv_config cfg;
    tkv_cache *a, *b;
    tkv_save_params save;
    tkv_load_params load;
    tkv_load_info info;
    tkv_memory_info before, after;
    double first = 0.0, least = 0.0, attend_first = 0.0, attend_least = 0.0, in_ram = 0.0, index = 0.0;
    size_t size = 0;
    int run;
    memset(&cfg, 0, sizeof cfg);
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    memset(&info, 0, sizeof info);
    memset(&after, 0, sizeof after);
    cfg.model.n_layers = bench_number(argc, argv, "layers", 30);
    cfg.model.n_heads = bench_number(argc, argv, "heads", 9);
    cfg.model.n_kv_heads = bench_number(argc, argv, "kv-heads", 3);
    cfg.model.head_dim = bench_number(argc, argv, "dim", 64);
    cfg.limits.max_append = CHUNK;
    if (!plan) plan = "balanced";
    if (!path) path = "attach.tkv";
    if (!bench_plan(&cfg, plan)) bench_fail("attach: no plan %s", plan);
    if (tokens < CHUNK || runs < 2) bench_fail("attach: at least %d tokens and 2 runs", CHUNK);
    bench_must(tkv_create(&cfg, &a), "tkv_create");
    bench_must(tkv_create(&cfg, &b), "tkv_create");
    uint64_t seed = 7;
    float *q = bench_queries(&cfg, 1, &seed);
    const size_t out_bytes = (size_t)(cfg.model.n_heads * cfg.model.head_dim) * sizeof(float);
    float *want = (float *)bench_alloc(out_bytes), *out = (float *)bench_alloc(out_bytes);
    make_sequence(a, &cfg, tokens);
    FILE *f = fopen(path, "wb");
    if (!f) bench_fail("attach: cannot write %s", path);
    bench_must(tkv_seq_save_to(a, &save, write_bytes, f), "tkv_seq_save_to");
    if (fclose(f)) bench_fail("attach: cannot write %s", path);
    (void)attend(a, q, want);
    for (run = 0; run < runs; run++) bench_keep_least(&in_ram, attend(a, q, want), run);
    bench_must(tkv_get_memory(b, &before), "tkv_get_memory");
    load.attach = 1;
    load.release = map_file_release;
    for (run = 0; run < runs; run++) {
        double start, ms;
        map_file *m = map_file_open(path);
        if (!m) bench_fail("attach: cannot map %s", path);
        size = m->size;
        index = index_bytes(m);
        load.release_user = m;
        start = bench_seconds(0);
        bench_must(tkv_seq_load(b, &load, m->bytes, m->size, &info), "tkv_seq_load");
        ms = 1e3 * (bench_seconds(0) - start);
        if (run) bench_keep_least(&least, ms, run - 1);
        else first = ms;
        bench_must(tkv_get_memory(b, &after), "tkv_get_memory");
        ms = attend(b, q, out);
        if (memcmp(want, out, out_bytes) != 0) bench_fail("attach: attention differs");
        if (!run) attend_first = ms;
        bench_keep_least(&attend_least, attend(b, q, out), run);
        bench_must(tkv_seq_reset(b, 0), "tkv_seq_reset"); /* unmaps the file */
    }
    remove(path);
    printf("%s, %d layers, %d query and %d KV heads of %d channels, %s kernels\n", plan, cfg.model.n_layers,
           cfg.model.n_heads, cfg.model.n_kv_heads, cfg.model.head_dim,
           tkv_get_name(TKV_NAME_ISA, bench_isa_of(a)));
    printf("tokens %d, file %.1f MB, %d blocks stay in it, index %.1f bytes a block\n", tokens,
           1e-6 * (double)size, info.n_attached, index / info.n_attached);
    printf("attach %.2f ms, later %.2f (%.0f ns a block); RAM %.2f MB instead of %.1f\n", first, least,
           1e6 * least / info.n_attached, 1e-6 * (double)(after.total - before.total), 1e-6 * (double)size);
    printf("attend, layer 0: first %.2f ms, later %.2f; in RAM %.2f\n", attend_first, attend_least, in_ram);
    tkv_destroy(a);
    tkv_destroy(b);
    free(q);
    free(want);
    free(out);
    return 0;
}
