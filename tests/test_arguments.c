/*
 * test_arguments.c - calls every public function with a number out of range: a sequence, a layer, a position, a
 * count, an index, a length. Each line EACH(...) below is a row of a table. It has the function, the argument, and
 * the caches in which the expectation holds. The limit N of the argument follows, then one letter for each value:
 *
 *     value    INT_MIN  -2  -1  N  N+1  INT_MAX  1 (a layer that shares)  2 (a layer without a cache)
 *
 *     A R C G S   TKV_ERR_ARG, _RANGE, _CAPACITY, _CONFIG, _STATE      O   TKV_OK (or the number 0, or NULL)
 *     +           a number above 0, or a name                          *   any answer
 *     .           not called: the test has less memory than this number says, or another row tries the value
 *
 * TKV_OFF is -1 and TKV_UNLIMITED is -2, so every row tries them. Rows whose N is another sentinel try that one.
 *
 * In caches that a row does not name, any answer passes. In every cache an error must change nothing: lengths,
 * bytes, K and V, importance. Before each call another one fails, and a failure must replace its sentence. tests/test_house.py compares the names in the rows with the functions that api.h
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
    MAX_TOKENS = 1000, /* max_tokens */
    LEVELS = 3,
    CAPACITY = 1024,                /* tokens that every array of the test can hold */
    VALUES = 64 * TKV_MAX_HEAD_DIM, /* more than those of CAPACITY tokens: a block of the widest head */
    BLOCKS = 64,
    PLAIN = 1, /* kinds of caches */
    OFFLOAD = 2,
    DISCARD = 4,
    EVICT = 8,
    BUDGET = 16,
    EVERY = 31
};

/* >>caches */
typedef struct outputs { /* the output arguments of all functions */
    float k[VALUES], v[CAPACITY * DIM], out[CAPACITY * HEADS * DIM], lse[CAPACITY * HEADS],
        scores[2 * CAPACITY], x[CAPACITY];
    uint64_t mask[CAPACITY / 64];
    int list[CAPACITY], a, b;
    size_t bytes;
    uint8_t code[65536], tiers[CAPACITY];
    tkv_layer_info layer;
    tkv_memory_info memory;
    tkv_level_info level;
    tkv_seq_memory_info seq_memory;
    tkv_quality_info quality;
    tkv_advice advice;
    tkv_feedback_info feedback;
    tkv_feedback controller;
    tkv_pressure pressure;
    tkv_remat remat;
    tkv_threshold found[4];
    tkv_ranked ranked[CAPACITY];
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
    uint64_t state_hash, output_hash; /* hashes from before the call */
} rig;

static float k_in[VALUES], v_in[CAPACITY * DIM], q_in[CAPACITY * HEADS * DIM], scores_in[CAPACITY];
static uint64_t bits_in[CAPACITY];

static void configure_cache(rig *r) {
    tkv_config *cfg = &r->cfg;
    int l;
    *cfg = make_sized_config(LAYERS, HEADS, 1, DIM, SEQS, CHUNK);
    memset(r->layers, 0, sizeof r->layers);
    memset(r->ladder, 0, sizeof r->ladder);
    cfg->limits.max_tokens = MAX_TOKENS;
    cfg->tiers.warm_tokens = 64;
    cfg->tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg->tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg->layers = r->layers;
    r->layers[1].share_kv = 1;
    r->layers[2].no_cache = 1;
    for (l = 0; l < LEVELS; l++) {
        r->ladder[l].warm = pair_of(l ? TKV_KIVI4 : TKV_Q8, l ? TKV_KIVI4 : TKV_Q8);
        r->ladder[l].archive = pair_of(l > 1 ? TKV_KIVI2 : TKV_KIVI4, l > 1 ? TKV_KIVI2 : TKV_KIVI4);
    }
    if (r->kind == PLAIN) {
        cfg->meter.heads = 2;
        r->layers[3].window = 100;
        r->layers[4].archive = pair_of(TKV_KVQUANT3, TKV_KVQUANT3);
        cfg->format.kvquant = TKV_KVQUANT_POST_ROPE;
    } else {
        cfg->importance.sample_every = 1;
        cfg->budget.ladder = r->ladder;
        cfg->budget.n_levels = LEVELS;
    }
    if (r->kind == DISCARD || r->kind == BUDGET) cfg->budget.discard = 1;
    if (r->kind == EVICT || r->kind == BUDGET) cfg->evict.policy = TKV_EVICT_H2O;
    if (r->kind == EVICT) cfg->tiers.n_anchors = 4;
    if (r->kind == OFFLOAD || r->kind == BUDGET) {
        attach_test_store(&r->store, cfg);
        cfg->offload.keep_exact = r->kind == OFFLOAD;
    }
    if (r->kind == BUDGET) {
        tkv_memory_info m;
        CHECK_EQ(tkv_estimate_memory(cfg, LENGTH, SEQS, &m), TKV_OK);
        cfg->budget.bytes = m.total / 64 * 49;
    }
}

static void append_tokens(rig *r, int seq, int n) {
    int l, at;
    for (at = 0; at < n; at += CHUNK) {
        const int some = n - at < CHUNK ? n - at : CHUNK;
        for (l = 0; l < LAYERS; l++)
            if (l != 1 && l != 2) {
                const tkv_status st = tkv_append(r->kv, seq, l, k_in + at * DIM, v_in + at * DIM, some);
                CHECK_MSG(st == TKV_OK, "%s", tkv_get_last_error(r->kv));
                CHECK_EQ(tkv_attend(r->kv, seq, l, q_in, some < 8 ? some : 8, r->o.out), TKV_OK);
            }
    }
}

/* Makes a cache with blocks in every tier. Its kind decides whether blocks are offloaded or discarded, or have evicted
 * tokens. Each call that changes the cache makes another one, so few queries attend. */
static void build_cache(rig *r) {
    uint64_t victims[CAPACITY / 64];
    int n = 0;
    r->kv = create_cache(&r->cfg);
    append_tokens(r, 1, SHORT);
    append_tokens(r, 0, LENGTH);
    if (r->kind == OFFLOAD) CHECK_EQ(tkv_offload(r->kv, 0, TKV_ALL_LAYERS, 2, &n), TKV_OK);
    if (r->kind == OFFLOAD) CHECK(n > 0);
    if (r->kind == DISCARD) CHECK_EQ(tkv_seq_discard(r->kv, 0, 128, &n), TKV_OK);
    if (r->kind == DISCARD) CHECK_EQ(n, 128);
    if (r->kind == EVICT) {
        memset(victims, 0x11, sizeof victims);
        CHECK_EQ(evict_tokens(r->kv, 0, TKV_ALL_LAYERS, victims, LENGTH), TKV_OK);
        CHECK_EQ(tkv_seq_pin(r->kv, 0, 20, 9, TKV_UNLIMITED), TKV_OK);
    }
    if (r->kind == BUDGET) CHECK(budget_of(r->kv).level > 0 && budget_of(r->kv).offloaded > 0);
}

static void destroy_cache(rig *r) {
    tkv_destroy(r->kv);
    r->kv = NULL;
}

/* Hash of everything that a refused call must not change. */
static uint64_t hash_cache(rig *r) {
    static float k[CHUNK * DIM], v[CHUNK * DIM], x[CAPACITY];
    uint64_t h = HASH_START, removed_mask[CAPACITY / 64];
    tkv_memory_info m;
    int s, l, t;
    CHECK_EQ(tkv_get_memory(r->kv, &m), TKV_OK);
    h = hash_of(h, (const uint8_t *)&m.total, sizeof m.total);
    for (s = 0; s < SEQS; s++) {
        t = tkv_get_length(r->kv, s, TKV_ALL_LAYERS);
        h = hash_of(h, (const uint8_t *)&t, sizeof t);
        for (l = 0; l < LAYERS; l++) {
            const int n = tkv_get_length(r->kv, s, l), step = 16;
            const size_t row = DIM * sizeof *k;
            tkv_status st;
            h = hash_of(h, (const uint8_t *)&n, sizeof n);
            memset(removed_mask, 0, sizeof removed_mask);
            memset(x, 0, sizeof x);
            st = tkv_get_importance(r->kv, s, l, 0, n, x, removed_mask);
            h = hash_of(h, (const uint8_t *)&st, sizeof st);
            h = hash_of_words(hash_of_words(h, x, (size_t)n * sizeof *x), removed_mask, sizeof removed_mask);
            for (t = 0; t < n && l != 1; t += step) {
                const int some = n - t < step ? n - t : step;
                st = tkv_read(r->kv, s, l, t, some, k, v);
                h = hash_of(h, (const uint8_t *)&st, sizeof st);
                if (!st) h = hash_of_words(hash_of_words(h, k, row * (size_t)some), v, row * (size_t)some);
            }
        }
    }
    return h;
}

static uint64_t hash_outputs(const rig *r) { return hash_of_words(HASH_START, &r->o, sizeof r->o); }

/* >>sentences of errors. Before each call another one fails. A call that fails must leave a sentence of its own, if it
 * takes a cache that is not const. */
static const char older_sentence[] = "there is no sequence 12345";

static void leave_older_sentence(tkv_cache *kv) {
    CHECK_EQ(tkv_seq_truncate(kv, 12345, 0), TKV_ERR_ARG);
    CHECK(strcmp(tkv_get_last_error(kv), older_sentence) == 0);
}

static void check_sentence(const tkv_cache *kv, const char *name, const char *argument, int x, int st) {
    const char *sentence = tkv_get_last_error(kv);
    if (st < 0)
        CHECK_MSG(sentence[0] && strcmp(sentence, older_sentence) != 0, "%s, %s = %d: \"%s\"", name, argument,
                  x, sentence);
}

/* Does a function take no cache, or a const one? Or is its sentence checked elsewhere (end_step)? */
static int keeps_sentence(const char *name) {
    static const char *const names[] = {
        "tkv_apply_threshold",  "tkv_bound_score",      "tkv_compute_score",      "tkv_copy_thresholds",
        "tkv_decide_discard",   "tkv_decode_block",     "tkv_encode_block",       "tkv_estimate_context",
        "tkv_estimate_memory",  "tkv_find_name",        "tkv_find_thresholds",    "tkv_get_advice",
        "tkv_get_append_bytes", "tkv_get_attend_bytes", "tkv_get_block_bytes",    "tkv_get_feedback",
        "tkv_get_layer",        "tkv_get_level",        "tkv_get_positions",      "tkv_get_quality",
        "tkv_get_tiers",        "tkv_init_feedback",    "tkv_init_pressure",      "tkv_init_remat",
        "tkv_parse_config",     "tkv_parse_thresholds", "tkv_print_config",       "tkv_print_report",
        "tkv_print_thresholds", "tkv_put_threshold",    "tkv_rotate_rope",        "tkv_select_victims",
        "tkv_seq_abort",        "tkv_seq_commit",       "tkv_seq_find_discarded", "tkv_seq_get_memory",
        "tkv_seq_get_state",    "tkv_seq_list_blocks",  "tkv_seq_list_states",    "tkv_split_evict_budget",
        "tkv_update_importance"};
    int i;
    for (i = 0; i < COUNT(names); i++)
        if (strcmp(name, names[i]) == 0) return 1;
    return 0;
}

/* >>rows */
static int value_to_try(int i, int n) {
    const int values[] = {INT_MIN, -2, -1, n, n < INT_MAX ? n + 1 : n, INT_MAX, 1, 2};
    return values[i];
}

static void prepare_outputs(rig *r) {
    memset(&r->o, 0xa5, sizeof r->o);
    if (!r->output_hash) r->output_hash = hash_outputs(r); /* always the same */
}

static int is_right(char want, int got) {
    switch (want) {
    case 'A': return got == TKV_ERR_ARG;
    case 'R': return got == TKV_ERR_RANGE;
    case 'C': return got == TKV_ERR_CAPACITY;
    case 'G': return got == TKV_ERR_CONFIG;
    case 'S': return got == TKV_ERR_STATE;
    case 'U': return got == TKV_ERR_UNSUPPORTED;
    case 'O': return got == 0;
    case '+': return got > 0;
    default: return want == '*';
    }
}

static void check_result(rig *r, const char *name, const char *argument, int caches, int untouched, int x,
                         char want, int got) {
    char reason[200] = "";
    uint64_t state_hash;
    if (!keeps_sentence(name)) check_sentence(r->kv, name, argument, x, got);
    CHECK_MSG(!(caches & r->kind) || is_right(want, got), "%s, %s = %d, cache %d: %d (%s), not %c: %s", name,
              argument, x, r->kind, got, tkv_get_status_text((tkv_status)got), want,
              tkv_get_last_error(r->kv));
    if (tkv_check(r->kv, reason, sizeof reason) != TKV_OK)
        CHECK_MSG(0, "after %s, %s = %d: %s", name, argument, x, reason);
    state_hash = hash_cache(r);
    if (got < 0)
        CHECK_MSG(state_hash == r->state_hash, "%s, %s = %d, cache %d: %d, and it changed the cache", name,
                  argument, x, r->kind, got);
    if (got < 0 && untouched && caches & r->kind)
        CHECK_MSG(hash_outputs(r) == r->output_hash, "%s, %s = %d: the output was changed", name, argument,
                  x);
    if (state_hash == r->state_hash) return;
    destroy_cache(r); /* the next row starts with the same cache */
    build_cache(r);
    r->state_hash = hash_cache(r);
}

#define TRY(name, argument, caches, untouched, n, want, call)                                                \
    do {                                                                                                     \
        const char *want_ = (want);                                                                          \
        int i_;                                                                                              \
        for (i_ = 0; want_[i_]; i_++) {                                                                      \
            const int x = value_to_try(i_, (n));                                                             \
            if (want_[i_] == '.') continue;                                                                  \
            if (tkv_test_quick() && r->kind != PLAIN && !((caches)&r->kind)) continue;                       \
            leave_older_sentence(r->kv);                                                                     \
            prepare_outputs(r);                                                                              \
            check_result(r, name, argument, caches, untouched, x, want_[i_], (int)(call));                   \
        }                                                                                                    \
    } while (0)
#define EACH(name, argument, caches, n, want, call) TRY(name, argument, caches, 0, n, want, call)
/* The same. An error must also leave the output arguments unchanged. */
#define SAFE(name, argument, caches, n, want, call) TRY(name, argument, caches, 1, n, want, call)

/* A field of a struct that is an int or an enum. */
#define OF(type, field) offsetof(type, field)
static void set_int(void *object, size_t at, int x) { memcpy((char *)object + at, &x, sizeof x); }

static int sign_of(double x) { return (x > 0.0) - (x < 0.0); }

/* >>configs, names and estimates */
static int compute_tier(size_t at, int x) {
    tkv_config cfg = tkv_default_config();
    set_int(&cfg, at, x);
    return (int)tkv_compute_tier(&cfg, 100);
}

static int parse_config_arrays(rig *r, size_t at, int x) {
    static const char text[] = "model.n_layers = 2\nlayers[1].window = 9\nbudget.n_levels = 1\n"
                               "budget.ladder[0].hot_tokens = 9\nmodel.rope.dim = 2\n"
                               "model.rope.frequencies = [1]\n";
    tkv_layer_config layers[2];
    tkv_level ladder[1];
    float frequencies[1];
    tkv_config_arrays arrays;
    tkv_config cfg = tkv_default_config();
    (void)r;
    arrays.layers = layers;
    arrays.n_layers = 2;
    arrays.ladder = ladder;
    arrays.n_levels = 1;
    arrays.frequencies = frequencies;
    arrays.n_frequencies = 1;
    set_int(&arrays, at, x);
    return tkv_parse_config(&cfg, &arrays, text, sizeof text - 1, NULL, 0);
}

/* Finds the name of value 1. Returns 1 if that gives 1 again. */
static int find_first_name(rig *r, tkv_name_kind kind) {
    const char *name = tkv_get_name(kind, 1);
    const tkv_status st = tkv_find_name(kind, name ? name : "no such kind", &r->o.a);
    return st ? (int)st : r->o.a == 1;
}

static void try_configs(rig *r) {
    static const struct {
        tkv_name_kind kind;
        int n; /* values are below n */
    } kinds[] = {{TKV_NAME_FORMAT, TKV_FORMAT_COUNT},
                 {TKV_NAME_ISA, TKV_ISA_COUNT},
                 {TKV_NAME_PRESET, 24},
                 {TKV_NAME_EVICT_POLICY, TKV_EVICT_COUNT},
                 {TKV_NAME_IMPORTANCE, TKV_IMPORTANCE_COUNT},
                 {TKV_NAME_PROFILE, TKV_PROFILE_COUNT}};
    int i;
    CHECK_EQ(COUNT(kinds), TKV_NAME_COUNT);
    for (i = 0; i < COUNT(kinds); i++) {
        const int last = kinds[i].n - 1;
        EACH("tkv_get_name", "value", PLAIN, last + 1, "OOOOOO++", tkv_get_name(kinds[i].kind, x) != NULL);
        EACH("tkv_get_name", "value", PLAIN, last, "OOO+OO", tkv_get_name(kinds[i].kind, x) != NULL);
        SAFE("tkv_find_name", "kind", PLAIN, (int)kinds[i].kind, "AAA+",
             find_first_name(r, (tkv_name_kind)x));
    }
    EACH("tkv_get_name", "kind", PLAIN, TKV_NAME_COUNT, "OOOOOO++",
         tkv_get_name((tkv_name_kind)x, 1) != NULL);
    SAFE("tkv_find_name", "kind", PLAIN, TKV_NAME_COUNT, "AAAAAARR",
         tkv_find_name((tkv_name_kind)x, "no such name", &r->o.a));
    EACH("tkv_compute_tier", "age", PLAIN, 511, "OOO+++", tkv_compute_tier(NULL, x));
    EACH("tkv_compute_tier", "hot_tokens", PLAIN, 101, "*O+OOO",
         compute_tier(OF(tkv_config, tiers.hot_tokens), x));
    EACH("tkv_compute_tier", "warm_tokens", PLAIN, 36, "*+++++",
         compute_tier(OF(tkv_config, tiers.warm_tokens), x));
    EACH("tkv_parse_config", "room.n_layers", PLAIN, 2, "GGGO..",
         parse_config_arrays(r, OF(tkv_config_arrays, n_layers), x));
    EACH("tkv_parse_config", "room.n_levels", PLAIN, 1, "GGGO..",
         parse_config_arrays(r, OF(tkv_config_arrays, n_levels), x));
    EACH("tkv_parse_config", "room.n_frequencies", PLAIN, 1, "GGGO..",
         parse_config_arrays(r, OF(tkv_config_arrays, n_frequencies), x));
    SAFE("tkv_get_level", "level", PLAIN, 1, "AAAAAAAA", tkv_get_level(r->kv, x, &r->o.level));
    SAFE("tkv_get_level", "level", PLAIN, 0, "AAAOAA", tkv_get_level(r->kv, x, &r->o.level));
    EACH("tkv_print_config", "style", PLAIN, TKV_TEXT_COUNT, "AAAAAAOO",
         tkv_print_config(&r->cfg, x, NULL, 0, &r->o.bytes));
    EACH("tkv_print_config", "style", PLAIN, TKV_TEXT_COUNT - 1, "AAAOAA",
         tkv_print_config(&r->cfg, x, NULL, 0, &r->o.bytes));
    EACH("tkv_estimate_memory", "n_tokens", PLAIN, MAX_TOKENS, "AAAOAA",
         tkv_estimate_memory(&r->cfg, x, 1, &r->o.memory));
    SAFE("tkv_estimate_memory", "n_seqs", EVERY, SEQS, "AAA*AA",
         tkv_estimate_memory(&r->cfg, 100, x, &r->o.memory));
    SAFE("tkv_estimate_context", "n_seqs", BUDGET, SEQS, "AAAOAA", tkv_estimate_context(&r->cfg, x, &r->o.a));
}

/* >>appending, steps, truncation */
typedef tkv_status (*append_fn)(tkv_cache *, const tkv_append_params *);

static uint64_t part_space[1 << 15];

static tkv_status append_in_one_part(tkv_cache *kv, const tkv_append_params *p) {
    memset(part_space, 0, 128);
    return tkv_append_part(kv, p, 0, 1, part_space, sizeof part_space);
}

static int append_part(rig *r, int part, int n_parts) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.k = k_in;
    p.v = v_in;
    p.n = 1;
    memset(part_space, 0, 128);
    return tkv_append_part(r->kv, &p, part, n_parts, part_space, sizeof part_space);
}

static tkv_status get_append_bytes(tkv_cache *kv, const tkv_append_params *p) {
    size_t bytes = 0;
    const tkv_status st = tkv_get_append_bytes(kv, p, &bytes);
    CHECK(st || (bytes >= 128 && bytes <= sizeof part_space));
    return st;
}

static int append_with(rig *r, append_fn run, size_t at, int x) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.k = k_in;
    p.v = v_in;
    p.n = 1;
    set_int(&p, at, x);
    return run(r->kv, &p);
}

/* Sets a field of entry 1 of a batch, or n_batch. */
static int append_batch(rig *r, append_fn run, size_t at, int x, int n_batch) {
    tkv_append_params p;
    tkv_rows rows[3];
    memset(&p, 0, sizeof p);
    memset(rows, 0, sizeof rows);
    rows[0].n = rows[1].n = 1;
    rows[1].seq = 1;
    set_int(&rows[1], at, x);
    p.k = k_in;
    p.v = v_in;
    p.batch = rows;
    p.n_batch = n_batch;
    return run(r->kv, &p);
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

/* Each of n sequences goes on from itself, the first one from `source`. */
static int reorder(rig *r, int first, int n, int source) {
    int sources[SEQS + 2], i;
    for (i = 0; i < SEQS + 2; i++) sources[i] = i;
    sources[0] = source;
    return tkv_seq_reorder(r->kv, first, sources, n);
}

static int end_step(rig *r, tkv_status (*step)(tkv_cache *, int), int x) {
    tkv_status st;
    if (tkv_seq_begin(r->kv, 0) != TKV_OK) return TKV_ERR_BROKEN;
    r->state_hash = hash_cache(r); /* tkv_seq_begin may recode blocks */
    leave_older_sentence(r->kv);
    st = step(r->kv, x);
    check_sentence(r->kv, "the end of a step", "seq", x, st);
    (void)tkv_seq_abort(r->kv, 0);
    return st;
}

/* Arguments of an append. run: a call that appends. */
static void try_append_params(rig *r, const char *name, append_fn run) {
    EACH(name, "seq", EVERY, SEQS, "AAAAAA", append_with(r, run, OF(tkv_append_params, seq), x));
    EACH(name, "layer", EVERY, LAYERS, "AAAAAAAA", append_with(r, run, OF(tkv_append_params, layer), x));
    EACH(name, "layer", EVERY, TKV_ALL_LAYERS, "...A", append_with(r, run, OF(tkv_append_params, layer), x));
    EACH(name, "n", EVERY, CHUNK, "AAAOCC", append_with(r, run, OF(tkv_append_params, n), x));
    EACH(name, "k_type", EVERY, 3, "AAAAAA", append_with(r, run, OF(tkv_append_params, k_type), x));
    EACH(name, "v_type", EVERY, 3, "AAAAAA", append_with(r, run, OF(tkv_append_params, v_type), x));
    EACH(name, "batch[1].seq", EVERY, SEQS, "AAAAAA", append_batch(r, run, OF(tkv_rows, seq), x, 2));
    EACH(name, "batch[1].n", EVERY, CHUNK, "AAAOCC", append_batch(r, run, OF(tkv_rows, n), x, 2));
    EACH(name, "n_batch", EVERY, SEQS, "AAAOAA", append_batch(r, run, OF(tkv_rows, n), 1, x));
}

static void try_appends(rig *r) {
    try_append_params(r, "tkv_append_ex", tkv_append_ex);
    try_append_params(r, "tkv_append_part", append_in_one_part);
    EACH("tkv_append_part", "part", EVERY, 2, "AAA*AA", append_part(r, x, 3));
    EACH("tkv_append_part", "n_parts", EVERY, 65536, "AAA*AA", append_part(r, 0, x));
    SAFE("tkv_get_append_bytes", "seq", EVERY, SEQS, "AAAAAA",
         append_with(r, get_append_bytes, OF(tkv_append_params, seq), x));
    SAFE("tkv_get_append_bytes", "layer", EVERY, LAYERS, "AAAAAAAA",
         append_with(r, get_append_bytes, OF(tkv_append_params, layer), x));
    SAFE("tkv_get_append_bytes", "n", EVERY, CHUNK, "AAAO**",
         append_with(r, get_append_bytes, OF(tkv_append_params, n), x));
    SAFE("tkv_get_append_bytes", "n_batch", EVERY, SEQS, "AAAOAA",
         append_batch(r, get_append_bytes, OF(tkv_rows, n), 1, x));
    EACH("tkv_append", "seq", EVERY, SEQS, "AAAAAA", tkv_append(r->kv, x, 0, k_in, v_in, 1));
    EACH("tkv_append", "layer", EVERY, LAYERS, "AAAAAAAA", tkv_append(r->kv, 0, x, k_in, v_in, 1));
    EACH("tkv_append", "n", EVERY, CHUNK, "AAAOCC", tkv_append(r->kv, 0, 0, k_in, v_in, x));
    EACH("tkv_append", "layer", EVERY, TKV_ALL_LAYERS, "...A", tkv_append(r->kv, 0, x, k_in, v_in, 1));
    EACH("tkv_append_ex", "seq, positions", EVERY, SEQS, "AAAAAA",
         append_at(r->kv, x, 0, LENGTH, k_in, v_in, 1));
    EACH("tkv_append_ex", "layer, positions", EVERY, LAYERS, "AAAAAAAA",
         append_at(r->kv, 0, x, LENGTH, k_in, v_in, 1));
    EACH("tkv_append_ex", "positions[0]", EVERY, LENGTH, "RRRORRRR",
         append_at(r->kv, 0, 0, x, k_in, v_in, 1));
    EACH("tkv_append_ex", "positions[0], n = 0", EVERY, LENGTH, "RRRORRRR",
         append_at(r->kv, 0, 0, x, k_in, v_in, 0));
    EACH("tkv_append_ex", "n, positions", EVERY, CHUNK, "AAAOCC",
         append_at(r->kv, 0, 0, LENGTH, k_in, v_in, x));
    EACH("tkv_append_ex", "positions[1]", EVERY, SHORT, "RRRORRRR", append_positions(r, x));
    EACH("tkv_seq_begin", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_begin(r->kv, x));
    EACH("tkv_seq_commit", "seq", EVERY, SEQS, "AAAAAA", end_step(r, tkv_seq_commit, x));
    EACH("tkv_seq_abort", "seq", EVERY, SEQS, "AAAAAA", end_step(r, tkv_seq_abort, x));
    EACH("tkv_seq_reserve", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_reserve(r->kv, x, 1));
    EACH("tkv_seq_reserve", "n", EVERY, CHUNK, "AAAOAA", tkv_seq_reserve(r->kv, 0, x));
    EACH("tkv_seq_flush", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_flush(r->kv, x, TKV_FLUSH_DUE));
    EACH("tkv_seq_flush", "mode", EVERY, 3, "AAAAAA", tkv_seq_flush(r->kv, 0, (tkv_flush_mode)x));
    EACH("tkv_seq_reset", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_reset(r->kv, x));
    EACH("tkv_seq_truncate", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_truncate(r->kv, x, 0));
    EACH("tkv_seq_truncate", "n_tokens", EVERY, LENGTH, "AAAOOO", tkv_seq_truncate(r->kv, 0, x));
    EACH("tkv_seq_fork", "src", EVERY, SEQS, "AAAAAA", tkv_seq_fork(r->kv, x, 1, 0));
    EACH("tkv_seq_fork", "dst", EVERY, SEQS, "AAAAAA", tkv_seq_fork(r->kv, 0, x, 0));
    EACH("tkv_seq_reorder", "first", EVERY, SEQS, "AAAAAA", reorder(r, x, 1, 0));
    EACH("tkv_seq_reorder", "n", EVERY, SEQS, "AAAOAA", reorder(r, 0, x, 0));
    EACH("tkv_seq_reorder", "sources[0]", EVERY, SEQS, "AAAAAA", reorder(r, 0, SEQS, x));
    EACH("tkv_seq_fork", "n_tokens", EVERY, LENGTH, "AOAOOO", tkv_seq_fork(r->kv, 0, 1, x));
    EACH("tkv_seq_remove", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_remove(r->kv, x, 0, 0));
    EACH("tkv_seq_remove", "first", EVERY, LENGTH, "AAAOOO**", tkv_seq_remove(r->kv, 0, x, INT_MAX));
    EACH("tkv_seq_remove", "end", EVERY, LENGTH, "AOAOOO", tkv_seq_remove(r->kv, 0, 0, x));
    EACH("tkv_seq_shift", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_shift(r->kv, x, 0, 0, 1));
    EACH("tkv_seq_shift", "first", EVERY, LENGTH, "AAA*****", tkv_seq_shift(r->kv, 0, x, INT_MAX, 1));
    EACH("tkv_seq_shift", "end", EVERY, LENGTH, "A*A*****", tkv_seq_shift(r->kv, 0, 0, x, 1));

    EACH("tkv_seq_copy", "src", EVERY, SEQS, "AAAAAA", tkv_seq_copy(r->kv, x, 0, 0, 1, 0));
    EACH("tkv_seq_copy", "first", EVERY, LENGTH, "AAA***", tkv_seq_copy(r->kv, 0, x, INT_MAX, 1, 0));
    EACH("tkv_seq_copy", "end", EVERY, LENGTH, "A*A***",
         tkv_seq_copy(r->kv, 0, LENGTH - 1, x, 1, LENGTH - 1));
    EACH("tkv_seq_copy", "dst", EVERY, SEQS, "AAAAAA", tkv_seq_copy(r->kv, 0, 0, 1, x, 0));
    EACH("tkv_seq_copy", "at", EVERY, LENGTH, "AAA***", tkv_seq_copy(r->kv, 0, 0, 1, 1, x));
    EACH("tkv_seq_put_state", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_put_state(r->kv, x, 0, 1, k_in, 9));
    EACH("tkv_seq_put_state", "layer", EVERY, LAYERS, "AAAAAAOO", tkv_seq_put_state(r->kv, 0, x, 1, k_in, 9));
    EACH("tkv_seq_put_state", "layer", EVERY, TKV_ALL_LAYERS, "...A",
         tkv_seq_put_state(r->kv, 0, x, 1, k_in, 9));
    EACH("tkv_seq_put_state", "n_tokens", EVERY, MAX_TOKENS, "AAAOCC",
         tkv_seq_put_state(r->kv, 0, 0, x, k_in, 9));
    SAFE("tkv_seq_get_state", "seq", EVERY, SEQS, "AAAAAA",
         tkv_seq_get_state(r->kv, x, 0, 1, r->o.code, 9, &r->o.bytes));
    SAFE("tkv_seq_get_state", "layer", EVERY, LAYERS, "AAAAAARR",
         tkv_seq_get_state(r->kv, 0, x, 1, r->o.code, 9, &r->o.bytes));
    SAFE("tkv_seq_get_state", "n_tokens", EVERY, LENGTH, "AAARRR",
         tkv_seq_get_state(r->kv, 0, 0, x, r->o.code, 9, &r->o.bytes));
    SAFE("tkv_seq_find_state", "seq", EVERY, SEQS, "OOOOOO", tkv_seq_find_state(r->kv, x, LENGTH));
    SAFE("tkv_seq_find_state", "n_tokens", EVERY, LENGTH, "O+O+++", tkv_seq_find_state(r->kv, 0, x));
    SAFE("tkv_seq_list_states", "seq", EVERY, SEQS, "AAAAAA",
         tkv_seq_list_states(r->kv, x, 0, r->o.list, CAPACITY, &r->o.a));
    SAFE("tkv_seq_list_states", "layer", EVERY, LAYERS, "AAAAAAOO",
         tkv_seq_list_states(r->kv, 0, x, r->o.list, CAPACITY, &r->o.a));
    SAFE("tkv_seq_list_states", "layer", EVERY, TKV_ALL_LAYERS, "...O",
         tkv_seq_list_states(r->kv, 0, x, r->o.list, CAPACITY, &r->o.a));
    SAFE("tkv_seq_list_states", "capacity", EVERY, CAPACITY, "AAAO..",
         tkv_seq_list_states(r->kv, 0, 0, r->o.list, x, &r->o.a));

    EACH("tkv_seq_keep", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_keep(r->kv, x, 0, NULL, 0));
    EACH("tkv_seq_keep", "first", EVERY, LENGTH, "AAA***", tkv_seq_keep(r->kv, 0, x, NULL, 0));
    EACH("tkv_seq_keep", "n", EVERY, 0, "AAAOAA", tkv_seq_keep(r->kv, 0, LENGTH, NULL, x));
    EACH("tkv_seq_slide", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_slide(r->kv, x, 0, NULL));
    EACH("tkv_seq_slide", "n", EVERY, 0, "AAAO..", tkv_seq_slide(r->kv, 0, x, NULL));

    EACH("tkv_get_length", "seq, all layers", EVERY, SEQS, "OOOOOO",
         tkv_get_length(r->kv, x, TKV_ALL_LAYERS));
    EACH("tkv_get_length", "seq", EVERY, SEQS, "OOOOOO", tkv_get_length(r->kv, x, 0));
    EACH("tkv_get_length", "layer", EVERY, LAYERS, "OOOOOO+O", tkv_get_length(r->kv, 0, x));
    EACH("tkv_get_length", "layer", EVERY, TKV_ALL_LAYERS, "...+", tkv_get_length(r->kv, 0, x));
}

/* >>attention and reading */
typedef tkv_status (*attend_fn)(tkv_cache *, const tkv_attend_params *);

static int attend_with(rig *r, attend_fn run, size_t at, int x) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = q_in;
    p.out = r->o.out;
    set_int(&p, at, x);
    if (at == OF(tkv_attend_params, n_mask_bits)) p.mask_bits = bits_in;
    return run(r->kv, &p);
}

static int attend_batch(rig *r, attend_fn run, size_t at, int x, int n_batch) {
    tkv_attend_params p;
    tkv_rows rows[3];
    memset(&p, 0, sizeof p);
    memset(rows, 0, sizeof rows);
    rows[0].n = rows[1].n = 1;
    rows[1].seq = 1;
    set_int(&rows[1], at, x);
    p.q = q_in;
    p.out = r->o.out;
    p.lse = r->o.lse;
    p.scores = r->o.scores;
    p.batch = rows;
    p.n_batch = n_batch;
    return run(r->kv, &p);
}

/* With non_causal, there may be more queries than tokens. */
static int attend_non_causal(rig *r, attend_fn run, int x) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = x;
    p.non_causal = 1;
    p.q = q_in;
    p.out = r->o.out;
    return run(r->kv, &p);
}

static tkv_status attend_in_one_part(tkv_cache *kv, const tkv_attend_params *p) {
    memset(part_space, 0, 128);
    return tkv_attend_part(kv, p, 0, 1, part_space, sizeof part_space);
}

static tkv_status attend_after_bytes(tkv_cache *kv, const tkv_attend_params *p) {
    size_t bytes = 0;
    const tkv_status st = tkv_get_attend_bytes(kv, p, &bytes);
    return st ? st : bytes <= sizeof part_space ? attend_in_one_part(kv, p) : TKV_ERR_BROKEN;
}

/* tkv_validate_attend has the status of the call, and a sentence where that is an error. */
static tkv_status attend_if_valid(tkv_cache *kv, const tkv_attend_params *p) {
    char reason[128] = "not written";
    const tkv_status valid = tkv_validate_attend(kv, p, reason, sizeof reason), st = tkv_attend_ex(kv, p);
    CHECK_EQ(valid, st);
    CHECK_MSG(!st == !reason[0], "status %d: %s", (int)st, reason);
    return st;
}

static int attend_part(rig *r, int part, int n_parts) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = q_in;
    p.out = r->o.out;
    memset(part_space, 0, 128);
    return tkv_attend_part(r->kv, &p, part, n_parts, part_space, sizeof part_space);
}

static void try_attention(rig *r, const char *name, attend_fn run) {
    SAFE(name, "layer", EVERY, LAYERS, "AAAAAA*A", attend_with(r, run, OF(tkv_attend_params, layer), x));
    SAFE(name, "layer", PLAIN, LAYERS, "AAAAAAOA", attend_with(r, run, OF(tkv_attend_params, layer), x));
    SAFE(name, "layer", EVERY, TKV_ALL_LAYERS, "...A", attend_with(r, run, OF(tkv_attend_params, layer), x));
    SAFE(name, "seq", EVERY, SEQS, "AAAAAA", attend_with(r, run, OF(tkv_attend_params, seq), x));
    SAFE(name, "n", PLAIN, LENGTH, "AAAORR", attend_with(r, run, OF(tkv_attend_params, n), x));
    SAFE(name, "n, non_causal", PLAIN, LENGTH, "AAAOOA", attend_non_causal(r, run, x));
    SAFE(name, "q_type", PLAIN, 3, "AAAAAA", attend_with(r, run, OF(tkv_attend_params, q_type), x));
    SAFE(name, "out_type", PLAIN, 3, "AAAAAA", attend_with(r, run, OF(tkv_attend_params, out_type), x));
    SAFE(name, "mask_type", PLAIN, 3, "AAAAAA", attend_with(r, run, OF(tkv_attend_params, mask_type), x));
    SAFE(name, "window", PLAIN, LENGTH, "AAOOOO", attend_with(r, run, OF(tkv_attend_params, window), x));
    SAFE(name, "first_kv_head", PLAIN, 0, "AAAOAA",
         attend_with(r, run, OF(tkv_attend_params, first_kv_head), x));
    SAFE(name, "n_kv_heads", PLAIN, 1, "AAAOAA", attend_with(r, run, OF(tkv_attend_params, n_kv_heads), x));
    SAFE(name, "n_mask_bits", PLAIN, MAX_TOKENS, "AAAOAA",
         attend_with(r, run, OF(tkv_attend_params, n_mask_bits), x));
    SAFE(name, "batch[1].seq", PLAIN | OFFLOAD | EVICT, SEQS, "AAAAAA",
         attend_batch(r, run, OF(tkv_rows, seq), x, 2));
    SAFE(name, "batch[1].n", PLAIN, SHORT, "AAAORR", attend_batch(r, run, OF(tkv_rows, n), x, 2));
    SAFE(name, "n_batch", PLAIN, SEQS, "AAAOAA", attend_batch(r, run, OF(tkv_rows, n), 1, x));
}

static int merge_rows(rig *r, int n_rows, int dim) {
    int i;
    for (i = 0; i < 2; i++) r->o.lse[i] = 0.0f;
    for (i = 0; i < 2 * DIM; i++) r->o.out[i] = 1.0f;
    tkv_merge_attention(r->o.out, r->o.lse, q_in, scores_in, n_rows, dim);
    if (n_rows < 0 || dim < 0) CHECK(r->o.lse[0] >= 0.0f && r->o.lse[0] <= 0.0f);
    return TKV_OK;
}

static int merge_empty_row(rig *r, int dim) { /* a row without keys on this side is copied */
    r->o.lse[0] = -tkv_test_float(0x7f800000u);
    tkv_merge_attention(r->o.out, r->o.lse, q_in, scores_in, 1, dim);
    return TKV_OK;
}

static int ignore_bytes(void *user, const void *bytes, size_t size) {
    (void)user;
    (void)bytes;
    return size > (size_t)-1 / 2;
}

static tkv_status try_save(rig *r, int with_callback, int seq, int n_tokens) {
    static const int tokens[1] = {7};
    tkv_save_params p;
    size_t needed;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.tokens = tokens;
    p.n_tokens = n_tokens;
    return with_callback ? tkv_seq_save_to(r->kv, &p, ignore_bytes, NULL)
                         : tkv_seq_save(r->kv, &p, NULL, 0, &needed);
}

static int give_zeros(void *user, size_t at, void *bytes, size_t size) {
    (void)user;
    (void)at;
    memset(bytes, 0, size);
    return 0;
}

static tkv_status try_load(rig *r, int with_callback, int seq, int capacity) {
    tkv_load_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.token_capacity = capacity;
    return with_callback ? tkv_seq_load_from(r->kv, &p, 1000, give_zeros, NULL, NULL)
                         : tkv_seq_load(r->kv, &p, "no file", 7, NULL);
}

static int get_nothing(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes, size_t *sizes) {
    (void)user;
    (void)hashes;
    (void)n;
    (void)bytes;
    (void)sizes;
    return 0;
}

static int put_nowhere(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
    (void)user;
    (void)hash;
    (void)bytes;
    (void)size;
    return 0;
}

static tkv_status try_prefix(rig *r, int is_adopted, int seq, int spare, int n_tokens, int n_extras) {
    static const int tokens[LENGTH] = {0};
    tkv_prefix_params p;
    tkv_prefix_store store;
    memset(&p, 0, sizeof p);
    memset(&store, 0, sizeof store);
    store.get = get_nothing;
    store.put = put_nowhere;
    p.seq = seq;
    p.spare = spare;
    p.tokens = tokens;
    p.n_tokens = n_tokens;
    p.n_extras = n_extras;
    return is_adopted ? tkv_seq_adopt_prefix(r->kv, &p, &store, NULL)
                      : tkv_seq_publish_prefix(r->kv, &p, &store, NULL);
}

static tkv_status try_prefix_hash(rig *r, int n_tokens, int n_pages) {
    static const int tokens[LENGTH] = {0};
    tkv_prefix_params p;
    tkv_prefix_hash hash;
    memset(&p, 0, sizeof p);
    p.tokens = tokens;
    p.n_tokens = n_tokens;
    return tkv_get_prefix_hash(r->kv, &p, n_pages, &hash);
}

static tkv_status read_token(rig *r, int seq, int layer, int index, int n) {
    return tkv_read_tokens(r->kv, seq, layer, &index, n, r->o.k, r->o.v);
}

static void try_reading(rig *r) {
    SAFE("tkv_attend", "seq", EVERY, SEQS, "AAAAAA", tkv_attend(r->kv, x, 0, q_in, 1, r->o.out));
    SAFE("tkv_attend", "layer", EVERY, LAYERS, "AAAAAA*A", tkv_attend(r->kv, 0, x, q_in, 1, r->o.out));
    SAFE("tkv_attend", "layer", EVERY, TKV_ALL_LAYERS, "...A", tkv_attend(r->kv, 0, x, q_in, 1, r->o.out));
    SAFE("tkv_attend", "n", EVERY, LENGTH, "AAA*RR", tkv_attend(r->kv, 0, 0, q_in, x, r->o.out));
    try_attention(r, "tkv_attend_ex", tkv_attend_ex);
    try_attention(r, "tkv_attend_reference", tkv_attend_reference);
    try_attention(r, "tkv_validate_attend", attend_if_valid);
    try_attention(r, "tkv_attend_part", attend_in_one_part);
    try_attention(r, "tkv_get_attend_bytes", attend_after_bytes);
    SAFE("tkv_attend_part", "part", EVERY, 2, "AAA*AA", attend_part(r, x, 3));
    SAFE("tkv_attend_part", "n_parts", EVERY, 65536, "AAA*AA", attend_part(r, 0, x));
    EACH("tkv_merge_attention", "n_rows", PLAIN, 2, "OOOO..", merge_rows(r, x, DIM));
    EACH("tkv_merge_attention", "dim", PLAIN, DIM, "OOOO..", merge_rows(r, 2, x));
    EACH("tkv_merge_attention", "dim, no keys", PLAIN, DIM, "OOOO..", merge_empty_row(r, x));
    SAFE("tkv_read", "seq", EVERY, SEQS, "AAAAAA", tkv_read(r->kv, x, 0, 0, 1, r->o.k, r->o.v));
    SAFE("tkv_read", "layer", EVERY, LAYERS, "AAAAAA*A", tkv_read(r->kv, 0, x, 0, 1, r->o.k, r->o.v));
    SAFE("tkv_read", "layer", EVERY, TKV_ALL_LAYERS, "...A", tkv_read(r->kv, 0, x, 0, 1, r->o.k, r->o.v));
    SAFE("tkv_read", "start", EVERY, LENGTH, "AAARRR", tkv_read(r->kv, 0, 0, x, 1, r->o.k, r->o.v));
    SAFE("tkv_read", "n", EVERY, LENGTH, "AAA*RR", tkv_read(r->kv, 0, 0, 0, x, r->o.k, r->o.v));
    SAFE("tkv_read", "n", PLAIN, LENGTH - 399, "AAAORR", tkv_read(r->kv, 0, 0, 399, x, r->o.k, r->o.v));
    SAFE("tkv_read_tokens", "seq", EVERY, SEQS, "AAAAAA", read_token(r, x, 0, 0, 1));
    SAFE("tkv_read_tokens", "layer", EVERY, LAYERS, "AAAAAA*A", read_token(r, 0, x, 0, 1));
    SAFE("tkv_read_tokens", "indices", EVERY, LENGTH, "AAARRR", read_token(r, 0, 0, x, 1));
    SAFE("tkv_read_tokens", "n", PLAIN, 1, "AAAO**", read_token(r, 0, 0, 399, x < 2 ? x : 1));
    EACH("tkv_seq_save", "seq", EVERY, SEQS, "AAAAAA", try_save(r, 0, x, 0));
    EACH("tkv_seq_save", "n_tokens", PLAIN, 1, "AAAO**", try_save(r, 0, 0, x < 2 ? x : 1));
    EACH("tkv_seq_save_to", "seq", EVERY, SEQS, "AAAAAA", try_save(r, 1, x, 0));
    EACH("tkv_seq_load", "seq", EVERY, SEQS, "AAAAAA", try_load(r, 0, x, 0));
    EACH("tkv_seq_load", "token_capacity", EVERY, 1, "AAA***", try_load(r, 0, 0, x));
    EACH("tkv_seq_load_from", "seq", EVERY, SEQS, "AAAAAA", try_load(r, 1, x, 0));
    EACH("tkv_seq_load_from", "token_capacity", EVERY, 1, "AAA***", try_load(r, 1, 0, x));
    EACH("tkv_seq_publish_prefix", "seq", EVERY, SEQS, "AAAAAA", try_prefix(r, 0, x, 1, 0, 0));
    EACH("tkv_seq_publish_prefix", "spare", EVERY, SEQS, "AAAAAA", try_prefix(r, 0, 0, x, 0, 0));
    EACH("tkv_seq_publish_prefix", "n_tokens", EVERY, MAX_TOKENS, "AAASCC", try_prefix(r, 0, 0, 1, x, 0));
    EACH("tkv_seq_publish_prefix", "n_extras", EVERY, 1, "AAAAAA", try_prefix(r, 0, 0, 1, 0, x));
    EACH("tkv_seq_adopt_prefix", "seq", EVERY, SEQS, "AAAAAA", try_prefix(r, 1, x, 1, 0, 0));
    EACH("tkv_seq_adopt_prefix", "spare", EVERY, SEQS, "AAAAAA", try_prefix(r, 1, 0, x, 0, 0));
    EACH("tkv_seq_adopt_prefix", "n_tokens", EVERY, MAX_TOKENS, "AAASCC", try_prefix(r, 1, 0, 1, x, 0));
    EACH("tkv_get_prefix_hash", "n_tokens", EVERY, MAX_TOKENS, "AAA.CC", try_prefix_hash(r, x, 0));
    EACH("tkv_get_prefix_hash", "n_pages", EVERY, 2, "******", try_prefix_hash(r, LENGTH, x));
}

/* >>tables and reports */
static int fit_calibration(rig *r, size_t at, int x) {
    tkv_samples s;
    memset(&s, 0, sizeof s);
    s.layer = 4;
    s.n = 512;
    s.k = k_in;
    s.v = v_in;
    set_int(&s, at, x);
    return tkv_fit_calibration(r->kv, &s);
}

static void try_reports(rig *r) {
    EACH("tkv_fit_calibration", "layer", EVERY, LAYERS, "AAAAAAAA",
         fit_calibration(r, OF(tkv_samples, layer), x));
    EACH("tkv_fit_calibration", "n", EVERY, (1 << 18) + 1, "AAAAAA",
         fit_calibration(r, OF(tkv_samples, n), x));
    EACH("tkv_fit_calibration", "start", PLAIN, (1 << 30) - 512, "AAAOAA",
         fit_calibration(r, OF(tkv_samples, start), x));
    EACH("tkv_fit_calibration", "length", PLAIN, 512, "AAAOOO",
         fit_calibration(r, OF(tkv_samples, length), x));
    EACH("tkv_fit_calibration", "layer", EVERY, TKV_ALL_LAYERS, "...A",
         fit_calibration(r, OF(tkv_samples, layer), x));
    SAFE("tkv_get_layer", "seq", EVERY, SEQS, "AAAAAA", tkv_get_layer(r->kv, x, 0, &r->o.layer));
    SAFE("tkv_get_layer", "layer", EVERY, LAYERS, "AAAAAAOA", tkv_get_layer(r->kv, 0, x, &r->o.layer));
    SAFE("tkv_get_layer", "layer", EVERY, TKV_ALL_LAYERS, "...A", tkv_get_layer(r->kv, 0, x, &r->o.layer));
    SAFE("tkv_seq_get_memory", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_get_memory(r->kv, x, &r->o.seq_memory));
    SAFE("tkv_get_positions", "seq", EVERY, SEQS, "AAAAAA", tkv_get_positions(r->kv, x, 0, 0, 1, r->o.list));
    SAFE("tkv_get_positions", "layer", EVERY, LAYERS, "AAAAAAOA",
         tkv_get_positions(r->kv, 0, x, 0, 1, r->o.list));
    SAFE("tkv_get_positions", "start", EVERY, LENGTH, "AAARRR",
         tkv_get_positions(r->kv, 0, 0, x, 1, r->o.list));
    SAFE("tkv_get_positions", "n", EVERY, LENGTH, "AAAORR", tkv_get_positions(r->kv, 0, 0, 0, x, r->o.list));
    SAFE("tkv_get_tiers", "seq", EVERY, SEQS, "AAAAAA", tkv_get_tiers(r->kv, x, 0, 0, 1, r->o.tiers));
    SAFE("tkv_get_tiers", "layer", EVERY, LAYERS, "AAAAAAOA", tkv_get_tiers(r->kv, 0, x, 0, 1, r->o.tiers));
    SAFE("tkv_get_tiers", "layer", EVERY, TKV_ALL_LAYERS, "...A",
         tkv_get_tiers(r->kv, 0, x, 0, 1, r->o.tiers));
    SAFE("tkv_get_tiers", "start", EVERY, LENGTH, "AAARRR", tkv_get_tiers(r->kv, 0, 0, x, 1, r->o.tiers));
    SAFE("tkv_get_tiers", "start, n = 0", EVERY, LENGTH, "AAAORR", tkv_get_tiers(r->kv, 0, 0, x, 0, NULL));
    SAFE("tkv_get_tiers", "n", EVERY, LENGTH, "AAAORR", tkv_get_tiers(r->kv, 0, 0, 0, x, r->o.tiers));
    SAFE("tkv_get_tiers", "n, start > 0", EVERY, LENGTH - 70, "AAAORR",
         tkv_get_tiers(r->kv, 0, 0, 70, x, r->o.tiers));
    SAFE("tkv_get_quality", "layer", EVERY, LAYERS, "AAAAAAOA", tkv_get_quality(r->kv, x, &r->o.quality));
    SAFE("tkv_get_quality", "layer", EVERY, TKV_ALL_LAYERS, "...O", tkv_get_quality(r->kv, x, &r->o.quality));
    SAFE("tkv_print_report", "kind", EVERY, TKV_REPORT_COUNT, "AAAAAAO",
         tkv_print_report(r->kv, (tkv_report_kind)x, NULL, NULL, 0, &r->o.bytes));
    EACH("tkv_get_status_text", "s", PLAIN, 1, "++++++", tkv_get_status_text((tkv_status)x) != NULL);
}

/* >>pressure, budget, offloading */
static int init_pressure(rig *r, size_t at, int x) {
    tkv_pressure_config cfg;
    memset(&cfg, 0, sizeof cfg);
    set_int(&cfg, at, x);
    return tkv_init_pressure(&r->o.pressure, &cfg, NULL, 0);
}

static int compute_level(size_t at, int x, int level) {
    tkv_pressure_config cfg;
    memset(&cfg, 0, sizeof cfg);
    set_int(&cfg, at, x);
    return tkv_compute_level(&cfg, .9f, level);
}

static void try_budget(rig *r) {
    SAFE("tkv_init_pressure", "profile", PLAIN, TKV_PROFILE_COUNT, "GGGGGGOO",
         init_pressure(r, OF(tkv_pressure_config, profile), x));
    SAFE("tkv_init_pressure", "min_level", PLAIN, 3, "GGGGGG",
         init_pressure(r, OF(tkv_pressure_config, min_level), x));
    SAFE("tkv_init_pressure", "max_level", PLAIN, 2, "GGOOGG",
         init_pressure(r, OF(tkv_pressure_config, max_level), x));
    EACH("tkv_compute_level", "level", PLAIN, 2, "++++++",
         compute_level(OF(tkv_pressure_config, min_level), 0, x));
    EACH("tkv_compute_level", "profile", PLAIN, TKV_PROFILE_COUNT, "OOOOOOO+",
         compute_level(OF(tkv_pressure_config, profile), x, 0));
    EACH("tkv_compute_level", "min_level", PLAIN, 2, "OOO+OO",
         compute_level(OF(tkv_pressure_config, min_level), x, 0));
    EACH("tkv_compute_level", "max_level", PLAIN, 2, "OOO+OO",
         compute_level(OF(tkv_pressure_config, max_level), x, 0));
    EACH("tkv_set_level", "level", EVERY, LEVELS, "AAAAAA", tkv_set_level(r->kv, x));
    EACH("tkv_set_hot_tokens", "hot_tokens", EVERY, (1 << 30) - 2, "AAAOAA", tkv_set_hot_tokens(r->kv, x));
    EACH("tkv_maintain", "max_work", EVERY, 1, "AAAOOO", tkv_maintain(r->kv, x, NULL, NULL, &r->o.a));
    EACH("tkv_offload", "seq", EVERY, SEQS, "AAAAAA", tkv_offload(r->kv, x, 0, 1, &r->o.a));
    EACH("tkv_offload", "layer", EVERY, LAYERS, "AAAAAAAA", tkv_offload(r->kv, 0, x, 1, &r->o.a));
    EACH("tkv_offload", "layer", OFFLOAD | BUDGET, TKV_ALL_LAYERS, "...O",
         tkv_offload(r->kv, 0, x, 1, &r->o.a));
    EACH("tkv_offload", "layer, seq = 1", EVERY, LAYERS, "AAAAAAAA", tkv_offload(r->kv, 1, x, 1, &r->o.a));
    EACH("tkv_offload", "layer, seq = 1", OFFLOAD | BUDGET, TKV_ALL_LAYERS, "...O",
         tkv_offload(r->kv, 1, x, 1, &r->o.a));
    EACH("tkv_offload", "n_blocks", OFFLOAD | BUDGET, LENGTH, "AAAOOO", tkv_offload(r->kv, 0, 0, x, &r->o.a));
    EACH("tkv_promote", "seq", EVERY, SEQS, "AAAAAA", tkv_promote(r->kv, x, 0, 10));
    EACH("tkv_promote", "layer", EVERY, LAYERS, "AAAAAAAA", tkv_promote(r->kv, 0, x, 10));
    EACH("tkv_promote", "layer", EVERY, TKV_ALL_LAYERS, "...A", tkv_promote(r->kv, 0, x, 10));
    EACH("tkv_promote", "layer, seq = 1", EVERY, LAYERS, "AAAAAAAA", tkv_promote(r->kv, 1, x, 10));
    EACH("tkv_promote", "position", EVERY, LENGTH, "RRRRRR", tkv_promote(r->kv, 0, 0, x));
}

/* >>feedback and thresholds */
static int compute_score(rig *r, int source) {
    tkv_score_params p;
    tkv_quality_info meter;
    memset(&p, 0, sizeof p);
    memset(&meter, 0, sizeof meter);
    meter.samples = 100;
    meter.coverage = 1.0;
    p.source = (tkv_score_source)source;
    p.base = p.value = 2.0;
    p.meter = &meter;
    return tkv_compute_score(&p, r->o.x);
}

static int init_feedback(rig *r, size_t at, int x) {
    tkv_feedback_config cfg;
    memset(&cfg, 0, sizeof cfg);
    set_int(&cfg, at, x);
    return tkv_init_feedback(&r->o.controller, &cfg, NULL, 0);
}

static tkv_feedback make_feedback(int n) {
    tkv_feedback f;
    CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
    while (n-- > 0) CHECK_EQ(tkv_observe_score(&f, .5f), TKV_OK);
    return f;
}

static int get_advice(rig *r, int hot_tokens, int level) {
    tkv_feedback f = make_feedback(120);
    return tkv_get_advice(&f, hot_tokens, level, &r->o.advice);
}

static int get_feedback(rig *r, int last) {
    tkv_feedback f = make_feedback(1200);
    return tkv_get_feedback(&f, last, &r->o.feedback);
}

static tkv_threshold make_entry(void) {
    tkv_threshold e;
    memset(&e, 0, sizeof e);
    memcpy(e.model, "model", 6);
    e.context = 1000;
    e.score = .9f;
    return e;
}

static int put_entry(size_t at, int x) {
    tkv_threshold memory[4], e = make_entry();
    tkv_thresholds t;
    memset(memory, 0, sizeof memory);
    t.entry = memory;
    t.n = 0;
    t.capacity = 4;
    set_int(&e, at, x);
    return tkv_put_threshold(&t, &e);
}

enum { PUT, FIND, COPY, PRINT, PARSE };

/* Calls a function with two thresholds, whose n or capacity is x. */
static int call_with_thresholds(rig *r, int what, size_t at, int x) {
    tkv_threshold memory[4], copy[4], e = make_entry();
    tkv_thresholds t;
    int n, st;
    memset(memory, 0, sizeof memory);
    t.entry = memory;
    t.n = 0;
    t.capacity = 4;
    CHECK_EQ(tkv_put_threshold(&t, &e), TKV_OK);
    e.layer = 1;
    CHECK_EQ(tkv_put_threshold(&t, &e), TKV_OK);
    set_int(&t, at, x);
    e.layer = 2;
    n = t.n;
    memcpy(copy, memory, sizeof copy);
    switch (what) {
    case PUT: st = tkv_put_threshold(&t, &e); break;
    case FIND: st = tkv_find_thresholds(&t, "model", 0, 1000, r->o.found, 4, NULL); break;
    case COPY: st = tkv_copy_thresholds(&t, "model", "other", 0.0f); break;
    case PRINT: st = tkv_print_thresholds(&t, NULL, 0, &r->o.bytes); break;
    default: st = tkv_parse_thresholds(&t, "x", 1, NULL, 0); break;
    }
    if (st) CHECK_EQ(t.n, n);
    if (st) CHECK_MEM(memory, copy, sizeof copy);
    return st;
}

static int find_entry(rig *r, int entry_layer, int layer, int context, int capacity) {
    tkv_threshold memory[1];
    tkv_thresholds t;
    int found = -1, st;
    memory[0] = make_entry();
    memory[0].layer = entry_layer;
    t.entry = memory;
    t.n = t.capacity = 1;
    st = tkv_find_thresholds(&t, "model", layer, context, r->o.found, capacity, &found);
    CHECK(st ? found <= 0 : found == 1);
    return st;
}

/* Applies an entry of one layer, or of all with at = that of `layer`. An error leaves the config and its layers. */
static int apply_entry(size_t at, int x) {
    tkv_threshold e = make_entry();
    tkv_layer_config layers[4], layers_before[4];
    tkv_config cfg = tkv_default_config(), before;
    int st;
    memset(layers, 0, sizeof layers);
    cfg.model.n_layers = 4;
    cfg.model.n_heads = HEADS;
    cfg.model.head_dim = DIM;
    before = cfg;
    memcpy(layers_before, layers, sizeof layers);
    e.layer = 2;
    set_int(&e, at, x);
    st = tkv_apply_threshold(&cfg, layers, &e, NULL, 0);
    if (st) CHECK_MEM(&cfg, &before, sizeof cfg);
    if (st) CHECK_MEM(layers, layers_before, sizeof layers);
    else CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_OK);
    return st;
}

static void try_thresholds(rig *r) {
    const int capacities[] = {1, 4};
    int i;
    SAFE("tkv_init_feedback", "cooldown", PLAIN, 1000, "GGOOGG",
         init_feedback(r, OF(tkv_feedback_config, cooldown), x));
    SAFE("tkv_init_feedback", "min_hot", PLAIN, (1 << 30) - 1, "GGGOGG",
         init_feedback(r, OF(tkv_feedback_config, min_hot), x));
    SAFE("tkv_init_feedback", "max_hot", PLAIN, (1 << 30) - 1, "GGGOGG",
         init_feedback(r, OF(tkv_feedback_config, max_hot), x));
    SAFE("tkv_init_feedback", "min_level", PLAIN, 7, "GGGOGG",
         init_feedback(r, OF(tkv_feedback_config, min_level), x));
    SAFE("tkv_init_feedback", "max_level", PLAIN, 7, "GGOOGG",
         init_feedback(r, OF(tkv_feedback_config, max_level), x));
    SAFE("tkv_get_advice", "hot_tokens", PLAIN, (1 << 30) - 1, "AAAOAA", get_advice(r, x, 0));
    SAFE("tkv_get_advice", "level", PLAIN, 7, "AAAOAA", get_advice(r, 64, x));
    SAFE("tkv_get_feedback", "last", PLAIN, 1000, "AAAOAA", get_feedback(r, x));
    SAFE("tkv_compute_score", "source", PLAIN, TKV_SCORE_COUNT, "RRRRRROO", compute_score(r, x));
    SAFE("tkv_compute_score", "source", PLAIN, TKV_SCORE_METER, "...O", compute_score(r, x));
    EACH("tkv_put_threshold", "layer", PLAIN, 4095, "AAAOAA", put_entry(OF(tkv_threshold, layer), x));
    EACH("tkv_put_threshold", "layer", PLAIN, TKV_ALL_LAYERS, "...O", put_entry(OF(tkv_threshold, layer), x));
    EACH("tkv_put_threshold", "layer", PLAIN, TKV_NO_SEQ, "...A", put_entry(OF(tkv_threshold, layer), x));
    EACH("tkv_put_threshold", "context", PLAIN, (1 << 30) - 1, "AAAOAA",
         put_entry(OF(tkv_threshold, context), x));
    EACH("tkv_put_threshold", "hot_tokens", PLAIN, (1 << 30) - 1, "AOOOAA",
         put_entry(OF(tkv_threshold, hot_tokens), x));
    EACH("tkv_put_threshold", "warm_tokens", PLAIN, (1 << 30) - 1, "AOOOAA",
         put_entry(OF(tkv_threshold, warm_tokens), x));
    EACH("tkv_put_threshold", "hot_tokens", PLAIN, TKV_ALL_LAYERS, "...A",
         put_entry(OF(tkv_threshold, hot_tokens), x));
    EACH("tkv_put_threshold", "warm_tokens", PLAIN, TKV_ALL_LAYERS, "...A",
         put_entry(OF(tkv_threshold, warm_tokens), x));
    EACH("tkv_put_threshold", "samples", PLAIN, 1, "AAAOOO", put_entry(OF(tkv_threshold, samples), x));
    EACH("tkv_put_threshold", "archive.k", PLAIN, TKV_FORMAT_COUNT, "AAAAAA",
         put_entry(OF(tkv_threshold, archive.k), x));
    EACH("tkv_put_threshold", "archive.v", PLAIN, TKV_FORMAT_COUNT, "AAAAAA",
         put_entry(OF(tkv_threshold, archive.v), x));
    EACH("tkv_apply_threshold", "layer", PLAIN, 3, "AAAORA", apply_entry(OF(tkv_threshold, layer), x));
    EACH("tkv_apply_threshold", "layer", PLAIN, 4095, "...RAA", apply_entry(OF(tkv_threshold, layer), x));
    EACH("tkv_apply_threshold", "layer", PLAIN, TKV_ALL_LAYERS, "...O",
         apply_entry(OF(tkv_threshold, layer), x));
    EACH("tkv_apply_threshold", "context", PLAIN, (1 << 30) - 1, "AAAOAA",
         apply_entry(OF(tkv_threshold, context), x));
    EACH("tkv_apply_threshold", "hot_tokens", PLAIN, (1 << 30) - 1, "AOOOAA",
         apply_entry(OF(tkv_threshold, hot_tokens), x));
    EACH("tkv_apply_threshold", "warm_tokens", PLAIN, (1 << 30) - 1, "AOOOAA",
         apply_entry(OF(tkv_threshold, warm_tokens), x));
    EACH("tkv_apply_threshold", "samples", PLAIN, 1, "AAAOOO", apply_entry(OF(tkv_threshold, samples), x));
    EACH("tkv_apply_threshold", "archive.k", PLAIN, TKV_FORMAT_COUNT, "AAAAAA",
         apply_entry(OF(tkv_threshold, archive.k), x));
    EACH("tkv_apply_threshold", "archive.v", PLAIN, TKV_FORMAT_COUNT, "AAAAAA",
         apply_entry(OF(tkv_threshold, archive.v), x));
    EACH("tkv_put_threshold", "n", PLAIN, 5, "AAAAAA",
         call_with_thresholds(r, PUT, OF(tkv_thresholds, n), x));
    EACH("tkv_put_threshold", "capacity", PLAIN, 2, "AAAC..",
         call_with_thresholds(r, PUT, OF(tkv_thresholds, capacity), x));
    for (i = 0; i < COUNT(capacities); i++) {
        const int capacity = capacities[i];
        SAFE("tkv_find_thresholds", "layer", PLAIN, 0, "RRRORR", find_entry(r, 0, x, 900, capacity));
        SAFE("tkv_find_thresholds", "layer", PLAIN, TKV_ALL_LAYERS, "...R",
             find_entry(r, 0, x, 900, capacity));
        SAFE("tkv_find_thresholds", "layer, entry of all", PLAIN, 4095, "RRRORR",
             find_entry(r, TKV_ALL_LAYERS, x, 900, capacity));
        SAFE("tkv_find_thresholds", "layer, entry of all", PLAIN, TKV_ALL_LAYERS, "...O",
             find_entry(r, TKV_ALL_LAYERS, x, 900, capacity));
        SAFE("tkv_find_thresholds", "context", PLAIN, (1 << 30) - 1, "RRRORR",
             find_entry(r, 0, 0, x, capacity));
    }
    SAFE("tkv_find_thresholds", "most", PLAIN, 0, "AAAAOO", find_entry(r, 0, 0, 1000, x));
    SAFE("tkv_find_thresholds", "most", PLAIN, TKV_THRESHOLD_CANDIDATES, "AAAOOO",
         find_entry(r, 0, 0, 1000, x));
    SAFE("tkv_find_thresholds", "n", PLAIN, 5, "AAAAAA",
         call_with_thresholds(r, FIND, OF(tkv_thresholds, n), x));
    SAFE("tkv_find_thresholds", "capacity", PLAIN, 2, "AAAO..",
         call_with_thresholds(r, FIND, OF(tkv_thresholds, capacity), x));
    EACH("tkv_copy_thresholds", "n", PLAIN, 5, "AAAAAA",
         call_with_thresholds(r, COPY, OF(tkv_thresholds, n), x));
    EACH("tkv_copy_thresholds", "capacity", PLAIN, 2, "AAAC..",
         call_with_thresholds(r, COPY, OF(tkv_thresholds, capacity), x));
    SAFE("tkv_print_thresholds", "n", PLAIN, 5, "AAAAAA",
         call_with_thresholds(r, PRINT, OF(tkv_thresholds, n), x));
    SAFE("tkv_print_thresholds", "capacity", PLAIN, 2, "AAAO..",
         call_with_thresholds(r, PRINT, OF(tkv_thresholds, capacity), x));
    EACH("tkv_parse_thresholds", "capacity", PLAIN, 1, "AAA*..",
         call_with_thresholds(r, PARSE, OF(tkv_thresholds, capacity), x));
}

/* >>importance */
/* A mode says what tkv_update_importance does: it adds scores, computes the importance, both or neither. */
enum { ADD = 1, COMPUTE = 2 };

/* An error must leave the tokens as they were. */
static int update_importance(rig *r, const tkv_importance_config *cfg, int mode, tkv_token_importance *tokens,
                             const int *positions, int n, int now) {
    tkv_token_importance copy[4];
    tkv_status st;
    memcpy(copy, tokens, sizeof copy);
    st = tkv_update_importance(cfg, tokens, positions, mode & ADD ? scores_in : NULL, n, now,
                               mode & COMPUTE ? r->o.x : NULL);
    if (st) CHECK_MEM(tokens, copy, sizeof copy);
    return st;
}

/* Sets the step and the position of token 3. */
static int update_token(rig *r, int mode, int n, int now, int step, int position) {
    tkv_token_importance tokens[4];
    int positions[4] = {0, 1, 2, 3};
    memset(tokens, 0, sizeof tokens);
    tokens[3].step = step;
    positions[3] = position;
    return update_importance(r, NULL, mode, tokens, positions, n, now);
}

/* Without an array of positions, tokens have positions 0 to 3. */
static int update_without_positions(rig *r, int mode, int now) {
    tkv_token_importance tokens[4];
    memset(tokens, 0, sizeof tokens);
    return update_importance(r, NULL, mode, tokens, NULL, 4, now);
}

static int update_with_config(rig *r, int mode, size_t at, int x) {
    tkv_token_importance tokens[4];
    tkv_importance_config cfg;
    memset(tokens, 0, sizeof tokens);
    memset(&cfg, 0, sizeof cfg);
    set_int(&cfg, at, x);
    return update_importance(r, &cfg, mode, tokens, NULL, 1, 1);
}

enum { CFG_PER_STEP, CFG_COOLDOWN, P_STEP, P_USED };

static int promote_blocks(rig *r, int seq, int layer, int what, int x) {
    tkv_promotion p;
    memset(&p, 0, sizeof p);
    if (what == CFG_PER_STEP) p.by.cfg.per_step = x;
    if (what == CFG_COOLDOWN) p.by.cfg.cooldown = x;
    if (what == P_STEP) p.by.step = x;
    if (what == P_USED) p.by.used = x;
    return tkv_promote_important(r->kv, seq, layer, &p);
}

static void try_importance_rules(rig *r) {
    int mode;
    for (mode = ADD; mode <= (ADD | COMPUTE); mode++) {
        SAFE("tkv_update_importance", "n", PLAIN, 4, "AAAO..", update_token(r, mode, x, 9, 9, 3));
        SAFE("tkv_update_importance", "now", PLAIN, 9, "AAAOOO", update_token(r, mode, 4, x, 9, 3));
        SAFE("tkv_update_importance", "now", PLAIN, 8, "AAAAOO", update_token(r, mode, 4, x, 9, 3));
        SAFE("tkv_update_importance", "now, no positions", PLAIN, 3, "AAAOOOAA",
             update_without_positions(r, mode, x));
        SAFE("tkv_update_importance", "step", PLAIN, 9, "AAAOAA", update_token(r, mode, 4, 9, x, 3));
        SAFE("tkv_update_importance", "position", PLAIN, 9, "AAAOAA", update_token(r, mode, 4, 9, 9, x));
        SAFE("tkv_update_importance", "strategy", PLAIN, TKV_IMPORTANCE_COUNT, "GGGGGG",
             update_with_config(r, mode, OF(tkv_importance_config, strategy), x));
        SAFE("tkv_update_importance", "heads", PLAIN, 3, "GGGGGG",
             update_with_config(r, mode, OF(tkv_importance_config, heads), x));
        SAFE("tkv_update_importance", "sample_every", PLAIN, (1 << 30) - 1, "GGGOGG",
             update_with_config(r, mode, OF(tkv_importance_config, sample_every), x));
    }
    for (mode = 0; mode <= (ADD | COMPUTE); mode++)
        SAFE("tkv_update_importance", "now, n = 0", PLAIN, 9, "AAAOOO", update_token(r, mode, 0, x, 9, 3));
    EACH("tkv_bound_score", "head_dim", PLAIN, DIM, "OOO*..",
         sign_of((double)tkv_bound_score(q_in, k_in, k_in, x)));
}

static void try_importance(rig *r) {
    const int with_scores = OFFLOAD | DISCARD | EVICT | BUDGET;
    SAFE("tkv_get_importance", "seq", EVERY, SEQS, "AAAAAA",
         tkv_get_importance(r->kv, x, 0, 0, 1, r->o.x, r->o.mask));
    SAFE("tkv_get_importance", "layer", with_scores, LAYERS, "AAAAAAOA",
         tkv_get_importance(r->kv, 0, x, 0, 1, r->o.x, r->o.mask));
    SAFE("tkv_get_importance", "layer", EVERY, TKV_ALL_LAYERS, "...A",
         tkv_get_importance(r->kv, 0, x, 0, 1, r->o.x, r->o.mask));
    SAFE("tkv_get_importance", "start", with_scores, LENGTH, "RRRRRR",
         tkv_get_importance(r->kv, 0, 0, x, 1, r->o.x, r->o.mask));
    SAFE("tkv_get_importance", "n", with_scores, LENGTH, "AAAORR",
         tkv_get_importance(r->kv, 0, 0, 0, x, r->o.x, r->o.mask));
    EACH("tkv_add_scores", "seq", EVERY, SEQS, "AAAAAA", tkv_add_scores(r->kv, x, 0, 0, 1, scores_in));
    EACH("tkv_add_scores", "layer", with_scores, LAYERS, "AAAAAAOA",
         tkv_add_scores(r->kv, 0, x, 0, 1, scores_in));
    EACH("tkv_add_scores", "layer", EVERY, TKV_ALL_LAYERS, "...A",
         tkv_add_scores(r->kv, 0, x, 0, 1, scores_in));
    EACH("tkv_add_scores", "start", with_scores, LENGTH, "RRRRRR",
         tkv_add_scores(r->kv, 0, 0, x, 1, scores_in));
    EACH("tkv_add_scores", "n", with_scores, LENGTH, "AAAORR", tkv_add_scores(r->kv, 0, 0, 0, x, scores_in));
    SAFE("tkv_find_top_tokens", "seq", EVERY, SEQS, "AAAAAA",
         tkv_find_top_tokens(r->kv, x, 0, 3, 0, r->o.ranked, &r->o.a));
    SAFE("tkv_find_top_tokens", "layer", with_scores, LAYERS, "AAAAAAOA",
         tkv_find_top_tokens(r->kv, 0, x, 3, 0, r->o.ranked, &r->o.a));
    SAFE("tkv_find_top_tokens", "layer", EVERY, TKV_ALL_LAYERS, "...A",
         tkv_find_top_tokens(r->kv, 0, x, 3, 0, r->o.ranked, &r->o.a));
    SAFE("tkv_find_top_tokens", "k", with_scores, LENGTH, "AAAOOO",
         tkv_find_top_tokens(r->kv, 0, 0, x, 0, r->o.ranked, &r->o.a));
    SAFE("tkv_find_top_tokens", "protect", with_scores, 1, "OOOOOO",
         tkv_find_top_tokens(r->kv, 0, 0, 3, x, r->o.ranked, &r->o.a));
    EACH("tkv_promote_important", "seq", EVERY, SEQS, "AAAAAA", promote_blocks(r, x, 0, -1, 0));
    EACH("tkv_promote_important", "layer", EVERY, LAYERS, "AAAAAAAA", promote_blocks(r, 0, x, -1, 0));
    EACH("tkv_promote_important", "layer, seq = 1", EVERY, LAYERS, "AAAAAAAA",
         promote_blocks(r, 1, x, -1, 0));
    EACH("tkv_promote_important", "layer", EVERY, TKV_ALL_LAYERS, "...A", promote_blocks(r, 0, x, -1, 0));
    EACH("tkv_promote_important", "per_step", with_scores, 64, "GGG*GG",
         promote_blocks(r, 0, 0, CFG_PER_STEP, x));
    EACH("tkv_promote_important", "cooldown", with_scores, 4, "GG****",
         promote_blocks(r, 0, 0, CFG_COOLDOWN, x));
    EACH("tkv_promote_important", "step", with_scores, LENGTH, "******", promote_blocks(r, 0, 0, P_STEP, x));
    EACH("tkv_promote_important", "used", with_scores, 8, "AAA***", promote_blocks(r, 0, 0, P_USED, x));
}

/* >>eviction: rules */
static int select_from_view(rig *r, tkv_evict_policy policy, size_t at, int x) {
    tkv_evict_config cfg;
    tkv_evict_view v;
    memset(&cfg, 0, sizeof cfg);
    memset(&v, 0, sizeof v);
    cfg.policy = policy;
    v.n = 40;
    v.prompt_scores = v.total_scores = scores_in;
    v.keys = k_in;
    v.n_kv_heads = 1;
    v.head_dim = DIM;
    set_int(&v, at, x);
    return tkv_select_victims(&cfg, &v, 8, r->o.x, r->o.mask, &r->o.result);
}

static int select_with_position(rig *r, int x) {
    tkv_evict_config cfg;
    tkv_evict_view v;
    int at[4] = {0, 1, 2, 3};
    memset(&cfg, 0, sizeof cfg);
    memset(&v, 0, sizeof v);
    cfg.policy = TKV_EVICT_RANDOM;
    v.n = 4;
    v.positions = at;
    at[3] = x;
    return tkv_select_victims(&cfg, &v, 2, r->o.x, r->o.mask, &r->o.result);
}

static int select_with_config(rig *r, size_t at, int x) {
    tkv_evict_config cfg;
    tkv_evict_view v;
    memset(&cfg, 0, sizeof cfg);
    memset(&v, 0, sizeof v);
    cfg.policy = TKV_EVICT_SNAPKV;
    v.n = 40;
    v.prompt_scores = scores_in;
    set_int(&cfg, at, x);
    return tkv_select_victims(&cfg, &v, 8, r->o.x, r->o.mask, &r->o.result);
}

static int select_with_keep(rig *r, tkv_evict_policy policy, int n, int keep) {
    tkv_evict_config cfg;
    tkv_evict_view v;
    memset(&cfg, 0, sizeof cfg);
    memset(&v, 0, sizeof v);
    cfg.policy = policy;
    v.n = n;
    v.total_scores = scores_in;
    return tkv_select_victims(&cfg, &v, keep, r->o.x, r->o.mask, &r->o.result);
}

static int split_budget(rig *r, tkv_evict_shape shape, size_t at, int x) {
    tkv_evict_budget b;
    memset(&b, 0, sizeof b);
    b.shape = shape;
    b.n_layers = 4;
    b.total = 400;
    b.n_tokens = 1000;
    set_int(&b, at, x);
    return tkv_split_evict_budget(&b, r->o.list);
}

static int split_total(rig *r, tkv_evict_shape shape, int64_t total) {
    tkv_evict_budget b;
    memset(&b, 0, sizeof b);
    b.shape = shape;
    b.n_layers = CAPACITY;
    b.total = total;
    b.n_tokens = (1 << 30) - 1;
    b.beta = 100;
    return tkv_split_evict_budget(&b, r->o.list);
}

static void try_eviction_rules(rig *r) {
    int shape;
    SAFE("tkv_select_victims", "n", PLAIN, 1 << 30, "AAAAAA",
         select_from_view(r, TKV_EVICT_H2O, OF(tkv_evict_view, n), x));
    SAFE("tkv_select_victims", "n", PLAIN, CAPACITY, "AAAO",
         select_from_view(r, TKV_EVICT_H2O, OF(tkv_evict_view, n), x));
    SAFE("tkv_select_victims", "n_kv_heads", PLAIN, 1, "AAAO..",
         select_from_view(r, TKV_EVICT_KEYDIFF, OF(tkv_evict_view, n_kv_heads), x));
    SAFE("tkv_select_victims", "head_dim", PLAIN, TKV_MAX_HEAD_DIM, "AAAOAA",
         select_from_view(r, TKV_EVICT_KEYDIFF, OF(tkv_evict_view, head_dim), x));
    SAFE("tkv_select_victims", "position", PLAIN, 3, "AAAOOO", select_with_position(r, x));
    SAFE("tkv_select_victims", "policy", PLAIN, TKV_EVICT_COUNT, "GGGGGG",
         select_with_config(r, OF(tkv_evict_config, policy), x));
    SAFE("tkv_select_victims", "keep_tokens", PLAIN, (1 << 30) - 1, "GGGOGG",
         select_with_config(r, OF(tkv_evict_config, keep_tokens), x));
    SAFE("tkv_select_victims", "sink_tokens", PLAIN, (1 << 30) - 1, "GGOOGG",
         select_with_config(r, OF(tkv_evict_config, sink_tokens), x));
    SAFE("tkv_select_victims", "recent_tokens", PLAIN, (1 << 30) - 1, "GGOOGG",
         select_with_config(r, OF(tkv_evict_config, recent_tokens), x));
    SAFE("tkv_select_victims", "pool", PLAIN, 63, "GGGOGG",
         select_with_config(r, OF(tkv_evict_config, pool), x));
    SAFE("tkv_select_victims", "seed", PLAIN, 1, "OOOOOO",
         select_with_config(r, OF(tkv_evict_config, seed), x));
    SAFE("tkv_select_victims", "batch", PLAIN, (1 << 30) - 1, "GGGOGG",
         select_with_config(r, OF(tkv_evict_config, batch), x));
    SAFE("tkv_select_victims", "keep", PLAIN, 40, "AAAOOO", select_with_keep(r, TKV_EVICT_FIFO, 40, x));
    SAFE("tkv_select_victims", "keep, h2o", PLAIN, 0, "AAAOOO", select_with_keep(r, TKV_EVICT_H2O, 40, x));
    SAFE("tkv_select_victims", "keep, n = 0", PLAIN, 0, "AAAOOO", select_with_keep(r, TKV_EVICT_FIFO, 0, x));
    SAFE("tkv_split_evict_budget", "shape", PLAIN, 3, "AAAAAA",
         split_budget(r, TKV_EVICT_UNIFORM, OF(tkv_evict_budget, shape), x));
    for (shape = TKV_EVICT_UNIFORM; shape <= TKV_EVICT_LINEAR; shape++) {
        const tkv_evict_shape s = (tkv_evict_shape)shape;
        SAFE("tkv_split_evict_budget", "n_layers", PLAIN, 4097, "AAAAAA",
             split_budget(r, s, OF(tkv_evict_budget, n_layers), x));
        SAFE("tkv_split_evict_budget", "n_tokens", PLAIN, (1 << 30) - 1, "AAAOAA",
             split_budget(r, s, OF(tkv_evict_budget, n_tokens), x));
        SAFE("tkv_split_evict_budget", "window", PLAIN, (1 << 30) - 1, "AAOOAA",
             split_budget(r, s, OF(tkv_evict_budget, window), x));
        SAFE("tkv_split_evict_budget", "beta", PLAIN, 100, "AAAOAA",
             split_budget(r, s, OF(tkv_evict_budget, beta), x));
        SAFE("tkv_split_evict_budget", "total", PLAIN, (1 << 30) - 1, "AAA*AA",
             split_total(r, s, x < 0 ? x : (int64_t)x * CAPACITY));
    }
}

/* >>eviction in a cache */
static int call_evict(rig *r, const uint64_t *victims, size_t at, int x) {
    tkv_evict_params p;
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.victims = victims;
    p.n_victims = LENGTH;
    p.keep = 100;
    set_int(&p, at, x);
    return tkv_evict(r->kv, &p);
}

static int evict_with_config(rig *r, tkv_evict_policy kind, size_t at, int x) {
    tkv_evict_config cfg;
    tkv_evict_params p;
    memset(&cfg, 0, sizeof cfg);
    memset(&p, 0, sizeof p);
    cfg.policy = kind;
    set_int(&cfg, at, x);
    p.layer = TKV_ALL_LAYERS;
    p.keep = 100;
    p.evict = &cfg;
    return tkv_evict(r->kv, &p);
}

static void try_eviction(rig *r) {
    const int ends[] = {TKV_UNLIMITED, TKV_OFF, 500};
    int i;
    EACH("tkv_evict", "seq", EVERY, SEQS, "AAAAAA", call_evict(r, NULL, OF(tkv_evict_params, seq), x));
    EACH("tkv_evict", "layer", EVERY, LAYERS, "AAAAAAAA",
         call_evict(r, NULL, OF(tkv_evict_params, layer), x));
    EACH("tkv_evict", "layer", EVICT | BUDGET, TKV_ALL_LAYERS, "...O",
         call_evict(r, NULL, OF(tkv_evict_params, layer), x));
    EACH("tkv_evict", "keep", EVICT, LENGTH, "AAAOOO", call_evict(r, NULL, OF(tkv_evict_params, keep), x));
    EACH("tkv_evict", "evict.policy", EVICT, TKV_EVICT_COUNT, "GGGGGG",
         evict_with_config(r, TKV_EVICT_H2O, OF(tkv_evict_config, policy), x));
    EACH("tkv_evict", "evict.keep_tokens", EVICT, (1 << 30) - 1, "GGGOGG",
         evict_with_config(r, TKV_EVICT_H2O, OF(tkv_evict_config, keep_tokens), x));
    EACH("tkv_evict", "evict.sink_tokens", EVICT, (1 << 30) - 1, "GGOOGG",
         evict_with_config(r, TKV_EVICT_H2O, OF(tkv_evict_config, sink_tokens), x));
    EACH("tkv_evict", "evict.recent_tokens", EVICT, (1 << 30) - 1, "GGOOGG",
         evict_with_config(r, TKV_EVICT_H2O, OF(tkv_evict_config, recent_tokens), x));
    EACH("tkv_evict", "evict.pool", EVICT, 63, "GGGOGG",
         evict_with_config(r, TKV_EVICT_H2O, OF(tkv_evict_config, pool), x));
    EACH("tkv_evict", "evict.seed", EVICT, 1, "OOOOOO",
         evict_with_config(r, TKV_EVICT_FIFO, OF(tkv_evict_config, seed), x));
    EACH("tkv_evict", "evict.batch", EVICT, (1 << 30) - 1, "GGGOGG",
         evict_with_config(r, TKV_EVICT_FIFO, OF(tkv_evict_config, batch), x));
    EACH("tkv_evict", "seq, victims", EVERY, SEQS, "AAAAAA", evict_tokens(r->kv, x, 0, bits_in, 64));
    EACH("tkv_evict", "layer, victims", EVERY, LAYERS, "AAAAAAAA", evict_tokens(r->kv, 0, x, bits_in, 64));
    EACH("tkv_evict", "layer, victims", EVICT | BUDGET, TKV_ALL_LAYERS, "...O",
         evict_tokens(r->kv, 0, x, bits_in, 64));
    EACH("tkv_evict", "n_victims", EVICT | BUDGET, LENGTH, "AAAOOO", evict_tokens(r->kv, 0, 0, bits_in, x));
    EACH("tkv_evict", "n_victims, all layers", EVICT | BUDGET, LENGTH, "AAAOOO",
         evict_tokens(r->kv, 0, TKV_ALL_LAYERS, bits_in, x));
    EACH("tkv_evict", "keep, victims", EVICT | BUDGET, LENGTH, "OOOOOO",
         call_evict(r, bits_in, OF(tkv_evict_params, keep), x));
    EACH("tkv_seq_pin", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_pin(r->kv, x, 0, 1, TKV_UNLIMITED));
    for (i = 0; i < COUNT(ends); i++) {
        const int until = ends[i];
        EACH("tkv_seq_pin", "start", EVICT | BUDGET, LENGTH, "AAAOOA", tkv_seq_pin(r->kv, 0, x, 1, until));
        EACH("tkv_seq_pin", "n", EVICT | BUDGET, LENGTH, "AAAOOA", tkv_seq_pin(r->kv, 0, 1, x, until));
    }
    EACH("tkv_seq_pin", "until", EVICT | BUDGET, (1 << 30) - 2, "AOOOAA", tkv_seq_pin(r->kv, 0, 1, 2, x));
    EACH("tkv_seq_pin", "until", EVICT | BUDGET, 0, "...AO", tkv_seq_pin(r->kv, 0, 1, 2, x));
    EACH("tkv_seq_pin", "until", EVICT | BUDGET, TKV_ALL_LAYERS, "...A", tkv_seq_pin(r->kv, 0, 1, 2, x));
    EACH("tkv_seq_pin", "until, n = 0", EVICT | BUDGET, (1 << 30) - 2, "AOOOAA",
         tkv_seq_pin(r->kv, 0, 1, 0, x));
    EACH("tkv_seq_set_sinks", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_set_sinks(r->kv, x, 0, 0, 1));
    EACH("tkv_seq_set_sinks", "start", EVERY & ~EVICT, LENGTH, "AAARRA",
         tkv_seq_set_sinks(r->kv, 0, x, 1, 1));
    EACH("tkv_seq_set_sinks", "start, off", EVERY & ~EVICT, LENGTH, "AAAOOA",
         tkv_seq_set_sinks(r->kv, 0, x, 1, 0));
    EACH("tkv_seq_set_sinks", "n", EVERY & ~EVICT, LENGTH, "AAARRA", tkv_seq_set_sinks(r->kv, 0, 1, x, 1));
    EACH("tkv_seq_set_sinks", "n, off", EVERY & ~EVICT, LENGTH, "AAAOOA",
         tkv_seq_set_sinks(r->kv, 0, 1, x, 0));
    EACH("tkv_seq_set_sinks", "on, n = 0", EVERY & ~EVICT, 1, "AAAOAAOA",
         tkv_seq_set_sinks(r->kv, 0, 0, 0, x));
}

/* >>discarding and recomputation */
static tkv_remat_config make_remat_config(void) {
    tkv_remat_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.n_layers = LAYERS;
    cfg.n_heads = HEADS;
    cfg.head_dim = DIM;
    cfg.layer_params = 1000.0;
    cfg.min_materialized = TKV_OFF;
    return cfg;
}

static tkv_remat make_remat(void) {
    const tkv_remat_config cfg = make_remat_config();
    tkv_remat remat;
    CHECK_EQ(tkv_init_remat(&remat, &cfg, NULL, 0), TKV_OK);
    return remat;
}

static int init_remat(rig *r, size_t at, int x) {
    tkv_remat_config cfg = make_remat_config();
    set_int(&cfg, at, x);
    return tkv_init_remat(&r->o.remat, &cfg, NULL, 0);
}

enum { OF_N, OF_NOW, OF_BLOCK };

/* An error must leave the controller as it was. */
static int decide_discard(rig *r, int what, size_t at, int x) {
    tkv_remat remat = make_remat(), copy;
    tkv_remat_block block[2];
    tkv_status st;
    int n = 2, now = 200;
    memset(block, 0, sizeof block);
    block[0].end = block[1].start = 64;
    block[1].end = 128;
    block[0].bytes = block[1].bytes = 1000;
    remat.step = 100;
    if (what == OF_N) n = x;
    if (what == OF_NOW) now = x;
    if (what == OF_BLOCK) set_int(&block[1], at, x);
    memcpy(&copy, &remat, sizeof copy);
    st = tkv_decide_discard(&remat, block, n, now, 1.0f, 500, r->o.action, &r->o.bytes);
    if (st) CHECK_MEM(&remat, &copy, sizeof remat);
    return st;
}

static tkv_status restore_all(void *user, tkv_cache *kv, int seq, int first, int n_layers, int start, int n) {
    tkv_status st = TKV_OK;
    int l;
    (void)user;
    for (l = first; l < first + n_layers && !st; l++)
        if (l != 1 && l != 2) st = tkv_restore(kv, seq, l, start, k_in, v_in, n);
    return st;
}

static int recompute(rig *r, int seq, int last, int step) {
    tkv_remat remat = make_remat();
    remat.step = last;
    return tkv_seq_recompute(r->kv, seq, &remat, step, restore_all, NULL, &r->o.a);
}

static int free_bytes(rig *r, int seq, int capacity) {
    tkv_remat remat = make_remat();
    return tkv_seq_free_bytes(r->kv, seq, &remat, 1.0f, 100000, r->o.block, r->o.action, capacity,
                              &r->o.bytes);
}

static void try_remat(rig *r) {
    SAFE("tkv_init_remat", "n_layers", PLAIN, 4096, "GGGOGG",
         init_remat(r, OF(tkv_remat_config, n_layers), x));
    SAFE("tkv_init_remat", "n_heads", PLAIN, 65536, "GGOOGG",
         init_remat(r, OF(tkv_remat_config, n_heads), x));
    SAFE("tkv_init_remat", "head_dim", PLAIN, TKV_MAX_HEAD_DIM, "GGGOGG",
         init_remat(r, OF(tkv_remat_config, head_dim), x));
    SAFE("tkv_init_remat", "min_materialized", PLAIN, 1, "GGOOOO",
         init_remat(r, OF(tkv_remat_config, min_materialized), x));
    SAFE("tkv_init_remat", "sink_tokens", PLAIN, 1, "GGOOOO",
         init_remat(r, OF(tkv_remat_config, sink_tokens), x));
    SAFE("tkv_decide_discard", "n", PLAIN, 2, "AAAO..", decide_discard(r, OF_N, 0, x));
    SAFE("tkv_decide_discard", "now", PLAIN, 127, "AAAOOO", decide_discard(r, OF_NOW, 0, x));
    SAFE("tkv_decide_discard", "start", PLAIN, 65, "AAAAAA",
         decide_discard(r, OF_BLOCK, OF(tkv_remat_block, start), x));
    SAFE("tkv_decide_discard", "end", PLAIN, 201, "AAAOAA",
         decide_discard(r, OF_BLOCK, OF(tkv_remat_block, end), x));
    SAFE("tkv_decide_discard", "layers", PLAIN, LAYERS, "AAAOAA",
         decide_discard(r, OF_BLOCK, OF(tkv_remat_block, layers), x));
    EACH("tkv_seq_discard", "seq", EVERY, SEQS, "AAAAAA", tkv_seq_discard(r->kv, x, 64, &r->o.a));
    EACH("tkv_seq_discard", "n_tokens", EVERY, LENGTH, "AAAOOO", tkv_seq_discard(r->kv, 0, x, &r->o.a));
    SAFE("tkv_seq_find_discarded", "seq", EVERY, SEQS, "AAAAAA",
         tkv_seq_find_discarded(r->kv, x, &r->o.a, &r->o.b));
    EACH("tkv_restore", "seq", EVERY, SEQS, "AAAAAA", tkv_restore(r->kv, x, 0, 4, k_in, v_in, 64));
    EACH("tkv_restore", "layer", EVERY, LAYERS, "AAAAAAAA", tkv_restore(r->kv, 0, x, 4, k_in, v_in, 64));
    EACH("tkv_restore", "layer, seq = 1", EVERY, LAYERS, "AAAAAAAA",
         tkv_restore(r->kv, 1, x, 4, k_in, v_in, 64));
    EACH("tkv_restore", "layer", EVERY, TKV_ALL_LAYERS, "...A", tkv_restore(r->kv, 0, x, 4, k_in, v_in, 64));
    EACH("tkv_restore", "start", EVERY, LENGTH, "AAARRR", tkv_restore(r->kv, 0, 0, x, k_in, v_in, 64));
    EACH("tkv_restore", "n", DISCARD, LENGTH - 4, "AAAORR", tkv_restore(r->kv, 0, 0, 4, k_in, v_in, x));
    EACH("tkv_seq_recompute", "seq", EVERY, SEQS, "AAAAAA", recompute(r, x, 0, 1));
    EACH("tkv_seq_recompute", "step", DISCARD, 9, "AAAOOO", recompute(r, 0, 9, x));
    EACH("tkv_seq_recompute", "r.step", DISCARD, 9, "OOOOAA", recompute(r, 0, x, 9));
    SAFE("tkv_seq_list_blocks", "seq", EVERY, SEQS, "AAAAAA",
         tkv_seq_list_blocks(r->kv, x, r->o.block, BLOCKS, &r->o.a));
    SAFE("tkv_seq_list_blocks", "capacity", EVERY, BLOCKS, "AAAOOO",
         tkv_seq_list_blocks(r->kv, 0, r->o.block, x, &r->o.a));
    EACH("tkv_seq_free_bytes", "seq", EVERY, SEQS, "AAAAAA", free_bytes(r, x, BLOCKS));
    EACH("tkv_seq_free_bytes", "capacity", EVERY, 1, "AAAAAO", free_bytes(r, 0, x));
}

/* >>codec */
enum { SIZE, ENCODE, DECODE };

static int call_codec(rig *r, int what, tkv_format format, size_t at, int x) {
    tkv_codec c;
    size_t size;
    memset(&c, 0, sizeof c);
    c.format = format;
    c.head_dim = DIM;
    c.rope.dim = DIM;
    set_int(&c, at, x);
    if (what == SIZE) return tkv_get_block_bytes(&c) > 0 ? TKV_OK : TKV_ERR_ARG;
    size = tkv_get_block_bytes(&c) ? tkv_get_block_bytes(&c) : sizeof r->o.code;
    if (size > sizeof r->o.code) return TKV_ERR_BROKEN;
    if (what == ENCODE) return tkv_encode_block(&c, k_in, 0, 64, r->o.code, size);
    return tkv_decode_block(&c, r->o.code, size, 64, r->o.k, 0);
}

static int rotate(size_t at, int x, int head_dim, int positions) {
    float q[TKV_MAX_HEAD_DIM] = {0};
    tkv_rope rope;
    memset(&rope, 0, sizeof rope);
    rope.dim = DIM;
    set_int(&rope, at, x);
    return tkv_rotate_rope(&rope, head_dim, positions, q);
}

static int code_tokens(rig *r, int decode, int n_tokens) {
    tkv_codec c;
    memset(&c, 0, sizeof c);
    c.format = TKV_KIVI4;
    c.head_dim = DIM;
    if (decode) return tkv_decode_block(&c, r->o.code, sizeof r->o.code, n_tokens, r->o.k, 0);
    return tkv_encode_block(&c, k_in, 0, n_tokens, r->o.code, sizeof r->o.code);
}

static void try_codec(rig *r) {
    static const char *const names[] = {"tkv_get_block_bytes", "tkv_encode_block", "tkv_decode_block"};
    int i;
    for (i = 0; i < COUNT(names); i++) {
        SAFE(names[i], "format", PLAIN, TKV_FORMAT_COUNT, "AAAAAA",
             call_codec(r, i, TKV_KIVI4, OF(tkv_codec, format), x));
        SAFE(names[i], "side", PLAIN, 2, "AAAAAA", call_codec(r, i, TKV_KIVI4, OF(tkv_codec, side), x));
        SAFE(names[i], "head_dim", PLAIN, TKV_MAX_HEAD_DIM, "AAAOAA",
             call_codec(r, i, TKV_KIVI4, OF(tkv_codec, head_dim), x));
        SAFE(names[i], "group_size", PLAIN, 64, "AAAOAA",
             call_codec(r, i, TKV_KIVI4, OF(tkv_codec, options.group_size), x));
        SAFE(names[i], "fit", PLAIN, 5, "AAAOAA", call_codec(r, i, TKV_KIVI4, OF(tkv_codec, options.fit), x));
        SAFE(names[i], "rotate", PLAIN, 3, "AAAOAA",
             call_codec(r, i, TKV_INT8, OF(tkv_codec, options.rotate), x));
        SAFE(names[i], "center_k", PLAIN, 1, "AAAOAA",
             call_codec(r, i, TKV_INT8, OF(tkv_codec, options.center_k), x));
        SAFE(names[i], "subspaces", PLAIN, 16, "AAAOAA",
             call_codec(r, i, TKV_SUBSPACE4, OF(tkv_codec, options.subspaces), x));
        SAFE(names[i], "kvquant", PLAIN, 63, "AAAOAA",
             call_codec(r, i, TKV_KVQUANT3, OF(tkv_codec, options.kvquant), x));
        SAFE(names[i], "kvquant_outliers", PLAIN, 30, "AAAOAA",
             call_codec(r, i, TKV_KVQUANT3, OF(tkv_codec, options.kvquant_outliers), x));
        SAFE(names[i], "int_bits", PLAIN, 8, "AAAOAA",
             call_codec(r, i, TKV_INT4, OF(tkv_codec, options.int_bits), x));
        SAFE(names[i], "k_scales", PLAIN, 2, "AAAOAA",
             call_codec(r, i, TKV_KIVI4, OF(tkv_codec, options.k_scales), x));
        SAFE(names[i], "unrotated", PLAIN, 1, "AAAOAA",
             call_codec(r, i, TKV_SUBSPACE4, OF(tkv_codec, options.unrotated), x));
        SAFE(names[i], "position", PLAIN, 1 << 30, "AAAOOO",
             call_codec(r, i, TKV_KVQUANT3, OF(tkv_codec, position), x));
        SAFE(names[i], "rope.dim", PLAIN, DIM, "AAOOAA",
             call_codec(r, i, TKV_KVQUANT3, OF(tkv_codec, rope.dim), x));
        SAFE(names[i], "rope.interleaved", PLAIN, 1, "AAAOAA",
             call_codec(r, i, TKV_KVQUANT3, OF(tkv_codec, rope.interleaved), x));
    }
    EACH("tkv_rotate_rope", "rope.dim", PLAIN, DIM, "AAOOAA", rotate(OF(tkv_rope, dim), x, DIM, 1));
    EACH("tkv_rotate_rope", "rope.interleaved", PLAIN, 1, "AAAOAA",
         rotate(OF(tkv_rope, interleaved), x, DIM, 1));
    EACH("tkv_rotate_rope", "rope.kind", PLAIN, TKV_ROPE_COUNT - 1, "AAAUAA",
         rotate(OF(tkv_rope, kind), x, DIM, 1));
    EACH("tkv_rotate_rope", "head_dim", PLAIN, TKV_MAX_HEAD_DIM, "AAAOAA",
         rotate(OF(tkv_rope, dim), DIM, x, 1));
    EACH("tkv_rotate_rope", "positions", PLAIN, 9, "OOOOOO", rotate(OF(tkv_rope, dim), DIM, DIM, x));
    SAFE("tkv_encode_block", "n_tokens", PLAIN, 64, "AAAOAA", code_tokens(r, 0, x));
    SAFE("tkv_decode_block", "n_tokens", PLAIN, 64, "AAAOAA", code_tokens(r, 1, x));
}

/* >>all rows in all caches */
static void try_all(int kind) {
    rig *r = (rig *)calloc(1, sizeof *r);
    if (!r) exit(2);
    r->kind = kind;
    configure_cache(r);
    build_cache(r);
    r->state_hash = hash_cache(r);
    CHECK(hash_cache(r) == r->state_hash);
    try_appends(r);
    try_reading(r);
    try_reports(r);
    try_budget(r);
    try_eviction(r);
    try_remat(r);
    try_importance(r);
    try_configs(r);
    if (kind == PLAIN) { /* these functions take no cache */
        try_thresholds(r);
        try_importance_rules(r);
        try_eviction_rules(r);
        try_codec(r);
    }
    destroy_cache(r);
    if (r->cfg.offload.write) destroy_test_store(&r->store);
    free(r);
}

/* >>failures without a number out of range */
#define FAILS(want, call)                                                                                    \
    do {                                                                                                     \
        int st_;                                                                                             \
        leave_older_sentence(kv);                                                                            \
        st_ = (int)(call);                                                                                   \
        CHECK_MSG(st_ == (want), "%s: %d", #call, st_);                                                      \
        check_sentence(kv, #call, "cache", r->kind, st_);                                                    \
    } while (0)

/* Pointers that are missing, and memory that is too small. */
static void lack_pointers(rig *r) {
    tkv_cache *kv = r->kv;
    outputs *o = &r->o;
    static uint64_t space[1 << 10];
    tkv_append_params append;
    tkv_attend_params attend;
    tkv_save_params save;
    tkv_load_params load;
    tkv_prefix_params prefix;
    memset(&append, 0, sizeof append);
    memset(&attend, 0, sizeof attend);
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    memset(&prefix, 0, sizeof prefix);
    FAILS(TKV_ERR_ARG, tkv_append(kv, 0, 0, NULL, v_in, 1));
    FAILS(TKV_ERR_ARG, tkv_append_ex(kv, NULL));
    FAILS(TKV_ERR_ARG, tkv_append_part(kv, NULL, 0, 1, space, sizeof space));
    memset(space, 0, sizeof space);
    FAILS(TKV_ERR_ARG, tkv_append_part(kv, &append, 0, 1, NULL, 0));
    FAILS(TKV_ERR_CAPACITY, tkv_append_part(kv, &append, 0, 1, space, 9));
    FAILS(TKV_ERR_ARG, tkv_attend(kv, 0, 0, NULL, 1, o->out));
    FAILS(TKV_ERR_ARG, tkv_attend_ex(kv, NULL));
    FAILS(TKV_ERR_ARG, tkv_attend_reference(kv, NULL));
    FAILS(TKV_ERR_ARG, tkv_attend_part(kv, NULL, 0, 1, space, sizeof space));
    attend.n = 1;
    attend.q = q_in;
    attend.out = o->out;
    FAILS(TKV_ERR_CAPACITY, tkv_attend_part(kv, &attend, 0, 1, space, 9));
    FAILS(TKV_ERR_ARG, tkv_read_tokens(kv, 0, 0, NULL, 1, o->k, o->v));
    FAILS(TKV_ERR_ARG, tkv_seq_reorder(kv, 0, NULL, 2));
    FAILS(TKV_ERR_ARG, tkv_seq_keep(kv, 0, 0, NULL, 1));
    FAILS(TKV_ERR_ARG, tkv_seq_put_state(kv, 0, 0, 1, NULL, 9));
    FAILS(TKV_ERR_ARG, tkv_seq_save(kv, NULL, o->code, 9, &o->bytes));
    FAILS(TKV_ERR_ARG, tkv_seq_save(kv, &save, NULL, 9, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_save_to(kv, NULL, ignore_bytes, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_save_to(kv, &save, NULL, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_load(kv, NULL, o->code, 9, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_load(kv, &load, NULL, 9, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_load_from(kv, NULL, 9, give_zeros, NULL, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_load_from(kv, &load, 9, NULL, NULL, NULL));
    FAILS(TKV_ERR_ARG, tkv_get_prefix_hash(kv, NULL, 0, NULL));
    FAILS(TKV_ERR_ARG, tkv_get_prefix_hash(kv, &prefix, 0, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_publish_prefix(kv, NULL, NULL, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_adopt_prefix(kv, NULL, NULL, NULL));
    FAILS(TKV_ERR_ARG, tkv_evict(kv, NULL));
    FAILS(r->kind == PLAIN ? TKV_ERR_CONFIG : TKV_ERR_ARG, tkv_get_importance(kv, 0, 0, 0, 9, NULL, NULL));
    FAILS(r->kind == PLAIN ? TKV_ERR_CONFIG : TKV_ERR_ARG, tkv_add_scores(kv, 0, 0, 0, 9, NULL));
    FAILS(r->kind == PLAIN ? TKV_ERR_CONFIG : TKV_ERR_ARG, tkv_find_top_tokens(kv, 0, 0, 9, 0, NULL, NULL));
    FAILS(TKV_ERR_ARG, tkv_promote_important(kv, 0, 0, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_recompute(kv, 0, NULL, 0, NULL, NULL, NULL));
    FAILS(TKV_ERR_ARG, tkv_seq_free_bytes(kv, 0, NULL, .5f, 9, NULL, NULL, 0, NULL));
    FAILS(TKV_ERR_ARG, tkv_load_calibration(kv, NULL, 9));
    FAILS(TKV_ERR_DATA, tkv_load_calibration(kv, o->code, sizeof o->code));
    FAILS(TKV_ERR_ARG, tkv_fit_calibration(kv, NULL));
    FAILS(TKV_ERR_ARG, tkv_adapt_plan(kv, NULL, NULL));
}

/* Calls at the wrong time. A step of sequence 0 is open in the second half. */
static void come_at_a_wrong_time(rig *r) {
    tkv_cache *kv = r->kv;
    tkv_save_params save;
    tkv_load_params load;
    int n;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    FAILS(TKV_ERR_STATE, tkv_seq_commit(kv, 0));
    FAILS(TKV_ERR_STATE, tkv_seq_abort(kv, 0));
    FAILS(TKV_ERR_STATE, tkv_seq_load(kv, &load, r->o.code, 99, NULL));
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    FAILS(TKV_ERR_STATE, tkv_seq_begin(kv, 0));
    FAILS(TKV_ERR_STATE, tkv_seq_truncate(kv, 0, 9));
    FAILS(TKV_ERR_STATE, tkv_seq_fork(kv, 0, 1, 9));
    FAILS(TKV_ERR_STATE, reorder(r, 0, 2, 1));
    FAILS(TKV_ERR_STATE, tkv_seq_remove(kv, 0, 0, 9));
    FAILS(TKV_ERR_STATE, tkv_seq_shift(kv, 0, 0, 9, 1));
    FAILS(TKV_ERR_STATE, tkv_seq_copy(kv, 0, 0, 9, 1, 0));
    FAILS(TKV_ERR_STATE, tkv_seq_keep(kv, 0, 9, NULL, 0));
    FAILS(TKV_ERR_STATE, tkv_seq_slide(kv, 0, 9, &n));
    FAILS(TKV_ERR_STATE, tkv_seq_flush(kv, 0, TKV_FLUSH_ALL));
    FAILS(TKV_ERR_STATE, tkv_seq_save_to(kv, &save, ignore_bytes, NULL));
    FAILS(TKV_ERR_STATE, tkv_freeze_calibration(kv));
    FAILS(TKV_ERR_STATE, tkv_refresh_calibration(kv));
    FAILS(TKV_ERR_STATE, tkv_seq_pin(kv, 0, 0, 9, TKV_UNLIMITED));
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
}

/* What the cache was not created for. */
static void ask_for_what_is_off(rig *r) {
    tkv_cache *kv = r->kv;
    int n;
    FAILS(TKV_ERR_STATE, tkv_seq_pin(kv, 0, 0, 9, TKV_UNLIMITED));
    CHECK(strstr(tkv_get_last_error(kv), "cfg.evict.policy"));
    FAILS(TKV_ERR_STATE, evict_tokens(kv, 0, TKV_ALL_LAYERS, bits_in, 9));
    CHECK(strstr(tkv_get_last_error(kv), "no eviction policy") &&
          strstr(tkv_get_last_error(kv), "cfg.evict.policy"));
    FAILS(TKV_ERR_ARG, tkv_set_budget(kv, 1 << 20));
    FAILS(TKV_ERR_ARG, tkv_offload(kv, 0, 0, 1, &n));
    FAILS(TKV_ERR_RANGE, tkv_read(kv, 0, 3, 0, 1, r->o.k, r->o.v)); /* expired */
}

/* Runs a call of each kind that allocates, with an allocator that refuses request fail_at. */
static tkv_status allocate_something(tkv_cache *kv, int call) {
    static uint8_t saved[1 << 20];
    static size_t size;
    const int index = 350;
    tkv_save_params save;
    tkv_load_params load;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    load.seq = 2;
    switch (call) {
    case 0: return tkv_append(kv, 1, 0, k_in, v_in, CHUNK);
    case 1: return tkv_seq_fork(kv, 0, 2, TKV_UNLIMITED);
    case 2: return tkv_seq_copy(kv, 0, 0, 200, 2, 0);
    case 3: return tkv_seq_shift(kv, 0, 100, TKV_UNLIMITED, 9);
    case 4: return tkv_seq_reserve(kv, 1, CHUNK);
    case 5: return tkv_seq_put_state(kv, 0, 1, 9, k_in, 9);
    case 6: return tkv_seq_save(kv, &save, saved, sizeof saved, &size);
    case 7: return tkv_seq_load(kv, &load, saved, size, NULL);
    case 8: return tkv_seq_keep(kv, 0, 310, &index, 1);
    case 9: return tkv_freeze_calibration(kv);
    case 10: return tkv_seq_begin(kv, 0);
    default: return tkv_refresh_calibration(kv);
    }
}

static void lack_memory(void) {
    int call, fail_at, n_refused = 0, n_kinds = 0;
    for (call = 0; call < 12; call++) {
        tkv_status st = TKV_ERR_NOMEM;
        int n = 0;
        for (fail_at = 1; st && fail_at < 40; fail_at++) {
            counting_allocator allocator;
            tkv_config cfg = make_sized_config(2, HEADS, 1, DIM, SEQS + 1, CHUNK);
            tkv_cache *kv;
            int at, layer;
            cfg.model.rope.dim = DIM;
            cfg.tiers.archive = pair_of(TKV_KVQUANT3, TKV_R20);
            cfg.host.allocator = counting_allocator_of(&allocator);
            kv = create_cache(&cfg);
            for (at = 0; at < 384; at += CHUNK)
                for (layer = 0; layer < 2; layer++)
                    CHECK_EQ(tkv_append(kv, 0, layer, k_in + at * DIM, v_in + at * DIM, CHUNK), TKV_OK);
            if (call == 7) CHECK_EQ(allocate_something(kv, 6), TKV_OK);
            leave_older_sentence(kv);
            allocator.fail_at = fail_at;
            st = allocate_something(kv, call);
            check_sentence(kv, "allocate_something", "call", call, st);
            CHECK_MSG(st == TKV_OK || st == TKV_ERR_NOMEM, "call %d: %d, %s", call, (int)st,
                      tkv_get_last_error(kv));
            n += st != TKV_OK;
            allocator.fail_at = 0;
            tkv_destroy(kv);
        }
        CHECK_EQ(st, TKV_OK);
        n_refused += n;
        n_kinds += n > 0;
    }
    CHECK(n_refused >= 15 && n_kinds >= 7);
}

TEST(failures_leave_their_own_sentence) {
    static const int kinds[] = {PLAIN, EVICT, BUDGET};
    int i, n;
    for (i = 0; i < COUNT(kinds); i++) {
        rig *r = (rig *)calloc(1, sizeof *r);
        if (!r) exit(2);
        r->kind = kinds[i];
        configure_cache(r);
        build_cache(r);
        lack_pointers(r);
        if (r->kind == EVICT) come_at_a_wrong_time(r);
        if (r->kind == PLAIN) ask_for_what_is_off(r);
        if (r->kind == BUDGET) { /* a store that fails, or gives other bytes */
            tkv_cache *kv = r->kv;
            r->store.fail_read = 1;
            FAILS(TKV_ERR_IO, tkv_attend(kv, 0, 0, q_in, 1, r->o.out));
            r->store.fail_read = 1;
            FAILS(TKV_ERR_IO, tkv_read(kv, 0, 0, 0, 99, r->o.k, r->o.v));
            r->store.corrupt_read = 1;
            FAILS(TKV_ERR_DATA, tkv_attend(kv, 0, 0, q_in, 1, r->o.out));
            FAILS(TKV_ERR_BUDGET, tkv_set_budget(kv, 1000));
            CHECK_EQ(tkv_offload(kv, 0, TKV_ALL_LAYERS, 1, &n), TKV_OK);
            CHECK(strcmp(tkv_get_last_error(kv), "") == 0); /* a success ends it */
        }
        destroy_cache(r);
        if (r->cfg.offload.write) destroy_test_store(&r->store);
        free(r);
    }
    lack_memory();
}

TEST(plain_cache) { try_all(PLAIN); }
TEST(offloaded_blocks) {
    if (tkv_test_quick()) SKIP("slow under emulators");
    try_all(OFFLOAD);
}
TEST(discarded_blocks) { try_all(DISCARD); }
TEST(evicted_tokens) {
    if (tkv_test_quick()) SKIP("slow under emulators");
    try_all(EVICT);
}
TEST(everything_under_a_budget) { try_all(BUDGET); }

int main(int argc, char **argv) {
    tkv_rng rng = tkv_rng_seed(20);
    int i;
    tkv_rng_fill(&rng, k_in, CAPACITY * DIM, 1.0);
    tkv_rng_fill(&rng, v_in, CAPACITY * DIM, 1.0);
    tkv_rng_fill(&rng, q_in, CAPACITY * HEADS * DIM, 1.0);
    for (i = 0; i < CAPACITY; i++) {
        scores_in[i] = (float)tkv_rng_uniform(&rng);
        bits_in[i] = tkv_rng_u64(&rng);
    }
    tkv_test_begin(argc, argv);
    RUN(failures_leave_their_own_sentence);
    RUN(plain_cache);
    RUN(offloaded_blocks);
    RUN(discarded_blocks);
    RUN(evicted_tokens);
    RUN(everything_under_a_budget);
    return tkv_test_end();
}
