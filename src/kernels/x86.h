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
#define TKVI_TARGET_AVX2
#define TKVI_FLAT static __forceinline
#endif
#endif

#ifdef TKVI_X86
#include <immintrin.h>

#if defined(__clang__)
#define TKVI_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define TKVI_UNROLL _Pragma("GCC unroll 8")
#else
#define TKVI_UNROLL
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

/* The same value in every byte. gcc's _mm512_set1_epi8 is a list of 64 values, copied at every use. */
TKVI_FLAT_AVX2 __m256i tkvi_splat_bytes_avx2(int value) {
    return _mm256_set1_epi32((int32_t)((uint32_t)value * 0x01010101u));
}

#ifdef TKVI_AVX512
TKVI_FLAT_AVX512 __m512i tkvi_splat_bytes_avx512(int value) {
    return _mm512_set1_epi32((int32_t)((uint32_t)value * 0x01010101u));
}
#endif

/* >>shared pieces, without vectors */
/* Distance for prefetching: address p in this side corresponds to p + ahead in the next side. */
TKVI_FLAT uintptr_t tkvi_prefetch_distance(const uint8_t *src, const uint8_t *next) {
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

TKVI_FLAT void tkvi_prefetch_bytes(const uint8_t *p, int n, uintptr_t ahead) {
    int i;
    for (i = 0; i < n; i += 64) tkvi_prefetch(p + i, ahead);
}

/* Four weights of neighbouring channels or tokens, to be broadcast. */
TKVI_FLAT int32_t tkvi_load_four_weights(const int8_t *w) {
    int32_t x;
    memcpy(&x, w, 4);
    return x;
}

/* >>tiles: the part that does not depend on the instruction set. tkvi_tile_ops has the part that does. */
enum { TKVI_W_BYTES = TKVI_ROWS * TKV_MAX_HEAD_DIM }; /* one limb of the weights of all rows */

/* Parameters of a fold: multiply rows of q (K, by position) or p (V, by token) by the scales of one group; round. */
typedef struct tkvi_fold_args {
    const float *x, *scale, *zero; /* x: [row][n] */
    const float *ref;              /* K */
    const uint8_t *centre2;        /* K: [n] twice tkvi_centre of the codes that a weight multiplies */
    float centre;                  /* V: tkvi_centre of the codes */
    int middle;          /* V: twice the centre of the codes after tkvi_tile_ops.v_bias was subtracted */
    int n, n_limbs, top; /* weights in a row; limbs, see tkvi_n_limbs; V: the largest weight of one limb */
    int wide;            /* K: the first `wide` weights always have two limbs */
    float coarse;        /* see tkvi_coarse_k and tkvi_coarse_v */
    /* Out: [row][stride] weights of one limb, or hi, and lo. w is signed in K and unsigned in V; lo is 0..127. Each
     * row has space for a multiple of 64 weights. */
    int8_t *w, *lo;
} tkvi_fold_args;

/* Turns the sum of one limb's products into an answer for row r: step * (sum w code - base) + rest. base is half
 * of sum w centre2, rounded down to an integer. rest makes up for the rounding. For the high limb rest also has
 * sum x (zero - ref + centre scale). */
typedef struct tkvi_fold {
    float step[TKVI_ROWS], rest[TKVI_ROWS];
    int32_t base[TKVI_ROWS];
    int32_t row[TKVI_ROWS]; /* row of the output */
} tkvi_fold;

/* Parameters of a pass: multiply codes by one limb of the weights, and turn the sums into answers. */
typedef struct tkvi_products {
    const tkvi_side *s;
    const uint8_t *wide, *tops; /* the wide part of the first tile; the 1-bit vectors of the side */
    int half;                   /* number of the 1-bit half of the first tile */
    int tiles;                  /* K: number of tiles to multiply, from the first */
    int width, slabs, n;        /* V: width of the codes, number of slabs, number of tokens */
    int pairs;                  /* V: a lane is a pair of channels, 16 apart */
    uintptr_t ahead;            /* 0: prefetch nothing */
    int prefetch_phase,
        prefetch_mask;         /* prefetch only for tiles with (number & prefetch_mask) == prefetch_phase */
    const uint8_t *rest, *end; /* bytes behind the wide parts still to be prefetched, one line per tile */
    const int8_t *w; /* [row][TKV_MAX_HEAD_DIM in K, TKVI_BLOCK in V]; the last pass reads 1, 2 or 4 rows */
    int w_group;     /* K: bytes from the weights of tokens 0 .. 31 to those of 32 .. 63 */
    const tkvi_fold *fold, *fold_group; /* K: fold_group is for tokens 32 .. 63 */
    int first, rows;                    /* rows of this pass: 4, or fewer in the last */
    float *out;                         /* [row][token in K, channel in V] */
    int out_stride, add;                /* add: out += answers, else out = answers; always 1 in V */
} tkvi_products;

typedef void (*tkvi_dot)(tkvi_products *d);

typedef struct tkvi_tile_ops {
    const tkvi_simd_ops *simd_ops;
    /* Fold and round all rows. f: one entry for each limb. K: returns the number of leading weights that have two
     * limbs in some row. Rows are folded four at a time. `lo` is written only as far as one of the four needs it.
     * V: returns the rows with two limbs, one bit each. */
    int (*fold_k)(const tkvi_fold_args *a, int rows, tkvi_fold *f);
    int (*fold_v)(const tkvi_fold_args *a, int rows, tkvi_fold *f);
    void (*dot)(tkvi_products *d, int rows);
    int v_bias; /* subtracted from 8-bit codes of V where they must be signed, else 0 */
} tkvi_tile_ops;

static void tkvi_products_set(tkvi_products *d, const tkvi_side *s, const uint8_t *src) {
    d->s = s;
    d->wide = src;
    d->tops = src + tkvi_first_tile(&s->tiles).halves;
    d->rest = d->tops;
    d->end = src + s->bytes;
    d->half = 0;
}

/* If the passes of both limbs read all tiles, each pass prefetches every other tile. This spreads the requests.
 * Otherwise the first pass prefetches everything. */
static void tkvi_divide_prefetch(tkvi_products *d, uintptr_t ahead, int limb, int two) {
    d->ahead = limb && !two ? 0 : ahead;
    d->prefetch_phase = limb && two;
    d->prefetch_mask = two != 0;
}

TKVI_FLAT void tkvi_prefetch_rest(tkvi_products *d) {
    if (d->rest < d->end) {
        tkvi_prefetch(d->rest, d->ahead);
        d->rest += 64;
    }
}

/* Four rows at a time. The last rows take the kernel for 1, 2 or 4 rows. */
static void tkvi_dot_rows(tkvi_products *d, int rows, const tkvi_dot *dots) {
    const int stride = d->s->which == TKV_K ? TKV_MAX_HEAD_DIM : TKVI_BLOCK;
    for (d->first = 0; d->first < rows; d->first += 4) {
        d->rows = tkvi_min(rows - d->first, 4);
        dots[tkvi_min(d->rows - 1, 2)](d);
        d->ahead = 0; /* the first pass has prefetched everything */
        d->w += 4 * stride;
    }
}

static void tkvi_tiles_k(const tkvi_tile_ops *v, const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                         const float *q, const float *ref, int rows, int n_limbs, float *scores) {
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED uint8_t centre2[TKV_MAX_HEAD_DIM];
    TKVI_ALIGNED int8_t w[2][2][TKVI_W_BYTES]; /* limb, group */
    tkvi_fold fold[2][2];                      /* group, limb */
    tkvi_fold_args a;
    tkvi_products d;
    int width, g, c = 0, limb, second = 0;
    s->format->side[TKV_K].meta(s, src, v->simd_ops, scale, zero);
    tkvi_products_set(&d, s, src);
    for (width = TKVI_MAX_WIDTH; width > 0; c += 4 * s->tiles.n[width--])
        if (s->tiles.n[width]) memset(centre2 + c, (1 << width) - 1, (size_t)(4 * s->tiles.n[width]));
    if (c < s->pad) memset(centre2 + c, 0, (size_t)(s->pad - c));
    a.x = q;
    a.ref = ref;
    a.centre2 = centre2;
    a.n = s->pad;
    a.n_limbs = n_limbs;
    a.wide = tkvi_n_wide_positions(s);
    a.coarse = tkvi_coarse_k(s);
    if (s->groups == 2 || rows > 4) memset(w[1], 0, sizeof w[1]); /* fold_k may leave parts of lo unwritten */
    for (g = 0; g < s->groups; g++) {
        a.scale = scale + g * s->pad;
        a.zero = zero + g * s->pad;
        a.w = w[0][g];
        a.lo = w[1][g];
        second = tkvi_max(second, v->fold_k(&a, rows, fold[g]));
    }
    d.w_group = s->groups == 2 ? (int)sizeof w[0][0] : 0;
    d.out_stride = TKVI_BLOCK;
    for (limb = 0; limb < (second ? 2 : 1); limb++) {
        d.w = w[limb][0];
        d.tiles = limb ? (second + 3) / 4 : TKV_MAX_HEAD_DIM;
        d.fold = &fold[0][limb];
        d.fold_group = &fold[s->groups - 1][limb];
        d.out = scores;
        d.add = limb;
        tkvi_divide_prefetch(&d, tkvi_prefetch_distance(src, next), limb, second >= s->pad);
        v->dot(&d, rows);
    }
}

/* Moves the rows of V whose bit is set in `which` to the front. Returns their number. */
static int tkvi_gather_rows(int which, int8_t *w, tkvi_fold *f) {
    int r, n = 0;
    for (r = 0; which >> r; r++) {
        if (!(which >> r & 1)) continue;
        if (n < r) memcpy(w + n * TKVI_BLOCK, w + r * TKVI_BLOCK, TKVI_BLOCK);
        f->step[n] = f->step[r];
        f->rest[n] = f->rest[r];
        f->base[n] = f->base[r];
        f->row[n++] = r;
    }
    return n;
}

static void tkvi_tiles_v(const tkvi_tile_ops *v, const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                         const float *p, int rows, int n, int n_limbs, float *out) {
    TKVI_ALIGNED float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    TKVI_ALIGNED int8_t w[2][TKVI_ROWS * TKVI_BLOCK];
    tkvi_fold fold[2];
    tkvi_fold_args a;
    tkvi_products d;
    int width, i, g, slab = 0, limb, second;
    s->format->side[TKV_V].meta(s, src, v->simd_ops, scale, zero);
    tkvi_products_set(&d, s, src);
    a.x = p;
    a.w = w[0];
    a.lo = w[1];
    a.n = TKVI_BLOCK;
    a.n_limbs = n_limbs;
    a.top = tkvi_top_v(s);
    d.n = n;
    d.w_group = 0;
    d.out_stride = s->pad;
    d.add = 1;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        a.centre = tkvi_centre(s, width);
        a.middle = s->levels ? 0 : (1 << width) - 1 - (width == 8 ? 2 * v->v_bias : 0);
        a.coarse = tkvi_coarse_v(s, width);
        d.width = width;
        d.pairs = s->pairs && width == 3;
        for (i = 0; i < s->tiles.n[width]; i += 4 * d.slabs) { /* slabs of 16 lanes in one group */
            const int left = (s->tiles.n[width] - i) / 4 << d.pairs, in_group = s->group / 16;
            g = slab / in_group;
            d.slabs = tkvi_min(left, in_group - slab % in_group) >> d.pairs;
            a.scale = scale + g * TKVI_BLOCK;
            a.zero = zero + g * TKVI_BLOCK;
            second = tkvi_gather_rows(v->fold_v(&a, rows, fold) & ((1 << rows) - 1), w[1], &fold[1]);
            for (limb = 0; limb < (second ? 2 : 1); limb++) {
                d.w = w[limb];
                d.fold = &fold[limb];
                d.out = out + 16 * slab;
                tkvi_divide_prefetch(&d, tkvi_prefetch_distance(src, next), limb, second);
                v->dot(&d, limb ? second : rows);
            }
            d.wide += 4 * d.slabs * tkvi_wide_bytes[width];
            d.half += 4 * d.slabs * tkvi_has_half[width];
            slab += d.slabs << d.pairs;
        }
    }
}

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_X86_H */
