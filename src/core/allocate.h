/*
 * core/allocate.h - shares bits: heads of a layer share the layer's bytes, channels of a head share the head's.
 *
 * Greedy reverse water-filling: the next bit goes to the item where it saves most error, until the budget is spent.
 * A bit saves weight * (D(b) - D(b + 1)), where D(b) is the error of a unit Gaussian at b bits. The code keeps the
 * logarithm of that saving, in integers of 1/32 octave, so every machine computes the same table.
 * Savings fall along the bits of a channel and along the sorted channels. So the greedy method takes exactly the
 * steps that save at least some threshold. A binary search finds that threshold, for any number of heads.
 *
 *   K: weight of a tile = reach of its head * E[q_c^2] var(k_c), geometric mean of its channels;   0 .. 6 bits
 *   V: weight of a head = its reach (how strongly it reads far tokens);                             1 .. 4 bits
 *
 * bench/QUALITY.md measures the gain of both.
 */
#ifndef TKVI_CORE_ALLOCATE_H
#define TKVI_CORE_ALLOCATE_H

#include "core/log_scale.h"
#include "core/tile.h"

/* Statistics of one KV head. */
typedef struct tkvi_head {
    int reach;                 /* log2, in 1/8 octaves: how strongly far tokens are read */
    int k_weight;              /* log2 in 1/8 octaves of: that strength times the largest E[q_c^2] var(k_c) */
    int k_top, v_top;          /* tops of the log-scale windows (core/log_scale.h) */
    const uint8_t *importance; /* K: [pad] log2 in 1/8 octaves, by position, falling; 0: no channel */
    const uint8_t *order;      /* K: channel at each position (tkvi_order_at) */
    const float *mean;         /* K: [pad] static mean at each position */
} tkvi_head;

/* Steps of an item from few bits to many. gain: log2 of the error saved per unit of cost, in 1/32 octave. If all
 * steps cost the same, gain may be per step: that only shifts the threshold. */
typedef struct tkvi_ladder {
    int steps;
    int16_t gain[6];
    uint8_t cost[6];
} tkvi_ladder;

/* D of uniform grids with the best clip is 1, .38, .125, .037, .0115, .0035, .001 (0 to 6 bits). */
static const tkvi_ladder tkvi_ladder_k = {6, {-22, -63, -112, -169, -223, -277}, {1, 1, 1, 1, 1, 1}};
/* D of rotated values is .363, .119, .037, .0115 (1 to 4 bits), and .2 at 1.5 bits. Costs are in half bits. */
static const tkvi_ladder tkvi_ladder_v = {3, {-65, -115, -169, 0, 0, 0}, {2, 2, 2, 0, 0, 0}};
static const tkvi_ladder tkvi_ladder_v_low = {4, {-84, -116, -147, -201, 0, 0}, {1, 1, 2, 2, 0, 0}};

#define TKVI_SCORE_NONE (-100000)

/* Score of group i of a head's tiles, `unit` tiles in a group. unit 0: the whole head is the item. Positions without a
 * channel are not part of the mean, and a bit of the group saves nothing in them. */
static int tkvi_score(const tkvi_head *h, int unit, int i) {
    int sum = 0, n = 0, c;
    if (unit == 0) return 4 * h->reach;
    for (c = 0; c < 4 * unit; c++) {
        const int importance = h->importance[4 * unit * i + c];
        sum += importance;
        n += importance > 0;
    }
    if (n == 0) return TKVI_SCORE_NONE;
    return 4 * (h->k_weight + tkvi_log8((float)n) - tkvi_log8((float)(4 * unit))) + 4 * sum / n;
}

/* Cost of all steps of a head whose saving reaches the threshold. taken: NULL, or out: number of items that take
 * step k. */
static int tkvi_cost_at(const tkvi_head *h, const tkvi_ladder *l, int unit, int items, int threshold,
                        int *taken) {
    int i, k, cost = 0;
    if (taken) memset(taken, 0, 6 * sizeof *taken);
    for (i = 0; i < items; i++) {
        int score = tkvi_score(h, unit, i);
        for (k = 0; k < l->steps && score + l->gain[k] >= threshold; k++) {
            cost += l->cost[k] * tkvi_max(unit, 1);
            if (taken) taken[k]++;
        }
    }
    return cost;
}

#define TKVI_THRESHOLD_LOW (-24000) /* beyond any score: a loaded table gives at most 4 * 4800 + 4 * 255 */
#define TKVI_THRESHOLD_HIGH 24000

/* The lowest threshold at which the heads, each limited to `cap`, stay within the budget. */
static int tkvi_find_threshold(const tkvi_head *heads, int n_heads, const tkvi_ladder *l, int unit, int items,
                               int cap, int64_t budget) {
    int low = TKVI_THRESHOLD_LOW, high = TKVI_THRESHOLD_HIGH, h; /* high fits the budget; low - 1 may not */
    while (low < high) {
        int threshold = low + (high - low) / 2;
        int64_t sum = 0;
        for (h = 0; h < n_heads; h++)
            sum += tkvi_min(cap, tkvi_cost_at(&heads[h], l, unit, items, threshold, NULL));
        if (sum <= budget) high = threshold;
        else low = threshold + 1;
    }
    return high;
}

/* Splits a budget among the heads. cost: out, the share of each head. The threshold leaves a rest, which is too small
 * for all steps just below it. Three passes in the order of heads hand it out:
 *   0  each head gets the same fraction of the steps that it did not get
 *   1  each head gets one step
 *   2  each head gets all its remaining steps
 * A head of V is one item, which takes whole steps. So V has only pass 2. */
static void tkvi_split_budget(const tkvi_head *heads, int n_heads, const tkvi_ladder *l, int unit, int items,
                              int cap, int64_t budget, int *cost) {
    int threshold = tkvi_find_threshold(heads, n_heads, l, unit, items, cap, budget), h, pass,
        step = tkvi_max(unit, 1);
    int64_t wanted = 0, left;
    for (h = 0; h < n_heads; h++) {
        cost[h] = tkvi_min(cap, tkvi_cost_at(&heads[h], l, unit, items, threshold, NULL));
        budget -= cost[h];
        wanted += tkvi_min(cap, tkvi_cost_at(&heads[h], l, unit, items, threshold - 1, NULL)) - cost[h];
    }
    left = budget;
    for (pass = unit ? 0 : 2; pass < 3 && threshold > TKVI_THRESHOLD_LOW; pass++)
        for (h = 0; h < n_heads && budget > 0; h++) {
            int more = tkvi_min(cap, tkvi_cost_at(&heads[h], l, unit, items, threshold - 1, NULL)) - cost[h];
            if (pass == 0) more = (int)(more * left / wanted);
            if (pass == 1) more = tkvi_min(more, step);
            more = (int)(more < budget ? more : budget) / step * step;
            if (unit == 0 && (cost[h] + more) % 2 && (l->cost[0] == 2 || cost[h] + more > 2))
                more--; /* no grid exists at half a step */
            cost[h] += more;
            budget -= more;
        }
}

/* >>K */
/* Tile bits of one head at equal shares: the average in quarter bits, less the metadata. A tile bit is 32 bytes.
 * Channels count in whole groups of `unit` tiles, because the bits of a group cost the same however many channels it
 * has. Two tile bits are the least: they make the 64 bytes that codes are rounded up to.
 * has_row: 1 if the outlier token has a row (formats/a.h). The codes give up the bytes that it adds to a block. */
static int tkvi_head_budget(int quarters, int dim, int unit, int has_row) {
    const int pad = tkvi_round_up(dim, 16), whole = tkvi_round_up(dim, 4 * unit);
    const size_t row = has_row ? tkvi_align_up(3 * (size_t)pad) - tkvi_align_up(2 * (size_t)pad) : 0;
    return tkvi_max(2, (2 * (quarters * whole - pad) - (int)row) / 32);
}

/* Turns a head's number of tile bits into the widths of its tiles. */
static void tkvi_choose_widths(const tkvi_head *h, int pad, int unit, int budget, tkvi_tile_counts *tiles) {
    int items = pad / 4 / unit, taken[6], more[6], k, rest, threshold;
    threshold = tkvi_find_threshold(h, 1, &tkvi_ladder_k, unit, items, 1 << 20, budget);
    rest = budget - tkvi_cost_at(h, &tkvi_ladder_k, unit, items, threshold, taken);
    (void)tkvi_cost_at(h, &tkvi_ladder_k, unit, items, threshold - 1, more);
    for (k = 0; k < 6; k++) /* the rest buys steps just below the threshold, narrow widths first */
        for (; taken[k] < more[k] && rest >= unit; rest -= unit) taken[k]++;
    memset(tiles, 0, sizeof *tiles);
    for (k = 0; k < 6; k++) tiles->n[k + 1] = (uint16_t)((taken[k] - (k < 5 ? taken[k + 1] : 0)) * unit);
}

/* Equal shares and equal channels: the first channels get the bits that are left over. */
static void tkvi_share_equally(int quarters, int dim, int pad, int has_row, tkvi_tile_counts *tiles) {
    uint8_t importance[TKV_MAX_HEAD_DIM];
    tkvi_head h;
    memset(&h, 0, sizeof h);
    memset(importance, 0, sizeof importance);
    memset(importance, 1, (size_t)dim);
    h.importance = importance;
    tkvi_choose_widths(&h, pad, 1, tkvi_head_budget(quarters, dim, 1, has_row), tiles);
}

/* Splits a layer's budget among its heads, at most 4 bits a channel. has_row: as in tkvi_head_budget. budget[h]: out,
 * tile bits of head h. Two tile bits make 64 bytes, so each head gets an even number. */
static void tkvi_share_k(const tkvi_head *heads, int n_heads, int quarters, int dim, int pad, int has_row,
                         int unit, int *budget) {
    int h, odd = 0;
    tkvi_split_budget(heads, n_heads, &tkvi_ladder_k, unit, pad / 4 / unit, pad,
                      (int64_t)n_heads * tkvi_head_budget(quarters, dim, unit, has_row), budget);
    for (h = 0; h < n_heads; h++)
        if (budget[h] % 2) {
            budget[h] += odd ? -1 : 1;
            odd = !odd;
        }
    /* After an odd number of odd budgets the sum is one bit too high. The last head that can gives two bits back. */
    for (h = n_heads - 1; h >= 0 && odd; h--)
        if (budget[h] >= 2) {
            budget[h] -= 2;
            odd = 0;
        }
}

/* >>V: half bits of each head, at least 2 (1 bit a value). */
static void tkvi_share_v(const tkvi_head *heads, int n_heads, int quarters, int *half_bits) {
    const tkvi_ladder *l = quarters < 8 ? &tkvi_ladder_v_low : &tkvi_ladder_v;
    int h;
    tkvi_split_budget(heads, n_heads, l, 0, 1, 6, (int64_t)n_heads * (quarters - 4) / 2, half_bits);
    for (h = 0; h < n_heads; h++) half_bits[h] += 2;
}

/* Bytes of V codes that all heads of a layer have together for 64 tokens; pad: channels of a head. */
static int64_t tkvi_budget_v(int64_t heads, int quarters, int pad) {
    int64_t bytes = (heads * (quarters - 4) / 2 + 2 * heads) * 4 * pad;
    /* a slab of 16 channels without a partner takes two bits instead of 1.5 */
    return quarters < 8 && pad / 16 % 2 ? bytes + heads * 64 : bytes;
}

#endif /* TKVI_CORE_ALLOCATE_H */
