/*
 * cache/states.h - the memory of states: pieces of the caller's that belong to a layer and to a number of tokens of a
 * sequence (step/states.h). It says which of them are spare, and thins them out.
 *
 *     list of a sequence    [64: layer 0, layer 1][128: layer 0, layer 1] ... [960: layer 0, layer 1][1024: layer 0]
 *                            spare                 spare                       newest complete one    newest of layer 0
 *
 * A position is the number of tokens that a state has seen. It is complete if every stateful layer has a state there.
 * The newest complete position and the newest state of each layer stay. All other positions are spare. A fork holds
 * the same states, so a state is spare when it is spare for all its holders.
 *
 * Thinning takes the spare position that is missed least: the one whose gap, once it is gone, is smallest relative to
 * the distance of that gap from the newest position. So the distances of those that stay grow like powers, and going
 * back by n tokens costs the recomputation of a share of n. A position that some layer has passed without a state goes
 * first, because it can never be complete.
 *
 * In place, states lie in a region of cfg.limits.state_bytes, each in the first gap that fits. If the gaps together
 * would do, the states move to the front.
 */
#ifndef TKVI_CACHE_STATES_H
#define TKVI_CACHE_STATES_H

#include "cache/pool.h"

/* A state. The caller's bytes follow at the next multiple of TKVI_ALIGN. */
typedef struct tkvi_state {
    size_t size;                 /* bytes of the caller's */
    struct tkvi_state *after;    /* in place: the next one in the region */
    struct tkvi_state *next_at;  /* in place: its place after the region is compacted */
    uint32_t n_holders, n_spare; /* sequences that hold it; those for which it is spare */
    int layer, n_tokens;
} tkvi_state;

typedef struct tkvi_held_state {
    tkvi_state *state;
    int is_spare; /* for this holder; the same for all states of a position */
} tkvi_held_state;

/* The states of a sequence, by position, then by layer. */
typedef struct tkvi_state_list {
    tkvi_held_state *held; /* [cap] */
    uint32_t cap;
    int n, n_positions;
} tkvi_state_list;

typedef struct tkvi_states {
    tkvi_heap *heap;
    tkvi_state_list *list; /* [n_lists] by sequence */
    uint8_t *is_stateful;  /* [n_layers] 1: some sequence has had a state of this layer */
    int n_lists, n_layers, n_stateful, wipes_freed;
    size_t limit;       /* of held_bytes */
    size_t held_bytes;  /* of all states; one that is shared counts once */
    size_t spare_bytes; /* of those among them that thinning can free */
    uint8_t *region;    /* in place: memory of all states, else NULL */
    size_t region_bytes;
    tkvi_state *first; /* in place: the first one in the region */
    uint64_t n_thinned;
} tkvi_states;

#define TKVI_LAYER_WORDS (4096 / 64) /* bits of the most layers */

/* >>bytes */
/* Bytes that a state of this size takes. */
static size_t tkvi_state_bytes(size_t size) {
    return tkvi_align_up(tkvi_add_sizes(tkvi_align_up(sizeof(tkvi_state)), size));
}

static uint8_t *tkvi_bytes_of_state(const tkvi_state *state) {
    return (uint8_t *)(uintptr_t)state + tkvi_align_up(sizeof(tkvi_state));
}

/* Most states of a sequence in place: the position that is being put and the complete one may come on top. */
static uint32_t tkvi_most_states(const tkv_config *cfg) {
    return cfg->limits.state_bytes ? (uint32_t)(cfg->limits.max_states + 2) * (uint32_t)cfg->model.n_layers
                                   : 0;
}

/* Bytes of the region and of all lists in place. */
static size_t tkvi_states_in_place_bytes(const tkv_config *cfg) {
    const size_t list = tkvi_align_up(tkvi_multiply_sizes(tkvi_most_states(cfg), sizeof(tkvi_held_state)));
    const size_t lists = tkvi_multiply_sizes(list, (size_t)cfg->limits.max_seqs);
    return tkvi_align_up(tkvi_add_sizes(lists, cfg->limits.state_bytes));
}

/* >>the region in place */
/* Takes the first gap of the region that has this number of bytes. NULL: there is none. */
static tkvi_state *tkvi_take_gap(tkvi_states *s, size_t bytes) {
    uint8_t *at = s->region;
    tkvi_state **link = &s->first, *state;
    while (*link && (size_t)((uint8_t *)(void *)*link - at) < bytes) {
        at = (uint8_t *)(void *)*link + tkvi_state_bytes((*link)->size);
        link = &(*link)->after;
    }
    if (!*link && (size_t)(s->region + s->region_bytes - at) < bytes) return NULL;
    state = (tkvi_state *)(void *)at;
    state->after = *link;
    *link = state;
    return state;
}

/* Moves all states to the front of the region, so that there is one gap behind them. */
static void tkvi_compact_region(tkvi_states *s) {
    uint8_t *at = s->region;
    tkvi_state *state, *after, **link = &s->first;
    int seq, i;
    for (state = s->first; state; state = state->after) {
        state->next_at = (tkvi_state *)(void *)at;
        at += tkvi_state_bytes(state->size);
    }
    for (seq = 0; seq < s->n_lists; seq++)
        for (i = 0; i < s->list[seq].n; i++) s->list[seq].held[i].state = s->list[seq].held[i].state->next_at;
    for (state = s->first; state; state = after) {
        tkvi_state *to = state->next_at;
        after = state->after;
        memmove(to, state, tkvi_state_bytes(state->size));
        *link = to;
        link = &to->after;
    }
    *link = NULL;
    if (s->wipes_freed) tkvi_wipe(at, (size_t)(s->region + s->region_bytes - at));
}

static void tkvi_leave_region(tkvi_states *s, const tkvi_state *state) {
    tkvi_state **link = &s->first;
    while (*link != state) link = &(*link)->after;
    *link = state->after;
}

/* >>states and holders */
/* Gets memory for a state that no sequence holds yet. NULL: there is none. */
static tkvi_state *tkvi_new_state(tkvi_states *s, size_t size) {
    const size_t bytes = tkvi_state_bytes(size);
    tkvi_state *state, *after = NULL;
    if (s->region) {
        state = tkvi_take_gap(s, bytes);
        if (!state && s->region_bytes - s->held_bytes >= bytes) {
            tkvi_compact_region(s);
            state = tkvi_take_gap(s, bytes);
        }
        if (state) after = state->after;
    } else {
        state = (tkvi_state *)tkvi_get(s->heap, bytes);
    }
    if (!state) return NULL;
    memset(state, 0, sizeof *state);
    state->after = after;
    state->size = size;
    s->held_bytes += bytes;
    return state;
}

/* 1 if thinning can free a state. */
static int tkvi_can_thin(const tkvi_state *state) {
    return state->n_holders > 0 && state->n_spare == state->n_holders;
}

/* Adds a holder, for which the state is not spare. */
static void tkvi_hold_state(tkvi_states *s, tkvi_state *state) {
    if (tkvi_can_thin(state)) s->spare_bytes -= tkvi_state_bytes(state->size);
    state->n_holders++;
}

static void tkvi_set_spare(tkvi_states *s, tkvi_held_state *held, int is_spare) {
    tkvi_state *state = held->state;
    if (held->is_spare == is_spare) return;
    if (tkvi_can_thin(state)) s->spare_bytes -= tkvi_state_bytes(state->size);
    state->n_spare = is_spare ? state->n_spare + 1 : state->n_spare - 1;
    if (tkvi_can_thin(state)) s->spare_bytes += tkvi_state_bytes(state->size);
    held->is_spare = is_spare;
}

/* Takes a holder away. A state without holders is freed. */
static void tkvi_release_state(tkvi_states *s, tkvi_held_state *held) {
    tkvi_state *state = held->state;
    const size_t bytes = tkvi_state_bytes(state->size);
    tkvi_set_spare(s, held, 0);
    held->state = NULL;
    state->n_holders--;
    if (tkvi_can_thin(state)) s->spare_bytes += bytes;
    if (state->n_holders) return;
    s->held_bytes -= bytes;
    if (s->wipes_freed) tkvi_wipe(tkvi_bytes_of_state(state), tkvi_align_up(state->size));
    if (s->region) tkvi_leave_region(s, state);
    else tkvi_put(s->heap, state, bytes);
}

/* >>lists */
/* Number of states of a list that have seen at most n_tokens. */
static int tkvi_n_states_up_to(const tkvi_state_list *list, int n_tokens) {
    int low = 0, high = list->n;
    while (low < high) {
        const int mid = low + (high - low) / 2;
        if (list->held[mid].state->n_tokens > n_tokens) high = mid;
        else low = mid + 1;
    }
    return low;
}

/* The state of a layer at a position, or NULL. *at: its place in the list, or the place where it belongs. */
static tkvi_state *tkvi_find_state(const tkvi_state_list *list, int layer, int n_tokens, int *at) {
    const int end = tkvi_n_states_up_to(list, n_tokens);
    int i = tkvi_n_states_up_to(list, n_tokens - 1);
    while (i < end && list->held[i].state->layer < layer) i++;
    *at = i;
    return i < end && list->held[i].state->layer == layer ? list->held[i].state : NULL;
}

/* Grows a list to n states. Returns 0 without memory. In place a list has room for all (tkvi_most_states), except if
 * layers have states at positions of their own. */
static int tkvi_grow_state_list(tkvi_states *s, int seq, int n) {
    tkvi_state_list *list = &s->list[seq];
    const uint32_t cap = tkvi_cap_for(n);
    tkvi_held_state *bigger;
    if ((uint32_t)n <= list->cap) return 1;
    bigger = (tkvi_held_state *)tkvi_get(s->heap, cap * sizeof *bigger);
    if (!bigger) return 0;
    if (list->n) memcpy(bigger, list->held, (size_t)list->n * sizeof *bigger);
    tkvi_put(s->heap, list->held, list->cap * sizeof *bigger);
    list->held = bigger;
    list->cap = cap;
    return 1;
}

/* A position of a list. */
typedef struct tkvi_state_position {
    int first, end; /* its states in the list */
    int n_tokens;
    int n_newest;                    /* states that are the newest of their layers */
    int n_passed;                    /* layers that have newer states, and none here */
    uint64_t seen[TKVI_LAYER_WORDS]; /* layers that have states here or at newer positions */
    int n_seen;
} tkvi_state_position;

static tkvi_state_position tkvi_end_position(const tkvi_state_list *list) {
    tkvi_state_position end;
    memset(&end, 0, sizeof end);
    end.first = list->n;
    return end;
}

/* Goes to the position before. Returns 0 if there is none. */
static int tkvi_step_back(const tkvi_state_list *list, tkvi_state_position *at) {
    int n_known = 0;
    if (!at->first) return 0;
    at->end = at->first;
    at->n_tokens = list->held[at->end - 1].state->n_tokens;
    for (; at->first > 0 && list->held[at->first - 1].state->n_tokens == at->n_tokens; at->first--) {
        const int layer = list->held[at->first - 1].state->layer;
        n_known += (int)(at->seen[layer / 64] >> layer % 64 & 1);
        at->seen[layer / 64] |= (uint64_t)1 << layer % 64;
    }
    at->n_passed = at->n_seen - n_known;
    at->n_newest = at->end - at->first - n_known;
    at->n_seen += at->n_newest;
    return 1;
}

/* 1 if every stateful layer has a state at a position. */
static int tkvi_is_complete(const tkvi_states *s, const tkvi_state_position *at) {
    return at->end - at->first == s->n_stateful;
}

/* Call after any change of a list. Counts its positions, and finds the spare ones. */
static void tkvi_mark_states(tkvi_states *s, int seq) {
    tkvi_state_list *list = &s->list[seq];
    tkvi_state_position at = tkvi_end_position(list);
    int i, has_complete = 0;
    list->n_positions = 0;
    while (tkvi_step_back(list, &at)) {
        const int stays = at.n_newest > 0 || (!has_complete && tkvi_is_complete(s, &at));
        for (i = at.first; i < at.end; i++) tkvi_set_spare(s, &list->held[i], !stays);
        has_complete |= tkvi_is_complete(s, &at);
        list->n_positions++;
    }
}

/* Removes the states first .. end - 1 from a list. */
static void tkvi_drop_held_states(tkvi_states *s, int seq, int first, int end) {
    tkvi_state_list *list = &s->list[seq];
    int i;
    if (!TKVI_HAS_STATES || first == end) return;
    for (i = first; i < end; i++) tkvi_release_state(s, &list->held[i]);
    memmove(list->held + first, list->held + end, (size_t)(list->n - end) * sizeof *list->held);
    list->n -= end - first;
    tkvi_mark_states(s, seq);
}

/* Removes the states of a sequence that have seen more than n_tokens. */
static void tkvi_drop_states(tkvi_states *s, int seq, int n_tokens) {
    if (!TKVI_HAS_STATES) return;
    tkvi_drop_held_states(s, seq, tkvi_n_states_up_to(&s->list[seq], n_tokens), s->list[seq].n);
}

/* Puts a state into a list that has room for it, in the place of the one before. */
static void tkvi_list_state(tkvi_states *s, int seq, tkvi_state *state) {
    tkvi_state_list *list = &s->list[seq];
    int at, i;
    tkvi_hold_state(s, state);
    if (tkvi_find_state(list, state->layer, state->n_tokens, &at)) {
        tkvi_release_state(s, &list->held[at]);
    } else {
        memmove(list->held + at + 1, list->held + at, (size_t)(list->n - at) * sizeof *list->held);
        list->n++;
    }
    list->held[at].state = state;
    list->held[at].is_spare = 0;
    if (s->is_stateful[state->layer]) {
        tkvi_mark_states(s, seq);
        return;
    }
    s->is_stateful[state->layer] = 1;
    s->n_stateful++;
    for (i = 0; i < s->n_lists; i++) tkvi_mark_states(s, i); /* what was complete is not any more */
}

/* Makes dst, which is empty and has room, hold the states of src that have seen at most n_tokens. */
static void tkvi_share_states(tkvi_states *s, int src, int dst, int n_tokens) {
    const tkvi_state_list *from = &s->list[src];
    tkvi_state_list *to = &s->list[dst];
    const int n = TKVI_HAS_STATES ? tkvi_n_states_up_to(from, n_tokens) : 0;
    if (!TKVI_HAS_STATES) return;
    for (to->n = 0; to->n < n; to->n++) {
        to->held[to->n].state = from->held[to->n].state;
        to->held[to->n].is_spare = 0;
        tkvi_hold_state(s, to->held[to->n].state);
    }
    tkvi_mark_states(s, dst);
}

/* >>thinning */
/* The spare position that is missed least so far. */
typedef struct tkvi_thinning {
    int seq, first, end; /* seq -1: none */
    double loss;
} tkvi_thinning;

static tkvi_thinning tkvi_no_thinning(void) {
    tkvi_thinning none;
    memset(&none, 0, sizeof none);
    none.seq = -1;
    return none;
}

/* 1 if one of the states first .. end - 1 of a list is spare for all its holders. */
static int tkvi_frees_any(const tkvi_state_list *list, int first, int end) {
    int i, frees = 0;
    for (i = first; i < end; i++) frees |= tkvi_can_thin(list->held[i].state);
    return frees;
}

/* Compares the spare positions of a list, which has states, with *least. must_free: 1 skips those that free no byte. */
static void tkvi_find_thinning(const tkvi_states *s, int seq, int must_free, tkvi_thinning *least) {
    const tkvi_state_list *list = &s->list[seq];
    tkvi_state_position at = tkvi_end_position(list);
    const int newest = list->held[list->n - 1].state->n_tokens;
    int above = newest;
    for (; tkvi_step_back(list, &at); above = at.n_tokens) {
        const int below = at.first ? list->held[at.first - 1].state->n_tokens : 0;
        const double loss = at.n_passed ? -1.0 : (double)(above - below) / (double)(newest - below);
        if (!list->held[at.first].is_spare || (must_free && !tkvi_frees_any(list, at.first, at.end)))
            continue;
        if (least->seq >= 0 && loss > least->loss) continue;
        least->seq = seq;
        least->first = at.first;
        least->end = at.end;
        least->loss = loss;
    }
}

/* Removes a position from all sequences that hold its states. */
static void tkvi_thin_everywhere(tkvi_states *s, const tkvi_thinning *thinning) {
    const tkvi_state_list *list = &s->list[thinning->seq];
    const int n_tokens = list->held[thinning->first].state->n_tokens;
    int seq, i, at, is_shared = 0;
    for (i = thinning->first; i < thinning->end; i++) is_shared |= list->held[i].state->n_holders > 1;
    for (seq = 0; seq < s->n_lists && is_shared; seq++) {
        const tkvi_state_list *other = &s->list[seq];
        const int first = tkvi_n_states_up_to(other, n_tokens - 1),
                  end = tkvi_n_states_up_to(other, n_tokens);
        int shares = 0;
        if (seq == thinning->seq || first == end || !other->held[first].is_spare) continue;
        for (i = first; i < end; i++)
            shares |=
                tkvi_find_state(list, other->held[i].state->layer, n_tokens, &at) == other->held[i].state;
        if (shares) tkvi_drop_held_states(s, seq, first, end);
    }
    s->n_thinned += (uint64_t)(thinning->end - thinning->first);
    tkvi_drop_held_states(s, thinning->seq, thinning->first, thinning->end);
}

/* Thins the position that is missed least among all sequences with more than n_kept positions. 0: none frees a byte. */
static int tkvi_thin_next(tkvi_states *s, int n_kept) {
    tkvi_thinning least = tkvi_no_thinning();
    int seq;
    for (seq = 0; TKVI_HAS_STATES && seq < s->n_lists && s->spare_bytes; seq++)
        if (s->list[seq].n_positions > n_kept) tkvi_find_thinning(s, seq, 1, &least);
    if (TKVI_HAS_STATES && least.seq >= 0) tkvi_thin_everywhere(s, &least);
    return TKVI_HAS_STATES && least.seq >= 0;
}

/* Thins a list until it has at most n_kept positions, or none is spare. */
static void tkvi_thin_list(tkvi_states *s, int seq, int n_kept) {
    while (s->list[seq].n_positions > n_kept) {
        tkvi_thinning least = tkvi_no_thinning();
        tkvi_find_thinning(s, seq, 0, &least);
        if (least.seq < 0) return;
        s->n_thinned += (uint64_t)(least.end - least.first);
        tkvi_drop_held_states(s, seq, least.first, least.end);
    }
}

#endif /* TKVI_CACHE_STATES_H */
