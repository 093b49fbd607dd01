/*
 * learn/calibration.h - saves, loads, fits, freezes and refreshes the tables of learn/statistics.h. A calibration
 * holds the statistics of the model, not the bits that follow from them. So a calibration made with one plan serves
 * any other plan.
 *
 *   "TKVC" | version | n_layers | n_kv_heads | head_dim | v_head_dim    u32 each; all numbers are little-endian
 *   version 2, in layers of different shapes, or of more than 256 channels: the last three are 0, and
 *   layer:  u32 n_kv_heads | u32 head_dim | u32 v_head_dim (+ 2^31: V is inside K)
 *   each version:
 *   layer:  u32 parts: 1 for A and R formats, then bits of families (tkvi_family.part); the parts follow in this order
 *           1: for each head  i16 reach | i16 weight of K | i8 top of K | i8 top of V
 *              channel at each position [head_dim]: u8, or u16 with more than 256 | u8 its importance | fp16 its mean
 *           others: drawn where the family is
 *   u64 FNV-1a of all bytes before
 */
#ifndef TKVI_LEARN_CALIBRATION_H
#define TKVI_LEARN_CALIBRATION_H

#include "core/checksum.h"
#include "learn/query_stats.h"
#include "learn/statistics.h"

#define TKVI_CALIBRATION_HEAD 24 /* bytes before the first layer */

/* Bytes of the index of a channel. */
static size_t tkvi_index_bytes(const tkvi_geometry *g) { return g->head_dim > 256 ? 2 : 1; }

static size_t tkvi_head_bytes(const tkvi_geometry *g) {
    return 6u + (tkvi_index_bytes(g) + 3u) * (size_t)g->head_dim;
}

/* The version of the file that a cache writes. */
static int tkvi_calibration_version(const tkv_cache *kv) {
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_geometry_of(kv, layer)->head_dim > 256 ||
            !tkvi_is_same_geometry(tkvi_geometry_of(kv, layer), tkvi_geometry_of(kv, 0)))
            return 2;
    return 1;
}

/* Channels of V, and bit 31 where V is inside K. */
static uint32_t tkvi_v_dim_word(const tkvi_geometry *g) {
    return (uint32_t)g->v_head_dim | (uint32_t)g->v_in_k << 31;
}

/* Bytes before the parts of a layer. */
static size_t tkvi_layer_head_bytes(int version) { return version == 2 ? 16 : 4; }

static void tkvi_store_geometry(uint8_t *at, const tkvi_geometry *g) {
    tkvi_store32(at, g ? (uint32_t)g->n_kv_heads : 0);
    tkvi_store32(at + 4, g ? (uint32_t)g->head_dim : 0);
    tkvi_store32(at + 8, g ? tkvi_v_dim_word(g) : 0);
}

static int tkvi_has_geometry(const uint8_t *at, const tkvi_geometry *g) {
    return tkvi_load32(at) == (uint32_t)g->n_kv_heads && tkvi_load32(at + 4) == (uint32_t)g->head_dim &&
           tkvi_load32(at + 8) == tkvi_v_dim_word(g);
}

static uint64_t tkvi_fnv1a(const uint8_t *p, size_t n) { return tkvi_fnv1a_more(TKVI_FNV1A_START, p, n); }

static int tkvi_layer_learns(const tkv_cache *kv, int layer) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    return p->stored_layer == layer && tkvi_plan_learns(p);
}

static int tkvi_has_table(const tkv_cache *kv, int layer) {
    return tkvi_layer_learns(kv, layer) && kv->tables.current_version[layer] >= 0;
}

TKV_API tkv_status tkv_get_calibration(const tkv_cache *kv, tkv_calibration_info *out) {
    int layer;
    if (!kv || !out) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        out->n_calibrated += tkvi_has_table(kv, layer);
        out->n_learning += kv->stats.tokens_seen && kv->stats.tokens_seen[layer] >= 0;
    }
    return TKV_OK;
}

/* Returns the parts that the layer's table has or will have, as bits of the format above. */
static int tkvi_table_parts(const tkv_cache *kv, int layer) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    return tkvi_layer_learns(kv, layer) ? p->allocates | p->token_parts : 0;
}

/* All parts that a calibration can have. */
static int tkvi_known_parts(void) {
    int f, parts = 1;
    for (f = 0; f < TKV_FORMAT_COUNT; f++)
        if (tkvi_formats[f].family->saved_bytes) parts |= tkvi_formats[f].family->part;
    return parts;
}

static size_t tkvi_parts_bytes(const tkvi_geometry *g, int parts) {
    size_t bytes = parts & 1 ? (size_t)g->n_kv_heads * tkvi_head_bytes(g) : 0;
    const tkvi_family *f = NULL;
    while ((f = tkvi_next_family(parts, f)) != NULL) bytes += f->saved_bytes(g);
    return bytes;
}

/* >>saving */
/* Writes a head of a version of the layer's table. Returns the end. */
static uint8_t *tkvi_save_head(const tkv_cache *kv, int layer, int version, int head, uint8_t *at) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const tkvi_head *h = &tkvi_heads_of(&kv->tables, layer, version)[head];
    int i;
    tkvi_store16(at, (uint16_t)h->reach);
    tkvi_store16(at + 2, (uint16_t)h->k_weight);
    at[4] = (uint8_t)h->k_top;
    at[5] = (uint8_t)h->v_top;
    at += 6;
    for (i = 0; i < g->head_dim; i++, at += tkvi_index_bytes(g)) {
        const int channel = tkvi_order_at(h->order, g->k_pad, i);
        at[0] = (uint8_t)(channel & 255);
        if (g->head_dim > 256) at[1] = (uint8_t)(channel >> 8);
    }
    memcpy(at, h->importance, (size_t)g->head_dim);
    at += g->head_dim;
    for (i = 0; i < g->head_dim; i++, at += 2) tkvi_store16(at, tkvi_f32_to_f16(h->mean[i]));
    return at;
}

/* Writes these parts of a version of the layer's table, as drawn above. Returns the end. */
static uint8_t *tkvi_save_table(const tkv_cache *kv, int layer, int version, int parts, uint8_t *at) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const tkvi_family *f = NULL;
    int head;
    for (head = 0; (parts & 1) && head < g->n_kv_heads; head++)
        at = tkvi_save_head(kv, layer, version, head, at);
    while ((f = tkvi_next_family(parts, f)) != NULL) {
        const tkvi_family_state from = tkvi_table_state_of(&kv->tables, f, layer, version);
        f->save(&from, at);
        at += f->saved_bytes(g);
    }
    return at;
}

TKV_API tkv_status tkv_save_calibration(const tkv_cache *kv, void *buf, size_t size, size_t *needed) {
    const tkv_config *cfg;
    uint8_t *at = (uint8_t *)buf;
    uint64_t sum;
    size_t need;
    int layer, written_as;
    if (!kv || (!buf && !needed)) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    written_as = tkvi_calibration_version(kv);
    need = TKVI_CALIBRATION_HEAD + tkvi_layer_head_bytes(written_as) * (size_t)cfg->model.n_layers + 8u;
    for (layer = 0; layer < cfg->model.n_layers; layer++)
        if (tkvi_has_table(kv, layer))
            need += tkvi_parts_bytes(tkvi_geometry_of(kv, layer), tkvi_table_parts(kv, layer));
    if (needed) *needed = need;
    if (!buf) return TKV_OK;
    if (size < need) return TKV_ERR_CAPACITY;
    memcpy(at, "TKVC", 4);
    tkvi_store32(at + 4, (uint32_t)written_as);
    tkvi_store32(at + 8, (uint32_t)cfg->model.n_layers);
    tkvi_store_geometry(at + 12, written_as == 1 ? tkvi_geometry_of(kv, 0) : NULL);
    at += TKVI_CALIBRATION_HEAD;
    for (layer = 0; layer < cfg->model.n_layers; layer++) {
        int has = tkvi_has_table(kv, layer) ? tkvi_table_parts(kv, layer) : 0;
        const int version = kv->tables.current_version[layer];
        const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
        if (written_as == 2) tkvi_store_geometry(at, g);
        at += tkvi_layer_head_bytes(written_as);
        tkvi_store32(at - 4, (uint32_t)has);
        at = tkvi_save_table(kv, layer, version, has, at);
    }
    sum = tkvi_fnv1a((const uint8_t *)buf, need - 8u);
    tkvi_store32(at, (uint32_t)sum);
    tkvi_store32(at + 4, (uint32_t)(sum >> 32));
    return TKV_OK;
}

/* >>loading */
static int tkvi_signed16(uint16_t x) { return x < 32768 ? x : x - 65536; }

/* The channel at a position, in saved bytes. */
static int tkvi_saved_channel(const tkvi_geometry *g, const uint8_t *order, int i) {
    return g->head_dim > 256 ? tkvi_load16(order + 2 * i) : order[i];
}

/* Returns whether one head's bytes are valid: a permutation of the channels, importance positive and not rising,
 * numbers in range. */
static int tkvi_head_valid(const tkvi_geometry *g, const uint8_t *at) {
    const uint8_t *order = at + 6, *importance = order + tkvi_index_bytes(g) * (size_t)g->head_dim,
                  *mean = importance + g->head_dim;
    uint8_t seen[TKV_MAX_HEAD_DIM];
    int i, k_top = tkvi_signed_byte(at[4]), v_top = tkvi_signed_byte(at[5]);
    memset(seen, 0, sizeof seen);
    if (k_top < -TKVI_LOG_TOP || k_top > TKVI_LOG_TOP || v_top < -TKVI_LOG_TOP || v_top > TKVI_LOG_TOP)
        return 0;
    for (i = 0; i < 2; i++) {
        int weight = tkvi_signed16(tkvi_load16(at + 2 * i));
        if (weight < 4 * TKVI_LOG8_NONE || weight > -4 * TKVI_LOG8_NONE) return 0;
    }
    for (i = 0; i < g->head_dim; i++) {
        const int channel = tkvi_saved_channel(g, order, i);
        if (channel >= g->head_dim || seen[channel]++) return 0;
        if (importance[i] == 0 || (i && importance[i] > importance[i - 1])) return 0;
        if ((tkvi_load16(mean + 2 * i) & 0x7c00u) == 0x7c00u) return 0;
    }
    return 1;
}

/* Returns NULL if saved parts of a layer's table are valid, else the reason. All their bytes are there. */
static const char *tkvi_find_table_fault(const tkv_cache *kv, int layer, int parts, const uint8_t *at) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const tkvi_family *f = NULL;
    int head;
    for (head = 0; (parts & 1) && head < g->n_kv_heads; head++, at += tkvi_head_bytes(g))
        if (!tkvi_head_valid(g, at)) return "a head of the calibration has invalid values";
    while ((f = tkvi_next_family(parts, f)) != NULL) {
        const tkvi_family_state to = tkvi_table_state_of(&kv->tables, f, layer, -1);
        const char *fault = NULL;
        if (f->find_fault) fault = f->find_fault(&to, at, tkvi_table_parts(kv, layer) & f->part);
        if (fault) return fault;
        at += f->saved_bytes(g);
    }
    return NULL;
}

/* Returns NULL if the bytes are a valid calibration for this cache, else the reason. */
static const char *tkvi_calibration_wrong(const tkv_cache *kv, const uint8_t *src, size_t size) {
    static const char *const other_model =
        "the calibration is of another model: layers, KV heads or head_dim differ";
    const tkv_config *cfg = &kv->tables.cfg;
    const uint8_t *at, *end;
    uint64_t sum;
    int layer, version;
    if (size < TKVI_CALIBRATION_HEAD + 8u || memcmp(src, "TKVC", 4) != 0)
        return "these bytes are not a calibration";
    if (tkvi_load32(src + 4) != 1 && tkvi_load32(src + 4) != 2)
        return "the calibration is of another version";
    version = (int)tkvi_load32(src + 4);
    at = src + TKVI_CALIBRATION_HEAD;
    end = src + size - 8;
    sum = tkvi_load32(end) | (uint64_t)tkvi_load32(end + 4) << 32;
    if (tkvi_fnv1a(src, size - 8) != sum) return "the calibration was damaged: its checksum is wrong";
    if (tkvi_load32(src + 8) != (uint32_t)cfg->model.n_layers) return other_model;
    for (layer = 0; layer < cfg->model.n_layers; layer++) {
        const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
        const char *fault;
        int has;
        if ((size_t)(end - at) < tkvi_layer_head_bytes(version)) return "the calibration ends too early";
        if (!tkvi_has_geometry(version == 2 ? at : src + 12, g)) return other_model;
        at += tkvi_layer_head_bytes(version) - 4u;
        if (tkvi_load32(at) & ~(uint32_t)tkvi_known_parts())
            return "the calibration has a layer that this cache does not have";
        has = (int)tkvi_load32(at);
        at += 4;
        if ((size_t)(end - at) < tkvi_parts_bytes(g, has)) return "the calibration ends too early";
        fault = tkvi_find_table_fault(kv, layer, has, at);
        if (fault) return fault;
        at += tkvi_parts_bytes(g, has);
    }
    return at == end ? NULL : "the calibration is longer than it should be";
}

/* Copies one valid head into a version; positions from head_dim to the padding become unused. */
static void tkvi_head_load(tkv_cache *kv, int layer, int version, int head, const uint8_t *at) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const uint8_t *order = at + 6, *importance = order + tkvi_index_bytes(g) * (size_t)g->head_dim,
                  *mean = importance + g->head_dim;
    const tkvi_head_arrays to = tkvi_head_arrays_of(&kv->tables, layer, version, head);
    tkvi_head *h = &tkvi_heads_of(&kv->tables, layer, version)[head];
    int i;
    h->reach = tkvi_signed16(tkvi_load16(at));
    h->k_weight = tkvi_signed16(tkvi_load16(at + 2));
    h->k_top = tkvi_signed_byte(at[4]);
    h->v_top = tkvi_signed_byte(at[5]);
    for (i = 0; i < g->k_pad; i++) {
        const int used = i < g->head_dim;
        tkvi_set_order(to.order, g->k_pad, i, used ? tkvi_saved_channel(g, order, i) : i);
        to.importance[i] = used ? importance[i] : (uint8_t)0;
        to.mean[i] = used ? tkvi_f16_to_f32(tkvi_load16(mean + 2 * i)) : 0.0f;
    }
}

/* Fills a version with the parts that the layer needs. has: the parts that are saved. */
static void tkvi_fill_table(tkv_cache *kv, int layer, int version, int has, const uint8_t *at) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const int need = tkvi_table_parts(kv, layer);
    const tkvi_family *f = NULL;
    int head;
    for (head = 0; (need & 1) && head < g->n_kv_heads; head++)
        tkvi_head_load(kv, layer, version, head, at + (size_t)head * tkvi_head_bytes(g));
    while ((f = tkvi_next_family(need, f)) != NULL) {
        const tkvi_family_state to = tkvi_table_state_of(&kv->tables, f, layer, version);
        f->load(&to, at + tkvi_parts_bytes(g, has & (f->part - 1)));
    }
}

/* Fails if a sequence is in a step, because an abort would not restore the tables. */
static tkv_status tkvi_between_steps(tkv_cache *kv) {
    int seq;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        if (kv->seq[seq].in_step)
            return tkvi_fail(kv, TKV_ERR_STATE, "a step is open in sequence", seq,
                             "; commit or abort it first");
    return TKV_OK;
}

/* Finds and allocates a version for a new table of the layer. */
static tkv_status tkvi_version_for(tkv_cache *kv, int layer, int *version) {
    *version = tkvi_free_version(kv, layer);
    if (*version < 0)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "blocks use every version of the table of layer", layer,
                         "; reset the sequences that hold the oldest");
    return tkvi_allocate_version(kv, *version) ? TKV_OK : tkvi_no_table(kv);
}

TKV_API tkv_status tkv_load_calibration(tkv_cache *kv, const void *src, size_t size) {
    const uint8_t *at;
    const char *wrong;
    tkv_status st;
    int layer, version = 0, pass;
    if (!kv) return TKV_ERR_ARG;
    if (!src) return tkvi_fail(kv, TKV_ERR_ARG, "the calibration is missing", 0, NULL);
    st = tkvi_between_steps(kv);
    if (st) return st;
    wrong = tkvi_calibration_wrong(kv, (const uint8_t *)src, size);
    if (wrong) return tkvi_fail(kv, TKV_ERR_DATA, wrong, 0, NULL);
    for (pass = 0; pass < 2; pass++) { /* pass 0 allocates, so that a failure changes no table */
        at = (const uint8_t *)src + TKVI_CALIBRATION_HEAD;
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
            int has, need = tkvi_table_parts(kv, layer), use;
            at += tkvi_layer_head_bytes((int)tkvi_load32((const uint8_t *)src + 4));
            has = (int)tkvi_load32(at - 4);
            use = need && (has & need) == need; /* all parts that the layer needs, or none */
            if (use && (st = tkvi_version_for(kv, layer, &version)) != TKV_OK) return st;
            if (pass && use) tkvi_fill_table(kv, layer, version, has, at);
            at += tkvi_parts_bytes(g, has);
            if (!pass || !use) continue;
            tkvi_table_use(kv, layer, version);
            tkvi_learned(kv, layer, 0);
        }
    }
    return tkvi_ok(kv);
}

/* >>from samples */
static int tkvi_samples_finite(const float *x, size_t n, int positive) {
    size_t i;
    for (i = 0; x && i < n; i++)
        if (!tkvi_is_finite(x[i]) || (positive && x[i] < 0.0f)) return 0;
    return 1;
}

TKV_API tkv_status tkv_fit_calibration(tkv_cache *kv, const tkv_samples *s) {
    const tkv_config *cfg;
    const tkvi_geometry *g;
    tkv_status st;
    size_t rows;
    int version;
    if (!TKVI_HAS_TOKEN_LEARNERS) return tkvi_refuse_left_out(kv, TKVI_TOKEN_LEARNERS_LEFT_OUT);
    if (!kv) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    if (!s || !s->k || !s->v) return tkvi_fail(kv, TKV_ERR_ARG, "the samples are missing", 0, NULL);
    if (s->layer < 0 || s->layer >= cfg->model.n_layers)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no layer", s->layer, "");
    if (tkvi_table_parts(kv, s->layer) < 2 || kv->tables.plan[s->layer].allocates)
        return tkvi_fail(kv, TKV_ERR_ARG,
                         "samples are for formats that learn a table, without A and R; not for layer",
                         s->layer, "");
    if (s->n < 1 || s->n > 1 << 18) return tkvi_fail(kv, TKV_ERR_ARG, "n is", s->n, "; it must be 1 to 2^18");
    if (s->start < 0 || s->length < 0 || s->start > TKVI_FOREVER + 1 - s->n)
        return tkvi_fail(kv, TKV_ERR_ARG, "start and length must be positions, not", s->start, "");
    st = tkvi_between_steps(kv);
    if (st) return st;
    g = tkvi_geometry_of(kv, s->layer);
    rows = (size_t)s->n * (size_t)g->n_kv_heads;
    if (!tkvi_samples_finite(s->k, rows * (size_t)g->head_dim, 0) ||
        !tkvi_samples_finite(s->v, rows * (size_t)g->v_head_dim, 0) ||
        !tkvi_samples_finite(s->k_weight, rows * (size_t)g->head_dim, 1) ||
        !tkvi_samples_finite(s->v_weight, rows * (size_t)g->v_head_dim, 1))
        return tkvi_fail(kv, TKV_ERR_NONFINITE, "a NaN, an infinity or a negative weight is in the samples",
                         0, NULL);
    st = tkvi_version_for(kv, s->layer, &version);
    if (st) return st;
    tkvi_learn_tokens(kv, s->layer, version, s);
    tkvi_table_use(kv, s->layer, version);
    tkvi_learned(kv, s->layer, 0);
    return tkvi_ok(kv);
}

/* >>freeze and refresh */
TKV_API tkv_status tkv_freeze_calibration(tkv_cache *kv) {
    tkv_status st;
    int layer, none = 0;
    if (!kv) return TKV_ERR_ARG;
    st = tkvi_between_steps(kv);
    if (st) return st;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_layer_learns(kv, layer) && !tkvi_has_table(kv, layer)) {
            none = 1;
            if (tkvi_n_readable_tokens(kv, layer) < 1)
                return tkvi_fail(kv, TKV_ERR_STATE, "no tokens to learn from are in layer", layer, "");
        }
    if (none && !tkvi_allocate_version(kv, 0)) return tkvi_no_table(kv);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        if (!tkvi_layer_learns(kv, layer)) continue;
        if (!tkvi_has_table(kv, layer)) (void)tkvi_make_due_table(kv, layer, TKVI_ANY_TOKENS);
        tkvi_learned(kv, layer, 0);
    }
    return tkvi_ok(kv);
}

/* Makes the layer learn a table of newer tokens. If it has seen enough tokens since its last table, the next append
 * makes the pending table first. */
static void tkvi_restart_learning(tkv_cache *kv, int layer) {
    tkvi_next_table *next = &kv->stats.next_table[layer];
    const int seen = kv->stats.tokens_seen[layer];
    if (seen >= 0 && seen - next->last >= TKVI_FIRST_TABLE_TOKENS) {
        next->due = tkvi_min(tkvi_max(next->due, TKVI_FIRST_TABLE_TOKENS), seen);
        next->restarts = 1;
        return;
    }
    if (seen >= 0 && kv->tables.plan[layer].allocates) tkvi_fade_statistics(kv, layer, TKVI_FADE);
    memset(next, 0, sizeof *next);
    kv->stats.tokens_seen[layer] = 0;
}

TKV_API tkv_status tkv_refresh_calibration(tkv_cache *kv) {
    tkv_status st;
    int layer;
    if (!kv) return TKV_ERR_ARG;
    st = tkvi_between_steps(kv);
    if (!st && !tkvi_allocate_stats(kv, &kv->heap)) st = tkvi_no_table(kv);
    for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++) {
        if (tkvi_has_table(kv, layer)) tkvi_restart_learning(kv, layer);
        tkvi_query_stats_restart(kv, layer);
    }
    return st ? st : tkvi_ok(kv);
}

#endif /* TKVI_LEARN_CALIBRATION_H */
