/*
 * test_arguments.c - calls every public function with a number out of range: a sequence, a layer, a position, a
 * count, an index, a length. Each line EACH(...) below is a row of a table. It has the function, the argument, and
 * the caches in which the expectation holds. The limit N of the argument follows, then one letter for each value
 * tried:
 *
 *     value    INT_MIN  -2  -1  N  N+1  INT_MAX  1 (a layer that shares)  2 (a layer without a cache)
 *
 *     A R C G S   TKV_ERR_ARG, _RANGE, _CAPACITY, _CONFIG, _STATE      O   TKV_OK (or the number 0, or NULL)
 *     +           a number above 0, or a name                          *   any answer
 *     .           not called: the number is a size of memory, larger than what the test has
 *
 * In caches that a row does not name, any answer passes. In every cache an error must change nothing: lengths,
 * bytes, K and V, importance. tests/test_house.py compares the names in the rows with the functions that api.h
 * declares.
 */
#include "../tieredkv.h"
#include "kit.h"

#include <limits.h>
#include <stddef.h>

enum {
    SEQS = 2,
    LAYERS = 5, /* 0, 3 and 4 have a cache, 1 shares that of 0, 2 has none */
    HEADS = 2,
    DIM = 16,
    LENGTH = 400, /* of sequence 0 */
    SHORT = 130,  /* of sequence 1 */
    CHUNK = 64,
    MOST = 1000, /* max_tokens */
    LEVELS = 3,
    ROOM = 1024, /* tokens that every array of the test has room for */
    BLOCKS = 64,
    PLAIN = 1, /* kinds of caches */
    SPILL = 2,
    REMAT = 4,
    EVICT = 8,
    BUDGET = 16,
    EVERY = 31
};

/* >>caches */
typedef struct outputs { /* everything that a function may write to */
    float k[ROOM * DIM], v[ROOM * DIM], out[ROOM * HEADS * DIM], lse[ROOM * HEADS], mass[2 * ROOM], x[ROOM];
    uint64_t mask[ROOM / 64];
    int list[ROOM], moved[ROOM], a, b;
    size_t bytes;
    uint8_t code[65536];
    tkv_tier_info tiers;
    tkv_tier tier;
    tkv_pair pair;
    tkv_memory_info memory;
    tkv_quality_info quality;
    tkv_advice advice;
    tkv_feedback_info feedback;
    tkv_threshold found[4];
    tkv_ranked ranked[ROOM];
    tkv_evict_result result;
    tkv_remat_block block[BLOCKS];
    tkv_remat_action action[BLOCKS];
} outputs;

typedef struct rig {
    int kind;
    tkv_cache *kv;
    tkv_config cfg;
    tkv_layer_config layers[LAYERS];
    tkv_level ladder[LEVELS];
    test_store store;
    outputs o;
    uint64_t state, written; /* hashes from before the call */
} rig;

static float k_in[ROOM * DIM], v_in[ROOM * DIM], q_in[ROOM * HEADS * DIM], mass_in[ROOM];
static uint64_t bits_in[ROOM];

static void configure(rig *r) {
    tkv_config *cfg = &r->cfg;
    int l;
    *cfg = shape_of(LAYERS, HEADS, 1, DIM, SEQS, CHUNK);
    memset(r->layers, 0, sizeof r->layers);
    memset(r->ladder, 0, sizeof r->ladder);
    cfg->max_tokens = MOST;
    cfg->warm_tokens = 64;
    cfg->warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg->archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg->layers = r->layers;
    r->layers[1].share_kv = 1;
    r->layers[2].no_cache = 1;
    for (l = 0; l < LEVELS; l++) {
        r->ladder[l].warm = pair_of(l ? TKV_KIVI4 : TKV_Q8, l ? TKV_KIVI4 : TKV_Q8);
        r->ladder[l].archive = pair_of(l > 1 ? TKV_KIVI2 : TKV_KIVI4, l > 1 ? TKV_KIVI2 : TKV_KIVI4);
    }
    if (r->kind == PLAIN) {
        cfg->quality_heads = 2;
        r->layers[3].window = 100;
        r->layers[4].archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT3);
        cfg->kvquant = TKV_KVQUANT_POST_ROPE;
    } else {
        cfg->importance_every = 1;
        cfg->ladder = r->ladder;
        cfg->n_levels = LEVELS;
    }
    if (r->kind == REMAT || r->kind == BUDGET) cfg->remat = 1;
    if (r->kind == EVICT || r->kind == BUDGET) cfg->evict.kind = TKV_EVICT_H2O;
    if (r->kind == EVICT) cfg->n_anchors = 4;
    if (r->kind == SPILL || r->kind == BUDGET) {
        test_store_for(&r->store, cfg);
        cfg->spill.keep_exact = r->kind == SPILL;
    }
    if (r->kind == BUDGET) {
        tkv_memory_info m;
        CHECK_EQ(tkv_estimate(cfg, LENGTH, SEQS, &m), TKV_OK);
        cfg->budget_bytes = m.total / 16 * 13;
    }
}

static void append(rig *r, int seq, int n) {
    int l, at;
    for (at = 0; at < n; at += CHUNK) {
        const int some = n - at < CHUNK ? n - at : CHUNK;
        for (l = 0; l < LAYERS; l++)
            if (l != 1 && l != 2) {
                const tkv_status st = tkv_append(r->kv, seq, l, k_in + at * DIM, v_in + at * DIM, some);
                CHECK_MSG(st == TKV_OK, "%s", tkv_last_error(r->kv));
                CHECK_EQ(tkv_attend(r->kv, seq, l, q_in, some, r->o.out), TKV_OK);
            }
    }
}

/* Blocks in every tier; outside RAM, discarded, with evicted tokens in them, as the kind says. */
static void build(rig *r) {
    uint64_t victims[ROOM / 64];
    int n = 0;
    r->kv = make(&r->cfg);
    append(r, 1, SHORT);
    append(r, 0, LENGTH);
    if (r->kind == SPILL) CHECK_EQ(tkv_spill(r->kv, 0, TKV_ALL, 2, &n), TKV_OK);
    if (r->kind == SPILL) CHECK(n > 0);
    if (r->kind == REMAT) CHECK_EQ(tkv_remat_drop(r->kv, 0, 128, &n), TKV_OK);
    if (r->kind == REMAT) CHECK_EQ(n, 128);
    if (r->kind == EVICT) {
        memset(victims, 0x11, sizeof victims);
        CHECK_EQ(tkv_drop(r->kv, 0, TKV_NONE, victims, LENGTH), TKV_OK);
        CHECK_EQ(tkv_pin(r->kv, 0, 20, 9, 1), TKV_OK);
    }
    if (r->kind == BUDGET) CHECK(budget_of(r->kv).level > 0 && budget_of(r->kv).spilled > 0);
}

static void unbuild(rig *r) {
    tkv_destroy(r->kv);
    r->kv = NULL;
}

/* Everything that a refused call must leave as it was. */
static uint64_t state_of(rig *r) {
    static float k[CHUNK * DIM], v[CHUNK * DIM], x[ROOM];
    uint64_t h = HASH_START, gone[ROOM / 64];
    tkv_memory_info m;
    int s, l, t;
    CHECK_EQ(tkv_memory(r->kv, &m), TKV_OK);
    h = hash_of(h, (const uint8_t *)&m.total, sizeof m.total);
    for (s = 0; s < SEQS; s++) {
        t = tkv_seq_len(r->kv, s);
        h = hash_of(h, (const uint8_t *)&t, sizeof t);
        for (l = 0; l < LAYERS; l++) {
            const int n = tkv_layer_len(r->kv, s, l), step = 16;
            tkv_status st;
            h = hash_of(h, (const uint8_t *)&n, sizeof n);
            memset(gone, 0, sizeof gone);
            memset(x, 0, sizeof x);
            st = tkv_importance_of(r->kv, s, l, 0, n, x, gone);
            h = hash_of(h, (const uint8_t *)&st, sizeof st);
            h = hash_of(hash_of_floats(h, x, n), (const uint8_t *)gone, sizeof gone);
            for (t = 0; t < n && l != 1; t += step) {
                const int some = n - t < step ? n - t : step;
                st = tkv_read(r->kv, s, l, t, some, k, v);
                h = hash_of(h, (const uint8_t *)&st, sizeof st);
                if (!st) h = hash_of_floats(hash_of_floats(h, k, some * DIM), v, some * DIM);
            }
        }
    }
    return h;
}

static uint64_t written_to(const rig *r) { return hash_of(HASH_START, (const uint8_t *)&r->o, sizeof r->o); }

/* >>rows */
static int value_of(int i, int n) {
    const int values[] = {INT_MIN, -2, -1, n, n < INT_MAX ? n + 1 : n, INT_MAX, 1, 2};
    return values[i];
}

static void before(rig *r) {
    memset(&r->o, 0xa5, sizeof r->o);
    r->written = written_to(r);
}

static int is_right(char want, int got) {
    switch (want) {
    case 'A': return got == TKV_ERR_ARG;
    case 'R': return got == TKV_ERR_RANGE;
    case 'C': return got == TKV_ERR_CAPACITY;
    case 'G': return got == TKV_ERR_CONFIG;
    case 'S': return got == TKV_ERR_STATE;
    case 'O': return got == 0;
    case '+': return got > 0;
    default: return want == '*';
    }
}

static void judge(rig *r, const char *name, const char *argument, int home, int untouched, int x, char want,
                  int got) {
    char reason[200] = "";
    uint64_t state;
    CHECK_MSG(!(home & r->kind) || is_right(want, got), "%s, %s = %d, cache %d: %d (%s), not %c: %s", name,
              argument, x, r->kind, got, tkv_status_text((tkv_status)got), want, tkv_last_error(r->kv));
    if (tkv_check(r->kv, reason, sizeof reason) != TKV_OK)
        CHECK_MSG(0, "after %s, %s = %d: %s", name, argument, x, reason);
    state = state_of(r);
    if (got < 0)
        CHECK_MSG(state == r->state, "%s, %s = %d, cache %d: %d, and it changed the cache", name, argument, x,
                  r->kind, got);
    if (got < 0 && untouched && home & r->kind)
        CHECK_MSG(written_to(r) == r->written, "%s, %s = %d: what it was to write is not untouched", name,
                  argument, x);
    if (state == r->state) return;
    unbuild(r); /* the next row finds it as it was */
    build(r);
    r->state = state_of(r);
}

#define TRY(name, argument, home, untouched, n, want, call)                                                  \
    do {                                                                                                     \
        const char *want_ = (want);                                                                          \
        int i_;                                                                                              \
        for (i_ = 0; want_[i_]; i_++) {                                                                      \
            const int x = value_of(i_, (n));                                                                 \
            if (want_[i_] == '.') continue;                                                                  \
            before(r);                                                                                       \
            judge(r, name, argument, home, untouched, x, want_[i_], (int)(call));                            \
        }                                                                                                    \
    } while (0)
#define EACH(name, argument, home, n, want, call) TRY(name, argument, home, 0, n, want, call)
/* The same, and an error leaves untouched what the function writes to. */
#define SAFE(name, argument, home, n, want, call) TRY(name, argument, home, 1, n, want, call)

/* A field of a struct that is an int or an enum. */
#define OF(type, field) offsetof(type, field)
static void set(void *whole, size_t at, int x) { memcpy((char *)whole + at, &x, sizeof x); }

static int sign_of(double x) { return (x > 0.0) - (x < 0.0); }

/* >>plans and presets */
static int tier_for(size_t at, int x) {
    tkv_config cfg = tkv_config_default();
    set(&cfg, at, x);
    return (int)tkv_tier_for_age(&cfg, 100);
}

static int parse_room(rig *r, size_t at, int x) {
    static const char text[] = "n_layers = 2\nlayers[1].window = 9\nn_levels = 1\nladder[0].hot_tokens = 9\n"
                               "rope.dim = 2\nrope.frequencies = [1]\n";
    tkv_layer_config layers[2];
    tkv_level ladder[1];
    float frequencies[1];
    tkv_config_room room;
    tkv_config cfg = tkv_config_default();
    (void)r;
    room.layers = layers;
    room.n_layers = 2;
    room.ladder = ladder;
    room.n_levels = 1;
    room.frequencies = frequencies;
    room.n_frequencies = 1;
    set(&room, at, x);
    return tkv_config_parse(&cfg, &room, text, sizeof text - 1, NULL, 0);
}

static void try_plans(rig *r) {
    EACH("tkv_preset_name", "i", PLAIN, 22, "OOOOOO", tkv_preset_name(x) != NULL);
    EACH("tkv_preset_name", "i", PLAIN, 20, "OOO++O", tkv_preset_name(x) != NULL);
    EACH("tkv_tier_for_age", "age", PLAIN, 511, "OOO+++", tkv_tier_for_age(NULL, x));
    EACH("tkv_tier_for_age", "hot_tokens", PLAIN, 101, "*O+OOO", tier_for(OF(tkv_config, hot_tokens), x));
    EACH("tkv_tier_for_age", "warm_tokens", PLAIN, 36, "*+++++", tier_for(OF(tkv_config, warm_tokens), x));
    EACH("tkv_config_parse", "room.n_layers", PLAIN, 2, "GGGO..",
         parse_room(r, OF(tkv_config_room, n_layers), x));
    EACH("tkv_config_parse", "room.n_levels", PLAIN, 1, "GGGO..",
         parse_room(r, OF(tkv_config_room, n_levels), x));
    EACH("tkv_config_parse", "room.n_frequencies", PLAIN, 1, "GGGO..",
         parse_room(r, OF(tkv_config_room, n_frequencies), x));
    EACH("tkv_config_print", "json", PLAIN, 1, "OOOOOO", tkv_config_print(&r->cfg, x, NULL, 0, &r->o.bytes));
    EACH("tkv_estimate", "n_tokens", PLAIN, MOST, "AAAOAA", tkv_estimate(&r->cfg, x, 1, &r->o.memory));
    SAFE("tkv_estimate", "n_seqs", EVERY, SEQS, "AAA*AA", tkv_estimate(&r->cfg, 100, x, &r->o.memory));
    SAFE("tkv_max_context", "n_seqs", BUDGET, SEQS, "AAAOAA", tkv_max_context(&r->cfg, x, &r->o.a));
}

/* >>tokens come and go */
static int append_ex(rig *r, size_t at, int x) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.k = k_in;
    p.v = v_in;
    p.n = 1;
    set(&p, at, x);
    return tkv_append_ex(r->kv, &p);
}

/* Entry 1 of a batch, or n_batch. */
static int append_batch(rig *r, size_t at, int x, int n_batch) {
    tkv_append_params p;
    tkv_rows rows[3];
    memset(&p, 0, sizeof p);
    memset(rows, 0, sizeof rows);
    rows[0].n = rows[1].n = 1;
    rows[1].seq = 1;
    set(&rows[1], at, x);
    p.k = k_in;
    p.v = v_in;
    p.batch = rows;
    p.n_batch = n_batch;
    return tkv_append_ex(r->kv, &p);
}

static int append_positions(rig *r, int x) {
    tkv_append_params p;
    tkv_rows rows[2];
    int positions[2] = {LENGTH, 0};
    memset(&p, 0, sizeof p);
    rows[0].seq = 0;
    rows[1].seq = 1;
    rows[0].n = rows[1].n = 1;
    positions[1] = x;
    p.k = k_in;
    p.v = v_in;
    p.batch = rows;
    p.n_batch = 2;
    p.positions = positions;
    return tkv_append_ex(r->kv, &p);
}

static int in_step(rig *r, tkv_status (*step)(tkv_cache *, int), int x) {
    tkv_status st;
    if (tkv_begin(r->kv, 0) != TKV_OK) return TKV_ERR_BROKEN;
    r->state = state_of(r); /* tkv_begin did what was due */
    st = step(r->kv, x);
    (void)tkv_abort(r->kv, 0);
    return st;
}

static void try_tokens(rig *r) {
    EACH("tkv_append", "seq", EVERY, SEQS, "AAAAAA", tkv_append(r->kv, x, 0, k_in, v_in, 1));
    EACH("tkv_append", "layer", EVERY, LAYERS, "AAAAAAAA", tkv_append(r->kv, 0, x, k_in, v_in, 1));
    EACH("tkv_append", "n", EVERY, CHUNK, "AAAOCC", tkv_append(r->kv, 0, 0, k_in, v_in, x));
    EACH("tkv_append_at", "seq", EVERY, SEQS, "AAAAAA", tkv_append_at(r->kv, x, 0, LENGTH, k_in, v_in, 1));
    EACH("tkv_append_at", "layer", EVERY, LAYERS, "AAAAAAAA",
         tkv_append_at(r->kv, 0, x, LENGTH, k_in, v_in, 1));
    EACH("tkv_append_at", "position", EVERY, LENGTH, "RRRORRRR",
         tkv_append_at(r->kv, 0, 0, x, k_in, v_in, 1));
    EACH("tkv_append_at", "n", EVERY, CHUNK, "AAAOCC", tkv_append_at(r->kv, 0, 0, LENGTH, k_in, v_in, x));
    EACH("tkv_append_ex", "positions[1]", EVERY, SHORT, "RRRORRRR", append_positions(r, x));
    EACH("tkv_append_ex", "seq", EVERY, SEQS, "AAAAAA", append_ex(r, OF(tkv_append_params, seq), x));
    EACH("tkv_append_ex", "layer", EVERY, LAYERS, "AAAAAAAA", append_ex(r, OF(tkv_append_params, layer), x));
    EACH("tkv_append_ex", "n", EVERY, CHUNK, "AAAOCC", append_ex(r, OF(tkv_append_params, n), x));
    EACH("tkv_append_ex", "k_type", EVERY, 3, "AAAAAA", append_ex(r, OF(tkv_append_params, k_type), x));
    EACH("tkv_append_ex", "v_type", EVERY, 3, "AAAAAA", append_ex(r, OF(tkv_append_params, v_type), x));
    EACH("tkv_append_ex", "batch[1].seq", EVERY, SEQS, "AAAAAA", append_batch(r, OF(tkv_rows, seq), x, 2));
    EACH("tkv_append_ex", "batch[1].n", EVERY, CHUNK, "AAAOCC", append_batch(r, OF(tkv_rows, n), x, 2));
    EACH("tkv_append_ex", "n_batch", EVERY, SEQS, "AAAOAA", append_batch(r, OF(tkv_rows, n), 1, x));
    EACH("tkv_begin", "seq", EVERY, SEQS, "AAAAAA", tkv_begin(r->kv, x));
    EACH("tkv_commit", "seq", EVERY, SEQS, "AAAAAA", in_step(r, tkv_commit, x));
    EACH("tkv_abort", "seq", EVERY, SEQS, "AAAAAA", in_step(r, tkv_abort, x));
    EACH("tkv_reserve", "seq", EVERY, SEQS, "AAAAAA", tkv_reserve(r->kv, x, 1));
    EACH("tkv_reserve", "n", EVERY, CHUNK, "AAAOAA", tkv_reserve(r->kv, 0, x));
    EACH("tkv_flush", "seq", EVERY, SEQS, "AAAAAA", tkv_flush(r->kv, x, TKV_FLUSH_DUE));
    EACH("tkv_flush", "mode", EVERY, 3, "AAAAAA", tkv_flush(r->kv, 0, (tkv_flush_mode)x));
    EACH("tkv_reset", "seq", EVERY, SEQS, "AAAAAA", tkv_reset(r->kv, x));
    EACH("tkv_truncate", "seq", EVERY, SEQS, "AAAAAA", tkv_truncate(r->kv, x, 0));
    EACH("tkv_truncate", "n_tokens", EVERY, LENGTH, "AAAOOO", tkv_truncate(r->kv, 0, x));
    EACH("tkv_seq_len", "seq", EVERY, SEQS, "OOOOOO", tkv_seq_len(r->kv, x));
    EACH("tkv_layer_len", "seq", EVERY, SEQS, "OOOOOO", tkv_layer_len(r->kv, x, 0));
    EACH("tkv_layer_len", "layer", EVERY, LAYERS, "OOOOOO+O", tkv_layer_len(r->kv, 0, x));
}

/* >>attention and reading */
typedef tkv_status (*attention)(tkv_cache *, const tkv_attend_params *);

static int attend_ex(rig *r, attention run, size_t at, int x) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = q_in;
    p.out = r->o.out;
    set(&p, at, x);
    if (at == OF(tkv_attend_params, mask_bits_n)) p.mask_bits = bits_in;
    return run(r->kv, &p);
}

static int attend_batch(rig *r, attention run, size_t at, int x, int n_batch) {
    tkv_attend_params p;
    tkv_rows rows[3];
    memset(&p, 0, sizeof p);
    memset(rows, 0, sizeof rows);
    rows[0].n = rows[1].n = 1;
    rows[1].seq = 1;
    set(&rows[1], at, x);
    p.q = q_in;
    p.out = r->o.out;
    p.lse = r->o.lse;
    p.mass = r->o.mass;
    p.batch = rows;
    p.n_batch = n_batch;
    return run(r->kv, &p);
}

/* The number of queries where every query sees every key: there may be more of them than tokens. */
static int attend_all(rig *r, attention run, int x) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = x;
    p.non_causal = 1;
    p.q = q_in;
    p.out = r->o.out;
    return run(r->kv, &p);
}

static void try_attention(rig *r, const char *name, attention run) {
    SAFE(name, "layer", EVERY, LAYERS, "AAAAAA*A", attend_ex(r, run, OF(tkv_attend_params, layer), x));
    SAFE(name, "layer", PLAIN, LAYERS, "AAAAAAOA", attend_ex(r, run, OF(tkv_attend_params, layer), x));
    SAFE(name, "seq", EVERY, SEQS, "AAAAAA", attend_ex(r, run, OF(tkv_attend_params, seq), x));
    SAFE(name, "n", PLAIN, LENGTH, "AAAORR", attend_ex(r, run, OF(tkv_attend_params, n), x));
    SAFE(name, "n, non_causal", PLAIN, LENGTH, "AAAOOA", attend_all(r, run, x));
    SAFE(name, "q_type", PLAIN, 3, "AAAAAA", attend_ex(r, run, OF(tkv_attend_params, q_type), x));
    SAFE(name, "out_type", PLAIN, 3, "AAAAAA", attend_ex(r, run, OF(tkv_attend_params, out_type), x));
    SAFE(name, "window", PLAIN, LENGTH, "AAOOOO", attend_ex(r, run, OF(tkv_attend_params, window), x));
    SAFE(name, "mask_bits_n", PLAIN, MOST, "AAAOAA",
         attend_ex(r, run, OF(tkv_attend_params, mask_bits_n), x));
    SAFE(name, "batch[1].seq", PLAIN | SPILL | EVICT, SEQS, "AAAAAA",
         attend_batch(r, run, OF(tkv_rows, seq), x, 2));
    SAFE(name, "batch[1].n", PLAIN, SHORT, "AAAORR", attend_batch(r, run, OF(tkv_rows, n), x, 2));
    SAFE(name, "n_batch", PLAIN, SEQS, "AAAOAA", attend_batch(r, run, OF(tkv_rows, n), 1, x));
}

static int merge(rig *r, int n_rows, int dim) {
    int i;
    for (i = 0; i < 2; i++) r->o.lse[i] = 0.0f;
    for (i = 0; i < 2 * DIM; i++) r->o.out[i] = 1.0f;
    tkv_merge_lse(r->o.out, r->o.lse, q_in, mass_in, n_rows, dim);
    if (n_rows < 0 || dim < 0) CHECK(r->o.lse[0] >= 0.0f && r->o.lse[0] <= 0.0f);
    return TKV_OK;
}

static int merge_empty(rig *r, int dim) { /* a row without keys on this side is copied */
    r->o.lse[0] = -tkv_test_float(0x7f800000u);
    tkv_merge_lse(r->o.out, r->o.lse, q_in, mass_in, 1, dim);
    return TKV_OK;
}

static void try_reading(rig *r) {
    SAFE("tkv_attend", "seq", EVERY, SEQS, "AAAAAA", tkv_attend(r->kv, x, 0, q_in, 1, r->o.out));
    SAFE("tkv_attend", "layer", EVERY, LAYERS, "AAAAAA*A", tkv_attend(r->kv, 0, x, q_in, 1, r->o.out));
    SAFE("tkv_attend", "n", EVERY, LENGTH, "AAA*RR", tkv_attend(r->kv, 0, 0, q_in, x, r->o.out));
    try_attention(r, "tkv_attend_ex", tkv_attend_ex);
    try_attention(r, "tkv_attend_reference", tkv_attend_reference);
    EACH("tkv_merge_lse", "n_rows", PLAIN, 2, "OOOO..", merge(r, x, DIM));
    EACH("tkv_merge_lse", "dim", PLAIN, DIM, "OOOO..", merge(r, 2, x));
    EACH("tkv_merge_lse", "dim, no keys", PLAIN, DIM, "OOOO..", merge_empty(r, x));
    SAFE("tkv_read", "seq", EVERY, SEQS, "AAAAAA", tkv_read(r->kv, x, 0, 0, 1, r->o.k, r->o.v));
    SAFE("tkv_read", "layer", EVERY, LAYERS, "AAAAAA*A", tkv_read(r->kv, 0, x, 0, 1, r->o.k, r->o.v));
    SAFE("tkv_read", "start", EVERY, LENGTH, "AAARRR", tkv_read(r->kv, 0, 0, x, 1, r->o.k, r->o.v));
    SAFE("tkv_read", "n", EVERY, LENGTH, "AAA*RR", tkv_read(r->kv, 0, 0, 0, x, r->o.k, r->o.v));
    SAFE("tkv_read", "n", PLAIN, LENGTH - 399, "AAAORR", tkv_read(r->kv, 0, 0, 399, x, r->o.k, r->o.v));
}

/* >>tables and reports */
static int fit(rig *r, size_t at, int x) {
    tkv_samples s;
    memset(&s, 0, sizeof s);
    s.layer = 4;
    s.n = 512;
    s.k = k_in;
    s.v = v_in;
    set(&s, at, x);
    return tkv_calibration_fit(r->kv, &s);
}

static void try_reports(rig *r) {
    EACH("tkv_calibration_fit", "layer", EVERY, LAYERS, "AAAAAAAA", fit(r, OF(tkv_samples, layer), x));
    EACH("tkv_calibration_fit", "n", EVERY, (1 << 18) + 1, "AAAAAA", fit(r, OF(tkv_samples, n), x));
    EACH("tkv_calibration_fit", "start", PLAIN, (1 << 30) - 512, "AAAOAA", fit(r, OF(tkv_samples, start), x));
    EACH("tkv_calibration_fit", "length", PLAIN, 512, "AAAOOO", fit(r, OF(tkv_samples, length), x));
    SAFE("tkv_tier_counts", "seq", EVERY, SEQS, "AAAAAA", tkv_tier_counts(r->kv, x, 0, &r->o.tiers));
    SAFE("tkv_tier_counts", "layer", EVERY, LAYERS, "AAAAAAOA", tkv_tier_counts(r->kv, 0, x, &r->o.tiers));
    SAFE("tkv_tier_of", "seq", EVERY, SEQS, "AAAAAA", tkv_tier_of(r->kv, x, 0, 0, &r->o.tier));
    SAFE("tkv_tier_of", "layer", EVERY, LAYERS, "AAAAAA*A", tkv_tier_of(r->kv, 0, x, 1, &r->o.tier));
    SAFE("tkv_tier_of", "token", EVERY, LENGTH, "RRRRRR", tkv_tier_of(r->kv, 0, 0, x, &r->o.tier));
    SAFE("tkv_tier_pair", "layer", EVERY, LAYERS, "AAAAAAOA", tkv_tier_pair(r->kv, x, TKV_HOT, &r->o.pair));
    SAFE("tkv_tier_pair", "tier", EVERY, 3, "AAAAAA", tkv_tier_pair(r->kv, 0, (tkv_tier)x, &r->o.pair));
    SAFE("tkv_memory_of", "seq", EVERY, SEQS, "AAAAAA", tkv_memory_of(r->kv, x, 0, &r->o.memory));
    SAFE("tkv_memory_of", "layer", EVERY, LAYERS, "AAAAAAOA", tkv_memory_of(r->kv, 0, x, &r->o.memory));
    SAFE("tkv_quality_of", "layer", EVERY, LAYERS, "AAAAAAOA", tkv_quality_of(r->kv, x, &r->o.quality));
    EACH("tkv_status_text", "s", PLAIN, 1, "++++++", tkv_status_text((tkv_status)x) != NULL);
    EACH("tkv_format_name", "f", PLAIN, TKV_FORMAT_COUNT, "OOOOOO", tkv_format_name((tkv_format)x) != NULL);
    EACH("tkv_isa_name", "isa", PLAIN, TKV_ISA_COUNT, "OOOOOO", tkv_isa_name((tkv_isa)x) != NULL);
    EACH("tkv_isa_available", "isa", PLAIN, TKV_ISA_COUNT, "OOOOOO", tkv_isa_available((tkv_isa)x));
}

/* >>pressure, budget, places outside RAM */
static int policy_init(size_t at, int x) {
    tkv_policy p;
    tkv_policy_config cfg;
    memset(&cfg, 0, sizeof cfg);
    set(&cfg, at, x);
    return tkv_policy_init(&p, &cfg, NULL);
}

static int policy_target(size_t at, int x, int level) {
    tkv_policy_config cfg;
    memset(&cfg, 0, sizeof cfg);
    set(&cfg, at, x);
    return tkv_policy_target(&cfg, .9f, level);
}

static void try_budget(rig *r) {
    EACH("tkv_policy_init", "min_level", PLAIN, 3, "GGGGGG",
         policy_init(OF(tkv_policy_config, min_level), x));
    EACH("tkv_policy_init", "max_level", PLAIN, 2, "GGOOGG",
         policy_init(OF(tkv_policy_config, max_level), x));
    EACH("tkv_policy_target", "level", PLAIN, 2, "++++++",
         policy_target(OF(tkv_policy_config, min_level), 0, x));
    EACH("tkv_policy_target", "min_level", PLAIN, 2, "OOO+OO",
         policy_target(OF(tkv_policy_config, min_level), x, 0));
    EACH("tkv_policy_target", "max_level", PLAIN, 2, "OOO+OO",
         policy_target(OF(tkv_policy_config, max_level), x, 0));
    EACH("tkv_set_level", "level", EVERY, LEVELS, "AAAAAA", tkv_set_level(r->kv, x));
    EACH("tkv_set_hot_tokens", "hot_tokens", EVERY, (1 << 30) - 2, "AAAOAA", tkv_set_hot_tokens(r->kv, x));
    EACH("tkv_maintain", "max_work", EVERY, 1, "AAAOOO", tkv_maintain(r->kv, x, &r->o.a));
    EACH("tkv_spill", "seq", EVERY, SEQS, "AAAAAA", tkv_spill(r->kv, x, 0, 1, &r->o.a));
    EACH("tkv_spill", "layer", SPILL | BUDGET, LAYERS, "AOAAAAAA", tkv_spill(r->kv, 0, x, 1, &r->o.a));
    EACH("tkv_spill", "layer, seq = 1", SPILL | BUDGET, LAYERS, "AOAAAAAA",
         tkv_spill(r->kv, 1, x, 1, &r->o.a));
    EACH("tkv_spill", "n_blocks", SPILL | BUDGET, LENGTH, "AAAOOO", tkv_spill(r->kv, 0, 0, x, &r->o.a));
    EACH("tkv_promote", "seq", EVERY, SEQS, "AAAAAA", tkv_promote(r->kv, x, 0, 10));
    EACH("tkv_promote", "layer", EVERY, LAYERS, "AAAAAAAA", tkv_promote(r->kv, 0, x, 10));
    EACH("tkv_promote", "layer, seq = 1", EVERY, LAYERS, "AAAAAAAA", tkv_promote(r->kv, 1, x, 10));
    EACH("tkv_promote", "position", EVERY, LENGTH, "RRRRRR", tkv_promote(r->kv, 0, 0, x));
}

/* >>feedback and thresholds */
static int feedback_init(size_t at, int x) {
    tkv_feedback f;
    tkv_feedback_config cfg;
    memset(&cfg, 0, sizeof cfg);
    set(&cfg, at, x);
    return tkv_feedback_init(&f, &cfg, NULL);
}

static tkv_feedback scores_of(int n) {
    tkv_feedback f;
    CHECK_EQ(tkv_feedback_init(&f, NULL, NULL), TKV_OK);
    while (n-- > 0) CHECK_EQ(tkv_feedback_observe(&f, .5f), TKV_OK);
    return f;
}

static int advise(rig *r, int hot_tokens, int level) {
    tkv_feedback f = scores_of(120);
    return tkv_feedback_advise(&f, hot_tokens, level, &r->o.advice);
}

static int scores_read(rig *r, int last) {
    tkv_feedback f = scores_of(1200);
    return tkv_feedback_read(&f, last, &r->o.feedback);
}

static tkv_threshold an_entry(void) {
    tkv_threshold e;
    memset(&e, 0, sizeof e);
    memcpy(e.model, "model", 6);
    e.context = 1000;
    e.score = .9f;
    return e;
}

static int put_entry(size_t at, int x) {
    tkv_threshold memory[4], e = an_entry();
    tkv_thresholds t;
    memset(memory, 0, sizeof memory);
    t.entry = memory;
    t.n = 0;
    t.room = 4;
    set(&e, at, x);
    return tkv_thresholds_put(&t, &e);
}

enum { PUT, FIND, CANDIDATES, TRANSFER, PRINT, PARSE, SAVE, LOAD };

static int write_nowhere(void *user, const char *bytes, size_t size) {
    (void)user;
    (void)bytes;
    return size > 1u << 20;
}

static ptrdiff_t read_nothing(void *user, char *bytes, size_t size) {
    (void)user;
    (void)bytes;
    (void)size;
    return 0;
}

/* A store with two entries whose n or room is x. */
static int in_store(rig *r, int what, size_t at, int x) {
    tkv_threshold memory[4], e = an_entry();
    tkv_thresholds t;
    memset(memory, 0, sizeof memory);
    t.entry = memory;
    t.n = 0;
    t.room = 4;
    CHECK_EQ(tkv_thresholds_put(&t, &e), TKV_OK);
    e.layer = 1;
    CHECK_EQ(tkv_thresholds_put(&t, &e), TKV_OK);
    set(&t, at, x);
    e.layer = 2;
    switch (what) {
    case PUT: return tkv_thresholds_put(&t, &e);
    case FIND: return tkv_thresholds_find(&t, "model", 0, 1000, r->o.found);
    case CANDIDATES: return tkv_thresholds_candidates(&t, "model", 0, 1000, r->o.found, 4);
    case TRANSFER: return tkv_thresholds_transfer(&t, "model", "other", 0.0f);
    case PRINT: return tkv_thresholds_print(&t, NULL, 0, &r->o.bytes);
    case PARSE: return tkv_thresholds_parse(&t, "x", 1, NULL, 0);
    case SAVE: return tkv_thresholds_save(&t, write_nowhere, NULL);
    default: return tkv_thresholds_load(&t, read_nothing, NULL, (char *)r->o.code, 100, NULL, 0);
    }
}

static int find_entry(rig *r, int layer, int context, int most) {
    tkv_threshold memory[1];
    tkv_thresholds t;
    memory[0] = an_entry();
    t.entry = memory;
    t.n = t.room = 1;
    if (most) return tkv_thresholds_candidates(&t, "model", layer, context, r->o.found, most);
    return tkv_thresholds_find(&t, "model", layer, context, r->o.found);
}

static void try_stores(rig *r) {
    EACH("tkv_feedback_init", "cooldown", PLAIN, 1000, "GGOOGG",
         feedback_init(OF(tkv_feedback_config, cooldown), x));
    EACH("tkv_feedback_init", "min_hot", PLAIN, (1 << 30) - 1, "GGGOGG",
         feedback_init(OF(tkv_feedback_config, min_hot), x));
    EACH("tkv_feedback_init", "max_hot", PLAIN, (1 << 30) - 1, "GGGOGG",
         feedback_init(OF(tkv_feedback_config, max_hot), x));
    EACH("tkv_feedback_init", "min_level", PLAIN, 7, "GGGOGG",
         feedback_init(OF(tkv_feedback_config, min_level), x));
    EACH("tkv_feedback_init", "max_level", PLAIN, 7, "GGOOGG",
         feedback_init(OF(tkv_feedback_config, max_level), x));
    SAFE("tkv_feedback_advise", "hot_tokens", PLAIN, (1 << 30) - 1, "AAAOAA", advise(r, x, 0));
    SAFE("tkv_feedback_advise", "level", PLAIN, 7, "AAAOAA", advise(r, 64, x));
    SAFE("tkv_feedback_read", "last", PLAIN, 1000, "AAAOAA", scores_read(r, x));
    EACH("tkv_thresholds_put", "layer", PLAIN, 4095, "AOAOAA", put_entry(OF(tkv_threshold, layer), x));
    EACH("tkv_thresholds_put", "context", PLAIN, (1 << 30) - 1, "AAAOAA",
         put_entry(OF(tkv_threshold, context), x));
    EACH("tkv_thresholds_put", "hot_tokens", PLAIN, (1 << 30) - 1, "AOOOAA",
         put_entry(OF(tkv_threshold, hot_tokens), x));
    EACH("tkv_thresholds_put", "warm_tokens", PLAIN, (1 << 30) - 1, "AOOOAA",
         put_entry(OF(tkv_threshold, warm_tokens), x));
    EACH("tkv_thresholds_put", "samples", PLAIN, 1, "AAAOOO", put_entry(OF(tkv_threshold, samples), x));
    EACH("tkv_thresholds_put", "archive.k", PLAIN, TKV_FORMAT_COUNT, "AAAAAA",
         put_entry(OF(tkv_threshold, archive.k), x));
    EACH("tkv_thresholds_put", "n", PLAIN, 5, "AAAAAA", in_store(r, PUT, OF(tkv_thresholds, n), x));
    EACH("tkv_thresholds_put", "room", PLAIN, 2, "AAAC..", in_store(r, PUT, OF(tkv_thresholds, room), x));
    SAFE("tkv_thresholds_find", "layer", PLAIN, 0, "RRRORR", find_entry(r, x, 900, 0));
    SAFE("tkv_thresholds_find", "context", PLAIN, (1 << 30) - 1, "RRRORR", find_entry(r, 0, x, 0));
    SAFE("tkv_thresholds_find", "n", PLAIN, 5, "AAAAAA", in_store(r, FIND, OF(tkv_thresholds, n), x));
    SAFE("tkv_thresholds_candidates", "layer", PLAIN, 4096, "OOOOOO", find_entry(r, x == -2 ? 5 : x, 9, 4));
    SAFE("tkv_thresholds_candidates", "context", PLAIN, 1 << 30, "OOOOOO", find_entry(r, 0, x, 4));
    SAFE("tkv_thresholds_candidates", "most", PLAIN, 4, "OOO+++", find_entry(r, 0, 1000, x));
    SAFE("tkv_thresholds_candidates", "n", PLAIN, 5, "OOOOOO",
         in_store(r, CANDIDATES, OF(tkv_thresholds, n), x));
    EACH("tkv_thresholds_transfer", "n", PLAIN, 5, "AAAAAA", in_store(r, TRANSFER, OF(tkv_thresholds, n), x));
    EACH("tkv_thresholds_transfer", "room", PLAIN, 2, "AAAC..",
         in_store(r, TRANSFER, OF(tkv_thresholds, room), x));
    SAFE("tkv_thresholds_print", "n", PLAIN, 5, "AAAAAA", in_store(r, PRINT, OF(tkv_thresholds, n), x));
    EACH("tkv_thresholds_parse", "room", PLAIN, 1, "AAA*..", in_store(r, PARSE, OF(tkv_thresholds, room), x));
    EACH("tkv_thresholds_save", "n", PLAIN, 5, "AAAAAA", in_store(r, SAVE, OF(tkv_thresholds, n), x));
    EACH("tkv_thresholds_load", "room", PLAIN, 1, "***...", in_store(r, LOAD, OF(tkv_thresholds, room), x));
}

/* >>importance */
static int importance_add(rig *r, int n, int now, int step) {
    tkv_importance tokens[4];
    (void)r;
    memset(tokens, 0, sizeof tokens);
    tokens[0].step = step;
    return tkv_importance_add(NULL, tokens, mass_in, n, now);
}

static int importance_read(rig *r, int n, int now, int position, int step) {
    tkv_importance tokens[4];
    int at[4] = {0, 1, 2, 3};
    memset(tokens, 0, sizeof tokens);
    tokens[0].step = step;
    at[0] = position;
    return tkv_importance_read(NULL, tokens, at, n, now, r->o.x);
}

static int importance_config(rig *r, size_t at, int x) {
    tkv_importance tokens[1];
    tkv_importance_config cfg;
    memset(tokens, 0, sizeof tokens);
    memset(&cfg, 0, sizeof cfg);
    set(&cfg, at, x);
    (void)r;
    return tkv_importance_add(&cfg, tokens, mass_in, 1, 1);
}

enum { CFG_PER_STEP, CFG_COOLDOWN, P_STEP, P_USED, MOVED, COUNT_N, NOW };

static int importance_promote(rig *r, int what, int x) {
    tkv_importance_promotion p;
    const uint64_t source = 15;
    int moved[4] = {TKV_NONE, TKV_NONE, 3, 3}, n = 4, now = 10;
    memset(&p, 0, sizeof p);
    p.step = 5;
    if (what == CFG_PER_STEP) p.cfg.per_step = x;
    if (what == CFG_COOLDOWN) p.cfg.cooldown = x;
    if (what == P_STEP) p.step = x;
    if (what == P_USED) p.used = x;
    if (what == MOVED) moved[2] = x;
    if (what == COUNT_N) n = x;
    if (what == NOW) now = x;
    return tkv_importance_promote(&p, mass_in, &source, moved, n, now, r->o.list, &r->o.a);
}

static int promote_blocks(rig *r, int seq, int layer, int what, int x) {
    tkv_promotion p;
    memset(&p, 0, sizeof p);
    if (what == CFG_PER_STEP) p.by.cfg.per_step = x;
    if (what == CFG_COOLDOWN) p.by.cfg.cooldown = x;
    if (what == P_STEP) p.by.step = x;
    if (what == P_USED) p.by.used = x;
    return tkv_promote_by_importance(r->kv, seq, layer, &p);
}

static void try_importance(rig *r) {
    const int kept = SPILL | REMAT | EVICT | BUDGET;
    EACH("tkv_importance_name", "strategy", PLAIN, TKV_IMPORTANCE_STRATEGIES, "OOOOOO",
         tkv_importance_name((tkv_importance_strategy)x) != NULL);
    EACH("tkv_importance_add", "n", PLAIN, 4, "AAAO..", importance_add(r, x, 9, 9));
    EACH("tkv_importance_add", "now", PLAIN, 9, "AAAOOO", importance_add(r, 4, x, 9));
    EACH("tkv_importance_add", "step", PLAIN, 9, "AAAOAA", importance_add(r, 4, 9, x));
    EACH("tkv_importance_add", "strategy", PLAIN, TKV_IMPORTANCE_STRATEGIES, "GGGGGG",
         importance_config(r, OF(tkv_importance_config, strategy), x));
    EACH("tkv_importance_add", "heads", PLAIN, 3, "GGGGGG",
         importance_config(r, OF(tkv_importance_config, heads), x));
    SAFE("tkv_importance_read", "n", PLAIN, 4, "AAAO..", importance_read(r, x, 9, 0, 9));
    SAFE("tkv_importance_read", "now", PLAIN, 9, "AAAOOO", importance_read(r, 4, x, 0, 9));
    SAFE("tkv_importance_read", "position", PLAIN, 9, "AAAOAA", importance_read(r, 4, 9, x, 9));
    SAFE("tkv_importance_read", "step", PLAIN, 9, "AAAOAA", importance_read(r, 4, 9, 0, x));
    SAFE("tkv_importance_aggregate", "how", PLAIN, 3, "AAAAAA",
         tkv_importance_aggregate((tkv_importance_heads)x, mass_in, 0, 2, 4, r->o.x));
    SAFE("tkv_importance_aggregate", "n_heads", PLAIN, 4, "AAAO..",
         tkv_importance_aggregate(TKV_IMPORTANCE_MAX, mass_in, 0, x, 4, r->o.x));
    SAFE("tkv_importance_aggregate", "n", PLAIN, 4, "AAAO..",
         tkv_importance_aggregate(TKV_IMPORTANCE_MAX, mass_in, 0, 2, x, r->o.x));
    EACH("tkv_importance_bound", "head_dim", PLAIN, DIM, "OOO*..",
         sign_of((double)tkv_importance_bound(q_in, k_in, k_in, x)));
    SAFE("tkv_importance_top", "n", PLAIN, ROOM, "AAAO.A",
         tkv_importance_top(mass_in, NULL, x, 3, r->o.list, &r->o.a));
    SAFE("tkv_importance_top", "n", PLAIN, 1 << 30, "AAAAAA",
         tkv_importance_top(mass_in, NULL, x, 3, r->o.list, &r->o.a));
    SAFE("tkv_importance_top", "k", PLAIN, 8, "AAAOOO",
         tkv_importance_top(mass_in, NULL, 8, x, r->o.list, &r->o.a));
    SAFE("tkv_importance_of", "seq", EVERY, SEQS, "AAAAAA",
         tkv_importance_of(r->kv, x, 0, 0, 1, r->o.x, r->o.mask));
    SAFE("tkv_importance_of", "layer", kept, LAYERS, "AAAAAAOA",
         tkv_importance_of(r->kv, 0, x, 0, 1, r->o.x, r->o.mask));
    SAFE("tkv_importance_of", "start", kept, LENGTH, "RRRRRR",
         tkv_importance_of(r->kv, 0, 0, x, 1, r->o.x, r->o.mask));
    SAFE("tkv_importance_of", "n", kept, LENGTH, "AAAORR",
         tkv_importance_of(r->kv, 0, 0, 0, x, r->o.x, r->o.mask));
    EACH("tkv_importance_add_to", "seq", EVERY, SEQS, "AAAAAA",
         tkv_importance_add_to(r->kv, x, 0, 0, 1, mass_in));
    EACH("tkv_importance_add_to", "layer", kept, LAYERS, "AAAAAAOA",
         tkv_importance_add_to(r->kv, 0, x, 0, 1, mass_in));
    EACH("tkv_importance_add_to", "start", kept, LENGTH, "RRRRRR",
         tkv_importance_add_to(r->kv, 0, 0, x, 1, mass_in));
    EACH("tkv_importance_add_to", "n", kept, LENGTH, "AAAORR",
         tkv_importance_add_to(r->kv, 0, 0, 0, x, mass_in));
    SAFE("tkv_top_tokens", "seq", EVERY, SEQS, "AAAAAA",
         tkv_top_tokens(r->kv, x, 0, 3, 0, r->o.ranked, &r->o.a));
    SAFE("tkv_top_tokens", "layer", kept, LAYERS, "AAAAAAOA",
         tkv_top_tokens(r->kv, 0, x, 3, 0, r->o.ranked, &r->o.a));
    SAFE("tkv_top_tokens", "k", kept, LENGTH, "AAAOOO",
         tkv_top_tokens(r->kv, 0, 0, x, 0, r->o.ranked, &r->o.a));
    SAFE("tkv_top_tokens", "protect", kept, 1, "OOOOOO",
         tkv_top_tokens(r->kv, 0, 0, 3, x, r->o.ranked, &r->o.a));
    SAFE("tkv_importance_promote", "per_step", PLAIN, 64, "GGGOGG", importance_promote(r, CFG_PER_STEP, x));
    SAFE("tkv_importance_promote", "cooldown", PLAIN, 9, "GGOOOO", importance_promote(r, CFG_COOLDOWN, x));
    SAFE("tkv_importance_promote", "step", PLAIN, 10, "OOOOAA", importance_promote(r, P_STEP, x));
    SAFE("tkv_importance_promote", "used", PLAIN, 8, "AAAOOO", importance_promote(r, P_USED, x));
    SAFE("tkv_importance_promote", "moved", PLAIN, 10, "AAOOAA", importance_promote(r, MOVED, x));
    SAFE("tkv_importance_promote", "n", PLAIN, 4, "AAAO..", importance_promote(r, COUNT_N, x));
    SAFE("tkv_importance_promote", "now", PLAIN, 10, "AAAOOO", importance_promote(r, NOW, x));
    EACH("tkv_promote_by_importance", "seq", EVERY, SEQS, "AAAAAA", promote_blocks(r, x, 0, -1, 0));
    EACH("tkv_promote_by_importance", "layer", EVERY, LAYERS, "AAAAAAAA", promote_blocks(r, 0, x, -1, 0));
    EACH("tkv_promote_by_importance", "layer, seq = 1", EVERY, LAYERS, "AAAAAAAA",
         promote_blocks(r, 1, x, -1, 0));
    EACH("tkv_promote_by_importance", "per_step", kept, 64, "GGG*GG",
         promote_blocks(r, 0, 0, CFG_PER_STEP, x));
    EACH("tkv_promote_by_importance", "cooldown", kept, 4, "GG****",
         promote_blocks(r, 0, 0, CFG_COOLDOWN, x));
    EACH("tkv_promote_by_importance", "step", kept, LENGTH, "******", promote_blocks(r, 0, 0, P_STEP, x));
    EACH("tkv_promote_by_importance", "used", kept, 8, "AAA***", promote_blocks(r, 0, 0, P_USED, x));
}

/* >>eviction: rules */
enum { SCORE, SELECT };

static int evict_view(rig *r, int what, tkv_evict_kind kind, size_t at, int x) {
    tkv_evict_config cfg;
    tkv_evict_view v;
    memset(&cfg, 0, sizeof cfg);
    memset(&v, 0, sizeof v);
    cfg.kind = kind;
    v.n = 40;
    v.observed = v.mass = mass_in;
    v.keys = k_in;
    v.n_kv_heads = 1;
    v.head_dim = DIM;
    set(&v, at, x);
    if (what == SCORE) return tkv_evict_score(&cfg, &v, r->o.x);
    return tkv_evict_select(&cfg, &v, mass_in, 8, r->o.mask, &r->o.result);
}

static int evict_position(rig *r, int what, int x) {
    tkv_evict_config cfg;
    tkv_evict_view v;
    int at[4] = {0, 1, 2, 3};
    memset(&cfg, 0, sizeof cfg);
    memset(&v, 0, sizeof v);
    cfg.kind = TKV_EVICT_RANDOM;
    v.n = 4;
    v.position = at;
    at[3] = x;
    if (what == SCORE) return tkv_evict_score(&cfg, &v, r->o.x);
    return tkv_evict_select(&cfg, &v, mass_in, 2, r->o.mask, &r->o.result);
}

static int evict_config(rig *r, int what, size_t at, int x) {
    tkv_evict_config cfg;
    tkv_evict_view v;
    memset(&cfg, 0, sizeof cfg);
    memset(&v, 0, sizeof v);
    cfg.kind = TKV_EVICT_SNAPKV;
    v.n = 40;
    v.observed = mass_in;
    set(&cfg, at, x);
    if (what == SCORE) return tkv_evict_score(&cfg, &v, r->o.x);
    return tkv_evict_select(&cfg, &v, mass_in, 8, r->o.mask, &r->o.result);
}

static int evict_keep(rig *r, int keep) {
    tkv_evict_config cfg;
    tkv_evict_view v;
    memset(&cfg, 0, sizeof cfg);
    memset(&v, 0, sizeof v);
    cfg.kind = TKV_EVICT_FIFO;
    v.n = 40;
    return tkv_evict_select(&cfg, &v, mass_in, keep, r->o.mask, &r->o.result);
}

static int evict_due(size_t at, int value, int n, int incoming, int budget) {
    tkv_evict_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.kind = TKV_EVICT_H2O;
    set(&cfg, at, value);
    return tkv_evict_due(&cfg, n, incoming, budget);
}

static int evict_budgets(rig *r, tkv_evict_shape shape, size_t at, int x) {
    tkv_evict_budget b;
    memset(&b, 0, sizeof b);
    b.shape = shape;
    b.n_layers = 4;
    b.total = 400;
    b.n_tokens = 1000;
    set(&b, at, x);
    return tkv_evict_budgets(&b, r->o.list);
}

static int evict_budgets_total(rig *r, tkv_evict_shape shape, int64_t total) {
    tkv_evict_budget b;
    memset(&b, 0, sizeof b);
    b.shape = shape;
    b.n_layers = ROOM;
    b.total = total;
    b.n_tokens = (1 << 30) - 1;
    b.beta = 100;
    return tkv_evict_budgets(&b, r->o.list);
}

static void try_eviction_rules(rig *r) {
    const int lists[] = {SCORE, SELECT};
    const char *const names[] = {"tkv_evict_score", "tkv_evict_select"};
    int i, shape;
    EACH("tkv_evict_name", "kind", PLAIN, TKV_EVICT_KINDS, "OOOOOO",
         tkv_evict_name((tkv_evict_kind)x) != NULL);
    EACH("tkv_evict_needs", "kind", PLAIN, TKV_EVICT_KINDS, "OOOOOO", tkv_evict_needs((tkv_evict_kind)x));
    for (i = 0; i < 2; i++) {
        SAFE(names[i], "n", PLAIN, 1 << 30, "AAAAAA",
             evict_view(r, lists[i], TKV_EVICT_H2O, OF(tkv_evict_view, n), x));
        SAFE(names[i], "position", PLAIN, 3, "AAAOOO", evict_position(r, lists[i], x));
        SAFE(names[i], "kind", PLAIN, TKV_EVICT_KINDS, "GGGGGG",
             evict_config(r, lists[i], OF(tkv_evict_config, kind), x));
        SAFE(names[i], "sink_tokens", PLAIN, 40, "GGOOOO",
             evict_config(r, lists[i], OF(tkv_evict_config, sink_tokens), x));
        SAFE(names[i], "recent_tokens", PLAIN, 40, "GGOOOO",
             evict_config(r, lists[i], OF(tkv_evict_config, recent_tokens), x));
        SAFE(names[i], "pool", PLAIN, 63, "GGGOGG", evict_config(r, lists[i], OF(tkv_evict_config, pool), x));
        SAFE(names[i], "seed", PLAIN, 1, "OOOOOO", evict_config(r, lists[i], OF(tkv_evict_config, seed), x));
        SAFE(names[i], "batch", PLAIN, 1, "GGGOOO",
             evict_config(r, lists[i], OF(tkv_evict_config, batch), x));
    }
    SAFE("tkv_evict_score", "n_kv_heads", PLAIN, 1, "AAAO..",
         evict_view(r, SCORE, TKV_EVICT_KEYDIFF, OF(tkv_evict_view, n_kv_heads), x));
    SAFE("tkv_evict_score", "head_dim", PLAIN, 256, "AAA.AA",
         evict_view(r, SCORE, TKV_EVICT_KEYDIFF, OF(tkv_evict_view, head_dim), x));
    SAFE("tkv_evict_select", "keep", PLAIN, 40, "AAAOOO", evict_keep(r, x));
    EACH("tkv_evict_due", "n", PLAIN, 100, "OOO+++", evict_due(OF(tkv_evict_config, seed), 0, x, 1, 100));
    EACH("tkv_evict_due", "incoming", PLAIN, 90, "OOO+++",
         evict_due(OF(tkv_evict_config, seed), 0, 20, x, 100));
    EACH("tkv_evict_due", "budget", PLAIN, 100, "OOOOOO", evict_due(OF(tkv_evict_config, seed), 0, 99, 1, x));
    EACH("tkv_evict_due", "batch", PLAIN, 9, "OOO+++",
         evict_due(OF(tkv_evict_config, batch), x, 100, 9, 100));
    EACH("tkv_evict_due", "all", PLAIN, INT_MAX, "OOO+++", evict_due(OF(tkv_evict_config, seed), 0, x, x, 8));
    EACH("tkv_evict_list", "n", PLAIN, ROOM, "OOO+..", tkv_evict_list(bits_in, x, r->o.list));
    EACH("tkv_evict_compact", "n", PLAIN, ROOM, "OOO*..",
         tkv_evict_compact(bits_in, x, r->o.list, sizeof *r->o.list));
    SAFE("tkv_evict_key_norms", "n", PLAIN, 4, "AAAO..", tkv_evict_key_norms(k_in, x, 1, DIM, r->o.x));
    SAFE("tkv_evict_key_norms", "n_kv_heads", PLAIN, 4, "AAAO..",
         tkv_evict_key_norms(k_in, 4, x, DIM, r->o.x));
    SAFE("tkv_evict_key_norms", "head_dim", PLAIN, 256, "AAAOAA", tkv_evict_key_norms(k_in, 4, 1, x, r->o.x));
    SAFE("tkv_evict_budgets", "shape", PLAIN, 3, "AAAAAA",
         evict_budgets(r, TKV_EVICT_UNIFORM, OF(tkv_evict_budget, shape), x));
    for (shape = TKV_EVICT_UNIFORM; shape <= TKV_EVICT_LINEAR; shape++) {
        const tkv_evict_shape s = (tkv_evict_shape)shape;
        SAFE("tkv_evict_budgets", "n_layers", PLAIN, 4097, "AAAAAA",
             evict_budgets(r, s, OF(tkv_evict_budget, n_layers), x));
        SAFE("tkv_evict_budgets", "n_tokens", PLAIN, (1 << 30) - 1, "AAAOAA",
             evict_budgets(r, s, OF(tkv_evict_budget, n_tokens), x));
        SAFE("tkv_evict_budgets", "window", PLAIN, (1 << 30) - 1, "AAOOAA",
             evict_budgets(r, s, OF(tkv_evict_budget, window), x));
        SAFE("tkv_evict_budgets", "beta", PLAIN, 100, "AAAOAA",
             evict_budgets(r, s, OF(tkv_evict_budget, beta), x));
        SAFE("tkv_evict_budgets", "total", PLAIN, (1 << 30) - 1, "AAA*AA",
             evict_budgets_total(r, s, x < 0 ? x : (int64_t)x * ROOM));
    }
}

/* >>eviction in a cache */
static int evict(rig *r, size_t at, int x) {
    tkv_evict_params p;
    memset(&p, 0, sizeof p);
    p.layer = TKV_NONE;
    p.keep = 100;
    set(&p, at, x);
    return tkv_evict(r->kv, &p);
}

static int evict_by(rig *r, tkv_evict_kind kind, size_t at, int x) {
    tkv_evict_config cfg;
    tkv_evict_params p;
    memset(&cfg, 0, sizeof cfg);
    memset(&p, 0, sizeof p);
    cfg.kind = kind;
    set(&cfg, at, x);
    p.layer = TKV_NONE;
    p.keep = 100;
    p.evict = &cfg;
    return tkv_evict(r->kv, &p);
}

static void try_eviction(rig *r) {
    EACH("tkv_evict", "seq", EVERY, SEQS, "AAAAAA", evict(r, OF(tkv_evict_params, seq), x));
    EACH("tkv_evict", "layer", EVICT, LAYERS, "AAOAAAAA", evict(r, OF(tkv_evict_params, layer), x));
    EACH("tkv_evict", "keep", EVICT, LENGTH, "AAAOOO", evict(r, OF(tkv_evict_params, keep), x));
    EACH("tkv_evict", "evict.kind", EVICT, TKV_EVICT_KINDS, "GGGGGG",
         evict_by(r, TKV_EVICT_H2O, OF(tkv_evict_config, kind), x));
    EACH("tkv_evict", "evict.sink_tokens", EVICT, LENGTH, "GGOOOO",
         evict_by(r, TKV_EVICT_H2O, OF(tkv_evict_config, sink_tokens), x));
    EACH("tkv_evict", "evict.recent_tokens", EVICT, LENGTH, "GGOOOO",
         evict_by(r, TKV_EVICT_H2O, OF(tkv_evict_config, recent_tokens), x));
    EACH("tkv_evict", "evict.batch", EVICT, LENGTH, "GGGOOO",
         evict_by(r, TKV_EVICT_FIFO, OF(tkv_evict_config, batch), x));
    EACH("tkv_drop", "seq", EVERY, SEQS, "AAAAAA", tkv_drop(r->kv, x, 0, bits_in, 64));
    EACH("tkv_drop", "layer", EVICT | BUDGET, LAYERS, "AAOAAAAA", tkv_drop(r->kv, 0, x, bits_in, 64));
    EACH("tkv_drop", "n", EVICT | BUDGET, LENGTH, "AAAOOO", tkv_drop(r->kv, 0, 0, bits_in, x));
    EACH("tkv_pin", "seq", EVERY, SEQS, "AAAAAA", tkv_pin(r->kv, x, 0, 1, 1));
    EACH("tkv_pin", "start", EVICT | BUDGET, LENGTH, "AAAOOA", tkv_pin(r->kv, 0, x, 1, 1));
    EACH("tkv_pin", "n", EVICT | BUDGET, LENGTH, "AAAOOA", tkv_pin(r->kv, 0, 1, x, 1));
    EACH("tkv_pin", "pinned", EVICT | BUDGET, 1, "OOOOOO", tkv_pin(r->kv, 0, 1, 2, x));
    EACH("tkv_pin_until", "seq", EVERY, SEQS, "AAAAAA", tkv_pin_until(r->kv, x, 0, 1, 500));
    EACH("tkv_pin_until", "start", EVICT | BUDGET, LENGTH, "AAAOOA", tkv_pin_until(r->kv, 0, x, 1, 500));
    EACH("tkv_pin_until", "n", EVICT | BUDGET, LENGTH, "AAAOOA", tkv_pin_until(r->kv, 0, 1, x, 500));
    EACH("tkv_pin_until", "length", EVICT | BUDGET, (1 << 30) - 2, "AAAOAA",
         tkv_pin_until(r->kv, 0, 1, 2, x));
    SAFE("tkv_alive", "seq", EVERY, SEQS, "AAAAAA", tkv_alive(r->kv, x, 0, 0, 1, r->o.mask));
    SAFE("tkv_alive", "layer", EVERY, LAYERS, "AAAAAAOA", tkv_alive(r->kv, 0, x, 0, 1, r->o.mask));
    SAFE("tkv_alive", "start", EVERY, LENGTH, "AAARRR", tkv_alive(r->kv, 0, 0, x, 1, r->o.mask));
    SAFE("tkv_alive", "n", EVERY, LENGTH, "AAAORR", tkv_alive(r->kv, 0, 0, 0, x, r->o.mask));
    SAFE("tkv_alive", "start, n = 0", EVERY, LENGTH, "AAAORR", tkv_alive(r->kv, 0, 0, x, 0, NULL));
}

/* >>what is computed again */
static tkv_remat_config model(void) {
    tkv_remat_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.n_layers = LAYERS;
    cfg.n_heads = HEADS;
    cfg.head_dim = DIM;
    cfg.layer_params = 1000.0;
    cfg.min_materialized = TKV_NONE;
    return cfg;
}

static tkv_remat remat_of(void) {
    const tkv_remat_config cfg = model();
    tkv_remat m;
    CHECK_EQ(tkv_remat_init(&m, &cfg, NULL), TKV_OK);
    return m;
}

static int remat_init(size_t at, int x) {
    tkv_remat_config cfg = model();
    tkv_remat m;
    set(&cfg, at, x);
    return tkv_remat_init(&m, &cfg, NULL);
}

enum { OF_N, OF_NOW, OF_BLOCK };

static int decide(rig *r, int restore, int what, size_t at, int x) {
    tkv_remat m = remat_of();
    tkv_remat_block b[2];
    int n = 2, now = 200;
    memset(b, 0, sizeof b);
    b[0].end = b[1].start = 64;
    b[1].end = 128;
    b[0].bytes = b[1].bytes = 1000;
    b[0].dropped = b[1].dropped = restore;
    m.step = 100;
    if (what == OF_N) n = x;
    if (what == OF_NOW) now = x;
    if (what == OF_BLOCK) set(&b[1], at, x);
    if (restore) return tkv_remat_restore(&m, b, n, now, &r->o.a, &r->o.b);
    return tkv_remat_decide(&m, b, n, now, 1.0f, 500, r->o.action, &r->o.bytes);
}

static double flops(int start, int end, int layers) {
    const tkv_remat m = remat_of();
    return tkv_remat_flops(&m, start, end, layers);
}

static tkv_status give_all(void *user, tkv_cache *kv, int seq, int first, int n_layers, int start, int n) {
    tkv_status st = TKV_OK;
    int l;
    (void)user;
    for (l = first; l < first + n_layers && !st; l++)
        if (l != 1 && l != 2) st = tkv_remat_give(kv, seq, l, start, k_in, v_in, n);
    return st;
}

static int recompute(rig *r, int seq, int last, int step) {
    tkv_remat m = remat_of();
    m.step = last;
    return tkv_recompute(r->kv, seq, &m, step, give_all, NULL, &r->o.a);
}

static int remat_free(rig *r, int seq, int capacity) {
    tkv_remat m = remat_of();
    return tkv_remat_free(r->kv, seq, &m, 1.0f, 100000, r->o.block, r->o.action, capacity, &r->o.bytes);
}

static void try_remat(rig *r) {
    EACH("tkv_remat_init", "n_layers", PLAIN, 4096, "GGGOGG", remat_init(OF(tkv_remat_config, n_layers), x));
    EACH("tkv_remat_init", "n_heads", PLAIN, 65536, "GGGOGG", remat_init(OF(tkv_remat_config, n_heads), x));
    EACH("tkv_remat_init", "head_dim", PLAIN, 256, "GGGOGG", remat_init(OF(tkv_remat_config, head_dim), x));
    EACH("tkv_remat_init", "min_materialized", PLAIN, 1, "GGOOOO",
         remat_init(OF(tkv_remat_config, min_materialized), x));
    EACH("tkv_remat_init", "sink_tokens", PLAIN, 1, "GGOOOO",
         remat_init(OF(tkv_remat_config, sink_tokens), x));
    EACH("tkv_remat_flops", "start", PLAIN, 100, "AAAOAA", sign_of(flops(x, 100, 0)));
    EACH("tkv_remat_flops", "end", PLAIN, 100, "AAAO++", sign_of(flops(100, x, 0)));
    EACH("tkv_remat_flops", "layers", PLAIN, LAYERS, "AAA+AA", sign_of(flops(0, 100, x)));
    SAFE("tkv_remat_decide", "n", PLAIN, 2, "AAAO..", decide(r, 0, OF_N, 0, x));
    SAFE("tkv_remat_decide", "now", PLAIN, 127, "AAAOOO", decide(r, 0, OF_NOW, 0, x));
    SAFE("tkv_remat_decide", "start", PLAIN, 65, "AAAAAA",
         decide(r, 0, OF_BLOCK, OF(tkv_remat_block, start), x));
    SAFE("tkv_remat_decide", "end", PLAIN, 201, "AAAOAA",
         decide(r, 0, OF_BLOCK, OF(tkv_remat_block, end), x));
    SAFE("tkv_remat_decide", "layers", PLAIN, LAYERS, "AAAOAA",
         decide(r, 0, OF_BLOCK, OF(tkv_remat_block, layers), x));
    SAFE("tkv_remat_restore", "n", PLAIN, 2, "AAAO..", decide(r, 1, OF_N, 0, x));
    SAFE("tkv_remat_restore", "step", PLAIN, 100, "AAAOOO", decide(r, 1, OF_NOW, 0, x));
    SAFE("tkv_remat_restore", "start", PLAIN, 65, "AAAAAA",
         decide(r, 1, OF_BLOCK, OF(tkv_remat_block, start), x));
    SAFE("tkv_remat_restore", "end", PLAIN, 65, "AAAOOO",
         decide(r, 1, OF_BLOCK, OF(tkv_remat_block, end), x));
    SAFE("tkv_remat_restore", "layers", PLAIN, LAYERS, "AAAOAA",
         decide(r, 1, OF_BLOCK, OF(tkv_remat_block, layers), x));
    EACH("tkv_remat_drop", "seq", EVERY, SEQS, "AAAAAA", tkv_remat_drop(r->kv, x, 64, &r->o.a));
    EACH("tkv_remat_drop", "n_tokens", EVERY, LENGTH, "AAAOOO", tkv_remat_drop(r->kv, 0, x, &r->o.a));
    SAFE("tkv_remat_missing", "seq", EVERY, SEQS, "AAAAAA", tkv_remat_missing(r->kv, x, &r->o.a, &r->o.b));
    EACH("tkv_remat_give", "seq", EVERY, SEQS, "AAAAAA", tkv_remat_give(r->kv, x, 0, 4, k_in, v_in, 64));
    EACH("tkv_remat_give", "layer", EVERY, LAYERS, "AAAAAAAA",
         tkv_remat_give(r->kv, 0, x, 4, k_in, v_in, 64));
    EACH("tkv_remat_give", "layer, seq = 1", EVERY, LAYERS, "AAAAAAAA",
         tkv_remat_give(r->kv, 1, x, 4, k_in, v_in, 64));
    EACH("tkv_remat_give", "start", EVERY, LENGTH, "AAARRR", tkv_remat_give(r->kv, 0, 0, x, k_in, v_in, 64));
    EACH("tkv_remat_give", "n", REMAT, LENGTH - 4, "AAAORR", tkv_remat_give(r->kv, 0, 0, 4, k_in, v_in, x));
    EACH("tkv_recompute", "seq", EVERY, SEQS, "AAAAAA", recompute(r, x, 0, 1));
    EACH("tkv_recompute", "step", REMAT, 9, "AAAOOO", recompute(r, 0, 9, x));
    EACH("tkv_recompute", "r.step", REMAT, 9, "OOOOAA", recompute(r, 0, x, 9));
    SAFE("tkv_remat_blocks", "seq", EVERY, SEQS, "AAAAAA",
         tkv_remat_blocks(r->kv, x, r->o.block, BLOCKS, &r->o.a));
    SAFE("tkv_remat_blocks", "capacity", EVERY, BLOCKS, "AAAOOO",
         tkv_remat_blocks(r->kv, 0, r->o.block, x, &r->o.a));
    EACH("tkv_remat_free", "seq", EVERY, SEQS, "AAAAAA", remat_free(r, x, BLOCKS));
    EACH("tkv_remat_free", "capacity", EVERY, 1, "AAAAAO", remat_free(r, 0, x));
}

/* >>codec */
enum { SIZE, BITS, ENCODE, DECODE };

static int codec(rig *r, int what, tkv_format format, size_t at, int x) {
    tkv_codec c;
    size_t size;
    memset(&c, 0, sizeof c);
    c.format = format;
    c.head_dim = DIM;
    c.rope.dim = DIM;
    set(&c, at, x);
    if (what == SIZE) return tkv_encoded_size(&c) > 0 ? TKV_OK : TKV_ERR_ARG;
    if (what == BITS) return sign_of(tkv_format_bits(&c)) > 0 ? TKV_OK : TKV_ERR_ARG;
    size = tkv_encoded_size(&c) ? tkv_encoded_size(&c) : sizeof r->o.code;
    if (size > sizeof r->o.code) return TKV_ERR_BROKEN;
    if (what == ENCODE) return tkv_encode(&c, k_in, 0, 64, r->o.code, size);
    return tkv_decode(&c, r->o.code, size, 64, r->o.k, 0);
}

static int coded(rig *r, int decode, int n_tokens) {
    tkv_codec c;
    memset(&c, 0, sizeof c);
    c.format = TKV_KIVI4;
    c.head_dim = DIM;
    if (decode) return tkv_decode(&c, r->o.code, sizeof r->o.code, n_tokens, r->o.k, 0);
    return tkv_encode(&c, k_in, 0, n_tokens, r->o.code, sizeof r->o.code);
}

static void try_codec(rig *r) {
    static const char *const names[] = {"tkv_encoded_size", "tkv_format_bits", "tkv_encode", "tkv_decode"};
    int i;
    for (i = 0; i < COUNT(names); i++) {
        SAFE(names[i], "format", PLAIN, TKV_FORMAT_COUNT, "AAAAAA",
             codec(r, i, TKV_KIVI4, OF(tkv_codec, format), x));
        SAFE(names[i], "side", PLAIN, 2, "AAAAAA", codec(r, i, TKV_KIVI4, OF(tkv_codec, side), x));
        SAFE(names[i], "head_dim", PLAIN, 256, "AAAOAA", codec(r, i, TKV_KIVI4, OF(tkv_codec, head_dim), x));
        SAFE(names[i], "group_size", PLAIN, 64, "AAAOAA",
             codec(r, i, TKV_KIVI4, OF(tkv_codec, group_size), x));
        SAFE(names[i], "fit", PLAIN, 5, "AAAOAA", codec(r, i, TKV_KIVI4, OF(tkv_codec, fit), x));
        SAFE(names[i], "rotate", PLAIN, 3, "AAAOAA", codec(r, i, TKV_INT8, OF(tkv_codec, rotate), x));
        SAFE(names[i], "center_k", PLAIN, 1, "AAAOAA", codec(r, i, TKV_INT8, OF(tkv_codec, center_k), x));
        SAFE(names[i], "subspaces", PLAIN, 16, "AAAOAA",
             codec(r, i, TKV_SUBSPACE4, OF(tkv_codec, subspaces), x));
        SAFE(names[i], "kvquant", PLAIN, 15, "AAAOAA", codec(r, i, TKV_KVQUANT3, OF(tkv_codec, kvquant), x));
        SAFE(names[i], "position", PLAIN, 1 << 30, "AAAOOO",
             codec(r, i, TKV_KVQUANT3, OF(tkv_codec, position), x));
        SAFE(names[i], "rope.dim", PLAIN, DIM, "AAAOAA",
             codec(r, i, TKV_KVQUANT3, OF(tkv_codec, rope.dim), x));
        SAFE(names[i], "rope.interleaved", PLAIN, 1, "AAAOAA",
             codec(r, i, TKV_KVQUANT3, OF(tkv_codec, rope.interleaved), x));
    }
    SAFE("tkv_encode", "n_tokens", PLAIN, 64, "AAAOAA", coded(r, 0, x));
    SAFE("tkv_decode", "n_tokens", PLAIN, 64, "AAAOAA", coded(r, 1, x));
}

/* >>all rows in all caches */
static void try_all(int kind) {
    rig *r = (rig *)calloc(1, sizeof *r);
    if (!r) exit(2);
    r->kind = kind;
    configure(r);
    build(r);
    r->state = state_of(r);
    CHECK(state_of(r) == r->state);
    try_tokens(r);
    try_reading(r);
    try_reports(r);
    try_budget(r);
    try_eviction(r);
    try_remat(r);
    try_importance(r);
    try_plans(r);
    if (kind == PLAIN) { /* these know no cache */
        try_stores(r);
        try_eviction_rules(r);
        try_codec(r);
    }
    unbuild(r);
    if (r->cfg.spill.store) test_store_end(&r->store);
    free(r);
}

TEST(plain_cache) { try_all(PLAIN); }
TEST(blocks_outside_ram) {
    if (tkv_test_quick()) SKIP("slow under emulators");
    try_all(SPILL);
}
TEST(discarded_blocks) { try_all(REMAT); }
TEST(evicted_tokens) {
    if (tkv_test_quick()) SKIP("slow under emulators");
    try_all(EVICT);
}
TEST(everything_under_a_budget) { try_all(BUDGET); }

int main(int argc, char **argv) {
    tkv_rng rng = tkv_rng_seed(20);
    int i;
    tkv_rng_fill(&rng, k_in, ROOM * DIM, 1.0);
    tkv_rng_fill(&rng, v_in, ROOM * DIM, 1.0);
    tkv_rng_fill(&rng, q_in, ROOM * HEADS * DIM, 1.0);
    for (i = 0; i < ROOM; i++) {
        mass_in[i] = (float)tkv_rng_uniform(&rng);
        bits_in[i] = tkv_rng_u64(&rng);
    }
    tkv_test_begin(argc, argv);
    RUN(plain_cache);
    RUN(blocks_outside_ram);
    RUN(discarded_blocks);
    RUN(evicted_tokens);
    RUN(everything_under_a_budget);
    return tkv_test_end();
}
