/*
 * cache/turns.h - a table of rotations: cosines and sines for the distances by which tokens of the cache have moved.
 *
 *     key      [rope, distance] ascending     row number
 *     angles   [row]: cosine [lanes], sine [lanes]
 *
 * Only calls that change the cache write it, so attention reads it from all threads. A missing distance costs time and
 * changes no bit: attention then computes the same numbers on its stack. So the table needs no error path. It grows
 * where memory and budget allow. Before it grows, distances that no token has any more leave it.
 */
#ifndef TKVI_CACHE_TURNS_H
#define TKVI_CACHE_TURNS_H

#include "cache/plan.h"

typedef struct tkvi_turn_key {
    int rope, turned; /* index in tkvi_tables.rope; distance, as tkvi_entry.turned */
    int row;          /* of keys beyond n: a free row */
    int in_use;       /* 1: some entry has it (tkvi_drop_turns) */
} tkvi_turn_key;

typedef struct tkvi_turns {
    tkvi_turn_key *key; /* [cap]; NULL: cap is 0 */
    float *angles;      /* [cap][2][lanes], behind the keys */
    int n, cap;
    int lanes; /* of the rope with the most */
} tkvi_turns;

/* A rotation by one distance, by pair. The lane behind the last pair turns nothing. */
typedef struct tkvi_angles {
    const float *cosine, *sine;
} tkvi_angles;

static size_t tkvi_turns_bytes(int cap, int lanes) {
    return tkvi_align_up((size_t)cap * sizeof(tkvi_turn_key)) +
           tkvi_align_up((size_t)cap * 2u * (size_t)lanes * sizeof(float));
}

/* The first key that is not less. hint: where it may be. */
static int tkvi_seek_turn(const tkvi_turns *t, int rope, int turned, int hint) {
    int low = 0, high = t->n;
    if (hint >= 0 && hint < t->n && t->key[hint].rope == rope && t->key[hint].turned == turned) return hint;
    while (low < high) {
        const int mid = (low + high) / 2;
        const tkvi_turn_key *k = &t->key[mid];
        if (k->rope < rope || (k->rope == rope && k->turned < turned)) low = mid + 1;
        else high = mid;
    }
    return low;
}

static int tkvi_is_turn(const tkvi_turns *t, int i, int rope, int turned) {
    return i < t->n && t->key[i].rope == rope && t->key[i].turned == turned;
}

/* Finds the rotation back by `turned`, in the table or in `room`. hint: in and out, a place in the table. */
static tkvi_angles tkvi_find_angles(const tkvi_tables *tables, const tkvi_turns *t, const tkvi_rope *rope,
                                    int turned, int *hint, tkvi_turn *room) {
    tkvi_angles a;
    const int of = (int)(rope - tables->rope), i = tkvi_seek_turn(t, of, turned, *hint);
    if (tkvi_is_turn(t, i, of, turned)) {
        *hint = i + 1; /* blocks in order often have distances in order */
        a.cosine = t->angles + (size_t)t->key[i].row * 2u * (size_t)t->lanes;
        a.sine = a.cosine + t->lanes;
        return a;
    }
    tkvi_turn_make(rope, turned, 1, room->cosine, room->sine);
    a.cosine = room->cosine;
    a.sine = room->sine;
    return a;
}

/* Makes the table larger. Returns 0 without memory. */
static int tkvi_grow_turns(tkvi_turns *t, tkvi_heap *heap, int cap) {
    const size_t keys = tkvi_align_up((size_t)cap * sizeof(tkvi_turn_key));
    const size_t bytes = tkvi_turns_bytes(cap, t->lanes);
    const tkvi_turns old = *t;
    uint8_t *bigger = (uint8_t *)tkvi_get(heap, bytes);
    int i;
    if (!bigger) return 0;
    memset(bigger, 0, bytes);
    t->key = (tkvi_turn_key *)(void *)bigger;
    t->angles = (float *)(void *)(bigger + keys);
    t->cap = cap;
    if (old.cap) {
        memcpy(t->key, old.key, (size_t)old.cap * sizeof *t->key);
        memcpy(t->angles, old.angles, (size_t)old.cap * 2u * (size_t)t->lanes * sizeof(float));
    }
    for (i = old.cap; i < cap; i++) t->key[i].row = i;
    tkvi_put(heap, old.key, tkvi_turns_bytes(old.cap, old.lanes));
    return 1;
}

static void tkvi_free_turns(tkvi_turns *t, tkvi_heap *heap) {
    tkvi_put(heap, t->key, tkvi_turns_bytes(t->cap, t->lanes));
    t->key = NULL;
    t->angles = NULL;
    t->n = t->cap = 0;
}

/* Inserts a distance at place i. There must be a free row. */
static void tkvi_insert_turn(tkvi_turns *t, const tkvi_tables *tables, int i, int rope, int turned) {
    const tkvi_turn_key free_key = t->key[t->n];
    float *cosine = t->angles + (size_t)free_key.row * 2u * (size_t)t->lanes;
    memmove(t->key + i + 1, t->key + i, (size_t)(t->n - i) * sizeof *t->key);
    t->n++;
    t->key[i].rope = rope;
    t->key[i].turned = turned;
    t->key[i].row = free_key.row;
    t->key[i].in_use = 1;
    tkvi_turn_make(&tables->rope[rope], turned, 1, cosine, cosine + t->lanes);
}

/* Removes the keys that are not in use. */
static void tkvi_sweep_turns(tkvi_turns *t) {
    int i, n = 0;
    for (i = 0; i < t->n; i++) {
        const tkvi_turn_key key = t->key[i];
        if (!key.in_use) continue;
        t->key[i] = t->key[n]; /* its row stays free, behind those in use */
        t->key[n++] = key;
    }
    t->n = n;
}

#endif /* TKVI_CACHE_TURNS_H */
