/*
 * formats/kvquant.h - KVQUANT4, KVQUANT3, KVQUANT2: KVQuant (arXiv 2401.18079, section 3). The levels follow the
 * distribution of the data: a layer has one set for all keys and one for all values. A few outliers of each token
 * have slots of their own.
 *
 *     x^ = radius * level[code] + middle + outlier
 *
 * K has a static radius and middle for each channel, learned by formats/kvquant_tables.h. V has a radius and a
 * middle for each token, from its values without outliers.
 *
 * Keys are coded as they were before RoPE. The encoder inverts the rotation (core/rope.h; cfg.model.rope, the block's
 * start), and decoding applies it again, so all other code sees ordinary keys. A token has slots for a share of its
 * channels, rounded up: cfg.format.kvquant_outliers in thousandths, 10 by default. A slot holds an outlier: its
 * channel, and the difference to its dense value. Decoding reads all slots; free slots hold 0.
 *   K   outliers lie beyond the channel's range, at each end half of the share: the 0.5 % and 99.5 % percentiles by
 *       default. They have the code of the nearer end. If outliers outnumber the slots, the largest differences get
 *       the slots.
 *   V   the slots take the lowest and the highest values. The split between both ends is the one that leaves the
 *       smallest range. Outliers have the lower of the two middle codes.
 * The paper has one range of values for all heads of a token. Here a record is one head, so each head has its own
 * range and its own slots: 32 bits per token and head in fp16, and shorter indices.
 *
 * Options (cfg.format.kvquant):
 *   POST_ROPE   codes keys as given, after RoPE
 *   UNIFORM     has evenly spaced levels; UNIFORM_K, UNIFORM_V: of one side
 *   NORM        decodes to levels that keep the variance (Q-Norm, core/codebook.h)
 *   DENSE       has no slots, and ranges hold every value
 *
 * Bytes: | codes [64][row] | of K or V, below | channel u8, beyond 256 channels u16, outlier fp16 [64][slots] |
 *        K: | start of the block, int32 |      V: | radius fp16 [64] | middle fp16 [64] |
 * A row has the channels' codes, low bits first, and is padded to a whole byte.
 *
 * tkv_encode_block has no table of a layer. K then ends with | radius fp16 [dim] | middle fp16 [dim] |, from the
 * block's minimum and maximum, so there are no outliers. Levels are those of a normal distribution, or even ones
 * with UNIFORM. NORM does nothing. Attention decodes (TKVI_AS_DECODED, kernels/code_rows.inc).
 */
#ifndef TKVI_FORMATS_KVQUANT_H
#define TKVI_FORMATS_KVQUANT_H

#include "core/rope.h"
#include "core/codebook.h"
#include "core/format.h"

static const tkvi_word tkvi_words_kvquant[] = {{"post-rope", TKV_KVQUANT_POST_ROPE},
                                               {"uniform", TKV_KVQUANT_UNIFORM},
                                               {"norm", TKV_KVQUANT_NORM},
                                               {"dense", TKV_KVQUANT_DENSE},
                                               {"uniform-k", TKV_KVQUANT_UNIFORM_K},
                                               {"uniform-v", TKV_KVQUANT_UNIFORM_V},
                                               {NULL, 0}};

#define TKVI_KVQUANT_SLOTS 18 /* maximum: 3 % of 576 channels */

/* The state of a layer (formats/kvquant_tables.h). A head's state is the radii of its channels of K, then their
 * middles. */
typedef struct tkvi_kvquant {
    tkvi_book book[2][3]; /* by side and bits - 2 */
} tkvi_kvquant;

static int tkvi_kvquant_slots(int dim, const tkv_format_options *o) {
    if (o->kvquant & TKV_KVQUANT_DENSE) return 0;
    return tkvi_min((dim * o->kvquant_outliers + 999) / 1000, dim - 1);
}

static int tkvi_kvquant_is_uniform(const tkv_format_options *o, tkv_side side) {
    return o->kvquant &
           (TKV_KVQUANT_UNIFORM | (side == TKV_K ? TKV_KVQUANT_UNIFORM_K : TKV_KVQUANT_UNIFORM_V));
}

static int tkvi_kvquant_slot_bytes(const tkvi_side *s) { return s->dim > 256 ? 4 : 3; }

/* The channel of a slot. */
static int tkvi_kvquant_channel_at(const tkvi_side *s, const uint8_t *slot) {
    return s->dim > 256 ? tkvi_load16(slot) : slot[0];
}

static void tkvi_kvquant_layout(tkvi_side *s) {
    s->slots = (int8_t)tkvi_kvquant_slots(s->dim, s->options);
    s->code_bytes = (size_t)(TKVI_BLOCK * ((s->dim * s->format->bits + 7) / 8));
    s->meta_bytes = (size_t)(TKVI_BLOCK * tkvi_kvquant_slot_bytes(s) * s->slots +
                             (s->which == TKV_K ? 4 : TKVI_BLOCK * 4));
    if (s->which == TKV_K && !s->tabled) s->meta_bytes += (size_t)(4 * s->dim);
}

/* Places in the bytes of a side. */
typedef struct tkvi_kvquant_at {
    size_t row, slot, own; /* bytes of a token's codes; offsets of the slots and of the block's own ranges */
} tkvi_kvquant_at;

static tkvi_kvquant_at tkvi_kvquant_places(const tkvi_side *s) {
    tkvi_kvquant_at at;
    at.row = s->code_bytes / TKVI_BLOCK;
    at.slot = s->code_bytes + (s->which == TKV_K ? 4u : 4u * TKVI_BLOCK);
    at.own = at.slot + (size_t)(TKVI_BLOCK * tkvi_kvquant_slot_bytes(s) * s->slots);
    return at;
}

static const tkvi_book *tkvi_kvquant_book(const tkvi_side *s, tkvi_book *standard) {
    if (s->layer_state) return &((const tkvi_kvquant *)s->layer_state)->book[s->which][s->format->bits - 2];
    tkvi_book_standard(s->format->bits, tkvi_kvquant_is_uniform(s->options, s->which), standard);
    return standard;
}

static const float *tkvi_kvquant_decoded(const tkvi_side *s, const tkvi_book *book) {
    return s->options->kvquant & TKV_KVQUANT_NORM ? book->normed : book->level;
}

static float tkvi_f16_at(const uint8_t *p) { return tkvi_f16_to_f32(tkvi_load16(p)); }

/* The product is exact if radius is an fp16 value (11 bits). */
static float tkvi_kvquant_value(float level, float radius, float middle) {
    return tkvi_f32(tkvi_f32(radius * level) + middle);
}

/* >>encoding a token */
typedef struct tkvi_kvquant_coder {
    float border[15]; /* halfway between levels */
    const float *decoded;
    int n, bits;
} tkvi_kvquant_coder;

static void tkvi_kvquant_coder_init(tkvi_kvquant_coder *e, const tkvi_side *s, const tkvi_book *book) {
    int i;
    e->bits = s->format->bits;
    e->n = 1 << e->bits;
    e->decoded = tkvi_kvquant_decoded(s, book);
    for (i = 0; i < e->n - 1; i++) e->border[i] = tkvi_f32(book->level[i] + book->level[i + 1]) * 0.5f;
}

static int tkvi_kvquant_code(const tkvi_kvquant_coder *e, float y) { /* a tie takes the lower one */
    int code = 0, i;
    for (i = 0; i < e->n - 1; i++) code += y > e->border[i];
    return code;
}

static float tkvi_kvquant_place(float x, float radius, float middle) {
    return radius > 0.0f ? tkvi_f32(tkvi_f32(x - middle) / radius) : 0.0f;
}

static void tkvi_kvquant_slot(const tkvi_side *s, uint8_t *dst, int t, int slot, int c, float error) {
    /* one array of records: gcc 12 -O2 loses reads of two arrays that advance together from one pointer */
    const int bytes = tkvi_kvquant_slot_bytes(s);
    uint8_t *p = dst + tkvi_kvquant_places(s).slot + bytes * (t * s->slots + slot);
    if (bytes == 3) p[0] = (uint8_t)c;
    else tkvi_store16(p, (uint16_t)c);
    tkvi_store16(p + bytes - 2, tkvi_f32_to_f16(error + 0.0f));
}

/* >>K */
/* Writes the ranges of the block's channels at `own`, the end of its bytes. */
static void tkvi_kvquant_own(const tkvi_side *s, const float *x, size_t stride, int n, uint8_t *own) {
    float low[TKV_MAX_HEAD_DIM], high[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
    int t, c;
    TKVI_ASSERT(n > 0);
    for (t = 0; t < n; t++) {
        tkvi_take_token(s->rope, x + (size_t)t * stride, s->dim, (int64_t)s->start + t, y);
        for (c = 0; c < s->dim; c++) {
            if (t == 0 || y[c] < low[c]) low[c] = y[c];
            if (t == 0 || y[c] > high[c]) high[c] = y[c];
        }
    }
    for (c = 0; c < s->dim; c++) {
        tkvi_store16(own + 2 * c, tkvi_f32_to_f16(tkvi_f32(high[c] - low[c]) * 0.5f));
        tkvi_store16(own + 2 * (s->dim + c), tkvi_f32_to_f16(tkvi_f32(high[c] + low[c]) * 0.5f + 0.0f));
    }
}

/* Radius and middle of the channels, from the layer's table or the block. */
typedef struct tkvi_kvquant_ranges {
    const float *radius, *middle;
    float own[2][TKV_MAX_HEAD_DIM];
} tkvi_kvquant_ranges;

/* Returns 0 if the layer has no table. */
static int tkvi_kvquant_ranges_of(const tkvi_side *s, const uint8_t *src, tkvi_kvquant_ranges *r) {
    const uint8_t *own = src + tkvi_kvquant_places(s).own;
    int c;
    if (s->tabled && !s->head_state) return 0;
    r->radius = s->tabled ? (const float *)s->head_state : r->own[0];
    r->middle = s->tabled ? r->radius + s->dim : r->own[1];
    for (c = 0; c < s->dim && !s->tabled; c++) {
        r->own[0][c] = tkvi_f16_at(own + 2 * c);
        r->own[1][c] = tkvi_f16_at(own + 2 * (s->dim + c));
    }
    return 1;
}

static void tkvi_kvquant_k_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride,
                                  int n, uint8_t *dst) {
    tkvi_kvquant_ranges r;
    tkvi_kvquant_coder e;
    tkvi_book standard;
    int t, c, i;
    (void)ops;
    memset(dst, 0, s->bytes);
    tkvi_store32(dst + s->code_bytes, (uint32_t)s->start);
    if (!s->tabled) tkvi_kvquant_own(s, x, stride, n, dst + tkvi_kvquant_places(s).own);
    if (!tkvi_kvquant_ranges_of(s, dst, &r)) return;
    tkvi_kvquant_coder_init(&e, s, tkvi_kvquant_book(s, &standard));
    for (t = 0; t < n; t++) {
        uint8_t *row = dst + (size_t)t * tkvi_kvquant_places(s).row;
        float y[TKV_MAX_HEAD_DIM], most[TKVI_KVQUANT_SLOTS] = {0.0f}, error[TKVI_KVQUANT_SLOTS] = {0.0f};
        int at[TKVI_KVQUANT_SLOTS] = {0};
        tkvi_take_token(s->rope, x + (size_t)t * stride, s->dim, (int64_t)s->start + t, y);
        for (c = 0; c < s->dim; c++) {
            float place = tkvi_kvquant_place(y[c], r.radius[c], r.middle[c]), size;
            int code = tkvi_kvquant_code(&e, place), slot;
            tkvi_put_code(row, e.bits, c, code);
            if (place >= -1.0f && place <= 1.0f && r.radius[c] > 0.0f) continue;
            y[c] = tkvi_f32(y[c] - tkvi_kvquant_value(e.decoded[code], r.radius[c], r.middle[c]));
            size = y[c] < 0.0f ? -y[c] : y[c];
            for (slot = s->slots; slot > 0 && size > most[slot - 1]; slot--) continue;
            for (i = s->slots - 1; i >= slot; i--) { /* sorted: largest first, equals by channel */
                most[i] = i > slot ? most[i - 1] : size;
                error[i] = i > slot ? error[i - 1] : y[c];
                at[i] = i > slot ? at[i - 1] : c;
            }
        }
        for (i = 0; i < s->slots; i++) tkvi_kvquant_slot(s, dst, t, i, at[i], error[i]);
    }
}

/* >>V */
typedef struct tkvi_kvquant_token {
    float radius, middle; /* fp16 values */
    int out[TKVI_KVQUANT_SLOTS];
} tkvi_kvquant_token;

/* Finds the slots + 1 lowest and the slots + 1 highest values of a token. One order is the reverse of the other,
 * so no value counts at both ends. */
static void tkvi_kvquant_ends(const float *x, int dim, int slots, int *low, int *high) {
    int c, i, n;
    TKVI_ASSERT(slots < dim && slots <= TKVI_KVQUANT_SLOTS);
    for (c = 0; c < dim; c++) {
        n = tkvi_min(c, slots + 1);
        for (i = n; i > 0 && x[c] < x[low[i - 1]]; i--)
            if (i <= slots) low[i] = low[i - 1];
        if (i <= slots) low[i] = c;
        for (i = n; i > 0 && x[c] >= x[high[i - 1]]; i--)
            if (i <= slots) high[i] = high[i - 1];
        if (i <= slots) high[i] = c;
    }
}

/* Chooses the values of a token that take slots, and the range of the others. */
static void tkvi_kvquant_token_of(const float *x, int dim, int slots, tkvi_kvquant_token *k) {
    int low[TKVI_KVQUANT_SLOTS + 1], high[TKVI_KVQUANT_SLOTS + 1], i, best = 0;
    tkvi_kvquant_ends(x, dim, slots, low, high);
    for (i = 1; i <= slots; i++)
        if (tkvi_f32(x[high[slots - i]] - x[low[i]]) < tkvi_f32(x[high[slots - best]] - x[low[best]]))
            best = i;
    for (i = 0; i < slots; i++) k->out[i] = i < best ? low[i] : high[i - best];
    k->radius = tkvi_f32(x[high[slots - best]] - x[low[best]]) * 0.5f;
    k->middle = tkvi_f32(x[high[slots - best]] + x[low[best]]) * 0.5f + 0.0f;
    k->radius = tkvi_f16_to_f32(tkvi_f32_to_f16(k->radius));
    k->middle = tkvi_f16_to_f32(tkvi_f32_to_f16(k->middle));
}

static void tkvi_kvquant_v_encode(const tkvi_side *s, const tkvi_simd_ops *ops, const float *x, size_t stride,
                                  int n, uint8_t *dst) {
    tkvi_kvquant_coder e;
    tkvi_book standard;
    int t, c, i;
    (void)ops;
    memset(dst, 0, s->bytes);
    tkvi_kvquant_coder_init(&e, s, tkvi_kvquant_book(s, &standard));
    for (t = 0; t < n; t++) {
        uint8_t *row = dst + (size_t)t * tkvi_kvquant_places(s).row, *meta = dst + s->code_bytes + 2 * t;
        int half = e.n / 2 - 1;
        float y[TKV_MAX_HEAD_DIM];
        uint8_t code[TKV_MAX_HEAD_DIM];
        tkvi_kvquant_token k;
        tkvi_take_token(NULL, x + (size_t)t * stride, s->dim, 0, y);
        tkvi_kvquant_token_of(y, s->dim, s->slots, &k);
        tkvi_store16(meta, tkvi_f32_to_f16(k.radius));
        tkvi_store16(meta + 2 * TKVI_BLOCK, tkvi_f32_to_f16(k.middle));
        for (c = 0; c < s->dim; c++)
            code[c] = (uint8_t)tkvi_kvquant_code(&e, tkvi_kvquant_place(y[c], k.radius, k.middle));
        for (i = 0; i < s->slots; i++) {
            float dense = tkvi_kvquant_value(e.decoded[half], k.radius, k.middle);
            code[k.out[i]] = (uint8_t)half;
            tkvi_kvquant_slot(s, dst, t, i, k.out[i], tkvi_f32(y[k.out[i]] - dense));
        }
        for (c = 0; c < s->dim; c++) tkvi_put_code(row, e.bits, c, code[c]);
    }
}

static void tkvi_kvquant_clear(const tkvi_side *s, uint64_t dead_mask, uint8_t *bytes) {
    const tkvi_kvquant_at at = tkvi_kvquant_places(s);
    tkvi_clear_rows(bytes, at.row, dead_mask);
    tkvi_clear_rows(bytes + at.slot, (size_t)(tkvi_kvquant_slot_bytes(s) * s->slots), dead_mask);
    if (s->which == TKV_K) return;
    tkvi_clear_rows(bytes + s->code_bytes, 2, dead_mask);
    tkvi_clear_rows(bytes + s->code_bytes + 2 * TKVI_BLOCK, 2, dead_mask);
}

/* >>decoding */
/* Decodes the dense values of a row. step 0: one range for all. */
static void tkvi_kvquant_dense(const uint8_t *row, int bits, int dim, const float *level, const float *radius,
                               const float *middle, int step, float *y) {
    int c;
    for (c = 0; c < dim; c++)
        y[c] = tkvi_kvquant_value(level[tkvi_get_code(row, bits, c)], radius[c * step], middle[c * step]);
}

/* A separate loop: y is already rounded and stored, so no compiler merges this sum with the earlier one. */
static void tkvi_kvquant_outliers(const tkvi_side *s, const uint8_t *src, int t, float *y) {
    const int bytes = tkvi_kvquant_slot_bytes(s);
    const uint8_t *p = src + tkvi_kvquant_places(s).slot + bytes * t * s->slots;
    int i;
    for (i = 0; i < s->slots; i++, p += bytes) {
        const int c = tkvi_kvquant_channel_at(s, p);
        if (c < s->dim) y[c] = tkvi_f32(y[c] + tkvi_f16_at(p + bytes - 2));
    }
}

static void tkvi_kvquant_k_decode(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first,
                                  int n, float *x, size_t stride) {
    size_t row = tkvi_kvquant_places(s).row;
    uint32_t stored = tkvi_load32(src + s->code_bytes);
    int64_t start = stored < 0x80000000u ? (int64_t)stored : (int64_t)stored - ((int64_t)1 << 32);
    tkvi_kvquant_ranges r;
    tkvi_book standard;
    const float *level = tkvi_kvquant_decoded(s, tkvi_kvquant_book(s, &standard));
    int t, known = tkvi_kvquant_ranges_of(s, src, &r);
    if (tkvi_decode_rows(s, ops, src, first, n, x, stride)) return;
    for (t = first; t < first + n; t++, x += stride) {
        if (!known) {
            memset(x, 0, (size_t)s->dim * sizeof *x);
            continue;
        }
        tkvi_kvquant_dense(src + (size_t)t * row, s->format->bits, s->dim, level, r.radius, r.middle, 1, x);
        tkvi_kvquant_outliers(s, src, t, x);
        if (s->rope) tkvi_rope_rotate(s->rope, start + t, 0, x);
    }
}

static void tkvi_kvquant_v_decode(const tkvi_side *s, const tkvi_simd_ops *ops, const uint8_t *src, int first,
                                  int n, float *x, size_t stride) {
    size_t row = tkvi_kvquant_places(s).row;
    tkvi_book standard;
    const float *level = tkvi_kvquant_decoded(s, tkvi_kvquant_book(s, &standard));
    int t;
    if (tkvi_decode_rows(s, ops, src, first, n, x, stride)) return;
    for (t = first; t < first + n; t++, x += stride) {
        const uint8_t *meta = src + s->code_bytes + 2 * t;
        float radius = tkvi_f16_at(meta), middle = tkvi_f16_at(meta + 2 * TKVI_BLOCK);
        tkvi_kvquant_dense(src + (size_t)t * row, s->format->bits, s->dim, level, &radius, &middle, 0, x);
        tkvi_kvquant_outliers(s, src, t, x);
    }
}

#endif /* TKVI_FORMATS_KVQUANT_H */
