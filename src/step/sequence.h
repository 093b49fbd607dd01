/*
 * step/sequence.h - the calls that change a sequence: append, flush, begin, commit, abort, reserve, truncate and
 * reset; and tkv_read.
 *
 * An append runs in four steps:
 *     validate   refuses bad arguments, and requests that no reclaim stage can serve; nothing has changed then
 *     reclaim    frees bytes under a budget (reclaim/budget.h)
 *     age        recodes blocks that are old enough, and allocates what the new tokens need
 *     store      expires old tokens and stores new ones; cannot fail
 * An append that fails stores no token. It changes no position, no length and no answer about which tokens are there.
 * Blocks that were recoded or offloaded for it may stay so, and a table that was learned stays.
 */
#ifndef TKVI_STEP_SEQUENCE_H
#define TKVI_STEP_SEQUENCE_H

#include "cache/lookup.h"
#include "reclaim/adapt.h"
#include "reclaim/versions.h"
#include "reclaim/scores.h"
#include "step/promotion.h"
#include "step/shrink.h"

/* Points to the number of slots of a size class that are reserved for a sequence. */
static int64_t *tkvi_reserved_slots_of(tkv_cache *kv, int seq, int size_class) {
    return &kv->reserved_slots[(size_t)seq * (size_t)kv->tables.n_classes + (size_t)size_class];
}

/* >>reservations */
/* most[tier]: the most blocks of a tier that a list can still gain. TKVI_FOREVER: no bound, under a budget or if a
 * block that takes no more tokens is not full. */
static void tkvi_compute_most_new_blocks(const tkv_cache *kv, int seq, int layer, int64_t *most) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, all_full = 1;
    tkvi_compute_most_blocks(&kv->tables.cfg, p, most);
    if (tkvi_plan_learns(p) && (kv->tables.current_version[layer] < 0 || tkvi_is_behind(kv, seq, layer))) {
        most[TKV_TIER_HOT] += TKVI_FIRST_TABLE_TOKENS / TKVI_BLOCK; /* blocks wait or waited for a table */
        most[TKV_TIER_WARM] += TKVI_FIRST_TABLE_TOKENS / TKVI_BLOCK;
    }
    for (i = list->sinks; i < list->n; i++) {
        tkv_tier tier = tkvi_tier_at(list, i);
        /* Slots of shared blocks are not given back, nor those of blocks with named sinks. */
        most[tier] -= tkvi_block_of(kv, ids[i])->refs == 1 && !tkvi_sink_mask(&kv->pool, ids[i]);
        if (i + 1 < list->n || !tkvi_tail_free_slots(kv, p, list, ids))
            all_full &= tkvi_block_end(kv, list, ids, i) - tkvi_block_start(kv, ids, i) == TKVI_BLOCK;
    }
    for (i = 0; i < TKV_TIER_COUNT && (!all_full || tkvi_has_budget(kv)); i++) most[i] = TKVI_FOREVER;
}

/* Adds to slots[class] those that a list may still take until it has the reserved length. It counts each new block and
 * each block that ages, but no more blocks of a tier than the list can ever have. It does not subtract slots that are
 * freed meanwhile, so appends of any size fit. A slot taken lowers the need by one, and a slot given back raises it by
 * at most one. So slots in use and needed together never grow. Returns 0 if no slot is needed any more. */
static int tkvi_add_needed_slots(tkv_cache *kv, int seq, int layer, int64_t *slots) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_layout *layout = kv->tables.layout;
    int len = kv->seq[seq].reserved_len, end, n_front, blocks, i, tier;
    int64_t need[TKV_TIER_COUNT], most[TKV_TIER_COUNT];
    /* In a step the length before it counts, because the step may be aborted. */
    if (p->stored_layer != layer || (kv->seq[seq].in_step ? list->step_len : list->len) >= len) return 0;
    memset(need, 0, sizeof need);
    blocks = tkvi_n_new_blocks(kv, p, list, ids, tkvi_max(0, len - list->len), &n_front);
    need[TKV_TIER_HOT] = blocks - n_front;
    if (tkvi_tail_free_slots(kv, p, list, ids) &&
        (tkvi_is_tail_shared(kv, list, ids) || tkvi_is_tail_attached(kv, list, ids)))
        need[TKV_TIER_HOT]++; /* it is copied if another list appends first, or from attached bytes */
    /* end: end position of block i at the reserved length, for the last block of now and the new blocks */
    end = tkvi_min(len, list->len + tkvi_tail_free_slots(kv, p, list, ids));
    for (i = list->sinks + list->archive; i < list->n + blocks - n_front; i++) {
        tkv_tier due;
        if (i == list->n && n_front) end = tkvi_min(len, end + p->sink);
        if (i >= list->n) end = tkvi_min(len, end + TKVI_BLOCK);
        due = tkvi_tier_by_age(&p->now, tkvi_hot_age(kv, layer),
                               i + 1 < list->n ? tkvi_block_end(kv, list, ids, i) : end, len);
        need[TKV_TIER_WARM] += due != TKV_TIER_HOT && (i >= list->n || tkvi_tier_at(list, i) == TKV_TIER_HOT);
        need[TKV_TIER_ARCHIVE] += due == TKV_TIER_ARCHIVE;
    }
    if (kv->pool.keep_all)
        need[TKV_TIER_WARM] = need[TKV_TIER_ARCHIVE] = 0; /* cache.h counts their changes */
    tkvi_compute_most_new_blocks(kv, seq, layer, most);
    if (n_front && p->sink) slots[layout[p->sink_layout].size_class]++;
    if (TKVI_HAS_EVICT && n_front) slots[layout[p->anchor_layout].size_class] += p->n_anchor_blocks;
    /* A shared tail that takes no tokens now takes some once it is not shared. */
    slots[layout[p->now.layout[TKV_TIER_HOT]].size_class] +=
        tkvi_has_tail_moved(kv, list, ids) && tkvi_tail_room(kv, p, list, ids);
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        if (need[tier] > most[tier]) need[tier] = most[tier];
        if (need[tier] > 0) slots[layout[p->now.layout[tier]].size_class] += need[tier];
    }
    return 1;
}

/* Lets the sequence use all slots that are reserved for it. tkvi_release_unused reserves again what it still needs. */
static void tkvi_unreserve_slots(tkv_cache *kv, int seq) {
    int64_t *own = tkvi_reserved_slots_of(kv, seq, 0);
    int c;
    for (c = 0; c < kv->tables.n_classes; c++) {
        kv->pool.reserved_slots[c] -= own[c];
        own[c] = 0;
    }
}

/* Reserves the slots that all layers of a sequence need up to length `len`. 0: ends the reservation. */
static void tkvi_reserve_slots(tkv_cache *kv, int seq, int len) {
    int layer, c, is_needed = 0;
    int64_t *own = tkvi_reserved_slots_of(kv, seq, 0);
    tkvi_unreserve_slots(kv, seq);
    kv->seq[seq].reserved_len = len;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && len > 0; layer++)
        is_needed |= tkvi_add_needed_slots(kv, seq, layer, own);
    for (c = 0; c < kv->tables.n_classes; c++) kv->pool.reserved_slots[c] += own[c];
    if (!is_needed) kv->seq[seq].reserved_len = 0;
}

/* Takes slots out of the reservation of a sequence, in slots[class], so that this sequence can use them. Returns 0 if
 * fewer were reserved. */
static int tkvi_take_from_reservation(tkv_cache *kv, int seq, const int64_t *slots) {
    int64_t *own = tkvi_reserved_slots_of(kv, seq, 0);
    int c, is_covered = 1;
    for (c = 0; c < kv->tables.n_classes; c++) {
        const int64_t n = slots[c] < own[c] ? slots[c] : own[c];
        is_covered &= slots[c] <= own[c];
        if (n <= 0) continue;
        own[c] -= n;
        kv->pool.reserved_slots[c] -= n;
    }
    return is_covered;
}

/* Lets an append use the slots that are reserved for its new blocks. Returns 1 if that covers all of them. Beyond the
 * reserved length nothing stays reserved for the layer, but an open step keeps its reservation, because it may be
 * aborted. tkvi_release_unused reserves again what is still needed. */
static int tkvi_use_reservations(tkv_cache *kv, const tkvi_request *request) {
    int i, c, is_covered = 1;
    for (i = 0; i < request->n_rows; i++) {
        const int seq = request->rows[i].seq, n = request->rows[i].n, in_step = kv->seq[seq].in_step;
        const int len = tkvi_list_of(kv, seq, request->layer)->len + n,
                  reserved_len = kv->seq[seq].reserved_len;
        tkvi_demand demand = tkvi_no_demand();
        if (n == 0) continue;
        if (len <= reserved_len) tkvi_demand_tokens(kv, seq, request->layer, n, &demand);
        if (len > reserved_len) is_covered = 0;
        if (!in_step && len >= reserved_len && reserved_len) {
            tkvi_demand all = tkvi_no_demand();
            (void)tkvi_add_needed_slots(kv, seq, request->layer, all.slots);
            for (c = 0; c < kv->tables.n_classes; c++) is_covered &= demand.slots[c] <= all.slots[c];
            (void)tkvi_take_from_reservation(kv, seq, all.slots);
        } else if (len <= reserved_len) {
            is_covered &= tkvi_take_from_reservation(kv, seq, demand.slots);
        }
    }
    return is_covered;
}

/* Adds slots[class] to the reserved ones; sign -1: takes them back. */
static void tkvi_hold_slots(tkvi_pool *pool, const int64_t *slots, int sign) {
    int c;
    for (c = 0; c < pool->tables->n_classes; c++) pool->reserved_slots[c] += sign * slots[c];
}

/* Number of pages in use, and of pages that reservations will need. */
static int64_t tkvi_n_pages_taken(const tkvi_pool *pool) {
    return (int64_t)pool->n_pages - (int64_t)pool->n_free_pages + tkvi_reserved_pages(pool);
}

/* Call after any change of a sequence. Lowers its reservation to the slots that it still needs, and gives free
 * pages back to the allocator. */
static void tkvi_release_unused(tkv_cache *kv, int seq) {
    if (kv->seq[seq].reserved_len) tkvi_reserve_slots(kv, seq, kv->seq[seq].reserved_len);
    tkvi_trim(&kv->pool);
}

/* >>storing tokens */
typedef struct tkvi_source { /* K or V of an append, or of tkv_restore */
    const void *data;
    tkv_type type;
    ptrdiff_t token_stride, head_stride; /* in elements */
    int dim;
} tkvi_source;

/* Converts one token's row of a head to floats. */
static void tkvi_load_row(const tkvi_source *s, int token, int head, float *row) {
    ptrdiff_t first = token * s->token_stride + head * s->head_stride;
    int c;
    if (s->type == TKV_TYPE_F32)
        memcpy(row, (const char *)s->data + first * (ptrdiff_t)sizeof(float), (size_t)s->dim * sizeof(float));
    else
        for (c = 0; c < s->dim; c++) row[c] = tkvi_element(s->data, s->type, first + c);
}

static int tkvi_is_source_finite(const tkvi_source *s, int first, int n, int heads) {
    float row[TKV_MAX_HEAD_DIM];
    int t, h, finite = 1;
    for (t = first; t < first + n; t++)
        for (h = 0; h < heads; h++) {
            tkvi_load_row(s, t, h, row);
            finite &= tkvi_is_all_finite(row, s->dim);
        }
    return finite;
}

/* 1 if all rows of an append are finite. */
static int tkvi_are_rows_finite(const tkv_append_params *p, const tkvi_request *request, const tkvi_source *s,
                                int heads) {
    int i, first = 0, finite = 1;
    for (i = 0; i < request->n_rows; first += request->rows[i].n, i++)
        finite &=
            tkvi_is_source_finite(s, p->first_rows ? p->first_rows[i] : first, request->rows[i].n, heads);
    return finite;
}

/* Encodes one row of a source into a slot of an exact block. */
static void tkvi_store_row(const tkvi_side *side, const tkvi_simd_ops *simd_ops, const tkvi_source *s,
                           int token, int head, int slot, int saturate, uint8_t *dst) {
    float row[TKV_MAX_HEAD_DIM];
    int c;
    if (tkvi_is_view(side)) return; /* V inside K */
    tkvi_load_row(s, token, head, row);
    for (c = 0; saturate && c < s->dim; c++) row[c] = tkvi_saturate(row[c]);
    tkvi_put_token(side, simd_ops, row, slot, dst);
}

/* Gives block i of a list a copy of a block that it shares, or that lies in attached bytes. There must be a slot. */
static void tkvi_copy_shared(tkv_cache *kv, int seq, int layer, int i) {
    const uint32_t id = tkvi_ids(kv, seq, layer)[i];
    const uint32_t number = kv->pool.entry[id].block;
    tkvi_block *shared = &kv->pool.block[number];
    const tkvi_layout *c = &kv->tables.layout[shared->layout];
    const uint8_t *attached =
        tkvi_is_attached(&kv->pool, number, TKVI_ITSELF) ? tkvi_read_attached(&kv->pool, number, c) : NULL;
    if (attached && shared->refs == 1) { /* it is copied before the caller gets its bytes back */
        uint32_t page;
        int slot;
        tkvi_take_slot(&kv->pool, c->size_class, number, &page, &slot);
        memcpy(tkvi_slot_bytes(&kv->pool, page, slot), attached, c->bytes.total);
        tkvi_forget_offloaded(&kv->pool, number);
        shared->page = page;
        shared->slot = (uint16_t)slot;
        return;
    }
    tkvi_leave_block(&kv->pool, id);
    tkvi_new_block(&kv->pool, id, shared->layout, shared->first_position);
    memcpy(tkvi_block_bytes(&kv->pool, tkvi_block_of(kv, id)),
           attached ? attached : tkvi_block_bytes(&kv->pool, shared), c->bytes.total);
    tkvi_wipe_unused(kv, layer, number, i);
}

/* Makes an entry for the free slots of the last block of a list: the next token does not follow the last one. */
static uint32_t tkvi_open_entry(tkv_cache *kv, int seq, int layer, int shift) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    const uint32_t last = ids[list->n - 1];
    const int n_tokens = tkvi_block_tokens(kv, list, ids, list->n - 1);
    const uint32_t id = tkvi_share_entry(&kv->pool, last, n_tokens);
    tkvi_entry *e = &kv->pool.entry[id];
    e->start = list->len;
    e->shift = shift;
    e->turned = 0;
    e->first_slot = (uint8_t)n_tokens;
    e->evicted_mask = 0;
    tkvi_set_sink_mask(&kv->pool, id, 0);
    if (TKVI_HAS_EVICT && kv->pool.token_meta) {
        tkvi_token_meta *meta = &kv->pool.token_meta[id];
        meta->pinned_mask = meta->temporary_mask = meta->anchored_mask = 0;
    }
    list->sinks += list->n == list->sinks;
    ids[list->n++] = id;
    return id;
}

/* Opens the blocks of anchors of an empty list. They have no token yet. */
static void tkvi_open_anchors(tkv_cache *kv, const tkvi_plan *p, tkvi_list *list, uint32_t *ids) {
    for (; TKVI_HAS_EVICT && list->anchors < p->n_anchor_blocks; list->anchors++) {
        const uint32_t id = tkvi_new_entry(&kv->pool, p->anchor_layout, 0, 0);
        tkvi_entry *e = &kv->pool.entry[id];
        memset(tkvi_block_bytes(&kv->pool, tkvi_block_of(kv, id)), 0,
               kv->tables.layout[p->anchor_layout].bytes.total);
        e->has_anchors = 1;
        e->n_packed = 1; /* 0 would mean that it lists no indices */
        e->evicted_mask = 1;
        ids[list->n++] = id;
        list->sinks++;
    }
}

/* Returns the entry that takes the next token: the last one if its block has a free slot, else one with a new block. If
 * other lists hold the last block, this list gets a copy of it first. */
static uint32_t tkvi_open_block(tkv_cache *kv, int seq, int layer, int position) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer), id;
    if (TKVI_HAS_MOVES) list->shift = position - list->len;
    list->is_moved |= position != list->len;
    if (tkvi_tail_free_slots(kv, p, list, ids)) {
        id = ids[list->n - 1];
        if (tkvi_must_copy_tail(kv, list, ids)) {
            tkvi_copy_shared(kv, seq, layer, list->n - 1);
            tkvi_search_again(list, list->n - 1); /* it may have been offloaded */
        }
        return !TKVI_HAS_MOVES ||
                       (kv->pool.entry[id].shift == position - list->len && !kv->pool.entry[id].turned)
                   ? id
                   : tkvi_open_entry(kv, seq, layer, position - list->len);
    }
    {
        int sink = list->len == 0 && p->sink > 0,
            layout = sink ? p->sink_layout : p->now.layout[TKV_TIER_HOT];
        if (list->len == 0) tkvi_open_anchors(kv, p, list, ids);
        id = tkvi_new_entry(&kv->pool, layout, list->len, position - list->len);
        /* Free slots of a hot block are not read, so it is not cleared: all layers open one at the same token. A
         * store of offloaded blocks gets whole blocks, so they must not hold other memory. */
        if (sink || (TKVI_HAS_OFFLOAD && kv->tables.cfg.offload.write))
            memset(tkvi_block_bytes(&kv->pool, tkvi_block_of(kv, id)), 0,
                   kv->tables.layout[layout].bytes.total);
        list->sinks += sink;
        TKVI_ASSERT((uint32_t)list->n < kv->seq[seq].cap); /* the request was provided */
        ids[list->n++] = id;
        return id;
    }
}

/* The norm of a token's key, averaged over the KV heads. */
static float tkvi_mean_key_norm(const tkvi_source *k, int token, int heads, int saturate) {
    float row[TKV_MAX_HEAD_DIM];
    double sum = 0.0;
    int h, c;
    for (h = 0; h < heads; h++) {
        tkvi_load_row(k, token, h, row);
        for (c = 0; saturate && c < k->dim; c++) row[c] = tkvi_saturate(row[c]);
        sum += tkvi_key_norm(row, k->dim);
    }
    return (float)(sum / heads);
}

/* Stores n tokens, from row `first` of k and v on, at the end of the list. positions: of the tokens; NULL: they follow
 * the last one. Cannot fail. */
static void tkvi_store_tokens(tkv_cache *kv, int seq, int layer, const tkvi_source *k, const tkvi_source *v,
                              int first, int n, const int *positions) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int t, h, saturate = kv->tables.cfg.host.nonfinite == TKV_NONFINITE_SATURATE;
    if (!kv->seq[seq].in_step) list->chunk_start = list->len;
    for (t = 0; t < n; t++) {
        const uint32_t id =
            tkvi_open_block(kv, seq, layer, positions ? positions[t] : tkvi_next_position(kv, seq, layer));
        tkvi_block *b = tkvi_block_of(kv, id);
        const tkvi_layout *layout = &kv->tables.layout[b->layout];
        uint8_t *bytes = tkvi_block_bytes(&kv->pool, b);
        const int slot = list->len - kv->pool.entry[id].start + kv->pool.entry[id].first_slot;
        if (TKVI_HAS_ATTACH && b->copy_layout) tkvi_forget_copy(&kv->pool, kv->pool.entry[id].block);
        if (b->n_shared_slots <= slot) b->n_shared_slots = (uint8_t)(slot + 1);
        /* The slot may have had a token that truncation removed. */
        kv->pool.entry[id].evicted_mask &= ~((uint64_t)1 << slot);
        if (TKVI_HAS_EVICT && kv->pool.token_meta) {
            kv->pool.token_meta[id].pinned_mask &= ~((uint64_t)1 << slot);
            kv->pool.token_meta[id].temporary_mask &= ~((uint64_t)1 << slot);
            kv->pool.token_meta[id].scores[slot] =
                tkvi_keeps_norms(kv)
                    ? tkvi_bits(tkvi_mean_key_norm(k, first + t, layout->n_kv_heads, saturate))
                    : 0;
        }
        for (h = 0; h < layout->n_kv_heads; h++) {
            const tkvi_record *r = &layout->record[h];
            tkvi_store_row(&r->k, kv->kernels->simd_ops, k, first + t, h, slot, saturate, bytes + r->at);
            tkvi_store_row(&r->v, kv->kernels->simd_ops, v, first + t, h, slot, saturate,
                           bytes + r->at + r->v_at);
        }
        list->len++;
    }
}

/* >>append */
/* If the meter is idle and the sequence is empty, start metering it. */
static void tkvi_start_metering(tkv_cache *kv, int seq) {
    int layer, len = 0;
    if (!TKVI_HAS_METER || !kv->meter || kv->meter->seq >= 0) return;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) len |= tkvi_list_of(kv, seq, layer)->len;
    if (len == 0) kv->meter->seq = seq;
}

/* Writes the error for an append at the wrong position. The check exists because a program that begins a new text
 * without tkv_seq_reset would attend to the old one. */
static tkv_status tkvi_refuse_position(tkv_cache *kv, int seq, int layer, int position) {
    const int next = tkvi_next_position(kv, seq, layer);
    tkvi_text t = tkvi_text_begin(kv->call.error, sizeof kv->call.error);
    tkvi_append_text(&t, "sequence ");
    tkvi_append_int(&t, seq);
    tkvi_append_text(&t, ", layer ");
    tkvi_append_int(&t, layer);
    tkvi_append_text(&t, " holds ");
    tkvi_append_int(&t, tkvi_list_of(kv, seq, layer)->len);
    tkvi_append_text(&t, " tokens, so the next position is ");
    tkvi_append_int(&t, next);
    tkvi_append_text(&t, ", not ");
    tkvi_append_int(&t, position);
    tkvi_append_text(&t, position < next ? ": call tkv_seq_reset or tkv_seq_truncate first"
                                         : ": append those before it first");
    return TKV_ERR_RANGE;
}

/* Checks the positions of n new tokens. *n_jumps: those that do not follow the token before. */
static tkv_status tkvi_check_positions(tkv_cache *kv, int seq, int layer, const int *positions, int n,
                                       int *n_jumps) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const int window = kv->tables.plan[layer].kept_window;
    int t, next = tkvi_next_position(kv, seq, layer);
    *n_jumps = 0;
    for (t = 0; t < n; t++) {
        if (positions[t] < 0 || positions[t] >= TKVI_POSITIONS)
            return tkvi_fail(kv, TKV_ERR_RANGE, "token_positions has", positions[t],
                             "; positions are 0 to 2^30 - 1");
        if (list->n && list->expired && positions[t] - list->expired_end < window)
            return tkvi_fail(kv, TKV_ERR_RANGE, "tokens that the window of position", positions[t],
                             " reaches have expired");
        *n_jumps += positions[t] != next;
        next = positions[t] + 1;
    }
    if (*n_jumps && !TKVI_HAS_MOVES)
        return tkvi_refuse_left_out(kv, "TKV_NO_MOVES leaves jumps of positions out");
    if (*n_jumps && kv->tables.cfg.tiers.n_anchors)
        return tkvi_fail(kv, TKV_ERR_UNSUPPORTED,
                         "set tiers.n_anchors to 0: positions cannot jump with anchors", 0, NULL);
    return TKV_OK;
}

/* Checks the sequences, numbers and positions of tokens of an append. *total: sum of the numbers. */
static tkv_status tkvi_check_rows(tkv_cache *kv, const tkv_append_params *p, tkvi_request *request,
                                  int *total) {
    const tkv_config *cfg = &kv->tables.cfg;
    const tkv_rows *rows = request->rows;
    const int layer = request->layer;
    int i, j;
    *total = 0;
    for (i = 0; i < request->n_rows; i++) {
        const tkvi_list *list;
        const uint32_t *ids;
        int n_free, n_jumps = 0;
        if (!tkvi_has_seq(kv, rows[i].seq))
            return tkvi_fail(kv, TKV_ERR_ARG, "there is no sequence", rows[i].seq, "");
        if (rows[i].n < 0) return tkvi_fail(kv, TKV_ERR_ARG, "n is", rows[i].n, "; it must not be negative");
        for (j = 0; j < i; j++)
            if (rows[j].seq == rows[i].seq)
                return tkvi_fail(kv, TKV_ERR_ARG, "sequence", rows[i].seq, " is in the batch twice");
        list = tkvi_list_of(kv, rows[i].seq, layer);
        ids = tkvi_ids(kv, rows[i].seq, layer);
        if (p->positions && p->positions[i] != tkvi_next_position(kv, rows[i].seq, layer))
            return tkvi_refuse_position(kv, rows[i].seq, layer, p->positions[i]);
        n_free = cfg->limits.max_append - (kv->seq[rows[i].seq].in_step ? list->len - list->step_len : 0);
        if (rows[i].n > n_free)
            return tkvi_fail(kv, TKV_ERR_CAPACITY, "max_append leaves room for", n_free,
                             " more tokens here; append them in chunks");
        if (rows[i].n > cfg->limits.max_tokens - list->len)
            return tkvi_fail(kv, TKV_ERR_CAPACITY, "max_tokens leaves room for",
                             cfg->limits.max_tokens - list->len, " more tokens");
        if (rows[i].n > TKVI_FOREVER - *total)
            return tkvi_fail(kv, TKV_ERR_CAPACITY, "the batch has more tokens than", TKVI_FOREVER, "");
        if (p->first_rows && (p->first_rows[i] < 0 || p->first_rows[i] > TKVI_FOREVER - rows[i].n))
            return tkvi_fail(kv, TKV_ERR_ARG, "first_rows has", p->first_rows[i], "");
        if (rows[i].n && !p->token_positions &&
            tkvi_next_position(kv, rows[i].seq, layer) > TKVI_POSITIONS - rows[i].n)
            return tkvi_fail(kv, TKV_ERR_RANGE, "a token would get position",
                             (int64_t)tkvi_next_position(kv, rows[i].seq, layer) + rows[i].n - 1,
                             "; positions are 0 to 2^30 - 1");
        if (p->token_positions) {
            tkv_status st = tkvi_check_positions(kv, rows[i].seq, layer, p->token_positions + *total,
                                                 rows[i].n, &n_jumps);
            if (st) return st;
        }
        if (request->n_rows > 1 && rows[i].n && list->n && tkvi_is_tail_shared(kv, list, ids)) {
            n_jumps++; /* another row may append to this block first, and then this row needs one of its own */
            request->fixed.slots[kv->tables.layout[tkvi_block_of(kv, ids[list->n - 1])->layout].size_class]++;
        }
        request->n_jumps = tkvi_max(request->n_jumps, n_jumps);
        request->fixed.entries += n_jumps;
        *total += rows[i].n;
    }
    return TKV_OK;
}

/* Merges short blocks with their neighbours where a list has half as many blocks again as its tokens need. Cuts leave
 * short blocks behind. tkv_maintain() merges the others: a merge recodes a block once more. */
static void tkvi_join_torn(tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const int needed =
        (list->len - tkvi_n_expired(kv, layer, list, tkvi_ids(kv, seq, layer)) + TKVI_BLOCK - 1) / TKVI_BLOCK;
    int i;
    if (list->n - tkvi_anchors_of(list) <= needed + needed / 2 + 2) return;
    for (i = list->sinks; i + 2 < list->n; i++)
        while (tkvi_join_if_short(kv, seq, layer, i)) {}
}

/* Ages a list before an append of n tokens, with slots reserved for the layer. Returns 0 without memory. */
static int tkvi_age_for_append(tkv_cache *kv, int seq, int layer, int n) {
    const int reserved_len = kv->seq[seq].reserved_len;
    const uint64_t demoted_before = kv->counts.demoted;
    tkvi_demand needed = tkvi_no_demand();
    int aged;
    if (kv->seq[seq].in_step) return 1;
    if (reserved_len && tkvi_add_needed_slots(kv, seq, layer, needed.slots))
        (void)tkvi_take_from_reservation(kv, seq, needed.slots);
    aged = tkvi_age_list(kv, seq, layer, kv->tables.plan[layer].now.hot, 0,
                         tkvi_most_to_age(tkvi_list_of(kv, seq, layer), n));
    if (kv->counts.demoted != demoted_before) tkvi_join_torn(kv, seq, layer);
    if (reserved_len) tkvi_reserve_slots(kv, seq, reserved_len);
    return aged;
}

/* Describes an append. single_row: space for its row, if there is no batch. */
static tkvi_request tkvi_request_of(const tkv_append_params *p, tkv_rows *single_row) {
    tkvi_request request = tkvi_no_request();
    single_row->seq = p->seq;
    single_row->n = p->n;
    request.rows = p->batch ? p->batch : single_row;
    request.n_rows = p->batch ? p->n_batch : 1;
    request.layer = p->layer;
    return request;
}

static tkv_status tkvi_refuse_tokens(tkv_cache *kv, int n) {
    if (kv->pool.keep_all && !tkvi_has_budget(kv))
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "the memory given to tkv_create_in_place is full", 0, NULL);
    return tkvi_refuse_no_memory(kv, "the allocator gave no memory for", n, " more tokens");
}

/* The steps of an append after validation: reclaim, age, store. */
static tkv_status tkvi_append_rows(tkv_cache *kv, const tkv_append_params *p, const tkvi_request *request,
                                   int total, const tkvi_source *k, const tkvi_source *v) {
    const int layer = request->layer;
    const tkv_rows *rows = request->rows;
    const int hot = kv->tables.plan[layer].now.layout[TKV_TIER_HOT], has_budget = tkvi_has_budget(kv);
    const size_t budget = kv->tables.cfg.budget.bytes,
                 token_bytes = kv->tables.layout[hot].bytes.total / TKVI_BLOCK;
    int i, c, first = 0, has_step = 0, is_covered = 0, is_ready;
    tkvi_demand held = tkvi_no_demand();
    tkv_status st = TKV_OK;
    tkvi_follow_length(kv, layer, rows, request->n_rows);
    tkvi_follow_meter(kv);
    for (i = 0; i < request->n_rows; i++) has_step |= kv->seq[rows[i].seq].in_step;
    if (has_budget) {
        for (c = 0; c < kv->tables.n_classes; c++) held.slots[c] = kv->pool.reserved_slots[c];
        is_covered = tkvi_use_reservations(kv, request) && !request->n_jumps;
        if (!is_covered) st = tkvi_check_request(kv, request, budget);
        if (st) return st;
        /* Nothing is provided below, so a new table and recoding must leave the pages. All that the reservation gave is
         * held: another level may expire fewer blocks than the demand counts. */
        for (c = 0; c < kv->tables.n_classes; c++)
            held.slots[c] = is_covered ? held.slots[c] - kv->pool.reserved_slots[c] : 0;
        tkvi_hold_slots(&kv->pool, held.slots, 1);
    }
    is_ready = has_step || tkvi_renew_table(kv, layer, total);
    if (is_ready && has_budget) tkvi_recode_for_append(kv, request, (size_t)total * token_bytes);
    tkvi_hold_slots(&kv->pool, held.slots, -1);
    if (!is_ready) return tkvi_refuse_tokens(kv, total);
    if (has_budget && !is_covered) st = tkvi_reclaim(kv, request, budget);
    if (st) return st;
    if (!has_step) tkvi_query_stats_learn(kv, layer);
    if (!has_budget) {
        for (i = 0; i < request->n_rows; i++)
            if (rows[i].n && !tkvi_age_for_append(kv, rows[i].seq, layer, rows[i].n))
                return tkvi_refuse_tokens(kv, total);
        (void)tkvi_use_reservations(kv, request);
    }
    if (!is_covered && !tkvi_provide_request(kv, request)) return tkvi_refuse_tokens(kv, total);
    for (i = 0; i < request->n_rows;
         i++) /* all rows first, because new blocks take the slots of expired ones */
        if (rows[i].n && !kv->seq[rows[i].seq].in_step) tkvi_expire_list(kv, rows[i].seq, layer);
    for (i = 0; i < request->n_rows; first += rows[i].n, i++) {
        if (rows[i].n == 0) continue;
        tkvi_start_metering(kv, rows[i].seq);
        if (!kv->seq[rows[i].seq].in_step) tkvi_evict_excess(kv, rows[i].seq, layer, rows[i].n);
        tkvi_store_tokens(kv, rows[i].seq, layer, k, v, p->first_rows ? p->first_rows[i] : first, rows[i].n,
                          p->token_positions ? p->token_positions + first : NULL);
    }
    for (i = 0; i < request->n_rows; i++)
        if (rows[i].n && !kv->seq[rows[i].seq].in_step)
            tkvi_promote_by_itself(kv, rows[i].seq, layer, tkvi_list_of(kv, rows[i].seq, layer)->chunk_start);
    tkvi_count_seen_tokens(kv, layer, total); /* tkv_seq_abort subtracts its part */
    TKVI_ASSERT(!has_budget || kv->pool.keep_all || kv->heap.held <= budget);
    return tkvi_ok(kv);
}

/* Describes K or V of an append. Strides of 0: dense rows. */
static tkvi_source tkvi_describe_source(const tkvi_geometry *g, tkv_side side, const void *data,
                                        tkv_type type, ptrdiff_t token_stride, ptrdiff_t head_stride) {
    tkvi_source s;
    s.data = data;
    s.type = type;
    s.dim = side == TKV_K ? g->head_dim : g->v_head_dim;
    s.head_stride = head_stride ? head_stride : s.dim;
    s.token_stride = token_stride ? token_stride : (ptrdiff_t)g->n_kv_heads * s.dim;
    return s;
}

TKV_API tkv_status tkv_append_ex(tkv_cache *kv, const tkv_append_params *p) {
    const tkv_config *cfg;
    const tkvi_geometry *g;
    tkvi_request request;
    tkv_rows single_row;
    tkvi_source k, v;
    tkv_status st;
    int i, total;
    if (!kv) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    if (!p) return tkvi_fail(kv, TKV_ERR_ARG, "the parameters are missing", 0, NULL);
    request = tkvi_request_of(p, &single_row);
    if (request.n_rows < 0 || request.n_rows > cfg->limits.max_seqs)
        return tkvi_fail(kv, TKV_ERR_ARG, "n_batch is", request.n_rows, "; it must be at most max_seqs");
    if (p->layer < 0 || p->layer >= cfg->model.n_layers)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no layer", p->layer, "");
    if (kv->tables.plan[p->layer].stored_layer != p->layer)
        return tkvi_fail(kv, TKV_ERR_ARG, "layer", p->layer,
                         " has no K and V of its own (share_kv or no_cache)");
    if ((unsigned)p->k_type > TKV_TYPE_BF16 || (unsigned)p->v_type > TKV_TYPE_BF16)
        return tkvi_fail(kv, TKV_ERR_ARG, "k_type and v_type must be tkv_type", 0, NULL);
    st = tkvi_check_rows(kv, p, &request, &total);
    if (st) return st;
    if (total == 0) return tkvi_ok(kv);
    g = tkvi_geometry_of(kv, p->layer);
    if (!p->k || (!p->v && !g->v_in_k)) return tkvi_fail(kv, TKV_ERR_ARG, "k or v is missing", 0, NULL);
    k = tkvi_describe_source(g, TKV_K, p->k, p->k_type, p->k_token_stride, p->k_head_stride);
    v = tkvi_describe_source(g, TKV_V, p->v, p->v_type, p->v_token_stride, p->v_head_stride);
    if (cfg->host.nonfinite == TKV_NONFINITE_REFUSE &&
        (!tkvi_are_rows_finite(p, &request, &k, g->n_kv_heads) ||
         (!g->v_in_k && !tkvi_are_rows_finite(p, &request, &v, g->n_kv_heads))))
        return tkvi_fail(kv, TKV_ERR_NONFINITE, "a NaN or an infinity is in k or v of layer", p->layer,
                         " (cfg.host.nonfinite can saturate them)");
    kv->call.append_layer = p->layer;
    for (i = 0, kv->call.clock++; i < request.n_rows; i++) {
        kv->seq[request.rows[i].seq].used = kv->call.clock;
        kv->seq[request.rows[i].seq].is_appending = request.rows[i].n > 0;
    }
    for (i = 0; i < request.n_rows && p->token_positions; i++)
        tkvi_reserve_slots(kv, request.rows[i].seq, 0); /* it was counted for whole blocks */
    st = tkvi_append_rows(kv, p, &request, total, &k, &v);
    for (i = 0; i < request.n_rows; i++) kv->seq[request.rows[i].seq].is_appending = 0;
    for (i = 0; i < request.n_rows; i++)
        tkvi_release_unused(kv, request.rows[i].seq); /* only after all rows, because rows share pages */
    return st;
}

static tkv_status tkvi_append(tkv_cache *kv, int seq, int layer, const int *position, const float *k,
                              const float *v, int n) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.k = k;
    p.v = v;
    p.positions = position;
    return tkv_append_ex(kv, &p);
}

TKV_API tkv_status tkv_append(tkv_cache *kv, int seq, int layer, const float *k, const float *v, int n) {
    return tkvi_append(kv, seq, layer, NULL, k, v, n);
}

/* >>ageing */
/* 1 if the layer stores K and V of its own and has a block. */
static int tkvi_has_blocks_to_age(const tkv_cache *kv, int seq, int layer) {
    return kv->tables.plan[layer].stored_layer == layer && tkvi_list_of(kv, seq, layer)->n > 0;
}

/* Number of tokens that the next append of a layer may have: as many as the last one. */
static int tkvi_n_next(const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    return tkvi_max(1, list->len - list->chunk_start);
}

/* Ages all layers of a sequence, then expires tokens. all_due: 0 leaves due blocks to later steps, as an append does.
 * flush: 1 takes blocks of any age. partial_too: as in tkvi_age_next. If it fails, blocks of some layers may be
 * recoded. */
static tkv_status tkvi_age_seq(tkv_cache *kv, int seq, int all_due, int flush, int partial_too) {
    int layer, n = kv->tables.cfg.model.n_layers, ready = 1;
    for (layer = 0; layer < n && ready;
         layer++) { /* before slots lose their reservation: a table can take pages */
        if (!tkvi_has_blocks_to_age(kv, seq, layer)) continue;
        ready = tkvi_renew_table(kv, layer, flush ? TKVI_ANY_TOKENS : tkvi_n_next(kv, seq, layer));
        if (ready) tkvi_query_stats_learn(kv, layer);
    }
    tkvi_unreserve_slots(kv, seq);
    for (layer = 0; layer < n && ready; layer++) {
        const int hot = kv->tables.plan[layer].now.hot;
        if (!tkvi_has_blocks_to_age(kv, seq, layer)) continue;
        ready = tkvi_age_list(
            kv, seq, layer, flush && hot != TKVI_FOREVER ? 0 : tkvi_hot_age(kv, layer), partial_too,
            all_due ? TKVI_FOREVER
                    : tkvi_most_to_age(tkvi_list_of(kv, seq, layer), tkvi_n_next(kv, seq, layer)));
    }
    for (layer = 0; layer < n && ready; layer++)
        if (tkvi_has_blocks_to_age(kv, seq, layer)) tkvi_expire_list(kv, seq, layer);
    tkvi_release_unused(kv, seq);
    return ready ? tkvi_ok(kv) : tkvi_refuse_no_memory(kv, "no memory to recode blocks", 0, NULL);
}

TKV_API tkv_status tkv_seq_flush(tkv_cache *kv, int seq, tkv_flush_mode mode) {
    tkv_status st;
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if ((unsigned)mode > TKV_FLUSH_ALL)
        return tkvi_fail(kv, TKV_ERR_ARG, "mode must be a tkv_flush_mode", 0, NULL);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first", 0, NULL);
    st = tkvi_age_seq(kv, seq, 1, mode != TKV_FLUSH_DUE, mode == TKV_FLUSH_ALL);
    if (st == TKV_OK && mode != TKV_FLUSH_DUE) { /* reserved slots were counted for ageing without a flush */
        tkvi_reserve_slots(kv, seq, 0);
        tkvi_trim(&kv->pool);
    }
    return st;
}

/* >>idle time */
typedef struct tkvi_idle_work {
    uint64_t work_end; /* tkvi_work_so_far after the last block of work */
    tkv_is_time_up is_time_up;
    void *user;
} tkvi_idle_work;

/* Blocks coded since the cache was created. A merge codes one. */
static uint64_t tkvi_work_so_far(const tkv_cache *kv) { return kv->counts.demoted + kv->counts.merged; }

static int tkvi_has_time(const tkv_cache *kv, const tkvi_idle_work *work) {
    return tkvi_work_so_far(kv) < work->work_end && !(work->is_time_up && work->is_time_up(work->user));
}

/* Makes the tables that are due, as the next append would. Returns 0 without memory. */
static int tkvi_make_due_tables(tkv_cache *kv, const tkvi_idle_work *work) {
    int layer, ready = 1;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && ready; layer++) {
        if (kv->tables.plan[layer].stored_layer != layer || !tkvi_has_time(kv, work)) continue;
        ready = tkvi_renew_table(kv, layer, 1);
        if (ready) tkvi_query_stats_learn(kv, layer);
    }
    return ready;
}

/* Ages blocks of a sequence, as its next append would. Then expires tokens. Returns 0 without memory. */
static int tkvi_age_in_idle_time(tkv_cache *kv, int seq, const tkvi_idle_work *work) {
    int layer, aged = 0;
    tkvi_unreserve_slots(kv, seq);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && aged >= 0; layer++) {
        if (!tkvi_has_blocks_to_age(kv, seq, layer)) continue;
        do { /* the tokens of the last append stay exact until the next one */
            if (!tkvi_has_time(kv, work)) break;
            aged = tkvi_age_next(kv, seq, layer, tkvi_hot_age(kv, layer), tkvi_exact_from(kv, seq, layer), 0);
            if (aged == 0) tkvi_expire_list(kv, seq, layer);
        } while (aged > 0);
    }
    tkvi_release_unused(kv, seq);
    return aged >= 0;
}

/* Merges short neighbours in all lists of a sequence. */
static void tkvi_join_in_idle_time(tkv_cache *kv, int seq, const tkvi_idle_work *work) {
    int layer, i;
    tkvi_unreserve_slots(kv, seq);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        for (i = tkvi_list_of(kv, seq, layer)->sinks; i + 2 < tkvi_list_of(kv, seq, layer)->n; i++)
            while (tkvi_has_time(kv, work) && tkvi_join_if_short(kv, seq, layer, i)) {}
    tkvi_release_unused(kv, seq);
}

TKV_API tkv_status tkv_maintain(tkv_cache *kv, int max_work, tkv_is_time_up is_time_up, void *user,
                                int *done) {
    tkvi_idle_work work;
    uint64_t before;
    int seq, ready = 1;
    if (!kv) return TKV_ERR_ARG;
    if (max_work < 0) return tkvi_fail(kv, TKV_ERR_ARG, "max_work is", max_work, "; it must not be negative");
    before = tkvi_work_so_far(kv);
    work.work_end = before + (uint64_t)max_work;
    work.is_time_up = is_time_up;
    work.user = user;
    if (!tkvi_has_open_step(kv)) ready = tkvi_make_due_tables(kv, &work);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs && ready; seq++)
        if (!kv->seq[seq].in_step) ready = tkvi_age_in_idle_time(kv, seq, &work);
    while (ready && tkvi_has_time(kv, &work) && tkvi_recode_in_idle_time(kv)) {}
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs && ready; seq++)
        if (!kv->seq[seq].in_step) tkvi_join_in_idle_time(kv, seq, &work);
    tkvi_trim(&kv->pool);
    if (done) *done = (int)(tkvi_work_so_far(kv) - before);
    return ready ? tkvi_ok(kv) : tkvi_refuse_no_memory(kv, "no memory to recode blocks", 0, NULL);
}

/* >>steps */
TKV_API tkv_status tkv_seq_begin(tkv_cache *kv, int seq) {
    tkv_status st;
    int layer;
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open already; commit or abort it first", 0, NULL);
    tkvi_learn_missing_tables(kv);
    st = tkvi_age_seq(kv, seq, 0, 0, 0);
    if (st) return st;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (list->n) tkvi_evict_excess(kv, seq, layer, 1);
        if (list->n) tkvi_promote_by_itself(kv, seq, layer, list->chunk_start);
        list->step_len = list->chunk_start = list->len;
        list->step_shift = list->shift;
    }
    kv->seq[seq].in_step = 1;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_seq_commit(tkv_cache *kv, int seq) {
    int layer, n = -1;
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (!kv->seq[seq].in_step) return tkvi_fail(kv, TKV_ERR_STATE, "no step is open", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        if (n < 0) n = list->len - list->step_len;
        if (list->len - list->step_len != n)
            return tkvi_fail(kv, TKV_ERR_STATE, "another number of tokens than the first layer: layer", layer,
                             "");
    }
    kv->seq[seq].in_step = 0;
    tkvi_release_unused(kv, seq);
    return tkvi_ok(kv);
}

/* Removes the tokens from index len on, the length of the list, from an entry that has tokens before. m: its
 * token_meta, or NULL. In a packed entry last slots are removed; other slots stay and are marked in evicted_mask. One
 * slot always stays, because n_packed 0 means an entry that is not packed. The block keeps its bytes. */
static void tkvi_cut_entry(tkvi_entry *e, tkvi_token_meta *m, int len) {
    const int n = e->first_slot + len - e->start;
    uint64_t kept;
    int t;
    if (e->end_slot >= n) e->end_slot = 0;
    while (e->n_packed > e->first_slot + 1 && tkvi_listed_index(e, m, e->n_packed - 1) >= len) e->n_packed--;
    for (t = e->first_slot; t < e->n_packed; t++) { /* slots before it list nothing */
        if (tkvi_listed_index(e, m, t) < len) continue;
        if (e->has_anchors) m->index.any[t] = e->start;
        else m->index.after_start[t] = 0;
        e->evicted_mask |= (uint64_t)1 << t;
        m->anchored_mask &= ~((uint64_t)1 << t);
    }
    kept = tkvi_slots_before(e->n_packed ? e->n_packed : e->end_slot ? e->end_slot : tkvi_min(TKVI_BLOCK, n));
    e->evicted_mask &= kept;
    e->sink_mask &= kept & ~e->evicted_mask;
    if (!TKVI_HAS_EVICT || !m) return;
    m->anchored_mask &= kept;
    m->pinned_mask &= kept;
    m->temporary_mask &= kept;
}

static void tkvi_truncate_entry(tkv_cache *kv, uint32_t id, int len) {
    tkvi_entry *e = &kv->pool.entry[id], cut = *e;
    tkvi_cut_entry(&cut, TKVI_HAS_EVICT && kv->pool.token_meta ? &kv->pool.token_meta[id] : NULL, len);
    tkvi_set_sink_mask(&kv->pool, id, cut.sink_mask);
    *e = cut;
}

/* Number of blocks of a layer that hold any of its first `len` tokens. Blocks of anchors are not alone in a list. */
static int tkvi_n_blocks_before(const tkv_cache *kv, int seq, int layer, int len) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int n = list->n;
    while (n > tkvi_anchors_of(list) && tkvi_block_start(kv, ids, n - 1) >= len) n--;
    return n > tkvi_anchors_of(list) ? n : 0;
}

/* Truncates a list to its first `len` tokens. shift: of tkvi_shift_after_cut. */
static void tkvi_truncate_list(tkv_cache *kv, int seq, int layer, int len, int shift) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int n_kept = tkvi_n_blocks_before(kv, seq, layer, len);
    int i;
    for (i = n_kept; i < list->n; i++) tkvi_wipe_before_release(kv, seq, layer, i);
    for (i = n_kept; i < list->n; i++) tkvi_release_entry(&kv->pool, ids[i]);
    tkvi_forget_meter_copies_in(kv, seq, layer, len, TKVI_FOREVER);
    if (n_kept < list->n) tkvi_unlist_blocks(list, ids, n_kept, list->n);
    list->len = len;
    if (TKVI_HAS_MOVES) list->shift = shift;
    list->is_moved |= shift != 0;
    list->expired = tkvi_min(list->expired, len);
    list->chunk_start = tkvi_min(list->chunk_start, len);
    tkvi_token_score_cut(kv, list, ids);
    if (list->n > 0) tkvi_truncate_entry(kv, ids[list->n - 1], len);
    for (i = 0; i < tkvi_anchors_of(list); i++) tkvi_truncate_entry(kv, ids[i], len);
    for (i = 0; i < tkvi_anchors_of(list); i++) tkvi_wipe_unused(kv, layer, kv->pool.entry[ids[i]].block, i);
    if (list->n > 0) tkvi_wipe_unused(kv, layer, kv->pool.entry[ids[list->n - 1]].block, list->n - 1);
}

TKV_API tkv_status tkv_seq_abort(tkv_cache *kv, int seq) {
    int layer;
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (!kv->seq[seq].in_step) return tkvi_fail(kv, TKV_ERR_STATE, "no step is open", 0, NULL);
    kv->seq[seq].in_step = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        int n = list->len - list->step_len;
        if (n <= 0) continue;
        tkvi_count_seen_tokens(kv, layer, -n);
        tkvi_truncate_list(kv, seq, layer, list->step_len, list->step_shift);
    }
    tkvi_forget_tokens(kv, seq, tkv_get_length(kv, seq, TKV_ALL_LAYERS));
    tkvi_release_unused(kv, seq);
    return tkvi_ok(kv);
}

/* Sets the demand of a request to the slots that a reservation up to length `len` takes beyond the present one. */
static void tkvi_demand_reservation(tkv_cache *kv, int seq, int len, tkvi_request *request) {
    const int old_len = kv->seq[seq].reserved_len;
    int64_t *own = tkvi_reserved_slots_of(kv, seq, 0);
    int c;
    request->fixed = tkvi_no_demand();
    for (c = 0; c < kv->tables.n_classes; c++) request->fixed.slots[c] = -own[c];
    tkvi_reserve_slots(kv, seq, len);
    for (c = 0; c < kv->tables.n_classes; c++) {
        request->fixed.slots[c] += own[c];
        request->fixed.entries += request->fixed.slots[c];
    }
    tkvi_reserve_slots(kv, seq, old_len);
}

TKV_API tkv_status tkv_seq_reserve(tkv_cache *kv, int seq, int n) {
    tkvi_request request = tkvi_no_request();
    tkv_status st = TKV_OK;
    tkv_rows row;
    int len, layer, reserved_len;
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (n < 1 || n > kv->tables.cfg.limits.max_append)
        return tkvi_fail(kv, TKV_ERR_ARG, "n is", n, "; it must be 1 to max_append");
    len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    if (n > kv->tables.cfg.limits.max_tokens - len)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "max_tokens leaves room for",
                         kv->tables.cfg.limits.max_tokens - len, " more tokens");
    row.seq = seq;
    row.n = n;
    request.rows = &row;
    request.n_rows = 1;
    request.layer = -1;
    reserved_len = tkvi_max(kv->seq[seq].reserved_len, len + n);
    kv->seq[seq].used = ++kv->call.clock;
    for (layer = 0; TKVI_HAS_METER && kv->tables.plan[layer].stored_layer != layer;) layer++;
    tkvi_follow_length(kv, layer, &row, 1);
    tkvi_demand_reservation(kv, seq, reserved_len, &request);
    if (tkvi_has_budget(kv)) {
        const size_t budget = kv->tables.cfg.budget.bytes;
        st = tkvi_check_request(kv, &request, budget);
        while (!st && tkvi_bytes_for(kv, &request) > budget) {
            st = tkvi_reclaim(kv, &request, budget);
            /* The level may have changed, and that of another one can be larger. */
            if (!st) tkvi_demand_reservation(kv, seq, reserved_len, &request);
        }
    }
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st;
         layer++) /* the first table may become due; later tables can wait */
        if (kv->stats.tokens_seen && kv->stats.tokens_seen[layer] >= 0 &&
            kv->tables.current_version[layer] < 0 && !tkvi_allocate_version(kv, 0))
            st = tkvi_refuse_no_memory(kv, "no memory to reserve", n, " tokens");
    if (!st && !tkvi_provide_request(kv, &request))
        st = tkvi_refuse_no_memory(kv, "no memory to reserve", n, " tokens");
    if (!st) tkvi_reserve_slots(kv, seq, reserved_len);
    tkvi_trim(&kv->pool);
    return st ? st : tkvi_ok(kv);
}

/* >>truncation */
/* The least number of tokens of which the last one sees no expired token. n_tokens: number that is asked for. */
static int64_t tkvi_fewest_to_keep(const tkv_cache *kv, int seq, int layer, int n_tokens) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int64_t fewest = (int64_t)list->expired + kv->tables.plan[layer].kept_window;
    const int last = tkvi_min(n_tokens, list->len) - 1;
    if (!list->is_moved || !list->n || last < list->expired)
        return fewest; /* a cut can leave no block, but tokens gone; and expired tokens tell no position */
    return list->expired_end + (int64_t)kv->tables.plan[layer].kept_window -
           (tkvi_index_position(kv, list, ids, last) - last);
}

/* Checks that the first n_tokens of a sequence can stand alone. */
static tkv_status tkvi_check_cut(tkv_cache *kv, int seq, int n_tokens) {
    int layer;
    if (n_tokens < 0) return tkvi_fail(kv, TKV_ERR_ARG, "n_tokens is", n_tokens, "; it must not be negative");
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first: sequence", seq, "");
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && n_tokens > 0; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const int64_t fewest = tkvi_fewest_to_keep(kv, seq, layer, n_tokens);
        if (list->expired && list->len > n_tokens && n_tokens < fewest)
            return tkvi_fail(kv, TKV_ERR_RANGE,
                             "tokens of the window have expired; 0 tokens can stay, or at least", fewest, "");
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_seq_truncate(tkv_cache *kv, int seq, int n_tokens) {
    int layer;
    int64_t pages_before;
    tkv_status st;
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    st = tkvi_check_cut(kv, seq, n_tokens);
    if (st) return st;
    pages_before = tkvi_n_pages_taken(&kv->pool);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        if (tkvi_list_of(kv, seq, layer)->len <= n_tokens) continue;
        tkvi_drop_ended_pins_in(kv, seq, layer); /* an abort does not: its tokens were never appended */
        tkvi_truncate_list(kv, seq, layer, n_tokens, tkvi_shift_after_cut(kv, seq, layer, n_tokens));
    }
    tkvi_forget_tokens(kv, seq, n_tokens);
    tkvi_release_unused(kv, seq);
    if (tkvi_n_pages_taken(&kv->pool) >
        pages_before) /* after evictions the reserved tokens may need more blocks than before */
        tkvi_reserve_slots(kv, seq, 0);
    tkvi_shrink_index(kv, seq);
    return tkvi_ok(kv);
}

/* Releases all blocks and states of a sequence, and ends its step and its reservation. */
static void tkvi_clear_seq(tkv_cache *kv, int seq) {
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        int i;
        for (i = 0; i < list->n; i++) tkvi_wipe_before_release(kv, seq, layer, i);
        while (list->n > 0) tkvi_release_entry(&kv->pool, ids[--list->n]);
        memset(list, 0, sizeof *list);
    }
    kv->seq[seq].in_step = 0;
    if (TKVI_HAS_METER && kv->meter && kv->meter->seq == seq) tkvi_meter_clear(kv->meter);
    tkvi_reserve_slots(kv, seq, 0);
    tkvi_forget_tokens(kv, seq, 0); /* when the meter watches it no more */
}

TKV_API tkv_status tkv_seq_reset(tkv_cache *kv, int seq) {
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    tkvi_clear_seq(kv, seq);
    tkvi_shrink_index(kv, seq);
    return tkvi_ok(kv);
}

/* >>reading */
/* Checks that tokens start to start + n - 1 of a layer with a cache can be read. */
static tkv_status tkvi_check_readable(tkv_cache *kv, int seq, int layer, int start, int n) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, slot;
    if (start > list->len || n > list->len - start)
        return tkvi_fail_reader(kv, TKV_ERR_RANGE, "the layer has", list->len,
                                " tokens; what is read goes beyond");
    if (tkvi_n_live_between(kv, list, ids, start, n) < n)
        return tkvi_fail_reader(kv, TKV_ERR_RANGE,
                                "a token has expired or was removed, among those read from index", start,
                                " on");
    for (i = start; i < start + n && tkvi_has_discarded(kv, seq, layer, i, start + n);
         i++) { /* anchors can be read: they are in blocks of their own */
        const int block = tkvi_find_token(kv, list, ids, i, &slot);
        if (block >= 0 && tkvi_has_no_source(kv, tkvi_block_of(kv, ids[block])))
            return tkvi_fail_reader(kv, TKV_ERR_NO_SOURCE, "a token is discarded: index", i,
                                    ": tkv_seq_recompute brings it back");
    }
    return TKV_OK;
}

/* Reads tokens that tkvi_check_readable has seen. k, v: of the first token; NULL: not read. */
static tkv_status tkvi_read_run(tkv_cache *kv, int seq, int layer, int start, int n, float *k, float *v,
                                tkvi_fetch_buffer *buffer) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const tkvi_simd_ops *simd_ops = kv->kernels->simd_ops;
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, h, from, to, slot;
    for (from = start; from < start + n; from = to) {
        const size_t row = (size_t)(from - start) * (size_t)g->n_kv_heads;
        const tkvi_layout *layout;
        int turned, t;
        i = tkvi_find_token(kv, list, ids, from, &slot);
        TKVI_ASSERT(i >= 0); /* tkvi_check_readable found it */
        turned = TKVI_HAS_MOVES ? kv->pool.entry[ids[i]].turned : 0;
        layout = &kv->tables.layout[tkvi_block_of(kv, ids[i])->layout];
        to = tkvi_min(start + n, tkvi_block_end(kv, list, ids, i)); /* none of these tokens is evicted */
        if (TKVI_HAS_EVICT && kv->tables.cfg.tiers.n_anchors)
            to = from + 1; /* an anchor is in another block */
        for (h = 0; h < g->n_kv_heads; h++) {
            const tkvi_record *r = &layout->record[h];
            size_t dk = (size_t)g->head_dim, dv = (size_t)g->v_head_dim, heads = (size_t)g->n_kv_heads;
            const uint8_t *bytes;
            tkv_status st = k ? tkvi_get_side_bytes(kv, ids[i], h, TKV_K, buffer, &bytes) : TKV_OK;
            if (k && !st)
                tkvi_values(&r->k, simd_ops, bytes, slot, to - from, k + (row + (size_t)h) * dk, heads * dk);
            for (t = 0; t < to - from && k && !st && turned; t++)
                tkvi_rope_rotate(kv->tables.plan[layer].rope, turned, 0,
                                 k + (row + (size_t)h + (size_t)t * heads) * dk);
            if (v && !st) st = tkvi_get_side_bytes(kv, ids[i], h, TKV_V, buffer, &bytes);
            if (v && !st)
                tkvi_values(&r->v, simd_ops, bytes, slot, to - from, v + (row + (size_t)h) * dv, heads * dv);
            if (st) return tkvi_fail_fetching(kv, st, layer);
        }
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_read(tkv_cache *kv, int seq, int layer, int start, int n, float *k, float *v) {
    tkvi_fetch_buffer buffer;
    const int stored = tkvi_stored_layer(kv, seq, layer);
    tkv_status st;
    if (stored < 0) return tkvi_refuse_reading(kv, seq, layer);
    if (start < 0 || n < 0)
        return tkvi_fail_reader(kv, TKV_ERR_ARG, "start and n must not be negative; the lesser one is",
                                tkvi_min(start, n), "");
    layer = stored;
    st = tkvi_check_readable(kv, seq, layer, start, n);
    tkvi_empty_buffer(&buffer, seq, layer);
    return st ? st : tkvi_read_run(kv, seq, layer, start, n, k, v, &buffer);
}

/* Number of indices from the front that rise by one. */
static int tkvi_run_length(const int *index, int n) {
    int i = 1;
    while (i < n && index[i - 1] < TKVI_FOREVER && index[i] == index[i - 1] + 1) i++;
    return i;
}

TKV_API tkv_status tkv_read_tokens(tkv_cache *kv, int seq, int layer, const int *indices, int n, float *k,
                                   float *v) {
    tkvi_fetch_buffer buffer;
    tkv_status st = TKV_OK;
    size_t k_row, v_row;
    const int stored = tkvi_stored_layer(kv, seq, layer);
    int i, run;
    if (stored < 0) return tkvi_refuse_reading(kv, seq, layer);
    if (n < 0 || (n > 0 && !indices))
        return tkvi_fail_reader(kv, TKV_ERR_ARG, "indices must have n numbers, and n is", n, "");
    layer = stored;
    for (i = 0; i < n && !st; i += run) {
        run = tkvi_run_length(indices + i, n - i);
        st = indices[i] < 0
                 ? tkvi_fail_reader(kv, TKV_ERR_ARG, "indices has", indices[i], ", which is negative")
                 : tkvi_check_readable(kv, seq, layer, indices[i], run);
    }
    k_row = (size_t)tkvi_geometry_of(kv, layer)->n_kv_heads * (size_t)tkvi_geometry_of(kv, layer)->head_dim;
    v_row = (size_t)tkvi_geometry_of(kv, layer)->n_kv_heads * (size_t)tkvi_geometry_of(kv, layer)->v_head_dim;
    tkvi_empty_buffer(&buffer, seq, layer);
    for (i = 0; i < n && !st; i += run) {
        run = tkvi_run_length(indices + i, n - i);
        st = tkvi_read_run(kv, seq, layer, indices[i], run, k ? k + (size_t)i * k_row : NULL,
                           v ? v + (size_t)i * v_row : NULL, &buffer);
    }
    return st;
}

#endif /* TKVI_STEP_SEQUENCE_H */
