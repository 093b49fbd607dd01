/*
 * white_learn.c - white-box test of src/learn: formats whose heads share the bytes of a layer. When a table is made,
 * its contents, and blocks that wait for it. Also calibrations that are saved, loaded, frozen, refreshed or damaged,
 * and the queries that SQuat collects.
 *
 * It reads the tables of a cache (white.h) on every instruction set. Other files test these formats too: test_attend.c
 * compares attention with a reference, test_memory.c memory with the allocator, white_step.c random calls with a
 * model.
 */
#include "white.h"
#include "levels.h"
#include "stream.h"

#include <math.h>

enum {
    FIRST_TABLE = TKVI_FIRST_TABLE_TOKENS,
    SECOND_TABLE = 2 * FIRST_TABLE,
    HEADS = 4,
    KV_HEADS = 2,
    DK = 32,
    DV = 48
};
enum {
    K_ROW = KV_HEADS * DK,
    V_ROW = KV_HEADS * DV,
    Q_ROW = HEADS * DK,
    OUT_ROW = HEADS * DV,
    SAVED = 1 << 16
};

enum { FLOATS = 1 << 18 };
static float k_in[FLOATS], v_in[FLOATS], k_out[FLOATS], v_out[FLOATS], k_want[FLOATS], v_want[FLOATS];
static uint8_t saved[SAVED], saved_again[SAVED];

/* >>configs and tokens */
static tkv_config config(int layers, int seqs) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = layers;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DK;
    cfg.model.v_head_dim = DV;
    cfg.limits.max_seqs = seqs;
    cfg.tiers.warm_tokens = 128;
    cfg.tiers.warm = pair_of(TKV_A40, TKV_R40);
    cfg.tiers.archive = pair_of(TKV_A30, TKV_R20);
    cfg.host.isa = tkv_test_isa();
    return cfg;
}

static tkv_config config_kivi(int layers, int seqs) { /* the same tiers, in formats that learn nothing */
    tkv_config cfg = config(layers, seqs);
    cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    return cfg;
}

/* Contents of tokens. A token of a sequence and layer has the same values in any chunking. */
enum { USUAL, CONSTANT_CHANNELS, ZEROS, LARGE, BIASED, CONTENTS };

static void fill_rows(int what, int seq, int layer, int first, int n, int heads, int dim, int is_v,
                      float *x) {
    int t, h, c;
    if (n * heads * dim > FLOATS) exit(2);
    for (t = 0; t < n; t++) {
        tkv_rng r = tkv_rng_seed((uint64_t)(unsigned)(first + t) << 20 ^ (uint64_t)(unsigned)layer << 12 ^
                                 (uint64_t)(unsigned)seq << 4 ^ (uint64_t)(unsigned)is_v);
        for (h = 0; h < heads; h++)
            for (c = 0; c < dim; c++) {
                double y = tkv_rng_gauss(&r) * (is_v ? 1.0 : ldexp(1.0, (c * 7 + h * 3) % 5 - 2));
                if (what == CONSTANT_CHANNELS && c % 3) y = c % 2 ? 0.75 * c : 0.0;
                if (what == ZEROS) y = 0.0;
                if (what == LARGE) y *= 10000.0;
                if (what == BIASED && !is_v) y += c % 5 == 0 ? 600.0 : -3.0 * c;
                x[(t * heads + h) * dim + c] = (float)y;
            }
    }
}

static tkv_status append_contents(tkv_cache *kv, int what, int seq, int layer, int n) {
    const tkv_config *cfg = &kv->tables.cfg;
    int start = tkv_get_length(kv, seq, layer);
    fill_rows(what, seq, layer, start, n, cfg->model.n_kv_heads, cfg->model.head_dim, 0, k_in);
    fill_rows(what, seq, layer, start, n, cfg->model.n_kv_heads, cfg->model.v_head_dim, 1, v_in);
    return tkv_append(kv, seq, layer, k_in, v_in, n);
}

static tkv_status append_tokens(tkv_cache *kv, int seq, int layer, int n) {
    return append_contents(kv, USUAL, seq, layer, n);
}

static void append_layers(tkv_cache *kv, int seq, int n, int chunk) {
    int layer, at;
    for (at = 0; at < n; at += chunk)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
            if (kv->tables.plan[layer].stored_layer == layer)
                CHECK_EQ(append_tokens(kv, seq, layer, n - at < chunk ? n - at : chunk), TKV_OK);
}

/* Attends with queries of the newest n tokens. The queries depend on the positions. */
static void attend_newest(tkv_cache *kv, int seq, int layer, int n, float *out) {
    static float q[64 * Q_ROW], unused_out[64 * OUT_ROW];
    const tkv_config *cfg = &kv->tables.cfg;
    int first = tkv_get_length(kv, seq, layer) - n;
    if (n > 64) exit(2);
    fill_rows(USUAL, seq + 100, layer, first, n, cfg->model.n_heads, cfg->model.head_dim, 0, q);
    CHECK_EQ(tkv_attend(kv, seq, layer, q, n, out ? out : unused_out), TKV_OK);
}

static void check_cache_at(const tkv_cache *kv, const char *what) {
    char reason[160];
    tkv_status st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s: %s", what, reason);
}

static int has_table(const tkv_cache *kv, int layer) { return kv->tables.current_version[layer] >= 0; }

static double norm_of(const float *x, int n) {
    double s = 0.0;
    int i;
    for (i = 0; i < n; i++) s += (double)x[i] * (double)x[i];
    return sqrt(s);
}

static int is_all_finite(const float *x, int n) {
    int i;
    for (i = 0; i < n; i++)
        if (!tkv_test_is_finite((double)x[i])) return 0;
    return 1;
}

/* loss: out, the relative errors of K and V that tkv_read returns. For BIASED, the norm is that of K without bias. */
static void measure_losses(tkv_cache *kv, int what, int seq, int layer, double *loss) {
    const tkv_config *cfg = &kv->tables.cfg;
    int n = tkv_get_length(kv, seq, layer), nk = n * cfg->model.n_kv_heads * cfg->model.head_dim,
        nv = n * cfg->model.n_kv_heads * cfg->model.v_head_dim;
    CHECK_EQ(tkv_read(kv, seq, layer, 0, n, k_out, v_out), TKV_OK);
    CHECK(is_all_finite(k_out, nk) && is_all_finite(v_out, nv));
    fill_rows(what, seq, layer, 0, n, cfg->model.n_kv_heads, cfg->model.head_dim, 0, k_want);
    fill_rows(what, seq, layer, 0, n, cfg->model.n_kv_heads, cfg->model.v_head_dim, 1, v_want);
    loss[TKV_V] = float_difference(v_out, v_want, nv);
    loss[TKV_K] = float_difference(k_out, k_want, nk);
    if (what != BIASED) return;
    fill_rows(USUAL, seq, layer, 0, n, cfg->model.n_kv_heads, cfg->model.head_dim, 0, k_in);
    loss[TKV_K] *= norm_of(k_want, nk) / norm_of(k_in, nk);
}

/* >>contents of a table */
static int sum_tile_bits(const tkvi_tile_counts *runs) {
    int w, sum = 0;
    for (w = 1; w <= TKVI_MAX_WIDTH; w++) sum += w * runs->n[w];
    return sum;
}

static const tkvi_layout *layout_of(const tkv_cache *kv, int layer, tkv_tier tier) {
    return &kv->tables.layout[tkvi_layout_of(&kv->tables, layer, tier)];
}

/* Checks the current table of a layer. Each channel occurs once, the most important first. Records are adjacent and fit
 * the block. On average, heads have the bits of the format. */
static void check_table(const tkv_cache *kv, int layer, const char *what) {
    const tkv_config *cfg = &kv->tables.cfg;
    int head, i, tier, pad = (cfg->model.head_dim + 15) / 16 * 16, wrong = 0;
    CHECK(has_table(kv, layer));
    if (!has_table(kv, layer)) return;
    for (head = 0; head < cfg->model.n_kv_heads; head++) {
        const tkvi_head *h = &tkvi_heads_of(&kv->tables, layer, kv->tables.current_version[layer])[head];
        uint8_t seen[TKV_MAX_HEAD_DIM];
        memset(seen, 0, sizeof seen);
        for (i = 0; i < pad; i++) {
            wrong += h->order[i] >= pad || seen[h->order[i]]++;
            if (i < cfg->model.head_dim) {
                wrong += h->order[i] >= cfg->model.head_dim || h->importance[i] == 0;
                wrong += i > 0 && h->importance[i] > h->importance[i - 1];
                wrong += !tkv_test_is_finite((double)h->mean[i]);
            } else {
                wrong += h->importance[i] != 0;
            }
        }
        wrong += h->k_top < -TKVI_LOG_TOP || h->k_top > TKVI_LOG_TOP;
        wrong += h->v_top < -TKVI_LOG_TOP || h->v_top > TKVI_LOG_TOP;
    }
    CHECK_MSG(wrong == 0, "%s: %d things are wrong with the order of channels", what, wrong);
    for (tier = TKV_TIER_WARM; tier < TKV_TIER_COUNT; tier++) {
        const tkvi_layout *c = layout_of(kv, layer, (tkv_tier)tier);
        const tkvi_format *kf = &tkvi_formats[c->pair.k], *vf = &tkvi_formats[c->pair.v];
        size_t at = 0;
        int k_bits = 0, v_half_bits = 0, k_budget, max_bits = pad;
        for (head = 0; head < cfg->model.n_kv_heads; head++) {
            const tkvi_record *r = &c->record[head];
            CHECK_EQ(r->at, at);
            CHECK_EQ(r->v_at, r->k.bytes);
            CHECK_EQ(r->at % 64, 0);
            at += r->k.bytes + r->v.bytes;
            k_bits += sum_tile_bits(&r->k.tiles);
            v_half_bits += r->v.half_bits;
            if (kf->shared) {
                int tiles = 0;
                for (i = 1; i <= TKVI_MAX_WIDTH; i++) tiles += r->k.tiles.n[i];
                CHECK(tiles <= pad / 4 && r->k.tiles.n[8] == 0);
                CHECK_LE(sum_tile_bits(&r->k.tiles), max_bits + 1);
            }
            if (vf->shared) CHECK(r->v.half_bits >= 2 && r->v.half_bits <= 8);
        }
        CHECK_LE(at, c->bytes.total);
        if (kf->shared) {
            k_budget = cfg->model.n_kv_heads *
                       tkvi_head_budget(kf->bits, cfg->model.head_dim, cfg->format.allocation_unit / 4, 1);
            /* rounding may leave less than a unit, and one bit of an odd budget */
            CHECK_MSG(k_bits <= k_budget && k_bits > k_budget - cfg->format.allocation_unit / 2 - 1,
                      "%s: %d tile bits of %d", what, k_bits, k_budget);
        }
        if (vf->shared) CHECK_LE(v_half_bits, cfg->model.n_kv_heads * vf->bits / 2);
    }
}

/* >>blocks that wait for a table */
static int has_same_tiers(const tkv_cache *a, const tkv_cache *b, int seq, int layer) {
    tkv_layer_info x, y;
    CHECK_EQ(tkv_get_layer(a, seq, layer, &x), TKV_OK);
    CHECK_EQ(tkv_get_layer(b, seq, layer, &y), TKV_OK);
    return memcmp(x.tokens, y.tokens, sizeof x.tokens) == 0 &&
           memcmp(x.blocks, y.blocks, sizeof x.blocks) == 0 && x.expired == y.expired &&
           x.offloaded == y.offloaded && x.evicted == y.evicted && x.discarded == y.discarded;
}

static int is_all_hot(const tkv_cache *kv, int seq, int layer) {
    tkv_layer_info x;
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &x), TKV_OK);
    return x.tokens[TKV_TIER_WARM] == 0 && x.tokens[TKV_TIER_ARCHIVE] == 0 && x.expired == 0;
}

TEST(nothing_is_encoded_before_the_256th_token) {
    static const int chunks[] = {1, 37, 64, 128, 250, 256};
    int i, total;
    for (i = 0; i < COUNT(chunks); i++) {
        tkv_config cfg = config(1, 1), kivi_cfg = config_kivi(1, 1);
        tkv_cache *kv = create_cache(&cfg), *kivi = create_cache(&kivi_cfg);
        for (total = 0; total < 1100; total += chunks[i]) {
            CHECK_EQ(n_calibrated_layers(kv), total - chunks[i] >= FIRST_TABLE);
            CHECK_EQ(append_tokens(kv, 0, 0, chunks[i]), TKV_OK);
            CHECK_EQ(append_tokens(kivi, 0, 0, chunks[i]), TKV_OK);
            CHECK_EQ(n_calibrated_layers(kv), total >= FIRST_TABLE);
            CHECK_EQ(n_calibrated_layers(kivi), 0);
            if (total >= FIRST_TABLE &&
                (chunks[i] >= TKV_BLOCK_TOKENS || total >= FIRST_TABLE + 4 * chunks[i]))
                CHECK(has_same_tiers(kv, kivi, 0, 0)); /* few tokens encode two waiting blocks or more */
            else if (total < FIRST_TABLE) CHECK(is_all_hot(kv, 0, 0));
            check_cache_at(kv, "waiting");
        }
        check_table(kv, 0, "one sequence");
        tkv_destroy(kv);
        tkv_destroy(kivi);
    }
}

TEST(sequences_learn_together) {
    enum { SEQS = 5 };
    tkv_config cfg = config(2, SEQS), kivi_cfg = config_kivi(2, SEQS);
    tkv_cache *kv = create_cache(&cfg), *kivi = create_cache(&kivi_cfg);
    int total[2] = {0, 0}, step, seq, layer;
    for (step = 0; step < 120; step++) {
        int n = 1 + step % 23;
        seq = step * 7 % SEQS;
        for (layer = 0; layer < 2; layer++) {
            int n_more = layer ? (n + 1) / 2 : n; /* each layer learns from its own tokens */
            const int turn = layer * TKVI_BLOCK / 2,
                      is_due = total[layer] >= FIRST_TABLE &&
                               (has_table(kv, layer) || total[layer] + n_more > FIRST_TABLE + turn);
            CHECK_EQ(append_tokens(kv, seq, layer, n_more), TKV_OK);
            CHECK_EQ(append_tokens(kivi, seq, layer, n_more), TKV_OK);
            CHECK_EQ(has_table(kv, layer), is_due);
            if (is_due)
                CHECK(has_same_tiers(kv, kivi, seq, layer)); /* a sequence demotes at its next append */
            else CHECK(is_all_hot(kv, seq, layer));
            total[layer] += n_more;
        }
        CHECK_EQ(n_calibrated_layers(kv), has_table(kv, 0) + has_table(kv, 1));
        check_cache_at(kv, "together");
    }
    CHECK_EQ(n_calibrated_layers(kv), 2);
    for (layer = 0; layer < 2; layer++) check_table(kv, layer, "several sequences");
    tkv_destroy(kv);
    tkv_destroy(kivi);
}

/* A sequence that starts after the table was made does not wait. An earlier one demotes its blocks when it is used. */
TEST(later_sequences_do_not_wait) {
    tkv_config cfg = config(1, 3), kivi_cfg = config_kivi(1, 3);
    tkv_cache *kv = create_cache(&cfg), *kivi = create_cache(&kivi_cfg);
    int seq, n;
    for (seq = 0; seq < 2; seq++) {
        CHECK_EQ(append_tokens(kv, seq, 0, 256), TKV_OK);
        CHECK_EQ(append_tokens(kivi, seq, 0, 256), TKV_OK);
    }
    for (n = 1; n < 400; n += 7) {
        CHECK_EQ(append_tokens(kv, 2, 0, 7), TKV_OK);
        CHECK_EQ(append_tokens(kivi, 2, 0, 7), TKV_OK);
        CHECK(has_same_tiers(kv, kivi, 2, 0));
    }
    for (seq = 0; seq < 2; seq++) {
        CHECK(is_all_hot(kv, seq, 0));
        CHECK_EQ(tkv_seq_flush(kv, seq, TKV_FLUSH_DUE), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kivi, seq, TKV_FLUSH_DUE), TKV_OK);
        CHECK(has_same_tiers(kv, kivi, seq, 0));
    }
    check_cache_at(kv, "later");
    tkv_destroy(kv);
    tkv_destroy(kivi);
}

/* Blocks wait in the next better tier, if that one needs no table. */
TEST(only_one_tier_needs_a_table) {
    tkv_config cfg = config(2, 1);
    tkv_layer_config layers[2];
    tkv_cache *kv;
    tkv_layer_info info;
    memset(layers, 0, sizeof layers);
    layers[0].warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    layers[1].archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    layers[1].warm_tokens = 64;
    cfg.layers = layers;
    kv = create_cache(&cfg);
    append_layers(kv, 0, 250, 5);
    CHECK_EQ(n_calibrated_layers(kv), 0);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.tokens[TKV_TIER_WARM] == 128 && info.tokens[TKV_TIER_ARCHIVE] == 0);
    CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
    CHECK(info.tokens[TKV_TIER_WARM] == 0 && info.tokens[TKV_TIER_ARCHIVE] == 64);
    check_cache_at(kv, "one tier");
    append_layers(kv, 0, 750, 25);
    CHECK_EQ(n_calibrated_layers(kv), 2);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.tokens[TKV_TIER_WARM] == 192 && info.tokens[TKV_TIER_ARCHIVE] == 704);
    CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
    CHECK(info.tokens[TKV_TIER_WARM] == 64 && info.tokens[TKV_TIER_ARCHIVE] == 768);
    check_table(kv, 0, "archive only");
    check_table(kv, 1, "warm only");
    tkv_destroy(kv);
}

/* A cache learns nothing for a tier that no block can reach, neither by its age nor by a flush. */
TEST(tiers_out_of_reach) {
    static const struct {
        int hot, warm, max_tokens, shared, learns; /* shared: bit 0 the warm tier, bit 1 the archive */
    } cases[] = {
        {TKV_UNLIMITED, 0, 0, 3, 0}, {TKV_UNLIMITED, TKV_UNLIMITED, 700, 3, 0},
        {0, TKV_UNLIMITED, 0, 2, 0}, {0, TKV_UNLIMITED, 0, 1, 1},
        {0, 700, 700, 2, 0},         {0, 699, 700, 2, 1},
        {TKV_OFF, 700, 700, 3, 1},   {1 << 29, 0, 0, 3, 1}, /* a flush reaches it */
        {700, 0, 700, 2, 1},
    };
    int i, format;
    for (i = 0; i < 2 * COUNT(cases); i++) {
        tkv_config cfg = config_kivi(1, 1), kivi_cfg;
        tkv_memory_info memory, estimate;
        tkv_cache *kv, *kivi;
        int c = i / 2;
        cfg.tiers.hot_tokens = cases[c].hot;
        cfg.tiers.warm_tokens = cases[c].warm;
        cfg.limits.max_tokens = cases[c].max_tokens;
        cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
        kivi_cfg = cfg;
        format = i % 2 ? TKV_KVQUANT3 : TKV_A30;
        if (cases[c].shared & 1) cfg.tiers.warm = pair_of((tkv_format)format, TKV_KIVI4);
        if (cases[c].shared & 2) cfg.tiers.archive = pair_of((tkv_format)format, TKV_KIVI2);
        kv = create_cache(&cfg);
        kivi = create_cache(&kivi_cfg);
        CHECK_EQ(tkv_freeze_calibration(kv), cases[c].learns ? TKV_ERR_STATE : TKV_OK);
        append_layers(kv, 0, 640, 40);
        append_layers(kivi, 0, 640, 40);
        CHECK_MSG(n_calibrated_layers(kv) == cases[c].learns, "case %d", i);
        CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
        CHECK_EQ(tkv_estimate_memory(&cfg, 640, 1, &estimate), TKV_OK);
        CHECK_EQ(memory.tables, estimate.tables);
        CHECK(has_same_tiers(kv, kivi, 0, 0));
        CHECK_EQ(tkv_seq_truncate(kv, 0, 639), tkv_seq_truncate(kivi, 0, 639));
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kivi, 0, TKV_FLUSH_ALL), TKV_OK);
        CHECK(has_same_tiers(kv, kivi, 0, 0));
        CHECK(cases[c].learns || !has_table(kv, 0));
        CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
        append_layers(kv, 0, 50, 1);
        append_layers(kivi, 0, 50, 1);
        CHECK(has_same_tiers(kv, kivi, 0, 0));
        CHECK_EQ(tkv_read(kv, 0, 0, 0, 689, k_out, v_out), TKV_OK);
        CHECK(is_all_finite(k_out, 689 * K_ROW));
        check_cache_at(kv, "out of reach");
        tkv_destroy(kv);
        tkv_destroy(kivi);
    }
}

static int n_tables_at(int tokens) {
    int n = 0;
    while (tokens >= FIRST_TABLE << n) n++;
    return n;
}

/* A layer gets a table each time that its number of tokens has doubled. Blocks keep the versions that they have, until
 * all are in use. Then the oldest is retired. */
TEST(tables_keep_coming) {
    NEEDS_ATOMICS;
    tkv_config cfg = config(1, 1);
    tkv_cache *kv;
    int i, head, n_collecting, made = 0, version = -1;
    const int end = tkv_test_quick() ? 4096 + 200 : 32768 + 200, chunk = tkv_test_quick() ? 40 : 20;
    cfg.limits.max_tokens = end + chunk;
    kv = create_cache(&cfg);
    for (i = 0; i < end; i += chunk) {
        CHECK_EQ(append_tokens(kv, 0, 0, chunk), TKV_OK);
        attend_newest(kv, 0, 0, tkv_test_quick() ? 8 : 20, NULL);
        for (n_collecting = 0, head = 0; head < KV_HEADS; head++)
            n_collecting += tkvi_q_sq_sum_of(kv, 0, head)[0] != 0;
        CHECK_EQ(n_collecting, KV_HEADS);
        made += kv->tables.current_version[0] != version;
        version = kv->tables.current_version[0];
        CHECK_EQ(made, n_tables_at(i));
        if (made <= TKVI_VERSIONS) CHECK_EQ(version, made - 1);
        CHECK_EQ(tkvi_learning_bytes(kv),
                 (size_t)(made < TKVI_VERSIONS ? made : TKVI_VERSIONS) * kv->tables.version_bytes +
                     tkvi_stats_bytes(&kv->tables.end));
        if (i % 1000 == 0) check_cache_at(kv, "more tables");
    }
    check_table(kv, 0, "the last table");
    tkv_destroy(kv);
}

/* Blocks whose version is retired are coded again: they decode to almost what they did. Without memory, the table waits
 * and no call fails. */
TEST(retired_versions_are_recoded) {
    tkv_config cfg = config(1, 1);
    counting_allocator p;
    tkv_cache *kv;
    double square = 0, error = 0;
    int i;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.limits.max_tokens = 16 * FIRST_TABLE + 200;
    kv = create_cache(&cfg);
    append_layers(kv, 0, 16 * FIRST_TABLE, 64);
    CHECK_EQ(kv->tables.current_version[0], TKVI_VERSIONS - 1);
    CHECK_EQ(tkvi_version_of(kv, tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[1])->layout), 0);
    CHECK_EQ(tkv_read(kv, 0, 0, 4, 384, k_want, v_want), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], 0);
    CHECK_EQ(tkvi_version_of(kv, tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[1])->layout), TKVI_VERSIONS - 1);
    CHECK_EQ(tkv_read(kv, 0, 0, 4, 384, k_out, v_out), TKV_OK);
    for (i = 0; i < 384 * K_ROW; i++) {
        square += (double)k_want[i] * (double)k_want[i];
        error += ((double)k_out[i] - (double)k_want[i]) * ((double)k_out[i] - (double)k_want[i]);
    }
    CHECK_MSG(error > 0 && error < 0.3 * square, "%g of %g", error, square);
    check_cache_at(kv, "retired");
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* Without sinks the first block of a list has a table, and keeps its version alone when all others are gone. */
TEST(the_first_block_uses_its_table) {
    tkv_config cfg = config(1, 1);
    tkv_cache *kv;
    cfg.tiers.sink_tokens = TKV_OFF;
    kv = create_cache(&cfg);
    append_layers(kv, 0, SECOND_TABLE + 64, 64);
    CHECK_EQ(kv->tables.current_version[0], 1);
    CHECK_EQ(tkvi_version_of(kv, tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[0])->layout), 0);
    CHECK_EQ(tkv_seq_truncate(kv, 0, TKV_BLOCK_TOKENS), TKV_OK);
    CHECK_EQ(tkvi_used_versions(kv, 0), 3);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 0), TKV_OK);
    CHECK_EQ(tkvi_used_versions(kv, 0), 2);
    tkv_destroy(kv);
}

/* >>tables from unusual contents, shapes and sequences */
TEST(any_contents_make_a_table) {
    static const tkv_format archives[][2] = {{TKV_A30, TKV_R20}, {TKV_A15, TKV_R10}, {TKV_A175, TKV_R15}};
    const int n_queries = tkv_test_quick() ? 6 : 20;
    int what, how, unit, a;
    for (what = 0; what < CONTENTS; what++)
        for (how = 0; how < 3; how++) /* 0 no attention, 1 zero queries, 2 usual queries */
            for (unit = 4; unit <= 16; unit += 12)
                for (a = 0; a < COUNT(archives); a++) {
                    tkv_config cfg = config(1, 1);
                    tkv_cache *kv;
                    static float q[20 * Q_ROW], out[20 * OUT_ROW];
                    double loss[2];
                    int n;
                    if (tkv_test_quick() && (what + 3 * how + 2 * (unit / 12) + a) % 7) continue;
                    cfg.format.allocation_unit = unit;
                    cfg.tiers.archive = pair_of(archives[a][0], archives[a][1]);
                    if (what == BIASED) cfg.tiers.hot.k = TKV_F32;
                    kv = create_cache(&cfg);
                    memset(q, 0, sizeof q);
                    for (n = 0; n < 700; n += 20) {
                        CHECK_EQ(append_contents(kv, what, 0, 0, 20), TKV_OK);
                        if (how == 1) CHECK_EQ(tkv_attend(kv, 0, 0, q, n_queries, out), TKV_OK);
                        if (how == 2) attend_newest(kv, 0, 0, n_queries, NULL);
                    }
                    check_table(kv, 0, "contents");
                    check_cache_at(kv, "contents");
                    measure_losses(kv, what, 0, 0, loss);
                    CHECK_LE(loss[TKV_K], what == ZEROS ? 0.0 : 0.7);
                    CHECK_LE(loss[TKV_V], what == ZEROS ? 0.0 : 0.7);
                    attend_newest(kv, 0, 0, 20, out);
                    CHECK(is_all_finite(out, 20 * OUT_ROW));
                    tkv_destroy(kv);
                }
}

TEST(any_shape_makes_a_table) {
    static const int shapes[][4] = {{1, 1, 1, 1},   {1, 1, 2, 8},    {3, 3, 16, 16},   {4, 2, 48, 64},
                                    {4, 4, 80, 80}, {6, 3, 96, 112}, {8, 1, 128, 128}, {2, 2, 192, 256},
                                    {5, 5, 65, 63}, {7, 7, 17, 100}, {16, 16, 64, 64}, {2, 1, 256, 1},
                                    {24, 24, 8, 8}};
    static const tkv_format formats[][2] = {{TKV_A40, TKV_R40},  {TKV_A35, TKV_R30},  {TKV_A30, TKV_R20},
                                            {TKV_A275, TKV_R15}, {TKV_A25, TKV_R10},  {TKV_A225, TKV_R20},
                                            {TKV_A20, TKV_R15},  {TKV_A175, TKV_R15}, {TKV_A15, TKV_R10}};
    int s, i;
    for (s = 0; s < COUNT(shapes); s++)
        for (i = 0; i < COUNT(formats); i++) {
            const int heads = shapes[s][1], dk = shapes[s][2], dv = shapes[s][3];
            tkv_config cfg = config(1, 1);
            tkv_cache *kv;
            float *k, *v, out[24 * 256], q[24 * 256];
            tkv_rng rng = tkv_rng_seed((uint64_t)(s * 100 + i));
            if (tkv_test_quick() && (s + i) % 4) continue;
            cfg.model.n_heads = shapes[s][0];
            cfg.model.n_kv_heads = heads;
            cfg.model.head_dim = dk;
            cfg.model.v_head_dim = dv;
            cfg.tiers.hot_tokens = 32;
            cfg.tiers.warm_tokens = 64;
            cfg.format.allocation_unit = i % 2 ? 16 : 4;
            cfg.tiers.warm = pair_of(formats[(i + 3) % COUNT(formats)][0], formats[i][1]);
            cfg.tiers.archive = pair_of(formats[i][0], formats[(i + s) % COUNT(formats)][1]);
            kv = create_cache(&cfg);
            k = k_in;
            v = v_in;
            tkv_rng_fill(&rng, q, COUNT(q), 1.0);
            tkv_rng_fill(&rng, k, (size_t)(180 * heads * dk), 1.0);
            tkv_rng_fill(&rng, v, (size_t)(180 * heads * dv), 1.0);
            CHECK_EQ(tkv_append(kv, 0, 0, k, v, 20), TKV_OK);
            CHECK_EQ(tkv_attend(kv, 0, 0, q, 1, out), TKV_OK);
            CHECK_EQ(tkv_append(kv, 0, 0, k, v, 180), TKV_OK);
            CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
            CHECK_EQ(tkv_append(kv, 0, 0, k, v, 30), TKV_OK);
            CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
            check_table(kv, 0, "shape");
            check_cache_at(kv, "shape");
            CHECK_EQ(tkv_attend(kv, 0, 0, q, 1, out), TKV_OK);
            CHECK(is_all_finite(out, cfg.model.n_heads * dv));
            tkv_destroy(kv);
        }
}

TEST(a_flush_makes_a_table) {
    int n;
    for (n = 1; n < FIRST_TABLE; n += n < 8 ? 1 : 67) {
        tkv_config cfg = config(1, 2);
        tkv_cache *kv = create_cache(&cfg);
        tkv_layer_info info;
        double loss[2];
        CHECK_EQ(append_tokens(kv, 0, 0, n), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_DUE), TKV_OK); /* no block is due */
        CHECK_EQ(n_calibrated_layers(kv), 0);
        CHECK_EQ(tkv_seq_flush(kv, 1, TKV_FLUSH_ALL), TKV_OK); /* this sequence is empty */
        CHECK_EQ(n_calibrated_layers(kv), 0);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
        CHECK_EQ(n_calibrated_layers(kv), n > 4); /* sinks alone make no table */
        CHECK_EQ(tkv_freeze_calibration(kv), n > 4 ? TKV_OK : TKV_ERR_STATE);
        if (n <= 4) {
            tkv_destroy(kv);
            continue;
        }
        CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
        CHECK_EQ(info.tokens[TKV_TIER_HOT], 4);
        check_table(kv, 0, "flush");
        check_cache_at(kv, "flush");
        measure_losses(kv, USUAL, 0, 0, loss);
        CHECK_LE(loss[TKV_K], 0.4);
        CHECK_LE(loss[TKV_V], 0.4);
        tkv_destroy(kv);
    }
}

/* The tokens that were counted may be gone when a table is due. No table may be made without tokens. */
TEST(sequences_that_ended_before_the_table) {
    int how;
    for (how = 0; how < 4; how++) {
        tkv_config cfg = config(1, 2);
        tkv_cache *kv = create_cache(&cfg);
        double loss[2];
        int what = how % 2 ? BIASED : LARGE;
        if (how % 2) cfg.tiers.hot.k = TKV_F32;
        if (how < 2) {
            CHECK_EQ(append_contents(kv, what, 0, 0, FIRST_TABLE), TKV_OK);
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        } else {
            CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
            CHECK_EQ(append_contents(kv, what, 0, 0, FIRST_TABLE), TKV_OK);
            CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
        }
        check_cache_at(kv, "nothing left");
        while (tkv_get_length(kv, 1, 0) < 1200) CHECK_EQ(append_contents(kv, what, 1, 0, 40), TKV_OK);
        check_table(kv, 0, "nothing left");
        check_cache_at(kv, "nothing left");
        measure_losses(kv, what, 1, 0, loss);
        CHECK_LE(loss[TKV_K], 0.4);
        CHECK_LE(loss[TKV_V], 0.4);
        tkv_destroy(kv);
    }
}

/* >>steps and reservations with blocks that wait */
TEST(no_table_inside_a_step) {
    tkv_config cfg = config(2, 2), kivi_cfg = config_kivi(2, 2);
    tkv_cache *kv = create_cache(&cfg), *kivi = create_cache(&kivi_cfg);
    int layer, i;
    append_layers(kv, 0, 200, 100);
    append_layers(kivi, 0, 200, 100);
    for (i = 0; i < 2; i++) { /* aborted, then committed with the 256th token inside */
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        CHECK_EQ(tkv_seq_begin(kivi, 0), TKV_OK);
        for (layer = 0; layer < 2; layer++) {
            CHECK_EQ(append_tokens(kv, 0, layer, 100), TKV_OK);
            if (i) CHECK_EQ(append_tokens(kv, 0, layer, 150), TKV_OK);
            CHECK_EQ(append_tokens(kv, 0, layer, 1), TKV_OK);
            CHECK_EQ(append_tokens(kivi, 0, layer, i ? 251 : 101), TKV_OK);
            CHECK(is_all_hot(kv, 0, layer));
        }
        CHECK_EQ(n_calibrated_layers(kv), 0);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_ERR_STATE);
        CHECK_EQ(tkv_refresh_calibration(kv), TKV_ERR_STATE);
        CHECK_EQ(tkv_load_calibration(kv, saved, sizeof saved), TKV_ERR_STATE);
        CHECK(tkv_get_last_error(kv)[0] != 0);
        CHECK_EQ(i ? tkv_seq_commit(kv, 0) : tkv_seq_abort(kv, 0), TKV_OK);
        CHECK_EQ(i ? tkv_seq_commit(kivi, 0) : tkv_seq_abort(kivi, 0), TKV_OK);
        CHECK_EQ(n_calibrated_layers(kv), 0);
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), i ? 451 : 200);
        check_cache_at(kv, "step");
    }
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK); /* makes the table and demotes due blocks */
    CHECK_EQ(tkv_seq_begin(kivi, 0), TKV_OK);
    CHECK_EQ(n_calibrated_layers(kv), 2);
    for (layer = 0; layer < 2; layer++) CHECK(has_same_tiers(kv, kivi, 0, layer));
    CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
    check_cache_at(kv, "after the step");
    tkv_destroy(kv);
    tkv_destroy(kivi);
}

/* Tokens reserved while blocks wait can be appended in any chunks, also when the table is made. */
TEST(reservations_include_the_table) {
    static const int chunks[] = {1, 13, 64, 100};
    int n_before, i, n;
    for (n_before = 0; n_before <= 700; n_before += 50)
        for (i = 0; i < COUNT(chunks); i++)
            for (n = 40; n <= 512; n += n < 120 ? 88 : 192) {
                tkv_config cfg = config(1, 2);
                counting_allocator p;
                tkv_cache *kv;
                tkv_memory_info m;
                int n_left;
                if (tkv_test_quick() && (n_before / 50 + i + n) % 3) continue;
                if (n <= 128)
                    cfg.limits.max_append =
                        128; /* otherwise memory for a large chunk could serve waiting blocks */
                cfg.host.allocator = counting_allocator_of(&p);
                kv = create_cache(&cfg);
                CHECK_EQ(append_tokens(kv, 1, 0, 77), TKV_OK);
                for (n_left = n_before; n_left > 0; n_left -= 100)
                    CHECK_EQ(append_tokens(kv, 0, 0, n_left < 100 ? n_left : 100), TKV_OK);
                CHECK_EQ(tkv_seq_reserve(kv, 0, n), TKV_OK);
                p.fail_at = 1;
                for (n_left = n; n_left > 0; n_left -= chunks[i]) {
                    tkv_status st = append_tokens(kv, 0, 0, n_left < chunks[i] ? n_left : chunks[i]);
                    CHECK_MSG(st == TKV_OK, "%d tokens, %d reserved, %d left: %s", n_before, n, n_left,
                              tkv_get_last_error(kv));
                }
                p.fail_at = 0;
                CHECK_EQ(tkv_get_length(kv, 0, 0), n_before + n);
                check_cache_at(kv, "reserved");
                CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
                CHECK_EQ(m.total, p.held);
                tkv_destroy(kv);
                CHECK_EQ(p.held, 0);
            }
}

/* Without memory, the second table waits. No call fails because of it. */
TEST(no_memory_for_the_second_table) {
    tkv_config cfg = config(1, 1);
    counting_allocator p;
    tkv_cache *kv;
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    append_layers(kv, 0, SECOND_TABLE, 64);
    CHECK_EQ(tkv_seq_reserve(kv, 0, 1), TKV_OK);
    p.fail_at = 1;
    CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], 0);
    check_cache_at(kv, "no memory");
    p.fail_at = 0;
    CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], 1);
    check_cache_at(kv, "memory again");
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* Under a budget, a table without memory is tried again 64 tokens later, not at each append. */
TEST(a_table_waits_under_a_budget) {
    tkv_config cfg = config(1, 1);
    counting_allocator p;
    tkv_cache *kv;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.budget.bytes = 16 << 20;
    kv = create_cache(&cfg);
    append_layers(kv, 0, SECOND_TABLE, 64);
    CHECK_EQ(tkv_seq_reserve(kv, 0, 1), TKV_OK);
    p.fail_at = 1;
    CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
    p.fail_at = 0;
    CHECK_EQ(kv->tables.current_version[0], 0);
    CHECK_EQ(kv->stats.next_table[0].due, SECOND_TABLE + TKV_BLOCK_TOKENS);
    CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], 0);
    append_layers(kv, 0, TKV_BLOCK_TOKENS, 1);
    CHECK_EQ(kv->tables.current_version[0], 1);
    check_cache_at(kv, "memory again");
    tkv_destroy(kv);
}

/* With exactly the tokens of the first table, an append beyond the layer's turn makes all heads, a short one none. */
TEST(an_append_beyond_the_turn_makes_all_heads) {
    tkv_config cfg = config(4, 1);
    tkv_cache *kv;
    int n;
    cfg.budget.bytes = 64 << 20;
    kv = create_cache(&cfg);
    append_layers(kv, 0, 2 * TKV_BLOCK_TOKENS, TKV_BLOCK_TOKENS);
    REQUIRE(kv->stats.tokens_seen != NULL);
    kv->stats.tokens_seen[3] = FIRST_TABLE;
    CHECK_EQ(kv->stats.next_table[3].due, 0);
    for (n = 1; n < 8; n++) CHECK_EQ(tkvi_n_heads_due(kv, 3, n) == KV_HEADS, n > 3);
    kv->stats.tokens_seen[3] = FIRST_TABLE - 1;
    CHECK(tkvi_n_heads_due(kv, 3, 512) < KV_HEADS);
    tkv_destroy(kv);
}

static tkv_status call_that_learns(tkv_cache *kv, int kind) {
    return kind == 0   ? append_tokens(kv, 0, 0, 512)
           : kind == 1 ? tkv_seq_flush(kv, 0, TKV_FLUSH_FULL)
                       : tkv_seq_begin(kv, 0);
}

/* Refuses each allocation of a call in turn. A call that fails may have made a table. Made again, the call ends with the
 * table of a call that did not fail. */
TEST(a_failure_makes_the_same_table) {
    int kind, n, n_granted, n_failed = 0;
    size_t size;
    for (kind = 0; kind < 3; kind++) /* append, flush, begin */
        for (n = 0; n < 2; n++) {    /* before the first and the second table */
            uint64_t want = 0, got;
            for (n_granted = -1; n_granted < 8; n_granted++) { /* -1: all allocations */
                tkv_config cfg = config(2, 1);
                counting_allocator p;
                tkv_cache *kv;
                tkv_status st;
                cfg.host.allocator = counting_allocator_of(&p);
                kv = create_cache(&cfg);
                append_layers(kv, 0, n ? SECOND_TABLE : FIRST_TABLE, 512);
                p.fail_at = n_granted + 1; /* grants the next n_granted allocations */
                st = call_that_learns(kv, kind);
                p.fail_at = 0;
                check_cache_at(kv, "failed");
                if (st) {
                    CHECK_EQ(st, TKV_ERR_NOMEM);
                    CHECK_LE(kv->tables.current_version[0], n);
                    n_failed++;
                    CHECK_EQ(call_that_learns(kv, kind), TKV_OK);
                }
                if (n == 0) CHECK_EQ(kv->tables.current_version[0], 0);
                if (n == 0 ||
                    n_granted != 0) { /* a second table without memory comes later, from other blocks */
                    CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &size), TKV_OK);
                    got = hash_of(HASH_START, saved, size);
                    if (n_granted < 0) want = got;
                    CHECK_MSG(got == want, "call %d, table %d, %d allocations granted", kind, n, n_granted);
                }
                tkv_destroy(kv);
                CHECK_EQ(p.held, 0);
            }
        }
    CHECK(n_failed > 5);
}

/* A cache in place has memory for two tables. While blocks use both, no third one can be loaded. */
TEST(tables_in_place) {
    tkv_config cfg = config(1, 1);
    tkv_cache *kv = NULL;
    size_t need, bytes;
    void *mem;
    cfg.limits.max_tokens = TKVI_LAST_TABLE_TOKENS + 700;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &need, NULL), TKV_OK);
    mem = malloc(need);
    if (!mem) exit(2);
    REQUIRE(tkv_create_in_place(&cfg, mem, need, &kv, NULL, 0) == TKV_OK);
    CHECK_EQ(tkvi_learning_bytes(kv), 2 * kv->tables.version_bytes + tkvi_stats_bytes(&kv->tables.end));
    append_layers(kv, 0, TKVI_LAST_TABLE_TOKENS + 690, 10);
    CHECK_EQ(kv->tables.current_version[0], 1);
    CHECK_EQ(kv->stats.tokens_seen[0], -1);
    CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &bytes), TKV_OK);
    CHECK_EQ(tkv_load_calibration(kv, saved, bytes), TKV_ERR_CAPACITY);
    check_cache_at(kv, "in place");
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(tkv_load_calibration(kv, saved, bytes), TKV_OK);
    tkv_destroy(kv);
    free(mem);
}

/* The table is due, but there is no memory. The append fails, and tkv_read returns the same values. */
TEST(no_memory_for_the_recoding) {
    tkv_config cfg = config(1, 1);
    counting_allocator p;
    tkv_cache *kv;
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    CHECK_EQ(append_tokens(kv, 0, 0, FIRST_TABLE), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, FIRST_TABLE, k_want, v_want), TKV_OK);
    p.fail_at = 1;
    CHECK_EQ(append_tokens(kv, 0, 0, 512), TKV_ERR_NOMEM);
    CHECK(is_all_hot(kv, 0, 0));
    CHECK_EQ(tkv_read(kv, 0, 0, 0, FIRST_TABLE, k_out, v_out), TKV_OK);
    CHECK_MEM(k_out, k_want, FIRST_TABLE * K_ROW * sizeof(float));
    CHECK_MEM(v_out, v_want, FIRST_TABLE * V_ROW * sizeof(float));
    check_cache_at(kv, "no memory");
    p.fail_at = 0;
    CHECK_EQ(append_tokens(kv, 0, 0, 512), TKV_OK);
    CHECK_EQ(n_calibrated_layers(kv), 1);
    check_cache_at(kv, "memory again");
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* >>how heads share bits */
/* Queries of KV head far_head match the key `back` tokens before. Those of the other head match their own key. */
static void attend_far_and_near(tkv_cache *kv, int n, int far_head, int back) {
    static float q[Q_ROW], out[OUT_ROW];
    int t, h, c;
    for (t = 0; t < n; t++) {
        fill_rows(USUAL, 0, 0, t, 1, KV_HEADS, DK, 1, k_in); /* equal variances: a key matches only itself */
        fill_rows(USUAL, 1, 0, t, 1, KV_HEADS, DV, 1, v_in);
        CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 1), TKV_OK);
        if (t < 200) continue;
        for (h = 0; h < HEADS; h++) {
            int kv_head = h / (HEADS / KV_HEADS), is_far = kv_head == far_head;
            CHECK_EQ(tkv_read(kv, 0, 0, is_far ? t - back : t, 1, k_out, NULL), TKV_OK);
            for (c = 0; c < DK; c++) q[h * DK + c] = 3.0f * k_out[kv_head * DK + c];
        }
        CHECK_EQ(tkv_attend(kv, 0, 0, q, 1, out), TKV_OK);
    }
}

/* Norms of values come from the scales of R formats, without decoding. */
TEST(norms_from_scales) {
    static const tkv_format formats[] = {TKV_R40, TKV_R30, TKV_R20, TKV_R15, TKV_R10};
    static const double part[] = {0.99, 0.96, 0.88, 0.80, 0.64}; /* of a decoded square that is not error */
    int f, head, i, t, c;
    for (f = 0; f < COUNT(formats); f++) {
        tkv_config cfg = config(1, 1);
        tkv_cache *kv;
        cfg.tiers.warm_tokens = TKV_OFF;
        cfg.tiers.archive.v = formats[f];
        kv = create_cache(&cfg);
        append_layers(kv, 0, 700, 50);
        CHECK_EQ(tkv_read(kv, 0, 0, 0, 500, k_out, v_out), TKV_OK);
        for (i = 1; i < 6; i++)
            for (head = 0; head < KV_HEADS; head++) {
                const tkvi_block *b = tkvi_block_of(kv, tkvi_ids(kv, 0, 0)[i]);
                const tkvi_record *r = &kv->tables.layout[b->layout].record[head];
                float squares[TKV_BLOCK_TOKENS];
                CHECK_EQ(b->tier, TKV_TIER_ARCHIVE);
                tkvi_r_squares(&r->v, kv->kernels->simd_ops, tkvi_block_bytes(&kv->pool, b) + r->at + r->v_at,
                               squares);
                for (t = 0; t < TKV_BLOCK_TOKENS; t++) {
                    const float *v = v_out + (b->first_position + t) * V_ROW + head * DV;
                    double want = 0;
                    for (c = 0; c < DV; c++) want += (double)v[c] * (double)v[c];
                    CHECK_MSG(fabs((double)squares[t] - part[f] * want) <= 0.45 * want, "%s: %g, not %g",
                              tkvi_format_name(formats[f]), (double)squares[t], part[f] * want);
                }
            }
        tkv_destroy(kv);
    }
}

TEST(heads_with_far_attention_get_more_bits) {
    NEEDS_ATOMICS;
    int far_head;
    for (far_head = 0; far_head < 2; far_head++) { /* 60 tokens back is not far */
        tkv_config cfg = config(1, 1);
        tkv_cache *kv = create_cache(&cfg);
        attend_far_and_near(kv, 400, far_head, 60);
        /* p^2 |v|^2 of far keys that match no query */
        CHECK_LE((double)tkvi_wide_sum_value(tkvi_far_attention_of(kv, 0, far_head)), 20);
        tkv_destroy(kv);
    }
    for (far_head = 0; far_head < 2; far_head++) {
        tkv_config cfg = config(1, 1);
        tkv_cache *kv = create_cache(&cfg);
        const tkvi_record *r;
        attend_far_and_near(kv, FIRST_TABLE + 1, far_head, 200);
        check_table(kv, 0, "far and near");
        r = layout_of(kv, 0, TKV_TIER_ARCHIVE)->record;
        CHECK_MSG(sum_tile_bits(&r[far_head].k.tiles) > sum_tile_bits(&r[1 - far_head].k.tiles),
                  "K: far %d, near %d", sum_tile_bits(&r[far_head].k.tiles),
                  sum_tile_bits(&r[1 - far_head].k.tiles));
        CHECK_MSG(r[far_head].v.half_bits > r[1 - far_head].v.half_bits, "V: far %d, near %d",
                  r[far_head].v.half_bits, r[1 - far_head].v.half_bits);
        CHECK_EQ(r[0].v.half_bits + r[1].v.half_bits, 8);
        tkv_destroy(kv);
    }
}

/* Channels are ordered by the size of q times that of k. Some channels of q are small. */
TEST(channels_are_in_order) {
    NEEDS_ATOMICS;
    tkv_config cfg = config(1, 1);
    tkv_cache *kv = create_cache(&cfg);
    static float q[20 * Q_ROW], out[20 * OUT_ROW];
    const tkvi_head *head;
    int n, c, i;
    for (n = 0; n <= FIRST_TABLE; n += 20) {
        CHECK_EQ(append_tokens(kv, 0, 0, 20), TKV_OK);
        fill_rows(USUAL, 7, 0, n, 20, HEADS, DK, 1, q);
        for (i = 0; i < 20 * HEADS; i++)
            for (c = 0; c < DK; c++)
                if (c % 4 == 1) q[i * DK + c] *= 1e-3f;
        CHECK_EQ(tkv_attend(kv, 0, 0, q, 20, out), TKV_OK);
    }
    CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
    check_table(kv, 0, "order");
    for (i = 0; i < KV_HEADS; i++) {
        double last_size = 1e30;
        head = &tkvi_heads_of(&kv->tables, 0, kv->tables.current_version[0])[i];
        for (c = 0; c < DK; c++) {
            int channel = head->order[c];
            double size = ldexp(1.0, (channel * 7 + i * 3) % 5 - 2) * (channel % 4 == 1 ? 1e-3 : 1.0);
            CHECK_LE(size, 1.5 * last_size);
            last_size = size;
        }
    }
    tkv_destroy(kv);
}

/* A head with larger keys and the same queries has larger errors, so it gets more bits. */
TEST(heads_with_large_keys_get_more_bits) {
    int log2_size, head;
    for (log2_size = -3; log2_size <= 3; log2_size++) {
        tkv_config cfg = config(1, 1);
        tkv_cache *kv = create_cache(&cfg);
        int n, t, c, bits[KV_HEADS];
        for (n = 0; n <= FIRST_TABLE; n += 64) {
            fill_rows(USUAL, 3, 0, n, 64, KV_HEADS, DK, 1, k_in); /* equal variances */
            fill_rows(USUAL, 3, 1, n, 64, KV_HEADS, DV, 1, v_in);
            for (t = 0; t < 64; t++)
                for (c = 0; c < DK; c++) k_in[t * K_ROW + DK + c] *= (float)ldexp(1.0, log2_size);
            CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 64), TKV_OK);
        }
        check_table(kv, 0, "large keys");
        for (head = 0; head < KV_HEADS; head++)
            bits[head] = sum_tile_bits(&layout_of(kv, 0, TKV_TIER_ARCHIVE)->record[head].k.tiles);
        if (log2_size < 0) CHECK_MSG(bits[0] > bits[1], "2^%d: %d and %d", log2_size, bits[0], bits[1]);
        if (log2_size > 0) CHECK_MSG(bits[0] < bits[1], "2^%d: %d and %d", log2_size, bits[0], bits[1]);
        if (log2_size == 0) CHECK_LE(abs(bits[0] - bits[1]), 4);
        tkv_destroy(kv);
    }
}

/* >>calibration: save and load */
/* Makes a cache that has learned from 600 tokens, and saves its calibration to saved. */
static tkv_cache *make_learned_cache(const tkv_config *cfg, size_t *bytes) {
    tkv_cache *kv = create_cache(cfg);
    int layer, n;
    for (n = 0; n < 400; n += 20)
        for (layer = 0; layer < cfg->model.n_layers; layer++)
            if (kv->tables.plan[layer].stored_layer == layer) {
                CHECK_EQ(append_tokens(kv, 0, layer, 20), TKV_OK);
                attend_newest(kv, 0, layer, 20, NULL);
            }
    CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, bytes), TKV_OK);
    return kv;
}

/* Bytes of a side that n tokens take. Free slots of exact blocks are not set. */
static size_t used_bytes(const tkvi_side *s, int n) {
    return tkvi_is_exact(s->format) ? s->code_bytes / (size_t)s->tokens * (size_t)n : s->bytes;
}

/* Returns 1 if all blocks of a sequence and layer have the same bytes. */
static int has_same_blocks(const tkv_cache *a, const tkv_cache *b, int seq, int layer) {
    const tkvi_list *x = tkvi_list_of(a, seq, layer), *y = tkvi_list_of(b, seq, layer);
    int i, h, same = x->n == y->n;
    for (i = 0; i < x->n && same; i++) {
        const int n = tkvi_block_tokens(a, x, tkvi_ids(a, seq, layer), i);
        const tkvi_block *p = tkvi_block_of(a, tkvi_ids(a, seq, layer)[i]),
                         *q = tkvi_block_of(b, tkvi_ids(b, seq, layer)[i]);
        const tkvi_layout *c = &a->tables.layout[p->layout];
        const uint8_t *p_bytes = tkvi_block_bytes(&a->pool, p), *q_bytes = tkvi_block_bytes(&b->pool, q);
        same = c->key == b->tables.layout[q->layout].key && p->first_position == q->first_position;
        for (h = 0; h < a->tables.cfg.model.n_kv_heads && same; h++) {
            const tkvi_record *r = &c->record[h];
            same = memcmp(p_bytes + r->at, q_bytes + r->at, used_bytes(&r->k, n)) == 0 &&
                   memcmp(p_bytes + r->at + r->v_at, q_bytes + r->at + r->v_at, used_bytes(&r->v, n)) == 0;
        }
    }
    return same;
}

TEST(saved_and_loaded) {
    tkv_config cfg = config(3, 2);
    tkv_layer_config layers[3];
    size_t bytes = 0, bytes_again = 0, need = 0;
    tkv_cache *a, *b;
    static float out[20 * OUT_ROW], b_out[20 * OUT_ROW];
    int n, layer;
    memset(layers, 0, sizeof layers);
    layers[1].warm = layers[1].archive = pair_of(TKV_KIVI4, TKV_KIVI2); /* layer 1 has nothing to learn */
    cfg.layers = layers;
    a = make_learned_cache(&cfg, &bytes);
    CHECK_EQ(n_calibrated_layers(a), 2);
    CHECK_EQ(tkv_save_calibration(a, NULL, 0, &need), TKV_OK);
    CHECK_EQ(need, bytes);
    CHECK_EQ(bytes, 24 + 3 * 4 + 2 * KV_HEADS * (6 + 4 * DK) + 8); /* as defined in learn/calibration.h */
    memset(saved_again, 0x5a, sizeof saved_again);
    CHECK_EQ(tkv_save_calibration(a, saved_again, bytes - 1, &bytes_again), TKV_ERR_CAPACITY);
    CHECK_EQ(bytes_again, bytes);
    for (n = 0; n < SAVED; n++)
        if (saved_again[n] != 0x5a) break;
    CHECK_EQ(n, SAVED);
    CHECK_EQ(tkv_save_calibration(a, NULL, bytes, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_save_calibration(NULL, saved_again, bytes, &bytes_again), TKV_ERR_ARG);
    CHECK_EQ(tkv_save_calibration(a, saved_again, bytes, &bytes_again), TKV_OK);
    CHECK_MEM(saved_again, saved, bytes);
    b = create_cache(&cfg);
    CHECK_EQ(tkv_load_calibration(b, NULL, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_load_calibration(NULL, saved, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_load_calibration(b, saved, bytes), TKV_OK);
    CHECK_EQ(n_calibrated_layers(b), 2);
    memset(saved_again, 0, sizeof saved_again);
    CHECK_EQ(tkv_save_calibration(b, saved_again, sizeof saved_again, &bytes_again), TKV_OK);
    CHECK_EQ(bytes_again, bytes);
    CHECK_MEM(saved_again, saved, bytes);
    CHECK_EQ(tkv_freeze_calibration(a), TKV_OK);
    for (n = 0; n < 500; n += 20) { /* b encodes from the first block on, to the same bytes */
        append_layers(a, 1, 20, 20);
        append_layers(b, 1, 20, 20);
        for (layer = 0; layer < 3; layer++) {
            attend_newest(a, 1, layer, 20, out);
            attend_newest(b, 1, layer, 20, b_out);
            CHECK_MEM(out, b_out, sizeof out);
        }
    }
    for (layer = 0; layer < 3; layer++) {
        tkv_layer_info info;
        CHECK(has_same_blocks(a, b, 1, layer));
        CHECK_EQ(tkv_get_layer(b, 1, layer, &info), TKV_OK);
        CHECK_EQ(info.tokens[TKV_TIER_ARCHIVE],
                 layer == 0 ? 256 : 192); /* layers demote at different tokens */
        CHECK_EQ(info.tokens[TKV_TIER_WARM], layer == 1 ? 192 : 128);
        CHECK(!b->stats.q_sq_sum); /* a layer with a loaded table collects nothing */
    }
    check_cache_at(a, "saved");
    check_cache_at(b, "loaded");
    tkv_destroy(a);
    tkv_destroy(b);
}

TEST(loaded_into_another_plan) {
    static const tkv_format plans[][2] = {
        {TKV_A15, TKV_R10}, {TKV_A20, TKV_R15}, {TKV_A275, TKV_R30}, {TKV_A40, TKV_KIVI2}};
    tkv_config cfg = config(2, 1);
    size_t bytes = 0, again = 0;
    tkv_cache *kv = make_learned_cache(&cfg, &bytes);
    double loss[2];
    int i;
    tkv_destroy(kv);
    for (i = 0; i < COUNT(plans); i++) {
        cfg = config(2, 2);
        cfg.tiers.archive = pair_of(plans[i][0], plans[i][1]);
        cfg.format.allocation_unit = i % 2 ? 16 : 4;
        cfg.tiers.sink_tokens = TKV_OFF;
        kv = create_cache(&cfg);
        CHECK_EQ(tkv_load_calibration(kv, saved, bytes), TKV_OK);
        CHECK_EQ(tkv_save_calibration(kv, saved_again, sizeof saved_again, &again), TKV_OK);
        CHECK_EQ(again, bytes);
        CHECK_MEM(saved_again, saved, bytes);
        append_layers(kv, 0, 500, 50);
        check_table(kv, 0, "another plan");
        check_table(kv, 1, "another plan");
        check_cache_at(kv, "another plan");
        measure_losses(kv, USUAL, 0, 1, loss);
        CHECK_LE(loss[TKV_K], 0.6);
        CHECK_LE(loss[TKV_V], 0.6);
        tkv_destroy(kv);
    }
    cfg = config_kivi(2, 1); /* these formats need no calibration */
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_load_calibration(kv, saved, bytes), TKV_OK);
    CHECK_EQ(n_calibrated_layers(kv), 0);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_save_calibration(kv, saved_again, sizeof saved_again, &again), TKV_OK);
    CHECK_EQ(again, 24 + 2 * 4 + 8);
    CHECK_EQ(tkv_load_calibration(kv, saved_again, again), TKV_OK);
    tkv_destroy(kv);
}

/* Tables made from keys alone have the same bytes on every instruction set. */
TEST(tables_are_the_same_on_every_isa) {
    size_t bytes = 0, first = 0;
    int isa, what;
    for (what = 0; what < CONTENTS; what++) {
        first = 0;
        for (isa = TKV_ISA_SCALAR; isa < TKV_ISA_COUNT; isa++) {
            tkv_config cfg = config(1, 1);
            tkv_cache *kv;
            cfg.host.isa = (tkv_isa)isa;
            if (!is_isa_available(cfg.host.isa)) continue;
            kv = create_cache(&cfg);
            while (tkv_get_length(kv, 0, 0) < 1000) CHECK_EQ(append_contents(kv, what, 0, 0, 50), TKV_OK);
            CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK); /* once more, from warm blocks */
            while (tkv_get_length(kv, 0, 0) < 1600) CHECK_EQ(append_contents(kv, what, 0, 0, 50), TKV_OK);
            CHECK_EQ(tkv_save_calibration(kv, first ? saved_again : saved, SAVED, &bytes), TKV_OK);
            if (first) {
                CHECK_EQ(bytes, first);
                CHECK_MEM(saved_again, saved, bytes);
            }
            first = bytes;
            tkv_destroy(kv);
        }
    }
}

TEST(a_frozen_table_stays) {
    NEEDS_ATOMICS;
    tkv_config cfg = config(4, 1);
    tkv_layer_config layers[4];
    tkv_cache *kv;
    int n;
    memset(layers, 0, sizeof layers);
    layers[1].share_kv = 1;
    layers[2].no_cache = 1;
    cfg.layers = layers;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_freeze_calibration(NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_ERR_STATE);
    CHECK_EQ(append_tokens(kv, 0, 0, 100), TKV_OK);
    attend_newest(kv, 0, 1, 10, NULL); /* layer 1 reads the blocks of layer 0, so its queries count */
    CHECK(tkvi_q_sq_sum_of(kv, 0, 0)[0] != 0);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_ERR_STATE); /* layer 3 has seen nothing */
    CHECK(tkv_get_last_error(kv)[0] != 0);
    CHECK_EQ(n_calibrated_layers(kv), 0);
    CHECK_EQ(append_tokens(kv, 0, 3, 100), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(n_calibrated_layers(kv), 2);
    check_table(kv, 0, "frozen");
    check_table(kv, 3, "frozen");
    for (n = 0; n < 700; n += 50) {
        CHECK_EQ(append_tokens(kv, 0, 0, 50), TKV_OK);
        attend_newest(kv, 0, 1, 10, NULL);
        CHECK_EQ(kv->tables.current_version[0], 0);
        CHECK(!kv->stats.q_sq_sum);
    }
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK); /* the second time does nothing */
    CHECK_EQ(kv->tables.current_version[0], 0);
    CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK); /* cancels the refresh */
    CHECK_EQ(append_tokens(kv, 0, 0, 512), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 0, 512), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], 0);
    CHECK_EQ(tkv_refresh_calibration(NULL), TKV_ERR_ARG);
    CHECK_EQ(n_calibrated_layers(NULL), 0);
    tkv_destroy(kv);
    cfg = config(1, 1); /* tokens of a reset sequence do not count */
    kv = create_cache(&cfg);
    CHECK_EQ(append_tokens(kv, 0, 0, 300), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_ERR_STATE);
    CHECK_EQ(append_tokens(kv, 0, 0, 300), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    tkv_destroy(kv);
}

/* A flush makes the first table at once. It does not make the table of a refresh, which would be of few tokens. */
TEST(a_flush_does_not_hurry_a_refresh) {
    tkv_config cfg = config(1, 1);
    size_t bytes = 0;
    tkv_cache *kv = make_learned_cache(&cfg, &bytes);
    int n;
    CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 0, 7), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], 0);
    for (n = 7; n < FIRST_TABLE; n += 157) {
        CHECK_EQ(kv->tables.current_version[0], 0);
        CHECK_EQ(append_tokens(kv, 0, 0, 157), TKV_OK);
    }
    CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], 1);
    check_cache_at(kv, "not hurried");
    tkv_destroy(kv);
}

/* A refresh lets the next append make the table that is pending, if it has 256 tokens to learn from. The next one comes
 * 256 tokens later, with or without a pending one. */
TEST(a_refresh_makes_the_pending_table_first) {
    static const int pending[] = {350, 255};
    int i, n;
    for (i = 0; i < COUNT(pending); i++) {
        tkv_config cfg = config(1, 1);
        tkv_cache *kv = create_cache(&cfg);
        append_layers(kv, 0, 2 * FIRST_TABLE, 64);
        append_layers(kv, 0, 1, 1);
        CHECK_EQ(kv->tables.current_version[0], 1);
        append_layers(kv, 0, pending[i] - 1, 50);
        CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
        CHECK_EQ(kv->tables.current_version[0], 1);
        append_layers(kv, 0, 1, 1);
        CHECK_EQ(kv->tables.current_version[0], i ? 1 : 2);
        for (n = 1; n < FIRST_TABLE; n++) CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
        CHECK_EQ(kv->tables.current_version[0], i ? 1 : 2);
        CHECK_EQ(append_tokens(kv, 0, 0, 2), TKV_OK);
        CHECK_EQ(kv->tables.current_version[0], i ? 2 : 3);
        check_cache_at(kv, "refreshed");
        tkv_destroy(kv);
    }
}

/* Checks that a refused call has not changed the table in use. */
static void check_table_unchanged(tkv_cache *kv, int version) {
    size_t bytes = 0;
    CHECK_EQ(kv->tables.current_version[0], version);
    CHECK_EQ(tkv_save_calibration(kv, saved_again, sizeof saved_again, &bytes), TKV_OK);
    CHECK_MEM(saved_again, saved, bytes);
    check_cache_at(kv, "nothing changed");
}

TEST(a_refresh_learns_a_new_table) {
    tkv_config cfg = config(1, 3);
    tkv_cache *kv;
    size_t bytes = 0;
    int n = 0, version;
    uint8_t *first;
    cfg.tiers.hot.k = TKV_F32;
    cfg.tiers.warm_tokens = 1024; /* blocks keep their table: none is coded again for the archive */
    kv = make_learned_cache(&cfg, &bytes);
    first = (uint8_t *)malloc(bytes);
    if (!first) exit(2);
    memcpy(first, saved, bytes);
    CHECK_EQ(kv->tables.current_version[0], 0);
    CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    CHECK_EQ(n_calibrated_layers(kv), 1); /* the old table stays in use */
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 192, k_want, v_want), TKV_OK);
    while (tkv_get_length(kv, 1, 0) < FIRST_TABLE) {
        CHECK_EQ(append_contents(kv, BIASED, 1, 0, 32), TKV_OK);
        CHECK_EQ(kv->tables.current_version[0], 0);
    }
    CHECK_EQ(append_contents(kv, BIASED, 1, 0, 32), TKV_OK);
    CHECK_EQ(kv->tables.current_version[0], 1);
    check_table(kv, 0, "anew");
    CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &bytes), TKV_OK);
    CHECK(memcmp(first, saved, bytes) != 0);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 192, k_out, v_out), TKV_OK); /* blocks of the old table keep it */
    CHECK_MEM(k_out, k_want, 192 * K_ROW * sizeof(float));
    CHECK_MEM(v_out, v_want, 192 * V_ROW * sizeof(float));
    while (tkv_get_length(kv, 2, 0) < 220) CHECK_EQ(append_contents(kv, BIASED, 2, 0, 20), TKV_OK);
    {
        double loss[2];
        measure_losses(kv, BIASED, 2, 0, loss);
        CHECK_LE(loss[TKV_K], 0.4);
        CHECK_LE(loss[TKV_V], 0.5);
    }
    attend_newest(kv, 0, 0, 20, NULL);
    check_cache_at(kv, "two versions");
    /* Blocks use every version: a loaded table is refused, a learned one takes the version of fewest blocks. */
    for (version = 2; version < TKVI_VERSIONS; version++) {
        CHECK_EQ(tkv_load_calibration(kv, version % 2 ? saved : first, bytes), TKV_OK);
        for (n = 0; n < 128; n += 64) CHECK_EQ(append_contents(kv, BIASED, 2, 0, 64), TKV_OK);
        CHECK_EQ(kv->tables.current_version[0], version);
    }
    CHECK_EQ(tkv_load_calibration(kv, first, bytes), TKV_ERR_CAPACITY);
    CHECK(tkv_get_last_error(kv)[0] != 0);
    check_table_unchanged(kv, TKVI_VERSIONS - 1);
    CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    for (n = 0; n < FIRST_TABLE; n += 64) CHECK_EQ(append_contents(kv, BIASED, 2, 0, 64), TKV_OK);
    check_table_unchanged(kv, TKVI_VERSIONS - 1);
    CHECK_EQ(append_contents(kv, BIASED, 2, 0, 1), TKV_OK);
    CHECK(kv->tables.current_version[0] != TKVI_VERSIONS - 1);
    check_cache_at(kv, "the next one");
    for (version = 0; version < 2;
         version++) { /* without blocks, a table can be loaded any number of times */
        for (n = 0; n < 3; n++) CHECK_EQ(tkv_seq_reset(kv, n), TKV_OK);
        CHECK_EQ(tkv_load_calibration(kv, first, bytes), TKV_OK);
        CHECK_EQ(tkv_load_calibration(kv, first, bytes), TKV_OK);
        CHECK_EQ(tkv_load_calibration(kv, first, bytes), TKV_OK);
        CHECK_EQ(append_tokens(kv, 0, 0, 300), TKV_OK);
        CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
        check_cache_at(kv, "loaded often");
    }
    free(first);
    tkv_destroy(kv);
}

/* >>calibration: wrong bytes */
static void store64(uint8_t *p, uint64_t x) {
    int i;
    for (i = 0; i < 8; i++) p[i] = (uint8_t)(x >> 8 * i & 0xffu);
}

/* Loads from an allocation of n bytes, so that a sanitizer finds reads beyond it. */
static tkv_status load_copy(tkv_cache *kv, const uint8_t *src, size_t n) {
    uint8_t *copy = (uint8_t *)malloc(n ? n : 1);
    tkv_status st;
    if (!copy) exit(2);
    memcpy(copy, src, n);
    st = tkv_load_calibration(kv, copy, n);
    free(copy);
    return st;
}

TEST(damaged_calibrations_are_refused) {
    tkv_config cfg = config(2, 1);
    size_t bytes = 0, i;
    tkv_cache *from = make_learned_cache(&cfg, &bytes), *kv;
    static const uint8_t changes[] = {0x01, 0x80, 0xff};
    int c, layer;
    uint8_t *copy = (uint8_t *)malloc(bytes + 1);
    if (!copy) exit(2);
    tkv_destroy(from);
    kv = create_cache(&cfg);
    for (i = 0; i < bytes; i++)
        for (c = 0; c < COUNT(changes); c++) {
            memcpy(copy, saved, bytes);
            copy[i] = (uint8_t)(copy[i] ^ changes[c]);
            CHECK_EQ(tkv_load_calibration(kv, copy, bytes), TKV_ERR_DATA);
        }
    CHECK(tkv_get_last_error(kv)[0] != 0);
    for (i = 0; i < bytes; i++) CHECK_EQ(load_copy(kv, saved, i), TKV_ERR_DATA);
    memcpy(copy, saved, bytes);
    copy[bytes] = 0;
    CHECK_EQ(tkv_load_calibration(kv, copy, bytes + 1), TKV_ERR_DATA);
    for (i = 0; i < bytes; i += 1 + i / 40) { /* truncated, with a correct checksum */
        memcpy(copy, saved, bytes);
        if (i < 8) continue;
        store64(copy + i - 8, hash_of(HASH_START, copy, i - 8));
        CHECK_EQ(load_copy(kv, copy, i), TKV_ERR_DATA);
    }
    for (layer = 0; layer < 2; layer++) CHECK(!has_table(kv, layer));
    check_cache_at(kv, "damaged");
    CHECK_EQ(tkv_load_calibration(kv, saved, bytes), TKV_OK); /* the cache still accepts the correct bytes */
    free(copy);
    tkv_destroy(kv);
}

TEST(other_models_are_refused) {
    int i;
    tkv_config cfg = config(2, 1);
    size_t bytes = 0;
    tkv_cache *kv = make_learned_cache(&cfg, &bytes);
    tkv_destroy(kv);
    for (i = 0; i < 5; i++) {
        cfg = config(i == 0 ? 3 : 2, 1);
        if (i == 1) cfg.model.n_kv_heads = 4;
        if (i == 2) cfg.model.head_dim = 31;
        if (i == 3) cfg.model.v_head_dim = 64;
        if (i == 4) cfg.model.n_heads = 8; /* n_heads does not matter */
        kv = create_cache(&cfg);
        CHECK_EQ(tkv_load_calibration(kv, saved, bytes), i == 4 ? TKV_OK : TKV_ERR_DATA);
        CHECK_EQ(n_calibrated_layers(kv), i == 4 ? 2 : 0);
        tkv_destroy(kv);
    }
}

/* The checksum is correct, but one field has an impossible value. */
TEST(impossible_calibrations_are_refused) {
    tkv_config cfg = config(2, 1);
    size_t bytes = 0;
    tkv_cache *kv = make_learned_cache(&cfg, &bytes);
    const size_t at = 24 + 4 + 6 + 4 * DK; /* second head of the first layer */
    int i;
    tkv_destroy(kv);
    kv = create_cache(&cfg);
    for (i = 0; i < 20; i++) {
        uint8_t *h = saved_again + at, *order = h + 6, *importance = order + DK, *mean = importance + DK;
        size_t n = bytes;
        memcpy(saved_again, saved, bytes);
        if (i == 0) order[3] = order[5];
        if (i == 1) order[0] = DK;
        if (i == 2) order[DK - 1] = 255;
        if (i == 3) importance[DK - 1] = 0;
        if (i == 4) importance[7] = 255, importance[6] = 254;
        if (i == 5) mean[2 * 9 + 1] = 0x7c, mean[2 * 9] = 0;
        if (i == 6) mean[2 * 9 + 1] = 0xff;
        if (i == 7) h[4] = 97;
        if (i == 8) h[5] = (uint8_t)-97;
        if (i == 9) tkvi_store16(h, 0x7fff);
        if (i == 10) tkvi_store16(h + 2, 0x8000);
        if (i == 11) saved_again[0] = 't';
        if (i == 12) saved_again[4] = 2;     /* version */
        if (i == 13) saved_again[24] = 2;    /* has a table: 0 or 1 */
        if (i == 14) saved_again[24] = 0;    /* then there are too many bytes */
        if (i == 15) n = 31;                 /* less than a head and a checksum */
        if (i == 16) saved_again[11] = 0xff; /* layers */
        if (i == 17) h[4] = (uint8_t)-97;
        if (i == 18) h[5] = 97;
        if (i == 19) saved_again[4] = 3; /* a version that is not known */
        store64(saved_again + n - 8, hash_of(HASH_START, saved_again, n - 8));
        CHECK_MSG(load_copy(kv, saved_again, n) == TKV_ERR_DATA, "case %d", i);
        CHECK_EQ(n_calibrated_layers(kv), 0);
    }
    CHECK_EQ(load_copy(kv, saved, bytes), TKV_OK);
    tkv_destroy(kv);
}

/* Checks that the records of every layout fit their blocks. */
static void check_records_fit(const tkv_cache *kv, const char *what, long number) {
    int c, head;
    for (c = 0; c < kv->tables.n_layouts; c++) {
        const tkvi_layout *layout = &kv->tables.layout[c];
        size_t sum = 0;
        if (!layout->record) continue; /* of a version that was not used yet */
        if (c < kv->tables.n_keys && tkvi_pair_allocates(layout->pair))
            continue; /* its blocks wait for a table */
        for (head = 0; head < kv->tables.cfg.model.n_kv_heads; head++)
            sum += layout->record[head].k.bytes + layout->record[head].v.bytes;
        CHECK_MSG(sum <= layout->bytes.total, "%s %ld: records of %lu bytes in a block of %lu", what, number,
                  (unsigned long)sum, (unsigned long)layout->bytes.total);
    }
}

/* Random bytes with a correct checksum are refused or used without harm. */
TEST(forged_calibrations_are_harmless) {
    static const int dims[][3] = {{3, 32, 48}, {1, 17, 5}, {8, 64, 64}};
    int d, round, rounds = tkv_test_quick() ? 300 : 3000, n_used = 0, n_refused = 0;
    for (d = 0; d < COUNT(dims); d++) {
        tkv_config cfg = config(1, 1);
        size_t bytes = 0, i;
        tkv_cache *kv;
        tkv_rng rng = tkv_rng_seed(99);
        cfg.model.n_heads = cfg.model.n_kv_heads = dims[d][0];
        cfg.model.head_dim = dims[d][1];
        cfg.model.v_head_dim = dims[d][2];
        cfg.tiers.archive = pair_of(TKV_A20, TKV_R15);
        kv = create_cache(&cfg);
        fill_rows(USUAL, 0, 0, 0, 400, cfg.model.n_kv_heads, cfg.model.head_dim, 0, k_in);
        fill_rows(USUAL, 0, 0, 0, 400, cfg.model.n_kv_heads, cfg.model.v_head_dim, 1, v_in);
        CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 100), TKV_OK);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
        CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &bytes), TKV_OK);
        for (round = 0; round < rounds; round++) {
            int changes = 1 + tkv_rng_below(&rng, 4), j, head;
            tkv_status st;
            memcpy(saved_again, saved, bytes);
            for (j = 0; j < changes; j++) {
                i = 24 + (size_t)tkv_rng_below(&rng, (int)bytes - 32);
                saved_again[i] = (uint8_t)tkv_rng_below(&rng, 256);
            }
            if (round % 2) /* random weights, and the importance of all channels high or low */
                for (head = 0; head < cfg.model.n_kv_heads; head++) {
                    uint8_t *h = saved_again + 28 + head * (6 + 4 * cfg.model.head_dim);
                    for (j = 0; j < 2; j++) {
                        int w = tkv_rng_below(&rng, 3) == 0 ? 4799 + tkv_rng_below(&rng, 4)
                                                            : tkv_rng_below(&rng, 9700) - 4850;
                        if (tkv_rng_below(&rng, 2)) w = -w;
                        tkvi_store16(h + 2 * j, (uint16_t)(w & 0xffff));
                    }
                    for (j = 0; j < 2; j++) h[4 + j] = (uint8_t)(tkv_rng_below(&rng, 200) - 100);
                    memset(h + 6 + cfg.model.head_dim, round % 4 == 1 ? 255 : 1, (size_t)cfg.model.head_dim);
                }
            store64(saved_again + bytes - 8, hash_of(HASH_START, saved_again, bytes - 8));
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
            st = tkv_load_calibration(kv, saved_again, bytes);
            CHECK(st == TKV_OK || st == TKV_ERR_DATA);
            n_used += st == TKV_OK;
            n_refused += st != TKV_OK;
            if (st) continue;
            check_records_fit(kv, "forged", round);
            if (tkv_test_.n_bad) break; /* the next calls would write beyond the blocks */
            if (round % 8 >= 2) continue;
            CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 400), TKV_OK);
            CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
            CHECK_EQ(tkv_read(kv, 0, 0, 0, 400, k_out, v_out), TKV_OK);
            CHECK(is_all_finite(k_out, 400 * cfg.model.n_kv_heads * cfg.model.head_dim));
            CHECK(is_all_finite(v_out, 400 * cfg.model.n_kv_heads * cfg.model.v_head_dim));
            attend_newest(kv, 0, 0, 1, NULL);
            check_cache_at(kv, "forged");
        }
        tkv_destroy(kv);
    }
    CHECK(n_used > 100 && n_refused > 100);
}

/* >>inputs that must not spoil a table */
/* A query with a NaN or an infinity is accepted, but a table does not learn from it. */
TEST(non_finite_queries_teach_nothing) {
    static const uint32_t n_bad[] = {0x7fc00000u, 0x7f800000u, 0xff800000u, 0x7f7fffffu};
    double loss[2][2];
    size_t n[2];
    int has_bad_queries, i;
    NEEDS_ATOMICS;
    for (has_bad_queries = 0; has_bad_queries < 2; has_bad_queries++) {
        tkv_config cfg = config(1, 1);
        tkv_cache *kv = create_cache(&cfg);
        float q[Q_ROW], out[OUT_ROW];
        for (i = 0; i < 700; i++) {
            CHECK_EQ(append_tokens(kv, 0, 0, 1), TKV_OK);
            attend_newest(kv, 0, 0, 1, NULL);
            if (!has_bad_queries || i % 100 != 99) continue;
            fill_rows(USUAL, 50, 0, i, 1, HEADS, DK, 0, q);
            q[i % Q_ROW] = tkv_test_float(n_bad[i / 100 % 3]);
            CHECK_EQ(tkv_attend(kv, 0, 0, q, 1, out), TKV_OK);
        }
        CHECK(has_table(kv, 0));
        CHECK_EQ(tkv_save_calibration(kv, has_bad_queries ? saved_again : saved, SAVED, &n[has_bad_queries]),
                 TKV_OK);
        measure_losses(kv, USUAL, 0, 0, loss[has_bad_queries]);
        check_cache_at(kv, "queries");
        tkv_destroy(kv);
    }
    CHECK_EQ(n[0], n[1]);
    CHECK_NEAR(loss[0][0], loss[1][0], .05 * loss[0][0]);
    CHECK_NEAR(loss[0][1], loss[1][1], .05 * loss[0][1]);
}

/* Aborted tokens are subtracted from the tokens that a table counts. */
TEST(aborted_tokens_do_not_count) {
    tkv_config cfg = config(1, 8);
    tkv_cache *kv;
    int seq, round;
    cfg.limits.max_append = 4096;
    kv = create_cache(&cfg);
    for (seq = 0; seq < 8; seq++) {
        CHECK_EQ(tkv_seq_begin(kv, seq), TKV_OK);
        CHECK_EQ(append_tokens(kv, seq, 0, 512), TKV_OK);
    }
    for (seq = 0; seq < 8; seq++)
        CHECK_EQ(seq % 2 ? tkv_seq_abort(kv, seq) : tkv_seq_commit(kv, seq), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(n_calibrated_layers(kv), 1);
    CHECK_EQ(append_tokens(kv, 0, 0, 300), TKV_OK);
    check_cache_at(kv, "frozen");
    tkv_destroy(kv);
    kv = create_cache(&cfg);
    for (round = 0; round < 8; round++) {
        CHECK_EQ(append_tokens(kv, 0, 0, 100), TKV_OK);
        CHECK_EQ(tkv_seq_begin(kv, 1), TKV_OK);
        CHECK_EQ(append_tokens(kv, 1, 0, 2000), TKV_OK);
        CHECK_EQ(tkv_seq_abort(kv, 1), TKV_OK);
        check_cache_at(kv, "aborted");
        CHECK_EQ(has_table(kv, 0), round > 2);
    }
    tkv_destroy(kv);
}

/* A table learned from zeros has scales that fit later tokens. */
TEST(tables_from_zeros) {
    tkv_config cfg = config(1, 1);
    tkv_cache *kv = create_cache(&cfg);
    double after[2], fresh[2];
    CHECK_EQ(append_contents(kv, ZEROS, 0, 0, 512), TKV_OK);
    CHECK_EQ(append_contents(kv, ZEROS, 0, 0, 512), TKV_OK);
    CHECK(has_table(kv, 0));
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    append_layers(kv, 0, 900, 1);
    measure_losses(kv, USUAL, 0, 0, after);
    tkv_destroy(kv);
    kv = create_cache(&cfg);
    append_layers(kv, 0, 900, 1);
    measure_losses(kv, USUAL, 0, 0, fresh);
    tkv_destroy(kv);
    CHECK_LE(after[0], 3 * fresh[0]); /* channels have equal shares */
    CHECK_LE(after[1], 1.2 * fresh[1]);
}

/* A table from few tokens is nearly uniform, so no channel has a large error. */
TEST(tables_from_few_tokens) {
    static const int few[] = {1, 4, 8, 12, 40};
    int i, t, c;
    for (i = 0; i < 2 * COUNT(few); i++) {
        tkv_config cfg = config(1, 1);
        tkv_cache *kv;
        double worst = 0;
        if (i % 2) cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32; /* then sums round the values */
        kv = create_cache(&cfg);
        CHECK_EQ(append_tokens(kv, 0, 0, 4 + few[i / 2]), TKV_OK);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
        append_layers(kv, 0, 700, 1);
        CHECK_EQ(tkv_read(kv, 0, 0, 64, 256, k_out, v_out), TKV_OK);
        fill_rows(USUAL, 0, 0, 64, 256, KV_HEADS, DK, 0, k_want);
        for (c = 0; c < K_ROW; c++) {
            double d = 0, s = 0;
            for (t = 0; t < 256; t++) {
                d += pow((double)k_out[t * K_ROW + c] - (double)k_want[t * K_ROW + c], 2);
                s += pow((double)k_want[t * K_ROW + c], 2);
            }
            worst = d / s > worst ? d / s : worst;
        }
        CHECK_MSG(worst < .5, "%d tokens: a channel's error is %.3f of it", few[i / 2], worst);
        tkv_destroy(kv);
    }
}

/* A table from tokens that are almost equal has scales that fit other ones. */
TEST(tables_from_almost_equal_tokens) {
    static const int n[] = {2, 64, 600};
    static float k[600 * K_ROW], v[600 * V_ROW];
    int i, t, c;
    for (i = 0; i < COUNT(n); i++) {
        tkv_config cfg = config(1, 2);
        tkv_cache *kv;
        double d = 0, s = 0;
        cfg.tiers.sink_tokens = TKV_OFF;
        kv = create_cache(&cfg);
        fill_rows(USUAL, 1, 0, 0, n[i], KV_HEADS, DK, 0, k);
        fill_rows(USUAL, 1, 0, 0, n[i], KV_HEADS, DV, 1, v);
        for (t = 1; t < n[i]; t++)
            for (c = 0; c < K_ROW; c++) k[t * K_ROW + c] = k[c] + .001f * k[t * K_ROW + c];
        for (t = 0; t < n[i]; t += 100)
            CHECK_EQ(tkv_append(kv, 1, 0, k + t * K_ROW, v + t * V_ROW, n[i] - t < 100 ? n[i] - t : 100),
                     TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 1, TKV_FLUSH_ALL), TKV_OK);
        CHECK(has_table(kv, 0));
        append_layers(kv, 0, 700, 1);
        CHECK_EQ(tkv_read(kv, 0, 0, 64, 256, k_out, v_out), TKV_OK);
        fill_rows(USUAL, 0, 0, 64, 256, KV_HEADS, DK, 0, k_want);
        for (t = 0; t < 256 * K_ROW; t++) {
            d += pow((double)k_out[t] - (double)k_want[t], 2);
            s += pow((double)k_want[t], 2);
        }
        CHECK_MSG(d < .2 * s, "%d tokens: the error of later keys is %.3f of them", n[i], d / s);
        tkv_destroy(kv);
    }
}

/* A table is learned from the exact blocks of a list, also if a coded block was copied behind them. */
TEST(tables_from_blocks_before_copies) {
    tkv_config cfg = config(1, 2);
    tkv_cache *kv;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = cfg.tiers.warm_tokens = 64;
    cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    kv = create_cache(&cfg);
    append_layers(kv, 0, 190, 10);
    append_layers(kv, 1, 64, 64);
    CHECK_EQ(tkv_seq_copy(kv, 0, 0, 64, 1, 0), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK(!has_table(kv, 0));
    CHECK_EQ(tkv_seq_flush(kv, 1, TKV_FLUSH_ALL), TKV_OK);
    CHECK(has_table(kv, 0));
    check_cache_at(kv, "flushed");
    tkv_destroy(kv);
}

/* A list has a block in its archive that a fork holds exact. A table is learned from it, and once from both. */
TEST(tables_from_blocks_that_a_fork_holds_exact) {
    tkv_config cfg = config(1, 3);
    tkv_cache *kv;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = 1;
    cfg.tiers.warm_tokens = TKV_OFF;
    cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    kv = create_cache(&cfg);
    append_layers(kv, 0, 128, 128);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ((int)tkvi_n_readable_tokens(kv, 0), 128);
    append_layers(kv, 0, 3, 1);
    CHECK_EQ(tkvi_list_of(kv, 0, 0)->archive, 2);
    CHECK_EQ((int)tkvi_n_readable_tokens(kv, 0), 131);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ((int)tkvi_n_readable_tokens(kv, 0), 131); /* coded again at the next append */
    append_layers(kv, 0, 1, 1);
    CHECK_EQ((int)tkvi_n_readable_tokens(kv, 0), 4);
    tkv_destroy(kv);
}

/* A table learns from all sequences that grow, not only from those with low numbers. */
TEST(tables_from_all_sequences) {
    double loss[2][2];
    int order, seq, at;
    for (order = 0; order < 2; order++) { /* large values: 0 in the last 4 sequences, 1 in every second one */
        tkv_config cfg = config(1, 8);
        tkv_cache *kv = create_cache(&cfg);
        for (at = 0; at < 1024; at += 64)
            for (seq = 0; seq < 8; seq++)
                CHECK_EQ(append_contents(kv, (order ? seq % 2 : seq >= 4) ? LARGE : USUAL, seq, 0, 64),
                         TKV_OK);
        measure_losses(kv, LARGE, 7, 0, loss[order]);
        tkv_destroy(kv);
    }
    CHECK_NEAR(loss[0][0], loss[1][0], .2 * loss[1][0]);
    CHECK_NEAR(loss[0][1], loss[1][1], .2 * loss[1][1]);
    CHECK_LE(loss[0][0], .5);
}

/* >>SQuat: factors are learned from queries */
/* The factors of a head. */
static const uint16_t *squat_factors_of(const tkv_cache *kv, int layer, int head) {
    return (const uint16_t *)tkvi_query_state_of(kv, &tkvi_squat_family, layer, head);
}

TEST(squat_learns_from_queries) {
    model_sequence *s = start_model_sequence(4, 2, 24, 24, 60);
    tkv_config cfg = config_of(s, TKV_SQUAT4, TKV_Q8);
    static int64_t sum[2][24 * 25 / 2];
    static uint16_t expected[2][16 * 8];
    float packed[24 * 25 / 2];
    char reason[200];
    tkv_cache *kv = NULL;
    int at, h, i, j, t;
    memset(sum, 0, sizeof sum);
    cfg.model.n_layers = 2;
    REQUIRE(tkv_create(&cfg, &kv) == TKV_OK);
    for (at = 0; at < 700; at++) {
        generate_tokens(s, 1);
        for (i = 0; i < 2; i++) CHECK_EQ(tkv_append(kv, 0, i, s->k, s->v, 1), TKV_OK);
        generate_queries(s, 1);
        CHECK_EQ(tkv_attend(kv, 0, 1, s->q, 1, s->out), TKV_OK); /* layer 0 has no queries */
        for (h = 0; h < 4 && at % 4 == 0 && at < 512; h++) {
            int x[24];
            for (i = 0; i < 24; i++)
                x[i] = (int)(as_float((double)s->q[h * 24 + i] * (double)cfg.model.scale) * 4096.0f);
            if (at == 0) break;
            for (j = 0; j < 24; j++)
                for (i = 0; i <= j; i++) sum[h / 2][tkvi_packed(i, j)] += (int64_t)x[i] * x[j];
        }
        if (at == 0) { /* set the scale, and count the first query */
            cfg.model.scale = (float)(1 / sqrt(24.0));
            for (h = 0; h < 4; h++) {
                int x[24];
                for (i = 0; i < 24; i++)
                    x[i] = (int)(as_float((double)s->q[h * 24 + i] * (double)cfg.model.scale) * 4096.0f);
                for (j = 0; j < 24; j++)
                    for (i = 0; i <= j; i++) sum[h / 2][tkvi_packed(i, j)] += (int64_t)x[i] * x[j];
            }
        }
    }
    CHECK_EQ(kv->stats.queries[1].tokens, -1);
    CHECK_EQ(kv->stats.queries[1].used, 512);
    CHECK_EQ(tkvi_feedback_count(24, 16), 16 * 8);
#if defined(__GNUC__) || defined(__clang__)
    for (h = 0; h < 2; h++) {
        double trace = 0;
        for (i = 0; i < 24; i++) trace += (double)sum[h][tkvi_packed(i, i)];
        CHECK_MEM(sum[h], tkvi_q_products_of(kv, 1, h), sizeof sum[h]);
        for (i = 0; i < 24 * 25 / 2; i++) packed[i] = (float)((double)sum[h][i] * 24 * 5 / trace);
        for (i = 0; i < 24; i++) packed[tkvi_packed(i, i)] += 1.0f;
        tkvi_feedback_from(packed, 24, 16);
        tkvi_feedback_store(packed, 24, 16, expected[h]);
        for (i = 0; i < 16 * 8; i++)
            CHECK_NEAR(tkvi_f16_to_f32(squat_factors_of(kv, 1, h)[i]), tkvi_f16_to_f32(expected[h][i]), 1e-3);
    }
#endif
    for (i = 0, t = 0; i < 16 * 8; i++) t |= squat_factors_of(kv, 0, 1)[i];
    CHECK_EQ(t, 0); /* without factors it is KIVI */
    CHECK_MSG(tkv_check(kv, reason, sizeof reason) == TKV_OK, "%s", reason);
    CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    CHECK_EQ(kv->stats.queries[1].tokens, 0);
    for (i = 0; i < 24 * 25 / 2; i++) CHECK_EQ(tkvi_q_products_of(kv, 1, 1)[i], 0);
    tkv_destroy(kv);
}

/* Checks after which tokens factors are made, for several chunks. */
TEST(squat_makes_factors_in_time) {
    static const struct {
        int chunk, tokens, used[6]; /* used: query_stats.used after each append */
    } cases[] = {{50, 300, {0, 0, 100, 100, 200, 200}},
                 {324, 1944, {0, 324, 512, 512, 512, 512}},
                 {64, 384, {0, 64, 128, 128, 256, 256}}};
    int k, i;
    for (k = 0; k < COUNT(cases); k++) {
        model_sequence *s = start_model_sequence(2, 1, 16, 16, 65);
        tkv_config cfg = config_of(s, TKV_SQUAT2, TKV_Q8);
        tkv_cache *kv = NULL;
        REQUIRE(tkv_create(&cfg, &kv) == TKV_OK);
        for (i = 0; i < 6; i++) {
            generate_tokens(s, cases[k].chunk);
            CHECK_EQ(tkv_append(kv, 0, 0, s->k, s->v, cases[k].chunk), TKV_OK);
            generate_queries(s, 8);
            CHECK_EQ(tkv_attend(kv, 0, 0, s->q, 8, s->out), TKV_OK);
            CHECK_EQ(kv->stats.queries[0].used, cases[k].used[i]);
        }
        CHECK_EQ(kv->stats.queries[0].tokens, cases[k].used[5] == 512 ? -1 : cases[k].tokens);
        tkv_destroy(kv);
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(nothing_is_encoded_before_the_256th_token);
    RUN(sequences_learn_together);
    RUN(later_sequences_do_not_wait);
    RUN(only_one_tier_needs_a_table);
    RUN(tiers_out_of_reach);
    RUN(tables_keep_coming);
    RUN(retired_versions_are_recoded);
    RUN(the_first_block_uses_its_table);
    RUN(any_contents_make_a_table);
    RUN(any_shape_makes_a_table);
    RUN(a_flush_makes_a_table);
    RUN(sequences_that_ended_before_the_table);
    RUN(no_table_inside_a_step);
    RUN(reservations_include_the_table);
    RUN(no_memory_for_the_recoding);
    RUN(no_memory_for_the_second_table);
    RUN(a_table_waits_under_a_budget);
    RUN(an_append_beyond_the_turn_makes_all_heads);
    RUN(a_failure_makes_the_same_table);
    RUN(tables_in_place);
    RUN(norms_from_scales);
    RUN(heads_with_far_attention_get_more_bits);
    RUN(channels_are_in_order);
    RUN(heads_with_large_keys_get_more_bits);
    RUN(saved_and_loaded);
    RUN(loaded_into_another_plan);
    RUN(tables_are_the_same_on_every_isa);
    RUN(a_frozen_table_stays);
    RUN(a_flush_does_not_hurry_a_refresh);
    RUN(a_refresh_makes_the_pending_table_first);
    RUN(a_refresh_learns_a_new_table);
    RUN(damaged_calibrations_are_refused);
    RUN(other_models_are_refused);
    RUN(impossible_calibrations_are_refused);
    RUN(forged_calibrations_are_harmless);
    RUN(non_finite_queries_teach_nothing);
    RUN(aborted_tokens_do_not_count);
    RUN(tables_from_zeros);
    RUN(tables_from_few_tokens);
    RUN(tables_from_almost_equal_tokens);
    RUN(tables_from_blocks_before_copies);
    RUN(tables_from_blocks_that_a_fork_holds_exact);
    RUN(tables_from_all_sequences);
    RUN(squat_learns_from_queries);
    RUN(squat_makes_factors_in_time);
    return tkv_test_end();
}
