/*
 * append.h - new tokens on the device, and what they push down a tier: the rule of reclaim/age.h, from the length
 * before the append. Also cuts. All is decided from device memory, so that a graph can be captured once.
 *
 * A CTA for each row of the batch, KV head and side. Each sees the same state and does its part of the same
 * blocks; the one that is last to have done that (a ticket in the list) writes the new state down. New rows are
 * stored after the ticket: nobody reads them within this kernel.
 */
#ifndef TKVCU_APPEND_H
#define TKVCU_APPEND_H

#include "encode.h"

typedef struct tkvcu_layer { /* on the device, for all sequences */
    int32_t version;         /* of the table that blocks are coded with */
    int32_t sinks;           /* tokens; -1: the layer has no blocks */
} tkvcu_layer;

typedef struct tkvcu_append_call {
    const void *x[2]; /* k, v */
    const int32_t *seq_map;
    const tkvcu_layer *layer;
    uint32_t *word;
    int32_t type, n_tokens, max_tokens;
    int32_t hot, warm; /* tokens of the tiers */
    int32_t same;      /* 1: archive and warm are coded alike, and blocks move as they are */
    int32_t fit, saturate;
} tkvcu_append_call;

#define TKVCU_TICKET 0x10000 /* CTAs that refuse count here, above those that have moved their blocks */

/* >>ageing */
typedef struct tkvcu_ages {
    tkvcu_list list; /* as it becomes */
    int32_t sinks, hot, warm, block;
    int32_t from, to; /* regions of the block that is due; to < 0: none is any more */
} tkvcu_ages;

/* Finds the next block that is due, oldest first, and counts it as moved. */
__host__ __device__ static inline int tkvcu_age_next(tkvcu_ages *a) {
    tkvcu_list *l = &a->list;
    for (;; a->block++) {
        const int end = a->sinks + TKVI_BLOCK * (a->block + 1), is_warm = a->block < l->archive + l->warm;
        const int age = l->len - end; /* below 0: it is not whole */
        const int archive = age - a->hot >= a->warm;
        if (age < a->hot || age < 0) return 0;
        if (is_warm && !archive) {
            a->block = l->archive + l->warm - 1; /* the younger warm ones stay as well */
            continue;
        }
        a->from = is_warm ? TKVCU_WARM : TKVCU_HOT;
        a->to = archive ? TKVCU_ARCHIVE : TKVCU_WARM;
        if (is_warm) l->warm--;
        if (archive) l->archive++;
        else l->warm++;
        a->block++;
        return 1;
    }
}

__host__ __device__ static inline tkvcu_ages tkvcu_ages_of(const tkvcu_list *l, int sinks, int hot,
                                                           int warm) {
    tkvcu_ages a;
    a.list = *l;
    a.sinks = sinks;
    a.hot = hot;
    a.warm = warm;
    a.block = l->archive;
    a.from = a.to = -1;
    return a;
}

__host__ __device__ static inline uint8_t *tkvcu_block_at(const tkvcu_view *v, int region, int seq,
                                                          int block) {
    return v->bytes[region] + (size_t)seq * v->stride[region] +
           (size_t)(block % v->ring[region]) * v->block[region];
}

__device__ static inline const tkvcu_side *tkvcu_side_at(const tkvcu_view *v, int version, int region,
                                                         int head, int which) {
    return &v->side[((version * TKVCU_REGIONS + region) * v->n_kv_heads + head) * 2 + which];
}

/* This CTA's side of a block goes to another region. */
template <int Dim>
TKVCU_DEVICE void tkvcu_move(const tkvcu_view *v, const tkvcu_append_call *c, tkvcu_desk<Dim> *d, int seq,
                             const tkvcu_ages *a, int block, int head, int which, int to_version) {
    const int copy = c->same && a->from == TKVCU_WARM;
    const int version =
        a->from == TKVCU_WARM ? v->version[(size_t)seq * (size_t)v->max_blocks + (size_t)block] : 0;
    const tkvcu_side *from = tkvcu_side_at(v, version, a->from, head, which);
    const tkvcu_side *to = tkvcu_side_at(v, copy ? version : to_version, a->to, head, which);
    const uint8_t *src = tkvcu_block_at(v, a->from, seq, block) + from->at;
    uint8_t *whole = tkvcu_block_at(v, a->to, seq, block), *dst = whole + to->at;
    uint32_t i;
    if (copy) {
        for (i = 16 * threadIdx.x; i < to->bytes; i += 16 * blockDim.x)
            *(tkvcu_16 *)(void *)(dst + i) = *(const tkvcu_16 *)(const void *)(src + i);
        __syncthreads();
    } else {
        if (threadIdx.x % 32 == 0 && threadIdx.x < 64) { /* a warp for each side */
            const int side = (int)threadIdx.x / 32;
            tkvcu_side_open(v, side ? to : from, which, side ? c->fit : 0, &d->format[side], &d->side[side]);
        }
        __syncthreads();
        tkvcu_decode<Dim>(d, from, src);
        tkvcu_encode<Dim>(d, to->kind, dst);
    }
    if (head == v->n_kv_heads - 1 && which) /* what no head has been given */
        tkvcu_zero_bytes(whole + to->at + to->bytes, v->block[a->to] - to->at - to->bytes);
}

/* >>new tokens */
typedef struct tkvcu_rows { /* where they go: this CTA's side of a region's first block */
    uint8_t *base;
    uint32_t bytes;
    int32_t bf16;
} tkvcu_rows;

TKVCU_DEVICE tkvcu_rows tkvcu_rows_of(const tkvcu_view *v, int region, int head, int which) {
    const tkvcu_side *s = tkvcu_side_at(v, 0, region, head, which);
    tkvcu_rows r;
    r.base = v->bytes[region] + s->at;
    r.bytes = s->bytes;
    r.bf16 = s->bf16;
    return r;
}

template <int Dim>
TKVCU_DEVICE void tkvcu_store_rows(const tkvcu_view *v, const tkvcu_append_call *c, const tkvcu_rows &hot,
                                   const tkvcu_rows &sinks, int seq, int row, int len, int head, int which) {
    uint8_t *const hot_base = hot.base + (size_t)seq * v->stride[TKVCU_HOT];
    uint8_t *const sinks_base = sinks.base + (size_t)seq * v->stride[TKVCU_SINKS];
    const int stride = v->n_kv_heads * Dim;
    const ptrdiff_t first = ((ptrdiff_t)row * c->n_tokens * v->n_kv_heads + head) * Dim;
    const int next = len < v->sinks ? 0 : len - v->sinks; /* behind the sinks */
    const int begins = (next + TKVI_BLOCK - 1) / TKVI_BLOCK;
    int i;
    /* Blocks that begin: clean, as the host's. One call brings 64 tokens at most. */
    if (len == 0 && v->sinks > 0) tkvcu_zero_bytes(sinks_base, sinks.bytes);
    if (len + c->n_tokens > v->sinks + TKVI_BLOCK * begins)
        tkvcu_zero_bytes(hot_base + (size_t)(begins % v->ring[TKVCU_HOT]) * v->block[TKVCU_HOT], hot.bytes);
    __syncthreads();
    TKVCU_ROLL
    for (i = (int)threadIdx.x; i < c->n_tokens * Dim; i += (int)blockDim.x) {
        const int position = len + i / Dim, behind = position - v->sinks, is_hot = behind >= 0;
        const int place = is_hot ? behind % TKVI_BLOCK : position;
        uint8_t *bytes =
            is_hot ? hot_base + (size_t)(behind / TKVI_BLOCK % v->ring[TKVCU_HOT]) * v->block[TKVCU_HOT]
                   : sinks_base;
        const ptrdiff_t at = first + (ptrdiff_t)(i / Dim) * stride + i % Dim;
        float x = tkvcu_element(which ? c->x[1] : c->x[0], c->type, (size_t)at);
        if (c->saturate) x = tkvi_saturate(x);
        *(uint16_t *)(void *)(bytes + 2 * (place * Dim + i % Dim)) =
            (is_hot ? hot.bf16 : sinks.bf16) ? tkvi_f32_to_bf16(x) : tkvi_f32_to_f16(x);
    }
}

/* Is there a NaN or an infinity among what this CTA stores? */
template <int Dim>
TKVCU_DEVICE int tkvcu_rows_bad(const tkvcu_view *v, const tkvcu_append_call *c, int row, int head,
                                int which) {
    const int stride = v->n_kv_heads * Dim;
    const ptrdiff_t first = ((ptrdiff_t)row * c->n_tokens * v->n_kv_heads + head) * Dim;
    int i, bad = 0;
    TKVCU_ROLL
    for (i = (int)threadIdx.x; i < c->n_tokens * Dim; i += (int)blockDim.x)
        bad |= !tkvi_is_finite(tkvcu_element(which ? c->x[1] : c->x[0], c->type,
                                             (size_t)(first + (ptrdiff_t)(i / Dim) * stride + i % Dim)));
    return __syncthreads_or(bad);
}

/* The sequence of a row; -1: none. */
__device__ static inline int tkvcu_seq_of(const int32_t *map, int row, int n_seqs, uint32_t *word) {
    const int seq = map ? map[row] : row;
    if (seq < n_seqs) return seq < 0 ? -1 : seq;
    if (threadIdx.x == 0) atomicOr(word, TKVCU_WORD_SEQUENCE);
    return -1;
}

/* What has been done becomes the state; list: as it was. */
TKVCU_DEVICE void tkvcu_settle(const tkvcu_view *v, const tkvcu_append_call *c, int seq, tkvcu_list list,
                               int refused) {
    tkvcu_ages a = tkvcu_ages_of(&list, v->sinks, c->hot, c->warm);
    while (tkvcu_age_next(&a))
        if (!c->same || a.from != TKVCU_WARM)
            v->version[(size_t)seq * (size_t)v->max_blocks + (size_t)(a.block - 1)] =
                (uint8_t)c->layer->version;
    if (!refused) a.list.len += c->n_tokens;
    a.list.step = 0;
    v->list[seq] = a.list;
}

template <int Dim>
__global__ void __launch_bounds__(tkvcu_desk<Dim>::THREADS)
    tkvcu_append_kernel(tkvcu_view v, tkvcu_append_call c) {
    TKVCU_SHARED(tkvcu_desk<Dim>, d);
    const int head = (int)blockIdx.x / 2, which = (int)blockIdx.x % 2, row = (int)blockIdx.y;
    tkvcu_rows hot = tkvcu_rows_of(&v, TKVCU_HOT, head, which); /* loads that wait for none come first */
    tkvcu_rows sinks = tkvcu_rows_of(&v, TKVCU_SINKS, head, which);
    const int seq = tkvcu_seq_of(c.seq_map, row, v.n_seqs, c.word);
    tkvcu_list list;
    tkvcu_ages a;
    int bad = 0;
    if (seq < 0) return;
    list = v.list[seq];
    if (!c.saturate) bad = tkvcu_rows_bad<Dim>(&v, &c, row, head, which);
    if (list.len > c.max_tokens - c.n_tokens) {
        if (threadIdx.x == 0) atomicOr(c.word, TKVCU_WORD_FULL);
        return;
    }
    a = tkvcu_ages_of(&list, v.sinks, c.hot, c.warm);
    if (tkvcu_age_next(&a)) {
        do tkvcu_move<Dim>(&v, &c, d, seq, &a, a.block - 1, head, which, c.layer->version);
        while (tkvcu_age_next(&a));
        hot = tkvcu_rows_of(&v, TKVCU_HOT, head, which); /* again: a move needs all registers */
        sinks = tkvcu_rows_of(&v, TKVCU_SINKS, head, which);
    }
    __syncthreads(); /* all have read the state: from here on it may change */
    if (threadIdx.x == 0) {
        const int ticket = bad ? 1 + TKVCU_TICKET : 1;
        int done;
        __threadfence();
        done = atomicAdd(&v.list[seq].step, ticket) + ticket;
        if (bad) atomicOr(c.word, TKVCU_WORD_NOT_FINITE);
        if (done % TKVCU_TICKET == (int)gridDim.x) {
            __threadfence();
            tkvcu_settle(&v, &c, seq, list, done / TKVCU_TICKET);
        }
    }
    if (!bad) tkvcu_store_rows<Dim>(&v, &c, hot, sinks, seq, row, list.len, head, which);
}

/* The kernel for a head_dim, its threads, its shared memory. */
typedef struct tkvcu_appender {
    void (*kernel)(tkvcu_view v, tkvcu_append_call c);
    int threads;
    size_t shared;
} tkvcu_appender;

static tkvcu_appender tkvcu_appender_of(int head_dim) {
    static const tkvcu_appender all[2] = {
        {tkvcu_append_kernel<64>, tkvcu_desk<64>::THREADS, sizeof(tkvcu_desk<64>)},
        {tkvcu_append_kernel<128>, tkvcu_desk<128>::THREADS, sizeof(tkvcu_desk<128>)}};
    return all[head_dim == 128];
}

/* >>cuts */
#define TKVCU_TRIMMERS 128 /* threads */

/* A thread for each sequence: all of its layers, or none. */
__global__ void __launch_bounds__(TKVCU_TRIMMERS)
    tkvcu_trim_kernel(const tkvcu_layer *layer, tkvcu_list *lists, int n_layers, int n_seqs,
                      const int32_t *lengths, uint32_t *word) {
    const int seq = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int i, n;
    if (seq >= n_seqs) return;
    n = lengths[seq];
    for (i = 0; i < n_layers && n > 0; i++) {
        const tkvcu_list *l = &lists[(size_t)i * (size_t)n_seqs + (size_t)seq];
        const int coded = l->archive + l->warm;
        if (layer[i].sinks < 0 || n >= l->len || coded == 0) continue;
        if (n < layer[i].sinks + TKVI_BLOCK * coded) {
            atomicOr(word, TKVCU_WORD_INEXACT);
            return;
        }
    }
    for (i = 0; i < n_layers && n >= 0; i++) {
        tkvcu_list *l = &lists[(size_t)i * (size_t)n_seqs + (size_t)seq];
        if (layer[i].sinks < 0 || n >= l->len) continue;
        l->len = n;
        if (n == 0) l->archive = l->warm = 0;
    }
}

#endif /* TKVCU_APPEND_H */
