/* tieredkv_cuda.cu: generated from src/cuda/ by tools/amalgamate.py. Edit there, not here. */
/* ======== api.h ======== */
/*
 * tieredkv_cuda.cu - tieredkv's cache on a GPU: the blocks of tieredkv.h, and attention directly on the coded tiers.
 *
 * This file stands beside tieredkv.h, which defines every layout, table and rule. The interface is C. The only
 * library is CUDA's runtime. The GPU needs compute capability 8.0 or later.
 *
 *     nvcc -O3 -arch=native -c tieredkv_cuda.cu                    an object for a C or C++ program
 *     nvcc -O3 -arch=native -shared -Xcompiler -fPIC -DTIEREDKV_IMPLEMENTATION tieredkv_cuda.cu \
 *          -o libtieredkv_cuda.so                                  a library that also has the tkv_ functions
 *     #define TKVCU_INTERFACE_ONLY
 *     #include "tieredkv_cuda.cu"                                  the declarations below, from C or C++
 *
 * The caller provides two pieces of device memory. One holds the tokens, the other is workspace of attention.
 *
 *     tkvcu_config config = {0};
 *     config.cfg = &cfg;
 *     config.max_tokens = 32768;
 *     tkvcu_get_required_bytes(&config, &cache_bytes, &work_bytes, reason, sizeof reason);
 *     cudaMalloc(&cache, cache_bytes);
 *     cudaMalloc(&work, work_bytes);
 *     tkvcu_create(&config, cache, cache_bytes, work, work_bytes, stream, &cu);
 *     tkvcu_import_seq(cu, 0, kv, 0, stream);          optional: a prompt that the CPU has processed
 *     for each step, for each layer:
 *         tkvcu_append(cu, layer, k, v, TKV_TYPE_F16, 1, NULL, stream);
 *         tkvcu_attend(cu, layer, q, TKV_TYPE_F16, 1, NULL, out, NULL, NULL, stream);
 *     tkvcu_get_flags(cu, &flags, 0, stream);          0: no error on the device
 *
 * Order: every call enqueues its work into `stream`. Calls on one cache must run one after the other, in one stream
 * or ordered by events. tkvcu_create, tkvcu_load_calibration, tkvcu_import_seq and tkvcu_export_seq wait for the
 * stream. The other calls do not wait and allocate nothing. They read lengths on the device only, so a captured graph
 * can be replayed at any length. One thread at a time may use a handle. The current device must own the memory.
 *
 * Errors: a bad argument gives a tkv_status and launches nothing; tkvcu_get_last_error has a sentence. Only the
 * device sees some errors, such as a full sequence or a NaN in new keys. They set a bit of the flags, which stays
 * set. The failed append leaves the sequence at its old length.
 *
 * Supported: A, R, KIVI and Q8 formats in the warm and archive tiers, F16 or BF16 in the hot tier and sinks.
 * head_dim, equal for K and V, is 64 or 128. A KV head has at most 16 query heads. A formats need
 * cfg.format.allocation_unit = 16, KIVI and Q8 formats cfg.format.group_size = 64. Windows mask tokens and free
 * none. Budgets, ladders, eviction, offloading, recomputation, anchors and meters must be off in the config.
 *
 * Bytes: a block has the same bytes as on the host, so import and export copy blocks. The encoder is the code of
 * tieredkv.h. A cache that grows on the device gets the same bytes as a cache on the host with the same tables.
 */
#ifndef TKVCU_API_H
#define TKVCU_API_H

#ifndef TKVCU_INTERFACE_ONLY
#ifndef TIEREDKV_IMPLEMENTATION
#define TIEREDKV_IMPLEMENTATION
#ifndef TKV_STATIC
#define TKV_STATIC
#endif
#endif
#ifndef TKV_NO_SIMD
#define TKV_NO_SIMD
#endif
#endif
#include "tieredkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* >>limits and flags */
#define TKVCU_MAX_APPEND 64  /* tokens of a sequence in one tkvcu_append */
#define TKVCU_MAX_QUERIES 64 /* queries of a sequence in one tkvcu_attend */
#define TKVCU_MAX_GROUP 16   /* query heads of a KV head */

/* Error flags that kernels set: see tkvcu_get_flags. */
#define TKVCU_FLAG_FULL 1u      /* an append would exceed max_tokens */
#define TKVCU_FLAG_NONFINITE 2u /* NaN or infinity in k or v, and cfg.host.nonfinite says to refuse them */
#define TKVCU_FLAG_SEQUENCE 4u  /* an entry of d_seq_map is n_seqs or more */
#define TKVCU_FLAG_INEXACT 8u   /* tkvcu_truncate would cut compressed tokens */

typedef struct tkvcu tkvcu; /* opaque */
struct CUstream_st;
typedef struct CUstream_st *tkvcu_stream; /* cudaStream_t */

/* >>life */
typedef struct tkvcu_config { /* zero means default, except in cfg */
    const tkv_config *cfg;    /* model, tiers and formats; read during the call, not kept */
    int n_seqs;               /* 0: cfg->limits.max_seqs */
    int max_tokens;           /* of a sequence; 0: cfg->limits.max_tokens. One of both must be set */
    int max_queries; /* of a sequence in one tkvcu_attend, at most 64; 0: 1. More need more workspace */
} tkvcu_config;

/* Computes the bytes of both pieces of device memory. Uses no GPU. The hot tier has space for cfg->limits.max_append
 * tokens in addition, because an import may bring that many: a smaller max_append saves memory.
 *   reason   (may be NULL) receives a sentence about TKV_ERR_CONFIG and TKV_ERR_UNSUPPORTED
 * Errors, both results unchanged:
 *   TKV_ERR_CONFIG        a field is out of range, or the size exceeds the address space
 *   TKV_ERR_UNSUPPORTED   tieredkv.h can do it, this file cannot
 *   TKV_ERR_ARG           a pointer is missing
 * Cost: O(layers). */
tkv_status tkvcu_get_required_bytes(const tkvcu_config *config, size_t *cache_bytes, size_t *work_bytes,
                                    char *reason, size_t size);
/* Creates an empty cache in device memory of the caller, and waits. A and R formats give all channels and heads equal
 * bits until tkvcu_load_calibration or an import brings tables.
 *   d_cache, d_work   aligned to 256 bytes; both must outlive the cache
 * Errors, *out unchanged and without a sentence:
 *   TKV_ERR_CAPACITY      a piece is smaller than tkvcu_get_required_bytes says
 *   TKV_ERR_UNSUPPORTED   compute capability below 8.0, too little shared memory, or as tkvcu_get_required_bytes
 *   TKV_ERR_CONFIG, TKV_ERR_ARG, TKV_ERR_NOMEM (host memory), TKV_ERR_DEVICE */
tkv_status tkvcu_create(const tkvcu_config *config, void *d_cache, size_t cache_bytes, void *d_work,
                        size_t work_bytes, tkvcu_stream stream, tkvcu **out);
/* Frees the handle in host memory; NULL is allowed. The caller frees the device memory. */
void tkvcu_destroy(tkvcu *cu);

/* >>transfer. `kv` is a cache of tieredkv.h with the same model, tiers and formats. The functions wait. All return
 * TKV_ERR_CONFIG if the configs differ, and TKV_ERR_UNSUPPORTED if kv uses what this file does not support. */
/* Copies the calibration tables of kv, learned or loaded. Blocks coded from now on use them.
 * Errors, no table changed:
 *   TKV_ERR_STATE   blocks here may be coded with another table of the same number
 *   TKV_ERR_NOMEM
 * Errors: TKV_ERR_DEVICE */
tkv_status tkvcu_load_calibration(tkvcu *cu, const tkv_cache *kv, tkvcu_stream stream);
/* Makes sequence `seq` a copy of sequence host_seq of kv, and loads the calibration of kv.
 * Errors, nothing changed:
 *   TKV_ERR_CAPACITY      it is too long, or too many blocks wait in the hot or warm tier. Blocks in A and R formats
 *                         wait for a table: call tkv_freeze_calibration, tkv_seq_begin and tkv_seq_commit
 *   TKV_ERR_STATE         a step is open, or as tkvcu_load_calibration
 *   TKV_ERR_UNSUPPORTED   evicted or expired tokens, offloaded blocks, blocks that a flush made short
 *   TKV_ERR_ARG, TKV_ERR_NOMEM
 * Errors: TKV_ERR_DEVICE
 * Cost: O(bytes). */
tkv_status tkvcu_import_seq(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, tkvcu_stream stream);
/* Makes sequence host_seq of kv, which must be empty, a copy of sequence `seq`. A layer of kv without tables gets the
 * tables of this cache, and stops learning.
 * Errors, nothing changed:
 *   TKV_ERR_STATE      the sequence is not empty, a step is open, or kv has other tables
 *   TKV_ERR_CAPACITY   longer than max_tokens of kv, or no space in a cache in place
 *   TKV_ERR_ARG, TKV_ERR_NOMEM
 * Errors, host_seq empty: TKV_ERR_DEVICE
 * Cost: O(bytes). */
tkv_status tkvcu_export_seq(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, tkvcu_stream stream);

/* >>use. d_seq_map is NULL or n_seqs entries in device memory. Entry i is the sequence of row i of k, v, q and out; a
 * negative entry skips the row. NULL: row i is sequence i, for all sequences. An append must not name a sequence
 * twice. All return TKV_ERR_ARG for a bad argument and TKV_ERR_DEVICE if the runtime refuses. */
/* Appends n_tokens tokens (1 to 64, at most cfg->limits.max_append) to the sequence of each row. Blocks that are due
 * are demoted first, as in tkv_append.
 *   d_k, d_v   [row][n_tokens][n_kv_heads][head_dim], packed, aligned to their type; keys after RoPE
 * Flags: FULL, NONFINITE, SEQUENCE. Cost: O(values), and one encoding per 64 tokens. */
tkv_status tkvcu_append(tkvcu *cu, int layer, const void *d_k, const void *d_v, tkv_type type, int n_tokens,
                        const int32_t *d_seq_map, tkvcu_stream stream);

typedef struct tkvcu_attend_params { /* zero means default */
    float scale;                     /* of q.k; 0: cfg.model.scale */
    float softcap;                   /* 0: none */
    int window;                 /* a query sees this many newest keys; 0: as the layer; TKV_OFF: all keys */
    const float *d_sink_logits; /* NULL, or [n_heads] learned logits in device memory */
} tkvcu_attend_params;
/* Computes attention of the last n_queries tokens (1 to max_queries) of each row's sequence. Each query sees its own
 * key and earlier ones. Skipped rows are not written. The bits are the same in every run on one device.
 *   d_q, d_out   [row][n_queries][n_heads][head_dim], packed
 *   params       NULL: all defaults
 *   d_lse        NULL, or [row][n_queries][n_heads]: natural log-sum-exp, sink logits included
 * A query without a visible key gives zeros; its log-sum-exp is the sink logit, or -inf.
 * Flags: SEQUENCE. Cost: columns are n_queries times the query heads of a KV head. Up to 8 queries: the bytes of the
 * sequence, once per 8 columns. More queries: O(tokens * columns * head_dim) products, and the bytes once per 128
 * columns. */
tkv_status tkvcu_attend(tkvcu *cu, int layer, const void *d_q, tkv_type type, int n_queries,
                        const tkvcu_attend_params *params, void *d_out, float *d_lse,
                        const int32_t *d_seq_map, tkvcu_stream stream);

/* Keeps the first d_lengths[seq] tokens of each sequence, in all layers. A negative or larger length changes
 * nothing, 0 empties the sequence. Otherwise the cut must fall into the hot tier, or the sequence does not change.
 *   d_lengths   [n_seqs] in device memory
 * Flags: INEXACT. */
tkv_status tkvcu_truncate(tkvcu *cu, const int32_t *d_lengths, tkvcu_stream stream);
/* Copies the lengths of all sequences in one layer.
 *   lengths   [n_seqs] in device memory or pinned host memory; other host memory may make the call wait */
tkv_status tkvcu_get_lengths(tkvcu *cu, int layer, int32_t *lengths, tkvcu_stream stream);
/* Copies the error flags, TKVCU_FLAG_ bits. clear = 1: sets them to 0 afterwards.
 *   flags   memory as in tkvcu_get_lengths */
tkv_status tkvcu_get_flags(tkvcu *cu, uint32_t *flags, int clear, tkvcu_stream stream);

/* Returns a sentence about the last call that failed; "" if none did. tkv_get_status_text describes a status. */
const char *tkvcu_get_last_error(const tkvcu *cu);

#ifdef __cplusplus
}
#endif

#endif /* TKVCU_API_H */
#if !defined(TKVCU_INTERFACE_ONLY) && !defined(TKVCU_IMPLEMENTED)
#define TKVCU_IMPLEMENTED
/* ======== layout.h ======== */
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
/* ======== warp.h ======== */
/*
 * warp.h - instructions without a name in CUDA C++: matrix products of a warp, copies into shared memory, pairs of
 * 16-bit floats in a word (the first in the lower half). tests/cuda_on_cpu.h emulates them on a CPU.
 */
#ifndef TKVCU_WARP_H
#define TKVCU_WARP_H


struct alignas(8) tkvcu_u32x2 {
    uint32_t x, y;
};

#ifndef TKVCU_ON_CPU

#define TKVCU_LAUNCH(kernel, grid, block, shared, stream, ...)                                               \
    kernel<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__)
#define TKVCU_SHARED(type, name)                                                                             \
    extern __shared__ __align__(128) uint8_t tkvcu_shared_[];                                                \
    type *name = (type *)(void *)tkvcu_shared_

#define TKVCU_DEVICE static __device__ __forceinline__
#define TKVCU_UNROLL _Pragma("unroll")
#define TKVCU_ROLL _Pragma("unroll 1")

/* c += a b, where a is 16 x 16 and b is 16 x 8. Lane 4 g + t holds fragments. a[0]: row g, k = 2 t, 2 t + 1.
 * a[1]: row g + 8, the same k. a[2], a[3]: the same rows at k + 8. b[0], b[1]: column g at these k. c[0], c[1]:
 * row g, columns 2 t, 2 t + 1. c[2], c[3]: row g + 8. */
TKVCU_DEVICE void tkvcu_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

TKVCU_DEVICE void tkvcu_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* The same for bytes, signed (s) or unsigned (u): a is 16 x 32 and b is 32 x 8. Lane 4 g + t holds of a the rows
 * g and g + 8 at k = 4 t .. 4 t + 3 (a[0], a[1]) and at k + 16 (a[2], a[3]). b holds column g at these k. c is
 * as above. */
#define TKVCU_MMA_BYTES_(A, B)                                                                               \
    TKVCU_DEVICE void tkvcu_mma_##A##B(int32_t c[4], const uint32_t a[4], const uint32_t b[2]) {             \
        asm("mma.sync.aligned.m16n8k32.row.col.s32." #A "8." #B "8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "       \
            "{%8,%9}, {%0,%1,%2,%3};"                                                                        \
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                 \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                             \
    }
TKVCU_MMA_BYTES_(u, u)
TKVCU_MMA_BYTES_(u, s)
TKVCU_MMA_BYTES_(s, u)
TKVCU_MMA_BYTES_(s, s)
#undef TKVCU_MMA_BYTES_

/* Addresses in shared memory as numbers, for arithmetic on their bits. */
typedef uint32_t tkvcu_address;

TKVCU_DEVICE tkvcu_address tkvcu_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* volatile, because the memory changes between calls. */
TKVCU_DEVICE tkvcu_u32x2 tkvcu_load_shared_u32x2(tkvcu_address at) {
    tkvcu_u32x2 w;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(at));
    return w;
}

/* Loads four 8 x 8 matrices of 16-bit values. Lane 8 j + i passes the address of row i of matrix j. */
TKVCU_DEVICE void tkvcu_ldmatrix_x4(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(tkvcu_shared_address(row))
                 : "memory");
}

TKVCU_DEVICE void tkvcu_ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(tkvcu_shared_address(row))
                 : "memory");
}

TKVCU_DEVICE void tkvcu_cp_async16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tkvcu_shared_address(shared)), "l"(global)
                 : "memory");
}

/* Copies 16 bytes at offset AT if left > AT. `middle` is 2048 bytes after the start of the source: offsets from -2048
 * to 2047 then cover 4096 bytes. */
template <int AT> TKVCU_DEVICE void tkvcu_cp_async16_if(void *shared, const void *middle, int left) {
    asm volatile(
        "{ .reg .pred p; setp.gt.s32 p, %2, %3;\n"
        "@p cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16; }" ::"r"(tkvcu_shared_address(shared)),
        "l"(middle), "r"(left), "n"(AT), "n"(AT - 2048)
        : "memory");
}

TKVCU_DEVICE void tkvcu_cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N> TKVCU_DEVICE void tkvcu_cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

TKVCU_DEVICE uint32_t tkvcu_pack_f16x2(float lo, float hi) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
    return x;
}

TKVCU_DEVICE uint32_t tkvcu_pack_bf16x2(float lo, float hi) {
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
    return x;
}

TKVCU_DEVICE float tkvcu_f16_lo(uint32_t x) {
    float y;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(y) : "r"(x));
    return y;
}

TKVCU_DEVICE float tkvcu_bf16_lo(uint32_t x) { return __uint_as_float(x << 16); }
TKVCU_DEVICE float tkvcu_bf16_hi(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

TKVCU_DEVICE uint32_t tkvcu_hmul2(uint32_t a, uint32_t b) {
    uint32_t x;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}

TKVCU_DEVICE uint32_t tkvcu_hfma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t x;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}
TKVCU_DEVICE uint32_t tkvcu_prmt(uint32_t a, uint32_t b, uint32_t select) {
    uint32_t x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(select));
    return x;
}

TKVCU_DEVICE float tkvcu_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns p + n * size in one instruction. Otherwise the compiler keeps 64-bit products in registers across the
 * loop. */
TKVCU_DEVICE const uint8_t *tkvcu_advance(const uint8_t *p, int n, uint32_t size) {
    const uint8_t *to;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(n), "r"(size), "l"(p));
    return to;
}

/* Hides the origin of a number. The compiler then keeps it in a register and does not recompute it in every loop
 * turn. */
TKVCU_DEVICE uint32_t tkvcu_keep_in_register(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

TKVCU_DEVICE int tkvcu_keep_in_register(int x) { /* x is not negative */
    asm volatile("" : "+r"(x));
    __builtin_assume(x >= 0);
    return x;
}

TKVCU_DEVICE float tkvcu_rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#else
static inline tkvcu_u32x2 tkvcu_load_shared_u32x2(tkvcu_address at) { return *(const tkvcu_u32x2 *)at; }
#define TKVCU_DEVICE static inline
#define TKVCU_UNROLL
#define TKVCU_ROLL
#endif

/* Loads and stores an element of the caller's arrays, which are aligned to their type. */
TKVCU_DEVICE float tkvcu_load_element(const void *x, int type, size_t at) {
    uint32_t h;
    if (type == TKV_TYPE_F32) return ((const float *)x)[at];
    h = ((const uint16_t *)x)[at];
    return type == TKV_TYPE_F16 ? tkvcu_f16_lo(h) : tkvcu_bf16_lo(h);
}

TKVCU_DEVICE void tkvcu_store_element(void *x, int type, size_t at, float y) {
    if (type == TKV_TYPE_F32) ((float *)x)[at] = y;
    else
        ((uint16_t *)x)[at] =
            (uint16_t)(type == TKV_TYPE_F16 ? tkvcu_pack_f16x2(y, 0.0f) : tkvcu_pack_bf16x2(y, 0.0f));
}

/* Returns the maximum over the lanes of a warp. Values must not be negative: their bits are compared as
 * integers. */
TKVCU_DEVICE float tkvcu_warp_max(float x) {
    return tkvi_from_bits(__reduce_max_sync(0xffffffffu, tkvi_bits(x)));
}

#endif /* TKVCU_WARP_H */
/* ======== encode.h ======== */
/*
 * encode.h - the threads of a thread block decode and encode one head's side of a block. They call the functions of
 * tieredkv.h, so the bytes are those of the host.
 *
 * A line is a channel of K or a token of V. There are 4 * head_dim threads, and each has 16 values of a line. Four
 * neighbour threads share a channel of K: each has every fourth token. head_dim / 16 neighbours share a token of V in
 * the same way. Reductions over a line are sums of integers, minima and maxima, which do not depend on the order. So
 * are those that find the outlier of A, over all channels.
 *
 * nvcc fuses multiply and add where it can. Here that does not change results: the products are exact, or come from
 * an instruction that nvcc does not fuse. tests/test_cuda_build.py checks the compiled code.
 */
#ifndef TKVCU_ENCODE_H
#define TKVCU_ENCODE_H


#define TKVCU_THREAD_VALUES 16  /* values of a line per thread */
#define TKVCU_CHANNEL_THREADS 4 /* threads of a channel of K */

/* Reads the thread index anew in each call. Otherwise the compiler hoists all values derived from it, for every
 * format, out of the loop over blocks, and registers spill. */
TKVCU_DEVICE int tkvcu_thread_index(void) {
#ifdef TKVCU_ON_CPU
    return (int)threadIdx.x;
#else
    int me;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(me));
    __builtin_assume(me >= 0);
    return me;
#endif
}

typedef struct alignas(16) tkvcu_bytes16 { /* copied in one instruction */
    uint64_t x[2];
} tkvcu_bytes16;

/* Shared memory of the thread block. Rows of values are padded by 8. Threads that read along tokens or along
 * channels then use different banks. */
template <int Dim> struct tkvcu_transcoder {
    enum { THREADS = TKVI_BLOCK * Dim / TKVCU_THREAD_VALUES, STRIDE = Dim + 8 };
    tkvi_format format[2];
    tkvi_side side[2]; /* source, target */
    float scale[Dim], zero[Dim];
    uint8_t row[Dim];                  /* A: the outlier's row of the source side */
    int32_t deviation[TKVI_BLOCK];     /* A: of each token, summed over the channels */
    int32_t largest;                   /* A: bits of the outlier's largest residual */
    alignas(16) uint8_t meta[4 * Dim]; /* of the target side */
    alignas(16) uint8_t code[Dim / 4][TKVI_TILE_CODES];
    union {
        alignas(16) float x[TKVI_BLOCK * STRIDE];
        uint8_t bytes[TKVI_BLOCK * STRIDE *
                      sizeof(float)]; /* source side before decoding; packed codes of the target side */
    };
};

/* >>reductions over the threads of a line */
template <int Threads, class T> TKVCU_DEVICE T tkvcu_sum_lanes(T x) {
    int by;
    TKVCU_UNROLL
    for (by = 1; by < Threads; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

template <int Threads> TKVCU_DEVICE float tkvcu_min_lanes(float x) {
    int by;
    TKVCU_UNROLL
    for (by = 1; by < Threads; by *= 2) {
        const float y = __shfl_xor_sync(0xffffffffu, x, by);
        x = y < x ? y : x;
    }
    return x;
}

template <int Threads> TKVCU_DEVICE float tkvcu_max_lanes(float x) { return -tkvcu_min_lanes<Threads>(-x); }

/* >>sides */
/* Fills format and side for the functions of tieredkv.h. One thread calls it. */
TKVCU_DEVICE void tkvcu_open_side(const tkvcu_view *v, const tkvcu_side *d, int which, int fit,
                                  tkvi_format *f, tkvi_side *s) {
    int w;
    memset(f, 0, sizeof *f);
    memset(s, 0, sizeof *s);
    s->format = f;
    s->which = which ? TKV_V : TKV_K;
    s->dim = s->pad = (int16_t)v->head_dim;
    s->top = d->top;
    s->bytes = d->bytes;
    s->code_bytes = d->code_bytes;
    s->groups = 1;
    s->group = which ? TKV_MAX_HEAD_DIM : TKVI_BLOCK;
    if (d->kind == TKVCU_KIVI) {
        f->bits = d->half_bits / 2;
        s->fit = (int8_t)fit;
        s->group = d->group;
        s->groups = (int16_t)((which ? v->head_dim : TKVI_BLOCK) / d->group);
        s->tiles.n[f->bits] = (uint16_t)(s->pad / 4);
    }
    if (d->kind == TKVCU_A) {
        for (w = 1; w <= 6; w++) s->tiles.n[w] = (uint16_t)(4 * d->slabs[w]);
        s->has_outlier = 1;
        if (d->table >= 0) {
            s->order = v->order + d->table;
            s->importance = v->importance + d->table;
            s->mean = v->mean + d->table;
        }
    }
    if (d->kind == TKVCU_R) {
        f->rotated = 1;
        s->half_bits = (int8_t)d->half_bits;
        s->pairs = d->half_bits == 3;
        if (s->pairs) s->levels = tkvi_r_pairs;
        s->tiles.n[s->pairs ? 3 : d->half_bits / 2] = (uint16_t)(s->pad / 4 / (s->pairs ? 2 : 1));
    }
}

/* Returns the width of tile i, and its offset in the codes; width 0 if i is not a tile of the side. */
TKVCU_DEVICE int tkvcu_find_tile(const tkvi_side *s, int i, int *at) {
    int width;
    *at = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int n = s->tiles.n[width];
        *at += tkvi_min(i, n) * TKVI_TILE_BYTES(width);
        if (i < n) break;
        i -= n;
    }
    return width;
}

/* Returns the bits of the tile that contains this position. */
TKVCU_DEVICE int tkvcu_find_width(const tkvi_side *s, int position) {
    int width, end = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        end += 4 * s->tiles.n[width];
        if (position < end) return width;
    }
    return 0;
}

/* Rotates a token as core/rotate.h does, or back. `Threads` neighbour threads share it. */
template <int Threads> TKVCU_DEVICE void tkvcu_rotate(float *y, int part, int back) {
    const float norm = tkvi_hadamard_norm[Threads == 8 ? 7 : 6];
    int i, h;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES && !back; i++) {
        const int c = Threads * i + part;
        y[i] = tkvi_signs[c / 32] >> c % 32 & 1 ? -y[i] : y[i];
    }
    TKVCU_UNROLL
    for (h = 1; h < Threads; h *= 2) {
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
            const float other = __shfl_xor_sync(0xffffffffu, y[i], h);
            y[i] = part & h ? other - y[i] : y[i] + other;
        }
    }
    TKVCU_UNROLL
    for (h = 1; h < TKVCU_THREAD_VALUES; h *= 2) {
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
            const float a = y[i & ~h], b = y[i | h];
            if (i & h) continue;
            y[i] = a + b;
            y[i | h] = a - b;
        }
    }
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const int c = Threads * i + part;
        y[i] *= norm;
        if (back) y[i] = tkvi_signs[c / 32] >> c % 32 & 1 ? -y[i] : y[i];
    }
}

/* Returns the slot of the outlier and its scale (tkvi_outlier_head). All lanes of a warp call it. */
TKVCU_DEVICE int tkvcu_load_outlier_head(const uint8_t *row, int lane) {
    return (int)(__ballot_sync(0xffffffffu, row[lane] & 1) & 0x7fffu);
}

/* >>decoding */
/* Decodes scale and zero number i of the side. */
TKVCU_DEVICE void tkvcu_decode_meta(const tkvi_side *s, int kind, const uint8_t *meta, int n, int i,
                                    float *scale, float *zero) {
    if (kind == TKVCU_KIVI) {
        *scale = tkvi_f16_to_f32(tkvi_load16(meta + 2 * i));
        *zero = tkvi_f16_to_f32(tkvi_load16(meta + 2 * (n + i)));
    } else if (kind == TKVCU_R) {
        const float middle = s->pairs ? 0.0f : 0.5f * (float)((1 << s->half_bits / 2) - 1);
        *scale = tkvi_log_value(meta[i], s->top) * (s->pairs ? 1.0f / 64.0f : 1.0f);
        *zero = -middle * *scale;
    } else {
        const int width = tkvcu_find_width(s, i), unit = tkvi_a_unit[width];
        const float mean = s->mean ? s->mean[i] : 0.0f;
        *scale = width ? tkvi_log_value(meta[i], s->top) : 0.0f;
        *zero = width
                    ? tkvi_zero(meta[n + i], *scale, mean, 1.0f / (float)unit, ((1 << width) - 1) * unit / 2)
                    : tkvi_f32(tkvi_f16_to_f32((uint16_t)(meta[i] | meta[n + i] << 8)) + mean);
    }
}

/* Converts rows of 16-bit floats to values. */
template <int Dim>
TKVCU_DEVICE void tkvcu_decode_exact(tkvcu_transcoder<Dim> *d, int bf16, const uint8_t *src) {
    int i, k;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) { /* 8 values per turn */
        const int at = 8 * (tkvcu_thread_index() + i * tkvcu_transcoder<Dim>::THREADS);
        const tkvcu_bytes16 h = *(const tkvcu_bytes16 *)(const void *)(src + 2 * at);
        tkvcu_bytes16 *x =
            (tkvcu_bytes16 *)(void *)(d->x + at / Dim * tkvcu_transcoder<Dim>::STRIDE + at % Dim);
        tkvcu_bytes16 y[2] = {{{0, 0}}, {{0, 0}}};
        TKVCU_UNROLL
        for (k = 0; k < 8; k++) {
            const uint16_t z = (uint16_t)(h.x[k / 4] >> 16 * (k % 4));
            const uint32_t bits = tkvi_bits(bf16 ? tkvi_bf16_to_f32(z) : tkvi_f16_to_f32(z));
            y[k / 4].x[k / 2 % 2] |= (uint64_t)bits << 32 * (k % 2);
        }
        x[0] = y[0];
        x[1] = y[1];
    }
}

/* The source side is overwritten; only d->row remains of it. */
template <int Dim> TKVCU_DEVICE void tkvcu_decode_k(tkvcu_transcoder<Dim> *d) {
    const tkvi_side *s = &d->side[0];
    const int position = tkvcu_thread_index() / TKVCU_CHANNEL_THREADS, width = tkvcu_find_width(s, position);
    const uint8_t *tile = d->code[position / 4];
    const float scale = d->scale[position], zero = d->zero[position];
    float *x = d->x + tkvi_channel(s, position), outlier = 0.0f;
    int t, slot = TKVI_NO_OUTLIER;
    if (s->has_outlier) {
        const int head = tkvcu_load_outlier_head(d->row, tkvcu_thread_index() % 32);
        slot = head & 127;
        outlier = tkvi_outlier_value(d->row[position], 0.5f * tkvi_log_value(head >> 7, s->top),
                                     s->mean ? s->mean[position] : 0.0f);
    }
    TKVCU_UNROLL
    for (t = tkvcu_thread_index() % TKVCU_CHANNEL_THREADS; t < TKVI_BLOCK; t += TKVCU_CHANNEL_THREADS)
        x[t * tkvcu_transcoder<Dim>::STRIDE] =
            t == slot ? outlier : tkvi_k_value(s, width, tile, position, t, scale, zero);
}

template <int Dim> TKVCU_DEVICE void tkvcu_decode_v(tkvcu_transcoder<Dim> *d) {
    enum { LINE = Dim / TKVCU_THREAD_VALUES };
    const tkvi_side *s = &d->side[0];
    const int t = tkvcu_thread_index() / LINE, part = tkvcu_thread_index() % LINE;
    int at, i;
    const int width = tkvcu_find_tile(s, 0, &at),
              slab = s->pairs ? 5 : 4; /* all tiles of a side are alike; a slab has 2^slab channels */
    float y[TKVCU_THREAD_VALUES];
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const int c = LINE * i + part;
        const int m = (s->groups > 1 ? c / TKVI_BLOCK * TKVI_BLOCK : 0) + t;
        y[i] = tkvi_v_value(s, width, d->code[(c >> slab) * 4 + t / 16], c & ((1 << slab) - 1), t,
                            d->scale[m], d->zero[m]);
    }
    if (s->format->rotated) tkvcu_rotate<LINE>(y, part, 1);
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        d->x[t * tkvcu_transcoder<Dim>::STRIDE + LINE * i + part] = y[i];
}

/* Decodes 64 tokens of a side into d->x. All threads call it. */
template <int Dim>
TKVCU_DEVICE void tkvcu_decode(tkvcu_transcoder<Dim> *d, const tkvcu_side *from, const uint8_t *src) {
    const tkvi_side *s = &d->side[0];
    const int me = tkvcu_thread_index(), all = tkvcu_transcoder<Dim>::THREADS;
    int i, p, at;
    if (from->kind == TKVCU_EXACT) {
        tkvcu_decode_exact<Dim>(d, from->bf16, src);
    } else {
        const int n = s->groups * (s->which == TKV_V ? TKVI_BLOCK : Dim);
        for (i = 16 * me; i < (int)s->bytes; i += 16 * all)
            *(tkvcu_bytes16 *)(void *)(d->bytes + i) = *(const tkvcu_bytes16 *)(const void *)(src + i);
        __syncthreads();
        if (me < Dim) { /* a quarter of a tile each */
            const int tile = me / 4, first = me % 4 * 8, width = tkvcu_find_tile(s, tile, &at);
            for (p = 0; p < 8; p++) tkvi_store8(d->code[tile] + 32 * p + first, 0);
            if (width) tkvi_unpack_part(d->bytes + at, width, d->code[tile], first, first + 8);
        }
        for (i = me; i < n; i += all)
            tkvcu_decode_meta(s, from->kind, d->bytes + s->code_bytes, n, i, &d->scale[i], &d->zero[i]);
        if (s->has_outlier && me < Dim) d->row[me] = d->bytes[(int)s->code_bytes + 2 * Dim + me];
        __syncthreads();
        if (s->which == TKV_V) tkvcu_decode_v<Dim>(d);
        else tkvcu_decode_k<Dim>(d);
    }
    __syncthreads();
}

/* >>encoding. d->x becomes codes and metadata of the target side. Each function follows the steps of
 * src/formats. */
/* Cuts this thread's values of a column to integers (formats/a.h, step 1). `from` stands for the token `slot`. */
template <int Dim>
TKVCU_DEVICE void tkvcu_load_column(const float *x, float mean, int part, int slot, int from, tkvi_column *c,
                                    int u[TKVCU_THREAD_VALUES]) {
    float y[TKVCU_THREAD_VALUES], low = 1e30f, high = -1e30f, inverse;
    int i;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const int t = TKVCU_CHANNEL_THREADS * i + part;
        y[i] = tkvi_a_residual(x[(t == slot ? from : t) * tkvcu_transcoder<Dim>::STRIDE], mean);
        low = y[i] < low ? y[i] : low;
        high = y[i] > high ? y[i] : high;
    }
    c->low = tkvcu_min_lanes<TKVCU_CHANNEL_THREADS>(low);
    c->step = tkvi_a_step(c->low, tkvcu_max_lanes<TKVCU_CHANNEL_THREADS>(high), &inverse);
    c->sum_u = c->sum_uu = 0;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        u[i] = tkvi_a_integer(y[i], c->low, inverse);
        c->sum_u += u[i];
        c->sum_uu += u[i] * u[i];
    }
    c->sum_u = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(c->sum_u);
    c->sum_uu = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(c->sum_uu);
}

/* Gives N of 2 N sums to the lane By further, and adds its sums to the others. Returns the first that was kept. */
template <int N, int By> TKVCU_DEVICE int tkvcu_share_sums(int sum[2 * N], int lane) {
    const int upper = lane & By;
    int i;
    TKVCU_UNROLL
    for (i = 0; i < N; i++) {
        const int given = upper ? sum[i] : sum[i + N], kept = upper ? sum[i + N] : sum[i];
        sum[i] = kept + __shfl_xor_sync(0xffffffffu, given, By);
    }
    return upper ? N : 0;
}

/* Adds the deviations of this warp's channels to d->deviation (step B). Lanes with the same part share tokens. */
template <int Dim>
TKVCU_DEVICE void tkvcu_add_deviations(tkvcu_transcoder<Dim> *d, const tkvi_column *c, float unit, int part,
                                       const int u[TKVCU_THREAD_VALUES]) {
    const int lane = tkvcu_thread_index() % 32;
    int sum[TKVCU_THREAD_VALUES], i, first;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const int x = tkvi_deviation(TKVI_BLOCK, c->sum_u, u[i], unit);
        sum[i] = x * x;
    }
    first = tkvcu_share_sums<8, 16>(sum, lane);
    first += tkvcu_share_sums<4, 8>(sum, lane);
    first += tkvcu_share_sums<2, 4>(sum, lane);
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) /* sums of integers: their order does not matter */
        atomicAdd(&d->deviation[TKVCU_CHANNEL_THREADS * (first + i) + part], sum[i]);
}

/* Returns the slot of the outlier, or TKVI_NO_OUTLIER (step B). All lanes of a warp call it. */
TKVCU_DEVICE int tkvcu_find_outlier(const int32_t deviation[TKVI_BLOCK], int lane) {
    const int first = deviation[lane], second = deviation[lane + 32];
    const int most = (int)__reduce_max_sync(0xffffffffu, (unsigned)tkvi_max(first, second));
    /* counted from the last slot, so that the maximum is the first one */
    const int before_end = first == most ? 63 - lane : second == most ? 31 - lane : 0;
    const int slot = 63 - (int)__reduce_max_sync(0xffffffffu, (unsigned)before_end);
    return most > 0 ? slot : TKVI_NO_OUTLIER;
}

/* Finds the outlier, and writes its row to d->meta (steps A to C). x: values of this thread's channel. Returns the
 * slot. All threads call it. */
template <int Dim>
TKVCU_DEVICE int tkvcu_encode_outlier(tkvcu_transcoder<Dim> *d, const float *x, float mean, int position,
                                      int part) {
    const tkvi_side *s = &d->side[1];
    const int lane = tkvcu_thread_index() % 32;
    int u[TKVCU_THREAD_VALUES], slot, log;
    float residual = 0.0f, step, most;
    tkvi_column c;
    if (tkvcu_thread_index() < TKVI_BLOCK) d->deviation[tkvcu_thread_index()] = 0;
    if (tkvcu_thread_index() == 0) d->largest = 0;
    __syncthreads();
    tkvcu_load_column<Dim>(x, mean, part, TKVI_NO_OUTLIER, 0, &c, u);
    tkvcu_add_deviations<Dim>(
        d, &c,
        tkvi_deviation_unit(TKVI_BLOCK, c.sum_u, c.sum_uu, s->importance ? s->importance[position] : 255),
        part, u);
    __syncthreads();
    slot = tkvcu_find_outlier(d->deviation, lane);
    if (slot != TKVI_NO_OUTLIER) residual = tkvi_a_residual(x[slot * tkvcu_transcoder<Dim>::STRIDE], mean);
    most = tkvcu_warp_max(fabsf(residual));
    if (lane == 0) atomicMax(&d->largest, (int)tkvi_bits(most)); /* not negative: ordered as integers */
    __syncthreads();
    log = tkvi_outlier_log(tkvi_from_bits((uint32_t)d->largest), s->top);
    step = tkvi_log_value(log, s->top);
    if (part == 0)
        d->meta[2 * Dim + position] =
            tkvi_outlier_byte(tkvi_outlier_code(residual, step > 0.0f ? tkvi_f32(1.0f / step) : 0.0f),
                              slot | log << 7, position);
    return slot;
}

template <int Dim> TKVCU_DEVICE void tkvcu_encode_a(tkvcu_transcoder<Dim> *d) {
    enum { NEXT = TKVCU_CHANNEL_THREADS * tkvcu_transcoder<Dim>::STRIDE };
    const tkvi_side *s = &d->side[1];
    const int position = tkvcu_thread_index() / TKVCU_CHANNEL_THREADS,
              part = tkvcu_thread_index() % TKVCU_CHANNEL_THREADS;
    const float mean = s->mean ? s->mean[position] : 0.0f;
    float *x = d->x + part * tkvcu_transcoder<Dim>::STRIDE + tkvi_channel(s, position);
    const float *column = d->x + tkvi_channel(s, position);
    const int slot = tkvcu_encode_outlier<Dim>(d, column, mean, position, part);
    float most = -1.0f, middle;
    int u[TKVCU_THREAD_VALUES], i, k, best = 0, beyond;
    uint8_t log, by;
    tkvi_column c;
    c.n = TKVI_BLOCK;
    c.width = tkvcu_find_width(s, position);
    tkvcu_load_column<Dim>(column, mean, part, slot, tkvi_outlier_neighbour(slot), &c, u);
    c.sum_c = c.sum_cc = c.sum_cu = 0;
    TKVCU_ROLL
    for (k = 0; k < TKVI_A_CUTS; k++) {
        const int cut = tkvi_a_ranges[k].cut[c.width], times = tkvi_a_ranges[k].by[c.width];
        int sum = 0, squares = 0, products = 0;
        float score;
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
            const int code = tkvi_cut_code(u[i], cut, times, (1 << c.width) - 1);
            sum += code;
            squares += code * code;
            products += code * u[i];
        }
        sum = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(sum);
        squares = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(squares);
        products = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(products);
        score = tkvi_a_score(c.n, c.sum_u, sum, squares, products);
        if (score > most) {
            most = score;
            best = k;
            c.sum_c = sum;
            c.sum_cc = squares;
            c.sum_cu = products;
        }
    }
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        *tkvi_k_code(d->code, position, TKVCU_CHANNEL_THREADS * i + part) = (uint8_t)tkvi_cut_code(
            u[i], tkvi_a_ranges[best].cut[c.width], tkvi_a_ranges[best].by[c.width], (1 << c.width) - 1);
    beyond = tkvi_a_finalize_scales(&c, s->top, &log, &by, &middle);
    if (__any_sync(0xffffffffu, beyond)) {
        int offset, sum = 0;
        float scale = 0.0f;
        __syncwarp(); /* other lanes have read the column */
        /* d->x stores u, because the rolled loop below cannot index registers */
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) x[i * NEXT] = (float)u[i];
        if (beyond) {
            log = (uint8_t)tkvi_a_far(&c, log, s->top, &offset);
            scale = tkvi_log_value(log, s->top);
            TKVCU_ROLL
            for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
                const int code = tkvi_a_far_code(&c, (int)x[i * NEXT], scale, offset);
                *tkvi_k_code(d->code, position, TKVCU_CHANNEL_THREADS * i + part) = (uint8_t)code;
                sum += code;
            }
        }
        sum = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(sum);
        if (beyond) by = tkvi_a_far_offset(&c, scale, sum);
    }
    if (part == 0) tkvi_a_put(c.width, log, by, middle, &d->meta[position], &d->meta[Dim + position]);
}

template <int Dim> TKVCU_DEVICE void tkvcu_encode_r(tkvcu_transcoder<Dim> *d) {
    enum {
        /* a thread's values of channels c and c + 16 are PAIR elements apart */
        LINE = Dim / TKVCU_THREAD_VALUES,
        PAIR = 16 / LINE
    };
    const tkvi_side *s = &d->side[1];
    const int t = tkvcu_thread_index() / LINE, part = tkvcu_thread_index() % LINE, bits = s->half_bits / 2;
    float y[TKVCU_THREAD_VALUES], most = 0.0f, by, unit;
    int u[TKVCU_THREAD_VALUES], i, squares = 0, sum = 0;
    TKVCU_UNROLL
    /* limits as in formats/r.h: bfloat16 has larger values */
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        y[i] = tkvi_clampf(d->x[t * tkvcu_transcoder<Dim>::STRIDE + LINE * i + part], -1e30f, 1e30f);
    tkvcu_rotate<LINE>(y, part, 0);
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const float a = fabsf(y[i]);
        most = a > most ? a : most;
    }
    most = tkvcu_max_lanes<LINE>(most);
    most = most < 1e30f ? most : 1e30f;
    by = tkvi_r_by(most, Dim);
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        u[i] = tkvi_r_integer(y[i], by, Dim);
        squares += u[i] * u[i];
    }
    squares = tkvcu_sum_lanes<LINE>(squares);
    if (squares == 0) squares = 1;
    unit = tkvi_r_unit(squares, Dim);
    if (s->pairs) {
        const float fine = tkvi_r_fine(unit);
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
            const int c = LINE * i + part;
            if (i / PAIR % 2 == 0)
                *tkvi_v_code(d->code, c / 32 * 16 + c % 16, t) =
                    (uint8_t)tkvi_r_pair(u[i], u[(i + PAIR) % TKVCU_THREAD_VALUES], fine, &sum);
        }
    } else {
        const float fine = tkvi_f32(unit / tkvi_r_step[bits]);
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++)
            *tkvi_v_code(d->code, LINE * i + part, t) = (uint8_t)tkvi_r_grid(u[i], fine, bits, 0, &sum);
    }
    sum = tkvcu_sum_lanes<LINE>(sum);
    __syncwarp();
    if (part == 0) {
        const float scale = tkvi_r_scale(most, squares, sum, Dim);
        d->meta[t] = (uint8_t)tkvi_log_code(tkvi_r_finish(s, t, TKVI_BLOCK, d->code, scale), s->top);
    }
}

/* Encodes a group of 64 values that `Threads` neighbour threads share. *scale and *zero are fp16. */
template <int Threads>
TKVCU_DEVICE void tkvcu_encode_kivi_group(const float *x, int bits, int fit, int *code, uint16_t *scale,
                                          uint16_t *zero) {
    enum { N = TKVI_BLOCK / Threads };
    const int top = (1 << bits) - 1;
    float v[N], low = 0.0f, high = 0.0f, range, inverse = 0.0f, a, b;
    uint16_t u[N];
    uint8_t meta[4];
    tkvi_group g;
    int i, k;
    TKVCU_UNROLL
    for (i = 0; i < N; i++) {
        v[i] = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        low = i == 0 || v[i] < low ? v[i] : low;
        high = i == 0 || v[i] > high ? v[i] : high;
    }
    low = tkvcu_min_lanes<Threads>(low);
    high = tkvcu_max_lanes<Threads>(high);
    range = tkvi_f32(high - low);
    if (fit) {
        int sum_u = 0, sum_uu = 0;
        if (high > low) inverse = tkvi_group_open(&g, TKVI_BLOCK, low, high);
        TKVCU_UNROLL
        for (i = 0; i < N; i++) {
            u[i] = (uint16_t)tkvi_group_value(v[i], low, high, inverse);
            sum_u += u[i];
            sum_uu += u[i] * u[i];
        }
        g.sum_u = tkvcu_sum_lanes<Threads>(sum_u);
        g.sum_uu = tkvcu_sum_lanes<Threads>(sum_uu);
    }
    if (fit & TKV_FIT_CLIP) {
        int64_t least = tkvcu_sum_lanes<Threads>(tkvi_cut_error(u, N, 0, top));
        int best = 0;
        TKVCU_ROLL
        for (k = 1; k < TKVI_FIT_TRIES; k++) {
            const int64_t error = tkvcu_sum_lanes<Threads>(tkvi_cut_error(u, N, k * TKVI_FIT_CUT, top));
            best = error < least ? k : best;
            least = error < least ? error : least;
        }
        if (inverse > 0.0f) tkvi_clip_to(&g, best, &low, &range);
    }
    tkvi_kivi_put(low, range, (float)top, meta, meta + 2, &a, &b);
    TKVCU_UNROLL
    for (i = 0; i < N; i++) code[i] = tkvi_kivi_code(v[i], a, b, (float)top);
    if (fit & (TKV_FIT_NORM | TKV_FIT_UNBIASED)) {
        int sum = 0, squares = 0, products = 0;
        TKVCU_UNROLL
        for (i = 0; i < N; i++) {
            sum += code[i];
            squares += code[i] * code[i];
            products += code[i] * u[i];
        }
        sum = tkvcu_sum_lanes<Threads>(sum);
        squares = tkvcu_sum_lanes<Threads>(squares);
        products = tkvcu_sum_lanes<Threads>(products);
        if (inverse > 0.0f)
            tkvi_moments_of(&g, sum, squares, products, fit & TKV_FIT_UNBIASED, meta, meta + 2);
    }
    *scale = tkvi_load16(meta);
    *zero = tkvi_load16(meta + 2);
}

template <int Dim> TKVCU_DEVICE void tkvcu_encode_kivi_k(tkvcu_transcoder<Dim> *d) {
    const tkvi_side *s = &d->side[1];
    const int channel = tkvcu_thread_index() / TKVCU_CHANNEL_THREADS,
              part = tkvcu_thread_index() % TKVCU_CHANNEL_THREADS;
    float x[TKVCU_THREAD_VALUES];
    uint16_t scale, zero;
    int code[TKVCU_THREAD_VALUES], i;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        x[i] = d->x[(TKVCU_CHANNEL_THREADS * i + part) * tkvcu_transcoder<Dim>::STRIDE + channel];
    tkvcu_encode_kivi_group<TKVCU_CHANNEL_THREADS>(x, s->format->bits, s->fit, code, &scale, &zero);
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        *tkvi_k_code(d->code, channel, TKVCU_CHANNEL_THREADS * i + part) = (uint8_t)code[i];
    if (part == 0) {
        tkvi_store16(d->meta + 2 * channel, scale);
        tkvi_store16(d->meta + 2 * (Dim + channel), zero);
    }
}

template <int Dim> TKVCU_DEVICE void tkvcu_encode_kivi_v(tkvcu_transcoder<Dim> *d) {
    enum { LINE = Dim / TKVCU_THREAD_VALUES, N = TKVI_BLOCK / LINE, GROUPS = Dim / TKVI_BLOCK };
    const tkvi_side *s = &d->side[1];
    const int t = tkvcu_thread_index() / LINE, part = tkvcu_thread_index() % LINE;
    int g, i;
    TKVCU_ROLL
    for (g = 0; g < GROUPS; g++) {
        float x[N];
        uint16_t scale, zero;
        int code[N];
        TKVCU_UNROLL
        for (i = 0; i < N; i++)
            x[i] = d->x[t * tkvcu_transcoder<Dim>::STRIDE + TKVI_BLOCK * g + LINE * i + part];
        tkvcu_encode_kivi_group<LINE>(x, s->format->bits, s->fit, code, &scale, &zero);
        TKVCU_UNROLL
        for (i = 0; i < N; i++) *tkvi_v_code(d->code, TKVI_BLOCK * g + LINE * i + part, t) = (uint8_t)code[i];
        if (part == 0) {
            tkvi_store16(d->meta + 2 * (TKVI_BLOCK * g + t), scale);
            tkvi_store16(d->meta + 2 * (Dim + TKVI_BLOCK * g + t), zero);
        }
    }
}

/* Encodes d->x into a side at dst. All threads call it. The packed codes replace the values in shared memory. */
template <int Dim> TKVCU_DEVICE void tkvcu_encode(tkvcu_transcoder<Dim> *d, int kind, uint8_t *dst) {
    const tkvi_side *s = &d->side[1];
    const int me = tkvcu_thread_index(), all = tkvcu_transcoder<Dim>::THREADS, codes = (int)s->code_bytes;
    int i;
    if (kind == TKVCU_A) tkvcu_encode_a<Dim>(d);
    else if (kind == TKVCU_R) tkvcu_encode_r<Dim>(d);
    else if (s->which == TKV_K) tkvcu_encode_kivi_k<Dim>(d);
    else tkvcu_encode_kivi_v<Dim>(d);
    __syncthreads();
    if (me < Dim) { /* a quarter of a tile each; the tiles cover all bytes of the codes */
        const int tile = me / 4, first = me % 4 * 8;
        int at;
        const int width = tkvcu_find_tile(s, tile, &at);
        if (width) tkvi_pack_part(d->bytes + at, width, d->code[tile], first, first + 8);
    }
    __syncthreads();
    for (i = 16 * me; i < (int)s->bytes; i += 16 * all)
        *(tkvcu_bytes16 *)(void *)(dst + i) =
            *(const tkvcu_bytes16 *)(const void *)(i < codes ? d->bytes + i : d->meta + (i - codes));
    __syncthreads();
}

TKVCU_DEVICE void tkvcu_zero_bytes(uint8_t *dst, size_t n) { /* n: a multiple of 16; dst: aligned to 16 */
    const tkvcu_bytes16 none = {{0, 0}};
    size_t i;
    for (i = (size_t)threadIdx.x * 16; i < n; i += (size_t)blockDim.x * 16)
        *(tkvcu_bytes16 *)(void *)(dst + i) = none;
}

#endif /* TKVCU_ENCODE_H */
/* ======== append.h ======== */
/*
 * append.h - appending new tokens on the device, and the demotions due before it. The rule is that of reclaim/age.h
 * with the length before the append. This file also truncates. All decisions read device memory only, so a graph can
 * be captured once.
 *
 * One thread block works on one row of the batch, KV head and side. All of them see the same state of the sequence,
 * and each demotes its part of the same blocks. A counter in the list gives out tickets. The thread block with the
 * last ticket writes the new state. New rows are stored after the ticket, because no thread of this kernel reads
 * them.
 */
#ifndef TKVCU_APPEND_H
#define TKVCU_APPEND_H


typedef struct tkvcu_layer { /* on the device, for all sequences */
    int32_t version;         /* table version for new blocks */
    int32_t sinks;           /* sink tokens; -1: the layer has no blocks */
} tkvcu_layer;

typedef struct tkvcu_append_call {
    const void *x[2]; /* k, v */
    const int32_t *seq_map;
    const tkvcu_layer *layer;
    uint32_t *flags;
    int32_t type, n_tokens, max_tokens;
    int32_t hot, warm;   /* lengths of the tiers in tokens */
    int32_t same_coding; /* 1: archive and warm have one coding, and blocks are copied */
    int32_t fit, saturate;
} tkvcu_append_call;

/* Added to the ticket by a thread block that found a NaN or an infinity. The lower bits count all thread blocks. */
#define TKVCU_TICKET_REFUSED 0x10000

/* >>demotion */
typedef struct tkvcu_demotion {
    tkvcu_list list; /* state after the demotions so far */
    int32_t sinks, hot, warm, block;
    int32_t from, to; /* regions of the block that is due; -1 before the first */
} tkvcu_demotion;

/* Finds the next block that is due, oldest first, and counts it as demoted. Returns 0 if no block is due. */
__host__ __device__ static inline int tkvcu_next_demotion(tkvcu_demotion *a) {
    tkvcu_list *l = &a->list;
    for (;; a->block++) {
        const int end = a->sinks + TKVI_BLOCK * (a->block + 1), is_warm = a->block < l->archive + l->warm;
        const int age = l->len - end; /* negative: the block is not full */
        const int archive = age - a->hot >= a->warm;
        if (age < a->hot || age < 0) return 0;
        if (is_warm && !archive) {
            a->block = l->archive + l->warm - 1; /* younger warm blocks are not due either */
            continue;
        }
        a->from = is_warm ? TKVCU_WARM : TKVCU_HOT;
        a->to = archive ? TKVCU_ARCHIVE : TKVCU_WARM;
        if (is_warm) l->warm--;
        if (archive) l->archive++;
        else l->warm++;
        a->block++;
        return 1;
    }
}

__host__ __device__ static inline tkvcu_demotion tkvcu_begin_demotion(const tkvcu_list *l, int sinks, int hot,
                                                                      int warm) {
    tkvcu_demotion a;
    a.list = *l;
    a.sinks = sinks;
    a.hot = hot;
    a.warm = warm;
    a.block = l->archive;
    a.from = a.to = -1;
    return a;
}

__host__ __device__ static inline uint8_t *tkvcu_find_block(const tkvcu_view *v, int region, int seq,
                                                            int block) {
    return v->bytes[region] + (size_t)seq * v->stride[region] +
           (size_t)(block % v->ring[region]) * v->block[region];
}

__device__ static inline const tkvcu_side *tkvcu_find_side(const tkvcu_view *v, int version, int region,
                                                           int head, int which) {
    return &v->side[((version * TKVCU_REGIONS + region) * v->n_kv_heads + head) * 2 + which];
}

/* Moves this thread block's side of a block to another region. */
template <int Dim>
TKVCU_DEVICE void tkvcu_demote_side(const tkvcu_view *v, const tkvcu_append_call *c, tkvcu_transcoder<Dim> *d,
                                    int seq, const tkvcu_demotion *a, int block, int head, int which,
                                    int to_version) {
    const int copy = c->same_coding && a->from == TKVCU_WARM;
    const int version =
        a->from == TKVCU_WARM ? v->version[(size_t)seq * (size_t)v->max_blocks + (size_t)block] : 0;
    const tkvcu_side *from = tkvcu_find_side(v, version, a->from, head, which);
    const tkvcu_side *to = tkvcu_find_side(v, copy ? version : to_version, a->to, head, which);
    const uint8_t *src = tkvcu_find_block(v, a->from, seq, block) + from->at;
    uint8_t *whole = tkvcu_find_block(v, a->to, seq, block), *dst = whole + to->at;
    uint32_t i;
    if (copy) {
        for (i = 16 * threadIdx.x; i < to->bytes; i += 16 * blockDim.x)
            *(tkvcu_bytes16 *)(void *)(dst + i) = *(const tkvcu_bytes16 *)(const void *)(src + i);
        __syncthreads();
    } else {
        if (threadIdx.x % 32 == 0 && threadIdx.x < 64) { /* one warp per side */
            const int side = (int)threadIdx.x / 32;
            tkvcu_open_side(v, side ? to : from, which, side ? c->fit : 0, &d->format[side], &d->side[side]);
        }
        __syncthreads();
        tkvcu_decode<Dim>(d, from, src);
        tkvcu_encode<Dim>(d, to->kind, dst);
    }
    /* padding after the last side */
    if (head == v->n_kv_heads - 1 && which)
        tkvcu_zero_bytes(whole + to->at + to->bytes, v->block[a->to] - to->at - to->bytes);
}

/* >>new tokens */
typedef struct tkvcu_row_target { /* this thread block's side in the first block of a region */
    uint8_t *base;
    uint32_t bytes;
    int32_t bf16;
} tkvcu_row_target;

TKVCU_DEVICE tkvcu_row_target tkvcu_find_row_target(const tkvcu_view *v, int region, int head, int which) {
    const tkvcu_side *s = tkvcu_find_side(v, 0, region, head, which);
    tkvcu_row_target r;
    r.base = v->bytes[region] + s->at;
    r.bytes = s->bytes;
    r.bf16 = s->bf16;
    return r;
}

template <int Dim>
TKVCU_DEVICE void tkvcu_store_rows(const tkvcu_view *v, const tkvcu_append_call *c,
                                   const tkvcu_row_target &hot, const tkvcu_row_target &sinks, int seq,
                                   int row, int len, int head, int which) {
    uint8_t *const hot_base = hot.base + (size_t)seq * v->stride[TKVCU_HOT];
    uint8_t *const sinks_base = sinks.base + (size_t)seq * v->stride[TKVCU_SINKS];
    const int stride = v->n_kv_heads * Dim;
    const ptrdiff_t first = ((ptrdiff_t)row * c->n_tokens * v->n_kv_heads + head) * Dim;
    const int next = len < v->sinks ? 0 : len - v->sinks; /* position after the sinks */
    const int new_block = (next + TKVI_BLOCK - 1) / TKVI_BLOCK;
    int i;
    /* Clears blocks that begin here, as the host does. One call adds at most 64 tokens, so at most one hot block
     * begins. */
    if (len == 0 && v->sinks > 0) tkvcu_zero_bytes(sinks_base, sinks.bytes);
    if (len + c->n_tokens > v->sinks + TKVI_BLOCK * new_block)
        tkvcu_zero_bytes(hot_base + (size_t)(new_block % v->ring[TKVCU_HOT]) * v->block[TKVCU_HOT],
                         hot.bytes);
    __syncthreads();
    TKVCU_ROLL
    for (i = (int)threadIdx.x; i < c->n_tokens * Dim; i += (int)blockDim.x) {
        const int position = len + i / Dim, after_sinks = position - v->sinks, is_hot = after_sinks >= 0;
        const int place = is_hot ? after_sinks % TKVI_BLOCK : position;
        uint8_t *bytes =
            is_hot ? hot_base + (size_t)(after_sinks / TKVI_BLOCK % v->ring[TKVCU_HOT]) * v->block[TKVCU_HOT]
                   : sinks_base;
        const ptrdiff_t at = first + (ptrdiff_t)(i / Dim) * stride + i % Dim;
        float x = tkvcu_load_element(which ? c->x[1] : c->x[0], c->type, (size_t)at);
        if (c->saturate) x = tkvi_saturate(x);
        *(uint16_t *)(void *)(bytes + 2 * (place * Dim + i % Dim)) =
            (is_hot ? hot.bf16 : sinks.bf16) ? tkvi_f32_to_bf16(x) : tkvi_f32_to_f16(x);
    }
}

/* Tells whether this thread block's new values contain a NaN or an infinity. */
template <int Dim>
TKVCU_DEVICE int tkvcu_has_nonfinite(const tkvcu_view *v, const tkvcu_append_call *c, int row, int head,
                                     int which) {
    const int stride = v->n_kv_heads * Dim;
    const ptrdiff_t first = ((ptrdiff_t)row * c->n_tokens * v->n_kv_heads + head) * Dim;
    int i, bad = 0;
    TKVCU_ROLL
    for (i = (int)threadIdx.x; i < c->n_tokens * Dim; i += (int)blockDim.x)
        bad |= !tkvi_is_finite(tkvcu_load_element(which ? c->x[1] : c->x[0], c->type,
                                                  (size_t)(first + (ptrdiff_t)(i / Dim) * stride + i % Dim)));
    return __syncthreads_or(bad);
}

/* Returns the sequence of a row; -1 if the row is skipped. */
__device__ static inline int tkvcu_find_seq(const int32_t *map, int row, int n_seqs, uint32_t *flags) {
    const int seq = map ? map[row] : row;
    if (seq < n_seqs) return seq < 0 ? -1 : seq;
    if (threadIdx.x == 0) atomicOr(flags, TKVCU_FLAG_SEQUENCE);
    return -1;
}

/* Writes the new state. `list` is the state before the append. */
TKVCU_DEVICE void tkvcu_commit_append(const tkvcu_view *v, const tkvcu_append_call *c, int seq,
                                      tkvcu_list list, int refused) {
    tkvcu_demotion a = tkvcu_begin_demotion(&list, v->sinks, c->hot, c->warm);
    while (tkvcu_next_demotion(&a))
        if (!c->same_coding || a.from != TKVCU_WARM)
            v->version[(size_t)seq * (size_t)v->max_blocks + (size_t)(a.block - 1)] =
                (uint8_t)c->layer->version;
    if (!refused) a.list.len += c->n_tokens;
    a.list.tickets = 0;
    v->list[seq] = a.list;
}

template <int Dim>
__global__ void __launch_bounds__(tkvcu_transcoder<Dim>::THREADS)
    tkvcu_append_kernel(tkvcu_view v, tkvcu_append_call c) {
    TKVCU_SHARED(tkvcu_transcoder<Dim>, d);
    const int head = (int)blockIdx.x / 2, which = (int)blockIdx.x % 2, row = (int)blockIdx.y;
    tkvcu_row_target hot = tkvcu_find_row_target(
        &v, TKVCU_HOT, head, which); /* these loads do not depend on others: issued first */
    tkvcu_row_target sinks = tkvcu_find_row_target(&v, TKVCU_SINKS, head, which);
    const int seq = tkvcu_find_seq(c.seq_map, row, v.n_seqs, c.flags);
    tkvcu_list list;
    tkvcu_demotion a;
    int bad = 0;
    if (seq < 0) return;
    list = v.list[seq];
    if (!c.saturate) bad = tkvcu_has_nonfinite<Dim>(&v, &c, row, head, which);
    if (list.len > c.max_tokens - c.n_tokens) {
        if (threadIdx.x == 0) atomicOr(c.flags, TKVCU_FLAG_FULL);
        return;
    }
    a = tkvcu_begin_demotion(&list, v.sinks, c.hot, c.warm);
    if (tkvcu_next_demotion(&a)) {
        do tkvcu_demote_side<Dim>(&v, &c, d, seq, &a, a.block - 1, head, which, c.layer->version);
        while (tkvcu_next_demotion(&a));
        hot = tkvcu_find_row_target(&v, TKVCU_HOT, head, which); /* reloaded: demotion needs all registers */
        sinks = tkvcu_find_row_target(&v, TKVCU_SINKS, head, which);
    }
    __syncthreads(); /* all threads have read the state; it may change now */
    if (threadIdx.x == 0) {
        const int ticket = bad ? 1 + TKVCU_TICKET_REFUSED : 1;
        int done;
        __threadfence();
        done = atomicAdd(&v.list[seq].tickets, ticket) + ticket;
        if (bad) atomicOr(c.flags, TKVCU_FLAG_NONFINITE);
        if (done % TKVCU_TICKET_REFUSED == (int)gridDim.x) {
            __threadfence();
            tkvcu_commit_append(&v, &c, seq, list, done / TKVCU_TICKET_REFUSED);
        }
    }
    if (!bad) tkvcu_store_rows<Dim>(&v, &c, hot, sinks, seq, row, list.len, head, which);
}

/* The kernel of a head_dim with its threads and its shared memory. */
typedef struct tkvcu_append_launch {
    void (*kernel)(tkvcu_view v, tkvcu_append_call c);
    int threads;
    size_t shared;
} tkvcu_append_launch;

static tkvcu_append_launch tkvcu_select_append_kernel(int head_dim) {
    static const tkvcu_append_launch all[2] = {
        {tkvcu_append_kernel<64>, tkvcu_transcoder<64>::THREADS, sizeof(tkvcu_transcoder<64>)},
        {tkvcu_append_kernel<128>, tkvcu_transcoder<128>::THREADS, sizeof(tkvcu_transcoder<128>)}};
    return all[head_dim == 128];
}

/* >>truncation */
#define TKVCU_TRUNCATE_THREADS 128

/* Truncates one sequence per thread, in all of its layers or in none. */
__global__ void __launch_bounds__(TKVCU_TRUNCATE_THREADS)
    tkvcu_truncate_kernel(const tkvcu_layer *layer, tkvcu_list *lists, int n_layers, int n_seqs,
                          const int32_t *lengths, uint32_t *flags) {
    const int seq = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int i, n;
    if (seq >= n_seqs) return;
    n = lengths[seq];
    for (i = 0; i < n_layers && n > 0; i++) {
        const tkvcu_list *l = &lists[(size_t)i * (size_t)n_seqs + (size_t)seq];
        const int coded = l->archive + l->warm;
        if (layer[i].sinks < 0 || n >= l->len || coded == 0) continue;
        if (n < layer[i].sinks + TKVI_BLOCK * coded) {
            atomicOr(flags, TKVCU_FLAG_INEXACT);
            return;
        }
    }
    for (i = 0; i < n_layers && n >= 0; i++) {
        tkvcu_list *l = &lists[(size_t)i * (size_t)n_seqs + (size_t)seq];
        if (layer[i].sinks < 0 || n >= l->len) continue;
        l->len = n;
        if (n == 0) l->archive = l->warm = 0;
    }
}

#endif /* TKVCU_APPEND_H */
/* ======== unpack.h ======== */
/*
 * unpack.h - from the codes of a tile (core/tile.h) to the first operand of a warp's byte product: 16 rows, 32 k.
 *
 * A tile is vectors of 64 bytes. Each byte of a vector holds fields of one or more planes. A 32-bit word is four bytes,
 * the reduced indices r of core/tile.h. Lane 4 g + t loads words 2 g and 2 g + 1 of tile t. Masks and shifts extract
 * the four codes of a plane.
 *
 *     K: tile = 4 channels, word = token of a slab, plane = slab of 16 tokens.  Rows are tokens, k are channels.
 *     V: tile = 16 tokens, word = channel, plane and byte = token.              Rows are channels, k are tokens.
 *
 *     row g = word 2 g, row g + 8 = word 2 g + 1;   k = 4 t .. 4 t + 3: bytes of tile t;   k + 16: next slab (K),
 *     next plane (V)
 *
 * The last vector of an odd width has only 32 bytes. Its fields are those of bytes j and j + 32. So lanes g and g + 4
 * load the same words, and shift the fields of half g / 4 to fixed bits.
 *
 * Codes stay multiplied by 2^(bit of their field), the bit that needs the fewest instructions. K has a sum per
 * plane, which is divided by this factor at the end. V has one sum for all planes, so the weights of a plane's tokens
 * are divided by the factor. This costs bits of the weights. V uses only bits 0 .. 3.
 *
 *     byte, 2 bits:  3 3 2 2 1 1 0 0      & 0x03 = code of plane 0, & 0x0c = 4 times the code of plane 1
 */
#ifndef TKVCU_UNPACK_H
#define TKVCU_UNPACK_H


struct alignas(16) tkvcu_u32x4 {
    uint32_t x, y, z, w;
};

/* Swizzle: returns the place of byte `at` of a side in its slot of shared memory. The 32-byte quarters of a
 * 128-byte line are permuted by the line's number. The 16 lanes that are served together read one quarter of each of
 * four tiles. Lanes that read different words of a bank wait for each other. Words of a bank, at most, by width:
 *
 *                      1   2   3   4   5   6   8
 *     swizzled         1   1   3   1   4   2   2       (on average over slabs: 2.5 with 3 bits, 3 with 5 bits)
 *     not swizzled     1   2   1   4   1   2   4
 *
 * No permutation that repeats every four lines is best for all widths. A V side has one width, and is not swizzled if
 * that is odd. A K side may have all widths, and is always swizzled. So conflicts remain in K with 3 and 5 bits, and
 * with 6 and 8 bits. */
TKVCU_DEVICE uint32_t tkvcu_swizzle(uint32_t at) { return at ^ (at >> 2 & 0x60u); }

TKVCU_DEVICE tkvcu_u32x2 tkvcu_load_u32x2(const uint8_t *slot, uint32_t place) {
    return *(const tkvcu_u32x2 *)(const void *)(slot + place);
}

TKVCU_DEVICE uint32_t tkvcu_load_u32(const uint8_t *slot, uint32_t place) {
    return *(const uint32_t *)(const void *)(slot + place);
}

/* A lane's words of a tile. */
template <int W> struct tkvcu_tile {
    enum { vectors = (W + 1) / 2 };
    uint32_t word[vectors][2];
    int half; /* whose fields the lane takes from the last vector of an odd width */
};

/* Tells whether vector v has only 32 bytes. */
TKVCU_DEVICE constexpr bool tkvcu_is_half(int width, int v) { return width % 2 && v == width / 2; }

/* Returns the offset of the lane's words in tile 0. */
TKVCU_DEVICE uint32_t tkvcu_find_words(int width, int v, int g) {
    return (uint32_t)(64 * v + 8 * (tkvcu_is_half(width, v) ? g % 4 : g));
}

/* Sets the words of vector v. The lane's fields of 1 bit move to bits 0 .. 3, of the top bits of 5 to bits 4 .. 7. */
template <int W>
TKVCU_DEVICE void tkvcu_set_words(tkvcu_tile<W> &x, int v, const tkvcu_u32x2 &words, int half) {
    const int moved = W != 3 && tkvcu_is_half(W, v);
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const uint32_t y = i ? words.y : words.x;
        x.word[v][i] = !moved ? y : W == 1 ? y >> 4 * half : y << (4 - 4 * half);
    }
    x.half = half;
}

/* Moves a field of each byte from bit From + Step * half to bit To, and clears the other bits. */
template <int From, int Bits, int To, int Step = 0>
TKVCU_DEVICE uint32_t tkvcu_move_field(uint32_t x, int half = 0) {
    constexpr uint32_t mask = ((1u << Bits) - 1u) * 0x01010101u << To;
    static_assert(From >= To || To - From >= Step, "one direction");
    if constexpr (From >= To) return x >> (From - To + Step * half) & mask;
    else return x << (To - From - Step * half) & mask;
}

/* Returns the codes of plane P in word i, multiplied by 2^B. */
template <int W, int P, int B> TKVCU_DEVICE uint32_t tkvcu_take_plane(const tkvcu_tile<W> &x, int i) {
    if constexpr (W == 8) {
        return x.word[P][i];
    } else if constexpr (W >= 4) {
        const uint32_t low = tkvcu_move_field<P % 2 * 4, 4, B>(x.word[P / 2][i]);
        if constexpr (W == 5) return low | tkvcu_move_field<4 + P, 1, B + 4>(x.word[2][i]);
        else if constexpr (W == 6) return low | tkvcu_move_field<2 * P, 2, B + 4>(x.word[2][i]);
        else return low;
    } else if constexpr (W == 3) {
        if constexpr (P < 2) return tkvcu_move_field<3 * P, 3, B>(x.word[0][i]);
        else if constexpr (P == 2) return tkvcu_move_field<0, 3, B, 3>(x.word[1][i], x.half);
        else
            return tkvcu_move_field<6, 2, B>(x.word[0][i]) |
                   tkvcu_move_field<6, 1, B + 2, 1>(x.word[1][i], x.half);
    } else {
        return tkvcu_move_field<W * P, W, B>(x.word[0][i]);
    }
}

/* >>K. Returns the bit of plane p's codes. */
TKVCU_DEVICE constexpr int tkvcu_k_bit(int width, int p) {
    return width == 8   ? 0
           : width == 6 ? p % 2 * 2
           : width == 5 ? p % 2 * 3
           : width == 4 ? p % 2 * 4
           : width == 3 ? (p == 3 ? 5 : 2 * p)
                        : 2 * p;
}

/* A lane's cursor over slabs, two at a time. `codes` is the shared address of the codes, a multiple of 128. Slabs
 * begin at a multiple of 128, too: `from` is the first one's. */
template <int W> struct tkvcu_cursor { tkvcu_address vector[2][tkvcu_tile<W>::vectors]; };

template <int W>
TKVCU_DEVICE void tkvcu_start_cursor(tkvcu_cursor<W> &x, tkvcu_address codes, uint32_t from, int g, int t) {
    int v;
    if (W > 4) t = tkvcu_keep_in_register(t); /* rarely used: saves a register */
    from += (uint32_t)(TKVI_TILE_BYTES(W) * t);
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++) {
        const uint32_t at = from + tkvcu_find_words(W, v, g);
        x.vector[0][v] = codes + tkvcu_swizzle(at);
        /* the swizzle repeats every 512 bytes, and changes by 64 after 256 */
        if (W % 2) x.vector[1][v] = codes + tkvcu_swizzle(at + 128 * W);
        else x.vector[1][v] = (x.vector[0][v] ^ (W % 4 * 32u)) + 128 * W;
    }
}

/* Loads the lane's words of slab s (0 or 1) of the two. */
template <int W>
TKVCU_DEVICE void tkvcu_load_tile(tkvcu_tile<W> &x, const tkvcu_cursor<W> &from, int s, int half) {
    int v;
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++)
        tkvcu_set_words(x, v, tkvcu_load_shared_u32x2(from.vector[s][v]), half);
}

template <int W> TKVCU_DEVICE void tkvcu_advance_cursor(tkvcu_cursor<W> &x) {
    int s, v;
    TKVCU_UNROLL
    for (s = 0; s < 2; s++) TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++)
        x.vector[s][v] = (x.vector[s][v] ^ (W % 2 * 64u)) + 256 * W;
}

/* >>V. Returns the bit of plane p's codes. */
TKVCU_DEVICE constexpr int tkvcu_v_bit(int width, int p) {
    return width == 1 ? p : width == 2 ? p % 2 * 2 : width == 3 && p == 1 ? 3 : 0;
}

template <int W> TKVCU_DEVICE void tkvcu_take_planes(const tkvcu_tile<W> &x, int i, uint32_t plane[4]) {
    plane[0] = tkvcu_take_plane<W, 0, tkvcu_v_bit(W, 0)>(x, i);
    plane[1] = tkvcu_take_plane<W, 1, tkvcu_v_bit(W, 1)>(x, i);
    plane[2] = tkvcu_take_plane<W, 2, tkvcu_v_bit(W, 2)>(x, i);
    plane[3] = tkvcu_take_plane<W, 3, tkvcu_v_bit(W, 3)>(x, i);
}

/* Shared addresses: the codes of V, and a lane's words in slab 0 with 2 and 4 bits. */
struct tkvcu_v_addresses {
    tkvcu_address codes, narrow, wide;
};

TKVCU_DEVICE tkvcu_v_addresses tkvcu_find_v_addresses(tkvcu_address codes, int g, int t) {
    tkvcu_v_addresses x;
    x.codes = codes;
    x.narrow = codes + tkvcu_swizzle((uint32_t)(64 * t + 8 * g));
    x.wide = codes + tkvcu_swizzle((uint32_t)(128 * t + 8 * g));
    return x;
}

/* Shared addresses of a lane's words in slab 0: of the first vector, and of the 32-byte one of an odd width. */
struct tkvcu_v_path {
    tkvcu_address first, half;
};

template <int W> TKVCU_DEVICE tkvcu_v_path tkvcu_find_v_path(const tkvcu_v_addresses &from, int g, int t) {
    tkvcu_v_path x = {0, 0};
    if (W == 2) {
        x.first = from.narrow;
    } else if (W == 4) {
        x.first = from.wide;
    } else {
        const uint32_t at = (uint32_t)(tkvcu_keep_in_register(t) * TKVI_TILE_BYTES(W));
        x.first = from.codes + (W % 2 ? at + 8 * (uint32_t)g : tkvcu_swizzle(at + 8 * (uint32_t)g));
        x.half = from.codes + at + tkvcu_find_words(W, W / 2, g);
    }
    return x;
}

/* Loads the lane's words of slab k of V. A tile of 8 bits has two lines, the first with an even number. */
template <int W>
TKVCU_DEVICE void tkvcu_load_v_tile(tkvcu_tile<W> &x, const tkvcu_v_path &from, int k, int half) {
    int v;
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++) {
        const tkvcu_address place = tkvcu_is_half(W, v) ? from.half
                                    : W == 2            ? from.first ^ (k % 2 * 64u)
                                             : (from.first ^ (v % 2 * 64u + v / 2 * 32u)) + v / 2 * 128u;
        tkvcu_set_words(x, v, tkvcu_load_shared_u32x2(place + (tkvcu_address)(k * 128 * W)), half);
    }
}

/* >>pairs. R formats with a 3-bit code for two channels (formats/r.h). A table of bytes maps the code to the
 * coordinates of a point, in units of 1/64. Two planes are looked up at a time: their codes are the nibbles of a
 * byte. */
#define TKVCU_PAIR_UNIT 0.015625f

TKVCU_DEVICE tkvcu_u32x2 tkvcu_get_pair_table(int second) {
    tkvcu_u32x2 x;
    x.x = second ? 0xb24ee51bu : 0x4eb2e51bu;
    x.y = second ? 0xe081207fu : 0x81e07f20u;
    return x;
}

/* Returns the codes of planes P and P + 1 (P is 0 or 2) of word i, as nibbles of the bytes. */
template <int P> TKVCU_DEVICE uint32_t tkvcu_merge_pair_codes(const tkvcu_tile<3> &x, int i) {
    return tkvcu_take_plane<3, P, 0>(x, i) | tkvcu_take_plane<3, P + 1, 4>(x, i);
}

/* Looks up the first or second channels of the pairs, as a first operand. Its k are byte 0 of both planes, byte
 * 1 of both, and after 16 bytes 2 and 3. tkvcu_reorder_pair_weights permutes a second operand, ordered plane by
 * plane, to match. */
TKVCU_DEVICE void tkvcu_look_up_pairs(const uint32_t code[2], tkvcu_u32x2 points, uint32_t a[4]) {
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        a[i] = tkvcu_prmt(points.x, points.y, code[i]);
        a[2 + i] = tkvcu_prmt(points.x, points.y, code[i] >> 16);
    }
}

TKVCU_DEVICE void tkvcu_reorder_pair_weights(const uint32_t b[2], uint32_t reordered[2]) {
    reordered[0] = tkvcu_prmt(b[0], b[1], 0x5140);
    reordered[1] = tkvcu_prmt(b[0], b[1], 0x7362);
}

#endif /* TKVCU_UNPACK_H */
/* ======== attend.h ======== */
/*
 * attend.h - decode attention on the coded tiers: split-KV, one pass over the bytes, one online softmax.
 *
 * Keys are cut into key tiles: a coded block of 64 tokens, or 16 tokens of an exact block (about as many bytes). The
 * key tiles of one (entry of the batch, KV head) form three sections: archive, warm, exact. The key tiles of all
 * entries and heads form one list, which is cut into equal ranges, one per thread block. The grid never changes, so a
 * captured launch is valid at any length. The warps of a thread block take key tiles in turn. At the end of a section
 * they add up their partial results and write them to a slot of the workspace. slot = thread block + section, which
 * is unique. combine.h merges the slots in order. No atomics are used, so the bits are the same each time.
 *
 *     key tiles      |  e0 h0: archive   warm  exact |  e0 h1: archive      warm  exact | ...
 *     thread blocks  |    0    |    1    |    2    |    3    |  ...
 *
 * Each warp of a thread block:
 *
 *     global --cp.async--> two slots of shared memory, for a K side and a V side
 *     K: q * scale of the channel -> 16-bit integer = two int8 limbs; S = codes * q     tokens x columns, bytes
 *        A: the outlier's score is its row * q, and replaces that of its codes (formats/a.h)
 *     softmax of the key tile; the running maximum moves only if it grows by more than 4 (in log2)
 *     V: weight * scale of the token -> two limbs, through shared memory into the order of the second operand;
 *        O += codes * P                                                                 channels x columns, bytes
 *
 * Columns are the queries of the query heads that share a KV head. A column takes two columns of an MMA product, one
 * per limb. So an n-tile of 8 has 4 columns, and a thread block works on NT n-tiles. Sums of byte products are exact.
 * Only q and P are rounded, to 16 bits relative to the largest of the key tile.
 */
#ifndef TKVCU_ATTEND_H
#define TKVCU_ATTEND_H


#define TKVCU_WARPS 4 /* of a thread block */
#define TKVCU_THREADS (32 * TKVCU_WARPS)
#define TKVCU_SLOTS 2             /* of a warp */
#define TKVCU_SECTIONS 3          /* archive, warm, exact */
#define TKVCU_MASKED_LOGIT -1e30f /* logit of a masked key; below TKVCU_INITIAL_MAX */
#define TKVCU_INITIAL_MAX -1e29f
#define TKVCU_LEAST_SUM (-1e20f) /* below all sums; its logit is still finite */
#define TKVCU_LOG2E 1.44269504f

/* tools/cuda_resources.py counts the instructions of a key tile. It replaces both macros: sides become
 * constants, and rare branches go. */
#ifndef TKVCU_SIDE
#define TKVCU_SIDE(b, i) (b).side[i]
#define TKVCU_UNLIKELY(x) (x)
#endif

typedef struct tkvcu_job { /* a call, as kernels see it */
    tkvcu_view view;
    const void *q;
    void *out;
    float *lse;
    const float *sink_logits; /* [n_heads]; NULL: none */
    const int32_t *entries;   /* sequence of each entry; NULL: 0, 1, ...; negative: skipped */
    uint32_t *flags;
    float *partial;                                 /* workspace */
    int type, n_entries, n_queries, window, blocks; /* blocks: gridDim.x of the attention kernel */
    float scale, softcap;
    int slot_bytes; /* of a slot of a warp */
} tkvcu_job;

/* >>key tiles of an entry */
typedef struct tkvcu_visible { /* key tiles of one KV head that the queries of an entry can see */
    int first_block;           /* first visible coded block */
    int key_tiles[TKVCU_SECTIONS];
    int sink_tiles; /* exact key tiles of the sinks */
    int len, seq;
} tkvcu_visible;

TKVCU_DEVICE int tkvcu_div_up(int a, int b) { return (a + b - 1) / b; }

TKVCU_DEVICE tkvcu_visible tkvcu_find_visible(const tkvcu_job &j, int entry) {
    tkvcu_visible r;
    tkvcu_list list;
    int coded, hot, from_block;
    r.seq = j.entries ? j.entries[entry] : entry;
    if (r.seq < 0 || r.seq >= j.view.n_seqs) {
        memset(&r, 0, sizeof r);
        r.seq = -1;
        return r;
    }
    list = j.view.list[r.seq];
    coded = list.archive + list.warm;
    r.len = list.len;
    r.sink_tiles = tkvcu_div_up(list.len < j.view.sinks ? list.len : j.view.sinks, 16);
    r.first_block = 0;
    if (j.window) { /* positions that the oldest query cannot see */
        const int n_unseen = list.len - j.n_queries - j.window + 1;
        if (n_unseen > j.view.sinks) r.first_block = (n_unseen - j.view.sinks) / 64;
        if (n_unseen >= j.view.sinks) r.sink_tiles = 0;
    }
    r.key_tiles[0] = list.archive > r.first_block ? list.archive - r.first_block : 0;
    from_block = r.first_block > list.archive ? r.first_block : list.archive;
    r.key_tiles[1] = coded > from_block ? coded - from_block : 0;
    from_block = r.first_block > coded ? r.first_block : coded;
    hot = list.len - j.view.sinks - 64 * from_block;
    r.key_tiles[2] = r.sink_tiles + (hot > 0 ? tkvcu_div_up(hot, 16) : 0);
    return r;
}

/* Returns the key tiles of one section. An index known only at run time would move the array out of registers. */
TKVCU_DEVICE int tkvcu_n_key_tiles_in(const tkvcu_visible &r, int section) {
    return section == 0 ? r.key_tiles[0] : section == 1 ? r.key_tiles[1] : r.key_tiles[2];
}

/* Thread blocks divide a list of places. A key tile has one. A section has some more before its first key tile, as its
 * start takes as long as so many key tiles: queries are prepared, and partial results are written. So a thread block
 * with several sections gets fewer key tiles. 8 was the fastest of 0, 4 and 8 (bench/GPU.md). */
#ifndef TKVCU_START_PLACES
#define TKVCU_START_PLACES 8
#endif

#define TKVCU_MAX_GRID 1024        /* most thread blocks of a grid that the workspace allows */
#define TKVCU_FEW_PLACES (1 << 21) /* times TKVCU_MAX_GRID they fit 32 bits */

TKVCU_DEVICE int tkvcu_n_places_in(const tkvcu_visible &r, int section) {
    const int n = tkvcu_n_key_tiles_in(r, section);
    return n > 0 ? n + TKVCU_START_PLACES : 0;
}

TKVCU_DEVICE int tkvcu_n_places(const tkvcu_visible &r) {
    return tkvcu_n_places_in(r, 0) + tkvcu_n_places_in(r, 1) + tkvcu_n_places_in(r, 2);
}

/* Returns the first place of a thread block. If there are more thread blocks than places, the last ones have none. A
 * division of 64 bits takes some 100 instructions. */
TKVCU_DEVICE int tkvcu_find_first_place(int places, int blocks, int block) {
    const int working = places < blocks ? places : blocks;
    if (block >= working) return places;
    if (places < TKVCU_FEW_PLACES) return (int)((uint32_t)places * (uint32_t)block / (uint32_t)working);
    return (int)((int64_t)places * block / working);
}

/* Returns the thread block that works on a place: the inverse of tkvcu_find_first_place. */
TKVCU_DEVICE int tkvcu_find_worker(int places, int working, int place) {
    if (places < TKVCU_FEW_PLACES)
        return (int)(((uint32_t)(place + 1) * (uint32_t)working - 1u) / (uint32_t)places);
    return (int)((((int64_t)place + 1) * working - 1) / places);
}

/* Decodes a logarithmic scale, as tkvi_log_value. `mantissa` holds the bits of 2^(k / 16) in shared memory,
 * where lanes can read different entries. It also saves the register for the address of the header's table. */
TKVCU_DEVICE float tkvcu_decode_log(uint32_t code, int top, const uint32_t *mantissa) {
    const uint32_t i = code - 1u;
    if (code == 0) return 0.0f;
    return tkvi_from_bits(mantissa[i & 15u] + ((uint32_t)(top - 16 + (int)(i >> 4)) << 23));
}

/* >>state of a thread block and of a warp */
struct alignas(16) tkvcu_f32x4 {
    float x[4];
};

struct alignas(8) tkvcu_f32x2 {
    float x, y;
};

/* The work of a thread block: a section of one KV head of one entry, and in it a key range whose key tiles have
 * one region and one table version. It is in shared memory, because registers hold sums. */
struct tkvcu_task {
    tkvcu_visible visible;
    int entry, head, section;
    int tile, left;       /* next key tile in the section; key tiles left in it */
    int region, first, n; /* key range: region, first key tile, number */
    int ring_tile;        /* place of the first key tile in the region's ring, in key tiles */
    /* the head's sides. Coded: 2048 bytes after the first one's start. Exact: in place 0 of the region */
    const uint8_t *from[2];
    int codes[2], meta[2];      /* bytes of a coded side */
    int swizzled;               /* V: the codes are copied to swizzled places (unpack.h) */
    uint32_t block;             /* bytes from place to place */
    int group, columns, column; /* query heads per KV head; all columns; first column here */
    int next_place, end_place;  /* in the list of all places */
};

/* Queries are scaled by powers of two. In q, the largest product with a scale is 1 to 2, so columns can share one
 * integer unit. In q16, the largest value is 1 to 2. */
template <int D, int NT> struct tkvcu_attend_shared {
    tkvcu_task task;
    /* even and odd tiles of 4 channels, in the order of the key range: see tkvcu_find_q_index */
    tkvcu_f32x4 q[2][D / 8 * NT * 4];
    tkvcu_f32x4 q_max[D / 4]; /* largest |q| of all columns, per channel */
    /* second operands of 16-bit products: high and low limbs of the queries */
    tkvcu_u32x2 q16[D / 16][NT][32];
    /* A: second operands of products with the outlier's row: limbs of the queries (tkvcu_score_outlier) */
    tkvcu_u32x4 q_row[D / 64][NT][32];
    float q16_ratio[4 * NT];      /* unit of q16 / unit of q */
    float least_product;          /* lower bound of the largest product of q with a scale */
    float logit_scale[4 * NT];    /* product with q -> logit; with softcap: -> argument of tanh */
    float mean[4 * NT];           /* q * static means of keys */
    float k_log[256], v_log[256]; /* scales of A (K) and R (V) by their code byte */
    uint32_t mantissa[16];
    uint32_t max_codes[D / 4];  /* A: four bytes of the largest code, by tile */
    int scratch[TKVCU_THREADS]; /* for reductions of all threads */
    tkvcu_side side[2];         /* K and V side of the key range */
};

template <int NT> struct tkvcu_softmax { /* online softmax of a warp, for column t */
    float m[NT], l[NT];                  /* maximum; sum over this lane's tokens */
};

template <int D, int NT, int VG> struct tkvcu_partials {
    tkvcu_softmax<NT> soft;
    float o[D / 16][NT][2]; /* channels x columns */
    /* equal for all channels of a group (zero points, middles); sum over this lane's tokens */
    float zero[VG][NT];
};

/* A slot of a coded side: the metadata, then from TKVCU_META the codes. tkvcu_swizzle gives their places. V sides of
 * odd width are not swizzled. */
#define TKVCU_META(D) (4 * (D)) /* KIVI, the largest */

struct tkvcu_lane {
    int warp, lane, g, t;
    int meta_at, codes_at;      /* targets of the lane's first copies in a slot: metadata, swizzled codes */
    uint8_t *slot[TKVCU_SLOTS]; /* K side, V side */
    tkvcu_address k_codes;
    tkvcu_v_addresses v_at;
    /* K: scales [D] and limbs of the queries; V: scales and zeros [groups][64] and weights */
    uint8_t *work;
};

#define TKVCU_WEIGHTS_ROW 160 /* 64 16-bit weights, padded: columns begin in different banks */
/* Bytes of `work` per warp. */
#define TKVCU_WORK(D, NT, groups)                                                                            \
    (4 * (D) + 8 * (D) * (NT) > (512 + 4 * TKVCU_WEIGHTS_ROW * (NT)) * (groups)                              \
         ? 4 * (D) + 8 * (D) * (NT)                                                                          \
         : (512 + 4 * TKVCU_WEIGHTS_ROW * (NT)) * (groups))

template <int D> TKVCU_DEVICE tkvcu_lane tkvcu_make_lane(uint8_t *warps, int warp_bytes, int slot_bytes) {
    const int tid = (int)threadIdx.x;
    tkvcu_lane me;
    int at;
    me.lane = tkvcu_keep_in_register(tid % 32);
    me.meta_at = tkvcu_keep_in_register(tid % 32 * 16);
    me.codes_at = tkvcu_keep_in_register(TKVCU_META(D) + (int)tkvcu_swizzle(16u * (uint32_t)(tid % 32)));
    me.warp = tid / 32;
    me.g = tkvcu_keep_in_register(tid % 32 / 4);
    me.t = tkvcu_keep_in_register(tid % 4);
    at = me.warp * warp_bytes;
    me.slot[0] = warps + at;
    me.slot[1] = warps + at + slot_bytes;
    me.work = warps + tkvcu_keep_in_register(at + TKVCU_SLOTS * slot_bytes);
    me.k_codes = tkvcu_shared_address(me.slot[0]) + TKVCU_META(D);
    me.v_at = tkvcu_find_v_addresses(tkvcu_shared_address(me.slot[1]) + TKVCU_META(D), me.g, me.t);
    me.v_at.narrow = tkvcu_keep_in_register(me.v_at.narrow);
    me.v_at.wide = tkvcu_keep_in_register(me.v_at.wide);
    return me;
}

template <int D, int NT, int VG> TKVCU_DEVICE void tkvcu_clear_partials(tkvcu_partials<D, NT, VG> &u) {
    int nt, i, c;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        TKVCU_UNROLL
        for (c = 0; c < D / 16; c++) TKVCU_UNROLL
        for (i = 0; i < 2; i++) u.o[c][nt][i] = 0.0f;
        u.soft.m[nt] = TKVCU_INITIAL_MAX;
        u.soft.l[nt] = 0.0f;
        TKVCU_UNROLL
        for (c = 0; c < VG; c++) u.zero[c][nt] = 0.0f;
    }
}

/* Hides the origin of x. The compiler then computes values derived from it here, not before a loop that lacks
 * registers. */
TKVCU_DEVICE int tkvcu_block_hoisting(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* >>loading */
/* Starts the copy of a coded side. `middle` is 2048 bytes after the side's start. */
template <int D>
TKVCU_DEVICE void tkvcu_load_side(uint8_t *slot, const uint8_t *middle, int codes, int meta, int swizzled,
                                  const tkvcu_lane &me) {
    const int left = codes - me.meta_at;
    int k;
    middle = tkvcu_advance(middle, me.meta_at, 1);
    tkvcu_cp_async16_if<0>(slot + me.meta_at, tkvcu_advance(middle, codes, 1), meta - me.meta_at);
    slot += swizzled ? me.codes_at : TKVCU_META(D) + me.meta_at;
    tkvcu_cp_async16_if<0>(slot, middle, left); /* up to 4 bits per value */
    tkvcu_cp_async16_if<512>(slot, middle, left);
    tkvcu_cp_async16_if<1024>(slot, middle, left);
    tkvcu_cp_async16_if<1536>(slot, middle, left);
    if (D == 128) {
        tkvcu_cp_async16_if<2048>(slot, middle, left);
        tkvcu_cp_async16_if<2560>(slot, middle, left);
        tkvcu_cp_async16_if<3072>(slot, middle, left);
        tkvcu_cp_async16_if<3584>(slot, middle, left);
    }
    TKVCU_ROLL
    for (k = 32 * D; TKVCU_UNLIKELY(codes > k); k += 512)
        tkvcu_cp_async16(slot + k, middle + k - 2048); /* 8 bits */
}

/* Starts the copy of 16 exact rows. The 16-byte chunks are swizzled, so that a column of chunks uses all banks.
 * Missing rows become copies of the last one. */
template <int D> TKVCU_DEVICE void tkvcu_load_rows(uint8_t *slot, const uint8_t *from, int rows, int lane) {
    int i;
    lane = tkvcu_block_hoisting(lane);
    for (i = lane; i < 16 * (D / 8); i += 32) {
        const int row = i / (D / 8), chunk = i % (D / 8), there = row < rows ? row : rows - 1;
        tkvcu_cp_async16(slot + row * (2 * D) + 16 * (chunk ^ (row & (D % 64 ? 3 : 7))),
                         from + there * (2 * D) + 16 * chunk);
    }
}

/* >>K. q * scale of a channel is rounded to a 16-bit integer, in a unit that the largest product of the key tile
 * sets. It enters the product as two int8 limbs: S = 256 hi + lo. */
/* A: returns the bits of a slab; slabs are in the order of widths */
TKVCU_DEVICE int tkvcu_find_slab_width(const tkvcu_side &s, int slab) {
    int w;
    for (w = 6; w > 0; w--) {
        if (slab < s.slabs[w]) break;
        slab -= s.slabs[w];
    }
    return w;
}

#define TKVCU_Q_MAX 32600.0f   /* largest integer of q * scale */
#define TKVCU_ROW_MAX 16300.0f /* integer of the unit of q16, for products with the outlier's row */
#define TKVCU_P_MAX 65000.0f   /* largest integer of a weight * scale */
#define TKVCU_TINY 1e-30f      /* avoids division by 0 */
/* A: no scale counts as less than this times the largest one. The score of the outlier, in the unit of the others, then
 * stays below -TKVCU_LEAST_SUM. It is 2^-28, and the window of scales has 16 octaves. */
#define TKVCU_LEAST_SCALE 3.7252903e-9f
/* 1.5 * 2^23: adding it rounds a float to an integer, which is then in the low bits. */
#define TKVCU_ROUNDING 12582912.0f

/* Writes the scales of the channels to `out`, in a unit that makes the largest product with a query TKVCU_Q_MAX.
 * Returns that unit. Channels without codes get 0. */
template <int D, int NT>
TKVCU_DEVICE float tkvcu_scale_k_channels(const tkvcu_side &s, const uint8_t *slot,
                                          const tkvcu_attend_shared<D, NT> &b, tkvcu_f32x4 *out, int lane) {
    tkvcu_f32x4 x = {{0.0f, 0.0f, 0.0f, 0.0f}};
    float most = b.least_product, up;
    int i;
    if (D == 128 || lane < D / 4) {
        if (s.kind == TKVCU_KIVI) {
            const tkvcu_u32x2 w = tkvcu_load_u32x2(slot, 8u * (uint32_t)lane);
            x.x[0] = tkvcu_f16_lo(w.x);
            x.x[1] = tkvcu_f16_lo(w.x >> 16);
            x.x[2] = tkvcu_f16_lo(w.y);
            x.x[3] = tkvcu_f16_lo(w.y >> 16);
        } else if (lane < D / 4 - 4 * s.slabs[0]) {
            const uint32_t logs = tkvcu_load_u32(slot, 4u * (uint32_t)lane);
            TKVCU_UNROLL
            for (i = 0; i < 4; i++) x.x[i] = b.k_log[tkvcu_prmt(logs, 0, 0x4440u + (uint32_t)i)];
        }
        TKVCU_UNROLL
        for (i = 0; i < 4; i++) most = fmaxf(most, x.x[i] * b.q_max[lane].x[i]);
    }
    most = tkvcu_warp_max(most);
    up = TKVCU_Q_MAX * tkvcu_rcp(most);
    TKVCU_UNROLL
    for (i = 0; i < 4; i++) x.x[i] *= up;
    if (D == 128 || lane < D / 4) out[lane] = x;
    return most * (1.0f / TKVCU_Q_MAX);
}

/* Returns the index of tiles 2 i and 2 i + 1 for column c of an n-tile. */
template <int D> TKVCU_DEVICE int tkvcu_find_q_index(int nt, int i, int c) {
    return (nt * (D / 8) + i) * 4 + c;
}

/* Returns query * scale of four channels as limbs. The low limb is signed too, so the high one is taken from x +
 * 128. */
TKVCU_DEVICE tkvcu_u32x2 tkvcu_split_q_limbs(const tkvcu_f32x4 &q, const tkvcu_f32x4 &scale) {
    uint32_t x[4], a, b;
    tkvcu_u32x2 to;
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 4; i++) x[i] = tkvi_bits(fmaf(q.x[i], scale.x[i], TKVCU_ROUNDING + 128.0f));
    a = tkvcu_prmt(x[0], x[1], 0x5410);
    b = tkvcu_prmt(x[2], x[3], 0x5410);
    to.x = tkvcu_prmt(a, b, 0x7531);
    to.y = tkvcu_prmt(a, b, 0x6420) ^ 0x80808080u;
    return to;
}

/* Makes all limbs, as second operands. The high limbs of a pair of tiles, then the low ones, are four words.
 * Columns 2 c and 2 c + 1 of the operand are the limbs of column c. So lane 4 g + t reads words 2 g (even tiles)
 * and 2 g + 1 (odd). */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_make_q_limbs(const tkvcu_attend_shared<D, NT> &b, const tkvcu_f32x4 *scale,
                                     tkvcu_u32x4 *out, int lane) {
    int i;
    TKVCU_UNROLL
    for (i = 0; i < D * NT / 64; i++) {
        const int at = lane + 32 * i, pair = at / 4 % (D / 8);
        const tkvcu_f32x4 first = scale[2 * pair], second = scale[2 * pair + 1];
        const tkvcu_u32x2 even = tkvcu_split_q_limbs(b.q[0][at], first),
                          odd = tkvcu_split_q_limbs(b.q[1][at], second);
        tkvcu_u32x4 x;
        x.x = even.x;
        x.y = odd.x;
        x.z = even.y;
        x.w = odd.y;
        out[at] = x;
    }
}

/* Returns the lane's word of slab k. */
template <int D> TKVCU_DEVICE uint32_t tkvcu_load_q_limbs(const uint32_t *q, int nt, int k) {
    return q[16 * (nt * (D / 8) + 2 * k)];
}

template <int NT> TKVCU_DEVICE void tkvcu_clear_sums(int32_t sum[4][NT][4]) {
    int p, nt, i;
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) sum[p][nt][i] = 0;
}

/* Multiplies n slabs of width W, and adds codes * q to `sum`, by plane. The codes begin at `at`, the lane's words of
 * the queries at q. Moves both on. */
template <int D, int W, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_slabs(int32_t sum[4][NT][4], tkvcu_address codes, uint32_t &at,
                                         const uint32_t *&q, int n, int g, int t) {
    const int half = g / 4;
    const uint32_t *word = q, *end = q + n / 2 * 64;
    tkvcu_cursor<W> path;
    int i, nt;
    if (n == 0) return;
    tkvcu_start_cursor(path, codes, at, g, t);
#define TKVCU_PLANE_(P)                                                                                      \
    {                                                                                                        \
        uint32_t a[4];                                                                                       \
        TKVCU_UNROLL                                                                                         \
        for (i = 0; i < 2; i++) {                                                                            \
            a[i] = tkvcu_take_plane<W, P, tkvcu_k_bit(W, P)>(x, i);                                          \
            a[2 + i] = two ? tkvcu_take_plane<W, P, tkvcu_k_bit(W, P)>(y, i) : 0;                            \
        }                                                                                                    \
        TKVCU_UNROLL                                                                                         \
        for (nt = 0; nt < NT; nt++) tkvcu_mma_us(sum[P][nt], a, b[nt]);                                      \
    }
#define TKVCU_SLABS_                                                                                         \
    {                                                                                                        \
        tkvcu_tile<W> x, y;                                                                                  \
        uint32_t b[NT][2];                                                                                   \
        tkvcu_load_tile(x, path, 0, half);                                                                   \
        if (two) tkvcu_load_tile(y, path, 1, half);                                                          \
        TKVCU_UNROLL                                                                                         \
        for (nt = 0; nt < NT; nt++) {                                                                        \
            b[nt][0] = tkvcu_load_q_limbs<D>(word, nt, 0);                                                   \
            b[nt][1] = two ? tkvcu_load_q_limbs<D>(word, nt, 1) : 0;                                         \
        }                                                                                                    \
        TKVCU_PLANE_(0)                                                                                      \
        TKVCU_PLANE_(1)                                                                                      \
        TKVCU_PLANE_(2)                                                                                      \
        TKVCU_PLANE_(3)                                                                                      \
    }
    TKVCU_ROLL
    for (; word != end; word += 64) {
        enum { two = 1 };
        TKVCU_SLABS_
        tkvcu_advance_cursor(path);
    }
    if (n % 2) {
        enum { two = 0 };
        TKVCU_SLABS_
    }
#undef TKVCU_SLABS_
#undef TKVCU_PLANE_
    at += (uint32_t)(128 * W * n);
    q += 32 * n;
}

/* Moves the sums of codes at the bits of width From to those of width To, which are not lower. */
template <int From, int To, int NT> TKVCU_DEVICE void tkvcu_move_k_sums(int32_t sum[4][NT][4]) {
    int p, nt, i;
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) sum[p][nt][i] *= 1 << (tkvcu_k_bit(To, p) - tkvcu_k_bit(From, p));
}

/* Adds the sums of codes at the bits of width W to s, and joins the limbs. */
template <int W, int NT> TKVCU_DEVICE void tkvcu_add_k_sums(float s[4][NT][2], const int32_t sum[4][NT][4]) {
    int p, nt, i;
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++)
        s[p][nt][i] = fmaf((float)(256 * sum[p][nt][2 * i] + sum[p][nt][2 * i + 1]),
                           1.0f / (float)(1 << tkvcu_k_bit(W, p)), s[p][nt][i]);
}

/* Adds codes * q of all slabs to s. Widths follow one another, widest first. Those with almost the same bits share
 * sums. A sum stays below 2^31: |q| <= TKVCU_Q_MAX, a code at its bit <= 496, 128 channels. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_codes(const tkvcu_side &side, float s[4][NT][2], tkvcu_address codes,
                                         const uint32_t *q, int g, int t) {
    const int n1 = side.slabs[1], n2 = side.slabs[2], n3 = side.slabs[3], n4 = side.slabs[4],
              n5 = side.slabs[5], n6 = side.slabs[6];
    uint32_t at = 0;
    int32_t sum[4][NT][4];
    if (side.half_bits == 16) { /* Q8 */
        tkvcu_clear_sums<NT>(sum);
        tkvcu_multiply_k_slabs<D, 8, NT>(sum, codes, at, q, D / 16, g, t);
        tkvcu_add_k_sums<8, NT>(s, sum);
    }
    if (n6) {
        tkvcu_clear_sums<NT>(sum);
        tkvcu_multiply_k_slabs<D, 6, NT>(sum, codes, at, q, n6, g, t);
        tkvcu_add_k_sums<6, NT>(s, sum);
    }
    if (n5 + n4) {
        tkvcu_clear_sums<NT>(sum);
        tkvcu_multiply_k_slabs<D, 5, NT>(sum, codes, at, q, n5, g, t);
        if (n5) tkvcu_move_k_sums<5, 4, NT>(sum);
        tkvcu_multiply_k_slabs<D, 4, NT>(sum, codes, at, q, n4, g, t);
        tkvcu_add_k_sums<4, NT>(s, sum);
    }
    if (n3 + n2 + n1) {
        tkvcu_clear_sums<NT>(sum);
        tkvcu_multiply_k_slabs<D, 3, NT>(sum, codes, at, q, n3, g, t);
        if (n3) tkvcu_move_k_sums<3, 2, NT>(sum);
        tkvcu_multiply_k_slabs<D, 2, NT>(sum, codes, at, q, n2, g, t);
        tkvcu_multiply_k_slabs<D, 1, NT>(sum, codes, at, q, n1, g, t);
        tkvcu_add_k_sums<2, NT>(s, sum);
    }
}

/* Multiplies the offsets of A (formats/a.h). In units of the scale, a channel adds offset / 8 - middle to its
 * codes, or offset / 4 - middle with 6 bits. This is equal for all tokens, and exact. Channels without codes
 * have q = 0 here. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_offsets(const tkvcu_side &side, float s[NT], const uint8_t *slot,
                                           const uint32_t *max_codes, const uint32_t *q, int t) {
    int32_t sum[NT][4]; /* rows: offsets, largest codes */
    int k, nt;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0;
    TKVCU_UNROLL
    for (k = 0; k < D / 16; k += 2) {
        const uint32_t at = (uint32_t)(D + 16 * k + 4 * t);
        const uint32_t a[4] = {tkvcu_load_u32(slot, at), max_codes[4 * k + t], tkvcu_load_u32(slot, at + 16),
                               max_codes[4 * k + 4 + t]};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const uint32_t b[2] = {tkvcu_load_q_limbs<D>(q, nt, k), tkvcu_load_q_limbs<D>(q, nt, k + 1)};
            tkvcu_mma_ss(sum[nt], a, b);
        }
    }
    TKVCU_ROLL
    for (k = 0; k < side.slabs[6]; k++) { /* 6 bits: a second time, for offset / 4 */
        const uint32_t a[4] = {tkvcu_load_u32(slot, (uint32_t)(D + 16 * k + 4 * t)), 0, 0, 0};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const uint32_t b[2] = {tkvcu_load_q_limbs<D>(q, nt, k), 0};
            tkvcu_mma_ss(sum[nt], a, b);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++)
        s[nt] =
            0.125f * (float)(256 * sum[nt][0] + sum[nt][1]) - 0.5f * (float)(256 * sum[nt][2] + sum[nt][3]);
}

/* The next functions add products of q with terms without scale. These are equal for all tokens of a key tile. */
/* Multiplies KIVI's zeros. A lane takes 8 channels. Rows g get the products of its words 0 and 2, rows g + 8 of
 * 1 and 3. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_zeros(float s[NT], const uint8_t *slot,
                                         const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me) {
    float first[NT][4], second[NT][4];
    int k, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) first[nt][i] = second[nt][i] = 0.0f;
    TKVCU_UNROLL
    for (k = 0; k < D / 32; k++) {
        const tkvcu_u32x4 z = *(const tkvcu_u32x4 *)(const void *)(slot + 2 * D + 64 * k + 16 * me.t);
        const uint32_t a[4] = {z.x, z.y, z.z, z.w};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_u32x4 q = ((const tkvcu_u32x4 *)(const void *)b.q16)[(k * NT + nt) * 32 + me.lane];
            const uint32_t even[2] = {q.x, q.y}, odd[2] = {q.z, q.w};
            tkvcu_mma_f16(first[nt], a, even);
            tkvcu_mma_f16(second[nt], a, odd);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++)
        s[nt] +=
            b.q16_ratio[4 * nt + me.t] * ((first[nt][0] + first[nt][1]) + (second[nt][2] + second[nt][3]));
}

/* Multiplies the means of A's channels without codes. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_means(const tkvcu_side &side, float s[NT], const uint8_t *slot,
                                         const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me) {
    float sum[NT][4];
    int k, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) sum[nt][i] = 0.0f;
    TKVCU_ROLL
    for (k = D / 16 - side.slabs[0]; k < D / 16; k++) { /* low bytes, then high bytes */
        const uint32_t at = (uint32_t)(16 * k + 4 * tkvcu_keep_in_register(me.t));
        const uint32_t low = tkvcu_load_u32(slot, at), high = tkvcu_load_u32(slot, D + at);
        const uint32_t x = tkvcu_prmt(low, high, 0x5140), y = tkvcu_prmt(low, high, 0x7362),
                       a[4] = {x, x, y, y};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_u32x2 part = b.q16[k][nt][me.lane];
            const uint32_t q[2] = {part.x, part.y};
            tkvcu_mma_f16(sum[nt], a, q);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) s[nt] += b.q16_ratio[4 * nt + me.t] * (sum[nt][0] + sum[nt][1]);
}

/* Replaces the score of A's outlier by the product of q and its row. Lanes t take 64 channels at a time, 16 bytes of
 * the row each. Words 0 and 2 are rows g of the first operand, words 1 and 3 rows g + 8. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_score_outlier(float s[4][NT][2], const uint8_t *row, const float base[NT], float unit,
                                      const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me) {
    const uint32_t head = __ballot_sync(0xffffffffu, row[me.lane] & 1);
    const int token = (int)(head & 127u) - 2 * me.g; /* less the lane's first one */
    const float half_step = b.k_log[head >> 7 & 255u] * (0.5f / TKVCU_ROW_MAX), per_unit = tkvcu_rcp(unit);
    int32_t even[NT][4], odd[NT][4];
    int k, nt, p, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) even[nt][i] = odd[nt][i] = 0;
    TKVCU_UNROLL
    for (k = 0; k < D / 64; k++) {
        const tkvcu_u32x4 x = *(const tkvcu_u32x4 *)(const void *)(row + 64 * k + 16 * me.t);
        const uint32_t a[4] = {x.x & 0xfefefefeu, x.y & 0xfefefefeu, x.z & 0xfefefefeu, x.w & 0xfefefefeu};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_u32x4 q = b.q_row[k][nt][me.lane];
            const uint32_t b02[2] = {q.x, q.z}, b13[2] = {q.y, q.w};
            tkvcu_mma_ss(even[nt], a, b02);
            tkvcu_mma_ss(odd[nt], a, b13);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        const int column = 4 * nt + me.t, sum = 256 * (even[nt][0] + odd[nt][2]) + even[nt][1] + odd[nt][3];
        const float x = fmaf((float)sum, half_step * b.q16_ratio[column], b.mean[column] - base[nt]);
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) TKVCU_UNROLL
        for (i = 0; i < 2; i++) s[p][nt][i] = token == 16 * p + i ? x * per_unit : s[p][nt][i];
    }
}

/* >>softmax. The weights of a key tile are relative to its own maximum. A factor converts them to the running
 * maximum. */
/* Updates the running maxima with those of a key tile, `most`, equal in all lanes of a column. They move only if
 * they grow by more than 4. f receives the factor of the key tile's weights. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_update_max(tkvcu_partials<D, NT, VG> &u, const float most[NT], float f[NT]) {
    int nt, i, k, grew = 0;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) grew |= most[nt] > u.soft.m[nt] + 4.0f;
    if (TKVCU_UNLIKELY(__any_sync(0xffffffffu, grew))) {
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const float m = fmaxf(u.soft.m[nt], most[nt]), by = tkvcu_ex2(u.soft.m[nt] - m);
            u.soft.m[nt] = m;
            u.soft.l[nt] *= by;
            TKVCU_UNROLL
            for (k = 0; k < D / 16; k++) TKVCU_UNROLL
            for (i = 0; i < 2; i++) u.o[k][nt][i] *= by;
            TKVCU_UNROLL
            for (k = 0; k < VG; k++) u.zero[k][nt] *= by;
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) f[nt] = tkvcu_ex2(most[nt] - u.soft.m[nt]);
}

/* Returns the maximum over the lanes of a column. */
TKVCU_DEVICE float tkvcu_reduce_column_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
}

/* >>V. weight * scale of the token is a 16-bit integer, too, as two limbs of 8 bits. The largest of the key tile
 * is TKVCU_P_MAX. */
template <int VG>
TKVCU_DEVICE void tkvcu_load_v_scales(const tkvcu_side &s, const uint8_t *slot, tkvcu_f32x2 *out, int lane,
                                      const float *v_log) {
    int i;
    if (s.kind == TKVCU_KIVI) {
        TKVCU_UNROLL
        for (i = 0; i < 2 * VG; i++) { /* scales of all groups, then zeros */
            const uint32_t x = tkvcu_load_u32(slot, (uint32_t)(128 * i + 4 * lane));
            const tkvcu_f32x2 y = {tkvcu_f16_lo(x), tkvcu_f16_lo(x >> 16)};
            out[32 * i + lane] = y;
        }
    } else {
        const uint32_t x = *(const uint16_t *)(const void *)(slot + 2 * lane);
        const tkvcu_f32x2 y = {v_log[tkvcu_prmt(x, 0, 0x4440)], v_log[tkvcu_prmt(x, 0, 0x4441)]};
        out[lane] = y;
    }
}

/* Multiplies the weights p of the lane's tokens (slab, column, word) by their scales, and makes second operands.
 * b[m] has planes 2 m and 2 m + 1 of tile t in column g: high limbs of column g / 2 if g is even, else low
 * limbs. `smaller` is the exponent that divides the weights of this lane's plane (unpack.h). `unit` receives the
 * value of integer 1. `sum` receives the sum of weight * scale over this lane's tokens. */
template <int NT>
TKVCU_DEVICE void tkvcu_make_p_limbs(const float p[4][NT][2], const tkvcu_f32x2 *scale, uint8_t *memory,
                                     uint32_t smaller, uint32_t b[2][NT][2], float unit[NT], float sum[NT],
                                     int g, int t) {
    const uint32_t select = g % 2 ? 0x6420u : 0x7531u;
    int i, k, nt;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        float w[4][2], most = TKVCU_TINY, up;
        TKVCU_UNROLL
        for (k = 0; k < 4; k++) {
            const tkvcu_f32x2 x = scale[8 * k + g];
            w[k][0] = p[k][nt][0] * x.x;
            w[k][1] = p[k][nt][1] * x.y;
            sum[nt] = k ? sum[nt] + (w[k][0] + w[k][1]) : w[k][0] + w[k][1];
            most = fmaxf(fmaxf(most, w[k][0]), w[k][1]);
        }
        most = tkvcu_reduce_column_max(most);
        unit[nt] = most * (1.0f / TKVCU_P_MAX);
        up = TKVCU_P_MAX * tkvcu_rcp(most);
        up = tkvi_from_bits(tkvi_bits(up) - smaller);
        TKVCU_UNROLL
        for (k = 0; k < 4; k++)
            *(uint32_t *)(void *)(memory + (4 * nt + t) * TKVCU_WEIGHTS_ROW + 32 * k + 4 * g) =
                tkvcu_prmt(tkvi_bits(fmaf(w[k][0], up, TKVCU_ROUNDING)),
                           tkvi_bits(fmaf(w[k][1], up, TKVCU_ROUNDING)), 0x5410);
    }
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        const tkvcu_u32x4 *from =
            (const tkvcu_u32x4 *)(const void *)(memory + (4 * nt + g / 2) * TKVCU_WEIGHTS_ROW + 32 * t);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            const tkvcu_u32x4 x = from[i];
            b[i][nt][0] = tkvcu_prmt(x.x, x.y, select);
            b[i][nt][1] = tkvcu_prmt(x.z, x.w, select);
        }
    }
}

/* Adds the sums of a slab to o, and joins the limbs. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_add_v_sums(tkvcu_partials<D, NT, VG> &u, int slab, const int32_t sum[NT][4],
                                   const float unit[NT]) {
    int nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++)
        u.o[slab][nt][i] =
            fmaf((float)(256 * sum[nt][2 * i] + sum[nt][2 * i + 1]), unit[nt], u.o[slab][nt][i]);
}

/* Multiplies all slabs of V with codes of width W. Each group of channels has its own weights. */
template <int D, int W, int NT, int VG>
TKVCU_DEVICE void tkvcu_multiply_v_codes(tkvcu_partials<D, NT, VG> &u, const tkvcu_v_addresses &at,
                                         const uint32_t b[VG][2][NT][2], const float unit[VG][NT], int g,
                                         int t) {
    int k, i, m, nt;
    const tkvcu_v_path path = tkvcu_find_v_path<W>(at, g, t);
    TKVCU_UNROLL
    for (k = 0; k < D / 16; k++) {
        tkvcu_tile<W> x;
        uint32_t plane[2][4];
        int32_t sum[NT][4];
        const int group = k * VG / (D / 16);
        tkvcu_load_v_tile<W>(x, path, k, g / 4);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) tkvcu_take_planes<W>(x, i, plane[i]);
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0;
        TKVCU_UNROLL
        for (m = 0; m < 2; m++) {
            const uint32_t a[4] = {plane[0][2 * m], plane[1][2 * m], plane[0][2 * m + 1],
                                   plane[1][2 * m + 1]};
            TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) tkvcu_mma_uu(sum[nt], a, b[group][m][nt]);
        }
        tkvcu_add_v_sums(u, k, sum, unit[group]);
    }
}

/* The same for R with pairs: the 16 words of a tile are channels of two slabs. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_multiply_v_pairs(tkvcu_partials<D, NT, VG> &u, const tkvcu_v_addresses &at,
                                         const uint32_t b[2][NT][2], const float unit[NT], int g, int t) {
    const tkvcu_v_path path = tkvcu_find_v_path<3>(at, g, t);
    uint32_t reordered[2][NT][2];
    float pair_unit[NT];
    int i, k, nt, h, m;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        pair_unit[nt] = unit[nt] * TKVCU_PAIR_UNIT;
        TKVCU_UNROLL
        for (m = 0; m < 2; m++) tkvcu_reorder_pair_weights(b[m][nt], reordered[m][nt]);
    }
    TKVCU_UNROLL
    for (k = 0; k < D / 32; k++) {
        tkvcu_tile<3> x;
        uint32_t code[2][2];
        tkvcu_load_v_tile<3>(x, path, k, g / 4);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            code[0][i] = tkvcu_merge_pair_codes<0>(x, i);
            code[1][i] = tkvcu_merge_pair_codes<2>(x, i);
        }
        TKVCU_UNROLL
        for (h = 0; h < 2; h++) {
            int32_t sum[NT][4];
            TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0;
            TKVCU_UNROLL
            for (m = 0; m < 2; m++) {
                uint32_t a[4];
                tkvcu_look_up_pairs(code[m], tkvcu_get_pair_table(h), a);
                TKVCU_UNROLL
                for (nt = 0; nt < NT; nt++) tkvcu_mma_su(sum[nt], a, reordered[m][nt]);
            }
            tkvcu_add_v_sums(u, 2 * k + h, sum, pair_unit);
        }
    }
}

/* >>scores and values of a key tile */
TKVCU_DEVICE int tkvcu_find_query_position(const tkvcu_job &j, const tkvcu_task &k, int column) {
    return k.visible.len - j.n_queries + (k.column + column) / k.group;
}

TKVCU_DEVICE int tkvcu_can_see(const tkvcu_job &j, int query, int position) {
    return position <= query && (j.window == 0 || position > query - j.window);
}

/* Turns the sums of a coded key tile, s[slab of 16 tokens][n-tile][word], into weights. A product q.k is unit *
 * s + base, in units of q. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_softmax_step(const tkvcu_job &j, const tkvcu_attend_shared<D, NT> &b,
                                     tkvcu_partials<D, NT, VG> &u, float s[4][NT][2], float unit,
                                     const float base[NT], float f[NT], int position, int g, int t) {
    const tkvcu_task &k = b.task;
    const int oldest = k.visible.len - j.n_queries;
    const int masked =
        TKVCU_UNLIKELY(position + 63 > oldest || (j.window && position <= k.visible.len - 1 - j.window));
    float times[NT], least[NT], most[NT];
    int p, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        const float logit_scale = b.logit_scale[4 * nt + t];
        times[nt] = unit * logit_scale;
        least[nt] = base[nt] * logit_scale;
    }
    if (TKVCU_UNLIKELY(j.softcap > 0.0f)) {
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) TKVCU_UNROLL
            for (i = 0; i < 2; i++) s[p][nt][i] = tanhf(fmaf(s[p][nt][i], times[nt], least[nt]));
            times[nt] = j.softcap * TKVCU_LOG2E;
            least[nt] = 0.0f;
        }
    }
    if (masked) {
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const int query = tkvcu_find_query_position(j, k, 4 * nt + t);
            /* 0 times infinity would be NaN */
            if (times[nt] == 0.0f) times[nt] = 1e-37f;
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) TKVCU_UNROLL
            for (i = 0; i < 2; i++)
                if (!tkvcu_can_see(j, query, position + 16 * p + 2 * g + i)) s[p][nt][i] = -INFINITY;
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        float x = TKVCU_LEAST_SUM; /* if no key is visible, weights are relative to this, and become 0 */
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) x = fmaxf(fmaxf(x, s[p][nt][0]), s[p][nt][1]);
        x = tkvcu_reduce_column_max(x);
        most[nt] = x > TKVCU_LEAST_SUM ? fmaf(x, times[nt], least[nt]) : TKVCU_MASKED_LOGIT;
        least[nt] = -x * times[nt];
    }
    tkvcu_update_max(u, most, f);
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        float l = 0.0f;
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) {
            TKVCU_UNROLL
            for (i = 0; i < 2; i++) s[p][nt][i] = tkvcu_ex2(fmaf(s[p][nt][i], times[nt], least[nt]));
            l = p ? l + (s[p][nt][0] + s[p][nt][1]) : s[p][nt][0] + s[p][nt][1];
        }
        u.soft.l[nt] = fmaf(l, f[nt], u.soft.l[nt]);
    }
}

/* Scores a coded key tile in `slot`. s receives the weights, f their factor. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_score_coded_k(const tkvcu_job &j, const tkvcu_attend_shared<D, NT> &b,
                                      const tkvcu_lane &me, tkvcu_partials<D, NT, VG> &u, float s[4][NT][2],
                                      float f[NT], const uint8_t *slot, int position) {
    const tkvcu_side &side = TKVCU_SIDE(b, 0);
    tkvcu_f32x4 *scale = (tkvcu_f32x4 *)(void *)me.work;
    tkvcu_u32x4 *q = (tkvcu_u32x4 *)(void *)(me.work + 4 * D);
    const uint32_t *mine = (const uint32_t *)(const void *)q + me.t / 2 * 16 + 2 * me.g + me.t % 2;
    float base[NT], offset[NT];
    const float unit = tkvcu_scale_k_channels<D, NT>(side, slot, b, scale, me.lane);
    int p, nt;
    __syncwarp();
    tkvcu_make_q_limbs<D, NT>(b, scale, q, me.lane);
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        base[nt] = b.mean[4 * nt + me.t];
        offset[nt] = 0.0f;
    }
    if (side.kind == TKVCU_KIVI) {
        tkvcu_multiply_k_zeros<D, NT>(base, slot, b, me);
    } else {
        tkvcu_multiply_k_offsets<D, NT>(side, offset, slot, b.max_codes, mine, me.t);
        if (side.slabs[0]) tkvcu_multiply_k_means<D, NT>(side, base, slot, b, me);
    }
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) s[p][nt][0] = s[p][nt][1] = offset[nt];
    tkvcu_multiply_k_codes<D, NT>(side, s, me.k_codes, mine, me.g, me.t);
    if (side.kind == TKVCU_A) tkvcu_score_outlier<D, NT>(s, slot + 2 * D, base, unit, b, me);
    tkvcu_softmax_step(j, b, u, s, unit, base, f, position, me.g, me.t);
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_add_coded_v(const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me,
                                    tkvcu_partials<D, NT, VG> &u, const float s[4][NT][2], const float f[NT],
                                    const uint8_t *slot) {
    const tkvcu_side &side = TKVCU_SIDE(b, 1);
    const int kivi = side.kind == TKVCU_KIVI, width = side.half_bits / 2;
    const int pairs = side.half_bits == 3;
    const uint32_t smaller = pairs ? 0 : (uint32_t)tkvcu_v_bit(width, me.g / 2) << 23;
    tkvcu_f32x2 *scale = (tkvcu_f32x2 *)(void *)me.work;
    uint8_t *memory = me.work + 512 * VG;
    uint32_t w[VG][2][NT][2];
    float unit[VG][NT], sum[NT];
    int i, p, nt;
    tkvcu_load_v_scales<VG>(side, slot, scale, me.lane, b.v_log);
    __syncwarp();
    TKVCU_UNROLL
    for (i = 0; i < VG; i++) {
        if (i > 0 && !kivi) { /* this format has one group */
            TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) {
                TKVCU_UNROLL
                for (p = 0; p < 4; p++) w[i][p / 2][nt][p % 2] = w[0][p / 2][nt][p % 2];
                unit[i][nt] = unit[0][nt];
                u.zero[i][nt] = u.zero[0][nt];
            }
            continue;
        }
        tkvcu_make_p_limbs<NT>(s, scale + 32 * i, memory + i * (4 * TKVCU_WEIGHTS_ROW * NT), smaller, w[i],
                               unit[i], sum, me.g, me.t);
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            float zero = 0.0f;
            if (kivi) {
                TKVCU_UNROLL
                for (p = 0; p < 4; p++) {
                    const tkvcu_f32x2 x = scale[32 * (VG + i) + 8 * p + me.g];
                    zero = fmaf(s[p][nt][1], x.y, fmaf(s[p][nt][0], x.x, zero));
                }
            } else if (!pairs) {
                zero = -0.5f * (float)((1 << width) - 1) * sum[nt];
            }
            u.zero[i][nt] = fmaf(zero, f[nt], u.zero[i][nt]);
            unit[i][nt] *= f[nt];
        }
    }
    if (pairs) tkvcu_multiply_v_pairs<D, NT, VG>(u, me.v_at, w[0], unit[0], me.g, me.t);
    else if (width == 2) tkvcu_multiply_v_codes<D, 2, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
    else if (width == 3) tkvcu_multiply_v_codes<D, 3, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
    else if (width == 4) tkvcu_multiply_v_codes<D, 4, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
    else if (width == 1) tkvcu_multiply_v_codes<D, 1, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
    else tkvcu_multiply_v_codes<D, 8, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
}

/* >>16 exact tokens: products of 16-bit values. Rows g and g + 8 of the first operand are tokens (K) or channels
 * (V). A query or weight is split into two 16-bit limbs, again as two columns. */
template <int D> TKVCU_DEVICE const uint8_t *tkvcu_find_chunk(const uint8_t *slot, int row, int chunk) {
    return slot + row * (2 * D) + 16 * (chunk ^ (row & (D % 64 ? 3 : 7)));
}

TKVCU_DEVICE void tkvcu_mma_16(float c[4], const uint32_t a[4], const uint32_t b[2], int bf16) {
    if (bf16) tkvcu_mma_bf16(c, a, b);
    else tkvcu_mma_f16(c, a, b);
}

/* Returns two values as 16-bit floats (the high limb), or the errors of this rounding (the low limb). */
TKVCU_DEVICE uint32_t tkvcu_take_limb16(float x, float y, int low, int bf16) {
    uint32_t two = bf16 ? tkvcu_pack_bf16x2(x, y) : tkvcu_pack_f16x2(x, y);
    if (!low) return two;
    x -= bf16 ? tkvcu_bf16_lo(two) : tkvcu_f16_lo(two);
    y -= bf16 ? tkvcu_bf16_hi(two) : tkvcu_f16_lo(two >> 16);
    return bf16 ? tkvcu_pack_bf16x2(x, y) : tkvcu_pack_f16x2(x, y);
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_score_exact_k(const tkvcu_job &j, const tkvcu_attend_shared<D, NT> &b,
                                      const tkvcu_lane &me, tkvcu_partials<D, NT, VG> &u, float s[NT][2],
                                      float f[NT], const uint8_t *slot, int position, int rows) {
    const int lane = tkvcu_block_hoisting(me.lane), i8 = lane % 8, m = lane / 8;
    float sum[NT][4], most[NT];
    int c, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0.0f;
    TKVCU_UNROLL
    for (c = 0; c < D / 16; c++) {
        uint32_t a[4];
        tkvcu_ldmatrix_x4(a, tkvcu_find_chunk<D>(slot, i8 + m % 2 * 8, 2 * c + m / 2));
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_u32x2 x = b.q16[c][nt][me.lane];
            const uint32_t q[2] = {x.x, x.y};
            tkvcu_mma_16(sum[nt], a, q, b.side[0].bf16);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        const int query = tkvcu_find_query_position(j, b.task, 4 * nt + me.t);
        const float logit_scale = b.logit_scale[4 * nt + me.t];
        most[nt] = TKVCU_MASKED_LOGIT;
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            const int row = me.g + 8 * i;
            float x = (sum[nt][2 * i] + sum[nt][2 * i + 1]) * logit_scale;
            if (j.softcap > 0.0f) x = tanhf(x) * (j.softcap * TKVCU_LOG2E);
            s[nt][i] = row < rows && tkvcu_can_see(j, query, position + row) ? x : -INFINITY;
            most[nt] = fmaxf(most[nt], s[nt][i]);
        }
        most[nt] = tkvcu_reduce_column_max(most[nt]);
    }
    tkvcu_update_max(u, most, f);
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) s[nt][i] = tkvcu_ex2(s[nt][i] - most[nt]);
        u.soft.l[nt] = fmaf(s[nt][0] + s[nt][1], f[nt], u.soft.l[nt]);
    }
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_add_exact_v(const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me,
                                    tkvcu_partials<D, NT, VG> &u, const float s[NT][2], const float f[NT],
                                    const uint8_t *slot) {
    const int i8 = me.lane % 8, m = me.lane / 8, bf16 = b.side[1].bf16;
    float *weight = (float *)(void *)me.work; /* [column][16 tokens] */
    uint32_t p[NT][2];
    int c, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) weight[16 * (4 * nt + me.t) + me.g + 8 * i] = s[nt][i];
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const float *x = weight + 16 * (4 * nt + me.g / 2) + 2 * me.t + 8 * i;
        p[nt][i] = tkvcu_take_limb16(x[0], x[1], me.g % 2, bf16);
    }
    TKVCU_UNROLL
    for (c = 0; c < D / 16; c++) {
        uint32_t a[4];
        tkvcu_ldmatrix_x4_trans(a, tkvcu_find_chunk<D>(slot, i8 + m / 2 * 8, 2 * c + m % 2));
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            tkvcu_mma_16(sum, a, p[nt], bf16);
            TKVCU_UNROLL
            for (i = 0; i < 2; i++) u.o[c][nt][i] = fmaf(sum[2 * i] + sum[2 * i + 1], f[nt], u.o[c][nt][i]);
        }
    }
}

/* >>key ranges: key tiles of one region and one table version */
/* Returns the index of a column's query in d_q. */
TKVCU_DEVICE size_t tkvcu_find_query(const tkvcu_job &j, const tkvcu_task &k, int column) {
    const size_t row = (size_t)k.entry * (size_t)j.n_queries + (size_t)(column / k.group);
    const size_t head = (size_t)(k.head * k.group + column % k.group);
    return (row * (size_t)j.view.n_heads + head) * (size_t)j.view.head_dim;
}

/* Returns the largest power of two that is at most x. x must not be negative; 0 gives `otherwise`. */
TKVCU_DEVICE float tkvcu_floor_power(float x, float otherwise) {
    const uint32_t bits = tkvi_bits(x) & 0x7f800000u;
    if (bits == 0) return otherwise;
    return tkvi_from_bits(bits < 0x7e800000u ? bits : 0x7e800000u);
}

/* What the queries of a key range are prepared from. It is in slot 1 and in the `work` of warp 0, free until then. */
template <int D> struct tkvcu_query_source {
    float *q;         /* [column][channel]; zeros for unused columns */
    float *scale;     /* [D] of K in the first block of the range: later blocks have similar scales */
    float *mean;      /* [D] static means */
    uint8_t *channel; /* [D] the order of the key range, or the natural order for exact rows */
};

template <int D> TKVCU_DEVICE tkvcu_query_source<D> tkvcu_find_query_source(uint8_t *warps, int slot_bytes) {
    tkvcu_query_source<D> x;
    x.q = (float *)(void *)(warps + slot_bytes); /* slot 1: slot 0 gets the first K */
    x.scale = (float *)(void *)(warps + TKVCU_SLOTS * slot_bytes);
    x.mean = x.scale + D;
    x.channel = (uint8_t *)(x.mean + D);
    return x;
}

/* The place of a query's channel: columns begin in different banks. */
template <int D> TKVCU_DEVICE int tkvcu_find_source(int column, int channel) {
    return column * D + (channel ^ (column & 3));
}

/* Stores the queries in the orders of their products, with the sign of the scale. Channels are in the order of
 * the key range, or in natural order for exact rows. All threads call it. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_prepare_queries(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b,
                                        const tkvcu_query_source<D> &from) {
    const tkvcu_side &side = b.side[0];
    const tkvcu_task &k = b.task;
    const int tid = tkvcu_block_hoisting((int)threadIdx.x), exact = side.kind == TKVCU_EXACT;
    const int ordered = side.table >= 0 && !exact;
    int i, c, r;
    if (tid < D) {
        const uint8_t *meta = k.from[0] - 2048 + side.code_bytes;
        float scale = 0.0f;
        from.channel[tid] = ordered ? j.view.order[side.table + tid] : (uint8_t)tid;
        from.mean[tid] = ordered ? j.view.mean[side.table + tid] : 0.0f;
        if (side.kind == TKVCU_KIVI) scale = tkvcu_f16_lo(((const uint16_t *)(const void *)meta)[tid]);
        else if (side.kind == TKVCU_A && tid < D - 16 * side.slabs[0])
            scale = tkvcu_decode_log(meta[tid], side.top, b.mantissa);
        from.scale[tid] = scale;
    }
    __syncthreads();
    TKVCU_ROLL
    for (i = tid / 32; i < 4 * NT; i += TKVCU_WARPS) { /* a warp per column: its unit, and the means */
        const float sign = k.column + i >= k.columns ? 0.0f
                           : j.scale < 0.0f          ? -1.0f
                                                     : 1.0f; /* 0: unused column */
        const float times = fabsf(j.scale) * (j.softcap > 0.0f ? 1.0f / j.softcap : TKVCU_LOG2E);
        float sum = 0.0f, most = 0.0f, product = 0.0f, q_unit, q16_unit;
        TKVCU_UNROLL
        for (c = tid % 32; c < D; c += 32) {
            const float x = from.q[tkvcu_find_source<D>(i, from.channel[c])];
            sum += x * from.mean[c];
            most = fmaxf(most, fabsf(x));
            product = fmaxf(product, fabsf(x) * from.scale[c]);
            if ((tkvi_bits(x) & 0x7fffffffu) > 0x7f7fffffu) sum = NAN;
        }
        TKVCU_UNROLL
        for (c = 16; c > 0; c /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, c);
        q16_unit = tkvcu_floor_power(tkvcu_warp_max(most), 1.0f);
        q_unit = tkvcu_floor_power(tkvcu_warp_max(product), q16_unit);
        /* NaN and infinity stay in their column, although the columns share a unit */
        if (tid % 32 == 0) {
            b.logit_scale[i] = sum == sum ? q_unit * times : NAN;
            b.mean[i] = sign * sum / q_unit;
            b.q16_ratio[i] = q16_unit / q_unit;
            b.scratch[i] = (int)tkvi_bits(sum == sum ? sign / q_unit : NAN);
            b.scratch[4 * NT + i] = (int)tkvi_bits(sum == sum ? sign / q16_unit : NAN);
        }
    }
    __syncthreads();
    TKVCU_ROLL
    for (i = tid; i < D / 16 * NT * 32; i += TKVCU_THREADS) {
        const int lane = i % 32, nt = i / 32 % NT, slab = i / 32 / NT, mine = 4 * nt + lane / 8, t = lane % 4;
        const float q_unit = tkvi_from_bits((uint32_t)b.scratch[mine]);
        const float q16_unit = tkvi_from_bits((uint32_t)b.scratch[4 * NT + mine]);
        const int low = lane / 4 % 2, bf16 = exact && side.bf16;
        tkvcu_u32x2 to;
        tkvcu_f32x4 x, y;
        TKVCU_UNROLL
        for (r = 0; r < 4; r++) {
            const int tile = 16 * slab + 4 * t + r, rows = 16 * slab + 2 * t + r % 2 + r / 2 * 8;
            const int zeros = 32 * (slab / 2) + 8 * t + slab % 2 * 2 + r % 2 + r / 2 * 4;
            const int place = exact ? rows : side.kind == TKVCU_KIVI ? zeros : tile;
            x.x[r] = q_unit * from.q[tkvcu_find_source<D>(mine, from.channel[tile])];
            y.x[r] = q16_unit * from.q[tkvcu_find_source<D>(mine, from.channel[place])];
        }
        if (!low)
            b.q[t % 2][tkvcu_find_q_index<D>(nt, 2 * slab + t / 2, lane / 8)] =
                x; /* not used for exact rows */
        to.x = tkvcu_take_limb16(y.x[0], y.x[1], low, bf16);
        to.y = tkvcu_take_limb16(y.x[2], y.x[3], low, bf16);
        if (!exact && side.kind == TKVCU_KIVI)
            ((tkvcu_u32x2 *)(void *)b.q16)[((slab / 2 * NT + nt) * 32 + lane) * 2 + slab % 2] = to;
        else b.q16[slab][nt][lane] = to;
    }
    TKVCU_ROLL
    for (i = tid; i < D / 64 * NT * 32 && side.kind == TKVCU_A; i += TKVCU_THREADS) {
        const int lane = i % 32, nt = i / 32 % NT, first = i / 32 / NT * 64 + lane % 4 * 16,
                  mine = 4 * nt + lane / 8;
        const float unit = TKVCU_ROW_MAX * tkvi_from_bits((uint32_t)b.scratch[4 * NT + mine]);
        const tkvcu_f32x4 units = {{unit, unit, unit, unit}};
        uint32_t word[4];
        TKVCU_UNROLL
        for (r = 0; r < 4; r++) {
            tkvcu_f32x4 x;
            tkvcu_u32x2 limbs;
            TKVCU_UNROLL
            for (c = 0; c < 4; c++)
                x.x[c] = from.q[tkvcu_find_source<D>(mine, from.channel[first + 4 * r + c])];
            limbs = tkvcu_split_q_limbs(x, units);
            word[r] = lane / 4 % 2 ? limbs.y : limbs.x;
        }
        b.q_row[i / 32 / NT][nt][lane] = {word[0], word[1], word[2], word[3]};
    }
    for (i = tid; i < 256; i += TKVCU_THREADS) {
        if (side.kind == TKVCU_A) b.k_log[i] = tkvcu_decode_log((uint32_t)i, side.top, b.mantissa);
        if (b.side[1].kind == TKVCU_R) b.v_log[i] = tkvcu_decode_log((uint32_t)i, b.side[1].top, b.mantissa);
    }
    for (i = tid; i < D / 4 && side.kind == TKVCU_A; i += TKVCU_THREADS)
        b.max_codes[i] = ((1u << tkvcu_find_slab_width(side, i / 4)) - 1u) * 0x01010101u;
    __syncthreads();
    if (tid == 0) {
        float least = TKVCU_TINY;
        for (c = 0; c < 4 * NT && side.kind == TKVCU_A; c++)
            if (b.logit_scale[c] == b.logit_scale[c])
                least = fmaxf(least, 2.0f * b.q16_ratio[c] * b.k_log[255] * TKVCU_LEAST_SCALE);
        b.least_product = least;
    }
    for (i = tid; i < D / 4; i += TKVCU_THREADS) {
        tkvcu_f32x4 x = {{0.0f, 0.0f, 0.0f, 0.0f}};
        for (c = 0; c < 4 * NT; c++) TKVCU_UNROLL
        for (r = 0; r < 4; r++)
            x.x[r] = fmaxf(x.x[r], fabsf(b.q[i % 2][tkvcu_find_q_index<D>(c / 4, i / 2, c % 4)].x[r]));
        b.q_max[i] = x;
    }
}

/* Returns the number of exact rows from key tile `unit` to the end of the task's region. */
TKVCU_DEVICE int tkvcu_n_rows_left(const tkvcu_job &j, const tkvcu_task &k, int unit) {
    const int sinks = tkvi_min(j.view.sinks, k.visible.len);
    return (k.region == TKVCU_SINKS ? sinks : k.visible.len - j.view.sinks) - 16 * unit;
}

/* Starts the copy of K (which = 0) or V of key tile nth of the range, if it has that many. */
template <int D, int EXACT>
TKVCU_DEVICE void tkvcu_prefetch_side(const tkvcu_job &j, const tkvcu_task &k, const tkvcu_lane &me,
                                      int which, int nth) {
    if (nth < k.n) {
        uint8_t *slot = me.slot[which];
        if (EXACT) {
            const int place = k.ring_tile + nth;
            tkvcu_load_rows<D>(slot, k.from[which] + (size_t)(place / 4) * k.block + place % 4 * (32 * D),
                               tkvcu_n_rows_left(j, k, k.first + nth), me.lane);
        } else {
            tkvcu_load_side<D>(slot, tkvcu_advance(k.from[which], nth, k.block), k.codes[which],
                               k.meta[which], which == 0 || k.swizzled, me);
        }
    }
    tkvcu_cp_async_commit();
}

/* Waits for the copies. All lanes are then done with the previous side: its slot and `work` are free. */
TKVCU_DEVICE void tkvcu_wait_copies(void) {
    tkvcu_cp_async_wait<0>();
    __syncwarp();
}

/* Attends to the key range whose sides are in b. The copy of each warp's first K has begun. V is copied during the work
 * on K, and the next K during V. */
template <int D, int NT, int VG, int EXACT>
TKVCU_DEVICE void tkvcu_attend_key_range(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b,
                                         const tkvcu_lane &me, tkvcu_partials<D, NT, VG> &u) {
    const tkvcu_task &k = b.task;
    const int base = k.region == TKVCU_SINKS ? 0 : j.view.sinks;
    int nth = me.warp;
    TKVCU_ROLL
    for (; nth < k.n; nth += TKVCU_WARPS) {
        const int unit = k.first + nth;
        float s[4][NT][2], f[NT];
        tkvcu_wait_copies();
        tkvcu_prefetch_side<D, EXACT>(j, k, me, 1, nth);
        if (EXACT)
            tkvcu_score_exact_k(j, b, me, u, s[0], f, me.slot[0], base + 16 * unit,
                                tkvcu_n_rows_left(j, k, unit));
        else tkvcu_score_coded_k(j, b, me, u, s, f, me.slot[0], base + 64 * unit);
        tkvcu_wait_copies();
        tkvcu_prefetch_side<D, EXACT>(j, k, me, 0, nth + TKVCU_WARPS);
        if (EXACT) tkvcu_add_exact_v(b, me, u, s[0], f, me.slot[1]);
        else tkvcu_add_coded_v(b, me, u, s, f, me.slot[1]);
    }
}

/* Returns the number of blocks from `block` on, at most n, that have its table version. */
template <int D, int NT>
TKVCU_DEVICE int tkvcu_n_same_version(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b, int block, int n) {
    const uint8_t *version =
        j.view.version + (size_t)b.task.visible.seq * (size_t)j.view.max_blocks + (size_t)block;
    int from, i;
    for (from = 0; from < n; from += TKVCU_THREADS) {
        i = from + (int)threadIdx.x;
        b.scratch[threadIdx.x] = i < n && version[i] != version[0];
        if (!__syncthreads_or(b.scratch[threadIdx.x])) continue;
        for (i = 0; i < TKVCU_THREADS && from + i < n; i++)
            if (b.scratch[i]) return from + i;
        __syncthreads();
    }
    return n;
}

/* >>end of a section: the joined partial results of the warps go to the workspace, [slot][column][m, l, o ...] */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_write_partials(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b,
                                       const tkvcu_lane &me, tkvcu_partials<D, NT, VG> &u, uint8_t *warps,
                                       size_t warp_bytes) {
    const tkvcu_task &k = b.task;
    float *mine = (float *)(void *)me.slot[0];
    const int slot = (int)blockIdx.x + (k.entry * j.view.n_kv_heads + k.head) * TKVCU_SECTIONS + k.section;
    float *out = j.partial + ((size_t)slot * gridDim.y + blockIdx.y) * (size_t)(4 * NT * (D + 2));
    const int exact = k.section == 2;
    int nt, i, c, w;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        float *column = mine + (4 * nt + me.t) * (D + 2);
        float l = u.soft.l[nt];
        TKVCU_UNROLL
        for (c = 4; c < 32; c *= 2) l += __shfl_xor_sync(0xffffffffu, l, c);
        TKVCU_UNROLL
        for (c = 0; c < VG; c++) TKVCU_UNROLL
        for (w = 4; w < 32; w *= 2) u.zero[c][nt] += __shfl_xor_sync(0xffffffffu, u.zero[c][nt], w);
        if (me.g == 0) {
            column[0] = u.soft.m[nt];
            column[1] = l;
        }
        TKVCU_UNROLL
        for (c = 0; c < D / 16; c++) TKVCU_UNROLL
        for (i = 0; i < 2; i++)
            column[2 + 16 * c + (exact ? me.g + 8 * i : 2 * me.g + i)] =
                u.o[c][nt][i] + u.zero[16 * c * VG / D][nt]; /* zero is 0 if the format has none */
    }
    __syncthreads();
    for (i = (int)threadIdx.x; i < 4 * NT * (D + 1);
         i += TKVCU_THREADS) { /* l is treated as one more output */
        const int column = i / (D + 1), at = i % (D + 1);
        float m = TKVCU_MASKED_LOGIT, sum = 0.0f;
        for (w = 0; w < TKVCU_WARPS; w++)
            m = fmaxf(m, ((const float *)(const void *)(warps + (size_t)w * warp_bytes))[column * (D + 2)]);
        for (w = 0; w < TKVCU_WARPS; w++) {
            const float *x = (const float *)(const void *)(warps + (size_t)w * warp_bytes) + column * (D + 2);
            sum += x[1 + at] * tkvcu_ex2(x[0] - m);
        }
        out[column * (D + 2) + 1 + at] = sum;
        if (at == 0) out[column * (D + 2)] = m;
    }
    __syncthreads();
}

/* Finds the next section with key tiles of this thread block. left = 0: none. One thread calls it. */
template <class Task> TKVCU_DEVICE void tkvcu_next_section(const tkvcu_job &j, Task &task, const int *ends) {
    Task k = task;
    int per, skip;
    k.left = 0;
    if (k.next_place < k.end_place) {
        while (ends[k.entry] <= k.next_place) k.entry++;
        k.visible = tkvcu_find_visible(j, k.entry);
        per = tkvcu_n_places(k.visible);
        k.tile = k.next_place - (k.entry ? ends[k.entry - 1] : 0);
        k.head = k.tile / per;
        k.tile %= per;
        for (k.section = 0; k.tile >= tkvcu_n_places_in(k.visible, k.section); k.section++)
            k.tile -= tkvcu_n_places_in(k.visible, k.section);
        k.tile -= TKVCU_START_PLACES;
        skip = tkvi_min(tkvi_max(0, -k.tile), k.end_place - k.next_place);
        k.tile += skip;
        k.next_place += skip;
        k.left = tkvi_min(tkvcu_n_key_tiles_in(k.visible, k.section) - k.tile, k.end_place - k.next_place);
        k.next_place += k.left;
    }
    task = k;
}

/* Begins the next key range of the section: its sides, the copies of its first K, its queries. All threads call it. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_next_key_range(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b,
                                       const tkvcu_lane &me, const tkvcu_query_source<D> &from) {
    const tkvcu_task &k = b.task;
    const tkvcu_list list = j.view.list[k.visible.seq];
    const int tid = tkvcu_block_hoisting((int)threadIdx.x), coded = list.archive + list.warm;
    int region, first, ring_tile, ring_tiles, i, n = k.left, version = 0;
    for (i = tid; i < 4 * NT * D; i += TKVCU_THREADS) {
        const int column = k.column + i / D;
        from.q[tkvcu_find_source<D>(i / D, i % D)] =
            column < k.columns
                ? tkvcu_load_element(j.q, j.type, tkvcu_find_query(j, k, column) + (size_t)(i % D))
                : 0.0f;
    }
    if (k.section == 2) {
        region = k.tile < k.visible.sink_tiles ? TKVCU_SINKS : TKVCU_HOT;
        first = k.tile;
        if (region == TKVCU_HOT) first += 4 * tkvi_max(k.visible.first_block, coded) - k.visible.sink_tiles;
        else n = tkvi_min(n, k.visible.sink_tiles - k.tile);
    } else {
        region = k.section == 0 ? TKVCU_ARCHIVE : TKVCU_WARM;
        first =
            k.tile + (k.section == 0 ? k.visible.first_block : tkvi_max(k.visible.first_block, list.archive));
        version = j.view.version[(size_t)k.visible.seq * (size_t)j.view.max_blocks + (size_t)first];
        n = tkvcu_n_same_version(j, b, first, n);
    }
    /* length of the ring in key tiles; after the last place comes the first */
    ring_tiles = (region < TKVCU_SINKS ? 1 : 4) * j.view.ring[region];
    ring_tile = first % ring_tiles;
    n = tkvi_min(n, ring_tiles - ring_tile);
    __syncthreads();
    if (tid < 2) {
        const size_t at = (size_t)(version * TKVCU_REGIONS + region) * (size_t)j.view.n_kv_heads;
        b.side[tid] = j.view.side[(at + (size_t)k.head) * 2 + (size_t)tid];
        b.task.from[tid] =
            j.view.bytes[region] + (size_t)k.visible.seq * j.view.stride[region] + b.side[tid].at;
        if (region < TKVCU_SINKS) b.task.from[tid] += (size_t)ring_tile * j.view.block[region] + 2048;
        b.task.codes[tid] = (int)b.side[tid].code_bytes;
        b.task.meta[tid] = (int)(b.side[tid].bytes - b.side[tid].code_bytes);
        if (tid == 1) b.task.swizzled = (b.side[1].half_bits & 2) == 0; /* the width is even */
    }
    if (tid == 0) {
        b.task.block = j.view.block[region];
        b.task.ring_tile = ring_tile;
        b.task.region = region;
        b.task.first = first;
        b.task.n = n;
        b.task.tile += n;
        b.task.left -= n;
    }
    __syncthreads();
    if (region >= TKVCU_SINKS) tkvcu_prefetch_side<D, 1>(j, k, me, 0, me.warp);
    else tkvcu_prefetch_side<D, 0>(j, k, me, 0, me.warp);
    tkvcu_prepare_queries(j, b, from);
    __syncthreads();
}

/* Computes ends[entry], the running sum of places over the entries, 32 at a time. One warp calls it. */
TKVCU_DEVICE void tkvcu_find_ends(const tkvcu_job &j, int *ends, int lane) {
    int sum = 0, e, i;
    for (e = 0; e < j.n_entries; e += 32) {
        int n = 0;
        if (e + lane < j.n_entries) n = j.view.n_kv_heads * tkvcu_n_places(tkvcu_find_visible(j, e + lane));
        TKVCU_UNROLL
        for (i = 1; i < 32; i *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, n, (unsigned)i);
            if (lane >= i) n += before;
        }
        n += sum;
        if (e + lane < j.n_entries) ends[e + lane] = n;
        sum = __shfl_sync(0xffffffffu, n, 31);
    }
}

/* Thread blocks per multiprocessor that the register limit must allow. */
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ < 900
/* With head_dim 128, shared memory has no space for more. */
#define TKVCU_RESIDENT(D, NT) ((D) == 128 && (NT) == 2 ? 2 : 3)
#else
#define TKVCU_RESIDENT(D, NT) ((NT) == 2 ? 3 : 4)
#endif

template <int D, int NT, int VG>
__global__ void __launch_bounds__(TKVCU_THREADS, TKVCU_RESIDENT(D, NT)) tkvcu_attend_kernel(tkvcu_job j) {
    TKVCU_SHARED(uint8_t, shared);
    tkvcu_attend_shared<D, NT> &b = *(tkvcu_attend_shared<D, NT> *)(void *)shared;
    int *ends = (int *)(void *)(shared + sizeof b); /* [n_entries] */
    const int tid = (int)threadIdx.x;
    const int warp_bytes = TKVCU_SLOTS * j.slot_bytes + TKVCU_WORK(D, NT, VG);
    const int warps_at = (int)((sizeof b + sizeof(int) * (size_t)j.n_entries + 127) / 128 * 128);
    const tkvcu_lane me = tkvcu_make_lane<D>(shared + warps_at, warp_bytes, j.slot_bytes);
    if (tid < 16) b.mantissa[tid] = tkvi_bits(tkvi_log_value(1 + tid, 16));
    if (me.warp == 0) tkvcu_find_ends(j, ends, me.lane);
    __syncthreads();
    if (tid == 0) {
        const int total = ends[j.n_entries - 1];
        b.task.entry = 0;
        b.task.group = j.view.n_heads / j.view.n_kv_heads;
        b.task.columns = b.task.group * j.n_queries;
        b.task.column = 4 * NT * (int)blockIdx.y;
        b.task.next_place = tkvcu_find_first_place(total, (int)gridDim.x, (int)blockIdx.x);
        b.task.end_place = tkvcu_find_first_place(total, (int)gridDim.x, (int)blockIdx.x + 1);
        tkvcu_next_section(j, b.task, ends);
    }
    __syncthreads();
    while (b.task.left > 0) {
        tkvcu_partials<D, NT, VG> u;
        tkvcu_clear_partials(u);
        while (b.task.left > 0) {
            tkvcu_next_key_range(
                j, b, me, tkvcu_find_query_source<D>(shared + tkvcu_block_hoisting(warps_at), j.slot_bytes));
            if (b.task.region >= TKVCU_SINKS) {
                tkvcu_attend_key_range<D, NT, VG, 1>(j, b, me, u);
            } else {
                tkvcu_attend_key_range<D, NT, VG, 0>(j, b, me, u);
            }
            __syncthreads();
        }
        tkvcu_write_partials(j, b, me, u, shared + warps_at, (size_t)warp_bytes);
        if (tid == 0) tkvcu_next_section(j, b.task, ends);
        __syncthreads();
    }
}

#endif /* TKVCU_ATTEND_H */
/* ======== combine.h ======== */
/*
 * combine.h - merges the partial results of attend.h into output and log-sum-exp of each query head. One thread block
 * works on one (entry, query, head), one thread on one channel. Results in the rotated basis of R formats are summed
 * separately, and rotated back once.
 */
#ifndef TKVCU_COMBINE_H
#define TKVCU_COMBINE_H


#define TKVCU_COMBINE_THREADS 128

/* Rotates a window x[0 .. n-1] in shared memory by core/rotate.h, without signs. Uses n / 2 threads. */
TKVCU_DEVICE void tkvcu_rotate_window(float *x, int n, int log2n) {
    const int tid = (int)threadIdx.x;
    int h;
    for (h = 1; h < n; h *= 2) {
        __syncthreads();
        if (tid < n / 2) {
            const int i = tid / h * 2 * h + tid % h;
            const float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
    __syncthreads();
    if (tid < n) x[tid] *= tkvi_hadamard_norm[log2n];
    __syncthreads();
}

/* The slots of a section, in the order of the thread blocks that worked on it: first, first + 1 .. */
typedef struct tkvcu_slots {
    const float *column; /* of the first slot */
    size_t stride;       /* floats from slot to slot */
    int n;
} tkvcu_slots;

/* Returns the sum of slots [from, from + n) for channel `tid`. Loads do not wait for each other: a slot comes from far
 * away. */
TKVCU_DEVICE float tkvcu_add_slots(const tkvcu_slots &s, int from, int n, const float *weight, int tid) {
    enum { AT_ONCE = 16 };
    const float *x = s.column + (size_t)from * s.stride + 2 + (size_t)tid;
    float sum = 0.0f;
    int i, k;
    TKVCU_ROLL
    for (i = 0; i < n; i += AT_ONCE, x += AT_ONCE * s.stride) {
        float y[AT_ONCE];
        TKVCU_UNROLL
        for (k = 0; k < AT_ONCE; k++) y[k] = i + k < n ? x[(size_t)k * s.stride] : 0.0f;
        TKVCU_UNROLL
        for (k = 0; k < AT_ONCE; k++) sum += y[k] * weight[i + k]; /* weights behind the last one are 0 */
    }
    return sum;
}

/* Returns the maximum or the sum over all threads. `x` has space for a number of each warp. */
TKVCU_DEVICE float tkvcu_block_max(float y, float *x) {
    int i;
    TKVCU_UNROLL
    for (i = 16; i > 0; i /= 2) y = fmaxf(y, __shfl_xor_sync(0xffffffffu, y, i));
    if (threadIdx.x % 32 == 0) x[threadIdx.x / 32] = y;
    __syncthreads();
    for (i = 0; i < TKVCU_COMBINE_THREADS / 32; i++) y = fmaxf(y, x[i]);
    __syncthreads();
    return y;
}

TKVCU_DEVICE float tkvcu_block_sum(float y, float *x) {
    int i;
    TKVCU_UNROLL
    for (i = 16; i > 0; i /= 2) y += __shfl_xor_sync(0xffffffffu, y, i);
    if (threadIdx.x % 32 == 0) x[threadIdx.x / 32] = y;
    __syncthreads();
    for (i = 1, y = x[0]; i < TKVCU_COMBINE_THREADS / 32; i++) y += x[i];
    __syncthreads();
    return y;
}

__global__ void __launch_bounds__(TKVCU_COMBINE_THREADS)
    tkvcu_combine_kernel(tkvcu_job j, int columns, int column_tiles) {
    __shared__ int before[TKVCU_COMBINE_THREADS], all[TKVCU_COMBINE_THREADS];
    __shared__ float x[TKV_MAX_HEAD_DIM], weight[TKVCU_COMBINE_THREADS];
    const int dim = j.view.head_dim, heads = j.view.n_kv_heads, group = j.view.n_heads / heads;
    const int head = (int)blockIdx.x % j.view.n_heads, query = (int)blockIdx.x / j.view.n_heads % j.n_queries;
    const int entry = (int)blockIdx.x / j.view.n_heads / j.n_queries, tid = (int)threadIdx.x;
    const int column = query * group + head % group;
    const size_t row = (size_t)entry * (size_t)j.n_queries + (size_t)query;
    const size_t column_floats = (size_t)(dim + 2),
                 slot_floats = (size_t)(column_tiles * columns) * column_floats;
    const float *first_slot = j.partial + (size_t)column * column_floats; /* start of the column in slot 0 */
    tkvcu_visible visible;
    tkvcu_slots slots[TKVCU_SECTIONS];
    float sum[2], l = 0.0f, top = TKVCU_INITIAL_MAX, sink = TKVCU_MASKED_LOGIT;
    int e, i, c, section, place, total, blocks;
    int places_before = 0, places_total = 0;
    for (e = tid; e < j.n_entries; e += TKVCU_COMBINE_THREADS) {
        const int n = heads * tkvcu_n_places(tkvcu_find_visible(j, e));
        if (e < entry) places_before += n;
        places_total += n;
    }
    before[tid] = places_before;
    all[tid] = places_total;
    __syncthreads();
    for (i = TKVCU_COMBINE_THREADS / 2; i > 0; i /= 2) {
        if (tid < i) {
            before[tid] += before[tid + i];
            all[tid] += all[tid + i];
        }
        __syncthreads();
    }
    total = all[0];
    blocks = total < j.blocks ? total : j.blocks; /* as in tkvcu_find_first_place */
    visible = tkvcu_find_visible(j, entry);
    if (visible.seq < 0) {
        if (tid == 0 && j.entries[entry] >= 0) atomicOr(j.flags, TKVCU_FLAG_SEQUENCE);
        return;
    }
    place = before[0] + head / group * tkvcu_n_places(visible);
    first_slot += (size_t)((entry * heads + head / group) * TKVCU_SECTIONS) * slot_floats;
    TKVCU_UNROLL
    for (section = 0; section < TKVCU_SECTIONS; section++) { /* thread blocks that worked on the section */
        tkvcu_slots &k = slots[section];
        int first;
        k.stride = slot_floats;
        k.column = first_slot;
        k.n = 0;
        if (visible.key_tiles[section] == 0) continue;
        place += TKVCU_START_PLACES;
        first = tkvcu_find_worker(total, blocks, place);
        k.column += (size_t)(first + section) * slot_floats;
        place += visible.key_tiles[section];
        k.n = tkvcu_find_worker(total, blocks, place - 1) - first + 1;
        for (i = tid; i < k.n; i += TKVCU_COMBINE_THREADS) top = fmaxf(top, k.column[(size_t)i * k.stride]);
    }
    top = tkvcu_block_max(top, weight);
    if (j.sink_logits) {
        sink = j.sink_logits[head] * TKVCU_LOG2E;
        top = fmaxf(top, sink);
        if (tid == 0) l = tkvcu_ex2(sink - top);
    }
    sum[0] = sum[1] = 0.0f;
    TKVCU_UNROLL
    for (section = 0; section < TKVCU_SECTIONS; section++) {
        const tkvcu_slots &k = slots[section];
        const int rotated =
            section < 2 &&
            j.view.side[((size_t)section * (size_t)heads + (size_t)(head / group)) * 2 + 1].kind == TKVCU_R;
        TKVCU_ROLL
        for (c = 0; c < k.n; c += TKVCU_COMBINE_THREADS) {
            const int n = tkvi_min(TKVCU_COMBINE_THREADS, k.n - c);
            float part;
            weight[tid] = 0.0f;
            if (tid < n) {
                const float *p = k.column + (size_t)(c + tid) * k.stride;
                weight[tid] = tkvcu_ex2(p[0] - top);
                l += p[1] * weight[tid];
            }
            __syncthreads();
            part = tid < dim ? tkvcu_add_slots(k, c, n, weight, tid) : 0.0f;
            if (rotated) sum[1] += part;
            else sum[0] += part;
            __syncthreads();
        }
    }
    l = tkvcu_block_sum(l, weight);
    if (tid < dim) x[tid] = sum[1];
    c = 0;
    while (dim >> (c + 1)) c++;
    if (1 << c < dim) tkvcu_rotate_window(x + dim - (1 << c), 1 << c, c);
    tkvcu_rotate_window(x, 1 << c, c);
    if (tid < dim) {
        const float y = tkvi_signs[tid / 32] >> tid % 32 & 1 ? -x[tid] : x[tid];
        const float out = l != 0.0f ? (sum[0] + y) / l : 0.0f; /* a NaN in l stays a NaN */
        tkvcu_store_element(j.out, j.type,
                            (row * (size_t)j.view.n_heads + (size_t)head) * (size_t)dim + (size_t)tid, out);
    }
    if (tid == 0 && j.lse)
        j.lse[row * (size_t)j.view.n_heads + (size_t)head] =
            l != 0.0f ? 0.69314718f * (top + log2f(l)) : -INFINITY;
}

/* >>sizes and launch */
typedef struct tkvcu_attend_call {
    const void *q;
    void *out;
    float *lse;
    const float *sink_logits;
    const int32_t *seq_map;
    uint32_t *flags;
    int32_t type, n_queries, window;
    float scale, softcap;
} tkvcu_attend_call;

typedef void (*tkvcu_attend_function)(tkvcu_job);

typedef struct tkvcu_grid { /* a launch for 4 or 8 columns */
    tkvcu_attend_function kernel;
    size_t shared;
    int blocks;
} tkvcu_grid;

typedef struct tkvcu_attend_plan { /* equal for all calls */
    float *partial;
    int n_seqs;
    int slot_bytes;     /* of a slot in shared memory */
    int groups;         /* groups of V channels: 2 for KIVI with head_dim 128, else 1 */
    tkvcu_grid grid[2]; /* for 1 and 2 n-tiles */
} tkvcu_attend_plan;

/* Returns the n-tiles per thread block: 1 for up to 4 columns, else 2. Columns are queries times query heads per
 * KV head. */
static int tkvcu_n_tiles(const tkv_config *cfg, int n_queries) {
    return cfg->model.n_heads / cfg->model.n_kv_heads * n_queries > 4 ? 2 : 1;
}

static int tkvcu_n_column_tiles(const tkv_config *cfg, int n_queries) {
    const int columns = 4 * tkvcu_n_tiles(cfg, n_queries);
    return (cfg->model.n_heads / cfg->model.n_kv_heads * n_queries + columns - 1) / columns;
}

/* Computes the workspace for up to max_queries queries. */
static size_t tkvcu_compute_attend_bytes(const tkv_config *cfg, int n_seqs, int max_queries) {
    const size_t slots = TKVCU_MAX_GRID + (size_t)n_seqs * (size_t)cfg->model.n_kv_heads * TKVCU_SECTIONS;
    const size_t columns =
        (size_t)(tkvcu_n_column_tiles(cfg, max_queries) * 4 * tkvcu_n_tiles(cfg, max_queries));
    return slots * columns * (size_t)(cfg->model.head_dim + 2) * sizeof(float);
}

/* Enlarges the slots for these sides (in host memory). A and R sides get space for 4 bits per value, the most of
 * any table (core/allocate.h). So a captured launch stays valid for tables that come later. */
static void tkvcu_widen_attend_plan(tkvcu_attend_plan *s, const tkvcu_side *side, size_t n, int head_dim) {
    size_t i;
    s->slot_bytes = tkvi_max(s->slot_bytes, 32 * head_dim);
    s->groups = tkvi_max(s->groups, 1);
    for (i = 0; i < n; i++) {
        if (side[i].kind == TKVCU_KIVI) s->groups = head_dim / 64;
        if (side[i].kind == TKVCU_KIVI) s->slot_bytes = tkvi_max(s->slot_bytes, (int)side[i].bytes);
        else if (side[i].kind != TKVCU_EXACT) s->slot_bytes = tkvi_max(s->slot_bytes, 36 * head_dim);
    }
}

/* Finds the kernel and its shared memory. */
static tkvcu_attend_function tkvcu_select_attend_kernel(const tkvcu_attend_plan *s, int head_dim, int n_tiles,
                                                        size_t *shared) {
    const struct {
        int head_dim, n_tiles, groups;
        tkvcu_attend_function kernel;
        size_t fixed;
        int work;
    } row[] = {
#define TKVCU_KERNEL_(D, NT, VG)                                                                             \
    {D, NT, VG, tkvcu_attend_kernel<D, NT, VG>, sizeof(tkvcu_attend_shared<D, NT>), TKVCU_WORK(D, NT, VG)}
        TKVCU_KERNEL_(64, 1, 1),  TKVCU_KERNEL_(64, 2, 1),  TKVCU_KERNEL_(128, 1, 1),
        TKVCU_KERNEL_(128, 1, 2), TKVCU_KERNEL_(128, 2, 1), TKVCU_KERNEL_(128, 2, 2),
#undef TKVCU_KERNEL_
    };
    size_t i = 0;
    while (row[i].head_dim != head_dim || row[i].n_tiles != n_tiles || row[i].groups != s->groups) i++;
    *shared = (row[i].fixed + sizeof(int) * (size_t)s->n_seqs + 127) / 128 * 128 +
              (size_t)TKVCU_WARPS * (size_t)(TKVCU_SLOTS * s->slot_bytes + row[i].work);
    return row[i].kernel;
}

/* Computes the grids for up to max_queries queries, when all sides are known. `max_shared` is the device's shared
 * memory per thread block. Every kernel gets it as its limit, because caches share kernels. *fits becomes 0 if
 * it is too small. */
static cudaError_t tkvcu_prepare_attend(tkvcu_attend_plan *s, const tkv_config *cfg, int max_queries,
                                        int multiprocessors, int max_shared, int *fits) {
    cudaError_t e = cudaSuccess;
    int n;
    for (n = 1; n <= tkvcu_n_tiles(cfg, max_queries) && e == cudaSuccess && *fits; n++) {
        tkvcu_grid *grid = &s->grid[n - 1];
        int resident = 1;
        grid->kernel = tkvcu_select_attend_kernel(s, cfg->model.head_dim, n, &grid->shared);
        *fits = grid->shared <= (size_t)max_shared;
        if (!*fits) break;
        e = cudaFuncSetAttribute(grid->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared);
        if (e == cudaSuccess)
            e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, grid->kernel, TKVCU_THREADS,
                                                              grid->shared);
        grid->blocks = tkvi_min(TKVCU_MAX_GRID, multiprocessors * tkvi_max(1, resident));
    }
    return e;
}

/* Fills the part of a job that both attention kernels share. */
static tkvcu_job tkvcu_make_job(const tkvcu_attend_plan *s, const tkvcu_view *v, const tkvcu_attend_call *c) {
    tkvcu_job j;
    memset(&j, 0, sizeof j);
    j.view = *v;
    j.q = c->q;
    j.out = c->out;
    j.lse = c->lse;
    j.sink_logits = c->sink_logits;
    j.entries = c->seq_map;
    j.flags = c->flags;
    j.partial = s->partial;
    j.type = c->type;
    j.n_entries = s->n_seqs;
    j.n_queries = c->n_queries;
    j.window = c->window;
    j.scale = c->scale;
    j.softcap = c->softcap;
    return j;
}

/* Launches attention and combination. Allocates nothing and does not wait. */
static cudaError_t tkvcu_launch_attend(const tkvcu_attend_plan *s, const tkvcu_view *v,
                                       const tkvcu_attend_call *c, const tkv_config *cfg,
                                       cudaStream_t stream) {
    const int nt = tkvcu_n_tiles(cfg, c->n_queries), column_tiles = tkvcu_n_column_tiles(cfg, c->n_queries);
    const tkvcu_grid *grid = &s->grid[nt - 1];
    tkvcu_job j = tkvcu_make_job(s, v, c);
    j.blocks = grid->blocks;
    j.slot_bytes = s->slot_bytes;
    TKVCU_LAUNCH(grid->kernel, dim3((unsigned)j.blocks, (unsigned)column_tiles), dim3(TKVCU_THREADS),
                 grid->shared, stream, j);
    TKVCU_LAUNCH(tkvcu_combine_kernel, dim3((unsigned)(s->n_seqs * c->n_queries * v->n_heads)),
                 dim3(TKVCU_COMBINE_THREADS), 0, stream, j, 4 * nt, column_tiles);
    return cudaGetLastError();
}

#endif /* TKVCU_COMBINE_H */
/* ======== prefill.h ======== */
/*
 * prefill.h - attention of more queries than attend.h takes. A key tile's codes are converted to fp16 once, for many
 * rows.
 *
 * Key tiles, their division into ranges and the slots of the workspace are those of attend.h, and combine.h merges
 * them. Rows are the queries of the query heads that share a KV head. A thread block has 64 MT rows, a warp 16 MT,
 * and gridDim.y thread blocks cover all rows. All rows of a thread block share the cost of unpacking a key tile.
 *
 *     global --cp.async--> raw bytes of K and V, during the products of the previous key tile
 *     codes, one word of a tile at a time -> fp16 tiles: K as [token][channel], V as [channel][token]
 *     S = Q K^T, 32 tokens at a time -> softmax in registers -> P = first operand -> O += P V
 *
 * Each tile is in units of a power of two, so fp16 can represent the values of any cache. The unit of K belongs to
 * the key tile. The unit of V belongs to the sums, and grows with them. Each row of queries has its own unit. Terms
 * that are equal for all tokens of a key tile (zeros of KIVI, means of A) are not part of K's tile. They are
 * multiplied by q separately, so that only the difference from them is rounded. A's outlier is a row of K's tile, and
 * has zeros of its own for channels without codes. Values of R stay rotated; combine.h rotates their sum back.
 */
#ifndef TKVCU_PREFILL_H
#define TKVCU_PREFILL_H


#ifndef TKVCU_ON_CPU
#define TKVCU_UNROLL_2 _Pragma("unroll 2")
#else
#define TKVCU_UNROLL_2
#endif

#define TKVCU_DECODE_QUERIES 8 /* attend.h takes up to this many */
#define TKVCU_PREFILL_WARPS 4
#define TKVCU_PREFILL_THREADS (32 * TKVCU_PREFILL_WARPS)
#define TKVCU_PREFILL_MAX_ROWS 40960 /* rows of all thread blocks of a grid that the workspace allows */
#define TKVCU_STRIP 32 /* tokens whose scores are computed together, and exact tokens per copy */
#define TKVCU_EXPONENT_MIN (-110)
#define TKVCU_EXPONENT_NONE (-127) /* exponent of sums that are still empty */
/* weights are multiplied by 2^8: small ones stay normal fp16 numbers */
#define TKVCU_P_EXPONENT 8.0f

struct alignas(16) tkvcu_f16x8 { /* fp16 */
    uint32_t w[4];
};

struct tkvcu_slab { /* 16 channels of a coded side (pairs: 32), four tiles */
    int width;
    uint32_t at; /* offset in the side */
};

struct tkvcu_prefill_task {
    tkvcu_visible visible;
    int entry, head, section;
    int tile, left;            /* next key tile in the section; key tiles left in it */
    int region, version;       /* of the key range */
    int first, last;           /* key range: blocks, or groups of 16 exact rows */
    int next_place, end_place; /* in the list of all places */
    int group, all_rows;       /* query heads per KV head; rows of all thread blocks */
    int first_row, n_rows;     /* of this thread block */
};

template <int D, int MT> struct tkvcu_prefill_shared { /* shared memory of a thread block */
    uint16_t q[64 * MT * D];
    uint16_t k[64 * D], v[64 * D];
    uint8_t raw[2][68 * D];  /* 8-bit codes and KIVI's metadata, or 32 exact rows */
    uint16_t scale[2][128];  /* fp16; K by channel in the order of the side, V by [group][token] */
    uint16_t zero[2][128];   /* the same; K: in unit 1 */
    uint16_t zero_rest[D];   /* K: rounding error of zero */
    uint16_t code_offset[D]; /* K: added to a code before the scale */
    uint16_t outlier[D];     /* A: the outlier's values in the unit of K's tile, less the means */
    int outlier_slot;        /* of K's tile; TKVI_NO_OUTLIER: none */
    tkvcu_slab slab[2][D / 16];
    int coded; /* K: slabs that have codes */
    /* R with pairs: coordinates by code, plus 128; of the first and second channels */
    uint32_t pair_table[2][2];
    float q_unit[64 * MT];       /* by row: q was divided by it */
    float mean_product[64 * MT]; /* by row: q * static means, in the same unit */
    float outlier_zero[64 * MT]; /* by row: the outlier's term without codes, in the unit of K's tile */
    int query[64 * MT];          /* by row: position */
    float max_values[2][TKVCU_PREFILL_WARPS];
    int tail;
    tkvcu_side side[2];
    tkvcu_prefill_task task;
};

template <int D, int MT> struct tkvcu_row_partials { /* of a lane: rows g and g + 8 of each m-tile */
    float m[MT][2], l[MT][2];
    float o[MT][D / 8][4];
    int top; /* o is in units of 2^top */
};

/* Tokens that are loaded together. rows = 0: the key range is done. */
typedef struct tkvcu_strip {
    int at, key_tiles; /* in the region: blocks, or groups of 16 exact rows */
    int position, rows;
} tkvcu_strip;

TKVCU_DEVICE float tkvcu_exp2i(int e) {
    return tkvi_from_bits((uint32_t)(127 + tkvi_max(-126, tkvi_min(127, e))) << 23);
}

/* Swizzle: returns the offset of a 16-byte chunk in a row of a tile. 8 neighbour rows, and every second of 16
 * rows, use all banks. The pattern repeats every 16 rows. */
TKVCU_DEVICE int tkvcu_swizzle_row(int row, int chunk) { return 16 * (chunk ^ ((row ^ (row >> 3 & 1)) & 7)); }

/* >>codes to fp16 */
/* Returns 1024 + code as fp16: bytes 0 and 1, or 2 and 3. */
TKVCU_DEVICE uint32_t tkvcu_bytes_to_f16x2(uint32_t bytes, int second) {
    return tkvcu_prmt(bytes, 0x64646464u, second ? 0x4342 : 0x4140);
}

TKVCU_DEVICE uint32_t tkvcu_add_f16x2(uint32_t x, uint32_t y) { return tkvcu_hfma2(x, 0x3c003c00u, y); }

/* Unpacks words 2 g and 2 g + 1 of a tile. 16 lanes that are served together read 64 bytes of two neighbour tiles, or
 * 32. The bytes are not swizzled: two words of a bank with 3, 4, 5 and 8 bits, else one. */
template <int W> TKVCU_DEVICE void tkvcu_unpack_words(uint32_t code[2][4], const uint8_t *tile, int g) {
    tkvcu_tile<W> x;
    int v, i;
    TKVCU_UNROLL
    for (v = 0; v < (int)tkvcu_tile<W>::vectors; v++)
        tkvcu_set_words(x, v, tkvcu_load_u32x2(tile, tkvcu_find_words(W, v, g)), g / 4);
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        code[i][0] = tkvcu_take_plane<W, 0, 0>(x, i);
        code[i][1] = tkvcu_take_plane<W, 1, 0>(x, i);
        code[i][2] = tkvcu_take_plane<W, 2, 0>(x, i);
        code[i][3] = tkvcu_take_plane<W, 3, 0>(x, i);
    }
}

/* Unpacks words 2 g and 2 g + 1 of tile t of a slab. The codes of plane p are the bytes of code[..][p]. */
TKVCU_DEVICE void tkvcu_unpack_slab(uint32_t code[2][4], const tkvcu_slab &slab, const uint8_t *raw, int g,
                                    int t) {
    const uint8_t *tile = raw + slab.at + t * TKVI_TILE_BYTES(slab.width);
    switch (slab.width) {
    case 1: tkvcu_unpack_words<1>(code, tile, g); break;
    case 2: tkvcu_unpack_words<2>(code, tile, g); break;
    case 3: tkvcu_unpack_words<3>(code, tile, g); break;
    case 4: tkvcu_unpack_words<4>(code, tile, g); break;
    case 5: tkvcu_unpack_words<5>(code, tile, g); break;
    case 6: tkvcu_unpack_words<6>(code, tile, g); break;
    default: tkvcu_unpack_words<8>(code, tile, g); break;
    }
}

/* Converts K. Warps take slabs in turn. A lane converts two tokens of each plane, and the four channels of a
 * tile. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_expand_k(tkvcu_prefill_shared<D, MT> &s, int warp, int g, int t) {
    uint8_t *tile = (uint8_t *)s.k;
    int n, i, p;
    TKVCU_ROLL
    for (n = warp; n < s.coded; n += TKVCU_PREFILL_WARPS) {
        const int channel = 16 * n + 4 * t;
        const tkvcu_u32x2 scale = tkvcu_load_u32x2((const uint8_t *)(s.scale[0] + channel), 0);
        const tkvcu_u32x2 fine = tkvcu_load_u32x2((const uint8_t *)(s.code_offset + channel), 0);
        uint32_t code[2][4];
        tkvcu_unpack_slab(code, s.slab[0][n], s.raw[0], g, t);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            const int row = 2 * g + i;
            uint8_t *to = tile + row * (2 * D) + tkvcu_swizzle_row(row, 2 * n + t / 2) + t % 2 * 8;
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) {
                const uint32_t x = tkvcu_add_f16x2(tkvcu_bytes_to_f16x2(code[i][p], 0), 0xe400e400u);
                const uint32_t y = tkvcu_add_f16x2(tkvcu_bytes_to_f16x2(code[i][p], 1), 0xe400e400u);
                tkvcu_u32x2 out;
                out.x = tkvcu_hmul2(tkvcu_add_f16x2(x, fine.x), scale.x);
                out.y = tkvcu_hmul2(tkvcu_add_f16x2(y, fine.y), scale.y);
                *(tkvcu_u32x2 *)(void *)(to + 16 * p * (2 * D)) = out;
            }
        }
        if (s.outlier_slot == TKVI_NO_OUTLIER) continue;
        __syncwarp();
        if (g == 0) {
            const int row = s.outlier_slot;
            *(tkvcu_u32x2 *)(void *)(tile + row * (2 * D) + tkvcu_swizzle_row(row, 2 * n + t / 2) +
                                     t % 2 * 8) = tkvcu_load_u32x2((const uint8_t *)(s.outlier + channel), 0);
        }
    }
}

/* Makes the selector of a table look-up from the codes 0 .. 7 in a word's bytes. */
TKVCU_DEVICE uint32_t tkvcu_make_selector(uint32_t bytes) {
    const uint32_t x = bytes | bytes >> 4;
    return tkvcu_prmt(x, x, 0x0020);
}

/* Converts V. A lane converts two channels of a slab and the 16 tokens of a tile. With pairs, a code gives two
 * channels. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_expand_v(tkvcu_prefill_shared<D, MT> &s, int warp, int g, int t) {
    const tkvcu_side &side = s.side[1];
    const int pairs = side.kind == TKVCU_R && side.half_bits == 3, rotated = side.kind == TKVCU_R;
    const int slabs = pairs ? D / 32 : D / 16;
    /* subtracted from a code's fp16; R: codes are doubled here, so the middle is an integer */
    const float off = pairs ? 1152.0f : rotated ? (float)(1023 + (1 << side.half_bits / 2)) : 1024.0f;
    const uint32_t minus = tkvcu_pack_f16x2(-off, -off);
    uint8_t *tile = (uint8_t *)s.v;
    int n, i, p, h;
    TKVCU_ROLL
    for (n = warp; n < slabs; n += TKVCU_PREFILL_WARPS) {
        const int group = !rotated && n >= 4; /* 64 channels per group */
        const uint16_t *scale = s.scale[1] + 64 * group + 16 * t, *zero = s.zero[1] + 64 * group + 16 * t;
        uint32_t code[2][4];
        tkvcu_unpack_slab(code, s.slab[1][n], s.raw[1], g, t);
        if (rotated && !pairs) {
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) {
                code[0][p] <<= 1;
                code[1][p] <<= 1;
            }
        }
        TKVCU_ROLL
        for (h = 0; h <= pairs; h++) TKVCU_UNROLL
        for (p = 0; p < 4; p += 2) { /* eight tokens */
            const tkvcu_f16x8 by = *(const tkvcu_f16x8 *)(const void *)(scale + 4 * p);
            const tkvcu_f16x8 plus = *(const tkvcu_f16x8 *)(const void *)(zero + 4 * p);
            TKVCU_UNROLL
            for (i = 0; i < 2; i++) {
                const int row = 2 * g + i;
                uint8_t *to = tile + 128 * ((pairs ? 32 : 16) * n + 16 * h + row);
                tkvcu_f16x8 out;
                int k;
                TKVCU_UNROLL
                for (k = 0; k < 4; k++) {
                    uint32_t bytes = code[i][p + k / 2];
                    if (pairs)
                        bytes =
                            tkvcu_prmt(s.pair_table[h][0], s.pair_table[h][1], tkvcu_make_selector(bytes));
                    out.w[k] = tkvcu_hfma2(tkvcu_add_f16x2(tkvcu_bytes_to_f16x2(bytes, k % 2), minus),
                                           by.w[k], plus.w[k]);
                }
                *(tkvcu_f16x8 *)(void *)(to + tkvcu_swizzle_row(row, 2 * t + p / 2)) = out;
            }
        }
    }
}

/* Multiplies two exact values by a power of two. Returns fp16. */
TKVCU_DEVICE uint32_t tkvcu_rescale_f16x2(uint32_t x, int bf16, float by) {
    if (bf16) return tkvcu_pack_f16x2(tkvcu_bf16_lo(x) * by, tkvcu_bf16_hi(x) * by);
    return by == 1.0f ? x : tkvcu_pack_f16x2(tkvcu_f16_lo(x) * by, tkvcu_f16_lo(x >> 16) * by);
}

/* Converts exact rows. Missing rows become zeros: their weights are 0, and 0 * NaN would be NaN. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_expand_exact(tkvcu_prefill_shared<D, MT> &s, int which, int rows, float by, int tid) {
    const int bf16 = s.side[which].bf16;
    const uint8_t *raw = s.raw[which];
    uint8_t *tile = (uint8_t *)(which ? s.v : s.k);
    int i, k;
    TKVCU_ROLL
    for (i = tid; i < TKVCU_STRIP * D / 8; i += TKVCU_PREFILL_THREADS) {
        tkvcu_f16x8 x = {{0, 0, 0, 0}}, y = {{0, 0, 0, 0}};
        if (!which) {
            const int row = i / (D / 8), chunk = i % (D / 8);
            if (row < rows) x = *(const tkvcu_f16x8 *)(const void *)(raw + row * (2 * D) + 16 * chunk);
            TKVCU_UNROLL
            for (k = 0; k < 4; k++) x.w[k] = tkvcu_rescale_f16x2(x.w[k], bf16, by);
            *(tkvcu_f16x8 *)(void *)(tile + row * (2 * D) + tkvcu_swizzle_row(row, chunk)) = x;
        } else if (i < TKVCU_STRIP * D / 16) { /* two channels of eight tokens are transposed */
            const int row = 2 * (i % (D / 2)), chunk = i / (D / 2);
            TKVCU_UNROLL
            for (k = 0; k < 4; k++) {
                const int token = 8 * chunk + 2 * k;
                const uint8_t *at = raw + token * (2 * D) + 2 * row;
                uint32_t a = token < rows ? *(const uint32_t *)(const void *)at : 0;
                uint32_t b = token + 1 < rows ? *(const uint32_t *)(const void *)(at + 2 * D) : 0;
                a = tkvcu_rescale_f16x2(a, bf16, by);
                b = tkvcu_rescale_f16x2(b, bf16, by);
                x.w[k] = tkvcu_prmt(a, b, 0x5410);
                y.w[k] = tkvcu_prmt(a, b, 0x7632);
            }
            *(tkvcu_f16x8 *)(void *)(tile + row * 128 + tkvcu_swizzle_row(row, chunk)) = x;
            *(tkvcu_f16x8 *)(void *)(tile + (row + 1) * 128 + tkvcu_swizzle_row(row + 1, chunk)) = y;
        }
    }
}

/* >>scales of a key tile */
/* Tells whether the unit of a side depends on its values. */
TKVCU_DEVICE int tkvcu_is_measured(const tkvcu_side &side) {
    return side.kind == TKVCU_KIVI || (side.kind == TKVCU_EXACT && side.bf16);
}

/* Returns the exponent of the unit that keeps a side's values below 2^15. Logarithmic scales are below 2^top.
 * Their factors are below 2^6 (A) or 2^3 (R). fp16 sides need no unit. */
TKVCU_DEVICE int tkvcu_find_exponent(const tkvcu_side &side, float most) {
    if (side.kind == TKVCU_A) return side.top - 9;
    if (side.kind == TKVCU_R) return side.top - 12;
    if (!tkvcu_is_measured(side)) return 0;
    return tkvi_max((int)(tkvi_bits(most) >> 23) - 127 - 14, TKVCU_EXPONENT_MIN);
}

TKVCU_DEVICE float tkvcu_load_f16(const uint8_t *p) {
    return tkvcu_f16_lo(*(const uint16_t *)(const void *)p);
}

/* Scale and zero of this thread's channel of K or token of V, and a bound of the values. */
struct tkvcu_side_scale {
    float scale, zero, most;
};

template <int D, int MT>
TKVCU_DEVICE tkvcu_side_scale tkvcu_load_side_scale(tkvcu_prefill_shared<D, MT> &s, int which, int rows,
                                                    int tid) {
    const tkvcu_side &side = s.side[which];
    const uint8_t *meta = s.raw[which] + (side.kind == TKVCU_EXACT ? 0 : side.code_bytes);
    tkvcu_side_scale x = {0.0f, 0.0f, 0.0f};
    int i;
    if (side.kind == TKVCU_KIVI && tid < D) { /* tokens times groups of V = D */
        const float codes = (float)((1 << side.half_bits / 2) - 1);
        x.scale = tkvcu_load_f16(meta + 2 * tid);
        x.zero = tkvcu_load_f16(meta + 2 * D + 2 * tid);
        x.most = x.scale * codes + (which ? fabsf(x.zero) : 0.0f);
        if (!which) { /* K: zero of the middle code */
            s.code_offset[tid] = (uint16_t)tkvcu_pack_f16x2(-0.5f * codes, 0.0f);
            x.zero = fmaf(0.5f * codes, x.scale, x.zero);
        }
    } else if (side.kind == TKVCU_A && tid < D) {
        const int width = s.slab[0][tid / 16].width, low = meta[tid], high = meta[D + tid];
        const float fine =
            (float)tkvi_signed_byte(high) / (float)tkvi_a_unit[width] - 0.5f * (float)((1 << width) - 1);
        x.scale = tkvi_log_value(low, side.top);
        s.code_offset[tid] = (uint16_t)tkvcu_pack_f16x2(fine, 0.0f);
        x.zero = tkvcu_f16_lo((uint32_t)(low | high << 8)); /* channel without codes: its mean */
    } else if (side.kind == TKVCU_R && tid < TKVI_BLOCK) {
        x.scale = tkvi_log_value(meta[tid], side.top) * (side.half_bits == 3 ? 1.0f / 64.0f : 0.5f);
    } else if (side.kind == TKVCU_EXACT && side.bf16) {
        int most = 0;
        TKVCU_ROLL
        for (i = tid; i < rows * D; i += TKVCU_PREFILL_THREADS)
            most = tkvi_max(most, ((const uint16_t *)(const void *)s.raw[which])[i] & 0x7fff);
        x.most = tkvcu_bf16_lo((uint32_t)most);
    }
    return x;
}

/* Reads the outlier of K's side, in units of 1 / by. All lanes of a warp call it. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_load_outlier_row(tkvcu_prefill_shared<D, MT> &s, float by, int tid) {
    const tkvcu_side &side = s.side[0];
    const uint8_t *row = s.raw[0] + side.code_bytes + 2 * D;
    int head = TKVI_NO_OUTLIER;
    if (side.kind == TKVCU_A) {
        head = tkvcu_load_outlier_head(row, tid % 32);
        if (tid < D)
            s.outlier[tid] = (uint16_t)tkvcu_pack_f16x2(
                by * tkvi_outlier_value(row[tid], 0.5f * tkvi_log_value(head >> 7, side.top), 0.0f), 0.0f);
    }
    if (tid == 0) s.outlier_slot = tkvi_min(head & 127, TKVI_NO_OUTLIER);
}

/* Computes the fp16 scales: in units of 2^x for K, where x is returned, and of 2^u.top for V. u.top grows if
 * needed. All threads call it. */
template <int D, int MT>
TKVCU_DEVICE int tkvcu_prepare_scales(tkvcu_prefill_shared<D, MT> &s, tkvcu_row_partials<D, MT> &u, int rows,
                                      int tid) {
    const tkvcu_side_scale k = tkvcu_load_side_scale(s, 0, rows, tid),
                           v = tkvcu_load_side_scale(s, 1, rows, tid);
    float most[2] = {k.most, v.most};
    int which, i, c, mt, exponent[2];
    if (tkvcu_is_measured(s.side[0]) || tkvcu_is_measured(s.side[1])) {
        TKVCU_UNROLL
        for (which = 0; which < 2; which++) {
            TKVCU_UNROLL
            for (i = 1; i < 32; i *= 2)
                most[which] = fmaxf(most[which], __shfl_xor_sync(0xffffffffu, most[which], i));
            if (tid % 32 == 0) s.max_values[which][tid / 32] = most[which];
        }
        __syncthreads();
        TKVCU_UNROLL
        for (which = 0; which < 2; which++) TKVCU_UNROLL
        for (i = 0; i < TKVCU_PREFILL_WARPS; i++) most[which] = fmaxf(most[which], s.max_values[which][i]);
    }
    exponent[0] = tkvcu_find_exponent(s.side[0], most[0]);
    if (tkvcu_is_measured(s.side[0]))
        exponent[0] = tkvi_max(exponent[0],
                               -40); /* smaller units are not needed in fp16; zero * 2^40 must stay finite */
    tkvcu_load_outlier_row(s, tkvcu_exp2i(-exponent[0]), tid);
    exponent[1] = tkvcu_find_exponent(s.side[1], most[1]);
    if (exponent[1] > u.top) {
        const float by = tkvcu_exp2i(u.top - exponent[1]);
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (c = 0; c < D / 8; c++) TKVCU_UNROLL
        for (i = 0; i < 4; i++) u.o[mt][c][i] *= by;
        u.top = exponent[1];
    }
    if (tid < D) {
        const float k_by = tkvcu_exp2i(-exponent[0]), v_by = tkvcu_exp2i(-u.top);
        const uint32_t zero = tkvcu_pack_f16x2(k.zero, 0.0f);
        s.scale[0][tid] = (uint16_t)tkvcu_pack_f16x2(k.scale * k_by, 0.0f);
        s.scale[1][tid] = (uint16_t)tkvcu_pack_f16x2(v.scale * v_by, 0.0f);
        s.zero[0][tid] = (uint16_t)zero;
        s.zero[1][tid] = (uint16_t)tkvcu_pack_f16x2(v.zero * v_by, 0.0f);
        s.zero_rest[tid] = (uint16_t)tkvcu_pack_f16x2(k.zero - tkvcu_f16_lo(zero), 0.0f);
    }
    return exponent[0];
}

/* >>products */
/* Loads second operands of two n-tiles: rows first .. first + 15 of a tile, k = 16 step and on. */
TKVCU_DEVICE void tkvcu_load_operands(uint32_t b[4], const uint16_t *tile, int stride, int first, int step,
                                      int lane) {
    const int row = lane % 8 + lane / 16 * 8;
    tkvcu_ldmatrix_x4(b, (const uint8_t *)tile + first * stride + row * stride +
                             tkvcu_swizzle_row(row, 2 * step + lane / 8 % 2));
}

/* Loads first operands: rows of q, channels 16 step and on. */
template <int D>
TKVCU_DEVICE void tkvcu_load_q_operand(uint32_t a[4], const uint16_t *q, int first, int step, int lane) {
    const int row = lane % 16;
    tkvcu_ldmatrix_x4(a, (const uint8_t *)q + first * (2 * D) + row * (2 * D) +
                             tkvcu_swizzle_row(row, 2 * step + lane / 16));
}

TKVCU_DEVICE uint32_t tkvcu_load_f16x2(const uint16_t *p) { return *(const uint32_t *)(const void *)p; }

/* Multiplies terms that are equal for all tokens of a key tile, in the unit of K's tile. Odd columns of the second
 * operand are the outlier, for channels without codes. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_multiply_zeros(tkvcu_prefill_shared<D, MT> &s, float zeros[MT][2], int first,
                                       float by, int lane) {
    const int coded = s.side[0].kind != TKVCU_EXACT, from = s.side[0].kind == TKVCU_KIVI ? 0 : s.coded;
    const int odd = s.side[0].kind == TKVCU_A && lane / 4 % 2;
    float sum[MT][4];
    int c, mt, i;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) sum[mt][0] = sum[mt][1] = sum[mt][2] = sum[mt][3] = 0.0f;
    TKVCU_ROLL
    for (c = from; coded && c < D / 16; c++) {
        const int at = 16 * c + 2 * (lane % 4);
        const uint16_t *zero = odd ? s.outlier : s.zero[0];
        const uint32_t b[2] = {tkvcu_load_f16x2(zero + at), tkvcu_load_f16x2(zero + at + 8)};
        const uint32_t rest[2] = {odd ? 0 : tkvcu_load_f16x2(s.zero_rest + at),
                                  odd ? 0 : tkvcu_load_f16x2(s.zero_rest + at + 8)};
        uint32_t a[4];
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) {
            tkvcu_load_q_operand<D>(a, s.q, first + 16 * mt, c, lane);
            tkvcu_mma_f16(sum[mt], a, b);
            tkvcu_mma_f16(sum[mt], a, rest);
        }
    }
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const int row = first + 16 * mt + 8 * i + lane / 4;
        zeros[mt][i] = (sum[mt][2 * i] + s.mean_product[row]) * by;
        if (lane % 4 == 0) s.outlier_zero[row] = fmaf(s.mean_product[row], by, sum[mt][2 * i + 1]);
    }
    __syncwarp();
}

/* Updates the running maxima of the rows. They move only if one grows by more than 4. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_update_row_max(tkvcu_row_partials<D, MT> &u, float most[MT][2]) {
    int mt, i, c, grew = 0;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        float x = most[mt][i];
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        most[mt][i] = x;
        grew |= x > u.m[mt][i] + 4.0f;
    }
    if (!__any_sync(0xffffffffu, grew)) return;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const float m = fmaxf(u.m[mt][i], most[mt][i]), by = tkvcu_ex2(u.m[mt][i] - m);
        u.m[mt][i] = m;
        u.l[mt][i] *= by;
        TKVCU_UNROLL
        for (c = 0; c < D / 8; c++) {
            u.o[mt][c][2 * i] *= by;
            u.o[mt][c][2 * i + 1] *= by;
        }
    }
}

/* Attends to the tokens in the tiles, for the rows of this warp. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_attend_strip(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s,
                                     tkvcu_row_partials<D, MT> &u, const tkvcu_strip &strip, int exponent,
                                     int warp, int lane) {
    const tkvcu_prefill_task &task = s.task;
    const int first = 16 * MT * warp, g = lane / 4, t = lane % 4;
    const int oldest = s.query[0], newest = s.query[task.n_rows - 1];
    const int masked = strip.position + strip.rows - 1 > oldest || strip.rows % TKVCU_STRIP ||
                       (j.window && strip.position <= newest - j.window);
    const float units = tkvcu_exp2i(exponent);
    const int slabs = s.coded;
    float zeros[MT][2];
    int at, c, n, mt, i;
    tkvcu_multiply_zeros(s, zeros, first, tkvcu_exp2i(-exponent), lane);
    TKVCU_ROLL
    for (at = 0; at < strip.rows; at += TKVCU_STRIP) {
        float x[MT][TKVCU_STRIP / 8][4], most[MT][2], logit_scale[MT][2];
        uint32_t p[TKVCU_STRIP / 16][MT][4]; /* weights as first operands */
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (n = 0; n < TKVCU_STRIP / 8; n++) TKVCU_UNROLL
        for (i = 0; i < 4; i++) x[mt][n][i] = zeros[mt][i / 2];
        if (at <= s.outlier_slot && s.outlier_slot < at + TKVCU_STRIP) {
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
            for (n = 0; n < TKVCU_STRIP / 8; n++) TKVCU_UNROLL
            for (i = 0; i < 4; i++)
                if (at + 8 * n + 2 * t + i % 2 == s.outlier_slot)
                    x[mt][n][i] = s.outlier_zero[first + 16 * mt + 8 * (i / 2) + g];
        }
        TKVCU_UNROLL_2
        for (c = 0; c < slabs; c++) {
            uint32_t a[MT][4], b[4];
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) tkvcu_load_q_operand<D>(a[mt], s.q, first + 16 * mt, c, lane);
            TKVCU_UNROLL
            for (n = 0; n < TKVCU_STRIP / 8; n += 2) {
                tkvcu_load_operands(b, s.k, 2 * D, at + 8 * n, c, lane);
                TKVCU_UNROLL
                for (mt = 0; mt < MT; mt++) {
                    tkvcu_mma_f16(x[mt][n], a[mt], b);
                    tkvcu_mma_f16(x[mt][n + 1], a[mt], b + 2);
                }
            }
        }
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (i = 0; i < 2; i++) /* not 0: 0 * -inf would be NaN */
            logit_scale[mt][i] = fmaxf(units * s.q_unit[first + 16 * mt + 8 * i + g], 1.2e-38f);
        if (j.softcap > 0.0f) {
            const float cap = fabsf(j.scale) / j.softcap;
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
            for (n = 0; n < TKVCU_STRIP / 8; n++) TKVCU_UNROLL
            for (i = 0; i < 4; i++) x[mt][n][i] = tanhf(x[mt][n][i] * (logit_scale[mt][i / 2] * cap));
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) logit_scale[mt][0] = logit_scale[mt][1] = 1.0f;
        }
        if (masked) {
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
            for (i = 0; i < 2; i++) {
                const int query =
                    s.query[first + 16 * mt + 8 * i + g] - strip.position - at; /* index among the tokens */
                const int last = tkvi_min(query, strip.rows - at - 1),
                          before = query - (j.window ? j.window : query + 1);
                TKVCU_UNROLL
                for (n = 0; n < TKVCU_STRIP / 8; n++) TKVCU_UNROLL
                for (c = 0; c < 2; c++) {
                    const int token = 8 * n + 2 * t + c;
                    if (token > last || token <= before) x[mt][n][2 * i + c] = -INFINITY;
                }
            }
        }
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            float top = fmaxf(x[mt][0][2 * i], x[mt][0][2 * i + 1]);
            TKVCU_UNROLL
            for (n = 1; n < TKVCU_STRIP / 8; n++)
                top = fmaxf(fmaxf(top, x[mt][n][2 * i]), x[mt][n][2 * i + 1]);
            logit_scale[mt][i] *= (j.softcap > 0.0f ? j.softcap : fabsf(j.scale)) * TKVCU_LOG2E;
            most[mt][i] = fmaxf(top * logit_scale[mt][i], TKVCU_MASKED_LOGIT);
        }
        tkvcu_update_row_max(u, most);
        TKVCU_UNROLL
        for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
        for (n = 0; n < TKVCU_STRIP / 8; n++) {
            float w[4];
            TKVCU_UNROLL
            for (i = 0; i < 4; i++) {
                w[i] =
                    tkvcu_ex2(fmaf(x[mt][n][i], logit_scale[mt][i / 2], TKVCU_P_EXPONENT - u.m[mt][i / 2]));
                u.l[mt][i / 2] += w[i];
            }
            p[n / 2][mt][n % 2 * 2] = tkvcu_pack_f16x2(w[0], w[1]);
            p[n / 2][mt][n % 2 * 2 + 1] = tkvcu_pack_f16x2(w[2], w[3]);
        }
        TKVCU_UNROLL
        for (n = 0; n < TKVCU_STRIP / 16; n++) TKVCU_UNROLL
        for (c = 0; c < D / 8; c += 2) {
            uint32_t b[4];
            tkvcu_load_operands(b, s.v, 128, 8 * c, at / 16 + n, lane);
            TKVCU_UNROLL
            for (mt = 0; mt < MT; mt++) {
                tkvcu_mma_f16(u.o[mt][c], p[n][mt], b);
                tkvcu_mma_f16(u.o[mt][c + 1], p[n][mt], b + 2);
            }
        }
    }
}

/* >>key ranges: key tiles of one region and one table version */
/* Stores the queries of the rows, each warp its own. Channels are in the order of K in the key range. The
 * largest of a row is below 2. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_store_queries(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s, int warp,
                                      int lane) {
    const tkvcu_prefill_task &task = s.task;
    const int32_t table = s.side[0].kind == TKVCU_A ? s.side[0].table : -1;
    const uint8_t *order = table >= 0 ? j.view.order + table : NULL;
    const float sign = j.scale < 0.0f ? -1.0f : 1.0f;
    enum { AT_ONCE = 4 }; /* rows: their loads do not wait for each other */
    int first, r, i;
    TKVCU_ROLL
    for (first = 16 * MT * warp; first < 16 * MT * (warp + 1); first += AT_ONCE) {
        float x[AT_ONCE][D / 32];
        TKVCU_UNROLL
        for (r = 0; r < AT_ONCE; r++) {
            const int column = task.first_row + first + r;
            const size_t row = (size_t)task.entry * (size_t)j.n_queries + (size_t)(column / task.group);
            const size_t head = (size_t)(task.head * task.group + column % task.group);
            const size_t at = (row * (size_t)j.view.n_heads + head) * D;
            TKVCU_UNROLL
            for (i = 0; i < D / 32; i++) {
                const int c = lane + 32 * i;
                x[r][i] = column < task.all_rows
                              ? tkvcu_load_element(j.q, j.type, at + (size_t)(order ? order[c] : c))
                              : 0.0f;
            }
        }
        TKVCU_UNROLL
        for (r = 0; r < AT_ONCE; r++) {
            const int mine = first + r;
            float most = 0.0f, bias = 0.0f, by;
            int exponent;
            TKVCU_UNROLL
            for (i = 0; i < D / 32; i++) most = fmaxf(most, fabsf(x[r][i]));
            TKVCU_UNROLL
            for (i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
            exponent = tkvi_max(TKVCU_EXPONENT_MIN, tkvi_min(126, (int)(tkvi_bits(most) >> 23) - 127));
            by = sign * tkvcu_exp2i(-exponent);
            TKVCU_UNROLL
            for (i = 0; i < D / 32; i++) {
                const int c = lane + 32 * i;
                const uint32_t half = tkvcu_pack_f16x2(x[r][i] * by, 0.0f);
                s.q[(mine * (2 * D) + tkvcu_swizzle_row(mine, c / 8)) / 2 + c % 8] = (uint16_t)half;
                if (order)
                    bias += tkvcu_f16_lo(half) * j.view.mean[table + c]; /* q as rounded for the products */
            }
            TKVCU_UNROLL
            for (i = 16; i > 0; i /= 2) bias += __shfl_xor_sync(0xffffffffu, bias, i);
            if (lane == 0) {
                s.q_unit[mine] = tkvcu_exp2i(exponent);
                s.mean_product[mine] = bias;
                s.query[mine] = task.visible.len - j.n_queries + (task.first_row + mine) / task.group;
            }
        }
    }
}

/* Describes a slab of a side: its width and place (core/tile.h). One thread per slab. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_store_slab(tkvcu_prefill_shared<D, MT> &s, int which, int n) {
    const tkvcu_side &side = s.side[which];
    const int own = side.half_bits == 3 ? 3 : side.half_bits / 2; /* KIVI and R: one width */
    const int all = side.half_bits == 3 ? D / 32 : D / 16;
    tkvcu_slab slab = {0, 0};
    int width, before = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int here = side.kind == TKVCU_A ? (width <= 6 ? side.slabs[width] : 0) : width == own ? all : 0;
        const int mine = tkvi_max(0, tkvi_min(n - before, here)); /* slabs of this width before slab n */
        if (n >= before && n < before + here) slab.width = width;
        slab.at += (uint32_t)(4 * mine * TKVI_TILE_BYTES(width));
        before += here;
    }
    s.slab[which][n] = slab;
    if (n == 0 && which == 0) s.coded = side.kind == TKVCU_EXACT ? D / 16 : before;
}

/* Begins the next key range of the section: its sides and queries. All threads call it. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_next_prefill_range(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s, int tid) {
    const tkvcu_prefill_task &k = s.task;
    const tkvcu_list list = j.view.list[k.visible.seq];
    const int coded = list.archive + list.warm;
    int region, first, i, n = k.left, version = 0;
    if (tid == 0) s.tail = 0;
    __syncthreads();
    if (k.section == 2) {
        region = k.tile < k.visible.sink_tiles ? TKVCU_SINKS : TKVCU_HOT;
        first = k.tile;
        if (region == TKVCU_HOT) first += 4 * tkvi_max(k.visible.first_block, coded) - k.visible.sink_tiles;
        else n = tkvi_min(n, k.visible.sink_tiles - k.tile);
    } else {
        const uint8_t *of = j.view.version + (size_t)k.visible.seq * (size_t)j.view.max_blocks;
        region = k.section == 0 ? TKVCU_ARCHIVE : TKVCU_WARM;
        first =
            k.tile + (k.section == 0 ? k.visible.first_block : tkvi_max(k.visible.first_block, list.archive));
        version = of[first];
        TKVCU_ROLL
        for (i = tid; i < n; i += TKVCU_PREFILL_THREADS)
            if (of[first + i] != version) {
                atomicMax(&s.tail, n - i);
                break;
            }
        __syncthreads();
        n -= s.tail;
    }
    if (tid < 2) s.side[tid] = *tkvcu_find_side(&j.view, version, region, k.head, tid);
    __syncthreads();
    if (tid == 0) {
        s.task.region = region;
        s.task.first = first;
        s.task.last = first + n;
        s.task.tile += n;
        s.task.left -= n;
    }
    if (tid < D / 8) tkvcu_store_slab(s, tid / (D / 16), tid % (D / 16));
    if (tid < 4) {
        const int8_t *level = tkvi_r_pairs + tid / 2 * 16 + tid % 2 * 4;
        uint32_t bytes = 0;
        for (i = 0; i < 4; i++) bytes |= (uint32_t)(level[i] + 128) << 8 * i;
        s.pair_table[tid / 2][tid % 2] = bytes;
    }
    tkvcu_store_queries(j, s, tid / 32, tid % 32);
    __syncthreads();
}

/* Finds the next tokens that any row can see, from key tile `at` on. */
template <int D, int MT>
TKVCU_DEVICE tkvcu_strip tkvcu_next_strip(const tkvcu_job &j, const tkvcu_prefill_shared<D, MT> &s, int at) {
    const tkvcu_prefill_task &k = s.task;
    const int exact = k.region >= TKVCU_SINKS, base = k.region == TKVCU_SINKS ? 0 : j.view.sinks;
    const int there =
        k.region == TKVCU_SINKS ? tkvi_min(j.view.sinks, k.visible.len) : k.visible.len - j.view.sinks;
    const int oldest = s.query[0], newest = s.query[k.n_rows - 1];
    tkvcu_strip x = {at, 0, 0, 0};
    for (; x.at < k.last; x.at += x.key_tiles) {
        x.key_tiles = exact ? tkvi_min(TKVCU_STRIP / 16 - x.at % (TKVCU_STRIP / 16), k.last - x.at) : 1;
        x.position = base + (exact ? 16 : TKVI_BLOCK) * x.at;
        x.rows = exact ? tkvi_min(16 * x.key_tiles, there - 16 * x.at) : TKVI_BLOCK;
        if (x.position <= newest && (j.window == 0 || x.position + x.rows - 1 > oldest - j.window)) return x;
    }
    x.rows = 0;
    return x;
}

/* Starts the copy of the bytes of a strip. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_fetch_strip(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s,
                                    const tkvcu_strip &strip, int tid) {
    const tkvcu_prefill_task &k = s.task;
    const int exact = k.region >= TKVCU_SINKS;
    const uint8_t *block =
        tkvcu_find_block(&j.view, k.region, k.visible.seq, exact ? strip.at / (TKVI_BLOCK / 16) : strip.at);
    int which, i;
    if (strip.rows == 0) return;
    TKVCU_UNROLL
    for (which = 0; which < 2; which++) {
        const tkvcu_side &side = s.side[which];
        const uint8_t *from = block + side.at + (exact ? strip.at % (TKVI_BLOCK / 16) * (32 * D) : 0);
        const int bytes = exact ? strip.rows * (2 * D) : (int)side.bytes;
        for (i = 16 * tid; i < bytes; i += 16 * TKVCU_PREFILL_THREADS)
            tkvcu_cp_async16(s.raw[which] + i, from + i);
    }
    tkvcu_cp_async_commit();
}

/* Attends to the task's key range. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_attend_prefill_range(const tkvcu_job &j, tkvcu_prefill_shared<D, MT> &s,
                                             tkvcu_row_partials<D, MT> &u, int tid) {
    tkvcu_strip strip = tkvcu_next_strip(j, s, s.task.first);
    tkvcu_fetch_strip(j, s, strip, tid);
    TKVCU_ROLL
    while (strip.rows > 0) {
        int exponent, me;
        tkvcu_cp_async_wait<0>();
        __syncthreads();
        exponent = tkvcu_prepare_scales(s, u, strip.rows, tkvcu_block_hoisting(tid));
        __syncthreads();
        me = tkvcu_block_hoisting(tid);
        if (s.task.region >= TKVCU_SINKS) {
            tkvcu_expand_exact(s, 0, strip.rows, tkvcu_exp2i(-exponent), me);
            tkvcu_expand_exact(s, 1, strip.rows, tkvcu_exp2i(-u.top), me);
        } else {
            tkvcu_expand_k(s, me / 32, me % 8, me % 32 / 8);
            tkvcu_expand_v(s, me / 32, me % 8, me % 32 / 8);
        }
        __syncthreads();
        tkvcu_fetch_strip(j, s, tkvcu_next_strip(j, s, strip.at + strip.key_tiles),
                          tkvcu_block_hoisting(tid));
        me = tkvcu_block_hoisting(tid);
        if (16 * MT * (me / 32) < s.task.n_rows)
            tkvcu_attend_strip(j, s, u, strip, exponent, me / 32, me % 32);
        strip = tkvcu_next_strip(j, s, strip.at + strip.key_tiles); /* computed again: saves registers */
    }
    __syncthreads();
}

/* >>sections */
template <int D, int MT> TKVCU_DEVICE void tkvcu_clear_row_partials(tkvcu_row_partials<D, MT> &u) {
    int mt, i, c;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) {
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            u.m[mt][i] = TKVCU_INITIAL_MAX;
            u.l[mt][i] = 0.0f;
        }
        TKVCU_UNROLL
        for (c = 0; c < D / 8; c++) u.o[mt][c][0] = u.o[mt][c][1] = u.o[mt][c][2] = u.o[mt][c][3] = 0.0f;
    }
    u.top = TKVCU_EXPONENT_NONE;
}

/* Writes the partial results of a section to the workspace: [slot][rows of all thread blocks][m, l, o ...]. */
template <int D, int MT>
TKVCU_DEVICE void tkvcu_write_row_partials(const tkvcu_job &j, const tkvcu_prefill_shared<D, MT> &s,
                                           const tkvcu_row_partials<D, MT> &u, int tid) {
    const tkvcu_prefill_task &k = s.task;
    const int slot = (int)blockIdx.x + (k.entry * j.view.n_kv_heads + k.head) * TKVCU_SECTIONS + k.section;
    float *out = j.partial + ((size_t)slot * gridDim.y + blockIdx.y) * (size_t)(64 * MT * (D + 2));
    const float unit = tkvcu_exp2i(u.top);
    const int warp = tid / 32, lane = tid % 32;
    int mt, i, c, by;
    TKVCU_UNROLL
    for (mt = 0; mt < MT; mt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const int row = 16 * (MT * warp + mt) + 8 * i + lane / 4;
        float *to = out + row * (D + 2), l = u.l[mt][i];
        TKVCU_UNROLL
        for (by = 1; by < 4; by *= 2) l += __shfl_xor_sync(0xffffffffu, l, by);
        if (row >= k.n_rows) continue;
        if (lane % 4 == 0) {
            to[0] = u.m[mt][i] - TKVCU_P_EXPONENT;
            to[1] = l;
        }
        TKVCU_UNROLL
        for (c = 0; c < D / 8; c++) {
            to[2 + 8 * c + 2 * (lane % 4)] = u.o[mt][c][2 * i] * unit;
            to[3 + 8 * c + 2 * (lane % 4)] = u.o[mt][c][2 * i + 1] * unit;
        }
    }
}

/* Thread blocks per multiprocessor that the register limit must allow. */
#define TKVCU_PREFILL_RESIDENT(D, MT) ((D) == 128 && (MT) == 2 ? 2 : 3)

template <int D, int MT>
__global__ void __launch_bounds__(TKVCU_PREFILL_THREADS, TKVCU_PREFILL_RESIDENT(D, MT))
    tkvcu_prefill_kernel(tkvcu_job j) {
    TKVCU_SHARED(uint8_t, shared);
    tkvcu_prefill_shared<D, MT> &s = *(tkvcu_prefill_shared<D, MT> *)(void *)shared;
    int *ends = (int *)(void *)(shared + sizeof s); /* [n_entries] */
    const int tid = (int)threadIdx.x;
    if (tid < 32) tkvcu_find_ends(j, ends, tid);
    __syncthreads();
    if (tid == 0) {
        const int total = ends[j.n_entries - 1];
        tkvcu_prefill_task &k = s.task;
        k.entry = 0;
        k.group = j.view.n_heads / j.view.n_kv_heads;
        k.all_rows = k.group * j.n_queries;
        k.first_row = 64 * MT * (int)blockIdx.y;
        k.n_rows = tkvi_min(64 * MT, k.all_rows - k.first_row);
        k.next_place = tkvcu_find_first_place(total, (int)gridDim.x, (int)blockIdx.x);
        k.end_place = tkvcu_find_first_place(total, (int)gridDim.x, (int)blockIdx.x + 1);
        tkvcu_next_section(j, k, ends);
    }
    __syncthreads();
    while (s.task.left > 0) {
        tkvcu_row_partials<D, MT> u;
        tkvcu_clear_row_partials(u);
        while (s.task.left > 0) {
            tkvcu_next_prefill_range(j, s, tkvcu_block_hoisting(tid));
            tkvcu_attend_prefill_range(j, s, u, tid);
        }
        tkvcu_write_row_partials(j, s, u, tkvcu_block_hoisting(tid));
        __syncthreads();
        if (tid == 0) tkvcu_next_section(j, s.task, ends);
        __syncthreads();
    }
}

/* >>sizes and launch */
typedef struct tkvcu_prefill_grid { /* a launch for 64 or 128 rows per thread block */
    tkvcu_attend_function kernel;
    size_t shared;
    int blocks; /* for all of gridDim.y together */
} tkvcu_prefill_grid;

static int tkvcu_n_m_tiles(const tkv_config *cfg, int n_queries) {
    return cfg->model.n_heads / cfg->model.n_kv_heads * n_queries > 64 ? 2 : 1;
}

static int tkvcu_n_row_tiles(const tkv_config *cfg, int n_queries) {
    const int rows = 64 * tkvcu_n_m_tiles(cfg, n_queries);
    return (cfg->model.n_heads / cfg->model.n_kv_heads * n_queries + rows - 1) / rows;
}

/* Computes the workspace for up to max_queries queries, with the larger need of both kernels. */
static size_t tkvcu_compute_work_bytes(const tkv_config *cfg, int n_seqs, int max_queries) {
    const size_t decode =
        tkvcu_compute_attend_bytes(cfg, n_seqs, tkvi_min(max_queries, TKVCU_DECODE_QUERIES));
    const size_t rows =
        64 * (size_t)(tkvcu_n_m_tiles(cfg, max_queries) * tkvcu_n_row_tiles(cfg, max_queries));
    const size_t slots = (size_t)n_seqs * (size_t)cfg->model.n_kv_heads * TKVCU_SECTIONS;
    const size_t prefill =
        (TKVCU_PREFILL_MAX_ROWS + slots * rows) * (size_t)(cfg->model.head_dim + 2) * sizeof(float);
    return max_queries > TKVCU_DECODE_QUERIES && prefill > decode ? prefill : decode;
}

/* As tkvcu_prepare_attend. */
static cudaError_t tkvcu_prepare_prefill(tkvcu_prefill_grid grid[2], const tkv_config *cfg, int n_seqs,
                                         int multiprocessors, int max_shared, int *fits) {
    const struct {
        tkvcu_attend_function kernel;
        size_t shared;
    } row[2][2] = {{{tkvcu_prefill_kernel<64, 1>, sizeof(tkvcu_prefill_shared<64, 1>)},
                    {tkvcu_prefill_kernel<64, 2>, sizeof(tkvcu_prefill_shared<64, 2>)}},
                   {{tkvcu_prefill_kernel<128, 1>, sizeof(tkvcu_prefill_shared<128, 1>)},
                    {tkvcu_prefill_kernel<128, 2>, sizeof(tkvcu_prefill_shared<128, 2>)}}};
    cudaError_t e = cudaSuccess;
    int i;
    for (i = 0; i < 2 && e == cudaSuccess && *fits; i++) {
        int resident = 1;
        grid[i].kernel = row[cfg->model.head_dim == 128][i].kernel;
        grid[i].shared = row[cfg->model.head_dim == 128][i].shared + sizeof(int) * (size_t)n_seqs;
        *fits = grid[i].shared <= (size_t)max_shared;
        if (!*fits) break;
        e = cudaFuncSetAttribute(grid[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared);
        if (e == cudaSuccess)
            e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, grid[i].kernel,
                                                              TKVCU_PREFILL_THREADS, grid[i].shared);
        grid[i].blocks =
            tkvi_min(TKVCU_PREFILL_MAX_ROWS / (64 * (i + 1)), multiprocessors * tkvi_max(1, resident));
    }
    return e;
}

/* As tkvcu_launch_attend. */
static cudaError_t tkvcu_launch_prefill(const tkvcu_prefill_grid grid[2], const tkvcu_attend_plan *s,
                                        const tkvcu_view *v, const tkvcu_attend_call *c,
                                        const tkv_config *cfg, cudaStream_t stream) {
    const int mt = tkvcu_n_m_tiles(cfg, c->n_queries), row_tiles = tkvcu_n_row_tiles(cfg, c->n_queries);
    tkvcu_job j = tkvcu_make_job(s, v, c);
    j.blocks = tkvi_max(1, grid[mt - 1].blocks / row_tiles);
    TKVCU_LAUNCH(grid[mt - 1].kernel, dim3((unsigned)j.blocks, (unsigned)row_tiles),
                 dim3(TKVCU_PREFILL_THREADS), grid[mt - 1].shared, stream, j);
    TKVCU_LAUNCH(tkvcu_combine_kernel, dim3((unsigned)(s->n_seqs * c->n_queries * v->n_heads)),
                 dim3(TKVCU_COMBINE_THREADS), 0, stream, j, 64 * mt, row_tiles);
    return cudaGetLastError();
}

#endif /* TKVCU_PREFILL_H */
/* ======== create.h ======== */
/*
 * create.h - the handle, the layout of device memory, and the sides that kernels read.
 *
 * The handle contains a host cache without tokens. Its plans, codings and tables have the same form as in the caches
 * of import and export. Pieces of device memory begin at multiples of 256 bytes:
 *
 *     cache: flags | layers [n_layers] | lists [n_layers][n_seqs] | for each layer with blocks:
 *            versions [n_seqs][max_blocks] | sides | order, importance, mean [TKVI_VERSIONS][n_kv_heads][head_dim] |
 *            regions [n_seqs][ring] blocks
 *     work:  partial results of attention (attend.h)
 */
#ifndef TKVCU_CREATE_H
#define TKVCU_CREATE_H


#define TKVCU_ALIGN 256u

struct tkvcu {
    tkv_cache *host;  /* without tokens */
    tkvcu_view *view; /* [n_layers] */
    /* [n_layers] bit v: blocks may be coded with table version v */
    uint8_t *used_versions;
    /* [n_layers] 1: an append was enqueued; a captured one may run again at any time */
    uint8_t *appended;
    tkvcu_layer *layer; /* device, [n_layers] */
    tkvcu_list *lists;  /* device, [n_layers][n_seqs] */
    uint32_t *flags;    /* device */
    uint8_t *staging;   /* host copy of a layer's sides and tables */
    tkvcu_attend_plan attend_plan;
    tkvcu_prefill_grid prefill[2];
    int n_seqs, max_tokens, max_queries;
    char error[160];
};

/* >>errors */
static tkv_status tkvcu_fail(tkvcu *cu, tkv_status status, const char *what, int64_t number,
                             const char *more) {
    tkvi_text t = tkvi_text_begin(cu->error, sizeof cu->error);
    tkvi_append_text(&t, what);
    if (more) {
        tkvi_append_text(&t, " ");
        tkvi_append_int(&t, number);
        tkvi_append_text(&t, more);
    }
    return status;
}

static tkv_status tkvcu_fail_text(tkvcu *cu, tkv_status status, const char *what, const char *which) {
    tkvi_text t = tkvi_text_begin(cu->error, sizeof cu->error);
    tkvi_append_text(&t, what);
    tkvi_append_text(&t, which);
    return status;
}

/* Stores the runtime's error text. */
static tkv_status tkvcu_check_cuda(tkvcu *cu, cudaError_t e) {
    return e == cudaSuccess ? TKV_OK : tkvcu_fail(cu, TKV_ERR_DEVICE, cudaGetErrorString(e), 0, NULL);
}

static tkv_status tkvcu_check_launch(tkvcu *cu) { return tkvcu_check_cuda(cu, cudaGetLastError()); }

/* >>supported configs */
static tkv_status tkvcu_refuse_config(char *reason, size_t size, const char *why, int layer) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_append_text(&t, why);
    if (layer >= 0) {
        tkvi_append_text(&t, ", layer ");
        tkvi_append_int(&t, layer);
    }
    return TKV_ERR_UNSUPPORTED;
}

/* Returns the kind of a format's sides; -1: not supported. */
static int tkvcu_find_kind(tkv_format f) {
    if (f == TKV_F16 || f == TKV_BF16) return TKVCU_EXACT;
    if (f >= TKV_Q8 && f <= TKV_KIVI2) return TKVCU_KIVI;
    if (f >= TKV_A40 && f <= TKV_A15) return TKVCU_A;
    return f >= TKV_R40 && f <= TKV_R10 ? TKVCU_R : -1;
}

static const char *tkvcu_check_formats(const tkv_config *cfg, tkv_format_pair pair, int exact) {
    const int k = tkvcu_find_kind(pair.k), v = tkvcu_find_kind(pair.v);
    if (k < 0 || v < 0) return "a format without a GPU kernel";
    if (exact != (k == TKVCU_EXACT) || exact != (v == TKVCU_EXACT))
        return "on a GPU, warm and archive tiers take A, R, KIVI and Q8 formats, hot tiers F16 and BF16";
    if ((k == TKVCU_KIVI || v == TKVCU_KIVI) && cfg->format.group_size != 64)
        return "KIVI and Q8 formats need cfg.format.group_size = 64";
    if (v == TKVCU_KIVI && cfg->format.v_scales != TKV_SCALES_GROUP)
        return "KIVI and Q8 formats need cfg.format.v_scales = TKV_SCALES_GROUP";
    return k == TKVCU_A && cfg->format.allocation_unit != 16
               ? "A formats need cfg.format.allocation_unit = 16"
               : NULL;
}

/* 1 if a layer has heads or channels that differ from the model's. */
static int tkvcu_has_mixed_layers(const tkv_config *cfg) {
    const tkvi_geometry model = tkvi_model_geometry(&cfg->model);
    int i;
    for (i = 0; cfg->layers && i < cfg->model.n_layers; i++) {
        const tkvi_geometry g = tkvi_layer_geometry(cfg, i);
        if (g.n_heads != model.n_heads || !tkvi_is_same_geometry(&g, &model)) return 1;
    }
    return 0;
}

/* 1 if a layer sees its sinks beyond its window. */
static int tkvcu_has_window_sinks(const tkv_config *cfg) {
    int i, has = cfg->model.window_sinks == 1;
    for (i = 0; cfg->layers && i < cfg->model.n_layers; i++) has |= cfg->layers[i].window_sinks == 1;
    return has;
}

static const char *tkvcu_check_config(const tkv_config *cfg) {
    const struct {
        int wrong;
        const char *why;
    } rule[] = {
        {cfg->model.head_dim != 64 && cfg->model.head_dim != 128, "head_dim must be 64 or 128"},
        {cfg->model.v_head_dim && cfg->model.v_head_dim != cfg->model.head_dim,
         "v_head_dim must be head_dim"},
        {cfg->model.n_kv_heads > 1024, "n_kv_heads must be at most 1024"},
        {tkvcu_has_mixed_layers(cfg), "all layers must have the heads and channels of the model"},
        {cfg->limits.max_seqs > 65535, "max_seqs must be at most 65535"},
        {cfg->model.n_heads >
             TKVCU_MAX_GROUP * (cfg->model.n_kv_heads ? cfg->model.n_kv_heads : cfg->model.n_heads),
         "a KV head must have at most 16 query heads"},
        {cfg->budget.bytes != 0 || cfg->budget.n_levels != 0 || cfg->budget.adapt,
         "budgets and ladders have no GPU kernels"},
        {cfg->evict.policy != TKV_EVICT_NONE || cfg->tiers.n_anchors || cfg->importance.sample_every,
         "eviction and anchors have no GPU kernels"},
        {cfg->offload.write != NULL || cfg->budget.discard || cfg->recompute.compute != NULL,
         "offloading and recomputation have no GPU kernels"},
        {cfg->model.v_in_k != 0, "V inside K has no GPU kernels"},
        {tkvcu_has_window_sinks(cfg), "sinks beyond a window have no GPU kernels"},
        {cfg->meter.heads != 0, "quality meters have no GPU kernels"},
    };
    size_t i;
    for (i = 0; i < sizeof rule / sizeof *rule; i++)
        if (rule[i].wrong) return rule[i].why;
    return NULL;
}

/* >>layout of device memory */
typedef struct tkvcu_arena {
    uintptr_t base; /* 0: only counts */
    size_t at;
    int full; /* 1: the size exceeds the address space */
} tkvcu_arena;

static void *tkvcu_reserve_piece(tkvcu_arena *a, size_t n, size_t size) {
    const size_t at = a->at;
    const size_t bytes = tkvi_add_sizes(tkvi_multiply_sizes(n, size), TKVCU_ALIGN - 1);
    a->at = tkvi_add_sizes(at, bytes & ~(size_t)(TKVCU_ALIGN - 1));
    if (bytes == TKVI_TOO_MANY || a->at == TKVI_TOO_MANY) a->full = 1;
    return (void *)(a->base + at);
}

/* The tier of each region's blocks. Sinks have their own coding. */
static const tkv_tier tkvcu_tier_of[TKVCU_REGIONS] = {TKV_TIER_ARCHIVE, TKV_TIER_WARM, TKV_TIER_HOT,
                                                      TKV_TIER_HOT};

static int tkvcu_find_key(const tkvi_plan *p, int region) {
    return region == TKVCU_SINKS ? p->sink_layout : p->now.key[tkvcu_tier_of[region]];
}

typedef struct tkvcu_derived_config { /* a tkvcu_config with all defaults resolved */
    tkvi_derived_config shape;
    int n_seqs, max_tokens, max_queries;
    tkvcu_layer *layer;
    tkvcu_list *lists;
    uint32_t *flags;
    size_t staging; /* bytes */
} tkvcu_derived_config;

static size_t tkvcu_n_sides(const tkv_config *cfg) {
    return (size_t)TKVI_VERSIONS * TKVCU_REGIONS * (size_t)cfg->model.n_kv_heads * 2;
}

/* Returns the entries of order, of importance and of mean in a layer. */
static size_t tkvcu_n_table_entries(const tkv_config *cfg) {
    return (size_t)TKVI_VERSIONS * (size_t)cfg->model.n_kv_heads * (size_t)cfg->model.head_dim;
}

/* Fills the view of a layer with blocks, and takes its pieces from the arena. */
static void tkvcu_place_layer(const tkvcu_derived_config *d, int layer, const tkvi_plan *p, tkvcu_arena *a,
                              tkvcu_view *v) {
    const tkv_config *cfg = &d->shape.cfg;
    tkvi_plan whole = *p;
    int64_t most[TKV_TIER_COUNT];
    int r;
    memset(v, 0, sizeof *v);
    whole.kept_window = 0; /* windows free no blocks here */
    tkvi_compute_most_blocks(cfg, &whole, most);
    /* One head's side may enter the warm ring while another thread block still reads a side that leaves it. With
     * another table it has another offset in the block. So new blocks never use the places of blocks that leave. */
    most[TKV_TIER_WARM] += most[TKV_TIER_HOT];
    v->n_seqs = d->n_seqs;
    v->n_heads = cfg->model.n_heads;
    v->n_kv_heads = cfg->model.n_kv_heads;
    v->head_dim = cfg->model.head_dim;
    v->sinks = p->sink;
    v->max_blocks = tkvi_max(1, (d->max_tokens - p->sink + TKVI_BLOCK - 1) / TKVI_BLOCK);
    v->list = d->lists + (size_t)layer * (size_t)d->n_seqs;
    v->version = (uint8_t *)tkvcu_reserve_piece(a, (size_t)d->n_seqs, (size_t)v->max_blocks);
    v->side = (const tkvcu_side *)tkvcu_reserve_piece(a, tkvcu_n_sides(cfg), sizeof *v->side);
    v->order = (const uint8_t *)tkvcu_reserve_piece(a, tkvcu_n_table_entries(cfg), 1);
    v->importance = (const uint8_t *)tkvcu_reserve_piece(a, tkvcu_n_table_entries(cfg), 1);
    v->mean = (const float *)tkvcu_reserve_piece(a, tkvcu_n_table_entries(cfg), sizeof *v->mean);
    for (r = 0; r < TKVCU_REGIONS; r++) {
        const size_t block = d->shape.bytes[tkvcu_find_key(p, r)].total;
        v->ring[r] = r == TKVCU_SINKS ? 1 : (int32_t)tkvi_max(1, (int)most[tkvcu_tier_of[r]]);
        a->full |= block > 0x7fffffffu;
        v->block[r] = (uint32_t)block;
        v->stride[r] = block * (size_t)v->ring[r];
        v->bytes[r] = (uint8_t *)tkvcu_reserve_piece(a, (size_t)d->n_seqs, v->stride[r]);
    }
}

/* Checks a config and lays out the device memory. view: NULL or [n_layers]. */
static tkv_status tkvcu_derive_config(const tkvcu_config *config, tkvcu_derived_config *d, tkvcu_arena *a,
                                      tkvcu_view *view, char *reason, size_t size) {
    tkv_config *cfg = &d->shape.cfg;
    tkv_config mine;
    const char *why;
    tkv_status st;
    int i, r;
    if (!config || !config->cfg) return TKV_ERR_ARG;
    mine = *config->cfg;
    if (config->n_seqs) mine.limits.max_seqs = config->n_seqs;
    if (config->max_tokens) mine.limits.max_tokens = config->max_tokens;
    mine.host.isa = TKV_ISA_SCALAR;
    st = tkvi_validate(&mine, &d->shape, reason, size);
    if (st) return st;
    if (mine.limits.max_tokens == 0)
        return tkvi_bad(reason, size, "max_tokens", 0, "tkvcu_config or tkv_config must set it");
    if (config->max_queries < 0 || config->max_queries > TKVCU_MAX_QUERIES)
        return tkvi_bad(reason, size, "max_queries", config->max_queries, "it must be 1 to 64, or 0 for 1");
    why = tkvcu_check_config(&mine);
    if (why) return tkvcu_refuse_config(reason, size, why, -1);
    d->n_seqs = cfg->limits.max_seqs;
    d->max_tokens = cfg->limits.max_tokens;
    d->max_queries = config->max_queries ? config->max_queries : 1;
    d->flags = (uint32_t *)tkvcu_reserve_piece(a, 1, sizeof *d->flags);
    d->layer = (tkvcu_layer *)tkvcu_reserve_piece(a, (size_t)cfg->model.n_layers, sizeof *d->layer);
    d->lists = (tkvcu_list *)tkvcu_reserve_piece(a, (size_t)cfg->model.n_layers * (size_t)d->n_seqs,
                                                 sizeof *d->lists);
    d->staging = tkvcu_n_sides(cfg) * sizeof(tkvcu_side) + tkvcu_n_table_entries(cfg) * (sizeof(float) + 2);
    for (i = 0; i < cfg->model.n_layers; i++) {
        tkvi_plan p;
        tkvi_tier_spec rule[TKV_MAX_LEVELS];
        tkvcu_view v;
        (void)tkvi_plan_of(&d->shape, i, &p, rule);
        if (p.stored_layer != i) continue;
        for (r = 0; r < TKVCU_REGIONS; r++) {
            why = tkvcu_check_formats(cfg, d->shape.key[tkvcu_find_key(&p, r)].pair, r >= TKVCU_SINKS);
            if (why) return tkvcu_refuse_config(reason, size, why, i);
        }
        tkvcu_place_layer(d, i, &p, a, view ? &view[i] : &v);
    }
    if (a->full)
        return tkvi_bad(reason, size, "max_tokens", d->max_tokens, "the size exceeds the address space");
    return TKV_OK;
}

tkv_status tkvcu_get_required_bytes(const tkvcu_config *config, size_t *cache_bytes, size_t *work_bytes,
                                    char *reason, size_t size) {
    tkvcu_derived_config d;
    tkvcu_arena a = {0, 0, 0};
    tkv_status st;
    if (reason && size) *reason = 0;
    if (!cache_bytes || !work_bytes) return TKV_ERR_ARG;
    st = tkvcu_derive_config(config, &d, &a, NULL, reason, size);
    if (st) return st;
    *cache_bytes = a.at;
    *work_bytes = tkvcu_compute_work_bytes(&d.shape.cfg, d.n_seqs, d.max_queries);
    return TKV_OK;
}

/* >>sides */
static tkvcu_side tkvcu_make_side(const tkvi_side *s, size_t at, int32_t table) {
    tkvcu_side d;
    int w;
    memset(&d, 0, sizeof d);
    d.kind = (uint8_t)tkvcu_find_kind((tkv_format)(s->format - tkvi_formats));
    d.bf16 = s->format->stored == TKVI_AS_BF16;
    d.at = (uint32_t)at;
    d.bytes = (uint32_t)s->bytes;
    d.code_bytes = (uint32_t)s->code_bytes;
    d.top = s->top;
    d.table = s->order ? table : -1;
    if (d.kind == TKVCU_KIVI) {
        d.half_bits = (uint8_t)(2 * s->format->bits);
        d.group = (uint8_t)s->group;
        if (s->format->bits <= 6) d.slabs[s->format->bits] = (uint8_t)(s->pad / 16);
    }
    if (d.kind == TKVCU_R) d.half_bits = (uint8_t)s->half_bits;
    if (d.kind == TKVCU_A) {
        d.slabs[0] = (uint8_t)(s->pad / 16);
        for (w = 1; w <= 6; w++) {
            d.slabs[w] = (uint8_t)(s->tiles.n[w] / 4);
            d.slabs[0] = (uint8_t)(d.slabs[0] - d.slabs[w]);
        }
    }
    return d;
}

/* Returns the coding of a region's blocks with a table version of the layer; NULL: there is no such table. */
static const tkvi_layout *tkvcu_find_coding(const tkv_cache *kv, int layer, int region, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkv_tier tier = tkvcu_tier_of[region];
    const int own = region != TKVCU_SINKS && p->now.needs_table[tier];
    const tkvi_layout *c =
        &kv->tables
             .layout[region == TKVCU_SINKS ? p->sink_layout : p->now.layout[tier] + (own ? version : 0)];
    return c->record && c->record[0].k.format ? c : NULL;
}

static int tkvcu_has_table(const tkv_cache *kv, int layer, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const int region = p->now.needs_table[TKV_TIER_WARM] ? TKVCU_WARM : TKVCU_ARCHIVE;
    return p->allocates && tkvcu_find_coding(kv, layer, region, version) != NULL;
}

/* Copies sides, order, importance and mean of a layer to the device. Waits, because the next layer reuses `staging`. */
static tkv_status tkvcu_upload_layer(tkvcu *cu, int layer, cudaStream_t stream) {
    const tkv_cache *kv = cu->host;
    const tkv_config *cfg = &kv->tables.cfg;
    const tkvcu_view *v = &cu->view[layer];
    const size_t heads = (size_t)cfg->model.n_kv_heads, pad = (size_t)cfg->model.head_dim,
                 n = tkvcu_n_table_entries(cfg);
    tkvcu_side *side = (tkvcu_side *)(void *)cu->staging;
    float *mean = (float *)(void *)(side + tkvcu_n_sides(cfg));
    uint8_t *order = (uint8_t *)(mean + n), *importance = order + n;
    tkvcu_layer info;
    size_t h, at = 0;
    tkv_status st;
    int version, r;
    memset(cu->staging, 0, tkvcu_n_sides(cfg) * sizeof *side + n * (sizeof(float) + 2));
    for (version = 0; version < TKVI_VERSIONS; version++) {
        for (r = 0; r < TKVCU_REGIONS; r++) {
            const tkvi_layout *c = tkvcu_find_coding(kv, layer, r, version);
            for (h = 0; h < heads; h++, at += 2) {
                const int32_t table = (int32_t)(((size_t)version * heads + h) * pad);
                if (!c) continue;
                side[at] = tkvcu_make_side(&c->record[h].k, c->record[h].at, table);
                side[at + 1] = tkvcu_make_side(&c->record[h].v, c->record[h].at + c->record[h].v_at, -1);
            }
        }
        for (h = 0; h < heads && tkvcu_has_table(kv, layer, version); h++) {
            const tkvi_head *head = &tkvi_heads_of(&kv->tables, layer, version)[h];
            const size_t to = ((size_t)version * heads + h) * pad;
            memcpy(order + to, head->order, pad);
            memcpy(importance + to, head->importance, pad);
            memcpy(mean + to, head->mean, pad * sizeof *mean);
        }
    }
    tkvcu_widen_attend_plan(&cu->attend_plan, side, tkvcu_n_sides(cfg), cfg->model.head_dim);
    info.version = tkvi_max(0, kv->tables.current_version[layer]);
    info.sinks = v->sinks;
    st = tkvcu_check_cuda(cu,
                          cudaMemcpyAsync((void *)(uintptr_t)v->side, side, tkvcu_n_sides(cfg) * sizeof *side,
                                          cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_check_cuda(cu, cudaMemcpyAsync((void *)(uintptr_t)v->mean, mean, n * sizeof *mean,
                                                  cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_check_cuda(
            cu, cudaMemcpyAsync((void *)(uintptr_t)v->order, order, n, cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_check_cuda(cu, cudaMemcpyAsync((void *)(uintptr_t)v->importance, importance, n,
                                                  cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_check_cuda(
            cu, cudaMemcpyAsync(&cu->layer[layer], &info, sizeof info, cudaMemcpyHostToDevice, stream));
    return st ? st : tkvcu_check_cuda(cu, cudaStreamSynchronize(stream));
}

/* Makes tables that treat all heads and channels equally. */
static int tkvcu_make_equal_tables(tkv_cache *kv) {
    const tkv_config *cfg = &kv->tables.cfg;
    int layer, head, c;
    if (!kv->tables.any_shared) return 1;
    if (!tkvi_allocate_version(kv, 0)) return 0;
    for (layer = 0; layer < cfg->model.n_layers; layer++) {
        if (!kv->tables.plan[layer].allocates) continue;
        for (head = 0; head < cfg->model.n_kv_heads; head++) {
            const tkvi_head_arrays to = tkvi_head_arrays_of(&kv->tables, layer, 0, head);
            tkvi_head *h = &tkvi_heads_of(&kv->tables, layer, 0)[head];
            h->k_top = h->v_top = TKVI_LOG_TOP_DEFAULT;
            for (c = 0; c < cfg->model.head_dim; c++) {
                to.importance[c] = 255;
                tkvi_set_order(to.order, cfg->model.head_dim, c, c);
            }
        }
        tkvi_table_use(kv, layer, 0);
        tkvi_learned(kv, layer, 0);
    }
    return 1;
}

/* >>life */
void tkvcu_destroy(tkvcu *cu) {
    if (!cu) return;
    tkv_destroy(cu->host);
    free(cu);
}

/* Allocates the handle, in one piece. */
static tkvcu *tkvcu_allocate_handle(const tkvcu_derived_config *d) {
    const size_t layers = (size_t)d->shape.cfg.model.n_layers;
    const size_t head = tkvi_align_up(sizeof(tkvcu)), views = tkvi_align_up(layers * sizeof(tkvcu_view));
    uint8_t *mem = (uint8_t *)malloc(head + views + tkvi_align_up(d->staging) + 2 * layers);
    tkvcu *cu = (tkvcu *)(void *)mem;
    if (!mem) return NULL;
    memset(mem, 0, head + views + tkvi_align_up(d->staging) + 2 * layers);
    cu->view = (tkvcu_view *)(void *)(mem + head);
    cu->staging = mem + head + views;
    cu->used_versions = cu->staging + tkvi_align_up(d->staging);
    cu->appended = cu->used_versions + layers;
    cu->n_seqs = d->n_seqs;
    cu->max_tokens = d->max_tokens;
    cu->max_queries = d->max_queries;
    cu->flags = d->flags;
    cu->layer = d->layer;
    cu->lists = d->lists;
    return cu;
}

/* Initialises the memory that kernels read before they write it. */
static tkv_status tkvcu_clear_memory(tkvcu *cu, cudaStream_t stream) {
    const int layers = cu->host->tables.cfg.model.n_layers;
    tkv_status st = tkvcu_check_cuda(cu, cudaMemsetAsync(cu->flags, 0, sizeof *cu->flags, stream));
    int i, r;
    if (!st)
        st = tkvcu_check_cuda(cu,
                              cudaMemsetAsync(cu->layer, 0xff, (size_t)layers * sizeof *cu->layer, stream));
    if (!st)
        st = tkvcu_check_cuda(
            cu,
            cudaMemsetAsync(cu->lists, 0, (size_t)layers * (size_t)cu->n_seqs * sizeof *cu->lists, stream));
    for (i = 0; i < layers && !st; i++) {
        const tkvcu_view *v = &cu->view[i];
        const size_t seqs = (size_t)cu->n_seqs;
        if (cu->host->tables.plan[i].stored_layer != i) continue;
        st = tkvcu_check_cuda(cu, cudaMemsetAsync(v->version, 0, seqs * (size_t)v->max_blocks, stream));
        for (r = TKVCU_SINKS; r < TKVCU_REGIONS && !st; r++)
            st = tkvcu_check_cuda(cu, cudaMemsetAsync(v->bytes[r], 0, seqs * v->stride[r], stream));
        if (!st) st = tkvcu_upload_layer(cu, i, stream);
    }
    return st;
}

static tkv_status tkvcu_get_attribute(tkvcu *cu, cudaDeviceAttr which, int *x) {
    int device = 0;
    const tkv_status st = tkvcu_check_cuda(cu, cudaGetDevice(&device));
    return st ? st : tkvcu_check_cuda(cu, cudaDeviceGetAttribute(x, which, device));
}

/* Prepares the launches, when the sides are known. Shared memory must be large enough. */
static tkv_status tkvcu_prepare_kernels(tkvcu *cu, const tkv_config *cfg) {
    int max_shared = 0, multiprocessors = 0, fits;
    tkv_status st = tkvcu_get_attribute(cu, cudaDevAttrMaxSharedMemoryPerBlockOptin, &max_shared);
    if (!st) st = tkvcu_get_attribute(cu, cudaDevAttrMultiProcessorCount, &multiprocessors);
    cudaFuncAttributes there;
    if (st) return st;
    fits = tkvcu_select_append_kernel(cfg->model.head_dim).shared <= (size_t)max_shared;
    st = tkvcu_check_cuda(cu, tkvcu_prepare_attend(&cu->attend_plan, cfg,
                                                   tkvi_min(cu->max_queries, TKVCU_DECODE_QUERIES),
                                                   multiprocessors, max_shared, &fits));
    if (!st && cu->max_queries > TKVCU_DECODE_QUERIES)
        st = tkvcu_check_cuda(
            cu, tkvcu_prepare_prefill(cu->prefill, cfg, cu->n_seqs, multiprocessors, max_shared, &fits));
    if (!st && !fits) return TKV_ERR_UNSUPPORTED;
    /* The runtime loads code at the first request. That must not happen during a capture. */
    if (!st) st = tkvcu_check_cuda(cu, cudaFuncGetAttributes(&there, tkvcu_combine_kernel));
    if (!st) st = tkvcu_check_cuda(cu, cudaFuncGetAttributes(&there, tkvcu_truncate_kernel));
    return st ? st
              : tkvcu_check_cuda(
                    cu, cudaFuncSetAttribute(tkvcu_select_append_kernel(cfg->model.head_dim).kernel,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared));
}

tkv_status tkvcu_create(const tkvcu_config *config, void *d_cache, size_t cache_bytes, void *d_work,
                        size_t work_bytes, tkvcu_stream stream, tkvcu **out) {
    tkvcu_derived_config d;
    tkvcu_arena a = {0, 0, 0};
    tkv_config cfg;
    tkvcu *cu;
    tkv_status st;
    int major = 0;
    if (!out || !d_cache || !d_work || ((uintptr_t)d_cache | (uintptr_t)d_work) % TKVCU_ALIGN)
        return TKV_ERR_ARG;
    a.base = (uintptr_t)d_cache;
    st = tkvcu_derive_config(config, &d, &a, NULL, NULL, 0);
    if (st) return st;
    if (cache_bytes < a.at || work_bytes < tkvcu_compute_work_bytes(&d.shape.cfg, d.n_seqs, d.max_queries))
        return TKV_ERR_CAPACITY;
    cu = tkvcu_allocate_handle(&d);
    if (!cu) return TKV_ERR_NOMEM;
    a.at = 0;
    (void)tkvcu_derive_config(config, &d, &a, cu->view, NULL, 0);
    cfg = *config->cfg;
    cfg.limits.max_seqs = 1;
    cfg.limits.max_tokens = d.max_tokens;
    cfg.host.isa = TKV_ISA_SCALAR;
    cfg.host.on_event = NULL;
    cfg.host.parallel_for = NULL;
    st = tkv_create(&cfg, &cu->host);
    if (!st && !tkvcu_make_equal_tables(cu->host)) st = TKV_ERR_NOMEM;
    if (!st) st = tkvcu_get_attribute(cu, cudaDevAttrComputeCapabilityMajor, &major);
    if (!st && major < 8) st = TKV_ERR_UNSUPPORTED;
    cu->attend_plan.partial = (float *)d_work;
    cu->attend_plan.n_seqs = cu->n_seqs;
    if (!st) st = tkvcu_clear_memory(cu, stream);
    if (!st) st = tkvcu_prepare_kernels(cu, &cu->host->tables.cfg);
    if (st) tkvcu_destroy(cu);
    else *out = cu;
    return st;
}

/* Returns the view that a layer reads; NULL: the layer has no cache, or does not exist. */
static const tkvcu_view *tkvcu_find_view(const tkvcu *cu, int layer) {
    const tkvi_tables *t = &cu->host->tables;
    if (layer < 0 || layer >= t->cfg.model.n_layers || t->plan[layer].stored_layer < 0) return NULL;
    return &cu->view[t->plan[layer].stored_layer];
}

#endif /* TKVCU_CREATE_H */
/* ======== transfer.h ======== */
/*
 * transfer.h - copies tables and sequences from a cache of tieredkv.h to the device and back. The bytes of blocks do
 * not change. Errors other than those of the runtime are found before anything changes. All calls wait for the
 * stream, because they use host memory.
 */
#ifndef TKVCU_TRANSFER_H
#define TKVCU_TRANSFER_H


/* >>comparison of configs */
static const char *tkvcu_find_difference(const tkvi_tables *a, const tkvi_tables *b, int layer) {
    const tkvi_plan *p = &a->plan[layer], *q = &b->plan[layer];
    const tkvi_geometry *g = &p->geometry, *h = &q->geometry;
    int r;
    if (p->stored_layer != q->stored_layer || g->n_heads != h->n_heads || !tkvi_is_same_geometry(g, h))
        return "cfg.layers";
    if (p->stored_layer != layer) return NULL;
    if (p->sink != q->sink || p->now.hot != q->now.hot || p->now.warm != q->now.warm)
        return "the tiers' lengths";
    for (r = 0; r < TKVCU_REGIONS; r++) {
        const tkvi_layout *c = &a->layout[tkvcu_find_key(p, r)], *d = &b->layout[tkvcu_find_key(q, r)];
        if (c->pair.k != d->pair.k || c->pair.v != d->pair.v || c->tokens != d->tokens ||
            c->bytes.total != d->bytes.total)
            return "the formats";
    }
    return NULL;
}

static tkv_status tkvcu_check_same_config(tkvcu *cu, const tkv_cache *kv) {
    const tkvi_tables *a, *b;
    const char *what = NULL;
    int i;
    if (!kv) return tkvcu_fail(cu, TKV_ERR_ARG, "the cache is missing", 0, NULL);
    a = &cu->host->tables;
    b = &kv->tables;
    if (a->cfg.model.n_layers != b->cfg.model.n_layers || a->cfg.model.n_heads != b->cfg.model.n_heads ||
        a->cfg.model.n_kv_heads != b->cfg.model.n_kv_heads ||
        a->cfg.model.head_dim != b->cfg.model.head_dim || a->cfg.model.v_head_dim != b->cfg.model.v_head_dim)
        return tkvcu_fail(cu, TKV_ERR_CONFIG, "the cache is of another model", 0, NULL);
    if (a->cfg.format.group_size != b->cfg.format.group_size ||
        a->cfg.format.allocation_unit != b->cfg.format.allocation_unit)
        what = "group_size or allocation_unit";
    for (i = 0; i < a->cfg.model.n_layers && !what; i++) what = tkvcu_find_difference(a, b, i);
    if (what) return tkvcu_fail_text(cu, TKV_ERR_CONFIG, "the cache has another plan: ", what);
    what = tkvcu_check_config(&b->cfg);
    return what ? tkvcu_fail_text(cu, TKV_ERR_UNSUPPORTED, "the cache uses something unsupported: ", what)
                : TKV_OK;
}

/* >>tables */
static int tkvcu_is_same_table(const tkv_cache *a, const tkv_cache *b, int layer, int version) {
    const tkvi_head *x = tkvi_heads_of(&a->tables, layer, version),
                    *y = tkvi_heads_of(&b->tables, layer, version);
    const size_t pad = (size_t)a->tables.cfg.model.head_dim;
    int h;
    for (h = 0; h < a->tables.cfg.model.n_kv_heads; h++, x++, y++)
        if (x->reach != y->reach || x->k_weight != y->k_weight || x->k_top != y->k_top ||
            x->v_top != y->v_top || memcmp(x->importance, y->importance, pad) != 0 ||
            memcmp(x->order, y->order, pad) != 0 || memcmp(x->mean, y->mean, pad * sizeof(float)) != 0)
            return 0;
    return 1;
}

/* Copies a table version of a layer. It becomes the current one. */
static void tkvcu_copy_table(tkv_cache *to, const tkv_cache *from, int layer, int version) {
    const size_t pad = (size_t)to->tables.cfg.model.head_dim, heads = (size_t)to->tables.cfg.model.n_kv_heads;
    const size_t at = (size_t)layer * heads * pad;
    const tkvi_version *x = &from->tables.version[version];
    tkvi_version *y = &to->tables.version[version];
    size_t h;
    for (h = (size_t)layer * heads; h < (size_t)(layer + 1) * heads; h++) {
        y->head[h].reach = x->head[h].reach;
        y->head[h].k_weight = x->head[h].k_weight;
        y->head[h].k_top = x->head[h].k_top;
        y->head[h].v_top = x->head[h].v_top;
    }
    memcpy(y->importance + at, x->importance + at, heads * pad);
    memcpy(y->channel + at, x->channel + at, heads * pad);
    memcpy(y->mean + at, x->mean + at, heads * pad * sizeof(float));
    tkvi_table_use(to, layer, version);
}

/* Tells whether a layer of kv has tables to copy. */
static int tkvcu_has_learned(const tkv_cache *kv, int layer) {
    return kv->tables.plan[layer].stored_layer == layer && kv->tables.plan[layer].allocates &&
           kv->tables.current_version[layer] >= 0;
}

/* Allocates the versions, and checks that no block here needs other tables. */
static tkv_status tkvcu_check_tables(tkvcu *cu, const tkv_cache *kv) {
    int layer, v;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        for (v = 0; v < TKVI_VERSIONS && tkvcu_has_learned(kv, layer); v++) {
            if (!tkvcu_has_table(kv, layer, v)) continue;
            if (!tkvi_allocate_version(cu->host, v))
                return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for tables", 0, NULL);
            if ((cu->used_versions[layer] >> v & 1) && !tkvcu_is_same_table(cu->host, kv, layer, v))
                return tkvcu_fail(cu, TKV_ERR_STATE, "blocks here may be coded with another table of layer",
                                  layer, "; take over tables before the first append");
        }
    return TKV_OK;
}

static tkv_status tkvcu_take_tables(tkvcu *cu, const tkv_cache *kv, cudaStream_t stream) {
    tkv_status st = TKV_OK;
    int layer, v;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers && !st; layer++) {
        int changed = 0;
        if (!tkvcu_has_learned(kv, layer)) continue;
        for (v = 0; v < TKVI_VERSIONS; v++) {
            if (!tkvcu_has_table(kv, layer, v)) continue;
            if (tkvcu_has_table(cu->host, layer, v) && tkvcu_is_same_table(cu->host, kv, layer, v)) continue;
            tkvcu_copy_table(cu->host, kv, layer, v);
            changed = 1;
        }
        changed |= cu->host->tables.current_version[layer] != kv->tables.current_version[layer];
        cu->host->tables.current_version[layer] = kv->tables.current_version[layer];
        if (cu->appended[layer])
            cu->used_versions[layer] |= (uint8_t)(1u << kv->tables.current_version[layer]);
        if (changed) st = tkvcu_upload_layer(cu, layer, stream);
    }
    return st;
}

tkv_status tkvcu_load_calibration(tkvcu *cu, const tkv_cache *kv, tkvcu_stream stream) {
    tkv_status st;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_check_same_config(cu, kv);
    if (!st) st = tkvcu_check_tables(cu, kv);
    return st ? st : tkvcu_take_tables(cu, kv, stream);
}

/* >>sequences */
static tkv_status tkvcu_check_seqs(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq) {
    if (seq < 0 || seq >= cu->n_seqs)
        return tkvcu_fail(cu, TKV_ERR_ARG, "there is no sequence", seq, " here");
    if (host_seq < 0 || host_seq >= kv->tables.cfg.limits.max_seqs)
        return tkvcu_fail(cu, TKV_ERR_ARG, "there is no sequence", host_seq, " in the cache");
    if (kv->seq[host_seq].in_step)
        return tkvcu_fail(cu, TKV_ERR_STATE, "a step is open; commit or abort it first", 0, NULL);
    return TKV_OK;
}

/* Returns the region of block i of a host list, and its number after the sinks. */
static int tkvcu_find_region(const tkvi_list *list, int i, int *block) {
    *block = i - list->sinks;
    if (*block < 0) *block = 0;
    if (i < list->sinks) return TKVCU_SINKS;
    if (*block < list->archive) return TKVCU_ARCHIVE;
    return *block < list->archive + list->warm ? TKVCU_WARM : TKVCU_HOT;
}

/* Returns a reason why a layer cannot be stored here, or NULL. */
static const char *tkvcu_find_list_fault(const tkvcu *cu, const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_plan *p = &kv->tables.plan[layer];
    int i, block;
    if (list->expired) return "tokens have expired behind a window";
    if (p->sink + TKVI_BLOCK * (list->archive + list->warm) > list->len && list->archive + list->warm)
        return "a flush made a block short";
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const tkvi_entry *e = &kv->pool.entry[ids[i]];
        const int region = tkvcu_find_region(list, i, &block);
        if (tkvi_is_offloaded(b)) return "a block is offloaded";
        if (!tkvi_has_all_slots(e) || e->end_slot) return "tokens were evicted or removed";
        if (e->shift || e->turned) return "tokens were moved";
        if (tkvi_sink_mask(&kv->pool, ids[i])) return "sinks were named";
        if (e->start != (region == TKVCU_SINKS ? 0 : p->sink + TKVI_BLOCK * block))
            return "a flush made a block short";
        if (kv->tables.layout[b->layout].key != tkvcu_find_key(p, region))
            return "a block has another format";
        if (block >= cu->view[layer].max_blocks) return "the sequence is too long";
    }
    return NULL;
}

/* Returns a reason why a layer is too large here, or NULL. On the host, more blocks may wait for a table or for
 * the next append. */
static const char *tkvcu_find_capacity_fault(const tkvcu *cu, const tkvi_list *list, int layer) {
    const int32_t *ring = cu->view[layer].ring;
    if (list->len > cu->max_tokens) return "the sequence is too long";
    if (list->archive > ring[TKVCU_ARCHIVE])
        return "too many blocks are in the archive: the sequence was flushed";
    if (list->warm > ring[TKVCU_WARM] - ring[TKVCU_HOT])
        return "too many blocks are warm: tkv_seq_begin and tkv_seq_commit demote them";
    if (list->n - list->sinks - list->archive - list->warm > ring[TKVCU_HOT])
        return "too many blocks are hot: tkv_seq_begin and tkv_seq_commit demote them, after "
               "tkv_freeze_calibration if they wait for a table";
    return NULL;
}

/* Copies a block to the device. n_tokens: tokens of its list from its start on. Free slots of a hot block become 0,
 * because kernels here multiply them by 0. On the host they are not set. */
static tkv_status tkvcu_import_block(tkvcu *cu, const tkvcu_view *v, int region, uint8_t *to,
                                     const uint8_t *from, int n_tokens, cudaStream_t stream) {
    const size_t sides = 2 * (size_t)v->n_kv_heads, side_bytes = v->block[region] / sides;
    tkv_status st;
    if (region != TKVCU_HOT || n_tokens >= TKVI_BLOCK)
        return tkvcu_check_cuda(cu,
                                cudaMemcpyAsync(to, from, v->block[region], cudaMemcpyHostToDevice, stream));
    st = tkvcu_check_cuda(cu, cudaMemsetAsync(to, 0, v->block[region], stream));
    if (st) return st;
    return tkvcu_check_cuda(cu, cudaMemcpy2DAsync(to, side_bytes, from, side_bytes,
                                                  side_bytes / TKVI_BLOCK * (size_t)n_tokens, sides,
                                                  cudaMemcpyHostToDevice, stream));
}

/* Copies a layer of a sequence to the device: blocks, versions, state. */
static tkv_status tkvcu_import_layer(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, int layer,
                                     uint8_t *version, cudaStream_t stream) {
    const tkvi_list *list = tkvi_list_of(kv, host_seq, layer);
    const uint32_t *ids = tkvi_ids(kv, host_seq, layer);
    const tkvcu_view *v = &cu->view[layer];
    tkvcu_list state;
    tkv_status st = TKV_OK;
    int i, block;
    memset(version, 0, (size_t)v->max_blocks);
    for (i = 0; i < list->n && !st; i++) {
        const tkvi_block *b = tkvi_block_of(kv, ids[i]);
        const int region = tkvcu_find_region(list, i, &block);
        if (b->layout >= kv->tables.n_keys) {
            version[block] = (uint8_t)((b->layout - kv->tables.n_keys) % TKVI_VERSIONS);
            cu->used_versions[layer] |= (uint8_t)(1u << version[block]);
        }
        st = tkvcu_import_block(cu, v, region, tkvcu_find_block(v, region, seq, block),
                                tkvi_block_bytes(&kv->pool, b), list->len - tkvi_block_start(kv, ids, i),
                                stream);
    }
    if (!st)
        st = tkvcu_check_cuda(cu, cudaMemcpyAsync(v->version + (size_t)seq * (size_t)v->max_blocks, version,
                                                  (size_t)v->max_blocks, cudaMemcpyHostToDevice, stream));
    state.len = list->len;
    state.archive = list->archive;
    state.warm = list->warm;
    state.tickets = 0;
    if (!st)
        st = tkvcu_check_cuda(
            cu, cudaMemcpyAsync(&v->list[seq], &state, sizeof state, cudaMemcpyHostToDevice, stream));
    return st ? st
              : tkvcu_check_cuda(
                    cu,
                    cudaStreamSynchronize(
                        stream)); /* waits, because `state` is on this stack and the next layer reuses `version` */
}

/* Returns the largest max_blocks of all layers. */
static int tkvcu_find_max_blocks(const tkvcu *cu) {
    int i, max_blocks = 1;
    for (i = 0; i < cu->host->tables.cfg.model.n_layers; i++)
        max_blocks = tkvi_max(max_blocks, cu->view[i].max_blocks);
    return max_blocks;
}

tkv_status tkvcu_import_seq(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, tkvcu_stream stream) {
    uint8_t *version;
    tkv_status st;
    int layer;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_check_same_config(cu, kv);
    if (!st) st = tkvcu_check_seqs(cu, seq, kv, host_seq);
    if (!st) st = tkvcu_check_tables(cu, kv);
    for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++) {
        const char *why;
        if (kv->tables.plan[layer].stored_layer != layer) continue;
        why = tkvcu_find_capacity_fault(cu, tkvi_list_of(kv, host_seq, layer), layer);
        if (why) return tkvcu_fail(cu, TKV_ERR_CAPACITY, why, 0, NULL);
        why = tkvcu_find_list_fault(cu, kv, host_seq, layer);
        if (why) return tkvcu_fail(cu, TKV_ERR_UNSUPPORTED, why, 0, NULL);
    }
    if (st) return st;
    version = (uint8_t *)malloc((size_t)tkvcu_find_max_blocks(cu));
    if (!version) return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for versions", 0, NULL);
    st = tkvcu_take_tables(cu, kv, stream);
    for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++)
        if (kv->tables.plan[layer].stored_layer == layer)
            st = tkvcu_import_layer(cu, seq, kv, host_seq, layer, version, stream);
    free(version);
    return st;
}

/* >>export */
typedef struct tkvcu_seq_state { /* state of a sequence, copied from the device */
    tkvcu_list *list;            /* [n_layers] */
    uint8_t *version;            /* [n_layers][max_blocks] */
    int max_blocks;
} tkvcu_seq_state;

static tkv_status tkvcu_download_state(tkvcu *cu, int seq, tkvcu_seq_state *t, cudaStream_t stream) {
    tkv_status st = TKV_OK;
    int layer;
    for (layer = 0; layer < cu->host->tables.cfg.model.n_layers && !st; layer++) {
        const tkvcu_view *v = &cu->view[layer];
        if (cu->host->tables.plan[layer].stored_layer != layer) continue;
        st = tkvcu_check_cuda(cu, cudaMemcpyAsync(&t->list[layer], &v->list[seq], sizeof *t->list,
                                                  cudaMemcpyDeviceToHost, stream));
        if (!st)
            st = tkvcu_check_cuda(cu, cudaMemcpyAsync(t->version + (size_t)layer * (size_t)t->max_blocks,
                                                      v->version + (size_t)seq * (size_t)v->max_blocks,
                                                      (size_t)v->max_blocks, cudaMemcpyDeviceToHost, stream));
    }
    return st ? st : tkvcu_check_cuda(cu, cudaStreamSynchronize(stream));
}

/* Makes the host's list of a layer. The ids are filled in later. */
static tkvi_list tkvcu_make_host_list(const tkvi_plan *p, const tkvcu_list *l) {
    tkvi_list list;
    const int behind = l->len - p->sink;
    memset(&list, 0, sizeof list);
    list.sinks = l->len > 0 && p->sink > 0;
    list.n = list.sinks + (behind > 0 ? (behind + TKVI_BLOCK - 1) / TKVI_BLOCK : 0);
    list.archive = l->archive;
    list.warm = l->warm;
    list.len = list.chunk_start = l->len;
    return list;
}

/* Returns the host's coding of a block. */
static int tkvcu_find_host_coding(const tkv_cache *kv, int layer, int region, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkv_tier tier = tkvcu_tier_of[region];
    if (region == TKVCU_SINKS) return p->sink_layout;
    return p->now.layout[tier] + (p->now.needs_table[tier] ? version : 0);
}

/* Tells whether coded blocks of a layer use a table that kv lacks, or has in another form. */
static int tkvcu_has_table_clash(const tkvcu *cu, const tkv_cache *kv, int layer, const tkvcu_seq_state *t) {
    const uint8_t *version = t->version + (size_t)layer * (size_t)t->max_blocks;
    int i;
    for (i = 0; i < t->list[layer].archive + t->list[layer].warm; i++)
        if (!tkvcu_has_table(kv, layer, version[i]) || !tkvcu_is_same_table(cu->host, kv, layer, version[i]))
            return 1;
    return 0;
}

/* Allocates memory for tables and blocks of the sequence. On an error, no token or table has changed. */
static tkv_status tkvcu_reserve_export(tkvcu *cu, tkv_cache *kv, int host_seq, const tkvcu_seq_state *t) {
    tkvi_demand demand = tkvi_no_demand();
    int layer, i, block, v, want = 1;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        const tkvi_plan *p = &kv->tables.plan[layer];
        const tkvi_list list = tkvcu_make_host_list(p, &t->list[layer]);
        if (p->stored_layer != layer) continue;
        if (list.len > kv->tables.cfg.limits.max_tokens)
            return tkvcu_fail(cu, TKV_ERR_CAPACITY, "the cache's sequences have at most",
                              kv->tables.cfg.limits.max_tokens, " tokens");
        if (p->allocates && kv->tables.current_version[layer] >= 0 && tkvcu_has_table_clash(cu, kv, layer, t))
            return tkvcu_fail(cu, TKV_ERR_STATE, "the cache has another table in layer", layer, "");
        for (v = 0; v < TKVI_VERSIONS && p->allocates && kv->tables.current_version[layer] < 0; v++)
            if (tkvcu_has_table(cu->host, layer, v) && !tkvi_allocate_version(kv, v))
                return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for tables", 0, NULL);
        for (i = 0; i < list.n; i++) {
            const int region = tkvcu_find_region(&list, i, &block);
            tkvi_demand_blocks(&kv->pool, tkvcu_find_host_coding(kv, layer, region, 0), 1, &demand);
        }
        want = tkvi_max(want, list.n + 1);
    }
    if (!tkvi_grow_lists(kv, host_seq, want) || !tkvi_provide(&kv->pool, &demand))
        return tkvcu_fail(cu, kv->pool.keep_all ? TKV_ERR_CAPACITY : TKV_ERR_NOMEM, "no memory for blocks", 0,
                          NULL);
    return TKV_OK;
}

static tkv_status tkvcu_export_layer(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, int layer,
                                     const tkvcu_seq_state *t, cudaStream_t stream) {
    const tkvcu_view *v = &cu->view[layer];
    const tkvi_list list = tkvcu_make_host_list(&kv->tables.plan[layer], &t->list[layer]);
    uint32_t *ids = tkvi_ids(kv, host_seq, layer);
    tkv_status st = TKV_OK;
    int i, block, version;
    if (kv->tables.plan[layer].allocates && kv->tables.current_version[layer] < 0) {
        for (version = 0; version < TKVI_VERSIONS; version++)
            if (tkvcu_has_table(cu->host, layer, version)) tkvcu_copy_table(kv, cu->host, layer, version);
        kv->tables.current_version[layer] = cu->host->tables.current_version[layer];
        tkvi_learned(kv, layer, 0);
    }
    for (i = 0; i < list.n; i++) {
        const int region = tkvcu_find_region(&list, i, &block), first = region == TKVCU_SINKS;
        const int start = first ? 0 : v->sinks + TKVI_BLOCK * block;
        version = first ? 0 : t->version[(size_t)layer * (size_t)t->max_blocks + (size_t)block];
        ids[i] = tkvi_new_entry(&kv->pool, tkvcu_find_host_coding(kv, layer, region, version), start, 0);
        if (!st)
            st = tkvcu_check_cuda(cu, cudaMemcpyAsync(tkvi_block_bytes(&kv->pool, tkvi_block_of(kv, ids[i])),
                                                      tkvcu_find_block(v, region, seq, block),
                                                      v->block[region], cudaMemcpyDeviceToHost, stream));
    }
    for (i = 0; i < list.n; i++)
        kv->pool.entry[ids[i]].tier = tkvi_block_of(kv, ids[i])->tier = (uint8_t)tkvi_tier_at(&list, i);
    *tkvi_list_of(kv, host_seq, layer) = list;
    return st;
}

tkv_status tkvcu_export_seq(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, tkvcu_stream stream) {
    tkvcu_seq_state t;
    size_t layers;
    tkv_status st;
    int layer;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_check_same_config(cu, kv);
    if (!st) st = tkvcu_check_seqs(cu, seq, kv, host_seq);
    for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++)
        if (tkvi_list_of(kv, host_seq, layer)->n)
            st = tkvcu_fail(cu, TKV_ERR_STATE, "sequence", host_seq, " of the cache is not empty");
    if (st) return st;
    layers = (size_t)kv->tables.cfg.model.n_layers;
    t.max_blocks = tkvcu_find_max_blocks(cu);
    t.list = (tkvcu_list *)calloc(layers, sizeof *t.list);
    t.version = (uint8_t *)calloc(layers, (size_t)t.max_blocks);
    st = t.list && t.version ? tkvcu_download_state(cu, seq, &t, stream)
                             : tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for versions", 0, NULL);
    if (!st) st = tkvcu_reserve_export(cu, kv, host_seq, &t);
    if (!st) {
        for (layer = 0; !st && layer < kv->tables.cfg.model.n_layers; layer++)
            if (kv->tables.plan[layer].stored_layer == layer)
                st = tkvcu_export_layer(cu, seq, kv, host_seq, layer, &t, stream);
        if (!st) st = tkvcu_check_cuda(cu, cudaStreamSynchronize(stream));
        if (st) (void)tkv_seq_reset(kv, host_seq); /* the copy is incomplete */
        else tkvi_release_unused(kv, host_seq);
    }
    free(t.list);
    free(t.version);
    return st;
}

#endif /* TKVCU_TRANSFER_H */
/* ======== calls.h ======== */
/*
 * calls.h - the calls of each step, and getters.
 */
#ifndef TKVCU_CALLS_H
#define TKVCU_CALLS_H


tkv_status tkvcu_append(tkvcu *cu, int layer, const void *d_k, const void *d_v, tkv_type type, int n_tokens,
                        const int32_t *d_seq_map, tkvcu_stream stream) {
    const tkvi_tables *t;
    const tkvi_plan *p;
    tkvcu_append_call c;
    tkvcu_append_launch a;
    if (!cu) return TKV_ERR_ARG;
    t = &cu->host->tables;
    if (layer < 0 || layer >= t->cfg.model.n_layers || t->plan[layer].stored_layer != layer)
        return tkvcu_fail(cu, TKV_ERR_ARG, "no K and V of its own: layer", layer, "");
    if (!d_k || !d_v) return tkvcu_fail(cu, TKV_ERR_ARG, "k or v is missing", 0, NULL);
    if ((unsigned)type > TKV_TYPE_BF16)
        return tkvcu_fail(cu, TKV_ERR_ARG, "type must be a tkv_type", 0, NULL);
    if (n_tokens < 1 || n_tokens > tkvi_min(TKVCU_MAX_APPEND, t->cfg.limits.max_append))
        return tkvcu_fail(cu, TKV_ERR_ARG, "n_tokens is", n_tokens,
                          "; it must be 1 to 64, and at most cfg.limits.max_append");
    p = &t->plan[layer];
    memset(&c, 0, sizeof c);
    c.x[0] = d_k;
    c.x[1] = d_v;
    c.seq_map = d_seq_map;
    c.layer = &cu->layer[layer];
    c.flags = cu->flags;
    c.type = type;
    c.n_tokens = n_tokens;
    c.max_tokens = cu->max_tokens;
    c.hot = p->now.hot;
    c.warm = p->now.warm;
    c.same_coding = p->now.key[TKV_TIER_WARM] == p->now.key[TKV_TIER_ARCHIVE];
    c.fit = t->cfg.format.fit;
    c.saturate = t->cfg.host.nonfinite == TKV_NONFINITE_SATURATE;
    cu->used_versions[layer] |= (uint8_t)(1u << tkvi_max(0, t->current_version[layer]));
    cu->appended[layer] = 1;
    a = tkvcu_select_append_kernel(t->cfg.model.head_dim);
    TKVCU_LAUNCH(a.kernel, dim3(2u * (unsigned)t->cfg.model.n_kv_heads, (unsigned)cu->n_seqs),
                 dim3((unsigned)a.threads), a.shared, stream, cu->view[layer], c);
    return tkvcu_check_launch(cu);
}

tkv_status tkvcu_attend(tkvcu *cu, int layer, const void *d_q, tkv_type type, int n_queries,
                        const tkvcu_attend_params *params, void *d_out, float *d_lse,
                        const int32_t *d_seq_map, tkvcu_stream stream) {
    const tkvcu_attend_params none = {0.0f, 0.0f, 0, NULL}, *p = params ? params : &none;
    const tkvcu_view *v;
    const tkv_config *cfg;
    tkvcu_attend_call c;
    if (!cu) return TKV_ERR_ARG;
    v = tkvcu_find_view(cu, layer);
    cfg = &cu->host->tables.cfg;
    if (!v) return tkvcu_fail(cu, TKV_ERR_ARG, "no K and V: layer", layer, "");
    if (!d_q || !d_out) return tkvcu_fail(cu, TKV_ERR_ARG, "q or out is missing", 0, NULL);
    if ((unsigned)type > TKV_TYPE_BF16)
        return tkvcu_fail(cu, TKV_ERR_ARG, "type must be a tkv_type", 0, NULL);
    if (n_queries < 1 || n_queries > cu->max_queries)
        return tkvcu_fail(cu, TKV_ERR_ARG, "n_queries is", n_queries, "; it must be 1 to max_queries");
    if (!tkvi_is_finite(p->scale) || !tkvi_is_finite(p->softcap) || p->softcap < 0.0f || p->window < TKV_OFF)
        return tkvcu_fail(cu, TKV_ERR_ARG, "scale, softcap or window is out of range", 0, NULL);
    memset(&c, 0, sizeof c);
    c.q = d_q;
    c.out = d_out;
    c.lse = d_lse;
    c.sink_logits = p->d_sink_logits;
    c.seq_map = d_seq_map;
    c.flags = cu->flags;
    c.type = type;
    c.n_queries = n_queries;
    c.window = p->window == TKV_OFF ? 0 : p->window ? p->window : cu->host->tables.plan[layer].window;
    c.window = tkvi_min(c.window, cu->max_tokens + TKVCU_MAX_QUERIES);
    c.scale = p->scale != 0.0f ? p->scale : cu->host->tables.plan[layer].geometry.scale;
    c.softcap = p->softcap;
    return tkvcu_check_cuda(cu, n_queries > TKVCU_DECODE_QUERIES
                                    ? tkvcu_launch_prefill(cu->prefill, &cu->attend_plan, v, &c, cfg, stream)
                                    : tkvcu_launch_attend(&cu->attend_plan, v, &c, cfg, stream));
}

tkv_status tkvcu_truncate(tkvcu *cu, const int32_t *d_lengths, tkvcu_stream stream) {
    if (!cu) return TKV_ERR_ARG;
    if (!d_lengths) return tkvcu_fail(cu, TKV_ERR_ARG, "the lengths are missing", 0, NULL);
    TKVCU_LAUNCH(tkvcu_truncate_kernel,
                 dim3((unsigned)(cu->n_seqs + TKVCU_TRUNCATE_THREADS - 1) / TKVCU_TRUNCATE_THREADS),
                 dim3(TKVCU_TRUNCATE_THREADS), 0, stream, cu->layer, cu->lists,
                 cu->host->tables.cfg.model.n_layers, cu->n_seqs, d_lengths, cu->flags);
    return tkvcu_check_launch(cu);
}

tkv_status tkvcu_get_lengths(tkvcu *cu, int layer, int32_t *lengths, tkvcu_stream stream) {
    const tkvcu_view *v;
    if (!cu) return TKV_ERR_ARG;
    v = tkvcu_find_view(cu, layer);
    if (!v) return tkvcu_fail(cu, TKV_ERR_ARG, "no K and V: layer", layer, "");
    if (!lengths) return tkvcu_fail(cu, TKV_ERR_ARG, "the memory for lengths is missing", 0, NULL);
    return tkvcu_check_cuda(cu, cudaMemcpy2DAsync(lengths, sizeof *lengths, &v->list->len, sizeof *v->list,
                                                  sizeof *lengths, (size_t)cu->n_seqs, cudaMemcpyDefault,
                                                  stream));
}

tkv_status tkvcu_get_flags(tkvcu *cu, uint32_t *flags, int clear, tkvcu_stream stream) {
    tkv_status st;
    if (!cu) return TKV_ERR_ARG;
    if (!flags) return tkvcu_fail(cu, TKV_ERR_ARG, "the memory for flags is missing", 0, NULL);
    st = tkvcu_check_cuda(cu, cudaMemcpyAsync(flags, cu->flags, sizeof *flags, cudaMemcpyDefault, stream));
    if (!st && clear) st = tkvcu_check_cuda(cu, cudaMemsetAsync(cu->flags, 0, sizeof *flags, stream));
    return st;
}

const char *tkvcu_get_last_error(const tkvcu *cu) { return cu ? cu->error : ""; }

#endif /* TKVCU_CALLS_H */
#endif /* TKVCU_INTERFACE_ONLY */
