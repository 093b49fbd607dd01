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
 *   Build:                             cc -O2 program.c -lm      (no -m flags: x86 kernels are chosen at run time)
 *
 * WHAT IT IS
 *   A place for K and V of every layer, and the attention over them. Tokens arrive exact; when 64 of them are
 *   old enough they are coded together, in 4 bits at first, in 3 or 2 later. Queries read all tiers through one
 *   softmax, multiplying the packed codes; nothing is ever decoded into memory.
 * WHAT IT IS NOT
 *   No model, tokenizer, sampling or RoPE (keys arrive rotated; KVQUANT formats undo it). No threads of its own,
 *   no files, no network.
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
 *   TKV_NO_REPORTS           implementation     no texts: configs as text, state as JSON, Prometheus
 *
 * CONCEPTS
 *   cache      all state for one model: n_layers layers, up to max_seqs sequences
 *   sequence   one conversation or beam; its tokens have positions 0, 1, 2, ...
 *   head group the n_heads / n_kv_heads query heads that share a KV head
 *   block      64 consecutive tokens of one layer of one sequence, all KV heads: what is coded, moved, counted
 *   record     the bytes of a block for one KV head: K codes, K metadata, V codes, V metadata
 *   format     how a block stores K or V (tkv_format); K and V are chosen separately
 *   tier       HOT: exact - the sinks (first sink_tokens) and the tail (at least hot_tokens newest)
 *              WARM: the warm_tokens before the tail, 4 bits;  ARCHIVE: everything older, 3 or 2
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
 *   coded      tiles of 256 codes, 1 to 6 or 8 bits each; KIVI: fp16 scale and zero per group of 64 or 32;
 *              A and R: scales of one byte, channels in an order that the cache learned (format_a.h, format_r.h)
 *              INT, FP, SUBSPACE: [token][channel] codes, then scales (format_token.h, format_subspace.h)
 *              KVQUANT: [token][channel] codes, then slots for outliers (format_kvquant.h)
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
 *          AArch64: NEON, with dot products where the compiler may use them (-march=armv8.2-a+dotprod and later).
 *          WebAssembly: with -msimd128. Elsewhere: scalar C.
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
#define tkv_budget TKV_NAME_(tkv_budget)
#define tkv_calibrated_layers TKV_NAME_(tkv_calibrated_layers)
#define tkv_calibration_fit TKV_NAME_(tkv_calibration_fit)
#define tkv_calibration_freeze TKV_NAME_(tkv_calibration_freeze)
#define tkv_calibration_load TKV_NAME_(tkv_calibration_load)
#define tkv_calibration_refresh TKV_NAME_(tkv_calibration_refresh)
#define tkv_calibration_save TKV_NAME_(tkv_calibration_save)
#define tkv_check TKV_NAME_(tkv_check)
#define tkv_commit TKV_NAME_(tkv_commit)
#define tkv_config_default TKV_NAME_(tkv_config_default)
#define tkv_config_parse TKV_NAME_(tkv_config_parse)
#define tkv_config_preset TKV_NAME_(tkv_config_preset)
#define tkv_config_print TKV_NAME_(tkv_config_print)
#define tkv_config_validate TKV_NAME_(tkv_config_validate)
#define tkv_create TKV_NAME_(tkv_create)
#define tkv_decode TKV_NAME_(tkv_decode)
#define tkv_destroy TKV_NAME_(tkv_destroy)
#define tkv_encode TKV_NAME_(tkv_encode)
#define tkv_encoded_size TKV_NAME_(tkv_encoded_size)
#define tkv_estimate TKV_NAME_(tkv_estimate)
#define tkv_evict_budgets TKV_NAME_(tkv_evict_budgets)
#define tkv_evict_compact TKV_NAME_(tkv_evict_compact)
#define tkv_evict_due TKV_NAME_(tkv_evict_due)
#define tkv_evict_from_name TKV_NAME_(tkv_evict_from_name)
#define tkv_evict_key_norms TKV_NAME_(tkv_evict_key_norms)
#define tkv_evict_list TKV_NAME_(tkv_evict_list)
#define tkv_evict_name TKV_NAME_(tkv_evict_name)
#define tkv_evict_needs TKV_NAME_(tkv_evict_needs)
#define tkv_evict_score TKV_NAME_(tkv_evict_score)
#define tkv_evict_select TKV_NAME_(tkv_evict_select)
#define tkv_feedback_advise TKV_NAME_(tkv_feedback_advise)
#define tkv_feedback_init TKV_NAME_(tkv_feedback_init)
#define tkv_feedback_observe TKV_NAME_(tkv_feedback_observe)
#define tkv_feedback_read TKV_NAME_(tkv_feedback_read)
#define tkv_feedback_reset TKV_NAME_(tkv_feedback_reset)
#define tkv_flush TKV_NAME_(tkv_flush)
#define tkv_format_bits TKV_NAME_(tkv_format_bits)
#define tkv_format_from_name TKV_NAME_(tkv_format_from_name)
#define tkv_format_name TKV_NAME_(tkv_format_name)
#define tkv_format_prometheus TKV_NAME_(tkv_format_prometheus)
#define tkv_importance_add TKV_NAME_(tkv_importance_add)
#define tkv_importance_aggregate TKV_NAME_(tkv_importance_aggregate)
#define tkv_importance_bound TKV_NAME_(tkv_importance_bound)
#define tkv_importance_name TKV_NAME_(tkv_importance_name)
#define tkv_importance_promote TKV_NAME_(tkv_importance_promote)
#define tkv_importance_read TKV_NAME_(tkv_importance_read)
#define tkv_importance_top TKV_NAME_(tkv_importance_top)
#define tkv_init_in_place TKV_NAME_(tkv_init_in_place)
#define tkv_isa_available TKV_NAME_(tkv_isa_available)
#define tkv_isa_name TKV_NAME_(tkv_isa_name)
#define tkv_isa_of TKV_NAME_(tkv_isa_of)
#define tkv_last_error TKV_NAME_(tkv_last_error)
#define tkv_layer_len TKV_NAME_(tkv_layer_len)
#define tkv_maintain TKV_NAME_(tkv_maintain)
#define tkv_max_context TKV_NAME_(tkv_max_context)
#define tkv_memory TKV_NAME_(tkv_memory)
#define tkv_memory_of TKV_NAME_(tkv_memory_of)
#define tkv_merge_lse TKV_NAME_(tkv_merge_lse)
#define tkv_observe TKV_NAME_(tkv_observe)
#define tkv_policy_init TKV_NAME_(tkv_policy_init)
#define tkv_policy_observe TKV_NAME_(tkv_policy_observe)
#define tkv_policy_parse TKV_NAME_(tkv_policy_parse)
#define tkv_policy_print TKV_NAME_(tkv_policy_print)
#define tkv_policy_profile TKV_NAME_(tkv_policy_profile)
#define tkv_policy_read TKV_NAME_(tkv_policy_read)
#define tkv_policy_reset TKV_NAME_(tkv_policy_reset)
#define tkv_policy_target TKV_NAME_(tkv_policy_target)
#define tkv_preset_name TKV_NAME_(tkv_preset_name)
#define tkv_quality TKV_NAME_(tkv_quality)
#define tkv_quality_of TKV_NAME_(tkv_quality_of)
#define tkv_quality_reset TKV_NAME_(tkv_quality_reset)
#define tkv_read TKV_NAME_(tkv_read)
#define tkv_remat_decide TKV_NAME_(tkv_remat_decide)
#define tkv_remat_flops TKV_NAME_(tkv_remat_flops)
#define tkv_remat_init TKV_NAME_(tkv_remat_init)
#define tkv_remat_restore TKV_NAME_(tkv_remat_restore)
#define tkv_required_bytes TKV_NAME_(tkv_required_bytes)
#define tkv_reserve TKV_NAME_(tkv_reserve)
#define tkv_reset TKV_NAME_(tkv_reset)
#define tkv_score_from_accuracy TKV_NAME_(tkv_score_from_accuracy)
#define tkv_score_from_ppl TKV_NAME_(tkv_score_from_ppl)
#define tkv_score_from_quality TKV_NAME_(tkv_score_from_quality)
#define tkv_seq_len TKV_NAME_(tkv_seq_len)
#define tkv_set_budget TKV_NAME_(tkv_set_budget)
#define tkv_set_hot_tokens TKV_NAME_(tkv_set_hot_tokens)
#define tkv_set_level TKV_NAME_(tkv_set_level)
#define tkv_state_json TKV_NAME_(tkv_state_json)
#define tkv_status_text TKV_NAME_(tkv_status_text)
#define tkv_thresholds_candidates TKV_NAME_(tkv_thresholds_candidates)
#define tkv_thresholds_find TKV_NAME_(tkv_thresholds_find)
#define tkv_thresholds_load TKV_NAME_(tkv_thresholds_load)
#define tkv_thresholds_parse TKV_NAME_(tkv_thresholds_parse)
#define tkv_thresholds_print TKV_NAME_(tkv_thresholds_print)
#define tkv_thresholds_put TKV_NAME_(tkv_thresholds_put)
#define tkv_thresholds_save TKV_NAME_(tkv_thresholds_save)
#define tkv_thresholds_transfer TKV_NAME_(tkv_thresholds_transfer)
#define tkv_tier_counts TKV_NAME_(tkv_tier_counts)
#define tkv_tier_for_age TKV_NAME_(tkv_tier_for_age)
#define tkv_tier_of TKV_NAME_(tkv_tier_of)
#define tkv_tier_pair TKV_NAME_(tkv_tier_pair)
#define tkv_truncate TKV_NAME_(tkv_truncate)
#define tkv_version TKV_NAME_(tkv_version)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* >>constants */
#define TKV_BLOCK_TOKENS 64 /* tokens in a block: what is encoded, demoted and shared together */
#define TKV_MAX_HEAD_DIM 256
#define TKV_QUALITY_HEADS 64 /* most of cfg.quality_heads */
#define TKV_NONE (-1)        /* in a length: this tier is off */
#define TKV_ALL (-2)         /* in a length: this tier takes everything, the later ones stay empty */

/* >>status: every function that can fail returns one. Negative is an error, and an error changes nothing. */
/* (An allocation that failed may leave the index, or memory for the tables of formats, larger than before.) */
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
    X(TKV_ERR_BROKEN, -10, "self-check failed: the cache's memory was overwritten, or a bug")                \
    X(TKV_ERR_DATA, -11, "these bytes are damaged, of another version or of another model")                  \
    X(TKV_ERR_BUDGET, -12,                                                                                   \
      "the budget is full: nothing can be stored more tightly (tkv_set_budget raises it)")
#define TKV_STATUS_ENUM_(name, value, text) name = value,
typedef enum tkv_status { TKV_STATUS_LIST(TKV_STATUS_ENUM_) TKV_STATUS_LAST_ = -13 } tkv_status;
#undef TKV_STATUS_ENUM_

/* >>formats: how a block stores K or V. Sizes of each: tkv_format_bits. */
typedef enum tkv_format {
    TKV_FORMAT_DEFAULT = 0, /* hot F16, warm A40 and R40, archive A30 and R30 */
    TKV_F32,
    TKV_F16,
    TKV_BF16,
    TKV_Q8,    /* 8 bits, min/max, fp16 scale and zero; groups as in KIVI */
    TKV_KIVI4, /* 4, 3, 2 bits: K per channel along tokens, V per token along channels */
    TKV_KIVI3, /*   (KIVI, arXiv 2402.02750, section 3) */
    TKV_KIVI2,
    TKV_A40, /* K only: allocated bits per channel. Bits a value on average over a layer, metadata included: */
    TKV_A35, /*   4, 3.5, 3, 2.75, 2.5, 2.25, 2, 1.75, 1.5 (format_a.h) */
    TKV_A30,
    TKV_A275,
    TKV_A25,
    TKV_A225,
    TKV_A20,
    TKV_A175,
    TKV_A15,
    TKV_R40, /* V only: rotated values, 4, 3, 2, 1.5, 1 bits on average over a layer, and */
    /*   8 bits a token (format_r.h) */
    TKV_R30,
    TKV_R20,
    TKV_R15,
    TKV_R10,
    TKV_INT8, /* each token by itself: whole numbers, an fp16 scale per group of its channels (format_int.h) */
    TKV_INT4,
    TKV_FP8_E4M3, /* the same: OCP floats, one fp16 scale per token (format_float.h) */
    TKV_FP8_E5M2,
    TKV_FP4,    /* E2M1 with the two scales of NVFP4: E4M3 per 16 channels, fp16 per token */
    TKV_SQUAT4, /* K only: KIVI4 and KIVI2 with errors turned away from the queries (SQuat, arXiv 2503.24358) */
    TKV_SQUAT2,
    TKV_SUBSPACE4, /* each token in parts of a rotated basis, with minimum and maximum (format_subspace.h) */
    TKV_SUBSPACE2,
    TKV_KVQUANT4, /* levels by k-means, outliers apart, keys as before RoPE (KVQuant, arXiv 2401.18079) */
    TKV_KVQUANT3,
    TKV_KVQUANT2,
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
/* Bits of cfg.fit: what the encoder of Q8, KIVI and SQUAT formats does about scale and zero; 0: minimum and maximum.
 * All leave bytes, decoding and speed as they are, and cost time when a block is coded. For 3 bits and less. */
typedef enum tkv_fit {
    TKV_FIT_CLIP = 1,    /* the best of 12 ranges of each group, by squared error; wants exact sinks */
    TKV_FIT_NORM = 2,    /* decoded groups have the variance of the values: mixes best with exact tokens */
    TKV_FIT_UNBIASED = 4 /* decoded groups are unbiased, cov(x^, x) = var(x); not with NORM */
} tkv_fit;
/* Bits of cfg.rotate: INT8, INT4, FP8 and FP4 code this side behind a randomised Hadamard rotation. */
typedef enum tkv_rotate { TKV_ROTATE_K = 1, TKV_ROTATE_V = 2 } tkv_rotate;
/* Bits of cfg.kvquant: how KVQUANT formats differ from the paper's "nuq, 1 %" (format_kvquant.h). */
typedef enum tkv_kvquant {
    TKV_KVQUANT_POST_ROPE = 1, /* keys are coded as they come; also where there is no cfg.rope */
    TKV_KVQUANT_UNIFORM = 2,   /* levels are evenly spaced */
    TKV_KVQUANT_NORM = 4, /* decoded values have the variance of the values (Q-Norm): for 3 bits and less */
    TKV_KVQUANT_DENSE = 8 /* no slots for outliers */
} tkv_kvquant;
typedef enum tkv_isa {
    TKV_ISA_AUTO = 0,
    TKV_ISA_SCALAR,
    TKV_ISA_AVX2,
    TKV_ISA_AVX512,
    TKV_ISA_NEON, /* AArch64 */
    TKV_ISA_WASM, /* WebAssembly compiled with -msimd128 */
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

/* How the model rotates its keys, for formats that undo it (KVQUANT): channels j and j + dim/2 of the first
 * `dim`, or 2j and 2j + 1, turn by scale * base^(-2j / dim) radians a token, j = 0 .. dim/2 - 1, from
 * position 0 on. Keys that turned otherwise stay as right as they were; they are only coded less well. */
typedef struct tkv_rope {
    int dim;         /* channels that turn: even, at most head_dim; 0: none */
    int interleaved; /* 0: channels j and j + dim/2 (Hugging Face); 1: 2j and 2j + 1 (GGUF files of Llama) */
    float base;      /* 2 to 1e9; 0: 10000 */
    float scale;     /* of positions, up to 4; 0: 1. Linear scaling by 4 is 0.25 */
    /* NULL, or dim/2 of them, 0 to 1, in the place of the powers of base; not kept */
    const float *frequencies;
} tkv_rope;

typedef struct tkv_layer_config { /* one layer's exceptions; zero takes the cache's value */
    tkv_pair hot, warm, archive;
    int sink_tokens, hot_tokens, warm_tokens;
    int window;   /* sliding window: a query sees this many newest keys, its own included. TKV_NONE: none */
    int share_kv; /* 1 + index of an earlier layer whose K and V this one attends to; it is never appended to */
    int no_cache; /* 1: this layer has no K and V at all (a state-space layer, say) */
} tkv_layer_config;

/* >>ladder: how tight the tiers are, from loose to tight; entry 0 is where a cache begins. Lengths and formats
 * of 0 are the cache's own; hot_tokens = TKV_ALL keeps everything exact. What a layer says of itself holds at
 * every level. */
#define TKV_MAX_LEVELS 8
typedef struct tkv_level {
    int hot_tokens, warm_tokens;
    tkv_pair warm, archive;
} tkv_level;

/* When to go to another level, see tkv_policy_init and tkv_budget. */
typedef struct tkv_policy_config {
    float threshold[TKV_MAX_LEVELS - 1]; /* level i + 1 from threshold[i] on; rising, to 1. All 0: .80, .95 */
    float hysteresis;                    /* relaxes below a threshold less this; 0: .05 */
    float alpha;                         /* of the moving average, the first sample seeds it; 0: .20 */
    int min_level;                       /* where it begins and never goes below */
    int max_level;                       /* 0: the last one; TKV_NONE: level 0 for ever */
} tkv_policy_config;

/* >>events, for logs and counters. Called from the call that causes them, which is not over then: it must not call the
 * cache but for reports. */
typedef enum tkv_event_kind {
    TKV_EVENT_LEVEL = 0, /* the cache went from level `from` to level `to` */
    TKV_EVENT_BUDGET, /* an append, reservation or smaller budget was refused; `bytes` were asked for in all */
    TKV_EVENT_TABLE,  /* a layer has a (new) table of A, R or KVQUANT formats */
    TKV_EVENT_COUNT
} tkv_event_kind;
typedef struct tkv_event {
    tkv_event_kind kind;
    int layer, from, to; /* what does not apply is -1 */
    size_t bytes;        /* of LEVEL: in use */
    const char *text;    /* a sentence, valid during the call */
} tkv_event;
typedef void (*tkv_on_event)(void *user, const tkv_event *event);

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
    int sink_tokens;     /* first tokens, exact for ever; 0: 4 */
    int hot_tokens;      /* at least this many newest tokens stay exact; 0: 64 */
    int warm_tokens;     /* the next older ones; 0: 448 */
    int group_size;      /* values that share a scale in Q8 and KIVI formats: 64 or 32; 0: 64 */
    int allocation_unit; /* channels that get bits together in A formats: 4, or 16 for a GPU; 0: 4 */
    int fit;             /* bits of tkv_fit, for Q8, KIVI and SQUAT formats */
    int rotate;          /* bits of tkv_rotate, for INT8, INT4, FP8, FP4 */
    int center_k; /* 1: in the same formats, the mean of each channel of K and block is kept apart (fp16) */
    int squat_block; /* channels that SQUAT formats code together: 16, or 64 as its authors; 0: 16 */
    int subspaces;   /* parts of a token in SUBSPACE formats: 1 to 16; 0: 4 */
    int kvquant;     /* bits of tkv_kvquant, for KVQUANT formats */
    tkv_rope rope;   /* of the keys, for the same */
    int window;      /* sliding window of all layers; 0: none */
    tkv_pair hot, warm, archive;
    const tkv_layer_config *layers; /* NULL, or n_layers exceptions; read by tkv_create, not kept */
    /* the budget, see tkv_budget */
    size_t budget_bytes;     /* of everything that the cache holds, at any moment; 0: none */
    const tkv_level *ladder; /* n_levels of them, at most TKV_MAX_LEVELS, not kept; NULL: see tkv_budget */
    int n_levels;
    tkv_policy_config policy;
    tkv_on_event on_event; /* NULL: nobody wants to know */
    void *event_user;
    /* behaviour */
    tkv_nonfinite nonfinite;
    int precise; /* 1: two planes of q and of p in every format, 2e-3 of the output at most from arithmetic */
    tkv_isa isa; /* TKV_ISA_AUTO: the best one here. Another: that one or TKV_ERR_ISA */
    /* the quality meter, see tkv_quality */
    int quality_heads;  /* heads that it watches, at most 64; 0: there is no meter. 4 are a good start */
    int quality_tokens; /* coded tokens of each that it keeps exact, from 128; 0: 2048 */
    int quality_every;  /* it measures at every such position; 0: 32 or more, for 0.5 % of the time at most */
    /* the host */
    tkv_allocator allocator;
    tkv_parallel_for parallel_for;
    void *parallel_user;
    uint32_t end_canary; /* leave 0 */
} tkv_config;

TKV_API tkv_config tkv_config_default(void); /* all zeros, for C++ and for people who like a name */

/* Sets lengths and formats of the tiers to a plan that has a name; the other fields stay. Bits of an old value,
 * metadata included: "quality" 4.06, "balanced" 3.06 (what a config of zeros gets), "compact" 2.31, "extreme"
 * 1.81, and the designs that this one is compared with, "kivi" and "squat" 2.5, "kvquant-3" 3.5 (give it
 * cfg.rope), "by-context": of these three the first below 2,048 max_tokens (set before), the second below
 * 8,192, else the third. bench/QUALITY.md has what they do to a model. TKV_ERR_ARG: there is no such name,
 * nothing changed. tkv_preset_name(0), (1), ... are the names, then NULL. */
TKV_API tkv_status tkv_config_preset(tkv_config *cfg, const char *name);
TKV_API const char *tkv_preset_name(int i);

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

/* >>step. A step over all layers as one unit. tkv_begin first does what is due (as an append would), then opens
 * the step; appends inside it demote nothing and add at most max_append tokens per layer; tkv_commit checks
 * that every layer got the same number of tokens (TKV_ERR_STATE otherwise, the step stays open); tkv_abort
 * takes the step's tokens away again, leaving the cache as after tkv_begin (what attention told of the layers'
 * queries stays with the statistics). Out of order: TKV_ERR_STATE. tkv_begin can fail with TKV_ERR_NOMEM; it
 * costs the encoding that is due, the others O(layers). */
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
 * side between writes. Never allocates; uses at most 128 KiB of stack. */
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
 * FULL and ALL the warm tier then begins at the newest token. A and R formats without a table get one of what
 * there is, which serves until 2,048 tokens have come. TKV_ERR_NOMEM, or TKV_ERR_CAPACITY in place;
 * TKV_ERR_STATE in an open step. Cost: one encoding per block. */
TKV_API tkv_status tkv_flush(tkv_cache *kv, int seq, tkv_flush_mode mode);

/* >>calibration. A and R formats give bits to the channels and heads that attention looks at. What they need to
 * know they learn while the cache runs: when a layer has seen 512 tokens, all sequences together, its next
 * append makes a table; blocks that were due before stay in the next better tier until then. At 2,048 tokens
 * there is a better one for the blocks that follow, and nothing is collected afterwards. A caller need not do
 * anything, but call tkv_calibration_refresh if the first tokens were no real ones: ranges of more than four
 * times what was seen are cut off, and means of keys beyond +-65504. One who knows the model can save what one
 * cache learned and load it into others: they compress from the first block on. What SQUAT formats know of the
 * queries is not saved: it takes them 64 tokens, and they code as KIVI's until then. Learning from attention
 * needs atomics (gcc, clang); elsewhere tables come from the keys alone. KVQUANT formats learn ranges and levels
 * in the same way and time. Tables do not depend on the number of threads. None of these may be called in an
 * open step (TKV_ERR_STATE). Cost: O(layers * heads * head_dim^2), and 16 blocks decoded per layer where a table
 * is made, three times for KVQUANT. */
TKV_API int tkv_calibrated_layers(const tkv_cache *kv); /* layers that have a table */
/* Writes what was learned, the same bytes on every machine; *bytes is how many it takes. dst NULL: only that. Layers
 * without a table are left out. TKV_ERR_ARG: dst is too small, nothing written. */
TKV_API tkv_status tkv_calibration_save(const tkv_cache *kv, void *dst, size_t size, size_t *bytes);
/* Uses it from the next block on; blocks that are there keep the table they were coded with, of which four can
 * exist (in place: two): TKV_ERR_CAPACITY if blocks use all, TKV_ERR_NOMEM. TKV_ERR_DATA: damaged, or of
 * another model (layers, KV heads, head dimensions); any bytes are safe to try. The plan may differ from that
 * of the cache that saved; a layer that needs what was not saved (A and R formats one thing, KVQUANT another)
 * goes on learning. TKV_ERR_DATA also if a layer has KVQUANT formats with another cfg.rope or other bits of
 * cfg.kvquant than NORM. */
TKV_API tkv_status tkv_calibration_load(tkv_cache *kv, const void *src, size_t size);
/* Makes the missing tables now, of the tokens that are not yet in the archive, and stops learning. TKV_ERR_STATE: a
 * layer without a table has none but sinks. TKV_ERR_NOMEM. */
TKV_API tkv_status tkv_calibration_freeze(tkv_cache *kv);
/* Learns anew from the next 2,048 tokens, for a sequence that has changed its subject; then as after a load.
 * TKV_ERR_NOMEM. */
TKV_API tkv_status tkv_calibration_refresh(tkv_cache *kv);

/* Keys and values of one layer to learn a table of KVQUANT formats from, as a forward pass gives them. */
typedef struct tkv_samples {
    int layer, n;   /* n tokens, at most 2^18 */
    int start;      /* position of the first; 2^30 - 1 at most, as that of the last */
    int length;     /* of a sequence: after so many tokens positions begin at `start` again; 0: n */
    const float *k; /* [n][n_kv_heads][head_dim], after RoPE */
    const float *v; /* [n][n_kv_heads][v_head_dim] */
    /* NULL, or what an error of each value costs, such as its squared gradient (Fisher information), of the
     * same shapes; of K: of the value that is coded, before RoPE if it is. Not negative. */
    const float *k_weight, *v_weight;
} tkv_samples;
/* Makes the layer's table from samples: KVQuant's calibration (arXiv 2401.18079, sections 3.1 to 3.6).
 * Weights of k-means are squared ranges (equation 7) times those given. Leave the first tokens of a sequence
 * out, as the sinks are. Then as after a load; tkv_calibration_save keeps it. Errors, nothing changed:
 * TKV_ERR_ARG (no such layer, a layer without KVQUANT formats, or with A or R as well; a pointer is missing,
 * a number out of range), TKV_ERR_NONFINITE (or a weight is negative), TKV_ERR_STATE in an open step,
 * TKV_ERR_CAPACITY and TKV_ERR_NOMEM as tkv_calibration_load. Cost: 3 passes over the samples, and one more
 * for each 4096 / head_dim hundreds of tokens. */
TKV_API tkv_status tkv_calibration_fit(tkv_cache *kv, const tkv_samples *s);

/* >>reports. */
typedef struct tkv_tier_info {
    int tokens[TKV_TIER_COUNT]; /* per tier; sinks are HOT. Their sum and `dropped` make the length */
    int blocks[TKV_TIER_COUNT];
    int dropped; /* left every window, gone */
} tkv_tier_info;
/* Both O(blocks); TKV_ERR_ARG for a layer without a cache, TKV_ERR_RANGE for a token that is not held. */
TKV_API tkv_status tkv_tier_counts(const tkv_cache *kv, int seq, int layer, tkv_tier_info *out);
TKV_API tkv_status tkv_tier_of(const tkv_cache *kv, int seq, int layer, int token, tkv_tier *out);
/* The formats that blocks of a tier get, defaults included. */
TKV_API tkv_status tkv_tier_pair(const tkv_cache *kv, int layer, tkv_tier tier, tkv_pair *out);

typedef struct tkv_tier_bytes {
    size_t tokens;   /* summed over layers; a block shared by sequences counts once */
    size_t codes;    /* bytes that hold values (of the tokens present and of the room left in their blocks) */
    size_t metadata; /* scales and zeros */
} tkv_tier_bytes;
typedef struct tkv_memory_info {
    size_t total;                        /* what the allocator handed out and has not got back; the sum of: */
    tkv_tier_bytes tier[TKV_TIER_COUNT]; /*   codes and metadata of each tier */
    size_t tables;     /*   plans per layer, what they learned and learn from, the meter's sums */
    size_t index;      /*   block table, block lists, the cache itself */
    size_t scratch;    /*   work space of encoding and of parallel attention */
    size_t shadow;     /*   exact copies of the quality meter, used or not */
    size_t slack;      /*   free room in pages, padding */
    size_t peak;       /* highest total so far */
    size_t fp16_bytes; /* K and V of the same tokens, plain FP16, unpadded, without any overhead */
    double ratio;      /* fp16_bytes / total */
    double ratio_f32;  /* the same against plain F32 */
} tkv_memory_info;
TKV_API tkv_status tkv_memory(const tkv_cache *kv, tkv_memory_info *out); /* exact to the byte. O(blocks) */
/* The same for the blocks of one layer of one sequence: tiers, padding (slack), their sum; shared blocks count
 * in full, tables, index and scratch belong to nobody. TKV_ERR_ARG for a layer without a cache. */
TKV_API tkv_status tkv_memory_of(const tkv_cache *kv, int seq, int layer, tkv_memory_info *out);
/* What tkv_memory would say of n_seqs sequences of n_tokens each, appended token by token; allocates nothing.
 * Exact where one sequence comes after the other, but that the real `index` can be up to twice as large, having
 * grown for a moment; peak is total (a prompt in large chunks has a higher one: a chunk is exact until the
 * next). TKV_ERR_CONFIG if it is more than this machine can address. */
TKV_API tkv_status tkv_estimate(const tkv_config *cfg, int n_tokens, int n_seqs, tkv_memory_info *out);

/* >>quality meter. What compression costs, measured while the cache runs: attention of some queries is
 * computed a second time, with exact copies of coded blocks in their place, and compared with what tkv_attend
 * gave. It watches cfg.quality_heads KV heads, spread over the layers, of one sequence: the first that
 * begins, and when that is reset, the next that begins. Exact is what the hot tier held. Windows, masks,
 * ALiBi, soft caps, learned sinks and batches are as in the call; layers that share K and V count for the one
 * that has them.
 *
 * When a sequence has more coded tokens than cfg.quality_tokens, copies are of every second block, then of
 * every fourth, and so on; other blocks stand as they are on both sides. `coverage` is the share that had a
 * copy. All figures are of the covered blocks alone, so they are too low by it. Where errors of blocks are
 * independent they add up: output_error and kl divided by coverage, and 1 - (1 - top1) / coverage, estimate
 * the whole; the part of an error that all blocks have in common still comes out too low.
 *
 * tkv_attend returns the same bits with and without a meter. Figures do not depend on threads. Every call
 * counts, also one that is repeated. Memory is fetched by tkv_create: per head quality_tokens * (head_dim +
 * v_head_dim) values in the hot format (tkv_memory_info.shadow). It needs atomics (gcc, clang); elsewhere
 * there is no meter and samples stay 0. */
typedef struct tkv_quality_info {
    uint64_t samples;    /* comparisons: one query of one query head each */
    double coverage;     /* 0 .. 1, of the coded keys that samples saw; 1 if they saw none */
    double output_error; /* mean of |out - exact|^2 / |exact|^2 */
    double kl;           /* mean KL divergence of attention weights, exact to cached, nats */
    double kl_max;       /* largest of them. One sample counts for 16 at most, here and above */
    double top1;         /* share of samples whose strongest key is the exact one's (learned sinks apart) */
    int heads, every;    /* watched; positions from one measurement of a head to its next */
    int seq;             /* the sequence watched; TKV_NONE before one has begun */
} tkv_quality_info;
/* Of all samples since creation or tkv_quality_reset. Without samples the figures are 0, without a meter all
 * is (seq: TKV_NONE). TKV_ERR_ARG: a pointer is missing. O(heads). */
TKV_API tkv_status tkv_quality(const tkv_cache *kv, tkv_quality_info *out);
/* The same of one layer; no samples if none of its heads is watched. TKV_ERR_ARG for a layer without a
 * cache. */
TKV_API tkv_status tkv_quality_of(const tkv_cache *kv, int layer, tkv_quality_info *out);
/* Sums begin anew; copies stay. Counts as a write. */
TKV_API tkv_status tkv_quality_reset(tkv_cache *kv);

/* >>pressure. A controller turns a stream of pressures (bytes held over bytes allowed, say) into a level of an ordered
 * ladder, 0 the loosest: tight while the average is high, looser one level at a time when it has fallen. It knows
 * no cache and owns no memory; a struct of the caller's holds it. Zero means default, as everywhere. */
typedef struct tkv_policy_info {
    int level;
    float average, last, peak;   /* of the pressures, 0 .. 1 */
    float trend;                 /* moving average of the change from one sample to the next */
    float left;                  /* samples until pressure 1 at that trend; -1: it does not rise */
    uint64_t samples, refused;   /* refused: NaN or infinite, otherwise without effect */
    uint64_t tightened, relaxed; /* levels up, levels down */
} tkv_policy_info;

typedef struct tkv_policy { /* of tkv_policy_init; read it through tkv_policy_read */
    int lock;
    tkv_policy_config cfg;
    tkv_policy_info now;
} tkv_policy;

/* "default" (.80, .95, hysteresis .05, alpha .20), "fp16_only" (the same, never above level 0), "aggressive" (.50,
 * .80, .05, .30, from level 1). TKV_ERR_ARG: there is no such profile, nothing changed. */
TKV_API tkv_status tkv_policy_profile(tkv_policy_config *cfg, const char *name);
/* cfg NULL: all defaults. TKV_ERR_CONFIG, and *reason (may be NULL) says why: p is untouched. */
TKV_API tkv_status tkv_policy_init(tkv_policy *p, const tkv_policy_config *cfg, const char **reason);
/* One more pressure, cut to 0 .. 1; returns the level. From any thread (gcc, clang). Some ten ns. */
TKV_API int tkv_policy_observe(tkv_policy *p, float pressure);
TKV_API tkv_status tkv_policy_read(tkv_policy *p, tkv_policy_info *out); /* from any thread */
TKV_API void tkv_policy_reset(tkv_policy *p);                            /* as after tkv_policy_init */
/* The rule alone: where a controller at `level` goes with that average. 0 for a bad config; a NaN moves nothing. */
TKV_API int tkv_policy_target(const tkv_policy_config *cfg, float average, int level);

/* >>budget. With cfg.budget_bytes a cache is exact until memory says otherwise. Everything that it holds counts: pages,
 * tables, index, scratch, and two pages or so that recoding needs; the allocator is never asked for more, and in place
 * the budget is how large the memory must be (tkv_required_bytes gives it back). As bytes come near the budget, the
 * cache goes down the ladder, a level at a time, and recodes what is stored, oldest blocks first, a few per append, as
 * many as the new bytes require. Levels, if cfg.ladder does not say otherwise:
 *     0  everything exact                                3  the plan of the config (warm, then archive)
 *     1  8 bits behind hot_tokens                        4  archive A25 + R20
 *     2  4 bits behind hot_tokens                        5  archive A20 + R15
 * The average pressure (cfg.policy) decides when the next level begins: by default the first at 80 %, the others at
 * 95 % of the budget, each only when everything old is at the present one; whatever the average, the next level
 * begins when an append would not fit. When the last level is not enough the append gets TKV_ERR_BUDGET, and nothing
 * has changed. cfg.policy.max_level is how far it may go ("fp16_only": never beyond level 0). After a cut or a reset
 * the cache relaxes a level when all that it holds would fit at the looser one; blocks stay as they are, new ones
 * are looser. A block that several sequences hold, and the tokens of a sequence's last append, are not recoded.
 * A cfg.ladder without a budget: the static plan of a level, cfg.policy.min_level at first; see tkv_set_level. */
typedef struct tkv_budget_info {
    size_t budget, used, peak; /* bytes; used: without free pages, but with the room for recoding */
    int level, n_levels;
    tkv_policy_info policy;           /* average, trend, forecast in appends; levels up and down */
    uint64_t recoded[TKV_MAX_LEVELS]; /* blocks that came to the format of a level because of bytes */
    uint64_t demoted;                 /* blocks recoded in all, those that were due by age included */
    uint64_t refused;                 /* calls that got TKV_ERR_BUDGET */
    uint64_t pending;                 /* blocks that the present level would still recode. O(blocks) */
} tkv_budget_info;
TKV_API tkv_status tkv_budget(const tkv_cache *kv, tkv_budget_info *out);
/* Another budget from now on; a lower one tightens at once. 0: none, the static plan of the present level; not for
 * a cache in place, whose budget is at most the memory it has. TKV_ERR_BUDGET: what is there does not fit, nothing
 * changed. TKV_ERR_ARG: the cache was created without a budget. */
TKV_API tkv_status tkv_set_budget(tkv_cache *kv, size_t bytes);
/* To a level of the ladder, within cfg.policy; with a budget the policy goes on from there. Tighter: stored
 * blocks follow as bytes are needed. TKV_ERR_ARG: there is no such level. */
TKV_API tkv_status tkv_set_level(tkv_cache *kv, int level);
/* Another hot_tokens for all levels and layers that do not keep everything exact. TKV_ERR_ARG: not 1 to 2^30 - 1. */
TKV_API tkv_status tkv_set_hot_tokens(tkv_cache *kv, int hot_tokens);
/* Does up to max_work blocks of what appends would have to do soon, for idle moments: recoding until a tenth of what
 * the level allows is free again. *done (may be NULL) gets the number of blocks. O(sequences * layers) a block. */
TKV_API tkv_status tkv_maintain(tkv_cache *kv, int max_work, int *done);
/* A pressure of the caller's, 0 to 1, such as that of the whole process: counts until the next one where it is
 * above the cache's own. TKV_ERR_ARG: not a number. */
TKV_API tkv_status tkv_observe(tkv_cache *kv, float pressure);
/* Most tokens that n_seqs sequences can have each, token by token, within cfg.budget_bytes at the last level; allocates
 * nothing. TKV_ERR_ARG without a budget. */
TKV_API tkv_status tkv_max_context(const tkv_config *cfg, int n_seqs, int *n_tokens);

/* >>quality feedback. A controller turns scores of quality, 0 to 1 with 1 for no loss, into advice: more hot tokens
 * and a step to higher precision while the mean is below the target, the opposite while it is well above. It knows no
 * cache and owns no memory; a struct of the caller's holds it. Levels are those of a ladder as in tkv_policy: 0 has
 * the highest precision.
 *
 *   score  0 ............................ target ........ (1 + target) / 2 .......... 1
 *   advice   hot x 1.2, level - 1        |      nothing       |   hot x 0.9, level + 1
 *
 * The mean is that of the last 100 scores at most, 16 at least, none of them from before the plan last changed or
 * from the cool-down after it. With fewer than 100 it must be on its side of a limit by two standard errors (as
 * of independent scores); to fall back, it is enough that the last 16 are by three. What a step to higher
 * precision gained is remembered for 1,000 scores: no step back that would lose it again. So at a constant
 * quality there is one try of a cheaper plan in 1,000 scores at most. */
#define TKV_FEEDBACK_HISTORY 1000
typedef struct tkv_feedback_config {
    /* Of the mean score, .01 to .9999; 0: .97, as much as a perplexity 3 % higher. Known otherwise: it is
     * tkv_score_from_ppl(base, base + allowed). */
    float target;
    int cooldown;  /* scores after a change of plan that count for no advice; 0: 8; TKV_NONE: none */
    int min_hot;   /* it never advises fewer hot tokens ... 0: 32 */
    int max_hot;   /* ... or more; 0: 1024 */
    int min_level; /* ... or a higher precision ... */
    int max_level; /* ... or a lower one; 0: 3, the last of the usual ladder; TKV_NONE: level 0 for ever */
} tkv_feedback_config;

typedef enum tkv_advice_kind { TKV_ADVICE_KEEP = 0, TKV_ADVICE_FINER, TKV_ADVICE_CHEAPER } tkv_advice_kind;

typedef struct tkv_advice {
    tkv_advice_kind kind;
    int hot_tokens, level; /* the plan to have now: what was given where nothing is to change */
    int step;              /* of the level: -1 to higher precision, +1 to lower, 0 */
    float mean;            /* what it rests on: the mean of so many scores */
    int samples;
    const char *reason; /* a sentence, never NULL */
} tkv_advice;

typedef struct tkv_feedback_info {
    int n; /* scores that the next lines are about, the newest; with none, all are 0 */
    float average, least, most;
    float deviation;  /* standard, of a sample; 0 with fewer than 2 */
    float trend;      /* change from a score to the next: the slope of the straight line through them */
    int meets_target; /* 1: the average is at the target or above */
    int is_improving; /* 1: at least 16 scores, and the trend is above 0 by two standard errors */
    int is_stable;    /* 1: at least 16; deviation and the line's rise or fall at most (1 - target) / 2 */
    uint64_t scores, refused; /* all; refused: NaN, infinite, not in 0 .. 1, otherwise without effect */
    uint64_t finer, cheaper;  /* advice given */
} tkv_feedback_info;

typedef struct tkv_feedback { /* of tkv_feedback_init; read it through tkv_feedback_read */
    int lock;
    tkv_feedback_config cfg;
    int hot, level, moved;     /* the plan that the scores are about; moved: it may have changed since */
    float low, gain;           /* the mean that made us fall back, and what that gained; -1: not known */
    uint64_t since, gained_at; /* numbers of scores */
    uint64_t sum, squares;     /* of the newest since then, 100 at most */
    uint64_t scores, refused, finer, cheaper;
    uint32_t history[TKV_FEEDBACK_HISTORY]; /* a ring, in units of 2^-24 */
} tkv_feedback;

/* Scores, cut to 0 .. 1; -1 where there is none to be had (a number is not finite or out of range).
 * Perplexity: 1 - (ppl - base) / base, base being that of the exact cache on the same text; both at least 1.
 * Accuracy: of a task, accuracy / base, base above 0.
 * Quality: of the cache's own meter, 1 - weight * output_error / coverage; weight is by how much a perplexity rises
 * for that error, which is a matter of the model: about 1 for SmolLM2-135M, which is also its 0, a third and
 * three for two smaller ones. -1 also without samples or with a coverage below .05. Call tkv_quality_reset
 * between two, so that each score is of new samples; heads differ much, so watch many. */
TKV_API float tkv_score_from_ppl(double base, double ppl);
TKV_API float tkv_score_from_accuracy(double base, double accuracy);
TKV_API float tkv_score_from_quality(const tkv_quality_info *q, double weight);

/* cfg NULL: all defaults. TKV_ERR_CONFIG, and *reason (may be NULL) says why: f is untouched. */
TKV_API tkv_status tkv_feedback_init(tkv_feedback *f, const tkv_feedback_config *cfg, const char **reason);
/* One more score, from any thread (gcc, clang). TKV_ERR_ARG: refused and counted. Some ns. */
TKV_API tkv_status tkv_feedback_observe(tkv_feedback *f, float score);
/* What to do about a plan of so many hot tokens at that level. An advice to change counts as taken: the next needs new
 * scores. So does a plan that is another than at the last call (the pressure moved it, say), unless that
 * advised it. TKV_ERR_ARG: a pointer is missing, hot_tokens is not in 0 .. 2^30 - 1, level not in 0 ..
 * TKV_MAX_LEVELS - 1; nothing changed. About 100 ns; from any thread, though only one should follow. */
TKV_API tkv_status tkv_feedback_advise(tkv_feedback *f, int hot_tokens, int level, tkv_advice *out);
/* About the newest `last` scores, 0: 100; at most 1,000, or all there are. Some microseconds. */
TKV_API tkv_status tkv_feedback_read(tkv_feedback *f, int last, tkv_feedback_info *out);
TKV_API void tkv_feedback_reset(tkv_feedback *f); /* as after tkv_feedback_init */

/* >>threshold store. Plans that were found good for a model: by name, layer and context length. It is an array of the
 * caller's, kept in order; a program saves it wherever it wants, as a text that is checked when it comes back.
 * No function allocates. */
#define TKV_MODEL_NAME 64
typedef struct tkv_threshold {
    char model[TKV_MODEL_NAME];  /* 1 to 63 bytes and a 0; no control characters, no blank at either end */
    int layer;                   /* or TKV_ALL: found for all layers together */
    int context;                 /* tokens, 1 to 2^30 - 1 */
    int hot_tokens, warm_tokens; /* as in tkv_config: 0, TKV_NONE and TKV_ALL included */
    tkv_pair archive;
    float score; /* 0 to 1, 1: no loss; kept in millionths */
    int samples; /* scores that it is the mean of; 0: guessed */
} tkv_threshold;

typedef struct tkv_thresholds { /* tkv_thresholds t = {memory, 0, room}; */
    tkv_threshold *entry;       /* [room], the first n in use, in order of model, layer, context */
    int n, room;
} tkv_thresholds;

/* Adds an entry, or replaces that of the same model, layer and context. TKV_ERR_ARG: a field is out of range;
 * TKV_ERR_CAPACITY: no room. O(n). */
TKV_API tkv_status tkv_thresholds_put(tkv_thresholds *t, const tkv_threshold *e);
/* The entries for a model, the best first, `most` (10 are usual) at most; returns how many, 0 where there is none
 * or an argument is bad. Entries of the layer come before those for TKV_ALL, another layer's never; then the
 * nearest by context length |difference|, the better score, more samples, the longer context. O(n * most). */
#define TKV_THRESHOLD_CANDIDATES 10
TKV_API int tkv_thresholds_candidates(const tkv_thresholds *t, const char *model, int layer, int context,
                                      tkv_threshold *out, int most);
/* The first of these. TKV_ERR_RANGE: nothing is stored for this model and layer, out untouched. */
TKV_API tkv_status tkv_thresholds_find(const tkv_thresholds *t, const char *model, int layer, int context,
                                       tkv_threshold *out);
/* For a model that has no entries of its own but is like one that has (a fine-tuned copy, say): its entries once
 * more under another name, scores times `discount` (0: .9), samples 0. Entries that are there already stay. Whether two
 * models are alike the caller must know: an equal shape does not show it, so nothing is ever found under
 * another name. TKV_ERR_RANGE: nothing to copy; TKV_ERR_CAPACITY, TKV_ERR_ARG; nothing changed then. */
TKV_API tkv_status tkv_thresholds_transfer(tkv_thresholds *t, const char *from, const char *to,
                                           float discount);

/* A line with the version, one for each entry, one with a checksum; equal stores give equal texts. *bytes (may be
 * NULL) is how many it takes, no final 0 included. dst NULL: only that. TKV_ERR_ARG: dst is too small; nothing
 * written. */
TKV_API tkv_status tkv_thresholds_print(const tkv_thresholds *t, char *dst, size_t size, size_t *bytes);
/* Takes the entries of such a text in the place of those there are. TKV_ERR_DATA: damaged, or of another version, any
 * bytes are safe to try; TKV_ERR_CAPACITY: no room; `reason` (may be NULL) gets the line and what is wrong
 * with it, and nothing changes. */
TKV_API tkv_status tkv_thresholds_parse(tkv_thresholds *t, const char *src, size_t size, char *reason,
                                        size_t reason_size);
/* The same text through functions of the caller's. `write` takes all of it and returns 0, or another number to stop;
 * `read` returns how many bytes it gave, 0 at the end, a negative number to stop. */
typedef int (*tkv_write_bytes)(void *user, const char *bytes, size_t size);
typedef ptrdiff_t (*tkv_read_bytes)(void *user, char *bytes, size_t size);
/* A line at a time. TKV_ERR_CAPACITY: `write` stopped. */
TKV_API tkv_status tkv_thresholds_save(const tkv_thresholds *t, tkv_write_bytes write, void *user);
/* `work` takes the whole text: TKV_ERR_CAPACITY if it is longer than `size`. TKV_ERR_DATA also
 * if `read` stopped; the rest as tkv_thresholds_parse. */
TKV_API tkv_status tkv_thresholds_load(tkv_thresholds *t, tkv_read_bytes read, void *user, char *work,
                                       size_t size, char *reason, size_t reason_size);

/* >>what to keep. Rules for importance, eviction and recomputation, as pure functions and small structs of the
 * caller's: arrays over the tokens of one layer (or of a sequence) in, a decision out. They know no cache, allocate
 * nothing, and no cache calls them yet. Everything is decided alike on every machine but for the rounding of scores;
 * of equal tokens the older one goes first. An array has an entry for each of n slots, oldest first; bits of a mask
 * are bit i % 64 of word i / 64, so a block's 64 tokens are a word. n is 0 to 2^30 - 1.
 *
 * Importance of a token at step `now`, from the attention it got and from its age:
 *     attention * A(now) + recency * e^(-(now - position) / tau)
 * A takes in a step's mass: it is decayed by decay^(now - step of the last time), then the mass is added (or A is
 * the larger of both). So a token that nobody touches costs nothing, and the order of calls within a step is
 * no matter. The recency is that of the moment, not summed up over steps: it counts the same however often
 * tokens are touched. */
typedef enum tkv_importance_strategy {
    TKV_IMPORTANCE_HYBRID = 0,   /* "hybrid": sums; decay .95, attention .7, recency .3 (akv-cache) */
    TKV_IMPORTANCE_ACCUMULATION, /* "accumulation": sums, nothing decays: as H2O counts */
    TKV_IMPORTANCE_HEAVY_HITTER, /* "heavy_hitter": the largest mass of any step */
    TKV_IMPORTANCE_RECENCY,      /* "recency": age alone */
    TKV_IMPORTANCE_PERSISTENCE, /* "persistence": less 1 for each step with a mass below `low` (ScissorHands) */
    TKV_IMPORTANCE_STRATEGIES
} tkv_importance_strategy;
typedef struct tkv_importance_config { /* zero means the strategy's own */
    tkv_importance_strategy strategy;
    float decay;     /* per step, above 0 and at most 1 */
    float attention; /* weight of A, 0 to 1e6 */
    float recency;   /* weight of the age, 0 to 1e6 */
    float tau;       /* steps, 1 to 2^30; 0: 64 */
    float low;       /* what "persistence" counts as little; 0: an even share, 1 / n */
} tkv_importance_config;
typedef struct tkv_importance { /* of one token; zeroed: it never got any attention */
    float attention;            /* A as of `step` */
    int step;
} tkv_importance;
/* NULL: there is no such strategy. */
TKV_API const char *tkv_importance_name(tkv_importance_strategy strategy);
/* One step's mass of n tokens (tkv_attend_params.mass, or a score of the caller's), finite and not negative.
 * TKV_ERR_ARG: a pointer is missing, `now` is below 0 or before a token's last step; TKV_ERR_NONFINITE: a mass is no
 * such number; TKV_ERR_CONFIG. O(n). */
TKV_API tkv_status tkv_importance_add(const tkv_importance_config *cfg, tkv_importance *tokens,
                                      const float *mass, int n, int now);
/* Importance as of step `now`, which is the newest token's position. position NULL: 0 .. n-1. Errors as above. */
TKV_API tkv_status tkv_importance_read(const tkv_importance_config *cfg, const tkv_importance *tokens,
                                       const int *position, int n, int now, float *out);
typedef enum tkv_importance_heads {
    TKV_IMPORTANCE_MEAN = 0,
    TKV_IMPORTANCE_MAX,
    TKV_IMPORTANCE_SUM
} tkv_importance_heads;
/* Weights of several query heads as one: rows [n_heads][stride] to out[n]. stride 0: n; out may not lie in them. */
TKV_API tkv_status tkv_importance_aggregate(tkv_importance_heads how, const float *weights, ptrdiff_t stride,
                                            int n_heads, int n, float *out);
/* For tokens without known weights: the most that q.k can be for keys between low and high, channel by channel, such as
 * those of a block (Quest, arXiv 2406.10774). All have head_dim values. */
TKV_API float tkv_importance_bound(const float *q, const float *low, const float *high, int head_dim);
/* The k highest scores, best first, of equal ones the older first; *count is k, or as many as there are. without: NULL,
 * or bits of slots that do not take part (and are not read): what is gone, or what is kept anyway where these are to be
 * anchors. TKV_ERR_NONFINITE, TKV_ERR_ARG: nothing written. O(n + k log k). */
TKV_API tkv_status tkv_importance_top(const float *score, const uint64_t *without, int n, int k, int *out,
                                      int *count);

/* Promotion: which tokens (or blocks) deserve a dearer tier. Only those that have a better source, a kept or a
 * spilled copy or recomputation: decoding coded bytes restores nothing. */
#define TKV_IMPORTANCE_PER_STEP 64
typedef struct tkv_importance_promotion_config { /* zero means default */
    float threshold;                             /* least importance; 0: .05 */
    int per_step;                                /* at most 64; 0: 8 */
    int cooldown;                                /* steps from a move to the next; 0: 4; TKV_NONE: none */
} tkv_importance_promotion_config;
typedef struct tkv_importance_promotion { /* zeroed, then cfg */
    tkv_importance_promotion_config cfg;
    int step, used;                        /* promoted at this step */
    uint64_t promoted, no_source, waiting; /* since the beginning; no_source: calls where some had none */
} tkv_importance_promotion;
/* Up to per_step a step, in `out` (room for TKV_IMPORTANCE_PER_STEP), the most important first, and *count. `source`:
 * bits of those that have a better source; NULL: none has. moved[i]: the step at which i last changed its tier,
 * TKV_NONE: never; it becomes `now` for those that are promoted, and the caller sets it where it demotes.
 * Errors, nothing changed: TKV_ERR_ARG (`now` before the last call's as well), TKV_ERR_NONFINITE, TKV_ERR_CONFIG.
 * O(n), and some more for each promotion. */
TKV_API tkv_status tkv_importance_promote(tkv_importance_promotion *p, const float *score,
                                          const uint64_t *source, int *moved, int n, int now, int *out,
                                          int *count);

/* >>eviction: which tokens to drop so that at most `keep` stay. A policy gives every token a score; the lowest go,
 * all that must go at once. Selection is per layer: what comes from heads is aggregated before. Definitions stand in
 * evict.h. */
typedef enum tkv_evict_kind {
    TKV_EVICT_NONE = 0,     /* "none": TKV_ERR_BUDGET where something would have to go */
    TKV_EVICT_SLIDING,      /* "sliding": the oldest but the sinks (StreamingLLM, arXiv 2309.17453) */
    TKV_EVICT_H2O,          /* "h2o": least attention since it came (2306.14048) */
    TKV_EVICT_SNAPKV,       /* "snapkv": least pooled attention of the prompt's last queries (2404.14469) */
    TKV_EVICT_PYRAMIDKV,    /* "pyramidkv": the same, within budgets of tkv_evict_budgets (2406.02069) */
    TKV_EVICT_TOVA,         /* "tova": least weight from the last query (2401.06104) */
    TKV_EVICT_KNORM,        /* "knorm": longest keys (2406.11430) */
    TKV_EVICT_KEYDIFF,      /* "keydiff": keys most like the mean of all keys' directions (2504.15364) */
    TKV_EVICT_SCISSORHANDS, /* "scissorhands": most often below an even share (2305.17118) */
    TKV_EVICT_FIFO,         /* "fifo": the oldest, sinks or not */
    TKV_EVICT_RANDOM,       /* "random": by a hash of seed and position */
    TKV_EVICT_SCORES,       /* "scores": the caller's, such as tkv_importance_read's or KVzip's */
    TKV_EVICT_USER,         /* "user": by cfg.scorer */
    TKV_EVICT_KINDS
} tkv_evict_kind;
TKV_API const char *tkv_evict_name(tkv_evict_kind kind); /* NULL: there is none */
TKV_API tkv_status tkv_evict_from_name(const char *name, tkv_evict_kind *kind);

/* What is known of the tokens of a layer. Beside n a policy needs what tkv_evict_needs says, the rest may be NULL. */
typedef enum tkv_evict_need {
    TKV_EVICT_NEEDS_MASS = 1, /* bits */
    TKV_EVICT_NEEDS_OBSERVED = 2,
    TKV_EVICT_NEEDS_LAST = 4,
    TKV_EVICT_NEEDS_NORMS = 8,
    TKV_EVICT_NEEDS_KEYS = 16,
    TKV_EVICT_NEEDS_LOWS = 32,
    TKV_EVICT_NEEDS_SCORES = 64
} tkv_evict_need;
TKV_API int tkv_evict_needs(tkv_evict_kind kind); /* bits; 0: nothing, or no such policy */
typedef struct tkv_evict_view {
    int n;
    const uint64_t *alive;  /* NULL: all slots hold a token; else those of these bits: others are not read */
    const int *position;    /* rising, not negative; NULL: 0 .. n-1 */
    const uint64_t *pinned; /* NULL, or bits of tokens that stay whatever the budget says */
    /* NULL, or: all of a lower priority go before one of a higher. 0 is usual, -128 for what has expired */
    const signed char *priority;
    const float *mass;     /* attention since the token came, summed over queries and heads */
    const float *observed; /* the same from the prompt's last cfg.recent_tokens queries alone */
    const float *last;     /* weights of the last query, mean of the heads */
    const float *norms;    /* of keys, mean of the KV heads: tkv_evict_key_norms */
    const float *keys;     /* [n][n_kv_heads][head_dim] */
    int n_kv_heads, head_dim;
    /* How often below an even share: "persistence", negated or not. A history window begins where the caller
     * zeroes its tokens, after each batch, say */
    const float *lows;
    const float *scores; /* of the caller's; high ones stay */
} tkv_evict_view;

typedef struct tkv_evict_config { /* zero means default */
    tkv_evict_kind kind;
    /* Protected: tokens at positions below sink_tokens, and the newest recent_tokens. TKV_NONE: none; 0: the policy's,
     * which is 4 and 32, but "fifo" and "random" 0 and 0, "sliding" 4 and 1, "pyramidkv" 4 and 8 (and recent ones at
     * most half of what the sinks leave of `keep`: H2O's own share). In a small budget the newest token comes first,
     * then sinks, then the other recent ones. */
    int sink_tokens, recent_tokens;
    int pool;      /* "snapkv", "pyramidkv": tokens averaged, odd, at most 63; 0: 5 (SnapKV has 5 or 7) */
    uint64_t seed; /* of "random" */
    /* "user": the score of slot i, high ones stay */
    float (*scorer)(void *user, const tkv_evict_view *view, int i);
    void *user;
    /* when, see tkv_evict_due */
    float trigger; /* share of the budget that may fill up, above 0 and at most 1; 0: 1 (akv-cache: .9) */
    int batch;     /* how many go at once; 0: 64, an eighth of the budget at most */
} tkv_evict_config;
/* Scores of all slots (of those that are not alive, 0): high ones stay. TKV_ERR_CONFIG: cfg; TKV_ERR_ARG: the policy
 * needs what view has not, n or positions are wrong. TKV_ERR_NONFINITE: a token's score is no finite number; `score`
 * is not of use then. O(n), "keydiff" and tkv_evict_key_norms O(n * n_kv_heads * head_dim). */
TKV_API tkv_status tkv_evict_score(const tkv_evict_config *cfg, const tkv_evict_view *view, float *score);
typedef struct tkv_evict_result {
    int evicted, kept;
    int over;          /* kept - keep where pins do not let the budget hold; else 0 */
    int sinks, recent; /* protection as it was: yielded to the budget */
} tkv_evict_result;
/* Bits of the tokens to drop, n / 64 words rounded up, and (may be NULL) what that makes: of the tokens alive at most
 * `keep`, or all that are protected and pinned. `victims` lies apart from the view's masks. Errors, nothing written:
 * TKV_ERR_BUDGET ("none"), TKV_ERR_NONFINITE, TKV_ERR_ARG, TKV_ERR_CONFIG. O(n), 1 KiB of stack. */
TKV_API tkv_status tkv_evict_select(const tkv_evict_config *cfg, const tkv_evict_view *view,
                                    const float *score, int keep, uint64_t *victims, tkv_evict_result *out);
/* How many must go before `incoming` tokens come to n where `budget` are allowed: 0, or a batch, or more if need
 * be. */
TKV_API int tkv_evict_due(const tkv_evict_config *cfg, int n, int incoming, int budget);
/* Slots of the bits, rising; returns how many. `out` has room for all of them. */
TKV_API int tkv_evict_list(const uint64_t *mask, int n, int *out);
/* Moves what stays to the front of an array [n] of elements of `size` bytes, in order; returns how many. For positions
 * (so they stay what they were), importance, or anything else that is kept by slot. */
TKV_API int tkv_evict_compact(const uint64_t *victims, int n, void *array, size_t size);
/* out[i]: mean over KV heads of |k|. keys [n][n_kv_heads][head_dim]. */
TKV_API tkv_status tkv_evict_key_norms(const float *keys, int n, int n_kv_heads, int head_dim, float *out);

/* Budgets of layers: how the tokens of `total` (all layers together) are shared. Their sum is `total` exactly; parts
 * of tokens go to the largest remainders, of equal ones to the lower layer. */
typedef enum tkv_evict_shape {
    TKV_EVICT_UNIFORM = 0,
    /* PyramidKV: layer l gets w + max - l * (max - min) / (n_layers - 1), where C = total / n_layers,
     * min = (C - w) / beta, max = 2 (C - w) - min; if max > n - w: max = n - w, min = 2 (C - w) - max.
     * Uniform unless max >= min >= w */
    TKV_EVICT_PYRAMID,
    TKV_EVICT_LINEAR /* layer l of L gets a share of L - l; at least 1 */
} tkv_evict_shape;
typedef struct tkv_evict_budget {
    tkv_evict_shape shape;
    int n_layers;  /* 1 to 4096 */
    int64_t total; /* 0 to n_layers * (2^30 - 1); LINEAR: from n_layers */
    int n_tokens;  /* n: length of the sequence, for PYRAMID */
    int window;    /* w: tokens that every layer keeps; 0: 8, the authors'; TKV_NONE: none */
    int beta;      /* 1 to 100; 0: 20 */
} tkv_evict_budget;
/* out[n_layers]. TKV_ERR_ARG: a number is out of range. O(n_layers). */
TKV_API tkv_status tkv_evict_budgets(const tkv_evict_budget *b, int *out);

/* >>rematerialization: what may be dropped because it can be computed again. Keys and values of tokens a to b - 1 in
 * the first `layers` layers, everything before them being there, cost
 *     (b - a) * layers * (2 * layer_params + 4 * n_heads * head_dim * (a + b) / 2)   FLOPs:
 * a token cannot be computed without its prefix, nor a layer without those below. So whole blocks go, front to
 * back, and come back in the same order. */
typedef struct tkv_remat_config {
    /* the model; required */
    int n_layers, n_heads, head_dim;
    double layer_params; /* weights of a layer that a token is multiplied with */
    /* the rule; zero means default */
    float threshold;       /* pressure from which on anything is done; 0: .9 */
    int min_materialized;  /* tokens that stay; 0: 512; TKV_NONE: none */
    int sink_tokens;       /* never dropped; 0: 4; TKV_NONE: none */
    float age_tokens;      /* at this age a token is half as likely to be asked for; 0: 4096 */
    double quantize_price; /* FLOPs that freeing a byte by coding costs, its loss included; 0: 8, the work */
    double step_flops;     /* recomputation of one step, at most; 0: no limit */
} tkv_remat_config;
typedef enum tkv_remat_action { TKV_REMAT_KEEP = 0, TKV_REMAT_EVICT, TKV_REMAT_QUANTIZE } tkv_remat_action;
typedef struct tkv_remat_block {
    int start, end;         /* tokens start to end - 1; blocks follow one another without gaps */
    int layers;             /* 1 + the highest layer that this is of; 0: all */
    int dropped;            /* 1: it is gone already */
    size_t bytes;           /* held now */
    size_t quantized_bytes; /* in the next tighter format; as many or more: there is none */
    float use; /* share of steps that look at it, up to 1; 0: not known, as 1; below 0: it never is */
} tkv_remat_block;
typedef struct tkv_remat_info {
    uint64_t kept, evicted, quantized; /* decisions, blocks */
    uint64_t over_budget;              /* blocks that could not go: one alone costs more than step_flops */
    uint64_t freed;                    /* bytes, by both */
    uint64_t restored, waited; /* blocks: recomputed, had to wait for another step (or another call) */
    double flops;              /* of recomputation */
} tkv_remat_info;
typedef struct tkv_remat { /* of tkv_remat_init; read info as you like */
    tkv_remat_config cfg;
    int step;
    double spent; /* at this step */
    tkv_remat_info info;
} tkv_remat;
/* TKV_ERR_CONFIG, and *reason (may be NULL) says why: r is untouched. */
TKV_API tkv_status tkv_remat_init(tkv_remat *r, const tkv_remat_config *cfg, const char **reason);
/* The formula; layers 0: all. -1: a number is out of range. */
TKV_API double tkv_remat_flops(const tkv_remat *r, int start, int end, int layers);
/* What to do with blocks (n, oldest first, all that there are) so that `need` bytes become free, now being the position
 * of the newest token; *freed (may be NULL) is what that gives, less than need where there is no more to get. Below the
 * threshold nothing is done. A block goes where that costs fewer FLOPs a byte than coding does, with the chance that it
 * is asked for counted in, use / (1 + age / age_tokens); then blocks are coded, oldest first; if that is not enough
 * more go. Blocks go front to back behind the sinks, never fewer than min_materialized tokens stay, and no block that
 * costs more than step_flops goes. TKV_ERR_ARG (blocks are not in order), nothing changed. O(n). */
TKV_API tkv_status tkv_remat_decide(tkv_remat *r, const tkv_remat_block *blocks, int n, int now,
                                    float pressure, size_t need, tkv_remat_action *action, size_t *freed);
/* How many of the dropped blocks, front to back, may be recomputed at this step (a number that does not fall); what
 * they cost counts as spent. TKV_ERR_ARG: as above, or `step` is before the last one. */
TKV_API tkv_status tkv_remat_restore(tkv_remat *r, const tkv_remat_block *blocks, int n, int step, int *first,
                                     int *count);

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
 * the machine. x is [n_tokens][head_dim] with `stride` floats between tokens (0: head_dim). Fill it with zeros first.
 * SQUAT formats know of no queries here and code as KIVI's. KVQUANT formats know no table: K has the ranges
 * of the block in its bytes, 32 bits per channel more than in a cache, and levels are those of a normal
 * distribution. */
typedef struct tkv_codec {
    tkv_format format;
    tkv_side side;
    int head_dim;
    int group_size;                       /* 64 or 32; 0: 64. Ignored by exact formats */
    int fit, rotate, center_k, subspaces; /* as in tkv_config */
    int kvquant;                          /* the same */
    tkv_rope rope; /* the same; tkv_encode and tkv_decode read it, and its frequencies */
    int position;  /* of the first token, for rope; tkv_decode finds it in the bytes */
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

/* >>ages and presets. The tier that a token of this age is due for, by the lengths of cfg (NULL: the defaults): hot
 * below hot_tokens, warm for warm_tokens more, then archive. The newest token has age 0. A pure function: blocks move
 * whole and before an append, so a token of a cache can be some 64 ages late (tkv_tier_of), and sinks stay. */
TKV_API tkv_tier tkv_tier_for_age(const tkv_config *cfg, int age);
/* More plans for tkv_config_preset, of other designs, by their names. Hot and warm tokens and bits are theirs, keys
 * coded as KIVI's and SQuat's papers have them; all other fields of theirs are not ours to set or not mapped:
 *   adr               64 + 448, KIVI4, then as "by-context" (RuvLLM's ADR-004; its quality target: not mapped)
 *   small             32 + 224, KIVI4, KIVI2
 *   long_context      64 + 960, KIVI4, KIVI2
 *   large_context     128 + 896, KIVI4, SQUAT2 and KIVI2 (its four subspaces and rematerialization: not mapped)
 *   extreme_context   256 + 1792, KIVI4, KVQUANT3 (give it cfg.rope; rematerialization: not mapped)
 *   memory_optimized  32 + 224, KIVI4, KIVI2 (lengths stay as they are in both)
 *   akv               1024 + 2048, KIVI4, KIVI2 (akv-cache; its importance, promotion and host memory: not mapped)
 *   akv_quality       2048 + 2048, KIVI4, KIVI2 ("quality" is a plan of this library)
 *   aggressive        512 + 4096, KIVI2, KIVI2 (of pressure, there is tkv_policy_profile)
 *   k4v4 k3v3 k2v2    256, 128, 64 exact, then 4, 3, 2 bits (akv's AKVCache: quality, balanced, compact; its
 *                     Hadamard rotation and protected layers: not mapped)
 *   k4v3 k4v2         128 exact, then keys in 4 bits, values in 3, 2 (the same) */

/* >>texts. A config as lines `key = value` with comments from # on, or as one flat object of JSON (a text that begins
 * with a brace). Keys are the names of the fields: n_layers, rope.dim, layers[3].window (of layers 0 to 5:
 * layers[0-5].window). Lengths can be none and all, switches false and true, formats a30/r20 or, for both sides, one
 * name; bits are names with + between them, as fit = clip+norm. `preset` is a name for tkv_config_preset: it counts
 * as if it stood before all keys but max_tokens. The text may be any bytes. TKV_NO_REPORTS leaves all of these out. */
/* Memory of the caller's for what a config points to; it must live as long as that is used. */
typedef struct tkv_config_room {
    tkv_layer_config *layers;
    int n_layers; /* room of layers: as many as the config has */
    tkv_level *ladder;
    int n_levels; /* the same */
    float *frequencies;
    int n_frequencies; /* of rope.frequencies: rope.dim / 2 */
} tkv_config_room;
/* Fields that the text names; the others stay (begin with zeros). room (NULL: none) is used where the text has layers
 * or levels, which then are all that cfg has, or rope.frequencies. TKV_ERR_CONFIG: an unknown key, a bad value, a key
 * twice, no room; `reason` (may be NULL) gets the line and what would be right, cfg and the memory of room stay as they
 * were. Whether the whole is right, tkv_config_validate says. 10 KB of stack. Cost: O(size), three times. */
TKV_API tkv_status tkv_config_parse(tkv_config *cfg, const tkv_config_room *room, const char *text,
                                    size_t size, char *reason, size_t reason_size);
/* The fields that are not 0, as lines or (json 1) as JSON, with a final zero: tkv_config_parse makes the same config of
 * it. Allocator, parallel_for and canaries are no text. *needed (may be NULL) is the room for all of it; buf NULL asks
 * for that alone. TKV_ERR_ARG: too little room, nothing written. TKV_ERR_CONFIG: a field has no text (NaN, no such
 * format). */
TKV_API tkv_status tkv_config_print(const tkv_config *cfg, int json, char *buf, size_t size, size_t *needed);
/* The same of a policy: threshold (a list), hysteresis, alpha, min_level, max_level, and `profile` (tkv_policy_profile)
 * in the place of `preset`. */
TKV_API tkv_status tkv_policy_parse(tkv_policy_config *cfg, const char *text, size_t size, char *reason,
                                    size_t reason_size);
TKV_API tkv_status tkv_policy_print(const tkv_policy_config *cfg, int json, char *buf, size_t size,
                                    size_t *needed);
/* What the cache is and holds, as one object of JSON: version, config (with defaults, as tkv_config_parse reads it),
 * formats of each layer's tiers, lengths and tokens per tier of each sequence that exists (arrays over layers; null: a
 * layer without a cache of its own), then figures: memory, tokens, sequences, quality (null without a meter). buf, size
 * and needed as in tkv_config_print. O(blocks), twice. */
TKV_API tkv_status tkv_state_json(const tkv_cache *kv, char *buf, size_t size, size_t *needed);
/* The same figures in Prometheus' text format, version 0.0.4. labels (NULL: none) go to every line: name=value,
 * name=value; values are UTF-8, escaped here, a comma or backslash in one stands after a backslash. TKV_ERR_ARG: bad
 * labels (part, tier, version and isa are taken). */
TKV_API tkv_status tkv_format_prometheus(const tkv_cache *kv, const char *labels, char *buf, size_t size,
                                         size_t *needed);

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

/* The same for double. Two roundings (64 bits, then 53) are one only where the first is exact, or seldom. */
static double tkvi_f64(double x) {
#if defined(FLT_EVAL_METHOD) && (FLT_EVAL_METHOD == 0 || FLT_EVAL_METHOD == 1)
    return x;
#else
    volatile double v = x;
    return v;
#endif
}

/* Not inlined: no compiler fuses these products into a sum. */
static TKVI_NOINLINE void tkvi_multiplied(float *dst, const float *x, const float *y, int n) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f32(x[i] * y[i]);
}

/* Round half to even, |x| < 2^22: 1.5 * 2^23 makes the sum's last mantissa bit worth one. */
static int tkvi_rne(float x) { return (int)(tkvi_bits(x + 12582912.0f) - 0x4b400000u); }

static float tkvi_clampf(float x, float lo, float hi) { return x < lo ? lo : x > hi ? hi : x; }

/* x as a whole number of at most `most`, to be summed; 0 for what is none (by bits: right under -ffast-math). */
static int64_t tkvi_counted(float x, float most) {
    return tkvi_is_finite(x) ? (int64_t)tkvi_clampf(x, -most, most) : 0;
}

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

/* >>checksums: FNV-1a, 64 bits */
#define TKVI_FNV1A_START 0xcbf29ce484222325u

static uint64_t tkvi_fnv1a_more(uint64_t h, const uint8_t *p, size_t n) {
    while (n--) h = (h ^ *p++) * 0x100000001b3u;
    return h;
}

/* >>memory: every byte goes through a heap that counts. */
typedef struct tkvi_heap {
    tkv_allocator from;
    size_t held, peak;
    size_t limit; /* never more than this; 0: no limit */
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
    void *p;
    if (heap->limit && (heap->held > heap->limit || size > heap->limit - heap->held)) return NULL;
    p = heap->from.alloc(heap->from.user, size, TKVI_ALIGN);
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

/* >>locks, for a few instructions. Where there are no atomics they do nothing: see who uses them. */
static void tkvi_lock(int *lock) {
#if defined(__GNUC__) || defined(__clang__)
    while (__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE)) continue;
#else
    (void)lock;
#endif
}

static void tkvi_unlock(int *lock) {
#if defined(__GNUC__) || defined(__clang__)
    __atomic_store_n(lock, 0, __ATOMIC_RELEASE);
#else
    (void)lock;
#endif
}

#endif /* TKVI_BASE_H */
/* ======== logscale.h ======== */
/*
 * logscale.h - scales in one byte: 16 steps to the octave, 16 octaves, and zero.
 *
 *   code 0: 0;  code 1 + i: m[i % 16] / 1024 * 2^(top - 16 + i / 16)      i = 0 .. 254
 *
 * m[k] = 1024 * 2^(k/16), rounded. A scale takes the code whose exact step, before that rounding, is nearest in
 * the logarithm: borders are 2^((2k+1)/32), as rounded 23 bits of a float's mantissa, and what is on one goes up.
 * Scales below the window have code 1, those above it 255; 0 stays 0.
 *
 * Every value has 11 significant bits, as an fp16 scale has, so that scale * code is exact in a float. `top` is the
 * owner's: it puts the window where a head's scales are. Nothing here calls log or exp: bits are compared and
 * composed, the same on every machine. May call base.
 */
#ifndef TKVI_LOGSCALE_H
#define TKVI_LOGSCALE_H


#define TKVI_LOG_TOP 96      /* tops are -96 .. 96 */
#define TKVI_LOG_TOP_ALIKE 8 /* where nothing is known: scales from 2^-8 to 2^8 */

static const uint16_t tkvi_log_mantissa[16] = {1024, 1069, 1117, 1166, 1218, 1272, 1328, 1387,
                                               1448, 1512, 1579, 1649, 1722, 1798, 1878, 1961};
/* 23 mantissa bits from which on the next step is nearer (in the logarithm). */
static const uint32_t tkvi_log_border[16] = {183687,  563215,  959546,  1373424, 1805626, 2256963,
                                             2728283, 3220470, 3734447, 4271181, 4831678, 5416990,
                                             6028216, 6666503, 7333050, 8029107};

static float tkvi_log_value(int code, int top) {
    int i = code - 1;
    if (code == 0) return 0.0f;
    return tkvi_from_bits((uint32_t)(127 + top - 16 + i / 16) << 23 |
                          ((uint32_t)tkvi_log_mantissa[i % 16] - 1024u) << 13);
}

/* The nearest code; what is outside of the window takes its end. 0 only for 0 (and less). */
static int tkvi_log_code(float s, int top) {
    uint32_t bits = tkvi_bits(s), mantissa = bits & 0x7fffffu;
    int octave = (int)(bits >> 23) - 127 - (top - 16), step, code;
    if (!(s > 0.0f)) return 0;
    step = (int)(mantissa >> 19); /* borders are further apart than that below the middle, and nearer above */
    while (step > 0 && mantissa < tkvi_log_border[step - 1]) step--;
    while (step < 16 && mantissa >= tkvi_log_border[step]) step++;
    code = 1 + 16 * octave + step;
    return code < 1 ? 1 : code > 255 ? 255 : code;
}

/* A top that has room for a largest scale `most`, with two octaves to spare. Tokens that are all zero say nothing. */
static int tkvi_log_top(float most) {
    int top = most > 0.0f ? (int)(tkvi_bits(most) >> 23) - 127 + 3 : TKVI_LOG_TOP_ALIKE;
    return top < -TKVI_LOG_TOP ? -TKVI_LOG_TOP : top > TKVI_LOG_TOP ? TKVI_LOG_TOP : top;
}

#endif /* TKVI_LOGSCALE_H */
/* ======== rotate.h ======== */
/*
 * rotate.h - the randomised Hadamard rotation of a head: signs, then butterflies (QuaRot, arXiv 2404.00456,
 * section 3; the signs are a constant of the format). After it, the channels of a vector look Gaussian and alike,
 * whatever they were, and one grid fits them all. It is orthonormal: q.k and the norm of v stay as they are.
 *
 * head_dim need not be a power of two: butterflies over the first 2^k channels, then over the last 2^k ones,
 * 2^k being the largest power of two that fits. The two windows overlap, so everything mixes. Where 2^k is
 * head_dim there is one window. A window: a, b become a + b, a - b at distances 1, 2, 4 .. 2^(k-1), in floats,
 * and then all is multiplied by 2^(-k/2), as a float. Back: windows in the opposite order, then the signs.
 *
 * Only sums, and one product with nothing added to it, so FMA changes no bit. May call base.
 */
#ifndef TKVI_ROTATE_H
#define TKVI_ROTATE_H


/* Bit c % 32 of word c / 32 is the sign of channel c: 256 fair coins (SHA-256 of "tieredkv", little-endian). */
static const uint32_t tkvi_signs[TKV_MAX_HEAD_DIM / 32] = {
    0x7176da20u, 0x332a2459u, 0x5c761011u, 0x5d6d9a20u, 0x3ab82810u, 0x0674eccau, 0xc8b52373u, 0x868e3452u};

/* x[0 .. n-1], n a power of two, becomes its Hadamard transform, not normalised. */
static TKVI_NOINLINE void tkvi_butterflies(float *x, int n) {
    int h, i, j;
    for (h = 1; h < n; h *= 2)
        for (i = 0; i < n; i += 2 * h)
            for (j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = tkvi_f32(a + b);
                x[j + h] = tkvi_f32(a - b);
            }
}

/* Not inlined: a compiler may fuse these products into the sums of another function otherwise. */
static TKVI_NOINLINE void tkvi_times(float *x, int n, float by) {
    int i;
    for (i = 0; i < n; i++) x[i] = tkvi_f32(x[i] * by);
}

static TKVI_NOINLINE void tkvi_flip(float *x, int n) {
    int i;
    for (i = 0; i < n; i++) x[i] = tkvi_signs[i / 32] >> i % 32 & 1 ? -x[i] : x[i];
}

/* 2^(-k / 2): what makes butterflies over 2^k values orthonormal. */
static const float tkvi_hadamard_norm[9] = {
    1.0f, 0.70710678118f, 0.5f, 0.35355339059f, 0.25f, 0.17677669530f, 0.125f, 0.08838834765f, 0.0625f};

static void tkvi_window(float *x, int n, int log2n) {
    tkvi_butterflies(x, n);
    tkvi_times(x, n, tkvi_hadamard_norm[log2n]);
}

static int tkvi_log2_floor(int n) {
    int k = 0;
    while (n >> (k + 1)) k++;
    return k;
}

static void tkvi_rotate(float *x, int dim) {
    int k = tkvi_log2_floor(dim), n = 1 << k;
    tkvi_flip(x, dim);
    tkvi_window(x, n, k);
    if (n < dim) tkvi_window(x + dim - n, n, k);
}

static void tkvi_rotate_back(float *x, int dim) {
    int k = tkvi_log2_floor(dim), n = 1 << k;
    if (n < dim) tkvi_window(x + dim - n, n, k);
    tkvi_window(x, n, k);
    tkvi_flip(x, dim);
}

#endif /* TKVI_ROTATE_H */
/* ======== rope.h ======== */
/*
 * rope.h - the rotation that a model has turned its keys by, taken back and done again (RoPE, arXiv
 * 2104.09864, section 3.2). For formats that code keys as they were before it. May call base.
 *
 * Pair j of a head's channels turns by frequency[j] radians with each position:
 *
 *     a' = a cos - b sin     b' = b cos + a sin        frequency[j] = scale * base^(-2j / dim), or as given
 *
 * Everything up to the cosine is whole numbers, so that each machine has the same bits under any flags, and a
 * position of a million has as good an angle as the first: frequencies in turns of 2^64 (a sum of them wraps
 * where a turn is full), angles as the upper 32 bits of that, sine and cosine by Taylor's series in 31 bits
 * about the nearest quarter (error 2e-9). Frequencies come from the integer root of 1 / base, found bit by
 * bit: no pow, no libm.
 * Products and their sums are made in different functions: no compiler fuses them.
 */
#ifndef TKVI_ROPE_H
#define TKVI_ROPE_H


/* >>frequencies, in turns of 2^64 a position */
/* The upper half of a product. */
static uint64_t tkvi_mul_high(uint64_t a, uint64_t b) {
    uint64_t al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32;
    uint64_t low = al * bl, m1 = ah * bl + (low >> 32), m2 = al * bh + (m1 & 0xffffffffu);
    return ah * bh + (m1 >> 32) + (m2 >> 32);
}

/* Product of fractions, 2^63 being 1. */
static uint64_t tkvi_mul63(uint64_t a, uint64_t b) { return tkvi_mul_high(a, b) << 1; }

static uint64_t tkvi_power63(uint64_t a, int n) {
    uint64_t p = (uint64_t)1 << 63;
    for (; n > 0; n >>= 1) {
        if (n & 1) p = tkvi_mul63(p, a);
        a = tkvi_mul63(a, a);
    }
    return p;
}

/* Radians, 0 to 4, as turns: times 2^64 / 2 pi. */
static uint64_t tkvi_turns(float radians) {
    uint32_t bits = tkvi_bits(radians), exponent = bits >> 23 & 255u, shift = 150u - exponent;
    uint64_t m = (bits & 0x7fffffu) | 0x800000u; /* radians = m / 2^shift */
    uint64_t high = 0x28be60dbu * m, low = 0x9391054au * m;
    if (exponent == 0 || shift >= 88u) return 0;
    return shift < 32u ? (high << (32u - shift)) + (low >> shift) : (high + (low >> 32)) >> (shift - 32u);
}

/* base^(-1 / pairs), 2^63 being 1: the largest number whose power does not exceed 1 / base. */
static uint64_t tkvi_rope_ratio(float base, int pairs) {
    uint32_t bits = tkvi_bits(base), m = (bits & 0x7fffffu) | 0x800000u;
    int shift = 150 - (int)(bits >> 23), bit; /* base = m / 2^shift */
    uint64_t one = (uint64_t)1 << 63, q = one / m, more = (one % m << 39) / m, inverse, r = 0;
    inverse = shift >= 0 ? (q << shift) + (more >> (39 - shift)) : q >> -shift;
    for (bit = 62; bit >= 0; bit--)
        if (tkvi_power63(r | (uint64_t)1 << bit, pairs) <= inverse) r |= (uint64_t)1 << bit;
    return r;
}

/* What is wrong with a descriptor; NULL: nothing. */
static const char *tkvi_rope_fault(const tkv_rope *r, int head_dim, const char **field, float *value) {
    int j;
    *field = "rope.dim";
    *value = (float)r->dim;
    if (r->dim < 0 || r->dim > head_dim || r->dim % 2)
        return "it must be even and at most head_dim, or 0 for none";
    *field = "rope.interleaved";
    *value = (float)r->interleaved;
    if (r->interleaved & ~1) return "it must be 0 or 1";
    *field = "rope.scale";
    *value = r->scale;
    if (!tkvi_is_finite(r->scale) || r->scale < 0.0f || r->scale > 4.0f)
        return "it must be more than 0 and at most 4, or 0 for 1";
    *field = "rope.base";
    *value = r->base;
    if (!tkvi_is_finite(r->base) || (r->base != 0.0f && !(r->base >= 2.0f && r->base <= 1e9f)))
        return "it must be 2 to 1e9, or 0 for 10000";
    *field = "one of rope.frequencies";
    for (j = 0; r->frequencies && j < r->dim / 2; j++) {
        *value = r->frequencies[j];
        if (!tkvi_is_finite(*value) || *value < 0.0f || *value > 1.0f) return "it must be 0 to 1, in radians";
    }
    return NULL;
}

static const char *tkvi_rope_wrong(const tkv_rope *r, int head_dim) {
    const char *field;
    float value;
    return tkvi_rope_fault(r, head_dim, &field, &value);
}

/* What a side has to know. */
#define TKVI_ROPE_NEAR 16

typedef struct tkvi_rope {
    int pairs, apart, step;              /* pair j is channels j * step and j * step + apart */
    uint64_t turn[TKV_MAX_HEAD_DIM / 2]; /* [pairs] */
    /* Of 0 .. 16 positions, for kernels: tkvi_cos_sin takes longer than all else that they do. */
    float cosine[TKVI_ROPE_NEAR + 1][TKV_MAX_HEAD_DIM / 2], sine[TKVI_ROPE_NEAR + 1][TKV_MAX_HEAD_DIM / 2];
} tkvi_rope;

static void tkvi_cos_sin(uint64_t angle, float *cosine, float *sine);

/* The descriptor must be right. */
static void tkvi_rope_make(tkvi_rope *rope, const tkv_rope *r) {
    float scale = r->scale > 0.0f ? r->scale : 1.0f, base = r->base > 0.0f ? r->base : 10000.0f;
    uint64_t first = tkvi_turns(scale), ratio, power;
    int j, i;
    memset(rope, 0, sizeof *rope);
    rope->pairs = r->dim / 2;
    rope->step = r->interleaved ? 2 : 1;
    rope->apart = r->interleaved ? 1 : rope->pairs;
    if (rope->pairs == 0) return;
    ratio = power = tkvi_rope_ratio(base, rope->pairs);
    for (j = 0; j < rope->pairs; j++) {
        rope->turn[j] = j ? tkvi_mul63(first, power) : first;
        if (j) power = tkvi_mul63(power, ratio);
        if (r->frequencies) rope->turn[j] = tkvi_turns(tkvi_f32(r->frequencies[j] * scale));
        for (i = 0; i <= TKVI_ROPE_NEAR; i++)
            tkvi_cos_sin((uint64_t)i * rope->turn[j], &rope->cosine[i][j], &rope->sine[i][j]);
    }
}

/* >>turning */
/* Cosine and sine of an angle in turns of 2^64. */
static void tkvi_cos_sin(uint64_t angle, float *cosine, float *sine) {
    const uint32_t one = 0x80000000u;
    uint32_t p = (uint32_t)(angle >> 32), quarter = (p + 0x20000000u) >> 30, rest = p - (quarter << 30);
    uint32_t negative = rest >> 31, a = negative ? 0u - rest : rest; /* up to an eighth of a turn */
    uint64_t x = (uint64_t)a * 0x6487ed51u >> 29, z = x * x >> 31, t;
    int32_t c, s;
    t = one - z / 90u;
    t = one - (z * t >> 31) / 56u;
    t = one - (z * t >> 31) / 30u;
    t = one - (z * t >> 31) / 12u;
    c = (int32_t)((one - (z * t >> 31) / 2u) >> 1);
    t = one - z / 72u;
    t = one - (z * t >> 31) / 42u;
    t = one - (z * t >> 31) / 20u;
    t = one - (z * t >> 31) / 6u;
    s = (int32_t)((x * t >> 31) >> 1);
    if (negative) s = -s;
    if (quarter & 1u) { /* a quarter further: cos is -sin, sin is cos */
        int32_t was = c;
        c = -s;
        s = was;
    }
    if (quarter & 2u) {
        c = -c;
        s = -s;
    }
    *cosine = (float)c * 9.3132257461547852e-10f; /* 2^-30 */
    *sine = (float)s * 9.3132257461547852e-10f;
}

/* Turns a key of this position as the model did (back 0), or takes it back (1). */
static void tkvi_rope_turn(const tkvi_rope *rope, int64_t position, int back, float *x) {
    float a[TKV_MAX_HEAD_DIM / 2], b[TKV_MAX_HEAD_DIM / 2], c[TKV_MAX_HEAD_DIM / 2], s[TKV_MAX_HEAD_DIM / 2];
    float ac[TKV_MAX_HEAD_DIM / 2], bs[TKV_MAX_HEAD_DIM / 2];
    int j, n = rope->pairs;
    if (n < 1) return;
    for (j = 0; j < n; j++) {
        tkvi_cos_sin((uint64_t)position * rope->turn[j], &c[j], &s[j]);
        if (back) s[j] = -s[j];
        a[j] = x[j * rope->step];
        b[j] = x[j * rope->step + rope->apart];
    }
    tkvi_multiplied(ac, a, c, n);
    tkvi_multiplied(bs, b, s, n);
    for (j = 0; j < n; j++) x[j * rope->step] = tkvi_f32(ac[j] - bs[j]);
    tkvi_multiplied(bs, b, c, n);
    tkvi_multiplied(ac, a, s, n);
    for (j = 0; j < n; j++) x[j * rope->step + rope->apart] = tkvi_f32(bs[j] + ac[j]);
}

#endif /* TKVI_ROPE_H */
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

/* Eight codes at a time: bytes of a word, none of which ever carries into the next. */
static uint64_t tkvi_load8(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

static void tkvi_store8(uint8_t *p, uint64_t x) { memcpy(p, &x, 8); }

#define TKVI_EACH_BYTE(b) ((uint64_t)(b)*0x0101010101010101u)

/* Bits `shift` and up of the codes, `bits` of them, as vectors of 64 bytes with 8 / bits planes each. */
static void tkvi_pack_planes(uint8_t *dst, const uint8_t *code, int bits, int shift) {
    int per = 8 / bits, v, k, j;
    uint64_t mask = TKVI_EACH_BYTE((1 << bits) - 1);
    for (v = 0; v < 4 / per || v == 0; v++)
        for (j = 0; j < 64; j += 8) {
            uint64_t x = 0;
            for (k = 0; k < per && k < 4; k++)
                x |= (tkvi_load8(code + 64 * (v * per + k) + j) >> shift & mask) << (k * bits);
            tkvi_store8(dst + 64 * v + j, x);
        }
}

static void tkvi_unpack_planes(const uint8_t *src, uint8_t *code, int bits, int shift) {
    int per = 8 / bits, p, j;
    uint64_t mask = TKVI_EACH_BYTE((1 << bits) - 1);
    for (p = 0; p < 4; p++)
        for (j = 0; j < 64; j += 8) {
            uint64_t x = tkvi_load8(src + p / per * 64 + j) >> (p % per * bits) & mask;
            tkvi_store8(code + 64 * p + j, tkvi_load8(code + 64 * p + j) | x << shift);
        }
}

/* The 1-bit half of a tile: bit `bit` of its codes, into the upper or lower half of the bytes at v. */
static void tkvi_pack_half(uint8_t *v, const uint8_t *code, int bit, int up) {
    int p, j;
    for (j = 0; j < 64; j += 8) {
        uint64_t x = tkvi_load8(v + j) & ~(TKVI_EACH_BYTE(15) << up);
        for (p = 0; p < 4; p++) x |= (tkvi_load8(code + 64 * p + j) >> bit & TKVI_EACH_BYTE(1)) << (up + p);
        tkvi_store8(v + j, x);
    }
}

static void tkvi_unpack_half(const uint8_t *v, uint8_t *code, int bit, int up) {
    int p, j;
    for (p = 0; p < 4; p++)
        for (j = 0; j < 64; j += 8) {
            uint64_t x = tkvi_load8(v + j) >> (up + p) & TKVI_EACH_BYTE(1);
            tkvi_store8(code + 64 * p + j, tkvi_load8(code + 64 * p + j) | x << bit);
        }
}

static void tkvi_pack_tile(uint8_t *codes, const tkvi_tile_at *at, int width, const uint8_t *code) {
    uint8_t *wide = codes + at->wide;
    int low = width == 8 ? 8 : width >= 4 ? 4 : width >= 2 ? 2 : 0;
    if (low) tkvi_pack_planes(wide, code, low, 0);
    if (width == 6) tkvi_pack_planes(wide + 128, code, 2, 4);
    if (tkvi_has_half[width])
        tkvi_pack_half(codes + at->halves + at->half / 2 * 64, code, low, at->half % 2 * 4);
}

static void tkvi_unpack_tile(const uint8_t *codes, const tkvi_tile_at *at, int width, uint8_t *code) {
    const uint8_t *wide = codes + at->wide;
    int low = width == 8 ? 8 : width >= 4 ? 4 : width >= 2 ? 2 : 0;
    memset(code, 0, TKVI_TILE_CODES);
    if (low) tkvi_unpack_planes(wide, code, low, 0);
    if (width == 6) tkvi_unpack_planes(wide + 128, code, 2, 4);
    if (tkvi_has_half[width])
        tkvi_unpack_half(codes + at->halves + at->half / 2 * 64, code, low, at->half % 2 * 4);
}

#endif /* TKVI_TILE_H */
/* ======== minifloat.h ======== */
/*
 * minifloat.h - floats of 4 and 8 bits: E2M1, E4M3, E5M2 (OCP 8-bit Floating Point 1.0; OCP Microscaling
 * Formats 1.0, section 5.3), rounded half to even by their bits, saturating.
 *
 *   | sign | exponent e | mantissa of m bits |
 *   e = 0: mantissa * 2^(1 - bias - m), else (2^m + mantissa) * 2^(e - bias - m)
 *
 * E4M3 and E5M2 are taken times 2^-6 and 2^-12: their largest finite levels are then 7 and 14, so that the
 * fp16 scale beside them stays far from its subnormals. What OCP calls NaN or infinity is never written, and
 * reads as the number that the bits would spell. Zero has one code. May call base.
 */
#ifndef TKVI_MINIFLOAT_H
#define TKVI_MINIFLOAT_H


typedef struct tkvi_minifloat {
    int bits, mantissa; /* of the whole without its sign; of the mantissa */
    int low;            /* exponent of the last place of subnormals */
    int most;           /* largest code */
} tkvi_minifloat;

static const tkvi_minifloat tkvi_e2m1 = {3, 1, -1, 7};
static const tkvi_minifloat tkvi_e4m3 = {7, 3, -9 - 6, 0x7e};
#define TKVI_E5M2_LOW (-16 - 12)
static const tkvi_minifloat tkvi_e5m2 = {7, 2, TKVI_E5M2_LOW, 0x7b};
#define TKVI_E4M3_TOP 7.0f
#define TKVI_E5M2_TOP 14.0f

static float tkvi_mini_level(const tkvi_minifloat *f, int code) {
    int exponent = (code & ((1 << f->bits) - 1)) >> f->mantissa, m = code & ((1 << f->mantissa) - 1);
    float place, x;
    if (exponent) m += 1 << f->mantissa;
    place = tkvi_from_bits((uint32_t)(127 + f->low + tkvi_max(exponent, 1) - 1) << 23);
    x = (float)m * place; /* exact */
    return code >> f->bits & 1 ? -x : x;
}

/* The nearest code. */
static int tkvi_mini_code(const tkvi_minifloat *f, float x) {
    uint32_t bits = tkvi_bits(x), a = bits & 0x7fffffffu;
    int octave = (int)(a >> 23) - 127 - (f->low + f->mantissa), code; /* above the smallest normal one */
    if (octave < 0) octave = 0;
    if (octave > 32) code = f->most;
    else
        code = (octave << f->mantissa) +
               tkvi_rne(tkvi_from_bits(a) * tkvi_from_bits((uint32_t)(127 - f->low - octave) << 23));
    code = tkvi_min(code, f->most);
    return code && bits >> 31 ? code | 1 << f->bits : code;
}

static float tkvi_e2m1_level(int code) { return tkvi_mini_level(&tkvi_e2m1, code); }

static int tkvi_e2m1_code(float x) { return tkvi_mini_code(&tkvi_e2m1, x); }

static float tkvi_e4m3_level(int code) { return tkvi_mini_level(&tkvi_e4m3, code); }

static int tkvi_e4m3_code(float x) { return tkvi_mini_code(&tkvi_e4m3, x); }

static float tkvi_e5m2_level(int code) { return tkvi_mini_level(&tkvi_e5m2, code); }

static int tkvi_e5m2_code(float x) { return tkvi_mini_code(&tkvi_e5m2, x); }

#endif /* TKVI_MINIFLOAT_H */
/* ======== fit.h ======== */
/*
 * fit.h - scale and zero of a min/max group, better than minimum and maximum (tkv_fit). Only the encoder
 * knows: bytes and decoding are those of KIVI.
 *
 *   TKV_FIT_CLIP      the range of least squared error out of 12, 1 to 0.45 of it about its middle. At 2 bits
 *                     the error of Gaussian groups falls by a third; at 4 bits by next to nothing.
 *   TKV_FIT_NORM      codes stay, scale and zero change until mean and variance are those of the values.
 *                     Without it coarse groups are too long, and the softmax takes them too seriously next to
 *                     exact ones.
 *   TKV_FIT_UNBIASED  the same until mean and cov(x^, x) = var(x) are.
 *
 * Keep the sinks exact: a range that is cut off hits the tokens that all queries look at first.
 *
 * Values are cut to 12 bits between minimum and maximum; from then on sums are integers, the same on every
 * machine in any order. May call base.
 */
#ifndef TKVI_FIT_H
#define TKVI_FIT_H


#define TKVI_STEPS 4096 /* of a range, between its minimum and its maximum */
#define TKVI_FIT_TRIES 12
#define TKVI_FIT_CUT 102 /* steps that each try cuts off at both ends: a fortieth of the range */

/* Not inlined: no compiler fuses this product into a sum. */
static TKVI_NOINLINE float tkvi_product(float a, float b) { return tkvi_f32(a * b); }

/* A value u of TKVI_STEPS as a code of 0 .. top, when `cut` steps at both ends of the range are cut off; by is
 * tkvi_cut_by: u - cut, times this, by 65536 is twice the code. */
static int tkvi_cut_by(int cut, int top) { return 131072 * top / (TKVI_STEPS - 2 * cut); }

static int tkvi_cut_code(int u, int cut, int by, int top) {
    int twice = u > cut ? (int)((uint32_t)(u - cut) * (uint32_t)by >> 16) : 0;
    return tkvi_min((twice + 1) / 2, top);
}

/* n^2 times the covariance of a and b, from their sums and that of their products (the variance, if they are one). */
static float tkvi_covariance(int64_t n, int64_t sum_a, int64_t sum_b, int64_t products) {
    return tkvi_f32((float)(n * products - sum_a * sum_b));
}

typedef struct tkvi_group { /* of up to 256 values */
    int n;
    float low, step; /* value = low + step * (u + 1/2), nearly */
    int64_t sum_u, sum_uu;
    uint16_t u[TKV_MAX_HEAD_DIM];
} tkvi_group;

/* low < high; values beyond them count as they. Returns 0 where floats are too coarse for it. */
static int tkvi_group_init(tkvi_group *g, const float *x, int n, float low, float high) {
    float range = tkvi_f32(high - low), inverse = tkvi_f32((float)TKVI_STEPS / range);
    int i;
    g->n = n;
    g->low = low;
    g->step = tkvi_f32(range / (float)TKVI_STEPS);
    g->sum_u = g->sum_uu = 0;
    if (!(g->step > 0.0f) || !tkvi_is_finite(inverse)) return 0;
    for (i = 0; i < n; i++) {
        int u = (int)tkvi_f32(tkvi_f32(tkvi_clampf(x[i], low, high) - low) * inverse);
        u = tkvi_max(0, tkvi_min(TKVI_STEPS - 1, u));
        g->u[i] = (uint16_t)u;
        g->sum_u += u;
        g->sum_uu += u * u;
    }
    return 1;
}

/* Squared error of the range without `cut` steps at each end, in units that all cuts share. */
static int64_t tkvi_cut_error(const tkvi_group *g, int cut, int top) {
    int range = TKVI_STEPS - 2 * cut, by = tkvi_cut_by(cut, top), i;
    int64_t sum = 0;
    for (i = 0; i < g->n; i++) {
        int code = tkvi_cut_code(g->u[i], cut, by, top);
        int64_t error = (int64_t)(2 * (g->u[i] - cut) + 1) * top - (int64_t)2 * code * range;
        sum += error * error;
    }
    return sum;
}

/* Moves the ends of the range. */
static void tkvi_clip(const tkvi_group *g, int top, float *low, float *range) {
    int64_t least = tkvi_cut_error(g, 0, top);
    int k, best = 0;
    for (k = 1; k < TKVI_FIT_TRIES; k++) {
        int64_t error = tkvi_cut_error(g, k * TKVI_FIT_CUT, top);
        if (error < least) {
            least = error;
            best = k;
        }
    }
    if (best == 0) return;
    *low = tkvi_f32(*low + tkvi_product(g->step, (float)(best * TKVI_FIT_CUT)));
    *range = tkvi_product(g->step, (float)(TKVI_STEPS - 2 * best * TKVI_FIT_CUT));
}

/* Scale and zero that give these codes the moments of the values; both stay where that is not possible, and
 * where fp16 has no such zero to a quarter of the scale. */
static void tkvi_moments(const tkvi_group *g, const uint8_t *code, int unbiased, uint8_t *scale_at,
                         uint8_t *zero_at) {
    int64_t sum_c = 0, sum_cc = 0, sum_cu = 0;
    float var, var_c, cov, scale, zero, mean, off;
    uint16_t half;
    int i;
    for (i = 0; i < g->n; i++) {
        sum_c += code[i];
        sum_cc += code[i] * code[i];
        sum_cu += (int64_t)code[i] * g->u[i];
    }
    var = tkvi_covariance(g->n, g->sum_u, g->sum_u, g->sum_uu);
    var_c = tkvi_covariance(g->n, sum_c, sum_c, sum_cc);
    cov = tkvi_covariance(g->n, sum_c, g->sum_u, sum_cu);
    if (!(var > 0.0f && var_c > 0.0f && cov > 0.0f)) return;
    scale = unbiased ? tkvi_f32(var / cov) : sqrtf(tkvi_f32(var / var_c));
    half = tkvi_f32_to_f16(tkvi_product(scale, g->step));
    scale = tkvi_f16_to_f32(half);
    mean = tkvi_f32((float)(2 * g->sum_u + g->n) / (float)(2 * g->n));
    mean = tkvi_f32(g->low + tkvi_product(g->step, mean));
    zero = tkvi_f32(mean - tkvi_product(scale, tkvi_f32((float)sum_c / (float)g->n)));
    off = tkvi_f32(tkvi_f16_to_f32(tkvi_f32_to_f16(zero)) - zero);
    off = off < 0.0f ? -off : off;
    if (off > 0.25f * scale || !(scale > 0.0f)) return;
    tkvi_store16(scale_at, half);
    tkvi_store16(zero_at, tkvi_f32_to_f16(zero + 0.0f));
}

#endif /* TKVI_FIT_H */
/* ======== codebook.h ======== */
/*
 * codebook.h - levels for values between -1 and 1 that lie where the values are: weighted k-means in one
 * dimension (KVQuant, arXiv 2401.18079, section 3.2), from a histogram. May call base and fit.
 *
 * All sums are whole numbers, so that everybody finds the same levels. A histogram of 2048 bins is as good as
 * the values, and takes no room for them. Lloyd's iterations begin where the density to the third would put
 * levels (Panter and Dite 1951), which is near the optimum; quantiles, which scikit-learn's k-means would
 * also have to leave, end in worse places.
 *
 * Levels are fp16 values. Next to each is what it decodes to where Q-Norm is asked for (the paper's section
 * 3.6):
 *     normed = level * s1 / s2 + (m1 - m2 * s1 / s2)
 * with mean m1 and deviation s1 of the values, m2 and s2 of what they become, all with the weights of
 * k-means.
 */
#ifndef TKVI_CODEBOOK_H
#define TKVI_CODEBOOK_H


#define TKVI_BOOK_BINS 2048
#define TKVI_BOOK_ROUNDS 50
#define TKVI_BOOK_PARTS 64 /* of the histogram, for the first levels */
#define TKVI_BOOK_UNIT 256 /* steps of a level to half a bin */

typedef struct tkvi_book {
    float level[16], normed[16]; /* rising; 2^bits of them */
} tkvi_book;

static int tkvi_book_bin(float y) { /* of -1 .. 1 */
    int bin = (int)tkvi_f32(tkvi_f32(y + 1.0f) * (float)(TKVI_BOOK_BINS / 2));
    return tkvi_max(0, tkvi_min(TKVI_BOOK_BINS - 1, bin));
}

/* Middle of a bin in half bins: -1 to 1 is -2048 to 2048. */
static int64_t tkvi_book_at(int bin) { return 2 * bin + 1 - TKVI_BOOK_BINS; }

/* So that no sum below overflows. */
static int64_t tkvi_book_scale(int64_t *count) {
    int64_t sum = 0;
    int i, shift = 0;
    for (i = 0; i < TKVI_BOOK_BINS; i++) sum += count[i];
    while (sum >> shift >= (int64_t)1 << 31) shift++;
    for (i = 0, sum = 0; i < TKVI_BOOK_BINS; i++) sum += count[i] >>= shift;
    return sum;
}

static int64_t tkvi_cube_root(int64_t x) { /* of less than 2^54, down */
    int64_t r = 0;
    int bit;
    for (bit = 17; bit >= 0; bit--) {
        int64_t next = r | (int64_t)1 << bit;
        if (next * next * next <= x) r = next;
    }
    return r;
}

/* n levels so that equal parts of the cube root of the density lie about them. */
static void tkvi_book_first(const int64_t *count, int n, int64_t *level) {
    int64_t root[TKVI_BOOK_PARTS], all = 0, before = 0;
    const int width = TKVI_BOOK_BINS / TKVI_BOOK_PARTS;
    int i, k, part = 0;
    for (i = 0; i < TKVI_BOOK_PARTS; i++) {
        int64_t sum = 0;
        for (k = 0; k < width; k++) sum += count[i * width + k];
        root[i] = tkvi_cube_root(sum << 20);
        all += root[i];
    }
    for (k = 0; k < n; k++) {
        int64_t goal = all * (2 * k + 1) / (2 * n);
        while (part < TKVI_BOOK_PARTS - 1 && before + root[part] <= goal) before += root[part++];
        level[k] = (int64_t)TKVI_BOOK_UNIT * 2 * width * part - (int64_t)TKVI_BOOK_UNIT * TKVI_BOOK_BINS;
        if (root[part]) level[k] += (goal - before) * TKVI_BOOK_UNIT * 2 * width / root[part];
    }
}

/* Calls of one round: bins go to the nearest level, of two the lower one. Returns the level after `j`. */
static int tkvi_book_nearest(const int64_t *level, int n, int j, int bin) {
    while (j < n - 1 && 2 * TKVI_BOOK_UNIT * tkvi_book_at(bin) > level[j] + level[j + 1]) j++;
    return j;
}

static void tkvi_book_means(const int64_t *count, int n, int64_t *level) {
    int round, changed = 1, i, j;
    for (round = 0; round < TKVI_BOOK_ROUNDS && changed; round++) {
        int64_t sum[16] = {0}, at[16] = {0};
        for (i = 0, j = 0; i < TKVI_BOOK_BINS; i++) {
            j = tkvi_book_nearest(level, n, j, i);
            sum[j] += count[i];
            at[j] += count[i] * tkvi_book_at(i);
        }
        for (j = 0, changed = 0; j < n; j++) {
            int64_t mean = sum[j] ? at[j] * TKVI_BOOK_UNIT / sum[j] : level[j];
            changed |= mean != level[j];
            level[j] = mean;
        }
    }
}

/* Levels as values, and Q-Norm's of them. count was scaled. */
static void tkvi_book_norm(const int64_t *count, int64_t sum, int n, const int64_t *level, tkvi_book *book) {
    int64_t x1 = 0, x2 = 0, q1 = 0, q2 = 0; /* in 1/16 of half a bin: squares have 30 bits */
    float mean_x, mean_q, var_x, var_q, ratio = 1.0f, shift = 0.0f;
    int i, j = 0;
    for (i = 0; i < TKVI_BOOK_BINS; i++) {
        int64_t x = 16 * tkvi_book_at(i), q;
        j = tkvi_book_nearest(level, n, j, i);
        q = level[j] / (TKVI_BOOK_UNIT / 16);
        x1 += count[i] * x;
        x2 += count[i] * x * x;
        q1 += count[i] * q;
        q2 += count[i] * q * q;
    }
    mean_x = tkvi_f32((float)x1 / (float)sum);
    mean_q = tkvi_f32((float)q1 / (float)sum);
    var_x = tkvi_f32(tkvi_f32((float)x2 / (float)sum) - tkvi_product(mean_x, mean_x));
    var_q = tkvi_f32(tkvi_f32((float)q2 / (float)sum) - tkvi_product(mean_q, mean_q));
    if (var_x > 1.0f && var_q > 1.0f) {
        ratio = tkvi_clampf(tkvi_f32(sqrtf(tkvi_f32(var_x / var_q))), 0.125f, 3.0f);
        shift = tkvi_f32(mean_x - tkvi_product(mean_q, ratio)) / (float)(16 * TKVI_BOOK_BINS);
    }
    for (j = 0; j < n; j++) {
        float y = (float)level[j] / (float)(TKVI_BOOK_UNIT * TKVI_BOOK_BINS);
        book->level[j] = tkvi_f16_to_f32(tkvi_f32_to_f16(y));
        y = tkvi_f32(tkvi_product(book->level[j], ratio) + shift);
        book->normed[j] = tkvi_f16_to_f32(tkvi_f32_to_f16(y));
    }
}

/* The same levels without a histogram: evenly from -1 to 1, or for values such as a normal distribution has.
 * */
static void tkvi_book_standard(int bits, int uniform, tkvi_book *book) {
    static const uint16_t normal[3][8] = {{404, 1340, 0, 0, 0, 0, 0, 0}, /* 1/2048; the upper half of them */
                                          {207, 638, 1126, 1758, 0, 0, 0, 0},
                                          {102, 306, 518, 742, 983, 1253, 1567, 1955}};
    int n = 1 << bits, i;
    memset(book, 0, sizeof *book);
    for (i = 0; i < n / 2; i++) {
        float y = (float)normal[bits - 2][i] / 2048.0f;
        if (uniform) y = tkvi_f16_to_f32(tkvi_f32_to_f16(tkvi_f32((float)(2 * i + 1) / (float)(n - 1))));
        book->level[n / 2 + i] = y;
        book->level[n / 2 - 1 - i] = -y;
    }
    memcpy(book->normed, book->level, sizeof book->normed);
}

/* A book for the histogram, which this scales. Nothing in it: the standard one. */
static void tkvi_book_make(int64_t *count, int bits, int uniform, tkvi_book *book) {
    int64_t level[16], sum = tkvi_book_scale(count);
    int n = 1 << bits, j;
    tkvi_book_standard(bits, uniform, book);
    if (sum == 0) return;
    for (j = 0; j < n && uniform; j++)
        level[j] = (int64_t)(book->level[j] * (float)(TKVI_BOOK_UNIT * TKVI_BOOK_BINS));
    if (!uniform) {
        tkvi_book_first(count, n, level);
        tkvi_book_means(count, n, level);
    }
    tkvi_book_norm(count, sum, n, level, book);
}

#endif /* TKVI_CODEBOOK_H */
/* ======== allocate.h ======== */
/*
 * allocate.h - who gets the bits: heads of a layer share its bytes, channels of a head share the head's.
 *
 * Greedy reverse water-filling: the next bit goes where it saves most, until the budget is spent. What a bit saves
 * is weight * (D(b) - D(b + 1)), D the error of a unit Gaussian at b bits; here everything is the logarithm of that,
 * in integers of 1/32 octave, so that the same table comes out on every machine. Gains fall along a channel's
 * bits and along the sorted channels, so "all steps that save more than a level" is what greedy would take: the
 * level is found by halving, whatever the number of heads.
 *
 *   K: weight of a tile = reach of its head * E[q_c^2] var(k_c), geometric mean of its channels;   0 .. 6 bits
 *   V: weight of a head = its reach (how strongly it reads far tokens);                             1 .. 4 bits
 *
 * bench/QUALITY.md has what each of the two is worth. May call tile and base.
 */
#ifndef TKVI_ALLOCATE_H
#define TKVI_ALLOCATE_H


/* What is known of one KV head. */
typedef struct tkvi_head {
    int reach;                 /* log2, in 1/8 octaves: how strongly far tokens are read */
    int k_weight;              /* the same, times the head's largest E[q_c^2] var(k_c) */
    int k_top, v_top;          /* windows of logarithmic scales */
    const uint8_t *importance; /* K: [pad] log2 in 1/8 octaves, at each position, falling; 0: no channel */
    const uint8_t *order;      /* K: [pad] channel at each position */
    const float *mean;         /* K: [pad] static mean at each position */
} tkvi_head;

/* Steps that an item can climb, each with what it saves per unit of cost (1/32 octave) and its cost. */
typedef struct tkvi_ladder {
    int steps;
    int16_t gain[6];
    uint8_t cost[6];
} tkvi_ladder;

/* D of uniform grids with the best clip: 1, .38, .125, .037, .0115, .0035, .001 (0 to 6 bits). */
static const tkvi_ladder tkvi_ladder_k = {6, {-22, -63, -112, -169, -223, -277}, {1, 1, 1, 1, 1, 1}};
/* D of rotated values: .363, .119, .037, .0115 (1 to 4 bits), .2 at one and a half; cost in half bits. */
static const tkvi_ladder tkvi_ladder_v = {3, {-65, -115, -169, 0, 0, 0}, {2, 2, 2, 0, 0, 0}};
static const tkvi_ladder tkvi_ladder_v_low = {4, {-84, -116, -147, -201, 0, 0}, {1, 1, 2, 2, 0, 0}};

#define TKVI_SCORE_NONE (-100000)

/* Score of group i of a head's tiles (`unit` of them, 0: the head itself is the item). */
static int tkvi_score(const tkvi_head *h, int unit, int i) {
    int sum = 0, c;
    if (unit == 0) return 4 * h->reach;
    for (c = 0; c < 4 * unit; c++) sum += h->importance[4 * unit * i + c];
    return sum == 0 ? TKVI_SCORE_NONE : 4 * h->k_weight + sum / unit;
}

/* Cost of all steps of a head that reach `level`. taken: NULL, or how many items climbed step k. */
static int tkvi_climb(const tkvi_head *h, const tkvi_ladder *l, int unit, int items, int level, int *taken) {
    int i, k, cost = 0;
    if (taken) memset(taken, 0, 6 * sizeof *taken);
    for (i = 0; i < items; i++) {
        int score = tkvi_score(h, unit, i);
        for (k = 0; k < l->steps && score + l->gain[k] >= level; k++) {
            cost += l->cost[k] * tkvi_max(unit, 1);
            if (taken) taken[k]++;
        }
    }
    return cost;
}

#define TKVI_LEVEL_LOW (-24000) /* beyond any score: of a loaded table at most 4 * 4800 + 4 * 255 */
#define TKVI_LEVEL_HIGH 24000

/* The lowest level at which the heads, each up to `cap`, stay within the budget. */
static int tkvi_find_level(const tkvi_head *heads, int n_heads, const tkvi_ladder *l, int unit, int items,
                           int cap, int64_t budget) {
    int low = TKVI_LEVEL_LOW, high = TKVI_LEVEL_HIGH, h; /* high stays within, low - 1 may not */
    while (low < high) {
        int level = low + (high - low) / 2;
        int64_t sum = 0;
        for (h = 0; h < n_heads; h++)
            sum += tkvi_min(cap, tkvi_climb(&heads[h], l, unit, items, level, NULL));
        if (sum <= budget) high = level;
        else low = level + 1;
    }
    return high;
}

/* Splits a budget among the heads: cost[h] each. Of what the steps just below the level would take, heads get equal
 * parts, then a step each in their order; V has one item a head, whose steps are given whole, in order. */
static void tkvi_split(const tkvi_head *heads, int n_heads, const tkvi_ladder *l, int unit, int items,
                       int cap, int64_t budget, int *cost) {
    int level = tkvi_find_level(heads, n_heads, l, unit, items, cap, budget), h, pass,
        step = tkvi_max(unit, 1);
    int64_t wanted = 0, left;
    for (h = 0; h < n_heads; h++) {
        cost[h] = tkvi_min(cap, tkvi_climb(&heads[h], l, unit, items, level, NULL));
        budget -= cost[h];
        wanted += tkvi_min(cap, tkvi_climb(&heads[h], l, unit, items, level - 1, NULL)) - cost[h];
    }
    left = budget;
    for (pass = unit ? 0 : 2; pass < 3 && level > TKVI_LEVEL_LOW; pass++)
        for (h = 0; h < n_heads && budget > 0; h++) {
            int more = tkvi_min(cap, tkvi_climb(&heads[h], l, unit, items, level - 1, NULL)) - cost[h];
            if (pass == 0) more = (int)(more * left / wanted);
            if (pass == 1) more = tkvi_min(more, step);
            more = (int)(more < budget ? more : budget) / step * step;
            if (unit == 0 && (cost[h] + more) % 2 && (l->cost[0] == 2 || cost[h] + more > 2))
                more--; /* half a step */
            cost[h] += more;
            budget -= more;
        }
}

/* >>K */
/* Tile bits of one head at equal shares: what remains of the average when the metadata are paid. */
static int tkvi_head_budget(int quarters, int dim, int pad) {
    return tkvi_max(0, (quarters * dim - pad) / 16);
}

/* Widths of one head's tiles for a number of tile bits. */
static void tkvi_runs_of(const tkvi_head *h, int pad, int unit, int budget, tkvi_runs *runs) {
    int items = pad / 4 / unit, taken[6], more[6], k, rest, level;
    level = tkvi_find_level(h, 1, &tkvi_ladder_k, unit, items, 1 << 20, budget);
    rest = budget - tkvi_climb(h, &tkvi_ladder_k, unit, items, level, taken);
    (void)tkvi_climb(h, &tkvi_ladder_k, unit, items, level - 1, more);
    for (k = 0; k < 6; k++) /* steps just below the level, as far as it goes, the widest tiles last */
        for (; taken[k] < more[k] && rest >= unit; rest -= unit) taken[k]++;
    memset(runs, 0, sizeof *runs);
    for (k = 0; k < 6; k++) runs->n[k + 1] = (uint16_t)((taken[k] - (k < 5 ? taken[k + 1] : 0)) * unit);
}

/* Equal shares and equal channels: the first ones get what is left over. */
static void tkvi_share_alike(int quarters, int dim, int pad, tkvi_runs *runs) {
    uint8_t importance[TKV_MAX_HEAD_DIM];
    tkvi_head h;
    memset(&h, 0, sizeof h);
    memset(importance, 0, sizeof importance);
    memset(importance, 1, (size_t)dim);
    h.importance = importance;
    tkvi_runs_of(&h, pad, 1, tkvi_head_budget(quarters, dim, pad), runs);
}

/* A layer's budget split among its heads, a head at most 4 bits a channel. Two tile bits make 64 bytes, so heads
 * get even numbers of them; budget[h] are the results. */
static void tkvi_share_k(const tkvi_head *heads, int n_heads, int quarters, int dim, int pad, int unit,
                         int *budget) {
    int h, odd = 0;
    tkvi_split(heads, n_heads, &tkvi_ladder_k, unit, pad / 4 / unit, pad,
               (int64_t)n_heads * tkvi_head_budget(quarters, dim, pad), budget);
    for (h = 0; h < n_heads; h++)
        if (budget[h] % 2) {
            budget[h] += odd ? -1 : 1;
            odd = !odd;
        }
    for (h = n_heads - 1; h >= 0 && odd; h--) /* one came without a partner: what it got is taken back */
        if (budget[h] >= 2) {
            budget[h] -= 2;
            odd = 0;
        }
}

/* >>V: half bits of each head, from 1 bit up. */
static void tkvi_share_v(const tkvi_head *heads, int n_heads, int quarters, int *half_bits) {
    const tkvi_ladder *l = quarters < 8 ? &tkvi_ladder_v_low : &tkvi_ladder_v;
    int h;
    tkvi_split(heads, n_heads, l, 0, 1, 6, (int64_t)n_heads * (quarters - 4) / 2, half_bits);
    for (h = 0; h < n_heads; h++) half_bits[h] += 2;
}

/* Bytes of codes that a layer's heads have together for 64 values of V; `pad` channels. */
static int64_t tkvi_budget_v(int64_t heads, int quarters, int pad) {
    int64_t bytes = (heads * (quarters - 4) / 2 + 2 * heads) * 4 * pad;
    /* 16 channels without partners take two bits where the others take one and a half */
    return quarters < 8 && pad / 16 % 2 ? bytes + heads * 64 : bytes;
}

#endif /* TKVI_ALLOCATE_H */
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
 * whatever its widths, channel order and level table; only `meta` is its own. One that is stored as
 * TKVI_AS_DECODED needs layout, encode and decode and nothing more: attention decodes 16 tokens at a time; on x86
 * those with rows of codes and a table of levels can be read by vectors, if decode_x86.h knows where they are. If each
 * token has a grid and a scale, format_token.h has all three.
 *
 * A side in memory: codes (a multiple of 64 bytes), then metadata, padded to 64 bytes. A record is the K
 * side, then the V side, of one head. May call tile and base.
 */
#ifndef TKVI_FORMAT_H
#define TKVI_FORMAT_H


#define TKVI_BLOCK TKV_BLOCK_TOKENS
#define TKVI_MAX_GROUPS (TKV_MAX_HEAD_DIM / 32) /* of V along channels; of K along tokens it is two */

struct tkvi_side;
struct tkvi_columns;
struct tkvi_rope;
struct tkvi_kvquant;
struct tkvi_helpers;

/* Tokens first .. first+n-1 of a side. Same bits on every machine: at most one rounding per value. */
typedef void (*tkvi_decoder)(const struct tkvi_side *s, const struct tkvi_helpers *help, const uint8_t *src,
                             int first, int n, float *x, size_t stride);

/* >>helpers: steps that formats ask of the instruction set. What stands here is their definition. */
typedef struct tkvi_helpers {
    void (*halves)(const uint8_t *src, int n, float *dst);        /* fp16 to float */
    void (*to_halves)(const float *x, int n, uint8_t *dst);       /* finite floats to fp16 */
    void (*logs)(const uint8_t *src, int n, int top, float *dst); /* logscale.h */
    /* dst = scale * unit * (offset - middle) + mean; the product is exact. offset: signed bytes */
    void (*zeros)(const uint8_t *offset, const float *scale, const float *mean, float unit, int middle, int n,
                  float *dst);
    void (*log_codes)(const float *x, int n, int top, uint8_t *dst); /* logscale.h */
    /* Encoding. A tile's codes to its bytes, which were cleared (tile.h); a tile of K from its columns. */
    void (*pack_tile)(uint8_t *codes, const tkvi_tile_at *at, int width, const uint8_t *code);
    void (*weave)(uint8_t (*column)[TKVI_BLOCK], const uint8_t *channel, uint8_t *tile);
    /* Codes, then metadata of 16 columns of K (format_a.h); codes and scales of V (format_r.h). */
    void (*columns)(struct tkvi_columns *c);
    void (*settle)(struct tkvi_columns *c, int top);
    void (*tokens)(const struct tkvi_side *s, const float *x, size_t stride, int n,
                   uint8_t (*code)[TKVI_TILE_CODES], float *scale);
    /* Codes and metadata of KIVI (format_kivi.h). */
    void (*groups)(const struct tkvi_side *s, const float *x, size_t stride, int n,
                   uint8_t (*code)[TKVI_TILE_CODES], uint8_t *meta);
    tkvi_decoder tiles; /* a side of tiles (format_tiles.h) */
} tkvi_helpers;

#define TKVI_LANES 16 /* columns or tokens that are coded together */

/* 16 neighbouring channels of K. `lanes` of them are there; the others have a rubbish code. */
typedef struct tkvi_columns {
    const float *x; /* in: values, [token][stride], `lanes` of them are read */
    size_t stride;
    int n, lanes;
    const float *mean;    /* [16] */
    const uint8_t *width; /* [16] */
    /* Out, [16] each: codes, 0 beyond n; byte of the scale; offset; mean of the residuals. */
    uint8_t (*code)[TKVI_BLOCK], *log, *offset;
    float *middle;
    uint32_t far; /* bit l: column l has bits, but its mean is beyond this scale and offset */
    /* Between the steps: */
    TKVI_ALIGNED int16_t u[TKVI_BLOCK / 2][TKVI_LANES][2]; /* values as integers; which: tkvi_column_u */
    TKVI_ALIGNED float low[TKVI_LANES], step[TKVI_LANES];  /* value = low + step * (u + 1/2), nearly */
    TKVI_ALIGNED int32_t sum_u[TKVI_LANES], sum_uu[TKVI_LANES];
    TKVI_ALIGNED int32_t sum_c[TKVI_LANES], sum_cc[TKVI_LANES], sum_cu[TKVI_LANES]; /* of the codes chosen */
} tkvi_columns;

/* Tokens t and t + 2 share 32 bits: codes of four tokens then fall into place with one shift. */
static int16_t *tkvi_column_u(tkvi_columns *c, int l, int t) {
    return &c->u[t / 4 * 2 + t % 2][l][t % 4 / 2];
}

static void tkvi_halves_scalar(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f16_to_f32(tkvi_load16(src + 2 * i));
}

static void tkvi_to_halves_scalar(const float *x, int n, uint8_t *dst) {
    int i;
    for (i = 0; i < n; i++) tkvi_store16(dst + 2 * i, tkvi_f32_to_f16(x[i]));
}

static void tkvi_logs_scalar(const uint8_t *src, int n, int top, float *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_log_value(src[i], top);
}

static void tkvi_log_codes_scalar(const float *x, int n, int top, uint8_t *dst) {
    int i;
    for (i = 0; i < n; i++) dst[i] = (uint8_t)tkvi_log_code(x[i], top);
}

static void tkvi_weave_scalar(uint8_t (*column)[TKVI_BLOCK], const uint8_t *channel, uint8_t *tile) {
    int t, r;
    for (t = 0; t < TKVI_BLOCK; t++)
        for (r = 0; r < 4; r++) tile[4 * t + r] = column[channel[r]][t];
}

static int tkvi_signed_byte(int b) { return b < 128 ? b : b - 256; }

static void tkvi_zeros_scalar(const uint8_t *offset, const float *scale, const float *mean, float unit,
                              int middle, int n, float *dst) {
    int i;
    for (i = 0; i < n; i++) {
        float by = (float)(tkvi_signed_byte(offset[i]) - middle);
        dst[i] = tkvi_f32(tkvi_f32(scale[i] * unit * by) + mean[i]);
    }
}

/* One side of a format. `x` is [token][stride] floats; channels beyond side->dim are neither read nor written. */
typedef struct tkvi_codec {
    /* Sets runs (if no share did), groups, code_bytes, meta_bytes, levels from dim, pad and group. */
    void (*layout)(struct tkvi_side *s);
    /* Writes the whole side. n tokens, 1..64; those beyond n get code 0. Same bytes on every machine. */
    void (*encode)(const struct tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride, int n,
                   uint8_t *dst);
    tkvi_decoder decode;
    /* Tile formats: value = scale * level + zero, level = code, or levels[code] if the side has a table.
     *   K: scale[group][position], groups along tokens, position = place in the channel order
     *   V: scale[group][token], groups along channels
     * NULL for exact formats. */
    void (*meta)(const struct tkvi_side *s, const uint8_t *src, const tkvi_helpers *help, float *scale,
                 float *zero);
    /* Exact formats: writes one token of a side that was cleared when it was made. NULL for the others. */
    void (*put)(const struct tkvi_side *s, const tkvi_helpers *help, const float *x, int token, uint8_t *dst);
} tkvi_codec;

/* Exact ones are floats: tokens can be added one by one and cut off again. */
typedef enum tkvi_storage {
    TKVI_AS_F32,
    TKVI_AS_F16,
    TKVI_AS_BF16,
    TKVI_AS_TILES,
    TKVI_AS_DECODED, /* anything: kernels know its decode alone */
    TKVI_STORAGE_COUNT
} tkvi_storage;

typedef struct tkvi_format {
    const char *name;
    int bits;            /* of a code; 16 or 32 for exact formats; A and R: average in quarter bits */
    tkvi_storage stored; /* how, and so by which kernel it is read */
    int shared;          /* 1: the heads of a layer share its bytes, by what learn.h learns */
    int rotated;         /* 1: attention on it happens behind the rotation of rotate.h */
    tkvi_codec side[2];  /* TKV_K, TKV_V; without functions: this format does not store that side */
} tkvi_format;

/* What a layer's table says of one head's side (learn.h). A side without one takes equal shares. */
typedef struct tkvi_share {
    tkvi_runs runs;       /* K: tiles by width */
    int half_bits;        /* V: of each value, in half bits */
    int top;              /* window of its logarithmic scales */
    const uint8_t *order; /* K: channel at each position, [pad] */
    const float *mean;    /* K: static mean at each position, [pad]; fp16 values */
} tkvi_share;

/* What the caller chose for the formats that know of it. */
typedef struct tkvi_options {
    int group;
    int fit;    /* bits of tkv_fit */
    int rotate; /* bits of tkv_rotate */
    int center_k;
    int feedback_unit; /* channels that SQuat codes together */
    int parts;         /* of a token in SUBSPACE formats */
    int kvquant;       /* bits of tkv_kvquant */
    int tabled;        /* KVQUANT: ranges are in a table of the layer */
} tkvi_options;

struct tkvi_grid;

/* Small types: a cache has one for each head of each layer's tiers and versions. */
typedef struct tkvi_side {
    const tkvi_format *format;
    size_t code_bytes, meta_bytes, bytes;
    tkv_side which;
    tkvi_runs runs;   /* tiles by width */
    int16_t dim, pad; /* channels, and channels rounded up to 16 */
    int16_t group;    /* values per scale: 64 or 32 */
    int16_t groups;   /* K: along the 64 tokens; V: along the channels */
    int8_t tokens;    /* room: 64, or fewer in an exact side */
    int8_t pairs;     /* V: 1: a tile of 16 lanes holds 32 channels; levels has 16 more for the upper half */
    int8_t given, half_bits; /* 1: a share set runs or half_bits; V: see tkvi_share */
    int16_t top;             /* the same */
    int8_t fit;              /* KIVI: see fit.h */
    int8_t rotate, center;   /* format_token.h */
    int8_t parts;            /* format_subspace.h */
    int8_t feedback_unit;    /* SQuat: channels coded together (format_squat.h) */
    int8_t kvquant, tabled,
        slots;            /* format_kvquant.h: options; 1: of a cache, with a table; outliers of a token */
    int32_t start;        /* the same: of the block that is encoded */
    const uint8_t *order; /* K: channel at each position, `pad` of them; NULL: as they come */
    const float *mean;    /* K: see tkvi_share */
    const int8_t *levels; /* 16 levels of -127..127 by code (widths up to 4); NULL: the code itself */
    const struct tkvi_grid *grid; /* format_token.h */
    const uint16_t
        *feedback; /* SQuat: what errors do to later channels; NULL: nothing is known of the queries */
    const struct tkvi_kvquant *table; /* KVQUANT: from the layer's table */
    const float *radius, *middle;     /* of each channel of K */
    const struct tkvi_rope *rope;     /* NULL: keys are coded as they come */
} tkvi_side;

static int tkvi_channel(const tkvi_side *s, int position) { return s->order ? s->order[position] : position; }

/* Where in `levels` the 16 levels of a width stand. Tiles of pairs have width 3; a slab of 16 channels that found
 * no partner has plain codes, and levels of its own behind those of the pairs. */
static int tkvi_level_table(const tkvi_side *s, int width, int upper) {
    return !s->pairs ? 0 : width == 3 ? 16 * upper : 32;
}

/* What the codes of a width lie around: kernels multiply codes minus this by rounded weights, and take the
 * rest from the float ones, so that rounding meets the spread of the codes and not their mean. */
static float tkvi_centre(const tkvi_side *s, int width) {
    return s->levels ? 0.0f : 0.5f * (float)((1 << width) - 1);
}

static int tkvi_is_exact(const tkvi_format *f) { return f->stored < TKVI_AS_TILES; }

static int tkvi_format_stores(const tkvi_format *f, tkv_side which) { return f->side[which].layout != NULL; }

static void tkvi_side_make(tkvi_side *s, const tkvi_format *format, tkv_side which, int dim, int tokens,
                           const tkvi_options *o, const tkvi_share *share) {
    memset(s, 0, sizeof *s);
    s->format = format;
    s->which = which;
    s->dim = (int16_t)dim;
    s->pad = (int16_t)tkvi_round_up(dim, 16);
    s->tokens = (int8_t)tokens;
    s->group = (int16_t)o->group;
    s->fit = (int8_t)o->fit;
    s->rotate = o->rotate >> which & 1;
    s->center = o->center_k && which == TKV_K;
    s->feedback_unit = (int8_t)o->feedback_unit;
    s->parts = (int8_t)o->parts;
    s->kvquant = (int8_t)o->kvquant;
    s->tabled = (int8_t)o->tabled;
    s->top = TKVI_LOG_TOP_ALIKE;
    if (share) {
        s->given = 1;
        s->runs = share->runs;
        s->half_bits = (int8_t)share->half_bits;
        s->top = (int16_t)share->top;
        s->order = share->order;
        s->mean = share->mean;
    }
    format->side[which].layout(s);
    s->bytes = tkvi_align_up(s->code_bytes) + tkvi_align_up(s->meta_bytes);
}

/* Without options, tokens in one part. */
static void tkvi_side_init(tkvi_side *s, const tkvi_format *format, tkv_side which, int dim, int group,
                           int tokens, const tkvi_share *share) {
    tkvi_options o;
    memset(&o, 0, sizeof o);
    o.group = group;
    o.parts = 1;
    tkvi_side_make(s, format, which, dim, tokens, &o, share);
}

static void tkvi_encode_side(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride,
                             int n, uint8_t *dst) {
    s->format->side[s->which].encode(s, help, x, stride, n, dst);
}

/* What tkvi_decode_side in format_table.h gives, by `help`. */
static void tkvi_values(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first, int n,
                        float *x, size_t stride) {
    s->format->side[s->which].decode(s, help, src, first, n, x, stride);
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

static float tkvi_load_f16(const uint8_t *src) { return tkvi_f16_to_f32(tkvi_load16(src)); }

static void tkvi_store_bf16(uint8_t *dst, float x) { tkvi_store16(dst, tkvi_f32_to_bf16(x)); }

static float tkvi_load_bf16(const uint8_t *src) { return tkvi_bf16_to_f32(tkvi_load16(src)); }

/* n values of a row and back; reading 16 at a time: gcc -O2 has vectors only for loops of known length, into nobody
 * else's memory. */
#define TKVI_EXACT_ROW_(t, size)                                                                             \
    static void tkvi_##t##_save(const tkvi_helpers *help, const float *x, int n, uint8_t *dst) {             \
        int c;                                                                                               \
        (void)help;                                                                                          \
        for (c = 0; c < n; c++) tkvi_store_##t(dst + c * (size), x[c]);                                      \
    }                                                                                                        \
    static void tkvi_##t##_read(const tkvi_helpers *help, const uint8_t *src, int n, float *x) {             \
        float y[16];                                                                                         \
        int c, k;                                                                                            \
        (void)help;                                                                                          \
        for (c = 0; c + 16 <= n; c += 16) {                                                                  \
            for (k = 0; k < 16; k++) y[k] = tkvi_load_##t(src + (c + k) * (size));                           \
            memcpy(x + c, y, sizeof y);                                                                      \
        }                                                                                                    \
        for (; c < n; c++) x[c] = tkvi_load_##t(src + c * (size));                                           \
    }
TKVI_EXACT_ROW_(f32, 4)
TKVI_EXACT_ROW_(bf16, 2)
#undef TKVI_EXACT_ROW_

static void tkvi_f16_save(const tkvi_helpers *help, const float *x, int n, uint8_t *dst) {
    help->to_halves(x, n, dst);
}

static void tkvi_f16_read(const tkvi_helpers *help, const uint8_t *src, int n, float *x) {
    help->halves(src, n, x);
}

/* The same for each type of `size` bytes. */
#define TKVI_EXACT_CODEC_(t, size)                                                                           \
    static void tkvi_##t##_put(const tkvi_side *s, const tkvi_helpers *help, const float *x, int token,      \
                               uint8_t *dst) {                                                               \
        uint8_t *row = dst + token * s->pad * (size);                                                        \
        tkvi_##t##_save(help, x, s->dim, row);                                                               \
        memset(row + s->dim * (size), 0, (size_t)((s->pad - s->dim) * (size)));                              \
    }                                                                                                        \
    static void tkvi_##t##_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x,              \
                                  size_t stride, int n, uint8_t *dst) {                                      \
        int i;                                                                                               \
        memset(dst, 0, s->bytes);                                                                            \
        for (i = 0; i < n; i++) tkvi_##t##_put(s, help, x + (size_t)i * stride, i, dst);                     \
    }                                                                                                        \
    static void tkvi_##t##_decode(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src,          \
                                  int first, int n, float *x, size_t stride) {                               \
        int i;                                                                                               \
        for (i = 0; i < n; i++)                                                                              \
            tkvi_##t##_read(help, src + (first + i) * s->pad * (size), s->dim, x + (size_t)i * stride);      \
    }
TKVI_EXACT_CODEC_(f32, 4)
TKVI_EXACT_CODEC_(f16, 2)
TKVI_EXACT_CODEC_(bf16, 2)
#undef TKVI_EXACT_CODEC_

#endif /* TKVI_FORMAT_EXACT_H */
/* ======== format_tiles.h ======== */
/*
 * format_tiles.h - what all formats made of tiles share: codes to tiles and back, decoding through `meta`.
 * Calls format.h.
 */
#ifndef TKVI_FORMAT_TILES_H
#define TKVI_FORMAT_TILES_H


/* Level of a code; `upper`: of the second channel of a pair. */
static float tkvi_level(const tkvi_side *s, int width, int upper, int code) {
    return (float)(s->levels ? s->levels[tkvi_level_table(s, width, upper) + (code & 15)] : code);
}

/* Codes of a side as they come to be packed, and where the code of one value stands. */
typedef uint8_t tkvi_codes[TKV_MAX_HEAD_DIM / 4][TKVI_TILE_CODES];

static uint8_t *tkvi_k_code(tkvi_codes code, int position, int token) {
    unsigned p = (unsigned)position; /* divided without a look at the sign */
    return &code[p / 4u][4u * (unsigned)token + p % 4u];
}

static uint8_t *tkvi_v_code(tkvi_codes code, int lane, int token) { /* pairs have one lane for two channels */
    unsigned l = (unsigned)lane, t = (unsigned)token;
    return &code[l / 16u * 4u + t / 16u][t % 16u / 4u * 64u + l % 16u * 4u + t % 4u];
}

static void tkvi_pack(const tkvi_side *s, const tkvi_helpers *help, tkvi_codes code, uint8_t *dst) {
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, number = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, number++) {
            help->pack_tile(dst, &at, width, code[number]);
            tkvi_next_tile(&at, width);
        }
}

/* >>K */
static void tkvi_tiles_k_values(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                                int n, float *x, size_t stride) {
    float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, r, t, position = 0;
    s->format->side[TKV_K].meta(s, src, help, scale, zero);
    for (width = TKVI_MAX_WIDTH; width >= 0; width--) {
        int tiles = width ? s->runs.n[width] : (s->pad - position) / 4; /* the rest has no codes */
        for (i = 0; i < tiles; i++, position += 4) {
            uint8_t tile[TKVI_TILE_CODES];
            if (width) {
                tkvi_unpack_tile(src, &at, width, tile);
                tkvi_next_tile(&at, width);
            } else {
                memset(tile, 0, sizeof tile);
            }
            for (r = 0; r < 4; r++) {
                int channel = tkvi_channel(s, position + r);
                for (t = first; t < first + n && channel < s->dim; t++) {
                    int m = t * s->groups / TKVI_BLOCK * s->pad + position + r;
                    float product = tkvi_f32(scale[m] * tkvi_level(s, width, 0, tile[4 * t + r])); /* exact */
                    x[(size_t)(t - first) * stride + (size_t)channel] = tkvi_f32(product + zero[m]);
                }
            }
        }
    }
    if (s->format->rotated)
        for (t = 0; t < n; t++) tkvi_rotate_back(x + (size_t)t * stride, s->dim);
}

/* >>V */
static int tkvi_slab_channels(const tkvi_side *s, int width) { return s->pairs && width == 3 ? 32 : 16; }

static void tkvi_tiles_v_values(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                                int n, float *x, size_t stride) {
    float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, t, c, slab = 0;
    s->format->side[TKV_V].meta(s, src, help, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++) {
            uint8_t tile[TKVI_TILE_CODES];
            int from = i % 4 * 16, channels = tkvi_slab_channels(s, width);
            tkvi_unpack_tile(src, &at, width, tile);
            tkvi_next_tile(&at, width);
            for (t = tkvi_max(first, from); t < tkvi_min(first + n, from + 16); t++)
                for (c = 0; c < tkvi_min(channels, s->dim - slab); c++) {
                    int m = (slab + c) / s->group * TKVI_BLOCK + t;
                    int code = tile[(t - from) / 4 * 64 + 4 * (c % 16) + t % 4];
                    float product = tkvi_f32(scale[m] * tkvi_level(s, width, c / 16, code));
                    x[(size_t)(t - first) * stride + (size_t)(slab + c)] = tkvi_f32(product + zero[m]);
                }
            if (i % 4 == 3) slab += channels;
        }
    if (s->format->rotated)
        for (t = 0; t < n; t++) tkvi_rotate_back(x + (size_t)t * stride, s->dim);
}

/* >>both */
static void tkvi_tiles_scalar(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                              int n, float *x, size_t stride) {
    if (s->which == TKV_K) tkvi_tiles_k_values(s, help, src, first, n, x, stride);
    else tkvi_tiles_v_values(s, help, src, first, n, x, stride);
}

static void tkvi_tiles_decode(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                              int n, float *x, size_t stride) {
    help->tiles(s, help, src, first, n, x, stride);
}

#endif /* TKVI_FORMAT_TILES_H */
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
 * and without FMA. A flat group has scale 0 and decodes to its fp16 value. Values saturate at +-65504. cfg.fit
 * chooses other scales and zeros (fit.h).
 *
 * Bytes of one side (tiles as in tile.h, all of one width):
 *   K: | tiles | scale fp16 [group][pad channels] | zero fp16 [group][pad channels] |   groups = 64 / group
 *   V: | tiles | scale fp16 [group][64 tokens]    | zero fp16 [group][64 tokens]    |   groups = ceil(dim / group)
 * 4 bits in groups of 64: 4.5 bits a value; 2 bits: 2.5; with groups of 32: 5 and 3.
 */
#ifndef TKVI_FORMAT_KIVI_H
#define TKVI_FORMAT_KIVI_H


/* One group whose values stand together, one at least: codes, scale, zero. */
static void tkvi_kivi_group(const float *x, int n, int bits, int fit, uint8_t *code, uint8_t *scale_at,
                            uint8_t *zero_at) {
    float lo, hi, range, scale, zero, top = (float)((1 << bits) - 1);
    tkvi_group group;
    int i;
    group.n = 0; /* compilers do not see that it is used only when it was made */
    group.low = group.step = 0.0f;
    group.sum_u = group.sum_uu = 0;
    lo = hi = tkvi_clampf(x[0], -TKVI_F16_MAX, TKVI_F16_MAX);
    for (i = 1; i < n; i++) {
        float v = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        lo = v < lo ? v : lo;
        hi = v > hi ? v : hi;
    }
    range = tkvi_f32(hi - lo);
    if (fit && hi > lo && !tkvi_group_init(&group, x, n, lo, hi)) fit = 0;
    if (hi > lo && (fit & TKV_FIT_CLIP)) tkvi_clip(&group, (1 << bits) - 1, &lo, &range);
    tkvi_store16(scale_at, tkvi_f32_to_f16(tkvi_f32(range / top)));
    tkvi_store16(zero_at, tkvi_f32_to_f16(lo + 0.0f)); /* -0 counts as 0, whichever came first */
    scale = tkvi_f16_to_f32(tkvi_load16(scale_at));
    zero = tkvi_f16_to_f32(tkvi_load16(zero_at));
    for (i = 0; i < n; i++) {
        float v = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        float y = scale > 0.0f ? tkvi_f32(tkvi_f32(v - zero) / scale) : 0.0f;
        code[i] = (uint8_t)tkvi_rne(tkvi_clampf(y, 0.0f, top));
    }
    if (hi > lo && (fit & (TKV_FIT_NORM | TKV_FIT_UNBIASED)))
        tkvi_moments(&group, code, fit & TKV_FIT_UNBIASED, scale_at, zero_at);
}

static void tkvi_kivi_k_layout(tkvi_side *s) {
    s->groups = TKVI_BLOCK / s->group;
    s->runs.n[s->format->bits] = (uint16_t)(s->pad / 4);
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = (size_t)(s->groups * s->pad * 4);
}

static void tkvi_kivi_v_layout(tkvi_side *s) {
    s->groups = (int16_t)((s->dim + s->group - 1) / s->group);
    s->runs.n[s->format->bits] = (uint16_t)(s->pad / 4); /* 4 tiles per 16 channels */
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = (size_t)(s->groups * TKVI_BLOCK * 4);
}

/* Group g of one channel of K, n tokens of the block being there. What has no tokens keeps its zeros. */
static void tkvi_kivi_column(const tkvi_side *s, const float *x, size_t stride, int n, int g, int position,
                             tkvi_codes code, uint8_t *meta) {
    float column[TKVI_BLOCK];
    uint8_t coded[TKVI_BLOCK], *scale = meta + 2 * (g * s->pad + position);
    int channel = tkvi_channel(s, position), first = g * s->group, t;
    n = tkvi_min(n - first, s->group);
    if (n < 1) return;
    for (t = 0; t < n; t++) column[t] = x[(size_t)(first + t) * stride + (size_t)channel];
    tkvi_kivi_group(column, n, s->format->bits, s->fit, coded, scale, scale + 2 * s->groups * s->pad);
    for (t = 0; t < n; t++) *tkvi_k_code(code, position, first + t) = coded[t];
}

/* Group g of one token of V. */
static void tkvi_kivi_row(const tkvi_side *s, const float *x, int g, int token, tkvi_codes code,
                          uint8_t *meta) {
    int first = g * s->group, count = tkvi_min(s->dim - first, s->group), c;
    uint8_t coded[TKVI_BLOCK], *scale = meta + 2 * (g * TKVI_BLOCK + token);
    tkvi_kivi_group(x + first, count, s->format->bits, s->fit, coded, scale,
                    scale + 2 * s->groups * TKVI_BLOCK);
    for (c = 0; c < count; c++) *tkvi_v_code(code, first + c, token) = coded[c];
}

static void tkvi_groups_scalar(const tkvi_side *s, const float *x, size_t stride, int n, tkvi_codes code,
                               uint8_t *meta) {
    int i, g;
    for (i = 0; i < s->pad && s->which == TKV_K; i++)
        for (g = 0; g < s->groups && tkvi_channel(s, i) < s->dim; g++)
            tkvi_kivi_column(s, x, stride, n, g, i, code, meta);
    for (i = 0; i < n && s->which == TKV_V; i++)
        for (g = 0; g < s->groups; g++) tkvi_kivi_row(s, x + (size_t)i * stride, g, i, code, meta);
}

static void tkvi_kivi_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride,
                             int n, uint8_t *dst) {
    TKVI_ALIGNED tkvi_codes code;
    memset(dst, 0, s->bytes);
    memset(code, 0, sizeof code);
    help->groups(s, x, stride, n, code, dst + s->code_bytes);
    tkvi_pack(s, help, code, dst);
}

static void tkvi_kivi_meta(const uint8_t *m, int n, const tkvi_helpers *help, float *scale, float *zero) {
    help->halves(m, n, scale);
    help->halves(m + 2 * n, n, zero);
}

static void tkvi_kivi_k_meta(const tkvi_side *s, const uint8_t *src, const tkvi_helpers *help, float *scale,
                             float *zero) {
    tkvi_kivi_meta(src + s->code_bytes, s->groups * s->pad, help, scale, zero);
}

static void tkvi_kivi_v_meta(const tkvi_side *s, const uint8_t *src, const tkvi_helpers *help, float *scale,
                             float *zero) {
    tkvi_kivi_meta(src + s->code_bytes, s->groups * TKVI_BLOCK, help, scale, zero);
}

#endif /* TKVI_FORMAT_KIVI_H */
/* ======== format_squat.h ======== */
/*
 * format_squat.h - SQUAT4, SQUAT2: keys whose errors turn away from the queries. K only. SQuat (arXiv
 * 2503.24358, section 3). Bytes and decoding are those of KIVI4 and KIVI2; only the encoder differs:
 *
 *     P = I + eta C / (tr C / dim)          C: mean of q q^T over the queries of the head group (metric.h)
 *     for each 16 channels:                 code them as KIVI does; error e = decoded - value
 *         later channels += U e             U = - P_ff^-1 P_fb   f: the later ones, b: these
 *
 * which makes e^T P e of the whole token small: what a query sees of the error, and the error itself. It is
 * error feedback as in GPTQ (arXiv 2210.17323), with the queries in the place of the calibration data.
 *
 * The paper cuts C to its largest directions and adds lambda Q^T Q with lambda .001. C itself needs no
 * eigenvectors, and eta does not depend on how many queries there were: the result is flat between eta 1 and
 * 10. Blocks of 16 are better than the authors' 64 (cfg.squat_block) at the same cost.
 *
 * U: fp16, for each channel its factors on all channels behind its block, one after the other. Products and
 * the sums of them are made in different functions, so that no compiler fuses them: U is the same on every
 * machine, too. May call KIVI.
 */
#ifndef TKVI_FORMAT_SQUAT_H
#define TKVI_FORMAT_SQUAT_H


#define TKVI_SQUAT_ETA 5.0

/* >>U */
static size_t tkvi_feedback_count(int dim, int unit) {
    int from, n = 0;
    for (from = 0; from + unit < dim; from += unit) n += unit * (dim - from - unit);
    return (size_t)n;
}

/* Element i <= j of a symmetric matrix, packed by columns. */
static int tkvi_packed(int i, int j) { return j * (j + 1) / 2 + i; }

static TKVI_NOINLINE void tkvi_scaled(float *dst, const float *x, float by, int n) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f32(x[i] * by);
}

/* P becomes R, upper triangular, P = R R^T: Cholesky from the end, so that R_ff belongs to P_ff. */
static void tkvi_factor(float *p, int dim) {
    int i, j, k;
    for (j = dim - 1; j >= 0; j--) {
        float *column = p + tkvi_packed(0, j), root;
        for (k = j + 1; k < dim; k++) {
            const float *r = p + tkvi_packed(0, k);
            float product[TKV_MAX_HEAD_DIM];
            tkvi_scaled(product, r, r[j], j + 1);
            for (i = 0; i <= j; i++) column[i] = tkvi_f32(column[i] - product[i]);
        }
        root =
            tkvi_f32(sqrtf(column[j] > 1e-3f ? column[j] : 1e-3f)); /* P >= I: only rounding comes near 0 */
        for (i = 0; i < j; i++) column[i] = tkvi_f32(column[i] / root);
        column[j] = root;
    }
}

/* P becomes U: element (c, f) is what channel c does to channel f of a later block. The rest is rubbish. */
static void tkvi_feedback_from(float *p, int dim, int unit) {
    int from, c, f, k;
    tkvi_factor(p, dim);
    for (from = 0; from + unit < dim; from += unit)
        for (c = from; c < from + unit; c++) { /* R_ff^T u = -R_cf */
            float u[TKV_MAX_HEAD_DIM], product[TKV_MAX_HEAD_DIM];
            int end = from + unit;
            for (f = end; f < dim; f++) {
                float *r = p + tkvi_packed(0, f), sum = -r[c];
                tkvi_multiplied(product, r + end, u + end, f - end);
                for (k = 0; k < f - end; k++) sum = tkvi_f32(sum - product[k]);
                r[c] = u[f] = tkvi_f32(sum / r[f]);
            }
        }
}

static void tkvi_feedback_store(const float *p, int dim, int unit, uint16_t *u) {
    int from, c, f;
    for (from = 0; from + unit < dim; from += unit)
        for (c = from; c < from + unit; c++)
            for (f = from + unit; f < dim; f++) *u++ = tkvi_f32_to_f16(p[tkvi_packed(c, f)]);
}

/* >>encoder */
/* Errors of channels c .. end-1 go to all from `end` on, in n rows. Returns what follows in u. */
static const uint16_t *tkvi_feed(float *x, int stride, int n, int c, int end, int dim, const uint16_t *u) {
    int f, t, later = dim - end;
    for (; c < end; c++) {
        float factor[TKV_MAX_HEAD_DIM], product[TKV_MAX_HEAD_DIM];
        for (f = 0; f < later; f++) factor[f] = tkvi_f16_to_f32(*u++);
        for (t = 0; t < n; t++) {
            float *row = x + t * stride;
            tkvi_scaled(product, factor, row[c], later);
            for (f = 0; f < later; f++) row[end + f] = tkvi_f32(row[end + f] + product[f]);
        }
    }
    return u;
}

static void tkvi_squat_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride,
                              int n, uint8_t *dst) {
    tkvi_codes code;
    float y[TKVI_BLOCK * TKV_MAX_HEAD_DIM]; /* values; errors of the channels that are done */
    int g, c, t, from;
    if (!s->feedback) {
        tkvi_kivi_encode(s, help, x, stride, n, dst);
        return;
    }
    memset(dst, 0, s->bytes);
    memset(code, 0, sizeof code);
    for (t = 0; t < n; t++)
        for (c = 0; c < s->dim; c++)
            y[t * s->pad + c] = tkvi_clampf(x[(size_t)t * stride + (size_t)c], -TKVI_F16_MAX, TKVI_F16_MAX);
    for (g = 0; g < s->groups && g * s->group < n; g++) {
        const uint16_t *u = s->feedback;
        int first = g * s->group, count = tkvi_min(n - first, s->group);
        for (from = 0; from < s->dim; from += s->feedback_unit) {
            int end = tkvi_min(s->dim, from + s->feedback_unit);
            for (c = from; c < end; c++) {
                const uint8_t *meta = dst + s->code_bytes + 2 * (g * s->pad + c);
                float scale, zero;
                tkvi_kivi_column(s, y, (size_t)s->pad, n, g, c, code, dst + s->code_bytes);
                scale = tkvi_f16_to_f32(tkvi_load16(meta));
                zero = tkvi_f16_to_f32(tkvi_load16(meta + 2 * s->groups * s->pad));
                for (t = first; t < first + count; t++) {
                    float product = tkvi_f32(scale * (float)*tkvi_k_code(code, c, t)); /* exact */
                    y[t * s->pad + c] = tkvi_f32(tkvi_f32(product + zero) - y[t * s->pad + c]);
                }
            }
            if (end < s->dim) u = tkvi_feed(y + first * s->pad, s->pad, count, from, end, s->dim, u);
        }
    }
    tkvi_pack(s, help, code, dst);
}

#endif /* TKVI_FORMAT_SQUAT_H */
/* ======== format_subspace.h ======== */
/*
 * format_subspace.h - SUBSPACE4, SUBSPACE2: what some caches call SQuat and what that paper is not
 * (format_squat.h has the paper's): an orthogonal basis, and each token coded in cfg.subspaces parts of its
 * coordinates, each part with its own minimum and maximum.
 *
 *     y = rotate(x)  (rotate.h)    y^ = scale * code + zero, per token and part    x^ = rotate back (y^)
 *
 * Those caches want a learned basis. This one is data-free: it makes the parts alike, which is what a learned
 * basis is multiplied with anyway where it works best (OSCAR, arXiv 2605.17757). Groups are coded as KIVI's
 * are, cfg.fit too. More bytes than it seems: 2 bits in 4 parts of a head_dim of 128 are 3 bits a value, in 8
 * parts 4.
 *
 * Bytes: | codes [64 tokens][channels], low bits first, whole bytes | scale fp16 [64][parts] | zero fp16
 * [64][parts] | Part p is coordinates dim p / parts up to dim (p + 1) / parts. Attention decodes
 * (TKVI_AS_DECODED).
 */
#ifndef TKVI_FORMAT_SUBSPACE_H
#define TKVI_FORMAT_SUBSPACE_H


static void tkvi_subspace_layout(tkvi_side *s) {
    s->groups = (int16_t)tkvi_min(s->parts, s->dim);
    s->code_bytes = (size_t)(TKVI_BLOCK * ((s->dim * s->format->bits + 7) / 8));
    s->meta_bytes = (size_t)(TKVI_BLOCK * s->groups * 4);
}

static void tkvi_subspace_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride,
                                 int n, uint8_t *dst) {
    size_t row = s->code_bytes / TKVI_BLOCK;
    int per = 8 / s->format->bits, t, c, g;
    (void)help;
    memset(dst, 0, s->bytes);
    for (t = 0; t < n; t++) {
        float y[TKV_MAX_HEAD_DIM];
        uint8_t code[TKV_MAX_HEAD_DIM], *to = dst + (size_t)t * row;
        for (c = 0; c < s->dim; c++)
            y[c] = tkvi_clampf(x[(size_t)t * stride + (size_t)c], -TKVI_F16_MAX, TKVI_F16_MAX);
        tkvi_rotate(y, s->dim);
        for (g = 0; g < s->groups; g++) {
            int from = s->dim * g / s->groups, end = s->dim * (g + 1) / s->groups;
            uint8_t *scale = dst + s->code_bytes + 2 * (t * s->groups + g);
            tkvi_kivi_group(y + from, end - from, s->format->bits, s->fit, code + from, scale,
                            scale + TKVI_BLOCK * s->groups * 2);
        }
        for (c = 0; c < s->dim; c++)
            to[c / per] = (uint8_t)(to[c / per] | code[c] << c % per * s->format->bits);
    }
}

static void tkvi_subspace_decode(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                                 int n, float *x, size_t stride) {
    size_t row = s->code_bytes / TKVI_BLOCK;
    int bits = s->format->bits, per = 8 / bits, t, c, g;
    (void)help;
    for (t = first; t < first + n; t++) {
        const uint8_t *codes = src + (size_t)t * row;
        float *y = x + (size_t)(t - first) * stride;
        for (g = 0; g < s->groups; g++) {
            const uint8_t *meta = src + s->code_bytes + 2 * (t * s->groups + g);
            float scale = tkvi_f16_to_f32(tkvi_load16(meta));
            float zero = tkvi_f16_to_f32(tkvi_load16(meta + TKVI_BLOCK * s->groups * 2));
            for (c = s->dim * g / s->groups; c < s->dim * (g + 1) / s->groups; c++) {
                int code = codes[c / per] >> c % per * bits & ((1 << bits) - 1);
                y[c] = tkvi_f32(tkvi_f32(scale * (float)code) + zero); /* the product is exact */
            }
        }
        tkvi_rotate_back(y, s->dim);
    }
}

#endif /* TKVI_FORMAT_SUBSPACE_H */
/* ======== format_a.h ======== */
/*
 * format_a.h - A40 .. A15, allocated keys: bits where the queries look.
 *
 * KIVI gives each channel of K as many bits as the next. Here the channels of a head stand in the order of
 * E[q_c^2] var(k_c), and each tile of four of them has 0 to 6 bits (allocate.h shares them out), so that the
 * average, metadata included, is the format's. Reverse water-filling: Cover and Thomas, Elements of Information
 * Theory, 10.3.3. Per channel and block of 64 tokens there are 16 bits of metadata:
 *
 *     x^ = scale * (code - middle + offset / unit) + mean      middle = (2^bits - 1) / 2
 *
 *   scale   one byte (logscale.h); offset: one signed byte; unit 8, or fewer where codes are fine (below);
 *   mean    static, of the channel, in the table: not in the block. Large biases of keys (Qwen2) end here.
 *   A channel without bits has its block mean as fp16 in the same 16 bits.
 *
 * Encoding a column: the residuals x - mean are cut to 12 bits between their smallest and largest, from then on
 * all sums are integers and the same on every machine. Several ranges are tried; the codes that correlate best with
 * the values win. The scale is then set so that decoded values are unbiased, cov(x^, x) = var(x), or, where a channel
 * has one bit, so that the variances agree; a scale of least squares or of the range would tilt the softmax between
 * this tier and the exact ones (bench/LOG.md). The offset puts the mean where it was.
 *
 * Step by step, floats unless it says double, each operation rounded; n tokens, top = 2^bits - 1:
 *   1. x - mean, cut to +-1e30; low and high are its ends; step = (high - low) / 4096, 0 if not above 1e-36;
 *      u = min(4095, floor((x - low) * (1 / step))), 0 without a step. A token is nearly low + step * (u + 1/2),
 *      and the mean m = low + step * ((2 sum(u) + n) / 2n), sum and last product in double. A channel without
 *      bits stores m as a float, then fp16, and is done
 *   2. for each cut of the table below: by = floor(131072 top / (4096 - 2 cut)),
 *      code = min(top, (floor(max(0, u - cut) * by / 65536) + 1) / 2), halves down;
 *      score = cov(code, u) / var(code) * cov(code, u), 0 where var is; the first of the best wins.
 *      cov and var are n^2 times what they are elsewhere, n sum(ab) - sum(a) sum(b): integers, then floats
 *   3. scale = var(u) / cov(code, u) * step, with one bit sqrt(var(u) / var(code)) * step; 0 if either is 0.
 *      From here on it is the value of its byte
 *   4. offset (double) = (m / scale - (2 sum(code) - n top) / 2n) * unit, cut to +-128, halves up; 0 if scale is 0
 *   5. if offset is beyond +-127, or scale is 0 and m is not: scale = the larger of it and |m| unit / 120 (double,
 *      then float), as a byte;
 *      a first offset = (m / scale - 1/2) * unit, cut to +-127; then anew, in double,
 *      code = floor((low + step * (u + 1/2)) / scale - offset / unit + top / 2 + 1/2), cut to 0 .. top,
 *      and the offset of step 4, cut to +-127. A scale that is 0 even so divides to an infinity
 * Tokens that are not there and positions without a channel have code 0, and the latter metadata of zeros. Without
 * a table, positions are channels, means are 0, and tiles have the widths of tkvi_share_alike (allocate.h).
 *
 * Bytes: | tiles, widest first | scale [pad] | offset [pad] |   a channel without bits: fp16 low byte | high byte
 */
#ifndef TKVI_FORMAT_A_H
#define TKVI_FORMAT_A_H


/* Steps of the offset to one of the codes, by width: what a byte can reach is +-127 of them. */
static const uint8_t tkvi_a_unit[7] = {1, 8, 8, 8, 8, 8, 4};

/* Ranges to try: so many of the 4096 steps are cut off at both ends, and tkvi_cut_by of that; by width. */
typedef struct tkvi_a_range {
    int32_t cut[8], by[8];
} tkvi_a_range;

#define TKVI_A_CUTS 5
#define TKVI_A_BY_(width, cut) (131072 * ((1 << width) - 1) / (TKVI_STEPS - 2 * cut))
#define TKVI_A_RANGE_(a, b, c, d, e, f)                                                                      \
    {                                                                                                        \
        {0, a, b, c, d, e, f, 0}, {                                                                          \
            0, TKVI_A_BY_(1, a), TKVI_A_BY_(2, b), TKVI_A_BY_(3, c), TKVI_A_BY_(4, d), TKVI_A_BY_(5, e),     \
                TKVI_A_BY_(6, f), 0                                                                          \
        }                                                                                                    \
    }
static const tkvi_a_range tkvi_a_ranges[TKVI_A_CUTS] = {
    TKVI_A_RANGE_(0, 0, 0, 0, 0, 0), TKVI_A_RANGE_(384, 300, 200, 120, 80, 60),
    TKVI_A_RANGE_(768, 600, 400, 260, 160, 120), TKVI_A_RANGE_(1152, 900, 650, 420, 260, 200),
    TKVI_A_RANGE_(1536, 1200, 900, 600, 400, 300)};

static void tkvi_a_layout(tkvi_side *s) {
    if (!s->given) tkvi_share_alike(s->format->bits, s->dim, s->pad, &s->runs);
    s->groups = 1;
    s->group = TKVI_BLOCK;
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = (size_t)(2 * s->pad);
}

/* Range and integers of column l. */
static void tkvi_a_integers(tkvi_columns *c, int l) {
    float x[TKVI_BLOCK], low = 1e30f, high = -1e30f, inverse;
    int t;
    for (t = 0; t < c->n; t++) {
        x[t] = l < c->lanes ? tkvi_f32(c->x[(size_t)t * c->stride + (size_t)l] - c->mean[l]) : 0.0f;
        x[t] = tkvi_clampf(x[t], -1e30f, 1e30f);
        low = x[t] < low ? x[t] : low;
        high = x[t] > high ? x[t] : high;
    }
    c->low[l] = low;
    c->step[l] = tkvi_f32(tkvi_f32(high - low) * (1.0f / TKVI_STEPS));
    inverse = c->step[l] > 1e-36f ? tkvi_f32(1.0f / c->step[l]) : 0.0f;
    if (!(inverse > 0.0f)) c->step[l] = 0.0f;
    c->sum_u[l] = c->sum_uu[l] = 0;
    for (t = 0; t < TKVI_BLOCK; t++) {
        int v = t < c->n ? (int)tkvi_f32(tkvi_f32(x[t] - low) * inverse) : 0;
        v = tkvi_min(v, TKVI_STEPS - 1);
        *tkvi_column_u(c, l, t) = (int16_t)v;
        c->sum_u[l] += v;
        c->sum_uu[l] += v * v;
    }
}

/* The best range of column l; its codes. */
static void tkvi_a_search(tkvi_columns *c, int l) {
    int width = c->width[l], top = (1 << width) - 1, u[TKVI_BLOCK], k, t;
    float most = -1.0f;
    for (t = 0; t < TKVI_BLOCK; t++) u[t] = *tkvi_column_u(c, l, t);
    for (k = 0; k < TKVI_A_CUTS; k++) {
        int cut = tkvi_a_ranges[k].cut[width], by = tkvi_a_ranges[k].by[width];
        int sum = 0, squares = 0, products = 0;
        float cov, var, score;
        uint8_t code[TKVI_BLOCK];
        for (t = 0; t < TKVI_BLOCK; t++) {
            int v = tkvi_cut_code(u[t], cut, by, top);
            code[t] = (uint8_t)v;
            sum += v;
            squares += v * v;
            products += v * u[t];
        }
        cov = tkvi_covariance(c->n, sum, c->sum_u[l], products);
        var = tkvi_covariance(c->n, sum, sum, squares);
        score = var > 0.0f ? tkvi_f32(tkvi_f32(cov / var) * cov) : 0.0f;
        if (score > most) {
            most = score;
            c->sum_c[l] = sum;
            c->sum_cc[l] = squares;
            c->sum_cu[l] = products;
            memcpy(c->code[l], code, sizeof code);
        }
    }
}

static void tkvi_columns_scalar(tkvi_columns *c) {
    int l;
    for (l = 0; l < TKVI_LANES; l++) {
        tkvi_a_integers(c, l);
        tkvi_a_search(c, l);
    }
}

/* Mean of the residuals. Products of two floats are exact in double: fusing them into the sum changes nothing. */
static double tkvi_a_mean(const tkvi_columns *c, int l) {
    float mean_u = tkvi_f32((float)(2 * c->sum_u[l] + c->n) / (float)(2 * c->n));
    return tkvi_f64((double)c->low[l] + (double)c->step[l] * (double)mean_u);
}

/* The offset that gives codes with this sum that mean. */
static int tkvi_a_offset(double mean, float scale, int sum_c, int n, int width) {
    double middle = tkvi_f64((double)(2 * sum_c - n * ((1 << width) - 1)) / (double)(2 * n)), v;
    if (!(scale > 0.0f)) return 0;
    v = tkvi_f64(tkvi_f64(mean / (double)scale) - middle) * (double)tkvi_a_unit[width];
    v = v < -128.0 ? -128.0 : v > 128.0 ? 128.0 : v;
    return (int)tkvi_f64(v + 1000.5) - 1000;
}

static void tkvi_settle_scalar(tkvi_columns *c, int top) {
    int l, offset;
    c->far = 0;
    for (l = 0; l < TKVI_LANES; l++) {
        double mean = tkvi_a_mean(c, l);
        float cov = tkvi_covariance(c->n, c->sum_c[l], c->sum_u[l], c->sum_cu[l]), scale = 0.0f;
        float var = tkvi_covariance(c->n, c->sum_u[l], c->sum_u[l], c->sum_uu[l]);
        float var_c = tkvi_covariance(c->n, c->sum_c[l], c->sum_c[l], c->sum_cc[l]);
        if (cov > 0.0f && var > 0.0f) {
            scale = c->width[l] == 1 ? tkvi_f32(sqrtf(tkvi_f32(var / var_c))) : tkvi_f32(var / cov);
            scale = tkvi_f32(scale * c->step[l]);
        }
        c->middle[l] = tkvi_f32((float)mean);
        c->log[l] = (uint8_t)tkvi_log_code(scale, top);
        offset = tkvi_a_offset(mean, tkvi_log_value(c->log[l], top), c->sum_c[l], c->n, c->width[l]);
        c->offset[l] = (uint8_t)offset;
        if (c->width[l] && (offset < -127 || offset > 127 || (c->log[l] == 0 && mean != 0.0)))
            c->far |= 1u << l;
    }
}

/* Recodes column l, whose mean is so far from the static one that only a larger scale lets the offset
 * reach it. */
static void tkvi_a_recode(tkvi_columns *c, int l, int top) {
    double mean = tkvi_a_mean(c, l), far = mean < 0.0 ? -mean : mean;
    int width = c->width[l], t, sum = 0, log, offset;
    double unit = (double)tkvi_a_unit[width], middle = 0.5 * (double)((1 << width) - 1);
    float scale;
    log = tkvi_max(c->log[l], tkvi_log_code(tkvi_f32((float)tkvi_f64(far * unit / 120.0)), top));
    scale = tkvi_log_value(log, top);
    offset = tkvi_max(-127, tkvi_min(127, tkvi_a_offset(mean, scale, 1 << (width - 1), 1, width)));
    for (t = 0; t < c->n; t++) {
        float u = (float)*tkvi_column_u(c, l, t) + 0.5f;
        double x = tkvi_f64((double)c->low[l] + (double)c->step[l] * (double)u);
        double v =
            tkvi_f64(tkvi_f64(tkvi_f64(tkvi_f64(x / (double)scale) - (double)offset / unit) + middle) + 0.5);
        int k = v < 0.0 ? 0 : v > 255.0 ? 255 : (int)v;
        k = tkvi_min(k, (1 << width) - 1);
        c->code[l][t] = (uint8_t)k;
        sum += k;
    }
    c->log[l] = (uint8_t)log;
    c->offset[l] = (uint8_t)tkvi_max(-127, tkvi_min(127, tkvi_a_offset(mean, scale, sum, c->n, width)));
}

static void tkvi_a_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride, int n,
                          uint8_t *dst) {
    TKVI_ALIGNED uint8_t column[TKV_MAX_HEAD_DIM][TKVI_BLOCK], tile[TKVI_TILE_CODES]; /* by channel */
    uint8_t channel[TKV_MAX_HEAD_DIM], widths[TKV_MAX_HEAD_DIM], log[TKV_MAX_HEAD_DIM], by[TKV_MAX_HEAD_DIM];
    float mean[TKV_MAX_HEAD_DIM], middle[TKV_MAX_HEAD_DIM];
    uint8_t *scale = dst + s->code_bytes, *offset = scale + s->pad;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, p, first, end = 0, l;
    tkvi_columns c;
    memset(dst, 0, s->bytes);
    for (width = TKVI_MAX_WIDTH, p = 0; width >= 0; width--)
        for (end = width ? p + 4 * s->runs.n[width] : s->pad; p < end; p++) {
            int from = tkvi_channel(s, p);
            channel[p] = (uint8_t)from;
            widths[from] = (uint8_t)width;
            mean[from] = s->mean ? s->mean[p] : 0.0f;
        }
    c.stride = stride;
    c.n = n;
    for (first = 0; first < s->pad; first += TKVI_LANES) {
        c.x = x + first;
        c.lanes = tkvi_min(TKVI_LANES, s->dim - first);
        c.mean = mean + first;
        c.width = widths + first;
        c.code = column + first;
        c.log = log + first;
        c.offset = by + first;
        c.middle = middle + first;
        help->columns(&c);
        help->settle(&c, s->top);
        for (l = 0; c.far >> l; l++)
            if (c.far >> l & 1u) tkvi_a_recode(&c, l, s->top);
        for (l = c.lanes; l < TKVI_LANES; l++) {
            memset(column[first + l], 0, TKVI_BLOCK);
            log[first + l] = by[first + l] = 0;
            middle[first + l] = 0.0f;
        }
    }
    for (width = TKVI_MAX_WIDTH, p = 0; width > 0; width--) /* bytes, by position */
        for (end = p + 4 * s->runs.n[width]; p < end; p += 4) {
            help->weave(column, channel + p, tile);
            help->pack_tile(dst, &at, width, tile);
            tkvi_next_tile(&at, width);
        }
    for (p = 0; p < end; p++) {
        scale[p] = log[channel[p]];
        offset[p] = by[channel[p]];
    }
    for (; p < s->pad; p++) {
        uint16_t half = tkvi_f32_to_f16(middle[channel[p]]);
        scale[p] = (uint8_t)(half & 255u);
        offset[p] = (uint8_t)(half >> 8);
    }
}

static void tkvi_a_meta(const tkvi_side *s, const uint8_t *src, const tkvi_helpers *help, float *scale,
                        float *zero) {
    static const float none[TKV_MAX_HEAD_DIM] = {0.0f};
    const uint8_t *log = src + s->code_bytes, *offset = log + s->pad;
    const float *mean = s->mean ? s->mean : none;
    int width, p = 0;
    help->logs(log, s->pad, s->top, scale); /* rubbish where there are no bits */
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        int n = 4 * s->runs.n[width], unit = width <= 6 ? tkvi_a_unit[width] : 1;
        if (n == 0) continue;
        help->zeros(offset + p, scale + p, mean + p, 1.0f / (float)unit, ((1 << width) - 1) * unit / 2, n,
                    zero + p);
        p += n;
    }
    for (; p < s->pad; p++) {
        scale[p] = 0.0f;
        zero[p] = tkvi_f32(tkvi_f16_to_f32((uint16_t)(log[p] | offset[p] << 8)) + mean[p]);
    }
}

#endif /* TKVI_FORMAT_A_H */
/* ======== format_r.h ======== */
/*
 * format_r.h - R40 R30 R20 R15 R10, rotated values: a randomised Hadamard rotation makes the channels of a value look
 * Gaussian and alike (rotate.h), so one grid and one scale per token do.
 *
 *   x^ = scale * (code - (2^bits - 1) / 2)     whole bits: uniform grid, step best for a Gaussian
 *   x^ = scale * level[code], two channels     R15: 3 bits for a pair of channels, 8 points in the plane
 *
 * Max (IRE Trans. IT 6, 1960) for the steps; the eight points are the Lloyd-Max quantizer of a Gaussian pair
 * (mean square error .201 of the variance; the two-bit grid has .119). The scale is that of an unbiased norm:
 * |y|^2 / <y, grid point>, one logarithmic byte (logscale.h), 0 for a token of zeros. Attention sums up rotated
 * values and turns the sum back, once per head.
 *
 * The heads of a layer share its bits (allocate.h): the number in the name is the average. All after the rotation is
 * in integers (12 bits of a token's largest value).
 *
 * Step by step, of one token, floats unless they are integers, each operation rounded:
 *   1. y = x, cut to +-1e30, rotated (rotate.h); most = its largest |y|, at most 1e30. Not above 1e-30:
 *      scale and codes are 0
 *   2. u = trunc(y * (2047 / most)), cut to +-2047; squares = sum(u^2), at least 1
 *   3. unit = 1 / sqrt(squares / head_dim)
 *   4. whole bits: code = floor(u * (unit / step of the table below)) + 2^bits / 2, cut to the codes there are;
 *      level = 2 code - (2^bits - 1)
 *   5. R15: slabs of 16 channels are paired, the first with the second and so on: channel c with c + 16, which
 *      counts as 0 beyond head_dim. a, b = floor(u * (unit * (16 * 80.2))) of the two; the code is the first of
 *      the points (x, y) with the largest ax + by - 8 (x^2 + y^2); level = 2x and 2y. The 16 channels of a last
 *      slab without a partner are as in step 4 with two bits, level = 2 * their level in the table below
 *   6. scale = most / 2047 * (2 squares / sum(u level)); R15 stores 64 times that, as its levels are small
 * Missing tokens have scale and codes 0. A pair has one lane of a tile: slabs of three bits hold 32 channels, and
 * the two-bit slab is the last.
 *
 * Bytes: | tiles | scale, a byte per token [64] |     2 bits: 2.125 a value at head_dim 64
 */
#ifndef TKVI_FORMAT_R_H
#define TKVI_FORMAT_R_H


#define TKVI_R_MOST 2047 /* a token's largest value as an integer */

/* Step of the best uniform grid for a unit Gaussian, by bits. */
static const float tkvi_r_step[5] = {0.0f, 1.5960f, 0.9955f, 0.5860f, 0.3350f};

/* The eight points, 127 being 1.584: first channels, second channels; then a two-bit grid on the same scale, for 16
 * channels that have no partners. */
#define TKVI_R_UNIT 80.2f
static const int8_t tkvi_r_pairs[48] = {27,   -27, -78, 78,  32,  127, -32,  -127, 0, 0, 0, 0, 0, 0, 0, 0,
                                        27,   -27, 78,  -78, 127, 32,  -127, -32,  0, 0, 0, 0, 0, 0, 0, 0,
                                        -120, -40, 40,  120, 0,   0,   0,    0,    0, 0, 0, 0, 0, 0, 0, 0};

static void tkvi_r_layout(tkvi_side *s) {
    int slabs = s->pad / 16;
    if (!s->given) s->half_bits = (int8_t)(s->format->bits / 2);
    memset(&s->runs, 0, sizeof s->runs);
    if (s->half_bits == 3) {
        s->runs.n[3] = (uint16_t)(slabs / 2 * 4);
        s->runs.n[2] = (uint16_t)(slabs % 2 * 4);
        s->levels = tkvi_r_pairs;
        s->pairs = 1;
    } else {
        s->runs.n[s->half_bits / 2] = (uint16_t)(slabs * 4);
    }
    s->groups = 1;
    s->group = TKV_MAX_HEAD_DIM;
    s->code_bytes = tkvi_runs_bytes(&s->runs);
    s->meta_bytes = TKVI_BLOCK;
}

/* The largest integer that is not above x, |x| < 2^30. */
static int tkvi_floor(float x) {
    int i = (int)x;
    return i - ((float)i > x);
}

/* Codes of token number t with the integers u, and twice <u, level>. */
static int32_t tkvi_r_codes(const tkvi_side *s, const int16_t *u, float sigma, int t, tkvi_codes code) {
    float unit = tkvi_f32(1.0f / sigma), fine = tkvi_f32(unit * (16.0f * TKVI_R_UNIT));
    int32_t sum = 0;
    int c, k, lane = 0, bits = s->pairs ? 2 : s->half_bits / 2, pairs = s->pairs ? s->pad / 32 * 32 : 0;
    for (c = 0; c < pairs; c += c % 32 == 15 ? 17 : 1) { /* channels c and c + 16, in 1/16 of a level */
        int a = tkvi_floor(tkvi_f32((float)u[c] * fine)), b = tkvi_floor(tkvi_f32((float)u[c + 16] * fine));
        int best = 0, most = -(1 << 30);
        for (k = 0; k < 8; k++) {
            int x = tkvi_r_pairs[k], y = tkvi_r_pairs[16 + k], score = a * x + b * y - 8 * (x * x + y * y);
            if (score > most) {
                most = score;
                best = k;
            }
        }
        sum += 2 * (u[c] * tkvi_r_pairs[best] + u[c + 16] * tkvi_r_pairs[16 + best]);
        *tkvi_v_code(code, lane++, t) = (uint8_t)best;
    }
    fine = tkvi_f32(unit / tkvi_r_step[bits]);
    for (c = pairs; c < s->dim; c++) {
        int top = (1 << bits) - 1, v = tkvi_floor(tkvi_f32((float)u[c] * fine)) + (top + 1) / 2;
        v = tkvi_max(0, tkvi_min(top, v));
        sum += s->pairs ? 2 * u[c] * tkvi_r_pairs[32 + v] : u[c] * (2 * v - top);
        *tkvi_v_code(code, lane++, t) = (uint8_t)v;
    }
    return sum;
}

static void tkvi_tokens_scalar(const tkvi_side *s, const float *x, size_t stride, int n, tkvi_codes code,
                               float *scale) {
    int t, c;
    for (t = 0; t < n; t++, x += stride) {
        float y[TKV_MAX_HEAD_DIM], most = 0.0f, by, step;
        int16_t u[TKV_MAX_HEAD_DIM];
        int32_t squares = 0, sum;
        memset(u, 0, sizeof u);
        for (c = 0; c < s->dim; c++) y[c] = tkvi_clampf(x[c], -1e30f, 1e30f);
        tkvi_rotate(y, s->dim);
        for (c = 0; c < s->dim; c++) {
            float a = fabsf(y[c]); /* no branch: signs are coins */
            most = a > most ? a : most;
        }
        most = most < 1e30f ? most : 1e30f;
        by = most > 1e-30f ? tkvi_f32((float)TKVI_R_MOST / most) : 0.0f; /* less is as good as nothing */
        step = tkvi_f32(most / (float)TKVI_R_MOST);
        for (c = 0; c < s->dim; c++) {
            u[c] = (int16_t)tkvi_max(-TKVI_R_MOST, tkvi_min(TKVI_R_MOST, (int)tkvi_f32(y[c] * by)));
            squares += u[c] * u[c];
        }
        if (squares == 0) squares = 1;
        sum =
            tkvi_r_codes(s, u, tkvi_f32(sqrtf(tkvi_f32(tkvi_f32((float)squares) / (float)s->dim))), t, code);
        step = tkvi_f32(step * tkvi_f32(tkvi_f32((float)(2 * squares)) / tkvi_f32((float)sum)));
        scale[t] = by > 0.0f ? step : 0.0f;
    }
}

static void tkvi_r_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride, int n,
                          uint8_t *dst) {
    TKVI_ALIGNED tkvi_codes code;
    TKVI_ALIGNED float scale[TKVI_BLOCK];
    int lanes = s->pairs ? s->runs.n[3] * 4 + s->runs.n[2] * 4 : s->pad;
    int plain = s->pairs && !s->runs.n[2] ? lanes : lanes - (s->pad - s->dim), t, l;
    memset(dst, 0, s->bytes);
    memset(scale, 0, sizeof scale);
    help->tokens(s, x, stride, n, code, scale);
    for (t = 0; t < TKVI_BLOCK; t++) { /* codes where there is no value */
        for (l = t < n && scale[t] > 0.0f ? plain : 0; l < lanes; l++) *tkvi_v_code(code, l, t) = 0;
        if (s->pairs)
            scale[t] = tkvi_f32(scale[t] * 64.0f); /* levels are small steps: into the same window */
    }
    help->log_codes(scale, TKVI_BLOCK, s->top, dst + s->code_bytes);
    tkvi_pack(s, help, code, dst);
}

static void tkvi_r_meta(const tkvi_side *s, const uint8_t *src, const tkvi_helpers *help, float *scale,
                        float *zero) {
    const float middle = s->levels ? 0.0f : 0.5f * (float)((1 << s->half_bits / 2) - 1);
    const float by = s->pairs ? 1.0f / 64.0f : 1.0f;
    int t, k;
    help->logs(src + s->code_bytes, TKVI_BLOCK, s->top, scale);
    for (t = 0; t < TKVI_BLOCK; t += 16) { /* vectors also at -O2: of 16, and x is nobody else's memory */
        float x[16];
        for (k = 0; k < 16; k++) x[k] = scale[t + k] * by;
        for (k = 0; k < 16; k++) scale[t + k] = x[k];
        for (k = 0; k < 16; k++) zero[t + k] = -middle * x[k];
    }
}

#endif /* TKVI_FORMAT_R_H */
/* ======== format_kvquant.h ======== */
/*
 * format_kvquant.h - KVQUANT4, KVQUANT3, KVQUANT2: KVQuant (arXiv 2401.18079, section 3). Levels where the
 * values are, one set for all keys of a layer and one for its values, and a slot for the few values that lie
 * far out.
 *
 *     x^ = radius * level[code] + middle + outlier
 *
 * with a radius and a middle for each channel of K, static, learned (kvquant.h), and for each token of V, from
 * what is left without its outliers.
 *
 * Keys are coded as they were before RoPE: the encoder turns them back (rope.h; cfg.rope, the block's start)
 * and decoding turns them on again, so that nobody else has to know. One place in a hundred of a token,
 * rounded up, is a slot for an outlier: its channel, and what its dense value lacks. Slots are always read,
 * those that are free hold 0.
 *   K   outliers lie beyond the channel's range, the 0.5 % and 99.5 % percentiles. Their code is that of the
 *       end. If there are more than slots, those that lack most get one.
 *   V   the slots take the highest and the lowest values, so many of each that the rest has the smallest
 *       range. Their code is the middle one.
 * The paper has one range of values for all heads of a token. Here a record is one head, so each has its own,
 * and its own slots: 32 bits per token and head in fp16, and shorter indices.
 *
 * Options (cfg.kvquant): POST_ROPE codes keys as they come; UNIFORM has evenly spaced levels; NORM decodes to
 * levels that keep the variance (Q-Norm, codebook.h); DENSE has no slots, and ranges hold every value.
 *
 * Bytes: | codes [64][row] | of K or V, below | channel u8, outlier fp16 [64][slots] |
 *        K: | start of the block, int32 |      V: | radius fp16 [64] | middle fp16 [64] |
 * A row has the channels' codes, low bits first, and fills up its last byte.
 * tkv_encode knows no table: K has | radius fp16 [dim] | middle fp16 [dim] | at the end, from the block's
 * minimum and maximum (no outliers), levels are those of a normal distribution, and NORM does nothing.
 * Attention decodes (TKVI_AS_DECODED; on x86 by decode_x86.h).
 */
#ifndef TKVI_FORMAT_KVQUANT_H
#define TKVI_FORMAT_KVQUANT_H


#define TKVI_KVQUANT_SLOTS 3 /* at most: of 256 channels */

/* What a layer's table says: of both sides, and of each channel of K (kvquant.h). */
typedef struct tkvi_kvquant {
    tkvi_book book[2][3]; /* by side and bits - 2 */
} tkvi_kvquant;

static int tkvi_kvquant_slots(int dim, int flags) {
    return flags & TKV_KVQUANT_DENSE ? 0 : tkvi_min((dim + 99) / 100, dim - 1);
}

static void tkvi_kvquant_layout(tkvi_side *s) {
    s->slots = (int8_t)tkvi_kvquant_slots(s->dim, s->kvquant);
    s->code_bytes = (size_t)(TKVI_BLOCK * ((s->dim * s->format->bits + 7) / 8));
    s->meta_bytes = (size_t)(TKVI_BLOCK * 3 * s->slots + (s->which == TKV_K ? 4 : TKVI_BLOCK * 4));
    if (s->which == TKV_K && !s->tabled) s->meta_bytes += (size_t)(4 * s->dim);
}

/* Where the pieces of the metadata are. */
typedef struct tkvi_kvquant_at {
    size_t row, slot, own; /* bytes of a token's codes; offsets */
} tkvi_kvquant_at;

static tkvi_kvquant_at tkvi_kvquant_places(const tkvi_side *s) {
    tkvi_kvquant_at at;
    at.row = s->code_bytes / TKVI_BLOCK;
    at.slot = s->code_bytes + (s->which == TKV_K ? 4u : 4u * TKVI_BLOCK);
    at.own = at.slot + (size_t)(TKVI_BLOCK * 3 * s->slots);
    return at;
}

static const tkvi_book *tkvi_kvquant_book(const tkvi_side *s, tkvi_book *standard) {
    if (s->table) return &s->table->book[s->which][s->format->bits - 2];
    tkvi_book_standard(s->format->bits, s->kvquant & TKV_KVQUANT_UNIFORM, standard);
    return standard;
}

static const float *tkvi_kvquant_decoded(const tkvi_side *s, const tkvi_book *book) {
    return s->kvquant & TKV_KVQUANT_NORM ? book->normed : book->level;
}

static float tkvi_half_at(const uint8_t *p) { return tkvi_f16_to_f32(tkvi_load16(p)); }

/* The product is exact where radius has 11 bits. */
static float tkvi_kvquant_value(float level, float radius, float middle) {
    return tkvi_f32(tkvi_f32(radius * level) + middle);
}

/* >>encoding a token */
typedef struct tkvi_kvquant_coder {
    float border[15]; /* halfway between levels */
    const float *decoded;
    int n, bits;
} tkvi_kvquant_coder;

static void tkvi_kvquant_coder_init(tkvi_kvquant_coder *e, const tkvi_side *s, const tkvi_book *book) {
    int i;
    e->bits = s->format->bits;
    e->n = 1 << e->bits;
    e->decoded = tkvi_kvquant_decoded(s, book);
    for (i = 0; i < e->n - 1; i++) e->border[i] = tkvi_f32(book->level[i] + book->level[i + 1]) * 0.5f;
}

static int tkvi_kvquant_code(const tkvi_kvquant_coder *e, float y) { /* of two nearest the lower one */
    int code = 0, i;
    for (i = 0; i < e->n - 1; i++) code += y > e->border[i];
    return code;
}

static float tkvi_kvquant_place(float x, float radius, float middle) {
    return radius > 0.0f ? tkvi_f32(tkvi_f32(x - middle) / radius) : 0.0f;
}

static void tkvi_kvquant_put(uint8_t *row, int bits, int c, int code) {
    int at = c * bits, wide = code << (at & 7);
    row[at / 8] = (uint8_t)(row[at / 8] | (wide & 255));
    if (wide > 255) row[at / 8 + 1] = (uint8_t)(row[at / 8 + 1] | wide >> 8);
}

static void tkvi_kvquant_slot(const tkvi_side *s, uint8_t *dst, int t, int slot, int c, float lacks) {
    /* side by side: gcc 12 -O2 loses reads of two arrays that move on together from one pointer */
    uint8_t *p = dst + tkvi_kvquant_places(s).slot + 3 * (t * s->slots + slot);
    p[0] = (uint8_t)c;
    tkvi_store16(p + 1, tkvi_f32_to_f16(lacks + 0.0f));
}

/* >>K */
/* A key as it is coded. */
static void tkvi_kvquant_key(const tkvi_rope *rope, const float *x, int dim, int64_t position, float *y) {
    int c;
    for (c = 0; c < dim; c++) y[c] = tkvi_clampf(x[c], -TKVI_F16_MAX, TKVI_F16_MAX);
    if (rope) tkvi_rope_turn(rope, position, 1, y);
}

/* Ranges of the block's channels, to the end of its bytes. */
static void tkvi_kvquant_own(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *own) {
    float low[TKV_MAX_HEAD_DIM], high[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
    int t, c;
    for (t = 0; t < n; t++) {
        tkvi_kvquant_key(s->rope, x + (size_t)t * stride, s->dim, (int64_t)s->start + t, y);
        for (c = 0; c < s->dim; c++) {
            if (t == 0 || y[c] < low[c]) low[c] = y[c];
            if (t == 0 || y[c] > high[c]) high[c] = y[c];
        }
    }
    for (c = 0; c < s->dim; c++) {
        tkvi_store16(own + 2 * c, tkvi_f32_to_f16(tkvi_f32(high[c] - low[c]) * 0.5f));
        tkvi_store16(own + 2 * (s->dim + c), tkvi_f32_to_f16(tkvi_f32(high[c] + low[c]) * 0.5f + 0.0f));
    }
}

/* Radius and middle of the channels: the table's, or those of the block. NULL: there are none. */
typedef struct tkvi_kvquant_ranges {
    const float *radius, *middle;
    float own[2][TKV_MAX_HEAD_DIM];
} tkvi_kvquant_ranges;

static int tkvi_kvquant_ranges_of(const tkvi_side *s, const uint8_t *src, tkvi_kvquant_ranges *r) {
    const uint8_t *own = src + tkvi_kvquant_places(s).own;
    int c;
    r->radius = s->tabled ? s->radius : r->own[0];
    r->middle = s->tabled ? s->middle : r->own[1];
    for (c = 0; c < s->dim && !s->tabled; c++) {
        r->own[0][c] = tkvi_half_at(own + 2 * c);
        r->own[1][c] = tkvi_half_at(own + 2 * (s->dim + c));
    }
    return r->radius != NULL;
}

static void tkvi_kvquant_k_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride,
                                  int n, uint8_t *dst) {
    tkvi_kvquant_ranges r;
    tkvi_kvquant_coder e;
    tkvi_book standard;
    int t, c, i;
    (void)help;
    memset(dst, 0, s->bytes);
    tkvi_store32(dst + s->code_bytes, (uint32_t)s->start);
    if (!s->tabled) tkvi_kvquant_own(s, x, stride, n, dst + tkvi_kvquant_places(s).own);
    if (!tkvi_kvquant_ranges_of(s, dst, &r)) return;
    tkvi_kvquant_coder_init(&e, s, tkvi_kvquant_book(s, &standard));
    for (t = 0; t < n; t++) {
        uint8_t *row = dst + (size_t)t * tkvi_kvquant_places(s).row;
        float y[TKV_MAX_HEAD_DIM], most[TKVI_KVQUANT_SLOTS] = {0.0f}, lacks[TKVI_KVQUANT_SLOTS] = {0.0f};
        int at[TKVI_KVQUANT_SLOTS] = {0};
        tkvi_kvquant_key(s->rope, x + (size_t)t * stride, s->dim, (int64_t)s->start + t, y);
        for (c = 0; c < s->dim; c++) {
            float place = tkvi_kvquant_place(y[c], r.radius[c], r.middle[c]), size;
            int code = tkvi_kvquant_code(&e, place), slot;
            tkvi_kvquant_put(row, e.bits, c, code);
            if (place >= -1.0f && place <= 1.0f && r.radius[c] > 0.0f) continue;
            y[c] = tkvi_f32(y[c] - tkvi_kvquant_value(e.decoded[code], r.radius[c], r.middle[c]));
            size = y[c] < 0.0f ? -y[c] : y[c];
            for (slot = s->slots; slot > 0 && size > most[slot - 1]; slot--) continue;
            for (i = s->slots - 1; i >= slot; i--) { /* the largest first, the first of equals before */
                most[i] = i > slot ? most[i - 1] : size;
                lacks[i] = i > slot ? lacks[i - 1] : y[c];
                at[i] = i > slot ? at[i - 1] : c;
            }
        }
        for (i = 0; i < s->slots; i++) tkvi_kvquant_slot(s, dst, t, i, at[i], lacks[i]);
    }
}

/* >>V */
typedef struct tkvi_kvquant_token {
    float radius, middle; /* fp16 values */
    int out[TKVI_KVQUANT_SLOTS];
} tkvi_kvquant_token;

/* The ends of a token: the lowest and the highest `slots` values, and the next ones. One order is the other's
 * reverse, so that no value is at both ends. */
static void tkvi_kvquant_ends(const float *x, int dim, int slots, int *low, int *high) {
    int c, i, n;
    for (c = 0; c < dim; c++) {
        n = tkvi_min(c, slots + 1);
        for (i = n; i > 0 && x[c] < x[low[i - 1]]; i--)
            if (i <= slots) low[i] = low[i - 1];
        if (i <= slots) low[i] = c;
        for (i = n; i > 0 && x[c] >= x[high[i - 1]]; i--)
            if (i <= slots) high[i] = high[i - 1];
        if (i <= slots) high[i] = c;
    }
}

/* Which values of a token take slots, and the range of the others. */
static void tkvi_kvquant_token_of(const float *x, int dim, int slots, tkvi_kvquant_token *k) {
    int low[TKVI_KVQUANT_SLOTS + 1], high[TKVI_KVQUANT_SLOTS + 1], i, best = 0;
    tkvi_kvquant_ends(x, dim, slots, low, high);
    for (i = 1; i <= slots; i++)
        if (tkvi_f32(x[high[slots - i]] - x[low[i]]) < tkvi_f32(x[high[slots - best]] - x[low[best]]))
            best = i;
    for (i = 0; i < slots; i++) k->out[i] = i < best ? low[i] : high[i - best];
    k->radius = tkvi_f32(x[high[slots - best]] - x[low[best]]) * 0.5f;
    k->middle = tkvi_f32(x[high[slots - best]] + x[low[best]]) * 0.5f + 0.0f;
    k->radius = tkvi_f16_to_f32(tkvi_f32_to_f16(k->radius));
    k->middle = tkvi_f16_to_f32(tkvi_f32_to_f16(k->middle));
}

static void tkvi_kvquant_v_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride,
                                  int n, uint8_t *dst) {
    tkvi_kvquant_coder e;
    tkvi_book standard;
    int t, c, i;
    (void)help;
    memset(dst, 0, s->bytes);
    tkvi_kvquant_coder_init(&e, s, tkvi_kvquant_book(s, &standard));
    for (t = 0; t < n; t++) {
        uint8_t *row = dst + (size_t)t * tkvi_kvquant_places(s).row, *meta = dst + s->code_bytes + 2 * t;
        int half = e.n / 2 - 1;
        float y[TKV_MAX_HEAD_DIM];
        uint8_t code[TKV_MAX_HEAD_DIM];
        tkvi_kvquant_token k;
        tkvi_kvquant_key(NULL, x + (size_t)t * stride, s->dim, 0, y);
        tkvi_kvquant_token_of(y, s->dim, s->slots, &k);
        tkvi_store16(meta, tkvi_f32_to_f16(k.radius));
        tkvi_store16(meta + 2 * TKVI_BLOCK, tkvi_f32_to_f16(k.middle));
        for (c = 0; c < s->dim; c++)
            code[c] = (uint8_t)tkvi_kvquant_code(&e, tkvi_kvquant_place(y[c], k.radius, k.middle));
        for (i = 0; i < s->slots; i++) {
            float dense = tkvi_kvquant_value(e.decoded[half], k.radius, k.middle);
            code[k.out[i]] = (uint8_t)half;
            tkvi_kvquant_slot(s, dst, t, i, k.out[i], tkvi_f32(y[k.out[i]] - dense));
        }
        for (c = 0; c < s->dim; c++) tkvi_kvquant_put(row, e.bits, c, code[c]);
    }
}

/* >>decoding */
/* The dense values of a row. A byte behind it is read, which the record has. step 0: one range for all. */
static void tkvi_kvquant_dense(const uint8_t *row, int bits, int dim, const float *level, const float *radius,
                               const float *middle, int step, float *y) {
    int c, mask = (1 << bits) - 1;
    for (c = 0; c < dim; c++) {
        const uint8_t *p = row + c * bits / 8;
        int code = (p[0] | p[1] << 8) >> (c * bits & 7) & mask;
        y[c] = tkvi_kvquant_value(level[code], radius[c * step], middle[c * step]);
    }
}

/* In a loop of its own: what is added to a value in memory is not added to anything before. */
static void tkvi_kvquant_outliers(const tkvi_side *s, const uint8_t *src, int t, float *y) {
    const uint8_t *p = src + tkvi_kvquant_places(s).slot + 3 * t * s->slots;
    int i;
    for (i = 0; i < s->slots; i++, p += 3)
        if (p[0] < s->dim) y[p[0]] = tkvi_f32(y[p[0]] + tkvi_half_at(p + 1));
}

static void tkvi_kvquant_k_decode(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                                  int n, float *x, size_t stride) {
    size_t row = tkvi_kvquant_places(s).row;
    uint32_t stored = tkvi_load32(src + s->code_bytes);
    int64_t start = stored < 0x80000000u ? (int64_t)stored : (int64_t)stored - ((int64_t)1 << 32);
    tkvi_kvquant_ranges r;
    tkvi_book standard;
    const float *level = tkvi_kvquant_decoded(s, tkvi_kvquant_book(s, &standard));
    int t, known = tkvi_kvquant_ranges_of(s, src, &r);
    (void)help;
    for (t = first; t < first + n; t++, x += stride) {
        if (!known) {
            memset(x, 0, (size_t)s->dim * sizeof *x);
            continue;
        }
        tkvi_kvquant_dense(src + (size_t)t * row, s->format->bits, s->dim, level, r.radius, r.middle, 1, x);
        tkvi_kvquant_outliers(s, src, t, x);
        if (s->rope) tkvi_rope_turn(s->rope, start + t, 0, x);
    }
}

static void tkvi_kvquant_v_decode(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                                  int n, float *x, size_t stride) {
    size_t row = tkvi_kvquant_places(s).row;
    tkvi_book standard;
    const float *level = tkvi_kvquant_decoded(s, tkvi_kvquant_book(s, &standard));
    int t;
    (void)help;
    for (t = first; t < first + n; t++, x += stride) {
        const uint8_t *meta = src + s->code_bytes + 2 * t;
        float radius = tkvi_half_at(meta), middle = tkvi_half_at(meta + 2 * TKVI_BLOCK);
        tkvi_kvquant_dense(src + (size_t)t * row, s->format->bits, s->dim, level, &radius, &middle, 0, x);
        tkvi_kvquant_outliers(s, src, t, x);
    }
}

#endif /* TKVI_FORMAT_KVQUANT_H */
/* ======== format_token.h ======== */
/*
 * format_token.h - formats that code each token by itself, on a grid with the zero in its middle: what INT8,
 * INT4, FP8 and FP4 share. A format is a grid (below) and a line in the table.
 *
 *   x^ = scale * level[code]                         scale: largest |x| over the largest level, in fp16
 *   x^ = scale * part * level[code]                  and, if the grid has parts, an E4M3 factor per 16 channels
 *
 * Products are exact in a float (11 + 4 + 2 or 11 + 8 bits). Two options, both in the bytes:
 *   cfg.rotate    the token is coded behind the rotation of rotate.h and turned back when it is decoded, so
 *                 that large channels do not cost the others their bits (QuaRot, arXiv 2404.00456)
 *   cfg.center_k  K only: the block's mean of each channel is taken away first and put back last. 16 bits per
 *                 channel and block, 1/4 bit a value; nothing has to be learned, and a block can be moved or
 *                 sent as it is.
 *
 * Decoding gives plain values, so attention needs nothing of its own (TKVI_AS_DECODED). Values saturate at
 * +-65504.
 *
 * Bytes of one side:
 *   | codes [64 tokens][channels] | scale fp16 [64][scales] | part [64][ceil(dim / 16)] | mean fp16 [dim] |
 *   8 bits: a byte per channel; 4 bits: the even channel in the low half, a row filled up to a whole byte
 */
#ifndef TKVI_FORMAT_TOKEN_H
#define TKVI_FORMAT_TOKEN_H


#define TKVI_PART 16 /* channels */

typedef struct tkvi_grid {
    int bits;             /* of a code: 4 or 8 */
    float top;            /* the largest level */
    int per_group, parts; /* scales per token: 1: by cfg.group_size, else one; 1: and factors */
    int (*code)(float y); /* the nearest level's, half to even; any finite y */
    float (*level)(int code);
} tkvi_grid;

static void tkvi_token_layout(tkvi_side *s, const tkvi_grid *grid) {
    s->grid = grid;
    if (!grid->per_group) s->group = TKV_MAX_HEAD_DIM;
    s->groups = (int16_t)((s->dim + s->group - 1) / s->group);
    s->code_bytes = (size_t)(TKVI_BLOCK * ((s->dim * grid->bits + 7) / 8));
    s->meta_bytes = (size_t)(TKVI_BLOCK * s->groups * 2);
    if (grid->parts) s->meta_bytes += (size_t)(TKVI_BLOCK * ((s->dim + TKVI_PART - 1) / TKVI_PART));
    if (s->center) s->meta_bytes += (size_t)(2 * s->dim);
}

/* Where the pieces are. Casts of the same for reading and writing. */
typedef struct tkvi_token_at {
    size_t row, scale, part, mean; /* bytes of a token's codes; offsets of the metadata */
    int parts;                     /* per token */
} tkvi_token_at;

static tkvi_token_at tkvi_token_places(const tkvi_side *s) {
    tkvi_token_at at;
    at.parts = s->grid->parts ? (s->dim + TKVI_PART - 1) / TKVI_PART : 0;
    at.row = s->code_bytes / TKVI_BLOCK;
    at.scale = s->code_bytes;
    at.part = at.scale + (size_t)(TKVI_BLOCK * s->groups * 2);
    at.mean = at.part + (size_t)(TKVI_BLOCK * at.parts);
    return at;
}

static float tkvi_largest(const float *x, int n) {
    float most = 0.0f;
    int i;
    for (i = 0; i < n; i++) {
        float a = x[i] < 0.0f ? -x[i] : x[i];
        most = a > most ? a : most;
    }
    return most;
}

static void tkvi_token_mean(const float *x, size_t stride, int n, int dim, uint8_t *mean) {
    int c, t;
    for (c = 0; c < dim; c++) {
        float sum = 0.0f;
        for (t = 0; t < n; t++)
            sum = tkvi_f32(sum + tkvi_clampf(x[(size_t)t * stride + (size_t)c], -TKVI_F16_MAX, TKVI_F16_MAX));
        tkvi_store16(mean + 2 * c, tkvi_f32_to_f16(tkvi_f32(sum / (float)n) + 0.0f));
    }
}

/* n channels with one scale; 0 if it is 0. Bytes of codes are clear. */
static void tkvi_token_codes(const tkvi_grid *grid, const float *y, int first, int n, float scale,
                             uint8_t *codes) {
    int c;
    if (!(scale > 0.0f)) return;
    for (c = first; c < first + n; c++) {
        int code = grid->code(tkvi_f32(y[c] / scale));
        if (grid->bits == 8) codes[c] = (uint8_t)code;
        else codes[c / 2] = (uint8_t)(codes[c / 2] | code << c % 2 * 4);
    }
}

static void tkvi_token_encode(const tkvi_side *s, const tkvi_helpers *help, const float *x, size_t stride,
                              int n, uint8_t *dst) {
    const tkvi_grid *grid = s->grid;
    tkvi_token_at at = tkvi_token_places(s);
    int t, c, g, p;
    (void)help;
    memset(dst, 0, s->bytes);
    if (s->center) tkvi_token_mean(x, stride, n, s->dim, dst + at.mean);
    for (t = 0; t < n; t++) {
        float y[TKV_MAX_HEAD_DIM];
        uint8_t *codes = dst + (size_t)t * at.row;
        for (c = 0; c < s->dim; c++) {
            y[c] = tkvi_clampf(x[(size_t)t * stride + (size_t)c], -TKVI_F16_MAX, TKVI_F16_MAX);
            if (s->center) y[c] = tkvi_f32(y[c] - tkvi_f16_to_f32(tkvi_load16(dst + at.mean + 2 * c)));
        }
        if (s->rotate) tkvi_rotate(y, s->dim);
        for (g = 0; g < s->groups; g++) {
            int first = g * s->group, count = tkvi_min(s->dim - first, s->group);
            uint8_t *scale_at = dst + at.scale + 2 * (t * s->groups + g);
            float most = tkvi_largest(y + first, count), scale;
            most = tkvi_f32(most / grid->top);
            if (grid->parts) most = tkvi_f32(most / TKVI_E4M3_TOP);
            tkvi_store16(scale_at, tkvi_f32_to_f16(most));
            scale = tkvi_f16_to_f32(tkvi_load16(scale_at));
            if (!grid->parts) tkvi_token_codes(grid, y, first, count, scale, codes);
            for (p = 0; p < at.parts && scale > 0.0f; p++) {
                int from = p * TKVI_PART, few = tkvi_min(s->dim - from, TKVI_PART);
                float part = tkvi_f32(tkvi_f32(tkvi_largest(y + from, few) / grid->top) / scale);
                int code = tkvi_e4m3_code(part);
                dst[at.part + (size_t)(t * at.parts + p)] = (uint8_t)code;
                tkvi_token_codes(grid, y, from, few, tkvi_f32(scale * tkvi_e4m3_level(code)), codes);
            }
        }
    }
}

static void tkvi_token_decode(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                              int n, float *x, size_t stride) {
    const tkvi_grid *grid = s->grid;
    tkvi_token_at at = tkvi_token_places(s);
    float level[256];
    int t, c;
    (void)help;
    for (c = 0; c < 1 << grid->bits; c++) level[c] = grid->level(c);
    for (t = first; t < first + n; t++) {
        const uint8_t *codes = src + (size_t)t * at.row;
        float *y = x + (size_t)(t - first) * stride, scale = 0.0f, part = 1.0f;
        for (c = 0; c < s->dim; c++) {
            int code = grid->bits == 8 ? codes[c] : codes[c / 2] >> c % 2 * 4 & 15;
            if (c % s->group == 0)
                scale = tkvi_f16_to_f32(tkvi_load16(src + at.scale + 2 * (t * s->groups + c / s->group)));
            if (at.parts && c % TKVI_PART == 0)
                part = tkvi_e4m3_level(src[at.part + (size_t)(t * at.parts + c / TKVI_PART)]);
            y[c] = tkvi_f32(tkvi_f32(scale * part) * level[code]); /* exact */
        }
        if (s->rotate) tkvi_rotate_back(y, s->dim);
        for (c = 0; c < s->dim && s->center; c++)
            y[c] = tkvi_f32(y[c] + tkvi_f16_to_f32(tkvi_load16(src + at.mean + 2 * c)));
    }
}

#endif /* TKVI_FORMAT_TOKEN_H */
/* ======== format_int.h ======== */
/*
 * format_int.h - INT8, INT4: whole numbers -127 .. 127 and -7 .. 7, one fp16 scale per token and 64 or 32
 * channels (cfg.group_size), largest |x| / 127 or / 7. The symmetric grid of QuaRot and of most int8 caches;
 * -128 and -8 are never written. Two's complement in a byte or half of one. 8.25 and 4.25 bits a value in
 * groups of 64, 8.5 and 4.5 in groups of 32. Rotate them (cfg.rotate): at 4 bits, large channels ruin their
 * group otherwise. Bytes: format_token.h.
 */
#ifndef TKVI_FORMAT_INT_H
#define TKVI_FORMAT_INT_H


static int tkvi_int8_code(float y) { return tkvi_rne(tkvi_clampf(y, -127.0f, 127.0f)) & 255; }

static float tkvi_int8_level(int code) { return (float)tkvi_signed_byte(code); }

static int tkvi_int4_code(float y) { return tkvi_rne(tkvi_clampf(y, -7.0f, 7.0f)) & 15; }

static float tkvi_int4_level(int code) { return (float)((code ^ 8) - 8); }

static const tkvi_grid tkvi_grid_int8 = {8, 127.0f, 1, 0, tkvi_int8_code, tkvi_int8_level};
static const tkvi_grid tkvi_grid_int4 = {4, 7.0f, 1, 0, tkvi_int4_code, tkvi_int4_level};

static void tkvi_int8_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_int8); }

static void tkvi_int4_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_int4); }

#endif /* TKVI_FORMAT_INT_H */
/* ======== format_float.h ======== */
/*
 * format_float.h - FP8 (E4M3, E5M2) and FP4 (E2M1), minifloat.h.
 *
 *   FP8   one fp16 scale per token: its largest value becomes the largest finite level (448, 57344). A plain
 *         cast would lose what is below 2^-9 (E4M3) and saturate at 448, where keys with a bias are; a scale
 *         of a byte would save 0.06 bits a value at head_dim 128 and needs a window. 8.125 bits a value
 *         there, 8.25 at 64.
 *   FP4   the levels 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, with two scales as in NVFP4: E4M3 per 16
 *         channels, fp16 per token (there: a float per tensor). 4.625 bits a value at head_dim 128, 4.75 at
 *         64. Mean square error of Gaussian values .0090 of the variance, with one channel in 40 being 12
 *         times as large .0083; MXFP4 (32 channels, powers of two) .0132 and .032 in 4.25 bits, fp16 per 32
 *         channels .0103 and .015 in 4.5.
 *
 * Bytes: format_token.h.
 */
#ifndef TKVI_FORMAT_FLOAT_H
#define TKVI_FORMAT_FLOAT_H


static const tkvi_grid tkvi_grid_e4m3 = {8, TKVI_E4M3_TOP, 0, 0, tkvi_e4m3_code, tkvi_e4m3_level};
static const tkvi_grid tkvi_grid_e5m2 = {8, TKVI_E5M2_TOP, 0, 0, tkvi_e5m2_code, tkvi_e5m2_level};
static const tkvi_grid tkvi_grid_fp4 = {4, 6.0f, 0, 1, tkvi_e2m1_code, tkvi_e2m1_level};

static void tkvi_e4m3_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_e4m3); }

static void tkvi_e5m2_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_e5m2); }

static void tkvi_fp4_layout(tkvi_side *s) { tkvi_token_layout(s, &tkvi_grid_fp4); }

#endif /* TKVI_FORMAT_FLOAT_H */
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
        {tkvi_kivi_k_layout, tkvi_kivi_encode, tkvi_tiles_decode, tkvi_kivi_k_meta, NULL}, {                 \
            tkvi_kivi_v_layout, tkvi_kivi_encode, tkvi_tiles_decode, tkvi_kivi_v_meta, NULL                  \
        }                                                                                                    \
    }

#define TKVI_NO_SIDE_                                                                                        \
    { NULL, NULL, NULL, NULL, NULL }
#define TKVI_A_                                                                                              \
    { {tkvi_a_layout, tkvi_a_encode, tkvi_tiles_decode, tkvi_a_meta, NULL}, TKVI_NO_SIDE_ }
#define TKVI_R_                                                                                              \
    {                                                                                                        \
        TKVI_NO_SIDE_, { tkvi_r_layout, tkvi_r_encode, tkvi_tiles_decode, tkvi_r_meta, NULL }                \
    }

#define TKVI_TOKEN_(t)                                                                                       \
    {                                                                                                        \
        {tkvi_##t##_layout, tkvi_token_encode, tkvi_token_decode, NULL, NULL}, {                             \
            tkvi_##t##_layout, tkvi_token_encode, tkvi_token_decode, NULL, NULL                              \
        }                                                                                                    \
    }
#define TKVI_SQUAT_                                                                                          \
    { {tkvi_kivi_k_layout, tkvi_squat_encode, tkvi_tiles_decode, tkvi_kivi_k_meta, NULL}, TKVI_NO_SIDE_ }
#define TKVI_SUBSPACE_                                                                                       \
    {                                                                                                        \
        {tkvi_subspace_layout, tkvi_subspace_encode, tkvi_subspace_decode, NULL, NULL}, {                    \
            tkvi_subspace_layout, tkvi_subspace_encode, tkvi_subspace_decode, NULL, NULL                     \
        }                                                                                                    \
    }

#define TKVI_KVQUANT_                                                                                        \
    {                                                                                                        \
        {tkvi_kvquant_layout, tkvi_kvquant_k_encode, tkvi_kvquant_k_decode, NULL, NULL}, {                   \
            tkvi_kvquant_layout, tkvi_kvquant_v_encode, tkvi_kvquant_v_decode, NULL, NULL                    \
        }                                                                                                    \
    }

static const tkvi_helpers tkvi_helpers_scalar = {
    tkvi_halves_scalar,    tkvi_to_halves_scalar, tkvi_logs_scalar,   tkvi_zeros_scalar,
    tkvi_log_codes_scalar, tkvi_pack_tile,        tkvi_weave_scalar,  tkvi_columns_scalar,
    tkvi_settle_scalar,    tkvi_tokens_scalar,    tkvi_groups_scalar, tkvi_tiles_scalar};

/* In the order of tkv_format. */
static const tkvi_format tkvi_formats[TKV_FORMAT_COUNT] = {
    {NULL, 0, TKVI_AS_TILES, 0, 0, {TKVI_NO_SIDE_, TKVI_NO_SIDE_}}, /* TKV_FORMAT_DEFAULT */
    {"f32", 32, TKVI_AS_F32, 0, 0, TKVI_EXACT_(f32)},
    {"f16", 16, TKVI_AS_F16, 0, 0, TKVI_EXACT_(f16)},
    {"bf16", 16, TKVI_AS_BF16, 0, 0, TKVI_EXACT_(bf16)},
    {"q8", 8, TKVI_AS_TILES, 0, 0, TKVI_KIVI_},
    {"kivi4", 4, TKVI_AS_TILES, 0, 0, TKVI_KIVI_},
    {"kivi3", 3, TKVI_AS_TILES, 0, 0, TKVI_KIVI_},
    {"kivi2", 2, TKVI_AS_TILES, 0, 0, TKVI_KIVI_},
    {"a40", 16, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a35", 14, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a30", 12, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a275", 11, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a25", 10, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a225", 9, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a20", 8, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a175", 7, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"a15", 6, TKVI_AS_TILES, 1, 0, TKVI_A_},
    {"r40", 16, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"r30", 12, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"r20", 8, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"r15", 6, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"r10", 4, TKVI_AS_TILES, 1, 1, TKVI_R_},
    {"int8", 8, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(int8)},
    {"int4", 4, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(int4)},
    {"fp8-e4m3", 8, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(e4m3)},
    {"fp8-e5m2", 8, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(e5m2)},
    {"fp4", 4, TKVI_AS_DECODED, 0, 0, TKVI_TOKEN_(fp4)},
    {"squat4", 4, TKVI_AS_TILES, 0, 0, TKVI_SQUAT_},
    {"squat2", 2, TKVI_AS_TILES, 0, 0, TKVI_SQUAT_},
    {"subspace4", 4, TKVI_AS_DECODED, 0, 0, TKVI_SUBSPACE_},
    {"subspace2", 2, TKVI_AS_DECODED, 0, 0, TKVI_SUBSPACE_},
    {"kvquant4", 4, TKVI_AS_DECODED, 0, 0, TKVI_KVQUANT_},
    {"kvquant3", 3, TKVI_AS_DECODED, 0, 0, TKVI_KVQUANT_},
    {"kvquant2", 2, TKVI_AS_DECODED, 0, 0, TKVI_KVQUANT_},
};
#undef TKVI_A_
#undef TKVI_R_
#undef TKVI_NO_SIDE_
#undef TKVI_EXACT_
#undef TKVI_KIVI_
#undef TKVI_TOKEN_
#undef TKVI_SQUAT_
#undef TKVI_SUBSPACE_
#undef TKVI_KVQUANT_

/* The definition of what is stored. */
static void tkvi_decode_side(const tkvi_side *s, const uint8_t *src, int first, int n, float *x,
                             size_t stride) {
    tkvi_values(s, &tkvi_helpers_scalar, src, first, n, x, stride);
}

static int tkvi_format_known(tkv_format f) { return f > TKV_FORMAT_DEFAULT && f < TKV_FORMAT_COUNT; }

/* Does its encoder ask for queries (metric.h)? */
static int tkvi_is_squat(tkv_format f) { return tkvi_formats[f].side[TKV_K].encode == tkvi_squat_encode; }

/* Does it need a table of the layer (kvquant.h)? */
static int tkvi_is_kvquant(tkv_format f) {
    return tkvi_formats[f].side[TKV_V].encode == tkvi_kvquant_v_encode;
}

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
static int tkvi_bad_fit(int fit) { return (fit & ~7) || ((fit & TKV_FIT_NORM) && (fit & TKV_FIT_UNBIASED)); }

static int tkvi_codec_side(const tkv_codec *c, tkvi_side *s) {
    tkvi_options o;
    if (!c || !tkvi_format_known(c->format) || (c->side != TKV_K && c->side != TKV_V)) return 0;
    if (!tkvi_format_stores(&tkvi_formats[c->format], c->side)) return 0;
    memset(&o, 0, sizeof o);
    o.group = c->group_size ? c->group_size : 64;
    o.fit = c->fit;
    o.rotate = c->rotate;
    o.center_k = c->center_k;
    o.parts = c->subspaces ? c->subspaces : 4;
    o.kvquant = c->kvquant;
    if (c->head_dim < 1 || c->head_dim > TKV_MAX_HEAD_DIM || (o.group != 64 && o.group != 32)) return 0;
    if (tkvi_bad_fit(o.fit) || (o.rotate & ~3) || (o.center_k & ~1) || o.parts < 1 || o.parts > 16) return 0;
    if ((o.kvquant & ~15) || c->position < 0) return 0;
    if (c->side == TKV_K && tkvi_rope_wrong(&c->rope, c->head_dim)) return 0;
    tkvi_side_make(s, &tkvi_formats[c->format], c->side, c->head_dim, TKVI_BLOCK, &o, NULL);
    s->start = c->position;
    return 1;
}

/* The rotation, where the side wants one. */
static void tkvi_codec_rope(const tkv_codec *c, tkvi_side *s, tkvi_rope *rope) {
    if (c->side != TKV_K || !c->rope.dim || !tkvi_is_kvquant(c->format)) return;
    if (c->kvquant & TKV_KVQUANT_POST_ROPE) return;
    tkvi_rope_make(rope, &c->rope);
    s->rope = rope;
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
    tkvi_rope rope;
    int t, i;
    if (!x || !dst || !tkvi_codec_side(c, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK || size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    for (t = 0; t < n_tokens; t++)
        for (i = 0; i < s.dim; i++)
            if (!tkvi_is_finite(x[t * stride + i])) return TKV_ERR_NONFINITE;
    tkvi_codec_rope(c, &s, &rope);
    tkvi_encode_side(&s, &tkvi_helpers_scalar, x, (size_t)stride, n_tokens, (uint8_t *)dst);
    return TKV_OK;
}

TKV_API tkv_status tkv_decode(const tkv_codec *c, const void *src, size_t size, int n_tokens, float *x,
                              ptrdiff_t stride) {
    tkvi_side s;
    tkvi_rope rope;
    if (!x || !src || !tkvi_codec_side(c, &s) || n_tokens < 1 || n_tokens > TKVI_BLOCK || size < s.bytes)
        return TKV_ERR_ARG;
    if (stride == 0) stride = s.dim;
    if (stride < s.dim) return TKV_ERR_ARG;
    tkvi_codec_rope(c, &s, &rope);
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
 *   V: the same with weights p_t scale_t per token, per group of channels; they have no sign, so one plane is
 *      0..255.
 * How many planes? A weight that is rounded to 1/127 of the largest adds an error that grows with the spread of
 * the codes it meets; the format itself errs by a third of a step, however wide. So in K tiles of 5 bits and more
 * (KIVI: 4) always have two planes, the others one, unless a row has a few weights that tower over the rest
 * (TKVI_NEEDS_TWO).
 * The same in V, by whole blocks: a side with wide tiles asks for two planes everywhere.
 * KIVI, and the int8 folding measured in ggml's rivals, describe the fold; centre terms from the float
 * query keep the rounding away from the mean of the codes.
 *
 * `ref` is any key; scores are q.(k - ref), the same for softmax, and large biases that all keys share
 * (Qwen2's reach 900) then cost no precision. The caller adds q.ref where the absolute logit matters.
 *
 * q and ref come in the order of the codes and, for rotated formats, rotated; out of rotated values is rotated.
 */
#ifndef TKVI_KERNELS_H
#define TKVI_KERNELS_H


#define TKVI_ROWS 8 /* query rows per pass; a kernel's stack is proportional to it */
#define TKVI_PLANE 127
#define TKVI_PLANE_V 255
#define TKVI_TWO_PLANES (127 * 128)
#define TKVI_WIDE 5 /* bits of tiles that want two planes */

/* `next` is the side that the same kernel reads next (K of the following block, or V), or NULL: its s->bytes
 * are prefetched between the products, a line here and there. A burst of prefetches stalls, and hardware
 * prefetchers stop at the end of a record.
 * scores[row][64] = q[row] . (k[t] - ref). q: [rows][pad], zero beyond dim. ref: [pad]. n: tokens in the block;
 * scores beyond them are finite rubbish. Exact sides have rows for n tokens at least: read no further. */
typedef void (*tkvi_k_kernel)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                              const float *ref, int rows, int n, int planes, float *scores);
/* out[row][pad] += sum_t p[row][t] v[t]. p: [rows][64], not negative, zero beyond n. */
typedef void (*tkvi_v_kernel)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                              int rows, int n, int planes, float *out);

typedef struct tkvi_kernels {
    tkv_isa isa;
    const char *name;
    tkvi_k_kernel k[TKVI_STORAGE_COUNT];
    tkvi_v_kernel v[TKVI_STORAGE_COUNT];
    const tkvi_helpers *helpers;
    /* p[t] = exp(s[t] - max) for 64 scores, all <= max; below max - 87 it may be 0. Returns the sum. */
    float (*exp64)(const float *s, float max, float *p);
    float (*max64)(const float *s); /* the largest of 64 scores */
    /* The same for rows of scores [row][64]: m[r] grows to the largest, p = exp(s - m), sum[r] of these; a row
     * that sees no key (all TKVI_HIDDEN) gets zeros. Returns 0 if no row sees one. */
    int (*weigh)(const float *s, int rows, float *m, float *sum, float *p);
} tkvi_kernels;

#define TKVI_HIDDEN (-1e30f) /* score of a key that a row does not see; no infinities, -ffast-math has none */
#define TKVI_IS_HIDDEN(s) (!((s) > TKVI_HIDDEN))

static int tkvi_weigh_rows(float (*max64)(const float *), float (*exp64)(const float *, float, float *),
                           const float *s, int rows, float *m, float *sum, float *p) {
    int r, seen = 0;
    for (r = 0; r < rows; r++, s += TKVI_BLOCK, p += TKVI_BLOCK) {
        float most = max64(s);
        sum[r] = 0.0f;
        if (TKVI_IS_HIDDEN(most)) {
            memset(p, 0, TKVI_BLOCK * sizeof(float));
            continue;
        }
        m[r] = most > m[r] ? most : m[r];
        sum[r] = exp64(s, m[r], p);
        seen++;
    }
    return seen;
}

/* The planes to ask a kernel for: 2 everywhere, or 1: as few as tiles and weights allow. */
static int tkvi_planes(const tkvi_side *s, int precise) {
    int width;
    if (s->which == TKV_V)
        for (width = TKVI_MAX_WIDTH; width >= TKVI_WIDE; width--)
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
/* What a rounded weight's error meets: the variance of codes in units of the format's own error, by width. First of
 * grids that cut off what is rare (A; R, whose values are normal), then of ranges from smallest to largest: there one
 * large key in a block has all its codes at the ends, and exactly; 4 bits, of V alone, between that (340) and normal
 * values (125). Pairs of R15 are like a code of 1.5 bits. */
static const float tkvi_spread[2][TKVI_WIDE] = {{0.0f, 3.0f, 9.0f, 30.0f, 90.0f},
                                                {0.0f, 3.0f, 14.0f, 74.0f, 250.0f}};

/* From so many bits on tiles of K have two planes in any case. */
static int tkvi_wide_k(const tkvi_side *s) { return s->format->shared ? TKVI_WIDE : TKVI_WIDE - 1; }

/* Places with such tiles. */
static int tkvi_wide_places(const tkvi_side *s) {
    int width, n = 0;
    for (width = TKVI_MAX_WIDTH; width >= tkvi_wide_k(s); width--) n += 4 * s->runs.n[width];
    return n;
}

/* The spread that weights of one plane meet in a block: of all channels (K), of 64 tokens (V, codes of a width). */
static float tkvi_coarse_k(const tkvi_side *s) {
    float sum = 0.0f;
    int width;
    for (width = 1; width < tkvi_wide_k(s); width++)
        sum += tkvi_spread[!s->format->shared][width] * (float)(4 * s->runs.n[width]);
    return sum;
}

static float tkvi_coarse_v(const tkvi_side *s, int width) {
    if (s->pairs) width = 2;
    return width < TKVI_WIDE ? tkvi_spread[!s->format->shared][width] * (float)TKVI_BLOCK : 0.0f;
}

/* Would one plane, of weights up to `top`, add more than a tenth of the format's own error? Rounding errs by
 * step^2 spread / 12 a weight, step = most / top, the format by w^2. */
#define TKVI_MAY_ERR(top) (0.09f * (float)(top) * (float)(top))
#define TKVI_NEEDS_TWO(coarse, most, squares, top)                                                           \
    ((coarse) * (most) * (most) > TKVI_MAY_ERR(top) * (squares))

/* w times `by` as integers of at most `top`. */
static int tkvi_rounded(float w, float by, int top) {
    return tkvi_max(-top, tkvi_min(top, tkvi_rne(w * by)));
}

static float tkvi_inverse(float top, float most) {
    float inverse = most > 0.0f ? top / most : 0.0f;
    return tkvi_is_finite(inverse) ? inverse : 0.0f; /* weights below 1e-34 contribute nothing */
}

/* Weights of K in units of the second plane; returns their step. */
static float tkvi_round_k(const tkvi_side *s, const float *w, int planes, int *rounded) {
    float most = tkvi_largest(w, s->pad), squares = 0.0f;
    float one = tkvi_inverse((float)TKVI_PLANE, most), two = tkvi_inverse((float)TKVI_TWO_PLANES, most);
    int wide = tkvi_wide_places(s), i;
    for (i = 0; i < s->pad; i++) squares += w[i] * w[i];
    if (planes == 2 || TKVI_NEEDS_TWO(tkvi_coarse_k(s), most, squares, TKVI_PLANE)) wide = s->pad;
    for (i = 0; i < s->pad; i++)
        rounded[i] =
            i < wide ? tkvi_rounded(w[i], two, TKVI_TWO_PLANES) : 128 * tkvi_rounded(w[i], one, TKVI_PLANE);
    return two > 0.0f ? most / (float)TKVI_TWO_PLANES : 0.0f;
}

/* The largest weight of V in one plane. Levels of a table are signed: beside them there is room for seven bits. */
static int tkvi_top_v(const tkvi_side *s) { return s->levels ? TKVI_PLANE : TKVI_PLANE_V; }

static float tkvi_round_v(const tkvi_side *s, const float *w, int width, int planes, int *rounded) {
    float most = tkvi_largest(w, TKVI_BLOCK), squares = 0.0f, by;
    int top = tkvi_top_v(s), t;
    for (t = 0; t < TKVI_BLOCK; t++) squares += w[t] * w[t];
    if (planes == 2 || TKVI_NEEDS_TWO(tkvi_coarse_v(s, width), most, squares, top)) top = TKVI_TWO_PLANES;
    by = tkvi_inverse((float)top, most);
    for (t = 0; t < TKVI_BLOCK; t++) rounded[t] = tkvi_max(0, tkvi_rounded(w[t], by, top));
    return by > 0.0f ? most / (float)top : 0.0f;
}

static void tkvi_tiles_k_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                                const float *ref, int rows, int n, int planes, float *scores) {
    float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    int g, r, t, i, c;
    (void)next;
    s->format->side[TKV_K].meta(s, src, &tkvi_helpers_scalar, scale, zero);
    for (r = 0; r < rows; r++)
        for (g = 0; g < s->groups; g++) {
            float folded[TKV_MAX_HEAD_DIM], step, rest = 0.0f, middle = 0.0f;
            int w[TKV_MAX_HEAD_DIM], sum[TKVI_BLOCK], width, position = 0;
            tkvi_tile_at at = tkvi_tiles(&s->runs);
            for (c = 0; c < s->pad; c++) folded[c] = q[r * s->pad + c] * scale[g * s->pad + c];
            step = tkvi_round_k(s, folded, planes, w);
            memset(sum, 0, sizeof sum);
            for (width = TKVI_MAX_WIDTH; width > 0; width--)
                for (i = 0; i < s->runs.n[width]; i++, position += 4) {
                    uint8_t tile[TKVI_TILE_CODES];
                    float centre = tkvi_centre(s, width);
                    tkvi_unpack_tile(src, &at, width, tile);
                    tkvi_next_tile(&at, width);
                    for (c = 0; c < 4; c++) {
                        int m = g * s->pad + position + c;
                        rest += q[r * s->pad + position + c] *
                                ((zero[m] - ref[position + c]) + centre * scale[m]);
                        middle += centre * (float)w[position + c];
                        for (t = 0; t < n; t++)
                            sum[t] += w[position + c] *
                                      (s->levels ? s->levels[tile[4 * t + c] & 15] : tile[4 * t + c]);
                    }
                }
            for (; position < s->pad; position++) /* channels without codes */
                rest += q[r * s->pad + position] * (zero[g * s->pad + position] - ref[position]);
            for (t = g * s->group; t < tkvi_min((g + 1) * s->group, TKVI_BLOCK); t++)
                scores[r * TKVI_BLOCK + t] = step * ((float)sum[t] - middle) + rest;
        }
}

static void tkvi_tiles_v_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                                int rows, int n, int planes, float *out) {
    float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    int r, t, i, c, width, slab = 0; /* first channel */
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    (void)next;
    s->format->side[TKV_V].meta(s, src, &tkvi_helpers_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i += 4) { /* 16 lanes */
            uint8_t tile[4][TKVI_TILE_CODES];
            const float *sc = scale + slab / s->group * TKVI_BLOCK, *z = zero + slab / s->group * TKVI_BLOCK;
            float centre = tkvi_centre(s, width);
            int channels = tkvi_slab_channels(s, width);
            for (c = 0; c < 4; c++) {
                tkvi_unpack_tile(src, &at, width, tile[c]);
                tkvi_next_tile(&at, width);
            }
            for (r = 0; r < rows; r++) {
                float folded[TKVI_BLOCK], step, rest = 0.0f, middle = 0.0f;
                int w[TKVI_BLOCK], sum[32];
                for (t = 0; t < TKVI_BLOCK; t++) folded[t] = t < n ? p[r * TKVI_BLOCK + t] * sc[t] : 0.0f;
                step = tkvi_round_v(s, folded, width, planes, w);
                memset(sum, 0, sizeof sum);
                for (t = 0; t < n; t++) {
                    const uint8_t *codes = tile[t / 16] + t % 16 / 4 * 64 + t % 4;
                    rest += p[r * TKVI_BLOCK + t] * (z[t] + centre * sc[t]);
                    middle += centre * (float)w[t];
                    for (c = 0; c < channels; c++) {
                        int code = codes[4 * (c % 16)];
                        sum[c] +=
                            w[t] *
                            (s->levels ? s->levels[tkvi_level_table(s, width, c / 16) + (code & 15)] : code);
                    }
                }
                for (c = 0; c < channels; c++)
                    out[r * s->pad + slab + c] += step * ((float)sum[c] - middle) + rest;
            }
            slab += channels;
        }
}

/* >>decoded: any format, by its decode alone. x86 falls back to it (decode_x86.h). */
#define TKVI_AT_ONCE 16 /* tokens: what the stack has room for */

/* n is a multiple of 16: vectors also at -O2. */
static float tkvi_float_dot(const float *a, const float *b, int n) {
    float sum[16] = {0.0f}, all = 0.0f;
    int i, k;
    for (i = 0; i < n; i += 16)
        for (k = 0; k < 16; k++) sum[k] += a[i + k] * b[i + k];
    for (k = 0; k < 16; k++) all += sum[k];
    return all;
}

static void tkvi_decoded_k(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                           const float *ref, int rows, int n, int planes, float *scores) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE * TKV_MAX_HEAD_DIM];
    int from, t, c, r;
    (void)next;
    (void)planes;
    memset(x, 0, sizeof x);
    memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_decode_side(s, src, from, count, x, (size_t)s->pad);
        for (t = 0; t < count; t++) {
            float *k = x + t * s->pad;
            for (c = 0; c < s->dim; c++) k[c] -= ref[c];
            for (r = 0; r < rows; r++)
                scores[r * TKVI_BLOCK + from + t] = tkvi_float_dot(q + r * s->pad, k, s->pad);
        }
    }
}

static void tkvi_decoded_v(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                           int rows, int n, int planes, float *out) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE * TKV_MAX_HEAD_DIM];
    int from, t, c, k, r;
    (void)next;
    (void)planes;
    memset(x, 0, sizeof x);
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_decode_side(s, src, from, count, x, (size_t)s->pad);
        for (r = 0; r < rows; r++)
            for (c = 0; c < s->pad; c += 16) {
                float sum[16], *o = out + r * s->pad + c;
                for (k = 0; k < 16; k++) sum[k] = o[k];
                for (t = 0; t < count; t++) {
                    float w = p[r * TKVI_BLOCK + from + t];
                    for (k = 0; k < 16; k++) sum[k] += w * x[t * s->pad + c + k];
                }
                for (k = 0; k < 16; k++) o[k] = sum[k];
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

static int tkvi_weigh_scalar(const float *s, int rows, float *m, float *sum, float *p) {
    return tkvi_weigh_rows(tkvi_max64_scalar, tkvi_exp64_scalar, s, rows, m, sum, p);
}

static const tkvi_kernels tkvi_kernels_scalar = {
    TKV_ISA_SCALAR,
    "scalar",
    {tkvi_f32_k_scalar, tkvi_f16_k_scalar, tkvi_bf16_k_scalar, tkvi_tiles_k_scalar, tkvi_decoded_k},
    {tkvi_f32_v_scalar, tkvi_f16_v_scalar, tkvi_bf16_v_scalar, tkvi_tiles_v_scalar, tkvi_decoded_v},
    &tkvi_helpers_scalar,
    tkvi_exp64_scalar,
    tkvi_max64_scalar,
    tkvi_weigh_scalar,
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
enum { TKVI_W_BYTES = TKVI_ROWS * TKV_MAX_HEAD_DIM }; /* weights of one plane of all rows */

/* Fold: scales into rows of q (by channel, K) or of p (by token, V), for one group; then round. */
typedef struct tkvi_folding {
    const float *x, *scale, *zero; /* x: [row][n] */
    const float *ref;              /* K */
    const uint8_t *centre2;        /* K: [n] twice the centre of the codes that a weight meets */
    float half;                    /* K: centre2 times half is tkvi_centre */
    float centre;                  /* V: the same for all weights; `middle` is that of the codes multiplied */
    int middle;
    int n, planes, top; /* K: number of weights; V: the largest weight of one plane */
    int wide;           /* K: so many have two planes in any case */
    float coarse;       /* see tkvi_coarse_k */
    /* Out: rounded weights [row][stride], and their second plane. K: signed. V: unsigned. Room for a multiple
     * of 64 in each row. */
    int8_t *w, *lo;
} tkvi_folding;

/* What sums of one plane's products say: of row r  step * (sum w code - base) + rest.  base is half of
 * sum w centre2; rest has the other half of an odd one, and in the first plane  sum x (zero - ref + centre scale). */
typedef struct tkvi_fold {
    float step[TKVI_ROWS], rest[TKVI_ROWS];
    int32_t base[TKVI_ROWS];
    int32_t row[TKVI_ROWS]; /* whose answer it is */
} tkvi_fold;

/* Multiply codes by one plane of weights, and turn the sums into answers. */
typedef struct tkvi_products {
    const tkvi_side *s;
    const uint8_t *wide, *tops; /* wide part of the first tile; the 1-bit vectors of the side */
    int half;                   /* number of the first 1-bit half */
    int tiles;                  /* K: the first so many */
    int width, slabs, n;        /* V: width of the codes, slabs, tokens */
    int pairs;                  /* V: the lanes of a slab are pairs of channels, 16 apart */
    uintptr_t ahead;            /* 0: nothing is to be prefetched */
    int turn, turns;            /* else only what belongs to tiles whose number & turns is turn */
    const uint8_t *rest,
        *end;        /* still to be prefetched: what stands behind the wide parts, a line per tile */
    const int8_t *w; /* [row][TKV_MAX_HEAD_DIM in K, TKVI_BLOCK in V]; rows to the next power of 2 */
    int w_group;     /* K: from the weights of tokens 0 .. 31 to those of 32 .. 63 */
    const tkvi_fold *fold, *fold_group; /* K: fold_group of tokens 32 .. 63 */
    int first, rows;                    /* the rows of this pass: 4, or fewer of the last */
    float *out;                         /* [row][token in K, channel in V] */
    int out_stride, add;                /* add: out += answers; always in V */
} tkvi_products;

typedef void (*tkvi_dot)(tkvi_products *d);

typedef struct tkvi_steps {
    const tkvi_helpers *helpers;
    /* f: of each plane. Returns how many weights have a second plane in some row; `lo` has so many in each four
     * rows of which one has any. V: returns which rows have one, a bit for each. */
    int (*fold_k)(const tkvi_folding *a, int rows, tkvi_fold *f);
    int (*fold_v)(const tkvi_folding *a, int rows, tkvi_fold *f);
    void (*dot)(tkvi_products *d, int rows);
    int bias; /* what `dot` adds to levels of a table of K to make them unsigned */
    int less; /* what it takes from 8-bit codes of V to make them signed */
} tkvi_steps;

static int tkvi_centre2(const tkvi_steps *v, const tkvi_side *s, int width) {
    return s->levels ? 2 * v->bias : (1 << width) - 1;
}

static void tkvi_products_set(tkvi_products *d, const tkvi_side *s, const uint8_t *src) {
    d->s = s;
    d->wide = src;
    d->tops = src + tkvi_tiles(&s->runs).halves;
    d->rest = d->tops;
    d->end = src + s->bytes;
    d->half = 0;
}

/* Two passes over all tiles take turns: memory is asked for what comes next all the time, not all at once. */
static void tkvi_prefetch_in_turn(tkvi_products *d, uintptr_t ahead, int plane, int two) {
    d->ahead = plane && !two ? 0 : ahead;
    d->turn = plane && two;
    d->turns = two != 0;
}

TKVI_FLAT void tkvi_prefetch_rest(tkvi_products *d) {
    if (d->rest < d->end) {
        tkvi_prefetch(d->rest, d->ahead);
        d->rest += 64;
    }
}

/* Four rows at a time; the last ones by the kernel of 1, 2 or 4 rows. */
static void tkvi_dot_rows(tkvi_products *d, int rows, const tkvi_dot *dots) {
    const int stride = d->s->which == TKV_K ? TKV_MAX_HEAD_DIM : TKVI_BLOCK;
    for (d->first = 0; d->first < rows; d->first += 4) {
        d->rows = tkvi_min(rows - d->first, 4);
        dots[tkvi_min(d->rows - 1, 2)](d);
        d->ahead = 0; /* once is enough */
        d->w += 4 * stride;
    }
}

static void tkvi_tiles_k(const tkvi_steps *v, const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                         const float *q, const float *ref, int rows, int planes, float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED uint8_t centre2[TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int8_t w[2][2][TKVI_W_BYTES]; /* plane, group */
    tkvi_fold fold[2][2];                      /* group, plane */
    tkvi_folding a;
    tkvi_products d;
    int width, g, c = 0, plane, second = 0;
    s->format->side[TKV_K].meta(s, src, v->helpers, scale, zero);
    tkvi_products_set(&d, s, src);
    for (width = TKVI_MAX_WIDTH; width > 0; c += 4 * s->runs.n[width--])
        if (s->runs.n[width]) memset(centre2 + c, tkvi_centre2(v, s, width), (size_t)(4 * s->runs.n[width]));
    if (c < s->pad) memset(centre2 + c, 0, (size_t)(s->pad - c));
    a.x = q;
    a.ref = ref;
    a.centre2 = centre2;
    a.half = s->levels ? 0.0f : 0.5f;
    a.n = s->pad;
    a.planes = planes;
    a.wide = tkvi_wide_places(s);
    a.coarse = tkvi_coarse_k(s);
    if (s->groups == 2 || rows > 4) memset(w[1], 0, sizeof w[1]); /* else all rows are folded at once */
    for (g = 0; g < s->groups; g++) {
        a.scale = scale + g * s->pad;
        a.zero = zero + g * s->pad;
        a.w = w[0][g];
        a.lo = w[1][g];
        second = tkvi_max(second, v->fold_k(&a, rows, fold[g]));
    }
    d.w_group = s->groups == 2 ? (int)sizeof w[0][0] : 0;
    d.out_stride = TKVI_BLOCK;
    for (plane = 0; plane < (second ? 2 : 1); plane++) {
        d.w = w[plane][0];
        d.tiles = plane ? (second + 3) / 4 : TKV_MAX_HEAD_DIM;
        d.fold = &fold[0][plane];
        d.fold_group = &fold[s->groups - 1][plane];
        d.out = scores;
        d.add = plane;
        tkvi_prefetch_in_turn(&d, tkvi_ahead(src, next), plane, second >= s->pad);
        v->dot(&d, rows);
    }
}

/* Moves the rows of V whose bit is set to the front; returns how many these are. */
static int tkvi_gather_rows(int which, int8_t *w, tkvi_fold *f) {
    int r, n = 0;
    for (r = 0; which >> r; r++) {
        if (!(which >> r & 1)) continue;
        if (n < r) memcpy(w + n * TKVI_BLOCK, w + r * TKVI_BLOCK, TKVI_BLOCK);
        f->step[n] = f->step[r];
        f->rest[n] = f->rest[r];
        f->base[n] = f->base[r];
        f->row[n++] = r;
    }
    return n;
}

static void tkvi_tiles_v(const tkvi_steps *v, const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                         const float *p, int rows, int n, int planes, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED int8_t w[2][TKVI_ROWS * TKVI_BLOCK];
    tkvi_fold fold[2];
    tkvi_folding a;
    tkvi_products d;
    int width, i, g, slab = 0, plane, second;
    s->format->side[TKV_V].meta(s, src, v->helpers, scale, zero);
    tkvi_products_set(&d, s, src);
    a.x = p;
    a.w = w[0];
    a.lo = w[1];
    a.n = TKVI_BLOCK;
    a.planes = planes;
    a.top = tkvi_top_v(s);
    d.n = n;
    d.w_group = 0;
    d.out_stride = s->pad;
    d.add = 1;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        a.centre = tkvi_centre(s, width);
        a.middle = s->levels ? 0 : (1 << width) - 1 - (width == 8 ? 2 * v->less : 0);
        a.coarse = tkvi_coarse_v(s, width);
        d.width = width;
        d.pairs = s->pairs && width == 3;
        for (i = 0; i < s->runs.n[width]; i += 4 * d.slabs) { /* slabs of 16 lanes that share a group */
            const int left = (s->runs.n[width] - i) / 4 << d.pairs, in_group = s->group / 16;
            g = slab / in_group;
            d.slabs = tkvi_min(left, in_group - slab % in_group) >> d.pairs;
            a.scale = scale + g * TKVI_BLOCK;
            a.zero = zero + g * TKVI_BLOCK;
            second = tkvi_gather_rows(v->fold_v(&a, rows, fold) & ((1 << rows) - 1), w[1], &fold[1]);
            for (plane = 0; plane < (second ? 2 : 1); plane++) {
                d.w = w[plane];
                d.fold = &fold[plane];
                d.out = out + 16 * slab;
                tkvi_prefetch_in_turn(&d, tkvi_ahead(src, next), plane, second);
                v->dot(&d, plane ? second : rows);
            }
            d.wide += 4 * d.slabs * tkvi_wide_bytes[width];
            d.half += 4 * d.slabs * tkvi_has_half[width];
            slab += d.slabs << d.pairs;
        }
    }
}

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_X86_H */
/* ======== decode_x86.h ======== */
/*
 * decode_x86.h - TKVI_AS_DECODED formats for attention on x86: codes become levels in registers, between the
 * load and the products. This file has what is the same with any vectors: where codes, levels and scales of a
 * side are, and what is done to the query instead of to each token. kernels_avx2.h and kernels_avx512.h have
 * the products. Calls kernels_x86.h.
 *
 *     x[c] = level[code[c]] * by + plus     by, plus: of each channel (keys of KVQUANT), or of each token and
 *                                           2^shift channels (the rest)
 * and outliers, which are added to the answer. The query has the options of a format:
 *     center    q.(y + mean) = q.y + q.mean
 *     rotate    q.(turned back y) = (turned q).y; values are turned back after the sum
 *     RoPE      q.(k turned by start + t) = (q turned back by start).(k turned by t); positions of 0 .. 15 are
 *               in a table, and the query is turned back by 16 more after 16 tokens
 * and q.ref is taken off last: in floats, 1e-7 of a large bias is far below what these formats lose of it.
 * Sums are in another order than decode has them: attention is within rounding of it, not bit-identical.
 *
 * Channels come in vectors of 16. Where keys turn, vectors 2i and 2i + 1 are the partners of 16 pairs.
 */
#ifndef TKVI_DECODE_X86_H
#define TKVI_DECODE_X86_H


#ifdef TKVI_X86

typedef enum tkvi_code_kind {
    TKVI_CODES_TABLE, /* 2 to 4 bits */
    TKVI_CODES_INT8,
    TKVI_CODES_E4M3,
    TKVI_CODES_E5M2
} tkvi_code_kind;

/* A side as rows of codes. */
typedef struct tkvi_reading {
    const tkvi_side *s;
    const tkvi_rope *rope;
    const uint8_t *codes, *slots; /* slots: outliers of KVQUANT */
    size_t row;
    int bits, by_channel, shift, per; /* by[token * per + (channel >> shift)], plus[token] */
    tkvi_code_kind kind;
    const uint8_t *parts; /* E4M3 factors of 16 channels, to be multiplied into by: [token][per] */
    uintptr_t ahead;
    int vectors, pairs;                /* pairs: how many of the vectors are partners */
    int at[TKV_MAX_HEAD_DIM / 16 + 2]; /* byte of a row where the codes of a vector begin */
    TKVI_ALIGNED float level[16];
    TKVI_ALIGNED float by[TKVI_BLOCK * TKVI_MAX_GROUPS * 2], plus[TKV_MAX_HEAD_DIM + 32];
} tkvi_reading;

#define TKVI_READ_FLOATS (TKV_MAX_HEAD_DIM + 32) /* of a row of q, at most */

static void tkvi_reading_levels(tkvi_reading *r, const float *level,
                                int bits) { /* any higher bits may stand */
    int i;
    for (i = 0; i < 16; i++) r->level[i] = level[i & ((1 << bits) - 1)];
}

static int tkvi_reading_token(tkvi_reading *r, const uint8_t *src, const tkvi_helpers *help) {
    const tkvi_side *s = r->s;
    const tkvi_token_at at = tkvi_token_places(s);
    float level[16];
    int c;
    r->row = at.row;
    r->bits = s->grid->bits;
    r->per = s->groups;
    r->shift = s->group == 32 ? 5 : s->group == 64 ? 6 : 8;
    if (r->bits == 4) {
        for (c = 0; c < 16; c++) level[c] = s->grid->level(c);
        tkvi_reading_levels(r, level, 4);
    } else {
        r->kind = s->grid == &tkvi_grid_int8   ? TKVI_CODES_INT8
                  : s->grid == &tkvi_grid_e4m3 ? TKVI_CODES_E4M3
                                               : TKVI_CODES_E5M2;
    }
    if (at.parts) {
        r->parts = src + at.part;
        r->per = at.parts;
        r->shift = 4;
    }
    help->halves(src + at.scale, TKVI_BLOCK * s->groups, r->by);
    return 1;
}

/* Where the vectors are; 0: not at whole bytes. */
static int tkvi_reading_vectors(tkvi_reading *r) {
    const tkvi_rope *rope = r->rope;
    int c = 0, n = 0, i;
    if (rope) {
        for (i = 0; i < rope->pairs; i += 16) {
            r->at[n++] = i * rope->step * r->bits / 8;
            r->at[n++] = (rope->step == 2 ? 2 * i : i + rope->apart) * r->bits / 8;
        }
        c = 2 * rope->pairs;
        if ((rope->step == 1 && rope->pairs * r->bits % 8) || (c < r->s->dim && c % 8)) return 0;
    }
    r->pairs = n;
    for (; c < r->s->dim; c += 16) r->at[n++] = c * r->bits / 8;
    r->vectors = n;
    return 1;
}

/* Channels in the order of the vectors, the rest 0. */
static void tkvi_reading_order(const tkvi_reading *r, const float *from, float *to) {
    const tkvi_rope *rope = r->rope;
    const int dim = r->s->dim;
    int i, j, c = 0;
    if (16 * r->vectors > dim) memset(to, 0, (size_t)(16 * r->vectors) * sizeof *to);
    if (rope) {
        for (i = 0; i < rope->pairs; i += 16, to += 32) {
            const int n = tkvi_min(16, rope->pairs - i);
            if (rope->step == 1 && n == 16) {
                memcpy(to, from + i, 16 * sizeof *to);
                memcpy(to + 16, from + i + rope->apart, 16 * sizeof *to);
                continue;
            }
            for (j = 0; j < n; j++) {
                to[j] = from[(i + j) * rope->step];
                to[16 + j] = from[(i + j) * rope->step + rope->apart];
            }
        }
        c = 2 * rope->pairs;
    }
    memcpy(to, from + c, (size_t)(dim - c) * sizeof *to);
}

/* What a side is read by; 0: nobody here knows it. */
static int tkvi_reading_begin(tkvi_reading *r, const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                              const tkvi_helpers *help) {
    tkvi_kvquant_ranges own;
    tkvi_book standard;
    r->s = s;
    r->rope = s->rope && s->rope->pairs > 0 ? s->rope : NULL;
    r->codes = src;
    r->ahead = tkvi_ahead(src, next);
    r->slots = r->parts = NULL;
    r->kind = TKVI_CODES_TABLE;
    r->by_channel = r->per = r->shift = 0;
    if (s->grid) return tkvi_reading_token(r, src, help) && tkvi_reading_vectors(r);
    if (s->format->side[s->which].layout != tkvi_kvquant_layout) return 0;
    r->row = tkvi_kvquant_places(s).row;
    r->bits = s->format->bits;
    if (!tkvi_reading_vectors(r)) return 0;
    if (s->slots) r->slots = src + tkvi_kvquant_places(s).slot;
    tkvi_reading_levels(r, tkvi_kvquant_decoded(s, tkvi_kvquant_book(s, &standard)), r->bits);
    r->by_channel = s->which == TKV_K;
    if (r->by_channel) {
        if (!tkvi_kvquant_ranges_of(s, src, &own)) return 0;
        tkvi_reading_order(r, own.radius, r->by);
        tkvi_reading_order(r, own.middle, r->plus);
    } else {
        r->per = 1;
        r->shift = 8;
        help->halves(src + s->code_bytes, TKVI_BLOCK, r->by);
        help->halves(src + s->code_bytes + 2 * TKVI_BLOCK, TKVI_BLOCK, r->plus);
    }
    return 1;
}

/* Between the products: what the next record has where token t of this one is. */
TKVI_FLAT void tkvi_reading_prefetch(const tkvi_reading *r, int t) {
    const tkvi_side *s = r->s;
    tkvi_prefetch_bytes(r->codes + (size_t)t * r->row, (int)r->row, r->ahead);
    if (t % 4 == 0 && (size_t)(16 * t) < s->meta_bytes)
        tkvi_prefetch(r->codes + s->code_bytes + 16 * t, r->ahead);
}

/* Rows of floats as the kernels of the exact tiers see them. */
static void tkvi_reading_scratch(const tkvi_reading *r, tkvi_side *plain) {
    *plain = *r->s;
    plain->format = &tkvi_formats[TKV_F32];
    plain->pad = (int16_t)(16 * r->vectors);
}

TKVI_FLAT int32_t tkvi_int_at(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* Cosine and sine by which RoPE turns the block's first key: as tkvi_cos_sin, but in floats (1e-7). */
static TKVI_TARGET_AVX2 void tkvi_reading_angles(const tkvi_reading *r, float *cosine, float *sine) {
    const uint64_t start = (uint64_t)(int64_t)tkvi_int_at(r->codes + r->s->code_bytes);
    const __m256i one = _mm256_set1_epi32(1);
    TKVI_ALIGNED int32_t turns[TKV_MAX_HEAD_DIM / 2];
    int j;
    for (j = 0; j < r->rope->pairs; j++) turns[j] = (int32_t)(uint32_t)(start * r->rope->turn[j] >> 32);
    for (; j % 8 != 0; j++) turns[j] = 0;
    for (j = 0; j < r->rope->pairs; j += 8) {
        const __m256i p = _mm256_load_si256((const __m256i *)(const void *)(turns + j));
        const __m256i quarter = _mm256_srai_epi32(_mm256_add_epi32(p, _mm256_set1_epi32(0x20000000)), 30);
        const __m256 x =
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(p, _mm256_slli_epi32(quarter, 30))),
                          _mm256_set1_ps(1.46291808e-9f)); /* 2 pi / 2^32 */
        const __m256 z = _mm256_mul_ps(x, x);
        __m256 s = _mm256_fmadd_ps(_mm256_set1_ps(-1.95152960e-4f), z, _mm256_set1_ps(8.33216087e-3f));
        __m256 c = _mm256_fmadd_ps(_mm256_set1_ps(2.44331571e-5f), z, _mm256_set1_ps(-1.38873163e-3f)), swap,
               y;
        s = _mm256_fmadd_ps(s, z, _mm256_set1_ps(-1.66666546e-1f));
        c = _mm256_fmadd_ps(c, z, _mm256_set1_ps(4.16666457e-2f));
        s = _mm256_fmadd_ps(_mm256_mul_ps(s, z), x, x);
        c = _mm256_fmadd_ps(c, z, _mm256_set1_ps(-0.5f));
        c = _mm256_fmadd_ps(c, z, _mm256_set1_ps(1.0f));
        swap = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(quarter, one), one));
        y = _mm256_blendv_ps(s, c, swap); /* a quarter further: sine is cosine, cosine is -sine */
        c = _mm256_blendv_ps(c, s, swap);
        s = _mm256_xor_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(quarter, 1), 31)));
        c = _mm256_xor_ps(c, _mm256_castsi256_ps(_mm256_slli_epi32(
                                 _mm256_srli_epi32(_mm256_add_epi32(quarter, one), 1), 31)));
        _mm256_storeu_ps(cosine + j, c);
        _mm256_storeu_ps(sine + j, s);
    }
}

/* Queries as vectors meet them: [row][16 * vectors]; and what every score is short of. */
static void tkvi_reading_queries(const tkvi_reading *r, const float *q, const float *ref, int rows, float *to,
                                 float *less) {
    const tkvi_side *s = r->s;
    float plain[TKV_MAX_HEAD_DIM];
    int i, c;
    memcpy(plain, ref, (size_t)s->pad * sizeof(float));
    if (s->grid && s->center)
        for (c = 0; c < s->dim; c++) plain[c] -= tkvi_half_at(r->codes + tkvi_token_places(s).mean + 2 * c);
    for (i = 0; i < rows; i++) less[i] = tkvi_float_dot(q + i * s->pad, plain, s->pad);
    for (i = 0; i < rows; i++) {
        memcpy(plain, q + i * s->pad, (size_t)s->pad * sizeof(float));
        if (s->grid && s->rotate) tkvi_rotate(plain, s->dim);
        tkvi_reading_order(r, plain, to + 16 * i * r->vectors);
    }
}

/* Where channel c is in the order of the vectors. */
TKVI_FLAT int tkvi_reading_place(const tkvi_reading *r, int c) {
    const tkvi_rope *rope = r->rope;
    int second, pair;
    if (!rope) return c;
    if (c >= 2 * rope->pairs) return c - 2 * rope->pairs + 16 * r->pairs;
    second = rope->step == 2 ? c & 1 : c >= rope->apart;
    pair = rope->step == 2 ? c >> 1 : c - (second ? rope->apart : 0);
    return pair / 16 * 32 + pair % 16 + 16 * second;
}

TKVI_FLAT_AVX2 float tkvi_half_x86(const uint8_t *p) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128((int)tkvi_load16(p))));
}

/* Outliers of n keys into rows of zeros, [16 * vectors] each. Returns how many there are, and where. */
static TKVI_TARGET_AVX2 int tkvi_outliers_k(const tkvi_reading *r, int from, int n, float *more,
                                            float **where) {
    const uint8_t *p = r->slots + 3 * from * r->s->slots;
    int t, i, count = 0;
    for (t = 0; t < n; t++, more += 16 * r->vectors)
        for (i = 0; i < r->s->slots; i++, p += 3)
            if (p[0] < r->s->dim) {
                where[count] = more + tkvi_reading_place(r, p[0]);
                *where[count++] += tkvi_half_x86(p + 1);
            }
    return count;
}

static TKVI_TARGET_AVX2 void tkvi_outliers_v(const tkvi_reading *r, const float *p, int rows, int n,
                                             float *out) {
    const uint8_t *at = r->slots;
    int t, i, k;
    for (t = 0; t < n; t++)
        for (i = 0; i < r->s->slots; i++, at += 3) {
            const float x = tkvi_half_x86(at + 1);
            if (at[0] >= r->s->dim) continue;
            for (k = 0; k < rows; k++) out[k * r->s->pad + at[0]] += p[k * TKVI_BLOCK + t] * x;
        }
}

#endif /* TKVI_X86 */

#endif /* TKVI_DECODE_X86_H */
/* ======== turn_x86.h ======== */
/*
 * turn_x86.h - the rotation of rotate.h by vectors, in registers and with the scalar code's bits. Encoders turn
 * (kernels_avx2.h, kernels_avx512.h), decoding turns back (values_x86.h). A lane is a channel; 16 channels and more.
 * Calls kernels_x86.h.
 */
#ifndef TKVI_TURN_X86_H
#define TKVI_TURN_X86_H


#ifdef TKVI_X86

/* Intrinsics of sums are plain sums to gcc: -ffast-math takes those of several stages apart. Not what this names. */
#if defined(__GNUC__) || defined(__clang__)
#define TKVI_AS_IT_IS(x) __asm__("" : "+v"(x))
#else
#define TKVI_AS_IT_IS(x) ((void)0)
#endif

/* >>AVX2 */
TKVI_FLAT_AVX2 void tkvi_butterfly_avx2(__m256 *a, __m256 *b) {
    __m256 sum = _mm256_add_ps(*a, *b), less = _mm256_sub_ps(*a, *b);
    TKVI_AS_IT_IS(sum);
    TKVI_AS_IT_IS(less);
    *a = sum;
    *b = less;
}

/* Butterflies of n vectors at distance h. */
TKVI_FLAT_AVX2 void tkvi_stage_avx2(__m256 *v, const int h, const int n) {
    int i;
    TKVI_UNROLL
    for (i = 0; i < n / 2; i++) {
        __m256 *a = v + i / h * h + i;
        tkvi_butterfly_avx2(a, a + h);
    }
}

/* Butterflies of 8 neighbours: the partner of each, plus or minus itself. The products are exact. */
TKVI_FLAT_AVX2 __m256 tkvi_within_avx2(__m256 x) {
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 1));
}

/* Cut to what formats hold, and the sign changed where `flip` has one. */
TKVI_FLAT_AVX2 __m256 tkvi_flip_avx2(__m256 x, const float *flip) {
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-1e30f)), _mm256_set1_ps(1e30f));
    return _mm256_xor_ps(x, _mm256_loadu_ps(flip));
}

/* 8 n neighbours, n up to 8, in registers, from x to y: flipped unless `flip` is NULL, then butterflies; what
 * is the last of a window times `by`, returning its largest sizes. */
TKVI_FLAT_AVX2 __m256 tkvi_chunk_avx2(const float *x, const float *flip, float *y, float by, const int n,
                                      const int last) {
    __m256 v[8], most = _mm256_setzero_ps();
    int i;
    TKVI_UNROLL
    for (i = 0; i < n; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        if (flip) v[i] = tkvi_flip_avx2(v[i], flip + 8 * i);
        v[i] = tkvi_within_avx2(v[i]);
    }
    if (n > 1) tkvi_stage_avx2(v, 1, n);
    if (n > 2) tkvi_stage_avx2(v, 2, n);
    if (n > 4) tkvi_stage_avx2(v, 4, n);
    TKVI_UNROLL
    for (i = 0; i < n; i++) {
        if (last) {
            v[i] = _mm256_mul_ps(v[i], _mm256_set1_ps(by));
            most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v[i]));
        }
        _mm256_storeu_ps(y + 8 * i, v[i]);
    }
    return most;
}

/* Chunks of 8 n, end values in all. Functions of their own: clang unrolls those. */
#define TKVI_CHUNK_AVX2_(name, n, last)                                                                      \
    static TKVI_TARGET_AVX2 __m256 tkvi_chunk##name##_avx2(const float *x, const float *flip, float *y,      \
                                                           float by, int end) {                              \
        __m256 most = _mm256_setzero_ps();                                                                   \
        int i;                                                                                               \
        for (i = 0; i < end; i += 8 * n)                                                                     \
            most = _mm256_max_ps(most, tkvi_chunk_avx2(x + i, flip ? flip + i : NULL, y + i, by, n, last));  \
        return most;                                                                                         \
    }
TKVI_CHUNK_AVX2_(1, 1, 1)
TKVI_CHUNK_AVX2_(2, 2, 1)
TKVI_CHUNK_AVX2_(4, 4, 1)
TKVI_CHUNK_AVX2_(8, 8, 1)
TKVI_CHUNK_AVX2_(8_first, 8, 0)
#undef TKVI_CHUNK_AVX2_

/* Butterflies at distance h over 2h values, a multiple of 8; times `by`. */
TKVI_FLAT_AVX2 __m256 tkvi_across_avx2(float *x, float by, int h) {
    __m256 most = _mm256_setzero_ps(), scale = _mm256_set1_ps(by), sign = _mm256_set1_ps(-0.0f);
    int i;
    for (i = 0; i < h; i += 8) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + h + i);
        tkvi_butterfly_avx2(&a, &b);
        a = _mm256_mul_ps(a, scale);
        b = _mm256_mul_ps(b, scale);
        most = _mm256_max_ps(most, _mm256_max_ps(_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b)));
        _mm256_storeu_ps(x + i, a);
        _mm256_storeu_ps(x + h + i, b);
    }
    return most;
}

/* tkvi_window of rotate.h, from x to y, for 8 channels and more; returns the largest sizes. */
static TKVI_NOINLINE TKVI_TARGET_AVX2 __m256 tkvi_window_avx2(const float *x, const float *flip, float *y,
                                                              int log2n) {
    const float by = tkvi_hadamard_norm[log2n];
    const int n = 1 << log2n;
    __m256 most = _mm256_setzero_ps();
    int i;
    switch (log2n) {
    case 3: return tkvi_chunk1_avx2(x, flip, y, by, 8);
    case 4: return tkvi_chunk2_avx2(x, flip, y, by, 16);
    case 5: return tkvi_chunk4_avx2(x, flip, y, by, 32);
    case 6: return tkvi_chunk8_avx2(x, flip, y, by, 64);
    default: break;
    }
    tkvi_chunk8_first_avx2(x, flip, y, 1.0f, n);
    for (i = 0; i < n; i += 128)
        most = _mm256_max_ps(most, tkvi_across_avx2(y + i, n == 128 ? by : 1.0f, 64));
    return n == 128 ? most : tkvi_across_avx2(y, by, 128);
}

/* Where rotate.h changes signs: -0 there, 0 elsewhere. */
static TKVI_TARGET_AVX2 void tkvi_flips_avx2(float *flip, int n) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    int c;
    for (c = 0; c < n; c += 8) {
        __m256i sign = _mm256_set1_epi32((int32_t)(tkvi_signs[c / 32] >> c % 32 & 255u));
        sign = _mm256_slli_epi32(_mm256_cmpeq_epi32(_mm256_and_si256(sign, bit), bit), 31);
        _mm256_storeu_ps(flip + c, _mm256_castsi256_ps(sign));
    }
}

/* >>AVX-512 */
#ifdef TKVI_AVX512
/* g++ 12 finds uninitialised variables in its own header (gcc bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

TKVI_FLAT_AVX512 void tkvi_butterfly_avx512(__m512 *a, __m512 *b) {
    __m512 sum = _mm512_add_ps(*a, *b), less = _mm512_sub_ps(*a, *b);
    TKVI_AS_IT_IS(sum);
    TKVI_AS_IT_IS(less);
    *a = sum;
    *b = less;
}

/* Butterflies of n vectors at distance h. */
TKVI_FLAT_AVX512 void tkvi_stage_avx512(__m512 *v, const int h, const int n) {
    int i;
    TKVI_UNROLL
    for (i = 0; i < n / 2; i++) {
        __m512 *a = v + i / h * h + i;
        tkvi_butterfly_avx512(a, a + h);
    }
}

TKVI_FLAT_AVX512 __m512 tkvi_plus_minus_avx512(__mmask16 minus) {
    return _mm512_mask_blend_ps(minus, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
}

/* Butterflies of 16 neighbours: the partner of each, plus or minus itself. */
TKVI_FLAT_AVX512 __m512 tkvi_within_avx512(__m512 x) {
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xaaaa), _mm512_permute_ps(x, 0xb1));
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xcccc), _mm512_permute_ps(x, 0x4e));
    x = _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xf0f0), _mm512_shuffle_f32x4(x, x, 0xb1));
    return _mm512_fmadd_ps(x, tkvi_plus_minus_avx512(0xff00), _mm512_shuffle_f32x4(x, x, 0x4e));
}

TKVI_FLAT_AVX512 __m512 tkvi_flip_avx512(__m512 x, const float *flip) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-1e30f)), _mm512_set1_ps(1e30f));
    return _mm512_xor_ps(x, _mm512_loadu_ps(flip));
}

TKVI_FLAT_AVX512 __m512 tkvi_chunk_avx512(const float *x, const float *flip, float *y, float by, const int n,
                                          const int last) {
    __m512 v[8], most = _mm512_setzero_ps();
    int i;
    TKVI_UNROLL
    for (i = 0; i < n; i++) {
        v[i] = _mm512_loadu_ps(x + 16 * i);
        if (flip) v[i] = tkvi_flip_avx512(v[i], flip + 16 * i);
        v[i] = tkvi_within_avx512(v[i]);
    }
    if (n > 1) tkvi_stage_avx512(v, 1, n);
    if (n > 2) tkvi_stage_avx512(v, 2, n);
    if (n > 4) tkvi_stage_avx512(v, 4, n);
    TKVI_UNROLL
    for (i = 0; i < n; i++) {
        if (last) {
            v[i] = _mm512_mul_ps(v[i], _mm512_set1_ps(by));
            most = _mm512_max_ps(most, _mm512_abs_ps(v[i]));
        }
        _mm512_storeu_ps(y + 16 * i, v[i]);
    }
    return most;
}

/* Chunks of 16 n, end values in all. Functions of their own: clang unrolls those. */
#define TKVI_CHUNK_AVX512_(name, n, last)                                                                    \
    static TKVI_TARGET_AVX512 __m512 tkvi_chunk##name##_avx512(const float *x, const float *flip, float *y,  \
                                                               float by, int end) {                          \
        __m512 most = _mm512_setzero_ps();                                                                   \
        int i;                                                                                               \
        for (i = 0; i < end; i += 16 * n)                                                                    \
            most =                                                                                           \
                _mm512_max_ps(most, tkvi_chunk_avx512(x + i, flip ? flip + i : NULL, y + i, by, n, last));   \
        return most;                                                                                         \
    }
TKVI_CHUNK_AVX512_(1, 1, 1)
TKVI_CHUNK_AVX512_(2, 2, 1)
TKVI_CHUNK_AVX512_(4, 4, 1)
TKVI_CHUNK_AVX512_(8, 8, 1)
TKVI_CHUNK_AVX512_(8_first, 8, 0)
#undef TKVI_CHUNK_AVX512_

static TKVI_NOINLINE TKVI_TARGET_AVX512 __m512 tkvi_window_avx512(const float *x, const float *flip, float *y,
                                                                  int log2n) {
    const float by = tkvi_hadamard_norm[log2n];
    __m512 most = _mm512_setzero_ps();
    int i;
    switch (log2n) {
    case 4: return tkvi_chunk1_avx512(x, flip, y, by, 16);
    case 5: return tkvi_chunk2_avx512(x, flip, y, by, 32);
    case 6: return tkvi_chunk4_avx512(x, flip, y, by, 64);
    case 7: return tkvi_chunk8_avx512(x, flip, y, by, 128);
    default: break;
    }
    tkvi_chunk8_first_avx512(x, flip, y, 1.0f, 256);
    for (i = 0; i < 128; i += 16) {
        __m512 a = _mm512_loadu_ps(y + i), b = _mm512_loadu_ps(y + 128 + i);
        tkvi_butterfly_avx512(&a, &b);
        a = _mm512_mul_ps(a, _mm512_set1_ps(by));
        b = _mm512_mul_ps(b, _mm512_set1_ps(by));
        most = _mm512_max_ps(most, _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        _mm512_storeu_ps(y + i, a);
        _mm512_storeu_ps(y + 128 + i, b);
    }
    return most;
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif /* TKVI_AVX512 */

#endif /* TKVI_X86 */

#endif /* TKVI_TURN_X86_H */
/* ======== values_x86.h ======== */
/*
 * values_x86.h - tokens of a side of tiles as floats, by vectors, with the bits of format_tiles.h.
 *
 * First all codes (or levels) become rows of bytes, [token][channel], then rows become floats, one product and one
 * sum each: the product is exact, so fusing them changes nothing, whatever the compiler's flags. Rotated rows are
 * turned back as rotate.h does it.
 *
 *   V   a plane of a tile is 16 channels of four tokens: its bytes are sorted by token, 16 bytes for each
 *   K   a plane is 16 tokens of four channels, which can be anywhere in the head: its bytes are sorted by channel
 *       into columns of 64 tokens, and columns of 16 channels are turned into rows
 *
 * Sorting for K stays within 16 bytes, so a column has its tokens in the order of its own: byte 16 k + 4 p + j is
 * token 16 p + 4 k + j.
 *
 * Calls turn_x86.h and kernels_x86.h.
 */
#ifndef TKVI_VALUES_X86_H
#define TKVI_VALUES_X86_H


#ifdef TKVI_X86

/* >>what is the same with any vectors */
/* Codes of one tile: bits of one vector, above them bits of another (tile.h); 0 bits: of none. */
typedef struct tkvi_tile_parts {
    const uint8_t *low, *high;
    int low_bits, high_bits, high_at; /* high_at: shift of plane 0 */
    const int8_t *levels;             /* NULL: codes are levels */
} tkvi_tile_parts;

/* Room for the codes of a side, and what its values are made of. */
typedef struct tkvi_rows {
    const tkvi_side *s;
    float *x;
    size_t stride;
    int first, n;
    TKVI_ALIGNED uint8_t level[TKVI_BLOCK * TKV_MAX_HEAD_DIM];  /* [token][pad] */
    TKVI_ALIGNED uint8_t column[TKV_MAX_HEAD_DIM * TKVI_BLOCK]; /* K: [channel][64] */
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM],
        zero[2 * TKV_MAX_HEAD_DIM]; /* K: [group][channel], V: [group][token] */
} tkvi_rows;

typedef struct tkvi_row_steps {
    /* Four columns of K. */
    void (*columns)(const tkvi_tile_parts *t, uint8_t *const *column);
    /* 16 tokens of V, `stride` bytes from each to the next; with `upper` levels for 16 channels more. */
    void (*slab)(const tkvi_tile_parts *t, const int8_t *upper, uint8_t *row, int stride);
    void (*stand)(tkvi_rows *r);
    /* The first n channels of token t, as floats before any rotation. [side][1: levels have a sign] */
    void (*row[2][2])(const tkvi_rows *r, int t, int n, float *to);
    void (*unrotate)(float *y, const float *signs, int dim, float *to); /* a rotated row; y is spoilt */
} tkvi_row_steps;

static tkvi_tile_parts tkvi_parts_of(const tkvi_side *s, const uint8_t *src, const tkvi_tile_at *at,
                                     int width) {
    tkvi_tile_parts t;
    t.low = src + at->wide;
    t.low_bits = width == 8 ? 8 : width >= 4 ? 4 : width >= 2 ? 2 : 0;
    t.high = width == 6 ? t.low + 128 : src + at->halves + at->half / 2 * 64;
    t.high_bits = width == 6 ? 2 : tkvi_has_half[width];
    t.high_at = width == 6 ? 0 : at->half % 2 * 4;
    t.levels = s->levels ? s->levels + tkvi_level_table(s, width, 0) : NULL;
    return t;
}

static void tkvi_rows_k(const tkvi_row_steps *v, tkvi_rows *r, const uint8_t *src) {
    const tkvi_side *s = r->s;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, k, position = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++, position += 4) {
            const tkvi_tile_parts t = tkvi_parts_of(s, src, &at, width);
            uint8_t *column[4];
            for (k = 0; k < 4; k++) column[k] = r->column + TKVI_BLOCK * tkvi_channel(s, position + k);
            v->columns(&t, column);
            tkvi_next_tile(&at, width);
        }
    for (; position < s->pad; position++) /* channels without codes */
        memset(r->column + TKVI_BLOCK * tkvi_channel(s, position),
               s->levels ? s->levels[tkvi_level_table(s, 0, 0)] : 0, TKVI_BLOCK);
    v->stand(r);
}

/* Metadata of K by channel instead of by position. */
static void tkvi_rows_order(const tkvi_side *s, float *x) {
    float plain[2 * TKV_MAX_HEAD_DIM];
    int g, i;
    memcpy(plain, x, (size_t)(s->groups * s->pad) * sizeof *x);
    for (g = 0; g < s->groups; g++)
        for (i = 0; i < s->pad; i++) x[g * s->pad + s->order[i]] = plain[g * s->pad + i];
}

static void tkvi_rows_v(const tkvi_row_steps *v, tkvi_rows *r, const uint8_t *src) {
    const tkvi_side *s = r->s;
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, slab = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int channels = tkvi_slab_channels(s, width);
        const int8_t *upper = channels == 32 ? s->levels + tkvi_level_table(s, width, 1) : NULL;
        for (i = 0; i < s->runs.n[width]; i++) {
            const int from = i % 4 * 16;
            if (from < r->first + r->n && from + 16 > r->first) {
                const tkvi_tile_parts t = tkvi_parts_of(s, src, &at, width);
                v->slab(&t, upper, r->level + from * s->pad + slab, s->pad);
            }
            tkvi_next_tile(&at, width);
            if (i % 4 == 3) slab += channels;
        }
    }
}

/* All rows as floats, rotated ones turned back. */
static void tkvi_rows_floats(const tkvi_row_steps *v, const tkvi_rows *r) {
    TKVI_ALIGNED float signs[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
    const tkvi_side *s = r->s;
    void (*row)(const tkvi_rows *, int, int, float *) = v->row[s->which == TKV_V][s->levels != NULL];
    float *to = r->x;
    int t;
    if (s->format->rotated) tkvi_flips_avx2(signs, s->pad);
    for (t = r->first; t < r->first + r->n; t++, to += r->stride) {
        if (!s->format->rotated) {
            row(r, t, s->dim, to);
            continue;
        }
        row(r, t, TKV_MAX_HEAD_DIM, y);
        v->unrotate(y, signs, s->dim, to);
    }
}

static void tkvi_tile_rows(const tkvi_row_steps *v, const tkvi_side *s, const tkvi_helpers *help,
                           const uint8_t *src, int first, int n, float *x, size_t stride) {
    tkvi_rows r;
    r.s = s;
    r.x = x;
    r.stride = stride;
    r.first = first;
    r.n = n;
    s->format->side[s->which].meta(s, src, help, r.scale, r.zero);
    if (s->which == TKV_K) {
        tkvi_rows_k(v, &r, src);
        if (s->order) tkvi_rows_order(s, r.scale);
        if (s->order) tkvi_rows_order(s, r.zero);
    } else {
        tkvi_rows_v(v, &r, src);
    }
    tkvi_rows_floats(v, &r);
}

/* >>AVX2 */
TKVI_FLAT_AVX2 __m256i tkvi_part_avx2(const uint8_t *p, int right, int bits) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm256_and_si256(_mm256_srl_epi16(x, _mm_cvtsi32_si128(right)),
                            _mm256_set1_epi8((char)((1 << bits) - 1)));
}

/* Half h of plane p of a tile, in order of r: 8 times four neighbours with one r. */
TKVI_FLAT_AVX2 __m256i tkvi_tile_plane_avx2(const tkvi_tile_parts *t, int p, int h) {
    const __m256i sorted = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12,
                                            1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const int at = p * t->low_bits;
    __m256i x = _mm256_setzero_si256();
    if (t->low_bits) x = tkvi_part_avx2(t->low + at / 8 * 64 + 32 * h, at % 8, t->low_bits);
    if (t->high_bits) {
        const __m256i high = tkvi_part_avx2(t->high + 32 * h, t->high_at + p * t->high_bits, t->high_bits);
        x = _mm256_or_si256(x, _mm256_sll_epi16(high, _mm_cvtsi32_si128(t->low_bits)));
    }
    return _mm256_shuffle_epi8(x, sorted);
}

TKVI_FLAT_AVX2 __m256i tkvi_table_avx2(const int8_t *levels, __m256i code) {
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)levels);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), code);
}

static TKVI_TARGET_AVX2 void tkvi_four_columns_avx2(const tkvi_tile_parts *t, uint8_t *const *column) {
    int h, p;
    for (h = 0; h < 2; h++) {
        __m256i x[4], a, b, c, d;
        TKVI_UNROLL
        for (p = 0; p < 4; p++) {
            x[p] = tkvi_tile_plane_avx2(t, p, h);
            if (t->levels) x[p] = tkvi_table_avx2(t->levels, x[p]);
        }
        a = _mm256_unpacklo_epi32(x[0], x[1]);
        b = _mm256_unpacklo_epi32(x[2], x[3]);
        c = _mm256_unpackhi_epi32(x[0], x[1]);
        d = _mm256_unpackhi_epi32(x[2], x[3]);
        _mm256_storeu_si256((__m256i *)(void *)(column[0] + 32 * h), _mm256_unpacklo_epi64(a, b));
        _mm256_storeu_si256((__m256i *)(void *)(column[1] + 32 * h), _mm256_unpackhi_epi64(a, b));
        _mm256_storeu_si256((__m256i *)(void *)(column[2] + 32 * h), _mm256_unpacklo_epi64(c, d));
        _mm256_storeu_si256((__m256i *)(void *)(column[3] + 32 * h), _mm256_unpackhi_epi64(c, d));
    }
}

/* Rows of 16 codes of tokens `token` and `token` + 2. */
TKVI_FLAT_AVX2 void tkvi_slab_rows_avx2(__m256i code, const int8_t *lower, const int8_t *upper, uint8_t *row,
                                        int stride) {
    __m256i x = lower ? tkvi_table_avx2(lower, code) : code;
    _mm_storeu_si128((__m128i *)(void *)row, _mm256_castsi256_si128(x));
    _mm_storeu_si128((__m128i *)(void *)(row + 2 * stride), _mm256_extracti128_si256(x, 1));
    if (!upper) return;
    x = tkvi_table_avx2(upper, code);
    _mm_storeu_si128((__m128i *)(void *)(row + 16), _mm256_castsi256_si128(x));
    _mm_storeu_si128((__m128i *)(void *)(row + 2 * stride + 16), _mm256_extracti128_si256(x, 1));
}

static TKVI_TARGET_AVX2 void tkvi_slab_avx2(const tkvi_tile_parts *t, const int8_t *upper, uint8_t *row,
                                            int stride) {
    const __m256i by_token = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    int p;
    for (p = 0; p < 4; p++, row += 4 * stride) {
        const __m256i a = _mm256_permutevar8x32_epi32(tkvi_tile_plane_avx2(t, p, 0), by_token);
        const __m256i b = _mm256_permutevar8x32_epi32(tkvi_tile_plane_avx2(t, p, 1), by_token);
        tkvi_slab_rows_avx2(_mm256_unpacklo_epi64(a, b), t->levels, upper, row, stride);
        tkvi_slab_rows_avx2(_mm256_unpackhi_epi64(a, b), t->levels, upper, row + stride, stride);
    }
}

/* Bytes of vectors at distance h are interleaved: 16 x 16 bytes are turned when that was done with 8, 4, 2, 1. */
TKVI_FLAT_AVX2 void tkvi_weaving_avx2(__m256i *x, const int h) {
    int i;
    TKVI_UNROLL
    for (i = 0; i < 8; i++) {
        __m256i *a = x + i / h * h + i, low = _mm256_unpacklo_epi8(a[0], a[h]);
        a[h] = _mm256_unpackhi_epi8(a[0], a[h]);
        a[0] = low;
    }
}

static TKVI_TARGET_AVX2 void tkvi_stand_rows_avx2(tkvi_rows *r) {
    const int pad = r->s->pad;
    int c, k, i;
    for (c = 0; c < pad; c += 16)
        for (k = 0; k < 4; k += 2) {
            const uint8_t *from = r->column + c * TKVI_BLOCK + 16 * k;
            uint8_t *to = r->level + 4 * k * pad + c;
            __m256i x[16];
            TKVI_UNROLL
            for (i = 0; i < 16; i++)
                x[i] = _mm256_loadu_si256((const __m256i *)(const void *)(from + TKVI_BLOCK * i));
            tkvi_weaving_avx2(x, 8);
            tkvi_weaving_avx2(x, 4);
            tkvi_weaving_avx2(x, 2);
            tkvi_weaving_avx2(x, 1);
            TKVI_UNROLL
            for (i = 0; i < 16; i++) {
                uint8_t *row = to + (i / 4 * 16 + i % 4) * pad;
                _mm_storeu_si128((__m128i *)(void *)row, _mm256_castsi256_si128(x[i]));
                _mm_storeu_si128((__m128i *)(void *)(row + 4 * pad), _mm256_extracti128_si256(x[i], 1));
            }
        }
}

/* The first n (any number) of 8 lanes. */
TKVI_FLAT_AVX2 __m256i tkvi_lanes_avx2(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

TKVI_FLAT_AVX2 void tkvi_save_some_avx2(float *to, __m256 x, int n) {
    if (n >= 8) _mm256_storeu_ps(to, x);
    else _mm256_maskstore_ps(to, tkvi_lanes_avx2(n), x);
}

TKVI_FLAT_AVX2 void tkvi_row_avx2(const tkvi_rows *r, int t, const int k, const int with_sign, int n,
                                  float *to) {
    const tkvi_side *s = r->s;
    const uint8_t *level = r->level + t * s->pad;
    const float *scale = k ? r->scale + t * s->groups / TKVI_BLOCK * s->pad : r->scale + t;
    const float *zero = r->zero + (scale - r->scale);
    int c, end;
    for (c = 0; c < s->dim; scale += TKVI_BLOCK, zero += TKVI_BLOCK) {
        const __m256 by = _mm256_set1_ps(*scale), plus = _mm256_set1_ps(*zero);
        for (end = k ? s->dim : tkvi_min(s->dim, c + s->group); c < end; c += 8) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(level + c));
            const __m256 x =
                _mm256_cvtepi32_ps(with_sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
            tkvi_save_some_avx2(to + c,
                                k ? _mm256_fmadd_ps(x, _mm256_loadu_ps(scale + c), _mm256_loadu_ps(zero + c))
                                  : _mm256_fmadd_ps(x, by, plus),
                                n - c);
        }
    }
}

#define TKVI_ROW_(name, k, with_sign)                                                                        \
    static TKVI_TARGET_AVX2 void tkvi_row_##name##_avx2(const tkvi_rows *r, int t, int n, float *to) {       \
        tkvi_row_avx2(r, t, k, with_sign, n, to);                                                            \
    }
TKVI_ROW_(k, 1, 0)
TKVI_ROW_(k_signed, 1, 1)
TKVI_ROW_(v, 0, 0)
TKVI_ROW_(v_signed, 0, 1)
#undef TKVI_ROW_

static TKVI_TARGET_AVX2 void tkvi_unrotate_avx2(float *y, const float *signs, int dim, float *to) {
    const int log2n = tkvi_log2_floor(dim), n = 1 << log2n;
    int c;
    if (n < dim) (void)tkvi_window_avx2(y + dim - n, NULL, y + dim - n, log2n);
    (void)tkvi_window_avx2(y, NULL, y, log2n);
    for (c = 0; c < dim; c += 8)
        tkvi_save_some_avx2(to + c, _mm256_xor_ps(_mm256_load_ps(y + c), _mm256_load_ps(signs + c)), dim - c);
}

static const tkvi_row_steps tkvi_row_steps_avx2 = {
    tkvi_four_columns_avx2,
    tkvi_slab_avx2,
    tkvi_stand_rows_avx2,
    {{tkvi_row_k_avx2, tkvi_row_k_signed_avx2}, {tkvi_row_v_avx2, tkvi_row_v_signed_avx2}},
    tkvi_unrotate_avx2};

static void tkvi_tile_values_avx2(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src, int first,
                                  int n, float *x, size_t stride) {
    if (s->dim < 16) tkvi_tiles_scalar(s, help, src, first, n, x, stride);
    else tkvi_tile_rows(&tkvi_row_steps_avx2, s, help, src, first, n, x, stride);
}

/* >>AVX-512 */
#ifdef TKVI_AVX512
/* g++ 12 finds uninitialised variables in its own header (gcc bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

TKVI_FLAT_AVX512 __m512i tkvi_part_avx512(const uint8_t *p, int right, int bits) {
    const __m512i x = _mm512_loadu_si512((const void *)p);
    return _mm512_and_si512(_mm512_srl_epi16(x, _mm_cvtsi32_si128(right)),
                            _mm512_set1_epi8((char)((1 << bits) - 1)));
}

/* Plane p of a tile, in order of r: 16 times four neighbours with one r. */
TKVI_FLAT_AVX512 __m512i tkvi_tile_plane_avx512(const tkvi_tile_parts *t, int p) {
    const __m512i sorted = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    const int at = p * t->low_bits;
    __m512i x = _mm512_setzero_si512();
    if (t->low_bits) x = tkvi_part_avx512(t->low + at / 8 * 64, at % 8, t->low_bits);
    if (t->high_bits) {
        const __m512i high = tkvi_part_avx512(t->high, t->high_at + p * t->high_bits, t->high_bits);
        x = _mm512_or_si512(x, _mm512_sll_epi16(high, _mm_cvtsi32_si128(t->low_bits)));
    }
    return _mm512_shuffle_epi8(x, sorted);
}

TKVI_FLAT_AVX512 __m512i tkvi_table_avx512(const int8_t *levels, __m512i code) {
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)levels);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), code);
}

static TKVI_TARGET_AVX512 void tkvi_four_columns_avx512(const tkvi_tile_parts *t, uint8_t *const *column) {
    __m512i x[4], a, b, c, d;
    int p;
    TKVI_UNROLL
    for (p = 0; p < 4; p++) {
        x[p] = tkvi_tile_plane_avx512(t, p);
        if (t->levels) x[p] = tkvi_table_avx512(t->levels, x[p]);
    }
    a = _mm512_unpacklo_epi32(x[0], x[1]);
    b = _mm512_unpacklo_epi32(x[2], x[3]);
    c = _mm512_unpackhi_epi32(x[0], x[1]);
    d = _mm512_unpackhi_epi32(x[2], x[3]);
    _mm512_storeu_si512((void *)column[0], _mm512_unpacklo_epi64(a, b));
    _mm512_storeu_si512((void *)column[1], _mm512_unpackhi_epi64(a, b));
    _mm512_storeu_si512((void *)column[2], _mm512_unpacklo_epi64(c, d));
    _mm512_storeu_si512((void *)column[3], _mm512_unpackhi_epi64(c, d));
}

/* The four quarters of a vector, `stride` bytes apart. */
TKVI_FLAT_AVX512 void tkvi_save_quarters_avx512(uint8_t *to, int stride, __m512i x) {
    _mm_storeu_si128((__m128i *)(void *)to, _mm512_castsi512_si128(x));
    _mm_storeu_si128((__m128i *)(void *)(to + stride), _mm512_extracti32x4_epi32(x, 1));
    _mm_storeu_si128((__m128i *)(void *)(to + 2 * stride), _mm512_extracti32x4_epi32(x, 2));
    _mm_storeu_si128((__m128i *)(void *)(to + 3 * stride), _mm512_extracti32x4_epi32(x, 3));
}

static TKVI_TARGET_AVX512 void tkvi_slab_avx512(const tkvi_tile_parts *t, const int8_t *upper, uint8_t *row,
                                                int stride) {
    const __m512i by_token = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int p;
    for (p = 0; p < 4; p++, row += 4 * stride) {
        const __m512i x = _mm512_permutexvar_epi32(by_token, tkvi_tile_plane_avx512(t, p));
        tkvi_save_quarters_avx512(row, stride, t->levels ? tkvi_table_avx512(t->levels, x) : x);
        if (upper) tkvi_save_quarters_avx512(row + 16, stride, tkvi_table_avx512(upper, x));
    }
}

TKVI_FLAT_AVX512 void tkvi_weaving_avx512(__m512i *x, const int h) {
    int i;
    TKVI_UNROLL
    for (i = 0; i < 8; i++) {
        __m512i *a = x + i / h * h + i, low = _mm512_unpacklo_epi8(a[0], a[h]);
        a[h] = _mm512_unpackhi_epi8(a[0], a[h]);
        a[0] = low;
    }
}

static TKVI_TARGET_AVX512 void tkvi_stand_rows_avx512(tkvi_rows *r) {
    const int pad = r->s->pad;
    int c, i;
    for (c = 0; c < pad; c += 16) {
        const uint8_t *from = r->column + c * TKVI_BLOCK;
        __m512i x[16];
        TKVI_UNROLL
        for (i = 0; i < 16; i++) x[i] = _mm512_load_si512((const void *)(from + TKVI_BLOCK * i));
        tkvi_weaving_avx512(x, 8);
        tkvi_weaving_avx512(x, 4);
        tkvi_weaving_avx512(x, 2);
        tkvi_weaving_avx512(x, 1);
        TKVI_UNROLL
        for (i = 0; i < 16; i++)
            tkvi_save_quarters_avx512(r->level + (i / 4 * 16 + i % 4) * pad + c, 4 * pad, x[i]);
    }
}

TKVI_FLAT_AVX512 void tkvi_save_some_avx512(float *to, __m512 x, int n) {
    if (n >= 16) _mm512_storeu_ps(to, x);
    else _mm512_mask_storeu_ps(to, (__mmask16)((1 << n) - 1), x);
}

TKVI_FLAT_AVX512 void tkvi_row_avx512(const tkvi_rows *r, int t, const int k, const int with_sign, int n,
                                      float *to) {
    const tkvi_side *s = r->s;
    const uint8_t *level = r->level + t * s->pad;
    const float *scale = k ? r->scale + t * s->groups / TKVI_BLOCK * s->pad : r->scale + t;
    const float *zero = r->zero + (scale - r->scale);
    int c, end;
    for (c = 0; c < s->dim; scale += TKVI_BLOCK, zero += TKVI_BLOCK) {
        const __m512 by = _mm512_set1_ps(*scale), plus = _mm512_set1_ps(*zero);
        for (end = k ? s->dim : tkvi_min(s->dim, c + s->group); c < end; c += 16) {
            const __m128i bytes = _mm_load_si128((const __m128i *)(const void *)(level + c));
            const __m512 x =
                _mm512_cvtepi32_ps(with_sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
            tkvi_save_some_avx512(
                to + c,
                k ? _mm512_fmadd_ps(x, _mm512_loadu_ps(scale + c), _mm512_loadu_ps(zero + c))
                  : _mm512_fmadd_ps(x, by, plus),
                n - c);
        }
    }
}

#define TKVI_ROW_(name, k, with_sign)                                                                        \
    static TKVI_TARGET_AVX512 void tkvi_row_##name##_avx512(const tkvi_rows *r, int t, int n, float *to) {   \
        tkvi_row_avx512(r, t, k, with_sign, n, to);                                                          \
    }
TKVI_ROW_(k, 1, 0)
TKVI_ROW_(k_signed, 1, 1)
TKVI_ROW_(v, 0, 0)
TKVI_ROW_(v_signed, 0, 1)
#undef TKVI_ROW_

static TKVI_TARGET_AVX512 void tkvi_unrotate_avx512(float *y, const float *signs, int dim, float *to) {
    const int log2n = tkvi_log2_floor(dim), n = 1 << log2n;
    int c;
    if (n < dim) (void)tkvi_window_avx512(y + dim - n, NULL, y + dim - n, log2n);
    (void)tkvi_window_avx512(y, NULL, y, log2n);
    for (c = 0; c < dim; c += 16)
        tkvi_save_some_avx512(to + c, _mm512_xor_ps(_mm512_load_ps(y + c), _mm512_load_ps(signs + c)),
                              dim - c);
}

static const tkvi_row_steps tkvi_row_steps_avx512 = {
    tkvi_four_columns_avx512,
    tkvi_slab_avx512,
    tkvi_stand_rows_avx512,
    {{tkvi_row_k_avx512, tkvi_row_k_signed_avx512}, {tkvi_row_v_avx512, tkvi_row_v_signed_avx512}},
    tkvi_unrotate_avx512};

static void tkvi_tile_values_avx512(const tkvi_side *s, const tkvi_helpers *help, const uint8_t *src,
                                    int first, int n, float *x, size_t stride) {
    if (s->dim < 16) tkvi_tiles_scalar(s, help, src, first, n, x, stride);
    else tkvi_tile_rows(&tkvi_row_steps_avx512, s, help, src, first, n, x, stride);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif /* TKVI_AVX512 */

#endif /* TKVI_X86 */

#endif /* TKVI_VALUES_X86_H */
/* ======== groups_x86.h ======== */
/*
 * groups_x86.h - the groups of KIVI (format_kivi.h) by AVX2: codes, scales and zeros with the scalar code's bytes. K: a
 * lane is a channel. V: four tokens together, whose codes share 32 bits of a tile. Calls values_x86.h.
 */
#ifndef TKVI_GROUPS_X86_H
#define TKVI_GROUPS_X86_H


#ifdef TKVI_X86

/* -ffast-math divides vectors by a reciprocal, floats not: these bytes would not be those of tkv_encode. */
#if defined(__FAST_MATH__) || defined(_M_FP_FAST)
#define TKVI_OTHER_GROUPS 1
#else
#define TKVI_OTHER_GROUPS 0
#endif

/* Cut to what halves hold. */
TKVI_FLAT_AVX2 __m256 tkvi_group_cut_avx2(__m256 x) {
    const __m256 most = _mm256_set1_ps(TKVI_F16_MAX), least = _mm256_set1_ps(-TKVI_F16_MAX);
    return _mm256_max_ps(_mm256_min_ps(x, most), least);
}

/* Eight values from p, the lanes there are. */
TKVI_FLAT_AVX2 __m256 tkvi_group_values_avx2(const float *p, __m256i lanes) {
    return tkvi_group_cut_avx2(_mm256_maskload_ps(p, lanes));
}

/* Codes as integers; 0 where the scale is. */
TKVI_FLAT_AVX2 __m256i tkvi_group_codes_avx2(__m256 x, __m256 scale, __m256 zero, float top) {
    const __m256 none = _mm256_setzero_ps();
    __m256 y = _mm256_div_ps(_mm256_sub_ps(x, zero), scale);
    y = _mm256_and_ps(y, _mm256_cmp_ps(scale, none, _CMP_GT_OQ));
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(y, none), _mm256_set1_ps(top)));
}

/* Group g of eight columns of K, n tokens of the block being there. */
TKVI_FLAT_AVX2 void tkvi_group_k_avx2(const tkvi_side *s, const float *x, size_t stride, int n, int g, int c,
                                      tkvi_codes code, uint8_t *meta) {
    const __m256i lanes = tkvi_lanes_avx2(s->dim - c);
    const float top = (float)((1 << s->format->bits) - 1);
    const int from = g * s->group, end = tkvi_min(n, from + s->group);
    uint8_t *at = meta + 2 * (g * s->pad + c);
    __m256 lo, hi, scale, zero;
    __m128i half;
    int t, k;
    x += c;
    lo = hi = tkvi_group_values_avx2(x + (size_t)from * stride, lanes);
    for (t = from + 1; t < end; t++) {
        const __m256 v = tkvi_group_values_avx2(x + (size_t)t * stride, lanes);
        lo = _mm256_min_ps(v, lo);
        hi = _mm256_max_ps(v, hi);
    }
    half = _mm256_cvtps_ph(_mm256_div_ps(_mm256_sub_ps(hi, lo), _mm256_set1_ps(top)), 0);
    scale = _mm256_cvtph_ps(half);
    _mm_storeu_si128((__m128i *)(void *)at, half);
    half = _mm256_cvtps_ph(_mm256_add_ps(lo, _mm256_setzero_ps()), 0);
    zero = _mm256_cvtph_ps(half);
    _mm_storeu_si128((__m128i *)(void *)(at + 2 * s->groups * s->pad), half);
    for (t = from; t < end; t += 4) {
        __m256i v[4];
        TKVI_UNROLL
        for (k = 0; k < 4; k++) {
            v[k] = _mm256_setzero_si256();
            if (t + k < end)
                v[k] = tkvi_group_codes_avx2(tkvi_group_values_avx2(x + (size_t)(t + k) * stride, lanes),
                                             scale, zero, top);
        }
        v[0] = _mm256_packus_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        _mm_storeu_si128((__m128i *)(void *)(code[c / 4] + 4 * t), _mm256_castsi256_si128(v[0]));
        _mm_storeu_si128((__m128i *)(void *)(code[c / 4 + 1] + 4 * t), _mm256_extracti128_si256(v[0], 1));
    }
}

/* Half the lanes of four vectors against the other half, then the four lanes of each against each other. */
#define TKVI_ACROSS_FOUR_(op, x, out)                                                                        \
    do {                                                                                                     \
        __m128 a_ = op(_mm256_castps256_ps128((x)[0]), _mm256_extractf128_ps((x)[0], 1));                    \
        __m128 b_ = op(_mm256_castps256_ps128((x)[1]), _mm256_extractf128_ps((x)[1], 1));                    \
        __m128 c_ = op(_mm256_castps256_ps128((x)[2]), _mm256_extractf128_ps((x)[2], 1));                    \
        __m128 d_ = op(_mm256_castps256_ps128((x)[3]), _mm256_extractf128_ps((x)[3], 1));                    \
        _MM_TRANSPOSE4_PS(a_, b_, c_, d_);                                                                   \
        out = op(op(a_, b_), op(c_, d_));                                                                    \
    } while (0)

/* Group g of tokens t .. t + 3; `row`: of each, that of a neighbour if it is not there. */
TKVI_FLAT_AVX2 void tkvi_group_v_avx2(const tkvi_side *s, const float *const *row, int there, int g, int t,
                                      tkvi_codes code, uint8_t *meta) {
    const float top = (float)((1 << s->format->bits) - 1);
    const int from = g * s->group, end = tkvi_min(s->dim, from + s->group);
    const __m128i some = _mm_cmpgt_epi32(_mm_set1_epi32(there), _mm_setr_epi32(0, 1, 2, 3));
    uint8_t *at = meta + 2 * (g * TKVI_BLOCK + t);
    TKVI_ALIGNED float scales[4], zeros[4];
    __m256 lo[4], hi[4];
    __m128 least, most;
    __m128i half;
    int c, k;
    TKVI_UNROLL
    for (k = 0; k < 4; k++) lo[k] = hi[k] = tkvi_group_cut_avx2(_mm256_broadcast_ss(row[k] + from));
    for (c = from; c < end; c += 8) {
        const __m256i lanes = tkvi_lanes_avx2(end - c);
        TKVI_UNROLL
        for (k = 0; k < 4; k++) {
            const __m256 v = tkvi_group_values_avx2(row[k] + c, lanes), mask = _mm256_castsi256_ps(lanes);
            lo[k] = _mm256_blendv_ps(lo[k], _mm256_min_ps(v, lo[k]), mask);
            hi[k] = _mm256_blendv_ps(hi[k], _mm256_max_ps(v, hi[k]), mask);
        }
    }
    TKVI_ACROSS_FOUR_(_mm_min_ps, lo, least);
    TKVI_ACROSS_FOUR_(_mm_max_ps, hi, most);
    half = _mm_cvtps_ph(
        _mm_and_ps(_mm_div_ps(_mm_sub_ps(most, least), _mm_set1_ps(top)), _mm_castsi128_ps(some)), 0);
    _mm_store_ps(scales, _mm_cvtph_ps(half));
    _mm_storel_epi64((__m128i *)(void *)at, half);
    half = _mm_cvtps_ph(_mm_and_ps(_mm_add_ps(least, _mm_setzero_ps()), _mm_castsi128_ps(some)), 0);
    _mm_store_ps(zeros, _mm_cvtph_ps(half));
    _mm_storel_epi64((__m128i *)(void *)(at + 2 * s->groups * TKVI_BLOCK), half);
    for (c = from; c < end; c += 8) {
        const __m256i lanes = tkvi_lanes_avx2(end - c);
        __m256i v[4];
        TKVI_UNROLL
        for (k = 0; k < 4; k++)
            v[k] = tkvi_group_codes_avx2(tkvi_group_values_avx2(row[k] + c, lanes), _mm256_set1_ps(scales[k]),
                                         _mm256_set1_ps(zeros[k]), top);
        v[0] = _mm256_or_si256(v[0], _mm256_slli_epi32(v[1], 8));
        v[2] = _mm256_or_si256(v[2], _mm256_slli_epi32(v[3], 8));
        v[0] = _mm256_and_si256(_mm256_or_si256(v[0], _mm256_slli_epi32(v[2], 16)), lanes);
        _mm256_storeu_si256((__m256i *)(void *)(code[c / 16 * 4 + t / 16] + t % 16 / 4 * 64 + c % 16 * 4),
                            v[0]);
    }
}

static TKVI_TARGET_AVX2 void tkvi_groups_avx2(const tkvi_side *s, const float *x, size_t stride, int n,
                                              tkvi_codes code, uint8_t *meta) {
    int g, c, t, k;
    if (s->fit || s->order || TKVI_OTHER_GROUPS) {
        tkvi_groups_scalar(s, x, stride, n, code, meta);
        return;
    }
    for (c = 0; c < s->dim && s->which == TKV_K; c += 8)
        for (g = 0; g * s->group < n && g < s->groups; g++)
            tkvi_group_k_avx2(s, x, stride, n, g, c, code, meta);
    for (t = 0; t < n && s->which == TKV_V; t += 4) {
        const float *row[4];
        for (k = 0; k < 4; k++) row[k] = x + (size_t)tkvi_min(t + k, n - 1) * stride;
        for (g = 0; g < s->groups; g++) tkvi_group_v_avx2(s, row, n - t, g, t, code, meta);
    }
}

#undef TKVI_ACROSS_FOUR_
#undef TKVI_OTHER_GROUPS

#endif /* TKVI_X86 */

#endif /* TKVI_GROUPS_X86_H */
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

static TKVI_TARGET_AVX2 void tkvi_to_halves_avx2(const float *x, int n, uint8_t *dst) {
    const __m256 most = _mm256_set1_ps(TKVI_F16_MAX), least = _mm256_set1_ps(-TKVI_F16_MAX);
    int i;
    for (i = 0; i + 8 <= n; i += 8) {
        const __m256 y = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(x + i), most), least);
        _mm_storeu_si128((__m128i *)(void *)(dst + 2 * i), _mm256_cvtps_ph(y, 0)); /* half to even */
    }
    tkvi_to_halves_scalar(x + i, n - i, dst + 2 * i);
}

/* n is a multiple of 4 here: four lanes. */
TKVI_FLAT_AVX2 __m128i tkvi_4bytes_avx2(const uint8_t *src) {
    int32_t x;
    memcpy(&x, src, 4);
    return _mm_cvtsi32_si128(x);
}

/* Eight of tkvi_log_value. */
TKVI_FLAT_AVX2 __m256 tkvi_8logs_avx2(__m128i bytes, int top) {
    const __m256i base = _mm256_set1_epi32(1024), one = _mm256_set1_epi32(1);
    const uint8_t *mantissa = (const uint8_t *)tkvi_log_mantissa;
    __m256i code = _mm256_cvtepu8_epi32(bytes), x = _mm256_sub_epi32(code, one);
    __m256i bits = _mm256_add_epi32(_mm256_srai_epi32(x, 4), _mm256_set1_epi32(127 + top - 16));
    /* a table of 16: two of eight, and bit 3 chooses */
    __m256i low = _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(tkvi_bytes16_avx2(mantissa)), x);
    __m256i high = _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(tkvi_bytes16_avx2(mantissa + 16)), x);
    x = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high),
                                             _mm256_castsi256_ps(_mm256_slli_epi32(x, 28))));
    bits = _mm256_or_si256(_mm256_slli_epi32(bits, 23), _mm256_slli_epi32(_mm256_sub_epi32(x, base), 13));
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()), bits));
}

static TKVI_TARGET_AVX2 void tkvi_logs_avx2(const uint8_t *src, int n, int top, float *dst) {
    int i;
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i,
                         tkvi_8logs_avx2(_mm_loadl_epi64((const __m128i *)(const void *)(src + i)), top));
    if (i + 4 <= n) {
        _mm_storeu_ps(dst + i, _mm256_castps256_ps128(tkvi_8logs_avx2(tkvi_4bytes_avx2(src + i), top)));
        i += 4;
    }
    tkvi_logs_scalar(src + i, n - i, top, dst + i);
}

static TKVI_TARGET_AVX2 void tkvi_zeros_avx2(const uint8_t *offset, const float *scale, const float *mean,
                                             float unit, int middle, int n, float *dst) {
    int i;
    for (i = 0; i + 4 <= n; i += 4) {
        __m128i by = _mm_sub_epi32(_mm_cvtepi8_epi32(tkvi_4bytes_avx2(offset + i)), _mm_set1_epi32(middle));
        __m128 x = _mm_mul_ps(_mm_loadu_ps(scale + i), _mm_set1_ps(unit));
        _mm_storeu_ps(dst + i, _mm_fmadd_ps(x, _mm_cvtepi32_ps(by), _mm_loadu_ps(mean + i)));
    }
    tkvi_zeros_scalar(offset + i, scale + i, mean + i, unit, middle, n - i, dst + i);
}

static TKVI_TARGET_AVX2 void tkvi_log_codes_avx2(const float *x, int n, int top, uint8_t *dst) {
    int i, k;
    for (i = 0; i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        __m256i bits = _mm256_castps_si256(v), mantissa = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
        __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127 + top - 16));
        __m128i low;
        code = _mm256_add_epi32(_mm256_slli_epi32(code, 4), _mm256_set1_epi32(1));
        for (k = 0; k < 16; k++) /* a step for each border that is not above */
            code = _mm256_sub_epi32(
                code, _mm256_cmpgt_epi32(mantissa, _mm256_set1_epi32((int32_t)tkvi_log_border[k] - 1)));
        code = _mm256_min_epi32(_mm256_max_epi32(code, _mm256_set1_epi32(1)), _mm256_set1_epi32(255));
        code = _mm256_and_si256(code, _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_GT_OQ)));
        low = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
        _mm_storel_epi64((__m128i *)(void *)(dst + i), _mm_packus_epi16(low, low));
    }
    tkvi_log_codes_scalar(x + i, n - i, top, dst + i);
}

/* >>encoding: the same integers as the scalar code, and floats in the same order: the same bytes. AVX-512 has
 * longer vectors for the two steps that take the time, columns and tokens, and shares the others. */
TKVI_FLAT_AVX2 void tkvi_save_avx2(uint8_t *p, __m256i x) { _mm256_storeu_si256((__m256i *)(void *)p, x); }

/* Codes of four planes, cut to `bits`, side by side in bytes. */
TKVI_FLAT_AVX2 __m256i tkvi_planes_avx2(const __m256i *code, const int shift, const int bits, const int n) {
    const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1));
    __m256i x = _mm256_and_si256(_mm256_srli_epi16(code[0], shift), mask);
    int p;
    TKVI_UNROLL
    for (p = 1; p < n; p++)
        x = _mm256_or_si256(
            x, _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(code[p], shift), mask), bits * p));
    return x;
}

static TKVI_TARGET_AVX2 void tkvi_pack_tile_avx2(uint8_t *codes, const tkvi_tile_at *at, int width,
                                                 const uint8_t *code) {
    uint8_t *wide = codes + at->wide, *half = codes + at->halves + at->half / 2 * 64;
    int j, p, upper = at->half % 2;
    for (j = 0; j < 64; j += 32, wide += 32, half += 32) { /* half of each plane */
        __m256i c[4], x;
        TKVI_UNROLL
        for (p = 0; p < 4; p++) c[p] = tkvi_bytes_avx2(code + 64 * p + j);
        if (width == 8) {
            TKVI_UNROLL
            for (p = 0; p < 4; p++) tkvi_save_avx2(wide + 64 * p, c[p]);
        } else if (width >= 4) {
            tkvi_save_avx2(wide, tkvi_planes_avx2(c, 0, 4, 2));
            tkvi_save_avx2(wide + 64, tkvi_planes_avx2(c + 2, 0, 4, 2));
            if (width == 6) tkvi_save_avx2(wide + 128, tkvi_planes_avx2(c, 4, 2, 4));
        } else if (width >= 2) {
            tkvi_save_avx2(wide, tkvi_planes_avx2(c, 0, 2, 4));
        }
        if (!tkvi_has_half[width]) continue;
        x = width == 5   ? tkvi_planes_avx2(c, 4, 1, 4)
            : width == 3 ? tkvi_planes_avx2(c, 2, 1, 4)
                         : tkvi_planes_avx2(c, 0, 1, 4);
        if (upper)
            x = _mm256_or_si256(_mm256_slli_epi16(x, 4), tkvi_bytes_avx2(half)); /* cleared, or the lower */
        tkvi_save_avx2(half, x);
    }
}

static TKVI_TARGET_AVX2 void tkvi_weave_avx2(uint8_t (*column)[TKVI_BLOCK], const uint8_t *channel,
                                             uint8_t *tile) {
    int j;
    for (j = 0; j < TKVI_BLOCK; j += 16) {
        __m128i a = tkvi_bytes16_avx2(column[channel[0]] + j), b = tkvi_bytes16_avx2(column[channel[1]] + j);
        __m128i c = tkvi_bytes16_avx2(column[channel[2]] + j), d = tkvi_bytes16_avx2(column[channel[3]] + j);
        __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d),
                *to = (__m128i *)(void *)(tile + 4 * j);
        _mm_storeu_si128(to, _mm_unpacklo_epi16(ab, cd));
        _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(ab, cd));
        ab = _mm_unpackhi_epi8(a, b);
        cd = _mm_unpackhi_epi8(c, d);
        _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(ab, cd));
        _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(ab, cd));
    }
}

/* Columns from rows: four[q][l] has four tokens of column l. 8 x 8 of them at a time. */
static TKVI_TARGET_AVX2 void tkvi_stand_avx2(uint8_t (*code)[TKVI_BLOCK], int32_t (*four)[TKVI_LANES]) {
    int part, i;
    for (part = 0; part < 4; part++) {
        int l = part % 2 * 8, q = part / 2 * 8;
        __m256i a[8], b[8];
        TKVI_UNROLL
        for (i = 0; i < 8; i++) a[i] = tkvi_ints_avx2(four[q + i] + l);
        TKVI_UNROLL
        for (i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
        }
        TKVI_UNROLL
        for (i = 0; i < 8; i += 4) { /* a[i + k]: columns k and k + 4, rows i .. i + 3 */
            a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        TKVI_UNROLL
        for (i = 0; i < 4; i++) {
            tkvi_save_avx2(code[l + i] + 4 * q, _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
            tkvi_save_avx2(code[l + i + 4] + 4 * q, _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
        }
    }
}

/* The covariance of fit.h, four at a time: integers below 2^53, exact as doubles. */
TKVI_FLAT_AVX2 __m128 tkvi_covariance_avx2(__m256d n, __m128i a, __m128i b, __m128i products) {
    __m256d x = _mm256_mul_pd(n, _mm256_cvtepi32_pd(products));
    return _mm256_cvtpd_ps(_mm256_sub_pd(x, _mm256_mul_pd(_mm256_cvtepi32_pd(a), _mm256_cvtepi32_pd(b))));
}

TKVI_FLAT_AVX2 __m128i tkvi_4ints_avx2(const int32_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

static TKVI_TARGET_AVX2 void tkvi_settle_avx2(tkvi_columns *c, int top) {
    const __m256d n = _mm256_set1_pd((double)c->n), n2 = _mm256_set1_pd((double)(2 * c->n));
    const __m128 none = _mm_setzero_ps();
    const __m128i one = _mm_set1_epi32(1), count = _mm_set1_epi32(c->n);
    TKVI_ALIGNED float scale[TKVI_LANES], unit[TKVI_LANES];
    int l;
    for (l = 0; l < TKVI_LANES; l++) unit[l] = (float)tkvi_a_unit[c->width[l]];
    c->far = 0;
    for (l = 0; l < TKVI_LANES; l += 4) {
        __m128i u = tkvi_4ints_avx2(c->sum_u + l), k = tkvi_4ints_avx2(c->sum_c + l);
        __m128i width = _mm_cvtepu8_epi32(tkvi_4bytes_avx2(c->width + l));
        __m128 var = tkvi_covariance_avx2(n, u, u, tkvi_4ints_avx2(c->sum_uu + l));
        __m128 var_c = tkvi_covariance_avx2(n, k, k, tkvi_4ints_avx2(c->sum_cc + l));
        __m128 cov = tkvi_covariance_avx2(n, k, u, tkvi_4ints_avx2(c->sum_cu + l));
        __m128 x = _mm_blendv_ps(_mm_div_ps(var, cov), _mm_sqrt_ps(_mm_div_ps(var, var_c)),
                                 _mm_castsi128_ps(_mm_cmpeq_epi32(width, one)));
        x = _mm_mul_ps(x, _mm_loadu_ps(c->step + l));
        x = _mm_and_ps(x, _mm_and_ps(_mm_cmpgt_ps(cov, none), _mm_cmpgt_ps(var, none)));
        _mm_storeu_ps(scale + l, x);
    }
    tkvi_log_codes_avx2(scale, TKVI_LANES, top, c->log);
    tkvi_logs_avx2(c->log, TKVI_LANES, top, scale);
    for (l = 0; l < TKVI_LANES; l += 4) {
        __m128i u = tkvi_4ints_avx2(c->sum_u + l), k = tkvi_4ints_avx2(c->sum_c + l);
        __m128i width = _mm_cvtepu8_epi32(tkvi_4bytes_avx2(c->width + l));
        __m128i tops = _mm_sub_epi32(_mm_sllv_epi32(one, width), one);
        __m128 by = _mm_loadu_ps(scale + l);
        __m128 mean_u = _mm_cvtepi32_ps(_mm_add_epi32(_mm_add_epi32(u, u), count));
        __m256d mean, v, some = _mm256_cmp_pd(_mm256_cvtps_pd(by), _mm256_setzero_pd(), _CMP_GT_OQ);
        int32_t four, far;
        mean_u = _mm_div_ps(mean_u, _mm_set1_ps((float)(2 * c->n)));
        mean = _mm256_mul_pd(_mm256_cvtps_pd(_mm_loadu_ps(c->step + l)), _mm256_cvtps_pd(mean_u));
        mean = _mm256_add_pd(mean, _mm256_cvtps_pd(_mm_loadu_ps(c->low + l)));
        _mm_storeu_ps(c->middle + l, _mm256_cvtpd_ps(mean));
        far =
            _mm256_movemask_pd(_mm256_andnot_pd(some, _mm256_cmp_pd(mean, _mm256_setzero_pd(), _CMP_NEQ_UQ)));
        k = _mm_sub_epi32(_mm_add_epi32(k, k), _mm_mullo_epi32(count, tops));
        v = _mm256_div_pd(_mm256_cvtepi32_pd(k), n2);
        v = _mm256_mul_pd(_mm256_sub_pd(_mm256_div_pd(mean, _mm256_cvtps_pd(by)), v),
                          _mm256_cvtps_pd(_mm_loadu_ps(unit + l)));
        v = _mm256_min_pd(_mm256_max_pd(v, _mm256_set1_pd(-128.0)), _mm256_set1_pd(128.0));
        v = _mm256_add_pd(_mm256_and_pd(v, some), _mm256_set1_pd(1000.5));
        k = _mm_sub_epi32(_mm256_cvttpd_epi32(v), _mm_set1_epi32(1000));
        far |= _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(_mm_abs_epi32(k), _mm_set1_epi32(127))));
        far &= _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(width, _mm_setzero_si128())));
        c->far |= (uint32_t)far << l;
        four = _mm_cvtsi128_si32(_mm_shuffle_epi8(k, _mm_set1_epi32(0x0c080400)));
        memcpy(c->offset + l, &four, 4);
    }
}

/* Columns: a lane of 32 bits each, two tokens in it; eight of the 16 at a time. */
typedef struct tkvi_range_avx2 {
    __m256i cut, by, top; /* in both halves of a lane */
} tkvi_range_avx2;

TKVI_FLAT_AVX2 __m256i tkvi_twice_avx2(__m256i x) { return _mm256_or_si256(x, _mm256_slli_epi32(x, 16)); }

TKVI_FLAT_AVX2 tkvi_range_avx2 tkvi_range_of_avx2(int k, __m256i width) {
    const tkvi_a_range *r = &tkvi_a_ranges[k];
    const __m256i one = _mm256_set1_epi32(1);
    tkvi_range_avx2 range;
    range.cut = tkvi_twice_avx2(_mm256_permutevar8x32_epi32(tkvi_ints_avx2(r->cut), width));
    range.by = tkvi_twice_avx2(_mm256_permutevar8x32_epi32(tkvi_ints_avx2(r->by), width));
    range.top = tkvi_twice_avx2(_mm256_sub_epi32(_mm256_sllv_epi32(one, width), one));
    return range;
}

TKVI_FLAT_AVX2 __m256i tkvi_cut_avx2(__m256i u, const tkvi_range_avx2 *r) { /* tkvi_cut_code */
    __m256i v = _mm256_mulhi_epu16(_mm256_subs_epu16(u, r->cut), r->by);
    return _mm256_min_epi16(_mm256_avg_epu16(v, _mm256_setzero_si256()), r->top);
}

TKVI_FLAT_AVX2 void tkvi_save_ints_avx2(int32_t *p, __m256i x) {
    _mm256_storeu_si256((__m256i *)(void *)p, x);
}

TKVI_FLAT_AVX2 __m256i tkvi_select_avx2(__m256i a, __m256i b, __m256 mask) { /* b where the mask is */
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), mask));
}

/* Range and integers of columns l .. l + 7; 0 if values would have to be cut to +-1e30. */
TKVI_FLAT_AVX2 int tkvi_integers_avx2(tkvi_columns *c, int l) {
    const __m256 lowest = _mm256_set1_ps(-1e30f), highest = _mm256_set1_ps(1e30f);
    const __m256 mean = _mm256_loadu_ps(c->mean + l);
    const __m256i lanes = tkvi_lanes_avx2(c->lanes - l);
    __m256 low = highest, high = lowest, step, inverse, some;
    __m256i sum = _mm256_setzero_si256(), squares = sum;
    TKVI_ALIGNED float residual[TKVI_BLOCK][8];
    int t;
    for (t = 0; t < c->n; t++) {
        __m256 x = _mm256_sub_ps(_mm256_maskload_ps(c->x + (size_t)t * c->stride + l, lanes), mean);
        _mm256_storeu_ps(residual[t], x);
        low = _mm256_min_ps(x, low);
        high = _mm256_max_ps(x, high);
    }
    some = _mm256_or_ps(_mm256_cmp_ps(low, lowest, _CMP_LT_OQ), _mm256_cmp_ps(high, highest, _CMP_GT_OQ));
    if (_mm256_movemask_ps(some)) return 0;
    for (; t < TKVI_BLOCK; t++) _mm256_storeu_ps(residual[t], low); /* u = 0 */
    step = _mm256_mul_ps(_mm256_sub_ps(high, low), _mm256_set1_ps(1.0f / TKVI_STEPS));
    some = _mm256_cmp_ps(step, _mm256_set1_ps(1e-36f), _CMP_GT_OQ);
    inverse = _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1.0f), step), some);
    _mm256_storeu_ps(c->low + l, low);
    _mm256_storeu_ps(c->step + l, _mm256_and_ps(step, some));
    for (t = 0; t < TKVI_BLOCK / 2; t++) {
        const float *x = residual[t / 2 * 4 + t % 2]; /* as tkvi_column_u says */
        __m256 a = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x), low), inverse);
        __m256 b = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + 16), low), inverse);
        __m256i u = _mm256_or_si256(_mm256_cvttps_epi32(a), _mm256_slli_epi32(_mm256_cvttps_epi32(b), 16));
        u = _mm256_min_epi16(u, _mm256_set1_epi16(TKVI_STEPS - 1));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(u, _mm256_set1_epi16(1)));
        squares = _mm256_add_epi32(squares, _mm256_madd_epi16(u, u));
        _mm256_storeu_si256((__m256i *)(void *)c->u[t][l], u);
    }
    tkvi_save_ints_avx2(c->sum_u + l, sum);
    tkvi_save_ints_avx2(c->sum_uu + l, squares);
    return 1;
}

TKVI_FLAT_AVX2 void tkvi_search_avx2(tkvi_columns *c, int l, int32_t (*four)[TKVI_LANES]) {
    const __m256i n = _mm256_set1_epi32(c->n), sum_u = tkvi_ints_avx2(c->sum_u + l);
    const __m256i width =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(c->width + l)));
    __m256i sum_c = _mm256_setzero_si256(), sum_cc = sum_c, sum_cu = sum_c;
    __m256 most = _mm256_set1_ps(-1.0f);
    tkvi_range_avx2 best = tkvi_range_of_avx2(0, width);
    int t, k;
    for (k = 0; k < TKVI_A_CUTS; k++) {
        const tkvi_range_avx2 range = tkvi_range_of_avx2(k, width);
        __m256i sum = _mm256_setzero_si256(), squares = sum, products = sum, a, b;
        __m256 cov, var, score, better;
        for (t = 0; t < TKVI_BLOCK / 2; t++) {
            __m256i u = _mm256_loadu_si256((const __m256i *)(const void *)c->u[t][l]);
            __m256i v = tkvi_cut_avx2(u, &range);
            sum = _mm256_add_epi16(sum, v);
            squares = _mm256_add_epi32(squares, _mm256_madd_epi16(v, v));
            products = _mm256_add_epi32(products, _mm256_madd_epi16(v, u));
        }
        sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        a = _mm256_sub_epi32(_mm256_mullo_epi32(n, products), _mm256_mullo_epi32(sum, sum_u));
        b = _mm256_sub_epi32(_mm256_mullo_epi32(n, squares), _mm256_mullo_epi32(sum, sum));
        cov = _mm256_cvtepi32_ps(a);
        var = _mm256_cvtepi32_ps(b);
        score = _mm256_mul_ps(_mm256_div_ps(cov, var), cov);
        score = _mm256_and_ps(score, _mm256_cmp_ps(var, _mm256_setzero_ps(), _CMP_GT_OQ));
        better = _mm256_cmp_ps(score, most, _CMP_GT_OQ);
        most = _mm256_blendv_ps(most, score, better);
        best.cut = tkvi_select_avx2(best.cut, range.cut, better);
        best.by = tkvi_select_avx2(best.by, range.by, better);
        sum_c = tkvi_select_avx2(sum_c, sum, better);
        sum_cc = tkvi_select_avx2(sum_cc, squares, better);
        sum_cu = tkvi_select_avx2(sum_cu, products, better);
    }
    tkvi_save_ints_avx2(c->sum_c + l, sum_c);
    tkvi_save_ints_avx2(c->sum_cc + l, sum_cc);
    tkvi_save_ints_avx2(c->sum_cu + l, sum_cu);
    for (t = 0; t < TKVI_BLOCK / 4; t++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)c->u[2 * t][l]);
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)c->u[2 * t + 1][l]);
        b = _mm256_slli_epi32(tkvi_cut_avx2(b, &best), 8);
        tkvi_save_ints_avx2(four[t] + l, _mm256_or_si256(tkvi_cut_avx2(a, &best), b));
    }
}

static TKVI_TARGET_AVX2 void tkvi_columns_avx2(tkvi_columns *c) {
    TKVI_ALIGNED int32_t four[TKVI_BLOCK / 4][TKVI_LANES];
    int l;
    for (l = 0; l < TKVI_LANES; l += 8) {
        if (!tkvi_integers_avx2(c, l)) {
            tkvi_columns_scalar(c);
            return;
        }
        tkvi_search_avx2(c, l, four);
    }
    tkvi_stand_avx2(c->code, four);
}

/* Tokens: a lane of 32 bits for a channel. */
/* A token rotated, and zeros to the next multiple of 32; returns its largest size. */
TKVI_FLAT_AVX2 float tkvi_turn_avx2(const tkvi_side *s, int log2n, const float *x, const float *flip,
                                    float *y) {
    const int n = 1 << log2n, end = tkvi_round_up(s->dim, 32);
    __m256 most;
    int c;
    for (c = n; c < end; c += 8) /* what is not in the first window */
        _mm256_storeu_ps(y + c,
                         tkvi_flip_avx2(_mm256_maskload_ps(x + c, tkvi_lanes_avx2(s->dim - c)), flip + c));
    most = tkvi_window_avx2(x, flip, y, log2n);
    if (n == s->dim) return tkvi_most_avx2(most);
    most = tkvi_window_avx2(y + s->dim - n, NULL, y + s->dim - n, log2n);
    for (c = 0; c < s->dim - n; c += 8) /* some of them twice */
        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(y + c)));
    return tkvi_most_avx2(most);
}

TKVI_FLAT_AVX2 int32_t tkvi_sum_ints_avx2(__m256i a) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

/* A token as integers, 8 channels and the 8 that are 16 further packed as _mm256_packs_epi32 does it. Returns
 * the sum of squares. */
TKVI_FLAT_AVX2 int32_t tkvi_whole_avx2(const float *y, float by, int end, int16_t *u) {
    const __m256 inverse = _mm256_set1_ps(by);
    const __m256i most = _mm256_set1_epi16(TKVI_R_MOST), least = _mm256_set1_epi16(-TKVI_R_MOST);
    __m256i squares = _mm256_setzero_si256();
    int c;
    for (c = 0; c < end; c += c % 32 ? 24 : 8, u += 16) {
        __m256i a = _mm256_cvttps_epi32(_mm256_mul_ps(_mm256_loadu_ps(y + c), inverse));
        __m256i b = _mm256_cvttps_epi32(_mm256_mul_ps(_mm256_loadu_ps(y + c + 16), inverse));
        a = _mm256_max_epi16(_mm256_min_epi16(_mm256_packs_epi32(a, b), most), least);
        squares = _mm256_add_epi32(squares, _mm256_madd_epi16(a, a));
        _mm256_storeu_si256((__m256i *)(void *)u, a);
    }
    return tkvi_sum_ints_avx2(squares);
}

TKVI_FLAT_AVX2 __m256i tkvi_floor_avx2(__m256i u, __m256 by) {
    return _mm256_cvttps_epi32(_mm256_floor_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(u), by)));
}

/* The two halves of what was packed. */
TKVI_FLAT_AVX2 __m256i tkvi_first_avx2(__m256i u) {
    return _mm256_srai_epi32(_mm256_unpacklo_epi16(u, u), 16);
}

TKVI_FLAT_AVX2 __m256i tkvi_second_avx2(__m256i u) {
    return _mm256_srai_epi32(_mm256_unpackhi_epi16(u, u), 16);
}

/* Two vectors of small integers as one of pairs. */
TKVI_FLAT_AVX2 __m256i tkvi_both_avx2(__m256i a, __m256i b) {
    return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
}

/* Codes of a uniform grid for 8 + 8 channels, packed like u; adds <u, level>. */
TKVI_FLAT_AVX2 __m256i tkvi_grid_avx2(const int16_t *u, float fine, int top, __m256i *sum) {
    const __m256i tops = _mm256_set1_epi16((short)top);
    const __m256 by = _mm256_set1_ps(fine);
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)u), v;
    v = _mm256_packs_epi32(tkvi_floor_avx2(tkvi_first_avx2(x), by), tkvi_floor_avx2(tkvi_second_avx2(x), by));
    v = _mm256_add_epi16(v, _mm256_set1_epi16((short)((top + 1) / 2)));
    v = _mm256_max_epi16(_mm256_min_epi16(v, tops), _mm256_setzero_si256());
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(x, _mm256_sub_epi16(_mm256_add_epi16(v, v), tops)));
    return v;
}

/* Codes of 8 pairs, 0 .. 7 in lanes; adds <u, level>. The best score and the first code that has it win in
 * one maximum: eight times the score, and 7 - code. */
TKVI_FLAT_AVX2 __m256i tkvi_pairs_avx2(const int16_t *u, float fine, __m256i *sum) {
    const __m256 by = _mm256_set1_ps(fine);
    const __m128i *point = (const __m128i *)(const void *)tkvi_r_pairs;
    const __m256i level = tkvi_both_avx2(_mm256_cvtepi8_epi32(_mm_loadu_si128(point)),
                                         _mm256_cvtepi8_epi32(_mm_loadu_si128(point + 1)));
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)u), a = tkvi_first_avx2(x);
    __m256i b = tkvi_second_avx2(x), best = _mm256_set1_epi32(INT32_MIN), code;
    int k;
    x = tkvi_both_avx2(tkvi_floor_avx2(a, by), tkvi_floor_avx2(b, by));
    TKVI_UNROLL
    for (k = 0; k < 8; k++) {
        const int px = tkvi_r_pairs[k], py = tkvi_r_pairs[16 + k];
        const __m256i p = _mm256_set1_epi32((8 * px & 0xffff) | (int32_t)((uint32_t)(8 * py) << 16));
        const __m256i from = _mm256_set1_epi32(-64 * (px * px + py * py) + 7 - k);
        best = _mm256_max_epi32(best, _mm256_add_epi32(from, _mm256_madd_epi16(x, p)));
    }
    code = _mm256_andnot_si256(best, _mm256_set1_epi32(7));
    x = _mm256_madd_epi16(tkvi_both_avx2(a, b), _mm256_permutevar8x32_epi32(level, code));
    *sum = _mm256_add_epi32(*sum, x);
    return code;
}

/* Codes of four tokens; sum: twice <u, level> of each. u: [token][TKV_MAX_HEAD_DIM]; fine: [2][16], that of
 * grids and that of pairs. */
TKVI_FLAT_AVX2 void tkvi_four_avx2(const tkvi_side *s, const int16_t *u, const float *fine, uint8_t *code,
                                   int32_t *sum) {
    const int pairs = s->pairs ? s->pad / 32 * 32 : 0, bits = s->pairs ? 2 : s->half_bits / 2;
    const int top = (1 << bits) - 1, second = 4 * TKVI_TILE_CODES;
    __m256i grid[4], pair[4], v[4];
    int c, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) grid[r] = pair[r] = _mm256_setzero_si256();
    for (c = 0; c < pairs; c += 16, code += c % 32 ? 32 : second - 32) { /* c: of u; half a slab of pairs */
        TKVI_UNROLL
        for (r = 0; r < 4; r++)
            v[r] = tkvi_pairs_avx2(u + r * TKV_MAX_HEAD_DIM + c, fine[TKVI_LANES + r], &pair[r]);
        v[0] = _mm256_or_si256(v[0], _mm256_slli_epi32(v[1], 8));
        v[2] = _mm256_or_si256(v[2], _mm256_slli_epi32(v[3], 8));
        tkvi_save_avx2(code, _mm256_or_si256(v[0], _mm256_slli_epi32(v[2], 16)));
    }
    for (; c < tkvi_round_up(s->dim, 32);
         c += 16, code += c % 32 ? 32 : 2 * second - 32) { /* halves of two */
        TKVI_UNROLL
        for (r = 0; r < 4; r++) v[r] = tkvi_grid_avx2(u + r * TKV_MAX_HEAD_DIM + c, fine[r], top, &grid[r]);
        v[0] = _mm256_or_si256(v[0], _mm256_slli_epi16(v[1], 8));
        v[2] = _mm256_or_si256(v[2], _mm256_slli_epi16(v[3], 8));
        tkvi_save_avx2(code, _mm256_unpacklo_epi16(v[0], v[2]));
        if (c / 32 * 32 + 16 < s->pad) tkvi_save_avx2(code + second, _mm256_unpackhi_epi16(v[0], v[2]));
    }
    TKVI_UNROLL
    for (r = 0; r < 4; r++) /* levels of the plain slab beside pairs: -120, -40, 40, 120, twice */
        sum[r] = 2 * tkvi_sum_ints_avx2(pair[r]) + (s->pairs ? 80 : 1) * tkvi_sum_ints_avx2(grid[r]);
}

/* 16 tokens at a time, a step for all of them before the next: what waits for a division or for the sum of a
 * vector is then one token of many. */
static TKVI_TARGET_AVX2 void tkvi_tokens_avx2(const tkvi_side *s, const float *x, size_t stride, int n,
                                              tkvi_codes code, float *scale) {
    TKVI_ALIGNED float y[TKVI_LANES][TKV_MAX_HEAD_DIM], most[TKVI_LANES], by[TKVI_LANES], fine[2][TKVI_LANES];
    TKVI_ALIGNED int16_t u[TKVI_LANES][TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t squares[TKVI_LANES], sum[TKVI_LANES];
    const __m256 whole = _mm256_set1_ps((float)TKVI_R_MOST), dim = _mm256_set1_ps((float)s->dim);
    const __m256 grid = _mm256_set1_ps(tkvi_r_step[s->pairs ? 2 : s->half_bits / 2]);
    const int log2n = tkvi_log2_floor(s->dim);
    TKVI_ALIGNED float flip[TKV_MAX_HEAD_DIM];
    int first, t;
    if (s->dim < 8) {
        tkvi_tokens_scalar(s, x, stride, n, code, scale);
        return;
    }
    tkvi_flips_avx2(flip, tkvi_round_up(s->dim, 32));
    for (first = 0; first < n; first += TKVI_LANES) {
        const int count = tkvi_min(TKVI_LANES, n - first), fours = tkvi_round_up(count, 4);
        memset(most, 0, sizeof most);
        memset(squares, 0, sizeof squares);
        memset(sum, 0, sizeof sum);
        for (t = 0; t < fours; t++) /* a token that is not there: its neighbour's codes, to be cleared */
            most[t] =
                tkvi_turn_avx2(s, log2n, x + (size_t)(first + tkvi_min(t, count - 1)) * stride, flip, y[t]);
        for (t = 0; t < TKVI_LANES; t += 8) {
            __m256 m = _mm256_min_ps(_mm256_loadu_ps(most + t), _mm256_set1_ps(1e30f));
            __m256 some = _mm256_cmp_ps(m, _mm256_set1_ps(1e-30f), _CMP_GT_OQ);
            _mm256_storeu_ps(by + t, _mm256_and_ps(_mm256_div_ps(whole, m), some));
            _mm256_storeu_ps(most + t, _mm256_and_ps(m, some));
        }
        for (t = 0; t < fours; t++)
            squares[t] = tkvi_whole_avx2(y[t], by[t], tkvi_round_up(s->dim, 32), u[t]);
        for (t = 0; t < TKVI_LANES; t += 8) {
            __m256i v = _mm256_max_epi32(tkvi_ints_avx2(squares + t), _mm256_set1_epi32(1));
            __m256 unit = _mm256_sqrt_ps(_mm256_div_ps(_mm256_cvtepi32_ps(v), dim));
            unit = _mm256_div_ps(_mm256_set1_ps(1.0f), unit);
            _mm256_storeu_ps(fine[0] + t, _mm256_div_ps(unit, grid));
            _mm256_storeu_ps(fine[1] + t, _mm256_mul_ps(unit, _mm256_set1_ps(16.0f * TKVI_R_UNIT)));
        }
        for (t = 0; t < fours; t += 4)
            tkvi_four_avx2(s, u[t], fine[0] + t, code[first / 16] + 16 * t, sum + t);
        for (t = 0; t < TKVI_LANES; t += 8) {
            __m256i v = tkvi_ints_avx2(squares + t);
            __m256 m = _mm256_loadu_ps(most + t), some = _mm256_cmp_ps(m, _mm256_setzero_ps(), _CMP_GT_OQ), w;
            w = _mm256_div_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(v, v)),
                              _mm256_cvtepi32_ps(tkvi_ints_avx2(sum + t)));
            w = _mm256_and_ps(_mm256_mul_ps(_mm256_div_ps(m, whole), w), some);
            _mm256_maskstore_ps(scale + first + t, tkvi_lanes_avx2(count - t), w);
        }
    }
}

static const tkvi_helpers tkvi_helpers_avx2 = {tkvi_halves_avx2, tkvi_to_halves_avx2, tkvi_logs_avx2,
                                               tkvi_zeros_avx2,  tkvi_log_codes_avx2, tkvi_pack_tile_avx2,
                                               tkvi_weave_avx2,  tkvi_columns_avx2,   tkvi_settle_avx2,
                                               tkvi_tokens_avx2, tkvi_groups_avx2,    tkvi_tile_values_avx2};

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

/* The first four rows, or all that are left. */
static TKVI_TARGET_AVX2 void tkvi_exact_rows_k_avx2(const tkvi_side *s, const uint8_t *src, uintptr_t ahead,
                                                    const float *q, const float *ref, int left, int n,
                                                    float *scores) {
    if (left == 1) tkvi_exact_k4_avx2(s, src, ahead, q, ref, left, n, 1, 4, scores);
    else if (left == 2) tkvi_exact_k4_avx2(s, src, ahead, q, ref, left, n, 2, 4, scores);
    else tkvi_exact_k4_avx2(s, src, ahead, q, ref, left, n, 4, 2, scores);
}

static TKVI_TARGET_AVX2 void tkvi_exact_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                               const float *q, const float *ref, int rows, int n, int planes,
                                               float *scores) {
    int r;
    (void)planes;
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (r = 0; r < rows; r += 4)
        tkvi_exact_rows_k_avx2(s, src, tkvi_ahead(src, next), q + r * s->pad, ref, rows - r, n,
                               scores + r * TKVI_BLOCK);
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

/* >>decoded: see decode_x86.h. 16 tokens at a time into a scratch: 16 registers do not hold it all. */
/* Levels of eight channels; see kernels_avx512.h. */
TKVI_FLAT_AVX2 __m256 tkvi_e5m2_avx2(__m256i code) {
    const __m256i size = _mm256_and_si256(code, _mm256_set1_epi32(127));
    const __m256i sign = _mm256_slli_epi32(_mm256_sub_epi32(code, size), 24);
    const __m256i large =
        _mm256_add_epi32(_mm256_slli_epi32(size, 21), _mm256_set1_epi32((126 + TKVI_E5M2_LOW + 2) << 23));
    const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(size),
                                       _mm256_castsi256_ps(_mm256_set1_epi32((127 + TKVI_E5M2_LOW) << 23)));
    const __m256i x =
        _mm256_blendv_epi8(large, _mm256_castps_si256(small), _mm256_cmpgt_epi32(_mm256_set1_epi32(4), size));
    return _mm256_castsi256_ps(_mm256_or_si256(x, sign));
}

TKVI_FLAT_AVX2 __m256 tkvi_e4m3_avx2(__m128i code) {
    __m128i x = _mm_srai_epi16(_mm_slli_epi16(_mm_cvtepu8_epi16(code), 8), 1);
    x = _mm_and_si128(x, _mm_set1_epi16((int16_t)0xbfff));
    return _mm256_mul_ps(_mm256_cvtph_ps(x), _mm256_set1_ps(4.0f));
}

/* p: where the 16 channels begin; eight of them, from the middle if `half`. Of neighbours every second one. */
TKVI_FLAT_AVX2 __m256 tkvi_level_avx2(const tkvi_reading *r, const tkvi_code_kind kind, const int neighbours,
                                      const uint8_t *p, const int half, __m256i shift) {
    __m256i x;
    __m256 low, high;
    if (kind != TKVI_CODES_TABLE) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(p + 8 * half));
        if (kind == TKVI_CODES_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        return kind == TKVI_CODES_E4M3 ? tkvi_e4m3_avx2(bytes) : tkvi_e5m2_avx2(_mm256_cvtepu8_epi32(bytes));
    }
    p += half * r->bits * (neighbours ? 2 : 1);
    x = _mm256_set1_epi32(tkvi_int_at(p));
    if (neighbours) x = _mm256_inserti128_si256(x, _mm_set1_epi32(tkvi_int_at(p + r->bits)), 1);
    x = _mm256_srlv_epi32(x, shift);
    low = _mm256_permutevar8x32_ps(_mm256_load_ps(r->level), x); /* looks at 3 bits */
    high = _mm256_permutevar8x32_ps(_mm256_load_ps(r->level + 8), x);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)));
}

static TKVI_TARGET_AVX2 void tkvi_parts_avx2(tkvi_reading *r) {
    TKVI_ALIGNED float scale[TKVI_BLOCK];
    int t, c;
    memcpy(scale, r->by, sizeof scale);
    for (t = 0; t < TKVI_BLOCK * r->per; t += 8) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(r->parts + t));
        _mm256_store_ps(r->by + t, tkvi_e4m3_avx2(bytes));
    }
    for (t = 0; t < TKVI_BLOCK; t++)
        for (c = 0; c < r->per; c++) r->by[t * r->per + c] *= scale[t];
}

/* Tokens from .. from + n - 1 to x, [token][16 * vectors]. */
TKVI_FLAT_AVX2 void tkvi_rows_of_avx2(const tkvi_reading *r, const tkvi_code_kind kind, const int by_channel,
                                      const int neighbours, int from, int n, float *x) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i step = _mm256_set1_epi32(r->bits * (neighbours ? 2 : 1));
    __m256i shift[2];
    int t, v, h;
    shift[0] = _mm256_mullo_epi32(neighbours ? _mm256_and_si256(lane, _mm256_set1_epi32(3)) : lane, step);
    shift[1] = neighbours ? _mm256_add_epi32(shift[0], _mm256_set1_epi32(r->bits)) : shift[0];
    for (t = from; t < from + n; t++) {
        const uint8_t *row = r->codes + (size_t)t * r->row;
        const float *by = r->by + t * r->per;
        const __m256 plus = _mm256_set1_ps(r->s->grid ? 0.0f : r->plus[t]);
        tkvi_reading_prefetch(r, t);
        for (v = 0; v < r->vectors; v++) {
            const int spread = neighbours && v < r->pairs; /* channels that do not turn stand as they are */
            TKVI_UNROLL
            for (h = 0; h < 2; h++, x += 8) {
                const int c = 16 * v + 8 * h;
                __m256 y;
                if (spread) y = tkvi_level_avx2(r, kind, 1, row + r->at[v], h, shift[v & 1]);
                else
                    y = tkvi_level_avx2(r, kind, 0, row + r->at[v], h,
                                        _mm256_mullo_epi32(lane, _mm256_set1_epi32(r->bits)));
                if (by_channel)
                    y = _mm256_fmadd_ps(y, _mm256_load_ps(r->by + c), _mm256_load_ps(r->plus + c));
                else y = _mm256_fmadd_ps(y, _mm256_set1_ps(by[c >> r->shift]), plus);
                _mm256_store_ps(x, y);
            }
        }
    }
}

static TKVI_TARGET_AVX2 void tkvi_rows_avx2(const tkvi_reading *r, int from, int n, float *x) {
    if (r->kind == TKVI_CODES_INT8) tkvi_rows_of_avx2(r, TKVI_CODES_INT8, 0, 0, from, n, x);
    else if (r->kind == TKVI_CODES_E4M3) tkvi_rows_of_avx2(r, TKVI_CODES_E4M3, 0, 0, from, n, x);
    else if (r->kind == TKVI_CODES_E5M2) tkvi_rows_of_avx2(r, TKVI_CODES_E5M2, 0, 0, from, n, x);
    else if (!r->by_channel) tkvi_rows_of_avx2(r, TKVI_CODES_TABLE, 0, 0, from, n, x);
    else if (r->rope && r->rope->step == 2) tkvi_rows_of_avx2(r, TKVI_CODES_TABLE, 1, 1, from, n, x);
    else tkvi_rows_of_avx2(r, TKVI_CODES_TABLE, 1, 0, from, n, x);
}

/* Turns a row in the order of the vectors, by minus the angle if `back`. */
static TKVI_TARGET_AVX2 void tkvi_turn_row_avx2(const tkvi_reading *r, const float *cosine, const float *sine,
                                                int back, float *x) {
    const __m256 sign =
        _mm256_castsi256_ps(_mm256_set1_epi32(back ? INT32_MIN : 0)); /* -ffast-math has no -0 */
    int v, h;
    for (v = 0; v < r->pairs; v += 2)
        for (h = 0; h < 2; h++) {
            float *at = x + 16 * v + 8 * h;
            const __m256 c = _mm256_loadu_ps(cosine + 8 * v + 8 * h), a = _mm256_load_ps(at);
            const __m256 s = _mm256_xor_ps(_mm256_loadu_ps(sine + 8 * v + 8 * h), sign);
            const __m256 b = _mm256_load_ps(at + 16);
            _mm256_store_ps(at, _mm256_fnmadd_ps(b, s, _mm256_mul_ps(a, c)));
            _mm256_store_ps(at + 16, _mm256_fmadd_ps(a, s, _mm256_mul_ps(b, c)));
        }
}

static TKVI_TARGET_AVX2 void tkvi_decoded_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                                 const float *q, const float *ref, int rows, int n,
                                                 int planes, float *scores) {
    TKVI_ALIGNED float turned[TKVI_ROWS * TKVI_READ_FLOATS], x[TKVI_AT_ONCE * TKVI_READ_FLOATS];
    TKVI_ALIGNED float first[2][TKV_MAX_HEAD_DIM / 2], none[TKVI_READ_FLOATS], less[TKVI_ROWS];
    float *where[TKVI_AT_ONCE * TKVI_KVQUANT_SLOTS];
    tkvi_reading rd;
    tkvi_side plain;
    int from, r, t;
    if (!tkvi_reading_begin(&rd, s, src, next, &tkvi_helpers_avx2)) {
        tkvi_decoded_k(s, src, next, q, ref, rows, n, planes, scores);
        return;
    }
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    memset(none, 0, sizeof none);
    if (rd.parts) tkvi_parts_avx2(&rd);
    tkvi_reading_queries(&rd, q, ref, rows, turned, less);
    tkvi_reading_scratch(&rd, &plain);
    if (rd.rope) tkvi_reading_angles(&rd, first[0], first[1]);
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        const int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_rows_avx2(&rd, from, count, x);
        if (rd.slots) (void)tkvi_outliers_k(&rd, from, count, x, where);
        for (r = 0; r < rows && rd.rope; r++)
            tkvi_turn_row_avx2(&rd, from ? rd.rope->cosine[TKVI_ROPE_NEAR] : first[0],
                               from ? rd.rope->sine[TKVI_ROPE_NEAR] : first[1], 1,
                               turned + 16 * r * rd.vectors);
        for (t = 1; t < count && rd.rope; t++)
            tkvi_turn_row_avx2(&rd, rd.rope->cosine[t], rd.rope->sine[t], 0, x + 16 * t * rd.vectors);
        for (r = 0; r < rows; r += 4)
            tkvi_exact_rows_k_avx2(&plain, (const uint8_t *)x, 0, turned + 16 * r * rd.vectors, none,
                                   rows - r, count, scores + r * TKVI_BLOCK + from);
    }
    for (r = 0; r < rows; r++)
        for (t = 0; t < TKVI_BLOCK; t++) scores[r * TKVI_BLOCK + t] -= less[r];
}

static TKVI_TARGET_AVX2 void tkvi_decoded_v_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                                                 const float *p, int rows, int n, int planes, float *out) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE * TKVI_READ_FLOATS], sum[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    tkvi_reading rd;
    tkvi_side plain;
    float *o = s->grid && s->rotate ? sum : out;
    int from, r, c;
    if (!tkvi_reading_begin(&rd, s, src, next, &tkvi_helpers_avx2)) {
        tkvi_decoded_v(s, src, next, p, rows, n, planes, out);
        return;
    }
    if (rd.parts) tkvi_parts_avx2(&rd);
    if (o == sum) memset(sum, 0, (size_t)(rows * s->pad) * sizeof(float));
    tkvi_reading_scratch(&rd, &plain);
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        const int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_rows_avx2(&rd, from, count, x);
        tkvi_exact_v_avx2(&plain, (const uint8_t *)x, NULL, p + from, rows, count, planes, o);
    }
    for (r = 0; r < rows && o == sum; r++) {
        tkvi_rotate_back(sum + r * s->pad, s->dim);
        for (c = 0; c < s->dim; c++) out[r * s->pad + c] += sum[r * s->pad + c];
    }
    if (rd.slots) tkvi_outliers_v(&rd, p, rows, n, out);
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

/* 16 weights of 16 bits in order. */
TKVI_FLAT_AVX2 __m256i tkvi_shorts_avx2(__m256 a, __m256 b) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)), 0xd8);
}

/* 16 weights of up to 8 bits as bytes. */
TKVI_FLAT_AVX2 void tkvi_save_weights_avx2(int8_t *w, __m256i k, const int is_signed) {
    const __m128i a = _mm256_castsi256_si128(k), b = _mm256_extracti128_si256(k, 1);
    _mm_storeu_si128((__m128i *)(void *)w, is_signed ? _mm_packs_epi16(a, b) : _mm_packus_epi16(a, b));
}

TKVI_FLAT_AVX2 __m128i tkvi_isum4_avx2(const __m256i *a) {
    const __m256i x = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

/* top / m, 0 where m is as good as 0. */
TKVI_FLAT_AVX2 __m128 tkvi_inverse_avx2(__m128 top, __m128 m) {
    return _mm_and_ps(_mm_div_ps(top, m), _mm_cmpgt_ps(m, _mm_set1_ps(1e-34f)));
}

/* What four rows of one plane say; middle: sum w centre2. */
TKVI_FLAT_AVX2 void tkvi_plane_avx2(tkvi_fold *f, int first, __m128 step, __m128 rest, __m128i middle) {
    const __m128 odd = _mm_cvtepi32_ps(_mm_and_si128(middle, _mm_set1_epi32(1)));
    const __m128i row = _mm_add_epi32(_mm_setr_epi32(0, 1, 2, 3), _mm_set1_epi32(first));
    _mm_storeu_ps(f->step + first, step);
    _mm_storeu_si128((__m128i *)(void *)(f->row + first), row);
    _mm_storeu_ps(f->rest + first, _mm_sub_ps(rest, _mm_mul_ps(_mm_mul_ps(odd, _mm_set1_ps(0.5f)), step)));
    _mm_storeu_si128((__m128i *)(void *)(f->base + first), _mm_srai_epi32(middle, 1));
}

/* Which of four rows want two planes, by their largest weights and sums of squares. */
TKVI_FLAT_AVX2 int tkvi_tower_avx2(const tkvi_folding *a, __m128 most, __m128 squares, int top) {
    return _mm_movemask_ps(_mm_cmpgt_ps(_mm_mul_ps(_mm_mul_ps(_mm_set1_ps(a->coarse), most), most),
                                        _mm_mul_ps(_mm_set1_ps(TKVI_MAY_ERR(top)), squares)));
}

/* Four rows go together so that their horizontal sums do. Rows that are not there repeat the last one. */
TKVI_FLAT_AVX2 int tkvi_fold_k4_avx2(const tkvi_folding *a, int first, int left, const int nr, tkvi_fold *f) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256i places = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const float *x[4];
    __m256 most[4], rest[4], squares[4];
    __m256i middle[4], middle_lo[4];
    __m128 m, step;
    float by[4];
    int i, r, tower, second = a->wide;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) {
        x[r] = a->x + (first + tkvi_min(r, left - 1)) * a->n;
        most[r] = rest[r] = squares[r] = _mm256_setzero_ps();
        middle[r] = middle_lo[r] = _mm256_setzero_si256();
    }
    for (i = 0; i < a->n; i += 8) {
        __m256 scale = _mm256_loadu_ps(a->scale + i);
        __m256i twice =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(a->centre2 + i)));
        __m256 centre = _mm256_mul_ps(_mm256_cvtepi32_ps(twice), _mm256_set1_ps(a->half));
        __m256 zero = _mm256_sub_ps(_mm256_loadu_ps(a->zero + i), _mm256_loadu_ps(a->ref + i));
        zero = _mm256_fmadd_ps(centre, scale, zero);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            __m256 v = _mm256_loadu_ps(x[r] + i), y = _mm256_mul_ps(v, scale);
            most[r] = _mm256_max_ps(most[r], _mm256_and_ps(y, no_sign));
            rest[r] = _mm256_fmadd_ps(v, zero, rest[r]);
            squares[r] = _mm256_fmadd_ps(y, y, squares[r]);
        }
    }
    m = tkvi_max4_avx2(most);
    tower = tkvi_tower_avx2(a, m, tkvi_sum4_avx2(squares), TKVI_PLANE);
    if (a->planes == 2) tower = 15;
    if (tower) second = a->n;
    _mm_storeu_ps(by, tkvi_inverse_avx2(_mm_set1_ps((float)TKVI_PLANE), m));
    step = _mm_div_ps(m, _mm_set1_ps((float)TKVI_PLANE));
    for (i = 0; i < a->n; i += 16) {
        __m256 scale0 = _mm256_loadu_ps(a->scale + i), scale1 = _mm256_loadu_ps(a->scale + i + 8);
        __m256i c = _mm256_cvtepu8_epi16(tkvi_bytes16_avx2(a->centre2 + i));
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            const int at = (first + r) * TKV_MAX_HEAD_DIM + i;
            const __m256 inverse = _mm256_set1_ps(by[r]), fine = _mm256_set1_ps(128.0f);
            __m256 u = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x[r] + i), scale0), inverse);
            __m256 v = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x[r] + i + 8), scale1), inverse);
            __m256i k = tkvi_shorts_avx2(u, v);
            if (i < second) { /* full = 128 hi + lo, lo 0..127; narrow ones have no lo */
                __m256i full = tkvi_shorts_avx2(_mm256_mul_ps(u, fine), _mm256_mul_ps(v, fine)), lo, wide;
                wide = _mm256_set1_epi16((short)((tower >> r & 1 ? a->n : a->wide) - i));
                wide = _mm256_cmpgt_epi16(wide, places);
                lo = _mm256_and_si256(wide, _mm256_and_si256(full, _mm256_set1_epi16(127)));
                middle_lo[r] = _mm256_add_epi32(middle_lo[r], _mm256_madd_epi16(lo, c));
                tkvi_save_weights_avx2(a->lo + at, lo, 1);
                k = _mm256_blendv_epi8(k, _mm256_srai_epi16(full, 7), wide);
            }
            middle[r] = _mm256_add_epi32(middle[r], _mm256_madd_epi16(k, c));
            tkvi_save_weights_avx2(a->w + at, k, 1);
        }
    }
    tkvi_plane_avx2(&f[0], first, step, tkvi_sum4_avx2(rest), tkvi_isum4_avx2(middle));
    tkvi_plane_avx2(&f[1], first, _mm_mul_ps(step, _mm_set1_ps(1.0f / 128.0f)), _mm_setzero_ps(),
                    tkvi_isum4_avx2(middle_lo));
    return second;
}

TKVI_FLAT_AVX2 int tkvi_fold_v4_avx2(const tkvi_folding *a, int first, int left, const int nr, tkvi_fold *f) {
    const float *p[4];
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 most[4], rest[4], squares[4];
    __m256i sum[4], sum_lo[4];
    __m128 m, step;
    float by[4], top[4];
    int i, r, tower;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) {
        p[r] = a->x + (first + tkvi_min(r, left - 1)) * TKVI_BLOCK;
        most[r] = rest[r] = squares[r] = _mm256_setzero_ps();
        sum[r] = sum_lo[r] = _mm256_setzero_si256();
    }
    for (i = 0; i < TKVI_BLOCK; i += 8) {
        const __m256 scale = _mm256_loadu_ps(a->scale + i);
        const __m256 zero = _mm256_fmadd_ps(scale, _mm256_set1_ps(a->centre), _mm256_loadu_ps(a->zero + i));
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            const __m256 v = _mm256_loadu_ps(p[r] + i), y = _mm256_mul_ps(v, scale);
            most[r] = _mm256_max_ps(most[r], _mm256_and_ps(y, no_sign));
            squares[r] = _mm256_fmadd_ps(y, y, squares[r]);
            rest[r] = _mm256_fmadd_ps(v, zero, rest[r]);
        }
    }
    m = tkvi_max4_avx2(most);
    tower = a->planes == 2 ? 15 : tkvi_tower_avx2(a, m, tkvi_sum4_avx2(squares), a->top);
    for (r = 0; r < 4; r++) top[r] = tower >> r & 1 ? (float)TKVI_TWO_PLANES : (float)a->top;
    _mm_storeu_ps(by, tkvi_inverse_avx2(_mm_loadu_ps(top), m));
    for (r = 0; r < 4; r++) top[r] = tower >> r & 1 ? (float)TKVI_PLANE : (float)a->top;
    step = _mm_div_ps(m, _mm_loadu_ps(top));
    for (i = 0; i < TKVI_BLOCK; i += 16) {
        const __m256 scale0 = _mm256_loadu_ps(a->scale + i), scale1 = _mm256_loadu_ps(a->scale + i + 8);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            const int at = (first + r) * TKVI_BLOCK + i;
            const __m256 inverse = _mm256_set1_ps(by[r]);
            __m256 u = _mm256_mul_ps(_mm256_loadu_ps(p[r] + i), scale0);
            __m256 v = _mm256_mul_ps(_mm256_loadu_ps(p[r] + i + 8), scale1);
            __m256i k = tkvi_shorts_avx2(_mm256_mul_ps(u, inverse), _mm256_mul_ps(v, inverse));
            k = _mm256_max_epi16(k, _mm256_setzero_si256());
            if (tower) {
                const int two = tower >> r & 1;
                const __m256i lo = _mm256_and_si256(k, _mm256_set1_epi16((short)(two ? 127 : 0)));
                sum_lo[r] = _mm256_add_epi32(sum_lo[r], _mm256_madd_epi16(lo, _mm256_set1_epi16(1)));
                tkvi_save_weights_avx2(a->lo + at, lo, 0);
                if (two) k = _mm256_srai_epi16(k, 7);
            }
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(k, _mm256_set1_epi16(1)));
            tkvi_save_weights_avx2(a->w + at, k, 0);
        }
    }
    tkvi_plane_avx2(&f[0], first, step, tkvi_sum4_avx2(rest),
                    _mm_mullo_epi32(tkvi_isum4_avx2(sum), _mm_set1_epi32(a->middle)));
    tkvi_plane_avx2(&f[1], first, _mm_mul_ps(step, _mm_set1_ps(1.0f / 128.0f)), _mm_setzero_ps(),
                    _mm_mullo_epi32(tkvi_isum4_avx2(sum_lo), _mm_set1_epi32(a->middle)));
    return tower;
}

static TKVI_TARGET_AVX2 int tkvi_fold_k_avx2(const tkvi_folding *a, int rows, tkvi_fold *f) {
    int r, second = 0;
    for (r = 0; r < rows; r += 4)
        second = tkvi_max(second, rows - r == 1   ? tkvi_fold_k4_avx2(a, r, 1, 1, f)
                                  : rows - r == 2 ? tkvi_fold_k4_avx2(a, r, 2, 2, f)
                                                  : tkvi_fold_k4_avx2(a, r, rows - r, 4, f));
    return second;
}

static TKVI_TARGET_AVX2 int tkvi_fold_v_avx2(const tkvi_folding *a, int rows, tkvi_fold *f) {
    int r, second = 0;
    for (r = 0; r < rows; r += 4)
        second |= (rows - r == 1   ? tkvi_fold_v4_avx2(a, r, 1, 1, f)
                   : rows - r == 2 ? tkvi_fold_v4_avx2(a, r, 2, 2, f)
                                   : tkvi_fold_v4_avx2(a, r, rows - r, 4, f))
                  << r;
    return second;
}

/* Eight sums of row r become answers at out[at]. */
TKVI_FLAT_AVX2 void tkvi_answer_avx2(const tkvi_products *d, const tkvi_fold *f, int r, int at, __m256i sum) {
    const __m256 x = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(f->base[d->first + r])));
    __m256 rest = _mm256_set1_ps(f->rest[d->first + r]);
    float *out = d->out + f->row[d->first + r] * d->out_stride + at;
    if (d->add) rest = _mm256_add_ps(rest, _mm256_loadu_ps(out));
    _mm256_storeu_ps(out, _mm256_fmadd_ps(x, _mm256_set1_ps(f->step[d->first + r]), rest));
}

/* The products of one step: codes c (of 4 channels or tokens) by weights u, codes e (of the next 4) by
 * weights v; c[0] and e[0] add to accumulator a, c[1] and e[1] to b. Two pairs fit 16 bits: 4 * 127 * 63, and
 * with the weights of V, which are the unsigned operand, 4 * 255 * 15. With a table, levels are the signed operand and
 * the size of a weight the unsigned one, 2 * 127 * 127: each pair of products goes to 32 bits by itself.
 * `unit` is 1, or 16 for the high nibbles of 8-bit codes. */
TKVI_FLAT_AVX2 __m256i tkvi_two_avx2(const int v_side, __m256i c, __m256i u, __m256i e, __m256i v,
                                     __m256i unit) {
    const __m256i x = v_side ? _mm256_maddubs_epi16(u, c) : _mm256_maddubs_epi16(c, u);
    const __m256i y = v_side ? _mm256_maddubs_epi16(v, e) : _mm256_maddubs_epi16(e, v);
    return _mm256_madd_epi16(_mm256_add_epi16(x, y), unit);
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
        a##r = _mm256_add_epi32(a##r, tkvi_two_avx2(v_side, c[0], u, e[0], v, unit));                        \
        b##r = _mm256_add_epi32(b##r, tkvi_two_avx2(v_side, c[1], u, e[1], v, unit));                        \
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
    if (r < nw && r < d->rows) {                                                                             \
        tkvi_answer_avx2(d, fold, r, at, a##r);                                                              \
        tkvi_answer_avx2(d, fold, r, at + apart, b##r);                                                      \
    }

/* Tiles of one width, two a step. */
#define TKVI_PAIRS4_(width, MAC)                                                                             \
    for (i = 0; i < n; i += 2, w += 8, tile += 2 * bytes) {                                                  \
        const int both = i + 1 < n;                                                                          \
        if (d->ahead && (i / 2 & (4 * d->turns + 3)) == 4 * d->turn + 2 * h + b) {                           \
            tkvi_prefetch_bytes(tile, 2 * bytes, d->ahead);                                                  \
            tkvi_prefetch_rest(d);                                                                           \
            tkvi_prefetch_rest(d);                                                                           \
        }                                                                                                    \
        tkvi_codes_avx2(width, tile, d->tops, half + i * has_half, h, b, part, c);                           \
        e[0] = e[1] = _mm256_setzero_si256();                                                                \
        if (both) tkvi_codes_avx2(width, tile + bytes, d->tops, half + (i + 1) * has_half, h, b, part, e);   \
        TKVI_ROWS4_(MAC)                                                                                     \
    }

/* K: lanes are 8 tokens from 32h + 8b and 8 from 32h + 16 + 8b. Two tiles a step. */
TKVI_FLAT_AVX2 void tkvi_dot_kq_avx2(tkvi_products *d, int h, int b, const int nw) {
    const tkvi_side *s = d->s;
    const int stride = TKV_MAX_HEAD_DIM, at = 32 * h + 8 * b, apart = 16, v_side = 0;
    const tkvi_fold *fold = h ? d->fold_group : d->fold;
    const uint8_t *wide = d->wide;
    const int8_t *w0 = d->w + h * d->w_group;
    __m256i c[2], e[2], u, v, unit, table = unit = _mm256_setzero_si256();
    int half = d->half, left = d->tiles, width, i, part;
    TKVI_ROWS4_(TKVI_ZERO4_)
    if (s->levels) table = tkvi_levels_avx2(s->levels);
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int bytes = tkvi_wide_bytes[width], has_half = tkvi_has_half[width];
        const int n = tkvi_min(s->runs.n[width], left);
        left -= n;
        for (part = 0; part < 1 + (width == 8); part++) {
            const uint8_t *tile = wide;
            const int8_t *w = w0;
            unit = _mm256_set1_epi16(part ? 16 : 1);
            if (s->levels) {
                TKVI_PAIRS4_(width, TKVI_LEVELED4_)
            } else if (nw == 4 && width == 4) {
                TKVI_PAIRS4_(4, TKVI_MAC4_)
            } else if (nw == 4 && width == 3) {
                TKVI_PAIRS4_(3, TKVI_MAC4_)
            } else if (nw == 4 && width == 2) {
                TKVI_PAIRS4_(2, TKVI_MAC4_)
            } else {
                TKVI_PAIRS4_(width, TKVI_MAC4_)
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

/* V: lanes are channels 0 .. 7 and 8 .. 15 of one slab, which starts `skip` tiles on and whose answers go to out[at];
 * `upper`: of the second channels of pairs. */
TKVI_FLAT_AVX2 void tkvi_dot_vs_avx2(tkvi_products *d, int skip, int upper, int at, const int width,
                                     const int nw) {
    const int n = d->n, has_half = tkvi_has_half[width], bytes = tkvi_wide_bytes[width];
    const int stride = TKVI_BLOCK, apart = 8, both = 1, v_side = 1;
    const tkvi_fold *fold = d->fold;
    const int8_t *levels = d->s->levels ? d->s->levels + tkvi_level_table(d->s, width, upper) : NULL;
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
            if (d->ahead && (t / 16 & d->turns) == d->turn) {
                tkvi_prefetch_bytes(tile, bytes, d->ahead);
                tkvi_prefetch_rest(d);
            }
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
    const int kind = nw == 4 && !d->s->levels ? d->width : 0;
    int slab;
    for (slab = 0; slab < d->slabs << d->pairs; slab++)
        if (kind == 4) tkvi_dot_vs_avx2(d, 4 * slab, 0, 16 * slab, 4, nw);
        else if (kind == 3) tkvi_dot_vs_avx2(d, 4 * slab, 0, 16 * slab, 3, nw);
        else if (kind == 2) tkvi_dot_vs_avx2(d, 4 * slab, 0, 16 * slab, 2, nw);
        else tkvi_dot_vs_avx2(d, 4 * (slab >> d->pairs), d->pairs & slab, 16 * slab, d->width, nw);
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
#undef TKVI_PAIRS4_

/* All rows, in the passes that registers allow: 1, 2 or 4. What rows beyond the last one add up to is left. */
static void tkvi_dot_avx2(tkvi_products *d, int rows) {
    static const tkvi_dot dots[2][3] = {
        {tkvi_dot_k1_avx2, tkvi_dot_k2_avx2, tkvi_dot_k4_avx2},
        {tkvi_dot_v1_avx2, tkvi_dot_v2_avx2, tkvi_dot_v4_avx2},
    };
    tkvi_dot_rows(d, rows, dots[d->s->which]);
}

static const tkvi_steps tkvi_steps_avx2 = {
    &tkvi_helpers_avx2, tkvi_fold_k_avx2, tkvi_fold_v_avx2, tkvi_dot_avx2, 0, 0};

static void tkvi_tiles_k_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                              const float *ref, int rows, int n, int planes, float *scores) {
    (void)n;
    tkvi_tiles_k(&tkvi_steps_avx2, s, src, next, q, ref, rows, planes, scores);
}

static void tkvi_tiles_v_avx2(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                              int rows, int n, int planes, float *out) {
    tkvi_tiles_v(&tkvi_steps_avx2, s, src, next, p, rows, n, planes, out);
}

static int tkvi_weigh_avx2(const float *s, int rows, float *m, float *sum, float *p) {
    return tkvi_weigh_rows(tkvi_max64_avx2, tkvi_exp64_avx2, s, rows, m, sum, p);
}

static const tkvi_kernels tkvi_kernels_avx2 = {
    TKV_ISA_AVX2,
    "avx2",
    {tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_tiles_k_avx2, tkvi_decoded_k_avx2},
    {tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_tiles_v_avx2, tkvi_decoded_v_avx2},
    &tkvi_helpers_avx2,
    tkvi_exp64_avx2,
    tkvi_max64_avx2,
    tkvi_weigh_avx2,
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

static TKVI_TARGET_AVX512 void tkvi_logs_avx512(const uint8_t *src, int n, int top, float *dst) {
    const __m512i table = _mm512_slli_epi32(
        _mm512_sub_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)tkvi_log_mantissa)),
            _mm512_set1_epi32(1024)),
        13);
    const __m512i low = _mm512_set1_epi32(127 + top - 16);
    int i;
    for (i = 0; i < n; i += 16) {
        const __mmask16 m = (__mmask16)(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(m, src + i));
        __m512i x = _mm512_sub_epi32(code, _mm512_set1_epi32(1));
        __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_srai_epi32(x, 4), low), 23);
        bits = _mm512_or_si512(bits, _mm512_permutexvar_epi32(x, table)); /* looks at 4 bits of x */
        bits = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(code, code), bits);
        _mm512_mask_storeu_ps(dst + i, m, _mm512_castsi512_ps(bits));
    }
}

static TKVI_TARGET_AVX512 void tkvi_zeros_avx512(const uint8_t *offset, const float *scale, const float *mean,
                                                 float unit, int middle, int n, float *dst) {
    int i;
    for (i = 0; i < n; i += 16) {
        const __mmask16 m = (__mmask16)(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        __m512i by = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m, offset + i));
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, scale + i), _mm512_set1_ps(unit));
        by = _mm512_sub_epi32(by, _mm512_set1_epi32(middle));
        x = _mm512_fmadd_ps(x, _mm512_cvtepi32_ps(by), _mm512_maskz_loadu_ps(m, mean + i));
        _mm512_mask_storeu_ps(dst + i, m, x);
    }
}

/* >>encoding: see kernels_avx2.h */
/* Columns: a lane of 32 bits each, two tokens in it. */
typedef struct tkvi_range_avx512 {
    __m512i cut, by, top; /* in both halves of a lane */
} tkvi_range_avx512;

TKVI_FLAT_AVX512 __m512i tkvi_twice_avx512(__m512i x) { return _mm512_or_si512(x, _mm512_slli_epi32(x, 16)); }

TKVI_FLAT_AVX512 tkvi_range_avx512 tkvi_range_of_avx512(int k, __m512i width) {
    const tkvi_a_range *r = &tkvi_a_ranges[k];
    tkvi_range_avx512 range;
    __m512i both = _mm512_loadu_si512((const void *)r->cut); /* cut, then by */
    range.cut = tkvi_twice_avx512(_mm512_permutexvar_epi32(width, both));
    range.by =
        tkvi_twice_avx512(_mm512_permutexvar_epi32(_mm512_add_epi32(width, _mm512_set1_epi32(8)), both));
    range.top = _mm512_sub_epi32(_mm512_sllv_epi32(_mm512_set1_epi32(1), width), _mm512_set1_epi32(1));
    range.top = tkvi_twice_avx512(range.top);
    return range;
}

TKVI_FLAT_AVX512 __m512i tkvi_cut_avx512(__m512i u, const tkvi_range_avx512 *r) { /* tkvi_cut_code */
    __m512i v = _mm512_mulhi_epu16(_mm512_subs_epu16(u, r->cut), r->by);
    return _mm512_min_epi16(_mm512_avg_epu16(v, _mm512_setzero_si512()), r->top);
}

TKVI_FLAT_AVX512 __m512 tkvi_covariance_avx512(int n, __m512i a, __m512i b, __m512i products) {
    return _mm512_cvtepi32_ps(
        _mm512_sub_epi32(_mm512_mullo_epi32(_mm512_set1_epi32(n), products), _mm512_mullo_epi32(a, b)));
}

/* Range and integers of all columns; 0 if values would have to be cut to +-1e30. */
TKVI_FLAT_AVX512 int tkvi_integers_avx512(tkvi_columns *c) {
    const __m512 lowest = _mm512_set1_ps(-1e30f), highest = _mm512_set1_ps(1e30f);
    const __m512 mean = _mm512_loadu_ps(c->mean);
    const __mmask16 lanes = (__mmask16)((1 << c->lanes) - 1);
    __m512 low = highest, high = lowest, step, inverse;
    __m512i sum = _mm512_setzero_si512(), squares = sum;
    TKVI_ALIGNED float residual[TKVI_BLOCK][TKVI_LANES];
    __mmask16 some;
    int t;
    for (t = 0; t < c->n; t++) {
        __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, c->x + (size_t)t * c->stride), mean);
        _mm512_store_ps(residual[t], x);
        low = _mm512_min_ps(x, low);
        high = _mm512_max_ps(x, high);
    }
    if (_mm512_cmp_ps_mask(low, lowest, _CMP_LT_OQ) | _mm512_cmp_ps_mask(high, highest, _CMP_GT_OQ)) return 0;
    for (; t < TKVI_BLOCK; t++) _mm512_store_ps(residual[t], low); /* u = 0 */
    step = _mm512_mul_ps(_mm512_sub_ps(high, low), _mm512_set1_ps(1.0f / TKVI_STEPS));
    some = _mm512_cmp_ps_mask(step, _mm512_set1_ps(1e-36f), _CMP_GT_OQ);
    inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), step);
    _mm512_store_ps(c->low, low);
    _mm512_store_ps(c->step, _mm512_maskz_mov_ps(some, step));
    for (t = 0; t < TKVI_BLOCK / 2; t++) {
        const float *x = residual[t / 2 * 4 + t % 2]; /* as tkvi_column_u says */
        __m512 a = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(x), low), inverse);
        __m512 b = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(x + 2 * TKVI_LANES), low), inverse);
        __m512i u = _mm512_or_si512(_mm512_cvttps_epi32(a), _mm512_slli_epi32(_mm512_cvttps_epi32(b), 16));
        u = _mm512_min_epi16(u, _mm512_set1_epi16(TKVI_STEPS - 1));
        sum = _mm512_dpwssd_epi32(sum, u, _mm512_set1_epi16(1));
        squares = _mm512_dpwssd_epi32(squares, u, u);
        _mm512_store_si512((void *)c->u[t], u);
    }
    _mm512_store_si512((void *)c->sum_u, sum);
    _mm512_store_si512((void *)c->sum_uu, squares);
    return 1;
}

static TKVI_TARGET_AVX512 void tkvi_columns_avx512(tkvi_columns *c) {
    const __m512i width = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)c->width));
    __m512i sum_c, sum_cc, sum_cu;
    __m512 most = _mm512_set1_ps(-1.0f);
    tkvi_range_avx512 best = tkvi_range_of_avx512(0, width);
    TKVI_ALIGNED int32_t four[TKVI_BLOCK / 4][TKVI_LANES];
    int t, k;
    if (!tkvi_integers_avx512(c)) {
        tkvi_columns_scalar(c);
        return;
    }
    sum_c = sum_cc = sum_cu = _mm512_setzero_si512();
    for (k = 0; k < TKVI_A_CUTS; k++) {
        const tkvi_range_avx512 range = tkvi_range_of_avx512(k, width);
        __m512i sum = _mm512_setzero_si512(), squares = sum, products = sum;
        __m512 cov, var, score;
        __mmask16 better;
        for (t = 0; t < TKVI_BLOCK / 2; t++) {
            __m512i u = _mm512_load_si512((const void *)c->u[t]), v = tkvi_cut_avx512(u, &range);
            sum = _mm512_add_epi16(sum, v);
            squares = _mm512_dpwssd_epi32(squares, v, v);
            products = _mm512_dpwssd_epi32(products, v, u);
        }
        sum = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
        cov = tkvi_covariance_avx512(c->n, sum, _mm512_load_si512((const void *)c->sum_u), products);
        var = tkvi_covariance_avx512(c->n, sum, sum, squares);
        score = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(var, _mm512_setzero_ps(), _CMP_GT_OQ), cov, var);
        score = _mm512_mul_ps(score, cov);
        better = _mm512_cmp_ps_mask(score, most, _CMP_GT_OQ);
        most = _mm512_mask_mov_ps(most, better, score);
        best.cut = _mm512_mask_mov_epi32(best.cut, better, range.cut);
        best.by = _mm512_mask_mov_epi32(best.by, better, range.by);
        sum_c = _mm512_mask_mov_epi32(sum_c, better, sum);
        sum_cc = _mm512_mask_mov_epi32(sum_cc, better, squares);
        sum_cu = _mm512_mask_mov_epi32(sum_cu, better, products);
    }
    _mm512_store_si512((void *)c->sum_c, sum_c);
    _mm512_store_si512((void *)c->sum_cc, sum_cc);
    _mm512_store_si512((void *)c->sum_cu, sum_cu);
    for (t = 0; t < TKVI_BLOCK / 4; t++) {
        __m512i a = tkvi_cut_avx512(_mm512_load_si512((const void *)c->u[2 * t]), &best);
        __m512i b = tkvi_cut_avx512(_mm512_load_si512((const void *)c->u[2 * t + 1]), &best);
        _mm512_store_si512((void *)four[t], _mm512_or_si512(a, _mm512_slli_epi32(b, 8)));
    }
    tkvi_stand_avx2(c->code, four);
}

/* Tokens: see kernels_avx2.h. */
TKVI_FLAT_AVX512 float tkvi_turn_avx512(const tkvi_side *s, int log2n, const float *x, const float *flip,
                                        float *y) {
    const int n = 1 << log2n, end = tkvi_round_up(s->dim, 32);
    __m512 most;
    int c;
    for (c = n; c < end; c += 16) {
        __mmask16 some = (__mmask16)(c + 16 <= s->dim ? 0xffff : c < s->dim ? (1 << (s->dim - c)) - 1 : 0);
        _mm512_storeu_ps(y + c, tkvi_flip_avx512(_mm512_maskz_loadu_ps(some, x + c), flip + c));
    }
    most = tkvi_window_avx512(x, flip, y, log2n);
    if (n == s->dim) return _mm512_reduce_max_ps(most);
    most = tkvi_window_avx512(y + s->dim - n, NULL, y + s->dim - n, log2n);
    for (c = 0; c < s->dim - n; c += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(y + c)));
    return _mm512_reduce_max_ps(most);
}

/* A token as integers, 16 channels and the next 16 packed as _mm512_packs_epi32 does it. Returns the sum of
 * squares. */
TKVI_FLAT_AVX512 int32_t tkvi_whole_avx512(const float *y, float by, int end, int16_t *u) {
    const __m512 inverse = _mm512_set1_ps(by);
    const __m512i most = _mm512_set1_epi16(TKVI_R_MOST), least = _mm512_set1_epi16(-TKVI_R_MOST);
    __m512i squares = _mm512_setzero_si512();
    int c;
    for (c = 0; c < end; c += 32) {
        __m512i a = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_load_ps(y + c), inverse));
        __m512i b = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_load_ps(y + c + 16), inverse));
        a = _mm512_max_epi16(_mm512_min_epi16(_mm512_packs_epi32(a, b), most), least);
        squares = _mm512_dpwssd_epi32(squares, a, a);
        _mm512_store_si512((void *)(u + c), a);
    }
    return _mm512_reduce_add_epi32(squares);
}

TKVI_FLAT_AVX512 __m512i tkvi_floor_avx512(__m512i u, __m512 by) {
    return _mm512_cvt_roundps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(u), by),
                                    _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

/* The two halves of what tkvi_whole_avx512 has packed. */
TKVI_FLAT_AVX512 __m512i tkvi_first_avx512(__m512i u) {
    return _mm512_srai_epi32(_mm512_unpacklo_epi16(u, u), 16);
}

TKVI_FLAT_AVX512 __m512i tkvi_second_avx512(__m512i u) {
    return _mm512_srai_epi32(_mm512_unpackhi_epi16(u, u), 16);
}

/* Two vectors of small integers as one of pairs. */
TKVI_FLAT_AVX512 __m512i tkvi_both_avx512(__m512i a, __m512i b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
}

/* Codes of a uniform grid for 16 + 16 channels, packed like u; adds <u, level>. */
TKVI_FLAT_AVX512 __m512i tkvi_grid_avx512(const int16_t *u, float fine, int top, __m512i *sum) {
    const __m512i tops = _mm512_set1_epi16((short)top);
    const __m512 by = _mm512_set1_ps(fine);
    __m512i x = _mm512_load_si512((const void *)u), v;
    v = _mm512_packs_epi32(tkvi_floor_avx512(tkvi_first_avx512(x), by),
                           tkvi_floor_avx512(tkvi_second_avx512(x), by));
    v = _mm512_add_epi16(v, _mm512_set1_epi16((short)((top + 1) / 2)));
    v = _mm512_max_epi16(_mm512_min_epi16(v, tops), _mm512_setzero_si512());
    *sum = _mm512_dpwssd_epi32(*sum, x, _mm512_sub_epi16(_mm512_add_epi16(v, v), tops));
    return v;
}

/* Codes of 16 pairs, 0 .. 7 in lanes; adds <u, level>. The best score and the first code that has it win in
 * one maximum: eight times the score, and 7 - code. */
TKVI_FLAT_AVX512 __m512i tkvi_pairs_avx512(const int16_t *u, float fine, __m512i *sum) {
    const __m512 by = _mm512_set1_ps(fine);
    const __m128i *point_at = (const __m128i *)(const void *)tkvi_r_pairs;
    const __m512i level = tkvi_both_avx512(_mm512_cvtepi8_epi32(_mm_loadu_si128(point_at)),
                                           _mm512_cvtepi8_epi32(_mm_loadu_si128(point_at + 1)));
    __m512i x = _mm512_load_si512((const void *)u), a = tkvi_first_avx512(x), b = tkvi_second_avx512(x);
    __m512i best = _mm512_set1_epi32(INT32_MIN), code;
    int k;
    x = tkvi_both_avx512(tkvi_floor_avx512(a, by), tkvi_floor_avx512(b, by));
    TKVI_UNROLL
    for (k = 0; k < 8; k++) {
        const int px = tkvi_r_pairs[k], py = tkvi_r_pairs[16 + k];
        const __m512i point = _mm512_set1_epi32((8 * px & 0xffff) | (int)((uint32_t)(8 * py) << 16));
        const __m512i from = _mm512_set1_epi32(-64 * (px * px + py * py) + 7 - k);
        best = _mm512_max_epi32(best, _mm512_dpwssd_epi32(from, x, point));
    }
    code = _mm512_andnot_si512(best, _mm512_set1_epi32(7));
    *sum = _mm512_dpwssd_epi32(*sum, tkvi_both_avx512(a, b), _mm512_permutexvar_epi32(code, level));
    return code;
}

/* Codes of four tokens; sum: twice <u, level> of each. u: [token][TKV_MAX_HEAD_DIM]; fine: [2][16], that of
 * grids and that of pairs. */
TKVI_FLAT_AVX512 void tkvi_four_avx512(const tkvi_side *s, const int16_t *u, const float *fine, uint8_t *code,
                                       int32_t *sum) {
    const int pairs = s->pairs ? s->pad / 32 * 32 : 0, bits = s->pairs ? 2 : s->half_bits / 2;
    const int top = (1 << bits) - 1;
    __m512i grid[4], pair[4], v[4];
    int c, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) grid[r] = pair[r] = _mm512_setzero_si512();
    for (c = 0; c < pairs; c += 32, code += 4 * TKVI_TILE_CODES) {
        TKVI_UNROLL
        for (r = 0; r < 4; r++)
            v[r] = tkvi_pairs_avx512(u + r * TKV_MAX_HEAD_DIM + c, fine[TKVI_LANES + r], &pair[r]);
        v[0] = _mm512_or_si512(v[0], _mm512_slli_epi32(v[1], 8));
        v[2] = _mm512_or_si512(v[2], _mm512_slli_epi32(v[3], 8));
        _mm512_storeu_si512((void *)code, _mm512_or_si512(v[0], _mm512_slli_epi32(v[2], 16)));
    }
    for (; c < s->dim; c += 32, code += 8 * TKVI_TILE_CODES) { /* two slabs */
        TKVI_UNROLL
        for (r = 0; r < 4; r++) v[r] = tkvi_grid_avx512(u + r * TKV_MAX_HEAD_DIM + c, fine[r], top, &grid[r]);
        v[0] = _mm512_or_si512(v[0], _mm512_slli_epi16(v[1], 8));
        v[2] = _mm512_or_si512(v[2], _mm512_slli_epi16(v[3], 8));
        _mm512_storeu_si512((void *)code, _mm512_unpacklo_epi16(v[0], v[2]));
        if (c + 16 < s->dim)
            _mm512_storeu_si512((void *)(code + 4 * TKVI_TILE_CODES), _mm512_unpackhi_epi16(v[0], v[2]));
    }
    TKVI_UNROLL
    for (r = 0; r < 4; r++) /* levels of the plain slab beside pairs: -120, -40, 40, 120, twice */
        sum[r] =
            2 * _mm512_reduce_add_epi32(pair[r]) + (s->pairs ? 80 : 1) * _mm512_reduce_add_epi32(grid[r]);
}

/* 16 tokens at a time, a step for all of them before the next: what waits for a division or for the sum of a
 * vector is then one token of many. */
static TKVI_TARGET_AVX512 void tkvi_tokens_avx512(const tkvi_side *s, const float *x, size_t stride, int n,
                                                  tkvi_codes code, float *scale) {
    TKVI_ALIGNED float y[TKVI_LANES][TKV_MAX_HEAD_DIM], most[TKVI_LANES], by[TKVI_LANES], fine[2][TKVI_LANES];
    TKVI_ALIGNED int16_t u[TKVI_LANES][TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t squares[TKVI_LANES], sum[TKVI_LANES];
    const __m512 grid = _mm512_set1_ps(tkvi_r_step[s->pairs ? 2 : s->half_bits / 2]);
    const int log2n = tkvi_log2_floor(s->dim);
    TKVI_ALIGNED float flip[TKV_MAX_HEAD_DIM];
    int first, t;
    if (s->dim < 16) {
        tkvi_tokens_scalar(s, x, stride, n, code, scale);
        return;
    }
    tkvi_flips_avx2(flip, tkvi_round_up(s->dim, 32));
    for (first = 0; first < n; first += TKVI_LANES) {
        const int count = tkvi_min(TKVI_LANES, n - first), fours = tkvi_round_up(count, 4);
        const __mmask16 there = (__mmask16)((1 << count) - 1);
        __m512 m, v;
        __mmask16 some;
        for (t = 0; t < fours; t++) /* a token that is not there: its neighbour's codes, to be cleared */
            most[t] =
                tkvi_turn_avx512(s, log2n, x + (size_t)(first + tkvi_min(t, count - 1)) * stride, flip, y[t]);
        m = _mm512_min_ps(_mm512_maskz_loadu_ps(there, most), _mm512_set1_ps(1e30f));
        some = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
        _mm512_store_ps(by, _mm512_maskz_div_ps(some, _mm512_set1_ps((float)TKVI_R_MOST), m));
        for (t = 0; t < fours; t++)
            squares[t] = tkvi_whole_avx512(y[t], by[t], tkvi_round_up(s->dim, 32), u[t]);
        v = _mm512_cvtepi32_ps(
            _mm512_max_epi32(_mm512_maskz_loadu_epi32(there, squares), _mm512_set1_epi32(1)));
        v = _mm512_sqrt_ps(_mm512_div_ps(v, _mm512_set1_ps((float)s->dim)));
        v = _mm512_div_ps(_mm512_set1_ps(1.0f), v);
        _mm512_store_ps(fine[0], _mm512_div_ps(v, grid));
        _mm512_store_ps(fine[1], _mm512_mul_ps(v, _mm512_set1_ps(16.0f * TKVI_R_UNIT)));
        for (t = 0; t < fours; t += 4)
            tkvi_four_avx512(s, u[t], fine[0] + t, code[first / 16] + 16 * t, sum + t);
        v = _mm512_cvtepi32_ps(_mm512_slli_epi32(_mm512_maskz_loadu_epi32(some, squares), 1));
        v = _mm512_div_ps(v, _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(some, sum)));
        m = _mm512_div_ps(m, _mm512_set1_ps((float)TKVI_R_MOST));
        _mm512_mask_storeu_ps(scale + first, there, _mm512_maskz_mul_ps(some, m, v));
    }
}

static const tkvi_helpers tkvi_helpers_avx512 = {
    tkvi_halves_avx512,  tkvi_to_halves_avx2, tkvi_logs_avx512, tkvi_zeros_avx512,
    tkvi_log_codes_avx2, tkvi_pack_tile_avx2, tkvi_weave_avx2,  tkvi_columns_avx512,
    tkvi_settle_avx2,    tkvi_tokens_avx512,  tkvi_groups_avx2, tkvi_tile_values_avx512};

static TKVI_TARGET_AVX512 float tkvi_max64_avx512(const float *s) {
    __m512 a = _mm512_max_ps(_mm512_loadu_ps(s), _mm512_loadu_ps(s + 16));
    __m512 b = _mm512_max_ps(_mm512_loadu_ps(s + 32), _mm512_loadu_ps(s + 48));
    return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
}

/* exp(x) for x <= 0, 0 below -87: 2^n 2^r with n + r = x log2 e, which comes in two parts: fused, the first product
 * loses nothing to n. The polynomial is a minimax fit of 2^r, |r| <= 1/2, with 2^0 = 1; error 9e-8. */
TKVI_FLAT_AVX512 __m512 tkvi_exp_avx512(__m512 x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    const __m512 log2e = _mm512_set1_ps(1.44269502f);
    const __m512 n = _mm512_cvtepi32_ps(
        _mm512_cvt_roundps_epi32(_mm512_mul_ps(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    const __m512 r = _mm512_fmadd_ps(x, _mm512_set1_ps(1.92596299e-8f), _mm512_fmsub_ps(x, log2e, n));
    __m512 y = _mm512_set1_ps(1.326472728e-03f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.671512657e-03f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.550733743e-02f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.402224208e-01f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.931469776e-01f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(some, y, n);
}

static TKVI_TARGET_AVX512 float tkvi_exp64_avx512(const float *s, float max, float *p) {
    __m512 sum = _mm512_setzero_ps();
    int t;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        const __m512 y = tkvi_exp_avx512(_mm512_sub_ps(_mm512_loadu_ps(s + t), _mm512_set1_ps(max)));
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

/* The first four rows, or all that are left. */
static TKVI_TARGET_AVX512 void tkvi_exact_rows_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                        uintptr_t ahead, const float *q, const float *ref,
                                                        int left, int n, float *scores) {
    if (left == 1) tkvi_exact_k4_avx512(s, src, ahead, q, ref, left, n, 1, scores);
    else if (left == 2) tkvi_exact_k4_avx512(s, src, ahead, q, ref, left, n, 2, scores);
    else tkvi_exact_k4_avx512(s, src, ahead, q, ref, left, n, 4, scores);
}

static TKVI_TARGET_AVX512 void tkvi_exact_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                   const uint8_t *next, const float *q, const float *ref,
                                                   int rows, int n, int planes, float *scores) {
    int r;
    (void)planes;
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (r = 0; r < rows; r += 4)
        tkvi_exact_rows_k_avx512(s, src, tkvi_ahead(src, next), q + r * s->pad, ref, rows - r, n,
                                 scores + r * TKVI_BLOCK);
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

/* >>decoded: see decode_x86.h */
/* Levels of E5M2; floats have more exponents, and no subnormals where these have them. */
TKVI_FLAT_AVX512 __m512 tkvi_e5m2_avx512(__m512i code) {
    const __m512i size = _mm512_and_si512(code, _mm512_set1_epi32(127));
    const __m512i sign = _mm512_slli_epi32(_mm512_sub_epi32(code, size), 24);
    const __m512i large =
        _mm512_add_epi32(_mm512_slli_epi32(size, 21), _mm512_set1_epi32((126 + TKVI_E5M2_LOW + 2) << 23));
    const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(size),
                                       _mm512_castsi512_ps(_mm512_set1_epi32((127 + TKVI_E5M2_LOW) << 23)));
    const __m512i x = _mm512_mask_mov_epi32(large, _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(4)),
                                            _mm512_castps_si512(small));
    return _mm512_castsi512_ps(_mm512_or_si512(x, sign));
}

/* Levels of E4M3, as halves: exponents have one bit less, so none of them is infinite. */
TKVI_FLAT_AVX512 __m512 tkvi_e4m3_avx512(__m128i code) {
    __m256i x = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(code), 8), 1);
    x = _mm256_and_si256(x, _mm256_set1_epi16((int16_t)0xbfff));
    return _mm512_mul_ps(_mm512_cvtph_ps(x), _mm512_set1_ps(4.0f));
}

/* How codes of a vector come apart: the two bytes that a code is in, and by how much it is shifted there. */
typedef struct tkvi_apart_avx512 {
    __m512i pick[3], shift[3]; /* of partners, the first and the second; of 16 neighbours */
    __m512 level;
} tkvi_apart_avx512;

TKVI_FLAT_AVX512 void tkvi_apart_of_avx512(const tkvi_reading *r, tkvi_apart_avx512 *a) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int k;
    for (k = 0; k < 3; k++) {
        const int step = k < 2 && r->rope ? r->rope->step : 1;
        __m512i bit = _mm512_mullo_epi32(lane, _mm512_set1_epi32(r->bits * step)), byte;
        if (step == 2) bit = _mm512_add_epi32(bit, _mm512_set1_epi32(k * r->bits));
        byte = _mm512_srli_epi32(bit, 3);
        a->shift[k] = _mm512_and_si512(bit, _mm512_set1_epi32(7));
        a->pick[k] = _mm512_add_epi32(byte, _mm512_slli_epi32(byte, 8));
        a->pick[k] = _mm512_add_epi32(a->pick[k], _mm512_set1_epi32((int32_t)0x80800100u));
    }
    a->level = _mm512_load_ps(r->level);
}

/* 16 levels; those of a vector that is not whole end in rubbish. */
TKVI_FLAT_AVX512 __m512 tkvi_level_avx512(const tkvi_code_kind kind, const uint8_t *p,
                                          const tkvi_apart_avx512 *a, const int k) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)p);
    __m512i x;
    if (kind == TKVI_CODES_INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    if (kind == TKVI_CODES_E4M3) return tkvi_e4m3_avx512(bytes);
    if (kind == TKVI_CODES_E5M2) return tkvi_e5m2_avx512(_mm512_cvtepu8_epi32(bytes));
    x = _mm512_srlv_epi32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), a->pick[k]), a->shift[k]);
    return _mm512_permutexvar_ps(x, a->level); /* looks at 4 bits */
}

/* Factors of 16 channels into the scales of tokens. */
static TKVI_TARGET_AVX512 void tkvi_parts_avx512(tkvi_reading *r) {
    TKVI_ALIGNED float scale[TKVI_BLOCK];
    int t;
    memcpy(scale, r->by, sizeof scale);
    for (t = 0; t < TKVI_BLOCK; t++) { /* what stands behind a token's factors is overwritten by the next */
        const __mmask16 some = (__mmask16)((1 << r->per) - 1);
        const __m512 x = tkvi_e4m3_avx512(_mm_maskz_loadu_epi8(some, r->parts + t * r->per));
        _mm512_storeu_ps(r->by + t * r->per, _mm512_mul_ps(x, _mm512_set1_ps(scale[t])));
    }
}

/* 4 tokens x up to 4 rows, as tkvi_exact_k4_avx512; tokens from .. from + n - 1. */
TKVI_FLAT_AVX512 void tkvi_decoded_k4_avx512(const tkvi_reading *rd, const tkvi_code_kind kind,
                                             const int by_channel, const int turn, int from, int n,
                                             const float *q, const float *more, int rows, const int nr,
                                             float *scores) {
    tkvi_apart_avx512 apart;
    int t, v, r, j;
    tkvi_apart_of_avx512(rd, &apart);
    for (t = 0; t < n; t += 4) { /* a record has 64 rows, whatever n is */
        __m512 acc[4][4];
        const uint8_t *const k = rd->codes + (size_t)(from + t) * rd->row;
        const float *by = rd->by + (from + t) * rd->per, *m = more + 16 * t * rd->vectors;
        const float *cosine = turn ? rd->rope->cosine[t] : NULL, *sine = turn ? rd->rope->sine[t] : NULL;
        TKVI_UNROLL
        for (j = 0; j < 4; j++) tkvi_reading_prefetch(rd, from + t + j);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            TKVI_UNROLL
            for (j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
        }
        v = 0;
        for (; v < (turn ? rd->pairs : 0); v += 2, cosine += 16, sine += 16, m += 32) {
            const __m512 by0 = _mm512_load_ps(rd->by + 16 * v), by1 = _mm512_load_ps(rd->by + 16 * v + 16);
            const __m512 plus0 = _mm512_load_ps(rd->plus + 16 * v);
            const __m512 plus1 = _mm512_load_ps(rd->plus + 16 * v + 16);
            __m512 a[4], b[4];
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                const __m512 c = _mm512_loadu_ps(cosine + j * (TKV_MAX_HEAD_DIM / 2));
                const __m512 d = _mm512_loadu_ps(sine + j * (TKV_MAX_HEAD_DIM / 2));
                const uint8_t *kj = k + (size_t)j * rd->row;
                const float *mj = m + 16 * j * rd->vectors;
                __m512 x = tkvi_level_avx512(kind, kj + rd->at[v], &apart, 0);
                __m512 y = tkvi_level_avx512(kind, kj + rd->at[v + 1], &apart, 1);
                x = _mm512_add_ps(_mm512_fmadd_ps(x, by0, plus0), _mm512_load_ps(mj));
                y = _mm512_add_ps(_mm512_fmadd_ps(y, by1, plus1), _mm512_load_ps(mj + 16));
                a[j] = _mm512_fnmadd_ps(y, d, _mm512_mul_ps(x, c));
                b[j] = _mm512_fmadd_ps(x, d, _mm512_mul_ps(y, c));
            }
            TKVI_UNROLL
            for (r = 0; r < nr; r++) {
                const float *y = q + 16 * tkvi_min(r, rows - 1) * rd->vectors + 16 * v;
                const __m512 y0 = _mm512_load_ps(y), y1 = _mm512_load_ps(y + 16);
                TKVI_UNROLL
                for (j = 0; j < 4; j++)
                    acc[r][j] = _mm512_fmadd_ps(b[j], y1, _mm512_fmadd_ps(a[j], y0, acc[r][j]));
            }
        }
        for (; v < rd->vectors; v++, m += 16) {
            const uint8_t *kv = k + rd->at[v];
            const float *bv = by + (16 * v >> rd->shift);
            __m512 x[4];
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                x[j] = tkvi_level_avx512(kind, kv + (size_t)j * rd->row, &apart, 2);
                if (by_channel) {
                    x[j] = _mm512_fmadd_ps(x[j], _mm512_load_ps(rd->by + 16 * v),
                                           _mm512_load_ps(rd->plus + 16 * v));
                    x[j] = _mm512_add_ps(x[j], _mm512_load_ps(m + 16 * j * rd->vectors));
                } else x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(bv[j * rd->per]));
            }
            TKVI_UNROLL
            for (r = 0; r < nr; r++) {
                __m512 y = _mm512_load_ps(q + 16 * tkvi_min(r, rows - 1) * rd->vectors + 16 * v);
                TKVI_UNROLL
                for (j = 0; j < 4; j++) acc[r][j] = _mm512_fmadd_ps(x[j], y, acc[r][j]);
            }
        }
        TKVI_UNROLL
        for (r = 0; r < nr; r++)
            if (r < rows) _mm_storeu_ps(scores + r * TKVI_BLOCK + t, tkvi_sum4_avx512(acc[r]));
    }
}

/* A function for each kind of codes, so that nothing is asked in its loops. */
#define TKVI_DECODED_K_(name, kind, by_channel, turn)                                                        \
    static TKVI_TARGET_AVX512 void tkvi_##name##_k_avx512(const tkvi_reading *rd, int from, int n,           \
                                                          const float *q, const float *more, int rows,       \
                                                          float *scores) {                                   \
        if (rows == 1)                                                                                       \
            tkvi_decoded_k4_avx512(rd, kind, by_channel, turn, from, n, q, more, rows, 1, scores);           \
        else tkvi_decoded_k4_avx512(rd, kind, by_channel, turn, from, n, q, more, rows, 4, scores);          \
    }
TKVI_DECODED_K_(table, TKVI_CODES_TABLE, 0, 0)
TKVI_DECODED_K_(int8, TKVI_CODES_INT8, 0, 0)
TKVI_DECODED_K_(e4m3, TKVI_CODES_E4M3, 0, 0)
TKVI_DECODED_K_(e5m2, TKVI_CODES_E5M2, 0, 0)
TKVI_DECODED_K_(channels, TKVI_CODES_TABLE, 1, 0)
TKVI_DECODED_K_(turning, TKVI_CODES_TABLE, 1, 1)
#undef TKVI_DECODED_K_

/* Turns 16 v channels in the order of the vectors back. */
TKVI_FLAT_AVX512 void tkvi_turn_back_avx512(const tkvi_reading *r, const float *cosine, const float *sine,
                                            float *x) {
    int v;
    for (v = 0; v < r->pairs; v += 2, x += 32) {
        __m512 c = _mm512_loadu_ps(cosine + 8 * v), s = _mm512_loadu_ps(sine + 8 * v);
        __m512 a = _mm512_load_ps(x), b = _mm512_load_ps(x + 16);
        _mm512_store_ps(x, _mm512_fmadd_ps(b, s, _mm512_mul_ps(a, c)));
        _mm512_store_ps(x + 16, _mm512_fnmadd_ps(a, s, _mm512_mul_ps(b, c)));
    }
}

static TKVI_TARGET_AVX512 void tkvi_decoded_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                     const uint8_t *next, const float *q, const float *ref,
                                                     int rows, int n, int planes, float *scores) {
    static void (*const kinds[6])(const tkvi_reading *rd, int from, int n, const float *q, const float *more,
                                  int rows, float *scores) = {tkvi_table_k_avx512,    tkvi_int8_k_avx512,
                                                              tkvi_e4m3_k_avx512,     tkvi_e5m2_k_avx512,
                                                              tkvi_channels_k_avx512, tkvi_turning_k_avx512};
    TKVI_ALIGNED float x[TKVI_ROWS * TKVI_READ_FLOATS], less[TKVI_ROWS];
    TKVI_ALIGNED float more[TKVI_ROPE_NEAR * TKVI_READ_FLOATS]; /* outliers */
    float *where[TKVI_ROPE_NEAR * TKVI_KVQUANT_SLOTS];
    TKVI_ALIGNED float first[2][TKV_MAX_HEAD_DIM / 2]; /* cosine and sine of the block's start */
    tkvi_reading rd;
    int from, r, t, step, kind;
    if (!tkvi_reading_begin(&rd, s, src, next, &tkvi_helpers_avx512)) {
        tkvi_decoded_k(s, src, next, q, ref, rows, n, planes, scores);
        return;
    }
    if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    if (rd.parts) tkvi_parts_avx512(&rd);
    tkvi_reading_queries(&rd, q, ref, rows, x, less);
    kind = rd.rope ? 5 : rd.by_channel ? 4 : (int)rd.kind;
    step = rd.by_channel ? TKVI_ROPE_NEAR : TKVI_BLOCK;
    if (rd.by_channel) memset(more, 0, (size_t)(16 * 16 * rd.vectors) * sizeof *more);
    if (rd.rope) tkvi_reading_angles(&rd, first[0], first[1]);
    for (from = 0; from < n; from += step) {
        const int count = tkvi_min(step, n - from);
        int out = rd.slots ? tkvi_outliers_k(&rd, from, count, more, where) : 0;
        for (r = 0; r < rows && rd.rope; r++)
            tkvi_turn_back_avx512(&rd, from ? rd.rope->cosine[step] : first[0],
                                  from ? rd.rope->sine[step] : first[1], x + 16 * r * rd.vectors);
        for (r = 0; r < rows; r += 4)
            kinds[kind](&rd, from, count, x + 16 * r * rd.vectors, more, rows - r,
                        scores + r * TKVI_BLOCK + from);
        while (out > 0) *where[--out] = 0.0f;
    }
    for (r = 0; r < rows; r++)
        for (t = 0; t < TKVI_BLOCK; t += 16) {
            float *at = scores + r * TKVI_BLOCK + t;
            _mm512_storeu_ps(at, _mm512_sub_ps(_mm512_loadu_ps(at), _mm512_set1_ps(less[r])));
        }
}

/* nv vectors of 16 channels x up to 4 rows, over all tokens. */
TKVI_FLAT_AVX512 void tkvi_decoded_v4_avx512(const tkvi_reading *rd, const tkvi_code_kind kind,
                                             const float *p, int rows, int n, int first, const int nr,
                                             const int nv, float *out) {
    const uint8_t *src = rd->codes + first * rd->bits / 8;
    const float *by = rd->by;
    tkvi_apart_avx512 apart;
    int t, r, j;
    __m512 acc[4][4];
    tkvi_apart_of_avx512(rd, &apart);
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        TKVI_UNROLL
        for (j = 0; j < nv; j++) acc[r][j] = _mm512_setzero_ps();
    }
    for (t = 0; t < n; t++, src += rd->row, by += rd->per) {
        __m512 x[4];
        if (first == 0) tkvi_reading_prefetch(rd, t);
        TKVI_UNROLL
        for (j = 0; j < nv; j++) {
            x[j] = tkvi_level_avx512(kind, src + 2 * j * rd->bits, &apart, 2);
            x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(by[(first + 16 * j) >> rd->shift]));
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
                float *o = out + r * rd->s->pad + first + 16 * j;
                _mm512_storeu_ps(o, _mm512_add_ps(_mm512_loadu_ps(o), acc[r][j]));
            }
    }
}

#define TKVI_DECODED_V_(name, kind)                                                                          \
    static TKVI_TARGET_AVX512 void tkvi_##name##_v_avx512(const tkvi_reading *rd, const float *p, int rows,  \
                                                          int n, float *out) {                               \
        int c = 0;                                                                                           \
        for (; c + 64 <= rd->s->pad; c += 64) {                                                              \
            if (rows == 1) tkvi_decoded_v4_avx512(rd, kind, p, rows, n, c, 1, 4, out);                       \
            else tkvi_decoded_v4_avx512(rd, kind, p, rows, n, c, 4, 4, out);                                 \
        }                                                                                                    \
        for (; c < rd->s->pad; c += 16) tkvi_decoded_v4_avx512(rd, kind, p, rows, n, c, 4, 1, out);          \
    }
TKVI_DECODED_V_(table, TKVI_CODES_TABLE)
TKVI_DECODED_V_(int8, TKVI_CODES_INT8)
TKVI_DECODED_V_(e4m3, TKVI_CODES_E4M3)
TKVI_DECODED_V_(e5m2, TKVI_CODES_E5M2)
#undef TKVI_DECODED_V_

static TKVI_TARGET_AVX512 void tkvi_decoded_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                     const uint8_t *next, const float *p, int rows, int n,
                                                     int planes, float *out) {
    static void (*const kinds[4])(const tkvi_reading *rd, const float *p, int rows, int n, float *out) = {
        tkvi_table_v_avx512, tkvi_int8_v_avx512, tkvi_e4m3_v_avx512, tkvi_e5m2_v_avx512};
    TKVI_ALIGNED float sum[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    tkvi_reading rd;
    float *o = s->grid && s->rotate ? sum : out;
    int r, c, t;
    if (!tkvi_reading_begin(&rd, s, src, next, &tkvi_helpers_avx512)) {
        tkvi_decoded_v(s, src, next, p, rows, n, planes, out);
        return;
    }
    if (rd.parts) tkvi_parts_avx512(&rd);
    if (o == sum) memset(sum, 0, (size_t)(rows * s->pad) * sizeof(float));
    for (r = 0; r < rows; r += 4) kinds[rd.kind](&rd, p + r * TKVI_BLOCK, rows - r, n, o + r * s->pad);
    for (r = 0; r < rows && o == sum; r++) {
        tkvi_rotate_back(sum + r * s->pad, s->dim);
        for (c = 0; c < s->dim; c++) out[r * s->pad + c] += sum[r * s->pad + c];
    }
    if (rd.slots) tkvi_outliers_v(&rd, p, rows, n, out);
    for (r = 0; r < rows && !s->grid; r++) { /* the middles of KVQUANT */
        __m512 plus = _mm512_setzero_ps();
        for (t = 0; t < TKVI_BLOCK; t += 16)
            plus =
                _mm512_fmadd_ps(_mm512_load_ps(rd.plus + t), _mm512_loadu_ps(p + r * TKVI_BLOCK + t), plus);
        plus = _mm512_set1_ps(_mm512_reduce_add_ps(plus));
        for (c = 0; c < s->pad; c += 16)
            _mm512_storeu_ps(out + r * s->pad + c,
                             _mm512_add_ps(_mm512_loadu_ps(out + r * s->pad + c), plus));
    }
}

/* >>tiles */
/* Codes shifted right by `right` where they stand (left if negative), `bits` of them masked out; the 16-bit shift
 * moves bits into the neighbour byte, the mask takes them away. */
TKVI_FLAT_AVX512 __m512i tkvi_field_avx512(__m512i x, const int right, const int mask) {
    if (right > 0) x = _mm512_srli_epi16(x, (unsigned char)right);
    if (right < 0) x = _mm512_slli_epi16(x, (unsigned char)-right);
    return _mm512_and_si512(x, _mm512_set1_epi8((char)mask));
}

/* The codes of one tile as bytes, plane by plane; see tile.h for what stands where. */
TKVI_FLAT_AVX512 void tkvi_planes_avx512(const int width, const uint8_t *wide, const uint8_t *tops, int half,
                                         __m512i *code) {
    const int low = width >= 4 ? 4 : width >= 2 ? 2 : 0; /* bits that are not in the 1-bit half */
    int p;
    if (width == 8) {
        TKVI_UNROLL
        for (p = 0; p < 4; p++) code[p] = tkvi_bytes_avx512(wide + 64 * p);
        return;
    }
    if (low == 4) {
        TKVI_UNROLL
        for (p = 0; p < 4; p++)
            code[p] = tkvi_field_avx512(tkvi_bytes_avx512(wide + p / 2 * 64), p % 2 * 4, 15);
    } else if (low == 2) {
        const __m512i x = tkvi_bytes_avx512(wide);
        TKVI_UNROLL
        for (p = 0; p < 4; p++) code[p] = tkvi_field_avx512(x, 2 * p, 3);
    }
    if (width == 6) {
        const __m512i x = tkvi_bytes_avx512(wide + 128);
        TKVI_UNROLL
        for (p = 0; p < 4; p++) code[p] = _mm512_or_si512(code[p], tkvi_field_avx512(x, 2 * p - 4, 48));
    }
    if (width & 1) {
        const __m512i x =
            _mm512_srl_epi16(tkvi_bytes_avx512(tops + (half >> 1) * 64), _mm_cvtsi32_si128((half & 1) * 4));
        TKVI_UNROLL
        for (p = 0; p < 4; p++) {
            const __m512i top = tkvi_field_avx512(x, p - low, 1 << low);
            code[p] = width == 1 ? top : _mm512_or_si512(code[p], top);
        }
    }
}

#define TKVI_BIAS_AVX512 127

/* The 16 levels in each 128-bit quarter. */
TKVI_FLAT_AVX512 __m512i tkvi_levels_avx512(const int8_t *levels, int bias) {
    __m512i x = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)levels));
    return _mm512_add_epi8(x, _mm512_set1_epi8((char)bias));
}

/* 64 neighbours from four vectors that were packed to bytes. */
TKVI_FLAT_AVX512 __m512i tkvi_in_order_avx512(__m512i x) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                    x);
}

TKVI_FLAT_AVX512 __m512i tkvi_nearest_avx512(__m512 x) {
    return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Which of four rows want two planes, by their largest weights and sums of squares. */
TKVI_FLAT_AVX512 __mmask8 tkvi_tower_avx512(const tkvi_folding *a, __m128 most, __m128 squares, int top) {
    return _mm_cmp_ps_mask(_mm_mul_ps(_mm_mul_ps(_mm_set1_ps(a->coarse), most), most),
                           _mm_mul_ps(_mm_set1_ps(TKVI_MAY_ERR(top)), squares), _CMP_GT_OQ);
}

/* Four rows go together so that their horizontal sums do, four vectors so that they pack to one of bytes. Rows that
 * are not there repeat the last one. */
TKVI_FLAT_AVX512 int tkvi_fold_k4_avx512(const tkvi_folding *a, int first, int left, const int nr,
                                         tkvi_fold *f) {
    TKVI_ALIGNED float folded[4][TKV_MAX_HEAD_DIM];
    __m512 most[4], rest[4], squares[4];
    __m512i middle[4], middle_lo[4];
    __m128 m, step, inverse;
    __mmask8 tower;
    TKVI_ALIGNED float by[4];
    int i, j, r, second = a->wide;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) {
        most[r] = rest[r] = squares[r] = _mm512_setzero_ps();
        middle[r] = middle_lo[r] = _mm512_setzero_si512();
    }
    for (i = 0; i < a->n; i += 16) {
        __m512 scale = _mm512_loadu_ps(a->scale + i);
        __m512i twice =
            _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(a->centre2 + i)));
        __m512 centre = _mm512_mul_ps(_mm512_cvtepi32_ps(twice), _mm512_set1_ps(a->half));
        __m512 zero = _mm512_sub_ps(_mm512_loadu_ps(a->zero + i), _mm512_loadu_ps(a->ref + i));
        zero = _mm512_fmadd_ps(centre, scale, zero);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            const __m512 v = _mm512_loadu_ps(a->x + (first + tkvi_min(r, left - 1)) * a->n + i);
            const __m512 y = _mm512_mul_ps(v, scale);
            most[r] = _mm512_max_ps(most[r], _mm512_abs_ps(y));
            rest[r] = _mm512_fmadd_ps(v, zero, rest[r]);
            squares[r] = _mm512_fmadd_ps(y, y, squares[r]);
            _mm512_store_ps(folded[r] + i, y);
        }
    }
    for (; i % 64 != 0; i += 16) {
        TKVI_UNROLL
        for (r = 0; r < nr; r++) _mm512_store_ps(folded[r] + i, _mm512_setzero_ps());
    }
    m = tkvi_max4_avx512(most);
    tower = tkvi_tower_avx512(a, m, tkvi_sum4_avx512(squares), TKVI_PLANE);
    if (a->planes == 2) tower = 15;
    if (tower) second = a->n;
    inverse = _mm_maskz_div_ps(_mm_cmp_ps_mask(m, _mm_set1_ps(1e-34f), _CMP_GT_OQ),
                               _mm_set1_ps((float)TKVI_PLANE), m);
    _mm_store_ps(by, inverse);
    step = _mm_div_ps(m, _mm_set1_ps((float)TKVI_PLANE));
    for (i = 0; i < a->n; i += 64) {
        const __m512i c = tkvi_bytes_avx512(a->centre2 + i);
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            const int at = (first + r) * TKV_MAX_HEAD_DIM + i;
            const __m512 inverse_r = _mm512_set1_ps(by[r]);
            __m512 y[4];
            __m512i v[4];
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                y[j] = _mm512_mul_ps(_mm512_load_ps(folded[r] + i + 16 * j), inverse_r);
                v[j] = tkvi_nearest_avx512(y[j]);
            }
            v[0] = _mm512_packs_epi32(v[0], v[1]);
            v[1] = _mm512_packs_epi32(v[2], v[3]);
            if (i < second) { /* v = 128 hi + lo, lo 0..127; narrow ones have no lo */
                const int two = (tower >> r & 1) ? a->n - i : a->wide - i;
                const __mmask64 wide = two >= 64 ? ~(__mmask64)0 : two > 0 ? ((__mmask64)1 << two) - 1 : 0;
                __m512i u[4], full, lo;
                TKVI_UNROLL
                for (j = 0; j < 4; j++)
                    u[j] = tkvi_nearest_avx512(_mm512_mul_ps(y[j], _mm512_set1_ps(128.0f)));
                u[0] = _mm512_packs_epi32(u[0], u[1]);
                u[1] = _mm512_packs_epi32(u[2], u[3]);
                full = tkvi_in_order_avx512(
                    _mm512_packs_epi16(_mm512_srai_epi16(u[0], 7), _mm512_srai_epi16(u[1], 7)));
                lo = tkvi_in_order_avx512(_mm512_packs_epi16(_mm512_and_si512(u[0], _mm512_set1_epi16(127)),
                                                             _mm512_and_si512(u[1], _mm512_set1_epi16(127))));
                lo = _mm512_maskz_mov_epi8(wide, lo);
                _mm512_storeu_si512((void *)(a->lo + at), lo);
                middle_lo[r] = _mm512_dpbusd_epi32(middle_lo[r], c, lo);
                v[0] = _mm512_mask_mov_epi8(tkvi_in_order_avx512(_mm512_packs_epi16(v[0], v[1])), wide, full);
            } else {
                v[0] = tkvi_in_order_avx512(_mm512_packs_epi16(v[0], v[1]));
            }
            _mm512_storeu_si512((void *)(a->w + at), v[0]);
            middle[r] = _mm512_dpbusd_epi32(middle[r], c, v[0]);
        }
    }
    tkvi_plane_avx2(&f[0], first, step, tkvi_sum4_avx512(rest), tkvi_isum4_avx512(middle));
    tkvi_plane_avx2(&f[1], first, _mm_mul_ps(step, _mm_set1_ps(1.0f / 128.0f)), _mm_setzero_ps(),
                    second ? tkvi_isum4_avx512(middle_lo) : _mm_setzero_si128());
    return second;
}

/* p has 64 tokens: it stays in registers from its products to its bytes. */
TKVI_FLAT_AVX512 int tkvi_fold_v4_avx512(const tkvi_folding *a, int first, int left, const int nr,
                                         tkvi_fold *f) {
    const __m512i ones = _mm512_set1_epi8(1), low = _mm512_set1_epi16(127);
    __m512 y[4][4], most[4], rest[4], squares[4];
    __m512i sum[4], sum_lo[4];
    __m128 m, top, step;
    __mmask8 tower;
    TKVI_ALIGNED float by[4];
    int j, r;
    TKVI_UNROLL
    for (r = 0; r < 4; r++) {
        most[r] = rest[r] = squares[r] = _mm512_setzero_ps();
        sum[r] = sum_lo[r] = _mm512_setzero_si512();
    }
    TKVI_UNROLL
    for (j = 0; j < 4; j++) {
        const __m512 scale = _mm512_loadu_ps(a->scale + 16 * j);
        const __m512 zero =
            _mm512_fmadd_ps(scale, _mm512_set1_ps(a->centre), _mm512_loadu_ps(a->zero + 16 * j));
        TKVI_UNROLL
        for (r = 0; r < nr; r++) {
            const __m512 v = _mm512_loadu_ps(a->x + (first + tkvi_min(r, left - 1)) * TKVI_BLOCK + 16 * j);
            y[r][j] = _mm512_mul_ps(v, scale);
            most[r] = _mm512_max_ps(most[r], _mm512_abs_ps(y[r][j]));
            rest[r] = _mm512_fmadd_ps(v, zero, rest[r]);
            squares[r] = _mm512_fmadd_ps(y[r][j], y[r][j], squares[r]);
        }
    }
    m = tkvi_max4_avx512(most);
    tower = a->planes == 2 ? 15 : tkvi_tower_avx512(a, m, tkvi_sum4_avx512(squares), a->top);
    top = _mm_mask_mov_ps(_mm_set1_ps((float)a->top), tower, _mm_set1_ps((float)TKVI_TWO_PLANES));
    _mm_store_ps(by, _mm_maskz_div_ps(_mm_cmp_ps_mask(m, _mm_set1_ps(1e-34f), _CMP_GT_OQ), top, m));
    top = _mm_mask_mov_ps(top, tower, _mm_set1_ps((float)TKVI_PLANE));
    step = _mm_div_ps(m, top);
    TKVI_UNROLL
    for (r = 0; r < nr; r++) {
        const int at = (first + r) * TKVI_BLOCK;
        const __m512 inverse = _mm512_set1_ps(by[r]);
        __m512i v[4], lo = _mm512_setzero_si512();
        TKVI_UNROLL
        for (j = 0; j < 4; j++) v[j] = tkvi_nearest_avx512(_mm512_mul_ps(y[r][j], inverse));
        v[0] = _mm512_packus_epi32(v[0], v[1]);
        v[1] = _mm512_packus_epi32(v[2], v[3]);
        if (tower) {
            if (tower >> r & 1) { /* 128 hi + lo, lo 0..127 */
                lo = tkvi_in_order_avx512(
                    _mm512_packus_epi16(_mm512_and_si512(v[0], low), _mm512_and_si512(v[1], low)));
                v[0] = _mm512_srli_epi16(v[0], 7);
                v[1] = _mm512_srli_epi16(v[1], 7);
            }
            _mm512_storeu_si512((void *)(a->lo + at), lo);
            sum_lo[r] = _mm512_dpbusd_epi32(sum_lo[r], lo, ones);
        }
        v[0] = tkvi_in_order_avx512(_mm512_packus_epi16(v[0], v[1]));
        _mm512_storeu_si512((void *)(a->w + at), v[0]);
        sum[r] = _mm512_dpbusd_epi32(sum[r], v[0], ones);
    }
    tkvi_plane_avx2(&f[0], first, step, tkvi_sum4_avx512(rest),
                    _mm_mullo_epi32(tkvi_isum4_avx512(sum), _mm_set1_epi32(a->middle)));
    tkvi_plane_avx2(&f[1], first, _mm_mul_ps(step, _mm_set1_ps(1.0f / 128.0f)), _mm_setzero_ps(),
                    tower ? _mm_mullo_epi32(tkvi_isum4_avx512(sum_lo), _mm_set1_epi32(a->middle))
                          : _mm_setzero_si128());
    return tower;
}

static TKVI_TARGET_AVX512 int tkvi_fold_k_avx512(const tkvi_folding *a, int rows, tkvi_fold *f) {
    int r, second = 0;
    for (r = 0; r < rows; r += 4)
        second = tkvi_max(second, rows - r == 1   ? tkvi_fold_k4_avx512(a, r, 1, 1, f)
                                  : rows - r == 2 ? tkvi_fold_k4_avx512(a, r, 2, 2, f)
                                                  : tkvi_fold_k4_avx512(a, r, rows - r, 4, f));
    return second;
}

static TKVI_TARGET_AVX512 int tkvi_fold_v_avx512(const tkvi_folding *a, int rows, tkvi_fold *f) {
    int r, second = 0;
    for (r = 0; r < rows; r += 4)
        second |= (rows - r == 1   ? tkvi_fold_v4_avx512(a, r, 1, 1, f)
                   : rows - r == 2 ? tkvi_fold_v4_avx512(a, r, 2, 2, f)
                                   : tkvi_fold_v4_avx512(a, r, rows - r, 4, f))
                  << r;
    return second;
}

/* 16 sums of row r become answers at out[at]. */
TKVI_FLAT_AVX512 void tkvi_answer_avx512(const tkvi_products *d, const tkvi_fold *f, int r, int at,
                                         const int add, __m512i sum) {
    const __m512 x = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(f->base[d->first + r])));
    __m512 rest = _mm512_set1_ps(f->rest[d->first + r]);
    float *out = d->out + f->row[d->first + r] * d->out_stride + at;
    if (add) rest = _mm512_add_ps(rest, _mm512_loadu_ps(out));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(x, _mm512_set1_ps(f->step[d->first + r]), rest));
}

/* Accumulators of four rows, one vector for each plane (K) or slab and parity of planes (V). Named ones stay in
 * registers with every compiler, arrays do not. */
#define TKVI_ROWS_(X) X(0) X(1) X(2) X(3)
#define TKVI_ZERO_(r) __m512i a##r = _mm512_setzero_si512(), b##r = a##r, c##r = a##r, d##r = a##r;
#define TKVI_SAVE_(r)                                                                                        \
    if (r < nw && (nw < 4 || r < d->rows)) {                                                                 \
        tkvi_answer_avx512(d, d->fold, r, 0, add, a##r);                                                     \
        tkvi_answer_avx512(d, d->fold, r, 16, add, b##r);                                                    \
        tkvi_answer_avx512(d, d->fold_group, r, 32, add, c##r);                                              \
        tkvi_answer_avx512(d, d->fold_group, r, 48, add, d##r);                                              \
    }
#define TKVI_MAC_(r)                                                                                         \
    if (r < nw) {                                                                                            \
        four = _mm512_set1_epi32(tkvi_four(w + r * TKV_MAX_HEAD_DIM));                                       \
        a##r = _mm512_dpbusd_epi32(a##r, x[0], four);                                                        \
        b##r = _mm512_dpbusd_epi32(b##r, x[1], four);                                                        \
        four = _mm512_set1_epi32(tkvi_four(w + r * TKV_MAX_HEAD_DIM + d->w_group));                          \
        c##r = _mm512_dpbusd_epi32(c##r, x[2], four);                                                        \
        d##r = _mm512_dpbusd_epi32(d##r, x[3], four);                                                        \
    }
#define TKVI_RUN_(width)                                                                                     \
    i = tkvi_min(s->runs.n[width], left);                                                                    \
    for (left -= i; i > 0; i--, w += 4) {                                                                    \
        tkvi_planes_avx512(width, wide, d->tops, half, x);                                                   \
        if (s->levels && width <= 4) {                                                                       \
            x[0] = _mm512_shuffle_epi8(table, x[0]);                                                         \
            x[1] = _mm512_shuffle_epi8(table, x[1]);                                                         \
            x[2] = _mm512_shuffle_epi8(table, x[2]);                                                         \
            x[3] = _mm512_shuffle_epi8(table, x[3]);                                                         \
        }                                                                                                    \
        if (d->ahead && (i & d->turns) == d->turn) {                                                         \
            tkvi_prefetch_bytes(wide, tkvi_wide_bytes[width], d->ahead);                                     \
            tkvi_prefetch_rest(d);                                                                           \
        }                                                                                                    \
        wide += tkvi_wide_bytes[width];                                                                      \
        half += tkvi_has_half[width];                                                                        \
        TKVI_ROWS_(TKVI_MAC_)                                                                                \
    }

/* K: plane p of a tile is tokens 16p .. 16p + 15, its lanes. */
TKVI_FLAT_AVX512 void tkvi_dot_k_avx512(tkvi_products *d, const int nw) {
    const tkvi_side *s = d->s;
    const uint8_t *wide = d->wide;
    const int8_t *w = d->w;
    __m512i table = _mm512_setzero_si512(), x[4], four;
    int half = d->half, left = d->tiles, i;
    TKVI_ROWS_(TKVI_ZERO_)
    if (s->levels) table = tkvi_levels_avx512(s->levels, TKVI_BIAS_AVX512);
    TKVI_RUN_(8)
    TKVI_RUN_(6)
    TKVI_RUN_(5)
    TKVI_RUN_(4)
    TKVI_RUN_(3)
    TKVI_RUN_(2)
    TKVI_RUN_(1)
    if (d->add) {
        const int add = 1;
        TKVI_ROWS_(TKVI_SAVE_)
    } else {
        const int add = 0;
        TKVI_ROWS_(TKVI_SAVE_)
    }
}
#undef TKVI_RUN_
#undef TKVI_MAC_
#undef TKVI_SAVE_

#define TKVI_MAC_(r)                                                                                         \
    if (r < nw) {                                                                                            \
        four = _mm512_set1_epi32(tkvi_four(w + r * TKVI_BLOCK + 0));                                         \
        a##r = _mm512_dpbusd_epi32(a##r, four, x[0]);                                                        \
        b##r = _mm512_dpbusd_epi32(b##r, four, y[0]);                                                        \
        four = _mm512_set1_epi32(tkvi_four(w + r * TKVI_BLOCK + 4));                                         \
        c##r = _mm512_dpbusd_epi32(c##r, four, x[1]);                                                        \
        d##r = _mm512_dpbusd_epi32(d##r, four, y[1]);                                                        \
        four = _mm512_set1_epi32(tkvi_four(w + r * TKVI_BLOCK + 8));                                         \
        a##r = _mm512_dpbusd_epi32(a##r, four, x[2]);                                                        \
        b##r = _mm512_dpbusd_epi32(b##r, four, y[2]);                                                        \
        four = _mm512_set1_epi32(tkvi_four(w + r * TKVI_BLOCK + 12));                                        \
        c##r = _mm512_dpbusd_epi32(c##r, four, x[3]);                                                        \
        d##r = _mm512_dpbusd_epi32(d##r, four, y[3]);                                                        \
    }
#define TKVI_SAVE_(r)                                                                                        \
    if (r < nw && (nw < 4 || r < d->rows)) {                                                                 \
        tkvi_answer_avx512(d, d->fold, r, at, 1, _mm512_add_epi32(a##r, c##r));                              \
        if (how == TKVI_PAIRS || next)                                                                       \
            tkvi_answer_avx512(d, d->fold, r, at + 16, 1, _mm512_add_epi32(b##r, d##r));                     \
    }
enum { TKVI_PLAIN, TKVI_TABLE, TKVI_PAIRS };

/* V: lanes are 16 channels of one slab (a, c) and of the next (b, d), or the two channels of pairs. Weights are the
 * unsigned operand, codes the signed one. Of an odd number of slabs the last is done twice. */
TKVI_FLAT_AVX512 void tkvi_dot_slabs_avx512(tkvi_products *d, int slab, const int width, const int how,
                                            const int nw) {
    const int bytes = tkvi_wide_bytes[width], has_half = tkvi_has_half[width];
    const int next = how == TKVI_PAIRS || slab + 1 >= d->slabs ? 0 : 4; /* tiles from one slab to the other */
    const uint8_t *wide = d->wide + 4 * slab * bytes;
    const int8_t *w = d->w;
    const int at = how == TKVI_PAIRS ? 32 * slab : 16 * slab;
    __m512i table = _mm512_setzero_si512(), upper = table, x[4], y[4], four;
    int half = d->half + 4 * slab * has_half, t, p;
    TKVI_ROWS_(TKVI_ZERO_)
    if (how != TKVI_PLAIN) {
        table = upper = tkvi_levels_avx512(d->s->levels + tkvi_level_table(d->s, width, 0), 0);
        if (how == TKVI_PAIRS) upper = tkvi_levels_avx512(d->s->levels + tkvi_level_table(d->s, width, 1), 0);
    }
    for (t = 0; t < d->n; t += 16, w += 16) { /* a tile has 16 tokens, a plane four */
        tkvi_planes_avx512(width, wide, d->tops, half, x);
        if (how != TKVI_PAIRS)
            tkvi_planes_avx512(width, wide + next * bytes, d->tops, half + next * has_half, y);
        TKVI_UNROLL
        for (p = 0; p < 4; p++) {
            if (how != TKVI_PLAIN) {
                y[p] = _mm512_shuffle_epi8(upper, how == TKVI_PAIRS ? x[p] : y[p]);
                x[p] = _mm512_shuffle_epi8(table, x[p]);
            } else if (width == 8) {
                x[p] = _mm512_xor_si512(x[p], _mm512_set1_epi8(-128));
                y[p] = _mm512_xor_si512(y[p], _mm512_set1_epi8(-128));
            }
        }
        if (d->ahead && (t / 16 & d->turns) == d->turn) {
            tkvi_prefetch_bytes(wide, bytes, d->ahead);
            if (next) tkvi_prefetch_bytes(wide + next * bytes, bytes, d->ahead);
            tkvi_prefetch_rest(d);
            if (has_half)
                tkvi_prefetch_rest(d); /* these two tiles have one line more, and there are scales */
        }
        TKVI_ROWS_(TKVI_MAC_)
        wide += bytes;
        half += has_half;
    }
    TKVI_ROWS_(TKVI_SAVE_)
}
#undef TKVI_ROWS_
#undef TKVI_ZERO_
#undef TKVI_MAC_
#undef TKVI_SAVE_

/* What is seldom met (1, 5, 6 bits; one table): four rows, however many there are, and nothing constant, as each kind
 * takes a compiler its time. */
static TKVI_TARGET_AVX512 void tkvi_dot_seldom_avx512(tkvi_products *d) {
    int i;
    for (i = 0; i < d->slabs; i += 2)
        tkvi_dot_slabs_avx512(d, i, d->width, d->s->levels ? TKVI_TABLE : TKVI_PLAIN, 4);
}

#define TKVI_SLABS_(width)                                                                                   \
    case width:                                                                                              \
        for (i = 0; i < d->slabs; i += 2) tkvi_dot_slabs_avx512(d, i, width, TKVI_PLAIN, nw);                \
        break;
TKVI_FLAT_AVX512 void tkvi_dot_v_avx512(tkvi_products *d, const int nw) {
    int i;
    if (d->pairs)
        for (i = 0; i < d->slabs; i++) tkvi_dot_slabs_avx512(d, i, 3, TKVI_PAIRS, nw);
    else switch (d->s->levels ? 0 : d->width) {
            TKVI_SLABS_(2)
            TKVI_SLABS_(3)
            TKVI_SLABS_(4)
            TKVI_SLABS_(8)
        default: tkvi_dot_seldom_avx512(d);
        }
}
#undef TKVI_SLABS_

/* Each number of rows is a function of its own: clang 14 keeps the accumulators in memory otherwise. */
#define TKVI_DOTS_AVX512_(nw)                                                                                \
    static TKVI_TARGET_AVX512 void tkvi_dot_k##nw##_avx512(tkvi_products *d) { tkvi_dot_k_avx512(d, nw); }   \
    static TKVI_TARGET_AVX512 void tkvi_dot_v##nw##_avx512(tkvi_products *d) { tkvi_dot_v_avx512(d, nw); }
TKVI_DOTS_AVX512_(1)
TKVI_DOTS_AVX512_(2)
TKVI_DOTS_AVX512_(4)
#undef TKVI_DOTS_AVX512_

/* All rows, in the passes that registers allow: 1, 2 or 4. What rows beyond the last one add up to is left. */
static void tkvi_dot_avx512(tkvi_products *d, int rows) {
    static const tkvi_dot dots[2][3] = {
        {tkvi_dot_k1_avx512, tkvi_dot_k2_avx512, tkvi_dot_k4_avx512},
        {tkvi_dot_v1_avx512, tkvi_dot_v2_avx512, tkvi_dot_v4_avx512},
    };
    tkvi_dot_rows(d, rows, dots[d->s->which]);
}

static const tkvi_steps tkvi_steps_avx512 = {&tkvi_helpers_avx512, tkvi_fold_k_avx512, tkvi_fold_v_avx512,
                                             tkvi_dot_avx512,      TKVI_BIAS_AVX512,   128};

static void tkvi_tiles_k_avx512(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                                const float *ref, int rows, int n, int planes, float *scores) {
    (void)n;
    tkvi_tiles_k(&tkvi_steps_avx512, s, src, next, q, ref, rows, planes, scores);
}

static void tkvi_tiles_v_avx512(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                                int rows, int n, int planes, float *out) {
    tkvi_tiles_v(&tkvi_steps_avx512, s, src, next, p, rows, n, planes, out);
}

/* Four rows at once; rows that are not there repeat the last one. */
static TKVI_TARGET_AVX512 int tkvi_weigh_avx512(const float *s, int rows, float *m, float *sum, float *p) {
    int first, r, t, seen = 0;
    for (first = 0; first < rows; first += 4) {
        const int nr = tkvi_min(4, rows - first);
        const __mmask8 there = (__mmask8)((1 << nr) - 1);
        const float *row[4];
        TKVI_ALIGNED float top[4];
        __m512 most[4], sums[4];
        __m128 high;
        __mmask8 sees;
        TKVI_UNROLL
        for (r = 0; r < 4; r++) {
            row[r] = s + (first + tkvi_min(r, nr - 1)) * TKVI_BLOCK;
            most[r] =
                _mm512_max_ps(_mm512_max_ps(_mm512_loadu_ps(row[r]), _mm512_loadu_ps(row[r] + 16)),
                              _mm512_max_ps(_mm512_loadu_ps(row[r] + 32), _mm512_loadu_ps(row[r] + 48)));
            sums[r] = _mm512_setzero_ps();
        }
        high = tkvi_max4_avx512(most);
        sees = _mm_mask_cmp_ps_mask(there, high, _mm_set1_ps(TKVI_HIDDEN), _CMP_GT_OQ);
        seen += (int)sees;
        high = _mm_max_ps(high, _mm_maskz_loadu_ps(there, m + first)); /* hidden rows: 0, and exp of -1e30 */
        _mm_mask_storeu_ps(m + first, sees, high);
        _mm_store_ps(top, _mm_maskz_mov_ps(sees, high));
        for (r = 0; r < nr; r++)
            for (t = 0; t < TKVI_BLOCK; t += 16) {
                const __m512 y =
                    tkvi_exp_avx512(_mm512_sub_ps(_mm512_loadu_ps(row[r] + t), _mm512_set1_ps(top[r])));
                _mm512_storeu_ps(p + (first + r) * TKVI_BLOCK + t, y);
                sums[r] = _mm512_add_ps(sums[r], y);
            }
        _mm_mask_storeu_ps(sum + first, there, tkvi_sum4_avx512(sums));
    }
    return seen;
}

static const tkvi_kernels tkvi_kernels_avx512 = {
    TKV_ISA_AVX512,
    "avx512",
    {tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_tiles_k_avx512,
     tkvi_decoded_k_avx512},
    {tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_tiles_v_avx512,
     tkvi_decoded_v_avx512},
    &tkvi_helpers_avx512,
    tkvi_exp64_avx512,
    tkvi_max64_avx512,
    tkvi_weigh_avx512,
};

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* TKVI_AVX512 */

#endif /* TKVI_KERNELS_AVX512_H */
/* ======== kernels_neon.h ======== */
/*
 * kernels_neon.h - the pieces of kernels_128.h for NEON on AArch64, little-endian. Products of bytes are one
 * instruction (sdot) where the compiler is told of it: -march=armv8.2-a+dotprod, -mcpu=native, Apple's default.
 *
 * Weights are bytes, a row of them for each plane. Four neighbours of four rows are one vector, `quad`; sdot
 * picks the row by its lane.
 *
 *     codes   | t0: r0 r1 r2 r3 | t1: r0 r1 r2 r3 | t2 ...  | t3 ...  |   16 bytes: 4 tokens (V: channels) x 4
 *     quad    | row 0: r0 .. r3 | row 1           | row 2   | row 3   |
 *     sum     | t0              | t1              | t2      | t3      |   += codes . quad[row]
 *
 * Calls kernels.h.
 */
#ifndef TKVI_KERNELS_NEON_H
#define TKVI_KERNELS_NEON_H


#if !defined(TKV_NO_SIMD) && defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__) &&       \
    (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
#define TKVI_NEON
#define TKVI_128
#include <arm_neon.h>

#define TKVI_FLAT_128 static inline __attribute__((always_inline))
#define TKVI_ISA_128 TKV_ISA_NEON
#define TKVI_NAME_128 "neon"

typedef float32x4_t tkvi_f4;
typedef int32x4_t tkvi_i4;
typedef uint8x16_t tkvi_b16;

/* >>floats */
TKVI_FLAT_128 tkvi_f4 tkvi_load_128(const float *p) { return vld1q_f32(p); }
TKVI_FLAT_128 void tkvi_save_128(float *p, tkvi_f4 x) { vst1q_f32(p, x); }
TKVI_FLAT_128 tkvi_f4 tkvi_all_128(float x) { return vdupq_n_f32(x); }
TKVI_FLAT_128 tkvi_f4 tkvi_add_128(tkvi_f4 a, tkvi_f4 b) { return vaddq_f32(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_sub_128(tkvi_f4 a, tkvi_f4 b) { return vsubq_f32(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_mul_128(tkvi_f4 a, tkvi_f4 b) { return vmulq_f32(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_madd_128(tkvi_f4 a, tkvi_f4 x, tkvi_f4 y) { return vfmaq_f32(a, x, y); }
TKVI_FLAT_128 tkvi_f4 tkvi_most_128(tkvi_f4 a, tkvi_f4 b) { return vmaxq_f32(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_size_128(tkvi_f4 x) { return vabsq_f32(x); }
TKVI_FLAT_128 float tkvi_sum_128(tkvi_f4 x) { return vaddvq_f32(x); }
TKVI_FLAT_128 float tkvi_largest_128(tkvi_f4 x) { return vmaxvq_f32(x); }

/* y where x >= least, else 0. */
TKVI_FLAT_128 tkvi_f4 tkvi_where_128(tkvi_f4 y, tkvi_f4 x, float least) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(y), vcgeq_f32(x, vdupq_n_f32(least))));
}

/* The sums of four vectors. */
TKVI_FLAT_128 tkvi_f4 tkvi_sums_128(tkvi_f4 a, tkvi_f4 b, tkvi_f4 c, tkvi_f4 d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

TKVI_FLAT_128 tkvi_f4 tkvi_halves4_128(const uint8_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

TKVI_FLAT_128 tkvi_f4 tkvi_any_halves4_128(const uint8_t *p) { return tkvi_halves4_128(p); }

TKVI_FLAT_128 tkvi_f4 tkvi_bfloats4_128(const uint8_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}

/* >>integers */
TKVI_FLAT_128 tkvi_i4 tkvi_ints_128(const int32_t *p) { return vld1q_s32(p); }
TKVI_FLAT_128 void tkvi_save_ints_128(int32_t *p, tkvi_i4 x) { vst1q_s32(p, x); }
TKVI_FLAT_128 tkvi_i4 tkvi_all_ints_128(int32_t x) { return vdupq_n_s32(x); }
TKVI_FLAT_128 tkvi_i4 tkvi_add_ints_128(tkvi_i4 a, tkvi_i4 b) { return vaddq_s32(a, b); }
TKVI_FLAT_128 tkvi_i4 tkvi_sub_ints_128(tkvi_i4 a, tkvi_i4 b) { return vsubq_s32(a, b); }
TKVI_FLAT_128 tkvi_i4 tkvi_mul_ints_128(tkvi_i4 a, tkvi_i4 b) { return vmulq_s32(a, b); }
TKVI_FLAT_128 int32_t tkvi_sum_ints_128(tkvi_i4 x) { return vaddvq_s32(x); }
#define TKVI_LEFT_INTS_128(x, n) vshlq_n_s32(x, n)
TKVI_FLAT_128 tkvi_i4 tkvi_nearest_128(tkvi_f4 x) { return vcvtnq_s32_f32(x); } /* ties to even */
TKVI_FLAT_128 tkvi_f4 tkvi_float_128(tkvi_i4 x) { return vcvtq_f32_s32(x); }
TKVI_FLAT_128 tkvi_f4 tkvi_bits_128(tkvi_i4 x) { return vreinterpretq_f32_s32(x); }

/* Four signed bytes. */
TKVI_FLAT_128 tkvi_i4 tkvi_bytes4_128(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(x)))));
}

/* >>bytes */
TKVI_FLAT_128 tkvi_b16 tkvi_bytes_128(const uint8_t *p) { return vld1q_u8(p); }
TKVI_FLAT_128 void tkvi_save_bytes_128(uint8_t *p, tkvi_b16 x) { vst1q_u8(p, x); }
TKVI_FLAT_128 tkvi_b16 tkvi_all_bytes_128(int x) { return vdupq_n_u8((uint8_t)x); }
TKVI_FLAT_128 tkvi_b16 tkvi_and_128(tkvi_b16 a, tkvi_b16 b) { return vandq_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_or_128(tkvi_b16 a, tkvi_b16 b) { return vorrq_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_xor_128(tkvi_b16 a, tkvi_b16 b) { return veorq_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_add_bytes_128(tkvi_b16 a, tkvi_b16 b) { return vaddq_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_test_128(tkvi_b16 a, tkvi_b16 b) { return vtstq_u8(a, b); } /* 255 where a & b */
TKVI_FLAT_128 tkvi_b16 tkvi_look_up_128(tkvi_b16 table, tkvi_b16 x) { return vqtbl1q_u8(table, x); }
#define TKVI_RIGHT_128(x, n) vshrq_n_u8(x, n)
#define TKVI_LEFT_128(x, n) vshlq_n_u8(x, n)

/* Neighbours a b: bytes, or pairs of them, of the first and of the second half. */
TKVI_FLAT_128 tkvi_b16 tkvi_zip1_128(tkvi_b16 a, tkvi_b16 b) { return vzip1q_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_zip2_128(tkvi_b16 a, tkvi_b16 b) { return vzip2q_u8(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_zip1_pairs_128(tkvi_b16 a, tkvi_b16 b) {
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
TKVI_FLAT_128 tkvi_b16 tkvi_zip2_pairs_128(tkvi_b16 a, tkvi_b16 b) {
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}

/* >>products */
#define TKVI_PASS_128 8 /* weight rows at once: 16 sums in registers */
TKVI_FLAT_128 int tkvi_weight_rows_128(int planes) { return planes; }
typedef int8_t tkvi_weight;
typedef int8x16_t tkvi_codes_128;
typedef int8x16_t tkvi_quad_128;

TKVI_FLAT_128 tkvi_codes_128 tkvi_load_codes_128(const uint8_t *p) {
    return vreinterpretq_s8_u8(vld1q_u8(p));
}
TKVI_FLAT_128 tkvi_quad_128 tkvi_load_quad_128(const tkvi_weight *w) { return vld1q_s8(w); }

/* Weights of two steps of a row, the second one `further` on; of two planes, x = 128 high + low with low
 * 0 .. 127, one after the other. */
TKVI_FLAT_128 void tkvi_save_weights_128(tkvi_weight *w, int further, tkvi_i4 a, tkvi_i4 b,
                                         const int planes) {
    const int16x8_t k = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
    if (planes == 2) {
        const int32x2_t high = vreinterpret_s32_s8(vshrn_n_s16(k, 7));
        const int32x2_t low = vreinterpret_s32_s8(vmovn_s16(vandq_s16(k, vdupq_n_s16(127))));
        vst1_s8(w, vreinterpret_s8_s32(vzip1_s32(high, low)));
        vst1_s8(w + further, vreinterpret_s8_s32(vzip2_s32(high, low)));
    } else {
        const int32x2_t x = vreinterpret_s32_s8(vmovn_s16(k));
        const int32_t first = vget_lane_s32(x, 0), second = vget_lane_s32(x, 1);
        memcpy(w, &first, 4);
        memcpy(w + further, &second, 4);
    }
}

#ifdef __ARM_FEATURE_DOTPROD
#define TKVI_DOT_128(no_sign, sum, codes, quad, row)                                                         \
    ((no_sign)                                                                                               \
         ? vreinterpretq_s32_u32(vdotq_laneq_u32(vreinterpretq_u32_s32(sum), vreinterpretq_u8_s8(codes),     \
                                                 vreinterpretq_u8_s8(quad), row))                            \
         : vdotq_laneq_s32(sum, codes, quad, row))
#else
/* Pairs of products fit 16 bits: 2 * 127 * 127, 2 * 128 * 127 of 8-bit codes, 2 * 63 * 255 without signs. */
TKVI_FLAT_128 tkvi_i4 tkvi_dot_128(const int no_sign, tkvi_i4 sum, tkvi_codes_128 c, tkvi_codes_128 w) {
    const uint8x16_t x = vreinterpretq_u8_s8(c), y = vreinterpretq_u8_s8(w);
    if (no_sign)
        return vreinterpretq_s32_u32(
            vpadalq_u16(vreinterpretq_u32_s32(sum),
                        vpaddq_u16(vmull_u8(vget_low_u8(x), vget_low_u8(y)), vmull_high_u8(x, y))));
    return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(c), vget_low_s8(w)), vmull_high_s8(c, w)));
}
#define TKVI_DOT_128(no_sign, sum, codes, quad, row)                                                         \
    tkvi_dot_128(no_sign, sum, codes, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(quad), row)))
#endif

#endif /* TKVI_NEON */

#endif /* TKVI_KERNELS_NEON_H */
/* ======== kernels_wasm.h ======== */
/*
 * kernels_wasm.h - the pieces of kernels_128.h for WebAssembly, compiled with -msimd128.
 *
 * The product there is one of 16 bits by pairs, i32x4.dot_i16x8_s: the bytes of a vector of codes are taken as
 * even and odd ones, widened by shifts alone, and both sums belong to the same token. Weights have 16 bits, so
 * that two planes cost what one does: a row holds both.
 *
 *     codes   | t0: r0 r1 r2 r3 | t1: r0 r1 r2 r3 | t2 ...  | t3 ...  |   16 bytes: 4 tokens (V: channels) x 4
 *     even    | t0: r0    r2    | t1: r0    r2    | t2 ...  | t3 ...  |   8 x 16 bits
 *     odd     | t0: r1    r3    | t1: r1    r3    | t2 ...  | t3 ...  |
 *     quad    | row 0: r0 r2 r1 r3 | row 1: ...                           16 bits each, in memory
 *     sum     | t0              | t1              | t2      | t3      |   += even . r0 r2, += odd . r1 r3
 *
 * Calls kernels.h.
 */
#ifndef TKVI_KERNELS_WASM_H
#define TKVI_KERNELS_WASM_H


#if !defined(TKV_NO_SIMD) && defined(__wasm_simd128__) && defined(__clang__)
#define TKVI_WASM
#define TKVI_128
#include <wasm_simd128.h>

#define TKVI_FLAT_128 static inline __attribute__((always_inline))
#define TKVI_ISA_128 TKV_ISA_WASM
#define TKVI_NAME_128 "wasm"

typedef v128_t tkvi_f4;
typedef v128_t tkvi_i4;
typedef v128_t tkvi_b16;

/* >>floats */
TKVI_FLAT_128 tkvi_f4 tkvi_load_128(const float *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_save_128(float *p, tkvi_f4 x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_f4 tkvi_all_128(float x) { return wasm_f32x4_splat(x); }
TKVI_FLAT_128 tkvi_f4 tkvi_add_128(tkvi_f4 a, tkvi_f4 b) { return wasm_f32x4_add(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_sub_128(tkvi_f4 a, tkvi_f4 b) { return wasm_f32x4_sub(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_mul_128(tkvi_f4 a, tkvi_f4 b) { return wasm_f32x4_mul(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_madd_128(tkvi_f4 a, tkvi_f4 x, tkvi_f4 y) {
    return wasm_f32x4_add(a, wasm_f32x4_mul(x, y));
}
TKVI_FLAT_128 tkvi_f4 tkvi_most_128(tkvi_f4 a, tkvi_f4 b) { return wasm_f32x4_pmax(a, b); }
TKVI_FLAT_128 tkvi_f4 tkvi_size_128(tkvi_f4 x) { return wasm_f32x4_abs(x); }

/* The sums of four vectors. */
TKVI_FLAT_128 tkvi_f4 tkvi_sums_128(tkvi_f4 a, tkvi_f4 b, tkvi_f4 c, tkvi_f4 d) {
    tkvi_f4 ab = wasm_f32x4_add(wasm_i32x4_shuffle(a, b, 0, 2, 4, 6), wasm_i32x4_shuffle(a, b, 1, 3, 5, 7));
    tkvi_f4 cd = wasm_f32x4_add(wasm_i32x4_shuffle(c, d, 0, 2, 4, 6), wasm_i32x4_shuffle(c, d, 1, 3, 5, 7));
    return wasm_f32x4_add(wasm_i32x4_shuffle(ab, cd, 0, 2, 4, 6), wasm_i32x4_shuffle(ab, cd, 1, 3, 5, 7));
}

TKVI_FLAT_128 float tkvi_sum_128(tkvi_f4 x) { return wasm_f32x4_extract_lane(tkvi_sums_128(x, x, x, x), 0); }

TKVI_FLAT_128 float tkvi_largest_128(tkvi_f4 x) {
    x = wasm_f32x4_pmax(x, wasm_i32x4_shuffle(x, x, 2, 3, 0, 1));
    return wasm_f32x4_extract_lane(wasm_f32x4_pmax(x, wasm_i32x4_shuffle(x, x, 1, 0, 3, 2)), 0);
}

/* y where x >= least, else 0. */
TKVI_FLAT_128 tkvi_f4 tkvi_where_128(tkvi_f4 y, tkvi_f4 x, float least) {
    return wasm_v128_and(y, wasm_f32x4_ge(x, wasm_f32x4_splat(least)));
}

/* Finite halves: all bits moved to their places (the copies of the sign cut away), and scaled by 2^112, which is
 * right for subnormal ones too. */
TKVI_FLAT_128 tkvi_f4 tkvi_halves4_128(const uint8_t *p) {
    v128_t x = wasm_v128_and(wasm_i32x4_shl(wasm_i32x4_load16x4(p), 13), wasm_i32x4_const_splat(~0x70000000));
    return wasm_f32x4_mul(x, wasm_i32x4_const_splat(0x77800000));
}

/* Any: what was infinite or no number came out as 65536 and more, and gets the largest exponent. */
TKVI_FLAT_128 tkvi_f4 tkvi_any_halves4_128(const uint8_t *p) {
    v128_t x = tkvi_halves4_128(p);
    v128_t no_number = wasm_f32x4_ge(wasm_f32x4_abs(x), wasm_f32x4_const_splat(65536.0f));
    return wasm_v128_or(x, wasm_v128_and(no_number, wasm_i32x4_const_splat(0x7f800000)));
}

TKVI_FLAT_128 tkvi_f4 tkvi_bfloats4_128(const uint8_t *p) {
    return wasm_i32x4_shl(wasm_u32x4_load16x4(p), 16);
}

/* >>integers */
TKVI_FLAT_128 tkvi_i4 tkvi_ints_128(const int32_t *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_save_ints_128(int32_t *p, tkvi_i4 x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_i4 tkvi_all_ints_128(int32_t x) { return wasm_i32x4_splat(x); }
TKVI_FLAT_128 tkvi_i4 tkvi_add_ints_128(tkvi_i4 a, tkvi_i4 b) { return wasm_i32x4_add(a, b); }
TKVI_FLAT_128 tkvi_i4 tkvi_sub_ints_128(tkvi_i4 a, tkvi_i4 b) { return wasm_i32x4_sub(a, b); }
TKVI_FLAT_128 tkvi_i4 tkvi_mul_ints_128(tkvi_i4 a, tkvi_i4 b) { return wasm_i32x4_mul(a, b); }
#define TKVI_LEFT_INTS_128(x, n) wasm_i32x4_shl(x, n)
TKVI_FLAT_128 tkvi_f4 tkvi_float_128(tkvi_i4 x) { return wasm_f32x4_convert_i32x4(x); }
TKVI_FLAT_128 tkvi_f4 tkvi_bits_128(tkvi_i4 x) { return x; }

TKVI_FLAT_128 int32_t tkvi_sum_ints_128(tkvi_i4 x) {
    x = wasm_i32x4_add(x, wasm_i32x4_shuffle(x, x, 2, 3, 0, 1));
    return wasm_i32x4_extract_lane(x, 0) + wasm_i32x4_extract_lane(x, 1);
}

/* As tkvi_rne does it: converting costs many instructions. */
TKVI_FLAT_128 tkvi_i4 tkvi_nearest_128(tkvi_f4 x) {
    return wasm_i32x4_sub(wasm_f32x4_add(x, wasm_f32x4_const_splat(12582912.0f)),
                          wasm_i32x4_const_splat(0x4b400000));
}

/* Four signed bytes. */
TKVI_FLAT_128 tkvi_i4 tkvi_bytes4_128(const uint8_t *p) {
    return wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(wasm_v128_load32_zero(p)));
}

/* >>bytes */
TKVI_FLAT_128 tkvi_b16 tkvi_bytes_128(const uint8_t *p) { return wasm_v128_load(p); }
TKVI_FLAT_128 void tkvi_save_bytes_128(uint8_t *p, tkvi_b16 x) { wasm_v128_store(p, x); }
TKVI_FLAT_128 tkvi_b16 tkvi_all_bytes_128(int x) { return wasm_i8x16_splat((int8_t)x); }
TKVI_FLAT_128 tkvi_b16 tkvi_and_128(tkvi_b16 a, tkvi_b16 b) { return wasm_v128_and(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_or_128(tkvi_b16 a, tkvi_b16 b) { return wasm_v128_or(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_xor_128(tkvi_b16 a, tkvi_b16 b) { return wasm_v128_xor(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_add_bytes_128(tkvi_b16 a, tkvi_b16 b) { return wasm_i8x16_add(a, b); }
TKVI_FLAT_128 tkvi_b16 tkvi_test_128(tkvi_b16 a, tkvi_b16 b) { /* 255 where a & b */
    return wasm_i8x16_ne(wasm_v128_and(a, b), wasm_i8x16_const_splat(0));
}
TKVI_FLAT_128 tkvi_b16 tkvi_look_up_128(tkvi_b16 table, tkvi_b16 x) { return wasm_i8x16_swizzle(table, x); }
#define TKVI_RIGHT_128(x, n) wasm_u8x16_shr(x, n)
#define TKVI_LEFT_128(x, n) wasm_i8x16_shl(x, n)

/* Neighbours a b: bytes, or pairs of them, of the first and of the second half. */
TKVI_FLAT_128 tkvi_b16 tkvi_zip1_128(tkvi_b16 a, tkvi_b16 b) {
    return wasm_i8x16_shuffle(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
TKVI_FLAT_128 tkvi_b16 tkvi_zip2_128(tkvi_b16 a, tkvi_b16 b) {
    return wasm_i8x16_shuffle(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
TKVI_FLAT_128 tkvi_b16 tkvi_zip1_pairs_128(tkvi_b16 a, tkvi_b16 b) {
    return wasm_i16x8_shuffle(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
TKVI_FLAT_128 tkvi_b16 tkvi_zip2_pairs_128(tkvi_b16 a, tkvi_b16 b) {
    return wasm_i16x8_shuffle(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

/* >>products */
#define TKVI_PASS_128                                                                                        \
    4 /* weight rows at once: on x86 engines have 16 registers; 8 sums, 4 of codes, weights */
TKVI_FLAT_128 int tkvi_weight_rows_128(int planes) {
    (void)planes;
    return 1;
}
typedef int16_t tkvi_weight;
typedef struct tkvi_codes_128 {
    v128_t even, odd;
} tkvi_codes_128;
typedef const tkvi_weight *tkvi_quad_128;

TKVI_FLAT_128 tkvi_codes_128 tkvi_load_codes_128(const uint8_t *p) {
    v128_t x = wasm_v128_load(p);
    tkvi_codes_128 c;
    c.even = wasm_i16x8_shr(wasm_i16x8_shl(x, 8), 8);
    c.odd = wasm_i16x8_shr(x, 8);
    return c;
}
TKVI_FLAT_128 tkvi_quad_128 tkvi_load_quad_128(const tkvi_weight *w) { return w; }

/* Weights of two steps of a row, r0 r2 r1 r3, the second one `further` on. */
TKVI_FLAT_128 void tkvi_save_weights_128(tkvi_weight *w, int further, tkvi_i4 a, tkvi_i4 b,
                                         const int planes) {
    const v128_t x = wasm_i16x8_shuffle(a, b, 0, 4, 2, 6, 8, 12, 10, 14);
    (void)planes;
    wasm_v128_store64_lane(w, x, 0);
    wasm_v128_store64_lane(w + further, x, 1);
}

TKVI_FLAT_128 tkvi_i4 tkvi_dot_128(tkvi_i4 sum, tkvi_codes_128 c, const tkvi_weight *w) {
    sum = wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(c.even, wasm_v128_load32_splat(w)));
    return wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(c.odd, wasm_v128_load32_splat(w + 2)));
}
/* Weights of 16 bits do not ask for signs. */
#define TKVI_DOT_128(no_sign, sum, codes, quad, row)                                                         \
    ((void)(no_sign), tkvi_dot_128(sum, codes, (quad) + 4 * (row)))

#endif /* TKVI_WASM */

#endif /* TKVI_KERNELS_WASM_H */
/* ======== kernels_128.h ======== */
/*
 * kernels_128.h - the kernels of kernels.h with vectors of 128 bits, written once; kernels_neon.h or
 * kernels_wasm.h brings the pieces (types and operations end in _128). Which one, the compiler's flags say:
 * there is at most one such instruction set in a program.
 *
 * A tile is unpacked to bytes, in the order of its codes, and those are multiplied for all rows: what unpacking
 * has to know of widths and tables is in one place, and the products are one loop for K and V. Its step:
 *
 *     two vectors of 16 codes (four lanes of four each), times four weights of each row
 *     K: a step is a tile.        lanes: tokens 16p + 4b .. + 3, p = 2h and 2h + 1;  weights of its 4 channels
 *     V: a step is four tokens.   lanes: channels 4b .. + 3, b = 2h and 2h + 1;      weights of these tokens
 *
 * 8-bit codes are signed here, code - 128. Nothing is prefetched: `next` waits for a machine to measure on.
 */
#ifndef TKVI_KERNELS_128_H
#define TKVI_KERNELS_128_H


#ifdef TKVI_128

/* >>helpers: those of metadata. Encoding is the scalar code's. */
static void tkvi_halves_128(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 4 <= n; i += 4) tkvi_save_128(dst + i, tkvi_any_halves4_128(src + 2 * i));
    tkvi_halves_scalar(src + 2 * i, n - i, dst + i);
}

/* tkvi_log_value byte by byte: with e the exponent and m the ten bits of the mantissa, a float's bytes are
 * 0, m << 5, e << 7 | m >> 3, e >> 1. */
static void tkvi_logs_128(const uint8_t *src, int n, int top, float *dst) {
    uint8_t tables[2][16], *bytes = (uint8_t *)dst;
    tkvi_b16 table1, table2;
    int i;
    for (i = 0; i < 16; i++) {
        int m = tkvi_log_mantissa[i] - 1024;
        tables[0][i] = (uint8_t)(m << 5 & 255);
        tables[1][i] = (uint8_t)(m >> 3);
    }
    table1 = tkvi_bytes_128(tables[0]);
    table2 = tkvi_bytes_128(tables[1]);
    for (i = 0; i + 16 <= n; i += 16, bytes += 64) {
        tkvi_b16 code = tkvi_bytes_128(src + i), some = tkvi_test_128(code, code);
        tkvi_b16 x = tkvi_add_bytes_128(code, tkvi_all_bytes_128(-1));
        tkvi_b16 k = tkvi_and_128(x, tkvi_all_bytes_128(15));
        tkvi_b16 e = tkvi_add_bytes_128(TKVI_RIGHT_128(x, 4), tkvi_all_bytes_128(127 + top - 16));
        tkvi_b16 b1 = tkvi_and_128(tkvi_look_up_128(table1, k), some);
        tkvi_b16 b2 = tkvi_or_128(tkvi_look_up_128(table2, k), TKVI_LEFT_128(e, 7));
        tkvi_b16 b3 = tkvi_and_128(TKVI_RIGHT_128(e, 1), some), zero = tkvi_all_bytes_128(0);
        b2 = tkvi_and_128(b2, some);
        x = tkvi_zip1_128(zero, b1);
        k = tkvi_zip1_128(b2, b3);
        tkvi_save_bytes_128(bytes, tkvi_zip1_pairs_128(x, k));
        tkvi_save_bytes_128(bytes + 16, tkvi_zip2_pairs_128(x, k));
        x = tkvi_zip2_128(zero, b1);
        k = tkvi_zip2_128(b2, b3);
        tkvi_save_bytes_128(bytes + 32, tkvi_zip1_pairs_128(x, k));
        tkvi_save_bytes_128(bytes + 48, tkvi_zip2_pairs_128(x, k));
    }
    tkvi_logs_scalar(src + i, n - i, top, dst + i);
}

static void tkvi_zeros_128(const uint8_t *offset, const float *scale, const float *mean, float unit,
                           int middle, int n, float *dst) {
    int i;
    for (i = 0; i + 4 <= n; i += 4) {
        tkvi_i4 by = tkvi_sub_ints_128(tkvi_bytes4_128(offset + i), tkvi_all_ints_128(middle));
        tkvi_f4 x = tkvi_mul_128(tkvi_load_128(scale + i), tkvi_all_128(unit));
        tkvi_save_128(dst + i, tkvi_madd_128(tkvi_load_128(mean + i), x, tkvi_float_128(by)));
    }
    tkvi_zeros_scalar(offset + i, scale + i, mean + i, unit, middle, n - i, dst + i);
}

static const tkvi_helpers tkvi_helpers_128 = {tkvi_halves_128,    tkvi_to_halves_scalar, tkvi_logs_128,
                                              tkvi_zeros_128,     tkvi_log_codes_scalar, tkvi_pack_tile,
                                              tkvi_weave_scalar,  tkvi_columns_scalar,   tkvi_settle_scalar,
                                              tkvi_tokens_scalar, tkvi_groups_scalar,    tkvi_tiles_scalar};

static float tkvi_max64_128(const float *s) {
    tkvi_f4 m = tkvi_load_128(s);
    int t;
    for (t = 4; t < TKVI_BLOCK; t += 4) m = tkvi_most_128(m, tkvi_load_128(s + t));
    return tkvi_largest_128(m);
}

/* exp(x) = 2^n exp(r), |r| <= ln 2 / 2; the polynomial is that of Cephes' expf. */
static float tkvi_exp64_128(const float *s, float max, float *p) {
    static const float factors[5] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                     5.0000001201e-1f};
    tkvi_f4 sum = tkvi_all_128(0.0f);
    int t, k;
    for (t = 0; t < TKVI_BLOCK; t += 4) {
        tkvi_f4 from = tkvi_sub_128(tkvi_load_128(s + t), tkvi_all_128(max)), r, f, y;
        tkvi_f4 x = tkvi_most_128(from, tkvi_all_128(-87.0f)); /* 2^n stays a normal number */
        tkvi_i4 n = tkvi_nearest_128(tkvi_mul_128(x, tkvi_all_128(1.44269504f)));
        f = tkvi_float_128(n);
        r = tkvi_madd_128(x, f, tkvi_all_128(-0.693359375f));
        r = tkvi_madd_128(r, f, tkvi_all_128(2.12194440e-4f));
        y = tkvi_all_128(1.9875691500e-4f);
        for (k = 0; k < 5; k++) y = tkvi_madd_128(tkvi_all_128(factors[k]), y, r);
        y = tkvi_madd_128(tkvi_add_128(r, tkvi_all_128(1.0f)), y, tkvi_mul_128(r, r));
        n = TKVI_LEFT_INTS_128(tkvi_add_ints_128(n, tkvi_all_ints_128(127)), 23);
        y = tkvi_where_128(tkvi_mul_128(y, tkvi_bits_128(n)), from, -87.0f);
        tkvi_save_128(p + t, y);
        sum = tkvi_add_128(sum, y);
    }
    return tkvi_sum_128(sum);
}

/* Rows that go together: as many as are left and registers allow, 1, 2, 4 or 8. */
static int tkvi_pass_128(int left, int most) {
    int n = most;
    while (n > left) n /= 2;
    return n;
}

/* >>exact tiers: a step is 4 channels of 4 tokens (K), or 16 channels of a token (V), in x0 .. x3 */
#define TKVI_ROWS4_(X) X(0) X(1) X(2) X(3)
#define TKVI_NONE4_(r) tkvi_f4 a##r = tkvi_all_128(0.0f), b##r = a##r, c##r = a##r, d##r = a##r;
#define TKVI_MADD4_(r, from)                                                                                 \
    if (r < nr) {                                                                                            \
        y = from;                                                                                            \
        a##r = tkvi_madd_128(a##r, x0, y);                                                                   \
        b##r = tkvi_madd_128(b##r, x1, y);                                                                   \
        c##r = tkvi_madd_128(c##r, x2, y);                                                                   \
        d##r = tkvi_madd_128(d##r, x3, y);                                                                   \
    }
#define TKVI_MADD4_K_(r) TKVI_MADD4_(r, tkvi_load_128(q + r * pad + i))
#define TKVI_MADD4_V_(r) TKVI_MADD4_(r, tkvi_all_128(p[r * TKVI_BLOCK + t]))
#define TKVI_SAVE4_K_(r)                                                                                     \
    if (r < nr) tkvi_save_128(scores + r * TKVI_BLOCK + t, tkvi_sums_128(a##r, b##r, c##r, d##r));
#define TKVI_SAVE4_V_(r)                                                                                     \
    if (r < nr) {                                                                                            \
        o = out + r * pad + i;                                                                               \
        tkvi_save_128(o, tkvi_add_128(tkvi_load_128(o), a##r));                                              \
        tkvi_save_128(o + 4, tkvi_add_128(tkvi_load_128(o + 4), b##r));                                      \
        tkvi_save_128(o + 8, tkvi_add_128(tkvi_load_128(o + 8), c##r));                                      \
        tkvi_save_128(o + 12, tkvi_add_128(tkvi_load_128(o + 12), d##r));                                    \
    }

/* 4 values from number i of a row. */
TKVI_FLAT_128 tkvi_f4 tkvi_values_128(const tkvi_storage type, const uint8_t *row, int i) {
    if (type == TKVI_AS_F16) return tkvi_halves4_128(row + 2 * i);
    if (type == TKVI_AS_BF16) return tkvi_bfloats4_128(row + 2 * i);
    return tkvi_load_128((const float *)(const void *)(row + 4 * i));
}

/* Tokens beyond n repeat the last one. */
TKVI_FLAT_128 void tkvi_exact_k4_128(const tkvi_storage type, const int nr, const tkvi_side *s,
                                     const uint8_t *src, const float *q, const float *ref, int n,
                                     float *scores) {
    const int pad = s->pad, bytes = pad * (type == TKVI_AS_F32 ? 4 : 2);
    int t, i;
    for (t = 0; t < n; t += 4) {
        const uint8_t *k0 = src + t * bytes, *k1 = src + tkvi_min(t + 1, n - 1) * bytes;
        const uint8_t *k2 = src + tkvi_min(t + 2, n - 1) * bytes, *k3 = src + tkvi_min(t + 3, n - 1) * bytes;
        TKVI_ROWS4_(TKVI_NONE4_)
        for (i = 0; i < pad; i += 4) {
            tkvi_f4 y = tkvi_load_128(ref + i);
            tkvi_f4 x0 = tkvi_sub_128(tkvi_values_128(type, k0, i), y);
            tkvi_f4 x1 = tkvi_sub_128(tkvi_values_128(type, k1, i), y);
            tkvi_f4 x2 = tkvi_sub_128(tkvi_values_128(type, k2, i), y);
            tkvi_f4 x3 = tkvi_sub_128(tkvi_values_128(type, k3, i), y);
            TKVI_ROWS4_(TKVI_MADD4_K_)
        }
        TKVI_ROWS4_(TKVI_SAVE4_K_)
    }
}

TKVI_FLAT_128 void tkvi_exact_v4_128(const tkvi_storage type, const int nr, const tkvi_side *s,
                                     const uint8_t *src, const float *p, int n, float *out) {
    const int pad = s->pad, bytes = pad * (type == TKVI_AS_F32 ? 4 : 2);
    int t, i;
    for (i = 0; i < pad; i += 16) {
        const uint8_t *v = src;
        float *o;
        TKVI_ROWS4_(TKVI_NONE4_)
        for (t = 0; t < n; t++, v += bytes) {
            tkvi_f4 x0 = tkvi_values_128(type, v, i), x1 = tkvi_values_128(type, v, i + 4);
            tkvi_f4 x2 = tkvi_values_128(type, v, i + 8), x3 = tkvi_values_128(type, v, i + 12), y;
            TKVI_ROWS4_(TKVI_MADD4_V_)
        }
        TKVI_ROWS4_(TKVI_SAVE4_V_)
    }
}

#define TKVI_EXACT_128_(t, type)                                                                             \
    static void tkvi_##t##_k_128(const tkvi_side *s, const uint8_t *src, const uint8_t *next,                \
                                 const float *q, const float *ref, int rows, int n, int planes,              \
                                 float *scores) {                                                            \
        int r, pass;                                                                                         \
        (void)next;                                                                                          \
        (void)planes;                                                                                        \
        if (n < TKVI_BLOCK) memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));                  \
        for (r = 0; r < rows; r += pass, q += pass * s->pad, scores += pass * TKVI_BLOCK) {                  \
            pass = tkvi_pass_128(rows - r, 4);                                                               \
            if (pass == 4) tkvi_exact_k4_128(type, 4, s, src, q, ref, n, scores);                            \
            else if (pass == 2) tkvi_exact_k4_128(type, 2, s, src, q, ref, n, scores);                       \
            else tkvi_exact_k4_128(type, 1, s, src, q, ref, n, scores);                                      \
        }                                                                                                    \
    }                                                                                                        \
    static void tkvi_##t##_v_128(const tkvi_side *s, const uint8_t *src, const uint8_t *next,                \
                                 const float *p, int rows, int n, int planes, float *out) {                  \
        int r, pass;                                                                                         \
        (void)next;                                                                                          \
        (void)planes;                                                                                        \
        for (r = 0; r < rows; r += pass, p += pass * TKVI_BLOCK, out += pass * s->pad) {                     \
            pass = tkvi_pass_128(rows - r, 4);                                                               \
            if (pass == 4) tkvi_exact_v4_128(type, 4, s, src, p, n, out);                                    \
            else if (pass == 2) tkvi_exact_v4_128(type, 2, s, src, p, n, out);                               \
            else tkvi_exact_v4_128(type, 1, s, src, p, n, out);                                              \
        }                                                                                                    \
    }
TKVI_EXACT_128_(f32, TKVI_AS_F32)
TKVI_EXACT_128_(f16, TKVI_AS_F16)
TKVI_EXACT_128_(bf16, TKVI_AS_BF16)
#undef TKVI_EXACT_128_
#undef TKVI_ROWS4_
#undef TKVI_NONE4_
#undef TKVI_MADD4_
#undef TKVI_MADD4_K_
#undef TKVI_MADD4_V_
#undef TKVI_SAVE4_K_
#undef TKVI_SAVE4_V_

/* >>tiles */
/* The top bit of four planes: bits from, from + 1, .. of x, to `bit` of the codes. */
TKVI_FLAT_128 void tkvi_tops_128(tkvi_b16 *c, tkvi_b16 x, int from, int bit) {
    const tkvi_b16 to = tkvi_all_bytes_128(bit);
    c[0] = tkvi_or_128(c[0], tkvi_and_128(tkvi_test_128(x, tkvi_all_bytes_128(from)), to));
    c[1] = tkvi_or_128(c[1], tkvi_and_128(tkvi_test_128(x, tkvi_all_bytes_128(2 * from)), to));
    c[2] = tkvi_or_128(c[2], tkvi_and_128(tkvi_test_128(x, tkvi_all_bytes_128(4 * from)), to));
    c[3] = tkvi_or_128(c[3], tkvi_and_128(tkvi_test_128(x, tkvi_all_bytes_128(8 * from)), to));
}

TKVI_FLAT_128 void tkvi_save_codes_128(uint8_t *code, const tkvi_b16 *c) {
    tkvi_save_bytes_128(code, c[0]);
    tkvi_save_bytes_128(code + 64, c[1]);
    tkvi_save_bytes_128(code + 128, c[2]);
    tkvi_save_bytes_128(code + 192, c[3]);
}

/* A quarter of tkvi_unpack_tile: bytes j .. j + 15 of each plane. 8-bit codes become signed. */
TKVI_FLAT_128 void tkvi_unpack4_128(const int width, const uint8_t *wide, const uint8_t *tops, int from,
                                    int j, tkvi_b16 *c) {
    const tkvi_b16 two = tkvi_all_bytes_128(3), four = tkvi_all_bytes_128(15), six = tkvi_all_bytes_128(48);
    tkvi_b16 x = tkvi_all_bytes_128(128), y;
    c[0] = c[1] = c[2] = c[3] = tkvi_all_bytes_128(0);
    if (width == 8) {
        c[0] = tkvi_xor_128(tkvi_bytes_128(wide + j), x);
        c[1] = tkvi_xor_128(tkvi_bytes_128(wide + j + 64), x);
        c[2] = tkvi_xor_128(tkvi_bytes_128(wide + j + 128), x);
        c[3] = tkvi_xor_128(tkvi_bytes_128(wide + j + 192), x);
    } else if (width >= 4) {
        x = tkvi_bytes_128(wide + j);
        y = tkvi_bytes_128(wide + j + 64);
        c[0] = tkvi_and_128(x, four);
        c[1] = TKVI_RIGHT_128(x, 4);
        c[2] = tkvi_and_128(y, four);
        c[3] = TKVI_RIGHT_128(y, 4);
    } else if (width >= 2) {
        x = tkvi_bytes_128(wide + j);
        c[0] = tkvi_and_128(x, two);
        c[1] = tkvi_and_128(TKVI_RIGHT_128(x, 2), two);
        c[2] = tkvi_and_128(TKVI_RIGHT_128(x, 4), two);
        c[3] = TKVI_RIGHT_128(x, 6);
    }
    if (width == 6) {
        x = tkvi_bytes_128(wide + j + 128);
        c[0] = tkvi_or_128(c[0], tkvi_and_128(TKVI_LEFT_128(x, 4), six));
        c[1] = tkvi_or_128(c[1], tkvi_and_128(TKVI_LEFT_128(x, 2), six));
        c[2] = tkvi_or_128(c[2], tkvi_and_128(x, six));
        c[3] = tkvi_or_128(c[3], tkvi_and_128(TKVI_RIGHT_128(x, 2), six));
    }
    if (width & 1) tkvi_tops_128(c, tkvi_bytes_128(tops + j), from, width == 1 ? 1 : width == 3 ? 4 : 16);
}

TKVI_FLAT_128 void tkvi_unpack_width_128(const int width, const uint8_t *wide, const uint8_t *tops, int from,
                                         uint8_t *code) {
    tkvi_b16 c[4];
    int j;
    for (j = 0; j < 64; j += 16) {
        tkvi_unpack4_128(width, wide, tops, from, j, c);
        tkvi_save_codes_128(code + j, c);
    }
}

static void tkvi_unpack_128(const uint8_t *codes, const tkvi_tile_at *at, int width, uint8_t *code) {
    const uint8_t *wide = codes + at->wide, *tops = codes + at->halves + at->half / 2 * 64;
    const int from = at->half % 2 ? 16 : 1;
    switch (width) {
    case 1: tkvi_unpack_width_128(1, wide, tops, from, code); break;
    case 2: tkvi_unpack_width_128(2, wide, tops, from, code); break;
    case 3: tkvi_unpack_width_128(3, wide, tops, from, code); break;
    case 4: tkvi_unpack_width_128(4, wide, tops, from, code); break;
    case 5: tkvi_unpack_width_128(5, wide, tops, from, code); break;
    case 6: tkvi_unpack_width_128(6, wide, tops, from, code); break;
    default: tkvi_unpack_width_128(8, wide, tops, from, code); break;
    }
}

/* Codes to levels. */
static void tkvi_level_128(const int8_t *levels, const uint8_t *code, int n, uint8_t *level) {
    const tkvi_b16 table = tkvi_bytes_128((const uint8_t *)levels), mask = tkvi_all_bytes_128(15);
    int j;
    for (j = 0; j < n; j += 16)
        tkvi_save_bytes_128(level + j, tkvi_look_up_128(table, tkvi_and_128(tkvi_bytes_128(code + j), mask)));
}

static int tkvi_centre2_128(const tkvi_side *s, int width) { /* twice the centre of what is multiplied */
    return s->levels ? 0 : width == 8 ? -1 : (1 << width) - 1;
}

/* Four zeros with the part of the centre. */
TKVI_FLAT_128 tkvi_f4 tkvi_centred_128(tkvi_f4 zero, const float *scale, float centre) {
    return tkvi_madd_128(zero, tkvi_load_128(scale), tkvi_all_128(centre));
}

/* A row is folded: the answer is  half_step * (2 sum w code - middle) + rest  with
 * middle = sum w centre2,  rest = sum x zero. */
typedef struct tkvi_fold_128 {
    int32_t middle;
    float half_step, rest;
    float most; /* the largest weight before it is rounded */
    int wide;   /* so many weights have 15 bits, the others 8 */
} tkvi_fold_128;

/* What rows are folded by; `zero` has the centre's part in it, n is a multiple of 16. */
typedef struct tkvi_folding_128 {
    const float *scale, *zero;
    const int32_t *centre2;
    int n, planes, top, wide; /* top: the largest weight of one plane */
    float coarse;             /* see TKVI_NEEDS_TWO */
    int unit; /* of a weight of 8 bits where there are some of 15: 128 in K; V has no mix in a row */
} tkvi_folding_128;

/* Weights of a step: four of each weight row. A load may take rows with it that a pass does not use. */
#define TKVI_QUAD_128 (4 * 2 * TKVI_ROWS)

/* Row x times scale, and what is to be known of it before it is rounded. */
static void tkvi_measure_128(const tkvi_folding_128 *a, const float *x, float *y, tkvi_fold_128 *f) {
    tkvi_f4 most = tkvi_all_128(0.0f), rest = most, squares = most;
    float all;
    int i;
    for (i = 0; i < a->n; i += 4) {
        tkvi_f4 v = tkvi_load_128(x + i), u = tkvi_mul_128(v, tkvi_load_128(a->scale + i));
        most = tkvi_most_128(most, tkvi_size_128(u));
        rest = tkvi_madd_128(rest, v, tkvi_load_128(a->zero + i));
        squares = tkvi_madd_128(squares, u, u);
        tkvi_save_128(y + i, u);
    }
    f->most = tkvi_largest_128(most);
    f->rest = tkvi_sum_128(rest);
    all = tkvi_sum_128(squares);
    f->wide = a->planes == 2 || TKVI_NEEDS_TWO(a->coarse, f->most, all, a->top) ? a->n : a->wide;
}

/* y rounded. `two`: some row of the call has weights of 15 bits, so that all have two planes. */
TKVI_FLAT_128 void tkvi_round_row_128(const tkvi_folding_128 *a, const float *y, const int two,
                                      tkvi_weight *w, tkvi_fold_128 *f) {
    const int unit = two ? a->unit : 1;
    const int steps =
        f->wide == a->n ? TKVI_TWO_PLANES : unit * a->top; /* of the row, in units of its sums */
    const int some = f->most > 1e-34f;                     /* smaller ones contribute nothing */
    const tkvi_f4 fine = tkvi_all_128(some ? (float)TKVI_TWO_PLANES / f->most : 0.0f);
    const tkvi_f4 coarse = tkvi_all_128(some ? (float)a->top / f->most : 0.0f);
    tkvi_i4 middle = tkvi_all_ints_128(0);
    int i, k;
    for (i = 0; i < a->n; i += 8, w += 2 * TKVI_QUAD_128) {
        tkvi_i4 v[2];
        for (k = 0; k < 2; k++) { /* a tile's four weights are alike */
            const int wide = i + 4 * k < f->wide;
            v[k] = tkvi_nearest_128(tkvi_mul_128(tkvi_load_128(y + i + 4 * k), wide ? fine : coarse));
            if (!wide && unit > 1) v[k] = TKVI_LEFT_INTS_128(v[k], 7);
            middle =
                tkvi_add_ints_128(middle, tkvi_mul_ints_128(v[k], tkvi_ints_128(a->centre2 + i + 4 * k)));
        }
        tkvi_save_weights_128(w, TKVI_QUAD_128, v[0], v[1], two ? 2 : 1);
    }
    f->middle = tkvi_sum_ints_128(middle);
    f->half_step = 0.5f * f->most / (float)steps;
}

/* All rows, x: [row][n]. Returns the planes that they have. */
static int tkvi_fold_rows_128(const tkvi_folding_128 *a, const float *x, int rows, int two, tkvi_weight *w,
                              tkvi_fold_128 *f) {
    TKVI_ALIGNED float y[TKVI_ROWS][TKV_MAX_HEAD_DIM];
    int r;
    for (r = 0; r < rows; r++) {
        tkvi_measure_128(a, x + r * a->n, y[r], f + r);
        two |= f[r].wide > 0;
    }
    for (r = 0; r < rows; r++, w += 4 * tkvi_weight_rows_128(1 + two)) {
        if (two) tkvi_round_row_128(a, y[r], 1, w, f + r);
        else tkvi_round_row_128(a, y[r], 0, w, f + r);
    }
    return 1 + two;
}

/* One loop of products: the steps as they are drawn above. */
typedef struct tkvi_dots_128 {
    const uint8_t *codes;
    int step, apart,
        steps;            /* bytes from step to step and from a step's first vector to its second; how many */
    const tkvi_weight *w; /* [step][TKVI_QUAD_128] */
    int32_t *sum;         /* [weight row][TKVI_BLOCK] */
    int sum_apart, add;   /* from the sums of a step's first vector to those of its second; sum += */
    int no_sign;          /* neither codes nor weights have a sign, and these may be up to 255 */
} tkvi_dots_128;

#define TKVI_ROWS8_(X)                                                                                       \
    X(0, low, 0) X(1, low, 1) X(2, low, 2) X(3, low, 3) X(4, up, 0) X(5, up, 1) X(6, up, 2) X(7, up, 3)
#define TKVI_BEGIN8_(r, quad, lane)                                                                          \
    tkvi_i4 a##r = tkvi_all_ints_128(0), b##r = a##r;                                                        \
    if (r < nw && d->add) {                                                                                  \
        a##r = tkvi_ints_128(sum + r * TKVI_BLOCK);                                                          \
        b##r = tkvi_ints_128(sum + r * TKVI_BLOCK + apart);                                                  \
    }
#define TKVI_DOT8_(r, quad, lane)                                                                            \
    if (r < nw) {                                                                                            \
        a##r = TKVI_DOT_128(no_sign, a##r, c, quad, lane);                                                   \
        b##r = TKVI_DOT_128(no_sign, b##r, e, quad, lane);                                                   \
    }
#define TKVI_END8_(r, quad, lane)                                                                            \
    if (r < nw) {                                                                                            \
        tkvi_save_ints_128(sum + r * TKVI_BLOCK, a##r);                                                      \
        tkvi_save_ints_128(sum + r * TKVI_BLOCK + apart, b##r);                                              \
    }

TKVI_FLAT_128 void tkvi_dot_rows_128(const tkvi_dots_128 *d, const tkvi_weight *w, int32_t *sum, const int nw,
                                     const int no_sign) {
    const uint8_t *codes = d->codes;
    const int step = d->step, second = d->apart, apart = d->sum_apart;
    int i;
    TKVI_ROWS8_(TKVI_BEGIN8_)
    for (i = 0; i < d->steps; i++, codes += step, w += TKVI_QUAD_128) {
        const tkvi_codes_128 c = tkvi_load_codes_128(codes), e = tkvi_load_codes_128(codes + second);
        const tkvi_quad_128 low = tkvi_load_quad_128(w), up = nw > 4 ? tkvi_load_quad_128(w + 16) : low;
        TKVI_ROWS8_(TKVI_DOT8_)
    }
    TKVI_ROWS8_(TKVI_END8_)
}
#undef TKVI_ROWS8_
#undef TKVI_BEGIN8_
#undef TKVI_DOT8_
#undef TKVI_END8_

TKVI_FLAT_128 void tkvi_dot_pass_128(const tkvi_dots_128 *d, const tkvi_weight *w, int32_t *sum, int pass,
                                     const int no_sign) {
    if (pass == 4) tkvi_dot_rows_128(d, w, sum, 4, no_sign);
    else if (pass == 2) tkvi_dot_rows_128(d, w, sum, 2, no_sign);
    else if (pass == 1) tkvi_dot_rows_128(d, w, sum, 1, no_sign);
#if TKVI_PASS_128 == 8
    else tkvi_dot_rows_128(d, w, sum, 8, no_sign);
#endif
}

static void tkvi_multiply_128(const tkvi_dots_128 *d, int weight_rows) {
    int r, pass;
    for (r = 0; r < weight_rows; r += pass) {
        const tkvi_weight *w = d->w + 4 * r;
        int32_t *sum = d->sum + r * TKVI_BLOCK;
        pass = tkvi_pass_128(weight_rows - r, TKVI_PASS_128);
        if (d->no_sign) tkvi_dot_pass_128(d, w, sum, pass, 1);
        else tkvi_dot_pass_128(d, w, sum, pass, 0);
    }
}

/* n sums of row r, a multiple of 4, to answers. */
static void tkvi_unfold_128(const int32_t *sum, int r, int planes, const tkvi_fold_128 *f, int n, int add,
                            float *out) {
    const tkvi_f4 half_step = tkvi_all_128(f[r].half_step), rest = tkvi_all_128(f[r].rest);
    const tkvi_i4 middle = tkvi_all_ints_128(f[r].middle);
    const int split = tkvi_weight_rows_128(planes) == 2;
    int i;
    sum += r * tkvi_weight_rows_128(planes) * TKVI_BLOCK;
    for (i = 0; i < n; i += 4) {
        tkvi_i4 x = tkvi_ints_128(sum + i);
        tkvi_f4 y;
        if (split) x = tkvi_add_ints_128(TKVI_LEFT_INTS_128(x, 7), tkvi_ints_128(sum + TKVI_BLOCK + i));
        y = tkvi_float_128(tkvi_sub_ints_128(TKVI_LEFT_INTS_128(x, 1), middle));
        y = tkvi_madd_128(rest, y, half_step);
        tkvi_save_128(out + i, add ? tkvi_add_128(y, tkvi_load_128(out + i)) : y);
    }
}

#define TKVI_CHUNK_128 32 /* tiles that are unpacked at a time: 8 KB */

/* Products of K: tiles first .. first + n - 1, which stand in `code`. */
static void tkvi_chunk_k_128(const uint8_t *code, int first, int n, const tkvi_weight *w, int w_group,
                             int weight_rows, int32_t *sum) {
    tkvi_dots_128 d;
    int b, h;
    d.step = TKVI_TILE_CODES;
    d.apart = 64;
    d.steps = n;
    d.sum_apart = 16;
    d.add = first > 0;
    d.no_sign = 0;
    for (h = 0; h < 2; h++)
        for (b = 0; b < 4; b++) {
            d.codes = code + 128 * h + 16 * b;
            d.w = w + h * w_group + first * TKVI_QUAD_128;
            d.sum = sum + 32 * h + 4 * b;
            tkvi_multiply_128(&d, weight_rows);
        }
}

static void tkvi_tiles_k_128(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                             const float *ref, int rows, int n, int planes, float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t centre2[TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED uint8_t code[TKVI_CHUNK_128 * TKVI_TILE_CODES];
    TKVI_ALIGNED tkvi_weight w[2][TKV_MAX_HEAD_DIM / 4 * TKVI_QUAD_128];
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS * TKVI_BLOCK];
    const int tokens = TKVI_BLOCK / s->groups;
    const int w_group = s->groups == 2 ? (int)(sizeof w[0] / sizeof w[0][0]) : 0;
    tkvi_fold_128 fold[2][TKVI_ROWS];
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, g, r, c = 0, first = 0, here = 0, weight_rows;
    tkvi_folding_128 a;
    (void)next;
    (void)n;
    s->format->side[TKV_K].meta(s, src, &tkvi_helpers_128, scale, zero);
    for (width = TKVI_MAX_WIDTH; width >= 0; width--) { /* 0: channels without codes */
        const int centre2_here = width ? tkvi_centre2_128(s, width) : 0;
        const float centre = width ? tkvi_centre(s, width) : 0.0f;
        for (i = width ? s->runs.n[width] : (s->pad - c) / 4; i > 0; i--, c += 4) {
            tkvi_save_ints_128(centre2 + c, tkvi_all_ints_128(centre2_here));
            for (g = 0; g < s->groups; g++) {
                float *z = zero + g * s->pad + c;
                const tkvi_f4 x = tkvi_sub_128(tkvi_load_128(z), tkvi_load_128(ref + c));
                tkvi_save_128(z, tkvi_centred_128(x, scale + g * s->pad + c, centre));
            }
        }
    }
    a.centre2 = centre2;
    a.n = s->pad;
    a.planes = planes;
    a.top = TKVI_PLANE;
    a.unit = 128;
    a.wide = tkvi_wide_places(s);
    a.coarse = tkvi_coarse_k(s);
    planes = 1;
    for (g = 0; g < s->groups; g++) {
        int had = planes;
        a.scale = scale + g * s->pad;
        a.zero = zero + g * s->pad;
        planes = tkvi_fold_rows_128(&a, q, rows, had == 2, w[g], fold[g]);
        if (g && planes > had) { /* groups have their planes in common */
            a.scale = scale;
            a.zero = zero;
            tkvi_fold_rows_128(&a, q, rows, 1, w[0], fold[0]);
        }
    }
    weight_rows = rows * tkvi_weight_rows_128(planes);
    memset(sum, 0, (size_t)(weight_rows * TKVI_BLOCK) * sizeof sum[0]); /* if there are no codes at all */
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i++) {
            uint8_t *to = code + here * TKVI_TILE_CODES;
            tkvi_unpack_128(src, &at, width, to);
            if (s->levels) tkvi_level_128(s->levels, to, TKVI_TILE_CODES, to);
            tkvi_next_tile(&at, width);
            if (++here < TKVI_CHUNK_128) continue;
            tkvi_chunk_k_128(code, first, here, w[0], w_group, weight_rows, sum);
            first += here;
            here = 0;
        }
    if (here) tkvi_chunk_k_128(code, first, here, w[0], w_group, weight_rows, sum);
    for (r = 0; r < rows; r++)
        for (g = 0; g < s->groups; g++)
            tkvi_unfold_128(sum + g * tokens, r, planes, fold[g], tokens, 0,
                            scores + r * TKVI_BLOCK + g * tokens);
}

/* Products of V for 16 channels, and the answers. */
static void tkvi_slab_v_128(const uint8_t *code, int n, const tkvi_weight *w, const tkvi_fold_128 *fold,
                            int rows, int planes, int no_sign, int pad, float *out) {
    TKVI_ALIGNED int32_t sum[2 * TKVI_ROWS * TKVI_BLOCK];
    tkvi_dots_128 d;
    int h, r;
    d.step = 64;
    d.apart = 16;
    d.steps = (n + 3) / 4; /* tokens beyond n have no weight */
    d.w = w;
    d.sum_apart = 4;
    d.add = 0;
    d.no_sign = no_sign;
    for (h = 0; h < 2; h++) {
        d.codes = code + 32 * h;
        d.sum = sum + 8 * h;
        tkvi_multiply_128(&d, rows * tkvi_weight_rows_128(planes));
    }
    for (r = 0; r < rows; r++) tkvi_unfold_128(sum, r, planes, fold, 16, 1, out + r * pad);
}

static void tkvi_tiles_v_128(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                             int rows, int n, int planes, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED float z[TKVI_BLOCK];
    TKVI_ALIGNED int32_t centre2[TKVI_BLOCK];
    TKVI_ALIGNED uint8_t code[4 * TKVI_TILE_CODES], level[4 * TKVI_TILE_CODES];
    TKVI_ALIGNED tkvi_weight w[TKVI_BLOCK / 4 * TKVI_QUAD_128];
    tkvi_fold_128 fold[TKVI_ROWS];
    tkvi_tile_at at = tkvi_tiles(&s->runs);
    int width, i, k, t, g, two = 1, slab = 0; /* first channel */
    tkvi_folding_128 a;
    (void)next;
    a.zero = z;
    a.centre2 = centre2;
    a.n = TKVI_BLOCK;
    a.planes = planes;
    a.top = tkvi_top_v(s);
    a.unit = 1;
    a.wide = 0;
    s->format->side[TKV_V].meta(s, src, &tkvi_helpers_128, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0, g = -1; i < s->runs.n[width]; i += 4) {
            const int channels = tkvi_slab_channels(s, width);
            if (g != slab / s->group) {
                const float *sc = scale + slab / s->group * TKVI_BLOCK, *ze = zero + (sc - scale);
                g = slab / s->group;
                for (t = 0; t < TKVI_BLOCK; t += 4) {
                    const tkvi_f4 x = tkvi_load_128(ze + t);
                    tkvi_save_128(z + t, tkvi_centred_128(x, sc + t, tkvi_centre(s, width)));
                    tkvi_save_ints_128(centre2 + t, tkvi_all_ints_128(tkvi_centre2_128(s, width)));
                }
                a.scale = sc;
                a.coarse = tkvi_coarse_v(s, width);
                two = tkvi_fold_rows_128(&a, p, rows, 0, w, fold);
            }
            for (k = 0; k < 4; k++) {
                if (16 * k < n) tkvi_unpack_128(src, &at, width, code + k * TKVI_TILE_CODES);
                tkvi_next_tile(&at, width);
            }
            for (k = 0; k < channels; k += 16) { /* pairs: 32 channels, a table for each half */
                const uint8_t *from = code;
                if (s->levels) {
                    tkvi_level_128(s->levels + tkvi_level_table(s, width, k / 16), code,
                                   tkvi_round_up(n, 4) * 16, level);
                    from = level;
                }
                tkvi_slab_v_128(from, n, w, fold, rows, two, !s->levels && width < 8, s->pad, out + slab + k);
            }
            slab += channels;
        }
}

static int tkvi_weigh_128(const float *s, int rows, float *m, float *sum, float *p) {
    return tkvi_weigh_rows(tkvi_max64_128, tkvi_exp64_128, s, rows, m, sum, p);
}

static const tkvi_kernels tkvi_kernels_128 = {
    TKVI_ISA_128,
    TKVI_NAME_128,
    {tkvi_f32_k_128, tkvi_f16_k_128, tkvi_bf16_k_128, tkvi_tiles_k_128, tkvi_decoded_k},
    {tkvi_f32_v_128, tkvi_f16_v_128, tkvi_bf16_v_128, tkvi_tiles_v_128, tkvi_decoded_v},
    &tkvi_helpers_128,
    tkvi_exp64_128,
    tkvi_max64_128,
    tkvi_weigh_128,
};

#endif /* TKVI_128 */

#endif /* TKVI_KERNELS_128_H */
/* ======== dispatch.h ======== */
/*
 * dispatch.h - which kernels this processor can run.
 *
 * x86 asks cpuid, and xgetbv whether the operating system saves the registers, each time a cache is created:
 * no globals. NEON and WASM SIMD are what the compiler was told; other machines have the scalar table. Calls the
 * kernel files.
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
#ifdef TKVI_128
    if (isa == TKV_ISA_AUTO || isa == TKVI_ISA_128) return &tkvi_kernels_128;
#endif
    return isa == TKV_ISA_AUTO || isa == TKV_ISA_SCALAR ? &tkvi_kernels_scalar : NULL;
}

TKV_API int tkv_isa_available(tkv_isa isa) { return tkvi_kernels_for(isa) != NULL; }

TKV_API const char *tkv_isa_name(tkv_isa isa) {
    static const char *const names[TKV_ISA_COUNT] = {"auto", "scalar", "avx2", "avx512", "neon", "wasm"};
    return isa >= TKV_ISA_AUTO && isa < TKV_ISA_COUNT ? names[isa] : NULL;
}

#endif /* TKVI_DISPATCH_H */
/* ======== many.h ======== */
/*
 * many.h - attention of many query rows at once, as a prompt brings them: what it asks of an instruction set.
 *
 * kernels.h reads a record for 8 rows, lanes being tokens or channels, and then folds scales into rows, rounds and
 * sums them across vectors. Here lanes are query rows, 16 to a vector: nothing is summed across a vector, and codes
 * are unpacked to bytes once for all lanes, then broadcast, four neighbours at a time:
 *
 *     scores[token][lanes]  = sum over tiles   of  weights[tile][lanes] . code[tile][token]
 *     out[channel][lanes]  += sum over quads   of  p[quad of tokens][lanes] . code[quad][channel]
 *
 * The arithmetic is that of kernels.h (weights of 8 bits, or 15 where one plane is too coarse) but for details: all
 * lanes have two planes as soon as one row needs them. There is no scalar twin: an instruction set without one uses
 * kernels.h.
 *
 * FlashAttention-2 (arXiv 2307.08691) for the order of loops; the maximum moves only when it must, as in
 * FlashAttention-4. Calls kernels.h and below.
 */
#ifndef TKVI_MANY_H
#define TKVI_MANY_H


#define TKVI_MANY 32          /* rows at most */
#define TKVI_MANY_FLOATS 4096 /* rows x channels: 16 rows beyond 128 channels; stacks are small */
#define TKVI_LAZY 8.0f        /* weights may grow to e^8 before sums are scaled down to a new maximum */

/* Scores become weights, in place. All arrays are [lanes]. */
typedef struct tkvi_weighing {
    float *s; /* [64][lanes] scores, then p = exp(s - m) */
    int lanes;
    const int32_t *low, *high; /* tokens low .. high-1 of the block are seen; NULL: all are */
    float *m, *l;              /* as good as the maximum, and the sum of p, so far */
    float *shrink;             /* out: what sums so far are to be multiplied by, if 1 is returned */
    float *far;                /* sum of p^2 so far, or NULL */
    const float *hears;        /* 1 where p of this block count for `far`, else 0; NULL: nowhere */
} tkvi_weighing;

/* Rows of queries, and what k keeps of them from block to block. */
typedef struct tkvi_many_queries {
    TKVI_ALIGNED float q[TKVI_MANY_FLOATS]; /* [channel as it comes][lanes] */
    TKVI_ALIGNED float ref[TKV_MAX_HEAD_DIM];
    int lanes;
    TKVI_ALIGNED float sorted[TKV_MAX_HEAD_DIM]; /* ref by position, if there are positions (`coded`) */
    /* Queries folded with scales of an earlier block, as integers: those of other blocks are near these. */
    TKVI_ALIGNED int16_t whole[TKVI_MANY_FLOATS]; /* by position; k knows their order */
    TKVI_ALIGNED float inverse[TKV_MAX_HEAD_DIM]; /* of that scale, by position; 0: it is 0 */
    TKVI_ALIGNED float unit[TKVI_MANY];           /* what they count */
    const uint8_t *order;                         /* the order of positions */
    int coded;                                    /* so many; 0: there are none yet */
} tkvi_many_queries;

typedef struct tkvi_many {
    /* As kernels.h has them for rows; scores: [64][lanes] */
    void (*k)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, tkvi_many_queries *q, int n,
              int planes, float *scores);
    /* p: [64][lanes], zero beyond n; out: [channel][lanes] */
    void (*v)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p, int lanes, int n,
              int planes, float *out);
    int (*weigh)(const tkvi_weighing *w);
    void (*shrink)(float *x, int n, int lanes, const float *by); /* x: [n][lanes] */
    void (*rotate_back)(float *x, int dim, int lanes);           /* x: [dim][lanes] */
    /* 16 rows of x become lanes of y: y[i][r] = x[r][i], n (a multiple of 16) of i. */
    void (*turn)(const float *x, int x_stride, int n, float *y, int y_stride);
} tkvi_many;

static int tkvi_many_lanes(int pad) { return pad <= TKVI_MANY_FLOATS / TKVI_MANY ? TKVI_MANY : 16; }

#endif /* TKVI_MANY_H */
/* ======== many_avx512.h ======== */
/*
 * many_avx512.h - the kernels of many.h for AVX-512 VNNI, and who has such kernels.
 *
 * One shape: 8 tokens or channels x 16 or 32 rows = 16 accumulators, of floats or of integers (vpdpbusd: codes of K are
 * the unsigned operand and weights the signed one; in V it is the other way round).
 */
#ifndef TKVI_MANY_AVX512_H
#define TKVI_MANY_AVX512_H


#ifdef TKVI_AVX512

#if defined(__GNUC__) && !defined(__clang__) /* as in kernels_avx512.h */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/* >>products */
#define TKVI_EIGHT_(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

TKVI_FLAT_AVX512 void tkvi_many_out_avx512(__m512i sum, const float *by, const float *rest, const int add,
                                           float *out) {
    __m512 from = _mm512_loadu_ps(rest);
    if (add) from = _mm512_add_ps(from, _mm512_loadu_ps(out));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(by), from));
}

/* Accumulator j of row vector a or b: a named variable each, in a function with one loop. Compilers then keep them in
 * registers; gcc 12 has two copies of each, as it converts them to lanes of 32 bits in the loop, if it can see that
 * they will be such. */
#define TKVI_HIDE_(j) __asm__("" : "+v"(a##j), "+v"(b##j));
#define TKVI_FROM_(j) __m512i a##j = _mm512_setzero_si512(), b##j = a##j;
#define TKVI_MAC_(j)                                                                                         \
    four = _mm512_set1_epi32(x[j]);                                                                          \
    a##j = keys ? _mm512_dpbusd_epi32(a##j, four, wa) : _mm512_dpbusd_epi32(a##j, wa, four);                 \
    if (nv > 1) b##j = keys ? _mm512_dpbusd_epi32(b##j, four, wb) : _mm512_dpbusd_epi32(b##j, wb, four);
#define TKVI_STEP_                                                                                           \
    wa = tkvi_bytes_avx512(w);                                                                               \
    wb = nv > 1 ? tkvi_bytes_avx512(w + 64) : wa;                                                            \
    TKVI_EIGHT_(TKVI_MAC_)                                                                                   \
    w += 64 * nv;                                                                                            \
    x += keys ? TKVI_BLOCK : 16;
#define TKVI_OUT_(j)                                                                                         \
    tkvi_many_out_avx512(a##j, by, rest, add, out + j * 16 * nv);                                            \
    if (nv > 1) tkvi_many_out_avx512(b##j, by + 16, rest + 16, add, out + j * 16 * nv + 16);
TKVI_FLAT_AVX512 void tkvi_many_eight_avx512(const uint8_t *w, const int32_t *x, int n, const float *by,
                                             const float *rest, float *out, const int keys, const int nv,
                                             const int add) {
    __m512i wa, wb, four;
    int i;
    TKVI_EIGHT_(TKVI_FROM_)
    for (i = 0; i < n; i += keys ? 1 : 4) {
        TKVI_STEP_
        if (!keys) { /* of 16 steps, mostly */
            TKVI_STEP_
            TKVI_STEP_
            TKVI_STEP_
        }
    }
    TKVI_EIGHT_(TKVI_HIDE_)
    TKVI_EIGHT_(TKVI_OUT_)
}
#undef TKVI_HIDE_
#undef TKVI_STEP_
#undef TKVI_FROM_
#undef TKVI_MAC_
#undef TKVI_OUT_

/* The same in floats: out[j][lanes] = sum over n of y[n][lanes] x[n * step + j * apart], or more by that. */
#define TKVI_FROM_(j)                                                                                        \
    __m512 a##j = add ? _mm512_loadu_ps(out + j * 16 * nv) : _mm512_setzero_ps();                            \
    __m512 b##j = add && nv > 1 ? _mm512_loadu_ps(out + j * 16 * nv + 16) : _mm512_setzero_ps();
#define TKVI_MAC_(j)                                                                                         \
    one = _mm512_set1_ps(x[j * apart]);                                                                      \
    a##j = _mm512_fmadd_ps(ya, one, a##j);                                                                   \
    if (nv > 1) b##j = _mm512_fmadd_ps(yb, one, b##j);
#define TKVI_OUT_(j)                                                                                         \
    _mm512_storeu_ps(out + j * 16 * nv, a##j);                                                               \
    if (nv > 1) _mm512_storeu_ps(out + j * 16 * nv + 16, b##j);
TKVI_FLAT_AVX512 void tkvi_many_floats_avx512(const float *y, const float *x, int n, const int step,
                                              const int apart, const int nv, const int add, float *out) {
    __m512 ya, yb, one;
    int i;
    TKVI_EIGHT_(TKVI_FROM_)
    for (i = 0; i < n; i++, y += 16 * nv, x += step) {
        ya = _mm512_loadu_ps(y);
        yb = nv > 1 ? _mm512_loadu_ps(y + 16) : ya;
        TKVI_EIGHT_(TKVI_MAC_)
    }
    TKVI_EIGHT_(TKVI_OUT_)
}
#undef TKVI_FROM_
#undef TKVI_MAC_
#undef TKVI_OUT_
#undef TKVI_EIGHT_

enum { TKVI_MANY_WIDE = TKV_MAX_HEAD_DIM + 16 }; /* from one exact key to the next; not a power of 2 */

/* Sums of products for eight tokens or channels: out[8][lanes] = by * sum + rest, or more by that (`add`).
 * w: [n][lanes][4] weights; x: four codes each, of eight neighbours, [n][64 tokens or 16 channels]. */
#define TKVI_MANY_PRODUCTS_(name, keys, nv, add)                                                             \
    static TKVI_NOINLINE TKVI_TARGET_AVX512 void tkvi_many_##name##nv##_avx512(                              \
        const uint8_t *w, const int32_t *x, int n, const float *by, const float *rest, float *out) {         \
        tkvi_many_eight_avx512(w, x, n, by, rest, out, keys, nv, add);                                       \
    }
TKVI_MANY_PRODUCTS_(scores, 1, 1, 0)
TKVI_MANY_PRODUCTS_(scores, 1, 2, 0)
TKVI_MANY_PRODUCTS_(more, 1, 1, 1)
TKVI_MANY_PRODUCTS_(more, 1, 2, 1)
TKVI_MANY_PRODUCTS_(values, 0, 1, 1)
TKVI_MANY_PRODUCTS_(values, 0, 2, 1)
#undef TKVI_MANY_PRODUCTS_

#define TKVI_MANY_FLOATS_(nv)                                                                                \
    static TKVI_NOINLINE TKVI_TARGET_AVX512 void tkvi_many_key##nv##_avx512(const float *q, const float *x,  \
                                                                            int n, float *out) {             \
        tkvi_many_floats_avx512(q, x, n, 1, TKVI_MANY_WIDE, nv, 0, out);                                     \
    }                                                                                                        \
    static TKVI_NOINLINE TKVI_TARGET_AVX512 void tkvi_many_value##nv##_avx512(                               \
        const float *p, const float *x, int n, float *out) {                                                 \
        tkvi_many_floats_avx512(p, x, n, 16, 1, nv, 1, out);                                                 \
    }
TKVI_MANY_FLOATS_(1)
TKVI_MANY_FLOATS_(2)
#undef TKVI_MANY_FLOATS_

/* >>exact tiers */
/* 8 tokens at a time; those beyond n repeat the last one. */
static TKVI_TARGET_AVX512 void tkvi_many_exact_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                        uintptr_t ahead, const float *q, const float *ref,
                                                        int lanes, int n, float *scores) {
    TKVI_ALIGNED float x[8 * TKVI_MANY_WIDE];
    const int row_bytes = s->pad * s->format->bits / 8;
    int t, j, c;
    for (t = 0; t < TKVI_BLOCK; t += 8, scores += 8 * lanes) {
        if (t >= n) {
            memset(scores, 0, (size_t)(8 * lanes) * sizeof(float));
            continue;
        }
        for (j = 0; j < 8; j++) {
            const uint8_t *row = src + tkvi_min(t + j, n - 1) * row_bytes;
            tkvi_prefetch_bytes(row, row_bytes, ahead);
            for (c = 0; c < s->pad; c += 16)
                _mm512_storeu_ps(
                    x + j * TKVI_MANY_WIDE + c,
                    _mm512_sub_ps(tkvi_values_avx512(s->format->stored, row, c), _mm512_loadu_ps(ref + c)));
        }
        if (lanes > 16) tkvi_many_key2_avx512(q, x, s->pad, scores);
        else tkvi_many_key1_avx512(q, x, s->pad, scores);
    }
}

/* 16 channels at a time */
static TKVI_TARGET_AVX512 void tkvi_many_exact_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                        uintptr_t ahead, const float *p, int lanes, int n,
                                                        float *out) {
    TKVI_ALIGNED float x[16 * TKVI_BLOCK];
    const int row_bytes = s->pad * s->format->bits / 8;
    int t, c, j;
    for (c = 0; c < s->pad; c += 16) {
        for (t = 0; t < n; t++) {
            _mm512_storeu_ps(x + 16 * t, tkvi_values_avx512(s->format->stored, src + t * row_bytes, c));
            tkvi_prefetch(src + t * row_bytes + c * s->format->bits / 8, ahead);
        }
        for (j = 0; j < 16; j += 8, out += 8 * lanes) {
            if (lanes > 16) tkvi_many_value2_avx512(p, x + j, n, out);
            else tkvi_many_value1_avx512(p, x + j, n, out);
        }
    }
}

/* >>tiles */
/* Four vectors of integers 0 .. 255, a byte each, side by side in their lanes. */
TKVI_FLAT_AVX512 __m512i tkvi_many_four_avx512(const __m512i *x) {
    const __m512i turn = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)); /* 4 x 4 bytes */
    return _mm512_shuffle_epi8(
        _mm512_packus_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3])), turn);
}

/* top / most, 0 where weights are next to nothing */
TKVI_FLAT_AVX512 __m512 tkvi_many_inverse_avx512(__m512 most, float top) {
    return _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, _mm512_set1_ps(1e-34f), _CMP_GT_OQ),
                               _mm512_set1_ps(top), most);
}

/* Would one plane be too coarse for any row? TKVI_NEEDS_TWO */
TKVI_FLAT_AVX512 int tkvi_many_tower_avx512(float coarse, __m512 most, __m512 squares, int top) {
    return _mm512_cmp_ps_mask(_mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(coarse), most), most),
                              _mm512_mul_ps(_mm512_set1_ps(TKVI_MAY_ERR(top)), squares), _CMP_GT_OQ);
}

static const float tkvi_many_none[TKVI_MANY] = {0.0f};

/* Weights of rows, in each plane, and what turns integers into answers: by[0] * first + by[1] * second + rest. */
typedef struct tkvi_many_fold {
    TKVI_ALIGNED uint8_t w[2][TKVI_MANY_FLOATS]; /* [tile or quad][lanes][4] */
    TKVI_ALIGNED float by[2][TKVI_MANY], rest[TKVI_MANY];
    int second; /* so many tiles or quads have a second plane */
} tkvi_many_fold;

TKVI_FLAT_AVX512 void tkvi_many_steps_avx512(__m512 step, tkvi_many_fold *f, int v) {
    _mm512_store_ps(f->by[0] + 16 * v, step);
    _mm512_store_ps(f->by[1] + 16 * v, _mm512_mul_ps(step, _mm512_set1_ps(1.0f / 128.0f)));
}

/* Of n tokens or channels, both planes of weights. */
static void tkvi_many_scores_avx512(const tkvi_many_fold *f, int lanes, int tiles, const int32_t *x, int n,
                                    float *out) {
    for (; n > 0; n -= 8, x += 8, out += 8 * lanes) {
        if (lanes > 16) tkvi_many_scores2_avx512(f->w[0], x, tiles, f->by[0], f->rest, out);
        else tkvi_many_scores1_avx512(f->w[0], x, tiles, f->by[0], f->rest, out);
        if (!f->second) continue;
        if (lanes > 16) tkvi_many_more2_avx512(f->w[1], x, f->second, f->by[1], tkvi_many_none, out);
        else tkvi_many_more1_avx512(f->w[1], x, f->second, f->by[1], tkvi_many_none, out);
    }
}

static void tkvi_many_values_avx512(const tkvi_many_fold *f, int lanes, int quads, const int32_t *x, int n,
                                    float *out) {
    for (; n > 0; n -= 8, x += 8, out += 8 * lanes) {
        if (lanes > 16) tkvi_many_values2_avx512(f->w[0], x, quads, f->by[0], f->rest, out);
        else tkvi_many_values1_avx512(f->w[0], x, quads, f->by[0], f->rest, out);
        if (!f->second) continue;
        if (lanes > 16) tkvi_many_values2_avx512(f->w[1], x, quads, f->by[1], tkvi_many_none, out);
        else tkvi_many_values1_avx512(f->w[1], x, quads, f->by[1], tkvi_many_none, out);
    }
}

/* Codes lie around `middle` / 2: takes that off, for the sums of weights, or of weights times middle, in each plane. */
TKVI_FLAT_AVX512 __m512 tkvi_many_less_avx512(__m512 rest, const tkvi_many_fold *f, int v, const __m512i *sum,
                                              float half) {
    int plane;
    for (plane = 0; plane < 2; plane++)
        rest = _mm512_fnmadd_ps(_mm512_mul_ps(_mm512_load_ps(f->by[plane] + 16 * v), _mm512_set1_ps(half)),
                                _mm512_cvtepi32_ps(sum[plane]), rest);
    return rest;
}

/* One group of tokens of a block: scale and rest by position, `coded` of them have codes. */
typedef struct tkvi_many_keys {
    const tkvi_side *s;
    tkvi_many_queries *q;
    const float *scale, *rest;
    const uint8_t *centre2; /* by position, twice the centre of codes */
    int coded, wide, planes;
    float coarse;
} tkvi_many_keys;

/* K's weights are made in integers of 16 bits, two to a multiplication of floats: q folded with the scales of an
 * earlier block, times scale over that scale (1 is 16384). Rows 4 l, 4 l + 1 of 16 stand in quarter l of the first of
 * two vectors, 4 l + 2 and 4 l + 3 in the second, four channels each: packed to bytes they are in order. */
enum { TKVI_MANY_ONE = 16384, TKVI_MANY_LEAST = TKVI_MANY_ONE / 16 };

/* Scales of this block over those of the other one; 0 if that one was too different. */
TKVI_FLAT_AVX512 int tkvi_many_near_avx512(const tkvi_many_keys *a, int16_t *by) {
    const tkvi_many_queries *q = a->q;
    int c;
    if (q->coded != a->coded) return 0;
    for (c = 0; c < a->coded; c += 16) {
        const __m512 scale = _mm512_loadu_ps(a->scale + c), inverse = _mm512_load_ps(q->inverse + c);
        const __m512i x = tkvi_nearest_avx512(_mm512_mul_ps(scale, inverse));
        const __mmask16 none = _mm512_cmp_ps_mask(scale, _mm512_setzero_ps(), _CMP_EQ_OQ);
        const __mmask16 zero = _mm512_cmp_ps_mask(inverse, _mm512_setzero_ps(), _CMP_EQ_OQ);
        const __mmask16 inside = _mm512_cmpge_epi32_mask(x, _mm512_set1_epi32(TKVI_MANY_LEAST)) &
                                 _mm512_cmple_epi32_mask(x, _mm512_set1_epi32(2 * TKVI_MANY_ONE - 1));
        const __mmask16 there = (__mmask16)(a->coded - c >= 16 ? 0xffff : (1 << (a->coded - c)) - 1);
        if (there & ~((none & zero) | (inside & ~none))) return 0;
        _mm256_storeu_si256((__m256i *)(void *)(by + c), _mm512_cvtsepi32_epi16(x));
    }
    return 1;
}

/* This block is that other one from now on. */
TKVI_FLAT_AVX512 void tkvi_many_anew_avx512(const tkvi_many_keys *a, const int nv, int16_t *by) {
    tkvi_many_queries *q = a->q;
    const uint8_t *order = a->s->order;
    __m512 most[2], times[2];
    int c, v, j;
    q->coded = a->coded;
    TKVI_UNROLL
    for (v = 0; v < nv; v++) most[v] = _mm512_setzero_ps();
    for (c = 0; c < a->coded; c++) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++) {
            const __m512 x = _mm512_loadu_ps(q->q + (order ? order[c] : c) * 16 * nv + 16 * v);
            most[v] = _mm512_max_ps(most[v], _mm512_abs_ps(_mm512_mul_ps(x, _mm512_set1_ps(a->scale[c]))));
        }
        q->inverse[c] = fabsf(a->scale[c]) > 1e-34f ? (float)TKVI_MANY_ONE / a->scale[c] : 0.0f;
        by[c] = fabsf(a->scale[c]) > 1e-34f ? TKVI_MANY_ONE : 0;
    }
    TKVI_UNROLL
    for (v = 0; v < nv; v++) {
        times[v] = tkvi_many_inverse_avx512(most[v], 32767.0f);
        _mm512_store_ps(q->unit + 16 * v, _mm512_mul_ps(most[v], _mm512_set1_ps(2.0f / 32767.0f)));
    }
    for (c = 0; c < a->coded; c += 4) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++) {
            int16_t *to = q->whole + (c * nv + 4 * v) * 16;
            __m512i x[4], y[2];
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                const float *from = q->q + (order ? order[c + j] : c + j) * 16 * nv + 16 * v;
                x[j] = tkvi_nearest_avx512(_mm512_mul_ps(
                    _mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(a->scale[c + j])), times[v]));
            }
            x[0] = _mm512_packs_epi32(x[0], x[1]);
            x[2] = _mm512_packs_epi32(x[2], x[3]);
            y[0] = _mm512_unpacklo_epi16(x[0], x[2]);
            y[1] = _mm512_unpackhi_epi16(x[0], x[2]);
            _mm512_store_si512((void *)to, _mm512_unpacklo_epi16(y[0], y[1]));
            _mm512_store_si512((void *)(to + 32), _mm512_unpackhi_epi16(y[0], y[1]));
        }
    }
}

/* Tile c / 4 of 16 rows: their weights, still in 16 bits. */
TKVI_FLAT_AVX512 void tkvi_many_pair_avx512(const int16_t *whole, const int16_t *by, __m512i *y) {
    int64_t four;
    memcpy(&four, by, 8);
    y[0] = _mm512_mulhrs_epi16(_mm512_load_si512((const void *)whole), _mm512_set1_epi64(four));
    y[1] = _mm512_mulhrs_epi16(_mm512_load_si512((const void *)(whole + 32)), _mm512_set1_epi64(four));
}

TKVI_FLAT_AVX512 __m512i tkvi_many_load4_avx512(const uint8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

/* 16 rows, `two`: with a second plane. Returns 1 if a row needs one and has none. */
TKVI_FLAT_AVX512 int tkvi_many_round_avx512(const tkvi_many_keys *a, const int16_t *by, const int nv, int v,
                                            int two, tkvi_many_fold *f) {
    const int16_t *whole = a->q->whole + 64 * v;
    const __m512i low = _mm512_set1_epi16(127);
    __m512i most[2], times[2], shift[2], y[2], sum[2], m, squares = _mm512_setzero_si512(), k, b, centre;
    __mmask16 some;
    int c, j;
    most[0] = most[1] = sum[0] = sum[1] = _mm512_setzero_si512();
    for (c = 0; c < a->coded; c += 4) {
        tkvi_many_pair_avx512(whole + 16 * nv * c, by + c, y);
        TKVI_UNROLL
        for (j = 0; j < 2; j++) most[j] = _mm512_max_epu16(most[j], _mm512_abs_epi16(y[j]));
    }
    TKVI_UNROLL
    for (j = 0; j < 2; j++) { /* of four channels */
        most[j] = _mm512_max_epu16(most[j], _mm512_ror_epi64(most[j], 32));
        most[j] = _mm512_max_epu16(most[j], _mm512_ror_epi64(most[j], 16));
        most[j] = _mm512_and_si512(most[j], _mm512_set1_epi64(0xffff));
    }
    /* rows in order: most << k is 16384 and more; b = 127 / (most << k), 127 .. 254 */
    m = _mm512_shuffle_epi32(_mm512_or_si512(most[0], _mm512_slli_epi64(most[1], 32)), _MM_PERM_DBCA);
    m = _mm512_max_epi32(m, _mm512_set1_epi32(128));
    k = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(m)),
                          23); /* vgetexpps: gcc 12's macro warns at -O0 */
    k = _mm512_sub_epi32(_mm512_set1_epi32(127 + 14), k);
    b = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_set1_ps((float)TKVI_PLANE * 32768.0f),
                                          _mm512_cvtepi32_ps(_mm512_sllv_epi32(m, k))));
    tkvi_many_steps_avx512(
        _mm512_div_ps(_mm512_mul_ps(_mm512_load_ps(a->q->unit + 16 * v), _mm512_set1_ps(32768.0f)),
                      _mm512_cvtepi32_ps(_mm512_sllv_epi32(b, k))),
        f, v);
    b = _mm512_shuffle_epi32(b, _MM_PERM_DBCA);
    k = _mm512_shuffle_epi32(k, _MM_PERM_DBCA);
    TKVI_UNROLL
    for (j = 0; j < 2; j++) { /* to all four channels of a row */
        const __m512i all =
            _mm512_broadcast_i32x4(j ? _mm_setr_epi8(4, 5, 4, 5, 4, 5, 4, 5, 12, 13, 12, 13, 12, 13, 12, 13)
                                     : _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9));
        times[j] = _mm512_shuffle_epi8(b, all);
        shift[j] = _mm512_shuffle_epi8(k, all);
    }
    for (c = 0; c < two; c += 4) { /* 128 hi + lo */
        __m512i lo[2];
        tkvi_many_pair_avx512(whole + 16 * nv * c, by + c, y);
        TKVI_UNROLL
        for (j = 0; j < 2; j++) {
            y[j] = _mm512_mulhrs_epi16(_mm512_sllv_epi16(y[j], shift[j]), _mm512_slli_epi16(times[j], 7));
            lo[j] = _mm512_and_si512(y[j], low);
            y[j] = _mm512_srai_epi16(y[j], 7);
        }
        y[0] = _mm512_packs_epi16(y[0], y[1]);
        lo[0] = _mm512_packs_epi16(lo[0], lo[1]);
        centre = tkvi_many_load4_avx512(a->centre2 + c);
        squares = _mm512_dpbusd_epi32(squares, _mm512_abs_epi8(y[0]), _mm512_abs_epi8(y[0]));
        sum[0] = _mm512_dpbusd_epi32(sum[0], centre, y[0]);
        sum[1] = _mm512_dpbusd_epi32(sum[1], centre, lo[0]);
        _mm512_store_si512((void *)(f->w[0] + 16 * nv * c + 64 * v), y[0]);
        _mm512_store_si512((void *)(f->w[1] + 16 * nv * c + 64 * v), lo[0]);
    }
    TKVI_UNROLL
    for (j = 0; j < 2; j++) times[j] = _mm512_sllv_epi16(times[j], shift[j]);
    for (; c < a->coded; c += 4) {
        tkvi_many_pair_avx512(whole + 16 * nv * c, by + c, y);
        y[0] = _mm512_packs_epi16(_mm512_mulhrs_epi16(y[0], times[0]), _mm512_mulhrs_epi16(y[1], times[1]));
        centre = tkvi_many_load4_avx512(a->centre2 + c);
        squares = _mm512_dpbusd_epi32(squares, _mm512_abs_epi8(y[0]), _mm512_abs_epi8(y[0]));
        sum[0] = _mm512_dpbusd_epi32(sum[0], centre, y[0]);
        _mm512_store_si512((void *)(f->w[0] + 16 * nv * c + 64 * v), y[0]);
    }
    _mm512_store_ps(f->rest + 16 * v, tkvi_many_less_avx512(_mm512_setzero_ps(), f, v, sum, 0.5f));
    /* the largest weight is 127, or there is none */
    some = _mm512_test_epi32_mask(squares, squares);
    return two < a->coded &&
           tkvi_many_tower_avx512(a->coarse, _mm512_maskz_mov_ps(some, _mm512_set1_ps((float)TKVI_PLANE)),
                                  _mm512_cvtepi32_ps(squares), TKVI_PLANE);
}

TKVI_FLAT_AVX512 void tkvi_many_fold_k_avx512(const tkvi_many_keys *a, const int nv, tkvi_many_fold *f) {
    const uint8_t *order = a->s->order;
    TKVI_ALIGNED int16_t by[TKV_MAX_HEAD_DIM];
    int c, v, j, two = a->planes == 2 ? a->coded : a->wide, tower = 0;
    __m512 rest[2][4];
    if (!tkvi_many_near_avx512(a, by)) tkvi_many_anew_avx512(a, nv, by);
    TKVI_UNROLL
    for (v = 0; v < nv; v++) tower |= tkvi_many_round_avx512(a, by, nv, v, two, f);
    if (tower) {
        two = a->coded;
        TKVI_UNROLL
        for (v = 0; v < nv; v++) tkvi_many_round_avx512(a, by, nv, v, two, f);
    }
    f->second = two / 4;
    TKVI_UNROLL
    for (v = 0; v < nv; v++) {
        TKVI_UNROLL
        for (j = 0; j < 4; j++) rest[v][j] = _mm512_setzero_ps();
    }
    for (c = 0; c < a->s->pad; c += 4) {
        TKVI_UNROLL
        for (j = 0; j < 4; j++) {
            const float *q = a->q->q + (order ? order[c + j] : c + j) * 16 * nv;
            const __m512 z = _mm512_set1_ps(a->rest[c + j]);
            TKVI_UNROLL
            for (v = 0; v < nv; v++) rest[v][j] = _mm512_fmadd_ps(_mm512_loadu_ps(q + 16 * v), z, rest[v][j]);
        }
    }
    TKVI_UNROLL
    for (v = 0; v < nv; v++) {
        rest[v][0] =
            _mm512_add_ps(_mm512_add_ps(rest[v][0], rest[v][1]), _mm512_add_ps(rest[v][2], rest[v][3]));
        _mm512_store_ps(f->rest + 16 * v, _mm512_add_ps(_mm512_load_ps(f->rest + 16 * v), rest[v][0]));
    }
}

/* Levels of a table are biased, as in kernels_avx512.h. */
#define TKVI_RUN_(width)                                                                                     \
    for (i = 0; i < s->runs.n[width]; i++, x += TKVI_TILE_CODES) {                                           \
        tkvi_planes_avx512(width, wide, tops, half, y);                                                      \
        tkvi_prefetch_bytes(wide, tkvi_wide_bytes[width], ahead);                                            \
        wide += tkvi_wide_bytes[width];                                                                      \
        half += tkvi_has_half[width];                                                                        \
        TKVI_UNROLL                                                                                          \
        for (p = 0; p < 4; p++) {                                                                            \
            if (s->levels && width <= 4) y[p] = _mm512_shuffle_epi8(table, y[p]);                            \
            _mm512_store_si512((void *)(x + 64 * p), y[p]);                                                  \
        }                                                                                                    \
    }
/* All tiles to bytes: [tile][64 tokens][4] */
static TKVI_TARGET_AVX512 void tkvi_many_unpack_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                         uintptr_t ahead, uint8_t *x) {
    const uint8_t *wide = src, *tops = src + tkvi_tiles(&s->runs).halves;
    __m512i y[4], table = _mm512_setzero_si512();
    int half = 0, i, p;
    if (s->levels) table = tkvi_levels_avx512(s->levels, TKVI_BIAS_AVX512);
    TKVI_RUN_(8)
    TKVI_RUN_(6)
    TKVI_RUN_(5)
    TKVI_RUN_(4)
    TKVI_RUN_(3)
    TKVI_RUN_(2)
    TKVI_RUN_(1)
    tkvi_prefetch_bytes(tops, (int)(src + s->bytes - tops), ahead);
}
#undef TKVI_RUN_

/* zero - ref + centre * scale, in place of zero */
static TKVI_TARGET_AVX512 void tkvi_many_rests_avx512(const tkvi_side *s, const uint8_t *centre2,
                                                      const float *ref, const float *scale, float *zero) {
    const __m512 half = _mm512_set1_ps(s->levels ? 0.0f : 0.5f);
    int c, g;
    for (c = 0; c < s->pad; c += 16) {
        const __m512 middle = _mm512_mul_ps(half, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(
                                                      (const __m128i *)(const void *)(centre2 + c)))));
        for (g = 0; g < s->groups; g++) {
            float *z = zero + g * s->pad + c;
            _mm512_storeu_ps(z, _mm512_fmadd_ps(_mm512_loadu_ps(scale + g * s->pad + c), middle,
                                                _mm512_sub_ps(_mm512_loadu_ps(z), _mm512_loadu_ps(ref + c))));
        }
    }
}

static TKVI_TARGET_AVX512 void tkvi_many_tiles_k_avx512(const tkvi_side *s, const uint8_t *src,
                                                        uintptr_t ahead, tkvi_many_queries *q, int planes,
                                                        float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], rest[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int32_t x[TKVI_BLOCK * TKV_MAX_HEAD_DIM / 4];
    TKVI_ALIGNED uint8_t centre2[TKV_MAX_HEAD_DIM];
    const int tokens = TKVI_BLOCK / s->groups;
    tkvi_many_fold fold;
    tkvi_many_keys a;
    int width, g, c;
    s->format->side[TKV_K].meta(s, src, &tkvi_helpers_avx512, scale, rest);
    tkvi_many_unpack_k_avx512(s, src, ahead, (uint8_t *)x);
    for (width = TKVI_MAX_WIDTH, c = 0; width > 0; c += 4 * s->runs.n[width--])
        memset(centre2 + c, tkvi_centre2(&tkvi_steps_avx512, s, width), (size_t)(4 * s->runs.n[width]));
    memset(centre2 + c, 0, (size_t)(s->pad - c));
    a.coded = c;
    if (q->coded == 0 || q->order != s->order) { /* the same for all blocks, mostly */
        q->order = s->order;
        q->coded = 0;
        for (c = 0; c < s->pad; c++) q->sorted[c] = q->ref[s->order ? s->order[c] : c];
    }
    tkvi_many_rests_avx512(s, centre2, q->sorted, scale, rest);
    a.s = s;
    a.q = q;
    a.centre2 = centre2;
    a.wide = tkvi_wide_places(s);
    a.planes = planes;
    a.coarse = tkvi_coarse_k(s);
    for (g = 0; g < s->groups; g++) {
        a.scale = scale + g * s->pad;
        a.rest = rest + g * s->pad;
        if (q->lanes > 16) tkvi_many_fold_k_avx512(&a, 2, &fold);
        else tkvi_many_fold_k_avx512(&a, 1, &fold);
        tkvi_many_scores_avx512(&fold, q->lanes, a.coded / 4, x + g * tokens, tokens,
                                scores + g * tokens * q->lanes);
    }
}

/* Channels of one width and group. */
typedef struct tkvi_many_values {
    const float *p, *scale, *zero;
    float centre, middle, coarse; /* of the codes; the same of what is multiplied, twice */
    int planes;
} tkvi_many_values;

TKVI_FLAT_AVX512 void tkvi_many_fold_v_avx512(const tkvi_many_values *a, const int nv, tkvi_many_fold *f) {
    const int lanes = 16 * nv;
    TKVI_ALIGNED float rest[TKVI_BLOCK];
    const __m512i ones = _mm512_set1_epi8(1);
    __m512 most[2], sum[2], squares[2], by[2];
    __m512i all[2][2];
    int t, v, j, tower = a->planes == 2, some = 0;
    for (t = 0; t < TKVI_BLOCK; t += 16) {
        const __m512 y = _mm512_loadu_ps(a->scale + t);
        const __m512 z = _mm512_fmadd_ps(y, _mm512_set1_ps(a->centre), _mm512_loadu_ps(a->zero + t));
        some |= _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        _mm512_store_ps(rest + t, z);
    }
    TKVI_UNROLL
    for (v = 0; v < nv; v++) most[v] = sum[v] = squares[v] = _mm512_setzero_ps();
    for (t = 0; t < TKVI_BLOCK; t++) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++) {
            const __m512 y =
                _mm512_mul_ps(_mm512_loadu_ps(a->p + t * lanes + 16 * v), _mm512_set1_ps(a->scale[t]));
            most[v] = _mm512_max_ps(most[v], y);
        }
    }
    for (t = 0; t < TKVI_BLOCK && a->coarse > TKVI_MAY_ERR(TKVI_PLANE_V); t++) { /* else no row needs two */
        TKVI_UNROLL
        for (v = 0; v < nv; v++) {
            const __m512 y =
                _mm512_mul_ps(_mm512_loadu_ps(a->p + t * lanes + 16 * v), _mm512_set1_ps(a->scale[t]));
            squares[v] = _mm512_fmadd_ps(y, y, squares[v]);
        }
    }
    for (t = 0; t < TKVI_BLOCK && some; t++) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++)
            sum[v] =
                _mm512_fmadd_ps(_mm512_loadu_ps(a->p + t * lanes + 16 * v), _mm512_set1_ps(rest[t]), sum[v]);
    }
    if (a->coarse > TKVI_MAY_ERR(TKVI_PLANE_V)) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++)
            tower |= tkvi_many_tower_avx512(a->coarse, most[v], squares[v], TKVI_PLANE_V);
    }
    f->second = tower ? TKVI_BLOCK / 4 : 0;
    TKVI_UNROLL
    for (v = 0; v < nv; v++) {
        const float top = tower ? (float)TKVI_TWO_PLANES : (float)TKVI_PLANE_V,
                    first = tower ? (float)TKVI_PLANE : (float)TKVI_PLANE_V;
        by[v] = tkvi_many_inverse_avx512(most[v], top);
        tkvi_many_steps_avx512(_mm512_mul_ps(most[v], _mm512_set1_ps(1.0f / first)), f, v);
        all[v][0] = all[v][1] = _mm512_setzero_si512();
    }
    for (t = 0; t < TKVI_BLOCK; t += 4) {
        TKVI_UNROLL
        for (v = 0; v < nv; v++) {
            __m512i x[4];
            TKVI_UNROLL
            for (j = 0; j < 4; j++) {
                const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(a->p + (t + j) * lanes + 16 * v),
                                               _mm512_set1_ps(a->scale[t + j]));
                x[j] = tkvi_nearest_avx512(_mm512_mul_ps(y, by[v]));
            }
            if (tower) { /* 128 hi + lo */
                __m512i lo[4];
                TKVI_UNROLL
                for (j = 0; j < 4; j++) {
                    lo[j] = _mm512_and_si512(x[j], _mm512_set1_epi32(127));
                    x[j] = _mm512_srli_epi32(x[j], 7);
                }
                lo[0] = tkvi_many_four_avx512(lo);
                all[v][1] = _mm512_dpbusd_epi32(all[v][1], lo[0], ones);
                _mm512_store_si512((void *)(f->w[1] + t * lanes + 64 * v), lo[0]);
            }
            x[0] = tkvi_many_four_avx512(x);
            all[v][0] = _mm512_dpbusd_epi32(all[v][0], x[0], ones);
            _mm512_store_si512((void *)(f->w[0] + t * lanes + 64 * v), x[0]);
        }
    }
    TKVI_UNROLL
    for (v = 0; v < nv; v++)
        _mm512_store_ps(f->rest + 16 * v, tkvi_many_less_avx512(sum[v], f, v, all[v], 0.5f * a->middle));
}

/* One slab of 16 channels, or 32 if it is one of pairs, to signed bytes: [slab][quad of tokens][16 channels][4]. */
TKVI_FLAT_AVX512 void tkvi_many_slab_avx512(const tkvi_side *s, const int width, const uint8_t *wide,
                                            const uint8_t *tops, int half, int8_t *x) {
    const int pairs = s->pairs && width == 3, levels = s->levels && width <= 4;
    __m512i y[4], table = _mm512_setzero_si512(), upper = table;
    int i, p;
    if (levels) table = tkvi_levels_avx512(s->levels + tkvi_level_table(s, width, 0), 0);
    if (pairs) upper = tkvi_levels_avx512(s->levels + tkvi_level_table(s, width, 1), 0);
    for (i = 0; i < 4; i++, x += TKVI_TILE_CODES) {
        tkvi_planes_avx512(width, wide, tops, half, y);
        wide += tkvi_wide_bytes[width];
        half += tkvi_has_half[width];
        TKVI_UNROLL
        for (p = 0; p < 4; p++) {
            int8_t *to = x + 64 * p;
            if (pairs)
                _mm512_store_si512((void *)(to + 4 * TKVI_TILE_CODES), _mm512_shuffle_epi8(upper, y[p]));
            if (levels) y[p] = _mm512_shuffle_epi8(table, y[p]);
            else if (width == 8) y[p] = _mm512_xor_si512(y[p], _mm512_set1_epi8(-128));
            _mm512_store_si512((void *)to, y[p]);
        }
    }
}

#define TKVI_RUN_(bits)                                                                                      \
    case bits: tkvi_many_slab_avx512(s, bits, wide, tops, half, x); break;
static TKVI_TARGET_AVX512 void tkvi_many_unpack_v_avx512(const tkvi_side *s, int width, const uint8_t *wide,
                                                         const uint8_t *tops, int half, int8_t *x) {
    switch (width) {
        TKVI_RUN_(1)
        TKVI_RUN_(2)
        TKVI_RUN_(3)
        TKVI_RUN_(4)
        TKVI_RUN_(5)
        TKVI_RUN_(6)
        TKVI_RUN_(8)
    default: break;
    }
}
#undef TKVI_RUN_

static TKVI_TARGET_AVX512 void tkvi_many_tiles_v_avx512(const tkvi_side *s, const uint8_t *src,
                                                        uintptr_t ahead, const float *p, int lanes, int n,
                                                        int planes, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED int32_t x[2 * TKVI_TILE_CODES];
    const uint8_t *wide = src, *tops = src + tkvi_tiles(&s->runs).halves;
    tkvi_many_fold fold;
    tkvi_many_values a;
    int width, i, c, half = 0, slab = 0;
    s->format->side[TKV_V].meta(s, src, &tkvi_helpers_avx512, scale, zero);
    a.p = p;
    a.planes = planes;
    tkvi_prefetch_bytes(tops, (int)(src + s->bytes - tops), ahead);
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int slabs = tkvi_slab_channels(s, width) / 16;
        for (i = 0; i < s->runs.n[width]; i += 4, slab += slabs) {
            if (i == 0 || slab * 16 % s->group == 0) { /* a new group, or new codes */
                a.scale = scale + slab * 16 / s->group * TKVI_BLOCK;
                a.zero = zero + slab * 16 / s->group * TKVI_BLOCK;
                a.centre = tkvi_centre(s, width);
                a.middle = s->levels ? 0.0f : (float)((1 << width) - 1 - (width == 8 ? 256 : 0));
                a.coarse = tkvi_coarse_v(s, width);
                if (lanes > 16) tkvi_many_fold_v_avx512(&a, 2, &fold);
                else tkvi_many_fold_v_avx512(&a, 1, &fold);
            }
            tkvi_many_unpack_v_avx512(s, width, wide, tops, half, (int8_t *)x);
            tkvi_prefetch_bytes(wide, 4 * tkvi_wide_bytes[width], ahead);
            wide += 4 * tkvi_wide_bytes[width];
            half += 4 * tkvi_has_half[width];
            for (c = 0; c < slabs; c++, out += 16 * lanes)
                tkvi_many_values_avx512(&fold, lanes, (n + 15) / 16 * 4, x + c * TKVI_TILE_CODES, 16, out);
        }
    }
}

/* >>all */
#define TKVI_LOG2E 1.44269502f
/* exp(s - m), m being multiplied by log2 e already; 0 below -87. As tkvi_exp_avx512, with less for the multipliers. */
TKVI_FLAT_AVX512 __m512 tkvi_many_exp_avx512(__m512 s, __m512 m) {
    const __m512 x = _mm512_fmsub_ps(s, _mm512_set1_ps(TKVI_LOG2E), m);
    const __m512 n = _mm512_cvtepi32_ps(_mm512_cvtps_epi32(x)); /* vrndscaleps: the same */
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.326472728e-03f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.671512657e-03f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.550733743e-02f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.402224208e-01f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.931469776e-01f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_GE_OQ), y, n);
}

static TKVI_TARGET_AVX512 int tkvi_many_weigh_avx512(const tkvi_weighing *w) {
    const __m512 hidden = _mm512_set1_ps(TKVI_HIDDEN);
    int v, t, k, shrinks = 0;
    for (v = 0; v < w->lanes; v += 16) {
        float *s = w->s + v;
        __m512 tops[4], most, m = _mm512_loadu_ps(w->m + v), by = _mm512_set1_ps(1.0f), sum, top, far;
        __mmask16 grows, before;
        TKVI_UNROLL
        for (t = 0; t < 4; t++) tops[t] = hidden;
        if (w->low) {
            const __m512i low = _mm512_loadu_si512((const void *)(w->low + v));
            const __m512i high = _mm512_loadu_si512((const void *)(w->high + v));
            for (t = 0; t < TKVI_BLOCK; t++) {
                const __m512i at = _mm512_set1_epi32(t);
                const __mmask16 sees =
                    _mm512_mask_cmp_epi32_mask(_mm512_cmpge_epi32_mask(at, low), at, high, _MM_CMPINT_LT);
                const __m512 x = _mm512_mask_mov_ps(hidden, sees, _mm512_loadu_ps(s + t * w->lanes));
                _mm512_storeu_ps(s + t * w->lanes, x);
                tops[0] = _mm512_max_ps(tops[0], x);
            }
        } else {
            for (t = 0; t < TKVI_BLOCK; t += 4) {
                TKVI_UNROLL
                for (k = 0; k < 4; k++)
                    tops[k] = _mm512_max_ps(tops[k], _mm512_loadu_ps(s + (t + k) * w->lanes));
            }
        }
        most = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
        grows = _mm512_cmp_ps_mask(most, _mm512_add_ps(m, _mm512_set1_ps(TKVI_LAZY)), _CMP_GT_OQ);
        before = _mm512_mask_cmp_ps_mask(grows, m, hidden, _CMP_GT_OQ);
        if (before) by = _mm512_mask_mov_ps(by, before, tkvi_exp_avx512(_mm512_sub_ps(m, most)));
        _mm512_storeu_ps(w->shrink + v, by);
        shrinks |= before;
        m = _mm512_mask_mov_ps(m, grows, most);
        _mm512_storeu_ps(w->m + v, m);
        /* rows that have seen nothing: 0, and exp of -1e30 */
        top = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(m, hidden, _CMP_GT_OQ), m, _mm512_set1_ps(TKVI_LOG2E));
        sum = far = _mm512_setzero_ps();
        for (t = 0; t < TKVI_BLOCK; t++) {
            const __m512 y = tkvi_many_exp_avx512(_mm512_loadu_ps(s + t * w->lanes), top);
            _mm512_storeu_ps(s + t * w->lanes, y);
            sum = _mm512_add_ps(sum, y);
        }
        _mm512_storeu_ps(w->l + v, _mm512_fmadd_ps(_mm512_loadu_ps(w->l + v), by, sum));
        if (!w->far) continue;
        for (t = 0; t < TKVI_BLOCK && w->hears; t++) {
            const __m512 y = _mm512_loadu_ps(s + t * w->lanes);
            far = _mm512_fmadd_ps(y, y, far);
        }
        if (w->hears) far = _mm512_mul_ps(far, _mm512_loadu_ps(w->hears + v));
        by = _mm512_mul_ps(by, by);
        _mm512_storeu_ps(w->far + v, _mm512_fmadd_ps(_mm512_loadu_ps(w->far + v), by, far));
    }
    return shrinks != 0;
}

static TKVI_TARGET_AVX512 void tkvi_many_shrink_avx512(float *x, int n, int lanes, const float *by) {
    int i, v;
    for (i = 0; i < n; i++, x += lanes)
        for (v = 0; v < lanes; v += 16)
            _mm512_storeu_ps(x + v, _mm512_mul_ps(_mm512_loadu_ps(x + v), _mm512_loadu_ps(by + v)));
}

/* rotate.h, rows in lanes */
static TKVI_TARGET_AVX512 void tkvi_many_window_avx512(float *x, int n, int lanes) {
    int h, i, j, v;
    for (h = 1; h < n; h *= 2)
        for (i = 0; i < n; i += 2 * h)
            for (j = i; j < i + h; j++)
                for (v = 0; v < lanes; v += 16) {
                    float *at = x + j * lanes + v, *to = at + h * lanes;
                    __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(to);
                    tkvi_butterfly_avx512(&a, &b);
                    _mm512_storeu_ps(at, a);
                    _mm512_storeu_ps(to, b);
                }
}

static TKVI_TARGET_AVX512 void tkvi_many_rotate_back_avx512(float *x, int dim, int lanes) {
    const int k = tkvi_log2_floor(dim), n = 1 << k;
    int i, v;
    if (n < dim) {
        tkvi_many_window_avx512(x + (dim - n) * lanes, n, lanes);
        for (i = (dim - n) * lanes; i < dim * lanes; i += 16)
            _mm512_storeu_ps(x + i,
                             _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(tkvi_hadamard_norm[k])));
    }
    tkvi_many_window_avx512(x, n, lanes);
    for (i = 0; i < dim; i++) {
        const float sign = tkvi_signs[i / 32] >> i % 32 & 1 ? -1.0f : 1.0f;
        const __m512 by = _mm512_set1_ps(i < n ? sign * tkvi_hadamard_norm[k] : sign);
        for (v = i * lanes; v < (i + 1) * lanes; v += 16)
            _mm512_storeu_ps(x + v, _mm512_mul_ps(_mm512_loadu_ps(x + v), by));
    }
}

/* 16 x 16 at a time */
static TKVI_TARGET_AVX512 void tkvi_many_turn_avx512(const float *x, int x_stride, int n, float *y,
                                                     int y_stride) {
    int i, r, k;
    for (i = 0; i < n; i += 16) {
        __m512 a[16], b[16];
        TKVI_UNROLL
        for (r = 0; r < 16; r++) a[r] = _mm512_loadu_ps(x + r * x_stride + i);
        TKVI_UNROLL
        for (r = 0; r < 16; r += 2) {
            b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]);
            b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
        }
        TKVI_UNROLL
        for (r = 0; r < 16; r += 4)
            for (k = 0; k < 2; k++) {
                const __m512d lo = _mm512_castps_pd(b[r + k]), hi = _mm512_castps_pd(b[r + k + 2]);
                a[r + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
                a[r + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
            }
        TKVI_UNROLL
        for (k = 0; k < 4; k++) { /* a[4 q + k] has columns k, 4 + k, 8 + k, 12 + k of rows 4 q .. 4 q + 3 */
            const __m512 s = _mm512_shuffle_f32x4(a[k], a[4 + k], 0x44),
                         t = _mm512_shuffle_f32x4(a[k], a[4 + k], 0xee);
            const __m512 u = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0x44),
                         w = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0xee);
            _mm512_storeu_ps(y + (i + k) * y_stride, _mm512_shuffle_f32x4(s, u, 0x88));
            _mm512_storeu_ps(y + (i + k + 4) * y_stride, _mm512_shuffle_f32x4(s, u, 0xdd));
            _mm512_storeu_ps(y + (i + k + 8) * y_stride, _mm512_shuffle_f32x4(t, w, 0x88));
            _mm512_storeu_ps(y + (i + k + 12) * y_stride, _mm512_shuffle_f32x4(t, w, 0xdd));
        }
    }
}

static void tkvi_many_k_avx512(const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                               tkvi_many_queries *q, int n, int planes, float *scores) {
    const uintptr_t ahead = tkvi_ahead(src, next);
    if (tkvi_is_exact(s->format)) tkvi_many_exact_k_avx512(s, src, ahead, q->q, q->ref, q->lanes, n, scores);
    else tkvi_many_tiles_k_avx512(s, src, ahead, q, planes, scores);
}

static void tkvi_many_v_avx512(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                               int lanes, int n, int planes, float *out) {
    const uintptr_t ahead = tkvi_ahead(src, next);
    if (tkvi_is_exact(s->format)) tkvi_many_exact_v_avx512(s, src, ahead, p, lanes, n, out);
    else tkvi_many_tiles_v_avx512(s, src, ahead, p, lanes, n, planes, out);
}

static const tkvi_many tkvi_many_avx512 = {tkvi_many_k_avx512,           tkvi_many_v_avx512,
                                           tkvi_many_weigh_avx512,       tkvi_many_shrink_avx512,
                                           tkvi_many_rotate_back_avx512, tkvi_many_turn_avx512};

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* TKVI_AVX512 */

/* NULL: 8 rows at a time, by kernels.h. */
static const tkvi_many *tkvi_many_of(tkv_isa isa) {
#ifdef TKVI_AVX512
    if (isa == TKV_ISA_AVX512) return &tkvi_many_avx512;
#endif
    (void)isa;
    return NULL;
}

#endif /* TKVI_MANY_AVX512_H */
/* ======== policy.h ======== */
/*
 * policy.h - the pressure controller: from a stream of pressures (bytes held over bytes allowed) to a level of
 * an ordered ladder, 0 the loosest. It owns no memory and knows no cache.
 *
 *     pressure     .5 .7 .9 1. 1. .9 .6 .3        each observation moves the average by alpha
 *     average   -> tighten while it is at or above the next threshold
 *               -> relax one level while it is below the present threshold less the hysteresis
 *
 * One lock guards a controller's numbers, so that counters always fit the level; without atomics (neither gcc nor
 * clang) a controller belongs to one thread. May call base.
 */
#ifndef TKVI_POLICY_H
#define TKVI_POLICY_H


typedef struct tkvi_profile {
    const char *name;
    tkv_policy_config cfg;
} tkvi_profile;

static const tkvi_profile tkvi_profiles[] = {
    {"default", {{.80f, .95f, 0, 0, 0, 0, 0}, .05f, .20f, 0, 2}},
    {"fp16_only", {{.80f, .95f, 0, 0, 0, 0, 0}, .05f, .20f, 0, TKV_NONE}},
    {"aggressive", {{.50f, .80f, 0, 0, 0, 0, 0}, .05f, .30f, 1, 2}},
};

TKV_API tkv_status tkv_policy_profile(tkv_policy_config *cfg, const char *name) {
    size_t i;
    for (i = 0; cfg && name && i < sizeof tkvi_profiles / sizeof *tkvi_profiles; i++)
        if (strcmp(name, tkvi_profiles[i].name) == 0) {
            *cfg = tkvi_profiles[i].cfg;
            return TKV_OK;
        }
    return TKV_ERR_ARG;
}

/* Levels above 0 that the thresholds give. */
static int tkvi_policy_levels(const tkv_policy_config *cfg) {
    int n = 0;
    while (n < TKV_MAX_LEVELS - 1 && tkvi_bits(cfg->threshold[n]) != 0) n++;
    return n;
}

/* In [low, high]; by bits, so that a NaN is not, under -ffast-math either. */
static int tkvi_within(float x, float low, float high) { return tkvi_is_finite(x) && x >= low && x <= high; }

/* The config with its defaults filled in, or what is wrong with it. */
static const char *tkvi_policy_fill(const tkv_policy_config *from, tkv_policy_config *cfg) {
    int i, n, any = 0;
    *cfg = *from;
    for (i = 0; i < TKV_MAX_LEVELS - 1; i++) any |= tkvi_bits(cfg->threshold[i]) != 0;
    if (!any) {
        cfg->threshold[0] = tkvi_profiles[0].cfg.threshold[0];
        cfg->threshold[1] = tkvi_profiles[0].cfg.threshold[1];
    }
    if (tkvi_bits(cfg->hysteresis) == 0) cfg->hysteresis = tkvi_profiles[0].cfg.hysteresis;
    if (tkvi_bits(cfg->alpha) == 0) cfg->alpha = tkvi_profiles[0].cfg.alpha;
    n = tkvi_policy_levels(cfg);
    for (i = 0; i < TKV_MAX_LEVELS - 1; i++) {
        if (i < n ? !tkvi_within(cfg->threshold[i], 1e-6f, 1.0f) : tkvi_bits(cfg->threshold[i]) != 0)
            return "thresholds must be above 0 and at most 1, without gaps";
        if (i > 0 && i < n && cfg->threshold[i] < cfg->threshold[i - 1]) return "thresholds must rise";
    }
    if (!tkvi_within(cfg->alpha, 1e-6f, 1.0f)) return "alpha must be above 0 and at most 1";
    if (!tkvi_within(cfg->hysteresis, 0.0f, 1.0f) || cfg->hysteresis >= cfg->threshold[0])
        return "hysteresis must be at least 0 and below the first threshold";
    if (cfg->max_level == 0) cfg->max_level = n;
    if (cfg->max_level == TKV_NONE) cfg->max_level = 0;
    if (cfg->max_level < 0 || cfg->max_level > n)
        return "max_level must be a level, TKV_NONE or 0 for the last";
    if (cfg->min_level < 0 || cfg->min_level > cfg->max_level) return "min_level must be from 0 to max_level";
    return NULL;
}

static int tkvi_policy_target(const tkv_policy_config *cfg, float average, int level) {
    int n = tkvi_policy_levels(cfg), had = level;
    while (level < n && average >= cfg->threshold[level]) level++;
    if (level == had && level > 0 && average < cfg->threshold[level - 1] - cfg->hysteresis) level--;
    return tkvi_max(cfg->min_level, tkvi_min(cfg->max_level, level));
}

TKV_API int tkv_policy_target(const tkv_policy_config *cfg, float average, int level) {
    tkv_policy_config full;
    if (!cfg || tkvi_policy_fill(cfg, &full)) return 0;
    level = tkvi_max(full.min_level, tkvi_min(full.max_level, level));
    return tkvi_is_finite(average) ? tkvi_policy_target(&full, average, level) : level;
}

/* >>the controller */
TKV_API tkv_status tkv_policy_init(tkv_policy *p, const tkv_policy_config *cfg, const char **reason) {
    tkv_policy_config none, full;
    const char *wrong;
    memset(&none, 0, sizeof none);
    if (reason) *reason = "";
    if (!p) return TKV_ERR_ARG;
    wrong = tkvi_policy_fill(cfg ? cfg : &none, &full);
    if (wrong) {
        if (reason) *reason = wrong;
        return TKV_ERR_CONFIG;
    }
    memset(p, 0, sizeof *p);
    p->cfg = full;
    p->now.level = full.min_level;
    p->now.left = -1.0f;
    return TKV_OK;
}

/* The averages take one more pressure, a number; the level stays. */
static void tkvi_policy_take(tkv_policy *p, float pressure) {
    tkv_policy_info *now = &p->now;
    const float x = pressure < 0.0f ? 0.0f : pressure > 1.0f ? 1.0f : pressure, a = p->cfg.alpha;
    const float step = now->samples ? x - now->last : 0.0f;
    now->average = now->samples ? now->average + a * (x - now->average) : x;
    now->trend += a * (step - now->trend);
    now->last = x;
    now->peak = x > now->peak ? x : now->peak;
    now->left = now->trend > 1e-9f ? (1.0f - x) / now->trend : -1.0f;
    now->samples++;
}

static void tkvi_policy_move(tkv_policy_info *now, int level) {
    if (level > now->level) now->tightened += (uint64_t)(level - now->level);
    else now->relaxed += (uint64_t)(now->level - level);
    now->level = level;
}

/* For a cache, which decides itself when it follows: where the policy would go, and that it went there. */
static int tkvi_policy_sample(tkv_policy *p, float pressure, int level) {
    tkvi_policy_take(p, pressure);
    return tkvi_policy_target(&p->cfg, p->now.average, level);
}

TKV_API int tkv_policy_observe(tkv_policy *p, float pressure) {
    tkv_policy_info *now;
    int level;
    if (!p) return 0;
    now = &p->now;
    tkvi_lock(&p->lock);
    if (!tkvi_is_finite(pressure)) {
        now->refused++;
    } else {
        tkvi_policy_take(p, pressure);
        tkvi_policy_move(now, tkvi_policy_target(&p->cfg, now->average, now->level));
    }
    level = now->level;
    tkvi_unlock(&p->lock);
    return level;
}

TKV_API tkv_status tkv_policy_read(tkv_policy *p, tkv_policy_info *out) {
    if (!p || !out) return TKV_ERR_ARG;
    tkvi_lock(&p->lock);
    *out = p->now;
    tkvi_unlock(&p->lock);
    return TKV_OK;
}

TKV_API void tkv_policy_reset(tkv_policy *p) {
    if (!p) return;
    tkvi_lock(&p->lock);
    memset(&p->now, 0, sizeof p->now);
    p->now.level = p->cfg.min_level;
    p->now.left = -1.0f;
    tkvi_unlock(&p->lock);
}

#endif /* TKVI_POLICY_H */
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

typedef struct tkvi_bytes { /* of a block, all heads */
    size_t codes, metadata, total;
} tkvi_bytes;

/* A block's bytes in one pair of formats: the same for every block that names it. Where heads share a layer's bytes,
 * each layer has codings of its own, one for each version of its table; all of them have one size. */
typedef struct tkvi_coding {
    tkv_pair pair;
    int key;             /* of the shape: the pair and the room */
    int tokens;          /* room: 64, or the sinks */
    int size_class;      /* into classes */
    tkvi_bytes bytes;    /* all heads */
    tkvi_record *record; /* [n_kv_heads]; heads may differ */
} tkvi_coding;

/* Blocks of one size share pages that are cut into slots of that size. */
typedef struct tkvi_class {
    size_t slot_bytes;
    int slots; /* per page, at most 64 */
} tkvi_class;

/* What one level of the ladder says of a layer. */
typedef struct tkvi_rule {
    int hot, warm; /* tokens */
    int key[TKV_TIER_COUNT];
    int coding[TKV_TIER_COUNT]; /* of version 0, where heads share (tkvi_coding_of) */
    int shared[TKV_TIER_COUNT]; /* 1: needs a table */
} tkvi_rule;

typedef struct tkvi_plan {
    int stored; /* layer whose K and V this one reads: its own number, or an earlier one; -1: no cache */
    int sink, window; /* tokens; window 0: none */
    int keep;         /* widest window of all layers that read this one's blocks; 0: none */
    int sink_coding;
    tkvi_rule now; /* of the level that the cache is at */
    int allocates,
        kvquant; /* 1: a level's table has bytes that heads share (allocate.h); levels (kvquant.h) */
    int squat;   /* 1: a tier's encoder wants to know the queries (metric.h) */
} tkvi_plan;

/* Do blocks of this layer need a table, at any level? */
static int tkvi_plan_learns(const tkvi_plan *p) { return p->allocates || p->kvquant; }

#define TKVI_VERSIONS 4 /* of a layer's table that blocks can be coded with */

/* What can be said of a config without any memory: pairs in use, sizes of blocks, classes, the page. */
#define TKVI_MAX_LAYERS 4096
#define TKVI_MAX_CODINGS 128

typedef struct tkvi_key {
    tkv_pair pair;
    int tokens;
} tkvi_key;

typedef struct tkvi_shape {
    tkv_config cfg; /* with defaults filled in */
    int n_keys, n_classes;
    int n_codings; /* one for each key, then those of single layers */
    int any_shared, any_rotated, any_squat, any_kvquant;
    int n_stored; /* layers with blocks of their own */
    int n_levels; /* of the ladder */
    int spare;    /* pages that recoding needs under a budget; 0: there is none */
    tkv_level ladder[TKV_MAX_LEVELS];
    size_t hot_record; /* bytes of one head of a block of the hot tier, the widest layer's */
    tkvi_key key[TKVI_MAX_CODINGS];
    tkvi_bytes bytes[TKVI_MAX_CODINGS];
    int class_of[TKVI_MAX_CODINGS];
    tkvi_class size_class[TKVI_MAX_CODINGS];
    size_t page_bytes;
} tkvi_shape;

/* One version of the layers' tables: a piece of memory that is there when a layer has come to need it. */
typedef struct tkvi_version {
    uint8_t *bytes;      /* NULL: not yet */
    tkvi_record *record; /* of all codings of this version [...][n_kv_heads] */
    /* where heads share: */
    tkvi_head *head;               /* [n_layers][n_kv_heads], with their arrays: */
    uint8_t *importance, *channel; /* [n_layers][n_kv_heads][k_pad] */
    float *mean;                   /* the same */
    /* where KVQUANT formats are: */
    tkvi_kvquant *kvquant; /* [n_layers] */
    float *kvquant_range;  /* [n_layers][n_kv_heads] radius [head_dim], middle [head_dim] */
} tkvi_version;

/* Everything derived from a config, in the cache's fixed piece. */
typedef struct tkvi_tables {
    tkv_config cfg; /* with defaults filled in; `layers` is not kept */
    int n_keys, n_codings, n_classes;
    int any_shared, any_kvquant;
    size_t page_bytes;
    tkvi_plan *plan;     /* [n_layers] */
    tkvi_rule *rule;     /* [n_layers][n_levels] */
    int n_levels, level; /* of the ladder, and where the cache is */
    int spare;           /* pages that recoding needs under a budget */
    tkv_level ladder[TKV_MAX_LEVELS];
    tkvi_coding *coding; /* [n_codings] */
    tkvi_class *size_class;
    tkvi_version version[TKVI_VERSIONS];
    size_t version_bytes; /* of each; 0: no layer needs tables */
    int *split;           /* [n_kv_heads] work space; NULL where no heads share */
    int8_t *current;      /* [n_layers] version that is coded with now; -1: none yet */
    tkvi_rope *rope;      /* NULL where no KVQUANT format is */
    int any_rotated;      /* a V format of these is rotated */
} tkvi_tables;

/* The coding that blocks of this layer's tier get now. */
static int tkvi_coding_of(const tkvi_tables *t, int layer, tkv_tier tier) {
    const tkvi_rule *r = &t->plan[layer].now;
    return r->coding[tier] + (r->shared[tier] && t->current[layer] > 0 ? t->current[layer] : 0);
}

/* All layers go by this level of the ladder. */
static void tkvi_take_level(tkvi_tables *t, int level) {
    int i;
    t->level = level;
    for (i = 0; i < t->cfg.n_layers; i++)
        if (t->plan[i].stored == i) t->plan[i].now = t->rule[(size_t)i * (size_t)t->n_levels + (size_t)level];
}

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
            if (f != TKV_FORMAT_DEFAULT && !tkvi_format_stores(&tkvi_formats[f], side ? TKV_V : TKV_K))
                return tkvi_bad_in(reason, size, layer, pair_name[i][side], (int)f,
                                   side ? "this format stores K only" : "this format stores V only");
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

static tkv_pair tkvi_pair(tkv_pair of_layer, tkv_pair of_cache, tkv_format k, tkv_format v) {
    tkv_pair p;
    p.k = of_layer.k ? of_layer.k : of_cache.k ? of_cache.k : k;
    p.v = of_layer.v ? of_layer.v : of_cache.v ? of_cache.v : v;
    return p;
}

/* One layer's lengths and pairs at a level of the ladder; `pair` gets hot, warm, archive. What the layer says of itself
 * holds at every level. */
static tkvi_plan tkvi_resolve(const tkv_config *cfg, const tkv_level *level, int layer, tkv_pair *pair) {
    tkv_layer_config wide = tkvi_cache_wide(cfg), none;
    const tkv_layer_config *c = cfg->layers ? &cfg->layers[layer] : &none;
    tkvi_plan p;
    memset(&p, 0, sizeof p);
    memset(&none, 0, sizeof none);
    p.stored = c->no_cache ? -1 : c->share_kv ? c->share_kv - 1 : layer;
    p.sink = tkvi_length(c->sink_tokens, wide.sink_tokens, 4);
    p.now.hot = tkvi_length(c->hot_tokens, level->hot_tokens ? level->hot_tokens : wide.hot_tokens, 64);
    p.now.warm = tkvi_length(c->warm_tokens, level->warm_tokens ? level->warm_tokens : wide.warm_tokens, 448);
    p.window = tkvi_length(c->window, wide.window, TKV_NONE);
    wide.warm = tkvi_pair(level->warm, wide.warm, TKV_A40, TKV_R40);
    wide.archive = tkvi_pair(level->archive, wide.archive, TKV_A30, TKV_R30);
    pair[TKV_HOT] = tkvi_pair(c->hot, wide.hot, TKV_F16, TKV_F16);
    pair[TKV_WARM] = tkvi_pair(c->warm, wide.warm, TKV_A40, TKV_R40);
    pair[TKV_ARCHIVE] = tkvi_pair(c->archive, wide.archive, TKV_A30, TKV_R30);
    return p;
}

static void tkvi_fill_defaults(tkv_config *cfg) {
    if (!cfg->n_kv_heads) cfg->n_kv_heads = cfg->n_heads;
    if (!cfg->v_head_dim) cfg->v_head_dim = cfg->head_dim;
    if (!(cfg->scale > 0.0f)) cfg->scale = (float)(1.0 / sqrt((double)cfg->head_dim));
    if (!cfg->max_seqs) cfg->max_seqs = 1;
    if (!cfg->max_append) cfg->max_append = 512;
    if (!cfg->group_size) cfg->group_size = 64;
    if (!cfg->allocation_unit) cfg->allocation_unit = 4;
    if (!cfg->squat_block) cfg->squat_block = 16;
    if (!cfg->subspaces) cfg->subspaces = 4;
    if (!cfg->max_tokens) cfg->max_tokens = TKVI_FOREVER;
    if (!cfg->quality_tokens) cfg->quality_tokens = 2048;
#if !defined(__GNUC__) && !defined(__clang__)
    cfg->quality_heads = 0; /* without atomics nobody may add (meter.h) */
#endif
}

/* >>ladder. Without one of the caller's: under a budget exact at first, then as tight as must be; without a budget the
 * plan of the config alone. */
static const tkv_level tkvi_ladder_exact = {
    TKV_ALL, 0, {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}};
static const tkv_level tkvi_ladder_steps[] = {
    {0, TKV_ALL, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}},
    {0, TKV_ALL, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}},
    {0,
     0,
     {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
     {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}}, /* the config's */
    {0, 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}},
    {0, 0, {TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}},
};

static int tkvi_levels_of(const tkv_config *cfg) {
    const int steps = (int)(sizeof tkvi_ladder_steps / sizeof *tkvi_ladder_steps);
    return cfg->ladder ? cfg->n_levels : cfg->budget_bytes ? 1 + steps : 1;
}

/* The policy for as many levels as there are: the last threshold serves the rest. */
static const char *tkvi_policy_for(const tkv_config *cfg, tkv_policy_config *full) {
    tkv_policy_config p = cfg->policy;
    int steps = tkvi_levels_of(cfg) - 1, i, any = 0, n;
    for (i = 0; i < TKV_MAX_LEVELS - 1; i++) any |= tkvi_bits(p.threshold[i]) != 0;
    for (i = 0; i < 2 && !any; i++) p.threshold[i] = tkvi_profiles[0].cfg.threshold[i];
    n = tkvi_policy_levels(&p);
    for (i = n; i < steps && n > 0; i++) p.threshold[i] = p.threshold[n - 1];
    for (i = tkvi_max(steps, 1); i < TKV_MAX_LEVELS - 1; i++) p.threshold[i] = 0.0f;
    if (steps == 0) { /* one level: nothing to decide */
        if (p.max_level > 0 || p.min_level != 0) return "there is one level only, 0";
        p.max_level = TKV_NONE;
    }
    return tkvi_policy_fill(&p, full);
}

static void tkvi_ladder_of(const tkv_config *cfg, tkvi_shape *h) {
    int i, steps = (int)(sizeof tkvi_ladder_steps / sizeof *tkvi_ladder_steps);
    h->n_levels = tkvi_levels_of(cfg);
    memset(h->ladder, 0, sizeof h->ladder);
    for (i = 0; i < h->n_levels && cfg->ladder; i++) h->ladder[i] = cfg->ladder[i];
    if (cfg->ladder || !cfg->budget_bytes) return;
    h->ladder[0] = tkvi_ladder_exact;
    for (i = 0; i < steps; i++) h->ladder[i + 1] = tkvi_ladder_steps[i];
}

/* Number of the coding for a pair and a room, added if new; -1 when there are too many. */
static int tkvi_find_key(tkvi_shape *h, tkv_pair pair, int tokens) {
    int i;
    for (i = 0; i < h->n_keys; i++)
        if (h->key[i].pair.k == pair.k && h->key[i].pair.v == pair.v && h->key[i].tokens == tokens) return i;
    if (h->n_keys == TKVI_MAX_CODINGS) return -1;
    h->key[h->n_keys].pair = pair;
    h->key[h->n_keys].tokens = tokens;
    return h->n_keys++;
}

/* `k` and `v`: what the layer's table says, or NULL. */
static void tkvi_record_init(tkvi_record *r, const tkv_config *cfg, tkvi_key key, const tkvi_share *k,
                             const tkvi_share *v) {
    tkvi_options o;
    o.group = cfg->group_size;
    o.fit = cfg->fit;
    o.rotate = cfg->rotate;
    o.center_k = cfg->center_k;
    o.feedback_unit = cfg->squat_block;
    o.parts = cfg->subspaces;
    o.kvquant = cfg->kvquant;
    o.tabled = 1;
    tkvi_side_make(&r->k, &tkvi_formats[key.pair.k], TKV_K, cfg->head_dim, key.tokens, &o, k);
    tkvi_side_make(&r->v, &tkvi_formats[key.pair.v], TKV_V, cfg->v_head_dim, key.tokens, &o, v);
    r->at = 0;
    r->v_at = r->k.bytes;
}

static int tkvi_pair_allocates(tkv_pair p) { return tkvi_formats[p.k].shared || tkvi_formats[p.v].shared; }

static int tkvi_pair_kvquant(tkv_pair p) { return tkvi_is_kvquant(p.k) || tkvi_is_kvquant(p.v); }

/* Bytes of all heads of a block. Shared ones: the layer's budget, whoever gets it. 0 if it is too much. */
static int tkvi_key_bytes(const tkv_config *cfg, tkvi_key key, tkvi_bytes *b) {
    tkvi_record r;
    int64_t heads = cfg->n_kv_heads, k, v, meta, total;
    tkvi_record_init(&r, cfg, key, NULL, NULL);
    k = heads * (int64_t)r.k.code_bytes;
    v = heads * (int64_t)r.v.code_bytes;
    meta = heads * (int64_t)(r.k.meta_bytes + r.v.meta_bytes);
    total = heads * (int64_t)(r.k.bytes + r.v.bytes);
    if (tkvi_formats[key.pair.k].shared) {
        total -= heads * (int64_t)tkvi_align_up(r.k.code_bytes);
        k = heads * 32 * tkvi_head_budget(tkvi_formats[key.pair.k].bits, cfg->head_dim, r.k.pad);
        k = (k + 63) / 64 * 64;
        total += k;
    }
    if (tkvi_formats[key.pair.v].shared) {
        total -= v;
        v = tkvi_budget_v(heads, tkvi_formats[key.pair.v].bits, r.v.pad);
        total += v;
    }
    if (total > (int64_t)(((size_t)-1 >> 1) / 5u)) return 0; /* a page is up to four of the largest blocks */
    b->codes = (size_t)(k + v);
    b->metadata = (size_t)meta;
    b->total = (size_t)total;
    return 1;
}

static int tkvi_slots_of(const tkvi_class *c, size_t page) {
    size_t slots = page / c->slot_bytes;
    return slots > 64 ? 64 : (int)slots;
}

/* Bytes without a block when each class has so many of them: the rests of full pages, and a page half empty. */
static uint64_t tkvi_page_cost(const tkvi_class *classes, const int64_t *blocks, int n, size_t page) {
    uint64_t cost = 0;
    int i;
    for (i = 0; i < n; i++) {
        int slots = tkvi_slots_of(&classes[i], page);
        cost += (uint64_t)blocks[i] * (page - (size_t)slots * classes[i].slot_bytes) / (uint64_t)slots;
        cost += blocks[i] ? page / 2 : 0;
    }
    return cost;
}

/* The page size: of all multiples of a slot, from the largest slot to four of them, the one that costs least. */
static size_t tkvi_page_size(const tkvi_class *classes, const int64_t *blocks, int n) {
    size_t largest = 0, page, best = 0;
    uint64_t best_cost = 0;
    int i;
    for (i = 0; i < n; i++) largest = classes[i].slot_bytes > largest ? classes[i].slot_bytes : largest;
    for (i = 0; i < n; i++)
        for (page = (largest + classes[i].slot_bytes - 1) / classes[i].slot_bytes * classes[i].slot_bytes;
             page <= 4u * largest; page += classes[i].slot_bytes) {
            uint64_t cost = tkvi_page_cost(classes, blocks, n, page);
            if (best == 0 || cost < best_cost || (cost == best_cost && page < best)) {
                best = page;
                best_cost = cost;
            }
        }
    return best;
}

/* Adds the blocks, by key, that a layer has of one sequence of usual length at a level: pages are cut for it. */
static void tkvi_usual_blocks(const tkvi_shape *h, const tkvi_plan *p, const tkvi_rule *r, int64_t *blocks) {
    int64_t left = (tkvi_min(h->cfg.max_tokens, 4096) - p->sink + TKVI_BLOCK - 1) / TKVI_BLOCK, n;
    int64_t most[TKV_TIER_COUNT];
    int tier;
    most[TKV_HOT] = r->hot / TKVI_BLOCK + 1; /* the partial block too */
    most[TKV_WARM] = (r->warm + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_ARCHIVE] = TKVI_FOREVER;
    if (p->sink) blocks[p->sink_coding]++;
    for (tier = 0; tier < TKV_TIER_COUNT && left > 0; tier++) {
        n = left < most[tier] ? left : most[tier];
        blocks[r->key[tier]] += n;
        left -= n;
    }
}

/* Can a block ever come to this tier? If not, nobody has to learn for its format. Flushing empties a hot tier, unless
 * that takes everything. */
static int tkvi_reached(const tkv_config *cfg, const tkvi_rule *r, int tier) {
    if (tier != TKV_HOT && r->hot == TKVI_FOREVER) return 0;
    return tier != TKV_ARCHIVE || r->warm < cfg->max_tokens;
}

/* What a level says of a layer; its codings become keys of the shape. 0: there are too many. */
static int tkvi_rule_of(tkvi_shape *h, int layer, int level, tkvi_plan *p, tkvi_rule *r) {
    tkv_pair pair[TKV_TIER_COUNT];
    int tier, fits = 1;
    *r = tkvi_resolve(&h->cfg, &h->ladder[level], layer, pair).now;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        r->key[tier] = r->coding[tier] = tkvi_find_key(h, pair[tier], TKVI_BLOCK);
        fits &= r->coding[tier] >= 0;
        h->any_rotated |= tkvi_formats[pair[tier].v].rotated;
        if (!tkvi_reached(&h->cfg, r, tier)) continue;
        p->allocates |= tkvi_pair_allocates(pair[tier]);
        p->kvquant |= tkvi_pair_kvquant(pair[tier]);
        r->shared[tier] = tkvi_pair_allocates(pair[tier]) || tkvi_pair_kvquant(pair[tier]);
        p->squat |= tkvi_is_squat(pair[tier].k);
    }
    return fits;
}

/* The plan of one layer, and what each level says of it; `now` is that of the first level of the policy. */
static tkv_status tkvi_plan_of(tkvi_shape *h, int layer, tkvi_plan *p, tkvi_rule *rule) {
    tkv_pair unused[TKV_TIER_COUNT], pair[TKV_TIER_COUNT];
    int level, other, fits = 1;
    *p = tkvi_resolve(&h->cfg, &h->ladder[0], layer, pair);
    if (p->stored != layer)
        return TKV_OK; /* reads another layer's blocks, or none; only its window is its own */
    p->keep = p->window;
    for (other = layer + 1; h->cfg.layers && p->keep && other < h->cfg.n_layers; other++)
        if (h->cfg.layers[other].share_kv == layer + 1) {
            int window = tkvi_resolve(&h->cfg, &h->ladder[0], other, unused).window;
            p->keep = window && window < p->keep ? p->keep : window;
        }
    for (level = 0; level < h->n_levels; level++) fits &= tkvi_rule_of(h, layer, level, p, &rule[level]);
    p->now = rule[h->cfg.policy.min_level];
    p->sink_coding = p->sink ? tkvi_find_key(h, pair[TKV_HOT], p->sink) : p->now.coding[TKV_HOT];
    fits &= p->sink_coding >= 0;
    h->any_squat |= p->squat;
    h->any_shared |= p->allocates;
    h->any_kvquant |= p->kvquant;
    return fits ? TKV_OK : TKV_ERR_CONFIG;
}

/* Where heads share, the layer gets codings of its own, one for each key, `next` being the first that is free. */
static void tkvi_own_codings(tkvi_rule *rule, int n_levels, int *next) {
    int at, before;
    for (at = 0; at < n_levels * TKV_TIER_COUNT; at++) {
        tkvi_rule *r = &rule[at / TKV_TIER_COUNT];
        const int tier = at % TKV_TIER_COUNT;
        if (tier == TKV_HOT || !r->shared[tier]) continue;
        for (before = 0; before < at; before++) {
            const tkvi_rule *b = &rule[before / TKV_TIER_COUNT];
            if (b->shared[before % TKV_TIER_COUNT] && b->key[before % TKV_TIER_COUNT] == r->key[tier]) break;
        }
        if (before < at) {
            r->coding[tier] = rule[before / TKV_TIER_COUNT].coding[before % TKV_TIER_COUNT];
            continue;
        }
        r->coding[tier] = *next;
        *next += TKVI_VERSIONS;
    }
}

/* Recoding at a level opens a page at most for each size of block that comes out of it, before one gets empty. */
static int tkvi_spare_of(tkvi_shape *h) {
    tkvi_rule rule[TKV_MAX_LEVELS];
    int level, most = 1, i, c, tier;
    for (level = 0; level < h->n_levels; level++) {
        int opens[TKVI_MAX_CODINGS] = {0}, n = 0;
        for (i = 0; i < h->cfg.n_layers; i++) {
            tkvi_plan p;
            (void)tkvi_plan_of(h, i, &p, rule);
            for (tier = TKV_WARM; tier < TKV_TIER_COUNT && p.stored == i; tier++)
                if (rule[level].hot != TKVI_FOREVER) opens[h->class_of[rule[level].key[tier]]] = 1;
        }
        for (c = 0; c < h->n_classes; c++) n += opens[c];
        most = tkvi_max(most, n);
    }
    return most;
}

/* The config must be valid. */
static tkv_status tkvi_shape_of(const tkv_config *cfg, tkvi_shape *h) {
    int64_t of_key[TKVI_MAX_CODINGS] = {0}, of_class[TKVI_MAX_CODINGS] = {0};
    int i, c, level, hot[TKVI_MAX_CODINGS] = {0};
    tkvi_rule rule[TKV_MAX_LEVELS];
    tkvi_plan p;
    memset(h, 0, sizeof *h);
    h->cfg = *cfg;
    tkvi_fill_defaults(&h->cfg);
    tkvi_ladder_of(cfg, h);
    (void)tkvi_policy_for(cfg, &h->cfg.policy);
    for (i = 0; i < h->cfg.n_layers; i++) {
        if (tkvi_plan_of(h, i, &p, rule)) return TKV_ERR_CONFIG;
        if (p.stored != i) continue;
        tkvi_own_codings(rule, h->n_levels, &h->n_codings);
        for (level = 0; level < h->n_levels; level++) tkvi_usual_blocks(h, &p, &rule[level], of_key);
        hot[p.now.key[TKV_HOT]] = 1;
        h->n_stored++;
    }
    h->n_codings += h->n_keys;
    if (h->n_codings > 0xffff) return TKV_ERR_CONFIG;
    if ((h->any_shared || h->any_kvquant) &&
        (uint64_t)h->cfg.n_layers * (uint64_t)h->cfg.n_kv_heads > ((size_t)-1 >> 16))
        return TKV_ERR_CONFIG; /* a table has at most some 8 KB of each head */
    for (i = 0; i < h->n_keys; i++) {
        if (!tkvi_key_bytes(&h->cfg, h->key[i], &h->bytes[i])) return TKV_ERR_CONFIG;
        for (c = 0; c < h->n_classes; c++)
            if (h->size_class[c].slot_bytes == h->bytes[i].total) break;
        h->size_class[c].slot_bytes = h->bytes[i].total;
        if (c == h->n_classes) h->n_classes++;
        h->class_of[i] = c;
        of_class[c] += of_key[i];
        if (hot[i] && h->bytes[i].total / (size_t)h->cfg.n_kv_heads > h->hot_record)
            h->hot_record = h->bytes[i].total / (size_t)h->cfg.n_kv_heads;
    }
    h->page_bytes = tkvi_page_size(h->size_class, of_class, h->n_classes);
    for (c = 0; c < h->n_classes; c++)
        h->size_class[c].slots = tkvi_slots_of(&h->size_class[c], h->page_bytes);
    h->spare = h->cfg.budget_bytes ? tkvi_spare_of(h) : 0;
    return TKV_OK;
}

/* Of a number in a sentence, the part before the point. */
static int tkvi_whole(float x) { return tkvi_is_finite(x) ? (int)tkvi_clampf(floorf(x), -1e9f, 1e9f) : -1; }

static tkv_status tkvi_validate_ladder(const tkv_config *cfg, char *reason, size_t size) {
    int i;
    for (i = 0; i < cfg->n_levels; i++) {
        tkv_layer_config c;
        tkv_status st;
        char why[160];
        memset(&c, 0, sizeof c);
        c.hot_tokens = cfg->ladder[i].hot_tokens;
        c.warm_tokens = cfg->ladder[i].warm_tokens;
        c.warm = cfg->ladder[i].warm;
        c.archive = cfg->ladder[i].archive;
        st = tkvi_validate_tiers(&c, -1, why, sizeof why);
        if (st) {
            tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
            tkvi_say(&t, "ladder[");
            tkvi_say_int(&t, i);
            tkvi_say(&t, "].");
            tkvi_say(&t, why);
            return st;
        }
    }
    return TKV_OK;
}

/* Every field; the shape is that of the valid config. */
static tkv_status tkvi_validate(const tkv_config *cfg, tkvi_shape *shape, char *reason, size_t size) {
    const char *wrong, *field;
    float value;
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
    TKVI_RANGE_(n_layers, 1, TKVI_MAX_LAYERS, "it must be 1 to 4096");
    TKVI_RANGE_(n_heads, 1, 65536, "it must be 1 to 65536");
    TKVI_RANGE_(n_kv_heads, 0, 65536, "it must be 1 to 65536, or 0 for as many as n_heads");
    if (cfg->n_kv_heads && cfg->n_heads % cfg->n_kv_heads)
        return tkvi_bad(reason, size, "n_heads", cfg->n_heads, "it must be a multiple of n_kv_heads");
    TKVI_RANGE_(head_dim, 1, TKV_MAX_HEAD_DIM, "it must be 1 to 256");
    TKVI_RANGE_(v_head_dim, 0, TKV_MAX_HEAD_DIM, "it must be 1 to 256, or 0 for head_dim");
    if (!tkvi_is_finite(cfg->scale) || cfg->scale < 0.0f)
        return tkvi_bad(reason, size, "scale", tkvi_whole(cfg->scale),
                        "it must be a positive number, or 0 for 1/sqrt(head_dim)");
    TKVI_RANGE_(max_seqs, 0, 1 << 20, "it must be 1 to 2^20, or 0 for 1");
    TKVI_RANGE_(max_tokens, 0, TKVI_FOREVER, "it must be 1 to 2^30 - 1, or 0 to grow");
    TKVI_RANGE_(max_append, 0, 1 << 20, "it must be 1 to 2^20, or 0 for 512");
    if (cfg->group_size != 0 && cfg->group_size != 32 && cfg->group_size != 64)
        return tkvi_bad(reason, size, "group_size", cfg->group_size, "it must be 64 or 32");
    if (cfg->allocation_unit != 0 && cfg->allocation_unit != 4 && cfg->allocation_unit != 16)
        return tkvi_bad(reason, size, "allocation_unit", cfg->allocation_unit, "it must be 4 or 16");
    if (tkvi_bad_fit(cfg->fit))
        return tkvi_bad(reason, size, "fit", cfg->fit,
                        "it must be bits of tkv_fit, NORM and UNBIASED not together");
    TKVI_RANGE_(rotate, 0, 3, "it must be TKV_ROTATE_K, TKV_ROTATE_V, both or 0");
    TKVI_RANGE_(center_k, 0, 1, "it must be 0 or 1");
    TKVI_RANGE_(subspaces, 0, 16, "it must be 1 to 16, or 0 for 4");
    TKVI_RANGE_(kvquant, 0, 15, "it must be bits of tkv_kvquant");
    wrong = tkvi_rope_fault(&cfg->rope, cfg->head_dim, &field, &value);
    if (wrong) return tkvi_bad(reason, size, field, tkvi_whole(value), wrong);
    if (cfg->squat_block != 0 && cfg->squat_block != 16 && cfg->squat_block != 64)
        return tkvi_bad(reason, size, "squat_block", cfg->squat_block, "it must be 16 or 64");
    if ((unsigned)cfg->nonfinite > TKV_NONFINITE_SATURATE)
        return tkvi_bad(reason, size, "nonfinite", (int)cfg->nonfinite, "it must be a tkv_nonfinite");
    TKVI_RANGE_(precise, 0, 1, "it must be 0 or 1");
    TKVI_RANGE_(quality_heads, 0, TKV_QUALITY_HEADS, "it must be 1 to 64, or 0 for no meter");
    if (cfg->quality_tokens != 0 &&
        (cfg->quality_tokens < 2 * TKVI_BLOCK || cfg->quality_tokens > TKVI_FOREVER))
        return tkvi_bad(reason, size, "quality_tokens", cfg->quality_tokens,
                        "it must be 128 to 2^30 - 1, or 0 for 2048");
    TKVI_RANGE_(n_levels, 0, TKV_MAX_LEVELS, "it must be 1 to 8, the entries of ladder");
    if (!cfg->ladder != !cfg->n_levels)
        return tkvi_bad(reason, size, "n_levels", cfg->n_levels,
                        "ladder and n_levels must both be set, or neither");
    TKVI_RANGE_(quality_every, 0, TKVI_FOREVER, "it must be 1 to 2^30 - 1, or 0 for what costs little");
    if ((unsigned)cfg->isa >= TKV_ISA_COUNT)
        return tkvi_bad(reason, size, "isa", (int)cfg->isa, "it must be a tkv_isa");
#undef TKVI_RANGE_
    if (!cfg->allocator.alloc != !cfg->allocator.release)
        return tkvi_bad(reason, size, "allocator", cfg->allocator.alloc ? 1 : 0,
                        "alloc and release must both be set, or neither");
    wide = tkvi_cache_wide(cfg);
    st = tkvi_validate_tiers(&wide, -1, reason, size);
    if (!st && cfg->layers) st = tkvi_validate_layers(cfg, reason, size);
    if (!st && cfg->ladder) st = tkvi_validate_ladder(cfg, reason, size);
    if (!st) {
        tkv_policy_config full;
        wrong = tkvi_policy_for(cfg, &full);
        if (wrong) return tkvi_bad(reason, size, "policy.max_level", cfg->policy.max_level, wrong);
    }
    if (!st && tkvi_shape_of(cfg, shape))
        return tkvi_bad(reason, size, "layers", cfg->n_layers,
                        "their formats and sinks make too many kinds of blocks, or blocks of too many bytes");
    return st;
}

TKV_API tkv_status tkv_config_validate(const tkv_config *cfg, char *reason, size_t size) {
    tkvi_shape shape;
    return tkvi_validate(cfg, &shape, reason, size);
}

/* >>tables: pieces of one stretch of memory, each at a multiple of 64 bytes */
typedef struct tkvi_table_sizes {
    size_t plan, rule, coding, size_class, record, split, current, rope;
} tkvi_table_sizes;

static size_t tkvi_table_sizes_of(const tkvi_shape *h, tkvi_table_sizes *s) {
    size_t layers = (size_t)h->cfg.n_layers, heads = (size_t)h->cfg.n_kv_heads;
    s->plan = tkvi_align_up(layers * sizeof(tkvi_plan));
    s->rule = tkvi_align_up(layers * (size_t)h->n_levels * sizeof(tkvi_rule));
    s->coding = tkvi_align_up((size_t)h->n_codings * sizeof(tkvi_coding));
    s->size_class = tkvi_align_up((size_t)h->n_classes * sizeof(tkvi_class));
    s->record = tkvi_align_up((size_t)h->n_keys * heads * sizeof(tkvi_record));
    s->split = h->any_shared ? tkvi_align_up(heads * sizeof(int)) : 0;
    s->current = tkvi_align_up(layers);
    s->rope = h->any_kvquant ? tkvi_align_up(sizeof(tkvi_rope)) : 0;
    return s->plan + s->rule + s->coding + s->size_class + s->record + s->split + s->current + s->rope;
}

static size_t tkvi_tables_bytes(const tkvi_shape *h) {
    tkvi_table_sizes s;
    return tkvi_table_sizes_of(h, &s);
}

/* The same of a version: `own` codings are of single layers. */
typedef struct tkvi_version_sizes {
    size_t record, head, channel, mean, kvquant, range;
} tkvi_version_sizes;

static size_t tkvi_version_sizes_of(const tkv_config *cfg, int own, int shared, int kvquant,
                                    tkvi_version_sizes *s) {
    size_t layers = (size_t)cfg->n_layers, heads = (size_t)cfg->n_kv_heads;
    size_t sets = shared ? layers * heads : 0, pad = (size_t)tkvi_round_up(cfg->head_dim, 16);
    s->record = tkvi_align_up((size_t)own * heads * sizeof(tkvi_record));
    s->head = tkvi_align_up(sets * sizeof(tkvi_head));
    s->channel = tkvi_align_up(sets * pad);
    s->mean = tkvi_align_up(sets * pad * sizeof(float));
    s->kvquant = kvquant ? tkvi_align_up(layers * sizeof(tkvi_kvquant)) : 0;
    s->range = kvquant ? tkvi_align_up(layers * heads * 2 * (size_t)cfg->head_dim * sizeof(float)) : 0;
    return s->record + s->head + 2 * s->channel + s->mean + s->kvquant + s->range;
}

static size_t tkvi_version_bytes(const tkvi_shape *h) {
    tkvi_version_sizes s;
    return tkvi_version_sizes_of(&h->cfg, (h->n_codings - h->n_keys) / TKVI_VERSIONS, h->any_shared,
                                 h->any_kvquant, &s);
}

/* A version moves into a cleared piece of version_bytes. */
static void tkvi_version_build(tkvi_tables *t, int version, uint8_t *mem) {
    tkvi_version *v = &t->version[version];
    tkvi_version_sizes s;
    int own = (t->n_codings - t->n_keys) / TKVI_VERSIONS, i;
    size_t heads = (size_t)t->cfg.n_kv_heads, pad = (size_t)tkvi_round_up(t->cfg.head_dim, 16), n;
    (void)tkvi_version_sizes_of(&t->cfg, own, t->any_shared, t->any_kvquant, &s);
    v->bytes = mem;
    v->record = (tkvi_record *)(void *)mem;
    mem += s.record;
    for (i = 0; i < own; i++)
        t->coding[t->n_keys + i * TKVI_VERSIONS + version].record = v->record + (size_t)i * heads;
    if (t->any_shared) {
        v->head = (tkvi_head *)(void *)mem;
        v->importance = mem + s.head;
        v->channel = v->importance + s.channel;
        v->mean = (float *)(void *)(v->channel + s.channel);
        for (n = 0; n < (size_t)t->cfg.n_layers * heads; n++) {
            v->head[n].importance = v->importance + n * pad;
            v->head[n].order = v->channel + n * pad;
            v->head[n].mean = v->mean + n * pad;
        }
    }
    mem += s.head + 2 * s.channel + s.mean;
    if (!t->any_kvquant) return;
    v->kvquant = (tkvi_kvquant *)(void *)mem;
    v->kvquant_range = (float *)(void *)(mem + s.kvquant);
}

/* The heads of one version of a layer's table. */
static tkvi_head *tkvi_heads_of(const tkvi_tables *t, int layer, int version) {
    return t->version[version].head + (size_t)layer * (size_t)t->cfg.n_kv_heads;
}

static void tkvi_coding_init(tkvi_coding *c, const tkvi_shape *h, int key) {
    c->key = key;
    c->pair = h->key[key].pair;
    c->tokens = h->key[key].tokens;
    c->size_class = h->class_of[key];
    c->bytes = h->bytes[key];
}

/* Records of a coding, by what the heads' table says (NULL: equal shares). */
static void tkvi_coding_share(const tkvi_tables *t, tkvi_coding *c, const tkvi_head *heads) {
    const tkvi_format *k = &tkvi_formats[c->pair.k], *v = &tkvi_formats[c->pair.v];
    const tkv_config *cfg = &t->cfg;
    int head, pad = tkvi_round_up(cfg->head_dim, 16), n = cfg->n_kv_heads, unit = cfg->allocation_unit / 4;
    tkvi_key key;
    size_t at = 0;
    key.pair = c->pair;
    key.tokens = c->tokens;
    tkvi_record_init(&c->record[0], cfg, key, NULL, NULL);
    for (head = 1; head < n; head++) c->record[head] = c->record[0];
    if (heads && k->shared) {
        tkvi_share_k(heads, n, k->bits, cfg->head_dim, pad, unit, t->split);
        for (head = 0; head < n; head++) {
            tkvi_share share;
            memset(&share, 0, sizeof share);
            tkvi_runs_of(&heads[head], pad, unit, t->split[head], &share.runs);
            share.top = heads[head].k_top;
            share.order = heads[head].order;
            share.mean = heads[head].mean;
            tkvi_side_init(&c->record[head].k, k, TKV_K, cfg->head_dim, cfg->group_size, c->tokens, &share);
        }
    }
    if (heads && v->shared) {
        tkvi_share_v(heads, n, v->bits, t->split);
        for (head = 0; head < n; head++) {
            tkvi_share share;
            memset(&share, 0, sizeof share);
            share.half_bits = t->split[head];
            share.top = heads[head].v_top;
            tkvi_side_init(&c->record[head].v, v, TKV_V, cfg->v_head_dim, cfg->group_size, c->tokens, &share);
        }
    }
    for (head = 0; head < n; head++) {
        tkvi_record *r = &c->record[head];
        r->at = at;
        r->v_at = r->k.bytes;
        at += r->k.bytes + r->v.bytes;
    }
}

static tkvi_kvquant *tkvi_kvquant_of(const tkvi_tables *t, int layer, int version) {
    return t->version[version].kvquant + layer;
}

/* Of a head: the radius of each channel, then its middle. */
static float *tkvi_kvquant_range_of(const tkvi_tables *t, int layer, int version, int head) {
    size_t set = (size_t)layer * (size_t)t->cfg.n_kv_heads + (size_t)head;
    return t->version[version].kvquant_range + set * 2u * (size_t)t->cfg.head_dim;
}

/* NULL: keys are coded as they come. */
static const tkvi_rope *tkvi_kvquant_rope(const tkvi_tables *t) {
    return t->rope->pairs && !(t->cfg.kvquant & TKV_KVQUANT_POST_ROPE) ? t->rope : NULL;
}

/* KVQUANT sides of a coding get a version of the layer's table. */
static void tkvi_coding_kvquant(const tkvi_tables *t, tkvi_coding *c, int layer, int version) {
    int head;
    for (head = 0; head < t->cfg.n_kv_heads; head++) {
        tkvi_record *r = &c->record[head];
        r->k.table = r->v.table = tkvi_kvquant_of(t, layer, version);
        r->k.radius = tkvi_kvquant_range_of(t, layer, version, head);
        r->k.middle = r->k.radius + t->cfg.head_dim;
        r->k.rope = tkvi_kvquant_rope(t);
    }
}

static void tkvi_tables_build(tkvi_tables *t, tkvi_shape *h, uint8_t *mem) {
    tkvi_table_sizes s;
    tkvi_record *record;
    int i, n, v, next = h->n_keys;
    (void)tkvi_table_sizes_of(h, &s);
    t->cfg = h->cfg;
    t->n_keys = h->n_keys;
    t->n_codings = h->n_codings;
    t->n_classes = h->n_classes;
    t->any_shared = h->any_shared;
    t->any_kvquant = h->any_kvquant;
    t->version_bytes = tkvi_version_bytes(h);
    t->page_bytes = h->page_bytes;
    t->any_rotated = h->any_rotated;
    t->n_levels = h->n_levels;
    t->spare = h->spare;
    memcpy(t->ladder, h->ladder, sizeof t->ladder);
    t->plan = (tkvi_plan *)(void *)mem;
    t->rule = (tkvi_rule *)(void *)(mem += s.plan);
    t->coding = (tkvi_coding *)(void *)(mem += s.rule);
    t->size_class = (tkvi_class *)(void *)(mem += s.coding);
    record = (tkvi_record *)(void *)(mem += s.size_class);
    mem += s.record;
    t->split = h->any_shared ? (int *)(void *)mem : NULL;
    t->current = (int8_t *)(mem += s.split);
    memset(t->current, -1, (size_t)h->cfg.n_layers);
    if (h->any_kvquant) {
        t->rope = (tkvi_rope *)(void *)(mem + s.current);
        tkvi_rope_make(t->rope, &h->cfg.rope);
    }
    for (i = 0; i < h->n_keys; i++) t->coding[i].record = record + (size_t)i * (size_t)h->cfg.n_kv_heads;
    for (i = 0; i < h->n_keys; i++) tkvi_coding_init(&t->coding[i], h, i);
    for (i = 0; i < h->n_classes; i++) t->size_class[i] = h->size_class[i];
    for (i = 0; i < h->cfg.n_layers; i++) {
        tkvi_plan *p = &t->plan[i];
        tkvi_rule *rule = &t->rule[(size_t)i * (size_t)h->n_levels];
        (void)tkvi_plan_of(h, i, p, rule); /* all keys are known by now */
        if (p->stored != i) continue;
        tkvi_own_codings(rule, h->n_levels, &next);
        for (n = 0; n < h->n_levels * TKV_TIER_COUNT; n++)
            for (v = 0; v < TKVI_VERSIONS && rule[n / TKV_TIER_COUNT].shared[n % TKV_TIER_COUNT]; v++)
                tkvi_coding_init(&t->coding[rule[n / TKV_TIER_COUNT].coding[n % TKV_TIER_COUNT] + v], h,
                                 rule[n / TKV_TIER_COUNT].key[n % TKV_TIER_COUNT]);
    }
    tkvi_take_level(t, h->cfg.policy.min_level);
    for (i = 0; i < h->n_keys; i++)
        tkvi_coding_share(t, &t->coding[i], NULL); /* the others wait for tables */
    t->cfg.layers = NULL;
    t->cfg.ladder = NULL;
    t->cfg.rope.frequencies = NULL;
}

#endif /* TKVI_PLAN_H */
/* ======== preset.h ======== */
/*
 * preset.h - plans by name: a table, those of other designs with their numbers; and the tier of an age. What the first
 * seven cost and give is in bench/QUALITY.md. May call plan.
 */
#ifndef TKVI_PRESET_H
#define TKVI_PRESET_H


typedef struct tkvi_preset {
    const char *name;
    int below; /* rows of one name: the first one whose number is above cfg.max_tokens; 0: any */
    int hot_tokens, warm_tokens;
    tkv_pair warm, archive;
} tkvi_preset;

static const tkvi_preset tkvi_presets[] = {
    {"quality", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A40, TKV_R40}},
    {"balanced", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}},
    {"compact", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}},
    {"extreme", 0, 0, 0, {TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}},
    {"kivi", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"squat", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"kvquant-3", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    {"by-context", 2048, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"by-context", 8192, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"by-context", 0, 0, 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    /* RuvLLM's: ADR-004, then the profiles of its code */
    {"adr", 2048, 64, 448, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"adr", 8192, 64, 448, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"adr", 0, 64, 448, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    {"small", 0, 32, 224, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"long_context", 0, 64, 960, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"large_context", 0, 128, 896, {TKV_KIVI4, TKV_KIVI4}, {TKV_SQUAT2, TKV_KIVI2}},
    {"extreme_context", 0, 256, 1792, {TKV_KIVI4, TKV_KIVI4}, {TKV_KVQUANT3, TKV_KVQUANT3}},
    {"memory_optimized", 0, 32, 224, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    /* akv-cache's: three tiers, then two (everything behind the tail is archive here) */
    {"akv", 0, 1024, 2048, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"akv_quality", 0, 2048, 2048, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}},
    {"aggressive", 0, 512, 4096, {TKV_KIVI2, TKV_KIVI2}, {TKV_KIVI2, TKV_KIVI2}},
    {"k4v4", 0, 256, TKV_NONE, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI4, TKV_KIVI4}},
    {"k4v3", 0, 128, TKV_NONE, {TKV_KIVI4, TKV_KIVI3}, {TKV_KIVI4, TKV_KIVI3}},
    {"k4v2", 0, 128, TKV_NONE, {TKV_KIVI4, TKV_KIVI2}, {TKV_KIVI4, TKV_KIVI2}},
    {"k3v3", 0, 128, TKV_NONE, {TKV_KIVI3, TKV_KIVI3}, {TKV_KIVI3, TKV_KIVI3}},
    {"k2v2", 0, 64, TKV_NONE, {TKV_KIVI2, TKV_KIVI2}, {TKV_KIVI2, TKV_KIVI2}},
};

#define TKVI_PRESETS ((int)(sizeof tkvi_presets / sizeof *tkvi_presets))

TKV_API const char *tkv_preset_name(int i) {
    int row;
    for (row = 0; row < TKVI_PRESETS; row++) {
        int again = row > 0 && strcmp(tkvi_presets[row].name, tkvi_presets[row - 1].name) == 0;
        if (!again && i-- == 0) return tkvi_presets[row].name;
    }
    return NULL;
}

TKV_API tkv_status tkv_config_preset(tkv_config *cfg, const char *name) {
    int i;
    for (i = 0; cfg && name && i < TKVI_PRESETS; i++) {
        int below = tkvi_presets[i].below;
        if (strcmp(name, tkvi_presets[i].name) != 0) continue;
        if (below && (cfg->max_tokens == 0 || cfg->max_tokens >= below)) continue;
        cfg->sink_tokens = 0; /* 4, and below 0 is 64, 448 */
        cfg->hot_tokens = tkvi_presets[i].hot_tokens;
        cfg->warm_tokens = tkvi_presets[i].warm_tokens;
        cfg->hot.k = cfg->hot.v = TKV_FORMAT_DEFAULT;
        cfg->warm = tkvi_presets[i].warm;
        cfg->archive = tkvi_presets[i].archive;
        return TKV_OK;
    }
    return TKV_ERR_ARG;
}

TKV_API tkv_tier tkv_tier_for_age(const tkv_config *cfg, int age) {
    const int hot = tkvi_length(cfg ? cfg->hot_tokens : 0, 0, 64);
    const int warm = tkvi_length(cfg ? cfg->warm_tokens : 0, 0, 448);
    if (age < hot) return TKV_HOT;
    return (int64_t)age < (int64_t)hot + warm ? TKV_WARM : TKV_ARCHIVE;
}

#endif /* TKVI_PRESET_H */
/* ======== feedback.h ======== */
/*
 * feedback.h - the quality controller: from a stream of scores (1: no loss) to advice on hot tokens and precision. It
 * owns no memory and knows no cache.
 *
 *     scores  ................ | change |cool-down| 1 .......... 16 ............ 100   newest
 *     count                                        no advice yet | if it is clear | always, the last 100
 *
 * The rule of the design this comes from (hot x 1.2 or x 0.9, a step of the level, on the mean of 100) with what it
 * takes not to swing: scores of an old plan do not speak for the new one; chance is told from change by the standard
 * error; and a step that would be taken back is not taken, since the last step the other way has shown what it costs.
 *
 * Sums are of whole numbers, so that they do not depend on flags. One lock guards a controller's numbers; without
 * atomics (neither gcc nor clang) a controller belongs to one thread. May call plan and below.
 */
#ifndef TKVI_FEEDBACK_H
#define TKVI_FEEDBACK_H


#define TKVI_SCORE_ONE 16777216.0 /* 2^24: every float from .5 to 1 is whole */
#define TKVI_SCORES_FEW 16        /* fewer say nothing */
#define TKVI_SCORES_MANY 100      /* what advice and reports look back at */

/* >>scores */
static int tkvi_real(double x) { return tkvi_is_finite((float)x); }

static float tkvi_score_cut(double x) { return x < 0.0 ? 0.0f : x > 1.0 ? 1.0f : (float)x; }

TKV_API float tkv_score_from_ppl(double base, double ppl) {
    if (!tkvi_real(base) || !tkvi_real(ppl) || base < 1.0 || ppl < 1.0) return -1.0f;
    return tkvi_score_cut(1.0 - (ppl - base) / base);
}

TKV_API float tkv_score_from_accuracy(double base, double accuracy) {
    if (!tkvi_real(base) || !tkvi_real(accuracy) || base <= 0.0 || accuracy < 0.0) return -1.0f;
    return tkvi_score_cut(accuracy / base);
}

/* Output_error is the share of the power of attention's output that is error. A perplexity rises with that power, not
 * with its root: over formats from 4 to 1.25 bits, whose errors differ 80 times, the model's KL divergence at the
 * same positions was .9 to 1.8 times it (SmolLM2-135M, 400 tokens); with 15M weights 2.9 to 3.4, with 3M .2 to .4
 * times. Errors of weights alone (kl, top1) would leave out those of V. Blocks without a copy count as others. */
TKV_API float tkv_score_from_quality(const tkv_quality_info *q, double weight) {
    if (!q || q->samples == 0 || !tkvi_real(q->coverage) || !tkvi_real(q->output_error)) return -1.0f;
    if (q->coverage < .05 || q->output_error < 0.0 || !tkvi_real(weight) || weight < 0.0) return -1.0f;
    return tkvi_score_cut(1.0 - (weight > 0.0 ? weight : 1.0) * q->output_error / q->coverage);
}

/* >>the config */
static const char *tkvi_feedback_fill(const tkv_feedback_config *from, tkv_feedback_config *cfg) {
    *cfg = *from;
    if (tkvi_bits(cfg->target) == 0) cfg->target = .97f;
    if (cfg->cooldown == 0) cfg->cooldown = 8;
    if (cfg->cooldown == TKV_NONE) cfg->cooldown = 0;
    if (cfg->max_hot == 0) cfg->max_hot = tkvi_max(cfg->min_hot, 1024);
    if (cfg->min_hot == 0) cfg->min_hot = tkvi_min(cfg->max_hot, 32);
    if (cfg->max_level == 0) cfg->max_level = tkvi_max(cfg->min_level, 3);
    if (cfg->max_level == TKV_NONE) cfg->max_level = 0;
    if (!tkvi_is_finite(cfg->target) || cfg->target < .01f || cfg->target > .9999f)
        return "target must be from .01 to .9999";
    if (cfg->cooldown < 0 || cfg->cooldown > TKV_FEEDBACK_HISTORY)
        return "cooldown must be at most 1000 scores, 0 for 8 or TKV_NONE";
    if (cfg->min_hot < 1 || cfg->max_hot < cfg->min_hot || cfg->max_hot > TKVI_FOREVER)
        return "min_hot and max_hot must be from 1 to 2^30 - 1, in this order";
    if (cfg->max_level < 0 || cfg->max_level >= TKV_MAX_LEVELS)
        return "max_level must be below TKV_MAX_LEVELS, TKV_NONE or 0 for 3";
    if (cfg->min_level < 0 || cfg->min_level > cfg->max_level) return "min_level must be from 0 to max_level";
    return NULL;
}

/* Nothing is known of the plan; its scores begin after `wait` more. */
static void tkvi_feedback_restart(tkv_feedback *f, int wait) {
    f->since = f->scores + (uint64_t)wait;
    f->sum = f->squares = 0;
    f->low = f->gain = -1.0f;
}

TKV_API tkv_status tkv_feedback_init(tkv_feedback *f, const tkv_feedback_config *cfg, const char **reason) {
    tkv_feedback_config none, full;
    const char *wrong;
    memset(&none, 0, sizeof none);
    if (reason) *reason = "";
    if (!f) return TKV_ERR_ARG;
    wrong = tkvi_feedback_fill(cfg ? cfg : &none, &full);
    if (wrong) {
        if (reason) *reason = wrong;
        return TKV_ERR_CONFIG;
    }
    memset(f, 0, sizeof *f);
    f->cfg = full;
    f->moved = 1;
    tkvi_feedback_restart(f, 0);
    return TKV_OK;
}

TKV_API void tkv_feedback_reset(tkv_feedback *f) {
    if (!f) return;
    tkvi_lock(&f->lock);
    f->scores = f->refused = f->finer = f->cheaper = 0;
    f->moved = 1;
    tkvi_feedback_restart(f, 0);
    tkvi_unlock(&f->lock);
}

static void tkvi_feedback_add(tkv_feedback *f, uint64_t x) {
    const uint64_t at = f->scores++;
    f->history[at % TKV_FEEDBACK_HISTORY] = (uint32_t)x;
    if (at < f->since) return;
    if (at - f->since >= TKVI_SCORES_MANY) {
        const uint64_t old = f->history[(at - TKVI_SCORES_MANY) % TKV_FEEDBACK_HISTORY];
        f->sum -= old;
        f->squares -= old * old;
    }
    f->sum += x;
    f->squares += x * x;
}

TKV_API tkv_status tkv_feedback_observe(tkv_feedback *f, float score) {
    int refused;
    if (!f) return TKV_ERR_ARG;
    refused = !tkvi_is_finite(score) || score < 0.0f || score > 1.0f;
    tkvi_lock(&f->lock);
    if (refused) f->refused++;
    else tkvi_feedback_add(f, (uint64_t)((double)score * TKVI_SCORE_ONE + .5));
    tkvi_unlock(&f->lock);
    return refused ? TKV_ERR_ARG : TKV_OK;
}

/* >>the newest n scores */
typedef struct tkvi_scores {
    int n;
    uint64_t sum, squares;
} tkvi_scores;

/* Where in the ring the newest n begin. */
static int tkvi_scores_from(const tkv_feedback *f, int n) {
    return (int)((f->scores - (uint64_t)n) % TKV_FEEDBACK_HISTORY);
}

static int tkvi_scores_next(int at) { return at + 1 < TKV_FEEDBACK_HISTORY ? at + 1 : 0; }

static tkvi_scores tkvi_scores_of(const tkv_feedback *f, int n) {
    tkvi_scores s;
    int i, at = tkvi_scores_from(f, n);
    s.n = n;
    s.sum = s.squares = 0;
    for (i = 0; i < n; i++, at = tkvi_scores_next(at)) {
        const uint64_t x = f->history[at];
        s.sum += x;
        s.squares += x * x;
    }
    return s;
}

static double tkvi_scores_mean(const tkvi_scores *s) {
    return s->n ? (double)s->sum / TKVI_SCORE_ONE / s->n : 0.0;
}

/* Of a sample: over n - 1. */
static double tkvi_scores_variance(const tkvi_scores *s) {
    const double sum = (double)s->sum;
    const double square = s->n > 1 ? ((double)s->squares - sum * sum / s->n) / (s->n - 1) : 0.0;
    return square > 0.0 ? square / TKVI_SCORE_ONE / TKVI_SCORE_ONE : 0.0;
}

/* On which side of the limit the mean is, -1 or 1; 0: within so many standard errors, it may be chance. */
static int tkvi_scores_side(const tkvi_scores *s, double limit, double errors) {
    const double off = tkvi_scores_mean(s) - limit;
    if (off * off * s->n <= errors * errors * tkvi_scores_variance(s)) return 0;
    return off < 0.0 ? -1 : 1;
}

/* >>advice */
enum {
    TKVI_ADVICE_FEW,
    TKVI_ADVICE_MEETS,
    TKVI_ADVICE_FINER,
    TKVI_ADVICE_NO_FINER,
    TKVI_ADVICE_CHEAPER,
    TKVI_ADVICE_NO_CHEAPER,
    TKVI_ADVICE_LOSES
};
static const char *const tkvi_advice_reasons[] = {
    "fewer than 16 scores of this plan",
    "the mean score meets the target and has little to spare, or it is not clear yet",
    "the mean score is below the target: more hot tokens, higher precision",
    "the mean score is below the target, but hot tokens and level are at their limits",
    "the mean score is well above the target: fewer hot tokens, lower precision",
    "the mean score is well above the target, but hot tokens and level are at their limits",
    "the mean score is well above the target, but would fall below it as it did before",
};

/* A plan beyond a limit stays there: it is not moved the other way. */
static int tkvi_hot_more(const tkv_feedback_config *cfg, int hot) {
    const int64_t more = ((int64_t)hot * 6 + 4) / 5;
    return more >= cfg->max_hot ? tkvi_max(hot, cfg->max_hot) : tkvi_max((int)more, cfg->min_hot);
}

static int tkvi_hot_less(const tkv_feedback_config *cfg, int hot) {
    return tkvi_min(hot, tkvi_max(cfg->min_hot, (int)((int64_t)hot * 9 / 10)));
}

static int tkvi_advise(tkv_feedback *f, tkv_advice *a) {
    const tkv_feedback_config *cfg = &f->cfg;
    const double target = (double)cfg->target, slack = (1.0 - target) / 2.0;
    const uint64_t had = f->scores > f->since ? f->scores - f->since : 0;
    const int n = had < TKVI_SCORES_MANY ? (int)had : TKVI_SCORES_MANY;
    const tkvi_scores late = tkvi_scores_of(f, tkvi_min(n, TKVI_SCORES_FEW));
    const double errors = n < TKVI_SCORES_MANY ? 2.0 : 0.0;
    tkvi_scores all;
    float mean;
    int below;
    all.n = n;
    all.sum = f->sum;
    all.squares = f->squares;
    mean = (float)tkvi_scores_mean(&all);
    a->mean = mean;
    a->samples = n;
    if (n < TKVI_SCORES_FEW) return TKVI_ADVICE_FEW;
    if (f->gain >= 0.0f && f->scores - f->gained_at > TKV_FEEDBACK_HISTORY) f->low = f->gain = -1.0f;
    if (f->low >= 0.0f && f->gain < 0.0f) {
        f->gain = mean > f->low ? mean - f->low : 0.0f;
        f->gained_at = f->scores;
    }
    below = tkvi_scores_side(&all, target, errors) < 0;
    if (below || tkvi_scores_side(&late, target, 3.0) < 0) {
        const int hot = tkvi_hot_more(cfg, a->hot_tokens), step = a->level > cfg->min_level ? -1 : 0;
        if (hot == a->hot_tokens && !step) return TKVI_ADVICE_NO_FINER;
        a->hot_tokens = hot;
        a->step = step;
        if (!below) a->mean = (float)tkvi_scores_mean(&late), a->samples = late.n;
        tkvi_feedback_restart(f, cfg->cooldown);
        f->low = a->mean;
        f->finer++;
        return TKVI_ADVICE_FINER;
    }
    if (tkvi_scores_side(&all, target + slack, errors) > 0 && tkvi_scores_mean(&late) > target + slack) {
        const int hot = tkvi_hot_less(cfg, a->hot_tokens), step = a->level < cfg->max_level ? 1 : 0;
        if (hot == a->hot_tokens && !step) return TKVI_ADVICE_NO_CHEAPER;
        if (f->gain >= 0.0f && (double)mean - (double)f->gain <= target + slack / 2.0)
            return TKVI_ADVICE_LOSES;
        a->hot_tokens = hot;
        a->step = step;
        tkvi_feedback_restart(f, cfg->cooldown);
        f->cheaper++;
        return TKVI_ADVICE_CHEAPER;
    }
    return TKVI_ADVICE_MEETS;
}

TKV_API tkv_status tkv_feedback_advise(tkv_feedback *f, int hot_tokens, int level, tkv_advice *out) {
    tkv_advice a;
    int why;
    if (!f || !out || hot_tokens < 0 || hot_tokens > TKVI_FOREVER || level < 0 || level >= TKV_MAX_LEVELS)
        return TKV_ERR_ARG;
    memset(&a, 0, sizeof a);
    a.hot_tokens = hot_tokens;
    a.level = level;
    tkvi_lock(&f->lock);
    if (!f->moved && (hot_tokens != f->hot || level != f->level)) tkvi_feedback_restart(f, f->cfg.cooldown);
    why = tkvi_advise(f, &a);
    f->moved = why == TKVI_ADVICE_FINER || why == TKVI_ADVICE_CHEAPER;
    f->hot = hot_tokens;
    f->level = level;
    tkvi_unlock(&f->lock);
    a.kind = why == TKVI_ADVICE_FINER     ? TKV_ADVICE_FINER
             : why == TKVI_ADVICE_CHEAPER ? TKV_ADVICE_CHEAPER
                                          : TKV_ADVICE_KEEP;
    a.level = level + a.step;
    a.reason = tkvi_advice_reasons[why];
    *out = a;
    return TKV_OK;
}

/* >>reports */
TKV_API tkv_status tkv_feedback_read(tkv_feedback *f, int last, tkv_feedback_info *out) {
    tkv_feedback_info r;
    tkvi_scores s;
    uint64_t weighted = 0;
    uint32_t least = 0xffffffffu, most = 0;
    int i, at, n = last ? last : TKVI_SCORES_MANY;
    if (!f || !out || n < 0 || n > TKV_FEEDBACK_HISTORY) return TKV_ERR_ARG;
    memset(&r, 0, sizeof r);
    tkvi_lock(&f->lock);
    if ((uint64_t)n > f->scores) n = (int)f->scores;
    s = tkvi_scores_of(f, n);
    for (i = 0, at = tkvi_scores_from(f, n); i < n; i++, at = tkvi_scores_next(at)) {
        const uint32_t x = f->history[at];
        weighted += (uint64_t)i * x;
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    r.scores = f->scores;
    r.refused = f->refused;
    r.finer = f->finer;
    r.cheaper = f->cheaper;
    tkvi_unlock(&f->lock);
    r.n = n;
    if (n > 0) {
        const double target = (double)f->cfg.target, slack = (1.0 - target) / 2.0;
        const double mean = tkvi_scores_mean(&s), variance = tkvi_scores_variance(&s);
        /* sums of i - its mean, squared and times the score: those of whole numbers, exact */
        const double width = (double)n * ((double)n * n - 1.0) / 12.0;
        const double along = ((double)weighted - (double)s.sum * (n - 1) / 2.0) / TKVI_SCORE_ONE;
        const double slope = n > 1 ? along / width : 0.0;
        const double rest = variance * (n - 1) - slope * along, rise = slope * (n - 1);
        r.average = (float)mean;
        r.least = (float)(least / TKVI_SCORE_ONE);
        r.most = (float)(most / TKVI_SCORE_ONE);
        r.deviation = (float)sqrt(variance);
        r.trend = (float)slope;
        r.meets_target = mean >= target;
        if (n >= TKVI_SCORES_FEW) {
            r.is_improving = slope > 0.0 && slope * slope * width * (n - 2) > 4.0 * rest;
            r.is_stable = variance <= slack * slack && rise * rise <= slack * slack;
        }
    }
    *out = r;
    return TKV_OK;
}

#endif /* TKVI_FEEDBACK_H */
/* ======== thresholds.h ======== */
/*
 * thresholds.h - the threshold store: plans that were found good, by model, layer and context length, in an array of
 * the caller's; as a text, and back.
 *
 *     tieredkv-thresholds 1
 *     all 4096 64 448 128 a30 r30 0.981200 SmolLM2-135M
 *     sum 91a2c35b08d1f7e6
 *
 * An entry: layer (or all), context, hot, warm (or none, all), samples, the archive's formats for K and V (or default),
 * score, model; one blank between two, the name of the model runs to the end of the line. Entries rise by model
 * (bytes), layer, context: no two are alike, and equal stores give equal texts. The sum is FNV-1a, 64 bits, of
 * all bytes before its line. A text is read only if it is what would have been printed.
 *
 * May call plan (for formats) and below.
 */
#ifndef TKVI_THRESHOLDS_H
#define TKVI_THRESHOLDS_H


#include <stddef.h>

#define TKVI_THRESHOLDS_TITLE "tieredkv-thresholds "
#define TKVI_THRESHOLDS_VERSION "1"
#define TKVI_THRESHOLD_LINE 192 /* more than the longest line: 63 of the name, 55 of numbers, two formats */

/* >>what an entry may hold. Numbers in the order of a line: from `low` to `high`, or one of two words. */
typedef struct tkvi_threshold_number {
    const char *name;
    size_t at;
    int low, high;
    int none, all; /* 1: so may it be */
} tkvi_threshold_number;

#define TKVI_THRESHOLD_AT(field) offsetof(tkv_threshold, field)
static const tkvi_threshold_number tkvi_threshold_numbers[] = {
    {"layer", TKVI_THRESHOLD_AT(layer), 0, TKVI_MAX_LAYERS - 1, 0, 1},
    {"context", TKVI_THRESHOLD_AT(context), 1, TKVI_FOREVER, 0, 0},
    {"hot_tokens", TKVI_THRESHOLD_AT(hot_tokens), 0, TKVI_FOREVER, 1, 1},
    {"warm_tokens", TKVI_THRESHOLD_AT(warm_tokens), 0, TKVI_FOREVER, 1, 1},
    {"samples", TKVI_THRESHOLD_AT(samples), 0, 0x7fffffff, 0, 0},
};
#define TKVI_THRESHOLD_NUMBERS ((int)(sizeof tkvi_threshold_numbers / sizeof *tkvi_threshold_numbers))

static int tkvi_threshold_number_of(const tkv_threshold *e, int i) {
    int x;
    memcpy(&x, (const char *)e + tkvi_threshold_numbers[i].at, sizeof x);
    return x;
}

static int tkvi_number_valid(const tkvi_threshold_number *d, int x) {
    return (x >= d->low && x <= d->high) || (x == TKV_NONE && d->none) || (x == TKV_ALL && d->all);
}

static int tkvi_store_format_valid(tkv_format f, tkv_side side) {
    return f == TKV_FORMAT_DEFAULT || (tkvi_format_known(f) && tkvi_format_stores(&tkvi_formats[f], side));
}

/* Any bytes from blank on, UTF-8 included: 1 to 63 of them, a 0 behind, no blank at either end. */
static int tkvi_model_valid(const char *name) {
    int n;
    for (n = 0; n < TKV_MODEL_NAME && name[n]; n++)
        if ((unsigned char)name[n] < 0x20 || name[n] == 0x7f) return 0;
    return n > 0 && n < TKV_MODEL_NAME && name[0] != ' ' && name[n - 1] != ' ';
}

/* What is wrong with an entry, or NULL. */
static const char *tkvi_threshold_wrong(const tkv_threshold *e) {
    int i;
    for (i = 0; i < TKVI_THRESHOLD_NUMBERS; i++)
        if (!tkvi_number_valid(&tkvi_threshold_numbers[i], tkvi_threshold_number_of(e, i)))
            return tkvi_threshold_numbers[i].name;
    if (!tkvi_store_format_valid(e->archive.k, TKV_K)) return "archive.k";
    if (!tkvi_store_format_valid(e->archive.v, TKV_V)) return "archive.v";
    if (!tkvi_is_finite(e->score) || e->score < 0.0f || e->score > 1.0f) return "score";
    return tkvi_model_valid(e->model) ? NULL : "model";
}

/* Scores are whole millionths: a text holds them exactly. */
static int tkvi_millionths(float score) { return (int)((double)score * 1e6 + .5); }

static float tkvi_of_millionths(int n) { return (float)(n / 1e6); }

/* >>the array */
static int tkvi_threshold_order(const tkv_threshold *a, const tkv_threshold *b) {
    const int names = strcmp(a->model, b->model);
    if (names) return names;
    return a->layer != b->layer       ? (a->layer > b->layer) - (a->layer < b->layer)
           : a->context != b->context ? (a->context > b->context) - (a->context < b->context)
                                      : 0;
}

/* Is the array as these functions leave it? It is the caller's, so nothing is taken for granted. */
static int tkvi_thresholds_sound(const tkv_thresholds *t) {
    int i;
    if (!t || t->n < 0 || t->n > t->room || (t->room > 0 && !t->entry)) return 0;
    for (i = 0; i < t->n; i++) {
        if (tkvi_threshold_wrong(&t->entry[i])) return 0;
        if (i && tkvi_threshold_order(&t->entry[i - 1], &t->entry[i]) >= 0) return 0;
    }
    return 1;
}

/* Where the entry stands or would stand; *found: it stands there. */
static int tkvi_threshold_place(const tkv_thresholds *t, const tkv_threshold *e, int *found) {
    int i = 0, order = 1;
    while (i < t->n && (order = tkvi_threshold_order(&t->entry[i], e)) < 0) i++;
    *found = i < t->n && order == 0;
    return i;
}

/* In a sound array with room. */
static void tkvi_threshold_put(tkv_thresholds *t, const tkv_threshold *e) {
    int found, i = tkvi_threshold_place(t, e, &found);
    tkv_threshold *to = &t->entry[i];
    size_t length = strlen(e->model);
    if (!found) memmove(to + 1, to, (size_t)(t->n++ - i) * sizeof *to);
    *to = *e;
    memset(to->model + length, 0, sizeof to->model - length);
    to->score = tkvi_of_millionths(tkvi_millionths(e->score));
}

TKV_API tkv_status tkv_thresholds_put(tkv_thresholds *t, const tkv_threshold *e) {
    tkv_threshold copy;
    int found;
    if (!tkvi_thresholds_sound(t) || !e || tkvi_threshold_wrong(e)) return TKV_ERR_ARG;
    copy = *e; /* it may stand in the array itself */
    tkvi_threshold_place(t, &copy, &found);
    if (!found && t->n == t->room) return TKV_ERR_CAPACITY;
    tkvi_threshold_put(t, &copy);
    return TKV_OK;
}

/* >>finding */
static int tkvi_context_distance(const tkv_threshold *e, int context) {
    return e->context > context ? e->context - context : context - e->context;
}

/* Below 0: a is the better one for this layer and context. Of two entries that are there, never 0. */
static int tkvi_threshold_rank(const tkv_threshold *a, const tkv_threshold *b, int layer, int context) {
    int i, key[5][2];
    const tkv_threshold *e[2];
    e[0] = a;
    e[1] = b;
    for (i = 0; i < 2; i++) { /* the smaller key is the better */
        key[0][i] = e[i]->layer != layer;
        key[1][i] = tkvi_context_distance(e[i], context);
        key[2][i] = -tkvi_millionths(e[i]->score);
        key[3][i] = -e[i]->samples;
        key[4][i] = -e[i]->context;
    }
    for (i = 0; i < 5; i++)
        if (key[i][0] != key[i][1]) return key[i][0] < key[i][1] ? -1 : 1;
    return 0;
}

TKV_API int tkv_thresholds_candidates(const tkv_thresholds *t, const char *model, int layer, int context,
                                      tkv_threshold *out, int most) {
    int i, k, n = 0;
    if (!tkvi_thresholds_sound(t) || !model || !out || most < 1) return 0;
    if (!tkvi_number_valid(&tkvi_threshold_numbers[0], layer)) return 0;
    if (!tkvi_number_valid(&tkvi_threshold_numbers[1], context)) return 0;
    for (i = 0; i < t->n; i++) {
        const tkv_threshold *e = &t->entry[i];
        if ((e->layer != layer && e->layer != TKV_ALL) || strcmp(e->model, model) != 0) continue;
        for (k = n; k > 0 && tkvi_threshold_rank(e, &out[k - 1], layer, context) < 0; k--)
            if (k < most) out[k] = out[k - 1];
        if (k == most) continue;
        out[k] = *e;
        n += n < most;
    }
    return n;
}

TKV_API tkv_status tkv_thresholds_find(const tkv_thresholds *t, const char *model, int layer, int context,
                                       tkv_threshold *out) {
    if (!tkvi_thresholds_sound(t) || !model || !out) return TKV_ERR_ARG;
    return tkv_thresholds_candidates(t, model, layer, context, out, 1) ? TKV_OK : TKV_ERR_RANGE;
}

TKV_API tkv_status tkv_thresholds_transfer(tkv_thresholds *t, const char *from, const char *to,
                                           float discount) {
    char model[2][TKV_MODEL_NAME]; /* copies: a name may stand in the array itself */
    tkv_threshold e;
    int i, pass, found, any = 0, fresh = 0;
    if (tkvi_bits(discount) == 0) discount = .9f;
    if (!tkvi_thresholds_sound(t) || !from || !to || strcmp(from, to) == 0) return TKV_ERR_ARG;
    if (!tkvi_model_valid(from) || !tkvi_model_valid(to)) return TKV_ERR_ARG;
    if (!tkvi_is_finite(discount) || discount <= 0.0f || discount > 1.0f) return TKV_ERR_ARG;
    memset(model, 0, sizeof model);
    memcpy(model[0], from, strlen(from));
    memcpy(model[1], to, strlen(to));
    for (pass = 0; pass < 2; pass++) { /* counts, then copies */
        for (i = 0; i < t->n; i++) {
            if (strcmp(t->entry[i].model, model[0]) != 0) continue;
            any = 1;
            e = t->entry[i];
            memcpy(e.model, model[1], sizeof e.model);
            tkvi_threshold_place(t, &e, &found);
            if (found) continue;
            e.score *= discount;
            e.samples = 0;
            if (pass == 0) fresh++;
            else tkvi_threshold_put(t, &e); /* may move this one up: it is met again, and its copy found */
        }
        if (!any) return TKV_ERR_RANGE;
        if (pass == 0 && fresh > t->room - t->n) return TKV_ERR_CAPACITY;
    }
    return TKV_OK;
}

/* >>printing */
typedef struct tkvi_printer {
    tkv_write_bytes write;
    void *user;
    uint64_t sum;
    int failed;
} tkvi_printer;

static void tkvi_print_line(tkvi_printer *p, tkvi_text *t, const char *line) {
    const size_t n = (size_t)(t->at - line);
    p->sum = tkvi_fnv1a_more(p->sum, (const uint8_t *)line, n);
    if (!p->failed) p->failed = p->write(p->user, line, n) != 0;
}

static void tkvi_say_number(tkvi_text *t, int n) {
    if (n == TKV_NONE) tkvi_say(t, "none");
    else if (n == TKV_ALL) tkvi_say(t, "all");
    else tkvi_say_int(t, n);
}

static void tkvi_say_format(tkvi_text *t, tkv_format f) {
    tkvi_say(t, f == TKV_FORMAT_DEFAULT ? "default" : tkvi_formats[f].name);
}

static void tkvi_say_score(tkvi_text *t, float score) {
    char digits[9];
    int i, n = tkvi_millionths(score);
    for (i = 7; i >= 0; i--) {
        digits[i] = '.';
        if (i == 1) continue;
        digits[i] = (char)('0' + n % 10);
        n /= 10;
    }
    digits[8] = 0;
    tkvi_say(t, digits);
}

static void tkvi_say_sum(tkvi_text *t, uint64_t sum) {
    char digits[17];
    int i;
    for (i = 15; i >= 0; i--, sum >>= 4) digits[i] = "0123456789abcdef"[sum & 15u];
    digits[16] = 0;
    tkvi_say(t, "sum ");
    tkvi_say(t, digits);
    tkvi_say(t, "\n");
}

static void tkvi_say_threshold(tkvi_text *t, const tkv_threshold *e) {
    int i;
    for (i = 0; i < TKVI_THRESHOLD_NUMBERS; i++, tkvi_say(t, " "))
        tkvi_say_number(t, tkvi_threshold_number_of(e, i));
    tkvi_say_format(t, e->archive.k);
    tkvi_say(t, " ");
    tkvi_say_format(t, e->archive.v);
    tkvi_say(t, " ");
    tkvi_say_score(t, e->score);
    tkvi_say(t, " ");
    tkvi_say(t, e->model);
    tkvi_say(t, "\n");
}

TKV_API tkv_status tkv_thresholds_save(const tkv_thresholds *t, tkv_write_bytes write, void *user) {
    char line[TKVI_THRESHOLD_LINE];
    tkvi_printer p;
    tkvi_text at = tkvi_text_begin(line, sizeof line);
    int i;
    if (!tkvi_thresholds_sound(t) || !write) return TKV_ERR_ARG;
    p.write = write;
    p.user = user;
    p.sum = TKVI_FNV1A_START;
    p.failed = 0;
    tkvi_say(&at, TKVI_THRESHOLDS_TITLE TKVI_THRESHOLDS_VERSION "\n");
    tkvi_print_line(&p, &at, line);
    for (i = 0; i < t->n; i++) {
        at = tkvi_text_begin(line, sizeof line);
        tkvi_say_threshold(&at, &t->entry[i]);
        tkvi_print_line(&p, &at, line);
    }
    at = tkvi_text_begin(line, sizeof line);
    tkvi_say_sum(&at, p.sum);
    tkvi_print_line(&p, &at, line);
    return p.failed ? TKV_ERR_CAPACITY : TKV_OK;
}

/* A piece of memory to print to; without one it only counts. */
typedef struct tkvi_sheet {
    char *at;
    size_t used;
} tkvi_sheet;

static int tkvi_sheet_write(void *user, const char *bytes, size_t size) {
    tkvi_sheet *p = (tkvi_sheet *)user;
    if (p->at) memcpy(p->at + p->used, bytes, size);
    p->used += size;
    return 0;
}

TKV_API tkv_status tkv_thresholds_print(const tkv_thresholds *t, char *dst, size_t size, size_t *bytes) {
    tkvi_sheet p;
    p.at = NULL;
    p.used = 0;
    if (tkv_thresholds_save(t, tkvi_sheet_write, &p)) return TKV_ERR_ARG;
    if (bytes) *bytes = p.used;
    if (!dst) return TKV_OK;
    if (size < p.used) return TKV_ERR_ARG;
    p.at = dst;
    p.used = 0;
    return tkv_thresholds_save(t, tkvi_sheet_write, &p);
}

/* >>reading. A field that is not as it would be printed gives 0. */
typedef struct tkvi_scan {
    const char *at, *end;
    int line;
} tkvi_scan;

/* The bytes up to the next blank, cut off; up to the end of the line for the last field. */
static int tkvi_scan_field(tkvi_scan *s, char stop, char *out, size_t room) {
    size_t n = 0;
    while (s->at < s->end && *s->at != stop && *s->at != '\n' && *s->at && n + 1 < room) out[n++] = *s->at++;
    out[n] = 0;
    return n > 0 && s->at < s->end && *s->at++ == stop;
}

/* Digits, at most `high`, no zero before them; or -1. */
static int tkvi_scan_digits(const char *s, int high) {
    int64_t n = 0;
    int i;
    for (i = 0; s[i] >= '0' && s[i] <= '9' && i < 10; i++) n = n * 10 + (s[i] - '0');
    return i == 0 || s[i] || (s[0] == '0' && i > 1) || n > high ? -1 : (int)n;
}

static int tkvi_scan_number(tkvi_scan *s, const tkvi_threshold_number *d, int *x) {
    char word[16];
    if (!tkvi_scan_field(s, ' ', word, sizeof word)) return 0;
    if (strcmp(word, "none") == 0) *x = TKV_NONE;
    else if (strcmp(word, "all") == 0) *x = TKV_ALL;
    else if ((*x = tkvi_scan_digits(word, d->high)) < 0) return 0;
    return tkvi_number_valid(d, *x);
}

static int tkvi_scan_format(tkvi_scan *s, tkv_side side, tkv_format *f) {
    char word[32];
    if (!tkvi_scan_field(s, ' ', word, sizeof word)) return 0;
    *f = tkv_format_from_name(word);
    return *f == TKV_FORMAT_DEFAULT ? strcmp(word, "default") == 0 : tkvi_store_format_valid(*f, side);
}

static int tkvi_scan_score(tkvi_scan *s, float *score) {
    char word[16];
    int i, n = 0;
    if (!tkvi_scan_field(s, ' ', word, sizeof word) || strlen(word) != 8) return 0;
    for (i = 0; i < 8; i++) {
        if (i == 1 && word[i] == '.') continue;
        if (i == 1 || word[i] < '0' || word[i] > '9') return 0;
        n = n * 10 + (word[i] - '0');
    }
    *score = tkvi_of_millionths(n);
    return n <= 1000000;
}

/* One line as an entry. Returns what is wrong with it, or NULL. */
static const char *tkvi_scan_threshold(tkvi_scan *s, tkv_threshold *e) {
    int i, x;
    memset(e, 0, sizeof *e);
    for (i = 0; i < TKVI_THRESHOLD_NUMBERS; i++) {
        if (!tkvi_scan_number(s, &tkvi_threshold_numbers[i], &x)) return tkvi_threshold_numbers[i].name;
        memcpy((char *)e + tkvi_threshold_numbers[i].at, &x, sizeof x);
    }
    if (!tkvi_scan_format(s, TKV_K, &e->archive.k)) return "archive.k";
    if (!tkvi_scan_format(s, TKV_V, &e->archive.v)) return "archive.v";
    if (!tkvi_scan_score(s, &e->score)) return "score";
    if (!tkvi_scan_field(s, '\n', e->model, sizeof e->model)) return "model";
    return tkvi_threshold_wrong(e);
}

static int tkvi_starts_with(const tkvi_scan *s, const char *with) {
    const size_t n = strlen(with);
    return (size_t)(s->end - s->at) >= n && memcmp(s->at, with, n) == 0;
}

static tkv_status tkvi_scan_bad(const tkvi_scan *s, const char *what, const char *why, tkvi_text *reason) {
    tkvi_say(reason, "line ");
    tkvi_say_int(reason, s->line);
    tkvi_say(reason, ": ");
    tkvi_say(reason, what);
    tkvi_say(reason, why);
    return TKV_ERR_DATA;
}

/* Reads a text, into `to` unless that is NULL; *n counts its entries. */
static tkv_status tkvi_thresholds_scan(const char *src, size_t size, tkv_threshold *to, int *n,
                                       tkvi_text *reason) {
    static const char title[] = TKVI_THRESHOLDS_TITLE TKVI_THRESHOLDS_VERSION "\n";
    char line[TKVI_THRESHOLD_LINE];
    tkvi_text sum = tkvi_text_begin(line, sizeof line);
    tkv_threshold e, last;
    tkvi_scan s;
    s.at = src;
    s.end = src + size;
    s.line = 1;
    *n = 0;
    if (!tkvi_starts_with(&s, TKVI_THRESHOLDS_TITLE))
        return tkvi_scan_bad(&s, "this is no threshold store", "", reason);
    if (!tkvi_starts_with(&s, title))
        return tkvi_scan_bad(&s, "the store is of another version: ask the library that wrote it", "",
                             reason);
    s.at += sizeof title - 1;
    for (s.line = 2; s.at < s.end && !tkvi_starts_with(&s, "sum "); s.line++, ++*n) {
        const char *wrong = tkvi_scan_threshold(&s, &e);
        if (wrong) return tkvi_scan_bad(&s, wrong, " is damaged or out of range: take an older copy", reason);
        if (*n && tkvi_threshold_order(&last, &e) >= 0)
            return tkvi_scan_bad(&s, "the entry", " is there twice or out of order", reason);
        if (s.line == TKVI_FOREVER) return tkvi_scan_bad(&s, "there are too many", "", reason);
        if (to) to[*n] = e;
        last = e;
    }
    tkvi_say_sum(&sum, tkvi_fnv1a_more(TKVI_FNV1A_START, (const uint8_t *)src, (size_t)(s.at - src)));
    if (!tkvi_starts_with(&s, line))
        return tkvi_scan_bad(&s, "the checksum", " is missing or wrong: take an older copy", reason);
    if ((size_t)(s.end - s.at) != strlen(line))
        return tkvi_scan_bad(&s, "there is something", " after the checksum", reason);
    return TKV_OK;
}

TKV_API tkv_status tkv_thresholds_parse(tkv_thresholds *t, const char *src, size_t size, char *reason,
                                        size_t reason_size) {
    tkvi_text why = tkvi_text_begin(reason, reason ? reason_size : 0);
    tkv_status st;
    int n;
    if (!t || t->room < 0 || (t->room > 0 && !t->entry) || (!src && size)) {
        tkvi_say(&why, "the store or the text is missing");
        return TKV_ERR_ARG;
    }
    st = tkvi_thresholds_scan(size ? src : "", size, NULL, &n, &why);
    if (st) return st;
    if (n > t->room) {
        tkvi_say(&why, "the text has ");
        tkvi_say_int(&why, n);
        tkvi_say(&why, " entries, the store has room for ");
        tkvi_say_int(&why, t->room);
        return TKV_ERR_CAPACITY;
    }
    (void)tkvi_thresholds_scan(src, size, t->entry, &t->n, &why); /* the second time nothing can be wrong */
    return TKV_OK;
}

TKV_API tkv_status tkv_thresholds_load(tkv_thresholds *t, tkv_read_bytes read, void *user, char *work,
                                       size_t size, char *reason, size_t reason_size) {
    tkvi_text why = tkvi_text_begin(reason, reason ? reason_size : 0);
    size_t used = 0;
    if (!read || !work) {
        tkvi_say(&why, "the function that reads or its work space is missing");
        return TKV_ERR_ARG;
    }
    for (;;) {
        char more;
        const int full = used == size; /* is there another byte? */
        const ptrdiff_t got = full ? read(user, &more, 1) : read(user, work + used, size - used);
        if (got == 0) break;
        if (got < 0 || (size_t)got > (full ? 1u : size - used)) {
            tkvi_say(&why, "the function that reads has failed");
            return TKV_ERR_DATA;
        }
        if (full) {
            tkvi_say(&why, "the text is longer than the work space");
            return TKV_ERR_CAPACITY;
        }
        used += (size_t)got;
    }
    return tkv_thresholds_parse(t, work, used, reason, reason_size);
}

#endif /* TKVI_THRESHOLDS_H */
/* ======== select.h ======== */
/*
 * select.h - the k lowest of n scores, in O(n) and without memory of its own: a radix selection over the bits of the
 * floats, which are ordered as whole numbers are. What is equal is told apart by the index, so the answer is the same
 * everywhere. Also bit masks over slots. May call base.
 */
#ifndef TKVI_SELECT_H
#define TKVI_SELECT_H


/* >>masks: slot i is bit i % 64 of word i / 64 */
static int tkvi_has(const uint64_t *mask, int i) { return (int)(mask[i >> 6] >> (i & 63) & 1u); }

static void tkvi_mark(uint64_t *mask, int i) { mask[i >> 6] |= (uint64_t)1 << (i & 63); }

static int tkvi_words(int n) { return (int)(((int64_t)n + 63) / 64); }

/* >>ranks */
typedef struct tkvi_ranks {
    int n;
    const float *score;          /* finite */
    const signed char *priority; /* NULL, or it counts before the score */
    const uint64_t *without;     /* NULL, or bits of slots that do not take part */
    uint32_t turn;               /* all bits: the highest scores come first, the lowest index still does */
} tkvi_ranks;

/* Bits of a float in the order of floats, both zeros alike: the sign turned, and all else where it was set. */
static uint64_t tkvi_rank(const tkvi_ranks *r, int i) {
    const uint32_t bits = tkvi_bits(r->score[i]), u = bits == 0x80000000u ? 0u : bits;
    const uint32_t order = u ^ ((0u - (u >> 31)) | 0x80000000u);
    return (uint64_t)(r->priority ? r->priority[i] + 128 : 0) << 32 | (order ^ r->turn);
}

static int tkvi_takes_part(const tkvi_ranks *r, int i) { return !r->without || !tkvi_has(r->without, i); }

/* The k-th lowest rank, k from 1 to as many as take part. *equal: how many of that very rank are among the k. */
static uint64_t tkvi_select(const tkvi_ranks *r, int k, int *equal) {
    uint64_t found = 0, known = 0;
    int i, shift;
    for (shift = r->priority ? 32 : 24; shift >= 0; shift -= 8) {
        int count[256], byte = 0;
        memset(count, 0, sizeof count);
        for (i = 0; i < r->n; i++) {
            uint64_t rank;
            if (!tkvi_takes_part(r, i)) continue;
            rank = tkvi_rank(r, i);
            if ((rank & known) == found) count[rank >> shift & 255u]++;
        }
        while (k > count[byte]) k -= count[byte++];
        found |= (uint64_t)byte << shift;
        known |= (uint64_t)255 << shift;
    }
    *equal = k;
    return found;
}

#endif /* TKVI_SELECT_H */
/* ======== importance.h ======== */
/*
 * importance.h - how much each token matters, from the attention it got and its age; and which tokens deserve a dearer
 * tier. Strategies are rows of a table, in the manner of akv-cache. No memory of its own, no cache. May call policy and
 * select.
 *
 *     mass      .2 . . . .1 . . .        a token's A is multiplied only when something comes to it:
 *     A         .2       .2 * decay^4 + .1
 */
#ifndef TKVI_IMPORTANCE_H
#define TKVI_IMPORTANCE_H


/* >>what a step's mass does to A, which has been decayed */
static double tkvi_gather_sum(double a, double mass, double low) {
    (void)low;
    return a + mass;
}

static double tkvi_gather_most(double a, double mass, double low) {
    (void)low;
    return a > mass ? a : mass;
}

static double tkvi_gather_lows(double a, double mass, double low) { return a - (mass < low ? 1.0 : 0.0); }

typedef struct tkvi_strategy {
    const char *name;
    double (*gather)(double a, double mass, double low);
    float decay, attention, recency;
} tkvi_strategy;

static const tkvi_strategy tkvi_strategies[] = {
    {"hybrid", tkvi_gather_sum, .95f, .7f, .3f},          {"accumulation", tkvi_gather_sum, 1.0f, 1.0f, 0.0f},
    {"heavy_hitter", tkvi_gather_most, 1.0f, 1.0f, 0.0f}, {"recency", tkvi_gather_sum, 1.0f, 0.0f, 1.0f},
    {"persistence", tkvi_gather_lows, 1.0f, 1.0f, 0.0f},
};

static const tkvi_strategy *tkvi_strategy_of(tkv_importance_strategy s) {
    return (int)s >= 0 && (int)s < TKV_IMPORTANCE_STRATEGIES ? &tkvi_strategies[s] : NULL;
}

TKV_API const char *tkv_importance_name(tkv_importance_strategy strategy) {
    const tkvi_strategy *s = tkvi_strategy_of(strategy);
    return s ? s->name : NULL;
}

/* x, or `other` where x is 0; by bits, whatever the flags. */
static float tkvi_or(float x, float other) { return (tkvi_bits(x) & 0x7fffffffu) == 0 ? other : x; }

/* The config with its defaults, or NULL. */
static const tkvi_strategy *tkvi_importance_fill(const tkv_importance_config *from,
                                                 tkv_importance_config *cfg) {
    const tkvi_strategy *s;
    memset(cfg, 0, sizeof *cfg);
    if (from) *cfg = *from;
    s = tkvi_strategy_of(cfg->strategy);
    if (!s) return NULL;
    cfg->decay = tkvi_or(cfg->decay, s->decay);
    cfg->attention = tkvi_or(cfg->attention, s->attention);
    cfg->recency = tkvi_or(cfg->recency, s->recency);
    cfg->tau = tkvi_or(cfg->tau, 64.0f);
    return tkvi_within(cfg->decay, 1e-30f, 1.0f) && tkvi_within(cfg->attention, 0.0f, 1e6f) &&
                   tkvi_within(cfg->recency, 0.0f, 1e6f) && tkvi_within(cfg->tau, 1.0f, 1073741824.0f) &&
                   tkvi_within(cfg->low, 0.0f, 1e30f)
               ? s
               : NULL;
}

/* x^n by squaring: products alone, which round alike everywhere; nothing for the usual n of 1. 0 <= x <= 1. */
static double tkvi_power(double x, int n) {
    double y = 1.0;
    for (; n > 0; n >>= 1, x = tkvi_f64(x * x)) {
        if (n & 1) y = tkvi_f64(y * x);
        if (y < 1e-200) return 0.0; /* before numbers become subnormal, which some flags flush */
        if (x < 1e-200 && n > 1) return 0.0;
    }
    return y;
}

TKV_API tkv_status tkv_importance_add(const tkv_importance_config *cfg, tkv_importance *tokens,
                                      const float *mass, int n, int now) {
    tkv_importance_config full;
    const tkvi_strategy *s;
    double low;
    int i;
    if (n < 0 || now < 0 || (n > 0 && (!tokens || !mass))) return TKV_ERR_ARG;
    s = tkvi_importance_fill(cfg, &full);
    if (!s) return TKV_ERR_CONFIG;
    for (i = 0; i < n; i++) {
        if (!tkvi_within(mass[i], 0.0f, FLT_MAX)) return TKV_ERR_NONFINITE;
        if (!tkvi_is_finite(tokens[i].attention)) return TKV_ERR_NONFINITE;
        if (tokens[i].step < 0 || tokens[i].step > now) return TKV_ERR_ARG;
    }
    low = (double)tkvi_or(full.low, n > 0 ? 1.0f / (float)n : 0.0f);
    for (i = 0; i < n; i++) {
        const double old = (double)tokens[i].attention;
        const double a = tkvi_f64(old * tkvi_power((double)full.decay, now - tokens[i].step));
        const double sum = s->gather(a, (double)mass[i], low);
        tokens[i].attention = sum > (double)FLT_MAX ? FLT_MAX : (float)sum;
        tokens[i].step = now;
    }
    return TKV_OK;
}

TKV_API tkv_status tkv_importance_read(const tkv_importance_config *cfg, const tkv_importance *tokens,
                                       const int *position, int n, int now, float *out) {
    tkv_importance_config full;
    double fade;
    int i;
    if (n < 0 || now < 0 || (n > 0 && (!tokens || !out))) return TKV_ERR_ARG;
    if (!tkvi_importance_fill(cfg, &full)) return TKV_ERR_CONFIG;
    for (i = 0; i < n; i++) {
        const int at = position ? position[i] : i;
        if (at < 0 || at > now || tokens[i].step < 0 || tokens[i].step > now) return TKV_ERR_ARG;
        if (!tkvi_is_finite(tokens[i].attention)) return TKV_ERR_NONFINITE;
    }
    fade = exp(-1.0 / (double)full.tau);
    for (i = 0; i < n; i++) {
        const double decayed = tkvi_power((double)full.decay, now - tokens[i].step);
        const double a = tkvi_f64((double)full.attention * (double)tokens[i].attention) * decayed;
        const double age = tkvi_power(fade, now - (position ? position[i] : i));
        const double sum = a + (double)full.recency * age;
        out[i] = sum > (double)FLT_MAX ? FLT_MAX : sum < -(double)FLT_MAX ? -FLT_MAX : (float)sum;
    }
    return TKV_OK;
}

/* >>heads */
TKV_API tkv_status tkv_importance_aggregate(tkv_importance_heads how, const float *weights, ptrdiff_t stride,
                                            int n_heads, int n, float *out) {
    int h, i;
    if (n < 0 || n_heads < 1 || (n > 0 && (!weights || !out)) || (int)how < 0 || how > TKV_IMPORTANCE_SUM)
        return TKV_ERR_ARG;
    if (stride == 0) stride = n;
    for (i = 0; i < n; i++) out[i] = weights[i];
    for (h = 1; h < n_heads; h++) {
        const float *w = weights + h * stride;
        if (how == TKV_IMPORTANCE_MAX)
            for (i = 0; i < n; i++) out[i] = w[i] > out[i] ? w[i] : out[i];
        else
            for (i = 0; i < n; i++) out[i] += w[i];
    }
    if (how == TKV_IMPORTANCE_MEAN)
        for (i = 0; i < n; i++) out[i] /= (float)n_heads;
    return TKV_OK;
}

/* Quest (arXiv 2406.10774): each channel's product is largest at one of its two ends. */
TKV_API float tkv_importance_bound(const float *q, const float *low, const float *high, int head_dim) {
    double sum = 0.0;
    int c;
    if (!q || !low || !high) return 0.0f;
    for (c = 0; c < head_dim; c++) sum += (double)q[c] * (double)(q[c] < 0.0f ? low[c] : high[c]);
    return (float)sum;
}

/* >>the best */
/* Before: i is better than j, or as good and older. */
static int tkvi_before(const tkvi_ranks *r, int i, int j) {
    const uint64_t a = tkvi_rank(r, i), b = tkvi_rank(r, j);
    return a < b || (a == b && i < j);
}

/* A heap with the worst at the top: out[at] sinks to its place. */
static void tkvi_sink(const tkvi_ranks *r, int *out, int n, int at) {
    for (;;) {
        int child = 2 * at + 1, keep;
        if (child >= n) return;
        if (child + 1 < n && tkvi_before(r, out[child], out[child + 1])) child++;
        if (tkvi_before(r, out[child], out[at])) return;
        keep = out[at];
        out[at] = out[child];
        out[child] = keep;
        at = child;
    }
}

TKV_API tkv_status tkv_importance_top(const float *score, const uint64_t *without, int n, int k, int *out,
                                      int *count) {
    tkvi_ranks r;
    uint64_t last = 0;
    int i, equal = 0, found = 0, there = 0;
    if (n < 0 || n >= 1 << 30 || k < 0 || !count || (n > 0 && (!score || (k > 0 && !out))))
        return TKV_ERR_ARG;
    memset(&r, 0, sizeof r);
    r.n = n;
    r.score = score;
    r.without = without;
    r.turn = 0xffffffffu;
    for (i = 0; i < n; i++) {
        if (!tkvi_takes_part(&r, i)) continue;
        if (!tkvi_is_finite(score[i])) return TKV_ERR_NONFINITE;
        there++;
    }
    k = tkvi_min(k, there);
    *count = k;
    if (k > 0) last = tkvi_select(&r, k, &equal);
    for (i = 0; i < n && found < k; i++) {
        uint64_t rank;
        if (!tkvi_takes_part(&r, i)) continue;
        rank = tkvi_rank(&r, i);
        if (rank < last || (rank == last && equal-- > 0)) out[found++] = i;
    }
    for (i = k / 2; i-- > 0;) tkvi_sink(&r, out, k, i);
    for (i = k; i-- > 1;) {
        const int worst = out[0];
        out[0] = out[i];
        out[i] = worst;
        tkvi_sink(&r, out, i, 0);
    }
    return TKV_OK;
}

/* >>promotion */
TKV_API tkv_status tkv_importance_promote(tkv_importance_promotion *p, const float *score,
                                          const uint64_t *source, int *moved, int n, int now, int *out,
                                          int *count) {
    float threshold;
    tkvi_ranks r;
    int per_step, cooldown, room, i, j, found = 0;
    uint64_t none = 0, waiting = 0;
    if (!p || n < 0 || now < 0 || now < p->step || p->used < 0 || !count ||
        (n > 0 && (!score || !moved || !out)))
        return TKV_ERR_ARG;
    threshold = tkvi_or(p->cfg.threshold, .05f);
    per_step = p->cfg.per_step ? p->cfg.per_step : 8;
    cooldown = p->cfg.cooldown == TKV_NONE ? 0 : p->cfg.cooldown ? p->cfg.cooldown : 4;
    if (!tkvi_is_finite(threshold) || per_step < 1 || per_step > TKV_IMPORTANCE_PER_STEP || cooldown < 0)
        return TKV_ERR_CONFIG;
    for (i = 0; i < n; i++) {
        if (!tkvi_is_finite(score[i])) return TKV_ERR_NONFINITE;
        if (moved[i] < TKV_NONE || moved[i] > now) return TKV_ERR_ARG;
    }
    if (now > p->step) p->used = 0;
    p->step = now;
    room = tkvi_max(0, per_step - p->used);
    memset(&r, 0, sizeof r);
    r.n = n;
    r.score = score;
    r.turn = 0xffffffffu;
    for (i = 0; i < n; i++) { /* out is kept in order, the worst falls off its end */
        if (score[i] < threshold) continue;
        if (!source || !tkvi_has(source, i)) {
            none = 1;
            continue;
        }
        if (moved[i] != TKV_NONE && now - moved[i] < cooldown) {
            waiting++;
            continue;
        }
        if (found == room && (room == 0 || !tkvi_before(&r, i, out[found - 1]))) {
            waiting++;
            continue;
        }
        if (found == room) waiting++;
        else found++;
        for (j = found - 1; j > 0 && tkvi_before(&r, i, out[j - 1]); j--) out[j] = out[j - 1];
        out[j] = i;
    }
    for (j = 0; j < found; j++) moved[out[j]] = now;
    p->used += found;
    p->promoted += (uint64_t)found;
    p->no_source += none;
    p->waiting += waiting;
    *count = found;
    return TKV_OK;
}

#endif /* TKVI_IMPORTANCE_H */
/* ======== evict.h ======== */
/*
 * evict.h - which tokens of a layer to drop. Policies are rows of a table: a name, what they must see, what they
 * protect, and a function that scores all tokens; the lowest scores go, in one selection. No memory of its own, no
 * cache.
 *
 *     slots      0 1 2 3 4 5 6 7 8 9      keep 5, 2 sinks, 2 recent
 *     may go         x x x x x x          neither protected, pinned nor gone already
 *     score      . . 4 1 3 9 2 5 . .      5 of these 6 are too many: the lowest 5 go, of equal ones the older
 *     victims    0 0 1 1 1 0 1 1 0 0
 *
 * Where the definitions come from stands at each score. All see a layer's heads as one: sums or means over heads, so
 * that a token goes from all of them (the papers select per head). May call select, importance.
 */
#ifndef TKVI_EVICT_H
#define TKVI_EVICT_H


/* A token has its place here: in range, and not gone before. */
static int tkvi_is_alive(const tkv_evict_view *v, int i) { return !v->alive || tkvi_has(v->alive, i); }

static int tkvi_position_of(const tkv_evict_view *v, int i) { return v->position ? v->position[i] : i; }

/* >>scores: out[i] for all that are alive; high ones stay. recent: the last so many are what a policy observes. */
typedef void (*tkvi_evict_score)(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent,
                                 float *out);

/* StreamingLLM (arXiv 2309.17453, section 3.2): first tokens, kept as sinks, and the newest. FIFO: without sinks. */
static void tkvi_score_age(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)cfg;
    (void)recent;
    for (i = 0; i < v->n; i++) out[i] = (float)tkvi_position_of(v, i);
}

/* Scores that are there already. H2O (2306.14048, section 4): attention probabilities, summed over all queries since
 * the token came. TOVA (2401.06104): those of the newest query, mean over the heads of the layer. */
static void tkvi_score_copy(const tkv_evict_view *v, const float *from, float sign, float *out) {
    int i;
    for (i = 0; i < v->n; i++)
        if (tkvi_is_alive(v, i)) out[i] = sign * from[i];
}

static void tkvi_score_mass(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->mass, 1.0f, out);
}

static void tkvi_score_last(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->last, 1.0f, out);
}

/* Knorm (2406.11430): keys of a small L2 norm get much attention, so the longest go. */
static void tkvi_score_norm(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->norms, -1.0f, out);
}

static void tkvi_score_given(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->scores, 1.0f, out);
}

/* ScissorHands (2305.17118): tokens are counted, in a history window, each time they get less than an even share; when
 * the budget is full those with the highest counts go, many at once, but for the recent ones. */
static void tkvi_score_lows(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->lows, 1.0f, out);
    for (i = 0; i < v->n; i++)
        if (tkvi_is_alive(v, i) && out[i] > 0.0f) out[i] = -out[i];
}

/* SnapKV (2404.14469, section 4): attention that the last queries of the prompt, the observation window, give to what
 * is before it, averaged over neighbours (beyond the ends there are zeros, as the authors' code has it); the window
 * itself stays. PyramidKV (2406.02069, section 4) selects in the same way. */
static void tkvi_score_pooled(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    const int before = tkvi_max(0, v->n - recent), half = cfg->pool / 2;
    float most = 0.0f;
    int i, j;
    for (i = 0; i < before; i++) {
        const int end = tkvi_min(before, i + half + 1);
        double sum = 0.0;
        for (j = tkvi_max(0, i - half); j < end; j++)
            if (tkvi_is_alive(v, j)) sum += (double)v->observed[j];
        out[i] = (float)(sum / cfg->pool);
        most = out[i] > most ? out[i] : most;
    }
    for (; i < v->n; i++)
        out[i] = most; /* where the budget is smaller than the window, the oldest of it go last */
}

static double tkvi_key_dot(const float *a, const double *b, int dim) {
    double sum = 0.0;
    int c;
    for (c = 0; c < dim; c++) sum += (double)a[c] * b[c];
    return sum;
}

static double tkvi_key_norm(const float *k, int dim) {
    double sum = 0.0;
    int c;
    for (c = 0; c < dim; c++) sum += (double)k[c] * (double)k[c];
    return sqrt(sum);
}

static const float *tkvi_key_of(const float *keys, int i, int n_kv_heads, int h, int head_dim) {
    return keys + ((size_t)i * (size_t)n_kv_heads + (size_t)h) * (size_t)head_dim;
}

/* KeyDiff (2504.15364, section 3): the anchor is the mean of the directions of all keys; the score is the cosine
 * between key and anchor, negated, and here its mean over the KV heads. */
static void tkvi_score_differing(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent,
                                 float *out) {
    double anchor[TKV_MAX_HEAD_DIM];
    const int dim = v->head_dim;
    int h, i, c;
    (void)cfg;
    (void)recent;
    for (i = 0; i < v->n; i++) out[i] = 0.0f;
    for (h = 0; h < v->n_kv_heads; h++) {
        double size = 0.0;
        for (c = 0; c < dim; c++) anchor[c] = 0.0;
        for (i = 0; i < v->n; i++) {
            const float *k = tkvi_is_alive(v, i) ? tkvi_key_of(v->keys, i, v->n_kv_heads, h, dim) : NULL;
            const double norm = k ? tkvi_key_norm(k, dim) : 0.0;
            for (c = 0; k && norm > 0.0 && c < dim; c++) anchor[c] += (double)k[c] / norm;
        }
        for (c = 0; c < dim; c++) size += anchor[c] * anchor[c];
        size = sqrt(size);
        for (i = 0; i < v->n; i++) {
            const float *k = tkvi_is_alive(v, i) ? tkvi_key_of(v->keys, i, v->n_kv_heads, h, dim) : NULL;
            const double norm = k ? tkvi_key_norm(k, dim) * size : 0.0;
            if (!k) continue;
            if (!tkvi_is_finite((float)norm)) out[i] = (float)norm;
            if (norm > 0.0) out[i] -= (float)(tkvi_key_dot(k, anchor, dim) / norm / v->n_kv_heads);
        }
    }
}

/* A hash of seed and position (splitmix64): the same token has the same lot, whoever else is there. */
static void tkvi_score_lot(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)recent;
    for (i = 0; i < v->n; i++) {
        uint64_t z = cfg->seed + ((uint64_t)tkvi_position_of(v, i) + 1u) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        out[i] = (float)((z ^ (z >> 31)) >> 40) * 5.9604644775390625e-8f;
    }
}

static void tkvi_score_user(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)recent;
    for (i = 0; i < v->n; i++)
        if (tkvi_is_alive(v, i)) out[i] = cfg->scorer(cfg->user, v, i);
}

/* >>the table, in the order of tkv_evict_kind */
typedef struct tkvi_evict_row {
    const char *name;
    int needs;
    int sinks, recent; /* what it protects if cfg does not say */
    tkvi_evict_score score;
} tkvi_evict_row;

static const tkvi_evict_row tkvi_evict_rows[] = {
    {"none", 0, 4, 32, tkvi_score_age},
    {"sliding", 0, 4, 1, tkvi_score_age},
    {"h2o", TKV_EVICT_NEEDS_MASS, 4, 32, tkvi_score_mass},
    {"snapkv", TKV_EVICT_NEEDS_OBSERVED, 4, 32, tkvi_score_pooled},
    {"pyramidkv", TKV_EVICT_NEEDS_OBSERVED, 4, 8, tkvi_score_pooled},
    {"tova", TKV_EVICT_NEEDS_LAST, 4, 32, tkvi_score_last},
    {"knorm", TKV_EVICT_NEEDS_NORMS, 4, 32, tkvi_score_norm},
    {"keydiff", TKV_EVICT_NEEDS_KEYS, 4, 32, tkvi_score_differing},
    {"scissorhands", TKV_EVICT_NEEDS_LOWS, 4, 32, tkvi_score_lows},
    {"fifo", 0, 0, 0, tkvi_score_age},
    {"random", 0, 0, 0, tkvi_score_lot},
    {"scores", TKV_EVICT_NEEDS_SCORES, 4, 32, tkvi_score_given},
    {"user", 0, 4, 32, tkvi_score_user},
};

static const tkvi_evict_row *tkvi_evict_row_of(tkv_evict_kind kind) {
    return (int)kind >= 0 && (int)kind < TKV_EVICT_KINDS ? &tkvi_evict_rows[kind] : NULL;
}

TKV_API const char *tkv_evict_name(tkv_evict_kind kind) {
    const tkvi_evict_row *row = tkvi_evict_row_of(kind);
    return row ? row->name : NULL;
}

TKV_API tkv_status tkv_evict_from_name(const char *name, tkv_evict_kind *kind) {
    int i;
    for (i = 0; name && kind && i < TKV_EVICT_KINDS; i++)
        if (strcmp(name, tkvi_evict_rows[i].name) == 0) {
            *kind = (tkv_evict_kind)i;
            return TKV_OK;
        }
    return TKV_ERR_ARG;
}

TKV_API int tkv_evict_needs(tkv_evict_kind kind) {
    const tkvi_evict_row *row = tkvi_evict_row_of(kind);
    return row ? row->needs : 0;
}

/* A length of the config's: its own, none, or the default. -2: it is no length. */
static int tkvi_evict_length(int given, int otherwise) {
    if (given == TKV_NONE) return 0;
    return given == 0 ? otherwise : given < 0 ? -2 : given;
}

/* The config with its defaults, or NULL. */
static const tkvi_evict_row *tkvi_evict_fill(const tkv_evict_config *from, tkv_evict_config *cfg) {
    const tkvi_evict_row *row = from ? tkvi_evict_row_of(from->kind) : NULL;
    if (!row) return NULL;
    *cfg = *from;
    cfg->sink_tokens = tkvi_evict_length(cfg->sink_tokens, row->sinks);
    cfg->recent_tokens = tkvi_evict_length(cfg->recent_tokens, row->recent);
    cfg->pool = cfg->pool == 0 ? 5 : cfg->pool;
    cfg->trigger = tkvi_or(cfg->trigger, 1.0f);
    if (cfg->sink_tokens < 0 || cfg->recent_tokens < 0 || cfg->batch < 0) return NULL;
    if (cfg->pool < 1 || cfg->pool > 63 || cfg->pool % 2 == 0) return NULL;
    if (!tkvi_within(cfg->trigger, 1e-6f, 1.0f)) return NULL;
    return cfg->kind == TKV_EVICT_USER && !cfg->scorer ? NULL : row;
}

static int tkvi_view_is_sound(const tkv_evict_view *v) {
    int i, last = -1;
    if (!v || v->n < 0 || v->n >= 1 << 30) return 0;
    for (i = 0; v->position && i < v->n; i++) {
        if (!tkvi_is_alive(v, i)) continue;
        if (v->position[i] <= last) return 0;
        last = v->position[i];
    }
    return 1;
}

/* Dimensions that a product of sizes can have. */
static int tkvi_keys_are_sound(const float *keys, int n, int n_kv_heads, int head_dim) {
    size_t size;
    if (n < 0 || n_kv_heads < 1 || head_dim < 1 || head_dim > TKV_MAX_HEAD_DIM) return 0;
    if (!tkvi_mul((size_t)n * sizeof(float), (size_t)n_kv_heads, &size) ||
        !tkvi_mul(size, (size_t)head_dim, &size))
        return 0;
    return keys || n == 0;
}

static int tkvi_view_has(const tkv_evict_view *v, int needs) {
    const void *what[6];
    int i;
    what[0] = v->mass;
    what[1] = v->observed;
    what[2] = v->last;
    what[3] = v->norms;
    what[4] = v->keys;
    what[5] = v->lows;
    for (i = 0; i < 6; i++)
        if ((needs >> i & 1) && !what[i]) return 0;
    if ((needs & TKV_EVICT_NEEDS_SCORES) && !v->scores) return 0;
    return !(needs & TKV_EVICT_NEEDS_KEYS) || tkvi_keys_are_sound(v->keys, v->n, v->n_kv_heads, v->head_dim);
}

TKV_API tkv_status tkv_evict_score(const tkv_evict_config *cfg, const tkv_evict_view *view, float *score) {
    tkv_evict_config full;
    const tkvi_evict_row *row = tkvi_evict_fill(cfg, &full);
    int i;
    if (!row) return TKV_ERR_CONFIG;
    if (!tkvi_view_is_sound(view) || (view->n > 0 && (!score || !tkvi_view_has(view, row->needs))))
        return TKV_ERR_ARG;
    row->score(&full, view, full.recent_tokens, score);
    for (i = 0; i < view->n; i++) {
        if (!tkvi_is_alive(view, i)) score[i] = 0.0f;
        if (!tkvi_is_finite(score[i])) return TKV_ERR_NONFINITE;
    }
    return TKV_OK;
}

/* >>selection */
/* Sinks and recent tokens within the budget: the newest first of all, then the sinks, then the other recent ones. */
static void tkvi_evict_protect(const tkv_evict_config *cfg, int asked, int sinks, int keep,
                               tkv_evict_result *r) {
    int recent = cfg->recent_tokens;
    r->sinks = tkvi_max(0, tkvi_min(sinks, keep - (recent > 0)));
    if (asked == 0) recent = tkvi_min(recent, tkvi_max(1, (keep - r->sinks) / 2));
    r->recent = tkvi_max(0, tkvi_min(recent, keep - r->sinks));
}

TKV_API tkv_status tkv_evict_select(const tkv_evict_config *cfg, const tkv_evict_view *view,
                                    const float *score, int keep, uint64_t *victims, tkv_evict_result *out) {
    tkv_evict_config full;
    tkv_evict_result r;
    tkvi_ranks ranks;
    uint64_t limit = 0, word = 0;
    int i, n, alive = 0, sinks = 0, may_go = 0, go, equal = 0, older;
    if (!tkvi_evict_fill(cfg, &full)) return TKV_ERR_CONFIG;
    if (keep < 0 || !tkvi_view_is_sound(view) || (view->n > 0 && (!score || !victims))) return TKV_ERR_ARG;
    n = view->n;
    for (i = 0; i < n; i++)
        if (tkvi_is_alive(view, i)) {
            if (!tkvi_is_finite(score[i])) return TKV_ERR_NONFINITE;
            alive++;
            sinks += tkvi_position_of(view, i) < full.sink_tokens;
        }
    if (full.kind == TKV_EVICT_NONE && alive > keep) return TKV_ERR_BUDGET;
    memset(&r, 0, sizeof r);
    tkvi_evict_protect(&full, cfg->recent_tokens, sinks, keep, &r);
    for (i = 0; i < tkvi_words(n); i++) victims[i] = 0; /* at first: what may not go */
    for (i = 0, older = 0; i < n; i++) {
        const int there = tkvi_is_alive(view, i), pinned = view->pinned && tkvi_has(view->pinned, i);
        if (!there || pinned || older < r.sinks || older >= alive - r.recent) tkvi_mark(victims, i);
        else may_go++;
        older += there;
    }
    go = tkvi_max(0, tkvi_min(alive - keep, may_go));
    memset(&ranks, 0, sizeof ranks);
    ranks.n = n;
    ranks.score = score;
    ranks.priority = view->priority;
    ranks.without = victims;
    if (go > 0) limit = tkvi_select(&ranks, go, &equal);
    for (i = 0; i < n; i++) { /* a word is written when all of it has been read */
        if (go > 0 && tkvi_takes_part(&ranks, i)) {
            const uint64_t rank = tkvi_rank(&ranks, i);
            if (rank < limit || (rank == limit && equal-- > 0)) word |= (uint64_t)1 << (i & 63);
        }
        if ((i & 63) == 63 || i == n - 1) {
            victims[i >> 6] = word;
            word = 0;
        }
    }
    r.evicted = go;
    r.kept = alive - go;
    r.over = tkvi_max(0, r.kept - keep);
    if (out) *out = r;
    return TKV_OK;
}

TKV_API int tkv_evict_due(const tkv_evict_config *cfg, int n, int incoming, int budget) {
    tkv_evict_config full;
    int64_t limit, due;
    int batch;
    if (!tkvi_evict_fill(cfg, &full) || n < 0 || incoming < 0 || budget < 0) return 0;
    limit = (int64_t)((double)full.trigger * budget + .5);
    due = (int64_t)n + incoming - limit;
    if (due <= 0) return 0;
    batch = full.batch ? full.batch : tkvi_max(1, tkvi_min(64, budget / 8));
    due = due > batch ? due : batch;
    return due < n ? (int)due : n;
}

/* >>what to do with the bits */
TKV_API int tkv_evict_list(const uint64_t *mask, int n, int *out) {
    int i, found = 0;
    if (n > 0 && (!mask || !out)) return 0;
    for (i = 0; i < n; i++)
        if (tkvi_has(mask, i)) out[found++] = i;
    return found;
}

TKV_API int tkv_evict_compact(const uint64_t *victims, int n, void *array, size_t size) {
    char *at = (char *)array;
    int i, kept = 0;
    if (n > 0 && (!victims || !array)) return 0;
    for (i = 0; i < n; i++) {
        if (tkvi_has(victims, i)) continue;
        if (kept < i) memcpy(at + (size_t)kept * size, at + (size_t)i * size, size);
        kept++;
    }
    return kept;
}

TKV_API tkv_status tkv_evict_key_norms(const float *keys, int n, int n_kv_heads, int head_dim, float *out) {
    int i, h;
    if (!tkvi_keys_are_sound(keys, n, n_kv_heads, head_dim) || (n > 0 && !out)) return TKV_ERR_ARG;
    for (i = 0; i < n; i++) {
        double sum = 0.0;
        for (h = 0; h < n_kv_heads; h++)
            sum += tkvi_key_norm(tkvi_key_of(keys, i, n_kv_heads, h, head_dim), head_dim);
        out[i] = (float)(sum / n_kv_heads);
    }
    return TKV_OK;
}

/* >>budgets. Every shape is a straight line: layer l gets base + (first - l * fall) / whole tokens, in whole
 * numbers. */
typedef struct tkvi_line {
    int64_t base, first, fall, whole;
} tkvi_line;

static int64_t tkvi_line_at(const tkvi_line *line, int l) { return line->first - l * line->fall; }

static tkvi_line tkvi_line_uniform(const tkv_evict_budget *b) {
    tkvi_line line;
    line.base = line.fall = 0;
    line.first = b->total;
    line.whole = b->n_layers;
    return line;
}

static tkvi_line tkvi_line_linear(const tkv_evict_budget *b) {
    tkvi_line line;
    line.base = 0;
    line.first = b->total * b->n_layers;
    line.fall = b->total;
    line.whole = (int64_t)b->n_layers * (b->n_layers + 1) / 2;
    return line;
}

/* PyramidKV (arXiv 2406.02069, section 4), as its authors' code has it but with fractions. With a = (C - w) * L tokens
 * to share and d = max - min in units of 1 / unit:  b_l = w + (max * (L - 1) - l * d) / (unit * (L - 1)). The authors
 * fall back to SnapKV's even budgets where n < 2 (C - w), kvpress unless n >= max >= min >= w. */
static tkvi_line tkvi_line_pyramid(const tkv_evict_budget *b) {
    const int64_t layers = b->n_layers, spare = b->total - layers * b->window;
    const int64_t rest = (int64_t)b->n_tokens - b->window;
    tkvi_line line;
    int64_t unit = layers * b->beta, least = spare, most = spare * (2 * (int64_t)b->beta - 1);
    if (layers < 2 || spare < 0 || rest < 0) return tkvi_line_uniform(b);
    if (most > rest * unit) {
        unit = layers;
        most = rest * unit;
        least = 2 * spare - most;
    }
    if (most < least || least < b->window * unit) return tkvi_line_uniform(b);
    line.base = b->window;
    line.first = most * (layers - 1);
    line.fall = most - least;
    line.whole = unit * (layers - 1);
    return line;
}

typedef tkvi_line (*tkvi_evict_line)(const tkv_evict_budget *b);
static const tkvi_evict_line tkvi_evict_lines[] = {tkvi_line_uniform, tkvi_line_pyramid, tkvi_line_linear};

/* Layers whose remainder is at least r. */
static int tkvi_line_count(const tkvi_line *line, int n_layers, int64_t r) {
    int l, count = 0;
    for (l = 0; l < n_layers; l++) count += tkvi_line_at(line, l) % line->whole >= r;
    return count;
}

TKV_API tkv_status tkv_evict_budgets(const tkv_evict_budget *b, int *out) {
    tkv_evict_budget full;
    tkvi_line line;
    int64_t left, low = 0, high;
    int l, last, more;
    if (!b || !out || (int)b->shape < 0 || b->shape > TKV_EVICT_LINEAR) return TKV_ERR_ARG;
    full = *b;
    full.window = tkvi_evict_length(b->window, 8);
    full.beta = b->beta ? b->beta : 20;
    if (full.n_layers < 1 || full.n_layers > 4096 || full.window < 0 || full.beta < 1 || full.beta > 100)
        return TKV_ERR_ARG;
    if (full.n_tokens < 0 || full.n_tokens >= 1 << 30 || full.window >= 1 << 30 || full.total < 0)
        return TKV_ERR_ARG;
    if (full.total > full.n_layers * (int64_t)((1 << 30) - 1)) return TKV_ERR_ARG;
    if (full.shape == TKV_EVICT_LINEAR && full.total < full.n_layers) return TKV_ERR_ARG;
    line = tkvi_evict_lines[full.shape](&full);
    left = full.total;
    for (l = 0; l < full.n_layers; l++) {
        const int64_t whole = line.base + tkvi_line_at(&line, l) / line.whole;
        if (whole >= 1 << 30) return TKV_ERR_ARG; /* of the linear shape's first layers */
        left -= whole;
    }
    for (l = 0; l < full.n_layers; l++) out[l] = (int)(line.base + tkvi_line_at(&line, l) / line.whole);
    high = line.whole; /* the least remainder that at most `left` layers reach: by bisection */
    while (low < high) {
        const int64_t mid = low + (high - low) / 2;
        if (tkvi_line_count(&line, full.n_layers, mid) <= left) high = mid;
        else low = mid + 1;
    }
    more = (int)left - tkvi_line_count(&line, full.n_layers, low); /* of those just below, the first */
    for (l = 0; l < full.n_layers; l++) {
        const int64_t r = tkvi_line_at(&line, l) % line.whole;
        if (r >= low || (r == low - 1 && more-- > 0)) out[l]++;
    }
    for (l = full.n_layers - 1, last = 0; full.shape == TKV_EVICT_LINEAR && l > 0 && out[l] == 0; l--) {
        while (last + 1 < l && out[last + 1] == out[0]) last++; /* the last of the largest gives one */
        while (last > 0 && out[last] < out[0]) last--;
        out[last]--;
        out[l]++;
    }
    return TKV_OK;
}

#endif /* TKVI_EVICT_H */
/* ======== remat.h ======== */
/*
 * remat.h - what may be dropped because the caller's model can compute it again: the price in FLOPs, the decision to
 * keep, drop or code each block, and how much comes back in a step. No memory of its own, no cache, no model. May
 * call evict.
 *
 *     tokens    sinks | 0 ... 63 | 64 .. 127 | 128 . 191 | ........ | newest
 *     price            cheapest, least likely asked for  ->  dearest
 *     drop      never   1st        2nd         3rd ...     at least min_materialized tokens stay
 *
 * A block is computed from its prefix, in all layers up to the one that is wanted; so what is dropped is a run of
 * whole blocks behind the sinks, and comes back in that order. (RuvLLM's ADR-004 has the idea; its price grew with the
 * layer alone, its age was the position, and it asked for single tokens.)
 */
#ifndef TKVI_REMAT_H
#define TKVI_REMAT_H


static const char *tkvi_remat_fill(const tkv_remat_config *from, tkv_remat_config *cfg) {
    *cfg = *from;
    if (cfg->n_layers < 1 || cfg->n_layers > 4096) return "n_layers must be from 1 to 4096";
    if (cfg->n_heads < 1 || cfg->n_heads > 65536) return "n_heads must be from 1 to 65536";
    if (cfg->head_dim < 1 || cfg->head_dim > TKV_MAX_HEAD_DIM) return "head_dim must be from 1 to 256";
    if (!tkvi_within((float)cfg->layer_params, 1.0f, 1e15f))
        return "layer_params must be the weights of a layer, 1 to 1e15";
    cfg->threshold = tkvi_or(cfg->threshold, .9f);
    if (!tkvi_within(cfg->threshold, 1e-6f, 1.0f)) return "threshold must be above 0 and at most 1";
    cfg->min_materialized = tkvi_evict_length(cfg->min_materialized, 512);
    cfg->sink_tokens = tkvi_evict_length(cfg->sink_tokens, 4);
    if (cfg->min_materialized < 0 || cfg->sink_tokens < 0)
        return "min_materialized and sink_tokens must be lengths, TKV_NONE or 0 for 512 and 4";
    cfg->age_tokens = tkvi_or(cfg->age_tokens, 4096.0f);
    if (!tkvi_within(cfg->age_tokens, 1.0f, 1e9f)) return "age_tokens must be from 1 to 1e9";
    if (!tkvi_within((float)cfg->quantize_price, 0.0f, 1e30f))
        return "quantize_price must be 0 to 1e30 FLOPs a byte";
    if (tkvi_bits((float)cfg->quantize_price) == 0) cfg->quantize_price = 8.0;
    if (!tkvi_within((float)cfg->step_flops, 0.0f, 1e30f)) return "step_flops must be 0 to 1e30";
    return NULL;
}

TKV_API tkv_status tkv_remat_init(tkv_remat *r, const tkv_remat_config *cfg, const char **reason) {
    tkv_remat_config full;
    const char *wrong;
    if (reason) *reason = "";
    if (!r || !cfg) return TKV_ERR_ARG;
    wrong = tkvi_remat_fill(cfg, &full);
    if (wrong) {
        if (reason) *reason = wrong;
        return TKV_ERR_CONFIG;
    }
    memset(r, 0, sizeof *r);
    r->cfg = full;
    return TKV_OK;
}

/* >>the price. A token at position p multiplies with all weights and looks at about p keys: 2 FLOPs a product, of q
 * and k and again of p and v. */
TKV_API double tkv_remat_flops(const tkv_remat *r, int start, int end, int layers) {
    double attention;
    if (!r || start < 0 || end < start || layers < 0 || layers > r->cfg.n_layers) return -1.0;
    attention = 4.0 * r->cfg.n_heads * r->cfg.head_dim * (((double)start + end) / 2.0);
    return ((double)end - start) * (layers ? layers : r->cfg.n_layers) *
           (2.0 * r->cfg.layer_params + attention);
}

/* The same, times the chance that it is asked for: less for old blocks; below 0, and so below any price, where nothing
 * looks at it. */
static double tkvi_remat_expected(const tkv_remat *r, const tkv_remat_block *b, int now) {
    const double age = (double)now - (b->end - 1), use = (double)tkvi_or(b->use, 1.0f);
    return tkv_remat_flops(r, b->start, b->end, b->layers) * use / (1.0 + age / (double)r->cfg.age_tokens);
}

static int tkvi_remat_is_sound(const tkv_remat *r, const tkv_remat_block *blocks, int n) {
    int i;
    if (!r || n < 0 || (n > 0 && !blocks)) return 0;
    for (i = 0; i < n; i++) {
        const tkv_remat_block *b = blocks + i;
        if (b->start < 0 || b->end <= b->start || (i > 0 && b->start != blocks[i - 1].end)) return 0;
        if (b->layers < 0 || b->layers > r->cfg.n_layers || !tkvi_within(b->use, -FLT_MAX, 1.0f)) return 0;
    }
    return 1;
}

/* >>the decision */
static size_t tkvi_remat_saved(const tkv_remat_block *b) {
    return !b->dropped && b->quantized_bytes < b->bytes ? b->bytes - b->quantized_bytes : 0;
}

static int tkvi_remat_fits_step(const tkv_remat *r, const tkv_remat_block *b) {
    return r->cfg.step_flops <= 0.0 || tkv_remat_flops(r, b->start, b->end, b->layers) <= r->cfg.step_flops;
}

typedef struct tkvi_remat_run {
    size_t freed;
    int64_t held; /* tokens not dropped */
    int at;       /* the block that would go next */
    int refused;  /* 1: for what one step may cost */
} tkvi_remat_run;

/* Drops blocks from run->at on until enough is free; cheap: only those that cost less a byte than coding does. */
static void tkvi_remat_drop(const tkv_remat *r, const tkv_remat_block *blocks, int n, int now, size_t need,
                            int cheap, tkv_remat_action *action, tkvi_remat_run *run) {
    for (; run->at < n && run->freed < need; run->at++) {
        const tkv_remat_block *b = blocks + run->at;
        if (b->dropped || b->start < r->cfg.sink_tokens) continue;
        if (run->held - (b->end - b->start) < r->cfg.min_materialized) return;
        if (cheap && tkvi_remat_expected(r, b, now) >= r->cfg.quantize_price * (double)b->bytes) return;
        if (!tkvi_remat_fits_step(r, b)) {
            run->refused = 1;
            return;
        }
        run->freed += b->bytes - (action[run->at] == TKV_REMAT_QUANTIZE ? tkvi_remat_saved(b) : 0);
        run->held -= b->end - b->start;
        action[run->at] = TKV_REMAT_EVICT;
    }
}

TKV_API tkv_status tkv_remat_decide(tkv_remat *r, const tkv_remat_block *blocks, int n, int now,
                                    float pressure, size_t need, tkv_remat_action *action, size_t *freed) {
    tkvi_remat_run run;
    size_t total = 0;
    int i;
    if (!tkvi_remat_is_sound(r, blocks, n) || !tkvi_is_finite(pressure) || (n > 0 && !action))
        return TKV_ERR_ARG;
    if (now < 0 || (n > 0 && now < blocks[n - 1].end - 1)) return TKV_ERR_ARG;
    memset(&run, 0, sizeof run);
    for (i = 0; i < n; i++) {
        if (!tkvi_add(total, blocks[i].bytes, &total)) return TKV_ERR_ARG;
        run.held += blocks[i].dropped ? 0 : blocks[i].end - blocks[i].start;
    }
    for (i = 0; i < n; i++) action[i] = TKV_REMAT_KEEP;
    if (pressure >= r->cfg.threshold) {
        tkvi_remat_drop(r, blocks, n, now, need, 1, action, &run);
        for (i = run.at; i < n && run.freed < need; i++) { /* at is behind the sinks: they stay as they are */
            const size_t saved = tkvi_remat_saved(blocks + i);
            if (saved > 0) action[i] = TKV_REMAT_QUANTIZE;
            run.freed += saved;
        }
        tkvi_remat_drop(r, blocks, n, now, need, 0, action, &run);
        for (i = n; i-- > 0;) { /* what dropping made superfluous, newest first */
            const size_t saved = tkvi_remat_saved(blocks + i);
            if (action[i] != TKV_REMAT_QUANTIZE || run.freed < need || run.freed - need < saved) continue;
            action[i] = TKV_REMAT_KEEP;
            run.freed -= saved;
        }
    }
    for (i = 0; i < n; i++) {
        if (blocks[i].dropped) continue;
        r->info.kept += action[i] == TKV_REMAT_KEEP;
        r->info.evicted += action[i] == TKV_REMAT_EVICT;
        r->info.quantized += action[i] == TKV_REMAT_QUANTIZE;
    }
    r->info.over_budget += (uint64_t)run.refused;
    r->info.freed += run.freed;
    if (freed) *freed = run.freed;
    return TKV_OK;
}

/* >>coming back */
TKV_API tkv_status tkv_remat_restore(tkv_remat *r, const tkv_remat_block *blocks, int n, int step, int *first,
                                     int *count) {
    int i, found = 0, at = 0;
    if (!tkvi_remat_is_sound(r, blocks, n) || step < r->step || !first || !count) return TKV_ERR_ARG;
    if (step > r->step) r->spent = 0.0;
    r->step = step;
    while (at < n && !blocks[at].dropped) at++;
    for (i = at; i < n && blocks[i].dropped; i++, found++) {
        const double flops = tkv_remat_flops(r, blocks[i].start, blocks[i].end, blocks[i].layers);
        if (r->cfg.step_flops > 0.0 && r->spent + flops > r->cfg.step_flops) break;
        r->spent += flops;
        r->info.flops += flops;
    }
    r->info.restored += (uint64_t)found;
    for (; i < n; i++) r->info.waited += blocks[i].dropped != 0;
    *first = at;
    *count = found;
    return TKV_OK;
}

#endif /* TKVI_REMAT_H */
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
    int keep_all;    /* in place: pages are never given back */
    int spare;       /* free pages that only recoding may use */
    int64_t allowed; /* pages that an operation may come to in place, with the spare ones; 0: all there are */
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
/* Entries of a table that must hold `want`: a quarter more each time, so that it is never far from full. */
static uint32_t tkvi_cap_for(int64_t want) {
    uint32_t cap = 16;
    while ((int64_t)cap < want) cap += cap / 4;
    return cap;
}

static int tkvi_grow_array(tkvi_heap *heap, void **array, uint32_t *cap, uint32_t want, size_t item) {
    size_t bytes;
    uint32_t new_cap = tkvi_cap_for(want);
    void *bigger;
    if (want <= *cap) return 1;
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
    int64_t keep = pool->spare;
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

/* Gets everything that the peak needs, and keeps the spare pages. On failure nothing that a caller can see has
 * changed. */
static int tkvi_peak_ready(tkvi_pool *pool, const tkvi_peak *k) {
    if (k->most_blocks > (int64_t)0x7fffffff) return 0;
    if (pool->allowed && k->most_pages + pool->spare > pool->allowed) return 0;
    if (!tkvi_grow_blocks(pool, (uint32_t)k->most_blocks)) return 0;
    while ((int64_t)pool->n_pages < k->most_pages + pool->spare)
        if (!tkvi_add_page(pool)) {
            tkvi_trim(pool);
            return 0;
        }
    return 1;
}

#endif /* TKVI_POOL_H */
/* ======== meter.h ======== */
/*
 * meter.h - the quality meter: exact copies of blocks of some heads, and what a comparison with them came to.
 *
 * A gauge watches one KV head of one layer. When a block of it leaves the hot tier, its record is copied as
 * it stood; attend.h now and then computes the same attention once more with the copies in place of the
 * blocks that were coded from them. Only coded blocks are copied: the others are exact in the cache. They are
 * never cut, so cuts and aborts mean nothing here. All memory is there from the start: nothing can fail later.
 *
 * When the copies are full, every other one goes, and from then on every second block is copied, every
 * fourth, ...: those that are left lie evenly over the sequence. May call plan and below.
 */
#ifndef TKVI_METER_H
#define TKVI_METER_H


#define TKVI_METER_ONE 4294967296.0 /* sums are in whole numbers: threads may add in any order */
#define TKVI_METER_MOST 16.0f       /* no single comparison counts for more */

typedef struct tkvi_tally {
    uint64_t samples, agreed;
    uint64_t keys, kept;        /* coded keys that samples saw; of them, those with a copy */
    uint64_t error, divergence; /* sums, TKVI_METER_ONE being 1 */
    uint64_t worst;             /* largest divergence */
} tkvi_tally;

typedef struct tkvi_gauge {
    int layer, head;
    int phase;      /* positions p with (p + phase) % every == 0 are measured */
    int n, stride;  /* copies; of every stride-th block */
    int *start;     /* [slots] first position of each copied block, rising */
    int *slot;      /* [slots] where its bytes are; behind the first n: the free ones */
    uint8_t *bytes; /* [slots][record_bytes] */
    tkvi_tally sum;
} tkvi_gauge;

typedef struct tkvi_meter {
    int lock; /* of the sums */
    int seq;  /* whose blocks are copied; -1: of the next one that begins */
    int n, slots, every;
    size_t record_bytes;
    tkvi_gauge *gauge; /* [n] */
} tkvi_meter;

/* >>how many, how large */
static int tkvi_meter_heads(const tkvi_shape *h) {
    return tkvi_min(h->cfg.quality_heads, h->n_stored * h->cfg.n_kv_heads);
}

static int tkvi_meter_slots(const tkvi_shape *h) {
    return (tkvi_min(h->cfg.quality_tokens, h->cfg.max_tokens) + TKVI_BLOCK - 1) / TKVI_BLOCK;
}

/* Bytes of the meter but for the copies, and those of the copies. 0 on overflow. */
static int tkvi_meter_sizes(const tkvi_shape *h, size_t *tables, size_t *copies) {
    size_t n = (size_t)tkvi_meter_heads(h), slots = (size_t)tkvi_meter_slots(h);
    *tables = *copies = 0;
    if (!n) return 1;
    *tables = tkvi_align_up(sizeof(tkvi_meter)) + tkvi_align_up(n * sizeof(tkvi_gauge)) +
              tkvi_align_up(2 * n * slots * sizeof(int));
    return tkvi_mul(n * slots, h->hot_record, copies);
}

/* A comparison takes the time of up to four units of attention (one KV head of one layer, one query). It
 * stands in one task: rare enough for 16 threads, which finish the others in a sixteenth of the time. */
static int tkvi_meter_every(const tkvi_shape *h) {
    int64_t units = (int64_t)h->n_stored * h->cfg.n_kv_heads;
    int every = 32;
    if (h->cfg.quality_every) return h->cfg.quality_every;
    while ((int64_t)every * units < 800 * (int64_t)tkvi_meter_heads(h)) every *= 2;
    return every;
}

/* Layers with blocks of their own get gauges evenly, from the middle of equal parts; heads take turns. */
static void tkvi_meter_place(tkvi_meter *m, const tkvi_tables *t, int n_stored) {
    int i, layer;
    for (i = 0; i < m->n; i++) {
        int at = i % n_stored, which = m->n < n_stored ? (2 * i + 1) * n_stored / (2 * m->n) : at;
        for (layer = 0; t->plan[layer].stored != layer || which-- > 0;) layer++;
        m->gauge[i].layer = layer;
        m->gauge[i].head = (at + i / n_stored) % t->cfg.n_kv_heads;
        m->gauge[i].phase = (int)((int64_t)i * m->every / m->n);
    }
}

/* Forgets the copies. The meter watches the next sequence that begins. */
static void tkvi_meter_clear(tkvi_meter *m) {
    int i, k;
    m->seq = -1;
    for (i = 0; i < m->n; i++) {
        m->gauge[i].n = 0;
        m->gauge[i].stride = 1;
        for (k = 0; k < m->slots; k++) m->gauge[i].slot[k] = k;
    }
}

/* In cleared memory; the copies need not be. NULL if the config asks for none. */
static tkvi_meter *tkvi_meter_build(const tkvi_shape *h, const tkvi_tables *t, uint8_t *tables,
                                    uint8_t *copies) {
    tkvi_meter *m = (tkvi_meter *)(void *)tables;
    int i, n = tkvi_meter_heads(h), *numbers;
    if (!n) return NULL;
    m->n = n;
    m->slots = tkvi_meter_slots(h);
    m->every = tkvi_meter_every(h);
    m->record_bytes = h->hot_record;
    tables += tkvi_align_up(sizeof *m);
    m->gauge = (tkvi_gauge *)(void *)tables;
    numbers = (int *)(void *)(tables + tkvi_align_up((size_t)n * sizeof(tkvi_gauge)));
    for (i = 0; i < n; i++) {
        m->gauge[i].start = numbers + (size_t)(2 * i) * (size_t)m->slots;
        m->gauge[i].slot = m->gauge[i].start + m->slots;
        m->gauge[i].bytes = copies + (size_t)i * (size_t)m->slots * m->record_bytes;
    }
    tkvi_meter_place(m, t, h->n_stored);
    tkvi_meter_clear(m);
    return m;
}

/* The gauge of a head, or NULL. */
static tkvi_gauge *tkvi_gauge_of(const tkvi_meter *m, int layer, int head) {
    int i;
    for (i = 0; m && i < m->n; i++)
        if (m->gauge[i].layer == layer && m->gauge[i].head == head) return &m->gauge[i];
    return NULL;
}

/* >>copies */
static void tkvi_gauge_drop(tkvi_gauge *g, int i) {
    int slot = g->slot[i];
    g->n--;
    memmove(g->start + i, g->start + i + 1, (size_t)(g->n - i) * sizeof *g->start);
    memmove(g->slot + i, g->slot + i + 1, (size_t)(g->n - i) * sizeof *g->slot);
    g->slot[g->n] = slot;
}

/* The block that begins at `start` is about to be coded. Tokens before `dropped` are gone. */
static void tkvi_gauge_keep(const tkvi_meter *m, tkvi_gauge *g, int start, int dropped, const uint8_t *record,
                            size_t bytes) {
    int number = start / TKVI_BLOCK, i; /* rises from block to block, but for some that were flushed short */
    while (g->n && g->start[0] < dropped) tkvi_gauge_drop(g, 0);
    if (g->n && g->start[g->n - 1] / TKVI_BLOCK >= number) return;
    if (number % g->stride) return;
    while (g->n == m->slots && g->stride < TKVI_FOREVER / 2) {
        g->stride *= 2;
        for (i = g->n - 1; i >= 0; i--)
            if (g->start[i] / TKVI_BLOCK % g->stride) tkvi_gauge_drop(g, i);
    }
    if (number % g->stride || g->n == m->slots) return;
    memcpy(g->bytes + (size_t)g->slot[g->n] * m->record_bytes, record, bytes);
    g->start[g->n++] = start;
}

/* The copy of the block that begins at `start`, or NULL. *from walks along as starts rise. */
static const uint8_t *tkvi_gauge_copy(const tkvi_meter *m, const tkvi_gauge *g, int start, int *from) {
    while (*from < g->n && g->start[*from] < start) ++*from;
    return *from < g->n && g->start[*from] == start ? g->bytes + (size_t)g->slot[*from] * m->record_bytes
                                                    : NULL;
}

/* >>sums */
static uint64_t tkvi_meter_fixed(double x) {
    float f = (float)x;
    if (!tkvi_is_finite(f) || f > TKVI_METER_MOST) f = TKVI_METER_MOST;
    return f > 0.0f ? (uint64_t)((double)f * TKVI_METER_ONE) : 0;
}

static void tkvi_tally_add(tkvi_tally *sum, const tkvi_tally *more) {
    sum->samples += more->samples;
    sum->agreed += more->agreed;
    sum->keys += more->keys;
    sum->kept += more->kept;
    sum->error += more->error;
    sum->divergence += more->divergence;
    if (more->worst > sum->worst) sum->worst = more->worst;
}

#endif /* TKVI_METER_H */
/* ======== cache.h ======== */
/*
 * cache.h - the cache itself: what it consists of, how it is made from an allocator or inside the caller's
 * memory, how it ends. May call pool, meter and below.
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
    int chunk;                /* len before the last append: what came then stays exact until the next */
    int tight,
        tightest; /* blocks behind the sinks that are as tight as the level wants warm, archive (budget.h) */
    int step_len; /* len when the open step began */
} tkvi_list;

typedef struct tkvi_seq {
    uint32_t *block; /* [n_layers][cap] block numbers */
    uint32_t cap;
    int in_step;
    int reserved_len; /* 0, or the length up to which memory is promised */
} tkvi_seq;

/* Parallel attention keeps partial results here; the first caller gets it, others run serially (same bits). */
#define TKVI_MAX_CHUNKS 16                                           /* of a key range, per KV head */
#define TKVI_MIN_CHUNK 8                                             /* blocks */
#define TKVI_FEW_UNITS 32                                            /* more are enough tasks by themselves */
#define TKVI_MAX_PARTS 128                                           /* chunks in flight */
#define TKVI_SUMS_FLOATS(v_pad) (TKVI_ROWS * (2 * (v_pad) + 3) + 16) /* of a chunk: attend.h */

/* Tables of formats that learn: the first one when a layer has seen so many tokens, a better one when it has seen many;
 * keys this far back count as far. */
#define TKVI_LEARN 512
#define TKVI_LEARN_WELL 2048
#define TKVI_FAR 128
#define TKVI_IN_PLACE_VERSIONS 2 /* of tables: those of one life without tkv_calibration_refresh */

/* How far a layer whose encoder wants to know the queries has listened (metric.h). */
typedef struct tkvi_ears {
    int tokens; /* appended since it listens; -1: it does not */
    int used;   /* that many when the factors were made last; 0: never */
} tkvi_ears;

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
    /* what attention learns (learn.h); NULL where no format asks for it */
    int *seen;      /* [n_layers] tokens appended since it listens; -1: it does not */
    int64_t *asked; /* [n_layers][n_kv_heads][head_dim] sums of squared queries */
    int64_t *far;   /* [n_layers][n_kv_heads] sums of p^2 over far keys */
    int learning;   /* somebody is adding */
    /* the same for SQUAT formats (metric.h) */
    tkvi_ears *ears; /* [n_layers] */
    int64_t *metric; /* [n_layers][n_kv_heads][packed] sums of q q^T */
    uint16_t
        *feedback;     /* [n_layers][n_kv_heads][tkvi_feedback_count] factors, fp16; 0 until they are known */
    float *solve;      /* [packed] work space */
    tkvi_meter *meter; /* NULL: none (meter.h) */
    /* the budget (budget.h) */
    tkv_policy policy;
    float outside;   /* pressure that the caller feeds */
    size_t relax_at; /* bytes in use from which on it may be worth while to look for a looser level */
    uint64_t demoted, recoded[TKV_MAX_LEVELS], refused;
    int64_t *need; /* [2][n_classes] work space: slots that a call asks for, slots after it */
    size_t fixed_bytes, table_bytes, scratch_bytes, shadow_bytes; /* of the fixed piece */
    char error[160];
};

static tkvi_list *tkvi_list_of(const tkv_cache *kv, int seq, int layer) {
    return kv->list + (size_t)seq * (size_t)kv->tables.cfg.n_layers + (size_t)layer;
}

static int64_t *tkvi_asked_of(const tkv_cache *kv, int layer, int head) {
    const tkv_config *cfg = &kv->tables.cfg;
    return kv->asked + ((size_t)layer * (size_t)cfg->n_kv_heads + (size_t)head) * (size_t)cfg->head_dim;
}

static int64_t *tkvi_far_of(const tkv_cache *kv, int layer, int head) {
    return kv->far + (size_t)layer * (size_t)kv->tables.cfg.n_kv_heads + (size_t)head;
}

static int64_t *tkvi_metric_of(const tkv_cache *kv, int layer, int head) {
    const tkv_config *cfg = &kv->tables.cfg;
    size_t dim = (size_t)cfg->head_dim;
    return kv->metric + ((size_t)layer * (size_t)cfg->n_kv_heads + (size_t)head) * (dim * (dim + 1) / 2);
}

/* NULL where nobody wants it. */
static uint16_t *tkvi_feedback_of(const tkv_cache *kv, int layer, int head) {
    const tkv_config *cfg = &kv->tables.cfg;
    size_t at = (size_t)layer * (size_t)cfg->n_kv_heads + (size_t)head;
    if (!kv->feedback) return NULL;
    return kv->feedback + at * tkvi_feedback_count(cfg->head_dim, cfg->squat_block);
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
static int tkvi_drop_margin(const tkvi_plan *p) {
    return p->now.hot == TKVI_FOREVER ? TKVI_BLOCK : p->now.hot;
}

static tkv_tier tkvi_tier_at(const tkvi_list *list, int i) {
    if (i < list->sinks) return TKV_HOT;
    if (i < list->sinks + list->archive) return TKV_ARCHIVE;
    return i < list->sinks + list->archive + list->warm ? TKV_WARM : TKV_HOT;
}

/* The newest blocks whose values are known well, exact or warm, no sinks: the newest of each sequence, then
 * the second newest of each, ... Calls visit for each; returns how many. */
#define TKVI_LEARN_BLOCKS 16

typedef void (*tkvi_visit)(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n);

static int tkvi_each_block(const tkv_cache *kv, int layer, int head, tkvi_visit visit, void *ctx) {
    int seq, age, had = -1, found = 0;
    for (age = 1; had < found && found < TKVI_LEARN_BLOCKS; age++) {
        had = found;
        for (seq = 0; seq < kv->tables.cfg.max_seqs && found < TKVI_LEARN_BLOCKS; seq++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            const int i = list->n - age;
            const tkvi_block *b;
            const tkvi_record *r;
            if (i < list->sinks + list->archive) continue;
            b = &kv->pool.block[ids[i]];
            r = &kv->tables.coding[b->coding].record[head];
            visit(ctx, r, tkvi_block_bytes(&kv->pool, b) + r->at, b->start,
                  tkvi_block_end(kv, list, ids, i) - b->start);
            found++;
        }
    }
    return found;
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

/* >>statistics: a piece that is there while a layer listens */
static size_t tkvi_asked_bytes(const tkv_config *cfg) {
    return tkvi_align_up((size_t)cfg->n_layers * (size_t)cfg->n_kv_heads * (size_t)cfg->head_dim *
                         sizeof(int64_t));
}

static size_t tkvi_heard_bytes(const tkv_config *cfg) {
    return tkvi_asked_bytes(cfg) +
           tkvi_align_up((size_t)cfg->n_layers * (size_t)cfg->n_kv_heads * sizeof(int64_t));
}

/* 0: no memory, nothing has changed. */
static int tkvi_heard_get(tkv_cache *kv, tkvi_heap *heap) {
    size_t bytes = tkvi_heard_bytes(&kv->tables.cfg);
    if (!kv->tables.any_shared || kv->asked) return 1;
    kv->asked = (int64_t *)tkvi_get(heap, bytes);
    if (!kv->asked) return 0;
    memset(kv->asked, 0, bytes);
    kv->far = kv->asked + tkvi_asked_bytes(&kv->tables.cfg) / sizeof(int64_t);
    return 1;
}

static void tkvi_heard_put(tkv_cache *kv) {
    tkvi_put(&kv->heap, kv->asked, tkvi_heard_bytes(&kv->tables.cfg));
    kv->asked = kv->far = NULL;
}

/* >>sizes of the fixed piece */
typedef struct tkvi_sizes {
    /* each rounded up to 64 */
    size_t cache, tables, seqs, lists, counts, seen, ears, metric, feedback, meter;
    size_t solve, recode, parts, shadow;
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
    if (!tkvi_mul(seqs + 7, (size_t)h->n_classes * sizeof(int64_t), &n)) return 0;
    s->counts = tkvi_align_up(n);
    s->recode = tkvi_align_up((size_t)((k_pad + v_pad) * TKVI_BLOCK) * sizeof(float));
    if (h->cfg.parallel_for)
        s->parts = tkvi_align_up((size_t)(TKVI_MAX_PARTS * TKVI_SUMS_FLOATS(v_pad)) * sizeof(float));
    if (h->any_shared || h->any_kvquant) s->seen = tkvi_align_up((size_t)h->cfg.n_layers * sizeof(int));
    if (h->any_squat) {
        size_t dim = (size_t)h->cfg.head_dim, packed = dim * (dim + 1) / 2;
        n = (size_t)h->cfg.n_layers * (size_t)h->cfg.n_kv_heads;
        s->ears = tkvi_align_up((size_t)h->cfg.n_layers * sizeof(tkvi_ears));
        if (!tkvi_mul(n, packed * sizeof(int64_t), &s->metric)) return 0;
        s->metric = tkvi_align_up(s->metric);
        s->feedback = n * tkvi_feedback_count(h->cfg.head_dim, h->cfg.squat_block) * sizeof(uint16_t);
        s->feedback = tkvi_align_up(s->feedback);
        s->solve = tkvi_align_up(packed * sizeof(float));
    }
    if (!tkvi_meter_sizes(h, &s->meter, &s->shadow)) return 0;
    s->total = s->cache + s->seen + s->ears + s->meter + s->solve;
    if (!tkvi_add(s->total, s->shadow, &s->total)) return 0;
    if (!tkvi_add(s->total, s->metric, &s->total) || !tkvi_add(s->total, s->feedback, &s->total)) return 0;
    return tkvi_add(s->total, s->tables, &s->total) && tkvi_add(s->total, s->seqs, &s->total) &&
           tkvi_add(s->total, s->lists, &s->total) && tkvi_add(s->total, s->counts, &s->total) &&
           tkvi_add(s->total, s->recode, &s->total) && tkvi_add(s->total, s->parts, &s->total);
}

/* What tkv_memory counts as tables. */
static size_t tkvi_table_bytes(const tkvi_sizes *s) {
    return s->tables + s->seen + s->ears + s->metric + s->feedback + s->meter;
}

/* A smaller budget makes no sense: what is there before the first token, tables, and pages for the first tokens. */
static size_t tkvi_least_budget(const tkvi_shape *h, const tkvi_sizes *s) {
    const size_t pages = (size_t)h->spare + 2;
    size_t n = 0, all = s->total;
    if (h->any_shared && !tkvi_add(all, tkvi_heard_bytes(&h->cfg), &all)) return (size_t)-1;
    if (!tkvi_add(all, tkvi_version_bytes(h), &all)) return (size_t)-1;
    if (!tkvi_mul(pages, h->page_bytes + sizeof(tkvi_page), &n) || !tkvi_add(all, n, &all)) return (size_t)-1;
    return all;
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
    if (h->cfg.budget_bytes && h->cfg.budget_bytes < tkvi_least_budget(h, &s)) return TKV_ERR_BUDGET;
    at = (uint8_t *)tkvi_get(&heap, s.total);
    if (!at) return TKV_ERR_NOMEM;
    memset(at, 0, s.total - s.solve - s.recode - s.parts - s.shadow);
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
    kv->need = kv->pool.promised + classes;
    kv->pool.room = (uint32_t *)(void *)(kv->need + 2 * classes);
    at += s.counts;
    if (s.seen) {
        kv->seen = (int *)(void *)at;
        for (c = 0; c < h->cfg.n_layers; c++) /* those that need no table do not listen */
            if (!tkvi_plan_learns(&kv->tables.plan[c])) kv->seen[c] = -1;
    }
    at += s.seen;
    if (h->any_squat) {
        kv->ears = (tkvi_ears *)(void *)at;
        kv->metric = (int64_t *)(void *)(at + s.ears);
        kv->feedback = (uint16_t *)(void *)(at + s.ears + s.metric);
        kv->solve = (float *)(void *)(at + s.ears + s.metric + s.feedback + s.meter);
    }
    at += s.ears + s.metric + s.feedback;
    kv->meter = tkvi_meter_build(h, &kv->tables, at, at + s.meter + s.solve + s.recode + s.parts);
    at += s.meter + s.solve;
    kv->recode = (float *)(void *)at;
    at += s.recode;
    kv->parts = s.parts ? (float *)(void *)at : NULL;
    kv->kernels = kernels;
    kv->fixed_bytes = s.total;
    kv->table_bytes = tkvi_table_bytes(&s);
    kv->scratch_bytes = s.solve + s.recode + s.parts;
    kv->shadow_bytes = s.shadow;
    if (!tkvi_heard_get(kv, &heap)) {
        tkvi_put(&heap, kv, s.total);
        return TKV_ERR_NOMEM;
    }
    kv->heap = heap;
    kv->pool.heap = &kv->heap;
    kv->pool.tables = &kv->tables;
    kv->pool.free_page = kv->pool.free_block = TKVI_NIL;
    for (c = 0; c < h->n_classes; c++) kv->pool.room[c] = TKVI_NIL;
    (void)tkv_policy_init(&kv->policy, &h->cfg.policy, NULL);
    kv->policy.cfg = h->cfg.policy;
    kv->relax_at = (size_t)-1;
    kv->pool.spare = h->spare;
    *out = kv;
    return TKV_OK;
}

/* >>tables */
/* Memory for this version, of all layers. 0: there is none, and nothing has changed. */
static int tkvi_version_ready(tkv_cache *kv, int version) {
    tkvi_tables *t = &kv->tables;
    uint8_t *mem;
    if (t->version[version].bytes) return 1;
    mem = (uint8_t *)tkvi_get(&kv->heap, t->version_bytes);
    if (!mem) return 0;
    memset(mem, 0, t->version_bytes);
    tkvi_version_build(t, version, mem);
    return 1;
}

/* Bytes of the versions that are there, and of the statistics. */
static size_t tkvi_learning_held(const tkv_cache *kv) {
    size_t n = kv->asked ? tkvi_heard_bytes(&kv->tables.cfg) : 0;
    int v;
    for (v = 0; v < TKVI_VERSIONS; v++) n += kv->tables.version[v].bytes ? kv->tables.version_bytes : 0;
    return n;
}

/* >>life */
TKV_API tkv_status tkv_create(const tkv_config *cfg, tkv_cache **out) {
    tkvi_heap heap;
    tkvi_shape shape;
    tkv_cache *kv;
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
    heap.limit = shape.cfg.budget_bytes;
    st = tkvi_build(&shape, &heap, &kv);
    if (st) return st;
    if (shape.cfg.budget_bytes && kv->tables.version_bytes &&
        !tkvi_version_ready(kv, 0)) { /* it must not fail later */
        tkv_destroy(kv);
        return TKV_ERR_NOMEM;
    }
    *out = kv;
    return TKV_OK;
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
    for (s = 0; s < TKVI_VERSIONS; s++)
        tkvi_put(&kv->heap, kv->tables.version[s].bytes, kv->tables.version_bytes);
    tkvi_heard_put(kv);
    heap = kv->heap; /* the cache stands in the last piece */
    if (!kv->pool.keep_all) tkvi_put(&heap, kv, kv->fixed_bytes);
}

/* >>block lists of a sequence: room for `want` blocks per layer */
static int tkvi_grow_lists(tkv_cache *kv, int seq, int want) {
    tkvi_seq *s = &kv->seq[seq];
    uint32_t cap = tkvi_cap_for(want), *bigger;
    size_t layers = (size_t)kv->tables.cfg.n_layers, bytes;
    size_t l;
    if (cap <= s->cap) return 1;
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
    most[TKV_HOT] = ((int64_t)p->now.hot + TKVI_BLOCK - 1 + cfg->max_append + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_WARM] = ((int64_t)p->now.warm + TKVI_BLOCK - 1) / TKVI_BLOCK;
    most[TKV_ARCHIVE] = (tokens - p->now.warm) / TKVI_BLOCK; /* hot tokens can be flushed */
    if (p->keep && most[TKV_ARCHIVE] > ((int64_t)p->keep + tkvi_drop_margin(p)) / TKVI_BLOCK + 2)
        most[TKV_ARCHIVE] = ((int64_t)p->keep + tkvi_drop_margin(p)) / TKVI_BLOCK + 2;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        if (most[tier] < 0 || (p->now.hot == TKVI_FOREVER && tier != TKV_HOT)) most[tier] = 0;
        if (most[tier] > all) most[tier] = all;
    }
}

typedef struct tkvi_most {
    uint32_t page_cap, block_cap, list_cap;
    int64_t pages;
    size_t bytes; /* of everything, each piece at a multiple of 64 */
} tkvi_most;

/* Under a budget: as many pages as it leaves room for. */
static tkv_status tkvi_most_within(const tkvi_shape *h, const tkvi_sizes *fixed, tkvi_most *m) {
    const size_t budget = h->cfg.budget_bytes, layers = (size_t)h->cfg.n_layers;
    const int64_t list = (int64_t)h->cfg.max_tokens / TKVI_BLOCK + 4;
    uint64_t blocks = (uint64_t)list * (uint64_t)h->n_stored * (uint64_t)h->cfg.max_seqs;
    size_t rest = 0, lists;
    if (budget < tkvi_least_budget(h, fixed)) return TKV_ERR_BUDGET;
    if (blocks > 0x3fffffff) return TKV_ERR_CONFIG;
    m->list_cap = tkvi_cap_for(list);
    if (!tkvi_mul((size_t)m->list_cap * sizeof(uint32_t), layers, &lists) ||
        !tkvi_mul(tkvi_align_up(lists), (size_t)h->cfg.max_seqs, &lists) ||
        !tkvi_add(lists, fixed->total, &rest) ||
        !tkvi_add(TKVI_IN_PLACE_VERSIONS * tkvi_version_bytes(h), rest, &rest) ||
        !tkvi_add(h->any_shared ? tkvi_heard_bytes(&h->cfg) : 0, rest, &rest))
        return TKV_ERR_CONFIG;
    m->pages = (int64_t)(budget / h->page_bytes);
    if (m->pages > 0x3fffffff) m->pages = 0x3fffffff;
    for (; m->pages > h->spare; m->pages--) { /* tables of blocks and pages take their part */
        size_t pages = (size_t)m->pages * h->page_bytes, n;
        uint64_t fit = 64u * (uint64_t)m->pages;
        m->block_cap = tkvi_cap_for((int64_t)(fit < blocks ? fit : blocks) + h->n_classes);
        m->page_cap = tkvi_cap_for(m->pages);
        n = tkvi_align_up(m->block_cap * sizeof(tkvi_block)) +
            tkvi_align_up(m->page_cap * sizeof(tkvi_page)) + TKVI_ALIGN;
        if (tkvi_add(n, rest, &n) && tkvi_add(n, pages, &n) && n <= budget) {
            m->bytes = budget;
            return TKV_OK;
        }
    }
    return TKV_ERR_BUDGET;
}

static tkv_status tkvi_most_of(tkvi_shape *h, tkvi_most *m) {
    tkvi_rule rule[TKV_MAX_LEVELS];
    int64_t live[TKVI_MAX_CODINGS], wait[TKVI_MAX_CODINGS], most[TKV_TIER_COUNT], blocks = 0;
    tkvi_sizes fixed;
    size_t pages, n;
    int i, c, tier;
    memset(m, 0, sizeof *m);
    memset(live, 0, sizeof live);
    memset(wait, 0, sizeof wait);
    if (!tkvi_fixed_sizes(h, &fixed)) return TKV_ERR_CONFIG;
    if (h->cfg.budget_bytes) return tkvi_most_within(h, &fixed, m);
    for (i = 0; i < h->cfg.n_layers; i++) {
        tkvi_plan p;
        (void)tkvi_plan_of(h, i, &p, rule);
        if (p.stored != i) continue;
        tkvi_most_blocks(&h->cfg, &p, most);
        if (p.sink) live[h->class_of[p.sink_coding]]++;
        for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
            live[h->class_of[p.now.key[tier]]] += most[tier];
            /* blocks that wait for a table: of all sequences together */
            if (tier != TKV_ARCHIVE && tkvi_plan_learns(&p))
                wait[h->class_of[p.now.key[tier]]] += TKVI_LEARN / TKVI_BLOCK;
        }
    }
    for (c = 0; c < h->n_classes; c++) {
        live[c] = live[c] * h->cfg.max_seqs + wait[c];
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
        !tkvi_add(TKVI_IN_PLACE_VERSIONS * tkvi_version_bytes(h), m->bytes, &m->bytes) ||
        !tkvi_add(h->any_shared ? tkvi_heard_bytes(&h->cfg) : 0, m->bytes, &m->bytes) ||
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
    for (i = 0; i < TKVI_IN_PLACE_VERSIONS && kv->tables.version_bytes; i++)
        if (!tkvi_version_ready(kv, i)) return TKV_ERR_CAPACITY;
    if (!tkvi_grow_blocks(&kv->pool, m.block_cap)) return TKV_ERR_CAPACITY;
    for (i = 0; i < h.cfg.max_seqs; i++)
        if (!tkvi_grow_lists(kv, i, (int)m.list_cap)) return TKV_ERR_CAPACITY;
    if (!tkvi_grow_pages(&kv->pool, m.page_cap)) return TKV_ERR_CAPACITY;
    while ((int64_t)kv->pool.n_pages < m.pages)
        if (!tkvi_add_page(&kv->pool)) return TKV_ERR_CAPACITY;
    kv->arena.closed = 1;
    if (h.cfg.budget_bytes) kv->tables.cfg.budget_bytes = kv->heap.held; /* what pages could be made of it */
    *out = kv;
    return TKV_OK;
}

#endif /* TKVI_CACHE_H */
/* ======== kvquant.h ======== */
/*
 * kvquant.h - what KVQUANT formats know of a layer: the range of each channel of K, before RoPE, and levels
 * for K and for V, of every width. KVQuant (arXiv 2401.18079, sections 3.1 to 3.6). Learned with the tables
 * of learn.h, from the blocks that are still exact or warm, or from samples of the caller's.
 *
 *   1. Ranges of K: of n tokens the n / 200 highest and lowest values of a channel are outliers, the next
 *      ones the ends of the range (with TKV_KVQUANT_DENSE nothing is). Of V each token has its own, as when
 *      it is coded.
 *   2. What is within a range goes to -1 .. 1 and into a histogram, one for K and one for V of all heads. It
 *      weighs radius^2 (equation 7: the error that counts is that of the value), times what the samples say
 *      of it.
 *   3. Levels from the histogram: codebook.h.
 *
 * Several passes over the tokens, so that nothing is kept of them. May call cache and below.
 */
#ifndef TKVI_KVQUANT_H
#define TKVI_KVQUANT_H


/* Where tokens come from: a layer's blocks, or samples. */
typedef struct tkvi_tokens_of {
    tkv_cache *kv;
    const tkv_samples *samples; /* NULL: the blocks */
    int layer;
} tkvi_tokens_of;

/* Called for each token of a head: its key before RoPE, or its value; weights of its channels, or NULL. */
typedef void (*tkvi_token_visit)(void *ctx, const float *x, const float *weight);

typedef struct tkvi_token_walk {
    const tkvi_tokens_of *from;
    tkv_side side;
    tkvi_token_visit visit;
    void *ctx;
} tkvi_token_walk;

static void tkvi_walk_block(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n) {
    const tkvi_token_walk *w = (const tkvi_token_walk *)ctx;
    const tkvi_tables *tables = &w->from->kv->tables;
    const tkvi_helpers *help = w->from->kv->kernels->helpers;
    int t, dim = w->side == TKV_K ? r->k.dim : r->v.dim;
    float *x = w->from->kv->recode, y[TKV_MAX_HEAD_DIM];
    if (w->side == TKV_K) tkvi_values(&r->k, help, bytes, 0, n, x, (size_t)dim);
    else tkvi_values(&r->v, help, bytes + r->v_at, 0, n, x, (size_t)dim);
    for (t = 0; t < n; t++) {
        tkvi_kvquant_key(w->side == TKV_K ? tkvi_kvquant_rope(tables) : NULL, x + t * dim, dim,
                         (int64_t)start + t, y);
        w->visit(w->ctx, y, NULL);
    }
}

static void tkvi_walk(const tkvi_tokens_of *from, tkv_side side, int head, tkvi_token_visit visit,
                      void *ctx) {
    const tkv_samples *s = from->samples;
    const tkv_config *cfg = &from->kv->tables.cfg;
    size_t dim = (size_t)(side == TKV_K ? cfg->head_dim : cfg->v_head_dim);
    tkvi_token_walk w;
    float y[TKV_MAX_HEAD_DIM];
    int t;
    w.from = from;
    w.side = side;
    w.visit = visit;
    w.ctx = ctx;
    if (!s) (void)tkvi_each_block(from->kv, from->layer, head, tkvi_walk_block, &w);
    for (t = 0; s && t < s->n; t++) {
        size_t at = ((size_t)t * (size_t)cfg->n_kv_heads + (size_t)head) * dim;
        const float *weight = side == TKV_K ? s->k_weight : s->v_weight;
        int64_t position = (int64_t)s->start + (s->length ? t % s->length : t);
        tkvi_kvquant_key(side == TKV_K ? tkvi_kvquant_rope(&from->kv->tables) : NULL,
                         (side == TKV_K ? s->k : s->v) + at, (int)dim, position, y);
        visit(ctx, y, weight ? weight + at : NULL);
    }
}

static void tkvi_count_tokens(void *ctx, const float *x, const float *weight) {
    (void)x;
    (void)weight;
    ++*(int *)ctx;
}

/* >>ranges of K */
#define TKVI_TAIL_ROOM 2048 /* values of each end of the channels that a pass looks at */

typedef struct tkvi_tails {
    int first, channels;                             /* that this pass looks at */
    int keep, n;                                     /* values per end, of those seen so far */
    float low[TKVI_TAIL_ROOM], high[TKVI_TAIL_ROOM]; /* [channels][keep], the outermost first */
} tkvi_tails;

static void tkvi_tail_insert(float *tail, int had, int keep, float x, float sign) {
    int i = had;
    if (had == keep && !(sign * x > sign * tail[keep - 1])) return;
    for (i = tkvi_min(had, keep - 1); i > 0 && sign * x > sign * tail[i - 1]; i--) tail[i] = tail[i - 1];
    tail[i] = x;
}

static void tkvi_tails_add(void *ctx, const float *x, const float *weight) {
    tkvi_tails *s = (tkvi_tails *)ctx;
    int c;
    (void)weight;
    for (c = 0; c < s->channels; c++) {
        tkvi_tail_insert(s->low + c * s->keep, s->n, s->keep, x[s->first + c], -1.0f);
        tkvi_tail_insert(s->high + c * s->keep, s->n, s->keep, x[s->first + c], 1.0f);
    }
    s->n = tkvi_min(s->n + 1, s->keep);
}

/* Radius and middle of the channels of a head. The radius is an fp16 value: its products with levels are
 * exact. */
static void tkvi_kvquant_learn_ranges(const tkvi_tokens_of *from, int head, int n, float *radius) {
    const tkv_config *cfg = &from->kv->tables.cfg;
    float *middle = radius + cfg->head_dim;
    tkvi_tails s;
    int c;
    s.keep = cfg->kvquant & TKV_KVQUANT_DENSE ? 1 : n / 200 + 1;
    for (s.first = 0; s.first < cfg->head_dim; s.first += s.channels) {
        s.channels = tkvi_min(TKVI_TAIL_ROOM / s.keep, cfg->head_dim - s.first);
        s.n = 0;
        tkvi_walk(from, TKV_K, head, tkvi_tails_add, &s);
        for (c = 0; c < s.channels; c++) {
            float low = s.low[c * s.keep + s.keep - 1], high = s.high[c * s.keep + s.keep - 1];
            uint16_t half = tkvi_f32_to_f16(tkvi_f32(high - low) * 0.5f);
            radius[s.first + c] = tkvi_f16_to_f32(half);
            middle[s.first + c] = tkvi_f32(high + low) * 0.5f;
        }
    }
}

/* >>levels */
typedef struct tkvi_kvquant_count {
    int dim, slots;
    const float *radius, *middle; /* of K; NULL: of V */
    float by; /* of weights, that they become whole numbers; 0: their largest is looked for */
    float most;
    int64_t count[TKVI_BOOK_BINS];
} tkvi_kvquant_count;

static void tkvi_count_value(tkvi_kvquant_count *s, float x, float radius, float middle, float weight) {
    float y = tkvi_kvquant_place(x, radius, middle), w = tkvi_f32(tkvi_f32(radius * radius) * weight);
    if (!(radius > 0.0f) || y < -1.0f || y > 1.0f) return;
    if (s->by > 0.0f) s->count[tkvi_book_bin(y)] += (int64_t)tkvi_f32(w * s->by);
    else s->most = w > s->most ? w : s->most;
}

/* 1e20 times the largest square is still a float. */
static float tkvi_weight_of(const float *weight, int c) {
    return weight ? tkvi_clampf(weight[c], 0.0f, 1e20f) : 1.0f;
}

static void tkvi_count_key(void *ctx, const float *x, const float *weight) {
    tkvi_kvquant_count *s = (tkvi_kvquant_count *)ctx;
    int c;
    for (c = 0; c < s->dim; c++)
        tkvi_count_value(s, x[c], s->radius[c], s->middle[c], tkvi_weight_of(weight, c));
}

static void tkvi_count_token(void *ctx, const float *x, const float *weight) {
    tkvi_kvquant_count *s = (tkvi_kvquant_count *)ctx;
    tkvi_kvquant_token k;
    int c, i, out;
    tkvi_kvquant_token_of(x, s->dim, s->slots, &k);
    for (c = 0; c < s->dim; c++) {
        for (i = 0, out = 0; i < s->slots; i++) out |= k.out[i] == c;
        if (!out) tkvi_count_value(s, x[c], k.radius, k.middle, tkvi_weight_of(weight, c));
    }
}

static void tkvi_kvquant_learn_books(const tkvi_tokens_of *from, tkv_side side, int version,
                                     tkvi_book *book) {
    const tkvi_tables *t = &from->kv->tables;
    const tkv_config *cfg = &t->cfg;
    tkvi_kvquant_count s;
    int head, pass, bits;
    memset(&s, 0, sizeof s);
    s.dim = side == TKV_K ? cfg->head_dim : cfg->v_head_dim;
    s.slots = tkvi_kvquant_slots(s.dim, cfg->kvquant);
    for (pass = 0; pass < 2; pass++) {
        for (head = 0; head < cfg->n_kv_heads; head++) {
            if (side == TKV_K) {
                s.radius = tkvi_kvquant_range_of(t, from->layer, version, head);
                s.middle = s.radius + s.dim;
            }
            tkvi_walk(from, side, head, side == TKV_K ? tkvi_count_key : tkvi_count_token, &s);
        }
        /* 2^20 for the largest: 2^18 tokens of 2^24 channels make a sum below 2^63 */
        if (pass == 0) s.by = s.most > 0.0f ? tkvi_f32(1048576.0f / s.most) : 1.0f;
        if (!tkvi_is_finite(s.by)) s.by = 3e38f;
    }
    for (bits = 2; bits <= 4; bits++) {
        tkvi_book_make(s.count, bits, cfg->kvquant & TKV_KVQUANT_UNIFORM, &book[bits - 2]);
    }
}

/* >>the table of a version */
static void tkvi_kvquant_learn_from(const tkvi_tokens_of *from, int version) {
    tkv_cache *kv = from->kv;
    tkvi_kvquant *table = tkvi_kvquant_of(&kv->tables, from->layer, version);
    int head, n = 0;
    tkvi_walk(from, TKV_K, 0, tkvi_count_tokens, &n);
    for (head = 0; head < kv->tables.cfg.n_kv_heads; head++)
        tkvi_kvquant_learn_ranges(from, head, n,
                                  tkvi_kvquant_range_of(&kv->tables, from->layer, version, head));
    tkvi_kvquant_learn_books(from, TKV_K, version, table->book[TKV_K]);
    tkvi_kvquant_learn_books(from, TKV_V, version, table->book[TKV_V]);
}

/* From what the layer holds: at least a token. */
static void tkvi_kvquant_learn(tkv_cache *kv, int layer, int version) {
    tkvi_tokens_of from;
    from.kv = kv;
    from.samples = NULL;
    from.layer = layer;
    tkvi_kvquant_learn_from(&from, version);
}

/* >>saved
 *   u64 mode: the rotation, and options that change what is learned
 *   of K, then of V, for 2, 3 and 4 bits: fp16 level [2^bits] | fp16 normed [2^bits]
 *   of each head: fp16 radius [head_dim] | f32 middle [head_dim] */
#define TKVI_KVQUANT_BOOKS (2 * 2 * 28 * 2) /* bytes */

static size_t tkvi_kvquant_bytes(const tkv_config *cfg) {
    return 8u + TKVI_KVQUANT_BOOKS + 6u * (size_t)cfg->n_kv_heads * (size_t)cfg->head_dim;
}

static uint64_t tkvi_kvquant_mode(const tkvi_tables *t) {
    const tkvi_rope *rope = tkvi_kvquant_rope(t);
    uint64_t h = TKVI_FNV1A_START;
    uint8_t b[8];
    int j, k;
    b[0] = (uint8_t)(t->cfg.kvquant & (TKV_KVQUANT_UNIFORM | TKV_KVQUANT_DENSE));
    b[1] = (uint8_t)(rope ? rope->pairs : 0);
    b[2] = (uint8_t)(rope ? rope->step : 0);
    h = tkvi_fnv1a_more(h, b, 3);
    for (j = 0; rope && j < rope->pairs; j++) {
        for (k = 0; k < 8; k++) b[k] = (uint8_t)(rope->turn[j] >> 8 * k & 255u);
        h = tkvi_fnv1a_more(h, b, 8);
    }
    return h;
}

static void tkvi_kvquant_save(const tkvi_tables *t, int layer, int version, uint8_t *at) {
    const tkvi_kvquant *table = tkvi_kvquant_of(t, layer, version);
    uint64_t mode = tkvi_kvquant_mode(t);
    int side, bits, i, head, dim = t->cfg.head_dim;
    tkvi_store32(at, (uint32_t)(mode & 0xffffffffu));
    tkvi_store32(at + 4, (uint32_t)(mode >> 32));
    at += 8;
    for (side = 0; side < 2; side++)
        for (bits = 2; bits <= 4; bits++) {
            const tkvi_book *b = &table->book[side][bits - 2];
            for (i = 0; i < 1 << bits; i++, at += 2) tkvi_store16(at, tkvi_f32_to_f16(b->level[i]));
            for (i = 0; i < 1 << bits; i++, at += 2) tkvi_store16(at, tkvi_f32_to_f16(b->normed[i]));
        }
    for (head = 0; head < t->cfg.n_kv_heads; head++) {
        const float *range = tkvi_kvquant_range_of(t, layer, version, head);
        for (i = 0; i < dim; i++, at += 2) tkvi_store16(at, tkvi_f32_to_f16(range[i]));
        for (i = 0; i < dim; i++, at += 4) tkvi_store32(at, tkvi_bits(range[dim + i]));
    }
}

static void tkvi_kvquant_load(const tkvi_tables *t, int layer, int version, const uint8_t *at) {
    tkvi_kvquant *table = tkvi_kvquant_of(t, layer, version);
    int side, bits, i, head, dim = t->cfg.head_dim;
    at += 8;
    memset(table, 0, sizeof *table);
    for (side = 0; side < 2; side++)
        for (bits = 2; bits <= 4; bits++) {
            tkvi_book *b = &table->book[side][bits - 2];
            for (i = 0; i < 1 << bits; i++, at += 2) b->level[i] = tkvi_half_at(at);
            for (i = 0; i < 1 << bits; i++, at += 2) b->normed[i] = tkvi_half_at(at);
        }
    for (head = 0; head < t->cfg.n_kv_heads; head++) {
        float *range = tkvi_kvquant_range_of(t, layer, version, head);
        for (i = 0; i < dim; i++, at += 2) range[i] = tkvi_half_at(at);
        for (i = 0; i < dim; i++, at += 4) range[dim + i] = tkvi_from_bits(tkvi_load32(at));
    }
}

/* Levels rise within -1 .. 1, normed ones within -8 .. 8; ranges are finite, and no larger than learned ones.
 * */
static int tkvi_kvquant_valid(const tkv_config *cfg, const uint8_t *at) {
    int i, set, n;
    at += 8;
    for (set = 0; set < 12; set++) {
        float most = set % 2 ? 8.0f : 1.0f, before = -most;
        for (i = 0, n = 4 << set / 2 % 3; i < n; i++, at += 2) {
            float x = tkvi_half_at(at);
            if (!tkvi_is_finite(x) || x < before || x > most) return 0;
            before = x;
        }
    }
    for (set = 0; set < cfg->n_kv_heads; set++) {
        for (i = 0; i < cfg->head_dim; i++, at += 2) /* not negative, not infinite */
            if (tkvi_load16(at) >= 0x7c00u) return 0;
        for (i = 0; i < cfg->head_dim; i++, at += 4) {
            float x = tkvi_from_bits(tkvi_load32(at));
            if (!tkvi_is_finite(x) || x < -131072.0f || x > 131072.0f) return 0;
        }
    }
    return 1;
}

#endif /* TKVI_KVQUANT_H */
/* ======== learn.h ======== */
/*
 * learn.h - the tables of formats whose heads share a layer's bytes: statistics, from them a table, its versions.
 *
 * What counts is how a channel of K is asked (E[q^2], by attend.h) times how it varies within a block, and how
 * strongly a head reads far tokens: the sum of p^2 over keys more than TKVI_FAR back (by attend.h too; of one
 * query in eight) times the mean |v|^2. Attention adds whole numbers, so the order in which threads do changes
 * nothing; keys and values are read from the blocks that are still exact. When a layer has seen TKVI_LEARN
 * tokens, all sequences together, its next append makes the table; blocks that were due before wait in the next
 * better tier. At TKVI_LEARN_WELL tokens there is a better one for the blocks that come then; blocks keep the
 * version that they were coded with. Afterwards nothing is collected any more, unless tkv_calibration_refresh
 * asks. bench/QUALITY.md compares these tables with loaded ones.
 *
 * May call cache and below.
 */
#ifndef TKVI_LEARN_H
#define TKVI_LEARN_H


#define TKVI_LEARN_FEW 128 /* a table of fewer tokens (a flush, a freeze) is nearer to the uniform one */

/* >>logarithms of statistics, in 1/8 octaves */
#define TKVI_LOG8_NONE (-1200)

static int tkvi_log8(float x) {
    static const uint32_t border[8] = {371395, 1164243, 2028850, 2971711, 3999908, 5121164, 6343903, 7677309};
    uint32_t bits = tkvi_bits(x);
    int step = 0;
    if (!(x > 0.0f)) return TKVI_LOG8_NONE;
    while (step < 8 && (bits & 0x7fffffu) >= border[step]) step++;
    return 8 * ((int)(bits >> 23) - 127) + step;
}

/* >>what a block says of one head */
typedef struct tkvi_channel_sums {
    int64_t sum, within; /* of values; of squares about the mean of the block. In units of a power of two */
} tkvi_channel_sums;

typedef struct tkvi_gather {
    tkv_cache *kv;
    tkvi_channel_sums channel[TKV_MAX_HEAD_DIM];
    float k_most, v_most; /* largest |k|; largest |v| of a vector, squared */
    float v_sum;          /* of all |v|, squared */
    float range; /* largest range of a channel in a block, distance of its middle from the mean included */
    int down;    /* values are divided by 2^down to be summed in integers */
    int64_t tokens;
} tkvi_gather;

/* First pass: sizes. */
static void tkvi_gather_size(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n) {
    tkvi_gather *g = (tkvi_gather *)ctx;
    const tkv_config *cfg = &g->kv->tables.cfg;
    float *k = g->kv->recode, *v = k + tkvi_round_up(cfg->head_dim, 16) * TKVI_BLOCK;
    int t, c;
    (void)start;
    tkvi_values(&r->k, g->kv->kernels->helpers, bytes, 0, n, k, (size_t)cfg->head_dim);
    tkvi_values(&r->v, g->kv->kernels->helpers, bytes + r->v_at, 0, n, v, (size_t)cfg->v_head_dim);
    for (t = 0; t < n; t++) {
        float squares = 0.0f;
        for (c = 0; c < cfg->head_dim; c++) {
            float a = k[t * cfg->head_dim + c];
            a = a < 0.0f ? -a : a;
            g->k_most = a > g->k_most ? a : g->k_most;
        }
        for (c = 0; c < cfg->v_head_dim; c++)
            squares = tkvi_f32(squares + tkvi_f32(v[t * cfg->v_head_dim + c] * v[t * cfg->v_head_dim + c]));
        g->v_most = squares > g->v_most ? squares : g->v_most;
        g->v_sum = tkvi_f32(g->v_sum + squares);
    }
    g->tokens += n;
}

static float tkvi_power_of_two(int e) {
    return tkvi_from_bits((uint32_t)(127 + tkvi_max(-126, tkvi_min(127, e))) << 23);
}

/* Second pass: sums, exact in integers: 2^20 * 64 tokens, squared. */
static void tkvi_gather_sums(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n) {
    tkvi_gather *g = (tkvi_gather *)ctx;
    const tkv_config *cfg = &g->kv->tables.cfg;
    float *k = g->kv->recode, by = tkvi_power_of_two(-g->down);
    int t, c;
    (void)start;
    tkvi_values(&r->k, g->kv->kernels->helpers, bytes, 0, n, k, (size_t)cfg->head_dim);
    for (c = 0; c < cfg->head_dim; c++) {
        int64_t sum = 0, squares = 0;
        for (t = 0; t < n; t++) {
            int64_t x = (int64_t)(k[t * cfg->head_dim + c] * by);
            sum += x;
            squares += x * x;
        }
        g->channel[c].sum += sum;
        g->channel[c].within += squares - sum * sum / n;
    }
}

/* Third pass, with the mean known (in k_pad floats behind the blocks): ranges. */
static void tkvi_gather_range(void *ctx, const tkvi_record *r, const uint8_t *bytes, int start, int n) {
    tkvi_gather *g = (tkvi_gather *)ctx;
    const tkv_config *cfg = &g->kv->tables.cfg;
    float *k = g->kv->recode;
    int t, c;
    (void)start;
    tkvi_values(&r->k, g->kv->kernels->helpers, bytes, 0, n, k, (size_t)cfg->head_dim);
    for (c = 0; c < cfg->head_dim; c++) {
        float low = k[c], high = k[c], mean = (float)((double)g->channel[c].sum / (double)g->tokens);
        mean *= tkvi_power_of_two(g->down);
        for (t = 1; t < n; t++) {
            float x = k[t * cfg->head_dim + c];
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
        low = mean - low > high - mean ? mean - low : high - mean;
        g->range = low > g->range ? low : g->range;
    }
}

/* >>tables */
/* One head of a version, from what was gathered. */
static void tkvi_learn_head(tkv_cache *kv, int layer, int head, int version) {
    const tkv_config *cfg = &kv->tables.cfg;
    int pad = tkvi_round_up(cfg->head_dim, 16), c, p, most = TKVI_LOG8_NONE * 2, rank[TKV_MAX_HEAD_DIM];
    const tkvi_version *to = &kv->tables.version[version];
    size_t at = (size_t)layer * (size_t)cfg->n_kv_heads + (size_t)head;
    tkvi_head *h = &to->head[at];
    uint8_t *importance = to->importance + at * (size_t)pad, *order = to->channel + at * (size_t)pad;
    float *mean = to->mean + at * (size_t)pad;
    const int64_t *asked = tkvi_asked_of(kv, layer, head);
    int64_t any = 0;
    tkvi_gather g;
    memset(&g, 0, sizeof g);
    g.kv = kv;
    (void)tkvi_each_block(kv, layer, head, tkvi_gather_size, &g);
    g.down = (g.k_most > 0.0f ? (int)(tkvi_bits(g.k_most) >> 23) - 127 : 0) - 20;
    (void)tkvi_each_block(kv, layer, head, tkvi_gather_sums, &g);
    if (g.tokens) (void)tkvi_each_block(kv, layer, head, tkvi_gather_range, &g);
    for (c = 0; c < cfg->head_dim; c++) any |= asked[c];
    for (c = 0; c < cfg->head_dim; c++) {
        rank[c] = tkvi_log8((float)g.channel[c].within) + (any ? tkvi_log8((float)asked[c]) : 0);
        most = tkvi_max(most, rank[c]);
    }
    for (c = 0; c < cfg->head_dim && g.tokens < TKVI_LEARN_FEW; c++) /* few tokens know little of channels */
        rank[c] = most + (rank[c] - most) * (int)g.tokens / TKVI_LEARN_FEW;
    for (p = 0; p < pad;
         p++) { /* channels in falling order, the first of equals first; then what is no channel */
        int best = -1;
        for (c = 0; c < cfg->head_dim && p < cfg->head_dim; c++)
            if (rank[c] > -1000000 && (best < 0 || rank[c] > rank[best])) best = c;
        if (best < 0) best = p;
        order[p] = (uint8_t)best;
        importance[p] = p < cfg->head_dim ? (uint8_t)tkvi_max(1, 255 + rank[best] - most) : (uint8_t)0;
        mean[p] = 0.0f;
        if (p < cfg->head_dim && g.tokens) {
            float m = (float)((double)g.channel[best].sum / (double)g.tokens) * tkvi_power_of_two(g.down);
            mean[p] = tkvi_f16_to_f32(tkvi_f32_to_f16(m));
        }
        if (p < cfg->head_dim) rank[best] = -2000000;
    }
    h->reach = tkvi_log8((float)*tkvi_far_of(kv, layer, head)) + tkvi_log8(g.v_sum);
    h->k_weight = most + 16 * g.down; /* heads are compared: not in units of their own */
    h->k_top = tkvi_log_top(2.0f * g.range);
    h->v_top = tkvi_log_top(2.0f * sqrtf(g.v_most / (float)cfg->v_head_dim));
}

/* All heads of a version. */
static void tkvi_learn_heads(tkv_cache *kv, int layer, int version) {
    tkvi_head *heads = tkvi_heads_of(&kv->tables, layer, version);
    int head, n = kv->tables.cfg.n_kv_heads, high = -(1 << 20);
    for (head = 0; head < n; head++) {
        tkvi_learn_head(kv, layer, head, version);
        high = tkvi_max(high, heads[head].reach);
    }
    /* Nobody was heard to read far: all alike. Who alone did not gets the least. Half of what was seen: 512 tokens see
     * too little to be trusted in full (bench/LOG.md). */
    for (head = 0; head < n; head++) {
        heads[head].reach = high <= TKVI_LOG8_NONE / 2 ? 0 : tkvi_max((heads[head].reach - high) / 2, -8 * 6);
        heads[head].k_weight = tkvi_max(heads[head].k_weight, TKVI_LOG8_NONE) + heads[head].reach;
    }
}

/* A version of the layer's table that no block was coded with, or -1. */
static int tkvi_free_version(const tkv_cache *kv, int layer) {
    int used[TKVI_VERSIONS] = {0}, seq, i, v;
    if (kv->tables.current[layer] < 0) return 0;
    used[(int)kv->tables.current[layer]] = 1;
    for (v = 0; v < TKVI_VERSIONS && kv->pool.keep_all; v++) used[v] |= !kv->tables.version[v].bytes;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        const uint32_t *ids = tkvi_ids(kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            const int own = kv->pool.block[ids[i]].coding - kv->tables.n_keys;
            if (own >= 0) used[own % TKVI_VERSIONS] = 1;
        }
    }
    for (v = 0; v < TKVI_VERSIONS && used[v]; v++) continue;
    return v < TKVI_VERSIONS ? v : -1;
}

/* The heads of this version are known: blocks are coded with it from now on. */
static void tkvi_table_use(tkv_cache *kv, int layer, int version) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const tkvi_head *heads = p->allocates ? tkvi_heads_of(&kv->tables, layer, version) : NULL;
    const tkvi_rule *rule = &kv->tables.rule[(size_t)layer * (size_t)kv->tables.n_levels];
    int i, done = -1;
    for (i = 0; i < kv->tables.n_levels * TKV_TIER_COUNT; i++) { /* codings of a layer come in rising order */
        const tkvi_rule *r = &rule[i / TKV_TIER_COUNT];
        const int tier = i % TKV_TIER_COUNT;
        tkvi_coding *c = &kv->tables.coding[r->coding[tier] + version];
        if (!r->shared[tier] || r->coding[tier] <= done) continue;
        done = r->coding[tier];
        tkvi_coding_share(&kv->tables, c, heads);
        if (p->kvquant) tkvi_coding_kvquant(&kv->tables, c, layer, version);
    }
    kv->tables.current[layer] = (int8_t)version;
}

/* The layer listens no more, or from nothing (again); with the last one goes the memory, but in place. */
static void tkvi_learned(tkv_cache *kv, int layer, int again) {
    size_t n = (size_t)kv->tables.cfg.n_kv_heads;
    int any = kv->pool.keep_all, i;
    kv->seen[layer] = again ? 0 : -1;
    for (i = 0; i < kv->tables.cfg.n_layers; i++) any |= kv->seen[i] >= 0;
    if (!any) tkvi_heard_put(kv);
    if (!kv->asked || !kv->tables.plan[layer].allocates) return;
    memset(tkvi_asked_of(kv, layer, 0), 0, n * (size_t)kv->tables.cfg.head_dim * sizeof(int64_t));
    memset(tkvi_far_of(kv, layer, 0), 0, n * sizeof(int64_t));
}

/* Tokens that K and V can be read from (tkvi_each_block). What was seen may be gone: sequences end. */
static int64_t tkvi_held(const tkv_cache *kv, int layer) {
    int64_t n = 0;
    int seq;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        int first = list->sinks + list->archive;
        if (first < list->n) n += list->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), first);
    }
    return n;
}

/* Is it time for a table of this layer? Forced: for the first one, of whatever there is. */
static int tkvi_learn_due(const tkv_cache *kv, int layer, int forced) {
    int first = kv->tables.current[layer] < 0;
    forced = forced && first;
    if (!kv->seen || kv->seen[layer] < (forced ? 0 : first ? TKVI_LEARN : TKVI_LEARN_WELL)) return 0;
    return tkvi_held(kv, layer) >= (forced ? 1 : TKVI_BLOCK);
}

/* If it is time for a table, takes memory for it and counts it as made: what follows then asks for the memory of blocks
 * that wait no more. tkvi_learn_end makes it, or takes that back. A second table is only better than the first: without
 * memory it waits. 0: no memory for the first one, nothing has changed. Not in an open step: an abort would not take a
 * table back. */
static int tkvi_learn_begin(tkv_cache *kv, int layer, int forced, int8_t *had) {
    int version;
    *had = kv->tables.current[layer];
    if (!tkvi_learn_due(kv, layer, forced)) return 1;
    version = tkvi_free_version(kv, layer);
    if (version < 0) { /* to look for it takes a walk over all blocks: again when there is another */
        kv->seen[layer] = TKVI_LEARN_WELL - TKVI_BLOCK;
        return 1;
    }
    if (!tkvi_version_ready(kv, version)) {
        if (*had >= 0 && kv->heap.limit)
            kv->seen[layer] = TKVI_LEARN_WELL - TKVI_BLOCK; /* again in a while */
        return *had >= 0;
    }
    kv->tables.current[layer] = (int8_t)version;
    return 1;
}

static void tkvi_learn_end(tkv_cache *kv, int layer, int8_t had, int made) {
    int version = kv->tables.current[layer];
    kv->tables.current[layer] = had;
    if (version == had || !made) return;
    if (kv->tables.plan[layer].allocates) tkvi_learn_heads(kv, layer, version);
    if (kv->tables.plan[layer].kvquant) tkvi_kvquant_learn(kv, layer, version);
    tkvi_table_use(kv, layer, version);
    if (had >= 0) tkvi_learned(kv, layer, 0);
}

/* What those say who could not get the memory. */
static tkv_status tkvi_no_table(tkv_cache *kv) {
    return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for tables", 0, NULL);
}

/* Must blocks of this layer wait before they go to that tier? */
static int tkvi_waits(const tkv_cache *kv, int layer, tkv_tier tier) {
    return kv->tables.plan[layer].now.shared[tier] && kv->tables.current[layer] < 0;
}

#endif /* TKVI_LEARN_H */
/* ======== metric.h ======== */
/*
 * metric.h - what the queries of each head group look like, for formats that turn their errors away from them
 * (SQUAT4, SQUAT2): sums of q q^T, from time to time the factors that follow from them (format_squat.h).
 *
 * Attention adds whole numbers, of the queries at every fourth position, until the layer has seen TKVI_LEARN
 * tokens (the lock and the count of threads: learn.h). The factors are made anew when the layer has 64
 * tokens, and whenever it has twice as many. Blocks that come earlier are coded as KIVI's; nothing waits, as
 * decoding needs none of this. The paper takes the queries of the prompt, once. May call cache and below.
 */
#ifndef TKVI_METRIC_H
#define TKVI_METRIC_H


#define TKVI_METRIC_EVERY 4

/* Adds one query, scaled as attention has it. The caller has the lock. */
static void tkvi_metric_add(tkv_cache *kv, int layer, int head, const float *q) {
    int64_t *sum = tkvi_metric_of(kv, layer, head);
    int x[TKV_MAX_HEAD_DIM], dim = kv->tables.cfg.head_dim, i, j;
    for (i = 0; i < dim; i++) x[i] = (int)tkvi_counted(q[i] * 4096.0f, 1e6f);
    for (j = 0; j < dim; j++)
        for (i = 0; i <= j; i++) *sum++ += (int64_t)x[i] * x[j];
}

static void tkvi_metric_use(tkv_cache *kv, int layer, int head) {
    const int64_t *sum = tkvi_metric_of(kv, layer, head);
    int dim = kv->tables.cfg.head_dim, i, j;
    double trace = 0.0;
    float *p = kv->solve;
    for (i = 0; i < dim; i++) trace += (double)sum[tkvi_packed(i, i)];
    if (!(trace > 0.0)) return;
    for (j = 0; j < dim; j++)
        for (i = 0; i <= j; i++) {
            double c = (double)sum[tkvi_packed(i, j)] * (TKVI_SQUAT_ETA * (double)dim) / trace;
            p[tkvi_packed(i, j)] = (float)(i == j ? 1.0 + c : c);
        }
    tkvi_feedback_from(p, dim, kv->tables.cfg.squat_block);
    tkvi_feedback_store(p, dim, kv->tables.cfg.squat_block, tkvi_feedback_of(kv, layer, head));
}

/* Called between steps. Needs no memory. */
static void tkvi_metric_learn(tkv_cache *kv, int layer) {
    tkvi_ears *ears = kv->ears ? &kv->ears[layer] : NULL;
    int head;
    if (!ears || !kv->tables.plan[layer].squat) return;
    if (ears->tokens < tkvi_min(TKVI_LEARN, tkvi_max(TKVI_BLOCK, 2 * ears->used))) return;
    for (head = 0; head < kv->tables.cfg.n_kv_heads; head++) tkvi_metric_use(kv, layer, head);
    ears->used = tkvi_min(TKVI_LEARN, ears->tokens);
    if (ears->tokens >= TKVI_LEARN) ears->tokens = -1;
}

/* n more tokens. */
static void tkvi_metric_count(tkv_cache *kv, int layer, int n) {
    if (kv->ears && kv->ears[layer].tokens >= 0)
        kv->ears[layer].tokens =
            tkvi_min(TKVI_FOREVER, kv->ears[layer].tokens + n); /* an abort takes its part back */
}

/* Listens again, from nothing; the factors stay until there are others. */
static void tkvi_metric_restart(tkv_cache *kv, int layer) {
    size_t heads = (size_t)kv->tables.cfg.n_kv_heads, dim = (size_t)kv->tables.cfg.head_dim;
    if (!kv->ears) return;
    kv->ears[layer].tokens = kv->ears[layer].used = 0;
    memset(tkvi_metric_of(kv, layer, 0), 0, heads * (dim * (dim + 1) / 2) * sizeof(int64_t));
}

#endif /* TKVI_METRIC_H */
/* ======== age.h ======== */
/*
 * age.h - how a block comes to a tighter format: what is due by age, and the recoding itself, for real or on paper
 * (tkvi_peak). May call cache and below.
 *
 * Ageing looks at lengths alone: at the start of an append (or of a step) a block whose last token is hot_tokens old
 * moves to warm, one that is hot_tokens + warm_tokens old to the archive, always whole blocks, and never the tokens
 * of the chunk that is about to be attended to.
 */
#ifndef TKVI_AGE_H
#define TKVI_AGE_H


static tkv_tier tkvi_tier_due(const tkvi_rule *r, int hot, int end, int len) {
    int64_t age = (int64_t)len - end;
    if (age < hot) return TKV_HOT;
    return age < (int64_t)hot + r->warm ? TKV_WARM : TKV_ARCHIVE;
}

/* Under a budget blocks get tighter when bytes are needed (budget.h), else when they are old. */
static int tkvi_lazy(const tkv_cache *kv) { return kv->tables.cfg.budget_bytes != 0; }

/* The age at which a layer's blocks leave the hot tier by themselves. */
static int tkvi_hot_age(const tkv_cache *kv, int layer) {
    return tkvi_lazy(kv) ? TKVI_FOREVER : kv->tables.plan[layer].now.hot;
}

static int tkvi_tighter(const tkv_cache *kv, int from, int to) {
    return kv->tables.coding[to].bytes.total < kv->tables.coding[from].bytes.total;
}

typedef struct tkvi_recoding {
    tkv_cache *kv;
    const tkvi_coding *from, *to;
    int layer, start, tokens;
} tkvi_recoding;

static void tkvi_recode(void *ctx, const uint8_t *src, uint8_t *dst) {
    const tkvi_recoding *r = (const tkvi_recoding *)ctx;
    const tkv_config *cfg = &r->kv->tables.cfg;
    const tkvi_helpers *help = r->kv->kernels->helpers;
    float *k = r->kv->recode, *v = k + tkvi_round_up(cfg->head_dim, 16) * TKVI_BLOCK;
    size_t dk = (size_t)cfg->head_dim, dv = (size_t)cfg->v_head_dim;
    int h;
    for (h = 0; h < cfg->n_kv_heads; h++) {
        const tkvi_record *a = &r->from->record[h], *b = &r->to->record[h];
        tkvi_side to_k = b->k;
        to_k.feedback = tkvi_feedback_of(r->kv, r->layer, h);
        to_k.start = r->start;
        tkvi_values(&a->k, help, src + a->at, 0, r->tokens, k, dk);
        tkvi_values(&a->v, help, src + a->at + a->v_at, 0, r->tokens, v, dv);
        tkvi_encode_side(&to_k, help, k, dk, r->tokens, dst + b->at);
        tkvi_encode_side(&b->v, help, v, dv, r->tokens, dst + b->at + b->v_at);
    }
}

/* The meter copies what is exact for the last time (meter.h). */
static void tkvi_keep_exact(tkv_cache *kv, int seq, int layer, const tkvi_block *b) {
    const tkvi_coding *c = &kv->tables.coding[b->coding];
    int i;
    if (!kv->meter || kv->meter->seq != seq || c->key != kv->tables.plan[layer].now.key[TKV_HOT]) return;
    for (i = 0; i < kv->meter->n; i++) {
        tkvi_gauge *g = &kv->meter->gauge[i];
        if (g->layer == layer)
            tkvi_gauge_keep(kv->meter, g, b->start, tkvi_list_of(kv, seq, layer)->dropped,
                            tkvi_block_bytes(&kv->pool, b) + c->record[g->head].at,
                            c->record[g->head].k.bytes + c->record[g->head].v.bytes);
    }
}

/* Block i of a list goes to another tier's coding, or only on paper. */
static void tkvi_demote(tkv_cache *kv, int seq, int layer, int i, int coding, tkvi_peak *paper) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    uint32_t *ids = tkvi_ids(kv, seq, layer), id = ids[i];
    tkvi_block *b = &kv->pool.block[id];
    tkvi_recoding r;
    if (kv->tables.coding[b->coding].key == kv->tables.coding[coding].key) return; /* any version of it */
    if (tkvi_lazy(kv) && !tkvi_tighter(kv, b->coding, coding)) return;
    if (paper) {
        tkvi_peak_take(paper, coding);
        if (b->refs == 1) tkvi_peak_give(paper, b->coding);
        return;
    }
    tkvi_keep_exact(kv, seq, layer, b);
    kv->demoted++;
    r.kv = kv;
    r.from = &kv->tables.coding[b->coding];
    r.to = &kv->tables.coding[coding];
    r.layer = layer;
    r.start = b->start;
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
        now.tight = tkvi_max(0, now.tight - (gone - now.sinks)); /* the sinks go first, if there are any */
        now.tightest = tkvi_max(0, now.tightest - (gone - now.sinks));
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
        tkv_tier due = tkvi_tier_due(&p->now, hot, end, len);
        while (tkvi_waits(kv, layer, due)) due = due == TKV_ARCHIVE ? TKV_WARM : TKV_HOT;
        if (due == TKV_HOT || (!whole && !partial)) break;
        if (is_warm && due == TKV_WARM) {
            i = now.sinks + now.archive + now.warm - 1; /* the younger warm ones stay as well */
            continue;
        }
        tkvi_demote(kv, seq, layer, i + (paper ? gone : 0), tkvi_coding_of(&kv->tables, layer, due), paper);
        if (is_warm) now.warm--;
        if (due == TKV_ARCHIVE) now.archive++;
        else now.warm++;
    }
    if (!paper) *list = now;
}

#endif /* TKVI_AGE_H */
/* ======== budget.h ======== */
/*
 * budget.h - a bound on everything that the cache holds: when bytes are needed, blocks get tighter, oldest first.
 *
 *     append -> does it fit, if everything old were at the last level?     no: TKV_ERR_BUDGET, nothing has changed
 *            -> above what the level allows: a block or as many as the new bytes require     (tkvi_keep_pace)
 *            -> still no room: as many as it takes, and the next level when this one is done  (tkvi_make_room)
 *
 * Before an operation it is known on paper (tkvi_peak) what slots it takes; pages in use are exactly what the numbers
 * of blocks of each size ask for (pool.h), so whether it fits is arithmetic. Recoding needs a page for each size of
 * block that comes out of it: these spare pages are held from the first append on and used by nothing else. A list
 * remembers how many of its blocks are as tight as the level wants (tkvi_list.tight), so the next one is found by a
 * look at each list.
 *
 * A level is left for a tighter one when the average pressure asks for it and nothing is left to do at this one, or
 * when there is no room otherwise; for a looser one when the pressure fell and all that is held would fit there.
 * Blocks never get looser by that. May call age and below.
 */
#ifndef TKVI_BUDGET_H
#define TKVI_BUDGET_H


/* >>bytes */
/* All that is held, but free pages that nobody keeps. */
static size_t tkvi_in_use(const tkv_cache *kv) {
    const size_t spare = (size_t)kv->pool.spare, n_free = kv->pool.n_free_pages;
    return kv->heap.held - (n_free > spare ? n_free - spare : 0) * kv->tables.page_bytes;
}

/* All but pages. */
static size_t tkvi_rest(const tkv_cache *kv) {
    return kv->heap.held - (size_t)kv->pool.n_pages * kv->tables.page_bytes;
}

/* Bytes held when there are so many slots of each class, room for recoding included. */
static size_t tkvi_bytes_with(const tkv_cache *kv, const int64_t *live, size_t extra) {
    int64_t pages = kv->pool.spare;
    size_t bytes;
    int c;
    for (c = 0; c < kv->tables.n_classes; c++)
        pages += tkvi_pages_for(&kv->tables.size_class[c], live[c] > 0 ? live[c] : 0);
    if ((uint64_t)pages > (size_t)-1 || !tkvi_mul((size_t)pages, kv->tables.page_bytes, &bytes) ||
        !tkvi_add(bytes, tkvi_rest(kv), &bytes) || !tkvi_add(bytes, extra, &bytes))
        return (size_t)-1;
    return bytes;
}

/* Memory that an array may take when it grows; the old one is given back, but not before. */
static size_t tkvi_growth(uint32_t cap, int64_t want, size_t item) {
    return want > (int64_t)cap ? (size_t)tkvi_cap_for(want) * item : 0;
}

static size_t tkvi_list_growth(const tkv_cache *kv, int seq, int want) {
    return tkvi_growth(kv->seq[seq].cap, want, sizeof(uint32_t)) * (size_t)kv->tables.cfg.n_layers;
}

static size_t tkvi_index_growth(const tkv_cache *kv, const tkvi_peak *paper) {
    return tkvi_growth(kv->pool.block_cap, paper->most_blocks, sizeof(tkvi_block)) +
           tkvi_growth(kv->pool.page_cap, paper->most_pages + kv->pool.spare, sizeof(tkvi_page));
}

/* What an operation asks for, from its paper. */
static void tkvi_need_of(tkv_cache *kv, const tkvi_peak *paper) {
    int c;
    for (c = 0; c < kv->tables.n_classes; c++)
        kv->need[c] = paper->live[c] - kv->pool.live[c] - kv->pool.promised[c];
}

/* >>what is stored more loosely than a level wants it */
typedef struct tkvi_stale {
    int seq, layer, i, coding;
    tkv_tier due;
} tkvi_stale;

static int tkvi_any_step(const tkv_cache *kv) {
    int seq, any = 0;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) any |= kv->seq[seq].in_step;
    return any;
}

/* Where block i of a list should be by rule r: TKV_HOT if it must stay. tables: those missing can be made. */
static tkv_tier tkvi_due(const tkv_cache *kv, int seq, int layer, int i, const tkvi_rule *r, int tables) {
    const tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    int start = tkvi_block_start(kv, ids, i), end = tkvi_block_end(kv, list, ids, i);
    tkv_tier due = tkvi_tier_due(r, r->hot, end, list->len);
    if (end > list->chunk || (i + 1 == list->n && end - start < TKVI_BLOCK)) return TKV_HOT;
    while (r->shared[due] && kv->tables.current[layer] < 0 && !tables)
        due = due == TKV_ARCHIVE ? TKV_WARM : TKV_HOT;
    return due;
}

/* Block i, the first that is not yet seen to, is in its place: the tiers of a list are stretches of it. */
static void tkvi_in_place(tkvi_list *list, int i, tkv_tier due) {
    if (i >= list->sinks + list->archive + list->warm) list->warm++;
    if (due == TKV_ARCHIVE && i >= list->sinks + list->archive) {
        list->warm--;
        list->archive++;
    }
    if (due == TKV_ARCHIVE) list->tightest++;
    list->tight = tkvi_max(list->tight, i + 1 - list->sinks);
}

/* The oldest block of a list that the level wants tighter, first for the archive, then for warm. 0: there is none. */
static int tkvi_stale_in(tkv_cache *kv, int seq, int layer, int tables, tkvi_stale *s) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    const uint32_t *ids = tkvi_ids(kv, seq, layer);
    const tkvi_rule *r = &kv->tables.plan[layer].now;
    for (;;) {
        int i = list->sinks + list->tightest;
        tkv_tier due = i < list->n ? tkvi_due(kv, seq, layer, i, r, tables) : TKV_HOT;
        const tkvi_block *b;
        if (due != TKV_ARCHIVE) {
            i = list->sinks + list->tight;
            due = i < list->n ? tkvi_due(kv, seq, layer, i, r, tables) : TKV_HOT;
        }
        if (due == TKV_HOT) return 0;
        b = &kv->pool.block[ids[i]];
        s->coding = tkvi_coding_of(&kv->tables, layer, due);
        if (b->refs == 1 && tkvi_tighter(kv, b->coding, s->coding)) {
            s->seq = seq;
            s->layer = layer;
            s->i = i;
            s->due = due;
            return 1;
        }
        tkvi_in_place(list, i, due);
    }
}

/* Is there a slot for it, without more memory? */
static int tkvi_has_slot(const tkv_cache *kv, int coding) {
    return kv->pool.n_free_pages > 0 || kv->pool.room[kv->tables.coding[coding].size_class] != TKVI_NIL;
}

/* The oldest of all lists; `anywhere`: also one that there is no slot for. */
static int tkvi_next_stale(tkv_cache *kv, int anywhere, tkvi_stale *oldest) {
    int seq, layer, found = 0, most = -1, tables = !tkvi_any_step(kv);
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            tkvi_stale s;
            int age;
            if (list->n == 0 || !tkvi_stale_in(kv, seq, layer, tables, &s)) continue;
            age = list->len - tkvi_block_start(kv, tkvi_ids(kv, seq, layer), s.i);
            if (age <= most || (!anywhere && !tkvi_has_slot(kv, s.coding))) continue;
            most = age;
            *oldest = s;
            found = 1;
        }
    return found;
}

static uint64_t tkvi_pending(const tkv_cache *kv) {
    uint64_t n = 0;
    int seq, layer, i, tables = !tkvi_any_step(kv);
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            for (i = list->sinks + list->tightest; i < list->n; i++) {
                tkv_tier due = tkvi_due(kv, seq, layer, i, &kv->tables.plan[layer].now, tables);
                const tkvi_block *b = &kv->pool.block[ids[i]];
                if (due == TKV_HOT) break;
                n += b->refs == 1 && tkvi_tighter(kv, b->coding, tkvi_coding_of(&kv->tables, layer, due));
            }
        }
    return n;
}

/* >>events */
static void tkvi_tell(tkv_cache *kv, tkv_event_kind kind, int layer, int from, int to, size_t bytes,
                      const char *text) {
    tkv_event e;
    if (!kv->tables.cfg.on_event) return;
    memset(&e, 0, sizeof e);
    e.kind = kind;
    e.layer = layer;
    e.from = from;
    e.to = to;
    e.bytes = bytes;
    e.text = text;
    kv->tables.cfg.on_event(kv->tables.cfg.event_user, &e);
}

/* An operation does not fit, at the last level either. */
static tkv_status tkvi_over_budget(tkv_cache *kv, size_t bytes) {
    tkv_status st = tkvi_fail(kv, TKV_ERR_BUDGET, "the tightest level would need", (int64_t)bytes,
                              " bytes, more than the budget; reset a sequence or raise it");
    kv->refused++;
    tkvi_tell(kv, TKV_EVENT_BUDGET, -1, -1, -1, bytes, kv->error);
    return st;
}

/* >>levels */
static void tkvi_go_to_level(tkv_cache *kv, int level) {
    const int from = kv->tables.level;
    size_t i, lists = (size_t)kv->tables.cfg.max_seqs * (size_t)kv->tables.cfg.n_layers;
    if (level == from) return;
    tkvi_take_level(&kv->tables, level);
    for (i = 0; i < lists; i++) kv->list[i].tight = kv->list[i].tightest = 0;
    kv->relax_at = (size_t)-1;
    tkvi_policy_move(&kv->policy.now, level);
    tkvi_tell(kv, TKV_EVENT_LEVEL, -1, from, level, tkvi_in_use(kv),
              level > from ? "memory is short: old tokens get tighter"
                           : "memory is free again: new tokens are looser");
}

/* Slots of each class, in need[n_classes ...]: those of now, with what is needed. */
static int64_t *tkvi_slots_now(tkv_cache *kv) {
    int64_t *slots = kv->need + kv->tables.n_classes;
    int c;
    for (c = 0; c < kv->tables.n_classes; c++)
        slots[c] = kv->pool.live[c] + kv->pool.promised[c] + kv->need[c];
    return slots;
}

/* The same if all blocks were where this level wants them, and those that are
 * looser by now as well: `looser` also makes tighter ones as large as the level has them. */
static const int64_t *tkvi_slots_at(tkv_cache *kv, int level, int looser) {
    const tkvi_tables *t = &kv->tables;
    int64_t *slots = tkvi_slots_now(kv);
    int seq, layer, i, tables = !tkvi_any_step(kv);
    for (seq = 0; seq < t->cfg.max_seqs; seq++)
        for (layer = 0; layer < t->cfg.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            const tkvi_rule *r = &t->rule[(size_t)layer * (size_t)t->n_levels + (size_t)level];
            for (i = list->sinks; i < list->n; i++) {
                const tkvi_block *b = &kv->pool.block[ids[i]];
                tkv_tier due = tkvi_due(kv, seq, layer, i, r, tables);
                int coding = r->coding[due];
                if (b->refs > 1) continue;
                if (due == TKV_HOT && !looser) break;
                if (looser ? !tkvi_tighter(kv, coding, b->coding) : !tkvi_tighter(kv, b->coding, coding))
                    continue;
                slots[t->coding[b->coding].size_class]--;
                slots[t->coding[coding].size_class]++;
            }
        }
    return slots;
}

/* Would what is needed (kv->need) fit, with everything as tight as the policy allows? *bytes: what it takes then. */
static int tkvi_fits_at_last(tkv_cache *kv, size_t extra, size_t budget, size_t *bytes) {
    *bytes = tkvi_bytes_with(kv, tkvi_slots_now(kv), extra);
    if (*bytes <= budget) return 1; /* as it is */
    *bytes = tkvi_bytes_with(kv, tkvi_slots_at(kv, kv->policy.cfg.max_level, 0), extra);
    return *bytes <= budget;
}

/* >>work */
/* The oldest block that there is a slot for gets as tight as the level wants it. Returns the bytes won; 0: nothing
 * is to be done at this level. `within`, if not 0: not where the first block of its size would open a page for which
 * there is no room beside what is needed. Others would close pages in turn, but there may be no others. */
static size_t tkvi_tighten_one(tkv_cache *kv, size_t extra, size_t within) {
    tkvi_stale s;
    tkvi_list *list;
    size_t had;
    const int spare = kv->pool.spare;
    if (!tkvi_next_stale(kv, 0, &s)) return 0;
    if (within) {
        int64_t *now = tkvi_slots_now(kv);
        now[kv->tables.coding[kv->pool.block[tkvi_ids(kv, s.seq, s.layer)[s.i]].coding].size_class]--;
        now[kv->tables.coding[s.coding].size_class]++;
        if (tkvi_bytes_with(kv, now, extra) > within) return 0;
    }
    list = tkvi_list_of(kv, s.seq, s.layer);
    had = kv->tables.coding[kv->pool.block[tkvi_ids(kv, s.seq, s.layer)[s.i]].coding].bytes.total;
    if (kv->tables.plan[s.layer].now.shared[s.due] && kv->tables.current[s.layer] < 0) {
        int8_t before; /* a table of what there is: it must get tighter now */
        if (!tkvi_learn_begin(kv, s.layer, 1, &before) || kv->tables.current[s.layer] < 0) return 0;
        tkvi_learn_end(kv, s.layer, before, 1);
        tkvi_tell(kv, TKV_EVENT_TABLE, s.layer, -1, -1, 0, "a table was made early: bytes are needed");
        s.coding = tkvi_coding_of(&kv->tables, s.layer, s.due);
    }
    kv->pool.spare = 0;
    tkvi_demote(kv, s.seq, s.layer, s.i, s.coding, NULL);
    kv->pool.spare = spare;
    tkvi_in_place(list, s.i, s.due);
    kv->recoded[kv->tables.level]++;
    return had - kv->tables.coding[s.coding].bytes.total;
}

/* What the level allows before the next one begins: its threshold of the budget; at level 0 nothing is to be done. */
static size_t tkvi_soft_limit(const tkv_cache *kv) {
    const int level = kv->tables.level;
    if (level == 0) return (size_t)-1;
    return (size_t)((double)kv->tables.cfg.budget_bytes * (double)kv->policy.cfg.threshold[level - 1]);
}

/* Would all that is held fit at the level before, with the threshold less the hysteresis to spare? */
static int tkvi_may_relax(tkv_cache *kv) {
    const int level = kv->tables.level;
    const tkv_policy_config *p = &kv->policy.cfg;
    if (tkvi_in_use(kv) >= kv->relax_at) return 0;
    if ((double)tkvi_bytes_with(kv, tkvi_slots_at(kv, level - 1, 1), 0) <
        (double)kv->tables.cfg.budget_bytes * (double)(p->threshold[level - 1] - p->hysteresis))
        return 1;
    kv->relax_at = tkvi_in_use(kv) - tkvi_in_use(kv) / 16; /* to find out takes a walk over all blocks */
    return 0;
}

/* With each append: the average moves, the level may; and blocks get tighter while more is held than the level
 * allows, as many as the new bytes require, but one at least. */
static void tkvi_keep_pace(tkv_cache *kv, size_t new_bytes, size_t extra) {
    const float own = (float)((double)tkvi_in_use(kv) / (double)kv->tables.cfg.budget_bytes);
    const float pressure = own > kv->outside ? own : kv->outside;
    size_t won = 0, one;
    tkvi_stale s;
    int level = kv->tables.level, target = tkvi_policy_sample(&kv->policy, pressure, level);
    if (target > level && !tkvi_next_stale(kv, 1, &s)) tkvi_go_to_level(kv, level + 1);
    if (target < level && tkvi_may_relax(kv)) tkvi_go_to_level(kv, level - 1);
    level = kv->tables.level;
    while (level > 0 &&
           (tkvi_in_use(kv) > tkvi_soft_limit(kv) || kv->outside > kv->policy.cfg.threshold[level - 1])) {
        one = tkvi_tighten_one(kv, extra, kv->tables.cfg.budget_bytes);
        won += one;
        if (one == 0 || won >= new_bytes) return;
    }
}

/* Room for what is needed (kv->need) and `extra` bytes of index; tkvi_fits_at_last must have said yes. */
static int tkvi_make_room(tkv_cache *kv, size_t extra, size_t budget) {
    for (;;) {
        if (tkvi_bytes_with(kv, tkvi_slots_now(kv), extra) <= budget) {
            tkvi_trim(&kv->pool); /* the index may need what pages have left */
            return 1;
        }
        if (tkvi_tighten_one(kv, extra, 0)) continue;
        if (kv->tables.level >= kv->policy.cfg.max_level) return 0;
        tkvi_go_to_level(kv, kv->tables.level + 1);
    }
}

/* >>public */
TKV_API tkv_status tkv_budget(const tkv_cache *kv, tkv_budget_info *out) {
    int i;
    if (!kv || !out) return TKV_ERR_ARG;
    memset(out, 0, sizeof *out);
    out->budget = kv->tables.cfg.budget_bytes;
    out->used = tkvi_in_use(kv);
    out->peak = kv->heap.peak;
    out->level = kv->tables.level;
    out->n_levels = kv->tables.n_levels;
    out->policy = kv->policy.now;
    for (i = 0; i < TKV_MAX_LEVELS; i++) out->recoded[i] = kv->recoded[i];
    out->demoted = kv->demoted;
    out->refused = kv->refused;
    out->pending = tkvi_lazy(kv) ? tkvi_pending(kv) : 0;
    return TKV_OK;
}

TKV_API tkv_status tkv_set_budget(tkv_cache *kv, size_t bytes) {
    const int n = kv ? kv->tables.n_classes : 0;
    size_t takes;
    if (!kv) return TKV_ERR_ARG;
    if (!kv->tables.spare)
        return tkvi_fail(kv, TKV_ERR_ARG, "the cache was created without a budget", 0, NULL);
    if (kv->pool.keep_all && bytes == 0)
        return tkvi_fail(kv, TKV_ERR_ARG, "in place the budget is the memory that was given", 0, NULL);
    if (kv->pool.keep_all && bytes > kv->heap.held) bytes = kv->heap.held;
    if (bytes == 0) {
        kv->tables.cfg.budget_bytes = kv->heap.limit = 0;
        kv->pool.spare = 0;
        tkvi_trim(&kv->pool);
        return tkvi_ok(kv);
    }
    memset(kv->need, 0, (size_t)n * sizeof *kv->need);
    if (kv->pool.spare == 0) { /* there was none for a while: recoding needs its pages */
        tkvi_peak paper = tkvi_paper(kv);
        kv->pool.spare = kv->tables.spare;
        if (!tkvi_peak_ready(&kv->pool, &paper)) {
            kv->pool.spare = 0;
            return tkvi_fail(kv, TKV_ERR_NOMEM, "the allocator gave no memory for recoding", 0, NULL);
        }
    }
    if (!tkvi_fits_at_last(kv, 0, bytes, &takes)) {
        if (!kv->tables.cfg.budget_bytes) kv->pool.spare = 0;
        tkvi_trim(&kv->pool);
        return tkvi_over_budget(kv, takes);
    }
    kv->tables.cfg.budget_bytes = bytes;
    if (!tkvi_make_room(kv, 0, bytes)) return tkvi_over_budget(kv, takes);
    tkvi_trim(&kv->pool);
    if (kv->pool.keep_all) /* the rest of what is held does not change */
        kv->pool.allowed = (int64_t)((bytes - tkvi_rest(kv)) / kv->tables.page_bytes);
    else kv->heap.limit = bytes;
    kv->relax_at = (size_t)-1;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_set_level(tkv_cache *kv, int level) {
    if (!kv) return TKV_ERR_ARG;
    if (level < kv->policy.cfg.min_level || level > kv->policy.cfg.max_level)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no level", level, " within cfg.policy");
    tkvi_go_to_level(kv, level);
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_set_hot_tokens(tkv_cache *kv, int hot_tokens) {
    size_t i, n;
    if (!kv) return TKV_ERR_ARG;
    if (hot_tokens < 1 || hot_tokens >= TKVI_FOREVER)
        return tkvi_fail(kv, TKV_ERR_ARG, "hot_tokens is", hot_tokens, "; it must be 1 to 2^30 - 2");
    if (kv->pool.keep_all && !tkvi_lazy(kv))
        return tkvi_fail(kv, TKV_ERR_ARG, "in place and without a budget lengths are fixed", 0, NULL);
    n = (size_t)kv->tables.cfg.n_layers * (size_t)kv->tables.n_levels;
    for (i = 0; i < n; i++)
        if (kv->tables.rule[i].hot != TKVI_FOREVER) kv->tables.rule[i].hot = hot_tokens;
    tkvi_take_level(&kv->tables, kv->tables.level);
    for (i = 0; i < (size_t)kv->tables.cfg.max_seqs * (size_t)kv->tables.cfg.n_layers; i++)
        kv->list[i].tight = kv->list[i].tightest = 0;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_maintain(tkv_cache *kv, int max_work, int *done) {
    int n = 0;
    if (!kv || max_work < 0) return TKV_ERR_ARG;
    memset(kv->need, 0, (size_t)kv->tables.n_classes * sizeof *kv->need);
    while (tkvi_lazy(kv) && kv->tables.level > 0 && n < max_work &&
           tkvi_in_use(kv) > tkvi_soft_limit(kv) - tkvi_soft_limit(kv) / 10 &&
           tkvi_tighten_one(kv, 0, kv->tables.cfg.budget_bytes))
        n++;
    tkvi_trim(&kv->pool);
    if (done) *done = n;
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_observe(tkv_cache *kv, float pressure) {
    if (!kv) return TKV_ERR_ARG;
    if (!tkvi_is_finite(pressure)) return tkvi_fail(kv, TKV_ERR_ARG, "pressure is not a number", 0, NULL);
    kv->outside = tkvi_clampf(pressure, 0.0f, 1.0f);
    return tkvi_ok(kv);
}

#endif /* TKVI_BUDGET_H */
/* ======== sequence.h ======== */
/*
 * sequence.h - tokens come, grow old, are cut, are gone: append, steps, reserve, truncate, reset, flush.
 * May call budget and below.
 *
 * Every change is first played through on paper (tkvi_peak: which slots would be taken and given back, in
 * order), then memory for its peak is fetched, then it is done; after the fetch nothing can fail. So a
 * failed call leaves the cache as it was.
 */
#ifndef TKVI_SEQUENCE_H
#define TKVI_SEQUENCE_H


/* Slots of a class that tkv_reserve holds for a sequence. */
static int64_t *tkvi_promised(tkv_cache *kv, int seq, int size_class) {
    return &kv->promised[(size_t)seq * (size_t)kv->tables.n_classes + (size_t)size_class];
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
    for (i = 0; i < blocks; i++) tkvi_peak_take(paper, i < sink ? p->sink_coding : p->now.coding[TKV_HOT]);
}

/* >>reservations */
/* Blocks of each tier that a list may still grow by, if all coded ones are whole (none was flushed short). */
static void tkvi_headroom(const tkv_cache *kv, const tkvi_plan *p, const tkvi_list *list, const uint32_t *ids,
                          int64_t *room) {
    int i, whole = 1;
    tkvi_most_blocks(&kv->tables.cfg, p, room);
    if (tkvi_plan_learns(p)) { /* some may have had to wait for a table */
        room[TKV_HOT] += TKVI_LEARN / TKVI_BLOCK;
        room[TKV_WARM] += TKVI_LEARN / TKVI_BLOCK;
    }
    for (i = list->sinks; i < list->n; i++) {
        tkv_tier tier = tkvi_tier_at(list, i);
        room[tier] -= kv->pool.block[ids[i]].refs == 1; /* the slots of shared ones do not come back */
        if (tier != TKV_HOT)
            whole &= tkvi_block_end(kv, list, ids, i) - tkvi_block_start(kv, ids, i) == TKVI_BLOCK;
    }
    for (i = 0; i < TKV_TIER_COUNT && (!whole || tkvi_lazy(kv)); i++) room[i] = TKVI_FOREVER;
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
        due = tkvi_tier_due(&p->now, tkvi_hot_age(kv, layer),
                            i + 1 < list->n ? tkvi_block_end(kv, list, ids, i) : at, len);
        need[TKV_WARM] += due != TKV_HOT && (i >= list->n || tkvi_tier_at(list, i) == TKV_HOT);
        need[TKV_ARCHIVE] += due == TKV_ARCHIVE;
    }
    tkvi_headroom(kv, p, list, ids, room);
    if (sink) live[coding[p->sink_coding].size_class] += sign;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        if (need[tier] > room[tier]) need[tier] = room[tier];
        if (need[tier] > 0) live[coding[p->now.coding[tier]].size_class] += sign * need[tier];
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
    if (!s->in_step) tkvi_age(kv, seq, layer, tkvi_hot_age(kv, layer), 0, paper);
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

/* 16 at a time, which compilers make vectors of: one more in the exponent of what is not finite, and it overflows. */
static int tkvi_all_finite(const float *x, int n) {
    uint32_t bits[16], some[16] = {0}, any = 0;
    int i, k;
    for (i = 0; i < n; i += 16) {
        memset(bits, 0, sizeof bits);
        memcpy(bits, x + i, (size_t)tkvi_min(16, n - i) * sizeof *x);
        for (k = 0; k < 16; k++) some[k] |= (bits[k] & 0x7fffffffu) + 0x800000u;
    }
    for (k = 0; k < 16; k++) any |= some[k];
    return !(any >> 31);
}

static int tkvi_source_finite(const tkvi_source *s, int n, int heads) {
    float row[TKV_MAX_HEAD_DIM];
    int t, h, finite = 1;
    for (t = 0; t < n; t++)
        for (h = 0; h < heads; h++) {
            tkvi_load_row(s, t, h, row);
            finite &= tkvi_all_finite(row, s->dim);
        }
    return finite;
}

static float tkvi_saturate(float x) {
    if (tkvi_is_finite(x)) return x;
    if (tkvi_bits(x) & 0x7fffffu) return 0.0f; /* NaN */
    return tkvi_bits(x) >> 31 ? -TKVI_F16_MAX : TKVI_F16_MAX;
}

static void tkvi_store_row(const tkvi_side *side, const tkvi_helpers *help, const tkvi_source *s, int token,
                           int head, int at, int saturate, uint8_t *dst) {
    float row[TKV_MAX_HEAD_DIM];
    int c;
    tkvi_load_row(s, token, head, row);
    for (c = 0; saturate && c < s->dim; c++) row[c] = tkvi_saturate(row[c]);
    side->format->side[side->which].put(side, help, row, at, dst);
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
                   kv->tables.coding[kv->pool.block[id].coding].bytes.total);
            kv->pool.block[id].refs--;
            ids[list->n - 1] = id = mine;
        }
        return id;
    }
    {
        int sink = list->len == 0 && p->sink > 0, coding = sink ? p->sink_coding : p->now.coding[TKV_HOT];
        id = tkvi_new_block(&kv->pool, coding, list->len);
        memset(tkvi_block_bytes(&kv->pool, &kv->pool.block[id]), 0, kv->tables.coding[coding].bytes.total);
        list->sinks += sink;
        ids[list->n++] = id;
        return id;
    }
}

static void tkvi_store(tkv_cache *kv, int seq, int layer, const tkvi_source *k, const tkvi_source *v,
                       int first, int n) {
    tkvi_list *list = tkvi_list_of(kv, seq, layer);
    int t, h, saturate = kv->tables.cfg.nonfinite == TKV_NONFINITE_SATURATE;
    if (!kv->seq[seq].in_step) list->chunk = list->len;
    for (t = 0; t < n; t++) {
        const tkvi_block *b = &kv->pool.block[tkvi_open_block(kv, seq, layer)];
        const tkvi_coding *c = &kv->tables.coding[b->coding];
        uint8_t *bytes = tkvi_block_bytes(&kv->pool, b);
        int at = list->len - b->start;
        for (h = 0; h < kv->tables.cfg.n_kv_heads; h++) {
            const tkvi_record *r = &c->record[h];
            tkvi_store_row(&r->k, kv->kernels->helpers, k, first + t, h, at, saturate, bytes + r->at);
            tkvi_store_row(&r->v, kv->kernels->helpers, v, first + t, h, at, saturate,
                           bytes + r->at + r->v_at);
        }
        list->len++;
    }
}

/* The meter has nobody, and this sequence begins: it is watched from now on. */
static void tkvi_watch(tkv_cache *kv, int seq) {
    int layer, len = 0;
    if (!kv->meter || kv->meter->seq >= 0) return;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) len |= tkvi_list_of(kv, seq, layer)->len;
    if (len == 0) kv->meter->seq = seq;
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

/* An append on paper. */
static tkvi_peak tkvi_paper_rows(tkv_cache *kv, int layer, const tkv_rows *rows, int n_rows) {
    tkvi_peak paper = tkvi_paper(kv);
    int i;
    for (i = 0; i < n_rows; i++)
        if (rows[i].n) tkvi_paper_row(kv, rows[i].seq, layer, rows[i].n, &paper);
    return paper;
}

/* Under a budget: what is due with this append, and room for it. 0: it does not fit, and nothing has changed. */
static int tkvi_room_for_rows(tkv_cache *kv, int layer, const tkv_rows *rows, int n_rows,
                              const tkvi_peak *paper, size_t *takes) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    const size_t budget = kv->tables.cfg.budget_bytes;
    size_t index = tkvi_index_growth(kv, paper), opened = 0;
    int i, sink;
    for (i = 0; i < n_rows; i++) {
        tkvi_list *list = tkvi_list_of(kv, rows[i].seq, layer);
        const uint32_t *ids = tkvi_ids(kv, rows[i].seq, layer);
        if (rows[i].n == 0) continue;
        index += tkvi_list_growth(kv, rows[i].seq, tkvi_list_want(kv, rows[i].seq, layer, rows[i].n));
        opened += (size_t)tkvi_new_blocks(kv, p, list, ids, rows[i].n, &sink) *
                  kv->tables.coding[p->now.coding[TKV_HOT]].bytes.total;
    }
    for (i = 0; i < n_rows; i++) { /* what came before may get tighter now */
        tkvi_list *list = tkvi_list_of(kv, rows[i].seq, layer);
        if (!kv->seq[rows[i].seq].in_step) list->chunk = list->len;
    }
    tkvi_need_of(kv, paper);
    if (!tkvi_fits_at_last(kv, index, budget, takes)) return 0;
    tkvi_keep_pace(kv, opened, index);
    return tkvi_make_room(kv, index, budget);
}

TKV_API tkv_status tkv_append_ex(tkv_cache *kv, const tkv_append_params *p) {
    const tkv_config *cfg;
    tkv_rows one;
    const tkv_rows *rows;
    tkvi_source k, v;
    tkvi_peak paper;
    int8_t had;
    tkv_status st;
    int n_rows, i, total, open, first = 0;
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
    for (i = 0, open = 0; i < n_rows; i++) open |= kv->seq[rows[i].seq].in_step;
    had = kv->tables.current[p->layer];
    if (!open && !tkvi_learn_begin(kv, p->layer, 0, &had)) goto no_memory;
    paper = tkvi_paper_rows(kv, p->layer, rows, n_rows);
    if (tkvi_lazy(kv)) {
        size_t takes;
        tkvi_learn_end(kv, p->layer, had, 1); /* blocks may go by it at once */
        had = kv->tables.current[p->layer];
        if (!tkvi_room_for_rows(kv, p->layer, rows, n_rows, &paper, &takes)) {
            tkvi_learn_end(kv, p->layer, had, 0);
            return tkvi_over_budget(kv, takes);
        }
        paper = tkvi_paper_rows(kv, p->layer, rows, n_rows);
    }
    for (i = 0; i < n_rows; i++)
        if (rows[i].n &&
            !tkvi_grow_lists(kv, rows[i].seq, tkvi_list_want(kv, rows[i].seq, p->layer, rows[i].n)))
            goto no_memory;
    if (!tkvi_peak_ready(&kv->pool, &paper)) goto no_memory;
    tkvi_learn_end(kv, p->layer, had, 1);
    if (!open) tkvi_metric_learn(kv, p->layer);
    for (i = 0; i < n_rows; i++) {
        if (rows[i].n == 0) continue;
        tkvi_watch(kv, rows[i].seq);
        if (!kv->seq[rows[i].seq].in_step)
            tkvi_age(kv, rows[i].seq, p->layer, tkvi_hot_age(kv, p->layer), 0, NULL);
        tkvi_store(kv, rows[i].seq, p->layer, &k, &v, first, rows[i].n);
        first += rows[i].n;
    }
    if (kv->seen && kv->seen[p->layer] >= 0)
        kv->seen[p->layer] =
            tkvi_min(TKVI_FOREVER, kv->seen[p->layer] + total); /* an abort takes its part back */
    tkvi_metric_count(kv, p->layer, total);
    for (i = 0; i < n_rows; i++) tkvi_settle(kv, rows[i].seq); /* not before: the batch shares its pages */
    return tkvi_ok(kv);
no_memory:
    tkvi_learn_end(kv, p->layer, had, 0);
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
static int tkvi_ages(const tkv_cache *kv, int seq, int layer) {
    return kv->tables.plan[layer].stored == layer && tkvi_list_of(kv, seq, layer)->n > 0;
}

static tkv_status tkvi_age_all(tkv_cache *kv, int seq, int flush, int partial) {
    int8_t had[TKVI_MAX_LAYERS];
    tkvi_peak paper;
    int layer, pass, n = kv->tables.cfg.n_layers, ready = 1;
    for (layer = 0; layer < n; layer++) {
        had[layer] = kv->tables.current[layer];
        if (ready && tkvi_ages(kv, seq, layer)) ready = tkvi_learn_begin(kv, layer, flush, &had[layer]);
    }
    paper = tkvi_paper(kv);
    for (layer = 0; layer < n; layer++) tkvi_add_need(kv, seq, layer, -1, paper.live);
    for (pass = 0; pass < 2 && ready; pass++) {
        for (layer = 0; layer < n && kv->seq[seq].block; layer++)
            if (kv->tables.plan[layer].stored == layer)
                tkvi_age(kv, seq, layer,
                         flush && kv->tables.plan[layer].now.hot != TKVI_FOREVER ? 0
                                                                                 : tkvi_hot_age(kv, layer),
                         partial, pass ? NULL : &paper);
        if (pass) continue;
        ready = tkvi_peak_ready(&kv->pool, &paper);
        for (layer = 0; layer < n; layer++) {
            tkvi_learn_end(kv, layer, had[layer], ready);
            if (ready && tkvi_ages(kv, seq, layer)) tkvi_metric_learn(kv, layer);
        }
    }
    for (layer = 0; layer < n && !pass; layer++) tkvi_learn_end(kv, layer, had[layer], 0);
    if (!ready)
        return tkvi_fail(kv, kv->pool.keep_all ? TKV_ERR_CAPACITY : TKV_ERR_NOMEM,
                         "no memory to recode blocks", 0, NULL);
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
        list->step_len = list->chunk = list->len;
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
    list->chunk = tkvi_min(list->chunk, len);
}

TKV_API tkv_status tkv_abort(tkv_cache *kv, int seq) {
    int layer;
    if (!tkvi_seq_ok(kv, seq)) return tkvi_seq_bad(kv, seq);
    if (!kv->seq[seq].in_step) return tkvi_fail(kv, TKV_ERR_STATE, "no step is open", 0, NULL);
    kv->seq[seq].in_step = 0;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        const tkvi_list *list = tkvi_list_of(kv, seq, layer);
        int n = list->len - list->step_len;
        if (n <= 0) continue;
        if (kv->seen && kv->seen[layer] > 0) kv->seen[layer] = tkvi_max(0, kv->seen[layer] - n);
        if (kv->ears && kv->ears[layer].tokens > 0)
            kv->ears[layer].tokens = tkvi_max(0, kv->ears[layer].tokens - n);
        tkvi_cut(kv, seq, layer, list->step_len);
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
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) /* the first table can be due; others wait */
        if (kv->seen && kv->seen[layer] >= 0 && kv->tables.current[layer] < 0 && !tkvi_version_ready(kv, 0))
            goto no_memory;
    had = kv->seq[seq].reserved_len;
    tkvi_promise(kv, seq, tkvi_max(had, len + n));
    paper = tkvi_paper(kv);
    if (tkvi_lazy(kv)) {
        const size_t index = tkvi_index_growth(kv, &paper), budget = kv->tables.cfg.budget_bytes;
        size_t takes;
        tkvi_need_of(kv, &paper);
        if (!tkvi_fits_at_last(kv, index, budget, &takes) || !tkvi_make_room(kv, index, budget)) {
            tkvi_promise(kv, seq, had);
            tkvi_trim(&kv->pool);
            return tkvi_over_budget(kv, takes);
        }
        paper = tkvi_paper(kv);
    }
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
    if (kv->meter && kv->meter->seq == seq) tkvi_meter_clear(kv->meter);
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
    const tkvi_helpers *help;
    const tkvi_list *list;
    const uint32_t *ids;
    int i, h;
    layer = tkvi_stored_layer(kv, seq, layer);
    if (layer < 0 || start < 0 || n < 0) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    help = kv->kernels->helpers;
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
                tkvi_values(&r->k, help, bytes + r->at, from - b->start, to - from,
                            k + (row + (size_t)h) * dk, heads * dk);
            if (v)
                tkvi_values(&r->v, help, bytes + r->at + r->v_at, from - b->start, to - from,
                            v + (row + (size_t)h) * dv, heads * dv);
        }
    }
    return TKV_OK;
}

#endif /* TKVI_SEQUENCE_H */
/* ======== calibration.h ======== */
/*
 * calibration.h - the tables of learn.h from outside: save, load, freeze, refresh. What is saved is what was learned of
 * the model, not which bits follow from it: a calibration made with one plan serves any other.
 *
 *   "TKVC" | version 1 | n_layers | n_kv_heads | head_dim | v_head_dim          u32 each, little-endian, as all numbers
 *   layer:  u32 what there is: 1 for A and R formats, 2 for KVQUANT, 3 for both, 0 for nothing
 *           1: for each head  i16 reach | i16 weight of K | i8 top of K | i8 top of V
 *              u8 channel at each position [head_dim] | u8 its importance | fp16 its mean
 *           2: drawn in kvquant.h
 *   u64 FNV-1a of all bytes before
 *
 * May call learn and below.
 */
#ifndef TKVI_CALIBRATION_H
#define TKVI_CALIBRATION_H


#define TKVI_CALIBRATION_HEAD 24 /* bytes before the first layer */

static size_t tkvi_head_bytes(const tkv_config *cfg) { return 6u + 4u * (size_t)cfg->head_dim; }

static uint64_t tkvi_fnv1a(const uint8_t *p, size_t n) { return tkvi_fnv1a_more(TKVI_FNV1A_START, p, n); }

static int tkvi_layer_learns(const tkv_cache *kv, int layer) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    return p->stored == layer && tkvi_plan_learns(p);
}

static int tkvi_has_table(const tkv_cache *kv, int layer) {
    return tkvi_layer_learns(kv, layer) && kv->tables.current[layer] >= 0;
}

TKV_API int tkv_calibrated_layers(const tkv_cache *kv) {
    int layer, n = 0;
    for (layer = 0; kv && layer < kv->tables.cfg.n_layers; layer++) n += tkvi_has_table(kv, layer);
    return n;
}

/* What the layer's table has, or would have: as in the bytes. */
static int tkvi_table_parts(const tkv_cache *kv, int layer) {
    const tkvi_plan *p = &kv->tables.plan[layer];
    return tkvi_layer_learns(kv, layer) ? p->allocates | p->kvquant << 1 : 0;
}

static size_t tkvi_parts_bytes(const tkv_config *cfg, int parts) {
    return (parts & 1 ? (size_t)cfg->n_kv_heads * tkvi_head_bytes(cfg) : 0u) +
           (parts & 2 ? tkvi_kvquant_bytes(cfg) : 0u);
}

/* >>saving */
TKV_API tkv_status tkv_calibration_save(const tkv_cache *kv, void *dst, size_t size, size_t *bytes) {
    const tkv_config *cfg;
    uint8_t *at = (uint8_t *)dst;
    uint64_t sum;
    size_t need;
    int layer, head, i;
    if (!kv || !bytes) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    need = TKVI_CALIBRATION_HEAD + 4u * (size_t)cfg->n_layers + 8u;
    for (layer = 0; layer < cfg->n_layers; layer++)
        if (tkvi_has_table(kv, layer)) need += tkvi_parts_bytes(cfg, tkvi_table_parts(kv, layer));
    *bytes = need;
    if (!dst) return TKV_OK;
    if (size < need) return TKV_ERR_ARG;
    memcpy(at, "TKVC", 4);
    tkvi_store32(at + 4, 1);
    tkvi_store32(at + 8, (uint32_t)cfg->n_layers);
    tkvi_store32(at + 12, (uint32_t)cfg->n_kv_heads);
    tkvi_store32(at + 16, (uint32_t)cfg->head_dim);
    tkvi_store32(at + 20, (uint32_t)cfg->v_head_dim);
    at += TKVI_CALIBRATION_HEAD;
    for (layer = 0; layer < cfg->n_layers; layer++) {
        int has = tkvi_has_table(kv, layer) ? tkvi_table_parts(kv, layer) : 0;
        tkvi_store32(at, (uint32_t)has);
        at += 4;
        for (head = 0; (has & 1) && head < cfg->n_kv_heads; head++) {
            const tkvi_head *h = &tkvi_heads_of(&kv->tables, layer, kv->tables.current[layer])[head];
            tkvi_store16(at, (uint16_t)h->reach);
            tkvi_store16(at + 2, (uint16_t)h->k_weight);
            at[4] = (uint8_t)h->k_top;
            at[5] = (uint8_t)h->v_top;
            at += 6;
            memcpy(at, h->order, (size_t)cfg->head_dim);
            memcpy(at + cfg->head_dim, h->importance, (size_t)cfg->head_dim);
            at += 2 * cfg->head_dim;
            for (i = 0; i < cfg->head_dim; i++, at += 2) tkvi_store16(at, tkvi_f32_to_f16(h->mean[i]));
        }
        if (has & 2) {
            tkvi_kvquant_save(&kv->tables, layer, kv->tables.current[layer], at);
            at += tkvi_kvquant_bytes(cfg);
        }
    }
    sum = tkvi_fnv1a((const uint8_t *)dst, need - 8u);
    tkvi_store32(at, (uint32_t)sum);
    tkvi_store32(at + 4, (uint32_t)(sum >> 32));
    return TKV_OK;
}

/* >>loading */
static int tkvi_signed16(uint16_t x) { return x < 32768 ? x : x - 65536; }

/* One head's bytes: every channel once, importance falling and not 0, numbers in range. */
static int tkvi_head_valid(const tkv_config *cfg, const uint8_t *at) {
    const uint8_t *order = at + 6, *importance = order + cfg->head_dim, *mean = importance + cfg->head_dim;
    uint8_t seen[TKV_MAX_HEAD_DIM];
    int i, k_top = tkvi_signed_byte(at[4]), v_top = tkvi_signed_byte(at[5]);
    memset(seen, 0, sizeof seen);
    if (k_top < -TKVI_LOG_TOP || k_top > TKVI_LOG_TOP || v_top < -TKVI_LOG_TOP || v_top > TKVI_LOG_TOP)
        return 0;
    for (i = 0; i < 2; i++) {
        int weight = tkvi_signed16(tkvi_load16(at + 2 * i));
        if (weight < 4 * TKVI_LOG8_NONE || weight > -4 * TKVI_LOG8_NONE) return 0;
    }
    for (i = 0; i < cfg->head_dim; i++) {
        if (order[i] >= cfg->head_dim || seen[order[i]]++) return 0;
        if (importance[i] == 0 || (i && importance[i] > importance[i - 1])) return 0;
        if ((tkvi_load16(mean + 2 * i) & 0x7c00u) == 0x7c00u) return 0;
    }
    return 1;
}

/* Are these bytes a calibration for this cache? Returns the reason if not. */
static const char *tkvi_calibration_wrong(const tkv_cache *kv, const uint8_t *src, size_t size) {
    const tkv_config *cfg = &kv->tables.cfg;
    const uint8_t *at, *end;
    uint64_t sum;
    int layer, head;
    if (size < TKVI_CALIBRATION_HEAD + 8u || memcmp(src, "TKVC", 4) != 0)
        return "these bytes are no calibration";
    if (tkvi_load32(src + 4) != 1) return "the calibration is of another version";
    at = src + TKVI_CALIBRATION_HEAD;
    end = src + size - 8;
    sum = tkvi_load32(end) | (uint64_t)tkvi_load32(end + 4) << 32;
    if (tkvi_fnv1a(src, size - 8) != sum) return "the calibration was damaged: its checksum is wrong";
    if (tkvi_load32(src + 8) != (uint32_t)cfg->n_layers ||
        tkvi_load32(src + 12) != (uint32_t)cfg->n_kv_heads ||
        tkvi_load32(src + 16) != (uint32_t)cfg->head_dim ||
        tkvi_load32(src + 20) != (uint32_t)cfg->v_head_dim)
        return "the calibration is of another model: layers, KV heads or head_dim differ";
    for (layer = 0; layer < cfg->n_layers; layer++) {
        uint32_t has;
        if (end - at < 4) return "the calibration ends too early";
        has = tkvi_load32(at);
        at += 4;
        if (has > 3) return "the calibration has a layer that it cannot have";
        for (head = 0; (has & 1) && head < cfg->n_kv_heads; head++) {
            if ((size_t)(end - at) < tkvi_head_bytes(cfg)) return "the calibration ends too early";
            if (!tkvi_head_valid(cfg, at)) return "a head of the calibration makes no sense";
            at += tkvi_head_bytes(cfg);
        }
        if (has & 2) {
            if ((size_t)(end - at) < tkvi_kvquant_bytes(cfg)) return "the calibration ends too early";
            if (!tkvi_kvquant_valid(cfg, at)) return "ranges or levels of the calibration make no sense";
            if ((tkvi_table_parts(kv, layer) & 2) &&
                (tkvi_load32(at) | (uint64_t)tkvi_load32(at + 4) << 32) != tkvi_kvquant_mode(&kv->tables))
                return "the calibration was made with another cfg.rope or cfg.kvquant";
            at += tkvi_kvquant_bytes(cfg);
        }
    }
    return at == end ? NULL : "the calibration is longer than it should be";
}

static void tkvi_head_load(tkv_cache *kv, int layer, int version, int head, const uint8_t *at) {
    const tkv_config *cfg = &kv->tables.cfg;
    size_t pad = (size_t)tkvi_round_up(cfg->head_dim, 16);
    const tkvi_version *to = &kv->tables.version[version];
    size_t n = (size_t)layer * (size_t)cfg->n_kv_heads + (size_t)head;
    tkvi_head *h = &to->head[n];
    size_t i, dim = (size_t)cfg->head_dim;
    h->reach = tkvi_signed16(tkvi_load16(at));
    h->k_weight = tkvi_signed16(tkvi_load16(at + 2));
    h->k_top = tkvi_signed_byte(at[4]);
    h->v_top = tkvi_signed_byte(at[5]);
    at += 6;
    for (i = 0; i < pad; i++) {
        to->channel[n * pad + i] = i < dim ? at[i] : (uint8_t)i;
        to->importance[n * pad + i] = i < dim ? at[dim + i] : (uint8_t)0;
        to->mean[n * pad + i] = i < dim ? tkvi_f16_to_f32(tkvi_load16(at + 2 * dim + 2 * i)) : 0.0f;
    }
}

/* No sequence may be in a step: an abort would not take the tables back. */
static tkv_status tkvi_between_steps(tkv_cache *kv) {
    int seq;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++)
        if (kv->seq[seq].in_step)
            return tkvi_fail(kv, TKV_ERR_STATE, "a step is open in sequence", seq,
                             "; commit or abort it first");
    return TKV_OK;
}

/* A version for a new table of this layer. */
static tkv_status tkvi_version_for(tkv_cache *kv, int layer, int *version) {
    *version = tkvi_free_version(kv, layer);
    if (*version < 0)
        return tkvi_fail(kv, TKV_ERR_CAPACITY, "blocks use every version of the table of layer", layer,
                         "; reset the sequences that hold the oldest");
    return tkvi_version_ready(kv, *version) ? TKV_OK : tkvi_no_table(kv);
}

TKV_API tkv_status tkv_calibration_load(tkv_cache *kv, const void *src, size_t size) {
    const uint8_t *at;
    const char *wrong;
    tkv_status st;
    int layer, head, version = 0, pass;
    if (!kv) return TKV_ERR_ARG;
    if (!src) return tkvi_fail(kv, TKV_ERR_ARG, "the calibration is missing", 0, NULL);
    st = tkvi_between_steps(kv);
    if (st) return st;
    wrong = tkvi_calibration_wrong(kv, (const uint8_t *)src, size);
    if (wrong) return tkvi_fail(kv, TKV_ERR_DATA, wrong, 0, NULL);
    for (pass = 0; pass < 2; pass++) { /* memory first */
        at = (const uint8_t *)src + TKVI_CALIBRATION_HEAD;
        for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
            int has = (int)tkvi_load32(at), need = tkvi_table_parts(kv, layer), use;
            use = need && (has & need) == need; /* of both things or none */
            at += 4;
            if (use && (st = tkvi_version_for(kv, layer, &version)) != TKV_OK) return st;
            for (head = 0; pass && use && (need & 1) && head < kv->tables.cfg.n_kv_heads; head++)
                tkvi_head_load(kv, layer, version, head,
                               at + (size_t)head * tkvi_head_bytes(&kv->tables.cfg));
            if (pass && use && (need & 2))
                tkvi_kvquant_load(&kv->tables, layer, version,
                                  at + tkvi_parts_bytes(&kv->tables.cfg, has & 1));
            at += tkvi_parts_bytes(&kv->tables.cfg, has);
            if (!pass || !use) continue;
            tkvi_table_use(kv, layer, version);
            tkvi_learned(kv, layer, 0);
        }
    }
    return tkvi_ok(kv);
}

/* >>from samples */
static int tkvi_samples_finite(const float *x, size_t n, int positive) {
    size_t i;
    for (i = 0; x && i < n; i++)
        if (!tkvi_is_finite(x[i]) || (positive && x[i] < 0.0f)) return 0;
    return 1;
}

TKV_API tkv_status tkv_calibration_fit(tkv_cache *kv, const tkv_samples *s) {
    const tkv_config *cfg;
    tkvi_tokens_of from;
    tkv_status st;
    size_t rows;
    int version;
    if (!kv) return TKV_ERR_ARG;
    cfg = &kv->tables.cfg;
    if (!s || !s->k || !s->v) return tkvi_fail(kv, TKV_ERR_ARG, "the samples are missing", 0, NULL);
    if (s->layer < 0 || s->layer >= cfg->n_layers)
        return tkvi_fail(kv, TKV_ERR_ARG, "there is no layer", s->layer, "");
    if (tkvi_table_parts(kv, s->layer) != 2)
        return tkvi_fail(kv, TKV_ERR_ARG, "samples are for layers with KVQUANT formats, without A and R; not",
                         s->layer, "");
    if (s->n < 1 || s->n > 1 << 18) return tkvi_fail(kv, TKV_ERR_ARG, "n is", s->n, "; it must be 1 to 2^18");
    if (s->start < 0 || s->length < 0 || s->start > TKVI_FOREVER + 1 - s->n)
        return tkvi_fail(kv, TKV_ERR_ARG, "start and length must be positions, not", s->start, "");
    st = tkvi_between_steps(kv);
    if (st) return st;
    rows = (size_t)s->n * (size_t)cfg->n_kv_heads;
    if (!tkvi_samples_finite(s->k, rows * (size_t)cfg->head_dim, 0) ||
        !tkvi_samples_finite(s->v, rows * (size_t)cfg->v_head_dim, 0) ||
        !tkvi_samples_finite(s->k_weight, rows * (size_t)cfg->head_dim, 1) ||
        !tkvi_samples_finite(s->v_weight, rows * (size_t)cfg->v_head_dim, 1))
        return tkvi_fail(kv, TKV_ERR_NONFINITE,
                         "there is a NaN, an infinity or a negative weight in the samples", 0, NULL);
    st = tkvi_version_for(kv, s->layer, &version);
    if (st) return st;
    from.kv = kv;
    from.samples = s;
    from.layer = s->layer;
    tkvi_kvquant_learn_from(&from, version);
    tkvi_table_use(kv, s->layer, version);
    tkvi_learned(kv, s->layer, 0);
    return tkvi_ok(kv);
}

/* >>freeze and refresh */
TKV_API tkv_status tkv_calibration_freeze(tkv_cache *kv) {
    tkv_status st;
    int layer, none = 0;
    if (!kv) return TKV_ERR_ARG;
    st = tkvi_between_steps(kv);
    if (st) return st;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++)
        if (tkvi_layer_learns(kv, layer) && !tkvi_has_table(kv, layer)) {
            none = 1;
            if (tkvi_held(kv, layer) < 1)
                return tkvi_fail(kv, TKV_ERR_STATE, "there is nothing to learn from yet in layer", layer, "");
        }
    if (none && !tkvi_version_ready(kv, 0)) return tkvi_no_table(kv);
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        int8_t had;
        if (!tkvi_layer_learns(kv, layer)) continue;
        if (!tkvi_has_table(kv, layer) && tkvi_learn_begin(kv, layer, 1, &had))
            tkvi_learn_end(kv, layer, had, 1);
        tkvi_learned(kv, layer, 0);
    }
    return tkvi_ok(kv);
}

TKV_API tkv_status tkv_calibration_refresh(tkv_cache *kv) {
    tkv_status st;
    int layer;
    if (!kv) return TKV_ERR_ARG;
    st = tkvi_between_steps(kv);
    if (!st && !tkvi_heard_get(kv, &kv->heap)) st = tkvi_no_table(kv);
    for (layer = 0; !st && layer < kv->tables.cfg.n_layers; layer++) {
        if (tkvi_layer_learns(kv, layer) && tkvi_has_table(kv, layer)) tkvi_learned(kv, layer, 1);
        tkvi_metric_restart(kv, layer);
    }
    return st ? st : tkvi_ok(kv);
}

#endif /* TKVI_CALIBRATION_H */
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
 * additions here and not there). Where every sequence brings many queries, units are tiles of 32 rows, if the
 * instruction set has kernels for them (>>many), and no thread gets less than one.
 *
 * Scores are relative to a reference key (what recent keys share): see kernels.h. `origin` = scale q.ref brings the
 * absolute logit back where it matters: softcap, learned sinks, log-sum-exp.
 */
#ifndef TKVI_ATTEND_H
#define TKVI_ATTEND_H


/* >>the call, checked and with defaults filled in */
typedef struct tkvi_call {
    tkv_cache *kv;
    const tkv_attend_params *p;
    const tkvi_plan *plan; /* of the layer asked for: its window; the blocks are those of plan->stored */
    const tkv_rows *rows;
    tkv_rows one;
    int n_rows, window;
    int heads_per_kv;
    const tkvi_many *many; /* NULL: tiles of TKVI_ROWS rows */
    int tile;              /* rows of a unit */
    float scale;
    ptrdiff_t q_row, q_head, out_row, out_head, mask_stride, bits_stride, mass_stride;
    int listen; /* statistics of this layer are wanted (learn.h) */
    int metric; /* its queries are (metric.h) */
    int meter;  /* the quality meter watches a head of it (meter.h) */
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
    c->listen = kv->tables.plan[c->plan->stored].allocates && kv->seen[c->plan->stored] >= 0;
    c->metric = kv->tables.plan[c->plan->stored].squat && kv->ears[c->plan->stored].tokens >= 0;
    for (i = 0; kv->meter && i < kv->meter->n; i++) c->meter |= kv->meter->gauge[i].layer == c->plan->stored;
    c->heads_per_kv = cfg->n_heads / cfg->n_kv_heads;
    c->tile = TKVI_ROWS;
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
    int chunk, n_chunks;   /* blocks per part, parts */
    int low, high;         /* positions that any row sees: low .. high-1 */
    int all_low, all_high; /* those that all rows see */
    int changes;           /* scores are more than products: softcap, ALiBi, masks */
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
    return (n_queries * c->heads_per_kv + c->tile - 1) / c->tile;
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
    u->first = tile * c->tile;
    u->rows = tkvi_min(c->tile, u->n_queries * c->heads_per_kv - u->first);
    u->k_pad = tkvi_round_up(cfg->head_dim, 16);
    u->v_pad = tkvi_round_up(cfg->v_head_dim, 16);
    u->chunk = tkvi_max(TKVI_MIN_CHUNK, (u->list->n + TKVI_MAX_CHUNKS - 1) / TKVI_MAX_CHUNKS);
    u->n_chunks = (u->list->n + u->chunk - 1) / u->chunk;
    u->low = u->all_high = u->list->len;
    u->high = u->all_low = 0;
    u->changes = c->p->softcap > 0.0f || c->p->alibi || c->p->mask || c->p->mask_bits;
    for (r = 0; r < u->rows; r++) {
        int low, high;
        tkvi_visible(u, tkvi_query_of(u, r), &low, &high);
        u->low = tkvi_min(u->low, low);
        u->high = tkvi_max(u->high, high);
        u->all_low = tkvi_max(u->all_low, low);
        u->all_high = tkvi_min(u->all_high, high);
    }
}

/* Query rows of a unit, scaled, padded; the reference key and each row's origin. */
typedef struct tkvi_queries {
    float q[TKVI_ROWS * TKV_MAX_HEAD_DIM];
    float ref[TKV_MAX_HEAD_DIM];
    float origin[TKVI_ROWS];
    const uint8_t
        *order; /* the order of channels in `sorted`: [rows + 1][k_pad], the reference last; NULL: none */
    float sorted[(TKVI_ROWS + 1) * TKV_MAX_HEAD_DIM];
} tkvi_queries;

/* What one chunk of keys adds up to, or several of them together. */
typedef struct tkvi_sums {
    float *m, *l; /* [TKVI_ROWS] */
    float *far;   /* [TKVI_ROWS] sum of p^2 of far keys, at the same maximum */
    float *any;   /* [2] not 0: that half of o has been added to */
    float *o;     /* [2][TKVI_ROWS][v_pad]: plain values, and those of rotated formats */
} tkvi_sums;

static int tkvi_spaces(const tkvi_unit *u) { return 1 + u->call->kv->tables.any_rotated; }

static tkvi_sums tkvi_sums_in(float *memory, int v_pad) {
    tkvi_sums s;
    s.o = memory;
    s.m = memory + 2 * TKVI_ROWS * v_pad;
    s.l = s.m + TKVI_ROWS;
    s.far = s.l + TKVI_ROWS;
    s.any = s.far + TKVI_ROWS;
    return s;
}

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
        tkvi_values(&rec->k, u->call->kv->kernels->helpers, bytes,
                    i == 0 ? 0 : end - 1 - start - (i == 1 && from == last && end - start > 2), 1, key[i], 0);
    }
    for (c = 0; c < u->call->kv->tables.cfg.head_dim; c++) {
        float a = key[0][c], b = key[1][c], x = key[2][c], lo = a < b ? a : b, hi = a < b ? b : a;
        float middle = x < lo ? lo : x > hi ? hi : x;
        lo = x < lo ? x : lo;
        hi = x > hi ? x : hi;
        if (hi - lo < 0.25f * (middle < 0.0f ? -middle : middle)) ref[c] = middle;
    }
}

/* Queries and reference in the order in which a side has its channels: the same for all its blocks, mostly. */
static void tkvi_sort_queries(const tkvi_unit *u, tkvi_queries *q, const uint8_t *order) {
    int r, i;
    if (q->order == order) return;
    q->order = order;
    for (r = 0; r <= u->rows; r++) {
        const float *from = r < u->rows ? q->q + r * u->k_pad : q->ref;
        for (i = 0; i < u->k_pad; i++) q->sorted[r * u->k_pad + i] = from[order[i]];
    }
}

/* Row r of a unit, scaled, padded; returns its origin. */
static float tkvi_load_query(const tkvi_unit *u, int r, const float *ref, float *row) {
    const tkvi_call *c = u->call;
    const ptrdiff_t at = (u->seq_row + tkvi_query_of(u, r)) * c->q_row + tkvi_head_of(u, r) * c->q_head;
    int dim = c->kv->tables.cfg.head_dim, i, k;
    double sum[16] = {0.0}, origin = 0.0;
    if (c->p->q_type == TKV_TYPE_F32) memcpy(row, (const char *)c->p->q + 4 * at, (size_t)dim * 4);
    else
        for (i = 0; i < dim; i++) row[i] = tkvi_element(c->p->q, c->p->q_type, at + i);
    for (i = dim; i < u->k_pad; i++) row[i] = 0.0f;
    for (i = 0; i < u->k_pad; i += 16) { /* vectors also at -O2 */
        float x[16];
        for (k = 0; k < 16; k++) x[k] = row[i + k] * c->scale;
        for (k = 0; k < 16; k++) row[i + k] = x[k];
        for (k = 0; k < 16; k++) sum[k] += (double)x[k] * (double)ref[i + k];
    }
    for (k = 0; k < 16; k++) origin += sum[k];
    return (float)origin;
}

static void tkvi_load_queries(const tkvi_unit *u, tkvi_queries *q) {
    int r;
    q->order = NULL;
    tkvi_reference_key(u, q->ref);
    for (r = 0; r < u->rows; r++) q->origin[r] = tkvi_load_query(u, r, q->ref, q->q + r * u->k_pad);
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
static int tkvi_block_scores(const tkvi_unit *u, tkvi_queries *q, int i, float *scores) {
    const tkv_cache *kv = u->call->kv;
    int start = tkvi_block_start(kv, u->ids, i), end = tkvi_block_end(kv, u->list, u->ids, i), r;
    const uint8_t *bytes;
    const tkvi_record *rec;
    if (end <= u->low || start >= u->high) return 0;
    rec = tkvi_record_of(u, i, &bytes);
    if (rec->k.order) tkvi_sort_queries(u, q, rec->k.order);
    kv->kernels->k[rec->k.format->stored](&rec->k, bytes, tkvi_next_record(u, i),
                                          rec->k.order ? q->sorted : q->q,
                                          rec->k.order ? q->sorted + u->rows * u->k_pad : q->ref, u->rows,
                                          end - start, tkvi_planes(&rec->k, kv->tables.cfg.precise), scores);
    if (u->changes || end - start < TKVI_BLOCK || start < u->all_low || end > u->all_high)
        for (r = 0; r < u->rows; r++)
            tkvi_modify(u, r, q->origin[r], start, end - start, scores + r * TKVI_BLOCK);
    return 1;
}

/* >>part: the online softmax over one chunk of blocks */
static void tkvi_shrink(float *x, int n, float by) { /* n is a multiple of 16: vectors also at -O2 */
    int i, k;
    for (i = 0; i < n; i += 16)
        for (k = 0; k < 16; k++) x[i + k] *= by;
}

/* Does row r's query count for the statistics? One in eight does. */
static int tkvi_listens(const tkvi_unit *u, int r) {
    return u->call->listen && tkvi_position(u, tkvi_query_of(u, r)) % 8 == 7;
}

/* What block i adds to `far` of the rows that listen: sums of p^2, where it is no sink and far enough back. */
static TKVI_NOINLINE void tkvi_add_far(const tkvi_unit *u, int i, const float *p, float *far) {
    int end = tkvi_block_end(u->call->kv, u->list, u->ids, i), r, t, k;
    if (i < u->list->sinks) return;
    for (r = 0; r < u->rows; r++) {
        float sum[16] = {0};
        if (!tkvi_listens(u, r) || end + TKVI_FAR > tkvi_position(u, tkvi_query_of(u, r))) continue;
        for (t = 0; t < TKVI_BLOCK; t += 16)
            for (k = 0; k < 16; k++) sum[k] += p[r * TKVI_BLOCK + t + k] * p[r * TKVI_BLOCK + t + k];
        for (k = 0; k < 16; k++) far[r] += sum[k];
    }
}

/* Most parts add to one half of o only. */
static void tkvi_begin_space(const tkvi_unit *u, const tkvi_sums *sums, int space) {
    if (sums->any[space] > 0.0f) return;
    sums->any[space] = 1.0f;
    memset(sums->o + space * TKVI_ROWS * u->v_pad, 0, (size_t)(u->rows * u->v_pad) * sizeof(float));
}

static TKVI_NOINLINE void tkvi_part(const tkvi_unit *u, tkvi_queries *q, int chunk, const tkvi_sums *sums) {
    const tkv_cache *kv = u->call->kv;
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK], p[TKVI_ROWS * TKVI_BLOCK];
    int i, r, space, last = tkvi_min(u->list->n, (chunk + 1) * u->chunk), stride = TKVI_ROWS * u->v_pad;
    sums->any[0] = sums->any[1] = 0.0f;
    for (r = 0; r < u->rows; r++) {
        sums->m[r] = TKVI_HIDDEN;
        sums->l[r] = sums->far[r] = 0.0f;
    }
    for (i = chunk * u->chunk; i < last; i++) {
        const uint8_t *bytes, *next = tkvi_next_record(u, i);
        const tkvi_record *rec;
        float before[TKVI_ROWS], sum[TKVI_ROWS];
        if (!tkvi_block_scores(u, q, i, scores)) continue;
        memcpy(before, sums->m, (size_t)u->rows * sizeof(float));
        if (!kv->kernels->weigh(scores, u->rows, sums->m, sum, p)) continue;
        for (r = 0; r < u->rows; r++) {
            if (sums->m[r] > before[r] && !TKVI_IS_HIDDEN(before[r])) { /* else o and l are still 0 */
                float shrink = expf(before[r] - sums->m[r]);
                for (space = 0; space < 2; space++)
                    if (sums->any[space] > 0.0f)
                        tkvi_shrink(sums->o + space * stride + r * u->v_pad, u->v_pad, shrink);
                sums->l[r] *= shrink;
                sums->far[r] *= shrink * shrink;
            }
            sums->l[r] += sum[r];
        }
        if (u->call->listen) tkvi_add_far(u, i, p, sums->far);
        rec = tkvi_record_of(u, i, &bytes);
        space = rec->v.format->rotated;
        tkvi_begin_space(u, sums, space);
        kv->kernels->v[rec->v.format->stored](
            &rec->v, bytes + rec->v_at, next ? next + rec->v_at : NULL, p, u->rows,
            tkvi_block_end(kv, u->list, u->ids, i) - tkvi_block_start(kv, u->ids, i),
            tkvi_planes(&rec->v, kv->tables.cfg.precise), sums->o + space * stride);
    }
}

/* Row r of the sums grows by that of another set of keys. */
static void tkvi_merge_row(const tkvi_unit *u, int r, const tkvi_sums *to, const tkvi_sums *from) {
    float a, b;
    int i, k, space, first = !(to->l[r] > 0.0f);
    if (!(from->l[r] > 0.0f)) return;
    a = from->m[r] > to->m[r] && !first ? expf(to->m[r] - from->m[r]) : 1.0f;
    b = from->m[r] > to->m[r] || first ? 1.0f : expf(from->m[r] - to->m[r]);
    to->m[r] = b < 1.0f ? to->m[r] : from->m[r];
    to->l[r] = first ? from->l[r] : to->l[r] * a + from->l[r] * b;
    to->far[r] = first ? from->far[r] : to->far[r] * a * a + from->far[r] * b * b;
    for (space = 0; space < 2; space++) {
        float *o = to->o + (space * TKVI_ROWS + r) * u->v_pad;
        const float *o2 = from->o + (space * TKVI_ROWS + r) * u->v_pad;
        if (!(from->any[space] > 0.0f)) {
            if (to->any[space] > 0.0f && a < 1.0f) tkvi_shrink(o, u->v_pad, a);
        } else if (first) {
            memcpy(o, o2, (size_t)u->v_pad * sizeof *o);
        } else {
            for (i = 0; i < u->v_pad; i += 16)
                for (k = 0; k < 16; k++) o[i + k] = o[i + k] * a + o2[i + k] * b;
        }
    }
}

static TKVI_NOINLINE void tkvi_merge(const tkvi_unit *u, const tkvi_sums *to, const tkvi_sums *from) {
    int r, space;
    for (space = 0; space < 2; space++)
        if (from->any[space] > 0.0f) tkvi_begin_space(u, to, space);
    for (r = 0; r < u->rows; r++) tkvi_merge_row(u, r, to, from);
}

/* What attention over these rows says of the layer, in whole numbers: their order is of no importance. */
#if defined(__GNUC__) || defined(__clang__)
static TKVI_NOINLINE void tkvi_listen(const tkvi_unit *u, const tkvi_queries *q, const tkvi_sums *s) {
    tkv_cache *kv = u->call->kv;
    int dim = kv->tables.cfg.head_dim, layer = u->call->plan->stored, r, c;
    int64_t *asked = tkvi_asked_of(kv, layer, u->head), *far = tkvi_far_of(kv, layer, u->head);
    tkvi_lock(&kv->learning);
    for (r = 0; r < u->rows; r++) {
        if (!tkvi_listens(u, r)) continue;
        for (c = 0; c < dim; c++) {
            float x = q->q[r * u->k_pad + c]; /* of queries, NaN are not refused; squares stay finite */
            x = tkvi_is_finite(x) ? tkvi_clampf(x, -1e6f, 1e6f) : 0.0f;
            asked[c] += tkvi_counted(x * x * 16777216.0f, 1e12f);
        }
        if (s->l[r] > 0.0f) *far += tkvi_counted(s->far[r] / (s->l[r] * s->l[r]) * 16777216.0f, 1e12f);
    }
    tkvi_unlock(&kv->learning);
}

static TKVI_NOINLINE void tkvi_listen_queries(const tkvi_unit *u, const tkvi_queries *q) {
    tkv_cache *kv = u->call->kv;
    int layer = u->call->plan->stored, r;
    tkvi_lock(&kv->learning);
    for (r = 0; r < u->rows; r++)
        if (tkvi_position(u, tkvi_query_of(u, r)) % TKVI_METRIC_EVERY == 0)
            tkvi_metric_add(kv, layer, u->head, q->q + r * u->k_pad);
    tkvi_unlock(&kv->learning);
}
#else /* without atomics nobody may write here: tables come from the keys alone */
static void tkvi_listen_queries(const tkvi_unit *u, const tkvi_queries *q) {
    (void)u;
    (void)q;
}

static void tkvi_listen(const tkvi_unit *u, const tkvi_queries *q, const tkvi_sums *s) {
    (void)u;
    (void)q;
    (void)s;
}
#endif

/* >>quality: the same attention once more, with exact copies in place of coded blocks (meter.h) */
typedef struct tkvi_contrast { /* of a row */
    int sampled;
    uint64_t keys, kept; /* coded keys in its reach; those with a copy */
    double l, shift;   /* sums over keys, relative to the maximum so far: p; p times (exact - cached score) */
    float m, cached_m; /* that maximum; the largest cached score */
    float choice;      /* the exact score of the key that has the largest cached one */
} tkvi_contrast;

/* Which rows are sampled, and what of their keys was coded and has a copy. Returns how many keys have one. */
static uint64_t tkvi_contrast_begin(const tkvi_unit *u, const tkvi_gauge *g, tkvi_contrast *rows) {
    const tkv_cache *kv = u->call->kv;
    const tkvi_meter *m = kv->meter;
    const tkvi_plan *plan = &kv->tables.plan[u->call->plan->stored];
    int i, r, from = 0;
    uint64_t kept = 0;
    for (r = 0; r < u->rows; r++) {
        memset(&rows[r], 0, sizeof rows[r]);
        rows[r].sampled = (tkvi_position(u, tkvi_query_of(u, r)) + g->phase) % m->every == 0;
        rows[r].m = rows[r].cached_m = TKVI_HIDDEN;
    }
    for (i = u->list->sinks; i < u->list->n; i++) {
        int start = tkvi_block_start(kv, u->ids, i), end = tkvi_block_end(kv, u->list, u->ids, i), copied;
        if (kv->tables.coding[kv->pool.block[u->ids[i]].coding].key == plan->now.key[TKV_HOT]) continue;
        copied = tkvi_gauge_copy(m, g, start, &from) != NULL;
        for (r = 0; r < u->rows; r++) {
            int low, high, n;
            if (!rows[r].sampled) continue;
            tkvi_visible(u, tkvi_query_of(u, r), &low, &high);
            n = tkvi_min(high, end) - tkvi_max(low, start);
            if (n <= 0) continue;
            rows[r].keys += (uint64_t)n;
            if (copied) rows[r].kept += (uint64_t)n;
            if (copied) kept += (uint64_t)n;
        }
    }
    return kept;
}

/* One block's scores, s with its copy and c without, join a row; w gets the weights. 0 if none is seen. */
static int tkvi_contrast_add(const tkvi_unit *u, int r, tkvi_contrast *row, const float *s, const float *c,
                             float *w, float *o) {
    const tkvi_kernels *kernels = u->call->kv->kernels;
    float most = kernels->max64(s), cached_most = kernels->max64(c);
    double shift = 0.0;
    int t, space;
    if (TKVI_IS_HIDDEN(most)) {
        memset(w, 0, TKVI_BLOCK * sizeof(float));
        return 0;
    }
    if (most > row->m) {
        float shrink = TKVI_IS_HIDDEN(row->m) ? 0.0f : expf(row->m - most);
        for (space = 0; space < tkvi_spaces(u); space++)
            tkvi_shrink(o + (space * TKVI_ROWS + r) * u->v_pad, u->v_pad, shrink);
        row->l *= (double)shrink;
        row->shift *= (double)shrink;
        row->m = most;
    }
    if (cached_most > row->cached_m) {
        row->cached_m = cached_most;
        for (t = 0; t < TKVI_BLOCK && c[t] < cached_most;) t++;
        row->choice = s[t % TKVI_BLOCK];
    }
    row->l += (double)kernels->exp64(s, row->m, w);
    for (t = 0; t < TKVI_BLOCK; t++) shift += (double)(w[t] * (s[t] - c[t])); /* hidden keys: 0 times 0 */
    row->shift += shift;
    return 1;
}

static TKVI_NOINLINE void tkvi_contrast_blocks(const tkvi_unit *u, tkvi_queries *q, const tkvi_gauge *g,
                                               tkvi_contrast *rows, float *o) {
    const tkv_cache *kv = u->call->kv;
    const tkvi_record *exact =
        &kv->tables.coding[kv->tables.plan[u->call->plan->stored].now.coding[TKV_HOT]].record[u->head];
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK], cached[TKVI_ROWS * TKVI_BLOCK],
        p[TKVI_ROWS * TKVI_BLOCK];
    int i, r, from = 0, stride = TKVI_ROWS * u->v_pad;
    memset(o, 0, (size_t)(tkvi_spaces(u) * stride) * sizeof(float));
    for (i = 0; i < u->list->n; i++) {
        int start = tkvi_block_start(kv, u->ids, i), n = tkvi_block_end(kv, u->list, u->ids, i) - start,
            any = 0;
        const uint8_t *bytes, *copy = tkvi_gauge_copy(kv->meter, g, start, &from);
        const tkvi_record *rec = copy ? exact : tkvi_record_of(u, i, &bytes);
        if (!tkvi_block_scores(u, q, i, cached)) continue;
        if (copy) {
            bytes = copy;
            kv->kernels->k[rec->k.format->stored](&rec->k, bytes, NULL, q->q, q->ref, u->rows, n, 1, scores);
            for (r = 0; r < u->rows; r++) tkvi_modify(u, r, q->origin[r], start, n, scores + r * TKVI_BLOCK);
        } else {
            memcpy(scores, cached, sizeof scores);
        }
        memset(p, 0, sizeof p);
        for (r = 0; r < u->rows; r++)
            if (rows[r].sampled)
                any |= tkvi_contrast_add(u, r, &rows[r], scores + r * TKVI_BLOCK, cached + r * TKVI_BLOCK,
                                         p + r * TKVI_BLOCK, o);
        if (any)
            kv->kernels->v[rec->v.format->stored](&rec->v, bytes + rec->v_at, NULL, p, u->rows, n,
                                                  tkvi_planes(&rec->v, kv->tables.cfg.precise),
                                                  o + (rec->v.format->rotated ? stride : 0));
    }
}

/* Output of a row, rotated values turned back, before learned sinks and the division. */
static void tkvi_whole_row(const tkvi_unit *u, int r, const float *o, int rotated, float *row) {
    int dim = u->call->kv->tables.cfg.v_head_dim, i;
    memset(row, 0, TKV_MAX_HEAD_DIM * sizeof *row);
    if (rotated) {
        memcpy(row, o + (TKVI_ROWS + r) * u->v_pad, (size_t)u->v_pad * sizeof *row);
        tkvi_rotate_back(row, dim);
    }
    for (i = 0; i < dim; i++) row[i] += o[r * u->v_pad + i];
}

/* What the row's comparison says. s: the cache's own sums, o: those with the copies. */
static void tkvi_contrast_end(const tkvi_unit *u, const tkvi_queries *q, int r, const tkvi_contrast *row,
                              const tkvi_sums *s, const float *o, tkvi_tally *tally) {
    const tkv_attend_params *p = u->call->p;
    float x[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
    double lse = (double)row->m + log(row->l), cached = (double)s->m[r] + log((double)s->l[r]);
    double a, b, d = 0.0, size = 0.0;
    uint64_t divergence;
    int i, head = tkvi_head_of(u, r);
    if (p->sinks && tkvi_is_finite(p->sinks[head])) {
        double sink = (double)p->sinks[head] - (p->softcap > 0.0f ? 0.0 : (double)q->origin[r]);
        lse = lse > sink ? lse + log1p(exp(sink - lse)) : sink + log1p(exp(lse - sink));
        cached = cached > sink ? cached + log1p(exp(sink - cached)) : sink + log1p(exp(cached - sink));
    }
    a = exp((double)row->m - lse);
    b = exp((double)s->m[r] - cached);
    tkvi_whole_row(u, r, o, tkvi_spaces(u) > 1, x);
    tkvi_whole_row(u, r, s->o, s->any[1] > 0.0f, y);
    for (i = 0; i < u->call->kv->tables.cfg.v_head_dim; i++) {
        double e = (double)x[i] * a - (double)y[i] * b;
        d += e * e;
        size += (double)x[i] * a * ((double)x[i] * a);
    }
    divergence = tkvi_meter_fixed(row->shift * a - lse + cached);
    tally->agreed += row->choice >= row->m;
    tally->error += tkvi_meter_fixed(d > 0.0 ? (size > 0.0 ? d / size : (double)TKVI_METER_MOST) : 0.0);
    tally->divergence += divergence;
    if (divergence > tally->worst) tally->worst = divergence;
}

/* Adds the sampled rows of a unit to its gauge. `s` stays as it is; `work` is overwritten. */
static TKVI_NOINLINE void tkvi_measure(const tkvi_unit *u, tkvi_queries *q, const tkvi_sums *s,
                                       const tkvi_sums *work) {
    tkvi_meter *m = u->call->kv->meter;
    tkvi_gauge *g = tkvi_gauge_of(m, u->call->plan->stored, u->head);
    tkvi_contrast rows[TKVI_ROWS];
    tkvi_tally tally;
    uint64_t kept;
    int r;
    if (!g || u->call->rows[u->item].seq != m->seq) return;
    memset(&tally, 0, sizeof tally);
    kept = tkvi_contrast_begin(u, g, rows);
    if (kept) tkvi_contrast_blocks(u, q, g, rows, work->o);
    for (r = 0; r < u->rows; r++) {
        if (!rows[r].sampled || !(s->l[r] > 0.0f)) continue; /* it sees no key */
        tally.samples++;
        tally.keys += rows[r].keys;
        tally.kept += rows[r].kept;
        if (rows[r].kept && rows[r].l > 0.0) tkvi_contrast_end(u, q, r, &rows[r], s, work->o, &tally);
        else tally.agreed++; /* nothing that could differ */
    }
    if (!tally.samples) return;
    tkvi_lock(&m->lock);
    tkvi_tally_add(&g->sum, &tally);
    tkvi_unlock(&m->lock);
}

/* The unit's rows go out; learned sinks join the sum. rotated: the second half of o is to be turned back first. */
static TKVI_NOINLINE void tkvi_finish(const tkvi_unit *u, const float *origins, const tkvi_sums *s,
                                      int rotated) {
    const tkvi_call *c = u->call;
    int dim = c->kv->tables.cfg.v_head_dim, r, i, k;
    float *m = s->m, *l = s->l, *o = s->o;
    for (r = 0; r < u->rows; r++) {
        int head = tkvi_head_of(u, r), query = u->seq_row + tkvi_query_of(u, r), empty = !(l[r] > 0.0f);
        float origin = c->p->softcap > 0.0f ? 0.0f : origins[r], weight = 1.0f, *row = o + r * u->v_pad;
        ptrdiff_t at = query * c->out_row + head * c->out_head;
        if (rotated && !empty) {
            float *turned = o + (TKVI_ROWS + r) * u->v_pad;
            tkvi_rotate_back(turned, dim);
            for (i = 0; i < dim; i++) row[i] += turned[i];
        }
        if (c->p->sinks && tkvi_is_finite(c->p->sinks[head])) {
            float sink = c->p->sinks[head] - origin;
            if (empty) {
                m[r] = sink;
                l[r] = 1.0f;
            } else if (sink > m[r]) {
                weight = expf(m[r] - sink);
                l[r] = l[r] * weight + 1.0f;
                m[r] = sink;
            } else {
                l[r] += expf(sink - m[r]);
            }
        }
        weight = empty ? 0.0f : weight / l[r];
        for (i = 0; i < dim; i += 16) { /* vectors also at -O2 */
            float x[16];
            for (k = 0; k < 16; k++) x[k] = row[i + k] * weight;
            for (k = 0; k < 16; k++) row[i + k] = x[k];
        }
        if (c->p->out_type == TKV_TYPE_F32) memcpy((char *)c->p->out + 4 * at, row, (size_t)dim * 4);
        else
            for (i = 0; i < dim; i++) tkvi_save_element(c->p->out, c->p->out_type, at + i, row[i]);
        if (c->p->lse)
            c->p->lse[(ptrdiff_t)query * c->kv->tables.cfg.n_heads + head] =
                l[r] > 0.0f ? m[r] + logf(l[r]) + origin : tkvi_from_bits(0xff800000u);
    }
}

/* >>work: units, serial or in parallel, whole or in parts */
typedef struct tkvi_work {
    const tkvi_call *call;
    int n_units, n_chunks;
    float *parts; /* [unit][chunk] sums */
} tkvi_work;

static int tkvi_count_units(const tkvi_call *c) {
    int i, n = 0;
    for (i = 0; i < c->n_rows; i++) n += tkvi_tiles_of(c, c->rows[i].n) * c->kv->tables.cfg.n_kv_heads;
    return n;
}

static void tkvi_find_unit(const tkvi_call *c, int number, tkvi_unit *u) {
    int i, row = 0, heads = c->kv->tables.cfg.n_kv_heads;
    for (i = 0;; i++) {
        int tiles = tkvi_tiles_of(c, c->rows[i].n);
        if (number < tiles * heads) { /* tile after tile of a head, whose records then stay in a cache */
            tkvi_unit_init(u, c, i, row, number / tiles, number % tiles);
            return;
        }
        number -= tiles * heads;
        row += c->rows[i].n;
    }
}

static tkvi_sums tkvi_part_at(const tkvi_work *w, const tkvi_unit *u, int unit, int chunk) {
    return tkvi_sums_in(w->parts + (size_t)(unit * w->n_chunks + chunk) * (size_t)TKVI_SUMS_FLOATS(u->v_pad),
                        u->v_pad);
}

static void tkvi_run_part(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    int chunk = index % w->n_chunks;
    tkvi_sums sums;
    TKVI_ALIGNED tkvi_queries q;
    tkvi_unit u;
    tkvi_find_unit(w->call, index / w->n_chunks, &u);
    if (chunk >= u.n_chunks) return;
    tkvi_load_queries(&u, &q);
    sums = tkvi_part_at(w, &u, index / w->n_chunks, chunk);
    tkvi_part(&u, &q, chunk, &sums);
}

/* All parts of a unit, merged in order: those that tkvi_run_part left, or made here one by one. */
static void tkvi_add_up(const tkvi_work *w, int index, const tkvi_unit *u, tkvi_queries *q,
                        const tkvi_sums *sums, const tkvi_sums *here) {
    int chunk;
    tkvi_part(u, q, w->parts ? u->n_chunks : 0, sums); /* behind the last: nothing but empty sums */
    for (chunk = w->parts ? 0 : 1; chunk < u->n_chunks; chunk++) {
        tkvi_sums part = *here;
        if (w->parts) part = tkvi_part_at(w, u, index, chunk);
        else tkvi_part(u, q, chunk, &part);
        tkvi_merge(u, sums, &part);
    }
    tkvi_begin_space(u, sums, 0);
}

static void tkvi_run_unit(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    TKVI_ALIGNED float all[TKVI_SUMS_FLOATS(TKV_MAX_HEAD_DIM)], here[TKVI_SUMS_FLOATS(TKV_MAX_HEAD_DIM)];
    TKVI_ALIGNED tkvi_queries q;
    tkvi_sums sums, part;
    tkvi_unit u;
    tkvi_find_unit(w->call, index, &u);
    tkvi_load_queries(&u, &q);
    sums = tkvi_sums_in(all, u.v_pad);
    part = tkvi_sums_in(here, u.v_pad);
    tkvi_add_up(w, index, &u, &q, &sums, &part);
    if (w->call->listen) tkvi_listen(&u, &q, &sums);
    if (w->call->metric) tkvi_listen_queries(&u, &q);
    if (w->call->meter) tkvi_measure(&u, &q, &sums, &part);
    tkvi_finish(&u, q.origin, &sums, sums.any[1] > 0.0f);
}

/* >>many: units of up to 32 rows, rows in lanes, where a sequence has many queries (many.h) */
typedef struct tkvi_many_sums { /* as tkvi_sums: [lanes], [v_pad][lanes] */
    TKVI_ALIGNED float o[TKVI_MANY_FLOATS];
    TKVI_ALIGNED float m[TKVI_MANY], l[TKVI_MANY], far[TKVI_MANY], origin[TKVI_MANY];
    int lanes;
} tkvi_many_sums;

/* Queries of a unit, [channel][lanes], lanes without a row 0. */
static TKVI_NOINLINE void tkvi_load_lanes(const tkvi_unit *u, const float *ref, int lanes, float *q,
                                          float *origin) {
    TKVI_ALIGNED float rows[16 * TKV_MAX_HEAD_DIM];
    int first, r;
    for (first = 0; first < lanes; first += 16) {
        memset(rows, 0, (size_t)(16 * u->k_pad) * sizeof *rows);
        for (r = first; r < tkvi_min(first + 16, u->rows); r++)
            origin[r] = tkvi_load_query(u, r, ref, rows + (r - first) * u->k_pad);
        u->call->many->turn(rows, u->k_pad, u->k_pad, q + first, lanes);
    }
}

/* Which tokens of a block lanes see; 0 if all lanes see all. */
static int tkvi_see_lanes(const tkvi_unit *u, int start, int end, int32_t *low, int32_t *high) {
    int r;
    if (!u->changes && end - start == TKVI_BLOCK && start >= u->all_low && end <= u->all_high) return 0;
    memset(low, 0, TKVI_MANY * sizeof *low);
    memset(high, 0, TKVI_MANY * sizeof *high);
    for (r = 0; r < u->rows; r++) {
        int from, to;
        tkvi_visible(u, tkvi_query_of(u, r), &from, &to);
        low[r] = from - start;
        high[r] = tkvi_min(to, end) - start;
    }
    return 1;
}

static TKVI_NOINLINE void tkvi_modify_lanes(const tkvi_unit *u, const float *origin, int start, int n,
                                            int lanes, float *scores) {
    int r, t;
    for (r = 0; r < u->rows; r++) {
        float s[TKVI_BLOCK];
        for (t = 0; t < TKVI_BLOCK; t++) s[t] = scores[t * lanes + r];
        tkvi_modify(u, r, origin[r], start, n, s);
        for (t = 0; t < TKVI_BLOCK; t++) scores[t * lanes + r] = s[t];
    }
}

/* Whose p of a block count for `far`, as tkvi_add_far says; 0 if nobody's do. */
static int tkvi_hear_lanes(const tkvi_unit *u, int i, int end, float *hears) {
    int r, any = 0;
    if (!u->call->listen || i < u->list->sinks) return 0;
    memset(hears, 0, TKVI_MANY * sizeof *hears);
    for (r = 0; r < u->rows; r++)
        if (tkvi_listens(u, r) && end + TKVI_FAR <= tkvi_position(u, tkvi_query_of(u, r))) {
            hears[r] = 1.0f;
            any = 1;
        }
    return any;
}

/* The online softmax over all blocks. */
static TKVI_NOINLINE void tkvi_many_blocks(const tkvi_unit *u, tkvi_many_sums *sums) {
    TKVI_ALIGNED float scores[TKVI_BLOCK * TKVI_MANY], shrink[TKVI_MANY], hears[TKVI_MANY];
    TKVI_ALIGNED int32_t low[TKVI_MANY], high[TKVI_MANY];
    const tkv_cache *kv = u->call->kv;
    const tkvi_many *many = u->call->many;
    const int lanes = sums->lanes;
    tkvi_many_queries q;
    tkvi_weighing w;
    int i, r, rotated;
    q.lanes = lanes;
    q.coded = 0;
    tkvi_reference_key(u, q.ref);
    tkvi_load_lanes(u, q.ref, lanes, q.q, sums->origin);
    memset(sums->o, 0, (size_t)(u->v_pad * lanes) * sizeof(float));
    for (r = 0; r < TKVI_MANY; r++) {
        sums->m[r] = TKVI_HIDDEN;
        sums->l[r] = sums->far[r] = 0.0f;
    }
    w.s = scores;
    w.lanes = lanes;
    w.m = sums->m;
    w.l = sums->l;
    w.shrink = shrink;
    w.high = high;
    w.far = u->call->listen ? sums->far : NULL; /* shrinks with the others, whoever is heard */
    for (rotated = kv->tables.any_rotated; rotated >= 0; rotated--) {
        for (i = 0; i < u->list->n; i++) {
            int start = tkvi_block_start(kv, u->ids, i), end = tkvi_block_end(kv, u->list, u->ids, i);
            const uint8_t *bytes, *next = tkvi_next_record(u, i);
            const tkvi_record *rec = tkvi_record_of(u, i, &bytes);
            if (rec->v.format->rotated != rotated || end <= u->low || start >= u->high) continue;
            many->k(&rec->k, bytes, next, &q, end - start, tkvi_planes(&rec->k, kv->tables.cfg.precise),
                    scores);
            if (u->changes) tkvi_modify_lanes(u, sums->origin, start, end - start, lanes, scores);
            w.low = tkvi_see_lanes(u, start, end, low, high) ? low : NULL;
            w.hears = tkvi_hear_lanes(u, i, end, hears) ? hears : NULL;
            if (many->weigh(&w)) many->shrink(sums->o, u->v_pad, lanes, shrink);
            many->v(&rec->v, bytes + rec->v_at, next ? next + rec->v_at : NULL, scores, lanes, end - start,
                    tkvi_planes(&rec->v, kv->tables.cfg.precise), sums->o);
        }
        if (rotated) many->rotate_back(sums->o, kv->tables.cfg.v_head_dim, lanes);
    }
}

static TKVI_NOINLINE void tkvi_many_listen(const tkvi_unit *u, const tkvi_sums *sums) {
    TKVI_ALIGNED tkvi_queries q;
    tkvi_load_queries(u, &q);
    if (u->call->listen) tkvi_listen(u, &q, sums);
    if (u->call->metric) tkvi_listen_queries(u, &q);
}

/* Eight rows of a unit */
static tkvi_unit tkvi_many_eight(const tkvi_unit *u, int first) {
    tkvi_unit eight = *u;
    eight.first += first;
    eight.rows = tkvi_min(TKVI_ROWS, u->rows - first);
    return eight;
}

/* Whoever wants to know of them is told, then they go out. */
static TKVI_NOINLINE void tkvi_many_finish(const tkvi_unit *u, tkvi_many_sums *from, int first) {
    const tkvi_unit eight = tkvi_many_eight(u, first);
    tkvi_sums sums;
    sums.o = from->o + first * u->v_pad;
    sums.m = from->m + first;
    sums.l = from->l + first;
    sums.far = from->far + first;
    if (u->call->listen || u->call->metric) tkvi_many_listen(&eight, &sums);
    tkvi_finish(&eight, from->origin + first, &sums, 0);
}

static TKVI_NOINLINE void tkvi_many_in_rows(const tkvi_unit *u, tkvi_many_sums *sums) {
    TKVI_ALIGNED float o[TKVI_MANY_FLOATS];
    int i, r;
    memcpy(o, sums->o, (size_t)(u->v_pad * sums->lanes) * sizeof *o);
    for (r = 0; r < sums->lanes; r += 16)
        for (i = 0; i < u->v_pad; i += 16)
            u->call->many->turn(o + i * sums->lanes + r, sums->lanes, 16, sums->o + r * u->v_pad + i,
                                u->v_pad);
}

static TKVI_NOINLINE void tkvi_many_unit(const tkvi_unit *u) {
    tkvi_many_sums sums;
    int first;
    sums.lanes = u->rows > 16 ? TKVI_MANY : 16;
    tkvi_many_blocks(u, &sums);
    tkvi_many_in_rows(u, &sums);
    for (first = 0; first < u->rows; first += TKVI_ROWS) tkvi_many_finish(u, &sums, first);
}

/* The quality meter compares kernels.h's scores with its own: rows that it samples are done again. */
static TKVI_NOINLINE void tkvi_many_measure(const tkvi_work *w, const tkvi_unit *u) {
    TKVI_ALIGNED float all[TKVI_SUMS_FLOATS(TKV_MAX_HEAD_DIM)], here[TKVI_SUMS_FLOATS(TKV_MAX_HEAD_DIM)];
    TKVI_ALIGNED tkvi_queries q;
    const tkvi_meter *m = u->call->kv->meter;
    const tkvi_gauge *g = tkvi_gauge_of(u->call->kv->meter, u->call->plan->stored, u->head);
    const tkvi_sums sums = tkvi_sums_in(all, u->v_pad), part = tkvi_sums_in(here, u->v_pad);
    int r, samples = 0;
    for (r = 0; g && r < u->rows; r++)
        samples |= (tkvi_position(u, tkvi_query_of(u, r)) + g->phase) % m->every == 0;
    if (!samples) return;
    tkvi_load_queries(u, &q);
    tkvi_add_up(w, 0, u, &q, &sums, &part);
    tkvi_measure(u, &q, &sums, &part);
}

static void tkvi_run_many(void *ctx, int index) {
    const tkvi_work *w = (const tkvi_work *)ctx;
    tkvi_unit u;
    int first;
    tkvi_find_unit(w->call, index, &u);
    tkvi_many_unit(&u);
    for (first = 0; first < u.rows && w->call->meter; first += TKVI_ROWS) {
        const tkvi_unit eight = tkvi_many_eight(&u, first);
        tkvi_many_measure(w, &eight);
    }
}

/* Many queries everywhere, and blocks that the kernels know? Then units are larger. Not where the mass is wanted, whose
 * scores must be the same ones again. */
static const tkvi_many *tkvi_many_for(const tkvi_call *c) {
    const tkv_cache *kv = c->kv;
    int i, b;
    if (c->p->mass) return NULL;
    for (i = 0; i < c->n_rows; i++) {
        const tkvi_list *list = tkvi_list_of(kv, c->rows[i].seq, c->plan->stored);
        const uint32_t *ids = tkvi_ids(kv, c->rows[i].seq, c->plan->stored);
        if (c->rows[i].n * c->heads_per_kv < 2 * TKVI_ROWS) return NULL;
        for (b = 0; b < list->n; b++) {
            const tkvi_record *rec = kv->tables.coding[kv->pool.block[ids[b]].coding].record;
            if (rec->k.format->stored == TKVI_AS_DECODED || rec->v.format->stored == TKVI_AS_DECODED)
                return NULL;
        }
    }
    return tkvi_many_of(kv->kernels->isa);
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
    int i, few, longest = 0;
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
    w.n_chunks = tkvi_min(TKVI_MAX_CHUNKS, (longest + TKVI_MIN_CHUNK - 1) / TKVI_MIN_CHUNK);
    few = w.n_chunks > 1 && w.n_units <= TKVI_FEW_UNITS && /* the same for any number of threads */
          w.n_units * w.n_chunks <= TKVI_MAX_PARTS;
    if (few && kv->tables.cfg.parallel_for && tkvi_take_parts(kv)) {
        w.parts = kv->parts;
        tkvi_for(kv, w.n_units * w.n_chunks, tkvi_run_part, &w);
        for (i = 0; i < w.n_units; i++) tkvi_run_unit(&w, i);
        tkvi_leave_parts(kv);
    } else if (few || !(c.many = tkvi_many_for(&c))) {
        tkvi_for(kv, w.n_units, tkvi_run_unit, &w);
    } else {
        c.tile = tkvi_many_lanes(tkvi_max(kv->tables.cfg.head_dim, kv->tables.cfg.v_head_dim));
        tkvi_for(kv, tkvi_count_units(&c), tkvi_run_many, &w);
        c.tile = TKVI_ROWS;
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

TKV_API tkv_status tkv_tier_pair(const tkv_cache *kv, int layer, tkv_tier tier, tkv_pair *out) {
    layer = tkvi_stored_layer(kv, 0, layer);
    if (!out || layer < 0 || (unsigned)tier >= TKV_TIER_COUNT) return TKV_ERR_ARG;
    *out = kv->tables.coding[kv->tables.plan[layer].now.coding[tier]].pair;
    return TKV_OK;
}

/* >>quality */
/* Sums of all gauges, or of those of one layer. */
static void tkvi_quality_sum(const tkv_cache *kv, int layer, tkv_quality_info *out) {
    tkvi_meter *m = kv->meter;
    tkvi_tally sum;
    double n;
    int i;
    memset(out, 0, sizeof *out);
    out->seq = TKV_NONE;
    if (!m) return;
    memset(&sum, 0, sizeof sum);
    tkvi_lock(&m->lock);
    for (i = 0; i < m->n; i++)
        if (layer < 0 || m->gauge[i].layer == layer) {
            tkvi_tally_add(&sum, &m->gauge[i].sum);
            out->heads++;
        }
    tkvi_unlock(&m->lock);
    out->every = m->every;
    out->seq = m->seq;
    out->samples = sum.samples;
    if (!sum.samples) return;
    n = (double)sum.samples;
    out->coverage = sum.keys ? (double)sum.kept / (double)sum.keys : 1.0;
    out->output_error = (double)sum.error / TKVI_METER_ONE / n;
    out->kl = (double)sum.divergence / TKVI_METER_ONE / n;
    out->kl_max = (double)sum.worst / TKVI_METER_ONE;
    out->top1 = (double)sum.agreed / n;
}

TKV_API tkv_status tkv_quality(const tkv_cache *kv, tkv_quality_info *out) {
    if (!kv || !out) return TKV_ERR_ARG;
    tkvi_quality_sum(kv, -1, out);
    return TKV_OK;
}

TKV_API tkv_status tkv_quality_of(const tkv_cache *kv, int layer, tkv_quality_info *out) {
    layer = tkvi_stored_layer(kv, 0, layer);
    if (!out || layer < 0) return TKV_ERR_ARG;
    tkvi_quality_sum(kv, layer, out);
    return TKV_OK;
}

TKV_API tkv_status tkv_quality_reset(tkv_cache *kv) {
    int i;
    if (!kv) return TKV_ERR_ARG;
    for (i = 0; kv->meter && i < kv->meter->n; i++)
        memset(&kv->meter->gauge[i].sum, 0, sizeof kv->meter->gauge[i].sum);
    return tkvi_ok(kv);
}

/* >>bytes */
/* One block's bytes; codes and metadata are what the formats use of them, the rest is padding. */
static void tkvi_add_block(tkv_memory_info *m, tkv_tier tier, const tkvi_bytes *bytes, size_t tokens) {
    m->tier[tier].tokens += tokens;
    m->tier[tier].codes += bytes->codes;
    m->tier[tier].metadata += bytes->metadata;
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
            tkvi_add_block(out, tkvi_tier_at(list, i), &kv->tables.coding[b->coding].bytes,
                           (size_t)(tkvi_block_end(kv, list, ids, i) - b->start));
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
    out->tables = kv->table_bytes + tkvi_learning_held(kv);
    out->scratch = kv->scratch_bytes;
    out->shadow = kv->shadow_bytes;
    out->index = kv->heap.held - (size_t)kv->pool.n_pages * kv->tables.page_bytes - out->tables -
                 out->scratch - out->shadow;
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
    for (i = 0; i < list->n; i++) bytes += kv->tables.coding[kv->pool.block[ids[i]].coding].bytes.total;
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

/* `waiting`: there is no table yet. */
static tkvi_layer_sum tkvi_layer_after(const tkvi_plan *p, int n, int waiting) {
    tkvi_layer_sum s;
    int64_t tokens = tkvi_max(0, n - p->sink), whole = tokens / TKVI_BLOCK, rest = tokens % TKVI_BLOCK;
    int64_t due = (int64_t)n - 1 - p->sink; /* the length that the last append's ageing saw, sinks apart */
    int64_t gone, archived, coded, margin = (int64_t)p->keep + tkvi_drop_margin(p);
    int tier;
    memset(&s, 0, sizeof s);
    gone = p->keep ? tkvi_ended(whole, due - margin) : 0;
    archived = tkvi_ended(whole, due - p->now.hot - p->now.warm);
    coded = tkvi_ended(whole, due - p->now.hot);
    archived = archived > gone ? archived : gone;
    coded = coded > archived ? coded : archived;
    if (waiting && p->now.shared[TKV_ARCHIVE]) archived = gone;
    if (waiting && p->now.shared[TKV_WARM]) coded = archived;
    s.blocks[TKV_ARCHIVE] = archived - gone;
    s.blocks[TKV_WARM] = coded - archived;
    s.blocks[TKV_HOT] = whole - coded;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) s.tokens[tier] = s.blocks[tier] * TKVI_BLOCK;
    s.tokens[TKV_HOT] += rest;
    s.blocks[TKV_HOT] += rest > 0;
    s.sink_tokens = p->keep && tokens > 0 && due >= margin ? 0 : tkvi_min(n, p->sink);
    return s;
}

static void tkvi_add_blocks(tkv_memory_info *m, const tkvi_shape *h, int key, tkv_tier tier, int64_t blocks,
                            int64_t tokens, int64_t *live) {
    m->tier[tier].tokens += (size_t)tokens;
    m->tier[tier].codes += (size_t)blocks * h->bytes[key].codes;
    m->tier[tier].metadata += (size_t)blocks * h->bytes[key].metadata;
    live[h->class_of[key]] += blocks;
}

/* Blocks of one layer, in `n_seqs` sequences that have come so far; returns those of one. */
static int64_t tkvi_add_layer(tkv_memory_info *m, const tkvi_shape *h, const tkvi_plan *p, int n_tokens,
                              int64_t n_seqs, int waiting, int64_t *live) {
    tkvi_layer_sum s = tkvi_layer_after(p, n_tokens, waiting);
    int64_t here = s.sink_tokens > 0;
    int tier;
    if (s.sink_tokens) tkvi_add_blocks(m, h, p->sink_coding, TKV_HOT, n_seqs, s.sink_tokens * n_seqs, live);
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) {
        tkvi_add_blocks(m, h, p->now.key[tier], (tkv_tier)tier, s.blocks[tier] * n_seqs,
                        s.tokens[tier] * n_seqs, live);
        here += s.blocks[tier];
    }
    return here;
}

/* The bytes with every layer's plan as this level has it. */
static tkv_status tkvi_estimate_at(tkvi_shape *h, int level, int n_tokens, int n_seqs, tkv_memory_info *out) {
    tkvi_rule rule[TKV_MAX_LEVELS];
    tkvi_sizes fixed;
    int64_t live[TKVI_MAX_CODINGS], all = 0, pages = 0, most = 0, learned = 0;
    tkv_memory_info m;
    size_t page_bytes;
    int i, c;
    if (!tkvi_fixed_sizes(h, &fixed)) return TKV_ERR_CONFIG;
    memset(&m, 0, sizeof m);
    memset(live, 0, sizeof live);
    for (i = 0; i < h->cfg.n_layers && n_tokens > 0 && n_seqs > 0; i++) {
        tkvi_plan p;
        int64_t waiting = 0, here;
        (void)tkvi_plan_of(h, i, &p, rule);
        p.now = rule[level];
        if (p.stored != i) continue;
        if (tkvi_plan_learns(
                &p)) { /* sequences that end before there is a table; under a budget it is made early */
            waiting = h->cfg.budget_bytes ? 0 : tkvi_min(n_seqs, TKVI_LEARN / n_tokens);
            if ((int64_t)(n_tokens - p.sink) * n_seqs > TKVI_BLOCK) learned = (int64_t)n_tokens * n_seqs;
        }
        here = tkvi_add_layer(&m, h, &p, n_tokens, n_seqs - waiting, 0, live);
        all += here * (n_seqs - waiting);
        most = here > most && waiting < n_seqs ? here : most;
        here = tkvi_add_layer(&m, h, &p, n_tokens, waiting, 1, live);
        all += here * waiting;
        most = here > most && waiting ? here : most;
    }
    for (c = 0; c < h->n_classes; c++) pages += tkvi_pages_for(&h->size_class[c], live[c]);
    pages += h->spare;
    if (all > 0x3fffffff || pages > 0x3fffffff || !tkvi_mul((size_t)pages + 1, h->page_bytes, &page_bytes) ||
        page_bytes > (size_t)-1 / 4)
        return TKV_ERR_CONFIG; /* more than this machine can address */
    page_bytes -= h->page_bytes;
    m.tables = tkvi_table_bytes(&fixed);
    m.scratch = fixed.solve + fixed.recode + fixed.parts;
    m.shadow = fixed.shadow;
    m.index = fixed.total - m.tables - m.scratch - m.shadow;
    if (h->any_shared && learned <= TKVI_LEARN_WELL) m.tables += tkvi_heard_bytes(&h->cfg);
    if (learned > TKVI_LEARN || h->cfg.budget_bytes) m.tables += tkvi_version_bytes(h);
    if (learned > TKVI_LEARN_WELL) m.tables += tkvi_version_bytes(h);
    if (all) {
        m.index += tkvi_cap_for(all) * sizeof(tkvi_block) + tkvi_cap_for(pages) * sizeof(tkvi_page);
        m.index +=
            (size_t)tkvi_cap_for(most + 1) * sizeof(uint32_t) * (size_t)h->cfg.n_layers * (size_t)n_seqs;
    }
    m.total = m.index + m.tables + m.scratch + m.shadow + page_bytes;
    m.peak = m.total;
    tkvi_sum_up(&m, &h->cfg, page_bytes);
    *out = m;
    return TKV_OK;
}

TKV_API tkv_status tkv_estimate(const tkv_config *cfg, int n_tokens, int n_seqs, tkv_memory_info *out) {
    tkvi_shape h;
    tkv_memory_info m;
    tkv_status st = tkvi_validate(cfg, &h, NULL, 0);
    int level;
    if (st) return st;
    if (!out || n_tokens < 0 || n_tokens > h.cfg.max_tokens || n_seqs < 0 || n_seqs > h.cfg.max_seqs)
        return TKV_ERR_ARG;
    for (level = h.cfg.policy.min_level;; level++) {
        st = tkvi_estimate_at(&h, level, n_tokens, n_seqs, &m);
        if (st) return st;
        if (!h.cfg.budget_bytes || m.total <= h.cfg.budget_bytes) break;
        if (level == h.cfg.policy.max_level) return TKV_ERR_BUDGET;
    }
    *out = m;
    return TKV_OK;
}

TKV_API tkv_status tkv_max_context(const tkv_config *cfg, int n_seqs, int *n_tokens) {
    tkvi_shape h;
    tkv_memory_info m;
    tkv_status st = tkvi_validate(cfg, &h, NULL, 0);
    int low = 0, high; /* low fits, what is above high does not */
    if (st) return st;
    if (!n_tokens || !h.cfg.budget_bytes || n_seqs < 1 || n_seqs > h.cfg.max_seqs) return TKV_ERR_ARG;
    for (high = h.cfg.max_tokens; low < high;) {
        const int n = low + (high - low + 1) / 2;
        st = tkvi_estimate_at(&h, h.cfg.policy.max_level, n, n_seqs, &m);
        if (st || m.total > h.cfg.budget_bytes) high = n - 1;
        else low = n;
    }
    *n_tokens = low;
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

/* Can a block of this tier have that format? With a ladder tiers keep what other levels made of them. */
static int tkvi_of_tier(const tkv_cache *kv, int layer, tkv_tier tier, int key) {
    const tkvi_rule *rule = &kv->tables.rule[(size_t)layer * (size_t)kv->tables.n_levels];
    int i, t, one = kv->tables.n_levels == 1;
    for (i = 0; i < kv->tables.n_levels; i++)
        for (t = 0; t < TKV_TIER_COUNT; t++)
            if (rule[i].key[t] == key && (one || tier == TKV_HOT ? t == (int)tier : 1)) return 1;
    return 0;
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
    if (list->tightest < 0 || list->tightest > list->tight || list->tightest > list->archive ||
        list->tight > list->archive + list->warm)
        return tkvi_broken(k, "blocks of the hot tail count as tight in layer", layer);
    if (list->chunk < 0 || list->chunk > list->len)
        return tkvi_broken(k, "the last append began behind the end of layer", layer);
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
        if (i < list->sinks ? kv->tables.coding[b->coding].key != p->sink_coding
                            : !tkvi_of_tier(kv, layer, tier, kv->tables.coding[b->coding].key))
            return tkvi_broken(k, "a block is not in its tier's format", (int64_t)ids[i]);
        most = (int64_t)p->now.hot + kv->tables.cfg.max_append + (tier == TKV_WARM ? p->now.warm : 0);
        if (tkvi_plan_learns(p)) most += TKVI_LEARN;
        if (i >= list->sinks && tier != TKV_ARCHIVE && age >= most && kv->tables.n_levels == 1)
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

/* The meter's copies: of coded blocks that exist (or left a window), in order, each in a place of its own. */
static tkv_status tkvi_check_meter(const tkvi_checker *k) {
    const tkvi_meter *m = k->kv->meter;
    uint64_t places;
    int i, a;
    if (!m) return TKV_OK;
    if (m->seq < -1 || m->seq >= k->kv->tables.cfg.max_seqs)
        return tkvi_broken(k, "the meter watches a sequence that does not exist", m->seq);
    for (i = 0; i < m->n; i++) {
        const tkvi_gauge *g = &m->gauge[i];
        const tkvi_list *list = m->seq < 0 ? NULL : tkvi_list_of(k->kv, m->seq, g->layer);
        int block = 0;
        if (g->n < 0 || g->n > m->slots || (g->n && !list) || g->stride < 1)
            return tkvi_broken(k, "the meter has copies of nothing, gauge", i);
        for (a = 0, places = 0; a < m->slots; a++) {
            if (g->slot[a] < 0 || g->slot[a] >= m->slots)
                return tkvi_broken(k, "a copy of the meter has no place, gauge", i);
            places += tkvi_scatter((uint32_t)g->slot[a]) - tkvi_scatter((uint32_t)a);
        }
        if (places) return tkvi_broken(k, "two copies of the meter in one place, gauge", i);
        for (a = 0; a < g->n; a++) {
            const uint32_t *ids = tkvi_ids(k->kv, m->seq, g->layer);
            if (a && g->start[a] <= g->start[a - 1]) return tkvi_broken(k, "copies out of order, gauge", i);
            if (g->start[a] < list->dropped) continue;
            while (block < list->n && tkvi_block_start(k->kv, ids, block) < g->start[a]) block++;
            if (block == list->n || tkvi_block_start(k->kv, ids, block) != g->start[a] ||
                k->kv->tables.coding[k->kv->pool.block[ids[block]].coding].key ==
                    k->kv->tables.plan[g->layer].now.key[TKV_HOT])
                return tkvi_broken(k, "the meter has a copy of a block that is not coded, gauge", i);
        }
    }
    return TKV_OK;
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
    if (!st) st = tkvi_check_meter(&k);
    if (st) return st;
    for (id = 0; id < kv->pool.block_cap; id++) refs += kv->pool.block[id].refs * tkvi_scatter(id);
    if (kv->tables.level < 0 || kv->tables.level >= kv->tables.n_levels)
        return tkvi_broken(&k, "there is no level", kv->tables.level);
    if (tkvi_lazy(kv) && (kv->pool.keep_all ? tkvi_in_use(kv) : kv->heap.held) > kv->tables.cfg.budget_bytes)
        return tkvi_broken(&k, "more is held than the budget", (int64_t)kv->heap.held);
    if (refs != entries) return tkvi_broken(&k, "blocks count other holders than the lists have", 0);
    held = kv->fixed_bytes + tkvi_learning_held(kv) + kv->pool.n_pages * kv->tables.page_bytes +
           kv->pool.page_cap * sizeof(tkvi_page) + kv->pool.block_cap * sizeof(tkvi_block);
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++)
        held += (size_t)kv->seq[seq].cap * (size_t)kv->tables.cfg.n_layers * sizeof(uint32_t);
    if (held != kv->heap.held) return tkvi_broken(&k, "bytes held do not add up", (int64_t)kv->heap.held);
    st = tkv_memory(kv, &m);
    sum = m.tables + m.index + m.scratch + m.shadow + m.slack;
    for (tier = 0; tier < TKV_TIER_COUNT; tier++) sum += m.tier[tier].codes + m.tier[tier].metadata;
    if (st || sum != m.total)
        return tkvi_broken(&k, "the parts of tkv_memory do not make its total", (int64_t)sum);
    return TKV_OK;
}

#endif /* TKVI_REPORT_H */
/* ======== decimal.h ======== */
/*
 * decimal.h - floats as decimal text and back, exactly: without strtod and printf, so that neither a locale nor a
 * compiler's flags have a say. May call base.
 *
 * A number m * 10^e and a float c * 2^x are compared as whole numbers of up to 384 bits. Everything follows from that:
 * the float of a text is found by halving (its neighbours' midpoints are floats with one bit more), the text of a
 * float is the shortest one that leads back to it.
 */
#ifndef TKVI_DECIMAL_H
#define TKVI_DECIMAL_H

#ifndef TKV_NO_REPORTS


#define TKVI_DECIMAL_LEAST                                                                                   \
    (-64)                    /* exponents: below, 19 digits are less than half of the smallest float ... */
#define TKVI_DECIMAL_MOST 39 /* ... and above, one digit is more than the largest */
#define TKVI_FLOAT_TEXT 24   /* room for any float, the final zero included */

typedef struct tkvi_wide {
    uint32_t word[12]; /* lowest first */
} tkvi_wide;

static tkvi_wide tkvi_wide_of(uint64_t x) {
    tkvi_wide a;
    memset(&a, 0, sizeof a);
    a.word[0] = (uint32_t)(x & 0xffffffffu);
    a.word[1] = (uint32_t)(x >> 32);
    return a;
}

static void tkvi_wide_times(tkvi_wide *a, uint32_t by) {
    uint64_t carry = 0;
    int i;
    for (i = 0; i < 12; i++) {
        carry += (uint64_t)a->word[i] * by;
        a->word[i] = (uint32_t)(carry & 0xffffffffu);
        carry >>= 32;
    }
}

/* Times 5^fives * 2^twos, where these are positive. */
static void tkvi_wide_scale(tkvi_wide *a, int fives, int twos) {
    for (; fives >= 13; fives -= 13) tkvi_wide_times(a, 1220703125u);
    for (; fives > 0; fives--) tkvi_wide_times(a, 5u);
    for (; twos >= 31; twos -= 31) tkvi_wide_times(a, 1u << 31);
    if (twos > 0) tkvi_wide_times(a, 1u << twos);
}

/* The sign of m * 10^e - c * 2^x; e within its limits, c * 2^x a float or a midpoint: 344 bits at most. */
static int tkvi_decimal_compare(uint64_t m, int e, uint32_t c, int x) {
    tkvi_wide a = tkvi_wide_of(m), b = tkvi_wide_of(c);
    int i;
    tkvi_wide_scale(&a, e, e - x);
    tkvi_wide_scale(&b, -e, x - e);
    for (i = 11; i >= 0; i--)
        if (a.word[i] != b.word[i]) return a.word[i] > b.word[i] ? 1 : -1;
    return 0;
}

/* A positive float is c * 2^x. */
static void tkvi_float_parts(uint32_t bits, uint32_t *c, int *x) {
    uint32_t exponent = bits >> 23;
    *c = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
    *x = (exponent ? (int)exponent : 1) - 150;
}

/* Does m * 10^e round to the float of these bits, or to a larger one? Ties go to the even one. */
static int tkvi_decimal_reaches(uint64_t m, int e, uint32_t bits) {
    uint32_t c;
    int x, order;
    if (!bits) return 1;
    tkvi_float_parts(bits - 1, &c, &x);
    order = tkvi_decimal_compare(m, e, 2 * c + 1, x - 1);
    return order > 0 || (order == 0 && bits % 2 == 0);
}

/* >>reading */
/* The float nearest to a decimal number: sign, digits, point, exponent. Digits beyond the 19th count as zeros. 0 if
 * it is no number, too large, or longer than anybody writes. */
static int tkvi_float_read(const char *s, size_t n, float *out) {
    uint64_t m = 0;
    uint32_t low = 0, high = 0x7f800000u;
    int e = 0, given = 0, point = 0, any = 0, negative, down;
    size_t i = 0;
    if (n < 1 || n > 64) return 0;
    negative = s[0] == '-';
    if (s[0] == '-' || s[0] == '+') i++;
    for (; i < n && ((s[i] >= '0' && s[i] <= '9') || (s[i] == '.' && !point)); i++) {
        if (s[i] == '.') {
            point = 1;
            continue;
        }
        any = 1;
        if (m < 1000000000000000000u) {
            m = 10u * m + (uint64_t)(s[i] - '0');
            e -= point;
        } else {
            e += !point;
        }
    }
    if (!any) return 0;
    if (i < n && (s[i] == 'e' || s[i] == 'E')) {
        i++;
        down = i < n && s[i] == '-';
        if (i < n && (s[i] == '-' || s[i] == '+')) i++;
        if (i == n) return 0;
        for (; i < n && s[i] >= '0' && s[i] <= '9'; i++)
            if (given < 1000) given = 10 * given + (s[i] - '0');
        e += down ? -given : given;
    }
    if (i < n) return 0;
    if (m == 0 || e < TKVI_DECIMAL_LEAST) high = 1; /* zero */
    else if (e > TKVI_DECIMAL_MOST || tkvi_decimal_reaches(m, e, high)) return 0;
    while (high - low > 1) { /* it reaches low, and not high */
        uint32_t middle = low + (high - low) / 2;
        if (tkvi_decimal_reaches(m, e, middle)) low = middle;
        else high = middle;
    }
    *out = tkvi_from_bits(low | (negative ? 0x80000000u : 0u));
    return 1;
}

/* >>writing */
/* The fewest digits m with m * 10^e nearer to this float than to any other; bits of a positive one. */
static uint64_t tkvi_float_shortest(uint32_t bits, int *e) {
    uint64_t m, low = 100000000u, high = 1000000000u, power = high;
    uint32_t c;
    int x, first, n, i, up;
    tkvi_float_parts(bits, &c, &x);
    first = bits >> 23 ? ((int)(bits >> 23) - 127) * 77 / 256 - 2
                       : -46; /* not above the first digit's exponent */
    while (tkvi_decimal_compare(1, first + 1, c, x) <= 0) first++;
    while (high - low > 1) { /* the first nine digits, cut off */
        m = low + (high - low) / 2;
        if (tkvi_decimal_compare(m, first - 8, c, x) <= 0) low = m;
        else high = m;
    }
    for (n = 1; n <= 9; n++) {
        power /= 10u;
        *e = first - n + 1;
        up = tkvi_decimal_compare(2u * (low / power) + 1u, *e, c, x + 1) < 0; /* the next one is nearer */
        for (i = 0; i < 2; i++) {
            m = low / power + (uint64_t)(up ^ i);
            if (tkvi_decimal_reaches(m, *e, bits) && !tkvi_decimal_reaches(m, *e, bits + 1)) return m;
        }
    }
    return m; /* not reached: nine digits tell any two floats apart */
}

/* Text of a finite float, into TKVI_FLOAT_TEXT bytes: 0.05, 1000, 1.5e-7. Also a number of JSON. */
static void tkvi_float_write(float x, char *out) {
    uint32_t bits = tkvi_bits(x);
    char digits[12];
    uint64_t m = 0;
    int e = 0, n = 0, at, i;
    tkvi_text t = tkvi_text_begin(out, TKVI_FLOAT_TEXT);
    if (bits >> 31) tkvi_say(&t, "-");
    if (bits & 0x7fffffffu) m = tkvi_float_shortest(bits & 0x7fffffffu, &e);
    for (; m && m % 10u == 0; m /= 10u) e++;
    {
        tkvi_text d = tkvi_text_begin(digits, sizeof digits);
        tkvi_say_int(&d, (int64_t)m);
    }
    while (digits[n]) n++;
    at = n + e; /* of the point: 0.digits * 10^at */
    if (at < -3 || at > 9) {
        char head[2] = {digits[0], 0};
        tkvi_say(&t, head);
        if (n > 1) tkvi_say(&t, ".");
        tkvi_say(&t, digits + 1);
        tkvi_say(&t, "e");
        tkvi_say_int(&t, at - 1);
        return;
    }
    if (at <= 0) tkvi_say(&t, "0.");
    for (i = at; i < 0; i++) tkvi_say(&t, "0");
    for (i = 0; i < n || i < at; i++) {
        char one[2] = {i < n ? digits[i] : '0', 0};
        if (i == at && i > 0) tkvi_say(&t, ".");
        tkvi_say(&t, one);
    }
}

#endif /* TKV_NO_REPORTS */
#endif /* TKVI_DECIMAL_H */
/* ======== text.h ======== */
/*
 * text.h - configs as text, in and out: lines of `key = value`, or one flat object of JSON. The keys are the fields.
 * A table has a row for each field, a kind says how a value is read and written; a new field is a new row.
 *
 *     # comment                          {
 *     preset = balanced                    "preset": "balanced",
 *     n_layers = 32                        "n_layers": 32,
 *     archive = a30/r20                    "archive": "a30/r20",
 *     layers[0-5].window = 1024            "layers[0-5].window": 1024
 *                                        }
 *
 * A text is read three times: checked without a trace, then the preset, then all other values. May call preset, policy
 * and below.
 */
#ifndef TKVI_TEXT_H
#define TKVI_TEXT_H

#ifndef TKV_NO_REPORTS


/* >>out: text that is counted before it is written, so that a buffer that is too small stays as it is */
typedef struct tkvi_out {
    char *at; /* NULL: only counts */
    size_t room, used;
    int json;       /* 1: JSON, 2: the same on one line */
    int more;       /* a value of this object came before */
    tkv_status bad; /* what has no text */
} tkvi_out;

static void tkvi_print_bytes(tkvi_out *o, const char *s, size_t n) {
    if (o->at && o->used <= o->room && n <= o->room - o->used) memcpy(o->at + o->used, s, n);
    o->used += n;
}

static void tkvi_print(tkvi_out *o, const char *s) { tkvi_print_bytes(o, s, strlen(s)); }

static void tkvi_print_count(tkvi_out *o, uint64_t n) {
    char digits[20];
    int i = 20;
    do digits[--i] = (char)('0' + (int)(n % 10u));
    while (n /= 10u);
    tkvi_print_bytes(o, digits + i, (size_t)(20 - i));
}

static void tkvi_print_int(tkvi_out *o, int64_t n) {
    if (n < 0) tkvi_print(o, "-");
    tkvi_print_count(o, n < 0 ? 0u - (uint64_t)n : (uint64_t)n);
}

static void tkvi_print_float(tkvi_out *o, float x) {
    char text[TKVI_FLOAT_TEXT];
    if (!tkvi_is_finite(x)) {
        o->bad = TKV_ERR_CONFIG;
        return;
    }
    tkvi_float_write(x, text);
    tkvi_print(o, text);
}

/* The quotes of a string in JSON. */
static void tkvi_print_quote(tkvi_out *o) {
    if (o->json) tkvi_print(o, "\"");
}

typedef void (*tkvi_writer)(tkvi_out *o, const void *what);

/* The whole of it or nothing; *needed is how much there is, the final zero included. */
static tkv_status tkvi_write_text(tkvi_writer write, const void *what, char *buf, size_t size,
                                  size_t *needed) {
    tkvi_out o;
    size_t n;
    memset(&o, 0, sizeof o);
    write(&o, what);
    if (o.bad) return o.bad;
    n = o.used;
    if (needed) *needed = n + 1;
    if (!buf) return needed ? TKV_OK : TKV_ERR_ARG;
    if (size <= n) return TKV_ERR_ARG;
    memset(&o, 0, sizeof o);
    o.at = buf;
    o.room = n;
    write(&o, what);
    buf[n] = 0;
    return TKV_OK;
}

/* >>rows */
typedef struct tkvi_span {
    const char *at;
    size_t n;
} tkvi_span;

typedef struct tkvi_word {
    const char *name;
    int value;
} tkvi_word;

struct tkvi_row; /* (the three know each other) */
struct tkvi_parser;

typedef struct tkvi_kind {
    const char *want; /* what is right, for a person */
    /* `at` is the field; NULL: only check. 0: this is none. */
    int (*read)(struct tkvi_parser *r, const struct tkvi_row *row, tkvi_span s, void *at);
    /* NULL: only read, and before all others */
    void (*write)(const struct tkvi_row *row, const void *at, tkvi_out *o);
} tkvi_kind;

typedef struct tkvi_row {
    const char *name;
    int kind; /* into tkvi_kinds */
    size_t offset, size;
    const tkvi_word *words; /* names of values, up to one without; NULL: none */
} tkvi_row;

typedef struct tkvi_fields { /* rows of one struct */
    const char *name;        /* NULL: key `field`; otherwise `name.field`, or ... */
    int most;                /* ... if not 0: `name[i].field` and `name[i-j].field`, i and j below it */
    size_t offset, stride;   /* in the whole, where it is a part of that; of these */
    const tkvi_row *row;
    int n_rows;
} tkvi_fields;

#define TKVI_MAX_FIELDS 8
#define TKVI_SEEN_BYTES 8192 /* a bit for each field: 15 of 4,096 layers, and 500 more */

typedef struct tkvi_parser {
    const tkvi_fields *fields;
    int n_fields;
    void *base[TKVI_MAX_FIELDS]; /* the structs; a list may be NULL while only checked */
    const tkv_config_room *room;
    /* where it is */
    const char *text, *at, *end;
    int line, json, begun;
    tkvi_span key, value;
    int key_line;
    /* what it saw */
    int highest[TKVI_MAX_FIELDS], highest_line[TKVI_MAX_FIELDS]; /* index of a list, from 1; 0: none */
    int frequencies, frequencies_line;
    uint8_t seen[TKVI_SEEN_BYTES];
    tkvi_text reason;
} tkvi_parser;

/* Kinds, as in tkvi_kinds. */
enum {
    TKVI_INT,
    TKVI_SIZE,
    TKVI_FLOAT,
    TKVI_FLOATS,
    TKVI_PAIR,
    TKVI_FLAGS,
    TKVI_NAME,
    TKVI_FREQUENCIES,
    TKVI_PRESET,
    TKVI_PROFILE
};

/* >>spans */
static int tkvi_span_is(tkvi_span s, const char *name) {
    return s.n == strlen(name) && memcmp(s.at, name, s.n) == 0;
}

static int tkvi_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

static tkvi_span tkvi_trimmed(const char *from, const char *to) {
    tkvi_span s;
    while (from < to && tkvi_blank(*from)) from++;
    while (from < to && tkvi_blank(to[-1])) to--;
    s.at = from;
    s.n = (size_t)(to - from);
    return s;
}

/* Takes the part before the separator, or all there is, off the front. */
static tkvi_span tkvi_front(tkvi_span *s, char separator) {
    const char *from = s->at, *end = s->at + s->n, *at = from;
    while (at < end && *at != separator) at++;
    s->at = at < end ? at + 1 : end;
    s->n = (size_t)(end - s->at);
    return tkvi_trimmed(from, at);
}

/* As a string, cut to the room. */
static void tkvi_copied(tkvi_span s, char *out, size_t room) {
    size_t n = s.n < room ? s.n : room - 1;
    memcpy(out, s.at, n);
    out[n] = 0;
}

/* For a person: without the rest of something long, and without what would ruin a terminal. */
static void tkvi_say_span(tkvi_text *t, tkvi_span s) {
    char name[41];
    size_t i;
    tkvi_copied(s, name, sizeof name);
    for (i = 0; i < s.n && i < 40; i++)
        if (name[i] < ' ' || name[i] > '~') name[i] = '?';
    tkvi_say(t, name);
    if (s.n > 40) tkvi_say(t, "...");
}

/* >>kinds */
/* Digits only; at most 2^63 - 1. */
static int tkvi_digits(tkvi_span s, uint64_t *out) {
    const uint64_t most = (uint64_t)-1 >> 1;
    uint64_t n = 0;
    size_t i;
    for (i = 0; i < s.n; i++) {
        const unsigned digit = (unsigned)(s.at[i] - '0');
        if (digit > 9 || n > (most - digit) / 10u) return 0;
        n = 10u * n + digit;
    }
    *out = n;
    return s.n > 0;
}

/* Enums can be as small as a byte. */
static int tkvi_field_int(const tkvi_row *row, const void *at) {
    int x;
    if (row->size < sizeof x) return *(const uint8_t *)at;
    memcpy(&x, at, sizeof x);
    return x;
}

static int tkvi_read_int(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    const tkvi_word *w;
    const int negative = s.n > 0 && s.at[0] == '-';
    uint64_t n = 0;
    int x = 0;
    (void)r;
    for (w = row->words; w && w->name && !tkvi_span_is(s, w->name); w++) continue;
    if (w && w->name) {
        x = w->value;
    } else {
        s.at += negative;
        s.n -= (size_t)negative;
        if (!tkvi_digits(s, &n) || n > 0x7fffffffu) return 0;
        x = negative ? -(int)n : (int)n;
    }
    if (!at) return 1;
    if (row->size < sizeof x) *(uint8_t *)at = (uint8_t)(x & 0xff);
    else memcpy(at, &x, sizeof x);
    return 1;
}

static void tkvi_write_int(const tkvi_row *row, const void *at, tkvi_out *o) {
    const tkvi_word *w;
    const int x = tkvi_field_int(row, at);
    for (w = row->words; w && w->name && w->value != x; w++) continue;
    if (!w || !w->name) {
        tkvi_print_int(o, x);
        return;
    }
    if (strcmp(w->name, "true") != 0) tkvi_print_quote(o);
    tkvi_print(o, w->name);
    if (strcmp(w->name, "true") != 0) tkvi_print_quote(o);
}

/* 4096, 512K, 1.5G, 64MiB: letters are powers of 1024. */
static int tkvi_read_size(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    static const char letters[] = "KMGT";
    uint64_t whole = 0, part = 0, unit = 1;
    tkvi_span fraction;
    size_t i, bytes;
    (void)r;
    (void)row;
    if (s.n > 2 && memcmp(s.at + s.n - 2, "iB", 2) == 0) {
        s.n -= 2;
        unit = 0; /* there must be a letter now */
    }
    for (i = 0; s.n > 0 && i < 4; i++)
        if (s.at[s.n - 1] == letters[i]) {
            unit = (uint64_t)1 << (10u * (unsigned)(i + 1));
            s.n--;
            break;
        }
    fraction = s;
    s = tkvi_front(&fraction, '.');
    if (unit == 0 || !tkvi_digits(s, &whole) || whole > ((uint64_t)-1 >> 1) / unit) return 0;
    whole *= unit;
    for (i = 0; i < fraction.n; i++) { /* rounded down to a byte */
        const unsigned digit = (unsigned)(fraction.at[i] - '0');
        if (digit > 9 || i > 3 || unit == 1) return 0;
        part = 10u * part + digit;
    }
    for (; i < 4; i++) part *= 10u;
    whole += part * unit / 10000u;
    bytes = (size_t)whole;
    if (whole != (uint64_t)bytes) return 0; /* more than this machine can address */
    if (at) memcpy(at, &bytes, sizeof bytes);
    return 1;
}

static void tkvi_write_size(const tkvi_row *row, const void *at, tkvi_out *o) {
    size_t bytes;
    (void)row;
    memcpy(&bytes, at, sizeof bytes);
    tkvi_print_count(o, bytes);
}

static int tkvi_read_float(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    float x;
    (void)r;
    (void)row;
    if (!tkvi_float_read(s.at, s.n, &x)) return 0;
    if (at) memcpy(at, &x, sizeof x);
    return 1;
}

static void tkvi_write_float(const tkvi_row *row, const void *at, tkvi_out *o) {
    float x;
    (void)row;
    memcpy(&x, at, sizeof x);
    tkvi_print_float(o, x);
}

/* Up to `most` numbers and commas, to `at` if that is not NULL; how many, 0 if these are none. */
static int tkvi_read_list(tkvi_span s, int most, float *at) {
    int n;
    for (n = 0; n < most; n++) {
        float x;
        tkvi_span one = tkvi_front(&s, ',');
        if (!tkvi_float_read(one.at, one.n, &x)) return 0;
        if (at) at[n] = x;
        if (s.n == 0) return s.at[-1] == ',' ? 0 : n + 1; /* a comma at the end wants one more */
    }
    return 0;
}

static void tkvi_write_list(const float *x, int n, tkvi_out *o) {
    int i;
    if (o->json) tkvi_print(o, "[");
    for (i = 0; i < n; i++) {
        if (i) tkvi_print(o, ", ");
        tkvi_print_float(o, x[i]);
    }
    if (o->json) tkvi_print(o, "]");
}

/* An array of floats that ends with zeros. */
static int tkvi_read_floats(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    const int most = (int)(row->size / sizeof(float));
    (void)r;
    if (!tkvi_read_list(s, most, NULL)) return 0;
    if (!at) return 1;
    memset(at, 0, row->size);
    return tkvi_read_list(s, most, (float *)at);
}

static void tkvi_write_floats(const tkvi_row *row, const void *at, tkvi_out *o) {
    const float *x = (const float *)at;
    int n = (int)(row->size / sizeof(float));
    while (n > 1 && tkvi_bits(x[n - 1]) == 0) n--;
    tkvi_write_list(x, n, o);
}

static int tkvi_read_format(tkvi_span s, tkv_format *out) {
    char name[16];
    if (s.n >= sizeof name) return 0;
    tkvi_copied(s, name, sizeof name);
    *out = tkv_format_from_name(name);
    return *out != TKV_FORMAT_DEFAULT || strcmp(name, "default") == 0;
}

/* a30/r20, or one name for both sides. */
static int tkvi_read_pair(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    tkv_pair p;
    const size_t n = s.n;
    const tkvi_span k = tkvi_front(&s, '/');
    (void)r;
    (void)row;
    if (!tkvi_read_format(k, &p.k)) return 0;
    p.v = p.k;
    if (k.n < n && !tkvi_read_format(s, &p.v)) return 0;
    if (at) memcpy(at, &p, sizeof p);
    return 1;
}

static void tkvi_print_format(tkvi_out *o, tkv_format f) {
    const char *name = f == TKV_FORMAT_DEFAULT ? "default" : tkv_format_name(f);
    if (!name) o->bad = TKV_ERR_CONFIG;
    else tkvi_print(o, name);
}

static void tkvi_print_pair(tkvi_out *o, tkv_pair p) {
    tkvi_print_quote(o);
    tkvi_print_format(o, p.k);
    if (p.k != p.v) {
        tkvi_print(o, "/");
        tkvi_print_format(o, p.v);
    }
    tkvi_print_quote(o);
}

static void tkvi_write_pair(const tkvi_row *row, const void *at, tkvi_out *o) {
    tkv_pair p;
    (void)row;
    memcpy(&p, at, sizeof p);
    tkvi_print_pair(o, p);
}

/* clip+norm, none. */
static int tkvi_read_flags(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    int x = 0;
    (void)r;
    if (s.n == 0 || s.at[s.n - 1] == '+') return 0;
    while (s.n && !tkvi_span_is(s, "none")) {
        const tkvi_span one = tkvi_front(&s, '+');
        const tkvi_word *w;
        for (w = row->words; w->name && !tkvi_span_is(one, w->name); w++) continue;
        if (!w->name || (x & w->value)) return 0;
        x |= w->value;
    }
    if (s.n && x) return 0;
    if (at) memcpy(at, &x, sizeof x);
    return 1;
}

static void tkvi_write_flags(const tkvi_row *row, const void *at, tkvi_out *o) {
    int x = tkvi_field_int(row, at), any = 0;
    const tkvi_word *w;
    tkvi_print_quote(o);
    for (w = row->words; w->name; w++)
        if (x & w->value) {
            if (any++) tkvi_print(o, "+");
            tkvi_print(o, w->name);
            x &= ~w->value;
        }
    tkvi_print_quote(o);
    if (x) o->bad = TKV_ERR_CONFIG;
}

static int tkvi_name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
}

/* An array of characters, its final zero included. */
static int tkvi_read_name(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    size_t i;
    (void)r;
    if (s.n == 0 || s.n >= row->size) return 0;
    for (i = 0; i < s.n; i++)
        if (!tkvi_name_char(s.at[i])) return 0;
    if (!at) return 1;
    memset(at, 0, row->size);
    memcpy(at, s.at, s.n);
    return 1;
}

static void tkvi_write_name(const tkvi_row *row, const void *at, tkvi_out *o) {
    const char *name = (const char *)at;
    size_t n = 0;
    tkvi_print_quote(o);
    for (; n < row->size && name[n]; n++)
        if (!tkvi_name_char(name[n])) o->bad = TKV_ERR_CONFIG;
    if (n == row->size) o->bad = TKV_ERR_CONFIG;
    tkvi_print_bytes(o, name, n);
    tkvi_print_quote(o);
}

/* tkv_rope.frequencies, in memory of the caller's. */
static int tkvi_read_frequencies(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    const int most = r->room && r->room->frequencies ? r->room->n_frequencies : 0;
    (void)row;
    r->frequencies = tkvi_read_list(s, TKV_MAX_HEAD_DIM / 2, NULL);
    r->frequencies_line = r->key_line;
    if (!r->frequencies) return 0;
    if (!at || r->frequencies > most) return 1; /* which is said at the end of the check */
    tkvi_read_list(s, most, r->room->frequencies);
    {
        const float *x = r->room->frequencies;
        memcpy(at, &x, sizeof x);
    }
    return 1;
}

static void tkvi_write_frequencies(const tkvi_row *row, const void *at, tkvi_out *o) {
    const tkv_rope *rope = (const tkv_rope *)(const void *)((const char *)at - row->offset);
    if (rope->dim < 2 || rope->dim > TKV_MAX_HEAD_DIM) o->bad = TKV_ERR_CONFIG;
    else tkvi_write_list(rope->frequencies, rope->dim / 2, o);
}

static int tkvi_read_preset(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    char name[32];
    tkv_config any;
    (void)r;
    (void)row;
    memset(&any, 0, sizeof any);
    if (s.n >= sizeof name) return 0;
    tkvi_copied(s, name, sizeof name);
    return tkv_config_preset(at ? (tkv_config *)at : &any, name) == TKV_OK;
}

static int tkvi_read_profile(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    char name[32];
    tkv_policy_config any;
    (void)r;
    (void)row;
    if (s.n >= sizeof name) return 0;
    tkvi_copied(s, name, sizeof name);
    return tkv_policy_profile(at ? (tkv_policy_config *)at : &any, name) == TKV_OK;
}

static const tkvi_kind tkvi_kinds[] = {
    {"a whole number", tkvi_read_int, tkvi_write_int},
    {"bytes, such as 65536, 512K, 1.5G, 64MiB", tkvi_read_size, tkvi_write_size},
    {"a number", tkvi_read_float, tkvi_write_float},
    {"numbers with commas between them", tkvi_read_floats, tkvi_write_floats},
    {"formats of K and V, such as a30/r20, or one for both (tkv_format_name)", tkvi_read_pair,
     tkvi_write_pair},
    {"names joined by +", tkvi_read_flags, tkvi_write_flags},
    {"a short name of letters, digits and _ - .", tkvi_read_name, tkvi_write_name},
    {"rope.dim / 2 numbers with commas between them", tkvi_read_frequencies, tkvi_write_frequencies},
    {"the name of a preset (tkv_preset_name)", tkvi_read_preset, NULL},
    {"the name of a profile (tkv_policy_profile)", tkvi_read_profile, NULL},
};

/* >>the table of all fields */
static const tkvi_word tkvi_words_switch[] = {{"false", 0}, {"true", 1}, {NULL, 0}};
static const tkvi_word tkvi_words_none[] = {{"none", TKV_NONE}, {NULL, 0}};
static const tkvi_word tkvi_words_length[] = {{"none", TKV_NONE}, {"all", TKV_ALL}, {NULL, 0}};
static const tkvi_word tkvi_words_fit[] = {
    {"clip", TKV_FIT_CLIP}, {"norm", TKV_FIT_NORM}, {"unbiased", TKV_FIT_UNBIASED}, {NULL, 0}};
static const tkvi_word tkvi_words_rotate[] = {{"k", TKV_ROTATE_K}, {"v", TKV_ROTATE_V}, {NULL, 0}};
static const tkvi_word tkvi_words_kvquant[] = {{"post-rope", TKV_KVQUANT_POST_ROPE},
                                               {"uniform", TKV_KVQUANT_UNIFORM},
                                               {"norm", TKV_KVQUANT_NORM},
                                               {"dense", TKV_KVQUANT_DENSE},
                                               {NULL, 0}};
static const tkvi_word tkvi_words_nonfinite[] = {
    {"refuse", TKV_NONFINITE_REFUSE}, {"saturate", TKV_NONFINITE_SATURATE}, {NULL, 0}};
static const tkvi_word tkvi_words_isa[] = {{"auto", TKV_ISA_AUTO},
                                           {"scalar", TKV_ISA_SCALAR},
                                           {"avx2", TKV_ISA_AVX2},
                                           {"avx512", TKV_ISA_AVX512},
                                           {"neon", TKV_ISA_NEON},
                                           {"wasm", TKV_ISA_WASM},
                                           {NULL, 0}};

#define TKVI_ROW(type, field, kind, words)                                                                   \
    { #field, kind, offsetof(type, field), sizeof(((type *)0)->field), words }

static const tkvi_row tkvi_config_rows[] = {
    {"preset", TKVI_PRESET, 0, 0, NULL},
    TKVI_ROW(tkv_config, n_layers, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, n_heads, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, n_kv_heads, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, head_dim, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, v_head_dim, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, scale, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_config, max_seqs, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, max_tokens, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, max_append, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, sink_tokens, TKVI_INT, tkvi_words_none),
    TKVI_ROW(tkv_config, hot_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_config, warm_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_config, window, TKVI_INT, tkvi_words_none),
    TKVI_ROW(tkv_config, hot, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_config, warm, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_config, archive, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_config, group_size, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, allocation_unit, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, fit, TKVI_FLAGS, tkvi_words_fit),
    TKVI_ROW(tkv_config, rotate, TKVI_FLAGS, tkvi_words_rotate),
    TKVI_ROW(tkv_config, center_k, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_config, squat_block, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, subspaces, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, kvquant, TKVI_FLAGS, tkvi_words_kvquant),
    TKVI_ROW(tkv_config, nonfinite, TKVI_INT, tkvi_words_nonfinite),
    TKVI_ROW(tkv_config, precise, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_config, isa, TKVI_INT, tkvi_words_isa),
    TKVI_ROW(tkv_config, quality_heads, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, quality_tokens, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, quality_every, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, budget_bytes, TKVI_SIZE, NULL),
    TKVI_ROW(tkv_config, n_levels, TKVI_INT, NULL),
};

static const tkvi_row tkvi_rope_rows[] = {
    TKVI_ROW(tkv_rope, dim, TKVI_INT, NULL),
    TKVI_ROW(tkv_rope, interleaved, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_rope, base, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_rope, scale, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_rope, frequencies, TKVI_FREQUENCIES, NULL),
};

static const tkvi_row tkvi_layer_rows[] = {
    TKVI_ROW(tkv_layer_config, no_cache, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_layer_config, share_kv, TKVI_INT, NULL),
    TKVI_ROW(tkv_layer_config, sink_tokens, TKVI_INT, tkvi_words_none),
    TKVI_ROW(tkv_layer_config, hot_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_layer_config, warm_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_layer_config, window, TKVI_INT, tkvi_words_none),
    TKVI_ROW(tkv_layer_config, hot, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_layer_config, warm, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_layer_config, archive, TKVI_PAIR, NULL),
};

static const tkvi_row tkvi_level_rows[] = {
    TKVI_ROW(tkv_level, hot_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_level, warm_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_level, warm, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_level, archive, TKVI_PAIR, NULL),
};

static const tkvi_row tkvi_policy_rows[] = {
    {"profile", TKVI_PROFILE, 0, 0, NULL},
    TKVI_ROW(tkv_policy_config, threshold, TKVI_FLOATS, NULL),
    TKVI_ROW(tkv_policy_config, hysteresis, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_policy_config, alpha, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_policy_config, min_level, TKVI_INT, NULL),
    TKVI_ROW(tkv_policy_config, max_level, TKVI_INT, tkvi_words_none),
};

#define TKVI_ROWS_OF(rows) rows, (int)(sizeof(rows) / sizeof *(rows))

/* tkvi_parser has a bit for each field. */
enum { TKVI_LAYER_FIELDS = TKVI_MAX_LAYERS * (int)(sizeof tkvi_layer_rows / sizeof *tkvi_layer_rows) };
typedef char tkvi_seen_is_enough[TKVI_LAYER_FIELDS + 512 <= 8 * TKVI_SEEN_BYTES ? 1 : -1];

enum { TKVI_OF_CONFIG, TKVI_OF_ROPE, TKVI_OF_POLICY, TKVI_OF_LADDER, TKVI_OF_LAYERS, TKVI_CONFIG_FIELDS };

static const tkvi_fields tkvi_config_fields[TKVI_CONFIG_FIELDS] = {
    {NULL, 0, 0, 0, TKVI_ROWS_OF(tkvi_config_rows)},
    {"rope", 0, offsetof(tkv_config, rope), 0, TKVI_ROWS_OF(tkvi_rope_rows)},
    {"policy", 0, offsetof(tkv_config, policy), 0, TKVI_ROWS_OF(tkvi_policy_rows)},
    {"ladder", TKV_MAX_LEVELS, 0, sizeof(tkv_level), TKVI_ROWS_OF(tkvi_level_rows)},
    {"layers", TKVI_MAX_LAYERS, 0, sizeof(tkv_layer_config), TKVI_ROWS_OF(tkvi_layer_rows)},
};

/* The lists of a config: a pointer and a count, and where the caller has memory for them. */
typedef struct tkvi_array {
    int group;
    const char *count_name;
    size_t at, count;           /* in tkv_config */
    size_t room_at, room_count; /* in tkv_config_room */
} tkvi_array;

#define TKVI_ARRAY(group, field, count)                                                                      \
    {                                                                                                        \
        group, #count, offsetof(tkv_config, field), offsetof(tkv_config, count),                             \
            offsetof(tkv_config_room, field), offsetof(tkv_config_room, count)                               \
    }

static const tkvi_array tkvi_arrays[] = {TKVI_ARRAY(TKVI_OF_LAYERS, layers, n_layers),
                                         TKVI_ARRAY(TKVI_OF_LADDER, ladder, n_levels)};

#define TKVI_ARRAYS ((int)(sizeof tkvi_arrays / sizeof *tkvi_arrays))

static const tkvi_fields tkvi_policy_fields = {NULL, 0, 0, 0, TKVI_ROWS_OF(tkvi_policy_rows)};

/* >>errors: a line, then what is wrong, then what would be right */
static tkvi_text *tkvi_say_line(tkvi_parser *r, int line) {
    tkvi_say(&r->reason, "line ");
    tkvi_say_int(&r->reason, line);
    tkvi_say(&r->reason, ": ");
    return &r->reason;
}

static int tkvi_unreadable(tkvi_parser *r, const char *what) {
    tkvi_say(tkvi_say_line(r, r->line), what);
    return -1;
}

/* How many letters two short names differ by. */
static int tkvi_distance(const char *a, const char *b) {
    int row[64], i, k, n = (int)strlen(b);
    for (k = 0; k <= n; k++) row[k] = k;
    for (i = 1; a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (k = 1; k <= n; k++) {
            const int other = corner + (a[i - 1] != b[k - 1]);
            corner = row[k];
            row[k] = tkvi_min(other, 1 + tkvi_min(row[k], row[k - 1]));
        }
    }
    return row[n];
}

/* A key that does not exist, and the nearest one that does. */
static void tkvi_say_unknown(tkvi_parser *r) {
    tkvi_text *t = tkvi_say_line(r, r->key_line);
    char key[48], name[64];
    size_t i, n = 0;
    int g, row, inside = 0, best = 4, best_g = -1, best_row = 0;
    for (i = 0; i < r->key.n && n + 1 < sizeof key; i++) { /* layers[3].window is layers.window here */
        inside += r->key.at[i] == '[';
        if (!inside) key[n++] = r->key.at[i];
        inside -= r->key.at[i] == ']';
    }
    key[n] = 0;
    for (g = 0; g < r->n_fields; g++)
        for (row = 0; row < r->fields[g].n_rows; row++) {
            tkvi_text at = tkvi_text_begin(name, sizeof name);
            int distance;
            if (r->fields[g].name) tkvi_say(&at, r->fields[g].name);
            if (r->fields[g].name) tkvi_say(&at, ".");
            tkvi_say(&at, r->fields[g].row[row].name);
            distance = tkvi_distance(key, name);
            if (distance >= best) continue;
            best = distance;
            best_g = g;
            best_row = row;
        }
    tkvi_say_span(t, r->key);
    tkvi_say(t, " is no key; ");
    tkvi_say(t, best_g < 0 ? "keys are the fields of the config" : "the nearest one is ");
    if (best_g < 0) return;
    if (r->fields[best_g].name) {
        tkvi_say(t, r->fields[best_g].name);
        if (r->fields[best_g].most) {
            tkvi_say(t, "[i] or [i-j], up to ");
            tkvi_say_int(t, r->fields[best_g].most - 1);
            tkvi_say(t, ", and ");
        }
        tkvi_say(t, ".");
    }
    tkvi_say(t, r->fields[best_g].row[best_row].name);
}

static void tkvi_say_bad_value(tkvi_parser *r, const tkvi_row *row) {
    tkvi_text *t = tkvi_say_line(r, r->key_line);
    const tkvi_word *w = row->words;
    tkvi_say_span(t, r->key);
    tkvi_say(t, r->value.n ? " is " : " has no value");
    tkvi_say_span(t, r->value);
    tkvi_say(t, "; it must be ");
    tkvi_say(t, tkvi_kinds[row->kind].want);
    for (; w && w->name; w++) {
        tkvi_say(t, w > row->words ? ", " : row->kind == TKVI_FLAGS ? ": " : " or ");
        tkvi_say(t, w->name);
    }
}

/* >>scanning: one key and its value after the other */
/* Blanks, ends of lines, comments. */
static void tkvi_skip(tkvi_parser *r) {
    int comment = 0;
    for (; r->at < r->end && (comment || *r->at == '#' || tkvi_blank(*r->at)); r->at++) {
        comment = *r->at != '\n' && (comment || *r->at == '#');
        r->line += *r->at == '\n';
    }
}

static int tkvi_is_next(const tkvi_parser *r, char c) { return r->at < r->end && *r->at == c; }

/* What stands between the present character and the closing one, neither included. */
static int tkvi_enclosed(tkvi_parser *r, char close, tkvi_span *out) {
    const char *from = ++r->at;
    for (; r->at < r->end && *r->at != close; r->at++) {
        if (*r->at == '\n' && close == '"') break;
        if (*r->at == '\\') return tkvi_unreadable(r, "there is a backslash; no key and no value needs one");
        r->line += *r->at == '\n';
    }
    if (!tkvi_is_next(r, close))
        return tkvi_unreadable(r, close == '"' ? "a \" is missing" : "a ] is missing");
    *out = tkvi_trimmed(from, r->at++);
    return 1;
}

static int tkvi_one_of(char c, const char *set) {
    while (*set && *set != c) set++;
    return *set != 0;
}

/* A value: "in quotes", [a list], or what stands there up to one of the characters that end it. */
static int tkvi_scan_value(tkvi_parser *r, const char *ends) {
    const char *from;
    while (r->at < r->end && *r->at != '\n' && tkvi_blank(*r->at)) r->at++;
    if (tkvi_is_next(r, '"')) return tkvi_enclosed(r, '"', &r->value);
    if (tkvi_is_next(r, '[')) return tkvi_enclosed(r, ']', &r->value);
    if (tkvi_is_next(r, '{'))
        return tkvi_unreadable(r, "an object in an object; write \"rope.dim\": 64 instead");
    for (from = r->at; r->at < r->end && !tkvi_one_of(*r->at, ends);) r->at++;
    r->value = tkvi_trimmed(from, r->at);
    return 1;
}

/* A line `key = value`: 1, the end: 0, something else: -1, and the reason is said. */
static int tkvi_next_line(tkvi_parser *r) {
    const char *from = r->at;
    while (r->at < r->end && !tkvi_one_of(*r->at, "=\n#")) r->at++;
    r->key = tkvi_trimmed(from, r->at);
    if (!tkvi_is_next(r, '=')) return tkvi_unreadable(r, "there is no =; write key = value");
    r->at++;
    if (tkvi_scan_value(r, "\n#") < 0) return -1;
    while (r->at < r->end && *r->at != '\n' && tkvi_blank(*r->at)) r->at++;
    if (r->at < r->end && !tkvi_one_of(*r->at, "\n#"))
        return tkvi_unreadable(r, "something follows the value");
    return 1;
}

/* The same of a pair in an object. */
static int tkvi_next_pair(tkvi_parser *r) {
    const int first = !r->begun;
    if (first) r->at++; /* the brace */
    r->begun = 1;
    tkvi_skip(r);
    if (tkvi_is_next(r, '}')) {
        r->at++;
        tkvi_skip(r);
        return r->at < r->end ? tkvi_unreadable(r, "something follows the object") : 0;
    }
    if (!first) {
        if (!tkvi_is_next(r, ',')) return tkvi_unreadable(r, "a , or a } is missing");
        r->at++;
        tkvi_skip(r);
    }
    r->key_line = r->line;
    if (!tkvi_is_next(r, '"')) return tkvi_unreadable(r, "a key in quotes is missing");
    if (tkvi_enclosed(r, '"', &r->key) < 0) return -1;
    tkvi_skip(r);
    if (!tkvi_is_next(r, ':')) return tkvi_unreadable(r, "a : is missing after the key");
    r->at++;
    tkvi_skip(r);
    return tkvi_scan_value(r, ",}#\n");
}

static int tkvi_next(tkvi_parser *r) {
    if (!r->json || r->begun) tkvi_skip(r);
    r->key_line = r->line;
    if (r->json) return tkvi_next_pair(r);
    return r->at < r->end ? tkvi_next_line(r) : 0;
}

static void tkvi_rewind(tkvi_parser *r) {
    r->at = r->text;
    r->line = 1;
    r->begun = 0;
    if (r->end - r->at >= 3 && memcmp(r->at, "\xef\xbb\xbf", 3) == 0) r->at += 3; /* some editors' */
    tkvi_skip(r);
    r->json = tkvi_is_next(r, '{');
}

/* >>reading */
static int tkvi_take(tkvi_span *s, const char *name) {
    const size_t n = strlen(name);
    if (s->n < n || memcmp(s->at, name, n) != 0) return 0;
    s->at += n;
    s->n -= n;
    return 1;
}

/* Digits off the front, below `most`; -1: none. */
static int tkvi_take_index(tkvi_span *s, int most) {
    tkvi_span number = *s;
    uint64_t n;
    for (number.n = 0; number.n < s->n && s->at[number.n] >= '0' && s->at[number.n] <= '9';) number.n++;
    if (!tkvi_digits(number, &n) || n >= (uint64_t)most) return -1;
    s->at += number.n;
    s->n -= number.n;
    return (int)n;
}

/* Which row of which group this key is, and of which structs of a list: `from` to `to`. */
static const tkvi_row *tkvi_find_row(const tkvi_parser *r, int *group, int *from, int *to) {
    int i;
    for (*group = 0; *group < r->n_fields; ++*group) {
        const tkvi_fields *g = &r->fields[*group];
        tkvi_span field = r->key;
        *from = *to = 0;
        if (g->name && !tkvi_take(&field, g->name)) continue;
        if (g->most) {
            if (!tkvi_take(&field, "[")) continue;
            *from = *to = tkvi_take_index(&field, g->most);
            if (*from >= 0 && tkvi_take(&field, "-")) *to = tkvi_take_index(&field, g->most);
            if (*to < *from || *from < 0 || !tkvi_take(&field, "]")) continue;
        }
        if (g->name && !tkvi_take(&field, ".")) continue;
        for (i = 0; i < g->n_rows; i++)
            if (tkvi_span_is(field, g->row[i].name)) return &g->row[i];
    }
    return NULL;
}

/* Marks a field as given; 0 if it was. */
static int tkvi_first_time(tkvi_parser *r, int group, int index, const tkvi_row *row) {
    size_t bit = (size_t)index * (size_t)r->fields[group].n_rows + (size_t)(row - r->fields[group].row);
    int g;
    for (g = 0; g < group; g++) bit += (size_t)tkvi_max(1, r->fields[g].most) * (size_t)r->fields[g].n_rows;
    if (r->seen[bit / 8] >> bit % 8 & 1) return 0;
    r->seen[bit / 8] = (uint8_t)(r->seen[bit / 8] | 1 << bit % 8);
    return 1;
}

enum { TKVI_CHECK, TKVI_BEGIN, TKVI_TAKE }; /* the three times that a text is read */

/* Each value to its place. While it is checked there is none yet in the caller's memory, and a preset waits for what it
 * asks. */
static tkv_status tkvi_parse_all(tkvi_parser *r, int pass) {
    int found, g, i, from, to;
    tkvi_rewind(r);
    for (found = tkvi_next(r); found > 0; found = tkvi_next(r)) {
        const tkvi_row *row = tkvi_find_row(r, &g, &from, &to);
        int begins;
        if (!row) {
            tkvi_say_unknown(r);
            return TKV_ERR_CONFIG;
        }
        begins = !tkvi_kinds[row->kind].write;
        if (pass != TKVI_CHECK && begins != (pass == TKVI_BEGIN)) continue;
        if (to >= r->highest[g]) {
            r->highest[g] = to + 1;
            r->highest_line[g] = r->key_line;
        }
        for (i = from; i <= to; i++) {
            const int listed = r->fields[g].most || row->kind == TKVI_FREQUENCIES;
            const int later = pass == TKVI_CHECK && (begins || listed);
            char *at = later ? NULL : (char *)r->base[g] + (size_t)i * r->fields[g].stride + row->offset;
            if (pass == TKVI_CHECK && !tkvi_first_time(r, g, i, row)) {
                tkvi_say_span(tkvi_say_line(r, r->key_line), r->key);
                tkvi_say(&r->reason, " is there for the second time; it must be there once");
                return TKV_ERR_CONFIG;
            }
            if (!tkvi_kinds[row->kind].read(r, row, r->value, at)) {
                tkvi_say_bad_value(r, row);
                return TKV_ERR_CONFIG;
            }
        }
    }
    return found < 0 ? TKV_ERR_CONFIG : TKV_OK;
}

/* Into the parts of `whole`. */
static void tkvi_parse_begin(tkvi_parser *r, const tkvi_fields *fields, int n, void *whole, const char *text,
                             size_t size, char *reason, size_t reason_size) {
    int g;
    memset(r, 0, sizeof *r);
    for (g = 0; g < n; g++) r->base[g] = (char *)whole + fields[g].offset;
    r->fields = fields;
    r->n_fields = n;
    r->text = text;
    r->end = text + size;
    r->reason = tkvi_text_begin(reason, reason ? reason_size : 0);
}

/* There is so much room, and not enough. */
static tkv_status tkvi_no_room(tkvi_parser *r, int line, const char *what, int room, int want,
                               const char *why) {
    tkvi_text *t = tkvi_say_line(r, line);
    tkvi_say(t, what);
    tkvi_say_int(t, room);
    tkvi_say(t, "; it must be ");
    tkvi_say_int(t, want);
    tkvi_say(t, why);
    return TKV_ERR_CONFIG;
}

/* The line of a key that is there. */
static int tkvi_line_of(tkvi_parser *r, const char *key) {
    tkvi_rewind(r);
    while (tkvi_next(r) > 0 && !tkvi_span_is(r->key, key)) continue;
    return r->key_line;
}

static int tkvi_member_int(const void *base, size_t offset) {
    int x;
    memcpy(&x, (const char *)base + offset, sizeof x);
    return x;
}

/* Pointers to objects of any type look alike on every machine of this century. */
static void *tkvi_member_pointer(const void *base, size_t offset) {
    void *x;
    memcpy(&x, (const char *)base + offset, sizeof x);
    return x;
}

/* The list that the text gives takes its place in the caller's memory, which must be enough. A list that stays (`was`
 * is the config before) must not become longer. */
static tkv_status tkvi_check_array(tkvi_parser *r, const tkvi_array *a, const tkv_config *cfg,
                                   const tkv_config *was) {
    const int highest = r->highest[a->group], line = r->highest_line[a->group];
    const int n = tkvi_member_int(cfg, a->count), had = tkvi_member_int(was, a->count);
    char what[64];
    tkvi_text t = tkvi_text_begin(what, sizeof what);
    int room = 0;
    if (r->room && tkvi_member_pointer(r->room, a->room_at)) room = tkvi_member_int(r->room, a->room_count);
    tkvi_say(&t, a->count_name);
    tkvi_say(&t, " is ");
    if (highest > n) return tkvi_no_room(r, line, what, n, highest, " or more, by the highest one named");
    if (!highest && tkvi_member_pointer(was, a->at) && n > had)
        return tkvi_no_room(r, tkvi_line_of(r, a->count_name), what, n, had,
                            " or less, as the program has them");
    t = tkvi_text_begin(what, sizeof what);
    tkvi_say(&t, "the program's room for ");
    tkvi_say(&t, r->fields[a->group].name);
    tkvi_say(&t, " is ");
    if (highest && n > room) return tkvi_no_room(r, line, what, room, n, " or more (tkv_config_room)");
    return TKV_OK;
}

/* The same of rope.frequencies, of which there is one for two of rope.dim. */
static tkv_status tkvi_check_frequencies(tkvi_parser *r, const tkv_config *cfg, const tkv_config *was) {
    const int n = r->frequencies, line = r->frequencies_line;
    const int room = r->room && r->room->frequencies ? r->room->n_frequencies : 0;
    if (n && n * 2 != cfg->rope.dim)
        return tkvi_no_room(r, line, "rope.dim is ", cfg->rope.dim, 2 * n,
                            ", two for each of rope.frequencies");
    if (n > room)
        return tkvi_no_room(r, line, "the program's room for rope.frequencies is ", room, n,
                            " or more (tkv_config_room)");
    if (!n && was->rope.frequencies && cfg->rope.dim > was->rope.dim)
        return tkvi_no_room(r, tkvi_line_of(r, "rope.dim"), "rope.dim is ", cfg->rope.dim, was->rope.dim,
                            " or less, as the program has frequencies");
    return TKV_OK;
}

TKV_API tkv_status tkv_config_parse(tkv_config *cfg, const tkv_config_room *room, const char *text,
                                    size_t size, char *reason, size_t reason_size) {
    tkvi_parser r;
    tkv_config full;
    tkv_status st;
    int i;
    if (reason && reason_size) *reason = 0;
    if (!cfg || !text) return TKV_ERR_ARG;
    full = *cfg;
    tkvi_parse_begin(&r, tkvi_config_fields, TKVI_CONFIG_FIELDS, &full, text, size, reason, reason_size);
    r.room = room;
    st = tkvi_parse_all(&r, TKVI_CHECK);
    if (!st) st = tkvi_check_frequencies(&r, &full, cfg);
    for (i = 0; i < TKVI_ARRAYS && !st; i++) st = tkvi_check_array(&r, &tkvi_arrays[i], &full, cfg);
    if (st) return st;
    for (i = 0; i < TKVI_ARRAYS; i++) {
        const tkvi_array *a = &tkvi_arrays[i];
        void *list;
        if (!r.highest[a->group]) continue;
        r.base[a->group] = list = tkvi_member_pointer(room, a->room_at);
        memset(list, 0, (size_t)tkvi_member_int(&full, a->count) * r.fields[a->group].stride);
        memcpy((char *)&full + a->at, &list, sizeof list);
    }
    st = tkvi_parse_all(&r, TKVI_BEGIN);
    if (!st) st = tkvi_parse_all(&r, TKVI_TAKE);
    if (!st) *cfg = full;
    return st;
}

TKV_API tkv_status tkv_policy_parse(tkv_policy_config *cfg, const char *text, size_t size, char *reason,
                                    size_t reason_size) {
    tkvi_parser r;
    tkv_policy_config full;
    tkv_status st;
    if (reason && reason_size) *reason = 0;
    if (!cfg || !text) return TKV_ERR_ARG;
    full = *cfg;
    tkvi_parse_begin(&r, &tkvi_policy_fields, 1, &full, text, size, reason, reason_size);
    st = tkvi_parse_all(&r, TKVI_CHECK);
    if (!st) st = tkvi_parse_all(&r, TKVI_BEGIN);
    if (!st) st = tkvi_parse_all(&r, TKVI_TAKE);
    if (!st) *cfg = full;
    return st;
}

/* >>writing */
static void tkvi_print_key(tkvi_out *o, const tkvi_fields *g, int index, const char *name) {
    if (o->json && o->more) tkvi_print(o, ",");
    if (o->json) tkvi_print(o, o->json == 1 ? "\n  \"" : o->more ? " \"" : "\"");
    o->more = 1;
    if (g && g->name) tkvi_print(o, g->name);
    if (g && g->most) {
        tkvi_print(o, "[");
        tkvi_print_int(o, index);
        tkvi_print(o, "]");
    }
    if (g && g->name) tkvi_print(o, ".");
    tkvi_print(o, name);
    tkvi_print(o, o->json ? "\": " : " = ");
}

/* The fields of one struct that are not zero. */
static void tkvi_write_fields(tkvi_out *o, const tkvi_fields *g, int index, const void *base) {
    int i;
    size_t k;
    for (i = 0; i < g->n_rows; i++) {
        const tkvi_row *row = &g->row[i];
        const uint8_t *at = (const uint8_t *)base + (size_t)index * g->stride + row->offset;
        for (k = 0; k < row->size && !at[k]; k++) continue;
        if (k == row->size || !tkvi_kinds[row->kind].write) continue;
        tkvi_print_key(o, g, index, row->name);
        tkvi_kinds[row->kind].write(row, at, o);
        if (!o->json) tkvi_print(o, "\n");
    }
}

static void tkvi_write_config(tkvi_out *o, const tkv_config *cfg) {
    int g, i, n;
    if (o->json) tkvi_print(o, "{");
    for (g = 0; g < TKVI_CONFIG_FIELDS; g++) {
        const tkvi_fields *fields = &tkvi_config_fields[g];
        const void *part = (const char *)cfg + fields->offset;
        n = tkvi_max(1, fields->most);
        for (i = 0; i < TKVI_ARRAYS; i++) {
            if (tkvi_arrays[i].group != g) continue;
            part = tkvi_member_pointer(cfg, tkvi_arrays[i].at);
            n = part ? tkvi_member_int(cfg, tkvi_arrays[i].count) : 0;
        }
        if (n < 0 || n > tkvi_max(1, fields->most)) o->bad = TKV_ERR_CONFIG;
        for (i = 0; i < n && !o->bad; i++) tkvi_write_fields(o, fields, i, part);
    }
    if (o->json) tkvi_print(o, o->json == 1 ? "\n}\n" : "}");
}

static void tkvi_config_text(tkvi_out *o, const void *what) {
    tkvi_write_config(o, (const tkv_config *)what);
}

static void tkvi_config_json(tkvi_out *o, const void *what) {
    o->json = 1;
    tkvi_write_config(o, (const tkv_config *)what);
}

static void tkvi_policy_text(tkvi_out *o, const void *what) {
    tkvi_write_fields(o, &tkvi_policy_fields, 0, what);
}

static void tkvi_policy_json(tkvi_out *o, const void *what) {
    o->json = 1;
    tkvi_print(o, "{");
    tkvi_policy_text(o, what);
    tkvi_print(o, "\n}\n");
}

TKV_API tkv_status tkv_config_print(const tkv_config *cfg, int json, char *buf, size_t size, size_t *needed) {
    if (!cfg) return TKV_ERR_ARG;
    return tkvi_write_text(json ? tkvi_config_json : tkvi_config_text, cfg, buf, size, needed);
}

TKV_API tkv_status tkv_policy_print(const tkv_policy_config *cfg, int json, char *buf, size_t size,
                                    size_t *needed) {
    if (!cfg) return TKV_ERR_ARG;
    return tkvi_write_text(json ? tkvi_policy_json : tkvi_policy_text, cfg, buf, size, needed);
}

#endif /* TKV_NO_REPORTS */
#endif /* TKVI_TEXT_H */
/* ======== state.h ======== */
/*
 * state.h - what the cache is and holds, for programs: JSON and Prometheus' text format. A table has a row for each
 * figure, which both print. May call report, text and below; changes nothing.
 *
 * A new figure: a field of tkvi_figures, filled in by tkvi_figures_of, and a row. Rows of a section, and of a metric,
 * stand together; a metric whose name ends in _total is a counter, any other a gauge.
 */
#ifndef TKVI_STATE_H
#define TKVI_STATE_H

#ifndef TKV_NO_REPORTS


enum { TKVI_MEMORY, TKVI_TOKENS, TKVI_SEQUENCES, TKVI_BUDGET, TKVI_QUALITY, TKVI_SECTIONS };

static const char *const tkvi_section_names[TKVI_SECTIONS] = {"memory", "tokens", "sequences", "budget",
                                                              "quality"};

/* All that is told, taken once: readers may add to the meter while it is printed. */
typedef struct tkvi_figures {
    const tkv_cache *kv;
    const char *labels;
    int has[TKVI_SECTIONS]; /* 0: there is no such thing in this cache */
    tkv_memory_info memory;
    tkv_quality_info quality;
    tkv_budget_info budget;
    uint64_t sequences, most_sequences, longest; /* that exist; cfg.max_seqs; tokens of one */
} tkvi_figures;

static void tkvi_figure_size(tkvi_out *o, const void *at) {
    size_t x;
    memcpy(&x, at, sizeof x);
    tkvi_print_count(o, x);
}

static void tkvi_figure_count(tkvi_out *o, const void *at) {
    uint64_t x;
    memcpy(&x, at, sizeof x);
    tkvi_print_count(o, x);
}

static void tkvi_figure_int(tkvi_out *o, const void *at) {
    int x;
    memcpy(&x, at, sizeof x);
    tkvi_print_int(o, x);
}

static void tkvi_figure_float(tkvi_out *o, const void *at) {
    float x;
    memcpy(&x, at, sizeof x);
    tkvi_print_float(o, x);
}

static void tkvi_figure_double(tkvi_out *o, const void *at) {
    double x;
    memcpy(&x, at, sizeof x);
    tkvi_print_float(o, (float)x);
}

typedef struct tkvi_figure {
    int section;
    const char *name; /* in JSON */
    void (*print)(tkvi_out *o, const void *at);
    size_t offset;
    const char *metric, *labels; /* of Prometheus; NULL: not there, no labels of its own */
    const char *help;            /* the first row of a metric has it */
} tkvi_figure;

#define TKVI_FIGURE(section, name, print, field, metric, labels, help)                                       \
    { section, name, print, offsetof(tkvi_figures, field), metric, labels, help }
#define TKVI_BYTES(name, field, labels, help)                                                                \
    TKVI_FIGURE(TKVI_MEMORY, name, tkvi_figure_size, memory.field, "tkv_memory_bytes", labels, help)

static const tkvi_figure tkvi_figure_rows[] = {
    TKVI_BYTES("hot_codes", tier[TKV_HOT].codes, "part=\"codes\",tier=\"hot\"",
               "Bytes held, by part and tier; their sum is tkv_memory_held_bytes."),
    TKVI_BYTES("hot_metadata", tier[TKV_HOT].metadata, "part=\"metadata\",tier=\"hot\"", NULL),
    TKVI_BYTES("warm_codes", tier[TKV_WARM].codes, "part=\"codes\",tier=\"warm\"", NULL),
    TKVI_BYTES("warm_metadata", tier[TKV_WARM].metadata, "part=\"metadata\",tier=\"warm\"", NULL),
    TKVI_BYTES("archive_codes", tier[TKV_ARCHIVE].codes, "part=\"codes\",tier=\"archive\"", NULL),
    TKVI_BYTES("archive_metadata", tier[TKV_ARCHIVE].metadata, "part=\"metadata\",tier=\"archive\"", NULL),
    TKVI_BYTES("tables", tables, "part=\"tables\"", NULL),
    TKVI_BYTES("index", index, "part=\"index\"", NULL),
    TKVI_BYTES("scratch", scratch, "part=\"scratch\"", NULL),
    TKVI_BYTES("shadow", shadow, "part=\"shadow\"", NULL),
    TKVI_BYTES("slack", slack, "part=\"slack\"", NULL),
    TKVI_FIGURE(TKVI_MEMORY, "total", tkvi_figure_size, memory.total, "tkv_memory_held_bytes", NULL,
                "Bytes held, all together."),
    TKVI_FIGURE(TKVI_MEMORY, "peak", tkvi_figure_size, memory.peak, "tkv_memory_peak_bytes", NULL,
                "Most bytes held so far."),
    TKVI_FIGURE(TKVI_MEMORY, "fp16_bytes", tkvi_figure_size, memory.fp16_bytes, "tkv_memory_fp16_bytes", NULL,
                "Bytes of the same tokens in plain FP16."),
    TKVI_FIGURE(TKVI_MEMORY, "ratio", tkvi_figure_double, memory.ratio, "tkv_memory_ratio", NULL,
                "FP16 bytes over bytes held."),
    TKVI_FIGURE(TKVI_MEMORY, "ratio_f32", tkvi_figure_double, memory.ratio_f32, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_TOKENS, "hot", tkvi_figure_size, memory.tier[TKV_HOT].tokens, "tkv_tokens",
                "tier=\"hot\"",
                "Tokens held, by tier, summed over layers; those that sequences share count once."),
    TKVI_FIGURE(TKVI_TOKENS, "warm", tkvi_figure_size, memory.tier[TKV_WARM].tokens, "tkv_tokens",
                "tier=\"warm\"", NULL),
    TKVI_FIGURE(TKVI_TOKENS, "archive", tkvi_figure_size, memory.tier[TKV_ARCHIVE].tokens, "tkv_tokens",
                "tier=\"archive\"", NULL),
    TKVI_FIGURE(TKVI_SEQUENCES, "count", tkvi_figure_count, sequences, "tkv_sequences", NULL,
                "Sequences that exist."),
    TKVI_FIGURE(TKVI_SEQUENCES, "most", tkvi_figure_count, most_sequences, "tkv_sequences_max", NULL,
                "Sequences that there is room for."),
    TKVI_FIGURE(TKVI_SEQUENCES, "longest", tkvi_figure_count, longest, "tkv_sequence_tokens_max", NULL,
                "Tokens of the longest sequence."),
    TKVI_FIGURE(TKVI_BUDGET, "bytes", tkvi_figure_size, budget.budget, "tkv_budget_bytes", NULL,
                "Bytes that the cache may hold; 0: as many as it wants."),
    TKVI_FIGURE(TKVI_BUDGET, "used", tkvi_figure_size, budget.used, "tkv_budget_used_bytes", NULL,
                "Bytes that count against the budget."),
    TKVI_FIGURE(TKVI_BUDGET, "level", tkvi_figure_int, budget.level, "tkv_level", NULL,
                "Level of the ladder, 0 the loosest."),
    TKVI_FIGURE(TKVI_BUDGET, "levels", tkvi_figure_int, budget.n_levels, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_BUDGET, "pressure", tkvi_figure_float, budget.policy.average, "tkv_pressure_ratio", NULL,
                "Moving average of bytes over the budget."),
    TKVI_FIGURE(TKVI_BUDGET, "trend", tkvi_figure_float, budget.policy.trend, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_BUDGET, "left", tkvi_figure_float, budget.policy.left, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_BUDGET, "tightened", tkvi_figure_count, budget.policy.tightened,
                "tkv_levels_tightened_total", NULL, "Levels down the ladder."),
    TKVI_FIGURE(TKVI_BUDGET, "relaxed", tkvi_figure_count, budget.policy.relaxed, "tkv_levels_relaxed_total",
                NULL, "Levels up the ladder."),
    TKVI_FIGURE(TKVI_BUDGET, "demoted", tkvi_figure_count, budget.demoted, "tkv_blocks_demoted_total", NULL,
                "Blocks that were recoded."),
    TKVI_FIGURE(TKVI_BUDGET, "pending", tkvi_figure_count, budget.pending, "tkv_blocks_pending", NULL,
                "Blocks that the present level would still recode."),
    TKVI_FIGURE(TKVI_BUDGET, "refused", tkvi_figure_count, budget.refused, "tkv_budget_refused_total", NULL,
                "Calls that the budget had no room for."),
    TKVI_FIGURE(TKVI_QUALITY, "samples", tkvi_figure_count, quality.samples, "tkv_quality_samples_total",
                NULL, "Comparisons of attention with exact keys and values."),
    TKVI_FIGURE(TKVI_QUALITY, "coverage", tkvi_figure_double, quality.coverage, "tkv_quality_coverage", NULL,
                "Share of the coded keys that had an exact copy."),
    TKVI_FIGURE(TKVI_QUALITY, "output_error", tkvi_figure_double, quality.output_error,
                "tkv_quality_output_error", NULL, "Mean squared error of attention's output, relative."),
    TKVI_FIGURE(TKVI_QUALITY, "kl", tkvi_figure_double, quality.kl, "tkv_quality_kl_nats", NULL,
                "Mean KL divergence of attention's weights."),
    TKVI_FIGURE(TKVI_QUALITY, "kl_max", tkvi_figure_double, quality.kl_max, "tkv_quality_kl_max_nats", NULL,
                "Largest KL divergence of attention's weights."),
    TKVI_FIGURE(TKVI_QUALITY, "top1", tkvi_figure_double, quality.top1, "tkv_quality_top1_ratio", NULL,
                "Share of comparisons whose strongest key is the exact one's."),
    TKVI_FIGURE(TKVI_QUALITY, "heads", tkvi_figure_int, quality.heads, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_QUALITY, "every", tkvi_figure_int, quality.every, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_QUALITY, "seq", tkvi_figure_int, quality.seq, NULL, NULL, NULL),
};

#define TKVI_FIGURES ((int)(sizeof tkvi_figure_rows / sizeof *tkvi_figure_rows))

/* Tokens that some layer of the sequence holds or held; 0: it does not exist. */
static int tkvi_seq_most(const tkv_cache *kv, int seq) {
    int layer, most = 0;
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++)
        most = tkvi_max(most, tkv_layer_len(kv, seq, layer));
    return most;
}

static tkv_status tkvi_figures_of(const tkv_cache *kv, tkvi_figures *f) {
    int seq;
    tkv_status st;
    memset(f, 0, sizeof *f);
    if (!kv) return TKV_ERR_ARG;
    f->kv = kv;
    f->has[TKVI_MEMORY] = f->has[TKVI_TOKENS] = f->has[TKVI_SEQUENCES] = 1;
    st = tkv_memory(kv, &f->memory);
    if (!st) st = tkv_quality(kv, &f->quality);
    if (!st) st = tkv_budget(kv, &f->budget);
    f->has[TKVI_BUDGET] = f->budget.n_levels > 1;
    f->has[TKVI_QUALITY] = f->quality.heads > 0;
    f->most_sequences = (uint64_t)kv->tables.cfg.max_seqs;
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) {
        const uint64_t tokens = (uint64_t)tkvi_seq_most(kv, seq);
        f->sequences += tokens > 0;
        f->longest = tokens > f->longest ? tokens : f->longest;
    }
    return st;
}

static void tkvi_print_figure(tkvi_out *o, const tkvi_figures *f, const tkvi_figure *row) {
    row->print(o, (const char *)f + row->offset);
}

/* >>JSON */
static void tkvi_print_comma(tkvi_out *o, int i) {
    if (i > 0) tkvi_print(o, ", ");
}

/* One value of each layer that has a cache of its own, null of the others. */
typedef void (*tkvi_layer_writer)(tkvi_out *o, const tkv_cache *kv, int seq, int layer, int which);

static void tkvi_print_layers(tkvi_out *o, const tkv_cache *kv, const char *name, tkvi_layer_writer write,
                              int seq, int which) {
    int layer;
    tkvi_print(o, ", \"");
    tkvi_print(o, name);
    tkvi_print(o, "\": [");
    for (layer = 0; layer < kv->tables.cfg.n_layers; layer++) {
        tkvi_print_comma(o, layer);
        if (tkvi_stored_layer(kv, 0, layer) != layer) tkvi_print(o, "null");
        else write(o, kv, seq, layer, which);
    }
    tkvi_print(o, "]");
}

static const char *const tkvi_tier_names[TKV_TIER_COUNT] = {"hot", "warm", "archive"};

static void tkvi_print_layer_pair(tkvi_out *o, const tkv_cache *kv, int seq, int layer, int tier) {
    tkv_pair p = {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT};
    (void)seq;
    (void)tkv_tier_pair(kv, layer, (tkv_tier)tier, &p);
    tkvi_print_pair(o, p);
}

/* Tokens of a tier, or, with TKV_TIER_COUNT, those that are gone. */
static void tkvi_print_layer_tokens(tkvi_out *o, const tkv_cache *kv, int seq, int layer, int tier) {
    tkv_tier_info info;
    memset(&info, 0, sizeof info);
    (void)tkv_tier_counts(kv, seq, layer, &info);
    tkvi_print_int(o, tier == TKV_TIER_COUNT ? info.dropped : info.tokens[tier]);
}

static void tkvi_print_layer_len(tkvi_out *o, const tkv_cache *kv, int seq, int layer, int which) {
    (void)which;
    tkvi_print_int(o, tkv_layer_len(kv, seq, layer));
}

static void tkvi_print_sequences(tkvi_out *o, const tkv_cache *kv) {
    int seq, tier, any = 0;
    tkvi_print(o, ",\n  \"lengths\": [");
    for (seq = 0; seq < kv->tables.cfg.max_seqs; seq++) {
        if (!tkvi_seq_most(kv, seq)) continue;
        tkvi_print(o, any++ ? ",\n    {\"seq\": " : "\n    {\"seq\": ");
        tkvi_print_int(o, seq);
        tkvi_print(o, ", \"tokens\": ");
        tkvi_print_int(o, tkv_seq_len(kv, seq));
        tkvi_print_layers(o, kv, "len", tkvi_print_layer_len, seq, 0);
        for (tier = 0; tier < TKV_TIER_COUNT; tier++)
            tkvi_print_layers(o, kv, tkvi_tier_names[tier], tkvi_print_layer_tokens, seq, tier);
        tkvi_print_layers(o, kv, "dropped", tkvi_print_layer_tokens, seq, TKV_TIER_COUNT);
        tkvi_print(o, "}");
    }
    tkvi_print(o, any ? "\n  ]" : "]");
}

static void tkvi_print_section(tkvi_out *o, const tkvi_figures *f, int section) {
    int i, any = 0;
    tkvi_print(o, ",\n  \"");
    tkvi_print(o, tkvi_section_names[section]);
    tkvi_print(o, f->has[section] ? "\": {" : "\": null");
    for (i = 0; f->has[section] && i < TKVI_FIGURES; i++) {
        if (tkvi_figure_rows[i].section != section) continue;
        tkvi_print(o, any++ ? ", \"" : "\"");
        tkvi_print(o, tkvi_figure_rows[i].name);
        tkvi_print(o, "\": ");
        tkvi_print_figure(o, f, &tkvi_figure_rows[i]);
    }
    if (f->has[section]) tkvi_print(o, "}");
}

static void tkvi_write_state(tkvi_out *o, const void *what) {
    const tkvi_figures *f = (const tkvi_figures *)what;
    const tkv_cache *kv = f->kv;
    int i;
    o->json = 2;
    tkvi_print(o, "{\n  \"version\": \"" TKV_VERSION_STRING "\",\n  \"isa\": \"");
    tkvi_print(o, tkv_isa_name(tkv_isa_of(kv)));
    tkvi_print(o, "\",\n  \"config\": ");
    tkvi_write_config(o, &kv->tables.cfg);
    tkvi_print(o, ",\n  \"formats\": {\"calibrated_layers\": ");
    tkvi_print_int(o, tkv_calibrated_layers(kv));
    for (i = 0; i < TKV_TIER_COUNT; i++)
        tkvi_print_layers(o, kv, tkvi_tier_names[i], tkvi_print_layer_pair, 0, i);
    tkvi_print(o, "}");
    tkvi_print_sequences(o, kv);
    for (i = 0; i < TKVI_SECTIONS; i++) tkvi_print_section(o, f, i);
    tkvi_print(o, "\n}\n");
}

TKV_API tkv_status tkv_state_json(const tkv_cache *kv, char *buf, size_t size, size_t *needed) {
    tkvi_figures f;
    const tkv_status st = tkvi_figures_of(kv, &f);
    return st ? st : tkvi_write_text(tkvi_write_state, &f, buf, size, needed);
}

/* >>Prometheus */
static int tkvi_label_char(char c, int first) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (!first && c >= '0' && c <= '9');
}

/* A name of the caller's that a line can have: not ours, not Prometheus' own. */
static int tkvi_label_free(tkvi_span name) {
    static const char *const taken[] = {"part", "tier", "version", "isa"};
    size_t i;
    for (i = 0; i < sizeof taken / sizeof *taken; i++)
        if (tkvi_span_is(name, taken[i])) return 0;
    return name.n > 0 && !(name.n > 1 && name.at[0] == '_' && name.at[1] == '_');
}

/* `a=x,b=y` as `a="x",b="y"`; 0: they are no labels. */
static int tkvi_print_labels(tkvi_out *o, const char *labels) {
    const char *s, *t;
    for (s = labels; s && *s;) {
        tkvi_span name;
        name.at = s;
        for (; tkvi_label_char(*s, s == name.at);) s++;
        name.n = (size_t)(s - name.at);
        if (*s++ != '=' || !tkvi_label_free(name)) return 0;
        for (t = labels; t < name.at; t++) /* not a second time */
            if ((t == labels || t[-1] == ',') && memcmp(t, name.at, name.n + 1) == 0) return 0;
        if (name.at != labels) tkvi_print(o, ",");
        tkvi_print_bytes(o, name.at, name.n);
        tkvi_print(o, "=\"");
        for (; *s && *s != ','; s++) {
            if (*s == '\\' && !*++s) return 0;
            if (*s == '\\' || *s == '"') tkvi_print(o, "\\");
            if (*s == '\n') tkvi_print(o, "\\n");
            else tkvi_print_bytes(o, s, 1);
        }
        tkvi_print(o, "\"");
        if (*s == ',' && !*++s) return 0;
    }
    return 1;
}

static void tkvi_print_head(tkvi_out *o, const char *metric, const char *help) {
    const size_t n = strlen(metric), end = sizeof "_total" - 1;
    const int counter = n > end && strcmp(metric + n - end, "_total") == 0;
    tkvi_print(o, "# HELP ");
    tkvi_print(o, metric);
    tkvi_print(o, " ");
    tkvi_print(o, help);
    tkvi_print(o, "\n# TYPE ");
    tkvi_print(o, metric);
    tkvi_print(o, counter ? " counter\n" : " gauge\n");
}

/* The name of a line, and its labels. */
static void tkvi_print_metric(tkvi_out *o, const tkvi_figures *f, const char *metric, const char *labels) {
    const int own = labels != NULL, more = f->labels && *f->labels;
    tkvi_print(o, metric);
    if (own || more) tkvi_print(o, "{");
    if (own) tkvi_print(o, labels);
    if (own && more) tkvi_print(o, ",");
    if (!tkvi_print_labels(o, f->labels)) o->bad = TKV_ERR_ARG;
    if (own || more) tkvi_print(o, "}");
    tkvi_print(o, " ");
}

static void tkvi_write_prometheus(tkvi_out *o, const void *what) {
    const tkvi_figures *f = (const tkvi_figures *)what;
    char about[64];
    tkvi_text t = tkvi_text_begin(about, sizeof about);
    int i;
    tkvi_say(&t, "version=\"" TKV_VERSION_STRING "\",isa=\"");
    tkvi_say(&t, tkv_isa_name(tkv_isa_of(f->kv)));
    tkvi_say(&t, "\"");
    tkvi_print_head(o, "tkv_info", "What the cache runs on.");
    tkvi_print_metric(o, f, "tkv_info", about);
    tkvi_print(o, "1\n");
    for (i = 0; i < TKVI_FIGURES; i++) {
        const tkvi_figure *row = &tkvi_figure_rows[i];
        if (!row->metric || !f->has[row->section]) continue;
        if (row->help) tkvi_print_head(o, row->metric, row->help);
        tkvi_print_metric(o, f, row->metric, row->labels);
        tkvi_print_figure(o, f, row);
        tkvi_print(o, "\n");
    }
}

TKV_API tkv_status tkv_format_prometheus(const tkv_cache *kv, const char *labels, char *buf, size_t size,
                                         size_t *needed) {
    tkvi_figures f;
    const tkv_status st = tkvi_figures_of(kv, &f);
    f.labels = labels;
    return st ? st : tkvi_write_text(tkvi_write_prometheus, &f, buf, size, needed);
}

#endif /* TKV_NO_REPORTS */
#endif /* TKVI_STATE_H */
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
