/*
 * test_spill.c - offloaded blocks. Attention with them is the same to the bit. A store that fails costs an error
 * and nothing else. Damaged bytes are detected. A block that is read back is the one that was written.
 */
#if defined(__unix__) || defined(__APPLE__)
#include "../examples/spill_file.h" /* before system headers */

#include <signal.h>
#include <sys/resource.h>
#define HAVE_FILES 1
#else
#define HAVE_FILES 0
#endif
#include "kit.h"

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    LAYERS = 2,
    SEQS = 2,
    KV_HEADS = 2,
    HEADS = 6,
    DIM = 32,
    ROW = KV_HEADS * DIM,
    CHUNK = 96,
    LONGEST = 4000
};

/* >>caches */
static tkv_rng rng;
static float k_in[SEQS * CHUNK * ROW], v_in[SEQS * CHUNK * ROW], q_in[CHUNK * HEADS * DIM];
static float out_a[CHUNK * HEADS * DIM], out_b[CHUNK * HEADS * DIM];
static float k_a[LONGEST * ROW], v_a[LONGEST * ROW], k_b[LONGEST * ROW], v_b[LONGEST * ROW];

static tkv_config small_config(void) {
    tkv_config cfg = shape_of(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    cfg.tiers.warm_tokens = 2 * BLOCK;
    return cfg;
}

static void fresh(int n) {
    tkv_rng_fill(&rng, k_in, (size_t)(n * ROW), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * ROW), 1.0);
}

/* The same tokens to all layers of one cache, or of two. */
static tkv_status append_both(tkv_cache *a, tkv_cache *b, int seq, int n) {
    tkv_status st = TKV_OK;
    int l;
    for (l = 0; l < LAYERS && !st; l++) {
        fresh(n);
        st = tkv_append(a, seq, l, k_in, v_in, n);
        if (!st && b) st = tkv_append(b, seq, l, k_in, v_in, n);
    }
    return st;
}

/* The key of the offloaded block with this token of sequence 0; DEPOT_KEYS if the block is in RAM. */
static uint32_t key_of(tkv_cache *kv, test_store *d, int layer, int token) {
    const int fetches = d->fetches;
    CHECK_EQ(tkv_read(kv, 0, layer, token, 1, k_a, v_a), TKV_OK);
    return d->fetches > fetches ? d->last_key : (uint32_t)DEPOT_KEYS;
}

static int spill_all(tkv_cache *kv, int seq) {
    int done = 0;
    CHECK_EQ(tkv_offload(kv, seq, TKV_ALL_LAYERS, LONGEST, &done), TKV_OK);
    sound(kv);
    return done;
}

static int spilled_in(const tkv_cache *kv, int seq, int layer) {
    tkv_layer_info t;
    memset(&t, 0, sizeof t);
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &t), TKV_OK);
    return t.offloaded;
}

/* Attention and reading of two caches with the same tokens in the same formats. */
static void same(tkv_cache *a, tkv_cache *b, int seq, int n) {
    int l, len = tkv_get_length(a, seq, TKV_ALL_LAYERS);
    CHECK_EQ(tkv_get_length(b, seq, TKV_ALL_LAYERS), len);
    if (n > len) n = len;
    for (l = 0; l < LAYERS; l++) {
        size_t size = (size_t)n * HEADS * DIM * sizeof(float), all = (size_t)len * ROW * sizeof(float);
        tkv_rng_fill(&rng, q_in, (size_t)(n * HEADS * DIM), 1.0);
        CHECK_EQ(tkv_attend(a, seq, l, q_in, n, out_a), TKV_OK);
        CHECK_EQ(tkv_attend(b, seq, l, q_in, n, out_b), TKV_OK);
        CHECK_MEM(out_a, out_b, size);
        CHECK_EQ(tkv_read(a, seq, l, 0, len, k_a, v_a), TKV_OK);
        CHECK_EQ(tkv_read(b, seq, l, 0, len, k_b, v_b), TKV_OK);
        CHECK_MEM(k_a, k_b, all);
        CHECK_MEM(v_a, v_b, all);
    }
}

/* >>the same bits */
static const tkv_format_pair pairs[] = {{TKV_F16, TKV_F16},
                                        {TKV_F32, TKV_BF16},
                                        {TKV_Q8, TKV_Q8},
                                        {TKV_KIVI4, TKV_KIVI2},
                                        {TKV_A40, TKV_R40},
                                        {TKV_A25, TKV_R15},
                                        {TKV_INT8, TKV_INT4},
                                        {TKV_FP8_E4M3, TKV_FP4},
                                        {TKV_SQUAT4, TKV_KIVI3},
                                        {TKV_SUBSPACE4, TKV_SUBSPACE2},
                                        {TKV_KVQUANT4, TKV_KVQUANT3}};

TEST(attention_is_the_same) {
    static const int queries[] = {1, 3, 11,
                                  CHUNK}; /* the last one takes the path of many, where there is one */
    int i, n, seq;
    for (i = 0; i < COUNT(pairs); i++) {
        tkv_config cfg = small_config(), with;
        tkv_cache *a, *b;
        test_store d;
        if (i % 2 || i == 0) cfg.tiers.warm = pairs[i]; /* what is outside is recoded no more */
        cfg.tiers.archive = pairs[i];
        cfg.model.rope.dim = DIM;
        cfg.meter.heads = i % 3;
        cfg.meter.every = 1;
        with = cfg;
        test_store_for(&d, &with);
        a = make(&cfg);
        b = make(&with);
        for (n = 0; n < 8; n++)
            for (seq = 0; seq < SEQS; seq++) CHECK_EQ(append_both(a, b, seq, 60 + 30 * seq), TKV_OK);
        for (n = 0; n < 3; n++) /* the age at which blocks leave the hot tier */
            for (seq = 0; seq < SEQS; seq++) CHECK_EQ(append_both(a, b, seq, 50), TKV_OK);
        CHECK(spill_all(b, 1) > LAYERS * 6);
        CHECK_EQ(spilled_in(b, 0, 0), 0);
        CHECK(spilled_in(b, 1, 1) > 6);
        for (n = 0; n < COUNT(queries); n++)
            for (seq = 0; seq < SEQS; seq++) same(a, b, seq, queries[n]);
        CHECK_MSG(d.hints > 0 && d.fetches > 0, "%d hints, %d fetches", d.hints, d.fetches);
        for (n = 0; n < 40; n++) /* and it goes on */
            for (seq = 0; seq < SEQS; seq++) CHECK_EQ(append_both(a, b, seq, 1), TKV_OK);
        if (!i) same(a, b, 1, 5);
        sound(b);
        CHECK_EQ(alive_in(&d),
                 spilled_in(b, 0, 0) + spilled_in(b, 0, 1) + spilled_in(b, 1, 0) + spilled_in(b, 1, 1));
        CHECK_EQ(tkv_seq_reset(b, 1), TKV_OK);
        CHECK_EQ(alive_in(&d), 0);
        sound(b);
        tkv_destroy(a);
        tkv_destroy(b);
        test_store_end(&d);
    }
}

TEST(all_that_attention_can_be_asked) {
    static float mask[CHUNK * LONGEST], lse_a[CHUNK * HEADS], lse_b[CHUNK * HEADS], mass_a[LONGEST],
        mass_b[LONGEST];
    tkv_config cfg = small_config(), with;
    tkv_attend_params p;
    float alibi[HEADS], sinks[HEADS];
    tkv_cache *a, *b;
    test_store d;
    int n, kind;
    with = cfg;
    test_store_for(&d, &with);
    a = make(&cfg);
    b = make(&with);
    for (n = 0; n < 9; n++) CHECK_EQ(append_both(a, b, 0, CHUNK), TKV_OK);
    CHECK(spill_all(b, 0) > 0);
    tkv_rng_fill(&rng, mask, (size_t)(CHUNK * tkv_get_length(a, 0, TKV_ALL_LAYERS)), 3.0);
    tkv_rng_fill(&rng, q_in, (size_t)(CHUNK * HEADS * DIM), 1.0);
    for (n = 0; n < HEADS; n++) {
        alibi[n] = 0.01f * (float)n;
        sinks[n] = 1.0f;
    }
    for (kind = 0; kind < 64; kind++) {
        memset(&p, 0, sizeof p);
        p.n = kind % 2 ? 5 : 70;
        p.q = q_in;
        p.lse = lse_a;
        if (kind & 2) p.mask = mask;
        if (kind & 4) p.window = 300;
        if (kind & 8) p.scores = mass_a;
        if (kind & 16) p.alibi_slopes = alibi, p.softcap = 20.0f;
        if (kind & 32) p.sink_logits = sinks, p.non_causal = 1;
        p.out = out_a;
        CHECK_EQ(tkv_attend_ex(a, &p), TKV_OK);
        p.out = out_b;
        p.lse = lse_b;
        if (p.scores) p.scores = mass_b;
        CHECK_EQ(tkv_attend_ex(b, &p), TKV_OK);
        CHECK_MEM(out_a, out_b, (size_t)p.n * HEADS * DIM * sizeof(float));
        CHECK_MEM(lse_a, lse_b, (size_t)p.n * HEADS * sizeof(float));
        if (p.scores) CHECK_MEM(mass_a, mass_b, (size_t)tkv_get_length(a, 0, TKV_ALL_LAYERS) * sizeof(float));
        if (kind % 8) continue;
        p.n = 2;
        CHECK_EQ(tkv_attend_reference(b, &p), TKV_OK);
        p.out = out_a;
        p.lse = lse_a;
        CHECK_EQ(tkv_attend_reference(a, &p), TKV_OK);
        CHECK_MEM(out_a, out_b, 2 * HEADS * DIM * sizeof(float));
    }
    n = d.fetches;
    p.n = 1;
    p.window = 100;
    p.non_causal = 0;
    CHECK_EQ(tkv_attend_ex(b, &p), TKV_OK);
    CHECK_EQ(d.fetches, n); /* what nobody sees is not fetched */
    tkv_destroy(a);
    tkv_destroy(b);
    test_store_end(&d);
}

TEST(wide_heads) {
    static const int dims[][2] = {{256, 256}, {80, 64}, {128, 192}};
    static float k[CHUNK * 256], v[CHUNK * 256], q[2 * 256], x[2 * 256], y[2 * 256];
    int i, n;
    for (i = 0; i < COUNT(dims); i++) {
        tkv_config cfg = tkv_default_config(), with;
        tkv_cache *a, *b;
        test_store d;
        cfg.model.n_layers = 1;
        cfg.model.n_heads = 2;
        cfg.model.n_kv_heads = 1;
        cfg.model.head_dim = dims[i][0];
        cfg.model.v_head_dim = dims[i][1];
        cfg.tiers.hot_tokens = i == 0 ? TKV_UNLIMITED : 64; /* exact blocks go, the largest there are */
        with = cfg;
        test_store_for(&d, &with);
        a = make(&cfg);
        b = make(&with);
        for (n = 0; n < 8; n++) {
            tkv_rng_fill(&rng, k, CHUNK * 256, 1.0);
            tkv_rng_fill(&rng, v, CHUNK * 256, 1.0);
            CHECK_EQ(tkv_append(a, 0, 0, k, v, CHUNK), TKV_OK);
            CHECK_EQ(tkv_append(b, 0, 0, k, v, CHUNK), TKV_OK);
        }
        CHECK(spill_all(b, 0) > 6);
        tkv_rng_fill(&rng, q, 2 * 256, 1.0);
        CHECK_EQ(tkv_attend(a, 0, 0, q, 1, x), TKV_OK);
        CHECK_EQ(tkv_attend(b, 0, 0, q, 1, y), TKV_OK);
        CHECK_MEM(x, y, 2u * (size_t)dims[i][1] * sizeof(float));
        tkv_destroy(a);
        tkv_destroy(b);
        test_store_end(&d);
    }
}

/* >>under a budget */
TEST(more_than_the_budget) {
    tkv_config cfg = small_config(), with;
    tkv_cache *a, *b;
    tkv_memory_info m;
    counting_allocator p;
    test_store d;
    int n, i, before;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    with = small_config();
    with.budget.pressure.max_level = TKV_OFF; /* never compressed: then exact blocks go, and the bits stay */
    with.budget.bytes = 210 * 1000;
    with.host.allocator = counting_allocator_of(&p);
    test_store_for(&d, &with);
    a = make(&cfg);
    b = make(&with);
    for (n = 0; n < 3900; n += i) {
        i = 1 + tkv_rng_below(&rng, n % 5 ? 3 : 20);
        if (n + i > LONGEST) break;
        CHECK_EQ(append_both(a, b, 0, i), TKV_OK);
        CHECK_LE(p.most, with.budget.bytes);
        sound(b);
    }
    same(a, b, 0, 4);
    CHECK_EQ(tkv_get_memory(b, &m), TKV_OK);
    printf("\n    %d tokens, %lu bytes as FP16 in %lu of %lu, %d keys outside", n,
           (unsigned long)m.fp16_bytes, (unsigned long)m.total, (unsigned long)with.budget.bytes,
           alive_in(&d));
    CHECK_LE(10.0 * 0.45, m.ratio);
    CHECK_EQ(m.offloaded.codes + m.offloaded.metadata, (size_t)alive_in(&d) * BLOCK * ROW * 2 * 2);
    CHECK_EQ(m.offloaded.tokens, (size_t)alive_in(&d) * BLOCK);
    CHECK_EQ(budget_of(b).offloaded, alive_in(&d));
    CHECK_EQ(budget_of(b).refused, 0);
    before = alive_in(&d);
    CHECK_EQ(tkv_seq_truncate(b, 0, 64), TKV_ERR_INEXACT); /* in what is outside */
    CHECK_EQ(alive_in(&d), before);
    n = tkv_get_length(b, 0, TKV_ALL_LAYERS) - 66;
    CHECK_EQ(tkv_seq_truncate(a, 0, n), TKV_OK);
    if (tkv_seq_truncate(b, 0, n) == TKV_OK) same(a, b, 0, 4);
    sound(b);
    tkv_destroy(a);
    tkv_destroy(b);
    CHECK_EQ(p.held, 0);
    test_store_end(&d);
}

TEST(compressed_then_outside) {
    tkv_config cfg = small_config();
    tkv_budget_info info;
    tkv_cache *kv;
    counting_allocator p;
    test_store d;
    int n, seq, l, i;
    cfg.budget.bytes = 330 * 1000;
    cfg.host.allocator = counting_allocator_of(&p);
    test_store_for(&d, &cfg);
    kv = make(&cfg);
    for (n = 0; n < 3900; n += 30)
        for (seq = 0; seq < SEQS; seq++) {
            CHECK_EQ(append_both(kv, NULL, seq, 30), TKV_OK);
            sound(kv);
            if (d.stores == 0) continue;
            info = budget_of(kv);
            CHECK_EQ(info.level, info.n_levels - 1); /* it is the last resort */
        }
    CHECK(alive_in(&d) > 20);
    CHECK_LE(p.most, cfg.budget.bytes);
    for (l = 0; l < LAYERS; l++) { /* the oldest, in both sequences alike */
        CHECK(spilled_in(kv, 0, l) > 5);
        CHECK_LE(spilled_in(kv, 0, l) - spilled_in(kv, 1, l), 2);
        CHECK_LE(spilled_in(kv, 1, l) - spilled_in(kv, 0, l), 2);
        for (i = 1; i <= spilled_in(kv, 0, l); i++) CHECK(key_of(kv, &d, l, i * BLOCK) < DEPOT_KEYS);
        tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
        CHECK_EQ(tkv_attend(kv, 0, l, q_in, 1, out_a), TKV_OK);
        {
            tkv_attend_params r;
            memset(&r, 0, sizeof r);
            r.layer = l;
            r.n = 1;
            r.q = q_in;
            r.out = out_b;
            CHECK_EQ(tkv_attend_reference(kv, &r), TKV_OK);
        }
        for (i = 0; i < HEADS * DIM; i++) CHECK_NEAR(out_a[i], out_b[i], 0.01);
    }
    CHECK_EQ(tkv_seq_reserve(kv, 0, 60), TKV_OK);
    sound(kv);
    CHECK_EQ(append_both(kv, NULL, 0, 60), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes * 9 / 10), TKV_OK);
    sound(kv);
    CHECK_LE(p.held, cfg.budget.bytes * 9 / 10);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    test_store_end(&d);
}

TEST(dropped_when_nothing_else_helps) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    test_store d;
    int n, gone, outside;
    cfg.budget.bytes = 420 * 1000;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    cfg.tiers.hot_tokens = 256;
    test_store_for(&d, &cfg);
    kv = make(&cfg);
    for (n = 0; n < 2000; n += 20) {
        CHECK_EQ(append_both(kv, NULL, 0, 20), TKV_OK);
        sound(kv);
    }
    outside = alive_in(&d);
    CHECK(outside > 20);
    CHECK_EQ(budget_of(kv).evicted, 0);
    d.full = 1; /* the disk is: now tokens go, but none of those outside, which take no bytes */
    for (n = 0; n < 600; n += 20) {
        CHECK_EQ(append_both(kv, NULL, 0, 20), TKV_OK);
        sound(kv);
    }
    gone = (int)budget_of(kv).evicted;
    CHECK(gone > 300);
    CHECK_EQ(alive_in(&d), outside);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 4 + BLOCK * spilled_in(kv, 0, 0), k_a, v_a), TKV_OK);
    d.full = 0;
    for (n = 0; n < 600; n += 20) {
        CHECK_EQ(append_both(kv, NULL, 0, 20), TKV_OK);
        sound(kv);
    }
    CHECK(alive_in(&d) > outside);
    CHECK_EQ(budget_of(kv).evicted, gone);
    tkv_destroy(kv);
    test_store_end(&d);
}

TEST(steps) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    test_store d;
    int n, len;
    cfg.budget.bytes = 300 * 1000;
    test_store_for(&d, &cfg);
    kv = make(&cfg);
    for (n = 0; n < 60; n++) {
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        len = tkv_get_length(kv, 0, TKV_ALL_LAYERS);
        CHECK_EQ(append_both(kv, NULL, 0, 40), TKV_OK);
        CHECK_EQ(append_both(kv, NULL, 0, 40), TKV_OK);
        sound(kv);
        if (n % 3) CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
        else CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), n % 3 ? len + 80 : len);
        sound(kv);
        tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, tkv_get_length(kv, 0, TKV_ALL_LAYERS) > 0, out_a), TKV_OK);
    }
    CHECK(alive_in(&d) > 0);
    tkv_destroy(kv);
    test_store_end(&d);
}

typedef struct logbook {
    int spills, wrong, next[LAYERS];
    size_t bytes;
} logbook;

static void sampled_lanes(void *user, const tkv_event *e) {
    logbook *b = (logbook *)user;
    if (e->kind != TKV_EVENT_OFFLOAD) return;
    b->spills++;
    b->bytes += e->bytes;
    if (e->seq != 1 || e->from != b->next[e->layer] || e->to != e->from + BLOCK || !e->text) b->wrong++;
    b->next[e->layer] = e->to;
}

static int says(const tkv_cache *kv, const char *name, int n) { /* Prometheus' text has this line */
    static char text[16384];
    char line[100];
    CHECK_EQ(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, NULL, text, sizeof text, NULL), TKV_OK);
    snprintf(line, sizeof line, "\n%s %d\n", name, n);
    return strstr(text, line) != NULL;
}

TEST(it_is_told) { /* an event for each block, and figures */
    tkv_config cfg = small_config();
    tkv_cache *kv;
    logbook b;
    tkv_memory_info m;
    test_store d;
    int n, all;
    memset(&b, 0, sizeof b);
    for (n = 0; n < LAYERS; n++) b.next[n] = 4; /* behind the sinks */
    cfg.host.on_event = sampled_lanes;
    cfg.host.event_user = &b;
    test_store_for(&d, &cfg);
    kv = make(&cfg);
    for (n = 0; n < 9; n++) CHECK_EQ(append_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK(says(kv, "tkv_blocks_offloaded_total", 0));
    all = spill_all(kv, 1);
    CHECK(all > 10);
    CHECK_EQ(b.spills, all);
    CHECK_EQ(b.wrong, 0);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    CHECK_LE(m.offloaded.codes + m.offloaded.metadata, b.bytes);
    CHECK(says(kv, "tkv_blocks_offloaded_total", all));
    CHECK(says(kv, "tkv_tokens_offloaded", all * BLOCK));
    CHECK(says(kv, "tkv_tokens_discarded", 0));
    CHECK_EQ(append_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK_EQ(append_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK_EQ(tkv_seq_discard(kv, 1, LONGEST, &n), TKV_OK);
    CHECK(n > 0);
    CHECK(says(kv, "tkv_tokens_discarded", n * LAYERS));
    CHECK(says(kv, "tkv_blocks_discarded_total", n * LAYERS / BLOCK));
    tkv_destroy(kv);
    test_store_end(&d);
}

/* >>a store that fails */
TEST(store_fails) {
    int at, refused = 0;
    for (at = 1; at < 12; at++) {
        tkv_config cfg = small_config();
        tkv_cache *kv;
        test_store d;
        int n, len = 0;
        cfg.budget.bytes = 230 * 1000;
        cfg.budget.pressure.max_level = TKV_OFF;
        test_store_for(&d, &cfg);
        kv = make(&cfg);
        d.store_fails = at;
        while (len < 1200) {
            for (n = 0; n < LAYERS;
                 n++) { /* whatever comes: what was refused is not there, what was taken is */
                tkv_status st;
                int had = tkv_get_length(kv, 0, n);
                fresh(20);
                st = tkv_append(kv, 0, n, k_in, v_in, 20);
                CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
                CHECK_EQ(tkv_get_length(kv, 0, n), st ? had : had + 20);
                sound(kv);
                if (!st) continue;
                refused++;
                CHECK_MSG(strstr(tkv_get_last_error(kv), "cfg.offload.write") != NULL, "%s",
                          tkv_get_last_error(kv));
                CHECK_EQ(budget_of(kv).unwritten, 1);
                CHECK_EQ(d.stores, at);
                CHECK_EQ(tkv_append(kv, 0, n, k_in, v_in, 20), TKV_OK);
            }
            len += 20;
        }
        CHECK(d.stores > 0);
        sound(kv);
        CHECK_EQ(tkv_set_budget(kv, 900 * 1000), TKV_OK);
        for (n = 0; n < 4; n++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
        d.store_fails = 1;
        CHECK_EQ(tkv_offload(kv, 0, TKV_ALL_LAYERS, 3, &n), TKV_ERR_IO);
        CHECK_EQ(n, 0);
        sound(kv);
        d.store_fails = KV_HEADS + 1;
        CHECK_EQ(tkv_offload(kv, 0, 0, 3, &n), TKV_ERR_IO);
        CHECK_EQ(n, 1);
        sound(kv);
        d.store_fails = 0;
        tkv_destroy(kv);
        test_store_end(&d);
    }
    CHECK(refused > 3);
}

/* >>a store that loses, mixes up, damages */
static tkv_cache *with_spilled(tkv_config *cfg, test_store *d) {
    tkv_cache *kv;
    int n;
    test_store_for(d, cfg);
    kv = make(cfg);
    for (n = 0; n < 7; n++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK(spill_all(kv, 0) > 0);
    tkv_rng_fill(&rng, q_in, (size_t)(CHUNK * HEADS * DIM), 1.0);
    return kv;
}

/* Every reader says so, nothing has changed, and it works when the store does. */
static void all_say(tkv_cache *kv, tkv_status expected) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = q_in;
    p.out = out_b;
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_b), expected);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, CHUNK, out_b), expected);
    CHECK_EQ(tkv_attend_reference(kv, &p), expected);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, tkv_get_length(kv, 0, TKV_ALL_LAYERS), k_b, v_b), expected);
    sound(kv);
}

TEST(fetch_fails) {
    tkv_config cfg = small_config();
    test_store d;
    tkv_cache *kv = with_spilled(&cfg, &d);
    int at, all;
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 70, out_a), TKV_OK);
    d.fetches = 0;
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 70, out_b), TKV_OK);
    all = d.fetches;
    CHECK(all > 20);
    for (at = 1; at <= all; at += 1 + at / 8) {
        d.fetch_fails = at;
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 70, out_b), TKV_ERR_IO);
        CHECK_EQ(d.fetch_fails, 0);
        sound(kv);
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 70, out_b), TKV_OK);
        CHECK_MEM(out_a, out_b, 70 * HEADS * DIM * sizeof(float));
    }
    d.fetch_fails = 3;
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 400, k_b, v_b), TKV_ERR_IO);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 400, k_b, v_b), TKV_OK);
    tkv_destroy(kv);
    test_store_end(&d);
}

TEST(bytes_are_checked) {
    tkv_config cfg = small_config();
    test_store d;
    tkv_cache *kv = with_spilled(&cfg, &d);
    stored_key *s = &d.key[key_of(kv, &d, 0, 2 * BLOCK)], *t = &d.key[key_of(kv, &d, 0, 3 * BLOCK)];
    uint8_t *was = (uint8_t *)malloc(d.room);
    int i, k;
    if (!was) exit(2);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK);
    CHECK_EQ(s->parts, KV_HEADS);
    memcpy(was, s->bytes, d.room);
    for (i = 0; i < KV_HEADS; i++)
        for (k = 0; k < 20; k++) { /* a bit anywhere, its hash included */
            size_t at = s->at[i] + (k == 19 ? s->size[i] - 1 : (size_t)tkv_rng_below(&rng, (int)s->size[i]));
            s->bytes[at] = (uint8_t)(s->bytes[at] ^ 1 << k % 8);
            all_say(kv, TKV_ERR_DATA);
            memcpy(s->bytes, was, d.room);
        }
    /* Three bits that cancel in a hash of lanes without rotations: 63 of a word, 63 and 31 of the word 32 bytes
     * on. */
    for (i = 0; i < KV_HEADS; i++)
        for (k = 0; k + 40 <= (int)s->size[i] - 8; k += 8) {
            uint8_t *word = s->bytes + s->at[i] + k;
            word[7] ^= 0x80;
            word[39] ^= 0x80;
            word[35] ^= 0x80;
            CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_b), TKV_ERR_DATA);
            memcpy(s->bytes, was, d.room);
        }
    CHECK_EQ(s->size[0], s->size[1]); /* heads swapped */
    memcpy(s->bytes + s->at[0], was + s->at[1], s->size[0]);
    memcpy(s->bytes + s->at[1], was + s->at[0], s->size[0]);
    all_say(kv, TKV_ERR_DATA);
    memcpy(s->bytes, t->bytes, d.room); /* another block's */
    all_say(kv, TKV_ERR_DATA);
    memset(s->bytes, 0, d.room); /* a hole in a file */
    all_say(kv, TKV_ERR_DATA);
    memcpy(s->bytes, was, d.room);
    all_say(kv, TKV_OK);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_b), TKV_OK);
    CHECK_MEM(out_a, out_b, HEADS * DIM * sizeof(float));
    free(was);
    tkv_destroy(kv);
    test_store_end(&d);
}

TEST(stale_records) {
    tkv_config cfg = small_config();
    test_store d;
    tkv_cache *kv = with_spilled(&cfg, &d);
    int n;
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK); /* the same block numbers come again, for the same places */
    CHECK_EQ(alive_in(&d), 0);
    d.lazy = 1; /* but what is on the shelves is from before */
    for (n = 0; n < 7; n++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK(spill_all(kv, 0) > 0);
    all_say(kv, TKV_ERR_DATA);
    tkv_destroy(kv);
    test_store_end(&d);
}

/* >>keys die once */
TEST(keys_are_dropped) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    test_store d;
    int n, most = 0;
    cfg.model.window = 300;
    cfg.offload.keep_exact = 1;
    test_store_for(&d, &cfg);
    kv = make(&cfg);
    for (n = 0; n < 40; n++) {
        CHECK_EQ(append_both(kv, NULL, n % 2, CHUNK), TKV_OK);
        (void)spill_all(kv, n % 2);
        if (alive_in(&d) > most) most = alive_in(&d);
        CHECK_EQ(tkv_attend(kv, n % 2, 0, q_in, 1, out_a), TKV_OK);
    }
    CHECK(d.drops > most); /* windows closed over them */
    CHECK_LE(most, 2 * SEQS * LAYERS * (300 / BLOCK + 4));
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    sound(kv);
    CHECK(alive_in(&d) > 0);
    tkv_destroy(kv);
    test_store_end(&d);
    /* exact blocks that are cut away */
    cfg = small_config();
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    test_store_for(&d, &cfg);
    kv = make(&cfg);
    for (n = 0; n < 6; n++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK(spill_all(kv, 0) > 0);
    n = alive_in(&d);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 4), TKV_ERR_INEXACT);
    CHECK_EQ(alive_in(&d), n);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 4 + BLOCK * spilled_in(kv, 0, 0)), TKV_OK);
    CHECK_EQ(alive_in(&d), n);
    sound(kv);
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK); /* the last block is outside now */
    CHECK_EQ(append_both(kv, NULL, 0, 10), TKV_OK);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 10, out_a), TKV_OK);
    sound(kv);
    tkv_destroy(kv);
    test_store_end(&d);
}

/* >>and back */
TEST(promotion_restores) {
    tkv_config exact = small_config(), cfg = small_config();
    tkv_cache *a, *b;
    tkv_tier tier = TKV_TIER_HOT;
    test_store d;
    int n, l, at, len;
    exact.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.offload.keep_exact = 1;
    test_store_for(&d, &cfg);
    a = make(&exact);
    b = make(&cfg);
    for (n = 0; n < 8; n++) CHECK_EQ(append_both(a, b, 0, CHUNK), TKV_OK);
    len = tkv_get_length(b, 0, TKV_ALL_LAYERS);
    CHECK_EQ(tkv_offload(b, 0, TKV_ALL_LAYERS, 3, NULL), TKV_OK); /* some are outside as well */
    sound(b);
    CHECK(alive_in(&d) > LAYERS * (8 + 3));
    CHECK_EQ(tkv_promote(b, 0, 0, len - 1), TKV_ERR_NO_SOURCE); /* it is exact */
    CHECK_EQ(tkv_promote(b, 0, 0, 0), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_promote(b, 0, 0, len), TKV_ERR_RANGE);
    CHECK_EQ(tkv_promote(b, 0, LAYERS, 0), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote(b, SEQS, 0, 0), TKV_ERR_ARG);
    d.fetch_fails = 2;
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_ERR_IO);
    sound(b);
    for (l = 0; l < LAYERS; l++)
        for (at = 4; at < len; at += BLOCK) {
            tkv_status st = tkv_promote(b, 0, l, at + at % BLOCK);
            CHECK_EQ(tier_of(b, 0, l, at, &tier), TKV_OK);
            CHECK_EQ(st, tier == TKV_TIER_HOT ? TKV_ERR_NO_SOURCE : TKV_OK);
            CHECK_EQ(tkv_promote(b, 0, l, at), TKV_ERR_NO_SOURCE);
            sound(b);
        }
    CHECK_EQ(spilled_in(b, 0, 0), 0);
    same(a, b, 0, 7); /* all of it is exact again */
    CHECK_EQ(budget_of(b).promoted > 8 * LAYERS, 1);
    CHECK(spill_all(b, 0) > 0); /* and can go again */
    same(a, b, 0, 7);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_OK);
    same(a, b, 0, 7);
    tkv_destroy(b);
    test_store_end(&d);
    /* without a copy it comes back as it went, and no further */
    cfg = small_config();
    test_store_for(&d, &cfg);
    b = make(&cfg);
    for (n = 0; n < 8; n++) CHECK_EQ(append_both(b, NULL, 0, CHUNK), TKV_OK);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_ERR_NO_SOURCE);
    CHECK_MSG(strstr(tkv_get_last_error(b), "keep_exact") != NULL, "%s", tkv_get_last_error(b));
    CHECK_EQ(tkv_read(b, 0, 0, 0, len, k_a, v_a), TKV_OK);
    CHECK(spill_all(b, 0) > 0);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_OK);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_read(b, 0, 0, 0, len, k_b, v_b), TKV_OK);
    CHECK_MEM(k_a, k_b, (size_t)len * ROW * sizeof(float));
    CHECK_MEM(v_a, v_b, (size_t)len * ROW * sizeof(float));
    sound(b);
    n = spilled_in(b, 0, 0);
    CHECK_EQ(tkv_offload(b, 0, 0, 1, NULL), TKV_OK);
    CHECK_EQ(spilled_in(b, 0, 0), n + 1);
    tkv_destroy(a);
    tkv_destroy(b);
    test_store_end(&d);
}

TEST(promotion_under_a_budget) {
    tkv_config cfg = small_config();
    tkv_cache *kv;
    counting_allocator p;
    test_store d;
    int n, at, better = 0, full = 0;
    cfg.budget.bytes = 330 * 1000;
    cfg.host.allocator = counting_allocator_of(&p);
    cfg.offload.keep_exact = 1;
    test_store_for(&d, &cfg);
    kv = make(&cfg);
    for (n = 0; n < 3900; n += 50) CHECK_EQ(append_both(kv, NULL, 0, 50), TKV_OK);
    for (at = 4; at < 1000; at += BLOCK) {
        tkv_status st = tkv_promote(kv, 0, 0, at);
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
        better += st == TKV_OK;
        full += st == TKV_ERR_BUDGET;
        sound(kv);
        CHECK_LE(p.most, cfg.budget.bytes);
    }
    CHECK(full > 0);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, 2 * cfg.budget.bytes), TKV_OK);
    for (at = 4; at < 1000; at += BLOCK) better += tkv_promote(kv, 0, 1, at) == TKV_OK;
    CHECK(better > 10);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget.bytes), TKV_OK); /* they go again */
    sound(kv);
    CHECK_LE(p.held, cfg.budget.bytes);
    for (n = 0; n < 40; n++) CHECK_EQ(append_both(kv, NULL, 1, 5), TKV_OK);
    sound(kv);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    test_store_end(&d);
}

/* >>memory that is not there */
TEST(every_allocation_fails_once) {
    int nth, failed = 0;
    for (nth = 1; nth < 60; nth++) {
        tkv_config cfg = small_config();
        tkv_cache *kv = NULL;
        tkv_status st;
        counting_allocator p;
        test_store d;
        int n, l, done = 0;
        cfg.budget.bytes = nth % 2 ? 300 * 1000 : 0;
        cfg.host.allocator = counting_allocator_of(&p);
        cfg.offload.keep_exact = nth % 3 == 0;
        test_store_for(&d, &cfg);
        p.closed = nth;
        st = tkv_create(&cfg, &kv);
        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM);
        for (n = 0; n < 50 && kv; n++) {
            for (l = 0; l < LAYERS; l++) {
                int had = tkv_get_length(kv, 0, l);
                fresh(20);
                st = tkv_append(kv, 0, l, k_in, v_in, 20);
                CHECK(st == TKV_OK || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET);
                CHECK_EQ(tkv_get_length(kv, 0, l), st ? had : had + 20);
                if (p.closed == 1) done = 1, p.closed = 0;
                if (st) CHECK_EQ(tkv_append(kv, 0, l, k_in, v_in, 20), TKV_OK);
            }
            if (n % 4 == 0) CHECK_EQ(tkv_offload(kv, 0, TKV_ALL_LAYERS, 1, NULL), TKV_OK);
            if (n % 7 == 6) {
                st = tkv_promote(kv, 0, 0, 4);
                CHECK(st == TKV_OK || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET || st == TKV_ERR_NO_SOURCE);
                if (p.closed == 1) done = 1, p.closed = 0;
            }
            sound(kv);
            CHECK(cfg.budget.bytes == 0 || p.most <= cfg.budget.bytes);
        }
        failed += done || !kv;
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
        test_store_end(&d);
    }
    CHECK(failed > 10);
}

TEST(in_place) {
    tkv_config cfg = small_config();
    tkv_cache *kv = NULL, *a;
    size_t bytes = 0;
    uint8_t *raw;
    test_store d;
    int n, i;
    cfg.budget.pressure.max_level = TKV_OFF;
    cfg.limits.max_seqs = 1;
    cfg.limits.max_tokens = LONGEST;
    cfg.budget.bytes = 240 * 1000;
    test_store_for(&d, &cfg);
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    raw = (uint8_t *)malloc(bytes + 128);
    if (!raw) exit(2);
    memset(raw, 0xa5, bytes + 128);
    CHECK_EQ(tkv_create_in_place(&cfg, raw + 64, bytes, &kv), TKV_OK);
    if (!kv) return;
    cfg = small_config();
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    a = make(&cfg);
    for (n = 0; n + 25 <= LONGEST; n += 25) {
        CHECK_EQ(append_both(a, kv, 0, 25), TKV_OK);
        if (n % 200 == 0) sound(kv);
    }
    same(a, kv, 0, 3);
    CHECK(alive_in(&d) > 50);
    for (i = 0; i < 64; i++) CHECK(raw[i] == 0xa5 && raw[bytes + 64 + (size_t)i] == 0xa5);
    CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 25), TKV_ERR_CAPACITY); /* max_tokens */
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(alive_in(&d), 0);
    tkv_destroy(kv);
    tkv_destroy(a);
    free(raw);
    test_store_end(&d);
}

/* >>the file of examples/ */
#if HAVE_FILES
static void limit_files(rlim_t bytes) { /* as a full disk: what is beyond is cut off, then refused */
    struct rlimit r;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &r), 0);
    r.rlim_cur = bytes ? bytes : r.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &r), 0);
}

static uint32_t last_read; /* key of the last read */
static int read_and_note(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    last_read = key;
    return spill_file_fetch(user, key, offset, bytes, size);
}

TEST(a_file) {
    tkv_config cfg = small_config(), with;
    spill_file file;
    tkv_cache *a, *b;
    size_t bytes;
    char bad = 0x77;
    int n, done = 0, before;
    with = cfg;
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, &bytes), TKV_OK);
    CHECK_EQ(spill_file_open(&file, "/nowhere/at/all", bytes), -1);
    REQUIRE(spill_file_open(&file, NULL, bytes) == 0);
    with.offload = spill_file_config(&file);
    with.offload.read = read_and_note;
    a = make(&cfg);
    b = make(&with);
    for (n = 0; n < 8; n++) CHECK_EQ(append_both(a, b, 0, CHUNK), TKV_OK);
    (void)signal(SIGXFSZ, SIG_IGN);
    limit_files(5 * file.bytes + 1000); /* in the middle of a block */
    CHECK_EQ(tkv_offload(b, 0, 0, 100, &done), TKV_ERR_IO);
    CHECK(done > 0 && done < 8);
    limit_files(0);
    sound(b);
    same(a, b, 0, 3); /* nothing is lost */
    before = done;
    CHECK_EQ(tkv_offload(b, 0, TKV_ALL_LAYERS, 100, &done), TKV_OK);
    CHECK(done + before > 14);
    same(a, b, 0, 3);
    CHECK(spill_file_size(&file) > 0);
    CHECK_EQ(tkv_read(b, 0, 0, 3 * BLOCK, 1, k_b, v_b), TKV_OK);
    n = (int)last_read;
    CHECK_EQ(pwrite(file.fd, &bad, 1, (off_t)n * (off_t)file.bytes + 77), 1);
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_DATA);
    CHECK_EQ(ftruncate(file.fd, (off_t)n * (off_t)file.bytes + 300), 0); /* reads come out short */
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_IO);
    CHECK_EQ(tkv_read(b, 0, 0, 0, tkv_get_length(b, 0, TKV_ALL_LAYERS), k_b, v_b), TKV_ERR_IO);
    sound(b);
    CHECK_EQ(tkv_seq_reset(b, 0), TKV_OK); /* and it goes on */
    CHECK_EQ(tkv_seq_reset(a, 0), TKV_OK);
    for (n = 0; n < 8; n++) CHECK_EQ(append_both(a, b, 0, CHUNK), TKV_OK);
    CHECK(spill_all(b, 0) > 14);
    same(a, b, 0, 3);
    tkv_destroy(a);
    tkv_destroy(b);
    spill_file_close(&file);
}
#else
TEST(a_file) { SKIP("no POSIX files"); }
#endif

/* >>what cannot be */
TEST(config_says_what_is_wrong) {
    tkv_config cfg = small_config();
    char reason[200];
    size_t bytes = 0;
    test_store d;
    tkv_cache *kv;
    int i;
    test_store_for(&d, &cfg);
    cfg.offload.read = NULL;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "offload.") == reason, "%s", reason);
    cfg.offload.read = test_store_fetch;
    cfg.offload.keep_exact = 2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    cfg.offload.keep_exact = 0;
    cfg.model.head_dim = 160;
    cfg.tiers.hot.k = TKV_F32;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "F16") != NULL, "%s", reason);
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, &bytes), TKV_ERR_CONFIG);
    cfg.model.head_dim = 128;
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, &bytes), TKV_OK);
    CHECK_EQ(bytes, (size_t)KV_HEADS * (BLOCK * 128 * (4 + 2) + 16));
    CHECK_EQ(tkv_get_required_bytes(&cfg, NULL, NULL), TKV_ERR_ARG);
    cfg = small_config();
    cfg.offload.keep_exact = 1; /* a text can say so; without a store nothing is kept */
    kv = make(&cfg);
    for (i = 0; i < 4; i++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK_EQ(tkv_promote(kv, 0, 0, 10), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_promote(kv, 0, 0, LONGEST), TKV_ERR_RANGE);
    CHECK_EQ(tkv_offload(kv, 0, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_offload(kv, 5, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_offload(NULL, 0, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote(NULL, 0, 0, 0), TKV_ERR_ARG);
    tkv_destroy(kv);
    test_store_end(&d);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(17);
    RUN(attention_is_the_same);
    RUN(all_that_attention_can_be_asked);
    RUN(wide_heads);
    RUN(more_than_the_budget);
    RUN(compressed_then_outside);
    RUN(dropped_when_nothing_else_helps);
    RUN(steps);
    RUN(store_fails);
    RUN(fetch_fails);
    RUN(bytes_are_checked);
    RUN(stale_records);
    RUN(keys_are_dropped);
    RUN(promotion_restores);
    RUN(promotion_under_a_budget);
    RUN(every_allocation_fails_once);
    RUN(in_place);
    RUN(a_file);
    RUN(config_says_what_is_wrong);
    RUN(it_is_told);
    return tkv_test_end();
}
