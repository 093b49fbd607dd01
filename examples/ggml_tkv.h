/*
 * ggml_tkv.h - two operations for graphs of ggml: an append to tieredkv, and attention to it.
 *
 *     tkv_ggml ops;
 *     tkv_ggml_init(&ops, kv, 512);                         once; 512: most tokens of a step
 *
 *     added = tkv_ggml_append(ctx, &ops, layer, k, v);      while the graph is built
 *     out = tkv_ggml_attend(ctx, &ops, layer, q, added, NULL, NULL);
 *
 *     tkv_ggml_begin(&ops, n_tokens, seqs, positions);      for each step
 *     ggml_backend_graph_compute(backend, graph);
 *     if (tkv_ggml_end(&ops, 1)) puts(ops.why);
 *
 * The operations are of the kind ggml_custom_4d, so they run on ggml's CPU backend. q, k and v may be views with any
 * strides, such as pieces of one product for all three. A graph may be computed again in later steps, for as many
 * tokens: sequences and positions come from tkv_ggml_begin.
 *
 * An operation of ggml cannot fail. After the first error of a step, all operations do nothing but fill their output
 * with zeros, and tkv_ggml_end removes the step's tokens and returns the error.
 *
 * ggml calls an operation from all threads of a graph, whatever n_tasks says, and offers no barrier inside one. So one
 * thread appends, and all threads attend, each with a part (tkv_attend_part). Without gcc's atomics (MSVC), one thread
 * attends. Nothing is allocated between tkv_ggml_init and tkv_ggml_free but by tieredkv for tokens.
 *
 * It compiles as C99 and as C++11. In this order: data, errors, append, attend, graph, steps.
 */
#ifndef GGML_TKV_H
#define GGML_TKV_H

#include "../tieredkv.h"

#include <ggml.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* >>data */
typedef struct tkv_ggml_layer {
    struct tkv_ggml *ops;
    int number;
    tkv_layer_info shape;      /* all 0: the layer has no cache */
    tkv_attend_params options; /* of its attention */
} tkv_ggml_layer;

typedef struct tkv_ggml { /* what all operations on a cache share; it must not move */
    tkv_cache *kv;
    int n_layers, max_tokens;
    tkv_ggml_layer *layers; /* [n_layers] */
    int jumps; /* set it to 1 where positions jump or repeat (M-RoPE, holes); else that is an error */
    int n_tokens, n_runs; /* of this step */
    tkv_rows *runs;       /* [n_runs] tokens of one sequence each */
    int *first_positions; /* [n_runs] */
    int *positions;       /* [n_tokens] */
    int has_positions;
    void *workspace; /* [TKV_MAX_ATTEND_BYTES] of attention */
    /* the first error of the step */
    const void *failed; /* the operation; &failed: another call; NULL: none */
    tkv_status status;
    char why[320]; /* a sentence */
} tkv_ggml;

/* >>errors */
/* Returns the operation that failed in this step, or NULL. */
static inline const void *tkv_ggml_failed(const tkv_ggml *ops) {
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_load_n(&ops->failed, __ATOMIC_ACQUIRE);
#else
    return ops->failed;
#endif
}

/* Sets the operation that failed. Returns 0 if there is one. */
static inline int tkv_ggml_set_failed(tkv_ggml *ops, const void *op) {
    const void *none = NULL;
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_compare_exchange_n(&ops->failed, &none, op, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
#else
    if (ops->failed != none) return 0;
    ops->failed = op;
    return 1;
#endif
}

#if defined(__GNUC__) || defined(__clang__)
#define TKV_GGML_PRINTF __attribute__((format(printf, 4, 5)))
#else
#define TKV_GGML_PRINTF
#endif
/* Notes the first error of a step, and fills the output of its operation with zeros. op NULL: another call. */
TKV_GGML_PRINTF
static inline tkv_status tkv_ggml_fail(tkv_ggml *ops, struct ggml_tensor *op, tkv_status status,
                                       const char *fmt, ...) {
    if (tkv_ggml_set_failed(ops, op ? (const void *)op : (const void *)&ops->failed)) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(ops->why, sizeof ops->why, fmt, ap);
        va_end(ap);
        ops->status = status;
        if (op) memset(op->data, 0, ggml_nbytes(op));
    }
    return status;
}

/* Returns the sentence of a call that changes the cache. */
static inline const char *tkv_ggml_reason(const tkv_ggml *ops, tkv_status status) {
    const char *why = tkv_get_last_error(ops->kv);
    return *why ? why : tkv_get_status_text(status);
}

/* Finds the type and the strides, in elements, of a tensor [dim, n_heads, tokens of the step]. */
static inline tkv_status tkv_ggml_read_tensor(const tkv_ggml_layer *l, struct ggml_tensor *op,
                                              const char *name, const struct ggml_tensor *t, int dim,
                                              int n_heads, tkv_type *type, ptrdiff_t *token_stride,
                                              ptrdiff_t *head_stride) {
    tkv_ggml *ops = l->ops;
    const size_t size = t->type == GGML_TYPE_F32 ? 4 : 2;
    if (t->type != GGML_TYPE_F32 && t->type != GGML_TYPE_F16 && t->type != GGML_TYPE_BF16)
        return tkv_ggml_fail(ops, op, TKV_ERR_ARG, "layer %d: %s has type %s; it can be f32, f16 or bf16",
                             l->number, name, ggml_type_name(t->type));
    if (t->ne[0] != dim || t->ne[1] != n_heads || t->ne[2] != ops->n_tokens || t->ne[3] != 1)
        return tkv_ggml_fail(ops, op, TKV_ERR_ARG,
                             "layer %d: %s has the shape [%d, %d, %d, %d]; it should be [%d, %d, %d]",
                             l->number, name, (int)t->ne[0], (int)t->ne[1], (int)t->ne[2], (int)t->ne[3], dim,
                             n_heads, ops->n_tokens);
    if (t->nb[0] != size || t->nb[1] % size || t->nb[2] % size)
        return tkv_ggml_fail(ops, op, TKV_ERR_ARG,
                             "layer %d: the channels of a head of %s do not follow one another", l->number,
                             name);
    *type = t->type == GGML_TYPE_F32 ? TKV_TYPE_F32 : t->type == GGML_TYPE_F16 ? TKV_TYPE_F16 : TKV_TYPE_BF16;
    *token_stride = (ptrdiff_t)(t->nb[2] / size);
    *head_stride = (ptrdiff_t)(t->nb[1] / size);
    return TKV_OK;
}

/* >>append */
static inline tkv_status tkv_ggml_append_now(const tkv_ggml_layer *l, struct ggml_tensor *op) {
    tkv_ggml *ops = l->ops;
    const struct ggml_tensor *k = op->src[0], *v = op->src[1];
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    tkv_status status = tkv_ggml_read_tensor(l, op, "k", k, l->shape.head_dim, l->shape.n_kv_heads, &p.k_type,
                                             &p.k_token_stride, &p.k_head_stride);
    if (!status && v)
        status = tkv_ggml_read_tensor(l, op, "v", v, l->shape.v_head_dim, l->shape.n_kv_heads, &p.v_type,
                                      &p.v_token_stride, &p.v_head_stride);
    if (status) return status;
    p.layer = l->number;
    p.batch = ops->runs;
    p.n_batch = ops->n_runs;
    p.k = k->data;
    p.v = v ? v->data : NULL;
    if (ops->has_positions && ops->jumps) p.token_positions = ops->positions;
    else if (ops->has_positions) p.positions = ops->first_positions;
    status = tkv_append_ex(ops->kv, &p);
    if (!status) return TKV_OK;
    return tkv_ggml_fail(ops, op, status, "layer %d: %s", l->number, tkv_ggml_reason(ops, status));
}

static inline void tkv_ggml_on_append(struct ggml_tensor *op, int ith, int nth, void *user) {
    const tkv_ggml_layer *l = (const tkv_ggml_layer *)user;
    (void)nth;
    if (ith != 0) return;
    memset(op->data, 0, ggml_nbytes(op));
    if (!tkv_ggml_failed(l->ops)) (void)tkv_ggml_append_now(l, op);
}

/* >>attend */
static inline tkv_status tkv_ggml_attend_now(const tkv_ggml_layer *l, struct ggml_tensor *op, int part,
                                             int n_parts) {
    tkv_ggml *ops = l->ops;
    const struct ggml_tensor *q = op->src[0], *sinks = op->src[2];
    const int n_heads = l->shape.n_heads;
    tkv_attend_params p = l->options;
    char why[160];
    tkv_status status = tkv_ggml_read_tensor(l, op, "q", q, l->shape.head_dim, n_heads, &p.q_type,
                                             &p.q_row_stride, &p.q_head_stride);
    if (status) return status;
    if (sinks &&
        (sinks->type != GGML_TYPE_F32 || ggml_nelements(sinks) != n_heads || !ggml_is_contiguous(sinks)))
        return tkv_ggml_fail(ops, op, TKV_ERR_ARG, "layer %d: sinks are not %d numbers of type f32",
                             l->number, n_heads);
    p.layer = l->number;
    p.batch = ops->runs;
    p.n_batch = ops->n_runs;
    p.q = q->data;
    p.out = op->data;
    p.out_type = TKV_TYPE_F32;
    p.out_row_stride = p.out_head_stride = 0;
    if (sinks) p.sink_logits = (const float *)sinks->data;
    status = tkv_attend_part(ops->kv, &p, part, n_parts, ops->workspace, TKV_MAX_ATTEND_BYTES);
    if (!status) return TKV_OK;
    if (!tkv_validate_attend(ops->kv, &p, why, sizeof why)) /* a store or a callback failed */
        snprintf(why, sizeof why, "%s", tkv_get_status_text(status));
    return tkv_ggml_fail(ops, op, status, "layer %d: attention: %s", l->number, why);
}

/* All threads get an error of the parameters, and then none computes. The last thread alone gets an error of a store.
 * So the thread that notes the error may fill the output. */
static inline void tkv_ggml_on_attend(struct ggml_tensor *op, int ith, int nth, void *user) {
    const tkv_ggml_layer *l = (const tkv_ggml_layer *)user;
    const void *failed = tkv_ggml_failed(l->ops);
#if !defined(__GNUC__) && !defined(__clang__)
    if (ith != 0) return;
    nth = 1;
#endif
    if (!failed) (void)tkv_ggml_attend_now(l, op, ith, nth);
    else if (failed != op && ith == 0) memset(op->data, 0, ggml_nbytes(op));
}

/* >>graph */
/* Adds an append to a graph. Returns a tensor of one number, for tkv_ggml_attend.
 *   k   [head_dim, n_kv_heads, n_tokens] after RoPE, of type F32, F16 or BF16. The channels of a head follow one
 *       another, and other strides are free
 *   v   [v_head_dim, n_kv_heads, n_tokens]; NULL: with cfg.model.v_in_k */
static inline struct ggml_tensor *tkv_ggml_append(struct ggml_context *ctx, tkv_ggml *ops, int layer,
                                                  struct ggml_tensor *k, struct ggml_tensor *v) {
    struct ggml_tensor *args[2];
    GGML_ASSERT(layer >= 0 && layer < ops->n_layers);
    args[0] = k;
    args[1] = v;
    return ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, args, 2, tkv_ggml_on_append, 1,
                          &ops->layers[layer]);
}

/* Adds causal attention of the step's tokens to all tokens of their sequences. Returns F32 [v_head_dim, n_heads,
 * n_tokens], packed.
 *   q         [head_dim, n_heads, n_tokens], types and strides as of k
 *   appended  the append that it waits for: of this layer, or of the layer whose keys this one shares
 *   sinks     NULL, or n_heads learned logits, F32
 *   options   NULL, or a copy is kept: scale, softcap, alibi_slopes, row_ends, mask and others. Their arrays are read
 *             when the graph is computed. Layer, sequences, q and out are not read from it. The last call for a layer
 *             counts for all graphs */
static inline struct ggml_tensor *tkv_ggml_attend(struct ggml_context *ctx, tkv_ggml *ops, int layer,
                                                  struct ggml_tensor *q, struct ggml_tensor *appended,
                                                  struct ggml_tensor *sinks,
                                                  const tkv_attend_params *options) {
    struct ggml_tensor *args[3];
    GGML_ASSERT(layer >= 0 && layer < ops->n_layers && ops->layers[layer].shape.head_dim);
    tkv_ggml_layer *l = &ops->layers[layer];
    args[0] = q;
    args[1] = appended;
    args[2] = sinks;
    if (options) l->options = *options;
    else memset(&l->options, 0, sizeof l->options);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, l->shape.v_head_dim, l->shape.n_heads, q->ne[2], 1, args, 3,
                          tkv_ggml_on_attend, GGML_N_TASKS_MAX, l);
}

/* >>steps */
static inline void tkv_ggml_free(tkv_ggml *ops) {
    free(ops->layers);
    free(ops->runs);
    free(ops->first_positions);
    free(ops->positions);
    free(ops->workspace);
    memset(ops, 0, sizeof *ops);
}

/* Takes memory for all steps. kv must outlive ops. max_tokens: most tokens of a step, of all sequences.
 * Errors, with nothing to free: TKV_ERR_NOMEM, TKV_ERR_ARG (kv is missing, or max_tokens not positive). */
static inline tkv_status tkv_ggml_init(tkv_ggml *ops, tkv_cache *kv, int max_tokens) {
    tkv_config cfg;
    memset(ops, 0, sizeof *ops);
    if (tkv_get_config(kv, &cfg) || max_tokens < 1) return TKV_ERR_ARG;
    const size_t n = (size_t)max_tokens;
    const int n_layers = cfg.model.n_layers;
    ops->kv = kv;
    ops->n_layers = n_layers;
    ops->max_tokens = max_tokens;
    ops->layers = (tkv_ggml_layer *)calloc((size_t)n_layers, sizeof *ops->layers);
    ops->runs = (tkv_rows *)calloc(n, sizeof *ops->runs);
    ops->first_positions = (int *)calloc(n, sizeof *ops->first_positions);
    ops->positions = (int *)calloc(n, sizeof *ops->positions);
    ops->workspace = calloc(1, TKV_MAX_ATTEND_BYTES);
    if (!ops->layers || !ops->runs || !ops->first_positions || !ops->positions || !ops->workspace) {
        tkv_ggml_free(ops);
        return TKV_ERR_NOMEM;
    }
    for (int i = 0; i < n_layers; i++) {
        ops->layers[i].ops = ops;
        ops->layers[i].number = i;
        (void)tkv_get_layer(kv, 0, i, &ops->layers[i].shape); /* on an error it stays 0 */
    }
    return TKV_OK;
}

/* Notes the batch of a step: sequence (NULL: all are 0) and position (NULL: the next ones) of each token. The tokens of
 * a sequence must follow one another. Returns an error with ops->why. */
static inline tkv_status tkv_ggml_set_batch(tkv_ggml *ops, int n_tokens, const int *seqs,
                                            const int *positions) {
    ops->failed = NULL;
    ops->status = TKV_OK;
    ops->why[0] = 0;
    ops->n_runs = 0;
    ops->n_tokens = n_tokens;
    ops->has_positions = positions != NULL;
    memset(ops->workspace, 0, 128); /* an error of attention can have left it dirty */
    if (n_tokens < 1 || n_tokens > ops->max_tokens)
        return tkv_ggml_fail(ops, NULL, TKV_ERR_CAPACITY, "a step has %d tokens; it can have 1 to %d",
                             n_tokens, ops->max_tokens);
    for (int i = 0; i < n_tokens; i++) {
        const int seq = seqs ? seqs[i] : 0, is_new = i == 0 || seq != ops->runs[ops->n_runs - 1].seq;
        if (positions) ops->positions[i] = positions[i];
        if (is_new) {
            for (int j = 0; j < ops->n_runs; j++)
                if (ops->runs[j].seq == seq)
                    return tkv_ggml_fail(ops, NULL, TKV_ERR_ARG,
                                         "token %d: sequence %d has tokens further up; sort the batch", i,
                                         seq);
            if (positions) ops->first_positions[ops->n_runs] = positions[i];
            ops->runs[ops->n_runs].seq = seq;
            ops->runs[ops->n_runs].n = 0;
            ops->n_runs++;
        } else if (positions && !ops->jumps && (int64_t)positions[i] != (int64_t)positions[i - 1] + 1) {
            return tkv_ggml_fail(ops, NULL, TKV_ERR_RANGE,
                                 "token %d: sequence %d has position %d behind %d (see ops.jumps)", i, seq,
                                 positions[i], positions[i - 1]);
        }
        ops->runs[ops->n_runs - 1].n++;
    }
    return TKV_OK;
}

/* Removes the tokens of this step from the first n sequences of the batch. */
static inline void tkv_ggml_abort(tkv_ggml *ops, int n) {
    for (int i = 0; i < n; i++) (void)tkv_seq_abort(ops->kv, ops->runs[i].seq);
    ops->n_runs = 0;
}

/* Begins a step: tkv_ggml_set_batch, and tkv_seq_begin for each sequence. On an error no step is open, and ops->why has
 * a sentence; a graph that is computed then gives zeros. Cost: the encoding that is due, by one thread. */
static inline tkv_status tkv_ggml_begin(tkv_ggml *ops, int n_tokens, const int *seqs, const int *positions) {
    tkv_status status = tkv_ggml_set_batch(ops, n_tokens, seqs, positions);
    if (status) ops->n_runs = 0;
    for (int i = 0; i < ops->n_runs && !status; i++) {
        status = tkv_seq_begin(ops->kv, ops->runs[i].seq);
        if (status) {
            (void)tkv_ggml_fail(ops, NULL, status, "%s", tkv_ggml_reason(ops, status));
            tkv_ggml_abort(ops, i);
        }
    }
    return status;
}

/* Ends a step after the graph was computed. Returns the first error of the step, with ops->why. On an error, and with
 * keep 0, all sequences are as they were. */
static inline tkv_status tkv_ggml_end(tkv_ggml *ops, int keep) {
    for (int i = 0; i < ops->n_runs && keep && !ops->status; i++) {
        const tkv_status status = tkv_seq_commit(ops->kv, ops->runs[i].seq);
        if (status) (void)tkv_ggml_fail(ops, NULL, status, "%s", tkv_ggml_reason(ops, status));
    }
    if (!keep || ops->status) tkv_ggml_abort(ops, ops->n_runs);
    ops->n_runs = 0;
    return ops->status;
}

#endif /* GGML_TKV_H */
