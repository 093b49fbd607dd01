/*
 * kernels/values_x86.h - decodes a side of tiles to floats with AVX2 or AVX-512. The results have the same bits as
 * those of formats/tiles.h.
 *
 * First, all codes (or levels) become rows of bytes, [token][channel]. Then rows become floats, with one product
 * and one sum each. The product is exact, so FMA changes no bit under any compiler flags. Rotated rows are rotated
 * back, as in core/rotate.h.
 *
 *   V   A plane of a tile has 16 channels of four tokens. Its bytes are sorted by token, 16 bytes each.
 *   K   A plane has 16 tokens of four channels, which can be anywhere in the head. Its bytes are sorted by channel,
 *       into columns of 64 tokens. Then 16 columns at a time are transposed into rows.
 *
 * Sorting for K stays within 16 bytes. So a column does not have its tokens in order: byte 16 k + 4 p + j is token
 * 16 p + 4 k + j.
 *
 * Calls kernels/simd_x86.h.
 */
#ifndef TKVI_KERNELS_VALUES_X86_H
#define TKVI_KERNELS_VALUES_X86_H

#include "kernels/simd_x86.h"

#ifdef TKVI_X86

#include "kernels/simd_avx2.inc"
#include "kernels/codes.inc"
#include "kernels/rotate.inc"
#include "kernels/simd_end.inc"

/* >>both instruction sets */
/* A side while it is decoded: tokens first .. first + n - 1 go to x, `stride` floats apart. */
typedef struct tkvi_decoded_rows {
    const tkvi_side *s;
    float *x;
    size_t stride;
    int first, n;
    TKVI_ALIGNED uint8_t level[TKVI_BLOCK * TKV_MAX_HEAD_DIM];  /* [token][pad] */
    TKVI_ALIGNED uint8_t column[TKV_MAX_HEAD_DIM * TKVI_BLOCK]; /* K: [channel][64] */
    TKVI_ALIGNED float scale[2 * TKV_MAX_HEAD_DIM],
        zero[2 * TKV_MAX_HEAD_DIM]; /* K: [group][channel], V: [group][token] */
} tkvi_decoded_rows;

typedef struct tkvi_row_ops {
    void (*unpack_tile)(const uint8_t *tile, int width, uint8_t *code); /* as tkvi_unpack_tile */
    /* Sorts the codes of a tile of K into four columns. */
    void (*sort_columns)(const uint8_t *code, uint8_t *const *column);
    /* Sorts the codes of a tile of V into the rows of 16 tokens, `stride` bytes apart, as levels. lower: NULL: level =
     * code. upper: NULL, or the levels of the second channels of pairs, which go to the next 16 bytes of a row. */
    void (*sort_slab)(const uint8_t *code, const int8_t *lower, const int8_t *upper, uint8_t *row,
                      int stride);
    /* K: transposes r->column into r->level. */
    void (*transpose)(tkvi_decoded_rows *r);
    /* Converts the first n channels of token t to floats, without the rotation. For K, V, and V with levels. */
    void (*row_to_floats[3])(const tkvi_decoded_rows *r, int t, int n, float *to);
    void (*rotate_back)(float *y, const float *signs, int dim, float *to); /* overwrites y */
} tkvi_row_ops;

static void tkvi_unpack_rows_k(const tkvi_row_ops *v, tkvi_decoded_rows *r, const uint8_t *src) {
    const tkvi_side *s = r->s;
    const uint8_t *at = src;
    int width, i, k, position = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++, position += 4) {
            TKVI_ALIGNED uint8_t code[TKVI_TILE_CODES];
            uint8_t *column[4];
            for (k = 0; k < 4; k++) column[k] = r->column + TKVI_BLOCK * tkvi_channel(s, position + k);
            v->unpack_tile(at, width, code);
            v->sort_columns(code, column);
            at += TKVI_TILE_BYTES(width);
        }
    for (; position < s->pad; position++) /* channels without codes */
        memset(r->column + TKVI_BLOCK * tkvi_channel(s, position), 0, TKVI_BLOCK);
    v->transpose(r);
}

/* Sorts metadata of K from positions to channels. */
static void tkvi_sort_by_channel(const tkvi_side *s, float *x) {
    float plain[2 * TKV_MAX_HEAD_DIM];
    int g, i;
    memcpy(plain, x, (size_t)(s->groups * s->pad) * sizeof *x);
    for (g = 0; g < s->groups; g++)
        for (i = 0; i < s->pad; i++) x[g * s->pad + s->order[i]] = plain[g * s->pad + i];
}

static void tkvi_unpack_rows_v(const tkvi_row_ops *v, tkvi_decoded_rows *r, const uint8_t *src) {
    const tkvi_side *s = r->s;
    const uint8_t *at = src;
    int width, i, slab = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int channels = tkvi_slab_channels(s, width);
        const int8_t *lower = s->levels ? s->levels + tkvi_level_table(s, width, 0) : NULL;
        const int8_t *upper = channels == 32 ? s->levels + tkvi_level_table(s, width, 1) : NULL;
        for (i = 0; i < s->tiles.n[width]; i++) {
            const int from = i % 4 * 16;
            if (from < r->first + r->n && from + 16 > r->first) {
                TKVI_ALIGNED uint8_t code[TKVI_TILE_CODES];
                v->unpack_tile(at, width, code);
                v->sort_slab(code, lower, upper, r->level + from * s->pad + slab, s->pad);
            }
            at += TKVI_TILE_BYTES(width);
            if (i % 4 == 3) slab += channels;
        }
    }
}

/* Converts all rows to floats. Rotates them back if the format is rotated. */
static void tkvi_rows_to_floats(const tkvi_row_ops *v, const tkvi_decoded_rows *r) {
    TKVI_ALIGNED float signs[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
    const tkvi_side *s = r->s;
    void (*row)(const tkvi_decoded_rows *, int, int, float *) =
        v->row_to_floats[s->which == TKV_V ? 1 + (s->levels != NULL) : 0];
    float *to = r->x;
    int t;
    if (s->format->rotated) tkvi_flips_avx2(signs, s->pad);
    for (t = r->first; t < r->first + r->n; t++, to += r->stride) {
        if (!s->format->rotated) {
            row(r, t, s->dim, to);
            continue;
        }
        row(r, t, TKV_MAX_HEAD_DIM, y);
        v->rotate_back(y, signs, s->dim, to);
    }
}

static void tkvi_decode_tile_rows(const tkvi_row_ops *v, const tkvi_side *s, const tkvi_simd_ops *ops,
                                  const uint8_t *src, int first, int n, float *x, size_t stride) {
    tkvi_decoded_rows r;
    r.s = s;
    r.x = x;
    r.stride = stride;
    r.first = first;
    r.n = n;
    s->format->side[s->which].meta(s, src, ops, r.scale, r.zero);
    if (s->which == TKV_K) {
        tkvi_unpack_rows_k(v, &r, src);
        if (s->order) tkvi_sort_by_channel(s, r.scale);
        if (s->order) tkvi_sort_by_channel(s, r.zero);
    } else {
        tkvi_unpack_rows_v(v, &r, src);
    }
    tkvi_rows_to_floats(v, &r);
}

/* >>AVX2 */
/* Half h of a plane. In each 16 bytes, codes are sorted by r (core/tile.h): four with r = 0, then 1 .. 3. */
TKVI_FLAT_AVX2 __m256i tkvi_sorted_plane_avx2(const uint8_t *code, int p, int h) {
    const __m256i sorted = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12,
                                            1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(code + 64 * p + 32 * h));
    return _mm256_shuffle_epi8(x, sorted);
}

TKVI_FLAT_AVX2 __m256i tkvi_look_up_avx2(const int8_t *levels, __m256i code) {
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)levels);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), code);
}

static TKVI_TARGET_AVX2 void tkvi_sort_columns_avx2(const uint8_t *code, uint8_t *const *column) {
    int h, p;
    for (h = 0; h < 2; h++) {
        __m256i x[4], a, b, c, d;
        TKVI_UNROLL
        for (p = 0; p < 4; p++) x[p] = tkvi_sorted_plane_avx2(code, p, h);
        a = _mm256_unpacklo_epi32(x[0], x[1]);
        b = _mm256_unpacklo_epi32(x[2], x[3]);
        c = _mm256_unpackhi_epi32(x[0], x[1]);
        d = _mm256_unpackhi_epi32(x[2], x[3]);
        _mm256_storeu_si256((__m256i *)(void *)(column[0] + 32 * h), _mm256_unpacklo_epi64(a, b));
        _mm256_storeu_si256((__m256i *)(void *)(column[1] + 32 * h), _mm256_unpackhi_epi64(a, b));
        _mm256_storeu_si256((__m256i *)(void *)(column[2] + 32 * h), _mm256_unpacklo_epi64(c, d));
        _mm256_storeu_si256((__m256i *)(void *)(column[3] + 32 * h), _mm256_unpackhi_epi64(c, d));
    }
}

/* Stores 16 codes or levels of two tokens, which are two rows apart. */
TKVI_FLAT_AVX2 void tkvi_store_slab_rows_avx2(__m256i code, const int8_t *lower, const int8_t *upper,
                                              uint8_t *row, int stride) {
    __m256i x = lower ? tkvi_look_up_avx2(lower, code) : code;
    _mm_storeu_si128((__m128i *)(void *)row, _mm256_castsi256_si128(x));
    _mm_storeu_si128((__m128i *)(void *)(row + 2 * stride), _mm256_extracti128_si256(x, 1));
    if (!upper) return;
    x = tkvi_look_up_avx2(upper, code);
    _mm_storeu_si128((__m128i *)(void *)(row + 16), _mm256_castsi256_si128(x));
    _mm_storeu_si128((__m128i *)(void *)(row + 2 * stride + 16), _mm256_extracti128_si256(x, 1));
}

static TKVI_TARGET_AVX2 void tkvi_sort_slab_avx2(const uint8_t *code, const int8_t *lower,
                                                 const int8_t *upper, uint8_t *row, int stride) {
    const __m256i by_token = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    int p;
    for (p = 0; p < 4; p++, row += 4 * stride) {
        const __m256i a = _mm256_permutevar8x32_epi32(tkvi_sorted_plane_avx2(code, p, 0), by_token);
        const __m256i b = _mm256_permutevar8x32_epi32(tkvi_sorted_plane_avx2(code, p, 1), by_token);
        tkvi_store_slab_rows_avx2(_mm256_unpacklo_epi64(a, b), lower, upper, row, stride);
        tkvi_store_slab_rows_avx2(_mm256_unpackhi_epi64(a, b), lower, upper, row + stride, stride);
    }
}

/* Interleaves the bytes of vectors at distance h. Distances 8, 4, 2, 1 in this order transpose 16 x 16 bytes. */
TKVI_FLAT_AVX2 void tkvi_interleave_bytes_avx2(__m256i *x, const int h) {
    int i;
    TKVI_UNROLL
    for (i = 0; i < 8; i++) {
        __m256i *a = x + i / h * h + i, low = _mm256_unpacklo_epi8(a[0], a[h]);
        a[h] = _mm256_unpackhi_epi8(a[0], a[h]);
        a[0] = low;
    }
}

static TKVI_TARGET_AVX2 void tkvi_transpose_columns_avx2(tkvi_decoded_rows *r) {
    const int pad = r->s->pad;
    int c, k, i;
    for (c = 0; c < pad; c += 16)
        for (k = 0; k < 4; k += 2) {
            const uint8_t *from = r->column + c * TKVI_BLOCK + 16 * k;
            uint8_t *to = r->level + 4 * k * pad + c;
            __m256i x[16];
            TKVI_UNROLL
            for (i = 0; i < 16; i++)
                x[i] = _mm256_loadu_si256((const __m256i *)(const void *)(from + TKVI_BLOCK * i));
            tkvi_interleave_bytes_avx2(x, 8);
            tkvi_interleave_bytes_avx2(x, 4);
            tkvi_interleave_bytes_avx2(x, 2);
            tkvi_interleave_bytes_avx2(x, 1);
            TKVI_UNROLL
            for (i = 0; i < 16; i++) {
                uint8_t *row = to + (i / 4 * 16 + i % 4) * pad;
                _mm_storeu_si128((__m128i *)(void *)row, _mm256_castsi256_si128(x[i]));
                _mm_storeu_si128((__m128i *)(void *)(row + 4 * pad), _mm256_extracti128_si256(x[i], 1));
            }
        }
}

TKVI_FLAT_AVX2 void tkvi_row_to_floats_avx2(const tkvi_decoded_rows *r, int t, const int k,
                                            const int with_sign, int n, float *to) {
    const tkvi_side *s = r->s;
    const uint8_t *level = r->level + t * s->pad;
    const float *scale = k ? r->scale + t * s->groups / TKVI_BLOCK * s->pad : r->scale + t;
    const float *zero = r->zero + (scale - r->scale);
    int c, end;
    for (c = 0; c < s->dim; scale += TKVI_BLOCK, zero += TKVI_BLOCK) {
        const __m256 by = _mm256_set1_ps(*scale), plus = _mm256_set1_ps(*zero);
        for (end = k ? s->dim : tkvi_min(s->dim, c + s->group); c < end; c += 8) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(level + c));
            const __m256 x =
                _mm256_cvtepi32_ps(with_sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
            tkvi_store_first_avx2(
                to + c,
                k ? _mm256_fmadd_ps(x, _mm256_loadu_ps(scale + c), _mm256_loadu_ps(zero + c))
                  : _mm256_fmadd_ps(x, by, plus),
                n - c);
        }
    }
}

#define TKVI_ROW_(name, k, with_sign)                                                                        \
    static TKVI_TARGET_AVX2 void tkvi_row_##name##_avx2(const tkvi_decoded_rows *r, int t, int n,            \
                                                        float *to) {                                         \
        tkvi_row_to_floats_avx2(r, t, k, with_sign, n, to);                                                  \
    }
TKVI_ROW_(k, 1, 0)
TKVI_ROW_(v, 0, 0)
TKVI_ROW_(v_signed, 0, 1)
#undef TKVI_ROW_

static TKVI_TARGET_AVX2 void tkvi_rotate_row_back_avx2(float *y, const float *signs, int dim, float *to) {
    const int log2n = tkvi_log2_floor(dim), n = 1 << log2n;
    int c;
    if (n < dim) (void)tkvi_window_avx2(y + dim - n, NULL, y + dim - n, log2n);
    (void)tkvi_window_avx2(y, NULL, y, log2n);
    for (c = 0; c < dim; c += 8)
        tkvi_store_first_avx2(to + c, _mm256_xor_ps(_mm256_load_ps(y + c), _mm256_load_ps(signs + c)),
                              dim - c);
}

static const tkvi_row_ops tkvi_row_ops_avx2 = {tkvi_unpack_tile_avx2,
                                               tkvi_sort_columns_avx2,
                                               tkvi_sort_slab_avx2,
                                               tkvi_transpose_columns_avx2,
                                               {tkvi_row_k_avx2, tkvi_row_v_avx2, tkvi_row_v_signed_avx2},
                                               tkvi_rotate_row_back_avx2};

static void tkvi_decode_tiles_avx2(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src,
                                   int first, int n, float *x, size_t stride) {
    if (s->dim < 16) tkvi_decode_tiles_scalar(s, ops, src, first, n, x, stride);
    else tkvi_decode_tile_rows(&tkvi_row_ops_avx2, s, ops, src, first, n, x, stride);
}

/* >>AVX-512 */
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
#include "kernels/simd_end.inc"

/* A plane. In each 16 bytes, codes are sorted by r (core/tile.h): four with r = 0, then 1 .. 3. */
TKVI_FLAT_AVX512 __m512i tkvi_sorted_plane_avx512(const uint8_t *code, int p) {
    const __m512i sorted = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    return _mm512_shuffle_epi8(_mm512_load_si512((const void *)(code + 64 * p)), sorted);
}

TKVI_FLAT_AVX512 __m512i tkvi_look_up_avx512(const int8_t *levels, __m512i code) {
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)levels);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), code);
}

static TKVI_TARGET_AVX512 void tkvi_sort_columns_avx512(const uint8_t *code, uint8_t *const *column) {
    __m512i x[4], a, b, c, d;
    int p;
    TKVI_UNROLL
    for (p = 0; p < 4; p++) x[p] = tkvi_sorted_plane_avx512(code, p);
    a = _mm512_unpacklo_epi32(x[0], x[1]);
    b = _mm512_unpacklo_epi32(x[2], x[3]);
    c = _mm512_unpackhi_epi32(x[0], x[1]);
    d = _mm512_unpackhi_epi32(x[2], x[3]);
    _mm512_storeu_si512((void *)column[0], _mm512_unpacklo_epi64(a, b));
    _mm512_storeu_si512((void *)column[1], _mm512_unpackhi_epi64(a, b));
    _mm512_storeu_si512((void *)column[2], _mm512_unpacklo_epi64(c, d));
    _mm512_storeu_si512((void *)column[3], _mm512_unpackhi_epi64(c, d));
}

/* Stores the four quarters of a vector, `stride` bytes apart. */
TKVI_FLAT_AVX512 void tkvi_store_quarters_avx512(uint8_t *to, int stride, __m512i x) {
    _mm_storeu_si128((__m128i *)(void *)to, _mm512_castsi512_si128(x));
    _mm_storeu_si128((__m128i *)(void *)(to + stride), _mm512_extracti32x4_epi32(x, 1));
    _mm_storeu_si128((__m128i *)(void *)(to + 2 * stride), _mm512_extracti32x4_epi32(x, 2));
    _mm_storeu_si128((__m128i *)(void *)(to + 3 * stride), _mm512_extracti32x4_epi32(x, 3));
}

static TKVI_TARGET_AVX512 void tkvi_sort_slab_avx512(const uint8_t *code, const int8_t *lower,
                                                     const int8_t *upper, uint8_t *row, int stride) {
    const __m512i by_token = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int p;
    for (p = 0; p < 4; p++, row += 4 * stride) {
        const __m512i x = _mm512_permutexvar_epi32(by_token, tkvi_sorted_plane_avx512(code, p));
        tkvi_store_quarters_avx512(row, stride, lower ? tkvi_look_up_avx512(lower, x) : x);
        if (upper) tkvi_store_quarters_avx512(row + 16, stride, tkvi_look_up_avx512(upper, x));
    }
}

TKVI_FLAT_AVX512 void tkvi_interleave_bytes_avx512(__m512i *x, const int h) {
    int i;
    TKVI_UNROLL
    for (i = 0; i < 8; i++) {
        __m512i *a = x + i / h * h + i, low = _mm512_unpacklo_epi8(a[0], a[h]);
        a[h] = _mm512_unpackhi_epi8(a[0], a[h]);
        a[0] = low;
    }
}

static TKVI_TARGET_AVX512 void tkvi_transpose_columns_avx512(tkvi_decoded_rows *r) {
    const int pad = r->s->pad;
    int c, i;
    for (c = 0; c < pad; c += 16) {
        const uint8_t *from = r->column + c * TKVI_BLOCK;
        __m512i x[16];
        TKVI_UNROLL
        for (i = 0; i < 16; i++) x[i] = _mm512_load_si512((const void *)(from + TKVI_BLOCK * i));
        tkvi_interleave_bytes_avx512(x, 8);
        tkvi_interleave_bytes_avx512(x, 4);
        tkvi_interleave_bytes_avx512(x, 2);
        tkvi_interleave_bytes_avx512(x, 1);
        TKVI_UNROLL
        for (i = 0; i < 16; i++)
            tkvi_store_quarters_avx512(r->level + (i / 4 * 16 + i % 4) * pad + c, 4 * pad, x[i]);
    }
}

TKVI_FLAT_AVX512 void tkvi_store_first_avx512(float *to, __m512 x, int n) {
    if (n >= 16) _mm512_storeu_ps(to, x);
    else _mm512_mask_storeu_ps(to, (__mmask16)((1 << n) - 1), x);
}

TKVI_FLAT_AVX512 void tkvi_row_to_floats_avx512(const tkvi_decoded_rows *r, int t, const int k,
                                                const int with_sign, int n, float *to) {
    const tkvi_side *s = r->s;
    const uint8_t *level = r->level + t * s->pad;
    const float *scale = k ? r->scale + t * s->groups / TKVI_BLOCK * s->pad : r->scale + t;
    const float *zero = r->zero + (scale - r->scale);
    int c, end;
    for (c = 0; c < s->dim; scale += TKVI_BLOCK, zero += TKVI_BLOCK) {
        const __m512 by = _mm512_set1_ps(*scale), plus = _mm512_set1_ps(*zero);
        for (end = k ? s->dim : tkvi_min(s->dim, c + s->group); c < end; c += 16) {
            const __m128i bytes = _mm_load_si128((const __m128i *)(const void *)(level + c));
            const __m512 x =
                _mm512_cvtepi32_ps(with_sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
            tkvi_store_first_avx512(
                to + c,
                k ? _mm512_fmadd_ps(x, _mm512_loadu_ps(scale + c), _mm512_loadu_ps(zero + c))
                  : _mm512_fmadd_ps(x, by, plus),
                n - c);
        }
    }
}

#define TKVI_ROW_(name, k, with_sign)                                                                        \
    static TKVI_TARGET_AVX512 void tkvi_row_##name##_avx512(const tkvi_decoded_rows *r, int t, int n,        \
                                                            float *to) {                                     \
        tkvi_row_to_floats_avx512(r, t, k, with_sign, n, to);                                                \
    }
TKVI_ROW_(k, 1, 0)
TKVI_ROW_(v, 0, 0)
TKVI_ROW_(v_signed, 0, 1)
#undef TKVI_ROW_

static TKVI_TARGET_AVX512 void tkvi_rotate_row_back_avx512(float *y, const float *signs, int dim, float *to) {
    const int log2n = tkvi_log2_floor(dim), n = 1 << log2n;
    int c;
    if (n < dim) (void)tkvi_window_avx512(y + dim - n, NULL, y + dim - n, log2n);
    (void)tkvi_window_avx512(y, NULL, y, log2n);
    for (c = 0; c < dim; c += 16)
        tkvi_store_first_avx512(to + c, _mm512_xor_ps(_mm512_load_ps(y + c), _mm512_load_ps(signs + c)),
                                dim - c);
}

static const tkvi_row_ops tkvi_row_ops_avx512 = {
    tkvi_unpack_tile_avx512,
    tkvi_sort_columns_avx512,
    tkvi_sort_slab_avx512,
    tkvi_transpose_columns_avx512,
    {tkvi_row_k_avx512, tkvi_row_v_avx512, tkvi_row_v_signed_avx512},
    tkvi_rotate_row_back_avx512};

static void tkvi_decode_tiles_avx512(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src,
                                     int first, int n, float *x, size_t stride) {
    if (s->dim < 16) tkvi_decode_tiles_scalar(s, ops, src, first, n, x, stride);
    else tkvi_decode_tile_rows(&tkvi_row_ops_avx512, s, ops, src, first, n, x, stride);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif /* TKVI_AVX512 */

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_VALUES_X86_H */
