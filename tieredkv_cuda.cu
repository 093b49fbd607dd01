/* tieredkv_cuda.cu: generated from src/cuda/ by tools/amalgamate.py. Edit there, not here. */
/* ======== api.h ======== */
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
 *     tkvcu_desc desc = {0};                       tkvcu_query(&desc, &bytes, &work_bytes, why, sizeof why);
 *     desc.cfg = &cfg;                             cudaMalloc(&cache, bytes); cudaMalloc(&work, work_bytes);
 *     desc.max_tokens = 32768;                     tkvcu_create(&desc, cache, bytes, work, work_bytes, stream, &cu);
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
 * cfg.allocation_unit = 16. Windows hide tokens here and drop none. What the config says of budgets, ladders,
 * eviction, spilling, recomputation, anchors and meters must be zero.
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
#define TKVCU_MAX_APPEND 64 /* tokens of a sequence in one call */
#define TKVCU_MAX_QUERIES 8 /* the same */
#define TKVCU_MAX_GROUP 16  /* query heads on a KV head */

#define TKVCU_ERR_CUDA (-101)        /* the runtime refused; tkvcu_last_error says what it said */
#define TKVCU_ERR_UNSUPPORTED (-102) /* tieredkv.h can do it, this file cannot */

/* Bits of the device's word. */
#define TKVCU_WORD_FULL 1u       /* a sequence would have had more than max_tokens */
#define TKVCU_WORD_NOT_FINITE 2u /* NaN or infinity in k or v, and cfg.nonfinite says to refuse them */
#define TKVCU_WORD_SEQUENCE 4u   /* a d_seq_map names a sequence that there is not */
#define TKVCU_WORD_INEXACT 8u    /* tkvcu_trim would have cut compressed tokens */

typedef struct tkvcu tkvcu;
struct CUstream_st;
typedef struct CUstream_st *tkvcu_stream; /* cudaStream_t */

/* >>life */
typedef struct tkvcu_desc {
    const tkv_config *cfg; /* the model and the plan; read by tkvcu_create, not kept */
    int n_seqs;            /* 0: cfg->max_seqs */
    int max_tokens;        /* of a sequence; 0: cfg->max_tokens, which must not be 0 then */
    int max_queries;       /* of a sequence in one tkvcu_attend; 0: 1 */
} tkvcu_desc;

/* Bytes of both pieces. Asks no GPU. TKV_ERR_CONFIG or TKVCU_ERR_UNSUPPORTED: `reason` (NULL, or `size`
 * bytes) gets a sentence. The hot tier has room for a chunk of cfg->max_append tokens (as an import brings
 * it): a smaller one saves memory. O(layers). */
int tkvcu_query(const tkvcu_desc *desc, size_t *cache_bytes, size_t *work_bytes, char *reason, size_t size);
/* An empty cache in the caller's device memory, which must be aligned to 256 bytes and outlive it. Until
 * tkvcu_tables or an import brings better ones, A and R formats share bits equally. *out is untouched on
 * error. Waits. */
int tkvcu_create(const tkvcu_desc *desc, void *d_cache, size_t cache_bytes, void *d_work, size_t work_bytes,
                 tkvcu_stream stream, tkvcu **out);
void tkvcu_destroy(tkvcu *cu); /* the handle's host memory; NULL is fine. The device's stays the caller's */

/* >>transfer. `kv` is a cache of tieredkv.h whose config says the same of model, tiers and formats. All wait.
 * */
/* Takes over the tables that kv has learned or loaded; blocks that are coded from now on go by them.
 * TKV_ERR_STATE: blocks here may be coded with another table of that number. */
int tkvcu_tables(tkvcu *cu, const tkv_cache *kv, tkvcu_stream stream);
/* Sequence seq becomes a copy of kv's host_seq, tables included. Refused, nothing changed: TKV_ERR_CAPACITY
 * (too long, or more blocks wait in a tier than there is room for); TKV_ERR_STATE (an open step; other
 * tables); TKVCU_ERR_UNSUPPORTED (holes, blocks that windows dropped, that are outside RAM, that a flush made
 * short). O(bytes). */
int tkvcu_import(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, tkvcu_stream stream);
/* The inverse: kv's host_seq, which must be empty, becomes a copy of seq; a layer of kv without a table gets
 * those of seq and learns no more. TKV_ERR_STATE (not empty; other tables), TKV_ERR_NOMEM, TKV_ERR_CAPACITY.
 * O(bytes). */
int tkvcu_export(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, tkvcu_stream stream);

/* >>use. d_seq_map: NULL, or device memory: n_seqs entries, entry i names the sequence of row i of k, v, q
 * and out; a negative one skips the row. In an append no sequence may be named twice. NULL: row i is sequence
 * i, for all. */
/* n_tokens (1 .. TKVCU_MAX_APPEND, at most cfg->max_append) new tokens for each row. d_k, d_v:
 * [row][n_tokens] [n_kv_heads][head_dim], packed, keys after RoPE. First what is due moves down a tier, as in
 * tkv_append. Sets bits FULL, NOT_FINITE, SEQUENCE. Cost: O(values), and an encoding per 64 tokens. */
int tkvcu_append(tkvcu *cu, int layer, const void *d_k, const void *d_v, tkv_type type, int n_tokens,
                 const int32_t *d_seq_map, tkvcu_stream stream);

typedef struct tkvcu_attend_params { /* zero means default */
    float scale;                     /* of q.k; 0: the config's */
    float softcap;                   /* 0: none */
    int window;                      /* newest keys that a query sees; 0: the layer's; TKV_NONE: all */
    const float *d_sinks;            /* NULL, or device memory: a learned logit per query head */
} tkvcu_attend_params;
/* Attention of the last n_queries (1 .. max_queries) tokens of each row's sequence, causal among themselves.
 * d_q, d_out: [row][n_queries][n_heads][head_dim], packed; d_lse: NULL or [row][n_queries][n_heads] floats,
 * natural logarithm, learned sinks included. params NULL: all defaults. A row that sees no key gives zeros
 * and -inf; rows that are skipped are not written. The same bits in every run on one device. Sets bit
 * SEQUENCE. Cost: the bytes of the sequence once for each 16 columns (queries times heads of a group). */
int tkvcu_attend(tkvcu *cu, int layer, const void *d_q, tkv_type type, int n_queries,
                 const tkvcu_attend_params *params, void *d_out, float *d_lse, const int32_t *d_seq_map,
                 tkvcu_stream stream);

/* Cuts each sequence to d_lengths[seq] tokens, in all layers (device memory, n_seqs entries; negative, or
 * more than there are: it stays). 0 empties it; else the cut must fall into the hot tier: bit INEXACT, and it
 * stays. */
int tkvcu_trim(tkvcu *cu, const int32_t *d_lengths, tkvcu_stream stream);
/* Copies the lengths of a layer's sequences, n_seqs of them, to `lengths`, memory of device or host. */
int tkvcu_lengths(const tkvcu *cu, int layer, int32_t *lengths, tkvcu_stream stream);
/* Copies the word of TKVCU_WORD_ bits to `word`, memory of device or host; clear = 1: then sets it to 0. */
int tkvcu_status(tkvcu *cu, uint32_t *word, int clear, tkvcu_stream stream);

const char *tkvcu_strerror(int status);        /* of a status of this file or of tieredkv.h */
const char *tkvcu_last_error(const tkvcu *cu); /* a sentence on the last call that failed; "" if none did */

#ifdef __cplusplus
}
#endif

#endif /* TKVCU_API_H */
#if !defined(TKVCU_INTERFACE_ONLY) && !defined(TKVCU_IMPLEMENTED)
#define TKVCU_IMPLEMENTED
/* ======== layout.h ======== */
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


enum { TKVCU_ARCHIVE, TKVCU_WARM, TKVCU_SINKS, TKVCU_HOT, TKVCU_REGIONS };
enum { TKVCU_EXACT, TKVCU_KIVI, TKVCU_A, TKVCU_R }; /* how a side is read */

typedef struct tkvcu_side { /* one head's side in one coding: all that a kernel must know */
    uint8_t kind, bf16;     /* TKVCU_EXACT: 1: bfloat16 */
    uint8_t half_bits;      /* KIVI: 2 * width; R: 2, 3 (pairs), 4, 6, 8 */
    uint8_t group;          /* KIVI: values per scale, 32 or 64 */
    uint8_t slabs[7];       /* A: slabs of 16 channels (4 tiles) with so many bits; stored widest first */
    int16_t top;            /* window of the logarithmic scales */
    uint32_t at, bytes;     /* from the start of the block; whole */
    uint32_t code_bytes;    /* then metadata, as in format_*.h */
    int32_t table;          /* A: first element of order and mean below; -1: channels as they come, means 0 */
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
/* ======== warp.h ======== */
/*
 * warp.h - the instructions that have no name in CUDA C++: matrix product of a warp,
 * copies into shared memory, pairs of
 * half floats in a word (the lower half first). tests/cuda_on_cpu.h plays them on a processor.
 */
#ifndef TKVCU_WARP_H
#define TKVCU_WARP_H


#ifndef TKVCU_ON_CPU

#define TKVCU_LAUNCH(kernel, grid, block, shared, stream, ...)                                               \
    kernel<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__)
#define TKVCU_SHARED(type, name)                                                                             \
    extern __shared__ __align__(128) uint8_t tkvcu_shared_[];                                                \
    type *name = (type *)(void *)tkvcu_shared_

#define TKVCU_DEVICE static __device__ __forceinline__

/* c += a b: a is 16 x 16, b is 16 x 8. Lane 4 g + t has of a the rows g, g + 8 at k = 2 t, 2 t + 1, then 2 t + 8, + 9
 * (a[0] row g, a[1] row g + 8, a[2] and a[3] the same further on), of b column g at these k, and of c rows g (c[0],
 * c[1]) and g + 8 at columns 2 t, 2 t + 1. */
TKVCU_DEVICE void tkvcu_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

TKVCU_DEVICE void tkvcu_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

TKVCU_DEVICE uint32_t tkvcu_shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Four 8 x 8 matrices of 16-bit values; lane 8 j + i gives the address of row i of matrix j. */
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

TKVCU_DEVICE void tkvcu_cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N> TKVCU_DEVICE void tkvcu_cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

TKVCU_DEVICE uint32_t tkvcu_f16x2(float lo, float hi) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
    return x;
}

TKVCU_DEVICE uint32_t tkvcu_bf16x2(float lo, float hi) {
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
    return x;
}

TKVCU_DEVICE float tkvcu_f16_lo(uint32_t x) {
    float y;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(y) : "r"(x));
    return y;
}

TKVCU_DEVICE float tkvcu_f16_hi(uint32_t x) {
    float y;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "r"(x));
    return y;
}

TKVCU_DEVICE float tkvcu_bf16_lo(uint32_t x) { return __uint_as_float(x << 16); }
TKVCU_DEVICE float tkvcu_bf16_hi(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

TKVCU_DEVICE uint32_t tkvcu_hmul2(uint32_t a, uint32_t b) {
    uint32_t x;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}

TKVCU_DEVICE uint32_t tkvcu_prmt(uint32_t a, uint32_t b, uint32_t select) { return __byte_perm(a, b, select); }

TKVCU_DEVICE float tkvcu_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#else
#define TKVCU_DEVICE static inline
#endif

/* (x & mask) | or, one instruction where the compiler is let to see it. */
TKVCU_DEVICE uint32_t tkvcu_pick(uint32_t x, uint32_t mask, uint32_t with) { return (x & mask) | with; }

#endif /* TKVCU_WARP_H */
/* ======== encode.h ======== */
/*
 * encode.h - one head's side of a block, decoded and encoded by the threads of a CTA: the functions of
 * tieredkv.h, a thread for each column of K, token of V, or tile. So the bytes are those of the host.
 *
 * nvcc fuses a product and a sum where it can. In these functions that changes nothing: the products that
 * feed sums are exact, or stand in functions that are not inlined (tests/test_cuda_fma.py looks at what it
 * makes of them).
 */
#ifndef TKVCU_ENCODE_H
#define TKVCU_ENCODE_H


#define TKVCU_ENCODERS 128 /* threads: one for each channel of 128 */

/* Shared memory of the CTA. Behind it: tkvi_columns [head_dim / 16], codes [head_dim][64], values
 * [64][head_dim + 1]. An odd stride: threads that walk along tokens, and those that walk along channels, all
 * have banks of their own. */
typedef struct tkvcu_desk {
    tkvi_format format[2];
    tkvi_side side[2]; /* from, to */
    float scale[2 * 128], zero[2 * 128];
    float mean[128], middle[128]; /* A, by channel; channel: by position */
    uint8_t channel[128], width[128], log[128], by[128];
} tkvcu_desk;

__host__ __device__ static inline size_t tkvcu_desk_bytes(int head_dim) {
    const size_t dim = (size_t)head_dim;
    return tkvi_align_up(sizeof(tkvcu_desk)) + dim / TKVI_LANES * sizeof(tkvi_columns) + dim * TKVI_BLOCK +
           TKVI_BLOCK * (dim + 1) * sizeof(float);
}

__device__ static inline tkvi_columns *tkvcu_columns_of(tkvcu_desk *d) {
    return (tkvi_columns *)(void *)((uint8_t *)d + tkvi_align_up(sizeof *d));
}

__device__ static inline uint8_t *tkvcu_codes_of(tkvcu_desk *d, int head_dim) {
    return (uint8_t *)(tkvcu_columns_of(d) + head_dim / TKVI_LANES);
}

__device__ static inline float *tkvcu_values_of(tkvcu_desk *d, int head_dim) {
    return (float *)(void *)(tkvcu_codes_of(d, head_dim) + head_dim * TKVI_BLOCK);
}

/* The side as the functions of tieredkv.h want it. One thread writes it. */
__device__ static inline void tkvcu_side_open(const tkvcu_view *v, const tkvcu_side *d, int which, int fit,
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
        s->runs.n[f->bits] = (uint16_t)(s->pad / 4);
    }
    if (d->kind == TKVCU_A) {
        for (w = 1; w <= 6; w++) s->runs.n[w] = (uint16_t)(4 * d->slabs[w]);
        if (d->table >= 0) {
            s->order = v->order + d->table;
            s->mean = v->mean + d->table;
        }
    }
    if (d->kind == TKVCU_R) {
        f->rotated = 1;
        s->half_bits = (int8_t)d->half_bits;
        s->pairs = d->half_bits == 3;
        if (s->pairs) s->levels = tkvi_r_pairs;
        s->runs.n[s->pairs ? 3 : d->half_bits / 2] = (uint16_t)(s->pad / 4 / (s->pairs ? 2 : 1));
    }
}

/* Walks over the tiles that are this thread's. Those that share a vector of 1-bit halves belong to one. */
typedef struct tkvcu_walk {
    const tkvi_side *s;
    tkvi_tile_at at;
    int width, i, left; /* of tile i; left: of its width, behind it */
} tkvcu_walk;

__device__ static inline tkvcu_walk tkvcu_walk_of(const tkvi_side *s) {
    tkvcu_walk w;
    w.s = s;
    w.at = tkvi_tiles(&s->runs);
    w.width = TKVI_MAX_WIDTH + 1;
    w.i = -1;
    w.left = 0;
    return w;
}

__device__ static inline int tkvcu_walk_next(tkvcu_walk *w) {
    int owner;
    do {
        if (w->i >= 0) tkvi_next_tile(&w->at, w->width);
        w->i++;
        while (w->left == 0) {
            if (--w->width == 0) return 0;
            w->left = w->s->runs.n[w->width];
        }
        w->left--;
        owner = tkvi_has_half[w->width] ? w->at.half / 2 : w->i;
    } while (owner % (int)blockDim.x != (int)threadIdx.x);
    return 1;
}

/* Bits of the tile that has this position. */
__device__ static inline int tkvcu_width_at(const tkvi_side *s, int position) {
    int width, end = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        end += 4 * s->runs.n[width];
        if (position < end) return width;
    }
    return 0;
}

/* >>decoding */
/* Scale and zero number i of the side. */
__device__ static inline void tkvcu_meta(const tkvi_side *s, int kind, const uint8_t *meta, int n, int i,
                                         float *scale, float *zero) {
    if (kind == TKVCU_KIVI) {
        *scale = tkvi_f16_to_f32(tkvi_load16(meta + 2 * i));
        *zero = tkvi_f16_to_f32(tkvi_load16(meta + 2 * (n + i)));
    } else if (kind == TKVCU_R) {
        const float middle = s->pairs ? 0.0f : 0.5f * (float)((1 << s->half_bits / 2) - 1);
        *scale = tkvi_log_value(meta[i], s->top) * (s->pairs ? 1.0f / 64.0f : 1.0f);
        *zero = -middle * *scale;
    } else {
        const int width = tkvcu_width_at(s, i), unit = tkvi_a_unit[width];
        const float mean = s->mean ? s->mean[i] : 0.0f;
        *scale = width ? tkvi_log_value(meta[i], s->top) : 0.0f;
        *zero = width
                    ? tkvi_zero(meta[n + i], *scale, mean, 1.0f / (float)unit, ((1 << width) - 1) * unit / 2)
                    : tkvi_f32(tkvi_f16_to_f32((uint16_t)(meta[i] | meta[n + i] << 8)) + mean);
    }
}

/* Token t of a V side. */
__device__ static inline void tkvcu_v_token(const tkvcu_desk *d, const uint8_t (*code)[TKVI_TILE_CODES],
                                            int t, float *x) {
    const tkvi_side *s = &d->side[0];
    int width, i, tile = 0, slab = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i += 4, tile += 4) {
            tkvi_v_values(s, width, code[tile + t / 16], slab, t, d->scale, d->zero, x);
            slab += tkvi_slab_channels(s, width);
        }
    if (s->format->rotated) tkvi_rotate_back(x, s->dim);
}

/* A side's 64 tokens to the desk's values, by all threads; exact ones: bf16 or not. */
__device__ static inline void tkvcu_decode(tkvcu_desk *d, const tkvcu_side *from, const uint8_t *src) {
    const tkvi_side *s = &d->side[0];
    const int dim = s->dim, stride = dim + 1, me = (int)threadIdx.x, all = (int)blockDim.x;
    uint8_t(*code)[TKVI_TILE_CODES] = (uint8_t(*)[TKVI_TILE_CODES])tkvcu_codes_of(d, dim);
    float *x = tkvcu_values_of(d, dim);
    int i;
    if (from->kind == TKVCU_EXACT) {
        for (i = me; i < TKVI_BLOCK * dim; i += all) {
            const uint16_t h = tkvi_load16(src + 2 * i);
            x[i / dim * stride + i % dim] = from->bf16 ? tkvi_bf16_to_f32(h) : tkvi_f16_to_f32(h);
        }
    } else {
        const int n = s->groups * (s->which == TKV_V ? TKVI_BLOCK : dim);
        tkvcu_walk w = tkvcu_walk_of(s);
        while (tkvcu_walk_next(&w)) tkvi_unpack_tile(src, &w.at, w.width, code[w.i]);
        for (i = me; i < n; i += all)
            tkvcu_meta(s, from->kind, src + s->code_bytes, n, i, &d->scale[i], &d->zero[i]);
        __syncthreads();
        for (i = me; i < (s->which == TKV_V ? TKVI_BLOCK : dim); i += all)
            if (s->which == TKV_V) tkvcu_v_token(d, code, i, x + i * stride);
            else
                tkvi_k_values(s, tkvcu_width_at(s, i), code[i / 4], i, 0, TKVI_BLOCK, d->scale, d->zero, x,
                              (size_t)stride);
    }
    __syncthreads();
}

/* >>encoding: the desk's values as side 1, each kind in the steps of its format_*.h. dst was cleared. */
__device__ static inline void tkvcu_encode_a(tkvcu_desk *d, uint8_t *dst) {
    const tkvi_side *s = &d->side[1];
    const int dim = s->dim, me = (int)threadIdx.x, all = (int)blockDim.x;
    uint8_t(*column)[TKVI_BLOCK] = (uint8_t(*)[TKVI_BLOCK])tkvcu_codes_of(d, dim);
    tkvi_columns *columns = tkvcu_columns_of(d);
    tkvcu_walk w;
    int p;
    for (p = me; p < dim; p += all) {
        const int from = tkvi_channel(s, p);
        d->channel[p] = (uint8_t)from;
        d->width[from] = (uint8_t)tkvcu_width_at(s, p);
        d->mean[from] = s->mean ? s->mean[p] : 0.0f;
    }
    for (p = me * TKVI_LANES; p < dim; p += all * TKVI_LANES) {
        tkvi_columns *c = &columns[p / TKVI_LANES];
        c->x = tkvcu_values_of(d, dim) + p;
        c->stride = (size_t)dim + 1;
        c->n = TKVI_BLOCK;
        c->lanes = TKVI_LANES;
        c->mean = d->mean + p;
        c->width = d->width + p;
        c->code = column + p;
        c->log = d->log + p;
        c->offset = d->by + p;
        c->middle = d->middle + p;
    }
    __syncthreads();
    for (p = me; p < dim; p += all) {
        tkvi_columns *c = &columns[p / TKVI_LANES];
        tkvi_a_integers(c, p % TKVI_LANES);
        tkvi_a_search(c, p % TKVI_LANES);
        if (tkvi_a_settle(c, p % TKVI_LANES, s->top)) tkvi_a_recode(c, p % TKVI_LANES, s->top);
    }
    __syncthreads();
    for (w = tkvcu_walk_of(s); tkvcu_walk_next(&w);) {
        uint8_t tile[TKVI_TILE_CODES];
        tkvi_weave_scalar(column, d->channel + 4 * w.i, tile);
        tkvi_pack_tile(dst, &w.at, w.width, tile);
    }
    for (p = me; p < dim; p += all) {
        const int c = d->channel[p];
        uint8_t *meta = dst + s->code_bytes + p;
        tkvi_a_put(d->width[c], d->log[c], d->by[c], d->middle[c], meta, meta + dim);
    }
}

__device__ static inline void tkvcu_pack(const tkvi_side *s, uint8_t (*code)[TKVI_TILE_CODES], uint8_t *dst) {
    tkvcu_walk w = tkvcu_walk_of(s);
    while (tkvcu_walk_next(&w)) tkvi_pack_tile(dst, &w.at, w.width, code[w.i]);
}

__device__ static inline void tkvcu_encode_r(tkvcu_desk *d, uint8_t *dst) {
    const tkvi_side *s = &d->side[1];
    const int dim = s->dim;
    uint8_t(*code)[TKVI_TILE_CODES] = (uint8_t(*)[TKVI_TILE_CODES])tkvcu_codes_of(d, dim);
    int t;
    for (t = (int)threadIdx.x; t < TKVI_BLOCK; t += (int)blockDim.x) {
        const float scale = tkvi_r_token(s, tkvcu_values_of(d, dim) + t * (dim + 1), t, code);
        dst[s->code_bytes + (size_t)t] =
            (uint8_t)tkvi_log_code(tkvi_r_close(s, t, TKVI_BLOCK, code, scale), s->top);
    }
    __syncthreads();
    tkvcu_pack(s, code, dst);
}

__device__ static inline void tkvcu_encode_kivi(tkvcu_desk *d, uint8_t *dst) {
    const tkvi_side *s = &d->side[1];
    const int dim = s->dim, n = s->groups * (s->which == TKV_V ? TKVI_BLOCK : dim);
    uint8_t(*code)[TKVI_TILE_CODES] = (uint8_t(*)[TKVI_TILE_CODES])tkvcu_codes_of(d, dim);
    float *x = tkvcu_values_of(d, dim);
    uint8_t *meta = dst + s->code_bytes;
    int i;
    for (i = (int)threadIdx.x; i < n; i += (int)blockDim.x)
        if (s->which == TKV_V)
            tkvi_kivi_row(s, x + i % TKVI_BLOCK * (dim + 1), i / TKVI_BLOCK, i % TKVI_BLOCK, code, meta);
        else tkvi_kivi_column(s, x, (size_t)dim + 1, TKVI_BLOCK, i / dim, i % dim, code, meta);
    __syncthreads();
    tkvcu_pack(s, code, dst);
}

__device__ static inline void tkvcu_zero_bytes(uint8_t *dst, size_t n) { /* multiples of 64, aligned to 16 */
    size_t i;
    for (i = (size_t)threadIdx.x * 8; i < n; i += (size_t)blockDim.x * 8) tkvi_store8(dst + i, 0);
}

__device__ static inline void tkvcu_encode(tkvcu_desk *d, int kind, uint8_t *dst) {
    tkvcu_zero_bytes(dst, d->side[1].bytes);
    __syncthreads();
    if (kind == TKVCU_A) tkvcu_encode_a(d, dst);
    else if (kind == TKVCU_R) tkvcu_encode_r(d, dst);
    else tkvcu_encode_kivi(d, dst);
    __syncthreads();
}

#endif /* TKVCU_ENCODE_H */
/* ======== append.h ======== */
/*
 * append.h - new tokens on the device, and what they push down a tier: the rule of age.h, from the length
 * before the append. Also cuts. All is decided from device memory, so that a graph can be captured once.
 *
 * A CTA for each row of the batch, KV head and side. Each sees the same state and does its part of the same
 * blocks; the one that is done last (a ticket in the list) writes the new state down.
 */
#ifndef TKVCU_APPEND_H
#define TKVCU_APPEND_H


typedef struct tkvcu_layer { /* on the device, for all sequences */
    int32_t version;         /* of the table that blocks are coded with */
    int32_t sinks;           /* tokens; -1: the layer has no blocks */
} tkvcu_layer;

typedef struct tkvcu_append_call {
    const void *x[2]; /* k, v */
    const int32_t *seq_map;
    const tkvcu_layer *layer;
    uint32_t *word;
    int32_t type, n_tokens, max_tokens;
    int32_t hot, warm; /* tokens of the tiers */
    int32_t same;      /* 1: archive and warm are coded alike, and blocks move as they are */
    int32_t fit, saturate;
} tkvcu_append_call;

#define TKVCU_TICKET 0x10000 /* CTAs that refuse count here, above those that are done */

/* >>ageing */
typedef struct tkvcu_ages {
    tkvcu_list list; /* as it becomes */
    int32_t sinks, hot, warm, block;
    int32_t from, to; /* regions of the block that is due; to < 0: none is any more */
} tkvcu_ages;

/* Finds the next block that is due, oldest first, and counts it as moved. */
__host__ __device__ static inline int tkvcu_age_next(tkvcu_ages *a) {
    tkvcu_list *l = &a->list;
    for (;; a->block++) {
        const int end = a->sinks + TKVI_BLOCK * (a->block + 1), is_warm = a->block < l->archive + l->warm;
        const int age = l->len - end; /* below 0: it is not whole */
        const int archive = age - a->hot >= a->warm;
        if (age < a->hot || age < 0) return 0;
        if (is_warm && !archive) {
            a->block = l->archive + l->warm - 1; /* the younger warm ones stay as well */
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

__host__ __device__ static inline tkvcu_ages tkvcu_ages_of(const tkvcu_list *l, int sinks, int hot,
                                                           int warm) {
    tkvcu_ages a;
    a.list = *l;
    a.sinks = sinks;
    a.hot = hot;
    a.warm = warm;
    a.block = l->archive;
    a.from = a.to = -1;
    return a;
}

__host__ __device__ static inline uint8_t *tkvcu_block_at(const tkvcu_view *v, int region, int seq,
                                                          int block) {
    return v->bytes[region] + (size_t)seq * v->stride[region] +
           (size_t)(block % v->ring[region]) * v->block[region];
}

__device__ static inline const tkvcu_side *tkvcu_side_at(const tkvcu_view *v, int version, int region,
                                                         int head, int which) {
    return &v->side[((version * TKVCU_REGIONS + region) * v->n_kv_heads + head) * 2 + which];
}

/* This CTA's side of a block goes to another region. */
__device__ static inline void tkvcu_move(const tkvcu_view *v, const tkvcu_append_call *c, tkvcu_desk *d,
                                         int seq, const tkvcu_ages *a, int block, int head, int which,
                                         int to_version) {
    const int copy = c->same && a->from == TKVCU_WARM;
    const int version =
        a->from == TKVCU_WARM ? v->version[(size_t)seq * (size_t)v->max_blocks + (size_t)block] : 0;
    const tkvcu_side *from = tkvcu_side_at(v, version, a->from, head, which);
    const tkvcu_side *to = tkvcu_side_at(v, copy ? version : to_version, a->to, head, which);
    const uint8_t *src = tkvcu_block_at(v, a->from, seq, block) + from->at;
    uint8_t *whole = tkvcu_block_at(v, a->to, seq, block), *dst = whole + to->at;
    uint32_t i;
    if (copy) {
        for (i = 8 * threadIdx.x; i < to->bytes; i += 8 * blockDim.x)
            tkvi_store8(dst + i, tkvi_load8(src + i));
        __syncthreads();
    } else {
        if (threadIdx.x == 0) {
            tkvcu_side_open(v, from, which, 0, &d->format[0], &d->side[0]);
            tkvcu_side_open(v, to, which, c->fit, &d->format[1], &d->side[1]);
        }
        __syncthreads();
        tkvcu_decode(d, from, src);
        tkvcu_encode(d, to->kind, dst);
    }
    if (head == v->n_kv_heads - 1 && which) /* what no head has been given */
        for (i = to->at + to->bytes + 8 * threadIdx.x; i < v->block[a->to]; i += 8 * blockDim.x)
            tkvi_store8(whole + i, 0);
}

/* >>new tokens */
/* Place of the row of a position, in the side at `s` of its block. */
__device__ static inline uint8_t *tkvcu_row_at(const tkvcu_view *v, int seq, int position, int head,
                                               int which, int *row) {
    const int region = position < v->sinks ? TKVCU_SINKS : TKVCU_HOT;
    const int behind = position - v->sinks, block = region == TKVCU_SINKS ? 0 : behind / TKVI_BLOCK;
    *row = region == TKVCU_SINKS ? position : behind % TKVI_BLOCK;
    return tkvcu_block_at(v, region, seq, block) + tkvcu_side_at(v, 0, region, head, which)->at;
}

__device__ static inline void tkvcu_store_rows(const tkvcu_view *v, const tkvcu_append_call *c, int seq,
                                               int row, int len, int head, int which) {
    const int dim = v->head_dim, stride = v->n_kv_heads * dim;
    const ptrdiff_t first = ((ptrdiff_t)row * c->n_tokens * v->n_kv_heads + head) * dim;
    int t, i, place;
    for (t = 0; t < c->n_tokens; t++) { /* blocks that begin: clean, as the host's */
        uint8_t *bytes = tkvcu_row_at(v, seq, len + t, head, which, &place);
        if (place == 0)
            tkvcu_zero_bytes(
                bytes, tkvcu_side_at(v, 0, len + t < v->sinks ? TKVCU_SINKS : TKVCU_HOT, head, which)->bytes);
    }
    __syncthreads();
    for (i = (int)threadIdx.x; i < c->n_tokens * dim; i += (int)blockDim.x) {
        const int position = len + i / dim;
        uint8_t *bytes = tkvcu_row_at(v, seq, position, head, which, &place);
        const int bf16 =
            tkvcu_side_at(v, 0, position < v->sinks ? TKVCU_SINKS : TKVCU_HOT, head, which)->bf16;
        const ptrdiff_t at = first + (ptrdiff_t)(i / dim) * stride + i % dim;
        float x = tkvi_element(c->x[which], (tkv_type)c->type, at);
        if (c->saturate) x = tkvi_saturate(x);
        tkvi_store16(bytes + 2 * ((size_t)place * (size_t)dim + (size_t)(i % dim)),
                     bf16 ? tkvi_f32_to_bf16(x) : tkvi_f32_to_f16(x));
    }
}

/* Is there a NaN or an infinity among what this CTA stores? */
__device__ static inline int tkvcu_rows_bad(const tkvcu_view *v, const tkvcu_append_call *c, int row,
                                            int head, int which) {
    const int dim = v->head_dim, stride = v->n_kv_heads * dim;
    const ptrdiff_t first = ((ptrdiff_t)row * c->n_tokens * v->n_kv_heads + head) * dim;
    int i, bad = 0;
    for (i = (int)threadIdx.x; i < c->n_tokens * dim; i += (int)blockDim.x)
        bad |= !tkvi_is_finite(
            tkvi_element(c->x[which], (tkv_type)c->type, first + (ptrdiff_t)(i / dim) * stride + i % dim));
    return __syncthreads_or(bad);
}

/* The sequence of a row; -1: none. */
__device__ static inline int tkvcu_seq_of(const int32_t *map, int row, int n_seqs, uint32_t *word) {
    const int seq = map ? map[row] : row;
    if (seq < n_seqs) return seq < 0 ? -1 : seq;
    if (threadIdx.x == 0) atomicOr(word, TKVCU_WORD_SEQUENCE);
    return -1;
}

/* What has been done becomes the state. */
__device__ static inline void tkvcu_settle(const tkvcu_view *v, const tkvcu_append_call *c, int seq,
                                           int refused) {
    tkvcu_list *list = &v->list[seq];
    tkvcu_ages a = tkvcu_ages_of(list, v->sinks, c->hot, c->warm);
    while (tkvcu_age_next(&a))
        if (!c->same || a.from != TKVCU_WARM)
            v->version[(size_t)seq * (size_t)v->max_blocks + (size_t)(a.block - 1)] =
                (uint8_t)c->layer->version;
    list->archive = a.list.archive;
    list->warm = a.list.warm;
    if (!refused) list->len += c->n_tokens;
    list->step = 0;
}

__global__ void __launch_bounds__(TKVCU_ENCODERS) tkvcu_append_kernel(tkvcu_view v, tkvcu_append_call c) {
    TKVCU_SHARED(tkvcu_desk, d);
    const int head = (int)blockIdx.x / 2, which = (int)blockIdx.x % 2, row = (int)blockIdx.y;
    const int seq = tkvcu_seq_of(c.seq_map, row, v.n_seqs, c.word);
    tkvcu_list list;
    tkvcu_ages a;
    int bad = 0;
    if (seq < 0) return;
    list = v.list[seq];
    if (list.len > c.max_tokens - c.n_tokens) {
        if (threadIdx.x == 0) atomicOr(c.word, TKVCU_WORD_FULL);
        return;
    }
    if (!c.saturate) bad = tkvcu_rows_bad(&v, &c, row, head, which);
    a = tkvcu_ages_of(&list, v.sinks, c.hot, c.warm);
    while (tkvcu_age_next(&a)) tkvcu_move(&v, &c, d, seq, &a, a.block - 1, head, which, c.layer->version);
    if (!bad) tkvcu_store_rows(&v, &c, seq, row, list.len, head, which);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const int done =
            atomicAdd(&v.list[seq].step, bad ? 1 + TKVCU_TICKET : 1) + (bad ? 1 + TKVCU_TICKET : 1);
        if (bad) atomicOr(c.word, TKVCU_WORD_NOT_FINITE);
        if (done % TKVCU_TICKET == (int)gridDim.x) {
            __threadfence();
            tkvcu_settle(&v, &c, seq, done / TKVCU_TICKET);
        }
    }
}

/* >>cuts */
/* A thread for each sequence: all of its layers, or none. */
__global__ void __launch_bounds__(TKVCU_ENCODERS)
    tkvcu_trim_kernel(const tkvcu_layer *layer, tkvcu_list *lists, int n_layers, int n_seqs,
                      const int32_t *lengths, uint32_t *word) {
    const int seq = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int i, n;
    if (seq >= n_seqs) return;
    n = lengths[seq];
    for (i = 0; i < n_layers && n > 0; i++) {
        const tkvcu_list *l = &lists[(size_t)i * (size_t)n_seqs + (size_t)seq];
        const int coded = l->archive + l->warm;
        if (layer[i].sinks < 0 || n >= l->len || coded == 0) continue;
        if (n < layer[i].sinks + TKVI_BLOCK * coded) {
            atomicOr(word, TKVCU_WORD_INEXACT);
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
/* ======== attend.h ======== */
/* stub */
#ifndef TKVCU_ATTEND_H
#define TKVCU_ATTEND_H
typedef struct tkvcu_split {
    int ctas;
} tkvcu_split;
typedef struct tkvcu_attend_call {
    const void *q;
    void *out;
    float *lse;
    const float *sinks;
    const int32_t *seq_map;
    uint32_t *word;
    int32_t type, n_queries, window;
    float scale, softcap;
} tkvcu_attend_call;
static size_t tkvcu_split_bytes(const tkv_config *cfg, int n_seqs, int max_queries) {
    return (size_t)(cfg->n_heads * n_seqs * max_queries);
}
static cudaError_t tkvcu_split_init(tkvcu_split *s, const tkv_config *cfg, int n_seqs, int max_queries,
                                    void *work) {
    (void)s;
    (void)cfg;
    (void)n_seqs;
    (void)max_queries;
    (void)work;
    return cudaSuccess;
}
static cudaError_t tkvcu_attend_launch(const tkvcu_split *s, const tkvcu_view *v, const tkvcu_attend_call *c,
                                       cudaStream_t stream) {
    (void)s;
    (void)v;
    (void)c;
    (void)stream;
    return cudaSuccess;
}
#endif
/* ======== create.h ======== */
/*
 * create.h - the handle, what it needs of memory and where everything lies in it, the sides that kernels read
 * by.
 *
 * The handle has a cache of tieredkv.h without tokens: plans, codings and tables of the layers, in the same
 * words as those of the caches that sequences come from and go to. Device memory, in pieces at multiples of
 * 256 bytes:
 *
 *     cache: word | layers [n_layers] | lists [n_layers][n_seqs] | of each layer with blocks:
 *            versions [n_seqs][max_blocks] | sides | order, mean [TKVI_VERSIONS][n_kv_heads][head_dim] |
 *            regions [n_seqs][ring] blocks
 *     work:  what attention keeps between its two kernels (attend.h)
 */
#ifndef TKVCU_CREATE_H
#define TKVCU_CREATE_H


#define TKVCU_ALIGN 256u

struct tkvcu {
    tkv_cache *host;    /* without tokens */
    tkvcu_view *view;   /* [n_layers] */
    uint8_t *used;      /* [n_layers] bits of table versions that blocks may be coded with */
    uint8_t *appended;  /* [n_layers] 1: a graph may append here again */
    tkvcu_layer *layer; /* device, [n_layers] */
    tkvcu_list *lists;  /* device, [n_layers][n_seqs] */
    uint32_t *word;     /* device */
    uint8_t *stage;     /* on its way to the device: a layer's sides, order, mean */
    tkvcu_split split;  /* of the work of attention */
    int n_seqs, max_tokens, max_queries;
    char error[160];
};

/* >>errors */
static int tkvcu_fail(tkvcu *cu, int status, const char *what, int64_t number, const char *more) {
    tkvi_text t = tkvi_text_begin(cu->error, sizeof cu->error);
    tkvi_say(&t, what);
    if (more) {
        tkvi_say(&t, " ");
        tkvi_say_int(&t, number);
        tkvi_say(&t, more);
    }
    return status;
}

/* What the runtime said. */
static int tkvcu_checked(tkvcu *cu, cudaError_t e) {
    return e == cudaSuccess ? TKV_OK : tkvcu_fail(cu, TKVCU_ERR_CUDA, cudaGetErrorString(e), 0, NULL);
}

static int tkvcu_launched(tkvcu *cu) { return tkvcu_checked(cu, cudaGetLastError()); }

/* >>what is supported */
static int tkvcu_no(char *reason, size_t size, const char *why, int layer) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_say(&t, why);
    if (layer >= 0) {
        tkvi_say(&t, ", layer ");
        tkvi_say_int(&t, layer);
    }
    return TKVCU_ERR_UNSUPPORTED;
}

/* How a side of this format is read; -1: not here. */
static int tkvcu_kind(tkv_format f) {
    if (f == TKV_F16 || f == TKV_BF16) return TKVCU_EXACT;
    if (f >= TKV_Q8 && f <= TKV_KIVI2) return TKVCU_KIVI;
    if (f >= TKV_A40 && f <= TKV_A15) return TKVCU_A;
    return f >= TKV_R40 && f <= TKV_R10 ? TKVCU_R : -1;
}

static const char *tkvcu_pair_fault(const tkv_config *cfg, tkv_pair pair, int exact) {
    const int k = tkvcu_kind(pair.k), v = tkvcu_kind(pair.v);
    if (k < 0 || v < 0) return "a format that is not read here";
    if (exact != (k == TKVCU_EXACT) || exact != (v == TKVCU_EXACT))
        return "warm and archive tier take KIVI, Q8, A and R formats here";
    return k == TKVCU_A && cfg->allocation_unit != 16 ? "A formats want cfg.allocation_unit = 16" : NULL;
}

static const char *tkvcu_config_fault(const tkv_config *cfg) {
    const struct {
        int wrong;
        const char *why;
    } rule[] = {
        {cfg->head_dim != 64 && cfg->head_dim != 128, "head_dim must be 64 or 128"},
        {cfg->v_head_dim && cfg->v_head_dim != cfg->head_dim, "v_head_dim must be head_dim"},
        {cfg->n_kv_heads > 1024, "there are at most 1024 KV heads"},
        {cfg->max_seqs > 65535, "there are at most 65535 sequences"},
        {cfg->n_heads > TKVCU_MAX_GROUP * (cfg->n_kv_heads ? cfg->n_kv_heads : cfg->n_heads),
         "there are at most 16 query heads on a KV head"},
        {cfg->budget_bytes != 0 || cfg->n_levels != 0, "a budget or a ladder"},
        {cfg->evict.kind != TKV_EVICT_NONE || cfg->n_anchors || cfg->importance_every, "eviction or anchors"},
        {cfg->spill.store != NULL || cfg->remat, "spilling or recomputation"},
        {cfg->quality_heads != 0, "a quality meter"},
    };
    size_t i;
    for (i = 0; i < sizeof rule / sizeof *rule; i++)
        if (rule[i].wrong) return rule[i].why;
    return NULL;
}

/* >>where things lie */
typedef struct tkvcu_arena {
    uintptr_t base; /* 0: only counted */
    size_t at;
    int full; /* more than this machine can address */
} tkvcu_arena;

static void *tkvcu_take(tkvcu_arena *a, size_t n, size_t size) {
    const size_t at = a->at;
    size_t bytes = 0;
    if (!tkvi_mul(n, size, &bytes) || !tkvi_add(bytes, TKVCU_ALIGN - 1, &bytes) ||
        !tkvi_add(at, bytes & ~(size_t)(TKVCU_ALIGN - 1), &a->at))
        a->full = 1;
    return (void *)(a->base + at);
}

/* A tier's blocks in a region; the sinks have a coding of their own, archive and warm as the tier is called.
 * */
static const tkv_tier tkvcu_tier_of[TKVCU_REGIONS] = {TKV_ARCHIVE, TKV_WARM, TKV_HOT, TKV_HOT};

static int tkvcu_key_of(const tkvi_plan *p, int region) {
    return region == TKVCU_SINKS ? p->sink_coding : p->now.key[tkvcu_tier_of[region]];
}

typedef struct tkvcu_plan { /* what a description comes to */
    tkvi_shape shape;
    int n_seqs, max_tokens, max_queries;
    tkvcu_layer *layer;
    tkvcu_list *lists;
    uint32_t *word;
    size_t stage; /* bytes */
} tkvcu_plan;

static size_t tkvcu_sides(const tkv_config *cfg) {
    return (size_t)TKVI_VERSIONS * TKVCU_REGIONS * (size_t)cfg->n_kv_heads * 2;
}

static size_t tkvcu_positions(const tkv_config *cfg) { /* of order and mean, of a layer */
    return (size_t)TKVI_VERSIONS * (size_t)cfg->n_kv_heads * (size_t)cfg->head_dim;
}

/* The view of a layer with blocks of its own, its pieces taken from the arena. */
static void tkvcu_lay(const tkvcu_plan *d, int layer, const tkvi_plan *p, tkvcu_arena *a, tkvcu_view *v) {
    const tkv_config *cfg = &d->shape.cfg;
    int64_t most[TKV_TIER_COUNT];
    int r;
    memset(v, 0, sizeof *v);
    tkvi_most_blocks(cfg, p, most);
    v->n_seqs = d->n_seqs;
    v->n_heads = cfg->n_heads;
    v->n_kv_heads = cfg->n_kv_heads;
    v->head_dim = cfg->head_dim;
    v->sinks = p->sink;
    v->max_blocks = tkvi_max(1, (d->max_tokens - p->sink + TKVI_BLOCK - 1) / TKVI_BLOCK);
    v->list = d->lists + (size_t)layer * (size_t)d->n_seqs;
    v->version = (uint8_t *)tkvcu_take(a, (size_t)d->n_seqs, (size_t)v->max_blocks);
    v->side = (const tkvcu_side *)tkvcu_take(a, tkvcu_sides(cfg), sizeof *v->side);
    v->order = (const uint8_t *)tkvcu_take(a, tkvcu_positions(cfg), 1);
    v->mean = (const float *)tkvcu_take(a, tkvcu_positions(cfg), sizeof *v->mean);
    for (r = 0; r < TKVCU_REGIONS; r++) {
        const size_t block = d->shape.bytes[tkvcu_key_of(p, r)].total;
        v->ring[r] = r == TKVCU_SINKS ? 1 : (int32_t)tkvi_max(1, (int)most[tkvcu_tier_of[r]]);
        a->full |= block > 0x7fffffffu;
        v->block[r] = (uint32_t)block;
        v->stride[r] = block * (size_t)v->ring[r];
        v->bytes[r] = (uint8_t *)tkvcu_take(a, (size_t)d->n_seqs, v->stride[r]);
    }
}

/* Checks a description and lays out all of it; view: NULL or [n_layers]. */
static int tkvcu_plan_of(const tkvcu_desc *desc, tkvcu_plan *d, tkvcu_arena *a, tkvcu_view *view,
                         char *reason, size_t size) {
    tkv_config *cfg = &d->shape.cfg;
    tkv_config mine;
    const char *why;
    int i, r, st;
    if (!desc || !desc->cfg) return TKV_ERR_ARG;
    mine = *desc->cfg;
    if (desc->n_seqs) mine.max_seqs = desc->n_seqs;
    if (desc->max_tokens) mine.max_tokens = desc->max_tokens;
    mine.isa = TKV_ISA_SCALAR;
    st = tkvi_validate(&mine, &d->shape, reason, size);
    if (st) return st;
    if (mine.max_tokens == 0)
        return tkvi_bad(reason, size, "max_tokens", 0, "the description or the config must have a number");
    if (desc->max_queries < 0 || desc->max_queries > TKVCU_MAX_QUERIES)
        return tkvi_bad(reason, size, "max_queries", desc->max_queries, "it must be 1 to 8, or 0 for 1");
    why = tkvcu_config_fault(&mine);
    if (why) return tkvcu_no(reason, size, why, -1);
    d->n_seqs = cfg->max_seqs;
    d->max_tokens = cfg->max_tokens;
    d->max_queries = desc->max_queries ? desc->max_queries : 1;
    d->word = (uint32_t *)tkvcu_take(a, 1, sizeof *d->word);
    d->layer = (tkvcu_layer *)tkvcu_take(a, (size_t)cfg->n_layers, sizeof *d->layer);
    d->lists = (tkvcu_list *)tkvcu_take(a, (size_t)cfg->n_layers * (size_t)d->n_seqs, sizeof *d->lists);
    d->stage = tkvcu_sides(cfg) * sizeof(tkvcu_side) + tkvcu_positions(cfg) * (sizeof(float) + 1);
    for (i = 0; i < cfg->n_layers; i++) {
        tkvi_plan p;
        tkvi_rule rule[TKV_MAX_LEVELS];
        tkvcu_view v;
        (void)tkvi_plan_of(&d->shape, i, &p, rule);
        if (p.stored != i) continue;
        for (r = 0; r < TKVCU_REGIONS; r++) {
            why = tkvcu_pair_fault(cfg, d->shape.key[tkvcu_key_of(&p, r)].pair, r >= TKVCU_SINKS);
            if (why) return tkvcu_no(reason, size, why, i);
        }
        tkvcu_lay(d, i, &p, a, view ? &view[i] : &v);
    }
    if (a->full)
        return tkvi_bad(reason, size, "max_tokens", d->max_tokens, "this is more than can be addressed");
    return TKV_OK;
}

int tkvcu_query(const tkvcu_desc *desc, size_t *cache_bytes, size_t *work_bytes, char *reason, size_t size) {
    tkvcu_plan d;
    tkvcu_arena a = {0, 0, 0};
    int st;
    if (reason && size) *reason = 0;
    if (!cache_bytes || !work_bytes) return TKV_ERR_ARG;
    st = tkvcu_plan_of(desc, &d, &a, NULL, reason, size);
    if (st) return st;
    *cache_bytes = a.at;
    *work_bytes = tkvcu_split_bytes(&d.shape.cfg, d.n_seqs, d.max_queries);
    return TKV_OK;
}

/* >>sides */
static tkvcu_side tkvcu_side_of(const tkvi_side *s, size_t at, int32_t table) {
    tkvcu_side d;
    int w;
    memset(&d, 0, sizeof d);
    d.kind = (uint8_t)tkvcu_kind((tkv_format)(s->format - tkvi_formats));
    d.bf16 = s->format->stored == TKVI_AS_BF16;
    d.at = (uint32_t)at;
    d.bytes = (uint32_t)s->bytes;
    d.code_bytes = (uint32_t)s->code_bytes;
    d.top = s->top;
    d.table = s->order ? table : -1;
    if (d.kind == TKVCU_KIVI) {
        d.half_bits = (uint8_t)(2 * s->format->bits);
        d.group = (uint8_t)s->group;
    }
    if (d.kind == TKVCU_R) d.half_bits = (uint8_t)s->half_bits;
    if (d.kind == TKVCU_A) {
        d.slabs[0] = (uint8_t)(s->pad / 16);
        for (w = 1; w <= 6; w++) {
            d.slabs[w] = (uint8_t)(s->runs.n[w] / 4);
            d.slabs[0] = (uint8_t)(d.slabs[0] - d.slabs[w]);
        }
    }
    return d;
}

/* The coding of a region's blocks with a version of the layer's table; NULL: there is no such table. */
static const tkvi_coding *tkvcu_coding_of(const tkv_cache *kv, int layer, int region, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkv_tier tier = tkvcu_tier_of[region];
    const int own = region != TKVCU_SINKS && p->now.shared[tier];
    const tkvi_coding *c =
        &kv->tables
             .coding[region == TKVCU_SINKS ? p->sink_coding : p->now.coding[tier] + (own ? version : 0)];
    return c->record && c->record[0].k.format ? c : NULL;
}

static int tkvcu_has_table(const tkv_cache *kv, int layer, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const int region = p->now.shared[TKV_WARM] ? TKVCU_WARM : TKVCU_ARCHIVE;
    return p->allocates && tkvcu_coding_of(kv, layer, region, version) != NULL;
}

/* Sides, order and mean of a layer go to the device. Waits, so that the next layer can have the stage. */
static int tkvcu_send(tkvcu *cu, int layer, cudaStream_t stream) {
    const tkv_cache *kv = cu->host;
    const tkv_config *cfg = &kv->tables.cfg;
    const tkvcu_view *v = &cu->view[layer];
    const size_t heads = (size_t)cfg->n_kv_heads, pad = (size_t)cfg->head_dim, n = tkvcu_positions(cfg);
    tkvcu_side *side = (tkvcu_side *)(void *)cu->stage;
    float *mean = (float *)(void *)(side + tkvcu_sides(cfg));
    uint8_t *order = (uint8_t *)(mean + n);
    tkvcu_layer info;
    size_t h, at = 0;
    int version, r, st;
    memset(cu->stage, 0, tkvcu_sides(cfg) * sizeof *side + n * (sizeof(float) + 1));
    for (version = 0; version < TKVI_VERSIONS; version++) {
        for (r = 0; r < TKVCU_REGIONS; r++) {
            const tkvi_coding *c = tkvcu_coding_of(kv, layer, r, version);
            for (h = 0; h < heads; h++, at += 2) {
                const int32_t table = (int32_t)(((size_t)version * heads + h) * pad);
                if (!c) continue;
                side[at] = tkvcu_side_of(&c->record[h].k, c->record[h].at, table);
                side[at + 1] = tkvcu_side_of(&c->record[h].v, c->record[h].at + c->record[h].v_at, -1);
            }
        }
        for (h = 0; h < heads && tkvcu_has_table(kv, layer, version); h++) {
            const tkvi_head *head = &tkvi_heads_of(&kv->tables, layer, version)[h];
            memcpy(order + ((size_t)version * heads + h) * pad, head->order, pad);
            memcpy(mean + ((size_t)version * heads + h) * pad, head->mean, pad * sizeof *mean);
        }
    }
    info.version = tkvi_max(0, kv->tables.current[layer]);
    info.sinks = v->sinks;
    st = tkvcu_checked(cu, cudaMemcpyAsync((void *)(uintptr_t)v->side, side, tkvcu_sides(cfg) * sizeof *side,
                                           cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_checked(cu, cudaMemcpyAsync((void *)(uintptr_t)v->mean, mean, n * sizeof *mean,
                                               cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_checked(
            cu, cudaMemcpyAsync((void *)(uintptr_t)v->order, order, n, cudaMemcpyHostToDevice, stream));
    if (!st)
        st = tkvcu_checked(
            cu, cudaMemcpyAsync(&cu->layer[layer], &info, sizeof info, cudaMemcpyHostToDevice, stream));
    return st ? st : tkvcu_checked(cu, cudaStreamSynchronize(stream));
}

/* Until better is known: all heads and channels alike. */
static int tkvcu_equal_tables(tkv_cache *kv) {
    const tkv_config *cfg = &kv->tables.cfg;
    const size_t pad = (size_t)cfg->head_dim;
    tkvi_version *to = &kv->tables.version[0];
    size_t h, c;
    int layer;
    if (!kv->tables.any_shared) return 1;
    if (!tkvi_version_ready(kv, 0)) return 0;
    for (layer = 0; layer < cfg->n_layers; layer++) {
        if (!kv->tables.plan[layer].allocates) continue;
        for (h = 0; h < (size_t)cfg->n_kv_heads; h++) {
            const size_t at = ((size_t)layer * (size_t)cfg->n_kv_heads + h);
            to->head[at].k_top = to->head[at].v_top = TKVI_LOG_TOP_ALIKE;
            for (c = 0; c < pad; c++) {
                to->importance[at * pad + c] = 1;
                to->channel[at * pad + c] = (uint8_t)c;
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

/* The handle, in one piece. */
static tkvcu *tkvcu_new(const tkvcu_plan *d) {
    const size_t layers = (size_t)d->shape.cfg.n_layers;
    const size_t head = tkvi_align_up(sizeof(tkvcu)), views = tkvi_align_up(layers * sizeof(tkvcu_view));
    uint8_t *mem = (uint8_t *)malloc(head + views + tkvi_align_up(d->stage) + 2 * layers);
    tkvcu *cu = (tkvcu *)(void *)mem;
    if (!mem) return NULL;
    memset(mem, 0, head + views + tkvi_align_up(d->stage) + 2 * layers);
    cu->view = (tkvcu_view *)(void *)(mem + head);
    cu->stage = mem + head + views;
    cu->used = cu->stage + tkvi_align_up(d->stage);
    cu->appended = cu->used + layers;
    cu->n_seqs = d->n_seqs;
    cu->max_tokens = d->max_tokens;
    cu->max_queries = d->max_queries;
    cu->word = d->word;
    cu->layer = d->layer;
    cu->lists = d->lists;
    return cu;
}

/* Everything that kernels read before they have written it. */
static int tkvcu_clear(tkvcu *cu, cudaStream_t stream) {
    const int layers = cu->host->tables.cfg.n_layers;
    int i, r, st = tkvcu_checked(cu, cudaMemsetAsync(cu->word, 0, sizeof *cu->word, stream));
    if (!st)
        st = tkvcu_checked(cu, cudaMemsetAsync(cu->layer, 0xff, (size_t)layers * sizeof *cu->layer, stream));
    if (!st)
        st = tkvcu_checked(
            cu,
            cudaMemsetAsync(cu->lists, 0, (size_t)layers * (size_t)cu->n_seqs * sizeof *cu->lists, stream));
    for (i = 0; i < layers && !st; i++) {
        const tkvcu_view *v = &cu->view[i];
        const size_t seqs = (size_t)cu->n_seqs;
        if (cu->host->tables.plan[i].stored != i) continue;
        st = tkvcu_checked(cu, cudaMemsetAsync(v->version, 0, seqs * (size_t)v->max_blocks, stream));
        for (r = TKVCU_SINKS; r < TKVCU_REGIONS && !st; r++)
            st = tkvcu_checked(cu, cudaMemsetAsync(v->bytes[r], 0, seqs * v->stride[r], stream));
        if (!st) st = tkvcu_send(cu, i, stream);
    }
    return st;
}

int tkvcu_create(const tkvcu_desc *desc, void *d_cache, size_t cache_bytes, void *d_work, size_t work_bytes,
                 tkvcu_stream stream, tkvcu **out) {
    tkvcu_plan d;
    tkvcu_arena a = {0, 0, 0};
    tkv_config cfg;
    tkvcu *cu;
    int st;
    if (!out || !d_cache || !d_work || ((uintptr_t)d_cache | (uintptr_t)d_work) % TKVCU_ALIGN)
        return TKV_ERR_ARG;
    a.base = (uintptr_t)d_cache;
    st = tkvcu_plan_of(desc, &d, &a, NULL, NULL, 0);
    if (st) return st;
    if (cache_bytes < a.at || work_bytes < tkvcu_split_bytes(&d.shape.cfg, d.n_seqs, d.max_queries))
        return TKV_ERR_CAPACITY;
    cu = tkvcu_new(&d);
    if (!cu) return TKV_ERR_NOMEM;
    a.at = 0;
    (void)tkvcu_plan_of(desc, &d, &a, cu->view, NULL, 0);
    cfg = *desc->cfg;
    cfg.max_seqs = 1;
    cfg.max_tokens = d.max_tokens;
    cfg.isa = TKV_ISA_SCALAR;
    cfg.on_event = NULL;
    cfg.parallel_for = NULL;
    st = tkv_create(&cfg, &cu->host);
    if (!st && !tkvcu_equal_tables(cu->host)) st = TKV_ERR_NOMEM;
    if (!st)
        st = tkvcu_checked(cu, tkvcu_split_init(&cu->split, &d.shape.cfg, d.n_seqs, d.max_queries, d_work));
    if (!st)
        st = tkvcu_checked(cu, cudaFuncSetAttribute(tkvcu_append_kernel,
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    (int)tkvcu_desk_bytes(cfg.head_dim)));
    if (!st) st = tkvcu_clear(cu, stream);
    if (st) tkvcu_destroy(cu);
    else *out = cu;
    return st;
}

/* The view that a layer reads; NULL: it has no cache, or there is no such layer. */
static const tkvcu_view *tkvcu_view_of(const tkvcu *cu, int layer) {
    const tkvi_tables *t = &cu->host->tables;
    if (layer < 0 || layer >= t->cfg.n_layers || t->plan[layer].stored < 0) return NULL;
    return &cu->view[t->plan[layer].stored];
}

#endif /* TKVCU_CREATE_H */
/* ======== transfer.h ======== */
/*
 * transfer.h - tables and sequences from a cache of tieredkv.h to the device and back. Bytes of blocks are
 * copied, and what stands in the way is found before anything changes. All calls wait for the stream: host
 * memory is at both ends.
 */
#ifndef TKVCU_TRANSFER_H
#define TKVCU_TRANSFER_H


/* >>are they of one kind? */
static const char *tkvcu_layer_differs(const tkvi_tables *a, const tkvi_tables *b, int layer) {
    const tkvi_plan *p = &a->plan[layer], *q = &b->plan[layer];
    int r;
    if (p->stored != q->stored) return "cfg.layers";
    if (p->stored != layer) return NULL;
    if (p->sink != q->sink || p->now.hot != q->now.hot || p->now.warm != q->now.warm)
        return "the tiers' lengths";
    for (r = 0; r < TKVCU_REGIONS; r++) {
        const tkvi_coding *c = &a->coding[tkvcu_key_of(p, r)], *d = &b->coding[tkvcu_key_of(q, r)];
        if (c->pair.k != d->pair.k || c->pair.v != d->pair.v || c->tokens != d->tokens ||
            c->bytes.total != d->bytes.total)
            return "the formats";
    }
    return NULL;
}

static int tkvcu_same_kind(tkvcu *cu, const tkv_cache *kv) {
    const tkvi_tables *a, *b;
    const char *what = NULL;
    int i;
    if (!kv) return tkvcu_fail(cu, TKV_ERR_ARG, "the cache is missing", 0, NULL);
    a = &cu->host->tables;
    b = &kv->tables;
    if (a->cfg.n_layers != b->cfg.n_layers || a->cfg.n_heads != b->cfg.n_heads ||
        a->cfg.n_kv_heads != b->cfg.n_kv_heads || a->cfg.head_dim != b->cfg.head_dim ||
        a->cfg.v_head_dim != b->cfg.v_head_dim)
        return tkvcu_fail(cu, TKV_ERR_CONFIG, "the cache is of another model", 0, NULL);
    if (a->cfg.group_size != b->cfg.group_size || a->cfg.allocation_unit != b->cfg.allocation_unit)
        what = "group_size or allocation_unit";
    for (i = 0; i < a->cfg.n_layers && !what; i++) what = tkvcu_layer_differs(a, b, i);
    if (what) return tkvcu_fail(cu, TKV_ERR_CONFIG, "the cache has another plan:", 0, what);
    what = tkvcu_config_fault(&b->cfg);
    return what ? tkvcu_fail(cu, TKVCU_ERR_UNSUPPORTED, "the cache has", 0, what) : TKV_OK;
}

/* >>tables */
static int tkvcu_same_table(const tkv_cache *a, const tkv_cache *b, int layer, int version) {
    const tkvi_head *x = tkvi_heads_of(&a->tables, layer, version),
                    *y = tkvi_heads_of(&b->tables, layer, version);
    const size_t pad = (size_t)a->tables.cfg.head_dim;
    int h;
    for (h = 0; h < a->tables.cfg.n_kv_heads; h++, x++, y++)
        if (x->reach != y->reach || x->k_weight != y->k_weight || x->k_top != y->k_top ||
            x->v_top != y->v_top || memcmp(x->importance, y->importance, pad) != 0 ||
            memcmp(x->order, y->order, pad) != 0 || memcmp(x->mean, y->mean, pad * sizeof(float)) != 0)
            return 0;
    return 1;
}

/* A version of a layer's table as the other cache has it; it becomes the current one. */
static void tkvcu_copy_table(tkv_cache *to, const tkv_cache *from, int layer, int version) {
    const size_t pad = (size_t)to->tables.cfg.head_dim, heads = (size_t)to->tables.cfg.n_kv_heads;
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

/* Does the layer take over tables? */
static int tkvcu_learned(const tkv_cache *kv, int layer) {
    return kv->tables.plan[layer].stored == layer && kv->tables.plan[layer].allocates &&
           kv->tables.current[layer] >= 0;
}

/* Room for these tables, and nobody who needs others. */
static int tkvcu_tables_fit(tkvcu *cu, const tkv_cache *kv) {
    int layer, v;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++)
        for (v = 0; v < TKVI_VERSIONS && tkvcu_learned(kv, layer); v++) {
            if (!tkvcu_has_table(kv, layer, v)) continue;
            if (!tkvi_version_ready(cu->host, v))
                return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for tables", 0, NULL);
            if ((cu->used[layer] >> v & 1) && !tkvcu_same_table(cu->host, kv, layer, v))
                return tkvcu_fail(cu, TKV_ERR_STATE, "blocks here may be coded with another table of layer",
                                  layer, "; take over tables before the first append");
        }
    return TKV_OK;
}

static int tkvcu_tables_take(tkvcu *cu, const tkv_cache *kv, cudaStream_t stream) {
    int layer, v, st = TKV_OK;
    for (layer = 0; layer < kv->tables.cfg.n_layers && !st; layer++) {
        int changed = 0;
        if (!tkvcu_learned(kv, layer)) continue;
        for (v = 0; v < TKVI_VERSIONS; v++) {
            if (!tkvcu_has_table(kv, layer, v)) continue;
            if (tkvcu_has_table(cu->host, layer, v) && tkvcu_same_table(cu->host, kv, layer, v)) continue;
            tkvcu_copy_table(cu->host, kv, layer, v);
            changed = 1;
        }
        changed |= cu->host->tables.current[layer] != kv->tables.current[layer];
        cu->host->tables.current[layer] = kv->tables.current[layer];
        if (cu->appended[layer]) cu->used[layer] |= (uint8_t)(1u << kv->tables.current[layer]);
        if (changed) st = tkvcu_send(cu, layer, stream);
    }
    return st;
}

int tkvcu_tables(tkvcu *cu, const tkv_cache *kv, tkvcu_stream stream) {
    int st;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_same_kind(cu, kv);
    if (!st) st = tkvcu_tables_fit(cu, kv);
    return st ? st : tkvcu_tables_take(cu, kv, stream);
}

/* >>sequences */
static int tkvcu_seq_ok(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq) {
    if (seq < 0 || seq >= cu->n_seqs)
        return tkvcu_fail(cu, TKV_ERR_ARG, "there is no sequence", seq, " here");
    if (host_seq < 0 || host_seq >= kv->tables.cfg.max_seqs)
        return tkvcu_fail(cu, TKV_ERR_ARG, "there is no sequence", host_seq, " in the cache");
    if (kv->seq[host_seq].in_step)
        return tkvcu_fail(cu, TKV_ERR_STATE, "a step is open; commit or abort it first", 0, NULL);
    return TKV_OK;
}

/* Where block i of a host's list lies: its region, and its number behind the sinks. */
static int tkvcu_region_of(const tkvi_list *list, int i, int *block) {
    *block = i - list->sinks;
    if (*block < 0) *block = 0;
    if (i < list->sinks) return TKVCU_SINKS;
    if (*block < list->archive) return TKVCU_ARCHIVE;
    return *block < list->archive + list->warm ? TKVCU_WARM : TKVCU_HOT;
}

/* What of a layer cannot be here, or NULL. */
static const char *tkvcu_list_fault(const tkvcu *cu, const tkv_cache *kv, int seq, int layer) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_plan *p = &kv->tables.plan[layer];
    int i, block;
    if (list->dropped) return "blocks were dropped behind a window";
    if (p->sink + TKVI_BLOCK * (list->archive + list->warm) > list->len && list->archive + list->warm)
        return "a flush made a block short";
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        const int region = tkvcu_region_of(list, i, &block);
        if (tkvi_spilled(b)) return "a block is outside RAM";
        if (b->gone || b->packed) return "tokens were dropped";
        if (b->start != (region == TKVCU_SINKS ? 0 : p->sink + TKVI_BLOCK * block))
            return "a flush made a block short";
        if (kv->tables.coding[b->coding].key != tkvcu_key_of(p, region)) return "a block has another format";
        if (block >= cu->view[layer].max_blocks) return "it is too long";
    }
    return NULL;
}

/* The same of numbers: blocks that wait for a table, or for the next append, have more room on the host. */
static const char *tkvcu_list_large(const tkvcu *cu, const tkvi_list *list, int layer) {
    const int32_t *ring = cu->view[layer].ring;
    if (list->len > cu->max_tokens) return "it is too long";
    if (list->archive > ring[TKVCU_ARCHIVE]) return "its archive is too long: it was flushed";
    if (list->warm > ring[TKVCU_WARM]) return "too many blocks wait in the warm tier: append to it first";
    if (list->n - list->sinks - list->archive - list->warm > ring[TKVCU_HOT])
        return "too many blocks wait in the hot tier: append to it first";
    return NULL;
}

/* A layer of the sequence goes to the device: blocks, then versions and state. */
static int tkvcu_import_layer(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, int layer,
                              uint8_t *version, cudaStream_t stream) {
    const tkvi_list *list = tkvi_list_of(kv, host_seq, layer);
    const uint32_t *ids = tkvi_ids(kv, host_seq, layer);
    const tkvcu_view *v = &cu->view[layer];
    tkvcu_list state;
    int i, block, st = TKV_OK;
    memset(version, 0, (size_t)v->max_blocks);
    for (i = 0; i < list->n && !st; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        const int region = tkvcu_region_of(list, i, &block);
        if (b->coding >= kv->tables.n_keys) {
            version[block] = (uint8_t)((b->coding - kv->tables.n_keys) % TKVI_VERSIONS);
            cu->used[layer] |= (uint8_t)(1u << version[block]);
        }
        st = tkvcu_checked(cu, cudaMemcpyAsync(tkvcu_block_at(v, region, seq, block),
                                               tkvi_block_bytes(&kv->pool, b), v->block[region],
                                               cudaMemcpyHostToDevice, stream));
    }
    if (!st)
        st = tkvcu_checked(cu, cudaMemcpyAsync(v->version + (size_t)seq * (size_t)v->max_blocks, version,
                                               (size_t)v->max_blocks, cudaMemcpyHostToDevice, stream));
    state.len = list->len;
    state.archive = list->archive;
    state.warm = list->warm;
    state.step = 0;
    if (!st)
        st = tkvcu_checked(
            cu, cudaMemcpyAsync(&v->list[seq], &state, sizeof state, cudaMemcpyHostToDevice, stream));
    return st ? st : tkvcu_checked(cu, cudaStreamSynchronize(stream)); /* both stand on this stack */
}

/* The most blocks of a layer. */
static int tkvcu_most_blocks(const tkvcu *cu) {
    int i, most = 1;
    for (i = 0; i < cu->host->tables.cfg.n_layers; i++) most = tkvi_max(most, cu->view[i].max_blocks);
    return most;
}

int tkvcu_import(tkvcu *cu, int seq, const tkv_cache *kv, int host_seq, tkvcu_stream stream) {
    uint8_t *version;
    int layer, st;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_same_kind(cu, kv);
    if (!st) st = tkvcu_seq_ok(cu, seq, kv, host_seq);
    if (!st) st = tkvcu_tables_fit(cu, kv);
    for (layer = 0; !st && layer < kv->tables.cfg.n_layers; layer++) {
        const char *why;
        if (kv->tables.plan[layer].stored != layer) continue;
        why = tkvcu_list_large(cu, tkvi_list_of(kv, host_seq, layer), layer);
        if (why) return tkvcu_fail(cu, TKV_ERR_CAPACITY, why, 0, NULL);
        why = tkvcu_list_fault(cu, kv, host_seq, layer);
        if (why) return tkvcu_fail(cu, TKVCU_ERR_UNSUPPORTED, why, 0, NULL);
    }
    if (st) return st;
    version = (uint8_t *)malloc((size_t)tkvcu_most_blocks(cu));
    if (!version) return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for versions", 0, NULL);
    st = tkvcu_tables_take(cu, kv, stream);
    for (layer = 0; !st && layer < kv->tables.cfg.n_layers; layer++)
        if (kv->tables.plan[layer].stored == layer)
            st = tkvcu_import_layer(cu, seq, kv, host_seq, layer, version, stream);
    free(version);
    return st;
}

/* >>the way back */
typedef struct tkvcu_taken { /* of a sequence, read from the device */
    tkvcu_list *list;        /* [n_layers] */
    uint8_t *version;        /* [n_layers][most blocks] */
    int most;
} tkvcu_taken;

static int tkvcu_take_state(tkvcu *cu, int seq, tkvcu_taken *t, cudaStream_t stream) {
    int layer, st = TKV_OK;
    for (layer = 0; layer < cu->host->tables.cfg.n_layers && !st; layer++) {
        const tkvcu_view *v = &cu->view[layer];
        if (cu->host->tables.plan[layer].stored != layer) continue;
        st = tkvcu_checked(cu, cudaMemcpyAsync(&t->list[layer], &v->list[seq], sizeof *t->list,
                                               cudaMemcpyDeviceToHost, stream));
        if (!st)
            st = tkvcu_checked(cu, cudaMemcpyAsync(t->version + (size_t)layer * (size_t)t->most,
                                                   v->version + (size_t)seq * (size_t)v->max_blocks,
                                                   (size_t)v->max_blocks, cudaMemcpyDeviceToHost, stream));
    }
    return st ? st : tkvcu_checked(cu, cudaStreamSynchronize(stream));
}

/* The list as it will be on the host; ids follow. */
static tkvi_list tkvcu_host_list(const tkvi_plan *p, const tkvcu_list *l) {
    tkvi_list list;
    const int behind = l->len - p->sink;
    memset(&list, 0, sizeof list);
    list.sinks = l->len > 0 && p->sink > 0;
    list.n = list.sinks + (behind > 0 ? (behind + TKVI_BLOCK - 1) / TKVI_BLOCK : 0);
    list.archive = l->archive;
    list.warm = l->warm;
    list.len = list.chunk = list.chunk_was = l->len;
    return list;
}

/* The host's coding of a block. */
static int tkvcu_host_coding(const tkv_cache *kv, int layer, int region, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkv_tier tier = tkvcu_tier_of[region];
    if (region == TKVCU_SINKS) return p->sink_coding;
    return p->now.coding[tier] + (p->now.shared[tier] ? version : 0);
}

/* Tables of a layer that its coded blocks name, and the one that is current: does kv have others in their
 * place? */
static int tkvcu_tables_clash(const tkvcu *cu, const tkv_cache *kv, int layer, const tkvcu_taken *t) {
    const uint8_t *version = t->version + (size_t)layer * (size_t)t->most;
    int i;
    for (i = 0; i < t->list[layer].archive + t->list[layer].warm; i++)
        if (!tkvcu_has_table(kv, layer, version[i]) || !tkvcu_same_table(cu->host, kv, layer, version[i]))
            return 1;
    return 0;
}

/* Memory for tables and blocks of the sequence, or nothing has changed. */
static int tkvcu_export_ready(tkvcu *cu, tkv_cache *kv, int host_seq, const tkvcu_taken *t) {
    tkvi_peak paper = tkvi_paper(kv);
    int layer, i, block, v, want = 1;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        const tkvi_plan *p = &kv->tables.plan[layer];
        const tkvi_list list = tkvcu_host_list(p, &t->list[layer]);
        if (p->stored != layer) continue;
        if (list.len > kv->tables.cfg.max_tokens)
            return tkvcu_fail(cu, TKV_ERR_CAPACITY, "the cache's sequences have at most",
                              kv->tables.cfg.max_tokens, " tokens");
        if (p->allocates && kv->tables.current[layer] >= 0 && tkvcu_tables_clash(cu, kv, layer, t))
            return tkvcu_fail(cu, TKV_ERR_STATE, "the cache has another table in layer", layer, "");
        for (v = 0; v < TKVI_VERSIONS && p->allocates && kv->tables.current[layer] < 0; v++)
            if (tkvcu_has_table(cu->host, layer, v) && !tkvi_version_ready(kv, v))
                return tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for tables", 0, NULL);
        for (i = 0; i < list.n; i++) {
            const int region = tkvcu_region_of(&list, i, &block);
            tkvi_peak_take(&paper, tkvcu_host_coding(kv, layer, region, 0));
        }
        want = tkvi_max(want, list.n + 1);
    }
    if (!tkvi_grow_lists(kv, host_seq, want) || !tkvi_peak_ready(&kv->pool, &paper))
        return tkvcu_fail(cu, kv->pool.keep_all ? TKV_ERR_CAPACITY : TKV_ERR_NOMEM, "no memory for blocks", 0,
                          NULL);
    return TKV_OK;
}

static int tkvcu_export_layer(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, int layer,
                              const tkvcu_taken *t, cudaStream_t stream) {
    const tkvcu_view *v = &cu->view[layer];
    const tkvi_list list = tkvcu_host_list(&kv->tables.plan[layer], &t->list[layer]);
    uint32_t *ids = tkvi_ids(kv, host_seq, layer);
    int i, block, version, st = TKV_OK;
    if (kv->tables.plan[layer].allocates && kv->tables.current[layer] < 0) {
        for (version = 0; version < TKVI_VERSIONS; version++)
            if (tkvcu_has_table(cu->host, layer, version)) tkvcu_copy_table(kv, cu->host, layer, version);
        kv->tables.current[layer] = cu->host->tables.current[layer];
        tkvi_learned(kv, layer, 0);
    }
    for (i = 0; i < list.n; i++) {
        const int region = tkvcu_region_of(&list, i, &block), first = region == TKVCU_SINKS;
        const int start = first ? 0 : v->sinks + TKVI_BLOCK * block;
        version = first ? 0 : t->version[(size_t)layer * (size_t)t->most + (size_t)block];
        ids[i] = tkvi_new_block(&kv->pool, tkvcu_host_coding(kv, layer, region, version), start);
        if (!st)
            st = tkvcu_checked(cu, cudaMemcpyAsync(tkvi_block_bytes(&kv->pool, &kv->pool.block[ids[i]]),
                                                   tkvcu_block_at(v, region, seq, block), v->block[region],
                                                   cudaMemcpyDeviceToHost, stream));
    }
    *tkvi_list_of(kv, host_seq, layer) = list;
    return st;
}

int tkvcu_export(tkvcu *cu, int seq, tkv_cache *kv, int host_seq, tkvcu_stream stream) {
    tkvcu_taken t;
    size_t layers;
    int layer, st;
    if (!cu) return TKV_ERR_ARG;
    st = tkvcu_same_kind(cu, kv);
    if (!st) st = tkvcu_seq_ok(cu, seq, kv, host_seq);
    for (layer = 0; !st && layer < kv->tables.cfg.n_layers; layer++)
        if (tkvi_list_of(kv, host_seq, layer)->n)
            st = tkvcu_fail(cu, TKV_ERR_STATE, "not empty: sequence", host_seq, " of the cache");
    if (st) return st;
    layers = (size_t)kv->tables.cfg.n_layers;
    t.most = tkvcu_most_blocks(cu);
    t.list = (tkvcu_list *)calloc(layers, sizeof *t.list);
    t.version = (uint8_t *)calloc(layers, (size_t)t.most);
    st = t.list && t.version ? tkvcu_take_state(cu, seq, &t, stream)
                             : tkvcu_fail(cu, TKV_ERR_NOMEM, "no memory for versions", 0, NULL);
    if (!st) st = tkvcu_export_ready(cu, kv, host_seq, &t);
    if (!st) {
        for (layer = 0; !st && layer < kv->tables.cfg.n_layers; layer++)
            if (kv->tables.plan[layer].stored == layer)
                st = tkvcu_export_layer(cu, seq, kv, host_seq, layer, &t, stream);
        if (!st) st = tkvcu_checked(cu, cudaStreamSynchronize(stream));
        if (st) (void)tkv_reset(kv, host_seq); /* what came is not whole */
        else tkvi_settle(kv, host_seq);
    }
    free(t.list);
    free(t.version);
    return st;
}

#endif /* TKVCU_TRANSFER_H */
/* ======== calls.h ======== */
/*
 * calls.h - what is called at every step, and reports.
 */
#ifndef TKVCU_CALLS_H
#define TKVCU_CALLS_H


int tkvcu_append(tkvcu *cu, int layer, const void *d_k, const void *d_v, tkv_type type, int n_tokens,
                 const int32_t *d_seq_map, tkvcu_stream stream) {
    const tkvi_tables *t;
    const tkvi_plan *p;
    tkvcu_append_call c;
    if (!cu) return TKV_ERR_ARG;
    t = &cu->host->tables;
    if (layer < 0 || layer >= t->cfg.n_layers || t->plan[layer].stored != layer)
        return tkvcu_fail(cu, TKV_ERR_ARG, "there is no K and V of its own in layer", layer, "");
    if (!d_k || !d_v) return tkvcu_fail(cu, TKV_ERR_ARG, "k or v is missing", 0, NULL);
    if ((unsigned)type > TKV_TYPE_BF16)
        return tkvcu_fail(cu, TKV_ERR_ARG, "type must be a tkv_type", 0, NULL);
    if (n_tokens < 1 || n_tokens > tkvi_min(TKVCU_MAX_APPEND, t->cfg.max_append))
        return tkvcu_fail(cu, TKV_ERR_ARG, "n_tokens is", n_tokens,
                          "; it must be 1 to 64, cfg.max_append at most");
    p = &t->plan[layer];
    memset(&c, 0, sizeof c);
    c.x[0] = d_k;
    c.x[1] = d_v;
    c.seq_map = d_seq_map;
    c.layer = &cu->layer[layer];
    c.word = cu->word;
    c.type = type;
    c.n_tokens = n_tokens;
    c.max_tokens = cu->max_tokens;
    c.hot = p->now.hot;
    c.warm = p->now.warm;
    c.same = p->now.key[TKV_WARM] == p->now.key[TKV_ARCHIVE];
    c.fit = t->cfg.fit;
    c.saturate = t->cfg.nonfinite == TKV_NONFINITE_SATURATE;
    cu->used[layer] |= (uint8_t)(1u << tkvi_max(0, t->current[layer]));
    cu->appended[layer] = 1;
    TKVCU_LAUNCH(tkvcu_append_kernel, dim3(2u * (unsigned)t->cfg.n_kv_heads, (unsigned)cu->n_seqs),
                 dim3(TKVCU_ENCODERS), tkvcu_desk_bytes(t->cfg.head_dim), stream, cu->view[layer], c);
    return tkvcu_launched(cu);
}

int tkvcu_attend(tkvcu *cu, int layer, const void *d_q, tkv_type type, int n_queries,
                 const tkvcu_attend_params *params, void *d_out, float *d_lse, const int32_t *d_seq_map,
                 tkvcu_stream stream) {
    const tkvcu_attend_params none = {0.0f, 0.0f, 0, NULL}, *p = params ? params : &none;
    const tkvcu_view *v;
    const tkv_config *cfg;
    tkvcu_attend_call c;
    if (!cu) return TKV_ERR_ARG;
    v = tkvcu_view_of(cu, layer);
    cfg = &cu->host->tables.cfg;
    if (!v) return tkvcu_fail(cu, TKV_ERR_ARG, "there is no K and V in layer", layer, "");
    if (!d_q || !d_out) return tkvcu_fail(cu, TKV_ERR_ARG, "q or out is missing", 0, NULL);
    if ((unsigned)type > TKV_TYPE_BF16)
        return tkvcu_fail(cu, TKV_ERR_ARG, "type must be a tkv_type", 0, NULL);
    if (n_queries < 1 || n_queries > cu->max_queries)
        return tkvcu_fail(cu, TKV_ERR_ARG, "n_queries is", n_queries, "; it must be 1 to max_queries");
    if (!tkvi_is_finite(p->scale) || !tkvi_is_finite(p->softcap) || p->softcap < 0.0f || p->window < TKV_NONE)
        return tkvcu_fail(cu, TKV_ERR_ARG, "scale, softcap or window is out of range", 0, NULL);
    memset(&c, 0, sizeof c);
    c.q = d_q;
    c.out = d_out;
    c.lse = d_lse;
    c.sinks = p->d_sinks;
    c.seq_map = d_seq_map;
    c.word = cu->word;
    c.type = type;
    c.n_queries = n_queries;
    c.window = p->window == TKV_NONE ? 0 : p->window ? p->window : cu->host->tables.plan[layer].window;
    c.scale = p->scale != 0.0f ? p->scale : cfg->scale;
    c.softcap = p->softcap;
    return tkvcu_checked(cu, tkvcu_attend_launch(&cu->split, v, &c, stream));
}

int tkvcu_trim(tkvcu *cu, const int32_t *d_lengths, tkvcu_stream stream) {
    if (!cu) return TKV_ERR_ARG;
    if (!d_lengths) return tkvcu_fail(cu, TKV_ERR_ARG, "the lengths are missing", 0, NULL);
    TKVCU_LAUNCH(tkvcu_trim_kernel, dim3((unsigned)(cu->n_seqs + TKVCU_ENCODERS - 1) / TKVCU_ENCODERS),
                 dim3(TKVCU_ENCODERS), 0, stream, cu->layer, cu->lists, cu->host->tables.cfg.n_layers,
                 cu->n_seqs, d_lengths, cu->word);
    return tkvcu_launched(cu);
}

int tkvcu_lengths(const tkvcu *cu, int layer, int32_t *lengths, tkvcu_stream stream) {
    const tkvcu_view *v;
    cudaError_t e;
    if (!cu || !lengths) return TKV_ERR_ARG;
    v = tkvcu_view_of(cu, layer);
    if (!v) return TKV_ERR_ARG;
    e = cudaMemcpy2DAsync(lengths, sizeof *lengths, &v->list->len, sizeof *v->list, sizeof *lengths,
                          (size_t)cu->n_seqs, cudaMemcpyDefault, stream);
    return e == cudaSuccess ? TKV_OK : TKVCU_ERR_CUDA;
}

int tkvcu_status(tkvcu *cu, uint32_t *word, int clear, tkvcu_stream stream) {
    int st;
    if (!cu) return TKV_ERR_ARG;
    if (!word) return tkvcu_fail(cu, TKV_ERR_ARG, "the word is missing", 0, NULL);
    st = tkvcu_checked(cu, cudaMemcpyAsync(word, cu->word, sizeof *word, cudaMemcpyDefault, stream));
    if (!st && clear) st = tkvcu_checked(cu, cudaMemsetAsync(cu->word, 0, sizeof *word, stream));
    return st;
}

const char *tkvcu_strerror(int status) {
    if (status == TKVCU_ERR_CUDA)
        return "a call of the CUDA runtime failed: tkvcu_last_error has what it said";
    if (status == TKVCU_ERR_UNSUPPORTED) return "tieredkv.h can do this, tieredkv_cuda.cu cannot";
    if (status > TKV_OK || status <= TKV_STATUS_LAST_) return "not a status";
    return tkv_status_text((tkv_status)status);
}

const char *tkvcu_last_error(const tkvcu *cu) { return cu ? cu->error : ""; }

#endif /* TKVCU_CALLS_H */
#endif /* TKVCU_INTERFACE_ONLY */
