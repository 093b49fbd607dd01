/*
 * cache/cache.h - the struct of a cache, its creation and its destruction.
 *
 * A cache takes its memory from an allocator, or all of it from one buffer of the caller (in place). Its pieces:
 *
 *     fixed         this struct, tables, sequences, scratch
 *     can grow      the block table; the page table; one array of block lists per sequence; pages; the table of
 *                   rotations
 *     on demand     versions of learned tables, statistics, work space of eviction
 *
 * In place, an arena in the caller's buffer serves the same requests. It serves them at their largest sizes before
 * the first token.
 */
#ifndef TKVI_CACHE_CACHE_H
#define TKVI_CACHE_CACHE_H

#include "rules/score_modes.h"
#include "cache/pool.h"
#include "cache/meter.h"
#include "cache/states.h"
#include "cache/turns.h"

#define TKVI_POSITIONS (1 << 30) /* positions are 0 .. 2^30 - 1 */

/* Searches in a list. Each begins behind the blocks that it has passed, so it looks at one or two blocks. */
typedef enum tkvi_search {
    TKVI_RECODED,       /* passed: blocks as small as the level requires (reclaim/stale.h) */
    TKVI_TIGHTEST,      /* passed: blocks as small as its archive requires; at most TKVI_RECODED's */
    TKVI_OFFLOADED_RUN, /* passed: offloaded blocks (reclaim/offload.h) */
    TKVI_SEARCH_COUNT
} tkvi_search;

/* Blocks of one layer of one sequence: [anchors][sinks][archive][warm][hot]. Behind the anchors they are in order,
 * oldest first, and block i holds the tokens from its start up to the start of block i + 1. Blocks of anchors have
 * start 0, and the tokens that they list. */
typedef struct tkvi_list {
    int n;                    /* blocks */
    int sinks, archive, warm; /* blocks of each tier; all other blocks are hot */
    int anchors;              /* blocks of anchors; the count of sinks has them too */
    int len;                  /* tokens ever appended */
    int expired;              /* tokens before this index have expired (they left the window) */
    int expired_end; /* with expired ones: the position behind the highest of them, which no window may reach */
    int chunk_start; /* len before the last append; its tokens stay exact until the next append */
    int step_len;    /* len when the open step began */
    int evict_len;   /* forecast: len of the last attention before the next eviction; below len: unknown */
    int is_moved;    /* 0: no entry has a shift, nor has the list */
    /* The position of the next token, less its index. The list has it for itself, as the entries of its last tokens may
     * go, in one layer sooner than in another. step_shift: when the open step began */
    int shift, step_shift;
    int passed[TKVI_SEARCH_COUNT]; /* blocks after the sinks that a search has passed */
} tkvi_list;

/* 1 if tokens of a list have positions that are not their indices. */
static int tkvi_has_moved(const tkvi_list *list) { return TKVI_HAS_MOVES && list->is_moved; }

/* Number of blocks of anchors that a list begins with. */
static int tkvi_anchors_of(const tkvi_list *list) { return TKVI_HAS_EVICT ? list->anchors : 0; }

/* Block i has changed: all searches look at it again. */
static void tkvi_search_again(tkvi_list *list, int i) {
    int s;
    for (s = 0; s < TKVI_SEARCH_COUNT; s++)
        list->passed[s] = tkvi_max(0, tkvi_min(list->passed[s], i - list->sinks));
}

/* Takes those of the blocks first .. end - 1 from *count that are among the blocks from .. from + *count - 1. */
static void tkvi_take_from_count(int *count, int from, int first, int end) {
    *count -= tkvi_max(0, tkvi_min(from + *count, end) - tkvi_max(from, first));
}

/* Removes the blocks first .. end - 1 from the counts of a list. */
static void tkvi_uncount_blocks(tkvi_list *list, int first, int end) {
    const int sinks = list->sinks, archive = list->archive;
    int s;
    if (TKVI_HAS_EVICT) tkvi_take_from_count(&list->anchors, 0, first, end);
    tkvi_take_from_count(&list->sinks, 0, first, end);
    tkvi_take_from_count(&list->archive, sinks, first, end);
    tkvi_take_from_count(&list->warm, sinks + archive, first, end);
    for (s = 0; s < TKVI_SEARCH_COUNT; s++) tkvi_take_from_count(&list->passed[s], sinks, first, end);
    list->n -= end - first;
}

/* Counts block i twice: it became two entries. */
static void tkvi_count_split(tkvi_list *list, int i) {
    const int behind_sinks = i - list->sinks;
    int s;
    for (s = 0; s < TKVI_SEARCH_COUNT; s++)
        list->passed[s] += behind_sinks >= 0 && behind_sinks < list->passed[s];
    if (behind_sinks < 0) list->sinks++;
    else if (behind_sinks < list->archive) list->archive++;
    else if (behind_sinks < list->archive + list->warm) list->warm++;
    list->n++;
}

/* Removes the blocks first .. end - 1 from a list. The caller releases them. */
static void tkvi_unlist_blocks(tkvi_list *list, uint32_t *ids, int first, int end) {
    TKVI_ASSERT(first < end);
    memmove(ids + first, ids + end, (size_t)(list->n - end) * sizeof *ids);
    tkvi_uncount_blocks(list, first, end);
}

enum { TKVI_MOST_PAGE = TKV_PAGE_TOKENS + TKVI_BLOCK }; /* tokens of page 0, with the sinks */

/* A page of a sequence that other sequences of the cache find (persist/prefix.h). */
typedef struct tkvi_named_page {
    uint8_t hash[32];
    int end; /* of the page, by index */
    int tokens[TKVI_MOST_PAGE];
} tkvi_named_page;

typedef struct tkvi_seq {
    uint32_t *block; /* [n_layers][cap] block numbers */
    uint32_t cap;
    int in_step;
    int is_appending;      /* 1: the append in progress has tokens for this sequence */
    int reserved_len;      /* memory is reserved up to this length; 0: none */
    uint64_t used;         /* kv->call.clock at the last append, reservation or recomputation */
    tkvi_named_page *page; /* [page_cap] from the first page on */
    int n_pages, page_cap;
    int from, is_taken; /* the plan of a tkv_seq_reorder in progress (step/reorder.h) */
} tkvi_seq;

/* Limits of splits in parallel attention (attention/attend.h). The first caller gets the buffer of partial results.
 * Other callers run whole work tiles, with the same bits. */
#define TKVI_MAX_TILE_SPLITS 16 /* most splits of a work tile */
#define TKVI_MIN_SPLIT_BLOCKS 8 /* fewest blocks of a split */
#define TKVI_FEW_WORK_TILES 32  /* with more work tiles, no splits */
#define TKVI_MAX_SPLITS 128     /* most splits of a call */
#define TKVI_MAX_AREAS 4        /* tasks that can have groups of rows together, with parallel_for; else 1 */
/* Floats of partial results of one split. */
#define TKVI_SUMS_FLOATS(v_pad) (2 * tkvi_min(TKVI_ROWS * (v_pad), TKVI_ROW_CHANNELS) + 3 * TKVI_ROWS + 16)
#define TKVI_MAX_SUMS_FLOATS (2 * TKVI_ROW_CHANNELS + 3 * TKVI_ROWS + 16)

/* A layer's first table is made from TKVI_FIRST_TABLE_TOKENS tokens, and a new one each time that their number has
 * doubled (learn/statistics.h). A key is far when its block ends TKVI_FAR or more tokens before the query. */
#define TKVI_FIRST_TABLE_TOKENS 256
#define TKVI_LAST_TABLE_TOKENS 2048 /* of a cache that keeps two tables (tkvi_keeps_two_tables) */
#define TKVI_LEARN_STEPS 16         /* most tokens over which the heads of a table are spread */
#define TKVI_FAR 128
#define TKVI_IN_PLACE_VERSIONS 2    /* table versions in place; more would take bytes from the tokens */
#define TKVI_LEAST_BUDGET_SHARE 256 /* a budget has room for more than two versions of at most 1/256 of it */

/* Progress of the query statistics of a layer (learn/query_stats.h). */
typedef struct tkvi_query_stats {
    int tokens; /* tokens appended since collection began; -1: nothing is collected */
    int used;   /* `tokens` when the factors were last computed; 0: never */
} tkvi_query_stats;

struct tkvi_prepared; /* reclaim/age.h */

/* Work space. Sized at creation; the choice space grows with the longest list. */
typedef struct tkvi_work_space {
    float *recode;           /* [64][head_dim], then [64][v_head_dim] decoded values, of the widest layers */
    float *split_sums;       /* partial results of parallel attention, or NULL */
    int split_sums_taken;    /* 1: a call uses split_sums */
    tkvi_prefill_area *area; /* [n_areas] where V is inside K (attention/attend.h) */
    int n_areas, area_taken[TKVI_MAX_AREAS];
    struct tkvi_prepared *prepared; /* blocks that parts of the append in progress have encoded, or NULL */
    float *solve;                   /* [packed] for families that learn from queries */
    uint8_t *choice;                /* for choosing among the tokens of the longest list; NULL: no eviction */
    uint32_t choice_cap;            /* blocks that `choice` has space for */
} tkvi_work_space;

/* The number of tokens over which the heads of a layer's table are learned. */
static int tkvi_learn_steps(const tkvi_plan *p) {
    return p->allocates ? tkvi_min(p->geometry.n_kv_heads, TKVI_LEARN_STEPS) : 1;
}

/* The next table of a layer, while its heads are learned one by one. */
typedef struct tkvi_next_table {
    int due;      /* tokens that the layer has seen when the table is due; 0: TKVI_FIRST_TABLE_TOKENS */
    int last;     /* tokens that it had seen when the last one was made */
    int restarts; /* 1: collection restarts after the table (tkv_refresh_calibration) */
    int version, n_heads; /* n_heads: those that the version has */
} tkvi_next_table;

/* A sum of floats that does not depend on their order, because it is of integers. */
typedef struct tkvi_wide_sum {
    int64_t whole, part; /* part: unit 1 / TKVI_WIDE_UNIT */
} tkvi_wide_sum;

#define TKVI_WIDE_UNIT ((int64_t)1 << 40)

/* x: at least 0. More than 1e12 counts as 1e12. */
static void tkvi_add_to_wide_sum(tkvi_wide_sum *sum, float x) {
    const double y = x > 0.0f ? (x < 1e12f ? (double)x : 1e12) : 0.0;
    const int64_t whole = (int64_t)y;
    sum->whole += whole;
    sum->part += (int64_t)((y - (double)whole) * (double)TKVI_WIDE_UNIT);
}

static float tkvi_wide_sum_value(const tkvi_wide_sum *sum) {
    return (float)((double)sum->whole + (double)sum->part / (double)TKVI_WIDE_UNIT);
}

/* Statistics of attention. Arrays are NULL where no format needs them. See tkvi_places. */
typedef struct tkvi_stats {
    int lock; /* of all statistics and of attention scores */
    /* learn/statistics.h */
    int *tokens_seen; /* [n_layers] tokens appended since collection began; -1: nothing is collected */
    tkvi_next_table *next_table;  /* [n_layers] */
    int64_t *q_sq_sum;            /* [n_layers][n_kv_heads][head_dim] sums of squared queries */
    tkvi_wide_sum *far_attention; /* [n_layers][n_kv_heads] sums of p^2 |v|^2 over far keys */
    int64_t *n_sampled;           /* [n_layers][n_kv_heads] queries in these sums */
    /* learn/query_stats.h */
    tkvi_query_stats *queries; /* [n_layers] */
    int64_t *q_products;       /* [n_layers][n_kv_heads][tkvi_n_products] sums of q q^T */
    uint8_t *query_states;     /* of the families that learn from them, at tkvi_places.query_states */
} tkvi_stats;

/* State of the budget (reclaim/budget.h). */
typedef struct tkvi_budget_state {
    tkv_pressure pressure;
    float reported_pressure; /* memory pressure from the caller (tkv_report_pressure), 0 .. 1 */
    size_t bytes_per_block;  /* of one hot block in every layer; layers open them at the same token */
    int64_t recode_backlog;  /* bytes that recoding must still free to pay for appended tokens */
    size_t relax_at;         /* a less compressed level is considered only while fewer bytes are in use */
    int length_level;        /* level by the length of the longest sequence (tkv_level.from_tokens) */
    int hot_tokens_changed; /* 1: tkv_set_hot_tokens was called; blocks may be older than their tier allows */
    int has_loaded; /* 1: a sequence was loaded; its blocks may have the ages and formats of another plan */
} tkvi_budget_state;

/* Counts of tkv_budget_info and of the reports, in blocks. `refused` counts calls, the last two count tokens. */
typedef struct tkvi_counts {
    uint64_t demoted, recoded[TKV_MAX_LEVELS], refused;
    uint64_t offloaded, unwritten, promoted; /* unwritten: refused by the store */
    uint64_t discarded, recomputed;
    uint64_t evicted, merged;
} tkvi_counts;

/* State of the call in progress, and the message of the last one that failed. */
typedef struct tkvi_call_state {
    uint64_t clock;      /* counts calls that need memory; sequences in use now are not discarded for them */
    int append_layer;    /* layer of the append in progress (tkvi_exact_from) */
    int keeps_tokens;    /* 1: the call in progress discards and evicts no token (tkvi_provide_bytes) */
    int recodes_young;   /* 1: blocks of any age are due for the archive (reclaim/budget.h) */
    int store_failed;    /* 1: the store failed in this call; an error then names the store as the cause */
    size_t scratch_used; /* bytes of the caller's scratch that are in use outside of the save or load */
    int lacks_scratch;   /* 1: scratch memory of a save or a load was too small (persist/scratch.h) */
    int error_lock;      /* of `error`, for calls that only read: several threads may make them */
    char error[160];
} tkvi_call_state;

/* Bytes of the parts of the fixed piece, in their order in memory. Each is rounded up to 64. */
typedef struct tkvi_sizes {
    size_t cache, tables, seqs, lists, states, counts, tokens_seen, query_stats, q_products, query_states,
        meter;
    size_t solve, recode, split_sums, areas, meter_copies; /* work space and copies: not zeroed */
    size_t total;
} tkvi_sizes;

struct tkv_cache {
    tkvi_sizes sizes;
    tkvi_tables tables;
    const tkvi_kernels *kernels;
    tkvi_heap heap;
    tkvi_arena arena;
    tkvi_pool pool;
    tkvi_seq *seq;           /* [max_seqs] */
    tkvi_list *list;         /* [max_seqs][n_layers] */
    int64_t *reserved_slots; /* [max_seqs][n_classes] slots reserved by each sequence */
    tkvi_work_space work;
    tkvi_stats stats;
    tkvi_budget_state budget;
    tkvi_counts counts;
    tkvi_call_state call;
    tkvi_states states;
    tkvi_meter *meter;              /* NULL: none (cache/meter.h) */
    tkvi_turns turns;               /* of tokens that have moved (cache/turns.h) */
    tkvi_token_scores token_scores; /* how the config scores attention (reclaim/scores.h) */
};

static tkvi_list *tkvi_list_of(const tkv_cache *kv, int seq, int layer) {
    return kv->list + (size_t)seq * (size_t)kv->tables.cfg.model.n_layers + (size_t)layer;
}

static const tkvi_geometry *tkvi_geometry_of(const tkv_cache *kv, int layer) {
    return &kv->tables.plan[layer].geometry;
}

static int64_t *tkvi_q_sq_sum_of(const tkv_cache *kv, int layer, int head) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    return kv->stats.q_sq_sum + p->at.channels + (size_t)head * (size_t)p->geometry.head_dim;
}

static tkvi_wide_sum *tkvi_far_attention_of(const tkv_cache *kv, int layer, int head) {
    return kv->stats.far_attention + kv->tables.plan[layer].at.heads + (size_t)head;
}

static int64_t *tkvi_n_sampled_of(const tkv_cache *kv, int layer, int head) {
    return kv->stats.n_sampled + kv->tables.plan[layer].at.heads + (size_t)head;
}

static int64_t *tkvi_q_products_of(const tkv_cache *kv, int layer, int head) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    return kv->stats.q_products + p->at.products + (size_t)head * tkvi_n_products(p->geometry.head_dim);
}

/* The state of a head in a family that learns from queries. NULL where no tier of the layer has its formats: a loaded
 * block can lie in a tier that tokens do not reach here. */
static void *tkvi_query_state_of(const tkv_cache *kv, const tkvi_family *f, int layer, int head) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    tkvi_family_state state;
    if (!TKVI_HAS_QUERY_LEARNERS || !(p->query_parts & f->part)) return NULL;
    state = tkvi_state_of(&kv->tables.cfg.format, &p->geometry, NULL,
                          kv->stats.query_states + p->at.query_states, p->query_parts, f);
    return tkvi_head_state(&state, f, head);
}

/* Bytes that thinning of states can give to other parts of the cache. In place states have memory of their own. */
static size_t tkvi_spare_state_bytes(const tkv_cache *kv) {
    return kv->pool.keep_all ? 0 : kv->states.spare_bytes;
}

static uint32_t *tkvi_ids(const tkv_cache *kv, int seq, int layer) {
    const tkvi_seq *s = &kv->seq[seq];
    return s->block ? s->block + (size_t)layer * s->cap : NULL;
}

/* The block that an entry holds. */
static tkvi_block *tkvi_block_of(const tkv_cache *kv, uint32_t id) {
    return &kv->pool.block[kv->pool.entry[id].block];
}

static int tkvi_block_start(const tkv_cache *kv, const uint32_t *ids, int i) {
    return kv->pool.entry[ids[i]].start;
}

/* End position of block i (exclusive): the start of the next block, or the length of the list. */
static int tkvi_block_end(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return i + 1 < list->n ? tkvi_block_start(kv, ids, i + 1) : list->len;
}

/* Index of the block that covers a position. -1: the position is past the end or has expired. Blocks of anchors cover
 * none. */
static int tkvi_block_at(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int position) {
    int low = tkvi_anchors_of(list), high = list->n;
    if (position >= list->len) return -1;
    while (low < high) { /* finds the first block that starts after it */
        const int mid = low + (high - low) / 2;
        if (tkvi_block_start(kv, ids, mid) > position) high = mid;
        else low = mid + 1;
    }
    return low > tkvi_anchors_of(list) ? low - 1 : -1;
}

/* Token slots in use in block i, evicted tokens included, and slots before first_slot. */
static int tkvi_block_tokens(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_entry *e = &kv->pool.entry[ids[i]];
    if (TKVI_HAS_EVICT && e->n_packed) return e->n_packed;
    return e->end_slot ? e->end_slot : e->first_slot + tkvi_block_end(kv, list, ids, i) - e->start;
}

/* Makes the slots in use of block i a part of its entry, so that indices behind them have no token. */
static void tkvi_end_slots(tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    tkvi_entry *e = &kv->pool.entry[ids[i]];
    if (!e->n_packed && !e->end_slot) e->end_slot = (uint8_t)tkvi_block_tokens(kv, list, ids, i);
}

/* Number of bits that are set. */
static int tkvi_n_bits(uint64_t mask) {
    int n = 0;
    for (; mask; mask &= mask - 1) n++;
    return n;
}

/* 1 if a block does not expire: it has named sinks, and queries see them beyond the window. */
static int tkvi_outlasts_window(const tkv_cache *kv, int layer, uint32_t id) {
    return kv->tables.plan[layer].keeps_sinks && tkvi_sink_mask(&kv->pool, id);
}

/* Index of the first block of a list that may expire. Blocks with sinks that queries see beyond the window are before
 * it: such a block loses its other tokens when the window has passed them. */
static int tkvi_first_to_expire(const tkv_cache *kv, int layer, const tkvi_list *list, const uint32_t *ids) {
    int i = kv->tables.plan[layer].keeps_sinks ? list->sinks : 0;
    while (i < list->n && tkvi_block_start(kv, ids, i) < list->expired &&
           tkvi_outlasts_window(kv, layer, ids[i]))
        i++;
    return i;
}

/* expired_end of a list as its tokens tell it: right where no position jumps near the border. */
static int tkvi_told_expired_end(const tkv_cache *kv, int layer, const tkvi_list *list, const uint32_t *ids) {
    const int first = tkvi_min(tkvi_first_to_expire(kv, layer, list, ids), list->n - 1);
    return list->expired + (list->n ? kv->pool.entry[ids[first]].shift : list->shift);
}

/* Number of tokens that have expired. Indices of sinks that stay are before `expired`, too. */
static int tkvi_n_expired(const tkv_cache *kv, int layer, const tkvi_list *list, const uint32_t *ids) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    int n = tkvi_max(0, list->expired - (p->keeps_sinks ? p->sink : 0)),
        i = p->keeps_sinks ? tkvi_first_to_expire(kv, layer, list, ids) : 0;
    while (i-- > list->sinks) n -= tkvi_n_bits(tkvi_sink_mask(&kv->pool, ids[i]));
    return n;
}

/* Bits of the first `slots` slots, 1 .. 64. */
static uint64_t tkvi_slots_before(int slots) { return ~(uint64_t)0 >> (TKVI_BLOCK - slots); }

/* Bit per slot: 1 where the slot has a token that was not evicted. slots: 1 .. 64. */
static uint64_t tkvi_live_mask(const tkvi_entry *e, int slots) {
    return ~e->evicted_mask & tkvi_slots_before(slots) & ~(uint64_t)0 << e->first_slot;
}

/* 1 if the tokens of two entries moved by the same distance, so that one entry can have both. */
static int tkvi_moved_alike(const tkvi_entry *a, const tkvi_entry *b) {
    return a->shift == b->shift && a->turned == b->turned;
}

/* 1 if each slot of the entry has a live token, up to the last one in use. */
static int tkvi_has_all_slots(const tkvi_entry *e) {
    return !e->evicted_mask && !e->first_slot && !e->n_packed;
}

/* Index of the token in a slot of an entry that lists indices. */
static int tkvi_listed_index(const tkvi_entry *e, const tkvi_token_meta *m, int slot) {
    return e->has_anchors ? m->index.any[slot] : e->start + m->index.after_start[slot];
}

/* Index of the token in a slot of entry `id`. */
static int tkvi_slot_index(const tkv_cache *kv, uint32_t id, int slot) {
    const tkvi_entry *e = &kv->pool.entry[id];
    if (!TKVI_HAS_EVICT || !e->n_packed) return e->start + slot - e->first_slot;
    return tkvi_listed_index(e, &kv->pool.token_meta[id], slot);
}

static void tkvi_set_slot_index(tkv_cache *kv, uint32_t id, int slot, int position) {
    if (kv->pool.entry[id].has_anchors) kv->pool.token_meta[id].index.any[slot] = position;
    else kv->pool.token_meta[id].index.after_start[slot] = (uint16_t)(position - kv->pool.entry[id].start);
}

/* The position from which the tokens of a list stay exact: the start of its last append. While the next append is in
 * progress, its own tokens are still to come, and the tokens of the last one may be recoded. */
static int tkvi_exact_from(const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const int is_appending =
        kv->seq[seq].is_appending && kv->call.append_layer == layer && !kv->seq[seq].in_step;
    return is_appending ? list->len : list->chunk_start;
}

/* Records that block `id` changed its tier when the list had `len` tokens. Promotion then waits for the cool-down
 * (step/promotion.h). */
static void tkvi_record_move(tkv_cache *kv, uint32_t id, int len) {
    if (TKVI_HAS_EVICT && kv->pool.token_meta) kv->pool.token_meta[id].moved_at = len + 1;
}

/* Removes the quality meter's copies of the blocks that begin at the positions from .. to - 1. */
static void tkvi_forget_meter_copies_in(tkv_cache *kv, int seq, int layer, int from, int to) {
    int i, copy;
    if (!TKVI_HAS_METER || !kv->meter || kv->meter->seq != seq) return;
    for (i = 0; i < kv->meter->n; i++) {
        tkvi_head_probe *probe = &kv->meter->head_probe[i];
        for (copy = probe->layer == layer ? probe->n : 0; copy-- > 0;)
            if (probe->start[copy] >= from && probe->start[copy] < to) tkvi_head_probe_drop(probe, copy);
    }
}

static void tkvi_forget_meter_copies(tkv_cache *kv, int seq, int layer, int start) {
    tkvi_forget_meter_copies_in(kv, seq, layer, start, start + 1);
}

/* End (exclusive) of the positions that tokens of block i can have. An anchor can have any position of the list. */
static int tkvi_block_index_end(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return i < tkvi_anchors_of(list) ? list->len : tkvi_block_end(kv, list, ids, i);
}

/* 1 if tokens cannot move to other slots. Formats that undo RoPE need consecutive positions in a block. */
static int tkvi_has_fixed_slots(const tkv_cache *kv) { return kv->tables.has_fixed_slots; }

/* Copies token_meta of the slots in moved_mask from block `from` to consecutive slots of block `to`, from `slot` on.
 * start: first position of `to`. Both may be the same block. Returns the next free slot. */
static int tkvi_move_token_meta(tkv_cache *kv, uint32_t to, int slot, uint32_t from, uint64_t moved_mask,
                                int start) {
    tkvi_token_meta *dst = &kv->pool.token_meta[to], *src = &kv->pool.token_meta[from];
    const uint64_t pinned = src->pinned_mask, temporary_pins = src->temporary_mask,
                   anchored = src->anchored_mask;
    int t;
    if (slot == 0) dst->pinned_mask = dst->temporary_mask = dst->anchored_mask = 0;
    for (t = 0; t < TKVI_BLOCK; t++) {
        if (!(moved_mask >> t & 1)) continue;
        dst->index.after_start[slot] =
            (uint16_t)(tkvi_slot_index(kv, from, t) - start); /* slot <= t if from == to */
        dst->scores[slot] = src->scores[t];
        dst->pinned_mask |= (pinned >> t & 1) << slot;
        dst->temporary_mask |= (temporary_pins >> t & 1) << slot;
        if (temporary_pins >> t & 1)
            dst->temporary_until = tkvi_max(dst->temporary_until, src->temporary_until);
        dst->anchored_mask |= (anchored >> t & 1) << slot;
        slot++;
    }
    return slot;
}

/* 1 if `layout` has the format of the layer's hot tier. */
static int tkvi_is_hot_layout(const tkv_cache *kv, int layer, int layout) {
    return kv->tables.layout[layout].key == kv->tables.plan[layer].now.key[TKV_TIER_HOT];
}

/* Number of further tokens after which a token that left every window expires. A truncation of the hot tail can bring
 * it back into a window. */
static int tkvi_expiry_margin(const tkvi_plan *p) {
    return p->now.hot == TKVI_FOREVER ? TKVI_BLOCK : p->now.hot;
}

/* 1 if nothing gives the tokens of a block: it is discarded, and cfg.recompute has no model. */
static int tkvi_has_no_source(const tkv_cache *kv, const tkvi_block *b) {
    return tkvi_is_discarded(b) && !kv->tables.cfg.recompute.compute;
}

/* The tier that block i of a list is counted in. Sinks and anchors count as hot. */
static tkv_tier tkvi_tier_at(const tkvi_list *list, int i) {
    if (i < list->sinks) return TKV_TIER_HOT;
    if (i < list->sinks + list->archive) return TKV_TIER_ARCHIVE;
    return i < list->sinks + list->archive + list->warm ? TKV_TIER_WARM : TKV_TIER_HOT;
}

/* The tier of the tokens of block i: that of the list, or that which the block is coded for if a colder list had it
 * before (tkv_seq_copy). Blocks with named sinks count as hot, as sinks do. */
static tkv_tier tkvi_token_tier(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkv_tier tier = tkvi_tier_at(list, i), coded = (tkv_tier)tkvi_block_of(kv, ids[i])->tier;
    if (tkvi_sink_mask(&kv->pool, ids[i])) return TKV_TIER_HOT;
    return coded > tier ? coded : tier;
}

/* Tables are learned from at most this many blocks of a head. */
#define TKVI_LEARN_BLOCKS 16

/* Visits n slots of a block. Those in dead_mask have no token, and at least one has. */
typedef void (*tkvi_visit)(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n,
                           uint64_t dead_mask);

/* 1 if tables are learned from a block behind the sinks: it is in RAM, and coded for the hot or warm tier. A list may
 * have such a block in its archive, while another list holds it. Of the entries of a block one is taken. */
static int tkvi_is_learned_from(const tkv_cache *kv, uint32_t id) {
    const tkvi_block *b = tkvi_block_of(kv, id);
    return kv->pool.entry[id].is_first && b->tier < TKV_TIER_ARCHIVE && !tkvi_is_offloaded(b);
}

/* Slots in use of block i, by any of its holders. */
static int tkvi_slots_in_use(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    const tkvi_block *b = tkvi_block_of(kv, ids[i]);
    return b->refs > 1 ? b->n_shared_slots : tkvi_block_tokens(kv, list, ids, i);
}

/* Mask of the used slots of block i: live tokens and anchored tokens. */
static uint64_t tkvi_used_mask(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return tkvi_live_mask(&kv->pool.entry[ids[i]], tkvi_block_tokens(kv, list, ids, i)) |
           (TKVI_HAS_EVICT && kv->pool.token_meta ? kv->pool.token_meta[ids[i]].anchored_mask : 0);
}

/* Index of the last token that is there among the first n of a list; -1: there is none. *shift: of its entry. */
static int tkvi_last_index(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int n,
                           int *shift) {
    int i, t;
    for (i = tkvi_block_at(kv, list, ids, tkvi_min(n, list->len) - 1); i >= tkvi_anchors_of(list); i--) {
        const uint64_t used = tkvi_used_mask(kv, list, ids, i);
        for (t = TKVI_BLOCK; used && t-- > 0;) {
            if (!(used >> t & 1) || tkvi_slot_index(kv, ids[i], t) >= n) continue;
            *shift = kv->pool.entry[ids[i]].shift;
            return tkvi_slot_index(kv, ids[i], t);
        }
    }
    return -1;
}

/* Position of the token with an index, also if it is gone. It is in the list. The next token follows the last ones,
 * also where these are gone. */
static int tkvi_index_position(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int index) {
    int i, unused;
    if (!tkvi_has_moved(list)) return index;
    i = tkvi_block_at(kv, list, ids, index);
    if (i + 1 >= list->n && index > tkvi_last_index(kv, list, ids, list->len, &unused))
        return index + list->shift;
    return index + kv->pool.entry[ids[tkvi_max(0, i)]].shift;
}

/* The position that follows the last token of a list, or 0 if that token is gone and would be before 0. */
static int tkvi_next_position(const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    return TKVI_HAS_MOVES ? tkvi_max(0, list->len + list->shift) : list->len;
}

/* The shift of the last token that is there among the first n of a sequence, in any layer: of this one if it is there
 * in several. Returns 0 if none is. */
static int tkvi_shift_of_last(const tkv_cache *kv, int seq, int layer, int n, int *shift) {
    const int n_layers = kv->tables.cfg.model.n_layers;
    int i, last = -1;
    *shift = 0;
    for (i = 0; i < n_layers && last < n - 1; i++) {
        const int other = (layer + i) % n_layers;
        int of_other = 0;
        const int at =
            tkvi_last_index(kv, tkvi_list_of(kv, seq, other), tkvi_ids(kv, seq, other), n, &of_other);
        if (at > last) *shift = of_other;
        last = tkvi_max(last, at);
    }
    return last >= 0;
}

/* The lowest index from `from` on of a token that is there in any layer, in an entry of another shift than `but`
 * (-TKVI_POSITIONS: of any). TKVI_FOREVER: none is. *shift: of its entry. */
static int tkvi_first_index_from(const tkv_cache *kv, int seq, int from, int but, int *shift) {
    int layer, i, t, first = TKVI_FOREVER;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        i = tkvi_max(tkvi_anchors_of(list), tkvi_block_at(kv, list, ids, tkvi_min(from, list->len - 1)));
        for (; i < list->n && tkvi_block_start(kv, ids, i) < first; i++) {
            const tkvi_entry *e = &kv->pool.entry[ids[i]];
            const uint64_t used = e->shift == but ? 0 : tkvi_used_mask(kv, list, ids, i);
            for (t = 0; t < TKVI_BLOCK; t++) {
                const int at = used >> t & 1 ? tkvi_slot_index(kv, ids[i], t) : -1;
                if (at < from || at >= first) continue;
                first = at;
                *shift = e->shift;
            }
        }
    }
    return first;
}

/* The shift that a layer has when it is cut to n tokens. Layers that have n tokens know it; else the last token of the
 * n that is there in any layer does. So all layers get the same one, whatever has expired or was evicted in each. */
static int tkvi_shift_after_cut(const tkv_cache *kv, int seq, int layer, int n) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int shift = 0, other;
    if (!TKVI_HAS_MOVES || n == 0) return 0;
    if (tkvi_last_index(kv, list, tkvi_ids(kv, seq, layer), n, &shift) == n - 1) return shift;
    for (other = 0; other < kv->tables.cfg.model.n_layers; other++)
        if (tkvi_list_of(kv, seq, other)->len == n) return tkvi_list_of(kv, seq, other)->shift;
    if (!tkvi_shift_of_last(kv, seq, layer, n, &shift))
        (void)tkvi_first_index_from(kv, seq, 0, -TKVI_POSITIONS, &shift);
    return shift;
}

/* Slots of a block that some entry of a list has a token in. at: index of the block in the list that changes. Forks
 * have it at the same index as a rule, so these entries come first, and all blocks only if they leave slots open. */
static uint64_t tkvi_slots_with_tokens(const tkv_cache *kv, int layer, uint32_t number, int at) {
    const tkvi_block *b = &kv->pool.block[number];
    const uint64_t all = tkvi_slots_before(kv->tables.layout[b->layout].tokens);
    uint64_t found = 0;
    uint32_t n_found = 0;
    int pass, seq, i;
    for (pass = 0; pass < 2; pass++)
        for (seq = 0, n_found = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            for (i = pass ? 0 : at; i < (pass ? list->n : tkvi_min(at + 1, list->n)); i++) {
                TKVI_ASSERT(kv->pool.entry[ids[i]].in_use);
                if (kv->pool.entry[ids[i]].block != number) continue;
                found |= tkvi_used_mask(kv, list, ids, i);
                if ((found & all) == all || ++n_found == b->refs) return found;
            }
        }
    return found;
}

/* The first n slots of block i without a token of any list: what they hold counts for nothing. */
static uint64_t tkvi_dead_slots(const tkv_cache *kv, int layer, const tkvi_list *list, const uint32_t *ids,
                                int i, int n) {
    uint64_t dead_mask = tkvi_slots_before(n) & ~tkvi_used_mask(kv, list, ids, i);
    if (dead_mask && tkvi_block_of(kv, ids[i])->refs > 1)
        dead_mask &= ~tkvi_slots_with_tokens(kv, layer, kv->pool.entry[ids[i]].block, i);
    return dead_mask;
}

/* Removes the rows of dead slots from n rows. Returns the number of those that stay. */
static int tkvi_drop_dead_rows(float *x, int stride, int n, uint64_t dead_mask) {
    int t, n_live = 0;
    if (!dead_mask) return n;
    for (t = 0; t < n; t++) {
        if (dead_mask >> t & 1) continue;
        if (n_live < t) memcpy(x + n_live * stride, x + t * stride, (size_t)stride * sizeof *x);
        n_live++;
    }
    return n_live;
}

/* Calls `visit` for the newest blocks of a head that tables are learned from. Order: the newest block of each sequence,
 * then the second newest of each, and so on. Returns the number of calls. */
static int tkvi_visit_newest_blocks(const tkv_cache *kv, int layer, int head, tkvi_visit visit, void *ctx) {
    int seq, from_end, is_more = 1, found = 0;
    for (from_end = 1; is_more && found < TKVI_LEARN_BLOCKS; from_end++) {
        is_more = 0;
        for (seq = 0; seq < kv->tables.cfg.limits.max_seqs && found < TKVI_LEARN_BLOCKS; seq++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            const int i = list->n - from_end;
            const tkvi_block *b;
            const tkvi_record *r;
            uint64_t dead_mask;
            int n;
            if (i < list->sinks) continue;
            is_more = 1;
            if (!tkvi_is_learned_from(kv, ids[i])) continue;
            n = tkvi_slots_in_use(kv, list, ids, i);
            dead_mask = tkvi_dead_slots(kv, layer, list, ids, i, n);
            if (dead_mask == tkvi_slots_before(n)) continue;
            b = tkvi_block_of(kv, ids[i]);
            r = &kv->tables.layout[b->layout].record[head];
            visit(ctx, r, tkvi_block_bytes(&kv->pool, b) + r->at, b->first_position, n, dead_mask);
            found++;
        }
    }
    return found;
}

/* >>errors of calls that change the cache: a status and a sentence (tkv_cache.error) */
static tkv_status tkvi_ok(tkv_cache *kv) {
    kv->call.error[0] = 0;
    return TKV_OK;
}

static tkv_status tkvi_fail(tkv_cache *kv, tkv_status st, const char *what, int64_t number,
                            const char *more) {
    tkvi_write_sentence(kv->call.error, sizeof kv->call.error, what, number, more);
    return st;
}

/* The same for a call that only reads the cache: others may fail at the same time. kv may be NULL. */
static tkv_status tkvi_fail_reader(tkv_cache *kv, tkv_status st, const char *what, int64_t number,
                                   const char *more) {
    if (!kv) return st;
    tkvi_lock(&kv->call.error_lock);
    if (TKVI_HAS_REPORTS) (void)tkvi_fail(kv, st, what, number, more);
    else kv->call.error[0] = 0;
    tkvi_unlock(&kv->call.error_lock);
    return st;
}

/* Writes the sentence of an error that a call finds when it fetches blocks. */
static tkv_status tkvi_fail_fetching(tkv_cache *kv, tkv_status st, int layer) {
    return tkvi_fail_reader(kv, st,
                            st == TKV_ERR_IO     ? "cfg.offload.read gave no block of layer"
                            : st == TKV_ERR_DATA ? "an offloaded block is damaged in layer"
                                                 : "cfg.recompute gave no K and V of layer",
                            layer, "");
}

/* >>parts of a call: they may fail at the same time */
static tkv_status tkvi_refuse_part(tkv_cache *kv, int part) {
    return tkvi_fail_reader(kv, TKV_ERR_ARG, "workspace is missing, or part is not 0 to n_parts - 1: part is",
                            part, "");
}

static tkv_status tkvi_refuse_workspace(tkv_cache *kv, size_t needed) {
    return tkvi_fail_reader(kv, TKV_ERR_CAPACITY,
                            "workspace is too small; bytes needed:", tkvi_int_of_size(needed), "");
}

/* Refuses a call that this build leaves out. sentence: names the switch. kv may be NULL. */
static tkv_status tkvi_refuse_left_out(tkv_cache *kv, const char *sentence) {
    return kv ? tkvi_fail(kv, TKV_ERR_UNSUPPORTED, sentence, 0, NULL) : TKV_ERR_UNSUPPORTED;
}

/* Refuses a call that lacks what a pointer should give. kv may be NULL. */
static tkv_status tkvi_refuse_missing(tkv_cache *kv, const char *sentence) {
    return kv ? tkvi_fail(kv, TKV_ERR_ARG, sentence, 0, NULL) : TKV_ERR_ARG;
}

/* >>events */
static void tkvi_emit_event(tkv_cache *kv, tkv_event_kind kind, int layer, int from, int to, size_t bytes,
                            const char *text) {
    tkv_event e;
    if (!kv->tables.cfg.host.on_event) return;
    memset(&e, 0, sizeof e);
    e.kind = kind;
    e.seq = TKV_NO_SEQ;
    e.layer = layer;
    e.from = from;
    e.to = to;
    e.bytes = bytes;
    e.text = text;
    kv->tables.cfg.host.on_event(kv->tables.cfg.host.event_user, &e);
}

static void tkvi_emit_evicted(tkv_cache *kv, int seq, int layer, const int *positions, int n) {
    tkv_event e;
    if (!kv->tables.cfg.host.on_event) return;
    memset(&e, 0, sizeof e);
    e.kind = TKV_EVENT_EVICT;
    e.seq = seq;
    e.layer = layer;
    e.positions = positions;
    e.n = n;
    e.text = "tokens were evicted";
    kv->tables.cfg.host.on_event(kv->tables.cfg.host.event_user, &e);
}

static void tkvi_emit_offloaded(tkv_cache *kv, int seq, int layer, int i) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    tkv_event e;
    if (!kv->tables.cfg.host.on_event) return;
    memset(&e, 0, sizeof e);
    e.kind = TKV_EVENT_OFFLOAD;
    e.seq = seq;
    e.layer = layer;
    e.from = tkvi_block_start(kv, ids, i);
    e.to = tkvi_block_end(kv, list, ids, i);
    e.bytes = kv->tables.layout[tkvi_block_of(kv, ids[i])->layout].bytes.total;
    e.text = "a block was offloaded";
    kv->tables.cfg.host.on_event(kv->tables.cfg.host.event_user, &e);
}

/* >>memory of statistics: allocated while some layer collects them */
static size_t tkvi_q_sq_sum_bytes(const tkvi_places *end) {
    return tkvi_align_up(end->channels * sizeof(int64_t));
}

static size_t tkvi_stats_bytes(const tkvi_places *end) {
    return tkvi_q_sq_sum_bytes(end) + tkvi_align_up(end->heads * (sizeof(tkvi_wide_sum) + sizeof(int64_t)));
}

/* Allocates the statistics if a format needs them. Under a limit it first gives free pages back, because they count.
 * Returns 0 without memory. */
static int tkvi_allocate_stats(tkv_cache *kv, tkvi_heap *heap) {
    size_t bytes = tkvi_stats_bytes(&kv->tables.end);
    if (!kv->tables.any_shared || kv->stats.q_sq_sum) return 1;
    if (heap->limit) tkvi_trim_to(&kv->pool, 0);
    kv->stats.q_sq_sum = (int64_t *)tkvi_get(heap, bytes);
    if (!kv->stats.q_sq_sum) return 0;
    memset(kv->stats.q_sq_sum, 0, bytes);
    kv->stats.n_sampled = kv->stats.q_sq_sum + tkvi_q_sq_sum_bytes(&kv->tables.end) / sizeof(int64_t);
    kv->stats.far_attention = (tkvi_wide_sum *)(void *)(kv->stats.n_sampled + kv->tables.end.heads);
    return 1;
}

static void tkvi_free_stats(tkv_cache *kv) {
    tkvi_put(&kv->heap, kv->stats.q_sq_sum, tkvi_stats_bytes(&kv->tables.end));
    kv->stats.q_sq_sum = kv->stats.n_sampled = NULL;
    kv->stats.far_attention = NULL;
}

/* >>sizes of the fixed piece */
static int tkvi_n_areas(const tkvi_derived_config *derived) {
    int i, any = 0;
    for (i = 0; i < derived->n_keys; i++) any |= derived->key[i].v_in_k;
    return !any || !TKVI_HAS_PREFILL ? 0 : derived->cfg.host.parallel_for ? TKVI_MAX_AREAS : 1;
}

/* Floats of the partial results of one split, in the widest layer. */
static int tkvi_split_floats(const tkvi_derived_config *derived) {
    const int pad = tkvi_max(derived->widest.k_pad, derived->widest.v_pad);
    const int rows = TKVI_SUMS_FLOATS(derived->widest.v_pad), few = tkvi_prefill_sums_floats(pad, 16),
              many = tkvi_prefill_sums_floats(tkvi_min(pad, TKVI_PREFILL_PART), TKVI_PREFILL);
    return tkvi_n_areas(derived) ? tkvi_max(rows, tkvi_max(few, many)) : rows;
}

static void tkvi_compute_fixed_sizes(const tkvi_derived_config *derived, tkvi_sizes *s) {
    const size_t seqs = (size_t)derived->cfg.limits.max_seqs, layers = (size_t)derived->cfg.model.n_layers;
    const int k_pad = derived->widest.k_pad, v_pad = derived->widest.v_pad;
    int i;
    memset(s, 0, sizeof *s);
    s->cache = tkvi_align_up(sizeof(tkv_cache));
    s->tables = tkvi_align_up(tkvi_tables_bytes(derived));
    s->seqs = tkvi_align_up(tkvi_multiply_sizes(seqs, sizeof(tkvi_seq)));
    s->lists = tkvi_align_up(tkvi_multiply_sizes(tkvi_multiply_sizes(seqs, layers), sizeof(tkvi_list)));
    s->states = tkvi_align_up(tkvi_add_sizes(tkvi_multiply_sizes(seqs, sizeof(tkvi_state_list)), layers));
    /* per class: reserved_slots of each sequence, 2 of the pool, partial_pages */
    s->counts = tkvi_align_up(tkvi_multiply_sizes(seqs + 3, (size_t)derived->n_classes * sizeof(int64_t)));
    s->recode = tkvi_align_up((size_t)((k_pad + v_pad) * TKVI_BLOCK) * sizeof(float));
    if (derived->cfg.host.parallel_for)
        s->split_sums = tkvi_align_up((size_t)(TKVI_MAX_SPLITS * tkvi_split_floats(derived)) * sizeof(float));
    s->areas = (size_t)tkvi_n_areas(derived) * sizeof(tkvi_prefill_area);
    if (derived->any_shared || derived->token_parts)
        s->tokens_seen = tkvi_align_up(layers * (sizeof(int) + sizeof(tkvi_next_table)));
    if (TKVI_HAS_QUERY_LEARNERS && derived->query_parts) {
        s->query_stats = tkvi_align_up(layers * sizeof(tkvi_query_stats));
        s->q_products = tkvi_align_up(tkvi_multiply_sizes(derived->end.products, sizeof(int64_t)));
        s->query_states = derived->end.query_states;
        s->solve = tkvi_align_up(tkvi_n_products(derived->widest.head_dim) * sizeof(float));
    }
    tkvi_meter_sizes(derived, &s->meter, &s->meter_copies);
    {
        const size_t piece[] = {s->cache,      s->tables,       s->seqs,        s->lists,
                                s->states,     s->counts,       s->tokens_seen, s->query_stats,
                                s->meter,      s->q_products,   s->solve,       s->recode,
                                s->split_sums, s->query_states, s->areas,       s->meter_copies};
        for (i = 0; i < (int)(sizeof piece / sizeof piece[0]); i++)
            s->total = tkvi_add_sizes(s->total, piece[i]);
    }
}

/* Bytes that tkv_get_memory reports as tables. */
static size_t tkvi_table_bytes(const tkvi_sizes *s) {
    return s->tables + s->tokens_seen + s->query_stats + s->q_products + s->query_states + s->meter;
}

/* Bytes that tkv_get_memory reports as scratch. */
static size_t tkvi_scratch_bytes(const tkvi_sizes *s) {
    return s->solve + s->recode + s->split_sums + s->areas;
}

/* >>work space of eviction (reclaim/evict_tokens.h): bytes for each block of the longest list */
#define TKVI_CHOICE_BYTES (TKVI_BLOCK * (sizeof(int) + 2 * sizeof(float) + 1) + 2 * sizeof(uint64_t))

static size_t tkvi_choice_entry_bytes(const tkv_config *cfg) {
    return TKVI_HAS_EVICT && cfg->evict.policy ? TKVI_CHOICE_BYTES : 0;
}

/* Adds the blocks in front of n lists of a layer. */
static void tkvi_add_front_blocks(const tkvi_derived_config *derived, const tkvi_plan *p, int64_t n,
                                  int64_t *slots) {
    if (p->sink) slots[derived->class_of[p->sink_layout]] += n;
    if (TKVI_HAS_EVICT && p->n_anchor_blocks)
        slots[derived->class_of[p->anchor_layout]] += p->n_anchor_blocks * n;
}

/* The smallest budget: the fixed piece, statistics, one version of the tables, and pages to begin with. */
static size_t tkvi_least_budget(const tkvi_derived_config *derived, const tkvi_sizes *s) {
    const size_t pages = (size_t)derived->recode_pages + 2;
    const size_t stats = derived->any_shared ? tkvi_stats_bytes(&derived->end) : 0;
    const size_t tables = tkvi_add_sizes(stats, tkvi_version_bytes(derived));
    return tkvi_add_sizes(tkvi_add_sizes(s->total, tables),
                          tkvi_multiply_sizes(pages, derived->page_bytes + sizeof(tkvi_page)));
}

/* Most blocks behind the front ones that the first tokens of a sequence take if they come one at a time. With a policy
 * any number takes no more, because evictions make room: these leave the blocks of protected tokens, the last block,
 * and the one that comes. */
static int tkvi_n_first_blocks(const tkvi_derived_config *derived) {
    const tkv_config *cfg = &derived->cfg;
    int64_t n_staying;
    if (!TKVI_HAS_EVICT || !cfg->evict.policy) return 2;
    if (derived->any_fixed) return 4; /* evictions merge no blocks, and need not free any */
    n_staying = tkvi_n_protected(&cfg->evict) + cfg->tiers.n_anchors;
    if (cfg->tiers.n_anchors) n_staying *= 2; /* their slots stay reserved */
    return tkvi_max(4, (int)((n_staying + TKVI_BLOCK - 1) / TKVI_BLOCK) + 2);
}

/* The first tokens of a sequence that a sentence speaks of. */
static int tkvi_first_tokens(const tkvi_derived_config *derived) {
    const int64_t n = (int64_t)tkvi_n_first_blocks(derived) * TKVI_BLOCK;
    return n < derived->cfg.limits.max_tokens ? (int)n : derived->cfg.limits.max_tokens;
}

/* The key of the tier in which the last level leaves a block that is not exact any more. A level codes nothing that
 * would take more bytes. */
static int tkvi_last_key(const tkvi_derived_config *derived, const tkvi_tier_spec *last) {
    const int key = last->key[tkvi_tier_of_level(last, TKV_TIER_ARCHIVE)], hot = last->key[TKV_TIER_HOT];
    return derived->bytes[key].total < derived->bytes[hot].total ? key : hot;
}

/* Marks the other classes in which levels of a layer can leave blocks that the last level then codes no more, because
 * they take fewer bytes. */
static void tkvi_mark_tight_classes(const tkvi_derived_config *derived, const tkvi_tier_spec *specs,
                                    uint8_t *is_tight) {
    const int n = derived->cfg.budget.pressure.max_level, last = tkvi_last_key(derived, &specs[n]);
    int level, tier;
    for (level = 0; level < n; level++)
        for (tier = TKV_TIER_WARM; tier < TKV_TIER_COUNT && specs[level].hot != TKVI_FOREVER; tier++) {
            const int key = specs[level].key[tier];
            if (derived->bytes[key].total < derived->bytes[last].total) is_tight[derived->class_of[key]] = 1;
        }
}

/* A budget that is enough for them if they come one at a time: in each layer, a block of exact tokens, and blocks of
 * the tightest level. */
static size_t tkvi_budget_for_first_tokens(tkvi_derived_config *derived, const tkvi_sizes *s) {
    const int n_blocks = (tkvi_first_tokens(derived) + TKVI_BLOCK - 1) / TKVI_BLOCK;
    const int64_t n_list = (int64_t)n_blocks + 2 + tkvi_n_anchor_blocks(&derived->cfg);
    const size_t layers = (size_t)derived->cfg.model.n_layers,
                 stats = derived->any_shared ? tkvi_stats_bytes(&derived->end) : 0,
                 version = tkvi_version_bytes(derived),
                 list_entry_bytes = layers * sizeof(uint32_t) + tkvi_choice_entry_bytes(&derived->cfg);
    tkvi_tier_spec specs[TKV_MAX_LEVELS];
    const tkvi_tier_spec *tightest = &specs[derived->cfg.budget.pressure.max_level];
    int64_t slots[TKVI_MAX_LAYOUTS] = {0}, pages = derived->recode_pages;
    uint8_t is_tight[TKVI_MAX_LAYOUTS] = {0};
    size_t arrays, total;
    int i, c;
    for (i = 0; i < derived->cfg.model.n_layers; i++) {
        tkvi_plan p;
        (void)tkvi_plan_of(derived, i, &p, specs);
        if (p.stored_layer != i) continue;
        tkvi_add_front_blocks(derived, &p, 1, slots);
        slots[derived->class_of[tightest->key[TKV_TIER_HOT]]]++;
        slots[derived->class_of[tkvi_last_key(derived, tightest)]] += n_blocks - 1;
        tkvi_mark_tight_classes(derived, specs, is_tight);
    }
    for (c = 0; c < derived->n_classes; c++)
        pages += tkvi_pages_for(&derived->size_class[c], slots[c]) + is_tight[c];
    arrays = tkvi_multiply_sizes(tkvi_cap_for(n_list * derived->n_stored + derived->n_classes),
                                 tkvi_block_entry_bytes(&derived->cfg));
    arrays = tkvi_add_sizes(arrays, tkvi_multiply_sizes(tkvi_cap_for(n_list), list_entry_bytes));
    arrays = tkvi_add_sizes(arrays, tkvi_multiply_sizes(tkvi_cap_for(pages), sizeof(tkvi_page)));
    total = tkvi_multiply_sizes(arrays, 2); /* one that grows is there twice */
    total = tkvi_add_sizes(tkvi_add_sizes(s->total, stats), total);
    total = tkvi_add_sizes(total, tkvi_multiply_sizes((size_t)pages, derived->page_bytes));
    if (!TKVI_HAS_EVICT || !derived->cfg.evict.policy) return tkvi_add_sizes(total, version);
    /* later tables take versions of their own: two, or all if that is little (tkvi_keeps_two_tables) */
    total = tkvi_add_sizes(total, tkvi_multiply_sizes(version, TKVI_IN_PLACE_VERSIONS));
    if (version > total / TKVI_LEAST_BUDGET_SHARE) return total;
    return tkvi_add_sizes(total, tkvi_multiply_sizes(version, TKVI_VERSIONS - TKVI_IN_PLACE_VERSIONS));
}

/* Number of free pages that a cache with a budget keeps, because the next block of every layer needs them. */
static int64_t tkvi_free_pages_to_keep(const tkv_cache *kv) {
    return (int64_t)(kv->budget.bytes_per_block / kv->tables.page_bytes) + 1;
}

/* Builds an empty cache in one fixed piece of memory. source: the heap of the memory; the cache gets a copy of it. */
static tkv_status tkvi_build_cache(tkvi_derived_config *derived, const tkvi_heap *source, tkv_cache **out) {
    tkvi_heap heap = *source;
    tkvi_sizes s;
    uint8_t *next;
    tkv_cache *kv;
    int c;
    size_t classes = (size_t)derived->n_classes;
    const tkvi_kernels *kernels = tkvi_kernels_for(derived->cfg.host.isa);
    if (!kernels) return TKV_ERR_ISA;
    tkvi_compute_fixed_sizes(derived, &s);
    if (derived->cfg.budget.bytes && derived->cfg.budget.bytes < tkvi_least_budget(derived, &s))
        return TKV_ERR_BUDGET;
    next = (uint8_t *)tkvi_get(&heap, s.total);
    if (!next) return TKV_ERR_NOMEM;
    memset(next, 0, s.total - tkvi_scratch_bytes(&s) - s.meter_copies);
    kv = (tkv_cache *)(void *)next;
    next += s.cache;
    tkvi_tables_build(&kv->tables, derived, next);
    next += s.tables;
    kv->seq = (tkvi_seq *)(void *)next;
    next += s.seqs;
    kv->list = (tkvi_list *)(void *)next;
    next += s.lists;
    kv->states.list = (tkvi_state_list *)(void *)next;
    kv->states.n_lists = derived->cfg.limits.max_seqs;
    kv->states.is_stateful = next + (size_t)derived->cfg.limits.max_seqs * sizeof(tkvi_state_list);
    kv->states.n_layers = derived->cfg.model.n_layers;
    kv->states.wipes_freed = derived->cfg.host.wipe_freed;
    kv->states.limit = derived->cfg.limits.state_bytes ? derived->cfg.limits.state_bytes : (size_t)-1;
    next += s.states;
    kv->reserved_slots = (int64_t *)(void *)next;
    kv->pool.used_slots = kv->reserved_slots + (size_t)derived->cfg.limits.max_seqs * classes;
    kv->pool.reserved_slots = kv->pool.used_slots + classes;
    kv->pool.partial_pages = (uint32_t *)(void *)(kv->pool.reserved_slots + classes);
    next += s.counts;
    if (s.tokens_seen) {
        kv->stats.tokens_seen = (int *)(void *)next;
        kv->stats.next_table =
            (tkvi_next_table *)(void *)(kv->stats.tokens_seen + derived->cfg.model.n_layers);
        for (c = 0; c < derived->cfg.model.n_layers; c++) /* layers that need no table collect nothing */
            if (!tkvi_plan_learns(&kv->tables.plan[c])) kv->stats.tokens_seen[c] = -1;
    }
    next += s.tokens_seen;
    if (TKVI_HAS_QUERY_LEARNERS && derived->query_parts) {
        kv->stats.queries = (tkvi_query_stats *)(void *)next;
        kv->stats.q_products = (int64_t *)(void *)(next + s.query_stats);
        kv->stats.query_states = next + s.query_stats + s.q_products;
        kv->work.solve = (float *)(void *)(next + s.query_stats + s.q_products + s.query_states + s.meter);
    }
    next += s.query_stats + s.q_products + s.query_states;
    kv->meter = tkvi_meter_build(derived, &kv->tables, next, next + s.meter + tkvi_scratch_bytes(&s));
    next += s.meter + s.solve;
    kv->work.recode = (float *)(void *)next;
    next += s.recode;
    kv->work.split_sums = s.split_sums ? (float *)(void *)next : NULL;
    next += s.split_sums;
    kv->work.area = (tkvi_prefill_area *)(void *)next;
    kv->work.n_areas = tkvi_n_areas(derived);
    kv->kernels = kernels;
    kv->sizes = s;
    kv->pool.tables = &kv->tables;
    if (!tkvi_allocate_stats(kv, &heap)) {
        tkvi_put(&heap, kv, s.total);
        return TKV_ERR_NOMEM;
    }
    kv->heap = heap;
    kv->pool.heap = kv->states.heap = &kv->heap;
    kv->pool.free_page = kv->pool.free_block = kv->pool.free_entry = TKVI_NIL;
    for (c = 0; c < derived->n_classes; c++) kv->pool.partial_pages[c] = TKVI_NIL;
    tkvi_token_score_init(&kv->token_scores, &kv->tables.cfg);
    (void)tkv_init_pressure(&kv->budget.pressure, &derived->cfg.budget.pressure, NULL, 0);
    kv->budget.pressure.cfg =
        derived->cfg.budget.pressure; /* tkvi_validate filled in the defaults; here 0 means level 0 */
    kv->budget.pressure.now.level = derived->first_level;
    kv->budget.relax_at = (size_t)-1;
    kv->pool.recode_pages = derived->recode_pages;
    kv->turns.lanes = derived->rope_lanes;
    for (c = 0; c < derived->cfg.model.n_layers; c++)
        if (kv->tables.plan[c].stored_layer == c)
            kv->budget.bytes_per_block +=
                kv->tables.layout[kv->tables.plan[c].now.layout[TKV_TIER_HOT]].bytes.total;
    if (derived->cfg.budget.bytes) kv->pool.kept_free_pages = tkvi_free_pages_to_keep(kv);
    *out = kv;
    return TKV_OK;
}

/* >>tables */
/* Allocates this version of the tables of all layers. Returns 0 without memory. */
static int tkvi_allocate_version(tkv_cache *kv, int version) {
    tkvi_tables *t = &kv->tables;
    uint8_t *mem;
    if (t->version[version].bytes) return 1;
    if (kv->heap.limit) tkvi_trim_to(&kv->pool, 0);
    mem = (uint8_t *)tkvi_get(&kv->heap, t->version_bytes);
    if (!mem) return 0;
    memset(mem, 0, t->version_bytes);
    tkvi_version_build(t, version, mem);
    return 1;
}

/* Bytes held by table versions and statistics. */
static size_t tkvi_learning_bytes(const tkv_cache *kv) {
    size_t n = kv->stats.q_sq_sum ? tkvi_stats_bytes(&kv->tables.end) : 0;
    int v;
    for (v = 0; v < TKVI_VERSIONS; v++) n += kv->tables.version[v].bytes ? kv->tables.version_bytes : 0;
    return n;
}

/* >>creation and destruction */
/* Initialises the heap with the config's allocator, or with malloc and free. */
static tkv_status tkvi_init_heap(const tkv_config *cfg, tkvi_heap *heap, char *reason, size_t size) {
    memset(heap, 0, sizeof *heap);
    heap->from = cfg->host.allocator;
#ifndef TKV_NO_MALLOC
    (void)reason;
    (void)size;
    if (!heap->from.alloc) {
        heap->from.alloc = tkvi_malloc;
        heap->from.release = tkvi_mfree;
    }
#else
    if (!heap->from.alloc)
        return tkvi_bad(reason, size, "host.allocator", 0,
                        "it must be set, as TKV_NO_MALLOC leaves malloc out");
#endif
    return TKV_OK;
}

/* Writes the reason for an error of tkvi_build_cache. */
static tkv_status tkvi_write_reason(tkv_status st, tkvi_derived_config *derived, char *reason, size_t size) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_sizes s;
    tkvi_compute_fixed_sizes(derived, &s);
    if (st == TKV_ERR_ISA) {
        tkvi_append_text(&t, "host.isa is ");
        tkvi_append_text(&t, tkvi_isa_name(derived->cfg.host.isa));
        tkvi_append_text(&t, "; these kernels are not in this program, or this machine cannot run them");
    } else if (st == TKV_ERR_BUDGET) {
        tkvi_append_text(&t, "budget.bytes is ");
        tkvi_append_digits(&t, (uint64_t)derived->cfg.budget.bytes);
        tkvi_append_text(&t, "; it must be at least ");
        tkvi_append_digits(&t, (uint64_t)tkvi_least_budget(derived, &s));
        tkvi_append_text(&t, " for an empty cache");
        if (!TKVI_HAS_REPORTS) return st;
        tkvi_append_text(&t, "; ");
        tkvi_append_digits(&t, (uint64_t)tkvi_budget_for_first_tokens(derived, &s));
        tkvi_append_text(&t, " is enough for the first ");
        tkvi_append_int(&t, tkvi_first_tokens(derived));
        tkvi_append_text(&t, " tokens of one sequence");
    } else {
        TKVI_ASSERT(st == TKV_ERR_NOMEM);
        tkvi_append_text(&t, "the allocator gave no memory for an empty cache, which takes at least ");
        tkvi_append_digits(&t, (uint64_t)s.total);
        tkvi_append_text(&t, " bytes");
    }
    return st;
}

TKV_API tkv_status tkv_validate_config(const tkv_config *cfg, char *reason, size_t size) {
    tkvi_derived_config derived;
    tkvi_sizes fixed;
    const tkv_status st = tkvi_validate(cfg, &derived, reason, size);
    if (st || !derived.cfg.budget.bytes) return st;
    tkvi_compute_fixed_sizes(&derived, &fixed);
    if (derived.cfg.budget.bytes >= tkvi_least_budget(&derived, &fixed)) return TKV_OK;
    return tkvi_write_reason(TKV_ERR_BUDGET, &derived, reason, size);
}

/* Creates a cache; `reason` gets a sentence about an error. */
static tkv_status tkvi_create(const tkv_config *cfg, tkv_cache **out, char *reason, size_t size) {
    tkvi_heap heap;
    tkvi_derived_config derived;
    tkv_cache *kv;
    tkv_status st = tkvi_validate(cfg, &derived, reason, size);
    if (!cfg || !out) {
        tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
        tkvi_append_text(&t, cfg ? "out is missing" : "the config is missing");
        return TKV_ERR_ARG;
    }
    if (!st) st = tkvi_init_heap(cfg, &heap, reason, size);
    if (st) return st;
    heap.limit = derived.cfg.budget.bytes;
    st = tkvi_build_cache(&derived, &heap, &kv);
    if (!st && derived.cfg.budget.bytes && kv->tables.version_bytes &&
        !tkvi_allocate_version(kv, 0)) { /* allocated now, because learning must not fail later */
        tkv_destroy(kv);
        st = TKV_ERR_NOMEM;
    }
    if (st) return tkvi_write_reason(st, &derived, reason, size);
    *out = kv;
    return TKV_OK;
}

TKV_API tkv_status tkv_create(const tkv_config *cfg, tkv_cache **out) {
    return tkvi_create(cfg, out, NULL, 0);
}

/* Overwrites the work space (cfg.host.wipe_freed), and the meter's copies unless it watches a sequence. */
static void tkvi_wipe_work_space(tkv_cache *kv) {
    uint8_t *end = (uint8_t *)(void *)kv + kv->sizes.total - kv->sizes.meter_copies;
    if (!kv->tables.cfg.host.wipe_freed) return;
    tkvi_wipe(end - tkvi_scratch_bytes(&kv->sizes), tkvi_scratch_bytes(&kv->sizes));
    if (TKVI_HAS_METER && kv->meter && kv->meter->seq < 0) tkvi_wipe(end, kv->sizes.meter_copies);
}

/* Removes the names of pages that have more than the first n_tokens of a sequence. */
static void tkvi_forget_pages(tkv_cache *kv, int seq, int n_tokens) {
    tkvi_seq *s = &kv->seq[seq];
    if (!TKVI_HAS_PREFIXES) return;
    while (s->n_pages && s->page[s->n_pages - 1].end > n_tokens) {
        s->n_pages--;
        if (kv->tables.cfg.host.wipe_freed) tkvi_wipe(&s->page[s->n_pages], sizeof *s->page);
    }
    if (s->n_pages || !s->page) return;
    if (kv->tables.cfg.host.wipe_freed) tkvi_wipe(s->page, (size_t)s->page_cap * sizeof *s->page);
    tkvi_put(&kv->heap, s->page, (size_t)s->page_cap * sizeof *s->page);
    s->page = NULL;
    s->page_cap = 0;
}

/* Removes what a sequence has of more than its first n_tokens beside their blocks: states, and names of pages. */
static void tkvi_forget_beside(tkv_cache *kv, int seq, int n_tokens) {
    tkvi_drop_states(&kv->states, seq, n_tokens);
    tkvi_forget_pages(kv, seq, n_tokens);
}

/* Ends a call that took tokens out of a sequence, once their blocks have lost them: nothing stays that has seen a token
 * behind the first n_tokens. */
static void tkvi_forget_tokens(tkv_cache *kv, int seq, int n_tokens) {
    tkvi_forget_beside(kv, seq, n_tokens);
    tkvi_wipe_work_space(kv);
}

TKV_API void tkv_destroy(tkv_cache *kv) {
    tkvi_heap heap;
    uint32_t i;
    int s;
    if (!kv) return;
    for (i = 0; i < kv->pool.block_cap; i++) {
        if (!kv->pool.block[i].refs) continue;
        if (tkvi_is_offloaded(&kv->pool.block[i])) tkvi_forget_offloaded(&kv->pool, i);
        tkvi_forget_copy(&kv->pool, i);
    }
    for (i = 0; i < kv->pool.n_pages; i++) {
        if (kv->tables.cfg.host.wipe_freed) tkvi_wipe(kv->pool.page[i].bytes, kv->tables.page_bytes);
        tkvi_put(&kv->heap, kv->pool.page[i].bytes, kv->tables.page_bytes);
    }
    if (TKVI_HAS_METER && kv->meter) kv->meter->seq = TKV_NO_SEQ;
    tkvi_wipe_work_space(kv);
    tkvi_put(&kv->heap, kv->pool.page, kv->pool.page_cap * sizeof(tkvi_page));
    tkvi_put(&kv->heap, kv->pool.source, kv->pool.source_cap * sizeof(tkvi_source_place));
    tkvi_put(&kv->heap, kv->pool.attached, kv->pool.n_attached * sizeof(tkvi_attached));
    tkvi_put(&kv->heap, kv->pool.block, kv->pool.block_cap * tkvi_block_entry_bytes(&kv->tables.cfg));
    for (s = 0; s < kv->tables.cfg.limits.max_seqs; s++)
        tkvi_put(&kv->heap, kv->seq[s].block,
                 (size_t)kv->seq[s].cap * (size_t)kv->tables.cfg.model.n_layers * sizeof(uint32_t));
    for (s = 0; s < kv->tables.cfg.limits.max_seqs; s++) {
        tkvi_forget_beside(kv, s, 0);
        tkvi_put(&kv->heap, kv->states.list[s].held, kv->states.list[s].cap * sizeof(tkvi_held_state));
    }
    tkvi_put(&kv->heap, kv->states.region, kv->states.region_bytes);
    for (s = 0; s < TKVI_VERSIONS; s++)
        tkvi_put(&kv->heap, kv->tables.version[s].bytes, kv->tables.version_bytes);
    tkvi_free_stats(kv);
    tkvi_put(&kv->heap, kv->work.choice, kv->work.choice_cap * TKVI_CHOICE_BYTES);
    tkvi_free_turns(&kv->turns, &kv->heap);
    heap = kv->heap; /* the last piece to free contains kv */
    if (!kv->pool.keep_all) tkvi_put(&heap, kv, kv->sizes.total);
}

/* >>growth */
/* Grows the eviction work space to `cap` blocks. Its contents are lost. Returns 0 without memory. */
static int tkvi_grow_choice(tkv_cache *kv, uint32_t cap) {
    uint8_t *bigger;
    if (cap <= kv->work.choice_cap || !tkvi_choice_entry_bytes(&kv->tables.cfg)) return 1;
    bigger = (uint8_t *)tkvi_get(&kv->heap, tkvi_multiply_sizes(cap, TKVI_CHOICE_BYTES));
    if (!bigger) return 0;
    tkvi_put(&kv->heap, kv->work.choice, kv->work.choice_cap * TKVI_CHOICE_BYTES);
    kv->work.choice = bigger;
    kv->work.choice_cap = cap;
    return 1;
}

/* Grows the block lists of a sequence to n_blocks per layer. Returns 0 without memory. */
static int tkvi_grow_lists(tkv_cache *kv, int seq, int n_blocks) {
    tkvi_seq *s = &kv->seq[seq];
    uint32_t cap = tkvi_cap_for(n_blocks), *bigger;
    const size_t layers = (size_t)kv->tables.cfg.model.n_layers,
                 bytes = tkvi_multiply_sizes(layers * sizeof(uint32_t), cap);
    size_t l;
    if (!tkvi_grow_choice(kv, cap)) return 0;
    if (cap <= s->cap) return 1;
    bigger = (uint32_t *)tkvi_get(&kv->heap, bytes);
    if (!bigger) return 0;
    memset(bigger, 0, bytes);
    for (l = 0; l < layers && s->block; l++)
        memcpy(bigger + l * cap, s->block + l * s->cap, s->cap * sizeof(uint32_t));
    tkvi_put(&kv->heap, s->block, layers * s->cap * sizeof(uint32_t));
    s->block = bigger;
    s->cap = cap;
    return 1;
}

/* >>in place: all memory at its largest size, at creation */
/* most[tier]: the most blocks that one layer of one sequence can have at max_tokens, without sinks. Partial blocks
 * that a flush closes are not counted. */
static void tkvi_compute_most_blocks(const tkv_config *cfg, const tkvi_plan *p, int64_t *most) {
    int64_t tokens = cfg->limits.max_tokens - p->sink, all, tier, window;
    if (tokens < 0) tokens = 0;
    all = (tokens + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_TIER_HOT] =
        ((int64_t)p->now.hot + TKVI_BLOCK - 1 + cfg->limits.max_append + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_TIER_WARM] = ((int64_t)p->now.warm + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_TIER_ARCHIVE] = (tokens - p->now.warm) / TKVI_BLOCK; /* a flush can move all hot tokens here */
    /* blocks age before others expire, so an append can find blocks of the one before it here */
    window = ((int64_t)p->kept_window + tkvi_expiry_margin(p) + cfg->limits.max_append) / TKVI_BLOCK + 2;
    if (p->kept_window && most[TKV_TIER_ARCHIVE] > window) most[TKV_TIER_ARCHIVE] = window;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        if (most[tier] < 0 || (p->now.hot == TKVI_FOREVER && tier != TKV_TIER_HOT)) most[tier] = 0;
        if (most[tier] > all) most[tier] = all;
    }
}

/* Entries that a block takes in place. Tokens of a block that move apart, or before it is full, have entries of their
 * own. */
static int tkvi_entries_of_block(const tkvi_derived_config *derived) { return derived->n_ropes ? 2 : 1; }

/* Distances of moved tokens that the table of rotations has room for in place (cache/turns.h). */
static int tkvi_turns_in_place(const tkvi_derived_config *derived) {
    return derived->n_ropes ? tkvi_min(derived->cfg.limits.max_tokens / TKVI_BLOCK + 4, 32) : 0;
}

/* Largest sizes of a cache in place. */
typedef struct tkvi_in_place_sizes {
    uint32_t page_cap, block_cap, list_cap;
    int64_t pages;
    size_t bytes; /* total, each piece at a multiple of 64 */
} tkvi_in_place_sizes;

/* Bytes of all but pages, their array and the blocks', with lists of sizes->list_cap. */
static size_t tkvi_bytes_without_arrays(const tkvi_derived_config *derived, const tkvi_sizes *fixed,
                                        const tkvi_in_place_sizes *sizes) {
    const size_t cap = sizes->list_cap, layers = (size_t)derived->cfg.model.n_layers;
    const size_t list = tkvi_align_up(tkvi_multiply_sizes(cap, layers * sizeof(uint32_t)));
    const size_t piece[] = {fixed->total,
                            tkvi_multiply_sizes(list, (size_t)derived->cfg.limits.max_seqs),
                            tkvi_states_in_place_bytes(&derived->cfg),
                            tkvi_align_up(tkvi_multiply_sizes(cap, tkvi_choice_entry_bytes(&derived->cfg))),
                            tkvi_multiply_sizes(TKVI_IN_PLACE_VERSIONS, tkvi_version_bytes(derived)),
                            tkvi_turns_bytes(tkvi_turns_in_place(derived), derived->rope_lanes),
                            derived->any_shared ? tkvi_stats_bytes(&derived->end) : 0};
    size_t total = 0;
    int i;
    for (i = 0; i < (int)(sizeof piece / sizeof piece[0]); i++) total = tkvi_add_sizes(total, piece[i]);
    return total;
}

/* Bytes of pages, their array and the blocks', with what their base loses by its alignment. */
static size_t tkvi_array_bytes(const tkvi_derived_config *derived, const tkvi_in_place_sizes *sizes) {
    const size_t blocks = tkvi_multiply_sizes(sizes->block_cap, tkvi_block_entry_bytes(&derived->cfg)),
                 pages = tkvi_multiply_sizes(sizes->page_cap, sizeof(tkvi_page)),
                 arrays = tkvi_add_sizes(tkvi_align_up(blocks), tkvi_align_up(pages));
    return tkvi_add_sizes(tkvi_add_sizes(arrays, TKVI_ALIGN),
                          tkvi_multiply_sizes((size_t)sizes->pages, derived->page_bytes));
}

/* Sizes under a budget: tables at their largest, and as many pages as the rest of the budget allows. */
static tkv_status tkvi_size_for_budget(const tkvi_derived_config *derived, const tkvi_sizes *fixed,
                                       tkvi_in_place_sizes *sizes) {
    const size_t budget = derived->cfg.budget.bytes;
    const int64_t list_blocks =
        ((int64_t)derived->cfg.limits.max_tokens / TKVI_BLOCK + 4) * tkvi_entries_of_block(derived) +
        tkvi_n_anchor_blocks(&derived->cfg);
    uint64_t blocks =
        (uint64_t)list_blocks * (uint64_t)derived->n_stored * (uint64_t)derived->cfg.limits.max_seqs;
    size_t without_arrays;
    if (budget < tkvi_least_budget(derived, fixed)) return TKV_ERR_BUDGET;
    if (blocks > 0x3fffffff) return TKV_ERR_CONFIG;
    sizes->list_cap = tkvi_cap_for(list_blocks);
    without_arrays = tkvi_bytes_without_arrays(derived, fixed, sizes);
    if (without_arrays > budget) return TKV_ERR_BUDGET;
    sizes->pages = (int64_t)((budget - without_arrays) / derived->page_bytes);
    if (sizes->pages > 0x3fffffff) sizes->pages = 0x3fffffff;
    for (; sizes->pages > derived->recode_pages; sizes->pages--) { /* the arrays need bytes, too */
        uint64_t fitting_blocks =
            tkvi_may_leave_ram(&derived->cfg)
                ? blocks
                : 64u * (uint64_t)sizes->pages * (uint64_t)tkvi_entries_of_block(derived);
        sizes->block_cap =
            tkvi_cap_for((int64_t)(fitting_blocks < blocks ? fitting_blocks : blocks) + derived->n_classes);
        sizes->page_cap = tkvi_cap_for(sizes->pages);
        if (tkvi_array_bytes(derived, sizes) <= budget - without_arrays) {
            sizes->bytes = budget;
            return TKV_OK;
        }
    }
    return TKV_ERR_BUDGET;
}

/* Adds the blocks with which one layer of one sequence takes the most pages: its blocks fill the tiers with the largest
 * slots first, each up to most[tier]. Returns their number. */
static int64_t tkvi_add_costliest_blocks(const tkvi_derived_config *derived, const tkvi_plan *p,
                                         const int64_t *most, int64_t *slots) {
    int64_t left = (tkvi_max(0, derived->cfg.limits.max_tokens - p->sink) + TKVI_BLOCK - 1) / TKVI_BLOCK,
            n = 0;
    int done[TKV_TIER_COUNT] = {0}, pass, tier;
    for (pass = 0; pass < TKV_TIER_COUNT; pass++) {
        int next = -1;
        for (tier = 0; tier < TKV_TIER_COUNT; tier++)
            if (!done[tier] &&
                (next < 0 || derived->size_class[derived->class_of[p->now.key[tier]]].slots <
                                 derived->size_class[derived->class_of[p->now.key[next]]].slots))
                next = tier;
        done[next] = 1;
        slots[derived->class_of[p->now.key[next]]] += most[next] < left ? most[next] : left;
        n += most[next] < left ? most[next] : left;
        left -= most[next] < left ? most[next] : left;
    }
    return n;
}

/* Pages for these slots, however blocks of large slots later become blocks of smaller ones: then each class can have a
 * page that is not full, and one block exists twice. */
static int64_t tkvi_pages_for_changes(const tkvi_derived_config *derived, const int64_t *slots) {
    int64_t pages = 1;
    int c;
    for (c = 0; c < derived->n_classes; c++) pages += 1 + tkvi_pages_for(&derived->size_class[c], slots[c]);
    return pages;
}

/* Computes the largest sizes that a cache in place can need: for full sequences, and for blocks that wait for the first
 * table. */
static tkv_status tkvi_size_in_place(tkvi_derived_config *derived, tkvi_in_place_sizes *sizes) {
    tkvi_tier_spec specs[TKV_MAX_LEVELS];
    int64_t apart[TKVI_MAX_LAYOUTS], full[TKVI_MAX_LAYOUTS], waiting[TKVI_MAX_LAYOUTS], most[TKV_TIER_COUNT];
    int64_t blocks = 0, pages_apart = 0, pages_waiting;
    const int64_t n_seqs = derived->cfg.limits.max_seqs;
    tkvi_sizes fixed;
    int i, c, tier;
    memset(sizes, 0, sizeof *sizes);
    memset(apart, 0, sizeof apart);
    memset(full, 0, sizeof full);
    memset(waiting, 0, sizeof waiting);
    tkvi_compute_fixed_sizes(derived, &fixed);
    if (derived->cfg.budget.bytes) return tkvi_size_for_budget(derived, &fixed, sizes);
    for (i = 0; i < derived->cfg.model.n_layers; i++) {
        const int wait_blocks = TKVI_FIRST_TABLE_TOKENS / TKVI_BLOCK; /* all sequences share this number */
        int64_t of_list[TKVI_MAX_LAYOUTS], n_of_list;
        tkvi_plan p;
        (void)tkvi_plan_of(derived, i, &p, specs);
        if (p.stored_layer != i) continue;
        tkvi_compute_most_blocks(&derived->cfg, &p, most);
        memset(of_list, 0, sizeof of_list);
        n_of_list = tkvi_n_front_blocks(&p) + tkvi_add_costliest_blocks(derived, &p, most, of_list);
        tkvi_add_front_blocks(derived, &p, 1, of_list);
        tkvi_add_front_blocks(derived, &p, n_seqs, apart);
        tkvi_add_front_blocks(derived, &p, n_seqs, waiting);
        for (c = 0; c < derived->n_classes; c++) full[c] += of_list[c] * n_seqs;
        for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
            apart[derived->class_of[p.now.key[tier]]] += most[tier] * n_seqs;
            if (tier != TKV_TIER_ARCHIVE && tkvi_plan_learns(&p))
                apart[derived->class_of[p.now.key[tier]]] += wait_blocks;
        }
        waiting[derived->class_of[p.now.key[TKV_TIER_HOT]]] += most[TKV_TIER_HOT] * n_seqs + wait_blocks;
        blocks += n_of_list * n_seqs + (tkvi_plan_learns(&p) ? wait_blocks : 0);
    }
    for (c = 0; c < derived->n_classes; c++) /* + 1: recoding needs a slot for the new bytes */
        pages_apart += tkvi_pages_for(&derived->size_class[c], apart[c] + 1);
    sizes->pages = tkvi_pages_for_changes(derived, full);
    pages_waiting = tkvi_pages_for_changes(derived, waiting);
    if (sizes->pages < pages_waiting) sizes->pages = pages_waiting;
    if (sizes->pages > pages_apart) sizes->pages = pages_apart; /* every tier of every list at its most */
    if (blocks > 0x3fffffff || sizes->pages > 0x3fffffff) return TKV_ERR_CONFIG;
    sizes->page_cap = tkvi_cap_for(sizes->pages);
    sizes->block_cap = tkvi_cap_for(blocks * tkvi_entries_of_block(derived) + derived->n_classes);
    sizes->list_cap =
        tkvi_cap_for((derived->cfg.limits.max_tokens / TKVI_BLOCK + 4) * tkvi_entries_of_block(derived) +
                     tkvi_n_anchor_blocks(&derived->cfg));
    sizes->bytes =
        tkvi_add_sizes(tkvi_bytes_without_arrays(derived, &fixed, sizes), tkvi_array_bytes(derived, sizes));
    return sizes->bytes == TKVI_TOO_MANY ? TKV_ERR_CONFIG : TKV_OK;
}

/* Allocates the lists of states and the region in which states lie. Returns 0 without memory. */
static int tkvi_allocate_states_in_place(tkv_cache *kv) {
    const tkv_config *cfg = &kv->tables.cfg;
    const uint32_t cap = tkvi_most_states(cfg);
    tkvi_states *s = &kv->states;
    int seq, fits;
    s->limit = s->region_bytes = tkvi_align_up(cfg->limits.state_bytes);
    if (!s->limit) return 1;
    s->region = (uint8_t *)tkvi_get(s->heap, s->region_bytes);
    fits = s->region != NULL;
    for (seq = 0; seq < s->n_lists; seq++) {
        s->list[seq].held = (tkvi_held_state *)tkvi_get(s->heap, cap * sizeof(tkvi_held_state));
        s->list[seq].cap = cap;
        fits &= s->list[seq].held != NULL;
    }
    return fits;
}

static tkv_status tkvi_derive_in_place(const tkv_config *cfg, tkvi_derived_config *derived,
                                       tkvi_in_place_sizes *sizes, char *reason, size_t size) {
    tkv_status st = tkvi_validate(cfg, derived, reason, size);
    if (st) return st;
    if (cfg->limits.max_tokens == 0)
        return tkvi_bad(reason, size, "limits.max_tokens", 0, "in place it must be 1 to 2^30 - 1");
    if (TKVI_HAS_METER && derived->n_levels > 1 && derived->ladder[1].from_tokens)
        return tkvi_bad(reason, size, "budget.ladder[1].from_tokens", derived->ladder[1].from_tokens,
                        "it must be 0 in place: there the plan is fixed");
    if (TKVI_HAS_METER && cfg->budget.adapt)
        return tkvi_bad(reason, size, "budget.adapt", 1, "it must be 0 in place: there the plan is fixed");
    if (TKVI_HAS_METER && tkvi_bits(cfg->meter.target) != 0)
        return tkvi_bad(reason, size, "meter.target", (double)cfg->meter.target,
                        "it must be 0 in place: there the plan is fixed");
    st = tkvi_size_in_place(derived, sizes);
    if (!st) return TKV_OK;
    return tkvi_give_reason(
        st,
        st == TKV_ERR_BUDGET
            ? "budget.bytes has no room for limits.state_bytes, the index of limits.max_tokens, and pages"
            : "limits.max_tokens times limits.max_seqs, or limits.state_bytes, are too large in place",
        reason, size);
}

/* Refuses memory that is too small, with the bytes that limits.max_append costs. */
static tkv_status tkvi_refuse_in_place(const tkv_config *cfg, size_t bytes, size_t needed, char *reason,
                                       size_t size) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkv_config shorter = *cfg;
    tkvi_derived_config derived;
    tkvi_in_place_sizes least;
    shorter.limits.max_append = TKVI_BLOCK;
    tkvi_append_text(&t, "bytes is ");
    tkvi_append_digits(&t, (uint64_t)bytes);
    tkvi_append_text(&t, "; the config needs ");
    tkvi_append_digits(&t, (uint64_t)needed);
    if (tkvi_derive_in_place(&shorter, &derived, &least, NULL, 0) == TKV_OK && least.bytes < needed) {
        tkvi_append_text(&t, ". limits.max_append 64 would save ");
        tkvi_append_digits(&t, (uint64_t)(needed - least.bytes));
        tkvi_append_text(&t, " of them");
    }
    return TKV_ERR_CAPACITY;
}

/* The most bytes that the cache stores under one key of cfg.offload: a block, and two checksums per KV head. */
static size_t tkvi_offload_bytes(const tkvi_derived_config *derived) {
    size_t most = 0;
    int i;
    for (i = 0; i < derived->n_keys; i++) {
        const size_t bytes =
            derived->bytes[i].total + 2u * TKVI_OFFLOAD_CHECKSUM * (size_t)derived->key[i].n_kv_heads;
        if (bytes > most) most = bytes;
    }
    return most;
}

TKV_API tkv_status tkv_get_required_bytes(const tkv_config *cfg, size_t *in_place, size_t *offload) {
    tkvi_derived_config derived;
    tkvi_in_place_sizes sizes;
    tkv_status st;
    if (!in_place && !offload) return TKV_ERR_ARG;
    st = in_place ? tkvi_derive_in_place(cfg, &derived, &sizes, NULL, 0)
                  : tkvi_validate(cfg, &derived, NULL, 0);
    if (!st && in_place) *in_place = sizes.bytes;
    if (!st && offload) *offload = tkvi_offload_bytes(&derived);
    return st;
}

TKV_API tkv_status tkv_create_in_place(const tkv_config *cfg, void *mem, size_t bytes, tkv_cache **out,
                                       char *reason, size_t size) {
    tkvi_derived_config derived;
    tkvi_in_place_sizes sizes;
    tkvi_heap heap;
    tkvi_arena arena;
    tkv_cache *kv;
    size_t skip = (TKVI_ALIGN - (size_t)((uintptr_t)mem & (TKVI_ALIGN - 1u))) & (TKVI_ALIGN - 1u);
    tkv_status st = tkvi_derive_in_place(cfg, &derived, &sizes, reason, size);
    int i, fits = 1;
    if (!out || !mem) return tkvi_give_reason(TKV_ERR_ARG, "mem or out is missing", reason, size);
    if (st) return st;
    if (bytes < sizes.bytes) return tkvi_refuse_in_place(cfg, bytes, sizes.bytes, reason, size);
    memset(&arena, 0, sizeof arena);
    arena.base = (uint8_t *)mem + skip;
    arena.size = bytes - skip;
    memset(&heap, 0, sizeof heap);
    heap.from.user = &arena;
    heap.from.alloc = tkvi_arena_alloc;
    heap.from.release = tkvi_arena_release;
    st = tkvi_build_cache(&derived, &heap, &kv);
    if (st) return tkvi_write_reason(st, &derived, reason, size);
    kv->arena = arena;
    kv->heap.from.user = &kv->arena;
    kv->pool.keep_all = 1;
    for (i = 0; i < TKVI_IN_PLACE_VERSIONS && kv->tables.version_bytes; i++)
        fits &= tkvi_allocate_version(kv, i);
    if (derived.n_ropes) fits &= tkvi_grow_turns(&kv->turns, &kv->heap, tkvi_turns_in_place(&derived));
    fits &= tkvi_grow_blocks(&kv->pool, sizes.block_cap);
    for (i = 0; i < derived.cfg.limits.max_seqs; i++) fits &= tkvi_grow_lists(kv, i, (int)sizes.list_cap);
    fits &= tkvi_allocate_states_in_place(kv) & tkvi_grow_pages(&kv->pool, sizes.page_cap);
    for (i = (int)kv->pool.n_pages; i < sizes.pages; i++) fits &= tkvi_add_page(&kv->pool);
    TKVI_ASSERT(fits); /* tkvi_size_in_place added up the same pieces */
    if (!fits) return TKV_ERR_CAPACITY;
    kv->arena.closed = 1;
    if (derived.cfg.budget.bytes)
        kv->tables.cfg.budget.bytes = kv->heap.held; /* bytes really held: whole pages */
    *out = kv;
    return TKV_OK;
}

#endif /* TKVI_CACHE_CACHE_H */
