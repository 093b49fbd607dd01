/*
 * kernels/avx2.h - the kernels of kernels/scalar.h for AVX2, FMA and F16C (Haswell, Zen and later).
 *
 * kernels/avx512.h has the same functions with longer vectors. Read them side by side.
 */
#ifndef TKVI_KERNELS_AVX2_H
#define TKVI_KERNELS_AVX2_H

#include "kernels/code_rows.h"
#include "kernels/simd_x86.h"
#include "kernels/prefill.h"
#include "kernels/tiles.h"

#ifdef TKVI_X86

#include "kernels/simd_avx2.inc"

#include "kernels/codes.inc"
#include "kernels/rotate.inc"
#include "kernels/values.inc"
#include "kernels/convert.inc"
#include "kernels/encode.inc"
#include "kernels/pack.inc"
#include "kernels/groups.inc"

#include "kernels/exact.inc"
#include "kernels/softmax.inc"
#include "kernels/code_rows.inc"

#include "kernels/simd_ops.inc"

#include "kernels/tiles.inc"
#include "kernels/prefill.inc"

static const tkvi_kernels tkvi_kernels_avx2 = {
    TKV_ISA_AVX2,
    "avx2",
    {tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_exact_k_avx2, tkvi_tiles_k_avx2,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k_avx2)},
    {tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_exact_v_avx2, tkvi_tiles_v_avx2,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v_avx2)},
    &tkvi_simd_ops_avx2,
    tkvi_exp64_avx2,
    tkvi_max64_avx2,
    tkvi_softmax_step_avx2,
    tkvi_scale_add_avx2,
    tkvi_rotate_back_avx2,
    &tkvi_prefill_avx2,
};

#include "kernels/simd_end.inc"

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_AVX2_H */
