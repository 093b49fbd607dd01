/*
 * attend.h - decode attention on the coded tiers: split-KV, one pass over the bytes, one online softmax.
 *
 * Keys are cut into key tiles: a coded block of 64 tokens, or 16 tokens of an exact block (about as many bytes). The
 * key tiles of one (entry of the batch, KV head) form three sections: archive, warm, exact. The key tiles of all
 * entries and heads form one list, which is cut into equal ranges, one per thread block. The grid never changes, so a
 * captured launch is valid at any length. The warps of a thread block take key tiles in turn. At the end of a section
 * they add up their partial results and write them to a slot of the workspace. slot = thread block + section, which
 * is unique. combine.h merges the slots in order. No atomics are used, so the bits are the same each time.
 *
 *     key tiles      |  e0 h0: archive   warm  exact |  e0 h1: archive      warm  exact | ...
 *     thread blocks  |    0    |    1    |    2    |    3    |  ...
 *
 * Each warp of a thread block:
 *
 *     global --cp.async--> two slots of shared memory, for a K side and a V side
 *     K: q * scale of the channel -> 16-bit integer = two int8 limbs; S = codes * q     tokens x columns, bytes
 *        A: the outlier's score is its row * q, and replaces that of its codes (formats/a.h)
 *     softmax of the key tile; the running maximum moves only if it grows by more than 4 (in log2)
 *     V: weight * scale of the token -> two limbs, through shared memory into the order of the second operand;
 *        O += codes * P                                                                 channels x columns, bytes
 *
 * Columns are the queries of the query heads that share a KV head. A column takes two columns of an MMA product, one
 * per limb. So an n-tile of 8 has 4 columns, and a thread block works on NT n-tiles. Sums of byte products are exact.
 * Only q and P are rounded, to 16 bits relative to the largest of the key tile.
 */
#ifndef TKVCU_ATTEND_H
#define TKVCU_ATTEND_H

#include "unpack.h"

#define TKVCU_WARPS 4 /* of a thread block */
#define TKVCU_THREADS (32 * TKVCU_WARPS)
#define TKVCU_SLOTS 2             /* of a warp */
#define TKVCU_SECTIONS 3          /* archive, warm, exact */
#define TKVCU_MASKED_LOGIT -1e30f /* logit of a masked key; below TKVCU_INITIAL_MAX */
#define TKVCU_INITIAL_MAX -1e29f
#define TKVCU_LEAST_SUM (-1e20f) /* below all sums; its logit is still finite */
#define TKVCU_LOG2E 1.44269504f

/* tools/cuda_resources.py counts the instructions of a key tile. It replaces both macros: sides become
 * constants, and rare branches go. */
#ifndef TKVCU_SIDE
#define TKVCU_SIDE(b, i) (b).side[i]
#define TKVCU_UNLIKELY(x) (x)
#endif

typedef struct tkvcu_job { /* a call, as kernels see it */
    tkvcu_view view;
    const void *q;
    void *out;
    float *lse;
    const float *sink_logits; /* [n_heads]; NULL: none */
    const int32_t *entries;   /* sequence of each entry; NULL: 0, 1, ...; negative: skipped */
    uint32_t *flags;
    float *partial;                                 /* workspace */
    int type, n_entries, n_queries, window, blocks; /* blocks: gridDim.x of the attention kernel */
    float scale, softcap;
    int slot_bytes; /* of a slot of a warp */
} tkvcu_job;

/* >>key tiles of an entry */
typedef struct tkvcu_visible { /* key tiles of one KV head that the queries of an entry can see */
    int first_block;           /* first visible coded block */
    int key_tiles[TKVCU_SECTIONS];
    int sink_tiles; /* exact key tiles of the sinks */
    int len, seq;
} tkvcu_visible;

TKVCU_DEVICE int tkvcu_div_up(int a, int b) { return (a + b - 1) / b; }

TKVCU_DEVICE tkvcu_visible tkvcu_find_visible(const tkvcu_job &j, int entry) {
    tkvcu_visible r;
    tkvcu_list list;
    int coded, hot, from_block;
    r.seq = j.entries ? j.entries[entry] : entry;
    if (r.seq < 0 || r.seq >= j.view.n_seqs) {
        memset(&r, 0, sizeof r);
        r.seq = -1;
        return r;
    }
    list = j.view.list[r.seq];
    coded = list.archive + list.warm;
    r.len = list.len;
    r.sink_tiles = tkvcu_div_up(list.len < j.view.sinks ? list.len : j.view.sinks, 16);
    r.first_block = 0;
    if (j.window) { /* positions that the oldest query cannot see */
        const int n_unseen = list.len - j.n_queries - j.window + 1;
        if (n_unseen > j.view.sinks) r.first_block = (n_unseen - j.view.sinks) / 64;
        if (n_unseen >= j.view.sinks) r.sink_tiles = 0;
    }
    r.key_tiles[0] = list.archive > r.first_block ? list.archive - r.first_block : 0;
    from_block = r.first_block > list.archive ? r.first_block : list.archive;
    r.key_tiles[1] = coded > from_block ? coded - from_block : 0;
    from_block = r.first_block > coded ? r.first_block : coded;
    hot = list.len - j.view.sinks - 64 * from_block;
    r.key_tiles[2] = r.sink_tiles + (hot > 0 ? tkvcu_div_up(hot, 16) : 0);
    return r;
}

/* Returns the key tiles of one section. An index known only at run time would move the array out of registers. */
TKVCU_DEVICE int tkvcu_n_key_tiles_in(const tkvcu_visible &r, int section) {
    return section == 0 ? r.key_tiles[0] : section == 1 ? r.key_tiles[1] : r.key_tiles[2];
}

/* Thread blocks divide a list of places. A key tile has one. A section has some more before its first key tile, as its
 * start takes as long as so many key tiles: queries are prepared, and partial results are written. So a thread block
 * with several sections gets fewer key tiles. 8 was the fastest of 0, 4 and 8 (bench/GPU.md). */
#ifndef TKVCU_START_PLACES
#define TKVCU_START_PLACES 8
#endif

#define TKVCU_MAX_GRID 1024        /* most thread blocks of a grid that the workspace allows */
#define TKVCU_FEW_PLACES (1 << 21) /* times TKVCU_MAX_GRID they fit 32 bits */

TKVCU_DEVICE int tkvcu_n_places_in(const tkvcu_visible &r, int section) {
    const int n = tkvcu_n_key_tiles_in(r, section);
    return n > 0 ? n + TKVCU_START_PLACES : 0;
}

TKVCU_DEVICE int tkvcu_n_places(const tkvcu_visible &r) {
    return tkvcu_n_places_in(r, 0) + tkvcu_n_places_in(r, 1) + tkvcu_n_places_in(r, 2);
}

/* Returns the first place of a thread block. If there are more thread blocks than places, the last ones have none. A
 * division of 64 bits takes some 100 instructions. */
TKVCU_DEVICE int tkvcu_find_first_place(int places, int blocks, int block) {
    const int working = places < blocks ? places : blocks;
    if (block >= working) return places;
    if (places < TKVCU_FEW_PLACES) return (int)((uint32_t)places * (uint32_t)block / (uint32_t)working);
    return (int)((int64_t)places * block / working);
}

/* Returns the thread block that works on a place: the inverse of tkvcu_find_first_place. */
TKVCU_DEVICE int tkvcu_find_worker(int places, int working, int place) {
    if (places < TKVCU_FEW_PLACES)
        return (int)(((uint32_t)(place + 1) * (uint32_t)working - 1u) / (uint32_t)places);
    return (int)((((int64_t)place + 1) * working - 1) / places);
}

/* Decodes a logarithmic scale, as tkvi_log_value. `mantissa` holds the bits of 2^(k / 16) in shared memory,
 * where lanes can read different entries. It also saves the register for the address of the header's table. */
TKVCU_DEVICE float tkvcu_decode_log(uint32_t code, int top, const uint32_t *mantissa) {
    const uint32_t i = code - 1u;
    if (code == 0) return 0.0f;
    return tkvi_from_bits(mantissa[i & 15u] + ((uint32_t)(top - 16 + (int)(i >> 4)) << 23));
}

/* >>state of a thread block and of a warp */
struct alignas(16) tkvcu_f32x4 {
    float x[4];
};

struct alignas(8) tkvcu_f32x2 {
    float x, y;
};

/* The work of a thread block: a section of one KV head of one entry, and in it a key range whose key tiles have
 * one region and one table version. It is in shared memory, because registers hold sums. */
struct tkvcu_task {
    tkvcu_visible visible;
    int entry, head, section;
    int tile, left;       /* next key tile in the section; key tiles left in it */
    int region, first, n; /* key range: region, first key tile, number */
    int ring_tile;        /* place of the first key tile in the region's ring, in key tiles */
    /* the head's sides. Coded: 2048 bytes after the first one's start. Exact: in place 0 of the region */
    const uint8_t *from[2];
    int codes[2], meta[2];      /* bytes of a coded side */
    int swizzled;               /* V: the codes are copied to swizzled places (unpack.h) */
    uint32_t block;             /* bytes from place to place */
    int group, columns, column; /* query heads per KV head; all columns; first column here */
    int next_place, end_place;  /* in the list of all places */
};

/* Queries are scaled by powers of two. In q, the largest product with a scale is 1 to 2, so columns can share one
 * integer unit. In q16, the largest value is 1 to 2. */
template <int D, int NT> struct tkvcu_attend_shared {
    tkvcu_task task;
    /* even and odd tiles of 4 channels, in the order of the key range: see tkvcu_find_q_index */
    tkvcu_f32x4 q[2][D / 8 * NT * 4];
    tkvcu_f32x4 q_max[D / 4]; /* largest |q| of all columns, per channel */
    /* second operands of 16-bit products: high and low limbs of the queries */
    tkvcu_u32x2 q16[D / 16][NT][32];
    /* A: second operands of products with the outlier's row: limbs of the queries (tkvcu_score_outlier) */
    tkvcu_u32x4 q_row[D / 64][NT][32];
    float q16_ratio[4 * NT];      /* unit of q16 / unit of q */
    float least_product;          /* lower bound of the largest product of q with a scale */
    float logit_scale[4 * NT];    /* product with q -> logit; with softcap: -> argument of tanh */
    float mean[4 * NT];           /* q * static means of keys */
    float k_log[256], v_log[256]; /* scales of A (K) and R (V) by their code byte */
    uint32_t mantissa[16];
    uint32_t max_codes[D / 4];  /* A: four bytes of the largest code, by tile */
    int scratch[TKVCU_THREADS]; /* for reductions of all threads */
    tkvcu_side side[2];         /* K and V side of the key range */
};

template <int NT> struct tkvcu_softmax { /* online softmax of a warp, for column t */
    float m[NT], l[NT];                  /* maximum; sum over this lane's tokens */
};

template <int D, int NT, int VG> struct tkvcu_partials {
    tkvcu_softmax<NT> soft;
    float o[D / 16][NT][2]; /* channels x columns */
    /* equal for all channels of a group (zero points, middles); sum over this lane's tokens */
    float zero[VG][NT];
};

/* A slot of a coded side: the metadata, then from TKVCU_META the codes. tkvcu_swizzle gives their places. V sides of
 * odd width are not swizzled. */
#define TKVCU_META(D) (4 * (D)) /* KIVI, the largest */

struct tkvcu_lane {
    int warp, lane, g, t;
    int meta_at, codes_at;      /* targets of the lane's first copies in a slot: metadata, swizzled codes */
    uint8_t *slot[TKVCU_SLOTS]; /* K side, V side */
    tkvcu_address k_codes;
    tkvcu_v_addresses v_at;
    /* K: scales [D] and limbs of the queries; V: scales and zeros [groups][64] and weights */
    uint8_t *work;
};

#define TKVCU_WEIGHTS_ROW 160 /* 64 16-bit weights, padded: columns begin in different banks */
/* Bytes of `work` per warp. */
#define TKVCU_WORK(D, NT, groups)                                                                            \
    (4 * (D) + 8 * (D) * (NT) > (512 + 4 * TKVCU_WEIGHTS_ROW * (NT)) * (groups)                              \
         ? 4 * (D) + 8 * (D) * (NT)                                                                          \
         : (512 + 4 * TKVCU_WEIGHTS_ROW * (NT)) * (groups))

template <int D> TKVCU_DEVICE tkvcu_lane tkvcu_make_lane(uint8_t *warps, int warp_bytes, int slot_bytes) {
    const int tid = (int)threadIdx.x;
    tkvcu_lane me;
    int at;
    me.lane = tkvcu_keep_in_register(tid % 32);
    me.meta_at = tkvcu_keep_in_register(tid % 32 * 16);
    me.codes_at = tkvcu_keep_in_register(TKVCU_META(D) + (int)tkvcu_swizzle(16u * (uint32_t)(tid % 32)));
    me.warp = tid / 32;
    me.g = tkvcu_keep_in_register(tid % 32 / 4);
    me.t = tkvcu_keep_in_register(tid % 4);
    at = me.warp * warp_bytes;
    me.slot[0] = warps + at;
    me.slot[1] = warps + at + slot_bytes;
    me.work = warps + tkvcu_keep_in_register(at + TKVCU_SLOTS * slot_bytes);
    me.k_codes = tkvcu_shared_address(me.slot[0]) + TKVCU_META(D);
    me.v_at = tkvcu_find_v_addresses(tkvcu_shared_address(me.slot[1]) + TKVCU_META(D), me.g, me.t);
    me.v_at.narrow = tkvcu_keep_in_register(me.v_at.narrow);
    me.v_at.wide = tkvcu_keep_in_register(me.v_at.wide);
    return me;
}

template <int D, int NT, int VG> TKVCU_DEVICE void tkvcu_clear_partials(tkvcu_partials<D, NT, VG> &u) {
    int nt, i, c;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        TKVCU_UNROLL
        for (c = 0; c < D / 16; c++) TKVCU_UNROLL
        for (i = 0; i < 2; i++) u.o[c][nt][i] = 0.0f;
        u.soft.m[nt] = TKVCU_INITIAL_MAX;
        u.soft.l[nt] = 0.0f;
        TKVCU_UNROLL
        for (c = 0; c < VG; c++) u.zero[c][nt] = 0.0f;
    }
}

/* Hides the origin of x. The compiler then computes values derived from it here, not before a loop that lacks
 * registers. */
TKVCU_DEVICE int tkvcu_block_hoisting(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* >>loading */
/* Starts the copy of a coded side. `middle` is 2048 bytes after the side's start. */
template <int D>
TKVCU_DEVICE void tkvcu_load_side(uint8_t *slot, const uint8_t *middle, int codes, int meta, int swizzled,
                                  const tkvcu_lane &me) {
    const int left = codes - me.meta_at;
    int k;
    middle = tkvcu_advance(middle, me.meta_at, 1);
    tkvcu_cp_async16_if<0>(slot + me.meta_at, tkvcu_advance(middle, codes, 1), meta - me.meta_at);
    slot += swizzled ? me.codes_at : TKVCU_META(D) + me.meta_at;
    tkvcu_cp_async16_if<0>(slot, middle, left); /* up to 4 bits per value */
    tkvcu_cp_async16_if<512>(slot, middle, left);
    tkvcu_cp_async16_if<1024>(slot, middle, left);
    tkvcu_cp_async16_if<1536>(slot, middle, left);
    if (D == 128) {
        tkvcu_cp_async16_if<2048>(slot, middle, left);
        tkvcu_cp_async16_if<2560>(slot, middle, left);
        tkvcu_cp_async16_if<3072>(slot, middle, left);
        tkvcu_cp_async16_if<3584>(slot, middle, left);
    }
    TKVCU_ROLL
    for (k = 32 * D; TKVCU_UNLIKELY(codes > k); k += 512)
        tkvcu_cp_async16(slot + k, middle + k - 2048); /* 8 bits */
}

/* Starts the copy of 16 exact rows. The 16-byte chunks are swizzled, so that a column of chunks uses all banks.
 * Missing rows become copies of the last one. */
template <int D> TKVCU_DEVICE void tkvcu_load_rows(uint8_t *slot, const uint8_t *from, int rows, int lane) {
    int i;
    lane = tkvcu_block_hoisting(lane);
    for (i = lane; i < 16 * (D / 8); i += 32) {
        const int row = i / (D / 8), chunk = i % (D / 8), there = row < rows ? row : rows - 1;
        tkvcu_cp_async16(slot + row * (2 * D) + 16 * (chunk ^ (row & (D % 64 ? 3 : 7))),
                         from + there * (2 * D) + 16 * chunk);
    }
}

/* >>K. q * scale of a channel is rounded to a 16-bit integer, in a unit that the largest product of the key tile
 * sets. It enters the product as two int8 limbs: S = 256 hi + lo. */
/* A: returns the bits of a slab; slabs are in the order of widths */
TKVCU_DEVICE int tkvcu_find_slab_width(const tkvcu_side &s, int slab) {
    int w;
    for (w = 6; w > 0; w--) {
        if (slab < s.slabs[w]) break;
        slab -= s.slabs[w];
    }
    return w;
}

#define TKVCU_Q_MAX 32600.0f   /* largest integer of q * scale */
#define TKVCU_ROW_MAX 16300.0f /* integer of the unit of q16, for products with the outlier's row */
#define TKVCU_P_MAX 65000.0f   /* largest integer of a weight * scale */
#define TKVCU_TINY 1e-30f      /* avoids division by 0 */
/* A: no scale counts as less than this times the largest one. The score of the outlier, in the unit of the others, then
 * stays below -TKVCU_LEAST_SUM. It is 2^-28, and the window of scales has 16 octaves. */
#define TKVCU_LEAST_SCALE 3.7252903e-9f
/* 1.5 * 2^23: adding it rounds a float to an integer, which is then in the low bits. */
#define TKVCU_ROUNDING 12582912.0f

/* Writes the scales of the channels to `out`, in a unit that makes the largest product with a query TKVCU_Q_MAX.
 * Returns that unit. Channels without codes get 0. */
template <int D, int NT>
TKVCU_DEVICE float tkvcu_scale_k_channels(const tkvcu_side &s, const uint8_t *slot,
                                          const tkvcu_attend_shared<D, NT> &b, tkvcu_f32x4 *out, int lane) {
    tkvcu_f32x4 x = {{0.0f, 0.0f, 0.0f, 0.0f}};
    float most = b.least_product, up;
    int i;
    if (D == 128 || lane < D / 4) {
        if (s.kind == TKVCU_KIVI) {
            const tkvcu_u32x2 w = tkvcu_load_u32x2(slot, 8u * (uint32_t)lane);
            x.x[0] = tkvcu_f16_lo(w.x);
            x.x[1] = tkvcu_f16_lo(w.x >> 16);
            x.x[2] = tkvcu_f16_lo(w.y);
            x.x[3] = tkvcu_f16_lo(w.y >> 16);
        } else if (lane < D / 4 - 4 * s.slabs[0]) {
            const uint32_t logs = tkvcu_load_u32(slot, 4u * (uint32_t)lane);
            TKVCU_UNROLL
            for (i = 0; i < 4; i++) x.x[i] = b.k_log[tkvcu_prmt(logs, 0, 0x4440u + (uint32_t)i)];
        }
        TKVCU_UNROLL
        for (i = 0; i < 4; i++) most = fmaxf(most, x.x[i] * b.q_max[lane].x[i]);
    }
    most = tkvcu_warp_max(most);
    up = TKVCU_Q_MAX * tkvcu_rcp(most);
    TKVCU_UNROLL
    for (i = 0; i < 4; i++) x.x[i] *= up;
    if (D == 128 || lane < D / 4) out[lane] = x;
    return most * (1.0f / TKVCU_Q_MAX);
}

/* Returns the index of tiles 2 i and 2 i + 1 for column c of an n-tile. */
template <int D> TKVCU_DEVICE int tkvcu_find_q_index(int nt, int i, int c) {
    return (nt * (D / 8) + i) * 4 + c;
}

/* Returns query * scale of four channels as limbs. The low limb is signed too, so the high one is taken from x +
 * 128. */
TKVCU_DEVICE tkvcu_u32x2 tkvcu_split_q_limbs(const tkvcu_f32x4 &q, const tkvcu_f32x4 &scale) {
    uint32_t x[4], a, b;
    tkvcu_u32x2 to;
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 4; i++) x[i] = tkvi_bits(fmaf(q.x[i], scale.x[i], TKVCU_ROUNDING + 128.0f));
    a = tkvcu_prmt(x[0], x[1], 0x5410);
    b = tkvcu_prmt(x[2], x[3], 0x5410);
    to.x = tkvcu_prmt(a, b, 0x7531);
    to.y = tkvcu_prmt(a, b, 0x6420) ^ 0x80808080u;
    return to;
}

/* Makes all limbs, as second operands. The high limbs of a pair of tiles, then the low ones, are four words.
 * Columns 2 c and 2 c + 1 of the operand are the limbs of column c. So lane 4 g + t reads words 2 g (even tiles)
 * and 2 g + 1 (odd). */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_make_q_limbs(const tkvcu_attend_shared<D, NT> &b, const tkvcu_f32x4 *scale,
                                     tkvcu_u32x4 *out, int lane) {
    int i;
    TKVCU_UNROLL
    for (i = 0; i < D * NT / 64; i++) {
        const int at = lane + 32 * i, pair = at / 4 % (D / 8);
        const tkvcu_f32x4 first = scale[2 * pair], second = scale[2 * pair + 1];
        const tkvcu_u32x2 even = tkvcu_split_q_limbs(b.q[0][at], first),
                          odd = tkvcu_split_q_limbs(b.q[1][at], second);
        tkvcu_u32x4 x;
        x.x = even.x;
        x.y = odd.x;
        x.z = even.y;
        x.w = odd.y;
        out[at] = x;
    }
}

/* Returns the lane's word of slab k. */
template <int D> TKVCU_DEVICE uint32_t tkvcu_load_q_limbs(const uint32_t *q, int nt, int k) {
    return q[16 * (nt * (D / 8) + 2 * k)];
}

template <int NT> TKVCU_DEVICE void tkvcu_clear_sums(int32_t sum[4][NT][4]) {
    int p, nt, i;
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) sum[p][nt][i] = 0;
}

/* Multiplies n slabs of width W, and adds codes * q to `sum`, by plane. The codes begin at `at`, the lane's words of
 * the queries at q. Moves both on. */
template <int D, int W, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_slabs(int32_t sum[4][NT][4], tkvcu_address codes, uint32_t &at,
                                         const uint32_t *&q, int n, int g, int t) {
    const int half = g / 4;
    const uint32_t *word = q, *end = q + n / 2 * 64;
    tkvcu_cursor<W> path;
    int i, nt;
    if (n == 0) return;
    tkvcu_start_cursor(path, codes, at, g, t);
#define TKVCU_PLANE_(P)                                                                                      \
    {                                                                                                        \
        uint32_t a[4];                                                                                       \
        TKVCU_UNROLL                                                                                         \
        for (i = 0; i < 2; i++) {                                                                            \
            a[i] = tkvcu_take_plane<W, P, tkvcu_k_bit(W, P)>(x, i);                                          \
            a[2 + i] = two ? tkvcu_take_plane<W, P, tkvcu_k_bit(W, P)>(y, i) : 0;                            \
        }                                                                                                    \
        TKVCU_UNROLL                                                                                         \
        for (nt = 0; nt < NT; nt++) tkvcu_mma_us(sum[P][nt], a, b[nt]);                                      \
    }
#define TKVCU_SLABS_                                                                                         \
    {                                                                                                        \
        tkvcu_tile<W> x, y;                                                                                  \
        uint32_t b[NT][2];                                                                                   \
        tkvcu_load_tile(x, path, 0, half);                                                                   \
        if (two) tkvcu_load_tile(y, path, 1, half);                                                          \
        TKVCU_UNROLL                                                                                         \
        for (nt = 0; nt < NT; nt++) {                                                                        \
            b[nt][0] = tkvcu_load_q_limbs<D>(word, nt, 0);                                                   \
            b[nt][1] = two ? tkvcu_load_q_limbs<D>(word, nt, 1) : 0;                                         \
        }                                                                                                    \
        TKVCU_PLANE_(0)                                                                                      \
        TKVCU_PLANE_(1)                                                                                      \
        TKVCU_PLANE_(2)                                                                                      \
        TKVCU_PLANE_(3)                                                                                      \
    }
    TKVCU_ROLL
    for (; word != end; word += 64) {
        enum { two = 1 };
        TKVCU_SLABS_
        tkvcu_advance_cursor(path);
    }
    if (n % 2) {
        enum { two = 0 };
        TKVCU_SLABS_
    }
#undef TKVCU_SLABS_
#undef TKVCU_PLANE_
    at += (uint32_t)(128 * W * n);
    q += 32 * n;
}

/* Moves the sums of codes at the bits of width From to those of width To, which are not lower. */
template <int From, int To, int NT> TKVCU_DEVICE void tkvcu_move_k_sums(int32_t sum[4][NT][4]) {
    int p, nt, i;
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) sum[p][nt][i] *= 1 << (tkvcu_k_bit(To, p) - tkvcu_k_bit(From, p));
}

/* Adds the sums of codes at the bits of width W to s, and joins the limbs. */
template <int W, int NT> TKVCU_DEVICE void tkvcu_add_k_sums(float s[4][NT][2], const int32_t sum[4][NT][4]) {
    int p, nt, i;
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++)
        s[p][nt][i] = fmaf((float)(256 * sum[p][nt][2 * i] + sum[p][nt][2 * i + 1]),
                           1.0f / (float)(1 << tkvcu_k_bit(W, p)), s[p][nt][i]);
}

/* Adds codes * q of all slabs to s. Widths follow one another, widest first. Those with almost the same bits share
 * sums. A sum stays below 2^31: |q| <= TKVCU_Q_MAX, a code at its bit <= 496, 128 channels. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_codes(const tkvcu_side &side, float s[4][NT][2], tkvcu_address codes,
                                         const uint32_t *q, int g, int t) {
    const int n1 = side.slabs[1], n2 = side.slabs[2], n3 = side.slabs[3], n4 = side.slabs[4],
              n5 = side.slabs[5], n6 = side.slabs[6];
    uint32_t at = 0;
    int32_t sum[4][NT][4];
    if (side.half_bits == 16) { /* Q8 */
        tkvcu_clear_sums<NT>(sum);
        tkvcu_multiply_k_slabs<D, 8, NT>(sum, codes, at, q, D / 16, g, t);
        tkvcu_add_k_sums<8, NT>(s, sum);
    }
    if (n6) {
        tkvcu_clear_sums<NT>(sum);
        tkvcu_multiply_k_slabs<D, 6, NT>(sum, codes, at, q, n6, g, t);
        tkvcu_add_k_sums<6, NT>(s, sum);
    }
    if (n5 + n4) {
        tkvcu_clear_sums<NT>(sum);
        tkvcu_multiply_k_slabs<D, 5, NT>(sum, codes, at, q, n5, g, t);
        if (n5) tkvcu_move_k_sums<5, 4, NT>(sum);
        tkvcu_multiply_k_slabs<D, 4, NT>(sum, codes, at, q, n4, g, t);
        tkvcu_add_k_sums<4, NT>(s, sum);
    }
    if (n3 + n2 + n1) {
        tkvcu_clear_sums<NT>(sum);
        tkvcu_multiply_k_slabs<D, 3, NT>(sum, codes, at, q, n3, g, t);
        if (n3) tkvcu_move_k_sums<3, 2, NT>(sum);
        tkvcu_multiply_k_slabs<D, 2, NT>(sum, codes, at, q, n2, g, t);
        tkvcu_multiply_k_slabs<D, 1, NT>(sum, codes, at, q, n1, g, t);
        tkvcu_add_k_sums<2, NT>(s, sum);
    }
}

/* Multiplies the offsets of A (formats/a.h). In units of the scale, a channel adds offset / 8 - middle to its
 * codes, or offset / 4 - middle with 6 bits. This is equal for all tokens, and exact. Channels without codes
 * have q = 0 here. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_offsets(const tkvcu_side &side, float s[NT], const uint8_t *slot,
                                           const uint32_t *max_codes, const uint32_t *q, int t) {
    int32_t sum[NT][4]; /* rows: offsets, largest codes */
    int k, nt;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0;
    TKVCU_UNROLL
    for (k = 0; k < D / 16; k += 2) {
        const uint32_t at = (uint32_t)(D + 16 * k + 4 * t);
        const uint32_t a[4] = {tkvcu_load_u32(slot, at), max_codes[4 * k + t], tkvcu_load_u32(slot, at + 16),
                               max_codes[4 * k + 4 + t]};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const uint32_t b[2] = {tkvcu_load_q_limbs<D>(q, nt, k), tkvcu_load_q_limbs<D>(q, nt, k + 1)};
            tkvcu_mma_ss(sum[nt], a, b);
        }
    }
    TKVCU_ROLL
    for (k = 0; k < side.slabs[6]; k++) { /* 6 bits: a second time, for offset / 4 */
        const uint32_t a[4] = {tkvcu_load_u32(slot, (uint32_t)(D + 16 * k + 4 * t)), 0, 0, 0};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const uint32_t b[2] = {tkvcu_load_q_limbs<D>(q, nt, k), 0};
            tkvcu_mma_ss(sum[nt], a, b);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++)
        s[nt] =
            0.125f * (float)(256 * sum[nt][0] + sum[nt][1]) - 0.5f * (float)(256 * sum[nt][2] + sum[nt][3]);
}

/* The next functions add products of q with terms without scale. These are equal for all tokens of a key tile. */
/* Multiplies KIVI's zeros. A lane takes 8 channels. Rows g get the products of its words 0 and 2, rows g + 8 of
 * 1 and 3. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_zeros(float s[NT], const uint8_t *slot,
                                         const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me) {
    float first[NT][4], second[NT][4];
    int k, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) first[nt][i] = second[nt][i] = 0.0f;
    TKVCU_UNROLL
    for (k = 0; k < D / 32; k++) {
        const tkvcu_u32x4 z = *(const tkvcu_u32x4 *)(const void *)(slot + 2 * D + 64 * k + 16 * me.t);
        const uint32_t a[4] = {z.x, z.y, z.z, z.w};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_u32x4 q = ((const tkvcu_u32x4 *)(const void *)b.q16)[(k * NT + nt) * 32 + me.lane];
            const uint32_t even[2] = {q.x, q.y}, odd[2] = {q.z, q.w};
            tkvcu_mma_f16(first[nt], a, even);
            tkvcu_mma_f16(second[nt], a, odd);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++)
        s[nt] +=
            b.q16_ratio[4 * nt + me.t] * ((first[nt][0] + first[nt][1]) + (second[nt][2] + second[nt][3]));
}

/* Multiplies the means of A's channels without codes. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_multiply_k_means(const tkvcu_side &side, float s[NT], const uint8_t *slot,
                                         const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me) {
    float sum[NT][4];
    int k, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) sum[nt][i] = 0.0f;
    TKVCU_ROLL
    for (k = D / 16 - side.slabs[0]; k < D / 16; k++) { /* low bytes, then high bytes */
        const uint32_t at = (uint32_t)(16 * k + 4 * tkvcu_keep_in_register(me.t));
        const uint32_t low = tkvcu_load_u32(slot, at), high = tkvcu_load_u32(slot, D + at);
        const uint32_t x = tkvcu_prmt(low, high, 0x5140), y = tkvcu_prmt(low, high, 0x7362),
                       a[4] = {x, x, y, y};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_u32x2 part = b.q16[k][nt][me.lane];
            const uint32_t q[2] = {part.x, part.y};
            tkvcu_mma_f16(sum[nt], a, q);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) s[nt] += b.q16_ratio[4 * nt + me.t] * (sum[nt][0] + sum[nt][1]);
}

/* Replaces the score of A's outlier by the product of q and its row. Lanes t take 64 channels at a time, 16 bytes of
 * the row each. Words 0 and 2 are rows g of the first operand, words 1 and 3 rows g + 8. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_score_outlier(float s[4][NT][2], const uint8_t *row, const float base[NT], float unit,
                                      const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me) {
    const uint32_t head = __ballot_sync(0xffffffffu, row[me.lane] & 1);
    const int token = (int)(head & 127u) - 2 * me.g; /* less the lane's first one */
    const float half_step = b.k_log[head >> 7 & 255u] * (0.5f / TKVCU_ROW_MAX), per_unit = tkvcu_rcp(unit);
    int32_t even[NT][4], odd[NT][4];
    int k, nt, p, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) even[nt][i] = odd[nt][i] = 0;
    TKVCU_UNROLL
    for (k = 0; k < D / 64; k++) {
        const tkvcu_u32x4 x = *(const tkvcu_u32x4 *)(const void *)(row + 64 * k + 16 * me.t);
        const uint32_t a[4] = {x.x & 0xfefefefeu, x.y & 0xfefefefeu, x.z & 0xfefefefeu, x.w & 0xfefefefeu};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_u32x4 q = b.q_row[k][nt][me.lane];
            const uint32_t b02[2] = {q.x, q.z}, b13[2] = {q.y, q.w};
            tkvcu_mma_ss(even[nt], a, b02);
            tkvcu_mma_ss(odd[nt], a, b13);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        const int column = 4 * nt + me.t, sum = 256 * (even[nt][0] + odd[nt][2]) + even[nt][1] + odd[nt][3];
        const float x = fmaf((float)sum, half_step * b.q16_ratio[column], b.mean[column] - base[nt]);
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) TKVCU_UNROLL
        for (i = 0; i < 2; i++) s[p][nt][i] = token == 16 * p + i ? x * per_unit : s[p][nt][i];
    }
}

/* >>softmax. The weights of a key tile are relative to its own maximum. A factor converts them to the running
 * maximum. */
/* Updates the running maxima with those of a key tile, `most`, equal in all lanes of a column. They move only if
 * they grow by more than 4. f receives the factor of the key tile's weights. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_update_max(tkvcu_partials<D, NT, VG> &u, const float most[NT], float f[NT]) {
    int nt, i, k, grew = 0;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) grew |= most[nt] > u.soft.m[nt] + 4.0f;
    if (TKVCU_UNLIKELY(__any_sync(0xffffffffu, grew))) {
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const float m = fmaxf(u.soft.m[nt], most[nt]), by = tkvcu_ex2(u.soft.m[nt] - m);
            u.soft.m[nt] = m;
            u.soft.l[nt] *= by;
            TKVCU_UNROLL
            for (k = 0; k < D / 16; k++) TKVCU_UNROLL
            for (i = 0; i < 2; i++) u.o[k][nt][i] *= by;
            TKVCU_UNROLL
            for (k = 0; k < VG; k++) u.zero[k][nt] *= by;
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) f[nt] = tkvcu_ex2(most[nt] - u.soft.m[nt]);
}

/* Returns the maximum over the lanes of a column. */
TKVCU_DEVICE float tkvcu_reduce_column_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
}

/* >>V. weight * scale of the token is a 16-bit integer, too, as two limbs of 8 bits. The largest of the key tile
 * is TKVCU_P_MAX. */
template <int VG>
TKVCU_DEVICE void tkvcu_load_v_scales(const tkvcu_side &s, const uint8_t *slot, tkvcu_f32x2 *out, int lane,
                                      const float *v_log) {
    int i;
    if (s.kind == TKVCU_KIVI) {
        TKVCU_UNROLL
        for (i = 0; i < 2 * VG; i++) { /* scales of all groups, then zeros */
            const uint32_t x = tkvcu_load_u32(slot, (uint32_t)(128 * i + 4 * lane));
            const tkvcu_f32x2 y = {tkvcu_f16_lo(x), tkvcu_f16_lo(x >> 16)};
            out[32 * i + lane] = y;
        }
    } else {
        const uint32_t x = *(const uint16_t *)(const void *)(slot + 2 * lane);
        const tkvcu_f32x2 y = {v_log[tkvcu_prmt(x, 0, 0x4440)], v_log[tkvcu_prmt(x, 0, 0x4441)]};
        out[lane] = y;
    }
}

/* Multiplies the weights p of the lane's tokens (slab, column, word) by their scales, and makes second operands.
 * b[m] has planes 2 m and 2 m + 1 of tile t in column g: high limbs of column g / 2 if g is even, else low
 * limbs. `smaller` is the exponent that divides the weights of this lane's plane (unpack.h). `unit` receives the
 * value of integer 1. `sum` receives the sum of weight * scale over this lane's tokens. */
template <int NT>
TKVCU_DEVICE void tkvcu_make_p_limbs(const float p[4][NT][2], const tkvcu_f32x2 *scale, uint8_t *memory,
                                     uint32_t smaller, uint32_t b[2][NT][2], float unit[NT], float sum[NT],
                                     int g, int t) {
    const uint32_t select = g % 2 ? 0x6420u : 0x7531u;
    int i, k, nt;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        float w[4][2], most = TKVCU_TINY, up;
        TKVCU_UNROLL
        for (k = 0; k < 4; k++) {
            const tkvcu_f32x2 x = scale[8 * k + g];
            w[k][0] = p[k][nt][0] * x.x;
            w[k][1] = p[k][nt][1] * x.y;
            sum[nt] = k ? sum[nt] + (w[k][0] + w[k][1]) : w[k][0] + w[k][1];
            most = fmaxf(fmaxf(most, w[k][0]), w[k][1]);
        }
        most = tkvcu_reduce_column_max(most);
        unit[nt] = most * (1.0f / TKVCU_P_MAX);
        up = TKVCU_P_MAX * tkvcu_rcp(most);
        up = tkvi_from_bits(tkvi_bits(up) - smaller);
        TKVCU_UNROLL
        for (k = 0; k < 4; k++)
            *(uint32_t *)(void *)(memory + (4 * nt + t) * TKVCU_WEIGHTS_ROW + 32 * k + 4 * g) =
                tkvcu_prmt(tkvi_bits(fmaf(w[k][0], up, TKVCU_ROUNDING)),
                           tkvi_bits(fmaf(w[k][1], up, TKVCU_ROUNDING)), 0x5410);
    }
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        const tkvcu_u32x4 *from =
            (const tkvcu_u32x4 *)(const void *)(memory + (4 * nt + g / 2) * TKVCU_WEIGHTS_ROW + 32 * t);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            const tkvcu_u32x4 x = from[i];
            b[i][nt][0] = tkvcu_prmt(x.x, x.y, select);
            b[i][nt][1] = tkvcu_prmt(x.z, x.w, select);
        }
    }
}

/* Adds the sums of a slab to o, and joins the limbs. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_add_v_sums(tkvcu_partials<D, NT, VG> &u, int slab, const int32_t sum[NT][4],
                                   const float unit[NT]) {
    int nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++)
        u.o[slab][nt][i] =
            fmaf((float)(256 * sum[nt][2 * i] + sum[nt][2 * i + 1]), unit[nt], u.o[slab][nt][i]);
}

/* Multiplies all slabs of V with codes of width W. Each group of channels has its own weights. */
template <int D, int W, int NT, int VG>
TKVCU_DEVICE void tkvcu_multiply_v_codes(tkvcu_partials<D, NT, VG> &u, const tkvcu_v_addresses &at,
                                         const uint32_t b[VG][2][NT][2], const float unit[VG][NT], int g,
                                         int t) {
    int k, i, m, nt;
    const tkvcu_v_path path = tkvcu_find_v_path<W>(at, g, t);
    TKVCU_UNROLL
    for (k = 0; k < D / 16; k++) {
        tkvcu_tile<W> x;
        uint32_t plane[2][4];
        int32_t sum[NT][4];
        const int group = k * VG / (D / 16);
        tkvcu_load_v_tile<W>(x, path, k, g / 4);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) tkvcu_take_planes<W>(x, i, plane[i]);
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0;
        TKVCU_UNROLL
        for (m = 0; m < 2; m++) {
            const uint32_t a[4] = {plane[0][2 * m], plane[1][2 * m], plane[0][2 * m + 1],
                                   plane[1][2 * m + 1]};
            TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) tkvcu_mma_uu(sum[nt], a, b[group][m][nt]);
        }
        tkvcu_add_v_sums(u, k, sum, unit[group]);
    }
}

/* The same for R with pairs: the 16 words of a tile are channels of two slabs. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_multiply_v_pairs(tkvcu_partials<D, NT, VG> &u, const tkvcu_v_addresses &at,
                                         const uint32_t b[2][NT][2], const float unit[NT], int g, int t) {
    const tkvcu_v_path path = tkvcu_find_v_path<3>(at, g, t);
    uint32_t reordered[2][NT][2];
    float pair_unit[NT];
    int i, k, nt, h, m;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        pair_unit[nt] = unit[nt] * TKVCU_PAIR_UNIT;
        TKVCU_UNROLL
        for (m = 0; m < 2; m++) tkvcu_reorder_pair_weights(b[m][nt], reordered[m][nt]);
    }
    TKVCU_UNROLL
    for (k = 0; k < D / 32; k++) {
        tkvcu_tile<3> x;
        uint32_t code[2][2];
        tkvcu_load_v_tile<3>(x, path, k, g / 4);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            code[0][i] = tkvcu_merge_pair_codes<0>(x, i);
            code[1][i] = tkvcu_merge_pair_codes<2>(x, i);
        }
        TKVCU_UNROLL
        for (h = 0; h < 2; h++) {
            int32_t sum[NT][4];
            TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0;
            TKVCU_UNROLL
            for (m = 0; m < 2; m++) {
                uint32_t a[4];
                tkvcu_look_up_pairs(code[m], tkvcu_get_pair_table(h), a);
                TKVCU_UNROLL
                for (nt = 0; nt < NT; nt++) tkvcu_mma_su(sum[nt], a, reordered[m][nt]);
            }
            tkvcu_add_v_sums(u, 2 * k + h, sum, pair_unit);
        }
    }
}

/* >>scores and values of a key tile */
TKVCU_DEVICE int tkvcu_find_query_position(const tkvcu_job &j, const tkvcu_task &k, int column) {
    return k.visible.len - j.n_queries + (k.column + column) / k.group;
}

TKVCU_DEVICE int tkvcu_can_see(const tkvcu_job &j, int query, int position) {
    return position <= query && (j.window == 0 || position > query - j.window);
}

/* Turns the sums of a coded key tile, s[slab of 16 tokens][n-tile][word], into weights. A product q.k is unit *
 * s + base, in units of q. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_softmax_step(const tkvcu_job &j, const tkvcu_attend_shared<D, NT> &b,
                                     tkvcu_partials<D, NT, VG> &u, float s[4][NT][2], float unit,
                                     const float base[NT], float f[NT], int position, int g, int t) {
    const tkvcu_task &k = b.task;
    const int oldest = k.visible.len - j.n_queries;
    const int masked =
        TKVCU_UNLIKELY(position + 63 > oldest || (j.window && position <= k.visible.len - 1 - j.window));
    float times[NT], least[NT], most[NT];
    int p, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        const float logit_scale = b.logit_scale[4 * nt + t];
        times[nt] = unit * logit_scale;
        least[nt] = base[nt] * logit_scale;
    }
    if (TKVCU_UNLIKELY(j.softcap > 0.0f)) {
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) TKVCU_UNROLL
            for (i = 0; i < 2; i++) s[p][nt][i] = tanhf(fmaf(s[p][nt][i], times[nt], least[nt]));
            times[nt] = j.softcap * TKVCU_LOG2E;
            least[nt] = 0.0f;
        }
    }
    if (masked) {
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const int query = tkvcu_find_query_position(j, k, 4 * nt + t);
            /* 0 times infinity would be NaN */
            if (times[nt] == 0.0f) times[nt] = 1e-37f;
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) TKVCU_UNROLL
            for (i = 0; i < 2; i++)
                if (!tkvcu_can_see(j, query, position + 16 * p + 2 * g + i)) s[p][nt][i] = -INFINITY;
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        float x = TKVCU_LEAST_SUM; /* if no key is visible, weights are relative to this, and become 0 */
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) x = fmaxf(fmaxf(x, s[p][nt][0]), s[p][nt][1]);
        x = tkvcu_reduce_column_max(x);
        most[nt] = x > TKVCU_LEAST_SUM ? fmaf(x, times[nt], least[nt]) : TKVCU_MASKED_LOGIT;
        least[nt] = -x * times[nt];
    }
    tkvcu_update_max(u, most, f);
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        float l = 0.0f;
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) {
            TKVCU_UNROLL
            for (i = 0; i < 2; i++) s[p][nt][i] = tkvcu_ex2(fmaf(s[p][nt][i], times[nt], least[nt]));
            l = p ? l + (s[p][nt][0] + s[p][nt][1]) : s[p][nt][0] + s[p][nt][1];
        }
        u.soft.l[nt] = fmaf(l, f[nt], u.soft.l[nt]);
    }
}

/* Scores a coded key tile in `slot`. s receives the weights, f their factor. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_score_coded_k(const tkvcu_job &j, const tkvcu_attend_shared<D, NT> &b,
                                      const tkvcu_lane &me, tkvcu_partials<D, NT, VG> &u, float s[4][NT][2],
                                      float f[NT], const uint8_t *slot, int position) {
    const tkvcu_side &side = TKVCU_SIDE(b, 0);
    tkvcu_f32x4 *scale = (tkvcu_f32x4 *)(void *)me.work;
    tkvcu_u32x4 *q = (tkvcu_u32x4 *)(void *)(me.work + 4 * D);
    const uint32_t *mine = (const uint32_t *)(const void *)q + me.t / 2 * 16 + 2 * me.g + me.t % 2;
    float base[NT], offset[NT];
    const float unit = tkvcu_scale_k_channels<D, NT>(side, slot, b, scale, me.lane);
    int p, nt;
    __syncwarp();
    tkvcu_make_q_limbs<D, NT>(b, scale, q, me.lane);
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        base[nt] = b.mean[4 * nt + me.t];
        offset[nt] = 0.0f;
    }
    if (side.kind == TKVCU_KIVI) {
        tkvcu_multiply_k_zeros<D, NT>(base, slot, b, me);
    } else {
        tkvcu_multiply_k_offsets<D, NT>(side, offset, slot, b.max_codes, mine, me.t);
        if (side.slabs[0]) tkvcu_multiply_k_means<D, NT>(side, base, slot, b, me);
    }
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) s[p][nt][0] = s[p][nt][1] = offset[nt];
    tkvcu_multiply_k_codes<D, NT>(side, s, me.k_codes, mine, me.g, me.t);
    if (side.kind == TKVCU_A) tkvcu_score_outlier<D, NT>(s, slot + 2 * D, base, unit, b, me);
    tkvcu_softmax_step(j, b, u, s, unit, base, f, position, me.g, me.t);
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_add_coded_v(const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me,
                                    tkvcu_partials<D, NT, VG> &u, const float s[4][NT][2], const float f[NT],
                                    const uint8_t *slot) {
    const tkvcu_side &side = TKVCU_SIDE(b, 1);
    const int kivi = side.kind == TKVCU_KIVI, width = side.half_bits / 2;
    const int pairs = side.half_bits == 3;
    const uint32_t smaller = pairs ? 0 : (uint32_t)tkvcu_v_bit(width, me.g / 2) << 23;
    tkvcu_f32x2 *scale = (tkvcu_f32x2 *)(void *)me.work;
    uint8_t *memory = me.work + 512 * VG;
    uint32_t w[VG][2][NT][2];
    float unit[VG][NT], sum[NT];
    int i, p, nt;
    tkvcu_load_v_scales<VG>(side, slot, scale, me.lane, b.v_log);
    __syncwarp();
    TKVCU_UNROLL
    for (i = 0; i < VG; i++) {
        if (i > 0 && !kivi) { /* this format has one group */
            TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) {
                TKVCU_UNROLL
                for (p = 0; p < 4; p++) w[i][p / 2][nt][p % 2] = w[0][p / 2][nt][p % 2];
                unit[i][nt] = unit[0][nt];
                u.zero[i][nt] = u.zero[0][nt];
            }
            continue;
        }
        tkvcu_make_p_limbs<NT>(s, scale + 32 * i, memory + i * (4 * TKVCU_WEIGHTS_ROW * NT), smaller, w[i],
                               unit[i], sum, me.g, me.t);
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            float zero = 0.0f;
            if (kivi) {
                TKVCU_UNROLL
                for (p = 0; p < 4; p++) {
                    const tkvcu_f32x2 x = scale[32 * (VG + i) + 8 * p + me.g];
                    zero = fmaf(s[p][nt][1], x.y, fmaf(s[p][nt][0], x.x, zero));
                }
            } else if (!pairs) {
                zero = -0.5f * (float)((1 << width) - 1) * sum[nt];
            }
            u.zero[i][nt] = fmaf(zero, f[nt], u.zero[i][nt]);
            unit[i][nt] *= f[nt];
        }
    }
    if (pairs) tkvcu_multiply_v_pairs<D, NT, VG>(u, me.v_at, w[0], unit[0], me.g, me.t);
    else if (width == 2) tkvcu_multiply_v_codes<D, 2, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
    else if (width == 3) tkvcu_multiply_v_codes<D, 3, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
    else if (width == 4) tkvcu_multiply_v_codes<D, 4, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
    else if (width == 1) tkvcu_multiply_v_codes<D, 1, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
    else tkvcu_multiply_v_codes<D, 8, NT, VG>(u, me.v_at, w, unit, me.g, me.t);
}

/* >>16 exact tokens: products of 16-bit values. Rows g and g + 8 of the first operand are tokens (K) or channels
 * (V). A query or weight is split into two 16-bit limbs, again as two columns. */
template <int D> TKVCU_DEVICE const uint8_t *tkvcu_find_chunk(const uint8_t *slot, int row, int chunk) {
    return slot + row * (2 * D) + 16 * (chunk ^ (row & (D % 64 ? 3 : 7)));
}

TKVCU_DEVICE void tkvcu_mma_16(float c[4], const uint32_t a[4], const uint32_t b[2], int bf16) {
    if (bf16) tkvcu_mma_bf16(c, a, b);
    else tkvcu_mma_f16(c, a, b);
}

/* Returns two values as 16-bit floats (the high limb), or the errors of this rounding (the low limb). */
TKVCU_DEVICE uint32_t tkvcu_take_limb16(float x, float y, int low, int bf16) {
    uint32_t two = bf16 ? tkvcu_pack_bf16x2(x, y) : tkvcu_pack_f16x2(x, y);
    if (!low) return two;
    x -= bf16 ? tkvcu_bf16_lo(two) : tkvcu_f16_lo(two);
    y -= bf16 ? tkvcu_bf16_hi(two) : tkvcu_f16_lo(two >> 16);
    return bf16 ? tkvcu_pack_bf16x2(x, y) : tkvcu_pack_f16x2(x, y);
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_score_exact_k(const tkvcu_job &j, const tkvcu_attend_shared<D, NT> &b,
                                      const tkvcu_lane &me, tkvcu_partials<D, NT, VG> &u, float s[NT][2],
                                      float f[NT], const uint8_t *slot, int position, int rows) {
    const int lane = tkvcu_block_hoisting(me.lane), i8 = lane % 8, m = lane / 8;
    float sum[NT][4], most[NT];
    int c, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0.0f;
    TKVCU_UNROLL
    for (c = 0; c < D / 16; c++) {
        uint32_t a[4];
        tkvcu_ldmatrix_x4(a, tkvcu_find_chunk<D>(slot, i8 + m % 2 * 8, 2 * c + m / 2));
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_u32x2 x = b.q16[c][nt][me.lane];
            const uint32_t q[2] = {x.x, x.y};
            tkvcu_mma_16(sum[nt], a, q, b.side[0].bf16);
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        const int query = tkvcu_find_query_position(j, b.task, 4 * nt + me.t);
        const float logit_scale = b.logit_scale[4 * nt + me.t];
        most[nt] = TKVCU_MASKED_LOGIT;
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            const int row = me.g + 8 * i;
            float x = (sum[nt][2 * i] + sum[nt][2 * i + 1]) * logit_scale;
            if (j.softcap > 0.0f) x = tanhf(x) * (j.softcap * TKVCU_LOG2E);
            s[nt][i] = row < rows && tkvcu_can_see(j, query, position + row) ? x : -INFINITY;
            most[nt] = fmaxf(most[nt], s[nt][i]);
        }
        most[nt] = tkvcu_reduce_column_max(most[nt]);
    }
    tkvcu_update_max(u, most, f);
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) s[nt][i] = tkvcu_ex2(s[nt][i] - most[nt]);
        u.soft.l[nt] = fmaf(s[nt][0] + s[nt][1], f[nt], u.soft.l[nt]);
    }
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_add_exact_v(const tkvcu_attend_shared<D, NT> &b, const tkvcu_lane &me,
                                    tkvcu_partials<D, NT, VG> &u, const float s[NT][2], const float f[NT],
                                    const uint8_t *slot) {
    const int i8 = me.lane % 8, m = me.lane / 8, bf16 = b.side[1].bf16;
    float *weight = (float *)(void *)me.work; /* [column][16 tokens] */
    uint32_t p[NT][2];
    int c, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) weight[16 * (4 * nt + me.t) + me.g + 8 * i] = s[nt][i];
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const float *x = weight + 16 * (4 * nt + me.g / 2) + 2 * me.t + 8 * i;
        p[nt][i] = tkvcu_take_limb16(x[0], x[1], me.g % 2, bf16);
    }
    TKVCU_UNROLL
    for (c = 0; c < D / 16; c++) {
        uint32_t a[4];
        tkvcu_ldmatrix_x4_trans(a, tkvcu_find_chunk<D>(slot, i8 + m / 2 * 8, 2 * c + m % 2));
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            tkvcu_mma_16(sum, a, p[nt], bf16);
            TKVCU_UNROLL
            for (i = 0; i < 2; i++) u.o[c][nt][i] = fmaf(sum[2 * i] + sum[2 * i + 1], f[nt], u.o[c][nt][i]);
        }
    }
}

/* >>key ranges: key tiles of one region and one table version */
/* Returns the index of a column's query in d_q. */
TKVCU_DEVICE size_t tkvcu_find_query(const tkvcu_job &j, const tkvcu_task &k, int column) {
    const size_t row = (size_t)k.entry * (size_t)j.n_queries + (size_t)(column / k.group);
    const size_t head = (size_t)(k.head * k.group + column % k.group);
    return (row * (size_t)j.view.n_heads + head) * (size_t)j.view.head_dim;
}

/* Returns the largest power of two that is at most x. x must not be negative; 0 gives `otherwise`. */
TKVCU_DEVICE float tkvcu_floor_power(float x, float otherwise) {
    const uint32_t bits = tkvi_bits(x) & 0x7f800000u;
    if (bits == 0) return otherwise;
    return tkvi_from_bits(bits < 0x7e800000u ? bits : 0x7e800000u);
}

/* What the queries of a key range are prepared from. It is in slot 1 and in the `work` of warp 0, free until then. */
template <int D> struct tkvcu_query_source {
    float *q;         /* [column][channel]; zeros for unused columns */
    float *scale;     /* [D] of K in the first block of the range: later blocks have similar scales */
    float *mean;      /* [D] static means */
    uint8_t *channel; /* [D] the order of the key range, or the natural order for exact rows */
};

template <int D> TKVCU_DEVICE tkvcu_query_source<D> tkvcu_find_query_source(uint8_t *warps, int slot_bytes) {
    tkvcu_query_source<D> x;
    x.q = (float *)(void *)(warps + slot_bytes); /* slot 1: slot 0 gets the first K */
    x.scale = (float *)(void *)(warps + TKVCU_SLOTS * slot_bytes);
    x.mean = x.scale + D;
    x.channel = (uint8_t *)(x.mean + D);
    return x;
}

/* The place of a query's channel: columns begin in different banks. */
template <int D> TKVCU_DEVICE int tkvcu_find_source(int column, int channel) {
    return column * D + (channel ^ (column & 3));
}

/* Stores the queries in the orders of their products, with the sign of the scale. Channels are in the order of
 * the key range, or in natural order for exact rows. All threads call it. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_prepare_queries(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b,
                                        const tkvcu_query_source<D> &from) {
    const tkvcu_side &side = b.side[0];
    const tkvcu_task &k = b.task;
    const int tid = tkvcu_block_hoisting((int)threadIdx.x), exact = side.kind == TKVCU_EXACT;
    const int ordered = side.table >= 0 && !exact;
    int i, c, r;
    if (tid < D) {
        const uint8_t *meta = k.from[0] - 2048 + side.code_bytes;
        float scale = 0.0f;
        from.channel[tid] = ordered ? j.view.order[side.table + tid] : (uint8_t)tid;
        from.mean[tid] = ordered ? j.view.mean[side.table + tid] : 0.0f;
        if (side.kind == TKVCU_KIVI) scale = tkvcu_f16_lo(((const uint16_t *)(const void *)meta)[tid]);
        else if (side.kind == TKVCU_A && tid < D - 16 * side.slabs[0])
            scale = tkvcu_decode_log(meta[tid], side.top, b.mantissa);
        from.scale[tid] = scale;
    }
    __syncthreads();
    TKVCU_ROLL
    for (i = tid / 32; i < 4 * NT; i += TKVCU_WARPS) { /* a warp per column: its unit, and the means */
        const float sign = k.column + i >= k.columns ? 0.0f
                           : j.scale < 0.0f          ? -1.0f
                                                     : 1.0f; /* 0: unused column */
        const float times = fabsf(j.scale) * (j.softcap > 0.0f ? 1.0f / j.softcap : TKVCU_LOG2E);
        float sum = 0.0f, most = 0.0f, product = 0.0f, q_unit, q16_unit;
        TKVCU_UNROLL
        for (c = tid % 32; c < D; c += 32) {
            const float x = from.q[tkvcu_find_source<D>(i, from.channel[c])];
            sum += x * from.mean[c];
            most = fmaxf(most, fabsf(x));
            product = fmaxf(product, fabsf(x) * from.scale[c]);
            if ((tkvi_bits(x) & 0x7fffffffu) > 0x7f7fffffu) sum = NAN;
        }
        TKVCU_UNROLL
        for (c = 16; c > 0; c /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, c);
        q16_unit = tkvcu_floor_power(tkvcu_warp_max(most), 1.0f);
        q_unit = tkvcu_floor_power(tkvcu_warp_max(product), q16_unit);
        /* NaN and infinity stay in their column, although the columns share a unit */
        if (tid % 32 == 0) {
            b.logit_scale[i] = sum == sum ? q_unit * times : NAN;
            b.mean[i] = sign * sum / q_unit;
            b.q16_ratio[i] = q16_unit / q_unit;
            b.scratch[i] = (int)tkvi_bits(sum == sum ? sign / q_unit : NAN);
            b.scratch[4 * NT + i] = (int)tkvi_bits(sum == sum ? sign / q16_unit : NAN);
        }
    }
    __syncthreads();
    TKVCU_ROLL
    for (i = tid; i < D / 16 * NT * 32; i += TKVCU_THREADS) {
        const int lane = i % 32, nt = i / 32 % NT, slab = i / 32 / NT, mine = 4 * nt + lane / 8, t = lane % 4;
        const float q_unit = tkvi_from_bits((uint32_t)b.scratch[mine]);
        const float q16_unit = tkvi_from_bits((uint32_t)b.scratch[4 * NT + mine]);
        const int low = lane / 4 % 2, bf16 = exact && side.bf16;
        tkvcu_u32x2 to;
        tkvcu_f32x4 x, y;
        TKVCU_UNROLL
        for (r = 0; r < 4; r++) {
            const int tile = 16 * slab + 4 * t + r, rows = 16 * slab + 2 * t + r % 2 + r / 2 * 8;
            const int zeros = 32 * (slab / 2) + 8 * t + slab % 2 * 2 + r % 2 + r / 2 * 4;
            const int place = exact ? rows : side.kind == TKVCU_KIVI ? zeros : tile;
            x.x[r] = q_unit * from.q[tkvcu_find_source<D>(mine, from.channel[tile])];
            y.x[r] = q16_unit * from.q[tkvcu_find_source<D>(mine, from.channel[place])];
        }
        if (!low)
            b.q[t % 2][tkvcu_find_q_index<D>(nt, 2 * slab + t / 2, lane / 8)] =
                x; /* not used for exact rows */
        to.x = tkvcu_take_limb16(y.x[0], y.x[1], low, bf16);
        to.y = tkvcu_take_limb16(y.x[2], y.x[3], low, bf16);
        if (!exact && side.kind == TKVCU_KIVI)
            ((tkvcu_u32x2 *)(void *)b.q16)[((slab / 2 * NT + nt) * 32 + lane) * 2 + slab % 2] = to;
        else b.q16[slab][nt][lane] = to;
    }
    TKVCU_ROLL
    for (i = tid; i < D / 64 * NT * 32 && side.kind == TKVCU_A; i += TKVCU_THREADS) {
        const int lane = i % 32, nt = i / 32 % NT, first = i / 32 / NT * 64 + lane % 4 * 16,
                  mine = 4 * nt + lane / 8;
        const float unit = TKVCU_ROW_MAX * tkvi_from_bits((uint32_t)b.scratch[4 * NT + mine]);
        const tkvcu_f32x4 units = {{unit, unit, unit, unit}};
        uint32_t word[4];
        TKVCU_UNROLL
        for (r = 0; r < 4; r++) {
            tkvcu_f32x4 x;
            tkvcu_u32x2 limbs;
            TKVCU_UNROLL
            for (c = 0; c < 4; c++)
                x.x[c] = from.q[tkvcu_find_source<D>(mine, from.channel[first + 4 * r + c])];
            limbs = tkvcu_split_q_limbs(x, units);
            word[r] = lane / 4 % 2 ? limbs.y : limbs.x;
        }
        b.q_row[i / 32 / NT][nt][lane] = {word[0], word[1], word[2], word[3]};
    }
    for (i = tid; i < 256; i += TKVCU_THREADS) {
        if (side.kind == TKVCU_A) b.k_log[i] = tkvcu_decode_log((uint32_t)i, side.top, b.mantissa);
        if (b.side[1].kind == TKVCU_R) b.v_log[i] = tkvcu_decode_log((uint32_t)i, b.side[1].top, b.mantissa);
    }
    for (i = tid; i < D / 4 && side.kind == TKVCU_A; i += TKVCU_THREADS)
        b.max_codes[i] = ((1u << tkvcu_find_slab_width(side, i / 4)) - 1u) * 0x01010101u;
    __syncthreads();
    if (tid == 0) {
        float least = TKVCU_TINY;
        for (c = 0; c < 4 * NT && side.kind == TKVCU_A; c++)
            if (b.logit_scale[c] == b.logit_scale[c])
                least = fmaxf(least, 2.0f * b.q16_ratio[c] * b.k_log[255] * TKVCU_LEAST_SCALE);
        b.least_product = least;
    }
    for (i = tid; i < D / 4; i += TKVCU_THREADS) {
        tkvcu_f32x4 x = {{0.0f, 0.0f, 0.0f, 0.0f}};
        for (c = 0; c < 4 * NT; c++) TKVCU_UNROLL
        for (r = 0; r < 4; r++)
            x.x[r] = fmaxf(x.x[r], fabsf(b.q[i % 2][tkvcu_find_q_index<D>(c / 4, i / 2, c % 4)].x[r]));
        b.q_max[i] = x;
    }
}

/* Returns the number of exact rows from key tile `unit` to the end of the task's region. */
TKVCU_DEVICE int tkvcu_n_rows_left(const tkvcu_job &j, const tkvcu_task &k, int unit) {
    const int sinks = tkvi_min(j.view.sinks, k.visible.len);
    return (k.region == TKVCU_SINKS ? sinks : k.visible.len - j.view.sinks) - 16 * unit;
}

/* Starts the copy of K (which = 0) or V of key tile nth of the range, if it has that many. */
template <int D, int EXACT>
TKVCU_DEVICE void tkvcu_prefetch_side(const tkvcu_job &j, const tkvcu_task &k, const tkvcu_lane &me,
                                      int which, int nth) {
    if (nth < k.n) {
        uint8_t *slot = me.slot[which];
        if (EXACT) {
            const int place = k.ring_tile + nth;
            tkvcu_load_rows<D>(slot, k.from[which] + (size_t)(place / 4) * k.block + place % 4 * (32 * D),
                               tkvcu_n_rows_left(j, k, k.first + nth), me.lane);
        } else {
            tkvcu_load_side<D>(slot, tkvcu_advance(k.from[which], nth, k.block), k.codes[which],
                               k.meta[which], which == 0 || k.swizzled, me);
        }
    }
    tkvcu_cp_async_commit();
}

/* Waits for the copies. All lanes are then done with the previous side: its slot and `work` are free. */
TKVCU_DEVICE void tkvcu_wait_copies(void) {
    tkvcu_cp_async_wait<0>();
    __syncwarp();
}

/* Attends to the key range whose sides are in b. The copy of each warp's first K has begun. V is copied during the work
 * on K, and the next K during V. */
template <int D, int NT, int VG, int EXACT>
TKVCU_DEVICE void tkvcu_attend_key_range(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b,
                                         const tkvcu_lane &me, tkvcu_partials<D, NT, VG> &u) {
    const tkvcu_task &k = b.task;
    const int base = k.region == TKVCU_SINKS ? 0 : j.view.sinks;
    int nth = me.warp;
    TKVCU_ROLL
    for (; nth < k.n; nth += TKVCU_WARPS) {
        const int unit = k.first + nth;
        float s[4][NT][2], f[NT];
        tkvcu_wait_copies();
        tkvcu_prefetch_side<D, EXACT>(j, k, me, 1, nth);
        if (EXACT)
            tkvcu_score_exact_k(j, b, me, u, s[0], f, me.slot[0], base + 16 * unit,
                                tkvcu_n_rows_left(j, k, unit));
        else tkvcu_score_coded_k(j, b, me, u, s, f, me.slot[0], base + 64 * unit);
        tkvcu_wait_copies();
        tkvcu_prefetch_side<D, EXACT>(j, k, me, 0, nth + TKVCU_WARPS);
        if (EXACT) tkvcu_add_exact_v(b, me, u, s[0], f, me.slot[1]);
        else tkvcu_add_coded_v(b, me, u, s, f, me.slot[1]);
    }
}

/* Returns the number of blocks from `block` on, at most n, that have its table version. */
template <int D, int NT>
TKVCU_DEVICE int tkvcu_n_same_version(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b, int block, int n) {
    const uint8_t *version =
        j.view.version + (size_t)b.task.visible.seq * (size_t)j.view.max_blocks + (size_t)block;
    int from, i;
    for (from = 0; from < n; from += TKVCU_THREADS) {
        i = from + (int)threadIdx.x;
        b.scratch[threadIdx.x] = i < n && version[i] != version[0];
        if (!__syncthreads_or(b.scratch[threadIdx.x])) continue;
        for (i = 0; i < TKVCU_THREADS && from + i < n; i++)
            if (b.scratch[i]) return from + i;
        __syncthreads();
    }
    return n;
}

/* >>end of a section: the joined partial results of the warps go to the workspace, [slot][column][m, l, o ...] */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_write_partials(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b,
                                       const tkvcu_lane &me, tkvcu_partials<D, NT, VG> &u, uint8_t *warps,
                                       size_t warp_bytes) {
    const tkvcu_task &k = b.task;
    float *mine = (float *)(void *)me.slot[0];
    const int slot = (int)blockIdx.x + (k.entry * j.view.n_kv_heads + k.head) * TKVCU_SECTIONS + k.section;
    float *out = j.partial + ((size_t)slot * gridDim.y + blockIdx.y) * (size_t)(4 * NT * (D + 2));
    const int exact = k.section == 2;
    int nt, i, c, w;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        float *column = mine + (4 * nt + me.t) * (D + 2);
        float l = u.soft.l[nt];
        TKVCU_UNROLL
        for (c = 4; c < 32; c *= 2) l += __shfl_xor_sync(0xffffffffu, l, c);
        TKVCU_UNROLL
        for (c = 0; c < VG; c++) TKVCU_UNROLL
        for (w = 4; w < 32; w *= 2) u.zero[c][nt] += __shfl_xor_sync(0xffffffffu, u.zero[c][nt], w);
        if (me.g == 0) {
            column[0] = u.soft.m[nt];
            column[1] = l;
        }
        TKVCU_UNROLL
        for (c = 0; c < D / 16; c++) TKVCU_UNROLL
        for (i = 0; i < 2; i++)
            column[2 + 16 * c + (exact ? me.g + 8 * i : 2 * me.g + i)] =
                u.o[c][nt][i] + u.zero[16 * c * VG / D][nt]; /* zero is 0 if the format has none */
    }
    __syncthreads();
    for (i = (int)threadIdx.x; i < 4 * NT * (D + 1);
         i += TKVCU_THREADS) { /* l is treated as one more output */
        const int column = i / (D + 1), at = i % (D + 1);
        float m = TKVCU_MASKED_LOGIT, sum = 0.0f;
        for (w = 0; w < TKVCU_WARPS; w++)
            m = fmaxf(m, ((const float *)(const void *)(warps + (size_t)w * warp_bytes))[column * (D + 2)]);
        for (w = 0; w < TKVCU_WARPS; w++) {
            const float *x = (const float *)(const void *)(warps + (size_t)w * warp_bytes) + column * (D + 2);
            sum += x[1 + at] * tkvcu_ex2(x[0] - m);
        }
        out[column * (D + 2) + 1 + at] = sum;
        if (at == 0) out[column * (D + 2)] = m;
    }
    __syncthreads();
}

/* Finds the next section with key tiles of this thread block. left = 0: none. One thread calls it. */
template <class Task> TKVCU_DEVICE void tkvcu_next_section(const tkvcu_job &j, Task &task, const int *ends) {
    Task k = task;
    int per, skip;
    k.left = 0;
    if (k.next_place < k.end_place) {
        while (ends[k.entry] <= k.next_place) k.entry++;
        k.visible = tkvcu_find_visible(j, k.entry);
        per = tkvcu_n_places(k.visible);
        k.tile = k.next_place - (k.entry ? ends[k.entry - 1] : 0);
        k.head = k.tile / per;
        k.tile %= per;
        for (k.section = 0; k.tile >= tkvcu_n_places_in(k.visible, k.section); k.section++)
            k.tile -= tkvcu_n_places_in(k.visible, k.section);
        k.tile -= TKVCU_START_PLACES;
        skip = tkvi_min(tkvi_max(0, -k.tile), k.end_place - k.next_place);
        k.tile += skip;
        k.next_place += skip;
        k.left = tkvi_min(tkvcu_n_key_tiles_in(k.visible, k.section) - k.tile, k.end_place - k.next_place);
        k.next_place += k.left;
    }
    task = k;
}

/* Begins the next key range of the section: its sides, the copies of its first K, its queries. All threads call it. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_next_key_range(const tkvcu_job &j, tkvcu_attend_shared<D, NT> &b,
                                       const tkvcu_lane &me, const tkvcu_query_source<D> &from) {
    const tkvcu_task &k = b.task;
    const tkvcu_list list = j.view.list[k.visible.seq];
    const int tid = tkvcu_block_hoisting((int)threadIdx.x), coded = list.archive + list.warm;
    int region, first, ring_tile, ring_tiles, i, n = k.left, version = 0;
    for (i = tid; i < 4 * NT * D; i += TKVCU_THREADS) {
        const int column = k.column + i / D;
        from.q[tkvcu_find_source<D>(i / D, i % D)] =
            column < k.columns
                ? tkvcu_load_element(j.q, j.type, tkvcu_find_query(j, k, column) + (size_t)(i % D))
                : 0.0f;
    }
    if (k.section == 2) {
        region = k.tile < k.visible.sink_tiles ? TKVCU_SINKS : TKVCU_HOT;
        first = k.tile;
        if (region == TKVCU_HOT) first += 4 * tkvi_max(k.visible.first_block, coded) - k.visible.sink_tiles;
        else n = tkvi_min(n, k.visible.sink_tiles - k.tile);
    } else {
        region = k.section == 0 ? TKVCU_ARCHIVE : TKVCU_WARM;
        first =
            k.tile + (k.section == 0 ? k.visible.first_block : tkvi_max(k.visible.first_block, list.archive));
        version = j.view.version[(size_t)k.visible.seq * (size_t)j.view.max_blocks + (size_t)first];
        n = tkvcu_n_same_version(j, b, first, n);
    }
    /* length of the ring in key tiles; after the last place comes the first */
    ring_tiles = (region < TKVCU_SINKS ? 1 : 4) * j.view.ring[region];
    ring_tile = first % ring_tiles;
    n = tkvi_min(n, ring_tiles - ring_tile);
    __syncthreads();
    if (tid < 2) {
        const size_t at = (size_t)(version * TKVCU_REGIONS + region) * (size_t)j.view.n_kv_heads;
        b.side[tid] = j.view.side[(at + (size_t)k.head) * 2 + (size_t)tid];
        b.task.from[tid] =
            j.view.bytes[region] + (size_t)k.visible.seq * j.view.stride[region] + b.side[tid].at;
        if (region < TKVCU_SINKS) b.task.from[tid] += (size_t)ring_tile * j.view.block[region] + 2048;
        b.task.codes[tid] = (int)b.side[tid].code_bytes;
        b.task.meta[tid] = (int)(b.side[tid].bytes - b.side[tid].code_bytes);
        if (tid == 1) b.task.swizzled = (b.side[1].half_bits & 2) == 0; /* the width is even */
    }
    if (tid == 0) {
        b.task.block = j.view.block[region];
        b.task.ring_tile = ring_tile;
        b.task.region = region;
        b.task.first = first;
        b.task.n = n;
        b.task.tile += n;
        b.task.left -= n;
    }
    __syncthreads();
    if (region >= TKVCU_SINKS) tkvcu_prefetch_side<D, 1>(j, k, me, 0, me.warp);
    else tkvcu_prefetch_side<D, 0>(j, k, me, 0, me.warp);
    tkvcu_prepare_queries(j, b, from);
    __syncthreads();
}

/* Computes ends[entry], the running sum of places over the entries, 32 at a time. One warp calls it. */
TKVCU_DEVICE void tkvcu_find_ends(const tkvcu_job &j, int *ends, int lane) {
    int sum = 0, e, i;
    for (e = 0; e < j.n_entries; e += 32) {
        int n = 0;
        if (e + lane < j.n_entries) n = j.view.n_kv_heads * tkvcu_n_places(tkvcu_find_visible(j, e + lane));
        TKVCU_UNROLL
        for (i = 1; i < 32; i *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, n, (unsigned)i);
            if (lane >= i) n += before;
        }
        n += sum;
        if (e + lane < j.n_entries) ends[e + lane] = n;
        sum = __shfl_sync(0xffffffffu, n, 31);
    }
}

/* Thread blocks per multiprocessor that the register limit must allow. */
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ < 900
/* With head_dim 128, shared memory has no space for more. */
#define TKVCU_RESIDENT(D, NT) ((D) == 128 && (NT) == 2 ? 2 : 3)
#else
#define TKVCU_RESIDENT(D, NT) ((NT) == 2 ? 3 : 4)
#endif

template <int D, int NT, int VG>
__global__ void __launch_bounds__(TKVCU_THREADS, TKVCU_RESIDENT(D, NT)) tkvcu_attend_kernel(tkvcu_job j) {
    TKVCU_SHARED(uint8_t, shared);
    tkvcu_attend_shared<D, NT> &b = *(tkvcu_attend_shared<D, NT> *)(void *)shared;
    int *ends = (int *)(void *)(shared + sizeof b); /* [n_entries] */
    const int tid = (int)threadIdx.x;
    const int warp_bytes = TKVCU_SLOTS * j.slot_bytes + TKVCU_WORK(D, NT, VG);
    const int warps_at = (int)((sizeof b + sizeof(int) * (size_t)j.n_entries + 127) / 128 * 128);
    const tkvcu_lane me = tkvcu_make_lane<D>(shared + warps_at, warp_bytes, j.slot_bytes);
    if (tid < 16) b.mantissa[tid] = tkvi_bits(tkvi_log_value(1 + tid, 16));
    if (me.warp == 0) tkvcu_find_ends(j, ends, me.lane);
    __syncthreads();
    if (tid == 0) {
        const int total = ends[j.n_entries - 1];
        b.task.entry = 0;
        b.task.group = j.view.n_heads / j.view.n_kv_heads;
        b.task.columns = b.task.group * j.n_queries;
        b.task.column = 4 * NT * (int)blockIdx.y;
        b.task.next_place = tkvcu_find_first_place(total, (int)gridDim.x, (int)blockIdx.x);
        b.task.end_place = tkvcu_find_first_place(total, (int)gridDim.x, (int)blockIdx.x + 1);
        tkvcu_next_section(j, b.task, ends);
    }
    __syncthreads();
    while (b.task.left > 0) {
        tkvcu_partials<D, NT, VG> u;
        tkvcu_clear_partials(u);
        while (b.task.left > 0) {
            tkvcu_next_key_range(
                j, b, me, tkvcu_find_query_source<D>(shared + tkvcu_block_hoisting(warps_at), j.slot_bytes));
            if (b.task.region >= TKVCU_SINKS) {
                tkvcu_attend_key_range<D, NT, VG, 1>(j, b, me, u);
            } else {
                tkvcu_attend_key_range<D, NT, VG, 0>(j, b, me, u);
            }
            __syncthreads();
        }
        tkvcu_write_partials(j, b, me, u, shared + warps_at, (size_t)warp_bytes);
        if (tid == 0) tkvcu_next_section(j, b.task, ends);
        __syncthreads();
    }
}

#endif /* TKVCU_ATTEND_H */
