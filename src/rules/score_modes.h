/*
 * rules/score_modes.h - how a cache accumulates attention scores per token. A mode is a row of a table, and a
 * config has at most one. The eviction policy of cfg.evict selects the mode by the input that it needs
 * (rules/evict.h). A policy without such an input leaves the choice to the strategy of cfg.importance. The strategy
 * then counts only if cfg.importance.sample_every, cfg.tiers.n_anchors, or the policy "scores" or "user" asks for it.
 *
 *     weights p of a sampled query --say--> 64 floats of a block --rounded--> uint32 --join--> token_meta
 *
 * Scores in token_meta are saturating integers, so results do not depend on the order of threads.
 */
#ifndef TKVI_RULES_SCORE_MODES_H
#define TKVI_RULES_SCORE_MODES_H

#include "kernels/scalar.h"
#include "rules/evict.h"

#define TKVI_TOKEN_SCORE_ONE 1048576.0f /* 2^20: a weight of 1 as an integer */
#define TKVI_TOKEN_SCORE_LOW 256.0f     /* a count of 1 as an integer: decay leaves fractions of it */
#define TKVI_TOKEN_SCORE_MOST 2047.0f   /* largest score of one call: 2047 * 2^20 fits an int */
#define TKVI_TOKEN_SCORE_EVERY 32
#define TKVI_TOKEN_SCORE_RATE                                                                                \
    4096 /* a sampled query stands for at most this many */ /* default of cfg.importance.sample_every */

/* >>adding the weights of a query to the scores of a block */
/* s: logits [64], only to find hidden tokens. p: attention weights [64] of one query row. low: a weight below it
 * counts as low. said: [64], accumulates. Loops take 16 values at a time, so that compilers vectorize them also at
 * -O2. */
typedef void (*tkvi_sample_fn)(const float *s, const float *p, float low, float *said);

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

/* >>integers */
/* Returns x * one, rounded. A NaN, a negative number and 2^31 or more give 0. The test reads bits, so that it also
 * works with -ffast-math. */
static uint32_t tkvi_token_score_counted(float x, float one) {
    const uint32_t bits = tkvi_bits(x * one + 0.5f);
    return (uint32_t)(int32_t)tkvi_from_bits(bits < 0x4f000000u ? bits : 0u); /* below 2^31 */
}

/* Adds `more` to the scores of 64 tokens; a sum stops at 2^32 - 1. */
static void tkvi_join_sums(uint32_t *mass, const uint32_t *more) {
    int t, k;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        uint32_t x[16];
        for (k = 0; k < 16; k++) x[k] = mass[t + k] + more[t + k];
        for (k = 0; k < 16; k++) mass[t + k] = x[k] < more[t + k] ? 0xffffffffu : x[k];
    }
}

/* Keeps the larger of both scores for each of 64 tokens. */
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
    int need; /* the bit TKVI_NEEDS_ that selects this mode; 0: no policy needs it */
    int fresh; /* 1: only the last queries before an eviction count (reclaim/scores.h); 0: samples one in `every` */
    float sign;     /* -1 where a high score is bad */
    float one;      /* a weight or count of 1 as an integer */
    float min_unit; /* lower limit of tkvi_token_scores.unit; 0: sampling does not scale the scores */
    tkv_importance_heads heads; /* how `join` combines query heads that are scored one by one: sum or max */
    tkvi_sample_fn say;         /* query row -> scores of a block */
    void (*join)(uint32_t *mass, const uint32_t *more); /* scores of a block -> token_meta */
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
    {TKVI_NEEDS_TOTAL_SCORES, 0, 1.0f, TKVI_TOKEN_SCORE_ONE, 4096.0f, TKV_IMPORTANCE_SUM, tkvi_weight_sum,
     tkvi_join_sums},
    {0, 0, 1.0f, TKVI_TOKEN_SCORE_ONE, 0.0f, TKV_IMPORTANCE_MAX, tkvi_weight_largest, tkvi_join_largest},
    {TKVI_NEEDS_LOW_COUNTS, 0, -1.0f, TKVI_TOKEN_SCORE_LOW, 1.0f, TKV_IMPORTANCE_SUM, tkvi_weight_lows,
     tkvi_join_sums},
    {TKVI_NEEDS_LAST_SCORES, 1, 1.0f, TKVI_TOKEN_SCORE_ONE, 0.0f, TKV_IMPORTANCE_SUM, tkvi_weight_sum,
     tkvi_join_sums},
    {TKVI_NEEDS_PROMPT_SCORES, 1, 1.0f, TKVI_TOKEN_SCORE_ONE, 0.0f, TKV_IMPORTANCE_SUM, tkvi_weight_sum,
     tkvi_join_sums},
};

/* In the order of tkv_importance_strategy. TKVI_TOKEN_SCORE_MODES: the strategy uses no attention. */
static const int tkvi_token_score_of_strategy[TKV_IMPORTANCE_COUNT] = {
    TKVI_TOKEN_SCORE_SUM, TKVI_TOKEN_SCORE_SUM, TKVI_TOKEN_SCORE_LARGEST, TKVI_TOKEN_SCORE_MODES,
    TKVI_TOKEN_SCORE_LOWS};

/* The mode of a config, with its numbers. */
typedef struct tkvi_token_scores {
    const tkvi_token_score_mode *mode; /* NULL: no scores are collected */
    int every;                         /* samples one query in `every`, or, where mode->fresh is 1, */
    int newest;                        /* the newest `newest` queries, while decoding the newest */
    int decoded;                       /* `decoded` before an eviction */
    tkvi_sample_fn heads;              /* NULL: query heads are scored one by one; else combines them first */
    float one;                         /* a weight of 1 from one query head, as an integer */
    int mean;                          /* `one` is for the mean of so many query heads; 1: they add up */
    float unit;                        /* an accumulated score of 1 as an integer, sampling scaled out */
    tkv_importance_config importance;  /* with defaults; decay is the one that the scores use */
} tkvi_token_scores;

/* Sets heads, one, mean and unit. n: query heads of a KV head, in most layers. For a mean each query head adds an n-th
 * part. One sampled query stands for `every` queries, at most TKVI_TOKEN_SCORE_RATE, so unit is one / every. It stays
 * at mode->min_unit or above, for scores that a caller adds. */
static void tkvi_token_score_heads(tkvi_token_scores *m, int n) {
    const tkv_importance_heads how = m->importance.heads;
    const int largest = how == TKV_IMPORTANCE_MAX;
    const int mean = how == TKV_IMPORTANCE_MEAN ? n : 1;
    m->mean = mean;
    m->one = (float)tkvi_max(1, (int)m->mode->one / mean);
    m->unit = m->one * (float)mean;
    if (m->mode->min_unit > 0.0f) {
        const float stands_for = (float)tkvi_min(m->every, TKVI_TOKEN_SCORE_RATE);
        m->unit = m->unit / stands_for;
        if (m->unit < m->mode->min_unit) {
            m->unit = m->mode->min_unit;
            m->one = tkvi_f32(tkvi_f32(m->unit * stands_for) / (float)mean);
        }
    }
    if (largest != (m->mode->heads == TKV_IMPORTANCE_MAX))
        m->heads = largest ? tkvi_weight_largest : tkvi_weight_sum;
}

/* A weight of 1 from one query head of a layer with n query heads of a KV head, as an integer. */
static float tkvi_token_score_one(const tkvi_token_scores *m, int n) {
    return m->importance.heads == TKV_IMPORTANCE_MEAN && n != m->mean ? m->one * (float)m->mean / (float)n
                                                                      : m->one;
}

/* Derives *m from the config. m->mode stays NULL if the config uses no attention scores. */
static void tkvi_token_score_init(tkvi_token_scores *m, const tkv_config *cfg) {
    const tkv_evict_policy kind = cfg->evict.policy;
    tkv_evict_config evict;
    int i;
    memset(m, 0, sizeof *m);
    if (!TKVI_HAS_EVICT) return;
    (void)tkvi_importance_fill(&cfg->importance, &m->importance); /* a cache has a valid config */
    (void)tkvi_evict_fill(&cfg->evict, &evict);
    m->every = cfg->importance.sample_every ? cfg->importance.sample_every : TKVI_TOKEN_SCORE_EVERY;
    for (i = 0; i < TKVI_TOKEN_SCORE_MODES; i++)
        if (tkvi_evict_needs(kind) & tkvi_token_score_modes[i].need) m->mode = &tkvi_token_score_modes[i];
    if (m->mode) { /* a policy has no default decay */
        m->importance.decay = tkvi_or(cfg->importance.decay, 1.0f);
        m->newest = m->mode->need == TKVI_NEEDS_LAST_SCORES ? 1 : evict.recent_tokens;
        m->decoded = tkvi_max(1, tkvi_min(m->newest, (evict.batch ? evict.batch : TKVI_BLOCK) / m->every));
    } else if (cfg->importance.sample_every > 0 || cfg->tiers.n_anchors > 0 || kind == TKV_EVICT_SCORES ||
               kind == TKV_EVICT_USER) {
        i = tkvi_token_score_of_strategy[m->importance.strategy];
        if (i < TKVI_TOKEN_SCORE_MODES) m->mode = &tkvi_token_score_modes[i];
    }
    if (m->mode) tkvi_token_score_heads(m, cfg->model.n_heads / cfg->model.n_kv_heads);
}

#endif /* TKVI_RULES_SCORE_MODES_H */
