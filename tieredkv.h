/* tieredkv.h: generated from src/ by tools/amalgamate.py. Edit there, not here. */
/* ======== doc.h ======== */
/* tieredkv.h - the key/value cache of a transformer in three tiers: recent tokens exact, older ones compressed,
 * attention computed directly on the compressed bytes. One header, libc and libm only. MIT licence, see LICENSE.
 *
 * Generated from src/ by tools/amalgamate.py: edit there.
 *
 *   Do this in ONE C or C++ file:      #define TIEREDKV_IMPLEMENTATION
 *                                      #include "tieredkv.h"
 *   and in the others just:            #include "tieredkv.h"
 *   Build:                             cc -O2 program.c -lm      (no -m flags: kernels are chosen at run time)
 *
 * WHAT IT IS
 *   A place for K and V of every layer, and the attention over them. Tokens arrive exact; when 64 of them are
 *   old enough they are coded together, in 4 bits at first, in 2 later. Queries read all tiers through one
 *   softmax, multiplying the packed codes; nothing is ever decoded into memory.
 * WHAT IT IS NOT
 *   No model, tokenizer, sampling or RoPE (keys arrive rotated). No threads of its own, no files, no network.
 *
 * EXAMPLE
 *   tkv_config cfg = {0};                                      // zero means default, everywhere
 *   cfg.n_layers = 32; cfg.n_heads = 32; cfg.n_kv_heads = 8; cfg.head_dim = 128;
 *   tkv_cache *kv;
 *   if (tkv_create(&cfg, &kv) != TKV_OK) return 1;             // tkv_config_validate says what is wrong
 *   for each step, for each layer:
 *       tkv_append(kv, 0, layer, k, v, n);                     // [n][8][128] each, n new tokens of sequence 0
 *       tkv_attend(kv, 0, layer, q, n, out);                   // [n][32][128], causal over everything so far
 *   tkv_destroy(kv);
 *
 * OPTIONS (define before the include; none changes a declaration or a struct)
 *   macro                    where              effect
 *   TIEREDKV_IMPLEMENTATION  one file           emits the function bodies
 *   TKV_STATIC               any, implies it    everything static: a private copy in this file
 *   TKV_PREFIX name_         every include      public functions get this prefix: two copies in one program
 *   TKV_API decl             every include      what stands before public functions (dllexport, visibility)
 *   TKV_NO_MALLOC            implementation     no malloc and free: cfg.allocator or tkv_init_in_place only
 *   TKV_NO_SIMD              implementation     the scalar kernels only
 *   TKV_NO_AVX512            implementation     leaves those kernels out
 *
 * CONCEPTS
 *   cache      all state for one model: n_layers layers, up to max_seqs sequences
 *   sequence   one conversation or beam; its tokens have positions 0, 1, 2, ...
 *   head group the n_heads / n_kv_heads query heads that share a KV head
 *   block      64 consecutive tokens of one layer of one sequence, all KV heads: what is coded, moved, counted
 *   record     the bytes of a block for one KV head: K codes, K metadata, V codes, V metadata
 *   format     how a block stores K or V (tkv_format); K and V are chosen separately
 *   tier       HOT: exact - the sinks (first sink_tokens) and the tail (at least hot_tokens newest)
 *              WARM: the warm_tokens before the tail, 4 bits;  ARCHIVE: everything older, 2 bits
 *   plan       formats and lengths of the tiers, per layer if wanted
 *
 *   position   0 ...... 3 | 4 ................................... | ................. | ............ now
 *   tier       sinks: HOT | ARCHIVE                               | WARM              | tail: HOT
 *
 *   An append first moves what is due (a block whose newest token is hot_tokens old goes to warm, hot_tokens +
 *   warm_tokens old to the archive), then stores: a chunk is exact while its own queries run.
 *
 * BYTES (drawn in full at the parts that define them: tile.h, format_exact.h, format_kivi.h)
 *   exact      [token][channel] little-endian, channels padded to 16
 *   coded      tiles of 256 codes, 1 to 6 or 8 bits each; KIVI: fp16 scale and zero per group of 64 or 32
 *   tkv_encode gives these bytes for one head's block; they are the same on every machine and instruction set
 *   (default floating-point flags), and decode to the same floats under any flags.
 *
 * NUMERICS
 *   decoded value     scale * code + zero with one rounding: bit-identical everywhere
 *   attention         against double precision on the decoded values: 1e-5 for F32, 2e-3 for F16 and BF16, and
 *                     at most a tenth of the format's own error for coded tiers (2e-3 or that with cfg.precise)
 *   threads           bit-identical with any number of threads, and without
 *   not promised      the same bits of attention on different instruction sets
 *
 * MEMORY
 *   Everything comes from cfg.allocator in pages and a few growing tables, counted to the byte (tkv_memory).
 *   tkv_attend never allocates. An append fetches all it needs before it changes anything; when that fails it
 *   has not happened. tkv_init_in_place does the same inside a piece of yours and never allocates.
 *
 * ERRORS   Every function that can fail returns a tkv_status and then has changed nothing; tkv_last_error
 *          gives the sentence for the last mutating call.
 * THREADS  One writer per cache. Readers (tkv_attend, tkv_read and everything that takes a const tkv_cache) may
 *          run side by side between writes. Different caches are independent.
 * SIMD     x86: AVX2+FMA+F16C, or AVX-512 F/BW/VL/DQ/VNNI, found by cpuid at tkv_create; cfg.isa forces one.
 *          Elsewhere: scalar C.
 */

/* ======== api.h ======== */
/*
 * api.h - everything a caller sees: version, options, types, functions.
 *
 * Declarations only. May call nothing. The parts behind it implement what is promised here; where a
 * promise and the code differ, the code is wrong.
 */
#ifndef TIEREDKV_H
#define TIEREDKV_H

#include <stddef.h>
#include <stdint.h>

/* >>version */
#define TKV_VERSION_MAJOR 0
#define TKV_VERSION_MINOR 1
#define TKV_VERSION_PATCH 0
#define TKV_VERSION_STRING "0.1.0"
#define TKV_VERSION (TKV_VERSION_MAJOR * 10000 + TKV_VERSION_MINOR * 100 + TKV_VERSION_PATCH)

/* >>options (the table with the meaning of each is in the manual at the top) */
#ifdef TKV_STATIC
#ifndef TIEREDKV_IMPLEMENTATION
#define TIEREDKV_IMPLEMENTATION /* static declarations without bodies would only warn */
#endif
#if defined(__GNUC__) || defined(__clang__)
#define TKV_API static __attribute__((unused))
#else
#define TKV_API static
#endif
#endif
#ifndef TKV_API
#define TKV_API extern
#endif

/* >>prefix: two copies of the library in one program. #define TKV_PREFIX mygame_ before every include. */
#ifdef TKV_PREFIX
#define TKV_PASTE2_(a, b) a##b
#define TKV_PASTE_(a, b) TKV_PASTE2_(a, b)
#define TKV_NAME_(name) TKV_PASTE_(TKV_PREFIX, name)
#define tkv_abort TKV_NAME_(tkv_abort)
#define tkv_append TKV_NAME_(tkv_append)
#define tkv_append_ex TKV_NAME_(tkv_append_ex)
#define tkv_attend TKV_NAME_(tkv_attend)
#define tkv_attend_ex TKV_NAME_(tkv_attend_ex)
#define tkv_attend_reference TKV_NAME_(tkv_attend_reference)
#define tkv_begin TKV_NAME_(tkv_begin)
#define tkv_check TKV_NAME_(tkv_check)
#define tkv_commit TKV_NAME_(tkv_commit)
#define tkv_config_default TKV_NAME_(tkv_config_default)
#define tkv_config_validate TKV_NAME_(tkv_config_validate)
#define tkv_create TKV_NAME_(tkv_create)
#define tkv_decode TKV_NAME_(tkv_decode)
#define tkv_destroy TKV_NAME_(tkv_destroy)
#define tkv_encode TKV_NAME_(tkv_encode)
#define tkv_encoded_size TKV_NAME_(tkv_encoded_size)
#define tkv_estimate TKV_NAME_(tkv_estimate)
#define tkv_flush TKV_NAME_(tkv_flush)
#define tkv_format_bits TKV_NAME_(tkv_format_bits)
#define tkv_format_from_name TKV_NAME_(tkv_format_from_name)
#define tkv_format_name TKV_NAME_(tkv_format_name)
#define tkv_init_in_place TKV_NAME_(tkv_init_in_place)
#define tkv_isa_available TKV_NAME_(tkv_isa_available)
#define tkv_isa_name TKV_NAME_(tkv_isa_name)
#define tkv_isa_of TKV_NAME_(tkv_isa_of)
#define tkv_last_error TKV_NAME_(tkv_last_error)
#define tkv_layer_len TKV_NAME_(tkv_layer_len)
#define tkv_memory TKV_NAME_(tkv_memory)
#define tkv_memory_of TKV_NAME_(tkv_memory_of)
#define tkv_merge_lse TKV_NAME_(tkv_merge_lse)
#define tkv_read TKV_NAME_(tkv_read)
#define tkv_required_bytes TKV_NAME_(tkv_required_bytes)
#define tkv_reserve TKV_NAME_(tkv_reserve)
#define tkv_reset TKV_NAME_(tkv_reset)
#define tkv_seq_len TKV_NAME_(tkv_seq_len)
#define tkv_status_text TKV_NAME_(tkv_status_text)
#define tkv_tier_counts TKV_NAME_(tkv_tier_counts)
#define tkv_tier_of TKV_NAME_(tkv_tier_of)
#define tkv_truncate TKV_NAME_(tkv_truncate)
#define tkv_version TKV_NAME_(tkv_version)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* >>constants */
#define TKV_BLOCK_TOKENS 64 /* tokens in a block: what is encoded, demoted and shared together */
#define TKV_MAX_HEAD_DIM 256
#define TKV_NONE (-1) /* in a length: this tier is off */
#define TKV_ALL (-2)  /* in a length: this tier takes everything, the later ones stay empty */

/* >>status: every function that can fail returns one. Negative is an error, and an error changes nothing. */
/* (An allocation that failed may leave a table of the index with more room than before.) */
#define TKV_STATUS_LIST(X)                                                                                   \
    X(TKV_OK, 0, "ok")                                                                                       \
    X(TKV_ERR_ARG, -1, "bad argument: a pointer is missing or a number is out of range")                     \
    X(TKV_ERR_CONFIG, -2, "bad configuration: tkv_config_validate says which field and why")                 \
    X(TKV_ERR_NOMEM, -3, "out of memory: the allocator returned NULL")                                       \
    X(TKV_ERR_CAPACITY, -4, "full: max_tokens, max_append or the caller's memory is used up")                \
    X(TKV_ERR_NONFINITE, -5, "NaN or infinity in k or v, and the config says to refuse them")                \
    X(TKV_ERR_STATE, -6, "call out of order: see tkv_begin, tkv_commit, tkv_abort")                          \
    X(TKV_ERR_RANGE, -7, "these tokens are not in the cache")                                                \
    X(TKV_ERR_INEXACT, -8, "the cut falls into compressed tokens; only exact ones can be cut")               \
    X(TKV_ERR_ISA, -9, "this instruction set was asked for by name and is not available here")               \
    X(TKV_ERR_BROKEN, -10, "self-check failed: the cache's memory was overwritten, or a bug")
#define TKV_STATUS_ENUM_(name, value, text) name = value,
typedef enum tkv_status { TKV_STATUS_LIST(TKV_STATUS_ENUM_) TKV_STATUS_LAST_ = -11 } tkv_status;
#undef TKV_STATUS_ENUM_

/* >>formats: how a block stores K or V. Sizes of each: tkv_format_bits. */
typedef enum tkv_format {
    TKV_FORMAT_DEFAULT = 0, /* hot F16, warm KIVI4, archive KIVI2 */
    TKV_F32,
    TKV_F16,
    TKV_BF16,
    TKV_Q8,    /* 8 bits, min/max, fp16 scale and zero; groups as in KIVI */
    TKV_KIVI4, /* 4, 3, 2 bits: K per channel along tokens, V per token along channels */
    TKV_KIVI3, /*   (KIVI, arXiv 2402.02750, section 3) */
    TKV_KIVI2,
    TKV_FORMAT_COUNT
} tkv_format;

typedef enum tkv_tier { TKV_HOT = 0, TKV_WARM = 1, TKV_ARCHIVE = 2, TKV_TIER_COUNT = 3 } tkv_tier;
typedef enum tkv_side { TKV_K = 0, TKV_V = 1 } tkv_side;
typedef enum tkv_type {
    TKV_TYPE_F32 = 0,
    TKV_TYPE_F16 = 1,
    TKV_TYPE_BF16 = 2
} tkv_type; /* of the caller's arrays */
typedef enum tkv_nonfinite {
    TKV_NONFINITE_REFUSE = 0, /* TKV_ERR_NONFINITE, nothing is appended */
    TKV_NONFINITE_SATURATE    /* NaN becomes 0, infinities become +-65504 */
} tkv_nonfinite;
typedef enum tkv_isa {
    TKV_ISA_AUTO = 0,
    TKV_ISA_SCALAR,
    TKV_ISA_AVX2,
    TKV_ISA_AVX512,
    TKV_ISA_COUNT
} tkv_isa;
typedef enum tkv_flush_mode {
    TKV_FLUSH_DUE = 0, /* what the next append would demote anyway */
    TKV_FLUSH_FULL, /* every full block of the hot tail, whatever its age (not under hot_tokens = TKV_ALL) */
    TKV_FLUSH_ALL   /* the partial block too: it is coded short and takes a whole block's bytes */
} tkv_flush_mode;

typedef struct tkv_cache tkv_cache; /* opaque */

/* >>allocator: both functions or none (then malloc and free). alloc returns memory aligned to `align`
 * (a power of two, at most 64) or NULL; release gets back size and align, so an arena needs no headers. */
typedef struct tkv_allocator {
    void *user;
    void *(*alloc)(void *user, size_t size, size_t align);
    void (*release)(void *user, void *ptr, size_t size, size_t align);
} tkv_allocator;

/* >>threads: the library starts none. A caller who has workers gives a function that calls task(ctx, i)
 * once for each i in 0 .. n_tasks-1, in any order, on any threads, and returns when all are done.
 * Results are bit-identical with and without it and for any number of threads. */
typedef void (*tkv_task)(void *ctx, int index);
typedef void (*tkv_parallel_for)(void *user, int n_tasks, tkv_task task, void *ctx);

/* >>config: zero means default, everywhere. Fill it with zeros first: `tkv_config cfg = {0};` in C,
 * `tkv_config cfg = tkv_config_default();` in C or C++. */
typedef struct tkv_pair {
    tkv_format k, v;
} tkv_pair;

typedef struct tkv_layer_config { /* one layer's exceptions; zero takes the cache's value */
    tkv_pair hot, warm, archive;
    int sink_tokens, hot_tokens, warm_tokens;
    int window;   /* sliding window: a query sees this many newest keys, its own included. TKV_NONE: none */
    int share_kv; /* 1 + index of an earlier layer whose K and V this one attends to; it is never appended to */
    int no_cache; /* 1: this layer has no K and V at all (a state-space layer, say) */
} tkv_layer_config;

typedef struct tkv_config {
    uint32_t start_canary; /* leave 0: catches a config that was never zeroed */
    /* the model */
    int n_layers;   /* required, 1 .. 4096 */
    int n_heads;    /* query heads; required, a multiple of n_kv_heads */
    int n_kv_heads; /* 0: n_heads (plain multi-head attention) */
    int head_dim;   /* of K and q; required, 1 .. 256. Stored padded to a multiple of 16 */
    int v_head_dim; /* of V and out; 0: head_dim */
    float scale;    /* of q.k; 0: 1/sqrt(head_dim) */
    /* capacity */
    int max_seqs;   /* 0: 1. Sequences are numbered 0 .. max_seqs-1 */
    int max_tokens; /* per sequence; 0: grows on demand (tkv_init_in_place needs a number) */
    int max_append; /* most tokens of one append; 0: 512 */
    /* the plan: [sinks][archive ...][warm][hot tail], oldest to newest */
    int sink_tokens; /* first tokens, exact for ever; 0: 4 */
    int hot_tokens;  /* at least this many newest tokens stay exact; 0: 64 */
    int warm_tokens; /* the next older ones; 0: 448 */
    int group_size;  /* values that share a scale in Q8 and KIVI formats: 64 or 32; 0: 64 */
    int window;      /* sliding window of all layers; 0: none */
    tkv_pair hot, warm, archive;
    const tkv_layer_config *layers; /* NULL, or n_layers exceptions; read by tkv_create, not kept */
    /* behaviour */
    tkv_nonfinite nonfinite;
    int precise; /* 1: two planes of q and of p in every format, 2e-3 of the output at most from arithmetic */
    tkv_isa isa; /* TKV_ISA_AUTO: the best one here. Another: that one or TKV_ERR_ISA */
    /* the host */
    tkv_allocator allocator;
    tkv_parallel_for parallel_for;
    void *parallel_user;
    uint32_t end_canary; /* leave 0 */
} tkv_config;

TKV_API tkv_config tkv_config_default(void); /* all zeros, for C++ and for people who like a name */

/* Checks every field. On an error, `reason` (may be NULL) gets one sentence that names the field, the
 * value and what would be right, cut to `size` bytes. */
TKV_API tkv_status tkv_config_validate(const tkv_config *cfg, char *reason, size_t size);

/* >>life. Creates an empty cache; memory for tokens comes as they come, a page at a time. *out is
 * untouched on error. Cost: one allocation per growing part, no per-token work. */
TKV_API tkv_status tkv_create(const tkv_config *cfg, tkv_cache **out);
TKV_API void tkv_destroy(tkv_cache *kv); /* NULL is fine. Gives everything back to the allocator. */

/* The same cache inside the caller's memory: nothing is ever allocated. cfg.max_tokens must be set;
 * cfg.allocator is not used. `mem` may have any alignment, stays the caller's and must outlive the cache;
 * tkv_destroy then has nothing to do. tkv_required_bytes is enough for every sequence at
 * max_tokens (not for blocks that TKV_FLUSH_ALL made short: TKV_ERR_CAPACITY then). TKV_ERR_CONFIG without
 * max_tokens, or if it is more than this machine can address. */
TKV_API tkv_status tkv_required_bytes(const tkv_config *cfg, size_t *bytes);
TKV_API tkv_status tkv_init_in_place(const tkv_config *cfg, void *mem, size_t bytes, tkv_cache **out);

/* >>append. n new tokens of one layer, after those it has. k is [n][n_kv_heads][head_dim], v is
 * [n][n_kv_heads][v_head_dim], float, keys after RoPE. First older blocks that are due move down a tier
 * (so a new chunk stays exact until the next append), then the tokens are stored in the hot format.
 * Values beyond +-65504 saturate there in F16. Errors: TKV_ERR_CAPACITY (n > max_append, or max_tokens),
 * TKV_ERR_NOMEM, TKV_ERR_NONFINITE. Cost: O(n) plus one encoding per 64 tokens. */
TKV_API tkv_status tkv_append(tkv_cache *kv, int seq, int layer, const float *k, const float *v, int n);

/* One entry of a ragged batch: n tokens (or queries) of sequence seq. */
typedef struct tkv_rows {
    int seq, n;
} tkv_rows;

/* Strides count elements; 0 means packed. Rows of a batch follow each other in k and v. */
typedef struct tkv_append_params {
    int layer;
    int seq, n;            /* one sequence ... */
    const tkv_rows *batch; /* ... or several (then seq and n are ignored), each at most once */
    int n_batch;
    const void *k, *v;
    tkv_type k_type, v_type;
    ptrdiff_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
} tkv_append_params;
/* All of the batch, or none of it. Errors as tkv_append, and TKV_ERR_ARG for a sequence that is in it twice, a
 * layer without K and V of its own, a missing pointer. Strides may be negative. Cost as tkv_append, and
 * O(n_batch^2) to look for doubles. */
TKV_API tkv_status tkv_append_ex(tkv_cache *kv, const tkv_append_params *p);

/* >>step. A step over all layers as one unit. tkv_begin first does what is due (as an append would), then
 * opens the step; appends inside it demote nothing and add at most max_append tokens per layer; tkv_commit
 * checks that every layer got the same number of tokens (TKV_ERR_STATE otherwise, the step stays open);
 * tkv_abort takes the step's tokens away again, leaving the cache exactly as after tkv_begin. Out of order:
 * TKV_ERR_STATE. tkv_begin can fail with TKV_ERR_NOMEM; it costs the encoding that is due, the others
 * O(layers). */
TKV_API tkv_status tkv_begin(tkv_cache *kv, int seq);
TKV_API tkv_status tkv_commit(tkv_cache *kv, int seq);
TKV_API tkv_status tkv_abort(tkv_cache *kv, int seq);
/* Memory for n more tokens in every layer, demotion included, now: the appends that bring each layer of
 * seq to its length + n cannot fail for memory. Held until then, or until tkv_reset, or tkv_flush of
 * what is not due. n up to max_append. */
TKV_API tkv_status tkv_reserve(tkv_cache *kv, int seq, int n);

/* >>attend. Attention of the last n tokens of the sequence (append them first), causal among themselves,
 * over all tiers. q is [n][n_heads][head_dim], out is [n][n_heads][v_head_dim], float. Query head h reads
 * KV head h / (n_heads / n_kv_heads). Only reads the cache: any number of threads may call this side by
 * side between writes. Never allocates; uses at most 96 KiB of stack. */
TKV_API tkv_status tkv_attend(tkv_cache *kv, int seq, int layer, const float *q, int n, float *out);

/* Logit of query i (row), key j (position), head h, in this order:
 *   s = scale * q.k;  if softcap: s = softcap * tanh(s / softcap);  s += alibi[h] * (j - pos(i));  s += mask[i][j]
 * A row that sees no key gives zeros, and -inf as its log-sum-exp. */
typedef struct tkv_attend_params {
    int layer;
    int seq, n;            /* one sequence ... */
    const tkv_rows *batch; /* ... or several (then seq and n are ignored) */
    int n_batch;
    const void *q; /* rows of the batch follow each other */
    tkv_type q_type;
    ptrdiff_t q_row_stride, q_head_stride; /* in elements; 0: packed */
    void *out;
    tkv_type out_type;
    ptrdiff_t out_row_stride, out_head_stride;
    float scale;        /* 0: the cache's */
    int non_causal;     /* 1: every query sees every key (cross-attention, encoders) */
    int window;         /* 0: the layer's; TKV_NONE: none; else the newest this many keys */
    float softcap;      /* 0: none */
    const float *alibi; /* NULL, or one slope per query head */
    const float *sinks; /* NULL, or one learned logit per query head that joins the softmax without a value */
    /* NULL, or added to the logits: mask[row * mask_stride + j] for key position j. <= -1e30 or NaN hides the
     * key, more than 1e30 counts as 1e30. Stride 0: the length of the longest sequence. */
    const float *mask;
    ptrdiff_t mask_stride;
    /* NULL, or bits for a draft tree: the row sees the sequence's j-th of its last mask_bits_n tokens if bit
     * j % 64 of mask_bits[row * mask_bits_stride + j / 64] is set. Older ones are seen. Stride 0: the words
     * that mask_bits_n needs. */
    const uint64_t *mask_bits;
    ptrdiff_t mask_bits_stride;
    int mask_bits_n;
    /* NULL, or out: log-sum-exp [row][n_heads], learned sinks included. */
    float *lse;
    /* NULL, or out (needs lse): attention each key position got, summed over rows and heads, one array of
     * mass_stride (at least the longest length, which is also its 0) per entry of the batch. Costs a second
     * pass over the keys. */
    float *mass;
    ptrdiff_t mass_stride;
} tkv_attend_params;
/* Rows are the queries of all entries, one after the other; a batch has at most max_seqs entries, a sequence
 * may be in it twice. Strides may be negative. Errors, out untouched: TKV_ERR_ARG (a pointer is missing, a
 * number out of range); TKV_ERR_RANGE (more queries than tokens, or keys that a query would see are gone: its
 * window is wider than the layer's, or it is too old). Cost: O(rows * n_heads * keys seen), the bytes of each
 * block once per 8 rows of a KV head. Online softmax split over keys: arXiv 2307.08691, section 3; scales
 * folded into queries and weights, integer products on the codes: kernels.h. */
TKV_API tkv_status tkv_attend_ex(tkv_cache *kv, const tkv_attend_params *p);

/* The slow definition of the same: decodes every key and value, again for each row, and works in double. For
 * tests. Same errors. */
TKV_API tkv_status tkv_attend_reference(tkv_cache *kv, const tkv_attend_params *p);

/* Joins attention over two disjoint sets of keys: out and lse become those of the union. n_rows rows of
 * dim values, lse one per row, all required; an lse that is not finite marks a row without keys. Learned
 * sinks must be in at most one of the two. Cost: O(n_rows * dim). (arXiv 2307.08691, section 3.) */
TKV_API void tkv_merge_lse(float *out, float *lse, const float *out2, const float *lse2, int n_rows, int dim);

/* >>read. Decoded K and V of tokens start .. start+n-1 in any tier, as [n][n_kv_heads][head_dim] and
 * [n][n_kv_heads][v_head_dim]; k or v may be NULL. Only reads. TKV_ERR_RANGE
 * if a token is not held, TKV_ERR_ARG for a layer without a cache; k and v untouched then. O(blocks + values). */
TKV_API tkv_status tkv_read(tkv_cache *kv, int seq, int layer, int start, int n, float *k, float *v);

/* >>sequences. A sequence exists from its first append until its reset. */
TKV_API int tkv_seq_len(const tkv_cache *kv, int seq); /* tokens that every layer holds; 0 for a bad seq */
TKV_API int tkv_layer_len(const tkv_cache *kv, int seq, int layer); /* tokens appended to this layer */
/* Empty again, an open step and a reservation too. O(blocks). */
TKV_API tkv_status tkv_reset(tkv_cache *kv, int seq);
/* Keeps the first n_tokens of every layer (a layer that has fewer keeps what it has). Only exact tokens can
 * be cut: TKV_ERR_INEXACT says how many must stay. While tokens only came, at
 * least hot_tokens of them can be cut (a cut or a flush before takes its part of that). */
TKV_API tkv_status tkv_truncate(tkv_cache *kv, int seq, int n_tokens);
/* Demotes now what would wait (see tkv_flush_mode), for an idle moment or a sequence that is finished; with
 * FULL and ALL the warm tier then begins at the newest token. TKV_ERR_NOMEM, or TKV_ERR_CAPACITY in place;
 * TKV_ERR_STATE in an open step. Cost: one encoding per block. */
TKV_API tkv_status tkv_flush(tkv_cache *kv, int seq, tkv_flush_mode mode);

/* >>reports. */
typedef struct tkv_tier_info {
    int tokens[TKV_TIER_COUNT]; /* per tier; sinks are HOT. Their sum and `dropped` make the length */
    int blocks[TKV_TIER_COUNT];
    int dropped; /* left every window, gone */
} tkv_tier_info;
/* Both O(blocks); TKV_ERR_ARG for a layer without a cache, TKV_ERR_RANGE for a token that is not held. */
TKV_API tkv_status tkv_tier_counts(const tkv_cache *kv, int seq, int layer, tkv_tier_info *out);
TKV_API tkv_status tkv_tier_of(const tkv_cache *kv, int seq, int layer, int token, tkv_tier *out);

typedef struct tkv_tier_bytes {
    size_t tokens;   /* summed over layers; a block shared by sequences counts once */
    size_t codes;    /* bytes that hold values (of the tokens present and of the room left in their blocks) */
    size_t metadata; /* scales and zeros */
} tkv_tier_bytes;
typedef struct tkv_memory_info {
    size_t total;                        /* what the allocator handed out and has not got back; the sum of: */
    tkv_tier_bytes tier[TKV_TIER_COUNT]; /*   codes and metadata of each tier */
    size_t tables;                       /*   formats and plans per layer */
    size_t index;                        /*   block table, block lists, the cache itself */
    size_t scratch;                      /*   work space of encoding and of parallel attention */
    size_t slack;                        /*   free room in pages, padding */
    size_t peak;                         /* highest total so far */
    size_t fp16_bytes; /* K and V of the same tokens, plain FP16, unpadded, without any overhead */
    double ratio;      /* fp16_bytes / total */
    double ratio_f32;  /* the same against plain F32 */
} tkv_memory_info;
TKV_API tkv_status tkv_memory(const tkv_cache *kv, tkv_memory_info *out); /* exact to the byte. O(blocks) */
/* The same for the blocks of one layer of one sequence: tiers, padding (slack), their sum; shared blocks count
 * in full, tables, index and scratch belong to nobody. TKV_ERR_ARG for a layer without a cache. */
TKV_API tkv_status tkv_memory_of(const tkv_cache *kv, int seq, int layer, tkv_memory_info *out);
/* What tkv_memory would say of n_seqs sequences of n_tokens each, appended token by token; allocates nothing.
 * Exact, but that `index` can be off by one doubling of a table; peak is total (a prompt in large chunks has a
 * higher one: a chunk is exact until the next). TKV_ERR_CONFIG if it is more than this machine can address. */
TKV_API tkv_status tkv_estimate(const tkv_config *cfg, int n_tokens, int n_seqs, tkv_memory_info *out);

/* Walks every invariant: each block counted once per holder, no slot used twice, positions without gaps,
 * tiers in order and by age, bytes adding up. O(blocks). `reason` as in tkv_config_validate. */
TKV_API tkv_status tkv_check(const tkv_cache *kv, char *reason, size_t size);

TKV_API const char *tkv_status_text(tkv_status s);
/* The sentence of the last call that changes the cache, "" after a success; attend, read, reports leave none. */
TKV_API const char *tkv_last_error(const tkv_cache *kv);
TKV_API int tkv_version(void);                     /* TKV_VERSION of the implementation that is linked */
TKV_API const char *tkv_format_name(tkv_format f); /* "kivi4"; NULL if there is none */
TKV_API tkv_format tkv_format_from_name(const char *name); /* TKV_FORMAT_DEFAULT if unknown */
TKV_API int tkv_isa_available(tkv_isa isa);
TKV_API const char *tkv_isa_name(tkv_isa isa);
TKV_API tkv_isa tkv_isa_of(const tkv_cache *kv); /* the one it runs on */

/* >>codec. The formats without a cache: one head's block of up to 64 tokens, as bytes that do not depend on
 * the machine. x is [n_tokens][head_dim] with `stride` floats between tokens (0: head_dim). */
typedef struct tkv_codec {
    tkv_format format;
    tkv_side side;
    int head_dim;
    int group_size; /* 64 or 32; 0: 64. Ignored by exact formats */
} tkv_codec;
TKV_API size_t
tkv_encoded_size(const tkv_codec *c); /* bytes, metadata included; 0 if the codec is not valid */
TKV_API double tkv_format_bits(
    const tkv_codec *c); /* stored bits per value of a full block, everything included */
/* Scalar code, the definition of the formats. dst and src need tkv_encoded_size bytes, any alignment.
 * TKV_ERR_ARG (a stride below head_dim or a short buffer included) or TKV_ERR_NONFINITE, nothing written then.
 * Any bytes decode to something: foreign ones are safe, not meaningful. Cost: O(64 * head_dim). */
TKV_API tkv_status tkv_encode(const tkv_codec *c, const float *x, ptrdiff_t stride, int n_tokens, void *dst,
                              size_t size);
TKV_API tkv_status tkv_decode(const tkv_codec *c, const void *src, size_t size, int n_tokens, float *x,
                              ptrdiff_t stride);

#ifdef __cplusplus
}
#endif
#endif /* TIEREDKV_H */

/* Outside the include guard: a header may have been included first without the implementation. */
#if defined(TIEREDKV_IMPLEMENTATION) && !defined(TKVI_IMPLEMENTED)
#define TKVI_IMPLEMENTED
#ifdef __cplusplus
extern "C" {
#endif
/* ======== base.h ======== */
/*
 * base.h - what everything else stands on: bits of floats, half floats, rounding, checked sizes, memory,
 * short texts without stdio. May call libc's memcpy, memset, memmove and, unless TKV_NO_MALLOC, malloc and free.
 *
 * The header is compiled with other people's flags. So: NaN and infinity are told by their bits
 * (-ffast-math folds x != x), rounding goes through an integer read of the sum (not (x + M) - M), bytes
 * are loaded one by one (alignment, aliasing, endianness), and where x87 keeps excess precision each
 * float operation that decides a stored byte is rounded by tkvi_f32.
 */
#ifndef TKVI_BASE_H
#define TKVI_BASE_H


#include <float.h>
#include <math.h>
#include <string.h>
#ifndef TKV_NO_MALLOC
#include <stdlib.h>
#endif

#if defined(__GNUC__) || defined(__clang__)
#define TKVI_NOINLINE __attribute__((noinline))
#else
#define TKVI_NOINLINE
#endif

/* Before an array that vectors walk along: no load of 64 bytes then touches two cache lines. */
#if defined(__GNUC__) || defined(__clang__)
#define TKVI_ALIGNED __attribute__((aligned(64)))
#elif defined(_MSC_VER)
#define TKVI_ALIGNED __declspec(align(64))
#else
#define TKVI_ALIGNED
#endif

/* >>bits */
static uint32_t tkvi_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float tkvi_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static int tkvi_is_finite(float x) { return (tkvi_bits(x) & 0x7f800000u) != 0x7f800000u; }

/* The value as a float, also where expressions are evaluated wider. One rounding from 64 bits to 24 after
 * + - * / is the IEEE result (64 >= 2 * 24 + 2), so x87 encodes the same bytes as everybody else. */
static float tkvi_f32(float x) {
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD == 0
    return x;
#else
    volatile float v = x;
    return v;
#endif
}

/* Round half to even, |x| < 2^22: 1.5 * 2^23 makes the sum's last mantissa bit worth one. */
static int tkvi_rne(float x) { return (int)(tkvi_bits(x + 12582912.0f) - 0x4b400000u); }

static float tkvi_clampf(float x, float lo, float hi) { return x < lo ? lo : x > hi ? hi : x; }

static int tkvi_min(int a, int b) { return a < b ? a : b; }

static int tkvi_max(int a, int b) { return a > b ? a : b; }

static int tkvi_round_up(int n, int to) { return (n + to - 1) / to * to; }

/* >>half floats. Stored little-endian everywhere. */
#define TKVI_F16_MAX 65504.0f

static uint16_t tkvi_load16(const uint8_t *p) { return (uint16_t)(p[0] | (p[1] << 8)); }

static void tkvi_store16(uint8_t *p, uint16_t x) {
    p[0] = (uint8_t)(x & 0xff);
    p[1] = (uint8_t)(x >> 8);
}

static uint32_t tkvi_load32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void tkvi_store32(uint8_t *p, uint32_t x) {
    p[0] = (uint8_t)(x & 0xff);
    p[1] = (uint8_t)(x >> 8 & 0xff);
    p[2] = (uint8_t)(x >> 16 & 0xff);
    p[3] = (uint8_t)(x >> 24);
}

static float tkvi_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, em = h & 0x7fffu;
    if (em >= 0x7c00u) return tkvi_from_bits(sign | 0x7f800000u | (em & 0x3ffu) << 13);
    if (em >= 0x400u) return tkvi_from_bits(sign | ((em << 13) + 0x38000000u));
    {
        float x = (float)(int)em * 5.9604644775390625e-8f; /* subnormal: em * 2^-24, exact */
        return sign ? -x : x;
    }
}

/* Round to nearest even; beyond the largest half it saturates, NaN becomes a quiet NaN. */
static uint16_t tkvi_f32_to_f16(float x) {
    uint32_t u = tkvi_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477fe000u) return (uint16_t)(sign | 0x7bffu);
    if (a >= 0x38800000u) return (uint16_t)(sign | ((a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13));
    if (a <= 0x33000000u) return (uint16_t)sign; /* up to half of the smallest subnormal, the tie included */
    {
        uint32_t shift = 126u - (a >> 23), m = (a & 0x7fffffu) | 0x800000u, half = 1u << (shift - 1u);
        uint32_t r = m >> shift, rest = m & ((1u << shift) - 1u);
        r += (uint32_t)(rest > half || (rest == half && (r & 1u)));
        return (uint16_t)(sign | r);
    }
}

static float tkvi_bf16_to_f32(uint16_t h) { return tkvi_from_bits((uint32_t)h << 16); }

static uint16_t tkvi_f32_to_bf16(float x) {
    uint32_t u = tkvi_bits(x), a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    if (a >= 0x7f7f8000u) return (uint16_t)((u >> 16 & 0x8000u) | 0x7f7fu); /* saturate, never infinity */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* >>the caller's arrays: element number `at`, any alignment */
static float tkvi_element(const void *data, tkv_type type, ptrdiff_t at) {
    uint16_t h;
    float x;
    if (type == TKV_TYPE_F32) {
        memcpy(&x, (const char *)data + at * 4, 4);
        return x;
    }
    memcpy(&h, (const char *)data + at * 2, 2);
    return type == TKV_TYPE_F16 ? tkvi_f16_to_f32(h) : tkvi_bf16_to_f32(h);
}

static void tkvi_save_element(void *data, tkv_type type, ptrdiff_t at, float x) {
    uint16_t h;
    if (type == TKV_TYPE_F32) {
        memcpy((char *)data + at * 4, &x, 4);
        return;
    }
    h = type == TKV_TYPE_F16 ? tkvi_f32_to_f16(x) : tkvi_f32_to_bf16(x);
    memcpy((char *)data + at * 2, &h, 2);
}

/* >>sizes: products of outside numbers are checked. Return 0 on overflow. */
static int tkvi_mul(size_t a, size_t b, size_t *out) {
    if (b != 0 && a > (size_t)-1 / b) return 0;
    *out = a * b;
    return 1;
}

static int tkvi_add(size_t a, size_t b, size_t *out) {
    if (a > (size_t)-1 - b) return 0;
    *out = a + b;
    return 1;
}

#define TKVI_ALIGN 64u

static size_t tkvi_align_up(size_t n) { return (n + (TKVI_ALIGN - 1u)) & ~(size_t)(TKVI_ALIGN - 1u); }

/* >>memory: every byte goes through a heap that counts. */
typedef struct tkvi_heap {
    tkv_allocator from;
    size_t held, peak;
} tkvi_heap;

#ifndef TKV_NO_MALLOC
/* malloc gives 8 or 16; the block before the aligned one remembers where it began. */
static void *tkvi_malloc(void *user, size_t size, size_t align) {
    size_t room;
    char *raw, *p;
    (void)user;
    if (!tkvi_add(size, align + sizeof(void *), &room)) return NULL;
    raw = (char *)malloc(room);
    if (!raw) return NULL;
    p = raw + sizeof(void *);
    p += (align - (size_t)((uintptr_t)p & (align - 1u))) & (align - 1u);
    memcpy(p - sizeof(void *), &raw, sizeof(void *));
    return p;
}

static void tkvi_mfree(void *user, void *ptr, size_t size, size_t align) {
    char *raw;
    (void)user;
    (void)size;
    (void)align;
    memcpy(&raw, (char *)ptr - sizeof(void *), sizeof(void *));
    free(raw);
}
#endif

static void *tkvi_get(tkvi_heap *heap, size_t size) {
    void *p = heap->from.alloc(heap->from.user, size, TKVI_ALIGN);
    if (p) {
        heap->held += size;
        if (heap->held > heap->peak) heap->peak = heap->held;
    }
    return p;
}

static void tkvi_put(tkvi_heap *heap, void *ptr, size_t size) {
    if (!ptr) return;
    heap->held -= size;
    heap->from.release(heap->from.user, ptr, size, TKVI_ALIGN);
}

/* >>arena: the caller's memory as an allocator. Only grows; closed once the cache is built. */
typedef struct tkvi_arena {
    uint8_t *base;
    size_t size, used;
    int closed;
} tkvi_arena;

static void *tkvi_arena_alloc(void *user, size_t size, size_t align) {
    tkvi_arena *a = (tkvi_arena *)user;
    size_t at = (a->used + align - 1u) & ~(align - 1u); /* base is aligned to TKVI_ALIGN */
    if (a->closed || at < a->used || at > a->size || size > a->size - at) return NULL;
    a->used = at + size;
    return a->base + at;
}

static void tkvi_arena_release(void *user, void *ptr, size_t size, size_t align) {
    (void)user;
    (void)ptr;
    (void)size;
    (void)align;
}

/* >>text: sentences for people, cut to the room there is. */
typedef struct tkvi_text {
    char *at;
    size_t left; /* the final zero not counted; at is NULL when there is no room at all */
} tkvi_text;

static tkvi_text tkvi_text_begin(char *buf, size_t size) {
    tkvi_text t;
    t.at = size > 0 ? buf : NULL;
    t.left = t.at ? size - 1 : 0;
    if (t.at) *t.at = 0;
    return t;
}

static void tkvi_say(tkvi_text *t, const char *s) {
    for (; t->at && *s && t->left; t->left--) *t->at++ = *s++;
    if (t->at) *t->at = 0;
}

static void tkvi_say_int(tkvi_text *t, int64_t n) {
    char digits[24];
    int i = 23;
    uint64_t u = n < 0 ? 0u - (uint64_t)n : (uint64_t)n;
    digits[i] = 0;
    do digits[--i] = (char)('0' + (int)(u % 10u));
    while (u /= 10u);
    if (n < 0) digits[--i] = '-';
    tkvi_say(t, digits + i);
}

#endif /* TKVI_BASE_H */
/* ======== tile.h ======== */
/*
 * tile.h - the unit that is packed, unpacked and multiplied: 256 codes of 1 to 6 or 8 bits.
 *
 * Scalar definition; the vector kernels read the same bytes. Calls nothing but base.
 *
 * A tile is four planes of 64 codes; code (plane p, lane l, reduced r) has number 64 p + 4 l + r, with
 * p 0..3, l 0..15, r 0..3. The four reduced codes are multiplied by four weights and summed: one 32-bit
 * lane of vpdpbusd, of vpmaddubsw + vpmaddwd, of sdot.
 *
 *   K of one head: tile i holds channels 4i .. 4i+3 (in the head's order) of all 64 tokens.
 *                  token = 16 p + l, channel = 4 i + r. head_dim / 4 tiles, one weight set per tile.
 *   V of one head: 16 channels (a slab) of 16 tokens; four tiles per slab, slabs one after the other.
 *                  channel = 16 slab + l, token = 16 (tile in slab) + 4 p + r. No padding for any multiple of 16.
 *
 * Bytes of one tile (j = 4 l + r is the byte number 0..63, bit 0 is the lowest):
 *
 *   2 bits   64 bytes          byte j:  | plane 3 | plane 2 | plane 1 | plane 0 |
 *   4 bits   64 + 64 bytes     byte j of the first:  | plane 1 (4 bits) | plane 0 |; of the second: planes 3, 2
 *   6 bits   4-bit part, then a 2-bit part with bits 4 and 5
 *   8 bits   4 x 64 bytes      byte j of vector p: plane p
 *   1 bit    half a 64-byte vector that two tiles share: tile A has bits 0..3 of byte j (plane = bit), tile B 4..7
 *   3, 5     the 2- or 4-bit part, and the top bit as a 1-bit half
 *
 * A record's codes are runs of tiles, widest first. The 1-bit halves of all of them stand together at the
 * end, in the order of their tiles, so that every load is a whole aligned 64-byte vector:
 *
 *   [8-bit tiles][6][5 without top bits][4][3 without top bits][2] [1-bit halves of the 5-, 3- and 1-bit tiles]
 */
#ifndef TKVI_TILE_H
#define TKVI_TILE_H


#define TKVI_TILE_CODES 256
#define TKVI_MAX_WIDTH 8 /* widths are 1 2 3 4 5 6 8 */

/* Bytes of the part that is not a 1-bit half, and whether there is such a half, by width. */
static const uint16_t tkvi_wide_bytes[TKVI_MAX_WIDTH + 1] = {0, 0, 64, 64, 128, 128, 192, 0, 256};
static const uint8_t tkvi_has_half[TKVI_MAX_WIDTH + 1] = {0, 1, 0, 1, 0, 1, 0, 0, 0};

/* How many tiles of each width a run of codes has. */
typedef struct tkvi_runs {
    uint16_t n[TKVI_MAX_WIDTH + 1];
} tkvi_runs;

/* Where a reader or writer of tiles stands. Start it with tkvi_tiles, move on with tkvi_next_tile. */
typedef struct tkvi_tile_at {
    size_t wide, halves; /* byte offsets of this tile's wide part and of the first 1-bit vector */
    int half;            /* number of the next 1-bit half */
} tkvi_tile_at;

static tkvi_tile_at tkvi_tiles(const tkvi_runs *runs) {
    tkvi_tile_at at;
    int w;
    at.wide = 0;
    at.halves = 0;
    at.half = 0;
    for (w = 1; w <= TKVI_MAX_WIDTH; w++) at.halves += (size_t)runs->n[w] * tkvi_wide_bytes[w];
    return at;
}

static void tkvi_next_tile(tkvi_tile_at *at, int width) {
    at->wide += tkvi_wide_bytes[width];
    at->half += tkvi_has_half[width];
}

static size_t tkvi_runs_bytes(const tkvi_runs *runs) {
    size_t halves = (size_t)runs->n[1] + runs->n[3] + runs->n[5];
    return tkvi_tiles(runs).halves + (halves + 1) / 2 * 64;
}

/* Bits `shift` and up of the codes, `bits` of them, as vectors of 64 bytes with 8 / bits planes each. */
static void tkvi_pack_planes(uint8_t *dst, const uint8_t *code, int bits, int shift) {
    int per = 8 / bits, mask = (1 << bits) - 1, p, j;
    memset(dst, 0, (size_t)(256 / per));
    for (p = 0; p < 4; p++)
        for (j = 0; j < 64; j++)
            dst[p / per * 64 + j] =
                (uint8_t)(dst[p / per * 64 + j] | (code[64 * p + j] >> shift & mask) << (p % per * bits));
}

static void tkvi_unpack_planes(const uint8_t *src, uint8_t *code, int bits, int shift) {
    int per = 8 / bits, mask = (1 << bits) - 1, p, j;
    for (p = 0; p < 4; p++)
        for (j = 0; j < 64; j++)
            code[64 * p + j] =
                (uint8_t)(code[64 * p + j] | (src[p / per * 64 + j] >> (p % per * bits) & mask) << shift);
}

static void tkvi_pack_tile(uint8_t *codes, const tkvi_tile_at *at, int width, const uint8_t *code) {
    uint8_t *wide = codes + at->wide;
    int low = width == 8 ? 8 : width >= 4 ? 4 : width >= 2 ? 2 : 0;
    if (low) tkvi_pack_planes(wide, code, low, 0);
    if (width == 6) tkvi_pack_planes(wide + 128, code, 2, 4);
    if (tkvi_has_half[width]) {
        uint8_t *v = codes + at->halves + at->half / 2 * 64;
        int up = at->half % 2 * 4, p, j;
        for (j = 0; j < 64; j++) {
            int b = v[j] & ~(15 << up);
            for (p = 0; p < 4; p++) b |= (code[64 * p + j] >> low & 1) << (up + p);
            v[j] = (uint8_t)b;
        }
    }
}

static void tkvi_unpack_tile(const uint8_t *codes, const tkvi_tile_at *at, int width, uint8_t *code) {
    const uint8_t *wide = codes + at->wide;
    int low = width == 8 ? 8 : width >= 4 ? 4 : width >= 2 ? 2 : 0;
    memset(code, 0, TKVI_TILE_CODES);
    if (low) tkvi_unpack_planes(wide, code, low, 0);
    if (width == 6) tkvi_unpack_planes(wide + 128, code, 2, 4);
    if (tkvi_has_half[width]) {
        const uint8_t *v = codes + at->halves + at->half / 2 * 64;
        int up = at->half % 2 * 4, p, j;
        for (p = 0; p < 4; p++)
            for (j = 0; j < 64; j++)
                code[64 * p + j] = (uint8_t)(code[64 * p + j] | (v[j] >> (up + p) & 1) << low);
    }
}

#endif /* TKVI_TILE_H */
/* ======== format.h ======== */
/*
 * format.h - what a format is: how one side (K or V) of one head's block becomes bytes.
 *
 * To add a format:
 *   1. write its scalar code in a file format_NAME.h: the functions of tkvi_codec (below) for each side
 *      it can store, with the bytes drawn at the top;
 *   2. add its name to tkv_format in api.h and one line to the table in format_table.h.
 * Nothing else has to know it: sizes, demotion, reading, attention and the tests go through the table. A
 * format whose codes are tiles (tile.h) runs on the integer kernels of every instruction set as it is,
 * whatever its widths, channel order and level table; only `meta` is its own.
 *
 * A side in memory: codes (a multiple of 64 bytes), then metadata, padded to 64 bytes. A record is the K
 * side, then the V side, of one head. May call tile and base.
 */
#ifndef TKVI_FORMAT_H
#define TKVI_FORMAT_H


#define TKVI_BLOCK TKV_BLOCK_TOKENS
#define TKVI_MAX_GROUPS (TKV_MAX_HEAD_DIM / 32) /* of V along channels; of K along tokens it is two */

struct tkvi_side;

typedef void (*tkvi_halves)(const uint8_t *src, int n, float *dst);

static void tkvi_halves_scalar(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f16_to_f32(tkvi_load16(src + 2 * i));
}

/* One side of a format. `x` is [token][stride] floats; channels beyond side->dim are neither read nor written. */
typedef struct tkvi_codec {
    /* Sets runs, groups, code_bytes, meta_bytes (and order, levels) from dim, pad and group. */
    void (*layout)(struct tkvi_side *s);
    /* Writes the whole side. n tokens, 1..64; those beyond n get code 0. Same bytes on every machine. */
    void (*encode)(const struct tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst);
    /* Tokens first .. first+n-1. Same bits on every machine: at most one rounding per value. */
    void (*decode)(const struct tkvi_side *s, const uint8_t *src, int first, int n, float *x, size_t stride);
    /* Tile formats: value = scale * level + zero, level = code, or levels[code] if the side has a table.
     *   K: scale[group][position], groups along tokens, position = place in the channel order
     *   V: scale[group][token], groups along channels
     * `halves` turns fp16 into float as fast as this machine can. NULL for exact formats. */
    void (*meta)(const struct tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale,
                 float *zero);
    /* Exact formats: writes one token of a side that was cleared when it was made. NULL for the others. */
    void (*put)(const struct tkvi_side *s, const float *x, int token, uint8_t *dst);
} tkvi_codec;

/* Exact ones are floats: tokens can be added one by one and cut off again. */
typedef enum tkvi_storage {
    TKVI_AS_F32,
    TKVI_AS_F16,
    TKVI_AS_BF16,
    TKVI_AS_TILES,
    TKVI_STORAGE_COUNT
} tkvi_storage;

typedef struct tkvi_format {
    const char *name;
    int bits;            /* of a code; 16 or 32 for exact formats */
    tkvi_storage stored; /* how, and so by which kernel it is read */
    tkvi_codec side[2];  /* TKV_K, TKV_V */
} tkvi_format;

typedef struct tkvi_side {
    const tkvi_format *format;
    tkv_side which;
    int dim, pad;          /* channels, and channels rounded up to 16 */
    int tokens;            /* room: 64, or fewer in an exact side */
    int group;             /* values per scale: 64 or 32 */
    int groups;            /* K: along the 64 tokens; V: along the channels */
    tkvi_runs runs;        /* tiles by width */
    const uint16_t *order; /* K: channel at each position, `pad` of them; NULL: as they come */
    const int8_t *levels;  /* 16 levels of -127..127 by code (widths up to 4); NULL: the code itself */
    size_t code_bytes, meta_bytes, bytes;
} tkvi_side;

static int tkvi_channel(const tkvi_side *s, int position) { return s->order ? s->order[position] : position; }

/* What the codes of a width lie around: kernels multiply codes minus this by rounded weights, and take the
 * rest from the float ones, so that rounding meets the spread of the codes and not their mean. */
static float tkvi_centre(const tkvi_side *s, int width) {
    return s->levels ? 0.0f : 0.5f * (float)((1 << width) - 1);
}

static int tkvi_is_exact(const tkvi_format *f) { return f->stored != TKVI_AS_TILES; }

static void tkvi_side_init(tkvi_side *s, const tkvi_format *format, tkv_side which, int dim, int group,
                           int tokens) {
    memset(s, 0, sizeof *s);
    s->format = format;
    s->which = which;
    s->dim = dim;
    s->pad = tkvi_round_up(dim, 16);
    s->tokens = tokens;
    s->group = group;
    format->side[which].layout(s);
    s->bytes = tkvi_align_up(s->code_bytes) + tkvi_align_up(s->meta_bytes);
}

static void tkvi_encode_side(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst) {
    s->format->side[s->which].encode(s, x, stride, n, dst);
}

static void tkvi_decode_side(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                             size_t stride) {
    s->format->side[s->which].decode(s, src, first, n, x, stride);
}

#endif /* TKVI_FORMAT_H */
/* ======== format_exact.h ======== */
/*
 * format_exact.h - F32, F16, BF16: tokens as they came. The hot tier, the sinks, and whole exact caches.
 *
 *   K and V: [token][channel], channels padded to 16 with zeros, values little-endian, no metadata
 *
 * Rows, so that an append is one contiguous write, a cut is a smaller count, and a side can have room for
 * fewer than 64 tokens (side->tokens): that of the sinks has just theirs.
 */
#ifndef TKVI_FORMAT_EXACT_H
#define TKVI_FORMAT_EXACT_H


static void tkvi_exact_layout(tkvi_side *s) {
    s->groups = 0;
    s->code_bytes = (size_t)(s->pad * s->tokens) * (size_t)(s->format->bits / 8);
}

static void tkvi_store_f32(uint8_t *dst, float x) { tkvi_store32(dst, tkvi_bits(x)); }

static float tkvi_load_f32(const uint8_t *src) { return tkvi_from_bits(tkvi_load32(src)); }

static void tkvi_store_f16(uint8_t *dst, float x) { tkvi_store16(dst, tkvi_f32_to_f16(x)); }

static float tkvi_load_f16(const uint8_t *src) { return tkvi_f16_to_f32(tkvi_load16(src)); }

static void tkvi_store_bf16(uint8_t *dst, float x) { tkvi_store16(dst, tkvi_f32_to_bf16(x)); }

static float tkvi_load_bf16(const uint8_t *src) { return tkvi_bf16_to_f32(tkvi_load16(src)); }

/* The same for each type of `size` bytes; loads and stores are known to the compiler. */
#define TKVI_EXACT_CODEC_(t, size)                                                                           \
    static void tkvi_##t##_put(const tkvi_side *s, const float *x, int token, uint8_t *dst) {                \
        uint8_t *row = dst + token * s->pad * (size);                                                        \
        int c;                                                                                               \
        for (c = 0; c < s->dim; c++) tkvi_store_##t(row + c * (size), x[c]);                                 \
        memset(row + c * (size), 0, (size_t)((s->pad - c) * (size)));                                        \
    }                                                                                                        \
    static void tkvi_##t##_encode(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst) {  \
        int i;                                                                                               \
        memset(dst, 0, s->bytes);                                                                            \
        for (i = 0; i < n; i++) tkvi_##t##_put(s, x + (size_t)i * stride, i, dst);                           \
    }                                                                                                        \
    static void tkvi_##t##_decode(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,        \
                                  size_t stride) {                                                           \
        int i, c;                                                                                            \
        for (i = 0; i < n; i++)                                                                              \
            for (c = 0; c < s->dim; c++)                                                                     \
                x[(size_t)i * stride + (size_t)c] =                                                          \
                    tkvi_load_##t(src + ((first + i) * s->pad + c) * (size));                                \
    }
TKVI_EXACT_CODEC_(f32, 4)
TKVI_EXACT_CODEC_(f16, 2)
TKVI_EXACT_CODEC_(bf16, 2)
#undef TKVI_EXACT_CODEC_

#endif /* TKVI_FORMAT_EXACT_H */
/* ======== format_kivi.h ======== */
/*
 * format_kivi.h - Q8, KIVI4, KIVI3, KIVI2: asymmetric min/max in groups.
 * KIVI (arXiv 2402.02750, section 3): K per channel, groups of 64 or 32 tokens; V per token, groups of 64 or
 * 32 channels (the last one of a token may be shorter). Scale and zero are fp16, the zero is the real minimum.
 *
 *   scale = f16((max - min) / (2^bits - 1)),  zero = f16(min),  code = clamp(rne((x - zero) / scale))
 *   decoded = scale * code + zero             coded against the rounded scale and zero, half to even
 *
 * scale * code is exact in a float (11 + 8 bits), so the decoded value has one rounding and is the same with
 * and without FMA. A flat group has scale 0 and decodes to its fp16 value. Values saturate at +-65504.
 *
 * Bytes of one side (tiles as in tile.h, all of one width):
 *   K: | tiles | scale fp16 [group][pad channels] | zero fp16 [group][pad channels] |   groups = 64 / group
 *   V: | tiles | scale fp16 [group][64 tokens]    | zero fp16 [group][64 tokens]    |   groups = ceil(dim / group)
 * 4 bits in groups of 64: 4.5 bits a value; 2 bits: 2.5; with groups of 32: 5 and 3.
 */
#ifndef TKVI_FORMAT_KIVI_H
#define TKVI_FORMAT_KIVI_H


/* One group whose values stand together: codes, scale, zero. An empty one (tokens not there) has zeros. */
static void tkvi_kivi_group(const float *x, int n, int bits, uint8_t *code, uint8_t *scale_at,
                            uint8_t *zero_at) {
    float lo, hi, scale, zero, top = (float)((1 << bits) - 1);
    int i;
    if (n == 0) {
        tkvi_store16(scale_at, 0);
        tkvi_store16(zero_at, 0);
        return;
    }
    lo = hi = tkvi_clampf(x[0], -TKVI_F16_MAX, TKVI_F16_MAX);
    for (i = 1; i < n; i++) {
        float v = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        lo = v < lo ? v : lo;
        hi = v > hi ? v : hi;
    }
    tkvi_store16(scale_at, tkvi_f32_to_f16(tkvi_f32(tkvi_f32(hi - lo) / top)));
    tkvi_store16(zero_at, tkvi_f32_to_f16(lo + 0.0f)); /* -0 counts as 0, whichever came first */
    scale = tkvi_f16_to_f32(tkvi_load16(scale_at));
    zero = tkvi_f16_to_f32(tkvi_load16(zero_at));
    for (i = 0; i < n; i++) {
        float v = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        float y = scale > 0.0f ? tkvi_f32(tkvi_f32(v - zero) / scale) : 0.0f;
        code[i] = (uint8_t)tkvi_rne(tkvi_clampf(y, 0.0f, top));
    }
}

static void tkvi_kivi_k_layout(tkvi_side *s) {
    s->groups = TKVI_BLOCK / s->group;
    s->runs.n[s->format->bits] = (uint16_t)(s->pad / 4);
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = (size_t)(s->groups * s->pad * 4);
}

static void tkvi_kivi_v_layout(tkvi_side *s) {
    s->groups = (s->dim + s->group - 1) / s->group;
    s->runs.n[s->format->bits] = (uint16_t)(s->pad / 4); /* 4 tiles per 16 channels */
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = (size_t)(s->groups * TKVI_BLOCK * 4);
}

static void tkvi_kivi_k_encode(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst) {
    int bits = s->format->bits, i, r, g, t;
    uint8_t *scale = dst + s->code_bytes, *zero = scale + s->groups * s->pad * 2;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    memset(dst, 0, s->bytes);
    for (i = 0; i < s->pad / 4; i++) {
        uint8_t tile[TKVI_TILE_CODES];
        memset(tile, 0, sizeof tile);
        for (r = 0; r < 4; r++) {
            int position = 4 * i + r, channel = tkvi_channel(s, position);
            for (g = 0; g < s->groups && channel < s->dim; g++) {
                float column[TKVI_BLOCK];
                uint8_t code[TKVI_BLOCK];
                int first = g * s->group, count = tkvi_max(0, tkvi_min(n - first, s->group));
                int m = 2 * (g * s->pad + position);
                for (t = 0; t < count; t++) column[t] = x[(size_t)(first + t) * stride + (size_t)channel];
                tkvi_kivi_group(column, count, bits, code, scale + m, zero + m);
                for (t = 0; t < count; t++) tile[4 * (first + t) + r] = code[t];
            }
        }
        tkvi_pack_tile(dst, &at, bits, tile);
        tkvi_next_tile(&at, bits);
    }
}

static void tkvi_kivi_v_encode(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *dst) {
    int bits = s->format->bits, slab, q, g, t, c;
    uint8_t code[TKVI_BLOCK][TKV_MAX_HEAD_DIM];
    uint8_t *scale = dst + s->code_bytes, *zero = scale + s->groups * TKVI_BLOCK * 2;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    memset(dst, 0, s->bytes);
    memset(code, 0, sizeof code);
    for (t = 0; t < n; t++)
        for (g = 0; g < s->groups; g++) {
            int first = g * s->group, count = tkvi_min(s->dim - first, s->group),
                m = 2 * (g * TKVI_BLOCK + t);
            tkvi_kivi_group(x + (size_t)t * stride + (size_t)first, count, bits, code[t] + first, scale + m,
                            zero + m);
        }
    for (slab = 0; slab < s->pad / 16; slab++)
        for (q = 0; q < 4; q++) {
            uint8_t tile[TKVI_TILE_CODES];
            for (t = 0; t < 16; t++)
                for (c = 0; c < 16; c++) tile[t / 4 * 64 + 4 * c + t % 4] = code[16 * q + t][16 * slab + c];
            tkvi_pack_tile(dst, &at, bits, tile);
            tkvi_next_tile(&at, bits);
        }
}

static void tkvi_kivi_meta(const uint8_t *m, int n, tkvi_halves halves, float *scale, float *zero) {
    halves(m, n, scale);
    halves(m + 2 * n, n, zero);
}

static void tkvi_kivi_k_meta(const tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale,
                             float *zero) {
    tkvi_kivi_meta(src + s->code_bytes, s->groups * s->pad, halves, scale, zero);
}

static void tkvi_kivi_v_meta(const tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale,
                             float *zero) {
    tkvi_kivi_meta(src + s->code_bytes, s->groups * TKVI_BLOCK, halves, scale, zero);
}

/* Decoding of any format made of tiles, through its own `meta`. */
static float tkvi_level(const tkvi_side *s, int code) {
    return (float)(s->levels ? s->levels[code & 15] : code);
}

static void tkvi_tiles_k_decode(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                                size_t stride) {
    float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, r, t, position = 0;
    s->format->side[TKV_K].meta(s, src, tkvi_halves_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, position += 4) {
            uint8_t tile[TKVI_TILE_CODES];
            tkvi_unpack_tile(src, &at, width, tile);
            tkvi_next_tile(&at, width);
            for (r = 0; r < 4; r++) {
                int channel = tkvi_channel(s, position + r);
                for (t = first; t < first + n && channel < s->dim; t++) {
                    int m = t * s->groups / TKVI_BLOCK * s->pad + position + r;
                    float product = tkvi_f32(scale[m] * tkvi_level(s, tile[4 * t + r])); /* exact */
                    x[(size_t)(t - first) * stride + (size_t)channel] = tkvi_f32(product + zero[m]);
                }
            }
        }
}

static void tkvi_tiles_v_decode(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                                size_t stride) {
    float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, t, c, number = 0;
    s->format->side[TKV_V].meta(s, src, tkvi_halves_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, number++) {
            uint8_t tile[TKVI_TILE_CODES];
            int slab = number / 4, from = number % 4 * 16;
            tkvi_unpack_tile(src, &at, width, tile);
            tkvi_next_tile(&at, width);
            for (t = tkvi_max(first, from); t < tkvi_min(first + n, from + 16); t++)
                for (c = 16 * slab; c < tkvi_min(16 * slab + 16, s->dim); c++) {
                    int m = c / s->group * TKVI_BLOCK + t,
                        code = tile[(t - from) / 4 * 64 + 4 * (c - 16 * slab) + t % 4];
                    float product = tkvi_f32(scale[m] * tkvi_level(s, code));
                    x[(size_t)(t - first) * stride + (size_t)c] = tkvi_f32(product + zero[m]);
                }
        }
}

#endif /* TKVI_FORMAT_KIVI_H */
/* ======== format_table.h ======== */
/*
 * format_table.h - the table of formats, and the standalone codec of the interface on top of it.
 * May call the format files. Everything that stores or reads tokens goes through tkvi_formats.
 */
#ifndef TKVI_FORMAT_TABLE_H
#define TKVI_FORMAT_TABLE_H


#define TKVI_EXACT_(t)                                                                                       \
    {                                                                                                        \
        {tkvi_exact_layout, tkvi_##t##_encode, tkvi_##t##_decode, NULL, tkvi_##t##_put}, {                   \
            tkvi_exact_layout, tkvi_##t##_encode, tkvi_##t##_decode, NULL, tkvi_##t##_put                    \
        }                                                                                                    \
    }
#define TKVI_KIVI_                                                                                           \
    {                                                                                                        \
        {tkvi_kivi_k_layout, tkvi_kivi_k_encode, tkvi_tiles_k_decode, tkvi_kivi_k_meta, NULL}, {             \
            tkvi_kivi_v_layout, tkvi_kivi_v_encode, tkvi_tiles_v_decode, tkvi_kivi_v_meta, NULL              \
        }                                                                                                    \
    }

/* In the order of tkv_format. */
static const tkvi_format tkvi_formats[TKV_FORMAT_COUNT] = {
    {NULL,
     0,
     TKVI_AS_TILES,
     {{NULL, NULL, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}}}, /* TKV_FORMAT_DEFAULT */
    {"f32", 32, TKVI_AS_F32, TKVI_EXACT_(f32)},
    {"f16", 16, TKVI_AS_F16, TKVI_EXACT_(f16)},
    {"bf16", 16, TKVI_AS_BF16, TKVI_EXACT_(bf16)},
    {"q8", 8, TKVI_AS_TILES, TKVI_KIVI_},
    {"kivi4", 4, TKVI_AS_TILES, TKVI_KIVI_},
    {"kivi3", 3, TKVI_AS_TILES, TKVI_KIVI_},
    {"kivi2", 2, TKVI_AS_TILES, TKVI_KIVI_},
};
#undef TKVI_EXACT_
#undef TKVI_KIVI_

static int tkvi_format_known(tkv_format f) { return f > TKV_FORMAT_DEFAULT && f < TKV_FORMAT_COUNT; }

TKV_API const char *tkv_format_name(tkv_format f) {
    return tkvi_format_known(f) ? tkvi_formats[f].name : NULL;
}

TKV_API tkv_format tkv_format_from_name(const char *name) {
    int f;
    for (f = 1; name && f < TKV_FORMAT_COUNT; f++)
        if (strcmp(name, tkvi_formats[f].name) == 0) return (tkv_format)f;
    return TKV_FORMAT_DEFAULT;
}

/* >>codec */
static int tkvi_codec_side(const tkv_codec *c, tkvi_side *s) {
    int group = c && c->group_size ? c->group_size : 64;
    if (!c || !tkvi_format_known(c->format) || (c->side != TKV_K && c->side != TKV_V)) return 0;
    if (c->head_dim < 1 || c->head_dim > TKV_MAX_HEAD_DIM || (group != 64 && group != 32)) return 0;
    tkvi_side_init(s, &tkvi_formats[c->format], c->side, c->head_dim, group, TKVI_BLOCK);
    return 1;
}

TKV_API size_t tkv_encoded_size(const tkv_codec *c) {
    tkvi_side s;
    return tkvi_codec_side(c, &s) ? s.bytes : 0;
}

TKV_API double tkv_format_bits(const tkv_codec *c) {
    tkvi_side s;
    return tkvi_codec_side(c, &s) ? 8.0 * (double)s.bytes / ((double)s.dim * TKVI_BLOCK) : 0.0;
}

TKV_API tkv_status tkv_encode(const tkv_codec *c, const float *x, ptrdiff_t stride, int n_tokens, void *dst,
                              size_t size) {
    tkvi_side s;
    int t, i;
    if (!x || !dst || !tkvi_codec_side(c, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK || size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    for (t = 0; t < n_tokens; t++)
        for (i = 0; i < s.dim; i++)
            if (!tkvi_is_finite(x[t * stride + i])) return TKV_ERR_NONFINITE;
    tkvi_encode_side(&s, x, (size_t)stride, n_tokens, (uint8_t *)dst);
    return TKV_OK;
}

TKV_API tkv_status tkv_decode(const tkv_codec *c, const void *src, size_t size, int n_tokens, float *x,
                              ptrdiff_t stride) {
    tkvi_side s;
    if (!x || !src || !tkvi_codec_side(c, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK || size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    tkvi_decode_side(&s, (const uint8_t *)src, 0, n_tokens, x, (size_t)stride);
    return TKV_OK;
}

#endif /* TKVI_FORMAT_TABLE_H */
/* ======== kernels.h ======== */
/*
 * kernels.h - what attention asks of an instruction set, and the scalar answer, which is the definition.
 *
 * A kernel works on one KV head's record of one block and up to TKVI_ROWS query rows at once (the query
 * heads of a group and several queries), so that each byte of the cache is read and unpacked once for all
 * of them. The other kernel files compute the same with vectors, within rounding of float sums.
 * May call formats and below.
 *
 * Integer attention on tiles (the scales never touch a code):
 *   K: q.k = sum_c q_c (scale_c code_c + zero_c). Fold w_c = q_c scale_c, round w to 8 bits (one plane) or
 *      15 (two planes, hi * 128 + lo), multiply by codes in integers, and take the rest in floats:
 *      step * (sum w code - sum w centre) + sum_c q_c (zero_c - ref_c + centre scale_c)
 *   V: the same with weights p_t scale_t per token, per group of channels.
 * KIVI, and the int8 folding measured in ggml's rivals, describe the fold; centre terms from the float
 * query keep the rounding away from the mean of the codes.
 *
 * `ref` is any key; scores are q.(k - ref), the same for softmax, and large biases that all keys share
 * (Qwen2's reach 900) then cost no precision. The caller adds q.ref where the absolute logit matters.
 */
#ifndef TKVI_KERNELS_H
#define TKVI_KERNELS_H


#define TKVI_ROWS 8 /* query rows per pass; a kernel's stack is proportional to it */
#define TKVI_PLANE 127
#define TKVI_TWO_PLANES (127 * 128)

/* `next` is the side that the same kernel reads next (K of the following block, or V), or NULL: its s->bytes
 * are prefetched between the products, a line here and there. A burst of prefetches stalls, and hardware
 * prefetchers stop at the end of a record.
 * scores[row][64] = q[row] . (k[t] - ref). q: [rows][pad], zero beyond dim. ref: [pad]. n: tokens in the block;
 * scores beyond them are finite rubbish. Exact sides have rows for n tokens at least: read no further. */
typedef void (*tkvi_k_kernel)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                              const float *ref, int rows, int n, int planes, float *scores);
/* out[row][pad] += sum_t p[row][t] v[t]. p: [rows][64], zero beyond n. */
typedef void (*tkvi_v_kernel)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                              int rows, int n, int planes, float *out);

typedef struct tkvi_kernels {
    tkv_isa isa;
    const char *name;
    tkvi_k_kernel k[TKVI_STORAGE_COUNT];
    tkvi_v_kernel v[TKVI_STORAGE_COUNT];
    tkvi_halves halves;
    /* p[t] = exp(s[t] - max) for 64 scores, all <= max; below max - 87 it may be 0. Returns the sum. */
    float (*exp64)(const float *s, float max, float *p);
    float (*max64)(const float *s); /* the largest of 64 scores */
} tkvi_kernels;

/* Planes of q and p that keep arithmetic below a tenth of the format's own error: one 8-bit plane is enough
 * where the codes are as coarse as 2 bits. */
static int tkvi_planes(const tkvi_side *s, int precise) {
    int width;
    for (width = TKVI_MAX_WIDTH; width > 2; width--)
        if (s->runs.n[width]) return 2;
    return precise ? 2 : 1;
}

/* >>exact tiers: rows [token][pad] */
static void tkvi_exact_k(const tkvi_side *s, float (*load)(const uint8_t *), const uint8_t *src,
                         const float *q, const float *ref, int rows, int n, float *scores) {
    int size = s->format->bits / 8, r, t, c;
    memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++) {
            float k = load(src + (t * s->pad + c) * size) - ref[c];
            for (r = 0; r < rows; r++) scores[r * TKVI_BLOCK + t] += q[r * s->pad + c] * k;
        }
}

static void tkvi_exact_v(const tkvi_side *s, float (*load)(const uint8_t *), const uint8_t *src,
                         const float *p, int rows, int n, float *out) {
    int size = s->format->bits / 8, r, t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++) {
            float v = load(src + (t * s->pad + c) * size);
            for (r = 0; r < rows; r++) out[r * s->pad + c] += p[r * TKVI_BLOCK + t] * v;
        }
}

#define TKVI_EXACT_KERNEL_(t)                                                                                \
    static void tkvi_##t##_k_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next,             \
                                    const float *q, const float *ref, int rows, int n, int planes,           \
                                    float *scores) {                                                         \
        (void)next;                                                                                          \
        (void)planes;                                                                                        \
        tkvi_exact_k(s, tkvi_load_##t, src, q, ref, rows, n, scores);                                        \
    }                                                                                                        \
    static void tkvi_##t##_v_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next,             \
                                    const float *p, int rows, int n, int planes, float *out) {               \
        (void)next;                                                                                          \
        (void)planes;                                                                                        \
        tkvi_exact_v(s, tkvi_load_##t, src, p, rows, n, out);                                                \
    }
TKVI_EXACT_KERNEL_(f32)
TKVI_EXACT_KERNEL_(f16)
TKVI_EXACT_KERNEL_(bf16)
#undef TKVI_EXACT_KERNEL_

/* >>tiles */
/* Rounds n weights to integers of at most `top`; returns the step. Zero weights give step 0. */
static float tkvi_round_weights(const float *w, int n, int top, int *rounded) {
    float most = 0.0f, inverse;
    int i;
    for (i = 0; i < n; i++) {
        float a = w[i] < 0.0f ? -w[i] : w[i];
        most = a > most ? a : most;
    }
    inverse = most > 0.0f ? (float)top / most : 0.0f;
    if (!tkvi_is_finite(inverse)) inverse = 0.0f; /* weights below 1e-34 contribute nothing */
    for (i = 0; i < n; i++) rounded[i] = tkvi_max(-top, tkvi_min(top, tkvi_rne(w[i] * inverse)));
    return inverse > 0.0f ? most / (float)top : 0.0f;
}

static void tkvi_tiles_k_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                                const float *ref, int rows, int n, int planes, float *scores) {
    float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    int top = planes == 2 ? TKVI_TWO_PLANES : TKVI_PLANE, g, r, t, i, c;
    (void)next;
    s->format->side[TKV_K].meta(s, src, tkvi_halves_scalar, scale, zero);
    for (r = 0; r < rows; r++)
        for (g = 0; g < s->groups; g++) {
            float folded[TKV_MAX_HEAD_DIM], step, rest = 0.0f, middle = 0.0f;
            int w[TKV_MAX_HEAD_DIM], sum[TKVI_BLOCK], width, position = 0;
            tkvi_tile_at at = tkvi_tiles(&s->runs);
            for (c = 0; c < s->pad; c++)
                folded[c] = q[r * s->pad + tkvi_channel(s, c)] * scale[g * s->pad + c];
            step = tkvi_round_weights(folded, s->pad, top, w);
            memset(sum, 0, sizeof sum);
            for (width = TKVI_MAX_WIDTH; width > 0; width--)
                for (i = 0; i < s->runs.n[width]; i++, position += 4) {
                    uint8_t tile[TKVI_TILE_CODES];
                    float centre = tkvi_centre(s, width);
                    tkvi_unpack_tile(src, &at, width, tile);
                    tkvi_next_tile(&at, width);
                    for (c = 0; c < 4; c++) {
                        int m = g * s->pad + position + c, channel = tkvi_channel(s, position + c);
                        rest += q[r * s->pad + channel] * ((zero[m] - ref[channel]) + centre * scale[m]);
                        middle += centre * (float)w[position + c];
                        for (t = 0; t < n; t++)
                            sum[t] += w[position + c] *
                                      (s->levels ? s->levels[tile[4 * t + c] & 15] : tile[4 * t + c]);
                    }
                }
            for (t = g * s->group; t < tkvi_min((g + 1) * s->group, TKVI_BLOCK); t++)
                scores[r * TKVI_BLOCK + t] = step * ((float)sum[t] - middle) + rest;
        }
}

static void tkvi_tiles_v_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                                int rows, int n, int planes, float *out) {
    float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    int top = planes == 2 ? TKVI_TWO_PLANES : TKVI_PLANE, r, t, i, c, width, number = 0;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    (void)next;
    s->format->side[TKV_V].meta(s, src, tkvi_halves_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i += 4, number++) { /* one slab of 16 channels */
            uint8_t tile[4][TKVI_TILE_CODES];
            const float *sc = scale + number * 16 / s->group * TKVI_BLOCK,
                        *z = zero + number * 16 / s->group * TKVI_BLOCK;
            float centre = tkvi_centre(s, width);
            for (c = 0; c < 4; c++) {
                tkvi_unpack_tile(src, &at, width, tile[c]);
                tkvi_next_tile(&at, width);
            }
            for (r = 0; r < rows; r++) {
                float folded[TKVI_BLOCK], step, rest = 0.0f, middle = 0.0f;
                int w[TKVI_BLOCK], sum[16];
                for (t = 0; t < TKVI_BLOCK; t++) folded[t] = t < n ? p[r * TKVI_BLOCK + t] * sc[t] : 0.0f;
                step = tkvi_round_weights(folded, TKVI_BLOCK, top, w);
                memset(sum, 0, sizeof sum);
                for (t = 0; t < n; t++) {
                    const uint8_t *codes = tile[t / 16] + t % 16 / 4 * 64 + t % 4;
                    rest += p[r * TKVI_BLOCK + t] * (z[t] + centre * sc[t]);
                    middle += centre * (float)w[t];
                    for (c = 0; c < 16; c++)
                        sum[c] += w[t] * (s->levels ? s->levels[codes[4 * c] & 15] : codes[4 * c]);
                }
                for (c = 0; c < 16; c++)
                    out[r * s->pad + 16 * number + c] += step * ((float)sum[c] - middle) + rest;
            }
        }
}

static float tkvi_exp64_scalar(const float *s, float max, float *p) {
    float sum = 0.0f;
    int t;
    for (t = 0; t < TKVI_BLOCK; t++) {
        float x = s[t] - max;
        p[t] = x < -87.0f ? 0.0f : expf(x); /* no subnormals, whatever the flags */
        sum += p[t];
    }
    return sum;
}

static float tkvi_max64_scalar(const float *s) {
    float max = s[0];
    int t;
    for (t = 1; t < TKVI_BLOCK; t++) max = s[t] > max ? s[t] : max;
    return max;
}

static const tkvi_kernels tkvi_kernels_scalar = {
    TKV_ISA_SCALAR,
    "scalar",
    {tkvi_f32_k_scalar, tkvi_f16_k_scalar, tkvi_bf16_k_scalar, tkvi_tiles_k_scalar},
    {tkvi_f32_v_scalar, tkvi_f16_v_scalar, tkvi_bf16_v_scalar, tkvi_tiles_v_scalar},
    tkvi_halves_scalar,
    tkvi_exp64_scalar,
    tkvi_max64_scalar,
};

#endif /* TKVI_KERNELS_H */
/* ======== kernels_x86.h ======== */
/*
 * kernels_x86.h - what the kernels for AVX2 and AVX-512 share: how each compiler is told about instruction
 * sets, prefetching, and the part of integer attention that has no vectors in it.
 *
 * Everything is compiled in one translation unit without any -m flag: every function that touches a vector,
 * helpers included, carries its target. Entries of kernel tables are plain static functions; the pieces they
 * are made of are inlined by force, with the number of rows as a constant, so that accumulators stay in
 * registers. Calls kernels.h and below.
 */
#ifndef TKVI_KERNELS_X86_H
#define TKVI_KERNELS_X86_H


/* >>compilers */
/* gcc -m32 -ffast-math without SSE refuses its own intrinsics: the scalar kernels do there. */
#if defined(__i386__) && defined(__FAST_MATH__) && !defined(__SSE2__)
#define TKVI_NO_X86
#endif
#if !defined(TKV_NO_SIMD) && !defined(TKVI_NO_X86) &&                                                        \
    (defined(__x86_64__) || defined(__i386__) || defined(_M_X64) || defined(_M_IX86))
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 8 && !defined(__TINYC__))
#define TKVI_X86
#define TKVI_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TKVI_FLAT static inline __attribute__((always_inline))
#ifndef TKV_NO_AVX512
#define TKVI_AVX512
#if (defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ >= 18 &&                     \
     __clang_major__ <= 21) ||                                                                               \
    (!defined(__clang__) && (__GNUC__ == 14 || __GNUC__ == 15))
#define TKVI_TARGET_AVX512                                                                                   \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,evex512")))
#else
#define TKVI_TARGET_AVX512                                                                                   \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#endif
#endif
#elif defined(_MSC_VER)
/* Intrinsics need no flag. No AVX-512: MSVC 19.38 let it leak into AVX2 code. */
#define TKVI_X86
#define TKVI_TARGET_AVX2
#define TKVI_FLAT static __forceinline
#endif
#endif

#ifdef TKVI_X86
#include <immintrin.h>

#if defined(__clang__)
#define TKVI_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define TKVI_UNROLL _Pragma("GCC unroll 8")
#else
#define TKVI_UNROLL
#endif
#define TKVI_FLAT_AVX2 TKVI_FLAT TKVI_TARGET_AVX2
#define TKVI_FLAT_AVX512 TKVI_FLAT TKVI_TARGET_AVX512

/* >>shared pieces, without vectors */
/* Prefetching: what stands at p in this side stands at p + ahead in the next one. */
TKVI_FLAT uintptr_t tkvi_ahead(const uint8_t *src, const uint8_t *next) {
    return next ? (uintptr_t)next - (uintptr_t)src : 0u;
}

/* Into L2: a core has few requests for L1 under way (Zen 4: 12 GB/s), far more for L2 (20 GB/s and up). */
TKVI_FLAT void tkvi_prefetch(const uint8_t *p, uintptr_t ahead) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch((const void *)((uintptr_t)p + ahead), 0, 2);
#else
    _mm_prefetch((const char *)((uintptr_t)p + ahead), _MM_HINT_T1);
#endif
}

TKVI_FLAT void tkvi_prefetch_bytes(const uint8_t *p, int n, uintptr_t ahead) {
    int i;
    for (i = 0; i < n; i += 64) tkvi_prefetch(p + i, ahead);
}

/* Four weights of neighbouring channels or tokens, to be broadcast. */
TKVI_FLAT int32_t tkvi_four(const int8_t *w) {
    int32_t x;
    memcpy(&x, w, 4);
    return x;
}

/* >>tiles: what is the same with any vectors. An instruction set brings the steps that are not. */
/* Fold: scales into rows of q (by channel, K) or of p (by token, V), for one group; then round. */
typedef struct tkvi_folding {
    const float *x, *scale, *zero; /* x: [row][n] */
    const float *ref;              /* K; NULL in V */
    const uint8_t *centre2;        /* [n] twice the centre of the codes that a weight meets */
    float half;                    /* centre2 times half is tkvi_centre */
    int n, planes;
    /* Out: rounded weights [weight row][w_stride]. A weight row is one plane of one row: a second plane is
     * nothing but a row more. Room for one row more, and to the next multiple of 64 in each. */
    int8_t *w;
    int w_stride;
} tkvi_folding;

/* The answer of row r is  half_step * (2 sum w code - middle) + rest  with
 * middle = sum w centre2,  rest = sum x (zero - ref + centre scale). */
typedef struct tkvi_fold {
    float half_step[TKVI_ROWS], rest[TKVI_ROWS];
    int32_t middle[TKVI_ROWS];
} tkvi_fold;

/* Multiply codes by weights. */
typedef struct tkvi_products {
    const tkvi_side *s;
    const uint8_t *wide, *tops; /* wide part of the first tile; the 1-bit vectors of the side */
    int half;                   /* number of the first 1-bit half */
    int width, slabs, n;        /* V: width of the codes, one slab or two neighbours, tokens */
    uintptr_t ahead;
    const uint8_t *rest,
        *end;        /* still to be prefetched: what stands behind the wide parts, a line per tile */
    const int8_t *w; /* [weight row][w_stride] */
    int w_stride;
    int w_group;  /* K: from the weights of tokens 0 .. 31 to those of 32 .. 63 */
    int32_t *sum; /* [weight row][64] by lane; V uses the first 16 or 32 */
} tkvi_products;

typedef void (*tkvi_dot)(tkvi_products *d);

typedef struct tkvi_steps {
    tkvi_halves halves;
    void (*fold)(const tkvi_folding *a, int rows, tkvi_fold *f);
    void (*multiply)(tkvi_products *d, int weight_rows);
    /* out[i] = answer of row r, or += if `add`, for n (a multiple of 16) sums; the second plane 64 further */
    void (*unfold)(const int32_t *sum, int planes, const tkvi_fold *f, int r, int n, int add, float *out);
    int bias; /* what `multiply` adds to levels of a table to make them unsigned */
} tkvi_steps;

static int tkvi_centre2(const tkvi_steps *v, const tkvi_side *s, int width) {
    return s->levels ? 2 * v->bias : (1 << width) - 1;
}

static void tkvi_products_set(tkvi_products *d, const tkvi_side *s, const uint8_t *src, uintptr_t ahead) {
    d->s = s;
    d->wide = src;
    d->tops = src + tkvi_tiles(&s->runs).halves;
    d->rest = d->tops;
    d->end = src + s->bytes;
    d->half = 0;
    d->ahead = ahead;
}

TKVI_FLAT void tkvi_prefetch_rest(tkvi_products *d) {
    if (d->rest < d->end) {
        tkvi_prefetch(d->rest, d->ahead);
        d->rest += 64;
    }
}

/* q and ref in the order of the codes; `room` for rows + 1 of them. */
static void tkvi_order(const tkvi_side *s, const float **q, const float **ref, int rows, float *room) {
    int r, c;
    for (r = 0; r <= rows; r++)
        for (c = 0; c < s->pad; c++)
            room[r * s->pad + c] = r < rows ? (*q)[r * s->pad + s->order[c]] : (*ref)[s->order[c]];
    *q = room;
    *ref = room + rows * s->pad;
}

static void tkvi_tiles_k(const tkvi_steps *v, const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                         const float *q, const float *ref, int rows, int planes, float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED float ordered[(TKVI_ROWS + 1) * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED uint8_t centre2[TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int8_t w[2][2 * TKVI_ROWS][TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS][TKVI_BLOCK];
    tkvi_fold fold[2];
    tkvi_folding a;
    tkvi_products d;
    int width, r, g, c = 0, tokens = TKVI_BLOCK / s->groups;
    s->format->side[TKV_K].meta(s, src, v->halves, scale, zero);
    tkvi_products_set(&d, s, src, tkvi_ahead(src, next));
    if (s->order) tkvi_order(s, &q, &ref, rows, ordered);
    for (width = TKVI_MAX_WIDTH; width > 0; c += 4 * s->runs.n[width--])
        if (s->runs.n[width]) memset(centre2 + c, tkvi_centre2(v, s, width), (size_t)(4 * s->runs.n[width]));
    memset(centre2 + c, 0, sizeof centre2 - (size_t)c);
    a.x = q;
    a.ref = ref;
    a.centre2 = centre2;
    a.half = s->levels ? 0.0f : 0.5f;
    a.n = s->pad;
    a.w_stride = TKV_MAX_HEAD_DIM;
    a.planes = planes;
    for (g = 0; g < s->groups; g++) {
        a.scale = scale + g * s->pad;
        a.zero = zero + g * s->pad;
        a.w = w[g][0];
        v->fold(&a, rows, &fold[g]);
    }
    d.w = w[0][0];
    d.w_stride = TKV_MAX_HEAD_DIM;
    d.w_group = s->groups == 2 ? (int)sizeof w[0] : 0;
    d.sum = sum[0];
    v->multiply(&d, rows * planes);
    for (r = 0; r < rows; r++)
        for (g = 0; g < s->groups; g++)
            v->unfold(sum[r * planes] + g * tokens, planes, &fold[g], r, tokens, 0,
                      scores + r * TKVI_BLOCK + g * tokens);
}

static void tkvi_tiles_v(const tkvi_steps *v, const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                         const float *p, int rows, int n, int planes, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED uint8_t centre2[TKVI_BLOCK];
    TKVI_ALIGNED int8_t w[2 * TKVI_ROWS][TKVI_BLOCK];
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS][TKVI_BLOCK];
    tkvi_fold fold;
    tkvi_folding a;
    tkvi_products d;
    int width, i, r, g, slab = 0;
    s->format->side[TKV_V].meta(s, src, v->halves, scale, zero);
    tkvi_products_set(&d, s, src, tkvi_ahead(src, next));
    a.x = p;
    a.ref = NULL;
    a.centre2 = centre2;
    a.half = s->levels ? 0.0f : 0.5f;
    a.w = w[0];
    a.n = a.w_stride = TKVI_BLOCK;
    a.planes = planes;
    d.n = n;
    d.w_stride = TKVI_BLOCK;
    d.w_group = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        memset(centre2, tkvi_centre2(v, s, width), sizeof centre2);
        for (i = 0, g = -1; i < s->runs.n[width]; i += 4 * d.slabs) {
            if (g != 16 * slab / s->group) {
                g = 16 * slab / s->group;
                a.scale = scale + g * TKVI_BLOCK;
                a.zero = zero + g * TKVI_BLOCK;
                v->fold(&a, rows, &fold);
            }
            d.width = width;
            d.slabs = slab % 2 == 0 && i + 4 < s->runs.n[width] ? 2 : 1; /* two that share a group */
            d.w = w[0];
            d.sum = sum[0];
            v->multiply(&d, rows * planes);
            for (r = 0; r < rows; r++)
                v->unfold(sum[r * planes], planes, &fold, r, 16 * d.slabs, 1, out + r * s->pad + 16 * slab);
            d.wide += 4 * d.slabs * tkvi_wide_bytes[width];
            d.half += 4 * d.slabs * tkvi_has_half[width];
            slab += d.slabs;
        }
    }
}

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_X86_H */
/* ======== kernels_avx2.h ======== */
/*
 * kernels_avx2.h - the kernels of kernels.h for AVX2 + FMA + F16C (Haswell, Zen and later). kernels_avx512.h
 * has the same functions with longer vectors; read them side by side. Calls kernels_x86.h.
 */
#ifndef TKVI_KERNELS_AVX2_H
#define TKVI_KERNELS_AVX2_H


#ifdef TKVI_X86

/* >>pieces */
TKVI_FLAT_AVX2 __m256i tkvi_bytes_avx2(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

TKVI_FLAT_AVX2 __m256i tkvi_ints_avx2(const int32_t *p) {
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

TKVI_FLAT_AVX2 __m128i tkvi_bytes16_avx2(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

TKVI_FLAT_AVX2 float tkvi_sum_avx2(__m256 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

TKVI_FLAT_AVX2 float tkvi_most_avx2(__m256 a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

/* Horizontal sums and maxima of four vectors. */
TKVI_FLAT_AVX2 __m128 tkvi_sum4_avx2(const __m256 *a) {
    __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

TKVI_FLAT_AVX2 __m128 tkvi_max4_avx2(const __m256 *a) {
    __m256 x = _mm256_max_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    __m256 y = _mm256_max_ps(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    x = _mm256_max_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
    return _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

/* 8 values of an exact side. The branch goes the same way all the time. */
TKVI_FLAT_AVX2 __m256 tkvi_values_avx2(tkvi_storage type, const uint8_t *row, int at) {
    if (type == TKVI_AS_F16) return _mm256_cvtph_ps(tkvi_bytes16_avx2(row + 2 * at));
    if (type == TKVI_AS_BF16)
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(tkvi_bytes16_avx2(row + 2 * at)), 16));
    return _mm256_castsi256_ps(tkvi_bytes_avx2(row + 4 * at));
}

static TKVI_TARGET_AVX2 void tkvi_halves_avx2(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(tkvi_bytes16_avx2(src + 2 * i)));
    tkvi_halves_scalar(src + 2 * i, n - i, dst + i);
}

static TKVI_TARGET_AVX2 float tkvi_max64_avx2(const float *s) {
    __m256 m = _mm256_loadu_ps(s);
    int t;
    for (t = 8; t < TKVI_BLOCK; t += 8) m = _mm256_max_ps(m, _mm256_loadu_ps(s + t));
    return tkvi_most_avx2(m);
}

/* exp(x) = 2^n exp(r), |r| <= ln 2 / 2; the polynomial is that of Cephes' expf, error 1e-7. */
static TKVI_TARGET_AVX2 float tkvi_exp64_avx2(const float *s, float max, float *p) {
    __m256 sum = _mm256_setzero_ps();
    int t;
    for (t = 0; t < TKVI_BLOCK; t += 8) {
        __m256 x = _mm256_sub_ps(_mm256_loadu_ps(s + t), _mm256_set1_ps(max)), n, r, y;
        __m256 some = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_GE_OQ);
        x = _mm256_max_ps(x, _mm256_set1_ps(-87.0f)); /* n stays above -127: 2^n is a normal number */
        n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), 8);
        r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
        r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
        y = _mm256_fmadd_ps(_mm256_set1_ps(1.9875691500e-4f), r, _mm256_set1_ps(1.3981999507e-3f));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(8.3334519073e-3f));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(4.1665795894e-2f));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.6666665459e-1f));
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(5.0000001201e-1f));
        y = _mm256_fmadd_ps(y, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
        n = _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
        y = _mm256_and_ps(_mm256_mul_ps(y, n), some);
        _mm256_storeu_ps(p + t, y);
        sum = _mm256_add_ps(sum, y);
    }
    return tkvi_sum_avx2(sum);
}

/* >>exact tiers */
/* nt tokens x nr rows; lanes are 8 channels. Tokens beyond n repeat the last one. */
TKVI_FLAT_AVX2 void tkvi_exact_k4_avx2(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                       const float *q, const float *ref, int rows, int n, const int nr,
                                       const int nt, float *scores) {
    int row_bytes = s->pad * s->format->bits / 8, t, c, r, j;
    for (t = 0; t < n; t += nt) {
        __m256 acc[4][4];
        const uint8_t *k[4];
        TKVI_UNROLL
        for (j = 0; j < nt; j++) k[j] = src + tkvi_min(t + j, n - 1) * row_bytes;
        tkvi_prefetch_bytes(src + t * row_bytes, nt * row_bytes, ahead);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < nt; j++) acc[r][j] = _mm256_setzero_ps();
        }
        for (c = 0; c < s->pad; c += 8) {
            __m256 x[4], minus = _mm256_loadu_ps(ref + c);
            TKVI_UNROLL
            for (j = 0; j < nt; j++)
                x[j] = _mm256_sub_ps(tkvi_values_avx2(s->format->stored, k[j], c), minus);
            TKVI_UNROLL
            for (r = 0; r < nr; r++) {
                __m256 y = _mm256_loadu_ps(q + tkvi_min(r, rows - 1) * s->pad + c);
                TKVI_UNROLL
                for (j = 0; j < nt; j++) acc[r][j] = _mm256_fmadd_ps(x[j], y, acc[r][j]);
            }
        }
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < nt; j++)
                if (r < rows) scores[r * TKVI_BLOCK + t + j] = tkvi_sum_avx2(acc[r][j]);
        }
    }
}

static TKVI_TARGET_AVX2 void tkvi_exact_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                               const float *q, const float *ref, int rows, int n, int planes,
                                               float *scores) {
    uintptr_t ahead = tkvi_ahead(src, next);
    int r;
    (void)planes;
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (r = 0; r < rows; r += 4) {
        const float *x = q + r * s->pad;
        float *o = scores + r * TKVI_BLOCK;
        int left = rows - r;
        if (left == 1) tkvi_exact_k4_avx2(s, src, ahead, x, ref, left, n, 1, 4, o);
        else if (left == 2) tkvi_exact_k4_avx2(s, src, ahead, x, ref, left, n, 2, 4, o);
        else tkvi_exact_k4_avx2(s, src, ahead, x, ref, left, n, 4, 2, o);
    }
}

/* 16 channels x nr rows, over all tokens. */
TKVI_FLAT_AVX2 void tkvi_exact_v4_avx2(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                       const float *p, int rows, int n, int first, const int nr, float *out) {
    int row_bytes = s->pad * s->format->bits / 8, t, r, j;
    __m256 acc[4][2];
    TKVI_UNROLL
    for (r = 0; r < nr; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (t = 0; t < n; t++, src += row_bytes) {
        __m256 x[2];
        tkvi_prefetch(src + first * s->format->bits / 8, ahead);
        TKVI_UNROLL
        for (j = 0; j < 2; j++) x[j] = tkvi_values_avx2(s->format->stored, src, first + 8 * j);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m256 y = _mm256_set1_ps(p[tkvi_min(r, rows - 1) * TKVI_BLOCK + t]);
            TKVI_UNROLL
            for (j = 0; j < 2; j++) acc[r][j] = _mm256_fmadd_ps(x[j], y, acc[r][j]);
        }
    }
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        TKVI_UNROLL
        for (j = 0; j < 2; j++)
            if (r < rows) {
                float *o = out + r * s->pad + first + 8 * j;
                _mm256_storeu_ps(o, _mm256_add_ps(_mm256_loadu_ps(o), acc[r][j]));
            }
    }
}

static TKVI_TARGET_AVX2 void tkvi_exact_v_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                               const float *p, int rows, int n, int planes, float *out) {
    uintptr_t ahead = tkvi_ahead(src, next);
    int r, c;
    (void)planes;
    for (r = 0; r < rows; r += 4)
        for (c = 0; c < s->pad; c += 16) {
            const float *x = p + r * TKVI_BLOCK;
            float *o = out + r * s->pad;
            int left = rows - r;
            if (left == 1) tkvi_exact_v4_avx2(s, src, ahead, x, left, n, c, 1, o);
            else if (left == 2) tkvi_exact_v4_avx2(s, src, ahead, x, left, n, c, 2, o);
            else tkvi_exact_v4_avx2(s, src, ahead, x, left, n, c, 4, o);
        }
}

/* >>tiles */
TKVI_FLAT_AVX2 __m256i tkvi_levels_avx2(const int8_t *levels) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)levels));
}

/* 16-bit shifts move bits into the neighbour byte, the masks take them away. */
TKVI_FLAT_AVX2 void tkvi_merge_avx2(__m256i *codes, __m256i a, __m256i b, int mask) {
    codes[0] = _mm256_or_si256(codes[0], _mm256_and_si256(a, _mm256_set1_epi8((char)mask)));
    codes[1] = _mm256_or_si256(codes[1], _mm256_and_si256(b, _mm256_set1_epi8((char)mask)));
}

TKVI_FLAT_AVX2 __m256i tkvi_shifted_avx2(const uint8_t *p, int right) {
    return _mm256_srl_epi16(tkvi_bytes_avx2(p), _mm_cvtsi32_si128(right));
}

/* Half b (bytes 32b .. 32b + 31) of the codes of planes 2h and 2h + 1 of one tile, as bytes; see tile.h for
 * what stands where. Of 8-bit codes `part` says which four bits: whole ones would overflow 16-bit sums. */
TKVI_FLAT_AVX2 void tkvi_codes_avx2(int width, const uint8_t *wide, const uint8_t *tops, int half, int h,
                                    int b, int part, __m256i *codes) {
    __m256i x;
    codes[0] = codes[1] = _mm256_setzero_si256();
    wide += 32 * b;
    if (width == 8) {
        x = tkvi_shifted_avx2(wide + 128 * h, 4 * part);
        tkvi_merge_avx2(codes, x, tkvi_shifted_avx2(wide + 128 * h + 64, 4 * part), 15);
        return;
    }
    if (width >= 4) {
        x = tkvi_bytes_avx2(wide + 64 * h);
        tkvi_merge_avx2(codes, x, _mm256_srli_epi16(x, 4), 15);
        if (width == 6) {
            x = tkvi_shifted_avx2(wide + 128, 4 * h);
            tkvi_merge_avx2(codes, _mm256_slli_epi16(x, 4), _mm256_slli_epi16(x, 2), 48);
        }
    } else if (width >= 2) {
        x = tkvi_shifted_avx2(wide, 4 * h);
        tkvi_merge_avx2(codes, x, _mm256_srli_epi16(x, 2), 3);
    }
    if (width & 1) {
        x = tkvi_shifted_avx2(tops + (half >> 1) * 64 + 32 * b, (half & 1) * 4 + 2 * h);
        if (width == 1) tkvi_merge_avx2(codes, x, _mm256_srli_epi16(x, 1), 1);
        else if (width == 3) tkvi_merge_avx2(codes, _mm256_slli_epi16(x, 2), _mm256_slli_epi16(x, 1), 4);
        else tkvi_merge_avx2(codes, _mm256_slli_epi16(x, 4), _mm256_slli_epi16(x, 3), 16);
    }
}

/* Four rows go together so that their horizontal sums do. */
TKVI_FLAT_AVX2 void tkvi_fold4_avx2(const tkvi_folding *a, int first, const int nr, tkvi_fold *f) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m128 top = _mm_set1_ps(a->planes == 2 ? (float)TKVI_TWO_PLANES : (float)TKVI_PLANE);
    const float *x = a->x + first * a->n;
    __m256 most[4], rest[4];
    __m256i middle[4];
    __m128 m, inverse;
    float by[4];
    int i, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) {
        most[r] = rest[r] = _mm256_setzero_ps();
        middle[r] = _mm256_setzero_si256();
    }
    for (i = 0; i < a->n; i += 8) {
        __m256 scale = _mm256_loadu_ps(a->scale + i);
        __m256i twice =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(a->centre2 + i)));
        __m256 centre = _mm256_mul_ps(_mm256_cvtepi32_ps(twice), _mm256_set1_ps(a->half));
        __m256 zero = _mm256_loadu_ps(a->zero + i);
        if (a->ref) zero = _mm256_sub_ps(zero, _mm256_loadu_ps(a->ref + i));
        zero = _mm256_fmadd_ps(centre, scale, zero);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m256 v = _mm256_loadu_ps(x + r * a->n + i), y = _mm256_mul_ps(v, scale);
            most[r] = _mm256_max_ps(most[r], _mm256_and_ps(y, no_sign));
            rest[r] = _mm256_fmadd_ps(v, zero, rest[r]);
        }
    }
    m = tkvi_max4_avx2(most);
    inverse = _mm_and_ps(_mm_div_ps(top, m), _mm_cmpgt_ps(m, _mm_set1_ps(1e-34f))); /* as if smaller were 0 */
    _mm_storeu_ps(by, inverse);
    _mm_storeu_ps(f->half_step + first, _mm_div_ps(_mm_mul_ps(m, _mm_set1_ps(0.5f)), top));
    _mm_storeu_ps(f->rest + first, tkvi_sum4_avx2(rest));
    for (i = 0; i < a->n; i += 16) {
        __m256 scale0 = _mm256_loadu_ps(a->scale + i), scale1 = _mm256_loadu_ps(a->scale + i + 8);
        __m256i c = _mm256_cvtepu8_epi16(tkvi_bytes16_avx2(a->centre2 + i));
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            int8_t *w = a->w + (first + r) * a->planes * a->w_stride + i;
            __m256 u = _mm256_mul_ps(_mm256_loadu_ps(x + r * a->n + i), scale0);
            __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + r * a->n + i + 8), scale1);
            __m256 y = _mm256_set1_ps(by[r]);
            __m256i k = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(u, y)),
                                           _mm256_cvtps_epi32(_mm256_mul_ps(v, y)));
            k = _mm256_permute4x64_epi64(k, 0xd8); /* 16 weights of 16 bits in order */
            middle[r] = _mm256_add_epi32(middle[r], _mm256_madd_epi16(k, c));
            if (a->planes == 2) { /* k = 128 hi + lo, lo 0..127 */
                __m256i lo = _mm256_and_si256(k, _mm256_set1_epi16(127));
                _mm_storeu_si128(
                    (__m128i *)(void *)(w + a->w_stride),
                    _mm_packs_epi16(_mm256_castsi256_si128(lo), _mm256_extracti128_si256(lo, 1)));
                k = _mm256_srai_epi16(k, 7);
            }
            _mm_storeu_si128((__m128i *)(void *)w,
                             _mm_packs_epi16(_mm256_castsi256_si128(k), _mm256_extracti128_si256(k, 1)));
        }
    }
    middle[0] =
        _mm256_hadd_epi32(_mm256_hadd_epi32(middle[0], middle[1]), _mm256_hadd_epi32(middle[2], middle[3]));
    _mm_storeu_si128(
        (__m128i *)(void *)(f->middle + first),
        _mm_add_epi32(_mm256_castsi256_si128(middle[0]), _mm256_extracti128_si256(middle[0], 1)));
}

static TKVI_TARGET_AVX2 void tkvi_fold_avx2(const tkvi_folding *a, int rows, tkvi_fold *f) {
    int r, left = rows * a->planes % 4;
    for (r = 0; r < rows; r += 4) {
        if (rows - r == 1) tkvi_fold4_avx2(a, r, 1, f);
        else if (rows - r == 2) tkvi_fold4_avx2(a, r, 2, f);
        else if (rows - r == 3) tkvi_fold4_avx2(a, r, 3, f);
        else tkvi_fold4_avx2(a, r, 4, f);
    }
    if (left == 3) memset(a->w + rows * a->planes * a->w_stride, 0, (size_t)a->w_stride);
}

static TKVI_TARGET_AVX2 void tkvi_unfold_avx2(const int32_t *sum, int planes, const tkvi_fold *f, int r,
                                              int n, int add, float *out) {
    const __m256 half_step = _mm256_set1_ps(f->half_step[r]), rest = _mm256_set1_ps(f->rest[r]);
    const __m256i middle = _mm256_set1_epi32(f->middle[r]);
    int i;
    for (i = 0; i < n; i += 8) {
        __m256i x = tkvi_ints_avx2(sum + i);
        __m256 y;
        if (planes == 2) x = _mm256_add_epi32(_mm256_slli_epi32(x, 7), tkvi_ints_avx2(sum + TKVI_BLOCK + i));
        y = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_slli_epi32(x, 1), middle));
        y = _mm256_fmadd_ps(y, half_step, rest);
        _mm256_storeu_ps(out + i, add ? _mm256_add_ps(y, _mm256_loadu_ps(out + i)) : y);
    }
}

/* The products of one step: codes c (of 4 channels or tokens) by weights u, codes e (of the next 4) by
 * weights v; c[0] and e[0] add to accumulator a, c[1] and e[1] to b. Two pairs fit 16 bits: 4 * 127 * 63.
 * With a table, levels are the signed operand and the size of a weight the unsigned one, 2 * 127 * 127: each
 * pair of products goes to 32 bits by itself. `unit` is 1, or 16 for the high nibbles of 8-bit codes. */
TKVI_FLAT_AVX2 __m256i tkvi_two_avx2(__m256i c, __m256i u, __m256i e, __m256i v, __m256i unit) {
    return _mm256_madd_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(c, u), _mm256_maddubs_epi16(e, v)), unit);
}

TKVI_FLAT_AVX2 __m256i tkvi_leveled_avx2(__m256i c, __m256i u, __m256i table) {
    __m256i x = _mm256_sign_epi8(_mm256_shuffle_epi8(table, c), u);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(u), x), _mm256_set1_epi16(1));
}

/* Accumulators a0..a3 and b0..b3: named ones stay in registers with every compiler. */
#define TKVI_ROWS4_(X) X(0) X(1) X(2) X(3)
#define TKVI_ZERO4_(r) __m256i a##r = _mm256_setzero_si256(), b##r = a##r;
#define TKVI_MAC4_(r)                                                                                        \
    if (r < nw) {                                                                                            \
        u = _mm256_set1_epi32(tkvi_four(w + r * stride));                                                    \
        v = _mm256_set1_epi32(tkvi_four(w + r * stride + 4 * both));                                         \
        a##r = _mm256_add_epi32(a##r, tkvi_two_avx2(c[0], u, e[0], v, unit));                                \
        b##r = _mm256_add_epi32(b##r, tkvi_two_avx2(c[1], u, e[1], v, unit));                                \
    }
#define TKVI_LEVELED4_(r)                                                                                    \
    if (r < nw) {                                                                                            \
        u = _mm256_set1_epi32(tkvi_four(w + r * stride));                                                    \
        v = _mm256_set1_epi32(tkvi_four(w + r * stride + 4 * both));                                         \
        a##r = _mm256_add_epi32(a##r, tkvi_leveled_avx2(c[0], u, table));                                    \
        b##r = _mm256_add_epi32(b##r, tkvi_leveled_avx2(c[1], u, table));                                    \
        if (both) {                                                                                          \
            a##r = _mm256_add_epi32(a##r, tkvi_leveled_avx2(e[0], v, table));                                \
            b##r = _mm256_add_epi32(b##r, tkvi_leveled_avx2(e[1], v, table));                                \
        }                                                                                                    \
    }
#define TKVI_SAVE4_(r)                                                                                       \
    if (r < nw) {                                                                                            \
        _mm256_storeu_si256((__m256i *)(void *)(sum + r * TKVI_BLOCK), a##r);                                \
        _mm256_storeu_si256((__m256i *)(void *)(sum + r * TKVI_BLOCK + apart), b##r);                        \
    }

/* K: lanes are 8 tokens from 32h + 8b and 8 from 32h + 16 + 8b; nw weight rows, sum[weight row][64].
 * Two tiles a step. */
TKVI_FLAT_AVX2 void tkvi_dot_kq_avx2(tkvi_products *d, int h, int b, const int nw) {
    const tkvi_side *s = d->s;
    const int stride = TKV_MAX_HEAD_DIM, apart = 16;
    const uint8_t *wide = d->wide;
    const int8_t *w0 = d->w + h * d->w_group;
    int32_t *sum = d->sum + 32 * h + 8 * b;
    __m256i c[2], e[2], u, v, unit, table = unit = _mm256_setzero_si256();
    int half = d->half, width, i, part;
    TKVI_ROWS4_(TKVI_ZERO4_)
    if (s->levels) table = tkvi_levels_avx2(s->levels);
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int bytes = tkvi_wide_bytes[width], has_half = tkvi_has_half[width], n = s->runs.n[width];
        for (part = 0; part < 1 + (width == 8); part++) {
            const uint8_t *tile = wide;
            const int8_t *w = w0;
            unit = _mm256_set1_epi16(part ? 16 : 1);
            for (i = 0; i < n; i += 2, w += 8, tile += 2 * bytes) {
                const int both = i + 1 < n;
                if (h == 0 && b == 0) {
                    tkvi_prefetch_bytes(tile, 2 * bytes, d->ahead);
                    tkvi_prefetch_rest(d);
                    tkvi_prefetch_rest(d);
                }
                tkvi_codes_avx2(width, tile, d->tops, half + i * has_half, h, b, part, c);
                e[0] = e[1] = _mm256_setzero_si256();
                if (both)
                    tkvi_codes_avx2(width, tile + bytes, d->tops, half + (i + 1) * has_half, h, b, part, e);
                if (s->levels) {
                    TKVI_ROWS4_(TKVI_LEVELED4_)
                } else {
                    TKVI_ROWS4_(TKVI_MAC4_)
                }
            }
        }
        wide += n * bytes;
        half += n * has_half;
        w0 += 4 * n;
    }
    TKVI_ROWS4_(TKVI_SAVE4_)
}

TKVI_FLAT_AVX2 void tkvi_dot_k_avx2(tkvi_products *d, const int nw) {
    int q;
    for (q = 0; q < 4; q++) tkvi_dot_kq_avx2(d, q / 2, q % 2, nw);
}

/* V: lanes are channels 0 .. 7 and 8 .. 15 of one slab, which starts `skip` tiles on. */
TKVI_FLAT_AVX2 void tkvi_dot_vs_avx2(tkvi_products *d, int skip, int32_t *sum, const int nw) {
    const int width = d->width, n = d->n, has_half = tkvi_has_half[width], bytes = tkvi_wide_bytes[width];
    const int stride = TKVI_BLOCK, apart = 8, both = 1;
    const int8_t *levels = d->s->levels;
    __m256i c[2], e[2], u, v, unit, table = unit = _mm256_setzero_si256();
    int t, h, part;
    TKVI_ROWS4_(TKVI_ZERO4_)
    if (levels) table = tkvi_levels_avx2(levels);
    for (part = 0; part < 1 + (width == 8); part++) {
        const uint8_t *tile = d->wide + skip * bytes;
        const int8_t *w = d->w;
        int half = d->half + skip * has_half;
        unit = _mm256_set1_epi16(part ? 16 : 1);
        for (t = 0; t < n; t += 16) { /* a tile has 16 tokens, a plane four */
            tkvi_prefetch_bytes(tile, bytes, d->ahead);
            tkvi_prefetch_rest(d);
            for (h = 0; h < 2; h++, w += 8) {
                tkvi_codes_avx2(width, tile, d->tops, half, h, 0, part, c);
                tkvi_codes_avx2(width, tile, d->tops, half, h, 1, part, e);
                u = c[1];
                c[1] = e[0];
                e[0] = u;
                if (levels) {
                    TKVI_ROWS4_(TKVI_LEVELED4_)
                } else {
                    TKVI_ROWS4_(TKVI_MAC4_)
                }
            }
            tile += bytes;
            half += has_half;
        }
    }
    TKVI_ROWS4_(TKVI_SAVE4_)
}

TKVI_FLAT_AVX2 void tkvi_dot_v_avx2(tkvi_products *d, const int nw) {
    int slab;
    for (slab = 0; slab < d->slabs; slab++) tkvi_dot_vs_avx2(d, 4 * slab, d->sum + 16 * slab, nw);
}

#define TKVI_DOTS_AVX2_(nw)                                                                                  \
    static TKVI_TARGET_AVX2 void tkvi_dot_k##nw##_avx2(tkvi_products *d) { tkvi_dot_k_avx2(d, nw); }         \
    static TKVI_TARGET_AVX2 void tkvi_dot_v##nw##_avx2(tkvi_products *d) { tkvi_dot_v_avx2(d, nw); }
TKVI_DOTS_AVX2_(1)
TKVI_DOTS_AVX2_(2)
TKVI_DOTS_AVX2_(4)
#undef TKVI_DOTS_AVX2_
#undef TKVI_ROWS4_
#undef TKVI_ZERO4_
#undef TKVI_MAC4_
#undef TKVI_LEVELED4_
#undef TKVI_SAVE4_

/* All weight rows, in the passes that registers allow: 1, 2 or 4. A row beyond the last one is zero. */
static void tkvi_multiply_avx2(tkvi_products *d, int weight_rows) {
    static const tkvi_dot dots[2][3] = {
        {tkvi_dot_k1_avx2, tkvi_dot_k2_avx2, tkvi_dot_k4_avx2},
        {tkvi_dot_v1_avx2, tkvi_dot_v2_avx2, tkvi_dot_v4_avx2},
    };
    int left;
    for (left = weight_rows; left > 0; left -= 4) {
        dots[d->s->which][tkvi_min(left - 1, 2)](d);
        d->w += 4 * d->w_stride;
        d->sum += 4 * TKVI_BLOCK;
    }
}

static const tkvi_steps tkvi_steps_avx2 = {tkvi_halves_avx2, tkvi_fold_avx2, tkvi_multiply_avx2,
                                           tkvi_unfold_avx2, 0};

static void tkvi_tiles_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                              const float *ref, int rows, int n, int planes, float *scores) {
    (void)n;
    tkvi_tiles_k(&tkvi_steps_avx2, s, src, next, q, ref, rows, planes, scores);
}

static void tkvi_tiles_v_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                              int rows, int n, int planes, float *out) {
    tkvi_tiles_v(&tkvi_steps_avx2, s, src, next, p, rows, n, planes, out);
}

static const tkvi_kernels tkvi_kernels_avx2 = {
    TKV_ISA_AVX2,
    "avx2",
    {tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_tiles_k_avx2},
    {tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_tiles_v_avx2},
    tkvi_halves_avx2,
    tkvi_exp64_avx2,
    tkvi_max64_avx2,
};

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_AVX2_H */
/* ======== kernels_avx512.h ======== */
/*
 * kernels_avx512.h - the kernels of kernels.h for AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 and later).
 *
 * Two shapes do the work.
 *   Integers: two vectors of codes x up to 8 weight rows = 16 accumulators in registers. vpdpbusd multiplies
 *             unsigned codes by signed weights, four weights broadcast at a time. The width of a tile is
 *             looked at once per 16 products, by branches that go the same way for a whole run.
 *   Floats:   4 vectors x up to 4 query rows.
 * Both are written once, with the number of rows as a constant argument.
 *
 * Levels of a table are signed, but the operand of codes is unsigned: they are biased by 127, which comes off
 * with the centre. (Levels as the signed operand would need unsigned weights and a sign per product.)
 */
#ifndef TKVI_KERNELS_AVX512_H
#define TKVI_KERNELS_AVX512_H


#ifdef TKVI_AVX512

/* g++ 12 finds uninitialised variables in its own header (gcc bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/* >>pieces */
TKVI_FLAT_AVX512 __m512i tkvi_bytes_avx512(const uint8_t *p) { return _mm512_loadu_si512((const void *)p); }

/* 16 values of an exact side. The branch goes the same way all the time. */
TKVI_FLAT_AVX512 __m512 tkvi_values_avx512(tkvi_storage type, const uint8_t *row, int at) {
    if (type == TKVI_AS_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * at)));
    if (type == TKVI_AS_BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * at))), 16));
    return _mm512_castsi512_ps(tkvi_bytes_avx512(row + 4 * at));
}

static TKVI_TARGET_AVX512 void tkvi_halves_avx512(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 16 <= n; i += 16)
        _mm512_storeu_ps(dst + i,
                         _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(src + 2 * i))));
    tkvi_halves_scalar(src + 2 * i, n - i, dst + i);
}

static TKVI_TARGET_AVX512 float tkvi_max64_avx512(const float *s) {
    __m512 a = _mm512_max_ps(_mm512_loadu_ps(s), _mm512_loadu_ps(s + 16));
    __m512 b = _mm512_max_ps(_mm512_loadu_ps(s + 32), _mm512_loadu_ps(s + 48));
    return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
}

/* exp(x) = 2^n exp(r), |r| <= ln 2 / 2; the polynomial is that of Cephes' expf, error 1e-7. */
static TKVI_TARGET_AVX512 float tkvi_exp64_avx512(const float *s, float max, float *p) {
    __m512 sum = _mm512_setzero_ps();
    int t;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        __m512 x = _mm512_sub_ps(_mm512_loadu_ps(s + t), _mm512_set1_ps(max)), n, r, y;
        __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
        n = _mm512_cvtepi32_ps(_mm512_cvt_roundps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
        r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
        y = _mm512_fmadd_ps(_mm512_set1_ps(1.9875691500e-4f), r, _mm512_set1_ps(1.3981999507e-3f));
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
        y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
        y = _mm512_maskz_scalef_ps(some, y, n);
        _mm512_storeu_ps(p + t, y);
        sum = _mm512_add_ps(sum, y);
    }
    return _mm512_reduce_add_ps(sum);
}

/* >>exact tiers */
/* Lane by lane the sums of four vectors: 4 x 16 -> 4. */
TKVI_FLAT_AVX512 __m128 tkvi_sum4_avx512(const __m512 *a) {
    __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512d xd = _mm512_castps_pd(x), yd = _mm512_castps_pd(y);
    __m512 z = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(xd, yd)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(xd, yd)));
    __m256 w = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
    return _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
}

TKVI_FLAT_AVX512 __m128 tkvi_max4_avx512(const __m512 *a) {
    __m512 x = _mm512_max_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 y = _mm512_max_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512d xd = _mm512_castps_pd(x), yd = _mm512_castps_pd(y);
    __m512 z = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(xd, yd)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(xd, yd)));
    __m256 w = _mm256_max_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
    return _mm_max_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
}

TKVI_FLAT_AVX512 __m128i tkvi_isum4_avx512(const __m512i *a) {
    __m512i x = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    __m512i y = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    __m512i z = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
    __m256i w = _mm256_add_epi32(_mm512_castsi512_si256(z), _mm512_extracti32x8_epi32(z, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}

/* 4 tokens x up to 4 rows; lanes are 16 channels. Tokens beyond n repeat the last one. */
TKVI_FLAT_AVX512 void tkvi_exact_k4_avx512(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                           const float *q, const float *ref, int rows, int n, const int nr,
                                           float *scores) {
    int row_bytes = s->pad * s->format->bits / 8, t, c, r, j;
    for (t = 0; t < n; t += 4) {
        __m512 acc[4][4];
        const uint8_t *k[4];
        TKVI_UNROLL
        for (j = 0; j < 4; j++) k[j] = src + tkvi_min(t + j, n - 1) * row_bytes;
        tkvi_prefetch_bytes(src + t * row_bytes, 4 * row_bytes, ahead);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
        }
        for (c = 0; c < s->pad; c += 16) {
            __m512 x[4], minus = _mm512_loadu_ps(ref + c);
            TKVI_UNROLL
            for (j = 0; j < 4; j++)
                x[j] = _mm512_sub_ps(tkvi_values_avx512(s->format->stored, k[j], c), minus);
            TKVI_UNROLL
            for (r = 0; r < nr; r++) {
                __m512 y = _mm512_loadu_ps(q + tkvi_min(r, rows - 1) * s->pad + c);
                TKVI_UNROLL
                for (j = 0; j < 4; j++) acc[r][j] = _mm512_fmadd_ps(x[j], y, acc[r][j]);
            }
        }
        TKVI_UNROLL
        for (r = 0; r < nr; r++)
            if (r < rows) _mm_storeu_ps(scores + r * TKVI_BLOCK + t, tkvi_sum4_avx512(acc[r]));
    }
}

static TKVI_TARGET_AVX512 void tkvi_exact_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                   const uint8_t *next, const float *q, const float *ref,
                                                   int rows, int n, int planes, float *scores) {
    uintptr_t ahead = tkvi_ahead(src, next);
    int r;
    (void)planes;
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (r = 0; r < rows; r += 4) {
        const float *x = q + r * s->pad;
        float *o = scores + r * TKVI_BLOCK;
        int left = rows - r;
        if (left == 1) tkvi_exact_k4_avx512(s, src, ahead, x, ref, left, n, 1, o);
        else if (left == 2) tkvi_exact_k4_avx512(s, src, ahead, x, ref, left, n, 2, o);
        else tkvi_exact_k4_avx512(s, src, ahead, x, ref, left, n, 4, o);
    }
}

/* nv vectors of 16 channels x up to 4 rows, over all tokens. */
TKVI_FLAT_AVX512 void tkvi_exact_v4_avx512(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                           const float *p, int rows, int n, int first, const int nr,
                                           const int nv, float *out) {
    int row_bytes = s->pad * s->format->bits / 8, t, r, j;
    __m512 acc[4][4];
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        TKVI_UNROLL
        for (j = 0; j < nv; j++) acc[r][j] = _mm512_setzero_ps();
    }
    for (t = 0; t < n; t++, src += row_bytes) {
        __m512 x[4];
        TKVI_UNROLL
        for (j = 0; j < nv; j++) {
            x[j] = tkvi_values_avx512(s->format->stored, src, first + 16 * j);
            tkvi_prefetch(src + (first + 16 * j) * s->format->bits / 8, ahead);
        }
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m512 y = _mm512_set1_ps(p[tkvi_min(r, rows - 1) * TKVI_BLOCK + t]);
            TKVI_UNROLL
            for (j = 0; j < nv; j++) acc[r][j] = _mm512_fmadd_ps(x[j], y, acc[r][j]);
        }
    }
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        TKVI_UNROLL
        for (j = 0; j < nv; j++)
            if (r < rows) {
                float *o = out + r * s->pad + first + 16 * j;
                _mm512_storeu_ps(o, _mm512_add_ps(_mm512_loadu_ps(o), acc[r][j]));
            }
    }
}

static TKVI_TARGET_AVX512 void tkvi_exact_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                   const uint8_t *next, const float *p, int rows, int n,
                                                   int planes, float *out) {
    uintptr_t ahead = tkvi_ahead(src, next);
    int r;
    (void)planes;
    for (r = 0; r < rows; r += 4) {
        const float *x = p + r * TKVI_BLOCK;
        float *o = out + r * s->pad;
        int left = rows - r, c = 0;
        for (; c + 64 <= s->pad; c += 64) {
            if (left == 1) tkvi_exact_v4_avx512(s, src, ahead, x, left, n, c, 1, 4, o);
            else if (left == 2) tkvi_exact_v4_avx512(s, src, ahead, x, left, n, c, 2, 4, o);
            else tkvi_exact_v4_avx512(s, src, ahead, x, left, n, c, 4, 4, o);
        }
        for (; c < s->pad; c += 16) tkvi_exact_v4_avx512(s, src, ahead, x, left, n, c, 4, 1, o);
    }
}

/* >>tiles */
/* 16-bit shifts move bits into the neighbour byte, the masks take them away. */
TKVI_FLAT_AVX512 void tkvi_merge_avx512(__m512i *codes, __m512i a, __m512i b, int mask) {
    codes[0] = _mm512_or_si512(codes[0], _mm512_and_si512(a, _mm512_set1_epi8((char)mask)));
    codes[1] = _mm512_or_si512(codes[1], _mm512_and_si512(b, _mm512_set1_epi8((char)mask)));
}

TKVI_FLAT_AVX512 __m512i tkvi_shifted_avx512(const uint8_t *p, int right) {
    return _mm512_srl_epi16(tkvi_bytes_avx512(p), _mm_cvtsi32_si128(right));
}

/* Codes of planes 2h and 2h + 1 of one tile, as bytes; see tile.h for what stands where. */
TKVI_FLAT_AVX512 void tkvi_codes_avx512(int width, const uint8_t *wide, const uint8_t *tops, int half, int h,
                                        uintptr_t ahead, const __m512i *table, __m512i *codes) {
    __m512i x;
    codes[0] = codes[1] = _mm512_setzero_si512();
    if (width >= 4) {
        const int at = (width == 8 ? 128 : 64) * h;
        tkvi_prefetch(wide + at, ahead);
        x = tkvi_bytes_avx512(wide + at);
        if (width == 8) {
            tkvi_prefetch(wide + at + 64, ahead);
            codes[0] = x;
            codes[1] = tkvi_bytes_avx512(wide + at + 64);
            return;
        }
        tkvi_merge_avx512(codes, x, _mm512_srli_epi16(x, 4), 15);
        if (width == 6) {
            if (h) tkvi_prefetch(wide + 128, ahead);
            x = tkvi_shifted_avx512(wide + 128, 4 * h);
            tkvi_merge_avx512(codes, _mm512_slli_epi16(x, 4), _mm512_slli_epi16(x, 2), 48);
        }
    } else if (width >= 2) {
        if (h) tkvi_prefetch(wide, ahead);
        x = tkvi_shifted_avx512(wide, 4 * h);
        tkvi_merge_avx512(codes, x, _mm512_srli_epi16(x, 2), 3);
    }
    if (width & 1) {
        const uint8_t *top = tops + (half >> 1) * 64;
        x = tkvi_shifted_avx512(top, (half & 1) * 4 + 2 * h);
        if (width == 1) tkvi_merge_avx512(codes, x, _mm512_srli_epi16(x, 1), 1);
        else if (width == 3) tkvi_merge_avx512(codes, _mm512_slli_epi16(x, 2), _mm512_slli_epi16(x, 1), 4);
        else tkvi_merge_avx512(codes, _mm512_slli_epi16(x, 4), _mm512_slli_epi16(x, 3), 16);
    }
    if (table) {
        codes[0] = _mm512_shuffle_epi8(*table, codes[0]);
        codes[1] = _mm512_shuffle_epi8(*table, codes[1]);
    }
}

#define TKVI_BIAS_AVX512 127

/* The 16 biased levels in each 128-bit quarter. */
TKVI_FLAT_AVX512 __m512i tkvi_levels_avx512(const int8_t *levels) {
    __m512i x = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)levels));
    return _mm512_add_epi8(x, _mm512_set1_epi8(TKVI_BIAS_AVX512));
}

/* Four rows go together so that their horizontal sums do, four vectors so that they pack to one of bytes. */
TKVI_FLAT_AVX512 void tkvi_fold4_avx512(const tkvi_folding *a, int first, const int nr, tkvi_fold *f) {
    const __m128 top = _mm_set1_ps(a->planes == 2 ? (float)TKVI_TWO_PLANES : (float)TKVI_PLANE);
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const float *x = a->x + first * a->n;
    TKVI_ALIGNED float folded[4][TKV_MAX_HEAD_DIM];
    __m512 most[4], rest[4];
    __m512i middle[4], middle_hi[4];
    __m128 m, inverse;
    float by[4];
    int i, j, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) {
        most[r] = rest[r] = _mm512_setzero_ps();
        middle[r] = middle_hi[r] = _mm512_setzero_si512();
    }
    for (i = 0; i < a->n; i += 16) {
        __m512 scale = _mm512_loadu_ps(a->scale + i);
        __m512i twice =
            _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(a->centre2 + i)));
        __m512 centre = _mm512_mul_ps(_mm512_cvtepi32_ps(twice), _mm512_set1_ps(a->half));
        __m512 zero = _mm512_loadu_ps(a->zero + i);
        if (a->ref) zero = _mm512_sub_ps(zero, _mm512_loadu_ps(a->ref + i));
        zero = _mm512_fmadd_ps(centre, scale, zero);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m512 v = _mm512_loadu_ps(x + r * a->n + i), y = _mm512_mul_ps(v, scale);
            most[r] = _mm512_max_ps(most[r], _mm512_abs_ps(y));
            rest[r] = _mm512_fmadd_ps(v, zero, rest[r]);
            _mm512_store_ps(folded[r] + i, y);
        }
    }
    for (; i % 64 != 0; i += 16) {
        TKVI_UNROLL
        for (r = 0; r < nr; r++) _mm512_store_ps(folded[r] + i, _mm512_setzero_ps());
    }
    m = tkvi_max4_avx512(most);
    inverse = _mm_maskz_div_ps(_mm_cmp_ps_mask(m, _mm_set1_ps(1e-34f), _CMP_GT_OQ), top, m);
    _mm_storeu_ps(by, inverse);
    _mm_storeu_ps(f->half_step + first, _mm_div_ps(_mm_mul_ps(m, _mm_set1_ps(0.5f)), top));
    _mm_storeu_ps(f->rest + first, tkvi_sum4_avx512(rest));
    for (i = 0; i < a->n; i += 64) {
        __m512i c = tkvi_bytes_avx512(a->centre2 + i);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            int8_t *w = a->w + (first + r) * a->planes * a->w_stride + i;
            __m512i v[4], hi;
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                __m512 y = _mm512_mul_ps(_mm512_load_ps(folded[r] + i + 16 * j), _mm512_set1_ps(by[r]));
                v[j] = _mm512_cvt_roundps_epi32(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            }
            v[0] = _mm512_packs_epi32(v[0], v[1]);
            v[1] = _mm512_packs_epi32(v[2], v[3]);
            if (a->planes == 2) { /* v = 128 hi + lo, lo 0..127 */
                hi = _mm512_packs_epi16(_mm512_srai_epi16(v[0], 7), _mm512_srai_epi16(v[1], 7));
                hi = _mm512_permutexvar_epi32(in_order, hi);
                _mm512_storeu_si512((void *)w, hi);
                middle_hi[r] = _mm512_dpbusd_epi32(middle_hi[r], c, hi);
                v[0] = _mm512_and_si512(v[0], _mm512_set1_epi16(127));
                v[1] = _mm512_and_si512(v[1], _mm512_set1_epi16(127));
                w += a->w_stride;
            }
            v[0] = _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(v[0], v[1]));
            _mm512_storeu_si512((void *)w, v[0]);
            middle[r] = _mm512_dpbusd_epi32(middle[r], c, v[0]);
        }
    }
    TKVI_UNROLL
    for (r = 0; r < nr; r++) middle[r] = _mm512_add_epi32(middle[r], _mm512_slli_epi32(middle_hi[r], 7));
    _mm_storeu_si128((__m128i *)(void *)(f->middle + first), tkvi_isum4_avx512(middle));
}

static TKVI_TARGET_AVX512 void tkvi_fold_avx512(const tkvi_folding *a, int rows, tkvi_fold *f) {
    int r;
    for (r = 0; r < rows; r += 4) {
        if (rows - r == 1) tkvi_fold4_avx512(a, r, 1, f);
        else if (rows - r == 2) tkvi_fold4_avx512(a, r, 2, f);
        else if (rows - r == 3) tkvi_fold4_avx512(a, r, 3, f);
        else tkvi_fold4_avx512(a, r, 4, f);
    }
    if (rows * a->planes % 2) memset(a->w + rows * a->planes * a->w_stride, 0, (size_t)a->w_stride);
}

static TKVI_TARGET_AVX512 void tkvi_unfold_avx512(const int32_t *sum, int planes, const tkvi_fold *f, int r,
                                                  int n, int add, float *out) {
    const __m512 half_step = _mm512_set1_ps(f->half_step[r]), rest = _mm512_set1_ps(f->rest[r]);
    const __m512i middle = _mm512_set1_epi32(f->middle[r]);
    int i;
    for (i = 0; i < n; i += 16) {
        __m512i x = _mm512_loadu_si512((const void *)(sum + i));
        __m512 y;
        if (planes == 2)
            x = _mm512_add_epi32(_mm512_slli_epi32(x, 7),
                                 _mm512_loadu_si512((const void *)(sum + TKVI_BLOCK + i)));
        y = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_slli_epi32(x, 1), middle));
        y = _mm512_fmadd_ps(y, half_step, rest);
        _mm512_storeu_ps(out + i, add ? _mm512_add_ps(y, _mm512_loadu_ps(out + i)) : y);
    }
}

/* Accumulators a0..a7 and b0..b7. Named ones stay in registers with every compiler, arrays do not. */
#define TKVI_ROWS_(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define TKVI_ZERO_(r) __m512i a##r = _mm512_setzero_si512(), b##r = a##r;
#define TKVI_MAC_(r)                                                                                         \
    if (r < nw) {                                                                                            \
        four = _mm512_set1_epi32(tkvi_four(w + r * stride));                                                 \
        a##r = _mm512_dpbusd_epi32(a##r, x, four);                                                           \
        b##r = _mm512_dpbusd_epi32(b##r, y, four);                                                           \
    }
#define TKVI_SAVE_(r)                                                                                        \
    if (r < nw) {                                                                                            \
        _mm512_storeu_si512((void *)(sum + r * TKVI_BLOCK), a##r);                                           \
        _mm512_storeu_si512((void *)(sum + r * TKVI_BLOCK + 16), b##r);                                      \
    }

/* K: lanes are tokens 32h .. 32h + 31. */
TKVI_FLAT_AVX512 void tkvi_dot_kh_avx512(tkvi_products *d, const int h, const int nw) {
    const tkvi_side *s = d->s;
    const int stride = TKV_MAX_HEAD_DIM;
    const uint8_t *wide = d->wide;
    const int8_t *w = d->w + h * d->w_group;
    int32_t *sum = d->sum + 32 * h;
    __m512i table = _mm512_setzero_si512(), x, y, four;
    int half = d->half, width, i;
    TKVI_ROWS_(TKVI_ZERO_)
    if (s->levels) table = tkvi_levels_avx512(s->levels);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, w += 4) {
            __m512i c[2];
            tkvi_codes_avx512(width, wide, d->tops, half, h, d->ahead, s->levels ? &table : NULL, c);
            wide += tkvi_wide_bytes[width];
            half += tkvi_has_half[width];
            if (h == 0) tkvi_prefetch_rest(d);
            x = c[0];
            y = c[1];
            TKVI_ROWS_(TKVI_MAC_)
        }
    TKVI_ROWS_(TKVI_SAVE_)
}

TKVI_FLAT_AVX512 void tkvi_dot_k_avx512(tkvi_products *d, const int nw) {
    tkvi_dot_kh_avx512(d, 0, nw);
    tkvi_dot_kh_avx512(d, 1, nw);
}

/* V: lanes are 16 channels of one slab, or of two neighbours. */
TKVI_FLAT_AVX512 void tkvi_dot_v_avx512(tkvi_products *d, const int nw) {
    const int width = d->width, n = d->n, has_half = tkvi_has_half[width], bytes = tkvi_wide_bytes[width];
    const int stride = TKVI_BLOCK, next = d->slabs == 2 ? 4 : 0; /* tiles from one slab to the other */
    const uint8_t *wide = d->wide;
    const int8_t *w = d->w;
    int32_t *sum = d->sum;
    __m512i table = _mm512_setzero_si512(), *levels = NULL, x, y, four;
    int half = d->half, t, h;
    TKVI_ROWS_(TKVI_ZERO_)
    if (d->s->levels) {
        table = tkvi_levels_avx512(d->s->levels);
        levels = &table;
    }
    for (t = 0; t < n; t += 16) { /* a tile has 16 tokens, a plane four */
        for (h = 0; h < 2; h++) {
            __m512i c[2], e[2];
            tkvi_codes_avx512(width, wide, d->tops, half, h, d->ahead, levels, c);
            tkvi_codes_avx512(width, wide + next * bytes, d->tops, half + next * has_half, h, d->ahead,
                              levels, e);
            tkvi_prefetch_rest(d);
            x = c[0];
            y = e[0];
            TKVI_ROWS_(TKVI_MAC_)
            w += 4;
            x = c[1];
            y = e[1];
            TKVI_ROWS_(TKVI_MAC_)
            w += 4;
        }
        wide += bytes;
        half += has_half;
    }
    TKVI_ROWS_(TKVI_SAVE_)
}

/* Each number of rows is a function of its own: clang 14 keeps the accumulators in memory otherwise. */
#define TKVI_DOTS_AVX512_(nw)                                                                                \
    static TKVI_TARGET_AVX512 void tkvi_dot_k##nw##_avx512(tkvi_products *d) { tkvi_dot_k_avx512(d, nw); }   \
    static TKVI_TARGET_AVX512 void tkvi_dot_v##nw##_avx512(tkvi_products *d) { tkvi_dot_v_avx512(d, nw); }
TKVI_DOTS_AVX512_(1)
TKVI_DOTS_AVX512_(2)
TKVI_DOTS_AVX512_(4)
TKVI_DOTS_AVX512_(6)
TKVI_DOTS_AVX512_(8)
#undef TKVI_DOTS_AVX512_
#undef TKVI_ROWS_
#undef TKVI_ZERO_
#undef TKVI_MAC_
#undef TKVI_SAVE_

/* How many weight rows to take at once: 1, 2, 4, 6 or 8. A row beyond the last one is zero. */
static int tkvi_pass_avx512(int left) { return left == 1 ? 1 : left > 6 ? 8 : (left + 1) / 2 * 2; }

/* All weight rows, in the passes that registers allow. */
static void tkvi_multiply_avx512(tkvi_products *d, int weight_rows) {
    static const tkvi_dot dots[2][5] = {
        {tkvi_dot_k1_avx512, tkvi_dot_k2_avx512, tkvi_dot_k4_avx512, tkvi_dot_k6_avx512, tkvi_dot_k8_avx512},
        {tkvi_dot_v1_avx512, tkvi_dot_v2_avx512, tkvi_dot_v4_avx512, tkvi_dot_v6_avx512, tkvi_dot_v8_avx512},
    };
    int left, nw;
    for (left = weight_rows; left > 0; left -= nw) {
        nw = tkvi_pass_avx512(left);
        dots[d->s->which][nw / 2](d);
        d->w += nw * d->w_stride;
        d->sum += nw * TKVI_BLOCK;
    }
}

static const tkvi_steps tkvi_steps_avx512 = {tkvi_halves_avx512, tkvi_fold_avx512, tkvi_multiply_avx512,
                                             tkvi_unfold_avx512, TKVI_BIAS_AVX512};

static void tkvi_tiles_k_avx512(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                                const float *ref, int rows, int n, int planes, float *scores) {
    (void)n;
    tkvi_tiles_k(&tkvi_steps_avx512, s, src, next, q, ref, rows, planes, scores);
}

static void tkvi_tiles_v_avx512(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                                int rows, int n, int planes, float *out) {
    tkvi_tiles_v(&tkvi_steps_avx512, s, src, next, p, rows, n, planes, out);
}

static const tkvi_kernels tkvi_kernels_avx512 = {
    TKV_ISA_AVX512,
    "avx512",
    {tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_tiles_k_avx512},
    {tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_tiles_v_avx512},
    tkvi_halves_avx512,
    tkvi_exp64_avx512,
    tkvi_max64_avx512,
};

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* TKVI_AVX512 */

#endif /* TKVI_KERNELS_AVX512_H */
/* ======== dispatch.h ======== */
/*
 * dispatch.h - which kernels this processor can run.
 *
 * x86 asks cpuid, and xgetbv whether the operating system saves the registers, each time a cache is created:
 * no globals. Other machines have the scalar table; NEON and WASM kernels will be compile-time choices in
 * tkvi_kernels_for. Calls the kernel files.
 */
#ifndef TKVI_DISPATCH_H
#define TKVI_DISPATCH_H


#ifdef TKVI_X86
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif

static void tkvi_cpuid(uint32_t leaf, uint32_t *r) { /* eax ebx ecx edx of subleaf 0 */
#if defined(_MSC_VER)
    int x[4], i;
    __cpuidex(x, (int)leaf, 0);
    for (i = 0; i < 4; i++) r[i] = (uint32_t)x[i];
#else
    __cpuid_count(leaf, 0, r[0], r[1], r[2], r[3]);
#endif
}

static uint32_t tkvi_xcr0(void) {
#if defined(_MSC_VER)
    return (uint32_t)_xgetbv(0);
#else
    uint32_t lo, hi;
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0"
                     : "=a"(lo), "=d"(hi)
                     : "c"(0)); /* xgetbv, also for old assemblers */
    return lo;
#endif
}

static int tkvi_bits_set(uint32_t x, uint32_t bits) { return (x & bits) == bits; }

static tkv_isa tkvi_best_isa(void) {
    uint32_t r[4], one, xcr0, seven_b, seven_c;
    tkvi_cpuid(0, r);
    if (r[0] < 7) return TKV_ISA_SCALAR;
    tkvi_cpuid(1, r);
    one = r[2];
    if (!tkvi_bits_set(one, 1u << 27)) return TKV_ISA_SCALAR; /* OSXSAVE: xgetbv may be called */
    xcr0 = tkvi_xcr0();
    tkvi_cpuid(7, r);
    seven_b = r[1];
    seven_c = r[2];
    /* xmm and ymm saved; FMA, AVX, F16C; AVX2 */
    if (!tkvi_bits_set(xcr0, 0x6u) || !tkvi_bits_set(one, 1u << 12 | 1u << 28 | 1u << 29))
        return TKV_ISA_SCALAR;
    if (!tkvi_bits_set(seven_b, 1u << 5)) return TKV_ISA_SCALAR;
    /* masks and zmm saved; F, DQ, BW, VL; VNNI */
    if (!tkvi_bits_set(xcr0, 0xe6u) || !tkvi_bits_set(seven_b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31))
        return TKV_ISA_AVX2;
    return tkvi_bits_set(seven_c, 1u << 11) ? TKV_ISA_AVX512 : TKV_ISA_AVX2;
}
#endif /* TKVI_X86 */

/* The kernels of an instruction set, TKV_ISA_AUTO being the best here; NULL if this one is not available. */
static const tkvi_kernels *tkvi_kernels_for(tkv_isa isa) {
#ifdef TKVI_X86
    tkv_isa best = tkvi_best_isa();
#ifdef TKVI_AVX512
    if (best == TKV_ISA_AVX512 && (isa == TKV_ISA_AUTO || isa == TKV_ISA_AVX512)) return &tkvi_kernels_avx512;
#endif
    if (best >= TKV_ISA_AVX2 && (isa == TKV_ISA_AUTO || isa == TKV_ISA_AVX2)) return &tkvi_kernels_avx2;
#endif
    return isa == TKV_ISA_AUTO || isa == TKV_ISA_SCALAR ? &tkvi_kernels_scalar : NULL;
}

TKV_API int tkv_isa_available(tkv_isa isa) { return tkvi_kernels_for(isa) != NULL; }

TKV_API const char *tkv_isa_name(tkv_isa isa) {
    static const char *const names[TKV_ISA_COUNT] = {"auto", "scalar", "avx2", "avx512"};
    return isa >= TKV_ISA_AUTO && isa < TKV_ISA_COUNT ? names[isa] : NULL;
}

#endif /* TKVI_DISPATCH_H */
/* ======== plan.h ======== */
/*
 * plan.h - from a config to plans: which format and how many tokens each tier of each layer has, how big a
 * block is in each format pair, and in which page and slot sizes blocks are kept. Also: what is wrong with
 * a config, in a sentence. May call kernels (for the ISA) and below.
 */
#ifndef TKVI_PLAN_H
#define TKVI_PLAN_H


#define TKVI_FOREVER 0x3fffffff /* a length that no sequence reaches; also the most tokens of a sequence */

/* One KV head of a block: K side, V side, where it begins. */
typedef struct tkvi_record {
    tkvi_side k, v;
    size_t at, v_at; /* byte offset of the record in the block, of its V side in the record */
} tkvi_record;

/* A block's bytes in one pair of formats: the same for every block that names it. */
typedef struct tkvi_coding {
    tkv_pair pair;
    int tokens;          /* room: 64, or the sinks */
    int size_class;      /* into classes */
    size_t block_bytes;  /* all heads */
    tkvi_record *record; /* [n_kv_heads]; heads may differ */
} tkvi_coding;

/* Blocks of one size share pages that are cut into slots of that size. */
typedef struct tkvi_class {
    size_t slot_bytes;
    int slots; /* per page, at most 64 */
} tkvi_class;

typedef struct tkvi_plan {
    int stored; /* layer whose K and V this one reads: its own number, or an earlier one; -1: no cache */
    int sink, hot, warm, window; /* tokens; window 0: none */
    int keep;                    /* widest window of all layers that read this one's blocks; 0: none */
    int sink_coding;
    int coding[TKV_TIER_COUNT];
} tkvi_plan;

/* What can be said of a config without any memory: pairs in use, sizes of blocks, classes, the page. */
#define TKVI_MAX_CODINGS 128

typedef struct tkvi_key {
    tkv_pair pair;
    int tokens;
} tkvi_key;

typedef struct tkvi_shape {
    tkv_config cfg; /* with defaults filled in */
    int n_codings, n_classes;
    tkvi_key key[TKVI_MAX_CODINGS];
    size_t block_bytes[TKVI_MAX_CODINGS];
    int class_of[TKVI_MAX_CODINGS];
    tkvi_class size_class[TKVI_MAX_CODINGS];
    size_t page_bytes;
} tkvi_shape;

/* Everything derived from a config, in the cache's fixed piece. */
typedef struct tkvi_tables {
    tkv_config cfg; /* with defaults filled in; `layers` is not kept */
    int n_codings, n_classes;
    size_t page_bytes;
    tkvi_plan *plan;     /* [n_layers] */
    tkvi_coding *coding; /* [n_codings] */
    tkvi_class *size_class;
} tkvi_tables;

/* >>validate */
static tkv_status tkvi_bad(char *reason, size_t size, const char *field, int64_t value, const char *want) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_say(&t, field);
    tkvi_say(&t, " is ");
    tkvi_say_int(&t, value);
    tkvi_say(&t, "; ");
    tkvi_say(&t, want);
    return TKV_ERR_CONFIG;
}

/* The same for a field of layers[i] (i >= 0). */
static tkv_status tkvi_bad_in(char *reason, size_t size, int layer, const char *field, int64_t value,
                              const char *want) {
    char name[64];
    tkvi_text t = tkvi_text_begin(name, sizeof name);
    if (layer >= 0) {
        tkvi_say(&t, "layers[");
        tkvi_say_int(&t, layer);
        tkvi_say(&t, "].");
    }
    tkvi_say(&t, field);
    return tkvi_bad(reason, size, name, value, want);
}

/* Fields that a layer can override, checked for the cache (layer -1) and for each layer. */
static tkv_status tkvi_validate_tiers(const tkv_layer_config *c, int layer, char *reason, size_t size) {
    static const char *const pair_name[TKV_TIER_COUNT][2] = {
        {"hot.k", "hot.v"}, {"warm.k", "warm.v"}, {"archive.k", "archive.v"}};
    const tkv_pair *pair[TKV_TIER_COUNT];
    int i, side;
    pair[TKV_HOT] = &c->hot;
    pair[TKV_WARM] = &c->warm;
    pair[TKV_ARCHIVE] = &c->archive;
    for (i = 0; i < TKV_TIER_COUNT; i++)
        for (side = 0; side < 2; side++) {
            tkv_format f = side ? pair[i]->v : pair[i]->k;
            if (f != TKV_FORMAT_DEFAULT && !tkvi_format_known(f))
                return tkvi_bad_in(reason, size, layer, pair_name[i][side], (int)f,
                                   "it must be a tkv_format");
            if (i == TKV_HOT && f != TKV_FORMAT_DEFAULT && !tkvi_is_exact(&tkvi_formats[f]))
                return tkvi_bad_in(reason, size, layer, pair_name[i][side], (int)f,
                                   "the hot tier takes TKV_F32, TKV_F16 or TKV_BF16");
        }
    if (c->sink_tokens < TKV_NONE || c->sink_tokens > TKVI_BLOCK)
        return tkvi_bad_in(reason, size, layer, "sink_tokens", c->sink_tokens,
                           "it must be 1 to 64, 0 (default) or TKV_NONE");
    if (c->hot_tokens < TKV_ALL || c->hot_tokens > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, layer, "hot_tokens", c->hot_tokens,
                           "it must be 1 to 2^30 - 1, 0 (default), TKV_NONE or TKV_ALL");
    if (c->warm_tokens < TKV_ALL || c->warm_tokens > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, layer, "warm_tokens", c->warm_tokens,
                           "it must be 1 to 2^30 - 1, 0 (default), TKV_NONE or TKV_ALL");
    if (c->window < TKV_NONE || c->window > TKVI_FOREVER)
        return tkvi_bad_in(reason, size, layer, "window", c->window,
                           "it must be 1 to 2^30 - 1, 0 (default) or TKV_NONE");
    return TKV_OK;
}

static tkv_layer_config tkvi_cache_wide(const tkv_config *cfg) {
    tkv_layer_config c;
    memset(&c, 0, sizeof c);
    c.hot = cfg->hot;
    c.warm = cfg->warm;
    c.archive = cfg->archive;
    c.sink_tokens = cfg->sink_tokens;
    c.hot_tokens = cfg->hot_tokens;
    c.warm_tokens = cfg->warm_tokens;
    c.window = cfg->window;
    return c;
}

static tkv_status tkvi_validate_layers(const tkv_config *cfg, char *reason, size_t size) {
    int i, cached = 0;
    for (i = 0; i < cfg->n_layers; i++) {
        const tkv_layer_config *c = &cfg->layers[i];
        tkv_status st = tkvi_validate_tiers(c, i, reason, size);
        if (st) return st;
        if (c->no_cache != 0 && c->no_cache != 1)
            return tkvi_bad_in(reason, size, i, "no_cache", c->no_cache, "it must be 0 or 1");
        if (c->share_kv < 0 || c->share_kv > i)
            return tkvi_bad_in(reason, size, i, "share_kv", c->share_kv,
                               "it must be 0, or 1 + the index of an earlier layer");
        if (c->share_kv &&
            (c->no_cache || cfg->layers[c->share_kv - 1].no_cache || cfg->layers[c->share_kv - 1].share_kv))
            return tkvi_bad_in(reason, size, i, "share_kv", c->share_kv,
                               "both layers need a cache, and the other one its own");
        cached += !c->no_cache;
    }
    if (!cached)
        return tkvi_bad(reason, size, "layers", cfg->n_layers, "at least one layer must have a cache");
    return TKV_OK;
}

TKV_API tkv_config tkv_config_default(void) {
    tkv_config cfg;
    memset(&cfg, 0, sizeof cfg);
    return cfg;
}

/* >>resolve */
static int tkvi_length(int of_layer, int of_cache, int standard) {
    int n = of_layer ? of_layer : of_cache ? of_cache : standard;
    return n == TKV_NONE ? 0 : n == TKV_ALL ? TKVI_FOREVER : n;
}

static tkv_pair tkvi_pair(tkv_pair of_layer, tkv_pair of_cache, tkv_format standard) {
    tkv_pair p;
    p.k = of_layer.k ? of_layer.k : of_cache.k ? of_cache.k : standard;
    p.v = of_layer.v ? of_layer.v : of_cache.v ? of_cache.v : standard;
    return p;
}

/* One layer's lengths and pairs; `pair` gets hot, warm, archive. */
static tkvi_plan tkvi_resolve(const tkv_config *cfg, int layer, tkv_pair *pair) {
    tkv_layer_config wide = tkvi_cache_wide(cfg), none;
    const tkv_layer_config *c = cfg->layers ? &cfg->layers[layer] : &none;
    tkvi_plan p;
    memset(&p, 0, sizeof p);
    memset(&none, 0, sizeof none);
    p.stored = c->no_cache ? -1 : c->share_kv ? c->share_kv - 1 : layer;
    p.sink = tkvi_length(c->sink_tokens, wide.sink_tokens, 4);
    p.hot = tkvi_length(c->hot_tokens, wide.hot_tokens, 64);
    p.warm = tkvi_length(c->warm_tokens, wide.warm_tokens, 448);
    p.window = tkvi_length(c->window, wide.window, TKV_NONE);
    pair[TKV_HOT] = tkvi_pair(c->hot, wide.hot, TKV_F16);
    pair[TKV_WARM] = tkvi_pair(c->warm, wide.warm, TKV_KIVI4);
    pair[TKV_ARCHIVE] = tkvi_pair(c->archive, wide.archive, TKV_KIVI2);
    return p;
}

static void tkvi_fill_defaults(tkv_config *cfg) {
    if (!cfg->n_kv_heads) cfg->n_kv_heads = cfg->n_heads;
    if (!cfg->v_head_dim) cfg->v_head_dim = cfg->head_dim;
    if (!(cfg->scale > 0.0f)) cfg->scale = (float)(1.0 / sqrt((double)cfg->head_dim));
    if (!cfg->max_seqs) cfg->max_seqs = 1;
    if (!cfg->max_append) cfg->max_append = 512;
    if (!cfg->group_size) cfg->group_size = 64;
    if (!cfg->max_tokens) cfg->max_tokens = TKVI_FOREVER;
}

/* Number of the coding for a pair and a room, added if new; -1 when there are too many. */
static int tkvi_find_key(tkvi_shape *h, tkv_pair pair, int tokens) {
    int i;
    for (i = 0; i < h->n_codings; i++)
        if (h->key[i].pair.k == pair.k && h->key[i].pair.v == pair.v && h->key[i].tokens == tokens) return i;
    if (h->n_codings == TKVI_MAX_CODINGS) return -1;
    h->key[h->n_codings].pair = pair;
    h->key[h->n_codings].tokens = tokens;
    return h->n_codings++;
}

static void tkvi_record_init(tkvi_record *r, const tkv_config *cfg, tkvi_key key) {
    tkvi_side_init(&r->k, &tkvi_formats[key.pair.k], TKV_K, cfg->head_dim, cfg->group_size, key.tokens);
    tkvi_side_init(&r->v, &tkvi_formats[key.pair.v], TKV_V, cfg->v_head_dim, cfg->group_size, key.tokens);
    r->at = 0;
    r->v_at = r->k.bytes;
}

/* The page size: the smallest from the largest slot up that wastes at most 1/16 in any class, or the least
 * wasteful of those tried (up to four of the largest slots). A class of tiny slots (the sinks) fills at
 * most 64 of them and is left out. */
static size_t tkvi_page_size(const tkvi_class *classes, int n) {
    size_t largest = 0, page, step, best = 0, best_waste = (size_t)-1;
    int i;
    for (i = 0; i < n; i++) largest = classes[i].slot_bytes > largest ? classes[i].slot_bytes : largest;
    step = tkvi_align_up(largest / 64 + 1);
    for (page = largest; page <= 4 * largest; page += step) {
        size_t worst = 0;
        for (i = 0; i < n; i++) {
            size_t waste = (page % classes[i].slot_bytes) * 1024 / page;
            if (classes[i].slot_bytes * 64 > page && waste > worst) worst = waste;
        }
        if (worst <= 64) return page;
        if (worst < best_waste) {
            best_waste = worst;
            best = page;
        }
    }
    return best;
}

/* The plan of one layer; its codings become keys of the shape. */
static tkv_status tkvi_plan_of(tkvi_shape *h, int layer, tkvi_plan *p) {
    tkv_pair pair[TKV_TIER_COUNT], unused[TKV_TIER_COUNT];
    int tier, other, few = 0;
    *p = tkvi_resolve(&h->cfg, layer, pair);
    if (p->stored != layer)
        return TKV_OK; /* reads another layer's blocks, or none; only its window is its own */
    p->keep = p->window;
    for (other = layer + 1; h->cfg.layers && p->keep && other < h->cfg.n_layers; other++)
        if (h->cfg.layers[other].share_kv == layer + 1) {
            int window = tkvi_resolve(&h->cfg, other, unused).window;
            p->keep = window && window < p->keep ? p->keep : window;
        }
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        p->coding[tier] = tkvi_find_key(h, pair[tier], TKVI_BLOCK);
        few |= p->coding[tier] < 0;
    }
    p->sink_coding = p->sink ? tkvi_find_key(h, pair[TKV_HOT], p->sink) : p->coding[TKV_HOT];
    few |= p->sink_coding < 0;
    return few ? TKV_ERR_CONFIG : TKV_OK;
}

/* The config must be valid. */
static tkv_status tkvi_shape_of(const tkv_config *cfg, tkvi_shape *h) {
    int i, c;
    tkvi_plan p;
    memset(h, 0, sizeof *h);
    h->cfg = *cfg;
    tkvi_fill_defaults(&h->cfg);
    for (i = 0; i < h->cfg.n_layers; i++)
        if (tkvi_plan_of(h, i, &p)) return TKV_ERR_CONFIG;
    for (i = 0; i < h->n_codings; i++) {
        tkvi_record r;
        tkvi_record_init(&r, &h->cfg, h->key[i]);
        /* a page is up to four of the largest blocks */
        if (!tkvi_mul((size_t)h->cfg.n_kv_heads * 5u, r.k.bytes + r.v.bytes, &h->block_bytes[i]))
            return TKV_ERR_CONFIG;
        h->block_bytes[i] /= 5u;
        for (c = 0; c < h->n_classes; c++)
            if (h->size_class[c].slot_bytes == h->block_bytes[i]) break;
        h->size_class[c].slot_bytes = h->block_bytes[i];
        if (c == h->n_classes) h->n_classes++;
        h->class_of[i] = c;
    }
    h->page_bytes = tkvi_page_size(h->size_class, h->n_classes);
    for (c = 0; c < h->n_classes; c++) {
        size_t slots = h->page_bytes / h->size_class[c].slot_bytes;
        h->size_class[c].slots = slots > 64 ? 64 : (int)slots;
    }
    return TKV_OK;
}

/* Every field; the shape is that of the valid config. */
static tkv_status tkvi_validate(const tkv_config *cfg, tkvi_shape *shape, char *reason, size_t size) {
    tkv_layer_config wide;
    tkv_status st;
    if (reason && size) *reason = 0;
    if (!cfg) return TKV_ERR_ARG;
#define TKVI_RANGE_(field, lo, hi, want)                                                                     \
    if (cfg->field < (lo) || cfg->field > (hi)) return tkvi_bad(reason, size, #field, cfg->field, want)
    if (cfg->start_canary || cfg->end_canary)
        return tkvi_bad(
            reason, size, cfg->start_canary ? "start_canary" : "end_canary", 1,
            "it must be 0: fill the config with zeros before setting fields, and use one header everywhere");
    TKVI_RANGE_(n_layers, 1, 4096, "it must be 1 to 4096");
    TKVI_RANGE_(n_heads, 1, 65536, "it must be 1 to 65536");
    TKVI_RANGE_(n_kv_heads, 0, 65536, "it must be 1 to 65536, or 0 for as many as n_heads");
    if (cfg->n_kv_heads && cfg->n_heads % cfg->n_kv_heads)
        return tkvi_bad(reason, size, "n_heads", cfg->n_heads, "it must be a multiple of n_kv_heads");
    TKVI_RANGE_(head_dim, 1, TKV_MAX_HEAD_DIM, "it must be 1 to 256");
    TKVI_RANGE_(v_head_dim, 0, TKV_MAX_HEAD_DIM, "it must be 1 to 256, or 0 for head_dim");
    if (!tkvi_is_finite(cfg->scale) || cfg->scale < 0.0f)
        return tkvi_bad(reason, size, "scale", -1, "it must be a positive number, or 0 for 1/sqrt(head_dim)");
    TKVI_RANGE_(max_seqs, 0, 1 << 20, "it must be 1 to 2^20, or 0 for 1");
    TKVI_RANGE_(max_tokens, 0, TKVI_FOREVER, "it must be 1 to 2^30 - 1, or 0 to grow");
    TKVI_RANGE_(max_append, 0, 1 << 20, "it must be 1 to 2^20, or 0 for 512");
    if (cfg->group_size != 0 && cfg->group_size != 32 && cfg->group_size != 64)
        return tkvi_bad(reason, size, "group_size", cfg->group_size, "it must be 64 or 32");
    if ((unsigned)cfg->nonfinite > TKV_NONFINITE_SATURATE)
        return tkvi_bad(reason, size, "nonfinite", (int)cfg->nonfinite, "it must be a tkv_nonfinite");
    TKVI_RANGE_(precise, 0, 1, "it must be 0 or 1");
    if ((unsigned)cfg->isa >= TKV_ISA_COUNT)
        return tkvi_bad(reason, size, "isa", (int)cfg->isa, "it must be a tkv_isa");
#undef TKVI_RANGE_
    if (!cfg->allocator.alloc != !cfg->allocator.release)
        return tkvi_bad(reason, size, "allocator", cfg->allocator.alloc ? 1 : 0,
                        "alloc and release must both be set, or neither");
    wide = tkvi_cache_wide(cfg);
    st = tkvi_validate_tiers(&wide, -1, reason, size);
    if (!st && cfg->layers) st = tkvi_validate_layers(cfg, reason, size);
    if (!st && tkvi_shape_of(cfg, shape))
        return tkvi_bad(reason, size, "layers", cfg->n_layers,
                        "their formats and sinks make too many kinds of blocks, or blocks of too many bytes");
    return st;
}

TKV_API tkv_status tkv_config_validate(const tkv_config *cfg, char *reason, size_t size) {
    tkvi_shape shape;
    return tkvi_validate(cfg, &shape, reason, size);
}

static size_t tkvi_tables_bytes(const tkvi_shape *h) {
    return tkvi_align_up((size_t)h->cfg.n_layers * sizeof(tkvi_plan)) +
           (size_t)h->n_codings * (tkvi_align_up(sizeof(tkvi_coding)) + tkvi_align_up(sizeof(tkvi_class)) +
                                   tkvi_align_up((size_t)h->cfg.n_kv_heads * sizeof(tkvi_record)));
}

static void tkvi_tables_build(tkvi_tables *t, tkvi_shape *h, uint8_t *mem) {
    uint8_t *records;
    int i, head;
    t->cfg = h->cfg;
    t->n_codings = h->n_codings;
    t->n_classes = h->n_classes;
    t->page_bytes = h->page_bytes;
    t->plan = (tkvi_plan *)(void *)mem;
    mem += tkvi_align_up((size_t)h->cfg.n_layers * sizeof(tkvi_plan));
    t->coding = (tkvi_coding *)(void *)mem;
    mem += (size_t)h->n_codings * tkvi_align_up(sizeof(tkvi_coding));
    t->size_class = (tkvi_class *)(void *)mem;
    records = mem + (size_t)h->n_codings * tkvi_align_up(sizeof(tkvi_class));
    for (i = 0; i < h->n_codings; i++) {
        tkvi_coding *c = &t->coding[i];
        size_t at = 0;
        c->pair = h->key[i].pair;
        c->tokens = h->key[i].tokens;
        c->size_class = h->class_of[i];
        c->block_bytes = h->block_bytes[i];
        c->record = (tkvi_record *)(void *)records;
        records += tkvi_align_up((size_t)h->cfg.n_kv_heads * sizeof(tkvi_record));
        for (head = 0; head < h->cfg.n_kv_heads; head++) {
            tkvi_record *r = &c->record[head];
            tkvi_record_init(r, &h->cfg, h->key[i]);
            r->at = at;
            at += r->k.bytes + r->v.bytes;
        }
    }
    for (i = 0; i < h->n_classes; i++) t->size_class[i] = h->size_class[i];
    for (i = 0; i < h->cfg.n_layers; i++)
        (void)tkvi_plan_of(h, i, &t->plan[i]); /* all keys are known by now */
    t->cfg.layers = NULL;
}

#endif /* TKVI_PLAN_H */
/* ======== pool.h ======== */
/*
 * pool.h - where blocks live: pages cut into slots, and the block table on top.
 *
 * All pages have one size; a page in use serves one size class (slots of one block size). Free slots of a
 * class never add up to a whole page: when they would, the sparsest page is emptied into the others (only
 * the writer moves blocks, readers are not running then) and is free for any class or goes back to the
 * allocator. So the pages in use are exactly sum over classes of ceil(blocks / slots), whatever the history:
 * blocks of different sizes cannot fragment the memory, an arena's neither, and what an operation will
 * need can be computed before it changes anything (tkvi_peak_*).
 *
 * Blocks are reference-counted and known by number; their bytes may move. May call plan and below.
 */
#ifndef TKVI_POOL_H
#define TKVI_POOL_H


#define TKVI_NIL 0xffffffffu

typedef struct tkvi_page {
    uint8_t *bytes;
    uint64_t taken;         /* bit per slot */
    uint32_t owner[64];     /* block in each slot */
    uint32_t before, after; /* in the list of its class's pages with room, or (after only) of free pages */
    int size_class;         /* -1: free */
    int used;
} tkvi_page;

typedef struct tkvi_block {
    uint32_t refs; /* lists that hold it; 0: this entry is free */
    uint32_t page; /* or the next free entry */
    uint16_t slot, coding;
    int start; /* position of its first token */
} tkvi_block;

typedef struct tkvi_pool {
    tkvi_heap *heap;
    const tkvi_tables *tables;
    int keep_all; /* in place: pages are never given back */
    tkvi_page *page;
    uint32_t n_pages, page_cap; /* entries in use are 0 .. n_pages-1, each with bytes */
    uint32_t free_page, n_free_pages;
    tkvi_block *block;
    uint32_t n_blocks, block_cap, free_block; /* n_blocks: live ones */
    uint32_t *room;                           /* per class: first page with room */
    int64_t *live;                            /* per class: blocks */
    int64_t *promised;                        /* per class: slots that tkv_reserve holds, all sequences */
} tkvi_pool;

/* >>pages needed for given numbers of blocks */
static int64_t tkvi_pages_for(const tkvi_class *c, int64_t blocks) {
    return (blocks + c->slots - 1) / c->slots;
}

static void tkvi_link_room(tkvi_pool *pool, uint32_t i) {
    tkvi_page *p = &pool->page[i];
    uint32_t *head = &pool->room[p->size_class];
    p->before = TKVI_NIL;
    p->after = *head;
    if (*head != TKVI_NIL) pool->page[*head].before = i;
    *head = i;
}

static void tkvi_unlink_room(tkvi_pool *pool, uint32_t i) {
    tkvi_page *p = &pool->page[i];
    if (p->before != TKVI_NIL) pool->page[p->before].after = p->after;
    else pool->room[p->size_class] = p->after;
    if (p->after != TKVI_NIL) pool->page[p->after].before = p->before;
}

static void tkvi_free_page(tkvi_pool *pool, uint32_t i) {
    tkvi_page *p = &pool->page[i];
    p->size_class = -1;
    p->before = TKVI_NIL;
    p->after = pool->free_page;
    pool->free_page = i;
    pool->n_free_pages++;
}

/* >>growth. Each gets the memory first and changes the pool only when it has it. */
static int tkvi_grow_array(tkvi_heap *heap, void **array, uint32_t *cap, uint32_t want, size_t item) {
    size_t bytes;
    uint32_t new_cap = *cap ? *cap : 16;
    void *bigger;
    while (new_cap < want) new_cap *= 2;
    if (new_cap == *cap) return 1;
    if (!tkvi_mul(new_cap, item, &bytes)) return 0;
    bigger = tkvi_get(heap, bytes);
    if (!bigger) return 0;
    memset(bigger, 0, bytes);
    if (*array) memcpy(bigger, *array, (size_t)*cap * item);
    tkvi_put(heap, *array, (size_t)*cap * item);
    *array = bigger;
    *cap = new_cap;
    return 1;
}

static int tkvi_grow_blocks(tkvi_pool *pool, uint32_t want) {
    uint32_t had = pool->block_cap, i;
    void *array = pool->block;
    if (want <= had) return 1;
    if (!tkvi_grow_array(pool->heap, &array, &pool->block_cap, want, sizeof(tkvi_block))) return 0;
    pool->block = (tkvi_block *)array;
    for (i = pool->block_cap; i-- > had;) {
        pool->block[i].page = pool->free_block;
        pool->free_block = i;
    }
    return 1;
}

static int tkvi_grow_pages(tkvi_pool *pool, uint32_t want) {
    void *array = pool->page;
    if (!tkvi_grow_array(pool->heap, &array, &pool->page_cap, want, sizeof(tkvi_page))) return 0;
    pool->page = (tkvi_page *)array;
    return 1;
}

static int tkvi_add_page(tkvi_pool *pool) {
    uint8_t *bytes;
    tkvi_page *p;
    if (!tkvi_grow_pages(pool, pool->n_pages + 1)) return 0;
    bytes = (uint8_t *)tkvi_get(pool->heap, pool->tables->page_bytes);
    if (!bytes) return 0;
    p = &pool->page[pool->n_pages];
    memset(p, 0, sizeof *p);
    p->bytes = bytes;
    tkvi_free_page(pool, pool->n_pages++);
    return 1;
}

/* Free pages beyond what reservations need go back. The last entry of the page table moves into the hole. */
static void tkvi_trim(tkvi_pool *pool) {
    int64_t keep = 0;
    int c;
    if (pool->keep_all) return;
    for (c = 0; c < pool->tables->n_classes; c++) {
        const tkvi_class *k = &pool->tables->size_class[c];
        keep += tkvi_pages_for(k, pool->live[c] + pool->promised[c]) - tkvi_pages_for(k, pool->live[c]);
    }
    while ((int64_t)pool->n_free_pages > keep) {
        uint32_t i = pool->free_page, last = pool->n_pages - 1;
        tkvi_page *p = &pool->page[i];
        pool->free_page = p->after;
        pool->n_free_pages--;
        pool->n_pages--;
        tkvi_put(pool->heap, p->bytes, pool->tables->page_bytes);
        if (i == last) continue;
        *p = pool->page[last];
        if (p->size_class < 0) { /* free: find who points to it */
            uint32_t *link = &pool->free_page;
            while (*link != last) link = &pool->page[*link].after;
            *link = i;
        } else {
            int s;
            for (s = 0; s < 64; s++)
                if (p->taken >> s & 1) pool->block[p->owner[s]].page = i;
            if (p->used < pool->tables->size_class[p->size_class].slots) {
                if (p->before != TKVI_NIL) pool->page[p->before].after = i;
                else pool->room[p->size_class] = i;
                if (p->after != TKVI_NIL) pool->page[p->after].before = i;
            }
        }
    }
}

/* >>slots */
static uint8_t *tkvi_slot_bytes(const tkvi_pool *pool, uint32_t page, int slot) {
    const tkvi_page *p = &pool->page[page];
    return p->bytes + (size_t)slot * pool->tables->size_class[p->size_class].slot_bytes;
}

static uint8_t *tkvi_block_bytes(const tkvi_pool *pool, const tkvi_block *b) {
    return tkvi_slot_bytes(pool, b->page, b->slot);
}

/* A slot of a class for block `owner`. There must be one: tkvi_peak_ready said so. */
static void tkvi_take_slot(tkvi_pool *pool, int size_class, uint32_t owner, uint32_t *page, int *slot) {
    int slots = pool->tables->size_class[size_class].slots, s = 0;
    uint32_t i = pool->room[size_class];
    tkvi_page *p;
    if (i == TKVI_NIL) {
        i = pool->free_page;
        pool->free_page = pool->page[i].after;
        pool->n_free_pages--;
        pool->page[i].size_class = size_class;
        tkvi_link_room(pool, i);
    }
    p = &pool->page[i];
    while (p->taken >> s & 1) s++;
    p->taken |= (uint64_t)1 << s;
    p->owner[s] = owner;
    if (++p->used == slots) tkvi_unlink_room(pool, i);
    pool->live[size_class]++;
    *page = i;
    *slot = s;
}

static void tkvi_clear_slot(tkvi_pool *pool, uint32_t page, int slot) {
    tkvi_page *p = &pool->page[page];
    int size_class = p->size_class;
    if (p->used == pool->tables->size_class[size_class].slots) tkvi_link_room(pool, page);
    p->taken &= ~((uint64_t)1 << slot);
    p->used--;
    pool->live[size_class]--;
    if (p->used == 0) {
        tkvi_unlink_room(pool, page);
        tkvi_free_page(pool, page);
    }
}

/* Empties the sparsest page of a class into the others, if they have room for it. */
static void tkvi_compact(tkvi_pool *pool, int size_class) {
    const tkvi_class *c = &pool->tables->size_class[size_class];
    uint32_t i, sparse = pool->room[size_class];
    int holes = 0, s;
    tkvi_page *p;
    for (i = sparse; i != TKVI_NIL; i = pool->page[i].after) {
        holes += c->slots - pool->page[i].used;
        if (pool->page[i].used < pool->page[sparse].used) sparse = i;
    }
    if (holes < c->slots) return;
    tkvi_unlink_room(pool, sparse); /* take no slots here */
    p = &pool->page[sparse];
    for (s = 0; s < c->slots; s++) {
        tkvi_block *b;
        uint32_t to;
        int to_slot;
        if (!(p->taken >> s & 1)) continue;
        b = &pool->block[p->owner[s]];
        tkvi_take_slot(pool, size_class, p->owner[s], &to, &to_slot);
        memcpy(tkvi_slot_bytes(pool, to, to_slot), tkvi_slot_bytes(pool, sparse, s), c->slot_bytes);
        b->page = to;
        b->slot = (uint16_t)to_slot;
        pool->live[size_class]--; /* moved, not added */
    }
    p->taken = 0;
    p->used = 0;
    tkvi_free_page(pool, sparse);
}

static void tkvi_give_slot(tkvi_pool *pool, uint32_t page, int slot) {
    int size_class = pool->page[page].size_class;
    const tkvi_class *c = &pool->tables->size_class[size_class];
    tkvi_clear_slot(pool, page, slot);
    /* Holes can have reached a page's worth only now; if the page itself emptied, there are none. */
    if (pool->live[size_class] % c->slots == 0) tkvi_compact(pool, size_class);
}

/* >>blocks */
static uint32_t tkvi_new_block(tkvi_pool *pool, int coding, int start) {
    uint32_t id = pool->free_block, page;
    tkvi_block *b = &pool->block[id];
    int slot;
    pool->free_block = b->page;
    tkvi_take_slot(pool, pool->tables->coding[coding].size_class, id, &page, &slot);
    b->refs = 1;
    b->page = page;
    b->slot = (uint16_t)slot;
    b->coding = (uint16_t)coding;
    b->start = start;
    pool->n_blocks++;
    return id;
}

/* Moves a block that has one holder to another coding: `write` fills the new bytes from the old ones. */
typedef void (*tkvi_rewrite)(void *ctx, const uint8_t *from, uint8_t *to);

static void tkvi_recode_block(tkvi_pool *pool, uint32_t id, int coding, tkvi_rewrite write, void *ctx) {
    tkvi_block *b = &pool->block[id];
    uint32_t page, old_page = b->page;
    int slot, old_slot = b->slot;
    tkvi_take_slot(pool, pool->tables->coding[coding].size_class, id, &page, &slot);
    write(ctx, tkvi_slot_bytes(pool, old_page, old_slot), tkvi_slot_bytes(pool, page, slot));
    b->page = page;
    b->slot = (uint16_t)slot;
    b->coding = (uint16_t)coding;
    tkvi_give_slot(pool, old_page, old_slot);
}

static void tkvi_release_block(tkvi_pool *pool, uint32_t id) {
    tkvi_block *b = &pool->block[id];
    if (--b->refs) return;
    tkvi_give_slot(pool, b->page, b->slot);
    b->page = pool->free_block;
    pool->free_block = id;
    pool->n_blocks--;
}

/* >>peak: what a series of takes and gives will need at most, before any of it happens */
typedef struct tkvi_peak {
    const tkvi_tables *tables;
    int64_t *live;                   /* [n_classes] slots in use or promised, as the series goes on */
    int64_t most_pages, most_blocks; /* at any moment; a block being recoded counts twice */
} tkvi_peak;

static void tkvi_peak_note(tkvi_peak *k) {
    int64_t pages = 0, blocks = 0;
    int c;
    for (c = 0; c < k->tables->n_classes; c++) {
        pages += tkvi_pages_for(&k->tables->size_class[c], k->live[c]);
        blocks += k->live[c];
    }
    if (pages > k->most_pages) k->most_pages = pages;
    if (blocks > k->most_blocks) k->most_blocks = blocks;
}

static void tkvi_peak_take(tkvi_peak *k, int coding) {
    k->live[k->tables->coding[coding].size_class]++;
    tkvi_peak_note(k);
}

static void tkvi_peak_give(tkvi_peak *k, int coding) { k->live[k->tables->coding[coding].size_class]--; }

/* Gets everything that the peak needs. On failure nothing that a caller can see has changed. */
static int tkvi_peak_ready(tkvi_pool *pool, const tkvi_peak *k) {
    if (k->most_blocks > (int64_t)0x7fffffff) return 0;
    if (!tkvi_grow_blocks(pool, (uint32_t)k->most_blocks)) return 0;
    while ((int64_t)pool->n_pages < k->most_pages)
        if (!tkvi_add_page(pool)) {
            tkvi_trim(pool);
            return 0;
        }
    return 1;
}

#endif /* TKVI_POOL_H */
/* ======== cache.h ======== */
/*
 * cache.h - the cache itself: what it consists of, how it is made from an allocator or inside the caller's
 * memory, how it ends. May call pool and below.
 *
 * Memory of a cache: one fixed piece (this struct, tables, sequences, scratch), the block table, the page
 * table, one array of block lists per sequence, and pages. Only the last four grow. In place the same calls
 * are served from the caller's memory, at their largest sizes, before the first token.
 */
#ifndef TKVI_CACHE_H
#define TKVI_CACHE_H


/* Blocks of one layer of one sequence, oldest first: [sinks][archive][warm][hot]. Block i holds the tokens
 * from its start to the next one's. */
typedef struct tkvi_list {
    int n;                    /* blocks */
    int sinks, archive, warm; /* how many of them are of each tier; the rest is hot */
    int len;                  /* tokens ever appended */
    int dropped;              /* of them, the first ones are gone (windows) */
    int step_len;             /* len when the open step began */
} tkvi_list;

typedef struct tkvi_seq {
    uint32_t *block; /* [n_layers][cap] block numbers */
    uint32_t cap;
    int in_step;
    int reserved_len; /* 0, or the length up to which memory is promised */
} tkvi_seq;

/* Parallel attention keeps partial results here; the first caller gets it, others run serially (same bits). */
#define TKVI_MAX_CHUNKS 16 /* of a key range, per KV head */
#define TKVI_MAX_PARTS 128 /* chunks in flight */

struct tkv_cache {
    tkvi_tables tables;
    const tkvi_kernels *kernels;
    tkvi_heap heap;
    tkvi_arena arena;
    tkvi_pool pool;
    tkvi_seq *seq;      /* [max_seqs] */
    tkvi_list *list;    /* [max_seqs][n_layers] */
    int64_t *promised;  /* [max_seqs][n_classes] slots reserved by each sequence */
    int64_t *peak_live; /* [2][n_classes] work space of tkvi_peak */
    float *recode;      /* [64][head_dim], [64][v_head_dim] decoded values on their way to another tier */
    float *parts;       /* partial results of parallel attention, or NULL */
    int parts_taken;
    size_t fixed_bytes, table_bytes, scratch_bytes; /* of the fixed piece */
    char error[160];
};

static tkvi_list *tkvi_list_of(const tkv_cache *kv, int seq, int layer) {
    return kv->list + (size_t)seq * (size_t)kv->tables.cfg.n_layers + (size_t)layer;
}

static uint32_t *tkvi_ids(const tkv_cache *kv, int seq, int layer) {
    const tkvi_seq *s = &kv->seq[seq];
    return s->block ? s->block + (size_t)layer * s->cap : NULL;
}

static int tkvi_block_start(const tkv_cache *kv, const uint32_t *ids, int i) {
    return kv->pool.block[ids[i]].start;
}

/* End position of block i: where the next one starts, or the length. */
static int tkvi_block_end(const tkv_cache *kv, const tkvi_list *list, const uint32_t *ids, int i) {
    return i + 1 < list->n ? tkvi_block_start(kv, ids, i + 1) : list->len;
}

/* Tokens that left every window stay this long, so that a cut of the hot tail finds them. */
static int tkvi_drop_margin(const tkvi_plan *p) { return p->hot == TKVI_FOREVER ? TKVI_BLOCK : p->hot; }

static tkv_tier tkvi_tier_at(const tkvi_list *list, int i) {
    if (i < list->sinks) return TKV_HOT;
    if (i < list->sinks + list->archive) return TKV_ARCHIVE;
    return i < list->sinks + list->archive + list->warm ? TKV_WARM : TKV_HOT;
}

/* >>errors of mutating calls: status and sentence */
static tkv_status tkvi_ok(tkv_cache *kv) {
    kv->error[0] = 0;
    return TKV_OK;
}

static tkv_status tkvi_fail(tkv_cache *kv, tkv_status st, const char *what, int64_t number,
                            const char *more) {
    tkvi_text t = tkvi_text_begin(kv->error, sizeof kv->error);
    tkvi_say(&t, what);
    if (more) {
        tkvi_say(&t, " ");
        tkvi_say_int(&t, number);
        tkvi_say(&t, more);
    }
    return st;
}

/* >>sizes of the fixed piece */
typedef struct tkvi_sizes {
    size_t cache, tables, seqs, lists, counts, recode, parts; /* each rounded up to 64 */
    size_t total;
} tkvi_sizes;

static int tkvi_fixed_sizes(const tkvi_shape *h, tkvi_sizes *s) {
    size_t seqs = (size_t)h->cfg.max_seqs, n;
    int k_pad = tkvi_round_up(h->cfg.head_dim, 16), v_pad = tkvi_round_up(h->cfg.v_head_dim, 16);
    memset(s, 0, sizeof *s);
    s->cache = tkvi_align_up(sizeof(tkv_cache));
    s->tables = tkvi_align_up(tkvi_tables_bytes(h));
    if (!tkvi_mul(seqs, sizeof(tkvi_seq), &n)) return 0;
    s->seqs = tkvi_align_up(n);
    if (!tkvi_mul(seqs, (size_t)h->cfg.n_layers, &n) || !tkvi_mul(n, sizeof(tkvi_list), &n)) return 0;
    s->lists = tkvi_align_up(n);
    if (!tkvi_mul(seqs + 5, (size_t)h->n_classes * sizeof(int64_t), &n)) return 0;
    s->counts = tkvi_align_up(n);
    s->recode = tkvi_align_up((size_t)((k_pad + v_pad) * TKVI_BLOCK) * sizeof(float));
    if (h->cfg.parallel_for)
        s->parts = tkvi_align_up((size_t)(TKVI_MAX_PARTS * TKVI_ROWS * (v_pad + 2)) * sizeof(float));
    s->total = s->cache;
    return tkvi_add(s->total, s->tables, &s->total) && tkvi_add(s->total, s->seqs, &s->total) &&
           tkvi_add(s->total, s->lists, &s->total) && tkvi_add(s->total, s->counts, &s->total) &&
           tkvi_add(s->total, s->recode, &s->total) && tkvi_add(s->total, s->parts, &s->total);
}

/* Builds an empty cache in one fixed piece from the heap. */
static tkv_status tkvi_build(tkvi_shape *h, const tkvi_heap *from, tkv_cache **out) {
    tkvi_heap heap = *from;
    tkvi_sizes s;
    uint8_t *at;
    tkv_cache *kv;
    int c;
    size_t classes = (size_t)h->n_classes;
    const tkvi_kernels *kernels = tkvi_kernels_for(h->cfg.isa);
    if (!kernels) return TKV_ERR_ISA;
    if (!tkvi_fixed_sizes(h, &s)) return TKV_ERR_CONFIG;
    at = (uint8_t *)tkvi_get(&heap, s.total);
    if (!at) return TKV_ERR_NOMEM;
    memset(at, 0, s.total - s.recode - s.parts);
    kv = (tkv_cache *)(void *)at;
    at += s.cache;
    tkvi_tables_build(&kv->tables, h, at);
    at += s.tables;
    kv->seq = (tkvi_seq *)(void *)at;
    at += s.seqs;
    kv->list = (tkvi_list *)(void *)at;
    at += s.lists;
    kv->promised = (int64_t *)(void *)at;
    kv->peak_live = kv->promised + (size_t)h->cfg.max_seqs * classes;
    kv->pool.live = kv->peak_live + 2 * classes;
    kv->pool.promised = kv->pool.live + classes;
    kv->pool.room = (uint32_t *)(void *)(kv->pool.promised + classes);
    at += s.counts;
    kv->recode = (float *)(void *)at;
    at += s.recode;
    kv->parts = s.parts ? (float *)(void *)at : NULL;
    kv->kernels = kernels;
    kv->fixed_bytes = s.total;
    kv->table_bytes = s.tables;
    kv->scratch_bytes = s.recode + s.parts;
    kv->heap = heap;
    kv->pool.heap = &kv->heap;
    kv->pool.tables = &kv->tables;
    kv->pool.free_page = kv->pool.free_block = TKVI_NIL;
    for (c = 0; c < h->n_classes; c++) kv->pool.room[c] = TKVI_NIL;
    *out = kv;
    return TKV_OK;
}

TKV_API tkv_status tkv_create(const tkv_config *cfg, tkv_cache **out) {
    tkvi_heap heap;
    tkvi_shape shape;
    tkv_status st = tkvi_validate(cfg, &shape, NULL, 0);
    if (!out) return TKV_ERR_ARG;
    if (st) return st;
    memset(&heap, 0, sizeof heap);
    heap.from = cfg->allocator;
#ifndef TKV_NO_MALLOC
    if (!heap.from.alloc) {
        heap.from.alloc = tkvi_malloc;
        heap.from.release = tkvi_mfree;
    }
#endif
    if (!heap.from.alloc) return TKV_ERR_CONFIG;
    return tkvi_build(&shape, &heap, out);
}

TKV_API void tkv_destroy(tkv_cache *kv) {
    tkvi_heap heap;
    uint32_t i;
    int s;
    if (!kv) return;
    for (i = 0; i < kv->pool.n_pages; i++) tkvi_put(&kv->heap, kv->pool.page[i].bytes, kv->tables.page_bytes);
    tkvi_put(&kv->heap, kv->pool.page, kv->pool.page_cap * sizeof(tkvi_page));
    tkvi_put(&kv->heap, kv->pool.block, kv->pool.block_cap * sizeof(tkvi_block));
    for (s = 0; s < kv->tables.cfg.max_seqs; s++)
        tkvi_put(&kv->heap, kv->seq[s].block,
                 (size_t)kv->seq[s].cap * (size_t)kv->tables.cfg.n_layers * sizeof(uint32_t));
    heap = kv->heap; /* the cache stands in the last piece */
    if (!kv->pool.keep_all) tkvi_put(&heap, kv, kv->fixed_bytes);
}

/* >>block lists of a sequence: room for `want` blocks per layer */
static uint32_t tkvi_list_cap(uint32_t had, uint32_t want) {
    uint32_t cap = had ? had : 16;
    while (cap < want) cap *= 2;
    return cap;
}

static int tkvi_grow_lists(tkv_cache *kv, int seq, int want) {
    tkvi_seq *s = &kv->seq[seq];
    uint32_t cap = tkvi_list_cap(s->cap, (uint32_t)want), *bigger;
    size_t layers = (size_t)kv->tables.cfg.n_layers, bytes;
    size_t l;
    if (cap == s->cap) return 1;
    if (!tkvi_mul(layers * sizeof(uint32_t), cap, &bytes)) return 0;
    bigger = (uint32_t *)tkvi_get(&kv->heap, bytes);
    if (!bigger) return 0;
    memset(bigger, 0, bytes);
    for (l = 0; l < layers && s->block; l++)
        memcpy(bigger + l * cap, s->block + l * s->cap, s->cap * sizeof(uint32_t));
    tkvi_put(&kv->heap, s->block, layers * s->cap * sizeof(uint32_t));
    s->block = bigger;
    s->cap = cap;
    return 1;
}

/* >>in place: everything at its largest, at once */
/* Most blocks of each tier that one layer of one sequence can hold at max_tokens, sinks apart, if none was
 * flushed short. */
static void tkvi_most_blocks(const tkv_config *cfg, const tkvi_plan *p, int64_t *most) {
    int64_t tokens = cfg->max_tokens - p->sink, all, tier;
    if (tokens < 0) tokens = 0;
    all = (tokens + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_HOT] = ((int64_t)p->hot + TKVI_BLOCK - 1 + cfg->max_append + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_WARM] = ((int64_t)p->warm + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_ARCHIVE] = (tokens - p->warm) / TKVI_BLOCK; /* hot tokens can be flushed */
    if (p->keep && most[TKV_ARCHIVE] > ((int64_t)p->keep + tkvi_drop_margin(p)) / TKVI_BLOCK + 2)
        most[TKV_ARCHIVE] = ((int64_t)p->keep + tkvi_drop_margin(p)) / TKVI_BLOCK + 2;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        if (most[tier] < 0 || (p->hot == TKVI_FOREVER && tier != TKV_HOT)) most[tier] = 0;
        if (most[tier] > all) most[tier] = all;
    }
}

static uint32_t tkvi_cap_for(int64_t n) {
    uint32_t cap = 16;
    while ((int64_t)cap < n) cap *= 2;
    return cap;
}

typedef struct tkvi_most {
    uint32_t page_cap, block_cap, list_cap;
    int64_t pages;
    size_t bytes; /* of everything, each piece at a multiple of 64 */
} tkvi_most;

static tkv_status tkvi_most_of(tkvi_shape *h, tkvi_most *m) {
    int64_t live[TKVI_MAX_CODINGS], most[TKV_TIER_COUNT], blocks = 0;
    tkvi_sizes fixed;
    size_t pages, n;
    int i, c, tier;
    memset(m, 0, sizeof *m);
    memset(live, 0, sizeof live);
    if (!tkvi_fixed_sizes(h, &fixed)) return TKV_ERR_CONFIG;
    for (i = 0; i < h->cfg.n_layers; i++) {
        tkvi_plan p;
        (void)tkvi_plan_of(h, i, &p);
        if (p.stored != i) continue;
        tkvi_most_blocks(&h->cfg, &p, most);
        if (p.sink) live[h->class_of[p.sink_coding]]++;
        for (tier = 0; tier < TKV_TIER_COUNT; tier++) live[h->class_of[p.coding[tier]]] += most[tier];
    }
    for (c = 0; c < h->n_classes; c++) {
        live[c] *= h->cfg.max_seqs;
        blocks += live[c];
        m->pages += tkvi_pages_for(&h->size_class[c], live[c] + 1); /* one more while a block is recoded */
    }
    if (blocks > 0x3fffffff || m->pages > 0x3fffffff) return TKV_ERR_CONFIG;
    m->page_cap = tkvi_cap_for(m->pages);
    m->block_cap = tkvi_cap_for(blocks + h->n_classes);
    m->list_cap = tkvi_cap_for(h->cfg.max_tokens / TKVI_BLOCK + 4);
    if (!tkvi_mul((size_t)m->list_cap * sizeof(uint32_t), (size_t)h->cfg.n_layers, &n) ||
        !tkvi_mul(tkvi_align_up(n), (size_t)h->cfg.max_seqs, &n) ||
        !tkvi_mul((size_t)m->pages, h->page_bytes, &pages) || !tkvi_add(n, fixed.total, &m->bytes) ||
        !tkvi_add(pages, m->bytes, &m->bytes) ||
        !tkvi_add(tkvi_align_up(m->page_cap * sizeof(tkvi_page)), m->bytes, &m->bytes) ||
        !tkvi_add(tkvi_align_up(m->block_cap * sizeof(tkvi_block)) + TKVI_ALIGN, m->bytes, &m->bytes))
        return TKV_ERR_CONFIG;
    return TKV_OK;
}

static tkv_status tkvi_in_place_shape(const tkv_config *cfg, tkvi_shape *h, tkvi_most *m) {
    tkv_status st = tkvi_validate(cfg, h, NULL, 0);
    if (!st && cfg->max_tokens == 0) st = TKV_ERR_CONFIG;
    if (!st) st = tkvi_most_of(h, m);
    return st;
}

TKV_API tkv_status tkv_required_bytes(const tkv_config *cfg, size_t *bytes) {
    tkvi_shape h;
    tkvi_most m;
    tkv_status st = tkvi_in_place_shape(cfg, &h, &m);
    if (!bytes) return TKV_ERR_ARG;
    if (!st) *bytes = m.bytes;
    return st;
}

TKV_API tkv_status tkv_init_in_place(const tkv_config *cfg, void *mem, size_t bytes, tkv_cache **out) {
    tkvi_shape h;
    tkvi_most m;
    tkvi_heap heap;
    tkvi_arena arena;
    tkv_cache *kv;
    size_t skip = (TKVI_ALIGN - (size_t)((uintptr_t)mem & (TKVI_ALIGN - 1u))) & (TKVI_ALIGN - 1u);
    tkv_status st = tkvi_in_place_shape(cfg, &h, &m);
    int i;
    if (!out || !mem) return TKV_ERR_ARG;
    if (st) return st;
    if (bytes < m.bytes) return TKV_ERR_CAPACITY;
    memset(&arena, 0, sizeof arena);
    arena.base = (uint8_t *)mem + skip;
    arena.size = bytes - skip;
    memset(&heap, 0, sizeof heap);
    heap.from.user = &arena;
    heap.from.alloc = tkvi_arena_alloc;
    heap.from.release = tkvi_arena_release;
    st = tkvi_build(&h, &heap, &kv);
    if (st) return st;
    kv->arena = arena;
    kv->heap.from.user = &kv->arena;
    kv->pool.keep_all = 1;
    /* None of these can fail: tkvi_most_of added up the same pieces. */
    if (!tkvi_grow_blocks(&kv->pool, m.block_cap)) return TKV_ERR_CAPACITY;
    for (i = 0; i < h.cfg.max_seqs; i++)
        if (!tkvi_grow_lists(kv, i, (int)m.list_cap)) return TKV_ERR_CAPACITY;
    if (!tkvi_grow_pages(&kv->pool, m.page_cap)) return TKV_ERR_CAPACITY;
    while ((int64_t)kv->pool.n_pages < m.pages)
        if (!tkvi_add_page(&kv->pool)) return TKV_ERR_CAPACITY;
    kv->arena.closed = 1;
    *out = kv;
    return TKV_OK;
}

#endif /* TKVI_CACHE_H */
/* ======== sequence.h ======== */
/*
 * sequence.h - tokens come, grow old, are cut, are gone: append, steps, reserve, truncate, reset, flush.
 * May call cache and below.
 *
 * Every change is first played through on paper (tkvi_peak: which slots would be taken and given back, in
 * order), then memory for its peak is fetched, then it is done; after the fetch nothing can fail. So a
 * failed call leaves the cache as it was. Ageing looks at lengths alone: at the start of an append (or of a
 * step) a block whose last token is hot_tokens old moves to warm, one that is hot_tokens + warm_tokens old
 * to the archive, always whole blocks, and never the tokens of the chunk that is about to be attended to.
 */
#ifndef TKVI_SEQUENCE_H
#define TKVI_SEQUENCE_H


/* >>ageing */
static tkv_tier tkvi_tier_due(const tkvi_plan *p, int hot, int end, int len) {
    int64_t age = (int64_t)len - end;
    if (age < hot) return TKV_HOT;
    return age < (int64_t)hot + p->warm ? TKV_WARM : TKV_ARCHIVE;
}

typedef struct tkvi_recoding {
    tkv_cache *kv;
    const tkvi_coding *from, *to;
    int tokens;
} tkvi_recoding;

static void tkvi_recode(void *ctx, const uint8_t *src, uint8_t *dst) {
    const tkvi_recoding *r = (const tkvi_recoding *)ctx;
    const tkv_config *cfg = &r->kv->tables.cfg;
    float *k = r->kv->recode, *v = k + tkvi_round_up(cfg->head_dim, 16) * TKVI_BLOCK;
    size_t dk = (size_t)cfg->head_dim, dv = (size_t)cfg->v_head_dim;
    int h;
    for (h = 0; h < cfg->n_kv_heads; h++) {
        const tkvi_record *a = &r->from->record[h], *b = &r->to->record[h];
        tkvi_decode_side(&a->k, src + a->at, 0, r->tokens, k, dk);
        tkvi_decode_side(&a->v, src + a->at + a->v_at, 0, r->tokens, v, dv);
        tkvi_encode_side(&b->k, k, dk, r->tokens, dst + b->at);
        tkvi_encode_side(&b->v, v, dv, r->tokens, dst + b->at + b->v_at);
    }
}

/* Block i of a list goes to another tier's coding, or only on paper. */
static void tkvi_demote(tkv_cache *kv, int seq, int layer, int i, int coding, tkvi_peak *paper) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer), id = ids[i];
    tkvi_block *b = &kv->pool.block[id];
    tkvi_recoding r;
    if (b->coding == coding) return;
    if (paper) {
        tkvi_peak_take(paper, coding);
        if (b->refs == 1) tkvi_peak_give(paper, b->coding);
        return;
    }
    r.kv = kv;
    r.from = &kv->tables.coding[b->coding];
    r.to = &kv->tables.coding[coding];
    r.tokens = tkvi_block_end(kv, list, ids, i) - b->start;
    if (b->refs > 1) { /* the other holders keep theirs */
        ids[i] = tkvi_new_block(&kv->pool, coding, b->start);
        b = &kv->pool.block[id];
        tkvi_recode(&r, tkvi_block_bytes(&kv->pool, b), tkvi_block_bytes(&kv->pool, &kv->pool.block[ids[i]]));
        tkvi_release_block(&kv->pool, id);
    } else {
        tkvi_recode_block(&kv->pool, id, coding, tkvi_recode, &r);
    }
}

/* What is due in one layer when it has `len` tokens: drop behind windows, warm to archive, tail to warm or
 * archive. `hot` is the plan's, or 0 to flush; `partial` takes the unfinished block too. */
static void tkvi_age(tkv_cache *kv, int seq, int layer, int hot, int partial, tkvi_peak *paper) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    tkvi_list *list = tkvi_list_of(kv, seq, layer), now = *list;
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i, gone = 0, len = now.len;
    while (p->keep && gone + 1 < now.n &&
           (int64_t)tkvi_block_end(kv, &now, ids, gone) + p->keep + tkvi_drop_margin(p) <= len) {
        const tkvi_block *b = &kv->pool.block[ids[gone]];
        if (paper && b->refs == 1) tkvi_peak_give(paper, b->coding);
        if (!paper) tkvi_release_block(&kv->pool, ids[gone]);
        gone++;
    }
    if (gone) { /* on paper the list is a copy, and its block numbers stay where they are */
        int left = gone, tier, *of_tier[3];
        of_tier[0] = &now.sinks;
        of_tier[1] = &now.archive;
        of_tier[2] = &now.warm;
        now.dropped = tkvi_block_start(kv, ids, gone);
        for (tier = 0; tier < 3; tier++) {
            int take = tkvi_min(left, *of_tier[tier]);
            *of_tier[tier] -= take;
            left -= take;
        }
        now.n -= gone;
        if (paper) {
            ids += gone;
        } else {
            memmove(ids, ids + gone, (size_t)now.n * sizeof *ids);
            *list = now;
        }
    }
    for (i = now.sinks + now.archive; i < now.n; i++) {
        int is_warm = i < now.sinks + now.archive + now.warm, end = tkvi_block_end(kv, &now, ids, i);
        int whole = i + 1 < now.n || end - tkvi_block_start(kv, ids, i) == TKVI_BLOCK;
        tkv_tier due = tkvi_tier_due(p, hot, end, len);
        if (due == TKV_HOT || (!whole && !partial)) break;
        if (is_warm && due == TKV_WARM) {
            i = now.sinks + now.archive + now.warm - 1; /* the younger warm ones stay as well */
            continue;
        }
        tkvi_demote(kv, seq, layer, i + (paper ? gone : 0), p->coding[due], paper);
        if (is_warm) now.warm--;
        if (due == TKV_ARCHIVE) now.archive++;
        else now.warm++;
    }
    if (!paper) *list = now;
}

/* Slots of a class that tkv_reserve holds for a sequence. */
static int64_t *tkvi_promised(tkv_cache *kv, int seq, int size_class) {
    return &kv->promised[(size_t)seq * (size_t)kv->tables.n_classes + (size_t)size_class];
}

/* >>paper: starts with what there is and what was promised */
static tkvi_peak tkvi_paper(tkv_cache *kv) {
    tkvi_peak k;
    int c;
    memset(&k, 0, sizeof k);
    k.tables = &kv->tables;
    k.live = kv->peak_live;
    for (c = 0; c < kv->tables.n_classes; c++) k.live[c] = kv->pool.live[c] + kv->pool.promised[c];
    tkvi_peak_note(&k);
    return k;
}

/* Does the tail have a block that takes another token? */
static int tkvi_tail_room(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                          const uint32_t *ids) {
    int last = list->n - 1, room;
    if (last < 0) return 0;
    if (last >= list->sinks && tkvi_tier_at(list, last) != TKV_HOT) return 0; /* flushed short */
    room = last < list->sinks ? p->sink : TKVI_BLOCK;
    return tkvi_max(0, room - (list->len - tkvi_block_start(kv, ids, last)));
}

/* Blocks that n more tokens open, and the sink block among them. */
static int tkvi_new_blocks(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list,
                           const uint32_t *ids, int n, int *sink) {
    int rest = n - tkvi_tail_room(kv, p, list, ids);
    *sink = rest > 0 && list->len == 0 && p->sink > 0;
    if (*sink) rest -= p->sink;
    return *sink + (rest > 0 ? (rest + TKVI_BLOCK - 1) / TKVI_BLOCK : 0);
}

static void tkvi_paper_append(tkv_cache *kv, int seq, int layer, int n, tkvi_peak *paper) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int sink, i, blocks = tkvi_new_blocks(kv, p, list, ids, n, &sink);
    if (tkvi_tail_room(kv, p, list, ids) && kv->pool.block[ids[list->n - 1]].refs > 1)
        tkvi_peak_take(paper, kv->pool.block[ids[list->n - 1]].coding); /* copied before it is written to */
    for (i = 0; i < blocks; i++) tkvi_peak_take(paper, i < sink ? p->sink_coding : p->coding[TKV_HOT]);
}

/* >>reservations */
/* Blocks of each tier that a list may still grow by, if all coded ones are whole (none was flushed short). */
static void tkvi_headroom(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list, const uint32_t *ids,
                          int64_t *room) {
    int i, whole = 1;
    tkvi_most_blocks(&kv->tables.cfg, p, room);
    for (i = list->sinks; i < list->n; i++) {
        tkv_tier tier = tkvi_tier_at(list, i);
        room[tier] -= kv->pool.block[ids[i]].refs == 1; /* the slots of shared ones do not come back */
        if (tier != TKV_HOT)
            whole &= tkvi_block_end(kv, list, ids, i) - tkvi_block_start(kv, ids, i) == TKVI_BLOCK;
    }
    for (i = 0; i < TKV_TIER_COUNT && !whole; i++) room[i] = TKVI_FOREVER;
}

/* Adds to live[class], `sign` times, what one layer of seq may still take on its way to the reserved length:
 * each new block, and each block that comes of age, without counting on what is freed meanwhile, so that any
 * chunking fits; but no more of a tier than it ever has. A layer that takes and gives on its way needs less
 * by what it took and at most more by what it gave: live + need never grows. Returns 0 if it is there. */
static int tkvi_add_need(tkv_cache *kv, int seq, int layer, int sign, int64_t *live) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_coding *coding = kv->tables.coding;
    int len = kv->seq[seq].reserved_len, at, sink, blocks, i, tier;
    int64_t need[TKV_TIER_COUNT], room[TKV_TIER_COUNT];
    /* a step that reaches the length may still be aborted */
    if (p->stored != layer || (kv->seq[seq].in_step ? list->step_len : list->len) >= len) return 0;
    memset(need, 0, sizeof need);
    blocks = tkvi_new_blocks(kv, p, list, ids, tkvi_max(0, len - list->len), &sink);
    need[TKV_HOT] = blocks - sink;
    if (tkvi_tail_room(kv, p, list, ids) && kv->pool.block[ids[list->n - 1]].refs > 1) need[TKV_HOT]++;
    /* Where blocks will end at that length: the same whether they are full by now, or cut again later. */
    at = tkvi_min(len, list->len + tkvi_tail_room(kv, p, list, ids));
    for (i = list->sinks + list->archive; i < list->n + blocks - sink; i++) {
        tkv_tier due;
        if (i == list->n && sink) at = tkvi_min(len, at + p->sink);
        if (i >= list->n) at = tkvi_min(len, at + TKVI_BLOCK);
        due = tkvi_tier_due(p, p->hot, i + 1 < list->n ? tkvi_block_end(kv, list, ids, i) : at, len);
        need[TKV_WARM] += due != TKV_HOT && (i >= list->n || tkvi_tier_at(list, i) == TKV_HOT);
        need[TKV_ARCHIVE] += due == TKV_ARCHIVE;
    }
    tkvi_headroom(kv, p, list, ids, room);
    if (sink) live[coding[p->sink_coding].size_class] += sign;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        if (need[tier] > room[tier]) need[tier] = room[tier];
        if (need[tier] > 0) live[coding[p->coding[tier]].size_class] += sign * need[tier];
    }
    return 1;
}

/* Promises seq the slots that bring all its layers to length `len`; 0 takes the promise back. */
static void tkvi_promise(tkv_cache *kv, int seq, int len) {
    int layer, c, waiting = 0;
    int64_t *mine = tkvi_promised(kv, seq, 0);
    for (c = 0; c < kv->tables.n_classes; c++) {
        kv->pool.promised[c] -= mine[c];
        mine[c] = 0;
    }
    kv->seq[seq].reserved_len = len;
    for (layer = 0; layer < kv->tables.cfg.n_layers && len > 0; layer++)
        waiting |= tkvi_add_need(kv, seq, layer, 1, mine);
    for (c = 0; c < kv->tables.n_classes; c++) kv->pool.promised[c] += mine[c];
    if (!waiting) kv->seq[seq].reserved_len = 0;
}

/* An append of n tokens on paper, ageing first. What the layer was promised pays for it; while the promised
 * length is not passed, the rest of the promise stays, and promise and slots together do not grow. A step that
 * passes it keeps the promise as well: it may be aborted. */
static void tkvi_paper_row(tkv_cache *kv, int seq, int layer, int n, tkvi_peak *paper) {
    const tkvi_seq *s = &kv->seq[seq];
    int64_t *before = paper->live + kv->tables.n_classes;
    size_t bytes = (size_t)kv->tables.n_classes * sizeof *before;
    int promised, len = tkvi_list_of(kv, seq, layer)->len + n;
    memcpy(before, paper->live, bytes);
    promised = tkvi_add_need(kv, seq, layer, -1, paper->live);
    if (!s->in_step) tkvi_age(kv, seq, layer, kv->tables.plan[layer].hot, 0, paper);
    tkvi_paper_append(kv, seq, layer, n, paper);
    if (promised && (len < s->reserved_len || (s->in_step && len == s->reserved_len)))
        memcpy(paper->live, before, bytes);
    else if (promised && s->in_step) (void)tkvi_add_need(kv, seq, layer, 1, paper->live);
    tkvi_peak_note(paper);
}

/* After any change of a sequence: what is still promised to it, and what can go back to the allocator. */
static void tkvi_settle(tkv_cache *kv, int seq) {
    if (kv->seq[seq].reserved_len) tkvi_promise(kv, seq, kv->seq[seq].reserved_len);
    tkvi_trim(&kv->pool);
}

/* >>storing tokens */
typedef struct tkvi_source { /* one of k, v of an append */
    const void *data;
    tkv_type type;
    ptrdiff_t token_stride, head_stride; /* in elements */
    int dim;
} tkvi_source;

static void tkvi_load_row(const tkvi_source *s, int token, int head, float *row) {
    ptrdiff_t at = token * s->token_stride + head * s->head_stride;
    int c;
    if (s->type == TKV_TYPE_F32)
        memcpy(row, (const char *)s->data + at * (ptrdiff_t)sizeof(float), (size_t)s->dim * sizeof(float));
    else
        for (c = 0; c < s->dim; c++) row[c] = tkvi_element(s->data, s->type, at + c);
}

static int tkvi_source_finite(const tkvi_source *s, int n, int heads) {
    float row[TKV_MAX_HEAD_DIM];
    int t, h, c, bad = 0;
    for (t = 0; t < n; t++)
        for (h = 0; h < heads; h++) {
            tkvi_load_row(s, t, h, row);
            for (c = 0; c < s->dim; c++) bad |= !tkvi_is_finite(row[c]);
        }
    return !bad;
}

static float tkvi_saturate(float x) {
    if (tkvi_is_finite(x)) return x;
    if (tkvi_bits(x) & 0x7fffffu) return 0.0f; /* NaN */
    return tkvi_bits(x) >> 31 ? -TKVI_F16_MAX : TKVI_F16_MAX;
}

static void tkvi_store_row(const tkvi_side *side, const tkvi_source *s, int token, int head, int at,
                           int saturate, uint8_t *dst) {
    float row[TKV_MAX_HEAD_DIM];
    int c;
    tkvi_load_row(s, token, head, row);
    for (c = 0; saturate && c < s->dim; c++) row[c] = tkvi_saturate(row[c]);
    side->format->side[side->which].put(side, row, at, dst);
}

/* The last block if it has room, its own copy if others hold it too, or a new one. */
static uint32_t tkvi_open_block(tkv_cache *kv, int seq, int layer) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer), id;
    if (tkvi_tail_room(kv, p, list, ids)) {
        id = ids[list->n - 1];
        if (kv->pool.block[id].refs > 1) {
            uint32_t mine = tkvi_new_block(&kv->pool, kv->pool.block[id].coding, kv->pool.block[id].start);
            memcpy(tkvi_block_bytes(&kv->pool, &kv->pool.block[mine]),
                   tkvi_block_bytes(&kv->pool, &kv->pool.block[id]),
                   kv->tables.coding[kv->pool.block[id].coding].block_bytes);
            kv->pool.block[id].refs--;
            ids[list->n - 1] = id = mine;
        }
        return id;
    }
    {
        int sink = list->len == 0 && p->sink > 0, coding = sink ? p->sink_coding : p->coding[TKV_HOT];
        id = tkvi_new_block(&kv->pool, coding, list->len);
        memset(tkvi_block_bytes(&kv->pool, &kv->pool.block[id]), 0, kv->tables.coding[coding].block_bytes);
        list->sinks += sink;
        ids[list->n++] = id;
        return id;
    }
}

static void tkvi_store(tkv_cache *kv, int seq, int layer, const tkvi_source *k, const tkvi_source *v,
                       int first, int n) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int t, h, saturate = kv->tables.cfg.nonfinite == TKV_NONFINITE_SATURATE;
    for (t = 0; t < n; t++) {
        const tkvi_block *b = &kv->pool.block[tkvi_open_block(kv, seq, layer)];
        const tkvi_coding *c = &kv->tables.coding[b->coding];
        uint8_t *bytes = tkvi_block_bytes(&kv->pool, b);
        int at = list->len - b->start;
        for (h = 0; h < kv->tables.cfg.n_kv_heads; h++) {
            const tkvi_record *r = &c->record[h];
            tkvi_store_row(&r->k, k, first + t, h, at, saturate, bytes + r->at);
            tkvi_store_row(&r->v, v, first + t, h, at, saturate, bytes + r->at + r->v_at);
        }
        list->len++;
    }
}

/* >>append */
static int tkvi_seq_ok(const tkv_cache *kv, int seq) {
    return kv && seq >= 0 && seq < kv->tables.cfg.max_seqs;
}

/* Blocks that a list may need room for: those it has, the new ones, and a spare. */
static int tkvi_list_want(const tkv_cache *kv, int seq, int layer, int n) {
    int sink;
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    return list->n + tkvi_new_blocks(kv, &kv->tables.plan[layer], list, tkvi_ids(kv, seq, layer), n, &sink) +
           1;
}

static tkv_status tkvi_check_rows(tkv_cache *kv, int layer, const tkv_rows *rows, int n_rows, int *total) {
    const tkv_config *cfg = &kv->tables.cfg;
    int i, j;
    *total = 0;
    for (i = 0; i < n_rows; i++) {
        const tkvi_list *list;
        int room;
        if (!tkvi_seq_ok(kv, rows[i].seq))
            return tkvi_fail(kv, TKV_ERR_ARG, "there is no sequence", rows[i].seq, "");
        if (rows[i].n < 0) return tkvi_fail(kv, TKV_ERR_ARG, "n is", rows[i].n, "; it must not be negative");
        for (j = 0; j < i; j++)
            if (rows[j].seq == rows[i].seq)
                return tkvi_fail(kv, TKV_ERR_ARG, "sequence", rows[i].seq, " is in the batch twice");
        list = tkvi_list_of(kv, rows[i].seq, layer);
        room = cfg->max_append - (kv->seq[rows[i].seq].in_step ? list->len - list->step_len : 0);
        if (rows[i].n > room)
            return tkvi_fail(kv, TKV_ERR_CAPACITY, "max_append leaves room for", room,
                             " more tokens here; append them in chunks");
        if (rows[i].n > cfg->max_tokens - list->len)
            return tkvi_fail(kv, TKV_ERR_CAPACITY, "max_tokens leaves room for", cfg->max_tokens - list->len,
                             " more tokens");
        if (rows[i].n > TKVI_FOREVER - *total)
            return tkvi_fail(kv, TKV_ERR_CAPACITY, "the batch has more tokens than", TKVI_FOREVER, "");
        *total += rows[i].n;
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_append_ex(tkv_cache *kv, const tkv_append_params *p) {
    const tkv_config *cfg;
    tkv_rows one;
    const tkv_rows *rows;
    tkvi_source k, v;
    tkvi_peak paper;
    tkv_status st;
    int n_rows, i, total, first = 0;
    if (!kv) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    if (!p) return tkvi_fail(kv, TKV_ERR_ARG, "the parameters are missing", 0, NULL);
    one.seq = p->seq;
    one.n = p->n;
    rows = p->batch ? p->batch : &one;
    n_rows = p->batch ? p->n_batch : 1;
    if (n_rows < 0 || n_rows > cfg->max_seqs)
        return tkvi_fail(kv, TKV_ERR_ARG, "n_batch is", n_rows, "; it must be at most max_seqs");
    if (p->layer < 0 || p->layer >= cfg->n_layers)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no layer", p->layer, "");
    if (kv->tables.plan[p->layer].stored != p->layer)
        return tkvi_fail(kv, TKV_ERR_ARG, "layer", p->layer,
                         " has no K and V of its own (share_kv or no_cache)");
    if ((unsigned)p->k_type > TKV_TYPE_BF16 || (unsigned)p->v_type > TKV_TYPE_BF16)
        return tkvi_fail(kv, TKV_ERR_ARG, "k_type and v_type must be tkv_type", 0, NULL);
    st = tkvi_check_rows(kv, p->layer, rows, n_rows, &total);
    if (st) return st;
    if (total == 0) return tkvi_ok(kv);
    if (!p->k || !p->v) return tkvi_fail(kv, TKV_ERR_ARG, "k or v is missing", 0, NULL);
    k.data = p->k;
    k.type = p->k_type;
    k.dim = cfg->head_dim;
    k.head_stride = p->k_head_stride ? p->k_head_stride : cfg->head_dim;
    k.token_stride = p->k_token_stride ? p->k_token_stride : (ptrdiff_t)cfg->n_kv_heads * cfg->head_dim;
    v.data = p->v;
    v.type = p->v_type;
    v.dim = cfg->v_head_dim;
    v.head_stride = p->v_head_stride ? p->v_head_stride : cfg->v_head_dim;
    v.token_stride = p->v_token_stride ? p->v_token_stride : (ptrdiff_t)cfg->n_kv_heads * cfg->v_head_dim;
    if (cfg->nonfinite == TKV_NONFINITE_REFUSE &&
        (!tkvi_source_finite(&k, total, cfg->n_kv_heads) || !tkvi_source_finite(&v, total, cfg->n_kv_heads)))
        return tkvi_fail(kv, TKV_ERR_NONFINITE, "there is a NaN or an infinity in k or v of layer", p->layer,
                         " (cfg.nonfinite can saturate them)");
    paper = tkvi_paper(kv);
    for (i = 0; i < n_rows; i++)
        if (rows[i].n) tkvi_paper_row(kv, rows[i].seq, p->layer, rows[i].n, &paper);
    for (i = 0; i < n_rows; i++)
        if (rows[i].n &&
            !tkvi_grow_lists(kv, rows[i].seq, tkvi_list_want(kv, rows[i].seq, p->layer, rows[i].n)))
            goto no_memory;
    if (!tkvi_peak_ready(&kv->pool, &paper)) goto no_memory;
    for (i = 0; i < n_rows; i++) {
        if (rows[i].n == 0) continue;
        if (!kv->seq[rows[i].seq].in_step)
            tkvi_age(kv, rows[i].seq, p->layer, kv->tables.plan[p->layer].hot, 0, NULL);
        tkvi_store(kv, rows[i].seq, p->layer, &k, &v, first, rows[i].n);
        first += rows[i].n;
    }
    for (i = 0; i < n_rows; i++) tkvi_settle(kv, rows[i].seq); /* not before: the batch shares its pages */
    return tkvi_ok(kv);
no_memory:
    if (kv->pool.keep_all)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "the memory given to tkv_init_in_place is full", 0, NULL);
    return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for", total, " more tokens");
}

TKV_API tkv_status tkv_append(tkv_cache *kv, int seq, int layer, const float *k, const float *v, int n) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.k = k;
    p.v = v;
    return tkv_append_ex(kv, &p);
}

/* >>all layers of a sequence age at once, or nothing happens */
static tkv_status tkvi_age_all(tkv_cache *kv, int seq, int flush, int partial) {
    tkvi_peak paper;
    int layer, pass;
    paper = tkvi_paper(kv);
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) tkvi_add_need(kv, seq, layer, -1, paper.live);
    for (pass = 0; pass < 2; pass++) {
        for (layer = 0; layer < kv->tables.cfg.n_layers && kv->seq[seq].block; layer++)
            if (kv->tables.plan[layer].stored == layer)
                tkvi_age(kv, seq, layer,
                         flush && kv->tables.plan[layer].hot != TKVI_FOREVER ? 0 : kv->tables.plan[layer].hot,
                         partial, pass ? NULL : &paper);
        if (pass == 0 && !tkvi_peak_ready(&kv->pool, &paper))
            return tkvi_fail(kv, kv->pool.keep_all ? TKV_ERR_CAPACITY : TKV_ERR_NOMEM,
                             "no memory to recode blocks", 0, NULL);
    }
    tkvi_settle(kv, seq);
    return tkvi_ok(kv);
}

static tkv_status tkvi_seq_bad(tkv_cache *kv, int seq) {
    return kv ? tkvi_fail(kv, TKV_ERR_ARG, "there is no sequence", seq, "") : TKV_ERR_ARG;
}

TKV_API tkv_status tkv_flush(tkv_cache *kv, int seq, tkv_flush_mode mode) {
    tkv_status st;
    if (!tkvi_seq_ok(kv, seq)) return tkvi_seq_bad(kv, seq);
    if ((unsigned)mode > TKV_FLUSH_ALL)
        return tkvi_fail(kv, TKV_ERR_ARG, "mode must be a tkv_flush_mode", 0, NULL);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first", 0, NULL);
    st = tkvi_age_all(kv, seq, mode != TKV_FLUSH_DUE, mode == TKV_FLUSH_ALL);
    if (st == TKV_OK && mode != TKV_FLUSH_DUE) { /* it took other slots than were promised */
        tkvi_promise(kv, seq, 0);
        tkvi_trim(&kv->pool);
    }
    return st;
}

/* >>steps */
TKV_API tkv_status tkv_begin(tkv_cache *kv, int seq) {
    tkv_status st;
    int layer;
    if (!tkvi_seq_ok(kv, seq)) return tkvi_seq_bad(kv, seq);
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open already; commit or abort it first", 0, NULL);
    st = tkvi_age_all(kv, seq, 0, 0);
    if (st) return st;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        tkvi_list *list = tkvi_list_of(kv, seq, layer);
        list->step_len = list->len;
    }
    kv->seq[seq].in_step = 1;
    return TKV_OK;
}

TKV_API tkv_status tkv_commit(tkv_cache *kv, int seq) {
    int layer, n = -1;
    if (!tkvi_seq_ok(kv, seq)) return tkvi_seq_bad(kv, seq);
    if (!kv->seq[seq].in_step) return tkvi_fail(kv, TKV_ERR_STATE, "no step is open", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (kv->tables.plan[layer].stored != layer) continue;
        if (n < 0) n = list->len - list->step_len;
        if (list->len - list->step_len != n)
            return tkvi_fail(kv, TKV_ERR_STATE, "not as many tokens as the first layer got: layer", layer,
                             "");
    }
    kv->seq[seq].in_step = 0;
    tkvi_settle(kv, seq);
    return tkvi_ok(kv);
}

/* Keeps the first `len` tokens of a layer; the cut is in the tail or the sinks. */
static void tkvi_cut(tkv_cache *kv, int seq, int layer, int len) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer);
    while (list->n > 0 && tkvi_block_start(kv, ids, list->n - 1) >= len) {
        list->n--;
        if (list->n < list->sinks) list->sinks = list->n;
        tkvi_release_block(&kv->pool, ids[list->n]);
    }
    list->len = len;
}

TKV_API tkv_status tkv_abort(tkv_cache *kv, int seq) {
    int layer;
    if (!tkvi_seq_ok(kv, seq)) return tkvi_seq_bad(kv, seq);
    if (!kv->seq[seq].in_step) return tkvi_fail(kv, TKV_ERR_STATE, "no step is open", 0, NULL);
    kv->seq[seq].in_step = 0;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        if (list->len > list->step_len) tkvi_cut(kv, seq, layer, list->step_len);
    }
    tkvi_settle(kv, seq);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_reserve(tkv_cache *kv, int seq, int n) {
    tkvi_peak paper;
    int len, layer, had;
    if (!tkvi_seq_ok(kv, seq)) return tkvi_seq_bad(kv, seq);
    if (n < 1 || n > kv->tables.cfg.max_append)
        return tkvi_fail(kv, TKV_ERR_ARG, "n is", n, "; it must be 1 to max_append");
    len = tkv_seq_len(kv, seq);
    if (n > kv->tables.cfg.max_tokens - len)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "max_tokens leaves room for", kv->tables.cfg.max_tokens - len,
                         " more tokens");
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        int more = len + n - tkvi_list_of(kv, seq, layer)->len;
        if (kv->tables.plan[layer].stored == layer && more > 0 &&
            !tkvi_grow_lists(kv, seq, tkvi_list_want(kv, seq, layer, more)))
            goto no_memory;
    }
    had = kv->seq[seq].reserved_len;
    tkvi_promise(kv, seq, tkvi_max(had, len + n));
    paper = tkvi_paper(kv);
    if (tkvi_peak_ready(&kv->pool, &paper)) return tkvi_ok(kv);
    tkvi_promise(kv, seq, had); /* as it was */
    tkvi_trim(&kv->pool);
no_memory:
    return tkvi_fail(kv, kv->pool.keep_all ? TKV_ERR_CAPACITY : TKV_ERR_NOMEM, "no memory to reserve", n,
                     " tokens");
}

/* The layer whose blocks `layer` of seq reads; -1 if there is no such sequence or layer, or it has no cache. */
static int tkvi_stored_layer(const tkv_cache *kv, int seq, int layer) {
    if (!tkvi_seq_ok(kv, seq) || layer < 0 || layer >= kv->tables.cfg.n_layers) return -1;
    return kv->tables.plan[layer].stored;
}

/* >>cutting */
TKV_API int tkv_layer_len(const tkv_cache *kv, int seq, int layer) {
    layer = tkvi_stored_layer(kv, seq, layer);
    return layer < 0 ? 0 : tkvi_list_of(kv, seq, layer)->len;
}

TKV_API int tkv_seq_len(const tkv_cache *kv, int seq) {
    int layer, len = -1;
    if (!tkvi_seq_ok(kv, seq)) return 0;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++)
        if (kv->tables.plan[layer].stored == layer) {
            int n = tkvi_list_of(kv, seq, layer)->len;
            len = len < 0 ? n : tkvi_min(len, n);
        }
    return len;
}

TKV_API tkv_status tkv_truncate(tkv_cache *kv, int seq, int n_tokens) {
    int layer;
    if (!tkvi_seq_ok(kv, seq)) return tkvi_seq_bad(kv, seq);
    if (n_tokens < 0) return tkvi_fail(kv, TKV_ERR_ARG, "n_tokens is", n_tokens, "; it must not be negative");
    if (kv->seq[seq].in_step)
        return tkvi_fail(kv, TKV_ERR_STATE, "a step is open; commit or abort it first", 0, NULL);
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        const tkvi_plan *p = &kv->tables.plan[layer];
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        int coded = list->archive + list->warm, must = 0;
        if (p->stored != layer || list->len <= n_tokens) continue;
        if (coded) must = tkvi_block_end(kv, list, ids, list->sinks + coded - 1);
        if (list->dropped && list->dropped + p->keep > must) must = list->dropped + p->keep;
        if (n_tokens < must)
            return tkvi_fail(kv, TKV_ERR_INEXACT, "older tokens are compressed or gone; at least", must,
                             " must stay");
    }
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++)
        if (tkvi_list_of(kv, seq, layer)->len > n_tokens) tkvi_cut(kv, seq, layer, n_tokens);
    tkvi_settle(kv, seq);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_reset(tkv_cache *kv, int seq) {
    tkvi_seq *s;
    int layer;
    if (!tkvi_seq_ok(kv, seq)) return tkvi_seq_bad(kv, seq);
    s = &kv->seq[seq];
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        while (list->n > 0) tkvi_release_block(&kv->pool, ids[--list->n]);
        memset(list, 0, sizeof *list);
    }
    s->in_step = 0;
    tkvi_promise(kv, seq, 0);
    if (!kv->pool.keep_all) {
        tkvi_put(&kv->heap, s->block, (size_t)s->cap * (size_t)kv->tables.cfg.n_layers * sizeof(uint32_t));
        s->block = NULL;
        s->cap = 0;
    }
    tkvi_trim(&kv->pool);
    return tkvi_ok(kv);
}

/* >>reading */
TKV_API tkv_status tkv_read(tkv_cache *kv, int seq, int layer, int start, int n, float *k, float *v) {
    const tkv_config *cfg;
    const tkvi_list *list;
    const uint32_t *ids;
    int i, h;
    layer = tkvi_stored_layer(kv, seq, layer);
    if (layer < 0 || start < 0 || n < 0) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    list = tkvi_list_of(kv, seq, layer);
    ids = tkvi_ids(kv, seq, layer);
    if (start < list->dropped || start > list->len || n > list->len - start) return TKV_ERR_RANGE;
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        const tkvi_coding *c = &kv->tables.coding[b->coding];
        const uint8_t *bytes = tkvi_block_bytes(&kv->pool, b);
        int from = tkvi_max(start, b->start), to = tkvi_min(start + n, tkvi_block_end(kv, list, ids, i));
        size_t row = (size_t)(from - start) * (size_t)cfg->n_kv_heads;
        for (h = 0; h < cfg->n_kv_heads && from < to; h++) {
            const tkvi_record *r = &c->record[h];
            size_t dk = (size_t)cfg->head_dim, dv = (size_t)cfg->v_head_dim, heads = (size_t)cfg->n_kv_heads;
            if (k)
                tkvi_decode_side(&r->k, bytes + r->at, from - b->start, to - from, k + (row + (size_t)h) * dk,
                                 heads * dk);
            if (v)
                tkvi_decode_side(&r->v, bytes + r->at + r->v_at, from - b->start, to - from,
                                 v + (row + (size_t)h) * dv, heads * dv);
        }
    }
    return TKV_OK;
}

#endif /* TKVI_SEQUENCE_H */
/* ======== attend.h ======== */
/*
 * attend.h - attention over all tiers: one online softmax, nothing decoded into memory.
 * Online softmax: Milakov and Gimelshein (arXiv 1805.02867); split over keys and merge by log-sum-exp:
 * Flash-Decoding, FlashAttention-2 (arXiv 2307.08691, section 3). May call cache and below; reads only.
 *
 *     for each sequence of the batch, KV head, tile of up to 8 query rows          (a unit)
 *         for each chunk of blocks (at most 16, by the number of blocks alone)     (a part)
 *             for each block: scores -> mask -> (m, l, o) of the part
 *         the parts merge in order into the unit's (m, l, o) -> out
 *
 * The rows of a tile are neighbouring queries times the query heads of the group, so that one read of a
 * record serves them all. Threads take parts, or whole units when there are many; the merge is the same
 * in both cases, so are the bits (and the functions are not inlined, lest a compiler fuses multiplications and
 * additions here and not there).
 *
 * Scores are relative to a reference key (what recent keys share): see kernels.h. `origin` = scale q.ref brings the
 * absolute logit back where it matters: softcap, learned sinks, log-sum-exp.
 */
#ifndef TKVI_ATTEND_H
#define TKVI_ATTEND_H


#define TKVI_HIDDEN (-1e30f) /* score of a key that a row does not see; no infinities, -ffast-math has none */
#define TKVI_IS_HIDDEN(s) (!((s) > TKVI_HIDDEN))

/* >>the call, checked and with defaults filled in */
typedef struct tkvi_call {
    tkv_cache *kv;
    const tkv_attend_params *p;
    const tkvi_plan *plan; /* of the layer asked for: its window; the blocks are those of plan->stored */
    const tkv_rows *rows;
    tkv_rows one;
    int n_rows, window;
    int heads_per_kv;
    float scale;
    ptrdiff_t q_row, q_head, out_row, out_head, mask_stride, bits_stride, mass_stride;
} tkvi_call;

static tkv_status tkvi_call_init(tkvi_call *c, tkv_cache *kv, const tkv_attend_params *p) {
    const tkv_config *cfg;
    int i, longest = 0;
    int64_t rows = 0;
    if (!kv || !p) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    memset(c, 0, sizeof *c);
    c->kv = kv;
    c->p = p;
    c->one.seq = p->seq;
    c->one.n = p->n;
    c->rows = p->batch ? p->batch : &c->one;
    c->n_rows = p->batch ? p->n_batch : 1;
    if (p->layer < 0 || p->layer >= cfg->n_layers || c->n_rows < 0 || c->n_rows > cfg->max_seqs)
        return TKV_ERR_ARG;
    c->plan = &kv->tables.plan[p->layer];
    if (c->plan->stored < 0 || p->window < TKV_NONE) return TKV_ERR_ARG;
    c->heads_per_kv = cfg->n_heads / cfg->n_kv_heads;
    c->window = p->window == TKV_NONE ? 0 : p->window ? p->window : c->plan->window;
    for (i = 0; i < c->n_rows; i++) {
        const tkvi_list *list;
        int64_t oldest;
        int len;
        if (c->rows[i].seq < 0 || c->rows[i].seq >= cfg->max_seqs || c->rows[i].n < 0) return TKV_ERR_ARG;
        list = tkvi_list_of(kv, c->rows[i].seq, c->plan->stored);
        len = list->len;
        if (!p->non_causal && c->rows[i].n > len) return TKV_ERR_RANGE;
        /* what the first query sees must not be gone: a window wider than the layer's, or a query too old */
        oldest = c->window ? (int64_t)len - c->rows[i].n + 1 - c->window : 0;
        if (list->dropped && c->rows[i].n && oldest < list->dropped) return TKV_ERR_RANGE;
        rows += (int64_t)c->rows[i].n * cfg->n_heads;
        longest = tkvi_max(longest, len);
    }
    if (!p->q || !p->out || (p->mass && !p->lse)) return TKV_ERR_ARG;
    if ((unsigned)p->q_type > TKV_TYPE_BF16 || (unsigned)p->out_type > TKV_TYPE_BF16) return TKV_ERR_ARG;
    if (rows > TKVI_FOREVER || p->mask_bits_n < 0 || (p->mask_bits && !p->mask_bits_n)) return TKV_ERR_ARG;
    if (!tkvi_is_finite(p->scale) || !tkvi_is_finite(p->softcap) || p->softcap < 0.0f) return TKV_ERR_ARG;
    c->scale = p->scale != 0.0f ? p->scale : cfg->scale;
    c->q_head = p->q_head_stride ? p->q_head_stride : cfg->head_dim;
    c->q_row = p->q_row_stride ? p->q_row_stride : (ptrdiff_t)cfg->n_heads * cfg->head_dim;
    c->out_head = p->out_head_stride ? p->out_head_stride : cfg->v_head_dim;
    c->out_row = p->out_row_stride ? p->out_row_stride : (ptrdiff_t)cfg->n_heads * cfg->v_head_dim;
    c->mask_stride = p->mask_stride ? p->mask_stride : longest;
    c->bits_stride =
        p->mask_bits_stride ? p->mask_bits_stride : p->mask_bits_n / 64 + (p->mask_bits_n % 64 > 0);
    c->mass_stride = p->mass_stride ? p->mass_stride : longest;
    return p->mass && c->mass_stride < longest ? TKV_ERR_ARG : TKV_OK;
}

/* >>unit: a tile of query rows of one KV head of one sequence */
typedef struct tkvi_unit {
    const tkvi_call *call;
    const tkvi_list *list;
    const uint32_t *ids;
    int seq_row;         /* number of the sequence's first query row in q and out */
    int item;            /* entry of the batch */
    int n_queries, head; /* of the sequence; KV head */
    int first, rows;     /* of the n_queries * heads_per_kv rows: query first / heads_per_kv, ... */
    int k_pad, v_pad;
    int chunk, n_chunks; /* blocks per part, parts */
    int low, high;       /* positions that any row sees: low .. high-1 */
} tkvi_unit;

/* Row r of a unit. */
static int tkvi_query_of(const tkvi_unit *u, int r) { return (u->first + r) / u->call->heads_per_kv; }

static int tkvi_head_of(const tkvi_unit *u, int r) {
    return u->head * u->call->heads_per_kv + (u->first + r) % u->call->heads_per_kv;
}

/* Position of query i, and the keys it sees by causality and window: low .. high-1. */
static int tkvi_position(const tkvi_unit *u, int query) { return u->list->len - u->n_queries + query; }

static void tkvi_visible(const tkvi_unit *u, int query, int *low, int *high) {
    int at = tkvi_position(u, query), window = u->call->window;
    *high = u->call->p->non_causal ? u->list->len : at + 1;
    *low = window && at + 1 > window ? at + 1 - window : 0;
}

static int tkvi_tiles_of(const tkvi_call *c, int n_queries) {
    return (n_queries * c->heads_per_kv + TKVI_ROWS - 1) / TKVI_ROWS;
}

static void tkvi_unit_init(tkvi_unit *u, const tkvi_call *c, int item, int seq_row, int head, int tile) {
    const tkv_config *cfg = &c->kv->tables.cfg;
    int seq = c->rows[item].seq, r;
    u->call = c;
    u->list = tkvi_list_of(c->kv, seq, c->plan->stored);
    u->ids = tkvi_ids(c->kv, seq, c->plan->stored);
    u->item = item;
    u->seq_row = seq_row;
    u->n_queries = c->rows[item].n;
    u->head = head;
    u->first = tile * TKVI_ROWS;
    u->rows = tkvi_min(TKVI_ROWS, u->n_queries * c->heads_per_kv - u->first);
    u->k_pad = tkvi_round_up(cfg->head_dim, 16);
    u->v_pad = tkvi_round_up(cfg->v_head_dim, 16);
    u->chunk = tkvi_max(4, (u->list->n + TKVI_MAX_CHUNKS - 1) / TKVI_MAX_CHUNKS);
    u->n_chunks = (u->list->n + u->chunk - 1) / u->chunk;
    u->low = u->list->len;
    u->high = 0;
    for (r = 0; r < u->rows; r++) {
        int low, high;
        tkvi_visible(u, tkvi_query_of(u, r), &low, &high);
        u->low = tkvi_min(u->low, low);
        u->high = tkvi_max(u->high, high);
    }
}

/* Query rows of a unit, scaled, padded; the reference key and each row's origin. */
typedef struct tkvi_queries {
    float q[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    float ref[TKV_MAX_HEAD_DIM];
    float origin[TKVI_ROWS];
} tkvi_queries;

static const tkvi_record *tkvi_record_of(const tkvi_unit *u, int i, const uint8_t **bytes) {
    const tkvi_pool *pool = &u->call->kv->pool;
    const tkvi_block *b = &pool->block[u->ids[i]];
    const tkvi_record *r = &u->call->kv->tables.coding[b->coding].record[u->head];
    *bytes = tkvi_block_bytes(pool, b) + r->at;
    return r;
}

/* What the keys have in common, channel by channel: the middle one of three exact keys where they lie close
 * together, else 0. A bias of 600 on all keys is found, one huge key is not mistaken for it. */
static void tkvi_reference_key(const tkvi_unit *u, float *ref) {
    float key[3][TKV_MAX_HEAD_DIM];
    int last = u->list->n - 1, from, i, c;
    memset(ref, 0, TKV_MAX_HEAD_DIM * sizeof *ref);
    if (last < 0) return;
    from = last > 0 && tkvi_tier_at(u->list, last - 1) == TKV_HOT ? last - 1 : last;
    for (i = 0; i < 3; i++) { /* the newest, and the ends of the block before it (or of its own) */
        int block = i < 2 ? from : last, start = tkvi_block_start(u->call->kv, u->ids, block);
        int end = tkvi_block_end(u->call->kv, u->list, u->ids, block);
        const uint8_t *bytes;
        const tkvi_record *rec = tkvi_record_of(u, block, &bytes);
        tkvi_decode_side(&rec->k, bytes,
                         i == 0 ? 0 : end - 1 - start - (i == 1 && from == last && end - start > 2), 1,
                         key[i], 0);
    }
    for (c = 0; c < u->call->kv->tables.cfg.head_dim; c++) {
        float a = key[0][c], b = key[1][c], x = key[2][c], lo = a < b ? a : b, hi = a < b ? b : a;
        float middle = x < lo ? lo : x > hi ? hi : x;
        lo = x < lo ? x : lo;
        hi = x > hi ? x : hi;
        if (hi - lo < 0.25f * (middle < 0.0f ? -middle : middle)) ref[c] = middle;
    }
}

static void tkvi_load_queries(const tkvi_unit *u, tkvi_queries *q) {
    const tkvi_call *c = u->call;
    int dim = c->kv->tables.cfg.head_dim, r, i;
    tkvi_reference_key(u, q->ref);
    for (r = 0; r < u->rows; r++) {
        float *row = q->q + r * u->k_pad;
        ptrdiff_t at = (u->seq_row + tkvi_query_of(u, r)) * c->q_row + tkvi_head_of(u, r) * c->q_head;
        double origin = 0.0;
        for (i = 0; i < dim; i++) {
            row[i] = tkvi_element(c->p->q, c->p->q_type, at + i) * c->scale;
            origin += (double)row[i] * (double)q->ref[i];
        }
        for (; i < u->k_pad; i++) row[i] = 0.0f;
        q->origin[r] = (float)origin;
    }
}

/* >>scores of one block, with everything that changes or hides them */
static void tkvi_modify(const tkvi_unit *u, int r, float origin, int start, int n, float *s) {
    const tkv_attend_params *p = u->call->p;
    int query = tkvi_query_of(u, r), at = tkvi_position(u, query), low, high, t;
    int row = u->seq_row + query, bits_from = u->list->len - p->mask_bits_n;
    tkvi_visible(u, query, &low, &high);
    if (p->softcap > 0.0f)
        for (t = 0; t < n; t++) s[t] = p->softcap * tanhf((s[t] + origin) / p->softcap);
    if (p->alibi)
        for (t = 0; t < n; t++) s[t] += p->alibi[tkvi_head_of(u, r)] * (float)(start + t - at);
    if (p->mask)
        for (t = 0; t < n; t++) {
            float m = p->mask[row * u->call->mask_stride + start + t];
            s[t] = m > TKVI_HIDDEN ? s[t] + (m < -TKVI_HIDDEN ? m : -TKVI_HIDDEN) : TKVI_HIDDEN;
        }
    if (p->mask_bits)
        for (t = tkvi_max(0, bits_from - start); t < n; t++) {
            int bit = start + t - bits_from;
            if (!(p->mask_bits[row * u->call->bits_stride + bit / 64] >> bit % 64 & 1)) s[t] = TKVI_HIDDEN;
        }
    for (t = 0; t < n && start + t < low; t++) s[t] = TKVI_HIDDEN;
    for (t = tkvi_max(0, high - start); t < n; t++) s[t] = TKVI_HIDDEN;
    for (t = n; t < TKVI_BLOCK; t++) s[t] = TKVI_HIDDEN;
}

/* Where the record of the block after i begins, for prefetching; NULL after the last. */
static const uint8_t *tkvi_next_record(const tkvi_unit *u, int i) {
    const uint8_t *bytes = NULL;
    if (i + 1 < u->list->n) (void)tkvi_record_of(u, i + 1, &bytes);
    return bytes;
}

/* Scores of block i for all rows of the unit; 0 if no row sees any of it. */
static int tkvi_block_scores(const tkvi_unit *u, const tkvi_queries *q, int i, float *scores) {
    const tkv_cache *kv = u->call->kv;
    int start = tkvi_block_start(kv, u->ids, i), end = tkvi_block_end(kv, u->list, u->ids, i), r;
    const uint8_t *bytes;
    const tkvi_record *rec;
    if (end <= u->low || start >= u->high) return 0;
    rec = tkvi_record_of(u, i, &bytes);
    kv->kernels->k[rec->k.format->stored](&rec->k, bytes, tkvi_next_record(u, i), q->q, q->ref, u->rows,
                                          end - start, tkvi_planes(&rec->k, kv->tables.cfg.precise), scores);
    for (r = 0; r < u->rows; r++)
        tkvi_modify(u, r, q->origin[r], start, end - start, scores + r * TKVI_BLOCK);
    return 1;
}

/* >>part: the online softmax over one chunk of blocks */
static TKVI_NOINLINE void tkvi_part(const tkvi_unit *u, const tkvi_queries *q, int chunk, float *m, float *l,
                                    float *o) {
    const tkv_cache *kv = u->call->kv;
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK], p[TKVI_ROWS * TKVI_BLOCK];
    int i, r, t, k, last = tkvi_min(u->list->n, (chunk + 1) * u->chunk);
    memset(o, 0, (size_t)(u->rows * u->v_pad) * sizeof(float));
    for (r = 0; r < u->rows; r++) {
        m[r] = TKVI_HIDDEN;
        l[r] = 0.0f;
    }
    for (i = chunk * u->chunk; i < last; i++) {
        const uint8_t *bytes, *next = tkvi_next_record(u, i);
        const tkvi_record *rec;
        int seen = 0;
        if (!tkvi_block_scores(u, q, i, scores)) continue;
        for (r = 0; r < u->rows; r++) {
            const float *s = scores + r * TKVI_BLOCK;
            float *w = p + r * TKVI_BLOCK, most = kv->kernels->max64(s);
            if (TKVI_IS_HIDDEN(most)) {
                memset(w, 0, TKVI_BLOCK * sizeof(float));
                continue;
            }
            seen = 1;
            if (most > m[r]) {
                if (!TKVI_IS_HIDDEN(m[r])) { /* else o and l are still 0 */
                    float shrink = expf(m[r] - most), *row = o + r * u->v_pad;
                    for (t = 0; t < u->v_pad; t += 16) /* 16 at a time: vectors also at -O2 */
                        for (k = 0; k < 16; k++) row[t + k] *= shrink;
                    l[r] *= shrink;
                }
                m[r] = most;
            }
            l[r] += kv->kernels->exp64(s, m[r], w);
        }
        if (!seen) continue;
        rec = tkvi_record_of(u, i, &bytes);
        kv->kernels->v[rec->v.format->stored](
            &rec->v, bytes + rec->v_at, next ? next + rec->v_at : NULL, p, u->rows,
            tkvi_block_end(kv, u->list, u->ids, i) - tkvi_block_start(kv, u->ids, i),
            tkvi_planes(&rec->v, kv->tables.cfg.precise), o);
    }
}

/* (m, l, o) of one row grows by those of another set of keys. */
static TKVI_NOINLINE void tkvi_merge_row(float *m, float *l, float *o, float m2, float l2, const float *o2,
                                         int dim) {
    float a, b;
    int i, k;
    if (!(l2 > 0.0f)) return;
    if (!(*l > 0.0f)) {
        *m = m2;
        *l = l2;
        memcpy(o, o2, (size_t)dim * sizeof(float));
        return;
    }
    a = m2 > *m ? expf(*m - m2) : 1.0f;
    b = m2 > *m ? 1.0f : expf(m2 - *m);
    *m = m2 > *m ? m2 : *m;
    *l = *l * a + l2 * b;
    for (i = 0; i < dim; i += 16)
        for (k = 0; k < 16; k++) o[i + k] = o[i + k] * a + o2[i + k] * b;
}

/* The unit's rows go out; learned sinks join the sum. */
static TKVI_NOINLINE void tkvi_finish(const tkvi_unit *u, const tkvi_queries *q, float *m, float *l,
                                      const float *o) {
    const tkvi_call *c = u->call;
    int dim = c->kv->tables.cfg.v_head_dim, r, i;
    for (r = 0; r < u->rows; r++) {
        int head = tkvi_head_of(u, r), row = u->seq_row + tkvi_query_of(u, r);
        float origin = c->p->softcap > 0.0f ? 0.0f : q->origin[r], weight = 1.0f;
        ptrdiff_t at = row * c->out_row + head * c->out_head;
        int empty = !(l[r] > 0.0f);
        if (c->p->sinks && tkvi_is_finite(c->p->sinks[head])) {
            float s = c->p->sinks[head] - origin;
            if (empty) {
                m[r] = s;
                l[r] = 1.0f;
            } else if (s > m[r]) {
                weight = expf(m[r] - s);
                l[r] = l[r] * weight + 1.0f;
                m[r] = s;
            } else {
                l[r] += expf(s - m[r]);
            }
        }
        for (i = 0; i < dim; i++)
            tkvi_save_element(c->p->out, c->p->out_type, at + i,
                              empty ? 0.0f : o[r * u->v_pad + i] * weight / l[r]);
        if (c->p->lse)
            c->p->lse[(ptrdiff_t)row * c->kv->tables.cfg.n_heads + head] =
                l[r] > 0.0f ? m[r] + logf(l[r]) + origin : tkvi_from_bits(0xff800000u);
    }
}

/* >>work: units, serial or in parallel, whole or in parts */
typedef struct tkvi_work {
    const tkvi_call *call;
    int n_units, n_chunks;
    float *parts; /* [unit][chunk][TKVI_ROWS][v_pad + 2]: o, m, l */
} tkvi_work;

static int tkvi_count_units(const tkvi_call *c) {
    int i, n = 0;
    for (i = 0; i < c->n_rows; i++) n += tkvi_tiles_of(c, c->rows[i].n) * c->kv->tables.cfg.n_kv_heads;
    return n;
}

static void tkvi_find_unit(const tkvi_call *c, int number, tkvi_unit *u) {
    int i, row = 0, heads = c->kv->tables.cfg.n_kv_heads;
    for (i = 0;; i++) {
        int units = tkvi_tiles_of(c, c->rows[i].n) * heads;
        if (number < units) {
            tkvi_unit_init(u, c, i, row, number % heads, number / heads);
            return;
        }
        number -= units;
        row += c->rows[i].n;
    }
}

static float *tkvi_part_at(const tkvi_work *w, const tkvi_unit *u, int unit, int chunk) {
    return w->parts + (size_t)((unit * w->n_chunks + chunk) * TKVI_ROWS) * (size_t)(u->v_pad + 2);
}

static void tkvi_run_part(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    int chunk = index % w->n_chunks;
    float *o;
    TKVI_ALIGNED tkvi_queries q;
    tkvi_unit u;
    tkvi_find_unit(w->call, index / w->n_chunks, &u);
    if (chunk >= u.n_chunks) return;
    tkvi_load_queries(&u, &q);
    o = tkvi_part_at(w, &u, index / w->n_chunks, chunk);
    tkvi_part(&u, &q, chunk, o + TKVI_ROWS * u.v_pad, o + TKVI_ROWS * (u.v_pad + 1), o);
}

/* All parts of a unit, merged in order: those that tkvi_run_part left, or made here one by one. */
static void tkvi_run_unit(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    float m[TKVI_ROWS], l[TKVI_ROWS], m_here[TKVI_ROWS], l_here[TKVI_ROWS];
    TKVI_ALIGNED float o[TKVI_ROWS * TKV_MAX_HEAD_DIM], o_here[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED tkvi_queries q;
    tkvi_unit u;
    int chunk, r;
    tkvi_find_unit(w->call, index, &u);
    tkvi_load_queries(&u, &q);
    memset(l, 0, sizeof l);
    for (chunk = 0; chunk < u.n_chunks; chunk++) {
        const float *o2 = o_here, *m2 = m_here, *l2 = l_here;
        if (w->parts) {
            o2 = tkvi_part_at(w, &u, index, chunk);
            m2 = o2 + TKVI_ROWS * u.v_pad;
            l2 = m2 + TKVI_ROWS;
        } else {
            tkvi_part(&u, &q, chunk, m_here, l_here, o_here);
        }
        for (r = 0; r < u.rows; r++)
            tkvi_merge_row(&m[r], &l[r], o + r * u.v_pad, m2[r], l2[r], o2 + r * u.v_pad, u.v_pad);
    }
    tkvi_finish(&u, &q, m, l, o);
}

/* One caller at a time uses kv->parts. Where there are no atomics nobody does: units are the only cut then. */
static int tkvi_take_parts(tkv_cache *kv) {
    if (!kv->parts) return 0;
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_exchange_n(&kv->parts_taken, 1, __ATOMIC_ACQUIRE) == 0;
#else
    return 0;
#endif
}

static void tkvi_leave_parts(tkv_cache *kv) {
#if defined(__GNUC__) || defined(__clang__)
    __atomic_store_n(&kv->parts_taken, 0, __ATOMIC_RELEASE);
#else
    (void)kv;
#endif
}

/* >>mass: a second pass over the keys, when the sums are known. One task per chunk of key positions. */
#define TKVI_MASS_CHUNK 16 /* blocks */

static void tkvi_run_mass(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    const tkvi_call *c = w->call;
    float scores[TKVI_ROWS * TKVI_BLOCK];
    int number, i, r, t;
    for (number = 0; number < w->n_units; number++) {
        TKVI_ALIGNED tkvi_queries q;
        tkvi_unit u;
        int last;
        tkvi_find_unit(c, number, &u);
        last = tkvi_min(u.list->n, (index + 1) * TKVI_MASS_CHUNK);
        if (index * TKVI_MASS_CHUNK >= last) continue;
        tkvi_load_queries(&u, &q);
        for (i = index * TKVI_MASS_CHUNK; i < last; i++) {
            float *mass = c->p->mass + u.item * c->mass_stride + tkvi_block_start(c->kv, u.ids, i);
            if (!tkvi_block_scores(&u, &q, i, scores)) continue;
            for (r = 0; r < u.rows; r++) {
                int row = u.seq_row + tkvi_query_of(&u, r);
                float lse = c->p->lse[(ptrdiff_t)row * c->kv->tables.cfg.n_heads + tkvi_head_of(&u, r)];
                const float *s = scores + r * TKVI_BLOCK;
                if (c->p->softcap <= 0.0f) lse -= q.origin[r];
                for (t = 0; t < TKVI_BLOCK; t++)
                    if (!TKVI_IS_HIDDEN(s[t])) mass[t] += expf(tkvi_clampf(s[t] - lse, -87.0f, 0.0f));
            }
        }
    }
}

static void tkvi_for(const tkv_cache *kv, int n, tkv_task task, void *ctx) {
    int i;
    if (kv->tables.cfg.parallel_for && n > 1)
        kv->tables.cfg.parallel_for(kv->tables.cfg.parallel_user, n, task, ctx);
    else
        for (i = 0; i < n; i++) task(ctx, i);
}

/* >>public */
TKV_API tkv_status tkv_attend_ex(tkv_cache *kv, const tkv_attend_params *p) {
    tkvi_call c;
    tkvi_work w;
    int i, longest = 0;
    tkv_status st = tkvi_call_init(&c, kv, p);
    if (st) return st;
    w.call = &c;
    w.n_units = tkvi_count_units(&c);
    w.n_chunks = 0;
    w.parts = NULL;
    for (i = 0; i < c.n_rows; i++) {
        const tkvi_list *list = tkvi_list_of(kv, c.rows[i].seq, c.plan->stored);
        longest = tkvi_max(longest, list->n);
        if (p->mass) memset(p->mass + i * c.mass_stride, 0, (size_t)list->len * sizeof(float));
    }
    if (w.n_units == 0) return TKV_OK;
    w.n_chunks = tkvi_min(TKVI_MAX_CHUNKS, (longest + 3) / 4);
    if (w.n_chunks > 1 && w.n_units * w.n_chunks <= TKVI_MAX_PARTS && tkvi_take_parts(kv)) {
        w.parts = kv->parts;
        tkvi_for(kv, w.n_units * w.n_chunks, tkvi_run_part, &w);
        for (i = 0; i < w.n_units; i++) tkvi_run_unit(&w, i);
        tkvi_leave_parts(kv);
    } else {
        tkvi_for(kv, w.n_units, tkvi_run_unit, &w);
    }
    if (p->mass) tkvi_for(kv, (longest + TKVI_MASS_CHUNK - 1) / TKVI_MASS_CHUNK, tkvi_run_mass, &w);
    return TKV_OK;
}

TKV_API tkv_status tkv_attend(tkv_cache *kv, int seq, int layer, const float *q, int n, float *out) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.q = q;
    p.out = out;
    return tkv_attend_ex(kv, &p);
}

TKV_API void tkv_merge_lse(float *out, float *lse, const float *out2, const float *lse2, int n_rows,
                           int dim) {
    int r, i;
    for (r = 0; r < n_rows; r++) {
        int have = tkvi_is_finite(lse[r]), have2 = tkvi_is_finite(lse2[r]);
        float *o = out + (ptrdiff_t)r * dim;
        const float *o2 = out2 + (ptrdiff_t)r * dim;
        float top, a, b;
        if (!have2) continue;
        if (!have) {
            memcpy(o, o2, (size_t)dim * sizeof(float));
            lse[r] = lse2[r];
            continue;
        }
        top = lse[r] > lse2[r] ? lse[r] : lse2[r];
        a = expf(lse[r] - top);
        b = expf(lse2[r] - top);
        for (i = 0; i < dim; i++) o[i] = (o[i] * a + o2[i] * b) / (a + b);
        lse[r] = top + logf(a + b);
    }
}

#endif /* TKVI_ATTEND_H */
/* ======== reference.h ======== */
/*
 * reference.h - the slow definition of attention, for tests: decode each key and value, work in double, pass
 * after pass (maximum, sum, and the mass if asked). Shares with attend.h the check of the call and nothing of
 * the arithmetic. May call attend and below.
 */
#ifndef TKVI_REFERENCE_H
#define TKVI_REFERENCE_H


/* Logit of one key for query `query` of batch entry `item`, or 0 in *seen. */
static double tkvi_ref_logit(const tkvi_call *c, int item, int row, int query, int head, const float *key,
                             int j, int len, int *seen) {
    const tkv_attend_params *p = c->p;
    int at = len - c->rows[item].n + query, i;
    double s = 0.0;
    *seen = 0;
    if (!p->non_causal && j > at) return 0.0;
    if (c->window && at - j >= c->window) return 0.0;
    if (p->mask && !(p->mask[row * c->mask_stride + j] > TKVI_HIDDEN)) return 0.0;
    if (p->mask_bits && j >= len - p->mask_bits_n) {
        int bit = j - (len - p->mask_bits_n);
        if (!(p->mask_bits[row * c->bits_stride + bit / 64] >> bit % 64 & 1)) return 0.0;
    }
    *seen = 1;
    for (i = 0; i < c->kv->tables.cfg.head_dim; i++)
        s += (double)tkvi_element(p->q, p->q_type, row * c->q_row + head * c->q_head + i) * (double)key[i];
    s *= (double)c->scale;
    if (p->softcap > 0.0f) s = (double)p->softcap * tanh(s / (double)p->softcap);
    if (p->alibi) s += (double)p->alibi[head] * (double)(j - at);
    if (p->mask) {
        double m = (double)p->mask[row * c->mask_stride + j];
        s += m < -(double)TKVI_HIDDEN ? m : -(double)TKVI_HIDDEN;
    }
    return s;
}

/* One head of one row. Pass 0 finds the maximum, pass 1 sums, pass 2 is for the mass. */
static void tkvi_ref_row(const tkvi_call *c, int item, int row, int query, int head) {
    const tkv_cache *kv = c->kv;
    const tkv_config *cfg = &kv->tables.cfg;
    const tkvi_list *list = tkvi_list_of(kv, c->rows[item].seq, c->plan->stored);
    const uint32_t *ids = tkvi_ids(kv, c->rows[item].seq, c->plan->stored);
    double top = 0.0, sum = 0.0, out[TKV_MAX_HEAD_DIM];
    int pass, i, j, t, any = 0;
    ptrdiff_t at = row * c->out_row + head * c->out_head;
    memset(out, 0, sizeof out);
    if (c->p->sinks && tkvi_is_finite(c->p->sinks[head])) {
        top = (double)c->p->sinks[head];
        any = 1;
    }
    for (pass = 0; pass < 3; pass++) {
        if (pass == 1 && c->p->sinks && tkvi_is_finite(c->p->sinks[head]))
            sum = exp((double)c->p->sinks[head] - top);
        for (i = 0; i < list->n; i++) {
            const tkvi_block *b = &kv->pool.block[ids[i]];
            const tkvi_record *rec = &kv->tables.coding[b->coding].record[head / c->heads_per_kv];
            const uint8_t *bytes = tkvi_block_bytes(&kv->pool, b) + rec->at;
            int n = tkvi_block_end(kv, list, ids, i) - b->start;
            for (t = 0; t < n; t++) {
                float x[TKV_MAX_HEAD_DIM];
                int seen, ch;
                double s, w;
                j = b->start + t;
                tkvi_decode_side(&rec->k, bytes, t, 1, x, 0);
                s = tkvi_ref_logit(c, item, row, query, head, x, j, list->len, &seen);
                if (!seen) continue;
                if (pass == 0) {
                    top = any && top > s ? top : s;
                    any = 1;
                    continue;
                }
                w = exp(s - top);
                if (pass == 2) {
                    c->p->mass[item * c->mass_stride + j] += (float)(w / sum);
                    continue;
                }
                sum += w;
                tkvi_decode_side(&rec->v, bytes + rec->v_at, t, 1, x, 0);
                for (ch = 0; ch < cfg->v_head_dim; ch++) out[ch] += w * (double)x[ch];
            }
        }
        if (pass == 1 && !c->p->mass) break;
    }
    for (i = 0; i < cfg->v_head_dim; i++)
        tkvi_save_element(c->p->out, c->p->out_type, at + i, sum > 0.0 ? (float)(out[i] / sum) : 0.0f);
    if (c->p->lse)
        c->p->lse[(ptrdiff_t)row * cfg->n_heads + head] =
            sum > 0.0 ? (float)(top + log(sum)) : tkvi_from_bits(0xff800000u);
}

TKV_API tkv_status tkv_attend_reference(tkv_cache *kv, const tkv_attend_params *p) {
    tkvi_call c;
    int item, query, head, row = 0;
    tkv_status st = tkvi_call_init(&c, kv, p);
    if (st) return st;
    for (item = 0; item < c.n_rows; item++) {
        if (p->mass)
            memset(p->mass + item * c.mass_stride, 0,
                   (size_t)tkvi_list_of(kv, c.rows[item].seq, c.plan->stored)->len * sizeof(float));
        for (query = 0; query < c.rows[item].n; query++, row++)
            for (head = 0; head < kv->tables.cfg.n_heads; head++) tkvi_ref_row(&c, item, row, query, head);
    }
    return TKV_OK;
}

#endif /* TKVI_REFERENCE_H */
/* ======== report.h ======== */
/*
 * report.h - what the cache says of itself: bytes, tokens per tier, an estimate before anything exists, and
 * a walk over all invariants. May call everything above; changes nothing.
 */
#ifndef TKVI_REPORT_H
#define TKVI_REPORT_H


TKV_API int tkv_version(void) { return TKV_VERSION; }

TKV_API const char *tkv_status_text(tkv_status s) {
#define TKVI_STATUS_CASE_(name, value, text)                                                                 \
    if (s == name) return text;
    TKV_STATUS_LIST(TKVI_STATUS_CASE_)
#undef TKVI_STATUS_CASE_
    return "unknown status";
}

TKV_API const char *tkv_last_error(const tkv_cache *kv) { return kv ? kv->error : ""; }

TKV_API tkv_isa tkv_isa_of(const tkv_cache *kv) { return kv ? kv->kernels->isa : TKV_ISA_AUTO; }

/* >>tokens */
TKV_API tkv_status tkv_tier_counts(const tkv_cache *kv, int seq, int layer, tkv_tier_info *out) {
    const tkvi_list *list;
    const uint32_t *ids;
    int i;
    layer = tkvi_stored_layer(kv, seq, layer);
    if (!out || layer < 0) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    list = tkvi_list_of(kv, seq, layer);
    ids = tkvi_ids(kv, seq, layer);
    for (i = 0; i < list->n; i++) {
        tkv_tier tier = tkvi_tier_at(list, i);
        out->tokens[tier] += tkvi_block_end(kv, list, ids, i) - tkvi_block_start(kv, ids, i);
        out->blocks[tier]++;
    }
    out->dropped = list->dropped;
    return TKV_OK;
}

TKV_API tkv_status tkv_tier_of(const tkv_cache *kv, int seq, int layer, int token, tkv_tier *out) {
    const tkvi_list *list;
    const uint32_t *ids;
    int i;
    layer = tkvi_stored_layer(kv, seq, layer);
    if (!out || layer < 0) return TKV_ERR_ARG;
    list = tkvi_list_of(kv, seq, layer);
    ids = tkvi_ids(kv, seq, layer);
    if (token < list->dropped || token >= list->len) return TKV_ERR_RANGE;
    for (i = list->n - 1; tkvi_block_start(kv, ids, i) > token;) i--;
    *out = tkvi_tier_at(list, i);
    return TKV_OK;
}

/* >>bytes */
/* One block's bytes; codes and metadata are what the formats use of them, the rest is padding. */
static void tkvi_add_block(tkv_memory_info *m, tkv_tier tier, const tkvi_record *record, int heads,
                           size_t tokens) {
    int h;
    m->tier[tier].tokens += tokens;
    for (h = 0; h < heads; h++) {
        m->tier[tier].codes += record[h].k.code_bytes + record[h].v.code_bytes;
        m->tier[tier].metadata += record[h].k.meta_bytes + record[h].v.meta_bytes;
    }
}

/* Slack is what remains of pages; fp16_bytes and ratio follow from the tokens. */
static void tkvi_sum_up(tkv_memory_info *m, const tkv_config *cfg, size_t page_bytes) {
    int tier;
    size_t used = 0, tokens = 0;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        used += m->tier[tier].codes + m->tier[tier].metadata;
        tokens += m->tier[tier].tokens;
    }
    m->slack += page_bytes - used;
    m->fp16_bytes = tokens * (size_t)cfg->n_kv_heads * (size_t)(cfg->head_dim + cfg->v_head_dim) * 2u;
    m->ratio = m->total ? (double)m->fp16_bytes / (double)m->total : 0.0;
    m->ratio_f32 = 2.0 * m->ratio;
}

/* A block counts once, where its first holder has it (a mark would be a write; holders are few). */
static int tkvi_first_holder(const tkv_cache *kv, int seq, int layer, uint32_t id) {
    int s, i;
    if (kv->pool.block[id].refs == 1) return 1;
    for (s = 0; s < seq; s++) {
        const tkvi_list *list = tkvi_list_of(kv, s, layer);
        const uint32_t *ids = tkvi_ids(kv, s, layer);
        for (i = 0; i < list->n; i++)
            if (ids[i] == id) return 0;
    }
    return 1;
}

/* Adds the blocks of one layer of one sequence. `once`: a shared block counts with its first holder only. */
static void tkvi_add_list(const tkv_cache *kv, int seq, int layer, int once, tkv_memory_info *out) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        if (!once || tkvi_first_holder(kv, seq, layer, ids[i]))
            tkvi_add_block(out, tkvi_tier_at(list, i), kv->tables.coding[b->coding].record,
                           kv->tables.cfg.n_kv_heads, (size_t)(tkvi_block_end(kv, list, ids, i) - b->start));
    }
}

TKV_API tkv_status tkv_memory(const tkv_cache *kv, tkv_memory_info *out) {
    const tkv_config *cfg;
    int seq, layer;
    if (!kv || !out) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    memset(out, 0, sizeof *out);
    for (seq = 0; seq < cfg->max_seqs; seq++)
        for (layer = 0; layer < cfg->n_layers; layer++) tkvi_add_list(kv, seq, layer, 1, out);
    out->total = kv->heap.held;
    out->peak = kv->heap.peak;
    out->tables = kv->table_bytes;
    out->scratch = kv->scratch_bytes;
    out->index =
        kv->heap.held - (size_t)kv->pool.n_pages * kv->tables.page_bytes - out->tables - out->scratch;
    tkvi_sum_up(out, cfg, (size_t)kv->pool.n_pages * kv->tables.page_bytes);
    return TKV_OK;
}

TKV_API tkv_status tkv_memory_of(const tkv_cache *kv, int seq, int layer, tkv_memory_info *out) {
    const tkvi_list *list;
    const uint32_t *ids;
    size_t bytes = 0;
    int i;
    layer = tkvi_stored_layer(kv, seq, layer);
    if (!out || layer < 0) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    list = tkvi_list_of(kv, seq, layer);
    ids = tkvi_ids(kv, seq, layer);
    for (i = 0; i < list->n; i++) bytes += kv->tables.coding[kv->pool.block[ids[i]].coding].block_bytes;
    tkvi_add_list(kv, seq, layer, 0, out);
    out->total = out->peak = bytes;
    tkvi_sum_up(out, &kv->tables.cfg, bytes);
    return TKV_OK;
}

/* >>estimate: the same sums over the plan instead of over blocks */
typedef struct tkvi_layer_sum { /* one layer of one sequence after n tokens that came one by one */
    int64_t blocks[TKV_TIER_COUNT], tokens[TKV_TIER_COUNT]; /* the sinks' block and tokens are apart */
    int sink_tokens;
} tkvi_layer_sum;

/* Whole blocks that end at or before `end`, of `whole` that follow the sinks. */
static int64_t tkvi_ended(int64_t whole, int64_t end) {
    int64_t n = end < 0 ? 0 : end / TKVI_BLOCK;
    return n < whole ? n : whole;
}

static tkvi_layer_sum tkvi_layer_after(const tkvi_plan *p, int n) {
    tkvi_layer_sum s;
    int64_t tokens = tkvi_max(0, n - p->sink), whole = tokens / TKVI_BLOCK, rest = tokens % TKVI_BLOCK;
    int64_t due = (int64_t)n - 1 - p->sink; /* the length that the last append's ageing saw, sinks apart */
    int64_t gone, archived, coded, margin = (int64_t)p->keep + tkvi_drop_margin(p);
    int tier;
    memset(&s, 0, sizeof s);
    gone = p->keep ? tkvi_ended(whole, due - margin) : 0;
    archived = tkvi_ended(whole, due - p->hot - p->warm);
    coded = tkvi_ended(whole, due - p->hot);
    archived = archived > gone ? archived : gone;
    coded = coded > archived ? coded : archived;
    s.blocks[TKV_ARCHIVE] = archived - gone;
    s.blocks[TKV_WARM] = coded - archived;
    s.blocks[TKV_HOT] = whole - coded;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) s.tokens[tier] = s.blocks[tier] * TKVI_BLOCK;
    s.tokens[TKV_HOT] += rest;
    s.blocks[TKV_HOT] += rest > 0;
    s.sink_tokens = p->keep && tokens > 0 && due >= margin ? 0 : tkvi_min(n, p->sink);
    return s;
}

static void tkvi_add_blocks(tkv_memory_info *m, tkvi_shape *h, int coding, tkv_tier tier, int64_t blocks,
                            int64_t tokens, int64_t *live) {
    size_t records = (size_t)(blocks * h->cfg.n_kv_heads);
    tkvi_record r;
    tkvi_record_init(&r, &h->cfg, h->key[coding]);
    m->tier[tier].tokens += (size_t)tokens;
    m->tier[tier].codes += records * (r.k.code_bytes + r.v.code_bytes);
    m->tier[tier].metadata += records * (r.k.meta_bytes + r.v.meta_bytes);
    live[h->class_of[coding]] += blocks;
}

TKV_API tkv_status tkv_estimate(const tkv_config *cfg, int n_tokens, int n_seqs, tkv_memory_info *out) {
    tkvi_shape h;
    tkvi_sizes fixed;
    int64_t live[TKVI_MAX_CODINGS], all = 0, pages = 0, most = 0;
    tkv_memory_info m;
    size_t page_bytes;
    int i, tier, c;
    tkv_status st = tkvi_validate(cfg, &h, NULL, 0);
    if (st) return st;
    if (!out || n_tokens < 0 || n_tokens > h.cfg.max_tokens || n_seqs < 0 || n_seqs > h.cfg.max_seqs)
        return TKV_ERR_ARG;
    if (!tkvi_fixed_sizes(&h, &fixed)) return TKV_ERR_CONFIG;
    memset(&m, 0, sizeof m);
    memset(live, 0, sizeof live);
    for (i = 0; i < h.cfg.n_layers && n_tokens > 0 && n_seqs > 0; i++) {
        tkvi_plan p;
        tkvi_layer_sum s;
        int64_t here = 0;
        (void)tkvi_plan_of(&h, i, &p);
        if (p.stored != i) continue;
        s = tkvi_layer_after(&p, n_tokens);
        if (s.sink_tokens)
            tkvi_add_blocks(&m, &h, p.sink_coding, TKV_HOT, n_seqs, (int64_t)s.sink_tokens * n_seqs, live);
        for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
            tkvi_add_blocks(&m, &h, p.coding[tier], (tkv_tier)tier, s.blocks[tier] * n_seqs,
                            s.tokens[tier] * n_seqs, live);
            here += s.blocks[tier];
        }
        here += s.sink_tokens > 0;
        all += here;
        most = here > most ? here : most;
    }
    for (c = 0; c < h.n_classes; c++) pages += tkvi_pages_for(&h.size_class[c], live[c]);
    if (all > 0x3fffffff / tkvi_max(n_seqs, 1) || pages > 0x3fffffff ||
        !tkvi_mul((size_t)pages + 1, h.page_bytes, &page_bytes) || page_bytes > (size_t)-1 / 4)
        return TKV_ERR_CONFIG; /* more than this machine can address */
    page_bytes -= h.page_bytes;
    m.tables = fixed.tables;
    m.scratch = fixed.recode + fixed.parts;
    m.index = fixed.total - m.tables - m.scratch;
    if (all) {
        m.index += tkvi_cap_for(all * n_seqs) * sizeof(tkvi_block) + tkvi_cap_for(pages) * sizeof(tkvi_page);
        m.index +=
            (size_t)tkvi_cap_for(most + 1) * sizeof(uint32_t) * (size_t)h.cfg.n_layers * (size_t)n_seqs;
    }
    m.total = m.index + m.tables + m.scratch + page_bytes;
    m.peak = m.total;
    tkvi_sum_up(&m, &h.cfg, page_bytes);
    *out = m;
    return TKV_OK;
}

/* >>self-check */
typedef struct tkvi_checker {
    const tkv_cache *kv;
    char *reason;
    size_t size;
} tkvi_checker;

static tkv_status tkvi_broken(const tkvi_checker *k, const char *what, int64_t where) {
    tkvi_text t = tkvi_text_begin(k->reason, k->reason ? k->size : 0);
    tkvi_say(&t, what);
    tkvi_say(&t, " (");
    tkvi_say_int(&t, where);
    tkvi_say(&t, ")");
    return TKV_ERR_BROKEN;
}

/* Numbers first: nothing below follows one that leads outside of its table. */
static tkv_status tkvi_check_ids(const tkvi_checker *k, int seq, int layer) {
    const tkv_cache *kv = k->kv;
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    if (list->n < 0 || (uint32_t)list->n > kv->seq[seq].cap)
        return tkvi_broken(k, "a list is longer than its room", layer);
    for (i = 0; i < list->n; i++)
        if (ids[i] >= kv->pool.block_cap || kv->pool.block[ids[i]].refs == 0 ||
            kv->pool.block[ids[i]].coding >= kv->tables.n_codings)
            return tkvi_broken(k, "a list names a block that does not exist", (int64_t)ids[i]);
    return TKV_OK;
}

static tkv_status tkvi_check_list(const tkvi_checker *k, int seq, int layer) {
    const tkv_cache *kv = k->kv;
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int i;
    if (p->stored != layer)
        return list->n || list->len ? tkvi_broken(k, "a layer without its own cache holds blocks", layer)
                                    : TKV_OK;
    if (list->sinks < 0 || list->sinks > 1 || list->archive < 0 || list->warm < 0 ||
        (int64_t)list->sinks + list->archive + list->warm > list->n)
        return tkvi_broken(k, "tier counts do not fit the list of layer", layer);
    if (list->dropped < 0 || list->dropped > list->len || list->len > kv->tables.cfg.max_tokens)
        return tkvi_broken(k, "a length is out of range in layer", layer);
    if ((list->n == 0) != (list->len == list->dropped))
        return tkvi_broken(k, "tokens without blocks, or blocks without, in layer", layer);
    if (list->n && tkvi_block_start(kv, ids, 0) != list->dropped)
        return tkvi_broken(k, "the first block does not follow what was dropped, layer", layer);
    for (i = 0; i < list->n; i++) {
        const tkvi_block *b = &kv->pool.block[ids[i]];
        int64_t end = tkvi_block_end(kv, list, ids, i), age = list->len - end, most;
        tkv_tier tier = tkvi_tier_at(list, i);
        if (end <= b->start || end - b->start > kv->tables.coding[b->coding].tokens)
            return tkvi_broken(k, "a block has no tokens or more than its room", (int64_t)ids[i]);
        if (b->coding != (i < list->sinks ? p->sink_coding : p->coding[tier]))
            return tkvi_broken(k, "a block is not in its tier's format", (int64_t)ids[i]);
        most = (int64_t)p->hot + kv->tables.cfg.max_append + (tier == TKV_WARM ? p->warm : 0);
        if (i >= list->sinks && tier != TKV_ARCHIVE && age >= most)
            return tkvi_broken(k, "a block is in its tier for too long", (int64_t)ids[i]);
    }
    return TKV_OK;
}

/* One page against its blocks. */
static tkv_status tkvi_check_page(const tkvi_checker *k, uint32_t i) {
    const tkvi_pool *pool = &k->kv->pool;
    const tkvi_page *p = &pool->page[i];
    int s, used = 0;
    if (p->size_class < -1 || p->size_class >= pool->tables->n_classes)
        return tkvi_broken(k, "a page of no known class", i);
    for (s = 0; s < 64 && p->size_class >= 0; s++) {
        const tkvi_block *b;
        if (!(p->taken >> s & 1)) continue;
        used++;
        if (s >= pool->tables->size_class[p->size_class].slots)
            return tkvi_broken(k, "a slot beyond its page", i);
        if (p->owner[s] >= pool->block_cap) return tkvi_broken(k, "a slot of a block that does not exist", i);
        b = &pool->block[p->owner[s]];
        if (b->refs == 0 || b->page != i || b->slot != s || b->coding >= pool->tables->n_codings ||
            pool->tables->coding[b->coding].size_class != p->size_class)
            return tkvi_broken(k, "a slot and its block disagree", i);
    }
    if (p->size_class >= 0 && (used != p->used || used == 0))
        return tkvi_broken(k, "a page's slots are miscounted", i);
    return TKV_OK;
}

/* A chain of pages from `first`, all of one class; how many there are, or -1. */
static int64_t tkvi_chain(const tkvi_pool *pool, uint32_t first, int size_class, int64_t *used) {
    uint32_t i;
    int64_t n = 0;
    *used = 0;
    for (i = first; i != TKVI_NIL; i = pool->page[i].after, n++) {
        if (n > pool->n_pages || i >= pool->n_pages || pool->page[i].size_class != size_class) return -1;
        *used += pool->page[i].used;
    }
    return n;
}

static tkv_status tkvi_check_pool(const tkvi_checker *k) {
    const tkvi_pool *pool = &k->kv->pool;
    int64_t live = 0, used, chained, n_free = 0, n;
    uint32_t i;
    int c, seq;
    tkv_status st = TKV_OK;
    for (i = 0; i < pool->n_pages && !st; i++) {
        st = tkvi_check_page(k, i);
        n_free += pool->page[i].size_class < 0;
    }
    if (st) return st;
    if (tkvi_chain(pool, pool->free_page, -1, &used) != n_free || n_free != pool->n_free_pages)
        return tkvi_broken(k, "free pages are miscounted", n_free);
    for (c = 0; c < pool->tables->n_classes; c++) {
        const tkvi_class *size_class = &pool->tables->size_class[c];
        int64_t pages = 0, full = 0, in_class = 0, promised = 0;
        for (i = 0; i < pool->n_pages; i++) {
            if (pool->page[i].size_class != c) continue;
            pages++;
            full += pool->page[i].used == size_class->slots;
            in_class += pool->page[i].used;
        }
        if (in_class != pool->live[c]) return tkvi_broken(k, "blocks are miscounted, class", c);
        if (pages != tkvi_pages_for(size_class, in_class))
            return tkvi_broken(k, "more pages than blocks need, class", c);
        chained = tkvi_chain(pool, pool->room[c], c, &used);
        if (chained != pages - full || used != in_class - full * size_class->slots)
            return tkvi_broken(k, "a page with room is not in its list, class", c);
        for (seq = 0; seq < k->kv->tables.cfg.max_seqs; seq++)
            promised += k->kv->promised[(size_t)seq * (size_t)pool->tables->n_classes + (size_t)c];
        if (promised != pool->promised[c]) return tkvi_broken(k, "reservations are miscounted, class", c);
        live += in_class;
    }
    if (live != (int64_t)pool->n_blocks) return tkvi_broken(k, "blocks and slots disagree", live);
    for (i = pool->free_block, n = 0; i != TKVI_NIL; i = pool->block[i].page, n++)
        if (n >= pool->block_cap || i >= pool->block_cap || pool->block[i].refs)
            return tkvi_broken(k, "the list of free blocks is broken", (int64_t)i);
    if (n + live != (int64_t)pool->block_cap) return tkvi_broken(k, "free blocks are miscounted", n);
    return TKV_OK;
}

/* Scatters block numbers, so that sums over two sets of them agree only if the sets do. */
static uint64_t tkvi_scatter(uint32_t id) {
    uint64_t x = ((uint64_t)id + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

TKV_API tkv_status tkv_check(const tkv_cache *kv, char *reason, size_t size) {
    tkvi_checker k;
    tkv_memory_info m;
    tkv_status st;
    uint32_t id;
    int seq, layer, tier, i;
    size_t held, sum;
    uint64_t refs = 0, entries = 0;
    if (!kv) return TKV_ERR_ARG;
    k.kv = kv;
    k.reason = reason;
    k.size = size;
    if (reason && size) *reason = 0;
    st = tkvi_check_pool(&k);
    for (seq = 0; seq < kv->tables.cfg.max_seqs && !st; seq++)
        for (layer = 0; layer < kv->tables.cfg.n_layers && !st; layer++) {
            st = tkvi_check_ids(&k, seq, layer);
            if (!st) st = tkvi_check_list(&k, seq, layer);
            for (i = 0; i < tkvi_list_of(kv, seq, layer)->n && !st; i++)
                entries += tkvi_scatter(tkvi_ids(kv, seq, layer)[i]);
        }
    if (st) return st;
    for (id = 0; id < kv->pool.block_cap; id++) refs += kv->pool.block[id].refs * tkvi_scatter(id);
    if (refs != entries) return tkvi_broken(&k, "blocks count other holders than the lists have", 0);
    held = kv->fixed_bytes + kv->pool.n_pages * kv->tables.page_bytes +
           kv->pool.page_cap * sizeof(tkvi_page) + kv->pool.block_cap * sizeof(tkvi_block);
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++)
        held += (size_t)kv->seq[seq].cap * (size_t)kv->tables.cfg.n_layers * sizeof(uint32_t);
    if (held != kv->heap.held) return tkvi_broken(&k, "bytes held do not add up", (int64_t)kv->heap.held);
    st = tkv_memory(kv, &m);
    sum = m.tables + m.index + m.scratch + m.slack;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) sum += m.tier[tier].codes + m.tier[tier].metadata;
    if (st || sum != m.total)
        return tkvi_broken(&k, "the parts of tkv_memory do not make its total", (int64_t)sum);
    return TKV_OK;
}

#endif /* TKVI_REPORT_H */
/* ======== end.h ======== */
/*
 * end.h - the last part: internal macros that would leak into the program that includes the implementation
 * are undefined here. Functions and types stay, all static, all tkvi_.
 */
#ifndef TKVI_END_H
#define TKVI_END_H

#undef TKVI_IS_HIDDEN

#endif /* TKVI_END_H */
#ifdef __cplusplus
}
#endif
#endif /* TIEREDKV_IMPLEMENTATION */
