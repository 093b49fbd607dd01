/*
 * rules/evict_keydiff.h - KeyDiff (arXiv 2504.15364, section 3). Evicts the tokens whose keys point where most keys
 * point.
 *
 *     anchor of a KV head = sum over live tokens j of k(j) / |k(j)|
 *     score of token i    = - mean over KV heads of cos(k(i), anchor)
 */
#ifndef TKVI_RULES_EVICT_KEYDIFF_H
#define TKVI_RULES_EVICT_KEYDIFF_H

#include "rules/evict_policy.h"

static double tkvi_key_dot(const float *a, const double *b, int dim) {
    double sum = 0.0;
    int c;
    for (c = 0; c < dim; c++) sum += (double)a[c] * b[c];
    return sum;
}

static void tkvi_add_direction(const float *k, int dim, double *anchor) {
    const double norm = tkvi_key_norm(k, dim);
    int c;
    for (c = 0; norm > 0.0 && c < dim; c++) anchor[c] += (double)k[c] / norm;
}

static double tkvi_anchor_length(const double *x, int dim) {
    double sum = 0.0;
    int c;
    for (c = 0; c < dim; c++) sum += x[c] * x[c];
    return sqrt(sum);
}

/* Returns the cosine of k and the anchor, 0 for a zero vector. length: |anchor|. A norm that is not finite is
 * returned as it is, so that tkvi_score_tokens reports TKV_ERR_NONFINITE. */
static float tkvi_key_cosine(const float *k, const double *anchor, double length, int dim) {
    const double norm = tkvi_key_norm(k, dim) * length;
    if (!tkvi_is_finite((float)norm)) return (float)norm;
    return norm > 0.0 ? (float)(tkvi_key_dot(k, anchor, dim) / norm) : 0.0f;
}

static void tkvi_score_keydiff(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    double anchor[TKV_MAX_HEAD_DIM], length;
    const int dim = v->head_dim;
    int h, i;
    (void)cfg;
    (void)recent;
    for (i = 0; i < v->n; i++) out[i] = 0.0f;
    for (h = 0; h < v->n_kv_heads; h++) {
        memset(anchor, 0, sizeof anchor);
        for (i = 0; i < v->n; i++)
            if (tkvi_is_live(v, i))
                tkvi_add_direction(tkvi_key_of(v->keys, i, v->n_kv_heads, h, dim), dim, anchor);
        length = tkvi_anchor_length(anchor, dim);
        for (i = 0; i < v->n; i++)
            if (tkvi_is_live(v, i))
                out[i] -=
                    tkvi_key_cosine(tkvi_key_of(v->keys, i, v->n_kv_heads, h, dim), anchor, length, dim) /
                    (float)v->n_kv_heads;
    }
}

static const tkvi_evict_row tkvi_evict_keydiff = {
    "keydiff", TKVI_NEEDS_KEYS, 4, 32, 0, TKV_EVICT_UNIFORM, TKVI_IF(TKVI_HAS_EVICT, tkvi_score_keydiff)};

#endif /* TKVI_RULES_EVICT_KEYDIFF_H */
