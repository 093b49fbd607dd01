/*
 * persist/scratch.h - memory that a save or a load needs meanwhile: of the caller's scratch memory, or of the heap.
 */
#ifndef TKVI_PERSIST_SCRATCH_H
#define TKVI_PERSIST_SCRATCH_H

#include "reclaim/demand.h"

typedef struct tkvi_scratch {
    tkv_cache *kv;
    uint8_t *from; /* the caller's; NULL: the heap gives all */
    size_t size;   /* of `from` */
    size_t taken;  /* bytes that are in use, with gaps between pieces */
    struct {
        void *at;
        size_t bytes, before; /* before: `taken` without it */
    } piece[3];
    int n; /* pieces */
} tkvi_scratch;

static tkvi_scratch tkvi_scratch_of(tkv_cache *kv, void *from, size_t size) {
    tkvi_scratch s;
    memset(&s, 0, sizeof s);
    s.kv = kv;
    s.from = (uint8_t *)from;
    s.size = size;
    return s;
}

/* Takes a piece at a multiple of 64. tkvi_give_back gives it back. */
static tkv_status tkvi_take_scratch(tkvi_scratch *s, size_t bytes, uint8_t **out) {
    const size_t gap = s->from ? tkvi_align_up((size_t)(uintptr_t)s->from) - (size_t)(uintptr_t)s->from : 0;
    const size_t taken = tkvi_align_up(s->taken);
    s->kv->call.lacks_scratch = 1;
    if (s->from && (gap > s->size || taken > s->size - gap || bytes > s->size - gap - taken))
        return tkvi_fail(s->kv, TKV_ERR_CAPACITY, "scratch is too small; bytes needed:",
                         tkvi_int_of_size(tkvi_add_sizes(s->kv->call.scratch_used + taken + 63, bytes)), "");
    *out = s->from ? s->from + gap + taken : (uint8_t *)tkvi_get(&s->kv->heap, bytes);
    if (!*out)
        return tkvi_refuse_no_memory(s->kv, "no memory to save or load; give scratch of bytes:",
                                     tkvi_int_of_size(tkvi_add_sizes(taken + 63, bytes)), "");
    s->kv->call.lacks_scratch = 0;
    s->piece[s->n].at = *out;
    s->piece[s->n].before = s->taken;
    s->piece[s->n++].bytes = bytes;
    s->taken = taken + bytes;
    return TKV_OK;
}

/* Gives back all pieces but the first n_kept. */
static void tkvi_give_back(tkvi_scratch *s, int n_kept) {
    while (s->n > n_kept) {
        const size_t bytes = s->piece[--s->n].bytes;
        void *at = s->piece[s->n].at;
        if (s->kv->tables.cfg.host.wipe_freed) tkvi_wipe(at, bytes);
        if (!s->from) tkvi_put(&s->kv->heap, at, bytes);
        s->taken = s->piece[s->n].before;
    }
}

#endif /* TKVI_PERSIST_SCRATCH_H */
