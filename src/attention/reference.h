/*
 * attention/reference.h - attention by its definition, slow, for tests.
 *
 * It decodes each block for each row and head, and computes in double. Pass 0 finds the maximum, pass 1 the sums,
 * pass 2 p->scores if requested. It shares with attention/attend.h the check of the call, and no arithmetic.
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

static int tkvi_ref_is_finite(const tkvi_call *c, int row, int head) {
    int i, finite = 1;
    for (i = 0; i < c->plan->geometry.head_dim; i++)
        finite &= tkvi_is_finite(tkvi_element(c->p->q, c->p->q_type, row * c->q_row + head * c->q_head + i));
    return finite;
}

/* Tokens of a block that are decoded at a time. */
static int tkvi_ref_tokens(int dim) { return dim > 256 ? 16 : TKVI_BLOCK; }

/* Attention of one query head of one row. */
static tkv_status tkvi_ref_row(const tkvi_call *c, int item, int row, int query, int head) {
    const tkv_cache *kv = c->kv;
    const tkvi_geometry *g = &c->plan->geometry;
    const tkvi_list *list = tkvi_list_of(kv, c->rows[item].seq, c->plan->stored_layer);
    const uint32_t *ids = tkvi_ids(kv, c->rows[item].seq, c->plan->stored_layer);
    float x[TKVI_BLOCK * 256]; /* keys or values of a block, or of 16 tokens */
    double s, top = 0.0, sum = 0.0, w[TKVI_BLOCK], out[TKV_MAX_HEAD_DIM];
    int sees[TKVI_BLOCK];
    tkvi_fetch_buffer room[2];
    int finite = tkvi_ref_is_finite(c, row, head); /* 0: the row sees no key and no learned sink */
    int pass, i, j, t, any = 0;
    ptrdiff_t at = row * c->out_row + head * c->out_head;
    memset(out, 0, sizeof out);
    tkvi_empty_buffer(&room[0], c->rows[item].seq, c->plan->stored_layer);
    tkvi_empty_buffer(&room[1], c->rows[item].seq, c->plan->stored_layer);
    if (c->p->sink_logits && tkvi_is_finite(c->p->sink_logits[head])) {
        top = (double)c->p->sink_logits[head];
        any = 1;
    }
    for (pass = 0; pass < 3; pass++) {
        if (pass == 1 && finite && c->p->sink_logits && tkvi_is_finite(c->p->sink_logits[head]))
            sum = exp((double)c->p->sink_logits[head] - top);
        for (i = 0; i < list->n; i++) {
            const tkvi_block *b = tkvi_block_of(kv, ids[i]);
            const tkvi_record *rec = &kv->tables.layout[b->layout].record[head / c->heads_per_kv];
            const uint8_t *k, *v = NULL;
            const int n = tkvi_block_tokens(kv, list, ids, i);
            const uint64_t there = tkvi_live_mask(&kv->pool.entry[ids[i]], n);
            tkv_status st;
            if (tkvi_has_no_source(kv, b)) continue; /* no row sees it: tkvi_call_init */
            st = tkvi_get_side_bytes(kv, ids[i], head / c->heads_per_kv, TKV_K, &room[0], &k);
            if (!st && pass == 1)
                st = tkvi_get_side_bytes(kv, ids[i], head / c->heads_per_kv, TKV_V, &room[1], &v);
            if (st) return st;
            if (!finite) continue;
            for (t = 0; t < n; t++) {
                const int at_once = tkvi_ref_tokens(g->head_dim), from = t % at_once;
                float *key = x + from * g->head_dim;
                int seen = 0;
                sees[t] = 0;
                if (!from) tkvi_decode_side(&rec->k, k, t, tkvi_min(at_once, n - t), x, (size_t)g->head_dim);
                if (!(there >> t & 1) || !finite) continue;
                if (TKVI_HAS_MOVES && kv->pool.entry[ids[i]].turned)
                    tkvi_rope_rotate(c->plan->rope, kv->pool.entry[ids[i]].turned, 0, key);
                j = tkvi_slot_index(kv, ids[i], t);
                s = tkvi_ref_logit(c, item, row, query, head, key, i, t, j, &seen);
                if (!seen) continue;
                if (pass == 0) {
                    finite &= tkvi_is_finite((float)s); /* a logit beyond a float empties the row */
                    top = any && top > s ? top : s;
                    any = 1;
                    continue;
                }
                sees[t] = 1;
                w[t] = exp(s - top);
                if (pass == 2) c->p->scores[item * c->score_stride + j] += (float)(w[t] / sum);
            }
            if (pass != 1) continue;
            for (t = 0; t < n; t++) {
                const int at_once = tkvi_ref_tokens(g->v_head_dim), from = t % at_once;
                int ch;
                if (!from)
                    tkvi_decode_side(&rec->v, v, t, tkvi_min(at_once, n - t), x, (size_t)g->v_head_dim);
                if (!sees[t]) continue;
                sum += w[t];
                for (ch = 0; ch < g->v_head_dim; ch++) out[ch] += w[t] * (double)x[from * g->v_head_dim + ch];
            }
        }
        if (pass == 1 && !c->p->scores) break;
    }
    for (i = 0; i < g->v_head_dim; i++)
        tkvi_store_element(c->p->out, c->p->out_type, at + i, sum > 0.0 ? (float)(out[i] / sum) : 0.0f);
    if (c->p->lse)
        c->p->lse[(ptrdiff_t)row * g->n_heads + head] =
            sum > 0.0 ? (float)(top + log(sum)) : tkvi_from_bits(0xff800000u);
    return TKV_OK;
}

TKV_API tkv_status tkv_attend_reference(tkv_cache *kv, const tkv_attend_params *p) {
    tkvi_call c;
    int item, query, head, n_before = 0;
    tkv_status st = tkvi_call_init(&c, kv, p);
    if (st) return tkvi_fail_reader(kv, st, c.why[0], c.number, c.why[1]);
    tkvi_clear_scores(&c);
    for (item = 0; item < c.n_rows; item++) {
        for (query = 0; query < c.rows[item].n; query++)
            for (head = c.first_kv_head * c.heads_per_kv;
                 head < (c.first_kv_head + c.n_kv_heads) * c.heads_per_kv && !st; head++)
                st = tkvi_ref_row(&c, item, tkvi_first_row(p, item, n_before) + query, query, head);
        n_before += c.rows[item].n;
    }
    return st ? tkvi_fail_fetching(kv, st, p->layer) : TKV_OK;
}

#endif /* TKVI_ATTENTION_REFERENCE_H */
