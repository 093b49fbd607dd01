/*
 * step/turns.h - fills the table of rotations (cache/turns.h) after tokens have moved.
 *
 * A call that gives entries a new `turned` calls tkvi_remember_turns for their sequence at its end. It cannot fail.
 */
#ifndef TKVI_STEP_TURNS_H
#define TKVI_STEP_TURNS_H

#include "cache/cache.h"

/* Removes from the table the distances that no entry of the cache has. */
static void tkvi_drop_turns(tkv_cache *kv) {
    tkvi_turns *t = &kv->turns;
    int seq, layer, i;
    for (i = 0; i < t->n; i++) t->key[i].in_use = 0;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            const tkvi_rope *of_layer = kv->tables.plan[layer].rope;
            const int rope = of_layer ? (int)(of_layer - kv->tables.rope) : 0;
            int at = 0;
            for (i = 0; i < list->n && tkvi_has_moved(list); i++) {
                const int turned = kv->pool.entry[ids[i]].turned;
                if (!turned) continue;
                at = tkvi_seek_turn(t, rope, turned, at);
                if (tkvi_is_turn(t, at, rope, turned)) t->key[at].in_use = 1;
            }
        }
    tkvi_sweep_turns(t);
}

/* 1 if some token of the cache has moved. */
static int tkvi_has_moved_tokens(const tkv_cache *kv) {
    int i;
    for (i = 0; i < kv->tables.cfg.limits.max_seqs * kv->tables.cfg.model.n_layers; i++)
        if (kv->list[i].n && tkvi_has_moved(&kv->list[i])) return 1;
    return 0;
}

/* Adds the distances of a sequence to the table, as far as there is memory. */
static void tkvi_remember_turns(tkv_cache *kv, int seq) {
    tkvi_turns *t = &kv->turns;
    int layer, i, has_dropped = 0;
    if (!kv->pool.keep_all && !tkvi_has_moved_tokens(kv)) tkvi_free_turns(t, &kv->heap);
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        const tkvi_rope *of_layer = kv->tables.plan[layer].rope;
        const int rope = of_layer ? (int)(of_layer - kv->tables.rope) : 0;
        int at = 0;
        for (i = 0; i < list->n && tkvi_has_moved(list); i++) {
            const int turned = kv->pool.entry[ids[i]].turned;
            if (!turned) continue;
            at = tkvi_seek_turn(t, rope, turned, at);
            if (tkvi_is_turn(t, at, rope, turned)) continue;
            if (t->n == t->cap && !has_dropped) {
                has_dropped = 1;
                tkvi_drop_turns(kv);
                at = tkvi_seek_turn(t, rope, turned, 0);
            }
            if (t->n == t->cap) {
                if (kv->pool.keep_all || !tkvi_grow_turns(t, &kv->heap, (int)tkvi_cap_for(t->n + 1))) return;
            }
            tkvi_insert_turn(t, &kv->tables, at, rope, turned);
        }
    }
}

#endif /* TKVI_STEP_TURNS_H */
