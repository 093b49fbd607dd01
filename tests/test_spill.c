/*
 * test_spill.c - blocks outside RAM: attention with them is the same to the bit, a store that fails costs an error and
 * nothing else, what it damages is found out, and what comes back is what went.
 *
 *     TKV_RANDOM_OPS=20000 TKV_RANDOM_SEED=7 ./test_spill     calls per config of the random test, first seed
 */
#if defined(__unix__) || defined(__APPLE__)
#include "../examples/spill_file.h" /* before system headers */

#include <signal.h>
#include <sys/resource.h>
#define HAVE_FILES 1
#else
#define HAVE_FILES 0
#endif
#define TIEREDKV_IMPLEMENTATION
#define TKV_STATIC /* what is not used here is not compiled */
#include "../tieredkv.h"
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
    LONGEST = 4000,
    KEYS = 4096,
    PARTS = 2 * KV_HEADS /* of a block, at most; KV_HEADS where records are small */
};

/* >>a store in memory that keeps to what api.h says of it, and notices who does not */
typedef struct shelf {
    int alive, parts;
    size_t at[PARTS], size[PARTS];
    uint8_t *bytes;
} shelf;

typedef struct depot {
    shelf *key; /* [KEYS] */
    size_t room;
    int stores, fetches, drops, hints; /* calls */
    int store_fails, fetch_fails;      /* the n-th call from now on; 0: none */
    int lazy;                          /* stores say yes and do nothing */
    int full;                          /* all fail */
} depot;

static int depot_store(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    depot *d = (depot *)user;
    shelf *s = &d->key[key % KEYS];
    CHECK(key < KEYS);
    CHECK(offset + size <= d->room);
    d->stores++;
    if (offset == 0) {
        CHECK_MSG(!s->alive, "key %u was not dropped", (unsigned)key);
        s->alive = 1;
        s->parts = 0;
    }
    CHECK(s->alive);
    if (d->full || (d->store_fails && --d->store_fails == 0)) return 1;
    CHECK(s->parts < PARTS);
    CHECK(s->parts == 0 || offset >= s->at[s->parts - 1] + s->size[s->parts - 1]);
    s->at[s->parts] = offset;
    s->size[s->parts++] = size;
    if (!s->bytes) s->bytes = (uint8_t *)calloc(1, d->room);
    if (!s->bytes) exit(2);
    if (!d->lazy) memcpy(s->bytes + offset, bytes, size);
    return 0;
}

static int depot_fetch(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    depot *d = (depot *)user;
    const shelf *s = &d->key[key % KEYS];
    int i = 0;
    d->fetches++;
    CHECK(key < KEYS && s->alive);
    while (i < s->parts && (s->at[i] != offset || s->size[i] != size)) i++;
    CHECK(i < s->parts);
    if (d->fetch_fails && --d->fetch_fails == 0) {
        memset(bytes, 0x5a, size / 2); /* a short read, and it says so */
        return 1;
    }
    memcpy(bytes, s->bytes + offset, size);
    return 0;
}

static void depot_ahead(void *user, uint32_t key, size_t offset, size_t size) {
    depot *d = (depot *)user;
    d->hints++;
    CHECK(key < KEYS && d->key[key % KEYS].alive);
    CHECK(size > 0 && offset + size <= d->room);
}

static void depot_drop(void *user, uint32_t key) {
    depot *d = (depot *)user;
    CHECK_MSG(key < KEYS && d->key[key % KEYS].alive, "key %u was dropped twice", (unsigned)key);
    d->key[key % KEYS].alive = 0;
    d->drops++;
}

static int alive_in(const depot *d) {
    int i, n = 0;
    for (i = 0; i < KEYS; i++) n += d->key[i].alive;
    return n;
}

static depot depot_for(tkv_config *cfg) {
    depot d;
    memset(&d, 0, sizeof d);
    CHECK_EQ(tkv_spill_bytes(cfg, &d.room), TKV_OK);
    d.key = (shelf *)calloc(KEYS, sizeof *d.key);
    if (!d.key) exit(2);
    cfg->spill.store = depot_store;
    cfg->spill.fetch = depot_fetch;
    cfg->spill.ahead = depot_ahead;
    cfg->spill.drop = depot_drop;
    return d;
}

static void empty(depot *d) { /* after the cache */
    int i;
    CHECK_EQ(alive_in(d), 0);
    for (i = 0; i < KEYS; i++) free(d->key[i].bytes);
    free(d->key);
}

/* >>caches */
static tkv_rng rng;
static float k_in[SEQS * CHUNK * ROW], v_in[SEQS * CHUNK * ROW], q_in[CHUNK * HEADS * DIM];
static float out_a[CHUNK * HEADS * DIM], out_b[CHUNK * HEADS * DIM];
static float k_a[LONGEST * ROW], v_a[LONGEST * ROW], k_b[LONGEST * ROW], v_b[LONGEST * ROW];

static tkv_config small(void) {
    tkv_config cfg = tkv_config_default();
    cfg.n_layers = LAYERS;
    cfg.n_heads = HEADS;
    cfg.n_kv_heads = KV_HEADS;
    cfg.head_dim = DIM;
    cfg.max_seqs = SEQS;
    cfg.max_append = CHUNK;
    cfg.warm_tokens = 2 * BLOCK;
    cfg.isa = tkv_test_isa();
    return cfg;
}

static void sound(const tkv_cache *kv) {
    char reason[200];
    tkv_status st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s", reason);
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

static int spill_all(tkv_cache *kv, int seq) {
    int done = 0;
    CHECK_EQ(tkv_spill(kv, seq, TKV_ALL, LONGEST, &done), TKV_OK);
    sound(kv);
    return done;
}

static tkv_budget_info budget_of(const tkv_cache *kv) {
    tkv_budget_info b;
    memset(&b, 0, sizeof b);
    CHECK_EQ(tkv_budget(kv, &b), TKV_OK);
    return b;
}

static int spilled_in(const tkv_cache *kv, int seq, int layer) {
    tkv_tier_info t;
    memset(&t, 0, sizeof t);
    CHECK_EQ(tkv_tier_counts(kv, seq, layer, &t), TKV_OK);
    return t.spilled;
}

/* Attention and reading of two caches with the same tokens in the same formats. */
static void same(tkv_cache *a, tkv_cache *b, int seq, int n) {
    int l, len = tkv_seq_len(a, seq);
    CHECK_EQ(tkv_seq_len(b, seq), len);
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
static const tkv_pair pairs[] = {{TKV_F16, TKV_F16},
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
        tkv_config cfg = small(), with;
        tkv_cache *a, *b;
        depot d;
        if (i % 2 || i == 0) cfg.warm = pairs[i]; /* what is outside is recoded no more */
        cfg.archive = pairs[i];
        cfg.rope.dim = DIM;
        cfg.quality_heads = i % 3;
        cfg.quality_every = 1;
        with = cfg;
        d = depot_for(&with);
        with.spill.user = &d;
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
        CHECK_EQ(alive_in(&d), (int)b->pool.n_spilled);
        CHECK_EQ(tkv_reset(b, 1), TKV_OK);
        CHECK_EQ(alive_in(&d), 0);
        sound(b);
        tkv_destroy(a);
        tkv_destroy(b);
        empty(&d);
    }
}

TEST(all_that_attention_can_be_asked) {
    static float mask[CHUNK * LONGEST], lse_a[CHUNK * HEADS], lse_b[CHUNK * HEADS], mass_a[LONGEST],
        mass_b[LONGEST];
    tkv_config cfg = small(), with;
    tkv_attend_params p;
    float alibi[HEADS], sinks[HEADS];
    tkv_cache *a, *b;
    depot d;
    int n, kind;
    with = cfg;
    d = depot_for(&with);
    with.spill.user = &d;
    a = make(&cfg);
    b = make(&with);
    for (n = 0; n < 9; n++) CHECK_EQ(append_both(a, b, 0, CHUNK), TKV_OK);
    CHECK(spill_all(b, 0) > 0);
    tkv_rng_fill(&rng, mask, (size_t)(CHUNK * tkv_seq_len(a, 0)), 3.0);
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
        if (kind & 8) p.mass = mass_a;
        if (kind & 16) p.alibi = alibi, p.softcap = 20.0f;
        if (kind & 32) p.sinks = sinks, p.non_causal = 1;
        p.out = out_a;
        CHECK_EQ(tkv_attend_ex(a, &p), TKV_OK);
        p.out = out_b;
        p.lse = lse_b;
        if (p.mass) p.mass = mass_b;
        CHECK_EQ(tkv_attend_ex(b, &p), TKV_OK);
        CHECK_MEM(out_a, out_b, (size_t)p.n * HEADS * DIM * sizeof(float));
        CHECK_MEM(lse_a, lse_b, (size_t)p.n * HEADS * sizeof(float));
        if (p.mass) CHECK_MEM(mass_a, mass_b, (size_t)tkv_seq_len(a, 0) * sizeof(float));
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
    empty(&d);
}

TEST(wide_heads) {
    static const int dims[][2] = {{256, 256}, {80, 64}, {128, 192}};
    static float k[CHUNK * 256], v[CHUNK * 256], q[2 * 256], x[2 * 256], y[2 * 256];
    int i, n;
    for (i = 0; i < COUNT(dims); i++) {
        tkv_config cfg = tkv_config_default(), with;
        tkv_cache *a, *b;
        depot d;
        cfg.n_layers = 1;
        cfg.n_heads = 2;
        cfg.n_kv_heads = 1;
        cfg.head_dim = dims[i][0];
        cfg.v_head_dim = dims[i][1];
        cfg.hot_tokens = i == 0 ? TKV_ALL : 64; /* exact blocks go, the largest there are */
        with = cfg;
        d = depot_for(&with);
        with.spill.user = &d;
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
        empty(&d);
    }
}

/* >>under a budget */
TEST(more_than_the_budget) {
    tkv_config cfg = small(), with;
    tkv_cache *a, *b;
    tkv_memory_info m;
    purse p;
    depot d;
    int n, i, before;
    cfg.hot_tokens = TKV_ALL;
    with = small();
    with.policy.max_level = TKV_NONE; /* never compressed: then exact blocks go, and the bits stay */
    with.budget_bytes = 210 * 1000;
    with.allocator = purse_of(&p);
    d = depot_for(&with);
    with.spill.user = &d;
    a = make(&cfg);
    b = make(&with);
    for (n = 0; n < 3900; n += i) {
        i = 1 + tkv_rng_below(&rng, n % 5 ? 3 : 20);
        if (n + i > LONGEST) break;
        CHECK_EQ(append_both(a, b, 0, i), TKV_OK);
        CHECK_LE(p.most, with.budget_bytes);
        sound(b);
    }
    same(a, b, 0, 4);
    CHECK_EQ(tkv_memory(b, &m), TKV_OK);
    printf("\n    %d tokens, %lu bytes as FP16 in %lu of %lu, %d keys outside", n,
           (unsigned long)m.fp16_bytes, (unsigned long)m.total, (unsigned long)with.budget_bytes,
           alive_in(&d));
    CHECK_LE(10.0 * 0.45, m.ratio);
    CHECK_EQ(m.spilled.codes + m.spilled.metadata, (size_t)alive_in(&d) * BLOCK * ROW * 2 * 2);
    CHECK_EQ(m.spilled.tokens, (size_t)alive_in(&d) * BLOCK);
    CHECK_EQ(budget_of(b).spilled, alive_in(&d));
    CHECK_EQ(budget_of(b).refused, 0);
    before = alive_in(&d);
    CHECK_EQ(tkv_truncate(b, 0, 64), TKV_ERR_INEXACT); /* in what is outside */
    CHECK_EQ(alive_in(&d), before);
    n = tkv_seq_len(b, 0) - 66;
    CHECK_EQ(tkv_truncate(a, 0, n), TKV_OK);
    if (tkv_truncate(b, 0, n) == TKV_OK) same(a, b, 0, 4);
    sound(b);
    tkv_destroy(a);
    tkv_destroy(b);
    CHECK_EQ(p.held, 0);
    empty(&d);
}

TEST(compressed_then_outside) {
    tkv_config cfg = small();
    tkv_budget_info info;
    tkv_cache *kv;
    purse p;
    depot d;
    int n, seq, l, i;
    cfg.budget_bytes = 330 * 1000;
    cfg.allocator = purse_of(&p);
    d = depot_for(&cfg);
    cfg.spill.user = &d;
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
    CHECK_LE(p.most, cfg.budget_bytes);
    for (l = 0; l < LAYERS; l++) { /* the oldest, in both sequences alike */
        CHECK(spilled_in(kv, 0, l) > 5);
        CHECK_LE(spilled_in(kv, 0, l) - spilled_in(kv, 1, l), 2);
        CHECK_LE(spilled_in(kv, 1, l) - spilled_in(kv, 0, l), 2);
        for (i = 1; i <= spilled_in(kv, 0, l); i++)
            CHECK(tkvi_spilled(&kv->pool.block[tkvi_ids(kv, 0, l)[i]]));
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
    CHECK_EQ(tkv_reserve(kv, 0, 60), TKV_OK);
    sound(kv);
    CHECK_EQ(append_both(kv, NULL, 0, 60), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget_bytes * 9 / 10), TKV_OK);
    sound(kv);
    CHECK_LE(p.held, cfg.budget_bytes * 9 / 10);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    empty(&d);
}

TEST(dropped_when_nothing_else_helps) {
    tkv_config cfg = small();
    tkv_cache *kv;
    depot d;
    int n, gone, outside;
    cfg.budget_bytes = 420 * 1000;
    cfg.evict.kind = TKV_EVICT_SLIDING;
    cfg.hot_tokens = 256;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
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
    empty(&d);
}

TEST(steps) {
    tkv_config cfg = small();
    tkv_cache *kv;
    depot d;
    int n, len;
    cfg.budget_bytes = 300 * 1000;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    kv = make(&cfg);
    for (n = 0; n < 60; n++) {
        CHECK_EQ(tkv_begin(kv, 0), TKV_OK);
        len = tkv_seq_len(kv, 0);
        CHECK_EQ(append_both(kv, NULL, 0, 40), TKV_OK);
        CHECK_EQ(append_both(kv, NULL, 0, 40), TKV_OK);
        sound(kv);
        if (n % 3) CHECK_EQ(tkv_commit(kv, 0), TKV_OK);
        else CHECK_EQ(tkv_abort(kv, 0), TKV_OK);
        CHECK_EQ(tkv_seq_len(kv, 0), n % 3 ? len + 80 : len);
        sound(kv);
        tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, tkv_seq_len(kv, 0) > 0, out_a), TKV_OK);
    }
    CHECK(alive_in(&d) > 0);
    tkv_destroy(kv);
    empty(&d);
}

typedef struct logbook {
    int spills, wrong, next[LAYERS];
    size_t bytes;
} logbook;

static void hears(void *user, const tkv_event *e) {
    logbook *b = (logbook *)user;
    if (e->kind != TKV_EVENT_SPILL) return;
    b->spills++;
    b->bytes += e->bytes;
    if (e->seq != 1 || e->from != b->next[e->layer] || e->to != e->from + BLOCK || !e->text) b->wrong++;
    b->next[e->layer] = e->to;
}

static int says(const tkv_cache *kv, const char *name, int n) { /* Prometheus' text has this line */
    static char text[16384];
    char line[100];
    CHECK_EQ(tkv_format_prometheus(kv, NULL, text, sizeof text, NULL), TKV_OK);
    snprintf(line, sizeof line, "\n%s %d\n", name, n);
    return strstr(text, line) != NULL;
}

TEST(it_is_told) { /* an event for each block, and figures */
    tkv_config cfg = small();
    tkv_cache *kv;
    logbook b;
    tkv_memory_info m;
    depot d;
    int n, all;
    memset(&b, 0, sizeof b);
    for (n = 0; n < LAYERS; n++) b.next[n] = 4; /* behind the sinks */
    cfg.on_event = hears;
    cfg.event_user = &b;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    kv = make(&cfg);
    for (n = 0; n < 9; n++) CHECK_EQ(append_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK(says(kv, "tkv_blocks_spilled_total", 0));
    all = spill_all(kv, 1);
    CHECK(all > 10);
    CHECK_EQ(b.spills, all);
    CHECK_EQ(b.wrong, 0);
    CHECK_EQ(tkv_memory(kv, &m), TKV_OK);
    CHECK_LE(m.spilled.codes + m.spilled.metadata, b.bytes);
    CHECK(says(kv, "tkv_blocks_spilled_total", all));
    CHECK(says(kv, "tkv_tokens_spilled", all * BLOCK));
    CHECK(says(kv, "tkv_tokens_missing", 0));
    CHECK_EQ(append_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK_EQ(append_both(kv, NULL, 1, CHUNK), TKV_OK);
    CHECK_EQ(tkv_remat_drop(kv, 1, LONGEST, &n), TKV_OK);
    CHECK(n > 0);
    CHECK(says(kv, "tkv_tokens_missing", n * LAYERS));
    CHECK(says(kv, "tkv_blocks_dropped_total", n * LAYERS / BLOCK));
    tkv_destroy(kv);
    empty(&d);
}

/* >>a store that fails */
TEST(store_fails) {
    int at, refused = 0;
    for (at = 1; at < 12; at++) {
        tkv_config cfg = small();
        tkv_cache *kv;
        depot d;
        int n, len = 0;
        cfg.budget_bytes = 230 * 1000;
        cfg.policy.max_level = TKV_NONE;
        d = depot_for(&cfg);
        cfg.spill.user = &d;
        kv = make(&cfg);
        d.store_fails = at;
        while (len < 1200) {
            for (n = 0; n < LAYERS;
                 n++) { /* whatever comes: what was refused is not there, what was taken is */
                tkv_status st;
                int had = tkv_layer_len(kv, 0, n);
                fresh(20);
                st = tkv_append(kv, 0, n, k_in, v_in, 20);
                CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
                CHECK_EQ(tkv_layer_len(kv, 0, n), st ? had : had + 20);
                sound(kv);
                if (!st) continue;
                refused++;
                CHECK_MSG(strstr(tkv_last_error(kv), "store") != NULL, "%s", tkv_last_error(kv));
                CHECK_EQ(budget_of(kv).unstored, 1);
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
        CHECK_EQ(tkv_spill(kv, 0, TKV_ALL, 3, &n), TKV_ERR_IO);
        CHECK_EQ(n, 0);
        sound(kv);
        d.store_fails = KV_HEADS + 1;
        CHECK_EQ(tkv_spill(kv, 0, 0, 3, &n), TKV_ERR_IO);
        CHECK_EQ(n, 1);
        sound(kv);
        d.store_fails = 0;
        tkv_destroy(kv);
        empty(&d);
    }
    CHECK(refused > 3);
}

/* >>a store that loses, mixes up, damages */
static tkv_cache *with_spilled(tkv_config *cfg, depot *d) {
    tkv_cache *kv;
    int n;
    *d = depot_for(cfg);
    cfg->spill.user = d;
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
    CHECK_EQ(tkv_read(kv, 0, 0, 0, tkv_seq_len(kv, 0), k_b, v_b), expected);
    sound(kv);
}

TEST(fetch_fails) {
    tkv_config cfg = small();
    depot d;
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
    empty(&d);
}

TEST(bytes_are_checked) {
    tkv_config cfg = small();
    depot d;
    tkv_cache *kv = with_spilled(&cfg, &d);
    const uint32_t id = tkvi_ids(kv, 0, 0)[2], other = tkvi_ids(kv, 0, 0)[3];
    shelf *s = &d.key[2 * id], *t = &d.key[2 * other];
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
    empty(&d);
}

TEST(stale_records) {
    tkv_config cfg = small();
    depot d;
    tkv_cache *kv = with_spilled(&cfg, &d);
    int n;
    CHECK_EQ(tkv_reset(kv, 0), TKV_OK); /* the same block numbers come again, for the same places */
    CHECK_EQ(alive_in(&d), 0);
    d.lazy = 1; /* but what is on the shelves is from before */
    for (n = 0; n < 7; n++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK(spill_all(kv, 0) > 0);
    all_say(kv, TKV_ERR_DATA);
    tkv_destroy(kv);
    empty(&d);
}

static void fill_layer(tkv_cache *kv, depot *d, int lazy) {
    int n;
    d->lazy = lazy;
    for (n = 0; n < 7; n++) {
        fresh(CHUNK);
        CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, CHUNK), TKV_OK);
    }
}

TEST(stale_records_of_long_ago) { /* 65,536 blocks have been stored since, and the store has lost them all */
    tkv_config cfg = small();
    depot d = depot_for(&cfg);
    tkv_cache *kv;
    int n;
    cfg.spill.user = &d;
    cfg.spill.keep_exact = 1;
    kv = make(&cfg);
    fill_layer(kv, &d, 0);
    CHECK_EQ(tkv_spill(kv, 0, 0, LONGEST, &n), TKV_OK);
    CHECK(n > 3);
    CHECK_EQ(tkv_reset(kv, 0), TKV_OK); /* the same numbers come again */
    kv->pool.marks = 1 << 16;
    fill_layer(kv, &d, 1);
    CHECK_EQ(tkv_promote(kv, 0, 0, 70), TKV_ERR_DATA); /* a copy */
    CHECK_EQ(tkv_spill(kv, 0, 0, LONGEST, &n), TKV_OK);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_b), TKV_ERR_DATA);
    tkv_destroy(kv);
    empty(&d);
}

/* >>keys die once */
TEST(keys_are_dropped) {
    tkv_config cfg = small();
    tkv_cache *kv;
    depot d;
    int n, most = 0;
    cfg.window = 300;
    cfg.spill.keep_exact = 1;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    kv = make(&cfg);
    for (n = 0; n < 40; n++) {
        CHECK_EQ(append_both(kv, NULL, n % 2, CHUNK), TKV_OK);
        (void)spill_all(kv, n % 2);
        if (alive_in(&d) > most) most = alive_in(&d);
        CHECK_EQ(tkv_attend(kv, n % 2, 0, q_in, 1, out_a), TKV_OK);
    }
    CHECK(d.drops > most); /* windows closed over them */
    CHECK_LE(most, 2 * SEQS * LAYERS * (300 / BLOCK + 4));
    CHECK_EQ(tkv_reset(kv, 0), TKV_OK);
    sound(kv);
    CHECK(alive_in(&d) > 0);
    tkv_destroy(kv);
    empty(&d);
    /* exact blocks that are cut away */
    cfg = small();
    cfg.hot_tokens = TKV_ALL;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    kv = make(&cfg);
    for (n = 0; n < 6; n++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK(spill_all(kv, 0) > 0);
    n = alive_in(&d);
    CHECK_EQ(tkv_truncate(kv, 0, 4), TKV_ERR_INEXACT);
    CHECK_EQ(alive_in(&d), n);
    CHECK_EQ(tkv_truncate(kv, 0, 4 + BLOCK * spilled_in(kv, 0, 0)), TKV_OK);
    CHECK_EQ(alive_in(&d), n);
    sound(kv);
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK); /* the last block is outside now */
    CHECK_EQ(append_both(kv, NULL, 0, 10), TKV_OK);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 10, out_a), TKV_OK);
    sound(kv);
    tkv_destroy(kv);
    empty(&d);
}

/* >>and back */
TEST(promotion_restores) {
    tkv_config exact = small(), cfg = small();
    tkv_cache *a, *b;
    tkv_tier tier;
    depot d;
    int n, l, at, len;
    exact.hot_tokens = TKV_ALL;
    cfg.spill.keep_exact = 1;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    a = make(&exact);
    b = make(&cfg);
    for (n = 0; n < 8; n++) CHECK_EQ(append_both(a, b, 0, CHUNK), TKV_OK);
    len = tkv_seq_len(b, 0);
    CHECK_EQ(tkv_spill(b, 0, TKV_ALL, 3, NULL), TKV_OK); /* some are outside as well */
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
            CHECK_EQ(tkv_tier_of(b, 0, l, at, &tier), TKV_OK);
            CHECK_EQ(st, tier == TKV_HOT ? TKV_ERR_NO_SOURCE : TKV_OK);
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
    empty(&d);
    /* without a copy it comes back as it went, and no further */
    cfg = small();
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    b = make(&cfg);
    for (n = 0; n < 8; n++) CHECK_EQ(append_both(b, NULL, 0, CHUNK), TKV_OK);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_ERR_NO_SOURCE);
    CHECK_MSG(strstr(tkv_last_error(b), "keep_exact") != NULL, "%s", tkv_last_error(b));
    CHECK_EQ(tkv_read(b, 0, 0, 0, len, k_a, v_a), TKV_OK);
    CHECK(spill_all(b, 0) > 0);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_OK);
    CHECK_EQ(tkv_promote(b, 0, 0, 100), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_read(b, 0, 0, 0, len, k_b, v_b), TKV_OK);
    CHECK_MEM(k_a, k_b, (size_t)len * ROW * sizeof(float));
    CHECK_MEM(v_a, v_b, (size_t)len * ROW * sizeof(float));
    sound(b);
    n = spilled_in(b, 0, 0);
    CHECK_EQ(tkv_spill(b, 0, 0, 1, NULL), TKV_OK);
    CHECK_EQ(spilled_in(b, 0, 0), n + 1);
    tkv_destroy(a);
    tkv_destroy(b);
    empty(&d);
}

TEST(promotion_under_a_budget) {
    tkv_config cfg = small();
    tkv_cache *kv;
    purse p;
    depot d;
    int n, at, better = 0, full = 0;
    cfg.budget_bytes = 330 * 1000;
    cfg.allocator = purse_of(&p);
    cfg.spill.keep_exact = 1;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    kv = make(&cfg);
    for (n = 0; n < 3900; n += 50) CHECK_EQ(append_both(kv, NULL, 0, 50), TKV_OK);
    for (at = 4; at < 1000; at += BLOCK) {
        tkv_status st = tkv_promote(kv, 0, 0, at);
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
        better += st == TKV_OK;
        full += st == TKV_ERR_BUDGET;
        sound(kv);
        CHECK_LE(p.most, cfg.budget_bytes);
    }
    CHECK(full > 0);
    CHECK_EQ(tkv_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_set_budget(kv, 2 * cfg.budget_bytes), TKV_OK);
    for (at = 4; at < 1000; at += BLOCK) better += tkv_promote(kv, 0, 1, at) == TKV_OK;
    CHECK(better > 10);
    CHECK_EQ(tkv_set_budget(kv, cfg.budget_bytes), TKV_OK); /* they go again */
    sound(kv);
    CHECK_LE(p.held, cfg.budget_bytes);
    for (n = 0; n < 40; n++) CHECK_EQ(append_both(kv, NULL, 1, 5), TKV_OK);
    sound(kv);
    tkv_destroy(kv);
    CHECK_EQ(p.held, 0);
    empty(&d);
}

TEST(importance_says_what_to_promote) { /* the example of api.h */
    tkv_config cfg = small();
    tkv_importance_promotion p;
    tkv_tier tier;
    float score[64];
    uint64_t source[1] = {0};
    int moved[64], out[TKV_IMPORTANCE_PER_STEP], start_of[64], n, n_blocks = 0, at, count = 0, step, all = 0;
    tkv_cache *kv;
    depot d;
    cfg.spill.keep_exact = 1;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    kv = make(&cfg);
    for (n = 0; n < 12; n++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
    for (at = 4; at < tkv_seq_len(kv, 0); at += BLOCK, n_blocks++) {
        start_of[n_blocks] = at;
        moved[n_blocks] = TKV_NONE;
        score[n_blocks] = n_blocks % 3 ? 0.2f : 0.01f;
        CHECK_EQ(tkv_tier_of(kv, 0, 0, at, &tier), TKV_OK);
        if (tier != TKV_HOT) source[0] |= (uint64_t)1 << n_blocks;
    }
    memset(&p, 0, sizeof p);
    p.cfg.per_step = 3;
    for (step = 0; step < 8; step++) {
        CHECK_EQ(tkv_importance_promote(&p, score, source, moved, n_blocks, step, out, &count), TKV_OK);
        CHECK_LE(count, 3);
        for (n = 0; n < count; n++) {
            CHECK_EQ(tkv_promote(kv, 0, 0, start_of[out[n]]), TKV_OK);
            source[0] &= ~((uint64_t)1 << out[n]);
            all++;
        }
        sound(kv);
    }
    CHECK_EQ(all, (int)budget_of(kv).promoted);
    CHECK(all > 6 && all < n_blocks);
    tkv_destroy(kv);
    empty(&d);
}

/* >>memory that is not there */
TEST(every_allocation_fails_once) {
    int nth, failed = 0;
    for (nth = 1; nth < 60; nth++) {
        tkv_config cfg = small();
        tkv_cache *kv = NULL;
        tkv_status st;
        purse p;
        depot d;
        int n, l, done = 0;
        cfg.budget_bytes = nth % 2 ? 300 * 1000 : 0;
        cfg.allocator = purse_of(&p);
        cfg.spill.keep_exact = nth % 3 == 0;
        d = depot_for(&cfg);
        cfg.spill.user = &d;
        p.closed = nth;
        st = tkv_create(&cfg, &kv);
        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM);
        for (n = 0; n < 50 && kv; n++) {
            for (l = 0; l < LAYERS; l++) {
                int had = tkv_layer_len(kv, 0, l);
                fresh(20);
                st = tkv_append(kv, 0, l, k_in, v_in, 20);
                CHECK(st == TKV_OK || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET);
                CHECK_EQ(tkv_layer_len(kv, 0, l), st ? had : had + 20);
                if (p.closed == 1) done = 1, p.closed = 0;
                if (st) CHECK_EQ(tkv_append(kv, 0, l, k_in, v_in, 20), TKV_OK);
            }
            if (n % 4 == 0) CHECK_EQ(tkv_spill(kv, 0, TKV_ALL, 1, NULL), TKV_OK);
            if (n % 7 == 6) {
                st = tkv_promote(kv, 0, 0, 4);
                CHECK(st == TKV_OK || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET || st == TKV_ERR_NO_SOURCE);
                if (p.closed == 1) done = 1, p.closed = 0;
            }
            sound(kv);
            CHECK(cfg.budget_bytes == 0 || p.most <= cfg.budget_bytes);
        }
        failed += done || !kv;
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
        empty(&d);
    }
    CHECK(failed > 10);
}

TEST(in_place) {
    tkv_config cfg = small();
    tkv_cache *kv = NULL, *a;
    size_t bytes = 0;
    uint8_t *raw;
    depot d;
    int n, i;
    cfg.policy.max_level = TKV_NONE;
    cfg.max_seqs = 1;
    cfg.max_tokens = LONGEST;
    cfg.budget_bytes = 240 * 1000;
    d = depot_for(&cfg);
    cfg.spill.user = &d;
    CHECK_EQ(tkv_required_bytes(&cfg, &bytes), TKV_OK);
    raw = (uint8_t *)malloc(bytes + 128);
    if (!raw) exit(2);
    memset(raw, 0xa5, bytes + 128);
    CHECK_EQ(tkv_init_in_place(&cfg, raw + 64, bytes, &kv), TKV_OK);
    if (!kv) return;
    cfg = small();
    cfg.hot_tokens = TKV_ALL;
    a = make(&cfg);
    for (n = 0; n + 25 <= LONGEST; n += 25) {
        CHECK_EQ(append_both(a, kv, 0, 25), TKV_OK);
        if (n % 200 == 0) sound(kv);
    }
    same(a, kv, 0, 3);
    CHECK(alive_in(&d) > 50);
    for (i = 0; i < 64; i++) CHECK(raw[i] == 0xa5 && raw[bytes + 64 + (size_t)i] == 0xa5);
    CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, 25), TKV_ERR_CAPACITY); /* max_tokens */
    CHECK_EQ(tkv_reset(kv, 0), TKV_OK);
    CHECK_EQ(alive_in(&d), 0);
    tkv_destroy(kv);
    tkv_destroy(a);
    free(raw);
    empty(&d);
}

/* >>the file of examples/ */
#if HAVE_FILES
static void limit_files(rlim_t bytes) { /* as a full disk: what is beyond is cut off, then refused */
    struct rlimit r;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &r), 0);
    r.rlim_cur = bytes ? bytes : r.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &r), 0);
}

TEST(a_file) {
    tkv_config cfg = small(), with;
    spill_file file;
    tkv_cache *a, *b;
    size_t bytes;
    char bad = 0x77;
    int n, done = 0, before;
    with = cfg;
    CHECK_EQ(tkv_spill_bytes(&cfg, &bytes), TKV_OK);
    CHECK_EQ(spill_file_open(&file, "/nowhere/at/all", bytes), -1);
    REQUIRE(spill_file_open(&file, NULL, bytes) == 0);
    with.spill = spill_file_config(&file);
    a = make(&cfg);
    b = make(&with);
    for (n = 0; n < 8; n++) CHECK_EQ(append_both(a, b, 0, CHUNK), TKV_OK);
    (void)signal(SIGXFSZ, SIG_IGN);
    limit_files(5 * file.bytes + 1000); /* in the middle of a block */
    CHECK_EQ(tkv_spill(b, 0, 0, 100, &done), TKV_ERR_IO);
    CHECK(done > 0 && done < 8);
    limit_files(0);
    sound(b);
    same(a, b, 0, 3); /* nothing is lost */
    before = done;
    CHECK_EQ(tkv_spill(b, 0, TKV_ALL, 100, &done), TKV_OK);
    CHECK(done + before > 14);
    same(a, b, 0, 3);
    CHECK(spill_file_size(&file) > 0);
    n = (int)(2 * tkvi_ids(b, 0, 0)[3]);
    CHECK_EQ(pwrite(file.fd, &bad, 1, (off_t)n * (off_t)file.bytes + 77), 1);
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_DATA);
    CHECK_EQ(ftruncate(file.fd, (off_t)n * (off_t)file.bytes + 300), 0); /* reads come out short */
    CHECK_EQ(tkv_attend(b, 0, 0, q_in, 1, out_b), TKV_ERR_IO);
    CHECK_EQ(tkv_read(b, 0, 0, 0, tkv_seq_len(b, 0), k_b, v_b), TKV_ERR_IO);
    sound(b);
    CHECK_EQ(tkv_reset(b, 0), TKV_OK); /* and it goes on */
    CHECK_EQ(tkv_reset(a, 0), TKV_OK);
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

/* >>random calls with a store that fails at times */
static int from_env(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static void random_call(tkv_cache *kv, depot *d, int *step) {
    const int seq = tkv_rng_below(&rng, SEQS), layer = tkv_rng_below(&rng, LAYERS),
              kind = tkv_rng_below(&rng, 100), len = tkv_layer_len(kv, seq, layer);
    tkv_status st;
    int n;
    if (tkv_rng_below(&rng, 8) == 0) d->store_fails = 1 + tkv_rng_below(&rng, 6);
    if (tkv_rng_below(&rng, 8) == 0) d->fetch_fails = 1 + tkv_rng_below(&rng, 6);
    if (kind < 45) {
        n = 1 + tkv_rng_below(&rng, CHUNK / 2);
        fresh(n);
        st = len + n > LONGEST ? TKV_OK : tkv_append(kv, seq, layer, k_in, v_in, n);
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET || st == TKV_ERR_NOMEM || st == TKV_ERR_CAPACITY);
        n = len + n > LONGEST || st ? 0 : n;
        CHECK_EQ(tkv_layer_len(kv, seq, layer), len + n);
    } else if (kind < 60) {
        tkv_rng_fill(&rng, q_in, (size_t)(20 * HEADS * DIM), 1.0);
        n = kind % 2 && len >= 20 ? 20 : len > 0;
        st = tkv_attend(kv, seq, layer, q_in, n, out_a);
        CHECK(st == TKV_OK || st == TKV_ERR_IO || (st == TKV_ERR_RANGE && kv->tables.cfg.window));
    } else if (kind < 65) {
        n = tkvi_list_of(kv, seq, layer)->dropped;
        st = tkv_read(kv, seq, layer, n, len - n, k_a, v_a);
        CHECK(st == TKV_OK || st == TKV_ERR_IO || (st == TKV_ERR_RANGE && kv->evicted));
    } else if (kind < 75) {
        st = tkv_spill(kv, seq, kind % 2 ? layer : TKV_ALL, tkv_rng_below(&rng, 5), NULL);
        CHECK(st == TKV_OK || st == TKV_ERR_IO);
    } else if (kind < 83) {
        n = tkvi_list_of(kv, seq, layer)->dropped;
        st = len > n ? tkv_promote(kv, seq, layer, n + tkv_rng_below(&rng, len - n)) : TKV_OK;
        CHECK(st == TKV_OK || st == TKV_ERR_NO_SOURCE || st == TKV_ERR_BUDGET || st == TKV_ERR_NOMEM ||
              st == TKV_ERR_IO || (st == TKV_ERR_RANGE && kv->evicted));
    } else if (kind < 87) {
        n = len - tkv_rng_below(&rng, 200);
        st = tkv_truncate(kv, seq, n > 0 ? n : 0);
        CHECK(st == TKV_OK || st == TKV_ERR_INEXACT || st == TKV_ERR_STATE);
    } else if (kind < 88) {
        if (tkv_rng_below(&rng, 3)) return;
        CHECK_EQ(tkv_reset(kv, seq), TKV_OK);
        step[seq] = 0;
    } else if (kind < 91) {
        st = tkv_flush(kv, seq, (tkv_flush_mode)tkv_rng_below(&rng, 3));
        CHECK(st == TKV_OK || st == TKV_ERR_STATE || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET);
    } else if (kind < 94) {
        if (!step[seq]) step[seq] = tkv_begin(kv, seq) == TKV_OK;
        else if (tkv_rng_below(&rng, 2)) CHECK_EQ(tkv_abort(kv, seq), TKV_OK), step[seq] = 0;
        else if (tkv_commit(kv, seq) == TKV_OK) step[seq] = 0;
    } else if (kind < 95 && kv->tables.cfg.evict.kind) {
        tkv_evict_params p;
        memset(&p, 0, sizeof p);
        p.seq = seq;
        p.layer = kind % 2 ? layer : TKV_NONE;
        p.keep = 100 + tkv_rng_below(&rng, 600);
        st = tkv_evict(kv, &p);
        CHECK(st == TKV_OK || st == TKV_ERR_STATE);
    } else if (kind < 96) {
        st = tkv_reserve(kv, seq, 1 + tkv_rng_below(&rng, CHUNK));
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET || st == TKV_ERR_NOMEM || st == TKV_ERR_CAPACITY);
    } else if (kind < 98) {
        st = tkv_set_level(kv, tkv_rng_below(&rng, 4));
        CHECK(st == TKV_OK || st == TKV_ERR_ARG);
    } else if (tkvi_lazy(kv)) {
        st = tkv_set_budget(kv, (size_t)(300 + tkv_rng_below(&rng, 300)) * 1000);
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET || st == TKV_ERR_NOMEM);
    }
    d->store_fails = d->fetch_fails = 0;
}

TEST(random_calls) {
    const int calls = from_env("TKV_RANDOM_OPS", tkv_test_quick() ? 600 : 1500);
    const int first = from_env("TKV_RANDOM_SEED", 1);
    int config, i;
    for (config = 0; config < 8; config++) {
        tkv_config cfg = small();
        tkv_cache *kv;
        purse p;
        depot d;
        int step[SEQS] = {0};
        rng = tkv_rng_seed((uint64_t)(first + config));
        cfg.budget_bytes = config < 3 ? (size_t)(config < 2 ? 350 : 600) * 1000 : 0;
        if (config % 2) cfg.spill.keep_exact = 1;
        if (config == 2) cfg.policy.max_level = TKV_NONE;
        if (config == 1) cfg.window = 1000;
        if (config == 4) cfg.quality_heads = 2;
        if (config > 4)
            cfg.evict.kind = (tkv_evict_kind)(config == 5   ? TKV_EVICT_KNORM
                                              : config == 6 ? TKV_EVICT_KEYDIFF
                                                            : TKV_EVICT_SLIDING);
        if (config == 6) cfg.evict_tokens = 900;
        if (config == 5 || config == 7) cfg.budget_bytes = 600 * 1000;
        cfg.allocator = purse_of(&p);
        d = depot_for(&cfg);
        cfg.spill.user = &d;
        kv = make(&cfg);
        for (i = 0; i < calls && !tkv_test_.bad; i++) {
            const int fails = tkv_rng_below(&rng, 20) == 0;
            if (fails) p.closed = 1 + tkv_rng_below(&rng, 3);
            random_call(kv, &d, step);
            p.closed = 0;
            sound(kv);
            if (cfg.budget_bytes) CHECK_LE(kv->heap.held, 600 * 1000);
        }
        if (tkv_test_.bad) printf("\n    config %d, call %d", config, i);
        printf("\n    config %d: %d stores, %d fetches, %d drops, %lu promoted", config, d.stores, d.fetches,
               d.drops, (unsigned long)kv->promoted);
        CHECK(d.stores > 0 && d.drops > 0);
        tkv_destroy(kv);
        CHECK_EQ(p.held, 0);
        empty(&d);
    }
}

/* >>what cannot be */
TEST(config_says_what_is_wrong) {
    tkv_config cfg = small();
    char reason[200];
    size_t bytes = 0;
    depot d = depot_for(&cfg);
    tkv_cache *kv;
    int i;
    cfg.spill.user = &d;
    cfg.spill.fetch = NULL;
    CHECK_EQ(tkv_config_validate(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "spill") != NULL, "%s", reason);
    cfg.spill.fetch = depot_fetch;
    cfg.spill.keep_exact = 2;
    CHECK_EQ(tkv_config_validate(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    cfg.spill.keep_exact = 0;
    cfg.head_dim = 160;
    cfg.hot.k = TKV_F32;
    CHECK_EQ(tkv_config_validate(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_MSG(strstr(reason, "F16") != NULL, "%s", reason);
    CHECK_EQ(tkv_spill_bytes(&cfg, &bytes), TKV_ERR_CONFIG);
    cfg.head_dim = 128;
    CHECK_EQ(tkv_spill_bytes(&cfg, &bytes), TKV_OK);
    CHECK_EQ(bytes, (size_t)KV_HEADS * (BLOCK * 128 * (4 + 2) + 16));
    CHECK_EQ(tkv_spill_bytes(&cfg, NULL), TKV_ERR_ARG);
    cfg = small();
    cfg.spill.keep_exact = 1; /* a text can say so; without a store nothing is kept */
    kv = make(&cfg);
    for (i = 0; i < 4; i++) CHECK_EQ(append_both(kv, NULL, 0, CHUNK), TKV_OK);
    CHECK_EQ(tkv_promote(kv, 0, 0, 10), TKV_ERR_NO_SOURCE);
    CHECK_EQ(tkv_promote(kv, 0, 0, LONGEST), TKV_ERR_RANGE);
    CHECK_EQ(tkv_spill(kv, 0, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_spill(kv, 5, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_spill(NULL, 0, 0, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_promote(NULL, 0, 0, 0), TKV_ERR_ARG);
    tkv_destroy(kv);
    empty(&d);
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
    RUN(stale_records_of_long_ago);
    RUN(keys_are_dropped);
    RUN(promotion_restores);
    RUN(promotion_under_a_budget);
    RUN(importance_says_what_to_promote);
    RUN(every_allocation_fails_once);
    RUN(in_place);
    RUN(a_file);
    RUN(random_calls);
    RUN(config_says_what_is_wrong);
    RUN(it_is_told);
    return tkv_test_end();
}
