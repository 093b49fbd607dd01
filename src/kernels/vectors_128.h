/*
 * kernels/vectors_128.h - the kernels of kernels/scalar.h with vectors of 128 bits, for NEON and WebAssembly.
 *
 * The vocabulary comes from kernels/neon.h or kernels/wasm.h, and kernels/simd_128.inc. The target of the compiler
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
#include "kernels/simd_end.inc"

#endif /* TKVI_128 */

#endif /* TKVI_KERNELS_VECTORS_128_H */
