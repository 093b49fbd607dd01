/*
 * layout.h - a layer of the cache as kernels see it. Kernels compute addresses: there are no block tables.
 *
 * A block has the same bytes as on the host: 64 tokens of a layer, and for each KV head its K side, then its V side.
 * A sequence has four regions in each layer:
 *
 *     archive   block b at place b
 *     warm      a ring of blocks
 *     sinks     one block of exact rows
 *     hot       a ring of exact blocks
 *
 * The tokens after the sinks form blocks of 64: block b begins at position sinks + 64 b. The first list.archive
 * blocks are in the archive, the next list.warm blocks are warm, the others are hot.
 */
#ifndef TKVCU_LAYOUT_H
#define TKVCU_LAYOUT_H

#include "api.h"

enum { TKVCU_ARCHIVE, TKVCU_WARM, TKVCU_SINKS, TKVCU_HOT, TKVCU_REGIONS };
enum { TKVCU_EXACT, TKVCU_KIVI, TKVCU_A, TKVCU_R }; /* kinds of sides */

typedef struct tkvcu_side { /* one head's K or V in one coding */
    uint8_t kind, bf16;     /* TKVCU_EXACT: 1: bfloat16 */
    uint8_t half_bits;      /* KIVI: 2 * bits; R: 2, 3 (pairs), 4, 6, 8 */
    uint8_t group;          /* KIVI: values per scale, 64 */
    /* K: slabs[w] is the number of slabs of 16 channels (4 tiles) with w bits, w = 0 to 6; the widest are stored
     * first */
    uint8_t slabs[7];
    int16_t top;         /* exponent that bounds the logarithmic scales */
    uint32_t at, bytes;  /* offset in the block; size with metadata */
    uint32_t code_bytes; /* codes; the metadata follows, as in src/formats */
    int32_t table; /* A: first element in order, importance, mean; -1: natural order, all alike, means 0 */
} tkvcu_side;

typedef struct tkvcu_list {
    int32_t len, archive, warm, tickets;
} tkvcu_list;

typedef struct tkvcu_view {        /* a layer; kernels get it by value */
    tkvcu_list *list;              /* [n_seqs] */
    uint8_t *bytes[TKVCU_REGIONS]; /* blocks of sequence s begin at bytes[r] + s * stride[r] */
    size_t stride[TKVCU_REGIONS];
    uint32_t block[TKVCU_REGIONS]; /* bytes of one block */
    int32_t ring[TKVCU_REGIONS];   /* block b is at place b % ring */
    uint8_t *version;              /* [n_seqs][max_blocks]: table version of each block */
    const tkvcu_side *side;        /* [TKVI_VERSIONS][TKVCU_REGIONS][n_kv_heads][2] */
    const uint8_t *order, *importance;
    const float *mean;
    int32_t n_seqs, n_heads, n_kv_heads, head_dim, sinks, max_blocks;
} tkvcu_view;

#endif /* TKVCU_LAYOUT_H */
