/*
 * rules/pressure.h - the pressure controller. It turns a stream of pressures (bytes held / bytes allowed) into a
 * level of an ordered ladder; level 0 is the loosest. It allocates nothing and uses no cache.
 *
 *     pressure     .5 .7 .9 1. 1. .9 .6 .3        average += alpha * (pressure - average)
 *     average   -> tighten while it is at or above the next threshold
 *               -> relax one level while it is below the present threshold - hysteresis
 *
 * With cfg.jump, a pressure that is levels above the present one becomes the average.
 *
 * A lock guards the state of a controller, so a reader always gets counters that match the level. Without atomics
 * (neither gcc nor clang) only one thread may use a controller.
 */
#ifndef TKVI_RULES_PRESSURE_H
#define TKVI_RULES_PRESSURE_H

#include "core/base.h"
#include "core/switches.h"

/* In the order of tkv_pressure_profile. */
static const tkv_pressure_config tkvi_profiles[TKV_PROFILE_COUNT] = {
    {TKV_PROFILE_DEFAULT, {.80f, .95f, 0, 0, 0, 0, 0}, .05f, .20f, 0, 0, 0},
    {TKV_PROFILE_FP16_ONLY, {.80f, .95f, 0, 0, 0, 0, 0}, .05f, .20f, 0, TKV_OFF, 0},
    {TKV_PROFILE_AGGRESSIVE, {.50f, .80f, 0, 0, 0, 0, 0}, .05f, .30f, 1, 0, 0},
};

static const char *tkvi_profile_name(tkv_pressure_profile p) {
    static const char *const names[TKV_PROFILE_COUNT] = {"default", "fp16_only", "aggressive"};
    return (int)p >= 0 && (int)p < TKV_PROFILE_COUNT ? names[p] : NULL;
}

/* Returns the profile of a config; the default one if it names none that exists. */
static const tkv_pressure_config *tkvi_profile_of(const tkv_pressure_config *cfg) {
    return &tkvi_profiles[tkvi_profile_name(cfg->profile) ? cfg->profile : TKV_PROFILE_DEFAULT];
}

/* Returns the number of thresholds, which is the highest level. */
static int tkvi_pressure_levels(const tkv_pressure_config *cfg) {
    int n = 0;
    while (n < TKV_MAX_LEVELS - 1 && (tkvi_bits(cfg->threshold[n]) & 0x7fffffffu) != 0) n++;
    return n;
}

/* Returns whether x is in [low, high]. A NaN is not, even with -ffast-math: the finite test reads bits. */
static int tkvi_within(float x, float low, float high) { return tkvi_is_finite(x) && x >= low && x <= high; }

static int tkvi_jump_is_left_out(const tkv_pressure_config *cfg) { return !TKVI_HAS_METER && cfg->jump; }

/* Copies *from to *cfg and fills in defaults. Returns NULL, or the reason why the config is invalid. */
static const char *tkvi_pressure_fill(const tkv_pressure_config *from, tkv_pressure_config *cfg) {
    const tkv_pressure_config *profile = tkvi_profile_of(from);
    int i, n, any = 0;
    *cfg = *from;
    if (tkvi_jump_is_left_out(cfg)) return "TKV_NO_METER leaves jump out";
    if (!tkvi_profile_name(cfg->profile)) return "profile must be a tkv_pressure_profile";
    for (i = 0; i < TKV_MAX_LEVELS - 1; i++) any |= tkvi_bits(cfg->threshold[i]) != 0;
    if (!any) {
        cfg->threshold[0] = profile->threshold[0];
        cfg->threshold[1] = profile->threshold[1];
    }
    cfg->hysteresis = tkvi_or(cfg->hysteresis, profile->hysteresis);
    cfg->alpha = tkvi_or(cfg->alpha, profile->alpha);
    n = tkvi_pressure_levels(cfg);
    for (i = 0; i < TKV_MAX_LEVELS - 1; i++) {
        if (i < n ? !tkvi_within(tkvi_number(cfg->threshold[i]), 0.0f, 1.0f)
                  : tkvi_bits(cfg->threshold[i]) != 0)
            return "thresholds must be above 0 and at most 1, or TKV_ZERO, without gaps";
        if (i > 0 && i < n && cfg->threshold[i] < cfg->threshold[i - 1]) return "thresholds must rise";
    }
    if (!tkvi_within(cfg->alpha, 1e-6f, 1.0f)) return "alpha must be above 0 and at most 1";
    for (i = 0; i < n - 1 && tkvi_is_named_zero(cfg->threshold[i]); i++) continue; /* the first above 0 */
    if (!tkvi_within(tkvi_number(cfg->hysteresis), 0.0f, 1.0f) ||
        (!tkvi_is_named_zero(cfg->threshold[i]) && cfg->hysteresis >= cfg->threshold[i]))
        return "hysteresis must be TKV_ZERO or above 0, and below the first threshold";
    if (cfg->min_level == 0) cfg->min_level = profile->min_level;
    if (cfg->max_level == 0) cfg->max_level = profile->max_level ? profile->max_level : n;
    if (cfg->max_level == TKV_OFF) cfg->max_level = 0;
    if (cfg->max_level < 0 || cfg->max_level > n)
        return "max_level must be a level, TKV_OFF or 0 for the last";
    if (cfg->min_level < 0 || cfg->min_level > cfg->max_level) return "min_level must be from 0 to max_level";
    if (TKVI_HAS_METER && cfg->jump & ~1) return "jump must be 0 or 1";
    return NULL;
}

/* Returns the pressure at which level i + 1 begins. */
static float tkvi_threshold(const tkv_pressure_config *cfg, int i) { return tkvi_number(cfg->threshold[i]); }

/* Returns the pressure below which level i + 1 relaxes to level i. */
static float tkvi_relax_below(const tkv_pressure_config *cfg, int i) {
    return tkvi_threshold(cfg, i) - tkvi_number(cfg->hysteresis);
}

/* Returns the level that a pressure raises `level` to, any number of levels up. */
static int tkvi_raised_level(const tkv_pressure_config *cfg, float pressure, int level) {
    const int n = tkvi_pressure_levels(cfg);
    while (level < n && pressure >= tkvi_threshold(cfg, level)) level++;
    return level;
}

/* Returns the level that follows `level` at this average: any number of levels up, or one down. */
static int tkvi_pressure_target(const tkv_pressure_config *cfg, float average, int level) {
    const int had = level;
    level = tkvi_raised_level(cfg, average, level);
    if (level == had && level > 0 && average < tkvi_relax_below(cfg, level - 1)) level--;
    return tkvi_max(cfg->min_level, tkvi_min(cfg->max_level, level));
}

TKV_API int tkv_compute_level(const tkv_pressure_config *cfg, float average, int level) {
    tkv_pressure_config full;
    if (!cfg || tkvi_pressure_fill(cfg, &full)) return 0;
    level = tkvi_max(full.min_level, tkvi_min(full.max_level, level));
    return tkvi_is_finite(average) ? tkvi_pressure_target(&full, average, level) : level;
}

/* >>the controller */
TKV_API tkv_status tkv_init_pressure(tkv_pressure *p, const tkv_pressure_config *cfg, char *reason,
                                     size_t size) {
    tkv_pressure_config none, full;
    const char *wrong;
    memset(&none, 0, sizeof none);
    (void)tkvi_give_reason(TKV_OK, "", reason, size);
    if (!p) return TKV_ERR_ARG;
    wrong = tkvi_pressure_fill(cfg ? cfg : &none, &full);
    if (wrong) return tkvi_give_reason(TKV_ERR_CONFIG, wrong, reason, size);
    memset(p, 0, sizeof *p);
    p->cfg = full;
    p->now.level = full.min_level;
    p->now.samples_left = -1.0f;
    return TKV_OK;
}

/* Updates average, trend, peak and forecast with one finite pressure. The level stays. */
static void tkvi_pressure_take(tkv_pressure *p, float pressure) {
    tkv_pressure_info *now = &p->now;
    const float x = pressure < 0.0f ? 0.0f : pressure > 1.0f ? 1.0f : pressure, a = p->cfg.alpha;
    const float step = now->samples ? x - now->last : 0.0f;
    now->average = now->samples ? now->average + a * (x - now->average) : x;
    if (TKVI_HAS_METER && p->cfg.jump && x > now->average &&
        tkvi_min(p->cfg.max_level, tkvi_raised_level(&p->cfg, x, now->level)) > now->level + 1)
        now->average = x;
    now->trend += a * (step - now->trend);
    now->last = x;
    now->peak = x > now->peak ? x : now->peak;
    now->samples_left = now->trend > 1e-9f ? (1.0f - x) / now->trend : -1.0f;
    now->samples++;
}

/* Sets the level and counts the levels moved. */
static void tkvi_pressure_move(tkv_pressure_info *now, int level) {
    if (level > now->level) now->tightened += (uint64_t)(level - now->level);
    else now->relaxed += (uint64_t)(now->level - level);
    now->level = level;
}

/* Takes one pressure and returns the level that follows `level`, without moving. A cache calls tkvi_pressure_move
 * when it has moved. */
static int tkvi_pressure_sample(tkv_pressure *p, float pressure, int level) {
    tkvi_pressure_take(p, pressure);
    return tkvi_pressure_target(&p->cfg, p->now.average, level);
}

TKV_API int tkv_observe_pressure(tkv_pressure *p, float pressure) {
    tkv_pressure_info *now;
    int level;
    if (!p) return 0;
    now = &p->now;
    tkvi_lock(&p->lock);
    if (!tkvi_is_finite(pressure)) {
        now->refused++;
    } else {
        tkvi_pressure_take(p, pressure);
        tkvi_pressure_move(now, tkvi_pressure_target(&p->cfg, now->average, now->level));
    }
    level = now->level;
    tkvi_unlock(&p->lock);
    return level;
}

TKV_API tkv_status tkv_get_pressure(tkv_pressure *p, tkv_pressure_info *out) {
    if (!p || !out) return TKV_ERR_ARG;
    tkvi_lock(&p->lock);
    *out = p->now;
    tkvi_unlock(&p->lock);
    return TKV_OK;
}

#endif /* TKVI_RULES_PRESSURE_H */
