/*
 * test_memory.c - every byte of memory. A tracking allocator with guards follows all calls. Each allocation fails
 * once. Memory in place is a guarded buffer. The estimate is compared with the memory in use.
 */
#include "kit.h"

enum { BLOCK = TKV_BLOCK_TOKENS, MAX_TOKENS = 4096, WIDEST = 64 };

static float k_in[MAX_TOKENS * WIDEST], v_in[MAX_TOKENS * WIDEST], k_out[MAX_TOKENS * WIDEST],
    v_out[MAX_TOKENS * WIDEST];

/* >>the allocator: guards on both sides, poison before use and after release, a list of live allocations */
enum { GUARD = 64 };

typedef struct allocation {
    struct allocation *next;
    char *raw, *at;
    size_t size;
} allocation;

typedef struct tracking_allocator {
    allocation *live;
    size_t held, peak;
    long count;           /* requested allocations */
    long fail_from;       /* number of the first allocation that fails, from 1; 0: none */
    size_t refused;       /* size of the last allocation that failed */
    long n_failures;      /* number of consecutive failures */
    int poison, n_errors; /* fill byte; number of damaged guards and invalid calls */
} tracking_allocator;

static tracking_allocator tracker;

static int is_filled_with(const void *mem, size_t n, int byte) {
    const char *p = (const char *)mem;
    size_t i;
    for (i = 0; i < n; i++)
        if ((unsigned char)p[i] != (unsigned char)byte) return 0;
    return 1;
}

static void *tracking_alloc(void *user, size_t size, size_t align) {
    tracking_allocator *l = (tracking_allocator *)user;
    allocation *p;
    l->count++;
    if (align != 64 || size == 0) l->n_errors++;
    if (l->fail_from && l->count >= l->fail_from && l->count < l->fail_from + l->n_failures) {
        l->refused = size;
        return NULL;
    }
    p = (allocation *)malloc(sizeof *p);
    if (!p) exit(2);
    p->raw = (char *)malloc(size + 2 * GUARD + 3 * 64);
    if (!p->raw) exit(2);
    p->at = p->raw + GUARD;
    p->at += (64 - (size_t)((uintptr_t)p->at % 128) + 128) % 128; /* a multiple of 64 but not of 128 */
    p->size = size;
    memset(p->raw, 0xfd, (size_t)(p->at - p->raw) + size + GUARD);
    memset(p->at, l->poison, size);
    p->next = l->live;
    l->live = p;
    l->held += size;
    if (l->held > l->peak) l->peak = l->held;
    return p->at;
}

static int has_intact_guards(const allocation *p) {
    return is_filled_with(p->raw, (size_t)(p->at - p->raw), 0xfd) &&
           is_filled_with(p->at + p->size, GUARD, 0xfd);
}

static void tracking_release(void *user, void *ptr, size_t size, size_t align) {
    tracking_allocator *l = (tracking_allocator *)user;
    allocation **link = &l->live, *p;
    while (*link && (void *)(*link)->at != ptr) link = &(*link)->next;
    p = *link;
    if (!p || p->size != size || align != 64) { /* unknown pointer, second release, or another size */
        l->n_errors++;
        return;
    }
    if (!has_intact_guards(p)) l->n_errors++;
    memset(p->at, 0xdd, size);
    *link = p->next;
    l->held -= size;
    free(p->raw);
    free(p);
}

static tkv_allocator start_tracking(int poison) {
    tkv_allocator a;
    memset(&tracker, 0, sizeof tracker);
    tracker.poison = poison;
    a.user = &tracker;
    a.alloc = tracking_alloc;
    a.release = tracking_release;
    return a;
}

/* Checks that no allocation is live and that no error was counted. */
static void check_all_released(void) {
    CHECK_EQ(tracker.held, 0);
    CHECK(tracker.live == NULL);
    CHECK_EQ(tracker.n_errors, 0);
}

static int has_size(size_t size) { /* 1 if an allocation of this size is live */
    const allocation *p = tracker.live;
    while (p && p->size != size) p = p->next;
    return p != NULL;
}

static void check_guards(void) {
    const allocation *p;
    for (p = tracker.live; p; p = p->next) CHECK(has_intact_guards(p));
    CHECK_EQ(tracker.n_errors, 0);
}

/* >>configs and tokens */
static tkv_config config(int layers, int seqs) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = layers;
    cfg.model.n_heads = 2;
    cfg.model.n_kv_heads = 2;
    cfg.model.head_dim = 10;
    cfg.model.v_head_dim = 17;
    cfg.limits.max_seqs = seqs;
    cfg.host.isa = tkv_test_isa();
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4; /* no table to wait for: see white_learn.c */
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    return cfg;
}

/* Sets formats whose heads share a layer's bytes. Blocks stay exact until the layer has its first table. */
static void set_shared_formats(tkv_config *cfg) {
    cfg->tiers.warm.k = TKV_A40;
    cfg->tiers.warm.v = TKV_R40;
    cfg->tiers.archive.k = TKV_A25;
    cfg->tiers.archive.v = TKV_R15;
}

/* Floats of a token in the cache that was made last. */
static int k_row_floats(void) { return last_config.model.n_kv_heads * last_config.model.head_dim; }
static int v_row_floats(void) { return last_config.model.n_kv_heads * last_config.model.v_head_dim; }

/* Random numbers of tokens. They depend on text, layer and position, but not on the chunks. */
static void fill_rows(int text, int layer, int first, int n, float *x, int row) {
    int t, i;
    for (t = 0; t < n; t++) {
        tkv_rng r = tkv_rng_seed(((uint64_t)(unsigned)text << 50) ^ ((uint64_t)(unsigned)layer << 40) ^
                                 ((uint64_t)(unsigned)(first + t) << 10) ^ (uint64_t)(unsigned)row);
        for (i = 0; i < row; i++) x[t * row + i] = (float)tkv_rng_uniform(&r) * 4.0f - 2.0f;
    }
}

static tkv_status append_tokens(tkv_cache *kv, int seq, int layer, int text, int n) {
    int start = tkv_get_length(kv, seq, layer);
    fill_rows(text, layer, start, n, k_in, k_row_floats());
    fill_rows(text + 1, layer, start, n, v_in, v_row_floats());
    return tkv_append(kv, seq, layer, k_in, v_in, n);
}

static tkv_status append_to_all_layers(tkv_cache *kv, int seq, int text, int n, int chunk) {
    int layer;
    while (n > 0) {
        int n_new = n < chunk ? n : chunk;
        for (layer = 0; layer < last_config.model.n_layers; layer++) {
            tkv_status st = has_own_kv(layer) ? append_tokens(kv, seq, layer, text, n_new) : TKV_OK;
            if (st) return st;
        }
        n -= n_new;
    }
    return TKV_OK;
}

/* >>snapshots: what a caller sees of a cache, as bytes */
typedef struct snapshot {
    unsigned char *bytes;
    size_t n, capacity;
} snapshot;

static void add_to_snapshot(snapshot *p, const void *data, size_t n) {
    if (p->n + n > p->capacity) {
        p->capacity = 2 * (p->n + n) + 1024;
        p->bytes = (unsigned char *)realloc(p->bytes, p->capacity);
        if (!p->bytes) exit(2);
    }
    memcpy(p->bytes + p->n, data, n);
    p->n += n;
}

/* with_values 0: only what a failed call must keep. It may have recoded blocks. */
static snapshot take_snapshot(tkv_cache *kv, int with_values) {
    snapshot p;
    int seq, layer;
    memset(&p, 0, sizeof p);
    for (seq = 0; seq < last_config.limits.max_seqs; seq++)
        for (layer = 0; layer < last_config.model.n_layers; layer++) {
            tkv_layer_info info;
            int len = tkv_get_length(kv, seq, layer);
            if (!has_own_kv(layer)) continue;
            CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
            add_to_snapshot(&p, &len, sizeof len);
            add_to_snapshot(&p, &info.expired, sizeof info.expired);
            CHECK_EQ(tkv_read(kv, seq, layer, info.expired, len - info.expired, k_out, v_out), TKV_OK);
            if (!with_values) continue;
            add_to_snapshot(&p, &info, sizeof info);
            add_to_snapshot(&p, k_out, (size_t)((len - info.expired) * k_row_floats()) * sizeof(float));
            add_to_snapshot(&p, v_out, (size_t)((len - info.expired) * v_row_floats()) * sizeof(float));
        }
    return p;
}

static snapshot snapshot_of(tkv_cache *kv) { return take_snapshot(kv, 1); }

static int is_same_snapshot(const snapshot *a, const snapshot *b) {
    return a->n == b->n && (a->n == 0 || memcmp(a->bytes, b->bytes, a->n) == 0);
}

static void free_snapshot(snapshot *p) {
    free(p->bytes);
    memset(p, 0, sizeof *p);
}

static void check_cache_at(const tkv_cache *kv, const char *what, long number) {
    char reason[160];
    tkv_status st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s %ld: %s", what, number, reason);
}

/* Checks tkv_get_memory against the allocator, and that the parts add up to the total. */
static void check_memory_info(const tkv_cache *kv, const char *what) {
    tkv_memory_info m;
    size_t sum, tokens = 0, expected = 0;
    int tier, seq, layer;
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_MSG(m.total == tracker.held, "%s: %lu and %lu", what, (unsigned long)m.total,
              (unsigned long)tracker.held);
    CHECK_MSG(m.peak == tracker.peak, "%s: peak %lu and %lu", what, (unsigned long)m.peak,
              (unsigned long)tracker.peak);
    sum = m.tables + m.index + m.scratch + m.exact_copies + m.states + m.slack;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        sum += m.tier[tier].codes + m.tier[tier].metadata;
        tokens += m.tier[tier].tokens;
    }
    CHECK_EQ(sum, m.total);
    CHECK(m.slack < m.total && m.index < m.total); /* neither has wrapped below zero */
    for (seq = 0; seq < last_config.limits.max_seqs; seq++)
        for (layer = 0; layer < last_config.model.n_layers; layer++)
            if (has_own_kv(layer)) {
                tkv_layer_info info;
                CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
                expected += (size_t)(info.tokens[0] + info.tokens[1] + info.tokens[2]);
            }
    CHECK_EQ(tokens, expected);
    CHECK_EQ(m.fp16_bytes, tokens * (size_t)(k_row_floats() + v_row_floats()) * 2u);
    CHECK_NEAR(m.ratio, (double)m.fp16_bytes / (double)m.total, 1e-12);
    CHECK_EQ(m.tier[TKV_TIER_HOT].metadata, 0);
}

/* >>a history with every kind of call, one call at a time */
enum { STEPS = 62, LAYERS = 3, SEQS = 3 };

static tkv_status run_step(tkv_cache *kv, int step) {
    int i = step % 12;
    /* prompts in two chunks */
    if (step < 12) return append_tokens(kv, i % 2, i / 2 % LAYERS, 0, i < 6 ? 100 : 68 + i);
    if (step == 12) return append_tokens(kv, 0, 0, 4, 1);
    if (step == 13) return append_tokens(kv, 0, 1, 4, 1);
    if (step == 14) return append_tokens(kv, 0, 2, 4, 1);
    if (step == 15) return tkv_seq_begin(kv, 1);
    if (step >= 16 && step < 19) return append_tokens(kv, 1, step - 16, 8, 130);
    if (step == 19) return tkv_seq_abort(kv, 1);
    if (step == 20) return tkv_seq_begin(kv, 1);
    if (step >= 21 && step < 24) return append_tokens(kv, 1, step - 21, 8, 130);
    if (step == 24) return tkv_seq_commit(kv, 1);
    if (step == 25) return tkv_seq_reserve(kv, 2, 300);
    if (step >= 26 && step < 38) return append_tokens(kv, 2, i % 3, 12, 75);
    if (step == 38) return tkv_seq_flush(kv, 2, TKV_FLUSH_FULL);
    if (step == 39) return tkv_seq_flush(kv, 2, TKV_FLUSH_ALL);
    if (step == 40) return tkv_seq_truncate(kv, 0, tkv_get_length(kv, 0, TKV_ALL_LAYERS) - 40);
    if (step == 41) return tkv_seq_reset(kv, 1);
    if (step == 42) { /* a batch of all sequences */
        tkv_append_params p;
        tkv_rows rows[SEQS];
        memset(&p, 0, sizeof p);
        for (i = 0; i < SEQS; i++) {
            rows[i].seq = i;
            rows[i].n = 200 + i;
        }
        fill_rows(20, 0, 0, 603, k_in, k_row_floats());
        fill_rows(21, 0, 0, 603, v_in, v_row_floats());
        p.batch = rows;
        p.n_batch = SEQS;
        p.k = k_in;
        p.v = v_in;
        return tkv_append_ex(kv, &p);
    }
    if (step == 43) return append_tokens(kv, 0, 1, 20, 200);
    if (step == 44) return append_tokens(kv, 0, 2, 20, 200);
    if (step == 45) return append_tokens(kv, 1, 1, 20, 201);
    if (step == 46) return append_tokens(kv, 1, 2, 20, 201);
    if (step == 47) return append_tokens(kv, 2, 1, 20, 202);
    if (step == 48) return append_tokens(kv, 2, 2, 20, 202);
    if (step < 55) return append_tokens(kv, step % 2, (step - 49) / 2, 24, 512);
    if (step == 55) return tkv_seq_reset(kv, 0);
    if (step == 56) return tkv_seq_reserve(kv, 0, 512);
    if (step < 60) return append_tokens(kv, 0, step - 57, 28, 512);
    return step == 60 ? tkv_seq_flush(kv, 0, TKV_FLUSH_ALL) : tkv_seq_flush(kv, 2, TKV_FLUSH_DUE);
}

enum { KINDS = 5 };

static tkv_config make_history_config(int kind, tkv_layer_config *layers) {
    tkv_config cfg = config(LAYERS, SEQS);
    if (kind == 1) {
        cfg.model.window = 150;
        cfg.tiers.hot_tokens = 100;
        cfg.format.group_size = 32;
    } else if (kind == 2) {
        memset(layers, 0, LAYERS * sizeof *layers);
        layers[0].hot.k = TKV_F32;
        layers[1].sink_tokens = TKV_OFF;
        layers[1].warm.v = TKV_Q8;
        layers[2].warm_tokens = TKV_OFF;
        layers[2].hot_tokens = 130;
        cfg.layers = layers;
        cfg.host.nonfinite = TKV_NONFINITE_SATURATE;
    } else if (kind == 3) {
        set_shared_formats(&cfg);
    } else if (kind == 4) { /* layer 0 needs tables in both tiers, layer 1 in its archive, layer 2 none */
        memset(layers, 0, LAYERS * sizeof *layers);
        set_shared_formats(&cfg);
        layers[1].warm.k = layers[1].warm.v = TKV_Q8;
        layers[2].warm.k = layers[2].warm.v = layers[2].archive.k = layers[2].archive.v = TKV_KIVI3;
        cfg.layers = layers;
        cfg.format.allocation_unit = 16;
        cfg.meter.heads = 5;
        cfg.meter.tokens = 192;
        cfg.meter.every = 1;
    }
    return cfg;
}

TEST(total_equals_allocated_bytes) {
    int kind, step, poison;
    for (kind = 0; kind < KINDS; kind++)
        for (poison = 0; poison < 256; poison += 0xab) { /* 0 and 0xab */
            tkv_layer_config layers[LAYERS];
            tkv_config cfg = make_history_config(kind, layers);
            tkv_cache *kv;
            cfg.host.allocator = start_tracking(poison);
            kv = create_cache(&cfg);
            check_memory_info(kv, "empty");
            for (step = 0; step < STEPS; step++) {
                tkv_status st = run_step(kv, step);
                CHECK_MSG(st == TKV_OK, "kind %d step %d: %s, %s", kind, step, tkv_get_status_text(st),
                          tkv_get_last_error(kv));
                check_memory_info(kv, "step");
                check_cache_at(kv, "step", step);
                check_guards();
            }
            tkv_destroy(kv);
            check_all_released();
        }
}

/* Results do not depend on what the memory held before. */
TEST(results_ignore_old_memory) {
    static const int poisons[] = {0x00, 0xff, 0xab, 0x7f};
    static float q[3 * 2 * 10], out[COUNT(poisons)][3 * 2 * 17];
    tkv_rng rng = tkv_rng_seed(3);
    int kind, step, i, seq, layer;
    tkv_rng_fill(&rng, q, COUNT(q), 1.0);
    for (kind = 0; kind < KINDS; kind++) {
        tkv_cache *kv[COUNT(poisons)];
        tracking_allocator trackers[COUNT(poisons)];
        tkv_layer_config layers[LAYERS];
        tkv_config cfg = make_history_config(kind, layers);
        for (i = 0; i < COUNT(poisons); i++) {
            tkv_allocator a = start_tracking(poisons[i]);
            trackers[i] = tracker;
            a.user = &trackers[i];
            cfg.host.allocator = a;
            kv[i] = create_cache(&cfg);
        }
        for (step = 0; step < STEPS; step++) {
            snapshot first, other;
            for (i = 0; i < COUNT(poisons); i++) CHECK_EQ(run_step(kv[i], step), TKV_OK);
            for (seq = 0; seq < SEQS && (!tkv_test_quick() || step % 6 == 5); seq++)
                for (layer = 0; layer < LAYERS; layer++) {
                    int n = tkv_get_length(kv[0], seq, layer);
                    for (i = 0; i < COUNT(poisons); i++) {
                        memset(out[i], 0x11 * i, sizeof out[i]);
                        CHECK_EQ(tkv_attend(kv[i], seq, layer, q, n < 3 ? n : 3, out[i]), TKV_OK);
                        if (i && n >= 3) CHECK_MEM(out[i], out[0], sizeof out[i]);
                    }
                }
            if (step % 10 && step != STEPS - 1) continue;
            first = snapshot_of(kv[0]);
            for (i = 1; i < COUNT(poisons); i++) {
                other = snapshot_of(kv[i]);
                CHECK_MSG(is_same_snapshot(&first, &other), "kind %d step %d poison %d", kind, step,
                          poisons[i]);
                free_snapshot(&other);
            }
            free_snapshot(&first);
        }
        for (i = 0; i < COUNT(poisons); i++) {
            tkv_destroy(kv[i]);
            tracker = trackers[i];
            check_all_released();
        }
    }
}

/* >>each allocation fails */
/* In run n, allocation n fails, and the `more` after it. The call reports this and changes nothing that a
 * caller sees. The same call then succeeds, and the history ends as without a failure. */
static void check_each_failure(int kind, int more, int stride) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_history_config(kind, layers);
    tkv_cache *kv = NULL;
    long before[STEPS + 1], total, n;
    snapshot end;
    int step;
    cfg.host.allocator = start_tracking(0xab);
    kv = create_cache(&cfg);
    for (step = 0; step < STEPS; step++) {
        before[step] = tracker.count;
        CHECK_EQ(run_step(kv, step), TKV_OK);
    }
    before[STEPS] = total = tracker.count;
    CHECK(total > 40);
    end = snapshot_of(kv);
    tkv_destroy(kv);
    check_all_released();
    for (n = 1; n <= total; n += n < 12 ? 1 : stride) {
        tkv_status st;
        int outcome = 0; /* 1: a call failed; 2: allocation n failed, but its call succeeded */
        cfg.host.allocator = start_tracking(0xff);
        tracker.fail_from = n;
        tracker.n_failures = 1 + more;
        kv = (tkv_cache *)(void *)layers;
        st = tkv_create(&cfg, &kv);
        if (n <= before[0]) {
            CHECK_EQ(st, TKV_ERR_NOMEM);
            CHECK((void *)kv == (void *)layers);
            check_all_released();
            continue;
        }
        CHECK_EQ(st, TKV_OK);
        if (st) return;
        note_config(&cfg);
        for (step = 0; step < STEPS; step++) {
            snapshot before_step, now;
            int is_failing = !outcome && n <= before[step + 1]; /* the histories are equal up to this step */
            memset(&before_step, 0, sizeof before_step);
            if (is_failing) before_step = take_snapshot(kv, 0);
            st = run_step(kv, step);
            if (!is_failing) {
                CHECK_EQ(st, TKV_OK);
                continue;
            }
            outcome = 1;
            if (st == TKV_OK) { /* a second table waits for memory; the rest of the history differs */
                const int shrinks =
                    step == 40 || step == 41 || step == 55;  /* an array of the index stays large */
                CHECK(shrinks || has_size(tracker.refused)); /* the first table has that size */
                tracker.fail_from = 0;
                free_snapshot(&before_step);
                outcome = shrinks ? 1 : 2;
                continue;
            }
            CHECK_MSG(st == TKV_ERR_NOMEM, "allocation %ld, step %d: %s", n, step, tkv_get_status_text(st));
            CHECK(tkv_get_last_error(kv)[0] != 0);
            now = take_snapshot(kv, 0);
            CHECK_MSG(is_same_snapshot(&before_step, &now),
                      "allocation %ld failed and step %d changed something", n, step);
            free_snapshot(&before_step);
            free_snapshot(&now);
            check_cache_at(kv, "after a failure in step", step);
            check_memory_info(kv, "after a failure");
            check_guards();
            tracker.fail_from = 0;
            st = run_step(kv, step);
            CHECK_MSG(st == TKV_OK, "allocation %ld, step %d again: %s", n, step, tkv_get_last_error(kv));
            check_cache_at(kv, "again in step", step);
        }
        CHECK(outcome);
        if (outcome == 1) {
            snapshot now = snapshot_of(kv);
            CHECK_MSG(is_same_snapshot(&end, &now), "allocation %ld", n);
            free_snapshot(&now);
        }
        tkv_destroy(kv);
        check_all_released();
    }
    free_snapshot(&end);
}

/* The figures of the comment on tkv_estimate_memory: what a cache holds on the way, in parts of the forecast. */
TEST(peaks_are_as_the_forecast_says) {
    enum { SHAPE_LAYERS = 30, SHAPE_ROW = 3 * 64, LARGEST_CHUNK = 512 };
    static const struct {
        int n_tokens, chunk;
        double peak;
    } rows[] = {{512, 1, 1.32},  {1024, 1, 1.13},  {2048, 1, 1.08},
                {512, 512, 2.1}, {1024, 512, 2.1}, {2048, 512, 1.75}};
    static float x[LARGEST_CHUNK * SHAPE_ROW];
    tkv_rng rng = tkv_rng_seed(93);
    int i, t, l;
    tkv_rng_fill(&rng, x, LARGEST_CHUNK * SHAPE_ROW, 1.0);
    for (i = 0; i < COUNT(rows); i++) {
        tkv_config cfg = make_sized_config(SHAPE_LAYERS, 9, 3, 64, 1, 512);
        counting_allocator p;
        tkv_memory_info m;
        tkv_cache *kv;
        double ratio;
        if (tkv_test_quick() && rows[i].n_tokens > 512) continue;
        cfg.limits.max_tokens = 8192;
        CHECK_EQ(tkv_estimate_memory(&cfg, rows[i].n_tokens, 1, &m), TKV_OK);
        cfg.host.allocator = counting_allocator_of(&p);
        kv = create_cache(&cfg);
        for (t = 0; t < rows[i].n_tokens; t += rows[i].chunk)
            for (l = 0; l < SHAPE_LAYERS; l++) CHECK_EQ(tkv_append(kv, 0, l, x, x, rows[i].chunk), TKV_OK);
        ratio = (double)p.peak / (double)m.total;
        CHECK_MSG(fabs(ratio - rows[i].peak) < .05, "%d tokens by %d: %.3f of the forecast", rows[i].n_tokens,
                  rows[i].chunk, ratio);
        CHECK_EQ(m.peak, m.total);
        tkv_destroy(kv);
    }
}

TEST(each_allocation_fails_once) {
    int kind, stride = tkv_test_quick() ? 29 : 1;
    for (kind = 0; kind < KINDS; kind++)
        check_each_failure(kind, 0, kind < 3 || tkv_test_quick() ? stride : 3);
}

TEST(each_allocation_fails_and_later_ones) {
    int kind, stride = tkv_test_quick() ? 31 : 2;
    for (kind = 0; kind < KINDS; kind++)
        check_each_failure(kind, 1 << 20, kind < 3 || tkv_test_quick() ? stride : 7);
}

/* A failed call returns the pages that it got. Tables may stay grown. */
TEST(failed_appends_keep_no_pages) {
    tkv_config cfg = config(1, 2);
    tkv_cache *kv;
    tkv_memory_info before, after;
    long n;
    cfg.host.allocator = start_tracking(0xab);
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 300, 100), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_DUE), TKV_OK); /* so that the appends have nothing to recode */
    CHECK_EQ(tkv_get_memory(kv, &before), TKV_OK);
    for (n = 1; n < 100; n++) { /* until the allocations suffice */
        tkv_status st;
        tracker.fail_from = tracker.count + n;
        tracker.n_failures = 1000000;
        st = append_tokens(kv, 0, 0, 0, 512);
        tracker.fail_from = 0;
        if (!st) break;
        CHECK_EQ(st, TKV_ERR_NOMEM);
        CHECK_EQ(tkv_get_memory(kv, &after), TKV_OK);
        CHECK_EQ(after.slack, before.slack);
        CHECK_MEM(&after.tier, &before.tier, sizeof after.tier);
    }
    CHECK(n > 3 && n < 100);
    tkv_destroy(kv);
    check_all_released();
}

/* The memory in place, in the shape of Llama 3 8B, against the most that a cache holds at the last 128 lengths. */
TEST(in_place_takes_little_more_than_it_holds) {
    static const struct {
        int max_tokens, max_append;
        double ratio;
    } rows[] = {{4096, 64, 1.25}, {4096, 512, 1.5}, {32768, 64, 1.1}, {32768, 512, 1.1}};
    int i, n;
    for (i = 0; i < COUNT(rows); i++) {
        tkv_config cfg = tkv_default_config();
        tkv_memory_info m;
        size_t in_place = 0, most = 0;
        cfg.model.n_layers = 32;
        cfg.model.n_heads = 32;
        cfg.model.n_kv_heads = 8;
        cfg.model.head_dim = 128;
        cfg.limits.max_tokens = rows[i].max_tokens;
        cfg.limits.max_append = rows[i].max_append;
        CHECK_EQ(tkv_get_required_bytes(&cfg, &in_place, NULL), TKV_OK);
        for (n = rows[i].max_tokens - 127; n <= rows[i].max_tokens; n++) {
            CHECK_EQ(tkv_estimate_memory(&cfg, n, 1, &m), TKV_OK);
            if (m.total > most) most = m.total;
        }
        CHECK_MSG((double)in_place <= rows[i].ratio * (double)most,
                  "%d tokens, chunks of %d: %.0f and %.0f bytes", rows[i].max_tokens, rows[i].max_append,
                  (double)in_place, (double)most);
    }
}

/* Memory that is too small is refused with the bytes that max_append costs. */
TEST(refused_in_place_with_the_cost_of_max_append) {
    static const int appends[] = {0, 64, 100, 1000};
    int i;
    for (i = 0; i < COUNT(appends); i++) {
        tkv_config cfg = make_sized_config(2, 4, 2, 32, 1, appends[i]), least;
        size_t bytes = 0, least_bytes = 0;
        char reason[200], want[200];
        tkv_cache *kv = NULL;
        uint8_t mem[64];
        cfg.limits.max_tokens = 4000;
        least = cfg;
        least.limits.max_append = 64;
        CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
        CHECK_EQ(tkv_get_required_bytes(&least, &least_bytes, NULL), TKV_OK);
        CHECK_EQ(tkv_create_in_place(&cfg, mem, sizeof mem, &kv, reason, sizeof reason), TKV_ERR_CAPACITY);
        sprintf(want, "bytes is 64; the config needs %lu", (unsigned long)bytes);
        CHECK_MSG(strncmp(reason, want, strlen(want)) == 0, "%s", reason);
        sprintf(want, "limits.max_append 64 would save %lu of them", (unsigned long)(bytes - least_bytes));
        CHECK_MSG((strstr(reason, want) != NULL) == (appends[i] != 64), "%s, not %s", reason, want);
        cfg.limits.max_tokens = 0;
        CHECK_EQ(tkv_create_in_place(&cfg, mem, sizeof mem, &kv, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK_MSG(strstr(reason, "limits.max_tokens is 0") != NULL, "%s", reason);
        CHECK(kv == NULL);
    }
}

/* >>calls that allocate nothing */
TEST(attention_allocates_nothing) {
    static float q[20 * 20], out[20 * 34], lse[20 * 2], scores[MAX_TOKENS];
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = make_history_config(2, layers);
    tkv_cache *kv;
    tkv_attend_params p;
    tkv_memory_info m, m2;
    tkv_layer_info info;
    long count;
    char reason[100];
    cfg.host.allocator = start_tracking(0xff);
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 1500, 300), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    count = tracker.count;
    CHECK_EQ(tkv_attend(kv, 0, 1, q, 20, out), TKV_OK);
    memset(&p, 0, sizeof p);
    p.n = 5;
    p.q = q;
    p.out = out;
    p.lse = lse;
    p.scores = scores;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 1500, k_out, v_out), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(tkv_check(kv, reason, sizeof reason), TKV_OK);
    CHECK_EQ(tkv_estimate_memory(&cfg, 1000, 2, &m2), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &m2), TKV_OK);
    CHECK_MEM(&m, &m2, sizeof m);
    CHECK_EQ(tracker.count, count);
    tkv_destroy(kv);
    check_all_released();
}

/* >>pages */
/* A long history of appends and resets. white_cache.c tests that pages in use are what the blocks need. */
TEST(memory_after_appends_and_resets) {
    tkv_config cfg = config(2, 6);
    tkv_rng rng = tkv_rng_seed(44);
    tkv_cache *kv;
    int step, steps = tkv_test_quick() ? 100 : 1500;
    cfg.host.allocator = start_tracking(0xab);
    cfg.model.n_kv_heads = cfg.model.n_heads = 1;
    cfg.model.head_dim = 40;
    cfg.model.v_head_dim = 8;
    kv = create_cache(&cfg);
    for (step = 0; step < steps; step++) {
        int seq = tkv_rng_below(&rng, 6);
        if (tkv_get_length(kv, seq, TKV_ALL_LAYERS) > 1500 || tkv_rng_below(&rng, 12) == 0)
            CHECK_EQ(tkv_seq_reset(kv, seq), TKV_OK);
        else CHECK_EQ(append_to_all_layers(kv, seq, seq, 1 + tkv_rng_below(&rng, 200), 512), TKV_OK);
        check_memory_info(kv, "fragments");
        check_cache_at(kv, "fragments", step);
    }
    tkv_destroy(kv);
    check_all_released();
}

/* >>in place */
typedef struct shape {
    int layers, seqs, tokens, append, sink, hot, warm, window, dims, v_dims, heads;
    tkv_format f;
    int shared;
} shape;

static const shape shapes[] = {
    {1, 1, 1, 0, 0, 0, 0, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {1, 1, 4, 0, 0, 0, 0, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {1, 1, 5, 0, 0, 0, 0, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {2, 2, 64, 1, TKV_OFF, 0, 0, 0, 16, 7, 2, TKV_F32, 0},
    {2, 2, 68, 512, 0, 0, 0, 0, 10, 17, 2, TKV_FORMAT_DEFAULT, 0},
    {1, 1, 1024, 0, TKV_OFF, TKV_UNLIMITED, 0, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {1, 2, 1024, 64, TKV_OFF, TKV_OFF, TKV_OFF, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {3, 2, 1500, 0, 0, 0, 0, 0, 10, 17, 2, TKV_FORMAT_DEFAULT, 0},
    {3, 2, 1500, 1, 0, 0, 0, 0, 10, 17, 2, TKV_BF16, 0},
    {2, 3, 777, 100, 64, 100, 130, 0, 48, 32, 1, TKV_F32, 0},
    {2, 1, 2000, 300, 0, 0, TKV_UNLIMITED, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {2, 1, 2000, 300, 0, 0, TKV_OFF, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {2, 1, 2000, 64, 0, 0, 0, 100, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {2, 2, 2000, 512, 0, 100, 64, 1, 16, 16, 1, TKV_F32, 0},
    {2, 1, 2000, 512, TKV_OFF, TKV_UNLIMITED, 0, 300, 16, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {1, 1, 2000, 20, 17, 1, 1, 0, 20, 16, 1, TKV_FORMAT_DEFAULT, 0},
    {1, 1, 1000, 1000, 0, 0, 0, 0, 16, 16, 3, TKV_FORMAT_DEFAULT, 0},
    {1, 1, 300, 0, 0, 0, 0, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 1},
    {3, 2, 1500, 0, 0, 0, 0, 0, 10, 17, 2, TKV_FORMAT_DEFAULT, 1},
    {1, 2, 1100, 1, TKV_OFF, TKV_OFF, TKV_OFF, 0, 16, 16, 1, TKV_F32, 1},
    {2, 1, 2000, 300, 0, 0, TKV_UNLIMITED, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 1},
    {2, 4, 400, 64, 0, 30, 100, 0, 48, 80, 3, TKV_FORMAT_DEFAULT, 1},
    {1, 1, 2000, 512, 0, 100, 64, 100, 20, 33, 1, TKV_F32, 1},
    {1, 1, 1024, 0, TKV_OFF, TKV_UNLIMITED, 0, 0, 16, 16, 1, TKV_FORMAT_DEFAULT, 1},
    {1, 1, 1500, 1000, 0, 0, 0, 0, 16, 16, 3, TKV_FORMAT_DEFAULT, 1}};

static tkv_config make_config(const shape *s) {
    tkv_config cfg = config(s->layers, s->seqs);
    cfg.model.n_heads = cfg.model.n_kv_heads = s->heads;
    cfg.model.head_dim = s->dims;
    cfg.model.v_head_dim = s->v_dims;
    cfg.limits.max_tokens = s->tokens;
    cfg.limits.max_append = s->append;
    cfg.tiers.sink_tokens = s->sink;
    cfg.tiers.hot_tokens = s->hot;
    cfg.tiers.warm_tokens = s->warm;
    cfg.model.window = s->window;
    cfg.tiers.hot.k = cfg.tiers.hot.v = s->f;
    if (s->shared) set_shared_formats(&cfg);
    return cfg;
}

/* Every sequence grows to max_tokens, in several chunk sizes. Contents equal those of a cache on the heap. */
TEST(in_place_holds_everything) {
    static const int chunks[] = {1, 7, 64, 100, 0};
    tkv_rng rng = tkv_rng_seed(2);
    int i, c, seq, round;
    for (i = 0; i < COUNT(shapes); i++)
        for (c = 0; c < COUNT(chunks); c += tkv_test_quick() ? 3 : 1) {
            tkv_config cfg = make_config(&shapes[i]), heap = cfg;
            int max_chunk = shapes[i].append ? shapes[i].append : 512;
            size_t bytes = 0, offset = (size_t)((i * 5 + c * 17) % 64);
            guarded_buffer p;
            tkv_cache *kv = NULL, *on_heap;
            snapshot a, b;
            tkv_memory_info m;
            heap.host.allocator = start_tracking(0xab);
            cfg.host.allocator = heap.host.allocator; /* not used */
            CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
            p = guarded_buffer_of(bytes, offset, 0xff);
            CHECK_EQ(tkv_create_in_place(&cfg, p.mem, bytes - 1, &kv, NULL, 0), TKV_ERR_CAPACITY);
            CHECK(kv == NULL);
            CHECK_EQ(tkv_create_in_place(&cfg, NULL, bytes, &kv, NULL, 0), TKV_ERR_ARG);
            CHECK_EQ(tkv_create_in_place(&cfg, p.mem, bytes, NULL, NULL, 0), TKV_ERR_ARG);
            CHECK(is_filled_with(p.mem, bytes, 0xff));
            CHECK_EQ(tkv_create_in_place(&cfg, p.mem, bytes, &kv, NULL, 0), TKV_OK);
            note_config(&cfg);
            if (!kv) return;
            CHECK_EQ(tracker.count, 0);
            on_heap = create_cache(&heap);
            for (round = 0; round < (c == 2 ? 2 : 1); round++) { /* the second round uses the memory again */
                int left = cfg.limits.max_seqs;
                while (left) {
                    int n, chunk = chunks[c] ? chunks[c] : 1 + tkv_rng_below(&rng, max_chunk);
                    tkv_status st;
                    seq = tkv_rng_below(&rng, cfg.limits.max_seqs);
                    n = cfg.limits.max_tokens - tkv_get_length(kv, seq, TKV_ALL_LAYERS);
                    for (left = 0; left < cfg.limits.max_seqs &&
                                   tkv_get_length(kv, left, TKV_ALL_LAYERS) == cfg.limits.max_tokens;)
                        left++;
                    left = left < cfg.limits.max_seqs; /* 1 if a sequence is not full */
                    if (n == 0) continue;
                    if (chunk > max_chunk) chunk = max_chunk;
                    n = n < 10 * chunk ? n : 10 * chunk;
                    st = append_to_all_layers(kv, seq, seq, n, chunk);
                    CHECK_MSG(st == TKV_OK, "shape %d chunk %d at %d: %s", i, chunk,
                              tkv_get_length(kv, seq, TKV_ALL_LAYERS), tkv_get_last_error(kv));
                    if (st) break;
                    CHECK_EQ(append_to_all_layers(on_heap, seq, seq, n, chunk), TKV_OK);
                    check_cache_at(kv, "in place", i);
                }
                check_borders(&p);
                a = snapshot_of(kv);
                b = snapshot_of(on_heap);
                /* In the second round, only the cache in place has a table, from its flush. It has no table at 1,024
                 * tokens, and the other has. */
                CHECK_MSG(is_same_snapshot(&a, &b) ||
                              (shapes[i].shared && (round || shapes[i].tokens * shapes[i].seqs > 1024)),
                          "shape %d chunk %d", i, chunks[c]);
                free_snapshot(&a);
                free_snapshot(&b);
                CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
                CHECK_LE(m.total, bytes);
                CHECK_EQ(m.total, m.peak);
                for (seq = 0; seq < cfg.limits.max_seqs; seq++) {
                    CHECK_EQ(append_tokens(kv, seq, 0, 0, 1), TKV_ERR_CAPACITY);
                    CHECK_EQ(tkv_seq_truncate(kv, seq, cfg.limits.max_tokens - 1),
                             tkv_seq_truncate(on_heap, seq, cfg.limits.max_tokens - 1));
                    if (tkv_get_length(kv, seq, TKV_ALL_LAYERS) < cfg.limits.max_tokens)
                        CHECK_EQ(append_to_all_layers(kv, seq, 9, 1, 1), TKV_OK);
                }
                for (seq = 0; seq < cfg.limits.max_seqs; seq++) { /* a flush needs no further memory */
                    tkv_status st = tkv_seq_flush(kv, seq, TKV_FLUSH_FULL);
                    CHECK_MSG(st == TKV_OK, "flush of shape %d: %s", i, tkv_get_last_error(kv));
                    check_cache_at(kv, "flushed in place", i);
                }
                for (seq = 0; seq < cfg.limits.max_seqs; seq++) {
                    CHECK_EQ(tkv_seq_reset(kv, seq), TKV_OK);
                    CHECK_EQ(tkv_seq_reset(on_heap, seq), TKV_OK);
                }
                check_cache_at(kv, "emptied in place", i);
            }
            tkv_destroy(on_heap);
            check_all_released();
            tkv_destroy(kv); /* releases nothing: the memory belongs to the caller */
            check_borders(&p);
            free(p.raw);
        }
}

/* Steps and reservations succeed up to the last token. */
TEST(in_place_steps_and_reservations) {
    int i, seq, layer, reserve;
    for (reserve = 0; reserve < 2; reserve++)
        for (i = 0; i < COUNT(shapes); i++) {
            tkv_config cfg = make_config(&shapes[i]);
            int max_chunk = shapes[i].append ? shapes[i].append : 512;
            size_t bytes = 0;
            guarded_buffer p;
            tkv_cache *kv = NULL;
            CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
            p = guarded_buffer_of(bytes, 1, 0xff);
            CHECK_EQ(tkv_create_in_place(&cfg, p.mem, bytes, &kv, NULL, 0), TKV_OK);
            note_config(&cfg);
            if (!kv) return;
            for (seq = 0; seq < cfg.limits.max_seqs; seq++)
                while (tkv_get_length(kv, seq, TKV_ALL_LAYERS) < cfg.limits.max_tokens) {
                    int n = cfg.limits.max_tokens - tkv_get_length(kv, seq, TKV_ALL_LAYERS);
                    tkv_status st;
                    if (n > max_chunk) n = max_chunk;
                    st = reserve ? tkv_seq_reserve(kv, seq, n) : tkv_seq_begin(kv, seq);
                    CHECK_MSG(st == TKV_OK, "shape %d: %s %d at %d of %d: %s", i,
                              reserve ? "reserve" : "begin", n, tkv_get_length(kv, seq, TKV_ALL_LAYERS),
                              cfg.limits.max_tokens, tkv_get_last_error(kv));
                    for (layer = 0; layer < cfg.model.n_layers; layer++)
                        CHECK_EQ(append_tokens(kv, seq, layer, seq, n), TKV_OK);
                    if (!reserve) CHECK_EQ(tkv_seq_commit(kv, seq), TKV_OK);
                    if (st || tkv_get_last_error(kv)[0]) break;
                }
            check_cache_at(kv, "in place", i);
            check_borders(&p);
            tkv_destroy(kv);
            free(p.raw);
        }
}

TEST(in_place_at_any_address) {
    tkv_config cfg = config(2, 1);
    size_t bytes = 0, offset;
    snapshot first;
    memset(&first, 0, sizeof first);
    cfg.limits.max_tokens = 600;
    cfg.limits.max_append = 100;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    for (offset = 0; offset < 64; offset++) {
        guarded_buffer p = guarded_buffer_of(bytes, offset, offset % 2 ? 0xff : 0xab);
        tkv_cache *kv = NULL;
        CHECK_EQ(tkv_create_in_place(&cfg, p.mem, bytes, &kv, NULL, 0), TKV_OK);
        note_config(&cfg);
        if (!kv) return;
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 600, 75), TKV_OK);
        if (offset == 0) {
            first = snapshot_of(kv);
        } else {
            snapshot now = snapshot_of(kv);
            CHECK_MSG(is_same_snapshot(&first, &now), "offset %d", (int)offset);
            free_snapshot(&now);
        }
        check_cache_at(kv, "offset", (long)offset);
        check_borders(&p);
        tkv_destroy(kv);
        free(p.raw);
    }
    free_snapshot(&first);
    cfg.limits.max_tokens = 0;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_ERR_CONFIG);
    CHECK_EQ(tkv_get_required_bytes(NULL, &bytes, NULL), TKV_ERR_ARG);
    cfg.limits.max_tokens = 10;
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, NULL), TKV_ERR_ARG);
}

/* Sizes beyond any machine are refused. They do not wrap. */
TEST(sizes_do_not_wrap) {
    tkv_config cfg = tkv_default_config();
    size_t bytes = 0, one_token_bytes = 0;
    tkv_status st;
    tkv_memory_info m;
    tkv_cache *kv = NULL;
    cfg.model.n_layers = 4096;
    cfg.model.n_heads = cfg.model.n_kv_heads = 256;
    cfg.model.head_dim = 256;
    cfg.limits.max_seqs = 1 << 20;
    cfg.limits.max_tokens = (1 << 30) - 1;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
    cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI4;
    cfg.host.allocator = start_tracking(0);
    tracker.fail_from = 1;
    tracker.n_failures = 1 << 30;
    st = tkv_get_required_bytes(&cfg, &bytes, NULL);
    CHECK(st == TKV_ERR_CONFIG || (st == TKV_OK && (double)bytes > 1e15));
    CHECK(tkv_create(&cfg, &kv) != TKV_OK);
    CHECK(kv == NULL);
    cfg.limits.max_seqs = 1;
    st = tkv_get_required_bytes(&cfg, &bytes,
                                NULL); /* 2^30 tokens, 4096 layers, 256 heads, 2 KB: 2^61 bytes */
    CHECK(st == TKV_ERR_CONFIG || (st == TKV_OK && (double)bytes > 2e18));
    cfg.model.n_layers = 1;
    cfg.limits.max_seqs = 4096;
    cfg.model.n_heads = cfg.model.n_kv_heads = 32768; /* 2^68 bytes */
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_ERR_CONFIG);
    st = tkv_estimate_memory(&cfg, (1 << 20) - 1, 4096, &m); /* 2^58 */
    CHECK(st != TKV_OK || ((double)m.total > 2.8e17 && (double)m.fp16_bytes > 1.4e17));
    st = tkv_estimate_memory(&cfg, (1 << 30) - 1, 4096, &m);
    CHECK_MSG(st != TKV_OK, "the estimate of 2^68 bytes is %.3g", (double)m.total);
    cfg.model.n_heads = cfg.model.n_kv_heads = 256; /* 10 GB: more than 32 bits */
    cfg.limits.max_seqs = 1;
    st = tkv_estimate_memory(&cfg, 20000, 1, &m);
    CHECK_MSG(st != TKV_OK || (double)m.total > 1e10, "the estimate of 10 GB is %.3g", (double)m.total);
    cfg.model.n_layers = 1;
    cfg.limits.max_tokens = 100000;
    st = tkv_get_required_bytes(&cfg, &bytes, NULL);
    CHECK_EQ(st, sizeof(size_t) > 4 ? TKV_OK : TKV_ERR_CONFIG); /* 52 GB */
    if (st == TKV_OK) CHECK((double)bytes > 5.2e10 && (double)bytes < 5.4e10);
    cfg.limits.max_tokens = 1;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &one_token_bytes, NULL), TKV_OK);
    CHECK(one_token_bytes > 2 * 256 * 256 * 4);
}

/* >>the estimate */
typedef struct estimate_counts {
    int compared, index_differs;
    size_t page; /* bytes of a page */
} estimate_counts;

/* Bytes of a block of a layer and tier. */
static size_t get_block_bytes(const tkv_cache *kv, int layer, tkv_tier tier) {
    tkv_layer_info info;
    tkv_codec k, v;
    CHECK_EQ(tkv_get_layer(kv, 0, layer, &info), TKV_OK);
    memset(&k, 0, sizeof k);
    k.options = last_config.format;
    v = k;
    k.format = info.format[tier].k, k.side = TKV_K, k.head_dim = last_config.model.head_dim;
    v.format = info.format[tier].v, v.side = TKV_V, v.head_dim = last_config.model.v_head_dim;
    return (size_t)last_config.model.n_kv_heads * (tkv_get_block_bytes(&k) + tkv_get_block_bytes(&v));
}

static size_t get_largest_block(const tkv_cache *kv) { /* in bytes, of all layers and tiers */
    size_t most = 0;
    int layer, tier;
    for (layer = 0; layer < last_config.model.n_layers; layer++)
        for (tier = 0; tier < TKV_TIER_COUNT && has_own_kv(layer); tier++)
            if (get_block_bytes(kv, layer, (tkv_tier)tier) > most)
                most = get_block_bytes(kv, layer, (tkv_tier)tier);
    return most;
}

static size_t get_page_bytes(tkv_config cfg) { /* bytes of a page: after the first token, the cache has one */
    tkv_memory_info m;
    tkv_cache *kv;
    int layer = 0;
    memset(&cfg.host.allocator, 0, sizeof cfg.host.allocator);
    kv = create_cache(&cfg);
    while (!has_own_kv(layer)) layer++;
    CHECK_EQ(append_tokens(kv, 0, layer, 0, 1), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    tkv_destroy(kv);
    return m.total - m.tables - m.index - m.scratch;
}

static void check_estimate(const tkv_cache *kv, const tkv_config *cfg, int n, int seqs,
                           estimate_counts *counts) {
    tkv_calibration_info calibration;
    tkv_memory_info e, m;
    int tier, blocks = cfg->model.n_layers * seqs;
    size_t unused;
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_EQ(tkv_estimate_memory(cfg, n, seqs, &e), TKV_OK);
    counts->compared++;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        CHECK_MSG(e.tier[tier].tokens == m.tier[tier].tokens && e.tier[tier].codes == m.tier[tier].codes &&
                      e.tier[tier].metadata == m.tier[tier].metadata,
                  "tier %d of %d tokens: estimate %lu %lu %lu, truth %lu %lu %lu", tier, n,
                  (unsigned long)e.tier[tier].tokens, (unsigned long)e.tier[tier].codes,
                  (unsigned long)e.tier[tier].metadata, (unsigned long)m.tier[tier].tokens,
                  (unsigned long)m.tier[tier].codes, (unsigned long)m.tier[tier].metadata);
    }
    /* The estimate has a version for each table. A cache has fewer, if blocks leave a version before the next table. */
    unused = n * seqs >= 1024 - 64 ? e.tables - m.tables : 0;
    CHECK_MSG(unused <= e.tables / 2, "%d tokens, %d sequences: %lu tables, %lu expected", n, seqs,
              (unsigned long)m.tables, (unsigned long)e.tables);
    CHECK_MSG(e.tables - unused == m.tables, "%d tokens, %d sequences: %lu tables, %lu expected", n, seqs,
              (unsigned long)m.tables, (unsigned long)e.tables);
    CHECK_EQ(e.scratch, m.scratch);
    CHECK_MSG(e.slack == m.slack, "slack of %d tokens: estimate %lu, truth %lu", n, (unsigned long)e.slack,
              (unsigned long)m.slack);
    CHECK_EQ(e.fp16_bytes, m.fp16_bytes);
    CHECK_EQ(e.total - e.index - unused, m.total - m.index);
    if (e.index != m.index) {
        counts->index_differs++;
        CHECK_MSG(m.index > e.index && m.index <= 2 * e.index,
                  "index of %d tokens, %d sequences: estimate %lu, truth %lu", n, seqs,
                  (unsigned long)e.index, (unsigned long)m.index);
    } else {
        CHECK_NEAR(e.ratio * (double)e.total / (double)(e.total - unused), m.ratio, 1e-12);
    }
    /* The estimate does not know the history. A growing table and a recoded block exist twice for a
     * moment. A tail had one more block before its oldest one moved. It had more while blocks waited for a
     * table. */
    CHECK_EQ(tkv_get_calibration(kv, &calibration), TKV_OK);
    if (calibration.n_learning + calibration.n_calibrated) blocks += cfg->model.n_layers * 256 / BLOCK;
    CHECK(m.peak >= e.total - unused);
    CHECK_LE(m.peak, e.peak + m.index + 2 * counts->page + (size_t)blocks * get_largest_block(kv));
}

TEST(estimate_equals_memory) {
    estimate_counts counts;
    int i, n, seq;
    memset(&counts, 0, sizeof counts);
    for (i = 0; i < COUNT(shapes); i++) {
        tkv_config cfg = make_config(&shapes[i]);
        tkv_cache *kv;
        int longest = shapes[i].tokens;
        if (tkv_test_quick() && longest > 600) longest = 600;
        counts.page = get_page_bytes(cfg);
        cfg.host.allocator = start_tracking(0xab);
        kv = create_cache(&cfg);
        check_estimate(kv, &cfg, 0, 0, &counts);
        check_estimate(kv, &cfg, 0, cfg.limits.max_seqs, &counts);
        for (n = 1; n <= longest; n++) {
            for (seq = 0; seq < cfg.limits.max_seqs; seq++)
                CHECK_EQ(append_to_all_layers(kv, seq, seq, 1, 1), TKV_OK);
            /* the estimate assumes one sequence after the other, and the tokens before the first table
             * depend on the order */
            if (shapes[i].shared && n <= 319 && n * cfg.limits.max_seqs > 256) continue;
            if (n < 70 || n % 64 < 7 || n % 13 == 0 || n == longest)
                check_estimate(kv, &cfg, n, cfg.limits.max_seqs, &counts);
        }
        tkv_destroy(kv);
        check_all_released();
        if (cfg.limits.max_seqs < 2) continue;
        kv = create_cache(&cfg); /* one sequence after the other, without the last */
        for (seq = 0; seq + 1 < cfg.limits.max_seqs; seq++) {
            CHECK_EQ(append_to_all_layers(kv, seq, seq, longest, 1), TKV_OK);
            check_estimate(kv, &cfg, longest, seq + 1, &counts);
        }
        tkv_destroy(kv);
        check_all_released();
    }
    /* Tables can grow early. They keep the size that the most pages needed, when a block had just begun. So the
     * index may differ in at most an eighth of the cases. */
    CHECK_MSG(counts.index_differs * 8 <= counts.compared, "index differs in %d of %d", counts.index_differs,
              counts.compared);
}

TEST(estimate_of_layers_that_differ) {
    tkv_layer_config layers[5];
    tkv_config cfg = config(5, 2);
    tkv_cache *kv;
    estimate_counts counts;
    int n;
    memset(&counts, 0, sizeof counts);
    memset(layers, 0, sizeof layers);
    layers[0].no_cache = 1;
    layers[1].window = 100;
    layers[2].share_kv = 2;
    layers[2].window = 150;
    layers[3].hot_tokens = TKV_UNLIMITED;
    layers[3].hot.k = TKV_F32;
    layers[2].window_sinks = 1;
    layers[4].sink_tokens = 30;
    layers[4].warm.k = TKV_Q8;
    cfg.layers = layers;
    counts.page = get_page_bytes(cfg);
    cfg.host.allocator = start_tracking(0xab);
    kv = create_cache(&cfg);
    for (n = 1; n <= 900; n++) {
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 1, 1), TKV_OK);
        if (n % 5 == 0 || n < 70) check_estimate(kv, &cfg, n, 1, &counts);
    }
    tkv_destroy(kv);
    check_all_released();
}

/* Under a budget the first table has memory from the start, the second one when it is due. */
TEST(estimates_of_tables_under_a_budget) {
    tkv_config cfg = config(1, 1);
    tkv_memory_info m[4];
    static const int tokens[] = {10, 400, 900, 1500};
    int i;
    cfg.budget.bytes = 64 << 20;
    for (i = 0; i < 4; i++) CHECK_EQ(tkv_estimate_memory(&cfg, tokens[i], 1, &m[i]), TKV_OK);
    CHECK(m[0].tables > 0);
    CHECK_EQ(m[1].tables, m[0].tables);
    CHECK(m[2].tables > m[1].tables);
    CHECK_EQ(m[3].tables - m[2].tables, m[2].tables - m[1].tables);
}

/* With eviction, more tokens than the budget holds are estimated as the most that it holds. */
TEST(estimates_with_eviction_fill_the_budget) {
    tkv_config cfg = config(1, 1);
    tkv_memory_info m;
    int n, least = 1000;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    for (cfg.budget.bytes = 1 << 20; cfg.budget.bytes < 1 << 21; cfg.budget.bytes += 30000) {
        CHECK_EQ(tkv_estimate_memory(&cfg, 100000, 1, &m), TKV_OK);
        CHECK_LE(m.peak, cfg.budget.bytes);
        CHECK_LE(.9 * (double)cfg.budget.bytes, m.peak);
        n = (int)(m.tier[TKV_TIER_HOT].tokens + m.tier[TKV_TIER_WARM].tokens +
                  m.tier[TKV_TIER_ARCHIVE].tokens);
        CHECK(n >= least && n < 100000);
        least = n;
    }
}

TEST(estimate_refusals) {
    tkv_config cfg = config(1, 2);
    tkv_memory_info m;
    cfg.limits.max_tokens = 100;
    CHECK_EQ(tkv_estimate_memory(&cfg, 100, 2, &m), TKV_OK);
    CHECK_EQ(tkv_estimate_memory(&cfg, 101, 2, &m), TKV_ERR_ARG);
    CHECK_EQ(tkv_estimate_memory(&cfg, -1, 2, &m), TKV_ERR_ARG);
    CHECK_EQ(tkv_estimate_memory(&cfg, 1, 3, &m), TKV_ERR_ARG);
    CHECK_EQ(tkv_estimate_memory(&cfg, 1, -1, &m), TKV_ERR_ARG);
    CHECK_EQ(tkv_estimate_memory(&cfg, 1, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_estimate_memory(NULL, 1, 1, &m), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_memory(NULL, &m), TKV_ERR_ARG);
}

/* A prompt in chunks of max_append. The peak is bounded by what the prompt leaves. */
TEST(peak_of_a_prompt) {
    static const int chunks[] = {64, 128, 512};
    int i;
    for (i = 0; i < COUNT(chunks); i++) {
        tkv_config cfg = config(4, 1);
        tkv_cache *kv;
        tkv_memory_info m;
        size_t hot, page;
        cfg.limits.max_append = chunks[i];
        cfg.model.head_dim = cfg.model.v_head_dim = 16;
        page = get_page_bytes(cfg);
        cfg.host.allocator = start_tracking(0xab);
        kv = create_cache(&cfg);
        CHECK_EQ(append_to_all_layers(kv, 0, 0, 4096, chunks[i]), TKV_OK);
        CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
        CHECK_EQ(m.peak, tracker.peak);
        /* beyond the total: a layer's exact chunk while it is recoded, a page of each size, the old half
         * of a table */
        hot = (size_t)(chunks[i] / BLOCK + 1) * get_block_bytes(kv, 0, TKV_TIER_HOT);
        CHECK_LE(m.peak, m.total + hot + 4 * page + m.index);
        tkv_destroy(kv);
        check_all_released();
    }
}

/* Tokens that come one by one, default plan: a short cache is smaller than FP16, and no earlier number of tokens takes
 * much more memory than 2,048 of them. SmolLM2's shape and that of a Llama with a billion weights. */
TEST(small_from_the_start) {
    static const struct { int layers, n_heads, n_kv_heads; } models[] = {{30, 9, 3}, {16, 32, 8}};
    int i, n;
    for (i = 0; i < COUNT(models); i++) {
        tkv_config cfg = tkv_default_config();
        tkv_memory_info m;
        tkv_cache *kv;
        cfg.model.n_layers = models[i].layers;
        cfg.model.n_heads = models[i].n_heads;
        cfg.model.n_kv_heads = models[i].n_kv_heads;
        cfg.model.head_dim = cfg.model.v_head_dim = 64;
        cfg.host.isa = tkv_test_isa();
        if (tkv_test_quick()) cfg.model.n_heads /= models[i].n_kv_heads, cfg.model.n_kv_heads = 1;
        kv = create_cache(&cfg);
        for (n = 1; n <= 2048; n++) {
            CHECK_EQ(append_to_all_layers(kv, 0, 0, 1, 1), TKV_OK);
            if (n < 300 || (n > 400 && n % 64)) continue;
            CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
            CHECK_MSG((double)m.total < 0.9 * (double)m.fp16_bytes, "%d tokens: %.0f bytes", n,
                      (double)m.total);
        }
        CHECK_MSG((double)m.peak < 1.105 * (double)m.total, "peak %.0f, at last %.0f", (double)m.peak,
                  (double)m.total);
        tkv_destroy(kv);
    }
}

/* The memory of single lists adds up to the memory of the cache. */
TEST(memory_of_each_layer) {
    tkv_config cfg = config(3, 2);
    tkv_cache *kv;
    tkv_layer_info info;
    tkv_memory_info all, one;
    size_t codes[TKV_TIER_COUNT] = {0, 0, 0}, metadata[TKV_TIER_COUNT] = {0, 0, 0}, tokens = 0, fp16 = 0;
    int seq, layer, tier;
    cfg.host.allocator = start_tracking(0xab);
    kv = create_cache(&cfg);
    CHECK_EQ(append_to_all_layers(kv, 0, 0, 900, 100), TKV_OK);
    CHECK_EQ(append_to_all_layers(kv, 1, 0, 70, 70), TKV_OK);
    CHECK_EQ(tkv_get_memory(kv, &all), TKV_OK);
    for (seq = 0; seq < 2; seq++)
        for (layer = 0; layer < 3; layer++) {
            size_t sum;
            CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
            one = info.memory;
            sum = one.slack;
            for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
                codes[tier] += one.tier[tier].codes;
                metadata[tier] += one.tier[tier].metadata;
                tokens += one.tier[tier].tokens;
                sum += one.tier[tier].codes + one.tier[tier].metadata;
            }
            fp16 += one.fp16_bytes;
            CHECK_EQ(sum, one.total);
        }
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        CHECK_EQ(codes[tier], all.tier[tier].codes);
        CHECK_EQ(metadata[tier], all.tier[tier].metadata);
    }
    CHECK_EQ(tokens, 3 * 970);
    CHECK_EQ(fp16, all.fp16_bytes);
    CHECK(all.ratio_f32 > 1.999 * all.ratio && all.ratio_f32 < 2.001 * all.ratio);
    CHECK_EQ(tkv_get_layer(kv, 2, 0, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_layer(kv, 0, 3, &info), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_layer(NULL, 0, 0, &info), TKV_ERR_ARG);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(total_equals_allocated_bytes);
    RUN(results_ignore_old_memory);
    RUN(each_allocation_fails_once);
    RUN(each_allocation_fails_and_later_ones);
    RUN(failed_appends_keep_no_pages);
    RUN(in_place_takes_little_more_than_it_holds);
    RUN(refused_in_place_with_the_cost_of_max_append);
    RUN(attention_allocates_nothing);
    RUN(memory_after_appends_and_resets);
    RUN(in_place_holds_everything);
    RUN(in_place_steps_and_reservations);
    RUN(in_place_at_any_address);
    RUN(sizes_do_not_wrap);
    RUN(estimate_equals_memory);
    RUN(estimate_of_layers_that_differ);
    RUN(estimates_of_tables_under_a_budget);
    RUN(estimates_with_eviction_fill_the_budget);
    RUN(estimate_refusals);
    RUN(peak_of_a_prompt);
    RUN(small_from_the_start);
    RUN(memory_of_each_layer);
    RUN(peaks_are_as_the_forecast_says);
    return tkv_test_end();
}
