/*
 * reclaim/evict_tokens.h - eviction: removes tokens from a cache. A view gathers the facts about a layer's tokens,
 * and a policy chooses the victims (rules/evict.h). A mask in each block then marks the evicted tokens. Neighbours
 * whose remaining tokens fit into one block are merged.
 *
 *     blocks     [a b c d] [e f g h] [i j k l]        the policy evicts b c e f g j
 *     evicted     . x x .   x x x .   . x . .
 *     merged     [a d h -]           [i . k l]        both blocks are decoded and encoded as one
 *
 * Tokens keep their positions: a packed block lists them (tkvi_token_meta.index). An empty block is freed, and
 * the block before it then covers its positions. The last block is neither freed nor merged. Nor is a block that
 * several lists hold. Eviction needs no memory except kv->work.choice, which grows with the lists.
 */
#ifndef TKVI_RECLAIM_EVICT_TOKENS_H
#define TKVI_RECLAIM_EVICT_TOKENS_H

#include "reclaim/age.h"

/* >>counts and masks */
static uint64_t tkvi_live_mask_in(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return tkvi_live_mask(&kv->pool.entry[ids[i]], tkvi_block_tokens(kv, list, ids, i));
}

/* Number of live tokens of a list. */
static int tkvi_n_live(const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, n = 0;
    for (i = 0; i < list->n; i++)
        n += tkvi_has_all_slots(&kv->pool.entry[ids[i]]) ? tkvi_block_tokens(kv, list, ids, i)
                                                         : tkvi_n_bits(tkvi_live_mask_in(kv, list, ids, i));
    return n;
}

/* Index of the block at which a walk over the tokens from a position on begins. With anchors it is 0: their blocks
 * may hold any position. */
static int tkvi_first_block_to_search(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids,
                                      int position) {
    return list->anchors ? 0 : tkvi_max(0, tkvi_block_at(kv, list, ids, position));
}

/* Mask of the pinned tokens and named sinks of a block, without temporary pins that have ended. */
static uint64_t tkvi_pinned_mask_of(const tkv_cache *kv, const tkvi_list *list, uint32_t id) {
    const tkvi_token_meta *token_meta = &kv->pool.token_meta[id];
    return tkvi_sink_mask(&kv->pool, id) | token_meta->pinned_mask |
           (token_meta->temporary_until > list->len ? token_meta->temporary_mask : 0);
}

/* Takes the pins that have ended off block i, and those of tokens that are gone. Called before pins of two blocks get
 * one end, and before the list gets shorter: a pin that has ended does not come back. */
static void tkvi_drop_ended_pins(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkvi_token_meta *meta;
    if (!TKVI_HAS_EVICT || !kv->pool.token_meta) return;
    meta = &kv->pool.token_meta[ids[i]];
    meta->temporary_mask &= meta->temporary_until > list->len ? tkvi_used_mask(kv, list, ids, i) : 0;
    if (!meta->temporary_mask) meta->temporary_until = 0;
}

/* Takes the pins that have ended off all blocks of a list. */
static void tkvi_drop_ended_pins_in(tkv_cache *kv, int seq, int layer) {
    int i;
    for (i = 0; i < tkvi_list_of(kv, seq, layer)->n; i++) tkvi_drop_ended_pins(kv, seq, layer, i);
}

/* Mask of the live tokens of block i that a policy may choose. Anchors are not among them. */
static uint64_t tkvi_choosable_mask(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return i < list->anchors ? 0 : tkvi_live_mask_in(kv, list, ids, i);
}

/* Number of live tokens at the positions start .. start + n - 1. */
static int tkvi_n_live_between(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int start,
                               int n) {
    int i, t, found = 0;
    for (i = tkvi_first_block_to_search(kv, list, ids, start); i < list->n; i++) {
        const uint64_t live_mask = tkvi_live_mask_in(kv, list, ids, i);
        if (tkvi_block_start(kv, ids, i) >= start + n) break;
        for (t = 0; t < TKVI_BLOCK; t++)
            if (live_mask >> t & 1) {
                const int position = tkvi_slot_index(kv, ids[i], t);
                found += position >= start && position < start + n;
            }
    }
    return found;
}

/* >>freeing and merging blocks */
/* Removes block i from its list and releases it. */
static void tkvi_unlist_block(tkv_cache *kv, int seq, int layer, int i) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkvi_forget_meter_copies(kv, seq, layer, tkvi_block_start(kv, ids, i));
    tkvi_release_entry(&kv->pool, ids[i]);
    tkvi_unlist_blocks(list, ids, i, i + 1);
}

/* Removes block i, which has no tokens left. The entry before it must then list its positions. */
static void tkvi_free_block(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    if (i > 0) tkvi_list_positions(kv, list, ids, i - 1);
    tkvi_unlist_block(kv, seq, layer, i);
}

/* 1 if the tokens of blocks i and i + 1 have consecutive indices, without a gap. Without token_meta only such blocks
 * merge. */
static int tkvi_is_consecutive(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_entry *a = &kv->pool.entry[ids[i]], *b = &kv->pool.entry[ids[i + 1]];
    return !a->evicted_mask && !b->evicted_mask &&
           tkvi_block_tokens(kv, list, ids, i) - a->first_slot == b->start - a->start;
}

/* Number of tokens of block i + 1 that may move to block i; 0: none. No block of sinks is given. Both need the same
 * tier and format, and the last block takes no part. A packed block spans at most 65536 positions (16 bits).
 *
 * If all tokens of block i + 1 fit, all may move. Otherwise both blocks are encoded again, and no block is freed. So
 * a part of the tokens moves only if `fill` is 1, or if that loses nothing and a quarter of block i is free. It
 * loses nothing if the blocks are exact and have no copy in the store. */
static int tkvi_n_joinable(const tkv_cache *kv, int layer, const tkvi_list *list, const uint32_t *ids, int i,
                           int fill) {
    const tkvi_block *a = tkvi_block_of(kv, ids[i]), *b = tkvi_block_of(kv, ids[i + 1]);
    const int key = kv->tables.layout[a->layout].key;
    int n_free, n;
    TKVI_ASSERT(i >= list->sinks && i + 1 < list->n);
    if (i + 2 >= list->n || tkvi_tier_at(list, i) != tkvi_tier_at(list, i + 1)) return 0;
    if (a->refs > 1 || b->refs > 1 || key != kv->tables.layout[b->layout].key || tkvi_has_fixed_slots(kv))
        return 0;
    if (tkvi_is_offloaded(a) || tkvi_is_offloaded(b)) return 0;
    if (tkvi_block_end(kv, list, ids, i + 1) - tkvi_block_start(kv, ids, i) > 65536) return 0;
    if (!tkvi_moved_alike(&kv->pool.entry[ids[i]], &kv->pool.entry[ids[i + 1]])) return 0;
    if (tkvi_block_start(kv, ids, i) < list->expired && tkvi_block_start(kv, ids, i + 1) >= list->expired)
        return 0; /* only the first block has named sinks that outlast their window */
    n_free = kv->tables.layout[a->layout].tokens - tkvi_n_bits(tkvi_used_mask(kv, list, ids, i));
    n = tkvi_n_bits(tkvi_used_mask(kv, list, ids, i + 1));
    if (!kv->pool.token_meta) return n <= n_free && tkvi_is_consecutive(kv, list, ids, i) ? n : 0;
    if (n <= n_free) return n;
    if (kv->pool.token_meta[ids[i]].anchored_mask | kv->pool.token_meta[ids[i + 1]].anchored_mask) return 0;
    if (fill) return n_free;
    if (!tkvi_is_hot_layout(kv, layer, a->layout) || a->copy_layout || b->copy_layout) return 0;
    return n_free >= TKVI_BLOCK / 4 ? n_free : 0;
}

/* The bits of `mask` at the places of `slots`, moved to consecutive places from `to` on. */
static uint64_t tkvi_pack_bits(uint64_t mask, uint64_t slots, int to) {
    uint64_t packed = 0;
    int t;
    for (t = 0; t < TKVI_BLOCK && mask >> t; t++)
        if (slots >> t & 1) packed |= (mask >> t & 1) << to++;
    return packed;
}

/* Mask of the lowest n bits that are set. */
static uint64_t tkvi_first_bits(uint64_t mask, int n) {
    uint64_t others = mask;
    while (n-- > 0) others &= others - 1;
    return mask & ~others;
}

/* Moves the start of block i to its first token that is not evicted. */
static void tkvi_advance_start(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    tkvi_entry *e = &kv->pool.entry[ids[i]];
    tkvi_token_meta *token_meta = &kv->pool.token_meta[ids[i]];
    int t, shift = 0;
    tkvi_list_positions(kv, list, ids, i);
    for (t = e->n_packed; t-- > e->first_slot;) /* slots before it belong to another entry */
        if (!(e->evicted_mask >> t & 1)) shift = token_meta->index.after_start[t];
    for (t = 0; t < e->n_packed; t++)
        token_meta->index.after_start[t] =
            (uint16_t)(token_meta->index.after_start[t] > shift ? token_meta->index.after_start[t] - shift
                                                                : 0);
    e->start += shift;
}

/* Moves the first n_moved used slots of block i + 1 (b) to block i (a). If b is empty then, it is freed. */
static void tkvi_join_blocks(tkv_cache *kv, int seq, int layer, int i, int n_moved) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const tkvi_simd_ops *simd_ops = kv->kernels->simd_ops;
    const tkvi_block *a = tkvi_block_of(kv, ids[i]), *b = tkvi_block_of(kv, ids[i + 1]);
    tkvi_entry *to = &kv->pool.entry[ids[i]], *from = &kv->pool.entry[ids[i + 1]];
    const uint64_t used_a = tkvi_used_mask(kv, list, ids, i), used_b = tkvi_used_mask(kv, list, ids, i + 1);
    const uint64_t moved_mask = tkvi_first_bits(used_b, n_moved);
    const size_t dk = (size_t)g->head_dim, dv = (size_t)g->v_head_dim;
    float *k = kv->work.recode, *v = k + g->k_pad * TKVI_BLOCK;
    uint8_t *bytes_a = tkvi_block_bytes(&kv->pool, a);
    const uint8_t *bytes_b = tkvi_block_bytes(&kv->pool, b);
    int head;
    for (head = 0; head < g->n_kv_heads; head++) {
        const tkvi_record *record_a = &kv->tables.layout[a->layout].record[head];
        const tkvi_record *record_b = &kv->tables.layout[b->layout].record[head];
        int n = tkvi_decode_tokens(&record_a->k, simd_ops, bytes_a + record_a->at, used_a, k, dk);
        (void)tkvi_decode_tokens(&record_a->v, simd_ops, bytes_a + record_a->at + record_a->v_at, used_a, v,
                                 dv);
        (void)tkvi_decode_tokens(&record_b->k, simd_ops, bytes_b + record_b->at, moved_mask,
                                 k + (size_t)n * dk, dk);
        n += tkvi_decode_tokens(&record_b->v, simd_ops, bytes_b + record_b->at + record_b->v_at, moved_mask,
                                v + (size_t)n * dv, dv);
        tkvi_encode_record(kv, layer, head, record_a, a->first_position, k, n, bytes_a + record_a->at);
    }
    if (kv->pool.token_meta) {
        tkvi_align_steps(kv, ids[i], ids[i + 1]);
        tkvi_drop_ended_pins(kv, seq, layer, i);
        tkvi_drop_ended_pins(kv, seq, layer, i + 1);
        to->n_packed = (int8_t)tkvi_move_token_meta(kv, ids[i], 0, ids[i], used_a, to->start);
        to->n_packed =
            (int8_t)tkvi_move_token_meta(kv, ids[i], to->n_packed, ids[i + 1], moved_mask, to->start);
        to->evicted_mask = kv->pool.token_meta[ids[i]].anchored_mask;
        to->end_slot = 0;
    } else to->end_slot = from->end_slot ? (uint8_t)(tkvi_n_bits(used_a) + n_moved) : (uint8_t)0;
    to->first_slot = 0;
    if (tkvi_sink_mask(&kv->pool, ids[i]) | tkvi_sink_mask(&kv->pool, ids[i + 1])) {
        const uint64_t of_a = tkvi_pack_bits(to->sink_mask, used_a, 0);
        tkvi_set_sink_mask(&kv->pool, ids[i],
                           of_a | tkvi_pack_bits(from->sink_mask, moved_mask, tkvi_n_bits(used_a)));
        tkvi_set_sink_mask(&kv->pool, ids[i + 1], from->sink_mask & ~moved_mask);
    }
    tkvi_forget_meter_copies(kv, seq, layer, to->start);
    tkvi_forget_copy(&kv->pool, to->block);
    kv->counts.merged++;
    if (moved_mask == used_b) {
        tkvi_unlist_block(kv, seq, layer, i + 1);
        return;
    }
    from->evicted_mask |= moved_mask;
    tkvi_forget_meter_copies(kv, seq, layer,
                             from->start); /* the block begins later now, and has other tokens */
    tkvi_forget_copy(&kv->pool, from->block);
    tkvi_advance_start(kv, list, ids, i + 1);
    tkvi_wipe_unused(kv, layer, from->block, i + 1);
}

/* Merges blocks i and i + 1 of a list if all their tokens fit into one. Returns 1 if it did. */
static int tkvi_join_if_short(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int n;
    if (!TKVI_HAS_MOVES) return 0;
    n = tkvi_n_joinable(kv, layer, list, ids, i, 0);
    if (!n || n < tkvi_n_bits(tkvi_used_mask(kv, list, ids, i + 1))) return 0;
    tkvi_join_blocks(kv, seq, layer, i, n);
    return 1;
}

/* After an eviction: frees empty blocks and merges neighbours. fill: as in tkvi_n_joinable. */
static void tkvi_compact_blocks(tkv_cache *kv, int seq, int layer, int fill) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, n;
    for (i = list->anchors; i + 1 < list->n; i++)
        if (!tkvi_used_mask(kv, list, ids, i)) tkvi_free_block(kv, seq, layer, i--);
    for (i = list->sinks; i + 1 < list->n; i++)
        while ((n = tkvi_n_joinable(kv, layer, list, ids, i, fill)) > 0)
            tkvi_join_blocks(kv, seq, layer, i, n);
}

/* 1 if a list that drops a block frees no slot: the block is outside RAM, or other lists hold it too. */
static int tkvi_frees_no_slot(const tkvi_block *b) { return tkvi_is_offloaded(b) || b->refs > 1; }

/* >>the choice of victims */
/* Arrays over the tokens of a list that a policy may choose, oldest first. They lie in kv->work.choice. */
typedef struct tkvi_choice {
    uint64_t *pinned, *victims; /* bit masks over the tokens */
    int *position;
    float *value, *score; /* value: input of the policy; score: its result, the lowest are evicted */
    signed char *priority;
    int n; /* tokens */
} tkvi_choice;

static tkvi_choice tkvi_map_choice(const tkv_cache *kv) {
    const size_t blocks = kv->work.choice_cap, tokens = blocks * TKVI_BLOCK;
    tkvi_choice c;
    c.pinned = (uint64_t *)(void *)kv->work.choice;
    c.victims = c.pinned + blocks;
    c.position = (int *)(void *)(c.victims + blocks);
    c.value = (float *)(void *)(c.position + tokens);
    c.score = c.value + tokens;
    c.priority = (signed char *)(void *)(c.score + tokens);
    c.n = 0;
    return c;
}

/* Decodes the keys of the slots in `mask` of a block, for one head. If the block is not in RAM and cannot be
 * read, its keys count as zeros. */
static void tkvi_decode_keys(const tkv_cache *kv, int seq, int layer, uint32_t id, int head, uint64_t mask,
                             float *out) {
    const size_t dim = (size_t)tkvi_geometry_of(kv, layer)->head_dim;
    const tkvi_record *r = &kv->tables.layout[tkvi_block_of(kv, id)->layout].record[head];
    const uint8_t *bytes;
    tkvi_fetch_buffer buffer;
    tkvi_empty_buffer(&buffer, seq, layer);
    if (tkvi_get_side_bytes(kv, id, head, TKV_K, &buffer, &bytes))
        memset(out, 0, (size_t)tkvi_n_bits(mask) * dim * sizeof *out);
    else (void)tkvi_decode_tokens(&r->k, kv->kernels->simd_ops, bytes, mask, out, dim);
}

/* Norms of the keys of the slots in `mask` of a block. Each is the mean over the KV heads. */
static void tkvi_compute_key_norms(const tkv_cache *kv, int seq, int layer, uint32_t id, uint64_t mask,
                                   float *out) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const int heads = g->n_kv_heads, dim = g->head_dim;
    int head, t, n = tkvi_n_bits(mask);
    memset(out, 0, (size_t)n * sizeof *out);
    for (head = 0; head < heads; head++) {
        tkvi_decode_keys(kv, seq, layer, id, head, mask, kv->work.recode);
        for (t = 0; t < n; t++) out[t] += (float)(tkvi_key_norm(kv->work.recode + t * dim, dim) / heads);
    }
}

/* KeyDiff scores of a layer's n keys, decoded block by block. The formula is that of tkvi_score_keydiff. */
static void tkvi_compute_keydiff(const tkv_cache *kv, int seq, int layer, float *out, int n) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    const int heads = g->n_kv_heads, dim = g->head_dim;
    int head, i, t, pass, count, first;
    memset(out, 0, (size_t)n * sizeof *out);
    for (head = 0; head < heads; head++) {
        double anchor[TKV_MAX_HEAD_DIM], length = 0.0;
        memset(anchor, 0, sizeof anchor);
        for (pass = 0; pass < 2; pass++) {
            for (i = 0, first = 0; i < list->n; i++, first += count) {
                const uint64_t mask = tkvi_choosable_mask(kv, list, ids, i);
                count = tkvi_n_bits(mask);
                tkvi_decode_keys(kv, seq, layer, ids[i], head, mask, kv->work.recode);
                for (t = 0; t < count; t++)
                    if (pass)
                        out[first + t] -=
                            tkvi_key_cosine(kv->work.recode + t * dim, anchor, length, dim) / (float)heads;
                    else tkvi_add_direction(kv->work.recode + t * dim, dim, anchor);
            }
            length = tkvi_anchor_length(anchor, dim);
        }
    }
}

/* Tokens behind the last query that gave scores stay, as those with the highest score do. newest: the length then */
static void tkvi_spare_unobserved(const tkvi_choice *c, int newest) {
    float most = 0.0f;
    int i;
    for (i = 0; i < c->n; i++) most = c->value[i] > most ? c->value[i] : most;
    for (i = 0; i < c->n; i++)
        if (c->position[i] >= newest) c->value[i] = most;
}

/* Builds the view of a list's tokens for a policy, with its arrays in *c. p, or NULL: the caller's pins, priorities
 * and scores, all by position. needs: bits TKVI_NEEDS_. spares_outside: 1 spares tokens of blocks whose eviction frees
 * bytes in the index only. */
static tkv_evict_view tkvi_build_view(tkv_cache *kv, int seq, int layer, const tkv_evict_params *p, int needs,
                                      int spares_outside, tkvi_choice *c) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkv_evict_view v;
    int i, t, newest = tkvi_token_score_newest(kv, list, ids);
    TKVI_ASSERT((uint32_t)list->n <= kv->work.choice_cap); /* it grows with the lists */
    *c = tkvi_map_choice(kv);
    memset(c->pinned, 0, (size_t)list->n * sizeof *c->pinned);
    tkvi_drop_ended_pins_in(kv, seq, layer);
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const uint64_t pinned = tkvi_pinned_mask_of(kv, list, ids[i]);
        const uint64_t choosable = tkvi_choosable_mask(kv, list, ids, i);
        const int first = c->n, is_spared = spares_outside && tkvi_frees_no_slot(b);
        float scores[TKVI_BLOCK];
        tkvi_decay_to_now(kv, ids[i], list->len, newest, scores);
        if (needs & TKVI_NEEDS_NORMS && !tkvi_keeps_norms(kv))
            tkvi_compute_key_norms(kv, seq, layer, ids[i], choosable, c->value + c->n);
        for (t = 0; t < TKVI_BLOCK; t++) {
            int position;
            if (!(choosable >> t & 1)) continue;
            position = tkvi_slot_index(kv, ids[i], t);
            c->position[c->n] = position;
            if (needs & TKVI_NEEDS_NORMS && tkvi_keeps_norms(kv))
                c->value[c->n] = tkvi_from_bits(kv->pool.token_meta[ids[i]].scores[t]);
            if (!(needs & TKVI_NEEDS_NORMS))
                c->value[c->n] = p && p->scores ? p->scores[position] : scores[t];
            c->priority[c->n] = (signed char)(p && p->priorities ? p->priorities[position] : 0);
            if (is_spared || pinned >> t & 1 || (p && p->pinned_mask && tkvi_has(p->pinned_mask, position)))
                tkvi_mark(c->pinned, c->n);
            c->n++;
        }
        if (needs & TKVI_NEEDS_USER_SCORES && !(p && p->scores)) /* by tkv_get_importance */
            tkvi_importance_of_block(kv, c->position + first, c->value + first, c->n - first, list->len);
    }
    if (needs & (TKVI_NEEDS_PROMPT_SCORES | TKVI_NEEDS_LAST_SCORES)) tkvi_spare_unobserved(c, newest);
    memset(&v, 0, sizeof v);
    v.n = c->n;
    v.positions = c->position;
    v.pinned_mask = c->pinned;
    v.priorities = c->priority;
    v.total_scores = v.prompt_scores = v.last_scores = v.norms = v.low_counts = v.user_scores = c->value;
    return v;
}

/* Number of tokens that a layer may keep, if layers keep `keep` on average. Some policies (PyramidKV) give each
 * layer its own number. */
static int tkvi_n_kept_in_layer(const tkv_cache *kv, int seq, int layer, const tkv_evict_config *cfg,
                                int keep) {
    int budget[TKVI_MAX_LAYERS], i, n = 0, own = 0;
    tkv_evict_budget split;
    if (tkvi_evict_row_of(cfg->policy)->shape == TKV_EVICT_UNIFORM && !cfg->keep_first) return keep;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++) {
        if (i == layer) own = n;
        n += kv->tables.plan[i].stored_layer == i;
    }
    if (cfg->keep_first) return tkvi_line_between(cfg->keep_first, cfg->keep_last, keep, own, n);
    memset(&split, 0, sizeof split);
    split.shape = tkvi_evict_row_of(cfg->policy)->shape;
    split.n_layers = n;
    split.total = (int64_t)n * keep;
    split.n_tokens = tkvi_list_of(kv, seq, layer)->len;
    split.window = cfg->recent_tokens;
    return tkv_split_evict_budget(&split, budget) ? keep : budget[own];
}

/* Sets the victim_mask of each block from the victims of a choice. */
static void tkvi_mark_victims(tkv_cache *kv, int seq, int layer, const tkvi_choice *c) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, t, token = 0;
    for (i = 0; i < list->n; i++) {
        const uint64_t choosable = tkvi_choosable_mask(kv, list, ids, i);
        uint64_t *victim_mask = &kv->pool.token_meta[ids[i]].victim_mask;
        *victim_mask = 0;
        for (t = 0; t < TKVI_BLOCK; t++)
            if (choosable >> t & 1 && tkvi_has(c->victims, token++)) *victim_mask |= (uint64_t)1 << t;
    }
}

/* Evicts the tokens in the victim masks, then compacts the blocks and emits the event. Cannot fail. */
static void tkvi_apply_eviction(tkv_cache *kv, int seq, int layer, int fill) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int *positions = tkvi_map_choice(kv).position;
    int i, t, n_evicted = 0;
    for (i = 0; i < list->n; i++) {
        uint64_t *victim_mask = &kv->pool.token_meta[ids[i]].victim_mask;
        for (t = 0; t < TKVI_BLOCK; t++)
            if (*victim_mask >> t & 1) positions[n_evicted++] = tkvi_slot_index(kv, ids[i], t);
        kv->pool.entry[ids[i]].evicted_mask |= *victim_mask;
        *victim_mask = 0;
    }
    kv->counts.evicted += (uint64_t)n_evicted;
    tkvi_compact_blocks(kv, seq, layer, fill);
    if (n_evicted) tkvi_emit_evicted(kv, seq, layer, positions, n_evicted);
}

/* Chooses victims so that at most `keep` tokens of a list stay. Pinned tokens, and those that
 * spares_outside names (tkvi_build_view), stay even if they are more.
 * p: as in tkv_evict, or NULL. Fails if a score is not finite. */
static tkv_status tkvi_choose_victims(tkv_cache *kv, int seq, int layer, const tkv_evict_config *cfg,
                                      const tkv_evict_params *p, int keep, int spares_outside,
                                      tkvi_choice *c) {
    const int attention = TKVI_NEEDS_TOTAL_SCORES | TKVI_NEEDS_PROMPT_SCORES | TKVI_NEEDS_LAST_SCORES;
    const int needs = p && p->scores ? TKVI_NEEDS_USER_SCORES : tkvi_evict_needs(cfg->policy);
    tkv_evict_view v = tkvi_build_view(kv, seq, layer, p, needs, spares_outside, c);
    tkv_evict_config scoring = *cfg;
    tkv_status st;
    if (p && p->scores && !(tkvi_evict_needs(cfg->policy) & attention)) scoring.policy = TKV_EVICT_SCORES;
    keep = tkvi_max(1, keep - (tkvi_n_live(kv, seq, layer) - c->n)); /* anchors stay */
    if (needs & TKVI_NEEDS_KEYS) tkvi_compute_keydiff(kv, seq, layer, c->score, c->n);
    else if ((st = tkvi_score_tokens(&scoring, &v, c->score)) != TKV_OK) return st;
    return tkvi_select_victims(cfg, &v, c->score, keep, c->victims, NULL);
}

/* Chooses victims by cfg.evict. If that fails, because the caller's scores contain a NaN, it chooses the oldest
 * tokens. Cannot fail. */
static void tkvi_choose_victims_or_oldest(tkv_cache *kv, int seq, int layer, int keep, int spares_outside,
                                          tkvi_choice *c) {
    tkv_evict_config oldest = kv->tables.cfg.evict;
    if (tkvi_choose_victims(kv, seq, layer, &oldest, NULL, keep, spares_outside, c) == TKV_OK) return;
    oldest.policy = TKV_EVICT_SLIDING;
    (void)tkvi_choose_victims(kv, seq, layer, &oldest, NULL, keep, spares_outside, c);
}

/* Evicts by cfg.evict, or the oldest tokens, until at most `keep` stay. */
static void tkvi_evict_or_oldest(tkv_cache *kv, int seq, int layer, int keep, int spares_outside) {
    tkvi_choice c;
    tkvi_choose_victims_or_oldest(kv, seq, layer, keep, spares_outside, &c);
    tkvi_mark_victims(kv, seq, layer, &c);
    tkvi_apply_eviction(kv, seq, layer, 0);
}

/* Sets list->evict_len for when n more tokens will have been appended. cfg: filled. keep: the layer's share; 0: the
 * byte budget alone decides. An append needs a block once in 64 tokens, so that is when such an eviction comes. */
static void tkvi_forecast_eviction(tkv_cache *kv, int seq, int layer, int n, const tkv_evict_config *cfg,
                                   int keep) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const int len = list->len + n; /* at most limits.max_tokens + 1, so at most 2^30 */
    int64_t left = tkvi_round_up(len, TKVI_BLOCK) - len;
    if (!kv->token_scores.mode || !kv->token_scores.mode->fresh) return;
    if (keep) {
        const int64_t spare = tkvi_evict_limit(cfg, keep) - tkvi_n_live(kv, seq, layer) - n;
        left = tkvi_has_budget(kv) && left < spare ? left : spare;
    }
    list->evict_len = (int)(len + (left > 0 ? left : 0));
}

/* Called before n more tokens of a layer with blocks of its own. If it would exceed its share of
 * cfg.evict.keep_tokens, it evicts the excess, at least a batch (tkvi_evict_due). */
static void tkvi_evict_excess(tkv_cache *kv, int seq, int layer, int n) {
    const tkv_config *cfg = &kv->tables.cfg;
    tkv_evict_config filled;
    int count, excess, keep = 0, least;
    if (!TKVI_HAS_EVICT || !cfg->evict.policy) return;
    (void)tkvi_evict_fill(&cfg->evict, &filled);
    if (cfg->evict.keep_tokens) {
        count = tkvi_n_live(kv, seq, layer);
        keep = tkvi_n_kept_in_layer(kv, seq, layer, &cfg->evict, cfg->evict.keep_tokens);
        excess = tkvi_evict_due(&cfg->evict, count, n, keep);
        least =
            tkvi_min(filled.sink_tokens + 1, keep / 2); /* the sinks stay, even if many tokens come at once */
        if (excess > 0) tkvi_evict_or_oldest(kv, seq, layer, tkvi_max(count - excess, least), 0);
    }
    tkvi_forecast_eviction(kv, seq, layer, n, &filled, keep);
}

/* >>eviction as a reclaim stage, when no level fits the budget */
/* Mask of the tokens of block i that are pinned and live. */
static uint64_t tkvi_live_pinned_mask(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids,
                                      int i) {
    return tkvi_pinned_mask_of(kv, list, ids[i]) & tkvi_live_mask_in(kv, list, ids, i);
}

/* Upper bound of the tokens of a list that eviction cannot remove: sinks, recent, pinned and spared tokens, and
 * anchors. It counts all n_anchors, because recoding a block can make anchors. */
static int tkvi_n_staying(const tkv_cache *kv, int seq, int layer, int spares_outside) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int64_t n = tkvi_n_protected(&kv->tables.cfg.evict) + kv->tables.cfg.tiers.n_anchors;
    int i;
    for (i = 0; i < list->n; i++)
        n += tkvi_n_bits(spares_outside && tkvi_frees_no_slot(tkvi_block_of(kv, ids[i]))
                             ? tkvi_live_mask_in(kv, list, ids, i)
                             : tkvi_live_pinned_mask(kv, list, ids, i));
    return (int)(n < TKVI_FOREVER ? n : TKVI_FOREVER);
}

/* Evicts a batch of tokens from the list that can spare the most. offloaded_too: 1 evicts offloaded tokens as
 * well. Returns 0 if no list can spare any. */
static int tkvi_evict_batch(tkv_cache *kv, int offloaded_too) {
    const tkv_config *cfg = &kv->tables.cfg;
    int seq, layer, most_spare = 0, of_seq = 0, of_layer = 0, count = 0;
    for (seq = 0; seq < cfg->limits.max_seqs; seq++)
        for (layer = 0; layer < cfg->model.n_layers && !kv->seq[seq].in_step; layer++) {
            const int n = tkvi_list_of(kv, seq, layer)->n ? tkvi_n_live(kv, seq, layer) : 0;
            const int spare = n ? n - tkvi_n_staying(kv, seq, layer, !offloaded_too) : 0;
            if (spare <= most_spare) continue;
            most_spare = spare;
            of_seq = seq;
            of_layer = layer;
            count = n;
        }
    if (most_spare > 0)
        tkvi_evict_or_oldest(kv, of_seq, of_layer,
                             count - tkvi_min(most_spare, cfg->evict.batch ? cfg->evict.batch : 64),
                             !offloaded_too);
    return most_spare > 0;
}

#endif /* TKVI_RECLAIM_EVICT_TOKENS_H */
