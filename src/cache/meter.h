/*
 * cache/meter.h - the quality meter: exact copies of blocks of some heads, and the error sums from comparisons.
 *
 * A head probe watches one KV head of one layer. When a block leaves the hot tier, the probe copies the exact
 * record. For sampled queries, attention/compare.h computes attention a second time. It then reads the copies in
 * place of the coded blocks. Hot blocks need no copy: they are exact in the cache. Coded blocks are never
 * truncated, so truncation and tkv_seq_abort do not change the copies. All memory is allocated at creation, so
 * nothing can fail later.
 *
 * When a probe is full, it deletes every second copy. From then on it copies every second block, then every fourth,
 * and so on. So the copies lie evenly over the sequence.
 */
#ifndef TKVI_CACHE_METER_H
#define TKVI_CACHE_METER_H

#include "cache/plan.h"

#define TKVI_METER_ONE 4294967296.0 /* 1 in fixed point; integer sums do not depend on thread order */
#define TKVI_METER_MOST 16.0f       /* limit of the error of one comparison */

typedef struct tkvi_error_sums {
    uint64_t samples, agreed;   /* comparisons; those with the same key at the top */
    uint64_t keys, kept;        /* coded keys that samples saw; those of them with a copy */
    uint64_t error, divergence; /* sums of |out - exact|^2 / |exact|^2 and of KL, in 1 / TKVI_METER_ONE */
    uint64_t worst;             /* largest divergence */
} tkvi_error_sums;

typedef struct tkvi_head_probe {
    int layer, head;
    int phase;      /* positions p with (p + phase) % every == 0 are sampled */
    int n, stride;  /* number of copies; every stride-th block is copied */
    int *start;     /* [slots] first position of each copied block, ascending */
    int *slot;      /* [slots] index into `bytes`: n slots in use, then the free ones */
    uint8_t *bytes; /* [slots][record_bytes] */
    tkvi_error_sums sum;
} tkvi_head_probe;

typedef struct tkvi_meter {
    int lock;                    /* guards the sums */
    int seq;                     /* the watched sequence; -1: none, the next one that begins is taken */
    int n, slots, every;         /* probes; copies per probe; sampling period in positions */
    size_t record_bytes;         /* of one copy */
    tkvi_head_probe *head_probe; /* [n] */
    tkv_feedback *feedback;      /* of cfg.meter.target; NULL: none */
    tkvi_error_sums scored;      /* sums of all probes at the last score for it */
} tkvi_meter;

/* >>counts and sizes */
static int tkvi_meter_heads(const tkvi_derived_config *h) {
    return TKVI_HAS_METER ? (int)(h->n_stored_heads < (size_t)h->cfg.meter.heads ? h->n_stored_heads
                                                                                 : (size_t)h->cfg.meter.heads)
                          : 0;
}

static int tkvi_meter_slots(const tkvi_derived_config *h) {
    return (tkvi_min(h->cfg.meter.tokens, h->cfg.limits.max_tokens) + TKVI_BLOCK - 1) / TKVI_BLOCK;
}

/* *tables: bytes of the meter without the copies. *copies: bytes of the copies. */
static void tkvi_meter_sizes(const tkvi_derived_config *h, size_t *tables, size_t *copies) {
    size_t n = (size_t)tkvi_meter_heads(h), slots = (size_t)tkvi_meter_slots(h);
    *tables = *copies = 0;
    if (!n) return;
    *tables = tkvi_align_up(sizeof(tkvi_meter)) + tkvi_align_up(n * sizeof(tkvi_head_probe)) +
              tkvi_align_up(2 * n * slots * sizeof(int));
    if (h->cfg.meter.target > 0.0f) *tables += tkvi_align_up(sizeof(tkv_feedback));
    *copies = tkvi_multiply_sizes(n * slots, h->hot_record);
}

/* The sampling period in positions. A comparison costs up to 4 times the attention of one KV head of one layer, for
 * one query. The period keeps all comparisons at or below 4 / 800 = 0.5 % of attention. One task runs a comparison:
 * with 16 threads its share of the time is up to 16 times that, hence the long period. */
static int tkvi_meter_every(const tkvi_derived_config *h) {
    int64_t units = (int64_t)h->n_stored_heads;
    int every = 32;
    if (h->cfg.meter.every) return h->cfg.meter.every;
    while ((int64_t)every * units < 800 * (int64_t)tkvi_meter_heads(h)) every *= 2;
    return every;
}

/* Number `which` of the layers with blocks of their own. */
static int tkvi_stored_layer_at(const tkvi_tables *t, int which) {
    int layer = 0;
    while (t->plan[layer].stored_layer != layer || which-- > 0) layer++;
    return layer;
}

/* Spreads the probes evenly over the layers with blocks of their own, and over KV heads and positions. Few probes
 * get the middles of equal ranges of layers. */
static void tkvi_meter_place(tkvi_meter *m, const tkvi_tables *t, int n_stored) {
    int i, next = 0; /* next / n_stored: the head, next % n_stored: the layer */
    for (i = 0; i < m->n; i++) {
        const int is_few = m->n < n_stored;
        int layer = tkvi_stored_layer_at(t, is_few ? (2 * i + 1) * n_stored / (2 * m->n) : next % n_stored);
        while (!is_few && t->plan[layer].geometry.n_kv_heads <= next / n_stored)
            layer = tkvi_stored_layer_at(t, ++next % n_stored);
        m->head_probe[i].layer = layer;
        m->head_probe[i].head = (next % n_stored + next / n_stored) % t->plan[layer].geometry.n_kv_heads;
        m->head_probe[i].phase = (int)((int64_t)i * m->every / m->n);
        next++;
    }
}

/* Deletes all copies. The meter then watches the next sequence that begins. */
static void tkvi_meter_clear(tkvi_meter *m) {
    int i, k;
    m->seq = TKV_NO_SEQ;
    for (i = 0; i < m->n; i++) {
        m->head_probe[i].n = 0;
        m->head_probe[i].stride = 1;
        for (k = 0; k < m->slots; k++) m->head_probe[i].slot[k] = k;
    }
}

/* Builds the meter. `tables` must be zero-filled, `copies` need not be. Returns NULL if the config has no meter. */
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
    if (h->cfg.meter.target > 0.0f)
        m->feedback = (tkv_feedback *)(void *)((uint8_t *)numbers +
                                               tkvi_align_up(2 * (size_t)n * (size_t)m->slots * sizeof(int)));
    tkvi_meter_place(m, t, h->n_stored);
    tkvi_meter_clear(m);
    return m;
}

/* The probe of a KV head, or NULL. */
static tkvi_head_probe *tkvi_head_probe_of(const tkvi_meter *m, int layer, int head) {
    int i;
    for (i = 0; i < m->n; i++)
        if (m->head_probe[i].layer == layer && m->head_probe[i].head == head) return &m->head_probe[i];
    return NULL;
}

/* >>copies */
/* Deletes copy i. */
static void tkvi_head_probe_drop(tkvi_head_probe *g, int i) {
    int slot = g->slot[i];
    g->n--;
    memmove(g->start + i, g->start + i + 1, (size_t)(g->n - i) * sizeof *g->start);
    memmove(g->slot + i, g->slot + i + 1, (size_t)(g->n - i) * sizeof *g->slot);
    g->slot[g->n] = slot;
}

/* Copies the exact record of the block that begins at `start`, just before it is coded. First deletes the copies of
 * blocks that begin before `expired`, the first position that has not expired. */
static void tkvi_head_probe_keep(const tkvi_meter *m, tkvi_head_probe *g, int start, int dropped,
                                 const uint8_t *record, size_t bytes) {
    int number = start / TKVI_BLOCK, i; /* rises from block to block, except after a flushed partial block */
    while (g->n && g->start[0] < dropped) tkvi_head_probe_drop(g, 0);
    if (g->n && g->start[g->n - 1] / TKVI_BLOCK >= number) return;
    if (number % g->stride) return;
    while (g->n == m->slots && g->stride < TKVI_FOREVER / 2) {
        g->stride *= 2;
        for (i = g->n - 1; i >= 0; i--)
            if (g->start[i] / TKVI_BLOCK % g->stride) tkvi_head_probe_drop(g, i);
    }
    if (number % g->stride) return;
    TKVI_ASSERT(g->n < m->slots);
    memcpy(g->bytes + (size_t)g->slot[g->n] * m->record_bytes, record, bytes);
    g->start[g->n++] = start;
}

/* The copy of the block that begins at `start`, or NULL. Calls must come with rising starts: *from, 0 at first, is
 * the place in the list of copies. */
static const uint8_t *tkvi_head_probe_copy(const tkvi_meter *m, const tkvi_head_probe *g, int start,
                                           int *from) {
    while (*from < g->n && g->start[*from] < start) ++*from;
    return *from < g->n && g->start[*from] == start ? g->bytes + (size_t)g->slot[*from] * m->record_bytes
                                                    : NULL;
}

/* >>sums */
/* x in fixed point, limited to 0 .. TKVI_METER_MOST. NaN and infinities count as the limit. */
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
