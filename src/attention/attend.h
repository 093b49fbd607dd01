/*
 * attention/attend.h - attention over all tiers: one online softmax over the coded blocks, without decoded copies.
 *
 *     for each sequence of the batch, KV head, tile of up to 8 query rows             (a work tile)
 *         for each range of blocks (at most 16, chosen by the number of blocks only)  (a split)
 *             for each block: scores -> mask -> (m, l, o) of the split
 *         merge the splits in order into the work tile's (m, l, o) -> out
 *
 * The rows of a work tile are consecutive queries times the query heads of the KV head. So one read of a record
 * serves all rows. Threads take splits, or whole work tiles if these are enough tasks. The merge is the same in
 * both cases, and so are the bits of the result. For the same reason some functions are not inlined: else a
 * compiler could fuse multiply and add in one place only.
 *
 * If every sequence has 16 or more query rows (prefill), work tiles have up to 32 rows, 16 beyond 128 channels. The
 * instruction set must have prefill kernels (>>prefill). These work tiles are not split. Calls with few work tiles
 * and many blocks take splits instead, with tiles of 8 rows (tkv_attend_ex).
 *
 * Scores are relative to a reference key, which recent keys have in common: see kernels/scalar.h. `origin` =
 * scale q.ref is added where the absolute logit matters: softcap, sink logits, log-sum-exp.
 *
 * Online softmax: Milakov and Gimelshein (arXiv 1805.02867). Split over keys and merge by log-sum-exp:
 * Flash-Decoding, FlashAttention-2 (arXiv 2307.08691, section 3). Attention does not change K and V. It only adds
 * to statistics, attention scores and error sums.
 */
#ifndef TKVI_ATTENTION_ATTEND_H
#define TKVI_ATTENTION_ATTEND_H

#include "kernels/prefill_avx512.h"
#include "learn/squat_queries.h"
#include "reclaim/scores.h"
#include "reclaim/discard.h"

/* >>the call: parameters checked, defaults filled in */
typedef struct tkvi_call {
    tkv_cache *kv;
    const tkv_attend_params *p;
    const tkvi_plan *plan; /* plan of the requested layer; the blocks belong to layer plan->stored */
    const tkv_rows *rows;
    tkv_rows one;
    int n_rows, window;
    int heads_per_kv;
    const tkvi_prefill *many; /* prefill kernels; NULL: work tiles of at most TKVI_ROWS rows */
    int tile;                 /* rows of a work tile */
    int tell;                 /* rows that are scored together (tkvi_gather_scores) */
    float scale;
    ptrdiff_t q_row, q_head, out_row, out_head, mask_stride, bits_stride, mass_stride;
    int collect_stats;             /* 1: the layer collects statistics (learn/statistics.h) */
    int metric;                    /* 1: the layer collects statistics of queries (learn/squat_queries.h) */
    int meter;                     /* 1: a head probe watches the layer (cache/meter.h) */
    tkvi_fetch_buffer *room;       /* the task's buffer for offloaded records; NULL: no block is offloaded */
    int *failed;                   /* bits of tkvi_failure, shared by all tasks */
    const tkvi_token_scores *mass; /* how attention scores are collected; NULL: they are not */
} tkvi_call;

/* Errors with offloaded blocks. Tasks then skip their remaining work, and the call fails. */
typedef enum tkvi_failure { TKVI_FAILED_IO = 1, TKVI_FAILED_DATA = 2 } tkvi_failure;

static int tkvi_failed(const tkvi_call *c) {
#if defined(__GNUC__) || defined(__clang__)
    return TKVI_HAS_OFFLOAD && c->room && __atomic_load_n(c->failed, __ATOMIC_RELAXED);
#else
    return TKVI_HAS_OFFLOAD && c->room && *c->failed;
#endif
}

static void tkvi_fail_call(const tkvi_call *c, tkv_status st) {
    const int bit = st == TKV_ERR_IO ? TKVI_FAILED_IO : TKVI_FAILED_DATA;
#if defined(__GNUC__) || defined(__clang__)
    (void)__atomic_fetch_or(c->failed, bit, __ATOMIC_RELAXED);
#else
    *c->failed |= bit;
#endif
}

static tkv_status tkvi_call_init(tkvi_call *c, tkv_cache *kv, const tkv_attend_params *p) {
    const tkv_config *cfg;
    int i, longest = 0;
    int64_t rows = 0;
    if (!kv || !p) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    memset(c, 0, sizeof *c);
    c->kv = kv;
    c->p = p;
    c->one.seq = p->seq;
    c->one.n = p->n;
    c->rows = p->batch ? p->batch : &c->one;
    c->n_rows = p->batch ? p->n_batch : 1;
    if (p->layer < 0 || p->layer >= cfg->model.n_layers || c->n_rows < 0 || c->n_rows > cfg->limits.max_seqs)
        return TKV_ERR_ARG;
    c->plan = &kv->tables.plan[p->layer];
    if (c->plan->stored < 0 || p->window < TKV_OFF) return TKV_ERR_ARG;
    c->collect_stats = kv->tables.plan[c->plan->stored].allocates && kv->seen[c->plan->stored] >= 0;
    c->metric = TKVI_HAS_SQUAT && kv->tables.plan[c->plan->stored].squat &&
                kv->query_stats[c->plan->stored].tokens >= 0;
    for (i = 0; TKVI_HAS_METER && kv->meter && i < kv->meter->n; i++)
        c->meter |= kv->meter->head_probe[i].layer == c->plan->stored;
#if defined(__GNUC__) || defined(__clang__) /* attention scores need atomics */
    if (TKVI_HAS_EVICT && kv->pool.token_meta && kv->mass.mode) c->mass = &kv->mass;
#endif
    c->heads_per_kv = cfg->model.n_heads / cfg->model.n_kv_heads;
    c->tell = TKVI_ROWS;
    if (TKVI_HAS_EVICT && c->mass && c->mass->heads &&
        c->heads_per_kv < TKVI_ROWS) /* keeps all heads of a query in one tile */
        c->tell -= TKVI_ROWS % c->heads_per_kv;
    c->tile = c->tell;
    c->window = p->window == TKV_OFF ? 0 : p->window ? p->window : c->plan->window;
    for (i = 0; i < c->n_rows; i++) {
        const tkvi_list *list;
        int64_t oldest;
        int len;
        if (c->rows[i].seq < 0 || c->rows[i].seq >= cfg->limits.max_seqs || c->rows[i].n < 0)
            return TKV_ERR_ARG;
        list = tkvi_list_of(kv, c->rows[i].seq, c->plan->stored);
        len = list->len;
        if (!p->non_causal && c->rows[i].n > len) return TKV_ERR_RANGE;
        /* The first query's keys can have expired: the window is wider than the layer's, or the query too old. */
        oldest = c->window ? (int64_t)len - c->rows[i].n + 1 - c->window : 0;
        if (list->dropped && c->rows[i].n && oldest < list->dropped) return TKV_ERR_RANGE;
        if (TKVI_HAS_DISCARD && kv->pool.n_discarded && c->rows[i].n &&
            tkvi_sees_discarded(kv, c->rows[i].seq, c->plan->stored, oldest))
            return TKV_ERR_NO_SOURCE;
        rows += (int64_t)c->rows[i].n * cfg->model.n_heads;
        longest = tkvi_max(longest, len);
    }
    if (!p->q || !p->out || (p->scores && !p->lse)) return TKV_ERR_ARG;
    if ((unsigned)p->q_type > TKV_TYPE_BF16 || (unsigned)p->out_type > TKV_TYPE_BF16) return TKV_ERR_ARG;
    if (rows > TKVI_FOREVER || p->n_mask_bits < 0 || (p->mask_bits && !p->n_mask_bits)) return TKV_ERR_ARG;
    if (p->mask_bits && p->n_mask_bits > cfg->limits.max_tokens) return TKV_ERR_ARG;
    if (!tkvi_is_finite(p->scale) || !tkvi_is_finite(p->softcap) || p->softcap < 0.0f) return TKV_ERR_ARG;
    for (i = 0; p->alibi_slopes && i < cfg->model.n_heads; i++)
        if (!tkvi_is_finite(p->alibi_slopes[i])) return TKV_ERR_ARG;
    c->scale = p->scale != 0.0f ? p->scale : cfg->model.scale;
    c->q_head = p->q_head_stride ? p->q_head_stride : cfg->model.head_dim;
    c->q_row = p->q_row_stride ? p->q_row_stride : (ptrdiff_t)cfg->model.n_heads * cfg->model.head_dim;
    c->out_head = p->out_head_stride ? p->out_head_stride : cfg->model.v_head_dim;
    c->out_row =
        p->out_row_stride ? p->out_row_stride : (ptrdiff_t)cfg->model.n_heads * cfg->model.v_head_dim;
    c->mask_stride = p->mask_stride ? p->mask_stride : longest;
    c->bits_stride =
        p->mask_bits_stride ? p->mask_bits_stride : p->n_mask_bits / 64 + (p->n_mask_bits % 64 > 0);
    c->mass_stride = p->score_stride ? p->score_stride : longest;
    return p->scores && c->mass_stride < longest ? TKV_ERR_ARG : TKV_OK;
}

/* >>work tile: query rows of one KV head of one sequence */
typedef struct tkvi_work_tile {
    const tkvi_call *call;
    const tkvi_list *list;
    const uint32_t *ids;
    int seq_row;           /* row of the sequence's first query in q and out */
    int item;              /* entry of the batch */
    int n_queries, head;   /* queries of the sequence; KV head */
    int first, rows;       /* range of the n_queries * heads_per_kv rows (tkvi_query_of) */
    int k_pad, v_pad;      /* head dimensions, rounded up to 16 */
    int chunk, n_chunks;   /* blocks per split; number of splits */
    int low, high;         /* positions that some row sees: low .. high-1 */
    int all_low, all_high; /* positions that all rows see: all_low .. all_high-1 */
    int changes;           /* 1: softcap, ALiBi or masks change the scores */
} tkvi_work_tile;

/* Row r of a work tile: its query, and its query head. */
static int tkvi_query_of(const tkvi_work_tile *u, int r) { return (u->first + r) / u->call->heads_per_kv; }

static int tkvi_head_of(const tkvi_work_tile *u, int r) {
    return u->head * u->call->heads_per_kv + (u->first + r) % u->call->heads_per_kv;
}

/* Position of a query. */
static int tkvi_position(const tkvi_work_tile *u, int query) { return u->list->len - u->n_queries + query; }

/* Positions of the keys that a query sees by causality and window: low .. high-1. */
static void tkvi_visible(const tkvi_work_tile *u, int query, int *low, int *high) {
    int at = tkvi_position(u, query), window = u->call->window;
    *high = u->call->p->non_causal ? u->list->len : at + 1;
    *low = window && at + 1 > window ? at + 1 - window : 0;
}

static int tkvi_tiles_of(const tkvi_call *c, int n_queries) {
    return (n_queries * c->heads_per_kv + c->tile - 1) / c->tile;
}

static void tkvi_work_tile_init(tkvi_work_tile *u, const tkvi_call *c, int item, int seq_row, int head,
                                int tile) {
    const tkv_config *cfg = &c->kv->tables.cfg;
    int seq = c->rows[item].seq, r;
    u->call = c;
    u->list = tkvi_list_of(c->kv, seq, c->plan->stored);
    u->ids = tkvi_ids(c->kv, seq, c->plan->stored);
    u->item = item;
    u->seq_row = seq_row;
    u->n_queries = c->rows[item].n;
    u->head = head;
    u->first = tile * c->tile;
    u->rows = tkvi_min(c->tile, u->n_queries * c->heads_per_kv - u->first);
    u->k_pad = tkvi_round_up(cfg->model.head_dim, 16);
    u->v_pad = tkvi_round_up(cfg->model.v_head_dim, 16);
    u->chunk =
        tkvi_max(TKVI_MIN_SPLIT_BLOCKS, (u->list->n + TKVI_MAX_TILE_SPLITS - 1) / TKVI_MAX_TILE_SPLITS);
    u->n_chunks = (u->list->n + u->chunk - 1) / u->chunk;
    u->low = u->all_high = u->list->len;
    u->high = u->all_low = 0;
    u->changes = c->p->softcap > 0.0f || c->p->alibi_slopes || c->p->mask || c->p->mask_bits;
    for (r = 0; r < u->rows; r++) {
        int low, high;
        tkvi_visible(u, tkvi_query_of(u, r), &low, &high);
        u->low = tkvi_min(u->low, low);
        u->high = tkvi_max(u->high, high);
        u->all_low = tkvi_max(u->all_low, low);
        u->all_high = tkvi_min(u->all_high, high);
    }
}

/* Query rows of a work tile, scaled and padded with zeros; the reference key; each row's origin. */
typedef struct tkvi_queries {
    float q[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    float ref[TKV_MAX_HEAD_DIM];
    float origin[TKVI_ROWS];
    const uint8_t *order; /* order of channels in `sorted`; NULL: `sorted` is not filled in */
    float sorted[(TKVI_ROWS + 1) * TKV_MAX_HEAD_DIM]; /* [rows + 1][k_pad] queries, then the reference key */
} tkvi_queries;

/* Partial results of attention over one split, or over several merged splits. p = exp(score - m). */
typedef struct tkvi_sums {
    float *m, *l;         /* [TKVI_ROWS] largest score; sum of p */
    float *far_attention; /* [TKVI_ROWS] sum of p^2 over far keys */
    float *any;           /* [2] not 0: that half of o is in use; else its contents are undefined */
    float *o;             /* [2][TKVI_ROWS][v_pad] sum of p v: of plain formats, of rotated formats */
} tkvi_sums;

/* Halves of o that the cache's formats need: 1, or 2 with a rotated format. */
static int tkvi_spaces(const tkvi_work_tile *u) { return 1 + u->call->kv->tables.any_rotated; }

static tkvi_sums tkvi_sums_in(float *memory, int v_pad) {
    tkvi_sums s;
    s.o = memory;
    s.m = memory + 2 * TKVI_ROWS * v_pad;
    s.l = s.m + TKVI_ROWS;
    s.far_attention = s.l + TKVI_ROWS;
    s.any = s.far_attention + TKVI_ROWS;
    return s;
}

/* Layout of the work tile's KV head in block i. *bytes: its record in RAM, or NULL if the block is offloaded. */
static const tkvi_record *tkvi_record_of(const tkvi_work_tile *u, int i, const uint8_t **bytes) {
    const tkvi_pool *pool = &u->call->kv->pool;
    const tkvi_block *b = &pool->block[u->ids[i]];
    const tkvi_record *r = &u->call->kv->tables.coding[b->coding].record[u->head];
    *bytes = tkvi_is_offloaded(b) ? NULL : tkvi_block_bytes(pool, b) + r->at;
    return r;
}

/* Fetches a side of an offloaded record. Before K, it asks the store to prefetch the record of the next block.
 * Returns NULL on failure, and the call then fails. */
static TKVI_NOINLINE const uint8_t *tkvi_fetch_side(const tkvi_work_tile *u, int i, tkv_side side) {
    const tkv_cache *kv = u->call->kv;
    const uint8_t *bytes;
    tkv_status st;
    if (tkvi_failed(u->call)) return NULL;
    if (side == TKV_K && i + 1 < u->list->n && tkvi_is_offloaded(&kv->pool.block[u->ids[i + 1]]) &&
        !tkvi_is_discarded(&kv->pool.block[u->ids[i + 1]]) && tkvi_block_start(kv, u->ids, i + 1) < u->high)
        tkvi_prefetch_record(kv, u->ids[i + 1], u->head);
    st = tkvi_read_piece(kv, u->ids[i], TKVI_ITSELF, u->head, side, u->call->room, &bytes);
    if (!st) return bytes;
    tkvi_fail_call(u->call, st);
    return NULL;
}

/* A side of the record of block i, in RAM or fetched. The next fetch overwrites a fetched side. Returns NULL if the
 * fetch failed, and the call then fails. */
static const uint8_t *tkvi_bytes_of(const tkvi_work_tile *u, int i, tkv_side side) {
    const uint8_t *bytes;
    const tkvi_record *r = tkvi_record_of(u, i, &bytes);
    if (TKVI_HAS_OFFLOAD && !bytes) return tkvi_fetch_side(u, i, side);
    return side == TKV_K ? bytes : bytes + r->v_at;
}

/* The reference key: per channel the median of three recent keys if they lie close together, else 0. It finds a
 * bias of 600 on all keys. It does not mistake one huge key for a bias. */
static void tkvi_reference_key(const tkvi_work_tile *u, float *ref) {
    float key[3][TKV_MAX_HEAD_DIM];
    int last = u->list->n - 1, from, i, c;
    memset(ref, 0, TKV_MAX_HEAD_DIM * sizeof *ref);
    if (last < 0) return;
    from = last > 0 && tkvi_tier_at(u->list, last - 1) == TKV_TIER_HOT ? last - 1 : last;
    for (i = 0; i < 3; i++) { /* first and last key of block `from`, then the newest key */
        int block = i < 2 ? from : last, n = tkvi_block_tokens(u->call->kv, u->list, u->ids, block);
        const uint8_t *bytes;
        const tkvi_record *rec = tkvi_record_of(u, block, &bytes);
        if (tkvi_is_discarded(&u->call->kv->pool.block[u->ids[block]])) return;
        if (!bytes) bytes = tkvi_bytes_of(u, block, TKV_K);
        if (!bytes) return;
        tkvi_values(&rec->k, u->call->kv->kernels->simd_ops, bytes,
                    i == 0 ? 0 : n - 1 - (i == 1 && from == last && n > 2), 1, key[i], 0);
    }
    for (c = 0; c < u->call->kv->tables.cfg.model.head_dim; c++) {
        float a = key[0][c], b = key[1][c], x = key[2][c], lo = a < b ? a : b, hi = a < b ? b : a;
        float middle = x < lo ? lo : x > hi ? hi : x;
        lo = x < lo ? x : lo;
        hi = x > hi ? x : hi;
        if (hi - lo < 0.25f * (middle < 0.0f ? -middle : middle)) ref[c] = middle;
    }
}

/* Puts the channels of the queries and the reference key into the order of a K side. Most blocks have the same
 * order, so the last one is kept. */
static void tkvi_sort_queries(const tkvi_work_tile *u, tkvi_queries *q, const uint8_t *order) {
    int r, i;
    if (q->order == order) return;
    q->order = order;
    for (r = 0; r <= u->rows; r++) {
        const float *from = r < u->rows ? q->q + r * u->k_pad : q->ref;
        for (i = 0; i < u->k_pad; i++) q->sorted[r * u->k_pad + i] = from[order[i]];
    }
}

/* NaN: the origin of a row whose query is not finite. Such a row sees no key. Test for it with tkvi_is_finite. */
static float tkvi_no_origin(void) { return tkvi_from_bits(0x7fc00000u); }

/* Loads row r of a work tile: [k_pad], scaled, padded with zeros. Returns its origin, scale q.ref. */
static float tkvi_load_query(const tkvi_work_tile *u, int r, const float *ref, float *row) {
    const tkvi_call *c = u->call;
    const ptrdiff_t at = (u->seq_row + tkvi_query_of(u, r)) * c->q_row + tkvi_head_of(u, r) * c->q_head;
    int dim = c->kv->tables.cfg.model.head_dim, i, k;
    double sum[16] = {0.0}, origin = 0.0;
    uint32_t exponent[16] = {0}, most = 0;
    if (c->p->q_type == TKV_TYPE_F32) memcpy(row, (const char *)c->p->q + 4 * at, (size_t)dim * 4);
    else
        for (i = 0; i < dim; i++) row[i] = tkvi_element(c->p->q, c->p->q_type, at + i);
    for (i = dim; i < u->k_pad; i++) row[i] = 0.0f;
    for (i = 0; i < u->k_pad; i += 16) { /* vectors also at -O2 */
        float x[16];
        for (k = 0; k < 16; k++) x[k] = row[i + k] * c->scale;
        for (k = 0; k < 16; k++) row[i + k] = x[k];
        for (k = 0; k < 16; k++) exponent[k] |= (tkvi_bits(x[k]) & 0x7f800000u) + 0x00800000u;
        for (k = 0; k < 16; k++) sum[k] += (double)x[k] * (double)ref[i + k];
    }
    for (k = 0; k < 16; k++) most |= exponent[k];
    if (most >> 31) { /* some exponent is all ones: NaN or infinity */
        memset(row, 0, (size_t)u->k_pad * sizeof *row);
        return tkvi_no_origin();
    }
    for (k = 0; k < 16; k++) origin += sum[k];
    return (float)origin;
}

static void tkvi_load_queries(const tkvi_work_tile *u, tkvi_queries *q) {
    int r;
    q->order = NULL;
    tkvi_reference_key(u, q->ref);
    for (r = 0; r < u->rows; r++) q->origin[r] = tkvi_load_query(u, r, q->ref, q->q + r * u->k_pad);
}

/* >>scores of one block, after softcap, ALiBi, masks and visibility */
/* at[64]: positions of the tokens of block i. Slots without a live token get TKVI_FOREVER, which no query sees. */
static void tkvi_slot_positions(const tkvi_work_tile *u, int i, int *at) {
    const tkv_cache *kv = u->call->kv;
    const int n = tkvi_block_tokens(kv, u->list, u->ids, i);
    const uint64_t there = tkvi_live_mask(&kv->pool.block[u->ids[i]], n);
    int t;
    for (t = 0; t < TKVI_BLOCK; t++)
        at[t] = there >> t & 1 ? tkvi_slot_position(kv, u->ids[i], t) : TKVI_FOREVER;
}

/* Must scores of block i be hidden? Some rows may not see all its tokens, or some slots have no live token. */
static int tkvi_has_hidden(const tkvi_work_tile *u, int i, int start, int end) {
    const tkv_cache *kv = u->call->kv;
    return start < u->all_low || end > u->all_high || kv->pool.block[u->ids[i]].gone ||
           tkvi_block_tokens(kv, u->list, u->ids, i) < TKVI_BLOCK;
}

/* The value that an additive mask adds to a score, or TKVI_HIDDEN. NaN is tested by its bits, as comparisons with
 * NaN fail under -ffast-math. */
static float tkvi_mask_bias(float m) {
    if (tkvi_is_nan(m) || m <= TKVI_HIDDEN) return TKVI_HIDDEN;
    return m < -TKVI_HIDDEN ? m : -TKVI_HIDDEN;
}

/* The score s of row r for the key at position j, after softcap, ALiBi and masks. The row must see the key. */
static float tkvi_adjust_score(const tkvi_work_tile *u, int r, float origin, int j, float s) {
    const tkv_attend_params *p = u->call->p;
    const int query = tkvi_query_of(u, r), row = u->seq_row + query, bit = j - u->list->len + p->n_mask_bits;
    if (p->softcap > 0.0f) s = p->softcap * tanhf((s + origin) / p->softcap);
    if (p->alibi_slopes) s += p->alibi_slopes[tkvi_head_of(u, r)] * (float)(j - tkvi_position(u, query));
    if (p->mask) {
        const float bias = tkvi_mask_bias(p->mask[row * u->call->mask_stride + j]);
        if (TKVI_IS_HIDDEN(bias)) return TKVI_HIDDEN;
        s += bias;
    }
    if (p->mask_bits && bit >= 0 && !(p->mask_bits[row * u->call->bits_stride + bit / 64] >> bit % 64 & 1))
        return TKVI_HIDDEN;
    return s;
}

/* Applies softcap, ALiBi, masks and visibility to the 64 scores of row r. at: positions of the slots. */
static void tkvi_adjust_scores(const tkvi_work_tile *u, int r, float origin, const int *at, float *s) {
    int low, high, t;
    tkvi_visible(u, tkvi_query_of(u, r), &low, &high);
    if (!tkvi_is_finite(origin)) high = low;
    for (t = 0; t < TKVI_BLOCK && u->changes; t++)
        if (at[t] >= low && at[t] < high) s[t] = tkvi_adjust_score(u, r, origin, at[t], s[t]);
    for (t = 0; t < TKVI_BLOCK; t++) s[t] = at[t] >= low && at[t] < high ? s[t] : TKVI_HIDDEN;
}

/* The record of block i + 1, for the CPU's prefetch. NULL after the last block, and if it is offloaded. */
static const uint8_t *tkvi_next_record(const tkvi_work_tile *u, int i) {
    const uint8_t *bytes = NULL;
    if (i + 1 < u->list->n) (void)tkvi_record_of(u, i + 1, &bytes);
    return bytes;
}

/* End (exclusive) of the positions that rows may see in block i. It is 0 for a discarded block. tkvi_call_init made
 * sure that no row needs it: its tokens were evicted, are anchors, or left the window. */
static int tkvi_visible_end(const tkvi_work_tile *u, int i) {
    const tkv_cache *kv = u->call->kv;
    return tkvi_is_discarded(&kv->pool.block[u->ids[i]]) ? 0 : tkvi_block_reach(kv, u->list, u->ids, i);
}

/* scores: [rows][64] of block i. Returns 0 if no row sees any token of it, or a fetch failed. */
static int tkvi_block_scores(const tkvi_work_tile *u, tkvi_queries *q, int i, float *scores) {
    const tkv_cache *kv = u->call->kv;
    int start = tkvi_block_start(kv, u->ids, i), end = tkvi_visible_end(u, i), r;
    const uint8_t *bytes;
    const tkvi_record *rec;
    if (end <= u->low || start >= u->high) return 0;
    rec = tkvi_record_of(u, i, &bytes);
    if (!bytes) bytes = tkvi_bytes_of(u, i, TKV_K);
    if (!bytes) return 0;
    if (rec->k.order) tkvi_sort_queries(u, q, rec->k.order);
    kv->kernels->k[rec->k.format->stored](&rec->k, bytes, tkvi_next_record(u, i),
                                          rec->k.order ? q->sorted : q->q,
                                          rec->k.order ? q->sorted + u->rows * u->k_pad : q->ref, u->rows,
                                          tkvi_block_tokens(kv, u->list, u->ids, i),
                                          tkvi_n_limbs(&rec->k, kv->tables.cfg.host.precise), scores);
    if (u->changes || tkvi_has_hidden(u, i, start, end)) {
        int at[TKVI_BLOCK];
        tkvi_slot_positions(u, i, at);
        for (r = 0; r < u->rows; r++) tkvi_adjust_scores(u, r, q->origin[r], at, scores + r * TKVI_BLOCK);
    }
    return 1;
}

/* >>split: the online softmax over one range of blocks */
static void tkvi_shrink(float *x, int n, float by) { /* n is a multiple of 16: vectors also at -O2 */
    int i, k;
    for (i = 0; i < n; i += 16)
        for (k = 0; k < 16; k++) x[i + k] *= by;
}

/* Is row r's query sampled for statistics? One position in eight is. */
static int tkvi_is_sampled(const tkvi_work_tile *u, int r) {
    return u->call->collect_stats && tkvi_position(u, tkvi_query_of(u, r)) % 8 == 7;
}

/* Adds the sums of p^2 of block i to far_attention of the sampled rows. The sink block does not count, nor a block
 * that ends less than TKVI_FAR before the query. */
static TKVI_NOINLINE void tkvi_add_far(const tkvi_work_tile *u, int i, const float *p, float *far_attention) {
    int end = tkvi_block_end(u->call->kv, u->list, u->ids, i), r, t, k;
    if (i < u->list->sinks) return;
    for (r = 0; r < u->rows; r++) {
        float sum[16] = {0};
        if (!tkvi_is_sampled(u, r) || end + TKVI_FAR > tkvi_position(u, tkvi_query_of(u, r))) continue;
        for (t = 0; t < TKVI_BLOCK; t += 16)
            for (k = 0; k < 16; k++) sum[k] += p[r * TKVI_BLOCK + t + k] * p[r * TKVI_BLOCK + t + k];
        for (k = 0; k < 16; k++) far_attention[r] += sum[k];
    }
}

/* Clears a half of o before its first use. Most splits use one half only. */
static void tkvi_begin_space(const tkvi_work_tile *u, const tkvi_sums *sums, int space) {
    if (sums->any[space] > 0.0f) return;
    sums->any[space] = 1.0f;
    memset(sums->o + space * TKVI_ROWS * u->v_pad, 0, (size_t)(u->rows * u->v_pad) * sizeof(float));
}

/* Attention of all rows over the blocks of split `chunk`, into `sums`. With chunk = n_chunks the sums are empty. */
static TKVI_NOINLINE void tkvi_attend_split(const tkvi_work_tile *u, tkvi_queries *q, int chunk,
                                            const tkvi_sums *sums) {
    const tkv_cache *kv = u->call->kv;
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK], p[TKVI_ROWS * TKVI_BLOCK];
    int i, r, space, last = tkvi_min(u->list->n, (chunk + 1) * u->chunk), stride = TKVI_ROWS * u->v_pad;
    sums->any[0] = sums->any[1] = 0.0f;
    for (r = 0; r < u->rows; r++) {
        sums->m[r] = TKVI_HIDDEN;
        sums->l[r] = sums->far_attention[r] = 0.0f;
    }
    for (i = chunk * u->chunk; i < last; i++) {
        const uint8_t *bytes, *next = tkvi_next_record(u, i);
        const tkvi_record *rec;
        float before[TKVI_ROWS], sum[TKVI_ROWS];
        if (!tkvi_block_scores(u, q, i, scores)) continue;
        memcpy(before, sums->m, (size_t)u->rows * sizeof(float));
        if (!kv->kernels->softmax_step(scores, u->rows, sums->m, sum, p)) continue;
        for (r = 0; r < u->rows; r++) {
            if (sums->m[r] > before[r] && !TKVI_IS_HIDDEN(before[r])) { /* else o and l are still 0 */
                float shrink = expf(before[r] - sums->m[r]);
                for (space = 0; space < 2; space++)
                    if (sums->any[space] > 0.0f)
                        tkvi_shrink(sums->o + space * stride + r * u->v_pad, u->v_pad, shrink);
                sums->l[r] *= shrink;
                sums->far_attention[r] *= shrink * shrink;
            }
            sums->l[r] += sum[r];
        }
        if (u->call->collect_stats) tkvi_add_far(u, i, p, sums->far_attention);
        rec = tkvi_record_of(u, i, &bytes);
        bytes = tkvi_bytes_of(u, i, TKV_V);
        if (!bytes) return;
        space = rec->v.format->rotated;
        tkvi_begin_space(u, sums, space);
        kv->kernels->v[rec->v.format->stored](&rec->v, bytes, next ? next + rec->v_at : NULL, p, u->rows,
                                              tkvi_block_tokens(kv, u->list, u->ids, i),
                                              tkvi_n_limbs(&rec->v, kv->tables.cfg.host.precise),
                                              sums->o + space * stride);
    }
}

/* Adds row r of `from` to row r of `to`. The two must be sums over different keys. */
static void tkvi_merge_row(const tkvi_work_tile *u, int r, const tkvi_sums *to, const tkvi_sums *from) {
    float a, b;
    int i, k, space, first = !(to->l[r] > 0.0f);
    if (!(from->l[r] > 0.0f)) return;
    a = from->m[r] > to->m[r] && !first ? expf(to->m[r] - from->m[r]) : 1.0f;
    b = from->m[r] > to->m[r] || first ? 1.0f : expf(from->m[r] - to->m[r]);
    to->m[r] = b < 1.0f ? to->m[r] : from->m[r];
    to->l[r] = first ? from->l[r] : to->l[r] * a + from->l[r] * b;
    to->far_attention[r] =
        first ? from->far_attention[r] : to->far_attention[r] * a * a + from->far_attention[r] * b * b;
    for (space = 0; space < 2; space++) {
        float *o = to->o + (space * TKVI_ROWS + r) * u->v_pad;
        const float *o2 = from->o + (space * TKVI_ROWS + r) * u->v_pad;
        if (!(from->any[space] > 0.0f)) {
            if (to->any[space] > 0.0f && a < 1.0f) tkvi_shrink(o, u->v_pad, a);
        } else if (first) {
            memcpy(o, o2, (size_t)u->v_pad * sizeof *o);
        } else {
            for (i = 0; i < u->v_pad; i += 16)
                for (k = 0; k < 16; k++) o[i + k] = o[i + k] * a + o2[i + k] * b;
        }
    }
}

/* Adds all rows of `from` to `to`. */
static TKVI_NOINLINE void tkvi_merge(const tkvi_work_tile *u, const tkvi_sums *to, const tkvi_sums *from) {
    int r, space;
    for (space = 0; space < 2; space++)
        if (from->any[space] > 0.0f) tkvi_begin_space(u, to, space);
    for (r = 0; r < u->rows; r++) tkvi_merge_row(u, r, to, from);
}

/* Clears the sums of rows whose query or logits are not finite: such rows see no key and no learned sink. m is set
 * to a number that is not finite, which marks them. */
static void tkvi_empty_nonfinite(const tkvi_work_tile *u, const float *origins, const tkvi_sums *s) {
    int r;
    for (r = 0; r < u->rows; r++)
        if (!tkvi_is_finite(origins[r]) || !tkvi_is_finite(s->m[r]) || !tkvi_is_finite(s->l[r])) {
            s->l[r] = 0.0f;
            s->m[r] = tkvi_no_origin();
            memset(s->o + r * u->v_pad, 0, (size_t)u->v_pad * sizeof *s->o);
        }
}

/* Adds the sampled rows to the layer's statistics. Integer sums do not depend on the order of threads. */
#if defined(__GNUC__) || defined(__clang__)
static TKVI_NOINLINE void tkvi_collect_stats(const tkvi_work_tile *u, const tkvi_queries *q,
                                             const tkvi_sums *s) {
    tkv_cache *kv = u->call->kv;
    int dim = kv->tables.cfg.model.head_dim, layer = u->call->plan->stored, r, c;
    int64_t *asked = tkvi_q_sq_sum_of(kv, layer, u->head),
            *far_attention = tkvi_far_attention_of(kv, layer, u->head);
    tkvi_lock(&kv->learning);
    for (r = 0; r < u->rows; r++) {
        if (!tkvi_is_sampled(u, r)) continue;
        for (c = 0; c < dim; c++) {
            float x = q->q[r * u->k_pad + c]; /* queries can have NaN; the clamp keeps squares finite */
            x = tkvi_is_finite(x) ? tkvi_clampf(x, -1e6f, 1e6f) : 0.0f;
            asked[c] += tkvi_counted(x * x * 16777216.0f, 1e12f);
        }
        if (s->l[r] > 0.0f)
            *far_attention += tkvi_counted(s->far_attention[r] / (s->l[r] * s->l[r]) * 16777216.0f, 1e12f);
    }
    tkvi_unlock(&kv->learning);
}

/* Adds q q^T of every TKVI_QUERY_STATS_EVERY-th position to the layer's statistics of queries. */
static TKVI_NOINLINE void tkvi_collect_query_stats(const tkvi_work_tile *u, const tkvi_queries *q) {
    tkv_cache *kv = u->call->kv;
    int layer = u->call->plan->stored, r;
    tkvi_lock(&kv->learning);
    for (r = 0; r < u->rows; r++)
        if (tkvi_position(u, tkvi_query_of(u, r)) % TKVI_QUERY_STATS_EVERY == 0)
            tkvi_query_stats_add(kv, layer, u->head, q->q + r * u->k_pad);
    tkvi_unlock(&kv->learning);
}
#else /* statistics need atomics; without them tables come from the keys alone */
static void tkvi_collect_query_stats(const tkvi_work_tile *u, const tkvi_queries *q) {
    (void)u;
    (void)q;
}

static void tkvi_collect_stats(const tkvi_work_tile *u, const tkvi_queries *q, const tkvi_sums *s) {
    (void)u;
    (void)q;
    (void)s;
}
#endif

/* >>comparison with exact: attention a second time, with exact copies in place of coded blocks (cache/meter.h) */
typedef struct tkvi_comparison { /* of a row */
    int sampled;
    uint64_t keys, kept; /* coded keys that the row sees; those of them with a copy */
    double l, shift;     /* sums over keys, p = exp(exact - m): of p; of p (exact - cached score) */
    float m, cached_m;   /* largest exact score; largest cached score */
    float choice;        /* the exact score of the key with the largest cached score */
} tkvi_comparison;

/* Marks the sampled rows, and counts their coded keys and those with a copy. Returns the latter, over all rows. */
static uint64_t tkvi_comparison_begin(const tkvi_work_tile *u, const tkvi_head_probe *g,
                                      tkvi_comparison *rows) {
    const tkv_cache *kv = u->call->kv;
    const tkvi_meter *m = kv->meter;
    const tkvi_plan *plan = &kv->tables.plan[u->call->plan->stored];
    int i, r, from = 0;
    uint64_t kept = 0;
    for (r = 0; r < u->rows; r++) {
        memset(&rows[r], 0, sizeof rows[r]);
        rows[r].sampled = (tkvi_position(u, tkvi_query_of(u, r)) + g->phase) % m->every == 0;
        rows[r].m = rows[r].cached_m = TKVI_HIDDEN;
    }
    for (i = u->list->sinks; i < u->list->n; i++) {
        int start = tkvi_block_start(kv, u->ids, i), end = tkvi_block_end(kv, u->list, u->ids, i), copied;
        if (kv->tables.coding[kv->pool.block[u->ids[i]].coding].key == plan->now.key[TKV_TIER_HOT]) continue;
        copied = tkvi_head_probe_copy(m, g, start, &from) != NULL && !kv->pool.block[u->ids[i]].packed;
        for (r = 0; r < u->rows; r++) {
            int low, high, n;
            if (!rows[r].sampled) continue;
            tkvi_visible(u, tkvi_query_of(u, r), &low, &high);
            n = tkvi_min(high, end) - tkvi_max(low, start);
            if (n <= 0) continue;
            rows[r].keys += (uint64_t)n;
            if (copied) rows[r].kept += (uint64_t)n;
            if (copied) kept += (uint64_t)n;
        }
    }
    return kept;
}

/* Adds one block to a row's comparison. s, c: [64] exact and cached scores. w: [64] gets the weights of the exact
 * scores. Returns 0 if the row sees no key of the block. */
static int tkvi_comparison_add(const tkvi_work_tile *u, int r, tkvi_comparison *row, const float *s,
                               const float *c, float *w, float *o) {
    const tkvi_kernels *kernels = u->call->kv->kernels;
    float most = kernels->max64(s), cached_most = kernels->max64(c);
    double shift = 0.0;
    int t, space;
    if (TKVI_IS_HIDDEN(most)) {
        memset(w, 0, TKVI_BLOCK * sizeof(float));
        return 0;
    }
    if (most > row->m) {
        float shrink = TKVI_IS_HIDDEN(row->m) ? 0.0f : expf(row->m - most);
        for (space = 0; space < tkvi_spaces(u); space++)
            tkvi_shrink(o + (space * TKVI_ROWS + r) * u->v_pad, u->v_pad, shrink);
        row->l *= (double)shrink;
        row->shift *= (double)shrink;
        row->m = most;
    }
    if (cached_most > row->cached_m) {
        row->cached_m = cached_most;
        for (t = 0; t < TKVI_BLOCK && c[t] < cached_most;) t++;
        row->choice = s[t % TKVI_BLOCK];
    }
    row->l += (double)kernels->exp64(s, row->m, w);
    for (t = 0; t < TKVI_BLOCK; t++) shift += (double)(w[t] * (s[t] - c[t])); /* a hidden key adds 0 */
    row->shift += shift;
    return 1;
}

/* Attention of the sampled rows over all blocks, with copies where there are some. o: as tkvi_sums.o. */
static TKVI_NOINLINE void tkvi_comparison_blocks(const tkvi_work_tile *u, tkvi_queries *q,
                                                 const tkvi_head_probe *g, tkvi_comparison *rows, float *o) {
    const tkv_cache *kv = u->call->kv;
    const tkvi_record *exact =
        &kv->tables.coding[kv->tables.plan[u->call->plan->stored].now.coding[TKV_TIER_HOT]].record[u->head];
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK], cached[TKVI_ROWS * TKVI_BLOCK],
        p[TKVI_ROWS * TKVI_BLOCK];
    int i, r, from = 0, stride = TKVI_ROWS * u->v_pad;
    memset(o, 0, (size_t)(tkvi_spaces(u) * stride) * sizeof(float));
    for (i = 0; i < u->list->n; i++) {
        const int start = tkvi_block_start(kv, u->ids, i), n = tkvi_block_tokens(kv, u->list, u->ids, i);
        int any = 0, at[TKVI_BLOCK];
        const uint8_t *bytes, *copy = tkvi_head_probe_copy(kv->meter, g, start, &from);
        const tkvi_record *rec;
        if (kv->pool.block[u->ids[i]].packed) copy = NULL; /* it has other tokens */
        rec = copy ? exact : tkvi_record_of(u, i, &bytes);
        if (!tkvi_block_scores(u, q, i, cached)) continue;
        if (copy) {
            bytes = copy;
            kv->kernels->k[rec->k.format->stored](&rec->k, bytes, NULL, q->q, q->ref, u->rows, n, 1, scores);
            tkvi_slot_positions(u, i, at);
            for (r = 0; r < u->rows; r++) tkvi_adjust_scores(u, r, q->origin[r], at, scores + r * TKVI_BLOCK);
        } else {
            memcpy(scores, cached, sizeof scores);
        }
        memset(p, 0, sizeof p);
        for (r = 0; r < u->rows; r++)
            if (rows[r].sampled)
                any |= tkvi_comparison_add(u, r, &rows[r], scores + r * TKVI_BLOCK, cached + r * TKVI_BLOCK,
                                           p + r * TKVI_BLOCK, o);
        bytes = copy ? copy + rec->v_at : any ? tkvi_bytes_of(u, i, TKV_V) : NULL;
        if (any && bytes)
            kv->kernels->v[rec->v.format->stored](&rec->v, bytes, NULL, p, u->rows, n,
                                                  tkvi_n_limbs(&rec->v, kv->tables.cfg.host.precise),
                                                  o + (rec->v.format->rotated ? stride : 0));
    }
}

/* row: [v_head_dim] sum of p v of row r, with rotated values rotated back. Without sink logit and division by l. */
static void tkvi_output_row(const tkvi_work_tile *u, int r, const float *o, int rotated, float *row) {
    int dim = u->call->kv->tables.cfg.model.v_head_dim, i;
    memset(row, 0, TKV_MAX_HEAD_DIM * sizeof *row);
    if (rotated) {
        memcpy(row, o + (TKVI_ROWS + r) * u->v_pad, (size_t)u->v_pad * sizeof *row);
        tkvi_rotate_back(row, dim);
    }
    for (i = 0; i < dim; i++) row[i] += o[r * u->v_pad + i];
}

/* Adds a row's comparison to error_sums: agreement of the top key, KL(exact || cached), |out - exact|^2 /
 * |exact|^2. s: sums over the cached blocks. o: as s->o, with the copies. */
static void tkvi_comparison_end(const tkvi_work_tile *u, const tkvi_queries *q, int r,
                                const tkvi_comparison *row, const tkvi_sums *s, const float *o,
                                tkvi_error_sums *error_sums) {
    const tkv_attend_params *p = u->call->p;
    float x[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
    double lse = (double)row->m + log(row->l), cached = (double)s->m[r] + log((double)s->l[r]);
    double a, b, d = 0.0, size = 0.0;
    uint64_t divergence;
    int i, head = tkvi_head_of(u, r);
    if (p->sink_logits && tkvi_is_finite(p->sink_logits[head])) {
        double sink = (double)p->sink_logits[head] - (p->softcap > 0.0f ? 0.0 : (double)q->origin[r]);
        lse = lse > sink ? lse + log1p(exp(sink - lse)) : sink + log1p(exp(lse - sink));
        cached = cached > sink ? cached + log1p(exp(sink - cached)) : sink + log1p(exp(cached - sink));
    }
    a = exp((double)row->m - lse);
    b = exp((double)s->m[r] - cached);
    tkvi_output_row(u, r, o, tkvi_spaces(u) > 1, x);
    tkvi_output_row(u, r, s->o, s->any[1] > 0.0f, y);
    for (i = 0; i < u->call->kv->tables.cfg.model.v_head_dim; i++) {
        double e = (double)x[i] * a - (double)y[i] * b;
        d += e * e;
        size += (double)x[i] * a * ((double)x[i] * a);
    }
    divergence = tkvi_meter_fixed(row->shift * a - lse + cached);
    error_sums->agreed += row->choice >= row->m;
    error_sums->error += tkvi_meter_fixed(d > 0.0 ? (size > 0.0 ? d / size : (double)TKVI_METER_MOST) : 0.0);
    error_sums->divergence += divergence;
    if (divergence > error_sums->worst) error_sums->worst = divergence;
}

/* Adds the sampled rows of a work tile to its head probe. Does not change `s`. Overwrites `work`. */
static TKVI_NOINLINE void tkvi_update_error_sums(const tkvi_work_tile *u, tkvi_queries *q, const tkvi_sums *s,
                                                 const tkvi_sums *work) {
    tkvi_meter *m = u->call->kv->meter;
    tkvi_head_probe *g = tkvi_head_probe_of(m, u->call->plan->stored, u->head);
    tkvi_comparison rows[TKVI_ROWS];
    tkvi_error_sums error_sums;
    uint64_t kept;
    int r;
    if (!g || u->call->rows[u->item].seq != m->seq) return;
    memset(&error_sums, 0, sizeof error_sums);
    kept = tkvi_comparison_begin(u, g, rows);
    if (kept) tkvi_comparison_blocks(u, q, g, rows, work->o);
    for (r = 0; r < u->rows; r++) {
        if (!rows[r].sampled || !(s->l[r] > 0.0f)) continue; /* the row sees no key */
        error_sums.samples++;
        error_sums.keys += rows[r].keys;
        error_sums.kept += rows[r].kept;
        if (rows[r].kept && rows[r].l > 0.0) tkvi_comparison_end(u, q, r, &rows[r], s, work->o, &error_sums);
        else error_sums.agreed++; /* no copy, no difference */
    }
    if (!error_sums.samples) return;
    tkvi_lock(&m->lock);
    tkvi_error_sums_add(&g->sum, &error_sums);
    tkvi_unlock(&m->lock);
}

/* Writes out and lse of a work tile's rows, after it adds the sink logits to the sums. rotated: 1 if the second
 * half of o is in use. It is then rotated back first. */
static TKVI_NOINLINE void tkvi_finish(const tkvi_work_tile *u, const float *origins, const tkvi_sums *s,
                                      int rotated) {
    const tkvi_call *c = u->call;
    int dim = c->kv->tables.cfg.model.v_head_dim, r, i, k;
    float *m = s->m, *l = s->l, *o = s->o;
    for (r = 0; r < u->rows; r++) {
        int head = tkvi_head_of(u, r), query = u->seq_row + tkvi_query_of(u, r), empty = !(l[r] > 0.0f);
        float origin = c->p->softcap > 0.0f || !tkvi_is_finite(origins[r]) ? 0.0f : origins[r];
        float weight = 1.0f, *row = o + r * u->v_pad;
        ptrdiff_t at = query * c->out_row + head * c->out_head;
        if (rotated && !empty) {
            float *turned = o + (TKVI_ROWS + r) * u->v_pad;
            tkvi_rotate_back(turned, dim);
            for (i = 0; i < dim; i++) row[i] += turned[i];
        }
        if (c->p->sink_logits && tkvi_is_finite(c->p->sink_logits[head]) && tkvi_is_finite(m[r])) {
            float sink = c->p->sink_logits[head] - origin;
            if (empty) {
                m[r] = sink;
                l[r] = 1.0f;
            } else if (sink > m[r]) {
                weight = expf(m[r] - sink);
                l[r] = l[r] * weight + 1.0f;
                m[r] = sink;
            } else {
                l[r] += expf(sink - m[r]);
            }
        }
        weight = empty ? 0.0f : weight / l[r];
        for (i = 0; i < dim; i += 16) { /* vectors also at -O2 */
            float x[16];
            for (k = 0; k < 16; k++) x[k] = row[i + k] * weight;
            for (k = 0; k < 16; k++) row[i + k] = x[k];
        }
        if (c->p->out_type == TKV_TYPE_F32) memcpy((char *)c->p->out + 4 * at, row, (size_t)dim * 4);
        else
            for (i = 0; i < dim; i++) tkvi_store_element(c->p->out, c->p->out_type, at + i, row[i]);
        if (c->p->lse)
            c->p->lse[(ptrdiff_t)query * c->kv->tables.cfg.model.n_heads + head] =
                l[r] > 0.0f ? m[r] + logf(l[r]) + origin : tkvi_from_bits(0xff800000u);
    }
}

/* >>attention scores of tokens: a second pass over the keys for sampled rows, with known sums (reclaim/scores.h) */
/* The first sampled row from r on, or u->rows. Layers and heads sample different positions to spread the work. */
static int tkvi_next_sampled(const tkvi_work_tile *u, int r) {
    const tkvi_token_scores *m = u->call->mass;
    const int64_t unit = (int64_t)u->call->p->layer * u->call->kv->tables.cfg.model.n_kv_heads + u->head;
    if (!TKVI_HAS_EVICT || !m) return u->rows;
    for (; r < u->rows; r++) {
        const int at = tkvi_position(u, tkvi_query_of(u, r));
        if (m->mode->fresh ? at >= u->list->len - m->newest : (at + unit) % m->every == 0) break;
    }
    return r;
}

/* Number of live keys that a query sees by causality and window. */
static int tkvi_keys_seen(const tkvi_work_tile *u, int query) {
    const tkv_cache *kv = u->call->kv;
    int low, high, i, t, n = 0;
    tkvi_visible(u, query, &low, &high);
    for (i = 0; i < u->list->n; i++) {
        const tkvi_block *b = &kv->pool.block[u->ids[i]];
        const int slots = tkvi_block_tokens(kv, u->list, u->ids, i);
        if (b->gone == 0 && !b->packed) {
            n += tkvi_max(0, tkvi_min(high, b->start + slots) - tkvi_max(low, b->start));
            continue;
        }
        for (t = 0; t < slots; t++) {
            const int at = tkvi_slot_position(kv, u->ids[i], t);
            n += at >= low && at < high && (tkvi_live_mask(b, slots) >> t & 1);
        }
    }
    return n;
}

/* p: [64] softmax weights of row r. Returns 0, with zeros in p, if lse is not finite or the row sees no key. */
static int tkvi_weights_of(const tkvi_work_tile *u, const float *scores, float lse, int r, float *p) {
    if (tkvi_is_finite(lse) && !TKVI_IS_HIDDEN(lse)) {
        (void)u->call->kv->kernels->exp64(scores + r * TKVI_BLOCK, lse, p);
        return 1;
    }
    memset(p, 0, TKVI_BLOCK * sizeof *p);
    return 0;
}

/* Adds the attention weights of all rows to token_meta of blocks first .. last-1. lse: [rows] log-sum-exp, relative
 * to the reference key. Overwrites q. */
static void tkvi_score_blocks(const tkvi_work_tile *u, const float *lse, int first, int last,
                              tkvi_queries *q) {
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK], p[TKVI_BLOCK], said[TKVI_BLOCK], more[TKVI_BLOCK];
    const tkvi_token_scores *m = u->call->mass;
    tkv_cache *kv = u->call->kv;
    float low[TKVI_ROWS];
    int i, r, t, end, any;
    tkvi_load_queries(u, q);
    for (r = 0; r < u->rows; r++) {
        low[r] = m->importance.low;
        if (m->mode->need == TKVI_NEEDS_LOW_COUNTS && !(low[r] > 0.0f))
            low[r] = 1.0f / (float)tkvi_max(1, tkvi_keys_seen(u, tkvi_query_of(u, r)));
    }
    for (i = first; i < last; i++) {
        const uint64_t gone = kv->pool.block[u->ids[i]].gone;
        if (!tkvi_block_scores(u, q, i, scores)) continue;
        memset(said, 0, sizeof said);
        for (r = 0; r < u->rows; r = end) {
            any = tkvi_weights_of(u, scores, lse[r], r, p);
            for (end = r + 1; m->heads && end < u->rows && tkvi_query_of(u, end) == tkvi_query_of(u, r);
                 end++) {
                any |= tkvi_weights_of(u, scores, lse[end], end, more);
                m->heads(NULL, more, 0.0f, p);
            }
            if (any) m->mode->say(scores + r * TKVI_BLOCK, p, low[r], said);
        }
        for (t = 0; t < TKVI_BLOCK && gone; t++)
            if (gone >> t & 1) said[t] = 0.0f;
        tkvi_token_score_add(kv, u->ids[i], u->list->len, said, m->one);
    }
}

/* Re-scores the sampled rows over blocks first .. last-1 and adds their attention weights to token_meta. s: final
 * sums. Overwrites q. */
static TKVI_NOINLINE void tkvi_gather_scores(const tkvi_work_tile *u, const tkvi_sums *s, int first, int last,
                                             tkvi_queries *q) {
    int r, end;
    for (r = tkvi_next_sampled(u, 0); r < u->rows; r = tkvi_next_sampled(u, end)) {
        tkvi_work_tile sampled_tile = *u;
        float lse[TKVI_ROWS];
        for (end = r; end < u->rows && tkvi_next_sampled(u, end) == end; end++)
            lse[end - r] = s->l[end] > 0.0f ? s->m[end] + logf(s->l[end]) : TKVI_HIDDEN;
        sampled_tile.first += r;
        sampled_tile.rows = end - r;
        tkvi_score_blocks(&sampled_tile, lse, first, last, q);
    }
}

/* >>work: work tiles, serial or parallel, whole or in splits */
typedef struct tkvi_work {
    const tkvi_call *call;
    int n_units, n_chunks; /* work tiles; most splits of one */
    float *parts;          /* [n_units][n_chunks] sums of splits; NULL: work tiles are not split */
    tkv_task task;         /* the task inside tkvi_run_fetching */
} tkvi_work;

static int tkvi_count_work_tiles(const tkvi_call *c) {
    int i, n = 0;
    for (i = 0; i < c->n_rows; i++) n += tkvi_tiles_of(c, c->rows[i].n) * c->kv->tables.cfg.model.n_kv_heads;
    return n;
}

/* Fills in the work tile with this number. */
static void tkvi_find_work_tile(const tkvi_call *c, int number, tkvi_work_tile *u) {
    int i, row = 0, heads = c->kv->tables.cfg.model.n_kv_heads;
    for (i = 0;; i++) {
        int tiles = tkvi_tiles_of(c, c->rows[i].n);
        if (number < tiles * heads) { /* all tiles of a head in a row: its records stay in the CPU cache */
            tkvi_work_tile_init(u, c, i, row, number / tiles, number % tiles);
            return;
        }
        number -= tiles * heads;
        row += c->rows[i].n;
    }
}

static tkvi_sums tkvi_split_at(const tkvi_work *w, const tkvi_work_tile *u, int unit, int chunk) {
    return tkvi_sums_in(w->parts + (size_t)(unit * w->n_chunks + chunk) * (size_t)TKVI_SUMS_FLOATS(u->v_pad),
                        u->v_pad);
}

/* Task: one split of one work tile. */
static void tkvi_run_split(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    int chunk = index % w->n_chunks;
    tkvi_sums sums;
    TKVI_ALIGNED tkvi_queries q;
    tkvi_work_tile u;
    tkvi_find_work_tile(w->call, index / w->n_chunks, &u);
    if (chunk >= u.n_chunks) return;
    tkvi_load_queries(&u, &q);
    sums = tkvi_split_at(w, &u, index / w->n_chunks, chunk);
    tkvi_attend_split(&u, &q, chunk, &sums);
}

/* Merges all splits of a work tile in order into `sums`. Takes the results of tkvi_run_split, or computes each
 * split into `here`. */
static void tkvi_merge_splits(const tkvi_work *w, int index, const tkvi_work_tile *u, tkvi_queries *q,
                              const tkvi_sums *sums, const tkvi_sums *here) {
    int chunk;
    tkvi_attend_split(u, q, w->parts ? u->n_chunks : 0, sums); /* n_chunks: empty sums */
    for (chunk = w->parts ? 0 : 1; chunk < u->n_chunks; chunk++) {
        tkvi_sums part = *here;
        if (w->parts) part = tkvi_split_at(w, u, index, chunk);
        else tkvi_attend_split(u, q, chunk, &part);
        tkvi_merge(u, sums, &part);
    }
    tkvi_begin_space(u, sums, 0);
}

/* Task: a whole work tile, or, after tkvi_run_split, the merge of its splits. */
static void tkvi_run_work_tile(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    TKVI_ALIGNED float all[TKVI_SUMS_FLOATS(TKV_MAX_HEAD_DIM)], here[TKVI_SUMS_FLOATS(TKV_MAX_HEAD_DIM)];
    TKVI_ALIGNED tkvi_queries q;
    tkvi_sums sums, part;
    tkvi_work_tile u;
    tkvi_find_work_tile(w->call, index, &u);
    tkvi_load_queries(&u, &q);
    sums = tkvi_sums_in(all, u.v_pad);
    part = tkvi_sums_in(here, u.v_pad);
    tkvi_merge_splits(w, index, &u, &q, &sums, &part);
    if (tkvi_failed(w->call)) return;
    tkvi_empty_nonfinite(&u, q.origin, &sums);
    if (w->call->collect_stats) tkvi_collect_stats(&u, &q, &sums);
    if (TKVI_HAS_SQUAT && w->call->metric) tkvi_collect_query_stats(&u, &q);
    if (TKVI_HAS_METER && w->call->meter) tkvi_update_error_sums(&u, &q, &sums, &part);
    tkvi_finish(&u, q.origin, &sums, sums.any[1] > 0.0f);
    if (!w->parts) {
        tkvi_gather_scores(&u, &sums, 0, u.list->n, &q);
    } else if (tkvi_next_sampled(&u, 0) < u.rows) { /* tkvi_run_gather needs m and l */
        part = tkvi_split_at(w, &u, index, 0);
        memcpy(part.m, sums.m, (size_t)u.rows * sizeof(float));
        memcpy(part.l, sums.l, (size_t)u.rows * sizeof(float));
    }
}

/* Task: attention scores of one split of one work tile, after tkvi_run_work_tile. */
static void tkvi_run_gather(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    const int unit = index / w->n_chunks, chunk = index % w->n_chunks;
    tkvi_sums sums;
    TKVI_ALIGNED tkvi_queries q;
    tkvi_work_tile u;
    tkvi_find_work_tile(w->call, unit, &u);
    if (chunk >= u.n_chunks) return;
    sums = tkvi_split_at(w, &u, unit, 0);
    tkvi_gather_scores(&u, &sums, chunk * u.chunk, tkvi_min(u.list->n, (chunk + 1) * u.chunk), &q);
}

/* Does any work tile have a sampled row? If not, no thread needs to wake up. */
static int tkvi_any_sampled(const tkvi_work *w) {
    int i, any = 0;
    for (i = 0; TKVI_HAS_EVICT && i < w->n_units && w->call->mass && !any; i++) {
        tkvi_work_tile u;
        tkvi_find_work_tile(w->call, i, &u);
        any = tkvi_next_sampled(&u, 0) < u.rows;
    }
    return any;
}

/* >>prefill: work tiles of up to 32 rows, one row per vector lane (kernels/prefill.h) */
typedef struct tkvi_prefill_sums { /* as tkvi_sums. m, l, far_attention, origin: [lanes]; o: [v_pad][lanes] */
    TKVI_ALIGNED float o[TKVI_PREFILL_FLOATS];
    TKVI_ALIGNED float m[TKVI_PREFILL], l[TKVI_PREFILL], far_attention[TKVI_PREFILL], origin[TKVI_PREFILL];
    int lanes;
} tkvi_prefill_sums;

/* q: [channel][lanes] query rows of a work tile, 0 in lanes without a row. */
static TKVI_NOINLINE void tkvi_load_lanes(const tkvi_work_tile *u, const float *ref, int lanes, float *q,
                                          float *origin) {
    TKVI_ALIGNED float rows[16 * TKV_MAX_HEAD_DIM];
    int first, r;
    for (first = 0; first < lanes; first += 16) {
        memset(rows, 0, (size_t)(16 * u->k_pad) * sizeof *rows);
        for (r = first; r < tkvi_min(first + 16, u->rows); r++)
            origin[r] = tkvi_load_query(u, r, ref, rows + (r - first) * u->k_pad);
        u->call->many->transpose(rows, u->k_pad, u->k_pad, q + first, lanes);
    }
}

/* The tokens of block i that each lane sees: low .. high-1. Returns 0 if all lanes see all tokens. */
static int tkvi_visible_lanes(const tkvi_work_tile *u, int i, int start, int end, int32_t *low,
                              int32_t *high) {
    const int packed = u->call->kv->pool.block[u->ids[i]].packed;
    int r;
    if (!u->changes && !tkvi_has_hidden(u, i, start, end)) return 0;
    memset(low, 0, TKVI_PREFILL * sizeof *low);
    memset(high, 0, TKVI_PREFILL * sizeof *high);
    for (r = 0; r < u->rows; r++) {
        int from, to;
        tkvi_visible(u, tkvi_query_of(u, r), &from, &to);
        low[r] = packed ? 0 : from - start; /* tkvi_adjust_score_lanes hid scores of packed blocks */
        high[r] = packed ? packed : tkvi_min(to, end) - start;
    }
    return 1;
}

/* tkvi_adjust_scores for scores [64][lanes] of block i. */
static TKVI_NOINLINE void tkvi_adjust_score_lanes(const tkvi_work_tile *u, const float *origin, int i,
                                                  int lanes, float *scores) {
    int at[TKVI_BLOCK], r, t;
    tkvi_slot_positions(u, i, at);
    for (r = 0; r < u->rows; r++) {
        float s[TKVI_BLOCK];
        for (t = 0; t < TKVI_BLOCK; t++) s[t] = scores[t * lanes + r];
        tkvi_adjust_scores(u, r, origin[r], at, s);
        for (t = 0; t < TKVI_BLOCK; t++) scores[t * lanes + r] = s[t];
    }
}

/* sampled_lanes: 1 for lanes that add block i to far_attention, by the rule of tkvi_add_far. Returns 0 if all
 * are 0. */
static int tkvi_sample_lanes(const tkvi_work_tile *u, int i, int end, float *sampled_lanes) {
    int r, any = 0;
    if (!u->call->collect_stats || i < u->list->sinks) return 0;
    memset(sampled_lanes, 0, TKVI_PREFILL * sizeof *sampled_lanes);
    for (r = 0; r < u->rows; r++)
        if (tkvi_is_sampled(u, r) && end + TKVI_FAR <= tkvi_position(u, tkvi_query_of(u, r))) {
            sampled_lanes[r] = 1.0f;
            any = 1;
        }
    return any;
}

/* The online softmax over all blocks. Blocks with rotated V come first, so that one rotation back is enough. */
static TKVI_NOINLINE void tkvi_prefill_blocks(const tkvi_work_tile *u, tkvi_prefill_sums *sums) {
    TKVI_ALIGNED float scores[TKVI_BLOCK * TKVI_PREFILL], shrink[TKVI_PREFILL], sampled_lanes[TKVI_PREFILL];
    TKVI_ALIGNED int32_t low[TKVI_PREFILL], high[TKVI_PREFILL];
    const tkv_cache *kv = u->call->kv;
    const tkvi_prefill *many = u->call->many;
    const int lanes = sums->lanes;
    tkvi_prefill_queries q;
    tkvi_softmax_args w;
    int i, r, rotated;
    q.lanes = lanes;
    q.coded = 0;
    tkvi_reference_key(u, q.ref);
    tkvi_load_lanes(u, q.ref, lanes, q.q, sums->origin);
    memset(sums->o, 0, (size_t)(u->v_pad * lanes) * sizeof(float));
    for (r = 0; r < TKVI_PREFILL; r++) {
        sums->m[r] = TKVI_HIDDEN;
        sums->l[r] = sums->far_attention[r] = 0.0f;
    }
    w.s = scores;
    w.lanes = lanes;
    w.m = sums->m;
    w.l = sums->l;
    w.shrink = shrink;
    w.high = high;
    /* A new maximum scales far_attention of all lanes, not only of sampled ones. */
    w.far_attention = u->call->collect_stats ? sums->far_attention : NULL;
    for (rotated = kv->tables.any_rotated; rotated >= 0; rotated--) {
        for (i = 0; i < u->list->n; i++) {
            int start = tkvi_block_start(kv, u->ids, i), end = tkvi_visible_end(u, i);
            const uint8_t *bytes, *next = tkvi_next_record(u, i);
            const tkvi_record *rec = tkvi_record_of(u, i, &bytes);
            const tkvi_block *b = &kv->pool.block[u->ids[i]];
            const int n = tkvi_block_tokens(kv, u->list, u->ids, i);
            if (rec->v.format->rotated != rotated || end <= u->low || start >= u->high) continue;
            if (!bytes) bytes = tkvi_bytes_of(u, i, TKV_K);
            if (!bytes) return;
            many->k(&rec->k, bytes, next, &q, n, tkvi_n_limbs(&rec->k, kv->tables.cfg.host.precise), scores);
            if (u->changes || b->gone || b->packed)
                tkvi_adjust_score_lanes(u, sums->origin, i, lanes, scores);
            w.low = tkvi_visible_lanes(u, i, start, end, low, high) ? low : NULL;
            w.sampled_lanes = tkvi_sample_lanes(u, i, end, sampled_lanes) ? sampled_lanes : NULL;
            if (many->softmax_step(&w)) many->shrink(sums->o, u->v_pad, lanes, shrink);
            bytes = tkvi_bytes_of(u, i, TKV_V);
            if (!bytes) return;
            many->v(&rec->v, bytes, next ? next + rec->v_at : NULL, scores, lanes, n,
                    tkvi_n_limbs(&rec->v, kv->tables.cfg.host.precise), sums->o);
        }
        if (rotated) many->rotate_back(sums->o, kv->tables.cfg.model.v_head_dim, lanes);
    }
}

/* Collects statistics of up to 8 rows. */
static TKVI_NOINLINE void tkvi_prefill_collect_stats(const tkvi_work_tile *u, const tkvi_sums *sums) {
    TKVI_ALIGNED tkvi_queries q;
    tkvi_load_queries(u, &q);
    if (u->call->collect_stats) tkvi_collect_stats(u, &q, sums);
    if (TKVI_HAS_SQUAT && u->call->metric) tkvi_collect_query_stats(u, &q);
}

/* Adds attention scores of up to 8 rows. */
static TKVI_NOINLINE void tkvi_prefill_gather(const tkvi_work_tile *u, const tkvi_sums *sums) {
    TKVI_ALIGNED tkvi_queries q;
    tkvi_gather_scores(u, sums, 0, u->list->n, &q);
}

/* The rows from `first` on as a work tile of call->tell rows at most: 8, or fewer to keep all heads of a query. */
static tkvi_work_tile tkvi_prefill_eight(const tkvi_work_tile *u, int first) {
    tkvi_work_tile eight = *u;
    eight.first += first;
    eight.rows = tkvi_min(u->call->tell, u->rows - first);
    return eight;
}

/* Finishes up to 8 rows: statistics, out and lse, attention scores. */
static TKVI_NOINLINE void tkvi_prefill_finish(const tkvi_work_tile *u, tkvi_prefill_sums *from, int first) {
    const tkvi_work_tile eight = tkvi_prefill_eight(u, first);
    tkvi_sums sums;
    sums.o = from->o + first * u->v_pad;
    sums.m = from->m + first;
    sums.l = from->l + first;
    sums.far_attention = from->far_attention + first;
    tkvi_empty_nonfinite(&eight, from->origin + first, &sums);
    if (u->call->collect_stats || (TKVI_HAS_SQUAT && u->call->metric))
        tkvi_prefill_collect_stats(&eight, &sums);
    tkvi_finish(&eight, from->origin + first, &sums, 0);
    if (TKVI_HAS_EVICT && u->call->mass) tkvi_prefill_gather(&eight, &sums);
}

/* Transposes o from [v_pad][lanes] to [lanes][v_pad]. */
static TKVI_NOINLINE void tkvi_prefill_in_rows(const tkvi_work_tile *u, tkvi_prefill_sums *sums) {
    TKVI_ALIGNED float o[TKVI_PREFILL_FLOATS];
    int i, r;
    memcpy(o, sums->o, (size_t)(u->v_pad * sums->lanes) * sizeof *o);
    for (r = 0; r < sums->lanes; r += 16)
        for (i = 0; i < u->v_pad; i += 16)
            u->call->many->transpose(o + i * sums->lanes + r, sums->lanes, 16, sums->o + r * u->v_pad + i,
                                     u->v_pad);
}

static TKVI_NOINLINE void tkvi_prefill_work_tile(const tkvi_work_tile *u) {
    tkvi_prefill_sums sums;
    int first;
    sums.lanes = u->rows > 16 ? TKVI_PREFILL : 16;
    tkvi_prefill_blocks(u, &sums);
    if (tkvi_failed(u->call)) return;
    tkvi_prefill_in_rows(u, &sums);
    for (first = 0; first < u->rows; first += u->call->tell) tkvi_prefill_finish(u, &sums, first);
}

/* Measures up to 8 rows. Prefill kernels round in another way than the kernels of kernels/scalar.h, which the
 * comparison uses. So the sampled rows are computed again with those. */
static TKVI_NOINLINE void tkvi_prefill_measure(const tkvi_work *w, const tkvi_work_tile *u) {
    TKVI_ALIGNED float all[TKVI_SUMS_FLOATS(TKV_MAX_HEAD_DIM)], here[TKVI_SUMS_FLOATS(TKV_MAX_HEAD_DIM)];
    TKVI_ALIGNED tkvi_queries q;
    const tkvi_meter *m = u->call->kv->meter;
    const tkvi_head_probe *g = tkvi_head_probe_of(u->call->kv->meter, u->call->plan->stored, u->head);
    const tkvi_sums sums = tkvi_sums_in(all, u->v_pad), part = tkvi_sums_in(here, u->v_pad);
    int r, samples = 0;
    for (r = 0; g && r < u->rows; r++)
        samples |= (tkvi_position(u, tkvi_query_of(u, r)) + g->phase) % m->every == 0;
    if (!samples) return;
    tkvi_load_queries(u, &q);
    tkvi_merge_splits(w, 0, u, &q, &sums, &part);
    tkvi_update_error_sums(u, &q, &sums, &part);
}

/* Task: one work tile with prefill kernels. */
static void tkvi_run_prefill(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    tkvi_work_tile u;
    int first;
    tkvi_find_work_tile(w->call, index, &u);
    tkvi_prefill_work_tile(&u);
    for (first = 0; TKVI_HAS_METER && first < u.rows && w->call->meter && !tkvi_failed(w->call);
         first += w->call->tell) {
        const tkvi_work_tile eight = tkvi_prefill_eight(&u, first);
        tkvi_prefill_measure(w, &eight);
    }
}

/* Prefill kernels for the call, or NULL. Each sequence needs 16 query rows or more, in formats that the kernels
 * read. Not for p->mass: its second pass must compute the same scores again. */
static const tkvi_prefill *tkvi_prefill_for(const tkvi_call *c) {
    const tkv_cache *kv = c->kv;
    int i, b;
    if (c->p->scores) return NULL;
    for (i = 0; i < c->n_rows; i++) {
        const tkvi_list *list = tkvi_list_of(kv, c->rows[i].seq, c->plan->stored);
        const uint32_t *ids = tkvi_ids(kv, c->rows[i].seq, c->plan->stored);
        if (c->rows[i].n * c->heads_per_kv < 2 * TKVI_ROWS) return NULL;
        for (b = 0; b < list->n; b++) {
            const tkvi_record *rec = kv->tables.coding[kv->pool.block[ids[b]].coding].record;
            if (rec->k.format->stored == TKVI_AS_DECODED || rec->v.format->stored == TKVI_AS_DECODED)
                return NULL;
        }
    }
    return tkvi_prefill_of(kv->kernels->isa);
}

/* Takes kv->parts for this call. Returns 0, for work tiles without splits, if another call has it or without
 * atomics. */
static int tkvi_take_split_sums(tkv_cache *kv) {
    if (!kv->parts) return 0;
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_exchange_n(&kv->parts_taken, 1, __ATOMIC_ACQUIRE) == 0;
#else
    return 0;
#endif
}

static void tkvi_release_split_sums(tkv_cache *kv) {
#if defined(__GNUC__) || defined(__clang__)
    __atomic_store_n(&kv->parts_taken, 0, __ATOMIC_RELEASE);
#else
    (void)kv;
#endif
}

/* >>p->mass: a second pass over the keys, with known log-sum-exp. One task per range of blocks, so no two tasks
 * write to one position. */
#define TKVI_TOKEN_SCORE_CHUNK 16 /* blocks per task */

/* Task: adds the softmax weights of all rows to p->mass, for one range of blocks. */
static void tkvi_run_score_output(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    const tkvi_call *c = w->call;
    float scores[TKVI_ROWS * TKVI_BLOCK];
    int number, i, r, t;
    for (number = 0; number < w->n_units; number++) {
        TKVI_ALIGNED tkvi_queries q;
        tkvi_work_tile u;
        int last;
        tkvi_find_work_tile(c, number, &u);
        last = tkvi_min(u.list->n, (index + 1) * TKVI_TOKEN_SCORE_CHUNK);
        if (index * TKVI_TOKEN_SCORE_CHUNK >= last) continue;
        tkvi_load_queries(&u, &q);
        for (i = index * TKVI_TOKEN_SCORE_CHUNK; i < last; i++) {
            float *mass = c->p->scores + u.item * c->mass_stride;
            int at[TKVI_BLOCK];
            if (!tkvi_block_scores(&u, &q, i, scores)) continue;
            tkvi_slot_positions(&u, i, at);
            for (r = 0; r < u.rows; r++) {
                int row = u.seq_row + tkvi_query_of(&u, r);
                float lse = c->p->lse[(ptrdiff_t)row * c->kv->tables.cfg.model.n_heads + tkvi_head_of(&u, r)];
                const float *s = scores + r * TKVI_BLOCK;
                if (!tkvi_is_finite(lse)) continue; /* the row sees no key */
                if (c->p->softcap <= 0.0f) lse -= q.origin[r];
                for (t = 0; t < TKVI_BLOCK; t++)
                    if (!TKVI_IS_HIDDEN(s[t])) mass[at[t]] += expf(tkvi_clampf(s[t] - lse, -87.0f, 0.0f));
            }
        }
    }
}

/* Runs task 0 .. n-1, with the config's parallel_for if there is one. */
static void tkvi_for(const tkv_cache *kv, int n, tkv_task task, void *ctx) {
    int i;
    if (kv->tables.cfg.host.parallel_for && n > 1)
        kv->tables.cfg.host.parallel_for(kv->tables.cfg.host.parallel_user, n, task, ctx);
    else
        for (i = 0; i < n; i++) task(ctx, i);
}

/* Runs w->task with a fetch buffer of its own. */
static TKVI_NOINLINE void tkvi_run_fetching(void *ctx, int index) {
    tkvi_fetch_buffer room;
    tkvi_work w = *(const tkvi_work *)ctx;
    tkvi_call c = *w.call;
    room.key = TKVI_NIL;
    c.room = &room;
    w.call = &c;
    if (!tkvi_failed(&c)) w.task(&w, index);
}

/* Runs task 0 .. n-1, in parallel if `together`. Tasks get fetch buffers if some block is offloaded. */
static void tkvi_run(tkvi_work *w, int n, int together, tkv_task task) {
    const tkv_cache *kv = w->call->kv;
    tkv_task run = TKVI_HAS_OFFLOAD && kv->pool.n_offloaded ? tkvi_run_fetching : task;
    int i;
    w->task = task;
    if (together) tkvi_for(kv, n, run, w);
    else
        for (i = 0; i < n; i++) run(w, i);
}

/* >>public */
TKV_API tkv_status tkv_attend_ex(tkv_cache *kv, const tkv_attend_params *p) {
    tkvi_call c;
    tkvi_work w;
    int i, few, longest = 0, failed = 0;
    tkv_status st = tkvi_call_init(&c, kv, p);
    if (st) return st;
    c.failed = &failed;
    w.call = &c;
    w.n_units = tkvi_count_work_tiles(&c);
    w.n_chunks = 0;
    w.parts = NULL;
    for (i = 0; i < c.n_rows; i++) {
        const tkvi_list *list = tkvi_list_of(kv, c.rows[i].seq, c.plan->stored);
        longest = tkvi_max(longest, list->n);
        if (p->scores) memset(p->scores + i * c.mass_stride, 0, (size_t)list->len * sizeof(float));
    }
    if (w.n_units == 0) return TKV_OK;
    w.n_chunks =
        tkvi_min(TKVI_MAX_TILE_SPLITS, (longest + TKVI_MIN_SPLIT_BLOCKS - 1) / TKVI_MIN_SPLIT_BLOCKS);
    few = w.n_chunks > 1 && w.n_units <= TKVI_FEW_WORK_TILES && /* not by thread count: same bits */
          w.n_units * w.n_chunks <= TKVI_MAX_SPLITS;
    if (few && kv->tables.cfg.host.parallel_for && tkvi_take_split_sums(kv)) {
        w.parts = kv->parts;
        tkvi_run(&w, w.n_units * w.n_chunks, 1, tkvi_run_split);
        tkvi_run(&w, w.n_units, 0, tkvi_run_work_tile);
        if (TKVI_HAS_EVICT && !failed && tkvi_any_sampled(&w))
            tkvi_run(&w, w.n_units * w.n_chunks, 1, tkvi_run_gather);
        tkvi_release_split_sums(kv);
    } else if (few || !(c.many = tkvi_prefill_for(&c))) {
        tkvi_run(&w, w.n_units, 1, tkvi_run_work_tile);
    } else {
        c.tile = tkvi_prefill_lanes(tkvi_max(kv->tables.cfg.model.head_dim, kv->tables.cfg.model.v_head_dim));
        c.tile -= c.tile % c.tell;
        tkvi_run(&w, tkvi_count_work_tiles(&c), 1, tkvi_run_prefill);
        c.tile = c.tell;
    }
    if (p->scores && !failed)
        tkvi_run(&w, (longest + TKVI_TOKEN_SCORE_CHUNK - 1) / TKVI_TOKEN_SCORE_CHUNK, 1,
                 tkvi_run_score_output);
    if (failed) return failed & TKVI_FAILED_IO ? TKV_ERR_IO : TKV_ERR_DATA;
    return TKV_OK;
}

TKV_API tkv_status tkv_attend(tkv_cache *kv, int seq, int layer, const float *q, int n, float *out) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.q = q;
    p.out = out;
    return tkv_attend_ex(kv, &p);
}

TKV_API void tkv_merge_attention(float *out, float *lse, const float *out2, const float *lse2, int n_rows,
                                 int dim) {
    int r, i;
    for (r = 0; r < n_rows && dim > 0; r++) {
        int have = tkvi_is_finite(lse[r]), have2 = tkvi_is_finite(lse2[r]);
        float *o = out + (ptrdiff_t)r * dim;
        const float *o2 = out2 + (ptrdiff_t)r * dim;
        float top, a, b;
        if (!have2) continue;
        if (!have) {
            memcpy(o, o2, (size_t)dim * sizeof(float));
            lse[r] = lse2[r];
            continue;
        }
        top = lse[r] > lse2[r] ? lse[r] : lse2[r];
        a = expf(lse[r] - top);
        b = expf(lse2[r] - top);
        for (i = 0; i < dim; i++) o[i] = (o[i] * a + o2[i] * b) / (a + b);
        lse[r] = top + logf(a + b);
    }
}

#endif /* TKVI_ATTENTION_ATTEND_H */
