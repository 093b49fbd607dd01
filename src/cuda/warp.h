/*
 * warp.h - the instructions that have no name in CUDA C++: matrix product of a warp, copies into shared
 * memory, pairs of half floats in a word (the lower half first). tests/cuda_on_cpu.h plays them on a
 * processor.
 */
#ifndef TKVCU_WARP_H
#define TKVCU_WARP_H

#include "layout.h"

struct alignas(8) tkvcu_words {
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

/* c += a b: a is 16 x 16, b is 16 x 8. Lane 4 g + t has of a the rows g, g + 8 at k = 2 t, 2 t + 1, then 2 t
 * + 8, + 9 (a[0] row g, a[1] row g + 8, a[2] and a[3] the same further on), of b column g at these k, and of
 * c rows g (c[0], c[1]) and g + 8 at columns 2 t, 2 t + 1. */
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

/* The same of bytes, signed ones (s) or not (u): a is 16 x 32, b is 32 x 8. Lane 4 g + t has of a the rows
 * g, g + 8 at k = 4 t .. 4 t + 3 (a[0], a[1]), then 16 further on (a[2], a[3]), of b column g at these k,
 * and of c what it has above. */
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

/* Addresses in shared memory as numbers: bits of them can be turned over. */
typedef uint32_t tkvcu_at;

TKVCU_DEVICE tkvcu_at tkvcu_shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* volatile: what lies there changes. */
TKVCU_DEVICE tkvcu_words tkvcu_read_words(tkvcu_at at) {
    tkvcu_words w;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(at));
    return w;
}

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

/* AT bytes on, if left is more than that. middle: 2048 bytes on, so that one address reaches 4096. */
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

/* By `by` bits to the right, modulo 32. */
TKVCU_DEVICE uint32_t tkvcu_rotate(uint32_t x, int by) { return __funnelshift_r(x, x, (uint32_t)by); }

TKVCU_DEVICE float tkvcu_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* p + n size: one instruction, where the compiler would keep products of 64 bits from turn to turn of a loop. */
TKVCU_DEVICE const uint8_t *tkvcu_forward(const uint8_t *p, int n, uint32_t size) {
    const uint8_t *to;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(n), "r"(size), "l"(p));
    return to;
}

/* A number that the compiler keeps, where it would work it out anew in every turn of a loop. */
TKVCU_DEVICE uint32_t tkvcu_kept(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

TKVCU_DEVICE int tkvcu_kept(int x) { /* not negative */
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
static inline tkvcu_words tkvcu_read_words(tkvcu_at at) { return *(const tkvcu_words *)at; }
#define TKVCU_DEVICE static inline
#define TKVCU_UNROLL
#define TKVCU_ROLL
#endif

/* Elements of the caller's arrays, which are aligned as their type. */
TKVCU_DEVICE float tkvcu_element(const void *x, int type, size_t at) {
    uint32_t h;
    if (type == TKV_TYPE_F32) return ((const float *)x)[at];
    h = ((const uint16_t *)x)[at];
    return type == TKV_TYPE_F16 ? tkvcu_f16_lo(h) : tkvcu_bf16_lo(h);
}

TKVCU_DEVICE void tkvcu_put_element(void *x, int type, size_t at, float y) {
    if (type == TKV_TYPE_F32) ((float *)x)[at] = y;
    else
        ((uint16_t *)x)[at] = (uint16_t)(type == TKV_TYPE_F16 ? tkvcu_f16x2(y, 0.0f) : tkvcu_bf16x2(y, 0.0f));
}

/* The largest of the warp's, which are not negative. */
TKVCU_DEVICE float tkvcu_warp_max(float x) {
    return tkvi_from_bits(__reduce_max_sync(0xffffffffu, tkvi_bits(x)));
}

#endif /* TKVCU_WARP_H */
