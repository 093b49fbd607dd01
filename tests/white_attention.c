/*
 * white_attention.c - white-box test of the quality meter in src/attention: the errors that it reports
 * must match a computation in double precision from the original K and V. It must not change the bits of attention.
 * Also: the watched sequence, coverage when there are fewer copies than tokens, memory, failed allocations, and
 * consumers of attention.
 *
 * test_threads.c tests the meter with threads. This file reads the fields of the meter (white.h).
 */
#include "white.h"
#include "kit.h"

#include <math.h>

#if defined(__GNUC__) || defined(__clang__)
#define NEEDS_METER
#else
#define NEEDS_METER SKIP("no atomics, no meter")
#endif

enum { LAYERS = 2, HEADS = 6, KV_HEADS = 2, DK = 32, DV = 48, SEQS = 2, MAX_LEN = 1024 };
enum { K_ROW = KV_HEADS * DK, V_ROW = KV_HEADS * DV, Q_ROW = HEADS * DK, OUT_ROW = HEADS * DV, CHUNK = 80 };

/* Appended tokens, as the hot tier stored them. */
static float k_exact[SEQS][LAYERS][MAX_LEN * K_ROW], v_exact[SEQS][LAYERS][MAX_LEN * V_ROW];
static float k_cache[MAX_LEN * K_ROW], v_cache[MAX_LEN * V_ROW], q_in[CHUNK * Q_ROW], out[CHUNK * OUT_ROW];

static tkv_config config(tkv_format k, tkv_format v) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DK;
    cfg.model.v_head_dim = DV;
    cfg.limits.max_seqs = SEQS;
    cfg.tiers.warm_tokens = 128;
    cfg.tiers.warm = cfg.tiers.archive = pair_of(k, v);
    cfg.host.isa = tkv_test_isa();
    cfg.host.precise = 1;
    cfg.meter.heads = LAYERS * KV_HEADS;
    cfg.meter.every = 7;
    return cfg;
}

static void check_cache_at(const tkv_cache *kv, const char *what) {
    char reason[160];
    tkv_status st = tkv_check(kv, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%s: %s", what, reason);
}

static tkv_rng rng_of(int what, int seq, int layer, int position) {
    return tkv_rng_seed((uint64_t)(unsigned)position << 24 ^ (uint64_t)(unsigned)layer << 12 ^
                        (uint64_t)(unsigned)seq << 4 ^ (uint64_t)(unsigned)what);
}

/* Appends n tokens to each layer with K and V of its own, and keeps them as the hot tier stored them. V has a nonzero
 * mean, so that outputs of attention over many tokens are not near zero. */
static tkv_status append_tokens(tkv_cache *kv, int seq, int n) {
    static float k[CHUNK * K_ROW], v[CHUNK * V_ROW];
    int layer, t, c;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        int start = tkv_get_length(kv, seq, layer);
        tkv_status st;
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        if (start + n > MAX_LEN || n > CHUNK) exit(2);
        for (t = 0; t < n; t++) {
            tkv_rng r = rng_of(1, seq, layer, start + t);
            for (c = 0; c < K_ROW; c++)
                k[t * K_ROW + c] =
                    (float)(tkv_rng_gauss(&r) * (c % 8 ? 0.6 : 2.5) + (c % 5 == 0 ? 3.0 : 0.0));
            for (c = 0; c < V_ROW; c++) v[t * V_ROW + c] = (float)(tkv_rng_gauss(&r) + 0.5 * (c % 3));
        }
        st = tkv_append(kv, seq, layer, k, v, n);
        if (st) return st;
        CHECK_EQ(tkv_read(kv, seq, layer, start, n, k_exact[seq][layer] + start * K_ROW,
                          v_exact[seq][layer] + start * V_ROW),
                 TKV_OK);
    }
    return TKV_OK;
}

static void fill_queries(int seq, int layer, int first, int n) {
    int t, c;
    for (t = 0; t < n; t++) {
        tkv_rng r = rng_of(2, seq, layer, first + t);
        for (c = 0; c < Q_ROW; c++) q_in[t * Q_ROW + c] = (float)(tkv_rng_gauss(&r) * 1.5);
    }
}

static tkv_status attend_newest(tkv_cache *kv, int seq, int layer, int n) {
    fill_queries(seq, layer, tkv_get_length(kv, seq, layer) - n, n);
    return tkv_attend(kv, seq, layer, q_in, n, out);
}

/* >>reference: attention in double, over the original K and V and over those that tkv_read returns */
typedef struct error_sums {
    /* close: samples where rounding may change which key is the strongest */
    double samples, keys, kept, error, kl, kl_max, agreed, close;
} error_sums;

typedef struct logit_options { /* options that change logits; zeros: none does */
    float softcap, scale;
    int window, non_causal;
    const float *alibi, *sinks, *mask; /* mask: [n][len] */
} logit_options;

static const tkvi_head_probe *find_probe(const tkv_cache *kv, int layer, int head) {
    return tkvi_head_probe_of(kv->meter, layer, head);
}

/* For each key: is it encoded, and does the probe have a copy of its block? */
static char is_encoded[MAX_LEN], has_copy[MAX_LEN];

static void mark_keys(const tkvi_head_probe *probe, const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, j, k;
    memset(is_encoded, 0, sizeof is_encoded);
    memset(has_copy, 0, sizeof has_copy);
    for (i = 0; i < list->n; i++) {
        int start = tkvi_block_start(kv, ids, i), end = tkvi_block_end(kv, list, ids, i), found = 0;
        for (k = 0; k < probe->n; k++) found |= probe->start[k] == start;
        for (j = start; j < end; j++) {
            is_encoded[j] = tkvi_tier_at(list, i) != TKV_TIER_HOT;
            has_copy[j] = (char)found;
        }
    }
}

static double dot(const float *a, const float *b, int n) {
    double s = 0.0;
    int i;
    for (i = 0; i < n; i++) s += (double)a[i] * (double)b[i];
    return s;
}

/* Adds the comparison for one query head of one query. got: output of tkv_attend. Reads k_cache and v_cache. */
static void add_expected_row(error_sums *f, const tkv_cache *kv, const logit_options *w, int seq, int layer,
                             int head, int position, const float *q, const float *mask, const float *got) {
    static double exact[MAX_LEN], cached[MAX_LEN];
    static char seen[MAX_LEN];
    int kvh = head / (HEADS / KV_HEADS), len = tkv_get_length(kv, seq, layer), j, c, best = -1;
    int window = w->window == TKV_OFF ? 0 : w->window ? w->window : kv->tables.plan[layer].window;
    double top = 0.0, cached_top = 0.0, lse = 0.0, cached_lse = 0.0, kl = 0.0, d = 0.0, n = 0.0, o[DV];
    double scale = w->scale > 0.0f ? (double)w->scale : 1.0 / sqrt((double)DK), second = 0.0;
    int any = 0, has_second = 0;
    memset(o, 0, sizeof o);
    for (j = 0; j < len; j++) {
        const float *k_cached = k_cache + j * K_ROW + kvh * DK;
        const float *k = has_copy[j] ? k_exact[seq][layer] + j * K_ROW + kvh * DK : k_cached;
        seen[j] = (w->non_causal || j <= position) && (!window || position - j < window);
        f->keys += is_encoded[j] && seen[j];
        f->kept += is_encoded[j] && seen[j] && has_copy[j];
        if (mask && !(mask[j] > -1e30f)) seen[j] = 0;
        if (!seen[j]) continue;
        exact[j] = dot(q, k, DK) * scale;
        cached[j] = dot(q, k_cached, DK) * scale;
        if (w->softcap > 0.0f) {
            exact[j] = (double)w->softcap * tanh(exact[j] / (double)w->softcap);
            cached[j] = (double)w->softcap * tanh(cached[j] / (double)w->softcap);
        }
        if (w->alibi) exact[j] += (double)w->alibi[head] * (j - position);
        if (w->alibi) cached[j] += (double)w->alibi[head] * (j - position);
        if (mask) exact[j] += (double)mask[j];
        if (mask) cached[j] += (double)mask[j];
        if (!any || exact[j] > top) top = exact[j];
        if (!any || cached[j] > cached_top) {
            has_second = any;
            second = cached_top;
            cached_top = cached[j];
            best = j;
        } else if (!has_second || cached[j] > second) {
            has_second = 1;
            second = cached[j];
        }
        any = 1;
    }
    if (!any) return;
    if (w->sinks) lse = exp((double)w->sinks[head] - top);
    if (w->sinks) cached_lse = exp((double)w->sinks[head] - cached_top);
    for (j = 0; j < len; j++)
        if (seen[j]) {
            lse += exp(exact[j] - top);
            cached_lse += exp(cached[j] - cached_top);
        }
    lse = top + log(lse);
    cached_lse = cached_top + log(cached_lse);
    if (w->sinks) kl += exp((double)w->sinks[head] - lse) * (cached_lse - lse);
    for (j = 0; j < len; j++)
        if (seen[j]) {
            const float *v = (has_copy[j] ? v_exact[seq][layer] : v_cache) + j * V_ROW + kvh * DV;
            double p = exp(exact[j] - lse);
            kl += p * ((exact[j] - lse) - (cached[j] - cached_lse));
            for (c = 0; c < DV; c++) o[c] += p * (double)v[c];
        }
    for (c = 0; c < DV; c++) {
        d += (o[c] - (double)got[c]) * (o[c] - (double)got[c]);
        n += o[c] * o[c];
    }
    f->samples++;
    f->error += d / n;
    f->kl += kl;
    if (kl > f->kl_max) f->kl_max = kl;
    f->agreed += exact[best] >= top;
    f->close += (has_second && cached_top - second < 2e-3) || (exact[best] < top && top - exact[best] < 2e-3);
}

/* Attends with queries of the newest n tokens, and adds the comparisons that the meter must make. */
static void attend_and_expect(tkv_cache *kv, error_sums *f, const logit_options *w, int seq, int layer,
                              int n) {
    int len = tkv_get_length(kv, seq, layer), expired, i, head;
    tkv_attend_params p;
    tkv_layer_info info;
    memset(&p, 0, sizeof p);
    fill_queries(seq, layer, len - n, n);
    p.layer = layer;
    p.seq = seq;
    p.n = n;
    p.q = q_in;
    p.out = out;
    p.softcap = w->softcap;
    p.scale = w->scale;
    p.window = w->window;
    p.non_causal = w->non_causal;
    p.alibi_slopes = w->alibi;
    p.sink_logits = w->sinks;
    p.mask = w->mask;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    if (kv->meter->seq != seq) return;
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    expired = info.expired;
    CHECK_EQ(tkv_read(kv, seq, layer, expired, len - expired, k_cache + expired * K_ROW,
                      v_cache + expired * V_ROW),
             TKV_OK);
    for (head = 0; head < HEADS; head++) {
        const tkvi_head_probe *probe = find_probe(kv, layer, head / (HEADS / KV_HEADS));
        if (probe) mark_keys(probe, kv, seq, layer);
        for (i = 0; i < n; i++) {
            int position = len - n + i;
            if (probe && (position + probe->phase) % kv->meter->every == 0)
                add_expected_row(f, kv, w, seq, layer, head, position, q_in + i * Q_ROW + head * DK,
                                 w->mask ? w->mask + i * len : NULL, out + i * OUT_ROW + head * DV);
        }
    }
}

/* Compares the sums with tkv_get_quality. tolerance: relative. */
static void compare_quality(const tkv_cache *kv, const error_sums *f, double tolerance, const char *what) {
    tkv_quality_info info;
    double n = f->samples > 0.0 ? f->samples : 1.0;
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
    CHECK_MSG((double)info.samples == f->samples && f->samples > 0.0, "%s: %.0f samples, expected %.0f", what,
              (double)info.samples, f->samples);
    CHECK_NEAR(info.coverage, f->keys > 0.0 ? f->kept / f->keys : 1.0, 1e-12);
    CHECK_MSG(fabs(info.output_error - f->error / n) <= tolerance * f->error / n + 1e-7,
              "%s: error %g, expected %g", what, info.output_error, f->error / n);
    CHECK_MSG(fabs(info.kl - f->kl / n) <= tolerance * f->kl / n + 2e-6, "%s: KL %g, expected %g", what,
              info.kl, f->kl / n);
    CHECK_MSG(fabs(info.kl_max - f->kl_max) <= 2.0 * tolerance * f->kl_max + 2e-5,
              "%s: largest KL %g, expected %g", what, info.kl_max, f->kl_max);
    CHECK_MSG(fabs(info.top1 * n - f->agreed) <= f->close + 0.5, "%s: top-1 %g, expected %g", what, info.top1,
              f->agreed / n);
    CHECK(info.output_error >= 0.0 && info.kl >= 0.0 && info.kl <= info.kl_max && info.top1 <= 1.0);
}

/* Appends tokens in chunks of several sizes. Two of three steps attend with queries of all new tokens. */
static error_sums run_sequence(tkv_cache *kv, const logit_options *w, int tokens) {
    static const int chunks[] = {1, 5, 1, 70, 1, 2, 33};
    error_sums f;
    int len = 0, step = 0, layer;
    memset(&f, 0, sizeof f);
    while (len < tokens) {
        int n = chunks[step % COUNT(chunks)];
        n = n < tokens - len ? n : tokens - len;
        CHECK_EQ(append_tokens(kv, 0, n), TKV_OK);
        len += n;
        for (layer = 0; layer < LAYERS && step % 3 != 1; layer++) attend_and_expect(kv, &f, w, 0, layer, n);
        step++;
    }
    check_cache_at(kv, "run");
    return f;
}

static const logit_options plain = {0.0f, 0.0f, 0, 0, NULL, NULL, NULL};

TEST(errors_match_the_reference) {
    static const tkv_format_pair formats[] = {
        {TKV_Q8, TKV_Q8},   {TKV_KIVI4, TKV_KIVI4},   {TKV_KIVI2, TKV_KIVI2},  {TKV_A30, TKV_R30},
        {TKV_A20, TKV_R15}, {TKV_INT4, TKV_FP8_E4M3}, {TKV_SQUAT2, TKV_KIVI4}, {TKV_BF16, TKV_BF16}};
    static const tkv_format hot[] = {TKV_F32, TKV_F16, TKV_BF16};
    int i;
    NEEDS_METER;
    for (i = 0; i < COUNT(formats); i += tkv_test_quick() ? 3 : 1) {
        tkv_config cfg = config(formats[i].k, formats[i].v);
        char what[64];
        tkv_cache *kv;
        error_sums f;
        cfg.tiers.hot = pair_of(hot[i % 3], hot[i % 3]);
        if (formats[i].k == TKV_BF16)
            cfg.tiers.hot.v = TKV_F32; /* K moves from one exact format to another */
        kv = create_cache(&cfg);
        snprintf(what, sizeof what, "%s and %s", tkv_get_name(TKV_NAME_FORMAT, (int)formats[i].k),
                 tkv_get_name(TKV_NAME_FORMAT, (int)formats[i].v));
        f = run_sequence(kv, &plain, tkv_test_quick() ? 620 : 1000);
        compare_quality(kv, &f, 0.02, what);
        CHECK_EQ(f.kept, f.keys);
        CHECK(f.keys > 0.0);
        tkv_destroy(kv);
    }
}

TEST(errors_with_each_logit_option) {
    static const float alibi[HEADS] = {0.01f, 0.03f, 0.0f, 0.002f, -0.001f, 0.1f};
    static float sinks[HEADS] = {0.0f, 3.0f, -2.0f, 12.0f, 5.0f, 1.0f}, mask[CHUNK * MAX_LEN];
    int which, i;
    NEEDS_METER;
    sinks[2] = tkvi_from_bits(0xff800000u); /* -infinity: this head has no sink */
    for (i = 0; i < CHUNK * MAX_LEN; i++) mask[i] = i % 7 == 3 ? -1e30f : (float)(i % 5) * 0.25f - 0.5f;
    for (which = 0; which < 7; which += tkv_test_quick() ? 3 : 1) {
        tkv_config cfg = config(TKV_KIVI4, TKV_KIVI3);
        logit_options w = plain;
        tkv_cache *kv;
        error_sums f;
        char what[32];
        if (which == 0) w.softcap = 5.0f;
        if (which == 1) w.alibi = alibi;
        if (which == 2) w.sinks = sinks;
        if (which == 3) w.mask = mask;
        if (which == 4) w.window = 150;
        if (which == 5) w.non_causal = 1;
        if (which == 6) {
            w.scale = 0.3f;
            w.softcap = 20.0f;
            w.sinks = sinks;
            w.alibi = alibi;
            w.mask = mask;
            w.window = 300;
        }
        kv = create_cache(&cfg);
        f = run_sequence(kv, &w, tkv_test_quick() ? 300 : 400);
        snprintf(what, sizeof what, "change %d", which);
        compare_quality(kv, &f, 0.02, what);
        CHECK(f.keys > 0.0);
        tkv_destroy(kv);
    }
}

TEST(errors_with_partial_coverage) { /* the meter has fewer copies than encoded tokens */
    static const int tokens[] = {128, 192, 320, 600};
    int i;
    NEEDS_METER;
    for (i = 0; i < COUNT(tokens); i += tkv_test_quick() ? 2 : 1) {
        tkv_config cfg = config(TKV_KIVI3, TKV_KIVI2);
        tkv_cache *kv;
        error_sums f;
        cfg.meter.tokens = tokens[i];
        kv = create_cache(&cfg);
        f = run_sequence(kv, &plain, tkv_test_quick() ? 600 : 1000);
        compare_quality(kv, &f, 0.03, "part");
        CHECK(f.kept < f.keys && f.kept > 0.0);
        tkv_destroy(kv);
    }
}

/* Copies are evenly spaced. If the slots cannot hold all blocks, at least half of the slots are in use. */
TEST(copies_lie_evenly) {
    int slots, i, t;
    NEEDS_METER;
    for (slots = 2; slots < 12; slots += 3) {
        tkv_config cfg = config(TKV_KIVI2, TKV_KIVI2);
        tkv_cache *kv;
        cfg.meter.tokens = slots * 64;
        kv = create_cache(&cfg);
        for (t = 0; t < 1000; t += 8) {
            const tkvi_head_probe *probe = &kv->meter->head_probe[0];
            tkv_layer_info info;
            int n_coded;
            CHECK_EQ(append_tokens(kv, 0, 8), TKV_OK);
            CHECK_EQ(tkv_get_layer(kv, 0, probe->layer, &info), TKV_OK);
            n_coded = info.blocks[TKV_TIER_WARM] + info.blocks[TKV_TIER_ARCHIVE];
            CHECK_EQ(probe->n, (n_coded + probe->stride - 1) / probe->stride);
            CHECK(probe->n <= slots && (n_coded < slots || 2 * probe->n >= slots));
            for (i = 0; i < probe->n; i++) CHECK_EQ(probe->start[i], 4 + 64 * probe->stride * i);
        }
        check_cache_at(kv, "evenly");
        tkv_destroy(kv);
    }
}

/* Errors with partial coverage, divided by the coverage, are near the errors with full coverage. */
TEST(coverage_scales_up) {
    tkv_quality_info all, part;
    tkv_config cfg = config(TKV_KIVI2, TKV_KIVI2);
    tkv_cache *a, *b;
    int t, layer;
    NEEDS_METER;
    if (tkv_test_quick()) SKIP("long");
    cfg.meter.every = 1;
    a = create_cache(&cfg);
    cfg.meter.tokens = 256;
    b = create_cache(&cfg);
    for (t = 0; t < 1000; t += 20) {
        CHECK_EQ(append_tokens(a, 0, 20), TKV_OK);
        CHECK_EQ(append_tokens(b, 0, 20), TKV_OK);
        for (layer = 0; layer < LAYERS && t > 500; layer++) {
            CHECK_EQ(attend_newest(a, 0, layer, 20), TKV_OK);
            CHECK_EQ(attend_newest(b, 0, layer, 20), TKV_OK);
        }
    }
    CHECK_EQ(tkv_get_quality(a, TKV_ALL_LAYERS, &all), TKV_OK);
    CHECK_EQ(tkv_get_quality(b, TKV_ALL_LAYERS, &part), TKV_OK);
    CHECK_EQ(all.samples, part.samples);
    CHECK(all.coverage == 1.0 && part.coverage < 0.4 && part.coverage > 0.2);
    CHECK_NEAR(part.output_error / part.coverage / all.output_error, 1.0, 0.3);
    CHECK_NEAR(part.kl / part.coverage / all.kl, 1.0, 0.3);
    CHECK(part.output_error < all.output_error && part.kl < all.kl && part.top1 > all.top1);
    tkv_destroy(a);
    tkv_destroy(b);
}

TEST(exact_formats_have_no_error) {
    int which, t, layer, n = tkv_test_quick() ? 300 : 500;
    NEEDS_METER;
    for (which = 0; which < 5; which += tkv_test_quick() ? 3 : 1) {
        tkv_config cfg = config(TKV_KIVI2, TKV_KIVI2);
        tkv_quality_info info;
        tkv_cache *kv;
        cfg.meter.every = 1;
        if (which == 0) cfg.tiers.hot_tokens = TKV_UNLIMITED;
        if (which == 1)
            cfg.tiers.warm = cfg.tiers.archive =
                pair_of(TKV_F16, TKV_F16); /* demotion does not change the bytes */
        if (which > 1)
            cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F32, TKV_F32); /* encoded without loss */
        if (which == 3) cfg.tiers.hot = pair_of(TKV_BF16, TKV_BF16);
        if (which == 4) cfg.tiers.archive = pair_of(TKV_F16, TKV_F16); /* that of the hot tier, behind F32 */
        if (which == 4) cfg.tiers.warm_tokens = 64;
        kv = create_cache(&cfg);
        for (t = 0; t < n; t += 20) {
            CHECK_EQ(append_tokens(kv, 0, 20), TKV_OK);
            for (layer = 0; layer < LAYERS; layer++) CHECK_EQ(attend_newest(kv, 0, layer, 20), TKV_OK);
        }
        check_cache(kv);
        CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
        CHECK_EQ(info.samples, n * HEADS * LAYERS);
        CHECK(info.coverage == 1.0);
        CHECK_LE(info.output_error, which > 1 ? 1e-9 : 0.0);
        CHECK_LE(info.kl, which > 1 ? 1e-6 : 0.0);
        CHECK_LE(info.kl_max, which > 1 ? 1e-5 : 0.0);
        CHECK(info.top1 > (which > 1 ? 0.999 : 0.9999999)); /* sums over F32 blocks add in another order */
        tkv_destroy(kv);
    }
}

TEST(more_bits_less_error) {
    static const tkv_format_pair formats[][5] = {
        {{TKV_Q8, TKV_Q8},
         {TKV_KIVI4, TKV_KIVI4},
         {TKV_KIVI3, TKV_KIVI3},
         {TKV_KIVI2, TKV_KIVI2},
         {TKV_F32, TKV_F32}},
        {{TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}, {TKV_A20, TKV_R20}, {TKV_A15, TKV_R15}, {TKV_F32, TKV_F32}}};
    int family, i, t, layer;
    NEEDS_METER;
    if (tkv_test_quick()) SKIP("long");
    for (family = 0; family < 2; family++) {
        tkv_quality_info last, info;
        memset(&last, 0, sizeof last);
        last.top1 = 1.0;
        for (i = 0; formats[family][i].k != TKV_F32; i++) {
            tkv_config cfg = config(formats[family][i].k, formats[family][i].v);
            tkv_cache *kv = create_cache(&cfg);
            for (t = 0; t < 900; t += 10) {
                CHECK_EQ(append_tokens(kv, 0, 10), TKV_OK);
                for (layer = 0; layer < LAYERS; layer++) CHECK_EQ(attend_newest(kv, 0, layer, 10), TKV_OK);
            }
            CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
            CHECK(info.coverage == 1.0);
            CHECK_LE(1.3 * last.output_error, info.output_error);
            CHECK_LE(1.3 * last.kl, info.kl);
            CHECK_LE(info.top1, last.top1);
            last = info;
            tkv_destroy(kv);
        }
        CHECK(last.kl > 0.01 && last.top1 < 0.99);
    }
}

TEST(attention_keeps_its_bits) {
    static float want[CHUNK * OUT_ROW];
    static const tkv_format_pair formats[] = {
        {TKV_A30, TKV_R30}, {TKV_KIVI2, TKV_KIVI4}, {TKV_FP4, TKV_SUBSPACE4}};
    static const int chunks[] = {1, 3, 1, 80, 1};
    int i, at, step, layer;
    NEEDS_METER;
    for (i = 0; i < (tkv_test_quick() ? 1 : COUNT(formats)); i++) {
        tkv_config cfg = config(formats[i].k, formats[i].v);
        tkv_cache *on, *off;
        tkv_quality_info info;
        cfg.host.precise = i == 1;
        cfg.meter.every = 1;
        cfg.meter.tokens = 256;
        on = create_cache(&cfg);
        cfg.meter.heads = 0;
        off = create_cache(&cfg);
        for (at = step = 0; at < (tkv_test_quick() ? 600 : 900); at += chunks[step++ % COUNT(chunks)]) {
            int n = chunks[step % COUNT(chunks)];
            CHECK_EQ(append_tokens(on, 0, n), TKV_OK);
            CHECK_EQ(append_tokens(off, 0, n), TKV_OK);
            for (layer = 0; layer < LAYERS; layer++) {
                CHECK_EQ(attend_newest(off, 0, layer, n), TKV_OK);
                memcpy(want, out, sizeof out);
                CHECK_EQ(attend_newest(on, 0, layer, n), TKV_OK);
                CHECK_MEM(out, want, (size_t)(n * OUT_ROW) * sizeof(float));
            }
        }
        CHECK_EQ(tkv_get_quality(on, TKV_ALL_LAYERS, &info), TKV_OK);
        CHECK(info.samples > 0 && info.kl > 0.0);
        CHECK_EQ(tkv_get_quality(off, TKV_ALL_LAYERS, &info), TKV_OK); /* this cache has no meter */
        CHECK(info.samples == 0 && info.heads == 0 && info.seq == TKV_NO_SEQ && info.kl == 0.0);
        CHECK_EQ(tkv_reset_quality(off), TKV_OK);
        tkv_destroy(on);
        tkv_destroy(off);
    }
}

/* >>the watched sequence */
static int n_copies(const tkv_cache *kv) {
    int i, n = 0;
    for (i = 0; i < kv->meter->n; i++) n += kv->meter->head_probe[i].n;
    return n;
}

static int watched_seq(const tkv_cache *kv) {
    tkv_quality_info info;
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
    return info.seq;
}

static double n_samples(const tkv_cache *kv) {
    tkv_quality_info info;
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
    return (double)info.samples;
}

TEST(the_meter_watches_one_sequence) {
    tkv_config cfg = config(TKV_KIVI4, TKV_KIVI4);
    tkv_cache *kv;
    int t;
    NEEDS_METER;
    cfg.meter.every = 1;
    kv = create_cache(&cfg);
    CHECK_EQ(watched_seq(kv), TKV_NO_SEQ);
    for (t = 0; t < 220; t += 44) CHECK_EQ(append_tokens(kv, 1, 44), TKV_OK);
    CHECK_EQ(watched_seq(kv), 1);
    CHECK_EQ(n_copies(kv), 4 * 1);
    for (t = 0; t < 280; t += 40) CHECK_EQ(append_tokens(kv, 0, 40), TKV_OK);
    CHECK_EQ(watched_seq(kv), 1);
    CHECK_EQ(n_copies(kv), 4 * 1);
    CHECK_EQ(attend_newest(kv, 0, 0, 1), TKV_OK);
    CHECK_EQ(n_samples(kv), 0);
    CHECK_EQ(attend_newest(kv, 1, 0, 1), TKV_OK);
    CHECK_EQ(n_samples(kv), HEADS);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(watched_seq(kv), TKV_NO_SEQ);
    CHECK_EQ(n_copies(kv), 0);
    CHECK_EQ(n_samples(kv), HEADS); /* the sums stay */
    CHECK_EQ(append_tokens(kv, 0, 40), TKV_OK);
    CHECK_EQ(watched_seq(kv), TKV_NO_SEQ); /* a sequence with tokens is not taken */
    check_cache_at(kv, "no watched sequence");
    CHECK_EQ(append_tokens(kv, 1, 1), TKV_OK);
    CHECK_EQ(watched_seq(kv), 1);
    CHECK_EQ(tkv_seq_reset(kv, 1), TKV_OK);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
    CHECK_EQ(append_tokens(kv, 0, 1), TKV_OK);
    CHECK_EQ(watched_seq(kv), 0);
    CHECK_EQ(tkv_reset_quality(kv), TKV_OK);
    CHECK_EQ(n_samples(kv), 0);
    CHECK_EQ(watched_seq(kv), 0);
    tkv_destroy(kv);
}

/* Sums stay right through steps, aborts, truncations and flushes. */
TEST(errors_through_steps_and_truncations) {
    tkv_config cfg = config(TKV_KIVI3, TKV_KIVI2);
    tkv_cache *kv;
    error_sums f;
    int round, layer, t, n_before;
    NEEDS_METER;
    cfg.tiers.warm.v = TKV_KIVI4;
    cfg.meter.every = 3;
    kv = create_cache(&cfg);
    for (round = 0; round < 2; round++) {
        memset(&f, 0, sizeof f);
        for (t = 0; t < 300; t += 60) CHECK_EQ(append_tokens(kv, 0, 60), TKV_OK);
        for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 20);
        n_before = n_copies(kv);
        CHECK(n_before > 0);
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        CHECK_EQ(append_tokens(kv, 0, 70), TKV_OK);
        for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 70);
        CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
        check_cache_at(kv, "abort");
        for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 20);
        CHECK_EQ(tkv_seq_truncate(kv, 0, 250), TKV_OK);
        check_cache_at(kv, "truncate");
        for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 20);
        for (t = 0; t < 100; t += 25) {
            CHECK_EQ(append_tokens(kv, 0, 25), TKV_OK);
            for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 25);
        }
        CHECK(n_copies(kv) > n_before);
        CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_FULL), TKV_OK);
        check_cache_at(kv, "flush");
        for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 20);
        CHECK_EQ(f.kept, f.keys);
        for (t = 0; t < 5; t++) { /* short blocks: two of them may start within 64 positions */
            CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
            check_cache_at(kv, "flush all");
            for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 10);
            CHECK_EQ(append_tokens(kv, 0, 10 + 17 * t), TKV_OK);
            for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 10);
        }
        CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
        CHECK_EQ(append_tokens(kv, 0, 60), TKV_OK);
        CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
        for (layer = 0; layer < LAYERS; layer++) attend_and_expect(kv, &f, &plain, 0, layer, 60);
        compare_quality(kv, &f, 0.03, "life");
        CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK);
        check_cache_at(kv, "reset");
        compare_quality(kv, &f, 0.03, "after the end");
        CHECK_EQ(tkv_reset_quality(kv), TKV_OK);
    }
    tkv_destroy(kv);
}

TEST(errors_in_windows) { /* blocks expire, sinks too, and their copies are freed */
    tkv_config cfg = config(TKV_KIVI3, TKV_KIVI2);
    tkv_cache *kv;
    error_sums f;
    int i;
    NEEDS_METER;
    cfg.model.window = 220;
    cfg.meter.tokens = 512;
    kv = create_cache(&cfg);
    f = run_sequence(kv, &plain, tkv_test_quick() ? 700 : 1000);
    compare_quality(kv, &f, 0.03, "window");
    CHECK(f.kept == f.keys);
    for (i = 0; i < kv->meter->n; i++) CHECK(kv->meter->head_probe[i].stride == 1);
    tkv_destroy(kv);
}

TEST(layers_of_all_kinds) {
    tkv_layer_config layers[6];
    tkv_config cfg = config(TKV_KIVI4, TKV_KIVI4);
    tkv_quality_info info, one;
    tkv_cache *kv;
    uint64_t sum = 0;
    int i, t;
    NEEDS_METER;
    memset(layers, 0, sizeof layers);
    layers[0].no_cache = 1;
    layers[2].share_kv = 2; /* layer 1 */
    layers[3].hot.k = TKV_F32;
    layers[4].archive.k = layers[4].warm.k = TKV_KIVI2;
    layers[5].hot_tokens = TKV_UNLIMITED;
    cfg.layers = layers;
    cfg.model.n_layers = 6;
    cfg.meter.heads = 64;
    cfg.meter.every = 1;
    kv = create_cache(&cfg);
    CHECK_EQ(kv->meter->n, 4 * KV_HEADS);
    for (t = 0; t < 400; t += 50) {
        float k[50 * K_ROW], v[50 * V_ROW];
        for (i = 1; i < 6; i++) {
            tkv_rng r = rng_of(5, 0, i, t);
            tkv_rng_fill(&r, k, 50 * K_ROW, 1.0);
            tkv_rng_fill(&r, v, 50 * V_ROW, 1.0);
            if (i != 2) CHECK_EQ(tkv_append(kv, 0, i, k, v, 50), TKV_OK);
        }
        for (i = 1; i < 6; i++) CHECK_EQ(attend_newest(kv, 0, i, 50), TKV_OK);
    }
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
    CHECK_EQ(info.samples, 5 * 400 * HEADS);
    for (i = 1; i < 6; i++) {
        CHECK_EQ(tkv_get_quality(kv, i, &one), TKV_OK);
        CHECK_EQ(one.heads, KV_HEADS);
        CHECK_EQ(one.samples, (i < 3 ? 2 : 1) * 400 * HEADS);
        if (i != 2) sum += one.samples;
        if (i == 5) CHECK(one.kl == 0.0 && one.output_error == 0.0 && one.top1 == 1.0);
        else CHECK(one.kl > 0.0 && one.output_error > 0.0 && one.kl_max <= info.kl_max);
        if (i == 4) CHECK(one.kl > info.kl);
    }
    CHECK_EQ(sum, info.samples);
    CHECK_EQ(tkv_get_quality(kv, 0, &one), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_quality(kv, 6, &one), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_quality(kv, -1, &one), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_quality(kv, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_quality(NULL, 1, &one), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_quality(NULL, TKV_ALL_LAYERS, &one), TKV_ERR_ARG);
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_reset_quality(NULL), TKV_ERR_ARG);
    check_cache_at(kv, "layers");
    tkv_destroy(kv);
}

/* Probes watch different heads, spread evenly over the layers. The sampling period keeps the cost
 * of comparisons at or below 0.5 % of attention. */
TEST(probes_are_spread_evenly) {
    int layers, kv_heads, n, i, j;
    NEEDS_METER;
    for (layers = 1; layers < 40; layers += 6)
        for (kv_heads = 1; kv_heads < 9; kv_heads += 3)
            for (n = 1; n <= TKV_MAX_METER_HEADS; n += 1 + n / 2) {
                tkv_config cfg = tkv_default_config();
                tkv_cache *kv;
                const tkvi_meter *m;
                int per_layer[40] = {0}, low = 1000, high = 0, n_same = 0;
                cfg.model.n_layers = layers;
                cfg.model.n_heads = cfg.model.n_kv_heads = kv_heads;
                cfg.model.head_dim = 16;
                cfg.meter.heads = n;
                cfg.meter.tokens = 128;
                kv = create_cache(&cfg);
                m = kv->meter;
                CHECK_EQ(m->n, n < layers * kv_heads ? n : layers * kv_heads);
                for (i = 0; i < m->n; i++) {
                    const tkvi_head_probe *probe = &m->head_probe[i];
                    CHECK(probe->layer >= 0 && probe->layer < layers && probe->head >= 0 &&
                          probe->head < kv_heads);
                    CHECK(probe->phase >= 0 && probe->phase < m->every);
                    CHECK(tkvi_head_probe_of(m, probe->layer, probe->head) == probe);
                    for (j = 0; j < i; j++)
                        n_same +=
                            m->head_probe[j].layer == probe->layer && m->head_probe[j].head == probe->head;
                    per_layer[probe->layer]++;
                }
                CHECK_EQ(n_same, 0);
                for (i = 0; i < layers; i++) low = per_layer[i] < low ? per_layer[i] : low;
                for (i = 0; i < layers; i++) high = per_layer[i] > high ? per_layer[i] : high;
                CHECK(high - low <= 1);
                CHECK(m->every >= 32 && 800.0 * m->n <= (double)m->every * layers * kv_heads);
                tkv_destroy(kv);
            }
}

TEST(a_batch_measures_like_single_calls) {
    static const tkv_rows rows[3] = {{1, 3}, {0, 5}, {1, 1}};
    tkv_config cfg = config(TKV_KIVI4, TKV_KIVI2);
    tkv_rng r = tkv_rng_seed(5);
    tkv_attend_params p;
    tkv_cache *kv;
    tkv_quality_info info, again;
    int t, i;
    NEEDS_METER;
    memset(&info, 0, sizeof info);
    memset(&again, 0, sizeof again);
    cfg.meter.every = 1;
    cfg.limits.max_seqs = 3;
    kv = create_cache(&cfg);
    for (t = 0; t < 300; t += 50)
        CHECK_EQ(append_tokens(kv, 1, 50), TKV_OK); /* the meter watches sequence 1 */
    for (t = 0; t < 250; t += 50) CHECK_EQ(append_tokens(kv, 0, 50), TKV_OK);
    memset(&p, 0, sizeof p);
    p.layer = 1;
    p.batch = rows;
    p.n_batch = 3;
    p.q = q_in;
    p.out = out;
    tkv_rng_fill(&r, q_in, 9 * Q_ROW, 1.0);
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
    CHECK_EQ(info.samples, 4 * HEADS);
    CHECK_EQ(tkv_reset_quality(kv), TKV_OK);
    p.batch = NULL;
    p.seq = 1;
    for (i = 0; i < 2; i++) { /* the rows of sequence 1, one call each */
        p.n = i ? 1 : 3;
        p.q = q_in + (i ? 8 * Q_ROW : 0);
        CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    }
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &again), TKV_OK);
    CHECK(memcmp(&info, &again, sizeof info) == 0);
    tkv_destroy(kv);
}

TEST(configs_that_are_refused) {
    static const int heads[] = {-1, TKV_MAX_METER_HEADS + 1, 0x7fffffff}, tokens[] = {-1, 1, 127, 0x7fffffff},
                     every[] = {-1, 0x40000000};
    tkv_config cfg = config(TKV_KIVI4, TKV_KIVI4);
    tkv_cache *kv = NULL;
    char reason[160];
    int i;
    for (i = 0; i < COUNT(heads); i++) {
        cfg = config(TKV_KIVI4, TKV_KIVI4);
        cfg.meter.heads = heads[i];
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK(strstr(reason, "meter.heads is ") == reason);
        CHECK_EQ(tkv_create(&cfg, &kv), TKV_ERR_CONFIG);
    }
    for (i = 0; i < COUNT(tokens); i++) {
        cfg = config(TKV_KIVI4, TKV_KIVI4);
        cfg.meter.tokens = tokens[i];
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK(strstr(reason, "meter.tokens is ") == reason);
    }
    for (i = 0; i < COUNT(every); i++) {
        cfg = config(TKV_KIVI4, TKV_KIVI4);
        cfg.meter.every = every[i];
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
        CHECK(strstr(reason, "meter.every is ") == reason);
    }
    CHECK(kv == NULL);
    cfg = config(TKV_KIVI4, TKV_KIVI4);
    cfg.meter.tokens = 0x3fffffff; /* more than a 32-bit machine can address */
    cfg.host.allocator.alloc = NULL;
    if (sizeof(size_t) == 4) CHECK(tkv_create(&cfg, &kv) != TKV_OK);
}

/* tkv_check finds damaged fields of the meter. */
TEST(damage_is_found) {
    tkv_config cfg = config(TKV_KIVI4, TKV_KIVI4);
    tkv_cache *kv;
    tkvi_head_probe *probe;
    int t, i;
    NEEDS_METER;
    kv = create_cache(&cfg);
    for (t = 0; t < 400; t += 40) CHECK_EQ(append_tokens(kv, 0, 40), TKV_OK);
    probe = &kv->meter->head_probe[1];
    REQUIRE(probe->n >= 3);
    for (i = 0; i < 7; i++) {
        tkvi_head_probe saved = *probe;
        int start = probe->start[1], slot = probe->slot[2], seq = kv->meter->seq;
        check_cache_at(kv, "before");
        if (i == 0) probe->n = kv->meter->slots + 1;
        if (i == 1) probe->start[1] = probe->start[0];
        if (i == 2) probe->start[1]++;
        if (i == 3) probe->slot[2] = probe->slot[1];
        if (i == 4) probe->slot[2] = kv->meter->slots;
        if (i == 5) kv->meter->seq = SEQS;
        if (i == 6) kv->meter->seq = -1;
        CHECK_EQ(tkv_check(kv, NULL, 0), TKV_ERR_BROKEN);
        *probe = saved;
        probe->start[1] = start;
        probe->slot[2] = slot;
        kv->meter->seq = seq;
    }
    check_cache_at(kv, "after");
    tkv_destroy(kv);
}

/* The archive has the format of the hot tier. A block that is warm first keeps its copy there; a copy of a hot block is
 * damage. */
TEST(copies_of_blocks_in_the_hot_format) {
    tkv_config cfg = config(TKV_KIVI4, TKV_KIVI4);
    tkv_layer_info info;
    tkv_cache *kv;
    tkvi_head_probe *probe;
    const tkvi_list *list;
    int t;
    NEEDS_METER;
    cfg.tiers.hot = cfg.tiers.archive = pair_of(TKV_F16, TKV_F16);
    kv = create_cache(&cfg);
    for (t = 0; t < 600; t += 40) CHECK_EQ(append_tokens(kv, 0, 40), TKV_OK);
    check_cache_at(kv, "archive in the hot format");
    probe = &kv->meter->head_probe[1];
    CHECK_EQ(tkv_get_layer(kv, 0, probe->layer, &info), TKV_OK);
    CHECK(info.blocks[TKV_TIER_ARCHIVE] >= 3 && info.blocks[TKV_TIER_HOT] >= 2);
    CHECK_EQ(probe->n, info.blocks[TKV_TIER_WARM] + info.blocks[TKV_TIER_ARCHIVE]);
    list = tkvi_list_of(kv, 0, probe->layer);
    REQUIRE(probe->n >= 3 && probe->n < kv->meter->slots);
    probe->start[probe->n - 1] = tkvi_block_start(kv, tkvi_ids(kv, 0, probe->layer), list->n - 1);
    CHECK_EQ(tkv_check(kv, NULL, 0), TKV_ERR_BROKEN);
    tkv_destroy(kv);
}

/* >>memory */
typedef struct failing_allocator {
    size_t held;
    long count, fail_at; /* allocations so far; the one that fails, from 1, or 0: none */
    int fill;            /* byte that new memory is filled with */
} failing_allocator;

static void *failing_alloc(void *user, size_t size, size_t align) {
    failing_allocator *l = (failing_allocator *)user;
    char *raw, *p;
    if (++l->count == l->fail_at) return NULL;
    raw = (char *)malloc(size + align + sizeof(void *));
    if (!raw) exit(2);
    p = raw + sizeof(void *);
    p += (align - (size_t)((uintptr_t)p % align)) % align;
    memcpy(p - sizeof(void *), &raw, sizeof(void *));
    memset(p, l->fill, size);
    l->held += size;
    return p;
}

static void failing_release(void *user, void *ptr, size_t size, size_t align) {
    failing_allocator *l = (failing_allocator *)user;
    char *raw;
    (void)align;
    memcpy(&raw, (char *)ptr - sizeof(void *), sizeof(void *));
    l->held -= size;
    free(raw);
}

static tkv_allocator failing_allocator_of(failing_allocator *l) {
    tkv_allocator a;
    a.user = l;
    a.alloc = failing_alloc;
    a.release = failing_release;
    return a;
}

static size_t sum_memory(const tkv_memory_info *m) {
    size_t sum = m->tables + m->index + m->scratch + m->exact_copies + m->states + m->slack;
    int tier;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) sum += m->tier[tier].codes + m->tier[tier].metadata;
    return sum;
}

TEST(every_byte_is_counted) {
    int tokens, heads;
    for (heads = 0; heads <= 4; heads += 2)
        for (tokens = 0; tokens <= 500; tokens += 250) {
            tkv_config cfg = config(TKV_KIVI4, TKV_KIVI2);
            tkv_memory_info m, e, off;
            tkv_cache *kv;
            failing_allocator l;
            int t, slots;
            memset(&l, 0, sizeof l);
            cfg.host.allocator = failing_allocator_of(&l);
            cfg.meter.heads = heads;
            cfg.meter.tokens = tokens;
            kv = create_cache(&cfg);
            for (t = 0; t < 600; t++) {
                if (t % 50 == 0) {
                    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
                    CHECK_EQ(m.total, l.held);
                    CHECK_EQ(sum_memory(&m), m.total);
                }
                CHECK_EQ(append_tokens(kv, 0, 1), TKV_OK);
            }
            CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
            CHECK_EQ(m.total, l.held);
            CHECK_EQ(tkv_estimate_memory(&cfg, 600, 1, &e), TKV_OK);
            CHECK_EQ(e.exact_copies, m.exact_copies);
            CHECK_EQ(e.tables, m.tables);
            CHECK_EQ(e.scratch, m.scratch);
            CHECK_EQ(sum_memory(&e), e.total);
            CHECK_EQ(e.total - e.index, m.total - m.index);
            slots = ((tokens ? tokens : 2048) + 63) / 64;
#if defined(__GNUC__) || defined(__clang__)
            CHECK_EQ(m.exact_copies, (size_t)(heads * slots * 64 * (DK + DV) * 2));
#endif
            cfg.meter.heads = 0;
            CHECK_EQ(tkv_estimate_memory(&cfg, 600, 1, &off), TKV_OK);
            CHECK_EQ(off.exact_copies, 0);
            CHECK(heads ? off.total < e.total || !m.exact_copies : off.total == e.total);
            check_cache_at(kv, "memory");
            tkv_destroy(kv);
            CHECK_EQ(l.held, 0);
        }
}

TEST(no_more_copies_than_tokens) {
    tkv_config cfg = config(TKV_KIVI4, TKV_KIVI4);
    tkv_memory_info m;
    NEEDS_METER;
    cfg.limits.max_tokens = 300;
    CHECK_EQ(tkv_estimate_memory(&cfg, 0, 1, &m), TKV_OK);
    CHECK_EQ(m.exact_copies, (size_t)(4 * 5 * 64 * (DK + DV) * 2));
}

/* A cache in place, in memory that was not zero, measures the same errors to the bit. */
TEST(errors_in_place) {
    tkv_config cfg = config(TKV_KIVI4, TKV_R20);
    tkv_quality_info a, b;
    tkv_cache *kv, *placed = NULL;
    size_t bytes = 0, off = 0;
    char *memory;
    int t, layer;
    cfg.limits.max_tokens = 800;
    cfg.meter.every = 2;
    cfg.meter.tokens = 300;
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_get_required_bytes(&cfg, &bytes, NULL), TKV_OK);
    memory = (char *)malloc(bytes);
    if (!memory) exit(2);
    memset(memory, 0xab, bytes);
    CHECK_EQ(tkv_create_in_place(&cfg, memory, bytes - 1, &placed, NULL, 0), TKV_ERR_CAPACITY);
    REQUIRE(tkv_create_in_place(&cfg, memory, bytes, &placed, NULL, 0) == TKV_OK);
    for (t = 0; t < (tkv_test_quick() ? 600 : 800); t += 10) {
        CHECK_EQ(append_tokens(kv, 0, 10), TKV_OK);
        CHECK_EQ(append_tokens(placed, 0, 10), TKV_OK);
        for (layer = 0; layer < LAYERS; layer++) {
            CHECK_EQ(attend_newest(kv, 0, layer, 10), TKV_OK);
            CHECK_EQ(attend_newest(placed, 0, layer, 10), TKV_OK);
        }
    }
    CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &a), TKV_OK);
    CHECK_EQ(tkv_get_quality(placed, TKV_ALL_LAYERS, &b), TKV_OK);
    CHECK(memcmp(&a, &b, sizeof a) == 0);
#if defined(__GNUC__) || defined(__clang__)
    CHECK(a.samples > 0 && a.kl > 0.0);
#endif
    check_cache_at(placed, "in place");
    cfg.meter.heads = 0;
    CHECK_EQ(tkv_get_required_bytes(&cfg, &off, NULL), TKV_OK);
    CHECK(off <= bytes);
    tkv_destroy(placed);
    tkv_destroy(kv);
    free(memory);
}

/* The n-th allocation fails, for all n. The append returns an error and leaves the meter alone. A second append
 * succeeds, and the final errors are the same. */
TEST(each_allocation_fails) {
    tkv_config cfg = config(TKV_KIVI4, TKV_KIVI2);
    tkv_quality_info want, info;
    long n, total = 1;
    int t, layer;
    memset(&want, 0, sizeof want);
    for (n = 0; n <= total; n += tkv_test_quick() ? 5 : 1) {
        failing_allocator l;
        tkv_cache *kv = NULL;
        memset(&l, 0, sizeof l);
        l.fail_at = n;
        l.fill = 0x7f;
        cfg.host.allocator = failing_allocator_of(&l);
        cfg.meter.tokens = 256;
        cfg.meter.every = 5;
        if (tkv_create(&cfg, &kv) != TKV_OK) {
            CHECK(kv == NULL && l.held == 0 && n == 1);
            CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
        }
        for (t = 0; t < 400; t += 20) {
            int seq = t / 200;
            for (layer = 0; layer < LAYERS; layer++) {
                static float k[20 * K_ROW], v[20 * V_ROW];
                tkv_rng r = rng_of(3, seq, layer, t);
                tkv_status st;
                int n_before = kv->meter ? n_copies(kv) : 0, seq_before = watched_seq(kv);
                tkv_rng_fill(&r, k, COUNT(k), 1.0);
                tkv_rng_fill(&r, v, COUNT(v), 1.0);
                st = tkv_append(kv, seq, layer, k, v, 20);
                if (st) {
                    CHECK_EQ(st, TKV_ERR_NOMEM);
                    CHECK(!kv->meter || n_copies(kv) == n_before);
                    CHECK_EQ(watched_seq(kv), seq_before);
                    check_cache_at(kv, "failed");
                    CHECK_EQ(tkv_append(kv, seq, layer, k, v, 20), TKV_OK);
                }
                CHECK_EQ(attend_newest(kv, seq, layer, 20), TKV_OK);
            }
        }
        CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
        if (n == 0) {
            want = info;
            total = l.count;
        }
        CHECK(memcmp(&want, &info, sizeof info) == 0);
        tkv_destroy(kv);
        CHECK_EQ(l.held, 0);
    }
    CHECK(total > 5);
}

/* Scores beyond the range of a float, equal keys, outputs of zero: errors are finite and within their limits. */
TEST(extreme_values_have_finite_errors) {
    int which, t, i, layer, n = tkv_test_quick() ? 450 : 800;
    NEEDS_METER;
    for (which = 0; which < 4; which += tkv_test_quick() ? 2 : 1) {
        static float k[10 * K_ROW], v[10 * V_ROW];
        tkv_config cfg = config(which % 2 ? TKV_KIVI2 : TKV_A15, which % 2 ? TKV_KIVI2 : TKV_R10);
        tkv_quality_info info;
        tkv_cache *kv;
        tkv_rng r = tkv_rng_seed((uint64_t)which);
        cfg.meter.every = 1;
        cfg.host.nonfinite = TKV_NONFINITE_SATURATE;
        kv = create_cache(&cfg);
        for (t = 0; t < n; t += 10) {
            tkv_rng_fill(&r, k, COUNT(k), which == 0 ? 20000.0 : 1.0);
            tkv_rng_fill(&r, v, COUNT(v), which == 1 ? 1e30 : 1.0);
            for (i = 0; i < COUNT(k) && which == 2; i++) k[i] = 1.5f;
            for (i = 0; i < COUNT(v) && which == 3; i++) v[i] = 0.0f;
            for (layer = 0; layer < LAYERS; layer++) {
                CHECK_EQ(tkv_append(kv, 0, layer, k, v, 10), TKV_OK);
                CHECK_EQ(attend_newest(kv, 0, layer, 10), TKV_OK);
            }
        }
        CHECK_EQ(tkv_get_quality(kv, TKV_ALL_LAYERS, &info), TKV_OK);
        CHECK_EQ(info.samples, n * HEADS * LAYERS);
        CHECK(tkv_test_is_finite(info.kl) && info.kl >= 0.0 && info.kl_max <= 16.0);
        CHECK(tkv_test_is_finite(info.output_error) && info.output_error >= 0.0 && info.output_error <= 16.0);
        if (which == 2) CHECK_LE(info.kl, 1e-4); /* all keys are equal */
        if (which == 3) CHECK(info.output_error == 0.0);
        check_cache_at(kv, "extremes");
        tkv_destroy(kv);
    }
}

/* Eviction may move tokens into the block before. Their old block then starts later, so its copy must be removed. */
TEST(eviction_removes_stale_copies) {
    enum { TOKENS = 352, DIM = 64 };
    static float k[TOKENS * 2 * DIM];
    static const int chunk[] = {352, 80, 202};
    size_t budget;
    int i, evicted = 0;
    for (i = 0; i < TOKENS * 2 * DIM; i++) k[i] = (float)((i * 7919) % 1000) / 500.0f - 1.0f;
    for (budget = 905000; budget < 916000; budget += 500) {
        tkv_config cfg = make_sized_config(1, 2, 2, DIM, 1, TOKENS);
        tkv_cache *kv;
        cfg.meter.heads = 1;
        cfg.evict.policy = TKV_EVICT_H2O;
        cfg.tiers.warm = pair_of(TKV_KIVI4, TKV_KIVI4);
        cfg.tiers.archive = pair_of(TKV_KIVI2, TKV_KIVI2);
        cfg.budget.bytes = budget;
        kv = create_cache(&cfg);
        for (i = 0; i < COUNT(chunk); i++) {
            (void)tkv_append(kv, 0, 0, k, k, chunk[i]); /* it may be refused */
            check_cache(kv);
        }
        evicted += budget_of(kv).evicted > 0;
        tkv_destroy(kv);
    }
    CHECK(evicted > 5);
}

/* >>a test consumer, in a table of its own (cache/consumers.h) */
static double consumed[MAX_LEN]; /* sums of softmax weights by position */
static int n_begun, n_ended, n_blocks;
static unsigned sampled_rows;

typedef struct consumer_state {
    unsigned rows;
} consumer_state;

static int consumer_wants(const tkv_cache *kv, const tkv_attend_params *p, int stored) {
    (void)kv;
    return p->layer == stored ? TKVI_WANTS_CALL : 0;
}

static unsigned consumer_sample(const tkvi_tile_view *v) { return tkvi_all_rows(v) & sampled_rows; }

static unsigned consumer_begin(const tkvi_tile_view *v, unsigned rows, void *state) {
    (void)v;
    ((consumer_state *)state)->rows = rows;
    n_begun++;
    return rows;
}

static void consumer_observe(const tkvi_tile_view *v, int i, const float *scores, void *state) {
    const consumer_state *s = (const consumer_state *)state;
    int r, t;
    n_blocks++;
    for (r = 0; r < v->rows; r++)
        for (t = 0; t < TKVI_BLOCK && s->rows >> r & 1; t++)
            if (scores[r * TKVI_BLOCK + t] > TKVI_HIDDEN)
                consumed[tkvi_block_start(v->kv, v->ids, i) + t] +=
                    exp((double)scores[r * TKVI_BLOCK + t] - (double)v->lse[r]);
}

static void consumer_end(const tkvi_tile_view *v, void *state) {
    (void)v;
    (void)state;
    n_ended++;
}

static void run_tasks_in_reverse(void *user, int n, tkv_task task, void *ctx) {
    (void)user;
    while (n-- > 0) task(ctx, n);
}

TEST(a_consumer_sees_each_block_once) {
    static const tkvi_observes kinds[] = {TKVI_OBSERVES_TILE, TKVI_OBSERVES_BLOCKS};
    static float lse[2 * HEADS], scores[MAX_LEN];
    int kind, parallel, sampling, i;
    for (kind = 0; kind < 2; kind++)
        for (parallel = 0; parallel < 2; parallel++)
            for (sampling = 0; sampling < 2; sampling++) {
                const tkvi_consumer row = {kinds[kind],     sizeof(consumer_state), consumer_wants,
                                           consumer_sample, consumer_begin,         consumer_observe,
                                           consumer_end};
                const tkvi_consumer *const table[] = {&row};
                tkv_cache *kv;
                tkv_config cfg = config(TKV_F16, TKV_F16);
                tkv_attend_params p;
                double sum = 0.0, max_diff = 0.0;
                int blocks;
                cfg.meter.heads = 0;
                cfg.tiers.hot_tokens = TKV_UNLIMITED;
                cfg.host.parallel_for = parallel ? run_tasks_in_reverse : NULL;
                kv = create_cache(&cfg);
                for (i = 0; i < 4; i++) CHECK_EQ(append_tokens(kv, 0, CHUNK), TKV_OK);
                for (i = 0; i < 2 * Q_ROW; i++) q_in[i] = (float)((i * 37) % 101 - 50) * .02f;
                memset(&p, 0, sizeof p);
                p.n = 2;
                p.q = q_in;
                p.out = out;
                p.lse = lse;
                p.scores = scores;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
                memset(consumed, 0, sizeof consumed);
                n_begun = n_ended = n_blocks = 0;
                sampled_rows = sampling ? 4u : 63u; /* of 2 queries x 3 heads of each KV head */
                p.scores = NULL;
                CHECK_EQ(tkvi_attend(kv, &p, table, 1), TKV_OK);
                blocks = tkvi_list_of(kv, 0, 0)->n;
                CHECK_EQ(n_blocks, 2 * blocks); /* each block once per KV head */
                CHECK_EQ(n_begun, n_ended);
                CHECK_EQ(n_begun, parallel && kind == 1 ? 2 * ((blocks + 15) / 16) : 2);
                for (i = 0; i < 4 * CHUNK; i++) sum += consumed[i];
                CHECK_NEAR(sum, sampling ? 2.0 : 12.0, 1e-4);
                for (i = 0; i < 4 * CHUNK && !sampling; i++)
                    max_diff = fmax(max_diff, fabs(consumed[i] - (double)scores[i]));
                CHECK_LE(max_diff, 1e-5);
                tkv_destroy(kv);
            }
}

/* The states of all consumers fit in the memory that attention reserves for them. */
TEST(states_of_consumers_fit) {
    size_t bytes = 0, i;
    for (i = 0; i < sizeof tkvi_consumers / sizeof *tkvi_consumers; i++)
        if (tkvi_consumers[i]) bytes += tkvi_align_up(tkvi_consumers[i]->state_bytes);
    CHECK(bytes > 0 && bytes <= TKVI_CONSUMER_BYTES);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(errors_match_the_reference);
    RUN(errors_with_each_logit_option);
    RUN(errors_with_partial_coverage);
    RUN(copies_lie_evenly);
    RUN(coverage_scales_up);
    RUN(exact_formats_have_no_error);
    RUN(more_bits_less_error);
    RUN(attention_keeps_its_bits);
    RUN(the_meter_watches_one_sequence);
    RUN(errors_through_steps_and_truncations);
    RUN(errors_in_windows);
    RUN(layers_of_all_kinds);
    RUN(probes_are_spread_evenly);
    RUN(a_batch_measures_like_single_calls);
    RUN(configs_that_are_refused);
    RUN(damage_is_found);
    RUN(copies_of_blocks_in_the_hot_format);
    RUN(every_byte_is_counted);
    RUN(no_more_copies_than_tokens);
    RUN(errors_in_place);
    RUN(each_allocation_fails);
    RUN(extreme_values_have_finite_errors);
    RUN(eviction_removes_stale_copies);
    RUN(a_consumer_sees_each_block_once);
    RUN(states_of_consumers_fit);
    return tkv_test_end();
}
