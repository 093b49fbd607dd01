/*
 * kernels/avx512.h - the kernels of kernels/scalar.h for AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 and
 * later).
 *
 * Two shapes do the work, each with up to 16 accumulators in registers:
 *   Integers: four vectors of codes by up to 4 weight rows. vpdpbusd multiplies unsigned bytes by signed ones: in K
 *             unsigned codes by signed weights, in V unsigned weights by signed codes. Four weights are broadcast at
 *             a time. Most widths have a loop of their own.
 *   Floats:   four vectors by up to 4 query rows.
 * Both are written once, with the number of rows as a constant argument.
 */
#ifndef TKVI_KERNELS_AVX512_H
#define TKVI_KERNELS_AVX512_H

#include "kernels/avx2.h"

#ifdef TKVI_AVX512

/* g++ 12 finds uninitialised variables in its own header (gcc bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "kernels/simd_avx512.inc"

#include "kernels/codes.inc"
#include "kernels/rotate.inc"
#include "kernels/values.inc"
#include "kernels/convert.inc"
#include "kernels/encode.inc"

#include "kernels/exact.inc"
#include "kernels/softmax.inc"
#include "kernels/code_rows.inc"

#include "kernels/simd_ops.inc"

#include "kernels/tiles.inc"
#include "kernels/prefill.inc"

static const tkvi_kernels tkvi_kernels_avx512 = {
    TKV_ISA_AVX512,
    "avx512",
    {tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_exact_k_avx512, tkvi_tiles_k_avx512,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k_avx512)},
    {tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_exact_v_avx512, tkvi_tiles_v_avx512,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v_avx512)},
    &tkvi_simd_ops_avx512,
    tkvi_exp64_avx512,
    tkvi_max64_avx512,
    tkvi_softmax_step_avx512,
    tkvi_scale_add_avx512,
    tkvi_rotate_back_avx512,
    &tkvi_prefill_avx512,
};

#include "kernels/simd_end.inc"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* TKVI_AVX512 */

#endif /* TKVI_KERNELS_AVX512_H */
