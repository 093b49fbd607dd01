/*
 * test_resorts.c - an append may fail with TKV_ERR_BUDGET only if nothing can free enough memory. The test takes
 * small budgets and appends tokens one by one. It tries all combinations of the reclaim stages: levels,
 * offloading, discarding blocks that can be recomputed, evicting. After a refusal the test runs the stages by hand
 * as far as they go. The append must then be refused again (with anchors it may succeed). A refused append changes
 * nothing.
 *
 *     TKV_RANDOM_OPS=20000 TKV_RANDOM_SEED=7 ./test_resorts     appends of each run, first seed
 */
#include "kit.h"

enum { LAYERS = 2, SEQS = 2, DIM = 16, CHUNK = 80, BLOCK = TKV_BLOCK_TOKENS, LONGEST = 1 << 14 };

static float k_in[CHUNK * DIM], v_in[CHUNK * DIM], q_in[DIM], out[DIM];
static tkv_rng rng;

/* >>a store that takes everything and gives it back */
typedef struct cellar {
    uint8_t **key;
    size_t room, n;
} cellar;

static int cellar_store(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    cellar *c = (cellar *)user;
    if (key >= c->n) exit(2);
    if (!c->key[key]) c->key[key] = (uint8_t *)calloc(1, c->room);
    if (!c->key[key]) exit(2);
    memcpy(c->key[key] + offset, bytes, size);
    return 0;
}

static int cellar_fetch(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    const cellar *c = (const cellar *)user;
    if (key >= c->n || !c->key[key]) return 1;
    memcpy(bytes, c->key[key] + offset, size);
    return 0;
}

static cellar cellar_of(tkv_config *cfg) {
    cellar c;
    memset(&c, 0, sizeof c);
    CHECK_EQ(tkv_get_required_bytes(cfg, NULL, &c.room), TKV_OK);
    c.n = 1 << 16;
    c.key = (uint8_t **)calloc(c.n, sizeof *c.key);
    if (!c.key) exit(2);
    return c;
}

static void cellar_end(cellar *c) {
    size_t i;
    for (i = 0; i < c->n; i++) free(c->key[i]);
    free(c->key);
}

/* >>one run */
typedef struct run_of {
    int spill, remat, chunk, steps, hand; /* hand: the order in which it is done by hand */
    int anchors;                          /* then it may be refused early */
    tkv_evict_policy kind;
    size_t over; /* bytes above the least budget that there is a cache for */
} run_of;

static tkv_config small_config(const run_of *r) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = 1;
    cfg.model.head_dim = DIM;
    cfg.limits.max_seqs = SEQS;
    cfg.limits.max_append = CHUNK;
    cfg.limits.max_tokens = LONGEST;
    cfg.tiers.warm_tokens = 2 * BLOCK;
    cfg.evict.policy = r->kind;
    cfg.tiers.n_anchors = r->anchors;
    cfg.budget.discard = r->remat;
    return cfg;
}

/* Tokens that eviction for bytes leaves in any case, as api.h says. */
static int least_of(tkv_evict_policy kind) {
    const int sinks = kind == TKV_EVICT_FIFO || kind == TKV_EVICT_RANDOM ? 0 : 4;
    return sinks + 2 * (kind == TKV_EVICT_SLIDING ? 1 : sinks ? 32 : 0) + BLOCK;
}

static void evict_by_hand(tkv_cache *kv, const run_of *r) {
    tkv_evict_params p;
    int seq;
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = least_of(r->kind);
    for (seq = 0; seq < SEQS && r->kind; seq++) {
        p.seq = seq;
        CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    }
}

/* All that a caller can do for room, but to give up what is in use. */
static void make_room_by_hand(tkv_cache *kv, const run_of *r, int busy) {
    tkv_budget_info b;
    int seq;
    if (r->hand) evict_by_hand(kv, r);
    CHECK_EQ(tkv_get_budget(kv, &b), TKV_OK);
    CHECK_EQ(tkv_set_level(kv, b.n_levels - 1), TKV_OK);
    CHECK_EQ(tkv_maintain(kv, 100000, NULL), TKV_OK);
    for (seq = 0; seq < SEQS; seq++) {
        if (r->spill) CHECK_EQ(tkv_offload(kv, seq, TKV_ALL_LAYERS, 100000, NULL), TKV_OK);
        if (r->remat && seq != busy) CHECK_EQ(tkv_seq_discard(kv, seq, LONGEST, NULL), TKV_OK);
    }
    evict_by_hand(kv, r);
}

/* What a refused append must not change: who is there. */
static uint64_t who_is_there(const tkv_cache *kv) {
    uint64_t mask[LONGEST / 64], h = HASH_START;
    int seq, layer;
    for (seq = 0; seq < SEQS; seq++)
        for (layer = 0; layer < LAYERS; layer++) {
            const int len = tkv_get_length(kv, seq, layer);
            memset(mask, 0, sizeof mask);
            CHECK_EQ(live_mask_of(kv, seq, layer, 0, len, mask), TKV_OK);
            h = hash_of(h, (const uint8_t *)mask, sizeof mask);
        }
    return h;
}

static tkv_status append(tkv_cache *kv, int seq, int layer, int n) {
    tkv_rng_fill(&rng, k_in, (size_t)(n * DIM), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * DIM), 1.0);
    return tkv_append(kv, seq, layer, k_in, v_in, n);
}

typedef struct error_sums {
    int runs, appends, refused, wrong, lost;
} error_sums;

static void go(const run_of *r, uint64_t seed, int appends, error_sums *sum) {
    tkv_config cfg = small_config(r);
    tkv_cache *kv = NULL;
    cellar c;
    char reason[200];
    size_t low = 1, high = 1 << 24;
    int i, refused = 0;
    c = cellar_of(&cfg);
    if (r->spill) cfg.offload.write = cellar_store, cfg.offload.read = cellar_fetch, cfg.offload.user = &c;
    while (low < high) { /* the least budget */
        cfg.budget.bytes = low + (high - low) / 2;
        if (tkv_create(&cfg, &kv) == TKV_OK) high = cfg.budget.bytes, tkv_destroy(kv);
        else low = cfg.budget.bytes + 1;
    }
    cfg.budget.bytes = low + r->over;
    kv = make(&cfg);
    rng = tkv_rng_seed(seed);
    sum->runs++;
    for (i = 0; i < appends && refused < 6; i++) {
        const int seq = tkv_rng_below(&rng, 5) == 0, n = r->chunk > 1 ? 1 + tkv_rng_below(&rng, r->chunk) : 1;
        int layer;
        for (layer = 0; layer < LAYERS; layer++) {
            const int len = tkv_get_length(kv, seq, layer);
            const uint64_t there = who_is_there(kv);
            tkv_status st = append(kv, seq, layer, n);
            sum->appends++;
            if (len + n > LONGEST) st = TKV_ERR_BUDGET;
            if ((r->kind == TKV_EVICT_H2O || r->kind == TKV_EVICT_SNAPKV) && st == TKV_OK && i % 7 == 0 &&
                layer == 0) {
                tkv_rng_fill(&rng, q_in, DIM, 1.0);
                (void)tkv_attend(kv, seq, layer, q_in, 1, out); /* what is missing is so: TKV_ERR_NO_SOURCE */
            }
            if (st == TKV_OK) continue;
            if (len + n <= LONGEST) {
                tkv_status again;
                CHECK_EQ(st, TKV_ERR_BUDGET);
                sum->refused++;
                sum->lost += who_is_there(kv) != there;
                make_room_by_hand(kv, r, seq);
                again = append(kv, seq, layer, n);
                sum->wrong += again != TKV_ERR_BUDGET && !r->anchors;
                CHECK_MSG(
                    again == TKV_ERR_BUDGET || r->anchors,
                    "spill %d, remat %d, %s, chunk %d, hand %d, +%lu bytes: token %d, layer %d of %d: %s",
                    r->spill, r->remat, tkv_get_name(TKV_NAME_EVICT_POLICY, (int)r->kind), n, r->hand,
                    (unsigned long)r->over, len, layer, seq, tkv_get_status_text(again));
            }
            refused++;
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
            CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
            break;
        }
        if (i % 16 == 0 || refused) CHECK_MSG(tkv_check(kv, reason, sizeof reason) == TKV_OK, "%s", reason);
    }
    tkv_destroy(kv);
    cellar_end(&c);
}

TEST(refused_is_refused) {
    static const tkv_evict_policy kinds[] = {TKV_EVICT_NONE,   TKV_EVICT_SLIDING, TKV_EVICT_H2O,
                                             TKV_EVICT_RANDOM, TKV_EVICT_FIFO,    TKV_EVICT_SNAPKV,
                                             TKV_EVICT_KNORM};
    const char *text = getenv("TKV_RANDOM_OPS"), *from = getenv("TKV_RANDOM_SEED");
    const uint64_t seed = from ? (uint64_t)atoi(from) : 1;
    const int appends = text ? atoi(text) : tkv_test_quick() ? 100 : 400;
    error_sums sum;
    run_of r;
    int k, mask, step;
    memset(&sum, 0, sizeof sum);
    for (k = 0; k < COUNT(kinds); k++)
        for (mask = 0; mask < 8; mask++)
            for (step = 0; step < 16; step++) {
                memset(&r, 0, sizeof r);
                r.kind = kinds[k];
                r.spill = mask & 1;
                r.remat = mask >> 1 & 1;
                r.hand = mask >> 2;
                r.chunk = step % 3 == 2 ? CHUNK : 1;
                r.anchors = step % 4 == 3 && r.kind ? 8 : 0;
                r.over = (size_t)step * 5003 + (size_t)(seed % 5) * 1009;
                go(&r, seed + (uint64_t)step, r.chunk > 1 ? appends / 4 : appends, &sum);
            }
    printf("\n    %d runs, %d appends, %d refused, of these %d had room, %d cost tokens", sum.runs,
           sum.appends, sum.refused, sum.wrong, sum.lost);
    CHECK(sum.refused > sum.runs / 4);
    CHECK_EQ(sum.lost, 0);
}

/* The index of what is outside fills the budget at last; tokens that are outside make room then, and no others. */
TEST(the_index_is_not_the_end) {
    int evict, most = 0;
    for (evict = 0; evict < 2; evict++) {
        run_of r;
        tkv_config cfg;
        tkv_cache *kv;
        cellar c;
        tkv_status st = TKV_OK;
        int layer, n = 0;
        memset(&r, 0, sizeof r);
        r.spill = 1;
        r.kind = evict ? TKV_EVICT_SLIDING : TKV_EVICT_NONE;
        cfg = small_config(&r);
        c = cellar_of(&cfg);
        cfg.offload.write = cellar_store, cfg.offload.read = cellar_fetch, cfg.offload.user = &c;
        cfg.budget.bytes = 130 * 1000;
        cfg.importance.sample_every = 1; /* as many bytes a block in both */
        kv = make(&cfg);
        rng = tkv_rng_seed(3);
        for (; !st && n < LONGEST; n++)
            for (layer = 0; layer < LAYERS && !st; layer++) st = append(kv, 0, layer, 1);
        printf("\n    %s: %d tokens, %s", tkv_get_name(TKV_NAME_EVICT_POLICY, (int)r.kind), n,
               tkv_get_status_text(st));
        if (evict) {
            tkv_budget_info b;
            tkv_layer_info t;
            memset(&t, 0, sizeof t);
            CHECK_EQ(st, TKV_OK);
            CHECK_EQ(tkv_get_budget(kv, &b), TKV_OK);
            CHECK(b.evicted > 0);
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &t), TKV_OK);
            printf(", %d of them left, %d blocks outside", n - t.evicted, t.offloaded);
            CHECK(t.offloaded > 5 && n - t.evicted > 10 * BLOCK);
        } else {
            CHECK_EQ(st, TKV_ERR_BUDGET);
            most = n;
        }
        tkv_destroy(kv);
        cellar_end(&c);
    }
    CHECK(most < LONGEST / 2);
}

/* What tkv_estimate_context promises is kept, and not much more is to be had where it is a limit. */
TEST(contexts_are_true) {
    int mode, step, equal = 0, limits = 0, endless = 0;
    for (mode = 0; mode < 8; mode++) /* bits: spill, evict, remat */
        for (step = 0; step < 24; step++) {
            run_of r;
            tkv_config cfg;
            tkv_cache *kv;
            tkv_memory_info m;
            cellar c;
            tkv_status st = TKV_OK;
            int context = -1, seqs, seq, n = 0, layer;
            memset(&r, 0, sizeof r);
            r.spill = mode & 1;
            r.kind = !(mode & 2) ? TKV_EVICT_NONE : step % 2 ? TKV_EVICT_H2O : TKV_EVICT_SLIDING;
            r.remat = mode >> 2 & 1;
            cfg = small_config(&r);
            cfg.budget.bytes = (size_t)(70 * 1000 + step * 3001);
            seqs = r.remat ? 2 : 1;
            cfg.limits.max_seqs = seqs;
            c = cellar_of(&cfg);
            if (r.spill)
                cfg.offload.write = cellar_store, cfg.offload.read = cellar_fetch, cfg.offload.user = &c;
            CHECK_EQ(tkv_estimate_context(&cfg, seqs, &context), TKV_OK);
            kv = make(&cfg);
            rng = tkv_rng_seed(5);
            for (seq = 0; seq + 1 < seqs; seq++) /* these wait at the end */
                for (n = 0; n < context && n < 5000 && !st; n++)
                    for (layer = 0; layer < LAYERS && !st; layer++) st = append(kv, seq, layer, 1);
            CHECK_EQ(st, TKV_OK);
            for (n = 0; n < 5000 && !st; n += !st)
                for (layer = 0; layer < LAYERS && !st; layer++) st = append(kv, seq, layer, 1);
            CHECK_MSG(n >= (context < 5000 ? context : 5000), "mode %d, %lu bytes: %d tokens, not %d", mode,
                      (unsigned long)cfg.budget.bytes, n, context);
            CHECK_EQ(tkv_estimate_memory(&cfg, context, seqs, &m), TKV_OK);
            CHECK_LE(m.total, cfg.budget.bytes);
            if (st && mode < 2) {
                limits++;
                equal += n == context;
                CHECK_LE(n, context + context + 3 * BLOCK);
            }
            endless += context == LONGEST;
            tkv_destroy(kv);
            cellar_end(&c);
        }
    printf("\n    %d limits, %d to the token, %d none", limits, equal, endless);
    CHECK(equal > 3 && endless > 3);
}

/* An append that a store fails has changed nothing, either: it is asked before tokens go, unless all of them had
 * to go first to make room at all. An allocator costs tokens only where the index grows into what they left. */
typedef struct bad_store {
    cellar c;
    int fails; /* the n-th call from now on, and all after it; 0: none */
} bad_store;

static int bad_store_store(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    bad_store *b = (bad_store *)user;
    if (b->fails == 1) return 1;
    b->fails -= b->fails > 0;
    return cellar_store(&b->c, key, offset, bytes, size);
}

static int bad_store_fetch(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    return cellar_fetch(&((bad_store *)user)->c, key, offset, bytes, size);
}

TEST(failures_cost_nothing) {
    int step, kind, spill, refused = 0, no_memory = 0, lost[2] = {0, 0};
    for (step = 0; step < 40; step++)
        for (kind = 0; kind < 2; kind++)
            for (spill = 0; spill < 2; spill++) {
                run_of r;
                tkv_config cfg;
                tkv_cache *kv;
                bad_store b;
                counting_allocator p;
                char reason[200];
                int i, layer;
                memset(&r, 0, sizeof r);
                memset(&b, 0, sizeof b);
                r.kind = kind ? TKV_EVICT_H2O : TKV_EVICT_SLIDING;
                cfg = small_config(&r);
                cfg.host.allocator = counting_allocator_of(&p);
                cfg.budget.bytes = (size_t)(100 * 1000 + step * 2331);
                b.c = cellar_of(&cfg);
                cfg.offload.write = spill ? bad_store_store : NULL;
                cfg.offload.read = spill ? bad_store_fetch : NULL;
                cfg.offload.user = &b;
                kv = make(&cfg);
                rng = tkv_rng_seed((uint64_t)step);
                for (i = 0; i < 150; i++)
                    for (layer = 0; layer < LAYERS; layer++) {
                        const int n = 1 + tkv_rng_below(&rng, i % 3 ? 8 : CHUNK);
                        const uint64_t there = who_is_there(kv);
                        tkv_status st;
                        p.closed = tkv_rng_below(&rng, 2) ? 0 : 1 + tkv_rng_below(&rng, 2);
                        b.fails = tkv_rng_below(&rng, 3) ? 0 : 1 + tkv_rng_below(&rng, 3);
                        st = append(kv, tkv_rng_below(&rng, 6) == 0, layer, n);
                        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET);
                        refused += st == TKV_ERR_BUDGET;
                        no_memory += st == TKV_ERR_NOMEM;
                        if (st) lost[st == TKV_ERR_NOMEM] += who_is_there(kv) != there;
                    }
                CHECK_MSG(tkv_check(kv, reason, sizeof reason) == TKV_OK, "%s", reason);
                CHECK_LE(p.most, cfg.budget.bytes);
                tkv_destroy(kv);
                cellar_end(&b.c);
            }
    printf("\n    %d refused, %d cost tokens; %d without memory, %d cost tokens", refused, lost[0], no_memory,
           lost[1]);
    CHECK(refused > 0 && no_memory > 0);
    CHECK_LE(lost[0] * 100, refused);
    CHECK_LE(lost[1] * 50, no_memory);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(refused_is_refused);
    RUN(the_index_is_not_the_end);
    RUN(contexts_are_true);
    RUN(failures_cost_nothing);
    return tkv_test_end();
}
