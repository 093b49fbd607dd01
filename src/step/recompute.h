/*
 * step/recompute.h - discards blocks (reclaim/discard.h) when the caller or tkv_decide_discard says so. Stores their
 * keys and values again after the caller's model has recomputed them.
 *
 * Recomputed keys and values are stored as an append stores them: first in the hot format, then recoded as the
 * block was before. A block stores its last two layouts after the hot one. If it had no others, its bytes are the
 * same as before, unless tokens of it went after it was coded or what its format learned from queries has changed. A
 * block that a budget recoded three times or more is recoded only to its last two layouts. It then has fewer rounding
 * errors.
 */
#ifndef TKVI_STEP_RECOMPUTE_H
#define TKVI_STEP_RECOMPUTE_H

#include "rules/remat.h"
#include "step/sequence.h"

/* >>discarded positions */
/* The first position above `at` that no block of any layer crosses. discarded_only: 1 looks only at discarded
 * blocks. */
static int tkvi_next_cut(const tkv_cache *kv, int seq, int at, int discarded_only) {
    int layer, i, end = at + 1, end_before = at;
    while (end_before < end) {
        end_before = end;
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            i = list->n ? tkvi_block_at(kv, list, ids, tkvi_min(end - 1, list->len - 1)) : -1;
            if (i < 0 || (discarded_only && !tkvi_needs_recompute(kv, list, ids, i))) continue;
            end = tkvi_max(end, tkvi_block_end(kv, list, ids, i));
        }
    }
    return end;
}

/* The lowest position, `from` or above, at which a discarded block of any layer starts; -1: there is none. */
static int tkvi_first_discarded(const tkv_cache *kv, int seq, int from) {
    int layer, i, first = -1;
    for (layer = 0; TKVI_HAS_DISCARD && kv->pool.n_discarded && layer < kv->tables.cfg.model.n_layers;
         layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            const int start = tkvi_block_start(kv, ids, i);
            if (start < from || !tkvi_needs_recompute(kv, list, ids, i)) continue;
            if (first < 0 || start < first) first = start;
            break;
        }
    }
    return first;
}

TKV_API tkv_status tkv_seq_find_discarded(const tkv_cache *kv, int seq, int *start, int *n) {
    int at;
    if (!TKVI_HAS_DISCARD) return TKV_ERR_UNSUPPORTED;
    if (!tkvi_has_seq(kv, seq) || !start || !n) return TKV_ERR_ARG;
    *start = *n = 0;
    at = tkvi_first_discarded(kv, seq, 0);
    if (at < 0) return TKV_OK;
    *start = at;
    while (tkvi_first_discarded(kv, seq, at) == at) at = tkvi_next_cut(kv, seq, at, 1);
    *n = at - *start;
    return TKV_OK;
}

/* Describes the positions start .. end-1 of all layers for tkv_decide_discard and tkvi_remat_restore. quantized_bytes
 * is the number of bytes that they would have at `level`. */
static tkv_remat_block tkvi_describe_positions(const tkv_cache *kv, int seq, int start, int end, int level) {
    const int can_learn = !tkvi_has_open_step(kv);
    tkv_remat_block piece;
    int layer, i;
    memset(&piece, 0, sizeof piece);
    piece.start = start;
    piece.end = end;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n && tkvi_block_start(kv, ids, i) < end; i++) {
            const tkvi_block *b = tkvi_block_of(kv, ids[i]);
            const tkvi_tier_spec *spec = &tkvi_tier_specs_of(&kv->tables, layer)[level];
            size_t bytes = kv->tables.layout[b->layout].bytes.total, recoded_bytes;
            if (tkvi_block_end(kv, list, ids, i) <= start) continue;
            if (tkvi_is_discarded(b)) piece.discarded = 1;
            if (tkvi_is_discarded(b)) piece.layers = layer + 1;
            if (tkvi_is_offloaded(b)) continue;
            recoded_bytes = kv->tables.layout[spec->layout[tkvi_due_tier(kv, seq, layer, i, spec, can_learn)]]
                                .bytes.total;
            piece.bytes += bytes;
            piece.quantized_bytes += tkvi_has_budget(kv) && i >= list->sinks && b->refs == 1 &&
                                             !tkvi_sink_mask(&kv->pool, ids[i]) && recoded_bytes < bytes
                                         ? recoded_bytes
                                         : bytes;
        }
    }
    if (!piece.discarded) piece.layers = 0;
    return piece;
}

/* The level that tkv_seq_free_bytes would recode to. */
static int tkvi_level_to_recode_to(const tkv_cache *kv) {
    return tkvi_has_budget(kv) ? tkvi_min(kv->tables.level + 1, kv->budget.pressure.cfg.max_level)
                               : kv->tables.level;
}

TKV_API tkv_status tkv_seq_list_blocks(const tkv_cache *kv, int seq, tkv_remat_block *out, int capacity,
                                       int *n) {
    int at = TKVI_FOREVER, layer, len, end, count = 0;
    if (!TKVI_HAS_DISCARD) return TKV_ERR_UNSUPPORTED;
    if (!tkvi_has_seq(kv, seq) || !n || capacity < 0 || (capacity > 0 && !out)) return TKV_ERR_ARG;
    len = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_list_of(kv, seq, layer)->n)
            at = tkvi_min(at, tkvi_block_start(kv, tkvi_ids(kv, seq, layer), 0));
    for (; at < len; at = end, count++) {
        end = tkvi_min(tkvi_next_cut(kv, seq, at, 0), len);
        if (count < capacity)
            out[count] = tkvi_describe_positions(kv, seq, at, end, tkvi_level_to_recode_to(kv));
    }
    *n = count;
    return TKV_OK;
}

/* >>discarding */
/* Checks that blocks of a sequence can be discarded or restored now. Sets the error if not. */
static tkv_status tkvi_check_seq_for_discard(tkv_cache *kv, int seq) {
    if (!TKVI_HAS_DISCARD) return tkvi_refuse_left_out(kv, "TKV_NO_DISCARD leaves this out");
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first", 0, NULL);
    return TKV_OK;
}

TKV_API tkv_status tkv_seq_discard(tkv_cache *kv, int seq, int n_tokens, int *n_discarded) {
    tkv_status st = tkvi_check_seq_for_discard(kv, seq);
    int first, last, end, n = 0;
    if (n_discarded) *n_discarded = 0;
    if (!TKVI_HAS_DISCARD || st) return st;
    if (n_tokens < 0) return tkvi_fail(kv, TKV_ERR_ARG, "n_tokens is", n_tokens, "; it must not be negative");
    if (!tkvi_first_in_ram(kv, seq, &first, &end)) return tkvi_ok(kv);
    last = tkvi_min(tkvi_discardable_to(kv, seq, kv->tables.level),
                    n_tokens < TKVI_FOREVER - first ? first + n_tokens : TKVI_FOREVER);
    if (end > last) return tkvi_ok(kv);
    (void)tkvi_discard_to(kv, seq, last, 1, &n);
    if (n_discarded) *n_discarded = n;
    tkvi_release_unused(kv, seq);
    return tkvi_ok(kv);
}

/* 1 if the positions start .. end - 1 have blocks in RAM, and other entries hold all of them too. */
static int tkvi_is_piece_shared(const tkv_cache *kv, int seq, int start, int end) {
    int layer, i, any_shared = 0, any_own = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n && tkvi_block_start(kv, ids, i) < end; i++) {
            const tkvi_block *b = tkvi_block_of(kv, ids[i]);
            if (tkvi_block_end(kv, list, ids, i) <= start || tkvi_is_offloaded(b)) continue;
            any_shared |= b->refs > 1;
            any_own |= b->refs == 1;
        }
    }
    return any_shared && !any_own;
}

TKV_API tkv_status tkv_seq_free_bytes(tkv_cache *kv, int seq, tkv_remat *r, float pressure, size_t need,
                                      tkv_remat_block *blocks, tkv_remat_action *actions, int capacity,
                                      size_t *freed) {
    tkv_status st = tkvi_check_seq_for_discard(kv, seq);
    size_t freed_bytes = 0;
    int n = 0, i, to = 0, most = 0, n_to_recode = 0;
    if (freed) *freed = 0;
    if (!TKVI_HAS_DISCARD || st) return st;
    if (!r) return tkvi_fail(kv, TKV_ERR_ARG, "r is missing", 0, NULL);
    if (tkv_seq_list_blocks(kv, seq, blocks, capacity, &n) != TKV_OK || n > capacity)
        return tkvi_fail(kv, TKV_ERR_ARG, "blocks is missing or too short: the sequence has", n,
                         " blocks (tkv_seq_list_blocks)");
    for (i = 0; i < n; i++) /* a decision passes over what counts as discarded */
        blocks[i].discarded |= tkvi_is_piece_shared(kv, seq, blocks[i].start, blocks[i].end);
    st = tkv_decide_discard(r, blocks, n, tkvi_max(0, tkv_get_length(kv, seq, TKV_ALL_LAYERS) - 1), pressure,
                            need, actions, NULL);
    if (st) return tkvi_fail(kv, st, "pressure is not finite, or actions are missing", 0, NULL);
    for (i = 0; i < n; i++) {
        if (actions[i] == TKV_REMAT_DISCARD) to = blocks[i].end;
        n_to_recode += actions[i] == TKV_REMAT_QUANTIZE;
    }
    to = tkvi_min(to, tkvi_discardable_to(kv, seq, kv->tables.level));
    freed_bytes = tkvi_discard_to(kv, seq, to, 1, &most);
    if (n_to_recode) {
        tkvi_change_level(kv, tkvi_level_to_recode_to(kv));
        for (i = 0; i < n_to_recode * kv->tables.cfg.model.n_layers && freed_bytes < need; i++)
            freed_bytes += tkvi_recode_oldest(kv, kv->tables.cfg.budget.bytes, 1);
    }
    if (freed) *freed = freed_bytes;
    tkvi_release_unused(kv, seq);
    return tkvi_ok(kv);
}

/* >>restoring recomputed tokens */
/* Sets `layouts` to the layouts through which recomputed tokens of block i are recoded, hot first. Returns their
 * number. */
static int tkvi_restore_layouts(const tkv_cache *kv, int seq, int layer, int i, int *layouts) {
    const tkvi_tables *t = &kv->tables;
    const tkvi_tier_spec *spec = &t->plan[layer].now;
    const tkvi_block *b = tkvi_block_of(kv, tkvi_ids(kv, seq, layer)[i]);
    const tkv_tier tier = tkvi_tier_of_level(spec, tkvi_tier_at(tkvi_list_of(kv, seq, layer), i));
    int n = 0;
    layouts[n++] = spec->layout[TKV_TIER_HOT];
    if (b->previous_layout) layouts[n++] = b->previous_layout - 1;
    if (n > 1 ||
        !tkvi_is_hot_layout(kv, layer, b->layout)) /* the archive may have the formats of the hot tier */
        layouts[n++] = b->layout;
    /* In a cache created with a budget the block keeps its layout. Without one it may have aged meanwhile. */
    if (t->recode_pages || tier == TKV_TIER_HOT || tkvi_must_wait_for_table(kv, layer, tier)) return n;
    if (n == 1 && tier == TKV_TIER_ARCHIVE && spec->key[TKV_TIER_WARM] != spec->key[TKV_TIER_HOT] &&
        !tkvi_must_wait_for_table(kv, layer, TKV_TIER_WARM))
        layouts[n++] = tkvi_layout_of(t, layer, TKV_TIER_WARM);
    if (t->layout[layouts[n - 1]].key != spec->key[tier]) layouts[n++] = tkvi_layout_of(t, layer, tier);
    return n;
}

/* Stores the tokens of the discarded block i and recodes them. Row 0 of k and v belongs to position `start`. Cannot
 * fail: its slots are provided (tkvi_demand_restore). */
static void tkvi_restore_block(tkv_cache *kv, int seq, int layer, int i, const tkvi_source *k,
                               const tkvi_source *v, int start) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t id = tkvi_ids(kv, seq, layer)[i];
    const int n = tkvi_block_tokens(kv, list, tkvi_ids(kv, seq, layer), i);
    const int saturate = kv->tables.cfg.host.nonfinite == TKV_NONFINITE_SATURATE;
    const tkv_tier tier = tkvi_tier_at(list, i);
    const tkvi_tier_spec *spec = &kv->tables.plan[layer].now;
    const tkvi_layout *hot;
    tkvi_block *b = tkvi_block_of(kv, id);
    tkvi_recoding recoding;
    uint32_t page;
    uint8_t *bytes;
    uint64_t used;
    int layouts[TKV_TIER_COUNT + 1], n_layouts = tkvi_restore_layouts(kv, seq, layer, i, layouts), s, h, t;
    hot = &kv->tables.layout[layouts[0]];
    if (b->refs > 1) { /* the others may see more tokens of it than there are rows */
        tkvi_leave_block(&kv->pool, id);
        tkvi_new_block(&kv->pool, id, layouts[0], b->first_position);
        b = tkvi_block_of(kv, id);
    } else {
        tkvi_take_slot(&kv->pool, hot->size_class, kv->pool.entry[id].block, &page, &s);
        tkvi_forget_offloaded(&kv->pool, kv->pool.entry[id].block);
        b->page = page;
        b->slot = (uint16_t)s;
        b->layout = (uint16_t)layouts[0];
    }
    bytes = tkvi_block_bytes(&kv->pool, b);
    memset(bytes, 0, hot->bytes.total);
    used = tkvi_used_mask(kv, list, tkvi_ids(kv, seq, layer),
                          i); /* rows of tokens that are gone do not come back */
    for (t = 0; t < n; t++)
        for (h = 0; h < hot->n_kv_heads && used >> t & 1; h++) {
            const tkvi_record *record = &hot->record[h];
            const int row = tkvi_slot_index(kv, id, t) - start;
            tkvi_store_row(&record->k, kv->kernels->simd_ops, k, row, h, t, saturate, bytes + record->at);
            tkvi_store_row(&record->v, kv->kernels->simd_ops, v, row, h, t, saturate,
                           bytes + record->at + record->v_at);
        }
    recoding.kv = kv;
    recoding.layer = layer;
    recoding.start = b->first_position;
    recoding.live_mask = tkvi_slots_before(n); /* tokens that are gone keep their slots, but do not count */
    recoding.dead_mask = used ? recoding.live_mask & ~used : 0;
    for (s = 1; s < n_layouts; s++) {
        recoding.from = &kv->tables.layout[layouts[s - 1]];
        recoding.to = &kv->tables.layout[layouts[s]];
        tkvi_recode_block(&kv->pool, kv->pool.entry[id].block, layouts[s], tkvi_recode_heads, &recoding);
    }
    b->previous_layout = (uint16_t)(n_layouts > 2 ? layouts[n_layouts - 2] + 1 : 0);
    if (!kv->tables.recode_pages &&
        kv->tables.layout[b->layout].key == spec->key[tkvi_tier_of_level(spec, tier)])
        tkvi_enter_tier(kv, list, tkvi_ids(kv, seq, layer), i, tier,
                        tier); /* it may have aged while discarded */
    tkvi_search_again(list, i);
    kv->counts.recomputed++;
}

/* The slots for restoring the discarded blocks first .. last-1 of a layer. Each block takes a slot of its last layout.
 * Blocks are recoded one after the other, so the slots of other layouts are counted for one block: that with which the
 * pool needs the most pages. */
static tkvi_demand tkvi_demand_restore(const tkv_cache *kv, int seq, int layer, int first, int last) {
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkvi_demand stored = tkvi_no_demand(), most = stored;
    int layouts[TKV_TIER_COUNT + 1], i, s, pass;
    for (pass = 0; pass < 2; pass++) {
        if (pass) most = stored;
        for (i = first; i < last; i++) {
            tkvi_demand with_others = stored;
            int n_layouts;
            if (!tkvi_is_discarded(tkvi_block_of(kv, ids[i]))) continue;
            n_layouts = tkvi_restore_layouts(kv, seq, layer, i, layouts);
            if (!pass) { /* the block has its entry already */
                stored.slots[kv->tables.layout[layouts[n_layouts - 1]].size_class]++;
                continue;
            }
            for (s = 0; s + 1 < n_layouts; s++) with_others.slots[kv->tables.layout[layouts[s]].size_class]++;
            if (tkvi_pages_for_demand(&kv->pool, &with_others) > tkvi_pages_for_demand(&kv->pool, &most))
                most = with_others;
        }
    }
    return most;
}

/* End position of the tokens of block i. Eviction can free the next block; then this one covers its positions too. */
static int tkvi_tokens_end(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const int n = tkvi_block_tokens(kv, list, ids, i);
    return n ? tkvi_slot_index(kv, ids[i], n - 1) + 1 : tkvi_block_start(kv, ids, i);
}

/* 1 if rows of the positions start .. start + n - 1 must or can restore the discarded block i. A block without live
 * tokens misses nothing. It can stay discarded, if rows of it are not given. */
static int tkvi_takes_rows(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i, int start,
                           int n) {
    if (!tkvi_is_discarded(tkvi_block_of(kv, ids[i]))) return 0;
    return tkvi_needs_recompute(kv, list, ids, i) ||
           (tkvi_block_start(kv, ids, i) >= start && tkvi_tokens_end(kv, list, ids, i) <= start + n);
}

/* Sets *first and *last to the range of blocks that rows of the positions start .. start + n - 1 restore. *last 0:
 * none. */
static tkv_status tkvi_find_restored(tkv_cache *kv, int seq, int layer, int start, int n, int *first,
                                     int *last) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    *first = *last = 0;
    for (i = 0; i < list->n; i++) {
        const int block_start = tkvi_block_start(kv, ids, i), end = tkvi_tokens_end(kv, list, ids, i);
        if (!tkvi_takes_rows(kv, list, ids, i, start, n)) continue;
        if (!*last && end <= start)
            return tkvi_fail(kv, TKV_ERR_STATE, "tokens are restored front to back; next are those from",
                             block_start, " on");
        if (block_start >= start + n) break;
        if (block_start < start || end > start + n)
            return tkvi_fail(kv, TKV_ERR_RANGE, "whole blocks are restored; this one ends at position", end,
                             " (tkv_seq_find_discarded)");
        if (!*last) *first = i;
        *last = i + 1;
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_restore(tkv_cache *kv, int seq, int layer, int start, const float *k, const float *v,
                               int n) {
    tkv_status st = tkvi_check_seq_for_discard(kv, seq);
    tkvi_list *list;
    const uint32_t *ids;
    tkvi_source from_k, from_v;
    const tkvi_geometry *g;
    tkvi_request request = tkvi_no_request();
    int i, first, last;
    if (!TKVI_HAS_DISCARD || st) return st;
    if (!tkvi_has_own_layer(kv, seq, layer)) return tkvi_refuse_layer(kv, layer);
    g = tkvi_geometry_of(kv, layer);
    if (n < 0 || start < 0 || (n > 0 && (!k || (!v && !g->v_in_k))))
        return tkvi_fail(kv, TKV_ERR_ARG, "k or v is missing, or start or n is negative: n is", n, "");
    list = tkvi_list_of(kv, seq, layer);
    ids = tkvi_ids(kv, seq, layer);
    if (start > list->len || n > list->len - start)
        return tkvi_fail(kv, TKV_ERR_RANGE, "the layer has fewer tokens than", (int64_t)start + n, "");
    st = tkvi_find_restored(kv, seq, layer, start, n, &first, &last);
    if (st) return st;
    if (!last) return tkvi_ok(kv); /* this layer has discarded none of them */
    from_k = tkvi_describe_source(g, TKV_K, k, TKV_TYPE_F32, 0, 0);
    from_v = tkvi_describe_source(g, TKV_V, v, TKV_TYPE_F32, 0, 0);
    if (kv->tables.cfg.host.nonfinite == TKV_NONFINITE_REFUSE &&
        (!tkvi_is_source_finite(&from_k, 0, n, g->n_kv_heads) ||
         (!g->v_in_k && !tkvi_is_source_finite(&from_v, 0, n, g->n_kv_heads))))
        return tkvi_fail(kv, TKV_ERR_NONFINITE, "a NaN or an infinity is in k or v of layer", layer,
                         " (cfg.host.nonfinite can saturate them)");
    kv->seq[seq].used = ++kv->call.clock;
    request.fixed = tkvi_demand_restore(kv, seq, layer, first, last);
    if (tkvi_has_budget(kv)) {
        const size_t budget = kv->tables.cfg.budget.bytes;
        st = tkvi_check_request(kv, &request, budget);
        while (!st && tkvi_bytes_for(kv, &request) > budget) {
            st = tkvi_reclaim(kv, &request, budget);
            /* Eviction takes blocks out of the list, and other pages are partial now. */
            if (!st) st = tkvi_find_restored(kv, seq, layer, start, n, &first, &last);
            request.fixed = tkvi_demand_restore(kv, seq, layer, first, last);
        }
    }
    if (!st && !tkvi_provide_request(kv, &request))
        st = tkvi_refuse_no_memory(kv, "no memory to restore tokens, in number", n, "");
    if (st) {
        tkvi_trim(&kv->pool);
        return st;
    }
    for (i = first; i < last; i++)
        if (tkvi_takes_rows(kv, list, ids, i, start, n))
            tkvi_restore_block(kv, seq, layer, i, &from_k, &from_v, start);
    tkvi_release_unused(kv, seq);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_seq_recompute(tkv_cache *kv, int seq, tkv_remat *r, int step, tkv_compute compute,
                                     void *user, int *missing) {
    tkv_status st = tkvi_check_seq_for_discard(kv, seq);
    int start = 0, n = 0, layers, at, may = 1;
    if (missing) *missing = 0;
    if (!TKVI_HAS_DISCARD || st) return st;
    if (!r || !compute || step < r->step)
        return tkvi_fail(kv, TKV_ERR_ARG, "r or compute is missing, or step is below the last one:", step,
                         "");
    while (may && !st) {
        (void)tkv_seq_find_discarded(kv, seq, &start, &n);
        if (n == 0) break;
        for (at = start, layers = 0; at < start + n;) {
            const int end = tkvi_next_cut(kv, seq, at, 1);
            const tkv_remat_block piece = tkvi_describe_positions(kv, seq, at, end, kv->tables.level);
            int first;
            if (tkvi_remat_restore(r, &piece, 1, step, &first, &may))
                return tkvi_fail(kv, TKV_ERR_ARG, "r is of a model with fewer layers than", piece.layers, "");
            if (!may) break;
            layers = tkvi_max(layers, piece.layers);
            at = end;
        }
        if (at == start) break;
        kv->call.error[0] = 0; /* so that an error text found afterwards is from compute */
        st = compute(user, kv, seq, 0, layers, start, at - start);
        if (!st && tkvi_first_discarded(kv, seq, 0) >= 0 && tkvi_first_discarded(kv, seq, 0) < at)
            st = TKV_ERR_STATE;
    }
    if (missing)
        for (at = 0; (at = tkvi_first_discarded(kv, seq, at)) >= 0; at = n) {
            n = tkvi_next_cut(kv, seq, at, 1);
            *missing += n - at;
        }
    if (!st) return tkvi_ok(kv);
    if (st == TKV_ERR_STATE)
        return tkvi_fail(kv, st, "compute did not restore all tokens from position", start, " on");
    return kv->call.error[0] ? st : tkvi_fail(kv, st, "compute failed at position", start, "");
}

#endif /* TKVI_STEP_RECOMPUTE_H */
