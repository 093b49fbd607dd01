/*
 * rules/evict_policy.h - the interface of an eviction policy: a table row with a function that scores all tokens of
 * a layer, and helpers that read its view of the tokens. rules/evict.h explains how to add a policy.
 */
#ifndef TKVI_RULES_EVICT_POLICY_H
#define TKVI_RULES_EVICT_POLICY_H

#include "rules/importance.h"

/* The inputs that a policy needs from tkv_evict_view, as bits. n is always needed. */
enum {
    TKVI_NEEDS_TOTAL_SCORES = 1, /* each bit is the view's array of that name */
    TKVI_NEEDS_PROMPT_SCORES = 2,
    TKVI_NEEDS_LAST_SCORES = 4,
    TKVI_NEEDS_NORMS = 8,
    TKVI_NEEDS_KEYS = 16,
    TKVI_NEEDS_LOW_COUNTS = 32,
    TKVI_NEEDS_USER_SCORES = 64
};

/* Writes out[i] for each live slot i; high scores stay. recent: length of the observation window, in slots at the
 * end (SnapKV). Entries of other slots are ignored. */
typedef void (*tkvi_evict_score)(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent,
                                 float *out);

/* Budgets of layers. Every shape is a straight line over the layers, kept in integers so that it is exact:
 *
 *     budget of layer l = base + (first - l * fall) / whole      tokens; rules/evict.h rounds
 */
typedef struct tkvi_line {
    int64_t base, first, fall, whole;
} tkvi_line;
typedef tkvi_line (*tkvi_evict_line)(const tkv_evict_budget *b);

static tkvi_line tkvi_line_uniform(const tkv_evict_budget *b) {
    tkvi_line line;
    line.base = line.fall = 0;
    line.first = b->total;
    line.whole = b->n_layers;
    return line;
}

typedef struct tkvi_evict_row {
    const char *name;
    int needs;             /* inputs: bits TKVI_NEEDS_ */
    int sinks, recent;     /* protected tokens, where cfg has 0 */
    int in_order;          /* 1: evicts the oldest first, so blocks become empty one by one */
    tkv_evict_shape shape; /* of the budgets of layers */
    tkvi_evict_score score;
} tkvi_evict_row;

/* >>the view */
/* Returns whether slot i holds a live token. */
static int tkvi_is_live(const tkv_evict_view *v, int i) { return !v->live_mask || tkvi_has(v->live_mask, i); }

static int tkvi_position_of(const tkv_evict_view *v, int i) { return v->positions ? v->positions[i] : i; }

/* Copies ready scores of live slots, times sign. */
static void tkvi_score_copy(const tkv_evict_view *v, const float *from, float sign, float *out) {
    int i;
    for (i = 0; i < v->n; i++)
        if (tkvi_is_live(v, i)) out[i] = sign * from[i];
}

/* >>keys */
static double tkvi_key_norm(const float *k, int dim) {
    double sum = 0.0;
    int c;
    for (c = 0; c < dim; c++) sum += (double)k[c] * (double)k[c];
    return sqrt(sum);
}

static const float *tkvi_key_of(const float *keys, int i, int n_kv_heads, int h, int head_dim) {
    return keys + ((size_t)i * (size_t)n_kv_heads + (size_t)h) * (size_t)head_dim;
}

/* Returns whether keys [n][n_kv_heads][head_dim] can exist: their size in bytes fits size_t. */
static int tkvi_keys_are_sound(int n, int n_kv_heads, int head_dim) {
    TKVI_ASSERT(n >= 0);
    return n_kv_heads > 0 && head_dim > 0 && head_dim <= TKV_MAX_HEAD_DIM &&
           tkvi_multiply_sizes(tkvi_multiply_sizes((size_t)n * sizeof(float), (size_t)n_kv_heads),
                               (size_t)head_dim) < TKVI_TOO_MANY;
}

#endif /* TKVI_RULES_EVICT_POLICY_H */
