/*
 * kernels/prefill.h - the interface of kernels for prefill: attention of up to 32 query rows of a prompt at once.
 *
 * The kernels of kernels/scalar.h take 8 rows, and their vector lanes are tokens or channels. They fold scales
 * into each row, round the weights, and sum across vectors. Here the lanes are query rows, and no sum crosses a
 * vector. Codes are unpacked to bytes once for all lanes. Then four neighbouring codes at a time are broadcast:
 *
 *     scores[token][lanes]  = sum over tiles   of  weights[tile][lanes] . code[tile][token]
 *     out[channel][lanes]  += sum over quads   of  p[quad of tokens][lanes] . code[quad][channel]
 *
 * The arithmetic is that of kernels/scalar.h: weights of 8 bits, or of 15 where one limb is too coarse. One
 * difference: all lanes have two limbs as soon as one row needs them. kernels/prefill.inc has the kernels of all
 * instruction sets. There is no scalar version: the kernels of kernels/scalar.h stand in.
 *
 * Order of loops: FlashAttention-2 (arXiv 2307.08691). As in FlashAttention-4, the maximum moves only when it must.
 */
#ifndef TKVI_KERNELS_PREFILL_H
#define TKVI_KERNELS_PREFILL_H

#include "kernels/neon.h"
#include "kernels/wasm.h"
#include "kernels/x86.h"

#define TKVI_PREFILL 32 /* the most rows */
/* 16 rows beyond 128 channels, so that the stack stays small: the most rows x channels */
#define TKVI_PREFILL_FLOATS (16 * TKV_MAX_HEAD_DIM)
#define TKVI_PREFILL_PART 128     /* positions of K that are multiplied at once */
#define TKVI_PREFILL_WEIGHTS 1024 /* the most rows x quads of positions or tokens */
#define TKVI_PREFILL_GROUPS 8     /* the most groups of rows */
#define TKVI_GROUP_ROWS 128       /* the most rows of all groups */
#define TKVI_MAX_SLACK 8.0f /* weights may reach e^8 before m moves to the new maximum and sums shrink */

/* Parameters of softmax_step, which turns scores into weights in place. Arrays are [lanes]. */
typedef struct tkvi_softmax_args {
    float *s; /* [64][lanes] scores, then p = exp(s - m) */
    int lanes;
    const int32_t *low, *high;  /* a lane sees tokens low .. high-1 of the block; NULL: all */
    float *m, *l;               /* so far: maximum, up to TKVI_MAX_SLACK too low; sum of p */
    float *shrink;              /* out: factor for the output sums, to be applied if 1 is returned */
    float *far_attention;       /* sum of p^2 |v|^2 so far, or NULL */
    const float *sampled_lanes; /* 1: this block counts for far_attention; 0: it does not; NULL: all 0 */
    const float *squares;       /* [64] |v|^2 of its tokens, if sampled_lanes is not NULL */
} tkvi_softmax_args;

/* Rows of queries. */
typedef struct tkvi_prefill_queries {
    TKVI_ALIGNED float q[TKVI_PREFILL_FLOATS]; /* [position][lanes] */
    TKVI_ALIGNED float ref[TKV_MAX_HEAD_DIM];
    int lanes;
    const uint8_t *order; /* channel at each position, as in tkvi_side; NULL: positions are channels */
} tkvi_prefill_queries;

typedef struct tkvi_prefill_sums { /* of the online softmax. m, l, far_attention, origin: [lanes] */
    float *o;                      /* [v_pad][lanes], aligned */
    TKVI_ALIGNED float m[TKVI_PREFILL], l[TKVI_PREFILL], far_attention[TKVI_PREFILL], origin[TKVI_PREFILL];
    int lanes;
} tkvi_prefill_sums;

/* Memory for groups of rows that share unpacked codes: too large for a stack. */
typedef struct tkvi_prefill_area {
    tkvi_prefill_queries q[TKVI_PREFILL_GROUPS];
    tkvi_prefill_sums sums[TKVI_PREFILL_GROUPS], split[TKVI_PREFILL_GROUPS]; /* with o and split_o */
    TKVI_ALIGNED float o[TKVI_PREFILL_GROUPS][TKVI_PREFILL_FLOATS];
    TKVI_ALIGNED float split_o[TKVI_PREFILL_GROUPS][TKVI_PREFILL_FLOATS];
    TKVI_ALIGNED float scores[TKVI_BLOCK * TKVI_GROUP_ROWS];
} tkvi_prefill_area;

typedef struct tkvi_prefill {
    /* As tkvi_k_kernel and tkvi_v_kernel, with rows in lanes. Groups of rows have queries and sums of their own, and
     * share codes that are unpacked once. They have equal lanes and the same reference key.
     * q: [n_groups]; scores: [n_groups][64][lanes] */
    void (*k)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, tkvi_prefill_queries *const *q,
              int n_groups, int n, int n_limbs, float *scores);
    /* p: [n_groups][64][lanes], zero beyond n; out: [n_groups], each [channel - s->first][lanes]. s may be a view
     * of K */
    void (*v)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p, int lanes,
              int n_groups, int n, int precise, float *const *out);
    int (*softmax_step)(const tkvi_softmax_args *w); /* returns 1 if w->shrink must be applied to outputs */
    void (*shrink)(float *x, int n, int lanes, const float *by); /* x: [n][lanes] */
    void (*rotate_back)(float *x, int dim, int lanes);           /* x: [dim][lanes] */
    /* Transposes 16 rows of x into lanes of y: y[i][r] = x[r][i] for i < n. n is a multiple of 16. */
    void (*transpose)(const float *x, int x_stride, int n, float *y, int y_stride);
} tkvi_prefill;

/* Floats from one exact key to the next. A power of 2 would put the same channel of all keys into one cache set. */
enum { TKVI_PREFILL_KEY_STRIDE = TKV_MAX_HEAD_DIM + 16 };

/* Folded and rounded weights of all rows. An answer is wide_by * sum of the products of two limbs + by * sum of those
 * of one limb + rest. */
typedef struct tkvi_prefill_fold {
    /* [quad of channels or tokens][lanes]: four bytes of one limb, or two weights of two limbs; odd_w: the others */
    int32_t *w, *odd_w;
    TKVI_ALIGNED float by[TKVI_PREFILL], wide_by[TKVI_PREFILL], rest[TKVI_PREFILL];
    int n_wide; /* the first quads have two limbs */
} tkvi_prefill_fold;

/* V inside K: the weights p of one group of rows and one group of tokens. */
typedef struct tkvi_viewed_weights {
    tkvi_prefill_fold fold[2]; /* of one limb, of two limbs; without `rest` */
    TKVI_ALIGNED float sum_w[2][TKVI_PREFILL], sum_p[TKVI_PREFILL];
    int needs_two; /* 1: no tile may have one limb */
} tkvi_viewed_weights;

/* The products of a pass: a few vectors of rows. */
typedef struct tkvi_prefill_products {
    const int32_t *w, *odd_w; /* as in tkvi_prefill_fold, from the first row of the pass on */
    const float *by, *wide_by, *rest;
    const uint8_t *run; /* numbers of quads whose products by one limb fit into a sum, up to a 0 */
    int n_wide, lanes;
    int add;  /* 1: answers are added to what is there */
    int step; /* from the codes of a quad to those of the next; in int32_t, as all distances here */
    int odd;  /* from codes for two limbs to their odd bytes */
} tkvi_prefill_products;

/* One group of tokens of a block. */
typedef struct tkvi_prefill_k_args {
    const float *q;              /* [position][lanes] */
    const float *scale, *zero;   /* by position. zero: less the reference, plus the centre of the codes */
    int lanes, pad, stride;      /* stride: of scale and zero, from one group to the next */
    int end[TKVI_MAX_WIDTH + 1]; /* end of the positions with codes of so many bits; widest first */
    int wide, n_limbs;           /* the first `wide` positions have two limbs; n_limbs: see tkvi_n_limbs */
    float coarse;                /* see tkvi_coarse_k */
} tkvi_prefill_k_args;

/* Channels of V that have one width and one group. */
typedef struct tkvi_prefill_v_args {
    const float *p, *scale, *zero; /* p: [token][lanes] */
    int lanes, is_wide;            /* is_wide: 1: two limbs */
    float centre;                  /* tkvi_centre of the codes */
    int middle;                    /* twice the centre of the codes that are multiplied */
    float coarse;                  /* see tkvi_coarse_v */
} tkvi_prefill_v_args;

static int tkvi_prefill_lanes(int pad) { return pad <= TKVI_PREFILL_PART ? TKVI_PREFILL : 16; }

/* Lanes for so many rows. */
static int tkvi_lanes_of(int rows) { return rows > 16 ? TKVI_PREFILL : 16; }

/* Floats of tkvi_prefill_sums with `o` behind it, for at most `rows` rows. pad: the larger one of k_pad and v_pad, as
 * `o` is also room for queries. */
static int tkvi_prefill_sums_floats(int pad, int rows) {
    return (int)(tkvi_align_up(sizeof(tkvi_prefill_sums)) / sizeof(float)) + pad * tkvi_lanes_of(rows);
}

/* Such sums in aligned memory. */
static tkvi_prefill_sums *tkvi_prefill_sums_in(float *memory) {
    tkvi_prefill_sums *s = (tkvi_prefill_sums *)(void *)memory;
    s->o = memory + tkvi_align_up(sizeof *s) / sizeof(float);
    return s;
}

#ifdef TKVI_VECTORS
static const float tkvi_prefill_zeros[TKVI_PREFILL] = {0.0f};

/* Moves the position `from` of queries and reference to the position `to`. */
static void tkvi_prefill_move(tkvi_prefill_queries *q, int to, int from) {
    memcpy(q->q + to * q->lanes, q->q + from * q->lanes, (size_t)q->lanes * sizeof *q->q);
    q->ref[to] = q->ref[from];
}

/* Sorts queries and reference into the order of a side, in place: cycle by cycle. Most blocks of a head have the same
 * order. */
static TKVI_NOINLINE void tkvi_prefill_sort(const tkvi_side *s, tkvi_prefill_queries *q) {
    int16_t position[TKV_MAX_HEAD_DIM], from[TKV_MAX_HEAD_DIM];
    float row[TKVI_PREFILL], ref;
    int i, to, next;
    if (q->order == s->order) return;
    for (i = 0; i < s->pad; i++)
        position[q->order ? tkvi_order_at(q->order, s->pad, i) : i] = (int16_t)i; /* of each channel */
    for (i = 0; i < s->pad; i++) from[i] = position[tkvi_channel(s, i)];
    for (i = 0; i < s->pad; i++) {
        if (from[i] == i) continue;
        memcpy(row, q->q + i * q->lanes, (size_t)q->lanes * sizeof *row);
        ref = q->ref[i];
        for (to = i; from[to] != i; to = next) {
            next = from[to];
            tkvi_prefill_move(q, to, next);
            from[to] = (int16_t)to;
        }
        from[to] = (int16_t)to;
        memcpy(q->q + to * q->lanes, row, (size_t)q->lanes * sizeof *row);
        q->ref[to] = ref;
    }
    q->order = s->order;
}

/* 1 if a channel of K is one that V inside K sums. */
static int tkvi_is_viewed(const tkvi_side *s, int channel) { return channel >= s->first && channel < s->dim; }

/* 1 if one of n positions has such a channel. */
static int tkvi_has_viewed(const tkvi_side *s, int position, int n) {
    int i;
    for (i = 0; i < n; i++)
        if (tkvi_is_viewed(s, tkvi_channel(s, position + i))) return 1;
    return 0;
}

/* Adds n quads to a list of runs. each: the most that a quad adds to a sum; room: what fits into the last run. */
static uint8_t *tkvi_prefill_add_run(uint8_t *run, int n, int each, int most, int *room) {
    TKVI_ASSERT(n <= 0 || each <= most);
    while (n > 0) {
        const int m = tkvi_min(n, *room / each);
        *run = (uint8_t)(*run + m);
        *room -= m * each;
        n -= m;
        if (n > 0) {
            if (*run) *++run = 0;
            *room = most;
        }
    }
    return run;
}

#endif /* TKVI_VECTORS */

#endif /* TKVI_KERNELS_PREFILL_H */
