/*
 * step/pins.h - eviction on request. tkv_evict evicts the tokens that a policy chooses, or those that the caller
 * names. tkv_seq_pin protects tokens from eviction.
 */
#ifndef TKVI_STEP_PINS_H
#define TKVI_STEP_PINS_H

#include "step/sequence.h"

/* Can tokens of this sequence and layer (TKV_ALL_LAYERS: all layers) be evicted now? Sets the error if not. */
static tkv_status tkvi_evictable(tkv_cache *kv, int seq, int layer) {
    if (!tkvi_has_seq(kv, seq)) return tkvi_refuse_seq(kv, seq);
    if (layer != TKV_ALL_LAYERS && !tkvi_has_own_layer(kv, seq, layer)) return tkvi_refuse_layer(kv, layer);
    if (!kv->pool.tables->cfg.evict.policy)
        return tkvi_fail(kv, TKV_ERR_STATE,
                         "the cache has no eviction policy; set cfg.evict.policy before tkv_create", 0, NULL);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first", 0, NULL);
    return TKV_OK;
}

/* Evicts the tokens of p->victims, except pinned ones. */
static tkv_status tkvi_evict_named(tkv_cache *kv, const tkv_evict_params *p) {
    const int last = p->layer == TKV_ALL_LAYERS ? kv->tables.cfg.model.n_layers - 1 : p->layer;
    int l, i;
    if (p->n_victims < 0) return tkvi_fail(kv, TKV_ERR_ARG, "n_victims is", p->n_victims, "");
    for (l = tkvi_max(p->layer, 0); l <= last; l++) {
        tkvi_choice c;
        if (kv->tables.plan[l].stored_layer != l || tkvi_list_of(kv, p->seq, l)->n == 0) continue;
        (void)tkvi_build_view(kv, p->seq, l, NULL, 0, 0, &c);
        memset(c.victims, 0, (size_t)tkvi_words(c.n) * sizeof *c.victims);
        for (i = 0; i < c.n; i++)
            if (c.position[i] < p->n_victims && tkvi_has(p->victims, c.position[i]) && !tkvi_has(c.pinned, i))
                tkvi_mark(c.victims, i);
        tkvi_mark_victims(kv, p->seq, l, &c);
        tkvi_apply_eviction(kv, p->seq, l, 0);
    }
    tkvi_release_unused(kv, p->seq);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_evict(tkv_cache *kv, const tkv_evict_params *p) {
    const tkv_evict_config *cfg;
    const char *wrong, *field;
    tkvi_choice c;
    tkv_status st;
    double value;
    int layer, pass, keep;
    if (!TKVI_HAS_EVICT) return tkvi_refuse_left_out(kv, "TKV_NO_EVICT leaves this out");
    if (!kv) return TKV_ERR_ARG;
    if (!p) return tkvi_fail(kv, TKV_ERR_ARG, "the parameters are missing", 0, NULL);
    st = tkvi_evictable(kv, p->seq, p->layer);
    if (st) return st;
    if (p->victims) return tkvi_evict_named(kv, p);
    cfg = p->evict ? p->evict : &kv->tables.cfg.evict;
    keep = p->keep ? p->keep : kv->tables.cfg.evict.keep_tokens;
    if (!p->keep && cfg->keep_first > 0 && cfg->keep_last > 0) keep = tkvi_mean_kept(cfg);
    if (keep < 1)
        return tkvi_fail(kv, TKV_ERR_ARG, "keep is", keep,
                         "; it must be 1 or more, or cfg.evict.keep_tokens");
    wrong = tkvi_evict_fault(cfg, &field, &value);
    if (wrong) return tkvi_bad(kv->call.error, sizeof kv->call.error, field, value, wrong);
    if (!p->scores && !tkvi_collects_for(kv, cfg->policy))
        return tkvi_fail(kv, TKV_ERR_CONFIG,
                         "this policy needs scores that cfg.evict and cfg.importance do not collect", 0,
                         NULL);
    for (pass = 0; pass < 2; pass++) /* pass 0 chooses and can fail; pass 1 evicts and cannot fail */
        for (layer = tkvi_max(p->layer, 0);
             layer <= (p->layer == TKV_ALL_LAYERS ? kv->tables.cfg.model.n_layers - 1 : p->layer); layer++) {
            if (kv->tables.plan[layer].stored_layer != layer || tkvi_list_of(kv, p->seq, layer)->n == 0)
                continue;
            if (pass) {
                tkvi_apply_eviction(kv, p->seq, layer, 0);
                continue;
            }
            st = tkvi_choose_victims(kv, p->seq, layer, cfg, p,
                                     tkvi_n_kept_in_layer(kv, p->seq, layer, cfg, keep), 0, &c);
            if (!st) tkvi_mark_victims(kv, p->seq, layer, &c);
            if (st == TKV_ERR_BUDGET)
                return tkvi_fail(kv, st, "the policy is \"none\", but tokens must be evicted in layer", layer,
                                 "");
            if (st) return tkvi_fail(kv, st, "the scores are not finite in layer", layer, "");
        }
    tkvi_release_unused(kv, p->seq);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_seq_pin(tkv_cache *kv, int seq, int start, int n, int until) {
    tkv_status st;
    int layer, i, t;
    if (!TKVI_HAS_EVICT) return tkvi_refuse_left_out(kv, "TKV_NO_EVICT leaves this out");
    st = tkvi_evictable(kv, seq, TKV_ALL_LAYERS);
    if (st) return st;
    if (start < 0 || n < 0 || n > TKVI_FOREVER - start)
        return tkvi_fail(kv, TKV_ERR_ARG, "start and n must be positions; the wrong one is",
                         start < 0 ? start : n, "");
    if (until != TKV_UNLIMITED && until != TKV_OFF && (until < 1 || until >= TKVI_FOREVER))
        return tkvi_fail(kv, TKV_ERR_ARG, "until is", until,
                         "; it must be a length of 1 to 2^30 - 2, TKV_UNLIMITED or TKV_OFF");
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = tkvi_first_block_to_search(kv, list, ids, tkvi_min(start, list->len - 1)); i < list->n;
             i++) {
            tkvi_token_meta *token_meta = &kv->pool.token_meta[ids[i]];
            uint64_t these = 0;
            for (t = 0; t < tkvi_block_tokens(kv, list, ids, i); t++) {
                const int at = tkvi_slot_index(kv, ids[i], t);
                if (at >= start && at < start + n) these |= (uint64_t)1 << t;
            }
            these &= tkvi_used_mask(kv, list, ids, i);
            if (!these) continue;
            tkvi_drop_ended_pins(kv, seq, layer, i);
            if (until == TKV_UNLIMITED) token_meta->pinned_mask |= these;
            else if (until != TKV_OFF) {
                token_meta->temporary_until = tkvi_max(token_meta->temporary_until, until);
                token_meta->temporary_mask |= these;
            } else {
                token_meta->pinned_mask &= ~these;
                token_meta->temporary_mask &= ~these;
            }
        }
    }
    return tkvi_ok(kv);
}

#endif /* TKVI_STEP_PINS_H */
