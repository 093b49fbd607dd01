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

/* The RoPE of a layer of last_config. */
static const tkv_rope *rope_of_layer(int layer) {
    const tkv_layer_config *c = last_config.layers ? &last_config.layers[layer] : NULL;
    return c && (c->rope.dim || c->rope.kind) ? &c->rope : &last_config.model.rope;
}

/* Rotates a key as a model does. */
static void rotate(const tkv_rope *rope, int position, float *x) {
    const int pairs = rope->dim / 2, step = rope->interleaved ? 2 : 1, apart = rope->interleaved ? 1 : pairs;
    const double scale = rope->scale > 0.0f ? (double)rope->scale : 1.0;
    int j;
    for (j = 0; j < pairs; j++) {
        const double base = rope->base > 0.0f ? (double)rope->base : 10000.0;
        const double angle =
            position * scale *
            (rope->frequencies ? (double)rope->frequencies[j] : pow(base, -2.0 * j / rope->dim));
        const double a = (double)x[j * step], b = (double)x[j * step + apart];
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
        rotate(rope_of_layer(layer), position, k + h * DIM);
    }
}

/* Appends n tokens to a sequence of a cache and to the array, at the positions given. */
static tkv_status append_at_positions(tkv_cache *kv, int seq, plain_sequence *s, int first_id, int n,
                                      const int *positions) {
    tkv_append_params p;
    tkv_status st = TKV_OK;
    int t, layer;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.n = n;
    p.k = k_in;
    p.v = v_in;
    p.token_positions = positions;
    for (layer = 0; layer < last_config.model.n_layers && !st; layer++) {
        for (t = 0; t < n; t++)
            make_token(first_id + t, layer, positions[t], k_in + t * K_ROW, v_in + t * V_ROW);
        p.layer = layer;
        st = tkv_append_ex(kv, &p);
    }
    for (t = 0; t < n && !st; t++) {
        s->token[s->n].id = first_id + t;
        s->token[s->n++].position = positions[t];
    }
    return st;
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
    one.layers = NULL;
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

/* Frequencies as YaRN and Llama 3 compute them from a base: the slow ones are divided by a factor, those between are a
 * mixture. */
static void scaled_frequencies(int dim, double factor, double low, double high, float *to) {
    int j;
    for (j = 0; j < dim / 2; j++) {
        const double f = pow(10000.0, -2.0 * j / dim), turns = 512.0 * f / 6.283185307179586;
        const double mix = turns > high ? 1.0 : turns < low ? 0.0 : (turns - low) / (high - low);
        to[j] = (float)(mix * f + (1.0 - mix) * f / factor);
    }
}

/* Layers with different RoPE: bases as in Gemma 3, one without (NoPE), partial, interleaved, frequencies as given, and
 * p-RoPE, which leaves the slow pairs alone. */
TEST(layers_have_frequencies_of_their_own) {
    static plain_sequence s;
    enum { LAYERS = 8 };
    tkv_layer_config layers[LAYERS];
    float yarn[DIM / 2], llama[DIM / 2], p_rope[DIM / 2];
    tkv_config cfg = make_f32_config(LAYERS, 1), exact = make_move_config(1);
    tkv_rng rng = tkv_rng_seed(5);
    tkv_cache *kv;
    int i, round, id = 0;
    memset(layers, 0, sizeof layers);
    memset(&s, 0, sizeof s);
    scaled_frequencies(DIM, 8.0, 1.0, 32.0, yarn);
    scaled_frequencies(DIM, 32.0, 1.0, 4.0, llama);
    for (i = 0; i < DIM / 2; i++) p_rope[i] = i < DIM / 4 ? (float)pow(1e6, -2.0 * i / (int)DIM) : 0.0f;
    cfg.model.rope.dim = DIM;
    cfg.limits.max_append = 512;
    cfg.layers = layers;
    layers[1].rope.dim = DIM, layers[1].rope.base = 1e6f, layers[1].rope.scale = 0.125f;
    layers[2].rope.dim = TKV_OFF;
    layers[3].rope.dim = 8, layers[3].rope.base = 500.0f;
    layers[4].rope.dim = DIM, layers[4].rope.interleaved = 1, layers[4].rope.frequencies = yarn;
    layers[5].rope.dim = DIM, layers[5].rope.frequencies = llama;
    layers[6].rope.dim = DIM, layers[6].rope.frequencies = p_rope;
    layers[7].rope.dim = DIM, layers[7].rope.base = 1e6f, layers[7].rope.scale = 0.125f;
    kv = create_cache(&cfg);
    append_plain(kv, 0, &s, id, 400, 200);
    for (round = 0; round < 6; round++) {
        const int at = tkv_rng_below(&rng, s.token[s.n - 1].position), n = 1 + tkv_rng_below(&rng, 150);
        if (round % 3 == 2) {
            CHECK_EQ(tkv_seq_shift(kv, 0, at, TKV_UNLIMITED, n), TKV_OK);
            shift_plain(&s, at, INT_MAX, n);
        } else {
            CHECK_EQ(tkv_seq_remove(kv, 0, at, at + n), TKV_OK);
            remove_plain(&s, at, at + n);
            CHECK_EQ(tkv_seq_shift(kv, 0, at + n, TKV_UNLIMITED, -n), TKV_OK);
            shift_plain(&s, at + n, INT_MAX, -n);
        }
        check_plain(kv, 0, &s, &exact, 1e-9);
        append_plain(kv, 0, &s, id += 1000, 1 + tkv_rng_below(&rng, 90), 40);
        check_plain(kv, 0, &s, &exact, 1e-9);
    }
    tkv_destroy(kv);
}

/* A layer that does not rotate its keys reads after a move, to the bit, as before. */
TEST(keys_without_rope_only_change_positions) {
    tkv_config cfg = make_config(2, 1);
    tkv_rng rng = tkv_rng_seed(3);
    float q[2 * KV_HEADS * DIM], before[2 * KV_HEADS * V_DIM], after[2 * KV_HEADS * V_DIM];
    int position[2];
    tkv_cache *kv;
    cfg.model.rope.dim = TKV_OFF;
    kv = create_cache(&cfg);
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 700, 100), TKV_OK);
    CHECK_EQ(tkv_attend(kv, 0, 1, q, 1, before), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 132, TKV_UNLIMITED, 1000), TKV_OK); /* a border of blocks */
    CHECK_EQ(tkv_attend(kv, 0, 1, q, 1, after), TKV_OK);
    CHECK_MEM(before, after, sizeof before);
    CHECK_EQ(tkv_get_positions(kv, 0, 1, 131, 2, position), TKV_OK);
    CHECK(position[0] == 131 && position[1] == 1132);
    check_cache_at(kv, "moved by", 1000);
    tkv_destroy(kv);
}

/* A format that undoes RoPE undoes that of the layer: reads and calibrations are those of a cache whose model has it. */
TEST(formats_undo_the_rope_of_their_layer) {
    tkv_config cfg = make_config(2, 1);
    tkv_layer_config layers[2];
    uint8_t saved[2][20000];
    size_t size[2];
    tkv_cache *kv[3];
    int i, layer;
    memset(layers, 0, sizeof layers);
    layers[1].rope.dim = DIM - 2, layers[1].rope.base = 700.0f, layers[1].rope.interleaved = 1;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KVQUANT4, TKV_KVQUANT4);
    for (i = 0; i < 3; i++) {
        memset(&cfg.model.rope, 0, sizeof cfg.model.rope);
        cfg.model.rope.dim = DIM;
        if (i == 2) cfg.model.rope = layers[1].rope;
        cfg.layers = i == 0 ? layers : NULL;
        kv[i] = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv[i], 0, 1, 900, 100), TKV_OK);
        check_cache_at(kv[i], "cache", i);
    }
    for (layer = 0; layer < 2; layer++) {
        CHECK_EQ(tkv_read(kv[0], 0, layer, 0, 900, k_out, v_out), TKV_OK);
        CHECK_EQ(tkv_read(kv[1 + layer], 0, layer, 0, 900, k_want, v_want), TKV_OK);
        CHECK_MEM(k_out, k_want, 900 * K_ROW * sizeof(float));
        CHECK_EQ(tkv_read(kv[2 - layer], 0, layer, 0, 900, k_want, v_want), TKV_OK);
        CHECK(memcmp(k_out, k_want, 900 * K_ROW * sizeof(float)) != 0);
    }
    for (i = 0; i < 2; i++)
        CHECK_EQ(tkv_save_calibration(kv[i], saved[i], sizeof saved[i], &size[i]), TKV_OK);
    CHECK_EQ(tkv_load_calibration(kv[1], saved[1], size[1]), TKV_OK);
    CHECK_EQ(tkv_load_calibration(kv[0], saved[1], size[1]), TKV_ERR_DATA);
    CHECK_EQ(tkv_load_calibration(kv[1], saved[0], size[0]), TKV_ERR_DATA);
    CHECK_MSG(strstr(tkv_get_last_error(kv[1]), "made with another cfg.model.rope"), "%s",
              tkv_get_last_error(kv[1]));
    CHECK_EQ(tkv_load_calibration(kv[0], saved[0], size[0]), TKV_OK);
    for (i = 0; i < 3; i++) tkv_destroy(kv[i]);
}

/* Attention to tokens that all moved by d has the bits of attention with queries turned by -d, for one query and for
 * many, in every format. */
TEST(moves_equal_turned_queries_to_the_bit) {
    static const int distance[] = {1, -100, 777, 123456};
    enum { N = 70, Q_ROW = 2 * KV_HEADS * DIM, OUT_ROW = 2 * KV_HEADS * V_DIM }; /* 70 rows: prefill */
    static float q[N * Q_ROW], turned[N * Q_ROW], out[N * OUT_ROW], want[N * OUT_ROW];
    const int most = tkv_test_quick() ? 20 : N;
    float x[DIM], y[DIM];
    tkv_rng rng = tkv_rng_seed(8);
    int f, i, h, n, at, tested = 0;
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    for (f = 1; f < TKV_FORMAT_COUNT; f++) {
        tkv_config cfg = make_config(2, 2);
        tkv_cache *kv;
        cfg.tiers.warm = cfg.tiers.archive = pair_of((tkv_format)f, (tkv_format)f);
        cfg.tiers.hot_tokens = 70;
        cfg.model.rope.dim = f % 3 ? DIM : DIM - 2;
        cfg.model.rope.interleaved = f % 2;
        cfg.model.rope.base = f % 5 ? 0.0f : 500.0f;
        if (tkv_validate_config(&cfg, NULL, 0)) cfg.tiers.warm.v = cfg.tiers.archive.v = TKV_F16; /* K only */
        if (tkv_validate_config(&cfg, NULL, 0))
            cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F16, (tkv_format)f); /* V only */
        if (tkv_validate_config(&cfg, NULL, 0)) continue; /* this build leaves the format out */
        tested++;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, f, 1200, 100), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        for (n = 0; n < 2; n++) CHECK_EQ(tkv_seq_remove(kv, n, 0, 132), TKV_OK);
        for (at = i = 0; i < COUNT(distance); i++) {
            CHECK_EQ(tkv_seq_shift(kv, 1, 0, TKV_UNLIMITED, distance[i] - at), TKV_OK);
            at = distance[i];
            memcpy(turned, q, sizeof q);
            for (h = 0; h < N * 2 * KV_HEADS; h++)
                CHECK_EQ(tkv_rotate_rope(&cfg.model.rope, DIM, -distance[i], turned + h * DIM), TKV_OK);
            for (n = 1; n <= (i && tkv_test_quick() ? 1 : most); n += most - 1) {
                CHECK_EQ(tkv_attend(kv, 1, 1, q, n, out), TKV_OK);
                CHECK_EQ(tkv_attend(kv, 0, 1, turned, n, want), TKV_OK);
                CHECK_MEM(out, want, (size_t)(n * OUT_ROW) * sizeof(float));
            }
        }
        CHECK_EQ(tkv_seq_shift(kv, 1, at + 600, TKV_UNLIMITED, 7), TKV_OK);
        for (n = 1; n <= most; n += most - 1) { /* a query that is not finite sees no key */
            float *const row = want + n / 2 * OUT_ROW;
            memcpy(turned, q, sizeof q);
            turned[n / 2 * Q_ROW + f % DIM] = tkv_test_float(f % 2 ? 0x7fc00000u : 0xff800000u);
            CHECK_EQ(tkv_attend(kv, 1, 1, q, n, want), TKV_OK);
            CHECK_EQ(tkv_attend(kv, 1, 1, turned, n, out), TKV_OK);
            memset(row, 0, V_DIM * sizeof *row);
            CHECK_MEM(out + n / 2 * OUT_ROW, row, V_DIM * sizeof *row);
            if (n == 1) CHECK_MEM(out, want, OUT_ROW * sizeof *out);
            CHECK_LE(mean_squared_difference(out, want, n * OUT_ROW), 1e-4);
        }
        tkv_destroy(kv);
    }
    CHECK(tested > 20);
    { /* there and back */
        tkv_rope rope;
        memset(&rope, 0, sizeof rope);
        rope.dim = DIM;
        memcpy(x, q, sizeof x);
        CHECK_EQ(tkv_rotate_rope(&rope, DIM, 12345, x), TKV_OK);
        CHECK(mean_squared_difference(x, q, DIM) > 0.01);
        memcpy(y, q, sizeof y);
        rotate(&rope, 12345, y);
        CHECK_LE(mean_squared_difference(x, y, DIM), 1e-10);
        CHECK_EQ(tkv_rotate_rope(&rope, DIM, -12345, x), TKV_OK);
        CHECK_LE(mean_squared_difference(x, q, DIM), 1e-12);
        rope.dim = 0;
        CHECK_EQ(tkv_rotate_rope(&rope, DIM, 1, x), TKV_ERR_UNSUPPORTED);
        CHECK_EQ(tkv_rotate_rope(&rope, DIM, 1, NULL), TKV_ERR_ARG);
        CHECK_EQ(tkv_rotate_rope(NULL, DIM, 1, x), TKV_ERR_ARG);
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
    const int step =
        tkv_test_quick() ? 2 : 1; /* 2: each format still, three without a window, two with one */
    int f, round, moved = 0;
    for (f = 0; f < 2 * COUNT(k); f += step) {
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
                if (len)
                    CHECK_LE(
                        reference_error(kv, seq, layer, &p, len < 40 || round % 2 ? 1 : 40 / (4 * step - 3)),
                        0.005);
            }
        }
        tkv_destroy(kv);
    }
    CHECK(moved > 20 / step);
}

static void run_backwards(void *user, int n_tasks, tkv_task task, void *ctx) {
    (void)user;
    while (n_tasks-- > 0) task(ctx, n_tasks);
}

/* Tasks in any order give the bits of one thread, though each turns the queries for other blocks. */
TEST(threads_get_the_same_bits) {
    static const tkv_format k[] = {TKV_A30, TKV_KIVI4, TKV_F16}, v[] = {TKV_R30, TKV_KIVI4, TKV_F16};
    enum { N = 40, Q_ROW = 2 * KV_HEADS * DIM, OUT_ROW = 2 * KV_HEADS * V_DIM };
    static float q[N * Q_ROW], out[2][N * OUT_ROW], lse[2][N * 2 * KV_HEADS];
    tkv_rng rng = tkv_rng_seed(21);
    int f, i, n, moves;
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    for (f = 0; f < COUNT(k); f++)
        for (moves = 1; moves <= 60; moves += 59) {
            tkv_cache *kv[2];
            for (i = 0; i < 2; i++) {
                tkv_config cfg = make_config(2, 1);
                int at;
                cfg.tiers.warm = cfg.tiers.archive = pair_of(k[f], v[f]);
                cfg.model.rope.dim = DIM;
                if (i) cfg.host.parallel_for = run_backwards;
                kv[i] = create_cache(&cfg);
                CHECK_EQ(append_to_all_layers(kv[i], 0, 1, 1800, 100), TKV_OK);
                for (at = moves; at-- > 0;) /* borders in the middle of blocks, and between them */
                    CHECK_EQ(tkv_seq_shift(kv[i], 0, 20 + 32 * at, TKV_UNLIMITED, 7), TKV_OK);
            }
            for (n = 1; n <= N; n += N - 1) {
                for (i = 0; i < 2; i++) {
                    tkv_attend_params p;
                    memset(&p, 0, sizeof p);
                    p.layer = 1, p.n = n, p.q = q, p.out = out[i], p.lse = lse[i];
                    CHECK_EQ(tkv_attend_ex(kv[i], &p), TKV_OK);
                }
                CHECK_MEM(out[0], out[1], (size_t)(n * OUT_ROW) * sizeof(float));
                CHECK_MEM(lse[0], lse[1], (size_t)(n * 2 * KV_HEADS) * sizeof(float));
            }
            for (i = 0; i < 2; i++) tkv_destroy(kv[i]);
        }
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

/* The error of a thousand moves by one position: of a cache that turns the query, and of coding the keys again at each
 * move, as other caches do. Prints both. */
TEST(coding_at_each_move_would_lose) {
    enum { MOVES = 1000 };
    static const tkv_format formats[] = {TKV_Q8, TKV_KIVI4, TKV_KIVI2};
    tkv_config cfg = make_config(1, 1);
    int f, t, i;
    cfg.model.rope.dim = DIM;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = TKV_OFF;
    printf("\n");
    for (f = 0; f < COUNT(formats); f++) {
        static uint8_t bytes[4096];
        float coded[64 * DIM], want[64 * DIM];
        double own[2], others;
        tkv_codec codec;
        tkv_cache *kv;
        memset(&codec, 0, sizeof codec);
        codec.format = formats[f];
        codec.side = TKV_K;
        codec.head_dim = DIM;
        cfg.tiers.warm.k = cfg.tiers.warm.v = formats[f];
        kv = create_cache(&cfg);
        for (t = 0; t < 64; t++) make_token(t, 0, t, k_in + t * K_ROW, v_in + t * V_ROW);
        CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 64), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
        for (t = 0; t < 64; t++) memcpy(coded + t * DIM, k_in + t * K_ROW, DIM * sizeof *coded);
        for (i = 0; i <= MOVES; i++) {
            if (i) CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, 1), TKV_OK);
            for (t = 0; t < 64 && i; t++)
                CHECK_EQ(tkv_rotate_rope(&cfg.model.rope, DIM, 1, coded + t * DIM), TKV_OK);
            CHECK_EQ(tkv_encode_block(&codec, coded, 0, 64, bytes, sizeof bytes), TKV_OK);
            CHECK_EQ(tkv_decode_block(&codec, bytes, sizeof bytes, 64, coded, 0), TKV_OK);
            if (i && i < MOVES) continue;
            CHECK_EQ(tkv_read(kv, 0, 0, 0, 64, k_out, v_out), TKV_OK);
            for (t = 0; t < 64; t++) {
                make_token(t, 0, t + i, k_want, v_want);
                memcpy(want + t * DIM, k_want, DIM * sizeof *want);
                memmove(k_out + t * DIM, k_out + t * K_ROW, DIM * sizeof *k_out); /* head 0 */
            }
            own[i > 0] = mean_squared_difference(k_out, want, 64 * DIM);
        }
        others = mean_squared_difference(coded, want, 64 * DIM);
        printf("    %-6s squared error of a key: %.2e, after %d moves %.2e; coded at each move %.2e\n",
               tkv_get_name(TKV_NAME_FORMAT, (int)formats[f]), own[0], MOVES, own[1], others);
        CHECK_LE(own[1], 1.001 * own[0] + 1e-9);
        CHECK(others > 3.0 * own[1]);
        tkv_destroy(kv);
    }
}

static tkv_status shift_piece(tkv_cache *kv, int i) {
    return tkv_seq_shift(kv, 0, 20 + 30 * i, 25 + 30 * i, 5000 + 7 * i);
}

/* Without memory for entries a move changes nothing. */
TEST(moves_without_memory_change_nothing) {
    int fail_at, budgeted, failed = 0;
    for (budgeted = 0; budgeted < 2; budgeted++)
        for (fail_at = 1; fail_at < 8; fail_at++) {
            counting_allocator p;
            tkv_config cfg = make_config(2, 1);
            tkv_status st = TKV_OK;
            tkv_cache *kv;
            int i, position[2];
            cfg.model.rope.dim = DIM;
            cfg.host.allocator = counting_allocator_of(&p);
            if (budgeted) cfg.budget.bytes = 1 << 20;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 1000, 100), TKV_OK);
            for (i = 0; i < 30 && !st; i++) /* each takes entries: the positions do not fit together */
                st = change_without_memory(kv, &p, fail_at, shift_piece, i);
            if (st) {
                CHECK_EQ(tkv_get_positions(kv, 0, 0, 20 + 30 * (i - 1), 2, position), TKV_OK);
                CHECK_EQ(position[0], 20 + 30 * (i - 1));
                failed++;
            }
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

/* tkv_read gives moved keys as if they had been appended at their present position. */
TEST(reads_give_keys_at_their_position) {
    enum { TOKENS = 256 };
    static float k[TOKENS * DIM], v[TOKENS * DIM], k_read[TOKENS * DIM], v_read[TOKENS * DIM], want[DIM];
    tkv_config cfg = make_sized_config(1, 1, 1, DIM, 1, 64);
    tkv_rng rng = tkv_rng_seed(71);
    int position[TOKENS], i, n_removed, n_turned = 0;
    tkv_cache *kv;
    cfg.model.rope.dim = DIM;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.limits.max_tokens = TOKENS;
    kv = create_cache(&cfg);
    tkv_rng_fill(&rng, k, TOKENS * DIM, 1.0);
    tkv_rng_fill(&rng, v, TOKENS * DIM, 1.0);
    for (i = 0; i < TOKENS; i += 64) CHECK_EQ(tkv_append(kv, 0, 0, k + i * DIM, v + i * DIM, 64), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 100, TKV_UNLIMITED, 7), TKV_OK);
    CHECK_EQ(tkv_seq_slide(kv, 0, 64, &n_removed), TKV_OK);
    CHECK_EQ(n_removed, 64);
    CHECK_EQ(tkv_get_positions(kv, 0, 0, 0, TOKENS - 64, position), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, TOKENS - 64, k_read, v_read), TKV_OK);
    for (i = 0; i < TOKENS - 64; i++) {
        const int was = i < 4 ? i : i + 64; /* its position when it was appended */
        memcpy(want, k + was * DIM, sizeof want);
        if (position[i] != was)
            CHECK_EQ(tkv_rotate_rope(&cfg.model.rope, DIM, position[i] - was, want), TKV_OK);
        n_turned += position[i] != was;
        CHECK_MEM(k_read + i * DIM, want, sizeof want);
        CHECK_MEM(v_read + i * DIM, v + was * DIM, sizeof want);
    }
    CHECK_EQ(n_turned, TOKENS - 64 - 4);
    tkv_destroy(kv);
}

TEST(slides_name_the_limit) {
    static float x[64 * DIM];
    int field;
    for (field = 0; field < 3; field++) {
        tkv_config cfg = make_sized_config(1, 1, 1, DIM, 1, 64);
        tkv_cache *kv;
        int i;
        cfg.model.rope.dim = DIM;
        cfg.limits.max_tokens = field ? 500 : 66;
        cfg.evict.policy = field ? TKV_EVICT_SLIDING : TKV_EVICT_NONE;
        if (field == 1) cfg.evict.keep_tokens = 67;
        if (field == 2) cfg.evict.keep_first = 65, cfg.evict.keep_last = 68;
        kv = create_cache(&cfg);
        for (i = 0; i < 66; i += 22) CHECK_EQ(tkv_append(kv, 0, 0, x, x, 22), TKV_OK);
        CHECK_EQ(tkv_seq_slide(kv, 0, 60, NULL), TKV_ERR_CAPACITY);
        CHECK_MSG(strstr(tkv_get_last_error(kv), field == 0   ? "raise limits.max_tokens; it is 66"
                                                 : field == 1 ? "raise evict.keep_tokens; it is 67"
                                                              : "keep_first and keep_last; it is 68"),
                  "%s", tkv_get_last_error(kv));
        tkv_destroy(kv);
    }
}

/* A packed block is split by a move, its end is cut, and a second move makes it one entry again. */
TEST(cuts_of_split_blocks_lose_no_other_tokens) {
    tkv_config cfg = make_config(1, 2);
    uint64_t victims[2] = {(uint64_t)3 << 40, 0};
    float k[K_ROW], v[V_ROW];
    int i, n_read = 0;
    cfg.model.rope.dim = DIM;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    tkv_cache *kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 68, 34), TKV_OK);
    CHECK_EQ(evict_tokens(kv, 0, 0, victims, 68), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 200, 50), TKV_OK); /* the block is compressed without 40 and 41 */
    CHECK_EQ(tkv_seq_shift(kv, 0, 30, TKV_UNLIMITED, 30), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 50), TKV_OK);
    check_cache_at(kv, "cut", 0);
    CHECK_EQ(tkv_seq_shift(kv, 0, 4, 30, 30), TKV_OK);
    check_cache_at(kv, "moved", 0);
    for (i = 0; i < 50; i++) n_read += tkv_read(kv, 0, 0, i, 1, k, v) == TKV_OK;
    CHECK_EQ(n_read, 48);
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
    static const char *const sentence[TKV_ROPE_COUNT] = {
        "", "keys with M-RoPE cannot move: a token has several positions",
        "keys with dynamic frequencies cannot move: these change with the length",
        "keys with learned positions cannot move: the model added positions"};
    int kind, of_layer;
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, 10, 5), TKV_ERR_UNSUPPORTED);
    CHECK_STR(tkv_get_last_error(kv), "set cfg.model.rope: keys cannot move without the model's RoPE");
    CHECK_EQ(tkv_seq_remove(kv, 0, -1, 10), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "first is -1; positions are not negative");
    CHECK_EQ(tkv_seq_remove(kv, 0, 10, 9), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "end is 9; it must not be less than first");
    CHECK_EQ(tkv_seq_remove(kv, 0, INT_MAX, TKV_UNLIMITED), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "first is 2147483647; positions are 0 to 2^30 - 1");
    CHECK_EQ(tkv_seq_remove(kv, 0, INT_MAX, INT_MAX), TKV_OK);
    tkv_destroy(kv);
    for (kind = 1; kind < TKV_ROPE_COUNT; kind++)
        for (of_layer = 0; of_layer < 2; of_layer++) { /* all else works */
            tkv_layer_config layers[2];
            memset(layers, 0, sizeof layers);
            cfg.model.rope.dim = DIM;
            cfg.model.rope.kind = (tkv_rope_kind)(of_layer ? 0 : kind);
            layers[1].rope.kind = (tkv_rope_kind)(of_layer ? kind : 0);
            cfg.layers = layers;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
            CHECK_EQ(tkv_seq_shift(kv, 0, 0, 10, 5), TKV_ERR_UNSUPPORTED);
            CHECK_MSG(strstr(tkv_get_last_error(kv), sentence[kind]), "%s", tkv_get_last_error(kv));
            CHECK_EQ(tkv_seq_fork(kv, 0, 1, 200), TKV_OK);
            CHECK_EQ(tkv_seq_remove(kv, 0, 100, 150), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(kv, 0, 200), TKV_OK);
            check_cache_at(kv, "kind", kind);
            tkv_destroy(kv);
        }
    memset(&cfg.model.rope, 0, sizeof cfg.model.rope);
    cfg.layers = NULL;
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

/* A window of 64 has let tokens expire. A move is refused where the next token would see them, to the position: at the
 * first token that is left, at the last one, and at the distance of the window. */
TEST(moves_near_expired_tokens) {
    enum { WINDOW = 64, LEN = 700 };
    int i;
    for (i = 0; i < 10; i++) {
        tkv_config cfg = make_move_config(1);
        tkv_layer_info info;
        tkv_cache *kv;
        int expired, most, first, end = TKV_UNLIMITED, by, is_refused = 0, n_moved, position = -1;
        cfg.model.window = WINDOW;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, LEN, 70), TKV_OK);
        CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
        expired = first = info.expired; /* the first token that is left */
        most = LEN - expired - WINDOW;  /* the next token may come nearer to the expired ones by so much */
        by = -most - 1;
        switch (i) {
        case 0: break; /* all that is left moves alike */
        case 1: first++, is_refused = 1; break;
        case 2: first++, by = -most; break;
        case 3: first++, end = LEN, is_refused = 1; break; /* up to the last token */
        case 4: first++, end = LEN, by = -most; break;
        case 5: first++, end = LEN - 1; break;               /* the last token stays */
        case 6: first = LEN; break;                          /* behind the last token: none moves */
        case 7: first = 10, end = expired, by = 5000; break; /* only expired tokens, so none moves */
        case 8: first = LEN - 1, is_refused = 1; break;      /* the last token alone */
        default: first = LEN - 1, by = -most; break;
        }
        CHECK(most > 0);
        CHECK_MSG(tkv_seq_shift(kv, 0, first, end, by) == (is_refused ? TKV_ERR_RANGE : TKV_OK), "case %d",
                  i);
        n_moved = !is_refused && first < LEN && i != 5 && i != 7;
        CHECK_EQ(tkv_get_positions(kv, 0, 0, LEN - 1, 1, &position), TKV_OK);
        CHECK_EQ(position, LEN - 1 + n_moved * by);
        check_cache_at(kv, "case", i);
        tkv_destroy(kv);
    }
}

/* Positions jump, and the tokens before the jump expire. What follows sees none of them, however near it is to the
 * border of the jump; so nothing is refused, in a sequence that was saved and loaded either. */
TEST(windows_behind_jumps_of_positions) {
    enum { WINDOW = 157, BEFORE = 64, JUMP = 1000, STEPS = 300, SAVED_AT = 150 };
    static plain_sequence s, other;
    static uint8_t file[1 << 20];
    int by_copy, is_loaded, layer, t, positions[BEFORE];
    for (t = 0; t < BEFORE; t++) positions[t] = JUMP + t;
    for (by_copy = 0; by_copy < 2; by_copy++)
        for (is_loaded = 0; is_loaded < 2; is_loaded++) {
            tkv_config cfg = make_move_config(4);
            tkv_save_params save;
            tkv_load_params load;
            tkv_layer_info info;
            tkv_cache *kv;
            size_t size;
            int seq = 0, n_refused = 0;
            cfg.model.window = WINDOW;
            kv = create_cache(&cfg);
            s.n = other.n = 0;
            append_plain(kv, 0, &s, 0, BEFORE, BEFORE);
            append_plain(kv, 1, &other, 0, BEFORE, BEFORE);
            CHECK_EQ(by_copy ? tkv_seq_copy(kv, 1, 0, BEFORE, 0, JUMP)
                             : append_at_positions(kv, 0, &s, 100, BEFORE, positions),
                     TKV_OK);
            for (t = 0; t < STEPS; t++) {
                if (t == SAVED_AT && is_loaded) {
                    memset(&save, 0, sizeof save);
                    memset(&load, 0, sizeof load);
                    seq = load.seq = 2;
                    CHECK_EQ(tkv_seq_save(kv, &save, file, sizeof file, &size), TKV_OK);
                    CHECK_EQ(tkv_seq_load(kv, &load, file, size, NULL), TKV_OK);
                }
                for (layer = 0; layer < 2; layer++) {
                    CHECK_EQ(tkv_append(kv, seq, layer, k_in, v_in, 1), TKV_OK);
                    n_refused += tkv_attend(kv, seq, layer, k_in, 1, v_out) != TKV_OK;
                }
                if (t != SAVED_AT + 1) continue;
                CHECK_EQ(tkv_get_layer(kv, seq, 0, &info), TKV_OK);
                CHECK_EQ(info.expired, BEFORE);
                CHECK_EQ(tkv_seq_copy(kv, seq, JUMP / 2, TKV_UNLIMITED, 3, JUMP / 2), TKV_OK);
                CHECK_EQ(tkv_seq_shift(kv, seq, 0, TKV_UNLIMITED, 1), TKV_OK);
                CHECK_EQ(tkv_seq_truncate(kv, seq, tkv_get_length(kv, seq, 0) - 2), TKV_OK);
            }
            CHECK_EQ(n_refused, 0);
            check_cache_at(kv, "by copy", by_copy);
            tkv_destroy(kv);
        }
}

/* Some of the tokens that are left moved down beside expired ones, which stay where they were. A cut to where the window
 * of the last token reaches these is refused, as without the move. */
TEST(cuts_near_tokens_that_moved_alone) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(2);
    tkv_layer_info info;
    tkv_cache *kv;
    char refused[200];
    cfg.model.window = 127;
    kv = create_cache(&cfg);
    append_plain(kv, 0, &s, 0, 401, 100);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, info.expired + 68), TKV_ERR_RANGE);
    sprintf(refused, "%s", tkv_get_last_error(kv));
    CHECK_EQ(tkv_seq_shift(kv, 0, info.expired, info.expired + 54, -100), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, info.expired + 68), TKV_ERR_RANGE);
    CHECK_STR(tkv_get_last_error(kv), refused);
    check_cache_at(kv, "moved", 0);
    tkv_destroy(kv);
}

/* A step failed after its first layer, and the host takes its token back by position, as llama.cpp does. */
TEST(half_a_step_is_removed) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1);
    tkv_cache *kv = create_cache(&cfg);
    int layer, position;
    append_plain(kv, 0, &s, 0, 10, 10);
    CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 1), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 10, TKV_UNLIMITED), TKV_OK);
    for (layer = 0; layer < 2; layer++) {
        CHECK_EQ(tkv_get_length(kv, 0, layer), 10);
        CHECK_EQ(tkv_append(kv, 0, layer, k_in, v_in, 1), TKV_OK);
        CHECK_EQ(tkv_get_positions(kv, 0, layer, 10, 1, &position), TKV_OK);
        CHECK_EQ(position, 10);
    }
    check_cache_at(kv, "removed", 0);
    tkv_destroy(kv);
}

/* Removed tokens at the borders of a range get no position, so they refuse none. */
TEST(removed_tokens_refuse_no_move) {
    static plain_sequence s, copied;
    int sinks, i;
    for (sinks = 0; sinks < 2; sinks++) {
        tkv_config cfg = make_move_config(2);
        tkv_cache *kv;
        if (!sinks) cfg.tiers.sink_tokens = TKV_OFF;
        kv = create_cache(&cfg);
        memset(&s, 0, sizeof s);
        memset(&copied, 0, sizeof copied);
        append_plain(kv, 0, &s, 0, 320, 64);
        CHECK_EQ(tkv_seq_remove(kv, 0, 0, 20), TKV_OK);
        remove_plain(&s, 0, 20);
        CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, -21), TKV_ERR_RANGE);
        CHECK_STR(tkv_get_last_error(kv), "a token would get position -1; positions are 0 to 2^30 - 1");
        CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, -20), TKV_OK);
        shift_plain(&s, 0, 1 << 30, -20);
        check_plain(kv, 0, &s, &cfg, 1e-9);
        /* At the end: tokens up to 2^30 - 1, and evicted ones behind them in the same block. */
        CHECK_EQ(tkv_seq_remove(kv, 0, 200, 290), TKV_OK);
        remove_plain(&s, 200, 290);
        CHECK_EQ(tkv_seq_shift(kv, 0, 150, 290, (1 << 30) - 200), TKV_OK);
        shift_plain(&s, 150, 290, (1 << 30) - 200);
        CHECK_EQ(tkv_seq_shift(kv, 0, 1 << 20, TKV_UNLIMITED, 1), TKV_ERR_RANGE);
        CHECK_EQ(tkv_seq_shift(kv, 0, 1 << 20, TKV_UNLIMITED, 150 - ((1 << 30) - 50)), TKV_OK);
        shift_plain(&s, 1 << 20, 1 << 30, 150 - ((1 << 30) - 50));
        check_plain(kv, 0, &s, &cfg, 1e-9);
        CHECK_EQ(tkv_seq_remove(kv, 0, 40, 60), TKV_OK);
        remove_plain(&s, 40, 60);
        for (i = 0; i < 40; i++) copied.token[copied.n++] = s.token[i];
        CHECK_EQ(tkv_seq_copy(kv, 0, 0, 60, 1, (1 << 30) - 39), TKV_ERR_RANGE);
        CHECK_EQ(tkv_seq_copy(kv, 0, 0, 60, 1, (1 << 30) - 40), TKV_OK);
        CHECK_EQ(tkv_seq_shift(kv, 1, 0, TKV_UNLIMITED, 40 - (1 << 30)), TKV_OK);
        check_plain(kv, 1, &copied, &cfg, 1e-9);
        check_cache_at(kv, "moved", sinks);
        tkv_destroy(kv);
    }
}

/* After a cut among removed tokens whose positions would be negative, the next token gets position 0. */
TEST(a_cut_before_the_first_token_goes_on_at_0) {
    int of_rope, position = -1;
    for (of_rope = 0; of_rope < 2; of_rope++) {
        tkv_config cfg = make_move_config(1);
        tkv_layer_config layers[2];
        tkv_cache *kv;
        memset(layers, 0, sizeof layers);
        if (!of_rope) layers[0].rope.dim = layers[1].rope.dim = TKV_OFF;
        cfg.layers = layers;
        cfg.tiers.sink_tokens = TKV_OFF;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 60, 60), TKV_OK);
        CHECK_EQ(tkv_seq_remove(kv, 0, 0, 20), TKV_OK);
        CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, -20), TKV_OK);
        CHECK_EQ(tkv_seq_truncate(kv, 0, 10), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 100, 7), TKV_OK);
        CHECK_EQ(tkv_get_positions(kv, 0, 1, 10, 1, &position), TKV_OK);
        CHECK_EQ(position, 0);
        check_cache_at(kv, "cut", of_rope);
        tkv_destroy(kv);
    }
}

/* 1 if every layer of a sequence that takes tokens goes on at a position. */
static int is_next_position(tkv_cache *kv, int seq, int n_layers, int position) {
    tkv_append_params p;
    int layer, n_wrong = 0;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.positions = &position;
    for (layer = 0; layer < n_layers; layer += 2) { /* layer 1 has no cache */
        p.layer = layer;
        n_wrong += tkv_append_ex(kv, &p) != TKV_OK;
    }
    return n_wrong == 0;
}

/* Of three layers one has no cache, and the last one has a window. After a shift and a removal the last tokens of a cut
 * sequence are gone, and behind the window all are: the next token has the same position in each layer, a fork, a copy
 * and a file. tkv_seq_remove finds what is appended there. */
TEST(layers_go_on_at_the_same_position) {
    static float k[400 * 8];
    static unsigned char file[1 << 20];
    int n, layer, t, s, position;
    for (n = 100; n < 360; n += 13) {
        tkv_config cfg = make_sized_config(3, 1, 1, 8, 3, 512);
        tkv_layer_config layers[3];
        tkv_save_params save;
        tkv_load_params load;
        tkv_cache *kv, *twin;
        size_t size;
        memset(layers, 0, sizeof layers);
        layers[1].no_cache = 1;
        layers[2].window = 70;
        cfg.layers = layers;
        cfg.model.rope.dim = 8;
        cfg.evict.policy = TKV_EVICT_H2O;
        kv = create_cache(&cfg);
        for (t = 0; t < 2; t++) {
            for (layer = 0; layer < 3; layer += 2)
                CHECK_EQ(tkv_append(kv, 0, layer, k, k, t ? 50 : n), TKV_OK);
            if (t == 0) CHECK_EQ(tkv_seq_shift(kv, 0, 5, TKV_UNLIMITED, 10), TKV_OK);
        }
        CHECK_EQ(tkv_seq_remove(kv, 0, 30, n + 30), TKV_OK);
        CHECK(is_next_position(kv, 0, 3, n + 60));
        if (tkv_seq_fork(kv, 0, 1, n)) { /* the window of token n reaches expired ones */
            tkv_destroy(kv);
            continue;
        }
        memset(&save, 0, sizeof save);
        memset(&load, 0, sizeof load);
        save.length = n;
        load.seq = 2;
        CHECK_EQ(tkv_seq_save(kv, &save, file, sizeof file, &size), TKV_OK);
        CHECK_EQ(tkv_seq_load(kv, &load, file, size, NULL), TKV_OK);
        CHECK_EQ(tkv_seq_truncate(kv, 0, n), TKV_OK);
        for (s = 0; s < 3; s++) CHECK_MSG(is_next_position(kv, s, 3, n + 10), "sequence %d, %d tokens", s, n);
        for (layer = 0; layer < 3; layer += 2) {
            CHECK_EQ(tkv_get_positions(kv, 0, layer, n - 1, 1, &position), TKV_OK);
            CHECK_EQ(position, n + 9);
        }
        /* The range has no token, but what follows is behind it. Nothing else tells it then, so files have it. */
        for (s = 0; s < 2; s++)
            CHECK_EQ(tkv_seq_shift(kv, s, n + 9, s ? n + 10 : TKV_UNLIMITED, 20 + s), TKV_OK);
        save.length = 0;
        CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
        CHECK_EQ(tkv_seq_save(kv, &save, file, sizeof file, &size), TKV_OK);
        CHECK_EQ(tkv_seq_load(kv, &load, file, size, NULL), TKV_OK);
        save.seq = load.seq = TKV_ALL_SEQS;
        CHECK_EQ(tkv_seq_save(kv, &save, file, sizeof file, &size), TKV_OK);
        twin = create_cache(&cfg);
        CHECK_EQ(tkv_seq_load(twin, &load, file, size, NULL), TKV_OK);
        for (s = 0; s < 3; s++) {
            CHECK_MSG(is_next_position(kv, s, 3, n + 30 + s % 2), "sequence %d, %d tokens", s, n);
            CHECK_MSG(is_next_position(twin, s, 3, n + 30 + s % 2), "twin %d, %d tokens", s, n);
        }
        /* An aborted step leaves it as it was. What is appended there is found by its position. */
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        for (t = 0; t < 2; t++) {
            for (layer = 0; layer < 3; layer += 2) CHECK_EQ(tkv_append(kv, 0, layer, k, k, 10), TKV_OK);
            if (t == 0) {
                CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
                CHECK(is_next_position(kv, 0, 3, n + 30));
            }
        }
        CHECK_EQ(tkv_seq_remove(kv, 0, n + 30, n + 35), TKV_OK);
        for (layer = 0; layer < 3; layer += 2)
            for (t = 0; t < 10; t++)
                CHECK_EQ(tkv_read(kv, 0, layer, n + t, 1, k, k + 8), t < 5 ? TKV_ERR_RANGE : TKV_OK);
        check_cache(kv);
        check_cache(twin);
        tkv_destroy(kv);
        tkv_destroy(twin);
    }
}

/* An eviction that frees a block makes the one before it list its tokens. tkv_seq_keep refuses these, though they are
 * exact, and nothing changes. */
TEST(tokens_before_a_freed_block_are_not_kept) {
    static const int indices[] = {60, 61, 135};
    uint64_t victims[3] = {0, 0, 0};
    tkv_config cfg = make_sized_config(1, 1, 1, 16, 1, 200);
    tkv_cache *kv;
    float k[16], v[16];
    int t;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.evict.policy = TKV_EVICT_H2O;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 140, 140), TKV_OK);
    for (t = 68; t < 132; t++) add_to_mask(victims, t);
    CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, 140), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 60, indices, 3), TKV_ERR_STATE);
    CHECK_EQ(tkv_get_length(kv, 0, 0), 140);
    CHECK_EQ(tkv_read(kv, 0, 0, 67, 1, k, v), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 132, indices + 2, 1), TKV_OK); /* behind it they are kept */
    check_cache(kv);
    tkv_destroy(kv);
}

/* >>positions of new tokens */
/* An append without positions ends before 2^30, as one with positions does. */
TEST(positions_end_before_2_to_the_30) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(2);
    tkv_cache *kv = create_cache(&cfg);
    tkv_append_params p;
    const int position = (1 << 30) - 3;
    int last = 0, round;
    memset(&s, 0, sizeof s);
    memset(&p, 0, sizeof p);
    p.k = k_in;
    p.v = v_in;
    CHECK_EQ(append_at_positions(kv, 0, &s, 0, 1, &position), TKV_OK);
    for (round = 0; round < 2; round++) {
        p.n = round ? 1 : 3;
        CHECK_EQ(tkv_append_ex(kv, &p), TKV_ERR_RANGE);
        CHECK_STR(tkv_get_last_error(kv),
                  "a token would get position 1073741824; positions are 0 to 2^30 - 1");
        p.n = 0;
        CHECK_EQ(tkv_append_ex(kv, &p), TKV_OK);
        if (!round) append_plain(kv, 0, &s, 1, 2, 2);
    }
    CHECK_EQ(tkv_get_positions(kv, 0, 1, 2, 1, &last), TKV_OK);
    CHECK_EQ(last, (1 << 30) - 1);
    check_cache_at(kv, "at the end", 0);
    CHECK_EQ(tkv_seq_remove(kv, 0, 0, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 0);
    tkv_destroy(kv);
}

/* Positions repeat and jump forward, as those of images do: each token sees all before it. */
TEST(tokens_take_the_positions_given) {
    static plain_sequence s;
    static int got[MAX_TOKENS];
    int round, t, meta;
    for (meta = 0; meta < 2; meta++) {
        tkv_config cfg = make_move_config(2);
        tkv_rng rng = tkv_rng_seed(5);
        int at = 7, wrong = 0, position[100];
        tkv_cache *kv;
        if (meta) cfg.importance.sample_every = 1;
        kv = create_cache(&cfg);
        memset(&s, 0, sizeof s);
        for (round = 0; round < 20; round++) {
            const int n = 1 + tkv_rng_below(&rng, 60), kind = tkv_rng_below(&rng, 3);
            for (t = 0; t < n; t++) {
                position[t] = at;
                if (kind == 0) at++;                              /* text */
                if (kind == 1) at += t % 8 == 7;                  /* rows of an image */
                if (kind == 2) at += 1 + tkv_rng_below(&rng, 40); /* gaps */
            }
            at++;
            CHECK_EQ(append_at_positions(kv, 0, &s, 1000 * round, n, position), TKV_OK);
            check_plain(kv, 0, &s, &cfg, 1e-9);
            if (round % 5 == 3) {
                CHECK_EQ(tkv_seq_truncate(kv, 0, s.n - 9), TKV_OK);
                s.n -= 9;
                at = s.token[s.n - 1].position + 1;
            }
            if (round == 10) CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        }
        CHECK_EQ(tkv_get_positions(kv, 0, 1, 0, s.n, got), TKV_OK);
        for (t = 0; t < s.n; t++) wrong += got[t] != s.token[t].position;
        CHECK_EQ(wrong, 0);
        append_plain(kv, 0, &s, 90000, 30, 7); /* goes on behind the last position */
        check_plain(kv, 0, &s, &cfg, 1e-9);
        tkv_destroy(kv);
    }
}

/* Positions that go back: the kernels agree with the reference, in coded tiers, and later tokens see only lower ones. */
TEST(positions_can_go_back) {
    static plain_sequence s;
    tkv_config cfg = make_config(2, 1);
    tkv_rng rng = tkv_rng_seed(8);
    tkv_attend_params p;
    tkv_cache *kv;
    int round, t, position[64], first;
    float scores[MAX_TOKENS], lse[2 * KV_HEADS], q[2 * KV_HEADS * DIM], out[2 * KV_HEADS * V_DIM];
    cfg.model.rope.dim = DIM;
    cfg.host.precise = 1;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    for (round = 0; round < 40; round++) {
        const int n = 1 + tkv_rng_below(&rng, 40);
        first = tkv_rng_below(&rng, 500);
        for (t = 0; t < n; t++) position[t] = first + t;
        CHECK_EQ(append_at_positions(kv, 0, &s, 100 * round, n, position), TKV_OK);
        check_cache_at(kv, "went back", round);
        memset(&p, 0, sizeof p);
        CHECK_LE(reference_error(kv, 0, round % 2, &p, n < 8 ? 1 : 8), 0.005);
    }
    /* A query at position 250, in a block of its own. */
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    position[0] = 250;
    CHECK_EQ(append_at_positions(kv, 0, &s, 5000, 1, position), TKV_OK);
    memset(&p, 0, sizeof p);
    tkv_rng_fill(&rng, q, COUNT(q), 0.1);
    p.n = 1;
    p.q = q;
    p.out = out;
    p.lse = lse;
    p.scores = scores;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    for (t = 0; t < s.n; t++) CHECK_EQ(scores[t] > 0.0f, s.token[t].position <= 250);
    position[0] = -1;
    CHECK_EQ(append_at_positions(kv, 0, &s, 0, 1, position), TKV_ERR_RANGE);
    CHECK_STR(tkv_get_last_error(kv), "token_positions has -1; positions are 0 to 2^30 - 1");
    position[0] = 1 << 30;
    CHECK_EQ(append_at_positions(kv, 0, &s, 0, 1, position), TKV_ERR_RANGE);
    tkv_destroy(kv);
}

/* A window goes by position; positions near expired ones are refused. */
TEST(windows_follow_the_positions_given) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1);
    tkv_attend_params p;
    tkv_cache *kv;
    int t, position[100];
    cfg.model.window = 100;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    memset(&p, 0, sizeof p);
    append_plain(kv, 0, &s, 0, 700, 100);
    for (t = 0; t < 100; t++) position[t] = 720 + 2 * t;
    CHECK_EQ(append_at_positions(kv, 0, &s, 1000, 100, position), TKV_OK);
    CHECK_LE(reference_error(kv, 0, 0, &p, 50), 1e-4);
    position[0] = 300;
    CHECK_EQ(append_at_positions(kv, 0, &s, 1000, 1, position), TKV_ERR_RANGE);
    CHECK_STR(tkv_get_last_error(kv), "tokens that the window of position 300 reaches have expired");
    tkv_destroy(kv);
}

static plain_sequence with_jumps; /* what append_jumps appends to */

static tkv_status append_jumps(tkv_cache *kv, int i) {
    int t, position[60];
    for (t = 0; t < 60; t++) position[t] = 1000 + 3 * t;
    return append_at_positions(kv, 0, &with_jumps, 1000 * i, 60, position);
}

/* Entries for jumps are provided before anything changes. */
TEST(jumps_without_memory_change_nothing) {
    int fail_at, failed = 0;
    for (fail_at = 1; fail_at < 6; fail_at++) {
        counting_allocator p;
        tkv_config cfg = make_config(1, 1);
        tkv_cache *kv;
        cfg.host.allocator = counting_allocator_of(&p);
        kv = create_cache(&cfg);
        memset(&with_jumps, 0, sizeof with_jumps);
        append_plain(kv, 0, &with_jumps, 0, 300, 100);
        if (change_without_memory(kv, &p, fail_at, append_jumps, 1)) failed++;
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
    }
    CHECK(failed > 0);
}

/* Spans inside a causal chunk: each row sees to its row_ends, as with a mask over all keys. */
TEST(rows_see_to_their_ends) {
    enum { N = 60, LEN = 400 };
    static float q[N * 2 * KV_HEADS * DIM], out[N * 2 * KV_HEADS * V_DIM], want[N * 2 * KV_HEADS * V_DIM];
    static float mask[N * LEN];
    static const tkv_format formats[] = {TKV_F32, TKV_KIVI4, TKV_INT8};
    int f, t, j, n, ends[N];
    tkv_rng rng = tkv_rng_seed(31);
    for (f = 0; f < COUNT(formats); f++)
        for (n = 1; n <= N; n += 59) { /* one row, and rows for the kernels of many */
            tkv_config cfg = make_config(1, 1);
            tkv_attend_params p;
            tkv_cache *kv;
            cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = formats[f];
            cfg.host.precise = 1;
            kv = create_cache(&cfg);
            CHECK_EQ(append_to_all_layers(kv, 0, 3, LEN - N, 80), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 0, 3, N, N), TKV_OK);
            tkv_rng_fill(&rng, q, COUNT(q), 1.0);
            for (t = 0; t < n; t++) {
                const int index = LEN - n + t;
                ends[t] =
                    index % 20 < 12 ? index / 20 * 20 + 12 : index + 1; /* the first 12 of 20 are a span */
                if (ends[t] > LEN) ends[t] = LEN;
                for (j = 0; j < LEN; j++) mask[t * LEN + j] = j < ends[t] ? 0.0f : -1e30f;
            }
            memset(&p, 0, sizeof p);
            p.n = n;
            p.q = q;
            p.out = want;
            p.non_causal = 1;
            p.mask = mask;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            p.out = out;
            p.non_causal = 0;
            p.mask = NULL;
            p.row_ends = ends;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            CHECK_LE(mean_squared_difference(out, want, n * 2 * KV_HEADS * V_DIM), 1e-10);
            CHECK_LE(reference_error(kv, 0, 0, &p, n), 0.005);
            ends[0] = LEN - n; /* a row sees itself */
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
            ends[0] = LEN + 1;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
            tkv_destroy(kv);
        }
}

/* Queries of tokens that are not the last ones: as when they were the last, and as the reference. */
TEST(queries_of_older_tokens) {
    enum { LEN = 500, N = 60, WINDOW = 90 };
    static float q[N * 2 * KV_HEADS * DIM], out[N * 2 * KV_HEADS * V_DIM], want[N * 2 * KV_HEADS * V_DIM];
    static float halves[N * 2 * KV_HEADS * V_DIM];
    static const int sizes[] = {1, 9, N};
    tkv_rng rng = tkv_rng_seed(11);
    int i, window, first, ends[N];
    tkv_rng_fill(&rng, q, COUNT(q), 1.5);
    for (i = 0; i < COUNT(sizes); i++)
        for (window = 0; window <= WINDOW; window += WINDOW)
            for (first = 37; first + sizes[i] <= LEN; first += 61) {
                const int n = sizes[i];
                tkv_config cfg = make_f32_config(1, 2);
                tkv_attend_params p;
                tkv_cache *kv;
                tkv_rows rows[2];
                int both[2], t;
                cfg.model.window = 0;
                kv = create_cache(&cfg);
                CHECK_EQ(append_to_all_layers(kv, 0, 3, first + n, 70), TKV_OK);
                memset(&p, 0, sizeof p);
                p.n = n;
                p.q = q;
                p.window = window;
                p.out = want;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
                CHECK_EQ(append_to_all_layers(kv, 0, 3, LEN - first - n, 70), TKV_OK);
                p.first_queries = &first;
                p.out = out;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
                CHECK_LE(mean_squared_difference(out, want, n * 2 * KV_HEADS * V_DIM), 1e-10);
                CHECK_LE(reference_error(kv, 0, 0, &p, n), 0.005);
                p.batch = rows; /* the rows of a chunk in two calls, and both as entries of one */
                p.n_batch = 2;
                rows[0].seq = rows[1].seq = 0;
                rows[0].n = n / 3;
                rows[1].n = n - n / 3;
                both[0] = first;
                both[1] = first + n / 3;
                p.first_queries = both;
                p.out = halves;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
                CHECK_LE(mean_squared_difference(halves, want, n * 2 * KV_HEADS * V_DIM), 1e-10);
                p.batch = NULL;
                p.first_queries = &first;
                p.row_ends = ends;
                for (t = 0; t < n; t++) ends[t] = first + t + 1 < LEN ? first + t + 2 : LEN;
                CHECK_LE(reference_error(kv, 0, 0, &p, n), 0.005);
                ends[0] = first; /* a row sees itself */
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
                p.row_ends = NULL;
                both[0] = -1;
                p.first_queries = both;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
                both[0] = LEN - n + 1;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_RANGE);
                CHECK_EQ(tkv_attend_reference(kv, &p), TKV_ERR_RANGE);
                both[0] = INT_MAX;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_RANGE);
                tkv_destroy(kv);
            }
}

/* One context in two sequences, as in two processes: stripes of it by turns, each with queries at their positions. What
 * the parts give is joined, and is what one sequence gives. */
TEST(one_context_in_stripes) {
    enum { LEN = 700, N = 60, HEADS = 2 * KV_HEADS };
    static const int border[] = {0, 132, 388, 516, LEN}; /* by turns of sequences 1 and 2 */
    static const tkv_format formats[] = {TKV_F32, TKV_KIVI4, TKV_INT8};
    static const int sizes[] = {1, 9, N}, windows[] = {0, 90, 400};
    static float q[N * HEADS * DIM], want[N * HEADS * V_DIM], out[2][N * HEADS * V_DIM];
    static float lse[2][N * HEADS], want_lse[N * HEADS];
    static const float slopes[HEADS] = {0.5f, 0.001f};
    tkv_rng rng = tkv_rng_seed(41);
    int f, i, w, r, with_slopes, position[N];
    tkv_rng_fill(&rng, q, COUNT(q), 1.5);
    for (f = 0; f < COUNT(formats); f++) {
        tkv_config cfg = make_config(1, 3);
        tkv_cache *kv;
        cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = formats[f];
        cfg.host.precise = 1;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 3, LEN, 50), TKV_OK);
        for (i = 0; i < COUNT(border) - 1; i++)
            CHECK_EQ(tkv_seq_copy(kv, 0, border[i], border[i + 1], 1 + i % 2, border[i]), TKV_OK);
        for (i = 0; i < COUNT(sizes); i++)
            for (w = 0; w < COUNT(windows); w++)
                for (with_slopes = 0; with_slopes < 2; with_slopes++) {
                    const int n = sizes[i];
                    tkv_attend_params p;
                    if (n == N && (f + w + with_slopes) % tkv_test_stride(3, 1)) continue;
                    memset(&p, 0, sizeof p);
                    p.n = n;
                    p.q = q;
                    p.window = windows[w];
                    p.alibi_slopes = with_slopes ? slopes : NULL;
                    p.out = want;
                    p.lse = want_lse;
                    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
                    for (r = 0; r < n; r++) position[r] = LEN - n + r;
                    p.query_positions = position;
                    p.out = out[0]; /* the queries of a sequence itself */
                    p.lse = lse[0];
                    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
                    CHECK(memcmp(out[0], want, (size_t)(n * HEADS * V_DIM) * sizeof *want) == 0);
                    CHECK(memcmp(lse[0], want_lse, (size_t)(n * HEADS) * sizeof *want_lse) == 0);
                    for (r = 0; r < 2; r++) {
                        p.seq = 1 + r;
                        p.out = out[r];
                        p.lse = lse[r];
                        CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
                        CHECK_LE(reference_error(kv, p.seq, 0, &p, n), 0.005);
                    }
                    tkv_merge_attention(out[0], lse[0], out[1], lse[1], n * HEADS, V_DIM);
                    CHECK_LE(mean_squared_difference(out[0], want, n * HEADS * V_DIM), 1e-12);
                    CHECK_LE(mean_squared_difference(lse[0], want_lse, n * HEADS), 1e-10);
                }
        tkv_destroy(kv);
    }
}

/* Queries that are no tokens of the sequence: it can be empty, shorter than the queries, and newer than them. */
TEST(queries_of_other_sequences) {
    enum { N = 40, HEADS = 2 * KV_HEADS };
    static float q[N * HEADS * DIM], out[N * HEADS * V_DIM], lse[N * HEADS];
    tkv_config cfg = make_config(1, 2);
    tkv_attend_params p;
    tkv_layer_info info;
    tkv_cache *kv;
    tkv_rng rng = tkv_rng_seed(42);
    int i, r, n, position[N], first = 0, ends[N];
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    memset(&p, 0, sizeof p);
    p.q = q;
    p.out = out;
    p.lse = lse;
    p.query_positions = position;
    cfg.model.rope.dim = DIM; /* so that keys can move */
    for (r = 0; r < N; r++) position[r] = 100 + r;
    kv = create_cache(&cfg);
    for (i = 0; i < 3; i++) {
        const int from = i == 2 ? 5000 : 0; /* no key; keys at 0 .. 2; then keys behind all queries */
        if (i == 1) CHECK_EQ(append_to_all_layers(kv, 0, 3, 3, 3), TKV_OK);
        if (i == 2) CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, from), TKV_OK);
        for (n = 1; n <= N; n += N - 1) {
            p.n = n;
            memset(out, 1, sizeof out);
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            CHECK_LE(reference_error(kv, 0, 0, &p, n), 0.005);
            for (r = 0; r < n * HEADS; r++) CHECK_EQ(tkv_test_is_finite((double)lse[r]), i == 1);
            for (r = 0; r < n * HEADS * V_DIM && i != 1; r++) CHECK(out[r] == 0.0f);
            p.non_causal = 1; /* all keys */
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            CHECK_LE(reference_error(kv, 0, 0, &p, n), 0.005);
            for (r = 0; r < n * HEADS; r++) CHECK_EQ(tkv_test_is_finite((double)lse[r]), i > 0);
            p.non_causal = 0;
        }
    }
    p.first_queries = &first;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    p.first_queries = NULL;
    p.row_ends = ends;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    p.row_ends = NULL;
    p.window = INT_MAX; /* of moved keys */
    p.n = 1;
    position[0] = 6000;
    CHECK_LE(reference_error(kv, 0, 0, &p, 1), 0.005);
    position[0] = 0;
    p.non_causal = 1;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    CHECK(tkv_test_is_finite((double)lse[0]));
    p.non_causal = 0;
    p.window = 0;
    p.n = N;
    position[N - 1] = -1;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_ERR_ARG);
    position[N - 1] = 1 << 30;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    position[N - 1] = (1 << 30) - 1;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    tkv_destroy(kv);
    kv = create_cache(&cfg); /* discarded tokens of which some queries see none */
    CHECK_EQ(append_to_all_layers(kv, 0, 3, 600, 50), TKV_OK);
    CHECK_EQ(tkv_seq_discard(kv, 0, 256, &n), TKV_OK);
    p.n = 1;
    for (r = 0; r < 700; r++) {
        position[0] = r;
        CHECK_EQ(tkv_attend_ex(kv, &p), r < 4 ? TKV_OK : TKV_ERR_NO_SOURCE);
    }
    tkv_destroy(kv);
    cfg.model.window = 100; /* keys that a query needs can have expired */
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 3, 600, 50), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.expired > 200 && info.expired < 450);
    p.n = 1;
    for (i = 0; i < 2; i++) {
        for (r = 0; r < 800; r++) {
            const int is_there = r - 99 >= info.expired;
            position[0] = r + 5 * i;
            CHECK_EQ(tkv_attend_ex(kv, &p), is_there ? TKV_OK : TKV_ERR_RANGE);
            if (is_there) CHECK_LE(reference_error(kv, 0, 0, &p, 1), 0.02);
        }
        if (i == 0) CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, 5), TKV_OK);
    }
    tkv_destroy(kv);
}

/* A sequence that does not grow is sampled as often by queries of other sequences as one that does, whatever its
 * length. */
TEST(queries_of_other_sequences_are_sampled) {
    NEEDS_ATOMICS;
    static float q[2 * KV_HEADS * DIM], out[2 * KV_HEADS * V_DIM], score[300];
    tkv_rng rng = tkv_rng_seed(3);
    double first = 0.0;
    int len, layer, i, position;
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    for (len = 192; len < 200; len++) {
        tkv_config cfg = make_config(2, 2);
        tkv_attend_params p;
        tkv_cache *kv;
        cfg.evict.policy = TKV_EVICT_H2O;
        cfg.importance.sample_every = 8;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, len, 20), TKV_OK);
        memset(&p, 0, sizeof p);
        p.n = 1;
        p.q = q;
        p.out = out;
        p.query_positions = &position;
        for (position = len; position < len + 256; position++)
            for (layer = 0; layer < 2; layer++) {
                p.layer = layer;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            }
        for (layer = 0; layer < 2; layer++) {
            double sum = 0.0;
            CHECK_EQ(tkv_get_importance(kv, 0, layer, 0, len, score, NULL), TKV_OK);
            for (i = 0; i < len; i++) sum += (double)score[i];
            if (first <= 0.0) first = sum;
            CHECK_MSG(sum > 0.9 * first && sum < 1.1 * first, "%d tokens, layer %d: %g and %g", len, layer,
                      sum, first);
        }
        tkv_destroy(kv);
    }
    CHECK(first > 100.0);
}

/* Old queries of a layer with a window, as far as no key of theirs has expired. And before discarded tokens. */
TEST(older_queries_need_their_keys) {
    static float q[2 * KV_HEADS * DIM], out[2 * KV_HEADS * V_DIM];
    tkv_config cfg = make_config(1, 1);
    tkv_attend_params p;
    tkv_layer_info info;
    tkv_cache *kv;
    int first, n, n_seen = 0;
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = q;
    p.out = out;
    p.first_queries = &first;
    cfg.model.window = 100;
    cfg.model.rope.dim = DIM;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 3, 600, 50), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.expired > 200 && info.expired < 450);
    for (n = 0; n < 2; n++) {
        for (first = 0; first < 600; first++) {
            const int is_there = first - 99 >= info.expired;
            n_seen += is_there;
            CHECK_EQ(tkv_attend_ex(kv, &p), is_there ? TKV_OK : TKV_ERR_RANGE);
            CHECK_EQ(tkv_attend_reference(kv, &p), is_there ? TKV_OK : TKV_ERR_RANGE);
        }
        CHECK_EQ(tkv_seq_shift(kv, 0, 595, TKV_UNLIMITED, 5), TKV_OK); /* the same after a move */
    }
    CHECK(n_seen > 200);
    tkv_destroy(kv);
    cfg.model.window = 0;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 3, 600, 50), TKV_OK);
    CHECK_EQ(tkv_seq_discard(kv, 0, 256, &n), TKV_OK);
    CHECK_EQ(n, 256);
    fill_rows(3, 0, 4, 64, k_in, v_in);
    CHECK_EQ(tkv_restore(kv, 0, 0, 4, k_in, v_in, 64), TKV_OK); /* 68 .. 259 are still discarded */
    for (first = 0; first < 600; first++)
        CHECK_EQ(tkv_attend_ex(kv, &p), first < 68 ? TKV_OK : TKV_ERR_NO_SOURCE);
    first = 50;
    CHECK_LE(reference_error(kv, 0, 0, &p, 1), 0.02);
    tkv_destroy(kv);
}

/* A batch with padding on the left gives what it gives without. */
TEST(padded_batches_equal_packed_ones) {
    enum { WIDTH = 40, SEQS = 3 };
    static float q[SEQS * WIDTH * 2 * KV_HEADS * DIM], out[SEQS * WIDTH * 2 * KV_HEADS * V_DIM],
        want[SEQS * WIDTH * 2 * KV_HEADS * V_DIM], lse[SEQS * WIDTH * 2 * KV_HEADS];
    static float packed[SEQS * WIDTH * 2 * KV_HEADS * DIM];
    static float k[SEQS * WIDTH * K_ROW], v[SEQS * WIDTH * V_ROW];
    const int n[SEQS] = {40, 7, 23};
    tkv_config cfg = make_f32_config(1, 2 * SEQS);
    tkv_cache *kv = create_cache(&cfg);
    tkv_rng rng = tkv_rng_seed(2);
    tkv_append_params a;
    tkv_attend_params p;
    tkv_rows rows[SEQS];
    int i, j, first[SEQS], n_before = 0;
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    for (i = 0; i < COUNT(k); i++) k[i] = (float)NAN;
    for (i = 0; i < COUNT(v); i++) v[i] = (float)NAN;
    for (i = 0; i < COUNT(out); i++) out[i] = 77.0f;
    for (i = 0; i < SEQS; i++) {
        rows[i].seq = i;
        rows[i].n = n[i];
        first[i] = i * WIDTH + WIDTH - n[i];
        fill_rows(i, 0, 0, n[i], k + first[i] * K_ROW, v + first[i] * V_ROW);
        CHECK_EQ(tkv_append(kv, SEQS + i, 0, k + first[i] * K_ROW, v + first[i] * V_ROW, n[i]), TKV_OK);
        memcpy(packed + n_before * 2 * KV_HEADS * DIM, q + first[i] * 2 * KV_HEADS * DIM,
               (size_t)(n[i] * 2 * KV_HEADS * DIM) * sizeof *q);
        n_before += n[i];
    }
    memset(&a, 0, sizeof a);
    a.batch = rows;
    a.n_batch = SEQS;
    a.k = k;
    a.v = v;
    a.first_rows = first;
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_OK);
    memset(&p, 0, sizeof p);
    p.batch = rows;
    p.n_batch = SEQS;
    p.q = q;
    p.out = out;
    p.lse = lse;
    p.first_rows = first;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    for (i = 0; i < SEQS; i++) rows[i].seq = SEQS + i;
    p.q = packed;
    p.out = want;
    p.first_rows = NULL;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    for (i = 0, n_before = 0; i < SEQS; n_before += n[i++]) {
        const float *row = out + i * WIDTH * 2 * KV_HEADS * V_DIM;
        const int pad = (WIDTH - n[i]) * 2 * KV_HEADS * V_DIM;
        CHECK_MEM(row + pad, want + n_before * 2 * KV_HEADS * V_DIM,
                  (size_t)(n[i] * 2 * KV_HEADS * V_DIM) * sizeof(float));
        for (j = 0; j < pad; j++) CHECK(row[j] == 77.0f);
    }
    first[1] = -1;
    p.first_rows = first;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    CHECK_EQ(tkv_append_ex(kv, &a), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* >>copies */
static void copy_plain(const plain_sequence *from, int first, int end, plain_sequence *to, int at) {
    int t;
    for (t = 0; t < from->n; t++)
        if (from->token[t].position >= first && from->token[t].position < end) {
            to->token[to->n] = from->token[t];
            to->token[to->n++].position += at - first;
        }
}

/* A document is read once and joins prompts of several lengths. Attention is that over keys made at the new positions.
 * Each sequence goes on for itself. */
TEST(copied_tokens_attend_as_if_read_there) {
    static plain_sequence s[4];
    int meta, seq, round;
    for (meta = 0; meta < 2; meta++) {
        tkv_config cfg = make_move_config(4);
        tkv_cache *kv;
        if (meta) cfg.importance.sample_every = 1;
        kv = create_cache(&cfg);
        memset(s, 0, sizeof s);
        append_plain(kv, 0, &s[0], 0, 500, 100);
        CHECK_EQ(tkv_seq_remove(kv, 0, 130, 141), TKV_OK);
        remove_plain(&s[0], 130, 141);
        for (seq = 1; seq < 4; seq++) {
            const int first = 37 * seq, end = 400 + 20 * seq, at = seq == 3 ? 0 : 70 * seq;
            if (seq < 3) append_plain(kv, seq, &s[seq], 10000 * seq, 70 * seq, 50);
            CHECK_EQ(tkv_seq_copy(kv, 0, first, end, seq, at), TKV_OK);
            copy_plain(&s[0], first, end, &s[seq], at);
            check_plain(kv, seq, &s[seq], &cfg, 1e-9);
        }
        for (round = 0; round < 4; round++)
            for (seq = 0; seq < 4; seq++) {
                append_plain(kv, seq, &s[seq], 1000 * round + 100000 * seq, 25, 10);
                check_plain(kv, seq, &s[seq], &cfg, 1e-9);
            }
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        for (seq = 1; seq < 4; seq++) check_plain(kv, seq, &s[seq], &cfg, 1e-9);
        tkv_destroy(kv);
    }
}

/* A copy can begin and end inside a block that an eviction has merged. */
TEST(copies_of_merged_blocks) {
    static float k[400 * K_ROW];
    tkv_config cfg = make_move_config(2);
    uint64_t victims[7] = {0};
    int from[400], to[400], i, layer, n, n_copied;
    tkv_cache *kv;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 400, 100), TKV_OK);
    for (i = 10; i < 360; i++)
        if (i % 3) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, 400), TKV_OK);
    CHECK(n_layer_blocks(kv, 0, 0) < 7); /* of 8 */
    CHECK_EQ(append_to_all_layers(kv, 1, 2, 20, 20), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 0, 50, 200, 1, 20), TKV_OK);
    check_cache_at(kv, "copied", 0);
    for (layer = 0; layer < 2; layer++) {
        CHECK_EQ(tkv_read(kv, 0, layer, 51, 1, k_want, v_want), TKV_OK);
        n = live_positions(kv, 0, layer, from);
        n_copied = live_positions(kv, 1, layer, to);
        for (i = 0; i < n && from[i] < 50; i++) {}
        CHECK_EQ(n_copied, 20 + 50); /* one in three of 150 */
        for (n = 20; n < n_copied; n++, i++) {
            CHECK_EQ(to[n], from[i] - 30);
            CHECK_EQ(tkv_read(kv, 0, layer, from[i], 1, k, v_want), TKV_OK);
            CHECK_EQ(tkv_read(kv, 1, layer, to[n], 1, k_out, v_out), TKV_OK);
            CHECK_MEM(v_out, v_want, V_ROW * sizeof(float));
        }
    }
    tkv_destroy(kv);
}

/* A layer has lost tokens at the border of a shift, so that the border lies elsewhere in it. Copied tokens still get the
 * same index in all layers: a cut takes the same ones everywhere. */
TEST(copied_tokens_have_one_index) {
    static const int lengths[] = {2, 2 + 5, 2 + 5 + 6, 2 + 5 + 15};
    const uint64_t victims = (uint64_t)7 << 50;
    int evicted, layer, t, i;
    for (evicted = -1; evicted < 2; evicted++) { /* -1: no layer loses any */
        tkv_config cfg = make_move_config(3);
        tkv_cache *kv;
        cfg.evict.policy = TKV_EVICT_SLIDING;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 100), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 1, 2, 2, 2), TKV_OK);
        if (evicted >= 0) CHECK_EQ(evict_tokens(kv, 0, evicted, &victims, 64), TKV_OK);
        CHECK_EQ(tkv_seq_remove(kv, 0, 40, 50), TKV_OK);
        CHECK_EQ(tkv_seq_shift(kv, 0, 50, TKV_UNLIMITED, -10), TKV_OK);
        CHECK_EQ(tkv_seq_copy(kv, 0, 45, 60, 1, 2), TKV_OK); /* indices 45 .. 49, gone, and 55 .. 69 */
        check_cache(kv);
        for (layer = 0; layer < 2; layer++) {
            CHECK_EQ(tkv_get_length(kv, 1, layer), 2 + 5 + 15);
            for (t = 0; t < 5; t++) CHECK_EQ(tkv_read(kv, 1, layer, 2 + t, 1, k_out, v_out), TKV_ERR_RANGE);
            CHECK_EQ(tkv_read(kv, 0, layer, 55, 15, k_want, v_want), TKV_OK);
            CHECK_EQ(tkv_read(kv, 1, layer, 7, 15, k_out, v_out), TKV_OK);
            CHECK_MEM(v_out, v_want, 15 * V_ROW * sizeof(float));
        }
        for (i = 0; i < COUNT(lengths); i++) {
            CHECK_EQ(tkv_seq_fork(kv, 1, 2, lengths[i]), TKV_OK);
            for (layer = 0; layer < 2; layer++) {
                int positions[100];
                CHECK_EQ(live_positions(kv, 2, layer, positions), i < 2 ? 2 : lengths[i] - 5);
            }
        }
        tkv_destroy(kv);
    }
}

/* Tokens that are gone at the end of src take indices of dst, in all layers, and no slot. Later tokens go behind them. */
TEST(copies_of_gone_ends) {
    const uint64_t victims[2] = {0, (uint64_t)0x3ff << 26}; /* 90 .. 99 */
    tkv_config cfg = make_move_config(2);
    tkv_cache *kv;
    int layer, i;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 100, 100), TKV_OK);
    for (layer = 0; layer < 2; layer++) CHECK_EQ(evict_tokens(kv, 0, layer, victims, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 2, 2, 2), TKV_OK);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(tkv_seq_copy(kv, 0, 50, TKV_UNLIMITED, 1, 50 + 100 * i), TKV_OK);
        check_cache(kv);
        for (layer = 0; layer < 2; layer++) {
            const int from = 2 + 50 * i;
            CHECK_EQ(tkv_get_length(kv, 1, layer), from + 50);
            CHECK_EQ(tkv_read(kv, 0, layer, 50, 40, k_want, v_want), TKV_OK);
            CHECK_EQ(tkv_read(kv, 1, layer, from, 40, k_out, v_out), TKV_OK);
            CHECK_MEM(v_out, v_want, 40 * V_ROW * sizeof(float));
            CHECK_EQ(tkv_read(kv, 1, layer, from + 40, 1, k_out, v_out), TKV_ERR_RANGE);
        }
    }
    tkv_destroy(kv);
}

/* The caller told the layers other positions. Each gives its own tokens of the range. */
TEST(copies_of_layers_with_other_positions) {
    static float k[100 * K_ROW], v[100 * V_ROW];
    tkv_config cfg = make_move_config(2);
    tkv_cache *kv = create_cache(&cfg);
    int positions[100], layer, t, n;
    for (layer = 0; layer < 2; layer++) {
        tkv_append_params p;
        memset(&p, 0, sizeof p);
        p.layer = layer;
        p.n = 100;
        p.k = k;
        p.v = v;
        p.token_positions = positions;
        for (t = 0; t < 100; t++) positions[t] = layer ? t : 50 + t;
        CHECK_EQ(tkv_append_ex(kv, &p), TKV_OK);
    }
    CHECK_EQ(tkv_seq_copy(kv, 0, 60, 120, 1, 0), TKV_OK);
    check_cache(kv);
    for (layer = 0; layer < 2; layer++) {
        n = live_positions(kv, 1, layer, positions);
        CHECK_EQ(tkv_get_length(kv, 1, layer), 90); /* indices 10 .. 69, and 60 .. 99 */
        CHECK_EQ(n, layer ? 40 : 60);
        for (t = 0; t < n; t++) CHECK(positions[t] >= 0 && positions[t] < 60);
    }
    tkv_destroy(kv);
}

/* Copies of coded tokens read as they do in the source, and stay so while both go on. */
TEST(copies_of_coded_tokens_keep_their_bytes) {
    static float k[MAX_TOKENS * K_ROW], v[MAX_TOKENS * V_ROW];
    tkv_config cfg = make_config(2, 2);
    tkv_memory_info before, after;
    tkv_cache *kv;
    uint8_t tier[600];
    int t;
    cfg.model.rope.dim = DIM;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 1, 900, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 2, 30, 30), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 1, 100, 500, k, v), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 0, 100, 600, 1, 100), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 530);
    CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
    CHECK_LE(after.total, before.total + 2 * 12 * 200);
    CHECK_EQ(tkv_read(kv, 1, 1, 30, 500, k_out, v_out), TKV_OK);
    CHECK_MEM(k_out, k, 500 * K_ROW * sizeof(float));
    CHECK_MEM(v_out, v, 500 * V_ROW * sizeof(float));
    CHECK_EQ(tkv_get_tiers(kv, 1, 0, 0, 530, tier), TKV_OK);
    CHECK_EQ(tier[10], TKV_TIER_HOT);
    CHECK_EQ(tier[40], TKV_TIER_ARCHIVE); /* as in the source */
    for (t = 0; t < 20; t++) {
        CHECK_EQ(append_to_all_layers(kv, t % 2, 3, 60, 30), TKV_OK);
        check_cache_at(kv, "both go on", t);
    }
    CHECK_EQ(tkv_seq_flush(kv, 1, TKV_FLUSH_FULL), TKV_OK);
    CHECK_EQ(tkv_read(kv, 1, 1, 30, 300, k_out, v_out), TKV_OK);
    CHECK_LE(mean_squared_difference(k_out, k, 300 * K_ROW), 0.5);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    check_cache_at(kv, "the source is gone", 0);
    tkv_destroy(kv);
}

/* Tokens of several sequences: they are appended to one, and the others take them over at each step. That takes the
 * bytes of one sequence. */
TEST(a_token_can_be_in_several_sequences) {
    static plain_sequence s;
    counting_allocator p;
    tkv_config cfg = make_move_config(4);
    tkv_cache *kv;
    size_t one;
    int step, seq;
    cfg.host.allocator = counting_allocator_of(&p);
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 400, 1);
    one = p.held;
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    memset(&s, 0, sizeof s);
    for (step = 0; step < 400; step++) {
        append_plain(kv, 0, &s, step, 1, 1);
        for (seq = 1; seq < 4; seq++) CHECK_EQ(tkv_seq_copy(kv, 0, step, step + 1, seq, step), TKV_OK);
        if (step % 50 == 49)
            for (seq = 0; seq < 4; seq++) check_plain(kv, seq, &s, &cfg, 1e-10);
    }
    CHECK_LE(p.held, 1.3 * (double)one);
    append_plain(kv, 2, &s, 7000, 3, 1); /* from here on alone */
    check_plain(kv, 2, &s, &cfg, 1e-10);
    CHECK_EQ(tkv_get_length(kv, 1, 0), 400);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
}

TEST(copies_are_refused_with_a_reason) {
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv = create_cache(&cfg);
    snapshot before;
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 40, 40), TKV_OK);
    before = snapshot_of(kv);
    CHECK_EQ(tkv_seq_copy(kv, 0, 10, 50, 1, 40), TKV_ERR_UNSUPPORTED);
    CHECK_STR(tkv_get_last_error(kv), "set cfg.model.rope: keys cannot move without the model's RoPE");
    CHECK_EQ(tkv_seq_copy(kv, 0, 10, 50, 0, 10), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_copy(kv, 0, 10, 50, 1, -1), TKV_ERR_ARG);
    CHECK_STR(tkv_get_last_error(kv), "at is -1; positions are not negative");
    CHECK_EQ(tkv_seq_begin(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 0, 40, 50, 1, 40), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_abort(kv, 1), TKV_OK);
    check_unchanged(kv, &before, "refused");
    CHECK_EQ(tkv_seq_copy(kv, 0, 40, 50, 1, 40), TKV_OK); /* the same positions need no RoPE */
    tkv_destroy(kv);
    cfg.limits.max_tokens = 320;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 1, 40, 40), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 0, 0, 300, 1, 0), TKV_ERR_CAPACITY);
    CHECK_STR(tkv_get_last_error(kv), "max_tokens leaves room for 280 more tokens");
    CHECK_EQ(tkv_seq_copy(kv, 0, 0, 280, 1, 0), TKV_OK);
    tkv_destroy(kv);
    cfg = make_config(2, 2);
    cfg.model.window = 64;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 700, 100), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 0, 0, 50, 1, 0), TKV_ERR_RANGE);
    CHECK_STR(tkv_get_last_error(kv), "tokens of the range have expired: layer 0");
    tkv_destroy(kv);
}

/* A full budget makes room for the entries of a copy, but evicts no token that the copy reads. It recodes, offloads,
 * or refuses the call, and then nothing is gone. */
TEST(a_copy_evicts_no_token_that_it_reads) {
    enum { ALONE, OTHERS, OFFLOADED, CASES };
    int budget, n, i, n_copied[CASES] = {0}, n_offloading[CASES] = {0}, n_refused[CASES] = {0};
    for (i = 0; i < CASES; i++)
        for (budget = 100000; budget < 200000; budget += 10000 * tkv_test_stride(3, 2))
            for (n = 420; n < 800; n += 60) {
                tkv_config cfg = make_config(2, 3);
                tkv_memory_info memory;
                tkv_budget_info before, after;
                test_store store;
                snapshot was, is;
                tkv_status st;
                tkv_cache *kv = NULL;
                cfg.evict.policy = TKV_EVICT_SLIDING;
                cfg.budget.bytes = (size_t)budget;
                memset(&store, 0, sizeof store);
                if (i == OFFLOADED) attach_test_store(&store, &cfg);
                kv = create_cache(&cfg);
                if (i == OTHERS) (void)append_to_all_layers(kv, 1, 1, 600, 60);
                (void)append_to_all_layers(kv, 0, 0, n, 60);
                CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
                (void)tkv_set_budget(kv, memory.total);
                CHECK_EQ(tkv_get_budget(kv, &before), TKV_OK);
                was = snapshot_of_tokens(kv);
                st = tkv_seq_copy(kv, 0, 0, TKV_UNLIMITED, 2, 0);
                CHECK_EQ(tkv_get_budget(kv, &after), TKV_OK);
                CHECK_MSG(st == TKV_OK || st == TKV_ERR_BUDGET, "budget %d: %d, %s", budget, (int)st,
                          tkv_get_last_error(kv));
                is = snapshot_of_tokens(kv);
                if (st) {
                    CHECK_MSG(is_same_snapshot(&was, &is), "budget %d: a refused copy changed tokens",
                              budget);
                } else { /* the first tokens of the snapshot are those of sequence 0 */
                    CHECK_MEM(is.bytes, was.bytes,
                              (size_t)(tkv_get_length(kv, 0, 0) + tkv_get_length(kv, 0, 1)) * sizeof st);
                    CHECK_EQ(tkv_get_length(kv, 2, 0), tkv_get_length(kv, 0, 0));
                }
                n_copied[i] += !st;
                n_refused[i] += st != TKV_OK;
                n_offloading[i] += !st && after.offloaded > before.offloaded;
                free_snapshot(&is);
                free_snapshot(&was);
                check_cache_at(kv, "budget", budget);
                tkv_destroy(kv);
                if (i == OFFLOADED) destroy_test_store(&store);
            }
    for (i = 0; i < CASES; i++)
        CHECK_MSG(n_copied[i] > 2 && n_refused[i] > 2 && (n_offloading[i] > 2) == (i == OFFLOADED),
                  "%d copies, %d offloaded, %d refused", n_copied[i], n_offloading[i], n_refused[i]);
}

/* Anchors can be removed, but not moved. */
TEST(anchors_are_removed_and_do_not_move) {
    static plain_sequence s;
    static float q[2 * KV_HEADS * DIM], out[2 * KV_HEADS * V_DIM];
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv;
    uint8_t tiers[60];
    tkv_rng r = tkv_rng_seed(2);
    int layer, t, n_gone = 0;
    cfg.model.rope.dim = DIM;
    cfg.tiers.n_anchors = 16;
    cfg.importance.sample_every = 1;
    kv = create_cache(&cfg);
    for (t = 0; t < 10; t++) {
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 64, 64), TKV_OK);
        tkv_rng_fill(&r, q, COUNT(q), 1.0);
        for (layer = 0; layer < 2; layer++) CHECK_EQ(tkv_attend(kv, 0, layer, q, 1, out), TKV_OK);
    }
    check_cache_at(kv, "anchors", 0);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, 10, 5), TKV_ERR_UNSUPPORTED);
    CHECK_MSG(strstr(tkv_get_last_error(kv), "anchors cannot move") != NULL, "%s", tkv_get_last_error(kv));
    t = 700;
    CHECK_EQ(append_at_positions(kv, 0, &s, 0, 1, &t), TKV_ERR_UNSUPPORTED);
    CHECK_STR(tkv_get_last_error(kv), "set tiers.n_anchors to 0: positions cannot jump with anchors");
    CHECK_EQ(tkv_seq_remove(kv, 0, 20, 400), TKV_OK); /* anchors are among them */
    check_cache_at(kv, "anchors", 1);
    CHECK_EQ(tkv_get_tiers(kv, 0, 0, 20, 60, tiers), TKV_OK);
    for (t = 0; t < 60; t++) n_gone += tiers[t] == TKV_TOKEN_GONE;
    CHECK_EQ(n_gone, 60);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 640);
    tkv_destroy(kv);
}

/* Sequences that never had a token, or have lost all of them, can be cut, moved and forked. */
TEST(empty_sequences_are_cut_and_moved) {
    tkv_config cfg = make_move_config(3);
    tkv_cache *kv = create_cache(&cfg);
    static plain_sequence s;
    int seq;
    memset(&s, 0, sizeof s);
    for (seq = 0; seq < 2; seq++) {
        CHECK_EQ(tkv_seq_truncate(kv, seq, 0), TKV_OK);
        CHECK_EQ(tkv_seq_truncate(kv, seq, 44), TKV_OK);
        CHECK_EQ(tkv_seq_remove(kv, seq, 0, TKV_UNLIMITED), TKV_OK);
        CHECK_EQ(tkv_seq_shift(kv, seq, 0, TKV_UNLIMITED, 5), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, seq, 2, 7), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, seq, TKV_FLUSH_ALL), TKV_OK);
        CHECK_EQ(tkv_get_length(kv, 2, TKV_ALL_LAYERS), 0);
        check_cache_at(kv, "empty", seq);
        if (seq == 1) break;
        append_plain(kv, 1, &s, 0, 200, 50); /* what sequence 1 loses */
        CHECK_EQ(tkv_seq_remove(kv, 1, 0, TKV_UNLIMITED), TKV_OK);
    }
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 100, 50);
    check_plain(kv, 0, &s, &cfg, 1e-10);
    tkv_destroy(kv);
}

/* >>sequences without end */
static void slide_plain(plain_sequence *s, int from, int n) {
    int t;
    for (t = from + n; t < s->n; t++) {
        s->token[t - n] = s->token[t];
        s->token[t - n].position -= n;
    }
    s->n -= n;
}

/* A chat goes on for 20 times its memory. Attention is that over keys made at the positions of now. */
TEST(a_sequence_slides_without_end) {
    static const tkv_format formats[] = {TKV_F32, TKV_F16, TKV_KIVI4};
    static plain_sequence s;
    int f, round, in_place, n_removed, slid = 0;
    for (f = 0; f < COUNT(formats); f++)
        for (in_place = 0; in_place < 2; in_place++) {
            static unsigned char arena[4 << 20];
            tkv_config cfg = make_move_config(1), exact = make_move_config(1);
            tkv_rng rng = tkv_rng_seed((uint64_t)f);
            counting_allocator p;
            tkv_cache *kv;
            size_t size, most = 0;
            int id = 0;
            if (f) cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F16;
            cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = formats[f];
            cfg.limits.max_tokens = 500;
            cfg.limits.max_append = 64;
            if (in_place) {
                cfg.evict.policy = TKV_EVICT_SLIDING; /* with data of tokens */
                cfg.evict.keep_tokens = 400;
                CHECK_EQ(tkv_get_required_bytes(&cfg, &size, NULL), TKV_OK);
                CHECK(size <= sizeof arena);
                CHECK_EQ(tkv_create_in_place(&cfg, arena, size, &kv, NULL, 0), TKV_OK);
                last_config = cfg;
            } else {
                cfg.host.allocator = counting_allocator_of(&p);
                kv = create_cache(&cfg);
            }
            memset(&s, 0, sizeof s);
            for (round = 0; round < 300; round++) {
                const int n = 1 + tkv_rng_below(&rng, 64);
                CHECK_EQ(tkv_seq_slide(kv, 0, n, &n_removed), TKV_OK);
                CHECK_EQ(n_removed % 64, 0);
                if (n_removed) slide_plain(&s, 4, n_removed);
                slid += n_removed;
                append_plain(kv, 0, &s, id, n, 64);
                id += n;
                CHECK_LE(s.n, in_place ? 400 : 500);
                CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), s.n);
                if (!in_place && round < 150 && p.held > most) most = p.held;
                if (round % 10) continue;
                check_plain(kv, 0, &s, &exact, f == 2 ? 0.1 : f ? 1e-5 : 1e-9);
            }
            if (!in_place) CHECK_LE(p.held, 1.05 * (double)most); /* as in the first half */
            tkv_destroy(kv);
        }
    CHECK(slid > 20 * 500);
}

/* Blocks that removals left short are merged in idle time, and a sequence slides across them. */
TEST(a_sequence_slides_across_merged_blocks) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1), exact = make_move_config(1);
    tkv_rng rng = tkv_rng_seed(77);
    tkv_cache *kv;
    int round, i, t, n_removed, done, id = 0, slid = 0, merged = 0;
    static tkv_layer_config layers[2];
    cfg.importance.sample_every = 1; /* with data of tokens: a merged block lists the indices of its tokens */
    layers[1].sink_tokens = TKV_OFF; /* its first block begins before the tokens that go */
    cfg.layers = layers;
    cfg.limits.max_tokens = 700;
    cfg.limits.max_append = 64;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    for (round = 0; round < 150; round++) {
        const int n = 1 + tkv_rng_below(&rng, 64);
        CHECK_EQ(tkv_seq_slide(kv, 0, n, &n_removed), TKV_OK);
        remove_plain(&s, 4, 4 + n_removed);
        for (t = 4; t < s.n && n_removed; t++) s.token[t].position -= n_removed;
        slid += n_removed;
        append_plain(kv, 0, &s, id, n, 64);
        id += n;
        for (i = 0; i < 4 && tkv_get_length(kv, 0, 0) > 200; i++) {
            const int first = 4 + tkv_rng_below(&rng, tkv_get_length(kv, 0, 0) - 80);
            const int end = first + 1 + tkv_rng_below(&rng, 40);
            CHECK_EQ(tkv_seq_remove(kv, 0, first, end), TKV_OK);
            remove_plain(&s, first, end);
        }
        if (round % 3 == 0) CHECK_EQ(tkv_maintain(kv, 100, NULL, NULL, &done), TKV_OK);
        merged += round % 3 == 0 ? done : 0;
        CHECK_EQ(tkv_get_length(kv, 0, 0), s.token[s.n - 1].position + 1);
        if (round % 5 == 0) check_plain(kv, 0, &s, &exact, 1e-9);
    }
    CHECK(slid > 2000 && merged > 20);
    tkv_destroy(kv);
}

/* Sinks beyond a window, while the sequence slides, is forked and cut: attention is that of a cache without a window,
 * with a mask. */
TEST(sinks_beyond_a_window_stay_in_front) {
    enum { SINKS = 6, SEEN = 100, N = 700 };
    static float k[64 * 256], q[4 * 256], out[2][4 * 256], mask[4 * N];
    tkv_rng rng = tkv_rng_seed(31);
    tkv_cache *kv[2];
    int c, round, i, r, n_expired = 0, n_slid = 0;
    for (c = 0; c < 2; c++) {
        tkv_config cfg = make_move_config(3);
        cfg.tiers.hot.k = cfg.tiers.hot.v = cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k =
            cfg.tiers.archive.v = TKV_F32;
        cfg.tiers.sink_tokens = SINKS;
        cfg.limits.max_tokens = N;
        cfg.limits.max_append = 64;
        cfg.model.window = c ? TKV_OFF : SEEN;
        cfg.model.window_sinks = !c;
        kv[c] = create_cache(&cfg);
    }
    for (round = 0; round < 120; round++) {
        const int n = 1 + tkv_rng_below(&rng, 64), seq = round % 5 == 4 ? round / 5 % 2 + 1 : 0;
        int len = tkv_get_length(kv[0], 0, 0), removed[2];
        const int cut = len > 400 ? len - tkv_rng_below(&rng, 30) : len;
        tkv_layer_info info;
        tkv_attend_params p;
        tkv_rng_fill(&rng, k, (size_t)(64 * 256), 1.0);
        tkv_rng_fill(&rng, q, (size_t)(4 * 256), 1.0);
        for (c = 0; c < 2; c++) {
            if (seq) CHECK_EQ(tkv_seq_fork(kv[c], 0, seq, len), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(kv[c], seq, cut), TKV_OK);
            CHECK_EQ(tkv_seq_slide(kv[c], seq, n, &removed[c]), TKV_OK);
            CHECK_EQ(tkv_append(kv[c], seq, 0, k, k, n), TKV_OK);
            check_cache(kv[c]);
        }
        CHECK_EQ(removed[0], removed[1]);
        n_slid += removed[0];
        len = tkv_get_length(kv[0], seq, 0);
        CHECK_EQ(tkv_get_layer(kv[0], seq, 0, &info), TKV_OK);
        n_expired += info.expired;
        memset(&p, 0, sizeof p);
        p.seq = seq;
        p.n = tkv_rng_below(&rng, 4) + 1;
        p.n = p.n < len ? p.n : len;
        p.q = q;
        for (r = 0; r < p.n; r++)
            for (i = 0; i < len; i++)
                mask[r * len + i] = i >= SINKS && i <= len - p.n + r - SEEN ? -(float)HUGE_VAL : 0.0f;
        for (c = 0; c < 2; c++) {
            p.out = out[c];
            p.mask = c ? mask : NULL;
            CHECK_EQ(tkv_attend_ex(kv[c], &p), TKV_OK);
        }
        for (i = 0; i < p.n * 2 * KV_HEADS * V_DIM; i++) CHECK_NEAR(out[0][i], out[1][i], 1e-5);
    }
    CHECK(n_slid > 1000);
    CHECK(n_expired > 10000);
    for (c = 0; c < 2; c++) tkv_destroy(kv[c]);
}

/* Slides among cuts, removals, forks and jumps of positions, and with tokens evicted in the middle. */
TEST(slides_of_torn_sequences) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(2), exact = make_move_config(2);
    tkv_rng rng = tkv_rng_seed(77);
    tkv_cache *kv;
    int round, n_removed, t, id = 0, slid = 0, position[40];
    cfg.limits.max_tokens = 400;
    cfg.limits.max_append = 64;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    for (round = 0; round < 400; round++) {
        const int op = tkv_rng_below(&rng, 6), len = tkv_get_length(kv, 0, 0);
        if (op < 3) {
            CHECK_EQ(tkv_seq_slide(kv, 0, 40, &n_removed), TKV_OK);
            if (n_removed) { /* the oldest behind the sinks went; the array does not know how many had gone before */
                static int index[MAX_TOKENS];
                static plain_sequence kept;
                const int n_live = live_positions(kv, 0, 0, index);
                int n_front = 0, i;
                while (n_front < 4 && n_front < n_live && index[n_front] == s.token[n_front].position)
                    n_front++;
                kept.n = 0;
                for (i = 0; i < s.n; i++) {
                    if (i >= n_front && i < n_front + s.n - n_live) continue; /* gone */
                    kept.token[kept.n] = s.token[i];
                    kept.token[kept.n++].position -= i < n_front ? 0 : n_removed;
                }
                s = kept;
                slid++;
            }
            append_plain(kv, 0, &s, id, 40, 40);
            id += 40;
        } else if (op == 3 && len > 120) {
            const int first = s.token[s.n / 2].position;
            CHECK_EQ(tkv_seq_remove(kv, 0, first, first + 30), TKV_OK);
            remove_plain(&s, first, first + 30);
        } else if (op == 4 && len > 120) {
            CHECK_EQ(tkv_seq_fork(kv, 0, 1, len - 20), TKV_OK);
            CHECK_EQ(tkv_seq_fork(kv, 1, 0, len - 30), TKV_OK);
            CHECK_EQ(live_positions(kv, 0, 0, (int *)k_want) <= s.n, 1);
            s.n = live_positions(kv, 0, 0, (int *)k_want);
        } else if (op == 5 && len > 120 && len < 330) {
            for (t = 0; t < 30; t++) position[t] = s.token[s.n - 1].position + 1 + 3 * t;
            CHECK_EQ(append_at_positions(kv, 0, &s, id, 30, position), TKV_OK);
            id += 30;
        }
        if (s.n) check_plain(kv, 0, &s, &exact, 1e-9);
        if (tkv_test_.n_bad) break;
    }
    CHECK(slid > 20);
    tkv_destroy(kv);
}

/* Tokens behind the span of a slide need positions, removed ones do not. */
TEST(slides_behind_removed_tokens) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1), exact = make_move_config(1);
    int n_removed = -1;
    tkv_cache *kv;
    cfg.limits.max_tokens = 320;
    cfg.limits.max_append = 64;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 320, 64);
    CHECK_EQ(tkv_seq_remove(kv, 0, 100, 200), TKV_OK);
    remove_plain(&s, 100, 200);
    CHECK_EQ(tkv_seq_shift(kv, 0, 200, TKV_UNLIMITED, -100), TKV_OK);
    shift_plain(&s, 200, 1 << 30, -100);
    CHECK_EQ(tkv_seq_slide(kv, 0, 64, &n_removed), TKV_OK);
    CHECK_EQ(n_removed, 64);
    slide_plain(&s, 4, 64);
    append_plain(kv, 0, &s, 1000, 64, 64);
    check_plain(kv, 0, &s, &exact, 1e-9);
    CHECK_EQ(tkv_seq_shift(kv, 0, 36, TKV_UNLIMITED, -36), TKV_OK); /* token 100 of the beginning is at 0 */
    CHECK_EQ(tkv_seq_slide(kv, 0, 64, &n_removed), TKV_ERR_RANGE);
    CHECK_EQ(n_removed, 0);
    check_cache_at(kv, "slid", 0);
    tkv_destroy(kv);
}

/* Nothing is left behind the span of a slide: the tokens there had been evicted, and a cut has taken the later ones. The
 * last block goes on without tokens, and appends go on behind the tokens that were cut. */
/* Tokens behind expired ones moved to lower positions. An expired token has none, so it cannot be the last one. */
TEST(cuts_among_expired_tokens) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1);
    tkv_cache *kv;
    tkv_layer_info info;
    int cut, position = -1;
    cfg.model.window = 40;
    cfg.model.window_sinks = 1;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 300, 40);
    CHECK_EQ(tkv_seq_shift(kv, 0, 60, 300, -50), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.expired > 60);
    CHECK_EQ(tkv_get_positions(kv, 0, 0, 299, 1, &position), TKV_OK);
    CHECK_EQ(position, 249);
    CHECK_EQ(tkv_seq_shift(kv, 0, 6, 8, 100), TKV_OK);      /* only expired tokens */
    CHECK_EQ(tkv_seq_shift(kv, 0, 5000, 6000, -7), TKV_OK); /* none */
    CHECK_EQ(tkv_get_positions(kv, 0, 0, 299, 1, &position), TKV_OK);
    CHECK_EQ(position, 249);
    CHECK_EQ(tkv_get_positions(kv, 0, 0, 299, 1, NULL), TKV_ERR_ARG);
    for (cut = 1; cut < 4 + info.expired + 40; cut++) {
        CHECK_EQ(tkv_seq_truncate(kv, 0, cut), TKV_ERR_RANGE);
        CHECK_EQ(tkv_get_length(kv, 0, 0), 300);
    }
    CHECK_EQ(tkv_seq_remove(kv, 0, 6, 1000), TKV_ERR_RANGE);
    check_cache(kv);
    CHECK_EQ(tkv_seq_truncate(kv, 0, cut), TKV_OK);
    check_cache(kv);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 0), TKV_OK);
    check_cache(kv);
    tkv_destroy(kv);
}

TEST(slides_that_leave_sinks_alone) {
    static tkv_layer_config layers[2];
    static plain_sequence s;
    tkv_config cfg = make_move_config(2), exact = make_move_config(2);
    uint64_t victims[4] = {0, 0, ~(uint64_t)0, 0};
    int own_sinks, n_removed, t, position[20];
    for (t = 68; t < 200; t++) add_to_mask(victims, t);
    cfg.evict.policy = TKV_EVICT_SLIDING;
    cfg.layers = layers;
    cfg.limits.max_tokens = 250;
    for (own_sinks = 0; own_sinks < 2; own_sinks++) {
        tkv_cache *kv;
        layers[1].sink_tokens =
            own_sinks ? TKV_OFF : 0; /* then the first block of layer 1 has the sinks of layer 0 */
        kv = create_cache(&cfg);
        memset(&s, 0, sizeof s);
        append_plain(kv, 0, &s, 0, 248, 40);
        CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, 200), TKV_OK);
        CHECK_EQ(tkv_seq_truncate(kv, 0, 190), TKV_OK);
        CHECK_EQ(tkv_seq_slide(kv, 0, 64, &n_removed), TKV_OK);
        CHECK_EQ(n_removed, 64);
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 126);
        s.n = 4;
        check_plain(kv, 0, &s, &exact, 1e-9);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        for (t = 0; t < 20; t++) position[t] = 126 + t;
        s.token[s.n++].position = 125; /* the next position is that of the last token that was cut, less 63 */
        append_plain(kv, 0, &s, 1000, 20, 20);
        remove_plain(&s, 125, 126);
        check_plain(kv, 0, &s, &exact, 1e-9);
        s.n = 4;
        CHECK_EQ(append_at_positions(kv, 1, &s, 2000, 20, position), TKV_OK);
        check_plain(kv, 1, &s, &exact, 1e-9);
        append_plain(kv, 1, &s, 2020, 104, 40);
        CHECK_EQ(tkv_seq_slide(kv, 1, 64, &n_removed), TKV_OK); /* what goes are tokens that are gone */
        CHECK_EQ(n_removed, 64);
        for (t = 4; t < s.n; t++) s.token[t].position -= 64;
        check_plain(kv, 1, &s, &exact, 1e-9);
        tkv_destroy(kv);
    }
}

/* Sinks of other numbers, and a layer without RoPE. The span begins behind the most sinks of a layer, also where the
 * first tokens are gone. */
TEST(slides_of_layers_that_differ) {
    static tkv_layer_config layers[3];
    static plain_sequence s;
    tkv_config cfg = make_move_config(1), exact = make_move_config(1);
    int is_cut, n_removed, t;
    layers[0].sink_tokens = 6;
    layers[1].rope.dim = TKV_OFF;
    layers[2].sink_tokens = TKV_OFF;
    cfg.model.n_layers = 3;
    cfg.layers = layers;
    cfg.limits.max_tokens = 320;
    for (is_cut = 0; is_cut < 2; is_cut++) {
        tkv_cache *kv = create_cache(&cfg);
        memset(&s, 0, sizeof s);
        append_plain(kv, 0, &s, 0, 300, 50);
        if (is_cut) {
            CHECK_EQ(tkv_seq_remove(kv, 0, 0, 6), TKV_OK);
            remove_plain(&s, 0, 6);
        }
        CHECK_EQ(tkv_seq_slide(kv, 0, 64, &n_removed), TKV_OK);
        CHECK_EQ(n_removed, 64);
        remove_plain(&s, 6, 70);
        for (t = is_cut ? 0 : 6; t < s.n; t++) s.token[t].position -= 64;
        check_plain(kv, 0, &s, &exact, 1e-9);
        append_plain(kv, 0, &s, 300, 50, 50);
        check_plain(kv, 0, &s, &exact, 1e-9);
        tkv_destroy(kv);
    }
}

/* Copies of sinks count as sinks only at indices of sinks. Other copies are blocks like others, for appends too. */
TEST(copied_sinks_end_where_sinks_end) {
    static plain_sequence s, copied;
    int sinks, i, t;
    for (sinks = 1; sinks < 5; sinks += 3) {
        tkv_config cfg = make_move_config(3);
        const int jumping[] = {1000, 2000, 3000};
        tkv_cache *kv;
        cfg.tiers.sink_tokens = sinks;
        kv = create_cache(&cfg);
        memset(&s, 0, sizeof s);
        memset(&copied, 0, sizeof copied);
        append_plain(kv, 0, &s, 0, 64, 64);
        for (i = 0; i < 2; i++) {
            CHECK_EQ(tkv_seq_copy(kv, 0, 0, 1, 1, 2 * i), TKV_OK);
            copied.token[copied.n] = s.token[0];
            copied.token[copied.n++].position = 2 * i;
            check_cache_at(kv, "copied", i);
        }
        append_at_positions(kv, 1, &copied, 200, 3, jumping);
        check_cache_at(kv, "appended", sinks);
        for (i = 2; i < 6; i++) {
            CHECK_EQ(tkv_seq_copy(kv, 0, 0, 2, 1, 4000 + 2 * i), TKV_OK);
            for (t = 0; t < 2; t++) {
                copied.token[copied.n] = s.token[t];
                copied.token[copied.n++].position = 4000 + 2 * i + t;
            }
            check_cache_at(kv, "copied", i);
        }
        append_plain(kv, 1, &copied, 300, 200, 50);
        check_plain(kv, 1, &copied, &cfg, 1e-9);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        append_plain(kv, 2, &copied, 500, 64, 64);
        for (i = 0; i < 2; i++) CHECK_EQ(tkv_seq_copy(kv, 2 * i, 0, sinks, 1, i * sinks), TKV_OK);
        for (i = 0; i < 2; i++) CHECK_EQ(tkv_seq_reset(kv, 2 * i), TKV_OK);
        CHECK_EQ(tkv_seq_keep(kv, 1, sinks, &sinks, 1), TKV_OK);
        check_cache_at(kv, "kept", sinks);
        tkv_destroy(kv);
    }
}

/* A plan has so many sinks. Copies of a sink beyond them are ordinary tokens. */
TEST(copies_of_sinks) {
    int sinks, i;
    for (sinks = 1; sinks <= 4; sinks += 3) {
        tkv_config cfg = make_move_config(2);
        tkv_cache *kv;
        cfg.tiers.sink_tokens = sinks;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 100, 100), TKV_OK);
        for (i = 0; i < 9; i++) {
            CHECK_EQ(tkv_seq_copy(kv, 0, 0, 1, 1, i), TKV_OK);
            check_cache_at(kv, "copied", i);
        }
        CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 9);
        tkv_destroy(kv);
    }
}

/* Tokens that share positions have many entries in a block. These age as fast as others. */
TEST(tokens_that_share_positions_age) {
    int same, append, t, positions[64], n;
    for (same = 4; same <= 64; same *= 4) {
        tkv_config cfg = make_move_config(1);
        tkv_layer_info info;
        tkv_cache *kv;
        plain_sequence *s = (plain_sequence *)calloc(1, sizeof *s);
        if (!s) exit(2);
        cfg.limits.max_append = 64;
        cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI4;
        kv = create_cache(&cfg);
        for (append = n = 0; append < 14; append++) {
            for (t = 0; t < 64; t++, n++) positions[t] = append < 7 ? n / same : 448 + n;
            CHECK_EQ(append_at_positions(kv, 0, s, n, 64, positions), TKV_OK);
            s->n = 0;
            check_cache_at(kv, "appended", append);
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
            CHECK_LE(info.tokens[TKV_TIER_HOT],
                     64 + 64 + 64); /* hot_tokens, a chunk, a block that fills up */
        }
        tkv_destroy(kv);
        free(s);
    }
}

/* A block waits for its tier as long as the tokens behind it are few, also if many between them are gone. A shift splits
 * it: the older part is not due before the next append. */
TEST(parts_of_a_block_before_a_gap_wait) {
    tkv_config cfg = make_move_config(1), exact = cfg;
    plain_sequence *s = (plain_sequence *)calloc(1, sizeof *s);
    uint8_t tier[128];
    tkv_cache *kv;
    int i, end = 128;
    if (!s) exit(2);
    cfg.limits.max_append = 64;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = cfg.tiers.warm_tokens = 64;
    kv = create_cache(&cfg);
    append_plain(kv, 0, s, 0, end, 64);
    for (i = 0; i < 8; i++, end += 64) { /* of all chunks two tokens stay, the last ones */
        append_plain(kv, 0, s, end, 64, 64);
        CHECK_EQ(tkv_seq_remove(kv, 0, i ? end - 2 : end, end + 62), TKV_OK);
        remove_plain(s, i ? end - 2 : end, end + 62);
        check_plain(kv, 0, s, &exact, 1e-8);
    }
    CHECK_EQ(tkv_get_tiers(kv, 0, 0, 0, 128, tier), TKV_OK);
    CHECK(tier[127] != TKV_TIER_ARCHIVE);
    CHECK_EQ(tkv_seq_shift(kv, 0, 120, 128, 2), TKV_OK);
    shift_plain(s, 120, 128, 2);
    check_plain(kv, 0, s, &exact, 1e-8);
    append_plain(kv, 0, s, end, 64, 64);
    check_plain(kv, 0, s, &exact, 1e-8);
    CHECK_EQ(tkv_get_tiers(kv, 0, 0, 0, 128, tier), TKV_OK);
    CHECK_EQ(tier[119], TKV_TIER_ARCHIVE);
    CHECK(tier[127] != TKV_TIER_ARCHIVE);
    tkv_destroy(kv);
    free(s);
}

/* A moved tail that another sequence goes on with takes no tokens. It takes some, in an entry of its own, when the
 * other sequence is gone: a reservation made before has that entry too. fill: other tokens, so that the table of
 * entries is full in one of the turns. */
TEST(reservations_behind_a_shared_moved_tail) {
    int fill;
    for (fill = 1; fill <= 24; fill++) {
        tkv_config cfg = make_move_config(3);
        tkv_cache *kv;
        int i;
        cfg.tiers.sink_tokens = TKV_OFF;
        cfg.budget.bytes = 1 << 22;
        kv = create_cache(&cfg);
        for (i = 0; i < fill; i++) CHECK_EQ(append_to_all_layers(kv, 2, i, 64, 64), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 0, 1, 60, 60), TKV_OK);
        CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, 100), TKV_OK);
        CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
        CHECK_EQ(append_to_all_layers(kv, 1, 2, 1, 1), TKV_OK);
        CHECK_EQ(tkv_seq_reserve(kv, 0, 128), TKV_OK);
        CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
        check_cache_at(kv, "reserved", fill);
        CHECK_EQ(append_to_all_layers(kv, 0, 3, 128, 128), TKV_OK);
        check_cache_at(kv, "appended", fill);
        tkv_destroy(kv);
    }
}

/* Blocks of one to three tokens, each of another text. One append recodes as many tokens of them as of whole blocks. */
TEST(short_blocks_age) {
    int n, i;
    for (n = 1; n <= 3; n += 2) {
        tkv_config cfg = make_config(1, 2);
        tkv_layer_info info;
        tkv_cache *kv;
        cfg.model.rope.dim = DIM;
        cfg.limits.max_append = 64;
        cfg.tiers.sink_tokens = TKV_OFF;
        cfg.tiers.hot_tokens = cfg.tiers.warm_tokens = 64;
        kv = create_cache(&cfg);
        for (i = 0; i < 600; i++) {
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 0, i, n, n), TKV_OK);
            CHECK_EQ(tkv_seq_copy(kv, 0, 0, n, 1, 2 * n * i), TKV_OK);
        }
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        for (i = 0; i < 100; i++) {
            CHECK_EQ(append_to_all_layers(kv, 1, 0, 1, 1), TKV_OK);
            check_cache_at(kv, "appended", i);
            CHECK_EQ(tkv_get_layer(kv, 1, 0, &info), TKV_OK);
            CHECK_LE(info.tokens[TKV_TIER_HOT], 64 + 64);
        }
        tkv_destroy(kv);
    }
}

/* Copies wait for the first table of their layer, however many they are. */
TEST(copies_wait_for_a_table) {
    tkv_config cfg = make_config(1, 2);
    tkv_cache *kv;
    int i;
    cfg.model.rope.dim = DIM;
    cfg.limits.max_append = 64;
    cfg.tiers.warm.k = TKV_A40;
    cfg.tiers.archive.k = TKV_A25;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 64, 64), TKV_OK);
    for (i = 0; i < 20; i++) CHECK_EQ(tkv_seq_copy(kv, 0, 0, 64, 1, 64 * i), TKV_OK);
    for (i = 0; i < 15; i++) {
        CHECK_EQ(append_to_all_layers(kv, 1, 0, 64, 64), TKV_OK);
        check_cache_at(kv, "appended", i);
    }
    tkv_destroy(kv);
}

/* A fork of tokens that were all evicted has a length and no block. It can be cut, forked and moved like others. */
TEST(forks_of_evicted_tokens_are_cut_and_moved) {
    tkv_config cfg = make_move_config(3);
    uint64_t victims[3] = {~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0};
    tkv_cache *kv;
    static plain_sequence s;
    int position = -1;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    cfg.tiers.sink_tokens = TKV_OFF;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 400, 100);
    CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, victims, 192), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, -100), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, 25), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 25);
    CHECK_EQ(tkv_seq_fork(kv, 1, 2, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 2, TKV_ALL_LAYERS), 25);
    CHECK_EQ(tkv_get_positions(kv, 2, 0, 24, 1, &position), TKV_OK);
    check_cache_at(kv, "forks without blocks", 2);
    CHECK_EQ(tkv_seq_truncate(kv, 2, 10), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 2, 0, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 1, 0, TKV_UNLIMITED, 7), TKV_OK);
    memset(&s, 0, sizeof s);
    append_plain(kv, 1, &s, 0, 70, 70);
    CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 95);
    check_cache_at(kv, "appended to a fork without blocks", 1);
    tkv_destroy(kv);
}

/* >>accepted paths */
/* A draft tree is appended with the positions of its depths. What is kept equals the path appended alone: exact tokens
 * to the bit, and attention. */
TEST(a_kept_path_equals_one_that_was_appended_alone) {
    static plain_sequence tree, path;
    int meta, round;
    for (meta = 0; meta < 2; meta++) {
        tkv_config cfg = make_config(2, 1);
        tkv_rng rng = tkv_rng_seed(4);
        tkv_cache *kv, *alone;
        cfg.model.rope.dim = DIM;
        if (meta) cfg.importance.sample_every = 1;
        kv = create_cache(&cfg);
        alone = create_cache(&cfg);
        memset(&tree, 0, sizeof tree);
        memset(&path, 0, sizeof path);
        for (round = 0; round < 40; round++) {
            const int n = 1 + tkv_rng_below(&rng, 90), first = path.n;
            const int base = path.n ? path.token[path.n - 1].position + 1 : 0;
            int depth[90], kept[90], position[90], t, n_kept = 0;
            for (t = 0; t < n; t++) { /* each token is one deeper than some token before, or a root */
                const int parent = t ? tkv_rng_below(&rng, t + 1) - 1 : -1;
                depth[t] = parent < 0 ? 0 : depth[parent] + 1;
                position[t] = base + depth[t];
            }
            for (t = 0; t < n; t++) /* a path: depths 0, 1, 2, ... in order */
                if (depth[t] == n_kept) kept[n_kept++] = first + t;
            tree.n = first;
            CHECK_EQ(append_at_positions(kv, 0, &tree, 1000 * round, n, position), TKV_OK);
            CHECK_EQ(tkv_seq_keep(kv, 0, first, kept, n_kept), TKV_OK);
            check_cache_at(kv, "kept", round);
            for (t = 0; t < n_kept; t++) {
                int layer;
                path.token[path.n].id = 1000 * round + kept[t] - first;
                path.token[path.n++].position = base + t;
                for (layer = 0; layer < 2; layer++)
                    make_token(path.token[path.n - 1].id, layer, base + t, k_in + (layer * 90 + t) * K_ROW,
                               v_in + (layer * 90 + t) * V_ROW);
            }
            for (t = 0; t < 2; t++)
                CHECK_EQ(tkv_append(alone, 0, t, k_in + t * 90 * K_ROW, v_in + t * 90 * V_ROW, n_kept),
                         TKV_OK);
            CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), path.n);
            for (t = 0; t < 2 && round % 8 == 7; t++) {
                float q[2 * KV_HEADS * DIM], out[2 * KV_HEADS * V_DIM], want[2 * KV_HEADS * V_DIM];
                static int got[MAX_TOKENS], expected[MAX_TOKENS];
                tkv_rng_fill(&rng, q, COUNT(q), 1.0);
                CHECK_EQ(tkv_attend(kv, 0, t, q, 1, out), TKV_OK);
                CHECK_EQ(tkv_attend(alone, 0, t, q, 1, want), TKV_OK);
                CHECK_LE(mean_squared_difference(out, want, COUNT(out)), 1e-9);
                CHECK_EQ(tkv_get_positions(kv, 0, t, 0, path.n, got), TKV_OK);
                CHECK_EQ(tkv_get_positions(alone, 0, t, 0, path.n, expected), TKV_OK);
                CHECK_MEM(got, expected, (size_t)path.n * sizeof *got);
                CHECK_EQ(tkv_read(kv, 0, t, path.n - 30, 30, k_out, v_out), TKV_OK); /* exact tokens */
                CHECK_EQ(tkv_read(alone, 0, t, path.n - 30, 30, k_want, v_want), TKV_OK);
                CHECK_MEM(k_out, k_want, 30 * K_ROW * sizeof(float));
                CHECK_MEM(v_out, v_want, 30 * V_ROW * sizeof(float));
            }
        }
        CHECK(path.n > 150);
        tkv_destroy(kv);
        tkv_destroy(alone);
    }
}

/* Sinks that stay are sinks, also where positions between them went: as if they had been appended at their positions. */
TEST(kept_sinks_with_gaps_are_sinks) {
    static plain_sequence s, rest;
    static const int positions[] = {0, 2, 4, 5, 6, 9, 10, 11}, kept[] = {2, 4, 5, 6, 9, 10, 11};
    tkv_config cfg = make_move_config(1);
    tkv_cache *kv = create_cache(&cfg), *alone = create_cache(&cfg);
    int layer;
    memset(&s, 0, sizeof s);
    memset(&rest, 0, sizeof rest);
    append_plain(kv, 0, &s, 0, 12, 12);
    CHECK_EQ(tkv_seq_keep(kv, 0, 1, kept, COUNT(kept)), TKV_OK);
    memset(&s, 0, sizeof s);
    CHECK_EQ(append_at_positions(alone, 0, &s, 0, COUNT(positions), positions), TKV_OK);
    rest = s;
    append_plain(kv, 0, &rest, 100, 700, 50);
    append_plain(alone, 0, &s, 100, 700, 50);
    check_cache_at(kv, "kept", 0);
    for (layer = 0; layer < 2; layer++) {
        tkv_layer_info a, b;
        CHECK_EQ(tkv_get_layer(kv, 0, layer, &a), TKV_OK);
        CHECK_EQ(tkv_get_layer(alone, 0, layer, &b), TKV_OK);
        CHECK(a.tokens[TKV_TIER_WARM] + a.tokens[TKV_TIER_ARCHIVE] > 100);
        CHECK_MEM(a.tokens, b.tokens, sizeof a.tokens);
        CHECK_MEM(a.blocks, b.blocks, sizeof a.blocks);
    }
    CHECK_EQ(tkv_seq_keep(kv, 0, 1, kept, 1), TKV_ERR_STATE); /* what is behind the sinks is coded */
    CHECK_EQ(tkv_seq_reset(alone, 0), TKV_OK);
    memset(&s, 0, sizeof s);
    append_plain(alone, 0, &s, 0, 12, 12);
    CHECK_EQ(tkv_seq_keep(alone, 0, 1, kept, 1), TKV_OK); /* sinks alone */
    CHECK_EQ(tkv_get_length(alone, 0, TKV_ALL_LAYERS), 2);
    check_cache_at(alone, "kept", 0);
    tkv_destroy(kv);
    tkv_destroy(alone);
}

TEST(keeping_is_refused_with_a_reason) {
    tkv_config cfg = make_config(2, 2);
    tkv_cache *kv = create_cache(&cfg);
    const int late[] = {310, 320}, falling[] = {320, 310}, early[] = {20, 30}, behind_all[] = {INT_MAX, 5};
    snapshot before;
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 30, 30), TKV_OK);
    before = snapshot_of(kv);
    CHECK_EQ(tkv_seq_keep(kv, 0, 20, early, 2), TKV_ERR_STATE);
    CHECK_STR(tkv_get_last_error(kv), "tokens are not exact any more: index 20");
    CHECK_EQ(tkv_seq_keep(kv, 0, 290, late, 2), TKV_ERR_STATE);
    CHECK_STR(tkv_get_last_error(kv), "another sequence shares tokens: index 290");
    CHECK_EQ(tkv_seq_keep(kv, 0, 305, falling, 2), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_keep(kv, 0, 305, behind_all, 2), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_keep(kv, 0, 305, behind_all, 1), TKV_ERR_RANGE);
    CHECK_STR(tkv_get_last_error(kv), "there is no token with index 2147483647");
    CHECK_EQ(tkv_seq_keep(kv, 0, -1, late, 2), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_keep(kv, 0, 305, NULL, 2), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_keep(kv, 0, 305, late, -1), TKV_ERR_ARG);
    CHECK_EQ(tkv_seq_keep(kv, 2, 305, late, 2), TKV_ERR_ARG);
    check_unchanged(kv, &before, "refused");
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 305, late, 2), TKV_ERR_STATE);
    CHECK_STR(tkv_get_last_error(kv), "a step is open; commit or abort it first: sequence 0");
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 330, late, 0), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 325, early, 0), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 305, late, 2), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 307);
    CHECK_EQ(tkv_seq_keep(kv, 0, 305, late, 1), TKV_ERR_RANGE);
    tkv_destroy(kv);
}

/* A block can have an entry that is due for coding and one that is not. */
/* A token that is gone cannot be kept, wherever it was: in front of all others, in a block that is there, in one that is
 * not. Nor can one be kept behind which an eviction has merged blocks. */
TEST(tokens_that_are_gone_are_not_kept) {
    static const int gone[] = {10, 130, 200}, there[] = {140, 150};
    tkv_config cfg = make_move_config(1);
    uint64_t victims[8] = {0};
    tkv_cache *kv;
    int i, position;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 400, 400), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 0, 64), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 130, 131), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 192, 256), TKV_OK);
    for (i = 0; i < COUNT(gone); i++) {
        char want[80];
        CHECK_EQ(tkv_seq_keep(kv, 0, 5, &gone[i], 1), TKV_ERR_RANGE);
        snprintf(want, sizeof want, "there is no token with index %d", gone[i]);
        CHECK_STR(tkv_get_last_error(kv), want);
    }
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 400);
    for (i = 256; i < 384; i += 2) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, 0, 1, victims, 384), TKV_OK); /* two blocks become one */
    CHECK_EQ(tkv_seq_keep(kv, 0, 135, there, 2), TKV_ERR_STATE);
    CHECK_STR(tkv_get_last_error(kv), "tokens are not exact any more: index 256");
    CHECK_EQ(tkv_seq_truncate(kv, 0, 250), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 135, there, 2), TKV_OK);
    check_cache_at(kv, "kept", 0);
    CHECK_EQ(tkv_get_positions(kv, 0, 1, 136, 1, &position), TKV_OK);
    CHECK_EQ(position, 150);
    tkv_destroy(kv);
}

TEST(keeping_needs_tokens_that_are_not_due) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1);
    const int early[] = {30, 50}, late[] = {45, 50};
    tkv_cache *kv;
    cfg.tiers.hot_tokens = 100;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 68, 68);
    CHECK_EQ(tkv_seq_shift(kv, 0, 40, TKV_UNLIMITED, 5), TKV_OK);
    shift_plain(&s, 40, 1 << 30, 5);
    append_plain(kv, 0, &s, 68, 82, 82);
    append_plain(kv, 0, &s, 150, 1, 1);
    CHECK_EQ(tkv_seq_keep(kv, 0, 20, early, 2), TKV_ERR_STATE);
    check_plain(kv, 0, &s, &cfg, 1e-9);
    CHECK_EQ(tkv_seq_keep(kv, 0, 42, late, 2), TKV_OK);
    check_cache_at(kv, "kept", 0);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 44);
    tkv_destroy(kv);
}

/* A block is split, scores are added to its second half later, and then the halves join: scores are as if it had not
 * moved. */
TEST(scores_of_halves_that_join) {
    static plain_sequence s;
    float score[28], found[2][88];
    int moved, t;
    for (t = 0; t < 28; t++) score[t] = .5f;
    for (moved = 0; moved < 2; moved++) {
        tkv_config cfg = make_move_config(1);
        tkv_cache *kv;
        cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
        cfg.importance.sample_every = 1 << 20; /* only tkv_add_scores changes scores */
        cfg.importance.decay = .9f;
        kv = create_cache(&cfg);
        memset(&s, 0, sizeof s);
        append_plain(kv, 0, &s, 0, 68, 68);
        for (t = 12; t < 68; t += 28) CHECK_EQ(tkv_add_scores(kv, 0, 0, t, 28, score), TKV_OK);
        if (moved) CHECK_EQ(tkv_seq_shift(kv, 0, 40, TKV_UNLIMITED, 5), TKV_OK);
        append_plain(kv, 0, &s, 68, 20, 20);
        CHECK_EQ(tkv_add_scores(kv, 0, 0, 40, 28, score), TKV_OK);
        if (moved) CHECK_EQ(tkv_seq_shift(kv, 0, 45, TKV_UNLIMITED, -5), TKV_OK);
        CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, 88, found[moved], NULL), TKV_OK);
        check_cache_at(kv, "joined", moved);
        tkv_destroy(kv);
    }
    for (t = 0; t < 88; t++) CHECK_NEAR(found[1][t], found[0][t], 1e-5);
    CHECK_LE(.05, found[0][12]);
    CHECK_LE(found[0][12], .1);
    CHECK_LE(.5, found[0][40]);
}

/* The first index may be that of a removed token, in front of tokens of the same block. */
TEST(keeping_from_a_removed_token_on) {
    static plain_sequence s, other;
    tkv_config cfg = make_move_config(3);
    const int kept[] = {40, 42, 44};
    tkv_cache *kv;
    int t;
    cfg.tiers.sink_tokens = TKV_OFF;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    memset(&other, 0, sizeof other);
    append_plain(kv, 1, &s, 0, 40, 40);
    append_plain(kv, 2, &other, 100, 30, 30);
    CHECK_EQ(tkv_seq_copy(kv, 1, 0, 10, 0, 0), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 2, 0, 30, 0, 10), TKV_OK);
    CHECK_EQ(tkv_seq_copy(kv, 1, 10, 40, 0, 40), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 10, 40), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 2), TKV_OK);
    for (t = 0; t < 3; t++)
        CHECK_EQ(tkv_read(kv, 0, 1, kept[t], 1, k_want + t * K_ROW, v_want + t * V_ROW), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 12, kept, 3), TKV_OK);
    check_cache_at(kv, "kept", 0);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 15);
    CHECK_EQ(tkv_read(kv, 0, 1, 12, 3, k_out, v_out), TKV_OK);
    CHECK_MEM(k_out, k_want, 3 * K_ROW * sizeof(float));
    CHECK_MEM(v_out, v_want, 3 * V_ROW * sizeof(float));
    tkv_destroy(kv);
}

/* The first block is cut at `first`, and its halves join again. */
TEST(keeping_all_tokens_adds_no_block) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1);
    int kept[20], t;
    tkv_layer_info before, after;
    tkv_cache *kv;
    cfg.tiers.sink_tokens = TKV_OFF;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 40, 40);
    for (t = 0; t < 20; t++) kept[t] = 20 + t;
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &before), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 20, kept, 20), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &after), TKV_OK);
    CHECK_EQ(before.blocks[TKV_TIER_HOT], 1);
    CHECK_EQ(after.blocks[TKV_TIER_HOT], 1);
    CHECK_EQ(after.length, 40);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Behind a slide, keys of one block turned by different angles. They stay apart. */
TEST(keeping_all_tokens_after_a_slide) {
    static plain_sequence s;
    tkv_config cfg = make_move_config(1);
    int kept[60], t, n_removed;
    tkv_layer_info before, after;
    tkv_cache *kv;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.limits.max_tokens = 300;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 290, 290);
    CHECK_EQ(tkv_seq_slide(kv, 0, 20, &n_removed), TKV_OK);
    CHECK_EQ(n_removed, 64);
    remove_plain(&s, 0, 64);
    for (t = 0; t < s.n; t++) s.token[t].position -= 64;
    append_plain(kv, 0, &s, 290, 20, 20);
    for (t = 0; t < 60; t++) kept[t] = s.n - 60 + t;
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &before), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, kept[0], kept, 60), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &after), TKV_OK);
    CHECK_EQ(after.blocks[TKV_TIER_HOT], before.blocks[TKV_TIER_HOT]);
    check_cache_at(kv, "kept", 0);
    check_plain(kv, 0, &s, &cfg, 1e-9);
    tkv_destroy(kv);
}

/* What queries see by position. A block that ends where they begin has lower positions, but they are none of its tokens.
 * And queries of removed tokens, behind the last expired one, see none that expired. */
TEST(first_queries_at_the_edges_of_blocks) {
    static plain_sequence s;
    float q[40 * 2 * KV_HEADS * DIM], out[40 * 2 * KV_HEADS * V_DIM];
    tkv_config cfg = make_move_config(1);
    tkv_attend_params p;
    tkv_layer_info info;
    tkv_rng rng = tkv_rng_seed(3);
    tkv_cache *kv;
    int first, expired;
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.model.window = 70;
    kv = create_cache(&cfg);
    memset(&s, 0, sizeof s);
    memset(&p, 0, sizeof p);
    append_plain(kv, 0, &s, 0, 700, 100);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    expired = info.expired;
    CHECK(expired > 100 && expired % TKV_BLOCK_TOKENS == 4);
    CHECK_EQ(tkv_seq_shift(kv, 0, expired + 64, TKV_UNLIMITED, 30), TKV_OK);
    p.q = q;
    p.out = out;
    p.n = 40;
    p.first_queries = &first;
    first = expired + 64;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    first--; /* it would see the six positions before */
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_remove(kv, 0, expired, expired + 64), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.expired, expired);
    first = expired;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    first--;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_RANGE);
    tkv_destroy(kv);
}

TEST(keeping_stays_within_the_window) {
    tkv_config cfg = make_move_config(2);
    tkv_layer_info info;
    tkv_cache *kv;
    int last, early = 290;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.model.window = 40;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.expired > 0);
    last = info.expired + 38;
    CHECK_EQ(tkv_seq_truncate(kv, 0, last + 1), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_keep(kv, 0, last, &last, 1), TKV_ERR_RANGE);
    CHECK_EQ(tkv_seq_keep(kv, 0, info.expired - 1, &early, 1), TKV_ERR_STATE);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 300);
    CHECK_EQ(tkv_seq_keep(kv, 0, 280, &early, 1), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 0, 300, 100), TKV_OK);
    last++; /* it sees 39 tokens before it, and none that expired */
    CHECK_EQ(tkv_seq_keep(kv, 1, last, &last, 1), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), last + 1);
    check_cache_at(kv, "kept", 0);
    tkv_destroy(kv);
}

/* The first tokens of a sequence may be gone. */
TEST(keeping_from_before_the_first_token_on) {
    tkv_config cfg = make_move_config(1);
    tkv_cache *kv;
    int kept = 150, position = -1, layer;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 160, 160), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 0, 128), TKV_OK);
    for (layer = 0; layer < 2; layer++)
        CHECK_EQ(tkv_read(kv, 0, layer, 150, 1, k_want + layer * K_ROW, v_want), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 0, &kept, 1), TKV_OK);
    check_cache_at(kv, "kept", 0);
    for (layer = 0; layer < 2; layer++) {
        CHECK_EQ(tkv_get_length(kv, 0, layer), 1);
        CHECK_EQ(tkv_get_positions(kv, 0, layer, 0, 1, &position), TKV_OK);
        CHECK_EQ(position, 150);
        CHECK_EQ(tkv_read(kv, 0, layer, 0, 1, k_out, v_out), TKV_OK);
        CHECK_MEM(k_out, k_want + layer * K_ROW, K_ROW * sizeof(float));
    }
    tkv_destroy(kv);
}

/* Anchors have no shift, so no position may jump. */
TEST(anchors_allow_keeping_tokens_in_a_row) {
    tkv_config cfg = make_config(2, 1);
    const int apart[] = {20, 22}, in_a_row[] = {20, 21};
    tkv_cache *kv;
    cfg.tiers.n_anchors = 4;
    cfg.importance.sample_every = 1;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 40, 40), TKV_OK);
    CHECK_EQ(tkv_seq_keep(kv, 0, 20, apart, 2), TKV_ERR_UNSUPPORTED);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 40);
    CHECK_EQ(tkv_seq_keep(kv, 0, 20, in_a_row, 2), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 22);
    check_cache_at(kv, "kept", 0);
    tkv_destroy(kv);
}

/* A layer that lags behind the others has tokens behind the sinks, or the slide is refused. Layers without tokens, or
 * with those of another layer, do not count. */
TEST(slides_leave_tokens_in_each_layer) {
    static tkv_layer_config layers[3];
    tkv_config cfg = make_move_config(2);
    tkv_cache *kv;
    int n_removed = -1;
    layers[2].share_kv = 1;
    cfg.model.n_layers = 3;
    cfg.layers = layers;
    cfg.limits.max_tokens = 300;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 60, 60), TKV_OK);
    fill_rows(60, 0, 0, 200, k_in, v_in);
    CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 200), TKV_OK);
    CHECK_EQ(tkv_seq_slide(kv, 0, 50, &n_removed), TKV_ERR_CAPACITY);
    CHECK_EQ(n_removed, 0);
    check_cache_at(kv, "refused", 0);
    fill_rows(60, 1, 0, 200, k_in, v_in);
    CHECK_EQ(tkv_append(kv, 0, 1, k_in, v_in, 200), TKV_OK);
    CHECK_EQ(tkv_seq_slide(kv, 0, 50, &n_removed), TKV_OK);
    CHECK_EQ(n_removed, 64);
    check_cache_at(kv, "slid", 0);
    fill_rows(60, 0, 0, 260, k_in, v_in);
    CHECK_EQ(tkv_append(kv, 1, 0, k_in, v_in, 260), TKV_OK);
    CHECK_EQ(tkv_seq_begin(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_slide(kv, 1, 50, NULL), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_abort(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_slide(kv, 1, 50, NULL), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 1, 0), 196);
    CHECK_EQ(tkv_get_length(kv, 1, 1), 0);
    check_cache_at(kv, "slid alone", 1);
    tkv_destroy(kv);
}

/* Layers without a cache, and those that read another layer, have no sinks of their own: the span of a slide begins
 * behind those of the layers with tokens. */
TEST(slides_count_sinks_of_layers_with_tokens) {
    static tkv_layer_config layers[2];
    int kind, n_removed;
    for (kind = 0; kind < 3; kind++) {
        tkv_config cfg = make_f32_config(kind ? 2 : 1, 1);
        tkv_cache *kv;
        memset(layers, 0, sizeof layers);
        layers[0].sink_tokens = TKV_OFF;
        layers[1].no_cache = kind == 1;
        layers[1].share_kv = kind == 2;
        cfg.layers = layers;
        cfg.model.rope.dim = TKV_OFF;
        cfg.limits.max_tokens = 256;
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 200, 200), TKV_OK);
        CHECK_EQ(tkv_seq_slide(kv, 0, 100, &n_removed), TKV_OK);
        CHECK_EQ(n_removed, 64);
        fill_rows(0, 0, 64, 136, k_in, v_in); /* the first 64 went */
        CHECK_EQ(tkv_read(kv, 0, 0, 0, 136, k_out, v_out), TKV_OK);
        CHECK_MEM(k_out, k_in, 136 * K_ROW * sizeof(float));
        check_cache_at(kv, "kind", kind);
        tkv_destroy(kv);
    }
}

/* The tokens that a layer with a window of 127 has and the newest query sees. has_sinks: 1 if it has the sinks. */
static plain_sequence *seen_through_window(const plain_sequence *s, int has_sinks, int sees_sinks) {
    static plain_sequence seen;
    int t;
    for (t = seen.n = 0; t < s->n; t++)
        if (t < 4 ? has_sinks && (sees_sinks || s->n - t <= 127) : s->token[t].position > s->n - 1 - 127)
            seen.token[seen.n++] = s->token[t];
    return &seen;
}

/* A slide takes more than the window has expired. Later queries see what is held, as if the others had been removed.
 * Sinks that the window hides had expired, and are not seen where the slide brings them near. */
TEST(decoding_goes_on_behind_a_slide_past_the_window) {
    static tkv_layer_config layers[2];
    static plain_sequence s;
    int sees_sinks, n, n_removed, i, n_past = 0;
    layers[0].window = 127;
    for (sees_sinks = 0; sees_sinks < 2; sees_sinks++)
        for (n = 64; n <= 448; n += 64) {
            tkv_config cfg = make_move_config(1), exact = make_move_config(1);
            tkv_layer_info info;
            tkv_cache *kv;
            int expired;
            cfg.model.window_sinks = sees_sinks;
            cfg.layers = layers;
            cfg.limits.max_tokens = 512;
            kv = create_cache(&cfg);
            memset(&s, 0, sizeof s);
            append_plain(kv, 0, &s, 0, 400, 400);
            append_plain(kv, 0, &s, 400, 1, 1);
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
            expired = info.expired;
            CHECK(expired > 100);
            CHECK_EQ(tkv_seq_slide(kv, 0, n, &n_removed), TKV_OK);
            slide_plain(&s, 4, n_removed);
            n_past += n_removed > expired;
            for (i = 0; i < 40; i++) {
                const plain_sequence *seen = seen_through_window(&s, sees_sinks, sees_sinks);
                CHECK_LE(difference_in(kv, 0, seen, &exact, 0), 1e-9);
                CHECK_LE(difference_in(kv, 0, &s, &exact, 1), 1e-9);
                check_cache_at(kv, "slid by", n_removed);
                if (i == 20) { /* back over the slide */
                    s.n = s.n > 30 ? s.n - 10 : s.n;
                    CHECK_EQ(tkv_seq_truncate(kv, 0, s.n), TKV_OK);
                } else if (s.n < 500) append_plain(kv, 0, &s, 1000 * (i + 1), i % 10 ? 1 : 60, 60);
                if (s.n + 60 > 512) {
                    CHECK_EQ(tkv_seq_slide(kv, 0, 60, &n_removed), TKV_OK);
                    slide_plain(&s, 4, n_removed);
                }
            }
            tkv_destroy(kv);
        }
    CHECK(n_past >= 6);
}

/* A removal of positions that no token has changes nothing, also where the last indices have no token any more. */
TEST(removals_of_nothing_change_nothing) {
    static const int range[][2] = {{15, TKV_UNLIMITED},
                                   {100, 200},
                                   {12, TKV_UNLIMITED},
                                   {10, 15},
                                   {12, 12},
                                   {15, 15},
                                   {10, 11},
                                   {14, 15}};
    static tkv_layer_config layers[3];
    uint64_t victims[2] = {0, 0};
    tkv_config cfg = make_move_config(3);
    tkv_cache *kv;
    snapshot before;
    int i, shift, position;
    layers[1].no_cache = 1;
    layers[2].sink_tokens = TKV_OFF;
    cfg.model.n_layers = 3;
    cfg.layers = layers;
    kv = create_cache(&cfg);
    for (shift = 0; shift <= 7; shift += 7)
        for (i = 0; i < COUNT(range); i++) {
            const int end = range[i][1] == TKV_UNLIMITED ? TKV_UNLIMITED : range[i][1] + shift;
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 30, 30), TKV_OK);
            CHECK_EQ(tkv_seq_remove(kv, 0, 10, 20), TKV_OK);
            CHECK_EQ(tkv_seq_truncate(kv, 0, 15), TKV_OK);
            CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, shift), TKV_OK);
            before = snapshot_of_tokens(kv);
            CHECK_EQ(tkv_seq_remove(kv, 0, range[i][0] + shift, end), TKV_OK);
            {
                snapshot now = snapshot_of_tokens(kv);
                CHECK_MSG(is_same_snapshot(&now, &before), "positions from %d to %d, shift %d", range[i][0],
                          range[i][1], shift);
                free_snapshot(&now);
                free_snapshot(&before);
            }
            CHECK_EQ(tkv_get_length(kv, 0, 0), 15);
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 1, 1), TKV_OK);
            CHECK_EQ(tkv_get_positions(kv, 0, 2, 15, 1, &position), TKV_OK);
            CHECK_EQ(position, 15 + shift);
            check_cache_at(kv, "range", i);
        }
    CHECK_EQ(append_to_all_layers(kv, 1, 0, 200, 200),
             TKV_OK); /* the first blocks go, and no other is left */
    CHECK_EQ(tkv_seq_remove(kv, 1, 0, 100), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 1, 50), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 1, 20, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 1, 50, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 1, TKV_ALL_LAYERS), 50);
    CHECK_EQ(tkv_seq_remove(kv, 2, 0, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 2, TKV_ALL_LAYERS), 0);
    check_cache(kv);
    tkv_destroy(kv);
    /* One layer has evicted its last tokens, and the other has them: a removal at the end is a truncation of both. */
    cfg = make_move_config(1);
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 100, 100), TKV_OK);
    for (i = 80; i < 100; i++) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, 0, 1, victims, 100), TKV_OK);
    CHECK_EQ(tkv_seq_remove(kv, 0, 100, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 100);
    CHECK_EQ(tkv_seq_remove(kv, 0, 90, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 90);
    check_cache(kv);
    tkv_destroy(kv);
}

/* All tokens that a cut leaves had been evicted: there is no block, and a query that gives scores sees no key. */
TEST(nothing_is_left_of_moved_tokens) {
    const uint64_t victims = ~(uint64_t)0;
    static const float zeros[2 * KV_HEADS * V_DIM] = {0};
    float q[2 * KV_HEADS * DIM] = {1.0f}, out[2 * KV_HEADS * V_DIM], lse[2 * KV_HEADS], scores[60];
    tkv_config cfg = make_move_config(1);
    tkv_attend_params p;
    tkv_cache *kv;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 200, 50), TKV_OK);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, 5), TKV_OK);
    CHECK_EQ(evict_tokens(kv, 0, TKV_ALL_LAYERS, &victims, 64), TKV_OK);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 60), TKV_OK);
    CHECK_EQ(n_layer_blocks(kv, 0, 0), 0);
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = q;
    p.out = out;
    p.lse = lse;
    p.scores = scores;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    CHECK_MEM(out, zeros, sizeof zeros);
    tkv_destroy(kv);
}

/* Moves split entries until a cache in place has no room for more. Its budget is full as well, so a move that needs
 * entries is refused before a token is evicted for it. */
/* In place without a budget there is an entry for each block, and few for jumps of positions: when they are used up, an
 * append is refused and changes nothing. */
TEST(jumps_of_a_full_cache_in_place) {
    static plain_sequence s;
    static int positions[400];
    tkv_config cfg = make_move_config(1);
    guarded_buffer memory;
    snapshot before;
    tkv_cache *kv;
    int t;
    cfg.limits.max_tokens = 400;
    kv = create_cache_in_place(&cfg, &memory, 0);
    memset(&s, 0, sizeof s);
    append_plain(kv, 0, &s, 0, 10, 10);
    for (t = 0; t < 390; t++) positions[t] = 20 + 2 * t;
    before = snapshot_of(kv);
    CHECK_EQ(append_at_positions(kv, 0, &s, 10, 390, positions), TKV_ERR_CAPACITY);
    CHECK_STR(tkv_get_last_error(kv), "the memory given to tkv_create_in_place is full");
    check_unchanged(kv, &before, "refused");
    for (t = 0; t < 390; t++) positions[t] = 20 + t;
    CHECK_EQ(append_at_positions(kv, 0, &s, 10, 390, positions), TKV_OK); /* one jump */
    check_cache_at(kv, "full", 0);
    tkv_destroy(kv);
    check_borders(&memory);
    free(memory.raw);
}

TEST(entries_of_a_full_cache_in_place) {
    enum { WIDTH = 32, N = 64, MOST_TOKENS = 3000 };
    static float x[N * WIDTH];
    tkv_config cfg = make_sized_config(2, 1, 1, WIDTH, 1, N);
    guarded_buffer memory;
    tkv_status st = TKV_OK;
    tkv_layer_info before, after;
    tkv_rng r = tkv_rng_seed(1);
    tkv_cache *kv;
    int n, l, at, n_moved = 0;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg.limits.max_tokens = MOST_TOKENS;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    cfg.model.rope.dim = WIDTH;
    cfg.budget.bytes = 500000;
    kv = create_cache_in_place(&cfg, &memory, 0);
    for (n = 0; n < MOST_TOKENS - N && !st; n += N) {
        for (l = 0; l < 2; l++) {
            tkv_rng_fill(&r, x, N * WIDTH, 1.0);
            CHECK_EQ(tkv_append(kv, 0, l, x, x, N), TKV_OK);
        }
        for (at = 0; at < N && !st; at += 4) {
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &before), TKV_OK);
            st = tkv_seq_shift(kv, 0, n + at, TKV_UNLIMITED, 1);
            n_moved += st == TKV_OK;
        }
    }
    CHECK_EQ(st, TKV_ERR_CAPACITY);
    CHECK_MSG(strstr(tkv_get_last_error(kv), "no room for entries") != NULL, "%s", tkv_get_last_error(kv));
    CHECK(n_moved > 50);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &after), TKV_OK);
    CHECK_EQ(after.evicted, before.evicted);
    CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n);
    check_cache(kv);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    for (l = 0; l < 2; l++) CHECK_EQ(tkv_append(kv, 0, l, x, x, N), TKV_OK);
    check_cache(kv);
    tkv_destroy(kv);
    check_borders(&memory);
    free(memory.raw);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(removed_tokens_are_not_seen);
    RUN(removal_frees_memory);
    RUN(moved_tokens_attend_as_if_made_there);
    RUN(layers_have_frequencies_of_their_own);
    RUN(keys_without_rope_only_change_positions);
    RUN(formats_undo_the_rope_of_their_layer);
    RUN(moves_equal_turned_queries_to_the_bit);
    RUN(moved_keys_are_read_at_their_positions);
    RUN(keys_with_a_common_bias_move);
    RUN(kernels_agree_with_the_reference);
    RUN(threads_get_the_same_bits);
    RUN(a_thousand_moves_lose_nothing);
    RUN(coding_at_each_move_would_lose);
    RUN(moves_without_memory_change_nothing);
    RUN(evicted_neighbours_of_split_blocks_merge);
    RUN(reads_give_keys_at_their_position);
    RUN(slides_name_the_limit);
    RUN(cuts_of_split_blocks_lose_no_other_tokens);
    RUN(cuts_before_the_first_moved_token);
    RUN(evicted_tokens_of_discarded_blocks_move);
    RUN(moves_are_refused_with_a_reason);
    RUN(moves_near_expired_tokens);
    RUN(windows_behind_jumps_of_positions);
    RUN(cuts_near_tokens_that_moved_alone);
    RUN(half_a_step_is_removed);
    RUN(removed_tokens_refuse_no_move);
    RUN(a_cut_before_the_first_token_goes_on_at_0);
    RUN(layers_go_on_at_the_same_position);
    RUN(tokens_before_a_freed_block_are_not_kept);
    RUN(positions_end_before_2_to_the_30);
    RUN(tokens_take_the_positions_given);
    RUN(positions_can_go_back);
    RUN(windows_follow_the_positions_given);
    RUN(jumps_without_memory_change_nothing);
    RUN(rows_see_to_their_ends);
    RUN(queries_of_older_tokens);
    RUN(one_context_in_stripes);
    RUN(queries_of_other_sequences);
    RUN(queries_of_other_sequences_are_sampled);
    RUN(older_queries_need_their_keys);
    RUN(padded_batches_equal_packed_ones);
    RUN(copied_tokens_attend_as_if_read_there);
    RUN(copies_of_merged_blocks);
    RUN(copied_tokens_have_one_index);
    RUN(copies_of_gone_ends);
    RUN(copies_of_layers_with_other_positions);
    RUN(copies_of_coded_tokens_keep_their_bytes);
    RUN(a_token_can_be_in_several_sequences);
    RUN(copies_are_refused_with_a_reason);
    RUN(a_copy_evicts_no_token_that_it_reads);
    RUN(anchors_are_removed_and_do_not_move);
    RUN(empty_sequences_are_cut_and_moved);
    RUN(a_sequence_slides_without_end);
    RUN(a_sequence_slides_across_merged_blocks);
    RUN(sinks_beyond_a_window_stay_in_front);
    RUN(slides_of_torn_sequences);
    RUN(slides_behind_removed_tokens);
    RUN(cuts_among_expired_tokens);
    RUN(slides_that_leave_sinks_alone);
    RUN(slides_of_layers_that_differ);
    RUN(copied_sinks_end_where_sinks_end);
    RUN(copies_of_sinks);
    RUN(tokens_that_share_positions_age);
    RUN(parts_of_a_block_before_a_gap_wait);
    RUN(reservations_behind_a_shared_moved_tail);
    RUN(short_blocks_age);
    RUN(copies_wait_for_a_table);
    RUN(a_kept_path_equals_one_that_was_appended_alone);
    RUN(kept_sinks_with_gaps_are_sinks);
    RUN(keeping_is_refused_with_a_reason);
    RUN(tokens_that_are_gone_are_not_kept);
    RUN(keeping_needs_tokens_that_are_not_due);
    RUN(scores_of_halves_that_join);
    RUN(keeping_from_a_removed_token_on);
    RUN(keeping_all_tokens_adds_no_block);
    RUN(keeping_all_tokens_after_a_slide);
    RUN(first_queries_at_the_edges_of_blocks);
    RUN(keeping_stays_within_the_window);
    RUN(keeping_from_before_the_first_token_on);
    RUN(anchors_allow_keeping_tokens_in_a_row);
    RUN(slides_leave_tokens_in_each_layer);
    RUN(slides_count_sinks_of_layers_with_tokens);
    RUN(decoding_goes_on_behind_a_slide_past_the_window);
    RUN(removals_of_nothing_change_nothing);
    RUN(forks_of_evicted_tokens_are_cut_and_moved);
    RUN(nothing_is_left_of_moved_tokens);
    RUN(jumps_of_a_full_cache_in_place);
    RUN(entries_of_a_full_cache_in_place);
    return tkv_test_end();
}
