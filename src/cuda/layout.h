/*
 * layout.h - a layer of the cache as kernels see it: addresses are computed, no tables of blocks.
 *
 * The bytes of a block are the host's: 64 tokens of a layer, all KV heads, K side then V side of each. A sequence has
 * four regions in each layer: archive (block b in place b), warm (a ring), sinks (one block of exact rows), hot (a
 * ring of exact blocks). Blocks behind the sinks have 64 tokens each: block b holds positions sinks + 64 b and on;
 * the first list.archive of them are archived, the next list.warm are warm, the rest is hot.
 */
#ifndef TKVCU_LAYOUT_H
#define TKVCU_LAYOUT_H

#include "api.h"

enum { TKVCU_ARCHIVE, TKVCU_WARM, TKVCU_SINKS, TKVCU_HOT, TKVCU_REGIONS };
enum { TKVCU_EXACT, TKVCU_KIVI, TKVCU_A, TKVCU_R }; /* how a side is read */

typedef struct tkvcu_side { /* one head's side in one coding: all that a kernel must know */
    uint8_t kind, bf16;     /* TKVCU_EXACT: 1: bfloat16 */
    uint8_t half_bits;      /* KIVI: 2 * width; R: 2, 3 (pairs), 4, 6, 8 */
    uint8_t group;          /* KIVI: values per scale, 32 or 64 */
    uint8_t slabs[7];    /* K: slabs of 16 channels (4 tiles) with so many bits, to 6; stored widest first */
    int16_t top;         /* window of the logarithmic scales */
    uint32_t at, bytes;  /* from the start of the block; whole */
    uint32_t code_bytes; /* then metadata, as in format_*.h */
    int32_t table;       /* A: first element of order and mean below; -1: channels as they come, means 0 */
} tkvcu_side;

typedef struct tkvcu_list {
    int32_t len, archive, warm, step;
} tkvcu_list;

typedef struct tkvcu_view {        /* a layer as kernels see it; passed by value */
    tkvcu_list *list;              /* [n_seqs] */
    uint8_t *bytes[TKVCU_REGIONS]; /* blocks of sequence s begin at bytes[r] + s * stride[r] */
    size_t stride[TKVCU_REGIONS];
    uint32_t block[TKVCU_REGIONS]; /* bytes of one */
    int32_t ring[TKVCU_REGIONS];   /* block b lies at b % ring */
    uint8_t *version;              /* [n_seqs][max_blocks] */
    const tkvcu_side *side;        /* [TKVI_VERSIONS][TKVCU_REGIONS][n_kv_heads][2] of this layer */
    const uint8_t *order;
    const float *mean;
    int32_t n_seqs, n_heads, n_kv_heads, head_dim, sinks, max_blocks;
} tkvcu_view;

#endif /* TKVCU_LAYOUT_H */
