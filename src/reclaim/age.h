/*
 * reclaim/age.h - demotes blocks: recodes them into the formats of colder tiers. It also
 * finds the blocks that are old enough, and expires blocks that left every window. Each change can be played as a
 * dry run, which only counts slots (tkvi_peak).
 *
 *     blocks of a list     [sinks] [archive ...............] [warm ..........] [hot ...........]
 *     age in tokens         exact   >= hot_tokens +           >= hot_tokens     below hot_tokens
 *                                      warm_tokens
 *
 * The age of a block is the number of tokens after it. Ageing runs at the start of an append or of a step, before
 * new tokens are stored, and in tkv_seq_flush. So the tokens of a chunk are still exact when the chunk is attended
 * to. Ageing recodes full blocks. Only a flush may recode a last block that is not full.
 */
#ifndef TKVI_RECLAIM_AGE_H
#define TKVI_RECLAIM_AGE_H

#include "learn/squat_queries.h"
#include "reclaim/anchors.h"

/* The tier that age gives to a block. end: first position after the block. len: tokens of the list. hot_age: age at
 * which a block leaves the hot tier. */
static tkv_tier tkvi_tier_by_age(const tkvi_tier_spec *spec, int hot_age, int end, int len) {
    int64_t age = (int64_t)len - end;
    if (age < hot_age) return TKV_TIER_HOT;
    return age < (int64_t)hot_age + spec->warm ? TKV_TIER_WARM : TKV_TIER_ARCHIVE;
}

/* With a budget blocks are recoded when bytes are needed (reclaim/budget.h), without one when they are old. */
static int tkvi_has_budget(const tkv_cache *kv) { return kv->tables.cfg.budget.bytes != 0; }

/* The age in tokens at which ageing takes a layer's blocks from the hot tier. With a budget: never. */
static int tkvi_hot_age(const tkv_cache *kv, int layer) {
    return tkvi_has_budget(kv) ? TKVI_FOREVER : kv->tables.plan[layer].now.hot;
}

/* 1 if blocks of layout `to` have fewer bytes than blocks of layout `from`. */
static int tkvi_is_smaller(const tkv_cache *kv, int from, int to) {
    return kv->tables.layout[to].bytes.total < kv->tables.layout[from].bytes.total;
}

typedef struct tkvi_recoding {
    tkv_cache *kv;
    const tkvi_layout *from, *to;
    int layer, start;   /* start: first position of the block */
    uint64_t live_mask; /* slots that are recoded; all other slots are left out */
} tkvi_recoding;

/* Decodes K or V of the slots in live_mask into consecutive rows of `out`. stride: floats per row. Returns the
 * number of rows. */
static int tkvi_decode_tokens(const tkvi_side *side, const tkvi_simd_ops *simd_ops, const uint8_t *bytes,
                              uint64_t live_mask, float *out, size_t stride) {
    int slot = 0, n_rows = 0;
    while (slot < TKVI_BLOCK && live_mask >> slot) {
        int run = 0;
        while (slot + run < TKVI_BLOCK && live_mask >> (slot + run) & 1) run++;
        if (run) tkvi_values(side, simd_ops, bytes, slot, run, out + (size_t)n_rows * stride, stride);
        n_rows += run;
        slot += tkvi_max(run, 1);
    }
    return n_rows;
}

/* Encodes the n tokens decoded in kv->recode (rows of K, then rows of V) as record r of one head, at dst. start:
 * first position of the block. */
static void tkvi_encode_record(const tkv_cache *kv, int layer, int head, const tkvi_record *r, int start,
                               int n, uint8_t *dst) {
    const tkv_config *cfg = &kv->tables.cfg;
    const float *k = kv->recode, *v = k + tkvi_round_up(cfg->model.head_dim, 16) * TKVI_BLOCK;
    tkvi_side to_k = r->k;
    to_k.feedback = tkvi_squat_factors_of(kv, layer, head);
    to_k.start = start;
    tkvi_encode_side(&to_k, kv->kernels->simd_ops, k, (size_t)cfg->model.head_dim, n, dst);
    tkvi_encode_side(&r->v, kv->kernels->simd_ops, v, (size_t)cfg->model.v_head_dim, n, dst + r->v_at);
}

/* Recodes all heads of a block from the bytes src to the bytes dst (a tkvi_rewrite). ctx: a tkvi_recoding. */
static void tkvi_recode_heads(void *ctx, const uint8_t *src, uint8_t *dst) {
    const tkvi_recoding *r = (const tkvi_recoding *)ctx;
    const tkv_config *cfg = &r->kv->tables.cfg;
    const tkvi_simd_ops *simd_ops = r->kv->kernels->simd_ops;
    float *k = r->kv->recode, *v = k + tkvi_round_up(cfg->model.head_dim, 16) * TKVI_BLOCK;
    size_t dk = (size_t)cfg->model.head_dim, dv = (size_t)cfg->model.v_head_dim;
    int head, n_tokens;
    for (head = 0; head < cfg->model.n_kv_heads; head++) {
        const tkvi_record *from = &r->from->record[head], *to = &r->to->record[head];
        n_tokens = tkvi_decode_tokens(&from->k, simd_ops, src + from->at, r->live_mask, k, dk);
        (void)tkvi_decode_tokens(&from->v, simd_ops, src + from->at + from->v_at, r->live_mask, v, dv);
        tkvi_encode_record(r->kv, r->layer, head, to, r->start, n_tokens, dst + to->at);
    }
}

/* Gives the quality meter its copy of an exact block that is about to be recoded (cache/meter.h). */
static void tkvi_copy_for_meter(tkv_cache *kv, int seq, int layer, const tkvi_block *b) {
    const tkvi_layout *from = &kv->tables.layout[b->layout];
    int i;
    if (!TKVI_HAS_METER || !kv->meter || kv->meter->seq != seq || !tkvi_is_hot_layout(kv, layer, b->layout))
        return;
    for (i = 0; i < kv->meter->n; i++) {
        tkvi_head_probe *probe = &kv->meter->head_probe[i];
        if (probe->layer == layer)
            tkvi_head_probe_keep(kv->meter, probe, b->start, tkvi_list_of(kv, seq, layer)->expired,
                                 tkvi_block_bytes(&kv->pool, b) + from->record[probe->head].at,
                                 from->record[probe->head].k.bytes + from->record[probe->head].v.bytes);
    }
}

/* Recodes block i of a list to `layout`. If tokens were evicted, the other tokens move to the first slots, unless
 * the format fixes slots. dry_run not NULL: only counts the slots that this takes and gives back. */
static void tkvi_demote_block(tkv_cache *kv, int seq, int layer, int i, int layout, tkvi_peak *dry_run) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer), id = ids[i];
    tkvi_block *b = &kv->pool.block[id];
    int is_packed;
    uint16_t previous_layout;
    tkvi_recoding r;
    if (tkvi_is_offloaded(b)) return; /* its bytes are not in RAM */
    if (kv->tables.layout[b->layout].key == kv->tables.layout[layout].key) return; /* same format */
    /* A cache created with a budget never demotes to more bytes, even after the budget is removed. */
    if (kv->tables.recode_pages && !tkvi_is_smaller(kv, b->layout, layout)) return;
    if (dry_run) {
        tkvi_peak_take(dry_run, layout);
        if (b->refs == 1) tkvi_peak_give(dry_run, b->layout);
        return;
    }
    tkvi_copy_for_meter(kv, seq, layer, b);
    kv->demoted++;
    previous_layout = tkvi_is_hot_layout(kv, layer, b->layout) ? 0 : (uint16_t)(b->layout + 1);
    r.kv = kv;
    r.from = &kv->tables.layout[b->layout];
    r.to = &kv->tables.layout[layout];
    r.layer = layer;
    r.start = b->start;
    tkvi_choose_anchors(kv, seq, layer, i);
    r.live_mask = tkvi_used_mask(kv, list, ids, i);
    is_packed =
        TKVI_HAS_EVICT && (b->evicted_mask & ~r.live_mask) && r.live_mask && !tkvi_has_fixed_slots(kv);
    if (is_packed) {
        tkvi_forget_copy(&kv->pool, id); /* tokens change slots, so the exact copy does not match */
    } else {
        r.live_mask |= b->evicted_mask; /* no token changes its slot */
        tkvi_store_exact_copy(kv, layer, id);
    }
    if (b->refs > 1) { /* the other holders keep the old block */
        ids[i] = tkvi_new_block(&kv->pool, layout, b->start);
        b = &kv->pool.block[id];
        tkvi_recode_heads(&r, tkvi_block_bytes(&kv->pool, b),
                          tkvi_block_bytes(&kv->pool, &kv->pool.block[ids[i]]));
        if (TKVI_HAS_EVICT && kv->pool.token_meta) kv->pool.token_meta[ids[i]] = kv->pool.token_meta[id];
        kv->pool.block[ids[i]].evicted_mask = b->evicted_mask;
        kv->pool.block[ids[i]].n_packed = b->n_packed;
        tkvi_release_block(&kv->pool, id);
    } else {
        tkvi_recode_block(&kv->pool, id, layout, tkvi_recode_heads, &r);
    }
    b = &kv->pool.block[ids[i]];
    tkvi_record_move(kv, ids[i], list->len);
    b->previous_layout = previous_layout;
    if (is_packed) {
        b->n_packed = (int16_t)tkvi_move_token_meta(kv, ids[i], 0, ids[i], r.live_mask, b->start);
        b->evicted_mask = kv->pool.token_meta[ids[i]].anchored_mask;
    }
}

/* >>dry run */
/* Begins a dry run. It starts from the slots in use and the reserved slots. */
static tkvi_peak tkvi_begin_dry_run(tkv_cache *kv) {
    tkvi_peak dry_run;
    int c;
    memset(&dry_run, 0, sizeof dry_run);
    dry_run.tables = &kv->tables;
    dry_run.live = kv->peak_live;
    for (c = 0; c < kv->tables.n_classes; c++)
        dry_run.live[c] = kv->pool.used_slots[c] + kv->pool.reserved_slots[c];
    dry_run.n_offloaded = kv->pool.n_offloaded;
    tkvi_peak_note(&dry_run);
    return dry_run;
}

/* Ages one list. Blocks that left every window expire, after the margin of tkvi_expiry_margin. Warm blocks go to the
 * archive, hot blocks to warm or archive. hot_age: age at which blocks leave the hot tier. It is that of the plan, 0
 * for a flush, or TKVI_FOREVER to expire blocks only. partial_too: 1 also recodes a last block that is not full.
 * dry_run not NULL: only counts slots. */
static void tkvi_age_list(tkv_cache *kv, int seq, int layer, int hot_age, int partial_too,
                          tkvi_peak *dry_run) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    tkvi_list *list = tkvi_list_of(kv, seq, layer), now = *list;
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, n_expired = 0, len = now.len;
    while (p->kept_window && n_expired + 1 < now.n &&
           (int64_t)tkvi_block_end(kv, &now, ids, n_expired) + p->kept_window + tkvi_expiry_margin(p) <=
               len) {
        const tkvi_block *b = &kv->pool.block[ids[n_expired]];
        if (dry_run && b->refs == 1 && !tkvi_is_offloaded(b)) tkvi_peak_give(dry_run, b->layout);
        if (!dry_run) tkvi_release_block(&kv->pool, ids[n_expired]);
        n_expired++;
    }
    if (n_expired) { /* A dry run changes only `now`, a copy of the list. The block numbers stay in place. */
        int left = n_expired, tier, *of_tier[3];
        now.n_recoded = tkvi_max(0, now.n_recoded - (n_expired - now.sinks)); /* sinks expire first */
        now.n_tightest = tkvi_max(0, now.n_tightest - (n_expired - now.sinks));
        now.n_offloaded = tkvi_max(0, now.n_offloaded - (n_expired - now.sinks));
        of_tier[0] = &now.sinks;
        of_tier[1] = &now.archive;
        of_tier[2] = &now.warm;
        now.expired = tkvi_block_start(kv, ids, n_expired);
        for (tier = 0; tier < 3; tier++) {
            int n_taken = tkvi_min(left, *of_tier[tier]);
            *of_tier[tier] -= n_taken;
            left -= n_taken;
        }
        now.n -= n_expired;
        if (dry_run) {
            ids += n_expired;
        } else {
            memmove(ids, ids + n_expired, (size_t)now.n * sizeof *ids);
            *list = now;
        }
    }
    for (i = now.sinks + now.archive; i < now.n; i++) {
        int is_warm = i < now.sinks + now.archive + now.warm, end = tkvi_block_end(kv, &now, ids, i);
        int is_full = i + 1 < now.n || end - tkvi_block_start(kv, ids, i) == TKVI_BLOCK;
        tkv_tier due = tkvi_tier_by_age(&p->now, hot_age, end, len);
        while (tkvi_must_wait_for_table(kv, layer, due))
            due = due == TKV_TIER_ARCHIVE ? TKV_TIER_WARM : TKV_TIER_HOT;
        if (due == TKV_TIER_HOT || (!is_full && !partial_too)) break;
        if (is_warm && due == TKV_TIER_WARM) {
            i = now.sinks + now.archive + now.warm - 1; /* the younger warm blocks stay as well */
            continue;
        }
        tkvi_demote_block(kv, seq, layer, i + (dry_run ? n_expired : 0),
                          tkvi_layout_of(&kv->tables, layer, due), dry_run);
        if (is_warm) now.warm--;
        if (due == TKV_TIER_ARCHIVE) now.archive++;
        else now.warm++;
    }
    if (!dry_run) *list = now;
}

#endif /* TKVI_RECLAIM_AGE_H */
