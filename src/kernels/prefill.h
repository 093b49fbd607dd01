/*
 * kernels/prefill.h - the interface of kernels for prefill: attention of up to 32 query rows of a prompt at once.
 *
 * The kernels of kernels/scalar.h take 8 rows, and their vector lanes are tokens or channels. They fold scales
 * into each row, round the weights, and sum across vectors. Here the lanes are query rows, 16 to a vector, and
 * no sum crosses a vector. Codes are unpacked to bytes once for all lanes. Then four neighbouring codes at a
 * time are broadcast:
 *
 *     scores[token][lanes]  = sum over tiles   of  weights[tile][lanes] . code[tile][token]
 *     out[channel][lanes]  += sum over quads   of  p[quad of tokens][lanes] . code[quad][channel]
 *
 * The arithmetic is that of kernels/scalar.h: weights of 8 bits, or of 15 where one limb is too coarse. One
 * difference: all lanes have two limbs as soon as one row needs them. There is no scalar version. An instruction
 * set without prefill kernels uses those of kernels/scalar.h.
 *
 * Order of loops: FlashAttention-2 (arXiv 2307.08691). As in FlashAttention-4, the maximum moves only when it must.
 */
#ifndef TKVI_KERNELS_PREFILL_H
#define TKVI_KERNELS_PREFILL_H

#include "kernels/dispatch.h"

#define TKVI_PREFILL 32          /* the most rows */
#define TKVI_PREFILL_FLOATS 4096 /* rows x channels, to keep the stack small: 16 rows beyond 128 channels */
#define TKVI_MAX_SLACK 8.0f      /* weights may reach e^8 before m moves to the new maximum and sums shrink */

/* Parameters of softmax_step, which turns scores into weights in place. Arrays are [lanes]. */
typedef struct tkvi_softmax_args {
    float *s; /* [64][lanes] scores, then p = exp(s - m) */
    int lanes;
    const int32_t *low, *high;  /* a lane sees tokens low .. high-1 of the block; NULL: all */
    float *m, *l;               /* so far: maximum, up to TKVI_MAX_SLACK too low; sum of p */
    float *shrink;              /* out: factor for the output sums, to be applied if 1 is returned */
    float *far_attention;       /* sum of p^2 so far, or NULL */
    const float *sampled_lanes; /* 1: this block counts for far_attention; 0: it does not; NULL: all 0 */
} tkvi_softmax_args;

/* Rows of queries, and a cache of folded queries that k keeps from block to block. */
typedef struct tkvi_prefill_queries {
    TKVI_ALIGNED float q[TKVI_PREFILL_FLOATS]; /* [channel, not reordered][lanes] */
    TKVI_ALIGNED float ref[TKV_MAX_HEAD_DIM];
    int lanes;
    TKVI_ALIGNED float sorted[TKV_MAX_HEAD_DIM]; /* ref by position in `order`, valid if coded > 0 */
    /* Queries folded with the scales of an earlier block, as integers. Later blocks mostly have similar scales. One
     * multiplication then makes their weights from these integers. */
    TKVI_ALIGNED int16_t folded[TKVI_PREFILL_FLOATS]; /* by position, in a layout private to k */
    TKVI_ALIGNED float inverse[TKV_MAX_HEAD_DIM];     /* 16384 / that scale; 0 if it is below 1e-34 */
    TKVI_ALIGNED float unit[TKVI_PREFILL];            /* value of one count after that multiplication */
    const uint8_t *order; /* channel at each position, as in tkvi_side; NULL: none */
    int coded;            /* number of positions with codes; 0: nothing is cached yet */
} tkvi_prefill_queries;

typedef struct tkvi_prefill {
    /* As tkvi_k_kernel and tkvi_v_kernel, with rows in lanes. scores: [64][lanes] */
    void (*k)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, tkvi_prefill_queries *q, int n,
              int n_limbs, float *scores);
    /* p: [64][lanes], zero beyond n; out: [channel][lanes] */
    void (*v)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p, int lanes, int n,
              int n_limbs, float *out);
    int (*softmax_step)(const tkvi_softmax_args *w); /* returns 1 if w->shrink must be applied to outputs */
    void (*shrink)(float *x, int n, int lanes, const float *by); /* x: [n][lanes] */
    void (*rotate_back)(float *x, int dim, int lanes);           /* x: [dim][lanes] */
    /* Transposes 16 rows of x into lanes of y: y[i][r] = x[r][i] for i < n. n is a multiple of 16. */
    void (*transpose)(const float *x, int x_stride, int n, float *y, int y_stride);
} tkvi_prefill;

static int tkvi_prefill_lanes(int pad) {
    return pad <= TKVI_PREFILL_FLOATS / TKVI_PREFILL ? TKVI_PREFILL : 16;
}

#endif /* TKVI_KERNELS_PREFILL_H */
