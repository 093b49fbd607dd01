/*
 * report/levels.h - the levels of a cache by name: the tag of each, and its bytes against FP16. The bytes are those of
 * the layouts that blocks get.
 */
#ifndef TKVI_REPORT_LEVELS_H
#define TKVI_REPORT_LEVELS_H

#ifndef TKV_NO_REPORTS

#include "report/info.h"
#include "report/text.h"

/* The layout of the oldest tokens of a layer at a level. */
static const tkvi_layout *tkvi_oldest_layout(const tkvi_tables *t, int layer, int level) {
    const tkvi_tier_spec *spec = &tkvi_tier_specs_of(t, layer)[level];
    return &t->layout[spec->layout[tkvi_tier_of_level(spec, TKV_TIER_ARCHIVE)]];
}

static double tkvi_memory_factor(const tkvi_tables *t, int level) {
    double bytes = 0.0, fp16_bytes = 0.0;
    int i;
    for (i = 0; i < t->cfg.model.n_layers; i++) {
        const tkvi_geometry *g = &t->plan[i].geometry;
        if (t->plan[i].stored_layer != i) continue;
        bytes += (double)tkvi_oldest_layout(t, i, level)->bytes.total;
        fp16_bytes += (double)TKVI_BLOCK *
                      (double)tkvi_fp16_bytes(g->n_kv_heads, g->head_dim, g->v_head_dim, g->v_in_k);
    }
    return fp16_bytes > 0.0 ? bytes / fp16_bytes : 1.0;
}

/* The formats that most layers have for their oldest tokens; of equally many, those of the lower layer. */
static tkv_format_pair tkvi_formats_of_level(const tkvi_tables *t, int level) {
    int count[TKV_FORMAT_COUNT][TKV_FORMAT_COUNT], most = 0, i;
    tkv_format_pair best = {TKV_F16, TKV_F16};
    memset(count, 0, sizeof count);
    for (i = 0; i < t->cfg.model.n_layers; i++)
        if (t->plan[i].stored_layer == i) {
            const tkv_format_pair p = tkvi_oldest_layout(t, i, level)->pair;
            most = tkvi_max(most, ++count[p.k][p.v]);
        }
    for (i = t->cfg.model.n_layers - 1; i >= 0; i--)
        if (t->plan[i].stored_layer == i) {
            const tkv_format_pair p = tkvi_oldest_layout(t, i, level)->pair;
            if (count[p.k][p.v] == most) best = p;
        }
    return best;
}

TKV_API tkv_status tkv_get_level(const tkv_cache *kv, int level, tkv_level_info *out) {
    tkvi_text tag;
    if (!kv || !out || level < 0 || level >= kv->tables.n_levels) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    out->level = level;
    out->formats = tkvi_formats_of_level(&kv->tables, level);
    out->memory_factor = tkvi_memory_factor(&kv->tables, level);
    tag = tkvi_text_begin(out->tag, sizeof out->tag);
    tkvi_append_text(&tag, tkvi_format_name(out->formats.k));
    if (out->formats.k == out->formats.v) return TKV_OK;
    tkvi_append_text(&tag, "/");
    tkvi_append_text(&tag, tkvi_format_name(out->formats.v));
    return TKV_OK;
}

TKV_API tkv_status tkv_find_level(const tkv_cache *kv, const char *tag, int *level) {
    tkv_format_pair pair;
    tkvi_span s;
    int i;
    if (!kv || !tag || !level) return TKV_ERR_ARG;
    s.at = tag;
    s.n = strlen(tag);
    if (!tkvi_read_pair(NULL, NULL, s, &pair)) return TKV_ERR_RANGE;
    for (i = 0; i < kv->tables.n_levels; i++) {
        const tkv_format_pair formats = tkvi_formats_of_level(&kv->tables, i);
        if (formats.k != pair.k || formats.v != pair.v) continue;
        *level = i;
        return TKV_OK;
    }
    return TKV_ERR_RANGE;
}

#endif /* TKV_NO_REPORTS */
#endif /* TKVI_REPORT_LEVELS_H */
