/*
 * test_save_cache.c - tkv_seq_save and tkv_seq_load of a whole cache (TKV_ALL_SEQS): everything that is done later gives
 * the same bits.
 *
 * A script of random calls runs on a cache and on its loaded twin. The whole state is compared by saving both again:
 * the bytes must be equal.
 */
#include "whole_caches.h"

enum { MOST = 8 << 20 };

static unsigned char file[MOST], twin_file[MOST];

static unsigned char scratch[2 << 20]; /* a full budget has no memory to spare */

static tkv_save_params save_all(void) {
    tkv_save_params p = save_params(TKV_ALL_SEQS);
    p.scratch = scratch;
    p.scratch_bytes = sizeof scratch;
    return p;
}

static size_t save_cache(tkv_cache *kv, unsigned char *to) {
    const tkv_save_params p = save_all();
    size_t counted = 0, written = 0;
    CHECK_EQ(tkv_seq_save(kv, &p, NULL, 0, &counted), TKV_OK);
    if (counted > MOST) exit(2);
    CHECK_EQ(tkv_seq_save(kv, &p, to, counted, &written), TKV_OK);
    CHECK_EQ(written, counted);
    return written;
}

static tkv_status load_cache(tkv_cache *kv, const unsigned char *from, size_t n) {
    const tkv_load_params p = load_params(TKV_ALL_SEQS);
    return tkv_seq_load(kv, &p, from, n, NULL);
}

/* >>twins */
static void check_alike(tkv_cache *a, tkv_cache *b, const char *what, int number) {
    const size_t n = save_cache(a, file), m = save_cache(b, twin_file);
    size_t at = 0;
    while (at < n && at < m && file[at] == twin_file[at]) at++;
    size_t kind = 99, within = at;
    for (uint64_t i = 0; n == m && at < n && i < count_of(file, n); i++) {
        const unsigned char *e = file + index_of(file, n) + 32 * i;
        if (at < get64(e + 8) || at >= get64(e + 8) + get64(e + 16)) continue;
        kind = get32(e);
        within = at - (size_t)get64(e + 8);
    }
    CHECK_MSG(n == m && at == n,
              "%s, config %d: %.0f and %.0f bytes, different in section %d from byte %.0f (%.0f, %.0f)", what,
              number, (double)n, (double)m, (int)kind, (double)within,
              at < n ? (double)get64(file + at / 8 * 8) : 0.0,
              at < m ? (double)get64(twin_file + at / 8 * 8) : 0.0);
    check_cache_at(b, what, number);
}

/* Runs the same calls on a cache and its twin. */
static void check_same_future(tkv_cache *a, tkv_cache *b, const char *what, int number) {
    check_alike(a, b, what, number);
    for (int i = 0; i < 60; i++) {
        const uint64_t x = call_number(a, 500 + i), y = call_number(b, 500 + i);
        CHECK_MSG(x == y, "%s, config %d: call %d answers otherwise", what, number, i);
        if (x != y) break;
    }
    check_alike(a, b, "later", number);
}

/* A loaded block may lie in a tier that tokens do not reach here. It is coded again without what that tier learns. */
TEST(loaded_blocks_in_a_tier_that_is_not_reached) {
    tkv_config cfg = make_config(LAYERS, SEQS), open_cfg;
    tkv_save_params save = save_params(0);
    tkv_load_params load = load_params(0);
    tkv_cache *kv, *other;
    size_t n = 0;
    int i, done = 0;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_SQUAT2, TKV_KIVI2);
    cfg.tiers.hot_tokens = 64;
    cfg.limits.max_tokens = 3000;
    open_cfg = cfg;
    open_cfg.tiers.hot_tokens = TKV_UNLIMITED;
    kv = create_cache(&cfg);
    other = create_cache(&open_cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 200, 64), TKV_OK);
    for (i = 0; i < 4; i++) { /* short blocks, which are joined later */
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 12, 64), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    }
    save.scratch = scratch;
    save.scratch_bytes = sizeof scratch;
    CHECK_EQ(tkv_seq_save(kv, &save, file, sizeof file, &n), TKV_OK);
    CHECK_EQ(tkv_seq_load(other, &load, file, n, NULL), TKV_OK);
    CHECK_EQ(append_to_all_layers(other, 0, 1, 300, 64), TKV_OK);
    CHECK_EQ(tkv_maintain(other, 1000, NULL, NULL, &done), TKV_OK);
    CHECK(done > 0);
    CHECK_EQ(tkv_check(other, NULL, 0), TKV_OK);
    tkv_destroy(kv);
    tkv_destroy(other);
}

/* A block of KVQUANT whose file says that it was coded without a table. */
TEST(blocks_that_lost_their_table_are_refused) {
    int whole;
    for (whole = 0; whole < 2; whole++) {
        const tkv_config cfg = config_number(3);
        tkv_save_params save = save_params(whole ? TKV_ALL_SEQS : 0);
        tkv_load_params load = load_params(whole ? TKV_ALL_SEQS : 0);
        tkv_cache *kv = create_cache(&cfg), *other = create_cache(&cfg);
        size_t n = 0;
        uint32_t i;
        int changed = 0;
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 2800, 64), TKV_OK);
        save.scratch = scratch;
        save.scratch_bytes = sizeof scratch;
        CHECK_EQ(tkv_seq_save(kv, &save, file, sizeof file, &n), TKV_OK);
        for (i = 0; i < count_of(file, n); i++) {
            const uint8_t *e = file + index_of(file, n) + 32 * i;
            size_t j;
            if (get32(e) != SAVED_LISTS) continue;
            for (j = (size_t)get64(e + 8); j + 24 <= (size_t)(get64(e + 8) + get64(e + 16)); j++) {
                uint8_t *run = file + j;
                if (run[0] != TKV_KVQUANT3 || run[1] != TKV_KVQUANT2 || run[2] != 64 || run[3] > 2 ||
                    run[4] >= 8)
                    continue;
                run[4] = 0xff;
                changed++;
            }
        }
        CHECK(changed > 0);
        repair_index(file, n);
        CHECK_EQ(tkv_seq_load(other, &load, file, n, NULL), TKV_ERR_CONFIG);
        CHECK_EQ(tkv_check(other, NULL, 0), TKV_OK);
        tkv_destroy(kv);
        tkv_destroy(other);
    }
}

TEST(everything_later_gives_the_same_bits) {
    for (int i = 0; i < CONFIGS; i++) {
        tkv_config cfg = config_number(i);
        for (int calls = 0; calls <= 120; calls += calls < 40 ? tkv_test_stride(39, 13) : 81) {
            if (tkv_test_quick() && calls != 39 * (i % 4) && calls != 120 * (i % 2)) continue;
            tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
            run_script(a, 0, calls);
            const size_t n = save_cache(a, file);
            const tkv_status st = load_cache(b, file, n);
            CHECK_MSG(st == TKV_OK, "config %d after %d calls: %s", i, calls, tkv_get_last_error(b));
            if (st == TKV_OK) check_same_future(a, b, "loaded", i);
            tkv_destroy(a);
            tkv_destroy(b);
        }
    }
}

/* >>other ways to save and load */
TEST(a_loaded_cache_may_lie_elsewhere_in_place) {
    for (int i = 0; i < 3; i++) {
        tkv_config cfg = config_number(i == 2 ? 5 : i);
        guarded_buffer first, second;
        cfg.limits.max_tokens = i == 2 ? 1000 : 1500;
        if (i == 1) cfg.limits.state_bytes = 4096;
        if (i == 2) cfg.budget.bytes = 900000;
        tkv_cache *a = create_cache_in_place(&cfg, &first, 0), *b = create_cache_in_place(&cfg, &second, 24);
        run_script(a, 0, 80);
        if (i == 1) CHECK_EQ(tkv_seq_put_state(a, 0, 0, 1, "a state", 7), TKV_OK);
        if (i == 2) CHECK_EQ(tkv_set_budget(a, 860000), TKV_OK); /* fewer pages */
        const size_t n = save_cache(a, file);
        const tkv_status st = load_cache(b, file, n);
        CHECK_MSG(st == TKV_OK, "in place %d: %s", i, tkv_get_last_error(b));
        if (i == 2) CHECK_EQ(budget_of(b).budget, 860000);
        if (st == TKV_OK) check_same_future(a, b, "in place", i);
        check_borders(&second);
        tkv_cache *heap = create_cache(&cfg);
        CHECK_EQ(load_cache(heap, file, save_cache(a, file)), TKV_ERR_CONFIG);
        tkv_destroy(heap);
        tkv_destroy(a);
        tkv_destroy(b);
        free(first.raw);
        free(second.raw);
    }
}

static void put_states(tkv_cache *kv, int seq) {
    for (int n = 10; n <= 40; n += 10)
        for (int layer = 0; layer < 2; layer++)
            CHECK_EQ(tkv_seq_put_state(kv, seq, layer, n, twin_file, (size_t)(30 + n + layer)), TKV_OK);
}

TEST(shared_states_stay_shared) {
    tkv_config cfg = config_number(0);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    tkv_memory_info before, after;
    CHECK_EQ(append_to_all_layers(a, 1, 1, 100, 50), TKV_OK);
    put_states(a, 1);
    CHECK_EQ(tkv_seq_fork(a, 1, 3, 30), TKV_OK);
    CHECK_EQ(tkv_seq_fork(a, 1, 0, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_put_state(a, 0, 1, 90, "another", 7), TKV_OK);
    CHECK_EQ(load_cache(b, file, save_cache(a, file)), TKV_OK);
    check_same_future(a, b, "states", 0);
    CHECK_EQ(tkv_get_memory(a, &before), TKV_OK);
    CHECK_EQ(tkv_get_memory(b, &after), TKV_OK);
    CHECK_EQ(after.states, before.states);
    CHECK(after.states > 0);
    CHECK_EQ(after.total, before.total);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Sequences that share blocks are saved with one copy of them. */
TEST(forks_add_few_bytes) {
    tkv_config cfg = config_number(0);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 2, 1, 1000, 50), TKV_OK);
    const size_t one = save_cache(a, file);
    for (int seq = 0; seq < SEQS; seq++)
        if (seq != 2) CHECK_EQ(tkv_seq_fork(a, 2, seq, TKV_UNLIMITED), TKV_OK);
    const size_t all = save_cache(a, file);
    CHECK_MSG(all < one + one / 20, "%.0f bytes, with one sequence %.0f", (double)all, (double)one);
    CHECK_EQ(load_cache(b, file, all), TKV_OK);
    check_same_future(a, b, "forks", 0);
    tkv_destroy(a);
    tkv_destroy(b);
}

static int n_released;

static void count_release(void *user, const void *bytes, size_t size) {
    (void)user;
    (void)bytes;
    (void)size;
    n_released++;
}

/* With tables, the versions of later ones depend on which blocks are in RAM. So KIVI formats are compared later too. */
TEST(blocks_may_stay_in_the_file) {
    for (int i = 0; i < 2; i++) {
        tkv_config cfg = config_number(i);
        unsigned char *at = file + (64 - (uintptr_t)file % 64) % 64;
        float q[4 * DIM], x[4 * V_DIM], y[4 * V_DIM];
        tkv_save_params save = save_all();
        tkv_load_params load = load_params(TKV_ALL_SEQS);
        tkv_load_info info;
        tkv_rng rng = tkv_rng_seed(3);
        size_t n = 0;
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        run_script(a, 0, 60);
        CHECK_EQ(tkv_seq_save(a, &save, at, MOST - 64, &n), TKV_OK);
        load.attach = 1;
        load.release = count_release;
        n_released = 0;
        CHECK_EQ(tkv_seq_load(b, &load, at, n, &info), TKV_OK);
        CHECK(info.n_attached > 5);
        check_cache_at(b, "attached", 0);
        for (int k = 0; k < LAYERS * SEQS; k++) {
            if (!tkv_get_length(a, k / LAYERS, 0)) continue;
            tkv_rng_fill(&rng, q, 4 * DIM, 1.0);
            CHECK_EQ(tkv_attend(a, k / LAYERS, k % LAYERS, q, 1, x), TKV_OK);
            CHECK_EQ(tkv_attend(b, k / LAYERS, k % LAYERS, q, 1, y), TKV_OK);
            CHECK_MEM(x, y, sizeof x);
        }
        for (int k = 200; k < 260; k++) {
            const uint64_t one = call_number(a, k), other = call_number(b, k);
            if (i == 1) CHECK_EQ(one, other);
        }
        check_cache_at(b, "attached", 1);
        for (int seq = 0; seq < SEQS; seq++) CHECK_EQ(tkv_seq_reset(b, seq), TKV_OK);
        CHECK_EQ(n_released, 1);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

TEST(a_callback_reads_a_cache) {
    for (int i = 0; i < CONFIGS; i += 3) {
        tkv_config cfg = config_number(i);
        tkv_load_params load = load_params(TKV_ALL_SEQS);
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        run_script(a, 0, 60);
        const size_t n = save_cache(a, file);
        read_file f = read_file_of(file, n);
        load.scratch = scratch;
        load.scratch_bytes = sizeof scratch;
        const tkv_status st = tkv_seq_load_from(b, &load, n, read_from_file, &f, NULL);
        CHECK_MSG(st == TKV_OK, "config %d: %s", i, tkv_get_last_error(b));
        if (st == TKV_OK) check_same_future(a, b, "read by a callback", i);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* A journal of whole caches: a later save has only what changed. */
TEST(later_saves_are_added_to_a_journal) {
    tkv_config cfg = config_number(1);
    tkv_cache *a = create_cache(&cfg);
    size_t n = save_cache(a, twin_file);
    int n_added = 0;
    for (int i = 0; i < 25; i++) {
        tkv_save_params p = save_all();
        tkv_save_info info;
        size_t bytes = 0;
        run_script(a, 4 * i, 4);
        p.former = twin_file;
        p.former_bytes = n;
        p.info = &info;
        CHECK_EQ(tkv_seq_save(a, &p, file, MOST, &bytes), TKV_OK);
        memcpy(twin_file + info.at, file, bytes);
        n = info.at + bytes;
        n_added += info.at > 0;
        CHECK(n <= 2 * info.live);
        tkv_cache *b = create_cache(&cfg);
        const tkv_status st = load_cache(b, twin_file, n);
        CHECK_MSG(st == TKV_OK, "save %d: %s", i, tkv_get_last_error(b));
        check_cache_at(b, "journal", i);
        memcpy(file, twin_file, n);
        for (int seq = 0; seq < SEQS; seq++) CHECK_EQ(tkv_get_length(a, seq, 0), tkv_get_length(b, seq, 0));
        CHECK_EQ(call_number(b, 900), call_number(a, 900));
        tkv_destroy(b);
    }
    CHECK(n_added > 5);
    tkv_destroy(a);
}

TEST(offloaded_blocks_come_into_ram) {
    test_store store;
    tkv_config cfg = config_number(1);
    int n = 0;
    memset(&store, 0, sizeof store);
    attach_test_store(&store, &cfg);
    tkv_cache *a = create_cache(&cfg);
    memset(&cfg.offload, 0, sizeof cfg.offload);
    tkv_cache *b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 800, 50), TKV_OK);
    CHECK_EQ(tkv_offload(a, 0, 0, 4, &n), TKV_OK);
    CHECK_EQ(n, 4);
    CHECK_EQ(load_cache(b, file, save_cache(a, file)), TKV_OK);
    check_cache_at(b, "offloaded", 0);
    CHECK_EQ(call_number(a, 18), call_number(b, 18));
    tkv_destroy(a);
    tkv_destroy(b);
    destroy_test_store(&store);
}

TEST(calibrations_and_settings_are_saved) {
    tkv_config cfg = config_number(4);
    tkv_cache *a = create_cache(&cfg);
    run_script(a, 0, 70);
    CHECK_EQ(tkv_set_budget(a, 900000), TKV_OK);
    CHECK_EQ(tkv_set_hot_tokens(a, 100), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(a), TKV_OK);
    run_script(a, 70, 30);
    tkv_cache *b = create_cache(&cfg);
    const tkv_status st = load_cache(b, file, save_cache(a, file));
    CHECK_MSG(st == TKV_OK, "%s", tkv_get_last_error(b));
    check_same_future(a, b, "settings", 4);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Arrays that were longer once, and reservations, do not make a file unreadable. */
TEST(memory_of_the_past_is_no_fault) {
    tkv_config cfg = config_number(1);
    cfg.limits.max_tokens = 0;
    cfg.limits.max_append = 1 << 20;
    for (int i = 0; i < 2; i++) {
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        tkv_memory_info before, after;
        CHECK_EQ(append_to_all_layers(a, 0, 1, 100, 50), TKV_OK);
        CHECK_EQ(tkv_seq_reserve(a, 0, 400000), TKV_OK);
        CHECK_EQ(tkv_get_memory(a, &before), TKV_OK);
        if (i) CHECK_EQ(tkv_seq_remove(a, 0, 10, 90), TKV_OK); /* ends the reservation; arrays stay */
        const size_t n = save_cache(a, file);
        const tkv_status st = load_cache(b, file, n);
        CHECK_MSG(st == TKV_OK, "%s", tkv_get_last_error(b));
        check_cache_at(b, "memory of the past", i);
        CHECK_EQ(tkv_get_memory(b, &after), TKV_OK);
        if (!i) CHECK_EQ(after.total, before.total);
        CHECK_EQ(call_number(a, 3), call_number(b, 3));
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* >>what is refused */
static void check_refused(tkv_cache *kv, int seq, const unsigned char *from, size_t n, tkv_status want,
                          const char *words) {
    tkv_load_params p = load_params(seq);
    const tkv_status st = tkv_seq_load(kv, &p, from, n, NULL);
    CHECK_EQ(st, want);
    CHECK_MSG(strstr(tkv_get_last_error(kv), words) != NULL, "%s", tkv_get_last_error(kv));
}

TEST(other_caches_are_refused) {
    tkv_config cfg = config_number(0);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    tkv_save_params p = save_all();
    size_t bytes = 0;
    run_script(a, 0, 30);
    const size_t n = save_cache(a, file);
    check_refused(b, 0, file, n, TKV_ERR_CONFIG, "TKV_ALL_SEQS");
    CHECK_EQ(append_to_all_layers(b, 1, 1, 1, 1), TKV_OK);
    check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_STATE, "new one");
    CHECK_EQ(tkv_seq_reset(b, 1), TKV_OK);
    check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_STATE, "new one"); /* it has seen a token */
    tkv_destroy(b);
    b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(b, 1, 1, 800, 64), TKV_OK);
    CHECK_EQ(tkv_seq_reset(b, 1), TKV_OK);
    CHECK(n_calibrated_layers(b) > 0);
    check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_STATE, "new one"); /* it has learned tables */
    tkv_destroy(b);
    b = create_cache(&cfg);
    CHECK_EQ(tkv_seq_put_state(b, 1, 0, 5, "a state", 7), TKV_OK);
    check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_STATE, "new one");
    CHECK_EQ(tkv_seq_reset(b, 1), TKV_OK);
    check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_STATE, "new one"); /* a layer has had a state */
    tkv_destroy(b);
    tkv_config plain = config_number(1); /* no format learns, so nothing is counted */
    b = create_cache(&plain);
    CHECK_EQ(append_to_all_layers(b, 1, 1, 1, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reset(b, 1), TKV_OK);
    check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_STATE, "new one");
    tkv_destroy(b);
    for (int i = 0; i < 11; i++) {
        tkv_config other = cfg;
        if (i == 0) other.limits.max_seqs++;
        if (i == 1) other.tiers.warm_tokens = 64;
        if (i == 2) other.tiers.archive = pair_of(TKV_A25, TKV_R20);
        if (i == 3) other.budget.bytes = 10 << 20;
        if (i == 4) other.evict.policy = TKV_EVICT_H2O;
        if (i == 5) other.evict.policy = TKV_EVICT_KNORM; /* no meter here: it needs atomics */
        if (i == 6) other.limits.max_append = 100;
        if (i == 8) other.model.window = 300;
        if (i == 9) other.model.scale = .5f;
        if (i == 10) other.tiers.sink_tokens = 8;
        if (i == 7) other.tiers.hot = pair_of(TKV_BF16, TKV_BF16);
        b = create_cache(&other);
        check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_CONFIG, " ");
        CHECK_EQ(append_to_all_layers(b, 0, 1, 5, 5), TKV_OK);
        check_cache_at(b, "refused", i);
        tkv_destroy(b);
    }
    b = create_cache(&cfg);
    p.length = 10;
    CHECK_EQ(tkv_seq_save(a, &p, NULL, 0, &bytes), TKV_ERR_ARG);
    p = save_params(0);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 9, 9), TKV_OK);
    CHECK_EQ(tkv_seq_save(a, &p, file, MOST, &bytes), TKV_OK);
    check_refused(b, TKV_ALL_SEQS, file, bytes, TKV_ERR_CONFIG, "one sequence");
    p = save_all();
    CHECK_EQ(tkv_seq_begin(a, 0), TKV_OK);
    CHECK_EQ(tkv_seq_save(a, &p, NULL, 0, &bytes), TKV_ERR_STATE);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* A file without blocks, but with tables: they must be those of the cache's formats. */
TEST(tables_of_other_formats_are_refused) {
    tkv_config cfg = config_number(0);
    cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    tkv_cache *a = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 1, 1, 800, 64), TKV_OK);
    CHECK_EQ(tkv_seq_reset(a, 1), TKV_OK);
    CHECK(n_calibrated_layers(a) > 0);
    const size_t n = save_cache(a, file);
    for (int i = 0; i < 3; i++) {
        tkv_config other = cfg;
        if (i == 1) other.tiers.warm = other.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI2); /* no tables */
        if (i == 2) other.tiers.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT2); /* of more parts */
        tkv_cache *b = create_cache(&other);
        if (i) check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_CONFIG, "another config");
        else CHECK_EQ(load_cache(b, file, n), TKV_OK);
        CHECK_EQ(n_calibrated_layers(b), i ? 0 : n_calibrated_layers(a));
        check_cache_at(b, "other formats", i);
        tkv_destroy(b);
    }
    tkv_destroy(a);
}

TEST(meters_of_other_sizes_are_refused) {
    NEEDS_ATOMICS;
    tkv_config cfg = config_number(10);
    tkv_cache *a = create_cache(&cfg);
    run_script(a, 0, 10);
    const size_t n = save_cache(a, file);
    for (int i = 0; i < 4; i++) {
        tkv_config other = cfg;
        if (i == 1) other.meter.heads--;
        if (i == 2) other.meter.tokens += 64;
        if (i == 3) other.meter.every++;
        tkv_cache *b = create_cache(&other);
        if (i) check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_CONFIG, " ");
        else CHECK_EQ(load_cache(b, file, n), TKV_OK);
        check_cache_at(b, "meter", i);
        tkv_destroy(b);
    }
    tkv_destroy(a);
}

/* From memory, by a callback, and while blocks stay in the file. */
static tkv_status load_in_way(tkv_cache *kv, int way, const unsigned char *from, size_t n) {
    tkv_load_params p = load_params(TKV_ALL_SEQS);
    read_file f = read_file_of(from, n);
    p.attach = way == 2;
    return way == 1 ? tkv_seq_load_from(kv, &p, n, read_from_file, &f, NULL)
                    : tkv_seq_load(kv, &p, from, n, NULL);
}

TEST(each_allocation_of_a_load_fails_once) {
    tkv_config cfg = config_number(8);
    unsigned char *at = file + (64 - (uintptr_t)file % 64) % 64;
    counting_allocator memory;
    tkv_cache *a = create_cache(&cfg);
    run_script(a, 0, 70);
    put_states(a, 2);
    const size_t n = save_cache(a, twin_file);
    memcpy(at, twin_file, n);
    memset(&memory, 0, sizeof memory);
    cfg.host.allocator = counting_allocator_of(&memory);
    for (int way = 0; way < 3; way++) {
        int i;
        for (i = 1; i < 300; i++) {
            tkv_cache *b = create_cache(&cfg);
            const size_t held = memory.held;
            memory.fail_at = i;
            tkv_status st = load_in_way(b, way, at, n);
            memory.fail_at = 0;
            check_cache_at(b, "failed allocation", i);
            if (st != TKV_OK) {
                CHECK_EQ(st, TKV_ERR_NOMEM);
                CHECK_EQ(tkv_get_length(b, 0, 0), 0);
                CHECK_EQ(memory.held, held);
                CHECK_EQ(load_in_way(b, way, at, n), TKV_OK);
            }
            const size_t again = save_cache(b, twin_file);
            CHECK(again == n && memcmp(at, twin_file, n) == 0);
            tkv_destroy(b);
            CHECK_EQ(memory.held, 0);
            if (st == TKV_OK) break;
        }
        CHECK(i > 10);
        printf("    %d allocations\n", i - 1);
    }
    tkv_destroy(a);
}

/* A file says that lists of states were shorter than they are. They grow while states are placed, or memory ends. */
TEST(lists_of_states_grow_while_they_are_placed) {
    tkv_config cfg = config_number(0);
    counting_allocator memory;
    tkv_cache *a = create_cache(&cfg);
    int n_loaded = 0, n_refused = 0;
    CHECK_EQ(append_to_all_layers(a, 2, 1, 1, 1), TKV_OK);
    put_states(a, 2);
    const size_t n = save_cache(a, file);
    const unsigned char *e = find_in_index(file, n, 7, 0);
    cfg.host.allocator = counting_allocator_of(&memory);
    for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)); at += 8) {
        if (get64(file + at) != 16) continue; /* the length of the list, or another number */
        memcpy(twin_file, file, n);
        put64(twin_file + at, 0);
        repair_index(twin_file, n);
        for (int i = 1; i < 100; i++) {
            char state[80];
            size_t size = 0;
            tkv_cache *b = create_cache(&cfg);
            memory.fail_at = i;
            const tkv_status st = load_cache(b, twin_file, n);
            memory.fail_at = 0;
            check_cache_at(b, "list of states", i);
            n_loaded += st == TKV_OK;
            n_refused +=
                st == TKV_ERR_NOMEM && strstr(tkv_get_last_error(b), "no memory for the states of sequence");
            if (st) CHECK_EQ(tkv_get_length(b, 2, 0), 0);
            else CHECK_EQ(tkv_seq_get_state(b, 2, 1, 40, state, sizeof state, &size), TKV_OK);
            if (!st) CHECK_EQ(size, 71);
            tkv_destroy(b);
            CHECK_EQ(memory.held, 0);
            if (st != TKV_ERR_NOMEM) break;
        }
    }
    CHECK(n_loaded > 0);
    CHECK(n_refused > 8 * n_loaded); /* a list and eight states, each time */
    tkv_destroy(a);
}

/* A table is learned head by head before it is used. Saves fall between heads of each layer. */
TEST(heads_learned_ahead_are_saved) {
    enum { END = 305 };
    tkv_config cfg = config_number(0);
    tkv_cache *a = create_cache(&cfg);
    size_t n[12], room = 0;
    int at[12], n_saves = 0;
    for (int t = 1; t <= END; t++) {
        CHECK_EQ(append_to_all_layers(a, 0, 1, 1, 1), TKV_OK);
        if (t < 254 || (t - 254) % 21 > 3 || n_saves == COUNT(n)) continue;
        at[n_saves] = t;
        n[n_saves] = save_cache(a, file);
        if (room + n[n_saves] > MOST) break;
        memcpy(twin_file + room, file, n[n_saves]);
        room += n[n_saves++];
    }
    CHECK(n_saves >= 10);
    const size_t n_end = save_cache(a, file);
    room = 0;
    for (int i = 0; i < n_saves; i++) {
        static unsigned char again[MOST];
        tkv_cache *b = create_cache(&cfg);
        CHECK_EQ(load_cache(b, twin_file + room, n[i]), TKV_OK);
        room += n[i];
        for (int t = at[i]; t < END; t++) CHECK_EQ(append_to_all_layers(b, 0, 1, 1, 1), TKV_OK);
        CHECK_EQ(save_cache(b, again), n_end);
        CHECK_MSG(memcmp(again, file, n_end) == 0, "saved after %d tokens", at[i]);
        tkv_destroy(b);
    }
    tkv_destroy(a);
}

/* Formats that learn from queries: sums, and factors that were computed from them. */
TEST(what_queries_taught_is_saved) {
    enum { WIDE = 40 };
    static float k[30 * WIDE], q[2 * WIDE], out[2][2 * WIDE];
    tkv_config cfg = make_sized_config(1, 2, 1, WIDE, 1, 64);
    cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg.tiers.archive = pair_of(TKV_SQUAT2, TKV_KIVI2);
    cfg.tiers.warm_tokens = 64;
    tkv_cache *kv[2] = {create_cache(&cfg), create_cache(&cfg)};
    tkv_rng rng = tkv_rng_seed(8);
    for (int i = 0; i < 40; i++) {
        tkv_rng_fill(&rng, k, COUNT(k), 1.0);
        tkv_rng_fill(&rng, q, COUNT(q), 1.0);
        if (i == 20) CHECK_EQ(load_cache(kv[1], file, save_cache(kv[0], file)), TKV_OK);
        for (int c = 0; c < (i < 20 ? 1 : 2); c++) {
            CHECK_EQ(tkv_append(kv[c], 0, 0, k, k, 30), TKV_OK);
            CHECK_EQ(tkv_attend(kv[c], 0, 0, q, 1, out[c]), TKV_OK);
        }
        if (i >= 20) CHECK_MEM(out[0], out[1], sizeof out[0]);
    }
    check_alike(kv[0], kv[1], "queries", 0);
    /* the factors are last, fp16 numbers: an infinity among them, and a section that ends too early */
    const size_t n = save_cache(kv[0], file);
    const unsigned char *e = find_in_index(file, n, 7, 0);
    unsigned char *end = file + get64(e + 8) + get64(e + 16);
    tkv_cache *b = create_cache(&cfg);
    for (int i = 0; i < 2; i++) {
        const size_t place = (size_t)(e - file);
        if (i == 0) put32(end - 4, 0x7c000000);
        else memset(end - 4, 0, 4), put64(file + place + 16, get64(file + place + 16) - 4);
        repair_index(file, n);
        CHECK_EQ(load_cache(b, file, n), TKV_ERR_DATA);
        CHECK_MSG(strstr(tkv_get_last_error(b), "numbers of the saved cache") != NULL, "%s",
                  tkv_get_last_error(b));
    }
    for (int i = 0; i < 2; i++) tkv_destroy(kv[i]);
    tkv_destroy(b);
}

/* The numbers end inside a number, or inside the bytes of a copy. */
TEST(numbers_that_end_early_are_refused) {
    for (int i = 0; i < 2; i++) {
        tkv_config cfg = config_number(i ? 10 : 1);
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(a, 0, 1, 300, 50), TKV_OK);
        const size_t n = save_cache(a, file);
        const size_t e = (size_t)(find_in_index(file, n, 7, 0) - file), size = (size_t)get64(file + e + 16);
        const size_t gap =
            (size_t)(index_of(file, n) - get64(file + e + 8)) - size; /* a file has none of 64 bytes */
        for (size_t by = 1; gap + by < 64; by++) {
            memset(file + get64(file + e + 8) + size - by, 0, by);
            put64(file + e + 16, size - by);
            repair_index(file, n);
            CHECK_EQ(load_cache(b, file, n), TKV_ERR_DATA);
            CHECK_MSG(strstr(tkv_get_last_error(b), "numbers of the saved cache") != NULL, "%s",
                      tkv_get_last_error(b));
            check_cache_at(b, "cut numbers", (int)by);
        }
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* The numbers end before all that follows from the config. */
TEST(numbers_that_hardly_begin_are_refused) {
    tkv_config cfg = config_number(1);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 30, 30), TKV_OK);
    const size_t n = save_cache(a, file);
    const unsigned char *e = find_in_index(file, n, 7, 0);
    memset(file + get64(e + 8), 0, (size_t)get64(e + 16));
    repair_index(file, n);
    CHECK_EQ(load_cache(b, file, n), TKV_ERR_CONFIG);
    put64(file + (e - file) + 16, 40);
    repair_index(file, n);
    CHECK_EQ(load_cache(b, file, n), TKV_ERR_DATA);
    check_cache_at(b, "cut numbers", 0);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* In place a budget is at most the memory, and there always is one. */
TEST(budgets_in_place_are_checked) {
    tkv_config cfg = config_number(4);
    guarded_buffer memory[2];
    tkv_cache *a = create_cache_in_place(&cfg, &memory[0], 0),
              *b = create_cache_in_place(&cfg, &memory[1], 64);
    int n_found = 0;
    run_script(a, 0, 20);
    const size_t n = save_cache(a, file);
    const unsigned char *e = find_in_index(file, n, 7, 0);
    const uint64_t budget = budget_of(a).budget, wrong[] = {0, 1000, budget + 1, (uint64_t)1 << 40};
    for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)); at += 8)
        for (int i = 0; i < COUNT(wrong) && get64(file + at) == budget; i++) {
            memcpy(twin_file, file, n);
            put64(twin_file + at, wrong[i]);
            repair_index(twin_file, n);
            CHECK_EQ(load_cache(b, twin_file, n), TKV_ERR_DATA);
            check_cache_at(b, "budget in place", i);
            n_found++;
        }
    CHECK_EQ(n_found, COUNT(wrong));
    CHECK_EQ(load_cache(b, file, n), TKV_OK);
    check_same_future(a, b, "budget in place", 4);
    tkv_destroy(a);
    tkv_destroy(b);
    for (int i = 0; i < 2; i++) {
        check_borders(&memory[i]);
        free(memory[i].raw);
    }
}

/* A budget in a file that is less than an empty cache holds. */
TEST(budgets_that_no_cache_fits_into_are_refused) {
    tkv_config cfg = config_number(4);
    for (int n_tokens = 0; n_tokens < 50; n_tokens += 40) {
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        int n_found = 0;
        if (n_tokens) CHECK_EQ(append_to_all_layers(a, 0, 1, n_tokens, n_tokens), TKV_OK);
        const size_t n = save_cache(a, file);
        const unsigned char *e = find_in_index(file, n, 7, 0);
        for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)); at += 8) {
            if (get64(file + at) != budget_of(a).budget) continue;
            memcpy(twin_file, file, n);
            put64(twin_file + at, 1000);
            repair_index(twin_file, n);
            CHECK_EQ(load_cache(b, twin_file, n), TKV_ERR_BUDGET);
            CHECK_EQ(budget_of(b).budget, budget_of(a).budget);
            check_cache_at(b, "a small budget", n_tokens);
            n_found++;
        }
        CHECK_EQ(n_found, 1);
        CHECK_EQ(load_cache(b, file, n), TKV_OK);
        check_alike(a, b, "a budget", n_tokens);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* Hot tokens without an end stay so, and others have an end: no tier behind them may have a table. */
TEST(hot_tokens_in_a_file_fit_the_config) {
    static const uint64_t most = 0x3fffffff; /* TKV_UNLIMITED */
    for (int i = 0; i < 2; i++) {
        tkv_config cfg = config_number(0);
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_A40, TKV_R40);
        cfg.tiers.hot_tokens = i ? 77 : TKV_UNLIMITED;
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        int n_refused = 0;
        CHECK_EQ(append_to_all_layers(a, 0, 1, 100, 50), TKV_OK);
        const size_t n = save_cache(a, file);
        const unsigned char *e = find_in_index(file, n, 7, 0);
        for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)); at += 8) {
            if (get64(file + at) != (i ? 77 : most)) continue;
            memcpy(twin_file, file, n);
            put64(twin_file + at, i ? most : 77);
            repair_index(twin_file, n);
            const tkv_status st = load_cache(b, twin_file, n);
            CHECK(st == TKV_ERR_DATA ||
                  st == TKV_ERR_CONFIG); /* numbers of the config are the same in both */
            n_refused++;
            check_cache_at(b, "hot tokens", i);
        }
        CHECK_LE(1, n_refused); /* later layers can keep more: their first tables come later */
        CHECK_EQ(load_cache(b, file, n), TKV_OK);
        check_alike(a, b, "hot tokens", i);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* A sequence has states at max_states positions beside one, the newest of its layers, and a complete one. */
TEST(positions_of_states_have_a_bound) {
    for (int most = 1; most <= 8; most += 7) {
        tkv_config cfg = config_number(0);
        cfg.limits.max_states = 8;
        tkv_cache *a = create_cache(&cfg);
        cfg.limits.max_states = most;
        tkv_cache *b = create_cache(&cfg);
        int n_invalid = 0;
        CHECK_EQ(append_to_all_layers(a, 0, 1, 100, 50), TKV_OK);
        for (int n = 10; n <= 100; n += 10) CHECK_EQ(tkv_seq_put_state(a, 0, 0, n, "a state", 7), TKV_OK);
        const size_t n = save_cache(a, file);
        const unsigned char *e = find_in_index(file, n, 7, 0);
        for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)) && most == 1;
             at += 8)
            if (get64(file + at) == 8) {
                memcpy(twin_file, file, n);
                put64(twin_file + at, 1); /* as if the cache had been like this one */
                repair_index(twin_file, n);
                const tkv_status st = load_cache(b, twin_file, n);
                CHECK(st == TKV_ERR_CONFIG || st == TKV_ERR_DATA);
                n_invalid += strstr(tkv_get_last_error(b), "a saved state is not valid") != NULL;
                check_cache_at(b, "positions", 0);
            }
        if (most == 8) CHECK_EQ(load_cache(b, file, n), TKV_OK);
        else CHECK_EQ(n_invalid, 1);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* Each read of a callback fails once, or gives a damaged record: the cache is as new, and freed memory is wiped. */
TEST(failed_reads_leave_a_new_cache) {
    tkv_config cfg = config_number(0);
    tkv_load_params load = load_params(TKV_ALL_SEQS);
    cfg.host.wipe_freed = 1;
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 1, 1, 300, 50), TKV_OK);
    CHECK_EQ(tkv_seq_fork(a, 1, 0, 250), TKV_OK);
    const size_t n = save_cache(a, file);
    int n_failed[2] = {0, 0};
    load.scratch = scratch;
    load.scratch_bytes = sizeof scratch;
    for (int spoils = 0; spoils < 2; spoils++) {
        tkv_destroy(b);
        b = create_cache(&cfg);
        for (int i = 1; i < 500; i += 1 + i / 20) {
            read_file f = read_file_of(file, n);
            f.fail_at = spoils ? 0 : i;
            f.spoil_from = spoils ? i : 0;
            const tkv_status st = tkv_seq_load_from(b, &load, n, read_from_file, &f, NULL);
            check_cache_at(b, "failed read", i);
            if (st == TKV_OK) break;
            CHECK_EQ(st, spoils ? TKV_ERR_DATA : TKV_ERR_IO);
            CHECK_EQ(tkv_get_length(b, 0, 0) + tkv_get_length(b, 1, 0), 0);
            n_failed[spoils]++;
        }
    }
    CHECK(n_failed[0] > 10 && n_failed[1] > 10);
    tkv_destroy(b);
    b = create_cache(&cfg);
    CHECK_EQ(load_cache(b, file, n), TKV_OK);
    check_same_future(a, b, "after failed reads", 0);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Loads a file that was changed. A refused cache is as new: it loads the right one. */
static void load_changed(tkv_cache **kv, const tkv_config *cfg, const unsigned char *right, size_t n,
                         const unsigned char *changed, size_t n_changed, const char *what, size_t at) {
    const tkv_status st = load_cache(*kv, changed, n_changed);
    char reason[160];
    const tkv_status is_whole = tkv_check(*kv, reason, sizeof reason);
    CHECK_MSG(is_whole == TKV_OK, "%s at %d: %s", what, (int)at, reason);
    if (st == TKV_OK) {
        (void)call_number(*kv, (int)(at % 100));
        CHECK_EQ(tkv_check(*kv, reason, sizeof reason), TKV_OK);
    } else {
        CHECK_MSG(st == TKV_ERR_DATA || st == TKV_ERR_CONFIG || st == TKV_ERR_NOMEM ||
                      st == TKV_ERR_CAPACITY || st == TKV_ERR_BUDGET,
                  "%s at %d: %d", what, (int)at, st);
        CHECK(tkv_get_last_error(*kv)[0] != 0);
        if (at % 64) return;
        CHECK_EQ(load_cache(*kv, right, n), TKV_OK);
    }
    tkv_destroy(*kv);
    *kv = create_cache(cfg);
}

TEST(flipped_bits_and_cuts_are_found) {
    tkv_config cfg = config_number(8);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    const int step = tkv_test_quick() ? 37 : 1;
    size_t n_loaded = 0;
    run_script(a, 0, 8);
    const size_t n = save_cache(a, file);
    memcpy(twin_file, file, n);
    for (size_t at = 0; at < n; at += (size_t)step) {
        twin_file[at] ^= (unsigned char)(1 << at % 8);
        const tkv_status st = load_cache(b, twin_file, n);
        CHECK_MSG(st == TKV_ERR_DATA, "byte %d: %d", (int)at, st);
        n_loaded += st == TKV_OK;
        twin_file[at] = file[at];
    }
    for (size_t cut = 0; cut < n; cut += (size_t)(31 * step))
        CHECK_EQ(load_cache(b, file, cut), TKV_ERR_DATA);
    CHECK_EQ(n_loaded, 0);
    CHECK_EQ(load_cache(b, file, n), TKV_OK);
    check_same_future(a, b, "after damages", 8);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Words of lists, tables, states and of the cache's numbers get other values; all checksums are right. */
TEST(hostile_files_with_right_checksums) {
    static const uint32_t values[] = {0, 1, 2, 3, 5, 63, 64, 65, 255, 0x7fffffff, 0x80000000u, 0xffffffffu};
    for (int i = 0; i < CONFIGS; i += tkv_test_quick() ? 5 : 1) {
        static unsigned char changed[MOST];
        tkv_config cfg = config_number(i);
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        tkv_rng rng = tkv_rng_seed((uint64_t)i);
        run_script(a, 0, 50);
        put_states(a, 0);
        const size_t n = save_cache(a, file);
        const int tries = tkv_test_quick() ? 60 : 600;
        for (int k = 0; k < tries; k++) {
            memcpy(changed, file, n);
            for (int more = tkv_rng_below(&rng, 3); more >= 0; more--) {
                const unsigned char *e;
                do
                    e = changed + index_of(changed, n) +
                        32 * (size_t)tkv_rng_below(&rng, (int)count_of(changed, n));
                while (get32(e) == SAVED_RECORDS || get64(e + 16) < 4);
                /* numbers of the cache come first in their section */
                const size_t words = (size_t)get64(e + 16) / 4, most = k % 2 && words > 300 ? 300 : words,
                             word = (size_t)get64(e + 8) + 4 * (size_t)tkv_rng_below(&rng, (int)most);
                put32(changed + word, k % 3 ? values[tkv_rng_below(&rng, COUNT(values))]
                                            : get32(changed + word) + (uint32_t)tkv_rng_below(&rng, 5) - 2u);
            }
            repair_index(changed, n);
            load_changed(&b, &cfg, file, n, changed, n, "hostile", (size_t)k);
        }
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* >>single numbers of lists, with right checksums */
enum { OF_FIRST_SEQ = 48, OF_FIRST = 4, OF_NEXT_SEQ = 52, OF_NEXT = 56, OF_IS_FIRST = 60 };

/* A number of a run of entries, or of a run of blocks, in layer 0 of a sequence of `twin_file`, n bytes long. */
static unsigned char *number_of_run(size_t n, int seq, int is_block, int run, int offset) {
    const unsigned char *e = find_in_index(twin_file, n, SAVED_LISTS, (uint32_t)(seq * LAYERS));
    unsigned char *list = e ? twin_file + get64(e + 8) : twin_file;
    if (!e) exit(2);
    return list + 48 + (is_block ? 64 * get32(list + 40) + 32 * (size_t)run : 64 * (size_t)run) + offset;
}

/* Loads `twin_file` with right checksums, and makes it a copy of `file` again. */
static void check_refused_words(tkv_cache *kv, size_t n, tkv_status want, const char *words, int number) {
    repair_index(twin_file, n);
    const tkv_status st = load_cache(kv, twin_file, n);
    CHECK_MSG(st == want && strstr(tkv_get_last_error(kv), words), "case %d: %d, %s", number, st,
              tkv_get_last_error(kv));
    check_cache_at(kv, "refused case", number);
    memcpy(twin_file, file, n);
}

/* Sequences 1, 3 and 4 hold the same blocks. Their entries name one another in a ring. */
TEST(holders_of_blocks_are_checked) {
    static const char first[] = "names no block", ring[] = "blocks and their holders do not fit";
    static const struct {
        int seq, is_block, run, offset, bytes;
        uint32_t value;
        const char *words;
    } cases[] = {{3, 0, 1, OF_FIRST_SEQ, 4, 4, first},
                 {3, 0, 1, OF_FIRST_SEQ, 4, 0xffffffffu, first},
                 {3, 0, 1, OF_FIRST_SEQ, 4, 0, ring}, /* it is empty */
                 {3, 0, 1, OF_FIRST, 4, 50, ring},
                 {3, 0, 1, OF_NEXT_SEQ, 4, 0xffffffffu, ring},
                 {3, 0, 1, OF_NEXT_SEQ, 4, SEQS, ring},
                 {3, 0, 1, OF_NEXT, 4, 0xffffffffu, ring},
                 {3, 0, 1, OF_NEXT, 4, 50, ring},
                 {3, 0, 1, OF_NEXT, 4, 0, ring}, /* of another block */
                 {3, 0, 1, OF_IS_FIRST, 4, 2, ring},
                 {1, 1, 1, 24, 2, 999, "a block has a number that it cannot have"},
                 {1, 1, 1, 26, 2, 999, "a block has a number that it cannot have"},
                 {1, 1, 1, 28, 2, 65, "a block has a number that it cannot have"},
                 {1, 1, 1, 30, 2, 1, "a block has a number that it cannot have"}};
    tkv_config cfg = config_number(1);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 1, 1, 200, 50), TKV_OK);
    CHECK_EQ(tkv_seq_fork(a, 1, 3, 150), TKV_OK);
    CHECK_EQ(tkv_seq_fork(a, 1, 4, 150), TKV_OK);
    const size_t n = save_cache(a, file);
    memcpy(twin_file, file, n);
    for (int i = 0; i < COUNT(cases); i++) {
        unsigned char *at = number_of_run(n, cases[i].seq, cases[i].is_block, cases[i].run, cases[i].offset);
        for (int k = 0; k < cases[i].bytes; k++) at[k] = (unsigned char)(cases[i].value >> 8 * k & 255u);
        check_refused_words(b, n, cases[i].offset == 24 ? TKV_ERR_CONFIG : TKV_ERR_DATA,
                            cases[i].offset == 24 ? "formats" : cases[i].words, i);
    }
    for (int i = 0; i < 4; i++) {
        /* rings without a first holder, of two of three, one that never comes back, and one with two first holders */
        static const uint32_t next[4][3] = {{3, 4, 1}, {3, 1, 4}, {3, 3, 1}, {3, 4, 1}};
        static const uint32_t is_first[4][3] = {{0, 0, 0}, {1, 0, 0}, {1, 0, 0}, {1, 1, 0}};
        for (int k = 0; k < 3; k++) {
            const int seq = k ? k + 2 : 1;
            put32(number_of_run(n, seq, 0, 1, OF_NEXT_SEQ), next[i][k]);
            put32(number_of_run(n, seq, 0, 1, OF_IS_FIRST), is_first[i][k]);
        }
        check_refused_words(b, n, TKV_ERR_DATA, ring, 100 + i);
    }
    unsigned char *e = twin_file + (find_in_index(file, n, 7, 0) - file);
    put32(e + 4, 1); /* the numbers of the cache are gone */
    check_refused_words(b, n, TKV_ERR_DATA, "numbers of the saved cache", 200);
    /* the same while blocks stay in the file: it is let go */
    unsigned char *at = scratch + (64 - (uintptr_t)scratch % 64) % 64;
    tkv_load_params load = load_params(TKV_ALL_SEQS);
    load.attach = 1;
    load.release = count_release;
    n_released = 0;
    memcpy(at, file, n);
    put32(at + (number_of_run(n, 3, 0, 1, OF_NEXT) - twin_file), 50);
    repair_index(at, n);
    CHECK_EQ(tkv_seq_load(b, &load, at, n, NULL), TKV_ERR_DATA);
    check_cache_at(b, "attached", 0);
    CHECK_EQ(n_released, 0); /* the caller was never told to keep it */
    CHECK_EQ(load_cache(b, file, n), TKV_OK);
    check_same_future(a, b, "after wrong holders", 1);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* With cfg.recompute a block knows its layout before the last coding, since its tokens are coded through it again. */
static int compute_nothing(void *user, int seq, int layer, int head, const int *positions, int n, float *k,
                           float *v) {
    (void)user, (void)seq, (void)layer, (void)head, (void)positions, (void)n, (void)k, (void)v;
    return 1;
}

TEST(layouts_before_the_last_coding_are_saved) {
    for (int i = 0; i < 2; i++) {
        tkv_config cfg = config_number(i);
        if (i) cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2); /* formats without tables */
        cfg.recompute.compute = compute_nothing;
        cfg.recompute.cost.layer_params = 1000.0;
        cfg.recompute.cost.n_heads = TKV_OFF;
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(a, 1, 1, 700, 50), TKV_OK);
        const size_t n = save_cache(a, file);
        unsigned char *previous = NULL;
        memcpy(twin_file, file, n);
        for (int run = 0; run < 8 && !previous; run++) {
            unsigned char *at = number_of_run(n, 1, 1, run, 26);
            if (at[0]) previous = at;
        }
        REQUIRE(previous != NULL);
        CHECK_EQ(load_cache(b, file, n), TKV_OK);
        check_alike(a, b, "previous layouts", i);
        tkv_destroy(b);
        b = create_cache(&cfg);
        save_cache(a, file);
        memcpy(twin_file, file, n);
        previous[0] = 1; /* the layout of sinks, which no tier has: it is forgotten */
        repair_index(twin_file, n);
        CHECK_EQ(load_cache(b, twin_file, n), TKV_OK);
        check_cache_at(b, "another layout", i);
        CHECK_EQ(save_cache(b, twin_file), n);
        CHECK(memcmp(file, twin_file, n) != 0);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

TEST(layers_that_share_are_saved_once) {
    static tkv_layer_config layers[LAYERS];
    tkv_config cfg = config_number(0);
    layers[1].share_kv = 1;
    cfg.layers = layers;
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 1, 1, 500, 50), TKV_OK);
    CHECK_EQ(tkv_seq_fork(a, 1, 2, 300), TKV_OK);
    const size_t n = save_cache(a, file);
    CHECK_EQ(load_cache(b, file, n), TKV_OK);
    check_alike(a, b, "shared layers", 0);
    const tkv_save_params save = save_params(1);
    const tkv_load_params load = load_params(3);
    size_t bytes = 0;
    CHECK_EQ(tkv_seq_save(a, &save, file, MOST, &bytes), TKV_OK);
    CHECK_EQ(tkv_seq_load(a, &load, file, bytes, NULL), TKV_OK);
    CHECK_EQ(tkv_seq_load(b, &load, file, bytes, NULL), TKV_OK);
    for (int c = 0; c < 2; c++) CHECK_EQ(append_to_all_layers(c ? b : a, 3, 1, 100, 50), TKV_OK);
    check_alike(a, b, "shared layers, later", 0);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Where limits.max_tokens allows it, a file may reserve memory, but not any amount. Rotations are in order. */
TEST(reservations_and_rotations_have_bounds) {
    for (int i = 0; i < 2; i++) {
        tkv_config cfg = config_number(16);
        cfg.limits.max_tokens = 0;
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(a, 0, 1, 200, 50), TKV_OK);
        CHECK_EQ(tkv_seq_shift(a, 0, 60, 100, 1000), TKV_OK);
        CHECK_EQ(tkv_seq_shift(a, 0, 150, TKV_UNLIMITED, 2000), TKV_OK);
        if (i == 0) CHECK_EQ(tkv_seq_reserve(a, 0, 77), TKV_OK);
        const size_t n = save_cache(a, file);
        const unsigned char *e = find_in_index(file, n, 7, 0);
        const uint64_t wanted = i ? 1000 : 277; /* the distance of a rotation; the length that is reserved */
        int n_found = 0;
        for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)); at += 8) {
            if (get64(file + at) != wanted) continue;
            memcpy(twin_file, file, n);
            put64(twin_file + at, i ? 2000 : (1 << 30) - 1);
            repair_index(twin_file, n);
            CHECK_EQ(load_cache(b, twin_file, n), TKV_ERR_DATA);
            check_cache_at(b, "out of bounds", i);
            n_found++;
        }
        CHECK(n_found > 0);
        CHECK_EQ(load_cache(b, file, n), TKV_OK);
        check_alike(a, b, "bounds", i);
        tkv_destroy(a);
        tkv_destroy(b);
    }
}

/* A file can name a longer reservation than its cache had. Without memory for it the load ends it. */
TEST(reservations_without_memory_end) {
    tkv_config cfg = config_number(1);
    counting_allocator memory;
    tkv_cache *a = create_cache(&cfg);
    int n_found = 0, n_ended = 0;
    CHECK_EQ(append_to_all_layers(a, 0, 1, 200, 50), TKV_OK);
    CHECK_EQ(tkv_seq_reserve(a, 0, 77), TKV_OK);
    const size_t n = save_cache(a, file);
    const unsigned char *e = find_in_index(file, n, 7, 0);
    cfg.host.allocator = counting_allocator_of(&memory);
    for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)); at += 8) {
        if (get64(file + at) != 277) continue;
        memcpy(twin_file, file, n);
        put64(twin_file + at, 2900);
        repair_index(twin_file, n);
        n_found++;
        for (int i = 1; i < 200; i++) {
            tkv_cache *b = create_cache(&cfg);
            memory.fail_at = i;
            const tkv_status st = load_cache(b, twin_file, n);
            const int n_refused = memory.n_refused;
            memory.fail_at = memory.n_refused = 0;
            CHECK(st == TKV_OK || st == TKV_ERR_NOMEM);
            check_cache_at(b, "reservation", i);
            if (st == TKV_OK) { /* a reservation needs no memory any more */
                memory.fail_at = 1;
                const tkv_status appended = append_to_all_layers(b, 0, 1, 2700, 50);
                memory.fail_at = 0;
                CHECK(appended == TKV_OK || (n_refused && appended == TKV_ERR_NOMEM));
                n_ended += appended != TKV_OK;
            }
            tkv_destroy(b);
            if (st == TKV_OK && !n_refused) break;
        }
    }
    CHECK_EQ(n_found, 1);
    CHECK(n_ended > 0);
    tkv_destroy(a);
}

/* A file can name a reservation that its cache had not, for a sequence without lists. */
TEST(reservations_get_room_in_the_lists) {
    tkv_config cfg = config_number(4);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    int n_found = 0;
    const size_t plain = save_cache(a, file);
    CHECK_EQ(tkv_seq_reserve(a, 0, 77), TKV_OK);
    const size_t n = save_cache(a, twin_file);
    const uint64_t from = get64(find_in_index(twin_file, n, 7, 0) + 8);
    CHECK_EQ(get64(find_in_index(file, plain, 7, 0) + 8), from);
    for (size_t at = (size_t)from; n_found == 0 && at + 8 <= plain; at += 8) {
        if (get64(twin_file + at) != 77 || get64(file + at) != 0) continue;
        put64(file + at, 77);
        repair_index(file, plain);
        CHECK_EQ(load_cache(b, file, plain), TKV_OK);
        CHECK_EQ(append_to_all_layers(b, 0, 1, 77, 50), TKV_OK);
        check_cache_at(b, "no lists", n_found++);
    }
    CHECK_EQ(n_found, 1);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* A file that is changed to fit into a smaller limits.state_bytes: its states do not. */
TEST(states_beyond_the_limit_are_refused) {
    tkv_config cfg = config_number(1);
    int n_refused = 0;
    cfg.limits.state_bytes = 20000;
    tkv_cache *a = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 2, 1, 100, 50), TKV_OK);
    put_states(a, 2);
    cfg.limits.state_bytes = 1000;
    tkv_cache *b = create_cache(&cfg);
    const size_t n = save_cache(a, file);
    const unsigned char *e = find_in_index(file, n, 7, 0);
    check_refused(b, TKV_ALL_SEQS, file, n, TKV_ERR_CONFIG, " ");
    for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)); at += 8) {
        if (get64(file + at) != 20000 / 2) continue;
        memcpy(twin_file, file, n);
        put64(twin_file + at, 1000 / 2);
        repair_index(twin_file, n);
        check_refused(b, TKV_ALL_SEQS, twin_file, n, TKV_ERR_NOMEM, "no memory for the states of sequence");
        check_cache_at(b, "too many states", 0);
        n_refused++;
    }
    CHECK_EQ(n_refused, 1);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Exact copies of the meter that fit no block are forgotten, and all else is loaded. */
TEST(copies_of_the_meter_that_fit_no_block) {
    NEEDS_ATOMICS;
    tkv_config cfg = config_number(10);
    tkv_cache *a = create_cache(&cfg);
    int n_forgotten = 0;
    CHECK_EQ(append_to_all_layers(a, 0, 1, 400, 50), TKV_OK);
    const size_t n = save_cache(a, file);
    const unsigned char *e = find_in_index(file, n, 7, 0);
    for (size_t at = (size_t)get64(e + 8); at < (size_t)(get64(e + 8) + get64(e + 16)); at += 8) {
        if (get64(file + at) != 4 + BLOCK) continue; /* the start of the second block */
        tkv_cache *b = create_cache(&cfg);
        memcpy(twin_file, file, n);
        put64(twin_file + at, 4);
        repair_index(twin_file, n);
        if (load_cache(b, twin_file, n) == TKV_OK) {
            check_cache_at(b, "copies", (int)at);
            CHECK_EQ(tkv_get_length(b, 0, TKV_ALL_LAYERS), 400);
            n_forgotten += save_cache(b, twin_file) < n;
        }
        tkv_destroy(b);
    }
    CHECK(n_forgotten > 0);
    tkv_destroy(a);
}

/* The distance between copied blocks of a head stands in a file behind their number. It is never 0. */
TEST(copies_of_the_meter_have_a_distance) {
    NEEDS_ATOMICS;
    tkv_config cfg = config_number(10);
    int n_found = 0;
    cfg.meter.tokens = 2 * BLOCK;
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, 0, 1, 10 * BLOCK, 50), TKV_OK);
    const size_t n = save_cache(a, file);
    const unsigned char *e = find_in_index(file, n, 7, 0);
    for (size_t at = (size_t)get64(e + 8); at + 80 <= (size_t)(get64(e + 8) + get64(e + 16)); at += 8) {
        int is_found = get64(file + at) == 2 && get64(file + at + 8) == 4 && get64(file + at + 72) == 4;
        for (int i = 2; i < 9; i++) is_found &= !get64(file + at + 8 * (size_t)i); /* sums of errors */
        if (!is_found) continue;
        memcpy(twin_file, file, n);
        put64(twin_file + at + 8, 0);
        repair_index(twin_file, n);
        CHECK_EQ(load_cache(b, twin_file, n), TKV_ERR_DATA);
        check_cache_at(b, "distance", (int)at);
        n_found++;
    }
    CHECK_EQ(n_found, cfg.meter.heads);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* What a file has of states behind its last sequence is not read. */
TEST(states_of_no_sequence_are_passed_over) {
    tkv_config cfg = config_number(0);
    tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(a, SEQS - 1, 1, 100, 50), TKV_OK);
    CHECK_EQ(tkv_seq_put_state(a, SEQS - 1, 0, 100, "a state", 7), TKV_OK);
    const size_t n = save_cache(a, file);
    for (int i = 0; i < 2; i++) { /* of the last sequence, of none */
        const unsigned char *e = find_in_index(file, n, 6, SEQS - 1);
        if (!e) exit(2);
        put32(file + (e - file) + 4, (uint32_t)(SEQS - 1 + i));
        put32(file + get64(e + 8), 0xffffffffu); /* there is no such layer */
        repair_index(file, n);
        CHECK_EQ(load_cache(b, file, n), i ? TKV_OK : TKV_ERR_DATA);
        check_cache_at(b, "states", i);
    }
    CHECK_EQ(tkv_get_length(b, SEQS - 1, TKV_ALL_LAYERS), 100);
    tkv_destroy(a);
    tkv_destroy(b);
}

/* Two sequences that share blocks, with states, and what the config learns from a few queries. */
static void fill_small_cache(tkv_cache *kv, const tkv_config *cfg) {
    float q[2 * KV_HEADS * DIM], out[2 * KV_HEADS * V_DIM];
    tkv_rng rng = tkv_rng_seed(5);
    for (int i = 0; i < 10; i++) {
        CHECK_EQ(append_to_all_layers(kv, 1, 1, 30, 30), TKV_OK);
        tkv_rng_fill(&rng, q, COUNT(q), 1.0);
        for (int layer = 0; layer < LAYERS; layer++) CHECK_EQ(tkv_attend(kv, 1, layer, q, 1, out), TKV_OK);
    }
    CHECK_EQ(tkv_seq_put_state(kv, 1, 0, 100, "a state", 7), TKV_OK);
    CHECK_EQ(tkv_seq_put_state(kv, 1, 1, 100, "another", 7), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 1, 3, 200), TKV_OK);
    if (cfg->model.rope.dim) CHECK_EQ(tkv_seq_shift(kv, 3, 100, 150, 5), TKV_OK);
    if (cfg->model.rope.dim) CHECK_EQ(tkv_seq_shift(kv, 1, 150, TKV_UNLIMITED, 3), TKV_OK);
    CHECK_EQ(tkv_seq_reserve(kv, 1, 8), TKV_OK);
}

/* Repairs the checksums of section i of a file and of its index. */
static void repair_section(unsigned char *at, size_t n, uint64_t i) {
    unsigned char *e = at + index_of(at, n) + 32 * i;
    put64(e + 24, xxh64_of(at + get64(e + 8), (size_t)get64(e + 16)));
    put64(at + n - 16, xxh64_of(at + index_of(at, n), n - 16 - (size_t)index_of(at, n)));
}

/* Each number of each section but the records, from its beginning on, gets another value. */
TEST(each_number_is_checked) {
    static const int configs[] = {1, 2, 5, 8, 11, 16};
    static const uint32_t values[] = {0xffffffffu, 0x7fc00000u, 1, 0x3fffffff};
    const int passes = tkv_test_long() ? COUNT(values) : 1, step = tkv_test_quick() ? 2 : 1;
    int n_words = 0;
    for (int c = 0; c < COUNT(configs); c++) {
        tkv_config cfg = config_number(configs[c]);
        tkv_cache *a = create_cache(&cfg), *b = create_cache(&cfg);
        fill_small_cache(a, &cfg);
        const size_t n = save_cache(a, file);
        memcpy(twin_file, file, n);
        for (uint64_t i = 0; i < count_of(file, n); i++) {
            const unsigned char *e = file + index_of(file, n) + 32 * i;
            const size_t from = (size_t)get64(e + 8), bytes = (size_t)get64(e + 16);
            size_t most = get32(e) == SAVED_RECORDS ? 0 : get32(e) == SAVED_LISTS ? 800 : 3000;
            if (most > bytes) most = bytes;
            for (size_t at = from; at + 4 <= from + most; at += 4 * (size_t)step)
                for (int pass = 0; pass < passes; pass++) {
                    put32(twin_file + at, values[(n_words++ + pass) % COUNT(values)]);
                    repair_section(twin_file, n, i);
                    load_changed(&b, &cfg, file, n, twin_file, n, "number", at);
                    put32(twin_file + at, get32(file + at));
                    repair_section(twin_file, n, i);
                }
        }
        tkv_destroy(a);
        tkv_destroy(b);
    }
    printf("\n    %d numbers", n_words);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(loaded_blocks_in_a_tier_that_is_not_reached);
    RUN(blocks_that_lost_their_table_are_refused);
    RUN(everything_later_gives_the_same_bits);
    RUN(a_loaded_cache_may_lie_elsewhere_in_place);
    RUN(shared_states_stay_shared);
    RUN(forks_add_few_bytes);
    RUN(blocks_may_stay_in_the_file);
    RUN(a_callback_reads_a_cache);
    RUN(later_saves_are_added_to_a_journal);
    RUN(offloaded_blocks_come_into_ram);
    RUN(calibrations_and_settings_are_saved);
    RUN(memory_of_the_past_is_no_fault);
    RUN(other_caches_are_refused);
    RUN(tables_of_other_formats_are_refused);
    RUN(meters_of_other_sizes_are_refused);
    RUN(each_allocation_of_a_load_fails_once);
    RUN(lists_of_states_grow_while_they_are_placed);
    RUN(heads_learned_ahead_are_saved);
    RUN(what_queries_taught_is_saved);
    RUN(numbers_that_end_early_are_refused);
    RUN(numbers_that_hardly_begin_are_refused);
    RUN(budgets_in_place_are_checked);
    RUN(budgets_that_no_cache_fits_into_are_refused);
    RUN(hot_tokens_in_a_file_fit_the_config);
    RUN(positions_of_states_have_a_bound);
    RUN(failed_reads_leave_a_new_cache);
    RUN(flipped_bits_and_cuts_are_found);
    RUN(hostile_files_with_right_checksums);
    RUN(layers_that_share_are_saved_once);
    RUN(reservations_and_rotations_have_bounds);
    RUN(reservations_without_memory_end);
    RUN(reservations_get_room_in_the_lists);
    RUN(states_beyond_the_limit_are_refused);
    RUN(copies_of_the_meter_that_fit_no_block);
    RUN(copies_of_the_meter_have_a_distance);
    RUN(states_of_no_sequence_are_passed_over);
    RUN(holders_of_blocks_are_checked);
    RUN(layouts_before_the_last_coding_are_saved);
    RUN(each_number_is_checked);
    return tkv_test_end();
}
