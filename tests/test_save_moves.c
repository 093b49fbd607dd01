/*
 * test_save_moves.c - saves of sequences whose tokens were forked, copied, removed, kept, reordered, slid and evicted.
 *
 * A random program makes such a call, saves the whole cache and a sequence, and loads both into other caches. These have
 * the same tokens, at the same positions, and give the same attention, then and after later calls.
 */
#include "whole_caches.h"

enum { MOST = 4 << 20 };

static unsigned char whole[MOST], later[MOST], scratch[2 << 20];
static int n_saves, n_refused; /* refused: of the calls, as their numbers choose anything */

static size_t save_into(tkv_cache *kv, int seq, unsigned char *to) {
    tkv_save_params p = save_params(seq);
    size_t n = 0;
    p.scratch = scratch;
    p.scratch_bytes = sizeof scratch;
    p.with_scores = 1;
    CHECK_EQ(tkv_seq_save(kv, &p, to, MOST, &n), TKV_OK);
    n_saves++;
    return n;
}

static tkv_cache *load_into_new(const tkv_config *cfg, int seq, const unsigned char *from, size_t n,
                                int config, int number) {
    tkv_load_params p = load_params(seq);
    tkv_cache *kv = create_cache(cfg);
    const tkv_status st = tkv_seq_load(kv, &p, from, n, NULL);
    CHECK_MSG(st == TKV_OK, "config %d, call %d, sequence %d: load refuses: %s", config, number, seq,
              tkv_get_last_error(kv));
    check_cache_at(kv, "loaded after call", number);
    return kv;
}

/* A hash of what a caller can read of a sequence: lengths, counts, tiers, positions, values, attention. */
static uint64_t hash_of_sequence(tkv_cache *kv, int seq) {
    static int positions[MAX_TOKENS];
    static uint8_t tiers[MAX_TOKENS];
    static float q[2 * KV_HEADS * DIM], x[2 * KV_HEADS * V_DIM];
    tkv_rng rng = tkv_rng_seed(9);
    uint64_t hash = 1;
    int layer, at;
    for (layer = 0; layer < LAYERS; layer++) {
        const int len = tkv_get_length(kv, seq, layer);
        tkv_layer_info info;
        tkv_rng_fill(&rng, q, COUNT(q), 1.0);
        hash = hash * 31 + (uint64_t)(unsigned)len;
        if (!len) continue;
        CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
        hash = hash * 31 + xxh64_of((const uint8_t *)info.tokens, sizeof info.tokens);
        hash = hash * 31 + (uint64_t)(unsigned)(info.expired + 5000 * info.evicted + 77 * info.named_sinks);
        CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, len, tiers), TKV_OK);
        hash = hash * 31 + xxh64_of(tiers, (size_t)len);
        CHECK_EQ(tkv_get_positions(kv, seq, layer, 0, len, positions), TKV_OK);
        hash = hash * 31 + xxh64_of((const uint8_t *)positions, (size_t)len * sizeof *positions);
        for (at = 0; at < len; at++) {
            const int from = at;
            if (tiers[at] == TKV_TOKEN_GONE) continue;
            while (at + 1 < len && tiers[at + 1] != TKV_TOKEN_GONE) at++;
            CHECK_EQ(tkv_read(kv, seq, layer, from, at + 1 - from, k_out, v_out), TKV_OK);
            hash = hash * 31 +
                   xxh64_of((const uint8_t *)k_out, (size_t)((at + 1 - from) * K_ROW) * sizeof(float));
            hash = hash * 31 +
                   xxh64_of((const uint8_t *)v_out, (size_t)((at + 1 - from) * V_ROW) * sizeof(float));
        }
        memset(x, 0, sizeof x);
        hash = hash * 31 + (uint64_t)(unsigned)tkv_attend(kv, seq, layer, q, 1, x);
        hash = hash * 31 + xxh64_of((const uint8_t *)x, sizeof x);
    }
    return hash;
}

/* All caches are asked, as they learn from attention. */
static int is_same_sequence(tkv_cache *const *caches, int n, int seq) {
    const uint64_t hash = hash_of_sequence(caches[0], seq);
    int is_same = 1, i;
    for (i = 1; i < n; i++) is_same &= hash_of_sequence(caches[i], seq) == hash;
    return is_same;
}

/* Compares the bytes of two saves. */
static void check_same_save(tkv_cache *a, tkv_cache *b, int config, int number) {
    const size_t n = save_into(a, TKV_ALL_SEQS, whole), m = save_into(b, TKV_ALL_SEQS, later);
    size_t at = 0;
    while (at < n && at < m && whole[at] == later[at]) at++;
    CHECK_MSG(n == m && at == n,
              "config %d, call %d: two saves of %.0f and %.0f bytes differ from byte %.0f on", config, number,
              (double)n, (double)m, (double)at);
}

/* Runs calls. After each one a new cache loads what is saved then. One in a while stays, and makes the next calls too. */
static void run_program(const tkv_config *cfg, int config, int seed, int calls) {
    tkv_cache *kv[3]; /* the cache, a twin that was loaded a while ago, one that is loaded now */
    int i, seq, other, since = 0, has_twin = 0;
    kv[0] = create_cache(cfg);
    for (i = 0; i < calls; i++) {
        const int number = 1000 * seed + i;
        const tkv_status st = move_number(kv[0], number, &seq);
        size_t n;
        n_refused += st != TKV_OK;
        check_cache_at(kv[0], "call", number);
        if (has_twin) CHECK_EQ(move_number(kv[1], number, &other), st);
        if (has_twin && ++since == 12) {
            check_same_save(kv[0], kv[1], config, number);
            tkv_destroy(kv[1]);
            has_twin = since = 0;
        }
        n = save_into(kv[0], TKV_ALL_SEQS, whole);
        kv[1 + has_twin] = load_into_new(cfg, TKV_ALL_SEQS, whole, n, config, number);
        for (other = 0; other < SEQS; other++)
            CHECK_MSG(is_same_sequence(kv, 2 + has_twin, other), "config %d, call %d: sequence %d differs",
                      config, number, other);
        if (has_twin) tkv_destroy(kv[2]);
        has_twin = 1;
        if (!tkv_get_length(kv[0], seq, TKV_ALL_LAYERS)) continue;
        n = save_into(kv[0], seq, whole);
        kv[2] = load_into_new(cfg, seq, whole, n, config, number);
        CHECK_MSG(is_same_sequence(kv, 3, seq), "config %d, call %d: sequence %d differs alone", config,
                  number, seq);
        tkv_destroy(kv[2]);
    }
    if (has_twin) tkv_destroy(kv[1]);
    tkv_destroy(kv[0]);
}

/* A list that holds the same blocks twice, one run behind the other. */
TEST(tokens_that_came_back_are_saved) {
    const tkv_config cfg = make_config(LAYERS, SEQS);
    int n, is_reset;
    for (n = 60; n <= 400; n += 20)
        for (is_reset = 0; is_reset < 2; is_reset++) {
            tkv_cache *kv[2];
            kv[0] = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv[0], 0, 1, n, 64), TKV_OK);
            CHECK_EQ(tkv_seq_fork(kv[0], 0, 1, TKV_UNLIMITED), TKV_OK);
            CHECK_EQ(tkv_seq_copy(kv[0], 1, 0, TKV_UNLIMITED, 0, 0), TKV_OK);
            if (is_reset) CHECK_EQ(tkv_seq_reset(kv[0], 1), TKV_OK);
            kv[1] = load_into_new(&cfg, TKV_ALL_SEQS, whole, save_into(kv[0], TKV_ALL_SEQS, whole), 0, n);
            CHECK(is_same_sequence(kv, 2, 0) && is_same_sequence(kv, 2, 1));
            check_same_save(kv[0], kv[1], 0, n);
            tkv_destroy(kv[0]);
            tkv_destroy(kv[1]);
        }
}

/* A file of e1db1b6 in which a run names earlier entries of its list. That version refused it as it had written it: "entries
 * that repeat are not alike". It is the whole cache that this test makes again. */
TEST(lists_that_hold_blocks_twice_load_from_old_files) {
    const tkv_config cfg = make_sized_config(1, 2, 1, 8, 2, 64);
    FILE *f = fopen("tests/data/saved-1-twice.tkvs", "rb");
    CHECK_MSG(f != NULL, "tests/data/saved-1-twice.tkvs is missing; run from the root of the project");
    if (!f) return;
    const size_t n = fread(whole, 1, sizeof whole, f);
    const unsigned char *list = find_in_index(whole, n, SAVED_LISTS, 0);
    tkv_cache *kv = create_cache(&cfg);
    tkv_load_params load = load_params(TKV_ALL_SEQS);
    int layer_runs = 0;
    fclose(f);
    for (uint64_t i = 0; i < get32(whole + get64(list + 8) + 40); i++) { /* runs of its entries */
        const unsigned char *run = whole + get64(list + 8) + 48 + 64 * i;
        layer_runs += get32(run + 4) != get32(run) && get32(run + 12) > 2;
    }
    CHECK(layer_runs > 0);
    for (int t = 0; t < 300; t++) {
        float x[8];
        for (int i = 0; i < 8; i++) x[i] = (float)((t * 31 + i * 7) % 61 - 30) / 8.0f;
        CHECK_EQ(tkv_append(kv, 0, 0, x, x, 1), TKV_OK);
    }
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 1, 0, TKV_UNLIMITED, 0, 0), TKV_OK);
    tkv_cache *old = create_cache(&cfg);
    CHECK_MSG(tkv_seq_load(old, &load, whole, n, NULL) == TKV_OK, "%s", tkv_get_last_error(old));
    check_cache_at(old, "an old file", 0);
    for (int seq = 0; seq < 2; seq++) {
        const int len = tkv_get_length(kv, seq, 0);
        CHECK_EQ(tkv_get_length(old, seq, 0), len);
        for (int t = 0; t < len; t++) {
            float k[2][8], v[2][8];
            CHECK_EQ(tkv_read(kv, seq, 0, t, 1, k[0], v[0]), tkv_read(old, seq, 0, t, 1, k[1], v[1]));
            CHECK_MEM(k[0], k[1], sizeof k[0]);
            CHECK_MEM(v[0], v[1], sizeof v[0]);
        }
    }
    CHECK_EQ(tkv_get_length(old, 0, 0), 600);
    check_same_save(kv, old, 0, 0);
    tkv_destroy(kv);
    tkv_destroy(old);
}

TEST(each_save_is_loaded) {
    static const int configs[] = {0, 1, 3, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18};
    int i, seed;
    for (i = 0; i < COUNT(configs); i++) {
        const tkv_config cfg = config_number(configs[i]);
        /* seed 1 of config 6 holds blocks twice after few calls */
        for (seed = tkv_test_quick(); seed < (tkv_test_long() ? 20 : 2); seed++)
            run_program(&cfg, configs[i], 20 * i + seed, tkv_test_quick() ? 40 : 60);
    }
    printf("\n    %d saves; of the calls %d were refused", n_saves, n_refused);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(tokens_that_came_back_are_saved);
    RUN(lists_that_hold_blocks_twice_load_from_old_files);
    RUN(each_save_is_loaded);
    return tkv_test_end();
}
