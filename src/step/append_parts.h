/*
 * step/append_parts.h - an append as parts, run by threads of the caller.
 *
 * The parts find the blocks that the append will demote, and encode them into the caller's workspace. They take one
 * head of a block after the other, and only read the cache. The last part to end appends. Where the append demotes a
 * block that is prepared, it copies the bytes.
 */
#ifndef TKVI_STEP_APPEND_PARTS_H
#define TKVI_STEP_APPEND_PARTS_H

#include "core/parts.h"
#include "step/sequence.h"

#define TKVI_MAX_ENCODERS 16 /* most parts of an append that encode: each has space for decoded rows */

/* What the parts of an append do. All parts find the same. */
typedef struct tkvi_append_work {
    tkvi_prepared prepared;
    int n_tasks, n_encoders; /* heads of all blocks; parts that encode */
    size_t row_bytes;        /* bytes of an encoder's space */
    size_t bytes;            /* bytes of the workspace */
} tkvi_append_work;

/* 1 if an append learns something that decides how blocks are coded. */
static int tkvi_append_learns(const tkv_cache *kv, int layer, int64_t n) {
    return tkvi_is_table_due(kv, layer, (int)(n < TKVI_FOREVER ? n : TKVI_FOREVER)) ||
           tkvi_are_query_states_due(kv, layer);
}

/* Lists the blocks that an append will demote. Under a budget this depends on bytes in use, so it lists none. A wrong
 * argument, which the append will refuse, is TKV_ERR_ARG, and there are none. */
static tkv_status tkvi_list_demotions(const tkv_cache *kv, const tkv_append_params *p, tkvi_prepared *out) {
    tkv_rows single_row;
    tkvi_request request;
    int64_t total = 0;
    int i, has_step = 0;
    out->n = 0;
    if (!p) return TKV_ERR_ARG;
    request = tkvi_request_of(p, &single_row);
    if (request.n_rows < 0 || request.n_rows > kv->tables.cfg.limits.max_seqs || p->layer < 0 ||
        p->layer >= kv->tables.cfg.model.n_layers || kv->tables.plan[p->layer].stored_layer != p->layer)
        return TKV_ERR_ARG;
    for (i = 0; i < request.n_rows; i++) {
        if (!tkvi_has_seq(kv, request.rows[i].seq) || request.rows[i].n < 0) return TKV_ERR_ARG;
        has_step |= kv->seq[request.rows[i].seq].in_step;
        total += request.rows[i].n;
    }
    if (total == 0 || tkvi_has_budget(kv)) return TKV_OK;
    if (!has_step && tkvi_append_learns(kv, p->layer, total)) return TKV_OK;
    for (i = 0; i < request.n_rows; i++) {
        const int seq = request.rows[i].seq, n = request.rows[i].n;
        if (n && !kv->seq[seq].in_step)
            tkvi_forecast_ageing(kv, seq, p->layer, tkvi_most_to_age(tkvi_list_of(kv, seq, p->layer), n),
                                 out);
    }
    return TKV_OK;
}

/* Finds the work of an append, and its bytes. */
static tkv_status tkvi_plan_append(const tkv_cache *kv, const tkv_append_params *p, tkvi_append_work *w) {
    const tkv_status st = tkvi_list_demotions(kv, p, &w->prepared);
    int i;
    w->n_tasks = 0;
    w->row_bytes = 0;
    w->bytes = TKVI_PARTS_CLEAR;
    for (i = 0; i < w->prepared.n; i++) {
        const tkvi_recoding *r = &w->prepared.block[i].recoding;
        const tkvi_geometry *g = tkvi_geometry_of(kv, r->layer);
        w->n_tasks += r->to->n_kv_heads;
        w->row_bytes = tkvi_align_up((size_t)((g->k_pad + g->v_pad) * TKVI_BLOCK) * sizeof(float));
        w->bytes += r->to->bytes.total;
    }
    w->n_encoders = tkvi_min(w->n_tasks, TKVI_MAX_ENCODERS);
    w->bytes += (size_t)w->n_encoders * w->row_bytes;
    return st;
}

/* Gives each block its place in the workspace, behind the spaces of the encoders. */
static void tkvi_place_prepared(tkvi_append_work *w, uint8_t *at) {
    int i;
    at += (size_t)w->n_encoders * w->row_bytes;
    for (i = 0; i < w->prepared.n; i++) {
        w->prepared.block[i].bytes = at;
        at += w->prepared.block[i].recoding.to->bytes.total;
    }
}

/* Encodes heads of blocks until all are taken. A part that comes after TKVI_MAX_ENCODERS others does nothing. */
static void tkvi_encode_prepared(const tkv_cache *kv, const tkvi_append_work *w, tkvi_parts *head) {
    const int encoder = tkvi_count_up(&head->n_begun) - 1;
    while (encoder < w->n_encoders) {
        uint8_t *rows = tkvi_parts_data(head) + (size_t)encoder * w->row_bytes;
        const int task = tkvi_count_up(&head->n_taken) - 1;
        const tkvi_prepared_block *b;
        const tkvi_record *record;
        int n_heads;
        if (task >= w->n_tasks) return;
        n_heads = w->prepared.block[0].recoding.to->n_kv_heads; /* that of the layer */
        b = &w->prepared.block[task / n_heads];
        record = &b->recoding.to->record[task % n_heads];
        memset(b->bytes + record->at, 0, record->k.bytes + record->v.bytes); /* a format may leave gaps */
        tkvi_recode_head(&b->recoding, task % n_heads, (float *)(void *)rows,
                         tkvi_block_bytes(&kv->pool, &kv->pool.block[b->number]), b->bytes);
    }
}

TKV_API tkv_status tkv_get_append_bytes(const tkv_cache *kv, const tkv_append_params *p, size_t *bytes) {
    tkvi_append_work w;
    tkv_status st;
    if (!kv || !bytes) return TKV_ERR_ARG;
    if (!TKVI_HAS_APPEND_PARTS) return TKV_ERR_UNSUPPORTED;
    st = tkvi_plan_append(kv, p, &w);
    if (!st) *bytes = w.bytes;
    return st;
}

TKV_API tkv_status tkv_append_part(tkv_cache *kv, const tkv_append_params *p, int part, int n_parts,
                                   void *workspace, size_t bytes) {
    tkvi_append_work w;
    tkvi_parts *head;
    tkv_status st;
    if (!kv || !tkvi_is_part(part, n_parts, workspace)) return tkvi_refuse_part(kv, part);
    if (!TKVI_HAS_APPEND_PARTS) /* one part writes the sentence */
        return part ? TKV_ERR_UNSUPPORTED : tkvi_refuse_left_out(kv, "TKV_NO_APPEND_PARTS leaves this out");
    (void)tkvi_plan_append(kv, p, &w); /* tkv_append_ex tells the error */
    if (bytes < w.bytes) return tkvi_refuse_workspace(kv, w.bytes);
    head = tkvi_parts_head(workspace);
    tkvi_place_prepared(&w, tkvi_parts_data(head));
    tkvi_encode_prepared(kv, &w, head);
    if (!tkvi_is_last_part(head, n_parts)) return TKV_OK;
    kv->work.prepared = &w.prepared;
    st = tkv_append_ex(kv, p);
    kv->work.prepared = NULL;
    tkvi_parts_end(workspace);
    return st;
}

#endif /* TKVI_STEP_APPEND_PARTS_H */
