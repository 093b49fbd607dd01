/*
 * The implementation, and one aligned move of each kind at an odd address: gcc for 64-bit Windows may write such
 * moves (kernels/x86.h). The program faults, unless the assembler turned them into unaligned ones. Without AVX it
 * does nothing.
 */
#define TIEREDKV_IMPLEMENTATION
#include "../../tieredkv.h"

#if !defined(TKVI_X86) || defined(_MSC_VER)
int main(void) { return 0; }
#else
static TKVI_TARGET_AVX2 void move_avx2(unsigned char *at) {
    __asm__ volatile("vmovaps 1(%0), %%ymm0\n\tvmovaps %%ymm0, 1(%0)" : : "r"(at) : "xmm0", "memory");
    __asm__ volatile("vmovapd 1(%0), %%ymm0\n\tvmovapd %%ymm0, 1(%0)" : : "r"(at) : "xmm0", "memory");
    __asm__ volatile("vmovdqa 1(%0), %%ymm0\n\tvmovdqa %%ymm0, 1(%0)" : : "r"(at) : "xmm0", "memory");
}

#ifdef TKVI_AVX512
static TKVI_TARGET_AVX512 void move_avx512(unsigned char *at) {
    __asm__ volatile("vmovdqa32 1(%0), %%zmm16\n\tvmovdqa32 %%zmm16, 1(%0)" : : "r"(at) : "xmm16", "memory");
    __asm__ volatile("vmovdqa64 1(%0), %%zmm16\n\tvmovdqa64 %%zmm16, 1(%0)" : : "r"(at) : "xmm16", "memory");
    __asm__ volatile("vmovdqa64 1(%0), %%zmm16%{%%k1%}%{z%}" : : "r"(at) : "xmm16", "memory");
}
#endif

int main(void) {
    TKVI_ALIGNED unsigned char bytes[160] = {0};
    tkv_build_info build;
    if (tkv_get_build(NULL, &build) != TKV_OK) return 1;
    if (build.isa_mask >> TKV_ISA_AVX2 & 1u) move_avx2(bytes);
#ifdef TKVI_AVX512
    if (build.isa_mask >> TKV_ISA_AVX512 & 1u) move_avx512(bytes);
#endif
    return bytes[0];
}
#endif
