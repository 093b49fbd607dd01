/*
 * calibrations.c - a fuzz target: the bytes of an input change a saved calibration, its checksum is repaired, and a
 * cache loads it.
 *
 * At the start caches of each config learn and save: A and R formats, KVQUANT before and after RoPE, both kinds, layers
 * of different shapes, more than 256 channels. An input changes numbers, exchanges bytes, cuts, grows, or takes the
 * file of another config. The cache is new, or has tokens and tables of its own; its allocator may fail.
 *
 * After a load the cache passes its self-check, and saves what it has. A twin loads that, and saves the same bytes.
 * Appends and attention give finite numbers. After a refusal there is a sentence, and tables, attention and bytes are
 * those from before.
 *
 * Coverage-guided, with clang: make fuzz TARGET=calibrations
 * As a plain program, with any compiler, for random inputs or for files of inputs:
 *     cc -O2 -DTKV_FUZZ_MAIN -include assert.h -DTKV_ASSERT=assert tests/fuzz/calibrations.c examples/tieredkv.c \
 *         -o calibrations -lm
 *     ./calibrations --runs 100000 [--seed 1] [--bytes 30]
 */
#include "../saved_files.h"
#include "target.h"

enum {
    CONFIGS = 6,
    WIDE = 5, /* the config of 272 channels: slow, so that few inputs have it */
    FILE_BYTES = 1 << 13,
    CHUNK = 64,
    MOST_ROW = 272,
    LEARNED = 300,
    HEADER = 24,
    LAYERS = 2
};

static struct {
    uint8_t bytes[FILE_BYTES];
    size_t n;
} files[CONFIGS];

static counting_allocator memory;
static long n_loaded, n_refused;
static tkv_layer_config shapes[LAYERS];

static tkv_config config_of(int i) {
    tkv_config c = make_sized_config(LAYERS, 2, 2, 8, 1, CHUNK);
    c.tiers.hot_tokens = TKV_OFF;
    c.tiers.warm_tokens = 64;
    c.tiers.warm = pair_of(TKV_A40, TKV_R40);
    c.tiers.archive = pair_of(TKV_A20, TKV_R15);
    if (i == 1 || i == 4) c.tiers.warm = c.tiers.archive = pair_of(TKV_KVQUANT4, TKV_KVQUANT3);
    if (i == 1) c.format.kvquant = TKV_KVQUANT_POST_ROPE;
    if (i == 2) c.tiers.archive = pair_of(TKV_A30, TKV_KVQUANT2);
    if (i == 3) { /* layers of two shapes; V of the second is inside its K */
        memset(shapes, 0, sizeof shapes);
        shapes[1].n_heads = shapes[1].n_kv_heads = 1;
        shapes[1].head_dim = 12;
        shapes[1].v_head_dim = 5;
        shapes[1].v_in_k = 1;
        c.layers = shapes;
        c.model.v_head_dim = 4;
    }
    if (i == 4) c.model.rope.dim = 8;
    if (i == WIDE) c.model.n_heads = c.model.n_kv_heads = c.model.n_layers = 1, c.model.head_dim = MOST_ROW;
    return c;
}

static tkv_cache *create_for(int i) {
    tkv_config cfg = config_of(i);
    cfg.host.allocator = counting_allocator_of(&memory);
    return create_cache(&cfg);
}

/* Appends n tokens to each layer, of values up to `size`. A row of the last config is wider than those of others. */
static void append_rows(tkv_cache *kv, int i, int n, float size) {
    static float k[CHUNK * MOST_ROW], v[CHUNK * MOST_ROW];
    tkv_rng rng = tkv_rng_seed((uint64_t)(i * 1000 + n));
    const int row = i == WIDE ? MOST_ROW : 16;
    int layer, n_now, j;
    for (; n > 0; n -= n_now)
        for (n_now = n < CHUNK ? n : CHUNK, layer = 0; layer < last_config.model.n_layers; layer++) {
            tkv_rng_fill(&rng, k, (size_t)(n_now * row), 1.0);
            for (j = 0; j < n_now * row; j++) k[j] *= size;
            memcpy(v, k, (size_t)(n_now * row) * sizeof *v);
            CHECK_EQ(tkv_append(kv, 0, layer, k, v, n_now), TKV_OK);
        }
}

/* Attends in each layer. Returns a hash of the outputs, which must be finite. */
static uint64_t attend(tkv_cache *kv) {
    float q[2 * MOST_ROW], out[2 * MOST_ROW];
    uint64_t h = HASH_START;
    int layer, i;
    for (layer = 0; layer < last_config.model.n_layers && tkv_get_length(kv, 0, 0) > 0; layer++) {
        for (i = 0; i < COUNT(q); i++) q[i] = (float)((i * 37 + layer * 11) % 17 - 8) / 8.0f;
        memset(out, 0, sizeof out);
        CHECK_EQ(tkv_attend(kv, 0, layer, q, 1, out), TKV_OK);
        for (i = 0; i < COUNT(out); i++)
            if (!tkv_test_is_finite((double)out[i])) break;
        CHECK_MSG(i == COUNT(out), "layer %d: output %d is not finite", layer, i);
        h = hash_of_words(h, out, sizeof out);
    }
    return h;
}

static size_t save_to(const tkv_cache *kv, uint8_t *to) {
    size_t n = 0;
    CHECK_EQ(tkv_save_calibration(kv, to, FILE_BYTES, &n), TKV_OK);
    return n;
}

static void make_files(void) {
    int i;
    for (i = 0; i < CONFIGS && !files[i].n; i++) {
        tkv_cache *kv = create_for(i);
        append_rows(kv, i, LEARNED, 1.0f);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
        files[i].n = save_to(kv, files[i].bytes);
        tkv_destroy(kv);
    }
}

/* >>changes */
static uint8_t file[FILE_BYTES + 64];
static size_t n_file;

/* A place in the file, seldom in its head. */
static size_t choose_place(void) {
    const int how = next_byte() % 32;
    const size_t at = how == 31 ? (size_t)next_byte() % HEADER
                      : how < 3
                          ? HEADER + (size_t)next_byte() % 64
                          : HEADER + (size_t)next_below(1 << 14) % (n_file > HEADER ? n_file - HEADER : 1);
    return n_file ? at % n_file : 0;
}

static void change_file(void) {
    static const int words[] = {0, 1, 2, 3, 0x7bff, 0x7c00, 0x7fff, 0x8000, 0xffff, 0xfc00, 0x7f80, 0x3c00};
    const int how = next_byte() % 16;
    const size_t at = choose_place(), other = choose_place();
    const int value = words[next_byte() % COUNT(words)];
    size_t n;
    uint8_t was;
    if (!n_file) return;
    if (how < 5) {
        file[at] = (uint8_t)next_byte();
    } else if (how < 8) {
        file[at] = (uint8_t)(file[at] + next_byte() % 5 - 2);
    } else if (how < 11) { /* a permutation stays one */
        was = file[at], file[at] = file[other], file[other] = was;
    } else if (how < 14) {
        file[at] = (uint8_t)(value & 255);
        if (at + 1 < n_file) file[at + 1] = (uint8_t)(value >> 8);
    } else if (how == 14) {
        n_file = next_byte() % 4 ? n_file - 1 - (size_t)next_byte() % (n_file < 64 ? n_file : 64) : at;
    } else {
        n = (size_t)next_byte() % 64;
        memmove(file + at + n, file + at,
                n_file - at < sizeof file - at - n ? n_file - at : sizeof file - at - n);
        n_file += n_file + n < FILE_BYTES ? n : 0;
    }
}

/* >>a load, and what follows */
static tkv_status load_exactly(tkv_cache *kv, const uint8_t *bytes, size_t n) {
    uint8_t *copy = (uint8_t *)malloc(n ? n : 1);
    tkv_status st;
    if (!copy) exit(2);
    memcpy(copy, bytes, n);
    st = tkv_load_calibration(kv, copy, n);
    free(copy);
    return st;
}

static void go_on(tkv_cache *kv, int number) {
    static const float sizes[] = {1.0f, 0.0f, 1e-6f, 100.0f, 6e4f, 1e12f};
    static uint8_t saved[FILE_BYTES], again[FILE_BYTES];
    const size_t n = save_to(kv, saved);
    counting_allocator mine;
    tkv_config cfg = config_of(number);
    tkv_cache *twin;
    int n_new;
    n_loaded++;
    cfg.host.allocator = counting_allocator_of(&mine);
    twin = create_cache(&cfg);
    CHECK_EQ(load_exactly(twin, saved, n), TKV_OK);
    CHECK_EQ(save_to(twin, again), n);
    CHECK_MEM(saved, again, n);
    tkv_destroy(twin);
    n_new = next_byte();
    append_rows(kv, number, n_new < 224 ? 66 + n_new % 64 : n_new, sizes[next_byte() % COUNT(sizes)]);
    check_cache(kv);
    (void)attend(kv);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    (void)attend(kv);
    n_new = next_byte() % 4 == 0 ? 64 : 10;
    if (n_new == 64) CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    append_rows(kv, number, n_new, 1.0f);
    check_cache(kv);
}

static void run_input(void) {
    static uint8_t before[FILE_BYTES], after[FILE_BYTES];
    const int which = next_byte(), way = next_byte();
    const int number = which < 240 ? which % WIDE : WIDE;
    const int from = way % 16 == 15 ? next_byte() % CONFIGS : number;
    tkv_cache *kv = create_for(number);
    uint64_t attended;
    size_t n, held;
    tkv_status st;
    int i;
    if (way % 4 == 1) append_rows(kv, number, way < 224 ? 66 + way % 64 : 70 + way, 1.0f);
    if (way % 8 == 5) (void)load_exactly(kv, files[number].bytes, files[number].n);
    n_file = files[from].n;
    memcpy(file, files[from].bytes, n_file);
    for (i = next_byte() % 8 < 6 ? 1 : 3; i > 0; i--) change_file();
    if (way % 32 != 2 && n_file >= 8) put64(file + n_file - 8, hash_of(HASH_START, file, n_file - 8));
    n = save_to(kv, before);
    attended = attend(kv);
    held = memory.held;
    memory.fail_at = way % 32 == 3 ? 1 + next_byte() % 3 : 0;
    st = load_exactly(kv, file, n_file);
    memory.fail_at = 0;
    check_cache(kv);
    if (st) {
        CHECK(st == TKV_ERR_DATA || (st == TKV_ERR_NOMEM && way % 32 == 3) || st == TKV_ERR_CAPACITY);
        CHECK(tkv_get_last_error(kv)[0] != 0);
        CHECK(st != TKV_ERR_DATA || memory.held == held);
        CHECK_EQ(save_to(kv, after), n);
        CHECK_MEM(after, before, n);
        CHECK(attend(kv) == attended);
        n_refused++;
    } else {
        CHECK(attend(kv) == attended); /* stored blocks keep their tables */
        go_on(kv, number);
    }
    tkv_destroy(kv);
    CHECK_EQ(memory.held, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    begin_input(data, size);
    make_files();
    run_input();
    end_input();
    return 0;
}

#ifdef TKV_FUZZ_MAIN
static int make_random(int seed, int n_bytes, uint8_t *bytes) {
    return random_bytes(seed, 8, n_bytes, 30, bytes);
}

int main(int argc, char **argv) {
    int n_runs;
    const int status = run_inputs(argc, argv, "calibrations", make_random, 30, 0, &n_runs);
    printf("%ld calibrations loaded, %ld refused\n", n_loaded, n_refused);
    return status;
}
#endif
