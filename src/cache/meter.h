/*
 * cache/meter.h - the quality meter: exact copies of blocks of some heads, and what a comparison with them came to.
 *
 * A gauge watches one KV head of one layer. When a block of it leaves the hot tier, its record is copied as
 * it stood; attention/attend.h now and then computes the same attention once more with the copies in place of the
 * blocks that were coded from them. Only coded blocks are copied: the others are exact in the cache. They are
 * never cut, so cuts and aborts mean nothing here. All memory is there from the start: nothing can fail later.
 *
 * When the copies are full, every other one goes, and from then on every second block is copied, every
 * fourth, ...: those that are left lie evenly over the sequence. May call plan and below.
 */
#ifndef TKVI_CACHE_METER_H
#define TKVI_CACHE_METER_H

#include "cache/plan.h"

#define TKVI_METER_ONE 4294967296.0 /* sums are in whole numbers: threads may add in any order */
#define TKVI_METER_MOST 16.0f       /* no single comparison counts for more */

typedef struct tkvi_error_sums {
    uint64_t samples, agreed;
    uint64_t keys, kept;        /* coded keys that samples saw; of them, those with a copy */
    uint64_t error, divergence; /* sums, TKVI_METER_ONE being 1 */
    uint64_t worst;             /* largest divergence */
} tkvi_error_sums;

typedef struct tkvi_head_probe {
    int layer, head;
    int phase;      /* positions p with (p + phase) % every == 0 are measured */
    int n, stride;  /* copies; of every stride-th block */
    int *start;     /* [slots] first position of each copied block, rising */
    int *slot;      /* [slots] where its bytes are; behind the first n: the free ones */
    uint8_t *bytes; /* [slots][record_bytes] */
    tkvi_error_sums sum;
} tkvi_head_probe;

typedef struct tkvi_meter {
    int lock; /* of the sums */
    int seq;  /* whose blocks are copied; -1: of the next one that begins */
    int n, slots, every;
    size_t record_bytes;
    tkvi_head_probe *head_probe; /* [n] */
} tkvi_meter;

/* >>how many, how large */
static int tkvi_meter_heads(const tkvi_derived_config *h) {
    return tkvi_min(h->cfg.quality_heads, h->n_stored * h->cfg.n_kv_heads);
}

static int tkvi_meter_slots(const tkvi_derived_config *h) {
    return (tkvi_min(h->cfg.quality_tokens, h->cfg.max_tokens) + TKVI_BLOCK - 1) / TKVI_BLOCK;
}

/* Bytes of the meter but for the copies, and those of the copies. 0 on overflow. */
static int tkvi_meter_sizes(const tkvi_derived_config *h, size_t *tables, size_t *copies) {
    size_t n = (size_t)tkvi_meter_heads(h), slots = (size_t)tkvi_meter_slots(h);
    *tables = *copies = 0;
    if (!n) return 1;
    *tables = tkvi_align_up(sizeof(tkvi_meter)) + tkvi_align_up(n * sizeof(tkvi_head_probe)) +
              tkvi_align_up(2 * n * slots * sizeof(int));
    return tkvi_mul(n * slots, h->hot_record, copies);
}

/* A comparison takes the time of up to four units of attention (one KV head of one layer, one query). It
 * stands in one task: rare enough for 16 threads, which finish the others in a sixteenth of the time. */
static int tkvi_meter_every(const tkvi_derived_config *h) {
    int64_t units = (int64_t)h->n_stored * h->cfg.n_kv_heads;
    int every = 32;
    if (h->cfg.quality_every) return h->cfg.quality_every;
    while ((int64_t)every * units < 800 * (int64_t)tkvi_meter_heads(h)) every *= 2;
    return every;
}

/* Layers with blocks of their own get gauges evenly, from the middle of equal parts; heads take turns. */
static void tkvi_meter_place(tkvi_meter *m, const tkvi_tables *t, int n_stored) {
    int i, layer;
    for (i = 0; i < m->n; i++) {
        int at = i % n_stored, which = m->n < n_stored ? (2 * i + 1) * n_stored / (2 * m->n) : at;
        for (layer = 0; t->plan[layer].stored != layer || which-- > 0;) layer++;
        m->head_probe[i].layer = layer;
        m->head_probe[i].head = (at + i / n_stored) % t->cfg.n_kv_heads;
        m->head_probe[i].phase = (int)((int64_t)i * m->every / m->n);
    }
}

/* Forgets the copies. The meter watches the next sequence that begins. */
static void tkvi_meter_clear(tkvi_meter *m) {
    int i, k;
    m->seq = -1;
    for (i = 0; i < m->n; i++) {
        m->head_probe[i].n = 0;
        m->head_probe[i].stride = 1;
        for (k = 0; k < m->slots; k++) m->head_probe[i].slot[k] = k;
    }
}

/* In cleared memory; the copies need not be. NULL if the config asks for none. */
static tkvi_meter *tkvi_meter_build(const tkvi_derived_config *h, const tkvi_tables *t, uint8_t *tables,
                                    uint8_t *copies) {
    tkvi_meter *m = (tkvi_meter *)(void *)tables;
    int i, n = tkvi_meter_heads(h), *numbers;
    if (!n) return NULL;
    m->n = n;
    m->slots = tkvi_meter_slots(h);
    m->every = tkvi_meter_every(h);
    m->record_bytes = h->hot_record;
    tables += tkvi_align_up(sizeof *m);
    m->head_probe = (tkvi_head_probe *)(void *)tables;
    numbers = (int *)(void *)(tables + tkvi_align_up((size_t)n * sizeof(tkvi_head_probe)));
    for (i = 0; i < n; i++) {
        m->head_probe[i].start = numbers + (size_t)(2 * i) * (size_t)m->slots;
        m->head_probe[i].slot = m->head_probe[i].start + m->slots;
        m->head_probe[i].bytes = copies + (size_t)i * (size_t)m->slots * m->record_bytes;
    }
    tkvi_meter_place(m, t, h->n_stored);
    tkvi_meter_clear(m);
    return m;
}

/* The gauge of a head, or NULL. */
static tkvi_head_probe *tkvi_head_probe_of(const tkvi_meter *m, int layer, int head) {
    int i;
    for (i = 0; m && i < m->n; i++)
        if (m->head_probe[i].layer == layer && m->head_probe[i].head == head) return &m->head_probe[i];
    return NULL;
}

/* >>copies */
static void tkvi_head_probe_drop(tkvi_head_probe *g, int i) {
    int slot = g->slot[i];
    g->n--;
    memmove(g->start + i, g->start + i + 1, (size_t)(g->n - i) * sizeof *g->start);
    memmove(g->slot + i, g->slot + i + 1, (size_t)(g->n - i) * sizeof *g->slot);
    g->slot[g->n] = slot;
}

/* The block that begins at `start` is about to be coded. Tokens before `dropped` are gone. */
static void tkvi_head_probe_keep(const tkvi_meter *m, tkvi_head_probe *g, int start, int dropped,
                                 const uint8_t *record, size_t bytes) {
    int number = start / TKVI_BLOCK, i; /* rises from block to block, but for some that were flushed short */
    while (g->n && g->start[0] < dropped) tkvi_head_probe_drop(g, 0);
    if (g->n && g->start[g->n - 1] / TKVI_BLOCK >= number) return;
    if (number % g->stride) return;
    while (g->n == m->slots && g->stride < TKVI_FOREVER / 2) {
        g->stride *= 2;
        for (i = g->n - 1; i >= 0; i--)
            if (g->start[i] / TKVI_BLOCK % g->stride) tkvi_head_probe_drop(g, i);
    }
    if (number % g->stride || g->n == m->slots) return;
    memcpy(g->bytes + (size_t)g->slot[g->n] * m->record_bytes, record, bytes);
    g->start[g->n++] = start;
}

/* The copy of the block that begins at `start`, or NULL. *from walks along as starts rise. */
static const uint8_t *tkvi_head_probe_copy(const tkvi_meter *m, const tkvi_head_probe *g, int start,
                                           int *from) {
    while (*from < g->n && g->start[*from] < start) ++*from;
    return *from < g->n && g->start[*from] == start ? g->bytes + (size_t)g->slot[*from] * m->record_bytes
                                                    : NULL;
}

/* >>sums */
static uint64_t tkvi_meter_fixed(double x) {
    float f = (float)x;
    if (!tkvi_is_finite(f) || f > TKVI_METER_MOST) f = TKVI_METER_MOST;
    return f > 0.0f ? (uint64_t)((double)f * TKVI_METER_ONE) : 0;
}

static void tkvi_error_sums_add(tkvi_error_sums *sum, const tkvi_error_sums *more) {
    sum->samples += more->samples;
    sum->agreed += more->agreed;
    sum->keys += more->keys;
    sum->kept += more->kept;
    sum->error += more->error;
    sum->divergence += more->divergence;
    if (more->worst > sum->worst) sum->worst = more->worst;
}

#endif /* TKVI_CACHE_METER_H */
