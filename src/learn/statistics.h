/*
 * learn/statistics.h - the tables of formats whose heads share a layer's bytes: statistics, from them a table, its
 * versions.
 *
 * What counts is how a channel of K is asked (E[q^2], by attention/attend.h) times how it varies within a block, and
 * how strongly a head reads far tokens: the sum of p^2 over keys more than TKVI_FAR back (by attention/attend.h too;
 * of one query in eight) times the mean |v|^2. Attention adds whole numbers, so the order in which threads do changes
 * nothing; keys and values are read from the blocks that are still exact. When a layer has seen TKVI_LEARN tokens,
 * all sequences together, its next append makes the table; blocks that were due before wait in the next better tier.
 * At TKVI_LEARN_WELL tokens there is a better one for the blocks that come then; blocks keep the version that they
 * were coded with. Afterwards nothing is collected any more, unless tkv_calibration_refresh asks. bench/QUALITY.md
 * compares these tables with loaded ones.
 *
 * May call cache and below.
 */
#ifndef TKVI_LEARN_STATISTICS_H
#define TKVI_LEARN_STATISTICS_H

#include "learn/kvquant_tables.h"

#define TKVI_LEARN_FEW 128 /* a table of fewer tokens (a flush, a freeze) is nearer to the uniform one */

/* >>logarithms of statistics, in 1/8 octaves */
#define TKVI_LOG8_NONE (-1200)

static int tkvi_log8(float x) {
    static const uint32_t border[8] = {371395, 1164243, 2028850, 2971711, 3999908, 5121164, 6343903, 7677309};
    uint32_t bits = tkvi_bits(x);
    int step = 0;
    if (!(x > 0.0f)) return TKVI_LOG8_NONE;
    while (step < 8 && (bits & 0x7fffffu) >= border[step]) step++;
    return 8 * ((int)(bits >> 23) - 127) + step;
}

/* >>what a block says of one head */
typedef struct tkvi_channel_sums {
    int64_t sum, within; /* of values; of squares about the mean of the block. In units of a power of two */
} tkvi_channel_sums;

typedef struct tkvi_gather {
    tkv_cache *kv;
    tkvi_channel_sums channel[TKV_MAX_HEAD_DIM];
    float k_most, v_most; /* largest |k|; largest |v| of a vector, squared */
    float v_sum;          /* of all |v|, squared */
    float range; /* largest range of a channel in a block, distance of its middle from the mean included */
    int down;    /* values are divided by 2^down to be summed in integers */
    int64_t tokens;
} tkvi_gather;

/* First pass: sizes. */
static void tkvi_gather_size(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n) {
    tkvi_gather *g = (tkvi_gather *)ctx;
    const tkv_config *cfg = &g->kv->tables.cfg;
    float *k = g->kv->recode, *v = k + tkvi_round_up(cfg->head_dim, 16) * TKVI_BLOCK;
    int t, c;
    (void)start;
    tkvi_values(&r->k, g->kv->kernels->helpers, bytes, 0, n, k, (size_t)cfg->head_dim);
    tkvi_values(&r->v, g->kv->kernels->helpers, bytes + r->v_at, 0, n, v, (size_t)cfg->v_head_dim);
    for (t = 0; t < n; t++) {
        float squares = 0.0f;
        for (c = 0; c < cfg->head_dim; c++) {
            float a = k[t * cfg->head_dim + c];
            a = a < 0.0f ? -a : a;
            g->k_most = a > g->k_most ? a : g->k_most;
        }
        for (c = 0; c < cfg->v_head_dim; c++)
            squares = tkvi_f32(squares + tkvi_f32(v[t * cfg->v_head_dim + c] * v[t * cfg->v_head_dim + c]));
        g->v_most = squares > g->v_most ? squares : g->v_most;
        g->v_sum = tkvi_f32(g->v_sum + squares);
    }
    g->tokens += n;
}

static float tkvi_power_of_two(int e) {
    return tkvi_from_bits((uint32_t)(127 + tkvi_max(-126, tkvi_min(127, e))) << 23);
}

/* Second pass: sums, exact in integers: 2^20 * 64 tokens, squared. */
static void tkvi_gather_sums(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n) {
    tkvi_gather *g = (tkvi_gather *)ctx;
    const tkv_config *cfg = &g->kv->tables.cfg;
    float *k = g->kv->recode, by = tkvi_power_of_two(-g->down);
    int t, c;
    (void)start;
    tkvi_values(&r->k, g->kv->kernels->helpers, bytes, 0, n, k, (size_t)cfg->head_dim);
    for (c = 0; c < cfg->head_dim; c++) {
        int64_t sum = 0, squares = 0;
        for (t = 0; t < n; t++) {
            int64_t x = (int64_t)(k[t * cfg->head_dim + c] * by);
            sum += x;
            squares += x * x;
        }
        g->channel[c].sum += sum;
        g->channel[c].within += squares - sum * sum / n;
    }
}

/* Third pass, with the mean known (in k_pad floats behind the blocks): ranges. */
static void tkvi_gather_range(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n) {
    tkvi_gather *g = (tkvi_gather *)ctx;
    const tkv_config *cfg = &g->kv->tables.cfg;
    float *k = g->kv->recode;
    int t, c;
    (void)start;
    tkvi_values(&r->k, g->kv->kernels->helpers, bytes, 0, n, k, (size_t)cfg->head_dim);
    for (c = 0; c < cfg->head_dim; c++) {
        float low = k[c], high = k[c], mean = (float)((double)g->channel[c].sum / (double)g->tokens);
        mean *= tkvi_power_of_two(g->down);
        for (t = 1; t < n; t++) {
            float x = k[t * cfg->head_dim + c];
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
        low = mean - low > high - mean ? mean - low : high - mean;
        g->range = low > g->range ? low : g->range;
    }
}

/* >>tables */
/* One head of a version, from what was gathered. */
static void tkvi_learn_head(tkv_cache *kv, int layer, int head, int version) {
    const tkv_config *cfg = &kv->tables.cfg;
    int pad = tkvi_round_up(cfg->head_dim, 16), c, p, most = TKVI_LOG8_NONE * 2, rank[TKV_MAX_HEAD_DIM];
    const tkvi_version *to = &kv->tables.version[version];
    size_t at = (size_t)layer * (size_t)cfg->n_kv_heads + (size_t)head;
    tkvi_head *h = &to->head[at];
    uint8_t *importance = to->importance + at * (size_t)pad, *order = to->channel + at * (size_t)pad;
    float *mean = to->mean + at * (size_t)pad;
    const int64_t *asked = tkvi_q_sq_sum_of(kv, layer, head);
    int64_t any = 0;
    tkvi_gather g;
    memset(&g, 0, sizeof g);
    g.kv = kv;
    (void)tkvi_each_block(kv, layer, head, tkvi_gather_size, &g);
    g.down = (g.k_most > 0.0f ? (int)(tkvi_bits(g.k_most) >> 23) - 127 : 0) - 20;
    (void)tkvi_each_block(kv, layer, head, tkvi_gather_sums, &g);
    if (g.tokens) (void)tkvi_each_block(kv, layer, head, tkvi_gather_range, &g);
    for (c = 0; c < cfg->head_dim; c++) any |= asked[c];
    for (c = 0; c < cfg->head_dim; c++) {
        rank[c] = tkvi_log8((float)g.channel[c].within) + (any ? tkvi_log8((float)asked[c]) : 0);
        most = tkvi_max(most, rank[c]);
    }
    for (c = 0; c < cfg->head_dim && g.tokens < TKVI_LEARN_FEW; c++) /* few tokens know little of channels */
        rank[c] = most + (rank[c] - most) * (int)g.tokens / TKVI_LEARN_FEW;
    for (p = 0; p < pad;
         p++) { /* channels in falling order, the first of equals first; then what is no channel */
        int best = -1;
        for (c = 0; c < cfg->head_dim && p < cfg->head_dim; c++)
            if (rank[c] > -1000000 && (best < 0 || rank[c] > rank[best])) best = c;
        if (best < 0) best = p;
        order[p] = (uint8_t)best;
        importance[p] = p < cfg->head_dim ? (uint8_t)tkvi_max(1, 255 + rank[best] - most) : (uint8_t)0;
        mean[p] = 0.0f;
        if (p < cfg->head_dim && g.tokens) {
            float m = (float)((double)g.channel[best].sum / (double)g.tokens) * tkvi_power_of_two(g.down);
            mean[p] = tkvi_f16_to_f32(tkvi_f32_to_f16(m));
        }
        if (p < cfg->head_dim) rank[best] = -2000000;
    }
    h->reach = tkvi_log8((float)*tkvi_far_attention_of(kv, layer, head)) + tkvi_log8(g.v_sum);
    h->k_weight = most + 16 * g.down; /* heads are compared: not in units of their own */
    h->k_top = tkvi_log_top(2.0f * g.range);
    h->v_top = tkvi_log_top(2.0f * sqrtf(g.v_most / (float)cfg->v_head_dim));
}

/* All heads of a version. */
static void tkvi_learn_heads(tkv_cache *kv, int layer, int version) {
    tkvi_head *heads = tkvi_heads_of(&kv->tables, layer, version);
    int head, n = kv->tables.cfg.n_kv_heads, high = -(1 << 20);
    for (head = 0; head < n; head++) {
        tkvi_learn_head(kv, layer, head, version);
        high = tkvi_max(high, heads[head].reach);
    }
    /* Nobody was heard to read far: all alike. Who alone did not gets the least. Half of what was seen: 512 tokens see
     * too little to be trusted in full (bench/LOG.md). */
    for (head = 0; head < n; head++) {
        heads[head].reach = high <= TKVI_LOG8_NONE / 2 ? 0 : tkvi_max((heads[head].reach - high) / 2, -8 * 6);
        heads[head].k_weight = tkvi_max(heads[head].k_weight, TKVI_LOG8_NONE) + heads[head].reach;
    }
}

/* A version of the layer's table that no block was coded with, or -1. */
static int tkvi_free_version(const tkv_cache *kv, int layer) {
    int used[TKVI_VERSIONS] = {0}, seq, i, v;
    if (kv->tables.current[layer] < 0) return 0;
    used[(int)kv->tables.current[layer]] = 1;
    for (v = 0; v < TKVI_VERSIONS && kv->pool.keep_all; v++) used[v] |= !kv->tables.version[v].bytes;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            const int own = kv->pool.block[ids[i]].coding - kv->tables.n_keys;
            if (own >= 0) used[own % TKVI_VERSIONS] = 1;
        }
    }
    for (v = 0; v < TKVI_VERSIONS && used[v]; v++) continue;
    return v < TKVI_VERSIONS ? v : -1;
}

/* The heads of this version are known: blocks are coded with it from now on. */
static void tkvi_table_use(tkv_cache *kv, int layer, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_head *heads = p->allocates ? tkvi_heads_of(&kv->tables, layer, version) : NULL;
    const tkvi_tier_spec *rule = tkvi_rules_of(&kv->tables, layer);
    int i, done = -1;
    for (i = 0; i < kv->tables.n_levels * TKV_TIER_COUNT; i++) { /* codings of a layer come in rising order */
        const tkvi_tier_spec *r = &rule[i / TKV_TIER_COUNT];
        const int tier = i % TKV_TIER_COUNT;
        tkvi_coding *c = &kv->tables.coding[r->coding[tier] + version];
        if (!r->shared[tier] || r->coding[tier] <= done) continue;
        done = r->coding[tier];
        tkvi_coding_share(&kv->tables, c, heads);
        if (p->kvquant) tkvi_coding_kvquant(&kv->tables, c, layer, version);
    }
    kv->tables.current[layer] = (int8_t)version;
}

/* The layer listens no more, or from nothing (again); with the last one goes the memory, but in place. */
static void tkvi_learned(tkv_cache *kv, int layer, int again) {
    size_t n = (size_t)kv->tables.cfg.n_kv_heads;
    int any = kv->pool.keep_all, i;
    kv->seen[layer] = again ? 0 : -1;
    for (i = 0; i < kv->tables.cfg.n_layers; i++) any |= kv->seen[i] >= 0;
    if (!any) tkvi_put_stats(kv);
    if (!kv->asked || !kv->tables.plan[layer].allocates) return;
    memset(tkvi_q_sq_sum_of(kv, layer, 0), 0, n * (size_t)kv->tables.cfg.head_dim * sizeof(int64_t));
    memset(tkvi_far_attention_of(kv, layer, 0), 0, n * sizeof(int64_t));
}

/* Tokens that K and V can be read from (tkvi_each_block). What was seen may be gone: sequences end. */
static int64_t tkvi_held(const tkv_cache *kv, int layer) {
    int64_t n = 0;
    int seq;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        int i = list->n;
        while (--i >= list->sinks + list->archive && !tkvi_is_offloaded(&kv->pool.block[ids[i]]))
            n += tkvi_block_tokens(kv, list, ids, i);
    }
    return n;
}

/* Is it time for a table of this layer? Forced: for the first one, of whatever there is. Under a budget no block waits
 * for it, so that layers take turns: making all tables at one token is a stall. */
static int tkvi_learn_due(const tkv_cache *kv, int layer, int forced) {
    int first = kv->tables.current[layer] < 0, turn = kv->tables.cfg.budget_bytes ? layer % TKVI_BLOCK : 0;
    forced = forced && first;
    if (!kv->seen || kv->seen[layer] < (forced ? 0 : (first ? TKVI_LEARN : TKVI_LEARN_WELL) + turn)) return 0;
    return tkvi_held(kv, layer) >= (forced ? 1 : TKVI_BLOCK);
}

/* If it is time for a table, takes memory for it and counts it as made: what follows then asks for the memory of blocks
 * that wait no more. tkvi_learn_end makes it, or takes that back. A second table is only better than the first:
 * without memory it waits. 0: no memory for the first one, nothing has changed. Not in an open step: an abort would
 * not take a table back. */
static int tkvi_learn_begin(tkv_cache *kv, int layer, int forced, int8_t *had) {
    int version;
    *had = kv->tables.current[layer];
    if (!tkvi_learn_due(kv, layer, forced)) return 1;
    version = tkvi_free_version(kv, layer);
    if (version < 0) { /* to look for it takes a walk over all blocks: again when there is another */
        kv->seen[layer] = TKVI_LEARN_WELL - TKVI_BLOCK;
        return 1;
    }
    if (!tkvi_version_ready(kv, version)) {
        if (*had >= 0 && kv->heap.limit)
            kv->seen[layer] = TKVI_LEARN_WELL - TKVI_BLOCK; /* again in a while */
        return *had >= 0;
    }
    kv->tables.current[layer] = (int8_t)version;
    return 1;
}

static void tkvi_learn_end(tkv_cache *kv, int layer, int8_t had, int made) {
    int version = kv->tables.current[layer];
    kv->tables.current[layer] = had;
    if (version == had || !made) return;
    if (kv->tables.plan[layer].allocates) tkvi_learn_heads(kv, layer, version);
    if (kv->tables.plan[layer].kvquant) tkvi_kvquant_learn(kv, layer, version);
    tkvi_table_use(kv, layer, version);
    if (had >= 0) tkvi_learned(kv, layer, 0);
    tkvi_emit_event(kv, TKV_EVENT_TABLE, layer, had, version, 0,
                    had < 0 ? "a layer has its first table" : "a layer has a better table");
}

/* What those say who could not get the memory. */
static tkv_status tkvi_no_table(tkv_cache *kv) {
    if (kv->heap.at_limit) return tkvi_fail(kv, TKV_ERR_BUDGET, "the budget has no room for tables", 0, NULL);
    return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for tables", 0, NULL);
}

/* Must blocks of this layer wait before they go to that tier? */
static int tkvi_waits(const tkv_cache *kv, int layer, tkv_tier tier) {
    return kv->tables.plan[layer].now.shared[tier] && kv->tables.current[layer] < 0;
}

#endif /* TKVI_LEARN_STATISTICS_H */
