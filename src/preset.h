/*
 * preset.h - plans by name: a table. What each costs and gives is in bench/QUALITY.md. May call plan.
 */
#ifndef TKVI_PRESET_H
#define TKVI_PRESET_H

#include "plan.h"

typedef struct tkvi_preset {
    const char *name;
    int below; /* rows of one name: the first one whose number is above cfg.max_tokens; 0: any */
    tkv_pair warm, archive;
} tkvi_preset;

static const tkvi_preset tkvi_presets[] = {
    {"quality", 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}},
    {"balanced", 0, {TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}},
    {"compact", 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}},
    {"extreme", 0, {TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}},
    {"kivi", 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"squat", 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"kvquant-3", 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    {"by-context", 2048, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"by-context", 8192, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"by-context", 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
};

#define TKVI_PRESETS ((int)(sizeof tkvi_presets / sizeof *tkvi_presets))

TKV_API const char *tkv_preset_name(int i) {
    int row;
    for (row = 0; row < TKVI_PRESETS; row++) {
        int again = row > 0 && strcmp(tkvi_presets[row].name, tkvi_presets[row - 1].name) == 0;
        if (!again && i-- == 0) return tkvi_presets[row].name;
    }
    return NULL;
}

TKV_API tkv_status tkv_config_preset(tkv_config *cfg, const char *name) {
    int i;
    for (i = 0; cfg && name && i < TKVI_PRESETS; i++) {
        int below = tkvi_presets[i].below;
        if (strcmp(name, tkvi_presets[i].name) != 0) continue;
        if (below && (cfg->max_tokens == 0 || cfg->max_tokens >= below)) continue;
        cfg->sink_tokens = cfg->hot_tokens = cfg->warm_tokens = 0; /* 4, 64, 448 */
        cfg->hot.k = cfg->hot.v = TKV_FORMAT_DEFAULT;
        cfg->warm = tkvi_presets[i].warm;
        cfg->archive = tkvi_presets[i].archive;
        return TKV_OK;
    }
    return TKV_ERR_ARG;
}

#endif /* TKVI_PRESET_H */
