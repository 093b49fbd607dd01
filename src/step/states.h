/*
 * step/states.h - tkv_seq_put_state and the calls that give states back. A state is what a layer without keys knows of
 * the tokens so far: of a recurrence, of a sliding window. It is opaque. A sequence can be cut and forked at a position
 * only where all such layers have one.
 *
 *     tokens         0 ................ 2048 ......... 3072 ..... 3584 .. 3840 . 3968 4032
 *     states of                           x              x          x       x      x    x     layer 0
 *                                         x              x          x       x      x    x     layer 1
 *     cut to 3700    tkv_seq_find_state says 3584: truncate to it, get the states, compute 3584 .. 3699 again
 *
 * A new state is put in these steps:
 *     validate    refuses bad arguments; nothing has changed then
 *     room        within limits.state_bytes and within the budget: spare states go first (cache/states.h), then tokens
 *                 are coded again and offloaded (tkvi_provide_bytes). No token is discarded or evicted.
 *     take over   in the place of a refusal for lack of room: the new state takes the memory of the layer's newest
 *                 older one. So a full budget still gets new states, layer by layer. Between the first and the last
 *                 layer no position is complete.
 *     store       copies the bytes; thins the sequence to limits.max_states positions beside one
 *                 that is not complete yet; cannot fail
 *
 * tkv_seq_save saves them with the sequence.
 */
#ifndef TKVI_STEP_STATES_H
#define TKVI_STEP_STATES_H

#include "step/sequence.h"

/* Provides a list for n states of a sequence. On failure no state has changed, but spare ones may be thinned. */
static tkv_status tkvi_provide_state_list(tkv_cache *kv, int seq, int n) {
    const uint32_t cap = kv->states.list[seq].cap;
    size_t needed = 0;
    if ((uint32_t)n <= cap) return TKV_OK;
    if (!kv->pool.keep_all &&
        !tkvi_provide_bytes(kv, tkvi_growth_bytes(cap, n, sizeof(tkvi_held_state)), &needed))
        return tkvi_refuse_over_budget(kv, needed);
    if (tkvi_grow_state_list(&kv->states, seq, n)) return TKV_OK;
    return tkvi_refuse_no_memory(kv, "no memory for the list of", n, " states");
}

/* Takes the newest state of a layer from a sequence, for one that has seen n_tokens, more than it. NULL: there is none
 * that this sequence holds alone and that has the bytes of `size`. */
static tkvi_state *tkvi_take_over(tkv_cache *kv, int seq, int layer, int n_tokens, size_t size) {
    tkvi_states *s = &kv->states;
    tkvi_state_list *list = &s->list[seq];
    tkvi_state *state;
    int i = list->n;
    while (i > 0 && list->held[i - 1].state->layer != layer) i--;
    if (!i--) return NULL;
    state = list->held[i].state;
    if (state->n_tokens >= n_tokens || state->n_holders > 1) return NULL;
    if (tkvi_state_bytes(state->size) != tkvi_state_bytes(size)) return NULL;
    tkvi_set_spare(s, &list->held[i], 0);
    state->n_holders = 0;
    list->n--;
    memmove(list->held + i, list->held + i + 1, (size_t)(list->n - i) * sizeof *list->held);
    tkvi_mark_states(s, seq);
    s->n_thinned++;
    state->size = size;
    return state;
}

/* Thins states until `bytes` more fit into limits.state_bytes. Returns 0 if that cannot be; then none is thinned. */
static int tkvi_fit_states(tkvi_states *s, size_t bytes) {
    TKVI_ASSERT(s->held_bytes <= s->limit);
    if (bytes > s->limit - (s->held_bytes - s->spare_bytes)) return 0;
    while (bytes > s->limit - s->held_bytes) {
        const int is_thinned = tkvi_thin_next(s, 1);
        TKVI_ASSERT(is_thinned); /* a spare state has newer ones in its list */
        (void)is_thinned;
    }
    return 1;
}

static tkv_status tkvi_refuse_state_bytes(tkv_cache *kv, size_t bytes) {
    tkvi_text t = tkvi_text_begin(kv->call.error, sizeof kv->call.error);
    tkvi_append_text(&t, "a state of ");
    tkvi_append_digits(&t, (uint64_t)bytes);
    tkvi_append_text(&t, " bytes does not fit into limits.state_bytes beside the newest ones, which take ");
    tkvi_append_digits(&t, (uint64_t)(kv->states.held_bytes - kv->states.spare_bytes));
    return TKV_ERR_CAPACITY;
}

/* 1 if every stateful layer has a state after n_tokens. */
static int tkvi_has_position(const tkvi_states *s, int seq, int n_tokens) {
    return tkvi_n_states_up_to(&s->list[seq], n_tokens) - tkvi_n_states_up_to(&s->list[seq], n_tokens - 1) ==
           s->n_stateful;
}

/* Provides memory for a state, and a place in the list. Returns NULL, with *why, if there is none. */
static tkvi_state *tkvi_provide_state(tkv_cache *kv, int seq, int layer, int n_tokens, size_t size,
                                      tkv_status *why) {
    tkvi_states *s = &kv->states;
    const tkvi_state_list *list = &s->list[seq];
    const size_t bytes = tkvi_state_bytes(size);
    const int fits = tkvi_fit_states(s, bytes);
    size_t needed = 0;
    tkvi_state *state;
    if (!fits ||
        !tkvi_provide_bytes(kv, bytes + tkvi_growth_bytes(list->cap, list->n + 1, sizeof(tkvi_held_state)),
                            &needed)) {
        state = tkvi_take_over(kv, seq, layer, n_tokens, size);
        if (!state) *why = fits ? tkvi_refuse_over_budget(kv, needed) : tkvi_refuse_state_bytes(kv, bytes);
        return state;
    }
    if (!tkvi_grow_state_list(s, seq, list->n + 1)) {
        *why = tkvi_refuse_no_memory(kv, "no memory for the list of", list->n + 1, " states");
        return NULL;
    }
    state = tkvi_new_state(s, size);
    if (!state) *why = tkvi_refuse_no_memory(kv, "no memory for a state of layer", layer, "");
    return state;
}

/* Checks the numbers that name a state. */
static tkv_status tkvi_check_state_name(tkv_cache *kv, int seq, int layer, int n_tokens) {
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (layer < 0 || layer >= kv->tables.cfg.model.n_layers)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no layer", layer, "");
    if (n_tokens < 1)
        return tkvi_fail(kv, TKV_ERR_ARG, "n_tokens is", n_tokens, "; a state has seen at least one token");
    if (n_tokens > kv->tables.cfg.limits.max_tokens)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "n_tokens is", n_tokens, ", more than max_tokens");
    return TKV_OK;
}

TKV_API tkv_status tkv_seq_put_state(tkv_cache *kv, int seq, int layer, int n_tokens, const void *bytes,
                                     size_t size) {
    tkvi_state *state;
    tkv_status st = tkvi_check_state_name(kv, seq, layer, n_tokens);
    int at;
    if (!TKVI_HAS_STATES) return tkvi_refuse_left_out(kv, "TKV_NO_STATES leaves this out");
    if (st) return st;
    if (!bytes || !size) return tkvi_fail(kv, TKV_ERR_ARG, "the bytes of the state are missing", 0, NULL);
    if (kv->pool.keep_all && !kv->states.region)
        return tkvi_fail(kv, TKV_ERR_CAPACITY,
                         "set limits.state_bytes: in place, states have memory of their own", 0, NULL);
    if (size > (size_t)-1 / 2)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "size is more than half of what this machine can address", 0,
                         NULL);
    kv->seq[seq].used = ++kv->call.clock;
    state = tkvi_find_state(&kv->states.list[seq], layer, n_tokens, &at);
    if (state && state->n_holders == 1 && tkvi_state_bytes(state->size) == tkvi_state_bytes(size)) {
        state->size = size;
        memcpy(tkvi_bytes_of_state(state), bytes, size);
        return tkvi_ok(kv);
    }
    state = tkvi_provide_state(kv, seq, layer, n_tokens, size, &st);
    if (!state) tkvi_shrink_states(kv, seq);
    tkvi_trim(&kv->pool);
    if (!state) return st;
    memcpy(tkvi_bytes_of_state(state), bytes, size);
    state->layer = layer;
    state->n_tokens = n_tokens;
    tkvi_list_state(&kv->states, seq, state);
    tkvi_thin_list(&kv->states, seq,
                   kv->tables.cfg.limits.max_states + !tkvi_has_position(&kv->states, seq, n_tokens));
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_seq_get_state(const tkv_cache *kv, int seq, int layer, int n_tokens, void *buf,
                                     size_t size, size_t *needed) {
    const tkvi_state *state;
    int at;
    if (!TKVI_HAS_STATES) return TKV_ERR_UNSUPPORTED;
    if (!tkvi_has_seq(kv, seq) || layer < 0 || layer >= kv->tables.cfg.model.n_layers || n_tokens < 1)
        return TKV_ERR_ARG;
    state = tkvi_find_state(&kv->states.list[seq], layer, n_tokens, &at);
    if (!state) return TKV_ERR_RANGE;
    if (needed) *needed = state->size;
    if (!buf) return TKV_OK;
    if (size < state->size) return TKV_ERR_CAPACITY;
    memcpy(buf, tkvi_bytes_of_state(state), state->size);
    return TKV_OK;
}

TKV_API int tkv_seq_find_state(const tkv_cache *kv, int seq, int n_tokens) {
    tkvi_state_position at;
    const tkvi_state_list *list;
    if (!tkvi_has_seq(kv, seq) || (n_tokens < 0 && n_tokens != TKV_UNLIMITED)) return 0;
    if (n_tokens == TKV_UNLIMITED) n_tokens = TKVI_FOREVER;
    if (!TKVI_HAS_STATES || !kv->states.n_stateful)
        return tkvi_min(n_tokens, tkv_get_length(kv, seq, TKV_ALL_LAYERS));
    list = &kv->states.list[seq];
    at = tkvi_end_position(list);
    while (tkvi_step_back(list, &at))
        if (at.n_tokens <= n_tokens && tkvi_is_complete(&kv->states, &at)) return at.n_tokens;
    return 0;
}

TKV_API tkv_status tkv_seq_list_states(const tkv_cache *kv, int seq, int layer, int *n_tokens, int capacity,
                                       int *n) {
    const tkvi_state_list *list;
    int first, end, count = 0;
    if (!TKVI_HAS_STATES) return TKV_ERR_UNSUPPORTED;
    if (!tkvi_has_seq(kv, seq) || !n || capacity < 0 || (capacity > 0 && !n_tokens)) return TKV_ERR_ARG;
    if (layer != TKV_ALL_LAYERS && (layer < 0 || layer >= kv->tables.cfg.model.n_layers)) return TKV_ERR_ARG;
    list = &kv->states.list[seq];
    for (first = 0; first < list->n; first = end) {
        const int position = list->held[first].state->n_tokens;
        int i, has_layer = 0;
        end = tkvi_n_states_up_to(list, position);
        for (i = first; i < end; i++) has_layer |= list->held[i].state->layer == layer;
        if (layer == TKV_ALL_LAYERS ? end - first < kv->states.n_stateful : !has_layer) continue;
        if (count < capacity) n_tokens[count] = position;
        count++;
    }
    *n = count;
    return TKV_OK;
}

#endif /* TKVI_STEP_STATES_H */
