/*
 * calls.h - the calls of each step, and getters.
 */
#ifndef TKVCU_CALLS_H
#define TKVCU_CALLS_H

#include "create.h"

tkv_status tkvcu_append(tkvcu *cu, int layer, const void *d_k, const void *d_v, tkv_type type, int n_tokens,
                        const int32_t *d_seq_map, tkvcu_stream stream) {
    const tkvi_tables *t;
    const tkvi_plan *p;
    tkvcu_append_call c;
    tkvcu_append_launch a;
    if (!cu) return TKV_ERR_ARG;
    t = &cu->host->tables;
    if (layer < 0 || layer >= t->cfg.model.n_layers || t->plan[layer].stored_layer != layer)
        return tkvcu_fail(cu, TKV_ERR_ARG, "no K and V of its own: layer", layer, "");
    if (!d_k || !d_v) return tkvcu_fail(cu, TKV_ERR_ARG, "k or v is missing", 0, NULL);
    if ((unsigned)type > TKV_TYPE_BF16)
        return tkvcu_fail(cu, TKV_ERR_ARG, "type must be a tkv_type", 0, NULL);
    if (n_tokens < 1 || n_tokens > tkvi_min(TKVCU_MAX_APPEND, t->cfg.limits.max_append))
        return tkvcu_fail(cu, TKV_ERR_ARG, "n_tokens is", n_tokens,
                          "; it must be 1 to 64, and at most cfg.limits.max_append");
    p = &t->plan[layer];
    memset(&c, 0, sizeof c);
    c.x[0] = d_k;
    c.x[1] = d_v;
    c.seq_map = d_seq_map;
    c.layer = &cu->layer[layer];
    c.flags = cu->flags;
    c.type = type;
    c.n_tokens = n_tokens;
    c.max_tokens = cu->max_tokens;
    c.hot = p->now.hot;
    c.warm = p->now.warm;
    c.same_coding = p->now.key[TKV_TIER_WARM] == p->now.key[TKV_TIER_ARCHIVE];
    c.fit = t->cfg.format.fit;
    c.saturate = t->cfg.host.nonfinite == TKV_NONFINITE_SATURATE;
    cu->used_versions[layer] |= (uint8_t)(1u << tkvi_max(0, t->current_version[layer]));
    cu->appended[layer] = 1;
    a = tkvcu_select_append_kernel(t->cfg.model.head_dim);
    TKVCU_LAUNCH(a.kernel, dim3(2u * (unsigned)t->cfg.model.n_kv_heads, (unsigned)cu->n_seqs),
                 dim3((unsigned)a.threads), a.shared, stream, cu->view[layer], c);
    return tkvcu_check_launch(cu);
}

tkv_status tkvcu_attend(tkvcu *cu, int layer, const void *d_q, tkv_type type, int n_queries,
                        const tkvcu_attend_params *params, void *d_out, float *d_lse,
                        const int32_t *d_seq_map, tkvcu_stream stream) {
    const tkvcu_attend_params none = {0.0f, 0.0f, 0, NULL}, *p = params ? params : &none;
    const tkvcu_view *v;
    const tkv_config *cfg;
    tkvcu_attend_call c;
    if (!cu) return TKV_ERR_ARG;
    v = tkvcu_find_view(cu, layer);
    cfg = &cu->host->tables.cfg;
    if (!v) return tkvcu_fail(cu, TKV_ERR_ARG, "no K and V: layer", layer, "");
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
    c.sink_logits = p->d_sink_logits;
    c.seq_map = d_seq_map;
    c.flags = cu->flags;
    c.type = type;
    c.n_queries = n_queries;
    c.window = p->window == TKV_OFF ? 0 : p->window ? p->window : cu->host->tables.plan[layer].window;
    c.window = tkvi_min(c.window, cu->max_tokens + TKVCU_MAX_QUERIES);
    c.scale = p->scale != 0.0f ? p->scale : cu->host->tables.plan[layer].geometry.scale;
    c.softcap = p->softcap;
    return tkvcu_check_cuda(cu, n_queries > TKVCU_DECODE_QUERIES
                                    ? tkvcu_launch_prefill(cu->prefill, &cu->attend_plan, v, &c, cfg, stream)
                                    : tkvcu_launch_attend(&cu->attend_plan, v, &c, cfg, stream));
}

tkv_status tkvcu_truncate(tkvcu *cu, const int32_t *d_lengths, tkvcu_stream stream) {
    if (!cu) return TKV_ERR_ARG;
    if (!d_lengths) return tkvcu_fail(cu, TKV_ERR_ARG, "the lengths are missing", 0, NULL);
    TKVCU_LAUNCH(tkvcu_truncate_kernel,
                 dim3((unsigned)(cu->n_seqs + TKVCU_TRUNCATE_THREADS - 1) / TKVCU_TRUNCATE_THREADS),
                 dim3(TKVCU_TRUNCATE_THREADS), 0, stream, cu->layer, cu->lists,
                 cu->host->tables.cfg.model.n_layers, cu->n_seqs, d_lengths, cu->flags);
    return tkvcu_check_launch(cu);
}

tkv_status tkvcu_get_lengths(tkvcu *cu, int layer, int32_t *lengths, tkvcu_stream stream) {
    const tkvcu_view *v;
    if (!cu) return TKV_ERR_ARG;
    v = tkvcu_find_view(cu, layer);
    if (!v) return tkvcu_fail(cu, TKV_ERR_ARG, "no K and V: layer", layer, "");
    if (!lengths) return tkvcu_fail(cu, TKV_ERR_ARG, "the memory for lengths is missing", 0, NULL);
    return tkvcu_check_cuda(cu, cudaMemcpy2DAsync(lengths, sizeof *lengths, &v->list->len, sizeof *v->list,
                                                  sizeof *lengths, (size_t)cu->n_seqs, cudaMemcpyDefault,
                                                  stream));
}

tkv_status tkvcu_get_flags(tkvcu *cu, uint32_t *flags, int clear, tkvcu_stream stream) {
    tkv_status st;
    if (!cu) return TKV_ERR_ARG;
    if (!flags) return tkvcu_fail(cu, TKV_ERR_ARG, "the memory for flags is missing", 0, NULL);
    st = tkvcu_check_cuda(cu, cudaMemcpyAsync(flags, cu->flags, sizeof *flags, cudaMemcpyDefault, stream));
    if (!st && clear) st = tkvcu_check_cuda(cu, cudaMemsetAsync(cu->flags, 0, sizeof *flags, stream));
    return st;
}

const char *tkvcu_get_last_error(const tkvcu *cu) { return cu ? cu->error : ""; }

#endif /* TKVCU_CALLS_H */
