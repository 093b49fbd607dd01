/*
 * kernels/vectors_128.h - the kernels of kernels/scalar.h with vectors of 128 bits, for NEON and WebAssembly.
 *
 * Types and operations that end in _128 come from kernels/neon.h or kernels/wasm.h. The target of the compiler
 * selects one of them.
 *
 * No machine to measure prefetching of `next` was available, so these kernels do without it.
 */
#ifndef TKVI_KERNELS_VECTORS_128_H
#define TKVI_KERNELS_VECTORS_128_H

#include "kernels/code_rows.h"
#include "kernels/neon.h"
#include "kernels/prefill.h"
#include "kernels/tiles.h"
#include "kernels/wasm.h"

#ifdef TKVI_128

#include "kernels/simd_128.inc"
#include "kernels/codes.inc"
#include "kernels/convert.inc"
#include "kernels/rotate.inc"
#include "kernels/values.inc"
#include "kernels/encode.inc"
#include "kernels/pack.inc"
#include "kernels/groups.inc"

#include "kernels/exact.inc"
#include "kernels/softmax.inc"
#include "kernels/code_rows.inc"

#include "kernels/simd_ops.inc"

#include "kernels/tiles.inc"
#include "kernels/prefill.inc"

static const tkvi_kernels tkvi_kernels_128 = {
    TKVI_ISA_128,
    TKVI_NAME_128,
    {tkvi_exact_k_128, tkvi_exact_k_128, tkvi_exact_k_128, tkvi_tiles_k_128,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k_128)},
    {tkvi_exact_v_128, tkvi_exact_v_128, tkvi_exact_v_128, tkvi_tiles_v_128,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v_128)},
    &tkvi_simd_ops_128,
    tkvi_exp64_128,
    tkvi_max64_128,
    tkvi_softmax_step_128,
    tkvi_scale_add_128,
    tkvi_rotate_back_128,
    &tkvi_prefill_128,
};

#include "kernels/simd_end.inc"

#endif /* TKVI_128 */

#endif /* TKVI_KERNELS_VECTORS_128_H */
