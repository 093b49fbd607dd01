/*
 * test_special.c - special values (NaN, infinities, the largest and smallest numbers) in k, v, q, mask, scale,
 * soft cap, ALiBi slopes, sink logits and merges. Every answer is the same under -ffast-math, with every
 * instruction set.
 */
#include "../tieredkv.h"
#include "kit.h"

#include <math.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, LEN = 300, MOST_ROWS = 40, HIDDEN_KEY = 100, ROW = HEADS * DIM };

static const uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu};
static const uint32_t nonfinite[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u,
                                     0xffffffffu, 0x7f800000u, 0xff800000u};

static const tkv_format_pair plans[][2] = {/* warm, archive */
                                           {{TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
                                           {{TKV_F32, TKV_F32}, {TKV_BF16, TKV_BF16}},
                                           {{TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}},
                                           {{TKV_INT8, TKV_FP4}, {TKV_KVQUANT3, TKV_KVQUANT3}}};

static float k_in[LEN * KV_HEADS * DIM], v_in[LEN * KV_HEADS * DIM], q_in[MOST_ROWS * ROW];
static float mask_in[MOST_ROWS * LEN];
static float out_a[MOST_ROWS * ROW], out_b[MOST_ROWS * ROW], lse_a[MOST_ROWS * HEADS],
    lse_b[MOST_ROWS * HEADS];
static float mass_a[LEN], mass_b[LEN];

typedef void (*special_check)(tkv_cache *kv, int rows, const char *label);

static tkv_config config_of(tkv_isa isa, int plan) {
    tkv_config cfg = shape_of(1, HEADS, KV_HEADS, DIM, 1, LEN);
    cfg.host.isa = isa;
    cfg.tiers.hot = pair_of(plan == 1 ? TKV_F32 : TKV_F16, plan == 1 ? TKV_F32 : TKV_F16);
    cfg.tiers.hot_tokens = 20;
    cfg.tiers.warm_tokens = 64;
    cfg.tiers.warm = plans[plan][0];
    cfg.tiers.archive = plans[plan][1];
    cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    return cfg;
}

static tkv_attend_params params_of(int rows, float *out, float *lse) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = rows;
    p.q = q_in;
    p.out = out;
    p.lse = lse;
    return p;
}

/* Calls `check` for each instruction set, plan and number of rows (one, and a prompt). */
static void each_cache(special_check check) {
    static const int rows[] = {1, MOST_ROWS};
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int isa, plan, i;
    for (isa = 0; isa < n_isas; isa++) {
        for (plan = 0; plan < COUNT(plans); plan++)
            for (i = 0; i < COUNT(rows); i++) {
                const tkv_config cfg = config_of(isas[isa], plan);
                tkv_rng rng = tkv_rng_seed(77);
                tkv_cache *kv = make(&cfg);
                char label[80];
                snprintf(label, sizeof label, "%s, %s, %d rows", tkv_get_name(TKV_NAME_ISA, isas[isa]),
                         tkv_get_name(TKV_NAME_FORMAT, cfg.tiers.warm.k), rows[i]);
                tkv_rng_fill(&rng, k_in, LEN * KV_HEADS * DIM, 1.0);
                tkv_rng_fill(&rng, v_in, LEN * KV_HEADS * DIM, 1.0);
                tkv_rng_fill(&rng, q_in, MOST_ROWS * ROW, 1.0);
                CHECK_EQ(tkv_append(kv, 0, 0, k_in, v_in, LEN / 2), TKV_OK);
                CHECK_EQ(tkv_append(kv, 0, 0, k_in + LEN / 2 * KV_HEADS * DIM,
                                    v_in + LEN / 2 * KV_HEADS * DIM, LEN - LEN / 2),
                         TKV_OK);
                check(kv, rows[i], label);
                sound(kv);
                tkv_destroy(kv);
            }
    }
}

static int is_minus_infinity(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u == 0xff800000u;
}

static int all_finite(const float *x, int n) {
    int i, finite = 1;
    for (i = 0; i < n; i++) finite &= tkv_test_is_finite((double)x[i]);
    return finite;
}

static double difference(const float *a, const float *b, int n) { /* relative, L2 */
    double d = 0.0, size = 0.0;
    int i;
    for (i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(d / (size > 0.0 ? size : 1.0));
}

/* >>mask */
static void fill_mask(uint32_t bits) { /* one column of it; the rest is 0 */
    int i;
    for (i = 0; i < MOST_ROWS * LEN; i++) mask_in[i] = i % LEN == HIDDEN_KEY ? tkv_test_float(bits) : 0.0f;
}

static void check_masks(tkv_cache *kv, int rows, const char *label) {
    static const uint32_t hides[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu,
                                     0xff800000u, 0xff7fffffu, 0xf149f2cau}; /* -inf, -FLT_MAX, -1e30 */
    static const uint32_t wins[] = {0x7f800000u, 0x7f7fffffu, 0x7149f2cau};  /* inf, FLT_MAX, 1e30 */
    static const uint32_t nothing[] = {0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u};
    tkv_attend_params a = params_of(rows, out_a, lse_a), b = params_of(rows, out_b, lse_b);
    static uint64_t bits[MOST_ROWS * 5];
    int i;
    a.scores = mass_a;
    b.scores = mass_b;
    memset(bits, 0xff, sizeof bits);
    for (i = 0; i < rows; i++) bits[i * 5 + HIDDEN_KEY / 64] &= ~((uint64_t)1 << HIDDEN_KEY % 64);
    a.mask_bits = bits; /* the same by bits: no float takes part */
    a.n_mask_bits = LEN;
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    b.mask = mask_in;
    for (i = 0; i < COUNT(hides); i++) {
        fill_mask(hides[i]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_MSG(!memcmp(out_a, out_b, (size_t)(rows * ROW) * sizeof(float)) &&
                      !memcmp(lse_a, lse_b, (size_t)(rows * HEADS) * sizeof(float)),
                  "%s: mask 0x%08lx does not hide its key", label, (unsigned long)hides[i]);
        CHECK_MSG(mass_b[HIDDEN_KEY] <= 0.0f, "%s: mask 0x%08lx, its key has mass", label,
                  (unsigned long)hides[i]);
        CHECK_EQ(tkv_attend_reference(kv, &b), TKV_OK);
        CHECK_MSG(difference(out_b, out_a, rows * ROW) < 0.1, "%s: reference, mask 0x%08lx", label,
                  (unsigned long)hides[i]);
    }
    a.mask_bits = NULL;
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    for (i = 0; i < COUNT(nothing); i++) {
        fill_mask(nothing[i]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_MSG(difference(out_b, out_a, rows * ROW) < 1e-6, "%s: mask 0x%08lx", label,
                  (unsigned long)nothing[i]);
    }
    for (i = 0; i < COUNT(wins); i++) {
        fill_mask(wins[i]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_NEAR(mass_b[HIDDEN_KEY], rows * HEADS, 1e-3);
        CHECK(all_finite(out_b, rows * ROW));
    }
    for (i = 0; i < COUNT(nans); i++) { /* all keys hidden: zeros, and -inf */
        int j, zero = 1;
        for (j = 0; j < MOST_ROWS * LEN; j++) mask_in[j] = tkv_test_float(nans[(i + j) % COUNT(nans)]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        for (j = 0; j < rows * ROW; j++) zero &= out_b[j] >= 0.0f && out_b[j] <= 0.0f;
        CHECK_MSG(zero && all_finite(out_b, rows * ROW), "%s: nothing is seen, and the output is not 0",
                  label);
        for (j = 0; j < rows * HEADS; j++) CHECK(is_minus_infinity(lse_b[j]));
    }
}
TEST(masks) { each_cache(check_masks); }

/* >>queries: a row that is not finite sees no key, the others do not notice */
static void check_queries(tkv_cache *kv, int rows, const char *label) {
    static float clean[MOST_ROWS * ROW];
    tkv_attend_params a = params_of(rows, out_a, lse_a), b = params_of(rows, out_b, lse_b);
    int i, h, j, row = rows / 2;
    static const float sinks[HEADS] = {-50.0f, -50.0f, -50.0f, -50.0f};
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    b.scores = mass_b;
    memcpy(clean, q_in, sizeof clean);
    for (i = 0; i < COUNT(nonfinite); i++) {
        const int head = i % HEADS, at = (row * HEADS + head) * DIM;
        int zero = 1;
        double mass = 0.0;
        q_in[at + 7 * i] = tkv_test_float(nonfinite[i]);
        for (j = 0; j < 2; j++) { /* attention, and its reference */
            memset(out_b, 0xff, sizeof out_b);
            CHECK_EQ(j ? tkv_attend_reference(kv, &b) : tkv_attend_ex(kv, &b), TKV_OK);
            for (h = 0; h < DIM; h++) zero &= out_b[at + h] >= 0.0f && out_b[at + h] <= 0.0f;
            CHECK_MSG(zero && all_finite(out_b + at, DIM), "%s: q 0x%08lx, its row is not 0", label,
                      (unsigned long)nonfinite[i]);
            CHECK(is_minus_infinity(lse_b[row * HEADS + head]));
            for (h = 0; h < rows * HEADS && !j; h++) { /* rows of a prompt choose their planes together */
                const double d = difference(out_b + h * DIM, out_a + h * DIM, DIM);
                if (h != row * HEADS + head) CHECK_LE(d, rows == 1 ? 0.0 : 0.03);
            }
            for (mass = 0.0, h = 0; h < LEN; h++) mass += (double)mass_b[h];
            CHECK_NEAR(mass, rows * HEADS - 1, 1e-3 * rows);
        }
        b.sink_logits = sinks; /* the row has no sink either: neither an output nor scores come of it */
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK(is_minus_infinity(lse_b[row * HEADS + head]));
        for (mass = 0.0, h = 0; h < LEN; h++) mass += (double)mass_b[h];
        CHECK_NEAR(mass, rows * HEADS - 1, 1e-3 * rows);
        b.sink_logits = NULL;
        b.softcap = 20.0f;
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK(is_minus_infinity(lse_b[row * HEADS + head]) && all_finite(out_b, rows * ROW));
        b.softcap = 0.0f;
        memcpy(q_in, clean, sizeof clean);
    }
    for (i = 0; i < rows * ROW; i++) q_in[i] = i % 2 ? 3e38f : -3e38f; /* logits overflow */
    for (i = 0; i < 2; i++) {                                          /* without and with learned sinks */
        double all = 0.0;
        int empty = 0;
        b.sink_logits = i ? sinks : NULL;
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_MSG(all_finite(out_b, rows * ROW), "%s: queries of 3e38", label);
        for (j = 0; j < rows * HEADS; j++) empty += is_minus_infinity(lse_b[j]);
        for (j = 0; j < LEN; j++) all += (double)mass_b[j];
        CHECK_MSG(all <= rows * HEADS - empty + 1e-3 * rows, "%s: %d rows are empty, mass is %g", label,
                  empty, all);
    }
    b.sink_logits = NULL;
    memcpy(q_in, clean, sizeof clean);
}
TEST(queries) { each_cache(check_queries); }

/* What a cache gathers of attention: nothing comes of a query that is not finite, with learned sinks or without. */
TEST(gathered_scores) {
    static const float sinks[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f};
    static float scores[LEN];
    int i, h, with_sinks;
    for (with_sinks = 0; with_sinks < 2; with_sinks++)
        for (i = 0; i < COUNT(nonfinite); i++) {
            tkv_config cfg = config_of(tkv_test_isa(), 1);
            tkv_attend_params p = params_of(1, out_a, lse_a);
            tkv_rng rng = tkv_rng_seed(78);
            tkv_cache *kv;
            double all = 0.0;
            cfg.importance.sample_every = 1;
            cfg.importance.strategy = TKV_IMPORTANCE_ACCUMULATION;
            kv = make(&cfg);
            tkv_rng_fill(&rng, k_in, LEN * KV_HEADS * DIM, 1.0);
            tkv_rng_fill(&rng, q_in, ROW, 1.0);
            CHECK_EQ(tkv_append(kv, 0, 0, k_in, k_in, LEN), TKV_OK);
            for (h = 0; h < HEADS; h++) q_in[h * DIM + i] = tkv_test_float(nonfinite[i]);
            p.sink_logits = with_sinks ? sinks : NULL;
            CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
            CHECK_EQ(tkv_get_importance(kv, 0, 0, 0, LEN, scores, NULL), TKV_OK);
            for (h = 0; h < LEN; h++) all += (double)scores[h];
            CHECK_NEAR(all, 0.0, 0.0);
            tkv_destroy(kv);
        }
}

/* >>scale, soft cap, slopes: what is not finite is refused, and nothing is written */
static void check_numbers(tkv_cache *kv, int rows, const char *label) {
    tkv_attend_params a = params_of(rows, out_a, lse_a), b = params_of(rows, out_b, lse_b);
    float slopes[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f};
    int i, field, j, untouched;
    for (field = 0; field < 3; field++)
        for (i = 0; i < COUNT(nonfinite); i++) {
            const float x = tkv_test_float(nonfinite[i]);
            b = params_of(rows, out_b, lse_b);
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
    b = params_of(rows, out_b, lse_b);
    b.softcap = -1.0f;
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    b.softcap = 3e38f; /* as good as none, within what tanh loses */
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    CHECK_MSG(all_finite(out_b, rows * ROW), "%s: a soft cap of 3e38", label);
    b.softcap = 1e-30f; /* all keys alike */
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    for (i = 0; i < HEADS; i++) CHECK_NEAR(lse_b[(rows - 1) * HEADS + i], log((double)LEN), 1e-3);
    b.softcap = 0.0f;
    b.scale = 1e-30f;
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    for (i = 0; i < HEADS; i++) CHECK_NEAR(lse_b[(rows - 1) * HEADS + i], log((double)LEN), 1e-3);
    b.scale = 3e38f;
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    CHECK_MSG(all_finite(out_b, rows * ROW), "%s: a scale of 3e38", label);
}
TEST(numbers_of_a_call) { each_cache(check_numbers); }

/* >>learned sinks: none where the number is not finite */
static void check_sinks(tkv_cache *kv, int rows, const char *label) {
    tkv_attend_params a = params_of(rows, out_a, lse_a), b = params_of(rows, out_b, lse_b);
    float sinks[HEADS];
    int i, h;
    CHECK_EQ(tkv_attend_ex(kv, &a), TKV_OK);
    b.sink_logits = sinks;
    for (i = 0; i < COUNT(nonfinite); i++) {
        for (h = 0; h < HEADS; h++) sinks[h] = tkv_test_float(nonfinite[(i + h) % COUNT(nonfinite)]);
        CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
        CHECK_MSG(!memcmp(out_a, out_b, (size_t)(rows * ROW) * sizeof(float)), "%s: sinks that are none",
                  label);
        CHECK_EQ(tkv_attend_reference(kv, &b), TKV_OK);
        CHECK_LE(difference(out_b, out_a, rows * ROW), 0.1);
    }
    for (h = 0; h < HEADS; h++) sinks[h] = h % 2 ? 3e38f : -3e38f; /* all of the softmax, or nothing */
    CHECK_EQ(tkv_attend_ex(kv, &b), TKV_OK);
    for (i = 0; i < rows * HEADS; i++) {
        float zeros[DIM] = {0.0f};
        if (i % 2) CHECK_LE(difference(out_b + i * DIM, zeros, DIM), 1e-30);
        else CHECK_MEM(out_b + i * DIM, out_a + i * DIM, DIM * sizeof(float));
    }
}
TEST(learned_sinks) { each_cache(check_sinks); }

/* >>keys and values: refused whole, or saturated */
static void check_values(tkv_isa isa, tkv_format hot, int saturate) {
    enum { N = 70 };
    static float k[N * KV_HEADS * DIM], v[N * KV_HEADS * DIM], k2[N * KV_HEADS * DIM], v2[N * KV_HEADS * DIM];
    tkv_config cfg = config_of(isa, 0);
    tkv_cache *kv;
    int i, side, at;
    cfg.tiers.hot = pair_of(hot, hot);
    cfg.host.nonfinite = saturate ? TKV_NONFINITE_SATURATE : TKV_NONFINITE_REFUSE;
    kv = make(&cfg);
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
TEST(keys_and_values) {
    static const tkv_format hot[] = {TKV_F32, TKV_F16, TKV_BF16};
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int isa, i;
    for (isa = 0; isa < n_isas; isa++) {
        for (i = 0; i < 2 * COUNT(hot); i++) check_values(isas[isa], hot[i / 2], i % 2);
    }
}

/* >>merge: a set of keys whose log-sum-exp is not finite is empty */
TEST(merge) {
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
    for (j = 0; j < 2; j++) { /* logits far apart: the larger one wins, without overflow */
        float a[1] = {3.0f}, b[1] = {5.0f}, lse_of_a = j ? 3e38f : -3e38f, lse_of_b = j ? -3e38f : 3e38f;
        tkv_merge_attention(a, &lse_of_a, b, &lse_of_b, 1, 1);
        CHECK_NEAR(a[0], j ? 3.0 : 5.0, 1e-6);
        CHECK_NEAR(lse_of_a, 3e38, 1e33);
    }
}

/* >>numbers of a config and of single calls */
TEST(numbers_elsewhere) {
    tkv_config cfg = config_of(tkv_test_isa(), 0);
    tkv_rng rng;
    tkv_cache *kv;
    int i;
    cfg.importance.sample_every = 1;
    cfg.budget.bytes = 1 << 22;
    kv = make(&cfg);
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
    sound(kv);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(masks);
    RUN(queries);
    RUN(gathered_scores);
    RUN(numbers_of_a_call);
    RUN(learned_sinks);
    RUN(keys_and_values);
    RUN(merge);
    RUN(numbers_elsewhere);
    return tkv_test_end();
}
