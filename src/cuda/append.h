/*
 * append.h - appending new tokens on the device, and the demotions due before it. The rule is that of reclaim/age.h
 * with the length before the append. This file also truncates. All decisions read device memory only, so a graph can
 * be captured once.
 *
 * One thread block works on one row of the batch, KV head and side. All of them see the same state of the sequence,
 * and each demotes its part of the same blocks. A counter in the list gives out tickets. The thread block with the
 * last ticket writes the new state. New rows are stored after the ticket, because no thread of this kernel reads
 * them.
 */
#ifndef TKVCU_APPEND_H
#define TKVCU_APPEND_H

#include "encode.h"

typedef struct tkvcu_layer { /* on the device, for all sequences */
    int32_t version;         /* table version for new blocks */
    int32_t sinks;           /* sink tokens; -1: the layer has no blocks */
} tkvcu_layer;

typedef struct tkvcu_append_call {
    const void *x[2]; /* k, v */
    const int32_t *seq_map;
    const tkvcu_layer *layer;
    uint32_t *flags;
    int32_t type, n_tokens, max_tokens;
    int32_t hot, warm;   /* lengths of the tiers in tokens */
    int32_t same_coding; /* 1: archive and warm have one coding, and blocks are copied */
    int32_t fit, saturate;
} tkvcu_append_call;

/* Added to the ticket by a thread block that found a NaN or an infinity. The lower bits count all thread blocks. */
#define TKVCU_TICKET_REFUSED 0x10000

/* >>demotion */
typedef struct tkvcu_demotion {
    tkvcu_list list; /* state after the demotions so far */
    int32_t sinks, hot, warm, block;
    int32_t from, to; /* regions of the block that is due; -1 before the first */
} tkvcu_demotion;

/* Finds the next block that is due, oldest first, and counts it as demoted. Returns 0 if no block is due. */
__host__ __device__ static inline int tkvcu_next_demotion(tkvcu_demotion *a) {
    tkvcu_list *l = &a->list;
    for (;; a->block++) {
        const int end = a->sinks + TKVI_BLOCK * (a->block + 1), is_warm = a->block < l->archive + l->warm;
        const int age = l->len - end; /* negative: the block is not full */
        const int archive = age - a->hot >= a->warm;
        if (age < a->hot || age < 0) return 0;
        if (is_warm && !archive) {
            a->block = l->archive + l->warm - 1; /* younger warm blocks are not due either */
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

__host__ __device__ static inline tkvcu_demotion tkvcu_begin_demotion(const tkvcu_list *l, int sinks, int hot,
                                                                      int warm) {
    tkvcu_demotion a;
    a.list = *l;
    a.sinks = sinks;
    a.hot = hot;
    a.warm = warm;
    a.block = l->archive;
    a.from = a.to = -1;
    return a;
}

__host__ __device__ static inline uint8_t *tkvcu_find_block(const tkvcu_view *v, int region, int seq,
                                                            int block) {
    return v->bytes[region] + (size_t)seq * v->stride[region] +
           (size_t)(block % v->ring[region]) * v->block[region];
}

__device__ static inline const tkvcu_side *tkvcu_find_side(const tkvcu_view *v, int version, int region,
                                                           int head, int which) {
    return &v->side[((version * TKVCU_REGIONS + region) * v->n_kv_heads + head) * 2 + which];
}

/* Moves this thread block's side of a block to another region. */
template <int Dim>
TKVCU_DEVICE void tkvcu_demote_side(const tkvcu_view *v, const tkvcu_append_call *c, tkvcu_transcoder<Dim> *d,
                                    int seq, const tkvcu_demotion *a, int block, int head, int which,
                                    int to_version) {
    const int copy = c->same_coding && a->from == TKVCU_WARM;
    const int version =
        a->from == TKVCU_WARM ? v->version[(size_t)seq * (size_t)v->max_blocks + (size_t)block] : 0;
    const tkvcu_side *from = tkvcu_find_side(v, version, a->from, head, which);
    const tkvcu_side *to = tkvcu_find_side(v, copy ? version : to_version, a->to, head, which);
    const uint8_t *src = tkvcu_find_block(v, a->from, seq, block) + from->at;
    uint8_t *whole = tkvcu_find_block(v, a->to, seq, block), *dst = whole + to->at;
    uint32_t i;
    if (copy) {
        for (i = 16 * threadIdx.x; i < to->bytes; i += 16 * blockDim.x)
            *(tkvcu_bytes16 *)(void *)(dst + i) = *(const tkvcu_bytes16 *)(const void *)(src + i);
        __syncthreads();
    } else {
        if (threadIdx.x % 32 == 0 && threadIdx.x < 64) { /* one warp per side */
            const int side = (int)threadIdx.x / 32;
            tkvcu_open_side(v, side ? to : from, which, side ? c->fit : 0, &d->format[side], &d->side[side]);
        }
        __syncthreads();
        tkvcu_decode<Dim>(d, from, src);
        tkvcu_encode<Dim>(d, to->kind, dst);
    }
    /* padding after the last side */
    if (head == v->n_kv_heads - 1 && which)
        tkvcu_zero_bytes(whole + to->at + to->bytes, v->block[a->to] - to->at - to->bytes);
}

/* >>new tokens */
typedef struct tkvcu_row_target { /* this thread block's side in the first block of a region */
    uint8_t *base;
    uint32_t bytes;
    int32_t bf16;
} tkvcu_row_target;

TKVCU_DEVICE tkvcu_row_target tkvcu_find_row_target(const tkvcu_view *v, int region, int head, int which) {
    const tkvcu_side *s = tkvcu_find_side(v, 0, region, head, which);
    tkvcu_row_target r;
    r.base = v->bytes[region] + s->at;
    r.bytes = s->bytes;
    r.bf16 = s->bf16;
    return r;
}

template <int Dim>
TKVCU_DEVICE void tkvcu_store_rows(const tkvcu_view *v, const tkvcu_append_call *c,
                                   const tkvcu_row_target &hot, const tkvcu_row_target &sinks, int seq,
                                   int row, int len, int head, int which) {
    uint8_t *const hot_base = hot.base + (size_t)seq * v->stride[TKVCU_HOT];
    uint8_t *const sinks_base = sinks.base + (size_t)seq * v->stride[TKVCU_SINKS];
    const int stride = v->n_kv_heads * Dim;
    const ptrdiff_t first = ((ptrdiff_t)row * c->n_tokens * v->n_kv_heads + head) * Dim;
    const int next = len < v->sinks ? 0 : len - v->sinks; /* position after the sinks */
    const int new_block = (next + TKVI_BLOCK - 1) / TKVI_BLOCK;
    int i;
    /* Clears blocks that begin here, as the host does. One call adds at most 64 tokens, so at most one hot block
     * begins. */
    if (len == 0 && v->sinks > 0) tkvcu_zero_bytes(sinks_base, sinks.bytes);
    if (len + c->n_tokens > v->sinks + TKVI_BLOCK * new_block)
        tkvcu_zero_bytes(hot_base + (size_t)(new_block % v->ring[TKVCU_HOT]) * v->block[TKVCU_HOT],
                         hot.bytes);
    __syncthreads();
    TKVCU_ROLL
    for (i = (int)threadIdx.x; i < c->n_tokens * Dim; i += (int)blockDim.x) {
        const int position = len + i / Dim, after_sinks = position - v->sinks, is_hot = after_sinks >= 0;
        const int place = is_hot ? after_sinks % TKVI_BLOCK : position;
        uint8_t *bytes =
            is_hot ? hot_base + (size_t)(after_sinks / TKVI_BLOCK % v->ring[TKVCU_HOT]) * v->block[TKVCU_HOT]
                   : sinks_base;
        const ptrdiff_t at = first + (ptrdiff_t)(i / Dim) * stride + i % Dim;
        float x = tkvcu_load_element(which ? c->x[1] : c->x[0], c->type, (size_t)at);
        if (c->saturate) x = tkvi_saturate(x);
        *(uint16_t *)(void *)(bytes + 2 * (place * Dim + i % Dim)) =
            (is_hot ? hot.bf16 : sinks.bf16) ? tkvi_f32_to_bf16(x) : tkvi_f32_to_f16(x);
    }
}

/* Tells whether this thread block's new values contain a NaN or an infinity. */
template <int Dim>
TKVCU_DEVICE int tkvcu_has_nonfinite(const tkvcu_view *v, const tkvcu_append_call *c, int row, int head,
                                     int which) {
    const int stride = v->n_kv_heads * Dim;
    const ptrdiff_t first = ((ptrdiff_t)row * c->n_tokens * v->n_kv_heads + head) * Dim;
    int i, bad = 0;
    TKVCU_ROLL
    for (i = (int)threadIdx.x; i < c->n_tokens * Dim; i += (int)blockDim.x)
        bad |= !tkvi_is_finite(tkvcu_load_element(which ? c->x[1] : c->x[0], c->type,
                                                  (size_t)(first + (ptrdiff_t)(i / Dim) * stride + i % Dim)));
    return __syncthreads_or(bad);
}

/* Returns the sequence of a row; -1 if the row is skipped. */
__device__ static inline int tkvcu_find_seq(const int32_t *map, int row, int n_seqs, uint32_t *flags) {
    const int seq = map ? map[row] : row;
    if (seq < n_seqs) return seq < 0 ? -1 : seq;
    if (threadIdx.x == 0) atomicOr(flags, TKVCU_FLAG_SEQUENCE);
    return -1;
}

/* Writes the new state. `list` is the state before the append. */
TKVCU_DEVICE void tkvcu_commit_append(const tkvcu_view *v, const tkvcu_append_call *c, int seq,
                                      tkvcu_list list, int refused) {
    tkvcu_demotion a = tkvcu_begin_demotion(&list, v->sinks, c->hot, c->warm);
    while (tkvcu_next_demotion(&a))
        if (!c->same_coding || a.from != TKVCU_WARM)
            v->version[(size_t)seq * (size_t)v->max_blocks + (size_t)(a.block - 1)] =
                (uint8_t)c->layer->version;
    if (!refused) a.list.len += c->n_tokens;
    a.list.tickets = 0;
    v->list[seq] = a.list;
}

template <int Dim>
__global__ void __launch_bounds__(tkvcu_transcoder<Dim>::THREADS)
    tkvcu_append_kernel(tkvcu_view v, tkvcu_append_call c) {
    TKVCU_SHARED(tkvcu_transcoder<Dim>, d);
    const int head = (int)blockIdx.x / 2, which = (int)blockIdx.x % 2, row = (int)blockIdx.y;
    tkvcu_row_target hot = tkvcu_find_row_target(
        &v, TKVCU_HOT, head, which); /* these loads do not depend on others: issued first */
    tkvcu_row_target sinks = tkvcu_find_row_target(&v, TKVCU_SINKS, head, which);
    const int seq = tkvcu_find_seq(c.seq_map, row, v.n_seqs, c.flags);
    tkvcu_list list;
    tkvcu_demotion a;
    int bad = 0;
    if (seq < 0) return;
    list = v.list[seq];
    if (!c.saturate) bad = tkvcu_has_nonfinite<Dim>(&v, &c, row, head, which);
    if (list.len > c.max_tokens - c.n_tokens) {
        if (threadIdx.x == 0) atomicOr(c.flags, TKVCU_FLAG_FULL);
        return;
    }
    a = tkvcu_begin_demotion(&list, v.sinks, c.hot, c.warm);
    if (tkvcu_next_demotion(&a)) {
        do tkvcu_demote_side<Dim>(&v, &c, d, seq, &a, a.block - 1, head, which, c.layer->version);
        while (tkvcu_next_demotion(&a));
        hot = tkvcu_find_row_target(&v, TKVCU_HOT, head, which); /* reloaded: demotion needs all registers */
        sinks = tkvcu_find_row_target(&v, TKVCU_SINKS, head, which);
    }
    __syncthreads(); /* all threads have read the state; it may change now */
    if (threadIdx.x == 0) {
        const int ticket = bad ? 1 + TKVCU_TICKET_REFUSED : 1;
        int done;
        __threadfence();
        done = atomicAdd(&v.list[seq].tickets, ticket) + ticket;
        if (bad) atomicOr(c.flags, TKVCU_FLAG_NONFINITE);
        if (done % TKVCU_TICKET_REFUSED == (int)gridDim.x) {
            __threadfence();
            tkvcu_commit_append(&v, &c, seq, list, done / TKVCU_TICKET_REFUSED);
        }
    }
    if (!bad) tkvcu_store_rows<Dim>(&v, &c, hot, sinks, seq, row, list.len, head, which);
}

/* The kernel of a head_dim with its threads and its shared memory. */
typedef struct tkvcu_append_launch {
    void (*kernel)(tkvcu_view v, tkvcu_append_call c);
    int threads;
    size_t shared;
} tkvcu_append_launch;

static tkvcu_append_launch tkvcu_select_append_kernel(int head_dim) {
    static const tkvcu_append_launch all[2] = {
        {tkvcu_append_kernel<64>, tkvcu_transcoder<64>::THREADS, sizeof(tkvcu_transcoder<64>)},
        {tkvcu_append_kernel<128>, tkvcu_transcoder<128>::THREADS, sizeof(tkvcu_transcoder<128>)}};
    return all[head_dim == 128];
}

/* >>truncation */
#define TKVCU_TRUNCATE_THREADS 128

/* Truncates one sequence per thread, in all of its layers or in none. */
__global__ void __launch_bounds__(TKVCU_TRUNCATE_THREADS)
    tkvcu_truncate_kernel(const tkvcu_layer *layer, tkvcu_list *lists, int n_layers, int n_seqs,
                          const int32_t *lengths, uint32_t *flags) {
    const int seq = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int i, n;
    if (seq >= n_seqs) return;
    n = lengths[seq];
    for (i = 0; i < n_layers && n > 0; i++) {
        const tkvcu_list *l = &lists[(size_t)i * (size_t)n_seqs + (size_t)seq];
        const int coded = l->archive + l->warm;
        if (layer[i].sinks < 0 || n >= l->len || coded == 0) continue;
        if (n < layer[i].sinks + TKVI_BLOCK * coded) {
            atomicOr(flags, TKVCU_FLAG_INEXACT);
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
