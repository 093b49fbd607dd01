/*
 * kernels/x86.h - shared by the kernels for AVX2 and AVX-512: attributes that select an instruction set for each
 * compiler, prefetching, and the part of integer attention that has no vectors.
 *
 * Everything is compiled in one translation unit without any -m flag. So every function that uses vectors, inlined
 * ones included, names its target in an attribute. The entries of kernel tables are plain static functions. Their
 * pieces are inlined by force, with the number of rows as a constant, so that accumulators stay in registers.
 */
#ifndef TKVI_KERNELS_X86_H
#define TKVI_KERNELS_X86_H

#include "kernels/scalar.h"

/* >>compilers */
/* gcc -m32 -ffast-math without SSE refuses its own intrinsics. The scalar kernels are used there. */
#if defined(__i386__) && defined(__FAST_MATH__) && !defined(__SSE2__)
#define TKVI_NO_X86
#endif
#if !defined(TKV_NO_SIMD) && !defined(TKVI_NO_X86) &&                                                        \
    (defined(__x86_64__) || defined(__i386__) || defined(_M_X64) || defined(_M_IX86))
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 8 && !defined(__TINYC__))
#define TKVI_X86
#define TKVI_VECTORS
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
/* Intrinsics need no flag. AVX-512 is off because MSVC 19.38 put its instructions into AVX2 code. */
#define TKVI_X86
#define TKVI_VECTORS
#define TKVI_TARGET_AVX2
#define TKVI_FLAT static __forceinline
#endif
#endif

#ifdef TKVI_X86
#include <immintrin.h>
/* clang for MSVC (clang-cl), up to version 19, includes there only what -m flags turn on. */
#if defined(__clang__) && defined(_MSC_VER)
#include <pmmintrin.h>
#include <tmmintrin.h>
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#ifdef TKVI_AVX512
#include <avx512fintrin.h>
#include <avx512vlintrin.h>
#include <avx512bwintrin.h>
#include <avx512vlbwintrin.h>
#include <avx512dqintrin.h>
#include <avx512vldqintrin.h>
#include <avx512vnniintrin.h>
#include <avx512vlvnniintrin.h>
#endif
#endif

#define TKVI_FLAT_AVX2 TKVI_FLAT TKVI_TARGET_AVX2
#define TKVI_FLAT_AVX512 TKVI_FLAT TKVI_TARGET_AVX512

/* gcc for 64-bit Windows aligns the stack to 16 bytes only. It still stores vectors of 32 and 64 bytes there with
 * aligned moves, which fault (GCC bug 54412; Debian's gcc is patched). Assembler macros make all aligned moves of
 * this file unaligned. That costs nothing where memory is aligned. LTO joins files, so .ifndef lets each macro be
 * defined only once. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) &&                                       \
    (defined(_WIN64) || defined(__CYGWIN__))
#define TKVI_UNALIGNED(aligned, unaligned)                                                                   \
    __asm__(".ifndef tkvi_" aligned "\n.set tkvi_" aligned ", 1\n"                                           \
            ".macro " aligned " operands:vararg\n\t" unaligned " \\operands\n.endm\n.endif\n")
TKVI_UNALIGNED("vmovaps", "vmovups");
TKVI_UNALIGNED("vmovapd", "vmovupd");
TKVI_UNALIGNED("vmovdqa", "vmovdqu");
TKVI_UNALIGNED("vmovdqa32", "vmovdqu32");
TKVI_UNALIGNED("vmovdqa64", "vmovdqu64");
#undef TKVI_UNALIGNED
#endif

/* Hides from the compiler how x was computed. gcc treats intrinsics as plain arithmetic: it fuses products into sums,
 * and -ffast-math reorders sums. */
#if defined(__GNUC__) || defined(__clang__)
#define TKVI_HIDE_X86(x) __asm__("" : "+v"(x))
#else
#define TKVI_HIDE_X86(x) ((void)0)
#endif

/* >>shared pieces, without vectors */
/* Distance for prefetching: address p in this side corresponds to p + ahead in the next side. */
TKVI_FLAT uintptr_t tkvi_next_distance(const uint8_t *src, const uint8_t *next) {
    return next ? (uintptr_t)next - (uintptr_t)src : 0u;
}

/* Prefetches into L2. A core can have few requests for L1 in flight (Zen 4: 12 GB/s), but far more for L2 (20 GB/s
 * and up). */
TKVI_FLAT void tkvi_prefetch(const uint8_t *p, uintptr_t ahead) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch((const void *)((uintptr_t)p + ahead), 0, 2);
#else
    _mm_prefetch((const char *)((uintptr_t)p + ahead), _MM_HINT_T1);
#endif
}

TKVI_FLAT void tkvi_ahead(const uint8_t *p, int n, uintptr_t ahead) {
    int i;
    for (i = 0; i < n; i += 64) tkvi_prefetch(p + i, ahead);
}

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_X86_H */
