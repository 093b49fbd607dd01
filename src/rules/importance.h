/*
 * rules/importance.h - computes the importance of each token from its attention scores and its age, and selects
 * tokens for promotion to a more precise tier. A strategy is a row of a table, as in akv-cache. The code allocates
 * nothing and uses no cache.
 *
 *     step               0  1 2 3 4  5 6 7
 *     attention score    .2 . . . .1 . . .     of one token; A is updated only when a score arrives:
 *     A                  .2       .2 * decay^4 + .1
 */
#ifndef TKVI_RULES_IMPORTANCE_H
#define TKVI_RULES_IMPORTANCE_H

#include "rules/pressure.h"
#include "rules/select.h"

/* >>strategies: how a step's attention score changes A. a is decayed already; low: the bound of "persistence" */
static double tkvi_add_score(double a, double mass, double low) {
    (void)low;
    return a + mass;
}

static double tkvi_max_score(double a, double mass, double low) {
    (void)low;
    return a > mass ? a : mass;
}

static double tkvi_count_low_score(double a, double mass, double low) { return a - (mass < low ? 1.0 : 0.0); }

typedef struct tkvi_strategy {
    const char *name;
    double (*gather)(double a, double mass, double low);
    float decay, attention, recency;
} tkvi_strategy;

static const tkvi_strategy tkvi_strategies[] = {
    {"hybrid", TKVI_IF(TKVI_HAS_EVICT, tkvi_add_score), .95f, .7f, .3f},
    {"accumulation", TKVI_IF(TKVI_HAS_EVICT, tkvi_add_score), 1.0f, 1.0f, 0.0f},
    {"heavy_hitter", TKVI_IF(TKVI_HAS_EVICT, tkvi_max_score), 1.0f, 1.0f, 0.0f},
    {"recency", TKVI_IF(TKVI_HAS_EVICT, tkvi_add_score), 1.0f, 0.0f, 1.0f},
    {"persistence", TKVI_IF(TKVI_HAS_EVICT, tkvi_count_low_score), 1.0f, 1.0f, 0.0f},
};

static const tkvi_strategy *tkvi_strategy_of(tkv_importance_strategy s) {
    return (int)s >= 0 && (int)s < TKV_IMPORTANCE_COUNT ? &tkvi_strategies[s] : NULL;
}

static const char *tkvi_importance_name(tkv_importance_strategy strategy) {
    const tkvi_strategy *s = tkvi_strategy_of(strategy);
    return s ? s->name : NULL;
}

/* Copies *from (NULL: zeros) to *cfg and fills in defaults. Returns the strategy, or NULL if the config is
 * invalid. */
static const tkvi_strategy *tkvi_importance_fill(const tkv_importance_config *from,
                                                 tkv_importance_config *cfg) {
    const tkvi_strategy *s;
    memset(cfg, 0, sizeof *cfg);
    if (from) *cfg = *from;
    s = tkvi_strategy_of(cfg->strategy);
    if (cfg->sample_every < 0 || cfg->sample_every >= 1 << 30) return NULL;
    if (!s || (int)cfg->heads < 0 || cfg->heads > TKV_IMPORTANCE_SUM) return NULL;
    cfg->decay = tkvi_or(cfg->decay, s->decay);
    cfg->attention = tkvi_or(cfg->attention, s->attention);
    cfg->recency = tkvi_or(cfg->recency, s->recency);
    cfg->tau = tkvi_or(cfg->tau, 64.0f);
    return tkvi_within(cfg->decay, 1e-30f, 1.0f) && tkvi_within(tkvi_number(cfg->attention), 0.0f, 1e6f) &&
                   tkvi_within(tkvi_number(cfg->recency), 0.0f, 1e6f) &&
                   tkvi_within(cfg->tau, 1.0f, 1073741824.0f) && tkvi_within(cfg->low, 0.0f, 1e30f)
               ? s
               : NULL;
}

/* Returns x^n for 0 <= x <= 1, by squaring. It only multiplies, so it rounds alike on every machine; pow() need
 * not. The usual n of 1 costs two products. */
static double tkvi_power(double x, int n) {
    double y = 1.0;
    for (; n > 0; n >>= 1, x = tkvi_f64(x * x)) {
        if (n & 1) y = tkvi_f64(y * x);
        if (y < 1e-200) return 0.0; /* some compiler flags flush subnormal numbers */
    }
    return y;
}

/* The first step of tkv_update_importance, which has checked the config and the lengths. */
static tkv_status tkvi_add_importance(const tkv_importance_config *cfg, tkv_token_importance *tokens,
                                      const float *mass, int n, int now) {
    tkv_importance_config full;
    const tkvi_strategy *s = tkvi_importance_fill(cfg, &full);
    double low;
    int i;
    TKVI_ASSERT(s && n >= 0 && now >= 0);
    for (i = 0; i < n; i++) {
        if (!tkvi_within(mass[i], 0.0f, FLT_MAX)) return TKV_ERR_NONFINITE;
        if (!tkvi_is_finite(tokens[i].attention)) return TKV_ERR_NONFINITE;
        if (tokens[i].step < 0 || tokens[i].step > now) return TKV_ERR_ARG;
    }
    low = (double)tkvi_or(full.low, n > 0 ? 1.0f / (float)n : 0.0f);
    for (i = 0; i < n; i++) {
        const double old = (double)tokens[i].attention;
        const double a = tkvi_f64(old * tkvi_power((double)full.decay, now - tokens[i].step));
        const double sum = s->gather(a, (double)mass[i], low);
        tokens[i].attention = sum > (double)FLT_MAX ? FLT_MAX : (float)sum;
        tokens[i].step = now;
    }
    return TKV_OK;
}

/* The second step, with positions that are checked too. */
static tkv_status tkvi_compute_importance(const tkv_importance_config *cfg,
                                          const tkv_token_importance *tokens, const int *position, int n,
                                          int now, float *out) {
    tkv_importance_config full;
    double fade;
    int i;
    (void)tkvi_importance_fill(cfg, &full);
    full.attention = tkvi_number(full.attention);
    full.recency = tkvi_number(full.recency);
    for (i = 0; i < n; i++) {
        TKVI_ASSERT((position ? position[i] : i) >= 0 && (position ? position[i] : i) <= now);
        if (tokens[i].step < 0 || tokens[i].step > now) return TKV_ERR_ARG;
        if (!tkvi_is_finite(tokens[i].attention)) return TKV_ERR_NONFINITE;
    }
    fade = exp(-1.0 / (double)full.tau);
    for (i = 0; i < n; i++) {
        const double decayed = tkvi_power((double)full.decay, now - tokens[i].step);
        const double a = tkvi_f64((double)full.attention * (double)tokens[i].attention) * decayed;
        const double age = full.recency > 0.0f ? tkvi_power(fade, now - (position ? position[i] : i)) : 0.0;
        const double sum = a + (double)full.recency * age;
        out[i] = sum > (double)FLT_MAX ? FLT_MAX : sum < -(double)FLT_MAX ? -FLT_MAX : (float)sum;
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_update_importance(const tkv_importance_config *cfg, tkv_token_importance *tokens,
                                         const int *positions, const float *scores, int n, int now,
                                         float *out) {
    tkv_importance_config full;
    tkv_status st = TKV_OK;
    int i;
    if (!TKVI_HAS_EVICT) return TKV_ERR_UNSUPPORTED;
    if (n < 0 || now < 0 || (n > 0 && (!tokens || (!scores && !out)))) return TKV_ERR_ARG;
    if (!tkvi_importance_fill(cfg, &full)) return TKV_ERR_CONFIG;
    for (i = 0; i < n; i++) { /* before any token changes */
        const int at = positions ? positions[i] : i;
        if (at < 0 || at > now) return TKV_ERR_ARG;
    }
    if (scores) st = tkvi_add_importance(cfg, tokens, scores, n, now);
    if (!st && out) st = tkvi_compute_importance(cfg, tokens, positions, n, now, out);
    return st;
}

/* Upper bound of q.k by Quest (arXiv 2406.10774). The product of a channel is largest at one end of its range. */
TKV_API float tkv_bound_score(const float *q, const float *low, const float *high, int head_dim) {
    double sum = 0.0;
    int c;
    if (!q || !low || !high) return 0.0f;
    for (c = 0; c < head_dim; c++) sum += (double)q[c] * (double)(q[c] < 0.0f ? low[c] : high[c]);
    return (float)sum;
}

/* >>promotion: candidates are offered one by one. A short sorted list keeps the best; its worst entry is removed
 * when a better one arrives. */
typedef struct tkvi_promoting {
    float threshold;
    int now, cooldown, room, found;
    int out[TKV_MAX_PROMOTIONS]; /* [found] best first; of equals the one offered first */
    float score[TKV_MAX_PROMOTIONS];
    int waiting, no_source; /* above the threshold: must wait; has no more precise source */
} tkvi_promoting;

/* Starts the list of step `now`. room: promotions that this step still allows. Returns 0 if the config is
 * invalid. */
static int tkvi_promoting_begin(tkvi_promoting *b, const tkv_promotion_state *p, int now) {
    const int per_step = p->cfg.per_step ? p->cfg.per_step : 8;
    memset(b, 0, sizeof *b);
    b->threshold = tkvi_number(tkvi_or(p->cfg.threshold, .05f));
    b->cooldown = p->cfg.cooldown == TKV_OFF ? 0 : p->cfg.cooldown ? p->cfg.cooldown : 4;
    b->now = now;
    b->room = tkvi_max(0, per_step - (now > p->step ? 0 : p->used));
    return tkvi_is_finite(b->threshold) && per_step >= 1 && per_step <= TKV_MAX_PROMOTIONS &&
           b->cooldown >= 0;
}

/* Offers candidate i. source: whether it has a more precise source. moved: step of its last move, or TKV_NEVER. */
static void tkvi_promoting_offer(tkvi_promoting *b, int i, float score, int source, int moved) {
    int j;
    if (score < b->threshold) return;
    if (!source) {
        b->no_source++;
        return;
    }
    if ((moved != TKV_NEVER && b->now - moved < b->cooldown) || b->room == 0 ||
        (b->found == b->room && score <= b->score[b->found - 1])) {
        b->waiting++;
        return;
    }
    if (b->found == b->room) b->waiting++;
    else b->found++;
    for (j = b->found - 1; j > 0 && score > b->score[j - 1]; j--) {
        b->out[j] = b->out[j - 1];
        b->score[j] = b->score[j - 1];
    }
    b->out[j] = i;
    b->score[j] = score;
}

/* Counts the step: the first `done` entries of the list were promoted, the others wait. */
static void tkvi_promoting_end(const tkvi_promoting *b, tkv_promotion_state *p, int done) {
    if (b->now > p->step) p->used = 0;
    p->step = b->now;
    p->used += done;
    p->promoted += (uint64_t)done;
    p->no_source += b->no_source > 0;
    p->waiting += (uint64_t)(b->waiting + b->found - done);
}

#endif /* TKVI_RULES_IMPORTANCE_H */
