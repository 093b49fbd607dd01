/*
 * test_everything.c - random calls of every function that changes a cache, with random configs, against a model.
 *
 * The model is plain arrays: the exact keys and values of each position, and masks of evicted, discarded and pinned
 * positions. Allocators and stores fail at random. Stores sometimes return wrong bytes. Recomputation sometimes stops
 * halfway.
 *
 * After each call:
 *   - the cache passes its self-check;
 *   - memory is within the budget, and was during the call;
 *   - lengths and positions are those of the model, and each evicted token had an event;
 *   - exact tokens are equal to the bit, and encoded ones within the error of their formats;
 *   - a refused call has changed nothing.
 * Attention must match a double-precision computation from the values that tkv_read gives.
 *
 *     TKV_RANDOM_SEED=7 TKV_RANDOM_RUNS=1 TKV_RANDOM_OPS=90 ./test_everything     first seed, number of seeds, calls
 *     TKV_RANDOM_LOG=1      prints each call; without it the last ones before a failure
 *
 * A seed determines the config and the calls. They are the same on every machine where formats encode alike.
 */
#include "../tieredkv.h"
#include "kit.h"

#include <math.h>

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    SEQS = 3,
    LAYERS = 2,
    HEADS = 4, /* MAX_HEADS: in a layer with heads of its own */
    MAX_HEADS = 8,
    MAX_ROW = 96,
    CHUNK = 120,
    LONGEST = 800,
    WORDS = (LONGEST + 63) / 64,
    QUERIES = 40,
    CHECKED = 4, /* queries compared with the model: the last ones of a call */
    WINDOW = 150,
    MAX_BLOCKS = 64, /* capacity for tkv_seq_list_blocks */
    FORMAT_ROWS = 8
};

/* >>the model */
typedef struct model_sequence {
    int len, step_len;
    int exact_from; /* tokens from this position on were appended last, so they are exact */
    uint64_t evicted_mask[WORDS], discarded_mask[WORDS], pinned_mask[WORDS], removed_mask[WORDS];
    uint64_t sink_mask[WORDS]; /* named sinks */
    int position[LONGEST],
        turned[LONGEST]; /* turned: positions that the token has moved since it was appended */
    float k[LONGEST * MAX_ROW], v[LONGEST * MAX_ROW];
} model_sequence;

static model_sequence model[SEQS][LAYERS];
static int in_step[SEQS], reserved[SEQS];
static int may_share[SEQS];            /* 1: the sequence was forked, or is a fork */
static int newest_state[SEQS][LAYERS]; /* tokens that it has seen; 0: none that must be there */
static int has_moved[SEQS];            /* 1: tokens of the sequence got other positions */
static int has_copies[SEQS];           /* 1: tokens of another sequence were copied to it */
static int has_discards[SEQS];         /* 1: blocks were discarded. A former anchor may be discarded, too. */

/* >>the cache under test */
static tkv_config cfg;
static tkv_cache *kv;
static counting_allocator memory;
static guarded_buffer arena;
static test_store store;
static tkv_remat remat;
static size_t max_budget, image_size;
static uint8_t image[1 << 18]; /* written by tkv_save_calibration */
static tkv_rng rng;
static int in_place, remat_step, exact_only;
static struct layer_shape { /* of each layer; rows: K or V of a token, all heads */
    int heads, kv_heads, dim, v_dim, k_row, v_row, v_in_k;
} shape[LAYERS];
static int fail_at_row; /* n: the n-th call of compute_rows from now on fails; 0: none */
static int format_row;  /* index of formats[] */
/* Errors |error|^2 / |token|^2 of K or V: bounds of a token and of the mean, and the largest ones without and with a
 * budget. worst_attend: the largest error of attention, relative to its bound. */
static double token_bound, mean_bound, worst_attend;
static double worst_token[FORMAT_ROWS][2], worst_mean[FORMAT_ROWS][2];

/* The current call: the side effects that it may have, and the events during it. */
static struct {
    int may_evict[SEQS];   /* tokens may be evicted, with an event */
    int may_discard[SEQS]; /* blocks may be discarded */
    int may_restore[SEQS]; /* discarded blocks may be restored */
    /* n_wrong: unexpected events. keeps_part: 2 if a call that fails may keep a part of its work. sets_error: an error
     * must leave a message. */
    int n_evicted, n_wrong, keeps_part, sets_error;
    int may_expire; /* tokens may expire even if the call fails */
    char text[160];
} call;

static float k_in[SEQS * CHUNK * MAX_ROW], v_in[SEQS * CHUNK * MAX_ROW];
static float k_out[LONGEST * MAX_ROW], v_out[LONGEST * MAX_ROW];

static int has_bit(const uint64_t *bits, int i) { return (int)(bits[i / 64] >> i % 64 & 1); }
static void set_bit(uint64_t *bits, int i) { bits[i / 64] |= (uint64_t)1 << i % 64; }
static void clear_bit(uint64_t *bits, int i) { bits[i / 64] &= ~((uint64_t)1 << i % 64); }
static int rand_below(int n) { return tkv_rng_below(&rng, n); }
static int min_of(int a, int b) { return a < b ? a : b; }
static int max_of(int a, int b) { return a > b ? a : b; }

static int min_len(int seq) {
    int l, n = LONGEST;
    for (l = 0; l < LAYERS; l++) n = min_of(n, model[seq][l].len);
    return n;
}

static int max_len(int seq) {
    int l, n = 0;
    for (l = 0; l < LAYERS; l++) n = max_of(n, model[seq][l].len);
    return n;
}

static int has_discarded_tokens(int seq) {
    int l, i, n = 0;
    for (l = 0; l < LAYERS; l++)
        for (i = 0; i < WORDS; i++) n += model[seq][l].discarded_mask[i] != 0;
    return n;
}

/* States that have seen more than n tokens of a sequence may go. */
static void forget_states(int seq, int n) {
    int l;
    for (l = 0; l < LAYERS; l++)
        if (newest_state[seq][l] > n) newest_state[seq][l] = 0;
}

static void truncate_model(int seq, int layer, int len) {
    model_sequence *s = &model[seq][layer];
    for (; s->len > len; s->len--) {
        clear_bit(s->evicted_mask, s->len - 1);
        clear_bit(s->discarded_mask, s->len - 1);
        clear_bit(s->pinned_mask, s->len - 1);
        clear_bit(s->removed_mask, s->len - 1);
        clear_bit(s->sink_mask, s->len - 1);
    }
    s->exact_from = min_of(s->exact_from, s->len);
}

static void reset_model(int seq) {
    int l;
    for (l = 0; l < LAYERS; l++) { truncate_model(seq, l, 0); }
    forget_states(seq, 0);
    in_step[seq] = reserved[seq] = has_discards[seq] = may_share[seq] = has_moved[seq] = 0;
    has_copies[seq] = 0;
}

static int window_of(int layer) { return cfg.model.window ? cfg.model.window : cfg.layers[layer].window; }

/* Number of first tokens that queries see beyond a window. */
static int n_window_sinks(void) {
    if (!cfg.model.window_sinks) return 0;
    return cfg.tiers.sink_tokens ? cfg.tiers.sink_tokens : 4;
}

static void run_backwards(void *user, int n_tasks, tkv_task task, void *ctx) {
    (void)user;
    while (n_tasks-- > 0) task(ctx, n_tasks);
}

/* Values have seven bits and a sign, so every exact format stores them without loss. */
static void fill_random_tokens(int n) {
    int i;
    for (i = 0; i < n * MAX_ROW; i++) {
        const int a = (int)(tkv_rng_gauss(&rng) * 32.0), b = (int)(tkv_rng_gauss(&rng) * 32.0);
        k_in[i] = (float)(a > 127 ? 127 : a < -127 ? -127 : a) / 32.0f;
        v_in[i] = (float)(b > 127 ? 127 : b < -127 ? -127 : b) / 32.0f;
    }
}

/* positions: of the tokens; NULL: they follow the last one. */
static void append_to_model(int seq, int layer, int first, int n, const int *positions) {
    model_sequence *s = &model[seq][layer];
    int i;
    if (!in_step[seq] && n) s->exact_from = s->len;
    memcpy(s->k + s->len * shape[layer].k_row, k_in + first * shape[layer].k_row,
           (size_t)(n * shape[layer].k_row) * sizeof(float));
    memcpy(s->v + s->len * shape[layer].v_row, v_in + first * shape[layer].v_row,
           (size_t)(n * shape[layer].v_row) * sizeof(float));
    for (i = 0; i < n * shape[layer].kv_heads && shape[layer].v_in_k; i++)
        memcpy(s->v + s->len * shape[layer].v_row + i * shape[layer].v_dim,
               s->k + s->len * shape[layer].k_row + i * shape[layer].dim,
               (size_t)shape[layer].v_dim * sizeof(float));
    CHECK_EQ(tkv_get_positions(kv, seq, layer, s->len, n, s->position + s->len), TKV_OK);
    if (n && s->len && !has_bit(s->evicted_mask, s->len - 1) && !positions)
        CHECK_EQ(s->position[s->len], s->position[s->len - 1] + 1);
    for (i = s->len; i < s->len + n; i++) {
        s->turned[i] = 0;
        if (positions) CHECK_EQ(s->position[i], positions[i - s->len]);
        else if (i > s->len) CHECK_EQ(s->position[i], s->position[i - 1] + 1);
    }
    s->len += n;
}

/* Rotates a key of a layer, all heads, as RoPE does for a number of positions. */
static void rotate_key(int layer, int positions, float *key) {
    const tkv_rope *own = &cfg.layers[layer].rope, *rope = own->dim ? own : &cfg.model.rope;
    const int pairs = rope->dim / 2; /* TKV_OFF / 2 is 0 */
    const int step = rope->interleaved ? 2 : 1, apart = rope->interleaved ? 1 : pairs;
    int h, j;
    for (h = 0; h < shape[layer].kv_heads && positions; h++)
        for (j = 0; j < pairs; j++) {
            const double base = rope->base > 0.0f ? (double)rope->base : 10000.0;
            const double angle = positions * pow(base, -(double)j / pairs);
            float *x = key + h * shape[layer].dim + rope->first + j * step;
            const double a = (double)x[0], b = (double)x[apart];
            x[0] = (float)(a * cos(angle) - b * sin(angle));
            x[apart] = (float)(b * cos(angle) + a * sin(angle));
        }
}

/* A key of the model at its present position. */
static const float *moved_key(const model_sequence *s, int token, float *out) {
    const int layer = (int)(s - &model[0][0]) % LAYERS, row = shape[layer].k_row;
    memcpy(out, s->k + token * row, (size_t)row * sizeof *out);
    rotate_key(layer, s->turned[token], out);
    return out;
}

/* Live tokens of a layer in all sequences, before the call in progress. */
static int n_live_in_layer(int layer) {
    int s, i, n = 0;
    for (s = 0; s < SEQS; s++)
        for (i = 0; i < model[s][layer].len; i++)
            n += !has_bit(model[s][layer].evicted_mask, i) && !has_bit(model[s][layer].discarded_mask, i);
    return n;
}

/* A table that a flush, a freeze or a budget learns from less than a block of tokens fits no others: the bounds end. */
static void record_event(void *user, const tkv_event *e) {
    int i;
    (void)user;
    if (!e->text || !e->text[0]) call.n_wrong++;
    if (e->kind == TKV_EVENT_TABLE && n_live_in_layer(e->layer) < BLOCK) token_bound = mean_bound = HUGE_VAL;
    if (e->kind != TKV_EVENT_EVICT) return;
    call.n_evicted += e->n;
    if (!call.may_evict[e->seq]) call.n_wrong++;
    for (i = 0; i < e->n; i++) {
        model_sequence *s = &model[e->seq][e->layer];
        const int position = e->positions[i];
        if (position < 0 || position >= s->len || has_bit(s->evicted_mask, position) ||
            has_bit(s->pinned_mask, position) || has_bit(s->sink_mask, position) ||
            (i && position <= e->positions[i - 1])) {
            call.n_wrong++;
            continue;
        }
        set_bit(s->evicted_mask, position);
        clear_bit(s->discarded_mask, position);
    }
}

/* >>snapshots: the visible state of all sequences, checked against the model */
enum { LIVE, EVICTED, DISCARDED, EXPIRED };

/* 1 if the values of a token can be read: it is in the cache, or cfg.recompute gives it. */
static int is_readable(int state) { return state == LIVE || (state == DISCARDED && cfg.recompute.compute); }

typedef struct snapshot {
    int len[SEQS][LAYERS], level;
    size_t bytes, budget, calibration_bytes;
    uint8_t state[SEQS][LAYERS][LONGEST];
    uint32_t values[SEQS][LAYERS][LONGEST];
} snapshot;

static snapshot before, now;

static uint32_t hash_values(uint32_t h, const float *x, int n) {
    int i;
    for (i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        h = (h ^ bits) * 0x9e3779b1u;
        h ^= h >> 15;
    }
    return h;
}

/* Relative error |x - y|^2 / |y|^2. The divisor is at least n / 4. */
static double relative_error(const float *x, const float *y, int n) {
    double err_sq = 0.0, sum_sq = 0.0;
    int i;
    for (i = 0; i < n; i++) {
        const double d = (double)x[i] - (double)y[i];
        err_sq += d * d;
        sum_sq += (double)y[i] * (double)y[i];
    }
    return err_sq / (sum_sq > 0.25 * n ? sum_sq : 0.25 * n);
}

/* 1 if V of a token is the first channels of its key as appended: the key as read, turned back. */
static int is_v_in_k(int layer, int turned, const float *k, const float *v) {
    const struct layer_shape *l = &shape[layer];
    float key[MAX_ROW];
    int h, same = 1;
    memcpy(key, k, (size_t)l->k_row * sizeof *key);
    rotate_key(layer, -turned, key);
    for (h = 0; h < l->kv_heads; h++, v += l->v_dim)
        same &= turned ? relative_error(key + h * l->dim, v, l->v_dim) < 1e-9
                       : memcmp(key + h * l->dim, v, (size_t)l->v_dim * sizeof *v) == 0;
    return same;
}

static void check_layer(int seq, int layer) {
    model_sequence *s = &model[seq][layer];
    uint8_t *state = now.state[seq][layer];
    uint8_t tier[LONGEST], part = 0;
    static int n_checked, positions[LONGEST];
    tkv_layer_info info;
    double sum = 0.0;
    int n_encoded = 0, n_sinks = 0, count[4] = {0}, i, j, n, n_held;
    now.len[seq][layer] = tkv_get_length(kv, seq, layer);
    CHECK_EQ(now.len[seq][layer], s->len);
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, s->len, tier), TKV_OK);
    if (s->len > 0) { /* a part of the list gives the same answer */
        const int from = n_checked++ % s->len;
        CHECK_EQ(tkv_get_tiers(kv, seq, layer, from, 1, &part), TKV_OK);
        CHECK_EQ(part, tier[from]);
    }
    if (tkv_test_.n_bad) return;
    CHECK_MSG(info.expired >= 0 && (info.expired <= max_of(0, window_of(layer) ? s->len - WINDOW : 0) ||
                                    (window_of(layer) && has_moved[seq])),
              "sequence %d, layer %d: %d of %d have left the window", seq, layer, info.expired, s->len);
    has_discards[seq] |= call.may_discard[seq];
    for (i = 0; i < s->len; i++) {
        state[i] = (uint8_t)(tier[i] < TKV_TIER_COUNT         ? LIVE
                             : tier[i] == TKV_TOKEN_DISCARDED ? DISCARDED
                             : has_bit(s->evicted_mask, i)    ? EVICTED
                                                              : EXPIRED);
        CHECK(tier[i] < TKV_TIER_COUNT || tier[i] == TKV_TOKEN_DISCARDED || tier[i] == TKV_TOKEN_GONE);
        if (state[i] == EXPIRED)
            CHECK_MSG(window_of(layer) && ((i < s->len - WINDOW && i >= n_window_sinks()) || has_moved[seq]),
                      "sequence %d, layer %d: token %d vanished without an event", seq, layer, i);
        if (has_bit(s->sink_mask, i)) {
            CHECK_MSG(tier[i] == TKV_TIER_HOT ||
                          (state[i] == EXPIRED && window_of(layer) && !cfg.model.window_sinks),
                      "sequence %d, layer %d: the named sink %d is in tier %d", seq, layer, i, tier[i]);
            n_sinks += state[i] == LIVE;
        }
        if (has_bit(s->evicted_mask, i))
            CHECK_MSG(state[i] == EVICTED, "sequence %d, layer %d: evicted token %d is live", seq, layer, i);
        if (state[i] == DISCARDED && !has_bit(s->discarded_mask, i)) {
            CHECK_MSG(call.may_discard[seq] || cfg.recompute.compute ||
                          (cfg.tiers.n_anchors && has_discards[seq]),
                      "sequence %d, layer %d: token %d was discarded", seq, layer, i);
            set_bit(s->discarded_mask, i);
        }
        if (state[i] != DISCARDED && has_bit(s->discarded_mask, i)) {
            CHECK_MSG(state[i] == EXPIRED || call.may_restore[seq],
                      "sequence %d, layer %d: token %d was restored", seq, layer, i);
            clear_bit(s->discarded_mask, i);
        }
        count[state[i]]++;
    }
    CHECK_EQ(tkv_get_positions(kv, seq, layer, 0, s->len, positions), TKV_OK);
    for (i = 0; i < s->len; i++)
        if (is_readable(state[i]) || state[i] == DISCARDED)
            CHECK_MSG(positions[i] == s->position[i], "sequence %d, layer %d: token %d is at %d, not %d", seq,
                      layer, i, positions[i], s->position[i]);
        else s->position[i] = positions[i]; /* it follows from the neighbours */
    n_held = info.tokens[TKV_TIER_HOT] + info.tokens[TKV_TIER_WARM] + info.tokens[TKV_TIER_ARCHIVE];
    CHECK_EQ(n_held, count[LIVE]);
    CHECK_EQ(info.discarded, count[DISCARDED]);
    CHECK_EQ(info.named_sinks, n_sinks);
    CHECK_EQ(n_held + info.discarded + info.expired + info.evicted, s->len);
    for (i = 0; i < s->len; i += n) {
        for (n = 1; i + n < s->len && state[i + n] == state[i]; n++) {}
        if (!is_readable(state[i])) {
            for (j = i; j < i + n; j++) now.values[seq][layer][j] = 0;
            CHECK_EQ(tkv_read(kv, seq, layer, i, n, k_out, v_out),
                     state[i] == DISCARDED ? TKV_ERR_NO_SOURCE : TKV_ERR_RANGE);
            continue;
        }
        CHECK_EQ(tkv_read(kv, seq, layer, i, n, k_out, v_out), TKV_OK);
        for (j = i; j < i + n; j++) {
            const float *k = k_out + (j - i) * shape[layer].k_row, *v = v_out + (j - i) * shape[layer].v_row;
            float want[MAX_ROW];
            const int same =
                (s->turned[j] ? relative_error(k, moved_key(s, j, want), shape[layer].k_row) < 1e-9
                              : memcmp(k, s->k + j * shape[layer].k_row,
                                       (size_t)shape[layer].k_row * sizeof *k) == 0) &&
                memcmp(v, s->v + j * shape[layer].v_row, (size_t)shape[layer].v_row * sizeof *v) == 0;
            now.values[seq][layer][j] =
                hash_values(hash_values(1, k, shape[layer].k_row), v, shape[layer].v_row);
            if (shape[layer].v_in_k)
                CHECK_MSG(is_v_in_k(layer, s->turned[j], k, v),
                          "sequence %d, layer %d: V of token %d is not inside its K", seq, layer, j);
            if (same) continue;
            CHECK_MSG(tier[j] != TKV_TIER_HOT && state[j] == LIVE && j < s->exact_from && !exact_only,
                      "sequence %d, layer %d: exact token %d changed", seq, layer, j);
            {
                const double a = relative_error(k, moved_key(s, j, want), shape[layer].k_row),
                             b = shape[layer].v_in_k /* no error of its own */
                                     ? 0.0
                                     : relative_error(v, s->v + j * shape[layer].v_row, shape[layer].v_row);
                const double e = a > b ? a : b;
                CHECK_MSG(e <= token_bound, "sequence %d, layer %d: token %d is off by %.3f and %.3f", seq,
                          layer, j, a, b);
                if (token_bound < HUGE_VAL && e > worst_token[format_row][cfg.budget.bytes > 0])
                    worst_token[format_row][cfg.budget.bytes > 0] = e;
                n_encoded++;
                sum += e;
            }
        }
    }
    if (n_encoded < BLOCK / 2) return;
    sum /= n_encoded;
    if (mean_bound < HUGE_VAL && sum > worst_mean[format_row][cfg.budget.bytes > 0])
        worst_mean[format_row][cfg.budget.bytes > 0] = sum;
    CHECK_MSG(sum <= mean_bound, "sequence %d, layer %d: tokens are off by %.3f", seq, layer, sum);
}

/* What a state must be after the first n tokens: a hash of their keys in layer 0, without removed tokens. */
static uint32_t hash_seen(int seq, int n) {
    const model_sequence *s = &model[seq][0];
    uint32_t h = 5;
    int i;
    for (i = 0; i < n; i++)
        if (!has_bit(s->removed_mask, i)) h = hash_values(h, s->k + i * shape[0].k_row, 1);
    return h;
}

/* Every state is that of the tokens of its sequence. The newest one of each layer is there. */
static void check_states(int seq, int layer) {
    int at[256], n = 0, i, j;
    uint32_t words[512];
    size_t size;
    CHECK_EQ(tkv_seq_list_states(kv, seq, layer, at, 256, &n), TKV_OK);
    CHECK(n <= 256);
    for (i = 0; i < n && !tkv_test_.n_bad; i++) {
        const uint32_t want = hash_seen(seq, min_of(at[i], model[seq][0].len));
        CHECK(at[i] <= model[seq][0].len);
        CHECK_EQ(tkv_seq_get_state(kv, seq, layer, at[i], words, sizeof words, &size), TKV_OK);
        for (j = 0; j < (int)(size / sizeof *words); j++)
            CHECK_MSG(words[j] == want, "sequence %d, layer %d: the state after %d tokens has seen others",
                      seq, layer, at[i]);
    }
    if (newest_state[seq][layer]) CHECK_EQ(n ? at[n - 1] : 0, newest_state[seq][layer]);
}

static void take_snapshot(void) {
    tkv_memory_info m;
    int s, l;
    before = now;
    check_cache(kv);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    now.bytes = m.total;
    now.level = budget_of(kv).level;
    now.budget = budget_of(kv).budget;
    CHECK_EQ(tkv_save_calibration(kv, NULL, 0, &now.calibration_bytes), TKV_OK);
    if (!in_place) CHECK_EQ(m.total, memory.held);
    if (now.budget) CHECK_LE(m.total, in_place ? cfg.budget.bytes : now.budget);
    if (!in_place && now.budget && before.budget)
        CHECK_LE(memory.peak, now.budget > before.budget ? now.budget : before.budget);
    for (s = 0; s < SEQS; s++)
        for (l = 0; l < LAYERS && !tkv_test_.n_bad; l++) {
            check_layer(s, l);
            check_states(s, l);
        }
}

/* Compares the snapshots before and after a call that failed. recoded: blocks may have been recoded or offloaded, and
 * tables learned. keeps_part: the call may also have discarded or evicted a part. */
static void check_unchanged(int recoded, int keeps_part) {
    int s, l, i;
    for (s = 0; s < SEQS; s++)
        for (l = 0; l < LAYERS; l++) {
            CHECK_EQ(now.len[s][l], before.len[s][l]);
            for (i = 0; i < now.len[s][l] && i < before.len[s][l]; i++) {
                const int was = before.state[s][l][i], is = now.state[s][l][i];
                CHECK_MSG(was == is || (recoded && cfg.recompute.compute && is == DISCARDED) ||
                              (call.may_expire && is == EXPIRED) ||
                              (keeps_part && (is == DISCARDED || (is == EVICTED && call.n_evicted))),
                          "sequence %d, layer %d, token %d: state %d, was %d", s, l, i, is, was);
                if (!recoded)
                    CHECK_MSG(now.values[s][l][i] == before.values[s][l][i],
                              "sequence %d, layer %d: token %d reads differently", s, l, i);
            }
        }
    CHECK_EQ(now.budget, before.budget);
    if (recoded) return;
    CHECK_EQ(now.level, before.level);
    CHECK_EQ(now.calibration_bytes, before.calibration_bytes);
}

/* >>calls: each function below makes one random call of the library. The table calls[] lists the errors it may give. */
#define ERR(status) (1u << -(int)TKV_ERR_##status)
enum { MEMORY_ERRORS = 1u << 3 | 1u << 4 | 1u << 12 }; /* NOMEM, CAPACITY, BUDGET */

static int has_budget(void) { return now.budget != 0; }

/* Allows the call to evict tokens and to discard blocks. used: a sequence whose blocks are not discarded; -1: none. */
static void allow_reclaim(int used) {
    int s;
    for (s = 0; s < SEQS && has_budget(); s++) {
        if (in_step[s]) continue;
        if (cfg.evict.policy) call.may_evict[s] = 1;
        if (cfg.budget.discard && s != used) call.may_discard[s] = 1;
    }
}

/* Appends as a whole or as parts. The parts run in a random order. */
static tkv_status append_somehow(const tkv_append_params *p) {
    static const int counts[] = {1, 2, 3, 7, 20};
    static unsigned char space[1 << 20];
    const int n_parts = rand_below(3) ? 0 : counts[rand_below(COUNT(counts))];
    int order[20], i;
    size_t bytes = 0;
    tkv_status st = TKV_OK;
    if (!n_parts) return tkv_append_ex(kv, p);
    CHECK_EQ(tkv_get_append_bytes(kv, p, &bytes), TKV_OK);
    CHECK_LE(bytes + 1, sizeof space);
    memset(space, 0, 128);
    space[bytes] = 0xa5;
    fill_random_order(&rng, order, n_parts);
    for (i = 0; i < n_parts; i++) {
        CHECK_EQ(st, TKV_OK); /* the last part has the status of the append */
        st = tkv_append_part(kv, p, order[i], n_parts, space, bytes);
    }
    CHECK(is_zero(space, 128) && space[bytes] == 0xa5);
    return st;
}

/* V of an append: where V is inside K, other values that the cache must not read, or NULL. */
static const float *choose_v_in(int layer) { return shape[layer].v_in_k && rand_below(2) ? NULL : v_in; }

static tkv_append_params append_params_of(int seq, int layer, int n) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.k = k_in;
    p.v = choose_v_in(layer);
    return p;
}

static tkv_status call_append(int seq, int layer) {
    model_sequence *s = &model[seq][layer];
    tkv_append_params p;
    const int lag = max_len(seq) - s->len, n_free = CHUNK - (in_step[seq] ? s->len - s->step_len : 0);
    int n = lag && rand_below(8) ? lag : 1 + rand_below(rand_below(3) ? 12 : CHUNK);
    tkv_status st;
    n = min_of(min_of(n, n_free), LONGEST - s->len);
    if (n <= 0) return TKV_OK;
    fill_random_tokens(n);
    allow_reclaim(seq);
    if (cfg.evict.keep_tokens && !in_step[seq]) call.may_evict[seq] = 1;
    sprintf(call.text, "append %d tokens to sequence %d, layer %d", n, seq, layer);
    p = append_params_of(seq, layer, n);
    st = append_somehow(&p);
    if (!st) append_to_model(seq, layer, 0, n, NULL);
    else
        CHECK_MSG(s->len + n > reserved[seq], "refused what is reserved, up to %d: %s", reserved[seq],
                  tkv_get_last_error(kv));
    if (min_len(seq) >= reserved[seq] && !in_step[seq]) reserved[seq] = 0;
    return st;
}

/* Appends tokens at positions that repeat and jump, now and then back. */
static tkv_status call_append_at(int seq, int layer) {
    model_sequence *s = &model[seq][layer];
    const int n_free = CHUNK - (in_step[seq] ? s->len - s->step_len : 0);
    const int n = min_of(min_of(1 + rand_below(40), n_free), LONGEST - s->len);
    int positions[CHUNK], i, at = s->len ? s->position[s->len - 1] + 1 : 0;
    tkv_append_params p;
    tkv_status st;
    if (n <= 0 || cfg.tiers.n_anchors) return TKV_OK;
    fill_random_tokens(n);
    allow_reclaim(seq);
    if (cfg.evict.keep_tokens && !in_step[seq]) call.may_evict[seq] = 1;
    if (rand_below(10) == 0) at = rand_below(at + 1);
    for (i = 0; i < n; i++, at += rand_below(5) ? 1 : rand_below(20)) positions[i] = at;
    sprintf(call.text, "append %d tokens to sequence %d, layer %d, at %d to %d", n, seq, layer, positions[0],
            at);
    p = append_params_of(seq, layer, n);
    p.token_positions = positions;
    st = append_somehow(&p);
    reserved[seq] = 0;
    if (st == TKV_ERR_RANGE) CHECK(window_of(layer));
    if (st) return st;
    has_moved[seq] = 1;
    append_to_model(seq, layer, 0, n, positions);
    return st;
}

static tkv_status call_append_batch(int seq, int layer) {
    tkv_append_params p;
    tkv_rows rows[SEQS];
    tkv_status st;
    int s, n = 0;
    memset(&p, 0, sizeof p);
    for (s = 0; s < SEQS; s++) {
        const model_sequence *t = &model[s][layer];
        rows[s].seq = s;
        rows[s].n =
            min_of(min_of(rand_below(40), CHUNK - (in_step[s] ? t->len - t->step_len : 0)), LONGEST - t->len);
        if (rand_below(4) == 0) rows[s].n = 0;
        n += rows[s].n;
    }
    fill_random_tokens(n);
    p.layer = layer;
    p.batch = rows;
    p.n_batch = SEQS;
    p.k = k_in;
    p.v = choose_v_in(layer);
    allow_reclaim(seq);
    for (s = 0; s < SEQS; s++)
        if (cfg.evict.keep_tokens && !in_step[s]) call.may_evict[s] = 1;
    for (s = 0; s < SEQS; s++) call.may_discard[s] = call.may_discard[s] && rows[s].n == 0;
    sprintf(call.text, "append %d, %d, %d tokens to layer %d", rows[0].n, rows[1].n, rows[2].n, layer);
    st = append_somehow(&p);
    for (s = 0, n = 0; s < SEQS && !st; s++) {
        append_to_model(s, layer, n, rows[s].n, NULL);
        n += rows[s].n;
        if (min_len(s) >= reserved[s] && !in_step[s]) reserved[s] = 0;
    }
    return st;
}

static tkv_status call_begin(int seq, int layer) {
    tkv_status st;
    int l;
    (void)layer;
    allow_reclaim(seq);
    if (cfg.evict.keep_tokens) call.may_evict[seq] = 1;
    st = tkv_seq_begin(kv, seq);
    CHECK_EQ(st == TKV_ERR_STATE, in_step[seq]);
    for (l = 0; l < LAYERS && !st; l++) model[seq][l].step_len = model[seq][l].exact_from = model[seq][l].len;
    if (!st) in_step[seq] = 1;
    return st;
}

static tkv_status call_end(int seq, int layer) { /* commits or aborts */
    const int layers_agree =
        model[seq][0].len - model[seq][0].step_len == model[seq][1].len - model[seq][1].step_len;
    tkv_status st;
    int l;
    (void)layer;
    if (!in_step[seq]) return rand_below(2) ? tkv_seq_commit(kv, seq) : tkv_seq_abort(kv, seq);
    if (rand_below(3)) {
        sprintf(call.text, "commit sequence %d", seq);
        st = tkv_seq_commit(kv, seq);
        CHECK_EQ(st, layers_agree ? TKV_OK : TKV_ERR_STATE);
        if (!st) in_step[seq] = 0;
    } else {
        sprintf(call.text, "abort sequence %d", seq);
        st = tkv_seq_abort(kv, seq);
        CHECK_EQ(st, TKV_OK);
        for (l = 0; l < LAYERS; l++) truncate_model(seq, l, model[seq][l].step_len);
        forget_states(seq, min_len(seq));
        in_step[seq] = 0;
    }
    if (min_len(seq) >= reserved[seq]) reserved[seq] = 0;
    return st;
}

static tkv_status call_reserve(int seq, int layer) {
    const int n = 1 + rand_below(min_of(CHUNK, LONGEST - min_len(seq)));
    tkv_status st;
    (void)layer;
    allow_reclaim(seq);
    sprintf(call.text, "reserve %d for sequence %d", n, seq);
    if (min_len(seq) + n > LONGEST) return TKV_OK;
    st = tkv_seq_reserve(kv, seq, n);
    if (!st) reserved[seq] = max_of(reserved[seq], min_len(seq) + n);
    return st;
}

static tkv_status call_truncate(int seq, int layer) {
    const int to = max_of(0, min_len(seq) - rand_below(rand_below(4) ? 90 : LONGEST));
    tkv_status st;
    int l, cuts_coded = may_share[seq];
    (void)layer;
    sprintf(call.text, "truncate sequence %d to %d", seq, to);
    for (l = 0; l < LAYERS; l++) { /* without compressed or shared tokens, it needs more slots than before */
        uint8_t tier[LONGEST];
        int i, n = model[seq][l].len - to;
        if (n > 0) CHECK_EQ(tkv_get_tiers(kv, seq, l, to, n, tier), TKV_OK);
        for (i = 0; i < n; i++) cuts_coded |= tier[i] != TKV_TIER_HOT;
        for (i = 0; i < WORDS; i++) cuts_coded |= model[seq][l].sink_mask[i] != 0;
    }
    st = tkv_seq_truncate(kv, seq, to);
    for (l = 0; l < LAYERS && !st; l++) truncate_model(seq, l, to);
    if (!st) forget_states(seq, to);
    if (!st && (cfg.evict.policy || cuts_coded)) reserved[seq] = 0;
    return st;
}

static tkv_status call_fork(int seq, int layer) {
    const int src = (seq + 1 + rand_below(SEQS - 1)) % SEQS, len = max_len(src);
    const int n = rand_below(2) ? TKV_UNLIMITED : max_of(0, len - rand_below(rand_below(2) ? 90 : len + 1));
    tkv_status st;
    int l;
    (void)layer;
    if (len < 70 && rand_below(2)) return TKV_OK;
    allow_reclaim(src);
    sprintf(call.text, "fork %d tokens of sequence %d as %d", n, src, seq);
    st = tkv_seq_fork(kv, src, seq, n);
    CHECK_EQ(st == TKV_ERR_STATE, in_step[src] || in_step[seq]);
    if (st == TKV_ERR_RANGE) CHECK(window_of(0) || window_of(1));
    if (st) return st;
    for (l = 0; l < LAYERS; l++) {
        model[seq][l] = model[src][l];
        truncate_model(seq, l, n == TKV_UNLIMITED ? LONGEST : n);
        newest_state[seq][l] = newest_state[src][l];
    }
    forget_states(seq, n == TKV_UNLIMITED ? LONGEST : n);
    has_discards[seq] = has_discards[src];
    has_moved[seq] = has_moved[src];
    has_copies[seq] = has_copies[src];
    reserved[seq] = reserved[src] = 0;
    may_share[seq] = may_share[src] = 1;
    return st;
}

static tkv_status call_reorder(int seq, int layer) {
    static model_sequence old[SEQS][LAYERS];
    int old_state[SEQS][LAYERS], moved[SEQS], copies[SEQS], discards[SEQS], sources[SEQS];
    const int first = rand_below(2), n = SEQS - first;
    tkv_status st;
    int i, is_open = 0;
    (void)layer;
    if (max_len(seq) < 70 && rand_below(2)) return TKV_OK;
    allow_reclaim(seq);
    sprintf(call.text, "reorder");
    for (i = 0; i < n; i++) {
        sources[i] = rand_below(3) ? rand_below(n) : i;
        is_open |= in_step[first + i];
        sprintf(call.text + strlen(call.text), " %d", first + sources[i]);
    }
    st = tkv_seq_reorder(kv, first, sources, n);
    CHECK_EQ(st == TKV_ERR_STATE, is_open);
    if (st) return st;
    memcpy(old, model, sizeof old);
    memcpy(old_state, newest_state, sizeof old_state);
    memcpy(moved, has_moved, sizeof moved);
    memcpy(copies, has_copies, sizeof copies);
    memcpy(discards, has_discards, sizeof discards);
    for (i = 0; i < n; i++) {
        const int from = first + sources[i], to = first + i;
        memcpy(model[to], old[from], sizeof old[0]);
        memcpy(newest_state[to], old_state[from], sizeof old_state[0]);
        has_moved[to] = moved[from];
        has_copies[to] = copies[from];
        has_discards[to] = discards[from];
        may_share[to] = 1;
        reserved[to] = 0;
    }
    return st;
}

/* Positions from *first to *end - 1: a part of a sequence, or more. */
static void choose_range(int seq, int *first, int *end) {
    *first = rand_below(max_len(seq) + 10);
    *end = rand_below(4) ? *first + rand_below(150) : TKV_UNLIMITED;
}

static int is_in_range(int position, int first, int end) {
    return position >= first && (end == TKV_UNLIMITED || position < end);
}

static tkv_status call_remove(int seq, int layer) {
    int first, end, l, i;
    tkv_status st;
    (void)layer;
    choose_range(seq, &first, &end);
    if (end == TKV_UNLIMITED && rand_below(3)) end = first + 5;
    sprintf(call.text, "remove positions %d to %d of sequence %d", first, end, seq);
    st = tkv_seq_remove(kv, seq, first, end);
    CHECK_EQ(st == TKV_ERR_STATE, in_step[seq]);
    if (st == TKV_ERR_RANGE) CHECK(window_of(0) || window_of(1));
    if (st) return st;
    for (l = 0; l < LAYERS; l++) {
        model_sequence *s = &model[seq][l];
        const int len = tkv_get_length(kv, seq, l);
        for (i = 0; i < s->len; i++) {
            const int state = now.state[seq][l][i], held = state == LIVE || state == DISCARDED;
            if (held && i >= len) CHECK(is_in_range(s->position[i], first, end));
            if (!held || !is_in_range(s->position[i], first, end)) continue;
            set_bit(s->evicted_mask, i);
            set_bit(s->removed_mask, i);
            clear_bit(s->discarded_mask, i);
            clear_bit(s->pinned_mask, i);
            clear_bit(s->sink_mask, i);
            forget_states(seq, i);
        }
        forget_states(seq, len);
        truncate_model(seq, l, len);
    }
    reserved[seq] = 0;
    return st;
}

static tkv_status call_shift(int seq, int layer) {
    const int delta = rand_below(300) - 100;
    int first, end, l, i;
    tkv_status st;
    (void)layer;
    choose_range(seq, &first, &end);
    allow_reclaim(seq);
    sprintf(call.text, "shift positions %d to %d of sequence %d by %d", first, end, seq, delta);
    st = tkv_seq_shift(kv, seq, first, end, delta);
    if (st == TKV_ERR_UNSUPPORTED) CHECK(!cfg.model.rope.dim || cfg.tiers.n_anchors);
    if (st == TKV_ERR_NO_SOURCE) CHECK(has_discarded_tokens(seq));
    if (st || delta == 0) return st;
    for (l = 0; l < LAYERS; l++) {
        model_sequence *s = &model[seq][l];
        for (i = 0; i < s->len; i++)
            if (is_in_range(s->position[i], first, end)) s->position[i] += delta, s->turned[i] += delta;
    }
    reserved[seq] = 0;
    may_share[seq] = has_moved[seq] = 1;
    return st;
}

/* Marks the indices of a sequence that a copy takes: those where any layer has a token in the range. Where none has a
 * token, the last one before it tells the position, or the first one behind if there is none or if the layers were told
 * other positions of it. Behind the last token the longest layer does. Returns their number. */
static int choose_copied(int src, int first, int end, uint8_t *is_taken) {
    const int len = max_len(src), longest = model[src][0].len < model[src][1].len;
    int i, j, l, n = 0, shift = 0, is_known = 0, from = 0; /* from: the first index that has no answer yet */
    for (i = 0; i < len; i++) {
        int n_held = 0, is_uneven = 0;
        is_taken[i] = 0;
        for (l = 0; l < LAYERS; l++) {
            const int state = i < model[src][l].len ? now.state[src][l][i] : EVICTED,
                      position = model[src][l].position[i];
            if (state != LIVE && state != DISCARDED) continue;
            is_taken[i] |= (uint8_t)is_in_range(position, first, end);
            is_uneven |= n_held && position - i != shift;
            if (!n_held++) {
                for (j = from; j < i; j++)
                    is_taken[j] = (uint8_t)is_in_range(j + (is_known ? shift : position - i), first, end);
                shift = position - i;
            }
        }
        if (!n_held) continue;
        from = i + 1;
        is_known = !is_uneven;
    }
    for (i = from; i < len; i++)
        is_taken[i] = (uint8_t)is_in_range(model[src][longest].position[i], first, end);
    for (i = 0; i < len; i++) n += is_taken[i];
    return n;
}

/* Copies tokens of another sequence, at other positions or at the same. */
static tkv_status call_copy(int seq, int layer) {
    const int src = (seq + 1 + rand_below(SEQS - 1)) % SEQS;
    const int len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    uint8_t is_taken[LONGEST];
    int first, end, at, l, i, j, n;
    tkv_status st;
    (void)layer;
    choose_range(src, &first, &end);
    at = cfg.model.rope.dim && rand_below(2) ? rand_below(500) : first;
    n = choose_copied(src, first, end, is_taken);
    if (n > LONGEST - max_len(seq)) return TKV_OK;
    allow_reclaim(src);
    call.may_discard[src] = call.may_evict[src] = 0;
    sprintf(call.text, "copy positions %d to %d of sequence %d to sequence %d, at %d", first, end, src, seq,
            at);
    st = tkv_seq_copy(kv, src, first, end, seq, at);
    CHECK_EQ(st == TKV_ERR_STATE, in_step[src] || in_step[seq]);
    if (st == TKV_ERR_UNSUPPORTED) CHECK(cfg.tiers.n_anchors);
    if (st == TKV_ERR_NO_SOURCE) CHECK(has_discarded_tokens(src));
    if (st == TKV_ERR_RANGE) CHECK(window_of(0) || window_of(1) || at != first);
    if (st || tkv_get_length(kv, seq, TKV_ALL_LAYERS) == len) return st;
    for (l = 0; l < LAYERS; l++) {
        const model_sequence *from = &model[src][l];
        model_sequence *to = &model[seq][l];
        for (i = 0, j = to->len; j < to->len + n; i++) {
            if (!is_taken[i]) continue;
            if (i >= from->len || !is_readable(now.state[src][l][i]) ||
                !is_in_range(from->position[i], first, end))
                set_bit(to->evicted_mask, j);
            else {
                memcpy(to->k + j * shape[l].k_row, from->k + i * shape[l].k_row,
                       (size_t)shape[l].k_row * sizeof *to->k);
                memcpy(to->v + j * shape[l].v_row, from->v + i * shape[l].v_row,
                       (size_t)shape[l].v_row * sizeof *to->v);
                to->position[j] = from->position[i] + at - first;
                to->turned[j] = from->turned[i] + at - first;
                if (has_bit(from->sink_mask, i)) set_bit(to->sink_mask, j);
            }
            j++;
        }
        to->len = to->exact_from = j;
    }
    reserved[seq] = reserved[src] = 0;
    may_share[seq] = may_share[src] = has_moved[seq] = has_copies[seq] = 1;
    return st;
}

static tkv_status call_put_state(int seq, int layer) {
    static const size_t sizes[] = {40, 700, 700, 2000};
    const int len = model[seq][0].len, n = rand_below(4) ? len : rand_below(len + 1);
    const size_t size = sizes[rand_below(4)];
    uint32_t words[512];
    tkv_status st;
    int i, n_listed = 0, at[256];
    if (n == 0) return TKV_OK;
    for (i = 0; i < 512; i++) words[i] = hash_seen(seq, n);
    sprintf(call.text, "put a state of sequence %d, layer %d, after %d tokens", seq, layer, n);
    st = tkv_seq_put_state(kv, seq, layer, n, words, size);
    if (st) return st;
    CHECK_EQ(tkv_seq_list_states(kv, seq, layer, at, COUNT(at), &n_listed), TKV_OK);
    newest_state[seq][layer] = n_listed > 0 && n_listed <= COUNT(at) ? at[n_listed - 1] : 0;
    CHECK(newest_state[seq][layer] >= n);
    return st;
}

static tkv_status call_reset(int seq, int layer) {
    (void)layer;
    if (max_len(seq) < LONGEST - 20 && rand_below(4)) return TKV_OK;
    sprintf(call.text, "reset sequence %d", seq);
    reset_model(seq);
    return tkv_seq_reset(kv, seq);
}

static tkv_status call_flush(int seq, int layer) {
    const int mode = rand_below(3);
    tkv_status st;
    int l;
    (void)layer;
    sprintf(call.text, "flush sequence %d, mode %d", seq, mode);
    st = tkv_seq_flush(kv, seq, (tkv_flush_mode)mode);
    for (l = 0; l < LAYERS && !st; l++) model[seq][l].exact_from = model[seq][l].len;
    if (!st && mode) reserved[seq] = 0;
    return st;
}

static tkv_status call_set_budget(int seq, int layer) {
    const size_t bytes =
        rand_below(8) || in_place ? max_budget - (size_t)rand_below((int)(max_budget / 2)) : 0;
    tkv_status st;
    int s;
    (void)seq;
    (void)layer;
    allow_reclaim(-1);
    if (now.budget == 0)
        for (s = 0; s < SEQS; s++)
            call.may_evict[s] = !in_step[s] && cfg.evict.policy,
            call.may_discard[s] = !in_step[s] && cfg.budget.discard;
    sprintf(call.text, "budget %lu", (unsigned long)bytes);
    st = tkv_set_budget(kv, bytes);
    if (!st && (now.budget == 0) != (bytes == 0)) memset(reserved, 0, sizeof reserved);
    return st;
}

static tkv_status call_set_level(int seq, int layer) {
    const tkv_budget_info b = budget_of(kv);
    const int level = rand_below(b.n_levels + 1);
    const tkv_status st = tkv_set_level(kv, level);
    (void)seq;
    (void)layer;
    sprintf(call.text, "level %d", level);
    if (!st && !has_budget()) memset(reserved, 0, sizeof reserved);
    return st;
}

static tkv_status call_set_hot_tokens(int seq, int layer) {
    const int n = 1 + rand_below(200);
    const tkv_status st = tkv_set_hot_tokens(kv, n);
    (void)seq;
    (void)layer;
    sprintf(call.text, "hot_tokens %d", n);
    if (!st && !has_budget()) memset(reserved, 0, sizeof reserved);
    return st;
}

static tkv_status call_maintain(int seq, int layer) {
    const int n = rand_below(20);
    int done = -1;
    tkv_status st;
    (void)seq;
    (void)layer;
    sprintf(call.text, "maintain %d", n);
    call.may_expire = 1;
    CHECK_EQ(tkv_report_pressure(kv, rand_below(3) ? 0.0f : (float)tkv_rng_uniform(&rng)), TKV_OK);
    st = tkv_maintain(kv, n, NULL, NULL, &done);
    CHECK(done >= 0 && done <= n);
    return st;
}

static tkv_status call_calibration(int seq, int layer) {
    size_t bytes = 0;
    const int what = rand_below(4);
    (void)seq;
    (void)layer;
    sprintf(call.text, "calibration %d", what);
    if (what == 0) return tkv_freeze_calibration(kv);
    if (what == 1) return tkv_refresh_calibration(kv);
    if (what == 2 || image_size == 0) {
        CHECK_EQ(tkv_save_calibration(kv, NULL, 0, &bytes), TKV_OK);
        if (bytes <= sizeof image && tkv_save_calibration(kv, image, sizeof image, &image_size) == TKV_OK)
            CHECK_EQ(image_size, bytes);
        return TKV_OK;
    }
    return tkv_load_calibration(kv, image, image_size);
}

/* >>attention, compared with double precision */
static double weights[LONGEST];

/* Does query `at` see key i? first: index of the oldest query of the call. */
static int sees_key(const model_sequence *s, int layer, int first, int at, int i) {
    const int window = window_of(layer) ? WINDOW : 1 << 30;
    return i <= at && (i >= first || s->position[i] <= s->position[at]) &&
           (s->position[at] - s->position[i] < window || i < n_window_sinks() ||
            (n_window_sinks() && has_bit(s->sink_mask, i)));
}

/* Index that follows the expired tokens of a layer. Sinks that queries see beyond the window stay between them. */
static int expired_end(const model_sequence *s, const tkv_layer_info *info) {
    int i = info->expired ? n_window_sinks() : 0, n = info->expired;
    for (; n > 0; i++) n -= !(n_window_sinks() && has_bit(s->sink_mask, i));
    return i;
}

/* Attention over the live tokens, from the given K and V. first: index of the oldest query of the call. from: index of
 * the first of the n queries. */
static void attend_in_double(int seq, int layer, int first, int from, int n, const float *q, const float *k,
                             const float *v, double *out) {
    const model_sequence *s = &model[seq][layer];
    const int heads = shape[layer].heads, kv_heads = shape[layer].kv_heads, dim = shape[layer].dim,
              v_dim = shape[layer].v_dim, k_row = shape[layer].k_row, v_row = shape[layer].v_row;
    int r, h, i, c;
    for (r = 0; r < n; r++)
        for (h = 0; h < heads; h++) {
            const float *qh = q + (r * heads + h) * dim;
            double *o = out + (r * heads + h) * v_dim, top_logit = -1e300, sum = 0.0;
            const int at = from + r, g = h / (heads / kv_heads);
            for (c = 0; c < v_dim; c++) o[c] = 0.0;
            for (i = 0; i <= at; i++) {
                double x = 0.0;
                if (!is_readable(now.state[seq][layer][i]) || !sees_key(s, layer, first, at, i)) continue;
                for (c = 0; c < dim; c++) x += (double)qh[c] * (double)k[i * k_row + g * dim + c];
                weights[i] = x / sqrt((double)dim);
                if (weights[i] > top_logit) top_logit = weights[i];
            }
            for (i = 0; i <= at; i++) {
                if (!is_readable(now.state[seq][layer][i]) || !sees_key(s, layer, first, at, i)) continue;
                weights[i] = exp(weights[i] - top_logit);
                sum += weights[i];
                for (c = 0; c < v_dim; c++) o[c] += weights[i] * (double)v[i * v_row + g * v_dim + c];
            }
            for (c = 0; c < v_dim && sum > 0.0; c++) o[c] /= sum;
        }
}

static tkv_status call_attend(int seq, int layer) {
    static float q[QUERIES * MAX_HEADS * MAX_ROW], out[QUERIES * MAX_HEADS * MAX_ROW];
    static double expected[CHECKED * MAX_HEADS * MAX_ROW], exact[CHECKED * MAX_HEADS * MAX_ROW];
    const model_sequence *s = &model[seq][layer];
    const int heads = shape[layer].heads, dim = shape[layer].dim, v_dim = shape[layer].v_dim,
              n = min_of(s->len, 1 + rand_below(rand_below(2) ? QUERIES : CHECKED)),
              n_checked = min_of(n, CHECKED), skip = (n - n_checked) * heads;
    const int first = rand_below(3) ? s->len - n : rand_below(s->len - n + 1), end = first + n;
    static float moved[LONGEST * MAX_ROW];
    const int count = n_checked * heads * v_dim, fails = store.fail_read, lies = store.corrupt_read,
              failed = store.n_failed;
    double format_err_sq = 0.0, err_sq = 0.0, sum_sq = 0.0, bound;
    int i, at, is_seen, sees_discarded = 0, any_discarded = 0, sees_expired = 0, out_of_order = 0;
    tkv_attend_params p;
    tkv_layer_info info;
    tkv_status st;
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    call.sets_error = 0;
    sprintf(call.text, "attend, %d queries from %d on of sequence %d, layer %d", n, first, seq, layer);
    tkv_rng_fill(&rng, q, (size_t)(n * heads * dim), 1.5);
    memset(&p, 0, sizeof p);
    p.layer = layer;
    p.seq = seq;
    p.n = n;
    p.q = q;
    p.out = out;
    if (end < s->len || rand_below(2)) p.first_queries = &first;
    st = tkv_attend_ex(kv, &p);
    for (i = 0; i < s->len && n; i++) {
        any_discarded |= has_bit(s->discarded_mask, i);
        is_seen = 0;
        for (at = first; at < end; at++) is_seen |= sees_key(s, layer, first, at, i);
        out_of_order |= i < first && s->position[i] > s->position[first];
        if (!is_seen) continue;
        sees_discarded |= has_bit(s->discarded_mask, i) && !cfg.recompute.compute;
        /* also where the token had been evicted before */
        sees_expired |= i >= n_window_sinks() && i < expired_end(s, &info) &&
                        !(n_window_sinks() && has_bit(s->sink_mask, i));
    }
    for (at = first; at < end; at++) out_of_order |= at > first && s->position[at] < s->position[at - 1];
    if (store.n_failed == failed && !has_moved[seq])
        CHECK_MSG(sees_expired     ? st == TKV_ERR_RANGE
                  : sees_discarded ? st == TKV_ERR_NO_SOURCE
                                   : any_discarded || st == TKV_OK,
                  "%d, sees discarded tokens: %d", (int)st, sees_discarded);
    if (st == TKV_ERR_RANGE) CHECK(info.expired && (sees_expired || has_moved[seq]));
    if (st == TKV_ERR_NO_SOURCE && !cfg.recompute.compute) CHECK(any_discarded);
    if (st || n == 0) return st;
    /* Queries in a block see its older tokens by index (api.h). The model does not know blocks. */
    if (out_of_order) return st;
    /* It does not know either which copied tokens came from sinks. */
    if (n_window_sinks() && has_copies[seq]) return st;
    CHECK_EQ(store.n_failed, failed);
    store.fail_read = store.corrupt_read = fail_at_row = 0;
    for (i = 0; i < s->len; i++)
        if (is_readable(now.state[seq][layer][i]))
            CHECK_EQ(tkv_read(kv, seq, layer, i, 1, k_out + i * shape[layer].k_row,
                              v_out + i * shape[layer].v_row),
                     TKV_OK);
    store.fail_read = fails;
    store.corrupt_read = lies;
    for (i = 0; i < s->len; i++) (void)moved_key(s, i, moved + i * shape[layer].k_row);
    attend_in_double(seq, layer, first, end - n_checked, n_checked, q + skip * dim, k_out, v_out, expected);
    attend_in_double(seq, layer, first, end - n_checked, n_checked, q + skip * dim, moved, s->v, exact);
    for (i = 0; i < count; i++) {
        format_err_sq += (expected[i] - exact[i]) * (expected[i] - exact[i]);
        err_sq +=
            (expected[i] - (double)out[skip * v_dim + i]) * (expected[i] - (double)out[skip * v_dim + i]);
        sum_sq += exact[i] * exact[i];
        CHECK(tkv_test_is_finite((double)out[skip * v_dim + i]));
    }
    bound = 2e-3 * sqrt(sum_sq) +
            (cfg.host.precise ? 0.0 : 0.25 * sqrt(format_err_sq)); /* the largest factor measured was 0.1 */
    if (bound > 0.0 && sqrt(err_sq) / bound > worst_attend) worst_attend = sqrt(err_sq) / bound;
    CHECK_MSG(sqrt(err_sq) <= bound, "attention is off by %.3g, bound %.3g; its formats by %.3g of %.3g",
              sqrt(err_sq), bound, sqrt(format_err_sq), sqrt(sum_sq));
    return st;
}

/* >>eviction, pins and importance */
static float score_token(void *user, const tkv_evict_view *of, int i) {
    (void)user;
    return (float)((of->positions ? of->positions[i] : i) * 37 % 101);
}

/* 1 if the policy reads an input other than positions. */
static int reads_input(tkv_evict_policy policy) {
    return policy != TKV_EVICT_NONE && policy != TKV_EVICT_SLIDING && policy != TKV_EVICT_FIFO &&
           policy != TKV_EVICT_RANDOM && policy != TKV_EVICT_USER;
}

static tkv_status call_evict(int seq, int layer) {
    static float scores[LONGEST];
    static signed char priority[LONGEST];
    uint64_t pins[WORDS], kept_mask[LAYERS][WORDS];
    tkv_evict_params p;
    tkv_evict_config other;
    tkv_status st;
    int i, l, has_nan = 0;
    memset(&p, 0, sizeof p);
    memset(&other, 0, sizeof other);
    p.seq = seq;
    p.layer = rand_below(3) ? layer : TKV_ALL_LAYERS;
    p.keep = 1 + rand_below(max_len(seq) + 1);
    other.policy = (tkv_evict_policy)(1 + rand_below(TKV_EVICT_COUNT - 1));
    other.scorer = score_token;
    if (rand_below(2)) p.evict = &other;
    for (i = 0; i < WORDS; i++) pins[i] = tkv_rng_u64(&rng) & tkv_rng_u64(&rng) & tkv_rng_u64(&rng);
    if (rand_below(3) == 0) p.pinned_mask = pins;
    if (rand_below(3) == 0) p.scores = scores;
    if (rand_below(3) == 0) p.priorities = priority;
    for (i = 0; i < LONGEST; i++)
        scores[i] = (float)tkv_rng_uniform(&rng), priority[i] = (signed char)(rand_below(9) / 8);
    if (p.scores && max_len(seq) && rand_below(6) == 0) {
        has_nan = 1;
        scores[rand_below(max_len(seq))] = tkv_test_float(0x7fc00000u);
    }
    memset(kept_mask, 0, sizeof kept_mask);
    for (l = 0; l < LAYERS; l++)
        for (i = 0; i < model[seq][l].len; i++)
            if (now.state[seq][l][i] != EVICTED && now.state[seq][l][i] != EXPIRED && p.pinned_mask &&
                has_bit(pins, i))
                set_bit(kept_mask[l], i);
    call.may_evict[seq] = 1;
    sprintf(call.text, "evict from sequence %d, layer %d, keep %d, by %s%s%s", seq, p.layer, p.keep,
            tkv_get_name(TKV_NAME_EVICT_POLICY, (int)(p.evict ? other.policy : cfg.evict.policy)),
            p.scores ? ", scores" : "", has_nan ? ", NaN" : "");
    st = tkv_evict(kv, &p);
    if (st == TKV_ERR_NONFINITE) CHECK(has_nan);
    if (st == TKV_ERR_CONFIG)
        CHECK(p.evict && !p.scores && reads_input(other.policy)); /* its scores are not collected */
    if (!cfg.evict.policy || in_step[seq]) CHECK_EQ(st, TKV_ERR_STATE);
    for (l = 0; l < LAYERS && !st; l++)
        for (i = 0; i < model[seq][l].len; i++)
            if (has_bit(kept_mask[l], i))
                CHECK_MSG(!has_bit(model[seq][l].evicted_mask, i), "layer %d: token %d must stay", l, i);
    return st;
}

static tkv_status call_evict_named(int seq, int layer) {
    uint64_t victims[WORDS];
    const int percent = rand_below(100), n = rand_below(max_len(seq) + 1), all = rand_below(3) == 0;
    tkv_status st;
    int i, l;
    memset(victims, 0, sizeof victims);
    for (i = 0; i < n; i++)
        if (rand_below(100) < percent) set_bit(victims, i);
    call.may_evict[seq] = 1;
    sprintf(call.text, "evict %d %% of %d from sequence %d, layer %d", percent, n, seq,
            all ? TKV_ALL_LAYERS : layer);
    st = evict_tokens(kv, seq, all ? TKV_ALL_LAYERS : layer, victims, n);
    if (!cfg.evict.policy || in_step[seq]) CHECK_EQ(st, TKV_ERR_STATE);
    for (l = 0; l < LAYERS && !st; l++) /* anchors are not evicted */
        for (i = 0; i < min_of(n, model[seq][l].len) && !cfg.tiers.n_anchors && (all || l == layer); i++)
            if (has_bit(victims, i) && !has_bit(model[seq][l].pinned_mask, i) &&
                !has_bit(model[seq][l].sink_mask, i) && now.state[seq][l][i] != EXPIRED)
                CHECK_MSG(has_bit(model[seq][l].evicted_mask, i), "layer %d: token %d must be evicted", l, i);
    return st;
}

static tkv_status call_pin(int seq, int layer) {
    const int start = rand_below(LONGEST), n = rand_below(40), pinned = rand_below(3) != 0;
    const tkv_status st = tkv_seq_pin(kv, seq, start, n, pinned ? TKV_UNLIMITED : TKV_OFF);
    int i;
    sprintf(call.text, "%s %d from %d on in sequence %d", pinned ? "pin" : "unpin", n, start, seq);
    for (layer = 0; layer < LAYERS && !st; layer++)
        for (i = start; i < min_of(start + n, model[seq][layer].len); i++) {
            if (now.state[seq][layer][i] == EVICTED || now.state[seq][layer][i] == EXPIRED) continue;
            if (pinned) set_bit(model[seq][layer].pinned_mask, i);
            else clear_bit(model[seq][layer].pinned_mask, i);
        }
    return st;
}

/* An index at which all layers have an exact token, if a few tries find one. */
static int choose_exact_token(int seq) {
    int tries, l, at = 0, n_exact = 0;
    for (tries = 0; tries < 8 && n_exact < LAYERS; tries++) {
        at = rand_below(min_len(seq) + 1);
        for (l = n_exact = 0; l < LAYERS && at < min_len(seq); l++) {
            uint8_t tier = TKV_TOKEN_GONE;
            CHECK_EQ(tkv_get_tiers(kv, seq, l, at, 1, &tier), TKV_OK);
            n_exact += tier == TKV_TIER_HOT;
        }
    }
    return at;
}

/* Few tokens, because each keeps a block exact. */
static tkv_status call_set_sinks(int seq, int layer) {
    const int on = rand_below(3) != 0, n = on ? 1 + rand_below(3) : rand_below(200);
    const int start = rand_below(4) ? choose_exact_token(seq) : rand_below(max_len(seq) + 2);
    int l, i, n_missing = 0, n_coded = 0;
    tkv_status st;
    (void)layer;
    if (min_len(seq) == 0 && rand_below(4)) return TKV_OK;
    sprintf(call.text, "%s %d sinks from %d on in sequence %d", on ? "name" : "forget", n, start, seq);
    for (l = 0; l < LAYERS; l++)
        for (i = start; i < start + n; i++) {
            uint8_t tier = TKV_TOKEN_GONE;
            if (i < model[seq][l].len) CHECK_EQ(tkv_get_tiers(kv, seq, l, i, 1, &tier), TKV_OK);
            n_missing += tier == TKV_TOKEN_GONE;
            n_coded += tier != TKV_TIER_HOT;
        }
    st = tkv_seq_set_sinks(kv, seq, start, n, on);
    CHECK_EQ(st == TKV_ERR_STATE, in_step[seq]);
    if (st == TKV_ERR_UNSUPPORTED) CHECK(cfg.tiers.n_anchors || (in_place && !has_budget()));
    if (st == TKV_ERR_RANGE) CHECK(n_missing > 0);
    if (st == TKV_ERR_NO_SOURCE) CHECK(n_coded > 0);
    for (l = 0; l < LAYERS && !st; l++)
        for (i = start; i < min_of(start + n, model[seq][l].len); i++) {
            const int state = now.state[seq][l][i];
            if (on) CHECK(state == LIVE || (state != DISCARDED && window_of(l) && !cfg.model.window_sinks));
            if (state == LIVE && on) set_bit(model[seq][l].sink_mask, i);
            if (!on) clear_bit(model[seq][l].sink_mask, i);
        }
    if (!st) reserved[seq] = 0;
    return st;
}

static tkv_status call_importance(int seq, int layer) {
    static float scores[LONGEST], found[LONGEST];
    static tkv_ranked best[20];
    uint64_t removed_mask[WORDS];
    const int len = model[seq][layer].len, start = rand_below(len + 1), n = rand_below(len - start + 1),
              bad = n && rand_below(8) == 0;
    int i, count = -1;
    tkv_status st;
    for (i = 0; i < n; i++) scores[i] = (float)tkv_rng_uniform(&rng);
    if (bad) scores[rand_below(n)] = -1.0f;
    sprintf(call.text, "importance of %d from %d on in sequence %d, layer %d", n, start, seq, layer);
    st = tkv_add_scores(kv, seq, layer, start, n, scores);
    if (bad) CHECK(st == TKV_ERR_NONFINITE || st == TKV_ERR_CONFIG);
    if (tkv_get_importance(kv, seq, layer, start, n, found, removed_mask) == TKV_OK)
        for (i = 0; i < n; i++) {
            const int state = now.state[seq][layer][start + i];
            CHECK_EQ(has_bit(removed_mask, i), state == EVICTED || state == EXPIRED);
            CHECK(tkv_test_is_finite((double)found[i]) && (!has_bit(removed_mask, i) || found[i] >= 0.0f));
        }
    if (tkv_find_top_tokens(kv, seq, layer, COUNT(best), rand_below(2), best, &count) == TKV_OK) {
        CHECK(count >= 0 && count <= COUNT(best));
        for (i = 0; i < count; i++) {
            const int state = now.state[seq][layer][best[i].position];
            CHECK(state == LIVE || state == DISCARDED);
            if (i) CHECK(best[i - 1].importance >= best[i].importance);
        }
    }
    return st;
}

/* >>offloading and promotion */
static tkv_status call_offload(int seq, int layer) {
    const int n = rand_below(6), all = rand_below(2);
    int done = -1;
    const tkv_status st = tkv_offload(kv, seq, all ? TKV_ALL_LAYERS : layer, n, &done);
    sprintf(call.text, "offload %d blocks of sequence %d, layer %d", n, seq, all ? TKV_ALL_LAYERS : layer);
    CHECK(done >= 0 && done <= n * LAYERS);
    if (st == TKV_OK && done) CHECK(cfg.offload.write != NULL);
    return st;
}

static tkv_status call_promote(int seq, int layer) {
    const int len = model[seq][layer].len;
    int at = rand_below(len + 2), state, tries;
    tkv_status st;
    for (tries = 0; len && tries < 4 && (at >= len || now.state[seq][layer][at] == EVICTED); tries++)
        at = rand_below(len);
    state = at < len ? now.state[seq][layer][at] : (int)EVICTED;
    if (cfg.offload.write && rand_below(2))
        (void)tkv_offload(kv, seq, layer, rand_below(4), NULL); /* offloading changes no value */
    call.may_restore[seq] = 1;
    sprintf(call.text, "promote %d of sequence %d, layer %d", at, seq, layer);
    st = tkv_promote(kv, seq, layer, at);
    CHECK_EQ(st == TKV_ERR_RANGE, state == EVICTED || state == EXPIRED);
    return st;
}

/* >>discarding and recomputation */
static tkv_status call_discard(int seq, int layer) {
    const int n = rand_below(400);
    int n_discarded = -1;
    tkv_status st;
    (void)layer;
    call.may_discard[seq] = 1;
    sprintf(call.text, "discard %d tokens of sequence %d", n, seq);
    st = tkv_seq_discard(kv, seq, n, &n_discarded);
    CHECK_EQ(st, in_step[seq] ? TKV_ERR_STATE : TKV_OK);
    CHECK(n_discarded >= 0 && n_discarded <= n);
    if (n_discarded == 0) call.may_discard[seq] = 0; /* and no budget needs bytes */
    return st;
}

static tkv_status restore_tokens(int seq, int layer, int start, int n) {
    const model_sequence *s = &model[seq][layer];
    return tkv_restore(kv, seq, layer, start, s->k + start * shape[layer].k_row,
                       shape[layer].v_in_k ? NULL : s->v + start * shape[layer].v_row, n);
}

static tkv_status call_restore(int seq, int layer) {
    model_sequence *s = &model[seq][layer];
    int start = 0, n = 0, bad;
    float keep = 0.0f, *value;
    tkv_status st;
    CHECK_EQ(tkv_seq_find_discarded(kv, seq, &start, &n), TKV_OK);
    CHECK_EQ(n > 0, has_discarded_tokens(seq) > 0);
    if (rand_below(4) == 0) start = max_of(0, start + (rand_below(3) - 1) * BLOCK);
    if (rand_below(2)) n = min_of(n, BLOCK * (1 + rand_below(3)));
    if (start + n > s->len) return TKV_OK;
    bad = n && rand_below(12) == 0;
    value = shape[layer].v_in_k ? s->k + start * shape[layer].k_row : s->v + start * shape[layer].v_row;
    if (bad) keep = *value, *value = tkv_test_float(0x7f800000u);
    allow_reclaim(seq);
    call.may_restore[seq] = 1;
    sprintf(call.text, "restore %d from %d on in sequence %d, layer %d", n, start, seq, layer);
    st = restore_tokens(seq, layer, start, n);
    if (bad) *value = keep;
    if (st == TKV_ERR_NONFINITE) CHECK(bad);
    return st;
}

/* Number of calls of `compute`, and the number of the layer at which it fails (0: none). */
static int n_compute_calls, fail_at_layer;

static tkv_status compute(void *user, tkv_cache *cache, int seq, int first_layer, int n_layers, int start,
                          int n) {
    tkv_status st = TKV_OK;
    int l;
    CHECK(user == &n_compute_calls && cache == kv && n > 0 && start + n <= max_len(seq));
    n_compute_calls++;
    for (l = first_layer; l < first_layer + n_layers && !st; l++) {
        if (fail_at_layer && --fail_at_layer == 0) return TKV_ERR_ISA;
        if (start > 0 && now.state[seq][l][start - 1] == LIVE)
            (void)tkv_read(kv, seq, l, start - 1, 1, k_out, v_out);
        if (model[seq][l].len > start)
            st = restore_tokens(seq, l, start, min_of(n, model[seq][l].len - start));
    }
    return st;
}

static tkv_status call_recompute(int seq, int layer) {
    int n_missing = -1;
    tkv_status st;
    (void)layer;
    allow_reclaim(seq);
    call.may_restore[seq] = 1;
    call.keeps_part = 2; /* restored blocks stay */
    n_compute_calls = 0;
    fail_at_layer = rand_below(3) ? 0 : 1 + rand_below(4);
    sprintf(call.text, "recompute sequence %d%s", seq, fail_at_layer ? ", and stop" : "");
    st = tkv_seq_recompute(kv, seq, &remat, ++remat_step, compute, &n_compute_calls, &n_missing);
    if (st == TKV_ERR_ISA) CHECK(n_compute_calls > 0);
    CHECK(n_missing >= 0);
    return st;
}

static tkv_status call_free_bytes(int seq, int layer) {
    static tkv_remat_block blocks[MAX_BLOCKS];
    static tkv_remat_action actions[MAX_BLOCKS];
    const size_t need = (size_t)rand_below(60000);
    size_t freed = 0;
    int n = -1;
    (void)layer;
    CHECK_EQ(tkv_seq_list_blocks(kv, seq, NULL, 0, &n), TKV_OK);
    CHECK(n >= 0 && n <= MAX_BLOCKS);
    call.may_discard[seq] = 1;
    sprintf(call.text, "free %lu bytes of sequence %d", (unsigned long)need, seq);
    return tkv_seq_free_bytes(kv, seq, &remat, (float)rand_below(101) * 0.01f, need, blocks, actions,
                              MAX_BLOCKS, &freed);
}

/* >>calls that must fail */
static tkv_status call_wrong_argument(int seq, int layer) {
    const float one = 1.0f, nan = tkv_test_float(0x7fc00000u);
    uint8_t junk[64];
    tkv_evict_params p;
    tkv_status st = TKV_OK;
    const int what = rand_below(14);
    const uint64_t one_mask = 1;
    int n;
    memset(&p, 0, sizeof p);
    memset(junk, 0x5a, sizeof junk);
    p.seq = seq;
    fill_random_tokens(4);
    sprintf(call.text, "wrong argument %d", what);
    if (what == 0) k_in[3] = nan, st = tkv_append(kv, seq, layer, k_in, v_in, 4);
    if (what == 1) st = tkv_append(kv, seq, layer, k_in, v_in, CHUNK + 1);
    if (what == 2) st = tkv_append(kv, seq, LAYERS, k_in, v_in, 4);
    if (what == 3) st = tkv_append(kv, SEQS, layer, k_in, v_in, 4);
    if (what == 4) st = tkv_seq_truncate(kv, seq, -1);
    if (what == 5) p.keep = -1, st = tkv_evict(kv, &p);
    if (what == 6) st = evict_tokens(kv, seq, layer, &one_mask, -4);
    if (what == 7) st = tkv_seq_pin(kv, seq, -1, 4, TKV_UNLIMITED);
    if (what == 8) st = tkv_load_calibration(kv, junk, sizeof junk);
    if (what == 9) st = tkv_restore(kv, seq, layer, LONGEST, &one, &one, 1);
    if (what == 10) st = tkv_seq_discard(kv, seq, -3, &n);
    if (what == 11) st = tkv_set_level(kv, TKV_MAX_LEVELS);
    if (what == 12) st = tkv_add_scores(kv, seq, layer, 0, LONGEST + 1, k_in);
    if (what == 13) st = tkv_seq_reserve(kv, seq, CHUNK + 1);
    CHECK(st != TKV_OK);
    return st;
}

enum { EVICTION = 1, STORE = 2 };

static const struct {
    const char *name;
    int weight; /* relative frequency */
    int needs;  /* features of the config; without them, 7 in 8 calls are drawn again */
    tkv_status (*run)(int seq, int layer);
    unsigned errors; /* errors that the call may give */
} calls[] = {
    {"append", 400, 0, call_append, MEMORY_ERRORS},
    {"batch", 50, 0, call_append_batch, MEMORY_ERRORS},
    {"begin", 30, 0, call_begin, MEMORY_ERRORS | ERR(STATE)},
    {"end", 90, 0, call_end, ERR(STATE)},
    {"reserve", 25, 0, call_reserve, MEMORY_ERRORS},
    {"truncate", 40, 0, call_truncate, ERR(STATE) | ERR(RANGE)},
    {"fork", 40, 0, call_fork, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE)},
    {"reorder", 25, 0, call_reorder, MEMORY_ERRORS | ERR(STATE)},
    {"remove", 20, 0, call_remove, ERR(STATE) | ERR(RANGE)},
    {"shift", 40, 0, call_shift, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE) | ERR(UNSUPPORTED) | ERR(NO_SOURCE)},
    {"copy", 20, 0, call_copy, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE) | ERR(UNSUPPORTED) | ERR(NO_SOURCE)},
    {"append at", 40, 0, call_append_at, MEMORY_ERRORS | ERR(RANGE)},
    {"put state", 40, 0, call_put_state, MEMORY_ERRORS},
    {"reset", 12, 0, call_reset, 0},
    {"flush", 15, 0, call_flush, MEMORY_ERRORS | ERR(STATE)},
    {"budget", 25, 0, call_set_budget, MEMORY_ERRORS | ERR(ARG)},
    {"level", 15, 0, call_set_level, ERR(ARG)},
    {"hot tokens", 8, 0, call_set_hot_tokens, ERR(ARG)},
    {"maintain", 15, 0, call_maintain, MEMORY_ERRORS},
    {"calibration", 15, 0, call_calibration, MEMORY_ERRORS | ERR(STATE)},
    {"attend", 120, 0, call_attend, ERR(IO) | ERR(DATA) | ERR(NO_SOURCE) | ERR(RANGE)},
    {"evict", 25, EVICTION, call_evict, ERR(STATE) | ERR(CONFIG) | ERR(NONFINITE)},
    {"evict named", 25, EVICTION, call_evict_named, ERR(STATE)},
    {"pin", 20, EVICTION, call_pin, ERR(STATE)},
    {"set sinks", 45, 0, call_set_sinks, ERR(STATE) | ERR(RANGE) | ERR(NO_SOURCE) | ERR(UNSUPPORTED)},
    {"importance", 30, 0, call_importance, ERR(CONFIG) | ERR(NONFINITE)},
    {"offload", 40, STORE, call_offload, ERR(IO) | ERR(ARG)},
    {"promote", 40, STORE, call_promote, MEMORY_ERRORS | ERR(IO) | ERR(DATA) | ERR(NO_SOURCE) | ERR(RANGE)},
    {"discard", 25, 0, call_discard, ERR(STATE)},
    {"restore", 40, 0, call_restore, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE) | ERR(NONFINITE)},
    {"recompute", 25, 0, call_recompute, MEMORY_ERRORS | ERR(STATE) | ERR(ISA)},
    {"free bytes", 10, 0, call_free_bytes, ERR(STATE)},
    {"wrong argument", 15, 0, call_wrong_argument, ~0u},
};
static long n_done[COUNT(calls)], n_refused[COUNT(calls)];
static long n_store_failures; /* calls that failed because of the store */
static char last_calls[8][200];

/* Makes one random call, and checks its status and the cache. */
static void step(int number) {
    const int seq = rand_below(SEQS), layer = rand_below(LAYERS), inject_failures = rand_below(5) == 0;
    const int features = (cfg.evict.policy ? EVICTION : 0) | (cfg.offload.write ? STORE : 0);
    int which, at = 0, failed, recoded;
    unsigned bit;
    tkv_status st;
    for (which = 0; which < COUNT(calls); which++) at += calls[which].weight;
    do {
        int point = rand_below(at);
        for (which = 0; point >= calls[which].weight; which++) point -= calls[which].weight;
    } while (calls[which].needs & ~features && rand_below(8));
    memset(&call, 0, sizeof call);
    call.sets_error = 1;
    sprintf(call.text, "%s of sequence %d", calls[which].name, seq);
    if (inject_failures && !in_place && rand_below(2)) memory.fail_at = 1 + rand_below(4);
    if (inject_failures && cfg.offload.write && rand_below(2)) store.fail_write = 1 + rand_below(5);
    if (inject_failures && cfg.offload.write && rand_below(2)) store.fail_read = 1 + rand_below(8);
    if (inject_failures && cfg.offload.write && rand_below(3) == 0) store.corrupt_read = 1 + rand_below(8);
    if (inject_failures && cfg.recompute.compute) fail_at_row = 1 + (int)(tkv_rng_u64(&rng) % 8);
    memory.n_refused = store.n_failed = 0;
    memory.peak = memory.held;
    st = calls[which].run(seq, layer);
    failed = memory.n_refused + store.n_failed;
    if (st && (failed || st == TKV_ERR_BUDGET ||
               st == TKV_ERR_CAPACITY)) /* the newest tokens may be recoded by now */
        for (at = 0; at < SEQS * LAYERS; at++)
            model[at / LAYERS][at % LAYERS].exact_from = model[at / LAYERS][at % LAYERS].len;
    memory.fail_at = store.fail_write = store.fail_read = store.corrupt_read = fail_at_row = 0;
    sprintf(last_calls[number % COUNT(last_calls)], "%d: %s%s: %d", number, call.text,
            failed ? ", with failures" : "", (int)st);
    if (int_from_env("TKV_RANDOM_LOG", 0)) printf("\n    %s", last_calls[number % COUNT(last_calls)]);
    n_done[which]++;
    n_refused[which] += st != TKV_OK;
    bit = 1u << (-(int)st & 31);
    CHECK_MSG(!st || calls[which].errors & bit, "%s: %d, %s", calls[which].name, (int)st,
              tkv_get_last_error(kv));
    if (st == TKV_ERR_NOMEM) CHECK(memory.n_refused > 0);
    if (st == TKV_ERR_IO || st == TKV_ERR_DATA) CHECK(store.n_failed > 0 || calls[which].errors == ~0u);
    if (st == TKV_ERR_CAPACITY) /* blocks can use all versions of a table */
        CHECK(in_place || cfg.limits.state_bytes || calls[which].errors == ~0u ||
              calls[which].run == call_calibration);
    if (st == TKV_ERR_BUDGET) CHECK(now.budget > 0 || calls[which].errors & ERR(ARG));
    if (st && call.sets_error)
        CHECK_MSG(tkv_get_last_error(kv)[0] != 0, "%s: no error message", calls[which].name);
    CHECK_MSG(call.n_wrong == 0, "%d events are wrong", call.n_wrong);
    take_snapshot();
    if (!st || tkv_test_.n_bad || call.keeps_part == 2) return;
    /* A refused call, or one for which an allocator or a store failed, may have recoded blocks. It loses no token. */
    recoded = failed || st == TKV_ERR_BUDGET || st == TKV_ERR_CAPACITY || call.keeps_part;
    if (!call.keeps_part) CHECK_EQ(call.n_evicted, 0);
    n_store_failures += failed && !memory.n_refused;
    check_unchanged(recoded, call.keeps_part);
}

/* >>configs */
/* cfg.recompute: gives the rows that the model keeps. */
static int compute_rows(void *user, int seq, int layer, int head, const int *positions, int n, float *k,
                        float *v) {
    const model_sequence *s = &model[seq][layer];
    const int dim = shape[layer].dim, v_dim = shape[layer].v_dim;
    int t;
    (void)user;
    if (fail_at_row && --fail_at_row == 0) {
        store.n_failed++;
        return 1;
    }
    CHECK(!v || !shape[layer].v_in_k);
    for (t = 0; t < n; t++) {
        if (k)
            memcpy(k + t * dim, s->k + positions[t] * shape[layer].k_row + head * dim,
                   (size_t)dim * sizeof *k);
        if (v)
            memcpy(v + t * v_dim, s->v + positions[t] * shape[layer].v_row + head * v_dim,
                   (size_t)v_dim * sizeof *v);
    }
    return 0;
}

static const struct {
    tkv_format_pair warm, archive;
    double token, mean; /* bounds */
} formats[FORMAT_ROWS + 1] =
    {/* in 1,500 runs, errors were at most two thirds of these bounds */
     {{TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, 0.75, 0.4},
     {{TKV_F16, TKV_F16}, {TKV_F16, TKV_F16}, 0.0, 0.0},
     {{TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 1.1, 0.5},
     {{TKV_KVQUANT4, TKV_KVQUANT4}, {TKV_KVQUANT3, TKV_KVQUANT3}, 0.45, 0.2},
     {{TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0.0002, 0.0002},
     {{TKV_INT8, TKV_FP8_E4M3}, {TKV_FP4, TKV_INT4}, 0.05, 0.02},
     {{TKV_SQUAT4, TKV_KIVI4}, {TKV_SUBSPACE4, TKV_SUBSPACE2}, 0.25, 0.12},
     {{TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}, 1.2, 0.4},
     {{TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}, 2.0, 0.7}}; /* the last row: for a budget's ladder */

/* Heads and channels for one layer, which differ from the model's. No random number, so other seeds keep theirs. */
static void choose_layer_shape(tkv_layer_config *c, uint64_t seed) {
    static const int own[][4] = {{8, 1, 96, 0}, {6, 2, 0, 0}, {4, 4, 24, 0}, {8, 2, 48, 32}, {3, 1, 0, 80}};
    const int *x = own[seed % 5];
    c->n_heads = x[0];
    c->n_kv_heads = x[1];
    c->head_dim = c->rope.dim > x[2] || cfg.model.rope.dim > x[2] ? 0 : x[2];
    c->v_head_dim = x[3];
    if (c->n_kv_heads * (c->head_dim ? c->head_dim : cfg.model.head_dim) > MAX_ROW) c->n_kv_heads = 1;
    mean_bound *= 1.5; /* a scale of SUBSPACE formats is for more channels */
}

/* V inside K in one layer, or in both, with formats that hold it. No random number, as above. */
static void choose_v_in_k(tkv_layer_config *layers, uint64_t seed) {
    static const tkv_format instead[] = {TKV_A40, TKV_KIVI4, TKV_Q8, TKV_BF16};
    const tkv_format warm = formats[format_row].warm.k;
    const int one = (int)(seed / 3 % LAYERS);
    int i;
    cfg.model.v_in_k = seed % 3 != 2;
    if (seed % 3) layers[one].v_in_k = cfg.model.v_in_k ? TKV_OFF : 1;
    for (i = 0; i < LAYERS; i++) {
        tkv_layer_config *c = &layers[i];
        const int dim = c->head_dim ? c->head_dim : cfg.model.head_dim;
        if (c->v_in_k == TKV_OFF || (!c->v_in_k && !cfg.model.v_in_k)) continue;
        if (seed % 4 || c->v_head_dim > dim) c->v_head_dim = 1 + (int)(seed * 11 % (uint64_t)dim);
        if (c->rope.dim > 0) c->rope.first = dim - c->rope.dim;
        if (warm != TKV_KVQUANT4 && warm != TKV_INT8 && warm != TKV_SQUAT4) continue;
        c->warm.k = instead[seed % 4];
        c->archive.k = c->warm.k == TKV_A40 ? TKV_A30 : c->warm.k;
        token_bound = formats[FORMAT_ROWS].token;
        mean_bound = formats[FORMAT_ROWS].mean;
    }
}

/* Fills in shape[] by the rules of api.h. */
static void set_shape(int layer, const tkv_layer_config *c) {
    struct layer_shape *l = &shape[layer];
    l->heads = c->n_heads ? c->n_heads : cfg.model.n_heads;
    l->kv_heads = c->n_kv_heads ? c->n_kv_heads : cfg.model.n_kv_heads;
    l->dim = c->head_dim ? c->head_dim : cfg.model.head_dim;
    l->v_dim = c->v_head_dim          ? c->v_head_dim
               : c->head_dim          ? c->head_dim
               : cfg.model.v_head_dim ? cfg.model.v_head_dim
                                      : cfg.model.head_dim;
    l->v_in_k = (c->v_in_k ? c->v_in_k : cfg.model.v_in_k) == 1;
    l->k_row = l->kv_heads * l->dim;
    l->v_row = l->kv_heads * l->v_dim;
    if (l->k_row > MAX_ROW || l->v_row > MAX_ROW || l->heads > MAX_HEADS) exit(2);
}

static void choose_config(uint64_t seed) {
    static const int kv_heads[] = {2, 1, 4, 2}, dims[] = {32, 64, 16, 48}, v_dims[] = {0, 32, 0, 16};
    static tkv_layer_config layers[LAYERS];
    const int of_model = rand_below(4), dim = dims[of_model];
    int i;
    cfg = make_sized_config(LAYERS, HEADS, kv_heads[of_model], dim, SEQS, CHUNK);
    cfg.model.v_head_dim = v_dims[of_model];
    format_row = (int)(seed % FORMAT_ROWS);
    token_bound = formats[format_row].token;
    mean_bound = formats[format_row].mean;
    cfg.tiers.warm = formats[format_row].warm;
    cfg.tiers.archive = formats[format_row].archive;
    if (formats[format_row].warm.k == TKV_KVQUANT4 && rand_below(2)) cfg.model.rope.dim = dim;
    else cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    cfg.tiers.hot_tokens = rand_below(3) ? 0 : 1 + rand_below(200);
    cfg.tiers.warm_tokens = 1 + rand_below(200);
    if (rand_below(4) == 0) cfg.tiers.sink_tokens = rand_below(2) ? TKV_OFF : 1 + rand_below(12);
    cfg.host.precise = rand_below(3) == 0;
    cfg.host.wipe_freed = cfg.host.precise;
    cfg.meter.heads = rand_below(4) == 0 ? 2 : 0;
    cfg.host.on_event = record_event;
    if (rand_below(3)) cfg.budget.bytes = 150000 + (size_t)rand_below(500000);
    exact_only = cfg.budget.bytes ? rand_below(4) == 0 : token_bound <= 0.0;
    if (exact_only)
        cfg.budget.pressure.max_level = TKV_OFF; /* no compression: the budget is kept by other means */
    cfg.budget.pressure.jump = seed / 4 % 2;     /* no random number */
    if (cfg.budget.bytes && formats[FORMAT_ROWS].token > token_bound)
        token_bound = formats[FORMAT_ROWS].token;
    if (cfg.budget.bytes && formats[FORMAT_ROWS].mean > mean_bound) mean_bound = formats[FORMAT_ROWS].mean;
    if (rand_below(3)) cfg.evict.policy = (tkv_evict_policy)(1 + seed / FORMAT_ROWS % (TKV_EVICT_COUNT - 1));
    cfg.evict.scorer = score_token;
    if (cfg.evict.policy && rand_below(3) == 0) cfg.evict.keep_tokens = 70 + rand_below(300);
    if (cfg.evict.policy && rand_below(3) == 0) cfg.evict.batch = 1 + rand_below(100);
    if (rand_below(2)) cfg.importance.sample_every = 1 + rand_below(4);
    cfg.importance.strategy = (tkv_importance_strategy)rand_below(TKV_IMPORTANCE_COUNT);
    if (rand_below(4) == 0 && cfg.tiers.sink_tokens != TKV_OFF)
        cfg.tiers.n_anchors = 1 + rand_below(rand_below(2) ? 16 : 140);
    if (seed % 2 && !cfg.tiers.n_anchors) cfg.model.rope.dim = dim; /* tokens can move */
    memset(layers, 0, sizeof layers);
    if (!cfg.tiers.n_anchors && rand_below(4) == 0) {
        if (rand_below(2)) cfg.model.window = WINDOW;
        else layers[1].window = WINDOW;
        cfg.model.window_sinks = seed % 8 < 5 && cfg.tiers.sink_tokens != TKV_OFF; /* no random number */
    }
    if (!exact_only && rand_below(4) == 0) {
        layers[0].hot_tokens = rand_below(2) ? TKV_UNLIMITED : 30;
        layers[1].archive = formats[2].archive;
        token_bound = formats[FORMAT_ROWS].token;
        mean_bound = formats[FORMAT_ROWS].mean;
    }
    if (cfg.model.rope.dim && seed % 3 == 1) { /* layers differ in RoPE; no random number, as below */
        layers[seed % LAYERS].rope.dim = TKV_OFF;
        layers[(seed + 1) % LAYERS].rope.dim = dim / 2;
        layers[(seed + 1) % LAYERS].rope.base = 500.0f;
        layers[(seed + 1) % LAYERS].rope.interleaved = 1;
    }
    if (seed % 4 == 2) choose_layer_shape(&layers[seed / 4 % LAYERS], seed / 4);
    if (seed % 7 < 2) choose_v_in_k(layers, seed / 7);
    for (i = 0; i < LAYERS; i++) set_shape(i, &layers[i]);
    cfg.layers = layers;
    if (rand_below(4) == 0) cfg.host.parallel_for = run_backwards;
    cfg.budget.discard = rand_below(2);
    if (rand_below(2)) {
        attach_test_store(&store, &cfg);
        cfg.offload.keep_exact = rand_below(2);
    }
    if (seed % 5 == 3) { /* no random number, so other seeds keep their configs */
        cfg.recompute.compute = compute_rows;
        cfg.recompute.cost.n_heads = TKV_OFF;
        cfg.recompute.cost.layer_params = 1000.0;
        cfg.recompute.cost.min_materialized = 128;
        cfg.recompute.cost.quantize_price = seed % 2 ? 1e9 : 1e-9;
        if (seed % 3 == 0) cfg.recompute.cost.step_flops = (int)LAYERS * 2000.0 * 200.0; /* of 200 tokens */
    }
    if (seed % 3) cfg.limits.max_states = 1 + (int)(seed % 7);
    in_place = rand_below(4) == 0;
    if (in_place || seed % 4 == 0) cfg.limits.state_bytes = 3000 + (size_t)(seed % 5) * 6000;
    if (in_place) cfg.limits.max_tokens = LONGEST;
    else cfg.host.allocator = counting_allocator_of(&memory);
}

static void create_random_cache(void) {
    tkv_remat_config r;
    tkv_status st;
    char reason[200] = "";
    size_t bytes;
    kv = NULL;
    st = tkv_validate_config(&cfg, reason, sizeof reason);
    CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
    if (tkv_test_.n_bad) printf("    %s\n", reason);
    for (st = TKV_ERR_BUDGET; st == TKV_ERR_BUDGET;
         cfg.budget.bytes += 50000) { /* some configs need more bytes */
        st = in_place ? tkv_get_required_bytes(&cfg, &bytes, NULL) : tkv_create(&cfg, &kv);
        if (st != TKV_ERR_BUDGET) break;
    }
    max_budget = cfg.budget.bytes ? cfg.budget.bytes : 500000;
    if (in_place) kv = create_cache_in_place(&cfg, &arena, (size_t)rand_below(64));
    if (!kv) {
        printf("no cache: %d\n", (int)st);
        exit(2);
    }
    memset(&r, 0, sizeof r);
    r.n_layers = LAYERS;
    r.n_heads = HEADS;
    r.head_dim = cfg.model.head_dim;
    r.layer_params = 1e6;
    r.min_materialized = 128;
    CHECK_EQ(tkv_init_remat(&remat, &r, NULL, 0), TKV_OK);
    r.step_flops = 4.0 * flops_of(&remat, BLOCK);
    CHECK_EQ(tkv_init_remat(&remat, &r, NULL, 0), TKV_OK);
    remat_step = 0;
    image_size = 0;
}

static void run_seed(int seed, int ops) {
    static char text[4000];
    int i, s;
    memset(&cfg, 0, sizeof cfg);
    memset(&memory, 0, sizeof memory);
    memset(&arena, 0, sizeof arena);
    memset(&store, 0, sizeof store);
    memset(&call, 0, sizeof call);
    memset(last_calls, 0, sizeof last_calls);
    for (s = 0; s < SEQS; s++) reset_model(s);
    rng = tkv_rng_seed((uint64_t)seed);
    choose_config((uint64_t)seed);
    create_random_cache();
    take_snapshot();
    for (i = 0; i < ops && !tkv_test_.n_bad; i++) {
        step(i);
        if (in_place && i % 50 == 0) check_borders(&arena);
    }
    if (tkv_test_.n_bad) {
        printf("    TKV_RANDOM_SEED=%d TKV_RANDOM_RUNS=1 TKV_RANDOM_OPS=%d; calls:", seed, i);
        for (s = max_of(0, i - COUNT(last_calls)); s < i; s++)
            printf("\n    %s", last_calls[s % COUNT(last_calls)]);
        printf("\n    %s", tkv_print_config(&cfg, 1, text, sizeof text, NULL) ? "" : text);
        printf("\n");
    }
    tkv_destroy(kv);
    if (in_place) check_borders(&arena);
    else CHECK_EQ(memory.held, 0);
    free(arena.raw);
    if (cfg.offload.write) destroy_test_store(&store);
}

TEST(everything) {
    const int first = int_from_env("TKV_RANDOM_SEED", 1);
    const int runs = int_from_env("TKV_RANDOM_RUNS", tkv_test_quick() ? 24 : 96);
    const int ops = int_from_env("TKV_RANDOM_OPS", 0); /* 0: some runs are long */
    int i;
    for (i = 0; i < runs && !tkv_test_.n_bad; i++)
        run_seed(first + i, ops ? ops : (first + i) % 6 == 5 ? 600 : 120);
    printf("\n    seeds %d to %d; attention is off by %.2f of its bound at most", first, first + runs - 1,
           worst_attend);
    for (i = 0; i < FORMAT_ROWS; i++) /* without a budget, and with one */
        printf("\n    %s/%s: tokens are off by %.4f, %.4f at most, layers by %.4f, %.4f",
               formats[i].warm.k ? tkv_get_name(TKV_NAME_FORMAT, (int)formats[i].warm.k) : "default",
               formats[i].warm.v ? tkv_get_name(TKV_NAME_FORMAT, (int)formats[i].warm.v) : "default",
               worst_token[i][0], worst_token[i][1], worst_mean[i][0], worst_mean[i][1]);
    for (i = 0; i < COUNT(calls); i++)
        printf("%s%s %ld, refused %ld", i % 5 ? "; " : "\n    ", calls[i].name, n_done[i], n_refused[i]);
    printf("\n    a store failed for %ld calls\n", n_store_failures);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(everything);
    return tkv_test_end();
}
