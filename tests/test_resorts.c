/*
 * test_resorts.c - an append fails with TKV_ERR_BUDGET only if no reclaim stage can free enough memory. The test takes
 * small budgets, and appends single tokens and chunks. It tries all combinations of the reclaim stages: levels,
 * offloading, discarding blocks that can be recomputed, evicting. After a refusal the test runs the stages by hand as
 * far as they go. The append must then be refused again. With eviction at most one refusal in 50 may be too early,
 * because a bound decides before tokens are lost (api.h); with anchors more. A refused append evicts nothing.
 *
 *     TKV_RANDOM_OPS=20000 TKV_RANDOM_SEED=7 ./test_resorts     appends of each run, first seed
 */
#include "kit.h"

enum { LAYERS = 2, SEQS = 2, DIM = 16, CHUNK = 80, BLOCK = TKV_BLOCK_TOKENS, LONGEST = 1 << 14 };

static float k_in[CHUNK * DIM], v_in[CHUNK * DIM], q_in[DIM], out[DIM];
static tkv_rng rng;

/* >>a store in memory that accepts every write */
typedef struct memory_store {
    uint8_t **key;
    size_t key_bytes, n_keys;
} memory_store;

static int memory_store_write(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    memory_store *c = (memory_store *)user;
    if (key >= c->n_keys) exit(2);
    if (!c->key[key]) c->key[key] = (uint8_t *)calloc(1, c->key_bytes);
    if (!c->key[key]) exit(2);
    memcpy(c->key[key] + offset, bytes, size);
    return 0;
}

static int memory_store_read(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    const memory_store *c = (const memory_store *)user;
    if (key >= c->n_keys || !c->key[key]) return 1;
    memcpy(bytes, c->key[key] + offset, size);
    return 0;
}

static memory_store make_memory_store(tkv_config *cfg) {
    memory_store c;
    memset(&c, 0, sizeof c);
    CHECK_EQ(tkv_get_required_bytes(cfg, NULL, &c.key_bytes), TKV_OK);
    c.n_keys = 1 << 16;
    c.key = (uint8_t **)calloc(c.n_keys, sizeof *c.key);
    if (!c.key) exit(2);
    return c;
}

static void free_memory_store(memory_store *c) {
    size_t i;
    for (i = 0; i < c->n_keys; i++) free(c->key[i]);
    free(c->key);
}

/* >>one run */
typedef struct run_options {
    /* evict_first: reclaim_by_hand evicts before the other stages, and again after them */
    int offloads, discards, chunk, evict_first;
    int anchors; /* with anchors an append may be refused early */
    int window;  /* 0: none */
    tkv_evict_policy policy;
    size_t extra_bytes; /* bytes above the smallest budget that tkv_create accepts */
} run_options;

static tkv_config small_config(const run_options *r) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = 1;
    cfg.model.head_dim = DIM;
    cfg.limits.max_seqs = SEQS;
    cfg.limits.max_append = CHUNK;
    cfg.limits.max_tokens = LONGEST;
    cfg.tiers.warm_tokens = 2 * BLOCK;
    cfg.evict.policy = r->policy;
    cfg.tiers.n_anchors = r->anchors;
    cfg.model.window = r->window;
    cfg.budget.discard = r->discards;
    return cfg;
}

/* Number of tokens that eviction under a budget never goes below (api.h). */
static int n_always_kept(tkv_evict_policy policy) {
    const int sinks = policy == TKV_EVICT_FIFO || policy == TKV_EVICT_RANDOM ? 0 : 4;
    return sinks + 2 * (policy == TKV_EVICT_SLIDING ? 1 : sinks ? 32 : 0) + BLOCK;
}

static void evict_to_minimum(tkv_cache *kv, const run_options *r) {
    tkv_evict_params p;
    int seq;
    memset(&p, 0, sizeof p);
    p.layer = TKV_ALL_LAYERS;
    p.keep = n_always_kept(r->policy);
    for (seq = 0; seq < SEQS && r->policy; seq++) {
        p.seq = seq;
        CHECK_EQ(tkv_evict(kv, &p), TKV_OK);
    }
}

/* Runs all reclaim stages that a caller can run, except discarding the sequence that appends. */
static void reclaim_by_hand(tkv_cache *kv, const run_options *r, int appending_seq) {
    tkv_budget_info b;
    int seq;
    if (r->evict_first) evict_to_minimum(kv, r);
    CHECK_EQ(tkv_get_budget(kv, &b), TKV_OK);
    CHECK_EQ(tkv_set_level(kv, b.n_levels - 1), TKV_OK);
    CHECK_EQ(tkv_maintain(kv, 100000, NULL, NULL, NULL), TKV_OK);
    for (seq = 0; seq < SEQS; seq++) {
        if (r->offloads) CHECK_EQ(tkv_offload(kv, seq, TKV_ALL_LAYERS, 100000, NULL), TKV_OK);
        if (r->discards && seq != appending_seq) CHECK_EQ(tkv_seq_discard(kv, seq, LONGEST, NULL), TKV_OK);
    }
    evict_to_minimum(kv, r);
}

/* Hash of the live tokens of all sequences. A refused append must not change it. */
static uint64_t hash_live_tokens(const tkv_cache *kv) {
    uint64_t mask[LONGEST / 64], h = HASH_START;
    int seq, layer;
    for (seq = 0; seq < SEQS; seq++)
        for (layer = 0; layer < LAYERS; layer++) {
            const int len = tkv_get_length(kv, seq, layer);
            int i;
            CHECK_EQ(live_mask_of(kv, seq, layer, 0, len, mask), TKV_OK);
            for (i = 0; i < (len + 63) / 64; i++)
                h = (h ^ mask[i]) * 0x100000001b3u; /* one to one in each word */
        }
    return h;
}

static tkv_status append_random(tkv_cache *kv, int seq, int layer, int n) {
    tkv_rng_fill(&rng, k_in, (size_t)(n * DIM), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * DIM), 1.0);
    return tkv_append(kv, seq, layer, k_in, v_in, n);
}

typedef struct run_counts {
    int n_runs, n_appends, n_refused, n_had_memory, n_changed;
} run_counts;

static void run_appends(const run_options *r, uint64_t seed, int n_appends, run_counts *counts) {
    tkv_config cfg = small_config(r);
    tkv_cache *kv = NULL;
    memory_store c;
    char reason[200];
    size_t smallest = 1, largest = 1 << 24;
    int i, n_refused = 0;
    c = make_memory_store(&cfg);
    if (r->offloads)
        cfg.offload.write = memory_store_write, cfg.offload.read = memory_store_read, cfg.offload.user = &c;
    while (smallest < largest) { /* finds the smallest budget */
        cfg.budget.bytes = smallest + (largest - smallest) / 2;
        if (tkv_create(&cfg, &kv) == TKV_OK) largest = cfg.budget.bytes, tkv_destroy(kv);
        else smallest = cfg.budget.bytes + 1;
    }
    cfg.budget.bytes = smallest + r->extra_bytes;
    kv = create_cache(&cfg);
    rng = tkv_rng_seed(seed);
    counts->n_runs++;
    for (i = 0; i < n_appends && n_refused < 6; i++) {
        const int seq = tkv_rng_below(&rng, 5) == 0, n = r->chunk > 1 ? 1 + tkv_rng_below(&rng, r->chunk) : 1;
        int layer;
        for (layer = 0; layer < LAYERS; layer++) {
            const int len = tkv_get_length(kv, seq, layer);
            const uint64_t live_before = hash_live_tokens(kv);
            tkv_status st = append_random(kv, seq, layer, n);
            counts->n_appends++;
            if (len + n > LONGEST) st = TKV_ERR_BUDGET;
            if ((r->policy == TKV_EVICT_H2O || r->policy == TKV_EVICT_SNAPKV) && st == TKV_OK && i % 7 == 0 &&
                layer == 0) {
                tkv_rng_fill(&rng, q_in, DIM, 1.0);
                (void)tkv_attend(kv, seq, layer, q_in, 1, out); /* may be TKV_ERR_NO_SOURCE */
            }
            if (st == TKV_OK) continue;
            if (len + n <= LONGEST) {
                tkv_status again;
                CHECK_EQ(st, TKV_ERR_BUDGET);
                counts->n_refused++;
                counts->n_changed += hash_live_tokens(kv) != live_before;
                reclaim_by_hand(kv, r, seq);
                again = append_random(kv, seq, layer, n);
                counts->n_had_memory += again != TKV_ERR_BUDGET && !r->anchors;
                CHECK_MSG(again == TKV_ERR_BUDGET || r->policy,
                          "offload %d, discard %d, %s, chunk %d, evict first %d, +%lu bytes: token %d, layer "
                          "%d, sequence %d: %s",
                          r->offloads, r->discards, tkv_get_name(TKV_NAME_EVICT_POLICY, (int)r->policy), n,
                          r->evict_first, (unsigned long)r->extra_bytes, len, layer, seq,
                          tkv_get_status_text(again));
            }
            n_refused++;
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
            CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
            break;
        }
        if (i % 16 == 0 || n_refused) CHECK_MSG(tkv_check(kv, reason, sizeof reason) == TKV_OK, "%s", reason);
    }
    tkv_destroy(kv);
    free_memory_store(&c);
}

TEST(refused_appends_had_no_memory) {
    static const tkv_evict_policy policies[] = {TKV_EVICT_NONE,   TKV_EVICT_SLIDING, TKV_EVICT_H2O,
                                                TKV_EVICT_RANDOM, TKV_EVICT_FIFO,    TKV_EVICT_SNAPKV,
                                                TKV_EVICT_KNORM};
    const char *text = getenv("TKV_RANDOM_OPS"), *from = getenv("TKV_RANDOM_SEED");
    const uint64_t seed = from ? (uint64_t)atoi(from) : 1;
    const int n_appends = text ? atoi(text) : tkv_test_quick() ? 100 : 400;
    run_counts counts;
    run_options r;
    int k, mask, step;
    memset(&counts, 0, sizeof counts);
    for (k = 0; k < COUNT(policies); k++)
        for (mask = 0; mask < 8; mask++)
            for (step = 0; step < 16; step++) {
                memset(&r, 0, sizeof r);
                r.policy = policies[k];
                r.offloads = mask & 1;
                r.discards = mask >> 1 & 1;
                r.evict_first = mask >> 2;
                r.chunk = step % 3 == 2 ? CHUNK : 1;
                r.anchors = step % 4 == 3 && r.policy ? 8 : 0;
                r.extra_bytes = (size_t)step * 5003 + (size_t)(seed % 5) * 1009;
                run_appends(&r, seed + (uint64_t)step, r.chunk > 1 ? n_appends / 4 : n_appends, &counts);
            }
    printf("\n    %d runs, %d appends, %d refused, of these %d had memory, %d cost tokens", counts.n_runs,
           counts.n_appends, counts.n_refused, counts.n_had_memory, counts.n_changed);
    CHECK(counts.n_refused > counts.n_runs / 4);
    CHECK_LE(counts.n_had_memory, counts.n_refused / 50); /* api.h */
    CHECK_EQ(counts.n_changed, 0);
}

/* Expired tokens stay until an append succeeds, so eviction finds blocks that the demand counts as expired. They are not
 * freed twice: else a refusal would come after tokens were lost (the library asserts that it does not). */
TEST(expired_blocks_count_once) {
    run_counts counts;
    run_options r;
    int step;
    memset(&counts, 0, sizeof counts);
    memset(&r, 0, sizeof r);
    r.policy = TKV_EVICT_H2O;
    r.chunk = CHUNK;
    r.window = 120;
    for (step = 0; step < 60; step++) {
        r.extra_bytes = (size_t)step * 1009;
        run_appends(&r, (uint64_t)step, 300, &counts);
    }
    printf("\n    %d runs, %d appends, %d refused, of these %d had memory", counts.n_runs, counts.n_appends,
           counts.n_refused, counts.n_had_memory);
    CHECK(counts.n_refused > 0);
    CHECK_LE(counts.n_had_memory, counts.n_refused / 50); /* api.h */
    CHECK_EQ(counts.n_changed, 0);
}

/* Every offloaded block still needs an entry in the block index, so at last the index fills the budget. Eviction then
 * frees offloaded blocks. Without eviction the cache is full. */
TEST(a_full_index_evicts_offloaded_tokens) {
    int evict, n_without_eviction = 0;
    for (evict = 0; evict < 2; evict++) {
        run_options r;
        tkv_config cfg;
        tkv_cache *kv;
        memory_store c;
        tkv_status st = TKV_OK;
        int layer, n = 0;
        memset(&r, 0, sizeof r);
        r.offloads = 1;
        r.policy = evict ? TKV_EVICT_SLIDING : TKV_EVICT_NONE;
        cfg = small_config(&r);
        c = make_memory_store(&cfg);
        cfg.offload.write = memory_store_write, cfg.offload.read = memory_store_read, cfg.offload.user = &c;
        cfg.budget.bytes = 130 * 1000;
        cfg.importance.sample_every = 1; /* then a block takes the same bytes with both policies */
        kv = create_cache(&cfg);
        rng = tkv_rng_seed(3);
        for (; !st && n < LONGEST; n++)
            for (layer = 0; layer < LAYERS && !st; layer++) st = append_random(kv, 0, layer, 1);
        printf("\n    %s: %d tokens, %s", tkv_get_name(TKV_NAME_EVICT_POLICY, (int)r.policy), n,
               tkv_get_status_text(st));
        if (evict) {
            tkv_budget_info b;
            tkv_layer_info t;
            int n_left = 0, n_offloaded = 0;
            memset(&t, 0, sizeof t);
            CHECK_EQ(st, TKV_OK);
            CHECK_EQ(tkv_get_budget(kv, &b), TKV_OK);
            CHECK(b.evicted > 0);
            for (layer = 0; layer < LAYERS; layer++) {
                CHECK_EQ(tkv_get_layer(kv, 0, layer, &t), TKV_OK);
                n_left += n - t.evicted;
                n_offloaded += t.offloaded;
            }
            printf(", %d of them left in all layers, %d blocks offloaded", n_left, n_offloaded);
            CHECK(n_offloaded > 5 * LAYERS && n_left > 10 * BLOCK * LAYERS);
        } else {
            CHECK_EQ(st, TKV_ERR_BUDGET);
            n_without_eviction = n;
        }
        tkv_destroy(kv);
        free_memory_store(&c);
    }
    CHECK(n_without_eviction < LONGEST / 2);
}

/* A cache holds at least as many tokens as tkv_estimate_context says. Where the budget limits it, and nothing is
 * evicted or discarded, it holds at most about twice as many. */
TEST(estimated_contexts_are_reached) {
    int mode, step, n_exact = 0, n_limited = 0, n_endless = 0;
    double ratios = 0.0;
    for (mode = 0; mode < 8; mode++) /* bits: offload, evict, discard */
        for (step = 0; step < 24; step += tkv_test_quick() ? 3 : 1) {
            run_options r;
            tkv_config cfg;
            tkv_cache *kv;
            tkv_memory_info m;
            memory_store c;
            tkv_status st = TKV_OK;
            int context = -1, seqs, seq, n = 0, layer;
            memset(&r, 0, sizeof r);
            r.offloads = mode & 1;
            r.policy = !(mode & 2) ? TKV_EVICT_NONE : step % 2 ? TKV_EVICT_H2O : TKV_EVICT_SLIDING;
            r.discards = mode >> 2 & 1;
            cfg = small_config(&r);
            cfg.budget.bytes = (size_t)(70 * 1000 + step * 3001);
            seqs = r.discards ? 2 : 1;
            cfg.limits.max_seqs = seqs;
            c = make_memory_store(&cfg);
            if (r.offloads)
                cfg.offload.write = memory_store_write, cfg.offload.read = memory_store_read,
                cfg.offload.user = &c;
            CHECK_EQ(tkv_estimate_context(&cfg, seqs, &context), TKV_OK);
            kv = create_cache(&cfg);
            rng = tkv_rng_seed(5);
            for (seq = 0; seq + 1 < seqs; seq++) /* idle sequences; the last one grows below */
                for (n = 0; n < context && n < 5000 && !st; n++)
                    for (layer = 0; layer < LAYERS && !st; layer++) st = append_random(kv, seq, layer, 1);
            CHECK_EQ(st, TKV_OK);
            for (n = 0; n < 5000 && !st; n += !st)
                for (layer = 0; layer < LAYERS && !st; layer++) st = append_random(kv, seq, layer, 1);
            CHECK_MSG(n >= (context < 5000 ? context : 5000), "mode %d, %lu bytes: %d tokens, not %d", mode,
                      (unsigned long)cfg.budget.bytes, n, context);
            CHECK_EQ(tkv_estimate_memory(&cfg, context, seqs, &m), TKV_OK);
            CHECK_LE(m.total, cfg.budget.bytes);
            if (st && mode < 2) {
                n_limited++;
                n_exact += n == context;
                ratios += (double)n / context;
                CHECK_LE(n, context + context + 3 * BLOCK);
            }
            n_endless += context == LONGEST;
            tkv_destroy(kv);
            free_memory_store(&c);
        }
    printf("\n    %d limited, %d of them to the token, at %.2f times the estimate on average, %d unlimited",
           n_limited, n_exact, ratios / n_limited, n_endless);
    CHECK(n_exact > 0 && n_endless > 3);
    CHECK_LE(ratios / n_limited, tkv_test_quick() ? 1.25 : 1.15); /* a quick run has 9 of 25 cases */
}

/* >>failures of the store and of the allocator */
typedef struct failing_store {
    memory_store c;
    int failing_call; /* n: the n-th write from now on fails, and all after it; 0: none */
} failing_store;

static int failing_store_write(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    failing_store *b = (failing_store *)user;
    if (b->failing_call == 1) return 1;
    b->failing_call -= b->failing_call > 0;
    return memory_store_write(&b->c, key, offset, bytes, size);
}

static int failing_store_read(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    return memory_store_read(&((failing_store *)user)->c, key, offset, bytes, size);
}

/* An append that fails because of the store or the allocator costs no token. Both are asked before tokens are lost. */
TEST(failed_appends_keep_tokens) {
    int step, policy, offloads, n_refused = 0, n_nomem = 0, n_changed[2] = {0, 0};
    for (step = 0; step < 40; step += tkv_test_quick() ? 4 : 1)
        for (policy = 0; policy < 2; policy++)
            for (offloads = 0; offloads < 2; offloads++) {
                run_options r;
                tkv_config cfg;
                tkv_cache *kv;
                failing_store b;
                counting_allocator p;
                char reason[200];
                int i, layer;
                memset(&r, 0, sizeof r);
                memset(&b, 0, sizeof b);
                r.policy = policy ? TKV_EVICT_H2O : TKV_EVICT_SLIDING;
                cfg = small_config(&r);
                cfg.host.allocator = counting_allocator_of(&p);
                cfg.budget.bytes = (size_t)(100 * 1000 + step * 2331);
                b.c = make_memory_store(&cfg);
                cfg.offload.write = offloads ? failing_store_write : NULL;
                cfg.offload.read = offloads ? failing_store_read : NULL;
                cfg.offload.user = &b;
                kv = create_cache(&cfg);
                rng = tkv_rng_seed((uint64_t)step);
                for (i = 0; i < 150; i++)
                    for (layer = 0; layer < LAYERS; layer++) {
                        const int n = 1 + tkv_rng_below(&rng, i % 3 ? 8 : CHUNK);
                        const uint64_t live_before = hash_live_tokens(kv);
                        tkv_status st;
                        p.fail_at = tkv_rng_below(&rng, 2) ? 0 : 1 + tkv_rng_below(&rng, 2);
                        b.failing_call = tkv_rng_below(&rng, 3) ? 0 : 1 + tkv_rng_below(&rng, 3);
                        st = append_random(kv, tkv_rng_below(&rng, 6) == 0, layer, n);
                        CHECK(st == TKV_OK || st == TKV_ERR_NOMEM || st == TKV_ERR_BUDGET);
                        n_refused += st == TKV_ERR_BUDGET;
                        n_nomem += st == TKV_ERR_NOMEM;
                        if (st) n_changed[st == TKV_ERR_NOMEM] += hash_live_tokens(kv) != live_before;
                    }
                CHECK_MSG(tkv_check(kv, reason, sizeof reason) == TKV_OK, "%s", reason);
                CHECK_LE(p.peak, cfg.budget.bytes);
                tkv_destroy(kv);
                free_memory_store(&b.c);
            }
    printf("\n    %d refused, %d cost tokens; %d without memory, %d cost tokens", n_refused, n_changed[0],
           n_nomem, n_changed[1]);
    CHECK(n_refused > 0 && n_nomem > 0);
    CHECK_EQ(n_changed[0], 0);
    CHECK_EQ(n_changed[1], 0);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(refused_appends_had_no_memory);
    RUN(expired_blocks_count_once);
    RUN(a_full_index_evicts_offloaded_tokens);
    RUN(estimated_contexts_are_reached);
    RUN(failed_appends_keep_tokens);
    return tkv_test_end();
}
