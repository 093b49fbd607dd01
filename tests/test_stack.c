/*
 * test_stack.c - the stack that public calls use, by groups of calls: the part of a filled stack that changed. Chapter
 * 13 of the manual has the limits. white_stack.c measures attention further: moved
 * tokens, calls at the same time.
 *
 *     build/tests/test_stack --print      prints the most of each group
 */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 600 /* pthread_attr_setstack, posix_memalign */
#endif
#include "../tieredkv.h"
#include "kit.h"

#if defined(__has_feature)
#define HAS_FEATURE(x) __has_feature(x)
#else
#define HAS_FEATURE(x) 0
#endif
#if defined(__x86_64__) && defined(__unix__) && !defined(__SANITIZE_ADDRESS__) &&                            \
    !defined(__SANITIZE_THREAD__) && !HAS_FEATURE(address_sanitizer) && !HAS_FEATURE(thread_sanitizer) &&    \
    !HAS_FEATURE(memory_sanitizer)
#include <pthread.h>

#ifdef __clang__
#define ATTEND_KIB 160 /* clang lets fewer variables share their memory */
#else
#define ATTEND_KIB 128
#endif

enum {
    STACK = 1 << 20,
    SEQS = 7,
    TOKENS = 320,
    KV_HEADS = 2,
    HEADS = 8,
    WIDEST = TKV_MAX_HEAD_DIM,
    BYTES = 4 << 20
};

/* What the cache of a group has beside tiers. */
enum { OFFLOADS = 1, DISCARDS = 2, EVICTS = 4, METERS = 8, BUDGET = 16, LOADS = 32 };

typedef struct scene {
    tkv_config cfg;
    tkv_cache *kv, *other; /* other: a new cache, for LOADS */
    test_store store;
    int n_failed; /* calls that failed */
} scene;

static float x[64 * KV_HEADS * WIDEST], y[64 * KV_HEADS * WIDEST], out[16 * HEADS * WIDEST];
static unsigned char bytes[BYTES];
static int is_printing, most_used[32];

static void ok(scene *s, tkv_status st) { s->n_failed += st != TKV_OK; }

static tkv_status append(scene *s, int n) { return tkv_append(s->kv, 0, 0, x, x, n); }

/* >>groups */
static void run_create(scene *s) {
    static const char text[] = "preset = compact\nlayers[0].warm = q8\ntiers.hot_tokens = 70\n";
    char reason[200];
    tkv_cache *kv = NULL;
    tkv_memory_info memory;
    tkv_config cfg = s->cfg;
    size_t needed;
    int n;
    cfg = tkv_default_config();
    ok(s, tkv_apply_preset(&cfg, "growing"));
    ok(s, tkv_validate_config(&s->cfg, reason, sizeof reason));
    ok(s, tkv_estimate_memory(&s->cfg, 4000, 2, &memory));
    cfg = s->cfg;
    cfg.budget.bytes = 8 << 20;
    ok(s, tkv_estimate_context(&cfg, 2, &n));
    ok(s, tkv_create(&s->cfg, &kv));
    tkv_destroy(kv);
    kv = NULL;
    ok(s, tkv_create_ex(&s->cfg, text, sizeof text - 1, &kv, reason, sizeof reason));
    tkv_destroy(kv);
    kv = NULL;
    cfg = s->cfg;
    cfg.limits.max_tokens = 512;
    ok(s, tkv_get_required_bytes(&cfg, &needed, NULL));
    if (needed <= sizeof bytes)
        ok(s, tkv_create_in_place(&cfg, bytes, sizeof bytes, &kv, reason, sizeof reason));
    tkv_destroy(kv);
}

static void run_append(scene *s) {
    tkv_append_params p;
    int t, done;
    memset(&p, 0, sizeof p);
    for (t = 0; t < 66; t++) ok(s, append(s, 1));
    p.n = 64;
    p.k = p.v = x;
    ok(s, tkv_append_ex(s->kv, &p));
    ok(s, tkv_seq_reserve(s->kv, 0, 64));
    ok(s, tkv_seq_begin(s->kv, 0));
    ok(s, append(s, 64));
    ok(s, tkv_seq_commit(s->kv, 0));
    ok(s, tkv_seq_begin(s->kv, 0));
    ok(s, append(s, 3));
    ok(s, tkv_seq_abort(s->kv, 0));
    ok(s, tkv_maintain(s->kv, 8, NULL, NULL, &done));
    ok(s, tkv_seq_flush(s->kv, 0, TKV_FLUSH_ALL));
}

static void run_append_parts(scene *s) {
    tkv_append_params p;
    size_t size;
    int i, part;
    memset(&p, 0, sizeof p);
    p.n = 64;
    p.k = p.v = x;
    for (i = 0; i < 3; i++) {
        ok(s, tkv_get_append_bytes(s->kv, &p, &size));
        if (size > sizeof bytes) exit(2);
        memset(bytes, 0, size);
        for (part = 0; part < 2; part++) ok(s, tkv_append_part(s->kv, &p, part, 2, bytes, size));
    }
}

static void run_attend(scene *s) {
    ok(s, tkv_attend(s->kv, 0, 0, out, 1, out + WIDEST));
    ok(s, tkv_attend(s->kv, 0, 0, x, 8, out));
}

/* A call with all that a call can have. */
static tkv_attend_params make_call(int n) {
    static float logits[HEADS], scores[2 * TOKENS], lse[8 * HEADS], mask[2 * TOKENS];
    static const tkv_rows two[] = {{0, 4}, {0, 4}};
    static uint64_t seen[8];
    tkv_attend_params p;
    memset(seen, 0xff, sizeof seen);
    memset(&p, 0, sizeof p);
    p.n = n;
    p.q = x;
    p.out = out;
    p.lse = lse;
    p.scores = scores;
    p.softcap = 30.0f;
    p.alibi_slopes = p.sink_logits = logits;
    if (n == 2) p.mask = mask;
    if (n == 8) p.mask_bits = seen, p.n_mask_bits = 60, p.batch = two, p.n_batch = 2;
    return p;
}

static void run_attend_parts(scene *s) {
    static const int rows[] = {2, 8};
    char reason[200];
    size_t size;
    int i, part;
    for (i = 0; i < COUNT(rows); i++) {
        tkv_attend_params p = make_call(rows[i]);
        ok(s, tkv_validate_attend(s->kv, &p, reason, sizeof reason));
        ok(s, tkv_attend_ex(s->kv, &p));
        ok(s, tkv_get_attend_bytes(s->kv, &p, &size));
        if (size > sizeof bytes) exit(2);
        memset(bytes, 0, size);
        for (part = 0; part < 2; part++) ok(s, tkv_attend_part(s->kv, &p, part, 2, bytes, size));
    }
}

static void run_reference(scene *s) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.n = 2;
    p.q = x;
    p.out = out;
    ok(s, tkv_attend_reference(s->kv, &p));
}

static void run_read(scene *s) {
    static const int indices[] = {3, 200, 3, 100};
    ok(s, tkv_read(s->kv, 0, 0, 5, 64, x, y));
    ok(s, tkv_read_tokens(s->kv, 0, 0, indices, 4, y, y));
}

static void run_sequences(scene *s) {
    static const int indices[] = {301, 305, 310}, sources[] = {1, 0};
    int n, positions[4];
    uint8_t tiers[64];
    size_t size;
    tkv_seq_memory_info memory;
    ok(s, tkv_seq_fork(s->kv, 0, 1, 250));
    ok(s, tkv_append(s->kv, 1, 0, x, x, 20));
    ok(s, tkv_seq_reorder(s->kv, 0, sources, 2));
    ok(s, tkv_seq_reorder(s->kv, 0, sources, 2));
    ok(s, tkv_seq_keep(s->kv, 0, 300, indices, 3));
    ok(s, tkv_seq_shift(s->kv, 0, 100, TKV_UNLIMITED, 7));
    ok(s, tkv_seq_copy(s->kv, 0, 110, 150, 2, 0));
    ok(s, tkv_seq_remove(s->kv, 0, 130, 140));
    ok(s, tkv_seq_slide(s->kv, 0, 64, &n));
    ok(s, tkv_seq_truncate(s->kv, 0, 270));
    ok(s, tkv_seq_put_state(s->kv, 0, 1, 200, x, 100));
    ok(s, tkv_seq_get_state(s->kv, 0, 1, 200, bytes, 100, &size));
    ok(s, tkv_seq_list_states(s->kv, 0, 1, positions, 4, &n));
    s->n_failed += tkv_seq_find_state(s->kv, 0, 250) != 200 || tkv_get_length(s->kv, 0, 0) != 270;
    ok(s, tkv_get_positions(s->kv, 0, 0, 200, 4, positions));
    ok(s, tkv_get_tiers(s->kv, 0, 0, 100, 64, tiers));
    ok(s, tkv_seq_get_memory(s->kv, 0, &memory));
    ok(s, tkv_seq_reset(s->kv, 1));
}

static int write_nowhere(void *user, const void *piece, size_t size) {
    (void)user, (void)piece, (void)size;
    return 0;
}

static int read_bytes(void *user, size_t at, void *piece, size_t size) {
    memcpy(piece, (const unsigned char *)user + at, size);
    return 0;
}

static void run_save(scene *s) {
    unsigned char *file = bytes + (64 - (size_t)((uintptr_t)bytes % 64)) % 64; /* to attach it */
    const size_t most = sizeof bytes - 64;
    tkv_save_params save;
    tkv_load_params load;
    size_t n = 0, more;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    ok(s, tkv_seq_save(s->kv, &save, file, most, &n));
    ok(s, tkv_seq_save_to(s->kv, &save, write_nowhere, NULL));
    load.seq = 1;
    ok(s, tkv_seq_load(s->kv, &load, file, n, NULL));
    ok(s, tkv_seq_reset(s->kv, 1));
    ok(s, tkv_seq_load_from(s->kv, &load, n, read_bytes, file, NULL));
    load.seq = 2;
    load.attach = 1;
    ok(s, tkv_seq_load(s->kv, &load, file, n, NULL));
    save.former = file;
    save.former_bytes = n;
    ok(s, tkv_seq_save(s->kv, &save, file + n, most - n, &more));
    ok(s, tkv_seq_reset(s->kv, 2));
    memset(&save, 0, sizeof save);
    save.seq = load.seq = TKV_ALL_SEQS;
    load.attach = 0;
    ok(s, tkv_seq_save(s->kv, &save, file, most, &n));
    ok(s, tkv_seq_load(s->other, &load, file, n, NULL));
}

/* Files with tables of their own, more than a layer has versions: their blocks are coded again. */
static void run_load_of_tables(scene *s) {
    tkv_save_params save;
    tkv_load_params load;
    tkv_load_info info;
    tkv_calibration_info tables;
    int i, t, n_recoded = 0;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    ok(s, tkv_get_calibration(s->kv, &tables));
    if (!tables.n_calibrated) return;
    for (i = 1; i < SEQS; i++) {
        tkv_cache *from = create_cache(&s->cfg);
        size_t n = 0;
        for (t = 0; t < 64 * i; t++) x[t] += 1.0f; /* other tables */
        for (t = 0; t < 4; t++) ok(s, tkv_append(from, 0, 0, x, x, 64));
        ok(s, tkv_freeze_calibration(from));
        ok(s, tkv_seq_flush(from, 0, TKV_FLUSH_FULL));
        ok(s, tkv_seq_save(from, &save, bytes, sizeof bytes, &n));
        load.seq = i;
        ok(s, tkv_seq_load(s->kv, &load, bytes, n, &info));
        n_recoded += info.n_recoded + info.n_tables;
        tkv_destroy(from);
    }
    s->n_failed += n_recoded < SEQS - 1;
}

static void run_prefixes(scene *s) {
    static int tokens[TOKENS];
    tkv_prefix_params p;
    tkv_prefix_info info;
    tkv_prefix_hash hash;
    if (s->cfg.tiers.archive.k == TKV_SQUAT4) return; /* these keys depend on queries */
    memset(&p, 0, sizeof p);
    p.spare = 2;
    p.tokens = tokens;
    p.n_tokens = TOKENS;
    ok(s, tkv_get_prefix_hash(s->kv, &p, 1, &hash));
    ok(s, tkv_seq_publish_prefix(s->kv, &p, NULL, &info));
    p.seq = 1;
    ok(s, tkv_seq_adopt_prefix(s->kv, &p, NULL, &info));
}

static void run_budget(scene *s) {
    tkv_budget_info info;
    size_t budget;
    ok(s, tkv_get_budget(s->kv, &info));
    budget = info.used - info.used / 8;
    (void)tkv_set_budget(s->kv, budget); /* recodes, and may be refused, as may these */
    (void)tkv_seq_reserve(s->kv, 0, 64);
    (void)tkv_seq_put_state(s->kv, 0, 1, 100, x, sizeof x / 2);
    (void)tkv_seq_fork(s->kv, 0, 1, TKV_UNLIMITED);
    ok(s, tkv_set_level(s->kv, 1));
    ok(s, tkv_set_hot_tokens(s->kv, 64));
    ok(s, tkv_report_pressure(s->kv, .5f));
    (void)append(s, 64);
}

static void run_evict(scene *s) {
    tkv_evict_params p;
    tkv_ranked top[8];
    float importance[64];
    uint64_t missing;
    int n;
    memset(&p, 0, sizeof p);
    p.keep = 150;
    ok(s, tkv_seq_pin(s->kv, 0, 10, 5, TKV_UNLIMITED));
    ok(s, tkv_seq_set_sinks(s->kv, 0, 300, 2, 1));
    ok(s, tkv_get_importance(s->kv, 0, 0, 0, 64, importance, &missing));
    ok(s, tkv_add_scores(s->kv, 0, 0, 0, 64, importance));
    ok(s, tkv_find_top_tokens(s->kv, 0, 0, 8, 4, top, &n));
    ok(s, tkv_evict(s->kv, &p));
    for (n = 0; n < 5; n++) ok(s, append(s, 64)); /* the last ones evict */
}

static void run_offload(scene *s) {
    int n;
    ok(s, tkv_offload(s->kv, 0, 0, 3, &n));
    ok(s, tkv_read(s->kv, 0, 0, 5, 64, x, y));
    ok(s, tkv_attend(s->kv, 0, 0, x, 1, out));
    ok(s, tkv_promote(s->kv, 0, 0, 10));
}

/* The same without attention. */
static void run_promotion(scene *s) {
    tkv_promotion p;
    int n;
    memset(&p, 0, sizeof p);
    p.by.cfg.threshold = TKV_ZERO;
    p.by.cfg.cooldown = TKV_OFF;
    ok(s, tkv_offload(s->kv, 0, 0, 3, &n));
    ok(s, tkv_promote_important(s->kv, 0, 0, &p));
    s->n_failed += p.promoted == 0;
    ok(s, tkv_offload(s->kv, 0, 0, 3, &n));
    ok(s, tkv_promote(s->kv, 0, 0, 10));
}

/* Blocks that are coded leave exact copies in the store. */
static void run_append_with_store(scene *s) {
    int t;
    for (t = 0; t < 4; t++) ok(s, append(s, 64));
}

static int compute_rows(void *user, int seq, int layer, int head, const int *positions, int n, float *k,
                        float *v) {
    (void)user, (void)seq, (void)layer, (void)head, (void)positions;
    if (k) memset(k, 0, (size_t)n * 240 * sizeof *k);
    if (v) memset(v, 0, (size_t)n * 240 * sizeof *v);
    return 0;
}

static void run_discard(scene *s) {
    int n;
    ok(s, tkv_seq_discard(s->kv, 0, 200, &n));
    ok(s, tkv_attend(s->kv, 0, 0, x, 1, out));
    ok(s, tkv_restore(s->kv, 0, 0, 4, x, x, 64));
}

static tkv_status restore_rows(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers, int start,
                               int n) {
    tkv_status st = TKV_OK;
    (void)user, (void)first_layer, (void)n_layers; /* layer 0 alone has keys */
    for (; n > 0 && !st; n -= 64, start += 64) st = tkv_restore(kv, seq, 0, start, x, x, n < 64 ? n : 64);
    return st;
}

static void run_recompute(scene *s) {
    static tkv_remat_block blocks[100];
    static tkv_remat_action actions[100];
    tkv_remat r;
    tkv_remat_config cfg;
    size_t freed;
    int n, start;
    memset(&cfg, 0, sizeof cfg);
    cfg.n_layers = 2;
    cfg.n_heads = HEADS;
    cfg.head_dim = s->cfg.model.head_dim;
    cfg.layer_params = 1.0;
    ok(s, tkv_init_remat(&r, &cfg, NULL, 0));
    ok(s, tkv_seq_discard(s->kv, 0, 200, &n));
    ok(s, tkv_seq_find_discarded(s->kv, 0, &start, &n));
    s->n_failed += n == 0;
    ok(s, tkv_seq_recompute(s->kv, 0, &r, 1, restore_rows, NULL, &n));
    ok(s, tkv_seq_list_blocks(s->kv, 0, blocks, COUNT(blocks), &n));
    ok(s, tkv_decide_discard(&r, blocks, n, TOKENS, .95f, 10000, actions, &freed));
    r.cfg.layer_params = 1e12; /* quantizing is cheaper */
    ok(s, tkv_seq_free_bytes(s->kv, 0, &r, .95f, 100000, blocks, actions, COUNT(blocks), &freed));
}

/* Calls without a cache: rules, and attention joined. */
static void run_rules(scene *s) {
    static float scores[TOKENS], lse[2 * HEADS];
    static tkv_token_importance importance[TOKENS];
    uint64_t victims[TOKENS / 64];
    tkv_importance_config how;
    tkv_evict_config cfg;
    tkv_evict_view view;
    tkv_evict_budget budget;
    tkv_pressure p;
    tkv_pressure_info info;
    tkv_rope rope = s->cfg.model.rope;
    int i, shares[2];
    ok(s, tkv_rotate_rope(&rope, s->cfg.model.head_dim, 7, y));
    tkv_merge_attention(out, lse, out + 8 * HEADS * WIDEST, lse + HEADS, HEADS, s->cfg.model.head_dim);
    s->n_failed += tkv_compute_tier(&s->cfg, 1000) != TKV_TIER_ARCHIVE;
    ok(s, tkv_init_pressure(&p, NULL, NULL, 0));
    for (i = 0; i < 9; i++) (void)tkv_observe_pressure(&p, .9f);
    ok(s, tkv_get_pressure(&p, &info));
    (void)tkv_compute_level(NULL, .9f, 0);
    memset(&how, 0, sizeof how);
    ok(s, tkv_update_importance(&how, importance, NULL, scores, TOKENS, TOKENS, scores));
    (void)tkv_bound_score(x, x, x, s->cfg.model.head_dim);
    memset(&view, 0, sizeof view);
    view.n = TOKENS;
    view.total_scores = view.prompt_scores = view.last_scores = view.norms = view.low_counts =
        view.user_scores = scores;
    view.keys = x;
    view.n_kv_heads = 1;
    view.head_dim = 8;
    memset(&cfg, 0, sizeof cfg);
    for (i = TKV_EVICT_SLIDING; i < TKV_EVICT_USER; i++) {
        cfg.policy = (tkv_evict_policy)i;
        ok(s, tkv_select_victims(&cfg, &view, 100, y, victims, NULL));
    }
    memset(&budget, 0, sizeof budget);
    budget.shape = TKV_EVICT_PYRAMID;
    budget.n_layers = 2;
    budget.total = 300;
    budget.n_tokens = TOKENS;
    ok(s, tkv_split_evict_budget(&budget, shares));
}

static void run_calibration(scene *s) {
    tkv_samples samples;
    tkv_calibration_info info;
    size_t n;
    ok(s, tkv_save_calibration(s->kv, bytes, sizeof bytes, &n));
    ok(s, tkv_load_calibration(s->kv, bytes, n));
    ok(s, tkv_refresh_calibration(s->kv));
    ok(s, tkv_get_calibration(s->kv, &info));
    ok(s, tkv_seq_reset(s->kv, 0));
    ok(s, tkv_refresh_calibration(s->kv));
    ok(s, append(s, 64));
    ok(s, append(s, 64));
    ok(s, tkv_freeze_calibration(s->kv));
    memset(&samples, 0, sizeof samples);
    samples.n = 64;
    samples.k = samples.v = x;
    (void)tkv_fit_calibration(s->kv, &samples); /* KVQUANT alone */
}

static void run_codec(scene *s) {
    tkv_codec c;
    int side;
    memset(&c, 0, sizeof c);
    c.head_dim = s->cfg.model.head_dim;
    c.options = s->cfg.format;
    c.rope = s->cfg.model.rope;
    for (side = 0; side < 2; side++) {
        c.side = side ? TKV_V : TKV_K;
        c.format = side ? s->cfg.tiers.archive.v : s->cfg.tiers.archive.k;
        s->n_failed += tkv_get_block_bytes(&c) == 0;
        ok(s, tkv_encode_block(&c, x, 0, 64, bytes, sizeof bytes));
        ok(s, tkv_decode_block(&c, bytes, sizeof bytes, 64, y, 0));
    }
}

static void run_texts(scene *s) {
    char reason[200];
    tkv_config cfg = s->cfg;
    tkv_memory_info memory;
    tkv_layer_info layer;
    tkv_level_info level;
    tkv_quality_info quality;
    tkv_build_info build;
    size_t n;
    int i;
    ok(s, tkv_print_config(&s->cfg, TKV_TEXT_TOML, (char *)bytes, sizeof bytes, &n));
    cfg.layers = NULL;
    ok(s, tkv_parse_config(&cfg, NULL, "tiers.hot_tokens = 90\n", 22, reason, sizeof reason));
    ok(s, tkv_print_report(s->kv, TKV_REPORT_JSON, NULL, (char *)bytes, sizeof bytes, &n));
    ok(s, tkv_print_report(s->kv, TKV_REPORT_PROMETHEUS, NULL, (char *)bytes, sizeof bytes, &n));
    ok(s, tkv_get_memory(s->kv, &memory));
    ok(s, tkv_get_layer(s->kv, 0, 0, &layer));
    ok(s, tkv_get_level(s->kv, 0, &level));
    ok(s, tkv_get_quality(s->kv, TKV_ALL_LAYERS, &quality));
    ok(s, tkv_reset_quality(s->kv));
    ok(s, tkv_find_level(s->kv, level.tag, &i));
    ok(s, tkv_get_config(s->kv, &cfg));
    ok(s, tkv_get_build(s->kv, &build));
    ok(s, tkv_find_name(TKV_NAME_FORMAT, tkv_get_name(TKV_NAME_FORMAT, TKV_KIVI2), &i));
    s->n_failed += !tkv_get_status_text(TKV_ERR_ARG) || *tkv_get_last_error(s->kv);
    ok(s, tkv_check(s->kv, reason, sizeof reason));
}

static void run_feedback(scene *s) {
    static tkv_threshold memory[4];
    static tkv_feedback f;
    tkv_thresholds t;
    tkv_threshold e, found[TKV_THRESHOLD_CANDIDATES];
    tkv_advice advice;
    tkv_feedback_info info;
    tkv_score_params params;
    tkv_config cfg = s->cfg;
    float score;
    char reason[200];
    size_t n;
    int i;
    memset(&t, 0, sizeof t);
    memset(&params, 0, sizeof params);
    params.source = TKV_SCORE_PERPLEXITY;
    params.base = 10.0;
    params.value = 10.5;
    ok(s, tkv_compute_score(&params, &score));
    t.entry = memory;
    t.capacity = 4;
    ok(s, tkv_init_feedback(&f, NULL, reason, sizeof reason));
    for (i = 0; i < 50; i++) ok(s, tkv_observe_score(&f, .9f));
    ok(s, tkv_get_feedback(&f, 0, &info));
    ok(s, tkv_get_advice(&f, 64, 1, &advice));
    (void)tkv_adapt_plan(s->kv, &f, &advice); /* without a ladder it is refused */
    memset(&e, 0, sizeof e);
    memcpy(e.model, "m", 2);
    e.layer = TKV_ALL_LAYERS;
    e.context = 1000;
    e.hot_tokens = 64;
    e.score = .9f;
    ok(s, tkv_put_threshold(&t, &e));
    ok(s, tkv_find_thresholds(&t, "m", TKV_ALL_LAYERS, 900, found, COUNT(found), &i));
    ok(s, tkv_copy_thresholds(&t, "m", "n", 0.0f));
    cfg.layers = NULL;
    ok(s, tkv_apply_threshold(&cfg, NULL, &e, reason, sizeof reason));
    ok(s, tkv_print_thresholds(&t, (char *)bytes, sizeof bytes, &n));
    ok(s, tkv_parse_thresholds(&t, (char *)bytes, n - 1, reason, sizeof reason));
}

typedef struct call_group {
    const char *name;
    void (*run)(scene *s);
    int has;      /* what its cache has */
    int limit[3]; /* KiB: with optimization, with gcc -O0, with clang -O0 */
} call_group;

static const call_group groups[] = {
    {"create, validate, estimate", run_create, 0, {64, 64, 64}},
    {"append, begin, flush, maintain", run_append, METERS, {128, 144, 192}},
    {"append_part", run_append_parts, 0, {128, 144, 192}},
    {"attend", run_attend, METERS, {ATTEND_KIB, 272, 960}},
    {"attend_ex, attend_part", run_attend_parts, METERS | EVICTS, {ATTEND_KIB, 272, 960}},
    {"attend_reference", run_reference, 0, {160, 160, 160}},
    {"read", run_read, 0, {96, 128, 192}},
    {"fork, copy, keep, shift and the like", run_sequences, 0, {32, 32, 32}},
    {"save, load", run_save, LOADS, {32, 32, 32}},
    {"load of many tables", run_load_of_tables, 0, {128, 144, 192}},
    {"prefixes", run_prefixes, 0, {32, 32, 32}},
    {"set_budget, set_level, reserve, fork", run_budget, BUDGET, {128, 144, 192}},
    {"evict, pin, importance", run_evict, EVICTS, {128, 144, 192}},
    {"offload, promote, reading from a store", run_offload, OFFLOADS, {ATTEND_KIB + 36, 272 + 36, 960 + 36}},
    {"offload, promote, promote_important", run_promotion, OFFLOADS | EVICTS, {40, 40, 40}},
    {"append with a store", run_append_with_store, OFFLOADS, {128, 144, 192}},
    {"restore, recompute", run_recompute, 0, {128, 144, 192}},
    {"restore, recompute, free_bytes with a budget", run_recompute, BUDGET, {128, 144, 192}},
    {"rules, merge_attention", run_rules, 0, {32, 32, 32}},
    {"discard, restore, reading by a model", run_discard, DISCARDS, {ATTEND_KIB + 68, 272 + 68, 960 + 68}},
    {"calibration", run_calibration, 0, {64, 64, 64}},
    {"encode_block, decode_block", run_codec, 0, {160, 160, 160}},
    {"texts, reports, check", run_texts, METERS, {32, 32, 32}},
    {"feedback, thresholds", run_feedback, METERS, {32, 32, 32}},
};

/* >>measuring */
typedef struct stack_shape {
    tkv_format_pair pair;
    int dim, rotates;
} stack_shape;

static const stack_shape shapes[] = {
    {{TKV_A30, TKV_R30}, 240, 0},
    {{TKV_A20, TKV_R15}, WIDEST, 0},
    {{TKV_Q8, TKV_KIVI2}, WIDEST, 0},
    {{TKV_SQUAT4, TKV_KIVI4}, 240, 0},
    {{TKV_INT4, TKV_FP4}, 240, 3},
    {{TKV_KVQUANT4, TKV_KVQUANT3}, 240, 0},
    {{TKV_SUBSPACE4, TKV_SUBSPACE2}, WIDEST, 0},
    {{TKV_F16, TKV_F32}, WIDEST, 0},
};

static void open_scene(scene *s, const stack_shape *shape, int has) {
    static tkv_layer_config layers[2];
    tkv_rng r = tkv_rng_seed(3);
    int t;
    memset(s, 0, sizeof *s);
    memset(layers, 0, sizeof layers);
    layers[1].no_cache = 1; /* for states */
    s->cfg = make_sized_config(2, HEADS, KV_HEADS, shape->dim, SEQS, 64);
    s->cfg.layers = layers;
    s->cfg.limits.max_tokens = 4096;
    s->cfg.model.rope.dim = 64;
    s->cfg.tiers.warm = s->cfg.tiers.archive = shape->pair;
    s->cfg.format.rotate = shape->rotates;
    s->cfg.importance.sample_every = has & EVICTS ? 1 : 0;
    if (has & METERS) s->cfg.meter.heads = s->cfg.meter.every = 1;
    if (has & DISCARDS) s->cfg.recompute.compute = compute_rows, s->cfg.recompute.cost.layer_params = 1.0;
    if (has & EVICTS) s->cfg.evict.policy = TKV_EVICT_KEYDIFF, s->cfg.evict.keep_tokens = 400;
    if (has & BUDGET) s->cfg.budget.bytes = 64 << 20;
    if (has & OFFLOADS) attach_test_store(&s->store, &s->cfg);
    s->cfg.offload.keep_exact = has & OFFLOADS ? 1 : 0;
    s->kv = create_cache(&s->cfg);
    if (has & LOADS) s->other = create_cache(&s->cfg);
    tkv_rng_fill(&r, x, COUNT(x), 1.0);
    tkv_rng_fill(&r, out, COUNT(out), 1.0);
    for (t = 0; t < TOKENS; t += 64) CHECK_EQ(append(s, 64), TKV_OK);
    if (!(has & BUDGET)) CHECK_EQ(tkv_freeze_calibration(s->kv), TKV_OK);
    CHECK_EQ(tkv_seq_flush(s->kv, 0, TKV_FLUSH_FULL), TKV_OK);
}

typedef struct measured_call {
    const call_group *group;
    scene *s;
} measured_call;

static void *run_measured(void *arg) {
    const measured_call *c = (const measured_call *)arg;
    if (c->group) c->group->run(c->s);
    return NULL;
}

static int measure_stack(const call_group *group, scene *s, unsigned char *stack) {
    pthread_attr_t attr;
    pthread_t thread;
    measured_call c;
    int at = 0;
    c.group = group;
    c.s = s;
    memset(stack, 0xa5, STACK);
    pthread_attr_init(&attr);
    CHECK_EQ(pthread_attr_setstack(&attr, stack, STACK), 0);
    CHECK_EQ(pthread_create(&thread, &attr, run_measured, &c), 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attr);
    while (at < STACK && stack[at] == 0xa5) at++;
    return STACK - at;
}

TEST(calls_stay_below_their_limits) {
#ifdef __OPTIMIZE__
    const int column = 0;
#elif !defined(__clang__)
    const int column = 1;
#else
    const int column = 2;
#endif
    unsigned char *stack = NULL;
    int i, k, empty;
    CHECK_EQ(posix_memalign((void **)&stack, 4096, STACK), 0);
    empty = measure_stack(NULL, NULL, stack); /* of a thread that does nothing */
    for (k = 0; k < COUNT(shapes); k++)
        for (i = 0; i < COUNT(groups); i++) {
            const call_group *g = &groups[i];
            scene s;
            int used;
            if (g->has & (OFFLOADS | DISCARDS) && shapes[k].dim > 256)
                continue; /* no such heads outside RAM */
            open_scene(&s, &shapes[k], g->has);
            used = measure_stack(g, &s, stack) - empty;
            CHECK_MSG(s.n_failed == 0, "%s, shape %d: %d calls failed: %s", g->name, k, s.n_failed,
                      tkv_get_last_error(s.kv));
            CHECK_MSG(used <= g->limit[column] << 10, "%s, shape %d: %d bytes", g->name, k, used);
            most_used[i] = used > most_used[i] ? used : most_used[i];
            tkv_destroy(s.kv);
            tkv_destroy(s.other);
            if (g->has & OFFLOADS) destroy_test_store(&s.store);
        }
    for (i = 0; i < COUNT(groups); i++) CHECK_LE(1000, most_used[i]); /* each group did something */
    for (i = 0; i < COUNT(groups) && is_printing; i++)
        printf("%7d bytes  %s\n", most_used[i], groups[i].name);
    free(stack);
}
#else
static int is_printing;

TEST(calls_stay_below_their_limits) { SKIP("needs x86-64 and POSIX threads, without sanitizers"); }
#endif

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--print") == 0) is_printing = 1, argc = 1;
    tkv_test_begin(argc, argv);
    RUN(calls_stay_below_their_limits);
    return tkv_test_end();
}
