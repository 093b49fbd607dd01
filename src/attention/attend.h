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
 * and many blocks take splits instead, with tiles of 8 rows (tkvi_plan_work). Where V is inside K, calls with few
 * rows have prefill kernels and splits.
 *
 * Scores are relative to a reference key, which recent keys have in common: see kernels/scalar.h. `origin` =
 * scale q.ref is added where the absolute logit matters: softcap, sink logits, log-sum-exp.
 *
 * Online softmax: Milakov and Gimelshein (arXiv 1805.02867). Split over keys and merge by log-sum-exp:
 * Flash-Decoding, FlashAttention-2 (arXiv 2307.08691, section 3). Attention does not change K and V.
 *
 * Consumers observe attention: cache/consumers.h. After the first pass over the keys a second one scores the sampled
 * rows again, once for all consumers:
 *
 *     in the task of a work tile        all blocks in order
 *     one task per range of blocks      all work tiles in order; for consumers that can or must have it so
 */
#ifndef TKVI_ATTENTION_ATTEND_H
#define TKVI_ATTENTION_ATTEND_H

#include "cache/consumers.h"
#include "core/parts.h"
#include "kernels/dispatch.h"
#include "reclaim/discard.h"

/* The reference key. A block whose tokens have moved sees it turned back, as it sees the queries. */
typedef struct tkvi_reference {
    float newest[TKV_MAX_HEAD_DIM]; /* as the newest block sees it */
    float moved[TKV_MAX_HEAD_DIM];  /* at its present place in the sequence */
    int turned;                     /* of the newest block */
} tkvi_reference;

/* Rows that are turned again for each run of blocks that moved alike: the queries as given and the reference key at its
 * present place, in an order of channels. Rows of queries that are not finite are 0. */
typedef struct tkvi_plain_rows {
    int is_set;
    const uint8_t *order; /* NULL: of the model */
    uint8_t pair[TKV_MAX_HEAD_DIM];
    tkvi_reference reference; /* with prefill kernels */
    /* plain, then partner: [rows + 1][k_pad] each, as tkvi_turned_rows. With prefill kernels: [channel][lanes] */
    float rows[TKVI_PREFILL_FLOATS];
    int hint; /* place in the cache's table of rotations */
} tkvi_plain_rows;

/* >>the call: parameters checked, defaults filled in */
typedef struct tkvi_call {
    tkv_cache *kv;
    const tkv_attend_params *p;
    const tkvi_plan *plan; /* plan of the requested layer; the blocks belong to layer plan->stored */
    const tkv_rows *rows;
    tkv_rows one;
    int n_rows, window;
    int heads_per_kv;
    int first_kv_head, n_kv_heads; /* those of the call */
    const char *why[2]; /* why the call is refused: what stands before a number, and what stands after it */
    int64_t number;
    const tkvi_prefill *many; /* prefill kernels; NULL: work tiles of at most TKVI_ROWS rows */
    int tile;                 /* rows of a work tile */
    int most_splits;          /* of a work tile */
    int view_rows;            /* most rows that consumers see at once: 8, or fewer to keep queries whole */
    float scale;
    ptrdiff_t q_row, q_head, out_row, out_head, mask_stride, cells_stride, bits_stride, score_stride;
    tkvi_fetch_buffer *room; /* the task's buffer for offloaded records; NULL: no block is offloaded */
    tkvi_plain_rows *plain;  /* the task's; NULL: no token has moved */
    int *failed;             /* bits of tkvi_failure, shared by all tasks */
    const tkvi_consumer *const *consumer;    /* [n_consumers]; NULL: a switch leaves it out */
    int n_consumers;                         /* 0: none */
    unsigned observing[TKVI_OBSERVES_KINDS]; /* by kind, consumers that take part: bit i for consumer[i] */
    unsigned want_far;                       /* those that want far_attention */
} tkvi_call;

/* 1 if the call has prefill kernels. */
static int tkvi_has_prefill(const tkvi_call *c) { return TKVI_HAS_PREFILL && c->many; }

/* Errors with blocks outside RAM. Tasks then skip their remaining work, and the call fails. */
typedef enum tkvi_failure { TKVI_FAILED_IO = 1, TKVI_FAILED_DATA = 2, TKVI_FAILED_ROWS = 4 } tkvi_failure;

static int tkvi_failed(const tkvi_call *c) {
#if defined(__GNUC__) || defined(__clang__)
    return TKVI_HAS_BLOCKS_OUTSIDE_RAM && c->room && __atomic_load_n(c->failed, __ATOMIC_RELAXED);
#else
    return TKVI_HAS_BLOCKS_OUTSIDE_RAM && c->room && *c->failed;
#endif
}

static void tkvi_fail_call(const tkvi_call *c, tkv_status st) {
    const int bit = st == TKV_ERR_IO     ? TKVI_FAILED_IO
                    : st == TKV_ERR_DATA ? TKVI_FAILED_DATA
                                         : TKVI_FAILED_ROWS;
#if defined(__GNUC__) || defined(__clang__)
    (void)__atomic_fetch_or(c->failed, bit, __ATOMIC_RELAXED);
#else
    *c->failed |= bit;
#endif
}

/* Index of the first query of a batch entry. Queries with a position of their own are newer than all tokens. */
static int tkvi_first_query(const tkvi_call *c, int item) {
    const int len = tkvi_list_of(c->kv, c->rows[item].seq, c->plan->stored_layer)->len;
    if (c->p->query_positions) return len;
    return c->p->first_queries ? c->p->first_queries[item] : len - c->rows[item].n;
}

/* The least index that n queries from index `query` on see, sinks beyond the window aside; below `expired` if they
 * would see an expired token. Expired tokens have positions before those of the first block that may expire. positions:
 * NULL, or [n] of queries that are no tokens of the list. */
static int tkvi_oldest_seen(const tkv_cache *kv, int seq, int layer, int query, int n, int window,
                            const int *positions) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const int first = tkvi_first_to_expire(kv, layer, list, ids);
    int i, row, lowest = TKVI_FOREVER, oldest = list->len;
    if (!window) return 0;
    for (i = list->n; i > 0 && tkvi_block_end(kv, list, ids, i - 1) > query; i--)
        if (tkvi_block_start(kv, ids, i - 1) < query + n)
            lowest = tkvi_min(lowest, tkvi_max(tkvi_block_start(kv, ids, i - 1), query) +
                                          kv->pool.entry[ids[i - 1]].shift);
    for (row = 0; positions && row < n; row++) lowest = tkvi_min(lowest, positions[row]);
    lowest -= window - 1;
    if (list->n == 0 || !tkvi_has_moved(list)) return tkvi_max(0, positions ? lowest : query + 1 - window);
    if (query < list->expired && (i == list->n || tkvi_block_start(kv, ids, i) > query))
        return list->expired - 1; /* the first query itself has expired */
    for (i = list->n; i-- > first;) {
        const int start = tkvi_block_start(kv, ids, i), shift = kv->pool.entry[ids[i]].shift;
        if (tkvi_block_end(kv, list, ids, i) + shift > lowest)
            oldest = tkvi_min(oldest, lowest > start + shift ? lowest - shift : start);
    }
    return list->expired && list->expired_end > lowest ? list->expired - 1 : oldest;
}

/* Row of q, out, masks and lse of the first query of a batch entry. before: queries of the entries before it. */
static int tkvi_first_row(const tkv_attend_params *p, int item, int before) {
    return p->first_rows ? p->first_rows[item] : before;
}

/* The greatest of query_positions of a batch entry. before, n: queries of the entries before it, and its own. */
static int tkvi_newest_position(const tkv_attend_params *p, int item, int before, int n) {
    int query, newest = -1;
    for (query = 0; query < n; query++)
        newest = tkvi_max(newest, p->query_positions[tkvi_first_row(p, item, before) + query]);
    return newest;
}

/* Refuses the call with a sentence: `what`, the number, `more`. */
static tkv_status tkvi_refuse_call(tkvi_call *c, tkv_status st, const char *what, int64_t number,
                                   const char *more) {
    if (!TKVI_HAS_REPORTS) return st;
    c->why[0] = what;
    c->why[1] = more;
    c->number = number;
    return st;
}

/* Checks first_rows, row_ends and query_positions of a batch entry. first: index of its first query. len: tokens of
 * the sequence. */
static tkv_status tkvi_check_row_params(tkvi_call *c, int item, int before, int first, int n, int len) {
    const tkv_attend_params *p = c->p;
    int query;
    if (n > TKVI_FOREVER - before) return tkvi_refuse_call(c, TKV_ERR_ARG, "too many queries", 0, NULL);
    if (p->first_rows && (p->first_rows[item] < 0 || p->first_rows[item] > TKVI_FOREVER - n))
        return tkvi_refuse_call(c, TKV_ERR_ARG, "first_rows has", p->first_rows[item], "");
    for (query = 0; p->row_ends && !p->non_causal && query < n; query++) {
        const int end = p->row_ends[tkvi_first_row(p, item, before) + query];
        if (end <= first + query || end > len)
            return tkvi_refuse_call(c, TKV_ERR_ARG, "row_ends has", end,
                                    ": more than the index of the query, at most the length");
    }
    for (query = 0; p->query_positions && query < n; query++) {
        const int position = p->query_positions[tkvi_first_row(p, item, before) + query];
        if (position < 0 || position >= TKVI_POSITIONS)
            return tkvi_refuse_call(c, TKV_ERR_ARG, "query_positions has", position, ": 0 to 2^30 - 1");
    }
    return TKV_OK;
}

/* Checks that all columns of mask_cells are in the mask. */
static tkv_status tkvi_check_cells(tkvi_call *c) {
    int item, j;
    for (item = 0; item < c->n_rows; item++) {
        const int len = tkvi_list_of(c->kv, c->rows[item].seq, c->plan->stored_layer)->len;
        const int *cells = c->p->mask_cells + item * c->cells_stride;
        for (j = 0; j < len; j++)
            if (cells[j] < 0 || cells[j] >= c->mask_stride)
                return tkvi_refuse_call(c, TKV_ERR_ARG, "mask_cells has", cells[j], ": 0 to mask_stride - 1");
    }
    return TKV_OK;
}

/* Checks what its sequence must have for an entry of the batch. before: queries of the entries before it. */
static tkv_status tkvi_check_call_entry(tkvi_call *c, int item, int before) {
    const tkv_cache *kv = c->kv;
    const tkv_attend_params *p = c->p;
    const int seq = c->rows[item].seq, n = c->rows[item].n, layer = c->plan->stored_layer;
    const tkvi_list *list;
    tkv_status st;
    int oldest; /* least index that a query sees */
    int len, first, end;
    if (seq < 0 || seq >= kv->tables.cfg.limits.max_seqs)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "there is no sequence", seq, "");
    if (n < 0) return tkvi_refuse_call(c, TKV_ERR_ARG, "n is", n, "; it must not be negative");
    list = tkvi_list_of(kv, seq, layer);
    len = list->len;
    first = tkvi_first_query(c, item);
    if (p->first_queries && first < 0)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "first_queries has", first, "");
    if (p->first_queries ? n > len - first : !p->non_causal && first < 0)
        return tkvi_refuse_call(c, TKV_ERR_RANGE, "more queries than tokens: append to sequence", seq,
                                " first");
    st = tkvi_check_row_params(c, item, before, first, n, len);
    if (st) return st;
    /* The first query's keys can have expired: the window is wider than the layer's, or the query too old. */
    oldest =
        tkvi_oldest_seen(kv, seq, layer, first, n, c->window,
                         p->query_positions ? p->query_positions + tkvi_first_row(p, item, before) : NULL);
    if (list->expired && n && oldest < list->expired)
        return tkvi_refuse_call(c, TKV_ERR_RANGE, "a query sees expired tokens of sequence", seq, "");
    end = p->non_causal || p->row_ends ? len : tkvi_min(len, first + n);
    if (p->query_positions && !p->non_causal && !tkvi_has_moved(list))
        end = tkvi_min(len, tkvi_newest_position(p, item, before, n) + 1);
    if (TKVI_HAS_DISCARD && kv->pool.n_discarded && n && tkvi_sees_discarded(kv, seq, layer, oldest, end))
        return tkvi_refuse_call(c, TKV_ERR_NO_SOURCE, "a query sees discarded tokens of sequence", seq,
                                ": tkv_seq_recompute brings them back");
    return TKV_OK;
}

/* Checks all parameters that are not of one entry of the batch. longest: tokens of the longest sequence. */
static tkv_status tkvi_check_params(tkvi_call *c, int longest) {
    const tkv_attend_params *p = c->p;
    int i;
    if (!p->q || !p->out) return tkvi_refuse_call(c, TKV_ERR_ARG, "q or out is missing", 0, NULL);
    if (p->scores && !p->lse) return tkvi_refuse_call(c, TKV_ERR_ARG, "scores need lse", 0, NULL);
    if ((unsigned)p->q_type > TKV_TYPE_BF16)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "q_type is", p->q_type, ": no tkv_type");
    if ((unsigned)p->out_type > TKV_TYPE_BF16)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "out_type is", p->out_type, ": no tkv_type");
    if ((unsigned)p->mask_type > TKV_TYPE_BF16)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "mask_type is", p->mask_type, ": no tkv_type");
    if (p->n_mask_bits < 0 ||
        (p->mask_bits && (!p->n_mask_bits || p->n_mask_bits > c->kv->tables.cfg.limits.max_tokens)))
        return tkvi_refuse_call(c, TKV_ERR_ARG, "n_mask_bits is", p->n_mask_bits, ": 1 to limits.max_tokens");
    if (!tkvi_is_finite(p->scale)) return tkvi_refuse_call(c, TKV_ERR_ARG, "scale is not finite", 0, NULL);
    if (!tkvi_is_finite(p->softcap) || p->softcap < 0.0f)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "softcap is negative or not finite", 0, NULL);
    for (i = 0; p->alibi_slopes && i < c->plan->geometry.n_heads; i++)
        if (!tkvi_is_finite(p->alibi_slopes[i]))
            return tkvi_refuse_call(c, TKV_ERR_ARG, "the slope of head", i, " is not finite");
    if (p->scores && c->score_stride < longest)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "score_stride is", c->score_stride,
                                ": less than the longest length");
    return p->mask && p->mask_cells ? tkvi_check_cells(c) : TKV_OK;
}

static tkv_status tkvi_call_init(tkvi_call *c, tkv_cache *kv, const tkv_attend_params *p) {
    const tkv_config *cfg;
    const tkvi_geometry *g;
    int i, longest = 0, n_queries = 0;
    int64_t rows = 0;
    memset(c, 0, sizeof *c);
    if (!kv || !p)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "the cache or the parameters are missing", 0, NULL);
    cfg = &kv->tables.cfg;
    c->most_splits = TKVI_MAX_TILE_SPLITS;
    c->kv = kv;
    c->p = p;
    c->one.seq = p->seq;
    c->one.n = p->n;
    c->rows = p->batch ? p->batch : &c->one;
    c->n_rows = p->batch ? p->n_batch : 1;
    if (p->layer < 0 || p->layer >= cfg->model.n_layers || kv->tables.plan[p->layer].stored_layer < 0)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "there is no layer", p->layer, " with a cache");
    if (c->n_rows < 0 || c->n_rows > cfg->limits.max_seqs)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "n_batch is", c->n_rows, ": 0 to limits.max_seqs");
    c->plan = &kv->tables.plan[p->layer];
    if (p->window < TKV_OFF) return tkvi_refuse_call(c, TKV_ERR_ARG, "window is", p->window, "");
    g = &c->plan->geometry;
    c->heads_per_kv = g->n_heads / g->n_kv_heads;
    c->first_kv_head = p->first_kv_head;
    if (p->first_kv_head < 0 || p->first_kv_head >= g->n_kv_heads || p->n_kv_heads < 0 ||
        p->n_kv_heads > g->n_kv_heads - p->first_kv_head)
        return tkvi_refuse_call(c, TKV_ERR_ARG, "first_kv_head and n_kv_heads reach beyond", g->n_kv_heads,
                                " KV heads");
    if (p->query_positions && (p->first_queries || p->row_ends))
        return tkvi_refuse_call(c, TKV_ERR_ARG, "query_positions exclude first_queries and row_ends", 0,
                                NULL);
    c->n_kv_heads = p->n_kv_heads ? p->n_kv_heads : g->n_kv_heads - p->first_kv_head;
    c->tile = c->view_rows = tkvi_rows_of(tkvi_max(g->k_pad, g->v_pad));
    c->window = p->window == TKV_OFF ? 0 : p->window ? p->window : c->plan->window;
    for (i = 0; i < c->n_rows; i++) {
        const tkv_status st = tkvi_check_call_entry(c, i, n_queries);
        if (st) return st;
        rows += (int64_t)c->rows[i].n * g->n_heads;
        if (rows > TKVI_FOREVER) return tkvi_refuse_call(c, TKV_ERR_ARG, "too many queries", 0, NULL);
        n_queries += c->rows[i].n;
        longest = tkvi_max(longest, tkvi_list_of(kv, c->rows[i].seq, c->plan->stored_layer)->len);
    }
    c->scale = p->scale != 0.0f ? p->scale : g->scale;
    c->q_head = p->q_head_stride ? p->q_head_stride : g->head_dim;
    c->q_row = p->q_row_stride ? p->q_row_stride : (ptrdiff_t)g->n_heads * g->head_dim;
    c->out_head = p->out_head_stride ? p->out_head_stride : g->v_head_dim;
    c->out_row = p->out_row_stride ? p->out_row_stride : (ptrdiff_t)g->n_heads * g->v_head_dim;
    c->mask_stride = p->mask_stride ? p->mask_stride : longest;
    c->cells_stride = p->mask_cells_stride ? p->mask_cells_stride : longest;
    c->bits_stride =
        p->mask_bits_stride ? p->mask_bits_stride : p->n_mask_bits / 64 + (p->n_mask_bits % 64 > 0);
    c->score_stride = p->score_stride ? p->score_stride : longest;
    return tkvi_check_params(c, longest);
}

/* Finds the consumers that take part in the call. */
static void tkvi_call_consumers(tkvi_call *c, const tkvi_consumer *const *consumer, int n) {
    int i;
    c->consumer = consumer;
    c->n_consumers = n;
    for (i = 0; i < n; i++) {
        const int wants = consumer[i] ? consumer[i]->wants(c->kv, c->p, c->plan->stored_layer) : 0;
        if (wants) c->observing[consumer[i]->observes] |= 1u << i;
        if (wants & TKVI_WANTS_FAR_SUMS) c->want_far |= 1u << i;
        if (wants & TKVI_WANTS_WHOLE_QUERIES && c->heads_per_kv < c->view_rows)
            c->view_rows -= c->view_rows % c->heads_per_kv;
    }
    c->tile = c->view_rows;
}

/* >>work tile: query rows of one KV head of one sequence */
typedef struct tkvi_work_tile {
    const tkvi_call *call;
    const tkvi_list *list;
    const uint32_t *ids;
    int seq_row;             /* row of the sequence's first query in q and out */
    int item;                /* entry of the batch */
    int n_queries, head;     /* queries of the sequence; KV head */
    int first, rows;         /* range of the n_queries * heads_per_kv rows (tkvi_query_of) */
    int k_pad, v_pad;        /* head dimensions, rounded up to 16 */
    int v_first;             /* channels v_first .. v_first + v_pad - 1 of V are summed */
    int chunk, n_chunks;     /* blocks per split; number of splits */
    tkvi_sight sight;        /* what queries see by causality and window */
    int first_end, last_end; /* least and greatest end of a query */
    int lowest, highest;     /* least and greatest position of a query */
    int shift[TKVI_PREFILL]; /* of each row's query: its position less its index */
    int end[TKVI_PREFILL];   /* indices from here on are hidden from the row */
    int changes;             /* 1: softcap, ALiBi or masks change the scores */
    uint32_t far_rows;       /* bit r: row r adds to far_attention */
} tkvi_work_tile;

/* Row r of a work tile: its query, and its query head. */
static int tkvi_query_of(const tkvi_work_tile *u, int r) { return (u->first + r) / u->call->heads_per_kv; }

static int tkvi_head_of(const tkvi_work_tile *u, int r) {
    return u->head * u->call->heads_per_kv + (u->first + r) % u->call->heads_per_kv;
}

/* Index and position of the query of row r. */
static int tkvi_index_of(const tkvi_work_tile *u, int r) {
    return u->sight.first_query + tkvi_query_of(u, r);
}

static int tkvi_row_position(const tkvi_work_tile *u, int r) { return tkvi_index_of(u, r) + u->shift[r]; }

/* The end of the blocks of a split. */
static int tkvi_split_end(const tkvi_work_tile *u, int chunk) {
    return tkvi_min(u->list->n, (chunk + 1) * u->chunk);
}

/* The indices of the keys in block i that row r sees by causality and window: low .. high-1. */
static void tkvi_visible(const tkvi_work_tile *u, int i, int r, int *low, int *high) {
    tkvi_visible_in(u->call->kv, u->list, u->ids, i, &u->sight, u->end[r], tkvi_row_position(u, r), low,
                    high);
}

/* As tkvi_visible, for keys that some row sees (all 0), or that all rows see (all 1). */
static void tkvi_visible_rows(const tkvi_work_tile *u, int i, int all, int *low, int *high) {
    int none;
    tkvi_visible_in(u->call->kv, u->list, u->ids, i, &u->sight, all ? u->first_end : u->last_end,
                    all ? u->lowest : u->highest, &none, high);
    tkvi_visible_in(u->call->kv, u->list, u->ids, i, &u->sight, u->last_end, all ? u->highest : u->lowest,
                    low, &none);
}

/* Sets what depends on the indices and positions of the tile's queries. */
static void tkvi_place_rows(tkvi_work_tile *u) {
    const tkv_cache *kv = u->call->kv;
    const int *row_ends = u->call->p->row_ends, *positions = u->call->p->query_positions;
    int r;
    u->first_end = u->lowest = TKVI_FOREVER;
    u->last_end = u->highest = 0;
    for (r = 0; r < u->rows; r++) {
        const int index = tkvi_index_of(u, r), row = u->seq_row + tkvi_query_of(u, r),
                  position = positions ? positions[row] : tkvi_index_position(kv, u->list, u->ids, index);
        u->shift[r] = position - index;
        u->end[r] = positions ? u->list->len : row_ends ? row_ends[row] : index + 1;
        u->first_end = tkvi_min(u->first_end, u->end[r]);
        u->last_end = tkvi_max(u->last_end, u->end[r]);
        u->lowest = tkvi_min(u->lowest, position);
        u->highest = tkvi_max(u->highest, position);
    }
}

/* The rows first .. first + n - 1 of a work tile as a tile. */
static tkvi_work_tile tkvi_some_rows(const tkvi_work_tile *u, int first, int n) {
    tkvi_work_tile some = *u;
    some.first += first;
    some.rows = n;
    tkvi_place_rows(&some);
    return some;
}

/* The rows from `first` on as a work tile of at most call->view_rows rows. */
static tkvi_work_tile tkvi_eight_rows(const tkvi_work_tile *u, int first) {
    return tkvi_some_rows(u, first, tkvi_min(u->call->view_rows, u->rows - first));
}

/* Fills in what tkvi_consumer.sample reads. The tile has at most 8 rows. */
static void tkvi_view_init(const tkvi_work_tile *u, tkvi_tile_view *v) {
    int r;
    v->kv = u->call->kv;
    v->params = u->call->p;
    v->list = u->list;
    v->ids = u->ids;
    v->seq = u->call->rows[u->item].seq;
    v->head = u->head;
    v->layer = u->call->p->layer;
    v->stored = u->call->plan->stored_layer;
    v->rows = u->rows;
    v->tile = u;
    v->sight = u->sight;
    for (r = 0; r < u->rows; r++) {
        v->index[r] = tkvi_index_of(u, r);
        v->position[r] = tkvi_row_position(u, r);
        v->end[r] = u->end[r];
    }
}

/* Bits of the rows that add to far_attention. */
static TKVI_NOINLINE uint32_t tkvi_far_rows(const tkvi_work_tile *u) {
    const tkvi_call *c = u->call;
    uint32_t rows = 0;
    int first, i;
    for (first = 0; first < u->rows; first += c->view_rows) {
        const tkvi_work_tile eight = tkvi_eight_rows(u, first);
        tkvi_tile_view v;
        tkvi_view_init(&eight, &v);
        for (i = 0; i < c->n_consumers; i++)
            if (c->want_far >> i & 1) rows |= (uint32_t)c->consumer[i]->sample(&v) << first;
    }
    return rows;
}

static int tkvi_tiles_of(const tkvi_call *c, int n_queries) {
    return (n_queries * c->heads_per_kv + c->tile - 1) / c->tile;
}

static void tkvi_work_tile_init(tkvi_work_tile *u, const tkvi_call *c, int item, int seq_row, int head,
                                int tile) {
    const int seq = c->rows[item].seq;
    u->call = c;
    u->list = tkvi_list_of(c->kv, seq, c->plan->stored_layer);
    u->ids = tkvi_ids(c->kv, seq, c->plan->stored_layer);
    u->item = item;
    u->seq_row = seq_row;
    u->n_queries = c->rows[item].n;
    u->head = head;
    u->first = tile * c->tile;
    u->rows = tkvi_min(c->tile, u->n_queries * c->heads_per_kv - u->first);
    u->k_pad = c->plan->geometry.k_pad;
    u->v_pad = c->plan->geometry.v_pad;
    u->v_first = 0;
    u->chunk = tkvi_max(TKVI_MIN_SPLIT_BLOCKS, (u->list->n + c->most_splits - 1) / c->most_splits);
    u->n_chunks = (u->list->n + u->chunk - 1) / u->chunk;
    u->sight.window = c->window;
    u->sight.sees_sinks = c->plan->sees_sinks;
    u->sight.sinks = u->sight.sees_sinks ? u->list->sinks : 0;
    u->sight.non_causal = c->p->non_causal;
    u->sight.first_query = tkvi_first_query(c, item);
    tkvi_place_rows(u);
    u->changes = c->p->softcap > 0.0f || c->p->alibi_slopes || c->p->mask || c->p->mask_bits;
    u->far_rows = c->want_far ? tkvi_far_rows(u) : 0;
}

/* Query rows of a work tile, scaled and padded with zeros; the reference key; each row's origin. */
typedef struct tkvi_queries {
    float q
        [TKVI_ROW_CHANNELS]; /* [rows][k_pad] turned back by `turned`, as blocks that moved by so much see them */
    float ref[TKV_MAX_HEAD_DIM];
    int turned;
    tkvi_reference reference;
    float origin[TKVI_ROWS];
    const uint8_t *order;          /* order of channels in `sorted`; NULL: `sorted` is not filled in */
    int sorted_turned;             /* as `turned`, of `sorted` */
    float sorted[TKVI_ROW_FLOATS]; /* [rows + 1][k_pad] queries, then the reference key */
} tkvi_queries;

/* Halves of o that the cache's formats need: 1, or 2 with a rotated format. */
static int tkvi_spaces(const tkvi_work_tile *u) { return 1 + u->call->kv->tables.any_rotated; }

/* Floats of a half of o. */
static int tkvi_space_floats(int v_pad) { return tkvi_rows_of(v_pad) * v_pad; }

static tkvi_sums tkvi_sums_in(float *memory, int v_pad) {
    tkvi_sums s;
    s.o = memory;
    s.m = memory + 2 * tkvi_space_floats(v_pad);
    s.l = s.m + TKVI_ROWS;
    s.far_attention = s.l + TKVI_ROWS;
    s.any = s.far_attention + TKVI_ROWS;
    return s;
}

/* Layout of the work tile's KV head in block i. *bytes: its record in RAM, or in attached bytes that were verified.
 * NULL: it must be fetched. */
static const tkvi_record *tkvi_record_of(const tkvi_work_tile *u, int i, const uint8_t **bytes) {
    const tkvi_pool *pool = &u->call->kv->pool;
    const tkvi_block *b = tkvi_block_of(u->call->kv, u->ids[i]);
    const tkvi_record *r = &u->call->kv->tables.layout[b->layout].record[u->head];
    *bytes = tkvi_is_offloaded(b) ? tkvi_find_verified(pool, pool->entry[u->ids[i]].block)
                                  : tkvi_block_bytes(pool, b);
    if (*bytes) *bytes += r->at;
    return r;
}

/* Fetches a side of a record that is not in RAM. Before K, it asks the store to prefetch the record of the next block.
 * Returns NULL on failure, and the call then fails. */
static TKVI_NOINLINE const uint8_t *tkvi_fetch_side(const tkvi_work_tile *u, int i, tkv_side side) {
    const tkv_cache *kv = u->call->kv;
    const uint8_t *bytes;
    tkv_status st;
    if (tkvi_failed(u->call)) return NULL;
    if (side == TKV_K && i + 1 < u->list->n && tkvi_is_offloaded(tkvi_block_of(kv, u->ids[i + 1])) &&
        !tkvi_is_discarded(tkvi_block_of(kv, u->ids[i + 1]))) {
        int low, high;
        tkvi_visible_rows(u, i + 1, 0, &low, &high);
        if (tkvi_block_start(kv, u->ids, i + 1) < high) tkvi_prefetch_record(kv, u->ids[i + 1], u->head);
    }
    u->call->room->seq = u->call->rows[u->item].seq;
    st = tkvi_read_piece(kv, u->ids[i], TKVI_ITSELF, u->head, side, u->call->room, &bytes);
    if (!st) return bytes;
    tkvi_fail_call(u->call, st);
    return NULL;
}

/* The record of a block, and of the next one. bytes, next_bytes: as *bytes of tkvi_record_of. */
typedef struct tkvi_block_view {
    int block; /* its number in the list */
    const tkvi_record *record, *next;
    const uint8_t *bytes, *next_bytes; /* next_bytes: for the CPU's prefetch; NULL after the last block */
} tkvi_block_view;

/* Views block i. b->block: the block that was viewed before, or -1. */
static void tkvi_view_block(const tkvi_work_tile *u, int i, tkvi_block_view *b) {
    if (b->block >= 0 && b->block + 1 == i) {
        b->record = b->next;
        b->bytes = b->next_bytes;
    } else {
        b->record = tkvi_record_of(u, i, &b->bytes);
    }
    b->block = i;
    b->next = NULL;
    b->next_bytes = NULL;
    if (i + 1 < u->list->n) b->next = tkvi_record_of(u, i + 1, &b->next_bytes);
}

/* A side of the record of block i, in RAM or fetched. The next fetch overwrites a fetched side. Returns NULL if the
 * fetch failed, and the call then fails. */
static const uint8_t *tkvi_bytes_of(const tkvi_work_tile *u, int i, tkv_side side) {
    const uint8_t *bytes;
    const tkvi_record *r = tkvi_record_of(u, i, &bytes);
    if (TKVI_HAS_BLOCKS_OUTSIDE_RAM && !bytes) return tkvi_fetch_side(u, i, side);
    return side == TKV_K ? bytes : bytes + r->v_at;
}

/* The reference key: per channel the median of three recent keys if they lie close together, else 0. It finds a
 * bias of 600 on all keys. It does not mistake one huge key for a bias. Keys of tokens that are gone do not count. */
static void tkvi_reference_key(const tkvi_work_tile *u, float *ref) {
    float key[3][TKV_MAX_HEAD_DIM];
    int last = u->list->n - 1, from, i, c;
    memset(ref, 0, TKV_MAX_HEAD_DIM * sizeof *ref);
    if (last < 0) return;
    from =
        last > tkvi_anchors_of(u->list) && tkvi_tier_at(u->list, last - 1) == TKV_TIER_HOT ? last - 1 : last;
    for (i = 0; i < 3; i++) { /* first and last key of block `from`, then the newest key */
        const int block = i < 2 ? from : last, n = tkvi_block_tokens(u->call->kv, u->list, u->ids, block);
        uint64_t live = tkvi_live_mask(&u->call->kv->pool.entry[u->ids[block]], n);
        const int is_second = i == 1 && from == last && n > 2 && (live & (live - 1));
        int slot = i ? n - 1 : 0;
        const uint8_t *bytes;
        const tkvi_record *rec = tkvi_record_of(u, block, &bytes);
        if (tkvi_has_no_source(u->call->kv, tkvi_block_of(u->call->kv, u->ids[block]))) return;
        if (!bytes) bytes = tkvi_bytes_of(u, block, TKV_K);
        if (!bytes) return;
        if (!live) return;
        while (!(live >> slot & 1)) slot += i ? -1 : 1;
        if (is_second) live ^= (uint64_t)1 << slot; /* the newest key is the third one */
        while (!(live >> slot & 1)) slot--;
        tkvi_values(&rec->k, u->call->kv->kernels->simd_ops, bytes, slot, 1, key[i], 0);
    }
    for (c = 0; c < u->call->plan->geometry.head_dim; c++) {
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
        for (i = 0; i < u->k_pad; i++) q->sorted[r * u->k_pad + i] = from[tkvi_order_at(order, u->k_pad, i)];
    }
}

/* `turned` of the newest block. */
static int tkvi_newest_turned(const tkvi_work_tile *u) {
    return TKVI_HAS_MOVES && u->list->n ? u->call->kv->pool.entry[u->ids[u->list->n - 1]].turned : 0;
}

/* Finds the reference key of a work tile. */
static void tkvi_reference_init(const tkvi_work_tile *u, tkvi_reference *ref) {
    ref->turned = tkvi_newest_turned(u);
    tkvi_reference_key(u, ref->newest);
    if (!tkvi_has_moved(u->list)) return;
    memcpy(ref->moved, ref->newest, sizeof ref->moved);
    if (ref->turned) tkvi_rope_rotate(u->call->plan->rope, ref->turned, 0, ref->moved);
}

/* The rotation of queries for blocks that moved by `turned`, which is not 0. */
static tkvi_angles tkvi_turn_back(const tkvi_work_tile *u, int turned, int *hint, tkvi_turn *room) {
    const tkv_cache *kv = u->call->kv;
    return tkvi_find_angles(&kv->tables, &kv->turns, u->call->plan->rope, turned, hint, room);
}

/* The reference key as a block that moved by `turned` sees it. turn: of tkvi_turn_back, or NULL for 0. */
static void tkvi_turn_reference(const tkvi_work_tile *u, const tkvi_reference *from, int turned,
                                const tkvi_angles *turn, float *ref) {
    memcpy(ref, turned == from->turned ? from->newest : from->moved, (size_t)u->k_pad * sizeof *ref);
    if (TKVI_HAS_MOVES && turn && turned != from->turned)
        tkvi_turn_apply(u->call->plan->rope, turn->cosine, turn->sine, ref);
}

/* NaN: the origin of a row whose query is not finite. Such a row sees no key. Test for it with tkvi_is_finite. */
static float tkvi_no_origin(void) { return tkvi_from_bits(0x7fc00000u); }

/* Row r of a work tile as the caller gave it: [k_pad], padded with zeros. */
static void tkvi_copy_query(const tkvi_work_tile *u, int r, float *row) {
    const tkvi_call *c = u->call;
    const ptrdiff_t at = (u->seq_row + tkvi_query_of(u, r)) * c->q_row + tkvi_head_of(u, r) * c->q_head;
    const int dim = c->plan->geometry.head_dim;
    int i;
    if (c->p->q_type == TKV_TYPE_F32) memcpy(row, (const char *)c->p->q + 4 * at, (size_t)dim * 4);
    else
        for (i = 0; i < dim; i++) row[i] = tkvi_element(c->p->q, c->p->q_type, at + i);
    for (i = dim; i < u->k_pad; i++) row[i] = 0.0f;
}

/* Loads row r of a work tile: [k_pad], turned, scaled, padded with zeros. turn: NULL for none. Returns its origin,
 * scale q.ref. */
static float tkvi_load_query(const tkvi_work_tile *u, int r, const tkvi_angles *turn, const float *ref,
                             float *row) {
    const tkvi_call *c = u->call;
    int i, k;
    double sum[16] = {0.0}, origin = 0.0;
    uint32_t exponent[16] = {0}, most = 0;
    tkvi_copy_query(u, r, row);
    if (turn) tkvi_turn_apply(c->plan->rope, turn->cosine, turn->sine, row);
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

/* Fills in the rows from which tkvi_turn_queries turns queries and reference key, in an order of channels. */
static void tkvi_set_plain_rows(const tkvi_work_tile *u, tkvi_queries *q, const uint8_t *order) {
    const tkvi_rope *rope = u->call->plan->rope;
    tkvi_plain_rows *p = u->call->plain;
    float row[TKV_MAX_HEAD_DIM], sign[TKV_MAX_HEAD_DIM];
    int16_t channel[TKV_MAX_HEAD_DIM], partner[TKV_MAX_HEAD_DIM];
    int i, r, pair;
    for (i = 0; i < u->k_pad; i++) {
        channel[i] = (int16_t)(order ? tkvi_order_at(order, u->k_pad, i) : i);
        partner[i] = (int16_t)tkvi_partner_of(rope, channel[i], &pair, &sign[i]);
        p->pair[i] = (uint8_t)pair;
    }
    for (r = 0; r <= u->rows; r++) {
        float *plain = p->rows + r * u->k_pad, *other = plain + TKVI_ROW_FLOATS;
        if (r == u->rows) memcpy(row, q->reference.moved, (size_t)u->k_pad * sizeof *row);
        else if (tkvi_is_finite(q->origin[r])) tkvi_copy_query(u, r, row);
        else memset(row, 0, sizeof row);
        for (i = 0; i < u->k_pad; i++) {
            plain[i] = row[channel[i]];
            other[i] = row[partner[i]] * sign[i];
        }
    }
    p->order = order;
    p->is_set = 1;
}

/* Turns the queries for blocks that moved by `turned`: q.R(d)k = (R(-d)q).k. Channels get the order of the block's K
 * side, or, if it is NULL, that of the model. The origins stay, since (R(-d)q).(R(-d)ref) = q.ref. */
static TKVI_NOINLINE void tkvi_turn_queries(const tkvi_work_tile *u, tkvi_queries *q, int turned,
                                            const uint8_t *order) {
    tkvi_plain_rows *p = u->call->plain;
    const tkvi_reference *from = &q->reference;
    float *const ref = order ? q->sorted + u->rows * u->k_pad : q->ref;
    tkvi_turned_rows t;
    tkvi_turn room;
    int i;
    if (!p->is_set || p->order != order) tkvi_set_plain_rows(u, q, order);
    if (order) {
        q->order = order;
        q->sorted_turned = turned;
    } else {
        q->turned = turned;
    }
    t.plain = p->rows;
    t.partner = p->rows + TKVI_ROW_FLOATS;
    t.pair = p->pair;
    t.n_rows = u->rows;
    t.n = u->k_pad;
    t.scale = u->call->scale;
    t.out = order ? q->sorted : q->q;
    t.lanes = u->call->plan->rope->lanes;
    if (TKVI_HAS_MOVES && turned) {
        const tkvi_angles turn = tkvi_turn_back(u, turned, &p->hint, &room);
        t.cosine = turn.cosine;
        t.sine = turn.sine;
    } else {
        for (i = 0; i < t.lanes; i++) {
            room.cosine[i] = 1.0f;
            room.sine[i] = 0.0f;
        }
        t.cosine = room.cosine;
        t.sine = room.sine;
    }
    t.last = ref;
    u->call->kv->kernels->simd_ops->turn_rows(&t);
    for (i = 0; i < u->k_pad && turned == from->turned; i++)
        ref[i] = from->newest[order ? tkvi_order_at(order, u->k_pad, i) : i];
}

/* Makes q->sorted, or without an order q->q, what a block that moved by `turned` sees. */
static void tkvi_show_queries(const tkvi_work_tile *u, tkvi_queries *q, int turned, const uint8_t *order) {
    if (order ? q->order != order || q->sorted_turned != turned : q->turned != turned)
        tkvi_turn_queries(u, q, turned, order);
}

static void tkvi_load_queries(const tkvi_work_tile *u, tkvi_queries *q) {
    tkvi_turn room;
    tkvi_angles turn = {NULL, NULL};
    int r, hint = 0;
    if (u->call->plain) u->call->plain->is_set = u->call->plain->hint = 0;
    q->order = NULL;
    tkvi_reference_init(u, &q->reference);
    q->turned = q->reference.turned;
    if (TKVI_HAS_MOVES && q->turned) turn = tkvi_turn_back(u, q->turned, &hint, &room);
    memcpy(q->ref, q->reference.newest, sizeof q->ref);
    for (r = 0; r < u->rows; r++)
        q->origin[r] = tkvi_load_query(u, r, q->turned ? &turn : NULL, q->ref, q->q + r * u->k_pad);
}

/* >>scores of one block, after softcap, ALiBi, masks and visibility */
/* at[64]: indices of the tokens of block i. Slots without a live token get TKVI_FOREVER, which no query sees. */
static void tkvi_slot_indices(const tkvi_work_tile *u, int i, int *at) {
    const tkv_cache *kv = u->call->kv;
    const int n = tkvi_block_tokens(kv, u->list, u->ids, i);
    const uint64_t there = tkvi_live_mask(&kv->pool.entry[u->ids[i]], n);
    int t;
    for (t = 0; t < TKVI_BLOCK; t++)
        at[t] = there >> t & 1 ? tkvi_slot_index(kv, u->ids[i], t) : TKVI_FOREVER;
}

/* 1: all rows see all indices start .. end - 1 of block i by causality and window. 0: tkvi_visible_rows knows. */
static int tkvi_is_seen(const tkvi_work_tile *u, int i, int start, int end) {
    const int shift = u->call->kv->pool.entry[u->ids[i]].shift;
    if (end <= 0 || end > u->first_end || end + shift > u->lowest + 1) return 0;
    return !u->sight.window || i < u->sight.sinks || start + shift > u->highest - u->sight.window;
}

/* Must scores of block i be hidden? Some rows may not see all its tokens, or some slots have no live token. */
static int tkvi_has_hidden(const tkvi_work_tile *u, int i, int start, int end) {
    const tkv_cache *kv = u->call->kv;
    const tkvi_entry *e = &kv->pool.entry[u->ids[i]];
    int low, high;
    if (e->evicted_mask || e->first_slot || tkvi_block_tokens(kv, u->list, u->ids, i) < TKVI_BLOCK) return 1;
    if (tkvi_is_seen(u, i, start, end)) return 0;
    tkvi_visible_rows(u, i, 1, &low, &high);
    return start < low || end > high;
}

/* The value that an additive mask adds to a score, or TKVI_HIDDEN. NaN is tested by its bits, as comparisons with
 * NaN fail under -ffast-math. */
static float tkvi_mask_bias(float m) {
    if (tkvi_is_nan(m) || m <= TKVI_HIDDEN) return TKVI_HIDDEN;
    return m < -TKVI_HIDDEN ? m : -TKVI_HIDDEN;
}

/* What the call's mask adds to the logit of a row and head for the key with index j. */
static float tkvi_mask_of(const tkvi_call *c, int item, int row, int head, int j) {
    const tkv_attend_params *p = c->p;
    const ptrdiff_t column = p->mask_cells ? p->mask_cells[item * c->cells_stride + j] : j;
    return tkvi_mask_bias(
        tkvi_element(p->mask, p->mask_type, row * c->mask_stride + head * p->mask_head_stride + column));
}

/* The score s of row r for the key with index j in a block with this shift, after softcap, ALiBi and masks. The row
 * must see the key. */
static float tkvi_adjust_score(const tkvi_work_tile *u, int r, float origin, int j, int shift, float s) {
    const tkv_attend_params *p = u->call->p;
    const int query = tkvi_query_of(u, r), row = u->seq_row + query, bit = j - u->list->len + p->n_mask_bits;
    if (p->softcap > 0.0f) s = p->softcap * tanhf((s + origin) / p->softcap);
    if (p->alibi_slopes)
        s += p->alibi_slopes[tkvi_head_of(u, r)] * (float)(j + shift - tkvi_row_position(u, r));
    if (p->mask) {
        const float bias = tkvi_mask_of(u->call, u->item, row, tkvi_head_of(u, r), j);
        if (TKVI_IS_HIDDEN(bias)) return TKVI_HIDDEN;
        s += bias;
    }
    if (p->mask_bits && bit >= 0 && !(p->mask_bits[row * u->call->bits_stride + bit / 64] >> bit % 64 & 1))
        return TKVI_HIDDEN;
    return s;
}

/* Applies softcap, ALiBi, masks and visibility to the 64 scores of row r for block i. at: indices of the slots. */
static void tkvi_adjust_scores(const tkvi_work_tile *u, int r, float origin, int i, const int *at, float *s) {
    const int shift = u->call->kv->pool.entry[u->ids[i]].shift;
    const uint64_t sinks = tkvi_sinks_beyond(u->call->kv, u->ids, i, &u->sight);
    int low, high, t, from[TKVI_BLOCK];
    tkvi_visible(u, i, r, &low, &high);
    if (!tkvi_is_finite(origin)) high = 0;
    for (t = 0; t < TKVI_BLOCK; t++) from[t] = low;
    for (t = 0; t < TKVI_BLOCK && sinks >> t; t++)
        if (sinks >> t & 1) from[t] = 0;
    for (t = 0; t < TKVI_BLOCK && u->changes; t++)
        if (at[t] >= from[t] && at[t] < high) s[t] = tkvi_adjust_score(u, r, origin, at[t], shift, s[t]);
    for (t = 0; t < TKVI_BLOCK; t++) s[t] = at[t] >= from[t] && at[t] < high ? s[t] : TKVI_HIDDEN;
}

/* The record of block i + 1, for the CPU's prefetch. NULL after the last block, and if it is offloaded. */
static const uint8_t *tkvi_next_record(const tkvi_work_tile *u, int i) {
    const uint8_t *bytes = NULL;
    if (i + 1 < u->list->n) (void)tkvi_record_of(u, i + 1, &bytes);
    return bytes;
}

/* End (exclusive) of the indices that rows may see in block i. It is 0 for a block without a source. tkvi_call_init
 * made sure that no row needs it: its tokens were evicted, are anchors, or left the window. */
static int tkvi_visible_end(const tkvi_work_tile *u, int i) {
    const tkv_cache *kv = u->call->kv;
    return tkvi_has_no_source(kv, tkvi_block_of(kv, u->ids[i]))
               ? 0
               : tkvi_block_index_end(kv, u->list, u->ids, i);
}

/* Hides the slots of block i that have no live token. scores: [rows][64] */
static void tkvi_hide_empty_slots(const tkvi_work_tile *u, int i, float *scores) {
    const tkv_cache *kv = u->call->kv;
    const tkvi_entry *e = &kv->pool.entry[u->ids[i]];
    const uint64_t empty = ~tkvi_live_mask(e, tkvi_block_tokens(kv, u->list, u->ids, i));
    int t, r;
    for (t = 0; t < TKVI_BLOCK && empty >> t; t++)
        for (r = 0; r < u->rows && empty >> t & 1; r++) scores[r * TKVI_BLOCK + t] = TKVI_HIDDEN;
}

/* scores: [rows][64] of the viewed block. Returns 0 if no row sees any token of it, or a fetch failed. */
static int tkvi_block_scores(const tkvi_work_tile *u, tkvi_queries *q, const tkvi_block_view *b,
                             float *scores) {
    const tkv_cache *kv = u->call->kv;
    const int i = b->block, start = tkvi_block_start(kv, u->ids, i), end = tkvi_visible_end(u, i);
    const tkvi_record *rec = b->record;
    const uint8_t *bytes = b->bytes;
    const int is_seen = tkvi_is_seen(u, i, start, end);
    int low, high, r;
    if (!is_seen) {
        tkvi_visible_rows(u, i, 0, &low, &high);
        if (tkvi_sinks_beyond(kv, u->ids, i, &u->sight)) low = 0;
        if (end <= low || start >= high) return 0;
    }
    if (!bytes) bytes = tkvi_bytes_of(u, i, TKV_K);
    if (!bytes) return 0;
    if (TKVI_HAS_MOVES && u->call->plain)
        tkvi_show_queries(u, q, kv->pool.entry[u->ids[i]].turned, rec->k.order);
    else if (rec->k.order) tkvi_sort_queries(u, q, rec->k.order);
    kv->kernels->k[rec->k.format->stored](&rec->k, bytes, b->next_bytes, rec->k.order ? q->sorted : q->q,
                                          rec->k.order ? q->sorted + u->rows * u->k_pad : q->ref, u->rows,
                                          tkvi_block_tokens(kv, u->list, u->ids, i),
                                          tkvi_n_limbs(&rec->k, kv->tables.cfg.host.precise), scores);
    if (is_seen && !u->changes) tkvi_hide_empty_slots(u, i, scores);
    else if (u->changes || tkvi_has_hidden(u, i, start, end)) {
        int at[TKVI_BLOCK];
        tkvi_slot_indices(u, i, at);
        for (r = 0; r < u->rows; r++) tkvi_adjust_scores(u, r, q->origin[r], i, at, scores + r * TKVI_BLOCK);
    }
    return 1;
}

/* Does entry i + 1 of the list have other tokens of the block of entry i? A border of a move lies in it. *mask: in and
 * out, the slots of the entries before. */
static int tkvi_has_rest_of_block(const tkvi_work_tile *u, int i, uint64_t *mask) {
    const tkv_cache *kv = u->call->kv;
    const tkvi_entry *a = &kv->pool.entry[u->ids[i]], *b = &kv->pool.entry[u->ids[i + 1]];
    const uint64_t slots = tkvi_live_mask(b, tkvi_block_tokens(kv, u->list, u->ids, i + 1));
    if (a->block != b->block) return 0;
    if (tkvi_is_discarded(&kv->pool.block[a->block])) return 0; /* the model gives the rows of one entry */
    if (!*mask) *mask = tkvi_live_mask(a, tkvi_block_tokens(kv, u->list, u->ids, i));
    if (*mask & slots) return 0; /* copies of tokens */
    *mask |= slots;
    return 1;
}

/* tkvi_block_scores for the viewed block and the entries behind it, before `last`, that have the rest of its tokens:
 * each sees other queries, and the scores of all are one softmax and one product with V. b: out, the last of them.
 * *n_tokens: in and out, slots that have scores. */
static TKVI_NOINLINE int tkvi_joint_scores(const tkvi_work_tile *u, tkvi_queries *q, tkvi_block_view *b,
                                           int last, float *scores, int *n_tokens) {
    TKVI_ALIGNED float more[TKVI_ROWS * TKVI_BLOCK];
    int any = tkvi_block_scores(u, q, b, scores), t, k;
    uint64_t mask = 0;
    while (b->block + 1 < last && tkvi_has_rest_of_block(u, b->block, &mask)) {
        tkvi_view_block(u, b->block + 1, b);
        *n_tokens = tkvi_max(*n_tokens, tkvi_block_tokens(u->call->kv, u->list, u->ids, b->block));
        if (!tkvi_block_scores(u, q, b, any ? more : scores)) continue;
        for (t = 0; t < u->rows * TKVI_BLOCK && any; t += 16)
            for (k = 0; k < 16; k++)
                scores[t + k] = scores[t + k] > more[t + k] ? scores[t + k] : more[t + k];
        any = 1;
    }
    return any;
}

/* >>split: the online softmax over one range of blocks */
/* Bits of the rows that add block i to far_attention. The sink block does not count, nor a block that ends less than
 * TKVI_FAR before the query. */
static uint32_t tkvi_rows_far_from(const tkvi_work_tile *u, int i) {
    const int end = tkvi_block_end(u->call->kv, u->list, u->ids, i);
    uint32_t rows = 0;
    int r;
    for (r = 0; r < u->rows && u->far_rows && i >= u->list->sinks; r++)
        if (end + TKVI_FAR <= tkvi_index_of(u, r)) rows |= u->far_rows & 1u << r;
    return rows;
}

/* Writes |v|^2 of the n tokens of a block, and 0 for the other slots. bytes: of the record's V. Only ratios between the
 * heads of a layer count. So a layer with one head gets 1 for each token, and so does V inside K, whose norms would
 * have to be decoded. A norm beyond 1e15 counts as that: sums of infinities would be NaN, with a weight of 0 too, as
 * tokens have that are gone or not seen. */
static TKVI_NOINLINE void tkvi_value_squares(const tkvi_work_tile *u, const tkvi_record *rec,
                                             const uint8_t *bytes, int n, float *squares) {
    const tkvi_geometry *g = &u->call->plan->geometry;
    const tkvi_simd_ops *simd_ops = u->call->kv->kernels->simd_ops;
    const int at_once = tkvi_max(1, tkvi_min(TKVI_BLOCK, 1024 / g->v_head_dim));
    float x[1024];
    int t, k;
    for (t = 0; t < TKVI_BLOCK; t++) squares[t] = t < n ? 1.0f : 0.0f;
    if (g->n_kv_heads == 1 || tkvi_is_view(&rec->v)) return;
    if (rec->v.format->rotated) tkvi_r_squares(&rec->v, simd_ops, bytes, squares);
    for (t = 0; t < n && !rec->v.format->rotated; t += at_once) {
        const int some = tkvi_min(at_once, n - t);
        tkvi_values(&rec->v, simd_ops, bytes, t, some, x, (size_t)g->v_head_dim);
        for (k = 0; k < some; k++) squares[t + k] = tkvi_sum_of_squares(x + k * g->v_head_dim, g->v_head_dim);
    }
    for (t = 0; t < TKVI_BLOCK; t++) squares[t] = squares[t] < 1e30f ? squares[t] : 1e30f;
}

/* Adds the sums of p^2 |v|^2 of a block to far_attention of `rows`. */
static TKVI_NOINLINE void tkvi_add_far(uint32_t rows, const float *squares, const float *p,
                                       float *far_attention) {
    int r, t, k;
    for (r = 0; rows >> r; r++) {
        const float *row = p + r * TKVI_BLOCK;
        float sum[16] = {0};
        if (!(rows >> r & 1)) continue;
        for (t = 0; t < TKVI_BLOCK; t += 16)
            for (k = 0; k < 16; k++) sum[k] += row[t + k] * row[t + k] * squares[t + k];
        for (k = 0; k < 16; k++) far_attention[r] += sum[k];
    }
}

/* Clears a half of o before its first use. Most splits use one half only. */
static void tkvi_begin_space(const tkvi_work_tile *u, const tkvi_sums *sums, int space) {
    if (sums->any[space] > 0.0f) return;
    sums->any[space] = 1.0f;
    memset(sums->o + space * tkvi_space_floats(u->v_pad), 0, (size_t)(u->rows * u->v_pad) * sizeof(float));
}

/* Attention of all rows over the blocks of split `chunk`, into `sums`. With chunk = n_chunks the sums are empty. */
static TKVI_NOINLINE void tkvi_attend_split(const tkvi_work_tile *u, tkvi_queries *q, int chunk,
                                            const tkvi_sums *sums) {
    const tkv_cache *kv = u->call->kv;
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK], p[TKVI_ROWS * TKVI_BLOCK], squares[TKVI_BLOCK];
    int i, r, space, last = tkvi_split_end(u, chunk), stride = tkvi_space_floats(u->v_pad);
    uint32_t far_rows;
    tkvi_block_view b;
    b.block = -1;
    sums->any[0] = sums->any[1] = 0.0f;
    for (r = 0; r < u->rows; r++) {
        sums->m[r] = TKVI_HIDDEN;
        sums->l[r] = sums->far_attention[r] = 0.0f;
    }
    for (i = chunk * u->chunk; i < last; i++) {
        const tkvi_record *rec;
        const uint8_t *bytes;
        float before[TKVI_ROWS], sum[TKVI_ROWS];
        int n_tokens = tkvi_block_tokens(kv, u->list, u->ids, i), any;
        tkvi_view_block(u, i, &b);
        if (tkvi_has_moved(u->list)) any = tkvi_joint_scores(u, q, &b, last, scores, &n_tokens);
        else any = tkvi_block_scores(u, q, &b, scores);
        i = b.block;
        if (!any) continue;
        memcpy(before, sums->m, sizeof before);
        if (!kv->kernels->softmax_step(scores, u->rows, sums->m, sum, p)) continue;
        for (r = 0; r < u->rows; r++) {
            if (sums->m[r] > before[r] && !TKVI_IS_HIDDEN(before[r])) { /* else o and l are still 0 */
                float shrink = expf(before[r] - sums->m[r]);
                for (space = 0; space < 2; space++)
                    if (sums->any[space] > 0.0f)
                        kv->kernels->scale_add(sums->o + space * stride + r * u->v_pad, shrink, NULL, 0.0f,
                                               u->v_pad);
                sums->l[r] *= shrink;
                sums->far_attention[r] *= shrink * shrink;
            }
            sums->l[r] += sum[r];
        }
        rec = b.record;
        bytes = b.bytes ? b.bytes + rec->v_at : tkvi_bytes_of(u, i, TKV_V);
        if (!bytes) return;
        far_rows = tkvi_rows_far_from(u, i);
        if (far_rows) {
            tkvi_value_squares(u, rec, bytes, n_tokens, squares);
            tkvi_add_far(far_rows, squares, p, sums->far_attention);
        }
        space = rec->v.format->rotated;
        tkvi_begin_space(u, sums, space);
        tkvi_add_values(kv->kernels, &rec->v, bytes, b.next_bytes ? b.next_bytes + rec->v_at : NULL, p,
                        u->rows, n_tokens, kv->tables.cfg.host.precise, sums->o + space * stride);
    }
}

/* Adds row r of `from` to row r of `to`. The two must be sums over different keys. */
static void tkvi_merge_row(const tkvi_work_tile *u, int r, const tkvi_sums *to, const tkvi_sums *from) {
    const tkvi_kernels *kernels = u->call->kv->kernels;
    float a, b;
    int space, first = !(to->l[r] > 0.0f);
    if (!(from->l[r] > 0.0f)) return;
    a = from->m[r] > to->m[r] && !first ? expf(to->m[r] - from->m[r]) : 1.0f;
    b = from->m[r] > to->m[r] || first ? 1.0f : expf(from->m[r] - to->m[r]);
    to->m[r] = b < 1.0f ? to->m[r] : from->m[r];
    to->l[r] = first ? from->l[r] : to->l[r] * a + from->l[r] * b;
    to->far_attention[r] =
        first ? from->far_attention[r] : to->far_attention[r] * a * a + from->far_attention[r] * b * b;
    for (space = 0; space < 2; space++) {
        float *o = to->o + space * tkvi_space_floats(u->v_pad) + r * u->v_pad;
        const float *o2 = from->o + space * tkvi_space_floats(u->v_pad) + r * u->v_pad;
        if (!(from->any[space] > 0.0f)) {
            if (to->any[space] > 0.0f && a < 1.0f) kernels->scale_add(o, a, NULL, 0.0f, u->v_pad);
        } else if (first) {
            memcpy(o, o2, (size_t)u->v_pad * sizeof *o);
        } else {
            kernels->scale_add(o, a, o2, b, u->v_pad);
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

/* Writes out and lse of a work tile's rows, after it adds the sink logits to the sums. rotated: 1 if the second
 * half of o is in use. It is then rotated back first. */
static TKVI_NOINLINE void tkvi_finish(const tkvi_work_tile *u, const float *origins, const tkvi_sums *s,
                                      int rotated) {
    const tkvi_call *c = u->call;
    const int dim = tkvi_min(u->v_pad, c->plan->geometry.v_head_dim - u->v_first);
    int r, i, k;
    float *m = s->m, *l = s->l, *o = s->o;
    for (r = 0; r < u->rows; r++) {
        int head = tkvi_head_of(u, r), query = u->seq_row + tkvi_query_of(u, r), empty = !(l[r] > 0.0f);
        float origin = c->p->softcap > 0.0f || !tkvi_is_finite(origins[r]) ? 0.0f : origins[r];
        float weight = 1.0f, *row = o + r * u->v_pad;
        ptrdiff_t at = query * c->out_row + head * c->out_head + u->v_first;
        if (rotated && !empty) {
            float *turned = o + tkvi_space_floats(u->v_pad) + r * u->v_pad;
            c->kv->kernels->rotate_back(turned, dim);
            c->kv->kernels->scale_add(row, 1.0f, turned, 1.0f, u->v_pad);
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
            c->p->lse[(ptrdiff_t)query * c->plan->geometry.n_heads + head] =
                l[r] > 0.0f ? m[r] + logf(l[r]) + origin : tkvi_from_bits(0xff800000u);
    }
}

/* >>second pass: the keys of sampled rows once more, for all consumers together */
#define TKVI_RANGE_BLOCKS 16 /* blocks per task, where tasks are ranges of blocks */

/* The rows that are scored, as tkvi_consumer.observe gets them. */
typedef struct tkvi_scoring {
    tkvi_work_tile tile; /* rows first, first + 1, ... of the view */
    int first;
    tkvi_queries *q; /* of these rows */
} tkvi_scoring;

/* The consumers that sample rows of a work tile, in one task. */
typedef struct tkvi_observers {
    tkvi_tile_view view;
    unsigned sampled[TKVI_MAX_CONSUMERS];  /* the rows that each consumer samples; 0: it takes no part */
    unsigned observed[TKVI_MAX_CONSUMERS]; /* those of them whose blocks it observes */
    unsigned char *state;                  /* [TKVI_CONSUMER_BYTES] memory of all consumers */
} tkvi_observers;

/* Memory on the stack with two uses, one after the other: sums of a split, then the states of consumers. */
typedef union tkvi_work_memory {
    TKVI_ALIGNED float sums[TKVI_MAX_SUMS_FLOATS];
    unsigned char states[TKVI_CONSUMER_BYTES];
    double aligns; /* the least alignment, also where TKVI_ALIGNED is empty */
} tkvi_work_memory;

/* Does a consumer of `set` sample any row of the tile? */
static int tkvi_is_observed(const tkvi_work_tile *u, unsigned set) {
    const tkvi_call *c = u->call;
    tkvi_tile_view v;
    int i;
    if (!set) return 0;
    tkvi_view_init(u, &v);
    for (i = 0; i < c->n_consumers; i++)
        if (set >> i & 1 && c->consumer[i]->sample(&v)) return 1;
    return 0;
}

/* Lets the consumers of `set` sample rows. Their states go to `memory`. Returns 0 if they sample none. */
static int tkvi_observers_select(tkvi_observers *o, const tkvi_work_tile *u, unsigned set,
                                 tkvi_work_memory *memory) {
    const tkvi_call *c = u->call;
    unsigned any = 0;
    int i;
    if (!set) return 0;
    o->state = memory->states;
    tkvi_view_init(u, &o->view);
    for (i = 0; i < c->n_consumers; i++) {
        o->sampled[i] = set >> i & 1 ? c->consumer[i]->sample(&o->view) : 0;
        any |= o->sampled[i];
    }
    return any != 0;
}

/* Memory of consumer i for its state. */
static void *tkvi_observer_state(tkvi_observers *o, int i) {
    const tkvi_call *c = o->view.tile->call;
    size_t at = 0;
    int k;
    for (k = 0; k < i; k++) at += c->consumer[k] ? tkvi_align_up(c->consumer[k]->state_bytes) : 0;
    return o->state + at;
}

/* Begins the selected consumers. They see the queries as the oldest block behind the sinks does. sums: of the first
 * pass, before tkvi_finish; NULL if they are not known. */
static void tkvi_observers_begin(tkvi_observers *o, tkvi_queries *q, const tkvi_sums *sums) {
    const tkvi_work_tile *u = o->view.tile;
    const int oldest = tkvi_min(u->list->sinks, u->list->n - 1); /* -1: all tokens were evicted */
    int i;
    if (TKVI_HAS_MOVES && u->call->plain)
        tkvi_show_queries(u, q, oldest < 0 ? 0 : u->call->kv->pool.entry[u->ids[oldest]].turned, NULL);
    o->view.q = q->q;
    o->view.q_stride = u->k_pad;
    o->view.sums = sums;
    memcpy(o->view.origin, q->origin, (size_t)u->rows * sizeof(float));
    for (i = 0; i < u->call->n_consumers; i++) {
        const tkvi_consumer *consumer = u->call->consumer[i];
        o->observed[i] = o->sampled[i];
        if (o->sampled[i] && consumer->begin)
            o->observed[i] = consumer->begin(&o->view, o->sampled[i], tkvi_observer_state(o, i));
    }
}

/* lse: [rows] log-sum-exp from sums that tkvi_finish has added the sink logits to; TKVI_HIDDEN: no key. */
static void tkvi_log_sums(const tkvi_work_tile *u, const tkvi_sums *s, float *lse) {
    int r;
    for (r = 0; r < u->rows; r++) lse[r] = s->l[r] > 0.0f ? s->m[r] + logf(s->l[r]) : TKVI_HIDDEN;
}

/* Scores blocks first .. last-1 for the observed rows, from the first such row to the last, and hands each block to
 * the consumers. q: the queries of the whole tile. Overwrites q. */
static TKVI_NOINLINE void tkvi_observe_blocks(tkvi_observers *o, tkvi_queries *q, int first, int last) {
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK];
    const tkvi_work_tile *u = o->view.tile;
    const tkvi_call *c = u->call;
    tkvi_scoring s;
    tkvi_block_view b;
    unsigned rows = 0;
    int i, k;
    for (k = 0; k < c->n_consumers; k++) rows |= o->observed[k];
    if (!rows) return;
    s.q = q;
    for (s.first = 0; !(rows >> s.first & 1);) s.first++;
    for (i = 0; rows >> s.first >> i;) i++;
    s.tile = tkvi_some_rows(u, s.first, i);
    if (s.tile.rows < u->rows) tkvi_load_queries(&s.tile, q);
    o->view.scoring = &s;
    b.block = -1;
    for (i = first; i < last; i++) {
        tkvi_view_block(&s.tile, i, &b);
        if (!tkvi_block_scores(&s.tile, q, &b, scores + s.first * TKVI_BLOCK)) continue;
        for (k = 0; k < c->n_consumers; k++)
            if (o->observed[k]) c->consumer[k]->observe(&o->view, i, scores, tkvi_observer_state(o, k));
    }
    o->view.scoring = NULL;
}

static void tkvi_observers_end(tkvi_observers *o) {
    const tkvi_call *c = o->view.tile->call;
    int i;
    for (i = 0; i < c->n_consumers; i++)
        if (o->sampled[i] && c->consumer[i]->end) c->consumer[i]->end(&o->view, tkvi_observer_state(o, i));
}

/* Finishes a work tile, and serves the consumers of `set`. Overwrites q. */
static TKVI_NOINLINE void tkvi_finish_observed(const tkvi_work_tile *u, tkvi_queries *q,
                                               const tkvi_sums *sums, unsigned set,
                                               tkvi_work_memory *memory) {
    tkvi_observers o;
    const int observed = tkvi_observers_select(&o, u, set, memory);
    if (observed) tkvi_observers_begin(&o, q, sums);
    tkvi_finish(u, q->origin, sums, sums->any[1] > 0.0f);
    if (!observed) return;
    tkvi_log_sums(u, sums, o.view.lse);
    tkvi_observe_blocks(&o, q, 0, u->list->n);
    tkvi_observers_end(&o);
}

/* scores: [8][64] of the tokens of block i, for the observed rows, from another record with the same tokens. Its
 * format must not reorder channels. */
static void tkvi_score_record(const tkvi_scoring *s, const tkvi_record *rec, const uint8_t *bytes, int i,
                              float *scores) {
    const tkvi_work_tile *u = &s->tile;
    const tkv_cache *kv = u->call->kv;
    int at[TKVI_BLOCK], r;
    scores += s->first * TKVI_BLOCK;
    if (TKVI_HAS_MOVES && u->call->plain) tkvi_show_queries(u, s->q, kv->pool.entry[u->ids[i]].turned, NULL);
    kv->kernels->k[rec->k.format->stored](&rec->k, bytes, NULL, s->q->q, s->q->ref, u->rows,
                                          tkvi_block_tokens(kv, u->list, u->ids, i), 1, scores);
    tkvi_slot_indices(u, i, at);
    for (r = 0; r < u->rows; r++) tkvi_adjust_scores(u, r, s->q->origin[r], i, at, scores + r * TKVI_BLOCK);
}

/* >>work: work tiles, serial or parallel, whole or in splits */
typedef struct tkvi_work {
    const tkvi_call *call;
    int n_units, n_chunks; /* work tiles; most splits of one */
    int longest;           /* blocks of the longest list */
    int few;               /* 1: work tiles are so few that they are split; not by thread count: same bits */
    float *parts; /* [n_units][n_chunks] sums of splits; NULL: a task computes all splits of a work tile */
    unsigned by_tile;  /* consumers that tasks of work tiles serve: bit i for row i */
    unsigned by_range; /* consumers that tasks of ranges of blocks serve */
    int n_together;    /* prefill kernels: most work tiles of a task */
    tkv_task task;     /* the task inside tkvi_run_fetching */
    tkv_task inner;    /* the task inside tkvi_run_turning */
} tkvi_work;

/* Tasks of up to `most` work tiles of one KV head each. */
static int tkvi_count_tasks(const tkvi_call *c, int most) {
    int i, n = 0;
    for (i = 0; i < c->n_rows; i++) n += (tkvi_tiles_of(c, c->rows[i].n) + most - 1) / most * c->n_kv_heads;
    return n;
}

static int tkvi_count_work_tiles(const tkvi_call *c) { return tkvi_count_tasks(c, 1); }

/* Fills in the work tile with this number. */
static void tkvi_find_work_tile(const tkvi_call *c, int number, tkvi_work_tile *u) {
    int i, row = 0, heads = c->n_kv_heads;
    for (i = 0;; i++) {
        int tiles = tkvi_tiles_of(c, c->rows[i].n);
        if (number < tiles * heads) { /* all tiles of a head in a row: its records stay in the CPU cache */
            tkvi_work_tile_init(u, c, i, tkvi_first_row(c->p, i, row), c->first_kv_head + number / tiles,
                                number % tiles);
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
    TKVI_ALIGNED float all[TKVI_MAX_SUMS_FLOATS];
    tkvi_work_memory here;
    TKVI_ALIGNED tkvi_queries q;
    tkvi_sums sums, part;
    tkvi_work_tile u;
    tkvi_find_work_tile(w->call, index, &u);
    tkvi_load_queries(&u, &q);
    sums = tkvi_sums_in(all, u.v_pad);
    part = tkvi_sums_in(here.sums, u.v_pad);
    tkvi_merge_splits(w, index, &u, &q, &sums, &part);
    if (tkvi_failed(w->call)) return;
    tkvi_empty_nonfinite(&u, q.origin, &sums);
    if (w->by_tile) tkvi_finish_observed(&u, &q, &sums, w->by_tile, &here);
    else tkvi_finish(&u, q.origin, &sums, sums.any[1] > 0.0f);
    if (w->parts && w->by_range) { /* tkvi_observe_range needs m and l with sink logits */
        part = tkvi_split_at(w, &u, index, 0);
        memcpy(part.m, sums.m, (size_t)u.rows * sizeof(float));
        memcpy(part.l, sums.l, (size_t)u.rows * sizeof(float));
    }
}

/* The second pass over blocks first .. last-1 of a work tile, for w->by_range. */
static TKVI_NOINLINE void tkvi_observe_range(const tkvi_work *w, const tkvi_work_tile *u, int number,
                                             int first, int last) {
    tkvi_work_memory memory;
    tkvi_observers o;
    TKVI_ALIGNED tkvi_queries q;
    if (!tkvi_observers_select(&o, u, w->by_range, &memory)) return;
    tkvi_load_queries(u, &q);
    tkvi_observers_begin(&o, &q, NULL);
    if (w->parts) {
        const tkvi_sums sums = tkvi_split_at(w, u, number, 0);
        tkvi_log_sums(u, &sums, o.view.lse);
    }
    tkvi_observe_blocks(&o, &q, first, last);
    tkvi_observers_end(&o);
}

/* Task: the second pass over one range of blocks, for all work tiles in order. */
static void tkvi_run_range(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    int number;
    for (number = 0; number < w->n_units; number++) {
        tkvi_work_tile u;
        int last;
        tkvi_find_work_tile(w->call, number, &u);
        last = tkvi_min(u.list->n, (index + 1) * TKVI_RANGE_BLOCKS);
        if (index * TKVI_RANGE_BLOCKS < last)
            tkvi_observe_range(w, &u, number, index * TKVI_RANGE_BLOCKS, last);
    }
}

/* Does a consumer of w->by_range sample any row? If not, no thread needs to wake up. */
static int tkvi_any_sampled(const tkvi_work *w) {
    int i, any = 0;
    for (i = 0; i < w->n_units && w->by_range && !any; i++) {
        tkvi_work_tile u;
        tkvi_find_work_tile(w->call, i, &u);
        any = tkvi_is_observed(&u, w->by_range);
    }
    return any;
}

/* >>prefill: work tiles of up to 32 rows, one row per vector lane (kernels/prefill.h) */
/* q: [channel][lanes] query rows of a work tile, 0 in lanes without a row. rows: [16][k_pad] work space. */
static TKVI_NOINLINE void tkvi_load_lanes(const tkvi_work_tile *u, const tkvi_angles *turn, const float *ref,
                                          int lanes, float *rows, float *q, float *origin) {
    int first, r;
    for (first = 0; first < lanes; first += 16) {
        memset(rows, 0, (size_t)(16 * u->k_pad) * sizeof *rows);
        for (r = first; r < tkvi_min(first + 16, u->rows); r++)
            origin[r] = tkvi_load_query(u, r, turn, ref, rows + (r - first) * u->k_pad);
        u->call->many->transpose(rows, u->k_pad, u->k_pad, q + first, lanes);
    }
}

/* lanes: [channel][lanes] query rows of a work tile as given; 0 in lanes without a row and for rows that are not
 * finite. */
static TKVI_NOINLINE void tkvi_set_plain_lanes(const tkvi_work_tile *u, int n_lanes, const float *origin,
                                               float *lanes) {
    float row[TKV_MAX_HEAD_DIM];
    int r, i;
    memset(lanes, 0, (size_t)(n_lanes * u->k_pad) * sizeof *lanes);
    for (r = 0; r < u->rows; r++) {
        if (!tkvi_is_finite(origin[r])) continue;
        tkvi_copy_query(u, r, row);
        for (i = 0; i < u->k_pad; i++) lanes[i * n_lanes + r] = row[i];
    }
}

/* Turns the queries in lanes, as tkvi_turn_queries does. turn: NULL for none. origin: of the first load. */
static TKVI_NOINLINE void tkvi_turn_lanes(const tkvi_work_tile *u, const tkvi_angles *turn,
                                          const float *origin, tkvi_prefill_queries *q) {
    const tkvi_rope *rope = u->call->plan->rope;
    const float scale = u->call->scale;
    float *const lanes = u->call->plain->rows;
    int c, i, k;
    if (!u->call->plain->is_set) tkvi_set_plain_lanes(u, q->lanes, origin, lanes);
    u->call->plain->is_set = 1;
    for (c = 0; c < u->k_pad; c++) {
        int pair;
        float sign;
        const float *x = lanes + c * q->lanes;
        const float *y = lanes + tkvi_partner_of(rope, c, &pair, &sign) * q->lanes;
        const float cosine = turn && pair < rope->pairs ? turn->cosine[pair] : 1.0f;
        const float sine = turn && pair < rope->pairs ? sign * turn->sine[pair] : 0.0f;
        for (i = 0; i < q->lanes; i += 16) { /* vectors also at -O2 */
            float z[16];
            for (k = 0; k < 16; k++) z[k] = (x[i + k] * cosine + y[i + k] * sine) * scale;
            for (k = 0; k < 16; k++) q->q[c * q->lanes + i + k] = z[k];
        }
    }
}

/* Loads the queries as the newest block sees them. rows: work space, as for tkvi_load_lanes. */
static TKVI_NOINLINE void tkvi_prefill_load(const tkvi_work_tile *u, float *rows, tkvi_prefill_queries *q,
                                            float *origin) {
    tkvi_plain_rows *plain = u->call->plain;
    tkvi_reference here, *reference = plain ? &plain->reference : &here;
    tkvi_turn room;
    tkvi_angles turn = {NULL, NULL};
    int hint = 0;
    tkvi_reference_init(u, reference);
    if (TKVI_HAS_MOVES && reference->turned) turn = tkvi_turn_back(u, reference->turned, &hint, &room);
    memcpy(q->ref, reference->newest, sizeof q->ref);
    tkvi_load_lanes(u, reference->turned ? &turn : NULL, q->ref, q->lanes, rows, q->q, origin);
    if (plain) plain->is_set = 0;
    q->order = NULL;
}

/* Turns the queries for blocks that moved by `turned`. Origins stay. */
static TKVI_NOINLINE void tkvi_prefill_turn(const tkvi_work_tile *u, int turned, const float *origin,
                                            tkvi_prefill_queries *q) {
    tkvi_turn room;
    tkvi_angles turn = {NULL, NULL};
    int hint = 0;
    if (turned) turn = tkvi_turn_back(u, turned, &hint, &room);
    tkvi_turn_reference(u, &u->call->plain->reference, turned, turned ? &turn : NULL, q->ref);
    tkvi_turn_lanes(u, turned ? &turn : NULL, origin, q);
    q->order = NULL;
}

/* 1 if the tokens of block i that a lane sees are no run of slots: tkvi_adjust_score_lanes hides the others. */
static int tkvi_is_adjusted(const tkvi_work_tile *u, int i) {
    return u->call->kv->pool.entry[u->ids[i]].n_packed ||
           tkvi_sinks_beyond(u->call->kv, u->ids, i, &u->sight);
}

/* The tokens of block i that each lane sees: low .. high-1. Returns 0 if all lanes see all tokens. */
static int tkvi_visible_lanes(const tkvi_work_tile *u, int i, int start, int end, int32_t *low,
                              int32_t *high) {
    const tkvi_entry *e = &u->call->kv->pool.entry[u->ids[i]];
    const int slots = tkvi_block_tokens(u->call->kv, u->list, u->ids, i);
    const int is_adjusted = tkvi_is_adjusted(u, i);
    int r;
    if (!u->changes && !tkvi_has_hidden(u, i, start, end)) return 0;
    memset(low, 0, TKVI_PREFILL * sizeof *low);
    memset(high, 0, TKVI_PREFILL * sizeof *high);
    for (r = 0; r < u->rows; r++) {
        int from, to;
        tkvi_visible(u, i, r, &from, &to);
        low[r] = is_adjusted ? 0 : tkvi_max(from - start, 0) + e->first_slot;
        high[r] = is_adjusted ? slots : tkvi_min(tkvi_min(to, end) - start + e->first_slot, slots);
    }
    return 1;
}

/* tkvi_adjust_scores for scores [64][lanes] of block i. */
static TKVI_NOINLINE void tkvi_adjust_score_lanes(const tkvi_work_tile *u, const float *origin, int i,
                                                  int lanes, float *scores) {
    int at[TKVI_BLOCK], r, t;
    tkvi_slot_indices(u, i, at);
    for (r = 0; r < u->rows; r++) {
        float s[TKVI_BLOCK];
        for (t = 0; t < TKVI_BLOCK; t++) s[t] = scores[t * lanes + r];
        tkvi_adjust_scores(u, r, origin[r], i, at, s);
        for (t = 0; t < TKVI_BLOCK; t++) scores[t * lanes + r] = s[t];
    }
}

/* sampled_lanes: 1 for lanes that add block i to far_attention. Returns 0 if all are 0. */
static int tkvi_sample_lanes(const tkvi_work_tile *u, int i, float *sampled_lanes) {
    const uint32_t rows = tkvi_rows_far_from(u, i);
    int r;
    for (r = 0; r < TKVI_PREFILL && rows; r++) sampled_lanes[r] = rows >> r & 1 ? 1.0f : 0.0f;
    return rows != 0;
}

/* Groups of rows of one KV head that go through the blocks together, and share what is unpacked. A group is a work
 * tile. */
typedef struct tkvi_prefill_groups {
    int n, lanes;
    const tkvi_work_tile *tile; /* [n] */
    tkvi_prefill_queries *q[TKVI_PREFILL_GROUPS];
    tkvi_prefill_sums *sums[TKVI_PREFILL_GROUPS];
    float *scores; /* [n][64][lanes] work space */
    int is_loaded; /* 1: the queries are loaded as the newest block sees them, and sums have their origins */
} tkvi_prefill_groups;

/* Loads the queries of all groups unless they are loaded, and clears sums. Returns `turned` of the newest block. */
static int tkvi_prefill_begin(const tkvi_prefill_groups *all) {
    tkvi_plain_rows *plain = all->tile->call->plain;
    int i, r;
    for (i = 0; i < all->n; i++) {
        tkvi_prefill_sums *sums = all->sums[i];
        all->q[i]->lanes = sums->lanes = all->lanes;
        if (!all->is_loaded)
            tkvi_prefill_load(&all->tile[i], plain ? plain->rows : sums->o, all->q[i], sums->origin);
        memset(sums->o, 0, (size_t)(all->tile->v_pad * all->lanes) * sizeof(float));
        for (r = 0; r < TKVI_PREFILL; r++) {
            sums->m[r] = TKVI_HIDDEN;
            sums->l[r] = sums->far_attention[r] = 0.0f;
        }
    }
    return tkvi_newest_turned(all->tile);
}

/* The step of the online softmax for one group and block i. scores: in and out, then weights. bytes: of the record's
 * V. */
static TKVI_NOINLINE void tkvi_prefill_softmax(const tkvi_work_tile *u, int i, int start, int end,
                                               const tkvi_record *rec, const uint8_t *bytes,
                                               tkvi_prefill_sums *sums, float *scores) {
    TKVI_ALIGNED float shrink[TKVI_PREFILL], sampled_lanes[TKVI_PREFILL], squares[TKVI_BLOCK];
    TKVI_ALIGNED int32_t low[TKVI_PREFILL], high[TKVI_PREFILL];
    const tkvi_entry *e = &u->call->kv->pool.entry[u->ids[i]];
    tkvi_softmax_args w;
    w.s = scores;
    w.lanes = sums->lanes;
    w.m = sums->m;
    w.l = sums->l;
    w.shrink = shrink;
    w.high = high;
    /* A new maximum scales far_attention of all lanes, not only of far_rows. */
    w.far_attention = u->call->want_far ? sums->far_attention : NULL;
    if (u->changes || !tkvi_has_all_slots(e) || tkvi_is_adjusted(u, i))
        tkvi_adjust_score_lanes(u, sums->origin, i, w.lanes, scores);
    w.low = tkvi_visible_lanes(u, i, start, end, low, high) ? low : NULL;
    w.sampled_lanes = tkvi_sample_lanes(u, i, sampled_lanes) ? sampled_lanes : NULL;
    w.squares = squares;
    if (w.sampled_lanes)
        tkvi_value_squares(u, rec, bytes, tkvi_block_tokens(u->call->kv, u->list, u->ids, i), squares);
    if (u->call->many->softmax_step(&w)) u->call->many->shrink(sums->o, u->v_pad, w.lanes, shrink);
}

/* 1 if a row of some group may see a token of block i. end: of its tokens. */
static int tkvi_prefill_sees(const tkvi_prefill_groups *all, int i, int start, int end) {
    int k, first, last, sees = 0;
    for (k = 0; k < all->n; k++) {
        tkvi_visible_rows(&all->tile[k], i, 0, &first, &last);
        if (tkvi_sinks_beyond(all->tile->call->kv, all->tile->ids, i, &all->tile->sight)) first = 0;
        sees |= end > first && start < last;
    }
    return sees;
}

/* The online softmax over blocks first .. last-1. Blocks with rotated V come first, so that one rotation back is
 * enough. */
static TKVI_NOINLINE void tkvi_prefill_blocks(const tkvi_prefill_groups *all, int first, int last) {
    const tkvi_work_tile *u = all->tile;
    const tkv_cache *kv = u->call->kv;
    const tkvi_prefill *many = u->call->many;
    const int precise = kv->tables.cfg.host.precise, v_end = u->v_first + u->v_pad;
    tkvi_side some_v;
    float *o[TKVI_PREFILL_GROUPS];
    int i, k, rotated, turned = tkvi_prefill_begin(all);
    for (k = 0; k < all->n; k++) o[k] = all->sums[k]->o;
    for (rotated = kv->tables.any_rotated && !u->call->plan->geometry.v_in_k; rotated >= 0; rotated--) {
        for (i = first; i < last; i++) {
            const int start = tkvi_block_start(kv, u->ids, i), end = tkvi_visible_end(u, i);
            const uint8_t *bytes, *next = tkvi_next_record(u, i);
            const tkvi_record *rec = tkvi_record_of(u, i, &bytes);
            const tkvi_entry *e = &kv->pool.entry[u->ids[i]];
            const tkvi_side *v = u->v_pad < u->call->plan->geometry.v_pad ? &some_v : &rec->v;
            const int n = tkvi_block_tokens(kv, u->list, u->ids, i);
            if (rec->v.format->rotated != rotated || !tkvi_prefill_sees(all, i, start, end)) continue;
            if (!bytes) bytes = tkvi_bytes_of(u, i, TKV_K);
            if (!bytes) return;
            for (k = 0; k < all->n && TKVI_HAS_MOVES && e->turned != turned; k++)
                tkvi_prefill_turn(&all->tile[k], e->turned, all->sums[k]->origin, all->q[k]);
            turned = e->turned;
            many->k(&rec->k, bytes, next, all->q, all->n, n, tkvi_n_limbs(&rec->k, precise), all->scores);
            bytes = tkvi_bytes_of(u, i, TKV_V);
            if (!bytes) return;
            for (k = 0; k < all->n; k++)
                tkvi_prefill_softmax(&all->tile[k], i, start, end, rec, bytes, all->sums[k],
                                     all->scores + k * TKVI_BLOCK * all->lanes);
            if (v != &rec->v) {
                some_v = rec->v;
                some_v.first = (int16_t)u->v_first;
                some_v.dim = (int16_t)tkvi_min(some_v.dim, v_end);
            }
            many->v(v, bytes, next ? next + rec->v_at : NULL, all->scores, all->lanes, all->n, n, precise, o);
        }
        for (k = 0; k < all->n && rotated; k++)
            many->rotate_back(o[k], u->call->plan->geometry.v_head_dim, all->lanes);
    }
}

/* Serves the consumers of queries, for up to 8 rows. */
static TKVI_NOINLINE void tkvi_prefill_observe_queries(const tkvi_work_tile *u, const tkvi_sums *sums) {
    tkvi_work_memory memory;
    tkvi_observers o;
    TKVI_ALIGNED tkvi_queries q;
    if (!tkvi_observers_select(&o, u, u->call->observing[TKVI_OBSERVES_QUERIES], &memory)) return;
    tkvi_load_queries(u, &q);
    tkvi_observers_begin(&o, &q, sums);
    tkvi_observers_end(&o);
}

/* Finishes up to 8 rows: consumers of queries, out and lse. lse: [rows] relative to the reference key. */
static TKVI_NOINLINE void tkvi_prefill_finish(const tkvi_work_tile *u, tkvi_prefill_sums *from, int first,
                                              float *lse) {
    const tkvi_work_tile eight = tkvi_eight_rows(u, first);
    tkvi_sums sums;
    sums.o = from->o + first * u->v_pad;
    sums.m = from->m + first;
    sums.l = from->l + first;
    sums.far_attention = from->far_attention + first;
    sums.any = NULL;
    tkvi_empty_nonfinite(&eight, from->origin + first, &sums);
    if (u->call->observing[TKVI_OBSERVES_QUERIES] && u->v_first + u->v_pad == u->call->plan->geometry.v_pad)
        tkvi_prefill_observe_queries(&eight, &sums);
    tkvi_finish(&eight, from->origin + first, &sums, 0);
    tkvi_log_sums(&eight, &sums, lse);
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

/* Finishes a group. lse: [rows], as tkvi_prefill_finish. */
static TKVI_NOINLINE void tkvi_prefill_end(const tkvi_work_tile *u, tkvi_prefill_sums *sums, float *lse) {
    int first;
    tkvi_prefill_in_rows(u, sums);
    for (first = 0; first < u->rows; first += u->call->view_rows)
        tkvi_prefill_finish(u, sums, first, lse + first);
}

/* Floats of one split in w->parts. */
static int tkvi_prefill_split_floats(const tkvi_call *c) {
    return tkvi_prefill_sums_floats(tkvi_max(c->plan->geometry.k_pad, c->plan->geometry.v_pad), c->tile);
}

/* The sums of one split of a work tile in w->parts. */
static tkvi_prefill_sums *tkvi_prefill_split_at(const tkvi_work *w, int unit, int chunk) {
    const size_t n = (size_t)tkvi_prefill_split_floats(w->call);
    return tkvi_prefill_sums_in(w->parts + (size_t)(unit * w->n_chunks + chunk) * n);
}

/* Adds `from` to `to`, as tkvi_merge does for rows. Overwrites from->o. */
static TKVI_NOINLINE void tkvi_prefill_merge(const tkvi_work_tile *u, tkvi_prefill_sums *to,
                                             const tkvi_prefill_sums *from) {
    TKVI_ALIGNED float a[TKVI_PREFILL], b[TKVI_PREFILL];
    int r;
    for (r = 0; r < to->lanes; r++) {
        const int first = !(to->l[r] > 0.0f), none = !(from->l[r] > 0.0f);
        const float top = first || (!none && from->m[r] > to->m[r]) ? from->m[r] : to->m[r];
        a[r] = first ? 0.0f : expf(to->m[r] - top);
        b[r] = none ? 0.0f : expf(from->m[r] - top);
        to->m[r] = top;
        to->l[r] = to->l[r] * a[r] + from->l[r] * b[r];
        to->far_attention[r] = to->far_attention[r] * a[r] * a[r] + from->far_attention[r] * b[r] * b[r];
    }
    u->call->many->shrink(to->o, u->v_pad, to->lanes, a);
    u->call->many->shrink(from->o, u->v_pad, to->lanes, b);
    u->call->kv->kernels->scale_add(to->o, 1.0f, from->o, 1.0f, u->v_pad * to->lanes);
}

/* One split of all groups, into w->parts. number: of the first work tile. */
static void tkvi_prefill_one_split(const tkvi_work *w, tkvi_prefill_groups *all, int number, int chunk) {
    const tkvi_work_tile *u = all->tile;
    int i;
    if (chunk > 0 && chunk >= u->n_chunks) return;
    for (i = 0; i < all->n; i++) all->sums[i] = tkvi_prefill_split_at(w, number + i, chunk);
    tkvi_prefill_blocks(all, chunk * u->chunk, tkvi_split_end(u, chunk));
}

/* The first pass of all groups, split by split if work tiles are split. split: [n] room for the sums of one. */
static void tkvi_prefill_splits(const tkvi_work *w, const tkvi_prefill_groups *all,
                                tkvi_prefill_sums *const *split) {
    const tkvi_work_tile *u = all->tile;
    tkvi_prefill_groups one = *all;
    int chunk, i;
    tkvi_prefill_blocks(all, 0, w->few ? tkvi_split_end(u, 0) : u->list->n);
    one.is_loaded = !u->call->plain;
    for (i = 0; i < all->n && w->few; i++) {
        one.sums[i] = split[i];
        memcpy(split[i]->origin, all->sums[i]->origin, sizeof split[i]->origin);
    }
    for (chunk = 1; w->few && chunk < u->n_chunks; chunk++) {
        tkvi_prefill_blocks(&one, chunk * u->chunk, tkvi_split_end(u, chunk));
        for (i = 0; i < all->n; i++) tkvi_prefill_merge(&all->tile[i], all->sums[i], split[i]);
    }
}

/* The second pass over up to 8 rows, for w->by_tile. Prefill kernels round in another way than the kernels of
 * kernels/scalar.h, which score the blocks. A consumer that needs sums of the same kernels gets them here. */
static TKVI_NOINLINE void tkvi_prefill_observe(const tkvi_work *w, const tkvi_work_tile *u,
                                               const float *lse) {
    TKVI_ALIGNED float all[TKVI_MAX_SUMS_FLOATS];
    tkvi_work_memory here;
    TKVI_ALIGNED tkvi_queries q;
    const tkvi_sums sums = tkvi_sums_in(all, u->v_pad), part = tkvi_sums_in(here.sums, u->v_pad);
    tkvi_observers o;
    tkvi_load_queries(u, &q);
    if (tkvi_is_observed(u, u->call->observing[TKVI_OBSERVES_TILE]))
        tkvi_merge_splits(w, 0, u, &q, &sums, &part);
    if (!tkvi_observers_select(&o, u, w->by_tile & ~u->call->observing[TKVI_OBSERVES_QUERIES], &here)) return;
    tkvi_observers_begin(&o, &q, &sums);
    memcpy(o.view.lse, lse, (size_t)u->rows * sizeof *lse);
    tkvi_observe_blocks(&o, &q, 0, u->list->n);
    tkvi_observers_end(&o);
}

/* Second passes of one work tile. lse: as tkvi_prefill_finish. */
static void tkvi_prefill_second_pass(const tkvi_work *w, const tkvi_work_tile *u, const float *lse) {
    const unsigned second = w->by_tile & ~w->call->observing[TKVI_OBSERVES_QUERIES];
    int first;
    for (first = 0; second && first < u->rows && !tkvi_failed(w->call); first += w->call->view_rows) {
        const tkvi_work_tile eight = tkvi_eight_rows(u, first);
        if (tkvi_is_observed(&eight, second)) tkvi_prefill_observe(w, &eight, lse + first);
    }
}

/* One group, with memory on the stack. chunk: a split into w->parts; -1: all blocks, into `sums`. */
static TKVI_NOINLINE void tkvi_prefill_alone(const tkvi_work *w, const tkvi_work_tile *u, int number,
                                             int chunk, tkvi_prefill_sums *sums, tkvi_prefill_sums *split) {
    TKVI_ALIGNED float scores[TKVI_BLOCK * TKVI_PREFILL];
    tkvi_prefill_queries q;
    tkvi_prefill_groups one;
    one.n = 1;
    one.lanes = tkvi_lanes_of(u->rows);
    one.tile = u;
    one.q[0] = &q;
    one.sums[0] = sums;
    one.scores = scores;
    one.is_loaded = 0;
    if (chunk < 0) tkvi_prefill_splits(w, &one, &split);
    else tkvi_prefill_one_split(w, &one, number, chunk);
}

/* A work tile with memory on the stack, which has room for one output. Splits need a second output, and so they sum
 * half of the channels of V at a time. lse: [rows], as tkvi_prefill_finish. */
static TKVI_NOINLINE void tkvi_prefill_work_tile(const tkvi_work *w, const tkvi_work_tile *u, float *lse) {
    TKVI_ALIGNED float o[TKVI_PREFILL_FLOATS];
    const int step = w->few ? tkvi_round_up(u->v_pad / 2, 16) : u->v_pad;
    tkvi_prefill_sums sums, split;
    tkvi_work_tile some = *u;
    sums.o = o;
    split.o = o + step * tkvi_lanes_of(u->rows);
    for (; some.v_first < u->v_pad && !tkvi_failed(u->call); some.v_first += step) {
        some.v_pad = tkvi_min(step, u->v_pad - some.v_first);
        tkvi_prefill_alone(w, &some, 0, -1, &sums, &split);
        if (!tkvi_failed(u->call)) tkvi_prefill_end(&some, &sums, lse);
    }
}

/* One work tile with prefill kernels. chunk: as in tkvi_prefill_alone. */
static TKVI_NOINLINE void tkvi_run_prefill_tile(const tkvi_work *w, int number, int chunk) {
    float lse[TKVI_PREFILL];
    tkvi_work_tile u;
    tkvi_find_work_tile(w->call, number, &u);
    if (chunk >= 0) {
        tkvi_prefill_alone(w, &u, number, chunk, NULL, NULL);
        return;
    }
    tkvi_prefill_work_tile(w, &u, lse);
    tkvi_prefill_second_pass(w, &u, lse);
}

/* Takes what a flag guards. Returns 0 if another call or task has it, or without atomics. */
static int tkvi_take_flag(int *taken) {
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_exchange_n(taken, 1, __ATOMIC_ACQUIRE) == 0;
#else
    (void)taken;
    return 0;
#endif
}

static void tkvi_release_flag(int *taken) {
#if defined(__GNUC__) || defined(__clang__)
    __atomic_store_n(taken, 0, __ATOMIC_RELEASE);
#else
    (void)taken;
#endif
}

/* Takes memory for groups of rows. Returns its number, or -1 if there is none. */
static int tkvi_take_area(tkv_cache *kv) {
    int i;
    for (i = 0; i < kv->work.n_areas; i++)
        if (tkvi_take_flag(&kv->work.area_taken[i])) return i;
    return -1;
}

/* Work tiles number, number + 1, ... number + n - 1, of one KV head, together. chunk: as in tkvi_prefill_alone. One
 * work tile comes here if its splits need the memory of an area. Returns 0 if no area is free, or several would come
 * and tokens have moved: a task has plain rows for one tile. */
static TKVI_NOINLINE int tkvi_run_prefill_together(const tkvi_work *w, int number, int n, int chunk) {
    tkv_cache *kv = w->call->kv;
    const int has_use = n > 1 ? !w->call->plain : w->few && chunk < 0;
    const int number_of_area = has_use ? tkvi_take_area(kv) : -1;
    tkvi_prefill_area *area;
    tkvi_work_tile tile[TKVI_PREFILL_GROUPS];
    tkvi_prefill_groups all;
    tkvi_prefill_sums *split[TKVI_PREFILL_GROUPS];
    float lse[TKVI_PREFILL];
    int i;
    if (number_of_area < 0) return 0;
    area = &kv->work.area[number_of_area];
    all.n = n;
    all.tile = tile;
    all.scores = area->scores;
    all.is_loaded = 0;
    for (i = 0; i < n; i++) {
        tkvi_find_work_tile(w->call, number + i, &tile[i]);
        all.q[i] = &area->q[i];
        all.sums[i] = &area->sums[i];
        split[i] = &area->split[i];
        all.sums[i]->o = area->o[i];
        split[i]->o = area->split_o[i];
    }
    all.lanes = tkvi_lanes_of(tile[0].rows); /* no tile has more */
    if (chunk < 0) tkvi_prefill_splits(w, &all, split);
    else tkvi_prefill_one_split(w, &all, number, chunk);
    for (i = 0; chunk < 0 && i < n && !tkvi_failed(w->call); i++) {
        tkvi_prefill_end(&tile[i], all.sums[i], lse);
        tkvi_prefill_second_pass(w, &tile[i], lse);
    }
    tkvi_release_flag(&kv->work.area_taken[number_of_area]);
    return 1;
}

/* The work tiles of a task: at most `most`, of one KV head. Returns their number; *first: the first of them. */
static int tkvi_find_tiles(const tkvi_call *c, int most, int index, int *first) {
    int i;
    for (*first = i = 0;; i++) {
        const int tiles = tkvi_tiles_of(c, c->rows[i].n), tasks = (tiles + most - 1) / most;
        if (index < tasks * c->n_kv_heads) {
            const int in_head = index % tasks * most;
            *first += index / tasks * tiles + in_head;
            return tkvi_min(most, tiles - in_head);
        }
        index -= tasks * c->n_kv_heads;
        *first += tiles * c->n_kv_heads;
    }
}

/* Task: work tiles with prefill kernels; one split of them if w->parts has room for it. */
static void tkvi_run_prefill(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    const int chunk = w->parts ? index % w->n_chunks : -1;
    int first, i;
    const int n = tkvi_find_tiles(w->call, w->n_together, w->parts ? index / w->n_chunks : index, &first);
    if (tkvi_run_prefill_together(w, first, n, chunk)) return;
    for (i = 0; i < n && !tkvi_failed(w->call); i++)
        if (n == 1 || !tkvi_run_prefill_together(w, first + i, 1, chunk))
            tkvi_run_prefill_tile(w, first + i, chunk);
}

/* Task, after all splits: the merge of those of a work tile, in order. */
static void tkvi_run_prefill_merge(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    tkvi_prefill_sums *sums = tkvi_prefill_split_at(w, index, 0);
    tkvi_work whole = *w;
    float lse[TKVI_PREFILL];
    tkvi_work_tile u;
    int chunk;
    if (tkvi_failed(w->call)) return;
    tkvi_find_work_tile(w->call, index, &u);
    for (chunk = 1; chunk < u.n_chunks; chunk++)
        tkvi_prefill_merge(&u, sums, tkvi_prefill_split_at(w, index, chunk));
    tkvi_prefill_end(&u, sums, lse);
    whole.parts = NULL; /* not the sums of tkvi_merge_splits */
    tkvi_prefill_second_pass(&whole, &u, lse);
}

/* Work tiles that a task takes together, where they share unpacked codes: all of a KV head, up to 128 rows, but not so
 * many that threads have nothing to do. Bits do not depend on it. */
static int tkvi_n_together(const tkvi_work *w, int n_threads) {
    const tkvi_call *c = w->call;
    const int most = tkvi_min(TKVI_PREFILL_GROUPS, TKVI_GROUP_ROWS / c->tile);
    if (!c->kv->work.n_areas || !c->plan->geometry.v_in_k) return 1;
    return tkvi_max(1, tkvi_min(most, w->n_units * (w->parts ? w->n_chunks : 1) / n_threads));
}

/* Prefill kernels for the call, or NULL. Each sequence needs 16 query rows or more, in formats that the kernels
 * read. With V inside K any number will do: models have 16 heads and more for each latent. Not for
 * TKVI_OBSERVES_CALL: both passes must compute the same scores. */
static const tkvi_prefill *tkvi_prefill_for(const tkvi_call *c) {
    const tkv_cache *kv = c->kv;
    int i, b;
    if (c->observing[TKVI_OBSERVES_CALL]) return NULL;
    for (i = 0; i < c->n_rows; i++) {
        const tkvi_list *list = tkvi_list_of(kv, c->rows[i].seq, c->plan->stored_layer);
        const uint32_t *ids = tkvi_ids(kv, c->rows[i].seq, c->plan->stored_layer);
        if (c->rows[i].n * c->heads_per_kv < 2 * TKVI_ROWS && !c->plan->geometry.v_in_k) return NULL;
        for (b = 0; b < list->n; b++) {
            const tkvi_record *rec = kv->tables.layout[tkvi_block_of(kv, ids[b])->layout].record;
            if (rec->k.format->stored == TKVI_AS_DECODED || rec->v.format->stored == TKVI_AS_DECODED)
                return NULL;
        }
    }
    return TKVI_HAS_PREFILL ? kv->kernels->prefill : NULL;
}

/* Runs w->task with a fetch buffer of its own. */
static TKVI_NOINLINE void tkvi_run_fetching(void *ctx, int index) {
    tkvi_fetch_buffer room;
    tkvi_work w = *(const tkvi_work *)ctx;
    tkvi_call c = *w.call;
    tkvi_empty_buffer(&room, TKV_NO_SEQ, c.plan->stored_layer);
    c.room = &room;
    w.call = &c;
    if (!tkvi_failed(&c)) w.task(&w, index);
}

/* Runs w->inner with plain rows of its own. */
static TKVI_NOINLINE void tkvi_run_turning(void *ctx, int index) {
    tkvi_plain_rows plain;
    tkvi_work w = *(const tkvi_work *)ctx;
    tkvi_call c = *w.call;
    c.plain = &plain;
    w.call = &c;
    w.inner(&w, index);
}

/* 1 if queries of the call must be turned for some sequence. */
static int tkvi_turns_queries(const tkvi_call *c) {
    int i;
    for (i = 0; i < c->n_rows && c->plan->rope; i++)
        if (tkvi_has_moved(tkvi_list_of(c->kv, c->rows[i].seq, c->plan->stored_layer))) return 1;
    return 0;
}

/* Runs task first .. end-1, if `together` with the config's parallel_for. Tasks get fetch buffers if some block is
 * offloaded. */
static void tkvi_run(tkvi_work *w, int first, int end, int together, tkv_task task) {
    const tkv_cache *kv = w->call->kv;
    const tkv_host_config *host = &kv->tables.cfg.host;
    tkv_task run = TKVI_HAS_BLOCKS_OUTSIDE_RAM && kv->pool.n_offloaded ? tkvi_run_fetching : task;
    int i;
    w->task = task;
    w->inner = run;
    if (tkvi_turns_queries(w->call)) run = tkvi_run_turning;
    if (together && host->parallel_for && first == 0 && end > 1)
        host->parallel_for(host->parallel_user, end, run, w);
    else
        for (i = first; i < end; i++) run(w, i);
}

/* >>the call */
/* Divides the consumers of a call between tasks of work tiles and tasks of ranges of blocks. Ranges are for those
 * that must have work tiles in order. With splits they are also for those that need no order, as more tasks. serial:
 * 1: work tiles run in order. */
static void tkvi_share_consumers(tkvi_work *w, int serial) {
    const tkvi_call *c = w->call;
    w->by_tile = c->observing[TKVI_OBSERVES_QUERIES] | c->observing[TKVI_OBSERVES_TILE];
    w->by_range = c->observing[TKVI_OBSERVES_CALL];
    if (w->parts && !tkvi_has_prefill(c)) w->by_range |= c->observing[TKVI_OBSERVES_BLOCKS];
    else w->by_tile |= c->observing[TKVI_OBSERVES_BLOCKS];
    if (!serial) return;
    w->by_tile |= w->by_range;
    w->by_range = 0;
}

/* Work tiles get the rows of prefill kernels, where these will do. */
static void tkvi_take_prefill(tkvi_call *c) {
    if (!(c->many = tkvi_prefill_for(c))) return;
    c->tile = tkvi_prefill_lanes(tkvi_max(c->plan->geometry.head_dim, c->plan->geometry.v_head_dim));
    if (c->heads_per_kv <= c->view_rows) c->tile -= c->tile % c->view_rows; /* whole queries */
}

/* Checks a call, and finds its work. c, w: out. */
static tkv_status tkvi_plan_work(tkv_cache *kv, const tkv_attend_params *p,
                                 const tkvi_consumer *const *consumer, int n_consumers, tkvi_call *c,
                                 tkvi_work *w) {
    const tkv_status st = tkvi_call_init(c, kv, p);
    int i;
    memset(w, 0, sizeof *w);
    w->call = c;
    if (st) return st;
    tkvi_call_consumers(c, consumer, n_consumers);
    for (i = 0; i < c->n_rows; i++)
        w->longest = tkvi_max(w->longest, tkvi_list_of(kv, c->rows[i].seq, c->plan->stored_layer)->n);
    if (c->plan->geometry.v_in_k) tkvi_take_prefill(c);
    w->n_units = tkvi_count_work_tiles(c);
    if (tkvi_has_prefill(c)) /* a split of 16 rows costs a merge of as many outputs */
        c->most_splits = tkvi_max(1, tkvi_min(c->most_splits, TKVI_FEW_WORK_TILES / tkvi_max(1, w->n_units)));
    w->n_chunks = tkvi_min(c->most_splits, (w->longest + TKVI_MIN_SPLIT_BLOCKS - 1) / TKVI_MIN_SPLIT_BLOCKS);
    w->few =
        w->n_chunks > 1 && w->n_units <= TKVI_FEW_WORK_TILES && w->n_units * w->n_chunks <= TKVI_MAX_SPLITS;
    if (w->few || tkvi_has_prefill(c)) return TKV_OK;
    tkvi_take_prefill(c);
    w->n_units = tkvi_count_work_tiles(c);
    return TKV_OK;
}

static void tkvi_clear_scores(const tkvi_call *c) {
    int i;
    for (i = 0; i < c->n_rows && c->p->scores; i++)
        memset(c->p->scores + i * c->score_stride, 0,
               (size_t)tkvi_list_of(c->kv, c->rows[i].seq, c->plan->stored_layer)->len * sizeof(float));
}

/* The tasks of the first pass: returns their number. n_threads: that share them, about. */
static int tkvi_first_pass(tkvi_work *w, int n_threads, tkv_task *task) {
    const int n_splits = w->parts ? w->n_chunks : 1;
    *task = tkvi_has_prefill(w->call) ? tkvi_run_prefill : w->parts ? tkvi_run_split : tkvi_run_work_tile;
    if (!tkvi_has_prefill(w->call)) return w->n_units * n_splits;
    w->n_together = tkvi_n_together(w, n_threads);
    return tkvi_count_tasks(w->call, w->n_together) * n_splits;
}

/* What follows the first pass: merges splits, and serves the consumers of ranges of blocks. Returns the call's
 * status. */
static tkv_status tkvi_end_work(tkvi_work *w, int together) {
    const tkvi_call *c = w->call;
    if (w->parts)
        tkvi_run(w, 0, w->n_units, 0, tkvi_has_prefill(c) ? tkvi_run_prefill_merge : tkvi_run_work_tile);
    if (!*c->failed && tkvi_any_sampled(w))
        tkvi_run(w, 0, (w->longest + TKVI_RANGE_BLOCKS - 1) / TKVI_RANGE_BLOCKS, together, tkvi_run_range);
    if (*c->failed & TKVI_FAILED_IO) return TKV_ERR_IO;
    if (*c->failed) return *c->failed & TKVI_FAILED_DATA ? TKV_ERR_DATA : TKV_ERR_NO_SOURCE;
    return TKV_OK;
}

/* Attention with consumers. Checks the call, and runs it. */
static tkv_status tkvi_attend(tkv_cache *kv, const tkv_attend_params *p, const tkvi_consumer *const *consumer,
                              int n_consumers) {
    const int in_parallel = kv && kv->tables.cfg.host.parallel_for;
    tkvi_call c;
    tkvi_work w;
    tkv_task task;
    int failed = 0, n;
    tkv_status st = tkvi_plan_work(kv, p, consumer, n_consumers, &c, &w);
    if (st) return tkvi_fail_reader(kv, st, c.why[0], c.number, c.why[1]);
    c.failed = &failed;
    tkvi_clear_scores(&c);
    if (w.n_units == 0) return TKV_OK;
    if (w.few && kv->work.split_sums && in_parallel && tkvi_take_flag(&kv->work.split_sums_taken))
        w.parts = kv->work.split_sums;
    tkvi_share_consumers(&w, !w.parts && (!in_parallel || w.n_units == 1));
    n = tkvi_first_pass(&w, in_parallel ? TKVI_MAX_TILE_SPLITS : 1, &task);
    tkvi_run(&w, 0, n, 1, task);
    st = tkvi_end_work(&w, 1);
    if (w.parts) tkvi_release_flag(&kv->work.split_sums_taken);
    return st ? tkvi_fail_fetching(kv, st, p->layer) : TKV_OK;
}

/* >>parts: the same call, run by threads of the caller */
/* Fails to compile if a workspace could take more than the header says. */
typedef char tkvi_attend_bytes_fit
    [TKVI_PARTS_CLEAR + TKVI_MAX_SPLITS * sizeof(float) * TKVI_MAX_SUMS_FLOATS <= TKV_MAX_ATTEND_BYTES &&
             TKVI_PARTS_CLEAR + TKVI_FEW_WORK_TILES *
                                    (sizeof(tkvi_prefill_sums) + 64 +
                                     sizeof(float) * (TKVI_PREFILL_PART * TKVI_PREFILL > TKV_MAX_HEAD_DIM * 16
                                                          ? TKVI_PREFILL_PART * TKVI_PREFILL
                                                          : TKV_MAX_HEAD_DIM * 16)) <=
                 TKV_MAX_ATTEND_BYTES
         ? 1
         : -1];

/* Bytes of the workspace: room to align it, its head, and the sums of splits. */
static size_t tkvi_parts_bytes_of(const tkvi_work *w) {
    const int v_pad = w->call->plan->geometry.v_pad;
    const int n = tkvi_has_prefill(w->call) ? tkvi_prefill_split_floats(w->call) : TKVI_SUMS_FLOATS(v_pad);
    return TKVI_PARTS_CLEAR + (w->few ? (size_t)(w->n_units * w->n_chunks * n) * sizeof(float) : 0);
}

/* One part of a call. The parts share the tasks of the first pass; the last one to end does the rest. */
static tkv_status tkvi_attend_part(tkv_cache *kv, const tkv_attend_params *p,
                                   const tkvi_consumer *const *consumer, int n_consumers, int part,
                                   int n_parts, void *workspace, size_t bytes) {
    tkvi_parts *head;
    tkvi_call c;
    tkvi_work w;
    tkv_task task;
    int64_t n;
    tkv_status st;
    if (!tkvi_is_part(part, n_parts, workspace)) return tkvi_refuse_part(kv, part);
    st = tkvi_plan_work(kv, p, consumer, n_consumers, &c, &w);
    if (st) return tkvi_fail_reader(kv, st, c.why[0], c.number, c.why[1]);
    if (bytes < tkvi_parts_bytes_of(&w)) return tkvi_refuse_workspace(kv, tkvi_parts_bytes_of(&w));
    head = tkvi_parts_head(workspace);
    c.failed = &head->failed;
    if (w.few) w.parts = (float *)(void *)tkvi_parts_data(head);
    tkvi_share_consumers(&w, 0);
    n = tkvi_first_pass(&w, n_parts, &task);
    tkvi_run(&w, (int)(n * part / n_parts), (int)(n * (part + 1) / n_parts), 0, task);
    if (!tkvi_is_last_part(head, n_parts)) return TKV_OK;
    tkvi_clear_scores(&c);
    st = tkvi_end_work(&w, 0);
    tkvi_parts_end(workspace);
    return st ? tkvi_fail_fetching(kv, st, p->layer) : TKV_OK;
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
