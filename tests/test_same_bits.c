/*
 * test_same_bits.c - which answers have the same bits (chapter 12 of the manual, SECURITY.md).
 *
 * A text is appended in chunks of several sizes, alone and beside another sequence. Its stored values and the answer
 * to one query must be the same bits wherever the manual promises it. Where the manual names a cause of other bits,
 * a test shows that the cause is real.
 *
 * cc -O2 tests/test_same_bits.c examples/tieredkv.c -o test_same_bits -lm && ./test_same_bits
 */
#include "kit.h"

enum { LAYERS = 2, HEADS = 2, KV_HEADS = 1, DIM = 64, TOKENS = 705, CHUNK = 512, WARM = 128, SEQS = 3 };
enum { K_ROW = KV_HEADS * DIM, Q_ROW = HEADS * DIM };

typedef struct text { /* what a model gives: keys and values whose channels differ, queries that weigh them */
    float k[LAYERS][TOKENS][K_ROW], v[LAYERS][TOKENS][K_ROW], q[LAYERS][TOKENS][Q_ROW];
} text;
static text ours, theirs;

typedef struct answers { /* of our text: each query's, when it came, and what is stored in the end */
    float said[LAYERS][TOKENS][Q_ROW], last[LAYERS][Q_ROW];
    float k[LAYERS][TOKENS][K_ROW], v[LAYERS][TOKENS][K_ROW];
} answers;
static answers first, second;

typedef enum company {
    ALONE,
    BESIDE,
    IN_BATCH
} company; /* the other text: nowhere, in calls of its own, in ours */

typedef struct plan {
    const char *name;
    tkv_format warm, archive; /* K and V; TKV_FORMAT_DEFAULT: A and R formats */
    int warm_tokens;          /* TKV_OFF: blocks are coded once */
    int is_calibrated;
    size_t budget;
    int keep; /* 0, or tokens that H2O keeps, beside 8 anchors */
} plan;
static const plan learning = {"tables are learned", TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT, WARM, 0, 0, 0};
/* Nothing is learned and there is no budget. */
static const plan fixed[] = {{"KIVI", TKV_KIVI4, TKV_KIVI2, WARM, 0, 0, 0},
                             {"Q8", TKV_Q8, TKV_Q8, WARM, 0, 0, 0},
                             {"tokens alone", TKV_INT8, TKV_FP4, WARM, 0, 0, 0},
                             {"subspaces", TKV_SUBSPACE4, TKV_SUBSPACE2, WARM, 0, 0, 0},
                             {"no warm tier", TKV_KIVI4, TKV_KIVI2, TKV_OFF, 0, 0, 0},
                             {"calibration", TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT, WARM, 1, 0, 0}};

static unsigned char calibration[1 << 20];
static size_t calibration_bytes;

static void make_text(text *t, uint64_t seed) {
    tkv_rng rng = tkv_rng_seed(seed);
    float size[K_ROW], weight[Q_ROW];
    int layer, token, i;
    for (i = 0; i < K_ROW; i++) size[i] = (float)(.3 + 2.0 * tkv_rng_uniform(&rng));
    for (i = 0; i < Q_ROW; i++) weight[i] = (float)(.1 + tkv_rng_uniform(&rng));
    for (layer = 0; layer < LAYERS; layer++)
        for (token = 0; token < TOKENS; token++) {
            for (i = 0; i < K_ROW; i++) t->k[layer][token][i] = size[i] * (float)tkv_rng_gauss(&rng);
            for (i = 0; i < K_ROW; i++) t->v[layer][token][i] = (float)tkv_rng_gauss(&rng);
            for (i = 0; i < Q_ROW; i++) t->q[layer][token][i] = weight[i] * (float)tkv_rng_gauss(&rng);
        }
}

static tkv_cache *create_for(const plan *p) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, SEQS, CHUNK);
    tkv_cache *kv;
    cfg.tiers.warm_tokens = p->warm_tokens;
    cfg.tiers.warm = pair_of(p->warm, p->warm);
    cfg.tiers.archive = pair_of(p->archive, p->archive);
    cfg.budget.bytes = p->budget;
    if (p->keep) cfg.evict.policy = TKV_EVICT_H2O, cfg.evict.keep_tokens = p->keep, cfg.tiers.n_anchors = 8;
    kv = create_cache(&cfg);
    if (p->is_calibrated) CHECK_EQ(tkv_load_calibration(kv, calibration, calibration_bytes), TKV_OK);
    return kv;
}

/* n tokens from `from` on, in one layer. out: NULL, or the answers to their queries. */
static void read_tokens(tkv_cache *kv, int seq, const text *t, int layer, int from, int n, float *out) {
    CHECK_EQ(tkv_append(kv, seq, layer, t->k[layer][from], t->v[layer][from], n), TKV_OK);
    if (out) CHECK_EQ(tkv_attend(kv, seq, layer, t->q[layer][from], n, out), TKV_OK);
}

/* The same of both texts, in one call each: sequence 0 is ours, sequence 1 theirs. out: as above, of ours. */
static void read_batch(tkv_cache *kv, int layer, int from, int n, float *out) {
    static float k[2 * CHUNK * K_ROW], v[2 * CHUNK * K_ROW], q[2 * CHUNK * Q_ROW], said[2 * CHUNK * Q_ROW];
    const size_t kv_bytes = (size_t)n * K_ROW * sizeof *k, q_bytes = (size_t)n * Q_ROW * sizeof *q;
    tkv_rows rows[2];
    tkv_append_params append;
    tkv_attend_params attend;
    int i;
    for (i = 0; i < 2; i++) {
        const text *t = i ? &theirs : &ours;
        rows[i].seq = i, rows[i].n = n;
        memcpy(k + i * n * K_ROW, t->k[layer][from], kv_bytes);
        memcpy(v + i * n * K_ROW, t->v[layer][from], kv_bytes);
        memcpy(q + i * n * Q_ROW, t->q[layer][from], q_bytes);
    }
    memset(&append, 0, sizeof append);
    append.batch = rows, append.n_batch = 2, append.layer = layer, append.k = k, append.v = v;
    CHECK_EQ(tkv_append_ex(kv, &append), TKV_OK);
    if (!out) return;
    memset(&attend, 0, sizeof attend);
    attend.batch = rows, attend.n_batch = 2, attend.layer = layer, attend.q = q, attend.out = said;
    CHECK_EQ(tkv_attend_ex(kv, &attend), TKV_OK);
    memcpy(out, said, q_bytes);
}

/* Reads our text in chunks. The last token comes alone, so that it finds the tiers settled. asks: 1: each token has a
 * query; in a quick run those of one chunk of four, and the last one. */
static void read_text(const plan *p, int chunk, company who, int asks, answers *a) {
    tkv_cache *kv = create_for(p);
    int from, n, layer;
    for (from = 0; from < TOKENS; from += n) {
        n = from == TOKENS - 1 ? 1 : TOKENS - 1 - from < chunk ? TOKENS - 1 - from : chunk;
        for (layer = 0; layer < LAYERS; layer++) {
            const int has_turn = from / chunk % tkv_test_stride(4, 1) == 0 || from == TOKENS - 1;
            float *said = asks && has_turn ? a->said[layer][from] : NULL;
            if (who == IN_BATCH) read_batch(kv, layer, from, n, said);
            else read_tokens(kv, 0, &ours, layer, from, n, said);
            if (who == BESIDE) read_tokens(kv, 1, &theirs, layer, from, n, NULL);
        }
    }
    for (layer = 0; layer < LAYERS; layer++) {
        CHECK_EQ(tkv_attend(kv, 0, layer, ours.q[layer][0], 1, a->last[layer]), TKV_OK);
        if (p->keep) continue; /* some tokens are gone */
        CHECK_EQ(tkv_read(kv, 0, layer, 0, TOKENS, a->k[layer][0], a->v[layer][0]), TKV_OK);
    }
    check_cache(kv);
    tkv_destroy(kv);
}

static int is_stored_alike(const answers *a, const answers *b) {
    return memcmp(a->k, b->k, sizeof a->k) == 0 && memcmp(a->v, b->v, sizeof a->v) == 0;
}

static int is_answered_alike(const answers *a, const answers *b) {
    return memcmp(a->last, b->last, sizeof a->last) == 0;
}

/* The distance of two arrays, against the size of the first. */
static double distance(const float *a, const float *b, size_t n) {
    double difference = 0.0, size = 0.0;
    size_t i;
    for (i = 0; i < n; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)a[i] * (double)a[i];
    }
    return sqrt(difference / (size > 0.0 ? size : 1.0));
}

static double distance_of_last(const answers *a, const answers *b) {
    return distance(a->last[0], b->last[0], LAYERS * Q_ROW);
}

/* The error of the last answers against an exact cache. */
static double own_error(const answers *a) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, 1, TOKENS);
    static float exact[LAYERS][Q_ROW];
    tkv_cache *kv;
    int layer;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    kv = create_cache(&cfg);
    for (layer = 0; layer < LAYERS; layer++) {
        read_tokens(kv, 0, &ours, layer, 0, TOKENS, NULL);
        CHECK_EQ(tkv_attend(kv, 0, layer, ours.q[layer][0], 1, exact[layer]), TKV_OK);
    }
    tkv_destroy(kv);
    return distance(exact[0], a->last[0], LAYERS * Q_ROW);
}

/* A calibration of both texts, by a cache that read them. */
static void prepare(void) {
    tkv_cache *kv;
    int layer, seq;
    if (calibration_bytes) return;
    make_text(&ours, 1);
    make_text(&theirs, 2);
    kv = create_for(&learning);
    for (seq = 0; seq < 2; seq++)
        for (layer = 0; layer < LAYERS; layer++) {
            read_tokens(kv, seq, seq ? &theirs : &ours, layer, 0, CHUNK, NULL);
            read_tokens(kv, seq, seq ? &theirs : &ours, layer, CHUNK, TOKENS - CHUNK, NULL);
        }
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_save_calibration(kv, calibration, sizeof calibration, &calibration_bytes), TKV_OK);
    tkv_destroy(kv);
}

/* >>the same bits */
TEST(the_same_calls_give_the_same_bits) {
    const plan under_budget = {"budget", TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT, WARM, 0, 400000, 0};
    const plan *plans[2];
    int i;
    prepare();
    plans[0] = &learning, plans[1] = &under_budget;
    for (i = 0; i < 2; i++) {
        read_text(plans[i], 16, BESIDE, 1, &first);
        read_text(plans[i], 16, BESIDE, 1, &second);
        CHECK_MEM(first.said, second.said, sizeof first.said);
        CHECK_MSG(is_stored_alike(&first, &second) && is_answered_alike(&first, &second), "%s",
                  plans[i]->name);
    }
}

/* Chunks of at most warm_tokens: each block passes through the same tiers. */
TEST(stored_alike_in_chunks_up_to_the_warm_tier) {
    static const int chunks[] = {7, 64, 100, WARM};
    int i, c;
    prepare();
    for (i = 0; i < COUNT(fixed); i += tkv_test_quick() ? COUNT(fixed) - 1 : 1) { /* the first and the last */
        read_text(&fixed[i], 1, ALONE, 0, &first);
        for (c = 0; c < COUNT(chunks); c++) {
            read_text(&fixed[i], chunks[c], ALONE, 0, &second);
            CHECK_MSG(is_stored_alike(&first, &second), "%s, chunks of %d", fixed[i].name, chunks[c]);
            CHECK_MSG(is_answered_alike(&first, &second), "%s, chunks of %d", fixed[i].name, chunks[c]);
        }
    }
}

/* A longer chunk takes blocks past the warm tier: they are coded once, from exact values. */
TEST(a_long_chunk_skips_the_warm_tier) {
    int i, skips;
    prepare();
    for (i = 0; i < COUNT(fixed); i += tkv_test_quick() ? COUNT(fixed) - 1 : 1) {
        skips = fixed[i].warm_tokens != TKV_OFF && fixed[i].warm != TKV_Q8; /* coded in two formats */
        read_text(&fixed[i], 1, ALONE, 0, &first);
        read_text(&fixed[i], CHUNK, ALONE, 0, &second);
        CHECK_MSG(is_stored_alike(&first, &second) == !skips, "%s", fixed[i].name);
        CHECK_MSG(is_answered_alike(&first, &second) == !skips, "%s", fixed[i].name);
        CHECK_LE(distance_of_last(&first, &second), own_error(&first));
    }
}

TEST(other_sequences_change_no_bit_without_learning_and_budget) {
    int i, c, who;
    prepare();
    for (i = 0; i < COUNT(fixed); i += tkv_test_quick() ? COUNT(fixed) - 1 : 1)
        for (c = 1; c <= 64; c += 63) {
            read_text(&fixed[i], c, ALONE, c == 1, &first);
            for (who = BESIDE; who <= IN_BATCH; who++) {
                read_text(&fixed[i], c, (company)who, c == 1, &second);
                CHECK_MSG(is_stored_alike(&first, &second) && is_answered_alike(&first, &second),
                          "%s, chunks of %d", fixed[i].name, c);
                if (c > 1 && who == IN_BATCH)
                    continue; /* many rows: how they are added depends on the call */
                CHECK_MEM(first.said, second.said, sizeof first.said);
            }
        }
}

/* Scores, and what is chosen by them, are those of a sequence alone. They are taken from some queries of a call, so chunk
 * sizes change them. */
TEST(eviction_and_anchors_depend_on_chunks_alone) {
    plan p = fixed[0];
    int who;
    prepare();
    p.keep = 256;
    read_text(&p, 1, ALONE, 1, &first);
    for (who = BESIDE; who <= IN_BATCH; who++) {
        read_text(&p, 1, (company)who, 1, &second);
        CHECK_MEM(first.said, second.said, sizeof first.said);
        CHECK(is_answered_alike(&first, &second));
    }
    read_text(&p, 7, ALONE, 1, &second);
    CHECK(!is_answered_alike(&first, &second));
}

/* With fewer than 16 rows for a KV head, an answer does not depend on what else is in the call. */
TEST(an_answer_alone_and_in_batches) {
    static float alone[7 * Q_ROW], batch[3 * 7 * Q_ROW], q[3 * 7 * Q_ROW];
    tkv_cache *kv;
    tkv_rows rows[3];
    tkv_attend_params p;
    int seq, layer, n, from;
    prepare();
    kv = create_for(&fixed[COUNT(fixed) - 1]);
    for (seq = 0; seq < 3; seq++)
        for (layer = 0; layer < LAYERS; layer++)
            for (from = 0; from < 640 - 192 * seq; from += 64)
                read_tokens(kv, seq, seq == 1 ? &theirs : &ours, layer, from, 64, NULL);
    for (n = 1; n * (HEADS / KV_HEADS) < 16; n += 2)
        for (layer = 0; layer < LAYERS; layer++) {
            for (seq = 0; seq < 3; seq++) {
                rows[seq].seq = seq, rows[seq].n = n;
                memcpy(q + seq * n * Q_ROW, ours.q[layer][seq], (size_t)n * Q_ROW * sizeof *q);
            }
            memset(&p, 0, sizeof p);
            p.batch = rows, p.n_batch = 3, p.layer = layer, p.q = q, p.out = batch;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            for (seq = 0; seq < 3; seq++) {
                CHECK_EQ(tkv_attend(kv, seq, layer, q + seq * n * Q_ROW, n, alone), TKV_OK);
                CHECK_MEM(alone, batch + seq * n * Q_ROW, (size_t)n * Q_ROW * sizeof *alone);
            }
        }
    tkv_destroy(kv);
}

/* >>other bits: the causes that the manual names are real */
TEST(learned_tables_depend_on_chunks_and_on_other_sequences) {
    int who;
    double own;
    prepare();
    read_text(&learning, 1, ALONE, 1, &first);
    own = own_error(&first);
    for (who = ALONE; who <= IN_BATCH; who++) {
        read_text(&learning, who == ALONE ? 64 : 1, (company)who, 1, &second);
        CHECK(!is_stored_alike(&first, &second));
        CHECK_LE(own / 100.0, distance_of_last(&first, &second));
        CHECK_LE(distance_of_last(&first, &second), own);
    }
}

TEST(a_budget_lets_other_sequences_change_answers) {
    plan p = fixed[COUNT(fixed) - 1]; /* with a calibration: tables are the same */
    prepare();
    p.budget = 300000;
    read_text(&p, 1, ALONE, 0, &first);
    read_text(&p, 1, BESIDE, 0, &second);
    CHECK(!is_stored_alike(&first, &second));
    CHECK_LE(1e-5, distance_of_last(&first, &second));
}

/* A query sees its chunk, and what came shortly before it, exactly. So its answer depends on where chunks end. */
TEST(answers_inside_a_chunk_see_more_exact_tokens) {
    prepare();
    read_text(&fixed[0], 1, ALONE, 1, &first);
    read_text(&fixed[0], WARM, ALONE, 1, &second);
    CHECK(is_answered_alike(&first, &second));
    CHECK_LE(1e-3, distance(first.said[0][0], second.said[0][0], LAYERS * TOKENS * Q_ROW));
}

/* A block that sequences share stays in the hottest tier that one of them has it in. So an append to one changes no
 * present answer of the other, but how later ones are stored. */
TEST(forks_change_how_shared_tokens_are_stored_later) {
    static float before[LAYERS][Q_ROW], after[LAYERS][Q_ROW];
    tkv_cache *kv;
    int token, layer;
    prepare();
    kv = create_for(&fixed[0]);
    for (token = 0; token < 300; token++)
        for (layer = 0; layer < LAYERS; layer++) read_tokens(kv, 0, &ours, layer, token, 1, NULL);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++)
        CHECK_EQ(tkv_attend(kv, 1, layer, ours.q[layer][0], 1, before[layer]), TKV_OK);
    for (token = 300; token < 700; token++)
        for (layer = 0; layer < LAYERS; layer++) read_tokens(kv, 0, &ours, layer, token, 1, NULL);
    for (layer = 0; layer < LAYERS; layer++)
        CHECK_EQ(tkv_attend(kv, 1, layer, ours.q[layer][0], 1, after[layer]), TKV_OK);
    CHECK_MEM(before, after, sizeof before);
    for (token = 0; token < 700; token++)
        for (layer = 0; layer < LAYERS; layer++) read_tokens(kv, 2, &ours, layer, token, 1, NULL);
    for (layer = 0; layer < LAYERS; layer++) {
        CHECK_EQ(tkv_attend(kv, 0, layer, ours.q[layer][0], 1, before[layer]), TKV_OK);
        CHECK_EQ(tkv_attend(kv, 2, layer, ours.q[layer][0], 1, after[layer]), TKV_OK);
    }
    CHECK_LE(1e-3,
             distance(before[0], after[0], LAYERS * Q_ROW)); /* with a fork, and the same text without one */
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(the_same_calls_give_the_same_bits);
    RUN(stored_alike_in_chunks_up_to_the_warm_tier);
    RUN(a_long_chunk_skips_the_warm_tier);
    RUN(other_sequences_change_no_bit_without_learning_and_budget);
    RUN(eviction_and_anchors_depend_on_chunks_alone);
    RUN(an_answer_alone_and_in_batches);
    RUN(learned_tables_depend_on_chunks_and_on_other_sequences);
    RUN(a_budget_lets_other_sequences_change_answers);
    RUN(answers_inside_a_chunk_see_more_exact_tokens);
    RUN(forks_change_how_shared_tokens_are_stored_later);
    return tkv_test_end();
}
