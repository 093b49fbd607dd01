/*
 * reclaim/age.h - demotes blocks: recodes them into the formats of colder tiers. It also finds the blocks that are old
 * enough, and expires blocks that left every window.
 *
 *     blocks of a list     [sinks] [archive ...............] [warm ..........] [hot ...........]
 *     age in tokens         exact   >= hot_tokens +           >= hot_tokens     below hot_tokens
 *                                      warm_tokens
 *
 * The age of a block is the number of tokens after it. Ageing runs at the start of an append or of a step, before
 * new tokens are stored, and in tkv_seq_flush. So the tokens of a chunk are still exact when the chunk is attended
 * to. Ageing recodes full blocks. Only a flush may recode a last block that is not full.
 *
 * Ageing takes memory for one block at a time, and it can fail after any block. Each block is then in one format, and
 * no token has changed its position. Expiry gives memory back and cannot fail. It runs when the call can no longer
 * fail.
 */
#ifndef TKVI_RECLAIM_AGE_H
#define TKVI_RECLAIM_AGE_H

#include "learn/query_stats.h"
#include "reclaim/wipe.h"

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
    const tkv_cache *kv;
    const tkvi_layout *from, *to;
    int layer, start;   /* start: first position of the block */
    uint64_t live_mask; /* slots that are recoded; all other slots are left out */
    /* Of those, which begin at slot 0 then: without a token. They repeat a neighbour, so that no scale or mean follows
     * from them. */
    uint64_t dead_mask;
} tkvi_recoding;

/* A block that parts of an append have encoded before the append demotes it. */
typedef struct tkvi_prepared_block {
    uint32_t number;
    tkvi_recoding recoding;
    uint8_t *bytes; /* in the caller's workspace */
} tkvi_prepared_block;

#define TKVI_MAX_PREPARED 128 /* most blocks that the parts of an append encode */

typedef struct tkvi_prepared {
    int n;
    tkvi_prepared_block block[TKVI_MAX_PREPARED];
} tkvi_prepared;

/* Decodes K or V of the slots in live_mask into consecutive rows of `out`. stride: floats per row. Returns the
 * number of rows. The rows of a view are those of its K, and are not decoded again. */
static int tkvi_decode_tokens(const tkvi_side *side, const tkvi_simd_ops *simd_ops, const uint8_t *bytes,
                              uint64_t live_mask, float *out, size_t stride) {
    int slot = 0, n_rows = 0;
    while (slot < TKVI_BLOCK && live_mask >> slot) {
        int run = 0;
        while (slot + run < TKVI_BLOCK && live_mask >> (slot + run) & 1) run++;
        if (run && !tkvi_is_view(side))
            tkvi_finite_values(side, simd_ops, bytes, slot, run, out + (size_t)n_rows * stride, stride);
        n_rows += run;
        slot += tkvi_max(run, 1);
    }
    return n_rows;
}

/* Gives dead slots the row of the live one before them, or of the first live one. */
static void tkvi_fill_dead_rows(float *x, size_t stride, int n, uint64_t dead_mask) {
    int t, live = 0;
    if (!dead_mask) return;
    while (live < n && dead_mask >> live & 1) live++;
    for (t = 0; t < n; t++) {
        float *row = x + (size_t)t * stride;
        if (!(dead_mask >> t & 1)) live = t;
        else if (live < n) memcpy(row, x + (size_t)live * stride, stride * sizeof *row);
        else memset(row, 0, stride * sizeof *row);
    }
}

/* Encodes n tokens as record r of one head, at dst. k: their rows of K, and behind the space of 64 those of V. start:
 * first position of the block. */
static void tkvi_encode_record(const tkv_cache *kv, int layer, int head, const tkvi_record *r, int start,
                               const float *k, int n, uint8_t *dst) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const float *v = k + g->k_pad * TKVI_BLOCK;
    tkvi_side to_k = r->k;
    const tkvi_family *family = r->k.format->family;
    if (family->learn_queries) to_k.head_state = tkvi_query_state_of(kv, family, layer, head);
    to_k.start = start;
    tkvi_encode_side(&to_k, kv->kernels->simd_ops, k, (size_t)g->head_dim, n, dst);
    tkvi_encode_side(&r->v, kv->kernels->simd_ops, v, (size_t)g->v_head_dim, n, dst + r->v_at);
}

/* Recodes one head of a block from the bytes src to the bytes dst. k: space for 64 decoded rows of K, then of V. */
static void tkvi_recode_head(const tkvi_recoding *r, int head, float *k, const uint8_t *src, uint8_t *dst) {
    const tkvi_geometry *g = tkvi_geometry_of(r->kv, r->layer);
    const tkvi_simd_ops *simd_ops = r->kv->kernels->simd_ops;
    const tkvi_record *from = &r->from->record[head], *to = &r->to->record[head];
    const size_t dk = (size_t)g->head_dim, dv = (size_t)g->v_head_dim;
    const int n_tokens = tkvi_decode_tokens(&from->k, simd_ops, src + from->at, r->live_mask, k, dk);
    (void)tkvi_decode_tokens(&from->v, simd_ops, src + from->at + from->v_at, r->live_mask,
                             k + g->k_pad * TKVI_BLOCK, dv);
    tkvi_fill_dead_rows(k, dk, n_tokens, r->dead_mask);
    if (!tkvi_is_view(&from->v)) tkvi_fill_dead_rows(k + g->k_pad * TKVI_BLOCK, dv, n_tokens, r->dead_mask);
    tkvi_encode_record(r->kv, r->layer, head, to, r->start, k, n_tokens, dst + to->at);
}

/* Recodes all heads of a block from the bytes src to the bytes dst (a tkvi_rewrite). ctx: a tkvi_recoding. */
static void tkvi_recode_heads(void *ctx, const uint8_t *src, uint8_t *dst) {
    const tkvi_recoding *r = (const tkvi_recoding *)ctx;
    int head;
    for (head = 0; head < r->to->n_kv_heads; head++) tkvi_recode_head(r, head, r->kv->work.recode, src, dst);
}

/* Copies a prepared block (a tkvi_rewrite). ctx: a tkvi_prepared_block. */
static void tkvi_copy_prepared(void *ctx, const uint8_t *src, uint8_t *dst) {
    const tkvi_prepared_block *b = (const tkvi_prepared_block *)ctx;
    (void)src;
    memcpy(dst, b->bytes, b->recoding.to->bytes.total);
}

/* Moves block `number` to the layout of a recoding. It copies the bytes that parts have encoded, unless the block was
 * coded for another tier in between. Then it encodes them. */
static void tkvi_apply_recoding(tkv_cache *kv, uint32_t number, int layout, tkvi_recoding *r) {
    tkvi_prepared *p = kv->work.prepared;
    int i;
    TKVI_ASSERT(!tkvi_formats[r->to->pair.k].shared || r->to->record->k.order); /* of a table */
    for (i = 0; TKVI_HAS_APPEND_PARTS && p && i < p->n; i++) {
        tkvi_prepared_block *b = &p->block[i];
        if (b->number != number || b->recoding.from != r->from || b->recoding.to != r->to) continue;
        /* Tokens are evicted, joined and expired after all rows have aged. A token that becomes an anchor keeps its
         * slot. So the block has the slots that the parts have encoded. */
        TKVI_ASSERT(b->recoding.live_mask == r->live_mask && b->recoding.dead_mask == r->dead_mask);
        tkvi_recode_block(&kv->pool, number, layout, tkvi_copy_prepared, b);
        return;
    }
    tkvi_recode_block(&kv->pool, number, layout, tkvi_recode_heads, r);
}

/* Gives the quality meter its copy of an exact block that is about to be recoded (cache/meter.h). */
static void tkvi_copy_for_meter(tkv_cache *kv, int seq, int layer, uint32_t id) {
    const tkvi_block *b = tkvi_block_of(kv, id);
    const tkvi_layout *from = &kv->tables.layout[b->layout];
    int i;
    if (!TKVI_HAS_METER || !kv->meter || kv->meter->seq < 0 || !tkvi_is_hot_layout(kv, layer, b->layout))
        return;
    if (kv->meter->seq != seq) { /* the sequence that it watches may hold the block as well */
        const tkvi_list *list = tkvi_list_of(kv, kv->meter->seq, layer);
        const uint32_t *ids = tkvi_ids(kv, kv->meter->seq, layer), number = kv->pool.entry[id].block;
        if (b->refs == 1) return;
        for (i = 0; i < list->n && kv->pool.entry[ids[i]].block != number;) i++;
        if (i == list->n) return;
        seq = kv->meter->seq;
        id = ids[i];
    }
    for (i = 0; i < kv->meter->n; i++) {
        tkvi_head_probe *probe = &kv->meter->head_probe[i];
        if (probe->layer == layer)
            tkvi_head_probe_keep(kv->meter, probe, kv->pool.entry[id].start,
                                 tkvi_list_of(kv, seq, layer)->expired,
                                 tkvi_block_bytes(&kv->pool, b) + from->record[probe->head].at,
                                 from->record[probe->head].k.bytes + from->record[probe->head].v.bytes);
    }
}

/* 1 if demotion to a layout changes the bytes of a block. It does not if they are not in RAM, or in the same format. A
 * cache created with a budget never demotes to more bytes, even after the budget is removed. Nor does a copied block of
 * sinks take the bytes of a whole block. */
static int tkvi_is_recoded_to(const tkv_cache *kv, const tkvi_block *b, int layout) {
    const tkvi_layout *from = &kv->tables.layout[b->layout];
    if (tkvi_is_offloaded(b) || from->key == kv->tables.layout[layout].key) return 0;
    return (!kv->tables.recode_pages && from->tokens == TKVI_BLOCK) || tkvi_is_smaller(kv, b->layout, layout);
}

/* Recodes all slots of block i, each in its place. */
static void tkvi_keep_slots(tkvi_recoding *r, const tkvi_list *list, const uint32_t *ids, int i) {
    const int n = tkvi_slots_in_use(r->kv, list, ids, i);
    r->live_mask = tkvi_slots_before(n);
    r->dead_mask = tkvi_dead_slots(r->kv, r->layer, list, ids, i, n);
}

/* Describes the recoding of block i of a list to `layout`. If tokens were evicted, the other tokens move to the first
 * slots, unless the format fixes slots, or other lists hold the block. *is_packed: 1 if they do. */
static tkvi_recoding tkvi_describe_recoding(const tkv_cache *kv, int layer, const tkvi_list *list,
                                            const uint32_t *ids, int i, int layout, int *is_packed) {
    const tkvi_block *b = tkvi_block_of(kv, ids[i]);
    tkvi_recoding r;
    r.kv = kv;
    r.from = &kv->tables.layout[b->layout];
    r.to = &kv->tables.layout[layout];
    r.layer = layer;
    r.start = b->first_position;
    r.live_mask = tkvi_used_mask(kv, list, ids, i);
    *is_packed = TKVI_HAS_EVICT && kv->pool.token_meta &&
                 (kv->pool.entry[ids[i]].evicted_mask & ~r.live_mask) && r.live_mask &&
                 !tkvi_has_fixed_slots(kv) && b->refs == 1;
    r.dead_mask = 0;
    if (!*is_packed) tkvi_keep_slots(&r, list, ids, i);
    return r;
}

/* Recodes block i of a list to `layout`, for all its holders. Returns 0 without memory; the block then stays as it is.
 */
static int tkvi_demote_block(tkv_cache *kv, int seq, int layer, int i, int layout) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer), id = ids[i];
    tkvi_entry *e = &kv->pool.entry[id];
    const tkvi_block *b = tkvi_block_of(kv, id);
    int is_packed;
    uint16_t previous_layout;
    tkvi_recoding r;
    if (!tkvi_is_recoded_to(kv, b, layout)) return 1;
    TKVI_ASSERT(!tkvi_has_named_sinks(&kv->pool, id));
    if (!tkvi_provide_slot(&kv->pool, kv->tables.layout[layout].size_class)) return 0;
    tkvi_copy_for_meter(kv, seq, layer, id);
    kv->counts.demoted++;
    previous_layout = tkvi_is_hot_layout(kv, layer, b->layout) ? 0 : (uint16_t)(b->layout + 1);
    tkvi_choose_anchors(kv, seq, layer, i);
    r = tkvi_describe_recoding(kv, layer, list, ids, i, layout, &is_packed);
    /* If tokens change slots, an exact copy does not match any more. */
    if (is_packed) tkvi_forget_copy(&kv->pool, e->block);
    else tkvi_store_exact_copy(kv, layer, id);
    tkvi_apply_recoding(kv, e->block, layout, &r);
    tkvi_record_move(kv, id, list->len);
    tkvi_block_of(kv, id)->previous_layout = previous_layout;
    if (is_packed) {
        e->n_packed = (int8_t)tkvi_move_token_meta(kv, id, 0, id, r.live_mask, e->start);
        e->evicted_mask = kv->pool.token_meta[id].anchored_mask;
        e->first_slot = e->end_slot = 0;
    }
    return 1;
}

/* Counts block i of a list in tier `due`. All blocks before it are in this tier or a colder one. */
static void tkvi_count_in_tier(tkvi_list *list, int i, tkv_tier due) {
    if (due != TKV_TIER_HOT && i >= list->sinks + list->archive + list->warm) list->warm++;
    if (due == TKV_TIER_ARCHIVE && i >= list->sinks + list->archive) {
        list->warm--;
        list->archive++;
    }
}

/* Records that block i is in tier `due` of its list now, and coded for tier `coded`, or both in a colder one as
 * before. All blocks before it are in this tier or a colder one, so only counts change. */
static void tkvi_enter_tier(tkv_cache *kv, tkvi_list *list, const uint32_t *ids, int i, tkv_tier due,
                            tkv_tier coded) {
    tkvi_block *b = tkvi_block_of(kv, ids[i]);
    kv->pool.n_late -= (uint32_t)(kv->pool.n_late && tkvi_is_late(&kv->pool, ids[i]));
    tkvi_count_in_tier(list, i, due);
    kv->pool.entry[ids[i]].tier = (uint8_t)tkvi_tier_at(list, i);
    if ((int)coded > b->tier) b->tier = (uint8_t)coded;
    kv->pool.n_late += (uint32_t)tkvi_is_late(&kv->pool, ids[i]);
}

/* The tier that a block is coded for when entry `id` of it goes to tier `due`. That is the hottest tier of its holders,
 * or a hotter one that needs no table. It is not hotter than now. */
static tkv_tier tkvi_tier_to_code(const tkv_cache *kv, int layer, uint32_t id, tkv_tier due) {
    const int coded = tkvi_block_of(kv, id)->tier;
    tkv_tier tier = tkvi_hottest_tier(&kv->pool, id, due);
    while ((int)tier > coded && tkvi_must_wait_for_table(kv, layer, tier)) tier = (tkv_tier)((int)tier - 1);
    return tier;
}

/* Puts block i into tier `due` of its list. The block is coded again only if all its holders have it in a colder tier
 * than it is coded for. Returns 0 without memory; nothing has changed then. */
static int tkvi_demote_to(tkv_cache *kv, int seq, int layer, int i, tkv_tier due) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkv_tier tier = tkvi_tier_to_code(kv, layer, ids[i], due);
    if ((int)tier > tkvi_block_of(kv, ids[i])->tier &&
        !tkvi_demote_block(kv, seq, layer, i, tkvi_layout_of(&kv->tables, layer, tier)))
        return 0;
    tkvi_enter_tier(kv, list, ids, i, due, tier);
    return 1;
}

/* Codes the late blocks of a layer again, as far as there is memory. */
static void tkvi_recode_late(tkv_cache *kv, int layer) {
    int seq, i;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (i = 0; kv->pool.n_late && i < tkvi_list_of(kv, seq, layer)->n; i++) {
            const uint32_t id = tkvi_ids(kv, seq, layer)[i];
            if (tkvi_is_late(&kv->pool, id))
                (void)tkvi_demote_to(kv, seq, layer, i, (tkv_tier)kv->pool.entry[id].tier);
        }
}

/* >>lists */
/* Number of blocks, from tkvi_first_to_expire on, that have left every window, after the margin of
 * tkvi_expiry_margin. Those that outlast their window are among them. */
static int tkvi_n_expiring(const tkv_cache *kv, int seq, int layer) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int first = tkvi_first_to_expire(kv, layer, list, ids);
    int64_t oldest_kept; /* position */
    int i = first;
    if (!p->kept_window || !list->n) return 0;
    oldest_kept =
        (int64_t)list->len + kv->pool.entry[ids[list->n - 1]].shift - p->kept_window - tkvi_expiry_margin(p);
    while (i + 1 < list->n && tkvi_block_end(kv, list, ids, i) + kv->pool.entry[ids[i]].shift <= oldest_kept)
        i++;
    return i - first;
}

/* Frees the blocks that have left every window. Sinks expire first, if they do. A block that outlasts its window keeps
 * its named sinks alone. */
static void tkvi_expire_list(tkv_cache *kv, int seq, int layer) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int first = tkvi_first_to_expire(kv, layer, list, ids);
    int end = first + tkvi_n_expiring(kv, seq, layer), i;
    if (first == end) return;
    if (first > 0) tkvi_end_slots(kv, list, ids, first - 1);
    if (!list->expired) list->expired_end = 0;
    for (i = first; i < end; i++)
        list->expired_end =
            tkvi_max(list->expired_end, tkvi_block_end(kv, list, ids, i) + kv->pool.entry[ids[i]].shift);
    list->expired = tkvi_block_start(kv, ids, end);
    for (i = first; i < end; i++) {
        tkvi_entry *e = &kv->pool.entry[ids[i]];
        if (!tkvi_outlasts_window(kv, layer, ids[i])) continue;
        tkvi_end_slots(kv, list, ids, i);
        e->evicted_mask |= tkvi_live_mask(e, tkvi_block_tokens(kv, list, ids, i)) & ~e->sink_mask;
        tkvi_wipe_unused(kv, layer, e->block, i);
    }
    while (end > first) {
        const int last = end--;
        if (tkvi_outlasts_window(kv, layer, ids[end])) continue;
        while (end > first && !tkvi_outlasts_window(kv, layer, ids[end - 1])) end--;
        /* Wiping walks this list, which must not have released entries then. */
        for (i = end; i < last; i++) tkvi_wipe_before_release(kv, seq, layer, i);
        for (i = end; i < last; i++) tkvi_release_entry(&kv->pool, ids[i]);
        tkvi_unlist_blocks(list, ids, end, last);
    }
}

/* Finds the oldest due block of a list: a warm block goes to the archive, a hot block to warm or archive. hot_age: age
 * at which blocks leave the hot tier. It is that of the plan, 0 for a flush, or TKVI_FOREVER for none. Positions from
 * exact_from on stay exact. partial_too: 1 also takes a last block that is not full. *due_tier: the tier that it goes
 * to. Returns its index; -1: none is due. */
static int tkvi_find_due(const tkv_cache *kv, int layer, const tkvi_list *list, const uint32_t *ids,
                         int hot_age, int exact_from, int partial_too, tkv_tier *due_tier) {
    const int first_hot = list->sinks + list->archive + list->warm;
    int i = list->sinks + list->archive;
    for (; i < list->n; i = first_hot) {
        const int end = tkvi_block_end(kv, list, ids, i),
                  is_full = i + 1 < list->n || tkvi_block_tokens(kv, list, ids, i) == TKVI_BLOCK;
        tkv_tier due = tkvi_tier_by_age(&kv->tables.plan[layer].now, hot_age, end, list->len);
        while (tkvi_must_wait_for_table(kv, layer, due))
            due = due == TKV_TIER_ARCHIVE ? TKV_TIER_WARM : TKV_TIER_HOT;
        if (due == TKV_TIER_HOT || end > exact_from || (!is_full && !partial_too)) return -1;
        if (i < first_hot && due == TKV_TIER_WARM) continue; /* the younger warm blocks stay as well */
        *due_tier = due;
        return i;
    }
    return -1;
}

/* Ages the oldest due block of a list. hot_age, exact_from, partial_too: as in tkvi_find_due. If a block changed its
 * tier, returns its slots in use, up to the end of the entry. 0: none is due. -1: no memory. */
static int tkvi_age_next(tkv_cache *kv, int seq, int layer, int hot_age, int exact_from, int partial_too) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkv_tier due;
    const int i = tkvi_find_due(kv, layer, list, ids, hot_age, exact_from, partial_too, &due);
    if (i < 0) return 0;
    return tkvi_demote_to(kv, seq, layer, i, due) ? tkvi_block_tokens(kv, list, ids, i) : -1;
}

/* The most tokens of a list that an append of n tokens recodes. They are more than this and the last append add. So
 * blocks that waited for a table are recoded within a few appends, and not all in one. */
static int64_t tkvi_most_to_age(const tkvi_list *list, int n) {
    return (int64_t)TKVI_BLOCK * (2 + ((int64_t)list->len - list->chunk_start + n) / (TKVI_BLOCK / 4));
}

/* Ages due blocks of a list, until they have `most` tokens or more. So a list of short blocks does not fall behind.
 * Only blocks that are recoded count: of the entries of a block the last one recodes it. Returns 0 without memory. */
static int tkvi_age_list(tkv_cache *kv, int seq, int layer, int hot_age, int partial_too, int64_t most) {
    int aged = 1;
    if (kv->pool.n_late) tkvi_recode_late(kv, layer);
    while (aged > 0 && most > 0) {
        const uint64_t before = kv->counts.demoted;
        aged = tkvi_age_next(kv, seq, layer, hot_age, tkvi_list_of(kv, seq, layer)->len, partial_too);
        if (kv->counts.demoted != before) most -= aged;
    }
    return aged >= 0;
}

/* Adds to p the blocks of a list that tkvi_age_list recodes before an append, as far as it has space. It counts on a
 * copy of the list, so a block with several entries in it may be missing. */
static void tkvi_forecast_ageing(const tkv_cache *kv, int seq, int layer, int64_t most, tkvi_prepared *p) {
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkvi_list list = *tkvi_list_of(kv, seq, layer);
    while (most > 0 && p->n < TKVI_MAX_PREPARED) {
        tkvi_prepared_block *to = &p->block[p->n];
        tkv_tier due, tier;
        int is_packed, layout;
        const int i = tkvi_find_due(kv, layer, &list, ids, kv->tables.plan[layer].now.hot, list.len, 0, &due);
        if (i < 0) return;
        tier = tkvi_tier_to_code(kv, layer, ids[i], due);
        layout = tkvi_layout_of(&kv->tables, layer, tier);
        if ((int)tier > tkvi_block_of(kv, ids[i])->tier &&
            tkvi_is_recoded_to(kv, tkvi_block_of(kv, ids[i]), layout)) {
            to->number = kv->pool.entry[ids[i]].block;
            to->recoding = tkvi_describe_recoding(kv, layer, &list, ids, i, layout, &is_packed);
            most -= tkvi_block_tokens(kv, &list, ids, i);
            p->n++;
        }
        tkvi_count_in_tier(&list, i, due);
    }
}

/* 1 if the last append left a due block of the list for later appends. */
static int tkvi_is_behind(const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int hot_age = tkvi_hot_age(kv, layer);
    int i = list->sinks + list->archive, n; /* the oldest warm block, then the oldest hot one */
    for (n = 0; n < 2 && i < list->n; n++, i += list->warm)
        if (tkvi_tier_by_age(&kv->tables.plan[layer].now, hot_age, tkvi_block_end(kv, list, ids, i),
                             list->chunk_start) > tkvi_tier_at(list, i))
            return 1;
    return 0;
}

#endif /* TKVI_RECLAIM_AGE_H */
