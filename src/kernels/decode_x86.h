/*
 * kernels/decode_x86.h - attention on TKVI_AS_DECODED formats on x86. Codes become levels in registers, so tokens
 * need no decode function. kernels/avx2.h and kernels/avx512.h have the loops.
 *
 * This file locates codes, levels and scales of a side:
 *
 *     x[c] = level[code[c]] * scale + zero     scale, zero: per channel (keys of KVQuant), or per token. Scales per
 *                                              token can also differ between groups of 2^shift channels.
 *
 * It also moves the options of a format from the tokens to the query, which costs less:
 *     center    q.(y + mean) = q.y + q.mean
 *     rotate    q.(rotate back y) = (rotate q).y. The output of V is rotated back after the sum.
 *     RoPE      q.(k rotated by start + t) = (q rotated back by start).(k rotated by t). Tables hold positions
 *               0 .. 15. After every 16 tokens the query is rotated back by 16 more.
 *     outliers  Outliers of K are added to the decoded keys, those of V to the output.
 *
 * q.ref is subtracted last. The rounding of a large q.ref, 1e-7 of it, is far below the error of these formats.
 * Sums have another order than in decode. So attention agrees with decode within rounding, not bit by bit.
 *
 * Channels come in vectors of 16. With RoPE, vectors 2i and 2i + 1 hold the partners of 16 pairs.
 */
#ifndef TKVI_KERNELS_DECODE_X86_H
#define TKVI_KERNELS_DECODE_X86_H

#include "kernels/x86.h"

#ifdef TKVI_X86

typedef enum tkvi_code_kind {
    TKVI_CODES_TABLE, /* 2 to 4 bits, with a table of levels */
    TKVI_CODES_INT8,
    TKVI_CODES_E4M3,
    TKVI_CODES_E5M2
} tkvi_code_kind;

/* A side as rows of codes. */
typedef struct tkvi_code_rows {
    const tkvi_side *s;
    const tkvi_rope *rope;
    const uint8_t *codes, *slots; /* slots: outliers of KVQuant, or NULL */
    size_t row_bytes;             /* codes of one token */
    /* by_channel 1: scale[c] and zero[c]. 0: scale[token * scales_per_token + (channel >> shift)] and zero[token]. */
    int bits, by_channel, shift, scales_per_token;
    tkvi_code_kind kind;
    const uint8_t *
        factors; /* E4M3, of 16 channels each, to be multiplied into scale: [token][scales_per_token]; or NULL */
    uintptr_t ahead;
    int n_vectors, n_partners;                /* the first n_partners vectors hold RoPE partners */
    int vector_at[TKV_MAX_HEAD_DIM / 16 + 2]; /* byte of a row where the codes of a vector begin */
    TKVI_ALIGNED float level[16];
    TKVI_ALIGNED float scale[TKVI_BLOCK * TKVI_MAX_GROUPS * 2], zero[TKV_MAX_HEAD_DIM + 32];
} tkvi_code_rows;

#define TKVI_VECTOR_FLOATS (TKV_MAX_HEAD_DIM + 32) /* largest size of a row in vector order */

/* Repeats the 2^bits levels, so that higher bits of an index make no difference. */
static void tkvi_set_level_table(tkvi_code_rows *r, const float *level, int bits) {
    int i;
    for (i = 0; i < 16; i++) r->level[i] = level[i & ((1 << bits) - 1)];
}

static int tkvi_open_token_rows(tkvi_code_rows *r, const uint8_t *src, const tkvi_simd_ops *ops) {
    const tkvi_side *s = r->s;
    const tkvi_token_at at = tkvi_token_places(s);
    float level[16];
    int c;
    r->row_bytes = at.row;
    r->bits = s->grid->bits;
    r->scales_per_token = s->groups;
    r->shift = s->group == 32 ? 5 : s->group == 64 ? 6 : 8;
    if (r->bits == 4) {
        for (c = 0; c < 16; c++) level[c] = s->grid->level(c);
        tkvi_set_level_table(r, level, 4);
    } else {
        r->kind = s->grid == &tkvi_grid_int8   ? TKVI_CODES_INT8
                  : s->grid == &tkvi_grid_e4m3 ? TKVI_CODES_E4M3
                                               : TKVI_CODES_E5M2;
    }
    if (at.parts) {
        r->factors = src + at.part;
        r->scales_per_token = at.parts;
        r->shift = 4;
    }
    ops->f16_to_f32(src + at.scale, TKVI_BLOCK * s->groups, r->scale);
    return 1;
}

/* Locates the vectors in a row of codes. Returns 0 if a vector does not begin at a whole byte. */
static int tkvi_place_vectors(tkvi_code_rows *r) {
    const tkvi_rope *rope = r->rope;
    int c = 0, n = 0, i;
    if (rope) {
        for (i = 0; i < rope->pairs; i += 16) {
            r->vector_at[n++] = i * rope->step * r->bits / 8;
            r->vector_at[n++] = (rope->step == 2 ? 2 * i : i + rope->apart) * r->bits / 8;
        }
        c = 2 * rope->pairs;
        if ((rope->step == 1 && rope->pairs * r->bits % 8) || (c < r->s->dim && c % 8)) return 0;
    }
    r->n_partners = n;
    for (; c < r->s->dim; c += 16) r->vector_at[n++] = c * r->bits / 8;
    r->n_vectors = n;
    return 1;
}

/* Sorts channels into the order of the vectors. Lanes without a channel get 0. */
static void tkvi_sort_by_vector(const tkvi_code_rows *r, const float *from, float *to) {
    const tkvi_rope *rope = r->rope;
    const int dim = r->s->dim;
    int i, j, c = 0;
    if (16 * r->n_vectors > dim) memset(to, 0, (size_t)(16 * r->n_vectors) * sizeof *to);
    if (rope) {
        for (i = 0; i < rope->pairs; i += 16, to += 32) {
            const int n = tkvi_min(16, rope->pairs - i);
            if (rope->step == 1 && n == 16) {
                memcpy(to, from + i, 16 * sizeof *to);
                memcpy(to + 16, from + i + rope->apart, 16 * sizeof *to);
                continue;
            }
            for (j = 0; j < n; j++) {
                to[j] = from[(i + j) * rope->step];
                to[16 + j] = from[(i + j) * rope->step + rope->apart];
            }
        }
        c = 2 * rope->pairs;
    }
    memcpy(to, from + c, (size_t)(dim - c) * sizeof *to);
}

/* Prepares reading of a side. Returns 0 if this file does not support it. */
static int tkvi_open_code_rows(tkvi_code_rows *r, const tkvi_side *s, const uint8_t *src, const uint8_t *next,
                               const tkvi_simd_ops *ops) {
    tkvi_kvquant_ranges own;
    tkvi_book standard;
    r->s = s;
    r->rope = s->rope && s->rope->pairs > 0 ? s->rope : NULL;
    r->codes = src;
    r->ahead = tkvi_prefetch_distance(src, next);
    r->slots = r->factors = NULL;
    r->kind = TKVI_CODES_TABLE;
    r->by_channel = r->scales_per_token = r->shift = 0;
    if (TKVI_HAS_TOKEN_FORMATS && s->grid) return tkvi_open_token_rows(r, src, ops) && tkvi_place_vectors(r);
    if (!TKVI_HAS_KVQUANT || s->format->side[s->which].layout != tkvi_kvquant_layout) return 0;
    r->row_bytes = tkvi_kvquant_places(s).row;
    r->bits = s->format->bits;
    if (!tkvi_place_vectors(r)) return 0;
    if (s->slots) r->slots = src + tkvi_kvquant_places(s).slot;
    tkvi_set_level_table(r, tkvi_kvquant_decoded(s, tkvi_kvquant_book(s, &standard)), r->bits);
    r->by_channel = s->which == TKV_K;
    if (r->by_channel) {
        if (!tkvi_kvquant_ranges_of(s, src, &own)) return 0;
        tkvi_sort_by_vector(r, own.radius, r->scale);
        tkvi_sort_by_vector(r, own.middle, r->zero);
    } else {
        r->scales_per_token = 1;
        r->shift = 8;
        ops->f16_to_f32(src + s->code_bytes, TKVI_BLOCK, r->scale);
        ops->f16_to_f32(src + s->code_bytes + 2 * TKVI_BLOCK, TKVI_BLOCK, r->zero);
    }
    return 1;
}

/* Prefetches the bytes of the next record that correspond to token t of this one. */
TKVI_FLAT void tkvi_prefetch_code_row(const tkvi_code_rows *r, int t) {
    const tkvi_side *s = r->s;
    tkvi_prefetch_bytes(r->codes + (size_t)t * r->row_bytes, (int)r->row_bytes, r->ahead);
    if (t % 4 == 0 && (size_t)(16 * t) < s->meta_bytes)
        tkvi_prefetch(r->codes + s->code_bytes + 16 * t, r->ahead);
}

/* plain: out, a float side for rows in vector order, to be passed to kernels of the exact tiers. */
static void tkvi_make_scratch_side(const tkvi_code_rows *r, tkvi_side *plain) {
    *plain = *r->s;
    plain->format = &tkvi_formats[TKV_F32];
    plain->pad = (int16_t)(16 * r->n_vectors);
}

TKVI_FLAT int32_t tkvi_load_int_x86(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* Cosines and sines of RoPE for the block's first key. As tkvi_cos_sin, but in floats, with an error of 1e-7. */
static TKVI_TARGET_AVX2 void tkvi_rope_start_angles(const tkvi_code_rows *r, float *cosine, float *sine) {
    const uint64_t start = (uint64_t)(int64_t)tkvi_load_int_x86(r->codes + r->s->code_bytes);
    const __m256i one = _mm256_set1_epi32(1);
    TKVI_ALIGNED int32_t angle[TKV_MAX_HEAD_DIM / 2];
    int j;
    for (j = 0; j < r->rope->pairs; j++) angle[j] = (int32_t)(uint32_t)(start * r->rope->frequency[j] >> 32);
    for (; j % 16 != 0; j++) angle[j] = 0; /* vectors of 16 are read, and must hold no NaN */
    for (j = 0; j < tkvi_round_up(r->rope->pairs, 16); j += 8) {
        const __m256i p = _mm256_load_si256((const __m256i *)(const void *)(angle + j));
        const __m256i quarter = _mm256_srai_epi32(_mm256_add_epi32(p, _mm256_set1_epi32(0x20000000)), 30);
        const __m256 x =
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(p, _mm256_slli_epi32(quarter, 30))),
                          _mm256_set1_ps(1.46291808e-9f)); /* 2 pi / 2^32 */
        const __m256 z = _mm256_mul_ps(x, x);
        __m256 s = _mm256_fmadd_ps(_mm256_set1_ps(-1.95152960e-4f), z, _mm256_set1_ps(8.33216087e-3f));
        __m256 c = _mm256_fmadd_ps(_mm256_set1_ps(2.44331571e-5f), z, _mm256_set1_ps(-1.38873163e-3f)), swap,
               y;
        s = _mm256_fmadd_ps(s, z, _mm256_set1_ps(-1.66666546e-1f));
        c = _mm256_fmadd_ps(c, z, _mm256_set1_ps(4.16666457e-2f));
        s = _mm256_fmadd_ps(_mm256_mul_ps(s, z), x, x);
        c = _mm256_fmadd_ps(c, z, _mm256_set1_ps(-0.5f));
        c = _mm256_fmadd_ps(c, z, _mm256_set1_ps(1.0f));
        swap = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(quarter, one), one));
        y = _mm256_blendv_ps(s, c, swap); /* in the next quarter, sine is cosine and cosine is -sine */
        c = _mm256_blendv_ps(c, s, swap);
        s = _mm256_xor_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(quarter, 1), 31)));
        c = _mm256_xor_ps(c, _mm256_castsi256_ps(_mm256_slli_epi32(
                                 _mm256_srli_epi32(_mm256_add_epi32(quarter, one), 1), 31)));
        _mm256_storeu_ps(cosine + j, c);
        _mm256_storeu_ps(sine + j, s);
    }
}

/* to: out, the queries in the order of the vectors, [row][16 * n_vectors]. less: out, q.(ref - mean) of each row, to
 * be subtracted from its scores. */
static void tkvi_place_queries(const tkvi_code_rows *r, const float *q, const float *ref, int rows, float *to,
                               float *less) {
    const tkvi_side *s = r->s;
    float plain[TKV_MAX_HEAD_DIM];
    int i, c;
    memcpy(plain, ref, (size_t)s->pad * sizeof(float));
    if (s->grid && s->center)
        for (c = 0; c < s->dim; c++) plain[c] -= tkvi_f16_at(r->codes + tkvi_token_places(s).mean + 2 * c);
    for (i = 0; i < rows; i++) less[i] = tkvi_float_dot(q + i * s->pad, plain, s->pad);
    for (i = 0; i < rows; i++) {
        memcpy(plain, q + i * s->pad, (size_t)s->pad * sizeof(float));
        if (s->grid && s->rotate) tkvi_rotate(plain, s->dim);
        tkvi_sort_by_vector(r, plain, to + 16 * i * r->n_vectors);
    }
}

/* Position of channel c in the order of the vectors. */
TKVI_FLAT int tkvi_vector_place(const tkvi_code_rows *r, int c) {
    const tkvi_rope *rope = r->rope;
    int second, pair;
    if (!rope) return c;
    if (c >= 2 * rope->pairs) return c - 2 * rope->pairs + 16 * r->n_partners;
    second = rope->step == 2 ? c & 1 : c >= rope->apart;
    pair = rope->step == 2 ? c >> 1 : c - (second ? rope->apart : 0);
    return pair / 16 * 32 + pair % 16 + 16 * second;
}

TKVI_FLAT_AVX2 float tkvi_f16_x86(const uint8_t *p) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128((int)tkvi_load16(p))));
}

/* Adds the outliers of n keys to rows of 16 * n_vectors floats. where: out, their places. Returns their number. */
static TKVI_TARGET_AVX2 int tkvi_scatter_outliers_k(const tkvi_code_rows *r, int from, int n, float *more,
                                                    float **where) {
    const uint8_t *p = r->slots + 3 * from * r->s->slots;
    int t, i, count = 0;
    for (t = 0; t < n; t++, more += 16 * r->n_vectors)
        for (i = 0; i < r->s->slots; i++, p += 3)
            if (p[0] < r->s->dim) {
                where[count] = more + tkvi_vector_place(r, p[0]);
                *where[count++] += tkvi_f16_x86(p + 1);
            }
    return count;
}

static TKVI_TARGET_AVX2 void tkvi_add_outliers_v(const tkvi_code_rows *r, const float *p, int rows, int n,
                                                 float *out) {
    const uint8_t *at = r->slots;
    int t, i, k;
    for (t = 0; t < n; t++)
        for (i = 0; i < r->s->slots; i++, at += 3) {
            const float x = tkvi_f16_x86(at + 1);
            if (at[0] >= r->s->dim) continue;
            for (k = 0; k < rows; k++) out[k * r->s->pad + at[0]] += p[k * TKVI_BLOCK + t] * x;
        }
}

#endif /* TKVI_X86 */

#endif /* TKVI_KERNELS_DECODE_X86_H */
