/*
 * rules/evict_policy.h - what an eviction policy is: a row, with a function that scores all tokens of a layer; and
 * what it sees of them. How to add one stands in rules/evict.h. May call importance and below.
 */
#ifndef TKVI_RULES_EVICT_POLICY_H
#define TKVI_RULES_EVICT_POLICY_H

#include "rules/importance.h"

/* out[i] for all that are alive; high ones stay. recent: the last so many are what a policy observes. */
typedef void (*tkvi_evict_score)(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent,
                                 float *out);

/* Budgets of layers. Every shape is a straight line: layer l gets base + (first - l * fall) / whole tokens, in whole
 * numbers (rules/evict.h). */
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
    int needs;             /* bits of tkv_evict_need */
    int sinks, recent;     /* what it protects if cfg does not say */
    int in_order;          /* 1: the oldest go first, so that block after block is emptied */
    tkv_evict_shape shape; /* of its layers' budgets */
    tkvi_evict_score score;
} tkvi_evict_row;

/* >>what it sees */
/* A token has its place here: in range, and not gone before. */
static int tkvi_is_alive(const tkv_evict_view *v, int i) { return !v->alive || tkvi_has(v->alive, i); }

static int tkvi_position_of(const tkv_evict_view *v, int i) { return v->position ? v->position[i] : i; }

/* Scores that are there already. */
static void tkvi_score_copy(const tkv_evict_view *v, const float *from, float sign, float *out) {
    int i;
    for (i = 0; i < v->n; i++)
        if (tkvi_is_alive(v, i)) out[i] = sign * from[i];
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

/* Dimensions that a product of sizes can have. */
static int tkvi_keys_are_sound(const float *keys, int n, int n_kv_heads, int head_dim) {
    size_t size;
    if (n < 0 || n_kv_heads < 1 || head_dim < 1 || head_dim > TKV_MAX_HEAD_DIM) return 0;
    if (!tkvi_mul((size_t)n * sizeof(float), (size_t)n_kv_heads, &size) ||
        !tkvi_mul(size, (size_t)head_dim, &size))
        return 0;
    return keys || n == 0;
}

#endif /* TKVI_RULES_EVICT_POLICY_H */
