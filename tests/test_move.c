/*
 * test_move.c - tkv_seq_remove, tkv_seq_shift, tkv_get_positions: against a plain array of tokens, and against
 * tkv_attend_reference.
 *
 * Moves under random calls of all kinds: test_everything.c. Moved keys to the bit: white_step.c.
 */
#include "sequences.h"

#include <limits.h>

/* >>a sequence as an array of tokens */
typedef struct plain_token {
    int id, position; /* id: what its key and value are made from */
} plain_token;

typedef struct plain_sequence {
    plain_token token[MAX_TOKENS];
    int n;
} plain_sequence;

static float bias; /* common to all keys, before RoPE */

/* Rotates a key as a model does. */
static void rotate(const tkv_rope *rope, int position, float *x) {
    const int pairs = rope->dim / 2, step = rope->interleaved ? 2 : 1, apart = rope->interleaved ? 1 : pairs;
    int j;
    for (j = 0; j < pairs; j++) {
        const double angle = position * pow(rope->base > 0.0f ? rope->base : 10000.0, -2.0 * j / rope->dim);
        const double a = x[j * step], b = x[j * step + apart];
        x[j * step] = (float)(a * cos(angle) - b * sin(angle));
        x[j * step + apart] = (float)(b * cos(angle) + a * sin(angle));
    }
}

/* K and V of a token of a layer, rotated for a position. */
static void make_token(int id, int layer, int position, float *k, float *v) {
    int h, i;
    fill_rows(id, layer, 0, 1, k, v);
    for (h = 0; h < KV_HEADS; h++) {
        for (i = 0; i < DIM && bias > 0.0f; i++) k[h * DIM + i] += bias * (i % 3 ? 1.0f : -1.0f);
        rotate(&last_config.model.rope, position, k + h * DIM);
    }
}

/* Appends n new tokens to a sequence of a cache and to the array. first_id: of the first new token. */
static void append_plain(tkv_cache *kv, int seq, plain_sequence *s, int first_id, int n, int chunk) {
    int t, layer;
    while (n > 0) {
        const int some = n < chunk ? n : chunk;
        for (t = 0; t < some; t++) {
            plain_token *x = &s->token[s->n + t];
            x->id = first_id++;
            x->position = s->n + t ? x[-1].position + 1 : 0;
        }
        for (layer = 0; layer < last_config.model.n_layers; layer++) {
            for (t = 0; t < some; t++)
                make_token(s->token[s->n + t].id, layer, s->token[s->n + t].position, k_in + t * K_ROW,
                           v_in + t * V_ROW);
            CHECK_EQ(tkv_append(kv, seq, layer, k_in, v_in, some), TKV_OK);
        }
        s->n += some;
        n -= some;
    }
}

static void remove_plain(plain_sequence *s, int first, int end) {
    int t, n = 0;
    for (t = 0; t < s->n; t++)
        if (s->token[t].position < first || s->token[t].position >= end) s->token[n++] = s->token[t];
    s->n = n;
}

static void shift_plain(plain_sequence *s, int first, int end, int delta) {
    int t;
    for (t = 0; t < s->n; t++)
        if (s->token[t].position >= first && s->token[t].position < end) s->token[t].position += delta;
}

/* Live tokens of a sequence, in order of index: their positions. Returns their number. */
static int live_positions(tkv_cache *kv, int seq, int layer, int *positions) {
    static uint8_t tier[4 * MAX_TOKENS];
    static int all[4 * MAX_TOKENS];
    const int len = tkv_get_length(kv, seq, layer);
    int t, n = 0;
    CHECK(len <= COUNT(all));
    CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, len, tier), TKV_OK);
    CHECK_EQ(tkv_get_positions(kv, seq, layer, 0, len, all), TKV_OK);
    for (t = 0; t < len; t++)
        if (tier[t] < TKV_TIER_COUNT) positions[n++] = all[t];
    return n;
}

/* Mean squared difference of the outputs of the newest query in a layer: of the cache, and of a new one with the tokens
 * of the array, made at their positions. The positions must ascend. */
static double difference_in(tkv_cache *kv, int seq, const plain_sequence *s, const tkv_config *exact,
                            int layer) {
    const int n = s->n;
    float q[2 * KV_HEADS * DIM], out[2 * KV_HEADS * V_DIM], want[2 * KV_HEADS * V_DIM];
    tkv_config one = *exact;
    tkv_rng rng = tkv_rng_seed(9);
    tkv_cache *plain;
    int t;
    one.model.n_layers = 1;
    one.limits.max_seqs = 1;
    CHECK_EQ(tkv_create(&one, &plain), TKV_OK);
    for (t = 0; t < n; t++)
        make_token(s->token[t].id, layer, s->token[t].position, k_in + t * K_ROW, v_in + t * V_ROW);
    for (t = 0; t < n; t += 256)
        CHECK_EQ(tkv_append(plain, 0, 0, k_in + t * K_ROW, v_in + t * V_ROW, n - t < 256 ? n - t : 256),
                 TKV_OK);
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    CHECK_EQ(tkv_attend(kv, seq, layer, q, 1, out), TKV_OK);
    CHECK_EQ(tkv_attend(plain, 0, 0, q, 1, want), TKV_OK);
    tkv_destroy(plain);
    return mean_squared_difference(out, want, COUNT(out));
}

/* Compares positions, keys, values and attention of a sequence with the array. */
static void check_plain(tkv_cache *kv, int seq, const plain_sequence *s, const tkv_config *exact,
                        double bound) {
    static int position[4 * MAX_TOKENS];
    int layer, t, wrong = 0;
    check_cache_at(kv, "moved, tokens", s->n);
    for (layer = 0; layer < last_config.model.n_layers; layer++) {
        CHECK_EQ(live_positions(kv, seq, layer, position), s->n);
        for (t = 0; t < s->n; t++) wrong += position[t] != s->token[t].position;
        CHECK_EQ(wrong, 0);
        if (s->n && bound > 0.0) CHECK_LE(difference_in(kv, seq, s, exact, layer), bound);
    }
}

/* F32 in all tiers, with RoPE. */
static tkv_config make_move_config(int seqs) {
    tkv_config cfg = make_f32_config(2, seqs);
    cfg.model.rope.dim = DIM;
    cfg.limits.max_append = 512;
    return cfg;
}

/* >>tests */
/* Removes ranges of all kinds. Other tokens keep their positions, and a fork keeps all of its tokens. */
TEST(removed_tokens_are_not_seen) {
    static plain_sequence s, of_fork;
    const int ranges[][2] = {{100, 164}, {3, 5},     {68, 132},   {500, 501}, {0, 4},
                             {480, 500}, {690, 700}, {600, 650},  {640, 700}, {200, 460},
                             {0, 64},    {470, 600}, {0, 1 << 30}};
    int i, meta;
    for (meta = 0; meta < 2; meta++) {
        tkv_config cfg = make_move_config(2);
        tkv_cache *kv;
        if (meta) cfg.importance.sample_every = 1;
        kv = create_cache(&cfg);
        memset(&s, 0, sizeof s);
        append_plain(kv, 0, &s, 0, 700, 100);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        of_fork = s;
        for (i = 0; i < COUNT(ranges); i++) {
            CHECK_EQ(tkv_seq_remove(kv, 0, ranges[i][0], ranges[i][1]), TKV_OK);
            remove_plain(&s, ranges[i][0], ranges[i][1]);
            check_plain(kv, 0, &s, &cfg, 1e-10);
            check_plain(kv, 1, &of_fork, &cfg, 1e-10);
            if (i % 4 != 3) continue;
            append_plain(kv, 0, &s, 1000 * i, 30, 7);
            check_plain(kv, 0, &s, &cfg, 1e-10);
        }
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 0);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        tkv_destroy(kv);
    }
}

/* Removal gives memory back, and needs none. */
TEST(removal_frees_memory) {
    counting_allocator p;
    tkv_config cfg = make_move_config(1);
    tkv_memory_info before, after;
    static plain_sequence s;
    tkv_cache *kv;
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 2000, 100);
    CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
    p.fail_at = 1;
    CHECK_EQ(tkv_seq_remove(kv, 0, 100, 1900), TKV_OK);
    p.fail_at = 0;
    CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
    CHECK_LE(after.total, 0.35 * (double)before.total);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

/* Closes gaps and opens them. Attention is that over keys made at the new positions. Appends go on there. */
TEST(moved_tokens_attend_as_if_made_there) {
    static const tkv_format hot[] = {TKV_F32, TKV_F16};
    static plain_sequence s;
    int f, round;
    for (f = 0; f < 6; f++) {
        tkv_config cfg = make_move_config(1), exact;
        tkv_rng rng = tkv_rng_seed((uint64_t)f);
        tkv_cache *kv;
        int id = 0;
        if (f % 2) cfg.tiers.hot.k = cfg.tiers.hot.v = cfg.tiers.warm.k = cfg.tiers.warm.v = hot[1];
        if (f / 2 == 1) cfg.model.rope.interleaved = 1;
        if (f / 2 == 2) cfg.model.rope.dim = 8, cfg.model.rope.base = 500.0f;
        if (f / 2 == 2) cfg.importance.sample_every = 1;
        exact = make_move_config(1);
        kv = create_cache(&cfg);
        memset(&s, 0, sizeof s);
        append_plain(kv, 0, &s, id, 600, 200);
        for (round = 0; round < 12; round++) {
            const int at = tkv_rng_below(&rng, s.token[s.n - 1].position), n = 1 + tkv_rng_below(&rng, 150);
            if (round % 3 == 2) { /* a gap is opened */
                CHECK_EQ(tkv_seq_shift(kv, 0, at, TKV_UNLIMITED, n), TKV_OK);
                shift_plain(&s, at, INT_MAX, n);
            } else { /* tokens are removed, and the gap is closed */
                CHECK_EQ(tkv_seq_remove(kv, 0, at, at + n), TKV_OK);
                remove_plain(&s, at, at + n);
                CHECK_EQ(tkv_seq_shift(kv, 0, at + n, TKV_UNLIMITED, -n), TKV_OK);
                shift_plain(&s, at + n, INT_MAX, -n);
            }
            check_plain(kv, 0, &s, &exact, f % 2 ? 1e-6 : 1e-9);
            append_plain(kv, 0, &s, id += 1000, 1 + tkv_rng_below(&rng, 90), 40);
            check_plain(kv, 0, &s, &exact, f % 2 ? 1e-6 : 1e-9);
        }
        tkv_destroy(kv);
    }
}

/* Reads give keys as they are at the present positions. */
TEST(moved_keys_are_read_at_their_positions) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1);
    tkv_cache *kv = create_cache(&cfg);
    int t;
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 300, 100);
    CHECK_EQ(tkv_seq_shift(kv, 0, 90, 170, 500), TKV_OK);
    shift_plain(&s, 90, 170, 500);
    CHECK_EQ(tkv_read(kv, 0, 1, 0, 300, k_out, v_out), TKV_OK);
    for (t = 0; t < 300; t++) {
        make_token(s.token[t].id, 1, s.token[t].position, k_want + t * K_ROW, v_want + t * V_ROW);
        CHECK_LE(mean_squared_difference(k_out + t * K_ROW, k_want + t * K_ROW, K_ROW), 1e-9);
    }
    CHECK_MEM(v_out, v_want, 300 * V_ROW * sizeof(float));
    tkv_destroy(kv);
}

/* A key with a large bias on all channels moves as any other. */
TEST(keys_with_a_common_bias_move) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1);
    tkv_cache *kv = create_cache(&cfg);
    bias = 900.0f;
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 300, 100);
    check_plain(kv, 0, &s, &cfg, 1e-6);
    CHECK_EQ(tkv_seq_remove(kv, 0, 50, 80), TKV_OK);
    remove_plain(&s, 50, 80);
    CHECK_EQ(tkv_seq_shift(kv, 0, 80, TKV_UNLIMITED, -30), TKV_OK);
    shift_plain(&s, 80, INT_MAX, -30);
    check_plain(kv, 0, &s, &cfg, 1e-3);
    append_plain(kv, 0, &s, 1000, 100, 50);
    check_plain(kv, 0, &s, &cfg, 1e-3);
    bias = 0.0f;
    tkv_destroy(kv);
}

/* Attention of n queries of a layer against tkv_attend_reference: the greatest difference. */
static double reference_error(tkv_cache *kv, int seq, int layer, const tkv_attend_params *more, int n) {
    static float q[64 * 2 * KV_HEADS * DIM], out[64 * 2 * KV_HEADS * V_DIM], want[64 * 2 * KV_HEADS * V_DIM];
    static float lse[64 * 2 * KV_HEADS], want_lse[64 * 2 * KV_HEADS];
    static float scores[4 * MAX_TOKENS], want_scores[4 * MAX_TOKENS];
    tkv_attend_params p = *more;
    tkv_rng rng = tkv_rng_seed(77);
    double worst = 0.0;
    int i;
    tkv_rng_fill(&rng, q, (size_t)(n * 2 * KV_HEADS * DIM), 2.0);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.q = q;
    p.out = out;
    p.lse = lse;
    p.scores = scores;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.out = want;
    p.lse = want_lse;
    p.scores = want_scores;
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
    for (i = 0; i < n * 2 * KV_HEADS * V_DIM; i++)
        if (fabs((double)out[i] - (double)want[i]) > worst) worst = fabs((double)out[i] - (double)want[i]);
    for (i = 0; i < tkv_get_length(kv, seq, layer); i++)
        if (fabs((double)scores[i] - (double)want_scores[i]) > worst)
            worst = fabs((double)scores[i] - (double)want_scores[i]);
    return worst;
}

/* Random removals, moves in any order, cuts, forks and appends, in coded tiers. The kernels agree with the reference, which
 * turns the keys. */
TEST(kernels_agree_with_the_reference) {
    static const tkv_format k[] = {TKV_KIVI4, TKV_A30, TKV_Q8, TKV_INT8, TKV_KIVI2},
                            v[] = {TKV_KIVI4, TKV_R30, TKV_Q8, TKV_FP8_E4M3, TKV_F16};
    const float slopes[2 * KV_HEADS] = {0.01f, 0.02f, 0.03f, 0.04f};
    int f, round, moved = 0;
    for (f = 0; f < 2 * COUNT(k); f++) {
        tkv_config cfg = make_config(2, 3);
        tkv_rng rng = tkv_rng_seed(100 + (uint64_t)f);
        tkv_cache *kv;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(k[f % COUNT(k)], v[f % COUNT(k)]);
        cfg.tiers.hot_tokens = 70;
        cfg.host.precise = 1;
        cfg.model.rope.dim = DIM;
        if (f >= COUNT(k)) cfg.model.window = 300;
        if (f % 3 == 1) cfg.importance.sample_every = 1;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 700, 100), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
        for (round = 0; round < 20; round++) {
            const int op = tkv_rng_below(&rng, 6), seq = tkv_rng_below(&rng, 2),
                      n = tkv_get_length(kv, seq, 0);
            const int a = tkv_rng_below(&rng, 900), b = a + 1 + tkv_rng_below(&rng, 200), at = n ? n : 1;
            tkv_attend_params p;
            tkv_status st = TKV_OK;
            int layer;
            if (op == 0) st = tkv_seq_remove(kv, seq, a, b);
            if (op == 1) st = tkv_seq_shift(kv, seq, a, b, tkv_rng_below(&rng, 400) - 100);
            if (op == 2) st = tkv_seq_shift(kv, seq, a, TKV_UNLIMITED, tkv_rng_below(&rng, 400) - 100);
            if (op == 3) st = tkv_seq_truncate(kv, seq, at - tkv_rng_below(&rng, at > 60 ? 60 : at));
            if (op == 4) st = tkv_seq_fork(kv, seq, 1 - seq, TKV_UNLIMITED);
            if (op == 5) st = append_to_all_layers(kv, seq, 2 + round, 1 + tkv_rng_below(&rng, 150), 60);
            CHECK(st == TKV_OK || st == TKV_ERR_RANGE);
            moved += (op == 1 || op == 2) && st == TKV_OK;
            check_cache_at(kv, "round", round);
            for (layer = 0; layer < 2; layer++) {
                const int len = tkv_get_length(kv, seq, layer);
                memset(&p, 0, sizeof p);
                if (round % 3 == 1) p.alibi_slopes = slopes;
                if (round % 3 == 2) p.window = 100;
                if (len) CHECK_LE(reference_error(kv, seq, layer, &p, len < 40 || round % 2 ? 1 : 40), 0.005);
            }
        }
        tkv_destroy(kv);
    }
    CHECK(moved > 20);
}

/* A thousand moves there and back change nothing: the cache reads as before, and holds no more entries. */
TEST(a_thousand_moves_lose_nothing) {
    tkv_config cfg = make_config(2, 2);
    tkv_rng rng = tkv_rng_seed(3);
    tkv_memory_info before, after;
    snapshot want, got;
    tkv_cache *kv;
    int i;
    cfg.model.rope.dim = DIM;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 900, 100), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
    want = snapshot_of_tokens(kv);
    for (i = 0; i < 500; i++) {
        const int a = tkv_rng_below(&rng, 900), b = a + tkv_rng_below(&rng, 900 - a),
                  d = 1 + tkv_rng_below(&rng, 3000);
        CHECK_EQ(tkv_seq_shift(kv, 0, a, b, 1000 + d), TKV_OK); /* behind all others */
        check_cache_at(kv, "there", i);
        CHECK_EQ(tkv_seq_shift(kv, 0, a + 1000 + d, b + 1000 + d, -1000 - d), TKV_OK);
        check_cache_at(kv, "and back", i);
    }
    got = snapshot_of_tokens(kv);
    CHECK(is_same_snapshot(&want, &got));
    free_snapshot(&want);
    free_snapshot(&got);
    CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
    CHECK_LE(after.total, before.total + 4096);
    tkv_destroy(kv);
}

/* Without memory for entries a move changes nothing. */
TEST(moves_without_memory_change_nothing) {
    int fail_at, budgeted, failed = 0;
    for (budgeted = 0; budgeted < 2; budgeted++)
        for (fail_at = 1; fail_at < 8; fail_at++) {
            counting_allocator p;
            tkv_config cfg = make_config(2, 1);
            snapshot before, after;
            tkv_status st = TKV_OK;
            tkv_cache *kv;
            int i, position[2];
            cfg.model.rope.dim = DIM;
            cfg.host.allocator = counting_allocator_of(&p);
            if (budgeted) cfg.budget.bytes = 1 << 20;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 1000, 100), TKV_OK);
            before = snapshot_of_tokens(kv);
            for (i = 0; i < 30 && !st; i++) { /* each takes entries: the positions do not fit together */
                free_snapshot(&before);
                before = snapshot_of_tokens(kv);
                p.fail_at = fail_at;
                st = tkv_seq_shift(kv, 0, 20 + 30 * i, 25 + 30 * i, 5000 + 7 * i);
                p.fail_at = 0;
            }
            check_cache_at(kv, "allocation", fail_at);
            if (st) {
                CHECK_EQ(st, TKV_ERR_NOMEM);
                after = snapshot_of_tokens(kv);
                CHECK(is_same_snapshot(&before, &after));
                free_snapshot(&after);
                CHECK_EQ(tkv_get_positions(kv, 0, 0, 20 + 30 * (i - 1), 2, position), TKV_OK);
                CHECK_EQ(position[0], 20 + 30 * (i - 1));
                failed++;
            }
            free_snapshot(&before);
            tkv_destroy(kv);
            CHECK_EQ(p.held, 0);
        }
    CHECK(failed > 1);
}

/* A block whose first slots belong to no entry any more gives a part of its tokens to the block before it. */
TEST(evicted_neighbours_of_split_blocks_merge) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1), exact = make_move_config(1);
    uint64_t victims[8];
    tkv_cache *kv;
    int i;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 400, 100);
    CHECK_EQ(tkv_seq_shift(kv, 0, 144, TKV_UNLIMITED, 10), TKV_OK); /* splits the block of 132 .. 195 */
    CHECK_EQ(tkv_seq_remove(kv, 0, 132, 144), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 154, TKV_UNLIMITED, -10), TKV_OK);
    remove_plain(&s, 132, 144);
    memset(victims, 0, sizeof victims);
    for (i = 80; i < 107; i++) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, 400), TKV_OK);
    remove_plain(&s, 80, 107);
    check_cache_at(kv, "merged", 0);
    check_plain(kv, 0, &s, &exact, 1e-10);
    append_plain(kv, 0, &s, 1000, 30, 7);
    check_plain(kv, 0, &s, &exact, 1e-10);
    tkv_destroy(kv);
}

/* A cut that leaves a length but no block, in a sequence that had moved. */
TEST(cuts_before_the_first_moved_token) {
    tkv_config cfg = make_move_config(2);
    tkv_cache *kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 0, 100), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 100, TKV_UNLIMITED, -100), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 50), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 50);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 40), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 30), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 20, 20), TKV_OK);
    check_cache_at(kv, "cut", 0);
    tkv_destroy(kv);
}

/* A range of a discarded block in which all tokens are evicted needs no source. */
TEST(evicted_tokens_of_discarded_blocks_move) {
    tkv_config cfg = make_move_config(1);
    uint64_t victims[8];
    tkv_cache *kv;
    int i;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 400, 100), TKV_OK);
    CHECK_EQ(tkv_seq_discard(kv, 0, 132, NULL), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 100, 132, 1000), TKV_ERR_NO_SOURCE);
    memset(victims, 0, sizeof victims);
    for (i = 100; i < 132; i++) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, 400), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 100, 132, 1000), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 80, 132, 1000), TKV_ERR_NO_SOURCE);
    check_cache_at(kv, "moved", 0);
    tkv_destroy(kv);
}

/* Refusals name their reason and change nothing. */
TEST(moves_are_refused_with_a_reason) {
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, 10, 5), TKV_ERR_UNSUPPORTED);
    CHECK_STR(tkv_get_last_error(kv), "set cfg.model.rope: keys cannot move without the model's RoPE");
    CHECK_EQ(tkv_seq_remove(kv, 0, -1, 10), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "first is -1; positions are not negative");
    CHECK_EQ(tkv_seq_remove(kv, 0, 10, 9), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "end is 9; it must not be less than first");
    tkv_destroy(kv);
    cfg.model.rope.dim = DIM;
    cfg.model.window = 64;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 700, 100), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 690, TKV_UNLIMITED, -691), TKV_ERR_RANGE);
    CHECK_STR(tkv_get_last_error(kv), "a token would get position -1; positions are 0 to 2^30 - 1");
    CHECK_EQ(tkv_seq_shift(kv, 0, 690, TKV_UNLIMITED, 1 << 30), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_remove(kv, 0, 600, 690), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 500, 600), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 690, TKV_UNLIMITED, -600),
             TKV_ERR_RANGE); /* the window has dropped older tokens */
    CHECK_STR(tkv_get_last_error(kv),
              "tokens of the window have expired; the next token would see them: layer 0");
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, 10, 5), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_remove(kv, 0, 0, 10), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    check_cache_at(kv, "refused", 0);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(removed_tokens_are_not_seen);
    RUN(removal_frees_memory);
    RUN(moved_tokens_attend_as_if_made_there);
    RUN(moved_keys_are_read_at_their_positions);
    RUN(keys_with_a_common_bias_move);
    RUN(kernels_agree_with_the_reference);
    RUN(a_thousand_moves_lose_nothing);
    RUN(moves_without_memory_change_nothing);
    RUN(evicted_neighbours_of_split_blocks_merge);
    RUN(cuts_before_the_first_moved_token);
    RUN(evicted_tokens_of_discarded_blocks_move);
    RUN(moves_are_refused_with_a_reason);
    return tkv_test_end();
}
