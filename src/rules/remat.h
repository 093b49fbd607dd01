/*
 * rules/remat.h - decides which blocks to discard because the caller's model can recompute them. It prices a block
 * in FLOPs, decides whether to keep, discard or quantize it, and limits the recomputation of a step. The code
 * allocates nothing and uses neither a cache nor a model.
 *
 *     tokens    sinks | 0 ... 63 | 64 .. 127 | 128 . 191 | ........ | newest
 *     price            cheapest, least likely used       ->  most expensive
 *     discard   never   1st        2nd         3rd ...     at least min_materialized tokens stay
 *
 * Recomputing a block needs its whole prefix, and all layers up to the highest one that holds it. So discarded
 * blocks form one run of whole blocks behind the sinks, and the run is recomputed from its front.
 *
 * The idea is from RuvLLM's ADR-004. There the price grew with the layer alone, the age was the position, and
 * single tokens were recomputed.
 */
#ifndef TKVI_RULES_REMAT_H
#define TKVI_RULES_REMAT_H

#include "rules/evict.h"

/* Copies *from to *cfg and fills in defaults. Returns NULL, or the reason why the config is invalid. */
static const char *tkvi_remat_fill(const tkv_remat_config *from, tkv_remat_config *cfg) {
    *cfg = *from;
    if (cfg->n_layers < 1 || cfg->n_layers > 4096) return "n_layers must be from 1 to 4096";
    if (cfg->n_heads != TKV_OFF && (cfg->n_heads < 1 || cfg->n_heads > 65536))
        return "n_heads must be from 1 to 65536, or TKV_OFF";
    if (cfg->head_dim < 1 || cfg->head_dim > TKV_MAX_HEAD_DIM) return "head_dim must be from 1 to 576";
    if (!tkvi_within((float)cfg->layer_params, 1.0f, 1e15f))
        return "layer_params must be the weights of a layer, 1 to 1e15";
    cfg->threshold = tkvi_or(cfg->threshold, .9f);
    if (!tkvi_within(tkvi_number(cfg->threshold), 0.0f, 1.0f))
        return "threshold must be above 0 and at most 1, or TKV_ZERO";
    cfg->min_materialized = tkvi_evict_length(cfg->min_materialized, 512);
    cfg->sink_tokens = tkvi_evict_length(cfg->sink_tokens, 4);
    if (cfg->min_materialized < 0 || cfg->sink_tokens < 0)
        return "min_materialized and sink_tokens must be lengths, TKV_OFF or 0 for 512 and 4";
    cfg->age_tokens = tkvi_or(cfg->age_tokens, 4096.0f);
    if (!tkvi_within(cfg->age_tokens, 1.0f, 1e9f)) return "age_tokens must be from 1 to 1e9";
    if (!tkvi_within((float)cfg->quantize_price, 0.0f, 1e30f))
        return "quantize_price must be 0 to 1e30 FLOPs a byte";
    if (tkvi_bits((float)cfg->quantize_price) == 0) cfg->quantize_price = 8.0;
    if (!tkvi_within((float)cfg->step_flops, 0.0f, 1e30f)) return "step_flops must be 0 to 1e30";
    return NULL;
}

TKV_API tkv_status tkv_init_remat(tkv_remat *r, const tkv_remat_config *cfg, char *reason, size_t size) {
    tkv_remat_config full;
    const char *wrong;
    if (!TKVI_HAS_DISCARD)
        return tkvi_give_reason(TKV_ERR_UNSUPPORTED, "TKV_NO_DISCARD leaves this out", reason, size);
    (void)tkvi_give_reason(TKV_OK, "", reason, size);
    if (!r || !cfg) return TKV_ERR_ARG;
    wrong = tkvi_remat_fill(cfg, &full);
    if (wrong) return tkvi_give_reason(TKV_ERR_CONFIG, wrong, reason, size);
    memset(r, 0, sizeof *r);
    r->cfg = full;
    return TKV_OK;
}

/* >>the price. A token at position p takes 2 FLOPs for each weight of a layer. It sees about p keys, and each takes
 * 2 * n_heads * head_dim FLOPs for q.k and as many for the weighted sum of values. */
static double tkvi_remat_flops(const tkv_remat_config *cfg, int start, int end, int layers) {
    double attention;
    TKVI_ASSERT(start >= 0 && start <= end && layers >= 0 && layers <= cfg->n_layers);
    attention = 4.0 * tkvi_max(cfg->n_heads, 0) * cfg->head_dim * (((double)start + end) / 2.0);
    return ((double)end - start) * (layers ? layers : cfg->n_layers) * (2.0 * cfg->layer_params + attention);
}

/* Returns the FLOPs times the probability that block b is used: use / (1 + age / age_tokens). use below 0 means
 * never used: the result is negative, so below any price. */
static double tkvi_remat_expected(const tkv_remat_config *cfg, const tkv_remat_block *b, int now) {
    const double age = (double)now - (b->end - 1), use = (double)tkvi_or(b->use, 1.0f);
    return tkvi_remat_flops(cfg, b->start, b->end, b->layers) * use / (1.0 + age / (double)cfg->age_tokens);
}

/* Returns whether the n blocks follow one another without gaps and their fields are in range. */
static int tkvi_remat_is_sound(const tkv_remat *r, const tkv_remat_block *blocks, int n) {
    int i;
    if (!r || n < 0 || (n > 0 && !blocks)) return 0;
    for (i = 0; i < n; i++) {
        const tkv_remat_block *b = blocks + i;
        if (b->start < 0 || b->end <= b->start || (i > 0 && b->start != blocks[i - 1].end)) return 0;
        if (b->layers < 0 || b->layers > r->cfg.n_layers || !tkvi_within(b->use, -FLT_MAX, 1.0f)) return 0;
    }
    return 1;
}

/* >>the decision */
/* Returns the bytes that quantizing block b frees. */
static size_t tkvi_remat_saved(const tkv_remat_block *b) {
    return !b->discarded && b->quantized_bytes < b->bytes ? b->bytes - b->quantized_bytes : 0;
}

/* Returns whether one step can recompute the positions start to end - 1 of `layers` layers. */
static int tkvi_remat_fits_step(const tkv_remat_config *cfg, int start, int end, int layers) {
    return cfg->step_flops <= 0.0 || tkvi_remat_flops(cfg, start, end, layers) <= cfg->step_flops;
}

/* Returns whether block b may be discarded, of `held` tokens that are not. cheap: 1 requires that its recomputation
 * costs fewer FLOPs a byte than quantizing does. */
static int tkvi_remat_may_discard(const tkv_remat_config *cfg, const tkv_remat_block *b, int64_t held,
                                  int now, int cheap) {
    return held - (b->end - b->start) >= cfg->min_materialized &&
           (!cheap || tkvi_remat_expected(cfg, b, now) < cfg->quantize_price * (double)b->bytes);
}

typedef struct tkvi_remat_progress {
    size_t freed;
    int64_t held; /* tokens not discarded */
    int at;       /* next block to discard */
    int refused;  /* 1: stopped at a block above step_flops */
} tkvi_remat_progress;

/* Discards blocks from run->at on until `need` bytes are free. It stops at the first block that must stay. cheap:
 * also at the first block whose recomputation costs more FLOPs a byte than quantizing does. */
static void tkvi_remat_discard(const tkv_remat *r, const tkv_remat_block *blocks, int n, int now, size_t need,
                               int cheap, tkv_remat_action *action, tkvi_remat_progress *run) {
    for (; run->at < n && run->freed < need; run->at++) {
        const tkv_remat_block *b = blocks + run->at;
        if (b->discarded || b->start < r->cfg.sink_tokens) continue;
        if (!tkvi_remat_may_discard(&r->cfg, b, run->held, now, cheap)) return;
        if (!tkvi_remat_fits_step(&r->cfg, b->start, b->end, b->layers)) {
            run->refused = 1;
            return;
        }
        run->freed += b->bytes - (action[run->at] == TKV_REMAT_QUANTIZE ? tkvi_remat_saved(b) : 0);
        run->held -= b->end - b->start;
        action[run->at] = TKV_REMAT_DISCARD;
    }
}

TKV_API tkv_status tkv_decide_discard(tkv_remat *r, const tkv_remat_block *blocks, int n, int now,
                                      float pressure, size_t need, tkv_remat_action *action, size_t *freed) {
    tkvi_remat_progress run;
    size_t total = 0;
    int i;
    if (!TKVI_HAS_DISCARD) return TKV_ERR_UNSUPPORTED;
    if (!tkvi_remat_is_sound(r, blocks, n) || !tkvi_is_finite(pressure) || (n > 0 && !action))
        return TKV_ERR_ARG;
    if (now < 0 || (n > 0 && now < blocks[n - 1].end - 1)) return TKV_ERR_ARG;
    memset(&run, 0, sizeof run);
    for (i = 0; i < n; i++) {
        total = tkvi_add_sizes(total, blocks[i].bytes);
        if (total == TKVI_TOO_MANY) return TKV_ERR_ARG;
        run.held += blocks[i].discarded ? 0 : blocks[i].end - blocks[i].start;
    }
    for (i = 0; i < n; i++) action[i] = TKV_REMAT_KEEP;
    if (pressure >= tkvi_number(r->cfg.threshold)) {
        tkvi_remat_discard(r, blocks, n, now, need, 1, action, &run);
        for (i = run.at; i < n && run.freed < need; i++) { /* run.at is behind the sinks: they are kept */
            const size_t saved = tkvi_remat_saved(blocks + i);
            if (saved > 0) action[i] = TKV_REMAT_QUANTIZE;
            run.freed += saved;
        }
        tkvi_remat_discard(r, blocks, n, now, need, 0, action, &run);
        for (i = n; i-- > 0;) { /* undoes quantizing that is not needed any more, newest first */
            const size_t saved = tkvi_remat_saved(blocks + i);
            if (action[i] != TKV_REMAT_QUANTIZE || run.freed < need || run.freed - need < saved) continue;
            action[i] = TKV_REMAT_KEEP;
            run.freed -= saved;
        }
    }
    for (i = 0; i < n; i++) {
        if (blocks[i].discarded) continue;
        r->info.kept += action[i] == TKV_REMAT_KEEP;
        r->info.discarded += action[i] == TKV_REMAT_DISCARD;
        r->info.quantized += action[i] == TKV_REMAT_QUANTIZE;
    }
    r->info.over_budget += (uint64_t)run.refused;
    r->info.freed += run.freed;
    if (freed) *freed = run.freed;
    return TKV_OK;
}

/* >>recomputing */
static tkv_status tkvi_remat_restore(tkv_remat *r, const tkv_remat_block *blocks, int n, int step, int *first,
                                     int *count) {
    int i, found = 0, at = 0;
    if (!tkvi_remat_is_sound(r, blocks, n) || step < r->step || !first || !count) return TKV_ERR_ARG;
    if (step > r->step) r->spent = 0.0;
    r->step = step;
    while (at < n && !blocks[at].discarded) at++;
    for (i = at; i < n && blocks[i].discarded; i++, found++) {
        const double flops = tkvi_remat_flops(&r->cfg, blocks[i].start, blocks[i].end, blocks[i].layers);
        if (r->cfg.step_flops > 0.0 && r->spent + flops > r->cfg.step_flops) break;
        r->spent += flops;
        r->info.flops += flops;
    }
    r->info.restored += (uint64_t)found;
    for (; i < n; i++) r->info.waited += blocks[i].discarded != 0;
    *first = at;
    *count = found;
    return TKV_OK;
}

#endif /* TKVI_RULES_REMAT_H */
