/*
 * cache/consumers.h - consumers of attention: parts of the library that observe attention while it runs. They learn
 * from its queries, measure its errors, or add up its weights per token.
 *
 * A consumer is a row of type tkvi_consumer. step/consumers.h has the table of all rows. attention/attend.h serves
 * the rows, and does not know what they do:
 *
 *     first pass     attention itself
 *     begin          the consumer gets the queries and the sums of the first pass
 *     second pass    the keys of sampled rows once more: each block is scored once, for all consumers together,
 *     observe        and each consumer gets the scores of the block
 *     end
 *
 * To add one, write a file with the functions and the row, in the folder that the consumer belongs to. Then add the
 * row to the table. Readers of a cache run at the same time: what they add must be integers under a lock, so that
 * results do not depend on the order of threads. Only TKVI_OBSERVES_CALL promises an order.
 */
#ifndef TKVI_CACHE_CONSUMERS_H
#define TKVI_CACHE_CONSUMERS_H

#include "cache/cache.h"

/* Partial results of attention over one split, or over several merged splits. p = exp(score - m). */
typedef struct tkvi_sums {
    float *m, *l;         /* [TKVI_ROWS] largest score; sum of p */
    float *far_attention; /* [TKVI_ROWS] sum of p^2 |v|^2 over far keys, for rows of consumers that want it */
    float *any;           /* [2] not 0: that half of o is in use; else its contents are undefined */
    float *o; /* [2][tkvi_rows_of(v_pad)][v_pad] sum of p v: of plain formats, of rotated formats */
} tkvi_sums;

/* What decides which keys the queries of a call see. */
typedef struct tkvi_sight {
    int window;      /* newest positions that a query sees; 0: all */
    int sinks;       /* blocks at the front of the list that a query sees beyond its window */
    int sees_sinks;  /* 1: it sees named sinks beyond its window (tkvi_sinks_beyond) */
    int non_causal;  /* 1: a query sees keys after itself */
    int first_query; /* index of the oldest query */
} tkvi_sight;

/* Bits of the slots of block i whose keys queries see also below `low` of tkvi_visible_in: named sinks. */
static uint64_t tkvi_sinks_beyond(const tkv_cache *kv, const uint32_t *ids, int i, const tkvi_sight *sight) {
    return sight->window && sight->sees_sinks ? tkvi_sink_mask(&kv->pool, ids[i]) : 0;
}

/* The indices of the keys in block i that a query sees by causality and window: low .. high-1. Causality goes by index
 * in blocks with tokens of the queries, and by position in all older ones. end: indices from here on are hidden from
 * the query. position: of the query. */
static void tkvi_visible_in(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i,
                            const tkvi_sight *sight, int end, int position, int *low, int *high) {
    const int shift = kv->pool.entry[ids[i]].shift;
    *low = 0;
    if (sight->window && i >= sight->sinks && position - shift + 1 > sight->window)
        *low = position - shift + 1 - sight->window;
    *high = end;
    if (tkvi_block_end(kv, list, ids, i) <= sight->first_query)
        *high = tkvi_max(0, tkvi_min(*high, position - shift + 1));
    if (sight->non_causal) *high = list->len;
}

/* Up to 8 query rows of one KV head of one sequence. Rows of one query, its query heads, follow one another. */
typedef struct tkvi_tile_view {
    tkv_cache *kv;
    const tkv_attend_params *params;
    const tkvi_list *list;
    const uint32_t *ids;
    int seq, head;           /* sequence; KV head */
    int layer, stored;       /* layer of the call; layer that has the blocks */
    int rows;                /* number of rows */
    int index[TKVI_ROWS];    /* of each row's query */
    int position[TKVI_ROWS]; /* of each row's query */
    int end[TKVI_ROWS]; /* indices from here on are hidden from the row; index + 1 but for params.row_ends */
    tkvi_sight sight;   /* what they see by causality and window (tkvi_visible_keys) */
    const float *q;     /* [rows][q_stride] scaled queries; in `begin` only */
    int q_stride;       /* head_dim, rounded up to 16 */
    const tkvi_sums *sums;   /* results of the first pass without sink logits; in `begin` only; can be NULL */
    float origin[TKVI_ROWS]; /* scale q.ref of each row; scores are relative to it (attention/attend.h) */
    float lse[TKVI_ROWS];    /* log-sum-exp relative to it, with sink logits; TKVI_HIDDEN: sees no key */
    const struct tkvi_work_tile *tile;  /* for consumers in attention/ */
    const struct tkvi_scoring *scoring; /* for consumers in attention/, in `observe` only */
} tkvi_tile_view;

/* What a consumer observes. It decides how attention schedules the second pass. */
typedef enum tkvi_observes {
    /* Queries and sums of the first pass. No second pass. `sums` is there in `begin`, once per row. */
    TKVI_OBSERVES_QUERIES,
    /* All blocks in order, in one task. `sums` is there and comes from the same kernels as the scores. */
    TKVI_OBSERVES_TILE,
    /* Ranges of blocks in any order, each with its own begin and end. `sums` can be NULL. */
    TKVI_OBSERVES_BLOCKS,
    /* As TKVI_OBSERVES_BLOCKS. All work tiles come in order to each range of blocks, and no two tasks have one
     * range. Both passes use the same kernels. `lse` is not set: params->lse has it. */
    TKVI_OBSERVES_CALL,
    TKVI_OBSERVES_KINDS
} tkvi_observes;

/* Bits that tkvi_consumer.wants returns. */
typedef enum tkvi_want {
    TKVI_WANTS_CALL = 1,         /* the consumer takes part in this call */
    TKVI_WANTS_FAR_SUMS = 2,     /* the first pass fills in sums->far_attention of its rows */
    TKVI_WANTS_WHOLE_QUERIES = 4 /* all query heads of a query stay in one work tile, if they are at most 8 */
} tkvi_want;

typedef struct tkvi_consumer {
    tkvi_observes observes;
    size_t state_bytes; /* of the memory that begin, observe and end share; it is not cleared */
    /* Returns bits of tkvi_want; 0: the consumer has nothing to do in this call. */
    int (*wants)(const tkv_cache *kv, const tkv_attend_params *p, int stored);
    /* The rows that the consumer samples, bit r for row r. q, sums, origin and lse are not set yet. */
    unsigned (*sample)(const tkvi_tile_view *v);
    /* rows: what `sample` returned, not 0. Returns the rows that `observe` needs, a subset. NULL: all of them. */
    unsigned (*begin)(const tkvi_tile_view *v, unsigned rows, void *state);
    /* scores: [8][64] of block i, TKVI_HIDDEN where a row does not see a token. Other rows are undefined. */
    void (*observe)(const tkvi_tile_view *v, int i, const float *scores, void *state);
    void (*end)(const tkvi_tile_view *v, void *state); /* NULL: nothing to do */
} tkvi_consumer;

#define TKVI_MAX_CONSUMERS 8
/* Limit of state_bytes, all consumers together, each rounded up to 64 (tests/test_mass.c checks it). */
#define TKVI_CONSUMER_BYTES 26624

/* The indices of the keys in block i that row r sees by causality and window: low .. high-1. */
static void tkvi_visible_keys(const tkvi_tile_view *v, int i, int r, int *low, int *high) {
    tkvi_visible_in(v->kv, v->list, v->ids, i, &v->sight, v->end[r], v->position[r], low, high);
}

/* Bits of all rows. */
static unsigned tkvi_all_rows(const tkvi_tile_view *v) { return (1u << v->rows) - 1u; }

/* Bits of the rows whose query has an index p with (p + shift) % every == 0. Queries of other sequences go by position,
 * as their index stays while this sequence does not grow. */
static unsigned tkvi_rows_every(const tkvi_tile_view *v, int64_t shift, int every) {
    unsigned rows = 0;
    int r;
    for (r = 0; r < v->rows; r++) {
        const int at = v->params->query_positions ? v->position[r] : v->index[r];
        rows |= (unsigned)((at + shift) % every == 0) << r;
    }
    return rows;
}

#endif /* TKVI_CACHE_CONSUMERS_H */
