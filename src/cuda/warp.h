/*
 * warp.h - instructions without a name in CUDA C++: matrix products of a warp, copies into shared memory, pairs of
 * 16-bit floats in a word (the first in the lower half). tests/cuda_on_cpu.h emulates them on a CPU.
 */
#ifndef TKVCU_WARP_H
#define TKVCU_WARP_H

#include "layout.h"

struct alignas(8) tkvcu_u32x2 {
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

/* c += a b, where a is 16 x 16 and b is 16 x 8. Lane 4 g + t holds fragments. a[0]: row g, k = 2 t, 2 t + 1.
 * a[1]: row g + 8, the same k. a[2], a[3]: the same rows at k + 8. b[0], b[1]: column g at these k. c[0], c[1]:
 * row g, columns 2 t, 2 t + 1. c[2], c[3]: row g + 8. */
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

/* The same for bytes, signed (s) or unsigned (u): a is 16 x 32 and b is 32 x 8. Lane 4 g + t holds of a the rows
 * g and g + 8 at k = 4 t .. 4 t + 3 (a[0], a[1]) and at k + 16 (a[2], a[3]). b holds column g at these k. c is
 * as above. */
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

/* Addresses in shared memory as numbers, for arithmetic on their bits. */
typedef uint32_t tkvcu_address;

TKVCU_DEVICE tkvcu_address tkvcu_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* volatile, because the memory changes between calls. */
TKVCU_DEVICE tkvcu_u32x2 tkvcu_load_shared_u32x2(tkvcu_address at) {
    tkvcu_u32x2 w;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(at));
    return w;
}

/* Loads four 8 x 8 matrices of 16-bit values. Lane 8 j + i passes the address of row i of matrix j. */
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

/* Copies 16 bytes at offset AT if left > AT. `middle` is 2048 bytes after the start of the source: offsets from -2048
 * to 2047 then cover 4096 bytes. */
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

TKVCU_DEVICE uint32_t tkvcu_pack_f16x2(float lo, float hi) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
    return x;
}

TKVCU_DEVICE uint32_t tkvcu_pack_bf16x2(float lo, float hi) {
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

TKVCU_DEVICE float tkvcu_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns p + n * size in one instruction. Otherwise the compiler keeps 64-bit products in registers across the
 * loop. */
TKVCU_DEVICE const uint8_t *tkvcu_advance(const uint8_t *p, int n, uint32_t size) {
    const uint8_t *to;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(n), "r"(size), "l"(p));
    return to;
}

/* Hides the origin of a number. The compiler then keeps it in a register and does not recompute it in every loop
 * turn. */
TKVCU_DEVICE uint32_t tkvcu_keep_in_register(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

TKVCU_DEVICE int tkvcu_keep_in_register(int x) { /* x is not negative */
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
static inline tkvcu_u32x2 tkvcu_load_shared_u32x2(tkvcu_address at) { return *(const tkvcu_u32x2 *)at; }
#define TKVCU_DEVICE static inline
#define TKVCU_UNROLL
#define TKVCU_ROLL
#endif

/* Loads and stores an element of the caller's arrays, which are aligned to their type. */
TKVCU_DEVICE float tkvcu_load_element(const void *x, int type, size_t at) {
    uint32_t h;
    if (type == TKV_TYPE_F32) return ((const float *)x)[at];
    h = ((const uint16_t *)x)[at];
    return type == TKV_TYPE_F16 ? tkvcu_f16_lo(h) : tkvcu_bf16_lo(h);
}

TKVCU_DEVICE void tkvcu_store_element(void *x, int type, size_t at, float y) {
    if (type == TKV_TYPE_F32) ((float *)x)[at] = y;
    else
        ((uint16_t *)x)[at] =
            (uint16_t)(type == TKV_TYPE_F16 ? tkvcu_pack_f16x2(y, 0.0f) : tkvcu_pack_bf16x2(y, 0.0f));
}

/* Returns the maximum over the lanes of a warp. Values must not be negative: their bits are compared as
 * integers. */
TKVCU_DEVICE float tkvcu_warp_max(float x) {
    return tkvi_from_bits(__reduce_max_sync(0xffffffffu, tkvi_bits(x)));
}

#endif /* TKVCU_WARP_H */
