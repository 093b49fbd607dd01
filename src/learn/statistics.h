/*
 * learn/statistics.h - learns the tables of formats whose heads share a layer's bytes. It collects statistics,
 * makes a table from them and manages the table's versions. core/allocate.h turns a table into bits.
 *
 *   weight of a channel of K = sum of q^2 of its queries * its variance within blocks
 *   reach of a head          = sum of p^2 |v|^2 over keys more than TKVI_FAR tokens back
 *
 * Where V is inside K, the error e of a channel adds p (v - o) q e to the output by its key, and p e by its value. So
 * the squares of its queries grow by 1 / E|v - o|^2 for each query, if it is a channel of V (tkvi_add_use_of_v).
 *
 * learn/sample_queries.h collects q^2 and p^2 |v|^2 for one query in 8, later in 16. It adds integers, so results do
 * not depend on the order of threads. Keys and values are read from the newest hot and warm blocks
 * (tkvi_visit_newest_blocks).
 *
 * When a layer has seen TKVI_FIRST_TABLE_TOKENS tokens, all sequences together, its next append makes the table.
 * Without a budget, blocks that are due earlier wait in the next better tier. Each time that the number of tokens has
 * doubled, the layer gets a new version for later blocks. Layers take turns, so some get a version up to 63 tokens
 * later. A block keeps the version that it was coded with, until the layer needs the version for a new table
 * (tkvi_retire_version). After each table the sums count a quarter, so that text of the past fades. In place, and where
 * a budget has no room for more versions, the second table comes at TKVI_LAST_TABLE_TOKENS tokens and is the last. That
 * and a loaded or frozen table stay until tkv_refresh_calibration. bench/QUALITY.md compares these tables with loaded
 * ones.
 */
#ifndef TKVI_LEARN_STATISTICS_H
#define TKVI_LEARN_STATISTICS_H

#include "learn/tokens.h"

#define TKVI_LEARN_FEW 128 /* tables of fewer tokens (flush, freeze) move towards the uniform one */
#define TKVI_FADE 2        /* after a table, statistics count 1 / 2^2 */

/* >>statistics of one head, from its blocks */
typedef struct tkvi_channel_sums {
    int64_t sum, within; /* of values; of squared distances from the block's mean. Unit: 2^down, its square */
} tkvi_channel_sums;

typedef struct tkvi_gather {
    tkv_cache *kv;
    const tkvi_geometry *geometry;
    tkvi_channel_sums channel[TKV_MAX_HEAD_DIM];
    float low[TKV_MAX_HEAD_DIM], high[TKV_MAX_HEAD_DIM]; /* smallest and largest key element of a channel */
    float v_most;                                        /* the largest |v|^2 of a token */
    int down; /* values are divided by 2^down before they are summed as integers */
    int64_t tokens;
} tkvi_gather;

/* Decodes the keys of a head in a block into rows of `stride` floats, a multiple of 16. *n: slots, then rows. */
static float *tkvi_gather_keys(const tkvi_gather *g, const tkvi_record *r, const uint8_t *bytes, int *n,
                               uint64_t dead_mask, int *stride) {
    float *k = g->kv->work.recode;
    *stride = g->geometry->k_pad;
    if (g->geometry->head_dim < *stride) memset(k, 0, (size_t)(*n * *stride) * sizeof *k);
    tkvi_finite_values(&r->k, g->kv->kernels->simd_ops, bytes, 0, *n, k, (size_t)*stride);
    *n = tkvi_drop_dead_rows(k, *stride, *n, dead_mask);
    return k;
}

/* Lowers low[16] and raises high[16] to the extremes of n rows. Compilers make vectors of loops over 16 lanes. */
static void tkvi_gather_extremes(const float *rows, int n, int stride, float *low, float *high) {
    float least[16], most[16];
    int t, i;
    memcpy(least, low, sizeof least);
    memcpy(most, high, sizeof most);
    for (t = 0; t < n; t++, rows += stride) {
        for (i = 0; i < 16; i++) least[i] = rows[i] < least[i] ? rows[i] : least[i];
        for (i = 0; i < 16; i++) most[i] = rows[i] > most[i] ? rows[i] : most[i];
    }
    memcpy(low, least, sizeof least);
    memcpy(high, most, sizeof most);
}

/* First pass: tokens, low, high and v_most. */
static void tkvi_gather_size(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n,
                             uint64_t dead_mask) {
    tkvi_gather *g = (tkvi_gather *)ctx;
    const int dv = g->geometry->v_head_dim, n_slots = n;
    int t, c, stride;
    float *k = tkvi_gather_keys(g, r, bytes, &n, dead_mask, &stride), *v = k + stride * TKVI_BLOCK;
    (void)start;
    if (!tkvi_is_view(&r->v)) {
        tkvi_finite_values(&r->v, g->kv->kernels->simd_ops, bytes + r->v_at, 0, n_slots, v, (size_t)dv);
        (void)tkvi_drop_dead_rows(v, dv, n_slots, dead_mask);
    }
    if (!g->tokens) {
        memcpy(g->low, k, (size_t)stride * sizeof *k);
        memcpy(g->high, k, (size_t)stride * sizeof *k);
    }
    for (c = 0; c < stride; c += 16) tkvi_gather_extremes(k + c, n, stride, g->low + c, g->high + c);
    for (t = 0; t < n; t++) {
        const float squares = tkvi_sum_of_squares(tkvi_is_view(&r->v) ? k + t * stride : v + t * dv, dv);
        g->v_most = squares > g->v_most ? squares : g->v_most;
    }
    g->tokens += n;
}

/* Returns 2^e, with e clamped to the normal floats. */
static float tkvi_power_of_two(int e) {
    return tkvi_from_bits((uint32_t)(127 + tkvi_max(-126, tkvi_min(127, e))) << 23);
}

/* Second pass. Scaled values are whole numbers below 2^21 in size. So sums over 64 tokens fit 32 bits, sums of squares
 * are below 2^48 and exact in doubles, and the square of a sum is below 2^54. */
static void tkvi_gather_sums(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n,
                             uint64_t dead_mask) {
    tkvi_gather *g = (tkvi_gather *)ctx;
    const float by = tkvi_power_of_two(-g->down);
    int t, c, i, stride;
    const float *k = tkvi_gather_keys(g, r, bytes, &n, dead_mask, &stride);
    (void)start;
    for (c = 0; c < stride; c += 16) {
        int32_t sum[16] = {0};
        double squares[16] = {0.0};
        for (t = 0; t < n; t++)
            for (i = 0; i < 16; i++) {
                const int32_t x = (int32_t)(k[t * stride + c + i] * by);
                sum[i] += x;
                squares[i] += (double)x * (double)x;
            }
        for (i = 0; i < 16; i++) {
            g->channel[c + i].sum += sum[i];
            g->channel[c + i].within += (int64_t)squares[i] - (int64_t)sum[i] * sum[i] / n;
        }
    }
}

/* Returns the largest distance of a key element from the mean of its channel. The mean is known from the sums of the
 * second pass. */
static float tkvi_gather_range(const tkvi_gather *g, int dim) {
    float range = 0.0f;
    int c;
    for (c = 0; c < dim && g->tokens; c++) {
        const float mean =
            (float)((double)g->channel[c].sum / (double)g->tokens) * tkvi_power_of_two(g->down);
        const float low = mean - g->low[c], high = g->high[c] - mean, most = low > high ? low : high;
        range = most > range ? most : range;
    }
    return range;
}

/* Adds what V takes of the first dim channels to `asked`, sums of squared queries in units of 2^-24. E|v - o|^2 is the
 * variance of V within blocks. */
static void tkvi_add_use_of_v(const tkvi_gather *g, int dim, int64_t n_sampled, float *asked) {
    float spread = 0.0f, use;
    int c;
    for (c = 0; c < dim; c++) spread = tkvi_f32(spread + (float)g->channel[c].within);
    spread = tkvi_f32(spread * tkvi_power_of_two(2 * g->down)) / (float)g->tokens;
    if (!(spread > 0.0f) || !tkvi_is_finite(spread)) return;
    use = tkvi_f32(16777216.0f * (float)n_sampled) / spread;
    for (c = 0; c < dim && tkvi_is_finite(use); c++) asked[c] = tkvi_f32(asked[c] + use);
}

/* >>tables */
/* Fills in one head of a version. Heads are not comparable until tkvi_learn_heads has set their reach. */
static void tkvi_learn_head(tkv_cache *kv, int layer, int head, int version) {
    const tkvi_geometry *geometry = tkvi_geometry_of(kv, layer);
    const int dim = geometry->head_dim, pad = geometry->k_pad;
    int c, p, most = TKVI_LOG8_NONE * 2, rank[TKV_MAX_HEAD_DIM];
    const tkvi_head_arrays to = tkvi_head_arrays_of(&kv->tables, layer, version, head);
    tkvi_head *h = &tkvi_heads_of(&kv->tables, layer, version)[head];
    float asked[TKV_MAX_HEAD_DIM];
    int any = 0;
    float k_most = 0.0f, least, range; /* k_most: largest |k| of an element */
    tkvi_gather g;
    memset(&g, 0, sizeof g);
    g.kv = kv;
    g.geometry = geometry;
    (void)tkvi_visit_newest_blocks(kv, layer, head, tkvi_gather_size, &g);
    for (c = 0; c < dim; c++) {
        const float largest = -g.low[c] > g.high[c] ? -g.low[c] : g.high[c];
        k_most = largest > k_most ? largest : k_most;
    }
    g.down = (k_most > 0.0f ? (int)(tkvi_bits(k_most) >> 23) - 127 : 0) - 20;
    (void)tkvi_visit_newest_blocks(kv, layer, head, tkvi_gather_sums, &g);
    for (c = 0; c < dim; c++) {
        asked[c] = (float)tkvi_q_sq_sum_of(kv, layer, head)[c];
        any |= asked[c] > 0.0f;
    }
    if (any && geometry->v_in_k)
        tkvi_add_use_of_v(&g, geometry->v_head_dim, *tkvi_n_sampled_of(kv, layer, head), asked);
    for (c = 0; c < dim; c++) {
        rank[c] = tkvi_log8((float)g.channel[c].within) + (any ? tkvi_log8(asked[c]) : 0);
        most = tkvi_max(most, rank[c]);
    }
    for (c = 0; c < dim && g.tokens < TKVI_LEARN_FEW; c++) /* few tokens: nearer to equal */
        rank[c] = most + (rank[c] - most) * (int)g.tokens / TKVI_LEARN_FEW;
    for (p = 0; p < pad; p++) { /* falling order, the lower index of equals first; then padding */
        int best = -1;
        for (c = 0; c < dim && p < dim; c++)
            if (rank[c] > -1000000 && (best < 0 || rank[c] > rank[best])) best = c;
        if (best < 0) best = p;
        tkvi_set_order(to.order, pad, p, best);
        to.importance[p] = p < dim ? (uint8_t)tkvi_max(1, 255 + rank[best] - most) : (uint8_t)0;
        to.mean[p] = 0.0f;
        if (p < dim && g.tokens) {
            float m = (float)((double)g.channel[best].sum / (double)g.tokens) * tkvi_power_of_two(g.down);
            to.mean[p] = tkvi_f16_to_f32(tkvi_f32_to_f16(m));
        }
        if (p < dim) rank[best] = -2000000;
    }
    h->reach = tkvi_log8(tkvi_wide_sum_value(tkvi_far_attention_of(kv, layer, head)));
    h->k_weight = most + 16 * g.down; /* undoes the head's unit, so that heads compare */
    /* Later keys can differ more than a few tokens do, or a run of almost equal ones. The window of scales has 16
     * octaves, so unused ones cost little. */
    least = g.tokens < TKVI_LEARN_FEW ? k_most : k_most / 16.0f;
    range = tkvi_gather_range(&g, dim);
    range = range > least ? range : least;
    h->k_top = tkvi_log_top(2.0f * range);
    h->v_top = tkvi_log_top(2.0f * sqrtf(g.v_most / (float)geometry->v_head_dim));
}

/* Makes the reach of a layer's heads relative to the largest. */
static void tkvi_compare_heads(tkv_cache *kv, int layer, int version) {
    tkvi_head *heads = tkvi_heads_of(&kv->tables, layer, version);
    int head, n = tkvi_geometry_of(kv, layer)->n_kv_heads, high = -(1 << 20);
    for (head = 0; head < n; head++) high = tkvi_max(high, heads[head].reach);
    /* No head attended to far tokens: equal shares. A head that did not, while others did, gets the minimum, -6
     * octaves. Differences are halved, because the first tokens are too few to trust them in full (bench/LOG.md). */
    for (head = 0; head < n; head++) {
        heads[head].reach = high <= TKVI_LOG8_NONE / 2 ? 0 : tkvi_max((heads[head].reach - high) / 2, -8 * 6);
        heads[head].k_weight = tkvi_max(heads[head].k_weight, TKVI_LOG8_NONE) + heads[head].reach;
    }
}

/* Returns the version of its layer's table that a layout is of; -1: it needs no table. */
static int tkvi_version_of(const tkv_cache *kv, int layout) {
    return layout < kv->tables.n_keys ? -1 : (layout - kv->tables.n_keys) % TKVI_VERSIONS;
}

/* Finds the versions of the layer's table that are current or used by a block. In place, those without memory count
 * too. Returns a mask. */
static unsigned tkvi_used_versions(const tkv_cache *kv, int layer) {
    unsigned used = 0;
    int seq, i, v;
    if (kv->tables.current_version[layer] >= 0) used = 1u << kv->tables.current_version[layer];
    for (v = 0; v < TKVI_VERSIONS && kv->pool.keep_all; v++)
        used |= (unsigned)!kv->tables.version[v].bytes << v;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            const int version = tkvi_version_of(kv, tkvi_block_of(kv, ids[i])->layout);
            if (version >= 0) used |= 1u << version;
        }
    }
    return used;
}

/* Returns a version of the layer's table that is not in a mask, or -1. */
static int tkvi_version_outside(unsigned mask) {
    int v = 0;
    while (v < TKVI_VERSIONS && mask >> v & 1) v++;
    return v < TKVI_VERSIONS ? v : -1;
}

/* Returns a version that is neither current nor used by a block, or -1. The first table is version 0. */
static int tkvi_free_version(const tkv_cache *kv, int layer) {
    return kv->tables.current_version[layer] < 0 ? 0 : tkvi_version_outside(tkvi_used_versions(kv, layer));
}

/* Derives the block layouts of a filled version. */
static void tkvi_lay_out_table(tkv_cache *kv, int layer, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_head *heads = p->allocates ? tkvi_heads_of(&kv->tables, layer, version) : NULL;
    const tkvi_tier_spec *rule = tkvi_tier_specs_of(&kv->tables, layer);
    int i, done = -1;
    for (i = 0; i < kv->tables.n_levels * TKV_TIER_COUNT; i++) { /* layouts of a layer have rising numbers */
        const tkvi_tier_spec *r = &rule[i / TKV_TIER_COUNT];
        const int tier = i % TKV_TIER_COUNT;
        tkvi_layout *c = &kv->tables.layout[r->layout[tier] + version];
        if (!r->needs_table[tier] || r->layout[tier] <= done) continue;
        done = r->layout[tier];
        tkvi_share_layout(&kv->tables, c, &p->geometry, heads, p->rope);
        tkvi_connect_states(&kv->tables, c, layer, version);
    }
}

/* Makes a filled version current: later blocks are coded with it. */
static void tkvi_table_use(tkv_cache *kv, int layer, int version) {
    tkvi_lay_out_table(kv, layer, version);
    kv->tables.current_version[layer] = (int8_t)version;
}

/* Stops collecting for the layer; again 1: restarts it from zero. When the last layer stops, the memory of the
 * statistics is freed, except in place. */
static void tkvi_learned(tkv_cache *kv, int layer, int again) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    size_t n = (size_t)g->n_kv_heads;
    int any = kv->pool.keep_all, i;
    kv->stats.tokens_seen[layer] = again ? 0 : -1;
    memset(&kv->stats.next_table[layer], 0, sizeof kv->stats.next_table[layer]);
    for (i = 0; i < kv->tables.cfg.model.n_layers; i++) any |= kv->stats.tokens_seen[i] >= 0;
    if (!any) tkvi_free_stats(kv);
    if (!kv->stats.q_sq_sum || !kv->tables.plan[layer].allocates) return;
    memset(tkvi_q_sq_sum_of(kv, layer, 0), 0, n * (size_t)g->head_dim * sizeof(int64_t));
    memset(tkvi_far_attention_of(kv, layer, 0), 0, n * sizeof(tkvi_wide_sum));
    memset(tkvi_n_sampled_of(kv, layer, 0), 0, n * sizeof(int64_t));
}

/* Lets the layer's statistics count 1 / 2^shift of what they did. */
static void tkvi_fade_statistics(tkv_cache *kv, int layer, int shift) {
    const tkvi_geometry *g = tkvi_geometry_of(kv, layer);
    int head, c;
    for (head = 0; head < g->n_kv_heads; head++) {
        int64_t *asked = tkvi_q_sq_sum_of(kv, layer, head);
        tkvi_wide_sum *far_attention = tkvi_far_attention_of(kv, layer, head);
        for (c = 0; c < g->head_dim; c++) asked[c] >>= shift;
        far_attention->part = far_attention->part / (1 << shift) +
                              (far_attention->whole % (1 << shift)) * (TKVI_WIDE_UNIT / (1 << shift));
        far_attention->whole >>= shift;
        *tkvi_n_sampled_of(kv, layer, head) >>= shift;
    }
}

/* 1 if a layer's second table is its last: more versions would take too many bytes. */
static int tkvi_keeps_two_tables(const tkv_cache *kv) {
    const size_t budget = kv->tables.cfg.budget.bytes;
    return kv->pool.keep_all || (budget && kv->tables.version_bytes > budget / TKVI_LEAST_BUDGET_SHARE);
}

/* Decides when the layer's next table is due, after it has got one. had: 1 if that was not the first one. */
static void tkvi_plan_next_table(tkv_cache *kv, int layer, int had) {
    tkvi_next_table *next = &kv->stats.next_table[layer];
    int *seen = &kv->stats.tokens_seen[layer];
    if (*seen < 0) return;
    if (tkvi_keeps_two_tables(kv)) {
        next->due = TKVI_LAST_TABLE_TOKENS;
        next->n_heads = 0;
        if (had) tkvi_learned(kv, layer, 0);
        return;
    }
    if (kv->tables.plan[layer].allocates) tkvi_fade_statistics(kv, layer, TKVI_FADE);
    if (next->restarts) *seen = next->due = 0;
    next->due = tkvi_max(next->due, TKVI_FIRST_TABLE_TOKENS);
    while (next->due <= *seen && next->due < TKVI_FOREVER / 2) next->due *= 2;
    next->last = *seen;
    next->restarts = next->n_heads = 0;
}

/* Returns the number of tokens whose K and V tkvi_visit_newest_blocks can read, without its limit of blocks. It
 * may be smaller than kv->seen, because sequences end. */
static int64_t tkvi_n_readable_tokens(const tkv_cache *kv, int layer) {
    int64_t n = 0;
    int seq;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        int i;
        for (i = list->sinks; i < list->n; i++)
            if (tkvi_is_learned_from(kv, ids[i])) n += tkvi_slots_in_use(kv, list, ids, i);
    }
    return n;
}

/* The number of heads of the layer's next table that should be there now; with all of them the table is due. n: tokens
 * that are about to be appended; TKVI_ANY_TOKENS: makes the first table from the tokens that are there. Making all
 * tables at the same token would stall it. So layers take turns, and the heads of a layer follow one another during the
 * last tokens before its turn. An append of more tokens than a turn makes all. */
#define TKVI_ANY_TOKENS 0
static int tkvi_n_heads_due(const tkv_cache *kv, int layer, int n) {
    const int is_first = kv->tables.current_version[layer] < 0, is_now = n == TKVI_ANY_TOKENS && is_first;
    const int n_heads = tkvi_geometry_of(kv, layer)->n_kv_heads;
    const int64_t seen = kv->stats.tokens_seen ? kv->stats.tokens_seen[layer] : -1,
                  after = kv->stats.tokens_seen
                              ? tkvi_max(kv->stats.next_table[layer].due, TKVI_FIRST_TABLE_TOKENS)
                              : 0,
                  turn = after + (kv->tables.cfg.budget.bytes ? layer % TKVI_BLOCK
                                                              : tkvi_table_delay(&kv->tables.plan[layer])),
                  steps = tkvi_learn_steps(&kv->tables.plan[layer]);
    if (seen < 0 || is_now) return is_now && seen >= 0 ? n_heads : 0;
    if (seen >= after && seen + tkvi_max(n, 1) > turn) return n_heads;
    return seen + steps <= turn ? 0 : (int)(n_heads * (seen + steps - turn) / steps);
}

/* 1 if an append of n tokens may make the layer's next table. */
static int tkvi_is_table_due(const tkv_cache *kv, int layer, int n) {
    return tkvi_n_heads_due(kv, layer, n) == tkvi_geometry_of(kv, layer)->n_kv_heads;
}

/* Learns the heads of the layer's next table that are due, and uses the table when it has all. n: as in
 * tkvi_n_heads_due. Returns 0 if there is no memory for the first table; then nothing has changed. A later table
 * without memory is tried again later, because the last one still works. Must not run in an open step: an abort
 * would not restore the table. */
static int tkvi_make_due_table(tkv_cache *kv, int layer, int n) {
    const int8_t had = kv->tables.current_version[layer];
    const int n_due = tkvi_n_heads_due(kv, layer, n), n_heads = tkvi_geometry_of(kv, layer)->n_kv_heads;
    tkvi_next_table *next;
    int version;
    if (n_due == 0) return 1;
    next = &kv->stats.next_table[layer];
    if (n_due < n_heads && n_due <= next->n_heads) return 1;
    if (tkvi_n_readable_tokens(kv, layer) < (n == TKVI_ANY_TOKENS && had < 0 ? 1 : TKVI_BLOCK)) return 1;
    version = tkvi_free_version(kv, layer);
    if (version < 0) { /* the search walks over all blocks: tries again 64 tokens later */
        next->due = kv->stats.tokens_seen[layer] + TKVI_BLOCK;
        return 1;
    }
    if (!tkvi_allocate_version(kv, version)) {
        if (had >= 0 && kv->heap.limit) next->due = kv->stats.tokens_seen[layer] + TKVI_BLOCK;
        return had >= 0;
    }
    if (version != next->version) next->n_heads = 0;
    next->version = version;
    for (; kv->tables.plan[layer].allocates && next->n_heads < n_due; next->n_heads++)
        tkvi_learn_head(kv, layer, next->n_heads, version);
    if (n_due < n_heads) return 1;
    if (kv->tables.plan[layer].allocates) tkvi_compare_heads(kv, layer, version);
    tkvi_learn_tokens(kv, layer, version, NULL);
    tkvi_table_use(kv, layer, version);
    tkvi_plan_next_table(kv, layer, had >= 0);
    tkvi_emit_event(kv, TKV_EVENT_TABLE, layer, had, version, 0,
                    had < 0 ? "a layer has its first table" : "a layer has a better table");
    return 1;
}

/* Sets the error of a table without memory and returns it. */
static tkv_status tkvi_no_table(tkv_cache *kv) {
    if (kv->heap.at_limit) return tkvi_fail(kv, TKV_ERR_BUDGET, "the budget has no room for tables", 0, NULL);
    return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for tables", 0, NULL);
}

/* Returns whether blocks of the layer must wait for a table before they move to the tier. */
static int tkvi_must_wait_for_table(const tkv_cache *kv, int layer, tkv_tier tier) {
    const tkvi_tier_spec *spec = &kv->tables.plan[layer].now;
    return spec->needs_table[tkvi_tier_of_level(spec, tier)] && kv->tables.current_version[layer] < 0;
}

#endif /* TKVI_LEARN_STATISTICS_H */
