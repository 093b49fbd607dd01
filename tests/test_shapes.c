/*
 * test_shapes.c - layers with heads and channels of their own (tkv_layer_config), with the shapes of real models.
 *
 * Each model is one cache. Attention is compared with double precision in every format and on every instruction set.
 * Counts, estimates, calibrations, texts and refusals know the shapes.
 */
#include "../tieredkv.h"
#include "kit.h"

enum {
    MAX_LAYERS = 4,
    MAX_HEADS = 16,
    MAX_DIM = 576,
    TOKENS = 230,
    ROWS = 24 /* most query rows of a call */
};

typedef struct shape {
    int heads, kv_heads, dim, v_dim;
} shape;

typedef struct model_shapes {
    const char *name;
    int n;
    shape layer[MAX_LAYERS]; /* the first one is that of the model */
} model_shapes;

static const model_shapes models[] = {
    {"Gemma 4", 3, {{8, 8, 256, 256}, {8, 8, 256, 256}, {8, 1, 512, 512}}},
    {"Qwen 3", 2, {{8, 2, 128, 128}, {8, 2, 128, 128}}},
    {"Phi 3", 2, {{4, 4, 96, 96}, {4, 4, 96, 96}}},
    {"MQA beside MHA", 2, {{8, 1, 64, 64}, {4, 4, 64, 64}}},
    {"odd channels", 4, {{3, 3, 20, 20}, {6, 2, 37, 21}, {5, 1, 80, 112}, {4, 1, 411, 299}}},
    {"DeepSeek V3", 2, {{4, 4, 192, 128}, {16, 1, 576, 512}}},
    {"all differ", 4, {{4, 2, 64, 64}, {16, 2, 48, 32}, {2, 1, 240, 16}, {6, 3, 16, 80}}}};

static float k_in[MAX_LAYERS][TOKENS * 8 * MAX_DIM], v_in[MAX_LAYERS][TOKENS * 8 * MAX_DIM];
static float q_in[ROWS * MAX_HEADS * MAX_DIM], out_a[ROWS * MAX_HEADS * MAX_DIM],
    out_b[ROWS * MAX_HEADS * MAX_DIM];
static float k_out[TOKENS * 8 * MAX_DIM], v_out[TOKENS * 8 * MAX_DIM];
static tkv_rng rng;

/* layers: room for MAX_LAYERS. Fields that equal those of the model are left 0. */
static tkv_config config_of(const model_shapes *m, tkv_layer_config *layers) {
    const shape *s = m->layer;
    tkv_config cfg = make_sized_config(m->n, s->heads, s->kv_heads, s->dim, 2, TOKENS);
    int i;
    cfg.model.v_head_dim = s->v_dim;
    memset(layers, 0, MAX_LAYERS * sizeof *layers);
    for (i = 1; i < m->n; i++) {
        const shape *x = &m->layer[i];
        if (x->heads != s->heads) layers[i].n_heads = x->heads;
        if (x->kv_heads != s->kv_heads) layers[i].n_kv_heads = x->kv_heads;
        if (x->dim != s->dim) layers[i].head_dim = x->dim;
        if (x->v_dim != (layers[i].head_dim ? x->dim : s->v_dim)) layers[i].v_head_dim = x->v_dim;
    }
    cfg.layers = layers;
    return cfg;
}

/* Appends the first n tokens of k_in and v_in to all layers. */
static void append_tokens(tkv_cache *kv, const model_shapes *m, int seq, int n) {
    int i, from, step;
    for (from = 0; from < n; from += step) {
        step = n - from < 90 ? n - from : 90;
        for (i = 0; i < m->n; i++) {
            const shape *s = &m->layer[i];
            CHECK_EQ(tkv_append(kv, seq, i, k_in[i] + from * s->kv_heads * s->dim,
                                v_in[i] + from * s->kv_heads * s->v_dim, step),
                     TKV_OK);
        }
    }
}

static void fill_tokens(const model_shapes *m) {
    int i;
    for (i = 0; i < m->n; i++) {
        const shape *s = &m->layer[i];
        tkv_rng_fill(&rng, k_in[i], (size_t)(TOKENS * s->kv_heads * s->dim), 1.0);
        tkv_rng_fill(&rng, v_in[i], (size_t)(TOKENS * s->kv_heads * s->v_dim), 1.0);
    }
}

/* Attention of query head h of the newest row over the tokens as appended, in double. Returns its distance from
 * `out`, relative. */
static double exact_difference(const shape *s, int layer, int n, int h, const float *q, const float *out) {
    static double w[TOKENS];
    const int g = h / (s->heads / s->kv_heads);
    double top = -1e300, sum = 0.0, err_sq = 0.0, sum_sq = 0.0;
    int t, c;
    for (t = 0; t < n; t++) {
        for (w[t] = 0.0, c = 0; c < s->dim; c++)
            w[t] += (double)q[c] * (double)k_in[layer][(t * s->kv_heads + g) * s->dim + c];
        w[t] /= sqrt((double)s->dim);
        top = w[t] > top ? w[t] : top;
    }
    for (t = 0; t < n; t++) sum += w[t] = exp(w[t] - top);
    for (c = 0; c < s->v_dim; c++) {
        double x = 0.0, d;
        for (t = 0; t < n; t++) x += w[t] / sum * (double)v_in[layer][(t * s->kv_heads + g) * s->v_dim + c];
        d = x - (double)out[c];
        err_sq += d * d;
        sum_sq += x * x;
    }
    return sqrt(err_sq / sum_sq);
}

/* Compares attention of a layer with double precision, over the decoded tokens and over those appended. The kernels of
 * prefill take 16 rows for a KV head and more. */
static void check_attention(tkv_cache *kv, const model_shapes *m, int layer, int rows, const char *label) {
    const shape *s = &m->layer[layer];
    tkv_attend_params p;
    double worst = 0.0, e, arithmetic;
    int h;
    memset(&p, 0, sizeof p);
    p.layer = layer;
    p.n = rows;
    p.q = q_in;
    p.out = out_a;
    tkv_rng_fill(&rng, q_in, (size_t)(rows * s->heads * s->dim), 1.0);
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.out = out_b;
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
    arithmetic = float_difference(out_a, out_b, rows * s->heads * s->v_dim);
    for (h = 0; h < s->heads; h++) {
        const float *newest = out_b + ((rows - 1) * s->heads + h) * s->v_dim;
        e = exact_difference(s, layer, TOKENS, h, q_in + ((rows - 1) * s->heads + h) * s->dim, newest);
        worst = e > worst ? e : worst;
    }
    CHECK_MSG(worst < 2.5, "%s: the format's error is %.3g", label, worst);
    CHECK_MSG(arithmetic <= (worst / 4 > 2e-3 ? worst / 4 : 2e-3),
              "%s: arithmetic is off by %.3g, format %.3g", label, arithmetic, worst);
}

/* Pairs of formats. Each format that stores K or V is in one. */
static int next_pair(int *at, tkv_format_pair *pair) {
    int f;
    for (f = *at; f < TKV_FORMAT_COUNT; f++) {
        const tkv_format_pair none = {TKV_F16, TKV_F16};
        tkv_config cfg = make_sized_config(1, 1, 1, 64, 1, 64);
        *pair = none;
        cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
        cfg.tiers.warm = cfg.tiers.archive = pair_of((tkv_format)f, TKV_F16);
        if (tkv_validate_config(&cfg, NULL, 0) == TKV_OK) pair->k = (tkv_format)f;
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F16, (tkv_format)f);
        if (tkv_validate_config(&cfg, NULL, 0) == TKV_OK) pair->v = (tkv_format)f;
        *at = f + 1;
        if (pair->k == (tkv_format)f || pair->v == (tkv_format)f) return 1;
    }
    return 0;
}

/* 1 if a layer has more channels than a format of the pair takes. */
static int is_too_wide(const model_shapes *m, tkv_format_pair pair) {
    int i, wide = 0;
    for (i = 0; i < m->n; i++) wide |= m->layer[i].dim > 256;
    return wide && (pair.k == TKV_SQUAT4 || pair.k == TKV_SQUAT2);
}

TEST(attention_in_every_format) {
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int i, m, layer, at, n_pairs = 0;
    tkv_format_pair pair;
    for (i = 0; i < n_isas; i++)
        for (m = 0; m < COUNT(models); m++)
            for (at = 1; next_pair(&at, &pair);) {
                tkv_layer_config layers[MAX_LAYERS];
                tkv_config cfg = config_of(&models[m], layers);
                tkv_cache *kv;
                char label[120];
                if ((at + m + i) % tkv_test_stride(11, 5)) continue;
                cfg.host.isa = isas[i];
                cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
                cfg.tiers.warm = cfg.tiers.archive = pair;
                if (is_too_wide(&models[m], pair)) {
                    CHECK_EQ(tkv_create(&cfg, &kv), TKV_ERR_CONFIG);
                    continue;
                }
                fill_tokens(&models[m]);
                kv = create_cache(&cfg);
                append_tokens(kv, &models[m], 0, TOKENS);
                CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
                CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
                check_cache(kv);
                for (layer = 0; layer < models[m].n; layer++) {
                    const shape *s = &models[m].layer[layer];
                    snprintf(label, sizeof label, "%s, layer %d, %s/%s, %s", models[m].name, layer,
                             tkv_get_name(TKV_NAME_FORMAT, (int)pair.k),
                             tkv_get_name(TKV_NAME_FORMAT, (int)pair.v),
                             tkv_get_name(TKV_NAME_ISA, (int)isas[i]));
                    check_attention(kv, &models[m], layer, 1, label);
                    check_attention(kv, &models[m], layer, 1 + 17 * s->kv_heads / s->heads, label);
                }
                n_pairs++;
                tkv_destroy(kv);
            }
    CHECK(n_pairs > 0);
}

/* The exact tokens of each layer come back, and a layer reports its shape. */
TEST(reports_know_the_shapes) {
    int m, layer, i;
    for (m = 0; m < COUNT(models); m++) {
        tkv_layer_config layers[MAX_LAYERS];
        tkv_config cfg = config_of(&models[m], layers);
        tkv_memory_info memory, estimate;
        tkv_cache *kv;
        size_t fp16 = 0;
        cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
        cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI2);
        cfg.tiers.hot_tokens = TKV_UNLIMITED;
        fill_tokens(&models[m]);
        kv = create_cache(&cfg);
        append_tokens(kv, &models[m], 0, TOKENS);
        for (layer = 0; layer < models[m].n; layer++) {
            const shape *s = &models[m].layer[layer];
            tkv_layer_info info;
            CHECK_EQ(tkv_get_layer(kv, 0, layer, &info), TKV_OK);
            CHECK_EQ(info.n_heads, s->heads);
            CHECK_EQ(info.n_kv_heads, s->kv_heads);
            CHECK_EQ(info.head_dim, s->dim);
            CHECK_EQ(info.v_head_dim, s->v_dim);
            CHECK_EQ(info.memory.fp16_bytes, (size_t)(TOKENS * s->kv_heads * (s->dim + s->v_dim) * 2));
            fp16 += info.memory.fp16_bytes;
            CHECK_EQ(tkv_read(kv, 0, layer, 0, TOKENS, k_out, v_out), TKV_OK);
            CHECK_MEM(k_out, k_in[layer], (size_t)(TOKENS * s->kv_heads * s->dim) * sizeof *k_out);
            CHECK_MEM(v_out, v_in[layer], (size_t)(TOKENS * s->kv_heads * s->v_dim) * sizeof *v_out);
        }
        CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
        CHECK_EQ(memory.fp16_bytes, fp16);
        tkv_destroy(kv);
        for (i = 0; i < 2; i++) { /* the plan with tables, the plan of the config */
            int n;
            if (i == 0) cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT);
            else cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_KIVI4, TKV_KIVI4);
            cfg.tiers.hot_tokens = 0;
            kv = create_cache(&cfg);
            for (n = 0; n < TOKENS; n++)
                for (layer = 0; layer < models[m].n; layer++)
                    CHECK_EQ(tkv_append(kv, 0, layer, k_in[layer], v_in[layer], 1), TKV_OK);
            CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
            CHECK_EQ(tkv_estimate_memory(&cfg, TOKENS, 1, &estimate), TKV_OK);
            CHECK_EQ(memory.total - memory.index, estimate.total - estimate.index);
            CHECK_EQ(memory.fp16_bytes, estimate.fp16_bytes);
            CHECK_EQ(memory.tables, estimate.tables);
            check_cache(kv);
            tkv_destroy(kv);
        }
        cfg.limits.max_tokens = TOKENS;
        cfg.budget.bytes = 0;
        {
            guarded_buffer arena;
            kv = create_cache_in_place(&cfg, &arena, 0);
            CHECK(kv != NULL);
            append_tokens(kv, &models[m], 1, TOKENS);
            check_cache(kv);
            tkv_destroy(kv);
            check_borders(&arena);
            free(arena.raw);
        }
    }
}

/* A budget bounds a cache whose layers have blocks of different sizes. */
TEST(a_budget_holds) {
    int m, layer, i;
    for (m = 0; m < COUNT(models); m++) {
        tkv_layer_config layers[MAX_LAYERS];
        tkv_config cfg = config_of(&models[m], layers);
        tkv_memory_info memory;
        tkv_cache *kv;
        CHECK_EQ(tkv_estimate_memory(&cfg, TOKENS, 1, &memory), TKV_OK);
        cfg.budget.bytes = 2 * memory.total;
        cfg.evict.policy = TKV_EVICT_SLIDING;
        fill_tokens(&models[m]);
        kv = create_cache(&cfg);
        for (i = 0; i < 4; i++) append_tokens(kv, &models[m], 0, TOKENS);
        CHECK_EQ(tkv_get_memory(kv, &memory), TKV_OK);
        CHECK_LE(memory.peak, cfg.budget.bytes);
        CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 4 * TOKENS);
        check_cache(kv);
        for (layer = 0; layer < models[m].n; layer++)
            CHECK_EQ(tkv_attend(kv, 0, layer, q_in, 1, out_a), TKV_OK);
        tkv_destroy(kv);
    }
}

/* A cache with tables, and its calibration in saved. *size: out. */
static tkv_cache *save_tables(const model_shapes *m, const tkv_config *cfg, uint8_t *saved, size_t room,
                              size_t *size) {
    tkv_cache *kv;
    fill_tokens(m);
    kv = create_cache(cfg);
    append_tokens(kv, m, 0, TOKENS);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_save_calibration(kv, saved, room, size), TKV_OK);
    return kv;
}

/* A calibration of mixed layers has version 2 and serves only its model; one of equal layers keeps version 1. */
TEST(calibrations_know_the_shapes) {
    static uint8_t saved[1 << 20], again[1 << 20];
    static const model_shapes two[] = {{"KV heads", 2, {{4, 2, 64, 64}, {4, 4, 64, 64}}},
                                       {"keys", 2, {{4, 2, 64, 64}, {4, 2, 48, 64}}},
                                       {"values", 2, {{4, 2, 64, 64}, {4, 2, 64, 48}}}};
    const model_shapes *mixed = &models[0], *equal = &models[1], *others = &models[COUNT(models) - 1];
    tkv_layer_config layers[MAX_LAYERS];
    tkv_config cfg = config_of(mixed, layers);
    tkv_cache *kv, *other;
    size_t size = 0, n = 0, i;
    kv = save_tables(mixed, &cfg, saved, sizeof saved, &size);
    CHECK_EQ(saved[4], 2);
    other = create_cache(&cfg);
    CHECK_EQ(tkv_load_calibration(other, saved, size), TKV_OK);
    CHECK_EQ(tkv_save_calibration(other, again, sizeof again, &n), TKV_OK);
    CHECK_EQ(n, size);
    CHECK_MEM(again, saved, size);
    for (i = 0; i < size; i += 1 + size / 997) { /* any damage is refused, and changes nothing */
        saved[i] ^= 0x15;
        CHECK_EQ(tkv_load_calibration(other, saved, size), TKV_ERR_DATA);
        saved[i] ^= 0x15;
        CHECK_EQ(tkv_load_calibration(other, saved, i), TKV_ERR_DATA);
    }
    tkv_destroy(other);
    tkv_destroy(kv);
    cfg = config_of(others, layers);
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_load_calibration(kv, saved, size), TKV_ERR_DATA);
    CHECK_STR(tkv_get_last_error(kv),
              "the calibration is of another model: layers, KV heads or head_dim differ");
    tkv_destroy(kv);
    cfg = config_of(equal, layers);
    kv = save_tables(equal, &cfg, saved, sizeof saved, &size);
    CHECK_EQ(saved[4], 1);
    tkv_destroy(kv);
    for (i = 0; i < COUNT(two); i++) { /* one number differs */
        cfg = config_of(&two[i], layers);
        kv = save_tables(&two[i], &cfg, saved, sizeof saved, &size);
        CHECK_EQ(saved[4], 2);
        tkv_destroy(kv);
    }
}

/* A layer that reads the K and V of another one can have query heads of its own. */
TEST(a_sharing_layer_has_query_heads_of_its_own) {
    tkv_layer_config layers[2];
    tkv_config cfg = make_sized_config(2, 4, 2, 64, 1, TOKENS);
    tkv_layer_info info;
    tkv_cache *kv;
    int h;
    memset(layers, 0, sizeof layers);
    layers[0].n_kv_heads = 4;
    layers[0].head_dim = 48;
    layers[1].share_kv = 1;
    layers[1].n_heads = 12;
    cfg.layers = layers;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    kv = create_cache(&cfg);
    tkv_rng_fill(&rng, k_in[0], TOKENS * 4 * 48, 1.0);
    tkv_rng_fill(&rng, v_in[0], TOKENS * 4 * 48, 1.0);
    CHECK_EQ(tkv_append(kv, 0, 0, k_in[0], v_in[0], TOKENS), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 1, &info), TKV_OK);
    CHECK_EQ(info.n_heads, 12);
    CHECK_EQ(info.n_kv_heads, 4);
    CHECK_EQ(info.head_dim, 48);
    tkv_rng_fill(&rng, q_in, 4 * 48, 1.0);
    for (h = 11; h >= 0; h--) memmove(q_in + h * 48, q_in + h / 3 * 48, 48 * sizeof *q_in);
    CHECK_EQ(tkv_attend(kv, 0, 1, q_in, 1, out_a), TKV_OK);
    for (h = 0; h < 4; h++) memmove(q_in + h * 48, q_in + 3 * h * 48, 48 * sizeof *q_in);
    CHECK_EQ(tkv_attend(kv, 0, 0, q_in, 1, out_b), TKV_OK);
    for (h = 0; h < 12; h++) CHECK(float_difference(out_a + h * 48, out_b + h / 3 * 48, 48) < 1e-6);
    tkv_destroy(kv);
}

/* Each layer turns and scales by its own shape. */
TEST(moves_and_scales_by_layer) {
    const model_shapes *m = &models[0];
    tkv_layer_config layers[MAX_LAYERS];
    tkv_config cfg = config_of(m, layers);
    tkv_cache *kv, *moved;
    int layer, t, h;
    cfg.model.rope.dim = 256; /* all channels, and half of those of the last layer */
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    fill_tokens(m);
    kv = create_cache(&cfg);
    append_tokens(kv, m, 0, TOKENS);
    CHECK_EQ(tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, 1000), TKV_OK);
    for (layer = 0; layer < m->n; layer++) { /* the same by hand */
        const shape *s = &m->layer[layer];
        for (t = 0; t < TOKENS; t++)
            for (h = 0; h < s->kv_heads; h++)
                CHECK_EQ(tkv_rotate_rope(&cfg.model.rope, s->dim, 1000,
                                         k_in[layer] + (t * s->kv_heads + h) * s->dim),
                         TKV_OK);
    }
    moved = create_cache(&cfg);
    append_tokens(moved, m, 0, TOKENS);
    for (layer = 0; layer < m->n; layer++) {
        const shape *s = &m->layer[layer];
        const int n = ROWS * s->heads * s->v_dim;
        tkv_rng_fill(&rng, q_in, (size_t)(ROWS * s->heads * s->dim), 1.0);
        CHECK_EQ(tkv_attend(kv, 0, layer, q_in, ROWS, out_a), TKV_OK);
        CHECK_EQ(tkv_attend(moved, 0, layer, q_in, ROWS, out_b), TKV_OK);
        CHECK_MSG(float_difference(out_a, out_b, n) < 1e-4, "layer %d: %.3g", layer,
                  float_difference(out_a, out_b, n));
    }
    tkv_destroy(kv);
    tkv_destroy(moved);
}

/* More probes than the smallest layer has heads: each watches a head of its own, and all of them measure. */
TEST(a_meter_watches_mixed_layers) {
    const model_shapes *m = &models[0];
    tkv_layer_config layers[MAX_LAYERS];
    tkv_config cfg = config_of(m, layers);
    tkv_quality_info info;
    tkv_cache *kv;
    int layer, i;
    cfg.meter.heads = 64; /* the model has 8 + 8 + 1 */
    cfg.meter.every = 1;
    fill_tokens(m);
    kv = create_cache(&cfg);
    append_tokens(kv, m, 0, TOKENS);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
    for (layer = 0; layer < m->n; layer++) {
        tkv_rng_fill(&rng, q_in, (size_t)(m->layer[layer].heads * m->layer[layer].dim), 1.0);
        CHECK_EQ(tkv_attend(kv, 0, layer, q_in, 1, out_a), TKV_OK);
    }
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
    CHECK_EQ(info.samples, 24); /* a query head is a sample: 8 + 8 + 8 */
    for (i = 0; i < m->n; i++) {
        CHECK_EQ(tkv_get_quality(kv, i, &info), TKV_OK);
        CHECK_EQ(info.samples, 8);
    }
    check_cache(kv);
    tkv_destroy(kv);
}

static void check_refused(const tkv_layer_config *layer, const char *want) {
    tkv_layer_config layers[2];
    tkv_config cfg = make_sized_config(2, 8, 2, 64, 1, 64);
    char reason[200] = "";
    memset(layers, 0, sizeof layers);
    layers[1] = *layer;
    cfg.layers = layers;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, want);
}

TEST(wrong_shapes_are_refused) {
    tkv_layer_config c;
    memset(&c, 0, sizeof c);
    c.n_heads = -1;
    check_refused(&c, "layers[1].n_heads is -1; it must be 1 to 65536, or 0 for that of the model");
    c.n_heads = 7;
    check_refused(&c, "layers[1].n_heads is 7; it must be a multiple of n_kv_heads");
    c.n_heads = 0;
    c.n_kv_heads = 3;
    check_refused(&c, "layers[1].n_heads is 8; it must be a multiple of n_kv_heads");
    c.n_kv_heads = 0;
    c.share_kv = 1;
    c.head_dim = 64;
    check_refused(
        &c, "layers[1].head_dim is 64; it must be 0 with share_kv: the layer has the keys and values of "
            "the other one");
    memset(&c, 0, sizeof c);
    c.rope.dim = 64;
    c.head_dim = 32;
    check_refused(&c, "layers[1].rope.dim is 64; it must be even, 2 to head_dim, TKV_OFF, or 0 for none");
    c.head_dim = 0;
    c.rope.dim = 66;
    c.share_kv = 1;
    check_refused(&c, "layers[1].rope.dim is 66; it must be even, 2 to head_dim, TKV_OFF, or 0 for none");
    c.share_kv = 0;
    c.no_cache = 1;
    check_refused(&c, "layers[1].rope.dim is 66; it must be even, 2 to head_dim, TKV_OFF, or 0 for none");
    c.rope.dim = 0;
    c.head_dim = 64;
    check_refused(&c, "layers[1].head_dim is 64; it must be 0 with no_cache: the layer has no K and V");
}

TEST(texts_keep_the_shapes) {
    const model_shapes *m = &models[COUNT(models) - 1];
    static char text[8000], again[8000];
    tkv_layer_config layers[MAX_LAYERS], parsed_layers[MAX_LAYERS];
    tkv_config cfg = config_of(m, layers), parsed = tkv_default_config();
    tkv_config_arrays room;
    memset(&room, 0, sizeof room);
    memset(parsed_layers, 0, sizeof parsed_layers);
    room.layers = parsed_layers;
    room.n_layers = MAX_LAYERS;
    CHECK_EQ(tkv_print_config(&cfg, 0, text, sizeof text, NULL), TKV_OK);
    CHECK(strstr(text, "layers[1].n_heads = 16") != NULL);
    CHECK_EQ(tkv_parse_config(&parsed, &room, text, strlen(text), NULL, 0), TKV_OK);
    CHECK_EQ(tkv_print_config(&parsed, 0, again, sizeof again, NULL), TKV_OK);
    CHECK_STR(again, text);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    rng = tkv_rng_seed(22);
    RUN(attention_in_every_format);
    RUN(reports_know_the_shapes);
    RUN(a_budget_holds);
    RUN(calibrations_know_the_shapes);
    RUN(a_sharing_layer_has_query_heads_of_its_own);
    RUN(moves_and_scales_by_layer);
    RUN(a_meter_watches_mixed_layers);
    RUN(wrong_shapes_are_refused);
    RUN(texts_keep_the_shapes);
    return tkv_test_end();
}
