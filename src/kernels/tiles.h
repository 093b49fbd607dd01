/*
 * kernels/tiles.h - shared by the instances of kernels/tiles.inc and kernels/values.inc: parameters of folding and of
 * products; the order of metadata.
 */
#ifndef TKVI_KERNELS_TILES_H
#define TKVI_KERNELS_TILES_H

#include "kernels/neon.h"
#include "kernels/wasm.h"
#include "kernels/x86.h"

/* Parameters of a fold: multiply rows of q (K, by position) or p (V, by token) by the scales of one group; round. */
typedef struct tkvi_fold_args {
    const float *x, *scale, *zero;
    int stride;             /* K: from a row of x to the next */
    const float *ref;       /* K */
    const int32_t *centre2; /* K: [n] twice tkvi_centre of the codes that a weight multiplies */
    float centre;           /* V: tkvi_centre of the codes */
    int middle,
        wide_middle;     /* V: twice the centre of the codes that narrow and wide weights are multiplied by */
    int n, n_limbs, top; /* weights in a row; limbs, see tkvi_n_limbs; V: the largest weight of one limb */
    int wide;            /* K: the first `wide` weights always have two limbs */
    int least; /* K: at least so many weights have 16 bits; rows that need one limb have multiples of 128 */
    float coarse;    /* see tkvi_coarse_k and tkvi_coarse_v */
    int8_t *w;       /* out: weights of one limb, in the layout of the instruction set */
    int16_t *wide_w; /* out: weights of two limbs */
} tkvi_fold_args;

/* Turns sums of products of a row into answers: step * sum + rest. rest = sum x (zero - ref + centre scale) - step *
 * sum w centre. */
typedef struct tkvi_fold {
    float step[4], rest[4];
} tkvi_fold;

typedef struct tkvi_products_k {
    const tkvi_side *s;
    const uint8_t *codes;
    uintptr_t ahead;            /* see tkvi_prefetch */
    int is_wide;                /* 1: tiles of least_wide bits and more have wide weights */
    int least_wide, most_width; /* most_width: of the widest tiles */
    int unpacks;                /* 1: wide weights meet tiles that are neither of 4 nor of 8 bits */
    const int8_t *w;
    const int16_t *wide_w;
    int second_group; /* bytes from the weights of tokens 0 .. 31 to those of 32 .. 63 */
    tkvi_fold fold[2];
    int32_t *sums; /* out: [row][64] */
} tkvi_products_k;

typedef struct tkvi_products_v {
    const tkvi_side *s;
    const uint8_t *codes; /* the first slab of the group */
    uintptr_t ahead;
    int width, slabs, n, pairs; /* n: tokens; pairs: a lane is a pair of channels, 16 apart */
    int is_wide;                /* 1: wide weights */
    const int8_t *w;
    const int16_t *wide_w;
    tkvi_fold fold;
    int32_t *sums; /* out: [row][TKVI_V_STRIDE] */
} tkvi_products_v;

/* Tiles of K of one width whose products by narrow weights fit into the sums. */
typedef struct tkvi_run_k {
    int width, n;
    int is_last; /* 1: the next run does not fit as well */
} tkvi_run_k;

#define TKVI_RUNS_K 16 /* four widths, and 64 tiles of 4 bits fill sums of 16 bits eight times */

#define TKVI_V_STRIDE (TKV_MAX_HEAD_DIM + 16) /* a pass may have a slab too many */

/* Weights of one group and up to four rows. */
typedef struct tkvi_weights_k {
    TKVI_ALIGNED int8_t w[4 * TKVI_K_PART];
    TKVI_ALIGNED int16_t wide_w[4 * TKVI_K_PART];
} tkvi_weights_k;

#ifdef TKVI_VECTORS
/* Transposes 4 x 4 bytes: codes of four tokens by channel, or the other way. */
static const int8_t tkvi_four_by_four[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

/* Divides the tiles of up to `width` bits into runs. most: the largest sum. Returns their number. */
static int tkvi_find_runs_k(const tkvi_side *s, int width, int most, tkvi_run_k *run) {
    int room = most, n_runs = 0;
    for (; width > 0; width--) {
        const int each = 2 * TKVI_LIMB_MAX_K * ((1 << width) - 1);
        int left = s->tiles.n[width];
        while (left > 0) {
            const int n = left * each <= room ? left : room / each;
            if (n > 0) {
                TKVI_ASSERT(n_runs < TKVI_RUNS_K);
                run[n_runs].width = width;
                run[n_runs].n = n;
                run[n_runs++].is_last = 0;
            } else {
                run[n_runs - 1].is_last = 1;
            }
            left -= n;
            room = n > 0 ? room - n * each : most;
        }
    }
    if (n_runs) run[n_runs - 1].is_last = 1;
    return n_runs;
}

/* Decoding: sorts metadata of K from positions to channels. */
static void tkvi_sort_by_channel(const tkvi_side *s, float *x) {
    float plain[2 * TKV_MAX_HEAD_DIM];
    int g, i;
    memcpy(plain, x, (size_t)(s->groups * s->pad) * sizeof *x);
    for (g = 0; g < s->groups; g++)
        for (i = 0; i < s->pad; i++) x[g * s->pad + tkvi_channel(s, i)] = plain[g * s->pad + i];
}
#endif

#endif /* TKVI_KERNELS_TILES_H */
