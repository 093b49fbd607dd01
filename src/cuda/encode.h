/*
 * encode.h - the threads of a thread block decode and encode one head's side of a block. They call the functions of
 * tieredkv.h, so the bytes are those of the host.
 *
 * A line is a channel of K or a token of V. There are 4 * head_dim threads, and each has 16 values of a line. Four
 * neighbour threads share a channel of K: each has every fourth token. head_dim / 16 neighbours share a token of V in
 * the same way. Reductions over a line are sums of integers, minima and maxima, which do not depend on the order. So
 * are those that find the outlier of A, over all channels.
 *
 * nvcc fuses multiply and add where it can. Here that does not change results: the products are exact, or come from
 * an instruction that nvcc does not fuse. tests/test_cuda_build.py checks the compiled code.
 */
#ifndef TKVCU_ENCODE_H
#define TKVCU_ENCODE_H

#include "warp.h"

#define TKVCU_THREAD_VALUES 16  /* values of a line per thread */
#define TKVCU_CHANNEL_THREADS 4 /* threads of a channel of K */

/* Reads the thread index anew in each call. Otherwise the compiler hoists all values derived from it, for every
 * format, out of the loop over blocks, and registers spill. */
TKVCU_DEVICE int tkvcu_thread_index(void) {
#ifdef TKVCU_ON_CPU
    return (int)threadIdx.x;
#else
    int me;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(me));
    __builtin_assume(me >= 0);
    return me;
#endif
}

typedef struct alignas(16) tkvcu_bytes16 { /* copied in one instruction */
    uint64_t x[2];
} tkvcu_bytes16;

/* Shared memory of the thread block. Rows of values are padded by 8. Threads that read along tokens or along
 * channels then use different banks. */
template <int Dim> struct tkvcu_transcoder {
    enum { THREADS = TKVI_BLOCK * Dim / TKVCU_THREAD_VALUES, STRIDE = Dim + 8 };
    tkvi_format format[2];
    tkvi_side side[2]; /* source, target */
    float scale[Dim], zero[Dim];
    uint8_t row[Dim];                  /* A: the outlier's row of the source side */
    int32_t deviation[TKVI_BLOCK];     /* A: of each token, summed over the channels */
    int32_t largest;                   /* A: bits of the outlier's largest residual */
    alignas(16) uint8_t meta[4 * Dim]; /* of the target side */
    alignas(16) uint8_t code[Dim / 4][TKVI_TILE_CODES];
    union {
        alignas(16) float x[TKVI_BLOCK * STRIDE];
        uint8_t bytes[TKVI_BLOCK * STRIDE *
                      sizeof(float)]; /* source side before decoding; packed codes of the target side */
    };
};

/* >>reductions over the threads of a line */
template <int Threads, class T> TKVCU_DEVICE T tkvcu_sum_lanes(T x) {
    int by;
    TKVCU_UNROLL
    for (by = 1; by < Threads; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

template <int Threads> TKVCU_DEVICE float tkvcu_min_lanes(float x) {
    int by;
    TKVCU_UNROLL
    for (by = 1; by < Threads; by *= 2) {
        const float y = __shfl_xor_sync(0xffffffffu, x, by);
        x = y < x ? y : x;
    }
    return x;
}

template <int Threads> TKVCU_DEVICE float tkvcu_max_lanes(float x) { return -tkvcu_min_lanes<Threads>(-x); }

/* >>sides */
/* Fills format and side for the functions of tieredkv.h. One thread calls it. */
TKVCU_DEVICE void tkvcu_open_side(const tkvcu_view *v, const tkvcu_side *d, int which, int fit,
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
        s->tiles.n[f->bits] = (uint16_t)(s->pad / 4);
    }
    if (d->kind == TKVCU_A) {
        for (w = 1; w <= 6; w++) s->tiles.n[w] = (uint16_t)(4 * d->slabs[w]);
        s->has_outlier = 1;
        if (d->table >= 0) {
            s->order = v->order + d->table;
            s->importance = v->importance + d->table;
            s->mean = v->mean + d->table;
        }
    }
    if (d->kind == TKVCU_R) {
        f->rotated = 1;
        s->half_bits = (int8_t)d->half_bits;
        s->pairs = d->half_bits == 3;
        if (s->pairs) s->levels = tkvi_r_pairs;
        s->tiles.n[s->pairs ? 3 : d->half_bits / 2] = (uint16_t)(s->pad / 4 / (s->pairs ? 2 : 1));
    }
}

/* Returns the width of tile i, and its offset in the codes; width 0 if i is not a tile of the side. */
TKVCU_DEVICE int tkvcu_find_tile(const tkvi_side *s, int i, int *at) {
    int width;
    *at = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int n = s->tiles.n[width];
        *at += tkvi_min(i, n) * TKVI_TILE_BYTES(width);
        if (i < n) break;
        i -= n;
    }
    return width;
}

/* Returns the bits of the tile that contains this position. */
TKVCU_DEVICE int tkvcu_find_width(const tkvi_side *s, int position) {
    int width, end = 0;
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        end += 4 * s->tiles.n[width];
        if (position < end) return width;
    }
    return 0;
}

/* Rotates a token as core/rotate.h does, or back. `Threads` neighbour threads share it. */
template <int Threads> TKVCU_DEVICE void tkvcu_rotate(float *y, int part, int back) {
    const float norm = tkvi_hadamard_norm[Threads == 8 ? 7 : 6];
    int i, h;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES && !back; i++) {
        const int c = Threads * i + part;
        y[i] = tkvi_signs[c / 32] >> c % 32 & 1 ? -y[i] : y[i];
    }
    TKVCU_UNROLL
    for (h = 1; h < Threads; h *= 2) {
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
            const float other = __shfl_xor_sync(0xffffffffu, y[i], h);
            y[i] = part & h ? other - y[i] : y[i] + other;
        }
    }
    TKVCU_UNROLL
    for (h = 1; h < TKVCU_THREAD_VALUES; h *= 2) {
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
            const float a = y[i & ~h], b = y[i | h];
            if (i & h) continue;
            y[i] = a + b;
            y[i | h] = a - b;
        }
    }
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const int c = Threads * i + part;
        y[i] *= norm;
        if (back) y[i] = tkvi_signs[c / 32] >> c % 32 & 1 ? -y[i] : y[i];
    }
}

/* Returns the slot of the outlier and its scale (tkvi_outlier_head). All lanes of a warp call it. */
TKVCU_DEVICE int tkvcu_load_outlier_head(const uint8_t *row, int lane) {
    return (int)(__ballot_sync(0xffffffffu, row[lane] & 1) & 0x7fffu);
}

/* >>decoding */
/* Decodes scale and zero number i of the side. */
TKVCU_DEVICE void tkvcu_decode_meta(const tkvi_side *s, int kind, const uint8_t *meta, int n, int i,
                                    float *scale, float *zero) {
    if (kind == TKVCU_KIVI) {
        *scale = tkvi_f16_to_f32(tkvi_load16(meta + 2 * i));
        *zero = tkvi_f16_to_f32(tkvi_load16(meta + 2 * (n + i)));
    } else if (kind == TKVCU_R) {
        const float middle = s->pairs ? 0.0f : 0.5f * (float)((1 << s->half_bits / 2) - 1);
        *scale = tkvi_log_value(meta[i], s->top) * (s->pairs ? 1.0f / 64.0f : 1.0f);
        *zero = -middle * *scale;
    } else {
        const int width = tkvcu_find_width(s, i), unit = tkvi_a_unit[width];
        const float mean = s->mean ? s->mean[i] : 0.0f;
        *scale = width ? tkvi_log_value(meta[i], s->top) : 0.0f;
        *zero = width
                    ? tkvi_zero(meta[n + i], *scale, mean, 1.0f / (float)unit, ((1 << width) - 1) * unit / 2)
                    : tkvi_f32(tkvi_f16_to_f32((uint16_t)(meta[i] | meta[n + i] << 8)) + mean);
    }
}

/* Converts rows of 16-bit floats to values. */
template <int Dim>
TKVCU_DEVICE void tkvcu_decode_exact(tkvcu_transcoder<Dim> *d, int bf16, const uint8_t *src) {
    int i, k;
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) { /* 8 values per turn */
        const int at = 8 * (tkvcu_thread_index() + i * tkvcu_transcoder<Dim>::THREADS);
        const tkvcu_bytes16 h = *(const tkvcu_bytes16 *)(const void *)(src + 2 * at);
        tkvcu_bytes16 *x =
            (tkvcu_bytes16 *)(void *)(d->x + at / Dim * tkvcu_transcoder<Dim>::STRIDE + at % Dim);
        tkvcu_bytes16 y[2] = {{{0, 0}}, {{0, 0}}};
        TKVCU_UNROLL
        for (k = 0; k < 8; k++) {
            const uint16_t z = (uint16_t)(h.x[k / 4] >> 16 * (k % 4));
            const uint32_t bits = tkvi_bits(bf16 ? tkvi_bf16_to_f32(z) : tkvi_f16_to_f32(z));
            y[k / 4].x[k / 2 % 2] |= (uint64_t)bits << 32 * (k % 2);
        }
        x[0] = y[0];
        x[1] = y[1];
    }
}

/* The source side is overwritten; only d->row remains of it. */
template <int Dim> TKVCU_DEVICE void tkvcu_decode_k(tkvcu_transcoder<Dim> *d) {
    const tkvi_side *s = &d->side[0];
    const int position = tkvcu_thread_index() / TKVCU_CHANNEL_THREADS, width = tkvcu_find_width(s, position);
    const uint8_t *tile = d->code[position / 4];
    const float scale = d->scale[position], zero = d->zero[position];
    float *x = d->x + tkvi_channel(s, position), outlier = 0.0f;
    int t, slot = TKVI_NO_OUTLIER;
    if (s->has_outlier) {
        const int head = tkvcu_load_outlier_head(d->row, tkvcu_thread_index() % 32);
        slot = head & 127;
        outlier = tkvi_outlier_value(d->row[position], 0.5f * tkvi_log_value(head >> 7, s->top),
                                     s->mean ? s->mean[position] : 0.0f);
    }
    TKVCU_UNROLL
    for (t = tkvcu_thread_index() % TKVCU_CHANNEL_THREADS; t < TKVI_BLOCK; t += TKVCU_CHANNEL_THREADS)
        x[t * tkvcu_transcoder<Dim>::STRIDE] =
            t == slot ? outlier : tkvi_k_value(s, width, tile, position, t, scale, zero);
}

template <int Dim> TKVCU_DEVICE void tkvcu_decode_v(tkvcu_transcoder<Dim> *d) {
    enum { LINE = Dim / TKVCU_THREAD_VALUES };
    const tkvi_side *s = &d->side[0];
    const int t = tkvcu_thread_index() / LINE, part = tkvcu_thread_index() % LINE;
    int at, i;
    const int width = tkvcu_find_tile(s, 0, &at),
              slab = s->pairs ? 5 : 4; /* all tiles of a side are alike; a slab has 2^slab channels */
    float y[TKVCU_THREAD_VALUES];
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const int c = LINE * i + part;
        const int m = (s->groups > 1 ? c / TKVI_BLOCK * TKVI_BLOCK : 0) + t;
        y[i] = tkvi_v_value(s, width, d->code[(c >> slab) * 4 + t / 16], c & ((1 << slab) - 1), t,
                            d->scale[m], d->zero[m]);
    }
    if (s->format->rotated) tkvcu_rotate<LINE>(y, part, 1);
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        d->x[t * tkvcu_transcoder<Dim>::STRIDE + LINE * i + part] = y[i];
}

/* Decodes 64 tokens of a side into d->x. All threads call it. */
template <int Dim>
TKVCU_DEVICE void tkvcu_decode(tkvcu_transcoder<Dim> *d, const tkvcu_side *from, const uint8_t *src) {
    const tkvi_side *s = &d->side[0];
    const int me = tkvcu_thread_index(), all = tkvcu_transcoder<Dim>::THREADS;
    int i, p, at;
    if (from->kind == TKVCU_EXACT) {
        tkvcu_decode_exact<Dim>(d, from->bf16, src);
    } else {
        const int n = s->groups * (s->which == TKV_V ? TKVI_BLOCK : Dim);
        for (i = 16 * me; i < (int)s->bytes; i += 16 * all)
            *(tkvcu_bytes16 *)(void *)(d->bytes + i) = *(const tkvcu_bytes16 *)(const void *)(src + i);
        __syncthreads();
        if (me < Dim) { /* a quarter of a tile each */
            const int tile = me / 4, first = me % 4 * 8, width = tkvcu_find_tile(s, tile, &at);
            for (p = 0; p < 8; p++) tkvi_store8(d->code[tile] + 32 * p + first, 0);
            if (width) tkvi_unpack_part(d->bytes + at, width, d->code[tile], first, first + 8);
        }
        for (i = me; i < n; i += all)
            tkvcu_decode_meta(s, from->kind, d->bytes + s->code_bytes, n, i, &d->scale[i], &d->zero[i]);
        if (s->has_outlier && me < Dim) d->row[me] = d->bytes[(int)s->code_bytes + 2 * Dim + me];
        __syncthreads();
        if (s->which == TKV_V) tkvcu_decode_v<Dim>(d);
        else tkvcu_decode_k<Dim>(d);
    }
    __syncthreads();
}

/* >>encoding. d->x becomes codes and metadata of the target side. Each function follows the steps of
 * src/formats. */
/* Cuts this thread's values of a column to integers (formats/a.h, step 1). `from` stands for the token `slot`. */
template <int Dim>
TKVCU_DEVICE void tkvcu_load_column(const float *x, float mean, int part, int slot, int from, tkvi_column *c,
                                    int u[TKVCU_THREAD_VALUES]) {
    float y[TKVCU_THREAD_VALUES], low = 1e30f, high = -1e30f, inverse;
    int i;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const int t = TKVCU_CHANNEL_THREADS * i + part;
        y[i] = tkvi_a_residual(x[(t == slot ? from : t) * tkvcu_transcoder<Dim>::STRIDE], mean);
        low = y[i] < low ? y[i] : low;
        high = y[i] > high ? y[i] : high;
    }
    c->low = tkvcu_min_lanes<TKVCU_CHANNEL_THREADS>(low);
    c->step = tkvi_a_step(c->low, tkvcu_max_lanes<TKVCU_CHANNEL_THREADS>(high), &inverse);
    c->sum_u = c->sum_uu = 0;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        u[i] = tkvi_a_integer(y[i], c->low, inverse);
        c->sum_u += u[i];
        c->sum_uu += u[i] * u[i];
    }
    c->sum_u = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(c->sum_u);
    c->sum_uu = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(c->sum_uu);
}

/* Gives N of 2 N sums to the lane By further, and adds its sums to the others. Returns the first that was kept. */
template <int N, int By> TKVCU_DEVICE int tkvcu_share_sums(int sum[2 * N], int lane) {
    const int upper = lane & By;
    int i;
    TKVCU_UNROLL
    for (i = 0; i < N; i++) {
        const int given = upper ? sum[i] : sum[i + N], kept = upper ? sum[i + N] : sum[i];
        sum[i] = kept + __shfl_xor_sync(0xffffffffu, given, By);
    }
    return upper ? N : 0;
}

/* Adds the deviations of this warp's channels to d->deviation (step B). Lanes with the same part share tokens. */
template <int Dim>
TKVCU_DEVICE void tkvcu_add_deviations(tkvcu_transcoder<Dim> *d, const tkvi_column *c, float unit, int part,
                                       const int u[TKVCU_THREAD_VALUES]) {
    const int lane = tkvcu_thread_index() % 32;
    int sum[TKVCU_THREAD_VALUES], i, first;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const int x = tkvi_deviation(TKVI_BLOCK, c->sum_u, u[i], unit);
        sum[i] = x * x;
    }
    first = tkvcu_share_sums<8, 16>(sum, lane);
    first += tkvcu_share_sums<4, 8>(sum, lane);
    first += tkvcu_share_sums<2, 4>(sum, lane);
    TKVCU_UNROLL
    for (i = 0; i < 2; i++) /* sums of integers: their order does not matter */
        atomicAdd(&d->deviation[TKVCU_CHANNEL_THREADS * (first + i) + part], sum[i]);
}

/* Returns the slot of the outlier, or TKVI_NO_OUTLIER (step B). All lanes of a warp call it. */
TKVCU_DEVICE int tkvcu_find_outlier(const int32_t deviation[TKVI_BLOCK], int lane) {
    const int first = deviation[lane], second = deviation[lane + 32];
    const int most = (int)__reduce_max_sync(0xffffffffu, (unsigned)tkvi_max(first, second));
    /* counted from the last slot, so that the maximum is the first one */
    const int before_end = first == most ? 63 - lane : second == most ? 31 - lane : 0;
    const int slot = 63 - (int)__reduce_max_sync(0xffffffffu, (unsigned)before_end);
    return most > 0 ? slot : TKVI_NO_OUTLIER;
}

/* Finds the outlier, and writes its row to d->meta (steps A to C). x: values of this thread's channel. Returns the
 * slot. All threads call it. */
template <int Dim>
TKVCU_DEVICE int tkvcu_encode_outlier(tkvcu_transcoder<Dim> *d, const float *x, float mean, int position,
                                      int part) {
    const tkvi_side *s = &d->side[1];
    const int lane = tkvcu_thread_index() % 32;
    int u[TKVCU_THREAD_VALUES], slot, log;
    float residual = 0.0f, step, most;
    tkvi_column c;
    if (tkvcu_thread_index() < TKVI_BLOCK) d->deviation[tkvcu_thread_index()] = 0;
    if (tkvcu_thread_index() == 0) d->largest = 0;
    __syncthreads();
    tkvcu_load_column<Dim>(x, mean, part, TKVI_NO_OUTLIER, 0, &c, u);
    tkvcu_add_deviations<Dim>(
        d, &c,
        tkvi_deviation_unit(TKVI_BLOCK, c.sum_u, c.sum_uu, s->importance ? s->importance[position] : 255),
        part, u);
    __syncthreads();
    slot = tkvcu_find_outlier(d->deviation, lane);
    if (slot != TKVI_NO_OUTLIER) residual = tkvi_a_residual(x[slot * tkvcu_transcoder<Dim>::STRIDE], mean);
    most = tkvcu_warp_max(fabsf(residual));
    if (lane == 0) atomicMax(&d->largest, (int)tkvi_bits(most)); /* not negative: ordered as integers */
    __syncthreads();
    log = tkvi_outlier_log(tkvi_from_bits((uint32_t)d->largest), s->top);
    step = tkvi_log_value(log, s->top);
    if (part == 0)
        d->meta[2 * Dim + position] =
            tkvi_outlier_byte(tkvi_outlier_code(residual, step > 0.0f ? tkvi_f32(1.0f / step) : 0.0f),
                              slot | log << 7, position);
    return slot;
}

template <int Dim> TKVCU_DEVICE void tkvcu_encode_a(tkvcu_transcoder<Dim> *d) {
    enum { NEXT = TKVCU_CHANNEL_THREADS * tkvcu_transcoder<Dim>::STRIDE };
    const tkvi_side *s = &d->side[1];
    const int position = tkvcu_thread_index() / TKVCU_CHANNEL_THREADS,
              part = tkvcu_thread_index() % TKVCU_CHANNEL_THREADS;
    const float mean = s->mean ? s->mean[position] : 0.0f;
    float *x = d->x + part * tkvcu_transcoder<Dim>::STRIDE + tkvi_channel(s, position);
    const float *column = d->x + tkvi_channel(s, position);
    const int slot = tkvcu_encode_outlier<Dim>(d, column, mean, position, part);
    float most = -1.0f, middle;
    int u[TKVCU_THREAD_VALUES], i, k, best = 0, beyond;
    uint8_t log, by;
    tkvi_column c;
    c.n = TKVI_BLOCK;
    c.width = tkvcu_find_width(s, position);
    tkvcu_load_column<Dim>(column, mean, part, slot, tkvi_outlier_neighbour(slot), &c, u);
    c.sum_c = c.sum_cc = c.sum_cu = 0;
    TKVCU_ROLL
    for (k = 0; k < TKVI_A_CUTS; k++) {
        const int cut = tkvi_a_ranges[k].cut[c.width], times = tkvi_a_ranges[k].by[c.width];
        int sum = 0, squares = 0, products = 0;
        float score;
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
            const int code = tkvi_cut_code(u[i], cut, times, (1 << c.width) - 1);
            sum += code;
            squares += code * code;
            products += code * u[i];
        }
        sum = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(sum);
        squares = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(squares);
        products = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(products);
        score = tkvi_a_score(c.n, c.sum_u, sum, squares, products);
        if (score > most) {
            most = score;
            best = k;
            c.sum_c = sum;
            c.sum_cc = squares;
            c.sum_cu = products;
        }
    }
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        *tkvi_k_code(d->code, position, TKVCU_CHANNEL_THREADS * i + part) = (uint8_t)tkvi_cut_code(
            u[i], tkvi_a_ranges[best].cut[c.width], tkvi_a_ranges[best].by[c.width], (1 << c.width) - 1);
    beyond = tkvi_a_finalize_scales(&c, s->top, &log, &by, &middle);
    if (__any_sync(0xffffffffu, beyond)) {
        int offset, sum = 0;
        float scale = 0.0f;
        __syncwarp(); /* other lanes have read the column */
        /* d->x stores u, because the rolled loop below cannot index registers */
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) x[i * NEXT] = (float)u[i];
        if (beyond) {
            log = (uint8_t)tkvi_a_far(&c, log, s->top, &offset);
            scale = tkvi_log_value(log, s->top);
            TKVCU_ROLL
            for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
                const int code = tkvi_a_far_code(&c, (int)x[i * NEXT], scale, offset);
                *tkvi_k_code(d->code, position, TKVCU_CHANNEL_THREADS * i + part) = (uint8_t)code;
                sum += code;
            }
        }
        sum = tkvcu_sum_lanes<TKVCU_CHANNEL_THREADS>(sum);
        if (beyond) by = tkvi_a_far_offset(&c, scale, sum);
    }
    if (part == 0) tkvi_a_put(c.width, log, by, middle, &d->meta[position], &d->meta[Dim + position]);
}

template <int Dim> TKVCU_DEVICE void tkvcu_encode_r(tkvcu_transcoder<Dim> *d) {
    enum {
        /* a thread's values of channels c and c + 16 are PAIR elements apart */
        LINE = Dim / TKVCU_THREAD_VALUES,
        PAIR = 16 / LINE
    };
    const tkvi_side *s = &d->side[1];
    const int t = tkvcu_thread_index() / LINE, part = tkvcu_thread_index() % LINE, bits = s->half_bits / 2;
    float y[TKVCU_THREAD_VALUES], most = 0.0f, by, unit;
    int u[TKVCU_THREAD_VALUES], i, squares = 0, sum = 0;
    TKVCU_UNROLL
    /* limits as in formats/r.h: bfloat16 has larger values */
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        y[i] = tkvi_clampf(d->x[t * tkvcu_transcoder<Dim>::STRIDE + LINE * i + part], -1e30f, 1e30f);
    tkvcu_rotate<LINE>(y, part, 0);
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        const float a = fabsf(y[i]);
        most = a > most ? a : most;
    }
    most = tkvcu_max_lanes<LINE>(most);
    most = most < 1e30f ? most : 1e30f;
    by = tkvi_r_by(most, Dim);
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
        u[i] = tkvi_r_integer(y[i], by, Dim);
        squares += u[i] * u[i];
    }
    squares = tkvcu_sum_lanes<LINE>(squares);
    if (squares == 0) squares = 1;
    unit = tkvi_r_unit(squares, Dim);
    if (s->pairs) {
        const float fine = tkvi_r_fine(unit);
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++) {
            const int c = LINE * i + part;
            if (i / PAIR % 2 == 0)
                *tkvi_v_code(d->code, c / 32 * 16 + c % 16, t) =
                    (uint8_t)tkvi_r_pair(u[i], u[(i + PAIR) % TKVCU_THREAD_VALUES], fine, &sum);
        }
    } else {
        const float fine = tkvi_f32(unit / tkvi_r_step[bits]);
        TKVCU_UNROLL
        for (i = 0; i < TKVCU_THREAD_VALUES; i++)
            *tkvi_v_code(d->code, LINE * i + part, t) = (uint8_t)tkvi_r_grid(u[i], fine, bits, 0, &sum);
    }
    sum = tkvcu_sum_lanes<LINE>(sum);
    __syncwarp();
    if (part == 0) {
        const float scale = tkvi_r_scale(most, squares, sum, Dim);
        d->meta[t] = (uint8_t)tkvi_log_code(tkvi_r_finish(s, t, TKVI_BLOCK, d->code, scale), s->top);
    }
}

/* Encodes a group of 64 values that `Threads` neighbour threads share. *scale and *zero are fp16. */
template <int Threads>
TKVCU_DEVICE void tkvcu_encode_kivi_group(const float *x, int bits, int fit, int *code, uint16_t *scale,
                                          uint16_t *zero) {
    enum { N = TKVI_BLOCK / Threads };
    const int top = (1 << bits) - 1;
    float v[N], low = 0.0f, high = 0.0f, range, inverse = 0.0f, a, b;
    uint16_t u[N];
    uint8_t meta[4];
    tkvi_group g;
    int i, k;
    TKVCU_UNROLL
    for (i = 0; i < N; i++) {
        v[i] = tkvi_clampf(x[i], -TKVI_F16_MAX, TKVI_F16_MAX);
        low = i == 0 || v[i] < low ? v[i] : low;
        high = i == 0 || v[i] > high ? v[i] : high;
    }
    low = tkvcu_min_lanes<Threads>(low);
    high = tkvcu_max_lanes<Threads>(high);
    range = tkvi_f32(high - low);
    if (fit) {
        int sum_u = 0, sum_uu = 0;
        if (high > low) inverse = tkvi_group_open(&g, TKVI_BLOCK, low, high);
        TKVCU_UNROLL
        for (i = 0; i < N; i++) {
            u[i] = (uint16_t)tkvi_group_value(v[i], low, high, inverse);
            sum_u += u[i];
            sum_uu += u[i] * u[i];
        }
        g.sum_u = tkvcu_sum_lanes<Threads>(sum_u);
        g.sum_uu = tkvcu_sum_lanes<Threads>(sum_uu);
    }
    if (fit & TKV_FIT_CLIP) {
        int64_t least = tkvcu_sum_lanes<Threads>(tkvi_cut_error(u, N, 0, top));
        int best = 0;
        TKVCU_ROLL
        for (k = 1; k < TKVI_FIT_TRIES; k++) {
            const int64_t error = tkvcu_sum_lanes<Threads>(tkvi_cut_error(u, N, k * TKVI_FIT_CUT, top));
            best = error < least ? k : best;
            least = error < least ? error : least;
        }
        if (inverse > 0.0f) tkvi_clip_to(&g, best, &low, &range);
    }
    tkvi_kivi_put(low, range, (float)top, meta, meta + 2, &a, &b);
    TKVCU_UNROLL
    for (i = 0; i < N; i++) code[i] = tkvi_kivi_code(v[i], a, b, (float)top);
    if (fit & (TKV_FIT_NORM | TKV_FIT_UNBIASED)) {
        int sum = 0, squares = 0, products = 0;
        TKVCU_UNROLL
        for (i = 0; i < N; i++) {
            sum += code[i];
            squares += code[i] * code[i];
            products += code[i] * u[i];
        }
        sum = tkvcu_sum_lanes<Threads>(sum);
        squares = tkvcu_sum_lanes<Threads>(squares);
        products = tkvcu_sum_lanes<Threads>(products);
        if (inverse > 0.0f)
            tkvi_moments_of(&g, sum, squares, products, fit & TKV_FIT_UNBIASED, meta, meta + 2);
    }
    *scale = tkvi_load16(meta);
    *zero = tkvi_load16(meta + 2);
}

template <int Dim> TKVCU_DEVICE void tkvcu_encode_kivi_k(tkvcu_transcoder<Dim> *d) {
    const tkvi_side *s = &d->side[1];
    const int channel = tkvcu_thread_index() / TKVCU_CHANNEL_THREADS,
              part = tkvcu_thread_index() % TKVCU_CHANNEL_THREADS;
    float x[TKVCU_THREAD_VALUES];
    uint16_t scale, zero;
    int code[TKVCU_THREAD_VALUES], i;
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        x[i] = d->x[(TKVCU_CHANNEL_THREADS * i + part) * tkvcu_transcoder<Dim>::STRIDE + channel];
    tkvcu_encode_kivi_group<TKVCU_CHANNEL_THREADS>(x, s->format->bits, s->fit, code, &scale, &zero);
    TKVCU_UNROLL
    for (i = 0; i < TKVCU_THREAD_VALUES; i++)
        *tkvi_k_code(d->code, channel, TKVCU_CHANNEL_THREADS * i + part) = (uint8_t)code[i];
    if (part == 0) {
        tkvi_store16(d->meta + 2 * channel, scale);
        tkvi_store16(d->meta + 2 * (Dim + channel), zero);
    }
}

template <int Dim> TKVCU_DEVICE void tkvcu_encode_kivi_v(tkvcu_transcoder<Dim> *d) {
    enum { LINE = Dim / TKVCU_THREAD_VALUES, N = TKVI_BLOCK / LINE, GROUPS = Dim / TKVI_BLOCK };
    const tkvi_side *s = &d->side[1];
    const int t = tkvcu_thread_index() / LINE, part = tkvcu_thread_index() % LINE;
    int g, i;
    TKVCU_ROLL
    for (g = 0; g < GROUPS; g++) {
        float x[N];
        uint16_t scale, zero;
        int code[N];
        TKVCU_UNROLL
        for (i = 0; i < N; i++)
            x[i] = d->x[t * tkvcu_transcoder<Dim>::STRIDE + TKVI_BLOCK * g + LINE * i + part];
        tkvcu_encode_kivi_group<LINE>(x, s->format->bits, s->fit, code, &scale, &zero);
        TKVCU_UNROLL
        for (i = 0; i < N; i++) *tkvi_v_code(d->code, TKVI_BLOCK * g + LINE * i + part, t) = (uint8_t)code[i];
        if (part == 0) {
            tkvi_store16(d->meta + 2 * (TKVI_BLOCK * g + t), scale);
            tkvi_store16(d->meta + 2 * (Dim + TKVI_BLOCK * g + t), zero);
        }
    }
}

/* Encodes d->x into a side at dst. All threads call it. The packed codes replace the values in shared memory. */
template <int Dim> TKVCU_DEVICE void tkvcu_encode(tkvcu_transcoder<Dim> *d, int kind, uint8_t *dst) {
    const tkvi_side *s = &d->side[1];
    const int me = tkvcu_thread_index(), all = tkvcu_transcoder<Dim>::THREADS, codes = (int)s->code_bytes;
    int i;
    if (kind == TKVCU_A) tkvcu_encode_a<Dim>(d);
    else if (kind == TKVCU_R) tkvcu_encode_r<Dim>(d);
    else if (s->which == TKV_K) tkvcu_encode_kivi_k<Dim>(d);
    else tkvcu_encode_kivi_v<Dim>(d);
    __syncthreads();
    if (me < Dim) { /* a quarter of a tile each; the tiles cover all bytes of the codes */
        const int tile = me / 4, first = me % 4 * 8;
        int at;
        const int width = tkvcu_find_tile(s, tile, &at);
        if (width) tkvi_pack_part(d->bytes + at, width, d->code[tile], first, first + 8);
    }
    __syncthreads();
    for (i = 16 * me; i < (int)s->bytes; i += 16 * all)
        *(tkvcu_bytes16 *)(void *)(dst + i) =
            *(const tkvcu_bytes16 *)(const void *)(i < codes ? d->bytes + i : d->meta + (i - codes));
    __syncthreads();
}

TKVCU_DEVICE void tkvcu_zero_bytes(uint8_t *dst, size_t n) { /* n: a multiple of 16; dst: aligned to 16 */
    const tkvcu_bytes16 none = {{0, 0}};
    size_t i;
    for (i = (size_t)threadIdx.x * 16; i < n; i += (size_t)blockDim.x * 16)
        *(tkvcu_bytes16 *)(void *)(dst + i) = none;
}

#endif /* TKVCU_ENCODE_H */
