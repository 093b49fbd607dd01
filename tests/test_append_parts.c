/*
 * test_append_parts.c - appends as parts (tkv_append_part): the cache ends as after tkv_append_ex, with the same bits, for
 * any number of parts, in any order, and by threads at the same time. Run it under -fsanitize=thread as well.
 */
#include "../tieredkv.h"
#include "kit.h"

#if !defined(__wasm__) && !defined(_WIN32)
#include <pthread.h>
#define HAVE_THREADS 1
#else
#define HAVE_THREADS 0
#endif

enum {
    LAYERS = 2,
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 48,
    V_DIM = 80,
    SEQS = 2,
    CHUNK = 400,
    TOKENS = 3000,
    MAX_PARTS = 200,
    SPACE = 4 << 20
};

typedef struct twin { /* a cache that is appended to as a whole, and one by parts */
    tkv_cache *whole, *by_parts;
} twin;

static float k_in[SEQS * CHUNK * KV_HEADS * DIM], v_in[SEQS * CHUNK * KV_HEADS * V_DIM];
static float q_in[HEADS * DIM], out[HEADS * V_DIM];
static float k_a[TOKENS * KV_HEADS * DIM], v_a[TOKENS * KV_HEADS * V_DIM];
static float k_b[TOKENS * KV_HEADS * DIM], v_b[TOKENS * KV_HEADS * V_DIM];
static uint64_t workspace[SPACE / 8 + 8];
static tkv_rng rng;

static tkv_config make_config(void) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    cfg.model.v_head_dim = V_DIM;
    return cfg;
}

/* Plans by number. Returns a name; NULL: there is no such plan. */
static const char *choose_plan(tkv_config *cfg, int plan) {
    cfg->tiers.warm_tokens = 512;
    switch (plan) {
    case 0: return "default";
    case 1: cfg->tiers.warm = cfg->tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4); return "KIVI";
    case 2:
        cfg->model.rope.dim = DIM;
        cfg->tiers.archive = pair_of(TKV_KVQUANT4, TKV_KVQUANT4);
        return "KVQuant";
    case 3: cfg->tiers.hot_tokens = TKV_UNLIMITED; return "all exact";
    case 4: cfg->budget.bytes = (size_t)1 << 20; return "budget";
    case 5: cfg->tiers.warm = cfg->tiers.archive = pair_of(TKV_SQUAT4, TKV_KIVI2); return "SQuat";
    case 6:
        cfg->evict.policy = TKV_EVICT_H2O;
        cfg->evict.keep_tokens = 1500;
        cfg->tiers.n_anchors = 8;
        cfg->meter.heads = 2;
        return "eviction, anchors, meter";
    case 7: cfg->model.window = 900; return "window";
    default: return NULL;
    }
}

/* Runs all parts in a random order, in a workspace of any alignment. Returns the status of the last one. */
static tkv_status run_parts(tkv_cache *kv, const tkv_append_params *p, int n_parts) {
    uint8_t *space = (uint8_t *)workspace + tkv_rng_below(&rng, 64);
    int order[MAX_PARTS], i;
    size_t bytes = 0;
    tkv_status st = TKV_OK;
    CHECK_EQ(tkv_get_append_bytes(kv, p, &bytes), TKV_OK);
    CHECK_LE(bytes, (size_t)SPACE);
    memset(space, 0xa5, SPACE);
    memset(space, 0, 128);
    fill_random_order(&rng, order, n_parts);
    for (i = 0; i < n_parts; i++) {
        const tkv_status one = tkv_append_part(kv, p, order[i], n_parts, space, bytes);
        if (i + 1 < n_parts) CHECK_EQ(one, TKV_OK); /* the last part has the status of the append */
        else st = one;
    }
    CHECK(is_zero(space, 128));
    CHECK(space[bytes] == 0xa5);
    return st;
}

static tkv_append_params make_params(int layer, int n) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.layer = layer;
    p.n = n;
    p.k = k_in;
    p.v = v_in;
    return p;
}

static void fill_tokens(int n) {
    tkv_rng_fill(&rng, k_in, (size_t)(n * KV_HEADS * DIM), 1.0);
    tkv_rng_fill(&rng, v_in, (size_t)(n * KV_HEADS * V_DIM), 1.0);
}

/* Compares all tokens that can be read, and the reports. */
static void check_same(const twin *t, const char *label) {
    tkv_memory_info a, b;
    tkv_budget_info budget_a = budget_of(t->whole), budget_b = budget_of(t->by_parts);
    int seq, layer, i;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    CHECK_EQ(tkv_get_memory(t->whole, &a), TKV_OK);
    CHECK_EQ(tkv_get_memory(t->by_parts, &b), TKV_OK);
    CHECK_MSG(memcmp(&a, &b, sizeof a) == 0, "%s: memory differs", label);
    CHECK_MSG(memcmp(&budget_a, &budget_b, sizeof budget_a) == 0, "%s: the budget differs", label);
    for (seq = 0; seq < SEQS; seq++)
        for (layer = 0; layer < LAYERS; layer++) {
            const int len = tkv_get_length(t->whole, seq, layer);
            CHECK_EQ(tkv_get_length(t->by_parts, seq, layer), len);
            for (i = 0; i < len; i++) {
                const tkv_status st = tkv_read(t->whole, seq, layer, i, 1, k_a, v_a);
                CHECK_EQ(tkv_read(t->by_parts, seq, layer, i, 1, k_b, v_b), st);
                if (st) continue;
                CHECK_MSG(memcmp(k_a, k_b, KV_HEADS * DIM * sizeof *k_a) == 0 &&
                              memcmp(v_a, v_b, KV_HEADS * V_DIM * sizeof *v_a) == 0,
                          "%s: sequence %d, layer %d: token %d differs", label, seq, layer, i);
            }
        }
    check_cache(t->by_parts);
}

static twin make_twin(const tkv_config *cfg) {
    twin t;
    t.whole = create_cache(cfg);
    t.by_parts = create_cache(cfg);
    return t;
}

static void destroy_twin(twin *t) {
    tkv_destroy(t->whole);
    tkv_destroy(t->by_parts);
}

/* Attention, so that tables and scores have queries to learn from. */
static void attend_both(const twin *t, int seq, int layer) {
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    CHECK_EQ(tkv_attend(t->whole, seq, layer, q_in, 1, out), TKV_OK);
    CHECK_EQ(tkv_attend(t->by_parts, seq, layer, q_in, 1, out), TKV_OK);
}

/* Appends n tokens to one sequence, or to both, in both caches. Returns the bytes of the workspace. */
static size_t append_both(const twin *t, tkv_append_params p, int n_parts, const char *label) {
    size_t bytes = 0;
    tkv_status st;
    CHECK_EQ(tkv_get_append_bytes(t->by_parts, &p, &bytes), TKV_OK);
    st = tkv_append_ex(t->whole, &p);
    CHECK_MSG(run_parts(t->by_parts, &p, n_parts) == st, "%s: another status", label);
    CHECK(strcmp(tkv_get_last_error(t->whole), tkv_get_last_error(t->by_parts)) == 0);
    return bytes;
}

TEST(caches_end_with_the_bits_of_one_call) {
    static const int counts[] = {1, 2, 3, 7, MAX_PARTS};
    tkv_config cfg = make_config();
    const char *label;
    int plan, round, layer;
    for (plan = 0; cfg = make_config(), (label = choose_plan(&cfg, plan)) != NULL; plan++) {
        twin t = make_twin(&cfg);
        size_t most = 0;
        for (round = 0; round < 14; round++)
            for (layer = 0; layer < LAYERS; layer++) {
                const int is_batch = round % 3 == 2, n_parts = counts[tkv_rng_below(&rng, COUNT(counts))];
                tkv_append_params p = make_params(layer, 1 + tkv_rng_below(&rng, CHUNK));
                tkv_rows rows[SEQS];
                size_t bytes;
                rows[0].seq = 1, rows[0].n = 1 + tkv_rng_below(&rng, CHUNK / 2);
                rows[1].seq = 0, rows[1].n = tkv_rng_below(&rng, CHUNK / 4);
                if (is_batch) p.batch = rows, p.n_batch = SEQS;
                fill_tokens(is_batch ? rows[0].n + rows[1].n : p.n);
                bytes = append_both(&t, p, n_parts, label);
                if (bytes > most) most = bytes;
                attend_both(&t, is_batch, layer);
            }
        check_same(&t, label);
        /* Nothing is prepared where nothing is encoded, and under a budget. */
        CHECK_MSG((most > 128) == (plan != 3 && plan != 4), "%s: a workspace of %d bytes", label, (int)most);
        destroy_twin(&t);
    }
}

/* Blocks that forks share, and a step of one sequence. */
TEST(forks_and_steps) {
    tkv_config cfg = make_config();
    twin t;
    int round;
    (void)choose_plan(&cfg, 1);
    t = make_twin(&cfg);
    for (round = 0; round < 4; round++) {
        fill_tokens(CHUNK);
        (void)append_both(&t, make_params(0, CHUNK), 3, "before a fork");
    }
    CHECK_EQ(tkv_seq_fork(t.whole, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_seq_fork(t.by_parts, 0, 1, TKV_UNLIMITED), TKV_OK);
    for (round = 0; round < 4; round++) {
        tkv_append_params p = make_params(0, 0);
        tkv_rows rows[SEQS];
        rows[0].seq = 0, rows[0].n = CHUNK / 2;
        rows[1].seq = 1, rows[1].n = CHUNK / 4;
        p.batch = rows;
        p.n_batch = SEQS;
        fill_tokens(CHUNK);
        if (round == 2) {
            CHECK_EQ(tkv_seq_begin(t.whole, 1), TKV_OK);
            CHECK_EQ(tkv_seq_begin(t.by_parts, 1), TKV_OK);
        }
        (void)append_both(&t, p, 7, "after a fork");
        check_same(&t, "after a fork");
    }
    destroy_twin(&t);
}

/* A fork has kept blocks exact that are warm in the other list, and is gone. They are coded for the warm tier and then for
 * the archive, in one append. Parts have encoded them for the archive at once: other bytes, which are not used. */
TEST(late_blocks) {
    tkv_config cfg = make_config();
    twin t;
    int round;
    cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
    cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
    cfg.tiers.warm_tokens = 512;
    t = make_twin(&cfg);
    for (round = 0; round < 4; round++) {
        const uint64_t demoted = budget_of(t.whole).demoted;
        size_t bytes;
        if (round == 1) { /* only now: the first append is shared */
            CHECK_EQ(tkv_seq_fork(t.whole, 0, 1, TKV_UNLIMITED), TKV_OK);
            CHECK_EQ(tkv_seq_fork(t.by_parts, 0, 1, TKV_UNLIMITED), TKV_OK);
        }
        if (round == 2) {
            CHECK_EQ(tkv_seq_reset(t.whole, 1), TKV_OK);
            CHECK_EQ(tkv_seq_reset(t.by_parts, 1), TKV_OK);
        }
        fill_tokens(CHUNK);
        bytes = append_both(&t, make_params(0, CHUNK), 3, "late blocks");
        if (round == 1) CHECK_EQ(budget_of(t.whole).demoted, demoted); /* the fork has them hot */
        if (round == 2) {
            CHECK(budget_of(t.whole).demoted > demoted + 6); /* some twice */
            CHECK(bytes > 128);
        }
        check_same(&t, "late blocks");
    }
    destroy_twin(&t);
}

/* The last part copies what the others have encoded: other bytes there become other values. */
TEST(prepared_bytes_are_used) {
    tkv_config cfg = make_config();
    tkv_append_params p = make_params(0, CHUNK);
    size_t bytes = 0;
    twin t;
    (void)choose_plan(&cfg, 1);
    t = make_twin(&cfg);
    fill_tokens(CHUNK);
    (void)append_both(&t, p, 2, "first");
    fill_tokens(CHUNK);
    CHECK_EQ(tkv_append_ex(t.whole, &p), TKV_OK);
    memset(workspace, 0, sizeof workspace);
    CHECK_EQ(tkv_get_append_bytes(t.by_parts, &p, &bytes), TKV_OK);
    CHECK_EQ(tkv_append_part(t.by_parts, &p, 0, 2, workspace, bytes), TKV_OK);
    memset((uint8_t *)workspace + 128, 0, bytes - 128);
    CHECK_EQ(tkv_append_part(t.by_parts, &p, 1, 2, workspace, bytes), TKV_OK);
    CHECK_EQ(tkv_read(t.whole, 0, 0, 100, 1, k_a, v_a), TKV_OK);
    CHECK_EQ(tkv_read(t.by_parts, 0, 0, 100, 1, k_b, v_b), TKV_OK);
    CHECK(memcmp(k_a, k_b, KV_HEADS * DIM * sizeof *k_a) != 0);
    destroy_twin(&t);
}

TEST(errors_are_those_of_the_append) {
    tkv_config cfg = make_config();
    counting_allocator memory;
    tkv_append_params p = make_params(0, CHUNK);
    size_t bytes = 0;
    twin t;
    int round, fails;
    (void)choose_plan(&cfg, 1);
    t.whole = create_cache(&cfg);
    cfg.host.allocator = counting_allocator_of(&memory);
    t.by_parts = create_cache(&cfg);
    for (round = 0; round < 5; round++) {
        fill_tokens(CHUNK);
        CHECK_EQ(tkv_append_ex(t.whole, &p), TKV_OK);
        for (fails = 1;; fails++) {
            const int len = tkv_get_length(t.by_parts, 0, 0);
            tkv_status st;
            memory.fail_at = fails;
            memory.n_refused = 0;
            st = run_parts(t.by_parts, &p, 3);
            memory.fail_at = 0;
            check_cache(t.by_parts);
            if (st == TKV_OK) break;
            CHECK_EQ(st, TKV_ERR_NOMEM);
            CHECK_LE(1, memory.n_refused);
            CHECK_EQ(tkv_get_length(t.by_parts, 0, 0), len);
        }
    }
    for (round = 0; round < 5 * CHUNK; round++) {
        CHECK_EQ(tkv_read(t.whole, 0, 0, round, 1, k_a, v_a), TKV_OK);
        CHECK_EQ(tkv_read(t.by_parts, 0, 0, round, 1, k_b, v_b), TKV_OK);
        CHECK_MEM(k_b, k_a, KV_HEADS * DIM * sizeof *k_a);
        CHECK_MEM(v_b, v_a, KV_HEADS * V_DIM * sizeof *v_a);
    }
    p.n = CHUNK + 1;
    CHECK_EQ(run_parts(t.by_parts, &p, 3), TKV_ERR_CAPACITY);
    CHECK_EQ(tkv_append_ex(t.whole, &p), TKV_ERR_CAPACITY);
    CHECK(strcmp(tkv_get_last_error(t.whole), tkv_get_last_error(t.by_parts)) == 0);
    p.n = CHUNK;
    memset(workspace, 0, 128);
    CHECK_EQ(tkv_get_append_bytes(t.by_parts, &p, &bytes), TKV_OK);
    CHECK_LE((size_t)129, bytes);
    CHECK_EQ(tkv_append_part(t.by_parts, &p, 0, 1, workspace, bytes - 1), TKV_ERR_CAPACITY);
    CHECK_EQ(tkv_append_part(t.by_parts, &p, 0, 1, NULL, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_append_part(t.by_parts, &p, 1, 1, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_append_part(t.by_parts, &p, -1, 1, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_append_part(t.by_parts, &p, 0, 0, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_append_part(t.by_parts, &p, 0, 65537, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_append_part(NULL, &p, 0, 1, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_append_part(t.by_parts, NULL, 0, 1, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_append_bytes(NULL, &p, &bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_append_bytes(t.by_parts, NULL, &bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_append_bytes(t.by_parts, &p, NULL), TKV_ERR_ARG);
    CHECK(is_zero((const uint8_t *)workspace, 128));
    CHECK_EQ(tkv_get_length(t.by_parts, 0, 0), 5 * CHUNK);
    destroy_twin(&t);
}

#if HAVE_THREADS
typedef struct part_job {
    tkv_cache *kv;
    const tkv_append_params *p;
    int part, n_parts;
    size_t bytes;
    tkv_status st;
} part_job;

static void *run_part(void *arg) {
    part_job *j = (part_job *)arg;
    j->st = tkv_append_part(j->kv, j->p, j->part, j->n_parts, workspace, j->bytes);
    return NULL;
}

TEST(parts_run_at_the_same_time) {
    tkv_config cfg = make_config();
    int plan, round, i;
    for (plan = 0; plan < 3; plan++) {
        twin t;
        cfg = make_config();
        (void)choose_plan(&cfg, plan);
        t = make_twin(&cfg);
        memset(workspace, 0, 128);
        for (round = 0; round < 7; round++) {
            const int n = 2 + tkv_rng_below(&rng, 7);
            tkv_append_params p = make_params(0, CHUNK);
            pthread_t thread[8];
            part_job job[8];
            fill_tokens(CHUNK);
            CHECK_EQ(tkv_append_ex(t.whole, &p), TKV_OK);
            for (i = 0; i < n; i++) {
                job[i].kv = t.by_parts, job[i].p = &p, job[i].part = i, job[i].n_parts = n;
                CHECK_EQ(tkv_get_append_bytes(t.by_parts, &p, &job[i].bytes), TKV_OK);
                CHECK_LE(job[i].bytes, sizeof workspace);
            }
            for (i = 0; i < n; i++) CHECK_EQ(pthread_create(&thread[i], NULL, run_part, &job[i]), 0);
            for (i = 0; i < n; i++) {
                pthread_join(thread[i], NULL);
                CHECK_EQ(job[i].st, TKV_OK);
            }
        }
        check_same(&t, "threads");
        destroy_twin(&t);
    }
}
#else
TEST(parts_run_at_the_same_time) { SKIP("no threads here"); }
#endif

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(29);
    RUN(caches_end_with_the_bits_of_one_call);
    RUN(forks_and_steps);
    RUN(late_blocks);
    RUN(prepared_bytes_are_used);
    RUN(errors_are_those_of_the_append);
    RUN(parts_run_at_the_same_time);
    return tkv_test_end();
}
