/*
 * core/family.h - a family of formats: what the formats of one file have in common beside their bytes. That is a
 * switch, RoPE and a learned state. The state has a part for each layer and one for each of its heads. A family learns
 * it in one of two ways:
 *
 *     from tokens    It is a part of the layer's table (learn/statistics.h). Blocks wait for it; calibrations save it.
 *     from queries   Only the encoder uses it, and no block waits for it (learn/query_stats.h).
 */
#ifndef TKVI_CORE_FAMILY_H
#define TKVI_CORE_FAMILY_H

#include "core/geometry.h"
#include "core/rope.h"

typedef struct tkvi_family_state {     /* the state of one layer */
    const tkv_format_options *options; /* with defaults filled in */
    const tkvi_geometry *geometry;     /* of the layer */
    const tkvi_rope *rope;             /* the RoPE that the family undoes; NULL: none */
    void *layer, *heads;               /* [layer_bytes]; [n_kv_heads][head_bytes]; zeros at first */
} tkvi_family_state;

/* Called for each token of a head. x: its key (before RoPE, if the family undoes it) or its value, [dim]. weight: of
 * its channels [dim], or NULL. */
typedef void (*tkvi_token_visit)(void *ctx, const float *x, const float *weight);

typedef struct tkvi_tokens { /* tokens to learn from */
    const void *from;
    /* Calls visit for each token of a head, in the same order each time. */
    void (*walk)(const void *from, tkv_side side, int head, tkvi_token_visit visit, void *ctx);
} tkvi_tokens;

typedef struct tkvi_family {
    const char *left_out; /* the sentence of a build that leaves the formats out; NULL: it has them */
    const char *too_wide; /* the error for heads of more than 256 channels; NULL: the formats take them */
    /* Does a format with these options code keys before RoPE? Its tokens must keep their slots. NULL: never. */
    int (*undoes_rope)(const tkv_format_options *o);
    const char *needs_rope; /* the error if cfg.model.rope is missing */
    int part; /* 0: learns nothing; else a bit of its own, from 2 on, which calibrations store */
    size_t layer_bytes;
    size_t (*head_bytes)(const tkv_format_options *o, const tkvi_geometry *g);
    /* From queries. products: sums of q q^T of a head; that of channels i <= j is products[j (j + 1) / 2 + i]. work: as
     * many floats. head: in and out, the state of the head. NULL: does not learn from queries */
    void (*learn_queries)(const tkv_format_options *o, const tkvi_geometry *g, const int64_t *products,
                          float *work, void *head);
    /* From tokens. There is at least one. NULL: does not learn from tokens */
    void (*learn_tokens)(const tkvi_family_state *to, const tkvi_tokens *from);
    size_t (*saved_bytes)(const tkvi_geometry *g); /* of a layer in a calibration */
    void (*save)(const tkvi_family_state *from, uint8_t *dst);
    void (*load)(const tkvi_family_state *to, const uint8_t *src);
    /* Returns the fault of saved bytes, or NULL. used: 1 if the layer of this cache needs them. No state is there. */
    const char *(*find_fault)(const tkvi_family_state *to, const uint8_t *src, int used);
} tkvi_family;

/* The RoPE that a family undoes under these options, or NULL. rope: that of the model, or NULL. */
static const tkvi_rope *tkvi_undone_rope(const tkvi_family *f, const tkv_format_options *o,
                                         const tkvi_rope *rope) {
    return rope && f->undoes_rope && f->undoes_rope(o) ? rope : NULL;
}

#define TKVI_LEARNS_NOTHING NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL

static const tkvi_family tkvi_plain_family = {NULL, NULL, TKVI_LEARNS_NOTHING};

#endif /* TKVI_CORE_FAMILY_H */
