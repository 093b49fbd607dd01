/*
 * calls.h - what is called at every step, and reports.
 */
#ifndef TKVCU_CALLS_H
#define TKVCU_CALLS_H

#include "create.h"

int tkvcu_append(tkvcu *cu, int layer, const void *d_k, const void *d_v, tkv_type type, int n_tokens,
                 const int32_t *d_seq_map, tkvcu_stream stream) {
    const tkvi_tables *t;
    const tkvi_plan *p;
    tkvcu_append_call c;
    tkvcu_appender a;
    if (!cu) return TKV_ERR_ARG;
    t = &cu->host->tables;
    if (layer < 0 || layer >= t->cfg.model.n_layers || t->plan[layer].stored != layer)
        return tkvcu_fail(cu, TKV_ERR_ARG, "there is no K and V of its own in layer", layer, "");
    if (!d_k || !d_v) return tkvcu_fail(cu, TKV_ERR_ARG, "k or v is missing", 0, NULL);
    if ((unsigned)type > TKV_TYPE_BF16)
        return tkvcu_fail(cu, TKV_ERR_ARG, "type must be a tkv_type", 0, NULL);
    if (n_tokens < 1 || n_tokens > tkvi_min(TKVCU_MAX_APPEND, t->cfg.limits.max_append))
        return tkvcu_fail(cu, TKV_ERR_ARG, "n_tokens is", n_tokens,
                          "; it must be 1 to 64, cfg.limits.max_append at most");
    p = &t->plan[layer];
    memset(&c, 0, sizeof c);
    c.x[0] = d_k;
    c.x[1] = d_v;
    c.seq_map = d_seq_map;
    c.layer = &cu->layer[layer];
    c.word = cu->word;
    c.type = type;
    c.n_tokens = n_tokens;
    c.max_tokens = cu->max_tokens;
    c.hot = p->now.hot;
    c.warm = p->now.warm;
    c.same = p->now.key[TKV_TIER_WARM] == p->now.key[TKV_TIER_ARCHIVE];
    c.fit = t->cfg.format.fit;
    c.saturate = t->cfg.host.nonfinite == TKV_NONFINITE_SATURATE;
    cu->used[layer] |= (uint8_t)(1u << tkvi_max(0, t->current[layer]));
    cu->appended[layer] = 1;
    a = tkvcu_appender_of(t->cfg.model.head_dim);
    TKVCU_LAUNCH(a.kernel, dim3(2u * (unsigned)t->cfg.model.n_kv_heads, (unsigned)cu->n_seqs),
                 dim3((unsigned)a.threads), a.shared, stream, cu->view[layer], c);
    return tkvcu_launched(cu);
}

int tkvcu_attend(tkvcu *cu, int layer, const void *d_q, tkv_type type, int n_queries,
                 const tkvcu_attend_params *params, void *d_out, float *d_lse, const int32_t *d_seq_map,
                 tkvcu_stream stream) {
    const tkvcu_attend_params none = {0.0f, 0.0f, 0, NULL}, *p = params ? params : &none;
    const tkvcu_view *v;
    const tkv_config *cfg;
    tkvcu_attend_call c;
    if (!cu) return TKV_ERR_ARG;
    v = tkvcu_view_of(cu, layer);
    cfg = &cu->host->tables.cfg;
    if (!v) return tkvcu_fail(cu, TKV_ERR_ARG, "there is no K and V in layer", layer, "");
    if (!d_q || !d_out) return tkvcu_fail(cu, TKV_ERR_ARG, "q or out is missing", 0, NULL);
    if ((unsigned)type > TKV_TYPE_BF16)
        return tkvcu_fail(cu, TKV_ERR_ARG, "type must be a tkv_type", 0, NULL);
    if (n_queries < 1 || n_queries > cu->max_queries)
        return tkvcu_fail(cu, TKV_ERR_ARG, "n_queries is", n_queries, "; it must be 1 to max_queries");
    if (!tkvi_is_finite(p->scale) || !tkvi_is_finite(p->softcap) || p->softcap < 0.0f || p->window < TKV_OFF)
        return tkvcu_fail(cu, TKV_ERR_ARG, "scale, softcap or window is out of range", 0, NULL);
    memset(&c, 0, sizeof c);
    c.q = d_q;
    c.out = d_out;
    c.lse = d_lse;
    c.sinks = p->d_sinks;
    c.seq_map = d_seq_map;
    c.word = cu->word;
    c.type = type;
    c.n_queries = n_queries;
    c.window = p->window == TKV_OFF ? 0 : p->window ? p->window : cu->host->tables.plan[layer].window;
    c.window = tkvi_min(c.window, cu->max_tokens + TKVCU_MAX_QUERIES);
    c.scale = p->scale != 0.0f ? p->scale : cfg->model.scale;
    c.softcap = p->softcap;
    return tkvcu_checked(cu, n_queries > TKVCU_DECODE_QUERIES
                                 ? tkvcu_prefill_launch(cu->prefill, &cu->split, v, &c, cfg, stream)
                                 : tkvcu_attend_launch(&cu->split, v, &c, cfg, stream));
}

int tkvcu_trim(tkvcu *cu, const int32_t *d_lengths, tkvcu_stream stream) {
    if (!cu) return TKV_ERR_ARG;
    if (!d_lengths) return tkvcu_fail(cu, TKV_ERR_ARG, "the lengths are missing", 0, NULL);
    TKVCU_LAUNCH(tkvcu_trim_kernel, dim3((unsigned)(cu->n_seqs + TKVCU_TRIMMERS - 1) / TKVCU_TRIMMERS),
                 dim3(TKVCU_TRIMMERS), 0, stream, cu->layer, cu->lists, cu->host->tables.cfg.model.n_layers,
                 cu->n_seqs, d_lengths, cu->word);
    return tkvcu_launched(cu);
}

int tkvcu_lengths(const tkvcu *cu, int layer, int32_t *lengths, tkvcu_stream stream) {
    const tkvcu_view *v;
    cudaError_t e;
    if (!cu || !lengths) return TKV_ERR_ARG;
    v = tkvcu_view_of(cu, layer);
    if (!v) return TKV_ERR_ARG;
    e = cudaMemcpy2DAsync(lengths, sizeof *lengths, &v->list->len, sizeof *v->list, sizeof *lengths,
                          (size_t)cu->n_seqs, cudaMemcpyDefault, stream);
    return e == cudaSuccess ? TKV_OK : TKVCU_ERR_CUDA;
}

int tkvcu_status(tkvcu *cu, uint32_t *word, int clear, tkvcu_stream stream) {
    int st;
    if (!cu) return TKV_ERR_ARG;
    if (!word) return tkvcu_fail(cu, TKV_ERR_ARG, "the word is missing", 0, NULL);
    st = tkvcu_checked(cu, cudaMemcpyAsync(word, cu->word, sizeof *word, cudaMemcpyDefault, stream));
    if (!st && clear) st = tkvcu_checked(cu, cudaMemsetAsync(cu->word, 0, sizeof *word, stream));
    return st;
}

const char *tkvcu_strerror(int status) {
    if (status == TKVCU_ERR_CUDA)
        return "a call of the CUDA runtime failed: tkvcu_last_error has what it said";
    if (status == TKVCU_ERR_UNSUPPORTED) return "tieredkv.h can do this, tieredkv_cuda.cu cannot";
    if (status > TKV_OK || status <= TKV_STATUS_LAST_) return "not a status";
    return tkv_get_status_text((tkv_status)status);
}

const char *tkvcu_last_error(const tkvcu *cu) { return cu ? cu->error : ""; }

#endif /* TKVCU_CALLS_H */
