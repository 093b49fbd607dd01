/*
 * tieredkv_cuda.cu - tieredkv's cache on a GPU: the same blocks, attention straight on the compressed tiers.
 *
 * One file beside tieredkv.h, which has every layout, table and rule; C interface; no other library than
 * CUDA's runtime. For compute capability 8.0 and later.
 *
 *     nvcc -O3 -arch=native -c tieredkv_cuda.cu                    an object for a C or C++ program
 *     nvcc -O3 -arch=native -shared -Xcompiler -fPIC -DTIEREDKV_IMPLEMENTATION tieredkv_cuda.cu \
 *          -o libtieredkv_cuda.so                                  a library that has the tkv_ functions too
 *     #define TKVCU_INTERFACE_ONLY
 *     #include "tieredkv_cuda.cu"                                  the declarations below, from C or C++
 *
 * A cache has its tokens in two pieces of device memory that the caller brings:
 *
 *     tkvcu_desc desc = {0};
 *     desc.cfg = &cfg;
 *     desc.max_tokens = 32768;
 *     tkvcu_query(&desc, &bytes, &work_bytes, why, sizeof why);
 *     cudaMalloc(&cache, bytes);
 *     cudaMalloc(&work, work_bytes);
 *     tkvcu_create(&desc, cache, bytes, work, work_bytes, stream, &cu);
 *     tkvcu_import(cu, 0, kv, 0, stream);          a prompt that the CPU has seen, or nothing
 *     for each step, for each layer:
 *         tkvcu_append(cu, layer, k, v, TKV_TYPE_F16, 1, NULL, stream);
 *         tkvcu_attend(cu, layer, q, TKV_TYPE_F16, 1, NULL, out, NULL, NULL, stream);
 *     tkvcu_status(cu, &word, 0, stream);          did all of it go well?
 *
 * Order: every call puts its work into `stream` and returns; calls on one cache must follow each other, in
 * one stream or through events. tkvcu_create, tkvcu_tables, tkvcu_import and tkvcu_export wait for the
 * stream; the others never do, allocate nothing, and read lengths on the device alone: captured once into a
 * graph they replay at any length. A handle is for one thread at a time. The current device must be the one
 * that the memory is of.
 *
 * Errors: an argument that is wrong gives a status (tkv_status, or one of those below), nothing has been
 * launched, and tkvcu_last_error has a sentence. What only the device sees (a sequence is full, a NaN among
 * new keys) sets a bit in a word that stays set; that call has left the sequence as long as it was.
 *
 * What it holds: formats A, R, KIVI and Q8 in warm and archive tiers, F16 or BF16 in hot tier and sinks;
 * head_dim (of K and V, the same) 64 or 128; up to 16 query heads on a KV head. A formats want
 * cfg.format.allocation_unit = 16, KIVI and Q8 cfg.format.group_size = 64. Windows hide tokens here and drop none.
 * What the config says of budgets, ladders, eviction, spilling, recomputation, anchors and meters must be zero.
 *
 * Bytes: blocks are those of the host, byte for byte, so import and export copy them; encoding is the code of
 * tieredkv.h, so a cache that grows here has the bytes that it would have there.
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

/* >>limits and codes */
#define TKVCU_MAX_APPEND 64  /* tokens of a sequence in one call */
#define TKVCU_MAX_QUERIES 64 /* the same */
#define TKVCU_MAX_GROUP 16   /* query heads on a KV head */

#define TKVCU_ERR_CUDA (-101)        /* the runtime refused; tkvcu_last_error says what it said */
#define TKVCU_ERR_UNSUPPORTED (-102) /* tieredkv.h can do it, this file cannot */

/* Bits of the device's word. */
#define TKVCU_WORD_FULL 1u       /* a sequence would have had more than max_tokens */
#define TKVCU_WORD_NOT_FINITE 2u /* NaN or infinity in k or v, and cfg.host.nonfinite says to refuse them */
#define TKVCU_WORD_SEQUENCE 4u   /* a d_seq_map names a sequence that there is not */
#define TKVCU_WORD_INEXACT 8u    /* tkvcu_trim would have cut compressed tokens */

typedef struct tkvcu tkvcu;
struct CUstream_st;
typedef struct CUstream_st *tkvcu_stream; /* cudaStream_t */

/* >>life */
typedef struct tkvcu_desc {
    const tkv_config *cfg; /* the model and the plan; read by tkvcu_create, not kept */
    int n_seqs;            /* 0: cfg->limits.max_seqs */
    int max_tokens;        /* of a sequence; 0: cfg->limits.max_tokens, which must not be 0 then */
    int max_queries;       /* of a sequence in one tkvcu_attend, up to 64; 0: 1. Work takes more above 8 */
} tkvcu_desc;

/* Bytes of both pieces. Asks no GPU. TKV_ERR_CONFIG or TKVCU_ERR_UNSUPPORTED: `reason` (NULL, or `size`
 * bytes) gets a sentence. The hot tier has room for a chunk of cfg->limits.max_append tokens (as an import brings
 * it): a smaller one saves memory. O(layers). */
int tkvcu_query(const tkvcu_desc *desc, size_t *cache_bytes, size_t *work_bytes, char *reason, size_t size);
/* An empty cache in the caller's device memory, which must be aligned to 256 bytes and outlive it. Until
 * tkvcu_tables or an import brings better ones, A and R formats share bits equally. *out is untouched on
 * error. TKVCU_ERR_UNSUPPORTED: the device is older than 8.0, or a block of threads there has less shared
 * memory than these formats take. Waits. */
int tkvcu_create(const tkvcu_desc *desc, void *d_cache, size_t cache_bytes, void *d_work, size_t work_bytes,
                 tkvcu_stream stream, tkvcu **out);
void tkvcu_destroy(tkvcu *cu); /* the handle's host memory; NULL is fine. The device's stays the caller's */

/* >>transfer. `kv` is a cache of tieredkv.h whose config says the same of model, tiers and formats. All wait.
 * */
/* Takes over the tables that kv has learned or loaded; blocks that are coded from now on go by them.
 * TKV_ERR_STATE: blocks here may be coded with another table of that number. */
int tkvcu_tables(tkvcu *cu, const tkv_cache *kv, tkvcu_stream stream);
/* Sequence seq becomes a copy of kv's host_seq, tables included. Refused, nothing changed: TKV_ERR_CAPACITY
 * (too long, or more blocks wait in a tier than there is room for: a prompt of less than 512 tokens in A and R
 * formats has no table yet; tkv_freeze_calibration makes it, tkv_seq_begin and tkv_seq_commit move the blocks);
 * TKV_ERR_STATE (an open step; other tables); TKVCU_ERR_UNSUPPORTED (holes, blocks that windows dropped, that
 * are outside RAM, that a flush made short). O(bytes). */
int tkvcu_import(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, tkvcu_stream stream);
/* The inverse: kv's host_seq, which must be empty, becomes a copy of seq; a layer of kv without a table gets
 * those of seq and learns no more. TKV_ERR_STATE (not empty; other tables), TKV_ERR_NOMEM, TKV_ERR_CAPACITY.
 * O(bytes). */
int tkvcu_export(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, tkvcu_stream stream);

/* >>use. d_seq_map: NULL, or device memory: n_seqs entries, entry i names the sequence of row i of k, v, q
 * and out; a negative one skips the row. In an append no sequence may be named twice. NULL: row i is sequence
 * i, for all. */
/* n_tokens (1 .. TKVCU_MAX_APPEND, at most cfg->limits.max_append) new tokens for each row. d_k, d_v:
 * [row][n_tokens][n_kv_heads][head_dim], packed, aligned as their type, keys after RoPE. First what is due moves
 * down a tier, as in tkv_append. Sets bits FULL, NOT_FINITE, SEQUENCE. Cost: O(values), and an encoding per 64
 * tokens. */
int tkvcu_append(tkvcu *cu, int layer, const void *d_k, const void *d_v, tkv_type type, int n_tokens,
                 const int32_t *d_seq_map, tkvcu_stream stream);

typedef struct tkvcu_attend_params { /* zero means default */
    float scale;                     /* of q.k; 0: the config's */
    float softcap;                   /* 0: none */
    int window;                      /* newest keys that a query sees; 0: the layer's; TKV_OFF: all */
    const float *d_sinks;            /* NULL, or device memory: a learned logit per query head */
} tkvcu_attend_params;
/* Attention of the last n_queries (1 .. max_queries) tokens of each row's sequence, causal among themselves.
 * d_q, d_out: [row][n_queries][n_heads][head_dim], packed; d_lse: NULL or [row][n_queries][n_heads] floats,
 * natural logarithm, learned sinks included. params NULL: all defaults. A row that sees no key gives zeros
 * and -inf; rows that are skipped are not written. The same bits in every run on one device. Sets bit
 * SEQUENCE. Queries times heads of a group are columns. Cost: up to 8 queries the bytes of the sequence once
 * for each 8 columns; more, for chunks of a prompt, are for another kernel: O(tokens * columns * head_dim) products,
 * and the bytes, each code made a half, once for each 128 columns. */
int tkvcu_attend(tkvcu *cu, int layer, const void *d_q, tkv_type type, int n_queries,
                 const tkvcu_attend_params *params, void *d_out, float *d_lse, const int32_t *d_seq_map,
                 tkvcu_stream stream);

/* Cuts each sequence to d_lengths[seq] tokens, in all layers (device memory, n_seqs entries; negative, or
 * more than there are: it stays). 0 empties it; else the cut must fall into the hot tier: bit INEXACT, and it
 * stays. */
int tkvcu_trim(tkvcu *cu, const int32_t *d_lengths, tkvcu_stream stream);
/* Copies the lengths of a layer's sequences, n_seqs of them, to `lengths`: memory of the device, or pinned
 * memory of the host (a copy to other memory of the host may wait). */
int tkvcu_lengths(const tkvcu *cu, int layer, int32_t *lengths, tkvcu_stream stream);
/* Copies the word of TKVCU_WORD_ bits to `word`, memory as above; clear = 1: then sets it to 0. */
int tkvcu_status(tkvcu *cu, uint32_t *word, int clear, tkvcu_stream stream);

const char *tkvcu_strerror(int status);        /* of a status of this file or of tieredkv.h */
const char *tkvcu_last_error(const tkvcu *cu); /* a sentence on the last call that failed; "" if none did */

#ifdef __cplusplus
}
#endif

#endif /* TKVCU_API_H */
