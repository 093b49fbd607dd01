/*
 * mass.h - how much attention each token got: attend.h gathers it while it runs, the blocks' notes keep it (pool.h).
 *
 * What is gathered is a row of a table: what the policy of cfg.evict needs (evict.h), else what the strategy of
 * cfg.importance counts. All calls between two appends are one step; its stamp is the list's length. Who comes first to
 * a block in a step decays its numbers, or begins anew. Numbers are whole, and sums end at the largest one: it is
 * no matter who comes first, so threads change nothing.
 *
 * As with the sums of learn.h, readers of the cache write here, and so under kv->learning. Without atomics (neither gcc
 * nor clang) attention gathers nothing; what a caller adds counts all the same. May call cache and below.
 */
#ifndef TKVI_MASS_H
#define TKVI_MASS_H

#include "cache.h"

#define TKVI_MASS_ONE 1048576.0f /* a weight of 1 as a whole number */
#define TKVI_MASS_LOW 256.0f     /* the same of a low one: decay leaves parts of it */
#define TKVI_MASS_MOST 2047.0f   /* of what comes at once: counted it is an int */
#define TKVI_MASS_EVERY 32

/* >>what the weights p of a row, from scores s, say of a block's 64 tokens. 16 at a time: vectors also at -O2 */
static void tkvi_weight_sum(const float *s, const float *p, float low, float *said) {
    int t, k;
    (void)s;
    (void)low;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        float x[16];
        for (k = 0; k < 16; k++) x[k] = said[t + k] + p[t + k];
        for (k = 0; k < 16; k++) said[t + k] = x[k];
    }
}

static void tkvi_weight_largest(const float *s, const float *p, float low, float *said) {
    int t, k;
    (void)s;
    (void)low;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        float x[16];
        for (k = 0; k < 16; k++) x[k] = p[t + k] > said[t + k] ? p[t + k] : said[t + k];
        for (k = 0; k < 16; k++) said[t + k] = x[k];
    }
}

static void tkvi_weight_lows(const float *s, const float *p, float low, float *said) {
    int t, k;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        float x[16];
        for (k = 0; k < 16; k++)
            x[k] = said[t + k] + (!TKVI_IS_HIDDEN(s[t + k]) && p[t + k] < low ? 1.0f : 0.0f);
        for (k = 0; k < 16; k++) said[t + k] = x[k];
    }
}

/* >>whole numbers: rounded; 0 for what is no weight, NaN (by bits: right under -ffast-math) */
static uint32_t tkvi_mass_counted(float x, float one) {
    const uint32_t bits = tkvi_bits(x * one + 0.5f);
    return (uint32_t)(int32_t)tkvi_from_bits(bits < 0x4f000000u ? bits : 0u); /* below 2^31 */
}

static void tkvi_join_sums(uint32_t *mass, const uint32_t *more) {
    int t, k;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        uint32_t x[16];
        for (k = 0; k < 16; k++) x[k] = mass[t + k] + more[t + k];
        for (k = 0; k < 16; k++) mass[t + k] = x[k] < more[t + k] ? 0xffffffffu : x[k];
    }
}

static void tkvi_join_largest(uint32_t *mass, const uint32_t *more) {
    int t, k;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        uint32_t x[16];
        for (k = 0; k < 16; k++) x[k] = more[t + k] > mass[t + k] ? more[t + k] : mass[t + k];
        for (k = 0; k < 16; k++) mass[t + k] = x[k];
    }
}

/* >>the table */
typedef struct tkvi_mass_mode {
    int need;  /* of a policy: a bit of tkv_evict_need; 0: of none */
    int fresh; /* a step begins from nothing, and all of the newest queries tell, instead of one in so many */
    float sign; /* of what is gathered, where high numbers are to be good */
    float one;  /* 1 as a whole number */
    void (*say)(const float *s, const float *p, float low, float *said);
    void (*join)(uint32_t *mass, const uint32_t *more);
} tkvi_mass_mode;

enum {
    TKVI_MASS_SUM,
    TKVI_MASS_LARGEST,
    TKVI_MASS_LOWS,
    TKVI_MASS_LAST,
    TKVI_MASS_OBSERVED,
    TKVI_MASS_MODES
};

static const tkvi_mass_mode tkvi_mass_modes[TKVI_MASS_MODES] = {
    {TKV_EVICT_NEEDS_MASS, 0, 1.0f, TKVI_MASS_ONE, tkvi_weight_sum, tkvi_join_sums},
    {0, 0, 1.0f, TKVI_MASS_ONE, tkvi_weight_largest, tkvi_join_largest},
    {TKV_EVICT_NEEDS_LOWS, 0, -1.0f, TKVI_MASS_LOW, tkvi_weight_lows, tkvi_join_sums},
    {TKV_EVICT_NEEDS_LAST, 1, 1.0f, TKVI_MASS_ONE, tkvi_weight_sum, tkvi_join_sums},
    {TKV_EVICT_NEEDS_OBSERVED, 1, 1.0f, TKVI_MASS_ONE, tkvi_weight_sum, tkvi_join_sums},
};

/* In the order of tkv_importance_strategy; TKVI_MASS_MODES: nothing. */
static const int tkvi_mass_of_strategy[TKV_IMPORTANCE_STRATEGIES] = {
    TKVI_MASS_SUM, TKVI_MASS_SUM, TKVI_MASS_LARGEST, TKVI_MASS_MODES, TKVI_MASS_LOWS};

/* What a config asks for. */
typedef struct tkvi_mass {
    const tkvi_mass_mode *mode;       /* NULL: nothing is gathered */
    int every;                        /* one query in so many tells, or */
    int newest;                       /* the newest so many do */
    tkv_importance_config importance; /* with defaults; decay is that of what is gathered */
} tkvi_mass;

static void tkvi_mass_init(tkvi_mass *m, const tkv_config *cfg) {
    const tkv_evict_kind kind = cfg->evict.kind;
    tkv_evict_config evict;
    int i;
    memset(m, 0, sizeof *m);
    if (!tkvi_importance_fill(&cfg->importance, &m->importance) || !tkvi_evict_fill(&cfg->evict, &evict))
        return; /* no cache has such a config */
    m->every = cfg->importance_every ? cfg->importance_every : TKVI_MASS_EVERY;
    for (i = 0; i < TKVI_MASS_MODES; i++)
        if (tkv_evict_needs(kind) & tkvi_mass_modes[i].need) m->mode = &tkvi_mass_modes[i];
    if (m->mode) { /* policies know no decay but the caller's */
        m->importance.decay = tkvi_or(cfg->importance.decay, 1.0f);
        m->newest = m->mode->need == TKV_EVICT_NEEDS_LAST ? 1 : evict.recent_tokens;
    } else if (cfg->importance_every > 0 || cfg->n_anchors > 0 || kind == TKV_EVICT_SCORES ||
               kind == TKV_EVICT_USER) {
        i = tkvi_mass_of_strategy[m->importance.strategy];
        if (i < TKVI_MASS_MODES) m->mode = &tkvi_mass_modes[i];
    }
}

/* Nothing is gathered, and the policy wants norms: then `mass` of a token has the bits of its key's, a float. So they
 * are not decoded for each batch, and are those of the keys that came. */
static int tkvi_keeps_norms(const tkv_cache *kv) {
    const tkv_config *cfg = &kv->tables.cfg;
    return cfg->evict.kind == TKV_EVICT_KNORM && cfg->importance_every <= 0 && cfg->n_anchors == 0;
}

/* >>notes. len: of the list */
static void tkvi_mass_fade(uint32_t *mass, double by) {
    int t;
    for (t = 0; t < TKVI_BLOCK && by < 1.0; t++) mass[t] = (uint32_t)tkvi_f64((double)mass[t] * by);
}

/* A block's numbers, brought to a step. */
static void tkvi_mass_bring(const tkvi_mass *m, tkvi_notes *n, int step) {
    if (n->step == step || !m->mode) return;
    tkvi_mass_fade(n->mass, m->mode->fresh ? 0.0 : tkvi_power((double)m->importance.decay, step - n->step));
    n->step = step;
}

/* said: of the block's 64 tokens, 0 where they are gone. */
static void tkvi_mass_add(tkv_cache *kv, const tkvi_mass *m, uint32_t id, int len, const float *said) {
    tkvi_notes *n = &kv->pool.notes[id];
    uint32_t more[TKVI_BLOCK], any = 0;
    int t;
    for (t = 0; t < TKVI_BLOCK; t++) any |= more[t] = tkvi_mass_counted(said[t], m->mode->one);
    if (!any) return;
    tkvi_lock(&kv->learning);
    tkvi_mass_bring(m, n, len);
    m->mode->join(n->mass, more);
    tkvi_unlock(&kv->learning);
}

/* The numbers of two blocks that become one are those of one step. */
static void tkvi_mass_meet(tkv_cache *kv, uint32_t a, uint32_t b) {
    tkvi_notes *n = kv->pool.notes;
    tkvi_mass m;
    tkvi_mass_init(&m, &kv->tables.cfg);
    tkvi_mass_bring(&m, &n[a], tkvi_max(n[a].step, n[b].step));
    tkvi_mass_bring(&m, &n[b], n[a].step);
}

/* The step of the newest queries that told, where older ones do not count. */
static int tkvi_mass_newest(tkv_cache *kv, const tkvi_mass *m, const tkvi_list *list, const uint32_t *ids) {
    int i, step = 0;
    if (!m->mode || !m->mode->fresh) return 0;
    tkvi_lock(&kv->learning);
    for (i = 0; i < list->n; i++) step = tkvi_max(step, tkvi_min(list->len, kv->pool.notes[ids[i]].step));
    tkvi_unlock(&kv->learning);
    return step;
}

/* A block's numbers as of now: what a policy needs of its 64 slots, or the A of importance.h. newest: of the list. */
static void tkvi_mass_now(tkv_cache *kv, const tkvi_mass *m, uint32_t id, int len, int newest, float *a) {
    tkvi_notes n;
    double by = 0.0;
    int t;
    memset(&n, 0, sizeof n);
    if (m->mode) {
        tkvi_lock(&kv->learning);
        n = kv->pool.notes[id];
        tkvi_unlock(&kv->learning);
        by = m->mode->fresh ? (n.step == newest ? 1.0 : 0.0)
                            : tkvi_power((double)m->importance.decay, len - n.step);
        by *= (double)m->mode->sign / (double)m->mode->one;
    }
    for (t = 0; t < TKVI_BLOCK; t++) a[t] = (float)((double)n.mass[t] * by);
}

/* Importance of up to 64 tokens at these positions, from what was gathered of them. */
static void tkvi_weigh(const tkvi_mass *m, const int *position, float *a, int n, int len) {
    tkv_importance token[TKVI_BLOCK];
    int t;
    for (t = 0; t < n; t++) {
        token[t].attention = a[t];
        token[t].step = len - 1;
    }
    (void)tkv_importance_read(&m->importance, token, position, n, len - 1, a);
}

/* The list was cut to its length: no step lies ahead. (Tokens that come now begin with nothing: tkvi_store.) */
static void tkvi_mass_cut(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids) {
    tkvi_mass m;
    int i;
    if (!kv->pool.notes) return;
    tkvi_mass_init(&m, &kv->tables.cfg);
    for (i = 0; i < list->n; i++) {
        tkvi_notes *n = &kv->pool.notes[ids[i]];
        if (n->step > list->len) n->step = m.mode && m.mode->fresh ? 0 : list->len;
    }
}

#endif /* TKVI_MASS_H */
