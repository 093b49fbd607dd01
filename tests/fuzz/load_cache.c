/*
 * load_cache.c - a fuzz target: the bytes of an input change a saved whole cache, all checksums of sections are
 * repaired, and a new cache of the same config loads it.
 *
 * At the start caches of each config are filled by a script of random calls and saved. An input names one of them, and
 * changes words of its sections: numbers of the cache, lists, holders of shared blocks, tables, states. It is loaded
 * from memory, through a callback, attached, or with an allocator that fails.
 *
 * After a load the cache passes its self-check, goes on with calls of the script, is saved, and a twin loads that. After
 * a refusal it has an error with a sentence, holds the bytes of a new cache, and loads the right file.
 *
 * Coverage-guided, with clang: make fuzz TARGET=load_cache
 * As a plain program, with any compiler, for random inputs or for files of inputs:
 *     cc -O2 -DTKV_FUZZ_MAIN -include assert.h -DTKV_ASSERT=assert tests/fuzz/load_cache.c examples/tieredkv.c \
 *         -o load_cache -lm
 *     ./load_cache --runs 100000 [--seed 1] [--bytes 40]
 */
#include "../whole_caches.h"
#include "saved_changes.h"

enum { MOST = 1 << 20, SCRIPTS = 3 }; /* bytes of a file; files of a config */

static struct {
    uint8_t bytes[MOST];
    size_t n;
} files[CONFIGS][SCRIPTS];
static uint8_t file_room[MOST + 64], again[MOST], scratch[MOST];
static counting_allocator memory;
static long n_loaded, n_refused;

static tkv_cache *create_for(int number) {
    static tkv_allocator allocator;
    tkv_config cfg = config_number(number);
    if (!allocator.alloc) allocator = counting_allocator_of(&memory); /* it begins with no bytes */
    cfg.host.allocator = allocator;
    return create_cache(&cfg);
}

static tkv_status save_to(tkv_cache *kv, uint8_t *to, size_t *n) {
    tkv_save_params p = save_params(TKV_ALL_SEQS);
    p.scratch = scratch;
    p.scratch_bytes = sizeof scratch;
    return tkv_seq_save(kv, &p, to, MOST, n);
}

static void make_files(void) {
    int i, k;
    for (i = 0; i < CONFIGS && !files[i][0].n; i++)
        for (k = 0; k < SCRIPTS; k++) {
            tkv_cache *kv = create_for(i);
            int call, seq;
            run_script(kv, 40 * k, k < 2 ? 6 + 10 * k : 4);
            for (call = 0; k == 2 && call < 40; call++) (void)move_number(kv, 100 * i + call, &seq);
            if (k == 1) CHECK_EQ(tkv_seq_put_state(kv, 1, 0, 1, "a state", 7), TKV_OK);
            if (k == 1) CHECK_EQ(tkv_seq_fork(kv, 1, 4, TKV_UNLIMITED), TKV_OK);
            CHECK_EQ(save_to(kv, files[i][k].bytes, &files[i][k].n), TKV_OK);
            tkv_destroy(kv);
        }
}

/* >>a load, and what follows */
static void check_whole(tkv_cache *kv, const char *when) {
    char reason[160];
    const tkv_status st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s: %s", when, reason);
}

static void go_on(tkv_cache *kv, int number, int is_attached) {
    const tkv_load_params load = load_params(TKV_ALL_SEQS);
    size_t n = 0;
    tkv_cache *twin;
    tkv_status st;
    int i, seq;
    n_loaded++;
    if (next_byte() % 4) return;
    for (i = next_byte() % 6; i > 0; i--)
        if (next_byte() % 2) (void)call_number(kv, next_byte());
        else (void)move_number(kv, next_byte(), &seq);
    check_whole(kv, "after calls");
    st = save_to(kv, again, &n);
    CHECK(st == TKV_OK || n > MOST || (is_attached && st == TKV_ERR_DATA));
    if (st) return;
    twin = create_for(number);
    st = tkv_seq_load(twin, &load, again, n, NULL);
    CHECK_MSG(st == TKV_OK, "what was loaded and saved is refused: %s", tkv_get_last_error(twin));
    check_whole(twin, "the twin");
    tkv_destroy(twin);
}

static void run_input(void) {
    const int number = next_byte() % CONFIGS, script = next_byte() % SCRIPTS, way = next_byte() % 8;
    uint8_t *file = file_room + (64 - (uintptr_t)file_room % 64) % 64;
    const size_t n = files[number][script].n;
    tkv_load_params load = load_params(TKV_ALL_SEQS);
    tkv_cache *kv = create_for(number);
    const size_t held = memory.held;
    int n_changes = 1 + next_byte() % 4;
    tkv_status st;
    memcpy(file, files[number][script].bytes, n);
    for (; n_changes > 0; n_changes--)
        if (next_byte() % 8) change_word(file, n);
        else copy_words(file, n);
    repair_index(file, n);
    load.attach = way == 1;
    memory.n_requests = 0;
    memory.fail_at = way == 2 ? 1 + next_byte() % 60 : 0;
    if (way == 3) {
        read_file f = read_file_of(file, n);
        load.scratch = scratch;
        load.scratch_bytes = sizeof scratch;
        st = tkv_seq_load_from(kv, &load, n, read_from_file, &f, NULL);
    } else {
        st = tkv_seq_load(kv, &load, file, n, NULL);
    }
    memory.fail_at = 0;
    check_whole(kv, st ? "refused" : "loaded");
    if (!st) {
        go_on(kv, number, way == 1);
    } else {
        n_refused++;
        CHECK(st == TKV_ERR_DATA || st == TKV_ERR_CONFIG || st == TKV_ERR_CAPACITY || st == TKV_ERR_NOMEM ||
              st == TKV_ERR_BUDGET);
        CHECK(tkv_get_last_error(kv)[0] != 0);
        CHECK_EQ(memory.held, held);
        if (n_refused % 16 == 0) {
            memset(&load, 0, sizeof load);
            load = load_params(TKV_ALL_SEQS);
            st = tkv_seq_load(kv, &load, files[number][script].bytes, n, NULL);
            CHECK_MSG(st == TKV_OK, "the right file is refused: %s", tkv_get_last_error(kv));
        }
    }
    tkv_destroy(kv);
    CHECK_EQ(memory.held, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    make_files();
    begin_input(data, size);
    run_input();
    end_input();
    return 0;
}

#ifdef TKV_FUZZ_MAIN
static int make_random(int seed, int n_bytes, uint8_t *bytes) {
    return random_bytes(seed, 10, n_bytes, 40, bytes);
}

int main(int argc, char **argv) {
    int n_runs;
    const int status = run_inputs(argc, argv, "load_cache", make_random, 40, 0, &n_runs);
    printf("%ld files loaded, %ld refused\n", n_loaded, n_refused);
    return status;
}
#endif
