/*
 * learn/feedback.h - the quality controller. It turns a stream of quality scores (1: no loss) into advice on the
 * number of hot tokens and the level of precision. It allocates nothing and uses no cache.
 *
 *     scores  ................ | change |cool-down| 1 .......... 16 .............. 100   newest
 *     advice                                       none yet      | if significant | always, from the last 100
 *
 * The rule of the original design multiplies hot tokens by 1.2 or 0.9 and moves the level by one, on the mean of
 * 100 scores. Three additions keep the plan from swinging:
 *   - Scores of an old plan do not count for the new one.
 *   - With fewer than 100 scores, the mean must be two standard errors beyond a limit.
 *   - A cheaper plan is not advised if it would lose what the last finer plan gained.
 *
 * Sums are sums of integers, so they do not depend on compiler flags. A lock guards the state of a controller.
 * Without atomics (neither gcc nor clang) only one thread may use a controller.
 */
#ifndef TKVI_LEARN_FEEDBACK_H
#define TKVI_LEARN_FEEDBACK_H

#include "cache/plan.h"

#define TKVI_SCORE_ONE 16777216.0 /* 2^24: scores from .5 to 1 become integers exactly */
#define TKVI_SCORES_FEW 16        /* fewest scores that give advice */
#define TKVI_SCORES_MANY 100      /* newest scores that advice and reports use */

/* >>scores */
/* Returns whether x is finite as a float. */
static int tkvi_real(double x) { return tkvi_is_finite((float)x); }

static float tkvi_score_cut(double x) { return x < 0.0 ? 0.0f : x > 1.0 ? 1.0f : (float)x; }

static float tkvi_score_of_perplexity(double base, double ppl) {
    if (!tkvi_real(base) || !tkvi_real(ppl) || base < 1.0 || ppl < 1.0) return -1.0f;
    return tkvi_score_cut(1.0 - (ppl - base) / base);
}

static float tkvi_score_of_accuracy(double base, double accuracy) {
    if (!tkvi_real(base) || !tkvi_real(accuracy) || base <= 0.0 || accuracy < 0.0) return -1.0f;
    return tkvi_score_cut(accuracy / base);
}

/* output_error is the share of error in the power of attention's output. Perplexity rises with this power, not with
 * its root. Measured: the model's KL divergence / output_error at the same positions, for formats from 4 to 1.25
 * bits. Their errors differ by a factor of 80. The ratio was .9 to 1.8 for SmolLM2-135M (400 tokens). It was 2.9 to
 * 3.4 for a model of 15M weights, and .2 to .4 for one of 3M. Errors of attention weights alone (kl, top1) leave
 * out the errors of V. Blocks without an exact copy are assumed to have the error of the others: hence the division
 * by coverage. */
static float tkvi_score_of_meter(const tkv_quality_info *q, double weight) {
    if (!q || q->samples == 0 || !tkvi_real(q->coverage) || !tkvi_real(q->output_error)) return -1.0f;
    if (q->coverage < .05 || q->coverage > 1.0 || q->output_error < 0.0 || !tkvi_real(weight) || weight < 0.0)
        return -1.0f;
    return tkvi_score_cut(1.0 - (weight > 0.0 ? weight : 1.0) * q->output_error / q->coverage);
}

TKV_API tkv_status tkv_compute_score(const tkv_score_params *p, float *score) {
    float x = -1.0f;
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    if (!p || !score || (p->source == TKV_SCORE_METER && !p->meter)) return TKV_ERR_ARG;
    if (p->source == TKV_SCORE_METER) x = tkvi_score_of_meter(p->meter, p->weight);
    if (p->source == TKV_SCORE_PERPLEXITY) x = tkvi_score_of_perplexity(p->base, p->value);
    if (p->source == TKV_SCORE_ACCURACY) x = tkvi_score_of_accuracy(p->base, p->value);
    if (x < 0.0f) return TKV_ERR_RANGE;
    *score = x;
    return TKV_OK;
}

/* >>the config */
static const char *tkvi_feedback_fill(const tkv_feedback_config *from, tkv_feedback_config *cfg) {
    *cfg = *from;
    if (tkvi_bits(cfg->target) == 0) cfg->target = .97f;
    if (cfg->cooldown == 0) cfg->cooldown = 8;
    if (cfg->cooldown == TKV_OFF) cfg->cooldown = 0;
    if (cfg->max_hot == 0) cfg->max_hot = tkvi_max(cfg->min_hot, 1024);
    if (cfg->min_hot == 0) cfg->min_hot = tkvi_min(cfg->max_hot, 32);
    if (cfg->max_level == 0) cfg->max_level = tkvi_max(cfg->min_level, 3);
    if (cfg->max_level == TKV_OFF) cfg->max_level = 0;
    if (!tkvi_is_finite(cfg->target) || cfg->target < .01f || cfg->target > .9999f)
        return "target must be from .01 to .9999";
    if (cfg->cooldown < 0 || cfg->cooldown > TKV_FEEDBACK_HISTORY)
        return "cooldown must be at most 1000 scores, 0 for 8 or TKV_OFF";
    if (cfg->min_hot < 1 || cfg->max_hot < cfg->min_hot || cfg->max_hot > TKVI_FOREVER)
        return "min_hot and max_hot must be from 1 to 2^30 - 1, in this order";
    if (cfg->max_level < 0 || cfg->max_level >= TKV_MAX_LEVELS)
        return "max_level must be below TKV_MAX_LEVELS, TKV_OFF or 0 for 3";
    if (cfg->min_level < 0 || cfg->min_level > cfg->max_level) return "min_level must be from 0 to max_level";
    return NULL;
}

/* Forgets the scores of the plan. Scores of the new plan count after `wait` more scores. */
static void tkvi_feedback_restart(tkv_feedback *f, int wait) {
    f->since = f->scores + (uint64_t)wait;
    f->sum = f->squares = 0;
    f->low = f->gain = -1.0f;
}

TKV_API tkv_status tkv_init_feedback(tkv_feedback *f, const tkv_feedback_config *cfg, char *reason,
                                     size_t size) {
    tkv_feedback_config none, full;
    const char *wrong;
    if (!TKVI_HAS_METER)
        return tkvi_give_reason(TKV_ERR_UNSUPPORTED, "TKV_NO_METER leaves this out", reason, size);
    memset(&none, 0, sizeof none);
    (void)tkvi_give_reason(TKV_OK, "", reason, size);
    if (!f) return TKV_ERR_ARG;
    wrong = tkvi_feedback_fill(cfg ? cfg : &none, &full);
    if (wrong) return tkvi_give_reason(TKV_ERR_CONFIG, wrong, reason, size);
    memset(f, 0, sizeof *f);
    f->cfg = full;
    f->moved = 1;
    tkvi_feedback_restart(f, 0);
    return TKV_OK;
}

/* Appends score x (units of 2^-24) to the ring and updates the sums of the newest 100. */
static void tkvi_feedback_add(tkv_feedback *f, uint64_t x) {
    const uint64_t at = f->scores++;
    f->history[at % TKV_FEEDBACK_HISTORY] = (uint32_t)x;
    if (at < f->since) return;
    if (at - f->since >= TKVI_SCORES_MANY) {
        const uint64_t old = f->history[(at - TKVI_SCORES_MANY) % TKV_FEEDBACK_HISTORY];
        f->sum -= old;
        f->squares -= old * old;
    }
    f->sum += x;
    f->squares += x * x;
}

TKV_API tkv_status tkv_observe_score(tkv_feedback *f, float score) {
    int refused;
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    if (!f) return TKV_ERR_ARG;
    refused = !tkvi_is_finite(score) || score < 0.0f || score > 1.0f;
    tkvi_lock(&f->lock);
    if (refused) f->refused++;
    else tkvi_feedback_add(f, (uint64_t)((double)score * TKVI_SCORE_ONE + .5));
    tkvi_unlock(&f->lock);
    return refused ? TKV_ERR_ARG : TKV_OK;
}

/* >>the newest n scores */
typedef struct tkvi_scores {
    int n;
    uint64_t sum, squares;
} tkvi_scores;

/* Returns the ring index of the oldest of the newest n scores. */
static int tkvi_scores_from(const tkv_feedback *f, int n) {
    return (int)((f->scores - (uint64_t)n) % TKV_FEEDBACK_HISTORY);
}

static int tkvi_scores_next(int at) { return at + 1 < TKV_FEEDBACK_HISTORY ? at + 1 : 0; }

static tkvi_scores tkvi_scores_of(const tkv_feedback *f, int n) {
    tkvi_scores s;
    int i, at = tkvi_scores_from(f, n);
    s.n = n;
    s.sum = s.squares = 0;
    for (i = 0; i < n; i++, at = tkvi_scores_next(at)) {
        const uint64_t x = f->history[at];
        s.sum += x;
        s.squares += x * x;
    }
    return s;
}

static double tkvi_scores_mean(const tkvi_scores *s) {
    return s->n ? (double)s->sum / TKVI_SCORE_ONE / s->n : 0.0;
}

/* Returns the sample variance (divisor n - 1). */
static double tkvi_scores_variance(const tkvi_scores *s) {
    const double sum = (double)s->sum;
    const double square = s->n > 1 ? ((double)s->squares - sum * sum / s->n) / (s->n - 1) : 0.0;
    return square > 0.0 ? square / TKVI_SCORE_ONE / TKVI_SCORE_ONE : 0.0;
}

/* Returns on which side of the limit the mean is: -1 or 1, or 0 if it is within `errors` standard errors of the
 * limit. */
static int tkvi_scores_side(const tkvi_scores *s, double limit, double errors) {
    const double off = tkvi_scores_mean(s) - limit;
    if (off * off * s->n <= errors * errors * tkvi_scores_variance(s)) return 0;
    return off < 0.0 ? -1 : 1;
}

/* >>advice */
enum {
    TKVI_ADVICE_FEW,
    TKVI_ADVICE_MEETS,
    TKVI_ADVICE_FINER,
    TKVI_ADVICE_NO_FINER,
    TKVI_ADVICE_CHEAPER,
    TKVI_ADVICE_NO_CHEAPER,
    TKVI_ADVICE_LOSES
};
static const char *const tkvi_advice_reasons[] = {
    "fewer than 16 scores of this plan",
    "the mean score meets the target and has little to spare, or it is not clear yet",
    "the mean score is below the target: more hot tokens, higher precision",
    "the mean score is below the target, but hot tokens and level are at their limits",
    "the mean score is well above the target: fewer hot tokens, lower precision",
    "the mean score is well above the target, but hot tokens and level are at their limits",
    "the mean score is well above the target, but would fall below it as it did before",
};

/* More hot tokens, x 1.2 rounded up. A plan that is already above max_hot stays as it is. */
static int tkvi_hot_more(const tkv_feedback_config *cfg, int hot) {
    const int64_t more = ((int64_t)hot * 6 + 4) / 5;
    return more >= cfg->max_hot ? tkvi_max(hot, cfg->max_hot) : tkvi_max((int)more, cfg->min_hot);
}

/* Fewer hot tokens, x 0.9 rounded down. A plan that is already below min_hot stays as it is. */
static int tkvi_hot_less(const tkv_feedback_config *cfg, int hot) {
    return tkvi_min(hot, tkvi_max(cfg->min_hot, (int)((int64_t)hot * 9 / 10)));
}

/* Fills in *a for the plan a->hot_tokens, a->level and returns a TKVI_ADVICE value. The caller holds the lock. */
static int tkvi_advise(tkv_feedback *f, tkv_advice *a) {
    const tkv_feedback_config *cfg = &f->cfg;
    const double target = (double)cfg->target, slack = (1.0 - target) / 2.0;
    const uint64_t had = f->scores > f->since ? f->scores - f->since : 0;
    const int n = had < TKVI_SCORES_MANY ? (int)had : TKVI_SCORES_MANY;
    const tkvi_scores late = tkvi_scores_of(f, tkvi_min(n, TKVI_SCORES_FEW));
    const double errors = n < TKVI_SCORES_MANY ? 2.0 : 0.0;
    tkvi_scores all;
    float mean;
    int below;
    all.n = n;
    all.sum = f->sum;
    all.squares = f->squares;
    mean = (float)tkvi_scores_mean(&all);
    a->mean = mean;
    a->samples = n;
    if (n < TKVI_SCORES_FEW) return TKVI_ADVICE_FEW;
    if (f->gain >= 0.0f && f->scores - f->gained_at > TKV_FEEDBACK_HISTORY) f->low = f->gain = -1.0f;
    if (f->low >= 0.0f && f->gain < 0.0f) {
        f->gain = mean > f->low ? mean - f->low : 0.0f;
        f->gained_at = f->scores;
    }
    below = tkvi_scores_side(&all, target, errors) < 0;
    if (below || tkvi_scores_side(&late, target, 3.0) < 0) {
        const int hot = tkvi_hot_more(cfg, a->hot_tokens), step = a->level > cfg->min_level ? -1 : 0;
        if (hot == a->hot_tokens && !step) return TKVI_ADVICE_NO_FINER;
        a->hot_tokens = hot;
        a->step = step;
        if (!below) a->mean = (float)tkvi_scores_mean(&late), a->samples = late.n;
        tkvi_feedback_restart(f, cfg->cooldown);
        f->low = a->mean;
        f->finer++;
        return TKVI_ADVICE_FINER;
    }
    if (tkvi_scores_side(&all, target + slack, errors) > 0 && tkvi_scores_mean(&late) > target + slack) {
        const int hot = tkvi_hot_less(cfg, a->hot_tokens), step = a->level < cfg->max_level ? 1 : 0;
        if (hot == a->hot_tokens && !step) return TKVI_ADVICE_NO_CHEAPER;
        if (f->gain >= 0.0f && (double)mean - (double)f->gain <= target + slack / 2.0)
            return TKVI_ADVICE_LOSES;
        a->hot_tokens = hot;
        a->step = step;
        tkvi_feedback_restart(f, cfg->cooldown);
        f->cheaper++;
        return TKVI_ADVICE_CHEAPER;
    }
    return TKVI_ADVICE_MEETS;
}

TKV_API tkv_status tkv_get_advice(tkv_feedback *f, int hot_tokens, int level, tkv_advice *out) {
    tkv_advice a;
    int why;
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    if (!f || !out || hot_tokens < 0 || hot_tokens > TKVI_FOREVER || level < 0 || level >= TKV_MAX_LEVELS)
        return TKV_ERR_ARG;
    memset(&a, 0, sizeof a);
    a.hot_tokens = hot_tokens;
    a.level = level;
    tkvi_lock(&f->lock);
    if (!f->moved && (hot_tokens != f->hot || level != f->level)) tkvi_feedback_restart(f, f->cfg.cooldown);
    why = tkvi_advise(f, &a);
    f->moved = why == TKVI_ADVICE_FINER || why == TKVI_ADVICE_CHEAPER;
    f->hot = hot_tokens;
    f->level = level;
    tkvi_unlock(&f->lock);
    a.kind = why == TKVI_ADVICE_FINER     ? TKV_ADVICE_FINER
             : why == TKVI_ADVICE_CHEAPER ? TKV_ADVICE_CHEAPER
                                          : TKV_ADVICE_KEEP;
    a.level = level + a.step;
    a.reason = tkvi_advice_reasons[why];
    *out = a;
    return TKV_OK;
}

/* >>reports */
TKV_API tkv_status tkv_get_feedback(tkv_feedback *f, int last, tkv_feedback_info *out) {
    tkv_feedback_info r;
    tkvi_scores s;
    uint64_t weighted = 0;
    uint32_t least = 0xffffffffu, most = 0;
    int i, at, n = last ? last : TKVI_SCORES_MANY;
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    if (!f || !out || n < 0 || n > TKV_FEEDBACK_HISTORY) return TKV_ERR_ARG;
    memset(&r, 0, sizeof r);
    tkvi_lock(&f->lock);
    if ((uint64_t)n > f->scores) n = (int)f->scores;
    s = tkvi_scores_of(f, n);
    for (i = 0, at = tkvi_scores_from(f, n); i < n; i++, at = tkvi_scores_next(at)) {
        const uint32_t x = f->history[at];
        weighted += (uint64_t)i * x;
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    r.scores = f->scores;
    r.refused = f->refused;
    r.finer = f->finer;
    r.cheaper = f->cheaper;
    tkvi_unlock(&f->lock);
    r.n = n;
    if (n > 0) {
        const double target = (double)f->cfg.target, slack = (1.0 - target) / 2.0;
        const double mean = tkvi_scores_mean(&s), variance = tkvi_scores_variance(&s);
        /* least squares over i = 0 .. n - 1: width = sum (i - mean i)^2, along = sum (i - mean i) * score */
        const double width = (double)n * ((double)n * n - 1.0) / 12.0;
        const double along = ((double)weighted - (double)s.sum * (n - 1) / 2.0) / TKVI_SCORE_ONE;
        const double slope = n > 1 ? along / width : 0.0;
        const double rest = variance * (n - 1) - slope * along, rise = slope * (n - 1);
        r.average = (float)mean;
        r.least = (float)(least / TKVI_SCORE_ONE);
        r.most = (float)(most / TKVI_SCORE_ONE);
        r.deviation = (float)sqrt(variance);
        r.trend = (float)slope;
        r.meets_target = mean >= target;
        if (n >= TKVI_SCORES_FEW) {
            r.is_improving = slope > 0.0 && slope * slope * width * (n - 2) > 4.0 * rest;
            r.is_stable = variance <= slack * slack && rise * rise <= slack * slack;
        }
    }
    *out = r;
    return TKV_OK;
}

#endif /* TKVI_LEARN_FEEDBACK_H */
