/*
 * test_save_cache.c - tkv_seq_save and tkv_seq_load of a whole cache (TKV_ALL_SEQS): everything that is done later gives
 * the same bits.
 *
 * A script of random calls runs on a cache and on its loaded twin. The whole state is compared by saving both again:
 * the bytes must be equal.
 */
#include "saved_files.h"
#include "sequences.h"

enum { LAYERS = 3, SEQS = 5, MOST = 8 << 20 };

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

/* >>scripts */
/* One random call. The same number makes the same call, as long as the caches are alike. Returns a hash of its answer.
 */
static uint64_t call_number(tkv_cache *kv, int number) {
    static float q[4 * 2 * KV_HEADS * DIM], out[4 * 2 * KV_HEADS * V_DIM];
    tkv_rng rng = tkv_rng_seed(1000 + (uint64_t)number);
    const int seq = tkv_rng_below(&rng, SEQS), other = tkv_rng_below(&rng, SEQS),
              what = tkv_rng_below(&rng, 16), n = 1 + tkv_rng_below(&rng, 90),
              len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    uint64_t hash = 0;
    tkv_status st = TKV_OK;
    if (what < 9 || !len) {
        st = append_to_all_layers(kv, seq, seq + 1, len > 900 ? 1 : n, 64);
        for (int layer = 0; layer < LAYERS && tkv_get_length(kv, seq, layer); layer++) {
            tkv_rng_fill(&rng, q, 4 * 2 * KV_HEADS * DIM, 1.0);
            memset(out, 0, sizeof out);
            (void)tkv_attend(kv, seq, layer, q, len ? 4 : 1, out);
            hash = hash * 31 + xxh64_of((const uint8_t *)out, sizeof out);
        }
    } else if (what < 11 && other != seq) st = tkv_seq_fork(kv, seq, other, 1 + tkv_rng_below(&rng, len));
    else if (what == 11) st = tkv_seq_truncate(kv, seq, len - tkv_rng_below(&rng, len < 40 ? len : 40));
    else if (what == 12) st = tkv_seq_reserve(kv, seq, n);
    else if (what == 13) st = tkv_seq_flush(kv, seq, TKV_FLUSH_DUE);
    else if (what == 14) st = tkv_seq_pin(kv, seq, len / 2, 3, TKV_UNLIMITED);
    else st = number % 3 ? tkv_report_pressure(kv, .5f) : tkv_seq_reset(kv, seq);
    return hash * 31 + (uint64_t)(uint32_t)st;
}

static void run_script(tkv_cache *kv, int first, int n) {
    for (int i = first; i < first + n; i++) (void)call_number(kv, i);
}

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
              "%s, config %d: %zu and %zu bytes, different in section %zu from byte %zu (%lld, %lld)", what,
              number, n, m, kind, within, at < n ? (long long)get64(file + at / 8 * 8) : 0,
              at < m ? (long long)get64(twin_file + at / 8 * 8) : 0);
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

/* >>configs */
enum { CONFIGS = 16 };

static tkv_config config_number(int i) {
    tkv_config cfg = make_config(LAYERS, SEQS);
    cfg.tiers.warm = pair_of(TKV_A40, TKV_R40);
    cfg.tiers.archive = pair_of(TKV_A30, TKV_R20);
    cfg.tiers.warm_tokens = 128;
    if (i == 1) cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI2);
    if (i == 2) cfg.tiers.archive = pair_of(TKV_SQUAT2, TKV_KIVI2);
    if (i == 3)
        cfg.tiers.archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT2), cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    if (i == 4) cfg.budget.bytes = 700000;
    if (i == 5) cfg.budget.bytes = 600000, cfg.evict.policy = TKV_EVICT_H2O;
    if (i == 6) cfg.evict.policy = TKV_EVICT_SNAPKV, cfg.evict.keep_tokens = 300;
    if (i == 7) cfg.evict.policy = TKV_EVICT_KNORM, cfg.evict.keep_tokens = 256;
    if (i == 8) cfg.tiers.n_anchors = 8, cfg.importance.sample_every = 4;
    if (i == 9) cfg.model.window = 200;
    if (i == 10) cfg.meter.heads = 4, cfg.meter.tokens = 512, cfg.meter.every = 8;
    if (i == 11) cfg.meter.heads = 4, cfg.meter.every = 4, cfg.meter.target = .97f, cfg.budget.adapt = 1;
    if (i == 12) cfg.tiers.hot = pair_of(TKV_BF16, TKV_F16), cfg.tiers.sink_tokens = TKV_OFF;
    if (i == 13) cfg.model.v_in_k = 1, cfg.limits.max_tokens = 3000;
    if (i == 14) cfg.tiers.archive = pair_of(TKV_SUBSPACE2, TKV_SUBSPACE2), cfg.tiers.hot_tokens = 16;
    if (i == 15) cfg.budget.bytes = 500000, cfg.limits.max_tokens = 1000;
    return cfg;
}

TEST(everything_later_gives_the_same_bits) {
    for (int i = 0; i < CONFIGS; i++) {
        tkv_config cfg = config_number(i);
        for (int calls = 0; calls <= 120; calls += calls < 40 ? 13 : 81) {
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

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(everything_later_gives_the_same_bits);
    return tkv_test_end();
}
