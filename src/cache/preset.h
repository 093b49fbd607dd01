/*
 * cache/preset.h - a table of named presets, and the tier of a token's age.
 *
 * Presets of other designs keep the numbers of those designs. bench/QUALITY.md has the bytes and the quality of the
 * first seven.
 */
#ifndef TKVI_CACHE_PRESET_H
#define TKVI_CACHE_PRESET_H

#include "cache/plan.h"

typedef struct tkvi_preset {
    const char *name;
    int below; /* of rows with one name, the first with max_tokens < below is taken; 0: any max_tokens */
    int hot_tokens, warm_tokens;
    tkv_format_pair warm, archive;
} tkvi_preset;

static const tkvi_preset tkvi_presets[] = {
    {"quality", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}},
    {"balanced", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}},
    {"compact", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}},
    {"extreme", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}},
    {"kivi", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"squat", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"kvquant-3", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    {"by-context", 2048, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"by-context", 8192, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"by-context", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
#if TKVI_HAS_METER /* they have ladders, too: tkvi_ladders */
    {"by-length", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"growing", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}},
#endif
    /* from RuvLLM: ADR-004, then the profiles in its code */
    {"adr", 2048, 64, 448, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"adr", 8192, 64, 448, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"adr", 0, 64, 448, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    {"small", 0, 32, 224, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"long_context", 0, 64, 960, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"large_context", 0, 128, 896, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"extreme_context", 0, 256, 1792, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    {"memory_optimized", 0, 32, 224, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    /* from akv-cache: three tiers, then two (without a warm tier, all tokens after the hot ones are archive) */
    {"akv", 0, 1024, 2048, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"akv_quality", 0, 2048, 2048, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"aggressive", 0, 512, 4096, {TKV_KIVI2, TKV_KIVI2}, {TKV_KIVI2, TKV_KIVI2}},
    {"k4v4", 0, 256, TKV_OFF, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI4, TKV_KIVI4}},
    {"k4v3", 0, 128, TKV_OFF, {TKV_KIVI4, TKV_KIVI3}, {TKV_KIVI4, TKV_KIVI3}},
    {"k4v2", 0, 128, TKV_OFF, {TKV_KIVI4, TKV_KIVI2}, {TKV_KIVI4, TKV_KIVI2}},
    {"k3v3", 0, 128, TKV_OFF, {TKV_KIVI3, TKV_KIVI3}, {TKV_KIVI3, TKV_KIVI3}},
    {"k2v2", 0, 64, TKV_OFF, {TKV_KIVI2, TKV_KIVI2}, {TKV_KIVI2, TKV_KIVI2}},
};

#define TKVI_PRESETS ((int)(sizeof tkvi_presets / sizeof *tkvi_presets))

/* The name of preset i = 0, 1, ...; NULL after the last. */
static const char *tkvi_preset_name(int i) {
    int row;
    for (row = 0; row < TKVI_PRESETS && i >= 0; row++) {
        int again = row > 0 && strcmp(tkvi_presets[row].name, tkvi_presets[row - 1].name) == 0;
        if (!again && i-- == 0) return tkvi_presets[row].name;
    }
    return NULL;
}

#if TKVI_HAS_METER
/* Ladders of presets whose archive follows the length of the longest sequence. A level takes hot and warm of the
 * preset. */
static const tkv_level tkvi_ladder_by_length[] = {
    {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 0},
    {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}, 2048},
    {0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}, 8192},
};
static const tkv_level tkvi_ladder_growing[] = {
    {0, 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}, 0},
    {0, 0, {TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}, 2048},
    {0, 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}, 8192},
};

static const struct tkvi_named_ladder {
    const char *name; /* of the preset */
    const tkv_level *level;
    int n_levels;
} tkvi_ladders[] = {
    {"by-length", tkvi_ladder_by_length, 3},
    {"growing", tkvi_ladder_growing, 3},
};

/* Sets the ladder of the preset `name`, or removes that of another preset. A ladder of the program stays. */
static void tkvi_apply_ladder(tkv_config *cfg, const char *name) {
    size_t i;
    for (i = 0; i < sizeof tkvi_ladders / sizeof *tkvi_ladders; i++) {
        const int is_it = strcmp(name, tkvi_ladders[i].name) == 0;
        if (!is_it && cfg->budget.ladder != tkvi_ladders[i].level) continue;
        cfg->budget.ladder = is_it ? tkvi_ladders[i].level : NULL;
        cfg->budget.n_levels = is_it ? tkvi_ladders[i].n_levels : 0;
        if (is_it) return;
    }
}

#else
static void tkvi_apply_ladder(tkv_config *cfg, const char *name) {
    (void)cfg;
    (void)name;
}
#endif

TKV_API tkv_status tkv_apply_preset(tkv_config *cfg, const char *name) {
    int i;
    for (i = 0; cfg && name && i < TKVI_PRESETS; i++) {
        int below = tkvi_presets[i].below;
        if (strcmp(name, tkvi_presets[i].name) != 0) continue;
        if (below && (cfg->limits.max_tokens == 0 || cfg->limits.max_tokens >= below)) continue;
        cfg->tiers.sink_tokens = 0; /* 0 is the default: 4 sinks; below, 64 hot and 448 warm */
        cfg->tiers.hot_tokens = tkvi_presets[i].hot_tokens;
        cfg->tiers.warm_tokens = tkvi_presets[i].warm_tokens;
        cfg->tiers.hot.k = cfg->tiers.hot.v = TKV_FORMAT_DEFAULT;
        cfg->tiers.warm = tkvi_presets[i].warm;
        cfg->tiers.archive = tkvi_presets[i].archive;
        tkvi_apply_ladder(cfg, name);
        return TKV_OK;
    }
    return TKV_ERR_ARG;
}

TKV_API tkv_tier tkv_compute_tier(const tkv_config *cfg, int age) {
    const int hot = tkvi_length(cfg ? cfg->tiers.hot_tokens : 0, 0, 64);
    const int warm = tkvi_length(cfg ? cfg->tiers.warm_tokens : 0, 0, 448);
    if (age < hot) return TKV_TIER_HOT;
    return (int64_t)age < (int64_t)hot + warm ? TKV_TIER_WARM : TKV_TIER_ARCHIVE;
}

#endif /* TKVI_CACHE_PRESET_H */
