/*
 * reclaim/evict_tokens.h - eviction: removes tokens from a cache. A view gathers the facts about a layer's tokens,
 * and a policy chooses the victims (rules/evict.h). A mask in each block then marks the evicted tokens. Neighbours
 * whose remaining tokens fit into one block are merged.
 *
 *     blocks     [a b c d] [e f g h] [i j k l]        the policy evicts b c e f g j
 *     gone        . x x .   x x x .   . x . .
 *     merged     [a d h -]           [i . k l]        both blocks are decoded and encoded as one
 *
 * Tokens keep their positions: a packed block lists them (tkvi_token_meta.where). An empty block is freed, and the
 * block before it then covers its positions. The last block is neither freed nor merged, nor are blocks with
 * several holders. Eviction needs no memory except kv->choice, which grows with the lists.
 */
#ifndef TKVI_RECLAIM_EVICT_TOKENS_H
#define TKVI_RECLAIM_EVICT_TOKENS_H

#include "reclaim/age.h"

/* >>counts and masks */
/* Number of bits that are set. */
static int tkvi_bits_in(uint64_t x) {
    int n = 0;
    for (; x; x &= x - 1) n++;
    return n;
}

static uint64_t tkvi_live_mask_in(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return tkvi_live_mask(&kv->pool.block[ids[i]], tkvi_block_tokens(kv, list, ids, i));
}

/* Number of live tokens of a list. */
static int tkvi_count(const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, n = 0;
    for (i = 0; i < list->n; i++)
        n += TKVI_HAS_EVICT && kv->pool.block[ids[i]].evicted_mask
                 ? tkvi_bits_in(tkvi_live_mask_in(kv, list, ids, i))
                 : tkvi_block_tokens(kv, list, ids, i);
    return n;
}

/* Index of the block at which a walk over the tokens from a position on begins. With anchors it is 0: the sinks'
 * block may hold any position. */
static int tkvi_first_at(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int position) {
    return TKVI_HAS_EVICT && kv->tables.cfg.tiers.n_anchors
               ? 0
               : tkvi_max(0, tkvi_block_at(kv, list, ids, position));
}

/* Mask of the pinned tokens of a block, without temporary pins that have ended. */
static uint64_t tkvi_pinned_in(const tkv_cache *kv, const tkvi_list *list, uint32_t id) {
    const tkvi_token_meta *token_meta = &kv->pool.token_meta[id];
    return token_meta->pinned_mask |
           (token_meta->temporary_until > list->len ? token_meta->temporary_mask : 0);
}

/* Mask of the live tokens of block i from which a policy may choose, without anchors. */
static uint64_t tkvi_choosable_mask(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids,
                                    int layer, int i) {
    const uint64_t there = tkvi_live_mask_in(kv, list, ids, i);
    return i < list->sinks ? there & ~(uint64_t)0 >> (TKVI_BLOCK - kv->tables.plan[layer].sink) : there;
}

/* Number of live tokens at the positions start .. start + n - 1. */
static int tkvi_count_in(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int start, int n) {
    int i, t, found = 0;
    for (i = tkvi_first_at(kv, list, ids, start); i < list->n; i++) {
        const uint64_t there = tkvi_live_mask_in(kv, list, ids, i);
        if (tkvi_block_start(kv, ids, i) >= start + n) break;
        for (t = 0; t < TKVI_BLOCK; t++)
            if (there >> t & 1) {
                const int at = tkvi_slot_position(kv, ids[i], t);
                found += at >= start && at < start + n;
            }
    }
    return found;
}

/* >>freeing and merging blocks */
/* Removes the quality meter's copies of the block that begins at `start`. */
static void tkvi_forget_copies(tkv_cache *kv, int seq, int layer, int start) {
    int i, a;
    if (!TKVI_HAS_METER || !kv->meter || kv->meter->seq != seq) return;
    for (i = 0; i < kv->meter->n; i++) {
        tkvi_head_probe *g = &kv->meter->head_probe[i];
        for (a = 0; a < g->n && g->layer == layer; a++)
            if (g->start[a] == start) tkvi_head_probe_drop(g, a);
    }
}

/* Removes block i from its list and releases it. The counts of the list follow. */
static void tkvi_unlist(tkv_cache *kv, int seq, int layer, int i) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int coded = i - list->sinks;
    tkvi_forget_copies(kv, seq, layer, tkvi_block_start(kv, ids, i));
    tkvi_release_block(&kv->pool, ids[i]);
    if (coded < 0) list->sinks--;
    else if (coded < list->archive) list->archive--;
    else if (coded < list->archive + list->warm) list->warm--;
    if (coded >= 0 && coded < list->n_recoded) list->n_recoded--;
    if (coded >= 0 && coded < list->n_tightest) list->n_tightest--;
    if (coded >= 0 && coded < list->n_offloaded) list->n_offloaded--;
    list->n--;
    memmove(ids + i, ids + i + 1, (size_t)(list->n - i) * sizeof *ids);
}

/* Frees block i, which has no tokens left. 0: it must stay, because the block before it has other holders. That
 * block would have to list its positions. */
static int tkvi_free_block(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    if (i > 0 && kv->pool.block[ids[i - 1]].refs > 1) return 0;
    if (i > 0) tkvi_list_positions(kv, list, ids, i - 1);
    tkvi_unlist(kv, seq, layer, i);
    return 1;
}

/* Number of tokens of block i + 1 that may move to block i; 0: none. If all of them fit, all may. If not, as many
 * as fit may, provided that bytes are very short (press) or that this loses nothing. It loses nothing if the blocks
 * are exact, have no copy in the store, and a quarter of block i is free. Both blocks need the same tier and
 * format. The last block takes no part. Positions in a packed block span at most 65536 (16 bits). */
static int tkvi_may_join(const tkv_cache *kv, int layer, const tkvi_list *list, const uint32_t *ids, int i,
                         int press) {
    const tkvi_block *a = &kv->pool.block[ids[i]], *b = &kv->pool.block[ids[i + 1]];
    const int key = kv->tables.layout[a->layout].key;
    int room, n;
    if (i < list->sinks || i + 2 >= list->n || tkvi_tier_at(list, i) != tkvi_tier_at(list, i + 1)) return 0;
    if (a->refs > 1 || b->refs > 1 || key != kv->tables.layout[b->layout].key || tkvi_has_fixed_slots(kv))
        return 0;
    if (tkvi_is_offloaded(a) || tkvi_is_offloaded(b)) return 0;
    if (tkvi_block_end(kv, list, ids, i + 1) - a->start > 65536) return 0;
    room = TKVI_BLOCK - tkvi_bits_in(tkvi_used_mask(kv, list, ids, i));
    n = tkvi_bits_in(tkvi_used_mask(kv, list, ids, i + 1));
    if (n <= room) return n;
    if (kv->pool.token_meta[ids[i]].anchored_mask | kv->pool.token_meta[ids[i + 1]].anchored_mask) return 0;
    if (press) return room;
    if (!tkvi_is_hot_layout(kv, layer, a->layout) || a->copy_layout || b->copy_layout) return 0;
    return room >= TKVI_BLOCK / 4 ? room : 0;
}

/* The lowest n of the set bits. */
static uint64_t tkvi_first_bits(uint64_t bits, int n) {
    uint64_t rest = bits;
    while (n-- > 0) rest &= rest - 1;
    return bits & ~rest;
}

/* Moves the start of block i to its first token that is not evicted. */
static void tkvi_begin_later(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    tkvi_block *b = &kv->pool.block[ids[i]];
    tkvi_token_meta *token_meta = &kv->pool.token_meta[ids[i]];
    int t, by = 0;
    tkvi_list_positions(kv, list, ids, i);
    for (t = b->n_packed; t-- > 0;)
        if (!(b->evicted_mask >> t & 1)) by = token_meta->positions[t];
    for (t = 0; t < b->n_packed; t++)
        token_meta->positions[t] =
            (uint16_t)(token_meta->positions[t] > by ? token_meta->positions[t] - by : 0);
    b->start += by;
}

/* Moves the first `count` tokens that block i + 1 still holds to block i. If block i + 1 is empty then, it is
 * freed. */
static void tkvi_join_blocks(tkv_cache *kv, int seq, int layer, int i, int count) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkv_config *cfg = &kv->tables.cfg;
    const tkvi_simd_ops *help = kv->kernels->simd_ops;
    tkvi_block *a = &kv->pool.block[ids[i]], *b = &kv->pool.block[ids[i + 1]];
    const uint64_t here = tkvi_used_mask(kv, list, ids, i), left = tkvi_used_mask(kv, list, ids, i + 1);
    const uint64_t there = tkvi_first_bits(left, count);
    const size_t dk = (size_t)cfg->model.head_dim, dv = (size_t)cfg->model.v_head_dim;
    float *k = kv->recode, *v = k + tkvi_round_up(cfg->model.head_dim, 16) * TKVI_BLOCK;
    uint8_t *to = tkvi_block_bytes(&kv->pool, a);
    const uint8_t *from = tkvi_block_bytes(&kv->pool, b);
    int h;
    for (h = 0; h < cfg->model.n_kv_heads; h++) {
        const tkvi_record *r = &kv->tables.layout[a->layout].record[h];
        const tkvi_record *s = &kv->tables.layout[b->layout].record[h];
        int n = tkvi_values_of(&r->k, help, to + r->at, here, k, dk);
        (void)tkvi_values_of(&r->v, help, to + r->at + r->v_at, here, v, dv);
        (void)tkvi_values_of(&s->k, help, from + s->at, there, k + (size_t)n * dk, dk);
        n += tkvi_values_of(&s->v, help, from + s->at + s->v_at, there, v + (size_t)n * dv, dv);
        tkvi_encode_record(kv, layer, h, r, a->start, n, to + r->at);
    }
    tkvi_align_steps(kv, ids[i], ids[i + 1]);
    a->n_packed = (int16_t)tkvi_move_token_meta(kv, ids[i], 0, ids[i], here, a->start);
    a->n_packed = (int16_t)tkvi_move_token_meta(kv, ids[i], a->n_packed, ids[i + 1], there, a->start);
    a->evicted_mask = kv->pool.token_meta[ids[i]].anchored_mask;
    tkvi_forget_copies(kv, seq, layer, a->start);
    tkvi_forget_copy(&kv->pool, ids[i]);
    kv->merged++;
    if (there == left) {
        tkvi_unlist(kv, seq, layer, i + 1);
        return;
    }
    b->evicted_mask |= there;
    tkvi_forget_copies(kv, seq, layer, b->start); /* the block begins later now, and has other tokens */
    tkvi_forget_copy(&kv->pool, ids[i + 1]);
    tkvi_begin_later(kv, list, ids, i + 1);
}

/* After an eviction: frees empty blocks and merges neighbours. press: as in tkvi_may_join. */
static void tkvi_compact_blocks(tkv_cache *kv, int seq, int layer, int press) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, n;
    for (i = 0; i + 1 < list->n; i++)
        if (kv->pool.block[ids[i]].refs == 1 && !tkvi_used_mask(kv, list, ids, i) &&
            tkvi_free_block(kv, seq, layer, i))
            i--;
    for (i = list->sinks; i + 1 < list->n; i++)
        while (i + 1 < list->n && (n = tkvi_may_join(kv, layer, list, ids, i, press)) > 0)
            tkvi_join_blocks(kv, seq, layer, i, n);
}

/* >>the choice of victims. Arrays over the tokens of a list that a policy may choose, oldest first, in
 * kv->choice. */
typedef struct tkvi_choice {
    uint64_t *pinned, *victims; /* bit masks over the tokens */
    int *position;
    float *value, *score; /* value: what the policy needs to see; score: its result, low ones are evicted */
    signed char *priority;
    int n; /* tokens */
} tkvi_choice;

static tkvi_choice tkvi_choice_of(const tkv_cache *kv) {
    const size_t blocks = kv->choice_cap, tokens = blocks * TKVI_BLOCK;
    tkvi_choice c;
    c.pinned = (uint64_t *)(void *)kv->choice_space;
    c.victims = c.pinned + blocks;
    c.position = (int *)(void *)(c.victims + blocks);
    c.value = (float *)(void *)(c.position + tokens);
    c.score = c.value + tokens;
    c.priority = (signed char *)(void *)(c.score + tokens);
    c.n = 0;
    return c;
}

/* Decodes the keys of the tokens in the mask `there` of a block, for one head. Keys of an offloaded block that
 * cannot be read are zeros: nothing is known of them. */
static void tkvi_keys_of(const tkv_cache *kv, uint32_t id, int head, uint64_t there, float *out) {
    const size_t dim = (size_t)kv->tables.cfg.model.head_dim;
    const tkvi_record *r = &kv->tables.layout[kv->pool.block[id].layout].record[head];
    const uint8_t *bytes;
    tkvi_fetch_buffer room;
    room.key = TKVI_NIL;
    if (tkvi_side_bytes(kv, id, head, TKV_K, &room, &bytes))
        memset(out, 0, (size_t)tkvi_bits_in(there) * dim * sizeof *out);
    else (void)tkvi_values_of(&r->k, kv->kernels->simd_ops, bytes, there, out, dim);
}

/* Norms of the keys of the tokens in the mask `there` of a block, each the mean of the KV heads. */
static void tkvi_block_norms(const tkv_cache *kv, uint32_t id, uint64_t there, float *out) {
    const int heads = kv->tables.cfg.model.n_kv_heads, dim = kv->tables.cfg.model.head_dim;
    int h, t, n = tkvi_bits_in(there);
    memset(out, 0, (size_t)n * sizeof *out);
    for (h = 0; h < heads; h++) {
        tkvi_keys_of(kv, id, h, there, kv->recode);
        for (t = 0; t < n; t++) out[t] += (float)(tkvi_key_norm(kv->recode + t * dim, dim) / heads);
    }
}

/* KeyDiff scores of a layer's n keys, decoded block by block. The formula is that of tkvi_score_keydiff. */
static void tkvi_differing(const tkv_cache *kv, int seq, int layer, float *out, int n) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int heads = kv->tables.cfg.model.n_kv_heads, dim = kv->tables.cfg.model.head_dim;
    int h, i, t, pass, count, at;
    memset(out, 0, (size_t)n * sizeof *out);
    for (h = 0; h < heads; h++) {
        double anchor[TKV_MAX_HEAD_DIM], length = 0.0;
        memset(anchor, 0, sizeof anchor);
        for (pass = 0; pass < 2; pass++) {
            for (i = 0, at = 0; i < list->n; i++, at += count) {
                const uint64_t there = tkvi_choosable_mask(kv, list, ids, layer, i);
                count = tkvi_bits_in(there);
                tkvi_keys_of(kv, ids[i], h, there, kv->recode);
                for (t = 0; t < count; t++)
                    if (pass)
                        out[at + t] -=
                            tkvi_key_cosine(kv->recode + t * dim, anchor, length, dim) / (float)heads;
                    else tkvi_add_direction(kv->recode + t * dim, dim, anchor);
            }
            length = tkvi_anchor_length(anchor, dim);
        }
    }
}

/* Tokens that an eviction to free bytes spares, although the policy would evict them. */
typedef struct tkvi_spared {
    int outside; /* 1: spares offloaded and discarded tokens, as they take bytes only in the index */
    const tkvi_tier_spec *rule; /* dry run: blocks that it may offload count as offloaded; NULL: none */
    int vacant; /* dry run with a rule: blocks that end at or before this count as discarded */
} tkvi_spared;

/* 1 if block i is offloaded or discarded, or counts as such in a dry run. */
static int tkvi_has_no_slot(const tkv_cache *kv, int seq, int layer, int i, const tkvi_spared *s) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    if (tkvi_is_offloaded(&kv->pool.block[ids[i]])) return 1;
    if (!s || !s->rule || i < list->sinks) return 0;
    return tkvi_block_end(kv, list, ids, i) <= s->vacant ||
           (tkvi_can_store(kv) && tkvi_can_offload(kv, seq, layer, i, s->rule));
}

/* Builds the view of a layer's tokens for a policy. p: its pinned, priority and scores are indexed by position, or
 * NULL. needs: bits TKVI_NEEDS_. */
static tkv_evict_view tkvi_build_view(tkv_cache *kv, int seq, int layer, const tkv_evict_params *p, int needs,
                                      const tkvi_spared *spared, tkvi_choice *c) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkv_evict_view v;
    int i, t, newest = tkvi_token_score_newest(kv, list, ids);
    *c = tkvi_choice_of(kv);
    memset(c->pinned, 0, (size_t)list->n * sizeof *c->pinned);
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        const uint64_t pinned = tkvi_pinned_in(kv, list, ids[i]);
        const uint64_t there = tkvi_choosable_mask(kv, list, ids, layer, i);
        const int first = c->n,
                  stays = spared && spared->outside && tkvi_has_no_slot(kv, seq, layer, i, spared);
        float mass[TKVI_BLOCK];
        kv->pool.token_meta[ids[i]].temporary_mask &= pinned; /* else a merge could revive ended pins */
        tkvi_decay_to_now(kv, ids[i], list->len, newest, mass);
        if (needs & TKVI_NEEDS_NORMS && !tkvi_keeps_norms(kv))
            tkvi_block_norms(kv, ids[i], there, c->value + c->n);
        for (t = 0; t < TKVI_BLOCK; t++) {
            int at;
            if (!(there >> t & 1)) continue;
            at = tkvi_slot_position(kv, ids[i], t);
            c->position[c->n] = at;
            if (needs & TKVI_NEEDS_NORMS && tkvi_keeps_norms(kv))
                c->value[c->n] = tkvi_from_bits(kv->pool.token_meta[ids[i]].scores[t]);
            if (!(needs & TKVI_NEEDS_NORMS)) c->value[c->n] = p && p->scores ? p->scores[at] : mass[t];
            c->priority[c->n] = (signed char)(p && p->priorities ? p->priorities[at] : 0);
            if (b->refs > 1 || stays || pinned >> t & 1 ||
                (p && p->pinned_mask && tkvi_has(p->pinned_mask, at)))
                tkvi_mark(c->pinned, c->n);
            c->n++;
        }
        if (needs & TKVI_NEEDS_USER_SCORES && !(p && p->scores)) /* importance as tkv_get_importance has it */
            tkvi_importance_of_block(kv, c->position + first, c->value + first, c->n - first, list->len);
    }
    memset(&v, 0, sizeof v);
    v.n = c->n;
    v.positions = c->position;
    v.pinned_mask = c->pinned;
    v.priorities = c->priority;
    v.total_scores = v.prompt_scores = v.last_scores = v.norms = v.low_counts = v.user_scores = c->value;
    return v;
}

/* Number of tokens that a layer may keep, if layers keep `keep` on average. Some policies give each layer a budget
 * of its own. */
static int tkvi_layer_keep(const tkv_cache *kv, int seq, int layer, const tkv_evict_config *cfg, int keep) {
    int budget[TKVI_MAX_LAYERS], i, n = 0, mine = 0;
    tkv_evict_budget b;
    if (tkvi_evict_row_of(cfg->policy)->shape == TKV_EVICT_UNIFORM) return keep;
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++) {
        if (i == layer) mine = n;
        n += kv->tables.plan[i].stored_layer == i;
    }
    memset(&b, 0, sizeof b);
    b.shape = tkvi_evict_row_of(cfg->policy)->shape;
    b.n_layers = n;
    b.total = (int64_t)n * keep;
    b.n_tokens = tkvi_list_of(kv, seq, layer)->len;
    b.window = cfg->recent_tokens;
    return tkv_split_evict_budget(&b, budget) ? keep : budget[mine];
}

/* Marks the victims of a choice in the victim masks of their blocks (victim_mask). */
static void tkvi_note_victims(tkv_cache *kv, int seq, int layer, const tkvi_choice *c) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, t, at = 0;
    for (i = 0; i < list->n; i++) {
        const uint64_t there = tkvi_choosable_mask(kv, list, ids, layer, i);
        uint64_t *chosen = &kv->pool.token_meta[ids[i]].victim_mask;
        *chosen = 0;
        for (t = 0; t < TKVI_BLOCK; t++)
            if (there >> t & 1 && tkvi_has(c->victims, at++)) *chosen |= (uint64_t)1 << t;
    }
}

/* Evicts the tokens in the victim masks, then compacts the blocks and emits the event. Cannot fail. */
static void tkvi_apply_eviction(tkv_cache *kv, int seq, int layer, int press) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int *position = tkvi_choice_of(kv).position;
    int i, t, gone = 0;
    for (i = 0; i < list->n; i++) {
        uint64_t *chosen = &kv->pool.token_meta[ids[i]].victim_mask;
        for (t = 0; t < TKVI_BLOCK; t++)
            if (*chosen >> t & 1) position[gone++] = tkvi_slot_position(kv, ids[i], t);
        kv->pool.block[ids[i]].evicted_mask |= *chosen;
        *chosen = 0;
    }
    kv->evicted += (uint64_t)gone;
    tkvi_compact_blocks(kv, seq, layer, press);
    if (gone) tkvi_emit_evicted(kv, seq, layer, position, gone);
}

/* Chooses victims so that at most `keep` tokens of a layer stay; pinned and spared tokens can make it more. p: as
 * in tkv_evict, or NULL. Fails if a score is not a finite number. */
static tkv_status tkvi_choose(tkv_cache *kv, int seq, int layer, const tkv_evict_config *cfg,
                              const tkv_evict_params *p, int keep, const tkvi_spared *spared,
                              tkvi_choice *c) {
    const int attention = TKVI_NEEDS_TOTAL_SCORES | TKVI_NEEDS_PROMPT_SCORES | TKVI_NEEDS_LAST_SCORES;
    const int needs = p && p->scores ? TKVI_NEEDS_USER_SCORES : tkvi_evict_needs(cfg->policy);
    tkv_evict_view v = tkvi_build_view(kv, seq, layer, p, needs, spared, c);
    tkv_evict_config by = *cfg;
    tkv_status st;
    if (p && p->scores && !(tkvi_evict_needs(cfg->policy) & attention)) by.policy = TKV_EVICT_SCORES;
    keep = tkvi_max(1, keep - (tkvi_count(kv, seq, layer) - c->n)); /* anchors stay */
    if (needs & TKVI_NEEDS_KEYS) tkvi_differing(kv, seq, layer, c->score, c->n);
    else if ((st = tkvi_score_tokens(&by, &v, c->score)) != TKV_OK) return st;
    return tkvi_select_victims(cfg, &v, c->score, keep, c->victims, NULL);
}

/* tkvi_choose by cfg.evict. If that fails (scores of a user may be NaN), it chooses the oldest tokens. Cannot
 * fail. */
static void tkvi_choose_or_oldest(tkv_cache *kv, int seq, int layer, int keep, const tkvi_spared *spared,
                                  tkvi_choice *c) {
    tkv_evict_config oldest = kv->tables.cfg.evict;
    if (tkvi_choose(kv, seq, layer, &oldest, NULL, keep, spared, c) == TKV_OK) return;
    oldest.policy = TKV_EVICT_SLIDING;
    (void)tkvi_choose(kv, seq, layer, &oldest, NULL, keep, spared, c);
}

/* Evicts by cfg.evict, or the oldest tokens, until at most `keep` stay. press: as in tkvi_may_join. */
static void tkvi_evict_or_oldest(tkv_cache *kv, int seq, int layer, int keep, const tkvi_spared *spared,
                                 int press) {
    tkvi_choice c;
    tkvi_choose_or_oldest(kv, seq, layer, keep, spared, &c);
    tkvi_note_victims(kv, seq, layer, &c);
    tkvi_apply_eviction(kv, seq, layer, press);
}

/* Called before n more tokens. If the layer would exceed its share of cfg.evict.keep_tokens, it evicts the excess, at
 * least a batch (tkvi_evict_due). */
static void tkvi_evict_due_in(tkv_cache *kv, int seq, int layer, int n) {
    const tkv_config *cfg = &kv->tables.cfg;
    tkv_evict_config full;
    int count, due, keep, least;
    if (!TKVI_HAS_EVICT || !cfg->evict.policy || !cfg->evict.keep_tokens ||
        kv->tables.plan[layer].stored_layer != layer)
        return;
    count = tkvi_count(kv, seq, layer);
    keep = tkvi_layer_keep(kv, seq, layer, &cfg->evict, cfg->evict.keep_tokens);
    due = tkvi_evict_due(&cfg->evict, count, n, keep);
    (void)tkvi_evict_fill(&cfg->evict, &full);
    least = tkvi_min(full.sink_tokens + 1, keep / 2); /* the sinks stay, even if many tokens come at once */
    if (due > 0) tkvi_evict_or_oldest(kv, seq, layer, tkvi_max(count - due, least), NULL, 0);
}

/* >>eviction as a reclaim stage, when no level fits the budget */
/* Mask of the pinned tokens of block i that are live. Pins of evicted tokens do not count. */
static uint64_t tkvi_held_in(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return tkvi_pinned_in(kv, list, ids[i]) & tkvi_live_mask_in(kv, list, ids, i);
}

/* Number of tokens of a list that stay in any case, an upper bound. It counts all n_anchors, because blocks that
 * are recoded make anchors. */
static int tkvi_n_staying(const tkv_cache *kv, int seq, int layer, const tkvi_spared *spared) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkv_evict_config cfg;
    int64_t n;
    int i;
    (void)tkvi_evict_fill(&kv->tables.cfg.evict, &cfg);
    n = (int64_t)cfg.sink_tokens + 2 * (int64_t)cfg.recent_tokens +
        TKVI_BLOCK; /* twice: rules/evict.h protects recent tokens in half of `keep` */
    n += kv->tables.cfg.tiers.n_anchors;
    for (i = 0; i < list->n; i++)
        n += tkvi_bits_in(spared->outside && tkvi_has_no_slot(kv, seq, layer, i, spared)
                              ? tkvi_live_mask_in(kv, list, ids, i)
                              : tkvi_held_in(kv, list, ids, i));
    return (int)(n < TKVI_FOREVER ? n : TKVI_FOREVER);
}

/* Evicts a batch of tokens from the list that can spare the most. outside_too: 1 evicts offloaded tokens as well.
 * 0: no list can spare any. */
static int tkvi_evict_batch(tkv_cache *kv, int outside_too) {
    const tkv_config *cfg = &kv->tables.cfg;
    int seq, layer, most = 0, of_seq = 0, of_layer = 0, count = 0;
    tkvi_spared spared;
    memset(&spared, 0, sizeof spared);
    spared.outside = !outside_too;
    for (seq = 0; seq < cfg->limits.max_seqs && cfg->evict.policy; seq++)
        for (layer = 0; layer < cfg->model.n_layers && !kv->seq[seq].in_step; layer++) {
            const int n = tkvi_list_of(kv, seq, layer)->n ? tkvi_count(kv, seq, layer) : 0;
            const int spare = n ? n - tkvi_n_staying(kv, seq, layer, &spared) : 0;
            if (spare <= most) continue;
            most = spare;
            of_seq = seq;
            of_layer = layer;
            count = n;
        }
    if (most > 0)
        tkvi_evict_or_oldest(kv, of_seq, of_layer,
                             count - tkvi_min(most, cfg->evict.batch ? cfg->evict.batch : 64), &spared, 0);
    return most > 0;
}

#endif /* TKVI_RECLAIM_EVICT_TOKENS_H */
