/*
 * attention/reference.h - attention by its definition, slow, for tests.
 *
 * It decodes each block for each row and a few heads, and computes in double. It shares with attention/attend.h the
 * check of the call, and no arithmetic.
 */
#ifndef TKVI_ATTENTION_REFERENCE_H
#define TKVI_ATTENTION_REFERENCE_H

#include "attention/attend.h"

/* Logit of a key for query `query` of batch entry `item`. The key has index j and is in this slot of block i. *seen: 0
 * if the query does not see the key. */
static double tkvi_ref_logit(const tkvi_call *c, int item, int row, int query, int head, const float *key,
                             int i, int slot, int j, int *seen) {
    const tkv_attend_params *p = c->p;
    const tkv_cache *kv = c->kv;
    const tkvi_list *list = tkvi_list_of(kv, c->rows[item].seq, c->plan->stored_layer);
    const uint32_t *ids = tkvi_ids(kv, c->rows[item].seq, c->plan->stored_layer);
    const int len = list->len, first = tkvi_first_query(c, item), at = first + query;
    const int of_key = j + kv->pool.entry[ids[i]].shift,
              of_query =
                  p->query_positions ? p->query_positions[row] : tkvi_index_position(kv, list, ids, at);
    const int by_index = tkvi_block_end(kv, list, ids, i) > first;
    const int end = p->query_positions ? len : p->row_ends ? p->row_ends[row] : at + 1;
    const int is_sink = i < list->sinks || (tkvi_sink_mask(&kv->pool, ids[i]) >> slot & 1);
    double s = 0.0, add = 0.0;
    *seen = 0;
    if (!p->non_causal && (j >= end || (!by_index && of_key > of_query))) return 0.0;
    if (c->window && of_query - of_key >= c->window && !(c->plan->sees_sinks && is_sink)) return 0.0;
    if (p->mask) {
        const float bias = tkvi_mask_of(c, item, row, head, j);
        if (TKVI_IS_HIDDEN(bias)) return 0.0;
        add = (double)bias;
    }
    if (p->mask_bits && j >= len - p->n_mask_bits) {
        int bit = j - (len - p->n_mask_bits);
        if (!(p->mask_bits[row * c->bits_stride + bit / 64] >> bit % 64 & 1)) return 0.0;
    }
    *seen = 1;
    for (i = 0; i < c->plan->geometry.head_dim; i++)
        s += (double)tkvi_element(p->q, p->q_type, row * c->q_row + head * c->q_head + i) * (double)key[i];
    s *= (double)c->scale;
    if (p->softcap > 0.0f) s = (double)p->softcap * tanh(s / (double)p->softcap);
    if (p->alibi_slopes) s += (double)p->alibi_slopes[head] * (double)(of_key - of_query);
    return s + add;
}

enum {
    TKVI_REF_HEADS = 4,
    TKVI_REF_TOKENS = 16
}; /* computed together: query heads of a KV head, tokens of a block */

typedef struct tkvi_ref_head { /* one query head of one row */
    int is_finite;             /* 0: a query or a logit is not, so the row sees no key and no learned sink */
    double top, sum;           /* the largest logit so far, -1e300 at first; the sum of exp(logit - top) */
    double out[TKV_MAX_HEAD_DIM]; /* the same sum, of values */
} tkvi_ref_head;

typedef struct tkvi_ref_row {
    const tkvi_call *c;
    int item, row, query;
    int head, n_heads; /* query heads `head` .. head + n_heads - 1, which share a KV head */
    tkvi_ref_head at[TKVI_REF_HEADS];
    float x[TKVI_REF_TOKENS * TKV_MAX_HEAD_DIM]; /* decoded keys or values */
    double logit[TKVI_REF_HEADS][TKVI_REF_TOKENS];
    int seen[TKVI_REF_HEADS][TKVI_REF_TOKENS];
} tkvi_ref_row;

static void tkvi_ref_begin(tkvi_ref_row *r) {
    const tkvi_call *c = r->c;
    int h, i;
    for (h = 0; h < r->n_heads; h++) {
        tkvi_ref_head *at = &r->at[h];
        const int head = r->head + h;
        memset(at, 0, sizeof *at);
        at->is_finite = 1;
        at->top = -1e300; /* far below each logit, which is a float */
        for (i = 0; i < c->plan->geometry.head_dim; i++)
            at->is_finite &=
                tkvi_is_finite(tkvi_element(c->p->q, c->p->q_type, r->row * c->q_row + head * c->q_head + i));
        if (!c->p->sink_logits || !tkvi_is_finite(c->p->sink_logits[head])) continue;
        at->top = (double)c->p->sink_logits[head];
        at->sum = 1.0;
    }
}

/* The logits of all heads for slots t .. t + n - 1 of entry i, whose keys are these bytes. */
static void tkvi_ref_logits(tkvi_ref_row *r, const uint32_t *ids, const tkvi_list *list, int i,
                            const tkvi_side *side, const uint8_t *k, int t, int n) {
    const tkvi_entry *e = &r->c->kv->pool.entry[ids[i]];
    const int dim = r->c->plan->geometry.head_dim;
    const uint64_t there = tkvi_live_mask(e, tkvi_block_tokens(r->c->kv, list, ids, i));
    int j, h;
    tkvi_decode_side(side, k, t, n, r->x, (size_t)dim);
    for (j = 0; j < n; j++) {
        float *key = r->x + j * dim;
        const int index = tkvi_slot_index(r->c->kv, ids[i], t + j);
        if (TKVI_HAS_MOVES && e->turned) tkvi_rope_rotate(r->c->plan->rope, e->turned, 0, key);
        for (h = 0; h < r->n_heads; h++) {
            r->seen[h][j] = 0;
            if (there >> (t + j) & 1 && r->at[h].is_finite)
                r->logit[h][j] = tkvi_ref_logit(r->c, r->item, r->row, r->query, r->head + h, key, i, t + j,
                                                index, &r->seen[h][j]);
        }
    }
}

/* Adds a token to a head. A larger logit than all before scales the sums down to it. */
static void tkvi_ref_add(tkvi_ref_head *at, double logit, const float *v, int dim) {
    double scale, w;
    int i;
    at->is_finite &= tkvi_is_finite((float)logit);
    if (!at->is_finite) return;
    if (logit > at->top) {
        scale = exp(at->top - logit);
        at->sum *= scale;
        for (i = 0; i < dim; i++) at->out[i] *= scale;
        at->top = logit;
    }
    w = exp(logit - at->top);
    at->sum += w;
    for (i = 0; i < dim; i++) at->out[i] += w * (double)v[i];
}

/* Looks at all tokens of a row: adds them to its heads, or, if that is done, gives p->scores their weights. */
static tkv_status tkvi_ref_tokens(tkvi_ref_row *r, int scores) {
    const tkvi_call *c = r->c;
    const tkv_cache *kv = c->kv;
    const tkvi_list *list = tkvi_list_of(kv, c->rows[r->item].seq, c->plan->stored_layer);
    const uint32_t *ids = tkvi_ids(kv, c->rows[r->item].seq, c->plan->stored_layer);
    const int kv_head = r->head / c->heads_per_kv, v_dim = c->plan->geometry.v_head_dim;
    tkvi_fetch_buffer room[2];
    int i, t, j, h;
    tkvi_empty_buffer(&room[0], c->rows[r->item].seq, c->plan->stored_layer);
    tkvi_empty_buffer(&room[1], c->rows[r->item].seq, c->plan->stored_layer);
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const tkvi_record *rec = &kv->tables.layout[b->layout].record[kv_head];
        const int n = tkvi_block_tokens(kv, list, ids, i);
        const uint8_t *k, *v = NULL;
        tkv_status st;
        if (tkvi_has_no_source(kv, b)) continue; /* no row sees it: tkvi_call_init */
        st = tkvi_get_side_bytes(kv, ids[i], kv_head, TKV_K, &room[0], &k);
        if (!st && !scores) st = tkvi_get_side_bytes(kv, ids[i], kv_head, TKV_V, &room[1], &v);
        if (st) return st;
        for (t = 0; t < n; t += TKVI_REF_TOKENS) {
            const int now = tkvi_min(TKVI_REF_TOKENS, n - t);
            tkvi_ref_logits(r, ids, list, i, &rec->k, k, t, now);
            if (!scores) tkvi_decode_side(&rec->v, v, t, now, r->x, (size_t)v_dim);
            for (h = 0; h < r->n_heads; h++)
                for (j = 0; j < now; j++) {
                    tkvi_ref_head *at = &r->at[h];
                    if (!r->seen[h][j]) continue;
                    if (!scores) tkvi_ref_add(at, r->logit[h][j], r->x + j * v_dim, v_dim);
                    else
                        c->p->scores[r->item * c->score_stride + tkvi_slot_index(kv, ids[i], t + j)] +=
                            (float)(exp(r->logit[h][j] - at->top) / at->sum);
                }
        }
    }
    return TKV_OK;
}

/* Attention of some query heads of one row. */
static tkv_status tkvi_ref_attend(tkvi_ref_row *r) {
    const tkvi_call *c = r->c;
    const tkvi_geometry *g = &c->plan->geometry;
    tkv_status st;
    int h, i;
    tkvi_ref_begin(r);
    st = tkvi_ref_tokens(r, 0);
    if (!st && c->p->scores) st = tkvi_ref_tokens(r, 1);
    if (st) return st;
    for (h = 0; h < r->n_heads; h++) {
        const int head = r->head + h;
        const double sum = r->at[h].is_finite ? r->at[h].sum : 0.0;
        for (i = 0; i < g->v_head_dim; i++)
            tkvi_store_element(c->p->out, c->p->out_type, r->row * c->out_row + head * c->out_head + i,
                               sum > 0.0 ? (float)(r->at[h].out[i] / sum) : 0.0f);
        if (c->p->lse)
            c->p->lse[(ptrdiff_t)r->row * g->n_heads + head] =
                sum > 0.0 ? (float)(r->at[h].top + log(sum)) : tkvi_from_bits(0xff800000u);
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_attend_reference(tkv_cache *kv, const tkv_attend_params *p) {
    tkvi_call c;
    tkvi_ref_row r;
    int kv_head, end, n_before = 0;
    tkv_status st = tkvi_call_init(&c, kv, p);
    if (st) return tkvi_fail_reader(kv, st, c.why[0], c.number, c.why[1]);
    tkvi_clear_scores(&c);
    r.c = &c;
    for (r.item = 0; r.item < c.n_rows; r.item++) {
        for (r.query = 0; r.query < c.rows[r.item].n; r.query++) {
            r.row = tkvi_first_row(p, r.item, n_before) + r.query;
            for (kv_head = c.first_kv_head; kv_head < c.first_kv_head + c.n_kv_heads; kv_head++) {
                end = (kv_head + 1) * c.heads_per_kv;
                for (r.head = end - c.heads_per_kv; r.head < end && !st; r.head += r.n_heads) {
                    r.n_heads = tkvi_min(TKVI_REF_HEADS, end - r.head);
                    st = tkvi_ref_attend(&r);
                }
            }
        }
        n_before += c.rows[r.item].n;
    }
    return st ? tkvi_fail_fetching(kv, st, p->layer) : TKV_OK;
}

#endif /* TKVI_ATTENTION_REFERENCE_H */
