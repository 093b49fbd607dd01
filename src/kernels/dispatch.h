/*
 * kernels/dispatch.h - chooses the kernels that this processor can run.
 *
 * On x86, cpuid reports the instruction sets, and xgetbv whether the operating system saves their registers. Both
 * run each time a cache is created, so that no global variable is needed. NEON and WASM SIMD are chosen by compiler
 * flags. Other machines use the scalar table.
 */
#ifndef TKVI_KERNELS_DISPATCH_H
#define TKVI_KERNELS_DISPATCH_H

#include "kernels/avx512.h"
#include "kernels/vectors_128.h"

/* 1: an instruction set has kernels for many rows (kernels/prefill.h). */
#ifdef TKVI_VECTORS
#define TKVI_HAS_PREFILL 1
#else
#define TKVI_HAS_PREFILL 0
#endif

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

/* What decides the instruction set: ecx of leaf 1, ebx and ecx of leaf 7, and the registers that the system saves. */
typedef struct tkvi_cpu {
    uint32_t one, seven_b, seven_c, xcr0;
} tkvi_cpu;

/* last: the highest leaf. A processor answers leaves above it with another one. */
static tkvi_cpu tkvi_cpu_of(uint32_t last, const uint32_t *one, const uint32_t *seven) {
    tkvi_cpu cpu = {0, 0, 0, 0};
    if (last < 7) return cpu;
    cpu.one = one[2];
    cpu.seven_b = seven[1];
    cpu.seven_c = seven[2];
    return cpu;
}

static tkvi_cpu tkvi_read_cpu(void) {
    uint32_t zero[4], one[4], seven[4];
    tkvi_cpu cpu;
    tkvi_cpuid(0, zero);
    tkvi_cpuid(1, one);
    tkvi_cpuid(7, seven);
    cpu = tkvi_cpu_of(zero[0], one, seven);
    if (tkvi_bits_set(cpu.one, 1u << 27)) cpu.xcr0 = tkvi_xcr0(); /* without OSXSAVE xgetbv is illegal */
    return cpu;
}

static tkv_isa tkvi_isa_of_cpu(const tkvi_cpu *cpu) {
    /* the system saves xmm and ymm; FMA, AVX, F16C; AVX2 */
    if (!tkvi_bits_set(cpu->xcr0, 0x6u) || !tkvi_bits_set(cpu->one, 1u << 12 | 1u << 28 | 1u << 29) ||
        !tkvi_bits_set(cpu->seven_b, 1u << 5))
        return TKV_ISA_SCALAR;
    /* the system saves masks and zmm; F, DQ, BW, VL; VNNI */
    return tkvi_bits_set(cpu->xcr0, 0xe6u) &&
                   tkvi_bits_set(cpu->seven_b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) &&
                   tkvi_bits_set(cpu->seven_c, 1u << 11)
               ? TKV_ISA_AVX512
               : TKV_ISA_AVX2;
}
#endif /* TKVI_X86 */

/* The kernels of an instruction set, or NULL if it is not available. TKV_ISA_AUTO: the best available one. best: of
 * the processor, on x86. */
static const tkvi_kernels *tkvi_kernels_up_to(tkv_isa best, tkv_isa isa) {
#ifdef TKVI_AVX512
    if (best == TKV_ISA_AVX512 && (isa == TKV_ISA_AUTO || isa == TKV_ISA_AVX512)) return &tkvi_kernels_avx512;
#endif
#ifdef TKVI_X86
    if (best >= TKV_ISA_AVX2 && (isa == TKV_ISA_AUTO || isa == TKV_ISA_AVX2)) return &tkvi_kernels_avx2;
#endif
#ifdef TKVI_128
    if (isa == TKV_ISA_AUTO || isa == TKVI_ISA_128) return &tkvi_kernels_128;
#endif
    (void)best;
    return isa == TKV_ISA_AUTO || isa == TKV_ISA_SCALAR ? &tkvi_kernels_scalar : NULL;
}

static const tkvi_kernels *tkvi_kernels_for(tkv_isa isa) {
#ifdef TKVI_X86
    const tkvi_cpu cpu = tkvi_read_cpu();
    return tkvi_kernels_up_to(tkvi_isa_of_cpu(&cpu), isa);
#else
    return tkvi_kernels_up_to(TKV_ISA_SCALAR, isa);
#endif
}

static const char *tkvi_isa_name(tkv_isa isa) {
    static const char *const names[TKV_ISA_COUNT] = {"auto", "scalar", "avx2", "avx512", "neon", "wasm"};
    return isa >= TKV_ISA_AUTO && isa < TKV_ISA_COUNT ? names[isa] : NULL;
}

#endif /* TKVI_KERNELS_DISPATCH_H */
