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
