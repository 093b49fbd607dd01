/*
 * persist/load.h - tkv_seq_load, tkv_seq_load_from: read a saved sequence (persist/saved.h) into an empty one, or a
 * whole cache into a new one (persist/load_cache.h).
 *
 *     verify     frame, checksums, model, then every number of every list and table; nothing has changed until then
 *     provide    versions for the tables, entries, slots, states; a failure changes no token
 *     place      tables, blocks, entries, states; tkv_check's rules for lists have the last word
 */
#ifndef TKVI_PERSIST_LOAD_H
#define TKVI_PERSIST_LOAD_H

#include "persist/load_cache.h"
#include "step/fork.h"

enum { TKVI_STATEFUL_BY_LOAD = 2 }; /* of is_stateful, while a load places states */

static tkv_status tkvi_place_states(tkvi_loader *l) {
    const tkvi_section s = tkvi_loaded_section(l, TKVI_SAVED_STATES, 0);
    size_t at = 0;
    tkv_status st = TKV_OK;
    while (!st && at < s.n) {
        const tkvi_saved_state state = tkvi_next_saved_state(&s, &at);
        const int was_stateful = l->kv->states.is_stateful[state.layer];
        st = tkv_seq_put_state(l->kv, l->seq, state.layer, state.n_tokens, state.bytes, state.size);
        if (!st && !was_stateful) l->kv->states.is_stateful[state.layer] = TKVI_STATEFUL_BY_LOAD;
    }
    return st;
}

/* Layers that a refused load made stateful are not, for other sequences have no state of them. */
static void tkvi_settle_states(tkvi_states *s, int is_loaded) {
    int i;
    for (i = 0; i < s->n_layers; i++) {
        if (s->is_stateful[i] != TKVI_STATEFUL_BY_LOAD) continue;
        s->is_stateful[i] = (uint8_t)is_loaded;
        s->n_stateful -= !is_loaded;
    }
    for (i = 0; i < s->n_lists && !is_loaded; i++) tkvi_mark_states(s, i);
}

static tkv_status tkvi_place_file(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    const int had_loaded = kv->budget.has_loaded, seq = l->p->seq;
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        if (kv->tables.plan[layer].stored_layer == layer && !tkvi_place_layer(l, layer))
            st = tkvi_refuse_damaged_block(l, layer);
    tkvi_place_shifts(l);
    tkvi_count_late_blocks(kv, seq);
    kv->budget.has_loaded = 1;
    if (!st) st = tkvi_check_placed(l);
    if (!st) st = tkvi_place_states(l);
    if (st) {
        kv->budget.has_loaded = had_loaded;
        tkvi_clear_seq(kv, seq);
    }
    tkvi_settle_states(&kv->states, !st);
    return st;
}

/* Provides all that the file needs. On failure no token has changed. */
static tkv_status tkvi_provide_file(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    tkv_status st = TKVI_HAS_ATTACH && l->p->attach ? tkvi_provide_attached(l) : TKV_OK;
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++)
        if (kv->tables.plan[layer].stored_layer == layer && tkvi_table_parts(kv, layer))
            st = tkvi_provide_tables(l, layer);
    if (!st) st = tkvi_provide_entries(kv, l->p->seq, tkvi_count_saved, l, "no memory to load sequence");
    return st;
}

/* A layer without a table learns from loaded tokens as from appended ones: a talk that is loaded again and again gets
 * its first table as early. */
static void tkvi_count_loaded_tokens(tkv_cache *kv, int seq) {
    int layer;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && kv->stats.tokens_seen; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (kv->tables.current_version[layer] < 0)
            tkvi_add_to_count(&kv->stats.tokens_seen[layer], list->len - list->expired);
    }
}

/* Loads the sequence of a verified file. */
static tkv_status tkvi_load_seq(tkvi_loader *l) {
    tkv_cache *kv = l->kv;
    const int seq = l->p->seq;
    tkv_status st;
    kv->seq[seq].used = ++kv->call.clock;
    st = tkvi_provide_file(l);
    if (!st) st = tkvi_place_file(l);
    if (!st) tkvi_take_tokens(l);
    tkvi_give_back(&l->from.scratch, 0);
    tkvi_release_attached(l, st); /* the caller may free the bytes now */
    tkvi_release_unused(kv, seq);
    tkvi_shrink_index(kv, seq);
    if (st) return st;
    tkvi_remember_turns(kv, seq);
    tkvi_count_loaded_tokens(kv, seq);
    l->info.n_tokens = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    return TKV_OK;
}

/* >>calls */
/* bytes NULL: a callback gives them. */
static tkv_status tkvi_check_load(tkv_cache *kv, const tkv_load_params *p, const void *bytes, size_t size) {
    const int is_cache = p->seq == TKV_ALL_SEQS;
    int layer, seq;
    if (!is_cache && !tkvi_has_seq(kv, p->seq)) return tkvi_refuse_seq(kv, p->seq);
    if ((p->model_bytes && !p->model) || p->token_capacity < 0)
        return tkvi_fail(kv, TKV_ERR_ARG, "model is missing, or token_capacity is below 0", 0, NULL);
    if (p->attach && !TKVI_HAS_ATTACH) return tkvi_refuse_left_out(kv, "TKV_NO_OFFLOAD leaves out attach");
    if (p->attach && !bytes) return tkvi_fail(kv, TKV_ERR_ARG, "attached bytes must be in memory", 0, NULL);
    if (p->attach && (uintptr_t)bytes % 64)
        return tkvi_fail(kv, TKV_ERR_ARG, "attached bytes must begin at a multiple of 64", 0, NULL);
    if (p->attach && size / 64 > 0xffffffffu)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "an attached file has at most 256 GiB", 0, NULL);
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        if (kv->seq[seq].in_step)
            return tkvi_fail(kv, TKV_ERR_STATE, "a step is open in sequence", seq,
                             "; commit or abort it first");
    if (is_cache)
        return tkvi_is_new_cache(kv)
                   ? TKV_OK
                   : tkvi_fail(kv, TKV_ERR_STATE,
                               "a whole cache is loaded into a new one, just after its creation", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_list_of(kv, p->seq, layer)->len)
            return tkvi_fail(kv, TKV_ERR_STATE, "reset it before a load: tokens are in sequence", p->seq, "");
    if (TKVI_HAS_STATES && kv->states.list[p->seq].n)
        return tkvi_fail(kv, TKV_ERR_STATE, "reset it before a load: states are in sequence", p->seq, "");
    return TKV_OK;
}

/* Loads from the bytes or the callback of l->from. */
static tkv_status tkvi_load(tkvi_loader *l, tkv_cache *kv, const tkv_load_params *p, size_t size,
                            tkv_load_info *out) {
    tkv_status st = tkvi_check_load(kv, p, l->from.bytes, size);
    if (st) return st;
    l->kv = l->from.kv = kv;
    l->p = p;
    l->is_cache = p->seq == TKV_ALL_SEQS;
    l->from.scratch = tkvi_scratch_of(kv, p->scratch, p->scratch_bytes);
    if (!l->from.bytes)
        st = tkvi_take_scratch(&l->from.scratch, tkvi_room_for_piece(kv) + 128, &l->from.room);
    if (!st) st = tkvi_verify_file(l, size);
    /* a whole cache in memory needs no room: it may fill its budget */
    if (!st && l->from.bytes && !l->is_cache)
        st = tkvi_take_scratch(&l->from.scratch, tkvi_room_for_piece(kv), &l->from.room);
    if (!st) st = l->is_cache ? tkvi_load_cache(l) : tkvi_load_seq(l);
    tkvi_give_back(&l->from.scratch, 0);
    if (st) return st;
    if (out) *out = l->info;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_seq_load(tkv_cache *kv, const tkv_load_params *p, const void *bytes, size_t size,
                                tkv_load_info *out) {
    tkvi_loader l;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    if (!kv || !p || !bytes) return tkvi_refuse_missing(kv, "the parameters or bytes are missing");
    memset(&l, 0, sizeof l);
    l.from.bytes = (const uint8_t *)bytes;
    return tkvi_load(&l, kv, p, size, out);
}

TKV_API tkv_status tkv_seq_load_from(tkv_cache *kv, const tkv_load_params *p, size_t size,
                                     tkv_read_bytes read, void *user, tkv_load_info *out) {
    tkvi_loader l;
    if (!TKVI_HAS_SAVE) return tkvi_refuse_left_out(kv, "TKV_NO_SAVE leaves this out");
    if (!kv || !p || !read) return tkvi_refuse_missing(kv, "the parameters or read are missing");
    memset(&l, 0, sizeof l);
    l.from.read = read;
    l.from.user = user;
    return tkvi_load(&l, kv, p, size, out);
}

#endif /* TKVI_PERSIST_LOAD_H */
