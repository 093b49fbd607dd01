/* A program for a build that leaves parts out: cc -DTKV_NO_EVICT tests/compile/switches.c -lm. What is left out is
 * refused with a sentence that names the switch, and everything else works. It prints the first line that fails. */
#define TIEREDKV_IMPLEMENTATION
#include "../../tieredkv.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The switch that leaves a feature out of this build; NULL: the build has the feature. */
#if defined(TKV_CORE) || defined(TKV_NO_KVQUANT)
static const char *const no_kvquant = "TKV_NO_KVQUANT";
#else
static const char *const no_kvquant = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_SQUAT)
static const char *const no_squat = "TKV_NO_SQUAT";
#else
static const char *const no_squat = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_TOKEN_FORMATS)
static const char *const no_token_formats = "TKV_NO_TOKEN_FORMATS";
#else
static const char *const no_token_formats = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_SUBSPACE)
static const char *const no_subspace = "TKV_NO_SUBSPACE";
#else
static const char *const no_subspace = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_EVICT)
static const char *const no_evict = "TKV_NO_EVICT";
#else
static const char *const no_evict = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_OFFLOAD)
static const char *const no_offload = "TKV_NO_OFFLOAD";
#else
static const char *const no_offload = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_DISCARD)
static const char *const no_discard = "TKV_NO_DISCARD";
#else
static const char *const no_discard = NULL;
#endif
#if defined(__GNUC__) || defined(__clang__)
enum { HAS_ATOMICS = 1 };
#else
enum { HAS_ATOMICS = 0 }; /* attention collects nothing */
#endif
#if defined(TKV_CORE) || defined(TKV_NO_METER)
static const char *const no_meter = "TKV_NO_METER";
#else
static const char *const no_meter = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_MOVES)
static const char *const no_moves = "TKV_NO_MOVES";
#else
static const char *const no_moves = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_STATES)
static const char *const no_states = "TKV_NO_STATES";
#else
static const char *const no_states = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_SAVE)
static const char *const no_save = "TKV_NO_SAVE";
#else
static const char *const no_save = NULL;
#endif
#if defined(TKV_CORE) || defined(TKV_NO_APPEND_PARTS)
static const char *const no_append_parts = "TKV_NO_APPEND_PARTS";
#else
static const char *const no_append_parts = NULL;
#endif

enum { TOKENS = 700, DIM = 32, HEADS = 2, KEYS = 64, KEY_BYTES = 1 << 15 };

static float k[TOKENS * DIM], v[TOKENS * DIM], q[HEADS * DIM]; /* one KV head */
static unsigned char outside[KEYS][KEY_BYTES];                 /* the store of offloaded blocks */
static int failed;

static int check(int ok, int line, const char *what) {
    if (!ok && !failed++) printf("switches.c:%d: %s\n", line, what);
    return ok;
}
#define CHECK(cond) check((cond) ? 1 : 0, __LINE__, #cond)

static float number(int i) { return (float)((unsigned)i * 7919u % 257u) * 0.01f - 1.28f; }

static tkv_config config(void) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 1;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = 1;
    cfg.model.head_dim = DIM;
    cfg.model.rope.dim = DIM;
    cfg.tiers.warm_tokens = 128;
    cfg.host.precise = 1;
    return cfg;
}

/* A cache with all tokens; NULL after a failure. */
static tkv_cache *cache(const tkv_config *cfg) {
    tkv_cache *kv = NULL;
    char reason[200];
    int t;
    if (!CHECK(tkv_create_ex(cfg, NULL, 0, &kv, reason, sizeof reason) == TKV_OK)) {
        puts(reason);
        return NULL;
    }
    for (t = 0; t < TOKENS; t += 50)
        if (!CHECK(tkv_append(kv, 0, 0, k + t * DIM, v + t * DIM, 50) == TKV_OK))
            puts(tkv_get_last_error(kv));
    return kv;
}

/* Attention agrees with the reference within the bound for cfg.host.precise. */
static int agrees(tkv_cache *kv) {
    tkv_attend_params p;
    float out[HEADS * DIM], ref[HEADS * DIM];
    double error = 0.0, size = 0.0;
    int i;
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.q = q;
    p.out = ref;
    if (tkv_attend(kv, 0, 0, q, 1, out) || tkv_attend_reference(kv, &p)) return 0;
    for (i = 0; i < HEADS * DIM; i++) {
        const double d = (double)out[i] - (double)ref[i];
        error += d * d;
        size += (double)ref[i] * (double)ref[i];
    }
    return size > 1e-4 && error <= 4e-6 * size && tkv_check(kv, NULL, 0) == TKV_OK;
}

/* The config is refused: the sentence has the field and the switch. */
static int config_refused(const tkv_config *cfg, const char *field, const char *switch_name) {
    char reason[200];
    tkv_cache *kv = NULL;
    size_t bytes;
    return tkv_validate_config(cfg, reason, sizeof reason) == TKV_ERR_UNSUPPORTED && strstr(reason, field) &&
           strstr(reason, switch_name) && tkv_create(cfg, &kv) == TKV_ERR_UNSUPPORTED && !kv &&
           tkv_get_required_bytes(cfg, NULL, &bytes) == TKV_ERR_UNSUPPORTED;
}

/* The call was refused, and the sentence names the switch. */
static int refused(const tkv_cache *kv, tkv_status st, const char *switch_name) {
    return st == TKV_ERR_UNSUPPORTED && strstr(tkv_get_last_error(kv), switch_name) != NULL;
}

static void append_parts(void) {
    static unsigned char workspace[1 << 20];
    tkv_config cfg = config();
    tkv_cache *kv = cache(&cfg);
    tkv_append_params p;
    size_t bytes = 0;
    tkv_status st;
    memset(&p, 0, sizeof p);
    p.k = k;
    p.v = v;
    p.n = 50;
    st = tkv_get_append_bytes(kv, &p, &bytes);
    CHECK(no_append_parts ? st == TKV_ERR_UNSUPPORTED : bytes >= 128 && bytes <= sizeof workspace);
    st = tkv_append_part(kv, &p, 0, 1, workspace, sizeof workspace);
    CHECK(no_append_parts ? refused(kv, st, no_append_parts) : st == TKV_OK && agrees(kv));
    tkv_destroy(kv);
}

static const char *switch_of(tkv_format f) {
    return f >= TKV_KVQUANT4 && f <= TKV_KVQUANT2     ? no_kvquant
           : f >= TKV_SUBSPACE4 && f <= TKV_SUBSPACE2 ? no_subspace
           : f >= TKV_SQUAT4 && f <= TKV_SQUAT2       ? no_squat
           : f >= TKV_INT8 && f <= TKV_FP4            ? no_token_formats
                                                      : NULL;
}

static int stores_k_only(tkv_format f) {
    return (f >= TKV_A40 && f <= TKV_A15) || f == TKV_SQUAT4 || f == TKV_SQUAT2;
}

static void one_format(tkv_format f, tkv_side side) {
    static unsigned char block[1 << 16];
    tkv_config cfg = config();
    tkv_codec codec;
    float x[64 * DIM];
    const char *no = switch_of(f);
    memset(&codec, 0, sizeof codec);
    codec.format = f;
    codec.side = side;
    codec.head_dim = DIM;
    *(side == TKV_K ? &cfg.tiers.archive.k : &cfg.tiers.archive.v) = f;
    if (no) {
        tkv_level level;
        CHECK(config_refused(&cfg, side == TKV_K ? "tiers.archive.k is " : "tiers.archive.v is ", no));
        memset(&level, 0, sizeof level);
        level.archive = cfg.tiers.archive;
        cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_FORMAT_DEFAULT;
        cfg.budget.ladder = &level;
        cfg.budget.n_levels = 1;
        CHECK(config_refused(&cfg, "budget.ladder[0].archive.", no));
        CHECK(tkv_get_block_bytes(&codec) == 0);
        CHECK(tkv_encode_block(&codec, k, 0, 64, block, sizeof block) == TKV_ERR_UNSUPPORTED);
        CHECK(tkv_decode_block(&codec, block, sizeof block, 64, x, 0) == TKV_ERR_UNSUPPORTED);
    } else {
        tkv_cache *kv = cache(&cfg);
        CHECK(tkv_get_block_bytes(&codec) > 0 && tkv_get_block_bytes(&codec) <= sizeof block);
        CHECK(tkv_encode_block(&codec, k, 0, 64, block, sizeof block) == TKV_OK);
        CHECK(tkv_decode_block(&codec, block, sizeof block, 64, x, 0) == TKV_OK);
        CHECK(kv && agrees(kv));
        tkv_destroy(kv);
    }
}

static void formats(void) {
    int f, value;
    for (f = TKV_F32; f < TKV_FORMAT_COUNT; f++) {
        CHECK(tkv_find_name(TKV_NAME_FORMAT, tkv_get_name(TKV_NAME_FORMAT, f), &value) == TKV_OK);
        CHECK(value == f);
        if (f < TKV_R40 || f > TKV_R10) one_format((tkv_format)f, TKV_K);
        if (!stores_k_only((tkv_format)f)) one_format((tkv_format)f, TKV_V);
        if (failed) {
            printf("format %s\n", tkv_get_name(TKV_NAME_FORMAT, f));
            return;
        }
    }
}

/* Sequences, steps, tables, estimates and a budget: no switch leaves them out. */
static void core(void) {
    tkv_config cfg = config();
    tkv_cache *kv = cache(&cfg);
    static unsigned char saved[4096];
    tkv_memory_info memory;
    tkv_budget_info budget;
    tkv_samples samples;
    tkv_status st;
    size_t bytes;
    float row[DIM];
    if (!kv) return;
    CHECK(agrees(kv));
    CHECK(tkv_read(kv, 0, 0, 10, 1, row, row) == TKV_OK);
    CHECK(tkv_save_calibration(kv, saved, sizeof saved, &bytes) == TKV_OK);
    CHECK(tkv_load_calibration(kv, saved, bytes) == TKV_OK);
    CHECK(tkv_seq_begin(kv, 0) == TKV_OK && tkv_append(kv, 0, 0, k, v, 3) == TKV_OK);
    CHECK(tkv_seq_abort(kv, 0) == TKV_OK && tkv_get_length(kv, 0, TKV_ALL_LAYERS) == TOKENS);
    CHECK(tkv_seq_truncate(kv, 0, TOKENS - 5) == TKV_OK && agrees(kv));
    CHECK(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL) == TKV_OK && agrees(kv));
    memset(&samples, 0, sizeof samples);
    samples.k = k;
    samples.v = v;
    samples.n = 64;
    st = tkv_fit_calibration(kv, &samples);
    CHECK(no_kvquant ? refused(kv, st, no_kvquant) : st == TKV_ERR_ARG); /* no layer has KVQUANT */
    CHECK(tkv_seq_reset(kv, 0) == TKV_OK && tkv_get_length(kv, 0, 0) == 0);
    tkv_destroy(kv);
    CHECK(tkv_estimate_memory(&cfg, TOKENS, 1, &memory) == TKV_OK);
    cfg.budget.bytes = memory.peak + 32768; /* recoding needs pages of its own */
    kv = cache(&cfg);
    if (!kv) return;
    CHECK(agrees(kv) && tkv_get_budget(kv, &budget) == TKV_OK && budget.level > 0);
    tkv_destroy(kv);
}

static void rules_of_eviction(void) {
    tkv_importance_config by;
    tkv_evict_config evict;
    tkv_token_importance token[8];
    tkv_evict_view view;
    tkv_evict_budget share;
    uint64_t victims;
    float score[8];
    int of_layer[2];
    const tkv_status want = no_evict ? TKV_ERR_UNSUPPORTED : TKV_OK;
    memset(&by, 0, sizeof by);
    memset(&evict, 0, sizeof evict);
    memset(token, 0, sizeof token);
    memset(&view, 0, sizeof view);
    memset(&share, 0, sizeof share);
    evict.policy = TKV_EVICT_SLIDING;
    view.n = 8;
    share.n_layers = 2;
    share.total = 100;
    CHECK(tkv_update_importance(&by, token, NULL, NULL, 8, 7, score) == want);
    CHECK(tkv_select_victims(&evict, &view, 6, score, &victims, NULL) == want);
    CHECK(tkv_split_evict_budget(&share, of_layer) == want);
    CHECK(strcmp(tkv_get_name(TKV_NAME_EVICT_POLICY, TKV_EVICT_H2O), "h2o") == 0);
}

static void eviction(void) {
    tkv_config cfg = config();
    tkv_cache *kv;
    tkv_evict_params p;
    tkv_budget_info info;
    tkv_promotion promotion;
    tkv_ranked top[4];
    float x[TOKENS];
    int n;
    rules_of_eviction();
    memset(&p, 0, sizeof p);
    memset(&promotion, 0, sizeof promotion);
    memset(x, 0, sizeof x);
    if (no_evict) {
        cfg.evict.policy = TKV_EVICT_SLIDING;
        CHECK(config_refused(&cfg, "evict.policy is 1;", no_evict));
        cfg = config();
        cfg.tiers.n_anchors = 2;
        CHECK(config_refused(&cfg, "tiers.n_anchors is 2;", no_evict));
        cfg = config();
        cfg.importance.sample_every = 8;
        CHECK(config_refused(&cfg, "importance.sample_every is 8;", no_evict));
        cfg = config();
        cfg.promotion.every = 8;
        CHECK(config_refused(&cfg, "promotion.every is 8;", no_evict));
        cfg = config();
        kv = cache(&cfg);
        CHECK(refused(kv, tkv_evict(kv, &p), no_evict));
        CHECK(refused(kv, tkv_seq_pin(kv, 0, 0, 4, TKV_UNLIMITED), no_evict));
        CHECK(refused(kv, tkv_seq_set_sinks(kv, 0, 0, 4, 1), no_evict));
        CHECK(refused(kv, tkv_get_importance(kv, 0, 0, 0, TOKENS, x, NULL), no_evict));
        CHECK(refused(kv, tkv_add_scores(kv, 0, 0, 0, TOKENS, x), no_evict));
        CHECK(refused(kv, tkv_find_top_tokens(kv, 0, 0, 4, 1, top, &n), no_evict));
        CHECK(refused(kv, tkv_promote_important(kv, 0, 0, &promotion), no_evict));
        tkv_destroy(kv);
        return;
    }
    cfg.evict.policy = TKV_EVICT_H2O;
    cfg.evict.keep_tokens = 400;
    cfg.tiers.n_anchors = 4;
    cfg.importance.sample_every = 1;
    kv = cache(&cfg);
    CHECK(kv && agrees(kv));
    CHECK(tkv_get_budget(kv, &info) == TKV_OK && info.evicted > 200);
    CHECK(tkv_seq_pin(kv, 0, 600, 4, TKV_UNLIMITED) == TKV_OK);
    p.keep = 300;
    CHECK(tkv_evict(kv, &p) == TKV_OK && agrees(kv));
    CHECK(tkv_get_importance(kv, 0, 0, 0, TOKENS, x, NULL) == TKV_OK && x[600] > 0.0f);
    CHECK(tkv_add_scores(kv, 0, 0, 0, TOKENS, x) == TKV_OK);
    CHECK(tkv_find_top_tokens(kv, 0, 0, 4, 1, top, &n) == TKV_OK && n == 4);
    if (no_offload && no_discard) CHECK(refused(kv, tkv_promote_important(kv, 0, 0, &promotion), no_offload));
    else CHECK(tkv_promote_important(kv, 0, 0, &promotion) == TKV_ERR_NO_SOURCE);
    tkv_destroy(kv);
}

static int store_write(void *user, uint32_t key, size_t at, const void *bytes, size_t size) {
    (void)user;
    if (key >= KEYS || at + size > KEY_BYTES) return 1;
    memcpy(outside[key] + at, bytes, size);
    return 0;
}

static int store_read(void *user, uint32_t key, size_t at, void *bytes, size_t size) {
    (void)user;
    if (key >= KEYS || at + size > KEY_BYTES) return 1;
    memcpy(bytes, outside[key] + at, size);
    return 0;
}

static void offloading(void) {
    tkv_config cfg = config();
    tkv_cache *kv;
    int n = 0;
    cfg.offload.write = store_write;
    cfg.offload.read = store_read;
    cfg.offload.keep_exact = 1;
    if (no_offload) {
        CHECK(config_refused(&cfg, "offload.write is 1;", no_offload));
        cfg = config();
        cfg.promotion.every = 8;
        CHECK(config_refused(&cfg, "promotion.every is 8;", no_evict ? no_evict : no_offload));
        cfg = config();
    }
    kv = cache(&cfg);
    if (!kv) return;
    if (no_offload) {
        CHECK(refused(kv, tkv_offload(kv, 0, TKV_ALL_LAYERS, 3, &n), no_offload) && n == 0);
        CHECK(refused(kv, tkv_promote(kv, 0, 0, 5), no_offload));
    } else {
        CHECK(tkv_offload(kv, 0, TKV_ALL_LAYERS, 3, &n) == TKV_OK && n == 3 && agrees(kv));
        CHECK(tkv_promote(kv, 0, 0, 5) == TKV_OK && agrees(kv));
    }
    tkv_destroy(kv);
}

static tkv_status compute(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers, int start,
                          int n) {
    (void)user;
    (void)first_layer;
    (void)n_layers;
    return tkv_restore(kv, seq, 0, start, k + start * DIM, v + start * DIM, n);
}

/* cfg.recompute: gives the rows that were appended. k and v begin with token 0 */
static int give_rows(void *user, int seq, int layer, int head, const int *positions, int n, float *k_rows,
                     float *v_rows) {
    int t;
    (void)user, (void)seq, (void)layer, (void)head;
    for (t = 0; t < n; t++) {
        if (k_rows) memcpy(k_rows + t * DIM, k + positions[t] * DIM, DIM * sizeof *k);
        if (v_rows) memcpy(v_rows + t * DIM, v + positions[t] * DIM, DIM * sizeof *v);
    }
    return 0;
}

static void discarding(void) {
    tkv_config cfg = config();
    tkv_remat_config model;
    tkv_remat r;
    tkv_remat_block block[32];
    tkv_remat_action action[32];
    tkv_cache *kv;
    char reason[100];
    size_t freed;
    float out[HEADS * DIM];
    int n = 0, start, first;
    cfg.budget.discard = 1;
    memset(&r, 0, sizeof r);
    memset(&model, 0, sizeof model);
    model.n_layers = 1;
    model.n_heads = HEADS;
    model.head_dim = DIM;
    model.layer_params = 1000.0;
    if (no_discard) {
        CHECK(config_refused(&cfg, "budget.discard is 1;", no_discard));
        cfg.budget.discard = 0;
        cfg.recompute.compute = give_rows;
        CHECK(config_refused(&cfg, "recompute.compute is 1;", no_discard));
        cfg.recompute.compute = NULL;
        CHECK(tkv_init_remat(&r, &model, reason, sizeof reason) == TKV_ERR_UNSUPPORTED);
        CHECK(strstr(reason, no_discard) != NULL);
        CHECK(tkv_decide_discard(&r, block, 0, 0, 1.0f, 1, action, NULL) == TKV_ERR_UNSUPPORTED);
    } else CHECK(tkv_init_remat(&r, &model, reason, sizeof reason) == TKV_OK);
    kv = cache(&cfg);
    if (!kv) return;
    if (no_discard) {
        CHECK(refused(kv, tkv_seq_discard(kv, 0, 128, &n), no_discard) && n == 0);
        CHECK(refused(kv, tkv_restore(kv, 0, 0, 4, k, v, 64), no_discard));
        CHECK(refused(kv, tkv_seq_recompute(kv, 0, &r, 1, compute, NULL, &n), no_discard));
        CHECK(refused(kv, tkv_seq_free_bytes(kv, 0, &r, 1.0f, 1, block, action, 32, &freed), no_discard));
        CHECK(tkv_seq_find_discarded(kv, 0, &start, &n) == TKV_ERR_UNSUPPORTED);
        CHECK(tkv_seq_list_blocks(kv, 0, block, 32, &n) == TKV_ERR_UNSUPPORTED);
    } else {
        CHECK(tkv_seq_discard(kv, 0, 128, &n) == TKV_OK && n == 128);
        CHECK(tkv_attend(kv, 0, 0, q, 1, out) == TKV_ERR_NO_SOURCE);
        CHECK(tkv_seq_find_discarded(kv, 0, &first, &n) == TKV_OK && first == 4 && n == 128);
        CHECK(tkv_seq_recompute(kv, 0, &r, TOKENS, compute, NULL, &n) == TKV_OK && n == 0 && agrees(kv));
        CHECK(tkv_seq_list_blocks(kv, 0, block, 32, &n) == TKV_OK && n > 8);
        CHECK(tkv_seq_free_bytes(kv, 0, &r, 1.0f, 1, block, action, 32, &freed) == TKV_OK && freed > 0);
        tkv_destroy(kv);
        cfg.recompute.compute = give_rows;
        cfg.recompute.cost.layer_params = 1000.0;
        kv = cache(&cfg);
        if (!kv) return;
        CHECK(tkv_seq_discard(kv, 0, 128, &n) == TKV_OK && n == 128 && agrees(kv));
    }
    tkv_destroy(kv);
}

static void metering(void) {
    tkv_config cfg = config();
    tkv_quality_info info;
    tkv_score_params p;
    static tkv_feedback f;
    tkv_feedback_info newest;
    tkv_advice advice;
    tkv_threshold plan, found;
    tkv_thresholds t;
    tkv_cache *kv;
    char text[400], reason[100];
    float score = 0.5f;
    const tkv_status want = no_meter ? TKV_ERR_UNSUPPORTED : TKV_OK;
    size_t needed = 0;
    tkv_level level[2];
    tkv_pressure controller;
    memset(level, 0, sizeof level);
    cfg.meter.heads = 1;
    cfg.meter.every = 1;
    if (no_meter) {
        CHECK(config_refused(&cfg, "meter.heads is 1;", no_meter));
        cfg.meter.heads = 0;
        level[1].from_tokens = 500;
        cfg.budget.ladder = level;
        cfg.budget.n_levels = 2;
        CHECK(config_refused(&cfg, "budget.ladder[1].from_tokens is 500;", no_meter));
        cfg.budget.ladder = NULL;
        cfg.budget.n_levels = 0;
        cfg.budget.adapt = 1;
        CHECK(config_refused(&cfg, "budget.adapt is 1;", no_meter));
        cfg.budget.adapt = 0;
        cfg.budget.pressure.jump = 1;
        CHECK(config_refused(&cfg, "leaves jump out", no_meter));
        CHECK(tkv_init_pressure(&controller, &cfg.budget.pressure, reason, sizeof reason) == TKV_ERR_CONFIG);
        CHECK(strstr(reason, no_meter) != NULL);
        cfg.budget.pressure.jump = 0;
    }
    CHECK((tkv_apply_preset(&cfg, "growing") == TKV_OK) == !no_meter);
    if (!no_meter) CHECK(tkv_apply_preset(&cfg, "balanced") == TKV_OK);
    kv = cache(&cfg);
    if (!kv) return;
    CHECK(agrees(kv));
    memset(&p, 0, sizeof p);
    memset(&plan, 0, sizeof plan);
    p.meter = &info;
    t.entry = &found;
    t.n = 0;
    t.capacity = 1;
    memcpy(plan.model, "m", 1);
    plan.context = 100;
    plan.archive.k = TKV_A30;
    plan.archive.v = TKV_R30;
    CHECK(tkv_get_quality(kv, TKV_ALL_LAYERS, &info) == want &&
          (no_meter || !HAS_ATOMICS || info.samples > 0));
    CHECK(tkv_compute_score(&p, &score) == (no_meter || HAS_ATOMICS ? want : TKV_ERR_RANGE)); /* no samples */
    CHECK(tkv_init_feedback(&f, NULL, text, sizeof text) == want && (!no_meter || strstr(text, no_meter)));
    CHECK(tkv_observe_score(&f, score) == want);
    CHECK(tkv_get_advice(&f, 64, 0, &advice) == want && tkv_get_feedback(&f, 0, &newest) == want);
    CHECK(tkv_adapt_plan(kv, &f, NULL) == want);
    CHECK(!no_meter || strstr(tkv_get_last_error(kv), no_meter));
    CHECK(tkv_reset_quality(kv) == want);
    CHECK(!no_meter || strstr(tkv_get_last_error(kv), no_meter));
    CHECK(tkv_put_threshold(&t, &plan) == want);
    CHECK(tkv_find_thresholds(&t, "m", 0, 100, &plan, 1, NULL) == want);
    plan.layer = TKV_ALL_LAYERS;
    CHECK(tkv_apply_threshold(&cfg, NULL, &plan, reason, sizeof reason) == want);
    CHECK(!no_meter || strstr(reason, no_meter));
    CHECK(tkv_print_thresholds(&t, text, sizeof text, &needed) == want);
    CHECK(tkv_parse_thresholds(&t, text, no_meter ? 0 : strlen(text), reason, sizeof reason) == want);
    CHECK(!no_meter || strstr(reason, no_meter));
    CHECK(tkv_copy_thresholds(&t, "m", "n", 1.0f) == (no_meter ? TKV_ERR_UNSUPPORTED : TKV_ERR_CAPACITY));
    tkv_destroy(kv);
}

static void reports(void) {
    tkv_config cfg = config();
    tkv_cache *kv = cache(&cfg);
    char text[4096];
    int found = -1;
#ifndef TKV_NO_REPORTS
    tkv_level_info level;
#endif
    if (!kv) return;
#ifdef TKV_NO_REPORTS
    CHECK(tkv_find_name(TKV_NAME_FORMAT, "q4", &found) == TKV_ERR_RANGE);
    tkv_destroy(kv);
    kv = NULL;
    CHECK(tkv_create_ex(&cfg, "{}", 2, &kv, text, sizeof text) == TKV_ERR_UNSUPPORTED && !kv);
    CHECK(strstr(text, "TKV_NO_REPORTS") != NULL);
#else
    CHECK(tkv_print_config(&cfg, 1, text, sizeof text, NULL) == TKV_OK);
    CHECK(tkv_get_level(kv, 0, &level) == TKV_OK && strcmp(level.tag, "a30/r30") == 0);
    CHECK(tkv_find_level(kv, "a30/r30", &found) == TKV_OK && found == 0);
    CHECK(tkv_find_name(TKV_NAME_FORMAT, "q4", &found) == TKV_OK && found == TKV_KIVI4);
    CHECK(tkv_print_report(kv, TKV_REPORT_JSON, NULL, text, sizeof text, NULL) == TKV_OK);
    tkv_destroy(kv);
#endif
}

static void moving(void) {
    tkv_config cfg = config();
    tkv_cache *kv;
    float x[DIM] = {0};
    int jump[2] = {5000, 5001}, kept[1], n = -1;
    tkv_append_params p;
    cfg.limits.max_seqs = 2;
    kv = cache(&cfg);
    if (!kv) return;
    memset(&p, 0, sizeof p);
    p.n = 2;
    p.k = k;
    p.v = v;
    p.token_positions = jump;
    kept[0] = TOKENS - 1;
    if (no_moves) {
        CHECK(refused(kv, tkv_seq_remove(kv, 0, 100, 200), no_moves));
        CHECK(refused(kv, tkv_seq_shift(kv, 0, 0, TKV_UNLIMITED, 7), no_moves));
        CHECK(refused(kv, tkv_seq_copy(kv, 0, 100, 200, 1, 100), no_moves));
        CHECK(refused(kv, tkv_seq_keep(kv, 0, TOKENS - 2, kept, 1), no_moves));
        CHECK(refused(kv, tkv_seq_slide(kv, 0, 1, &n), no_moves));
        CHECK(refused(kv, tkv_append_ex(kv, &p), no_moves));
        CHECK(tkv_rotate_rope(&cfg.model.rope, DIM, 3, x) == TKV_ERR_UNSUPPORTED);
        jump[0] = TOKENS; /* no jump */
        jump[1] = TOKENS + 1;
        CHECK(tkv_append_ex(kv, &p) == TKV_OK);
    } else {
        CHECK(tkv_seq_remove(kv, 0, 100, 200) == TKV_OK);
        CHECK(tkv_seq_shift(kv, 0, 200, TKV_UNLIMITED, -100) == TKV_OK);
        CHECK(tkv_seq_copy(kv, 0, 300, 400, 1, 0) == TKV_OK && tkv_get_length(kv, 1, 0) == 100);
        CHECK(tkv_seq_keep(kv, 0, TOKENS - 2, kept, 1) == TKV_OK && tkv_get_length(kv, 0, 0) == TOKENS - 1);
        CHECK(tkv_seq_slide(kv, 0, 1, &n) == TKV_OK && n == 0);
        CHECK(tkv_append_ex(kv, &p) == TKV_OK);
        CHECK(tkv_rotate_rope(&cfg.model.rope, DIM, 3, x) == TKV_OK);
    }
    CHECK(agrees(kv));
    tkv_destroy(kv);
}

static int take_bytes(void *user, const void *bytes, size_t size) {
    (void)bytes;
    *(size_t *)user += size;
    return 0;
}

static void saves(void) {
    static unsigned char bytes[1 << 20];
    tkv_config cfg = config();
    tkv_cache *kv;
    tkv_save_params save;
    tkv_load_params load;
    size_t n = 0, taken = 0;
    cfg.limits.max_seqs = 2;
    kv = cache(&cfg);
    if (!kv) return;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    load.seq = 1;
    if (no_save) {
        CHECK(refused(kv, tkv_seq_save(kv, &save, bytes, sizeof bytes, &n), no_save));
        CHECK(refused(kv, tkv_seq_save_to(kv, &save, take_bytes, &taken), no_save));
        CHECK(refused(kv, tkv_seq_load(kv, &load, bytes, sizeof bytes, NULL), no_save));
    } else {
        CHECK(tkv_seq_save(kv, &save, bytes, sizeof bytes, &n) == TKV_OK);
        CHECK(tkv_seq_save_to(kv, &save, take_bytes, &taken) == TKV_OK && taken == n);
        CHECK(tkv_seq_load(kv, &load, bytes, n, NULL) == TKV_OK && tkv_get_length(kv, 1, 0) == TOKENS);
    }
    tkv_destroy(kv);
}

static void states(void) {
    tkv_config cfg = config();
    tkv_cache *kv = cache(&cfg);
    char bytes[40] = {0};
    size_t needed = 0;
    int at[2], n = 0;
    if (!kv) return;
    if (no_states) {
        CHECK(refused(kv, tkv_seq_put_state(kv, 0, 0, 10, bytes, 40), no_states));
        CHECK(tkv_seq_get_state(kv, 0, 0, 10, bytes, 40, &needed) == TKV_ERR_UNSUPPORTED);
        CHECK(tkv_seq_list_states(kv, 0, 0, at, 2, &n) == TKV_ERR_UNSUPPORTED);
        CHECK(tkv_seq_find_state(kv, 0, 20) == 20); /* no layer needs one */
    } else {
        CHECK(tkv_seq_put_state(kv, 0, 0, 10, bytes, 40) == TKV_OK);
        CHECK(tkv_seq_get_state(kv, 0, 0, 10, bytes, 40, &needed) == TKV_OK && needed == 40);
        CHECK(tkv_seq_list_states(kv, 0, 0, at, 2, &n) == TKV_OK && n == 1 && at[0] == 10);
        CHECK(tkv_seq_find_state(kv, 0, 20) == 10);
    }
    CHECK(agrees(kv));
    tkv_destroy(kv);
}

int main(void) {
    int i;
    for (i = 0; i < TOKENS * DIM; i++) {
        k[i] = number(i);
        v[i] = number(3 * i + 1);
    }
    for (i = 0; i < HEADS * DIM; i++) q[i] = number(5 * i + 2);
    core();
    formats();
    eviction();
    offloading();
    discarding();
    metering();
    moving();
    states();
    saves();
    append_parts();
    reports();
    return failed != 0;
}
