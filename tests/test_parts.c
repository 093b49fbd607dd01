/*
 * test_parts.c - attention as parts (tkv_attend_part): the bits are those of tkv_attend_ex, for any number of parts, in
 * any order, and by threads at the same time. Run it under -fsanitize=thread as well.
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
    HEADS = 6,
    KV_HEADS = 3,
    DIM = 48,
    V_DIM = 80,
    SEQS = 2,
    TOKENS = 2000,
    MAX_ROWS = 300,
    MAX_PARTS = 200
};

static float k_in[512 * KV_HEADS * DIM], v_in[512 * KV_HEADS * V_DIM], q_in[MAX_ROWS * HEADS * DIM];
static float out_a[MAX_ROWS * HEADS * V_DIM], out_b[MAX_ROWS * HEADS * V_DIM];
static float lse_a[MAX_ROWS * HEADS], lse_b[MAX_ROWS * HEADS], scores_a[SEQS * TOKENS],
    scores_b[SEQS * TOKENS];
static uint64_t workspace[3 << 17]; /* 3 MB */
static tkv_rng rng;

static tkv_cache *make_cache(test_store *store, int offloads) {
    tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, SEQS, 512);
    tkv_cache *kv;
    int seq, from, n;
    cfg.model.v_head_dim = V_DIM;
    cfg.evict.policy = TKV_EVICT_H2O; /* attention counts scores of tokens */
    cfg.meter.heads = 2;
    if (offloads) attach_test_store(store, &cfg);
    kv = create_cache(&cfg);
    for (seq = 0; seq < SEQS; seq++)
        for (from = 0; from < TOKENS; from += n) {
            n = TOKENS - from < 512 ? TOKENS - from : 512;
            tkv_rng_fill(&rng, k_in, (size_t)(n * KV_HEADS * DIM), 1.0);
            tkv_rng_fill(&rng, v_in, (size_t)(n * KV_HEADS * V_DIM), 1.0);
            CHECK_EQ(tkv_append(kv, seq, 0, k_in, v_in, n), TKV_OK);
        }
    if (offloads) CHECK_EQ(tkv_offload(kv, 0, 0, 10, &n), TKV_OK);
    return kv;
}

static tkv_attend_params make_params(int n, int with_scores) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = n;
    p.q = q_in;
    p.lse = lse_a;
    p.out = out_a;
    if (with_scores) p.scores = scores_a;
    return p;
}

/* Runs all parts in a random order. */
static tkv_status run_parts(tkv_cache *kv, const tkv_attend_params *p, int n_parts, void *space,
                            size_t bytes) {
    int order[MAX_PARTS], i;
    tkv_status st = TKV_OK;
    fill_random_order(&rng, order, n_parts);
    for (i = 0; i < n_parts; i++) {
        const tkv_status one = tkv_attend_part(kv, p, order[i], n_parts, space, bytes);
        if (i + 1 < n_parts) CHECK_EQ(one, TKV_OK); /* the last part has the status of the call */
        else st = one;
    }
    return st;
}

/* Compares a call in parts with the call as a whole. */
static void check_parts(tkv_cache *kv, tkv_attend_params p, int rows, const char *label) {
    static const int counts[] = {1, 2, 3, 7, 64, MAX_PARTS};
    tkv_attend_params q = p;
    size_t bytes = 0;
    int i;
    memset(out_a, 0x55, sizeof out_a);
    memset(lse_a, 0x55, sizeof lse_a);
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    q.out = out_b;
    q.lse = lse_b;
    if (p.scores) q.scores = scores_b;
    CHECK_EQ(tkv_get_attend_bytes(kv, &q, &bytes), TKV_OK);
    CHECK_LE(bytes, sizeof workspace - 64);
    for (i = 0; i < COUNT(counts); i++) {
        uint8_t *space = (uint8_t *)workspace + tkv_rng_below(&rng, 64); /* of any alignment */
        memset(out_b, 0x55, sizeof out_b);
        memset(lse_b, 0x55, sizeof lse_b);
        memset(scores_b, 0x55, sizeof scores_b);
        memset(space, 0, 128);
        CHECK_EQ(run_parts(kv, &q, counts[i], space, bytes), TKV_OK);
        CHECK_MSG(memcmp(out_b, out_a, sizeof out_a) == 0, "%s: out differs with %d parts", label, counts[i]);
        CHECK_MSG(memcmp(lse_b, lse_a, (size_t)(rows * HEADS) * sizeof *lse_a) == 0,
                  "%s: lse differs with %d parts", label, counts[i]);
        if (p.scores)
            CHECK_MSG(
                memcmp(scores_b, scores_a, (size_t)((p.batch ? SEQS : 1) * TOKENS) * sizeof *scores_a) == 0,
                "%s: scores differ with %d parts", label, counts[i]);
        CHECK(is_zero(space, 128));
    }
}

TEST(parts_have_the_bits_of_the_call) {
    static const int rows[] = {1, 2, 9, 40, MAX_ROWS};
    tkv_cache *kv = make_cache(NULL, 0);
    tkv_rows batch[SEQS];
    int i, with_scores;
    tkv_rng_fill(&rng, q_in, MAX_ROWS * HEADS * DIM, 1.0);
    for (i = 0; i < COUNT(rows); i++)
        for (with_scores = 0; with_scores < 2; with_scores++) {
            tkv_attend_params p = make_params(rows[i], with_scores);
            if (tkv_test_quick() && rows[i] > 9) continue;
            check_parts(kv, p, rows[i], with_scores ? "with scores" : "plain");
            p.first_kv_head = 1; /* outputs of other heads stay as they were: 0x55 */
            check_parts(kv, p, rows[i], "heads from 1 on");
            p.n_kv_heads = 1;
            p.window = 500;
            check_parts(kv, p, rows[i], "one head");
        }
    for (i = 0; i < SEQS; i++) batch[i].seq = i, batch[i].n = 1 + 20 * i;
    for (with_scores = 0; with_scores < 2; with_scores++) {
        tkv_attend_params p = make_params(0, with_scores);
        p.batch = batch;
        p.n_batch = SEQS;
        check_parts(kv, p, 22, "batch");
    }
    check_cache(kv);
    tkv_destroy(kv);
}

/* Work tiles hold whole queries when scores of tokens combine heads, so there are more tiles. The workspace has room
 * for them. */
TEST(workspace_of_calls_that_count_scores) {
    static const int dims[] = {64, 512};
    int d, n, i;
    for (d = 0; d < COUNT(dims); d++) {
        tkv_config cfg = make_sized_config(1, 6, 2, dims[d], 1, 128);
        float *k, *q, *out;
        tkv_cache *kv;
        cfg.importance.sample_every = 1;
        cfg.importance.heads = TKV_IMPORTANCE_MAX;
        kv = create_cache(&cfg);
        k = (float *)malloc((size_t)(128 * 2 * dims[d]) * sizeof *k);
        q = (float *)malloc((size_t)(8 * 6 * dims[d]) * sizeof *q);
        out = (float *)malloc((size_t)(2 * 8 * 6 * dims[d]) * sizeof *out);
        tkv_rng_fill(&rng, q, (size_t)(8 * 6 * dims[d]), 1.0);
        for (i = 0; i < 10; i++) {
            tkv_rng_fill(&rng, k, (size_t)(128 * 2 * dims[d]), 1.0);
            CHECK_EQ(tkv_append(kv, 0, 0, k, k, 128), TKV_OK);
        }
        for (n = 1; n <= 8; n++) {
            const size_t floats = (size_t)(n * 6 * dims[d]);
            tkv_attend_params p;
            size_t bytes = 0;
            memset(&p, 0, sizeof p);
            p.n = n;
            p.q = q;
            p.out = out;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            p.out = out + floats;
            CHECK_EQ(tkv_get_attend_bytes(kv, &p, &bytes), TKV_OK);
            CHECK_LE(bytes, sizeof workspace);
            memset(workspace, 0, 128);
            CHECK_EQ(run_parts(kv, &p, 3, workspace, bytes), TKV_OK);
            CHECK_MEM(out + floats, out, floats * sizeof *out);
        }
        free(k);
        free(q);
        free(out);
        tkv_destroy(kv);
    }
}

TEST(heads_of_a_range_are_those_of_all) {
    tkv_cache *kv = make_cache(NULL, 0);
    tkv_attend_params p = make_params(5, 0);
    int h, r;
    tkv_rng_fill(&rng, q_in, 5 * HEADS * DIM, 1.0);
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.out = out_b;
    p.lse = lse_b;
    for (h = 0; h < KV_HEADS; h++) {
        memset(out_b, 0x55, sizeof out_b);
        p.first_kv_head = h;
        p.n_kv_heads = 1;
        CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
        for (r = 0; r < 5 * HEADS; r++) {
            const int inside = r % HEADS / (HEADS / KV_HEADS) == h;
            CHECK_EQ(memcmp(out_b + r * V_DIM, out_a + r * V_DIM, V_DIM * sizeof *out_a) == 0, inside);
            if (!inside) CHECK_EQ(bits_of(out_b[r * V_DIM]), 0x55555555u);
        }
        memset(out_b, 0, sizeof out_b);
        CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
        for (r = 0; r < 5 * HEADS; r++)
            CHECK_EQ(bits_of(out_b[r * V_DIM]) != 0, r % HEADS / (HEADS / KV_HEADS) == h);
    }
    tkv_destroy(kv);
}

TEST(offloaded_blocks_and_failures) {
    static test_store store;
    tkv_cache *kv = make_cache(&store, 1);
    tkv_attend_params p = make_params(3, 0);
    size_t bytes;
    tkv_rng_fill(&rng, q_in, 3 * HEADS * DIM, 1.0);
    check_parts(kv, p, 3, "offloaded");
    CHECK_EQ(tkv_get_attend_bytes(kv, &p, &bytes), TKV_OK);
    store.fail_read = 3;
    memset(workspace, 0, 128);
    CHECK_EQ(run_parts(kv, &p, 5, workspace, bytes), TKV_ERR_IO);
    CHECK(is_zero((const uint8_t *)workspace, 128));
    store.fail_read = 0;
    check_parts(kv, p, 3, "after a failure");
    tkv_destroy(kv);
}

TEST(wrong_arguments_are_refused) {
    tkv_cache *kv = make_cache(NULL, 0);
    tkv_attend_params p = make_params(1, 0);
    size_t bytes = 0;
    tkv_rng_fill(&rng, q_in, HEADS * DIM, 1.0);
    CHECK_EQ(tkv_get_attend_bytes(NULL, &p, &bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_attend_bytes(kv, NULL, &bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_attend_bytes(kv, &p, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_attend_bytes(kv, &p, &bytes), TKV_OK);
    memset(workspace, 0, 128);
    memset(out_a, 0x55, sizeof out_a);
    CHECK_EQ(tkv_attend_part(kv, &p, 0, 1, NULL, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_part(kv, &p, 0, 1, workspace, bytes - 1), TKV_ERR_CAPACITY);
    CHECK_EQ(tkv_attend_part(kv, &p, 1, 1, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_part(kv, &p, -1, 1, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_part(kv, &p, 0, 0, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_part(kv, &p, 0, 65537, workspace, bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_part(NULL, &p, 0, 1, workspace, bytes), TKV_ERR_ARG);
    p.n = TOKENS + 1;
    CHECK_EQ(tkv_attend_part(kv, &p, 0, 1, workspace, bytes), TKV_ERR_RANGE);
    p.n = 1;
    p.first_kv_head = KV_HEADS;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    p.first_kv_head = 1;
    p.n_kv_heads = KV_HEADS;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    p.n_kv_heads = -1;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    CHECK_EQ(bits_of(out_a[0]), 0x55555555u);
    CHECK(is_zero((const uint8_t *)workspace, 128));
    tkv_destroy(kv);
}

#if HAVE_THREADS
typedef struct part_job {
    tkv_cache *kv;
    const tkv_attend_params *p;
    int part, n_parts;
    size_t bytes;
    tkv_status st;
} part_job;

static void *run_part(void *arg) {
    part_job *j = (part_job *)arg;
    j->st = tkv_attend_part(j->kv, j->p, j->part, j->n_parts, workspace, j->bytes);
    return NULL;
}

TEST(parts_run_at_the_same_time) {
    static const int rows[] = {1, 9, 100};
    tkv_cache *kv = make_cache(NULL, 0);
    int i, t, round;
    tkv_rng_fill(&rng, q_in, MAX_ROWS * HEADS * DIM, 1.0);
    for (i = 0; i < COUNT(rows); i++)
        for (round = 0; round < (tkv_test_quick() ? 2 : 12); round++) {
            const int n = 2 + tkv_rng_below(&rng, 7);
            tkv_attend_params p = make_params(rows[i], round % 2), q;
            pthread_t thread[8];
            part_job job[8];
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            q = p;
            q.out = out_b;
            q.lse = lse_b;
            if (p.scores) q.scores = scores_b;
            memset(workspace, 0, 128);
            for (t = 0; t < n; t++) {
                job[t].kv = kv, job[t].p = &q, job[t].part = t, job[t].n_parts = n;
                CHECK_EQ(tkv_get_attend_bytes(kv, &q, &job[t].bytes), TKV_OK);
                CHECK_EQ(pthread_create(&thread[t], NULL, run_part, &job[t]), 0);
            }
            for (t = 0; t < n; t++) {
                pthread_join(thread[t], NULL);
                CHECK_EQ(job[t].st, TKV_OK);
            }
            CHECK_MEM(out_b, out_a, (size_t)(rows[i] * HEADS * V_DIM) * sizeof *out_a);
            CHECK_MEM(lse_b, lse_a, (size_t)(rows[i] * HEADS) * sizeof *lse_a);
            if (p.scores) CHECK_MEM(scores_b, scores_a, TOKENS * sizeof *scores_a);
        }
    check_cache(kv);
    tkv_destroy(kv);
}
#else
TEST(parts_run_at_the_same_time) { SKIP("no threads here"); }
#endif

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(23);
    RUN(parts_have_the_bits_of_the_call);
    RUN(workspace_of_calls_that_count_scores);
    RUN(heads_of_a_range_are_those_of_all);
    RUN(offloaded_blocks_and_failures);
    RUN(wrong_arguments_are_refused);
    RUN(parts_run_at_the_same_time);
    return tkv_test_end();
}
