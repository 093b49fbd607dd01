/*
 * api.h - everything a caller sees: version, options, types, functions.
 *
 * This file holds declarations only and may call nothing. The other files implement the promises made here. Where a
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

/* >>options. The manual at the top has a table of all options and their effects. */
#ifdef TKV_STATIC
#ifndef TIEREDKV_IMPLEMENTATION
#define TIEREDKV_IMPLEMENTATION /* compilers warn about static declarations without bodies */
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

#include "prefix.h"

#ifdef __cplusplus
extern "C" {
#endif

/* >>constants */
#define TKV_BLOCK_TOKENS 64 /* tokens in a block: the cache encodes and demotes them together */
#define TKV_MAX_HEAD_DIM 576
#define TKV_MAX_METER_HEADS 64       /* largest value of cfg.meter.heads */
#define TKV_MAX_ATTEND_BYTES 2200000 /* tkv_get_attend_bytes never reports more */
/* Sentinels. Each has its own name and value. */
#define TKV_OFF (-1)        /* as a length or a level: this part is off */
#define TKV_UNLIMITED (-2)  /* as a length: this tier takes all tokens, and later tiers stay empty */
#define TKV_ALL_LAYERS (-3) /* as a layer */
#define TKV_NO_SEQ (-4)     /* as a sequence */
#define TKV_NEVER (-5)      /* as a step: it has not happened */
#define TKV_ALL_SEQS (-6)   /* as a sequence, of tkv_seq_save and tkv_seq_load: the whole cache */
/* TKV_ZERO means the number 0 in a float field whose 0 means "default". Only fields whose comment names TKV_ZERO
 * accept it. It is a tiny negative number, recognised by its bits. A config text writes it as `zero`. */
#define TKV_ZERO (-1e-30f)

/* >>status. Every function that can fail returns a status. A negative status is an error. A call that fails leaves
 * tokens, positions and lengths as they were, and every answer about which tokens are there. Some other work may
 * stay:
 *   blocks   that were recoded or offloaded for the call, and the level that the budget then had
 *   tables   that were learned, and memory for the index or for tables
 * A bad argument changes nothing at all. Nor does a request that no reclaim stage can serve.
 * A function that a switch leaves out (TKV_NO_EVICT and others) returns TKV_ERR_UNSUPPORTED. */
#define TKV_STATUS_LIST(X)                                                                                   \
    X(TKV_OK, 0, "ok")                                                                                       \
    X(TKV_ERR_ARG, -1, "bad argument: a pointer is missing or a number is out of range")                     \
    X(TKV_ERR_CONFIG, -2, "bad configuration: tkv_validate_config says which field and why")                 \
    X(TKV_ERR_NOMEM, -3, "out of memory: the allocator returned NULL")                                       \
    X(TKV_ERR_CAPACITY, -4, "full: max_tokens, max_append or the caller's memory is used up")                \
    X(TKV_ERR_NONFINITE, -5, "NaN or infinity in k or v, and the config says to refuse them")                \
    X(TKV_ERR_STATE, -6, "not in this state: a step is open or missing, or the cache lacks what it needs")   \
    X(TKV_ERR_RANGE, -7, "these tokens are not in the cache")                                                \
    X(TKV_ERR_ISA, -9, "this instruction set was asked for by name and is not available here")               \
    X(TKV_ERR_BROKEN, -10, "self-check failed: the cache's memory was overwritten, or a bug")                \
    X(TKV_ERR_DATA, -11, "these bytes are damaged, of another version or of another model")                  \
    X(TKV_ERR_BUDGET, -12,                                                                                   \
      "the budget is full: tkv_get_last_error says what the call needs, and what fills it")                  \
    X(TKV_ERR_IO, -13, "cfg.offload failed: blocks outside RAM could not be read or written")                \
    X(TKV_ERR_NO_SOURCE, -14,                                                                                \
      "nothing better is kept of these tokens, or they must be recomputed first: see tkv_seq_recompute")     \
    X(TKV_ERR_UNSUPPORTED, -15, "this build leaves that out, or the GPU companion has no kernel for it")     \
    X(TKV_ERR_DEVICE, -16, "the GPU's runtime refused: see tkvcu_get_last_error")
#define TKV_STATUS_ENUM_(name, value, text) name = value,
typedef enum tkv_status { TKV_STATUS_LIST(TKV_STATUS_ENUM_) TKV_STATUS_LAST_ = -17 } tkv_status;
#undef TKV_STATUS_ENUM_

/* >>formats. A format defines how a block stores K or V. tkv_get_block_bytes gives the size of each format. */
typedef enum tkv_format {
    TKV_FORMAT_DEFAULT = 0, /* hot: F16; warm: A40 for K, R40 for V; archive: A30 for K, R30 for V */
    TKV_F32,
    TKV_F16,
    TKV_BF16,
    TKV_Q8,    /* 8 bits; an fp16 scale and zero per group, from minimum and maximum; groups as in KIVI */
    TKV_KIVI4, /* 4, 3, 2 bits; a group of K is a run of tokens of one channel, */
    TKV_KIVI3, /*   a group of V a run of channels of one token (KIVI, arXiv 2402.02750, section 3) */
    TKV_KIVI2,
    TKV_A40, /* K only: each channel gets its own number of bits. Average bits per value of a layer, metadata */
    TKV_A35, /*   included: 4, 3.5, 3, 2.75, 2.5, 2.25, 2, 1.75, 1.5 (formats/a.h) */
    TKV_A30,
    TKV_A275,
    TKV_A25,
    TKV_A225,
    TKV_A20,
    TKV_A175,
    TKV_A15,
    TKV_R40, /* V only: rotated values. Average bits per value of a layer: 4, 3, 2, 1.5, 1, */
    /*   plus 8 bits per token (formats/r.h) */
    TKV_R30,
    TKV_R20,
    TKV_R15,
    TKV_R10,
    TKV_INT8, /* codes each token alone: whole numbers, one fp16 scale per group of channels (formats/int.h) */
    TKV_INT4,
    TKV_FP8_E4M3, /* codes each token alone: OCP floats, one fp16 scale per token (formats/float.h) */
    TKV_FP8_E5M2,
    TKV_FP4,    /* E2M1 with the two scales of NVFP4: E4M3 per 16 channels, fp16 per token */
    TKV_SQUAT4, /* K only: the bytes of KIVI4 and KIVI2; the encoder keeps errors nearly orthogonal to the */
    TKV_SQUAT2, /*   queries (SQuat, arXiv 2503.24358) */
    TKV_SUBSPACE4, /* codes each token alone, in a rotated basis; each part of it has a minimum and a maximum */
    TKV_SUBSPACE2, /*   (formats/subspace.h) */
    TKV_KVQUANT4, /* levels from k-means, outliers stored apart, keys as before RoPE (KVQuant, arXiv 2401.18079) */
    TKV_KVQUANT3,
    TKV_KVQUANT2,
    TKV_FORMAT_COUNT
} tkv_format;

typedef enum tkv_tier {
    TKV_TIER_HOT = 0,
    TKV_TIER_WARM = 1,
    TKV_TIER_ARCHIVE = 2,
    TKV_TIER_COUNT = 3
} tkv_tier;
typedef enum tkv_side { TKV_K = 0, TKV_V = 1 } tkv_side;
typedef enum tkv_type {
    TKV_TYPE_F32 = 0,
    TKV_TYPE_F16 = 1,
    TKV_TYPE_BF16 = 2
} tkv_type; /* element type of the caller's arrays */
typedef enum tkv_nonfinite {
    TKV_NONFINITE_REFUSE = 0, /* the append returns TKV_ERR_NONFINITE and stores nothing */
    TKV_NONFINITE_SATURATE    /* NaN becomes 0, infinities become +-65504 */
} tkv_nonfinite;
/* Bits of cfg.format.fit: how the encoder of Q8, KIVI and SQUAT formats chooses scale and zero. 0: from minimum and
 * maximum. The bits change neither the number of bytes nor the decoding, nor its speed. Encoding a block takes
 * longer. They help at 3 bits and less. */
typedef enum tkv_fit {
    TKV_FIT_CLIP = 1,    /* takes the range of least squared error out of 12 per group; sinks must be exact */
    TKV_FIT_NORM = 2,    /* decoded groups have the variance of the values: mixes best with exact tokens */
    TKV_FIT_UNBIASED = 4 /* decoded groups are unbiased, cov(x^, x) = var(x); excludes TKV_FIT_NORM */
} tkv_fit;
/* Bits of cfg.format.rotate: before coding this side, INT8, INT4, FP8 and FP4 apply a randomised Hadamard
 * rotation. */
typedef enum tkv_rotate { TKV_ROTATE_K = 1, TKV_ROTATE_V = 2 } tkv_rotate;
/* Bits of cfg.format.kvquant: how KVQUANT formats differ from the paper's "nuq, 1 %" (formats/kvquant.h). */
typedef enum tkv_kvquant {
    TKV_KVQUANT_POST_ROPE = 1,  /* codes keys after RoPE, as appended; required without cfg.model.rope */
    TKV_KVQUANT_UNIFORM = 2,    /* levels are evenly spaced */
    TKV_KVQUANT_NORM = 4,       /* decoded values keep the variance (Q-Norm); helps at 3 bits and less */
    TKV_KVQUANT_DENSE = 8,      /* stores no outliers */
    TKV_KVQUANT_UNIFORM_K = 16, /* levels of keys are evenly spaced */
    TKV_KVQUANT_UNIFORM_V = 32  /* levels of values are evenly spaced */
} tkv_kvquant;
/* Which values of a block share a scale (and a zero) in Q8, KIVI, SQUAT and INT formats: cfg.format.k_scales, v_scales.
 * Creation refuses what no kernel reads: TOKEN for keys of Q8, KIVI and SQUAT, CHANNEL for values and for INT formats.
 * Other formats ignore it. SUBSPACE formats with subspaces = 1 have a scale and a zero per token, on both sides. */
typedef enum tkv_scales {
    TKV_SCALES_GROUP = 0, /* group_size values: tokens of a channel for keys of Q8, KIVI and SQUAT, */
    /*   channels of a token for values and for INT formats */
    TKV_SCALES_TOKEN,  /* all channels of a token and head */
    TKV_SCALES_CHANNEL /* all 64 tokens of a channel */
} tkv_scales;
typedef enum tkv_isa {
    TKV_ISA_AUTO = 0,
    TKV_ISA_SCALAR,
    TKV_ISA_AVX2,
    TKV_ISA_AVX512,
    TKV_ISA_NEON, /* AArch64 */
    TKV_ISA_WASM, /* WebAssembly compiled with -msimd128 */
    TKV_ISA_COUNT
} tkv_isa;

typedef struct tkv_cache tkv_cache; /* opaque */

/* >>allocator. Set both functions, or neither: then the cache uses malloc and free. alloc returns NULL, or memory
 * aligned to `align`, a power of two of at most 64. release gets the same size and align as alloc did, so an arena
 * needs no headers. */
typedef struct tkv_allocator {
    void *user;
    void *(*alloc)(void *user, size_t size, size_t align);
    void (*release)(void *user, void *ptr, size_t size, size_t align);
} tkv_allocator;

/* >>threads. The library starts no threads. A caller with worker threads may pass a tkv_parallel_for. It calls
 * task(ctx, i) once for each i in 0 .. n_tasks-1, in any order, on any threads. It returns when all calls are done.
 * Results are bit-identical with and without it, for any number of threads. */
typedef void (*tkv_task)(void *ctx, int index);
typedef void (*tkv_parallel_for)(void *user, int n_tasks, tkv_task task, void *ctx);

/* >>config. Zero means "default" in every field. Fill a config with zeros before setting fields:
 * `tkv_config cfg = {0};` in C, `tkv_config cfg = tkv_default_config();` in C or C++. */
typedef struct tkv_format_pair {
    tkv_format k, v;
} tkv_format_pair;

/* How the model gives positions to its keys. Tokens can move (tkv_seq_shift) with TKV_ROPE_FIXED only. */
typedef enum tkv_rope_kind {
    TKV_ROPE_FIXED = 0, /* one position per token, with the same frequencies at all times */
    TKV_ROPE_MROPE,     /* several positions per token, as for images (Qwen2-VL) */
    TKV_ROPE_DYNAMIC,   /* frequencies that change with the length (dynamic NTK, LongRoPE beyond a length) */
    TKV_ROPE_LEARNED,   /* positions that are added before K is made (GPT-2), learned or not */
    TKV_ROPE_COUNT
} tkv_rope_kind;

/* The model's RoPE, for formats that undo it (KVQUANT) and for tokens that move (tkv_seq_shift). Of the first `dim`
 * channels, each pair rotates by scale * base^(-2j / dim) radians per token, j = 0 .. dim/2 - 1, starting at
 * position 0. YaRN, Llama 3 and p-RoPE: give the frequencies that they compute. If the model rotates differently,
 * decoded keys stay correct, but compression loses more, and moved keys are wrong. */
typedef struct tkv_rope {
    /* rotated channels: even, at most head_dim, and at most 510, or 512 with head_dim 512; 0: not given; TKV_OFF: keys
     * are not rotated (NoPE) */
    int dim;
    int interleaved; /* 0: channels j and j + dim/2 are a pair (Hugging Face); 1: 2j and 2j + 1 (GGUF of Llama) */
    float base;      /* 2 to 1e9; 0: 10000 */
    float scale;     /* factor on positions, at most 4; 0: 1. Linear scaling by 4 is 0.25 */
    /* NULL, or dim/2 numbers from 0 to 1 that replace the powers of base; read during the call, not kept */
    const float *frequencies;
    tkv_rope_kind kind; /* other than TKV_ROPE_FIXED: the rest is not used */
    int first; /* the first rotated channel: 512 where RoPE turns the last 64 of 576 (DeepSeek). Not with KVQUANT */
} tkv_rope;
/* Turns a head's vector by a number of positions, in place, as RoPE does. It is the arithmetic of tkv_seq_shift:
 * attention to tokens that all moved by d is, bit for bit, that with queries turned by -d.
 *   rope        as in tkv_config
 *   head_dim    channels of x, 1 to 576
 *   positions   may be negative; -n undoes n within rounding
 *   x           [head_dim]
 * Errors, x unchanged:
 *   TKV_ERR_UNSUPPORTED   rope.dim is 0, or rope.kind is not TKV_ROPE_FIXED
 *   TKV_ERR_ARG           a pointer is missing, or a number is out of range
 * Cost: 3 us for 128 channels. Source: RoPE, arXiv 2104.09864. */
TKV_API tkv_status tkv_rotate_rope(const tkv_rope *rope, int head_dim, int positions, float *x);

typedef struct tkv_layer_config { /* settings of one layer; zero takes the cache's value */
    /* Heads and channels of this layer, where layers differ (Gemma 4: 8 KV heads of 256, and 1 of 512 in global
     * layers). v_head_dim 0 is head_dim, if the layer sets that. A layer with share_kv may set n_heads alone. With
     * model.scale 0, scores of a layer are scaled by 1/sqrt(its head_dim). */
    int n_heads, n_kv_heads, head_dim, v_head_dim;
    int v_in_k; /* as model.v_in_k; TKV_OFF: V is stored */
    tkv_format_pair hot, warm, archive;
    int sink_tokens, hot_tokens, warm_tokens;
    int window;       /* a query sees this many newest keys, its own included; TKV_OFF: no sliding window */
    int window_sinks; /* as model.window_sinks; TKV_OFF: the window hides sinks */
    int share_kv;     /* 1 + index of an earlier layer: this layer reads its K and V and accepts no appends */
    int no_cache;     /* 1: this layer has no K and V (a state-space layer, for example) */
    /* RoPE of this layer's keys, where layers differ. With dim and kind 0 it is model.rope, and all fields must be 0.
     * rope.dim TKV_OFF: this layer does not rotate its keys. A layer with share_kv takes the other layer's */
    tkv_rope rope;
} tkv_layer_config;

/* >>ladder. A ladder lists plans, called levels, from loose to tight. A full sequence (limits.max_tokens; without a
 * limit 2^20 tokens) must not take more bytes at a level than at the one before, or the config is refused. Only levels
 * by length (from_tokens) may be in another order, as the length alone chooses among them. A cache
 * begins at level cfg.budget.pressure.min_level, by default 0. A length or format of 0 takes the cache's value.
 * hot_tokens = TKV_UNLIMITED keeps all tokens exact. Settings of a layer (tkv_layer_config) hold at every level. */
#define TKV_MAX_LEVELS 8
typedef struct tkv_level {
    int hot_tokens, warm_tokens;
    tkv_format_pair warm, archive;
    /* Length in tokens of the longest sequence at which an append goes to this level, by itself; 0: none. It is for
     * caches without a budget, not in place. Level 0 has none, and the lengths of later levels rise. Below the first
     * one the level is min_level. Stored blocks keep their formats. tkv_set_level holds until the longest sequence
     * passes one of the lengths, up or down. While a reservation lasts, the level waits. If such levels do not go from
     * loose to tight, meter.target is refused, and so is tkv_adapt_plan. */
    int from_tokens;
} tkv_level;

/* Named settings of the pressure controller. */
typedef enum tkv_pressure_profile {
    TKV_PROFILE_DEFAULT = 0, /* thresholds .80 and .95, hysteresis .05, alpha .20 */
    TKV_PROFILE_FP16_ONLY,   /* the same, but never above level 0 */
    TKV_PROFILE_AGGRESSIVE,  /* thresholds .50 and .80, hysteresis .05, alpha .30, starts at level 1 */
    TKV_PROFILE_COUNT
} tkv_pressure_profile;
/* The pressure controller's settings: when it changes the level. See tkv_init_pressure and tkv_get_budget. Zero takes
 * the profile's value, which is given here for the default profile. */
typedef struct tkv_pressure_config {
    tkv_pressure_profile profile;
    /* level i + 1 begins at pressure threshold[i]; rising, at most 1. All 0: .80, .95. TKV_ZERO: at any pressure */
    float threshold[TKV_MAX_LEVELS - 1];
    /* relaxes one level below (threshold - hysteresis); 0: .05; TKV_ZERO: as soon as below the threshold */
    float hysteresis;
    float alpha;   /* a sample's weight in the moving average, to 1; 0: .20; the first sample starts it */
    int min_level; /* first level; the cache never goes below it, even if memory is free: see tkv_get_budget */
    int max_level; /* highest level; 0: the last one; TKV_OFF: always level 0 */
    /* 1: a sample at or above the threshold of a level two or more above the present one raises the level to it at
     * once, and the average to the sample. 0: only the average raises the level. Levels fall one by one in both. A
     * budget then skips the levels between. Levels with equal thresholds are passed together */
    int jump;
} tkv_pressure_config;

/* >>keeping. These types say how the cache rates tokens and which policy evicts them; see tkv_update_importance and
 * tkv_evict. A score is the attention that a token received in one step. A is the value that a strategy gathers
 * from a token's scores. */
typedef enum tkv_importance_strategy {
    TKV_IMPORTANCE_HYBRID = 0,   /* "hybrid": A sums scores; decay .95, weights .7 and .3 (akv-cache) */
    TKV_IMPORTANCE_ACCUMULATION, /* "accumulation": A sums scores without decay, as H2O does */
    TKV_IMPORTANCE_HEAVY_HITTER, /* "heavy_hitter": A is the largest score of any step */
    TKV_IMPORTANCE_RECENCY,      /* "recency": age alone */
    TKV_IMPORTANCE_PERSISTENCE,  /* "persistence": A loses 1 per score below `low` (Scissorhands) */
    TKV_IMPORTANCE_COUNT
} tkv_importance_strategy;
typedef enum tkv_importance_heads {
    TKV_IMPORTANCE_MEAN = 0,
    TKV_IMPORTANCE_MAX,
    TKV_IMPORTANCE_SUM
} tkv_importance_heads;
typedef struct tkv_importance_config { /* zero takes the strategy's value */
    tkv_importance_strategy strategy;
    float decay;     /* factor on A per step, above 0 and at most 1 */
    float attention; /* weight of A, at most 1e6; TKV_ZERO: ignores A */
    float recency;   /* weight of the age, at most 1e6; TKV_ZERO: ignores the age */
    float tau;       /* time constant of the age, in steps, 1 to 2^30; 0: 64 */
    float low;       /* "persistence": the score below which A loses 1; 0: an even share, 1 / n of n tokens */
    /* how scores of the query heads of one KV head are joined, for attention that the cache gathers itself;
     * see tkv_get_importance */
    tkv_importance_heads heads;
    int sample_every; /* a cache samples one query in this many; 0: one in 32, if the policy needs it */
} tkv_importance_config;
/* Promotion selects tokens (or blocks) for a more precise tier. Only those with a better source can be promoted: an
 * exact copy, an offloaded block, or recomputation. Decoding cannot restore lost precision. */
#define TKV_MAX_PROMOTIONS 64
typedef struct tkv_promotion_config { /* zero means default */
    float threshold;                  /* least importance to promote; 0: .05; TKV_ZERO: 0 */
    int per_step;                     /* most promotions per step, at most 64; 0: 8 */
    int cooldown;                     /* least steps between two moves; 0: 4; TKV_OFF: none */
    /* cfg.promotion: an append promotes by itself, once in this many tokens of a layer; 0: only tkv_promote_important
     * does. It needs offload.write, for example with offload.keep_exact, and importance.sample_every. The limit
     * per_step is that of a layer. An exact block whose importance fell below half of the threshold is coded again.
     * It waits while memory is reserved or, under a budget, short. Not in place without a budget */
    int every;
} tkv_promotion_config;
/* Eviction policies: which tokens go first. Numbers in parentheses are arXiv papers. */
typedef enum tkv_evict_policy {
    TKV_EVICT_NONE = 0,  /* "none": evicts no token; selecting victims fails with TKV_ERR_BUDGET */
    TKV_EVICT_SLIDING,   /* "sliding": the oldest token that is not a sink (StreamingLLM, 2309.17453) */
    TKV_EVICT_H2O,       /* "h2o": least accumulated attention score (2306.14048) */
    TKV_EVICT_SNAPKV,    /* "snapkv": least pooled score from the prompt's last queries (2404.14469) */
    TKV_EVICT_PYRAMIDKV, /* "pyramidkv": as "snapkv", with tkv_split_evict_budget of layers (2406.02069) */
    TKV_EVICT_TOVA,      /* "tova": least attention score from the last query (2401.06104) */
    /* "knorm": key with the largest norm (2406.11430). The cache computes norms when keys are appended and keeps
     * them. With cfg.importance.sample_every or cfg.tiers.n_anchors it decodes the keys for each batch instead. */
    TKV_EVICT_KNORM,
    /* "keydiff": key most similar to the mean direction of all keys (2504.15364). Each batch decodes all keys
     * twice, because the mean changes. An append takes 1.3 ms, with "knorm" .1 ms. This was measured with 65,536
     * tokens, one KV head of 128 channels, batches of 64 and TKV_NO_SIMD. */
    TKV_EVICT_KEYDIFF,
    TKV_EVICT_SCISSORHANDS, /* "scissorhands": score most often below an even share (2305.17118) */
    TKV_EVICT_FIFO,         /* "fifo": the oldest token, even a sink */
    TKV_EVICT_RANDOM,       /* "random": by a hash of seed and index */
    TKV_EVICT_SCORES,       /* "scores": by the caller's scores (tkv_update_importance, KVzip) */
    TKV_EVICT_USER,         /* "user": by cfg.scorer */
    TKV_EVICT_COUNT
} tkv_evict_policy;
struct tkv_evict_view;
typedef struct tkv_evict_config { /* zero means default */
    tkv_evict_policy policy;
    int keep_tokens; /* tokens that a layer of a cache keeps ("pyramidkv": on average); 0: the budget decides */
    /* Tokens that the first and the last layer keep, with any policy; layers between them are on a straight line.
     * keep_tokens is then their mean, rounded up, whatever it was, and forecasts of bytes take it for each layer. Both
     * 0: the policy shares keep_tokens */
    int keep_first, keep_last;
    /* Tokens that stay: indices below sink_tokens, and the newest recent_tokens. TKV_OFF: none. 0: 4 and 32;
     * "sliding" 4 and 1; "pyramidkv" 4 and 8; "fifo" and "random" 0 and 0. The default of recent_tokens takes at
     * most half of the budget that the sinks leave (H2O's share). A small budget protects the newest token first,
     * then the sinks, then the other recent tokens. */
    int sink_tokens, recent_tokens;
    int pool; /* "snapkv", "pyramidkv": tokens per average, odd, at most 63; 0: 5 (SnapKV has 5 or 7) */
    int seed; /* "random": seed of the hash */
    /* "user": returns the score of slot i; tokens with high scores stay */
    float (*scorer)(void *user, const struct tkv_evict_view *view, int i);
    void *user;
    /* when to evict, and how many tokens; a cache applies them */
    float trigger; /* evicts above this share of the budget, above 0 and at most 1; 0: 1 (akv-cache: .9) */
    int batch;     /* tokens evicted at once; 0: 64, or an eighth of the budget if that is less */
} tkv_evict_config;

/* >>events. The cache reports events for logs and counters to cfg.host.on_event. The callback runs inside the call
 * that causes the event. It may call reports of the cache, and no other function of it. */
typedef enum tkv_event_kind {
    TKV_EVENT_LEVEL = 0, /* the cache changed from level `from` to level `to`; `bytes` are in use */
    TKV_EVENT_BUDGET,    /* an append, reservation or smaller budget was refused; it needed `bytes` in all */
    TKV_EVENT_TABLE,     /* a layer has its first or a better table of A, R or KVQUANT formats */
    TKV_EVENT_EVICT,     /* the tokens of a layer with the indices in `positions` were evicted */
    TKV_EVENT_OFFLOAD,   /* a layer's block of indices `from` to `to` - 1 and `bytes` was offloaded */
    TKV_EVENT_COUNT
} tkv_event_kind;
typedef struct tkv_event {
    tkv_event_kind kind;
    int seq, layer;       /* TKV_NO_SEQ, TKV_ALL_LAYERS: none in particular */
    int from, to;         /* see tkv_event_kind; 0 where they do not apply */
    size_t bytes;         /* see tkv_event_kind; 0 where it does not apply */
    const int *positions; /* EVICT: n indices of tokens, rising, valid during the call; else NULL */
    int n;
    const char *text; /* one sentence, valid during the call */
} tkv_event;
typedef void (*tkv_on_event)(void *user, const tkv_event *event);

/* >>offload. A store outside RAM for old blocks, such as a file (copy examples/spill_file.h); see tkv_offload.
 *
 * Layout: the cache writes each key as parts in rising order, without overlap, within tkv_get_required_bytes. It
 * reads back one whole part at a time, and never the bytes between parts.
 *
 * Calls: the functions run inside the call of the cache that needs them and must not call the cache. Several
 * threads may be in `read` and `prefetch` at once, from tkv_attend or from cfg.host.parallel_for. The cache calls
 * `write` and `erase` from one thread at a time, while neither `read` nor `prefetch` runs. `read` and `write` return
 * 0 if they moved all bytes, else another number.
 *
 * Integrity: the cache adds an XXH64 to each part and checks it after reading. It finds lost, damaged and exchanged
 * parts. It does not protect against deliberate changes of the store. */
typedef struct tkv_offload_config { /* set write and read, or neither */
    /* writes `size` bytes of `key` at `offset` */
    int (*write)(void *user, uint32_t key, size_t offset, const void *bytes, size_t size);
    /* reads `size` bytes of `key` at `offset` */
    int (*read)(void *user, uint32_t key, size_t offset, void *bytes, size_t size);
    /* NULL, or a prefetch hint: the cache will soon read `size` bytes from `offset` on, part by part */
    void (*prefetch)(void *user, uint32_t key, size_t offset, size_t size);
    /* NULL, or erases a key that is no longer needed, also after a write that failed. Called once per use of the
     * key; the cache may use the key again later */
    void (*erase)(void *user, uint32_t key);
    void *user;
    int keep_exact; /* 1: writes the exact bytes of each block when it is first compressed, for tkv_promote */
} tkv_offload_config;

/* What recomputation costs, and what it may cost (tkv_init_remat, cfg.recompute). */
typedef struct tkv_remat_config {
    /* the model; required: n_layers 1 to 4096, head_dim 1 to 576, n_heads 1 to 65536, or TKV_OFF to count no
     * attention. In cfg.recompute, 0 takes them from cfg.model */
    int n_layers, n_heads, head_dim;
    double layer_params; /* weights of a layer that a token is multiplied with, 1 to 1e15; required */
    /* the rule; zero means default */
    float threshold;       /* least pressure for any action; 0: .9; TKV_ZERO: always act */
    int min_materialized;  /* least tokens that stay; 0: 512; TKV_OFF: none */
    int sink_tokens;       /* first tokens that are never discarded; 0: 4; TKV_OFF: none */
    float age_tokens;      /* age at which a token is half as likely to be used, 1 to 1e9; 0: 4096 */
    double quantize_price; /* FLOPs per byte freed by quantizing, its loss included; 0: 8, the work alone */
    double step_flops;     /* most FLOPs of recomputation per step; 0: no limit */
} tkv_remat_config;

/* >>recompute. K and V that the caller's model can give again whenever attention reads them, such as projections of
 * inputs that it keeps, or of an encoder's output. A full budget then discards the oldest blocks of any sequence, and
 * no token is lost: attention, tkv_read and eviction by keys ask for the rows of a discarded block, and see them
 * exactly, in the hot format. About 40 bytes per block and layer stay in the index. See the manual, R10.
 *
 * Which blocks: old enough for cfg.offload, of the sequence that costs the fewest FLOPs per byte (cost). Blocks cheaper
 * than cost.quantize_price go before the next level of the ladder, all others after cfg.offload. In each sequence
 * cost.min_materialized tokens stay, and its discarded blocks cost at most cost.step_flops together.
 *
 * Calls: `compute` runs inside the call that reads, and must not call the cache. Several threads may be in it at once,
 * from tkv_attend or from cfg.host.parallel_for. It returns 0 if it gave all rows. With another number, or a row that
 * is not finite, the call fails with TKV_ERR_NO_SOURCE. */
typedef int (*tkv_compute_rows)(void *user, int seq, int layer, int head, const int *positions, int n,
                                float *k, float *v);
typedef struct tkv_recompute_config {
    /* gives K and V of n tokens (1 to 16) of a KV head of a layer, as they were appended. `positions` has their
     * indices. k is [n][head_dim], v [n][v_head_dim], or NULL if not needed, as v with v_in_k. Evicted tokens may be
     * among them.
     * NULL: no model */
    tkv_compute_rows compute;
    void *user;
    tkv_remat_config cost; /* read if `compute` is set; threshold: least share of the budget in use */
} tkv_recompute_config;

/* >>config. The options of a cache, in groups. */
typedef struct tkv_model_config { /* the model */
    int n_layers;                 /* required, 1 .. 4096 */
    int n_heads;                  /* query heads, 1 .. 65536; required, a multiple of n_kv_heads */
    int n_kv_heads;               /* heads of K and V; 0: n_heads (plain multi-head attention) */
    int head_dim;   /* channels of K and q; required, 1 .. 576. The cache pads it to a multiple of 16 */
    int v_head_dim; /* channels of V and out, 1 .. 576; 0: head_dim */
    /* 1: V is the first v_head_dim channels of K, and is not stored: latents of MLA (DeepSeek: one KV head, head_dim
     * 576, v_head_dim 512). Appends take k alone; v may be NULL. The format of K holds both: an exact one, Q8, KIVI
     * or A. */
    int v_in_k;
    int window; /* sliding window of all layers, in tokens; 0: none */
    /* 1: queries see the sinks of tiers.sink_tokens also from beyond their window (StreamingLLM, arXiv 2309.17453), and
     * named sinks (tkv_seq_set_sinks).
     * These sinks do not expire. 0: a window hides them as any token */
    int window_sinks;
    float scale; /* factor on q.k, positive; 0: 1/sqrt(head_dim) */
    tkv_rope
        rope; /* RoPE of the keys; KVQUANT formats and tkv_seq_shift need it; layers[i].rope may differ */
} tkv_model_config;

typedef struct tkv_limits_config { /* capacity */
    int max_seqs;                  /* sequences, numbered 0 .. max_seqs-1; at most 2^20; 0: 1 */
    int max_tokens; /* per sequence, 1 to 2^30 - 1; 0: grows on demand (tkv_create_in_place needs a number) */
    int max_append; /* largest number of tokens in one append, at most 2^20; 0: 512 */
    int max_states; /* positions at which a sequence keeps states, at most 65536; 0: 64 */
    /* bytes of the states of all sequences (tkv_seq_put_state), 64 and rounding for each included; 0: no limit of their
     * own; in place: no states */
    size_t state_bytes;
} tkv_limits_config;

typedef struct tkv_tiers_config { /* the plan: [sinks][archive ...][warm][hot tail], oldest to newest */
    int sink_tokens;              /* first tokens, always exact; at most 64; 0: 4; TKV_OFF: no sinks */
    int hot_tokens;  /* at least this many newest tokens stay exact; 0: 64; or TKV_OFF, TKV_UNLIMITED */
    int warm_tokens; /* length of the warm tier, behind the hot tail; 0: 448; or TKV_OFF, TKV_UNLIMITED */
    tkv_format_pair hot, warm, archive;
    /* Layers demote at different tokens, so that no step codes all of them. Layer number i, from 0, of the n layers
     * with K and V of their own, has these delays, rounded down: 64 i / n tokens more in the hot tier, and
     * (64 i + 32) / n more in the hot and warm tiers together. So some layers keep up to 63 tokens longer. No delay:
     * a length of 0 tokens or without end; n = 1; a cache that was created with a budget.
     *
     * Anchors are the n_anchors tokens of a layer with the highest attention scores, at most 1024. They stay exact
     * beside the sinks. Every layer needs sinks and must have no window. A token may become an anchor when its block
     * is compressed, unless sequences share the block. A more important token may replace it. Attention then reads
     * its coded value again. A sequence takes the exact bytes of all n_anchors with its first token, in blocks of at
     * most 32. Compressing a block reads the scores of all anchors once for each token that becomes one. */
    int n_anchors;
} tkv_tiers_config;

typedef struct tkv_format_options { /* how formats code; a format ignores the options of others */
    int group_size;                 /* values that share a scale in Q8 and KIVI formats: 64 or 32; 0: 64 */
    int allocation_unit;            /* channels that get equal bits in A formats: 4, or 16 for a GPU; 0: 4 */
    int fit;                        /* bits of tkv_fit, for Q8, KIVI and SQUAT formats */
    int rotate;                     /* bits of tkv_rotate, for INT8, INT4, FP8 and FP4 */
    int center_k;    /* 1: INT8, INT4, FP8, FP4 store K's channel means apart, in fp16 per block */
    int squat_block; /* channels that SQUAT formats code together: 16, or 64 as the authors; 0: 16 */
    int subspaces;   /* parts of a token in SUBSPACE formats: 1 to 16; 0: 4 */
    int kvquant;     /* bits of tkv_kvquant, for KVQUANT formats */
    int k_scales,
        v_scales; /* tkv_scales of each side: which values share a scale in Q8, KIVI, SQUAT and INT formats */
    int int_bits; /* bits of a code in INT8 and INT4: 2 to 8; 0: 8 and 4. 5 to 7 are read without vectors */
    int unrotated;        /* 1: SUBSPACE formats code the channels as they are, without the rotation */
    int kvquant_outliers; /* outliers of a token that KVQUANT stores apart, in thousandths: 1 to 30; 0: 10 */
} tkv_format_options;

typedef struct tkv_budget_config { /* see tkv_get_budget */
    /* limit of all memory that the cache holds, at any moment; 0: no budget. Creation refuses less than an empty cache
     * takes. The sentence also has the bytes that are enough for the first 128 tokens of one sequence, appended one at
     * a time and recoded as tightly as pressure.max_level allows. With evict.policy they are enough for 256 or more,
     * the number that the sentence has, and then for any number (limits.max_tokens, if less), except with KVQUANT
     * formats, whose tokens keep their slots. Other sequences, longer appends, and longer texts without a policy take
     * more. A refused call says what it needs at least */
    size_t bytes;
    const tkv_level *ladder; /* n_levels levels; read during creation, not kept; NULL: see tkv_get_budget */
    int n_levels;            /* 1 to TKV_MAX_LEVELS with a ladder, else 0 */
    tkv_pressure_config pressure;
    int discard; /* 1: a full budget may discard blocks of idle sequences; see tkv_seq_discard */
    /* 1: without bytes and ladder, a ladder around the plan, for tkv_adapt_plan and meter.target. Its levels have the
     * archives A40/R40, A30/R30, A25/R20 and A20/R15; the plan's own takes its place among them by bytes, and the cache
     * begins there. Tables and unused ends of pages take .4 to .9 % more bytes at 4,096 tokens. Refused in place, where
     * the plan is fixed */
    int adapt;
} tkv_budget_config;

typedef struct tkv_meter_config { /* the quality meter, see tkv_get_quality */
    int heads;                    /* KV heads that it watches, at most 64; 0: no meter. 4 is a good start */
    int tokens; /* coded tokens per watched head that it also keeps exact, at least 128; 0: 2048 */
    int every;  /* positions per measurement; 0: 32 or more, for at most 0.5 % of attention's work */
    /* least score of the meter (tkv_compute_score), .01 to .9999: appends move the level of cfg.budget.adapt, or of a
     * ladder without bytes, by the advice of a controller of the cache's own (tkv_feedback). Each score takes two
     * samples of each watched head. Hot tokens stay. Refused where it would do nothing: without levels to choose from,
     * with budget.bytes, and in place. 0: only tkv_adapt_plan does so */
    float target;
} tkv_meter_config;

typedef struct tkv_host_config { /* the program around the cache */
    tkv_allocator allocator;
    tkv_parallel_for parallel_for;
    void *parallel_user;
    tkv_on_event on_event; /* NULL: reports no events */
    void *event_user;
    tkv_isa isa; /* TKV_ISA_AUTO: the best instruction set here; another: that one, or TKV_ERR_ISA */
    tkv_nonfinite nonfinite;
    int precise; /* 1: hi and lo limbs of q and p in every format; arithmetic errs by at most 2e-3 of the output */
    /* 1: overwrites keys, values and states with zeros when their memory becomes free: recoded, cut, evicted or reset.
     * A token in a block of several sequences goes when none of them has it any more. Of a token that leaves a coded
     * block the codes stay until the block is coded again or freed, and so do evicted tokens. Learned tables, the
     * stack, offloaded bytes in the store and a GPU's memory are left. */
    int wipe_freed;
} tkv_host_config;

typedef struct tkv_config {
    uint32_t start_canary; /* leave 0: detects a config that was not filled with zeros */
    tkv_model_config model;
    tkv_limits_config limits;
    tkv_tiers_config tiers;
    tkv_format_options format;
    const tkv_layer_config *layers; /* NULL, or settings of n_layers layers; read during creation, not kept */
    tkv_budget_config budget;
    tkv_evict_config evict; /* policy 0: the cache evicts no tokens */
    tkv_importance_config importance;
    tkv_promotion_config promotion; /* every 0: appends promote nothing */
    tkv_offload_config offload;     /* store for blocks when the budget is full; zero: none */
    tkv_recompute_config recompute; /* model for blocks discarded when the budget is full; zero: none */
    tkv_meter_config meter;
    tkv_host_config host;
    uint32_t end_canary; /* leave 0 */
} tkv_config;

/* ======== 1. CORE ======== >>core
 * Most programs need no more than this part. A config describes the model and the plan; zero is the default in every
 * field. tkv_create makes an empty cache from it. For each step and layer, the program appends the keys and values of
 * the new tokens and then attends with their queries. Attention reads all tiers in one softmax, so the program does
 * not see where a token lies. A sequence is one conversation: it begins with its first append, tkv_seq_truncate cuts
 * its newest tokens, and tkv_seq_reset ends it. tkv_read decodes tokens of any tier. tkv_get_memory counts every byte
 * that the cache holds, and a budget limits them. Every function that can fail returns a tkv_status.
 *
 * Example:
 *     tkv_config cfg = tkv_default_config();
 *     cfg.model.n_layers = 4, cfg.model.n_heads = 8, cfg.model.n_kv_heads = 2, cfg.model.head_dim = 64;
 *     if (tkv_create_ex(&cfg, NULL, 0, &kv, reason, sizeof reason)) return puts(reason);
 *     for (layer = 0; layer < 4; layer++) {
 *         st = tkv_append(kv, 0, layer, k, v, n);       // [n][2][64] each, keys after RoPE
 *         if (!st) st = tkv_attend(kv, 0, layer, q, n, out);   // q and out are [n][8][64]
 *         if (st) return puts(tkv_get_status_text(st));
 *     }
 *     tkv_destroy(kv);
 */
/* Returns a config of zeros, which are the defaults. */
TKV_API tkv_config tkv_default_config(void);
/* Sets lengths and formats of the tiers to a named plan. Other fields stay. Bits per value of archived tokens,
 * metadata included (effect on models: bench/QUALITY.md):
 *   "quality" 4.06; "balanced" 3.06, the default; "compact" 2.31; "extreme" 1.81
 *   "kivi" 2.5; "squat" 2.5; "kvquant-3" 3.5: other designs, for comparison
 *   "by-context": "kivi" below 2,048 max_tokens, "squat" below 8,192, else "kvquant-3". Set max_tokens first.
 *   "by-length": as "by-context", by the length of the longest sequence while it grows (tkv_level.from_tokens). Its
 *      last level has the most bits, so quality cannot choose among its levels (meter.target)
 *   "growing": "quality" below 2,048 tokens of the longest sequence, "balanced" below 8,192, else "compact"
 * The last two set cfg.budget.ladder. They need a cache without a budget, not in place. A later preset removes it.
 * TKV_NO_METER leaves them out.
 * KVQUANT keys ("kvquant-3", "by-context", "by-length", "adr", "extreme_context") need cfg.model.rope, or
 * TKV_KVQUANT_POST_ROPE in cfg.format.kvquant; else tkv_validate_config fails.
 * tkv_get_name with TKV_NAME_PRESET lists all names. A config as text names them in the sentence of the error.
 * Errors: TKV_ERR_ARG (unknown name or NULL), nothing changed. */
TKV_API tkv_status tkv_apply_preset(tkv_config *cfg, const char *name);
/* More presets for tkv_apply_preset, named as in other designs. Hot tokens, warm tokens and bits are those of the
 * designs. Keys are coded as in the papers of KIVI and SQuat. No other field of the designs is mapped.
 * Each row gives hot + warm tokens, the warm format, the archive formats, and remarks:
 *   adr               64 + 448, KIVI4, then as "by-context", cfg.model.rope included (RuvLLM's ADR-004; its quality
 *                     target is not mapped)
 *   small             32 + 224, KIVI4, KIVI2
 *   long_context      64 + 960, KIVI4, KIVI2
 *   large_context     128 + 896, KIVI4, SQUAT2 and KIVI2 (its four subspaces and rematerialization are not mapped)
 *   extreme_context   256 + 1792, KIVI4, KVQUANT3 (set cfg.model.rope; rematerialization is not mapped)
 *   memory_optimized  32 + 224, KIVI4, KIVI2 (the lengths are fixed, as in the original)
 *   akv               1024 + 2048, KIVI4, KIVI2 (akv-cache; importance, promotion and host memory are not mapped)
 *   akv_quality       2048 + 2048, KIVI4, KIVI2 (named so because "quality" is a preset of this library)
 *   aggressive        512 + 4096, KIVI2, KIVI2 (tkv_pressure_profile has a profile of this name)
 *   k4v4 k3v3 k2v2    256, 128, 64 exact, then 4, 3, 2 bits (akv's AKVCache: quality, balanced, compact; Hadamard
 *                     rotation and protected layers are not mapped)
 *   k4v3 k4v2         128 exact, then keys in 4 bits and values in 3 or 2 bits (also AKVCache) */
/* Checks every field of a config. On an error `reason` gets one sentence, cut to `size` bytes. It names the field,
 * its value and the values that are allowed; 512 bytes hold the longest. `reason` may be NULL.
 * Errors:
 *   TKV_ERR_CONFIG        a field is wrong
 *   TKV_ERR_BUDGET        cfg.budget.bytes is less than an empty cache takes
 *   TKV_ERR_UNSUPPORTED   a field needs what a TKV_NO_ switch leaves out of this build
 *   TKV_ERR_ARG           cfg is NULL */
TKV_API tkv_status tkv_validate_config(const tkv_config *cfg, char *reason, size_t size);

/* >>life. Creates an empty cache. The cache fetches memory for tokens later, page by page, as they are appended. On
 * an error *out does not change. Errors: as tkv_create_ex. Cost: one allocation per growing part, no work per
 * token. */
TKV_API tkv_status tkv_create(const tkv_config *cfg, tkv_cache **out);
/* Creates an empty cache, as tkv_create, and names the cause of an error.
 *   cfg      NULL: all defaults, for a text that sets what is needed
 *   text     NULL, or a config as text of `text_size` bytes (see tkv_parse_config); its keys override cfg
 *   reason   (may be NULL) receives a sentence about an error, cut to `size` bytes; "" after success. If a line of
 *            the text is wrong, the sentence begins with its number
 * Errors, *out unchanged:
 *   TKV_ERR_CONFIG        tkv_validate_config rejects the config
 *   TKV_ERR_ISA           cfg.host.isa is not available
 *   TKV_ERR_BUDGET        cfg.budget.bytes is less than an empty cache takes
 *   TKV_ERR_NOMEM         the allocator returned NULL, or the size exceeds this machine's address space
 *   TKV_ERR_UNSUPPORTED   a text, in a build with TKV_NO_REPORTS; or as tkv_validate_config
 *   TKV_ERR_ARG           out is missing, or both cfg and text are
 * Cost: tkv_create; with a text also O(text_size), five times. */
TKV_API tkv_status tkv_create_ex(const tkv_config *cfg, const char *text, size_t text_size, tkv_cache **out,
                                 char *reason, size_t size);
/* Computes the bytes that the caller must provide. A NULL result is not computed; one of both must be asked for.
 *   in_place   bytes that tkv_create_in_place needs for every sequence at max_tokens. Each 64 tokens of max_append
 *              take one more exact block in every layer and sequence. Blocks that TKV_FLUSH_ALL or a cut left
 *              short are not included: appends may then return TKV_ERR_CAPACITY
 *   offload    the most bytes stored under one key of cfg.offload, for a store with slots of one size
 * Errors:
 *   TKV_ERR_CONFIG   cfg is invalid, or the size exceeds this machine's address space; in_place: max_tokens is 0
 *   TKV_ERR_BUDGET   in_place: cfg.budget.bytes has no room for the index of max_tokens and for pages
 *   TKV_ERR_ARG      both results are NULL */
TKV_API tkv_status tkv_get_required_bytes(const tkv_config *cfg, size_t *in_place, size_t *offload);
/* Creates a cache inside the caller's memory, and allocates nothing. It ignores cfg.host.allocator. `mem` may have
 * any alignment. It must outlive the cache; tkv_destroy does not free it.
 *   reason, size   (may be NULL, 0) receives a sentence about an error, "" after a success
 * Errors: those of tkv_get_required_bytes, and
 *   TKV_ERR_CAPACITY   `bytes` is less than tkv_get_required_bytes; the sentence says what max_append costs of them
 *   TKV_ERR_ISA        cfg.host.isa is not available
 *   TKV_ERR_ARG        mem or out is missing */
TKV_API tkv_status tkv_create_in_place(const tkv_config *cfg, void *mem, size_t bytes, tkv_cache **out,
                                       char *reason, size_t size);
/* Frees the cache and gives all memory back to the allocator. kv may be NULL. */
TKV_API void tkv_destroy(tkv_cache *kv);

/* >>append. Appends n tokens to one layer. k is float [n][n_kv_heads][head_dim], after RoPE. v is float
 * [n][n_kv_heads][v_head_dim]. It first demotes older blocks that are due. The new tokens get the hot format and
 * stay exact until the next append. F16 saturates at +-65504.
 * Errors:
 *   TKV_ERR_CAPACITY    n exceeds max_append, max_tokens, or the memory in place
 *   TKV_ERR_BUDGET      the budget is full (see tkv_get_budget)
 *   TKV_ERR_NOMEM       the allocator returned NULL
 *   TKV_ERR_NONFINITE   NaN or infinity (see cfg.host.nonfinite)
 *   TKV_ERR_RANGE       a token would get a position of 2^30 or more
 *   TKV_ERR_ARG         bad argument
 * Cost: O(n), plus one encoding per 64 tokens. */
TKV_API tkv_status tkv_append(tkv_cache *kv, int seq, int layer, const float *k, const float *v, int n);
/* One entry of a ragged batch: n tokens (or queries) of sequence seq. */
typedef struct tkv_rows {
    int seq, n;
} tkv_rows;
/* Strides count elements; 0 means packed. In k and v the tokens of all entries follow one another. */
typedef struct tkv_append_params {
    int layer;
    int seq, n;            /* one sequence ... */
    const tkv_rows *batch; /* ... or several (then seq and n are ignored), each at most once */
    int n_batch;           /* entries, at most max_seqs */
    const void *k, *v;
    tkv_type k_type, v_type;
    ptrdiff_t k_token_stride, k_head_stride, v_token_stride, v_head_stride; /* may be negative */
    /* NULL, or the position of the first new token: one for seq, or one per entry of the batch. It must follow the
     * position of the last token: the length of the layer (tkv_get_length) if no token has moved. Attention sees all
     * earlier tokens: call tkv_seq_reset before a new text. */
    const int *positions;
    /* NULL, or the position of each new token, in the order of the batch: 0 to 2^30 - 1. They may repeat and jump.
     * NULL: each follows the one before, up to 2^30 - 1. A jump takes an entry of 72 bytes. Reservations of the
     * sequences end. */
    const int *token_positions;
    /* NULL, or the row of k and v of the first token of each entry, 0 or more, for batches with padding. NULL: the
     * entries follow one another. */
    const int *first_rows;
} tkv_append_params;
/* Appends tokens of one or several sequences to one layer, all of them or none.
 * Errors: as tkv_append, and
 *   TKV_ERR_RANGE   one of `positions` does not follow the last token, even if n is 0; tkv_get_last_error names both
 *                   numbers. Or one of token_positions is out of range, or near positions that have expired
 *   TKV_ERR_UNSUPPORTED   token_positions jump, and there are anchors
 *   TKV_ERR_ARG     a sequence is in the batch twice, a pointer is missing, or the layer has no K and V of its own
 * Cost: as tkv_append, plus O(n_batch^2) to find duplicates. */
TKV_API tkv_status tkv_append_ex(tkv_cache *kv, const tkv_append_params *p);
/* An append by threads of an engine, as in >>parts: each calls tkv_append_part once, with the same parameters and its
 * own number. The parts share the encoding of blocks that are demoted; the last one to end appends. Chapter 13 of the
 * manual says what is shared.
 *
 * Reports the bytes of the workspace for the next append: at most 128 encoded blocks, 4 KB for each channel of a
 * padded key and value, and 128. Ask before each append.
 * Errors:
 *   TKV_ERR_ARG   a pointer is missing, or the layer, a sequence or a number is wrong */
TKV_API tkv_status tkv_get_append_bytes(const tkv_cache *kv, const tkv_append_params *p, size_t *bytes);
/* Runs one part of an append. The cache ends as after tkv_append_ex, with the same bits.
 *   part, n_parts, workspace   as in tkv_attend_part
 * From the first part to the end of the last one, no other call may use the cache, not even tkv_attend.
 * Errors: those of tkv_append_ex come from the last part to end. And from every part, with nothing changed:
 *   TKV_ERR_CAPACITY   bytes is less than tkv_get_append_bytes
 *   TKV_ERR_ARG        kv or workspace is missing, or part or n_parts is out of range
 * Cost: as tkv_append_ex; 16 parts at most encode; no allocation before the last part. */
TKV_API tkv_status tkv_append_part(tkv_cache *kv, const tkv_append_params *p, int part, int n_parts,
                                   void *workspace, size_t bytes);

/* >>attend. Computes causal attention of the last n tokens of a sequence over all tiers. Append these tokens first.
 * q is float [n][n_heads][head_dim], out is float [n][n_heads][v_head_dim]. Query head h reads KV head
 * h / (n_heads / n_kv_heads). It only reads the cache: any number of threads may call it while no thread writes.
 * |values| above 1.1e35 / keys, in F32 and BF16, can give infinities (chapter 12 of the manual).
 * Errors: as tkv_attend_ex.
 * Cost: as tkv_attend_ex; no allocation; 128 KiB of stack or more (chapter 13 of the manual has a table). */
TKV_API tkv_status tkv_attend(tkv_cache *kv, int seq, int layer, const float *q, int n, float *out);
/* The logit of query i (row), key j (index) and head h results from these steps, in this order:
 *   s = scale * q.k
 *   s = softcap * tanh(s / softcap)   with a softcap
 *   s = s + alibi_slopes[h] * (pos(j) - pos(i))   with ALiBi
 *   s = s + mask[i][j]                with a mask
 * A row that sees no key gets zeros, and -inf as its log-sum-exp. A row whose query is not finite, or whose largest
 * logit is +inf, sees no key and no learned sink. A logit that is NaN or -inf by overflow is hidden or empties the
 * row, by instruction set. Keys with a mask of 1e30 or more tie: each gets an attention score of 1. The library
 * recognises NaN and infinities by their bits, so -ffast-math does not matter. */
typedef struct tkv_attend_params {
    int layer;
    int seq, n;            /* one sequence ... */
    const tkv_rows *batch; /* ... or several (then seq and n are ignored); a sequence may be in it twice */
    int n_batch;           /* entries, at most max_seqs */
    const int *first_rows; /* NULL, or the row of q, out, masks and lse of the first query of each entry */
    /* NULL, or the index of the token of the first query: one for seq, or one per entry of the batch. The next queries
     * are those of the next tokens, and each sees the keys up to its own. So tokens of any age are scored again, or the
     * rows of a chunk in several calls. NULL: the queries are those of the last n tokens. */
    const int *first_queries;
    int first_kv_head; /* only these KV heads and their query heads are computed; the others' outputs stay. */
    /* 0: all from the first one on. q, out and lse have all heads, as ever; scores are sums over these heads alone.
     * With 16 rows or more, bits may differ from those of a call with all heads */
    int n_kv_heads;
    const void *q; /* rows: the queries of all entries, one after the other */
    tkv_type q_type;
    ptrdiff_t q_row_stride, q_head_stride; /* in elements, may be negative; 0: packed */
    void *out;
    tkv_type out_type;
    ptrdiff_t out_row_stride, out_head_stride; /* in elements, may be negative; 0: packed */
    float scale;                               /* factor on q.k; 0: the cache's */
    int non_causal;                            /* 1: every query sees every key (cross-attention, encoders) */
    /* NULL, or for each row the number of tokens, by index, that it sees: more than its own index. So tokens of an
     * image see all of it in a causal chunk. NULL: a row sees the tokens up to its own. */
    const int *row_ends;
    /* NULL, or for each row the position of its query, 0 to 2^30 - 1, for one context in several sequences, caches or
     * processes: this sequence need not have these tokens. A row sees the keys at its position and before; the window
     * and ALiBi count from there (a float holds such distances to 2^24). Any number of queries, even if there are no
     * tokens. Join the results by tkv_merge_attention. Attention scores are shares of this sequence's keys alone. Not
     * with first_queries or row_ends. */
    const int *query_positions;
    int window;    /* a query sees this many newest keys; 0: the layer's window; TKV_OFF: no window */
    float softcap; /* 0: no soft cap */
    const float *alibi_slopes; /* NULL, or one finite slope per query head */
    /* NULL, or one learned logit per query head. It joins the softmax without a value. A head whose logit is not
     * finite has none. */
    const float *sink_logits;
    /* NULL, or numbers added to the logits: mask[row * mask_stride + j] for the key with index j. NaN, and any number
     * at or below -1e30, hide the key. Numbers above 1e30 count as 1e30. Stride 0: the longest sequence's length. */
    const void *mask;
    tkv_type mask_type;
    ptrdiff_t mask_stride; /* in elements */
    /* 0, or elements from one query head's mask to the next: relative biases of T5 */
    ptrdiff_t mask_head_stride;
    /* NULL, or the column of the mask for each key, by index, in the place of the index itself: for engines whose masks
     * have a column for each cell of their cache. From 0 to mask_stride - 1. Each entry of the batch has an array of
     * mask_cells_stride numbers; 0: the longest sequence's length. */
    const int *mask_cells;
    ptrdiff_t mask_cells_stride;
    /* NULL, or bits for a draft tree. They cover the last n_mask_bits tokens of the sequence, at most max_tokens.
     * Bit j % 64 of mask_bits[row * mask_bits_stride + j / 64] stands for the j-th token of them. The row sees the
     * token if the bit is set. It sees all older tokens. Stride 0: the words that n_mask_bits needs. */
    const uint64_t *mask_bits;
    ptrdiff_t mask_bits_stride;
    int n_mask_bits;
    /* NULL, or output: log-sum-exp [row][n_heads], learned sinks included */
    float *lse;
    /* NULL, or output (needs lse): the attention score of each key, by index, summed over rows and heads. Each entry
     * of the batch has an array of score_stride floats. score_stride is at least the longest length; 0: that length.
     * This costs a second pass over the keys, and the last bits of out and lse can be others than without it. */
    float *scores;
    ptrdiff_t score_stride;
} tkv_attend_params;
/* Computes attention of one or several sequences in one layer.
 * Errors (TKV_ERR_IO and TKV_ERR_DATA leave out undefined, the others leave it unchanged):
 *   TKV_ERR_ARG         a pointer is missing or a number is out of range
 *   TKV_ERR_RANGE       more queries than tokens from the first one on; or an old query or a wide window reaches
 *                       expired tokens
 *   TKV_ERR_NO_SOURCE   a query sees discarded tokens (tkv_seq_discard), or cfg.recompute failed
 *   TKV_ERR_IO          reading an offloaded block failed (tkv_offload)
 *   TKV_ERR_DATA        an offloaded block is damaged
 * Cost: O(rows * n_heads * keys seen); a block's bytes about once per 8 rows of a KV head, less often in a prefill.
 * Source: arXiv 2307.08691, section 3 (online softmax, split over keys); kernels/scalar.h (scales folded into
 * queries and weights, integer products). */
TKV_API tkv_status tkv_attend_ex(tkv_cache *kv, const tkv_attend_params *p);
/* Says whether tkv_attend_ex would take these parameters now, and if not, why. Several threads may call it, and
 * each gets its own sentence.
 *   reason   [size] or NULL: the sentence, cut to size; "" if the call is valid. With TKV_NO_REPORTS the text of the
 *            status
 * Errors: as tkv_attend_ex, those that only reading a block would find excepted. Cost: as a call without rows. */
TKV_API tkv_status tkv_validate_attend(const tkv_cache *kv, const tkv_attend_params *p, char *reason,
                                       size_t size);

/* >>parts. Attention by threads of an engine, without cfg.host.parallel_for: each thread, or each job of a queue, calls
 * tkv_attend_part once, with the same parameters and its own number. Parts may run in any order, at the same time or
 * one after the other. The last one to end merges in the order of blocks. So out, lse and scores are those of
 * tkv_attend_ex, with the same bits for any number of parts. They are complete when all parts have returned.
 *
 * tkv_get_attend_bytes reports the bytes of the workspace for such a call. They grow with the number of tokens, so ask
 * again after appends, or take TKV_MAX_ATTEND_BYTES. Errors: as tkv_attend_ex. */
TKV_API tkv_status tkv_get_attend_bytes(const tkv_cache *kv, const tkv_attend_params *p, size_t *bytes);
/* Computes one part of a call.
 *   part, n_parts   0 .. n_parts - 1; n_parts is 1 to 65536, and need not be the number of threads
 *   workspace       [bytes] of any alignment, shared by the parts of this call alone; its first 128 bytes must be 0
 *                   before the first part, and they are 0 again after the last one
 * Errors: as tkv_attend_ex. Those of the parameters come from every part, and nothing is computed: clear the workspace
 * then. TKV_ERR_IO, TKV_ERR_DATA and a late TKV_ERR_NO_SOURCE come from the last part to end. And:
 *   TKV_ERR_CAPACITY   bytes is less than tkv_get_attend_bytes
 * Cost: as tkv_attend_ex, over n_parts. More than 128 parts, or than work tiles of 8 query rows, give no more speed.
 * The last part to end makes the second passes alone: that of `scores` takes as long as a call with one thread, that
 * of sampled attention scores (cfg.importance) less. Each part checks all of `mask_cells`.
 * Without gcc's atomics (MSVC), parts must not run at the same time. */
TKV_API tkv_status tkv_attend_part(tkv_cache *kv, const tkv_attend_params *p, int part, int n_parts,
                                   void *workspace, size_t bytes);

/* >>read. Decodes K and V of tokens start .. start+n-1 from any tier. k is [n][n_kv_heads][head_dim], v is
 * [n][n_kv_heads][v_head_dim]; either may be NULL. It only reads the cache. Keys of tokens that have moved
 * (tkv_seq_shift, tkv_seq_copy, tkv_seq_slide and others) come rotated to their present position, as if they had been
 * appended there. To append such a row elsewhere, rotate it by the difference (tkv_rotate_rope).
 * Errors (TKV_ERR_IO and TKV_ERR_DATA leave k and v undefined, the others leave them unchanged):
 *   TKV_ERR_RANGE       a token is evicted, expired or not yet appended
 *   TKV_ERR_NO_SOURCE   a token is discarded: recompute it; or cfg.recompute failed
 *   TKV_ERR_ARG         bad sequence or number, or a layer without a cache
 *   TKV_ERR_IO          reading an offloaded block failed (tkv_offload)
 *   TKV_ERR_DATA        an offloaded block is damaged
 * Cost: O(blocks + values). */
TKV_API tkv_status tkv_read(tkv_cache *kv, int seq, int layer, int start, int n, float *k, float *v);
/* Reads tokens by a list of their indices, in any order; an index may stand there twice. Rows of k and v follow the
 * list. Errors, cost and the rest: tkv_read; a negative index is TKV_ERR_ARG. Indices that rise by one are read in one
 * piece, so a sorted list is the fastest.
 *   indices   [n]; may be NULL if n is 0 */
TKV_API tkv_status tkv_read_tokens(tkv_cache *kv, int seq, int layer, const int *indices, int n, float *k,
                                   float *v);
/* Returns the length in tokens of one layer of a sequence, or with TKV_ALL_LAYERS that of the shortest layer. Lengths
 * count evicted, expired and discarded tokens too. Returns 0 for a bad seq, or a layer without a cache. */
TKV_API int tkv_get_length(const tkv_cache *kv, int seq, int layer);
/* Keeps the first n_tokens of every layer; shorter layers do not change. Any token can be removed: exact, compressed,
 * offloaded, discarded or evicted. No token that stays is coded again. Inside a compressed block the block keeps its
 * bytes, and the next token begins a new one. Tokens that were compressed, evicted or merged before stay so. Memory
 * comes back as in tkv_seq_reset. With host.wipe_freed, tokens removed from a compressed block stay in its bytes until
 * it is freed or coded again.
 * Errors, nothing changed:
 *   TKV_ERR_RANGE     a window expired tokens that the last kept token sees; tkv_get_last_error names the least
 *                     n_tokens. 0 is always possible.
 *   TKV_ERR_STATE     a step is open
 *   TKV_ERR_ARG       no such sequence, or n_tokens is negative
 * States that have seen more than n_tokens go. In a hybrid model, ask tkv_seq_find_state first where it can be cut. */
TKV_API tkv_status tkv_seq_truncate(tkv_cache *kv, int seq, int n_tokens);
/* Makes sequence dst a copy of the first n_tokens of src, or of all with TKV_UNLIMITED. Both share the bytes: no token
 * is coded, and only anchors are copied. Each then appends, truncates, pins and evicts for itself, and neither sees
 * the other's new tokens. The first that appends goes on in the last block, if that is exact and not full. The others
 * get a copy of it when they append, or begin a new block if it has 48 tokens or more; in place they always get a
 * copy. Scores, pins, named sinks and evictions go along, and the states of at most n_tokens: tkv_seq_find_state of
 * dst then says where all layers have one. What dst held before is released, as by tkv_seq_reset. The meter keeps
 * watching src.
 *
 * A shared block counts once in tkv_get_memory and in the budget, in the hottest tier that one of its sequences has it
 * in. It is coded again when the last of them has it in a colder tier. While it is shared it stays in RAM. A budget
 * evicts its tokens last if it is short of pages, since that frees none. A reservation of src ends.
 * Errors, nothing changed (with a budget, blocks may be coded again):
 *   TKV_ERR_RANGE      a window expired tokens that the last one of n_tokens sees, as in tkv_seq_truncate
 *   TKV_ERR_STATE      a step of src or dst is open
 *   TKV_ERR_ARG        no such sequence, src is dst, or n_tokens is negative
 *   TKV_ERR_NOMEM, TKV_ERR_BUDGET, TKV_ERR_CAPACITY   no memory for dst's entries: 72 bytes a block and layer, with
 *                      eviction, importance or anchors 432 bytes more; for its anchors; or for the list of
 *                      its states
 * Cost: O(blocks of n_tokens), in all layers; and a copy of the anchors. */
TKV_API tkv_status tkv_seq_fork(tkv_cache *kv, int src, int dst, int n_tokens);
/* Beams, and rows of a batch: sequence first + i goes on from what sequence first + sources[i] had, for each i below n,
 * all at once. Sequences may change places, several may go on from one, and those that are no source are released. A
 * sequence that goes on from one that no other needs takes it over, at no cost; the others are forks, as by
 * tkv_seq_fork. Scores, pins, named sinks, evictions and states go along. Reservations of all n end. The meter watches
 * the same tokens as before, if any sequence takes them over. The cache asks cfg.recompute by the new number.
 *   sources   [n] 0 to n - 1: the beam_idx of PyTorch's beam search
 * Errors, nothing changed (with a budget, blocks may be coded again):
 *   TKV_ERR_STATE      a step of one of them is open
 *   TKV_ERR_ARG        no such sequence, or n or a source is out of range
 *   TKV_ERR_NOMEM, TKV_ERR_BUDGET, TKV_ERR_CAPACITY   no memory for the forks, as in tkv_seq_fork
 * Cost: O(blocks) of the forks, in all layers, for each of them; no block is copied, except those of anchors. */
TKV_API tkv_status tkv_seq_reorder(tkv_cache *kv, int first, const int *sources, int n);
/* Removes the tokens with positions first .. end - 1, in all layers; end TKV_UNLIMITED: all from `first` on. Other
 * tokens keep their index and position. Tokens at the end are truncated, as by tkv_seq_truncate: then the length is
 * less, and the next token follows the last one that stays. Other removed tokens answer TKV_TOKEN_GONE and count as
 * evicted in tkv_get_layer. It needs no cfg.evict. A fork keeps its tokens. Bytes go back when a block has no token
 * left. States that have seen a removed token go. A reservation ends. If no token has a position in the range, nothing
 * changes: the length stays, even if the last indices have no token any more.
 * Errors, nothing changed:
 *   TKV_ERR_RANGE     it truncates, and a window has expired tokens that the last one sees
 *   TKV_ERR_STATE     a step is open
 *   TKV_ERR_ARG       no such sequence, first is negative, or end is less than first
 * Cost: O(tokens of the range), in all layers. */
TKV_API tkv_status tkv_seq_remove(tkv_cache *kv, int seq, int first, int end);
/* Moves the tokens with positions first .. end - 1 by delta positions, in all layers; end TKV_UNLIMITED: all from
 * `first` on. No key is touched: attention turns the query instead (RoPE, arXiv 2104.09864, section 3.4.3), in any
 * format, so a thousand moves lose nothing. Indices stay. The next appended token follows the position of the last
 * one, also if that is gone: its key has RoPE for that position. cfg.model.rope must be the model's (or layers[i].rope,
 * where layers differ). States stay, because a recurrence knows the order of tokens and not their positions; a state
 * with rotated keys must be put again. A reservation ends.
 * Errors, nothing changed (with a budget, blocks may be coded again):
 *   TKV_ERR_UNSUPPORTED   the RoPE of a layer is not set or not TKV_ROPE_FIXED, or there are anchors
 *   TKV_ERR_RANGE         a token would get a position that is negative or 2^30 or more; or the next token would see
 *                         expired tokens
 *   TKV_ERR_NO_SOURCE     a token is discarded
 *   TKV_ERR_STATE         a step is open
 *   TKV_ERR_ARG           no such sequence, first is negative, or end is less than first
 *   TKV_ERR_NOMEM, TKV_ERR_BUDGET, TKV_ERR_CAPACITY   no memory for new entries: two a layer if positions ascend
 * Cost: O(blocks), in all layers. Attention turns its queries once for each run of blocks that moved alike. */
TKV_API tkv_status tkv_seq_shift(tkv_cache *kv, int seq, int first, int end, int delta);
/* Appends the tokens of src with positions first .. end - 1 to dst, in all layers; end TKV_UNLIMITED: all from `first`
 * on. Both share the bytes: no token is copied or coded, a compressed one stays compressed. `at` is the position that a
 * token at `first` gets; others keep their distance to it (cfg.model.rope must be set unless at is `first`). Indices
 * follow those of dst. A token has the same one in all layers, also where some layers of src have lost others: tokens
 * of the range that are gone take indices, too, and count for max_tokens. So a document that was read once joins
 * several prompts, or one token several sequences. Its keys and values are those of the text that it was read in. Named
 * sinks go along, pins and states stay behind. Reservations of src and dst end. The first tokens of an empty dst are
 * sinks only if they are sinks of src: a copy that begins later has none, unless tkv_seq_set_sinks names some.
 * Errors, nothing changed (with a budget, blocks may be coded again):
 *   TKV_ERR_UNSUPPORTED   at is not `first` and the RoPE of a layer is not set or not TKV_ROPE_FIXED; or there are
 *                         anchors
 *   TKV_ERR_RANGE         a token would get a position that is negative or 2^30 or more; or tokens of the range, or of
 *                         dst, have expired
 *   TKV_ERR_NO_SOURCE     a token is discarded
 *   TKV_ERR_CAPACITY      dst would exceed max_tokens
 *   TKV_ERR_STATE         a step of src or dst is open
 *   TKV_ERR_ARG           no such sequence, src is dst, a number is negative, or end is less than first
 *   TKV_ERR_NOMEM, TKV_ERR_BUDGET, TKV_ERR_CAPACITY   no memory for dst's entries
 * Cost: O(blocks), in all layers. */
TKV_API tkv_status tkv_seq_copy(tkv_cache *kv, int src, int first, int end, int dst, int at);
/* Of the tokens with indices from `first` on, keeps those in `indices` and removes the others, in all layers: the path
 * of a draft tree that the model accepted. The kept ones get the indices first, first + 1, ..., and keep their
 * positions. All tokens from `first` on must still be exact and this sequence's alone, as those of the last append
 * are: their rows are copied. So nothing is left of the others, as if they had never been appended. States behind
 * `first` are dropped. A reservation ends.
 *   indices   [n] rising, first or more; n 0: as tkv_seq_truncate
 * Errors, no token changed (but a full budget may first code tokens, and evict those of other sequences):
 *   TKV_ERR_STATE   a token from `first` on is compressed or expired, or an eviction merged its block or freed the one
 *                   behind it; or a fork shares it; or a step is open
 *   TKV_ERR_RANGE   there is no token with one of the indices; or a window expired tokens that the last kept one
 *                   sees
 *   TKV_ERR_UNSUPPORTED   there are anchors, and the indices are not first, first + 1, ...
 *   TKV_ERR_ARG     no such sequence, a number is negative, or indices do not rise
 *   TKV_ERR_NOMEM, TKV_ERR_BUDGET, TKV_ERR_CAPACITY   no memory for entries
 * Cost: O(n) rows, in all layers. */
TKV_API tkv_status tkv_seq_keep(tkv_cache *kv, int seq, int first, const int *indices, int n);
/* Makes room for n more tokens in a sequence without end. If it would hold more than max_tokens (with policy "sliding"
 * cfg.evict.keep_tokens, if given), the oldest tokens behind the sinks go, a multiple of 64 of them, named sinks too.
 * All later ones move up: their indices and positions fall by that number, in all layers and formats, and no key is
 * touched. So only tokens that are held count against max_tokens. Call it before each step: the new tokens then have
 * the positions from tkv_get_length on, and the model rotates their keys for these. cfg.model.rope must be set. A
 * reservation ends. States behind the sinks are dropped, because their numbers of tokens have changed. Queries may come
 * near tokens that had expired, if these are among those that go: they do not see them, and sinks that expired with
 * them count as evicted.
 *   n           0 to max_append
 *   n_removed   (may be NULL) receives the number of tokens that went: those with indices from the sinks on
 * Errors, nothing changed:
 *   TKV_ERR_UNSUPPORTED   the RoPE of a layer is not set or not TKV_ROPE_FIXED, or there are anchors
 *   TKV_ERR_RANGE         a token would get a negative position, after a shift
 *   TKV_ERR_NO_SOURCE     a token that stays is discarded
 *   TKV_ERR_CAPACITY      max_tokens, or keep_tokens, is too small: no token of a layer would stay behind the sinks
 *   TKV_ERR_STATE         a step is open
 *   TKV_ERR_ARG           no such sequence, or n
 *   TKV_ERR_NOMEM, TKV_ERR_BUDGET, TKV_ERR_CAPACITY   no memory for an entry, where a layer has fewer sinks than others
 *                         and a block in front was merged after an eviction
 * Cost: O(blocks), in all layers, once in 64 tokens.
 * Source: StreamingLLM, arXiv 2309.17453, section 3.2. */
TKV_API tkv_status tkv_seq_slide(tkv_cache *kv, int seq, int n, int *n_removed);
/* positions[i]: the position of the token with index start + i. A token that is gone has the position that follows from
 * a neighbour's. After moves of the neighbour it can be negative, or 2^30 or more. An append behind it begins at 0 or
 * later.
 * Errors: TKV_ERR_ARG (seq, layer or pointer), TKV_ERR_RANGE (not tokens of the layer). */
TKV_API tkv_status tkv_get_positions(const tkv_cache *kv, int seq, int layer, int start, int n,
                                     int *positions);
/* >>states. What a layer without keys knows after the first n_tokens of a sequence, by index: opaque bytes of the
 * caller's (chapter 5). Copies them, in the place of a state of the same layer and n_tokens. From its first state on, a
 * layer is stateful in all sequences; no_cache layers may be.
 *   n_tokens   1 to max_tokens; may be ahead of the length, as a stateful layer can run before the others
 * The newest state of each layer and the newest position that all have stay. Others are thinned out, log-spaced: to
 * limits.max_states positions, and by a full budget before it evicts a token. A put evicts none: without room it takes
 * the place of the layer's newest older state of equal bytes, or is refused.
 * Errors, no token and no needed state changed:
 *   TKV_ERR_BUDGET     the budget has no room beside tokens and newest states
 *   TKV_ERR_CAPACITY   no room in limits.state_bytes, or in place it is 0; n_tokens is more than max_tokens; or in
 *                      place the layers of a sequence have states at too many different positions
 *   TKV_ERR_NOMEM      the allocator returned NULL
 *   TKV_ERR_ARG        no such sequence or layer, n_tokens is below 1, or bytes or size is 0
 * Cost: a copy, and O(states of the sequence). */
TKV_API tkv_status tkv_seq_put_state(tkv_cache *kv, int seq, int layer, int n_tokens, const void *bytes,
                                     size_t size);
/* Copies the state of a layer after n_tokens.
 *   buf      [size] bytes; NULL only counts
 *   needed   (may be NULL) receives the bytes of the state
 * Errors: TKV_ERR_RANGE (there is no such state), TKV_ERR_CAPACITY (size is too small), TKV_ERR_ARG. */
TKV_API tkv_status tkv_seq_get_state(const tkv_cache *kv, int seq, int layer, int n_tokens, void *buf,
                                     size_t size, size_t *needed);
/* Returns the newest position at or before n_tokens (TKV_UNLIMITED: of all) at which every stateful layer has a state.
 * 0: there is none, or an argument is wrong; a model starts from nothing there. If no layer of the cache is stateful,
 * every position will do: the answer is n_tokens, at most the length. Cost: O(states of the sequence). */
TKV_API int tkv_seq_find_state(const tkv_cache *kv, int seq, int n_tokens);
/* Lists the positions at which a layer has a state, or with TKV_ALL_LAYERS every stateful layer, ascending.
 *   n_tokens   [capacity] receives the first positions
 *   n          receives the number of all positions
 * Errors: TKV_ERR_ARG. Cost: O(states of the sequence). */
TKV_API tkv_status tkv_seq_list_states(const tkv_cache *kv, int seq, int layer, int *n_tokens, int capacity,
                                       int *n);

/* >>save and load. A saved sequence is its blocks as they lie, with the tables that they need, masks, positions, pins,
 * states, and token numbers of the caller's. Each section and each block has an XXH64, and so has the index at the end.
 * The same bytes load on any machine. Attention over a loaded sequence gives the same bits. What is appended later is
 * coded with the tables of this cache: the same bits with frozen tables. A layer that has no table yet learns from
 * loaded tokens too. A checksum finds accidents. It does not stop an attacker: authenticate files that others could
 * write. A save holds no key, value, score or index of a token that has gone, comes behind `length`, or belongs to
 * another sequence: its slot is zero. Scales and means that a block or a table had learned from it before may remain,
 * and a journal keeps what earlier saves wrote (SECURITY.md, "What a saved file tells").
 *
 * TKV_ALL_SEQS saves the whole cache: all sequences, with blocks that they share once, scores, reservations, statistics
 * in progress, the budget's controller, the meter, live settings. It is loaded into a new cache of the same config,
 * also in place at another address. Whatever is done then gives the same bits as in the saved cache, on machines with
 * the same instruction set and size of pointers. Offloaded blocks come back into RAM, which must have room for them
 * unless they stay attached; exact copies in a store are not saved. Discarded blocks cannot be saved. With a store,
 * with `attach` and with recomputation, later tables and levels can be others. A load asks for the memory of saved
 * reservations too: a budget and limits.max_tokens bound it.
 *
 * Example:
 *     tkv_save_params save = {0};
 *     save.seq = 3, save.model = name, save.model_bytes = strlen(name);
 *     st = tkv_seq_save(kv, &save, NULL, 0, &bytes);         // how many bytes
 *     st = tkv_seq_save(kv, &save, buffer, bytes, NULL);
 *     tkv_load_params load = {0};
 *     load.seq = 7, load.model = name, load.model_bytes = strlen(name);
 *     st = tkv_seq_load(kv, &load, buffer, bytes, NULL);     // sequence 7 was empty */
typedef struct tkv_save_info {
    size_t bytes; /* that this save writes */
    size_t at; /* where they come in the file. 0: they are the whole file. Else cut it there, and add them */
    size_t live;                /* bytes of a whole save; beyond twice as many, a journal begins anew */
    int n_blocks, n_new_blocks; /* blocks of the sequence, all layers together; those that are written */
} tkv_save_info;
typedef struct tkv_save_params { /* fill with zeros first */
    int seq;                     /* a sequence, or TKV_ALL_SEQS */
    const void *model; /* bytes that name the model and its weights; a load must give the same. May be NULL */
    size_t model_bytes;
    const int *tokens; /* NULL, or [n_tokens] token numbers, which a load gives back */
    int n_tokens;
    int with_scores; /* 1: saves attention scores too (cfg.evict, cfg.importance): 256 bytes for each block */
    int length;      /* 0: all tokens; else the first ones of a sequence, as tkv_seq_fork would take them */
    /* NULL, or the bytes of a journal: a saved sequence, and what later saves added behind it. Only what changed since
     * its last whole save is written, to be added at info->at. Tokens that went since then stay in the bytes before:
     * save without it, to a new file, to be rid of them. */
    const void *former;
    size_t former_bytes;
    /* NULL, or memory for the call. In place a cache may have none to spare. An error says how many bytes it takes. */
    void *scratch;
    size_t scratch_bytes;
    tkv_save_info *info; /* (may be NULL) is filled before the first byte is written */
} tkv_save_params;
typedef struct tkv_load_params { /* fill with zeros first */
    int seq;                     /* an empty sequence, or TKV_ALL_SEQS: a whole cache, into a new one */
    const void *model;           /* as in tkv_save_params */
    size_t model_bytes;
    int *tokens; /* NULL, or room for the saved token numbers */
    int token_capacity;
    int recover; /* 1: of a journal whose last save was cut or damaged, loads the whole save before it */
    /* 1: archived blocks stay in `bytes`, which begin at a multiple of 64 and live until `release`, and are read there.
     * Each is verified when it is read first. Of exact blocks the file then has the copies for tkv_promote. */
    int attach;
    /* (may be NULL) is called once after each load without an error, when no block of it needs the bytes any more: in
     * that load, in a later call, or in tkv_destroy. It must not call the cache. */
    void (*release)(void *user, const void *bytes, size_t size);
    void *release_user;
    void *scratch; /* as in tkv_save_params */
    size_t scratch_bytes;
} tkv_load_params;
typedef struct tkv_load_info {
    int n_tokens;       /* of the sequence, or of all */
    int n_saved_tokens; /* token numbers in the file */
    int n_tables;       /* tables that the cache did not have, all layers together */
    int n_recoded;      /* blocks coded again with the cache's table, as a layer has at most four */
    int n_attached;     /* blocks that stay in the file, all layers together */
    size_t end;         /* of the save in the file; behind it, with `recover`, is what was cut */
} tkv_load_info;
typedef int (*tkv_write_bytes)(void *user, const void *bytes,
                               size_t size); /* returns 0, or not 0 after a failure */
/* Saves a sequence, or a whole cache, to memory.
 *   buf      [size] receives the bytes, not zero-ended; NULL: only counts
 *   needed   (may be NULL if buf is not) receives the number of bytes
 * Errors:
 *   TKV_ERR_CAPACITY     size is too small
 *   TKV_ERR_NO_SOURCE    a block is discarded (tkv_seq_recompute)
 *   TKV_ERR_STATE        a step is open in a sequence that is saved
 *   TKV_ERR_IO, TKV_ERR_DATA   the store of cfg.offload gave no block, or it or attached bytes gave a damaged one
 *   TKV_ERR_NOMEM, TKV_ERR_BUDGET, TKV_ERR_ARG, TKV_ERR_UNSUPPORTED (TKV_NO_SAVE)
 *   TKV_ERR_RANGE        tokens of a window have expired that the last of `length` tokens needs (tkv_seq_truncate)
 *   TKV_ERR_DATA         `former` has no whole save
 * In place a cache has no memory for the block, table and index that a call needs meanwhile: give `scratch`.
 * A whole cache takes memory for the places of its blocks too, 24 bytes each, also to count.
 * Cost: O(bytes). Behind a former save O(bytes of the sequence) to hash them, and O(new bytes) to write them. */
TKV_API tkv_status tkv_seq_save(tkv_cache *kv, const tkv_save_params *p, void *buf, size_t size,
                                size_t *needed);
/* Saves a sequence through a callback, which gets the bytes piece by piece, in order. After an error the pieces are of
 * no use. Errors: as tkv_seq_save, and TKV_ERR_IO (the callback failed). Cost: as tkv_seq_save. */
TKV_API tkv_status tkv_seq_save_to(tkv_cache *kv, const tkv_save_params *p, tkv_write_bytes write,
                                   void *user);
/* Loads a saved sequence into an empty one, or a whole cache into a new one. All of the file is verified first. After
 * an error the sequence is empty, and all others have the tokens that they had; a new cache is as new. A layer that had
 * no table may keep that of the file.
 *   bytes   [size] a saved sequence or cache, at any address
 *   out     (may be NULL) receives what was loaded
 * The config may have another plan, budget, page size or hot length, if some level has the formats of the saved blocks.
 * Blocks keep their formats until age or a budget moves them.
 *
 * A whole cache needs the config of the saved one in every field, where 0 and the default are the same, but for
 *   host                        only nonfinite and precise must be the same: the other fields are this cache's
 *   offload, recompute, evict.scorer, evict.user     are this cache's
 *   budget.bytes, and the hot tokens of tiers, layers and levels     are those of the saved cache, since calls change
 *                               them. Both need a budget or none, and TKV_UNLIMITED hot tokens in the same places
 *   meter.tokens, meter.every   may differ if meter.heads is 0
 * Both caches are in place (tkv_create_in_place), or neither is. One with a meter needs a build that has it, so atomics
 * (gcc, clang).
 * Files of e1db1b6 and before do not tell budget.discard, budget.adapt, meter.target, n_heads and some others.
 * Errors:
 *   TKV_ERR_DATA       the bytes are damaged, cut, or not a saved sequence
 *   TKV_ERR_CONFIG     another model, RoPE, options of formats or number of anchors, or no level has its formats;
 *                      blocks that eviction packed, for a cache without cfg.evict and cfg.importance.sample_every; a
 *                      whole cache of another config; one sequence for a whole cache, or the reverse
 *   TKV_ERR_STATE      the sequence is not empty, or a step is open; the cache is not new
 *   TKV_ERR_CAPACITY   token_capacity, max_tokens or scratch is too small, no version of a table is free, or in place
 *                      there is no memory to attach
 *   TKV_ERR_BUDGET, TKV_ERR_NOMEM, TKV_ERR_ARG, TKV_ERR_UNSUPPORTED (TKV_NO_SAVE; attach: TKV_NO_OFFLOAD)
 * Under a budget with a policy, tokens of other sequences may be evicted for the loaded ones, as by an append.
 * Cost: O(bytes of the sequence); attached blocks O(1) each, and 8 bytes more. A forged file can name one record for
 * many blocks, so it may be small: limits.max_tokens and the budget bound what it costs. It takes memory for one block
 * or table meanwhile. */
TKV_API tkv_status tkv_seq_load(tkv_cache *kv, const tkv_load_params *p, const void *bytes, size_t size,
                                tkv_load_info *out);
/* Loads a saved sequence or cache through a callback, such as that of an archive. The index, lists, tables and states
 * are read once for each save that is tried, and kept in memory until the call ends: in the budget, or in `scratch`,
 * of which an error names the bytes for the next step. Records of blocks are read twice, one by one: all are verified
 * before anything changes. So the call never holds the whole file.
 *   size   bytes of the file
 *   read   returns 0 if it gave `size` bytes of the file from `at` on. It must not call the cache
 * Errors: as tkv_seq_load, and TKV_ERR_IO (the callback failed), TKV_ERR_ARG (attach needs bytes in memory).
 * Cost: O(bytes), most of them read twice. */
typedef int (*tkv_read_bytes)(void *user, size_t at, void *bytes, size_t size);
TKV_API tkv_status tkv_seq_load_from(tkv_cache *kv, const tkv_load_params *p, size_t size,
                                     tkv_read_bytes read, void *user, tkv_load_info *out);

/* >>prefixes. A prompt that many sequences, processes or machines share is read once. A store of the caller's has its
 * pages by the hash of their content: page 0 is the sinks and 256 tokens, each other page 256 tokens. A page is 4
 * blocks of each layer as they lie, and the states behind it.
 *
 *     hash of page i = SHA-256 of the hash of page i - 1, the tokens of page i and its extras
 *     hash before page 0 = SHA-256 of model, salt, geometry, RoPE, options, formats and tables of this cache
 *
 * Each page is found only with the tables that coded it: load the same calibration into all caches
 * (tkv_load_calibration), or freeze what was learned (tkv_freeze_calibration) before the prompt is read. Two processes
 * may publish the same page with other bytes, as processors round differently and pages differ in age. The first stays.
 * A sequence with tokens of another text (tkv_seq_copy to the same positions) must not be published: keys and values
 * would not be those of its tokens. In a hybrid model publish a page when its states were put, as it is put only once.
 *
 * Without a store (NULL), sequences of one cache find each other's prefixes, and share the blocks: publish what a
 * sequence has, and any other one adopts from it, as tkv_seq_fork would. That goes on for as long as the sequence keeps
 * these tokens. So publish each sequence when it has read its prompt, also one that adopted some of it. A sequence that
 * is only there to be found is a cache of prompts. A sequence has the names of its last publication, 1.3 KB a page, in
 * the budget. They are not saved.
 *
 * A value is verified as a file is (tkv_seq_load), and its tokens are compared. That finds accidents and mixed-up keys.
 * It does not stop whoever can write to the store: authenticate values there.
 *
 * Example:
 *     tkv_prefix_params p = {0};
 *     p.seq = 1, p.spare = 2, p.tokens = prompt, p.n_tokens = n, p.model = name, p.model_bytes = strlen(name);
 *     st = tkv_seq_adopt_prefix(kv, &p, &store, &info);   // then append prompt[info.n_tokens], ...
 *     st = tkv_seq_publish_prefix(kv, &p, &store, NULL);  // when the prompt was read */
#define TKV_PAGE_TOKENS 256
typedef struct tkv_prefix_hash {
    unsigned char bytes[32];
} tkv_prefix_hash;
typedef struct tkv_prefix_extra { /* what a token stands for beside its number, such as an image */
    int index;                    /* of the token, below n_tokens; it decides the page */
    const void *bytes;            /* [size], such as a hash of the image */
    size_t size;
} tkv_prefix_extra;
typedef struct tkv_prefix_params { /* fill with zeros first */
    int seq;                       /* publish: its tokens; adopt: an empty sequence */
    int spare;                     /* another empty sequence, which a call with a store needs meanwhile */
    const int *tokens;             /* [n_tokens] token numbers, from the first one of the sequence on */
    int n_tokens;
    const void *model; /* bytes that name the model and its weights */
    size_t model_bytes;
    const void *salt; /* bytes of a tenant. Caches with another salt do not find its pages. May be NULL */
    size_t salt_bytes;
    const tkv_prefix_extra *extras; /* [n_extras] of the tokens */
    int n_extras;
    /* NULL, or memory for the call: what tkv_seq_save or tkv_seq_load needs for a page, and to publish the bytes of its
     * value too. In place a cache may have none to spare. */
    void *scratch;
    size_t scratch_bytes;
} tkv_prefix_params;
/* Callbacks. None may call the cache. */
typedef struct tkv_prefix_store {
    void *user;
    /* Gives the values of n hashes, those of consecutive pages. bytes[i]: at any address, valid until the next call
     * of the store. Returns how many of the first ones it has. Every failure is a 0. */
    int (*get)(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes, size_t *sizes);
    /* Keeps a copy of a value. Returns 0; else the page is not in the store. */
    int (*put)(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size);
    /* (may be NULL) returns 1 if the store has a value. */
    int (*has)(void *user, const tkv_prefix_hash *hash);
} tkv_prefix_store;
typedef struct tkv_prefix_info {
    int n_tokens; /* publish: tokens in pages that were on their path; adopt: tokens that the sequence has now */
    int n_pages; /* these pages */
    int n_put; /* publish: pages that the store did not have, and took; without a store: pages newly named */
    int n_rejected; /* adopt: values that were wrong (0 or 1); publish: pages that the store did not take */
    size_t bytes;   /* of values that were put or adopted */
} tkv_prefix_info;
/* Computes the hash of the first n_pages pages of p->tokens; n_pages 0: that of the cache. seq and spare are not used.
 * Errors:
 *   TKV_ERR_STATE         a table is missing or is still being learned
 *   TKV_ERR_UNSUPPORTED   layers with a window, with other numbers of sinks or in SQUAT; anchors; TKV_NO_SAVE or
 *                         TKV_NO_MOVES
 *   TKV_ERR_CAPACITY      more tokens than max_tokens; in place there is no memory for a table meanwhile: give scratch
 *   TKV_ERR_ARG           n_pages is negative or more than the tokens have; a number is negative; bytes are missing
 *   TKV_ERR_NOMEM, TKV_ERR_BUDGET   no memory for a table meanwhile
 * Cost: O(bytes of tables) for the cache, then O(tokens). */
TKV_API tkv_status tkv_get_prefix_hash(tkv_cache *kv, const tkv_prefix_params *p, int n_pages,
                                       tkv_prefix_hash *out);
/* Puts the pages of a sequence into a store, from the first one on, until a page has tokens in the hot tail, or tokens
 * that were evicted, removed, moved or coded at another level of the budget. A page that the store has is not put
 * again.
 *   store   NULL: names the pages for the other sequences of this cache
 *   out     (may be NULL) receives what was done
 * Errors: those of tkv_get_prefix_hash; TKV_ERR_CAPACITY (in place pages have no names); TKV_ERR_STATE (spare is not
 * empty, a step is open), TKV_ERR_ARG (no such sequence, or they are the same); those of tkv_seq_copy and tkv_seq_save.
 * The tokens of the sequence are unchanged; its reservation and that of the spare one end, and limits.state_bytes needs
 * room for the states of a page twice.
 * Cost: that of tkv_get_prefix_hash, and O(bytes) of the pages that are put. It takes memory for one page. */
TKV_API tkv_status tkv_seq_publish_prefix(tkv_cache *kv, const tkv_prefix_params *p,
                                          const tkv_prefix_store *store, tkv_prefix_info *out);
/* Takes the longest prefix of p->tokens that a store has into an empty sequence. Values are verified and compared with
 * the tokens, and nothing is decoded. A missing, wrong or foreign value ends the prefix before it, and is no error. In
 * a hybrid model the prefix ends where every stateful layer has its state.
 *   store   NULL: the other sequences of this cache. The longest prefix of one of them is forked; its reservation ends
 *   out     (may be NULL) receives what was found: append the tokens from out->n_tokens on
 * Errors: those of tkv_get_prefix_hash; TKV_ERR_STATE (a sequence is not empty; a step is open in any), TKV_ERR_ARG (no
 * such sequence, or they are the same); those of tkv_seq_load and tkv_seq_copy for want of memory: pages before stay.
 * Cost: O(tokens) hashes and O(bytes of values); without a store O(pages * max_seqs + blocks), no values. */
TKV_API tkv_status tkv_seq_adopt_prefix(tkv_cache *kv, const tkv_prefix_params *p,
                                        const tkv_prefix_store *store, tkv_prefix_info *out);
/* Empties a sequence. Ends its open step and its reservation. A sequence exists from its first append until its
 * reset. Its memory goes back to the allocator: the total is then within a page for each block size of that of a fresh
 * cache with the same tokens. Learned tables and statistics stay. With cfg.offload the block table ends no earlier than
 * its last stored block. In place nothing goes back.
 * Errors: TKV_ERR_ARG (no such sequence). Cost: O(blocks of all sequences). */
TKV_API tkv_status tkv_seq_reset(tkv_cache *kv, int seq);

typedef struct tkv_tier_bytes {
    size_t tokens;   /* tokens, summed over layers */
    size_t codes;    /* bytes for coded values, including the free slots of a block */
    size_t metadata; /* bytes for scales and zeros */
} tkv_tier_bytes;
typedef struct tkv_memory_info {         /* bytes, if a field has no other unit */
    size_t total;                        /* memory held from the allocator: the sum of the indented fields */
    tkv_tier_bytes tier[TKV_TIER_COUNT]; /*   codes and metadata of each tier */
    size_t tables;            /*   plans per layer, learned tables, statistics, sums of the quality meter */
    size_t index;             /*   block table, block lists, the cache object */
    size_t scratch;           /*   work space of encoding and of parallel attention */
    size_t exact_copies;      /*   memory for the exact copies of the quality meter, used or not */
    size_t states;            /*   states of tkv_seq_put_state; those that sequences share count once */
    size_t slack;             /*   free space in pages and, in place, in limits.state_bytes; padding */
    tkv_tier_bytes offloaded; /* offloaded tokens (the tiers count them too), their codes and metadata */
    size_t peak;              /* highest total so far */
    size_t fp16_bytes;        /* K and V of the same tokens as plain FP16, without padding or overhead */
    double ratio;             /* fp16_bytes / total */
    double ratio_f32;         /* bytes of plain F32 / total */
} tkv_memory_info;
/* Reports the memory of the cache, exact to the byte. Cost: O(blocks). */
TKV_API tkv_status tkv_get_memory(const tkv_cache *kv, tkv_memory_info *out);
typedef struct tkv_seq_memory_info { /* bytes of a sequence's blocks in RAM, all layers */
    size_t own;                      /* blocks that no other sequence holds: tkv_seq_reset frees them */
    size_t shared;                   /* blocks that other sequences hold too (tkv_seq_fork) */
    size_t share; /* its part of `shared`: each block counts divided by its holders, rounded down */
} tkv_seq_memory_info;
/* Reports what a sequence holds alone and what it shares. `own` and `share` of all sequences add up to the bytes of all
 * blocks, but for rounding. Pages, index and tables belong to the cache: see tkv_get_memory.
 * Errors: TKV_ERR_ARG (no such sequence, or out is missing). Cost: O(blocks of the sequence), and the same again for
 * each block that other sequences hold too. */
TKV_API tkv_status tkv_seq_get_memory(const tkv_cache *kv, int seq, tkv_seq_memory_info *out);

/* >>pressure. A pressure controller turns pressures into a level of an ordered ladder. A pressure is usually bytes
 * held / bytes allowed. Level 0 is the loosest. While the average pressure is at or above the next threshold, the
 * level rises. When the average falls below the present threshold less the hysteresis, the level falls by one. The
 * controller is independent of any cache and owns no memory: the caller's struct holds it. Zero means default. */
typedef struct tkv_pressure_info {
    int level;                   /* present level, 0 the loosest */
    float average, last, peak;   /* moving average, newest and highest pressure, 0 to 1 */
    float trend;                 /* moving average of the change from one sample to the next */
    float samples_left;          /* samples until pressure 1 at that trend; -1: the trend does not rise */
    uint64_t samples, refused;   /* pressures accepted; pressures ignored because they were NaN or infinite */
    uint64_t tightened, relaxed; /* levels moved up (tighter); levels moved down (looser) */
} tkv_pressure_info;

/* >>budget. With cfg.budget.bytes a cache stays exact while memory is free. The budget counts all memory of the
 * cache: pages, tables, index, scratch, and about two pages reserved for recoding. The cache never asks the
 * allocator for more. In place, the budget is the size that the memory must have (tkv_get_required_bytes returns it).
 *
 * As the memory fills, the cache goes down the ladder, one level at a time. It recodes stored blocks, oldest
 * first. Each append recodes a few blocks, as its new bytes require. The default levels (see cfg.budget.ladder) are:
 *     0  everything exact                                3  the plan of the config (warm, then archive)
 *     1  8 bits behind hot_tokens                        4  archive A25 + R20
 *     2  4 bits behind hot_tokens                        5  archive A20 + R15
 * The average pressure (cfg.budget.pressure) starts the next level: by default the first at 80 %, the others at 95
 * % of the budget. All old blocks must be at the present level first. If an append does not fit, the next level
 * begins at any average. An append that cannot fit returns TKV_ERR_BUDGET. If all reclaim stages together cannot
 * free enough, nothing has changed. Otherwise blocks may have been recoded or offloaded, but no token is discarded
 * or evicted. Before an append is refused, blocks younger than hot_tokens are recoded too, but not the last append.
 * In an open step, blocks from before the step may be recoded, and an abort does not undo it.
 *
 * cfg.budget.pressure.max_level is the last level allowed ("fp16_only": level 0). cfg.budget.pressure.min_level is
 * the first. At min_level, blocks are recoded when due by age, even while memory is free. After a cut or a reset,
 * the cache goes back one level if everything it holds would fit there. Stored blocks then stay as they are; new
 * blocks follow the looser level. The tokens of a sequence's last append are never recoded. The work space of
 * cfg.host.parallel_for counts, so levels may come earlier with it. Without a budget, cfg.budget.ladder gives a
 * static plan: cfg.budget.pressure.min_level at first; see tkv_set_level. */
typedef struct tkv_budget_info {
    /* bytes; `used` excludes free pages and states that can be thinned out, but includes the reserve for recoding */
    size_t budget, used, peak;
    int level, n_levels;        /* present level; levels of the ladder */
    tkv_pressure_info pressure; /* state of the pressure controller; one sample per append */
    uint64_t
        recoded[TKV_MAX_LEVELS];    /* blocks recoded to each level's formats to free bytes or at min_level */
    uint64_t demoted;               /* blocks recoded for any reason, age included */
    uint64_t refused;               /* calls that returned TKV_ERR_BUDGET */
    uint64_t offloaded, promoted;   /* blocks offloaded; blocks that tkv_promote brought back */
    uint64_t unwritten;             /* blocks and exact copies that cfg.offload.write failed to write */
    uint64_t evicted;               /* tokens evicted, counted per layer (cfg.evict, tkv_evict) */
    uint64_t discarded, recomputed; /* blocks discarded; blocks that tkv_restore brought back */
    uint64_t thinned;               /* states thinned out, or replaced by newer ones */
    /* blocks that the present level would still recode; 0 without a budget. At min_level without pressure, blocks
     * that wait for a table do not count. Some can stay while no page is free for their new size. */
    uint64_t pending;
} tkv_budget_info;
/* Reports the budget and what was done to keep it. Errors: TKV_ERR_ARG. Cost: O(blocks), for `pending`. */
TKV_API tkv_status tkv_get_budget(const tkv_cache *kv, tkv_budget_info *out);
/* Sets another budget. A lower budget recodes blocks at once.
 *   bytes   0: no budget; the plan of the present level becomes static. In place: not 0, and limited to the memory
 *           given
 * Errors, nothing changed:
 *   TKV_ERR_BUDGET   the stored blocks do not fit
 *   TKV_ERR_ARG      the cache was created without a budget, or bytes is 0 in place
 *   TKV_ERR_NOMEM */
TKV_API tkv_status tkv_set_budget(tkv_cache *kv, size_t bytes);

TKV_API const char *tkv_get_status_text(tkv_status s); /* a sentence about a status */
/* Returns the sentence of the last call that failed, or "" if a call that changes the cache has succeeded since. Calls
 * that take a const tkv_cache leave it as it is, as do tkv_report_pressure and a success of tkv_attend or tkv_read. It
 * is overwritten by the next failure: while several threads attend, ask tkv_validate_attend. */
TKV_API const char *tkv_get_last_error(const tkv_cache *kv);

/* ======== 2. CONTROL ======== >>control
 * These functions decide when work happens and what it may cost. A step makes the appends of all layers one unit: it
 * is committed, or aborted as if it had never begun. tkv_seq_reserve takes the memory of later appends in advance.
 * tkv_seq_flush and tkv_maintain do the work of later appends in an idle moment, so that a frame or a token does not
 * wait for it. tkv_set_level and tkv_set_hot_tokens change the plan of a running cache. tkv_report_pressure lets the
 * whole process decide how tight the cache gets. The two estimates answer before a cache exists: what a number of
 * tokens takes, and how many tokens a budget holds. tkv_get_layer and tkv_get_tiers say where the tokens are.
 *
 * Example:
 *     st = tkv_seq_begin(kv, seq);
 *     for (layer = 0; layer < 4 && !st; layer++) st = tkv_append(kv, seq, layer, k, v, n);
 *     if (!st) st = tkv_seq_commit(kv, seq);
 *     else (void)tkv_seq_abort(kv, seq);                 // every layer is as long as before
 *     (void)tkv_maintain(kv, 16, NULL, NULL, &done);     // at most 16 blocks, while nobody waits
 *     if (!tkv_estimate_memory(&cfg, 32768, 1, &memory)) printf("%.0f MB\n", (double)memory.total / 1e6);
 */
/* >>step. A step appends tokens to all layers of a sequence as one unit.
 *   tkv_seq_begin    demotes blocks that are due, as an append would, then opens the step. Appends inside the step
 *                demote nothing. They add at most max_append tokens per layer in total.
 *   tkv_seq_commit   closes the step if every layer got the same number of tokens; otherwise the step stays open
 *   tkv_seq_abort    removes the step's tokens. The cache is as after tkv_seq_begin, but keeps statistics of queries.
 * Errors:
 *   TKV_ERR_STATE      begin: a step is open; commit, abort: no step is open
 *   TKV_ERR_STATE      commit: the layers got different numbers of tokens
 *   TKV_ERR_NOMEM      begin: the allocator returned NULL
 *   TKV_ERR_BUDGET     begin: the budget has no room for the tables of formats
 *   TKV_ERR_CAPACITY   begin: memory in place is full
 *   TKV_ERR_ARG        no such sequence
 * Cost: begin: the encoding that is due; commit, abort: O(layers). */
TKV_API tkv_status tkv_seq_begin(tkv_cache *kv, int seq);
TKV_API tkv_status tkv_seq_commit(tkv_cache *kv, int seq);
TKV_API tkv_status tkv_seq_abort(tkv_cache *kv, int seq);
/* Reserves memory for n more tokens, 1 to max_append, in every layer. Appends up to a length of tkv_get_length + n
 * then cannot fail for memory, demotion included. The reservation ends when all layers reach that length. These
 * calls end it earlier: tkv_seq_reset; tkv_seq_flush FULL or ALL; tkv_seq_truncate after evictions, or of compressed
 * or shared tokens; tkv_seq_fork of it; tkv_seq_set_sinks; without a budget also tkv_set_level and tkv_set_hot_tokens.
 * Errors, nothing reserved:
 *   TKV_ERR_CAPACITY   the length exceeds max_tokens, or memory in place is full
 *   TKV_ERR_BUDGET     the budget is full
 *   TKV_ERR_NOMEM      the allocator returned NULL
 *   TKV_ERR_ARG        bad seq or n */
TKV_API tkv_status tkv_seq_reserve(tkv_cache *kv, int seq, int n);
typedef enum tkv_flush_mode {
    TKV_FLUSH_DUE = 0, /* demotes the blocks that the next append would demote anyway */
    TKV_FLUSH_FULL,    /* demotes every full block of the hot tail; none where hot_tokens is TKV_UNLIMITED */
    TKV_FLUSH_ALL      /* demotes the partial block too, which then takes a whole block's bytes */
} tkv_flush_mode;
/* Demotes blocks now (see tkv_flush_mode), for an idle moment or a finished sequence. After FULL and ALL the warm
 * tier begins at the newest token. A and R formats without a table get one from the tokens in the cache. It serves
 * until the layer has seen 2,048 tokens.
 * Errors, nothing changed:
 *   TKV_ERR_BUDGET     the budget has no free page to recode into; the call frees none
 *   TKV_ERR_NOMEM      the allocator returned NULL
 *   TKV_ERR_CAPACITY   memory in place is full
 *   TKV_ERR_STATE      a step is open
 *   TKV_ERR_ARG        bad sequence or mode
 * Cost: one encoding per block. */
TKV_API tkv_status tkv_seq_flush(tkv_cache *kv, int seq, tkv_flush_mode mode);
typedef int (*tkv_is_time_up)(void *user); /* returns 0 while there is time for another block */
/* Does the work of the next appends in an idle moment: it makes tables that are due and expires tokens. Without a
 * budget it recodes what the next append would, except tokens of the last append. Under a budget it recodes until a
 * tenth of the level's bytes is free and one more block of each layer fits, at cfg.budget.pressure.min_level also by
 * age.
 *   max_work     most blocks to recode; two short blocks that are merged into one count as one
 *   is_time_up   (may be NULL) called before each block with `user`; not 0 stops
 *   done         (may be NULL) receives their number
 * Errors, the work before stays done:
 *   TKV_ERR_ARG, TKV_ERR_NOMEM, TKV_ERR_BUDGET, TKV_ERR_CAPACITY   as in tkv_seq_flush
 * Cost: O(sequences * layers) per block. */
TKV_API tkv_status tkv_maintain(tkv_cache *kv, int max_work, tkv_is_time_up is_time_up, void *user,
                                int *done);

/* Moves to a level of the ladder. Under a budget, the pressure controller continues from there. If the level is
 * tighter, stored blocks follow as bytes are needed.
 * Errors: TKV_ERR_ARG   the level is not within cfg.budget.pressure, or the cache is in place without a budget */
TKV_API tkv_status tkv_set_level(tkv_cache *kv, int level);
typedef struct tkv_level_info {
    int level;    /* its ordinal: 0 is the loosest */
    char tag[24]; /* the formats as a config text writes them: "f16", "q8", "a30/r30" */
    /* of its oldest tokens, in most layers: those of the archive, or of the warm or hot tier if that takes all */
    tkv_format_pair formats;
    /* bytes of a block of the oldest tokens, metadata and padding included, divided by those in FP16; of all layers */
    double memory_factor;
} tkv_level_info;
/* Reports a level of the ladder. The macro TKV_NO_REPORTS removes this function and the next one.
 *   level   0 to n_levels - 1 (tkv_get_budget)
 * Errors: TKV_ERR_ARG (there is no such level, or out is missing). Cost: O(layers); 5 KB of stack. */
TKV_API tkv_status tkv_get_level(const tkv_cache *kv, int level, tkv_level_info *out);
/* Finds the loosest level with a tag. The tag may be any text of a format pair: "a30/r30", "q8", "fp16" for "f16".
 * Errors, *level unchanged: TKV_ERR_RANGE (no level has it), TKV_ERR_ARG (a pointer is missing).
 * Cost: O(layers) for each level. */
TKV_API tkv_status tkv_find_level(const tkv_cache *kv, const char *tag, int *level);
/* Sets hot_tokens of all levels and layers, except those that keep everything exact. Layers keep their delays
 * (tkv_tiers_config). Without a budget, this ends reservations, as tkv_set_level does.
 * Errors: TKV_ERR_ARG   hot_tokens is not 1 to 2^30 - 2, or the cache is in place without a budget */
TKV_API tkv_status tkv_set_hot_tokens(tkv_cache *kv, int hot_tokens);
/* Gives the cache a pressure from elsewhere, such as that of the whole process, limited to 0 to 1. Until the next
 * call, the cache uses the larger of this and its own. Any thread may call it at any time (gcc, clang).
 * Errors: TKV_ERR_ARG (NaN or infinite). */
TKV_API tkv_status tkv_report_pressure(tkv_cache *kv, float pressure);

/* Forecasts tkv_get_memory for n_seqs sequences of n_tokens each, appended token by token. Allocates nothing. It knows
 * no states and no named sinks. If sequences are appended one after the other, the forecast is exact, with two
 * exceptions. The real `index` can be twice as large, because arrays keep the size to which they grew. `peak` equals
 * total, although a cache holds more on the way: exact blocks that wait for the first table, and a chunk, which is
 * exact until the next append. Leave room for that: with 30 layers of 3 KV heads of 64 channels and the default plan,
 * 512, 1,024 and 2,048 tokens one by one peak at 1.32, 1.13 and 1.08 times the forecast, and in chunks of 512 at 2.1,
 * 2.1 and 1.75 times (tests/test_memory.c). With
 * cfg.evict.keep_tokens, the forecast limits n_tokens to it. With cfg.budget.pressure.min_level under a budget, the
 * cache can hold up to an eighth more, because blocks are recoded a few at a time. The forecast assumes that no
 * calibration is loaded. It has a version of the tables for each time that layers learn, up to four. The cache has
 * fewer if no block has the oldest one any more. Without a budget it counts all blocks at the first level.
 *
 * Under a budget, the forecast takes the first case that fits:
 *   1. a level of the ladder;
 *   2. the last level with the fewest blocks offloaded (cfg.offload), or discarded (cfg.recompute);
 *   3. all sequences except one discarded as far as allowed (cfg.budget.discard);
 *   4. the most tokens that the budget holds in contiguous blocks (cfg.evict). In the real cache, live tokens lie
 *      in more blocks, and other memory may be larger, up to the budget.
 * Errors:
 *   TKV_ERR_BUDGET   no case fits
 *   TKV_ERR_CONFIG   cfg is wrong, or this machine cannot address that much memory
 *   TKV_ERR_ARG      a number is out of range */
TKV_API tkv_status tkv_estimate_memory(const tkv_config *cfg, int n_tokens, int n_seqs, tkv_memory_info *out);
/* Forecasts the most tokens that each of n_seqs sequences can have within cfg.budget.bytes, appended token by
 * token. Assumes the last level, and the reclaim stages of the config:
 *   cfg.evict   cfg.limits.max_tokens, if the tokens that eviction always keeps fit
 *   cfg.offload   as many tokens as the index can hold
 *   cfg.budget.discard   one sequence at a time, while the others are discarded
 * The real cache never holds fewer. It can hold a tenth more, or twice as many with cfg.offload, because the index
 * grows in steps. Allocates nothing. Errors: TKV_ERR_ARG (no budget, or a bad number), TKV_ERR_CONFIG. */
TKV_API tkv_status tkv_estimate_context(const tkv_config *cfg, int n_seqs, int *n_tokens);

/* One layer of one sequence. `length` is the sum of tokens, expired, evicted and discarded. */
typedef struct tkv_layer_info {
    int n_heads, n_kv_heads, head_dim, v_head_dim;
    int v_in_k;                 /* 1: V is stored as the first channels of K */
    int length;                 /* in tokens */
    int tokens[TKV_TIER_COUNT]; /* tokens per tier; sinks count as HOT */
    int blocks[TKV_TIER_COUNT]; /* blocks per tier */
    int expired;                /* tokens that left every window */
    int offloaded;              /* offloaded blocks; they count in their tier as well */
    int evicted;                /* tokens evicted by cfg.evict or tkv_evict */
    int discarded;              /* tokens to be recomputed; they are in no tier */
    int named_sinks;            /* tokens that tkv_seq_set_sinks named; their blocks count as HOT */
    tkv_format_pair format[TKV_TIER_COUNT]; /* of new blocks at the present level, with defaults filled in */
    tkv_memory_info
        memory; /* of the layer's blocks; tables, index and scratch are 0, as sequences share them */
} tkv_layer_info;
/* Reports the config of a cache with defaults filled in, such as limits.max_append and limits.max_seqs. Pointers to
 * arrays are NULL: tkv_get_layer and tkv_get_level report what they held. The pressure of a ladder without a budget is
 * left out too. A limit that there is not is 2^30 - 1.
 * Errors: TKV_ERR_ARG (a pointer is missing). Cost: a copy. */
TKV_API tkv_status tkv_get_config(const tkv_cache *kv, tkv_config *out);
/* Reports one layer of one sequence, empty or not. Errors: TKV_ERR_ARG (no such sequence or layer, or a layer without
 * a cache). Cost: O(blocks). */
TKV_API tkv_status tkv_get_layer(const tkv_cache *kv, int seq, int layer, tkv_layer_info *out);
/* What a token is, beside its tier (tkv_tier). */
typedef enum tkv_token_state {
    TKV_TOKEN_GONE = 3,  /* evicted or expired */
    TKV_TOKEN_DISCARDED, /* to be recomputed */
    TKV_TOKEN_STATE_COUNT
} tkv_token_state;
/* Reports the tier of each of the tokens start to start + n - 1.
 *   tiers   [n] receives a tkv_tier, or a tkv_token_state
 * Errors, nothing written:
 *   TKV_ERR_RANGE   a token is beyond the length of the layer
 *   TKV_ERR_ARG     a bad number, or a layer without a cache
 * Cost: O(blocks + n). */
TKV_API tkv_status tkv_get_tiers(const tkv_cache *kv, int seq, int layer, int start, int n, uint8_t *tiers);

/* ======== 3. LONG CONTEXT ======== >>long
 * A text can become longer than memory allows. Compressing comes first, and these are the ways behind it, from the
 * one that loses least. Offloading moves old blocks to a store of the program, where attention still reads them.
 * Discarding drops blocks that the program's model computes again before they are needed. Evicting removes tokens
 * for good: a policy chooses them by the attention that they received, or the program names them. Pinned tokens
 * stay. Promotion brings a block back to a more precise form, from a kept copy, the store or recomputation.
 *
 * Example:
 *     cfg.evict.policy = TKV_EVICT_H2O;                  // before tkv_create
 *     cfg.evict.keep_tokens = 4096;
 *     (void)tkv_seq_pin(kv, seq, 0, 200, TKV_UNLIMITED); // a system prompt stays
 *     tkv_evict_params evict = {0};
 *     evict.layer = TKV_ALL_LAYERS, evict.keep = 1024;
 *     st = tkv_evict(kv, &evict);                        // now, for example at the end of a prompt
 *     st = tkv_find_top_tokens(kv, seq, 0, 10, 1, top, &done);   // what matters most in layer 0
 */
/* >>eviction in a cache. It needs cfg.evict. With cfg.evict.keep_tokens, an append (or tkv_seq_begin) first evicts
 * the surplus of each layer, a batch at a time. Afterwards a layer holds at most cfg.evict.keep_tokens. Protected
 * tokens, pinned tokens and the tokens of that append can exceed this.
 *
 * Under a budget, eviction is the last reclaim stage, after the last level of the ladder. It also works a batch at
 * a time. Each layer keeps its pinned tokens, its sinks, twice its recent tokens, and 64 more. Recent tokens are
 * one half of a budget, as in rules/evict.h, hence "twice". Tokens are evicted only if that surely makes room. So an
 * append can be refused although eviction would have made room. That is rare: 1 in 50 refusals at most, in random
 * caches (tests/test_resorts.c). It is more often so with "snapkv", "pyramidkv", "keydiff", "user", "knorm" with
 * cfg.importance.sample_every, and cfg.tiers.n_anchors, because their victims are not known before. Named sinks add
 * to that, because blocks do not merge across them. With windows it
 * is 1 in 5 for "snapkv", 1 in 20 for "knorm" and "random".
 * TKV_EVICT_SCORES uses tkv_get_importance. Policies treat all heads of a layer as one.
 *
 * The remaining tokens keep their positions, for masks and windows too. Keys keep their rotation, so distances are
 * those of the text. StreamingLLM instead rotates keys to their places in the cache, for texts beyond the model's
 * length. Here that would mean recoding all keys with each batch, and new query positions from the caller. For such
 * texts, scale the RoPE of the model instead.
 *
 * Bytes are freed when a block of 64 tokens is empty, or when neighbours fit into one block. Coded neighbours are
 * decoded and coded again, with a small loss. KVQUANT keys before RoPE cannot move, so only empty blocks are freed.
 * Evicted tokens never come back: tkv_seq_truncate does not restore them, and tkv_read returns TKV_ERR_RANGE. The
 * bookkeeping takes 432 bytes per block and layer. */
typedef struct tkv_evict_params { /* zero means default */
    int seq;                      /* the sequence */
    int layer;                    /* a layer, or TKV_ALL_LAYERS */
    const tkv_evict_config
        *evict; /* NULL: cfg.evict. Another policy must use the scores the cache collects, or `scores` */
    int keep;   /* tokens that stay per layer, on average for "pyramidkv"; 0: keep_tokens of cfg.evict */
    /* These arrays are NULL, or go by the index of a token, as long as the longest of the layers (tkv_get_length): */
    const uint64_t *pinned_mask;   /* mask of tokens that stay */
    const signed char *priorities; /* as in tkv_evict_view */
    const float *scores;           /* replace the scores that the cache collected; high scores stay */
    /* NULL, or a mask of the first n_victims indices: evicts those tokens, except pinned ones, and ignores `evict`,
     * `keep`, `priorities` and `scores` */
    const uint64_t *victims;
    int n_victims;
} tkv_evict_params;
/* Evicts tokens now, for example at the end of a prompt (SnapKV).
 * Errors, nothing changed:
 *   TKV_ERR_STATE       a step is open, or cfg.evict is not set
 *   TKV_ERR_CONFIG      p->evict has a field out of range, or needs scores that the cache does not collect
 *   TKV_ERR_NONFINITE   a score is not finite
 *   TKV_ERR_BUDGET      the policy is "none", and tokens would have to be evicted
 *   TKV_ERR_ARG
 * Cost: O(tokens), and coding of merged blocks. See tkv_evict_policy for "knorm" and "keydiff". */
TKV_API tkv_status tkv_evict(tkv_cache *kv, const tkv_evict_params *p);
/* Pins the live tokens start to start + n - 1 in all layers, so that eviction keeps them. Positions without a live
 * token are skipped: tokens that are appended later are not pinned.
 *   until   TKV_UNLIMITED; TKV_OFF: ends all pins; or a length of 1 to 2^30 - 2: pins end when the layer has that
 *           many tokens. Such pins in one block of 64 tokens last as long as the longest, also after a merge.
 * A pin belongs to its token: it stays when the token gets another index or position, is coded or merged. Forks and
 * saves have it too, tkv_seq_copy leaves it behind. A pin that has ended does not come back when the layer gets
 * shorter. Where tkv_seq_slide removes n tokens, `until` falls by n, as the length does: the pin lasts for as many new
 * tokens as before.
 * Errors: TKV_ERR_STATE (a step is open, or cfg.evict is not set), TKV_ERR_ARG. Cost: O(blocks). */
TKV_API tkv_status tkv_seq_pin(tkv_cache *kv, int seq, int start, int n, int until);
/* Names the tokens start to start + n - 1 as attention sinks, in all layers: tokens at any index that draw attention,
 * such as delimiters of a chat or first tokens of documents. They stay exact, and are never evicted or discarded. Where
 * window_sinks is 1, queries see them from beyond the window. Where a window hides sinks, they expire as others do.
 *   on   1: sinks from now on; 0: tokens as any other again. Without such a token, 0 does nothing
 * It needs no cfg.evict. A block of 64 tokens with such a token stays exact (manual, chapter 9). A reservation ends.
 * Errors, nothing changed:
 *   TKV_ERR_NO_SOURCE     a token is compressed (tkv_promote) or discarded (tkv_seq_recompute)
 *   TKV_ERR_RANGE         a token is evicted, expired or not yet appended
 *   TKV_ERR_UNSUPPORTED   there are anchors, or the cache is in place without a budget
 *   TKV_ERR_STATE (a step is open), TKV_ERR_ARG
 * Cost: O(blocks). Source: arXiv 2309.17453 (sinks), 2402.17762, section 2 (at other indices). */
TKV_API tkv_status tkv_seq_set_sinks(tkv_cache *kv, int seq, int start, int n, int on);

/* A cache collects attention scores itself while tkv_attend runs, if cfg.importance.sample_every or cfg.evict
 * needs them. They take 432 bytes per block and layer, counted with the index. The eviction policy selects the
 * scores:
 *     h2o; strategies hybrid, accumulation     weights, summed over queries and KV heads
 *     strategy heavy_hitter                    the largest weight given by any KV head of any query
 *     scissorhands; strategy persistence       times the weight was below importance.low (0: 1 / visible keys)
 *     tova                                     weights of the newest query alone, summed over KV heads
 *     snapkv, pyramidkv                        weights of the newest evict.recent_tokens queries
 * The last three look at queries in two ways. After an append of several tokens they take the newest queries. After an
 * append of one token they take only the last queries before the next eviction: "tova" one, the others one in
 * importance.sample_every (0: 32) of a batch. With evict.keep_tokens the cache knows when that is. Without it, and
 * under a byte budget, it expects an eviction when a block of 64 tokens is full. In between, tkv_evict has older
 * scores, and evicts tokens behind the last query that counted after all others.
 * With any other policy, the strategy of cfg.importance decides. "recency" collects nothing.
 *
 * importance.heads combines the weights of the n_heads / n_kv_heads query heads of a KV head: mean, largest or sum.
 * Mean and sum differ by a constant factor, so policies choose the same tokens by both. Against recency and
 * thresholds, the factor does matter. For scissorhands and persistence, mean and sum combine the heads' counts.
 * There, max counts a query if all heads gave less. Max always, and heavy_hitter also with mean or sum, combine
 * the heads of one query first. With more than 8 query heads (4 at 512 channels), they combine those that run
 * together.
 *
 * For all others queries are sampled. Each KV head samples one of cfg.importance.sample_every
 * positions, and heads and layers take turns. 0 means one in 32, or none if the policy needs no scores. A sampled
 * query counts as importance.sample_every queries, at most 4,096, so sums and counts estimate the whole at any
 * sampling rate.
 *
 * All calls between two appends form one step. Sums are multiplied by importance.decay for each token appended
 * since, so after a chunk of 64 by its 64th power. Decay 0 means the strategy's, or 1 if the policy decides. Sums
 * of newest queries start again with each chunk and each eviction. Sums are limited to 4,095 * sample_every for
 * rates up to 256, else to 1,048,575. Counts are limited to 16,777,215 * sample_every and to 2^32 - 1.
 *
 * Collecting does not change the output of tkv_attend. The sums do not depend on threads. Sampled queries cost
 * a second pass over their keys (bench/LOG.md). Collecting needs atomics (gcc, clang). Without atomics, only
 * tkv_add_scores adds scores. */

/* Computes the importance of tokens start to start + n - 1 by cfg.importance, at the newest token. May run while
 * tkv_attend runs.
 *   out       [n] receives the importance; 0 for tokens that are not in the cache
 *   missing   NULL, or (n + 63) / 64 words that receive a mask of those tokens
 * Errors, out and missing unchanged:
 *   TKV_ERR_CONFIG   no scores are collected (strategy "recency" needs none)
 *   TKV_ERR_RANGE    start + n is beyond the layer's length
 *   TKV_ERR_ARG
 * Cost: O(blocks + n). */
TKV_API tkv_status tkv_get_importance(tkv_cache *kv, int seq, int layer, int start, int n, float *out,
                                      uint64_t *missing);
/* Adds attention scores of the caller to tokens start to start + n - 1, as if attention had just given them. Tokens
 * not in the cache are skipped. No attention may run at the same time.
 *   scores   [n], finite and not negative; each is limited to 2,047 and rounded to
 *            steps of sample_every / 2^20, at most 1/4096
 * Errors: as tkv_get_importance, and also
 *   TKV_ERR_NONFINITE   a score is negative or not finite
 *   TKV_ERR_CONFIG      also with strategy "recency", if no scores are collected
 * Cost: O(blocks + n). */
TKV_API tkv_status tkv_add_scores(tkv_cache *kv, int seq, int layer, int start, int n, const float *scores);
typedef struct tkv_ranked {
    int position; /* index of the token */
    float importance;
} tkv_ranked;
/* Finds the k most important tokens of a layer, best first. Of equal tokens the older comes first.
 *   protect   1: skip the tokens that eviction protects: indices below evict.sink_tokens and the newest
 *             evict.recent_tokens (default 4 and 32)
 *   out       [k] receives the tokens
 *   count     receives k, or fewer if fewer tokens exist
 * Errors: as tkv_get_importance.
 * Cost: O(length * log k), plus moving up to k entries per insertion. For k in the thousands, tkv_get_importance
 * and a sort is faster. */
TKV_API tkv_status tkv_find_top_tokens(tkv_cache *kv, int seq, int layer, int k, int protect, tkv_ranked *out,
                                       int *count);

/* >>offload and promotion. With cfg.offload.write, a full budget can offload blocks. When the last level allowed
 * leaves nothing to recode, the oldest blocks go to the store, as many as necessary. Their index entries stay in
 * RAM:
 *   about 40 bytes   per block and layer
 *   432 bytes        more per block and layer with cfg.evict or cfg.importance.sample_every
 *   about 850 bytes  per block of the longest list with cfg.evict
 *
 * Offloaded blocks keep their format and their position. Attention and tkv_read fetch the parts they need, one head
 * at a time. Results have the same bits as with all blocks in RAM. The sinks, the last two blocks of a layer, and
 * tokens younger than hot_tokens stay in RAM. With a ladder that never leaves level 0, exact blocks are offloaded.
 * Tables of formats are learned from blocks in RAM. tkv_attend needs 36 KiB more stack.
 *
 * If the store fails, the block stays in RAM. The append that needed its bytes evicts tokens, if cfg.evict allows
 * it and that is enough. Otherwise the append returns TKV_ERR_BUDGET, and no token is evicted. One rare exception
 * exists with budgets of a few blocks. If tokens had to be evicted before blocks were offloaded, they stay evicted.
 * Offloaded tokens are evicted for bytes only if the bytes of their index entries are needed.
 *
 * tkv_attend, tkv_attend_ex, tkv_attend_reference and tkv_read return these errors for offloaded blocks. The output
 * is then undefined, and the cache is unchanged. Query statistics may include some of the queries. A retry is
 * allowed.
 *   TKV_ERR_IO     cfg.offload.read failed
 *   TKV_ERR_DATA   the bytes differ from those stored */
/* Offloads the oldest blocks that may be offloaded, with or without a budget.
 *   layer      a layer, or TKV_ALL_LAYERS
 *   n_blocks   most blocks per layer
 *   done       (may be NULL) receives the number of blocks offloaded, after an error too
 * Errors:
 *   TKV_ERR_IO    the store failed
 *   TKV_ERR_ARG   no such sequence, the layer has no cache of its own, no cfg.offload, or n_blocks is negative */
TKV_API tkv_status tkv_offload(tkv_cache *kv, int seq, int layer, int n_blocks, int *done);
/* Brings the block of the token with this index into RAM. If cfg.offload.keep_exact stored an exact copy, the block
 * becomes exact. Otherwise an offloaded block returns in its present format. The block counts in the budget, and
 * nothing is reclaimed for it. Under a budget, it is the first block to be compressed again. Without a budget it stays.
 * Errors, nothing changed:
 *   TKV_ERR_NO_SOURCE   the block is in RAM and has no better copy; decoding cannot restore values
 *   TKV_ERR_RANGE       the token is not held
 *   TKV_ERR_BUDGET, TKV_ERR_NOMEM, TKV_ERR_CAPACITY (in place), TKV_ERR_IO, TKV_ERR_DATA, TKV_ERR_ARG
 * See tkv_promote_important for the blocks that matter most. */
TKV_API tkv_status tkv_promote(tkv_cache *kv, int seq, int layer, int position);

/* >>rematerialization. Rules for discarding blocks that the caller's model can recompute. If all earlier tokens are
 * held, keys and values of tokens a to b - 1 in the first `layers` layers cost this many FLOPs:
 *     (b - a) * layers * (2 * layer_params + 4 * n_heads * head_dim * (a + b) / 2)
 * A token cannot be computed without its prefix, nor a layer without the layers below. So whole blocks are
 * discarded front to back, and recomputed in the same order. */
typedef enum tkv_remat_action { TKV_REMAT_KEEP = 0, TKV_REMAT_DISCARD, TKV_REMAT_QUANTIZE } tkv_remat_action;
typedef struct tkv_remat_block {
    int start, end;         /* tokens start to end - 1; blocks follow one another without gaps */
    int layers;             /* 1 + the highest layer to recompute; 0: all layers */
    int discarded;          /* 1: already discarded */
    size_t bytes;           /* bytes held now */
    size_t quantized_bytes; /* bytes in the next tighter format; `bytes` or more: no such format */
    float use; /* share of steps that use the block, at most 1; 0: unknown, as 1; negative: never used */
} tkv_remat_block;
typedef struct tkv_remat_info {          /* totals */
    uint64_t kept, discarded, quantized; /* blocks that a decision kept, discarded, quantized */
    uint64_t over_budget;                /* decisions that stopped at a block above step_flops */
    uint64_t freed;                      /* bytes freed by discarding and quantizing */
    uint64_t restored, waited; /* blocks recomputed; blocks that had to wait for a later step or call */
    double flops;              /* FLOPs of recomputation */
} tkv_remat_info;
typedef struct tkv_remat { /* initialise with tkv_init_remat; info may be read at any time */
    tkv_remat_config cfg;
    int step;     /* last step of tkv_seq_recompute */
    double spent; /* FLOPs at this step */
    tkv_remat_info info;
} tkv_remat;
/* Starts a controller. `reason` and `size` as in tkv_validate_config.
 * Errors, r unchanged: TKV_ERR_CONFIG, TKV_ERR_ARG (r or cfg is missing). */
TKV_API tkv_status tkv_init_remat(tkv_remat *r, const tkv_remat_config *cfg, char *reason, size_t size);

/* >>rematerialization in a cache. Blocks behind the sinks can be discarded. Their bytes are freed, and about 40
 * bytes per block and layer stay in the index. Discarded keys and values return only if the caller's model
 * recomputes them. Blocks are discarded front to back, in all layers at once. The last two blocks of a layer, tokens
 * younger than hot_tokens, offloaded blocks and blocks with named sinks are not discarded. Nor are blocks that another
 * sequence holds too, or that a shift has split; the blocks behind them can be.
 *
 * If a query would see discarded tokens, tkv_attend and tkv_read compute nothing and return TKV_ERR_NO_SOURCE, unless
 * cfg.recompute gives them. Such blocks return from tkv_restore and tkv_seq_recompute in the hot format.
 * Tokens behind the window do not matter, except in a layer's last two blocks. Appends continue, and tokens can
 * still be evicted. tkv_seq_reset forgets them. tkv_promote restores those with an exact copy (cfg.offload.keep_exact).
 *
 * With cfg.budget.discard under a budget, discarding is the reclaim stage after cfg.offload and before cfg.evict.
 * It takes blocks of other sequences than the one that needs memory, and none with an open step. The sequence used
 * longest ago comes first. Appends, reservations and tkv_restore count as use, but attention does not. So waiting
 * conversations give their memory to the running one. Before a conversation continues, call tkv_seq_recompute.
 * Append to conversations that run side by side as one batch, or each in a step of its own. */
/* Discards the first blocks in RAM behind the sinks, with or without a budget or cfg.budget.discard.
 *   n_tokens      most tokens; only whole blocks are discarded
 *   n_discarded   (may be NULL) receives the number of tokens discarded, of the layer that has discarded most; 0 if no
 *                 block may be discarded
 * Errors: TKV_ERR_STATE (a step is open), TKV_ERR_ARG. Cost: O(blocks). */
TKV_API tkv_status tkv_seq_discard(tkv_cache *kv, int seq, int n_tokens, int *n_discarded);
/* Finds the first run of discarded tokens, in any layer: indices *start to *start + *n - 1. *n 0: there is no such
 * run. Errors: TKV_ERR_ARG. Cost: O(blocks^2). */
TKV_API tkv_status tkv_seq_find_discarded(const tkv_cache *kv, int seq, int *start, int *n);
/* Gives recomputed K and V of the tokens with indices start to start + n - 1 to a layer. The layer takes its discarded
 * tokens among them. These must be whole blocks, beginning with the first discarded one. If no token was evicted, this
 * run is correct: from the start of tkv_seq_find_discarded, a multiple of TKV_BLOCK_TOKENS long or up to the end of the
 * run.
 *   k, v   as they were first appended, in the shapes of tkv_append
 *
 * The blocks return to their format through their last two formats, so the bytes are those of before. Exceptions: a
 * budget recoded the block more often, evicted tokens were compacted, the statistics of SQUAT changed, or tokens went
 * after the block was coded: rows of tokens that are gone do not count, so its scales fit the others better. The bytes
 * count in the budget, and other blocks are reclaimed for them, as for an append.
 * Errors, nothing changed except reclaimed blocks:
 *   TKV_ERR_STATE       earlier tokens are still discarded, or a step is open
 *   TKV_ERR_RANGE       a part of a block, or beyond the layer's length
 *   TKV_ERR_NONFINITE, TKV_ERR_BUDGET, TKV_ERR_NOMEM, TKV_ERR_CAPACITY (in place), TKV_ERR_ARG
 * Cost: an append of n tokens, and one to three codings of each block. */
TKV_API tkv_status tkv_restore(tkv_cache *kv, int seq, int layer, int start, const float *k, const float *v,
                               int n);
/* Function of the caller: recomputes tokens start to start + n - 1 of n_layers layers from first_layer on, and
 * passes them to tkv_restore. It skips layers without K and V of their own. All tokens of seq before `start`
 * are held. A status other than TKV_OK ends tkv_seq_recompute. The function may use other caches. Of this cache it
 * may use reports, tkv_read and tkv_attend. */
typedef tkv_status (*tkv_compute)(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers,
                                  int start, int n);
/* Recomputes the discarded tokens of a sequence, front to back, with one call of `compute` per run. It recomputes
 * as many blocks as r has FLOPs for in this step (tkv_seq_recompute). r->info counts them.
 *   step      a number that never falls
 *   missing   (may be NULL) receives the number of tokens still discarded
 * Errors; tokens given before an error stay:
 *   TKV_ERR_STATE   compute did not give all the tokens, or a step is open
 *   TKV_ERR_ARG     a missing pointer, `step` is below the last one, or r has fewer layers than the cache
 *   other           the status of compute */
TKV_API tkv_status tkv_seq_recompute(tkv_cache *kv, int seq, tkv_remat *r, int step, tkv_compute compute,
                                     void *user, int *missing);
/* Describes a sequence for tkv_decide_discard, sinks first, all layers together. `bytes` counts RAM. quantized_bytes
 * is the size at the next level of the ladder (without a budget: `bytes`). `discarded` is 1 if any layer discarded a
 * token. `use` is 0.
 *   out   [capacity] receives the first blocks
 *   n     receives the number of all blocks
 * Errors: TKV_ERR_ARG. Cost: O(blocks) per block. */
TKV_API tkv_status tkv_seq_list_blocks(const tkv_cache *kv, int seq, tkv_remat_block *out, int capacity,
                                       int *n);
/* Asks tkv_decide_discard how to free `need` bytes, and carries it out. It discards blocks as far as allowed. If
 * blocks are to be quantized, the whole cache goes one level down its ladder, because all sequences share the
 * level. It then recodes at most that number of blocks, oldest first, until `need` bytes are free.
 *   blocks, actions   work space for [capacity] blocks; see tkv_seq_list_blocks for the number
 *   freed             (may be NULL) receives the bytes freed
 * Errors: TKV_ERR_ARG (work space too small, or a bad number), TKV_ERR_STATE (a step is open). */
TKV_API tkv_status tkv_seq_free_bytes(tkv_cache *kv, int seq, tkv_remat *r, float pressure, size_t need,
                                      tkv_remat_block *blocks, tkv_remat_action *actions, int capacity,
                                      size_t *freed);

typedef struct tkv_promotion_state { /* fill with zeros, then set cfg */
    tkv_promotion_config cfg;
    int step, used;                        /* step of the last call; promotions at that step */
    uint64_t promoted, no_source, waiting; /* totals; no_source: calls that found some without a source */
} tkv_promotion_state;

/* >>promotion by importance. A call, at every step or less often, restores the most important blocks of a layer
 * from their best source, as tkv_promote does. The importance of a block is that of its most important token
 * (tkv_get_importance). Discarded blocks are restored by `compute`, if it is given. It recomputes all discarded
 * tokens front to back, within the FLOPs of remat (tkv_seq_recompute). Its step is the length of the layer. */
typedef struct tkv_promotion { /* fill with zeros, then set; layers that share one share its limit per step */
    tkv_promotion_state by;    /* by.cfg: threshold, limit per step, cool-down; 0: .05, 8, 4 */
    tkv_remat *remat;          /* with compute, or both NULL: discarded blocks then have no source */
    tkv_compute compute;
    void *user;
    /* results of the last call, in blocks above the threshold: */
    int promoted;  /* restored */
    int waiting;   /* not restored because of the limit, the cool-down, FLOPs or an error */
    int no_source; /* without a better source */
} tkv_promotion;
/* Promotes the most important blocks of a layer. All calls at one length of the layer are one step. The cool-down
 * counts from a block's last move: its promotion, coding or offloading, for any reason. The importance of "hybrid"
 * includes age: with tau 64, tokens younger than 115 are above the default threshold by age alone. "accumulation"
 * counts attention only.
 * Errors; earlier promotions stay, and p counts them:
 *   TKV_ERR_NO_SOURCE   blocks above the threshold exist, but none has a better source (exact blocks do not count)
 *   TKV_ERR_CONFIG      no scores are collected (cfg.importance.sample_every), or by.cfg is wrong
 *   TKV_ERR_BUDGET      usual in a full cache: nothing is reclaimed for a promotion, except to recompute
 *   TKV_ERR_ARG, and errors of tkv_promote and tkv_seq_recompute
 * Cost: O(tokens of the layer), and a fetch per promoted block. */
TKV_API tkv_status tkv_promote_important(tkv_cache *kv, int seq, int layer, tkv_promotion *p);

/* ======== 4. QUALITY ======== >>quality
 * How much does compressing lose, and what can be done about it? A and R formats learn where bits belong; a
 * calibration saves what was learned, so that the next cache compresses well from its first block. The quality
 * meter compares attention with exact copies on a sample of heads, while the cache runs. A score between 0 and 1
 * sums that up, or a perplexity, or a task's accuracy. The feedback controller turns scores into advice on hot
 * tokens and level, and tkv_adapt_plan follows the advice. The threshold store keeps what was found good for a
 * model and context length.
 *
 * Example:
 *     tkv_quality_info meter;
 *     tkv_score_params params = {0};                     // the source is the meter
 *     params.meter = &meter;
 *     st = tkv_get_quality(kv, TKV_ALL_LAYERS, &meter);  // needs cfg.meter.heads
 *     if (!st) st = tkv_compute_score(&params, &score);
 *     if (!st) st = tkv_observe_score(&feedback, score);
 *     (void)tkv_reset_quality(kv);                       // the next score uses new samples
 *     st = tkv_adapt_plan(kv, &feedback, &advice);       // puts(advice.reason) says why
 */
/* >>calibration. The A and R formats give more bits to the channels and heads that attention reads most. The cache
 * learns the necessary statistics while it runs:
 *   256 tokens seen        by a layer, over all sequences: its next append makes a table. Blocks that were due
 *                          earlier stay in the next better tier until then. Then each append of a token codes two
 *                          of them.
 *   512, 1,024, 2,048 ...  the layer makes a new table for later blocks. Older text counts less in it.
 * Where tokens come one by one, layers take turns, so some make these tables up to 63 tokens later. A layer has four
 * tables at most. A fifth takes the place of the one that fewest blocks have, which are coded again. In place, and
 * under a budget below 256 times the bytes of a table, there are two: the second comes at 2,048 tokens and is the last.
 *
 * The caller need not do anything. After a change of subject, call tkv_refresh_calibration. A table cuts
 * off ranges above four times the range seen. It also cuts off means of keys beyond +-65504. A cache can save
 * its tables for other caches of the same model. Those caches then compress from their first block on.
 *
 * KVQUANT formats learn their ranges and levels at the same points. SQUAT formats learn from the queries of 64
 * tokens, and code as KIVI until then. This state of SQUAT is not saved. Learning from attention needs atomics
 * (gcc, clang). Without atomics, the tables depend on the keys alone. Tables do not depend on the thread count.
 *
 * Load, freeze, refresh and fit return TKV_ERR_STATE in an open step. Cost of a table: O(layers * heads *
 * head_dim^2), plus decoding 16 blocks per layer. KVQUANT decodes these blocks three times. */
typedef struct tkv_calibration_info {
    int n_calibrated; /* layers that have a table */
    int n_learning; /* layers that collect statistics for a new table: all that learn, until load or freeze */
} tkv_calibration_info;
/* Reports the tables. Errors: TKV_ERR_ARG. Cost: O(layers). */
TKV_API tkv_status tkv_get_calibration(const tkv_cache *kv, tkv_calibration_info *out);
/* Saves the tables. The bytes are the same on every machine. Layers without a table are left out.
 *   buf      [size] bytes; NULL only counts
 *   needed   (may be NULL if buf is not) receives the number of bytes
 * Errors:
 *   TKV_ERR_CAPACITY   buf is too small; nothing is written
 *   TKV_ERR_ARG        a pointer is missing
 * Cost: O(bytes). */
TKV_API tkv_status tkv_save_calibration(const tkv_cache *kv, void *buf, size_t size, size_t *needed);
/* Loads saved tables. They serve the blocks coded from now on; stored blocks keep their table. Layers that get one stop
 * learning, until tkv_refresh_calibration. Any bytes are safe to try. The formats may differ from those of the cache
 * that saved. A layer whose statistics were not saved continues to learn (A and R formats share one kind, KVQUANT has
 * another).
 * Errors:
 *   TKV_ERR_DATA       damaged, or another model (layers, KV heads, head dimensions); for KVQUANT formats also
 *                      another cfg.model.rope, or bits of cfg.format.kvquant other than NORM differ
 *   TKV_ERR_CAPACITY   stored blocks use all versions of a table (four; in place two)
 *   TKV_ERR_BUDGET, TKV_ERR_NOMEM, TKV_ERR_STATE */
TKV_API tkv_status tkv_load_calibration(tkv_cache *kv, const void *src, size_t size);
/* Makes the missing tables now, from the tokens that are not yet in the archive, and stops learning.
 * Errors:
 *   TKV_ERR_STATE   a layer without a table holds no such token besides sinks, or a step is open
 *   TKV_ERR_BUDGET, TKV_ERR_NOMEM */
TKV_API tkv_status tkv_freeze_calibration(tkv_cache *kv);
/* Learns anew, for example after a change of subject. A layer that has seen 256 tokens since its last table makes the
 * pending one at its next append. The next comes after 256 more, then after 512 and so on, as from the start. Call it
 * where the subject changes, not later. Errors: TKV_ERR_BUDGET, TKV_ERR_NOMEM, TKV_ERR_STATE. */
TKV_API tkv_status tkv_refresh_calibration(tkv_cache *kv);
/* Samples for tkv_fit_calibration: keys and values of one layer, as a forward pass computes them. */
typedef struct tkv_samples {
    int layer, n;   /* layer, and number of tokens: 1 to 2^18 */
    int start;      /* position of the first token; the last position is at most 2^30 - 1 */
    int length;     /* tokens per sequence: positions return to `start` after each; 0: n */
    const float *k; /* keys [n][n_kv_heads][head_dim], after RoPE */
    const float *v; /* values [n][n_kv_heads][v_head_dim] */
    /* NULL, or the cost of an error of each value, in the shapes of k and v; not negative. Squared gradients
     * (Fisher information) are usual. If keys are coded before RoPE, k_weight refers to keys before RoPE. */
    const float *k_weight, *v_weight;
} tkv_samples;
/* Makes the layer's KVQUANT table from samples. It then serves as a loaded table; tkv_save_calibration saves it.
 * Leave out the first tokens of each sequence, because sinks stay exact. The weights of k-means are squared ranges
 * (equation 7) times the given weights.
 * Errors, nothing changed:
 *   TKV_ERR_ARG         no such layer; it has no KVQUANT formats, or also A or R; a missing pointer; a bad number
 *   TKV_ERR_NONFINITE   a value is not finite, or a weight is negative
 *   TKV_ERR_STATE       a step is open
 *   TKV_ERR_CAPACITY, TKV_ERR_BUDGET, TKV_ERR_NOMEM   as in tkv_load_calibration
 * Cost: 3 passes over the samples, and one more for each 4096 / head_dim hundreds of tokens.
 * Source: KVQuant, arXiv 2401.18079, sections 3.1 to 3.6. */
TKV_API tkv_status tkv_fit_calibration(tkv_cache *kv, const tkv_samples *s);

/* >>quality meter. The meter measures the loss by compression while the cache runs. For sampled queries, tkv_attend
 * computes attention a second time, with exact copies in place of the coded blocks. It then compares both results.
 * "Exact" means the values that the hot tier held. Windows, masks, ALiBi, soft caps, learned sinks and batches are
 * those of the call.
 *
 * The meter watches cfg.meter.heads KV heads, spread over the layers. Layers that share K and V count as the
 * layer that stores them. The meter watches one sequence: the first to begin. After its reset, the meter watches
 * the next sequence to begin.
 *
 * When the sequence has more coded tokens than cfg.meter.tokens, only every second block has a copy, then every
 * fourth, and so on. Other blocks are the same on both sides. `coverage` is the share of keys with a copy. The
 * figures include the errors of covered blocks only, so they are too low. If the errors of blocks are independent,
 * estimate the whole by output_error / coverage, kl / coverage and 1 - (1 - top1) / coverage. An error common to
 * all blocks is still estimated too low.
 *
 * tkv_attend returns the same bits with and without a meter. Figures do not depend on threads. Every call counts,
 * even a repeated one. tkv_create allocates the memory: per head, meter.tokens * (head_dim + v_head_dim) values
 * in the hot format (tkv_memory_info.exact_copies). The meter needs atomics (gcc, clang). Without atomics, there
 * is no meter, and samples stay 0. */
typedef struct tkv_quality_info {
    uint64_t samples;    /* number of comparisons: one query of one query head each */
    double coverage;     /* of the coded keys that samples saw, the share with a copy, 0 to 1; 1 if none */
    double output_error; /* mean of |out - exact|^2 / |exact|^2; one sample counts as 16 at most */
    double kl;           /* mean KL divergence of attention weights, exact to cached, in nats; same limit */
    double kl_max;       /* largest KL divergence of a sample, in nats; at most 16 */
    double top1;         /* share of samples with one strongest key on both sides; ignores learned sinks */
    int heads, every;    /* KV heads watched; positions from one measurement of a head to its next */
    int seq;             /* the sequence watched; TKV_NO_SEQ before one has begun */
} tkv_quality_info;
/* Reports all samples since creation or tkv_reset_quality. Without samples, the measured values are 0. Without a
 * meter, all fields are 0 and seq is TKV_NO_SEQ.
 *   layer   TKV_ALL_LAYERS, or one layer; if the meter watches none of its heads, there are no samples
 * Errors: TKV_ERR_ARG (a pointer is missing, or the layer has no cache). Cost: O(heads). */
TKV_API tkv_status tkv_get_quality(const tkv_cache *kv, int layer, tkv_quality_info *out);
/* Sets all sums to 0. The exact copies stay. Counts as a write. */
TKV_API tkv_status tkv_reset_quality(tkv_cache *kv);

/* >>quality feedback. A feedback controller turns quality scores into advice. A score is 0 to 1, and 1 means no
 * loss. If the mean score is below the target, it advises more hot tokens and one level of higher precision. If the
 * mean is well above the target, it advises the opposite. Level 0 has the highest precision, as in tkv_pressure.
 * The controller is independent of any cache and owns no memory: the caller's struct holds it.
 *
 *   score  0 ............................ target ........ (1 + target) / 2 .......... 1
 *   advice   hot x 1.2, level - 1        |      nothing       |   hot x 0.9, level + 1
 *
 * The mean is taken over the last 16 to 100 scores. Scores from before the last change of plan do not count. Scores
 * of the cool-down after a change do not count either. With fewer than 100 scores, the mean must be beyond a limit
 * by two standard errors (of independent scores). For higher precision, it is enough if the mean of the last 16
 * scores is below the target by three. The controller remembers the gain of a step to higher precision for 1,000
 * scores. Until then it advises no step back that would lose this gain. At constant quality it therefore tries a
 * cheaper plan at most once in 1,000 scores. */
#define TKV_FEEDBACK_HISTORY 1000
typedef struct tkv_feedback_config {
    /* Target of the mean score, .01 to .9999; 0: .97, which allows a perplexity 3 % higher. For another allowance,
     * set tkv_compute_score of (base, base + allowed). */
    float target;
    int cooldown;  /* scores ignored after a change of plan, at most 1000; 0: 8; TKV_OFF: none */
    int min_hot;   /* fewest hot tokens advised; 0: 32 */
    int max_hot;   /* most hot tokens advised; 0: 1024 */
    int min_level; /* lowest level advised (highest precision) */
    int max_level; /* highest level advised; 0: 3, the plan of the config in the default ladder; TKV_OFF: 0 */
} tkv_feedback_config;
typedef enum tkv_advice_kind { TKV_ADVICE_KEEP = 0, TKV_ADVICE_FINER, TKV_ADVICE_CHEAPER } tkv_advice_kind;
typedef struct tkv_advice {
    tkv_advice_kind kind;
    int hot_tokens, level; /* the advised plan; the given plan if nothing should change */
    int step;              /* change of the level: -1 higher precision, +1 lower precision, 0 none */
    float mean;            /* mean score behind the advice */
    int samples;           /* number of scores in that mean */
    const char *reason;    /* a sentence, never NULL */
} tkv_advice;
typedef struct tkv_feedback_info {
    int n; /* number of newest scores that average to is_stable describe; if 0, these fields are 0 */
    float average, least, most;
    float deviation;  /* standard deviation of the sample; 0 with fewer than 2 scores */
    float trend;      /* mean change from one score to the next: the slope of the fitted line */
    int meets_target; /* 1: the average is at or above the target */
    int is_improving; /* 1: at least 16 scores, and the trend is above 0 by two standard errors */
    int is_stable;    /* 1: at least 16 scores; deviation and change along the line <= (1 - target) / 2 */
    uint64_t scores, refused; /* scores accepted; scores refused as NaN, infinite or not in 0 to 1 */
    uint64_t finer, cheaper;  /* times that higher or lower precision was advised */
} tkv_feedback_info;
typedef struct tkv_feedback { /* private: initialise with tkv_init_feedback, read with tkv_get_feedback */
    int lock;
    tkv_feedback_config cfg;
    int hot, level, moved;     /* the plan of the scores; moved: the plan may have changed since */
    float low, gain;           /* mean before the last step to higher precision, and its gain; -1: unknown */
    uint64_t since, gained_at; /* indices of scores */
    uint64_t sum, squares;     /* sums over the newest scores from `since` on, at most 100 */
    uint64_t scores, refused, finer, cheaper;
    uint32_t history[TKV_FEEDBACK_HISTORY]; /* ring of scores, in units of 2^-24 */
} tkv_feedback;
/* Where a quality score comes from. */
typedef enum tkv_score_source {
    TKV_SCORE_METER = 0, /* 1 - weight * output_error / coverage, from the quality meter */
    TKV_SCORE_PERPLEXITY, /* 1 - (value - base) / base; base: of the exact cache on the same text; both at least 1 */
    TKV_SCORE_ACCURACY, /* value / base; base: with the exact cache, above 0 */
    TKV_SCORE_COUNT
} tkv_score_source;
typedef struct tkv_score_params { /* fill with zeros first */
    tkv_score_source source;
    double base, value;            /* PERPLEXITY, ACCURACY */
    const tkv_quality_info *meter; /* METER: with samples, and a coverage of at least .05 */
    /* METER: the rise of perplexity per output_error, a property of the model. It is about 1 for SmolLM2-135M, and
     * about 1/3 and 3 for two smaller models. 0: 1. Call tkv_reset_quality between two scores, so that each uses new
     * samples. Heads differ much, so watch many of them. */
    double weight;
} tkv_score_params;
/* Computes a score, limited to 0 to 1. Errors, *score unchanged: TKV_ERR_RANGE (a number is not finite or out of
 * range, or no samples), TKV_ERR_ARG (a missing pointer). */
TKV_API tkv_status tkv_compute_score(const tkv_score_params *p, float *score);
/* Starts a controller; also starts it again. cfg NULL: all defaults. `reason` and `size` as in tkv_validate_config.
 * Errors, f unchanged: TKV_ERR_CONFIG, TKV_ERR_ARG (f is missing). */
TKV_API tkv_status tkv_init_feedback(tkv_feedback *f, const tkv_feedback_config *cfg, char *reason,
                                     size_t size);
/* Adds one score, 0 to 1. Any thread may call it (gcc, clang).
 * Errors: TKV_ERR_ARG (the score is refused and counted). Cost: a few ns. */
TKV_API tkv_status tkv_observe_score(tkv_feedback *f, float score);
/* Advises on a plan of hot_tokens at `level`. The controller assumes that the caller follows the advice. After
 * advice to change, the next advice needs new scores. It also needs new scores if the plan changed otherwise since
 * the last call, for example by pressure. Any thread may call it (gcc, clang). Only one thread should follow it.
 * Errors, nothing changed:
 *   TKV_ERR_ARG   a missing pointer; hot_tokens not in 0 to 2^30 - 1; level not in 0 to TKV_MAX_LEVELS - 1
 * Cost: about 100 ns. */
TKV_API tkv_status tkv_get_advice(tkv_feedback *f, int hot_tokens, int level, tkv_advice *out);
/* Reports the newest scores. Any thread may call it (gcc, clang).
 *   last   number of scores, 0 to 1,000; 0: 100. If fewer scores exist, all of them count.
 * Errors: TKV_ERR_ARG. Cost: a few microseconds. */
TKV_API tkv_status tkv_get_feedback(tkv_feedback *f, int last, tkv_feedback_info *out);
/* Asks for advice on the cache's plan and carries it out. It sets hot_tokens (tkv_set_hot_tokens) and a level of
 * cfg.budget.ladder or cfg.budget.adapt within cfg.budget.pressure, for later tokens. Under a budget memory decides the
 * level, so only hot_tokens change. In place without a budget nothing changes. *out (may be NULL) receives the change
 * made. Counts as a write.
 * Errors: TKV_ERR_ARG; TKV_ERR_UNSUPPORTED (levels by length that do not go from loose to tight) */
TKV_API tkv_status tkv_adapt_plan(tkv_cache *kv, tkv_feedback *f, tkv_advice *out);

/* >>threshold store. The store keeps good plans for models, by model name, layer and context length. It is a sorted
 * array of the caller's. A program can save it as a text with a checksum. No function allocates. */
#define TKV_MODEL_NAME 64
typedef struct tkv_threshold {
    char model[TKV_MODEL_NAME]; /* 1 to 63 bytes, final zero; no control characters, no blank at an end */
    int layer;                  /* layer, 0 to 4095, or TKV_ALL_LAYERS: the plan serves all layers together */
    int context;                /* context length in tokens, 1 to 2^30 - 1 */
    int hot_tokens, warm_tokens; /* as in tkv_config, with 0, TKV_OFF and TKV_UNLIMITED */
    tkv_format_pair archive;     /* formats of the archive tier */
    float score;                 /* mean quality score, 0 to 1; 1: no loss; rounded to millionths */
    int samples;                 /* number of scores in that mean; 0: the score is a guess */
} tkv_threshold;
typedef struct tkv_thresholds { /* begin with: tkv_thresholds t = {memory, 0, room}; */
    tkv_threshold *entry;       /* [room] entries, sorted by model, layer, context */
    int n, capacity;            /* entries in use; entries that fit */
} tkv_thresholds;
/* Adds an entry, or replaces the entry of the same model, layer and context.
 * Errors, nothing changed:
 *   TKV_ERR_ARG        a field is out of range
 *   TKV_ERR_CAPACITY   the array is full
 * Cost: O(n). */
TKV_API tkv_status tkv_put_threshold(tkv_thresholds *t, const tkv_threshold *e);
/* Finds the best entries of a model for this layer and context length. An entry must belong to the layer or to
 * TKV_ALL_LAYERS. Order: the layer before TKV_ALL_LAYERS; then least difference of context, higher score, more
 * samples, longer context.
 *   out     [most] receives the entries, best first; `most` is at least 1; TKV_THRESHOLD_CANDIDATES is usual
 *   found   (may be NULL) receives their number
 * Errors, out unchanged:
 *   TKV_ERR_RANGE   no entry for this model and layer, or layer or context is out of range
 *   TKV_ERR_ARG     a pointer is missing, or most is below 1
 * Cost: O(n * most). */
#define TKV_THRESHOLD_CANDIDATES 10
TKV_API tkv_status tkv_find_thresholds(const tkv_thresholds *t, const char *model, int layer, int context,
                                       tkv_threshold *out, int most, int *found);
/* Applies an entry to a config: its hot_tokens, warm_tokens and archive. An entry of TKV_ALL_LAYERS sets cfg->tiers,
 * and settings of layers stay. An entry of one layer sets layers[e->layer].
 *   cfg      the whole config, with cfg->model; it must be valid with the entry
 *   layers   NULL, or the array of cfg->layers, which an entry of one layer needs. If cfg has none: an array of zeros
 *            with model.n_layers entries, which becomes cfg->layers.
 *   reason   (may be NULL) receives one sentence, as from tkv_validate_config
 * Errors, cfg and layers unchanged:
 *   TKV_ERR_ARG           a pointer is missing, a field of the entry is out of range, or layers is another array
 *   TKV_ERR_RANGE         cfg has no such layer
 *   TKV_ERR_CONFIG        the config would be invalid
 *   TKV_ERR_UNSUPPORTED   the entry needs what a TKV_NO_ switch leaves out
 * Cost: that of tkv_validate_config. */
TKV_API tkv_status tkv_apply_threshold(tkv_config *cfg, tkv_layer_config *layers, const tkv_threshold *e,
                                       char *reason, size_t size);
/* Copies a model's entries to a similar model, such as a fine-tuned copy. Existing entries of `to` stay. The caller
 * must know that both models are similar, because equal shapes do not prove it. Other functions match exact names
 * only.
 *   discount   factor for the scores, above 0 to 1; 0: .9. The copies have samples 0.
 * Errors, nothing changed:
 *   TKV_ERR_RANGE      nothing to copy
 *   TKV_ERR_CAPACITY   the array is full
 *   TKV_ERR_ARG        a bad name, equal names, or a bad discount */
TKV_API tkv_status tkv_copy_thresholds(tkv_thresholds *t, const char *from, const char *to, float discount);
/* Writes the store as a text: a version line, a line per entry, a checksum line. Equal stores give equal texts.
 * `buf`, `size` and `needed` as in tkv_print_config. Errors: TKV_ERR_CAPACITY (nothing written), TKV_ERR_ARG. */
TKV_API tkv_status tkv_print_thresholds(const tkv_thresholds *t, char *buf, size_t size, size_t *needed);
/* Replaces all entries by those of a text. Any bytes are safe to try. `reason` (may be NULL) receives the line and
 * its error.
 * Errors, nothing changed:
 *   TKV_ERR_DATA       damaged, or another version
 *   TKV_ERR_CAPACITY   more entries than the array holds */
TKV_API tkv_status tkv_parse_thresholds(tkv_thresholds *t, const char *src, size_t size, char *reason,
                                        size_t reason_size);

/* ======== 5. TOOLS ======== >>tools
 * Parts of the library that work alone, and help for tests and tools. The codec applies the formats to one head's
 * block of up to 64 tokens. tkv_attend_reference computes attention in double, for tests. tkv_merge_attention
 * joins attention over two sets of keys, such as a cache and a shared document. tkv_check tests all invariants of
 * a cache. Configs can be read from a text and written to one; a report of a running cache is JSON or Prometheus
 * text. The rules of the pressure controller, of importance, eviction and recomputation are pure functions on
 * arrays of the program.
 *
 * Example:
 *     tkv_codec codec = {0};
 *     codec.format = TKV_KIVI4, codec.side = TKV_K, codec.head_dim = 64;
 *     if (tkv_get_block_bytes(&codec) <= sizeof bytes) st = tkv_encode_block(&codec, k, 0, 64, bytes, sizeof bytes);
 *     if (!st) st = tkv_decode_block(&codec, bytes, sizeof bytes, 64, out, 0);
 *     if (tkv_check(kv, reason, sizeof reason)) puts(reason);
 *     st = tkv_print_report(kv, TKV_REPORT_JSON, NULL, text, sizeof text, NULL);
 */
/* >>codec. The codec applies the formats without a cache. It codes up to 64 tokens of one head as a block of bytes.
 * The bytes do not depend on the machine. SQUAT formats code as KIVI here, because no queries exist. KVQUANT
 * formats have no learned table here. So coded K contains the ranges of its block, 32 bits per channel more than in
 * a cache. The levels are those of a normal distribution. */
typedef struct tkv_codec { /* fill with zeros first */
    tkv_format format;
    tkv_side side;
    int head_dim; /* 1 to 576; SQUAT formats: to 256 */
    tkv_format_options options;
    tkv_rope rope; /* as in tkv_config; tkv_encode_block and tkv_decode_block also read its frequencies */
    int position;  /* position of the first token, for rope; tkv_decode_block reads it from the bytes */
} tkv_codec;
TKV_API size_t tkv_get_block_bytes(
    const tkv_codec *c); /* bytes of a block, metadata included; 0 if the codec is not valid */
/* Encode or decode a block. This scalar code defines the formats. Any bytes are safe to decode, but only encoded
 * bytes give meaningful values.
 *   x          [n_tokens][head_dim], with `stride` floats from a token to the next; stride 0: head_dim
 *   n_tokens   1 to 64
 *   dst, src   `size` bytes, at least tkv_get_block_bytes, of any alignment
 * Errors, nothing written:
 *   TKV_ERR_ARG         a bad codec or number, a stride below head_dim, or a short buffer
 *   TKV_ERR_NONFINITE   tkv_encode_block: a value is not finite
 * Cost: O(64 * head_dim). */
TKV_API tkv_status tkv_encode_block(const tkv_codec *c, const float *x, ptrdiff_t stride, int n_tokens,
                                    void *dst, size_t size);
TKV_API tkv_status tkv_decode_block(const tkv_codec *c, const void *src, size_t size, int n_tokens, float *x,
                                    ptrdiff_t stride);

/* Computes the same as tkv_attend_ex in double, for tests. This slow function defines the result: it decodes every
 * key and value, again for each row. Errors: as tkv_attend_ex. */
TKV_API tkv_status tkv_attend_reference(tkv_cache *kv, const tkv_attend_params *p);
/* Joins attention over two disjoint sets of keys: out and lse become those of the union. out and out2 are
 * [n_rows][dim], lse and lse2 are [n_rows]; none may be NULL. An lse that is not finite marks a row without keys.
 * Learned sinks may be part of one set only. If n_rows or dim is below 1, nothing is written. Cost:
 * O(n_rows * dim). Source: arXiv 2307.08691, section 3. */
TKV_API void tkv_merge_attention(float *out, float *lse, const float *out2, const float *lse2, int n_rows,
                                 int dim);
/* Checks all invariants. Each block is in one list, and no slot is used twice. Positions have no gaps. Tiers are in
 * order and follow age. Byte counts agree. `reason` and `size` as in tkv_validate_config.
 * Errors: TKV_ERR_BROKEN, TKV_ERR_ARG. Cost: O(blocks). */
TKV_API tkv_status tkv_check(const tkv_cache *kv, char *reason, size_t size);

/* The build of the library, and the kernels of a cache. */
typedef struct tkv_build_info {
    int version;         /* TKV_VERSION of the linked implementation */
    size_t config_bytes; /* sizeof(tkv_config) there; a binding compares it with its own struct's size */
    uint32_t isa_mask;   /* bit i is set if this machine and build can run tkv_isa i */
    tkv_isa isa;         /* the instruction set that the cache runs on; TKV_ISA_AUTO without a cache */
} tkv_build_info;
/* Reports the build. kv may be NULL. Errors: TKV_ERR_ARG (out is missing). Cost: a few ns. */
TKV_API tkv_status tkv_get_build(const tkv_cache *kv, tkv_build_info *out);
/* Values with names. The names stand in config texts, too. */
typedef enum tkv_name_kind {
    TKV_NAME_FORMAT = 0,   /* tkv_format, such as "kivi4" */
    TKV_NAME_ISA,          /* tkv_isa, such as "avx2" */
    TKV_NAME_PRESET,       /* presets of tkv_apply_preset, numbered 0, 1, ... */
    TKV_NAME_EVICT_POLICY, /* tkv_evict_policy, such as "h2o" */
    TKV_NAME_IMPORTANCE,   /* tkv_importance_strategy, such as "hybrid" */
    TKV_NAME_PROFILE,      /* tkv_pressure_profile, such as "aggressive" */
    TKV_NAME_COUNT
} tkv_name_kind;
/* Returns the name of a value; NULL if there is no such kind or value. */
TKV_API const char *tkv_get_name(tkv_name_kind kind, int value);
/* Finds the value of a name. Except with TKV_NO_REPORTS, "fp16", "fp8" and "q4" are names of f16, fp8-e4m3 and kivi4,
 * here and in texts. Errors, *value unchanged: TKV_ERR_RANGE (unknown name), TKV_ERR_ARG. */
TKV_API tkv_status tkv_find_name(tkv_name_kind kind, const char *name, int *value);

/* >>texts. A config as text is lines `key = value`, TOML, or one JSON object. A text that begins with a brace is JSON.
 * In all forms # begins a comment. Keys are names of fields. The text may be any bytes.
 *   key       model.n_layers, model.rope.dim, layers[3].window; for layers 0 to 5: layers[0-5].window
 *   table     [model.rope], [layers.3] or [layers.0-5]; the keys below it are relative to it
 *   object    {"model": {"rope": {"dim": 64}}, "layers": {"0-5": {"window": 1024}}}, or { dim = 64 } in TOML
 *   entries   [[layers]] for the next layer, or a list of objects; null leaves an entry as it is
 *   string    "in quotes", 'in quotes' or, in lines, without
 *   length    a number, off or unlimited
 *   switch    false or true
 *   formats   a30/r20 for K and V, or one name for both; fp16, fp8, q4 are read as f16, fp8-e4m3, kivi4
 *   bytes     a number with K, M, G or T (powers of 1024), such as 512K or 1.5G
 *   number    underscores between digits do not count: 1_024
 *   list      numbers with commas between them, in [ ] or not; budget.ladder[i] needs budget.n_levels
 *   bits      names joined by +, such as format.fit = clip+norm
 *   preset    a name for tkv_apply_preset; applied before all keys except limits.max_tokens
 * Not read: escapes in strings, and numbers in other bases than 10.
 * The macro TKV_NO_REPORTS removes all functions of this section. */
/* The form in which tkv_print_config writes. Each of them is read back. */
typedef enum tkv_text_style {
    TKV_TEXT_LINES = 0,   /* lines `key = value`, with whole paths as keys */
    TKV_TEXT_JSON,        /* one flat JSON object, with whole paths as keys */
    TKV_TEXT_TOML,        /* TOML 1.0: a table for each group, [layers.3] for a layer */
    TKV_TEXT_JSON_NESTED, /* JSON: an object for each group, "layers": {"3": { }} for a layer */
    TKV_TEXT_COUNT
} tkv_text_style;
/* Memory of the caller for the arrays of a parsed config. It must live as long as the config uses them. */
typedef struct tkv_config_arrays {
    tkv_layer_config *layers;
    int n_layers; /* entries of layers: at least those of the config */
    tkv_level *ladder;
    int n_levels; /* entries of ladder: at least the levels of the config */
    float *frequencies;
    /* entries of frequencies: at least rope.dim / 2 for each list in the text, of the model and of layers */
    int n_frequencies;
} tkv_config_arrays;
/* Reads a config from a text and sets the fields named there. Other fields stay, so begin with zeros. Use
 * tkv_validate_config to check the whole config.
 *   room     (may be NULL) memory for layers, levels or rope.frequencies of the text; they replace those of cfg
 *   reason   (may be NULL) receives the line and what would be correct
 * Errors, cfg and room unchanged:
 *   TKV_ERR_CONFIG   an unknown key, a bad value, a key twice, or room is too small
 *   TKV_ERR_ARG      a pointer is missing
 * Cost: O(size), three times; 22 KB of stack. */
TKV_API tkv_status tkv_parse_config(tkv_config *cfg, const tkv_config_arrays *room, const char *text,
                                    size_t size, char *reason, size_t reason_size);
/* Writes the fields that are not 0, with a final zero. tkv_parse_config restores the same config. Allocator,
 * parallel_for, cfg.recompute and canaries have no text.
 *   style    a tkv_text_style
 *   buf      [size] bytes; NULL only counts
 *   needed   (may be NULL if buf is not) receives the bytes needed, final zero included
 * Errors:
 *   TKV_ERR_CAPACITY   buf is too small; nothing is written
 *   TKV_ERR_CONFIG     a field has no text (NaN, or no such format)
 *   TKV_ERR_ARG        there is no such style, or a pointer is missing
 * Cost: O(size), twice. */
TKV_API tkv_status tkv_print_config(const tkv_config *cfg, int style, char *buf, size_t size, size_t *needed);

typedef enum tkv_report_kind {
    TKV_REPORT_JSON = 0,   /* one JSON object */
    TKV_REPORT_PROMETHEUS, /* the figures in Prometheus text format, version 0.0.4 */
    TKV_REPORT_COUNT
} tkv_report_kind;
/* Writes a report of the cache. `buf`, `size` and `needed` as in tkv_print_config. The JSON object contains:
 *   version, isa, and the config, readable by tkv_parse_config; lengths and formats that were left 0 are not printed
 *   formats of each layer's tiers
 *   for each existing sequence: lengths and tokens per tier, as arrays over layers (null: no cache of its own)
 *   figures: memory, tokens, sequences, budget, reclaim, quality (null without a meter)
 * labels   PROMETHEUS: NULL, or labels for every line: name=value, name=value. Values are UTF-8; the function escapes
 *          them. Write a backslash before a comma or backslash in a value.
 * Errors:
 *   TKV_ERR_CAPACITY   buf is too small; nothing is written
 *   TKV_ERR_ARG        bad labels (part, tier, version and isa are reserved), or kind
 * Cost: O(blocks), twice. */
TKV_API tkv_status tkv_print_report(const tkv_cache *kv, tkv_report_kind kind, const char *labels, char *buf,
                                    size_t size, size_t *needed);

/* >>ages and presets. Returns the tier for an age by the lengths of cfg (NULL: defaults). It is hot below
 * hot_tokens, warm for warm_tokens more, then archive. The newest token has age 0. This is a pure function. In a
 * cache, whole blocks move, before an append, and layers have delays (tkv_tiers_config). So a token can change its
 * tier up to 126 ages later (tkv_get_tiers), and sinks stay hot. */
TKV_API tkv_tier tkv_compute_tier(const tkv_config *cfg, int age);

typedef struct tkv_pressure { /* private: initialise with tkv_init_pressure, read with tkv_get_pressure */
    int lock;
    tkv_pressure_config cfg;
    tkv_pressure_info now;
} tkv_pressure;
/* Starts a controller at cfg.min_level; also starts it again. cfg NULL: all defaults. `reason` and `size` as in
 * tkv_validate_config. Errors, p unchanged: TKV_ERR_CONFIG, TKV_ERR_ARG (p is missing). */
TKV_API tkv_status tkv_init_pressure(tkv_pressure *p, const tkv_pressure_config *cfg, char *reason,
                                     size_t size);
/* Adds one pressure, limited to 0 to 1, and returns the level. Any thread may call it (gcc, clang).
 * Cost: tens of ns. */
TKV_API int tkv_observe_pressure(tkv_pressure *p, float pressure);
/* Reports the controller's state. Any thread may call it (gcc, clang). Errors: TKV_ERR_ARG. */
TKV_API tkv_status tkv_get_pressure(tkv_pressure *p, tkv_pressure_info *out);
/* Applies the rule alone: returns the level after `level` at this average. Returns 0 for a bad config. A NaN or an
 * infinity moves nothing. */
TKV_API int tkv_compute_level(const tkv_pressure_config *cfg, float average, int level);

/* >>what to keep. These are rules for importance, eviction and recomputation: pure functions and small structs of
 * the caller. They take arrays over the tokens of a layer (or a sequence) and return a decision. They are
 * independent of any cache and allocate nothing. Decisions are the same on every machine, except for the rounding
 * of scores. Of equal tokens, the older is evicted first.
 *
 * An array has one entry per slot, oldest first, for n slots (0 to 2^30 - 1). Slot i has bit i % 64 of word i / 64
 * in a mask, so one word covers a block of 64 tokens.
 *
 * The importance of a token at step `now` follows from its attention score A and its age:
 *     attention * A(now) + recency * e^(-(now - position) / tau)
 * When a step adds its attention score, A is first multiplied by decay^(now - last step). Then the score is added.
 * For heavy_hitter, A becomes the larger of both. For persistence, A loses 1 if the score is below `low`. A token
 * without new attention needs no update. The order of calls within a step does not matter. Recency is computed at
 * the moment of reading. It does not depend on how often a token got attention. */
typedef struct tkv_token_importance { /* of one token; all zero: it never got attention */
    float attention;                  /* A, the accumulated attention score as of `step` */
    int step;                         /* last step that added to it */
} tkv_token_importance;
/* Adds one step's attention scores to n tokens, and computes their importance.
 *   positions   [n] positions; NULL: 0 to n - 1
 *   scores      NULL: adds none. [n] scores of step `now`, finite and not negative
 *   now         the step, 0 or more: for recency, the position of the newest token
 *   out         NULL, or [n] receives the importance at step `now`
 * Errors, nothing changed:
 *   TKV_ERR_ARG         a missing pointer; `now` is negative, before a token's last step or before its position
 *   TKV_ERR_NONFINITE   a score is negative or not finite
 *   TKV_ERR_CONFIG      cfg has a field out of range
 * Cost: O(n). */
TKV_API tkv_status tkv_update_importance(const tkv_importance_config *cfg, tkv_token_importance *tokens,
                                         const int *positions, const float *scores, int n, int now,
                                         float *out);
/* Returns an upper bound of q.k for all keys between `low` and `high` in each channel, such as the keys of a block.
 * Use it for tokens without known weights. All arrays are [head_dim]. Source: Quest, arXiv 2406.10774. */
TKV_API float tkv_bound_score(const float *q, const float *low, const float *high, int head_dim);

/* >>eviction. These functions choose the tokens to evict, so that at most `keep` stay. A policy gives every token a
 * score. The tokens with the lowest scores are evicted, all at once. Selection is per layer, so scores of heads
 * are combined first. The policies are defined in rules/evict.h. */
typedef struct tkv_evict_view {
    int n;                       /* number of slots */
    const uint64_t *live_mask;   /* mask of live tokens; other slots are not read. NULL: all slots are live */
    const int *positions;        /* rising and not negative; a cache gives indices; NULL: 0 to n - 1 */
    const uint64_t *pinned_mask; /* NULL, or mask of tokens that stay in any case */
    /* NULL, or priorities: all tokens of a lower priority are evicted before one of a higher. 0 is usual, and -128
     * suits expired tokens. */
    const signed char *priorities;
    const float *total_scores;  /* attention score since the token came, summed over queries and heads */
    const float *prompt_scores; /* attention score from the prompt's last cfg.recent_tokens queries alone */
    const float *last_scores;   /* attention weights of the last query, mean over heads */
    const float *norms;         /* norms of keys, mean of |k| over KV heads */
    const float *keys;          /* [n][n_kv_heads][head_dim] */
    int n_kv_heads, head_dim;
    /* How often a weight was below an even share: A of "persistence", negated or not. The caller sets tokens to 0
     * to begin a history window, for example after each batch. */
    const float *low_counts;
    const float *user_scores; /* scores of the caller; tokens with high scores stay */
} tkv_evict_view;
typedef struct tkv_evict_result {
    int evicted, kept; /* live tokens to evict; live tokens left */
    int over;          /* kept - keep, if pinned tokens exceed the budget; else 0 */
    int sinks, recent; /* sinks and recent tokens protected, after a small budget reduced them */
} tkv_evict_result;
/* Chooses the live tokens to evict, so that at most `keep` stay. High scores stay, and pinned tokens in any case.
 *   score     [view->n] receives the policy's scores; a slot without a live token gets 0
 *   victims   receives a mask of (n + 63) / 64 words; must not overlap the masks of `view`
 *   out       (may be NULL) receives the counts
 * Errors:
 *   TKV_ERR_BUDGET      the policy is "none", and more than `keep` tokens are live
 *   TKV_ERR_NONFINITE   a live token's score is not finite; `score` is then unusable
 *   TKV_ERR_CONFIG      cfg has a field out of range
 *   TKV_ERR_ARG         view lacks an input of the policy, or a number is wrong
 * Cost: O(n), 1 KiB of stack; "keydiff" O(n * n_kv_heads * head_dim). */
TKV_API tkv_status tkv_select_victims(const tkv_evict_config *cfg, const tkv_evict_view *view, int keep,
                                      float *score, uint64_t *victims, tkv_evict_result *out);
/* Token budgets of layers. `total` tokens are shared among all layers, and the shares sum to `total` exactly.
 * Fractions of tokens go to the largest remainders; of equal remainders, to the lower layer. */
typedef enum tkv_evict_shape {
    TKV_EVICT_UNIFORM = 0, /* equal shares */
    /* PyramidKV: layer l gets w + max - l * (max - min) / (n_layers - 1). Here C = total / n_layers,
     * min = (C - w) / beta and max = 2 (C - w) - min. If max > n - w: max = n - w, min = 2 (C - w) - max.
     * Uniform unless max >= min >= w. */
    TKV_EVICT_PYRAMID,
    TKV_EVICT_LINEAR /* layer l of L gets a share proportional to L - l, and at least 1 */
} tkv_evict_shape;
typedef struct tkv_evict_budget {
    tkv_evict_shape shape;
    int n_layers;  /* 1 to 4096 */
    int64_t total; /* tokens of all layers, 0 to n_layers * (2^30 - 1); LINEAR: at least n_layers */
    int n_tokens;  /* n: length of the sequence, for PYRAMID, 0 to 2^30 - 1 */
    int window;    /* w: tokens that every layer keeps; 0: 8, as in the paper; TKV_OFF: none */
    int beta;      /* steepness of PYRAMID, 1 to 100; 0: 20 */
} tkv_evict_budget;
/* Computes the token budget of each layer.
 *   out   [n_layers] receives the budgets
 * Errors: TKV_ERR_ARG (a number is out of range). Cost: O(n_layers).
 * Source of PYRAMID: PyramidKV, arXiv 2406.02069. */
TKV_API tkv_status tkv_split_evict_budget(const tkv_evict_budget *b, int *out);

/* Decides which blocks to discard and which to quantize, so that `need` bytes become free. Below the threshold it
 * keeps all blocks. Otherwise:
 *   1. It discards blocks, front to back behind the sinks, while that costs fewer FLOPs per byte than quantizing.
 *      The cost is multiplied by the probability of use: use / (1 + age / age_tokens).
 *   2. It quantizes blocks, oldest first.
 *   3. It discards more blocks.
 * At least min_materialized tokens stay. A block that costs more than step_flops is never discarded.
 *   blocks   [n] all blocks, oldest first
 *   now      position of the newest token
 *   action   [n] receives the decisions
 *   freed    (may be NULL) receives the bytes; less than `need` if no more can be freed
 * Errors, nothing changed: TKV_ERR_ARG (blocks are out of order, or a bad number). Cost: O(n). */
TKV_API tkv_status tkv_decide_discard(tkv_remat *r, const tkv_remat_block *blocks, int n, int now,
                                      float pressure, size_t need, tkv_remat_action *action, size_t *freed);

#ifdef __cplusplus
}
#endif
#endif /* TIEREDKV_H */
