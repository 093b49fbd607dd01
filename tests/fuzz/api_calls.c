/*
 * api_calls.c - a fuzz target: the bytes of an input choose a config and a series of calls, with valid and with wrong
 * arguments, and a small model checks each answer.
 *
 * The model of a sequence is an array of tokens: an id, a position, a state. After each call:
 *   - the cache passes its self-check, and holds the bytes that it reports, within its budget;
 *   - lengths, positions and states are those of the model;
 *   - a call that failed has changed nothing of this;
 *   - a call with a sequence or layer that does not exist has failed;
 *   - exact tokens read back to the bit, compressed ones as the same tokens: a range of one layer of one sequence in
 *     turn, of a layer of each sequence after a call that failed, and all tokens at the end.
 * Attention must agree with tkv_attend_reference, and have the same bits in parts. Sequences are saved, also to journals,
 * and loaded: whole, damaged, through callbacks, attached. Now and then the cache is saved, ends, and goes on in a new
 * one. Attention over what was loaded must have the same bits. Configs, tables and stores of thresholds are also read
 * from the bytes of the input. Allocations, callbacks, and the store of offloaded blocks fail on demand.
 *
 * Coverage-guided, with clang (about a minute to build; `make fuzz` does the same for FUZZ_SECONDS):
 *     clang -g -O1 -DTKV_NO_SIMD -include assert.h -DTKV_ASSERT=assert -fsanitize=fuzzer,address,undefined \
 *         -fno-sanitize-recover=all tests/fuzz/api_calls.c examples/tieredkv.c -o api_calls -lm
 *     ./api_calls -max_len=1024 corpus_folder
 * As a plain program, with any compiler, for random inputs or for files that libFuzzer wrote:
 *     cc -O1 -DTKV_FUZZ_MAIN -include assert.h -DTKV_ASSERT=assert tests/fuzz/api_calls.c examples/tieredkv.c \
 *         -o api_calls -lm
 *     ./api_calls --runs 1000 [--seed 1] [--bytes 400]
 *     TKV_FUZZ_LOG=1 ./api_calls crash-file ...      prints each call
 *
 * To add a call: write a function call_x and a row in calls[]. Its arguments come from choose_int, which sometimes gives
 * a wrong one and then sets call.is_hostile.
 */
#include "../kit.h"
#include "target.h"

#include <limits.h>
#include <math.h>

enum {
    SEQS = 3,
    LAYERS = 4, /* 0 and 1 have a cache; with n_layers 4, layer 2 shares that of 0, and 3 has none */
    CHUNK = 96,
    LONGEST = 640,
    MAX_HEADS = 4,
    MAX_DIM = 32,
    MAX_ROW = 2 * MAX_DIM, /* K or V of a token */
    ROWS = 10,             /* queries of a call of attention, and rows between them */
    WORDS = (LONGEST + 63) / 64,
    SOME_VALUES = 130, /* tokens of a layer that are read after a call */
    MAX_BLOCKS = 96,
    ALLOCATED = 64 << 20 /* a cache that asks for more bytes is refused */
};

/* The current call: what it may do, and what happened during it. */
static struct {
    int is_hostile; /* an argument is out of range */
    int must_fail;  /* no such sequence or layer */
    int may_evict[SEQS], may_discard[SEQS], may_restore[SEQS];
    int keeps_part; /* a call that fails may keep a part of its work */
    int n_evicted, n_wrong;
    char text[200];
} call;

/* A number from low to high; now and then another one. */
static int choose_int(int low, int high) {
    static const int wrong[] = {
        INT_MIN, INT_MAX,       -1,      -2,      TKV_ALL_LAYERS, TKV_NO_SEQ, -5,    0,
        1 << 30, (1 << 30) - 1, 1 << 20, LONGEST, LONGEST + 1,    CHUNK + 1,  65536, 4096};
    const int byte = next_byte();
    int value;
    if (byte >= 249) value = wrong[next_byte() % COUNT(wrong)];
    else if (high - low < 249) value = low + byte % (high - low + 1);
    else value = low + (byte * 256 + next_byte()) % (high - low + 1);
    if (value < low || value > high) call.is_hostile = 1;
    return value;
}

static int choose_seq(void) {
    const int seq = choose_int(0, SEQS - 1);
    if (seq < 0 || seq >= SEQS) call.must_fail = 1;
    return seq;
}

/* >>the model */
enum { LIVE, GONE, DISCARDED, EXPIRED }; /* GONE: evicted or removed, which an event or the call said */

typedef struct model_layer {
    int len, step_len, exact_from; /* exact_from: tokens from here on were appended last */
    uint32_t id[LONGEST];
    int position[LONGEST], turned[LONGEST];
    uint8_t state[LONGEST], is_pinned[LONGEST], is_sink[LONGEST]; /* is_sink: 1 for named sinks */
} model_layer;

static model_layer model[SEQS][2];
static int in_step[SEQS], reserved[SEQS], has_moved[SEQS], has_discards[SEQS];
static int may_share[SEQS]; /* 1: the sequence had blocks in common with another one */
static int cut_gone
    [SEQS]; /* 1: tokens that were gone were cut off, or the sequence was loaded: so blocks may be merged */

static tkv_config cfg;
static tkv_layer_config layer_cfg[LAYERS];
static tkv_level ladder[3];
static tkv_cache *kv;
static counting_allocator memory;
static test_store store;
static guarded_buffer arena;
static tkv_remat remat;
static int in_place, k_row, v_row, v_dim, remat_step, is_logging, fail_at_row;
static uint32_t next_id;
static long n_named, n_adopted; /* calls that named pages, and that adopted some */
static int named_seq;           /* the last sequence whose pages were named */
static int turn;                /* calls of this input */
static int prefix_text[LONGEST];
static size_t budget_before;
static uint8_t image[1 << 17]; /* of tkv_save_calibration */
static size_t image_size;
static float k_in[SEQS * (CHUNK + 1) * MAX_ROW + 64], v_in[SEQS * (CHUNK + 1) * MAX_ROW + 64];
static float k_out[LONGEST * MAX_ROW], v_out[LONGEST * MAX_ROW];

static int min_of(int a, int b) { return a < b ? a : b; }
static int max_of(int a, int b) { return a > b ? a : b; }
static int is_layer(int layer) { return layer == 0 || layer == 1; }
static int is_seq(int seq) { return seq >= 0 && seq < SEQS; }
static int min_len(int seq) { return min_of(model[seq][0].len, model[seq][1].len); }
static int max_len(int seq) { return max_of(model[seq][0].len, model[seq][1].len); }
static int window_of(int layer) { return cfg.model.window ? cfg.model.window : layer_cfg[layer].window; }

/* 1 if V of a layer is the first channels of its K. */
static int has_v_in_k(int layer) {
    return (layer_cfg[layer].v_in_k ? layer_cfg[layer].v_in_k : cfg.model.v_in_k) == 1;
}

/* 1 if queries of a layer see sinks beyond their window. */
static int has_window_sinks(int layer) { return cfg.model.window_sinks || layer_cfg[layer].window_sinks; }

static int n_first_sinks(void) {
    return cfg.tiers.sink_tokens == TKV_OFF ? 0 : cfg.tiers.sink_tokens ? cfg.tiers.sink_tokens : 4;
}

/* The layer that stores K and V of a layer; -1: it has none. */
static int stored_layer(int layer) {
    if (layer < 0 || layer >= cfg.model.n_layers) return -1;
    return layer == 3 ? -1 : layer % 2 && layer < 2 ? 1 : layer == 2 ? 0 : layer;
}

/* A token of a sequence, or one behind its end. */
static int choose_token(int seq) { return choose_int(0, is_seq(seq) ? max_len(seq) + 2 : 4); }

static int choose_layer(void) {
    const int layer = choose_int(0, cfg.model.n_layers - 1);
    if (stored_layer(layer) < 0) call.must_fail = 1;
    return layer;
}

/* A layer, or all of them. */
static int choose_layers(void) {
    const int layer = next_byte() % 2 ? choose_int(0, cfg.model.n_layers - 1) : TKV_ALL_LAYERS;
    if (stored_layer(layer) < 0 && layer != TKV_ALL_LAYERS) call.must_fail = 1;
    return layer;
}

/* K or V of a token: multiples of 1/64, which every exact format holds. */
static void make_row(uint32_t id, int layer, int side, float *out) {
    tkv_rng r = tkv_rng_seed(((uint64_t)id << 16) ^ (uint64_t)(layer * 2 + side) << 12);
    const int n = side ? v_row : k_row;
    uint64_t u = 0;
    int i;
    if (side && has_v_in_k(layer)) {
        float k[MAX_ROW];
        make_row(id, layer, 0, k);
        for (i = 0; i < v_row; i++) out[i] = k[i / v_dim * cfg.model.head_dim + i % v_dim];
        return;
    }
    for (i = 0; i < n; i++) {
        u = i % 8 ? u >> 8 : tkv_rng_u64(&r);
        out[i] = (float)((int)(u & 255) - 128) / 64.0f;
    }
}

/* The key of a token of the model at its present position. */
static void make_moved_key(const model_layer *s, int layer, int token, float *out) {
    const tkv_rope *rope = &cfg.model.rope;
    const int pairs = rope->dim / 2, step = rope->interleaved ? 2 : 1, apart = rope->interleaved ? 1 : pairs;
    int h, j;
    make_row(s->id[token], layer, 0, out);
    if (!s->turned[token]) return;
    for (h = 0; h < k_row; h += cfg.model.head_dim)
        for (j = 0; j < pairs; j++) {
            const double angle = s->turned[token] * pow(10000.0, -(double)j / pairs);
            float *x = out + h + rope->first + j * step, *y = x + apart;
            const double a = (double)*x, b = (double)*y;
            *x = (float)(a * cos(angle) - b * sin(angle));
            *y = (float)(b * cos(angle) + a * sin(angle));
        }
}

static void truncate_model(int seq, int layer, int len) {
    model_layer *s = &model[seq][layer];
    int i;
    for (i = len; i < s->len; i++) cut_gone[seq] |= s->state[i] == GONE;
    s->len = min_of(s->len, len);
    s->exact_from = min_of(s->exact_from, s->len);
}

static void reset_model(int seq) {
    truncate_model(seq, 0, 0);
    truncate_model(seq, 1, 0);
    in_step[seq] = reserved[seq] = has_moved[seq] = has_discards[seq] = may_share[seq] = cut_gone[seq] = 0;
}

/* Appends tokens first_id, ... to the model, at the positions that the cache says. positions: that they must have;
 * NULL: each follows the one before. */
static void append_to_model(int seq, int layer, uint32_t first_id, int n, const int *positions) {
    model_layer *s = &model[seq][layer];
    int i;
    if (!in_step[seq] && n) s->exact_from = s->len;
    CHECK_EQ(tkv_get_positions(kv, seq, layer, s->len, n, s->position + s->len), TKV_OK);
    for (i = s->len; i < s->len + n; i++) {
        s->id[i] = first_id + (uint32_t)(i - s->len);
        s->turned[i] = s->is_pinned[i] = s->is_sink[i] = s->state[i] = 0;
        if (positions) CHECK_EQ(s->position[i], positions[i - s->len]);
        else if (i && (i > s->len || s->state[i - 1] == LIVE || s->state[i - 1] == DISCARDED))
            CHECK_EQ(s->position[i], s->position[i - 1] + 1);
    }
    s->len += n;
    if (min_len(seq) >= reserved[seq] && !in_step[seq]) reserved[seq] = 0;
}

static void record_event(void *user, const tkv_event *e) {
    int i;
    (void)user;
    if (!e->text || !e->text[0]) call.n_wrong++;
    if (e->kind != TKV_EVENT_EVICT) return;
    call.n_evicted += e->n;
    if (!is_seq(e->seq) || !is_layer(e->layer) || !call.may_evict[e->seq]) {
        call.n_wrong++;
        return;
    }
    for (i = 0; i < e->n; i++) {
        model_layer *s = &model[e->seq][e->layer];
        const int at = e->positions[i];
        if (at < 0 || at >= s->len || s->state[at] == GONE || s->is_pinned[at] || s->is_sink[at])
            call.n_wrong++;
        else s->state[at] = GONE;
    }
}

/* cfg.recompute */
static int compute_rows(void *user, int seq, int layer, int head, const int *positions, int n, float *k,
                        float *v) {
    float row[MAX_ROW];
    int t;
    (void)user;
    if (fail_at_row && --fail_at_row == 0) {
        store.n_failed++;
        return 1;
    }
    for (t = 0; t < n; t++) {
        const uint32_t id = model[seq][layer].id[positions[t]];
        make_row(id, layer, 0, row);
        if (k)
            memcpy(k + t * cfg.model.head_dim, row + head * cfg.model.head_dim,
                   (size_t)cfg.model.head_dim * sizeof *k);
        make_row(id, layer, 1, row);
        CHECK(!v || !has_v_in_k(layer));
        if (v) memcpy(v + t * v_dim, row + head * v_dim, (size_t)v_dim * sizeof *v);
    }
    return 0;
}

/* >>checks after each call */
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

static int is_readable(int state) { return state == LIVE || (state == DISCARDED && cfg.recompute.compute); }

/* Reads the live tokens of a layer from `first` to end - 1, and compares them with the model. */
static void check_values(int seq, int layer, const uint8_t *tier, int first, int end) {
    const model_layer *s = &model[seq][layer];
    double sum = 0.0, sum_v = 0.0;
    int i, j, n, n_encoded = 0;
    for (i = first; i < end; i += n) {
        for (n = 1; i + n < end && s->state[i + n] == s->state[i]; n++) {}
        if (!is_readable(s->state[i])) {
            CHECK_EQ(tkv_read(kv, seq, layer, i, n, k_out, v_out),
                     s->state[i] == DISCARDED ? TKV_ERR_NO_SOURCE : TKV_ERR_RANGE);
            continue;
        }
        CHECK_EQ(tkv_read(kv, seq, layer, i, n, k_out, v_out), TKV_OK);
        for (j = i; j < i + n; j++) {
            const float *k = k_out + (j - i) * k_row, *v = v_out + (j - i) * v_row;
            float want_k[MAX_ROW], want_v[MAX_ROW];
            int same, h;
            double e;
            for (h = 0; h < k_row / cfg.model.head_dim && has_v_in_k(layer) && !s->turned[j]; h++)
                CHECK_MEM(v + h * v_dim, k + h * cfg.model.head_dim, (size_t)v_dim * sizeof *v);
            make_moved_key(s, layer, j, want_k);
            make_row(s->id[j], layer, 1, want_v);
            same = memcmp(v, want_v, (size_t)v_row * sizeof *v) == 0 &&
                   (s->turned[j] ? relative_error(k, want_k, k_row) < 1e-8
                                 : memcmp(k, want_k, (size_t)k_row * sizeof *k) == 0);
            if (same) continue;
            CHECK_MSG(tier[j] != TKV_TIER_HOT && s->state[j] == LIVE && j < s->exact_from,
                      "sequence %d, layer %d: exact token %d of %d changed, tier %d, turned by %d", seq,
                      layer, j, s->len, (int)tier[j], s->turned[j]);
            e = relative_error(k, want_k, k_row);
            sum += e > 2.0 ? 2.0 : e;
            e = relative_error(v, want_v, v_row);
            sum += e > 2.0 ? 2.0 : e;
            sum_v += e > 2.0 ? 2.0 : e;
            n_encoded += 2;
        }
    }
    /* Other tokens would be off by about 2, and zeros by 1. Keys can be as bad, if their table was frozen early. */
    if (n_encoded >= 64)
        CHECK_MSG(sum / n_encoded <= 1.0 && sum_v / n_encoded <= 0.35,
                  "sequence %d, layer %d: tokens are off by %.3f, values by %.3f", seq, layer,
                  sum / n_encoded, 2.0 * sum_v / n_encoded);
}

/* n_values: tokens whose values are read, from another one in each turn. */
static void check_layer(int seq, int layer, int n_values) {
    static uint8_t tier[LONGEST];
    static int positions[LONGEST];
    model_layer *s = &model[seq][layer];
    int count[4] = {0, 0, 0, 0}, n_sinks = 0, i, held;
    tkv_layer_info info;
    CHECK_EQ(tkv_get_length(kv, seq, layer), s->len);
    if (tkv_test_.n_bad) return;
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, s->len, tier), TKV_OK);
    CHECK_EQ(tkv_get_positions(kv, seq, layer, 0, s->len, positions), TKV_OK);
    has_discards[seq] |= call.may_discard[seq];
    for (i = 0; i < s->len; i++) {
        const int was = s->state[i], is = tier[i] < TKV_TIER_COUNT         ? LIVE
                                          : tier[i] == TKV_TOKEN_DISCARDED ? DISCARDED
                                          : was == GONE                    ? GONE
                                                                           : EXPIRED;
        CHECK(tier[i] < TKV_TIER_COUNT || tier[i] == TKV_TOKEN_DISCARDED || tier[i] == TKV_TOKEN_GONE);
        count[is]++;
        if (is == was && positions[i] == s->position[i] && !s->is_sink[i]) continue; /* most of them */
        if (was == GONE)
            CHECK_MSG(is == GONE, "sequence %d, layer %d: token %d, which is gone, is there", seq, layer, i);
        if (is == EXPIRED && was != EXPIRED)
            CHECK_MSG(window_of(layer) && (i < s->len - window_of(layer) || has_moved[seq]) &&
                          (!has_window_sinks(layer) || i >= n_first_sinks() || has_moved[seq] ||
                           s->state[0] == GONE), /* tokens behind sinks that all were evicted are none */
                      "sequence %d, layer %d: token %d of %d vanished", seq, layer, i, s->len);
        if (s->is_sink[i])
            CHECK_MSG(tier[i] == TKV_TIER_HOT ||
                          (is == EXPIRED && window_of(layer) && !has_window_sinks(layer)),
                      "sequence %d, layer %d: the named sink %d is in tier %d", seq, layer, i, tier[i]);
        n_sinks += s->is_sink[i] && is == LIVE;
        if (was == EXPIRED)
            CHECK_MSG(is == EXPIRED, "sequence %d, layer %d: token %d, which had expired, is there", seq,
                      layer, i);
        if (is == DISCARDED && was != DISCARDED)
            CHECK_MSG(call.may_discard[seq] || cfg.recompute.compute ||
                          (cfg.tiers.n_anchors && has_discards[seq]),
                      "sequence %d, layer %d: token %d was discarded", seq, layer, i);
        if (is == LIVE && was == DISCARDED)
            CHECK_MSG(call.may_restore[seq], "sequence %d, layer %d: token %d was restored", seq, layer, i);
        if (is == LIVE || is == DISCARDED)
            CHECK_MSG(positions[i] == s->position[i], "sequence %d, layer %d: token %d is at %d, not %d", seq,
                      layer, i, positions[i], s->position[i]);
        s->position[i] = positions[i]; /* that of a token that is gone follows from its neighbours */
        s->state[i] = (uint8_t)is;
    }
    held = info.tokens[TKV_TIER_HOT] + info.tokens[TKV_TIER_WARM] + info.tokens[TKV_TIER_ARCHIVE];
    CHECK_EQ(info.length, s->len);
    CHECK_EQ(held, count[LIVE]);
    CHECK_EQ(info.discarded, count[DISCARDED]);
    CHECK_EQ(info.named_sinks, n_sinks);
    CHECK_EQ(held + info.discarded + info.expired + info.evicted, s->len);
    if (!n_values || !s->len || tkv_test_.n_bad) return;
    i = n_values < s->len ? turn * 89 % (s->len - n_values + 1) : 0;
    check_values(seq, layer, tier, i, min_of(s->len, i + n_values));
}

static uint32_t hash_seen(int seq, int n);

/* Every state is that of the tokens of its sequence. */
static void check_states(int seq, int layer) {
    static int at[256];
    static uint32_t words[640];
    int n = 0, i, j;
    size_t size = 0;
    CHECK_EQ(tkv_seq_list_states(kv, seq, layer, at, COUNT(at), &n), TKV_OK);
    for (i = 0; i < min_of(n, COUNT(at)) && !tkv_test_.n_bad; i++) {
        const uint32_t want = hash_seen(seq, min_of(at[i], model[seq][0].len));
        CHECK(at[i] <= model[seq][0].len);
        CHECK_EQ(tkv_seq_get_state(kv, seq, layer, at[i], words, sizeof words, &size), TKV_OK);
        for (j = 0; j < (int)(size / sizeof *words) && !tkv_test_.n_bad; j++)
            CHECK_MSG(words[j] == want, "sequence %d, layer %d: the state after %d tokens has seen others",
                      seq, layer, at[i]);
    }
}

/* Bytes of the cache and of its sequences. */
static void check_bytes(void) {
    tkv_memory_info m;
    tkv_seq_memory_info of_seq;
    size_t blocks = 0;
    int s;
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    if (!in_place) CHECK_EQ(m.total, memory.held);
    if (budget_of(kv).budget) CHECK_LE(in_place ? budget_of(kv).used : m.total, budget_of(kv).budget);
    if (budget_before && budget_of(kv).budget && !in_place)
        CHECK_LE(memory.peak, budget_before > budget_of(kv).budget ? budget_before : budget_of(kv).budget);
    for (s = 0; s < SEQS; s++) {
        CHECK_EQ(tkv_seq_get_memory(kv, s, &of_seq), TKV_OK);
        blocks += of_seq.own + of_seq.share;
    }
    CHECK_LE(blocks, m.total);
}

/* Reads n_values tokens of `layers`, bit 2 * s + l for layer l of sequence s. */
static void check_everything(unsigned layers, int n_values) {
    int s, l;
    check_cache(kv);
    check_bytes();
    for (s = 0; s < SEQS; s++)
        for (l = 0; l < 2 && !tkv_test_.n_bad; l++)
            check_layer(s, l, layers >> (2 * s + l) & 1u ? n_values : 0);
    for (s = 0; s < SEQS; s++)
        for (l = 0; l < cfg.model.n_layers && !tkv_test_.n_bad; l++) check_states(s, l);
    for (s = 0; s < SEQS; s++) {
        CHECK_LE(tkv_seq_find_state(kv, s, TKV_UNLIMITED), max_len(s));
        CHECK_EQ(tkv_get_length(kv, s, TKV_ALL_LAYERS), min_len(s));
        if (cfg.model.n_layers == LAYERS) {
            CHECK_EQ(tkv_get_length(kv, s, 2), model[s][0].len);
            CHECK_EQ(tkv_get_length(kv, s, 3), 0);
        }
    }
}

/* Memory of exactly `n` bytes: a read behind them is found. */
static uint8_t *exact_memory(size_t n) {
    uint8_t *p = (uint8_t *)malloc(n ? n : 1);
    if (!p) exit(2);
    return p;
}

/* >>calls */
/* The input asked for a call that this program cannot make. */
static tkv_status skip_call(void) {
    call.must_fail = 0;
    return TKV_OK;
}

#define ERR(status) (1u << -(int)TKV_ERR_##status)
enum { MEMORY_ERRORS = 1u << 3 | 1u << 4 | 1u << 12 }; /* NOMEM, CAPACITY, BUDGET */

static void allow_reclaim(int used) {
    int s;
    for (s = 0; s < SEQS; s++) {
        if (in_step[s] || !budget_before) continue;
        if (cfg.evict.policy) call.may_evict[s] = 1;
        if (cfg.budget.discard && s != used) call.may_discard[s] = 1;
    }
    if (is_seq(used) && cfg.evict.keep_tokens && !in_step[used]) call.may_evict[used] = 1;
}

/* K and V of tokens with ids from next_id on. Returns 1 if a value is not finite. */
static int fill_input(int layer, int n) {
    const int what = next_byte();
    int t;
    for (t = 0; t < n; t++) {
        make_row(next_id + (uint32_t)t, layer, 0, k_in + t * k_row);
        make_row(next_id + (uint32_t)t, layer, 1, v_in + t * v_row);
    }
    if (what < 252 || n < 1) return 0;
    if (what & 1 || has_v_in_k(layer))
        k_in[next_below(n * k_row)] = tkv_test_float(what & 2 ? 0x7fc00001u : 0xff800000u);
    else v_in[next_below(n * v_row)] = tkv_test_float(what & 2 ? 0x7fc00001u : 0x7f800000u);
    return 1;
}

/* V of an append. Where V is inside K, it may be NULL. */
static const float *choose_v_in(int layer) {
    return is_layer(layer) && has_v_in_k(layer) && next_byte() % 2 ? NULL : v_in;
}

/* Appends as a whole, or as parts, in a workspace of exactly the bytes that they need. Before them comes one with any
 * number, of any number of parts, that changes nothing: it is wrong, or others would have to follow. */
static tkv_status append_somehow(const tkv_append_params *p) {
    const int how = next_byte(), was_hostile = call.is_hostile, offset = how % 64, n_parts = 1 + how % 20;
    int part, n, i, short_by;
    size_t bytes = 128; /* also of an append that will be refused */
    uint8_t *space;
    tkv_status st = TKV_OK;
    if (how < 128) return tkv_append_ex(kv, p);
    (void)tkv_get_append_bytes(kv, p, &bytes);
    space = (uint8_t *)malloc(bytes + (size_t)offset);
    if (!space) exit(2);
    memset(space + offset, 0, 128);
    part = choose_int(0, 4), n = choose_int(2, 6), short_by = next_byte() % 4 == 0;
    call.is_hostile = was_hostile;
    if (n != 1)
        CHECK_EQ(tkv_append_part(kv, p, part, n, space + offset, bytes - (size_t)short_by),
                 part < 0 || part >= n || n > 65536 ? TKV_ERR_ARG
                 : short_by                         ? TKV_ERR_CAPACITY
                                                    : TKV_OK);
    memset(space + offset, 0, 128);
    for (i = 0; i < n_parts; i++) {
        CHECK_EQ(st, TKV_OK); /* the last part has the status of the append */
        st = tkv_append_part(kv, p, i, n_parts, space + offset, bytes);
    }
    CHECK(is_zero(space + offset, 128));
    free(space);
    return st;
}

/* The position of the next token: it follows that of the last one, which can be negative if that is gone. */
static int next_position(int seq, int layer) {
    const model_layer *s = &model[seq][layer];
    return s->len ? max_of(0, s->position[s->len - 1] + 1) : 0;
}

/* 1 if n more tokens get positions below 2^30. */
static int has_positions_for(int seq, int layer, int n) { return next_position(seq, layer) <= (1 << 30) - n; }

static tkv_status call_append(void) {
    tkv_append_params p;
    const int seq = choose_seq(), layer = choose_layer(), n = choose_int(0, CHUNK);
    int bad, fits;
    tkv_status st;
    if (!is_layer(layer)) call.must_fail = 1;
    bad = fill_input(is_layer(layer) ? layer : 0, n < 0 || n > CHUNK ? 0 : n);
    sprintf(call.text, "append %d to sequence %d, layer %d%s", n, seq, layer, bad ? ", not finite" : "");
    if (n < 0 || n > CHUNK || bad) call.must_fail = 1;
    if (!call.must_fail && model[seq][layer].len + n > LONGEST) return skip_call();
    allow_reclaim(seq);
    fits = !call.must_fail && model[seq][layer].len + n <= reserved[seq] &&
           (!in_step[seq] || model[seq][layer].len - model[seq][layer].step_len + n <= CHUNK);
    memset(&p, 0, sizeof p);
    p.seq = seq, p.layer = layer, p.n = n;
    p.k = k_in, p.v = choose_v_in(layer);
    st = append_somehow(&p);
    if (fits) CHECK_MSG(st == TKV_OK, "%d, but it was reserved up to %d", (int)st, reserved[seq]);
    if (bad) CHECK(st != TKV_OK);
    if (st == TKV_ERR_RANGE) CHECK(call.must_fail || !has_positions_for(seq, layer, n));
    if (st) return st;
    append_to_model(seq, layer, next_id, n, NULL);
    next_id += (uint32_t)n;
    return st;
}

/* A call that was refused may have recoded the newest tokens. */
static void note_recoding(void) {
    int i;
    for (i = 0; i < 2 * SEQS; i++) model[i / 2][i % 2].exact_from = model[i / 2][i % 2].len;
}

/* Appends n tokens to all layers, as programs do. A layer that lags catches up. */
static tkv_status append_to_all(int seq, int n) {
    tkv_status st = TKV_OK;
    int l, t;
    for (l = 0; l < 2 && !st; l++) {
        const int lag = max_len(seq) - model[seq][l].len, some = lag ? min_of(lag, CHUNK) : n;
        for (t = 0; t < some; t++) {
            make_row(next_id + (uint32_t)t, l, 0, k_in + t * k_row);
            make_row(next_id + (uint32_t)t, l, 1, v_in + t * v_row);
        }
        st = tkv_append(kv, seq, l, k_in, has_v_in_k(l) ? NULL : v_in, some);
        if (st == TKV_ERR_RANGE) CHECK(!has_positions_for(seq, l, some));
        if (!st) append_to_model(seq, l, next_id, some, NULL);
        next_id += (uint32_t)some;
    }
    return st;
}

static tkv_status call_append_all(void) {
    const int seq = choose_seq(), n = choose_int(1, CHUNK);
    sprintf(call.text, "append %d to all layers of sequence %d", n, seq);
    if (call.is_hostile || max_len(seq) + n > LONGEST) return skip_call();
    allow_reclaim(seq);
    call.keeps_part = 1;
    return append_to_all(seq, n);
}

/* Gives the sequences tokens, so that short inputs get far. */
static void fill_sequences(void) {
    int seq, n;
    budget_before = budget_of(kv).budget;
    for (seq = 0; seq < SEQS; seq++) {
        n = next_byte();
        for (n = n < 208 ? n : 10 * (n - 205); n > 0; n -= CHUNK) { /* now and then they are long */
            memset(&call, 0, sizeof call);
            allow_reclaim(seq);
            if (append_to_all(seq, min_of(n, CHUNK))) note_recoding();
            if (is_logging)
                fprintf(stderr, "filled sequence %d with %d, %d\n", seq, model[seq][0].len,
                        model[seq][1].len);
            check_everything(0, 0);
        }
    }
}

/* Appends tokens at positions that repeat and jump, now and then back. */
static tkv_status call_append_at(void) {
    const int seq = choose_seq(), layer = choose_layer(), n = choose_int(1, 40);
    const int seed = next_byte(), back = next_byte();
    int positions[CHUNK], i, at, jumps = 0;
    tkv_append_params p;
    tkv_rng rng = tkv_rng_seed((uint64_t)seed);
    model_layer *s;
    tkv_status st;
    if (call.is_hostile || call.must_fail || !is_layer(layer)) return skip_call();
    s = &model[seq][layer];
    if (s->len + n > LONGEST) return skip_call();
    at = next_position(seq, layer);
    if (back > 220) at = choose_int(0, at + 100);
    if (at > (1 << 30) + CHUNK) at = -1;
    for (i = 0; i < n; i++, at += tkv_rng_below(&rng, 5) ? 1 : tkv_rng_below(&rng, 20)) {
        positions[i] = at;
        if (at < 0 || at >= 1 << 30) call.must_fail = 1;
        if (at > (1 << 30) + CHUNK) at = -1;
        jumps |= i && positions[i] != positions[i - 1] + 1;
    }
    (void)fill_input(layer, n);
    make_row(next_id, layer, 0, k_in);
    for (i = 0; i < n; i++) { /* finite rows */
        make_row(next_id + (uint32_t)i, layer, 0, k_in + i * k_row);
        make_row(next_id + (uint32_t)i, layer, 1, v_in + i * v_row);
    }
    sprintf(call.text, "append %d at %d to %d to sequence %d, layer %d", n, positions[0], positions[n - 1],
            seq, layer);
    allow_reclaim(seq);
    memset(&p, 0, sizeof p);
    p.seq = seq, p.layer = layer, p.n = n;
    p.k = k_in, p.v = choose_v_in(layer);
    p.token_positions = positions;
    st = append_somehow(&p);
    reserved[seq] = 0;
    if (st == TKV_ERR_RANGE && !call.must_fail) CHECK(window_of(layer));
    if (st == TKV_ERR_UNSUPPORTED) CHECK(cfg.tiers.n_anchors);
    if (cfg.tiers.n_anchors && jumps) CHECK(st != TKV_OK);
    if (st || call.must_fail) return st;
    has_moved[seq] = 1;
    append_to_model(seq, layer, next_id, n, positions);
    next_id += (uint32_t)n;
    return st;
}

static tkv_status call_append_batch(void) {
    static uint16_t k_half[SEQS * (CHUNK + 1) * MAX_ROW], v_half[SEQS * (CHUNK + 1) * MAX_ROW];
    const int layer = choose_layer(), how = next_byte(), one = how & 1;
    tkv_append_params p;
    tkv_rows rows[SEQS + 1];
    int position[SEQS + 1], first_row[SEQS + 1], i, n = 0, ok = 1, n_rows = one ? 1 : choose_int(0, SEQS);
    uint32_t seen = 0;
    tkv_status st;
    memset(&p, 0, sizeof p);
    for (i = 0; i < SEQS + 1; i++) {
        rows[i].seq = one && i == 0 ? choose_seq() : (i + how / 64) % SEQS;
        rows[i].n = i < n_rows ? choose_int(0, 40) : 0;
        if (i >= n_rows || i >= SEQS) continue;
        if (!one && next_byte() > 250) rows[i].seq = choose_seq();
        if (!is_seq(rows[i].seq) || rows[i].n < 0 || rows[i].n > CHUNK) {
            call.must_fail = 1;
            continue;
        }
        ok &= !(seen >> rows[i].seq & 1);
        seen |= 1u << rows[i].seq;
        position[i] = is_layer(layer) ? next_position(rows[i].seq, layer) : 0;
        n += rows[i].n;
    }
    if (!ok || !is_layer(layer)) call.must_fail = 1;
    if (!one && (n_rows < 0 || n_rows > SEQS)) call.must_fail = 1;
    for (i = 0; i < n_rows && !call.must_fail; i++)
        if (model[rows[i].seq][layer].len + rows[i].n > LONGEST) return skip_call();
    if (how & 2) {
        p.positions = position;
        if (next_byte() > 240 && n_rows > 0 && !call.must_fail) position[0]++, call.must_fail = 1;
    }
    p.layer = layer;
    p.seq = rows[0].seq;
    p.n = rows[0].n;
    if (!one) p.batch = rows, p.n_batch = n_rows;
    (void)fill_input(0, 0);
    memset(k_in, 0, sizeof k_in); /* all of it is converted below */
    memset(v_in, 0, sizeof v_in);
    for (i = 0, n = 0; i < n_rows && i < SEQS && !call.must_fail; n += rows[i].n, i++) {
        int t;
        first_row[i] = how & 128 ? CHUNK * i + i : n;
        for (t = 0; t < rows[i].n; t++) {
            make_row(next_id + (uint32_t)(n + t), layer, 0, k_in + (first_row[i] + t) * k_row);
            make_row(next_id + (uint32_t)(n + t), layer, 1, v_in + (first_row[i] + t) * v_row);
        }
    }
    if (how & 128) p.first_rows = first_row;
    if (how & 128 && next_byte() > 245 && n_rows > 0 && !call.must_fail)
        first_row[0] = -1, call.must_fail = 1;
    for (i = 0; i < SEQS * (CHUNK + 1) * MAX_ROW && !call.must_fail; i++) {
        k_half[i] = how & 4 ? f16_of(k_in[i]) : bf16_of(k_in[i]);
        v_half[i] = how & 4 ? f16_of(v_in[i]) : bf16_of(v_in[i]);
    }
    p.k = how & 8 ? (const void *)k_half : k_in;
    p.v = how & 16 ? (const void *)v_half : v_in;
    if (how & 8) p.k_type = how & 4 ? TKV_TYPE_F16 : TKV_TYPE_BF16;
    if (!choose_v_in(layer)) p.v = NULL;
    if (how & 16) p.v_type = how & 4 ? TKV_TYPE_F16 : TKV_TYPE_BF16;
    if (how & 32) p.k_token_stride = k_row, p.k_head_stride = cfg.model.head_dim;
    for (i = 0; i < SEQS; i++) {
        if (i < n_rows && is_seq(rows[i].seq)) allow_reclaim(rows[i].seq);
    }
    for (i = 0; i < n_rows && i < SEQS; i++)
        if (is_seq(rows[i].seq) && rows[i].n) call.may_discard[rows[i].seq] = 0;
    sprintf(call.text, "append %d of a batch of %d (%d to sequence %d) to layer %d", n, n_rows, rows[0].n,
            rows[0].seq, layer);
    st = append_somehow(&p);
    for (i = 0; i < n_rows && !call.must_fail && st == TKV_ERR_RANGE; i++)
        if (!has_positions_for(rows[i].seq, layer, rows[i].n)) break;
    if (st == TKV_ERR_RANGE) CHECK(call.must_fail || i < n_rows);
    if (st) return st;
    for (i = 0, n = 0; i < n_rows && !call.must_fail; i++) {
        append_to_model(rows[i].seq, layer, next_id + (uint32_t)n, rows[i].n, NULL);
        n += rows[i].n;
    }
    next_id += (uint32_t)n;
    return st;
}

static tkv_status call_begin(void) {
    const int seq = choose_seq();
    tkv_status st;
    int l;
    sprintf(call.text, "begin sequence %d", seq);
    allow_reclaim(seq);
    st = tkv_seq_begin(kv, seq);
    if (is_seq(seq)) CHECK_EQ(st == TKV_ERR_STATE, in_step[seq]);
    for (l = 0; l < 2 && !st && is_seq(seq); l++)
        model[seq][l].step_len = model[seq][l].exact_from = model[seq][l].len;
    if (!st && is_seq(seq)) in_step[seq] = 1;
    return st;
}

static void abort_model(int seq) {
    int l;
    for (l = 0; l < 2; l++) truncate_model(seq, l, model[seq][l].step_len);
}

static tkv_status call_end(void) {
    const int seq = choose_seq(), commits = next_byte() % 3;
    tkv_status st = commits ? tkv_seq_commit(kv, seq) : tkv_seq_abort(kv, seq);
    sprintf(call.text, "%s sequence %d", commits ? "commit" : "abort", seq);
    if (!is_seq(seq)) return st;
    if (!in_step[seq]) CHECK_EQ(st, TKV_ERR_STATE);
    if (st) return st;
    if (!commits) abort_model(seq);
    in_step[seq] = 0;
    if (min_len(seq) >= reserved[seq]) reserved[seq] = 0;
    return st;
}

static tkv_status call_reserve(void) {
    const int seq = choose_seq(), n = choose_int(1, CHUNK);
    tkv_status st;
    sprintf(call.text, "reserve %d for sequence %d", n, seq);
    if (n < 1 || n > CHUNK) call.must_fail = 1;
    allow_reclaim(seq);
    st = tkv_seq_reserve(kv, seq, n);
    if (!st && is_seq(seq)) reserved[seq] = max_of(reserved[seq], min_len(seq) + n);
    return st;
}

static tkv_status call_truncate(void) {
    const int seq = choose_seq(), to = choose_token(seq);
    tkv_status st;
    int l;
    sprintf(call.text, "truncate sequence %d to %d", seq, to);
    if (to < 0) call.must_fail = 1;
    st = tkv_seq_truncate(kv, seq, to);
    if (st || !is_seq(seq)) return st;
    for (l = 0; l < 2; l++) truncate_model(seq, l, to);
    reserved[seq] = 0; /* some reservations stay; the model does not know which */
    return st;
}

/* What the layers of a sequence attend: the bits of one query, or a status. */
typedef struct answers {
    float out[2][MAX_HEADS * MAX_DIM];
    tkv_status st[2];
} answers;

static void ask(int seq, answers *a) {
    static float q[MAX_HEADS * MAX_DIM];
    tkv_rng rng = tkv_rng_seed(4);
    int l;
    memset(a, 0, sizeof *a);
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    for (l = 0; l < 2; l++) a->st[l] = tkv_attend(kv, seq, l, q, 1, a->out[l]);
}

static void check_same_answers(const answers *a, const answers *b) {
    int l;
    for (l = 0; l < 2; l++) {
        CHECK_EQ(a->st[l], b->st[l]);
        if (!a->st[l]) CHECK_MEM(a->out[l], b->out[l], sizeof a->out[l]);
    }
}

/* A fork and its source see the same bytes, so their outputs have the same bits. */
static void compare_fork(int src, int dst) {
    const int failed = store.n_failed;
    answers a, b;
    ask(src, &a);
    ask(dst, &b);
    if (store.n_failed == failed) check_same_answers(&b, &a);
}

static tkv_status call_fork(void) {
    const int src = choose_seq(), other = choose_seq();
    const int dst = is_seq(src) && src == other && next_byte() < 250 ? (src + 1) % SEQS : other;
    const int n = next_byte() % 2 ? TKV_UNLIMITED : choose_int(0, is_seq(src) ? max_len(src) + 2 : 4);
    tkv_status st;
    int l;
    sprintf(call.text, "fork %d of sequence %d as %d", n, src, dst);
    if (src == dst || (n < 0 && n != TKV_UNLIMITED)) call.must_fail = 1;
    allow_reclaim(src);
    st = tkv_seq_fork(kv, src, dst, n);
    if (call.must_fail) return st;
    CHECK_EQ(st == TKV_ERR_STATE, in_step[src] || in_step[dst]);
    if (st == TKV_ERR_RANGE) CHECK(window_of(0) || window_of(1));
    if (st) return st;
    for (l = 0; l < 2; l++) {
        model[dst][l] = model[src][l];
        truncate_model(dst, l, n == TKV_UNLIMITED ? LONGEST : n);
    }
    has_discards[dst] = has_discards[src];
    has_moved[dst] = has_moved[src];
    reserved[dst] = reserved[src] = 0;
    may_share[dst] = may_share[src] = 1;
    if (n == TKV_UNLIMITED) compare_fork(src, dst);
    return st;
}

static tkv_status call_reorder(void) {
    static model_layer old[SEQS][2];
    int moved[SEQS], discards[SEQS], sources[SEQS];
    const int first = choose_int(0, SEQS - 1), n = choose_int(0, is_seq(first) ? SEQS - first : 0);
    tkv_status st;
    int i, is_open = 0;
    if (!is_seq(first) || n < 0 || n > SEQS - first) call.must_fail = 1;
    sprintf(call.text, "reorder %d from sequence %d on", n, first);
    for (i = 0; i < SEQS; i++) {
        sources[i] = i < n ? choose_int(0, n - 1) : 0;
        if (i < n && (sources[i] < 0 || sources[i] >= n)) call.must_fail = 1;
        if (i < n && is_seq(first + i)) is_open |= in_step[first + i];
    }
    allow_reclaim(first);
    st = tkv_seq_reorder(kv, first, sources, n);
    if (call.must_fail) return st;
    CHECK_EQ(st == TKV_ERR_STATE, is_open);
    if (st) return st;
    memcpy(old, model, sizeof old);
    memcpy(moved, has_moved, sizeof moved);
    memcpy(discards, has_discards, sizeof discards);
    for (i = 0; i < n; i++) {
        memcpy(model[first + i], old[first + sources[i]], sizeof old[0]);
        has_moved[first + i] = moved[first + sources[i]];
        has_discards[first + i] = discards[first + sources[i]];
        may_share[first + i] = 1;
        reserved[first + i] = 0;
        if (i && sources[i] == sources[0]) compare_fork(first, first + i);
    }
    return st;
}

/* Positions from *first to *end - 1. */
static void choose_range(int seq, int *first, int *end) {
    *first = choose_int(0, is_seq(seq) ? max_len(seq) + 20 : 20);
    *end = next_byte() % 4 ? choose_int(0, LONGEST) : TKV_UNLIMITED;
    if (*end >= 0 && *end < *first && !call.is_hostile) *end = *first + next_byte();
    if (*first < 0 || (*end != TKV_UNLIMITED && *end < *first)) call.must_fail = 1;
}

static int is_in_range(int position, int first, int end) {
    return position >= first && (end == TKV_UNLIMITED || position < end);
}

static tkv_status call_remove(void) {
    const int seq = choose_seq();
    int first, end, l, i, longest = 0;
    tkv_status st;
    choose_range(seq, &first, &end);
    sprintf(call.text, "remove positions %d to %d of sequence %d", first, end, seq);
    st = tkv_seq_remove(kv, seq, first, end);
    if (call.must_fail) return st;
    CHECK_EQ(st == TKV_ERR_STATE, in_step[seq]);
    if (st == TKV_ERR_RANGE) CHECK(window_of(0) || window_of(1));
    if (st) return st;
    for (l = 0; l < 2; l++) {
        model_layer *s = &model[seq][l];
        const int len = tkv_get_length(kv, seq, l);
        CHECK(len <= s->len);
        for (i = 0; i < s->len; i++) {
            const int is_held = s->state[i] == LIVE || s->state[i] == DISCARDED;
            const int leaves = is_held && is_in_range(s->position[i], first, end);
            if (is_held && i >= len)
                CHECK_MSG(leaves, "token %d at %d, layer %d, was cut off", i, s->position[i], l);
            if (!leaves) longest = max_of(longest, is_held ? i + 1 : 0);
            if (leaves && i < len) s->state[i] = GONE, s->is_pinned[i] = s->is_sink[i] = 0;
        }
        truncate_model(seq, l, len);
    }
    /* The end is cut off where no layer has a token that stays. */
    for (l = 0; l < 2; l++)
        CHECK(model[seq][l].len == 0 || model[seq][l].len >= min_of(longest, model[seq][l].len));
    reserved[seq] = 0;
    return st;
}

static tkv_status call_shift(void) {
    const int seq = choose_seq(), delta = choose_int(-60, 120);
    int first, end, l, i, leaves = 0;
    tkv_status st;
    choose_range(seq, &first, &end);
    allow_reclaim(seq);
    sprintf(call.text, "shift positions %d to %d of sequence %d by %d", first, end, seq, delta);
    for (l = 0; l < 2 && !call.must_fail; l++)
        for (i = 0; i < model[seq][l].len; i++) {
            const int64_t to = (int64_t)model[seq][l].position[i] + delta;
            const int state = model[seq][l].state[i];
            if ((state == LIVE || state == DISCARDED) && is_in_range(model[seq][l].position[i], first, end))
                leaves |= to < 0 || to >= 1 << 30;
        }
    st = tkv_seq_shift(kv, seq, first, end, delta);
    if (call.must_fail) return st;
    if (leaves) CHECK(st != TKV_OK);
    if (st == TKV_ERR_UNSUPPORTED) CHECK(!cfg.model.rope.dim || cfg.tiers.n_anchors);
    if (st || delta == 0) return st;
    for (l = 0; l < 2; l++) {
        model_layer *s = &model[seq][l];
        for (i = 0; i < s->len; i++)
            if (is_in_range(s->position[i], first, end)) s->position[i] += delta, s->turned[i] += delta;
    }
    reserved[seq] = 0;
    has_moved[seq] = 1;
    return st;
}

static int is_there(const model_layer *s, int i) {
    return i < s->len && (s->state[i] == LIVE || s->state[i] == DISCARDED);
}

/* The first index from `from` on where a layer of a sequence has a token, or the longest length. *layer: the first such
 * layer, or the longest. */
static int find_there(int seq, int from, int *layer) {
    const model_layer *s = model[seq];
    for (; from < max_len(seq) && !is_there(&s[0], from) && !is_there(&s[1], from);) from++;
    *layer = from < max_len(seq) ? !is_there(&s[0], from) : s[0].len < s[1].len;
    return from;
}

/* Finds the indices of a sequence that a copy of positions first .. end - 1 takes, the same in both layers: the tokens
 * that are in the range in any layer, and those that no layer has, but whose position would be in it. The last token
 * before them tells it; if there is none, or if the layers were told it at two positions, the first one behind. Tokens
 * that are gone at the end go up to the position of the last one. */
static int find_copied(int seq, int first, int end, int *taken) {
    const model_layer *s = model[seq];
    int i, l, n = 0, shift = 0, is_known = 0;
    for (i = 0; i < max_len(seq); i++) {
        const int at = find_there(seq, i, &l), is_end = at == max_len(seq);
        int position, other;
        if (at == i || is_end || !is_known) shift = s[l].position[at - is_end] - (at - is_end);
        position = other = i + shift;
        if (at == i && is_there(&s[!l], i)) other = s[!l].position[i];
        if (at == i) is_known = other == position;
        if (is_in_range(position, first, end) || is_in_range(other, first, end)) taken[n++] = i;
    }
    return n;
}

static tkv_status call_copy(void) {
    static int taken[LONGEST];
    const int src = choose_seq(), other = choose_seq();
    const int dst = is_seq(src) && src == other && next_byte() < 250 ? (src + 1) % SEQS : other;
    int first, end, at, l, i, n = 0, len = 0;
    tkv_status st;
    choose_range(src, &first, &end);
    at = next_byte() % 2 ? first : choose_int(0, LONGEST);
    if (src == dst || at < 0) call.must_fail = 1;
    sprintf(call.text, "copy positions %d to %d of sequence %d to sequence %d, at %d", first, end, src, dst,
            at);
    if (!call.must_fail && !in_step[src]) n = find_copied(src, first, end, taken);
    if (!call.must_fail && n > LONGEST - max_len(dst)) return skip_call();
    allow_reclaim(src);
    if (is_seq(src)) call.may_discard[src] = call.may_evict[src] = 0;
    if (is_seq(dst)) len = model[dst][0].len;
    st = tkv_seq_copy(kv, src, first, end, dst, at);
    if (call.must_fail) return st;
    if (!call.is_hostile) CHECK_EQ(st == TKV_ERR_STATE, in_step[src] || in_step[dst]);
    if (st == TKV_ERR_UNSUPPORTED) CHECK(!cfg.model.rope.dim || cfg.tiers.n_anchors);
    if (st == TKV_ERR_RANGE) CHECK(window_of(0) || window_of(1) || at != first);
    if (st || tkv_get_length(kv, dst, 0) == len) return st;
    for (l = 0; l < 2; l++) {
        const model_layer *from = &model[src][l];
        model_layer *to = &model[dst][l];
        for (i = 0; i < n; i++) {
            const int t = taken[i], j = to->len + i;
            const int copied = is_there(from, t) && is_in_range(from->position[t], first, end);
            CHECK(!copied || from->state[t] == LIVE);
            to->id[j] = from->id[t];
            to->position[j] = from->position[t] + at - first;
            to->turned[j] = from->turned[t] + at - first;
            to->state[j] = copied ? LIVE : GONE;
            to->is_sink[j] = copied && from->is_sink[t];
            to->is_pinned[j] = 0;
        }
        to->len = to->exact_from = to->len + n;
    }
    reserved[src] = reserved[dst] = 0;
    may_share[src] = may_share[dst] = has_moved[dst] = 1;
    return st;
}

static tkv_prefix_params prefix_params(int seq, int n) {
    tkv_prefix_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.tokens = prefix_text;
    p.n_tokens = n;
    allow_reclaim(-1);
    call.keeps_part = 1;
    return p;
}

/* The first n tokens of a sequence of the model. The number of a token is of its ids, so check_values finds every token
 * that is not of the text. */
static void make_prefix_text(int seq, int n) {
    int i;
    for (i = 0; i < n; i++)
        prefix_text[i] =
            i < min_len(seq) ? (int)((model[seq][0].id[i] * 2654435761u ^ model[seq][1].id[i]) >> 1) : -1;
}

/* Takes into a sequence what is named of the first n tokens of src. */
static tkv_status adopt_prefix(int src, int seq, int n) {
    const tkv_prefix_params p = prefix_params(seq, n);
    tkv_prefix_info info;
    tkv_status st;
    int l, i;
    memset(&info, 0, sizeof info);
    make_prefix_text(src, n);
    call.must_fail = n < 0 || !is_seq(seq) || in_step[seq] || max_len(seq);
    for (l = 0; l < 2 && !call.must_fail; l++) { /* what is evicted meanwhile is of these tokens */
        model_layer *to = &model[seq][l];
        for (i = 0; i < n; i++) {
            to->id[i] = model[src][l].id[i];
            to->position[i] = i;
            to->turned[i] = to->state[i] = to->is_sink[i] = to->is_pinned[i] = 0;
        }
        to->len = to->exact_from = n;
    }
    st = tkv_seq_adopt_prefix(kv, &p, NULL, &info);
    if (call.must_fail) return st;
    CHECK(info.n_tokens <= n);
    n_adopted += info.n_tokens > 0;
    truncate_model(seq, 0, info.n_tokens);
    truncate_model(seq, 1, info.n_tokens);
    for (i = 0; i < SEQS && info.n_tokens; i++) may_share[i] = 1, reserved[i] = 0;
    has_moved[seq] = info.n_tokens > 0;
    return st;
}

/* Names the pages of a sequence. */
static tkv_status name_prefix(int seq, int n) {
    const tkv_prefix_params p = prefix_params(seq, is_seq(seq) ? min_of(n, min_len(seq)) : n);
    tkv_prefix_info info;
    tkv_status st;
    memset(&info, 0, sizeof info);
    if (is_seq(seq)) make_prefix_text(seq, p.n_tokens);
    call.must_fail = n < 0 || !is_seq(seq);
    st = tkv_seq_publish_prefix(kv, &p, NULL, &info);
    if (info.n_put) n_named++, named_seq = seq;
    return st;
}

/* Names pages, adopts them, or does both. */
static tkv_status call_prefix(void) {
    const int how = next_byte(), adopts = how % 2, with_text = how & 2, with_all = how & 4;
    const int src = adopts && how & 8 ? named_seq : choose_seq(), other = choose_seq();
    const int dst = is_seq(src) && src == other ? (src + 1) % SEQS : other;
    int n = choose_int(0, LONGEST), i;
    tkv_status st;
    sprintf(call.text, "%s %d tokens of sequence %d, %d", adopts ? "adopt" : "name", n, src, dst);
    if (n > LONGEST || (adopts && !is_seq(src))) return skip_call(); /* there is no text */
    if (!is_seq(src)) return name_prefix(src, 0);
    if (!adopts && how & 64) (void)tkv_freeze_calibration(kv); /* pages need it */
    if (!adopts && with_text) {                                /* long enough for a page */
        CHECK_EQ(tkv_seq_reset(kv, src), TKV_OK);
        reset_model(src);
        for (i = 0; i < 6; i++) {
            allow_reclaim(src);
            if (append_to_all(src, min_of(CHUNK, LONGEST - max_len(src)))) note_recoding();
        }
    }
    if (n >= 0 && with_all) n = min_len(src);
    if (!adopts) {
        const long before = n_named;
        st = name_prefix(src, n);
        if (n_named == before || how & 16 || !is_seq(dst)) return st;
    }
    if (n >= 0 && is_seq(dst) && how & 32) {
        CHECK_EQ(tkv_seq_reset(kv, dst), TKV_OK);
        reset_model(dst);
    }
    return adopt_prefix(src, dst, n);
}

/* Copies token `from` of a layer of the model to index `to`. */
static void move_in_model(model_layer *s, int from, int to) {
    s->id[to] = s->id[from];
    s->position[to] = s->position[from];
    s->turned[to] = s->turned[from];
    s->state[to] = s->state[from];
    s->is_pinned[to] = s->is_pinned[from];
    s->is_sink[to] = s->is_sink[from];
}

static tkv_status call_keep(void) {
    const int seq = choose_seq(), back = choose_int(0, 70), density = next_byte() % 5, seed = next_byte();
    const int len = is_seq(seq) ? min_len(seq) : 0;
    int first = call.is_hostile ? back : max_of(0, len - back), indices[CHUNK], l, i, n = 0, is_exact = 1,
        is_live = 1, any_gone = 0, any_expired = 0;
    tkv_rng rng = tkv_rng_seed((uint64_t)seed);
    tkv_status st;
    if (first < -1 || first > LONGEST) first = -1;
    for (i = max_of(0, first); i < len && n < CHUNK; i++)
        if (tkv_rng_below(&rng, 5) < density) indices[n++] = i;
    if (n && next_byte() > 245) indices[next_below(n)] = choose_int(0, LONGEST), call.is_hostile = 1;
    sprintf(call.text, "keep %d of the tokens from %d on of sequence %d", n, first, seq);
    if (first < 0) call.must_fail = 1;
    for (l = 0; l < 2 && is_seq(seq); l++) {
        is_exact &= model[seq][l].exact_from <= first;
        for (i = max_of(0, first); i < model[seq][l].len; i++) {
            is_live &= model[seq][l].state[i] == LIVE;
            any_expired |= model[seq][l].state[i] == EXPIRED;
        }
        for (i = 0; i < model[seq][l].len; i++) any_gone |= model[seq][l].state[i] == GONE; /* blocks merge */
        any_gone |= cut_gone[seq];
    }
    allow_reclaim(seq);
    if (is_seq(seq)) call.may_evict[seq] = 0;
    st = tkv_seq_keep(kv, seq, first, indices, n);
    if (call.must_fail) return st;
    if (st == TKV_ERR_STATE && budget_before) call.keeps_part = 1; /* evictions from other sequences */
    if (in_step[seq]) CHECK_EQ(st != TKV_OK, 1);
    if (st == TKV_ERR_STATE && !call.is_hostile)
        CHECK_MSG(in_step[seq] || !is_exact || any_gone || any_expired || may_share[seq] || budget_before,
                  "exact tokens from %d on", first);
    if (st == TKV_ERR_UNSUPPORTED) CHECK(cfg.tiers.n_anchors);
    if (st == TKV_ERR_RANGE && !call.is_hostile) CHECK(window_of(0) || window_of(1) || (n > 0 && !is_live));
    if (st) return st;
    for (l = 0; l < 2; l++) {
        model_layer *s = &model[seq][l];
        for (i = 0; i < n; i++) {
            CHECK(indices[i] < s->len && s->state[indices[i]] == LIVE);
            if (indices[i] >= s->len || tkv_test_.n_bad) return st;
            move_in_model(s, indices[i], first + i);
        }
        truncate_model(seq, l, first + n);
    }
    reserved[seq] = 0;
    has_moved[seq] = 1;
    return st;
}

static tkv_status call_slide(void) {
    const int seq = choose_seq(), n = choose_int(0, CHUNK);
    const int from = n_first_sinks();
    int gone = -1, l, i;
    tkv_status st;
    sprintf(call.text, "slide sequence %d for %d", seq, n);
    if (n < 0 || n > CHUNK) call.must_fail = 1;
    st = tkv_seq_slide(kv, seq, n, &gone);
    CHECK_EQ(gone % 64, 0);
    if (st) CHECK_EQ(gone, 0);
    if (call.must_fail) return st;
    CHECK_EQ(st == TKV_ERR_STATE, in_step[seq]);
    if (st == TKV_ERR_UNSUPPORTED) CHECK(!cfg.model.rope.dim || cfg.tiers.n_anchors);
    if (st || gone == 0) return st;
    CHECK(from + gone < max_len(seq));
    for (l = 0; l < 2; l++) {
        model_layer *s = &model[seq][l];
        for (i = from + gone; i < s->len; i++) {
            s->position[i] -= gone;
            s->turned[i] -= gone;
            if (s->state[i] == LIVE) CHECK(s->position[i] >= 0);
            move_in_model(s, i, i - gone);
        }
        s->exact_from = s->exact_from >= from + gone ? s->exact_from - gone : min_of(s->exact_from, from);
        s->len = s->len >= from + gone ? s->len - gone : min_of(s->len, from);
    }
    reserved[seq] = 0;
    has_moved[seq] = 1;
    return st;
}

/* What a state must be after the first n tokens: a hash of what layer 0 holds. */
static uint32_t hash_seen(int seq, int n) {
    uint32_t h = 5;
    int i;
    for (i = 0; i < n; i++) h = (h ^ model[seq][0].id[i]) * 0x9e3779b1u, h ^= h >> 15;
    return h;
}

static tkv_status call_put_state(void) {
    const int seq = choose_seq(), layer = choose_int(0, cfg.model.n_layers - 1), back = choose_int(0, 60);
    const int n = max_of(1, (is_seq(seq) ? model[seq][0].len : 0) - (call.is_hostile ? 0 : back)),
              size = 40 << next_byte() % 6;
    static uint32_t words[640];
    int i;
    if (call.is_hostile || n > (is_seq(seq) ? model[seq][0].len : 0)) return skip_call();
    for (i = 0; i < 320; i++) words[i] = hash_seen(seq, n);
    sprintf(call.text, "put a state of sequence %d, layer %d, after %d tokens", seq, layer, n);
    return tkv_seq_put_state(kv, seq, layer, n, words, (size_t)size);
}

static tkv_status call_reset(void) {
    const int seq = choose_seq();
    const tkv_status st = tkv_seq_reset(kv, seq);
    sprintf(call.text, "reset sequence %d", seq);
    if (!st && is_seq(seq)) reset_model(seq);
    return st;
}

static tkv_status call_flush(void) {
    const int seq = choose_seq(), mode = choose_int(0, 2);
    tkv_status st;
    int l;
    sprintf(call.text, "flush sequence %d, mode %d", seq, mode);
    if (mode < 0 || mode > 2) call.must_fail = 1;
    st = tkv_seq_flush(kv, seq, (tkv_flush_mode)mode);
    for (l = 0; l < 2 && !st && is_seq(seq); l++) model[seq][l].exact_from = model[seq][l].len;
    if (!st && is_seq(seq)) reserved[seq] = 0;
    return st;
}

static tkv_status call_set_budget(void) {
    const int how = next_byte();
    const size_t bytes = how > 240 ? 0 : 20000 + (size_t)how * 1500;
    tkv_status st;
    sprintf(call.text, "budget %lu", (unsigned long)bytes);
    allow_reclaim(-1);
    if (!budget_before) {
        int s;
        for (s = 0; s < SEQS; s++)
            call.may_evict[s] = !in_step[s] && cfg.evict.policy,
            call.may_discard[s] = !in_step[s] && cfg.budget.discard;
    }
    st = tkv_set_budget(kv, bytes);
    if (!st) memset(reserved, 0, sizeof reserved);
    return st;
}

/* Follows the advice of scores that are good, poor or mixed. */
static tkv_status adapt_plan(void) {
    tkv_feedback f;
    tkv_advice advice;
    tkv_status st;
    const int how = next_byte(), n = 1 + next_byte() % 100;
    int i;
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
    for (i = 0; i < n; i++)
        CHECK_EQ(tkv_observe_score(&f, how % 3 == 2 ? (float)(i % 2) : how % 3 ? 1.0f : 0.1f), TKV_OK);
    CHECK_EQ(tkv_observe_score(&f, tkv_test_float(0x7fc00000u)), TKV_ERR_ARG);
    st = tkv_adapt_plan(kv, &f, &advice);
    sprintf(call.text, "advice: %.100s", st ? "" : advice.reason);
    if (!st) memset(reserved, 0, sizeof reserved);
    return st;
}

static tkv_status call_set_plan(void) {
    const int which = next_byte() % 3, n = which ? choose_int(0, 6) : choose_int(1, 200);
    tkv_status st;
    if (which == 2) return adapt_plan();
    st = which ? tkv_set_level(kv, n) : tkv_set_hot_tokens(kv, n);
    sprintf(call.text, "%s %d", which ? "level" : "hot tokens", n);
    if (!which && n < 1) call.must_fail = 1;
    if (!st) memset(reserved, 0, sizeof reserved);
    return st;
}

static int calls_left; /* of is_time_up */
static int is_time_up(void *user) { return user == &calls_left && calls_left-- <= 0; }

static tkv_status call_maintain(void) {
    const int n = choose_int(0, 30), with_clock = next_byte() % 2;
    int done = -1;
    tkv_status st;
    sprintf(call.text, "maintain %d%s", n, with_clock ? ", with a clock" : "");
    calls_left = next_byte() % 4;
    CHECK_EQ(tkv_report_pressure(kv, (float)(next_byte() % 5) * 0.25f), TKV_OK);
    if (n < 0) call.must_fail = 1;
    st = tkv_maintain(kv, n, with_clock ? is_time_up : NULL, &calls_left, &done);
    if (n >= 0) CHECK(done >= 0 && done <= n);
    return st;
}

static tkv_status call_calibration(void) {
    const int what = next_byte() % 6;
    size_t bytes = 0, i;
    sprintf(call.text, "calibration %d", what);
    if (what == 0) return tkv_freeze_calibration(kv);
    if (what == 1) return tkv_refresh_calibration(kv);
    if (what == 2 || image_size == 0) {
        CHECK_EQ(tkv_save_calibration(kv, NULL, 0, &bytes), TKV_OK);
        if (bytes <= sizeof image && tkv_save_calibration(kv, image, sizeof image, &image_size) == TKV_OK)
            CHECK_EQ(image_size, bytes);
        return TKV_OK;
    }
    if (what == 3) return tkv_load_calibration(kv, image, image_size);
    call.is_hostile = 1;
    if (what == 4) { /* one wrong byte, or a short image */
        const size_t at = (size_t)next_below(65536) % image_size;
        const uint8_t keep = image[at];
        tkv_status st;
        image[at] = (uint8_t)(image[at] ^ (1 + next_byte() % 255));
        st = tkv_load_calibration(kv, image, next_byte() % 2 ? image_size : at);
        image[at] = keep;
        CHECK(st != TKV_OK);
        return st;
    }
    {
        uint8_t junk[64];
        for (i = 0; i < sizeof junk; i++) junk[i] = (uint8_t)next_byte();
        return tkv_load_calibration(kv, junk, sizeof junk);
    }
}

/* >>attention */
static float q_in[ROWS * MAX_HEADS * MAX_DIM], mask[ROWS * LONGEST], out_a[ROWS * MAX_HEADS * MAX_DIM],
    out_b[ROWS * MAX_HEADS * MAX_DIM], lse_a[ROWS * MAX_HEADS], lse_b[ROWS * MAX_HEADS],
    scores[SEQS * LONGEST], scores_b[SEQS * LONGEST];
static uint64_t mask_bits[ROWS * WORDS];

static void compare_attention(int n_rows) {
    const int heads = cfg.model.n_heads;
    const double part = cfg.host.precise ? 0.01 : 0.3;
    int r, i;
    for (r = 0; r < n_rows * heads; r++) {
        double err_sq = 0.0, sum_sq = 0.0;
        const float *a = out_a + r * v_dim, *b = out_b + r * v_dim;
        const int sees_keys = tkv_test_is_finite((double)lse_b[r]);
        CHECK_EQ(tkv_test_is_finite((double)lse_a[r]), sees_keys);
        for (i = 0; i < v_dim; i++) {
            CHECK(tkv_test_is_finite((double)a[i]));
            err_sq += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
            sum_sq += (double)b[i] * (double)b[i];
        }
        CHECK_MSG(sqrt(err_sq) <= part * (sqrt(sum_sq) + sqrt((double)v_dim)),
                  "row %d: output is off by %.3g of %.3g", r, sqrt(err_sq), sqrt(sum_sq));
    }
}

/* The same call in parts, in any order: the same bits. Before them comes one that is refused. */
static void attend_in_parts(tkv_attend_params p, int n_rows, int n_keys) {
    const int how = next_byte(), n_parts = 1 + how % 11, offset = how / 4;
    const size_t n = (size_t)(n_rows * cfg.model.n_heads * v_dim) * sizeof *out_b,
                 n_lse = (size_t)(n_rows * cfg.model.n_heads) * sizeof *lse_b;
    const int failed = store.n_failed;
    size_t bytes = 0;
    uint8_t *space;
    tkv_status st = TKV_OK;
    int i;
    CHECK_EQ(tkv_get_attend_bytes(kv, &p, &bytes), TKV_OK);
    CHECK(bytes >= 128);
    space = exact_memory(bytes + (size_t)offset);
    memset(space + offset, 0, 128);
    p.out = out_b, p.lse = lse_b;
    if (p.scores) p.scores = scores_b;
    CHECK_EQ(tkv_attend_part(kv, &p, n_parts, n_parts, space + offset, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_part(kv, &p, 0, n_parts, space + offset, bytes - 1), TKV_ERR_CAPACITY);
    memset(space + offset, 0, 128);
    for (i = 0; i < n_parts; i++) {
        CHECK_EQ(st, TKV_OK);
        st = tkv_attend_part(kv, &p, how & 64 ? n_parts - 1 - i : i, n_parts, space + offset, bytes);
    }
    free(space);
    if (store.n_failed != failed) return;
    CHECK_EQ(st, TKV_OK);
    CHECK_MEM(out_b, out_a, n);
    CHECK_MEM(lse_b, lse_a, n_lse);
    if (p.scores) CHECK_MEM(scores_b, scores, (size_t)n_keys * sizeof *scores);
}

static tkv_status call_attend(void) {
    const int layer = choose_layer(), how = next_byte(), what = next_byte(), with_batch = how & 1;
    const int l = stored_layer(layer), heads = cfg.model.n_heads, dim = cfg.model.head_dim;
    tkv_attend_params p;
    tkv_rows rows[SEQS];
    float alibi[MAX_HEADS], sinks[MAX_HEADS];
    int i, r, first_row[2], first[2] = {0, 0}, row_end[ROWS] = {0}, position[ROWS];
    int n = 0, n_used, longest = 0, failed = store.n_failed, n_rows = with_batch ? 2 : 1;
    tkv_rng rng;
    tkv_status st, want;
    char reason[200];
    memset(&p, 0, sizeof p);
    for (i = 0; i < n_rows; i++) {
        rows[i].seq = choose_seq();
        rows[i].n = choose_int(1, 3);
        rows[i].n = min_of(rows[i].n, 3);
        if (!is_seq(rows[i].seq) || rows[i].n < 0 || l < 0) {
            call.must_fail = 1;
            continue;
        }
        rows[i].n = min_of(rows[i].n, model[rows[i].seq][l].len);
        longest = max_of(longest, model[rows[i].seq][l].len);
        n += rows[i].n;
    }
    rng = tkv_rng_seed((uint64_t)next_byte());
    tkv_rng_fill(&rng, q_in, COUNT(q_in), 1.0);
    if (how > 250) q_in[next_below(ROWS * heads * dim)] = tkv_test_float(how & 2 ? 0x7fc00000u : 0x7f800000u);
    if (how == 250) q_in[next_below(ROWS * heads * dim)] = 1e30f;
    p.layer = layer;
    p.seq = rows[0].seq;
    p.n = rows[0].n;
    if (with_batch) p.batch = rows, p.n_batch = n_rows;
    p.q = q_in;
    p.out = out_a;
    p.lse = lse_a;
    if (how & 2) p.window = choose_int(-1, 100);
    if (how & 4) p.non_causal = 1;
    if (how & 8) p.softcap = 1.0f + (float)next_byte();
    if (how & 16) p.alibi_slopes = alibi;
    if (how & 32) p.sink_logits = sinks;
    for (i = 0; i < MAX_HEADS; i++) alibi[i] = (float)(next_byte() - 128) / 512.0f, sinks[i] = (float)(i - 1);
    first_row[0] = what & 8 ? next_byte() % 2 : 0;
    first_row[1] = what & 8 ? 4 + next_byte() % 4 : call.must_fail ? 0 : rows[0].n;
    n_used = what & 8 ? 8 : n;
    if (what & 8) p.first_rows = first_row;
    if (what & 16) p.row_ends = row_end;
    if (what & 32) p.first_queries = first;
    for (i = 0; i < n_rows; i++) {
        const int most = call.must_fail ? 0 : model[rows[i].seq][l].len - rows[i].n;
        first[i] = p.first_queries ? choose_int(0, most) : most;
        if (first[i] < 0 || first[i] > most) call.must_fail = 1;
    }
    if (what & 64) p.query_positions = position;
    for (i = 0; i < ROWS; i++) position[i] = what & 64 ? choose_int(0, LONGEST + 100) : 0;
    for (i = 0; i < ROWS && p.query_positions; i++)
        if (position[i] < 0 || position[i] > 1 << 20)
            return skip_call(); /* of no query, or a float has no such logit */
    if (p.query_positions && (p.first_queries || p.row_ends)) call.must_fail = 1;
    for (i = 0; i < n_rows && p.row_ends && !call.must_fail; i++)
        for (r = 0; r < rows[i].n; r++) {
            const int len = model[rows[i].seq][l].len, own = first[i] + r;
            row_end[first_row[i] + r] = choose_int(own + 1, len);
            if (!p.non_causal && (row_end[first_row[i] + r] <= own || row_end[first_row[i] + r] > len))
                call.must_fail = 1;
        }
    if (what & 1 && longest) {
        p.mask = mask;
        for (i = 0; i < ROWS * longest; i++)
            mask[i] = tkv_rng_below(&rng, 4) ? 0.0f : tkv_rng_below(&rng, 2) ? -1e30f : 1.5f;
    } else if (what & 2) {
        p.mask_bits = mask_bits;
        p.n_mask_bits = choose_int(0, min_of(longest, 64 * WORDS));
        if (p.n_mask_bits > 64 * WORDS) return skip_call(); /* the array is shorter */
        if (p.n_mask_bits < 0 && n) call.must_fail = 1;
        for (i = 0; i < ROWS * WORDS; i++) mask_bits[i] = tkv_rng_u64(&rng) | tkv_rng_u64(&rng);
    }
    if (what & 4 && longest) p.scores = scores;
    sprintf(call.text,
            "attend, %d queries from %d on of sequence %d, layer %d, options %d, %d, window %d, %d bits", n,
            first[0], rows[0].seq, layer, how, what, p.window, p.n_mask_bits);
    memset(out_a, 0, sizeof out_a);
    memset(out_b, 0, sizeof out_b);
    memset(lse_a, 0, sizeof lse_a);
    memset(lse_b, 0, sizeof lse_b);
    want = tkv_validate_attend(kv, &p, reason, sizeof reason);
    CHECK_EQ(want == TKV_OK, reason[0] == 0);
    st = tkv_attend_ex(kv, &p);
    if (want) CHECK_EQ(st, want);
    else CHECK(st == TKV_OK || st == TKV_ERR_IO || st == TKV_ERR_DATA || st == TKV_ERR_NO_SOURCE);
    if (call.must_fail) return st;
    if (store.n_failed != failed) return st;
    if (!st && next_byte() % 4 == 0) {
        attend_in_parts(p, n_used, model[rows[0].seq][l].len);
        memset(out_b, 0, sizeof out_b);
        memset(lse_b, 0, sizeof lse_b);
    }
    store.fail_read = store.corrupt_read = fail_at_row = 0;
    p.out = out_b;
    p.lse = lse_b;
    p.scores = NULL; /* of the reference */
    want = tkv_attend_reference(kv, &p);
    CHECK_EQ(st, want);
    if (!st && !want) compare_attention(n_used);
    for (i = 0; i < longest && !st && what & 4; i++) CHECK(scores[i] >= 0.0f);
    return st;
}

static tkv_status call_read(void) {
    const int seq = choose_seq(), layer = choose_layer(), start = choose_token(seq), n = choose_int(0, 80);
    const int sides = next_byte();
    tkv_status st;
    sprintf(call.text, "read %d from %d on of sequence %d, layer %d", n, start, seq, layer);
    st = tkv_read(kv, seq, layer, start, n, sides & 1 ? k_out : NULL, sides & 2 ? v_out : NULL);
    if (call.must_fail) return st;
    if (start < 0 || n < 0 || (int64_t)start + n > model[seq][stored_layer(layer)].len) CHECK(st != TKV_OK);
    if (!st && n > 1 && sides & 1) { /* by indices, backwards from one of them, and the newest twice */
        static float k_listed[LONGEST * MAX_ROW];
        int indices[CHUNK], i, some = min_of(n, CHUNK), failed = store.n_failed;
        tkv_status listed;
        for (i = 0; i < some; i++) indices[i] = start + (i < some / 2 ? i : n - 1 - i / 2);
        listed = tkv_read_tokens(kv, seq, layer, indices, some, k_listed, NULL);
        if (store.n_failed != failed) return st;
        CHECK_EQ(listed, TKV_OK);
        for (i = 0; i < some; i++)
            CHECK_MEM(k_listed + i * k_row, k_out + (indices[i] - start) * k_row,
                      (size_t)k_row * sizeof *k_out);
        indices[some - 1] = sides & 4 ? -1 : LONGEST + 1;
        CHECK(tkv_read_tokens(kv, seq, layer, indices, some, k_listed, NULL) != TKV_OK);
    }
    return st;
}

/* >>eviction, pins and importance */
static float score_token(void *user, const tkv_evict_view *of, int i) {
    (void)user;
    return (float)((of->positions ? of->positions[i] : i) * 37 % 101);
}

static tkv_status call_evict(void) {
    static float by[LONGEST];
    static uint64_t victims[WORDS];
    const int seq = choose_seq(), named = next_byte() % 2;
    const int layer = choose_layers();
    tkv_evict_params p;
    tkv_evict_config other;
    int i;
    memset(&p, 0, sizeof p);
    memset(&other, 0, sizeof other);
    p.seq = seq;
    p.layer = layer;
    if (named) {
        const int density = next_byte() % 9;
        tkv_rng rng = tkv_rng_seed((uint64_t)next_byte());
        memset(victims, 0, sizeof victims);
        for (i = 0; i < LONGEST; i++)
            if (tkv_rng_below(&rng, 8) < density) add_to_mask(victims, i);
        p.victims = victims;
        p.n_victims = choose_int(0, is_seq(seq) ? max_len(seq) : 0);
        if (p.n_victims > LONGEST) p.n_victims = -1; /* the array is not longer */
    } else {
        p.keep = choose_int(0, LONGEST);
        other.policy = (tkv_evict_policy)choose_int(0, TKV_EVICT_COUNT - 1);
        other.scorer = score_token;
        other.sink_tokens = choose_int(-1, 20);
        other.recent_tokens = choose_int(-1, 40);
        if (next_byte() % 2) p.evict = &other;
        for (i = 0; i < LONGEST; i++) by[i] = (float)(i * 7 % 13);
        if (next_byte() % 2) p.scores = by;
    }
    sprintf(call.text, "evict%s from sequence %d, layer %d, keep %d", named ? " named tokens" : "", seq,
            layer, p.keep);
    if (is_seq(seq)) call.may_evict[seq] = 1;
    return tkv_evict(kv, &p);
}

static tkv_status call_pin(void) {
    static const int untils[] = {TKV_UNLIMITED, TKV_OFF, 100, 0, INT_MAX};
    const int seq = choose_seq(), start = choose_token(seq), n = choose_int(0, 60),
              until = untils[next_byte() % 5];
    const tkv_status st = tkv_seq_pin(kv, seq, start, n, until);
    int l, i;
    sprintf(call.text, "pin %d from %d on in sequence %d until %d", n, start, seq, until);
    if (start < 0 || n < 0) call.must_fail = 1;
    for (l = 0; l < 2 && !st && is_seq(seq); l++)
        for (i = start; i < model[seq][l].len && i - start < n; i++)
            if (until == TKV_UNLIMITED &&
                (model[seq][l].state[i] == LIVE || model[seq][l].state[i] == DISCARDED))
                model[seq][l].is_pinned[i] = 1;
            else if (until != TKV_UNLIMITED) model[seq][l].is_pinned[i] = 0; /* temporary ones end sometime */
    return st;
}

static tkv_status call_set_sinks(void) {
    const int seq = choose_seq(), back = choose_int(0, LONGEST), n = choose_int(0, 3), on = choose_int(0, 1);
    const int start = call.is_hostile ? back : max_of(0, (is_seq(seq) ? min_len(seq) : 0) - 1 - back % 100);
    tkv_status st;
    int l, i;
    sprintf(call.text, "%d sinks from %d on in sequence %d: %d", n, start, seq, on);
    if (start < 0 || n < 0 || (int64_t)start + n >= 1 << 30 || on < 0 || on > 1) call.must_fail = 1;
    st = tkv_seq_set_sinks(kv, seq, start, n, on);
    if (call.must_fail) return st;
    CHECK_EQ(st == TKV_ERR_STATE, in_step[seq]);
    if (st == TKV_ERR_UNSUPPORTED) CHECK(cfg.tiers.n_anchors || (in_place && !budget_before));
    if (on && n && start + n > min_len(seq)) CHECK(st != TKV_OK);
    for (l = 0; l < 2 && !st; l++) {
        tkv_layer_info info;
        const int n_expired = tkv_get_layer(kv, seq, l, &info) || has_window_sinks(l) ? 0 : info.expired;
        for (i = start; i < model[seq][l].len && i - start < n; i++) {
            const int state = model[seq][l].state[i];
            if (on) CHECK(state == LIVE || i < n_expired);
            model[seq][l].is_sink[i] = on && state == LIVE;
        }
    }
    if (!st) reserved[seq] = 0;
    return st;
}

static tkv_status call_importance(void) {
    static float by[LONGEST], found[LONGEST];
    static uint64_t missing[WORDS + 1];
    static tkv_ranked best[16];
    const int seq = choose_seq(), layer = choose_layer(), start = choose_token(seq), n = choose_int(0, 100);
    const int bad = next_byte(), k = choose_int(0, 16);
    int i, count = -1, some = n < 0 || n > 100 ? 0 : n;
    tkv_status st;
    for (i = 0; i < some; i++) by[i] = (float)(i % 5) * 0.2f;
    if (some && bad > 240) by[some / 2] = bad & 1 ? -1.0f : tkv_test_float(0x7fc00000u);
    sprintf(call.text, "importance of %d from %d on in sequence %d, layer %d", n, start, seq, layer);
    if (n > 100 && is_seq(seq) && n <= LONGEST) return skip_call(); /* the arrays are shorter */
    st = tkv_add_scores(kv, seq, layer, start, n, by);
    if (some && bad > 240) CHECK(st != TKV_OK);
    if (tkv_get_importance(kv, seq, layer, start, n, found, missing) == TKV_OK)
        for (i = 0; i < some; i++) CHECK(tkv_test_is_finite((double)found[i]));
    if (k <= 16 && tkv_find_top_tokens(kv, seq, layer, k, bad & 1, best, &count) == TKV_OK)
        for (i = 0; i < count; i++) {
            const int state = model[seq][stored_layer(layer)].state[best[i].position];
            CHECK(state == LIVE || state == DISCARDED);
        }
    return st;
}

/* >>offloading, promotion, discarding */
static tkv_status call_offload(void) {
    const int seq = choose_seq(), n = choose_int(0, 8), layer = choose_layers();
    int done = -1;
    sprintf(call.text, "offload %d blocks of sequence %d, layer %d", n, seq, layer);
    if (n < 0) call.must_fail = 1;
    return tkv_offload(kv, seq, layer, n, &done);
}

static tkv_status call_promote(void) {
    const int seq = choose_seq(), layer = choose_layer(), at = choose_int(0, is_seq(seq) ? max_len(seq) : 0);
    tkv_promotion by;
    sprintf(call.text, "promote %d of sequence %d, layer %d", at, seq, layer);
    if (is_seq(seq)) call.may_restore[seq] = 1;
    if (next_byte() % 3) return tkv_promote(kv, seq, layer, at);
    memset(&by, 0, sizeof by);
    by.by.cfg.per_step = choose_int(0, 64);
    by.by.cfg.cooldown = choose_int(-1, 10);
    call.keeps_part = 1;
    sprintf(call.text, "promote important blocks of sequence %d, layer %d", seq, layer);
    return tkv_promote_important(kv, seq, layer, &by);
}

static tkv_status call_discard(void) {
    const int seq = choose_seq(), n = choose_int(0, LONGEST);
    int n_discarded = -1;
    tkv_status st;
    sprintf(call.text, "discard %d of sequence %d", n, seq);
    if (n < 0) call.must_fail = 1;
    if (is_seq(seq)) call.may_discard[seq] = 1;
    st = tkv_seq_discard(kv, seq, n, &n_discarded);
    if (!st) CHECK(n_discarded >= 0 && n_discarded <= n);
    return st;
}

/* Gives tokens of the model to a layer. */
static tkv_status restore_tokens(int seq, int layer, int start, int n) {
    static float k[LONGEST * MAX_ROW], v[LONGEST * MAX_ROW];
    int t;
    for (t = 0; t < n; t++) {
        make_row(model[seq][layer].id[start + t], layer, 0, k + t * k_row);
        make_row(model[seq][layer].id[start + t], layer, 1, v + t * v_row);
    }
    return tkv_restore(kv, seq, layer, start, k, v, n);
}

static tkv_status compute(void *user, tkv_cache *cache, int seq, int first_layer, int n_layers, int start,
                          int n) {
    tkv_status st = TKV_OK;
    int l;
    (void)user;
    CHECK(cache == kv && n > 0 && start >= 0 && start + n <= max_len(seq));
    for (l = first_layer; l < first_layer + n_layers && !st; l++)
        if (is_layer(l) && model[seq][l].len > start)
            st = restore_tokens(seq, l, start, min_of(n, model[seq][l].len - start));
    return st;
}

static tkv_status call_restore(void) {
    const int seq = choose_seq(), what = next_byte() % 3, layer = choose_int(0, 1);
    int start = 0, n = 0, missing = -1;
    tkv_status st = tkv_seq_find_discarded(kv, seq, &start, &n);
    sprintf(call.text, "restore sequence %d, layer %d", seq, layer);
    if (st || !is_seq(seq)) return st;
    allow_reclaim(seq);
    call.may_restore[seq] = 1;
    if (what == 0) {
        call.keeps_part = 1;
        return tkv_seq_recompute(kv, seq, &remat, ++remat_step, compute, NULL, &missing);
    }
    if (what == 2) {
        start = choose_int(0, max_len(seq));
        n = choose_int(0, 128);
    }
    if (!is_layer(layer) || start < 0 || n < 0 || start > model[seq][layer].len ||
        n > model[seq][layer].len - start)
        return skip_call();
    return restore_tokens(seq, layer, start, n);
}

static tkv_status call_free_bytes(void) {
    static tkv_remat_block blocks[MAX_BLOCKS];
    static tkv_remat_action actions[MAX_BLOCKS];
    const int seq = choose_seq(), capacity = choose_int(0, MAX_BLOCKS);
    size_t freed = 0;
    sprintf(call.text, "free bytes of sequence %d", seq);
    if (capacity > MAX_BLOCKS) return skip_call();
    if (is_seq(seq)) call.may_discard[seq] = 1;
    return tkv_seq_free_bytes(kv, seq, &remat, (float)next_byte() / 255.0f, (size_t)next_byte() * 200, blocks,
                              actions, capacity, &freed);
}

/* >>saving */
enum { MOST_ATTACHED = 8, SCRATCH = 1 << 19 };

/* The newest file: a saved sequence, or a journal that ends with it. */
typedef struct saved_model {
    model_layer layer[2];
    size_t end; /* of this save in the file; 0: there is none */
} saved_model;

static struct {
    uint8_t *bytes;
    size_t n;
    int n_tokens;
    saved_model newest, former;
    answers of_newest;
    int has_answers;
} saved;

static void *attached[MOST_ATTACHED]; /* files that the cache reads; a release sets NULL */

static void release_file(void *user, const void *bytes, size_t size) {
    void **place = (void **)user;
    (void)size;
    CHECK(*place && *place <= bytes);
    free(*place);
    *place = NULL;
}

static int n_attached_files(void) {
    int i, n = 0;
    for (i = 0; i < MOST_ATTACHED; i++) n += attached[i] != NULL;
    return n;
}

static void forget_saved(void) {
    free(saved.bytes);
    memset(&saved, 0, sizeof saved);
}

/* Scratch memory, for most caches in place, and for some others. Now and then it is small. */
static void *choose_scratch(size_t *bytes) {
    const int how = next_byte();
    *bytes = how % 8 == 7 ? (size_t)how * 16 : (size_t)SCRATCH;
    if (how % 2 == 0 && !in_place) *bytes = 0;
    return *bytes ? exact_memory(*bytes) : NULL;
}

typedef struct pieces {
    const uint8_t *want; /* the bytes that tkv_seq_save gave */
    size_t at, n;
    int fail_at; /* n: the n-th piece fails; 0: none */
} pieces;

static int take_piece(void *user, const void *bytes, size_t size) {
    pieces *p = (pieces *)user;
    if (p->fail_at && --p->fail_at == 0) {
        store.n_failed++;
        return 1;
    }
    CHECK_LE(size, p->n - p->at);
    if (size <= p->n - p->at) CHECK_MEM(bytes, p->want + p->at, size);
    p->at += size;
    return 0;
}

static int give_piece(void *user, size_t at, void *bytes, size_t size) {
    pieces *p = (pieces *)user;
    if (p->fail_at && --p->fail_at == 0) {
        store.n_failed++;
        return 1;
    }
    CHECK(at <= p->n && size <= p->n - at);
    if (at <= p->n && size <= p->n - at) memcpy(bytes, p->want + at, size);
    return 0;
}

/* Saves to memory of exactly the bytes that the cache asks for. */
static tkv_status save_exactly(const tkv_save_params *p, uint8_t **bytes, size_t *n) {
    const int failed = memory.n_refused + store.n_failed;
    size_t again = 0;
    tkv_status st = tkv_seq_save(kv, p, NULL, 0, n);
    *bytes = NULL;
    if (st) return st;
    *bytes = exact_memory(*n);
    CHECK(*n > 0);
    st = tkv_seq_save(kv, p, *bytes, *n - 1, &again);
    CHECK(st == TKV_ERR_CAPACITY || st == TKV_ERR_BUDGET || memory.n_refused + store.n_failed != failed);
    st = tkv_seq_save(kv, p, *bytes, *n, &again);
    if (!st) CHECK_EQ(again, *n);
    else if (memory.n_refused + store.n_failed == failed) /* to count takes less memory */
        CHECK(st == TKV_ERR_BUDGET || (st == TKV_ERR_CAPACITY && p->scratch_bytes < SCRATCH));
    if (!st) return st;
    free(*bytes);
    *bytes = NULL;
    return st;
}

static tkv_status call_save(void) {
    static int tokens[CHUNK];
    const int seq = choose_seq(), how = next_byte(), n_tokens = next_byte() % CHUNK;
    tkv_save_params p;
    tkv_save_info info;
    uint8_t *added, *whole;
    size_t n;
    int l, i, failed = store.n_failed;
    pieces rest;
    answers of_seq;
    tkv_status st;
    ask(seq, &of_seq);
    failed = store.n_failed - failed;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.model = "fuzz", p.model_bytes = 4;
    p.with_scores = how & 1;
    if (how & 2) p.length = choose_int(0, is_seq(seq) ? max_len(seq) + 2 : 4);
    if (how & 4 && saved.n) p.former = saved.bytes, p.former_bytes = saved.n;
    if (how & 8) p.tokens = tokens, p.n_tokens = n_tokens;
    for (i = 0; i < CHUNK; i++) tokens[i] = i * 7 - 20;
    p.scratch = choose_scratch(&p.scratch_bytes);
    p.info = &info;
    sprintf(call.text, "save %d of sequence %d%s", p.length, seq, p.former ? " to a journal" : "");
    if (p.length < 0) call.must_fail = 1;
    memset(&info, 0, sizeof info);
    st = save_exactly(&p, &added, &n);
    if (!st && how & 16) { /* through a callback, the same bytes */
        const int before = memory.n_refused + store.n_failed;
        tkv_status of_pieces;
        memset(&rest, 0, sizeof rest);
        rest.want = added, rest.n = n, rest.fail_at = how & 32 ? 1 + next_byte() % 16 : 0;
        of_pieces = tkv_seq_save_to(kv, &p, take_piece, &rest);
        if (memory.n_refused + store.n_failed == before) CHECK_EQ(of_pieces, TKV_OK);
        if (!of_pieces) CHECK_EQ(rest.at, n);
    }
    free(p.scratch);
    if (is_seq(seq) && in_step[seq]) CHECK(st != TKV_OK);
    if (st == TKV_ERR_STATE) CHECK(in_step[seq]);
    if (st == TKV_ERR_RANGE) CHECK(p.length && (window_of(0) || window_of(1)));
    if (st || !is_seq(seq)) {
        free(added);
        return st;
    }
    CHECK_EQ(info.bytes, n);
    CHECK_LE(info.at, saved.n);
    if (!p.former) CHECK_EQ(info.at, 0);
    whole = exact_memory(info.at + n);
    if (info.at) memcpy(whole, saved.bytes, info.at);
    memcpy(whole + info.at, added, n);
    free(added);
    free(saved.bytes);
    saved.bytes = whole;
    saved.n = info.at + n;
    if (info.at) CHECK_EQ(info.at, saved.newest.end);
    saved.former = saved.newest;
    if (!info.at) saved.former.end = 0;
    memcpy(saved.newest.layer, model[seq], sizeof saved.newest.layer);
    saved.newest.end = saved.n;
    saved.n_tokens = p.n_tokens;
    saved.of_newest = of_seq;
    saved.has_answers = !failed && !p.length;
    for (l = 0; l < 2 && p.length; l++) {
        model_layer *s = &saved.newest.layer[l];
        s->len = min_of(s->len, p.length);
    }
    return st;
}

/* Loads the newest file, or the one before it from a journal whose end is damaged. */
static tkv_status load_saved(void) {
    static int tokens[CHUNK];
    const int seq = choose_seq(), how = next_byte(), which = next_byte(), offset = next_byte() % 64;
    const int what = which % 8, damages = what == 1 || what == 2, recover = what == 2, through = how & 2,
              attaches = how & 4 && !through && !damages;
    const saved_model *from = &saved.newest;
    tkv_load_params p;
    tkv_load_info info;
    pieces file;
    uint8_t *raw, *bytes;
    size_t n = saved.n, at;
    int i, l, slot, was_empty, is_wrong = damages, may_be_wrong = 0, failed;
    tkv_status st;
    for (i = 0; i < SEQS && which / 8 % 4; i++) {
        if (!in_step[i]) continue;
        CHECK_EQ(tkv_seq_abort(kv, i), TKV_OK);
        abort_model(i);
        in_step[i] = reserved[i] = 0;
    }
    if (which / 32 && is_seq(seq)) {
        CHECK_EQ(tkv_seq_reset(kv, seq), TKV_OK);
        reset_model(seq);
    }
    raw = exact_memory(n + 64 + (size_t)offset);
    bytes = raw + (attaches ? (64 - (uintptr_t)raw % 64) % 64 : (size_t)offset);
    if (!attaches) bytes = raw = (uint8_t *)realloc(raw, n);
    if (!raw) exit(2);
    memcpy(bytes, saved.bytes, n);
    memset(&p, 0, sizeof p);
    memset(&info, 0, sizeof info);
    p.seq = seq;
    p.model = "fuzz", p.model_bytes = 4;
    p.recover = recover;
    if (damages) { /* one byte, or all from there on */
        const int cuts = how & 16;
        at = (size_t)(next_byte() << 16 | next_byte() << 8 | next_byte()) % n;
        if ((recover || cuts) && at < saved.former.end) /* no older save can be found */
            at = saved.former.end + at % (n - saved.former.end);
        if (cuts) n = at;
        else bytes[at] = (uint8_t)(bytes[at] ^ (1 + next_byte() % 255));
        if (saved.former.end && (recover || (cuts && at == saved.former.end)))
            from = &saved.former, is_wrong = 0;
        may_be_wrong = at < saved.former.end; /* the newest save may do without this byte */
        is_wrong &= !may_be_wrong;
    }
    if (what == 3) p.model_bytes = 3, is_wrong = 1;
    if (how & 32) p.tokens = tokens, p.token_capacity = from == &saved.newest ? saved.n_tokens : CHUNK;
    if (what == 4 && how & 32 && p.token_capacity) p.token_capacity--, is_wrong = 1;
    for (slot = 0; slot < MOST_ATTACHED - 1 && attached[slot]; slot++) {}
    if (attaches && attached[slot]) {
        free(raw);
        return skip_call();
    }
    if (attaches)
        p.attach = 1, p.release = release_file, p.release_user = &attached[slot], attached[slot] = raw;
    p.scratch = choose_scratch(&p.scratch_bytes);
    was_empty = is_seq(seq) && !max_len(seq);
    if (!was_empty || in_step[seq]) call.must_fail = 1;
    allow_reclaim(seq);
    for (l = 0; l < 2 && was_empty && !in_step[seq]; l++) { /* what is evicted meanwhile is of these tokens */
        model_layer *to = &model[seq][l];
        *to = from->layer[l];
        to->exact_from = to->len;
    }
    sprintf(call.text, "load %lu bytes as sequence %d%s%s%s", (unsigned long)n, seq,
            damages ? ", damaged" : "", through ? ", through a callback" : "", attaches ? ", attached" : "");
    failed = memory.n_refused + store.n_failed;
    if (through) {
        memset(&file, 0, sizeof file);
        file.want = bytes, file.n = n, file.fail_at = how & 64 ? 1 + next_byte() % 16 : 0;
        st = tkv_seq_load_from(kv, &p, n, give_piece, &file, &info);
    } else st = tkv_seq_load(kv, &p, bytes, n, &info);
    failed = memory.n_refused + store.n_failed - failed;
    free(p.scratch);
    if (!attaches) free(raw);
    else if (st) {
        CHECK(attached[slot] == raw); /* it is the caller's again */
        free(raw);
        attached[slot] = NULL;
    }
    if (is_wrong) CHECK_MSG(st != TKV_OK, "a wrong file was loaded");
    if (st && was_empty && !in_step[seq]) truncate_model(seq, 0, 0), truncate_model(seq, 1, 0);
    if (st == TKV_ERR_DATA && !is_wrong && !may_be_wrong) CHECK(failed);
    CHECK(st != TKV_ERR_RANGE && st != TKV_ERR_NO_SOURCE);
    if (is_wrong || may_be_wrong) call.is_hostile = 1;
    if (st) return st;
    CHECK_EQ(info.end, from->end);
    CHECK_EQ(info.n_tokens, min_len(seq));
    if (from == &saved.newest) CHECK_EQ(info.n_saved_tokens, saved.n_tokens);
    for (i = 0; i < info.n_saved_tokens && how & 32; i++) CHECK_EQ(tokens[i], i * 7 - 20);
    has_moved[seq] = cut_gone[seq] = 1;
    reserved[seq] = has_discards[seq] = may_share[seq] = 0;
    if (from == &saved.newest && saved.has_answers && !info.n_recoded && !budget_before && !failed) {
        answers a;
        const int before = store.n_failed;
        ask(seq, &a);
        if (store.n_failed == before) check_same_answers(&a, &saved.of_newest);
    }
    return st;
}

static tkv_status call_load(void) { return saved.n ? load_saved() : call_save(); }

/* Saves the whole cache, ends it, and goes on with one that loads it. */
static tkv_status call_restart(void) {
    static answers before[SEQS];
    tkv_status st;
    const int how = next_byte(), fail_at = how > 220 ? 1 + next_byte() % 8 : 0;
    const int failed = store.n_failed + memory.n_refused;
    tkv_save_params p;
    tkv_load_params load;
    uint8_t *bytes;
    size_t n;
    int s, is_open = 0;
    memset(&p, 0, sizeof p);
    memset(&load, 0, sizeof load);
    p.seq = load.seq = TKV_ALL_SEQS;
    for (s = 0; s < SEQS; s++) is_open |= in_step[s];
    for (s = 0; s < SEQS; s++) ask(s, &before[s]);
    p.scratch = load.scratch = choose_scratch(&p.scratch_bytes);
    load.scratch_bytes = p.scratch_bytes;
    sprintf(call.text, "save the whole cache, and load it");
    st = save_exactly(&p, &bytes, &n);
    if (is_open) CHECK(st != TKV_OK);
    if (st == TKV_ERR_STATE) CHECK(is_open);
    if (st) {
        free(p.scratch);
        return st;
    }
    tkv_destroy(kv);
    kv = NULL;
    CHECK_EQ(n_attached_files(), 0);
    memory.fail_at = store.fail_read = store.corrupt_read = store.fail_write = fail_at_row = 0;
    if (in_place) {
        check_borders(&arena);
        free(arena.raw);
        kv = create_cache_in_place(&cfg, &arena, (size_t)(how % 64));
    } else {
        CHECK_EQ(memory.held, 0);
        CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    }
    memory.fail_at = in_place ? 0 : fail_at;
    st = tkv_seq_load(kv, &load, bytes, n, NULL);
    memory.fail_at = 0;
    if (st) { /* a new cache */
        for (s = 0; s < SEQS; s++) reset_model(s);
    } else if (store.n_failed + memory.n_refused == failed) {
        for (s = 0; s < SEQS; s++) {
            answers after;
            ask(s, &after);
            check_same_answers(&after, &before[s]);
        }
    }
    free(p.scratch);
    free(bytes);
    return st;
}

/* >>reports */
static tkv_status call_report(void) {
    static char text[1 << 16];
    static uint8_t tier[LONGEST];
    static int positions[LONGEST];
    const int seq = choose_seq(), layer = choose_layer(), start = choose_token(seq), n = choose_int(0, 64);
    tkv_layer_info info;
    tkv_quality_info quality;
    size_t needed = 0;
    tkv_status st = tkv_get_layer(kv, seq, layer, &info);
    sprintf(call.text, "reports of sequence %d, layer %d", seq, layer);
    CHECK_EQ(st != TKV_OK, call.must_fail);
    (void)tkv_get_tiers(kv, seq, layer, start, n > LONGEST ? 0 : n, tier);
    (void)tkv_get_positions(kv, seq, layer, start, n > LONGEST ? 0 : n, positions);
    (void)tkv_get_quality(kv, layer, &quality);
    CHECK_EQ(tkv_print_report(kv, (tkv_report_kind)(next_byte() % TKV_REPORT_COUNT), NULL, NULL, 0, &needed),
             TKV_OK);
    if (needed <= sizeof text)
        CHECK_EQ(tkv_print_report(kv, TKV_REPORT_JSON, NULL, text, (size_t)next_byte(), &needed),
                 TKV_ERR_CAPACITY);
    return st;
}

/* Fails allocations or the store during the next call. */
static int fail_next;

static tkv_status call_fail_next(void) {
    fail_next = 1 + next_byte();
    sprintf(call.text, "failures: %d", fail_next);
    return TKV_OK;
}

#define SAVE_ERRORS (MEMORY_ERRORS | ERR(STATE) | ERR(NO_SOURCE) | ERR(IO) | ERR(DATA) | ERR(RANGE))

static const struct {
    const char *name;
    int weight;
    tkv_status (*run)(void);
    unsigned errors; /* that it may give with valid arguments */
} calls[] = {
    {"append", 10, call_append, MEMORY_ERRORS | ERR(NONFINITE) | ERR(RANGE)},
    {"append all", 30, call_append_all, MEMORY_ERRORS | ERR(RANGE)},
    {"append batch", 8, call_append_batch, MEMORY_ERRORS | ERR(RANGE)},
    {"append at", 12, call_append_at, MEMORY_ERRORS | ERR(RANGE) | ERR(UNSUPPORTED)},
    {"begin", 6, call_begin, MEMORY_ERRORS | ERR(STATE)},
    {"end", 10, call_end, ERR(STATE)},
    {"reserve", 5, call_reserve, MEMORY_ERRORS},
    {"truncate", 12, call_truncate, ERR(STATE) | ERR(RANGE)},
    {"fork", 14, call_fork, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE) | ERR(ARG)},
    {"reorder", 10, call_reorder, MEMORY_ERRORS | ERR(STATE)},
    {"remove", 12, call_remove, ERR(STATE) | ERR(RANGE)},
    {"shift", 16, call_shift, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE) | ERR(UNSUPPORTED) | ERR(NO_SOURCE)},
    {"copy", 14, call_copy, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE) | ERR(UNSUPPORTED) | ERR(NO_SOURCE)},
    {"prefix", 14, call_prefix, MEMORY_ERRORS | ERR(STATE) | ERR(UNSUPPORTED)},
    {"keep", 14, call_keep, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE) | ERR(UNSUPPORTED)},
    {"slide", 12, call_slide, ERR(CAPACITY) | ERR(STATE) | ERR(RANGE) | ERR(UNSUPPORTED) | ERR(NO_SOURCE)},
    {"put state", 5, call_put_state, MEMORY_ERRORS},
    {"reset", 3, call_reset, 0},
    {"flush", 8, call_flush, MEMORY_ERRORS | ERR(STATE)},
    {"budget", 5, call_set_budget, MEMORY_ERRORS | ERR(ARG)},
    {"plan", 5, call_set_plan, ERR(ARG)},
    {"maintain", 8, call_maintain, MEMORY_ERRORS},
    {"calibration", 6, call_calibration, MEMORY_ERRORS | ERR(STATE)},
    {"attend", 26, call_attend, ERR(IO) | ERR(DATA) | ERR(NO_SOURCE) | ERR(RANGE) | ERR(ARG)},
    {"read", 4, call_read, ERR(IO) | ERR(DATA) | ERR(NO_SOURCE) | ERR(RANGE)},
    {"evict", 12, call_evict, ERR(STATE) | ERR(CONFIG) | ERR(BUDGET) | ERR(ARG)},
    {"pin", 6, call_pin, ERR(STATE) | ERR(ARG)},
    {"set sinks", 10, call_set_sinks, ERR(STATE) | ERR(RANGE) | ERR(NO_SOURCE) | ERR(UNSUPPORTED)},
    {"importance", 6, call_importance, ERR(CONFIG) | ERR(NONFINITE) | ERR(RANGE)},
    {"offload", 10, call_offload, ERR(IO) | ERR(ARG)},
    {"promote", 8, call_promote,
     MEMORY_ERRORS | ERR(ARG) | ERR(IO) | ERR(DATA) | ERR(NO_SOURCE) | ERR(RANGE) | ERR(CONFIG) | ERR(STATE)},
    {"discard", 6, call_discard, ERR(STATE)},
    {"restore", 8, call_restore, MEMORY_ERRORS | ERR(STATE) | ERR(RANGE)},
    {"free bytes", 3, call_free_bytes, ERR(STATE) | ERR(ARG)},
    {"save", 10, call_save, SAVE_ERRORS},
    {"load", 14, call_load, SAVE_ERRORS | ERR(CONFIG)},
    {"restart", 5, call_restart, SAVE_ERRORS},
    {"report", 4, call_report, ERR(ARG)},
    {"failures", 8, call_fail_next, 0},
};
static long n_calls[COUNT(calls)], n_refused[COUNT(calls)];

static void make_call(void) {
    int which, at = 0, point, failed, s;
    tkv_status st;
    const int fails = fail_next;
    for (which = 0; which < COUNT(calls); which++) at += calls[which].weight;
    point = next_below(at);
    for (which = 0; point >= calls[which].weight; which++) point -= calls[which].weight;
    memset(&call, 0, sizeof call);
    sprintf(call.text, "%s", calls[which].name);
    fail_next = 0;
    if (fails && fails % 2 && !in_place) memory.fail_at = 1 + fails / 2 % 8;
    if (fails && fails / 2 % 2 && cfg.offload.write) store.fail_write = 1 + fails / 4 % 6;
    if (fails && fails / 2 % 2 == 0 && cfg.offload.write) store.fail_read = 1 + fails / 4 % 6;
    if (fails % 7 == 3 && cfg.offload.write) store.corrupt_read = 1 + fails / 7 % 5;
    if (fails && cfg.recompute.compute) fail_at_row = fails % 5;
    memory.n_refused = store.n_failed = 0;
    memory.peak = memory.held;
    budget_before = budget_of(kv).budget;
    if (is_logging) fprintf(stderr, "%s ...", calls[which].name), fflush(stderr);
    st = calls[which].run();
    failed = memory.n_refused + store.n_failed;
    memory.fail_at = store.fail_write = store.fail_read = store.corrupt_read = fail_at_row = 0;
    if (is_logging)
        fprintf(stderr, " %s%s: %d %s\n", call.text, failed ? ", with failures" : "", (int)st,
                st ? tkv_get_last_error(kv) : "");
    n_calls[which]++;
    n_refused[which] += st != TKV_OK;
    if (st && (failed || st == TKV_ERR_BUDGET || st == TKV_ERR_CAPACITY)) note_recoding();
    if (call.must_fail) CHECK_MSG(st != TKV_OK, "%s: it must be refused", call.text);
    if (!call.is_hostile && !call.must_fail)
        CHECK_MSG(!st || calls[which].errors >> -(int)st & 1, "%s: %d, %s", call.text, (int)st,
                  tkv_get_last_error(kv));
    if (st == TKV_ERR_NOMEM) CHECK(memory.n_refused > 0);
    if (st == TKV_ERR_IO) CHECK(store.n_failed > 0);
    if (st == TKV_ERR_BROKEN) CHECK(0);
    CHECK_MSG(call.n_wrong == 0, "%d events are wrong", call.n_wrong);
    if (st && !call.keeps_part && !cfg.offload.write) CHECK_EQ(call.n_evicted, 0);
    if (st && call.is_hostile && !call.keeps_part && !failed && st == TKV_ERR_ARG)
        for (s = 0; s < SEQS; s++) call.may_discard[s] = call.may_restore[s] = 0; /* it changed nothing */
    turn++;
    check_everything(st ? turn % 2 ? 0x15u : 0x2au : 1u << turn % 6, SOME_VALUES);
}

/* >>configs */
static const tkv_format_pair format_rows[][2] = {
    {{TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}},
    {{TKV_F16, TKV_F32}, {TKV_BF16, TKV_F16}},
    {{TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI3}},
    {{TKV_KVQUANT4, TKV_KVQUANT4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    {{TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}},
    {{TKV_INT8, TKV_FP8_E4M3}, {TKV_FP4, TKV_INT4}},
    {{TKV_SQUAT4, TKV_KIVI4}, {TKV_SUBSPACE4, TKV_SUBSPACE4}},
    {{TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}},
    {{TKV_KIVI4, TKV_R30}, {TKV_A30, TKV_FP8_E5M2}}};

/* V inside K in the model, in layers, or in all but one. Most of these layers get formats that hold it. */
static void choose_v_in_k(void) {
    static const int in_layer[] = {0, 1, TKV_OFF, 0};
    static const tkv_format inside[] = {TKV_A40, TKV_KIVI4, TKV_Q8, TKV_F32};
    const int how = next_byte(), formats = next_byte();
    int l;
    if (how < 128) return;
    cfg.model.v_in_k = how % 2;
    for (l = 0; l < 2; l++) {
        layer_cfg[l].v_in_k = in_layer[how / (l ? 8 : 2) % 4];
        if (!has_v_in_k(l) || formats >= 200) continue;
        layer_cfg[l].warm.k = inside[formats % 4];
        layer_cfg[l].archive.k = layer_cfg[l].warm.k == TKV_A40 ? TKV_A30 : layer_cfg[l].warm.k;
    }
    if (how / 32 % 2 && cfg.model.rope.dim && cfg.tiers.warm.k != TKV_KVQUANT4)
        cfg.model.rope.first = cfg.model.head_dim - cfg.model.rope.dim;
}

static void choose_config(void) {
    static const int shapes[][4] = {{2, 1, 16, 16}, {2, 2, 12, 5}, {4, 2, 32, 8}, {2, 1, 32, 32}};
    static const tkv_format hot[] = {TKV_FORMAT_DEFAULT, TKV_F32, TKV_F16, TKV_BF16};
    const int *shape = shapes[next_byte() % 4], tiers = next_byte(), more = next_byte(), size = next_byte(),
              keep = next_byte(), old = next_byte();
    const tkv_format_pair *row = format_rows[next_byte() % COUNT(format_rows)];
    int l;
    cfg = make_sized_config(tiers & 1 ? LAYERS : 2, shape[0], shape[1], shape[2], SEQS, CHUNK);
    cfg.model.v_head_dim = v_dim = shape[3];
    k_row = shape[1] * shape[2];
    v_row = shape[1] * shape[3];
    cfg.tiers.warm = row[0];
    cfg.tiers.archive = row[1];
    cfg.tiers.hot.k = hot[tiers / 2 % 4];
    cfg.tiers.hot.v = hot[tiers / 8 % 4];
    cfg.tiers.hot_tokens = tiers / 32 % 4 ? 1 + tiers / 32 % 4 * 30 : 0;
    cfg.tiers.warm_tokens = more % 4 ? 1 + more % 4 * 50 : 0;
    cfg.tiers.sink_tokens = more / 4 % 4 == 3 ? TKV_OFF : more / 4 % 4 * 5;
    cfg.host.precise = more / 16 % 2;
    cfg.host.wipe_freed = more / 32 % 2;
    cfg.budget.pressure.jump = more / 32 % 2;
    if (more / 64 % 4 == 1) cfg.meter.heads = 1;
    if (more / 64 % 4 >= 1 || (row[0].k == TKV_KVQUANT4 && more / 64 % 4 == 0)) {
        cfg.model.rope.dim = old & 1 ? 8 : shape[2] / 4 * 4;
        cfg.model.rope.interleaved = old / 2 % 2;
    } else cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    if (size > 60) cfg.budget.bytes = 20000 + (size_t)(size - 60) * 2000;
    if (size % 4 == 3) {
        memset(ladder, 0, sizeof ladder);
        for (l = 0; l < 3; l++) {
            ladder[l].hot_tokens = l ? 40 : TKV_UNLIMITED;
            ladder[l].warm.k = ladder[l].warm.v = l > 1 ? TKV_KIVI4 : TKV_Q8;
            ladder[l].archive.k = ladder[l].archive.v = l > 1 ? TKV_KIVI2 : TKV_KIVI4;
        }
        cfg.budget.ladder = ladder;
        cfg.budget.n_levels = 3;
    }
    if (keep & 1) cfg.evict.policy = (tkv_evict_policy)(1 + keep / 2 % (TKV_EVICT_COUNT - 1));
    cfg.evict.scorer = score_token;
    if (keep & 1 && keep & 32) cfg.evict.keep_tokens = 70 + keep;
    if (keep & 64) cfg.importance.sample_every = 1 + (keep >> 7);
    if (keep & 128 && cfg.tiers.sink_tokens != TKV_OFF && keep & 64 && !(old & 16)) cfg.tiers.n_anchors = 4;
    memset(layer_cfg, 0, sizeof layer_cfg);
    if (cfg.model.n_layers == LAYERS) layer_cfg[2].share_kv = 1, layer_cfg[3].no_cache = 1;
    if (old & 4 && !cfg.tiers.n_anchors) layer_cfg[1].window = 90;
    if (layer_cfg[1].window && cfg.tiers.sink_tokens != TKV_OFF) layer_cfg[1].window_sinks = size / 2 % 2;
    if (old & 8) layer_cfg[0].hot_tokens = TKV_UNLIMITED;
    choose_v_in_k();
    cfg.layers = layer_cfg;
    cfg.budget.discard = old / 32 % 2;
    cfg.host.on_event = record_event;
    if (old & 64 && tkv_validate_config(&cfg, NULL, 0) == TKV_OK) {
        attach_test_store(&store, &cfg);
        cfg.offload.keep_exact = old & 1;
    }
    if (old & 128 && old & 32) {
        cfg.recompute.compute = compute_rows;
        cfg.recompute.cost.n_heads = TKV_OFF;
        cfg.recompute.cost.layer_params = 1000.0;
        cfg.recompute.cost.min_materialized = 64;
    }
    in_place = (size & 12) == 12;
    if (more % 8 == 5) cfg.limits.max_states = 1 + more / 8 % 4;
    if (in_place || more % 16 == 3) cfg.limits.state_bytes = 8000;
    if (in_place) cfg.limits.max_tokens = LONGEST;
    if (keep % 4 == 2) cfg.limits.max_tokens = 200 + keep; /* a sequence slides early */
    if (!in_place) cfg.host.allocator = counting_allocator_of(&memory);
}

/* Returns 0 if there is no such cache. */
static int create_chosen_cache(void) {
    char reason[200] = "";
    tkv_remat_config r;
    size_t bytes;
    tkv_status st = tkv_validate_config(&cfg, reason, sizeof reason);
    if (st) {
        CHECK_MSG(reason[0] != 0, "a refused config has a reason");
        if (is_logging) fprintf(stderr, "no cache: %s\n", reason);
        return 0;
    }
    for (st = TKV_ERR_BUDGET; st == TKV_ERR_BUDGET; cfg.budget.bytes += 16000) { /* some configs need more */
        st = in_place ? tkv_get_required_bytes(&cfg, &bytes, NULL) : tkv_create(&cfg, &kv);
        if (st != TKV_ERR_BUDGET) break;
    }
    if (in_place) {
        if (!st) kv = create_cache_in_place(&cfg, &arena, (size_t)(next_byte() % 64));
    }
    if (st) {
        if (is_logging) fprintf(stderr, "no cache: %d\n", (int)st);
        CHECK(0);
        return 0;
    }
    memset(&r, 0, sizeof r);
    r.n_layers = cfg.model.n_layers;
    r.n_heads = cfg.model.n_heads;
    r.head_dim = cfg.model.head_dim;
    r.layer_params = 1e4;
    r.min_materialized = 64;
    CHECK_EQ(tkv_init_remat(&remat, &r, NULL, 0), TKV_OK);
    remat_step = 0;
    return 1;
}

static void print_config(void) {
    static char text[4000];
    if (tkv_print_config(&cfg, 0, text, sizeof text, NULL) == TKV_OK) fputs(text, stderr);
    fprintf(stderr, "in place: %d, cfg.recompute: %d\n", in_place, cfg.recompute.compute != NULL);
}

static void run_cache(void) {
    int s, n = 0;
    kv = NULL;
    memset(&memory, 0, sizeof memory);
    memset(&store, 0, sizeof store);
    memset(&arena, 0, sizeof arena);
    memset(&call, 0, sizeof call);
    fail_next = fail_at_row = 0;
    next_id = 1;
    named_seq = 0;
    turn = 0;
    image_size = 0;
    for (s = 0; s < SEQS; s++) reset_model(s);
    choose_config();
    if (create_chosen_cache()) {
        if (is_logging) print_config();
        fill_sequences();
        while (n_in && n++ < 200 && !tkv_test_.n_bad) make_call();
        memset(&call, 0, sizeof call);
        if (!tkv_test_.n_bad) check_everything(0x3fu, LONGEST);
        tkv_destroy(kv);
        if (in_place) check_borders(&arena);
        else CHECK_EQ(memory.held, 0);
        CHECK_EQ(n_attached_files(), 0);
    }
    forget_saved();
    free(arena.raw);
    if (store.key) destroy_test_store(&store);
}

/* >>texts */
/* A config that was read from a text reads the same from its own text. Its cache works, if it is small. */
static void run_text(const char *text, size_t size) {
    static tkv_layer_config layers[64], layers_2[64];
    static tkv_level levels[8], levels_2[8];
    static float frequencies[128], frequencies_2[128];
    static char printed[2][1 << 16];
    tkv_config_arrays room, room_2;
    tkv_config a = tkv_default_config(), b = tkv_default_config();
    const int style = next_byte() % TKV_TEXT_COUNT;
    char reason[200] = "";
    size_t needed = 0;
    tkv_cache *cache = NULL;
    tkv_status st;
    room.layers = layers, room.n_layers = 64, room.ladder = levels, room.n_levels = 8;
    room.frequencies = frequencies, room.n_frequencies = 128;
    room_2.layers = layers_2, room_2.n_layers = 64, room_2.ladder = levels_2, room_2.n_levels = 8;
    room_2.frequencies = frequencies_2, room_2.n_frequencies = 128;
    st = tkv_parse_config(&a, &room, text, size, reason, sizeof reason);
    CHECK(st == TKV_OK || (st == TKV_ERR_CONFIG && reason[0]));
    if (st) return;
    if (tkv_print_config(&a, style, printed[0], sizeof printed[0], &needed) != TKV_OK) return;
    CHECK_EQ(strlen(printed[0]) + 1, needed);
    st = tkv_parse_config(&b, &room_2, printed[0], needed - 1, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "its own text is refused: %s", reason);
    if (st) return;
    CHECK_EQ(tkv_print_config(&b, style, printed[1], sizeof printed[1], &needed), TKV_OK);
    CHECK_STR(printed[1], printed[0]);
    st = tkv_validate_config(&a, reason, sizeof reason);
    CHECK_EQ(st == TKV_OK, reason[0] == 0);
    CHECK_EQ(tkv_validate_config(&b, reason, sizeof reason), st);
    if (st) return;
    a.host.allocator = counting_allocator_of(&memory);
    if (a.model.n_layers > 64 || a.limits.max_seqs > 1000 || a.limits.max_append > 4096 ||
        a.model.n_heads > 64 || (a.limits.max_tokens > 100000) || a.meter.tokens > 10000)
        return;
    st = tkv_create(&a, &cache);
    CHECK(st == TKV_OK || st == TKV_ERR_BUDGET || st == TKV_ERR_ISA || st == TKV_ERR_CONFIG);
    if (!st) check_cache(cache);
    tkv_destroy(cache);
    CHECK_EQ(memory.held, 0);
}

static void run_thresholds(const char *text, size_t size) {
    static tkv_threshold entries[16];
    static char printed[1 << 14];
    tkv_thresholds t;
    char reason[200] = "";
    size_t needed = 0;
    t.entry = entries, t.n = 0, t.capacity = 16;
    if (tkv_parse_thresholds(&t, text, size, reason, sizeof reason) != TKV_OK) {
        CHECK(reason[0] && t.n == 0);
        return;
    }
    CHECK_EQ(tkv_print_thresholds(&t, printed, sizeof printed, &needed), TKV_OK);
}

/* Bytes as a coded block: decoding reads within them. */
static void run_codec(void) {
    static uint8_t bytes[1 << 16];
    static float x[64 * MAX_DIM];
    tkv_codec c;
    uint8_t *exact_size;
    size_t n, i;
    memset(&c, 0, sizeof c);
    c.format = (tkv_format)choose_int(0, TKV_FORMAT_COUNT - 1);
    c.side = (tkv_side)(next_byte() % 2);
    c.head_dim = choose_int(1, MAX_DIM);
    c.options.group_size = next_byte() % 2 ? 32 : 0;
    c.options.rotate = next_byte() % 4;
    c.options.kvquant = next_byte() % 16;
    if (next_byte() % 2) c.rope.dim = choose_int(0, MAX_DIM);
    n = tkv_get_block_bytes(&c);
    if (!n || n > sizeof bytes || c.head_dim > MAX_DIM) return;
    for (i = 0; i < n; i++) bytes[i] = (uint8_t)next_byte();
    exact_size = (uint8_t *)malloc(n); /* a read behind it is found */
    if (!exact_size) exit(2);
    memcpy(exact_size, bytes, n);
    CHECK_EQ(tkv_decode_block(&c, exact_size, n, 64, x, 0), TKV_OK);
    for (i = 0; i < (size_t)(64 * c.head_dim); i++) x[i] = (float)(i * 37 % 251) / 64.0f - 2.0f;
    CHECK_EQ(tkv_encode_block(&c, x, 0, 64, exact_size, n), TKV_OK);
    CHECK_EQ(tkv_encode_block(&c, x, 0, 64, exact_size, n - 1), TKV_ERR_ARG);
    free(exact_size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int kind;
    is_logging = int_from_env("TKV_FUZZ_LOG", 0);
    begin_input(data, size);
    kind = next_byte();
    memset(&call, 0, sizeof call);
    if (kind >= 250) run_text((const char *)in_bytes, n_in);
    else if (kind >= 248) run_thresholds((const char *)in_bytes, n_in);
    else if (kind >= 244) run_codec();
    else run_cache();
    end_input();
    return 0;
}

#ifdef TKV_FUZZ_MAIN
/* About ten bytes make a call. One input of eight is longer, up to three times n_bytes. */
static int make_random(int seed, int n_bytes, uint8_t *bytes) {
    tkv_rng rng = tkv_rng_seed((uint64_t)seed);
    int n, i;
    n_bytes = max_of(8, n_bytes);
    n = tkv_rng_below(&rng, tkv_rng_below(&rng, 8) ? max_of(1, n_bytes / 2) : 3 * n_bytes);
    n = min_of(1 << 16, n_bytes / 4 + n);
    for (i = 0; i < n; i++) bytes[i] = (uint8_t)tkv_rng_below(&rng, 256);
    return n;
}

int main(int argc, char **argv) {
    int n_runs, i;
    const int status =
        run_inputs(argc, argv, "api_calls", make_random, 400, int_from_env("TKV_FUZZ_LOG", 0), &n_runs);
    printf("%d random inputs; calls", n_runs);
    for (i = 0; i < COUNT(calls); i++)
        printf("%s%s %ld, refused %ld", i % 6 ? "; " : "\n    ", calls[i].name, n_calls[i], n_refused[i]);
    printf("; pages named %ld times, adopted %ld times\n", n_named, n_adopted);
    return status;
}
#endif
