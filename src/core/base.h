/*
 * core/base.h - the foundation of all other files: bits of floats, half floats, rounding, checked sizes, memory,
 * short texts without stdio, spin locks. It calls memcpy and, without TKV_NO_MALLOC, malloc and free.
 *
 * The application compiles this header with its own flags. The code therefore takes four precautions:
 *
 *    NaN and infinity are recognised by their bits, because -ffast-math folds x != x
 *    rounding reads the sum as an integer, and does not compute (x + M) - M
 *    bytes are loaded one by one, for alignment, aliasing and endianness
 *    tkvi_f32 rounds each float operation that decides a stored byte, because x87 keeps excess precision
 */
#ifndef TKVI_CORE_BASE_H
#define TKVI_CORE_BASE_H

#include "api.h"
#include "core/switches.h"

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

/* Mark functions and constant tables that src/cuda also uses on the GPU. nvcc compiles the file twice, for host
 * and GPU, and GPU code cannot read the host's tables. */
#ifdef __CUDACC__
#define TKVI_FN static __host__ __device__
#else
#define TKVI_FN static
#endif
#ifdef __CUDA_ARCH__
#define TKVI_CONSTANT static __device__ const
#else
#define TKVI_CONSTANT static const
#endif

/* Aligns an array that SIMD code reads in steps of 64 bytes: no load then touches two cache lines. */
#if defined(__GNUC__) || defined(__clang__)
#define TKVI_ALIGNED __attribute__((aligned(64)))
#elif defined(_MSC_VER)
#define TKVI_ALIGNED __declspec(align(64))
#else
#define TKVI_ALIGNED
#endif

/* Checks what cannot be false. TKV_ASSERT(condition) turns the checks on: -include assert.h -DTKV_ASSERT=assert. */
#ifdef TKV_ASSERT
#define TKVI_ASSERT(condition) TKV_ASSERT(condition)
#else
#define TKVI_ASSERT(condition) ((void)0)
#endif

/* >>bits */
TKVI_FN uint32_t tkvi_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

TKVI_FN float tkvi_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

TKVI_FN int tkvi_is_finite(float x) { return (tkvi_bits(x) & 0x7f800000u) != 0x7f800000u; }

TKVI_FN int tkvi_is_nan(float x) { return (tkvi_bits(x) & 0x7fffffffu) > 0x7f800000u; }

/* Rounds a value to float where the compiler evaluates expressions in a wider type. After one + - * / in 64
 * bits, the rounding to 24 bits is the IEEE result (64 >= 2 * 24 + 2). So x87 encodes the same bytes as other
 * machines. */
TKVI_FN float tkvi_f32(float x) {
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD == 0
    return x;
#else
    volatile float v = x;
    return v;
#endif
}

/* The same for double. Rounding twice (to 64 bits, then 53) can differ from one rounding if the first is inexact;
 * such cases are rare. */
TKVI_FN double tkvi_f64(double x) {
#if defined(FLT_EVAL_METHOD) && (FLT_EVAL_METHOD == 0 || FLT_EVAL_METHOD == 1)
    return x;
#else
    volatile double v = x;
    return v;
#endif
}

/* Not inlined, so that no compiler fuses these products into a sum (FMA). */
static TKVI_NOINLINE void tkvi_multiply(float *dst, const float *x, const float *y, int n) {
    int i;
    for (i = 0; i < n; i++) dst[i] = tkvi_f32(x[i] * y[i]);
}

/* >>float fields of configs: 0 means the default, TKV_ZERO means 0. Comparisons use bits, so they hold under any
 * flags. Filling a config keeps TKV_ZERO, so a filled config can be filled again. */
static int tkvi_is_named_zero(float x) { return tkvi_bits(x) == tkvi_bits(TKV_ZERO); }

static float tkvi_or(float x, float other) { return (tkvi_bits(x) & 0x7fffffffu) == 0 ? other : x; }

static float tkvi_number(float x) { return tkvi_is_named_zero(x) ? 0.0f : x; }

/* Rounds half to even, |x| < 2^22. Adding 1.5 * 2^23 gives the last mantissa bit the value 1. */
TKVI_FN int tkvi_rne(float x) { return (int)(tkvi_bits(x + 12582912.0f) - 0x4b400000u); }

TKVI_FN float tkvi_clampf(float x, float lo, float hi) { return x < lo ? lo : x > hi ? hi : x; }

/* Cuts x to +-most and truncates it to an integer for a sum. NaN and infinity give 0, also under -ffast-math. */
static int64_t tkvi_counted(float x, float most) {
    return tkvi_is_finite(x) ? (int64_t)tkvi_clampf(x, -most, most) : 0;
}

TKVI_FN int tkvi_min(int a, int b) { return a < b ? a : b; }

TKVI_FN int tkvi_max(int a, int b) { return a > b ? a : b; }

static int tkvi_round_up(int n, int to) { return (n + to - 1) / to * to; }

/* >>half floats, stored little-endian on every machine */
#define TKVI_F16_MAX 65504.0f

/* 1 if all n values are finite. Adding 1 to the exponent sets the sign bit only of a NaN or an infinity. Works on 16
 * values at a time, because compilers vectorise that. */
static int tkvi_is_all_finite(const float *x, int n) {
    uint32_t bits[16], signs[16] = {0}, sign = 0;
    int i, k;
    for (i = 0; i < n; i += 16) {
        memset(bits, 0, sizeof bits);
        memcpy(bits, x + i, (size_t)tkvi_min(16, n - i) * sizeof *x);
        for (k = 0; k < 16; k++) signs[k] |= (bits[k] & 0x7fffffffu) + 0x800000u;
    }
    for (k = 0; k < 16; k++) sign |= signs[k];
    return !(sign >> 31);
}

/* The finite value that stands for x: 0 for NaN, the largest fp16 value for an infinity. */
TKVI_FN float tkvi_saturate(float x) {
    if (tkvi_is_finite(x)) return x;
    if (tkvi_bits(x) & 0x7fffffu) return 0.0f; /* NaN */
    return tkvi_bits(x) >> 31 ? -TKVI_F16_MAX : TKVI_F16_MAX;
}

/* Adds squares in 16 lanes, then the lanes in order. */
static float tkvi_sum_of_squares(const float *x, int n) {
    float sum[16] = {0.0f}, total = 0.0f;
    int c, i;
    for (c = 0; c + 16 <= n; c += 16)
        for (i = 0; i < 16; i++) sum[i] = tkvi_f32(sum[i] + tkvi_f32(x[c + i] * x[c + i]));
    for (i = 0; c + i < n; i++) sum[i] = tkvi_f32(sum[i] + tkvi_f32(x[c + i] * x[c + i]));
    for (i = 0; i < 16; i++) total = tkvi_f32(total + sum[i]);
    return total;
}

TKVI_FN uint16_t tkvi_load16(const uint8_t *p) { return (uint16_t)(p[0] | (p[1] << 8)); }

TKVI_FN void tkvi_store16(uint8_t *p, uint16_t x) {
    p[0] = (uint8_t)(x & 0xff);
    p[1] = (uint8_t)(x >> 8);
}

TKVI_FN uint32_t tkvi_load32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

TKVI_FN uint64_t tkvi_load64(const uint8_t *p) {
    return (uint64_t)tkvi_load32(p) | (uint64_t)tkvi_load32(p + 4) << 32;
}

static void tkvi_store32(uint8_t *p, uint32_t x) {
    p[0] = (uint8_t)(x & 0xff);
    p[1] = (uint8_t)(x >> 8 & 0xff);
    p[2] = (uint8_t)(x >> 16 & 0xff);
    p[3] = (uint8_t)(x >> 24);
}

TKVI_FN float tkvi_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, em = h & 0x7fffu;
    if (em >= 0x7c00u) return tkvi_from_bits(sign | 0x7f800000u | (em & 0x3ffu) << 13);
    if (em >= 0x400u) return tkvi_from_bits(sign | ((em << 13) + 0x38000000u));
    {
        float x = (float)(int)em * 5.9604644775390625e-8f; /* subnormal: em * 2^-24, exact */
        return sign ? -x : x;
    }
}

/* Rounds to nearest even. Values beyond the largest half saturate; NaN becomes a quiet NaN. */
TKVI_FN uint16_t tkvi_f32_to_f16(float x) {
    uint32_t u = tkvi_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477fe000u) return (uint16_t)(sign | 0x7bffu);
    if (a >= 0x38800000u) return (uint16_t)(sign | ((a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13));
    if (a <= 0x33000000u) return (uint16_t)sign; /* at most half of the smallest subnormal */
    {
        uint32_t shift = 126u - (a >> 23), m = (a & 0x7fffffu) | 0x800000u, half = 1u << (shift - 1u);
        uint32_t r = m >> shift, rest = m & ((1u << shift) - 1u);
        r += (uint32_t)(rest > half || (rest == half && (r & 1u)));
        return (uint16_t)(sign | r);
    }
}

TKVI_FN float tkvi_bf16_to_f32(uint16_t h) { return tkvi_from_bits((uint32_t)h << 16); }

TKVI_FN uint16_t tkvi_f32_to_bf16(float x) {
    uint32_t u = tkvi_bits(x), a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    if (a >= 0x7f7f8000u) return (uint16_t)((u >> 16 & 0x8000u) | 0x7f7fu); /* saturate, never infinity */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* >>the caller's arrays: element number `at`, any alignment */
TKVI_FN float tkvi_element(const void *data, tkv_type type, ptrdiff_t at) {
    uint16_t h;
    float x;
    if (type == TKV_TYPE_F32) {
        memcpy(&x, (const char *)data + at * 4, 4);
        return x;
    }
    memcpy(&h, (const char *)data + at * 2, 2);
    return type == TKV_TYPE_F16 ? tkvi_f16_to_f32(h) : tkvi_bf16_to_f32(h);
}

static void tkvi_store_element(void *data, tkv_type type, ptrdiff_t at, float x) {
    uint16_t h;
    if (type == TKV_TYPE_F32) {
        memcpy((char *)data + at * 4, &x, 4);
        return;
    }
    h = type == TKV_TYPE_F16 ? tkvi_f32_to_f16(x) : tkvi_f32_to_bf16(x);
    memcpy((char *)data + at * 2, &h, 2);
}

/* >>sizes: sums and products of numbers that callers supply. What does not fit becomes TKVI_TOO_MANY, and stays so
 * in further sums, products and tkvi_align_up. tkvi_get gives no memory for it. */
#define TKVI_ALIGN 64u
#define TKVI_TOO_MANY ((size_t)0 - TKVI_ALIGN)

static size_t tkvi_add_sizes(size_t a, size_t b) {
    return b < TKVI_TOO_MANY && a < TKVI_TOO_MANY - b ? a + b : TKVI_TOO_MANY;
}

static size_t tkvi_multiply_sizes(size_t a, size_t b) {
    return b != 0 && a > TKVI_TOO_MANY / b ? TKVI_TOO_MANY : a * b;
}

TKVI_FN size_t tkvi_align_up(size_t n) { return (n + (TKVI_ALIGN - 1u)) & ~(size_t)(TKVI_ALIGN - 1u); }

/* >>memory: every allocation goes through a heap that counts its bytes */
typedef struct tkvi_heap {
    tkv_allocator from;
    size_t held, peak;
    size_t limit; /* upper bound of `held`; 0: no limit */
    int at_limit; /* 1: the last request was refused because of `limit` */
} tkvi_heap;

#ifndef TKV_NO_MALLOC
/* malloc aligns to 8 or 16 only. The pointer that malloc returned is stored just before the aligned block. */
static void *tkvi_malloc(void *user, size_t size, size_t align) {
    char *raw = (char *)malloc(size + align + sizeof(void *)), *p;
    (void)user;
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
    heap->at_limit = heap->limit && (heap->held > heap->limit || size > heap->limit - heap->held);
    if (heap->at_limit || size > TKVI_TOO_MANY - 4 * TKVI_ALIGN) return NULL; /* tkvi_malloc adds to it */
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

/* Overwrites memory with zeros. A compiler that knew the function could leave out writes before a release. */
static void tkvi_wipe(void *p, size_t size) {
    void *(*volatile fill)(void *, int, size_t) = memset;
    (void)fill(p, 0, size);
}

/* >>arena: an allocator in the caller's memory. It never frees, and it is closed once the cache is built. */
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

/* >>text: sentences for people, cut to the size of the buffer */
typedef struct tkvi_text {
    char *at;
    size_t left; /* without the final zero; `at` is NULL if the buffer has size 0 */
} tkvi_text;

static tkvi_text tkvi_text_begin(char *buf, size_t size) {
    tkvi_text t;
    t.at = size > 0 ? buf : NULL;
    t.left = t.at ? size - 1 : 0;
    if (t.at) *t.at = 0;
    return t;
}

static void tkvi_append_text(tkvi_text *t, const char *s) {
    for (; t->at && *s && t->left; t->left--) *t->at++ = *s++;
    if (t->at) *t->at = 0;
}

static void tkvi_append_digits(tkvi_text *t, uint64_t u) {
    char digits[24];
    int i = 23;
    digits[i] = 0;
    do digits[--i] = (char)('0' + (int)(u % 10u));
    while (u /= 10u);
    tkvi_append_text(t, digits + i);
}

static void tkvi_append_int(tkvi_text *t, int64_t n) {
    if (n < 0) tkvi_append_text(t, "-");
    tkvi_append_digits(t, n < 0 ? 0u - (uint64_t)n : (uint64_t)n);
}

/* A size as the number of a sentence. */
static int64_t tkvi_int_of_size(size_t n) {
    const uint64_t most = (uint64_t)-1 >> 1;
    return (int64_t)((uint64_t)n < most ? (uint64_t)n : most);
}

/* Writes `what`; and behind it the number and `more`, except if that is NULL. */
static void tkvi_write_sentence(char *buf, size_t size, const char *what, int64_t number, const char *more) {
    tkvi_text t = tkvi_text_begin(buf, size);
    tkvi_append_text(&t, what);
    if (!more) return;
    tkvi_append_text(&t, " ");
    tkvi_append_int(&t, number);
    tkvi_append_text(&t, more);
}

/* Writes `why` to the caller's buffer, which may be NULL, and returns st. */
static tkv_status tkvi_give_reason(tkv_status st, const char *why, char *reason, size_t size) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    tkvi_append_text(&t, why);
    return st;
}

/* >>locks: spin locks for a few instructions. Compilers without __atomic builtins get no lock (see the callers). */
static void tkvi_lock(int *lock) {
#if defined(__GNUC__) || defined(__clang__)
    while (__atomic_exchange_n(
        lock, 1, __ATOMIC_ACQUIRE)) /* waiting threads only read: an exchange would slow the owner */
        while (__atomic_load_n(lock, __ATOMIC_RELAXED)) continue;
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

#endif /* TKVI_CORE_BASE_H */
