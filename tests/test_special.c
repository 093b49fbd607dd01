/*
 * test_special.c - special values (NaN, infinities, the largest and smallest numbers) in k, v, q, mask, scale,
 * soft cap, ALiBi slopes, sink logits and merges. The checks hold under -ffast-math and with every instruction set.
 */
#include "../tieredkv.h"
#include "kit.h"

#include <math.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, LEN = 300, MAX_ROWS = 40, HIDDEN_KEY = 100, ROW = HEADS * DIM };

static const uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu};
static const uint32_t nonfinite[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u,
                                     0xffffffffu, 0x7f800000u, 0xff800000u};

static const tkv_format_pair tier_formats[][2] = {/* warm, archive */
                                                  {{TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
                                                  {{TKV_F32, TKV_F32}, {TKV_BF16, TKV_BF16}},
                                                  {{TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}},
                                                  {{TKV_INT8, TKV_FP4}, {TKV_KVQUANT3, TKV_KVQUANT3}}};

static float k_in[LEN * KV_HEADS * DIM], v_in[LEN * KV_HEADS * DIM], q_in[MAX_ROWS * ROW];
static float mask_in[MAX_ROWS * LEN];
static float out_a[MAX_ROWS * ROW], out_b[MAX_ROWS * ROW], lse_a[MAX_ROWS * HEADS], lse_b[MAX_ROWS * HEADS];
static float scores_a[LEN], scores_b[LEN];

typedef void (*special_check)(tkv_cache *kv, int rows, const char *label);

static tkv_config make_config(tkv_isa isa, int formats) {
    tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, 1, LEN);
    cfg.host.isa = isa;
    cfg.tiers.hot = pair_of(formats == 1 ? TKV_F32 : TKV_F16, formats == 1 ? TKV_F32 : TKV_F16);
    cfg.tiers.hot_tokens = 20;
    cfg.tiers.warm_tokens = 64;
    cfg.tiers.warm = tier_formats[formats][0];
    cfg.tiers.archive = tier_formats[formats][1];
    cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    return cfg;
}

static tkv_attend_params make_params(int rows, float *out, float *lse) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = rows;
    p.q = q_in;
    p.out = out;
    p.lse = lse;
    return p;
}

/* Calls `check` on a cache of each instruction set and pair of formats, with one query and with MAX_ROWS. */
static void for_each_cache(special_check check) {
    static const int rows[] = {1, MAX_ROWS};
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int isa, formats, i;
    for (isa = 0; isa < n_isas; isa++) {
        for (formats = 0; formats < COUNT(tier_formats); formats++)
            for (i = 0; i < COUNT(rows); i++) {
                const tkv_config cfg = make_config(isas[isa], formats);
                tkv_rng rng = tkv_rng_seed(77);
                tkv_cache *kv = create_cache(&cfg);
                char label[80];
                snprintf(label, sizeof label, "%s, %s, %d rows", tkv_get_name(TKV_NAME_ISA, (int)isas[isa]),
                         tkv_get_name(TKV_NAME_FORMAT, (int)cfg.tiers.warm.k), rows[i]);
                tkv_rng_fill(&rng, k_in, LEN * KV_HEADS * DIM, 1.0);
                tkv_rng_fill(&rng, v_in, LEN * KV_HEADS * DIM, 1.0);
                tkv_rng_fill(&rng, q_in, MAX_ROWS * ROW, 1.0);
                CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, LEN / 2), TKV_OK);
                CHECK_EQ(tkv_append(kv, 0, 0, k_in + LEN / 2 * KV_HEADS * DIM,
                                    v_in + LEN / 2 * KV_HEADS * DIM, LEN - LEN / 2),
                         TKV_OK);
                check(kv, rows[i], label);
                check_cache(kv);
                tkv_destroy(kv);
            }
    }
}

static int is_minus_infinity(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u == 0xff800000u;
}

static int is_all_finite(const float *x, int n) {
    int i, finite = 1;
    for (i = 0; i < n; i++) finite &= tkv_test_is_finite((double)x[i]);
    return finite;
}

/* >>mask */
static void fill_mask(uint32_t bits) { /* the column of HIDDEN_KEY; other entries are 0 */
    int i;
    for (i = 0; i < MAX_ROWS * LEN; i++) mask_in[i] = i % LEN == HIDDEN_KEY ? tkv_test_float(bits) : 0.0f;
}

static void check_mask_values(tkv_cache *kv, int rows, const char *label) {
    static const uint32_t hiding_values[] = {
        0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu,
        0xff800000u, 0xff7fffffu, 0xf149f2cau}; /* -inf, -FLT_MAX, -1e30 */
    static const uint32_t winning_values[] = {0x7f800000u, 0x7f7fffffu, 0x7149f2cau}; /* inf, FLT_MAX, 1e30 */
    static const uint32_t neutral_values[] = {0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u};
    tkv_attend_params a = make_params(rows, out_a, lse_a), b = make_params(rows, out_b, lse_b);
    static uint64_t bits[MAX_ROWS * 5];
    int i;
    a.scores = scores_a;
    b.scores = scores_b;
    memset(bits, 0xff, sizeof bits);
    for (i = 0; i < rows; i++) bits[i * 5 + HIDDEN_KEY / 64] &= ~((uint64_t)1 << HIDDEN_KEY % 64);
    a.mask_bits = bits; /* hides the same key with a bit mask */
    a.n_mask_bits = LEN;
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    b.mask = mask_in;
    for (i = 0; i < COUNT(hiding_values); i++) {
        fill_mask(hiding_values[i]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_MSG(!memcmp(out_a, out_b, (size_t)(rows * ROW) * sizeof(float)) &&
                      !memcmp(lse_a, lse_b, (size_t)(rows * HEADS) * sizeof(float)),
                  "%s: mask 0x%08lx does not hide its key", label, (unsigned long)hiding_values[i]);
        CHECK_MSG(scores_b[HIDDEN_KEY] <= 0.0f, "%s: mask 0x%08lx, its key has a score", label,
                  (unsigned long)hiding_values[i]);
        CHECK_EQ(tkv_attend_reference(kv, &b), TKV_OK);
        CHECK_MSG(float_difference(out_b, out_a, rows * ROW) < 0.1, "%s: reference, mask 0x%08lx", label,
                  (unsigned long)hiding_values[i]);
    }
    a.mask_bits = NULL;
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    for (i = 0; i < COUNT(neutral_values); i++) {
        fill_mask(neutral_values[i]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_MSG(float_difference(out_b, out_a, rows * ROW) < 1e-6, "%s: mask 0x%08lx", label,
                  (unsigned long)neutral_values[i]);
    }
    for (i = 0; i < COUNT(winning_values); i++) {
        fill_mask(winning_values[i]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_NEAR(scores_b[HIDDEN_KEY], rows * HEADS, 1e-3);
        CHECK(is_all_finite(out_b, rows * ROW));
    }
    for (i = 0; i < COUNT(nans); i++) { /* all keys are hidden: out is 0, lse is -inf */
        int j, zero = 1;
        for (j = 0; j < MAX_ROWS * LEN; j++) mask_in[j] = tkv_test_float(nans[(i + j) % COUNT(nans)]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        for (j = 0; j < rows * ROW; j++) zero &= out_b[j] >= 0.0f && out_b[j] <= 0.0f;
        CHECK_MSG(zero && is_all_finite(out_b, rows * ROW),
                  "%s: all keys are hidden, and the output is not 0", label);
        for (j = 0; j < rows * HEADS; j++) CHECK(is_minus_infinity(lse_b[j]));
    }
}
TEST(special_mask_values) { for_each_cache(check_mask_values); }

/* >>queries: a row that is not finite attends to no key; other rows change by rounding at most */
static void check_nonfinite_queries(tkv_cache *kv, int rows, const char *label) {
    static float clean[MAX_ROWS * ROW];
    tkv_attend_params a = make_params(rows, out_a, lse_a), b = make_params(rows, out_b, lse_b);
    int i, h, j, row = rows / 2;
    static const float sink_logits[HEADS] = {-50.0f, -50.0f, -50.0f, -50.0f};
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    b.scores = scores_b;
    memcpy(clean, q_in, sizeof clean);
    for (i = 0; i < COUNT(nonfinite); i++) {
        const int head = i % HEADS, at = (row * HEADS + head) * DIM;
        int zero = 1;
        double score_sum = 0.0;
        q_in[at + 7 * i] = tkv_test_float(nonfinite[i]);
        for (j = 0; j < 2; j++) { /* attention, then its reference */
            memset(out_b, 0xff, sizeof out_b);
            CHECK_EQ(j ? tkv_attend_reference(kv, &b) : tkv_attend_ex(kv, &b), TKV_OK);
            for (h = 0; h < DIM; h++) zero &= out_b[at + h] >= 0.0f && out_b[at + h] <= 0.0f;
            CHECK_MSG(zero && is_all_finite(out_b + at, DIM), "%s: q 0x%08lx, its row is not 0", label,
                      (unsigned long)nonfinite[i]);
            CHECK(is_minus_infinity(lse_b[row * HEADS + head]));
            for (h = 0; h < rows * HEADS && !j; h++) { /* rows of a prefill share the choice of limbs */
                const double d = float_difference(out_b + h * DIM, out_a + h * DIM, DIM);
                if (h != row * HEADS + head) CHECK_LE(d, rows == 1 ? 0.0 : 0.03);
            }
            for (score_sum = 0.0, h = 0; h < LEN; h++) score_sum += (double)scores_b[h];
            CHECK_NEAR(score_sum, rows * HEADS - 1, 1e-3 * rows);
        }
        b.sink_logits = sink_logits; /* the row ignores its sink logit too: it has no output and no scores */
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK(is_minus_infinity(lse_b[row * HEADS + head]));
        for (score_sum = 0.0, h = 0; h < LEN; h++) score_sum += (double)scores_b[h];
        CHECK_NEAR(score_sum, rows * HEADS - 1, 1e-3 * rows);
        b.sink_logits = NULL;
        b.softcap = 20.0f;
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK(is_minus_infinity(lse_b[row * HEADS + head]) && is_all_finite(out_b, rows * ROW));
        b.softcap = 0.0f;
        memcpy(q_in, clean, sizeof clean);
    }
    for (i = 0; i < rows * ROW; i++) q_in[i] = i % 2 ? 3e38f : -3e38f; /* logits overflow */
    for (i = 0; i < 2; i++) {                                          /* without and with sink logits */
        double score_sum = 0.0;
        int n_empty = 0;
        b.sink_logits = i ? sink_logits : NULL;
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_MSG(is_all_finite(out_b, rows * ROW), "%s: queries of 3e38", label);
        for (j = 0; j < rows * HEADS; j++) n_empty += is_minus_infinity(lse_b[j]);
        for (j = 0; j < LEN; j++) score_sum += (double)scores_b[j];
        CHECK_MSG(score_sum <= rows * HEADS - n_empty + 1e-3 * rows,
                  "%s: %d rows are empty, the scores add up to %g", label, n_empty, score_sum);
    }
    b.sink_logits = NULL;
    memcpy(q_in, clean, sizeof clean);
}
TEST(nonfinite_queries) { for_each_cache(check_nonfinite_queries); }

/* A query that is not finite adds nothing to the accumulated attention scores, with and without sink logits. */
TEST(nonfinite_queries_add_no_scores) {
    static const float sink_logits[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f};
    static float scores[LEN];
    int i, h, has_sink_logits;
    for (has_sink_logits = 0; has_sink_logits < 2; has_sink_logits++)
        for (i = 0; i < COUNT(nonfinite); i++) {
            tkv_config cfg = make_config(tkv_test_isa(), 1);
            tkv_attend_params p = make_params(1, out_a, lse_a);
            tkv_rng rng = tkv_rng_seed(78);
            tkv_cache *kv;
            double score_sum = 0.0;
            cfg.importance.sample_every = 1;
            cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
            kv = create_cache(&cfg);
            tkv_rng_fill(&rng, k_in, LEN * KV_HEADS * DIM, 1.0);
            tkv_rng_fill(&rng, q_in, ROW, 1.0);
            CHECK_EQ(tkv_append(kv, 0, 0, k_in, k_in, LEN), TKV_OK);
            for (h = 0; h < HEADS; h++) q_in[h * DIM + i] = tkv_test_float(nonfinite[i]);
            p.sink_logits = has_sink_logits ? sink_logits : NULL;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, LEN, scores, NULL), TKV_OK);
            for (h = 0; h < LEN; h++) score_sum += (double)scores[h];
            CHECK_NEAR(score_sum, 0.0, 0.0);
            tkv_destroy(kv);
        }
}

/* >>scale, soft cap, slopes: a call with a number that is not finite is refused and writes nothing */
static void check_scale_softcap_alibi(tkv_cache *kv, int rows, const char *label) {
    tkv_attend_params a = make_params(rows, out_a, lse_a), b = make_params(rows, out_b, lse_b);
    float slopes[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f};
    int i, field, j, untouched;
    for (field = 0; field < 3; field++)
        for (i = 0; i < COUNT(nonfinite); i++) {
            const float x = tkv_test_float(nonfinite[i]);
            b = make_params(rows, out_b, lse_b);
            if (field == 0) b.scale = x;
            if (field == 1) b.softcap = x;
            if (field == 2) b.alibi_slopes = slopes;
            slopes[i % HEADS] = field == 2 ? x : 0.0f;
            memset(out_b, 0x55, sizeof out_b);
            CHECK_EQ(tkv_attend_ex(kv, &b), TKV_ERR_ARG);
            CHECK_EQ(tkv_attend_reference(kv, &b), TKV_ERR_ARG);
            for (untouched = 1, j = 0; j < rows * ROW; j++)
                untouched &= memcmp(out_b + j, "UUUU", sizeof(float)) == 0;
            CHECK_MSG(untouched, "%s: refused, and written", label);
            slopes[i % HEADS] = 0.0f;
        }
    b = make_params(rows, out_b, lse_b);
    b.softcap = -1.0f;
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    b.softcap = 3e38f; /* no effect but the rounding of tanh */
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    CHECK_MSG(is_all_finite(out_b, rows * ROW), "%s: a soft cap of 3e38", label);
    b.softcap = 1e-30f; /* all keys get equal weights */
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    for (i = 0; i < HEADS; i++) CHECK_NEAR(lse_b[(rows - 1) * HEADS + i], log((double)LEN), 1e-3);
    b.softcap = 0.0f;
    b.scale = 1e-30f;
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    for (i = 0; i < HEADS; i++) CHECK_NEAR(lse_b[(rows - 1) * HEADS + i], log((double)LEN), 1e-3);
    b.scale = 3e38f;
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    CHECK_MSG(is_all_finite(out_b, rows * ROW), "%s: a scale of 3e38", label);
}
TEST(special_scale_softcap_alibi) { for_each_cache(check_scale_softcap_alibi); }

/* >>sink logits: one that is not finite adds no sink */
static void check_sink_logits(tkv_cache *kv, int rows, const char *label) {
    tkv_attend_params a = make_params(rows, out_a, lse_a), b = make_params(rows, out_b, lse_b);
    float sink_logits[HEADS];
    int i, h;
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    b.sink_logits = sink_logits;
    for (i = 0; i < COUNT(nonfinite); i++) {
        for (h = 0; h < HEADS; h++) sink_logits[h] = tkv_test_float(nonfinite[(i + h) % COUNT(nonfinite)]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_MSG(!memcmp(out_a, out_b, (size_t)(rows * ROW) * sizeof(float)),
                  "%s: a sink logit that is not finite changed the output", label);
        CHECK_EQ(tkv_attend_reference(kv, &b), TKV_OK);
        CHECK_LE(float_difference(out_b, out_a, rows * ROW), 0.1);
    }
    for (h = 0; h < HEADS; h++)
        sink_logits[h] = h % 2 ? 3e38f : -3e38f; /* the sink takes all of the softmax, or nothing */
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    for (i = 0; i < rows * HEADS; i++) {
        float zeros[DIM] = {0.0f};
        if (i % 2) CHECK_LE(float_difference(out_b + i * DIM, zeros, DIM), 1e-30);
        else CHECK_MEM(out_b + i * DIM, out_a + i * DIM, DIM * sizeof(float));
    }
}
TEST(special_sink_logits) { for_each_cache(check_sink_logits); }

/* >>keys and values: the append is refused, or the values saturate */
static void check_nonfinite_values(tkv_isa isa, tkv_format hot, int saturate) {
    enum { N = 70 };
    static float k[N * KV_HEADS * DIM], v[N * KV_HEADS * DIM], k2[N * KV_HEADS * DIM], v2[N * KV_HEADS * DIM];
    tkv_config cfg = make_config(isa, 0);
    tkv_cache *kv;
    int i, side, at;
    cfg.tiers.hot = pair_of(hot, hot);
    cfg.host.nonfinite = saturate ? TKV_NONFINITE_SATURATE : TKV_NONFINITE_REFUSE;
    kv = create_cache(&cfg);
    for (side = 0; side < 2; side++)
        for (i = 0; i < COUNT(nonfinite); i++) {
            float *const x = side ? v : k, *const x2 = side ? v2 : k2;
            const float special = tkv_test_float(nonfinite[i]);
            const double want = tkv_test_is_nan((double)special) ? 0.0 : i == 4 ? 65504.0 : -65504.0;
            const double tolerance = hot == TKV_BF16 && i >= 4 ? 256.0 : 0.0;
            CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
            memset(k, 0, sizeof k);
            memset(v, 0, sizeof v);
            at = (i * 11 + 3) * KV_HEADS * DIM + 17 * i;
            x[at] = special;
            if (!saturate) {
                CHECK_EQ(tkv_append(kv, 0, 0, k, v, N), TKV_ERR_NONFINITE);
                CHECK_EQ(tkv_get_length(kv, 0, 0), 0);
                continue;
            }
            CHECK_EQ(tkv_append(kv, 0, 0, k, v, N), TKV_OK);
            CHECK_EQ(tkv_read(kv, 0, 0, 0, N, k2, v2), TKV_OK);
            CHECK_NEAR(x2[at], want, tolerance);
            x2[at] = 0.0f;
            for (at = 0; at < N * KV_HEADS * DIM; at++) CHECK(k2[at] <= 0.0f && k2[at] >= 0.0f);
        }
    tkv_destroy(kv);
}
TEST(nonfinite_keys_and_values) {
    static const tkv_format hot[] = {TKV_F32, TKV_F16, TKV_BF16};
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int isa, i;
    for (isa = 0; isa < n_isas; isa++) {
        for (i = 0; i < 2 * COUNT(hot); i++) check_nonfinite_values(isas[isa], hot[i / 2], i % 2);
    }
}

/* >>merge: a part whose log-sum-exp is not finite counts as empty */
TEST(nonfinite_lse_in_merge) {
    enum { ROWS = 3 };
    int i, j;
    for (i = 0; i < COUNT(nonfinite); i++) {
        const float none = tkv_test_float(nonfinite[i]);
        float a[ROWS * 2] = {1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f}, lse_of_a[ROWS] = {1.0f, none, none};
        float b[ROWS * 2] = {none, none, 7.0f, 8.0f, 9.0f, 9.0f}, lse_of_b[ROWS] = {none, 2.0f, none};
        tkv_merge_attention(a, lse_of_a, b, lse_of_b, ROWS, 2);
        CHECK_NEAR(a[0], 1.0, 0.0);
        CHECK_NEAR(a[1], 2.0, 0.0);
        CHECK_NEAR(lse_of_a[0], 1.0, 0.0);
        CHECK_NEAR(a[2], 7.0, 0.0);
        CHECK_NEAR(a[3], 8.0, 0.0);
        CHECK_NEAR(lse_of_a[1], 2.0, 0.0);
        CHECK_NEAR(a[4], 5.0, 0.0);
        CHECK(!tkv_test_is_finite((double)lse_of_a[2]));
    }
    for (j = 0; j < 2; j++) { /* log-sum-exps far apart: the larger one wins, without overflow */
        float a[1] = {3.0f}, b[1] = {5.0f}, lse_of_a = j ? 3e38f : -3e38f, lse_of_b = j ? -3e38f : 3e38f;
        tkv_merge_attention(a, &lse_of_a, b, &lse_of_b, 1, 1);
        CHECK_NEAR(a[0], j ? 3.0 : 5.0, 1e-6);
        CHECK_NEAR(lse_of_a, 3e38, 1e33);
    }
}

/* >>numbers of configs and of other calls */
TEST(nonfinite_numbers_elsewhere) {
    tkv_config cfg = make_config(tkv_test_isa(), 0);
    tkv_rng rng;
    tkv_cache *kv;
    int i;
    cfg.importance.sample_every = 1;
    cfg.budget.bytes = 1 << 22;
    kv = create_cache(&cfg);
    rng = tkv_rng_seed(5);
    tkv_rng_fill(&rng, k_in, LEN * KV_HEADS * DIM, 1.0);
    CHECK_EQ(tkv_append(kv, 0, 0, k_in, k_in, 64), TKV_OK);
    for (i = 0; i < COUNT(nonfinite); i++) {
        const float x = tkv_test_float(nonfinite[i]);
        float score[2] = {1.0f, x};
        float order[2];
        uint64_t victims[1];
        tkv_evict_config policy;
        tkv_evict_view view;
        tkv_config bad = cfg;
        tkv_feedback f;
        memset(&policy, 0, sizeof policy);
        memset(&view, 0, sizeof view);
        policy.policy = TKV_EVICT_SCORES;
        view.n = 2;
        view.user_scores = score;
        CHECK_EQ(tkv_add_scores(kv, 0, 0, 3, 2, score), TKV_ERR_NONFINITE);
        CHECK_EQ(tkv_select_victims(&policy, &view, 1, order, victims, NULL), TKV_ERR_NONFINITE);
        if (i < COUNT(nans)) CHECK_EQ(tkv_report_pressure(kv, x), TKV_ERR_ARG);
        CHECK_EQ(tkv_init_feedback(&f, NULL, NULL, 0), TKV_OK);
        CHECK_EQ(tkv_observe_score(&f, x), TKV_ERR_ARG);
        bad.model.scale = x;
        CHECK_EQ(tkv_validate_config(&bad, NULL, 0), TKV_ERR_CONFIG);
        bad = cfg;
        bad.budget.pressure.alpha = x;
        CHECK_EQ(tkv_validate_config(&bad, NULL, 0), TKV_ERR_CONFIG);
        bad = cfg;
        bad.budget.pressure.hysteresis = x;
        CHECK_EQ(tkv_validate_config(&bad, NULL, 0), TKV_ERR_CONFIG);
        bad = cfg;
        bad.budget.pressure.threshold[0] = x;
        CHECK_EQ(tkv_validate_config(&bad, NULL, 0), TKV_ERR_CONFIG);
        bad = cfg;
        bad.importance.decay = x;
        CHECK_EQ(tkv_validate_config(&bad, NULL, 0), TKV_ERR_CONFIG);
        bad = cfg;
        bad.model.rope.dim = 64;
        bad.model.rope.base = x;
        CHECK_EQ(tkv_validate_config(&bad, NULL, 0), TKV_ERR_CONFIG);
    }
    check_cache(kv);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(special_mask_values);
    RUN(nonfinite_queries);
    RUN(nonfinite_queries_add_no_scores);
    RUN(special_scale_softcap_alibi);
    RUN(special_sink_logits);
    RUN(nonfinite_keys_and_values);
    RUN(nonfinite_lse_in_merge);
    RUN(nonfinite_numbers_elsewhere);
    return tkv_test_end();
}
