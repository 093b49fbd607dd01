/*
 * cuda_on_cpu.h - emulates a GPU: a C++ compiler compiles the kernels of tieredkv_cuda.cu, and a CPU runs them.
 *
 *     #include "cuda_on_cpu.h"
 *     #include "../tieredkv_cuda.cu"        g++ -std=c++17 -O2 test.cpp -lm
 *
 * The threads of a thread block are fibers. Thread blocks run one after the other. Barriers and warp-wide
 * instructions are meeting points: a fiber that reaches one lets the next fiber run. The emulator checks:
 *
 *     meeting points        all lanes of a warp reach the same one; else it stops and prints where each thread waits
 *     shared memory         dynamic shared memory is filled with NaN first, and has a border
 *     asynchronous copies   they happen when a thread waits for them, not before
 *
 * It does not check races between two meeting points, because fibers run in a fixed order. TKVCU_ORDER=1 in the
 * environment reverses the order of threads and of thread blocks. Products of mma are exact, and are summed in float
 * in the order of k. The emulator is slow, and is for tests only.
 */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#define TKVCU_ON_CPU 1

#undef _FORTIFY_SOURCE /* its longjmp() refuses to change stacks */
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#include <functional>
#include <vector>

/* >>language */
#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static /* thread blocks run one after the other */

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

static dim3 threadIdx, blockIdx, blockDim, gridDim;

/* >>fibers */
#define CPU_STACK (96 * 1024)
#define CPU_WARP 32

/* A cpu_place is where a fiber continues. cpu_switch() saves the place of its caller, and continues at another place.
 * On x86-64 Linux it saves the registers that a call preserves, and swaps stacks. This is faster than setjmp(). */
#if defined(__x86_64__) && defined(__LP64__) && defined(__linux__) && !defined(__CET__)
typedef void *cpu_place; /* stack pointer */

extern "C" void cpu_switch(cpu_place *from, cpu_place *to);
__asm__(".pushsection .text\n"
        ".type cpu_switch, @function\n"
        "cpu_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq (%rsi), %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size cpu_switch, . - cpu_switch\n"
        ".popsection\n");

static void cpu_begin_at(cpu_place *at, char *stack, void (*enter)(void)) {
    void **top = (void **)(void *)(stack + CPU_STACK) - 1; /* in the place of a return address */
    *top = NULL;
    *--top = (void *)enter;
    top -= 6;
    memset(top, 0, 6 * sizeof *top);
    *at = top;
}
#else
typedef struct cpu_place {
    jmp_buf registers;
    ucontext_t start;
    int begun;
} cpu_place;

static void cpu_switch(cpu_place *from, cpu_place *to) {
    from->begun = 1;
    if (_setjmp(from->registers)) return;
    if (to->begun) _longjmp(to->registers, 1);
    setcontext(&to->start);
}

static void cpu_begin_at(cpu_place *at, char *stack, void (*enter)(void)) {
    at->begun = 0;
    getcontext(&at->start);
    at->start.uc_stack.ss_sp = stack;
    at->start.uc_stack.ss_size = CPU_STACK;
    at->start.uc_link = NULL;
    makecontext(&at->start, enter, 0);
}
#endif

typedef struct cpu_copy {
    void *to;
    const void *from;
    int group;
} cpu_copy;

typedef struct cpu_fiber {
    cpu_place at;
    char *stack; /* kept for the next thread block */
    int begun, done;
    const char *waits; /* meeting point; NULL: it can run */
    int block_wide;
    long met; /* number of meeting points passed */
    dim3 thread;
    std::vector<cpu_copy> copies;
    int group;  /* open group of asynchronous copies */
    int parity; /* of the exchanges of its warp */
} cpu_fiber;

typedef union cpu_slot { /* data of a lane at an exchange */
    uint64_t word[8];
    float f[16];
    int16_t byte[32];
} cpu_slot;

static std::vector<cpu_fiber> cpu_fibers;
static std::vector<cpu_slot> cpu_slots; /* two rows for each warp */
static int cpu_current = -1;
static cpu_place cpu_scheduler;
static std::function<void()> cpu_body;
static unsigned char *cpu_shared; /* dynamic shared memory */
static size_t cpu_shared_bytes;
static long cpu_collectives; /* warp-wide meeting points of all launches */

static void cpu_stop(const char *what) {
    size_t i;
    fprintf(stderr, "cuda_on_cpu: %s, block %u %u\n", what, blockIdx.x, blockIdx.y);
    for (i = 0; i < cpu_fibers.size(); i++)
        fprintf(stderr, "  thread %zu: %s\n", i,
                cpu_fibers[i].done    ? "ended"
                : cpu_fibers[i].waits ? cpu_fibers[i].waits
                                      : "runs");
    abort();
}

static void cpu_yield(cpu_fiber *f) { cpu_switch(&f->at, &cpu_scheduler); }

static void cpu_enter(void) {
    for (;;) {
        cpu_body();
        cpu_fibers[(size_t)cpu_current].done = 1;
        cpu_yield(&cpu_fibers[(size_t)cpu_current]);
    }
}

static int cpu_lane(void) { return cpu_current % CPU_WARP; }

/* The slots of this exchange, by lanes. Two rows alternate. A lane that arrives at the next exchange has read this
 * one, and no lane passes the next exchange before all arrive. So an exchange needs one meeting point. */
static cpu_slot *cpu_warp(void) {
    cpu_fiber *f = &cpu_fibers[(size_t)cpu_current];
    f->parity ^= 1;
    return &cpu_slots[(size_t)((cpu_current / CPU_WARP * 2 + f->parity) * CPU_WARP)];
}

static void cpu_meet(const char *where, int block_wide) {
    cpu_fiber *f = &cpu_fibers[(size_t)cpu_current];
    f->waits = where;
    f->block_wide = block_wide;
    cpu_yield(f);
}

/* Releases fibers first .. first+n-1 if all live ones wait at the same kind of meeting point. */
static int cpu_release(size_t first, size_t n, int block_wide) {
    const char *where = NULL;
    size_t i, n_live = 0;
    for (i = first; i < first + n; i++) {
        const cpu_fiber *f = &cpu_fibers[i];
        if (f->done) continue;
        n_live++;
        if (!f->waits || f->block_wide != block_wide) return 0;
        if (where && where != f->waits && strcmp(where, f->waits))
            cpu_stop("threads of a warp are at different instructions");
        where = f->waits;
    }
    for (i = first; i < first + n; i++) {
        if (cpu_fibers[i].waits) cpu_fibers[i].met++;
        cpu_fibers[i].waits = NULL;
    }
    return n_live > 0;
}

static int cpu_is_reversed(void) {
    const char *order = getenv("TKVCU_ORDER");
    return order && *order == '1';
}

static void cpu_run_block(size_t threads) {
    const int reversed = cpu_is_reversed();
    size_t n_left = threads;
    size_t i, k;
    for (i = 0; i < threads; i++) {
        cpu_fiber *f = &cpu_fibers[i];
        f->done = f->parity = 0;
        f->waits = NULL;
        f->met = 0;
        f->copies.clear();
        f->group = 0;
        f->thread = dim3((unsigned)(i % blockDim.x), (unsigned)(i / blockDim.x % blockDim.y),
                         (unsigned)(i / blockDim.x / blockDim.y));
    }
    while (n_left) {
        int progress = 0;
        for (k = 0; k < threads; k++) {
            cpu_fiber *f = &cpu_fibers[reversed ? threads - 1 - k : k];
            if (f->done || f->waits) continue;
            progress = 1;
            cpu_current = (int)(f - &cpu_fibers[0]);
            threadIdx = f->thread;
            if (!f->begun) cpu_begin_at(&f->at, f->stack, cpu_enter);
            f->begun = 1;
            cpu_switch(&cpu_scheduler, &f->at);
            if (cpu_fibers[(size_t)cpu_current].done) n_left = n_left - 1;
        }
        for (i = 0; i < threads; i += CPU_WARP)
            progress |= cpu_release(i, threads - i < CPU_WARP ? threads - i : CPU_WARP, 0);
        progress |= cpu_release(0, threads, 1);
        if (!progress && n_left) cpu_stop("threads wait for each other");
    }
}

static void cpu_launch(dim3 grid, dim3 block, size_t shared, const std::function<void()> &body) {
    const size_t threads = (size_t)block.x * block.y * block.z;
    size_t i;
    gridDim = grid;
    blockDim = block;
    cpu_body = body;
    for (i = cpu_fibers.size(); i < threads; i++) {
        cpu_fiber f;
        memset((void *)&f.at, 0, sizeof f.at);
        f.begun = 0;
        f.stack = (char *)malloc(CPU_STACK);
        cpu_fibers.push_back(f);
    }
    if (cpu_slots.size() < 2 * (cpu_fibers.size() + CPU_WARP))
        cpu_slots.resize(2 * (cpu_fibers.size() + CPU_WARP));
    free(cpu_shared);
    cpu_shared_bytes = shared;
    cpu_shared = (unsigned char *)aligned_alloc(128, (shared + 128 + 127) / 128 * 128);
    const unsigned blocks = grid.x * grid.y * grid.z;
    for (unsigned k = 0; k < blocks; k++) {
        const unsigned b = cpu_is_reversed() ? blocks - 1 - k : k;
        blockIdx = dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
        memset(cpu_shared, 0xff, shared + 128);
        cpu_run_block(threads);
        for (i = 0; i < 128; i++)
            if (cpu_shared[shared + i] != 0xff) cpu_stop("written beyond the shared memory");
    }
}

/* Runs work of a stream at once, or adds it to the graph that is being captured. */
static std::vector<std::function<void()>> *cpu_capture;

static void cpu_run_or_capture(const std::function<void()> &what) {
    if (cpu_capture) cpu_capture->push_back(what);
    else what();
}

template <class... P, class... A>
static void cpu_start(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A... args) {
    cpu_run_or_capture([=]() { cpu_launch(grid, block, shared, [=]() { kernel(args...); }); });
}

#define TKVCU_LAUNCH(kernel, grid, block, shared, stream, ...)                                               \
    ((void)(stream), cpu_start((kernel), (grid), (block), (shared), __VA_ARGS__))
#define TKVCU_SHARED(type, name) type *name = (type *)(void *)cpu_shared

/* >>barriers, votes, shuffles */
static inline void __syncthreads(void) { cpu_meet("__syncthreads", 1); }

static int cpu_vote; /* of a thread block */
static inline int __syncthreads_or(int yes) {
    cpu_meet("__syncthreads_or", 1); /* all threads have read the previous vote */
    cpu_vote = 0;
    cpu_meet("__syncthreads_or", 1);
    cpu_vote |= yes;
    cpu_meet("__syncthreads_or", 1);
    return cpu_vote;
}

static inline void cpu_meet_warp(const char *where) {
    if (cpu_lane() == 0) cpu_collectives++;
    cpu_meet(where, 0);
}

static inline void __syncwarp(unsigned = 0xffffffffu) { cpu_meet_warp("__syncwarp"); }
static inline void __threadfence(void) {}

static inline uint32_t cpu_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float cpu_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

template <class T> static T cpu_exchange(const char *where, T x, int from) {
    cpu_slot *w = cpu_warp();
    T y;
    memcpy(w[cpu_lane()].word, &x, sizeof x);
    cpu_meet_warp(where);
    memcpy(&y, w[from].word, sizeof y);
    return y;
}

template <class T> static T __shfl_sync(unsigned, T x, int from) {
    return cpu_exchange("shfl", x, from & 31);
}
template <class T> static T __shfl_xor_sync(unsigned, T x, int by) {
    return cpu_exchange("shfl_xor", x, cpu_lane() ^ by);
}
template <class T> static T __shfl_up_sync(unsigned, T x, unsigned by) {
    const int from = cpu_lane() - (int)by;
    return cpu_exchange("shfl_up", x, from < 0 ? cpu_lane() : from);
}
template <class T> static T __shfl_down_sync(unsigned, T x, unsigned by) {
    const int from = cpu_lane() + (int)by;
    return cpu_exchange("shfl_down", x, from > 31 ? cpu_lane() : from);
}

static inline unsigned __ballot_sync(unsigned, int yes) {
    cpu_slot *w = cpu_warp();
    unsigned all = 0;
    w[cpu_lane()].word[0] = yes != 0;
    cpu_meet_warp("ballot");
    for (int i = 0; i < CPU_WARP; i++) all |= (unsigned)(w[i].word[0] != 0) << i;
    return all;
}

static inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    cpu_slot *w = cpu_warp();
    unsigned largest = 0;
    w[cpu_lane()].word[0] = x;
    cpu_meet_warp("reduce_max");
    for (int i = 0; i < CPU_WARP; i++) largest = largest > w[i].word[0] ? largest : (unsigned)w[i].word[0];
    return largest;
}

static inline int __any_sync(unsigned m, int yes) { return __ballot_sync(m, yes) != 0; }
static inline int __all_sync(unsigned m, int yes) { return __ballot_sync(m, yes) == 0xffffffffu; }

template <class T> static T atomicAdd(T *p, T x) {
    T old = *p;
    *p = old + x;
    return old;
}
template <class T> static T atomicMax(T *p, T x) {
    T old = *p;
    *p = old > x ? old : x;
    return old;
}
template <class T> static T atomicOr(T *p, T x) {
    T old = *p;
    *p = old | x;
    return old;
}
template <class T> static T atomicCAS(T *p, T was, T x) {
    T old = *p;
    if (old == was) *p = x;
    return old;
}
template <class T> static T __ldg(const T *p) { return *p; }

/* >>16-bit floats, as bits. A word holds two, the first in the lower half. */
static inline float cpu_half(uint32_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, em = h & 0x7fffu;
    if (em >= 0x7c00u) return cpu_float(sign | 0x7f800000u | (em & 0x3ffu) << 13);
    if (em >= 0x400u) return cpu_float(sign | ((em << 13) + 0x38000000u));
    return (sign ? -1.0f : 1.0f) * (float)em * 5.9604644775390625e-8f;
}

static inline uint32_t cpu_to_half(float x) { /* rounds to nearest, ties to even; too large: infinity */
    const uint32_t u = cpu_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7fffu;
    if (a >= 0x477ff000u) return sign | 0x7c00u;
    if (a >= 0x38800000u) return sign | ((a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13);
    return sign | (uint32_t)lrintf(cpu_float(a) * 16777216.0f);
}

static inline float cpu_bfloat(uint32_t h) { return cpu_float(h << 16); }

static inline uint32_t cpu_to_bfloat(float x) {
    const uint32_t u = cpu_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}

/* >>instructions of src/cuda/warp.h */
static inline uint32_t tkvcu_pack_f16x2(float lo, float hi) {
    return cpu_to_half(lo) | cpu_to_half(hi) << 16;
}
static inline uint32_t tkvcu_pack_bf16x2(float lo, float hi) {
    return cpu_to_bfloat(lo) | cpu_to_bfloat(hi) << 16;
}
static inline float tkvcu_f16_lo(uint32_t x) { return cpu_half(x & 0xffffu); }
static inline float tkvcu_f16_hi(uint32_t x) { return cpu_half(x >> 16); }
static inline float tkvcu_bf16_lo(uint32_t x) { return cpu_bfloat(x & 0xffffu); }
static inline float tkvcu_bf16_hi(uint32_t x) { return cpu_bfloat(x >> 16); }

static inline uint32_t tkvcu_hmul2(uint32_t a, uint32_t b) {
    return tkvcu_pack_f16x2(tkvcu_f16_lo(a) * tkvcu_f16_lo(b), tkvcu_f16_lo(a >> 16) * tkvcu_f16_lo(b >> 16));
}
/* Rounds to float first, so a result can rarely differ from the single rounding of a GPU. */
static inline uint32_t tkvcu_hfma2(uint32_t a, uint32_t b, uint32_t c) {
    const double lo = (double)tkvcu_f16_lo(a) * (double)tkvcu_f16_lo(b) + (double)tkvcu_f16_lo(c);
    const double hi =
        (double)tkvcu_f16_lo(a >> 16) * (double)tkvcu_f16_lo(b >> 16) + (double)tkvcu_f16_lo(c >> 16);
    return tkvcu_pack_f16x2((float)lo, (float)hi);
}

static inline uint32_t tkvcu_prmt(uint32_t a, uint32_t b, uint32_t select) {
    const uint64_t all = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t s = select >> 4 * i & 15u;
        uint32_t byte = (uint32_t)(all >> 8 * (s & 7u)) & 0xffu;
        if (s & 8u) byte = byte & 0x80u ? 0xffu : 0;
        out |= byte << 8 * i;
    }
    return out;
}

static inline float tkvcu_ex2(float x) { return exp2f(x); }
static inline float tkvcu_rcp(float x) { return 1.0f / x; }
typedef uintptr_t tkvcu_address; /* warp.h defines tkvcu_load_shared_u32x2 */
static inline tkvcu_address tkvcu_shared_address(const void *p) { return (uintptr_t)p; }
template <class T> static inline T tkvcu_keep_in_register(T x) { return x; }
static inline const uint8_t *tkvcu_advance(const uint8_t *p, int n, uint32_t size) {
    return p + (size_t)n * size;
}

/* c += a b, where a is 16 x 16 and b is 16 x 8. Fragments are those of PTX's mma.m16n8k16. */
template <class F>
static void cpu_mma(const char *where, float *c, const uint32_t *a, const uint32_t *b, F value) {
    cpu_slot *w = cpu_warp();
    const int lane = cpu_lane(), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; i++) w[lane].f[i] = value(a[i / 2] >> i % 2 * 16 & 0xffffu);
    for (int i = 0; i < 4; i++) w[lane].f[8 + i] = value(b[i / 2] >> i % 2 * 16 & 0xffffu);
    cpu_meet_warp(where);
    for (int i = 0; i < 4; i++) {
        const cpu_slot *row = &w[g * 4], *column = &w[(2 * t + i % 2) * 4];
        float sum = c[i];
        for (int k = 0; k < 16; k += 2) {
            const float *x = row[k % 8 / 2].f + i / 2 * 2 + k / 8 * 4,
                        *y = column[k % 8 / 2].f + 8 + k / 8 * 2;
            sum += x[0] * y[0];
            sum += x[1] * y[1];
        }
        c[i] = sum;
    }
}

static inline void tkvcu_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    cpu_mma("mma f16", c, a, b, cpu_half);
}
static inline void tkvcu_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    cpu_mma("mma bf16", c, a, b, cpu_bfloat);
}

/* c += a b for bytes, where a is 16 x 32 and b is 32 x 8. */
static inline void cpu_mma_bytes(const char *where, int32_t *c, const uint32_t *a, const uint32_t *b,
                                 int a_signed, int b_signed) {
    cpu_slot *w = cpu_warp();
    const int lane = cpu_lane(), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 24; i++) {
        const int byte = (int)((i < 16 ? a[i / 4] : b[i / 4 - 4]) >> i % 4 * 8 & 255u);
        w[lane].byte[i] = (int16_t)(byte > 127 && (i < 16 ? a_signed : b_signed) ? byte - 256 : byte);
    }
    cpu_meet_warp(where);
    for (int i = 0; i < 4; i++) {
        const cpu_slot *row = &w[g * 4], *column = &w[(2 * t + i % 2) * 4];
        int64_t sum = c[i];
        for (int k = 0; k < 32; k += 4) {
            const int16_t *x = row[k % 16 / 4].byte + i / 2 * 4 + k / 16 * 8;
            const int16_t *y = column[k % 16 / 4].byte + 16 + k / 16 * 4;
            sum += x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
        }
        if (sum != (int32_t)sum) cpu_stop("a sum of bytes does not fit into 32 bits");
        c[i] = (int32_t)sum;
    }
}

static inline void tkvcu_mma_uu(int32_t c[4], const uint32_t a[4], const uint32_t b[2]) {
    cpu_mma_bytes("mma u8 u8", c, a, b, 0, 0);
}
static inline void tkvcu_mma_us(int32_t c[4], const uint32_t a[4], const uint32_t b[2]) {
    cpu_mma_bytes("mma u8 s8", c, a, b, 0, 1);
}
static inline void tkvcu_mma_su(int32_t c[4], const uint32_t a[4], const uint32_t b[2]) {
    cpu_mma_bytes("mma s8 u8", c, a, b, 1, 0);
}
static inline void tkvcu_mma_ss(int32_t c[4], const uint32_t a[4], const uint32_t b[2]) {
    cpu_mma_bytes("mma s8 s8", c, a, b, 1, 1);
}

/* Lane 8 j + i passes the address of row i of matrix j: 16 bytes. */
static inline void cpu_ldmatrix(const char *where, uint32_t r[4], const void *row, int trans) {
    cpu_slot *w = cpu_warp();
    const int lane = cpu_lane(), g = lane / 4, t = lane % 4;
    const uint64_t at = (uint64_t)(uintptr_t)row;
    if (at % 16) cpu_stop("ldmatrix: not a multiple of 16 bytes");
    w[lane].word[0] = at;
    cpu_meet_warp(where);
    for (int m = 0; m < 4; m++) {
        uint16_t x[2];
        for (int k = 0; k < 2; k++) {
            const int i = trans ? 2 * t + k : g, j = trans ? g : 2 * t + k;
            memcpy(&x[k], (const char *)(uintptr_t)w[8 * m + i].word[0] + 2 * j, 2);
        }
        r[m] = (uint32_t)x[0] | (uint32_t)x[1] << 16;
    }
    cpu_meet(where, 0);
}

static inline void tkvcu_ldmatrix_x4(uint32_t r[4], const void *row) { cpu_ldmatrix("ldmatrix", r, row, 0); }
static inline void tkvcu_ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    cpu_ldmatrix("ldmatrix.trans", r, row, 1);
}

/* Queues a copy of 16 bytes. tkvcu_cp_async_wait performs it. */
static inline void tkvcu_cp_async16(void *shared, const void *global) {
    cpu_fiber *f = &cpu_fibers[(size_t)cpu_current];
    cpu_copy c;
    if ((uintptr_t)shared % 16 || (uintptr_t)global % 16) cpu_stop("cp.async: not a multiple of 16 bytes");
    c.to = shared;
    c.from = global;
    c.group = f->group;
    f->copies.push_back(c);
}
template <int AT> static inline void tkvcu_cp_async16_if(void *shared, const void *middle, int left) {
    if (left > AT) tkvcu_cp_async16((char *)shared + AT, (const char *)middle + (AT - 2048));
}
static inline void tkvcu_cp_async_commit(void) { cpu_fibers[(size_t)cpu_current].group++; }
template <int N> static inline void tkvcu_cp_async_wait(void) {
    cpu_fiber *f = &cpu_fibers[(size_t)cpu_current];
    size_t i, kept = 0;
    for (i = 0; i < f->copies.size(); i++) {
        const cpu_copy c = f->copies[i];
        if (c.group < f->group - N) memcpy(c.to, c.from, 16);
        else f->copies[kept++] = c;
    }
    f->copies.resize(kept);
}

/* >>runtime: the functions that the host side, examples and tests call */
typedef int cudaError_t;
typedef struct CUstream_st *cudaStream_t;
enum { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
typedef enum {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
} cudaMemcpyKind;
typedef enum {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
} cudaDeviceAttr;
typedef enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 } cudaFuncAttribute;

static inline cudaError_t cudaGetLastError(void) { return cudaSuccess; }
static inline cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
static inline const char *cudaGetErrorString(cudaError_t) { return "no error"; }
static inline cudaError_t cudaMalloc(void **p, size_t n) {
    *p = aligned_alloc(256, (n + 255) / 256 * 256);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
static inline cudaError_t cudaFree(void *p) {
    free(p);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
    memcpy(to, from, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemset(void *p, int x, size_t n) {
    memset(p, x, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind,
                                          cudaStream_t) {
    cpu_run_or_capture([=]() { memcpy(to, from, n); });
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t from_pitch,
                                            size_t n, size_t rows, cudaMemcpyKind, cudaStream_t) {
    cpu_run_or_capture([=]() {
        for (size_t i = 0; i < rows; i++)
            memcpy((char *)to + i * pitch, (const char *)from + i * from_pitch, n);
    });
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int x, size_t n, cudaStream_t) {
    cpu_run_or_capture([=]() { memset(p, x, n); });
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreate(cudaStream_t *s) {
    *s = NULL;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
static inline cudaError_t cudaGetDeviceCount(int *n) {
    *n = 1;
    return cudaSuccess;
}
static inline cudaError_t cudaGetDevice(int *d) {
    *d = 0;
    return cudaSuccess;
}
static int cpu_processors = 3, cpu_capability = 9, cpu_max_shared = 232448; /* of the emulated device */
static inline cudaError_t cudaDeviceGetAttribute(int *x, cudaDeviceAttr which, int) {
    *x = which == cudaDevAttrMultiProcessorCount      ? cpu_processors
         : which == cudaDevAttrComputeCapabilityMajor ? cpu_capability
                                                      : cpu_max_shared;
    return cudaSuccess;
}
typedef struct cudaFuncAttributes {
    int numRegs;
} cudaFuncAttributes;
template <class F> static cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, F) {
    a->numRegs = 0;
    return cudaSuccess;
}
template <class F> static cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) { return cudaSuccess; }
template <class F> static cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, F, int, size_t) {
    *n = 1;
    return cudaSuccess;
}

static inline cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    *left = *all = (size_t)1 << 30;
    return cudaSuccess;
}
typedef struct cudaDeviceProp {
    char name[256];
    int multiProcessorCount, l2CacheSize;
} cudaDeviceProp;
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    snprintf(p->name, sizeof p->name, "a processor that plays a GPU");
    p->multiProcessorCount = cpu_processors;
    p->l2CacheSize = 1;
    return cudaSuccess;
}
typedef clock_t *cudaEvent_t;
static inline cudaError_t cudaEventCreate(cudaEvent_t *e) {
    *e = new clock_t;
    return cudaSuccess;
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t e) {
    delete e;
    return cudaSuccess;
}
static inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
    *e = clock();
    return cudaSuccess;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = 1e3f * (float)(*to - *from) / (float)CLOCKS_PER_SEC;
    return cudaSuccess;
}

/* >>graphs: captured work with its arguments */
typedef std::vector<std::function<void()>> *cudaGraph_t, *cudaGraphExec_t;
typedef enum { cudaStreamCaptureModeThreadLocal = 1 } cudaStreamCaptureMode;

static inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    cpu_capture = new std::vector<std::function<void()>>;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *g) {
    *g = cpu_capture;
    cpu_capture = NULL;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long) {
    *e = new std::vector<std::function<void()>>(*g);
    return cudaSuccess;
}
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t) {
    for (const auto &what : *e) what();
    return cudaSuccess;
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    delete g;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
    delete e;
    return cudaSuccess;
}

#endif /* CUDA_ON_CPU_H */
