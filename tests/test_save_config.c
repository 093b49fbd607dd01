/*
 * test_save_config.c - which fields of the config a whole cache must have as the saved one (tkv_seq_load in src/api.h).
 *
 * A row for each field says what another value means: SAME, the load is refused; FREE, it goes on as this config says;
 * TAKEN, the saved cache's value counts. The rows cover all bytes of tkv_config, of a level and of a layer.
 */
#include "saved_files.h"

enum { MOST = 1 << 20, LAYERS = 2, LEVELS = 3 };
static unsigned char file[MOST], again[MOST];

/* >>bases: configs in which a field has an effect */
typedef enum base { PLAIN, EVICTS, LADDER, METER, PROMOTES, RANDOM, OWN_LAYERS, RECOMPUTES, BASES } base;

typedef struct setup {
    tkv_config cfg;
    tkv_level ladder[LEVELS];
    tkv_layer_config layers[LAYERS];
} setup;

static int fail_io(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    (void)user, (void)key, (void)offset, (void)bytes, (void)size;
    return 1;
}
static int fail_read(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    (void)user, (void)key, (void)offset, (void)bytes, (void)size;
    return 1;
}
static void ignore_hint(void *user, uint32_t key, size_t offset, size_t size) {
    (void)user, (void)key, (void)offset, (void)size;
}
static void ignore_key(void *user, uint32_t key) { (void)user, (void)key; }
static float rate(void *user, const struct tkv_evict_view *view, int i) {
    (void)user, (void)view;
    return (float)i;
}
static int give_rows(void *user, int seq, int layer, int head, const int *positions, int n, float *k,
                     float *v) {
    (void)user, (void)seq, (void)layer, (void)head, (void)positions, (void)n, (void)k, (void)v;
    return 1;
}
static void ignore_event(void *user, const tkv_event *event) { (void)user, (void)event; }
static void run_tasks(void *user, int n_tasks, tkv_task task, void *ctx) {
    (void)user;
    for (int i = 0; i < n_tasks; i++) task(ctx, i);
}
static void *get_memory(void *user, size_t size, size_t align) {
    char *raw = (char *)malloc(size + align + sizeof(void *));
    (void)user;
    if (!raw) return NULL;
    char *at = raw + sizeof(void *);
    at += (align - (uintptr_t)at % align) % align;
    memcpy(at - sizeof raw, &raw, sizeof raw);
    return at;
}
static void put_memory(void *user, void *at, size_t size, size_t align) {
    char *raw;
    (void)user, (void)size, (void)align;
    memcpy(&raw, (char *)at - sizeof raw, sizeof raw);
    free(raw);
}

static void make_base(base b, setup *s) {
    memset(s, 0, sizeof *s);
    s->cfg = make_sized_config(LAYERS, 4, 2, 16, 2, 64);
    s->cfg.limits.max_tokens = 1000;
    s->cfg.limits.state_bytes = 100000;
    s->cfg.model.rope.dim = 16;
    s->cfg.host.allocator.alloc = get_memory;
    s->cfg.host.allocator.release = put_memory;
    s->cfg.tiers.warm = s->cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
    if (b == EVICTS) s->cfg.evict.policy = TKV_EVICT_SNAPKV, s->cfg.evict.keep_tokens = 300;
    if (b == RANDOM) s->cfg.evict.policy = TKV_EVICT_RANDOM, s->cfg.evict.keep_tokens = 300;
    if (b == LADDER) {
        for (int i = 0; i < LEVELS; i++) {
            s->ladder[i].warm = pair_of(TKV_Q8, TKV_Q8);
            s->ladder[i].archive = i < 2 ? pair_of(TKV_KIVI4, TKV_KIVI4) : pair_of(TKV_KIVI2, TKV_KIVI2);
            s->ladder[i].hot_tokens = 128 - 32 * i;
            s->ladder[i].warm_tokens = 192 - 64 * i;
        }
        s->cfg.budget.ladder = s->ladder;
        s->cfg.budget.n_levels = LEVELS;
    }
    if (b == METER) s->cfg.meter.heads = 2, s->cfg.meter.target = .9f, s->cfg.budget.adapt = 1;
    if (b == PROMOTES || b == RECOMPUTES) {
        s->cfg.offload.write = fail_io;
        s->cfg.offload.read = fail_read;
        s->cfg.offload.keep_exact = 1;
        s->cfg.importance.sample_every = 4;
        s->cfg.promotion.every = 64;
        s->cfg.budget.bytes = 4 << 20;
    }
    if (b == RECOMPUTES) {
        s->cfg.recompute.compute = give_rows;
        s->cfg.recompute.cost.layer_params = 1e6;
        s->cfg.promotion.every = 0;
    }
    if (b == OWN_LAYERS) {
        s->cfg.layers = s->layers;
        s->layers[1].n_heads = 4;
        s->layers[1].n_kv_heads = 2;
        s->layers[1].head_dim = 16;
        s->cfg.model.window = 200;
    }
}

/* >>rows */
typedef enum decision {
    SAME,
    FREE,
    TAKEN,
    SHAPE
} decision; /* SHAPE: SAME, with a sentence of its own or CAPACITY */
typedef enum kind { INT, FLOAT, DOUBLE, SIZE, POINTER } kind;

enum { BYTES_ONLY = -1000, PADDING = 24 }; /* a value: the row only stands for the bytes of its field */

typedef struct row {
    const char *name;
    size_t offset, size;
    kind is;
    decision what;
    base from;
    double value;
    const void *pointer;
} row;

#define ROW_OF(type, field, is, what, from, value, pointer)                                                  \
    { #field, offsetof(type, field), sizeof(((type *)0)->field), is, what, from, value, pointer }
#define INT_ROW(field, what, from, value) ROW_OF(tkv_config, field, INT, what, from, value, NULL)
#define FLOAT_ROW(field, what, from, value) ROW_OF(tkv_config, field, FLOAT, what, from, value, NULL)
#define DOUBLE_ROW(field, what, from, value) ROW_OF(tkv_config, field, DOUBLE, what, from, value, NULL)
#define SIZE_ROW(field, what, from, value) ROW_OF(tkv_config, field, SIZE, what, from, value, NULL)
#define POINTER_ROW(field, what, from, to) ROW_OF(tkv_config, field, POINTER, what, from, 0, to)

static const float frequencies[8] = {1.0f, .5f, .25f, .125f, .1f, .05f, .02f, .01f};
static char anything[8];

/* Functions are set by name: C has no pointer to an object that points to a function. */
static void set_function(tkv_config *cfg, const char *name) {
    if (!strcmp(name, "offload.write")) cfg->offload.write = fail_io, cfg->offload.read = fail_read;
    if (!strcmp(name, "offload.read")) cfg->offload.write = fail_io, cfg->offload.read = fail_read;
    if (!strcmp(name, "offload.prefetch")) cfg->offload.prefetch = ignore_hint;
    if (!strcmp(name, "offload.erase")) cfg->offload.erase = ignore_key;
    if (!strcmp(name, "evict.scorer")) cfg->evict.scorer = rate;
    if (!strcmp(name, "recompute.compute"))
        cfg->recompute.compute = give_rows, cfg->recompute.cost.layer_params = 1e6;
    if (!strcmp(name, "host.on_event")) cfg->host.on_event = ignore_event;
    if (!strcmp(name, "host.parallel_for")) cfg->host.parallel_for = run_tasks;
}

static const row rows[] = {
    INT_ROW(model.n_layers, SHAPE, PLAIN, 3),
    INT_ROW(model.n_heads, SAME, PLAIN, 8),
    INT_ROW(model.n_kv_heads, SHAPE, PLAIN, 4),
    INT_ROW(model.head_dim, SHAPE, PLAIN, 32),
    INT_ROW(model.v_head_dim, SHAPE, PLAIN, 8),
    INT_ROW(model.v_in_k, SHAPE, PLAIN, 1),
    INT_ROW(model.window, SAME, PLAIN, 300),
    INT_ROW(model.window_sinks, SAME, OWN_LAYERS, 1),
    FLOAT_ROW(model.scale, SAME, PLAIN, .3),
    INT_ROW(model.rope.dim, SHAPE, PLAIN, 8),
    INT_ROW(model.rope.interleaved, SHAPE, PLAIN, 1),
    FLOAT_ROW(model.rope.base, SHAPE, PLAIN, 500000),
    FLOAT_ROW(model.rope.scale, SHAPE, PLAIN, .25),
    POINTER_ROW(model.rope.frequencies, SHAPE, PLAIN, frequencies),
    INT_ROW(model.rope.kind, SHAPE, PLAIN, TKV_ROPE_MROPE),
    INT_ROW(model.rope.first, SHAPE, OWN_LAYERS, 8), /* with dim 8 */
    INT_ROW(limits.max_seqs, SAME, PLAIN, 3),
    INT_ROW(limits.max_tokens, SAME, PLAIN, 900),
    INT_ROW(limits.max_append, SAME, PLAIN, 65),
    INT_ROW(limits.max_states, SAME, PLAIN, 63),
    SIZE_ROW(limits.state_bytes, SAME, PLAIN, 100001),
    INT_ROW(tiers.sink_tokens, SAME, PLAIN, 5),
    INT_ROW(tiers.hot_tokens, TAKEN, PLAIN, 128),
    INT_ROW(tiers.hot_tokens, SAME, PLAIN, TKV_UNLIMITED),
    INT_ROW(tiers.hot_tokens, TAKEN, PLAIN, TKV_OFF),
    INT_ROW(tiers.warm_tokens, SAME, PLAIN, 128),
    INT_ROW(tiers.hot.k, SHAPE, PLAIN, TKV_BF16),
    INT_ROW(tiers.hot.v, SAME, PLAIN, TKV_F32),
    INT_ROW(tiers.warm.k, SAME, PLAIN, TKV_Q8),
    INT_ROW(tiers.warm.v, SAME, PLAIN, TKV_FP8_E5M2),
    INT_ROW(tiers.archive.k, SAME, PLAIN, TKV_SQUAT4),
    INT_ROW(tiers.archive.v, SAME, PLAIN, TKV_KIVI3),
    INT_ROW(tiers.n_anchors, SAME, EVICTS, 8),
    INT_ROW(format.group_size, SHAPE, PLAIN, 32),
    INT_ROW(format.allocation_unit, SHAPE, PLAIN, 16),
    INT_ROW(format.fit, SHAPE, PLAIN, TKV_FIT_CLIP),
    INT_ROW(format.rotate, SHAPE, PLAIN, TKV_ROTATE_K),
    INT_ROW(format.center_k, SHAPE, PLAIN, 1),
    INT_ROW(format.squat_block, SHAPE, PLAIN, 64),
    INT_ROW(format.subspaces, SHAPE, PLAIN, 8),
    INT_ROW(format.kvquant, SHAPE, PLAIN, TKV_KVQUANT_UNIFORM),
    INT_ROW(format.k_scales, SHAPE, PLAIN, TKV_SCALES_CHANNEL),
    INT_ROW(format.v_scales, SHAPE, PLAIN, TKV_SCALES_TOKEN),
    INT_ROW(format.int_bits, SHAPE, PLAIN, 6),
    INT_ROW(format.unrotated, SHAPE, PLAIN, 1),
    INT_ROW(format.kvquant_outliers, SHAPE, PLAIN, 20),
    SIZE_ROW(layers, SAME, PLAIN, BYTES_ONLY), /* rows of layers, below */
    SIZE_ROW(budget.bytes, TAKEN, PROMOTES, 5 << 20),
    SIZE_ROW(budget.bytes, SAME, PLAIN, 4 << 20),
    SIZE_ROW(budget.ladder, SAME, LADDER, BYTES_ONLY), /* rows of levels, below */
    INT_ROW(budget.n_levels, SAME, LADDER, 2),
    INT_ROW(budget.pressure.profile, SAME, LADDER, TKV_PROFILE_AGGRESSIVE),
    FLOAT_ROW(budget.pressure.threshold, SAME, LADDER, .5),
    FLOAT_ROW(budget.pressure.hysteresis, SAME, LADDER, .1),
    FLOAT_ROW(budget.pressure.alpha, SAME, LADDER, .5),
    INT_ROW(budget.pressure.min_level, SAME, LADDER, 1),
    INT_ROW(budget.pressure.max_level, SAME, LADDER, 1),
    INT_ROW(budget.pressure.jump, SAME, LADDER, 1),
    INT_ROW(budget.discard, SAME, PROMOTES, 1),
    INT_ROW(budget.adapt, SAME, PLAIN, 1),
    INT_ROW(evict.policy, SAME, EVICTS, TKV_EVICT_TOVA),
    INT_ROW(evict.keep_tokens, SAME, EVICTS, 310),
    INT_ROW(evict.keep_first, SAME, EVICTS, 200), /* with keep_last */
    INT_ROW(evict.keep_last, SAME, EVICTS, 201),
    INT_ROW(evict.sink_tokens, SAME, EVICTS, 6),
    INT_ROW(evict.recent_tokens, SAME, EVICTS, 40),
    INT_ROW(evict.pool, SAME, EVICTS, 7),
    INT_ROW(evict.seed, SAME, RANDOM, 5),
    POINTER_ROW(evict.scorer, FREE, EVICTS, NULL),
    POINTER_ROW(evict.user, FREE, EVICTS, anything),
    FLOAT_ROW(evict.trigger, SAME, EVICTS, .9),
    INT_ROW(evict.batch, SAME, EVICTS, 32),
    INT_ROW(importance.strategy, SAME, PROMOTES, TKV_IMPORTANCE_RECENCY),
    FLOAT_ROW(importance.decay, SAME, PROMOTES, .5),
    FLOAT_ROW(importance.attention, SAME, PROMOTES, 2),
    FLOAT_ROW(importance.recency, SAME, PROMOTES, 2),
    FLOAT_ROW(importance.tau, SAME, PROMOTES, 32),
    FLOAT_ROW(importance.low, SAME, PROMOTES, .25),
    INT_ROW(importance.heads, SAME, PROMOTES, TKV_IMPORTANCE_MAX),
    INT_ROW(importance.sample_every, SAME, PROMOTES, 8),
    FLOAT_ROW(promotion.threshold, SAME, PROMOTES, .1),
    INT_ROW(promotion.per_step, SAME, PROMOTES, 4),
    INT_ROW(promotion.cooldown, SAME, PROMOTES, 8),
    INT_ROW(promotion.every, SAME, PROMOTES, 128),
    POINTER_ROW(offload.write, FREE, PLAIN, NULL),
    POINTER_ROW(offload.read, FREE, PLAIN, NULL),
    POINTER_ROW(offload.prefetch, FREE, PROMOTES, NULL),
    POINTER_ROW(offload.erase, FREE, PROMOTES, NULL),
    POINTER_ROW(offload.user, FREE, PROMOTES, anything),
    INT_ROW(offload.keep_exact, FREE, RECOMPUTES, 0),
    POINTER_ROW(recompute.compute, FREE, PROMOTES, NULL),
    POINTER_ROW(recompute.user, FREE, RECOMPUTES, anything),
    INT_ROW(recompute.cost.n_layers, FREE, RECOMPUTES, 3),
    INT_ROW(recompute.cost.n_heads, FREE, RECOMPUTES, 8),
    INT_ROW(recompute.cost.head_dim, FREE, RECOMPUTES, 8),
    DOUBLE_ROW(recompute.cost.layer_params, FREE, RECOMPUTES, 2e6),
    FLOAT_ROW(recompute.cost.threshold, FREE, RECOMPUTES, .5),
    INT_ROW(recompute.cost.min_materialized, FREE, RECOMPUTES, 256),
    INT_ROW(recompute.cost.sink_tokens, FREE, RECOMPUTES, 8),
    FLOAT_ROW(recompute.cost.age_tokens, FREE, RECOMPUTES, 100),
    DOUBLE_ROW(recompute.cost.quantize_price, FREE, RECOMPUTES, 9),
    DOUBLE_ROW(recompute.cost.step_flops, FREE, RECOMPUTES, 1e9),
    INT_ROW(meter.heads, SAME, METER, 3),
    INT_ROW(meter.tokens, FREE, PLAIN, 256), /* without meter.heads they count for nothing */
    INT_ROW(meter.every, FREE, PLAIN, 8),
    INT_ROW(meter.tokens, SAME, METER, 256),
    INT_ROW(meter.every, SAME, METER, 8),
    FLOAT_ROW(meter.target, SAME, METER, .95),
    POINTER_ROW(host.allocator.user, FREE, PLAIN, anything),
    POINTER_ROW(host.allocator.alloc, FREE, PLAIN, NULL),
    POINTER_ROW(host.allocator.release, FREE, PLAIN, NULL),
    POINTER_ROW(host.parallel_for, FREE, PLAIN, NULL),
    POINTER_ROW(host.parallel_user, FREE, PLAIN, anything),
    POINTER_ROW(host.on_event, FREE, PLAIN, NULL),
    POINTER_ROW(host.event_user, FREE, PLAIN, anything),
    INT_ROW(host.isa, FREE, PLAIN, TKV_ISA_SCALAR),
    INT_ROW(host.nonfinite, SAME, PLAIN, 1),
    INT_ROW(host.precise, SAME, PLAIN, 1),
    INT_ROW(host.wipe_freed, FREE, PLAIN, 1),
    INT_ROW(start_canary, FREE, PLAIN, BYTES_ONLY), /* 0 in every config */
    INT_ROW(end_canary, FREE, PLAIN, BYTES_ONLY),
};

#define LEVEL(field, is, what, value) ROW_OF(tkv_level, field, is, what, LADDER, value, NULL)
static const row level_rows[] = {
    LEVEL(hot_tokens, INT, TAKEN, 100),      LEVEL(warm_tokens, INT, SAME, 100),
    LEVEL(warm.k, INT, SAME, TKV_INT8),      LEVEL(warm.v, INT, SAME, TKV_FP8_E4M3),
    LEVEL(archive.k, INT, SAME, TKV_SQUAT4), LEVEL(archive.v, INT, SAME, TKV_KIVI3),
    LEVEL(from_tokens, INT, SAME, 500)};

#define LAYER(field, is, what, value) ROW_OF(tkv_layer_config, field, is, what, OWN_LAYERS, value, NULL)
static const row layer_rows[] = {
    LAYER(n_heads, INT, SAME, 8),          LAYER(n_kv_heads, INT, SHAPE, 4),
    LAYER(head_dim, INT, SHAPE, 32),       LAYER(v_head_dim, INT, SHAPE, 8),
    LAYER(v_in_k, INT, SHAPE, 1),          LAYER(hot.k, INT, SAME, TKV_BF16),
    LAYER(hot.v, INT, SAME, TKV_F32),      LAYER(warm.k, INT, SAME, TKV_Q8),
    LAYER(warm.v, INT, SAME, TKV_INT8),    LAYER(archive.k, INT, SAME, TKV_SQUAT4),
    LAYER(archive.v, INT, SAME, TKV_INT4), LAYER(sink_tokens, INT, SAME, 6),
    LAYER(hot_tokens, INT, TAKEN, 128),    LAYER(warm_tokens, INT, SAME, 128),
    LAYER(window, INT, SAME, 100),         LAYER(window_sinks, INT, SAME, 1),
    LAYER(share_kv, INT, SHAPE, 1),        LAYER(no_cache, INT, SHAPE, 1),
    LAYER(rope, INT, SHAPE, BYTES_ONLY), /* its fields are those of model.rope */
};

/* Sets the field of a row. Returns 0 if a row only stands for its bytes. */
static int set_field(const row *r, void *in, tkv_config *cfg) {
    char *at = (char *)in + r->offset;
    const int i = (int)r->value;
    const float f = (float)r->value;
    const size_t z = r->value > 0 ? (size_t)r->value : 0;
    if ((int)r->value == BYTES_ONLY) return 0;
    if (!strcmp(r->name, "evict.keep_first") || !strcmp(r->name, "evict.keep_last")) {
        cfg->evict.keep_first = 200 + !strcmp(r->name, "evict.keep_last");
        cfg->evict.keep_last = 400 - cfg->evict.keep_first;
        return 1;
    }
    if (!strcmp(r->name, "model.rope.first")) {
        cfg->model.rope.dim = 8;
        cfg->model.rope.first = 8;
        return 1;
    }
    if (!strcmp(r->name, "model.rope.kind")) cfg->model.rope.dim = 0; /* the rest is not used */
    if (!strcmp(r->name, "share_kv") || !strcmp(r->name, "no_cache")) memset(in, 0, sizeof(tkv_layer_config));
    if (r->is == POINTER && r->pointer) memcpy(at, &r->pointer, sizeof r->pointer);
    else if (r->is == POINTER) set_function(cfg, r->name);
    else if (r->is == INT) memcpy(at, &i, sizeof i);
    else if (r->is == FLOAT) memcpy(at, &f, sizeof f);
    else if (r->is == DOUBLE) memcpy(at, &r->value, sizeof r->value);
    else memcpy(at, &z, sizeof z);
    return 1;
}

static size_t save_base(base b, unsigned char *to) {
    static float x[40 * 64];
    setup s;
    size_t n = 0;
    make_base(b, &s);
    tkv_cache *kv = create_cache(&s.cfg);
    const tkv_save_params p = save_params(TKV_ALL_SEQS);
    tkv_rng rng = tkv_rng_seed(5);
    tkv_rng_fill(&rng, x, COUNT(x), 1.0);
    for (int layer = 0; layer < LAYERS; layer++) CHECK_EQ(tkv_append(kv, 0, layer, x, x, 40), TKV_OK);
    CHECK_MSG(tkv_seq_save(kv, &p, to, MOST, &n) == TKV_OK, "%s", tkv_get_last_error(kv));
    tkv_destroy(kv);
    return n;
}

/* Loads the save of a base into a cache with another value of one field. in: where the field is in s. */
static void check_row(const row *r, setup *s, void *in) {
    const size_t n = save_base(r->from, file);
    const tkv_load_params p = load_params(TKV_ALL_SEQS);
    const tkv_save_params save = save_params(TKV_ALL_SEQS);
    char reason[200] = "";
    size_t m = 0;
    tkv_cache *kv = NULL;
    if (!set_field(r, in, &s->cfg)) return;
    CHECK_MSG(tkv_create_ex(&s->cfg, NULL, 0, &kv, reason, sizeof reason) == TKV_OK, "%s: %s", r->name,
              reason);
    if (!kv) return;
    const tkv_status st = tkv_seq_load(kv, &p, file, n, NULL);
    if (r->what == SAME || r->what == SHAPE) {
        CHECK_MSG(st == TKV_ERR_CONFIG, "%s: %d", r->name, (int)st);
        if (r->what == SAME)
            CHECK_MSG(strstr(tkv_get_last_error(kv), "config") || strstr(tkv_get_last_error(kv), "anchors"),
                      "%s: %s", r->name, tkv_get_last_error(kv));
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 0);
    } else {
        CHECK_MSG(st == TKV_OK, "%s: %s", r->name, tkv_get_last_error(kv));
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 40);
        CHECK_EQ(tkv_seq_save(kv, &save, again, MOST, &m), TKV_OK); /* what is saved is the saved cache's */
        CHECK_MSG(m == n && memcmp(file, again, n) == 0, "%s", r->name);
    }
    check_cache(kv);
    tkv_destroy(kv);
}

/* Marks the bytes of rows. Returns the number of bytes that none has. */
static int count_uncovered(const row *r, int n, size_t size) {
    static char is_covered[4096];
    int left = 0;
    CHECK(size <= sizeof is_covered);
    memset(is_covered, 0, sizeof is_covered);
    for (int i = 0; i < n; i++) memset(is_covered + r[i].offset, 1, r[i].size);
    for (size_t i = 0; i < size; i++) left += !is_covered[i];
    return left;
}

TEST(each_field_says_whether_it_must_be_the_same) {
    setup s;
    for (int i = 0; i < COUNT(rows); i++) {
#if !defined(__GNUC__) && !defined(__clang__) /* no meter here: it needs atomics */
        if (rows[i].from == METER) continue;
#endif
        make_base(rows[i].from, &s);
        check_row(&rows[i], &s, &s.cfg);
    }
    for (int i = 0; i < COUNT(level_rows); i++) {
        make_base(LADDER, &s);
        if (level_rows[i].offset == offsetof(tkv_level, from_tokens)) s.ladder[2].from_tokens = 700;
        check_row(&level_rows[i], &s, &s.ladder[1]);
    }
    for (int i = 0; i < COUNT(layer_rows); i++) {
        make_base(OWN_LAYERS, &s);
        check_row(&layer_rows[i], &s, &s.layers[1]);
    }
}

/* What no field tells alone is named. A build without atomics has no meter, as if meter.heads were 0. */
TEST(other_caches_are_named) {
    static unsigned char memory[4 * MOST], scratch_bytes[MOST];
    static const char *const names[] = {"the saved cache was in place, and this one is not",
                                        "this cache is in place, and the saved one was not", "meter.heads"};
    tkv_save_params save;
    tkv_load_params load;
    setup s, other;
    int i;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    save.seq = load.seq = TKV_ALL_SEQS;
    save.scratch = load.scratch = scratch_bytes;
    save.scratch_bytes = load.scratch_bytes = sizeof scratch_bytes;
    for (i = 0; i < 2 + HAS_ATOMICS; i++) {
        tkv_cache *from = NULL, *kv = NULL;
        size_t n = 0;
        make_base(i < 2 ? PLAIN : METER, &s);
        s.cfg.limits.state_bytes = 0;
        s.cfg.budget.adapt = 0; /* not in place */
        s.cfg.meter.target = 0;
        other = s;
        other.cfg.meter.heads = 0;
        if (i == 0) CHECK_EQ(tkv_create_in_place(&s.cfg, memory, sizeof memory, &from, NULL, 0), TKV_OK);
        else from = create_cache(&s.cfg);
        if (i == 1) CHECK_EQ(tkv_create_in_place(&other.cfg, memory, sizeof memory, &kv, NULL, 0), TKV_OK);
        else kv = create_cache(&other.cfg);
        CHECK_MSG(tkv_seq_save(from, &save, file, MOST, &n) == TKV_OK, "%s", tkv_get_last_error(from));
        CHECK_EQ(tkv_seq_load(kv, &load, file, n, NULL), TKV_ERR_CONFIG);
        CHECK_MSG(strstr(tkv_get_last_error(kv), names[i]), "%s", tkv_get_last_error(kv));
        check_cache(kv);
        tkv_destroy(kv);
        tkv_destroy(from);
    }
}

/* A new field makes this fail: give it a row, and compare it in persist/whole.h if it must be the same. */
TEST(all_fields_have_a_row) {
    CHECK_EQ(count_uncovered(level_rows, COUNT(level_rows), sizeof(tkv_level)), 0);
    if (sizeof(void *) != 8) return; /* other gaps between fields */
    CHECK_EQ(count_uncovered(layer_rows, COUNT(layer_rows), sizeof(tkv_layer_config)), 0);
    CHECK_EQ(count_uncovered(rows, COUNT(rows), sizeof(tkv_config)), PADDING);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(each_field_says_whether_it_must_be_the_same);
    RUN(other_caches_are_named);
    RUN(all_fields_have_a_row);
    return tkv_test_end();
}
