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

#include "kernels/neon.h"
#include "kernels/tiles.h"
#include "kernels/wasm.h"

#ifdef TKVI_128

#include "kernels/simd_128.inc"
#include "kernels/codes.inc"

/* >>simd_ops: conversions of metadata. Encoding uses the scalar functions. */
static void tkvi_f16_to_f32_128(const uint8_t *src, int n, float *dst) {
    int i;
    for (i = 0; i + 4 <= n; i += 4) tkvi_store_128(dst + i, tkvi_load_f16_128(src + 2 * i));
    tkvi_f16_to_f32_scalar(src + 2 * i, n - i, dst + i);
}

/* tkvi_log_value, byte by byte. The bytes of the float are 0, m << 5, e << 7 | m >> 3, e >> 1. Here e is the biased
 * exponent, and m the upper ten bits of the mantissa. */
static void tkvi_decode_log_scales_128(const uint8_t *src, int n, int top, float *dst) {
    uint8_t tables[2][16], *bytes = (uint8_t *)dst;
    tkvi_b16 table1, table2;
    int i;
    for (i = 0; i < 16; i++) {
        int m = tkvi_log_mantissa[i] - 1024;
        tables[0][i] = (uint8_t)(m << 5 & 255);
        tables[1][i] = (uint8_t)(m >> 3);
    }
    table1 = tkvi_load_bytes_128(tables[0]);
    table2 = tkvi_load_bytes_128(tables[1]);
    for (i = 0; i + 16 <= n; i += 16, bytes += 64) {
        tkvi_b16 code = tkvi_load_bytes_128(src + i), some = tkvi_test_128(code, code);
        tkvi_b16 x = tkvi_add_bytes_128(code, tkvi_splat_bytes_128(-1));
        tkvi_b16 k = tkvi_and_128(x, tkvi_splat_bytes_128(15));
        tkvi_b16 e = tkvi_add_bytes_128(TKVI_RIGHT_128(x, 4), tkvi_splat_bytes_128(127 + top - 16));
        tkvi_b16 b1 = tkvi_and_128(tkvi_look_up_128(table1, k), some);
        tkvi_b16 b2 = tkvi_or_128(tkvi_look_up_128(table2, k), TKVI_LEFT_128(e, 7));
        tkvi_b16 b3 = tkvi_and_128(TKVI_RIGHT_128(e, 1), some), zero = tkvi_splat_bytes_128(0);
        b2 = tkvi_and_128(b2, some);
        x = tkvi_zip1_128(zero, b1);
        k = tkvi_zip1_128(b2, b3);
        tkvi_store_bytes_128(bytes, tkvi_zip1_pairs_128(x, k));
        tkvi_store_bytes_128(bytes + 16, tkvi_zip2_pairs_128(x, k));
        x = tkvi_zip2_128(zero, b1);
        k = tkvi_zip2_128(b2, b3);
        tkvi_store_bytes_128(bytes + 32, tkvi_zip1_pairs_128(x, k));
        tkvi_store_bytes_128(bytes + 48, tkvi_zip2_pairs_128(x, k));
    }
    tkvi_decode_log_scales_scalar(src + i, n - i, top, dst + i);
}

static void tkvi_decode_zero_points_128(const uint8_t *offset, const float *scale, const float *mean,
                                        float unit, int middle, int n, float *dst) {
    int i;
    for (i = 0; i + 4 <= n; i += 4) {
        tkvi_i4 by = tkvi_sub_ints_128(tkvi_load_bytes4_128(offset + i), tkvi_splat_ints_128(middle));
        tkvi_f4 x = tkvi_mul_128(tkvi_load_128(scale + i), tkvi_splat_128(unit));
        tkvi_store_128(dst + i, tkvi_madd_128(tkvi_load_128(mean + i), x, tkvi_to_float_128(by)));
    }
    tkvi_decode_zero_points_scalar(offset + i, scale + i, mean + i, unit, middle, n - i, dst + i);
}

static const tkvi_simd_ops tkvi_simd_ops_128 = {tkvi_f16_to_f32_128,
                                                tkvi_f32_to_f16_scalar,
                                                tkvi_decode_log_scales_128,
                                                tkvi_decode_zero_points_128,
                                                tkvi_encode_log_scales_scalar,
                                                tkvi_pack_tile,
                                                tkvi_interleave_scalar,
                                                tkvi_encode_k_columns_scalar,
                                                tkvi_finalize_scales_scalar,
                                                tkvi_encode_v_tokens_scalar,
                                                tkvi_encode_groups_scalar,
                                                tkvi_decode_tiles_scalar,
                                                TKVI_IF(TKVI_HAS_MOVES, tkvi_turn_rows_scalar)};

#include "kernels/exact.inc"
#include "kernels/softmax.inc"
#include "kernels/tiles.inc"

static const tkvi_kernels tkvi_kernels_128 = {
    TKVI_ISA_128,
    TKVI_NAME_128,
    {tkvi_exact_k_128, tkvi_exact_k_128, tkvi_exact_k_128, tkvi_tiles_k_128,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k)},
    {tkvi_exact_v_128, tkvi_exact_v_128, tkvi_exact_v_128, tkvi_tiles_v_128,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v)},
    &tkvi_simd_ops_128,
    tkvi_exp64_128,
    tkvi_max64_128,
    tkvi_softmax_step_128,
};

#include "kernels/simd_end.inc"

#endif /* TKVI_128 */

#endif /* TKVI_KERNELS_VECTORS_128_H */
