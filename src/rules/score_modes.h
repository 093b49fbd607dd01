/*
 * rules/score_modes.h - what a config gathers of attention: a row of a table. A policy of cfg.evict says what it
 * needs (rules/evict.h), else the strategy of cfg.importance counts. Numbers are whole, and sums end at the largest
 * one: it is no matter who comes first, so threads change nothing. May call evict and below.
 */
#ifndef TKVI_RULES_SCORE_MODES_H
#define TKVI_RULES_SCORE_MODES_H

#include "kernels/scalar.h"
#include "rules/evict.h"

#define TKVI_TOKEN_SCORE_ONE 1048576.0f /* a weight of 1 as a whole number */
#define TKVI_TOKEN_SCORE_LOW 256.0f     /* the same of a low one: decay leaves parts of it */
#define TKVI_TOKEN_SCORE_MOST 2047.0f   /* of what comes at once: counted it is an int */
#define TKVI_TOKEN_SCORE_EVERY 32

/* >>what the weights p of a row, from scores s, say of a block's 64 tokens. 16 at a time: vectors also at -O2 */
typedef void (*tkvi_weigher)(const float *s, const float *p, float low, float *said);

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
static uint32_t tkvi_token_score_counted(float x, float one) {
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
typedef struct tkvi_token_score_mode {
    int need;  /* of a policy: a bit of tkv_evict_need; 0: of none */
    int fresh; /* a step begins from nothing, and all of the newest queries tell, instead of one in so many */
    float sign;  /* of what is gathered, where high numbers are to be good */
    float one;   /* 1 as a whole number */
    float least; /* the same of all queries together, at least: 0 where sampling does not scale it */
    tkv_importance_heads heads; /* what it comes to when each query head tells by itself: sum or max */
    tkvi_weigher say;
    void (*join)(uint32_t *mass, const uint32_t *more);
} tkvi_token_score_mode;

enum {
    TKVI_TOKEN_SCORE_SUM,
    TKVI_TOKEN_SCORE_LARGEST,
    TKVI_TOKEN_SCORE_LOWS,
    TKVI_TOKEN_SCORE_LAST,
    TKVI_TOKEN_SCORE_OBSERVED,
    TKVI_TOKEN_SCORE_MODES
};

static const tkvi_token_score_mode tkvi_token_score_modes[TKVI_TOKEN_SCORE_MODES] = {
    {TKV_EVICT_NEEDS_MASS, 0, 1.0f, TKVI_TOKEN_SCORE_ONE, 256.0f, TKV_IMPORTANCE_SUM, tkvi_weight_sum,
     tkvi_join_sums},
    {0, 0, 1.0f, TKVI_TOKEN_SCORE_ONE, 0.0f, TKV_IMPORTANCE_MAX, tkvi_weight_largest, tkvi_join_largest},
    {TKV_EVICT_NEEDS_LOWS, 0, -1.0f, TKVI_TOKEN_SCORE_LOW, 1.0f, TKV_IMPORTANCE_SUM, tkvi_weight_lows,
     tkvi_join_sums},
    {TKV_EVICT_NEEDS_LAST, 1, 1.0f, TKVI_TOKEN_SCORE_ONE, 0.0f, TKV_IMPORTANCE_SUM, tkvi_weight_sum,
     tkvi_join_sums},
    {TKV_EVICT_NEEDS_OBSERVED, 1, 1.0f, TKVI_TOKEN_SCORE_ONE, 0.0f, TKV_IMPORTANCE_SUM, tkvi_weight_sum,
     tkvi_join_sums},
};

/* In the order of tkv_importance_strategy; TKVI_TOKEN_SCORE_MODES: nothing. */
static const int tkvi_token_score_of_strategy[TKV_IMPORTANCE_STRATEGIES] = {
    TKVI_TOKEN_SCORE_SUM, TKVI_TOKEN_SCORE_SUM, TKVI_TOKEN_SCORE_LARGEST, TKVI_TOKEN_SCORE_MODES,
    TKVI_TOKEN_SCORE_LOWS};

/* What a config asks for. */
typedef struct tkvi_token_scores {
    const tkvi_token_score_mode *mode; /* NULL: nothing is gathered */
    int every;                         /* one query in so many tells, or */
    int newest;                        /* the newest so many do */
    tkvi_weigher heads; /* NULL: query heads tell one by one; else their weights come together first */
    float one;          /* 1 of what a query head tells, as a whole number */
    float unit; /* 1 of what it all comes to, as if every query told: one sampled query stands for `every` */
    tkv_importance_config importance; /* with defaults; decay is that of what is gathered */
} tkvi_token_scores;

/* n: query heads of a KV head. Each tells an n-th part of what a mean is counted in. */
static void tkvi_token_score_heads(tkvi_token_scores *m, int n) {
    const tkv_importance_heads how = m->importance.heads;
    const int largest = how == TKV_IMPORTANCE_MAX;
    const int mean = how == TKV_IMPORTANCE_MEAN ? n : 1;
    const float stands_for = m->mode->least > 0.0f ? (float)m->every : 1.0f;
    float most = m->mode->least > 0.0f ? m->mode->one / m->mode->least : stands_for;
    m->one = (float)tkvi_max(1, (int)m->mode->one / mean);
    if (stands_for > most)
        m->one = tkvi_f32(m->one * tkvi_f32(stands_for / most)); /* else `unit` were too coarse */
    m->unit = tkvi_f32(m->one * (float)mean) / stands_for;
    if (n > 1 && largest != (m->mode->heads == TKV_IMPORTANCE_MAX))
        m->heads = largest ? tkvi_weight_largest : tkvi_weight_sum;
}

static void tkvi_token_score_init(tkvi_token_scores *m, const tkv_config *cfg) {
    const tkv_evict_kind kind = cfg->evict.kind;
    tkv_evict_config evict;
    int i;
    memset(m, 0, sizeof *m);
    if (!tkvi_importance_fill(&cfg->importance, &m->importance) || !tkvi_evict_fill(&cfg->evict, &evict))
        return; /* no cache has such a config */
    m->every = cfg->importance_every ? cfg->importance_every : TKVI_TOKEN_SCORE_EVERY;
    for (i = 0; i < TKVI_TOKEN_SCORE_MODES; i++)
        if (tkv_evict_needs(kind) & tkvi_token_score_modes[i].need) m->mode = &tkvi_token_score_modes[i];
    if (m->mode) { /* policies know no decay but the caller's */
        m->importance.decay = tkvi_or(cfg->importance.decay, 1.0f);
        m->newest = m->mode->need == TKV_EVICT_NEEDS_LAST ? 1 : evict.recent_tokens;
    } else if (cfg->importance_every > 0 || cfg->n_anchors > 0 || kind == TKV_EVICT_SCORES ||
               kind == TKV_EVICT_USER) {
        i = tkvi_token_score_of_strategy[m->importance.strategy];
        if (i < TKVI_TOKEN_SCORE_MODES) m->mode = &tkvi_token_score_modes[i];
    }
    if (m->mode) tkvi_token_score_heads(m, cfg->n_heads / cfg->n_kv_heads);
}

#endif /* TKVI_RULES_SCORE_MODES_H */
