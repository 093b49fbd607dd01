/*
 * report/info.h - reports on a cache: tokens per tier, quality, bytes held (tkv_get_memory). tkv_estimate_memory
 * computes the bytes from a config alone, tkv_estimate_context the longest context that fits a budget. tkv_check
 * tests all invariants, tkv_validate_attend a call. Only tkv_reset_quality changes the cache.
 */
#ifndef TKVI_REPORT_INFO_H
#define TKVI_REPORT_INFO_H

#include "attention/reference.h"
#include "step/sequence.h"
#include "step/promote.h"
#include "cache/preset.h"

TKV_API const char *tkv_get_status_text(tkv_status s) {
#define TKVI_STATUS_CASE_(name, value, text)                                                                 \
    if (s == name) return text;
    TKV_STATUS_LIST(TKVI_STATUS_CASE_)
#undef TKVI_STATUS_CASE_
    return "unknown status";
}

TKV_API const char *tkv_get_last_error(const tkv_cache *kv) { return kv ? kv->call.error : ""; }

TKV_API tkv_status tkv_get_build(const tkv_cache *kv, tkv_build_info *out) {
    int isa;
    if (!out) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    out->version = TKV_VERSION;
    out->config_bytes = sizeof(tkv_config);
    for (isa = 0; isa < TKV_ISA_COUNT; isa++)
        if (tkvi_kernels_for((tkv_isa)isa)) out->isa_mask |= 1u << isa;
    out->isa = kv ? kv->kernels->isa : TKV_ISA_AUTO;
    return TKV_OK;
}

/* >>names */
static const char *tkvi_name_of_format(int value) { return tkvi_format_name((tkv_format)value); }
static const char *tkvi_name_of_isa(int value) { return tkvi_isa_name((tkv_isa)value); }
static const char *tkvi_name_of_evict(int value) { return tkvi_evict_name((tkv_evict_policy)value); }
static const char *tkvi_name_of_importance(int value) {
    return tkvi_importance_name((tkv_importance_strategy)value);
}
static const char *tkvi_name_of_profile(int value) { return tkvi_profile_name((tkv_pressure_profile)value); }

/* In the order of tkv_name_kind. The values of a kind are numbers from 0 or 1 on, without gaps. */
static const struct tkvi_names {
    const char *(*name)(int value);
    int first; /* the lowest value with a name */
} tkvi_names[TKV_NAME_COUNT] = {{tkvi_name_of_format, 1},     {tkvi_name_of_isa, 0},
                                {tkvi_preset_name, 0},        {tkvi_name_of_evict, 0},
                                {tkvi_name_of_importance, 0}, {tkvi_name_of_profile, 0}};

TKV_API const char *tkv_get_name(tkv_name_kind kind, int value) {
    return (int)kind >= 0 && (int)kind < TKV_NAME_COUNT ? tkvi_names[kind].name(value) : NULL;
}

TKV_API tkv_status tkv_find_name(tkv_name_kind kind, const char *name, int *value) {
    int i;
    if ((int)kind < 0 || (int)kind >= TKV_NAME_COUNT || !name || !value) return TKV_ERR_ARG;
    for (i = tkvi_names[kind].first; tkvi_names[kind].name(i); i++)
        if (strcmp(name, tkvi_names[kind].name(i)) == 0) {
            *value = i;
            return TKV_OK;
        }
#ifndef TKV_NO_REPORTS
    if (kind == TKV_NAME_FORMAT && tkvi_find_format(name) != TKV_FORMAT_DEFAULT) {
        *value = (int)tkvi_find_format(name);
        return TKV_OK;
    }
#endif
    return TKV_ERR_RANGE;
}

/* >>configs and calls */
TKV_API tkv_status tkv_get_config(const tkv_cache *kv, tkv_config *out) {
    if (!kv || !out) return TKV_ERR_ARG;
    *out = kv->tables.cfg;
    if (out->budget.n_levels && !out->budget.bytes)
        memset(&out->budget.pressure, 0, sizeof out->budget.pressure);
    out->budget.n_levels = 0; /* the ladder is not kept */
    return TKV_OK;
}

TKV_API tkv_status tkv_validate_attend(const tkv_cache *kv, const tkv_attend_params *p, char *reason,
                                       size_t size) {
    tkvi_call c;
    const tkv_status st = tkvi_call_init(&c, (tkv_cache *)(uintptr_t)kv, p); /* only reads */
    if (!st) return tkvi_give_reason(st, "", reason, size);
    if (!TKVI_HAS_REPORTS) return tkvi_give_reason(st, tkv_get_status_text(st), reason, size);
    tkvi_write_sentence(reason, reason ? size : 0, c.why[0], c.number, c.why[1]);
    return st;
}

/* >>tokens */
TKV_API tkv_status tkv_get_tiers(const tkv_cache *kv, int seq, int layer, int start, int n, uint8_t *tiers) {
    const tkvi_list *list;
    const uint32_t *ids;
    int i, slot;
    layer = tkvi_stored_layer(kv, seq, layer);
    if (layer < 0 || start < 0 || n < 0 || (n > 0 && !tiers)) return TKV_ERR_ARG;
    list = tkvi_list_of(kv, seq, layer);
    ids = tkvi_ids(kv, seq, layer);
    if (start > list->len || n > list->len - start) return TKV_ERR_RANGE;
    if (n == 0) return TKV_OK;
    memset(tiers, TKV_TOKEN_GONE, (size_t)n);
    for (i = tkvi_first_block_to_search(kv, list, ids, start); i < list->n; i++) {
        const uint64_t live = tkvi_live_mask_in(kv, list, ids, i);
        const int discarded = tkvi_is_discarded(tkvi_block_of(kv, ids[i]));
        for (slot = 0; slot < TKVI_BLOCK; slot++) {
            const int at = live >> slot & 1 ? tkvi_slot_index(kv, ids[i], slot) - start : -1;
            if (at >= 0 && at < n)
                tiers[at] =
                    (uint8_t)(discarded ? (int)TKV_TOKEN_DISCARDED : (int)tkvi_token_tier(kv, list, ids, i));
        }
    }
    return TKV_OK;
}

/* >>quality */
/* Sums of all head probes, or of those of one layer. */
static void tkvi_quality_sum(const tkv_cache *kv, int layer, tkv_quality_info *out) {
    tkvi_meter *m = kv->meter;
    tkvi_error_sums sum;
    double n;
    int i;
    memset(out, 0, sizeof *out);
    out->seq = TKV_NO_SEQ;
    if (!m) return;
    memset(&sum, 0, sizeof sum);
    tkvi_lock(&m->lock);
    for (i = 0; i < m->n; i++)
        if (layer == TKV_ALL_LAYERS || m->head_probe[i].layer == layer) {
            tkvi_error_sums_add(&sum, &m->head_probe[i].sum);
            out->heads++;
        }
    tkvi_unlock(&m->lock);
    out->every = m->every;
    out->seq = m->seq;
    out->samples = sum.samples;
    if (!sum.samples) return;
    n = (double)sum.samples;
    out->coverage = sum.keys ? (double)sum.kept / (double)sum.keys : 1.0;
    out->output_error = (double)sum.error / TKVI_METER_ONE / n;
    out->kl = (double)sum.divergence / TKVI_METER_ONE / n;
    out->kl_max = (double)sum.worst / TKVI_METER_ONE;
    out->top1 = (double)sum.agreed / n;
}

TKV_API tkv_status tkv_get_quality(const tkv_cache *kv, int layer, tkv_quality_info *out) {
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    if (!kv || !out) return TKV_ERR_ARG;
    if (layer != TKV_ALL_LAYERS) layer = tkvi_stored_layer(kv, 0, layer);
    if (layer < 0 && layer != TKV_ALL_LAYERS) return TKV_ERR_ARG;
    tkvi_quality_sum(kv, layer, out);
    return TKV_OK;
}

TKV_API tkv_status tkv_reset_quality(tkv_cache *kv) {
    int i;
    if (!TKVI_HAS_METER) return tkvi_refuse_left_out(kv, "TKV_NO_METER leaves this out");
    if (!kv) return TKV_ERR_ARG;
    for (i = 0; kv->meter && i < kv->meter->n; i++)
        memset(&kv->meter->head_probe[i].sum, 0, sizeof kv->meter->head_probe[i].sum);
    return tkvi_ok(kv);
}

/* >>bytes */
/* Bytes of K and V of a token in FP16, in a layer. */
static size_t tkvi_fp16_bytes(int n_kv_heads, int head_dim, int v_head_dim, int v_in_k) {
    return (size_t)n_kv_heads * (size_t)(head_dim + (v_in_k ? 0 : v_head_dim)) * 2u;
}

/* Adds bytes and tokens of a block. g: of its layer. bytes: what the formats use, the rest is padding; NULL: they are
 * counted. */
static void tkvi_add_block(tkv_memory_info *m, const tkvi_geometry *g, tkv_tier tier, const tkvi_bytes *bytes,
                           size_t tokens, int is_offloaded) {
    tkv_tier_bytes *at = is_offloaded ? &m->offloaded : &m->tier[tier];
    m->tier[tier].tokens += tokens;
    m->fp16_bytes += tokens * tkvi_fp16_bytes(g->n_kv_heads, g->head_dim, g->v_head_dim, g->v_in_k);
    if (is_offloaded) m->offloaded.tokens += tokens;
    if (!bytes) return;
    at->codes += bytes->codes;
    at->metadata += bytes->metadata;
}

/* Computes slack, the page bytes that no block uses, and the ratios. */
static void tkvi_sum_up(tkv_memory_info *m, size_t page_bytes) {
    int tier;
    size_t used = 0;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) used += m->tier[tier].codes + m->tier[tier].metadata;
    m->slack += page_bytes - used;
    m->ratio = m->total ? (double)m->fp16_bytes / (double)m->total : 0.0;
    m->ratio_f32 = 2.0 * m->ratio;
}

/* A run: the entries of a list that hold the block of its entry i. A move of a part of a block makes several, which are
 * neighbours (step/move.h). */
typedef struct tkvi_run_of_block {
    uint32_t n;
    int first;       /* index of its first entry in the list */
    int counts_once; /* 1: what counts each block once counts it in this list */
} tkvi_run_of_block;

static tkvi_run_of_block tkvi_find_run(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids,
                                       int i) {
    const tkvi_entry *entry = kv->pool.entry;
    const uint32_t block = entry[ids[i]].block;
    tkvi_run_of_block run;
    while (i > 0 && entry[ids[i - 1]].block == block) i--;
    run.n = 0;
    run.first = i;
    run.counts_once = 0;
    for (; i < list->n && entry[ids[i]].block == block; i++) {
        run.counts_once |= entry[ids[i]].is_first;
        run.n++;
    }
    return run;
}

/* Number of entries of a list that hold the block of its entry i. They are neighbours as a rule, but not where tokens
 * were copied back (tkv_seq_copy). Returns 0 if entry i is not the first one. */
static uint32_t tkvi_count_if_first(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_run_of_block run = tkvi_find_run(kv, list, ids, i);
    const uint32_t block = kv->pool.entry[ids[i]].block, refs = kv->pool.block[block].refs;
    uint32_t n = run.n;
    int j;
    if (run.first < i) return 0;
    if (n == refs) return n;
    for (j = 0; j < i; j++)
        if (kv->pool.entry[ids[j]].block == block) return 0;
    for (j = i + (int)n; j < list->n && n < refs; j++) n += kv->pool.entry[ids[j]].block == block;
    return n;
}

/* Adds the blocks of one layer of one sequence. once 1: a shared block counts with its first holder only. */
static void tkvi_add_list(const tkv_cache *kv, int seq, int layer, int once, tkv_memory_info *out) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const tkvi_run_of_block run = tkvi_find_run(kv, list, ids, i);
        const int has_bytes = once ? i == run.first : tkvi_count_if_first(kv, list, ids, i) > 0;
        if (!tkvi_is_discarded(b) && (!once || run.counts_once))
            tkvi_add_block(out, tkvi_geometry_of(kv, layer), (tkv_tier)b->tier,
                           has_bytes ? &kv->tables.layout[b->layout].bytes : NULL,
                           (size_t)tkvi_n_bits(tkvi_live_mask_in(kv, list, ids, i)), tkvi_is_offloaded(b));
    }
}

TKV_API tkv_status tkv_get_memory(const tkv_cache *kv, tkv_memory_info *out) {
    const tkv_config *cfg;
    int seq, layer;
    if (!kv || !out) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    memset(out, 0, sizeof *out);
    for (seq = 0; seq < cfg->limits.max_seqs; seq++)
        for (layer = 0; layer < cfg->model.n_layers; layer++) tkvi_add_list(kv, seq, layer, 1, out);
    out->total = kv->heap.held;
    out->peak = kv->heap.peak;
    out->tables = tkvi_table_bytes(&kv->sizes) + tkvi_learning_bytes(kv);
    out->scratch = tkvi_scratch_bytes(&kv->sizes);
    out->exact_copies = kv->sizes.meter_copies;
    out->states = kv->states.held_bytes;
    if (kv->states.region) out->slack = kv->states.region_bytes - kv->states.held_bytes;
    out->index = kv->heap.held - (size_t)kv->pool.n_pages * kv->tables.page_bytes - out->tables -
                 out->scratch - out->exact_copies - out->states - out->slack;
    tkvi_sum_up(out, (size_t)kv->pool.n_pages * kv->tables.page_bytes);
    return TKV_OK;
}

TKV_API tkv_status tkv_seq_get_memory(const tkv_cache *kv, int seq, tkv_seq_memory_info *out) {
    int layer, i;
    if (!out || !tkvi_has_seq(kv, seq)) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            const tkvi_block *b = tkvi_block_of(kv, ids[i]);
            const size_t bytes = kv->tables.layout[b->layout].bytes.total;
            uint32_t n;
            if (tkvi_is_discarded(b) || tkvi_is_offloaded(b)) continue;
            n = tkvi_count_if_first(kv, list, ids, i);
            if (n) *(n == b->refs ? &out->own : &out->shared) += bytes;
            if (n < b->refs) out->share += bytes * n / b->refs;
        }
    }
    return TKV_OK;
}

/* Sums up the blocks of one layer of one sequence. */
static void tkvi_layer_memory(const tkv_cache *kv, int seq, int layer, tkv_memory_info *out) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    size_t bytes = 0;
    int i;
    for (i = 0; i < list->n; i++)
        if (!tkvi_is_offloaded(tkvi_block_of(kv, ids[i])) && tkvi_count_if_first(kv, list, ids, i))
            bytes += kv->tables.layout[tkvi_block_of(kv, ids[i])->layout].bytes.total;
    tkvi_add_list(kv, seq, layer, 0, out);
    out->total = out->peak = bytes;
    tkvi_sum_up(out, bytes);
}

/* Counts the tokens and blocks of a layer that has a cache of its own, or reads that of another layer. */
static void tkvi_count_layer(const tkv_cache *kv, int seq, int layer, tkv_layer_info *out) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    for (i = 0; i < list->n; i++) {
        const tkv_tier tier = tkvi_token_tier(kv, list, ids, i);
        if (tkvi_is_discarded(tkvi_block_of(kv, ids[i]))) {
            out->discarded += tkvi_n_bits(tkvi_live_mask_in(kv, list, ids, i));
            continue;
        }
        out->tokens[tier] += tkvi_n_bits(tkvi_live_mask_in(kv, list, ids, i));
        out->named_sinks += tkvi_n_bits(tkvi_sink_mask(&kv->pool, ids[i]));
        out->blocks[tier]++;
        out->offloaded += tkvi_is_offloaded(tkvi_block_of(kv, ids[i]));
    }
    out->expired = tkvi_n_expired(kv, layer, list, ids);
    out->evicted = list->len - out->expired - tkvi_n_live(kv, seq, layer);
}

/* The formats of a tier's new blocks at the present level. */
static tkv_format_pair tkvi_pair_now(const tkv_cache *kv, int layer, int tier) {
    const tkvi_tables *t = &kv->tables;
    return t->layout[t->plan[t->plan[layer].stored_layer].now.layout[tier]].pair;
}

TKV_API tkv_status tkv_get_layer(const tkv_cache *kv, int seq, int layer, tkv_layer_info *out) {
    const int asked = layer;
    int tier;
    layer = tkvi_stored_layer(kv, seq, layer);
    if (!out || layer < 0) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    out->n_heads = tkvi_geometry_of(kv, asked)->n_heads;
    out->n_kv_heads = tkvi_geometry_of(kv, layer)->n_kv_heads;
    out->head_dim = tkvi_geometry_of(kv, layer)->head_dim;
    out->v_head_dim = tkvi_geometry_of(kv, layer)->v_head_dim;
    out->v_in_k = tkvi_geometry_of(kv, layer)->v_in_k;
    out->length = tkvi_list_of(kv, seq, layer)->len;
    tkvi_count_layer(kv, seq, layer, out);
    tkvi_layer_memory(kv, seq, layer, &out->memory);
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) out->format[tier] = tkvi_pair_now(kv, layer, tier);
    return TKV_OK;
}

/* >>estimate: the same sums over the plan instead of over blocks */
typedef struct tkvi_layer_sum { /* one layer of one sequence after n tokens, appended one by one */
    int64_t blocks[TKV_TIER_COUNT], tokens[TKV_TIER_COUNT]; /* without the sinks */
    int sink_tokens;
} tkvi_layer_sum;

/* The number of blocks behind the sinks, of `whole` full ones, that end at or before position `end`. */
static int64_t tkvi_n_ended_blocks(int64_t whole, int64_t end) {
    int64_t n = end < 0 ? 0 : end / TKVI_BLOCK;
    return n < whole ? n : whole;
}

/* The blocks and tokens of a layer after n tokens. most_recoded: blocks that can have formats that need a table; 0
 * before there is one. young 1: blocks of any age go to the archive. */
static tkvi_layer_sum tkvi_layer_after(const tkvi_plan *p, int n, int64_t most_recoded, int young) {
    tkvi_layer_sum s;
    int64_t tokens = tkvi_max(0, n - p->sink), whole = tokens / TKVI_BLOCK, rest = tokens % TKVI_BLOCK;
    int64_t due = (int64_t)n - 1 - p->sink; /* length at the last ageing, without the sinks */
    int64_t gone, archived, coded, margin = (int64_t)p->kept_window + tkvi_expiry_margin(p);
    const int is_young = young && p->now.hot != TKVI_FOREVER;
    const int64_t hot = is_young ? 0 : p->now.hot,
                  warm = is_young && p->now.warm != TKVI_FOREVER ? 0 : p->now.warm;
    int tier;
    memset(&s, 0, sizeof s);
    gone = p->kept_window ? tkvi_n_ended_blocks(whole, due - margin) : 0;
    archived = tkvi_n_ended_blocks(whole, due - hot - warm);
    coded = tkvi_n_ended_blocks(whole, due - hot);
    archived = archived > gone ? archived : gone;
    coded = coded > archived ? coded : archived;
    if (p->now.needs_table[TKV_TIER_ARCHIVE] && archived > gone + most_recoded)
        archived = gone + most_recoded;
    if (p->now.needs_table[TKV_TIER_WARM] && coded > gone + most_recoded) coded = gone + most_recoded;
    if (coded < archived) coded = archived;
    s.blocks[TKV_TIER_ARCHIVE] = archived - gone;
    s.blocks[TKV_TIER_WARM] = coded - archived;
    s.blocks[TKV_TIER_HOT] = whole - coded;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) s.tokens[tier] = s.blocks[tier] * TKVI_BLOCK;
    s.tokens[TKV_TIER_HOT] += rest;
    s.blocks[TKV_TIER_HOT] += rest > 0;
    s.sink_tokens =
        p->kept_window && !p->keeps_sinks && tokens > 0 && due >= margin ? 0 : tkvi_min(n, p->sink);
    return s;
}

/* Upper bound of the blocks of one list that are not in RAM, within what reclaim/offload.h and discard.h allow. */
typedef struct tkvi_not_in_ram {
    int64_t blocks;
    int discarded; /* 1: they are discarded, and their tokens count in no tier; 0: offloaded */
    int young;     /* 1: blocks younger than hot_tokens are recoded too (stage 7 of reclaim/budget.h) */
} tkvi_not_in_ram;

/* Moves the oldest blocks of a list out of RAM, in `s` and `m`. Blocks of the hot tail and the last two blocks
 * stay. */
static void tkvi_move_out_of_ram(tkv_memory_info *m, const tkvi_derived_config *h, const tkvi_plan *p,
                                 int n_tokens, int64_t n_seqs, const tkvi_not_in_ram *away,
                                 tkvi_layer_sum *s) {
    static const tkv_tier order[TKV_TIER_COUNT] = {TKV_TIER_ARCHIVE, TKV_TIER_WARM, TKV_TIER_HOT};
    const int64_t here = s->blocks[TKV_TIER_ARCHIVE] + s->blocks[TKV_TIER_WARM] + s->blocks[TKV_TIER_HOT];
    /* when the last block has just begun, which needs most memory */
    const int64_t blocks = (tkvi_max(0, n_tokens - p->sink) + TKVI_BLOCK - 1) / TKVI_BLOCK;
    int64_t hot = p->now.hot != TKVI_FOREVER ? p->now.hot : h->cfg.tiers.hot_tokens, go, i;
    if (hot == TKVI_FOREVER) hot = TKVI_BLOCK;
    go = tkvi_n_ended_blocks(blocks - 3, (blocks - 1) * TKVI_BLOCK - hot) - (blocks - here);
    if (go > away->blocks) go = away->blocks;
    for (i = 0; i < TKV_TIER_COUNT && go > 0; i++) {
        const tkv_tier t = order[i];
        const int64_t k = go < s->blocks[t] ? go : s->blocks[t];
        const tkvi_bytes *bytes = &h->bytes[p->now.key[t]];
        go -= k;
        s->blocks[t] -= k;
        if (away->discarded) {
            s->tokens[t] -= k * TKVI_BLOCK;
            continue;
        }
        m->offloaded.tokens += (size_t)(k * n_seqs) * TKVI_BLOCK;
        m->offloaded.codes += (size_t)(k * n_seqs) * bytes->codes;
        m->offloaded.metadata += (size_t)(k * n_seqs) * bytes->metadata;
    }
}

static void tkvi_add_blocks(tkv_memory_info *m, const tkvi_derived_config *h, int key, tkv_tier tier,
                            int64_t blocks, int64_t tokens, int64_t *live) {
    const tkvi_layout_key *k = &h->key[key];
    m->fp16_bytes += (size_t)tokens * tkvi_fp16_bytes(k->n_kv_heads, k->head_dim, k->v_head_dim, k->v_in_k);
    m->tier[tier].tokens += (size_t)tokens;
    m->tier[tier].codes += (size_t)blocks * h->bytes[key].codes;
    m->tier[tier].metadata += (size_t)blocks * h->bytes[key].metadata;
    live[h->class_of[key]] += blocks;
}

/* Adds the blocks of one layer in n_seqs sequences of n_tokens each. Returns the number of blocks of one
 * sequence, blocks that are not in RAM included. */
static int64_t tkvi_add_layer(tkv_memory_info *m, const tkvi_derived_config *h, const tkvi_plan *p,
                              int n_tokens, int64_t n_seqs, int64_t most_recoded, const tkvi_not_in_ram *away,
                              int64_t *live) {
    tkvi_layer_sum s = tkvi_layer_after(p, n_tokens, most_recoded, away->young);
    int64_t here = (s.sink_tokens > 0) + s.blocks[TKV_TIER_HOT] + s.blocks[TKV_TIER_WARM] +
                   s.blocks[TKV_TIER_ARCHIVE] + (TKVI_HAS_EVICT ? p->n_anchor_blocks : 0);
    int tier;
    if (away->blocks) tkvi_move_out_of_ram(m, h, p, n_tokens, n_seqs, away, &s);
    if (s.sink_tokens)
        tkvi_add_blocks(m, h, p->sink_layout, TKV_TIER_HOT, n_seqs, s.sink_tokens * n_seqs, live);
    if (TKVI_HAS_EVICT && p->n_anchor_blocks) /* their tokens count in the tiers that they came from */
        tkvi_add_blocks(m, h, p->anchor_layout, TKV_TIER_HOT, p->n_anchor_blocks * n_seqs, 0, live);
    for (tier = 0; tier < TKV_TIER_COUNT; tier++)
        tkvi_add_blocks(m, h, p->now.key[tier], (tkv_tier)tier, s.blocks[tier] * n_seqs,
                        s.tokens[tier] * n_seqs, live);
    return here;
}

/* The capacity that an array had before it last grew, if it now holds `want` entries; 0: it has never grown. */
static size_t tkvi_cap_before(int64_t want) {
    const uint32_t cap = tkvi_cap_for(want);
    uint32_t had = 16;
    while (had + had / 4 < cap) had += had / 4;
    return had < cap ? had : 0;
}

/* Blocks that leave RAM where the last level of the ladder is not enough. */
typedef struct tkvi_blocks_not_in_ram {
    int64_t outside;   /* per list: offloaded, or without a store discarded (cfg.recompute) */
    int64_t discarded; /* blocks per list, except in one sequence */
    int young;         /* as in tkvi_not_in_ram */
} tkvi_blocks_not_in_ram;

/* Estimates the bytes of n_seqs sequences of n_tokens each at one level. not_in_ram: the blocks not in RAM. */
static tkv_status tkvi_estimate_at(tkvi_derived_config *h, int level,
                                   const tkvi_blocks_not_in_ram *not_in_ram, int n_tokens, int n_seqs,
                                   tkv_memory_info *out) {
    tkvi_tier_spec rule[TKV_MAX_LEVELS];
    tkvi_sizes fixed;
    int64_t live[TKVI_MAX_LAYOUTS], all = 0, pages = 0, most = 0, learned = 0;
    tkv_memory_info m;
    size_t page_bytes;
    tkvi_not_in_ram outside, discarded;
    int i, c, first_delay = TKVI_BLOCK,
              last_delay = 0; /* of the first and the last layer that makes tables */
    const int idle = not_in_ram->discarded && n_seqs > 1 ? n_seqs - 1 : 0;
    const int two_tables =
        h->cfg.budget.bytes && tkvi_version_bytes(h) > h->cfg.budget.bytes / TKVI_LEAST_BUDGET_SHARE;
    const size_t list = sizeof(uint32_t) * (size_t)h->cfg.model.n_layers * (size_t)n_seqs;
    outside.blocks = not_in_ram->outside;
    discarded.blocks = not_in_ram->discarded;
    outside.discarded = !h->cfg.offload.write;
    discarded.discarded = 1;
    outside.young = discarded.young = not_in_ram->young;
    tkvi_compute_fixed_sizes(h, &fixed);
    memset(&m, 0, sizeof m);
    memset(live, 0, sizeof live);
    for (i = 0; i < h->cfg.model.n_layers && n_tokens > 0 && n_seqs > 0; i++) {
        tkvi_plan p;
        int64_t waiting = 0, recoded = TKVI_FOREVER, here;
        (void)tkvi_plan_of(h, i, &p, rule);
        p.now = rule[level];
        if (p.stored_layer != i) continue;
        if (tkvi_plan_learns(&p)) {
            const int delay = h->cfg.budget.bytes ? 0 : tkvi_table_delay(&p);
            const int table_at =
                h->cfg.budget.bytes ? 0 : TKVI_FIRST_TABLE_TOKENS + delay; /* budget: early */
            waiting = tkvi_min(n_seqs, table_at / n_tokens); /* sequences stored before there is a table */
            if (table_at && n_seqs == 1)
                recoded = 2 * (int64_t)tkvi_max(0, n_tokens - table_at); /* tkvi_most_to_age */
            if ((int64_t)(n_tokens - p.sink) * n_seqs > TKVI_BLOCK) learned = (int64_t)n_tokens * n_seqs;
            first_delay = tkvi_min(first_delay, delay + 1 - tkvi_learn_steps(&p));
            last_delay = tkvi_max(last_delay, delay);
        }
        here = tkvi_add_layer(&m, h, &p, n_tokens, n_seqs - waiting - idle, recoded, &outside, live);
        all += here * (n_seqs - waiting);
        most = here > most && waiting < n_seqs ? here : most;
        if (idle) (void)tkvi_add_layer(&m, h, &p, n_tokens, idle, TKVI_FOREVER, &discarded, live);
        here = tkvi_add_layer(&m, h, &p, n_tokens, waiting, 0, &outside, live);
        all += here * waiting;
        most = here > most && waiting ? here : most;
    }
    for (c = 0; c < h->n_classes; c++) pages += tkvi_pages_for(&h->size_class[c], live[c]);
    pages += h->recode_pages;
    page_bytes = tkvi_multiply_sizes((size_t)pages + 1, h->page_bytes);
    if (all > 0x3fffffff || pages > 0x3fffffff || page_bytes > (size_t)-1 / 4 || fixed.total > (size_t)-1 / 4)
        return TKV_ERR_CONFIG; /* more than this machine can address */
    page_bytes -= h->page_bytes;
    m.tables = tkvi_table_bytes(&fixed);
    m.scratch = tkvi_scratch_bytes(&fixed);
    m.exact_copies = fixed.meter_copies;
    m.index = fixed.total - m.tables - m.scratch - m.exact_copies;
    if (h->any_shared && (!two_tables || learned <= TKVI_LAST_TABLE_TOKENS + last_delay))
        m.tables += tkvi_stats_bytes(&h->end);
    for (i = 0; i < (two_tables ? 2 : TKVI_VERSIONS); i++) {
        const int64_t at = two_tables && i ? TKVI_LAST_TABLE_TOKENS : TKVI_FIRST_TABLE_TOKENS << i;
        if (learned > at + first_delay || (i == 0 && h->cfg.budget.bytes)) m.tables += tkvi_version_bytes(h);
    }
    if (all) {
        m.index +=
            tkvi_cap_for(all) * tkvi_block_entry_bytes(&h->cfg) + tkvi_cap_for(pages) * sizeof(tkvi_page);
        m.index += (size_t)tkvi_cap_for(most + 1) * (list + tkvi_choice_entry_bytes(&h->cfg));
    }
    m.total = m.index + m.tables + m.scratch + m.exact_copies + page_bytes;
    m.peak = m.total;
    if (h->cfg.budget.bytes && all) /* a growing array exists twice for a moment: count its old size too */
        m.peak += tkvi_cap_before(all) * tkvi_block_entry_bytes(&h->cfg) +
                  tkvi_cap_before(pages) * sizeof(tkvi_page) +
                  tkvi_cap_before(most + 1) * (list + tkvi_choice_entry_bytes(&h->cfg));
    tkvi_sum_up(&m, page_bytes);
    *out = m;
    return TKV_OK;
}

/* The most blocks of a list that a full budget may offload, or discard because cfg.recompute gives them again. */
static int64_t tkvi_most_blocks_outside(const tkvi_derived_config *h, int n_tokens) {
    tkv_remat_config cost;
    int64_t low = 0, high = (int64_t)n_tokens / TKVI_BLOCK + 1;
    if (TKVI_HAS_OFFLOAD && h->cfg.offload.write) return high;
    if (!TKVI_HAS_DISCARD || !h->cfg.recompute.compute || tkvi_recompute_cost(&h->cfg, &cost)) return 0;
    high = tkvi_max(0, n_tokens - cost.min_materialized) / TKVI_BLOCK;
    while (low < high) {
        const int64_t middle = high - (high - low) / 2;
        if (tkvi_remat_fits_step(&cost, cost.sink_tokens, cost.sink_tokens + (int)middle * TKVI_BLOCK, 0))
            low = middle;
        else high = middle - 1;
    }
    return low;
}

/* Does this many tokens fit the budget at some level, or beyond the last one? *m: the estimate of the first way
 * that fits. Order: the levels, then offloading, then discarding. young: as in tkvi_not_in_ram; only the last level. */
static tkv_status tkvi_estimate_stages(tkvi_derived_config *h, int n_tokens, int n_seqs, int young,
                                       tkv_memory_info *m) {
    const size_t budget = h->cfg.budget.bytes;
    const int64_t most = (int64_t)n_tokens / TKVI_BLOCK + 1;
    tkvi_blocks_not_in_ram not_in_ram;
    int64_t low = 0, high;
    tkv_status st;
    int level;
    memset(&not_in_ram, 0, sizeof not_in_ram);
    not_in_ram.young = young;
    for (level = young ? h->cfg.budget.pressure.max_level : h->first_level;; level++) {
        st = tkvi_estimate_at(h, level, &not_in_ram, n_tokens, n_seqs, m);
        if (st || !budget || m->peak <= budget) return st;
        if (level == h->cfg.budget.pressure.max_level) break;
    }
    high = tkvi_most_blocks_outside(h, n_tokens);
    if (high > 0) { /* the fewest blocks outside RAM that fit, by bisection */
        while (low < high) {
            not_in_ram.outside = low + (high - low) / 2;
            st = tkvi_estimate_at(h, level, &not_in_ram, n_tokens, n_seqs, m);
            if (!st && m->peak <= budget) high = not_in_ram.outside;
            else low = not_in_ram.outside + 1;
        }
        not_in_ram.outside = high;
        st = tkvi_estimate_at(h, level, &not_in_ram, n_tokens, n_seqs, m);
        if (st || m->peak <= budget) return st;
    }
    if (!TKVI_HAS_DISCARD || !h->cfg.budget.discard) return TKV_ERR_BUDGET;
    not_in_ram.discarded = most;
    st = tkvi_estimate_at(h, level, &not_in_ram, n_tokens, n_seqs, m);
    return !st && m->peak > budget ? TKV_ERR_BUDGET : st;
}

/* tkvi_estimate_stages; the last stage recodes blocks younger than hot_tokens too. */
static tkv_status tkvi_estimate_within(tkvi_derived_config *h, int n_tokens, int n_seqs, tkv_memory_info *m) {
    const tkv_status st = tkvi_estimate_stages(h, n_tokens, n_seqs, 0, m);
    return st == TKV_ERR_BUDGET ? tkvi_estimate_stages(h, n_tokens, n_seqs, 1, m) : st;
}

/* Eviction for bytes can reduce a list to this number of tokens, which allows for blocks that are not full.
 * Offloaded blocks are not merged: with a store, each token that stays may be the only one of its block. Returns
 * n_tokens if nothing is evicted for bytes. */
static int tkvi_eviction_floor(const tkvi_derived_config *h, int n_tokens) {
    tkv_evict_config cfg;
    int64_t n;
    if (!TKVI_HAS_EVICT || !h->cfg.evict.policy || !h->cfg.budget.bytes) return n_tokens;
    (void)tkvi_evict_fill(&h->cfg.evict, &cfg);
    n = (int64_t)cfg.sink_tokens + 2 * (int64_t)cfg.recent_tokens + 4 * TKVI_BLOCK;
    if (h->cfg.offload.write) n *= TKVI_BLOCK;
    return n < n_tokens ? (int)n : n_tokens;
}

TKV_API tkv_status tkv_estimate_memory(const tkv_config *cfg, int n_tokens, int n_seqs,
                                       tkv_memory_info *out) {
    tkvi_derived_config h;
    tkv_memory_info m;
    tkv_status st = tkvi_validate(cfg, &h, NULL, 0);
    int least, keep;
    if (st) return st;
    if (!out || n_tokens < 0 || n_tokens > h.cfg.limits.max_tokens || n_seqs < 0 ||
        n_seqs > h.cfg.limits.max_seqs)
        return TKV_ERR_ARG;
    keep = h.cfg.evict.policy && h.cfg.evict.keep_tokens ? tkvi_min(n_tokens, h.cfg.evict.keep_tokens)
                                                         : n_tokens;
    st = tkvi_estimate_within(&h, keep, n_seqs, &m);
    if (TKVI_HAS_EVICT && st == TKV_ERR_BUDGET && (least = tkvi_eviction_floor(&h, keep)) < keep &&
        (st = tkvi_estimate_within(&h, least, n_seqs, &m)) == TKV_OK) {
        while (least < keep) { /* the most tokens that fit, by bisection */
            const int n = least + (keep - least + 1) / 2;
            if (tkvi_estimate_within(&h, n, n_seqs, &m) == TKV_OK) least = n;
            else keep = n - 1;
        }
        st = tkvi_estimate_within(&h, least, n_seqs, &m);
    }
    if (!st) *out = m;
    return st;
}

TKV_API tkv_status tkv_estimate_context(const tkv_config *cfg, int n_seqs, int *n_tokens) {
    tkvi_derived_config h;
    tkv_memory_info m;
    tkv_status st = tkvi_validate(cfg, &h, NULL, 0);
    int low = 0, high, step, least; /* invariant: lengths up to low fit, high + 1 does not */
    if (st) return st;
    if (!n_tokens || !h.cfg.budget.bytes || n_seqs < 1 || n_seqs > h.cfg.limits.max_seqs) return TKV_ERR_ARG;
    high = h.cfg.limits.max_tokens;
    least = h.cfg.evict.policy && h.cfg.evict.keep_tokens ? tkvi_min(high, h.cfg.evict.keep_tokens) : high;
    least = tkvi_eviction_floor(&h, least);
    if (least < high && tkvi_estimate_within(&h, least, n_seqs, &m) == TKV_OK) { /* eviction keeps it so */
        *n_tokens = high;
        return TKV_OK;
    }
    /* When blocks first expire, bytes fall, so fitting is not monotonic: try the first 512 blocks one by one. */
    for (; low < high && low < 512 * TKVI_BLOCK; low += step) {
        step = tkvi_min(TKVI_BLOCK, high - low);
        if (tkvi_estimate_within(&h, low + step, n_seqs, &m) == TKV_OK) continue;
        high = low + step - 1;
        break;
    }
    while (low < high) {
        const int n = low + (high - low + 1) / 2;
        if (tkvi_estimate_within(&h, n, n_seqs, &m) == TKV_OK) low = n;
        else high = n - 1;
    }
    *n_tokens = low;
    return TKV_OK;
}

/* >>self-check */
typedef struct tkvi_checker {
    const tkv_cache *kv;
    char *reason;
    size_t size;
} tkvi_checker;

static tkv_status tkvi_report_broken(const tkvi_checker *k, const char *what, int64_t where) {
    tkvi_text t = tkvi_text_begin(k->reason, k->reason ? k->size : 0);
    tkvi_append_text(&t, what);
    tkvi_append_text(&t, " (");
    tkvi_append_int(&t, where);
    tkvi_append_text(&t, ")");
    return TKV_ERR_BROKEN;
}

/* Checks block numbers. Runs first, so that later checks never index beyond a table. */
static tkv_status tkvi_check_ids(const tkvi_checker *k, int seq, int layer) {
    const tkv_cache *kv = k->kv;
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    if (list->n < 0 || (uint32_t)list->n > kv->seq[seq].cap)
        return tkvi_report_broken(k, "a list is longer than its array", layer);
    for (i = 0; i < list->n; i++)
        if (ids[i] >= kv->pool.block_cap || !kv->pool.entry[ids[i]].in_use ||
            kv->pool.entry[ids[i]].block >= kv->pool.block_cap || tkvi_block_of(kv, ids[i])->refs == 0 ||
            tkvi_block_of(kv, ids[i])->layout >= kv->tables.n_layouts)
            return tkvi_report_broken(k, "a list names a block that does not exist", (int64_t)ids[i]);
    return TKV_OK;
}

/* Can a block of this tier have this format? In the hot tier: only a hot format of some level. In the others: the
 * tier's own format, or, with several levels, a budget, a store, or for a discarded block, any format of the ladder. A
 * loaded block may be in a tier that the plan lacks, in the format of tkvi_tier_of_level. */
static int tkvi_is_format_of_tier(const tkv_cache *kv, int layer, int is_discarded, tkv_tier tier, int key) {
    const tkvi_tier_spec *rule = tkvi_tier_specs_of(&kv->tables, layer);
    int i, t,
        one = kv->tables.n_levels == 1 && !is_discarded && !kv->tables.cfg.offload.write &&
              !kv->tables.cfg.recompute.compute && !kv->budget.has_loaded && !kv->tables.recode_pages;
    for (i = 0; i < kv->tables.n_levels; i++)
        for (t = 0; t < TKV_TIER_COUNT; t++)
            if (rule[i].key[t] == key &&
                (one || tier == TKV_TIER_HOT ? t == (int)tier || t == (int)tkvi_tier_of_level(&rule[i], tier)
                                             : 1))
                return 1;
    return 0;
}

/* Number of tokens behind block i of a list that are older than the last append. Gaps have none: where a move splits a
 * block before a gap, its first part does not grow old at once. */
static int64_t tkvi_n_older_behind(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    int64_t n = (int64_t)list->chunk_start - list->len;
    while (++i < list->n) n += tkvi_n_bits(tkvi_live_mask_in(kv, list, ids, i));
    return n;
}

/* Checks entry i of a list. */
static tkv_status tkvi_check_entry(const tkvi_checker *k, int seq, int layer, int i) {
    const tkv_cache *kv = k->kv;
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int anchors = tkvi_anchors_of(list);
    int t, slot, last, is_layout_of_front;
    const tkvi_block *b = tkvi_block_of(kv, ids[i]);
    const tkvi_entry *e = &kv->pool.entry[ids[i]];
    int64_t end = tkvi_block_end(kv, list, ids, i), age = list->chunk_start - end, most;
    tkv_tier tier = tkvi_tier_at(list, i);
    if ((TKVI_HAS_EVICT && e->has_anchors != (i < anchors)) || (i < anchors && (e->start || !e->n_packed)))
        return tkvi_report_broken(k, "blocks of anchors are not in front, or list no indices",
                                  (int64_t)ids[i]);
    if ((end <= e->start && i >= anchors) ||
        tkvi_block_tokens(kv, list, ids, i) > kv->tables.layout[b->layout].tokens)
        return tkvi_report_broken(k, "a block has no tokens, or more than its capacity", (int64_t)ids[i]);
    if (e->n_packed && (!TKVI_HAS_EVICT || !kv->pool.token_meta || e->n_packed < 0))
        return tkvi_report_broken(k, "an entry lists indices where none can", (int64_t)ids[i]);
    if (e->first_slot >= tkvi_block_tokens(kv, list, ids, i) ||
        (e->end_slot && (e->n_packed || e->end_slot - e->first_slot > end - e->start)))
        return tkvi_report_broken(k, "an entry has slots that no token can have", (int64_t)ids[i]);
    for (t = 0; t < TKVI_BLOCK; t++) {
        const int is_live = tkvi_live_mask_in(kv, list, ids, i) >> t & 1;
        const int64_t position = is_live ? (int64_t)tkvi_slot_index(kv, ids[i], t) + e->shift : 0;
        if (position < 0 || position >= TKVI_POSITIONS)
            return tkvi_report_broken(k, "a token has a position that does not exist", position);
    }
    for (t = 0, last = -1; TKVI_HAS_EVICT && t < e->n_packed && i >= anchors; t++) {
        if (!(tkvi_used_mask(kv, list, ids, i) >> t & 1)) continue;
        if (tkvi_slot_index(kv, ids[i], t) >= end || tkvi_slot_index(kv, ids[i], t) <= last)
            return tkvi_report_broken(k, "tokens of a packed block are out of order", (int64_t)ids[i]);
        last = tkvi_slot_index(kv, ids[i], t);
    }
    if (TKVI_HAS_EVICT && kv->pool.token_meta &&
        (kv->pool.token_meta[ids[i]].anchored_mask & ~e->evicted_mask))
        return tkvi_report_broken(k, "a token is an anchor and live in its block", (int64_t)ids[i]);
    for (t = 0; TKVI_HAS_EVICT && t < TKVI_BLOCK && kv->pool.token_meta; t++)
        if (kv->pool.token_meta[ids[i]].anchored_mask >> t & 1 &&
            (unsigned)tkvi_find_token(kv, list, ids, tkvi_slot_index(kv, ids[i], t), &slot) >=
                (unsigned)anchors)
            return tkvi_report_broken(k, "no block of anchors has an anchor of block", (int64_t)ids[i]);
    if (tkvi_sink_mask(&kv->pool, ids[i]) & ~tkvi_live_mask_in(kv, list, ids, i))
        return tkvi_report_broken(k, "a named sink is no token, entry", (int64_t)ids[i]);
    if (tkvi_sink_mask(&kv->pool, ids[i]) &&
        (tkvi_is_discarded(b) || (!tkvi_is_hot_layout(kv, layer, b->layout) &&
                                  kv->tables.layout[b->layout].key != (int)p->sink_layout)))
        return tkvi_report_broken(k, "a named sink is not exact, entry", (int64_t)ids[i]);
    if (i >= list->sinks && p->keeps_sinks && e->start < list->expired &&
        tkvi_sink_mask(&kv->pool, ids[i]) != tkvi_live_mask_in(kv, list, ids, i))
        return tkvi_report_broken(k, "a token has expired beside a named sink, entry", (int64_t)ids[i]);
    if (e->tier != (uint8_t)tier)
        return tkvi_report_broken(k, "an entry is not in its list's tier", (int64_t)ids[i]);
    if (b->refs > 1 && tkvi_block_tokens(kv, list, ids, i) > b->n_shared_slots)
        return tkvi_report_broken(k, "a list sees more of a shared block than there is", (int64_t)ids[i]);
    is_layout_of_front =
        kv->tables.layout[b->layout].key == (i < anchors ? p->anchor_layout : p->sink_layout);
    if (i < list->sinks ? !is_layout_of_front
                        : !is_layout_of_front && /* a copied block of sinks */
                              !tkvi_is_format_of_tier(kv, layer, tkvi_is_discarded(b), (tkv_tier)b->tier,
                                                      kv->tables.layout[b->layout].key))
        return tkvi_report_broken(k, "a block is not in its tier's format", (int64_t)ids[i]);
    most = (int64_t)p->now.hot + kv->tables.cfg.limits.max_append + (tier == TKV_TIER_WARM ? p->now.warm : 0);
    most += TKVI_BLOCK; /* entries can end before their block, and short blocks wait for later appends */
    if (tkvi_plan_learns(p)) most += TKVI_FIRST_TABLE_TOKENS;
    if (tkvi_is_offloaded(b) && (i < list->sinks || !(kv->tables.cfg.offload.write || tkvi_is_discarded(b) ||
                                                      tkvi_is_attached(&kv->pool, e->block, TKVI_ITSELF))))
        return tkvi_report_broken(k, "a block is offloaded that must stay in RAM", (int64_t)ids[i]);
    if (b->copy_layout && b->copy_layout > kv->tables.n_layouts)
        return tkvi_report_broken(k, "a copy is in no known format", (int64_t)ids[i]);
    if (i >= list->sinks && tier != TKV_TIER_ARCHIVE && age >= most && kv->tables.n_levels == 1 &&
        !tkvi_has_budget(kv) && !kv->budget.hot_tokens_changed && !kv->budget.has_loaded &&
        !tkvi_must_wait_for_table(kv, layer, (tkv_tier)((int)tier + 1)) &&
        (!TKVI_HAS_MOVES || tkvi_n_older_behind(kv, list, ids, i) >= most))
        return tkvi_report_broken(k, "a block is in its tier for too long", (int64_t)ids[i]);
    return TKV_OK;
}

/* Checks the numbers of a list. */
static tkv_status tkvi_check_counts(const tkvi_checker *k, int seq, int layer) {
    const tkv_cache *kv = k->kv;
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int anchors = tkvi_anchors_of(list);
    int i;
    if (p->stored_layer != layer)
        return list->n || list->len
                   ? tkvi_report_broken(k, "a layer without its own cache holds blocks", layer)
                   : TKV_OK;
    if (anchors < 0 || (TKVI_HAS_EVICT && anchors > p->n_anchor_blocks) || list->sinks < anchors ||
        list->sinks - anchors > tkvi_max(1, p->sink) || list->archive < 0 || list->warm < 0 ||
        (int64_t)list->sinks + list->archive + list->warm > list->n)
        return tkvi_report_broken(k, "tier counts do not fit the list of layer", layer);
    if (list->passed[TKVI_TIGHTEST] < 0 || list->passed[TKVI_TIGHTEST] > list->passed[TKVI_RECODED] ||
        list->passed[TKVI_TIGHTEST] > list->archive ||
        list->passed[TKVI_RECODED] > list->archive + list->warm)
        return tkvi_report_broken(k, "blocks of the hot tail count as recoded in layer", layer);
    if (list->passed[TKVI_OFFLOADED_RUN] < 0 || list->passed[TKVI_OFFLOADED_RUN] > list->n - list->sinks)
        return tkvi_report_broken(k, "more blocks are counted as offloaded than exist, layer", layer);
    for (i = 0; i < list->passed[TKVI_OFFLOADED_RUN]; i++)
        if (!tkvi_is_offloaded(tkvi_block_of(kv, ids[list->sinks + i])))
            return tkvi_report_broken(k, "a block in RAM is counted as offloaded, layer", layer);
    if (list->chunk_start < 0 || list->chunk_start > list->len)
        return tkvi_report_broken(k, "the last append began behind the end of layer", layer);
    if (list->expired < 0 || list->expired > list->len || list->len > kv->tables.cfg.limits.max_tokens)
        return tkvi_report_broken(k, "a length is out of range in layer", layer);
    if (TKVI_HAS_MOVES && list->shift && !list->is_moved)
        return tkvi_report_broken(k, "the next position is not the length of layer", layer);
    if (list->n && list->len == list->expired)
        return tkvi_report_broken(k, "blocks without tokens, in layer", layer);
    i = tkvi_first_to_expire(kv, layer, list, ids);
    if (i < list->n && tkvi_block_start(kv, ids, i) < list->expired)
        return tkvi_report_broken(k, "the first block does not follow the expired tokens, layer", layer);
    return TKV_OK;
}

static tkv_status tkvi_check_list(const tkvi_checker *k, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(k->kv, seq, layer);
    tkv_status st = tkvi_check_counts(k, seq, layer);
    int i, shift;
    for (i = 0; i < list->n && !st; i++) st = tkvi_check_entry(k, seq, layer, i);
    if (TKVI_HAS_MOVES && !st && list->n &&
        tkvi_last_index(k->kv, list, tkvi_ids(k->kv, seq, layer), list->len, &shift) == list->len - 1 &&
        list->shift != shift)
        st = tkvi_report_broken(k, "the next position does not follow the last token of layer", layer);
    return st;
}

/* Checks a page against the blocks that its slots name. */
static tkv_status tkvi_check_page(const tkvi_checker *k, uint32_t i) {
    const tkvi_pool *pool = &k->kv->pool;
    const tkvi_page *p = &pool->page[i];
    int s, used = 0;
    if (p->size_class < -1 || p->size_class >= pool->tables->n_classes)
        return tkvi_report_broken(k, "a page of no known class", i);
    for (s = 0; s < 64 && p->size_class >= 0; s++) {
        const tkvi_block *b;
        if (!(p->taken >> s & 1)) continue;
        used++;
        if (s >= pool->tables->size_class[p->size_class].slots)
            return tkvi_report_broken(k, "a slot beyond its page", i);
        if (p->owner[s] >= pool->block_cap)
            return tkvi_report_broken(k, "a slot of a block that does not exist", i);
        b = &pool->block[p->owner[s]];
        if (b->refs == 0 || b->page != i || b->slot != s || b->layout >= pool->tables->n_layouts ||
            pool->tables->layout[b->layout].size_class != p->size_class)
            return tkvi_report_broken(k, "a slot and its block disagree", i);
    }
    if (p->size_class >= 0 && (used != p->used || used == 0))
        return tkvi_report_broken(k, "a page's slots are miscounted", i);
    return TKV_OK;
}

/* The number of pages in the chain from `first`; -1 if it is broken or has a page of another class. */
static int64_t tkvi_chain(const tkvi_pool *pool, uint32_t first, int size_class, int64_t *used) {
    uint32_t i;
    int64_t n = 0;
    *used = 0;
    for (i = first; i != TKVI_NIL; i = pool->page[i].after, n++) {
        if (n > pool->n_pages || i >= pool->n_pages || pool->page[i].size_class != size_class) return -1;
        *used += pool->page[i].used;
    }
    return n;
}

static tkv_status tkvi_check_pool(const tkvi_checker *k) {
    const tkvi_pool *pool = &k->kv->pool;
    int64_t live = 0, used, chained, n_free = 0, n;
    uint32_t i;
    int c, seq;
    tkv_status st = TKV_OK;
    for (i = 0; i < pool->n_pages && !st; i++) {
        st = tkvi_check_page(k, i);
        n_free += pool->page[i].size_class < 0;
    }
    if (st) return st;
    if (tkvi_chain(pool, pool->free_page, -1, &used) != n_free || n_free != pool->n_free_pages)
        return tkvi_report_broken(k, "free pages are miscounted", n_free);
    for (c = 0; c < pool->tables->n_classes; c++) {
        const tkvi_class *size_class = &pool->tables->size_class[c];
        int64_t pages = 0, full = 0, in_class = 0, reserved = 0;
        for (i = 0; i < pool->n_pages; i++) {
            if (pool->page[i].size_class != c) continue;
            pages++;
            full += pool->page[i].used == size_class->slots;
            in_class += pool->page[i].used;
        }
        if (in_class != pool->used_slots[c]) return tkvi_report_broken(k, "blocks are miscounted, class", c);
        if (pages != tkvi_pages_for(size_class, in_class))
            return tkvi_report_broken(k, "more pages than blocks need, class", c);
        chained = tkvi_chain(pool, pool->partial_pages[c], c, &used);
        if (chained != pages - full || used != in_class - full * size_class->slots)
            return tkvi_report_broken(k, "a partial page is not in its list, class", c);
        for (seq = 0; seq < k->kv->tables.cfg.limits.max_seqs; seq++)
            reserved += k->kv->reserved_slots[(size_t)seq * (size_t)pool->tables->n_classes + (size_t)c];
        if (reserved != pool->reserved_slots[c])
            return tkvi_report_broken(k, "reservations are miscounted, class", c);
        live += in_class;
    }
    for (i = 0, n = 0; i < pool->block_cap; i++)
        n += pool->block[i].refs && tkvi_is_offloaded(&pool->block[i]);
    if (n != (int64_t)pool->n_offloaded) return tkvi_report_broken(k, "offloaded blocks are miscounted", n);
    for (i = 0, used = 0; i < pool->block_cap; i++)
        used += pool->block[i].refs && tkvi_is_discarded(&pool->block[i]);
    if (used != (int64_t)pool->n_discarded)
        return tkvi_report_broken(k, "discarded blocks are miscounted", used);
    live += n;
    if (live != (int64_t)pool->n_blocks) return tkvi_report_broken(k, "blocks and slots disagree", live);
    for (i = pool->free_block, n = 0; i != TKVI_NIL; i = pool->block[i].page, n++)
        if (n >= pool->block_cap || i >= pool->block_cap || pool->block[i].refs)
            return tkvi_report_broken(k, "the list of free blocks is broken", (int64_t)i);
    if (n + live != (int64_t)pool->block_cap) return tkvi_report_broken(k, "free blocks are miscounted", n);
    for (i = pool->free_entry, n = 0; i != TKVI_NIL; i = pool->entry[i].block, n++)
        if (n >= pool->block_cap || i >= pool->block_cap || pool->entry[i].in_use)
            return tkvi_report_broken(k, "the list of free entries is broken", (int64_t)i);
    if (n + pool->n_entries != (int64_t)pool->block_cap)
        return tkvi_report_broken(k, "free entries are miscounted", n);
    return TKV_OK;
}

/* Checks the rings of holders. Runs after the lists, so that each entry in use names a block in use. */
static tkv_status tkvi_check_holders(const tkvi_checker *k) {
    const tkvi_pool *pool = &k->kv->pool;
    uint32_t id, i, n, n_late = 0;
    for (id = 0; id < pool->block_cap; id++) {
        const tkvi_entry *e = &pool->entry[id];
        int n_first = e->is_first;
        if (!e->in_use) continue;
        for (i = e->next_holder, n = 1; i != id; i = pool->entry[i].next_holder, n++) {
            if (i >= pool->block_cap || n >= pool->block[e->block].refs || !pool->entry[i].in_use ||
                pool->entry[i].block != e->block)
                return tkvi_report_broken(k, "the holders of a block are no ring, block", e->block);
            n_first += pool->entry[i].is_first;
        }
        if (n != pool->block[e->block].refs || n_first != 1)
            return tkvi_report_broken(k, "the holders of a block are miscounted, block", e->block);
        n_late += e->is_first && pool->block[e->block].tier < (int)tkvi_tier_for_all(pool, id);
    }
    if (n_late != pool->n_late) return tkvi_report_broken(k, "late blocks are miscounted", n_late);
    return TKV_OK;
}

/* Hashes a block number (splitmix64). Sums of hashes over two sets agree only if the sets do, up to chance. */
static uint64_t tkvi_scatter(uint32_t id) {
    uint64_t x = ((uint64_t)id + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* 1 if block i of a list has its first format and no exact copy. A colder tier can have the format of the hot one. */
static int tkvi_is_never_coded(const tkv_cache *kv, const tkvi_list *list, int layer, int i) {
    const tkvi_tier_spec *now = &kv->tables.plan[layer].now;
    const tkvi_block *b = tkvi_block_of(kv, tkvi_ids(kv, kv->meter->seq, layer)[i]);
    const tkv_tier tier = tkvi_tier_at(list, i);
    return kv->tables.layout[b->layout].key == now->key[TKV_TIER_HOT] && !b->copy_layout &&
           (tier == TKV_TIER_HOT || now->key[tier] != now->key[TKV_TIER_HOT]);
}

/* Checks the meter's copies: of coded or expired blocks, in order, each in a slot of its own. */
static tkv_status tkvi_check_meter(const tkvi_checker *k) {
    const tkvi_meter *m = k->kv->meter;
    uint64_t places;
    int i, a;
    if (!TKVI_HAS_METER || !m) return TKV_OK;
    if (m->seq != TKV_NO_SEQ && (m->seq < 0 || m->seq >= k->kv->tables.cfg.limits.max_seqs))
        return tkvi_report_broken(k, "the meter watches a sequence that does not exist", m->seq);
    for (i = 0; i < m->n; i++) {
        const tkvi_head_probe *g = &m->head_probe[i];
        const tkvi_list *list = m->seq < 0 ? NULL : tkvi_list_of(k->kv, m->seq, g->layer);
        int block = 0;
        if (g->n < 0 || g->n > m->slots || (g->n && !list) || g->stride < 1)
            return tkvi_report_broken(k, "the meter has copies without blocks, head probe", i);
        for (a = 0, places = 0; a < m->slots; a++) {
            if (g->slot[a] < 0 || g->slot[a] >= m->slots)
                return tkvi_report_broken(k, "a copy of the meter has no slot, head probe", i);
            places += tkvi_scatter((uint32_t)g->slot[a]) - tkvi_scatter((uint32_t)a);
        }
        if (places) return tkvi_report_broken(k, "two copies of the meter share a slot, head probe", i);
        for (a = 0; a < g->n; a++) {
            const uint32_t *ids = tkvi_ids(k->kv, m->seq, g->layer);
            if (a && g->start[a] <= g->start[a - 1])
                return tkvi_report_broken(k, "copies out of order, head probe", i);
            if (g->start[a] < list->expired) continue;
            while (block < list->n && tkvi_block_start(k->kv, ids, block) < g->start[a]) block++;
            if (block == list->n || tkvi_block_start(k->kv, ids, block) != g->start[a] ||
                tkvi_is_never_coded(k->kv, list, g->layer, block))
                return tkvi_report_broken(k, "the meter has a copy of a block that is not coded, head probe",
                                          i);
        }
    }
    return TKV_OK;
}

/* Bytes of states, of the region in which they lie, and of their lists. */
static size_t tkvi_held_state_bytes(const tkv_cache *kv) {
    const tkvi_states *s = &kv->states;
    size_t bytes = s->region ? s->region_bytes : s->held_bytes;
    int seq;
    for (seq = 0; seq < s->n_lists; seq++) bytes += s->list[seq].cap * sizeof(tkvi_held_state);
    return bytes;
}

/* Number of sequences that hold a state. *n_spare: for how many it is spare; *is_first: 1 if none is before seq. */
static uint32_t tkvi_count_holders(const tkvi_states *s, int seq, const tkvi_state *state, uint32_t *n_spare,
                                   int *is_first) {
    uint32_t n = 0;
    int other, at;
    *n_spare = 0;
    *is_first = 1;
    for (other = 0; other < s->n_lists; other++) {
        if (tkvi_find_state(&s->list[other], state->layer, state->n_tokens, &at) != state) continue;
        if (other < seq) *is_first = 0;
        *n_spare += (uint32_t)s->list[other].held[at].is_spare;
        n++;
    }
    return n;
}

/* Checks the states: in order, held by those that they count, and which are spare. */
static tkv_status tkvi_check_states(const tkvi_checker *k) {
    const tkvi_states *s = &k->kv->states;
    size_t held = 0, spare = 0;
    int seq, i, n_stateful = 0;
    for (i = 0; i < s->n_layers; i++) n_stateful += s->is_stateful[i];
    if (n_stateful != s->n_stateful)
        return tkvi_report_broken(k, "stateful layers are miscounted", s->n_stateful);
    for (seq = 0; seq < s->n_lists; seq++) {
        const tkvi_state_list *list = &s->list[seq];
        tkvi_state_position at = tkvi_end_position(list);
        int n_positions = 0, has_complete = 0;
        if (list->n < 0 || (uint32_t)list->n > list->cap)
            return tkvi_report_broken(k, "a list of states is longer than its memory", seq);
        for (i = 0; i < list->n; i++) {
            const tkvi_state *state = list->held[i].state, *before = i ? list->held[i - 1].state : NULL;
            uint32_t n_spare;
            int is_first;
            if (state->layer < 0 || state->layer >= s->n_layers || !s->is_stateful[state->layer] ||
                state->n_tokens < 1 || !state->size)
                return tkvi_report_broken(k, "a state has no place, in sequence", seq);
            if (before && (before->n_tokens > state->n_tokens ||
                           (before->n_tokens == state->n_tokens && before->layer >= state->layer)))
                return tkvi_report_broken(k, "states are out of order in sequence", seq);
            if (tkvi_count_holders(s, seq, state, &n_spare, &is_first) != state->n_holders ||
                n_spare != state->n_spare)
                return tkvi_report_broken(k, "the holders of a state are miscounted, in sequence", seq);
            if (!is_first) continue;
            held += tkvi_state_bytes(state->size);
            if (tkvi_can_thin(state)) spare += tkvi_state_bytes(state->size);
        }
        for (; tkvi_step_back(list, &at); n_positions++) {
            const int stays = at.n_newest > 0 || (!has_complete && tkvi_is_complete(s, &at));
            has_complete |= tkvi_is_complete(s, &at);
            for (i = at.first; i < at.end; i++)
                if (list->held[i].is_spare == stays)
                    return tkvi_report_broken(
                        k, "a state is spare that is not, or the other way, in sequence", seq);
        }
        if (n_positions != list->n_positions)
            return tkvi_report_broken(k, "positions of states are miscounted in sequence", seq);
    }
    if (held != s->held_bytes || spare != s->spare_bytes)
        return tkvi_report_broken(k, "bytes of states do not add up", (int64_t)s->held_bytes);
    if (held > s->limit)
        return tkvi_report_broken(k, "states take more than limits.state_bytes", (int64_t)s->held_bytes);
    return TKV_OK;
}

TKV_API tkv_status tkv_check(const tkv_cache *kv, char *reason, size_t size) {
    tkvi_checker k;
    tkv_status st;
    uint32_t id;
    int seq, layer, i;
    size_t held;
    uint64_t refs = 0, listed = 0, entries = 0, held_blocks = 0;
    if (!kv) return TKV_ERR_ARG;
    k.kv = kv;
    k.reason = reason;
    k.size = size;
    if (reason && size) *reason = 0;
    st = tkvi_check_pool(&k);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs && !st; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++) {
            st = tkvi_check_ids(&k, seq, layer);
            if (!st) st = tkvi_check_list(&k, seq, layer);
            for (i = 0; i < tkvi_list_of(kv, seq, layer)->n && !st; i++)
                listed += tkvi_scatter(tkvi_ids(kv, seq, layer)[i]);
        }
    if (!st) st = tkvi_check_holders(&k);
    if (!st) st = tkvi_check_meter(&k);
    if (st) return st;
    for (id = 0; id < kv->pool.block_cap; id++) {
        refs += kv->pool.block[id].refs * tkvi_scatter(id);
        if (!kv->pool.entry[id].in_use) continue;
        entries += tkvi_scatter(id);
        held_blocks += tkvi_scatter(kv->pool.entry[id].block);
    }
    if (kv->tables.level < 0 || kv->tables.level >= kv->tables.n_levels)
        return tkvi_report_broken(&k, "there is no level", kv->tables.level);
    if (tkvi_has_budget(kv) &&
        (kv->pool.keep_all ? tkvi_used_bytes(kv) : kv->heap.held) > kv->tables.cfg.budget.bytes)
        return tkvi_report_broken(&k, "more is held than the budget", (int64_t)kv->heap.held);
    if (listed != entries)
        return tkvi_report_broken(&k, "an entry is in no list, or in two, of those in use",
                                  kv->pool.n_entries);
    if (refs != held_blocks)
        return tkvi_report_broken(&k, "blocks count other holders than the lists have", 0);
    st = tkvi_check_states(&k);
    if (st) return st;
    held = kv->sizes.total + tkvi_learning_bytes(kv) + tkvi_held_state_bytes(kv) +
           kv->pool.n_pages * kv->tables.page_bytes +
           kv->work.choice_cap * tkvi_choice_entry_bytes(&kv->tables.cfg) +
           kv->pool.source_cap * sizeof(tkvi_source_place) + kv->pool.n_attached * sizeof(tkvi_attached) +
           kv->pool.page_cap * sizeof(tkvi_page) + tkvi_turns_bytes(kv->turns.cap, kv->turns.lanes) +
           kv->pool.block_cap * tkvi_block_entry_bytes(&kv->tables.cfg);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        const tkvi_seq *s = &kv->seq[seq];
        held += (size_t)s->cap * (size_t)kv->tables.cfg.model.n_layers * sizeof(uint32_t) +
                (size_t)s->page_cap * sizeof *s->page;
        if (s->n_pages > s->page_cap ||
            (s->n_pages && s->page[s->n_pages - 1].end > tkv_get_length(kv, seq, TKV_ALL_LAYERS)))
            return tkvi_report_broken(&k, "a page is named whose tokens are gone, in sequence", seq);
    }
    if (held != kv->heap.held)
        return tkvi_report_broken(&k, "bytes held do not add up", (int64_t)kv->heap.held);
    return TKV_OK;
}

#endif /* TKVI_REPORT_INFO_H */
