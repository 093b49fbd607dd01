/*
 * test_latents.c - V inside K (model.v_in_k): the latents of MLA, which are stored once.
 *
 * Attention is compared with double precision in every format that holds V inside K, on every instruction set. V is
 * computed here from the keys as appended, so a mistake in what V is cannot hide.
 */
#include "../tieredkv.h"
#include "kit.h"

enum { MAX_HEADS = 128, MAX_KV_HEADS = 2, MAX_DIM = 576, TOKENS = 300, ROWS = 9 };
/* Long sequences have about TIMES * TOKENS tokens: they are split over keys, into three ranges of blocks. */
enum { TIMES = 5 };

typedef struct shape {
    const char *name;
    int heads, kv_heads, dim, v_dim, group;
} shape;

static const shape shapes[] = {
    {"DeepSeek V3", 128, 1, 576, 512, 64}, {"DeepSeek V2 Lite", 16, 1, 576, 512, 32},
    {"odd channels", 20, 1, 299, 171, 64}, {"two heads", 34, 2, 96, 64, 32},
    {"V is all of K", 24, 1, 80, 80, 64},  {"few channels", 6, 2, 20, 3, 64},
};

static const tkv_format formats[] = {TKV_F32,   TKV_F16, TKV_BF16, TKV_Q8,  TKV_KIVI4, TKV_KIVI3,
                                     TKV_KIVI2, TKV_A40, TKV_A30,  TKV_A25, TKV_A20,   TKV_A15};

static float k_in[TOKENS * MAX_KV_HEADS * MAX_DIM], k_out[TOKENS * MAX_KV_HEADS * MAX_DIM],
    v_out[TOKENS * MAX_KV_HEADS * MAX_DIM];
static float q_in[ROWS * MAX_HEADS * MAX_DIM], out_a[ROWS * MAX_HEADS * MAX_DIM],
    out_b[ROWS * MAX_HEADS * MAX_DIM];
static uint64_t workspace[1 << 19];
static tkv_rng rng;

static tkv_config config_of(const shape *s, tkv_format f) {
    tkv_config cfg = make_sized_config(1, s->heads, s->kv_heads, s->dim, 2, TIMES * TOKENS);
    cfg.model.v_head_dim = s->v_dim;
    cfg.model.v_in_k = 1;
    cfg.format.group_size = s->group;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(f, TKV_FORMAT_DEFAULT);
    return cfg;
}

/* Keys whose first channels have other variances than the last ones, and a mean. */
static void fill_keys(const shape *s) {
    int t, c;
    tkv_rng_fill(&rng, k_in, (size_t)(TOKENS * s->kv_heads * s->dim), 1.0);
    for (t = 0; t < TOKENS * s->kv_heads; t++)
        for (c = 0; c < s->dim; c++)
            k_in[t * s->dim + c] =
                k_in[t * s->dim + c] * (0.3f + (float)(c % 5)) + (c % 7 == 3 ? 2.0f : 0.0f);
}

static void append_tokens(tkv_cache *kv, const shape *s, int seq, int n) {
    int from, step;
    for (from = 0; from < n; from += step) {
        step = n - from < 90 ? n - from : 90;
        CHECK_EQ(tkv_append(kv, seq, 0, k_in + from * s->kv_heads * s->dim, NULL, step), TKV_OK);
    }
}

/* A cache with all tokens coded, but the newest. times: the tokens before the last 5 come so many times. */
static tkv_cache *make_long_cache(const shape *s, const tkv_config *cfg, int times) {
    tkv_cache *kv = create_cache(cfg);
    int i;
    for (i = 0; i < times; i++) append_tokens(kv, s, 0, TOKENS - 5);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    CHECK_EQ(tkv_append(kv, 0, 0, k_in + (TOKENS - 5) * s->kv_heads * s->dim, NULL, 5), TKV_OK);
    check_cache(kv);
    return kv;
}

static tkv_cache *make_coded_cache(const shape *s, const tkv_config *cfg) {
    return make_long_cache(s, cfg, 1);
}

/* Attention of a head of the newest row over keys [TOKENS][kv_heads][dim], in double. */
static double exact_difference(const shape *s, const float *keys, double scale, int h, const float *q,
                               const float *out) {
    static double w[TOKENS];
    const int g = h / (s->heads / s->kv_heads);
    double top = -1e300, sum = 0.0, err_sq = 0.0, sum_sq = 0.0;
    int t, c;
    for (t = 0; t < TOKENS; t++) {
        for (w[t] = 0.0, c = 0; c < s->dim; c++)
            w[t] += (double)q[c] * (double)keys[(t * s->kv_heads + g) * s->dim + c];
        w[t] *= scale;
        top = w[t] > top ? w[t] : top;
    }
    for (t = 0; t < TOKENS; t++) sum += w[t] = exp(w[t] - top);
    for (c = 0; c < s->v_dim; c++) {
        double x = 0.0;
        for (t = 0; t < TOKENS; t++) x += w[t] / sum * (double)keys[(t * s->kv_heads + g) * s->dim + c];
        err_sq += (x - (double)out[c]) * (x - (double)out[c]);
        sum_sq += x * x;
    }
    return sqrt(err_sq / sum_sq);
}

/* Compares attention with double precision over the decoded keys, which must give the values as well. */
static void check_attention(tkv_cache *kv, const shape *s, int rows, const char *label) {
    const double scale = 0.25 / sqrt((double)s->dim);
    tkv_attend_params p;
    double arithmetic, worst = 0.0;
    int h;
    memset(&p, 0, sizeof p);
    p.n = rows;
    p.q = q_in;
    p.out = out_a;
    p.scale = (float)scale;
    tkv_rng_fill(&rng, q_in, (size_t)(rows * s->heads * s->dim), 1.0);
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.out = out_b;
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
    arithmetic = float_difference(out_a, out_b, rows * s->heads * s->v_dim);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, TOKENS, k_out, v_out), TKV_OK);
    for (h = 0; h < s->heads; h += 1 + s->heads / 9) {
        const int at = (rows - 1) * s->heads + h;
        const double e =
            exact_difference(s, k_out, (double)p.scale, h, q_in + at * s->dim, out_b + at * s->v_dim);
        worst = e > worst ? e : worst;
    }
    CHECK_MSG(worst < 1e-5, "%s: the reference is off by %.3g", label, worst);
    for (worst = 0.0, h = 0; h < s->heads; h += 1 + s->heads / 9) {
        const int at = (rows - 1) * s->heads + h;
        const double e =
            exact_difference(s, k_in, (double)p.scale, h, q_in + at * s->dim, out_b + at * s->v_dim);
        worst = e > worst ? e : worst;
    }
    CHECK_MSG(arithmetic <= (worst / 8 > 1e-3 ? worst / 8 : 1e-3),
              "%s: arithmetic is off by %.3g, format %.3g", label, arithmetic, worst);
}

TEST(attention_in_every_format) {
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int i, m, f;
    for (i = 0; i < n_isas; i++)
        for (m = 0; m < COUNT(shapes); m++)
            for (f = 0; f < COUNT(formats); f++) {
                const shape *s = &shapes[m];
                tkv_config cfg = config_of(s, formats[f]);
                tkv_cache *kv;
                char label[120];
                int rows;
                if ((f + m + i) % tkv_test_stride(8, 4)) continue;
                if (s->heads > 50 && (f + i) % 3) continue; /* the reference decodes again for each row */
                cfg.host.isa = isas[i];
                fill_keys(s);
                kv = make_coded_cache(s, &cfg);
                for (rows = 1; rows <= ROWS; rows += s->heads > 50 ? 1 : 4) {
                    if (rows > 2 && s->heads > 50) break;
                    snprintf(label, sizeof label, "%s, %s, %s, %d rows", s->name,
                             tkv_get_name(TKV_NAME_FORMAT, (int)formats[f]),
                             tkv_get_name(TKV_NAME_ISA, (int)isas[i]), rows);
                    check_attention(kv, s, rows, label);
                }
                tkv_destroy(kv);
            }
}

/* V is the first channels of K, to the bit, in each tier; exact ones are as appended. */
TEST(values_are_the_first_channels) {
    int m, f, t, c;
    for (m = 0; m < COUNT(shapes); m++)
        for (f = 0; f < COUNT(formats); f += 2) {
            const shape *s = &shapes[m];
            tkv_config cfg = config_of(s, formats[f]);
            tkv_cache *kv;
            int wrong = 0;
            cfg.tiers.hot = pair_of(TKV_F32, TKV_FORMAT_DEFAULT);
            fill_keys(s);
            kv = make_coded_cache(s, &cfg);
            memset(v_out, 0x55, sizeof v_out);
            CHECK_EQ(tkv_read(kv, 0, 0, 0, TOKENS, k_out, v_out), TKV_OK);
            for (t = 0; t < TOKENS * s->kv_heads; t++)
                for (c = 0; c < s->v_dim; c++)
                    wrong += memcmp(v_out + t * s->v_dim + c, k_out + t * s->dim + c, sizeof *k_out) != 0;
            CHECK_EQ(wrong, 0);
            c = (TOKENS - 5) * s->kv_heads * s->dim;
            CHECK_MEM(k_out + c, k_in + c, (size_t)(5 * s->kv_heads * s->dim) * sizeof *k_in);
            memset(v_out, 0x55, sizeof v_out);
            CHECK_EQ(tkv_read(kv, 0, 0, 100, 40, NULL, v_out), TKV_OK); /* V alone */
            CHECK_MEM(v_out, k_out + 100 * s->kv_heads * s->dim, (size_t)s->v_dim * sizeof *k_out);
            tkv_destroy(kv);
        }
}

/* Bytes of tokens are those of K alone. */
TEST(latents_take_the_bytes_of_keys) {
    static const tkv_format some[] = {TKV_F16, TKV_BF16, TKV_Q8, TKV_KIVI4, TKV_A40, TKV_A30};
    const shape *s = &shapes[0];
    int f;
    for (f = 0; f < COUNT(some); f++) {
        tkv_memory_info once, twice, estimate;
        tkv_config cfg = config_of(s, some[f]);
        tkv_cache *kv;
        double ratio;
        fill_keys(s);
        kv = create_cache(&cfg);
        append_tokens(kv, s, 0, TOKENS);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
        CHECK_EQ(tkv_get_memory(kv, &once), TKV_OK);
        CHECK_EQ(once.fp16_bytes, (size_t)(TOKENS * s->dim * 2)); /* engines keep latents once as well */
        tkv_destroy(kv);
        CHECK_EQ(tkv_estimate_memory(&cfg, TOKENS, 1, &estimate), TKV_OK);
        CHECK_EQ(estimate.fp16_bytes, once.fp16_bytes);
        cfg.model.v_in_k = 0;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(some[f], some[f] == TKV_A40   ? TKV_R40
                                                              : some[f] == TKV_A30 ? TKV_R30
                                                                                   : some[f]);
        kv = create_cache(&cfg);
        CHECK_EQ(tkv_append(kv, 0, 0, k_in, k_in, TOKENS), TKV_OK);
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
        CHECK_EQ(tkv_get_memory(kv, &twice), TKV_OK);
        tkv_destroy(kv);
        ratio = (double)(once.tier[1].codes + once.tier[1].metadata + once.tier[2].codes +
                         once.tier[2].metadata + once.tier[0].codes) /
                (double)(twice.tier[1].codes + twice.tier[1].metadata + twice.tier[2].codes +
                         twice.tier[2].metadata + twice.tier[0].codes);
        printf("    %s: %.3f of the bytes of K and V apart\n", tkv_get_name(TKV_NAME_FORMAT, (int)some[f]),
               ratio);
        CHECK_LE(ratio, 0.56); /* 576 of 576 + 512 channels is .529 */
    }
}

static void serial_for(void *user, int n, tkv_task task, void *ctx) {
    int i;
    (void)user;
    for (i = n - 1; i >= 0; i--) task(ctx, i);
}

/* The bits are those of one call, with rows alone or together, for any number of parts, and for long sequences, which
 * are split over keys. turned: 1: blocks moved, so that queries are turned for them. Returns 1 if there were splits. */
static int check_bits(const shape *s, tkv_format format, int times, int turned) {
    static const int n_parts[] = {1, 2, 3, 8, 200};
    const int n = ROWS * s->heads > 200 || (times > 1 && tkv_test_quick()) ? 1 : ROWS;
    const int n_out = n * s->heads * s->v_dim;
    const size_t bytes_out = (size_t)n_out * sizeof(float);
    tkv_config cfg = config_of(s, format);
    tkv_attend_params p;
    tkv_cache *kv;
    size_t bytes;
    int i, k;
    fill_keys(s);
    if (turned) cfg.model.rope.dim = 16, cfg.model.rope.first = s->dim - 16;
    kv = make_long_cache(s, &cfg, times);
    if (turned) CHECK_EQ(tkv_seq_shift(kv, 0, 128, TKV_UNLIMITED, 1000), TKV_OK);
    memset(&p, 0, sizeof p);
    p.n = n;
    p.q = q_in;
    p.out = out_a;
    p.scale = (float)(0.25 / sqrt((double)s->dim));
    tkv_rng_fill(&rng, q_in, (size_t)(n * s->heads * s->dim), 1.0);
    for (k = 0; k < s->dim; k++)
        q_in[k] *= 100.0f; /* a row that needs two limbs, and that is compared to the bit only */
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.out = out_b;
    if (times > 1 && s->heads < 50) { /* the reference decodes again for each row */
        CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
        CHECK_LE(float_difference(out_a + s->v_dim, out_b + s->v_dim, n_out - s->v_dim), 5e-3);
    }
    CHECK_EQ(tkv_get_attend_bytes(kv, &p, &bytes), TKV_OK);
    CHECK_LE(bytes, sizeof workspace);
    if (times == 1) CHECK_LE(bytes, 1000);
    for (i = 0; i < COUNT(n_parts); i++) {
        memset(workspace, 0, 128);
        memset(out_b, 0, bytes_out);
        for (k = n_parts[i] - 1; k >= 0; k--)
            CHECK_EQ(tkv_attend_part(kv, &p, k, n_parts[i], workspace, bytes), TKV_OK);
        CHECK_MEM(out_b, out_a, bytes_out);
    }
    CHECK_EQ(tkv_attend_part(kv, &p, 0, 1, workspace, bytes - 1), TKV_ERR_CAPACITY);
    tkv_destroy(kv);
    cfg.host.parallel_for = serial_for;
    kv = make_long_cache(s, &cfg, times);
    if (turned) CHECK_EQ(tkv_seq_shift(kv, 0, 128, TKV_UNLIMITED, 1000), TKV_OK);
    memset(out_b, 0, bytes_out);
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    CHECK_MEM(out_b, out_a, bytes_out);
    tkv_destroy(kv);
    return bytes > 1000;
}

TEST(rows_together_have_the_bits_of_rows_alone) {
    tkv_isa isas[TKV_ISA_COUNT];
    const int is_scalar =
        tkv_test_isas(isas) == 1 || tkv_test_isa() == TKV_ISA_SCALAR; /* wide heads take long */
    int m, f, n_split = 0;
    for (m = 0; m < COUNT(shapes); m++)
        for (f = m % 2; f < COUNT(formats); f += tkv_test_stride(5, 3)) {
            if (m < 3) check_bits(&shapes[m], formats[f], 1, 0);
            if ((m % 2 == 0 && (f + m) % 6) || (m < 4 && is_scalar && tkv_test_quick())) continue;
            n_split += check_bits(&shapes[m], formats[f], TIMES, 0);
            if (f / 2 % 3 == 0) check_bits(&shapes[m], formats[f], TIMES, 1);
        }
    CHECK(n_split > 0);
}

/* Queries that ask for the last channels alone: V still needs the others, and gets bits. */
TEST(allocation_weighs_the_use_of_v) {
    const shape *s = &shapes[1];
    double error[2];
    int with_v, t, c, i;
    for (with_v = 0; with_v < 2; with_v++) {
        tkv_config cfg = config_of(s, TKV_A30);
        tkv_cache *kv;
        double err_sq = 0.0, sum_sq = 0.0;
        cfg.model.v_in_k = with_v;
        if (!with_v) cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_A30, TKV_KIVI4);
        rng = tkv_rng_seed(5);
        tkv_rng_fill(&rng, k_in, (size_t)(TOKENS * s->dim), 1.0);
        memset(q_in, 0, (size_t)(s->heads * s->dim) * sizeof *q_in);
        for (i = 0; i < s->heads; i++) tkv_rng_fill(&rng, q_in + i * s->dim + s->v_dim, 64, 0.5);
        kv = create_cache(&cfg);
        for (t = 0; t < TOKENS; t++) {
            CHECK_EQ(tkv_append(kv, 0, 0, k_in + t * s->dim, k_in + t * s->dim, 1), TKV_OK);
            CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK);
        }
        CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
        CHECK_EQ(tkv_read(kv, 0, 0, 0, TOKENS, k_out, NULL), TKV_OK);
        for (t = 4; t < TOKENS; t++)
            for (c = 0; c < s->v_dim; c++) {
                const double d = (double)k_out[t * s->dim + c] - (double)k_in[t * s->dim + c];
                err_sq += d * d;
                sum_sq += (double)k_in[t * s->dim + c] * (double)k_in[t * s->dim + c];
            }
        error[with_v] = sqrt(err_sq / sum_sq);
        tkv_destroy(kv);
    }
    printf("    error of the first 512 channels: %.3f as keys, %.3f as keys and values\n", error[0],
           error[1]);
#if defined(__GNUC__) || defined(__clang__) /* else queries are not sampled */
    CHECK(error[1] < 0.7 * error[0]);
#endif
    CHECK(error[1] < 0.25);
}

/* RoPE turns the last channels alone (rope.first); V does not turn. */
TEST(moves_turn_the_last_channels) {
    const shape *s = &shapes[1];
    tkv_config cfg = config_of(s, TKV_F32);
    tkv_layer_config layer;
    tkv_cache *kv, *moved;
    int t;
    cfg.model.rope.dim = 64;
    cfg.model.rope.first = 512;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_FORMAT_DEFAULT);
    fill_keys(s);
    kv = create_cache(&cfg);
    append_tokens(kv, s, 0, TOKENS);
    CHECK_EQ(tkv_seq_shift(kv, 0, 100, TKV_UNLIMITED, 1000), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, TOKENS, k_out, v_out), TKV_OK);
    for (t = 100; t < TOKENS; t++) {
        float *row = k_in + t * s->dim;
        CHECK_MEM(v_out + t * s->v_dim, row, (size_t)s->v_dim * sizeof *row);
        CHECK_EQ(tkv_rotate_rope(&cfg.model.rope, s->dim, 1000, row), TKV_OK);
        CHECK_MEM(k_out + t * s->dim, row, (size_t)s->dim * sizeof *row);
        CHECK_MEM(v_out + t * s->v_dim, row, (size_t)s->v_dim * sizeof *row);
    }
    cfg.model.rope.dim = TKV_OFF; /* the same keys, moved by hand */
    cfg.model.rope.first = 0;
    moved = create_cache(&cfg);
    append_tokens(moved, s, 0, TOKENS);
    for (t = 1; t < 4; t += 2) { /* short rows, and prefill */
        tkv_rng_fill(&rng, q_in, (size_t)(t * s->heads * s->dim), 0.3);
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, t, out_a), TKV_OK);
        CHECK_EQ(tkv_attend(moved, 0, 0, q_in, t, out_b), TKV_OK);
        CHECK_MSG(float_difference(out_a, out_b, t * s->heads * s->v_dim) < 1e-4, "%d rows: %.3g", t,
                  float_difference(out_a, out_b, t * s->heads * s->v_dim));
    }
    tkv_destroy(moved);
    tkv_destroy(kv);
    cfg.model.rope.dim = 64;
    cfg.model.rope.first = 513;
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_ERR_CONFIG);
    cfg.model.rope.first = 512;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_OK);
    memset(&layer, 0, sizeof layer);
    layer.rope.first = 16; /* a layer takes all of the model's RoPE, or has its own */
    cfg.layers = &layer;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    cfg = make_sized_config(1, 4, 1, 96, 1, TOKENS);
    cfg.model.rope.dim = 32;
    cfg.model.rope.first = 64;
    cfg.tiers.warm = pair_of(TKV_KVQUANT4, TKV_KVQUANT4);
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_ERR_CONFIG); /* it undoes RoPE */
}

/* Forks, cuts, evictions with anchors, a meter and a budget know no V of their own. */
TEST(sequences_work_on_latents) {
    const shape *s = &shapes[3];
    tkv_config cfg = config_of(s, TKV_A30);
    tkv_memory_info memory;
    tkv_quality_info quality;
    tkv_layer_info layer;
    uint64_t victims[4 * TOKENS / 64 + 1] = {0};
    tkv_cache *kv;
    float sum = 0.0f;
    int t, i;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_FORMAT_DEFAULT);
    cfg.tiers.n_anchors = 8;
    cfg.evict.policy = TKV_EVICT_H2O;
    cfg.limits.max_append = 32;
    cfg.meter.heads = 1;
    cfg.meter.every = 1;
    fill_keys(s);
    kv = create_cache(&cfg);
    tkv_rng_fill(&rng, q_in, (size_t)(s->heads * s->dim), 0.3);
    for (t = 0; t < TOKENS; t++) {
        CHECK_EQ(tkv_append(kv, 0, 0, k_in + t * s->kv_heads * s->dim, NULL, 1), TKV_OK);
        CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK);
    }
    check_cache(kv);
    for (t = 50; t < 250; t++) add_to_mask(victims, t);
    CHECK_EQ(evict_tokens(kv, 0, 0, victims, TOKENS), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &layer), TKV_OK);
    CHECK(layer.evicted > 100);
    check_cache(kv);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK);
    CHECK_EQ(tkv_get_quality(kv, 0, &quality), TKV_OK);
    CHECK_EQ(tkv_seq_fork(kv, 0, 1, TKV_UNLIMITED), TKV_OK);
    CHECK_EQ(tkv_append(kv, 1, 0, k_in, NULL, 3), TKV_OK);
    check_cache(kv);
    tkv_destroy(kv);
    cfg = config_of(s, TKV_KIVI4);
    CHECK_EQ(tkv_estimate_memory(&cfg, TOKENS, 1, &memory), TKV_OK);
    cfg.budget.bytes = 2 * memory.total;
    cfg.evict.policy = TKV_EVICT_SLIDING;
    kv = create_cache(&cfg);
    for (i = 0; i < 5; i++) append_tokens(kv, s, 0, TOKENS);
    CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
    CHECK_LE(memory.peak, cfg.budget.bytes);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_a), TKV_OK);
    for (t = 0; t < s->heads * s->v_dim; t++) sum += out_a[t] * out_a[t];
    CHECK(sum > 0.0f);
    check_cache(kv);
    tkv_destroy(kv);
}

TEST(texts_and_calibrations_know_it) {
    static uint8_t saved[1 << 16];
    static char text[20000], reason[300];
    const shape *s = &shapes[3];
    tkv_config cfg = config_of(s, TKV_A30), same;
    tkv_layer_config layers[2];
    tkv_cache *kv, *apart;
    tkv_layer_info info;
    size_t size, n;
    memset(layers, 0, sizeof layers);
    memset(&same, 0, sizeof same);
    cfg.model.n_layers = 2;
    layers[1].v_in_k = TKV_OFF;
    cfg.layers = layers;
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, NULL), TKV_OK);
    CHECK(strstr(text, "model.v_in_k") != NULL);
    CHECK(strstr(text, "layers[1].v_in_k") != NULL);
    fill_keys(s);
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.v_in_k, 1);
    CHECK_EQ(info.format[TKV_TIER_WARM].k, TKV_A30);
    CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
    CHECK_EQ(info.v_in_k, 0);
    CHECK_EQ(tkv_append(kv, 0, 1, k_in, NULL, 1), TKV_ERR_ARG);
    CHECK_EQ(tkv_append(kv, 0, 0, NULL, k_in, 1), TKV_ERR_ARG);
    append_tokens(kv, s, 0, TOKENS);
    for (n = 0; n < TOKENS; n += 10)
        CHECK_EQ(tkv_append(kv, 0, 1, k_in + n * (size_t)(s->kv_heads * s->dim), k_in, 10), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &size), TKV_OK);
    CHECK_EQ(saved[4], 2); /* the layers differ */
    tkv_destroy(kv);
    cfg = config_of(s, TKV_A30);
    kv = make_coded_cache(s, &cfg);
    CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &size), TKV_OK);
    cfg.model.v_in_k = 0;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_A30, TKV_R30);
    apart = create_cache(&cfg);
    CHECK_EQ(tkv_load_calibration(apart, saved, size), TKV_ERR_DATA); /* of another shape */
    tkv_destroy(apart);
    cfg = config_of(s, TKV_A30);
    apart = create_cache(&cfg);
    CHECK_EQ(tkv_load_calibration(apart, saved, size), TKV_OK);
    CHECK_EQ(tkv_save_calibration(apart, NULL, 0, &n), TKV_OK);
    CHECK_EQ(n, size);
    tkv_destroy(apart);
    tkv_destroy(kv);
    cfg = config_of(s, TKV_INT8);
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_STR(
        reason,
        "v_in_k is 1; formats of K in all tiers and layers of it must be F32, F16, BF16, Q8, KIVI or A; "
        "those of V are not used");
    cfg = config_of(s, TKV_A30);
    cfg.model.v_head_dim = s->dim + 1;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    cfg = config_of(s, TKV_A30);
    cfg.model.v_in_k = 2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    cfg = config_of(s, TKV_A30);
    cfg.model.n_layers = 2;
    cfg.layers = layers;
    layers[1].v_in_k = 1;
    layers[1].share_kv = 1;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    layers[1].v_in_k = 0; /* the layer reads the latents of the other one */
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(22);
    RUN(attention_in_every_format);
    RUN(values_are_the_first_channels);
    RUN(latents_take_the_bytes_of_keys);
    RUN(rows_together_have_the_bits_of_rows_alone);
    RUN(allocation_weighs_the_use_of_v);
    RUN(moves_turn_the_last_channels);
    RUN(sequences_work_on_latents);
    RUN(texts_and_calibrations_know_it);
    return tkv_test_end();
}
