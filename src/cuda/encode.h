/*
 * encode.h - one head's side of a block, decoded and encoded by the threads of a CTA: the functions of
 * tieredkv.h, a thread for each column of K, token of V, or tile. So the bytes are those of the host.
 *
 * nvcc fuses a product and a sum where it can. In these functions that changes nothing: the products that
 * feed sums are exact, or stand in functions that are not inlined (tests/test_cuda_build.py looks at what it
 * makes of them).
 */
#ifndef TKVCU_ENCODE_H
#define TKVCU_ENCODE_H

#include "warp.h"

#define TKVCU_ENCODERS 128 /* threads: one for each channel of 128 */

/* Shared memory of the CTA. Behind it: tkvi_columns [head_dim / 16], codes [head_dim][64], values
 * [64][head_dim + 1]. An odd stride: threads that walk along tokens, and those that walk along channels, all
 * have banks of their own. */
typedef struct tkvcu_desk {
    tkvi_format format[2];
    tkvi_side side[2]; /* from, to */
    float scale[2 * 128], zero[2 * 128];
    float mean[128], middle[128]; /* A, by channel; channel: by position */
    uint8_t channel[128], width[128], log[128], by[128];
} tkvcu_desk;

__host__ __device__ static inline size_t tkvcu_desk_bytes(int head_dim) {
    const size_t dim = (size_t)head_dim;
    return tkvi_align_up(sizeof(tkvcu_desk)) + dim / TKVI_LANES * sizeof(tkvi_columns) + dim * TKVI_BLOCK +
           TKVI_BLOCK * (dim + 1) * sizeof(float);
}

__device__ static inline tkvi_columns *tkvcu_columns_of(tkvcu_desk *d) {
    return (tkvi_columns *)(void *)((uint8_t *)d + tkvi_align_up(sizeof *d));
}

__device__ static inline uint8_t *tkvcu_codes_of(tkvcu_desk *d, int head_dim) {
    return (uint8_t *)(tkvcu_columns_of(d) + head_dim / TKVI_LANES);
}

__device__ static inline float *tkvcu_values_of(tkvcu_desk *d, int head_dim) {
    return (float *)(void *)(tkvcu_codes_of(d, head_dim) + head_dim * TKVI_BLOCK);
}

/* The side as the functions of tieredkv.h want it. One thread writes it. */
__device__ static inline void tkvcu_side_open(const tkvcu_view *v, const tkvcu_side *d, int which, int fit,
                                              tkvi_format *f, tkvi_side *s) {
    int w;
    memset(f, 0, sizeof *f);
    memset(s, 0, sizeof *s);
    s->format = f;
    s->which = which ? TKV_V : TKV_K;
    s->dim = s->pad = (int16_t)v->head_dim;
    s->top = d->top;
    s->bytes = d->bytes;
    s->code_bytes = d->code_bytes;
    s->groups = 1;
    s->group = which ? TKV_MAX_HEAD_DIM : TKVI_BLOCK;
    if (d->kind == TKVCU_KIVI) {
        f->bits = d->half_bits / 2;
        s->fit = (int8_t)fit;
        s->group = d->group;
        s->groups = (int16_t)((which ? v->head_dim : TKVI_BLOCK) / d->group);
        s->runs.n[f->bits] = (uint16_t)(s->pad / 4);
    }
    if (d->kind == TKVCU_A) {
        for (w = 1; w <= 6; w++) s->runs.n[w] = (uint16_t)(4 * d->slabs[w]);
        if (d->table >= 0) {
            s->order = v->order + d->table;
            s->mean = v->mean + d->table;
        }
    }
    if (d->kind == TKVCU_R) {
        f->rotated = 1;
        s->half_bits = (int8_t)d->half_bits;
        s->pairs = d->half_bits == 3;
        if (s->pairs) s->levels = tkvi_r_pairs;
        s->runs.n[s->pairs ? 3 : d->half_bits / 2] = (uint16_t)(s->pad / 4 / (s->pairs ? 2 : 1));
    }
}

/* Walks over the tiles that are this thread's. Those that share a vector of 1-bit halves belong to one. */
typedef struct tkvcu_walk {
    const tkvi_side *s;
    tkvi_tile_at at;
    int width, i, left; /* of tile i; left: of its width, behind it */
} tkvcu_walk;

__device__ static inline tkvcu_walk tkvcu_walk_of(const tkvi_side *s) {
    tkvcu_walk w;
    w.s = s;
    w.at = tkvi_tiles(&s->runs);
    w.width = TKVI_MAX_WIDTH + 1;
    w.i = -1;
    w.left = 0;
    return w;
}

__device__ static inline int tkvcu_walk_next(tkvcu_walk *w) {
    int owner;
    do {
        if (w->i >= 0) tkvi_next_tile(&w->at, w->width);
        w->i++;
        while (w->left == 0) {
            if (--w->width == 0) return 0;
            w->left = w->s->runs.n[w->width];
        }
        w->left--;
        owner = tkvi_has_half[w->width] ? w->at.half / 2 : w->i;
    } while (owner % (int)blockDim.x != (int)threadIdx.x);
    return 1;
}

/* Bits of the tile that has this position. */
__device__ static inline int tkvcu_width_at(const tkvi_side *s, int position) {
    int width, end = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        end += 4 * s->runs.n[width];
        if (position < end) return width;
    }
    return 0;
}

/* >>decoding */
/* Scale and zero number i of the side. */
__device__ static inline void tkvcu_meta(const tkvi_side *s, int kind, const uint8_t *meta, int n, int i,
                                         float *scale, float *zero) {
    if (kind == TKVCU_KIVI) {
        *scale = tkvi_f16_to_f32(tkvi_load16(meta + 2 * i));
        *zero = tkvi_f16_to_f32(tkvi_load16(meta + 2 * (n + i)));
    } else if (kind == TKVCU_R) {
        const float middle = s->pairs ? 0.0f : 0.5f * (float)((1 << s->half_bits / 2) - 1);
        *scale = tkvi_log_value(meta[i], s->top) * (s->pairs ? 1.0f / 64.0f : 1.0f);
        *zero = -middle * *scale;
    } else {
        const int width = tkvcu_width_at(s, i), unit = tkvi_a_unit[width];
        const float mean = s->mean ? s->mean[i] : 0.0f;
        *scale = width ? tkvi_log_value(meta[i], s->top) : 0.0f;
        *zero = width
                    ? tkvi_zero(meta[n + i], *scale, mean, 1.0f / (float)unit, ((1 << width) - 1) * unit / 2)
                    : tkvi_f32(tkvi_f16_to_f32((uint16_t)(meta[i] | meta[n + i] << 8)) + mean);
    }
}

/* The rotation of rotate.h, or back, of all tokens at once; head_dim is a power of two. Begins and ends with
 * all threads together. */
__device__ static inline void tkvcu_rotate(float *x, int dim, int back) {
    const int me = (int)threadIdx.x, all = (int)blockDim.x, stride = dim + 1;
    int i, h, log2n = 0;
    while (dim >> (log2n + 1)) log2n++;
    for (i = me; !back && i < TKVI_BLOCK * dim; i += all) {
        const int c = i % dim;
        float *y = x + i / dim * stride + c;
        const float z = tkvi_clampf(*y, -1e30f, 1e30f); /* as format_r.h; bfloat16 has more */
        *y = tkvi_signs[c / 32] >> c % 32 & 1 ? -z : z;
    }
    for (h = 1; h < dim; h *= 2) {
        __syncthreads();
        for (i = me; i < TKVI_BLOCK * dim / 2; i += all) {
            const int pair = i % (dim / 2);
            float *y = x + i / (dim / 2) * stride + pair / h * 2 * h + pair % h;
            const float a = y[0], b = y[h];
            y[0] = a + b;
            y[h] = a - b;
        }
    }
    __syncthreads();
    for (i = me; i < TKVI_BLOCK * dim; i += all) {
        const int c = i % dim;
        float *y = x + i / dim * stride + c;
        const float z = *y * tkvi_hadamard_norm[log2n];
        *y = back && tkvi_signs[c / 32] >> c % 32 & 1 ? -z : z;
    }
    __syncthreads();
}

/* Token t of a V side. */
__device__ static inline void tkvcu_v_token(const tkvcu_desk *d, const uint8_t (*code)[TKVI_TILE_CODES],
                                            int t, float *x) {
    const tkvi_side *s = &d->side[0];
    int width, i, tile = 0, slab = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->runs.n[width]; i += 4, tile += 4) {
            tkvi_v_values(s, width, code[tile + t / 16], slab, t, d->scale, d->zero, x);
            slab += tkvi_slab_channels(s, width);
        }
}

/* A side's 64 tokens to the desk's values, by all threads; exact ones: bf16 or not. */
__device__ static inline void tkvcu_decode(tkvcu_desk *d, const tkvcu_side *from, const uint8_t *src) {
    const tkvi_side *s = &d->side[0];
    const int dim = s->dim, stride = dim + 1, me = (int)threadIdx.x, all = (int)blockDim.x;
    uint8_t(*code)[TKVI_TILE_CODES] = (uint8_t(*)[TKVI_TILE_CODES])tkvcu_codes_of(d, dim);
    float *x = tkvcu_values_of(d, dim);
    int i;
    if (from->kind == TKVCU_EXACT) {
        for (i = me; i < TKVI_BLOCK * dim; i += all) {
            const uint16_t h = tkvi_load16(src + 2 * i);
            x[i / dim * stride + i % dim] = from->bf16 ? tkvi_bf16_to_f32(h) : tkvi_f16_to_f32(h);
        }
    } else {
        const int n = s->groups * (s->which == TKV_V ? TKVI_BLOCK : dim);
        tkvcu_walk w = tkvcu_walk_of(s);
        while (tkvcu_walk_next(&w)) tkvi_unpack_tile(src, &w.at, w.width, code[w.i]);
        for (i = me; i < n; i += all)
            tkvcu_meta(s, from->kind, src + s->code_bytes, n, i, &d->scale[i], &d->zero[i]);
        __syncthreads();
        for (i = me; i < (s->which == TKV_V ? TKVI_BLOCK : dim); i += all)
            if (s->which == TKV_V) tkvcu_v_token(d, code, i, x + i * stride);
            else
                tkvi_k_values(s, tkvcu_width_at(s, i), code[i / 4], i, 0, TKVI_BLOCK, d->scale, d->zero, x,
                              (size_t)stride);
    }
    __syncthreads();
    if (from->kind == TKVCU_R) tkvcu_rotate(x, dim, 1);
}

/* >>encoding: the desk's values as side 1, each kind in the steps of its format_*.h. dst was cleared. */
__device__ static inline void tkvcu_encode_a(tkvcu_desk *d, uint8_t *dst) {
    const tkvi_side *s = &d->side[1];
    const int dim = s->dim, me = (int)threadIdx.x, all = (int)blockDim.x;
    uint8_t(*column)[TKVI_BLOCK] = (uint8_t(*)[TKVI_BLOCK])tkvcu_codes_of(d, dim);
    tkvi_columns *columns = tkvcu_columns_of(d);
    tkvcu_walk w;
    int p;
    for (p = me; p < dim; p += all) {
        const int from = tkvi_channel(s, p);
        d->channel[p] = (uint8_t)from;
        d->width[from] = (uint8_t)tkvcu_width_at(s, p);
        d->mean[from] = s->mean ? s->mean[p] : 0.0f;
    }
    for (p = me * TKVI_LANES; p < dim; p += all * TKVI_LANES) {
        tkvi_columns *c = &columns[p / TKVI_LANES];
        c->x = tkvcu_values_of(d, dim) + p;
        c->stride = (size_t)dim + 1;
        c->n = TKVI_BLOCK;
        c->lanes = TKVI_LANES;
        c->mean = d->mean + p;
        c->width = d->width + p;
        c->code = column + p;
        c->log = d->log + p;
        c->offset = d->by + p;
        c->middle = d->middle + p;
    }
    __syncthreads();
    for (p = me; p < dim; p += all) {
        tkvi_columns *c = &columns[p / TKVI_LANES];
        tkvi_a_integers(c, p % TKVI_LANES);
        tkvi_a_search(c, p % TKVI_LANES);
        if (tkvi_a_settle(c, p % TKVI_LANES, s->top)) tkvi_a_recode(c, p % TKVI_LANES, s->top);
    }
    __syncthreads();
    for (w = tkvcu_walk_of(s); tkvcu_walk_next(&w);) {
        alignas(8) uint8_t tile[TKVI_TILE_CODES];
        tkvi_weave_scalar(column, d->channel + 4 * w.i, tile);
        tkvi_pack_tile(dst, &w.at, w.width, tile);
    }
    for (p = me; p < dim; p += all) {
        const int c = d->channel[p];
        uint8_t *meta = dst + s->code_bytes + p;
        tkvi_a_put(d->width[c], d->log[c], d->by[c], d->middle[c], meta, meta + dim);
    }
}

__device__ static inline void tkvcu_pack(const tkvi_side *s, uint8_t (*code)[TKVI_TILE_CODES], uint8_t *dst) {
    tkvcu_walk w = tkvcu_walk_of(s);
    while (tkvcu_walk_next(&w)) tkvi_pack_tile(dst, &w.at, w.width, code[w.i]);
}

__device__ static inline void tkvcu_encode_r(tkvcu_desk *d, uint8_t *dst) {
    const tkvi_side *s = &d->side[1];
    const int dim = s->dim;
    uint8_t(*code)[TKVI_TILE_CODES] = (uint8_t(*)[TKVI_TILE_CODES])tkvcu_codes_of(d, dim);
    float *x = tkvcu_values_of(d, dim);
    int t;
    tkvcu_rotate(x, dim, 0);
    for (t = (int)threadIdx.x; t < TKVI_BLOCK; t += (int)blockDim.x) {
        const float scale = tkvi_r_rotated(s, x + t * (dim + 1), t, code);
        dst[s->code_bytes + (size_t)t] =
            (uint8_t)tkvi_log_code(tkvi_r_close(s, t, TKVI_BLOCK, code, scale), s->top);
    }
    __syncthreads();
    tkvcu_pack(s, code, dst);
}

__device__ static inline void tkvcu_encode_kivi(tkvcu_desk *d, uint8_t *dst) {
    const tkvi_side *s = &d->side[1];
    const int dim = s->dim, n = s->groups * (s->which == TKV_V ? TKVI_BLOCK : dim);
    uint8_t(*code)[TKVI_TILE_CODES] = (uint8_t(*)[TKVI_TILE_CODES])tkvcu_codes_of(d, dim);
    float *x = tkvcu_values_of(d, dim);
    uint8_t *meta = dst + s->code_bytes;
    int i;
    for (i = (int)threadIdx.x; i < n; i += (int)blockDim.x)
        if (s->which == TKV_V)
            tkvi_kivi_row(s, x + i % TKVI_BLOCK * (dim + 1), i / TKVI_BLOCK, i % TKVI_BLOCK, code, meta);
        else tkvi_kivi_column(s, x, (size_t)dim + 1, TKVI_BLOCK, i / dim, i % dim, code, meta);
    __syncthreads();
    tkvcu_pack(s, code, dst);
}

__device__ static inline void tkvcu_zero_bytes(uint8_t *dst, size_t n) { /* multiples of 64, aligned to 16 */
    size_t i;
    for (i = (size_t)threadIdx.x * 8; i < n; i += (size_t)blockDim.x * 8) tkvi_store8(dst + i, 0);
}

__device__ static inline void tkvcu_encode(tkvcu_desk *d, int kind, uint8_t *dst) {
    tkvcu_zero_bytes(dst, d->side[1].bytes);
    __syncthreads();
    if (kind == TKVCU_A) tkvcu_encode_a(d, dst);
    else if (kind == TKVCU_R) tkvcu_encode_r(d, dst);
    else tkvcu_encode_kivi(d, dst);
    __syncthreads();
}

#endif /* TKVCU_ENCODE_H */
