/*
 * formats/kvquant_tables.h - learns the tables of KVQUANT formats for a layer (KVQuant, arXiv 2401.18079, sections
 * 3.1 to 3.6). A table has the range of each channel of K, before RoPE, and levels of 2, 3 and 4 bits for K and for
 * V. The tokens are those of hot and warm blocks (learn/statistics.h), or the caller's samples.
 *
 *   1. Ranges of K: half of the share of outliers are the highest of n values of a channel, half the lowest. The next
 *      value at each side is the end of the range. TKV_KVQUANT_DENSE has no outliers. V has a range per token,
 *      as in the encoder.
 *   2. Values within a range are scaled to -1 .. 1 and counted in a histogram, one for K and one for V over all
 *      heads. A value's weight is radius^2 (equation 7: the error of the unscaled value counts), times the
 *      weight that the samples give it.
 *   3. core/codebook.h makes the levels from the histogram.
 *
 * The code passes over the tokens several times instead of storing them.
 */
#ifndef TKVI_FORMATS_KVQUANT_TABLES_H
#define TKVI_FORMATS_KVQUANT_TABLES_H

#include "core/checksum.h"
#include "formats/kvquant.h"

static size_t tkvi_kvquant_head_bytes(const tkv_format_options *o, const tkvi_geometry *g) {
    (void)o;
    return 2u * (size_t)g->head_dim * sizeof(float);
}

/* The ranges of a head's channels: radius [head_dim], middle [head_dim]. */
static float *tkvi_kvquant_range_of(const tkvi_family_state *state, int head) {
    return (float *)state->heads + (size_t)head * 2u * (size_t)state->geometry->head_dim;
}

static void tkvi_count_tokens(void *ctx, const float *x, const float *weight) {
    (void)x;
    (void)weight;
    ++*(int *)ctx;
}

/* >>ranges of K */
#define TKVI_TAIL_ROOM 4096 /* values per end that one pass holds, all its channels together */

/* The outermost values of some channels. */
typedef struct tkvi_tails {
    int first, channels;                             /* channels of this pass */
    int keep, n;                                     /* values to hold per end and channel; held so far */
    float low[TKVI_TAIL_ROOM], high[TKVI_TAIL_ROOM]; /* [channels][keep], the outermost first */
} tkvi_tails;

/* Inserts x into a sorted tail that holds `had` of at most `keep` values. sign: 1 for high ends, -1 for low
 * ends. */
static void tkvi_tail_insert(float *tail, int had, int keep, float x, float sign) {
    int i = had;
    if (had == keep && !(sign * x > sign * tail[keep - 1])) return;
    for (i = tkvi_min(had, keep - 1); i > 0 && sign * x > sign * tail[i - 1]; i--) tail[i] = tail[i - 1];
    tail[i] = x;
}

static void tkvi_tails_add(void *ctx, const float *x, const float *weight) {
    tkvi_tails *s = (tkvi_tails *)ctx;
    int c;
    (void)weight;
    for (c = 0; c < s->channels; c++) {
        tkvi_tail_insert(s->low + c * s->keep, s->n, s->keep, x[s->first + c], -1.0f);
        tkvi_tail_insert(s->high + c * s->keep, s->n, s->keep, x[s->first + c], 1.0f);
    }
    s->n = tkvi_min(s->n + 1, s->keep);
}

/* Learns radius and middle of each channel of a head from n tokens. A radius is an fp16 value, so its products with
 * levels are exact. */
static void tkvi_kvquant_learn_ranges(const tkvi_family_state *to, const tkvi_tokens *from, int head, int n) {
    const int dim = to->geometry->head_dim;
    float *radius = tkvi_kvquant_range_of(to, head), *middle = radius + dim;
    tkvi_tails s;
    int c;
    s.keep = to->options->kvquant & TKV_KVQUANT_DENSE ? 1 : n * to->options->kvquant_outliers / 2000 + 1;
    for (s.first = 0; s.first < dim; s.first += s.channels) {
        s.channels = tkvi_min(TKVI_TAIL_ROOM / s.keep, dim - s.first);
        s.n = 0;
        from->walk(from->from, TKV_K, head, tkvi_tails_add, &s);
        for (c = 0; c < s.channels; c++) {
            float low = s.low[c * s.keep + s.keep - 1], high = s.high[c * s.keep + s.keep - 1];
            uint16_t half = tkvi_f32_to_f16(tkvi_f32(high - low) * 0.5f);
            radius[s.first + c] = tkvi_f16_to_f32(half);
            middle[s.first + c] = tkvi_f32(high + low) * 0.5f;
        }
    }
}

/* >>levels */
typedef struct tkvi_kvquant_count {
    int dim, slots;
    const float *radius, *middle; /* of a head's K; not used for V */
    float by;                     /* factor from weights to integers; 0: this pass finds the largest weight */
    float most;                   /* the largest weight */
    int64_t count[TKVI_BOOK_BINS];
} tkvi_kvquant_count;

/* Counts one value that is within its range. */
static void tkvi_count_value(tkvi_kvquant_count *s, float x, float radius, float middle, float weight) {
    float y = tkvi_kvquant_place(x, radius, middle), w = tkvi_f32(tkvi_f32(radius * radius) * weight);
    if (!(radius > 0.0f) || y < -1.0f || y > 1.0f) return;
    if (s->by > 0.0f) s->count[tkvi_book_bin(y)] += (int64_t)tkvi_f32(w * s->by);
    else s->most = w > s->most ? w : s->most;
}

/* Returns the weight of channel c, at most 1e20: its product with the largest radius^2 is still finite. */
static float tkvi_weight_of(const float *weight, int c) {
    return weight ? tkvi_clampf(weight[c], 0.0f, 1e20f) : 1.0f;
}

static void tkvi_count_key(void *ctx, const float *x, const float *weight) {
    tkvi_kvquant_count *s = (tkvi_kvquant_count *)ctx;
    int c;
    for (c = 0; c < s->dim; c++)
        tkvi_count_value(s, x[c], s->radius[c], s->middle[c], tkvi_weight_of(weight, c));
}

/* Counts a token of V, without its outliers. */
static void tkvi_count_token(void *ctx, const float *x, const float *weight) {
    tkvi_kvquant_count *s = (tkvi_kvquant_count *)ctx;
    tkvi_kvquant_token k;
    int c, i, out;
    tkvi_kvquant_token_of(x, s->dim, s->slots, &k);
    for (c = 0; c < s->dim; c++) {
        for (i = 0, out = 0; i < s->slots; i++) out |= k.out[i] == c;
        if (!out) tkvi_count_value(s, x[c], k.radius, k.middle, tkvi_weight_of(weight, c));
    }
}

/* Learns the levels of one side. The first pass finds the largest weight, the second fills the histogram. */
static void tkvi_kvquant_learn_books(const tkvi_family_state *to, const tkvi_tokens *from, tkv_side side) {
    const tkvi_geometry *g = to->geometry;
    tkvi_book *book = ((tkvi_kvquant *)to->layer)->book[side];
    tkvi_kvquant_count s;
    int head, pass, bits;
    memset(&s, 0, sizeof s);
    s.dim = side == TKV_K ? g->head_dim : g->v_head_dim;
    s.slots = tkvi_kvquant_slots(s.dim, to->options);
    for (pass = 0; pass < 2; pass++) {
        for (head = 0; head < g->n_kv_heads; head++) {
            if (side == TKV_K) {
                s.radius = tkvi_kvquant_range_of(to, head);
                s.middle = s.radius + s.dim;
            }
            from->walk(from->from, side, head, side == TKV_K ? tkvi_count_key : tkvi_count_token, &s);
        }
        /* The largest weight becomes 2^20: a sum over 2^18 tokens of 2^24 channels stays below 2^63. */
        if (pass == 0) s.by = s.most > 0.0f ? tkvi_f32(1048576.0f / s.most) : 1.0f;
        if (!tkvi_is_finite(s.by)) s.by = 3e38f;
    }
    for (bits = 2; bits <= 4; bits++) {
        tkvi_book_make(s.count, bits, tkvi_kvquant_is_uniform(to->options, side), &book[bits - 2]);
    }
}

/* >>the table */
static void tkvi_kvquant_learn(const tkvi_family_state *to, const tkvi_tokens *from) {
    int head, n = 0;
    from->walk(from->from, TKV_K, 0, tkvi_count_tokens, &n);
    for (head = 0; head < to->geometry->n_kv_heads; head++) tkvi_kvquant_learn_ranges(to, from, head, n);
    tkvi_kvquant_learn_books(to, from, TKV_K);
    tkvi_kvquant_learn_books(to, from, TKV_V);
}

/* >>saved bytes
 *   u64 mode: hash of RoPE and of the options that change what is learned
 *   K, then V, for 2, 3 and 4 bits each: fp16 level [2^bits] | fp16 normed [2^bits]
 *   each head: fp16 radius [head_dim] | f32 middle [head_dim] */
#define TKVI_KVQUANT_BOOKS (2 * 2 * 28 * 2) /* bytes: sides, level and normed, 4 + 8 + 16, fp16 */

static size_t tkvi_kvquant_saved_bytes(const tkvi_geometry *g) {
    return 8u + TKVI_KVQUANT_BOOKS + 6u * (size_t)g->n_kv_heads * (size_t)g->head_dim;
}

static uint64_t tkvi_kvquant_mode(const tkvi_family_state *state) {
    const tkvi_rope *rope = state->rope;
    uint64_t h = TKVI_FNV1A_START;
    uint8_t b[8];
    int j, k;
    b[0] = (uint8_t)(state->options->kvquant & TKV_KVQUANT_DENSE);
    if (tkvi_kvquant_is_uniform(state->options, TKV_K)) b[0] = (uint8_t)(b[0] | TKV_KVQUANT_UNIFORM_K);
    if (tkvi_kvquant_is_uniform(state->options, TKV_V)) b[0] = (uint8_t)(b[0] | TKV_KVQUANT_UNIFORM_V);
    if (b[0] >= TKV_KVQUANT_UNIFORM_K + TKV_KVQUANT_UNIFORM_V) /* both: as calibrations have always said it */
        b[0] = (uint8_t)((b[0] & TKV_KVQUANT_DENSE) | TKV_KVQUANT_UNIFORM);
    b[1] = (uint8_t)(rope ? rope->pairs : 0);
    b[2] = (uint8_t)(rope ? rope->step : 0);
    h = tkvi_fnv1a_more(h, b, 3);
    for (j = 0; rope && j < rope->pairs; j++) {
        for (k = 0; k < 8; k++) b[k] = (uint8_t)(rope->frequency[j] >> 8 * k & 255u);
        h = tkvi_fnv1a_more(h, b, 8);
    }
    b[0] = (uint8_t)state->options->kvquant_outliers;
    return b[0] == 10
               ? h
               : tkvi_fnv1a_more(h, b, 1); /* 10: the share of calibrations before there was an option */
}

static void tkvi_kvquant_save(const tkvi_family_state *from, uint8_t *at) {
    const tkvi_kvquant *table = (const tkvi_kvquant *)from->layer;
    uint64_t mode = tkvi_kvquant_mode(from);
    int side, bits, i, head, dim = from->geometry->head_dim;
    tkvi_store32(at, (uint32_t)(mode & 0xffffffffu));
    tkvi_store32(at + 4, (uint32_t)(mode >> 32));
    at += 8;
    for (side = 0; side < 2; side++)
        for (bits = 2; bits <= 4; bits++) {
            const tkvi_book *b = &table->book[side][bits - 2];
            for (i = 0; i < 1 << bits; i++, at += 2) tkvi_store16(at, tkvi_f32_to_f16(b->level[i]));
            for (i = 0; i < 1 << bits; i++, at += 2) tkvi_store16(at, tkvi_f32_to_f16(b->normed[i]));
        }
    for (head = 0; head < from->geometry->n_kv_heads; head++) {
        const float *range = tkvi_kvquant_range_of(from, head);
        for (i = 0; i < dim; i++, at += 2) tkvi_store16(at, tkvi_f32_to_f16(range[i]));
        for (i = 0; i < dim; i++, at += 4) tkvi_store32(at, tkvi_bits(range[dim + i]));
    }
}

static void tkvi_kvquant_load(const tkvi_family_state *to, const uint8_t *at) {
    tkvi_kvquant *table = (tkvi_kvquant *)to->layer;
    int side, bits, i, head, dim = to->geometry->head_dim;
    at += 8;
    memset(table, 0, sizeof *table);
    for (side = 0; side < 2; side++)
        for (bits = 2; bits <= 4; bits++) {
            tkvi_book *b = &table->book[side][bits - 2];
            for (i = 0; i < 1 << bits; i++, at += 2) b->level[i] = tkvi_f16_at(at);
            for (i = 0; i < 1 << bits; i++, at += 2) b->normed[i] = tkvi_f16_at(at);
        }
    for (head = 0; head < to->geometry->n_kv_heads; head++) {
        float *range = tkvi_kvquant_range_of(to, head);
        for (i = 0; i < dim; i++, at += 2) range[i] = tkvi_f16_at(at);
        for (i = 0; i < dim; i++, at += 4) range[dim + i] = tkvi_from_bits(tkvi_load32(at));
    }
}

/* Returns whether saved bytes are valid: levels do not fall and lie within -1 .. 1, normed ones within -8 .. 8.
 * Radii are finite and not negative. Middles lie within +-2^17, a bound that learned middles keep. */
static int tkvi_kvquant_valid(const tkvi_geometry *g, const uint8_t *at) {
    int i, set, n;
    at += 8;
    for (set = 0; set < 12; set++) {
        float most = set % 2 ? 8.0f : 1.0f, before = -most;
        for (i = 0, n = 4 << set / 2 % 3; i < n; i++, at += 2) {
            float x = tkvi_f16_at(at);
            if (!tkvi_is_finite(x) || x < before || x > most) return 0;
            before = x;
        }
    }
    for (set = 0; set < g->n_kv_heads; set++) {
        for (i = 0; i < g->head_dim; i++, at += 2) /* not negative, not infinite */
            if (tkvi_load16(at) >= 0x7c00u) return 0;
        for (i = 0; i < g->head_dim; i++, at += 4) {
            float x = tkvi_from_bits(tkvi_load32(at));
            if (!tkvi_is_finite(x) || x < -131072.0f || x > 131072.0f) return 0;
        }
    }
    return 1;
}

static const char *tkvi_kvquant_find_fault(const tkvi_family_state *to, const uint8_t *at, int used) {
    if (!tkvi_kvquant_valid(to->geometry, at)) return "the calibration has invalid ranges or levels";
    if (used && (tkvi_load32(at) | (uint64_t)tkvi_load32(at + 4) << 32) != tkvi_kvquant_mode(to))
        return "the calibration was made with another cfg.model.rope, cfg.format.kvquant or kvquant_outliers";
    return NULL;
}

static int tkvi_kvquant_undoes_rope(const tkv_format_options *o) {
    return !(o->kvquant & TKV_KVQUANT_POST_ROPE);
}

static const tkvi_family tkvi_kvquant_family = {
    TKVI_HAS_KVQUANT ? NULL : "TKV_NO_KVQUANT leaves this format out",
    NULL,
    TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_undoes_rope),
    "KVQUANT undoes RoPE before it codes keys: set model.rope, or set format.kvquant to "
    "TKV_KVQUANT_POST_ROPE to code keys as appended",
    2,
    sizeof(tkvi_kvquant),
    TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_head_bytes),
    NULL,
    TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_learn),
    tkvi_kvquant_saved_bytes,
    TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_save),
    TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_load),
    TKVI_IF(TKVI_HAS_KVQUANT, tkvi_kvquant_find_fault)};

#endif /* TKVI_FORMATS_KVQUANT_TABLES_H */
