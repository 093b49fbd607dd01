/*
 * core/rotate.h - the randomised Hadamard rotation of a head: sign flips, then butterflies (QuaRot, arXiv
 * 2404.00456, section 3; the signs are a constant of the format). After it, the channels of any vector look
 * Gaussian and alike, so one grid fits them all. The rotation is orthonormal: it keeps q.k and the norm of v.
 *
 * head_dim need not be a power of two. Butterflies run over the first 2^k channels, then over the last 2^k, where
 * 2^k is the largest power of two that fits. The two windows overlap, so all channels mix. If head_dim is 2^k, one
 * window does it. In a window, a, b become a + b, a - b at distances 1, 2, 4 .. 2^(k-1), in floats. Then all
 * values are multiplied by 2^(-k/2), as a float. The inverse runs the windows in the opposite order, then the
 * signs.
 *
 * The code has only sums, and one product that enters no sum, so FMA changes no bit.
 */
#ifndef TKVI_CORE_ROTATE_H
#define TKVI_CORE_ROTATE_H

#include "core/base.h"

/* Bit c % 32 of word c / 32 is the sign of channel c: fair coins (SHA-256 of "tieredkv", of "tieredkv, 256" and of
 * "tieredkv, 512", little-endian). */
TKVI_CONSTANT uint32_t tkvi_signs[TKV_MAX_HEAD_DIM / 32] = {
    0x7176da20u, 0x332a2459u, 0x5c761011u, 0x5d6d9a20u, 0x3ab82810u, 0x0674eccau,
    0xc8b52373u, 0x868e3452u, 0xbc9488c2u, 0xf7b59e6au, 0x57d30661u, 0xc1c16d57u,
    0xef7dc430u, 0xb27a61dfu, 0x48cffc63u, 0x2493c1ecu, 0x84deee21u, 0xb4fb7bc8u};

/* Replaces x[0 .. n-1] by its Hadamard transform, not normalised. n is a power of two. */
static TKVI_NOINLINE void tkvi_butterflies(float *x, int n) {
    int h, i, j;
    for (h = 1; h < n; h *= 2)
        for (i = 0; i < n; i += 2 * h)
            for (j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = tkvi_f32(a + b);
                x[j + h] = tkvi_f32(a - b);
            }
}

/* Not inlined: otherwise a compiler may fuse these products into the sums of another function. */
static TKVI_NOINLINE void tkvi_scale(float *x, int n, float by) {
    int i;
    for (i = 0; i < n; i++) x[i] = tkvi_f32(x[i] * by);
}

static TKVI_NOINLINE void tkvi_flip(float *x, int n) {
    int i;
    for (i = 0; i < n; i++) x[i] = tkvi_signs[i / 32] >> i % 32 & 1 ? -x[i] : x[i];
}

/* 2^(-k / 2): this factor makes butterflies over 2^k values orthonormal. */
TKVI_CONSTANT float tkvi_hadamard_norm[10] = {1.0f,    0.70710678118f, 0.5f,   0.35355339059f,
                                              0.25f,   0.17677669530f, 0.125f, 0.08838834765f,
                                              0.0625f, 0.04419417382f};

static void tkvi_window(float *x, int n, int log2n) {
    tkvi_butterflies(x, n);
    tkvi_scale(x, n, tkvi_hadamard_norm[log2n]);
}

static int tkvi_log2_floor(int n) {
    int k = 0;
    while (n >> (k + 1)) k++;
    return k;
}

static void tkvi_rotate(float *x, int dim) {
    int k = tkvi_log2_floor(dim), n = 1 << k;
    tkvi_flip(x, dim);
    tkvi_window(x, n, k);
    if (n < dim) tkvi_window(x + dim - n, n, k);
}

static void tkvi_rotate_back(float *x, int dim) {
    int k = tkvi_log2_floor(dim), n = 1 << k;
    if (n < dim) tkvi_window(x + dim - n, n, k);
    tkvi_window(x, n, k);
    tkvi_flip(x, dim);
}

#endif /* TKVI_CORE_ROTATE_H */
