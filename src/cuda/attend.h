/*
 * attend.h - decode attention on the compressed tiers: one pass over the bytes, one softmax.
 *
 * Work is cut into units: a coded block of 64 tokens, or 16 tokens of an exact one (about as many bytes). Those of
 * an (entry of the batch, KV head) stand in a row: archive, warm, exact; all of them one after the other are cut into
 * equal ranges for the blocks of a grid that never changes, so a captured launch holds at any length. The warps of a
 * block take units by turns; where a part (archive, warm or exact) of a head ends they add up what they have, and
 * write it to the workspace: slot = number of the block + number of the part, which is unique. combine.h adds the
 * slots up, in order: no atomics, the same bits each time.
 *
 *     units    |  e0 h0: archive   warm  exact |  e0 h1: archive      warm  exact | ...
 *     blocks   |    0    |    1    |    2    |    3    |  ...
 *
 * In a block of threads, per warp:
 *
 *     global --cp.async--> ring of slots (K side, V side, K side, ...)
 *     K: metadata of 4 channels a lane -> scale and zero as halves; codes -> fragments (unpack.h)
 *        S = codes (q scale) - 1024 (q scale) + zero q         tokens x columns, 16 tokens a plane
 *     softmax: the running maximum moves only when it has grown by more than 4 (in log2)
 *     V: P = p scale / factor, through shared memory into the second operand's order
 *        O += codes P - 1024 P                                 channels x columns, a slab of 16 channels
 *
 * Columns are the queries of the KV head's group of query heads, 8 to an n-tile; NT n-tiles at a time. The 1024 comes
 * off with the same rounded operand that it came with, per unit: nothing large stays in the sums.
 */
#ifndef TKVCU_ATTEND_H
#define TKVCU_ATTEND_H

#include "unpack.h"

#define TKVCU_WARPS 4 /* of a block */
#define TKVCU_THREADS (32 * TKVCU_WARPS)
#define TKVCU_SLOTS 3        /* sides in flight or in use, per warp */
#define TKVCU_PARTS 3        /* archive, warm, exact */
#define TKVCU_NOTHING -1e30f /* logit of what is not seen, and below all that a maximum begins with */
#define TKVCU_START -1e29f
#define TKVCU_BOTTOM (-127) /* exponent of units that nothing has been added up in */
#define TKVCU_LIFT 8.0f     /* weights are 2^8 times what they are: small ones stay normal halves */

/* For tools/cuda_resources.py, which counts the instructions of a unit: with sides that the compiler knows, without
 * what happens rarely. */
#ifndef TKVCU_SIDE
#define TKVCU_SIDE(b, i) (b).side[i]
#define TKVCU_RARELY(x) (x)
#endif

typedef struct tkvcu_job { /* a call, as kernels see it */
    tkvcu_view view;
    const void *q;
    void *out;
    float *lse;
    const float *sinks;     /* learned, [n_heads] */
    const int32_t *entries; /* sequence of each entry; NULL: 0, 1, ...; a negative one: none */
    uint32_t *word;
    float *partial;                                 /* the workspace */
    int type, n_entries, n_queries, window, blocks; /* blocks: gridDim.x of the attention kernel */
    float scale, softcap;
    int slot_bytes, meta_bytes; /* shared memory of a warp: a slot of the ring; decoded metadata */
} tkvcu_job;

/* >>where the units are */
typedef struct tkvcu_reach { /* of one entry: units of a KV head in each part, and the first that is seen */
    int first;               /* block */
    int units[TKVCU_PARTS];
    int sinks; /* of the exact units, those of the sinks */
    int len, seq;
} tkvcu_reach;

TKVCU_DEVICE int tkvcu_div_up(int a, int b) { return (a + b - 1) / b; }

TKVCU_DEVICE tkvcu_reach tkvcu_reach_of(const tkvcu_job &j, int entry) {
    tkvcu_reach r;
    tkvcu_list list;
    int coded, hot, behind;
    r.seq = j.entries ? j.entries[entry] : entry;
    if (r.seq < 0 || r.seq >= j.view.n_seqs) {
        memset(&r, 0, sizeof r);
        r.seq = -1;
        return r;
    }
    list = j.view.list[r.seq];
    coded = list.archive + list.warm;
    r.len = list.len;
    r.sinks = tkvcu_div_up(list.len < j.view.sinks ? list.len : j.view.sinks, 16);
    r.first = 0;
    if (j.window) { /* what the oldest query does not see any more */
        const int unseen = list.len - j.n_queries - j.window + 1;
        if (unseen > j.view.sinks) r.first = (unseen - j.view.sinks) / 64;
        if (unseen >= j.view.sinks) r.sinks = 0;
    }
    r.units[0] = list.archive > r.first ? list.archive - r.first : 0;
    behind = r.first > list.archive ? r.first : list.archive;
    r.units[1] = coded > behind ? coded - behind : 0;
    behind = r.first > coded ? r.first : coded;
    hot = list.len - j.view.sinks - 64 * behind;
    r.units[2] = r.sinks + (hot > 0 ? tkvcu_div_up(hot, 16) : 0);
    return r;
}

/* Of one part: registers have no index that is known only when it runs. */
TKVCU_DEVICE int tkvcu_units_in(const tkvcu_reach &r, int part) {
    return part == 0 ? r.units[0] : part == 1 ? r.units[1] : r.units[2];
}

TKVCU_DEVICE int tkvcu_units_of(const tkvcu_reach &r) { return r.units[0] + r.units[1] + r.units[2]; }

/* The first unit of a block of threads; where there are more blocks than units, the last ones have none. */
TKVCU_DEVICE int tkvcu_range(int units, int blocks, int block) {
    const int working = units < blocks ? units : blocks;
    return block < working ? (int)((int64_t)units * block / working) : units;
}

/* >>elements of the caller's arrays */
TKVCU_DEVICE float tkvcu_element(const void *x, int type, size_t at) {
    uint32_t h;
    if (type == TKV_TYPE_F32) return ((const float *)x)[at];
    h = ((const uint16_t *)x)[at];
    return type == TKV_TYPE_F16 ? tkvcu_f16_lo(h) : tkvcu_bf16_lo(h);
}

TKVCU_DEVICE void tkvcu_put_element(void *x, int type, size_t at, float y) {
    if (type == TKV_TYPE_F32) ((float *)x)[at] = y;
    else
        ((uint16_t *)x)[at] = (uint16_t)(type == TKV_TYPE_F16 ? tkvcu_f16x2(y, 0.0f) : tkvcu_bf16x2(y, 0.0f));
}

/* tkvi_log_value; mantissa: 2^(k / 16) as bits of a float, in shared memory, where lanes may look each in another
 * place (and no register is spent on the address of the header's table). */
TKVCU_DEVICE float tkvcu_log_value(uint32_t code, int top, const uint32_t *mantissa) {
    const uint32_t i = code - 1u;
    if (code == 0) return 0.0f;
    return tkvi_from_bits(mantissa[i & 15u] + ((uint32_t)(top - 16 + (int)(i >> 4)) << 23));
}

/* Nothing becomes infinite. */
TKVCU_DEVICE uint32_t tkvcu_halves(float lo, float hi) {
    lo = fminf(fmaxf(lo, -65504.0f), 65504.0f);
    hi = fminf(fmaxf(hi, -65504.0f), 65504.0f);
    return tkvcu_f16x2(lo, hi);
}

/* >>what a block of threads shares, and what a warp has of its own */
struct alignas(16) tkvcu_scales { /* of a tile of K, channels 0, 2 and 1, 3 */
    tkvcu_words scale, zero;
};

/* What a block of threads works at: a part of one KV head of one entry, and in it a run of units that are read in one
 * way. In shared memory: registers are for sums. */
struct tkvcu_task {
    tkvcu_reach reach;
    int entry, head, part;
    int at, left;           /* unit in the part, and units of it that are still to do */
    int region, first, n;   /* the run: blocks, or 16 exact rows */
    const uint8_t *from[2]; /* the head's sides in the region's place 0; then bytes of a coded one */
    uint32_t bytes[2];
    uint32_t block;             /* bytes from place to place */
    int place, places;          /* of the first unit, in units; after the last one comes the first */
    int group, columns, column; /* query heads of a KV head; all columns of it; the block's first */
    int unit, end;              /* of all units */
};

template <int D, int NT> struct tkvcu_block {
    tkvcu_task task;
    tkvcu_words q[D / 16][NT][32]; /* second operands of K's product, in the order of the run's channels */
    tkvcu_words q_low[D / 16][NT][32]; /* bfloat16: what the upper parts leave */
    float mean[8 * NT];                /* q times the static means */
    uint32_t mantissa[16];
    uint16_t k_log[256]; /* A: scales as halves, by their byte */
    float v_log[256];    /* R: the same */
    tkvcu_words
        fine[D / 4]; /* A: what makes an offset's byte its share in units of the scale, by tile: halves */
    uint32_t magic;  /* TKVCU_MAGIC */
    int other[TKVCU_THREADS]; /* bits: not the same version */
    tkvcu_side side[2];       /* of the run */
};

template <int NT> struct tkvcu_part { /* what a warp knows of the rows it has seen; columns 2 t, 2 t + 1 */
    float m[NT][2], l[NT][2];
};

template <int D, int NT, int VG> struct tkvcu_sums {
    tkvcu_part<NT> soft;
    float o[D / 16][NT][4]; /* channels x columns */
    float zero[VG][NT][2];  /* KIVI: the zero points' share, by group of channels; of this lane's tokens */
    int top;                /* o is in units of 2^top: see tkvcu_v_meta */
};

struct tkvcu_lane {
    int warp, lane, g, t;
    uint8_t *ring;
    tkvcu_scales *meta;
    float *weights_meta; /* the same memory, for V: scale [group][64], zero [group][64] */
    uint8_t *p;          /* [NT][64 rows][8 columns] halves */
};

template <int D, int NT, int VG> TKVCU_DEVICE void tkvcu_begin(tkvcu_sums<D, NT, VG> &u) {
    int nt, i, c;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        TKVCU_UNROLL
        for (i = 0; i < 4; i++) {
            TKVCU_UNROLL
            for (c = 0; c < D / 16; c++) u.o[c][nt][i] = 0.0f;
        }
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            u.soft.m[nt][i] = TKVCU_START;
            u.soft.l[nt][i] = 0.0f;
            TKVCU_UNROLL
            for (c = 0; c < VG; c++) u.zero[c][nt][i] = 0.0f;
        }
    }
    u.top = TKVCU_BOTTOM;
}

/* >>loading */
TKVCU_DEVICE void tkvcu_load(uint8_t *slot, const uint8_t *from, uint32_t bytes, int lane) {
    int left = (int)bytes - 16 * lane, k;
    slot += 16 * lane;
    from += 16 * lane;
    TKVCU_ROLL
    for (; left > 0; left -= 2048, slot += 2048, from += 2048) {
        TKVCU_UNROLL
        for (k = 0; k < 2048; k += 512)
            if (left > k) tkvcu_cp_async16(slot + k, from + k);
    }
}

/* 16 rows of an exact side, chunks of 16 bytes turned about so that columns of rows lie in all banks. Rows that are not
 * there are copies of the last one. */
template <int D> TKVCU_DEVICE void tkvcu_load_rows(uint8_t *slot, const uint8_t *from, int rows, int lane) {
    int i;
    for (i = lane; i < 16 * (D / 8); i += 32) {
        const int row = i / (D / 8), chunk = i % (D / 8), there = row < rows ? row : rows - 1;
        tkvcu_cp_async16(slot + row * (2 * D) + 16 * (chunk ^ (row & (D % 64 ? 3 : 7))),
                         from + there * (2 * D) + 16 * chunk);
    }
}

/* >>K */
/* Width of slab `slab` of an A side; its tiles' order is that of the widths. */
TKVCU_DEVICE int tkvcu_width_of(const tkvcu_side &s, int slab) {
    int w;
    for (w = 6; w > 0; w--) {
        if (slab < s.slabs[w]) break;
        slab -= s.slabs[w];
    }
    return w;
}

/* Scales and zeros of each tile, as halves; zeros of A are in units of the scale, exact, and without the static mean
 * (format_a.h). Where an A tile has no bits the zero is the block's mean and there is no scale. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_k_meta(const tkvcu_side &s, const uint8_t *slot, const tkvcu_block<D, NT> &b,
                               tkvcu_scales *meta, int lane) {
    const uint8_t *m = slot + s.code_bytes;
    int i;
    for (i = lane; i < D / 4; i += 32) {
        tkvcu_scales x;
        if (s.kind == TKVCU_KIVI) {
            const tkvcu_words a = *(const tkvcu_words *)(const void *)(m + 8 * i);
            const tkvcu_words z = *(const tkvcu_words *)(const void *)(m + 2 * D + 8 * i);
            x.scale.x = tkvcu_prmt(a.x, a.y, 0x5410);
            x.scale.y = tkvcu_prmt(a.x, a.y, 0x7632);
            x.zero.x = tkvcu_prmt(z.x, z.y, 0x5410);
            x.zero.y = tkvcu_prmt(z.x, z.y, 0x7632);
        } else {
            const uint32_t logs = *(const uint32_t *)(const void *)(m + 4 * i);
            const uint32_t offsets = *(const uint32_t *)(const void *)(m + D + 4 * i);
            const tkvcu_words fine = b.fine[i];
            if (fine.x == 0) { /* a half, low bytes and high bytes apart */
                x.scale.x = x.scale.y = 0;
                x.zero.x = tkvcu_prmt(logs, offsets, 0x6240);
                x.zero.y = tkvcu_prmt(logs, offsets, 0x7351);
            } else {
                const uint32_t up = offsets ^ 0x80808080u; /* 1024 + 128 + offset */
                x.scale.x = (uint32_t)b.k_log[logs & 255u] | (uint32_t)b.k_log[logs >> 16 & 255u] << 16;
                x.scale.y = (uint32_t)b.k_log[logs >> 8 & 255u] | (uint32_t)b.k_log[logs >> 24] << 16;
                x.zero.x = tkvcu_hfma2(tkvcu_prmt(up, 0x64646464u, 0x4240), fine.x, fine.y);
                x.zero.y = tkvcu_hfma2(tkvcu_prmt(up, 0x64646464u, 0x4341), fine.x, fine.y);
            }
        }
        meta[i] = x;
    }
}

/* n slabs, all of width W: S += codes (q scale). A: a zero is in units of the scale, so one product has both the zero
 * (rows 0 .. 7) and what takes the 1024 off (rows 8 .. 15); KIVI: zeros are in S already. */
template <int W, int NT, int A>
TKVCU_DEVICE void tkvcu_k_run(float s[4][NT][4], const uint8_t *slot, const tkvcu_tiles &at,
                              const tkvcu_words *q, const tkvcu_scales *meta, int n, int g, int t,
                              uint32_t magic) {
    const uint32_t minus = 0xe400e400u; /* -1024 */
    float run[4][NT][4], both[NT][4];
    int i, k, nt;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) {
        both[nt][i] = 0.0f;
        run[0][nt][i] = run[1][nt][i] = run[2][nt][i] = run[3][nt][i] = 0.0f;
    }
    TKVCU_ROLL
    for (k = 0; k < n; k++) {
        const tkvcu_scales m = meta[4 * k + t];
        const uint32_t off[4] = {A ? m.zero.x : 0, minus, A ? m.zero.y : 0, minus};
        uint32_t scaled[NT][2], a[4];
        tkvcu_tile<W> tile;
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_words x = q[(k * NT + nt) * 32 + 4 * g + t];
            scaled[nt][0] = tkvcu_hmul2(x.x, m.scale.x);
            scaled[nt][1] = tkvcu_hmul2(x.y, m.scale.y);
            tkvcu_mma_f16(both[nt], off, scaled[nt]);
        }
        tkvcu_fetch<W>(tile, slot + at.wide + (4 * k + t) * (64 * (int)tkvcu_field<W>::vectors),
                       slot + at.halves + ((at.half + 4 * k) / 2 + t / 2) * 64, t % 2 * 4, g);
#define TKVCU_PLANE_(P)                                                                                      \
    {                                                                                                        \
        tkvcu_fragment<W, P>(tile, a, magic);                                                                \
        TKVCU_UNROLL                                                                                         \
        for (nt = 0; nt < NT; nt++) tkvcu_mma_f16(run[P][nt], a, scaled[nt]);                                \
    }
        TKVCU_PLANE_(0)
        TKVCU_PLANE_(1)
        TKVCU_PLANE_(2)
        TKVCU_PLANE_(3)
#undef TKVCU_PLANE_
    }
    TKVCU_UNROLL
    for (k = 0; k < 4; k++) TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) {
        const float rest = fmaf(both[nt][2 + i % 2], tkvcu_unfactor<W>(k), both[nt][i % 2]);
        s[k][nt][i] += fmaf(run[k][nt][i], tkvcu_unfactor<W>(k), rest);
    }
}

/* S += halves q, slabs first .. first+n-1, one half for all tokens. */
template <int NT>
TKVCU_DEVICE void tkvcu_k_zeros(float sum[NT][4], const tkvcu_words *q, const tkvcu_scales *meta, int first,
                                int last, int g, int t) {
    int k, nt;
    TKVCU_ROLL
    for (k = first; k < last; k++) {
        const tkvcu_words m = meta[4 * k + t].zero;
        const uint32_t z[4] = {m.x, m.x, m.y, m.y};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_words x = q[(k * NT + nt) * 32 + 4 * g + t];
            const uint32_t plain[2] = {x.x, x.y};
            tkvcu_mma_f16(sum[nt], z, plain);
        }
    }
}

/* What is the same for all tokens: static means and q, zeros or means and q. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_k_begin(const tkvcu_side &side, float s[4][NT][4], const tkvcu_words *q,
                                const tkvcu_scales *meta, const float *mean, int g, int t) {
    int p, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        TKVCU_UNROLL
        for (i = 0; i < 4; i++) s[0][nt][i] = mean[8 * nt + 2 * t + i % 2];
    }
    tkvcu_k_zeros<NT>(s[0], q, meta, side.kind == TKVCU_KIVI ? 0 : D / 16 - side.slabs[0], D / 16, g, t);
    TKVCU_UNROLL
    for (p = 1; p < 4; p++) {
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            TKVCU_UNROLL
            for (i = 0; i < 4; i++) s[p][nt][i] = s[0][nt][i];
        }
    }
}

/* All slabs of a K side, widest first; those without bits are means alone. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_k_codes(const tkvcu_side &side, float s[4][NT][4], const uint8_t *slot,
                                const tkvcu_words *q, const tkvcu_scales *meta, int g, int t,
                                uint32_t magic) {
    tkvcu_tiles at;
    at.wide = 0;
    at.half = 0;
    at.halves = side.code_bytes - 128u * (uint32_t)(side.slabs[1] + side.slabs[3] + side.slabs[5]);
    if (side.kind == TKVCU_KIVI) {
        at.halves = D / 4 * 64; /* of 3 bits */
        if (side.half_bits == 4) tkvcu_k_run<2, NT, 0>(s, slot, at, q, meta, D / 16, g, t, magic);
        else if (side.half_bits == 6) tkvcu_k_run<3, NT, 0>(s, slot, at, q, meta, D / 16, g, t, magic);
        else if (side.half_bits == 8) tkvcu_k_run<4, NT, 0>(s, slot, at, q, meta, D / 16, g, t, magic);
        else tkvcu_k_run<8, NT, 0>(s, slot, at, q, meta, D / 16, g, t, magic);
        return;
    }
#define TKVCU_WIDTH_(W)                                                                                      \
    if (side.slabs[W]) {                                                                                     \
        const int n = side.slabs[W];                                                                         \
        tkvcu_k_run<W, NT, 1>(s, slot, at, q, meta, n, g, t, magic);                                         \
        at.wide += (uint32_t)n * 256u * (uint32_t)tkvcu_field<W>::vectors;                                   \
        at.half += tkvcu_field<W>::half * 4 * n;                                                             \
        q += n * NT * 32;                                                                                    \
        meta += 4 * n;                                                                                       \
    }
    TKVCU_WIDTH_(6)
    TKVCU_WIDTH_(5)
    TKVCU_WIDTH_(4)
    TKVCU_WIDTH_(3)
    TKVCU_WIDTH_(2)
    TKVCU_WIDTH_(1)
#undef TKVCU_WIDTH_
}

/* >>softmax. Scores are q.k with the sign of the scale in q; logits, base 2, are scores times tkvcu_slope. */
TKVCU_DEVICE float tkvcu_slope(const tkvcu_job &j) {
    return (j.softcap > 0.0f ? j.softcap : fabsf(j.scale)) * 1.44269504f;
}

/* With a softcap: score as what the slope makes a logit of. */
TKVCU_DEVICE float tkvcu_capped(const tkvcu_job &j, float s) {
    return tanhf(s * (fabsf(j.scale) / j.softcap));
}

/* New maxima of the columns are known (in all lanes of a column): moves the running ones where they grew by much, or
 * began. */
template <int D, int NT, int VG> TKVCU_DEVICE void tkvcu_follow(tkvcu_sums<D, NT, VG> &u, float most[NT][2]) {
    int nt, i, k, grew = 0;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        float x = most[nt][i];
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
        most[nt][i] = x;
        grew |= x > u.soft.m[nt][i] + 4.0f;
    }
    if (!TKVCU_RARELY(__any_sync(0xffffffffu, grew))) return;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        const float m = fmaxf(u.soft.m[nt][i], most[nt][i]), by = tkvcu_ex2(u.soft.m[nt][i] - m);
        u.soft.m[nt][i] = m;
        u.soft.l[nt][i] *= by;
        TKVCU_UNROLL
        for (k = 0; k < D / 16; k++) {
            u.o[k][nt][i] *= by;
            u.o[k][nt][2 + i] *= by;
        }
        TKVCU_UNROLL
        for (k = 0; k < VG; k++) u.zero[k][nt][i] *= by;
    }
}

/* >>V */
/* The sums in other units, larger ones. */
template <int D, int NT, int VG> TKVCU_DEVICE void tkvcu_retop(tkvcu_sums<D, NT, VG> &u, int top) {
    const float by = tkvi_from_bits((uint32_t)tkvi_max(0, 127 + u.top - top) << 23);
    int k, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) {
        TKVCU_UNROLL
        for (k = 0; k < D / 16; k++) u.o[k][nt][i] *= by;
    }
    u.top = top;
}

/* Scales of the tokens in units of 2^u.top, with what undoes their plane's factor; KIVI: zeros, as they are. The
 * units become those of the largest scale when there are none yet, or one is above 8: a weight is 2^12 at most (by
 * TKVCU_LIFT, and 4 that the maximum may lag behind), so weights times scales are at most 2^15: no half overflows,
 * whatever the values are. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_v_meta(tkvcu_sums<D, NT, VG> &u, const tkvcu_side &s, const uint8_t *slot, float *out,
                               int lane, const float *v_log) {
    const uint8_t *m = slot + s.code_bytes;
    const int width = s.half_bits / 2, kivi = s.kind == TKVCU_KIVI, n = kivi ? 2 * VG : 2;
    const int plane = lane % 16 / 4; /* of all tokens of this lane */
    const int up = s.half_bits == 3 ? TKVCU_PAIR_BITS
                   : width == 1     ? 6 + plane
                   : width == 2     ? 2 + 2 * plane
                   : width == 3     ? 1 + plane / 2 * 4
                   : width == 4     ? 2 + plane % 2 * 4
                                    : 2;
    float x[2 * VG], most = 0.0f, by;
    int i;
    TKVCU_UNROLL
    for (i = 0; i < 2 * VG; i++) {
        const int at = lane + 32 * i;
        if (i >= n) continue;
        if (kivi) {
            x[i] = tkvcu_f16_lo(*(const uint16_t *)(const void *)(m + 2 * at));
            out[64 * VG + at] = tkvcu_f16_lo(*(const uint16_t *)(const void *)(m + 128 * VG + 2 * at));
        } else {
            x[i] = v_log[m[at]];
        }
        most = fmaxf(most, x[i]);
    }
    if (TKVCU_RARELY(__any_sync(0xffffffffu, most > tkvi_from_bits((uint32_t)(127 + 3 + u.top) << 23)))) {
        uint32_t bits;
        TKVCU_UNROLL
        for (i = 1; i < 32; i *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
        memcpy(&bits, &most, 4);
        tkvcu_retop(u, (int)(bits >> 23) - 127);
    }
    by = tkvi_from_bits((uint32_t)(127 - up - u.top) << 23);
    TKVCU_UNROLL
    for (i = 0; i < 2 * VG; i++)
        if (i < n) out[lane + 32 * i] = x[i] * by;
}

/* Weights p (lane's rows and columns) as second operands of V's product. */
template <int NT>
TKVCU_DEVICE void tkvcu_turn(const float w[4][NT][4], const float *scale, uint8_t *memory,
                             uint32_t b[4][NT][2], int g, int t, int lane) {
    int p, nt, s;
    __syncwarp();
    TKVCU_UNROLL
    for (p = 0; p < 4; p++) {
        const float x = scale[16 * p + 2 * g], y = scale[16 * p + 2 * g + 1];
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            uint8_t *at = memory + 1024 * nt + 4 * t;
            *(uint32_t *)(void *)(at + 16 * (16 * p + (g ^ 2 * p))) =
                tkvcu_f16x2(w[p][nt][0] * x, w[p][nt][1] * x);
            *(uint32_t *)(void *)(at + 16 * (16 * p + 8 + (g ^ (2 * p + 1)))) =
                tkvcu_f16x2(w[p][nt][2] * y, w[p][nt][3] * y);
        }
    }
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (s = 0; s < 4; s += 2) { /* matrices: steps s and s + 1, bytes 0, 2 and 1, 3 */
        const int odd = lane / 8 % 2, row = 2 * (s + lane / 16) + lane % 2, plane = lane % 8 / 2;
        uint32_t r[4];
        tkvcu_ldmatrix_x4_trans(r,
                                memory + 1024 * nt + 16 * (16 * plane + 8 * odd + (row ^ (2 * plane + odd))));
        b[s][nt][0] = r[0];
        b[s][nt][1] = r[1];
        b[s + 1][nt][0] = r[2];
        b[s + 1][nt][1] = r[3];
    }
}

/* Slabs FIRST .. FIRST+N-1 of V, width W: O += codes P - 1024 P, with R also - middle P. */
template <int D, int W, int FIRST, int N, int NT, int VG>
TKVCU_DEVICE void tkvcu_v_run(tkvcu_sums<D, NT, VG> &u, const uint8_t *slot, const uint32_t b[4][NT][2],
                              int rotated, int g, int t, uint32_t magic) {
    const uint8_t *halves = slot + D / 4 * 64 * (int)tkvcu_field<W>::vectors;
    float bias[NT][4];
    int i, k, nt;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) bias[nt][i] = 0.0f;
    TKVCU_UNROLL
    for (k = 0; k < 4; k++) { /* 1024, or 1024 + middle * factor, is a half exactly: of up to 4 bits */
        const float middle = rotated ? 0.5f * (float)((1 << W) - 1) * (float)(1 << tkvcu_bit<W>(k)) : 0.0f;
        const uint32_t x = tkvcu_f16x2(-1024.0f - middle, -1024.0f - middle), a[4] = {x, x, x, x};
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) tkvcu_mma_f16(bias[nt], a, b[k][nt]);
    }
    TKVCU_UNROLL
    for (k = FIRST; k < FIRST + N; k++) {
        float sum[NT][4];
        uint32_t a[4];
        tkvcu_tile<W> tile;
        tkvcu_fetch<W>(tile, slot + (4 * k + t) * (64 * (int)tkvcu_field<W>::vectors),
                       halves + (2 * k + t / 2) * 64, t % 2 * 4, g);
        tkvcu_fragment<W, 0>(tile, a, magic);
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) tkvcu_mma_f16_onto(sum[nt], a, b[0][nt], bias[nt]);
#define TKVCU_PLANE_(P)                                                                                      \
    tkvcu_fragment<W, P>(tile, a, magic);                                                                    \
    TKVCU_UNROLL                                                                                             \
    for (nt = 0; nt < NT; nt++) tkvcu_mma_f16(sum[nt], a, b[P][nt]);
        TKVCU_PLANE_(1)
        TKVCU_PLANE_(2)
        TKVCU_PLANE_(3)
#undef TKVCU_PLANE_
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
        for (i = 0; i < 4; i++) u.o[k][nt][i] += sum[nt][i];
    }
}

/* The same of R with pairs: 16 lanes of a tile are channels of two slabs. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_v_pairs(tkvcu_sums<D, NT, VG> &u, const uint8_t *slot, const uint32_t b[4][NT][2],
                                int g, int t) {
    const uint32_t minus[4] = {TKVCU_PAIR_MINUS, TKVCU_PAIR_MINUS, TKVCU_PAIR_MINUS, TKVCU_PAIR_MINUS};
    float bias[NT][4];
    int i, k, nt, h;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        TKVCU_UNROLL
        for (i = 0; i < 4; i++) bias[nt][i] = 0.0f;
        TKVCU_UNROLL
        for (k = 0; k < 4; k++) tkvcu_mma_f16(bias[nt], minus, b[k][nt]);
    }
    TKVCU_UNROLL
    for (k = 0; k < D / 32; k++) {
        tkvcu_pair_tile tile;
        uint32_t code[2][2];
        tkvcu_fetch_pairs(tile, slot + (4 * k + t) * 64, slot + D / 8 * 64 + (2 * k + t / 2) * 64, t % 2 * 4,
                          g);
        TKVCU_UNROLL
        for (i = 0; i < 2; i++) {
            code[0][i] = tkvcu_pair_codes<0>(tile, i);
            code[1][i] = tkvcu_pair_codes<2>(tile, i);
        }
        TKVCU_UNROLL
        for (h = 0; h < 2; h++) {
            float sum[NT][4];
            TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
            for (i = 0; i < 4; i++) sum[nt][i] = bias[nt][i];
            TKVCU_UNROLL
            for (i = 0; i < 2; i++) {
                uint32_t a[2][4];
                tkvcu_pair_fragments(code[i], tkvcu_pair_points(h), a);
                TKVCU_UNROLL
                for (nt = 0; nt < NT; nt++) {
                    tkvcu_mma_f16(sum[nt], a[0], b[2 * i][nt]);
                    tkvcu_mma_f16(sum[nt], a[1], b[2 * i + 1][nt]);
                }
            }
            TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
            for (i = 0; i < 4; i++) u.o[2 * k + h][nt][i] += sum[nt][i];
        }
    }
}

template <int D, int FIRST, int N, int NT, int VG>
TKVCU_DEVICE void tkvcu_v_width(int width, tkvcu_sums<D, NT, VG> &u, const uint8_t *slot,
                                const uint32_t b[4][NT][2], int rotated, int g, int t, uint32_t magic) {
    if (width == 2) tkvcu_v_run<D, 2, FIRST, N, NT, VG>(u, slot, b, rotated, g, t, magic);
    else if (width == 3) tkvcu_v_run<D, 3, FIRST, N, NT, VG>(u, slot, b, rotated, g, t, magic);
    else if (width == 4) tkvcu_v_run<D, 4, FIRST, N, NT, VG>(u, slot, b, rotated, g, t, magic);
    else if (width == 1) tkvcu_v_run<D, 1, FIRST, N, NT, VG>(u, slot, b, rotated, g, t, magic);
    else tkvcu_v_run<D, 8, FIRST, N, NT, VG>(u, slot, b, rotated, g, t, magic);
}

/* >>units */
TKVCU_DEVICE int tkvcu_position_of_query(const tkvcu_job &j, const tkvcu_task &k, int column) {
    return k.reach.len - j.n_queries + (k.column + column) / k.group;
}

TKVCU_DEVICE int tkvcu_sees(const tkvcu_job &j, int query, int position) {
    return position <= query && (j.window == 0 || position > query - j.window);
}

/* Logits and weights of a coded unit in place: s[plane][n-tile][row of the lane, column]. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_weigh(const tkvcu_job &j, const tkvcu_task &k, tkvcu_sums<D, NT, VG> &u,
                              float s[4][NT][4], int position, int g, int t) {
    const int oldest = k.reach.len - j.n_queries;
    const int masked =
        TKVCU_RARELY(position + 63 > oldest || (j.window && position <= k.reach.len - 1 - j.window));
    const float slope = tkvcu_slope(j);
    float most[NT][2];
    int p, nt, i;
    if (TKVCU_RARELY(j.softcap > 0.0f)) {
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
        for (i = 0; i < 4; i++) s[p][nt][i] = tkvcu_capped(j, s[p][nt][i]);
    }
    if (masked) {
        TKVCU_UNROLL
        for (p = 0; p < 4; p++) TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
        for (i = 0; i < 4; i++) {
            const int query = tkvcu_position_of_query(j, k, 8 * nt + 2 * t + i % 2);
            if (!tkvcu_sees(j, query, position + 16 * p + 2 * g + i / 2)) s[p][nt][i] = -INFINITY;
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        float x = fmaxf(s[0][nt][i], s[0][nt][i + 2]);
        TKVCU_UNROLL
        for (p = 1; p < 4; p++) x = fmaxf(fmaxf(x, s[p][nt][i]), s[p][nt][i + 2]);
        most[nt][i] = fmaxf(x * slope, TKVCU_NOTHING);
    }
    tkvcu_follow(u, most);
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (p = 0; p < 4; p++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) {
        s[p][nt][i] = tkvcu_ex2(fmaf(s[p][nt][i], slope, TKVCU_LIFT - u.soft.m[nt][i % 2]));
        u.soft.l[nt][i % 2] += s[p][nt][i];
    }
}

/* One side of a coded unit that lies in `slot`. s: logits after K, weights for V. */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_coded_k(const tkvcu_job &j, const tkvcu_block<D, NT> &b, const tkvcu_lane &me,
                                tkvcu_sums<D, NT, VG> &u, float s[4][NT][4], const uint8_t *slot,
                                int position) {
    const tkvcu_side &side = TKVCU_SIDE(b, 0);
    tkvcu_k_meta<D, NT>(side, slot, b, me.meta, me.lane);
    __syncwarp();
    tkvcu_k_begin<D, NT>(side, s, &b.q[0][0][0], me.meta, b.mean, me.g, me.t);
    tkvcu_k_codes<D, NT>(side, s, slot, &b.q[0][0][0], me.meta, me.g, me.t, b.magic);
    tkvcu_weigh(j, b.task, u, s, position, me.g, me.t);
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_coded_v(const tkvcu_block<D, NT> &b, const tkvcu_lane &me, tkvcu_sums<D, NT, VG> &u,
                                const float s[4][NT][4], const uint8_t *slot) {
    const tkvcu_side &side = TKVCU_SIDE(b, 1);
    const int groups = side.kind == TKVCU_KIVI ? D / 64 : 1;
    const int width = side.half_bits / 2;
    uint32_t w[4][NT][2];
    int i, p, nt;
    tkvcu_v_meta(u, side, slot, me.weights_meta, me.lane, b.v_log);
    __syncwarp();
    if (side.kind == TKVCU_KIVI) {
        TKVCU_UNROLL
        for (i = 0; i < VG; i++) {
            const float *zero = me.weights_meta + 64 * (groups + i);
            if (i >= groups) continue;
            TKVCU_UNROLL
            for (p = 0; p < 4; p++) TKVCU_UNROLL
            for (nt = 0; nt < NT; nt++) {
                const float x = zero[16 * p + 2 * me.g], y = zero[16 * p + 2 * me.g + 1];
                u.zero[i][nt][0] += s[p][nt][0] * x + s[p][nt][2] * y;
                u.zero[i][nt][1] += s[p][nt][1] * x + s[p][nt][3] * y;
            }
        }
    }
    tkvcu_turn<NT>(s, me.weights_meta, me.p, w, me.g, me.t, me.lane);
    if (side.half_bits == 3) {
        tkvcu_v_pairs<D, NT, VG>(u, slot, w, me.g, me.t);
    } else if (VG == 1 || groups == 1) {
        tkvcu_v_width<D, 0, D / 16, NT, VG>(width, u, slot, w, side.kind == TKVCU_R, me.g, me.t, b.magic);
    } else {
        tkvcu_v_width<D, 0, D / 16 / VG, NT, VG>(width, u, slot, w, 0, me.g, me.t, b.magic);
        tkvcu_turn<NT>(s, me.weights_meta + 64, me.p, w, me.g, me.t, me.lane);
        tkvcu_v_width<D, D / 16 / VG, D / 16 / VG, NT, VG>(width, u, slot, w, 0, me.g, me.t, b.magic);
    }
}

/* 16 exact tokens. Here rows g and g + 8 are tokens, or channels, g and g + 8. */
template <int D> TKVCU_DEVICE const uint8_t *tkvcu_chunk(const uint8_t *slot, int row, int chunk) {
    return slot + row * (2 * D) + 16 * (chunk ^ (row & (D % 64 ? 3 : 7)));
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_exact_k(const tkvcu_job &j, const tkvcu_block<D, NT> &b, const tkvcu_lane &me,
                                tkvcu_sums<D, NT, VG> &u, float s[NT][4], const uint8_t *slot, int position,
                                int rows) {
    const int i8 = me.lane % 8, m = me.lane / 8;
    const float slope = tkvcu_slope(j);
    float most[NT][2];
    int c, nt, i;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) s[nt][0] = s[nt][1] = s[nt][2] = s[nt][3] = 0.0f;
    TKVCU_UNROLL
    for (c = 0; c < D / 16; c++) {
        uint32_t a[4];
        tkvcu_ldmatrix_x4(a, tkvcu_chunk<D>(slot, i8 + m % 2 * 8, 2 * c + m / 2));
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            const tkvcu_words x = b.q[c][nt][me.lane];
            const uint32_t q[2] = {x.x, x.y};
            if (b.side[0].bf16) {
                const tkvcu_words y = b.q_low[c][nt][me.lane];
                const uint32_t low[2] = {y.x, y.y};
                tkvcu_mma_bf16(s[nt], a, q);
                tkvcu_mma_bf16(s[nt], a, low);
            } else {
                tkvcu_mma_f16(s[nt], a, q);
            }
        }
    }
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        most[nt][0] = most[nt][1] = TKVCU_NOTHING;
        TKVCU_UNROLL
        for (i = 0; i < 4; i++) {
            const int row = me.g + i / 2 * 8,
                      query = tkvcu_position_of_query(j, b.task, 8 * nt + 2 * me.t + i % 2);
            const float x = j.softcap > 0.0f ? tkvcu_capped(j, s[nt][i]) : s[nt][i];
            s[nt][i] = row < rows && tkvcu_sees(j, query, position + row) ? x * slope : TKVCU_NOTHING;
            most[nt][i % 2] = fmaxf(most[nt][i % 2], s[nt][i]);
        }
    }
    tkvcu_follow(u, most);
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 4; i++) {
        s[nt][i] = tkvcu_ex2(s[nt][i] + (TKVCU_LIFT - u.soft.m[nt][i % 2]));
        u.soft.l[nt][i % 2] += s[nt][i];
    }
}

/* Weights of 16 tokens as the second operand. */
template <int NT>
TKVCU_DEVICE void tkvcu_turn_exact(const uint32_t w[NT][2], uint8_t *memory, uint32_t b[NT][2], int g, int t,
                                   int lane) {
    uint32_t r[4];
    int nt;
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        *(uint32_t *)(void *)(memory + 1024 * nt + 16 * g + 4 * t) = w[nt][0];
        *(uint32_t *)(void *)(memory + 1024 * nt + 16 * (g + 8) + 4 * t) = w[nt][1];
    }
    __syncwarp();
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        tkvcu_ldmatrix_x4_trans(r, memory + 1024 * nt + 16 * (lane % 16));
        b[nt][0] = r[0];
        b[nt][1] = r[1];
    }
}

template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_exact_v(const tkvcu_block<D, NT> &b, const tkvcu_lane &me, tkvcu_sums<D, NT, VG> &u,
                                const float s[NT][4], const uint8_t *slot) {
    const int i8 = me.lane % 8, m = me.lane / 8, bf16 = b.side[1].bf16;
    uint32_t w[NT][2], p[NT][2], low[NT][2];
    int c, nt;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) {
        w[nt][0] = bf16 ? tkvcu_bf16x2(s[nt][0], s[nt][1]) : tkvcu_f16x2(s[nt][0], s[nt][1]);
        w[nt][1] = bf16 ? tkvcu_bf16x2(s[nt][2], s[nt][3]) : tkvcu_f16x2(s[nt][2], s[nt][3]);
    }
    tkvcu_turn_exact<NT>(w, me.p, p, me.g, me.t, me.lane);
    if (bf16) {
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            w[nt][0] = tkvcu_bf16x2(s[nt][0] - tkvcu_bf16_lo(w[nt][0]), s[nt][1] - tkvcu_bf16_hi(w[nt][0]));
            w[nt][1] = tkvcu_bf16x2(s[nt][2] - tkvcu_bf16_lo(w[nt][1]), s[nt][3] - tkvcu_bf16_hi(w[nt][1]));
        }
        tkvcu_turn_exact<NT>(w, me.p, low, me.g, me.t, me.lane);
    }
    TKVCU_UNROLL
    for (c = 0; c < D / 16; c++) {
        uint32_t a[4];
        tkvcu_ldmatrix_x4_trans(a, tkvcu_chunk<D>(slot, i8 + m / 2 * 8, 2 * c + m % 2));
        TKVCU_UNROLL
        for (nt = 0; nt < NT; nt++) {
            if (bf16) {
                tkvcu_mma_bf16(u.o[c][nt], a, p[nt]);
                tkvcu_mma_bf16(u.o[c][nt], a, low[nt]);
            } else {
                tkvcu_mma_f16(u.o[c][nt], a, p[nt]);
            }
        }
    }
}

/* >>runs: units of one region and one version, so that all is read in one way */
/* The queries as second operands: channels in the run's order, four of a tile to a lane (unpack.h), or as they come
 * for exact rows. */
template <int D, int NT> TKVCU_DEVICE void tkvcu_prepare(const tkvcu_job &j, tkvcu_block<D, NT> &b) {
    const tkvcu_side &side = b.side[0];
    const tkvcu_task &k = b.task;
    const int tid = (int)threadIdx.x, exact = side.kind == TKVCU_EXACT;
    const uint8_t *order = side.table >= 0 && !exact ? j.view.order + side.table : NULL;
    const float sign = j.scale < 0.0f ? -1.0f : 1.0f;
    int i, c, r;
    for (i = tid; i < D / 16 * NT * 32; i += TKVCU_THREADS) {
        const int lane = i % 32, nt = i / 32 % NT, slab = i / 32 / NT, column = k.column + 8 * nt + lane / 4;
        const int t = lane % 4;
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (column < k.columns) {
            const size_t row = (size_t)k.entry * (size_t)j.n_queries + (size_t)(column / k.group);
            const size_t head = (size_t)(k.head * k.group + column % k.group);
            const size_t at = (row * (size_t)j.view.n_heads + head) * D;
            TKVCU_UNROLL
            for (r = 0; r < 4; r++) {
                const int place = exact ? 16 * slab + 2 * t + r % 2 + r / 2 * 8 : 16 * slab + 4 * t + r;
                x[r] = sign * tkvcu_element(j.q, j.type, at + (size_t)(order ? order[place] : place));
            }
        }
        if (exact && side.bf16) {
            const uint32_t lo = tkvcu_bf16x2(x[0], x[1]), hi = tkvcu_bf16x2(x[2], x[3]);
            b.q[slab][nt][lane].x = lo;
            b.q[slab][nt][lane].y = hi;
            b.q_low[slab][nt][lane].x = tkvcu_bf16x2(x[0] - tkvcu_bf16_lo(lo), x[1] - tkvcu_bf16_hi(lo));
            b.q_low[slab][nt][lane].y = tkvcu_bf16x2(x[2] - tkvcu_bf16_lo(hi), x[3] - tkvcu_bf16_hi(hi));
        } else if (exact) {
            b.q[slab][nt][lane].x = tkvcu_halves(x[0], x[1]);
            b.q[slab][nt][lane].y = tkvcu_halves(x[2], x[3]);
        } else {
            b.q[slab][nt][lane].x = tkvcu_halves(x[0], x[2]);
            b.q[slab][nt][lane].y = tkvcu_halves(x[1], x[3]);
        }
    }
    for (i = tid; i < 256; i += TKVCU_THREADS) {
        if (side.kind == TKVCU_A)
            b.k_log[i] = (uint16_t)tkvcu_halves(tkvcu_log_value((uint32_t)i, side.top, b.mantissa), 0.0f);
        if (b.side[1].kind == TKVCU_R) b.v_log[i] = tkvcu_log_value((uint32_t)i, b.side[1].top, b.mantissa);
    }
    for (i = tid; i < D / 4 && side.kind == TKVCU_A; i += TKVCU_THREADS) {
        const int width = tkvcu_width_of(side, i / 4);
        const float unit = width == 6 ? 0.25f : 0.125f, middle = 0.5f * (float)((1 << width) - 1);
        b.fine[i].x = width ? tkvcu_f16x2(unit, unit) : 0;
        b.fine[i].y = tkvcu_f16x2(-1152.0f * unit - middle, -1152.0f * unit - middle);
    }
    for (i = tid / 32; i < 8 * NT; i += TKVCU_WARPS) { /* a warp a column */
        float sum = 0.0f;
        if (order && k.column + i < k.columns) {
            const int column = k.column + i;
            const size_t row = (size_t)k.entry * (size_t)j.n_queries + (size_t)(column / k.group);
            const size_t head = (size_t)(k.head * k.group + column % k.group);
            const size_t at = (row * (size_t)j.view.n_heads + head) * D;
            for (c = tid % 32; c < D; c += 32)
                sum += tkvcu_element(j.q, j.type, at + order[c]) * j.view.mean[side.table + c];
        }
        TKVCU_UNROLL
        for (c = 16; c > 0; c /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, c);
        if (tid % 32 == 0) b.mean[i] = sign * sum;
    }
}

/* Rows of the task's region that are there, from 16 exact ones' first on. */
TKVCU_DEVICE int tkvcu_rows_from(const tkvcu_job &j, const tkvcu_task &k, int unit) {
    const int sinks = tkvi_min(j.view.sinks, k.reach.len);
    return (k.region == TKVCU_SINKS ? sinks : k.reach.len - j.view.sinks) - 16 * unit;
}

typedef struct tkvcu_ring { /* offsets of the slots that are filled and read next */
    int put, take;
} tkvcu_ring;

TKVCU_DEVICE int tkvcu_turned(int at, int slot_bytes) {
    return at == (TKVCU_SLOTS - 1) * slot_bytes ? 0 : at + slot_bytes;
}

/* K (which = 0) or V of unit number nth of the task's run begins to come into a slot. What lies beyond the run is an
 * empty group of copies, so that counting them goes on. */
template <int D, int EXACT>
TKVCU_DEVICE void tkvcu_ask(const tkvcu_job &j, const tkvcu_task &k, const tkvcu_lane &me, tkvcu_ring &ring,
                            int which, int nth) {
    if (nth < k.n) {
        const int there = k.place + nth, place = there < k.places ? there : there - k.places;
        uint8_t *slot = me.ring + ring.put;
        if (EXACT)
            tkvcu_load_rows<D>(slot, k.from[which] + (size_t)(place / 4) * k.block + place % 4 * (32 * D),
                               tkvcu_rows_from(j, k, k.first + nth), me.lane);
        else tkvcu_load(slot, k.from[which] + (size_t)place * k.block, k.bytes[which], me.lane);
    }
    ring.put = tkvcu_turned(ring.put, j.slot_bytes);
    tkvcu_cp_async_commit();
}

/* The oldest side that was asked for has come; K or V of unit nth is asked for. */
template <int D, int EXACT>
TKVCU_DEVICE const uint8_t *tkvcu_get(const tkvcu_job &j, const tkvcu_task &k, const tkvcu_lane &me,
                                      tkvcu_ring &ring, int which, int nth) {
    const uint8_t *slot = me.ring + ring.take;
    __syncwarp(); /* nobody reads the slot that is filled now */
    tkvcu_ask<D, EXACT>(j, k, me, ring, which, nth);
    ring.take = tkvcu_turned(ring.take, j.slot_bytes);
    tkvcu_cp_async_wait<TKVCU_SLOTS - 1>();
    __syncwarp();
    return slot;
}

/* The task's run; its sides are in b. */
template <int D, int NT, int VG, int EXACT>
TKVCU_DEVICE void tkvcu_run_units(const tkvcu_job &j, tkvcu_block<D, NT> &b, const tkvcu_lane &me,
                                  tkvcu_sums<D, NT, VG> &u) {
    const tkvcu_task &k = b.task;
    const int base = k.region == TKVCU_SINKS ? 0 : j.view.sinks;
    tkvcu_ring ring = {0, 0};
    int nth = me.warp;
    tkvcu_ask<D, EXACT>(j, k, me, ring, 0, nth);
    tkvcu_ask<D, EXACT>(j, k, me, ring, 1, nth);
    TKVCU_ROLL
    for (; nth < k.n; nth += TKVCU_WARPS) {
        const int unit = k.first + nth;
        const uint8_t *slot = tkvcu_get<D, EXACT>(j, k, me, ring, 0, nth + TKVCU_WARPS);
        float s[4][NT][4];
        if (EXACT) {
            tkvcu_exact_k(j, b, me, u, s[0], slot, base + 16 * unit, tkvcu_rows_from(j, k, unit));
            slot = tkvcu_get<D, EXACT>(j, k, me, ring, 1, nth + TKVCU_WARPS);
            tkvcu_exact_v(b, me, u, s[0], slot);
        } else {
            tkvcu_coded_k(j, b, me, u, s, slot, base + 64 * unit);
            slot = tkvcu_get<D, EXACT>(j, k, me, ring, 1, nth + TKVCU_WARPS);
            tkvcu_coded_v(b, me, u, s, slot);
        }
    }
    tkvcu_cp_async_wait<0>();
}

/* Blocks from `block` on, at most n, that have its version. */
template <int D, int NT>
TKVCU_DEVICE int tkvcu_same_version(const tkvcu_job &j, tkvcu_block<D, NT> &b, int block, int n) {
    const uint8_t *version =
        j.view.version + (size_t)b.task.reach.seq * (size_t)j.view.max_blocks + (size_t)block;
    int from, i;
    for (from = 0; from < n; from += TKVCU_THREADS) {
        i = from + (int)threadIdx.x;
        b.other[threadIdx.x] = i < n && version[i] != version[0];
        __syncthreads();
        for (i = 0; i < TKVCU_THREADS && from + i < n; i++)
            if (b.other[i]) return from + i;
        __syncthreads();
    }
    return n;
}

/* >>the end of a part: its warps' sums as one, into the workspace [slot][columns of the block][m, l, o ...] */
template <int D, int NT, int VG>
TKVCU_DEVICE void tkvcu_finish(const tkvcu_job &j, tkvcu_block<D, NT> &b, const tkvcu_lane &me,
                               tkvcu_sums<D, NT, VG> &u, uint8_t *rings, size_t ring_bytes) {
    const tkvcu_task &k = b.task;
    float *mine = (float *)(void *)me.ring;
    const int slot = (int)blockIdx.x + (k.entry * j.view.n_kv_heads + k.head) * TKVCU_PARTS + k.part;
    float *out = j.partial + ((size_t)slot * gridDim.y + blockIdx.y) * (size_t)(8 * NT * (D + 2));
    const int exact = k.part == 2;
    const float unit = exact ? 1.0f : tkvi_from_bits((uint32_t)(127 + u.top) << 23);
    int nt, i, c, w;
    TKVCU_UNROLL
    for (nt = 0; nt < NT; nt++) TKVCU_UNROLL
    for (i = 0; i < 2; i++) {
        float *column = mine + (8 * nt + 2 * me.t + i) * (D + 2);
        float l = u.soft.l[nt][i];
        TKVCU_UNROLL
        for (c = 4; c < 32; c *= 2) l += __shfl_xor_sync(0xffffffffu, l, c);
        TKVCU_UNROLL
        for (c = 0; c < VG; c++) TKVCU_UNROLL
        for (w = 4; w < 32; w *= 2) u.zero[c][nt][i] += __shfl_xor_sync(0xffffffffu, u.zero[c][nt][i], w);
        if (me.g == 0) {
            column[0] = u.soft.m[nt][i];
            column[1] = l;
        }
        TKVCU_UNROLL
        for (c = 0; c < D / 16; c++) {
            const float zero = u.zero[16 * c * VG / D][nt][i]; /* 0 where there are no zero points */
            const int at = 2 + 16 * c + (exact ? me.g : 2 * me.g);
            column[at] = u.o[c][nt][i] * unit + zero;
            column[at + (exact ? 8 : 1)] = u.o[c][nt][2 + i] * unit + zero;
        }
    }
    __syncthreads();
    for (i = (int)threadIdx.x; i < 8 * NT * (D + 1); i += TKVCU_THREADS) { /* l counts as an output */
        const int column = i / (D + 1), at = i % (D + 1);
        float m = TKVCU_NOTHING, sum = 0.0f;
        for (w = 0; w < TKVCU_WARPS; w++)
            m = fmaxf(m, ((const float *)(const void *)(rings + (size_t)w * ring_bytes))[column * (D + 2)]);
        for (w = 0; w < TKVCU_WARPS; w++) {
            const float *x = (const float *)(const void *)(rings + (size_t)w * ring_bytes) + column * (D + 2);
            sum += x[1 + at] * tkvcu_ex2(x[0] - m);
        }
        out[column * (D + 2) + 1 + at] = sum;
        if (at == 0) out[column * (D + 2)] = m;
    }
    __syncthreads();
}

/* The next part that the block has units of; left: 0 if there is none. By one thread. */
template <int D, int NT>
TKVCU_DEVICE void tkvcu_next_part(const tkvcu_job &j, tkvcu_block<D, NT> &b, const int *ends) {
    tkvcu_task k = b.task;
    int per;
    k.left = 0;
    if (k.unit < k.end) {
        while (ends[k.entry] <= k.unit) k.entry++;
        k.reach = tkvcu_reach_of(j, k.entry);
        per = tkvcu_units_of(k.reach);
        k.at = k.unit - (k.entry ? ends[k.entry - 1] : 0);
        k.head = k.at / per;
        k.at %= per;
        for (k.part = 0; k.at >= tkvcu_units_in(k.reach, k.part); k.part++)
            k.at -= tkvcu_units_in(k.reach, k.part);
        k.left = tkvcu_units_in(k.reach, k.part) - k.at;
        if (k.left > k.end - k.unit) k.left = k.end - k.unit;
        k.unit += k.left;
    }
    b.task = k;
}

/* The next run of the part, its sides and queries. By all threads. */
template <int D, int NT> TKVCU_DEVICE void tkvcu_next_run(const tkvcu_job &j, tkvcu_block<D, NT> &b) {
    const tkvcu_task &k = b.task;
    const tkvcu_list list = j.view.list[k.reach.seq];
    const int tid = (int)threadIdx.x, coded = list.archive + list.warm;
    int region, first, n = k.left, version = 0;
    if (k.part == 2) {
        region = k.at < k.reach.sinks ? TKVCU_SINKS : TKVCU_HOT;
        first = k.at;
        if (region == TKVCU_HOT) first += 4 * tkvi_max(k.reach.first, coded) - k.reach.sinks;
        else n = tkvi_min(n, k.reach.sinks - k.at);
    } else {
        region = k.part == 0 ? TKVCU_ARCHIVE : TKVCU_WARM;
        first = k.at + (k.part == 0 ? k.reach.first : tkvi_max(k.reach.first, list.archive));
        version = j.view.version[(size_t)k.reach.seq * (size_t)j.view.max_blocks + (size_t)first];
        n = tkvcu_same_version(j, b, first, n);
    }
    __syncthreads();
    if (tid < 2) {
        const size_t at = (size_t)(version * TKVCU_REGIONS + region) * (size_t)j.view.n_kv_heads;
        b.side[tid] = j.view.side[(at + (size_t)k.head) * 2 + (size_t)tid];
        b.task.from[tid] =
            j.view.bytes[region] + (size_t)k.reach.seq * j.view.stride[region] + b.side[tid].at;
        b.task.bytes[tid] = b.side[tid].bytes;
    }
    if (tid == 0) {
        const int per = region < TKVCU_SINKS ? 1 : 4; /* units of a block */
        b.task.block = j.view.block[region];
        b.task.places = per * j.view.ring[region];
        b.task.place = first % b.task.places;
        b.task.region = region;
        b.task.first = first;
        b.task.n = n;
        b.task.at += n;
        b.task.left -= n;
    }
    __syncthreads();
    tkvcu_prepare(j, b);
    __syncthreads();
}

/* Ends of the entries: a running sum of their units, 32 at a time, by one warp. */
TKVCU_DEVICE void tkvcu_find_ends(const tkvcu_job &j, int *ends, int lane) {
    int sum = 0, e, i;
    for (e = 0; e < j.n_entries; e += 32) {
        int n = 0;
        if (e + lane < j.n_entries) n = j.view.n_kv_heads * tkvcu_units_of(tkvcu_reach_of(j, e + lane));
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

/* Blocks of threads that a multiprocessor shall hold: as many as leave registers for all that is in use; shared memory
 * has room for 3 with head_dim 128 (tools/cuda_resources.py). */
#define TKVCU_RESIDENT(D, NT, VG) ((NT) == 2 ? 2 : 3)

template <int D, int NT, int VG>
__global__ void __launch_bounds__(TKVCU_THREADS, TKVCU_RESIDENT(D, NT, VG)) tkvcu_attend_kernel(tkvcu_job j) {
    TKVCU_SHARED(uint8_t, shared);
    tkvcu_block<D, NT> &b = *(tkvcu_block<D, NT> *)(void *)shared;
    int *ends = (int *)(void *)(shared + sizeof b); /* [n_entries] */
    const int tid = (int)threadIdx.x;
    const size_t ring_bytes = (size_t)(TKVCU_SLOTS * j.slot_bytes + j.meta_bytes + 1024 * NT);
    uint8_t *rings = shared + (sizeof b + sizeof(int) * (size_t)j.n_entries + 127) / 128 * 128;
    tkvcu_lane me;
    me.lane = tid % 32;
    me.warp = tid / 32;
    me.g = me.lane / 4;
    me.t = me.lane % 4;
    me.ring = rings + (size_t)me.warp * ring_bytes;
    me.meta = (tkvcu_scales *)(void *)(me.ring + TKVCU_SLOTS * j.slot_bytes);
    me.weights_meta = (float *)(void *)me.meta;
    me.p = me.ring + TKVCU_SLOTS * j.slot_bytes + j.meta_bytes;
    if (tid < 16) b.mantissa[tid] = tkvi_bits(tkvi_log_value(1 + tid, 16));
    if (me.warp == 0) tkvcu_find_ends(j, ends, me.lane);
    if (tid == 0) b.magic = TKVCU_MAGIC;
    __syncthreads();
    if (tid == 0) {
        const int total = ends[j.n_entries - 1];
        b.task.entry = 0;
        b.task.group = j.view.n_heads / j.view.n_kv_heads;
        b.task.columns = b.task.group * j.n_queries;
        b.task.column = 8 * NT * (int)blockIdx.y;
        b.task.unit = tkvcu_range(total, (int)gridDim.x, (int)blockIdx.x);
        b.task.end = tkvcu_range(total, (int)gridDim.x, (int)blockIdx.x + 1);
        tkvcu_next_part(j, b, ends);
    }
    __syncthreads();
    while (b.task.left > 0) {
        tkvcu_sums<D, NT, VG> u;
        tkvcu_begin(u);
        while (b.task.left > 0) {
            tkvcu_next_run(j, b);
            if (b.task.region >= TKVCU_SINKS) {
                tkvcu_run_units<D, NT, VG, 1>(j, b, me, u);
            } else {
                tkvcu_run_units<D, NT, VG, 0>(j, b, me, u);
            }
            __syncthreads();
        }
        tkvcu_finish(j, b, me, u, rings, ring_bytes);
        if (tid == 0) tkvcu_next_part(j, b, ends);
        __syncthreads();
    }
}

#endif /* TKVCU_ATTEND_H */
