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
#define tkv_adapt TKV_NAME_(tkv_adapt)
#define tkv_alive TKV_NAME_(tkv_alive)
#define tkv_append TKV_NAME_(tkv_append)
#define tkv_append_at TKV_NAME_(tkv_append_at)
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
#define tkv_config_size TKV_NAME_(tkv_config_size)
#define tkv_config_validate TKV_NAME_(tkv_config_validate)
#define tkv_create TKV_NAME_(tkv_create)
#define tkv_create_ex TKV_NAME_(tkv_create_ex)
#define tkv_create_from_text TKV_NAME_(tkv_create_from_text)
#define tkv_decode TKV_NAME_(tkv_decode)
#define tkv_destroy TKV_NAME_(tkv_destroy)
#define tkv_drop TKV_NAME_(tkv_drop)
#define tkv_encode TKV_NAME_(tkv_encode)
#define tkv_encoded_size TKV_NAME_(tkv_encoded_size)
#define tkv_estimate TKV_NAME_(tkv_estimate)
#define tkv_evict TKV_NAME_(tkv_evict)
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
#define tkv_importance_add_to TKV_NAME_(tkv_importance_add_to)
#define tkv_importance_aggregate TKV_NAME_(tkv_importance_aggregate)
#define tkv_importance_bound TKV_NAME_(tkv_importance_bound)
#define tkv_importance_name TKV_NAME_(tkv_importance_name)
#define tkv_importance_of TKV_NAME_(tkv_importance_of)
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
#define tkv_pin TKV_NAME_(tkv_pin)
#define tkv_pin_until TKV_NAME_(tkv_pin_until)
#define tkv_policy_init TKV_NAME_(tkv_policy_init)
#define tkv_policy_observe TKV_NAME_(tkv_policy_observe)
#define tkv_policy_parse TKV_NAME_(tkv_policy_parse)
#define tkv_policy_print TKV_NAME_(tkv_policy_print)
#define tkv_policy_profile TKV_NAME_(tkv_policy_profile)
#define tkv_policy_read TKV_NAME_(tkv_policy_read)
#define tkv_policy_reset TKV_NAME_(tkv_policy_reset)
#define tkv_policy_target TKV_NAME_(tkv_policy_target)
#define tkv_preset_name TKV_NAME_(tkv_preset_name)
#define tkv_promote TKV_NAME_(tkv_promote)
#define tkv_promote_by_importance TKV_NAME_(tkv_promote_by_importance)
#define tkv_quality TKV_NAME_(tkv_quality)
#define tkv_quality_of TKV_NAME_(tkv_quality_of)
#define tkv_quality_reset TKV_NAME_(tkv_quality_reset)
#define tkv_read TKV_NAME_(tkv_read)
#define tkv_recompute TKV_NAME_(tkv_recompute)
#define tkv_remat_blocks TKV_NAME_(tkv_remat_blocks)
#define tkv_remat_decide TKV_NAME_(tkv_remat_decide)
#define tkv_remat_drop TKV_NAME_(tkv_remat_drop)
#define tkv_remat_flops TKV_NAME_(tkv_remat_flops)
#define tkv_remat_free TKV_NAME_(tkv_remat_free)
#define tkv_remat_give TKV_NAME_(tkv_remat_give)
#define tkv_remat_init TKV_NAME_(tkv_remat_init)
#define tkv_remat_missing TKV_NAME_(tkv_remat_missing)
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
#define tkv_spill TKV_NAME_(tkv_spill)
#define tkv_spill_bytes TKV_NAME_(tkv_spill_bytes)
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
#define tkv_top_tokens TKV_NAME_(tkv_top_tokens)
#define tkv_truncate TKV_NAME_(tkv_truncate)
#define tkv_version TKV_NAME_(tkv_version)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* >>constants */
#define TKV_BLOCK_TOKENS 64 /* tokens in a block: what is encoded and demoted together */
#define TKV_MAX_HEAD_DIM 256
#define TKV_QUALITY_HEADS 64 /* most of cfg.quality_heads */
#define TKV_NONE (-1)        /* in a length: this tier is off */
#define TKV_ALL (-2)         /* in a length: this tier takes everything, the later ones stay empty */
/* 0 in a float field whose 0 is the default, where the field's comment names it. No other use: it is a tiny negative
 * number, and is told by its bits. A text says `zero`. */
#define TKV_ZERO (-1e-30f)

/* >>status: every function that can fail returns one. Negative is an error, and an error changes nothing, but for
 * one case under a budget with cfg.evict or cfg.spill: when an allocator or a store fails after tokens went or were
 * compressed to make room, that stays (see there). */
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
      "the budget is full: nothing can be stored more tightly (tkv_set_budget raises it)")                   \
    X(TKV_ERR_IO, -13, "cfg.spill failed: blocks outside RAM could not be read or written")                  \
    X(TKV_ERR_NO_SOURCE, -14,                                                                                \
      "nothing better is kept of these tokens, or they must be recomputed first: see tkv_remat_missing")
#define TKV_STATUS_ENUM_(name, value, text) name = value,
typedef enum tkv_status { TKV_STATUS_LIST(TKV_STATUS_ENUM_) TKV_STATUS_LAST_ = -15 } tkv_status;
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
    TKV_A35, /*   4, 3.5, 3, 2.75, 2.5, 2.25, 2, 1.75, 1.5 (formats/a.h) */
    TKV_A30,
    TKV_A275,
    TKV_A25,
    TKV_A225,
    TKV_A20,
    TKV_A175,
    TKV_A15,
    TKV_R40, /* V only: rotated values, 4, 3, 2, 1.5, 1 bits on average over a layer, and */
    /*   8 bits a token (formats/r.h) */
    TKV_R30,
    TKV_R20,
    TKV_R15,
    TKV_R10,
    TKV_INT8, /* each token by itself: whole numbers, an fp16 scale per group of its channels (formats/int.h) */
    TKV_INT4,
    TKV_FP8_E4M3, /* the same: OCP floats, one fp16 scale per token (formats/float.h) */
    TKV_FP8_E5M2,
    TKV_FP4,    /* E2M1 with the two scales of NVFP4: E4M3 per 16 channels, fp16 per token */
    TKV_SQUAT4, /* K only: KIVI4 and KIVI2 with errors turned away from the queries (SQuat, arXiv 2503.24358) */
    TKV_SQUAT2,
    TKV_SUBSPACE4, /* each token in parts of a rotated basis, with minimum and maximum (formats/subspace.h) */
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
/* Bits of cfg.kvquant: how KVQUANT formats differ from the paper's "nuq, 1 %" (formats/kvquant.h). */
typedef enum tkv_kvquant {
    TKV_KVQUANT_POST_ROPE = 1, /* keys are coded as they come; required where there is no cfg.rope */
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
    /* level i + 1 from threshold[i] on; rising, to 1. All 0: .80, .95. TKV_ZERO: at any pressure */
    float threshold[TKV_MAX_LEVELS - 1];
    float
        hysteresis; /* relaxes below a threshold less this; 0: .05; TKV_ZERO: as soon as below the threshold */
    float alpha;    /* of the moving average, the first sample seeds it; 0: .20 */
    int min_level;  /* where it begins and never goes below, however much memory is free: see tkv_budget */
    int max_level;  /* 0: the last one; TKV_NONE: level 0 for ever */
} tkv_policy_config;

/* >>keeping: how tokens are weighed, and which policy drops them; see tkv_importance_add, tkv_evict. */
typedef enum tkv_importance_strategy {
    TKV_IMPORTANCE_HYBRID = 0,   /* "hybrid": sums; decay .95, attention .7, recency .3 (akv-cache) */
    TKV_IMPORTANCE_ACCUMULATION, /* "accumulation": sums, nothing decays: as H2O counts */
    TKV_IMPORTANCE_HEAVY_HITTER, /* "heavy_hitter": the largest mass of any step */
    TKV_IMPORTANCE_RECENCY,      /* "recency": age alone */
    TKV_IMPORTANCE_PERSISTENCE, /* "persistence": less 1 for each step with a mass below `low` (ScissorHands) */
    TKV_IMPORTANCE_STRATEGIES
} tkv_importance_strategy;
typedef enum tkv_importance_heads {
    TKV_IMPORTANCE_MEAN = 0,
    TKV_IMPORTANCE_MAX,
    TKV_IMPORTANCE_SUM
} tkv_importance_heads;
typedef struct tkv_importance_config { /* zero means the strategy's own */
    tkv_importance_strategy strategy;
    float decay;     /* per step, above 0 and at most 1 */
    float attention; /* weight of A, to 1e6; TKV_ZERO: A does not count */
    float recency;   /* weight of the age, to 1e6; TKV_ZERO: age does not count */
    float tau;       /* steps, 1 to 2^30; 0: 64 */
    float low;       /* what "persistence" counts as little; 0: an even share, 1 / n */
    /* of what a cache gathers: how the query heads of a KV head count, see tkv_importance_of */
    tkv_importance_heads heads;
} tkv_importance_config;
typedef enum tkv_evict_kind {
    TKV_EVICT_NONE = 0,  /* "none": TKV_ERR_BUDGET where something would have to go */
    TKV_EVICT_SLIDING,   /* "sliding": the oldest but the sinks (StreamingLLM, arXiv 2309.17453) */
    TKV_EVICT_H2O,       /* "h2o": least attention since it came (2306.14048) */
    TKV_EVICT_SNAPKV,    /* "snapkv": least pooled attention of the prompt's last queries (2404.14469) */
    TKV_EVICT_PYRAMIDKV, /* "pyramidkv": the same, within budgets of tkv_evict_budgets (2406.02069) */
    TKV_EVICT_TOVA,      /* "tova": least weight from the last query (2401.06104) */
    /* "knorm": longest keys (2406.11430). Norms are kept from when the keys came, but where cfg.importance_every or
     * cfg.n_anchors has the place: then keys are decoded for each batch */
    TKV_EVICT_KNORM,
    /* "keydiff": keys most like the mean of all keys' directions (2504.15364). Each batch decodes all keys twice, as
     * the mean moves: with 65,536 tokens of one KV head of 128, batches of 64 and TKV_NO_SIMD 1.3 ms an append, where
     * "knorm" takes .1 */
    TKV_EVICT_KEYDIFF,
    TKV_EVICT_SCISSORHANDS, /* "scissorhands": most often below an even share (2305.17118) */
    TKV_EVICT_FIFO,         /* "fifo": the oldest, sinks or not */
    TKV_EVICT_RANDOM,       /* "random": by a hash of seed and position */
    TKV_EVICT_SCORES,       /* "scores": the caller's, such as tkv_importance_read's or KVzip's */
    TKV_EVICT_USER,         /* "user": by cfg.scorer */
    TKV_EVICT_KINDS
} tkv_evict_kind;
struct tkv_evict_view;
typedef struct tkv_evict_config { /* zero means default */
    tkv_evict_kind kind;
    /* Protected: tokens at positions below sink_tokens, and the newest recent_tokens. TKV_NONE: none; 0: the policy's,
     * which is 4 and 32, but "fifo" and "random" 0 and 0, "sliding" 4 and 1, "pyramidkv" 4 and 8 (and recent ones at
     * most half of what the sinks leave of `keep`: H2O's own share). In a small budget the newest token comes first,
     * then sinks, then the other recent ones. */
    int sink_tokens, recent_tokens;
    int pool; /* "snapkv", "pyramidkv": tokens averaged, odd, at most 63; 0: 5 (SnapKV has 5 or 7) */
    int seed; /* of "random" */
    /* "user": the score of slot i, high ones stay */
    float (*scorer)(void *user, const struct tkv_evict_view *view, int i);
    void *user;
    /* when, see tkv_evict_due */
    float trigger; /* share of the budget that may fill up, above 0 and at most 1; 0: 1 (akv-cache: .9) */
    int batch;     /* how many go at once; 0: 64, an eighth of the budget at most */
} tkv_evict_config;

/* >>events, for logs and counters. Called from the call that causes them, which is not over then: it must not call the
 * cache but for reports. */
typedef enum tkv_event_kind {
    TKV_EVENT_LEVEL = 0, /* the cache went from level `from` to level `to` */
    TKV_EVENT_BUDGET, /* an append, reservation or smaller budget was refused; `bytes` were asked for in all */
    TKV_EVENT_TABLE,  /* a layer has a (new) table of A, R or KVQUANT formats */
    TKV_EVENT_EVICT,  /* the tokens at these positions of a layer were dropped */
    TKV_EVENT_SPILL,  /* a block of a layer went outside RAM, positions `from` to `to` - 1, `bytes` of RAM */
    TKV_EVENT_COUNT
} tkv_event_kind;
typedef struct tkv_event {
    tkv_event_kind kind;
    int seq, layer, from, to; /* what does not apply is -1 */
    size_t bytes;             /* of LEVEL: in use */
    const int *positions;     /* of EVICT: n of them, rising, valid during the call */
    int n;
    const char *text; /* a sentence, valid during the call */
} tkv_event;
typedef void (*tkv_on_event)(void *user, const tkv_event *event);

/* >>spill: a place outside RAM for old blocks, such as a file (examples/spill_file.h, to be copied); see
 * tkv_spill. What is stored under a key comes in parts that do not overlap, in rising order, within tkv_spill_bytes;
 * what is fetched is one of these parts, what lies between them never. All return 0 if they did all they were asked
 * to. They are called from the call that needs them and must not call the cache. fetch and ahead may be called from
 * several threads at once, as tkv_attend may be and by cfg.parallel_for; store and drop are not, nor while one of
 * these runs. Each part carries an XXH64, which is checked when it comes back. It finds accidents (lost, damaged,
 * exchanged parts). It does not stop someone who writes to the store on purpose. */
typedef struct tkv_spill_config { /* store and fetch, or none of these */
    int (*store)(void *user, uint32_t key, size_t offset, const void *bytes, size_t size);
    int (*fetch)(void *user, uint32_t key, size_t offset, void *bytes, size_t size);
    /* NULL, or told what will be fetched soon: so many bytes from there on, in parts */
    void (*ahead)(void *user, uint32_t key, size_t offset, size_t size);
    /* NULL, or told once that a key is not needed any more, also after a store that failed; it may come again */
    void (*drop)(void *user, uint32_t key);
    void *user;
    int keep_exact; /* 1: the exact bytes of each block are stored when it is first compressed, for tkv_promote */
} tkv_spill_config;

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
    /* what to keep, see tkv_evict and tkv_importance_of */
    tkv_evict_config evict; /* kind 0: no token is ever dropped */
    int evict_tokens; /* so many tokens of a layer stay at most; 0: as many as the budget has room for */
    tkv_importance_config importance;
    /* so many tokens of each layer that got most attention stay exact, beside the sinks (28 at most, both together 32;
     * not with windows, and there must be sinks). A token joins when its block is compressed, and leaves for one
     * that matters more; its coded place stays */
    int n_anchors;
    int importance_every;   /* one query in so many tells what it looked at; 0: as the policy needs it */
    tkv_spill_config spill; /* where old blocks go when the budget is full; zero: nowhere */
    int remat; /* 1: blocks of sequences that are not used may be dropped then, see tkv_remat_drop */
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
/* sizeof(tkv_config) of the implementation that is linked. A binding compares it with the size of its own struct. */
TKV_API size_t tkv_config_size(void);

/* Sets lengths and formats of the tiers to a plan that has a name; the other fields stay. Bits of an old value,
 * metadata included: "quality" 4.06, "balanced" 3.06 (what a config of zeros gets), "compact" 2.31, "extreme"
 * 1.81, and the designs that this one is compared with, "kivi" and "squat" 2.5, "kvquant-3" 3.5 (give it
 * cfg.rope), "by-context": of these three the first below 2,048 max_tokens (set before), the second below
 * 8,192, else the third. bench/QUALITY.md has what they do to a model. Plans with KVQUANT keys ("kvquant-3",
 * "by-context", "adr", "extreme_context") need cfg.rope, or TKV_KVQUANT_POST_ROPE in cfg.kvquant: tkv_config_validate
 * refuses them without. TKV_ERR_ARG: there is no such name, nothing changed. tkv_preset_name(0), (1), ... are the
 * names, then NULL. */
TKV_API tkv_status tkv_config_preset(tkv_config *cfg, const char *name);
TKV_API const char *tkv_preset_name(int i);

/* Checks every field. On an error, `reason` (may be NULL) gets one sentence that names the field, the
 * value and what would be right, cut to `size` bytes. */
TKV_API tkv_status tkv_config_validate(const tkv_config *cfg, char *reason, size_t size);

/* >>life. Creates an empty cache; memory for tokens comes as they come, a page at a time. *out is
 * untouched on error. Cost: one allocation per growing part, no per-token work. */
TKV_API tkv_status tkv_create(const tkv_config *cfg, tkv_cache **out);
/* The same. `reason` (may be NULL) gets a sentence about every error, cut to `size` bytes, and "" after a success.
 * Errors: TKV_ERR_CONFIG (the sentence of tkv_config_validate), TKV_ERR_ISA, TKV_ERR_BUDGET (no room for an empty
 * cache), TKV_ERR_NOMEM, TKV_ERR_ARG (a pointer is missing). From a text: tkv_create_from_text. */
TKV_API tkv_status tkv_create_ex(const tkv_config *cfg, tkv_cache **out, char *reason, size_t size);
TKV_API void tkv_destroy(tkv_cache *kv); /* NULL is fine. Gives everything back to the allocator. */

/* The same cache inside the caller's memory: nothing is ever allocated. cfg.max_tokens must be set;
 * cfg.allocator is not used. `mem` may have any alignment, stays the caller's and must outlive the cache;
 * tkv_destroy then has nothing to do. tkv_required_bytes is enough for every sequence at
 * max_tokens (not for blocks that TKV_FLUSH_ALL made short: TKV_ERR_CAPACITY then). TKV_ERR_CONFIG without
 * max_tokens, or if it is more than this machine can address; TKV_ERR_BUDGET if cfg.budget_bytes has no
 * room for the index of max_tokens and for pages. */
TKV_API tkv_status tkv_required_bytes(const tkv_config *cfg, size_t *bytes);
TKV_API tkv_status tkv_init_in_place(const tkv_config *cfg, void *mem, size_t bytes, tkv_cache **out);

/* >>append. n new tokens of one layer, after those it has. k is [n][n_kv_heads][head_dim], v is
 * [n][n_kv_heads][v_head_dim], float, keys after RoPE. First older blocks that are due move down a tier
 * (so a new chunk stays exact until the next append), then the tokens are stored in the hot format.
 * Values beyond +-65504 saturate there in F16. Errors: TKV_ERR_CAPACITY (n > max_append, or max_tokens),
 * TKV_ERR_BUDGET (see tkv_budget), TKV_ERR_NOMEM, TKV_ERR_NONFINITE. Cost: O(n) plus one encoding per 64 tokens. */
TKV_API tkv_status tkv_append(tkv_cache *kv, int seq, int layer, const float *k, const float *v, int n);
/* The same, if the first of these tokens belongs at `position`; else TKV_ERR_RANGE, nothing changed (see
 * tkv_append_params). For code that counts positions itself, for RoPE say. */
TKV_API tkv_status tkv_append_at(tkv_cache *kv, int seq, int layer, int position, const float *k,
                                 const float *v, int n);

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
    /* NULL, or the position of the first new token of seq, or of each entry of the batch. An append that would put one
     * elsewhere is refused: attention sees all earlier tokens, so a text that begins anew needs tkv_reset first. */
    const int *positions;
} tkv_append_params;
/* All of the batch, or none of it. Errors as tkv_append, and TKV_ERR_ARG for a sequence that is in it twice, a layer
 * without K and V of its own, a missing pointer; TKV_ERR_RANGE for a position (also of an entry without tokens) that
 * is not the length of the layer (tkv_layer_len): tkv_last_error names both numbers. Strides may be negative. Cost as
 * tkv_append, and O(n_batch^2) to look for doubles. */
TKV_API tkv_status tkv_append_ex(tkv_cache *kv, const tkv_append_params *p);

/* >>step. A step over all layers as one unit. tkv_begin first does what is due (as an append would), then opens
 * the step; appends inside it demote nothing and add at most max_append tokens per layer; tkv_commit checks
 * that every layer got the same number of tokens (TKV_ERR_STATE otherwise, the step stays open); tkv_abort
 * takes the step's tokens away again, leaving the cache as after tkv_begin (what attention told of the layers'
 * queries stays with the statistics). Out of order: TKV_ERR_STATE. tkv_begin can fail with TKV_ERR_NOMEM, or
 * TKV_ERR_BUDGET; it costs the encoding that is due, the others O(layers). */
TKV_API tkv_status tkv_begin(tkv_cache *kv, int seq);
TKV_API tkv_status tkv_commit(tkv_cache *kv, int seq);
TKV_API tkv_status tkv_abort(tkv_cache *kv, int seq);
/* Memory for n more tokens in every layer, demotion included, now: the appends that bring each layer of
 * seq to its length + n cannot fail for memory. Held until then, or until tkv_reset, or tkv_flush of
 * what is not due, or a cut of tokens if others were evicted. n up to max_append. */
TKV_API tkv_status tkv_reserve(tkv_cache *kv, int seq, int n);

/* >>attend. Attention of the last n tokens of the sequence (append them first), causal among themselves,
 * over all tiers. q is [n][n_heads][head_dim], out is [n][n_heads][v_head_dim], float. Query head h reads
 * KV head h / (n_heads / n_kv_heads). Only reads the cache: any number of threads may call this side by
 * side between writes. Never allocates; uses at most 128 KiB of stack. */
TKV_API tkv_status tkv_attend(tkv_cache *kv, int seq, int layer, const float *q, int n, float *out);

/* Logit of query i (row), key j (position), head h, in this order:
 *   s = scale * q.k;  if softcap: s = softcap * tanh(s / softcap);  s += alibi[h] * (j - pos(i));  s += mask[i][j]
 * A row that sees no key gives zeros, and -inf as its log-sum-exp. A row whose query or logits
 * are not finite sees no key. NaN and infinities are told by their bits, under -ffast-math as well. */
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
    const float *alibi; /* NULL, or one slope per query head, finite */
    /* NULL, or one learned logit per query head that joins the softmax without a value; none where it is not finite */
    const float *sinks;
    /* NULL, or added to the logits: mask[row * mask_stride + j] for key position j. <= -1e30 or NaN hides the
     * key, more than 1e30 counts as 1e30. Stride 0: the length of the longest sequence. */
    const float *mask;
    ptrdiff_t mask_stride;
    /* NULL, or bits for a draft tree: the row sees the sequence's j-th of its last mask_bits_n tokens if bit
     * j % 64 of mask_bits[row * mask_bits_stride + j / 64] is set. Older ones are seen. mask_bits_n is at most
     * max_tokens. Stride 0: the words that mask_bits_n needs. */
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
 * window is wider than the layer's, or it is too old); out undefined, where blocks are outside RAM: TKV_ERR_IO,
 * TKV_ERR_DATA (see tkv_spill); out untouched, TKV_ERR_NO_SOURCE: a query would see tokens that must be recomputed
 * (see tkv_remat_drop). Cost: O(rows * n_heads * keys seen), the bytes of each
 * block once per 8 rows of a KV head. Online softmax split over keys: arXiv 2307.08691, section 3; scales
 * folded into queries and weights, integer products on the codes: kernels/scalar.h. */
TKV_API tkv_status tkv_attend_ex(tkv_cache *kv, const tkv_attend_params *p);

/* The slow definition of the same: decodes every key and value, again for each row, and works in double. For
 * tests. Same errors. */
TKV_API tkv_status tkv_attend_reference(tkv_cache *kv, const tkv_attend_params *p);

/* Joins attention over two disjoint sets of keys: out and lse become those of the union. n_rows rows of
 * dim values, lse one per row, all required; an lse that is not finite marks a row without keys. Learned
 * sinks must be in at most one of the two. Nothing is written if n_rows or dim is below 1. Cost: O(n_rows * dim).
 * (arXiv 2307.08691, section 3.) */
TKV_API void tkv_merge_lse(float *out, float *lse, const float *out2, const float *lse2, int n_rows, int dim);

/* >>read. Decoded K and V of tokens start .. start+n-1 in any tier, as [n][n_kv_heads][head_dim] and
 * [n][n_kv_heads][v_head_dim]; k or v may be NULL. Only reads. TKV_ERR_RANGE if a token is not held,
 * TKV_ERR_NO_SOURCE if one must be recomputed, TKV_ERR_ARG for a layer without a cache; k and v untouched then.
 * O(blocks + values). */
TKV_API tkv_status tkv_read(tkv_cache *kv, int seq, int layer, int start, int n, float *k, float *v);

/* >>sequences. A sequence exists from its first append until its reset. Each has blocks of its own: no call shares
 * blocks between sequences yet. */
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
 * there is, which serves until 2,048 tokens have come. Errors, nothing changed: TKV_ERR_BUDGET (a budget is so full
 * that there is no page to recode into: nothing makes room for it), TKV_ERR_NOMEM, or TKV_ERR_CAPACITY in place;
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
 * exist (in place: two): TKV_ERR_CAPACITY if blocks use all, TKV_ERR_BUDGET, TKV_ERR_NOMEM. TKV_ERR_DATA: damaged,
 * or of another model (layers, KV heads, head dimensions); any bytes are safe to try. The plan may differ from that
 * of the cache that saved; a layer that needs what was not saved (A and R formats one thing, KVQUANT another)
 * goes on learning. TKV_ERR_DATA also if a layer has KVQUANT formats with another cfg.rope or other bits of
 * cfg.kvquant than NORM. */
TKV_API tkv_status tkv_calibration_load(tkv_cache *kv, const void *src, size_t size);
/* Makes the missing tables now, of the tokens that are not yet in the archive, and stops learning. TKV_ERR_STATE: a
 * layer without a table has none but sinks. TKV_ERR_BUDGET, TKV_ERR_NOMEM. */
TKV_API tkv_status tkv_calibration_freeze(tkv_cache *kv);
/* Learns anew from the next 2,048 tokens, for a sequence that has changed its subject; then as after a load.
 * TKV_ERR_BUDGET, TKV_ERR_NOMEM. */
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
 * TKV_ERR_CAPACITY, TKV_ERR_BUDGET and TKV_ERR_NOMEM as tkv_calibration_load. Cost: 3 passes over the samples, and
 * one more for each 4096 / head_dim hundreds of tokens. */
TKV_API tkv_status tkv_calibration_fit(tkv_cache *kv, const tkv_samples *s);

/* >>reports. */
typedef struct tkv_tier_info {
    int tokens
        [TKV_TIER_COUNT]; /* per tier; sinks are HOT. Their sum, dropped, evicted and missing are the length */
    int blocks[TKV_TIER_COUNT];
    int dropped; /* left every window, gone */
    int spilled; /* blocks outside RAM; they count in their tier as well */
    int evicted; /* dropped by cfg.evict, tkv_evict, tkv_drop */
    int missing; /* to be recomputed (tkv_remat_missing); in no tier */
} tkv_tier_info;
/* Both O(blocks); TKV_ERR_ARG for a layer without a cache, TKV_ERR_RANGE for a token that is not held,
 * TKV_ERR_NO_SOURCE for one to be recomputed. */
TKV_API tkv_status tkv_tier_counts(const tkv_cache *kv, int seq, int layer, tkv_tier_info *out);
TKV_API tkv_status tkv_tier_of(const tkv_cache *kv, int seq, int layer, int token, tkv_tier *out);
/* The formats that blocks of a tier get, defaults included. */
TKV_API tkv_status tkv_tier_pair(const tkv_cache *kv, int layer, tkv_tier tier, tkv_pair *out);

typedef struct tkv_tier_bytes {
    size_t tokens;   /* summed over layers */
    size_t codes;    /* bytes that hold values (of the tokens present and of the room left in their blocks) */
    size_t metadata; /* scales and zeros */
} tkv_tier_bytes;
typedef struct tkv_memory_info {
    size_t total;                        /* what the allocator handed out and has not got back; the sum of: */
    tkv_tier_bytes tier[TKV_TIER_COUNT]; /*   codes and metadata of each tier */
    size_t tables;          /*   plans per layer, what they learned and learn from, the meter's sums */
    size_t index;           /*   block table, block lists, the cache itself */
    size_t scratch;         /*   work space of encoding and of parallel attention */
    size_t shadow;          /*   exact copies of the quality meter, used or not */
    size_t slack;           /*   free room in pages, padding */
    tkv_tier_bytes spilled; /* outside RAM: tokens (of those of the tiers), their codes and metadata */
    size_t peak;            /* highest total so far */
    size_t fp16_bytes;      /* K and V of the same tokens, plain FP16, unpadded, without any overhead */
    double ratio;           /* fp16_bytes / total */
    double ratio_f32;       /* the same against plain F32 */
} tkv_memory_info;
TKV_API tkv_status tkv_memory(const tkv_cache *kv, tkv_memory_info *out); /* exact to the byte. O(blocks) */
/* The same for the blocks of one layer of one sequence: tiers, padding (slack), their sum; tables, index and scratch
 * belong to nobody. TKV_ERR_ARG for a layer without a cache. */
TKV_API tkv_status tkv_memory_of(const tkv_cache *kv, int seq, int layer, tkv_memory_info *out);
/* What tkv_memory would say of n_seqs sequences of n_tokens each, appended token by token; allocates nothing.
 * Exact where one sequence comes after the other, but that the real `index` can be up to twice as large, having grown
 * for a moment; peak is total (a prompt in large chunks has a higher one: a chunk is exact until the next). With
 * cfg.evict_tokens: of as many tokens. Under a budget, the first of these that fits: a level; the last one with as
 * few blocks outside (cfg.spill) as it takes; all but one sequence dropped as far as may be (cfg.remat); as many
 * tokens as the budget has room for, one behind the other (cfg.evict: those that stay lie in more blocks, and the
 * cache may hold more of the rest, up to the budget). TKV_ERR_BUDGET: none does. TKV_ERR_CONFIG if it is more than
 * this machine can address. */
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
 * tables, index, scratch, and two pages or so that recoding needs; the allocator is never asked for more, and in
 * place the budget is how large the memory must be (tkv_required_bytes gives it back). As bytes come near the budget,
 * the cache goes down the ladder, a level at a time, and recodes what is stored, oldest blocks first, a few per
 * append, as many as the new bytes require. Levels, if cfg.ladder does not say otherwise:
 *     0  everything exact                                3  the plan of the config (warm, then archive)
 *     1  8 bits behind hot_tokens                        4  archive A25 + R20
 *     2  4 bits behind hot_tokens                        5  archive A20 + R15
 * The average pressure (cfg.policy) decides when the next level begins: by default the first at 80 %, the others at
 * 95 % of the budget, each only when everything old is at the present one; whatever the average, the next level
 * begins when an append would not fit. When the last level is not enough the append gets TKV_ERR_BUDGET, and nothing
 * has changed; only where an allocator or a store fails half-way, what made room until then stays.
 * cfg.policy.max_level is how far it may go ("fp16_only": never beyond level 0). cfg.policy.min_level is where it
 * begins: at that level blocks are recoded as they come of age, whether memory is free or not. After a cut or a reset
 * the cache relaxes a level when all that it holds would fit at the looser one; blocks stay as they are, new ones are
 * looser. The tokens of a sequence's last append are not recoded. In an open step blocks from before it may be, and
 * an abort does not undo that; what has left every window may be dropped by a refused append, too. cfg.parallel_for
 * has work space that counts, so that levels may come earlier with it. A cfg.ladder without a budget: the static plan
 * of a level, cfg.policy.min_level at first; see tkv_set_level. */
typedef struct tkv_budget_info {
    size_t budget, used, peak; /* bytes; used: without free pages, but with the room for recoding */
    int level, n_levels;
    tkv_policy_info policy;           /* average, trend, forecast in appends; levels up and down */
    uint64_t recoded[TKV_MAX_LEVELS]; /* blocks that came to the format of a level because of bytes */
    uint64_t demoted;                 /* blocks recoded in all, those that were due by age included */
    uint64_t refused;                 /* calls that got TKV_ERR_BUDGET */
    uint64_t spilled, promoted;       /* blocks that went outside RAM, that tkv_promote brought back */
    uint64_t unstored;                /* blocks and exact copies that cfg.spill.store failed for */
    uint64_t evicted; /* tokens of layers that were dropped (cfg.evict, tkv_evict, tkv_drop) */
    uint64_t dropped,
        recomputed;   /* blocks that a model must compute again, that tkv_remat_give brought back */
    uint64_t pending; /* blocks that the present level would still recode. O(blocks) */
} tkv_budget_info;
TKV_API tkv_status tkv_budget(const tkv_cache *kv, tkv_budget_info *out);
/* Another budget from now on; a lower one tightens at once. 0: none, the static plan of the present level; not for
 * a cache in place, whose budget is at most the memory it has. TKV_ERR_BUDGET: what is there does not fit, nothing
 * changed. TKV_ERR_ARG: the cache was created without a budget. */
TKV_API tkv_status tkv_set_budget(tkv_cache *kv, size_t bytes);
/* To a level of the ladder, within cfg.policy; with a budget the policy goes on from there. Tighter: stored
 * blocks follow as bytes are needed. TKV_ERR_ARG: there is no such level, or in place without a budget. */
TKV_API tkv_status tkv_set_level(tkv_cache *kv, int level);
/* Another hot_tokens for all levels and layers that do not keep everything exact. TKV_ERR_ARG: not 1 to
 * 2^30 - 2, or in place without a budget. Without a budget reservations end, as with tkv_set_level. */
TKV_API tkv_status tkv_set_hot_tokens(tkv_cache *kv, int hot_tokens);
/* Does up to max_work blocks of what appends would have to do soon, for idle moments: recoding until a tenth of what
 * the level allows is free again, and at cfg.policy.min_level all that has come of age. *done (may be NULL) gets the
 * number of blocks. O(sequences * layers) a block. */
TKV_API tkv_status tkv_maintain(tkv_cache *kv, int max_work, int *done);
/* A pressure of the caller's, 0 to 1, such as that of the whole process: counts until the next one where it is
 * above the cache's own. From any thread, at any time (gcc, clang). TKV_ERR_ARG: not a number. */
TKV_API tkv_status tkv_observe(tkv_cache *kv, float pressure);
/* Most tokens that n_seqs sequences can have each, token by token, within cfg.budget_bytes at the last level and with
 * what the config has beyond it: cfg.max_tokens where cfg.evict makes room for ever (that is, where what eviction
 * leaves in any case fits); with cfg.spill as far as the index goes; with cfg.remat each in turn, while the others
 * wait. What fits can be a tenth more (with cfg.spill twice as much: the index grows in steps), never less.
 * Allocates nothing. TKV_ERR_ARG without a budget. */
TKV_API tkv_status tkv_max_context(const tkv_config *cfg, int n_seqs, int *n_tokens);

/* >>spill and promotion. With cfg.spill.store a full budget is not the end: when the last level that is allowed
 * leaves nothing to tighten, the oldest blocks go to the store, as many as it takes, and only their entries in
 * the index stay in RAM (40 bytes or so a block and layer, 432 more with cfg.evict or cfg.importance_every, and
 * with cfg.evict some 850 for each block of the longest list). They keep format and place: attention and
 * tkv_read fetch what they need of them, a head at a time, and give the same bits as if they were in RAM. The
 * sinks, the last two blocks of a layer, and what is younger than hot_tokens stay (with a ladder that never
 * leaves level 0, exact blocks go). A store that fails leaves the block where it is; an append that needed the
 * room drops tokens if there is cfg.evict and that does it, else it gets TKV_ERR_BUDGET and none have gone (but
 * where only dropping first, then storing what is left, had made room: seldom, with budgets for a few blocks).
 * What is outside is dropped for bytes only where its entries in the index have to make room. Where a fetch fails,
 * tkv_attend, tkv_attend_ex, tkv_attend_reference and tkv_read return TKV_ERR_IO, where bytes are not those that
 * were stored TKV_ERR_DATA: what they were to write is undefined then, the cache is as it was (statistics of
 * queries may have seen some), and they may be called again. tkv_truncate cannot cut what is outside. Tables of
 * formats are learned from what is in RAM. tkv_attend takes 36 KiB of stack more. */
/* Most bytes of one key, for a store that gives each key the same room. TKV_ERR_CONFIG. */
TKV_API tkv_status tkv_spill_bytes(const tkv_config *cfg, size_t *bytes);
/* By hand, with or without a budget: up to n_blocks blocks go, oldest first, of a layer or (TKV_ALL) of each layer, if
 * they may; *done (may be NULL) gets how many did, also with TKV_ERR_IO (the store failed). TKV_ERR_ARG: no such
 * sequence or layer of its own, no cfg.spill. */
TKV_API tkv_status tkv_spill(tkv_cache *kv, int seq, int layer, int n_blocks, int *done);
/* Brings the block that has this position into RAM: its exact bytes where cfg.spill.keep_exact kept them, else, if
 * it is outside, as it is. It counts in the budget, and nothing else is touched for it. Under a budget it is the
 * first to be compressed again; without one it stays. Errors, nothing changed: TKV_ERR_NO_SOURCE (it is in RAM and
 * nothing better is kept: decoding restores nothing), TKV_ERR_BUDGET, TKV_ERR_NOMEM, TKV_ERR_CAPACITY in place,
 * TKV_ERR_IO, TKV_ERR_DATA, TKV_ERR_RANGE, TKV_ERR_ARG. Those that matter: tkv_promote_by_importance. */
TKV_API tkv_status tkv_promote(tkv_cache *kv, int seq, int layer, int position);

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
/* The advice for a cache's plan, carried out: hot_tokens (tkv_set_hot_tokens) and a level of cfg.ladder within
 * cfg.policy, for the tokens that come from now on; *out (may be NULL) says what was done. Under a budget memory
 * decides on the level, and only hot_tokens move. Counts as a write. */
TKV_API tkv_status tkv_adapt(tkv_cache *kv, tkv_feedback *f, tkv_advice *out);

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
 * more under another name, scores times `discount` (0: .9), samples 0. Entries that are there already stay. Whether
 * two models are alike the caller must know: an equal shape does not show it, so nothing is ever found under another
 * name. TKV_ERR_RANGE: nothing to copy; TKV_ERR_CAPACITY, TKV_ERR_ARG; nothing changed then. */
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
 * caller's: arrays over the tokens of one layer (or of a sequence) in, a decision out. They know no cache and
 * allocate nothing. Everything is decided alike on every machine but for the rounding of scores; of equal tokens the
 * older one goes first. An array has an entry for each of n slots, oldest first; bits of a mask are bit i % 64 of
 * word i / 64, so a block's 64 tokens are a word. n is 0 to 2^30 - 1.
 *
 * Importance of a token at step `now`, from the attention it got and from its age:
 *     attention * A(now) + recency * e^(-(now - position) / tau)
 * A takes in a step's mass: it is decayed by decay^(now - step of the last time), then the mass is added (or A is
 * the larger of both). So a token that nobody touches costs nothing, and the order of calls within a step is
 * no matter. The recency is that of the moment, not summed up over steps: it counts the same however often
 * tokens are touched. */
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
/* Weights of several query heads as one: rows [n_heads][stride] to out[n]. stride 0: n; out may not lie in them. */
TKV_API tkv_status tkv_importance_aggregate(tkv_importance_heads how, const float *weights, ptrdiff_t stride,
                                            int n_heads, int n, float *out);
/* For tokens without known weights: the most that q.k can be for keys between low and high, channel by channel, such as
 * those of a block (Quest, arXiv 2406.10774). All have head_dim values. */
TKV_API float tkv_importance_bound(const float *q, const float *low, const float *high, int head_dim);
/* The k highest scores, best first, of equal ones the older first; *count is k, or as many as there are. without: NULL,
 * or bits of slots that do not take part (and are not read): what is gone, or what is kept anyway where these are to
 * be anchors. TKV_ERR_NONFINITE, TKV_ERR_ARG: nothing written. O(n + k log k). */
TKV_API tkv_status tkv_importance_top(const float *score, const uint64_t *without, int n, int k, int *out,
                                      int *count);

/* The same within a cache, which gathers the attention itself while tkv_attend runs, if cfg.importance_every or
 * cfg.evict asks for it; 432 bytes for it per block of 64 tokens of a layer count with the index. What is gathered:
 *     h2o; strategies hybrid, accumulation     weights, summed over queries and KV heads
 *     strategy heavy_hitter                    the largest weight that any KV head of any query gave
 *     scissorhands; strategy persistence       how often it was less than importance.low (0: 1 / keys in reach)
 *     tova                                     weights of the newest query alone, summed over KV heads
 *     snapkv, pyramidkv                        those of the newest evict.recent_tokens queries
 * The policy decides; one that needs none of these, and "scores", "user", "none", leave it to the strategy;
 * "recency" gathers nothing. The weight that a KV head gave is what importance.heads makes of those of its
 * n_heads / n_kv_heads query heads: their mean, the largest, or the sum. Mean and sum differ by that constant factor
 * alone: policies choose the same tokens by both, but recency and thresholds stand against another number. Of lows,
 * the mean or sum of the heads' counts, or (max) whether all heads gave less. max, and mean and sum for heavy_hitter,
 * put the heads of a query together first, where there are more than 8 as many as run together.
 *
 * Queries are sampled, but for tova, snapkv and pyramidkv: each KV head of a layer tells of those at one in
 * cfg.importance_every positions (0: one in 32, but none where the policy needs nothing), heads and layers in turns.
 * One sampled query stands for importance_every queries: sums and counts are estimates of the whole, at any rate.
 * What happens between two appends is a step; for each token that came since sums are decayed by importance.decay (0:
 * the strategy's, but 1 where the policy decides): after a chunk of 64 by its 64th power; those of newest queries
 * begin anew with each step. Sums end at 4,095, counts at 16,777,215, each times importance_every. The output of
 * tkv_attend does not depend on this, sums do not depend on threads. Costs a second pass over the keys for what is
 * sampled (bench/LOG.md), and needs the atomics of gcc or clang: elsewhere only tkv_importance_add_to brings
 * something.
 *
 * Importance of tokens at positions start .. start + n - 1, by cfg.importance, as of the newest token; 0 where a
 * token is gone. gone: NULL, or (n + 63) / 64 words for bits of these, as tkv_importance_top's `without`. May run
 * beside tkv_attend. TKV_ERR_CONFIG: nothing is gathered ("recency" is known all the same); TKV_ERR_RANGE: beyond
 * the layer's length; TKV_ERR_ARG; out and gone untouched then. O(blocks + n). */
TKV_API tkv_status tkv_importance_of(tkv_cache *kv, int seq, int layer, int start, int n, float *out,
                                     uint64_t *gone);
/* Mass from elsewhere (scores of the caller's, weights of an encoder) of tokens start .. start + n - 1, as if attention
 * had given it now; at most 2,047 a token and call. What is gone is passed over. This changes the cache: no
 * attention beside it. Errors as above, and TKV_ERR_NONFINITE: negative or no number. O(blocks + n). */
TKV_API tkv_status tkv_importance_add_to(tkv_cache *kv, int seq, int layer, int start, int n,
                                         const float *mass);
typedef struct tkv_ranked {
    int position;
    float importance;
} tkv_ranked;
/* The k most important tokens of a layer, best first, of equal ones the older first; *count is k, or as many as there
 * are. protect: 1 leaves out what eviction protects, positions below evict.sink_tokens and the newest
 * evict.recent_tokens (4 and 32 if the config says nothing). Errors as tkv_importance_of. O(length * log k), and up
 * to k entries move for each that comes in: where k is thousands, tkv_importance_of and tkv_importance_top are
 * faster. */
TKV_API tkv_status tkv_top_tokens(tkv_cache *kv, int seq, int layer, int k, int protect, tkv_ranked *out,
                                  int *count);

/* Promotion: which tokens (or blocks) deserve a dearer tier. Only those that have a better source, a kept or a
 * spilled copy or recomputation: decoding coded bytes restores nothing. */
#define TKV_IMPORTANCE_PER_STEP 64
typedef struct tkv_importance_promotion_config { /* zero means default */
    float threshold;                             /* least importance; 0: .05; TKV_ZERO: any */
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
 * rules/evict.h. */
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

/* >>eviction in a cache, for those with cfg.evict. With cfg.evict_tokens, an append (or tkv_begin) first drops what a
 * layer has too much, a batch at a time, so that it never holds more after it (but what is protected, pinned, or
 * comes with that append). Under a budget, tokens are dropped when the last level has not enough room: tiers come
 * first, dropping last, a batch at a time. Each layer keeps what is pinned, and as many more as its sinks, twice its
 * recent tokens (of which these are one half, as in rules/evict.h) and 64; down to that, an append gets
 * TKV_ERR_BUDGET only if all resorts together do not make room for it ("keydiff", "user", "knorm" with
 * cfg.importance_every, and any with cfg.n_anchors may be refused some blocks before: who goes depends on what is
 * compressed until then; with anchors tokens go before tiers where batches are not enough). TKV_ERR_NOMEM may come
 * when tokens have gone: index and pages grow into the bytes that they left. TKV_EVICT_SCORES goes by
 * tkv_importance_of. Policies see a layer's heads as one.
 *
 * What is left keeps its positions: masks and windows go by them, and keys stay rotated as they came, so that
 * distances are those of the text. Keys are not turned to the places that they have in the cache, as StreamingLLM
 * does for texts longer than a model knows: coded ones would have to be decoded, turned and coded again with each
 * batch, and queries placed anew by the caller. For such texts scale the RoPE of the model. Bytes come back when a
 * block of 64 is empty or when neighbours fit into one: coded blocks are decoded and coded again for that, which
 * costs a little more of their quality (KVQUANT's keys before RoPE cannot move: only blocks that are empty go). What
 * is gone is gone: truncating does not bring it back, tkv_read says TKV_ERR_RANGE. 432 bytes for 64 tokens of a
 * layer know of it. */
typedef struct tkv_evict_params { /* zero means default */
    int seq;
    int layer; /* TKV_NONE: all of them */
    const tkv_evict_config
        *evict; /* NULL: cfg.evict; another must go by what the cache gathers, or by scores */
    int keep;   /* tokens of a layer that stay, on average for "pyramidkv"; 0: cfg.evict_tokens */
    /* NULL, or by position, as many as the longest of these layers is long (tkv_layer_len): */
    const uint64_t *pinned;
    const signed char *priority;
    const float *scores; /* in the place of what the cache knows; high ones stay */
} tkv_evict_params;
/* Now: at the end of a prompt, say (SnapKV). TKV_ERR_STATE: a step is open, or there is no cfg.evict;
 * TKV_ERR_CONFIG: `evict` has a field out of range, or goes by attention that cfg.evict and cfg.importance do not
 * gather; TKV_ERR_NONFINITE: a score is no number; TKV_ERR_BUDGET: kind "none", and some would have to go;
 * TKV_ERR_ARG. An error changes nothing. O(tokens), "knorm" and "keydiff" as said there, and coding of blocks that
 * join. */
TKV_API tkv_status tkv_evict(tkv_cache *kv, const tkv_evict_params *p);
/* Drops the tokens of these bits (by position, n of them) but for pinned ones. layer TKV_NONE: of all layers.
 * TKV_ERR_STATE as above, TKV_ERR_ARG. */
TKV_API tkv_status tkv_drop(tkv_cache *kv, int seq, int layer, const uint64_t *victims, int n);
/* Tokens start .. start+n-1 that are there stay whatever the budget says, in all layers; pinned 0: no longer.
 * TKV_ERR_STATE as above, TKV_ERR_ARG. */
TKV_API tkv_status tkv_pin(tkv_cache *kv, int seq, int start, int n, int pinned);
/* The same for a while: until the layer is `length` tokens long (for 500 more tokens that is tkv_layer_len + 500).
 * Of such pins those in one block of 64 tokens last as long as the longest, also when blocks join later. TKV_ERR_ARG:
 * length is not 1 to 2^30 - 2. */
TKV_API tkv_status tkv_pin_until(tkv_cache *kv, int seq, int start, int n, int length);
/* Bits of those of tokens start .. start+n-1 that are there. */
TKV_API tkv_status tkv_alive(const tkv_cache *kv, int seq, int layer, int start, int n, uint64_t *mask);

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
    float threshold;       /* pressure from which on anything is done; 0: .9; TKV_ZERO: always */
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
 * of the newest token; *freed (may be NULL) is what that gives, less than need where there is no more to get. Below
 * the threshold nothing is done. A block goes where that costs fewer FLOPs a byte than coding does, with the chance
 * that it is asked for counted in, use / (1 + age / age_tokens); then blocks are coded, oldest first; if that is not
 * enough more go. Blocks go front to back behind the sinks, never fewer than min_materialized tokens stay, and no
 * block that costs more than step_flops goes. TKV_ERR_ARG (blocks are not in order), nothing changed. O(n). */
TKV_API tkv_status tkv_remat_decide(tkv_remat *r, const tkv_remat_block *blocks, int n, int now,
                                    float pressure, size_t need, tkv_remat_action *action, size_t *freed);
/* How many of the dropped blocks, front to back, may be recomputed at this step (a number that does not fall); what
 * they cost counts as spent. TKV_ERR_ARG: as above, or `step` is before the last one. */
TKV_API tkv_status tkv_remat_restore(tkv_remat *r, const tkv_remat_block *blocks, int n, int step, int *first,
                                     int *count);

/* >>rematerialization in a cache. Blocks behind the sinks can be dropped: their bytes are free, their place in the
 * index stays (40 bytes or so a block and layer), and nobody has them until the caller's model computes them again.
 * They go front to back, in all layers at once. The last two blocks of a layer and what is younger than hot_tokens
 * stay; what is outside RAM (cfg.spill) stays there. While a query would see dropped
 * tokens, tkv_attend and tkv_read return TKV_ERR_NO_SOURCE and compute nothing; what lies behind the window does not
 * matter, but for a layer's last two blocks. Appending goes on, tokens can be evicted, tkv_truncate cannot cut them,
 * tkv_reset forgets them, and tkv_promote brings back those that cfg.spill.keep_exact has a copy of.
 *
 * With cfg.remat under a budget this is the resort when no level has room, after cfg.spill and before cfg.evict:
 * blocks of sequences other than the one that needs room, none in a step, the one used longest ago first (its last
 * append, reservation or tkv_remat_give; attention does not count). So conversations that wait give way to the one
 * that runs; before one goes on, it is recomputed (tkv_recompute). Those that run side by side must be appended to as
 * one batch, or each in a step of its own. */
/* By hand, with or without a budget or cfg.remat: the first blocks that are there, as many as n_tokens positions hold
 * whole; *dropped (may be NULL) gets how many positions went, 0 where none may. TKV_ERR_ARG, TKV_ERR_STATE in an open
 * step. O(blocks). */
TKV_API tkv_status tkv_remat_drop(tkv_cache *kv, int seq, int n_tokens, int *dropped);
/* The first run of positions that are to be recomputed, in any layer; *n 0: none are. TKV_ERR_ARG. O(blocks^2). */
TKV_API tkv_status tkv_remat_missing(const tkv_cache *kv, int seq, int *start, int *n);
/* K and V of tokens start .. start+n-1 of a layer, in the shapes of tkv_append and as they were appended. Of these the
 * layer takes what it lacks, which must be whole blocks, the first of those that it lacks; any run that begins where
 * tkv_remat_missing says and ends a multiple of TKV_BLOCK_TOKENS later (or at its end) is right, while no token was
 * evicted. They go the way that their block had gone, by its last two formats: bytes are those from before, but where
 * a budget had made a block tighter more often, evicted tokens were closed up, or what SQUAT knows of queries
 * changed. They count in the budget, and room is made for them as for an append. Errors, nothing changed (but what
 * making room tightened): TKV_ERR_STATE (there are missing ones before these, or a step is open), TKV_ERR_RANGE (a
 * part of a block, more than there is), TKV_ERR_NONFINITE, TKV_ERR_BUDGET, TKV_ERR_NOMEM, TKV_ERR_CAPACITY in place,
 * TKV_ERR_ARG. Cost: an append of n tokens, and one or two codings of each block. */
TKV_API tkv_status tkv_remat_give(tkv_cache *kv, int seq, int layer, int start, const float *k,
                                  const float *v, int n);
/* Gives (tkv_remat_give) tokens start .. start+n-1 of layers first_layer .. first_layer+n_layers-1; those that share
 * K and V with another or have none are left out. Everything before `start` in seq is there. Any other status than
 * TKV_OK ends tkv_recompute. It may use other caches, and of this one reports, tkv_read and tkv_attend. */
typedef tkv_status (*tkv_compute)(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers,
                                  int start, int n);
/* Brings back what is missing, front to back, one call of compute for each run, as many blocks as tkv_remat_restore
 * says that r has FLOPs for in this step (a number that does not fall). *missing (may be NULL): positions that are
 * still to come. r->info counts. TKV_ERR_STATE: compute did not give all, or a step is open; TKV_ERR_ARG; what
 * compute returned. What was given before an error stays. */
TKV_API tkv_status tkv_recompute(tkv_cache *kv, int seq, tkv_remat *r, int step, tkv_compute compute,
                                 void *user, int *missing);
/* A sequence as tkv_remat_decide wants it, sinks first: bytes in RAM, all layers together; quantized_bytes as the next
 * level of the ladder has them (under a budget, else the same); dropped where any layer lacks a token; use 0. *n is
 * how many there are, of which out gets the first `capacity`. TKV_ERR_ARG. O(blocks) a block. */
TKV_API tkv_status tkv_remat_blocks(const tkv_cache *kv, int seq, tkv_remat_block *out, int capacity, int *n);
/* Asks tkv_remat_decide how `need` bytes become free, and does it: what is to be evicted is dropped, as far as it may;
 * if anything is to be coded, the cache goes one level down its ladder (with the whole cache: a level is that of all
 * sequences) and tightens as many blocks, the oldest first, at most until `need` is reached. *freed (may be NULL) is
 * what that gave. blocks and actions are room for `capacity` blocks, as many as tkv_remat_blocks says. TKV_ERR_ARG
 * (too little room, or a number is none), TKV_ERR_STATE in an open step. */
TKV_API tkv_status tkv_remat_free(tkv_cache *kv, int seq, tkv_remat *r, float pressure, size_t need,
                                  tkv_remat_block *blocks, tkv_remat_action *actions, int capacity,
                                  size_t *freed);

/* >>promotion by importance, at every step or now and then: the blocks of a layer that matter most come back from the
 * best source that there is, as with tkv_promote; a block matters as much as the token of it that matters most
 * (tkv_importance_of). Those that nobody has come back by compute, which is asked for all that is missing, front to
 * back, as much as remat has FLOPs for (tkv_recompute; its steps are lengths of the layer here). */
typedef struct tkv_promotion { /* zeroed, then what is asked for; layers may share one, and then the limit */
    tkv_importance_promotion by; /* by.cfg: threshold, limit, cool-down: .05, 8, 4 if they are 0 */
    tkv_remat *remat;            /* NULL, as compute: what nobody has has no source */
    tkv_compute compute;
    void *user;
    /* of the last call, blocks that matter: */
    int promoted;
    int waiting;   /* for the limit, the cool-down, FLOPs, or because of an error */
    int no_source; /* nothing better is kept */
} tkv_promotion;
/* A step is what happens at one length of the layer. A block has moved when it came back and when it was coded or
 * went outside, by hand or because of age or bytes. Age counts in hybrid's importance: with tau 64 what is younger
 * than 115 tokens is above the threshold by that alone, "accumulation" counts attention only. TKV_ERR_NO_SOURCE:
 * blocks matter, and of none of them anything better is kept; those that are exact do not count. TKV_ERR_CONFIG:
 * nothing is gathered (cfg.importance_every), or by.cfg; TKV_ERR_ARG; errors of tkv_promote and tkv_recompute: what
 * came before stays, and p says how much. In a full cache TKV_ERR_BUDGET is usual: nothing makes room for it.
 * O(tokens of the layer), and a fetch of each block that comes. */
TKV_API tkv_status tkv_promote_by_importance(tkv_cache *kv, int seq, int layer, tkv_promotion *p);

/* Walks every invariant: each block in one list, no slot used twice, positions without gaps,
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
 *   adr               64 + 448, KIVI4, then as "by-context", cfg.rope included (RuvLLM's ADR-004; its quality target:
 *                     not mapped)
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
 * as if it stood before all keys but max_tokens. The text may be any bytes. TKV_NO_REPORTS leaves all of these out.
 * */
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
 * twice, no room; `reason` (may be NULL) gets the line and what would be right, cfg and the memory of room stay as
 * they were. Whether the whole is right, tkv_config_validate says. 10 KB of stack. Cost: O(size), three times. */
TKV_API tkv_status tkv_config_parse(tkv_config *cfg, const tkv_config_room *room, const char *text,
                                    size_t size, char *reason, size_t reason_size);
/* The fields that are not 0, as lines or (json 1) as JSON, with a final zero: tkv_config_parse makes the same config of
 * it. Allocator, parallel_for and canaries are no text. *needed (may be NULL) is the room for all of it; buf NULL
 * asks for that alone. TKV_ERR_ARG: too little room, nothing written. TKV_ERR_CONFIG: a field has no text (NaN, no
 * such format). */
TKV_API tkv_status tkv_config_print(const tkv_config *cfg, int json, char *buf, size_t size, size_t *needed);
/* The same of a policy: threshold (a list), hysteresis, alpha, min_level, max_level, and `profile` (tkv_policy_profile)
 * in the place of `preset`. */
TKV_API tkv_status tkv_policy_parse(tkv_policy_config *cfg, const char *text, size_t size, char *reason,
                                    size_t reason_size);
TKV_API tkv_status tkv_policy_print(const tkv_policy_config *cfg, int json, char *buf, size_t size,
                                    size_t *needed);
/* Creates a cache from a text (see tkv_config_parse). host: NULL, or a config whose fields hold where the text says
 * nothing, such as allocator, parallel_for, spill and on_event. Layers, ladder and frequencies need no room of the
 * caller's: the allocator gives it for the time of the call. Errors as tkv_create_ex; *out stays as it was, and
 * `reason` (may be NULL) gets a sentence, which begins with the line that is wrong. Cost: O(size), five times, and
 * tkv_create. */
TKV_API tkv_status tkv_create_from_text(const char *text, size_t size, const tkv_config *host,
                                        tkv_cache **out, char *reason, size_t reason_size);
/* What the cache is and holds, as one object of JSON: version, config (with defaults, as tkv_config_parse reads it),
 * formats of each layer's tiers, lengths and tokens per tier of each sequence that exists (arrays over layers; null:
 * a layer without a cache of its own), then figures: memory, tokens, sequences, quality (null without a meter). buf,
 * size and needed as in tkv_config_print. O(blocks), twice. */
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
