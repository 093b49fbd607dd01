/*
 * kernels/prefill.h - attention of many query rows at once, as a prompt brings them: what it asks of an instruction
 * set.
 *
 * kernels/scalar.h reads a record for 8 rows, lanes being tokens or channels, and then folds scales into rows,
 * rounds and sums them across vectors. Here lanes are query rows, 16 to a vector: nothing is summed across a
 * vector, and codes are unpacked to bytes once for all lanes, then broadcast, four neighbours at a time:
 *
 *     scores[token][lanes]  = sum over tiles   of  weights[tile][lanes] . code[tile][token]
 *     out[channel][lanes]  += sum over quads   of  p[quad of tokens][lanes] . code[quad][channel]
 *
 * The arithmetic is that of kernels/scalar.h (weights of 8 bits, or 15 where one plane is too coarse) but for
 * details: all lanes have two planes as soon as one row needs them. There is no scalar twin: an instruction set
 * without one uses kernels/scalar.h.
 *
 * FlashAttention-2 (arXiv 2307.08691) for the order of loops; the maximum moves only when it must, as in
 * FlashAttention-4. Calls kernels/scalar.h and below.
 */
#ifndef TKVI_KERNELS_PREFILL_H
#define TKVI_KERNELS_PREFILL_H

#include "kernels/dispatch.h"

#define TKVI_PREFILL 32          /* rows at most */
#define TKVI_PREFILL_FLOATS 4096 /* rows x channels: 16 rows beyond 128 channels; stacks are small */
#define TKVI_LAZY 8.0f           /* weights may grow to e^8 before sums are scaled down to a new maximum */

/* Scores become weights, in place. All arrays are [lanes]. */
typedef struct tkvi_weighing {
    float *s; /* [64][lanes] scores, then p = exp(s - m) */
    int lanes;
    const int32_t *low, *high;  /* tokens low .. high-1 of the block are seen; NULL: all are */
    float *m, *l;               /* as good as the maximum, and the sum of p, so far */
    float *shrink;              /* out: what sums so far are to be multiplied by, if 1 is returned */
    float *far_attention;       /* sum of p^2 so far, or NULL */
    const float *sampled_lanes; /* 1 where p of this block count for far_attention, else 0; NULL: nowhere */
} tkvi_weighing;

/* Rows of queries, and what k keeps of them from block to block. */
typedef struct tkvi_prefill_queries {
    TKVI_ALIGNED float q[TKVI_PREFILL_FLOATS]; /* [channel as it comes][lanes] */
    TKVI_ALIGNED float ref[TKV_MAX_HEAD_DIM];
    int lanes;
    TKVI_ALIGNED float sorted[TKV_MAX_HEAD_DIM]; /* ref by position, if there are positions (`coded`) */
    /* Queries folded with scales of an earlier block, as integers: those of other blocks are near these. */
    TKVI_ALIGNED int16_t whole[TKVI_PREFILL_FLOATS]; /* by position; k knows their order */
    TKVI_ALIGNED float inverse[TKV_MAX_HEAD_DIM];    /* of that scale, by position; 0: it is 0 */
    TKVI_ALIGNED float unit[TKVI_PREFILL];           /* what they count */
    const uint8_t *order;                            /* the order of positions */
    int coded;                                       /* so many; 0: there are none yet */
} tkvi_prefill_queries;

typedef struct tkvi_prefill {
    /* As kernels/scalar.h has them for rows; scores: [64][lanes] */
    void (*k)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, tkvi_prefill_queries *q, int n,
              int planes, float *scores);
    /* p: [64][lanes], zero beyond n; out: [channel][lanes] */
    void (*v)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p, int lanes, int n,
              int planes, float *out);
    int (*softmax_step)(const tkvi_weighing *w);
    void (*shrink)(float *x, int n, int lanes, const float *by); /* x: [n][lanes] */
    void (*rotate_back)(float *x, int dim, int lanes);           /* x: [dim][lanes] */
    /* 16 rows of x become lanes of y: y[i][r] = x[r][i], n (a multiple of 16) of i. */
    void (*turn)(const float *x, int x_stride, int n, float *y, int y_stride);
} tkvi_prefill;

static int tkvi_prefill_lanes(int pad) {
    return pad <= TKVI_PREFILL_FLOATS / TKVI_PREFILL ? TKVI_PREFILL : 16;
}

#endif /* TKVI_KERNELS_PREFILL_H */
