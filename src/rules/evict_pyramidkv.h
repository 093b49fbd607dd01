/*
 * rules/evict_pyramidkv.h - PyramidKV (arXiv 2406.02069, section 4). Scores are those of SnapKV. Budgets fall from
 * the first layer to the last one, as in the authors' code, but fractions of tokens are kept.
 *
 *     L layers, C = total / L, window w, n tokens; max, min and d = max - min in units of 1 / unit
 *     min = (C - w) / beta    max = 2 (C - w) - min    if max > n - w: max = n - w, min = 2 (C - w) - max
 *     budget of layer l = w + (max * (L - 1) - l * d) / (unit * (L - 1))
 *
 * Budgets are even, as in SnapKV, unless max >= min >= w. The authors' code makes them even where n < 2 (C - w),
 * and kvpress unless n >= max >= min >= w.
 */
#ifndef TKVI_RULES_EVICT_PYRAMIDKV_H
#define TKVI_RULES_EVICT_PYRAMIDKV_H

#include "rules/evict_snapkv.h"

static tkvi_line tkvi_line_pyramid(const tkv_evict_budget *b) {
    const int64_t layers = b->n_layers, spare = b->total - layers * b->window;
    const int64_t rest = (int64_t)b->n_tokens - b->window;
    tkvi_line line;
    int64_t unit = layers * b->beta, least = spare, most = spare * (2 * (int64_t)b->beta - 1);
    if (layers < 2 || spare < 0 || rest < 0) return tkvi_line_uniform(b);
    if (most > rest * unit) {
        unit = layers;
        most = rest * unit;
        least = 2 * spare - most;
    }
    if (most < least || least < b->window * unit) return tkvi_line_uniform(b);
    line.base = b->window;
    line.first = most * (layers - 1);
    line.fall = most - least;
    line.whole = unit * (layers - 1);
    return line;
}

static const tkvi_evict_row tkvi_evict_pyramidkv = {"pyramidkv",
                                                    TKVI_NEEDS_PROMPT_SCORES,
                                                    4,
                                                    8,
                                                    0,
                                                    TKV_EVICT_PYRAMID,
                                                    TKVI_IF(TKVI_HAS_EVICT, tkvi_score_pooled)};

#endif /* TKVI_RULES_EVICT_PYRAMIDKV_H */
