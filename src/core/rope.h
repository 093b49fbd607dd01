/*
 * core/rope.h - RoPE, the rotation that a model applies to its keys (arXiv 2104.09864, section 3.2), and its
 * inverse. Formats that code keys before RoPE use it.
 *
 * Pair j of a head's channels turns by frequency[j] radians with each position:
 *
 *     a' = a cos - b sin     b' = b cos + a sin        frequency[j] = scale * base^(-2j / dim), or as given
 *
 * Everything up to the cosine is integer arithmetic. So every machine gets the same bits under any flags, and the
 * angle at position one million is as precise as the first:
 *
 *     frequencies  integers; 2^64 is a full turn, so sums wrap where a turn is full. They need neither pow nor libm:
 *                  the integer root of 1 / base is found bit by bit.
 *     angles       multiples of a frequency; the upper 32 bits are used
 *     sine, cosine Taylor series in 31 bits about the nearest quarter turn (error 2e-9)
 *
 * Products and their sums are computed in different functions, so that no compiler fuses them.
 */
#ifndef TKVI_CORE_ROPE_H
#define TKVI_CORE_ROPE_H

#include "core/base.h"

/* >>frequencies: angle per position, where 2^64 is a full turn */
/* The upper 64 bits of a product. */
static uint64_t tkvi_mul_high(uint64_t a, uint64_t b) {
    uint64_t al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32;
    uint64_t low = al * bl, m1 = ah * bl + (low >> 32), m2 = al * bh + (m1 & 0xffffffffu);
    return ah * bh + (m1 >> 32) + (m2 >> 32);
}

/* Product of two fractions; 2^63 stands for 1. */
static uint64_t tkvi_mul63(uint64_t a, uint64_t b) { return tkvi_mul_high(a, b) << 1; }

static uint64_t tkvi_power63(uint64_t a, int n) {
    uint64_t p = (uint64_t)1 << 63;
    for (; n > 0; n >>= 1) {
        if (n & 1) p = tkvi_mul63(p, a);
        a = tkvi_mul63(a, a);
    }
    return p;
}

/* Converts radians, 0 to 4, to turns: multiplies by 2^64 / 2 pi. */
static uint64_t tkvi_radians_to_turns(float radians) {
    uint32_t bits = tkvi_bits(radians), exponent = bits >> 23 & 255u, shift = 150u - exponent;
    uint64_t m = (bits & 0x7fffffu) | 0x800000u; /* radians = m / 2^shift */
    uint64_t high = 0x28be60dbu * m, low = 0x9391054au * m;
    if (exponent == 0 || shift >= 88u) return 0;
    return shift < 32u ? (high << (32u - shift)) + (low >> shift) : (high + (low >> 32)) >> (shift - 32u);
}

/* base^(-1 / pairs), where 2^63 stands for 1: the largest number whose power `pairs` does not exceed 1 / base. */
static uint64_t tkvi_rope_ratio(float base, int pairs) {
    uint32_t bits = tkvi_bits(base), m = (bits & 0x7fffffu) | 0x800000u;
    int shift = 150 - (int)(bits >> 23), bit; /* base = m / 2^shift */
    uint64_t one = (uint64_t)1 << 63, q = one / m, more = (one % m << 39) / m, inverse, r = 0;
    inverse = shift >= 0 ? (q << shift) + (more >> (39 - shift)) : q >> -shift;
    for (bit = 62; bit >= 0; bit--)
        if (tkvi_power63(r | (uint64_t)1 << bit, pairs) <= inverse) r |= (uint64_t)1 << bit;
    return r;
}

/* Checks a descriptor. Returns the rule that it breaks, with field and value, or NULL if it is valid. */
static const char *tkvi_rope_fault(const tkv_rope *r, int head_dim, const char **field, double *value) {
    int j;
    *field = "rope.dim";
    *value = (double)r->dim;
    if (r->dim != TKV_OFF && (r->dim < 0 || r->dim > head_dim || r->dim % 2))
        return "it must be even, 2 to head_dim, TKV_OFF, or 0 for none";
    if (r->dim > 512 || (r->dim == 512 && head_dim > 512)) /* a pair has a byte (tkvi_turned_rows) */
        return "it must be at most 510, or 512 with head_dim 512";
    *field = "rope.first";
    *value = (double)r->first;
    if (r->first < 0 || r->first > head_dim - (r->dim > 0 ? r->dim : 0))
        return "it must be 0 to head_dim - rope.dim";
    *field = "rope.kind";
    *value = (double)(int)r->kind;
    if ((unsigned)r->kind >= TKV_ROPE_COUNT) return "it must be a tkv_rope_kind";
    *field = "rope.interleaved";
    *value = (double)r->interleaved;
    if (r->interleaved & ~1) return "it must be 0 or 1";
    *field = "rope.scale";
    *value = (double)r->scale;
    if (!tkvi_is_finite(r->scale) || r->scale < 0.0f || r->scale > 4.0f)
        return "it must be more than 0 and at most 4, or 0 for 1";
    *field = "rope.base";
    *value = (double)r->base;
    if (!tkvi_is_finite(r->base) || (r->base != 0.0f && !(r->base >= 2.0f && r->base <= 1e9f)))
        return "it must be 2 to 1e9, or 0 for 10000";
    *field = "rope.frequencies";
    for (j = 0; r->frequencies && j < r->dim / 2; j++) {
        *value = (double)r->frequencies[j];
        if (!tkvi_is_finite(r->frequencies[j]) || *value < 0.0 || *value > 1.0)
            return "each must be 0 to 1, in radians";
    }
    return NULL;
}

static const char *tkvi_rope_has_fault(const tkv_rope *r, int head_dim) {
    const char *field;
    double value;
    return tkvi_rope_fault(r, head_dim, &field, &value);
}

/* Positions 0 .. 16 have tables of sines and cosines. */
#define TKVI_ROPE_NEAR 16

typedef struct tkvi_rope {
    int pairs, apart, step; /* pair j is channels first + j * step and first + j * step + apart */
    int first;
    int row;             /* pairs, rounded up to 16: floats for a cosine or a sine of each pair */
    int lanes;           /* the same with a lane for channels without a pair, if there are any (tkvi_turn) */
    uint64_t *frequency; /* [pairs] */
    /* [17][row] by position 0 .. 16, for kernels of formats that undo RoPE: tkvi_cos_sin would take longer than the
     * rest of their work. NULL: there are no such formats. */
    float *cosine, *sine;
} tkvi_rope;

static void tkvi_cos_sin(uint64_t angle, float *cosine, float *sine);

/* 1 if the frequencies of the pairs are known, and there are pairs. */
static int tkvi_rope_is_known(const tkv_rope *r) { return r->kind == TKV_ROPE_FIXED && r->dim > 0; }

static float tkvi_rope_scale(const tkv_rope *r) { return r->scale > 0.0f ? r->scale : 1.0f; }
static float tkvi_rope_base(const tkv_rope *r) { return r->base > 0.0f ? r->base : 10000.0f; }

/* 1 if two descriptors that are known have the same frequencies and pairs. */
static int tkvi_is_same_rope(const tkv_rope *a, const tkv_rope *b) {
    if (a == b) return 1;
    if (a->dim != b->dim || a->first != b->first || a->interleaved != b->interleaved) return 0;
    if (!a->frequencies != !b->frequencies) return 0;
    if (tkvi_bits(tkvi_rope_scale(a)) != tkvi_bits(tkvi_rope_scale(b))) return 0;
    if (a->frequencies)
        return memcmp(a->frequencies, b->frequencies, (size_t)(a->dim / 2) * sizeof(float)) == 0;
    return tkvi_bits(tkvi_rope_base(a)) == tkvi_bits(tkvi_rope_base(b));
}

/* Bytes of the arrays of a rope. with_rows: 1 with cosine and sine. */
static size_t tkvi_rope_bytes(const tkv_rope *r, int with_rows) {
    const size_t pairs = (size_t)r->dim / 2, row = (pairs + 15u) / 16u * 16u;
    return tkvi_align_up(pairs * sizeof(uint64_t)) +
           (with_rows ? 2u * (TKVI_ROPE_NEAR + 1) * row * sizeof(float) : 0u);
}

static int tkvi_rope_lanes(const tkv_rope *r, int head_dim) {
    return tkvi_round_up(r->dim / 2 + (tkvi_round_up(head_dim, 16) > r->dim), 16);
}

/* Makes the tables of a descriptor that passed tkvi_rope_fault and is known, in memory of tkvi_rope_bytes. */
static void tkvi_rope_make(tkvi_rope *rope, const tkv_rope *r, int head_dim, int with_rows, void *memory) {
    float scale = tkvi_rope_scale(r), base = tkvi_rope_base(r);
    uint64_t first = tkvi_radians_to_turns(scale), ratio, power;
    int j, i;
    memset(rope, 0, sizeof *rope);
    memset(memory, 0, tkvi_rope_bytes(r, with_rows));
    rope->pairs = r->dim / 2;
    TKVI_ASSERT(rope->pairs > 0);
    rope->first = r->first;
    rope->row = tkvi_round_up(rope->pairs, 16);
    rope->lanes = tkvi_rope_lanes(r, head_dim);
    rope->step = r->interleaved ? 2 : 1;
    rope->apart = r->interleaved ? 1 : rope->pairs;
    rope->frequency = (uint64_t *)memory;
    if (with_rows) {
        const size_t at = tkvi_align_up((size_t)rope->pairs * sizeof(uint64_t));
        rope->cosine = (float *)(void *)((uint8_t *)memory + at);
        rope->sine = rope->cosine + (TKVI_ROPE_NEAR + 1) * rope->row;
    }
    ratio = power = tkvi_rope_ratio(base, rope->pairs);
    for (j = 0; j < rope->pairs; j++) {
        rope->frequency[j] = j ? tkvi_mul63(first, power) : first;
        if (j) power = tkvi_mul63(power, ratio);
        if (r->frequencies) rope->frequency[j] = tkvi_radians_to_turns(tkvi_f32(r->frequencies[j] * scale));
        for (i = 0; i <= TKVI_ROPE_NEAR && with_rows; i++)
            tkvi_cos_sin((uint64_t)i * rope->frequency[j], &rope->cosine[i * rope->row + j],
                         &rope->sine[i * rope->row + j]);
    }
}

/* A rope with room for its frequencies. */
typedef struct tkvi_own_rope {
    tkvi_rope rope;
    uint64_t frequency[TKV_MAX_HEAD_DIM / 2 + 7]; /* + 7: rounded up to 64 bytes */
} tkvi_own_rope;

static const tkvi_rope *tkvi_own_rope_make(tkvi_own_rope *own, const tkv_rope *r) {
    tkvi_rope_make(&own->rope, r, TKV_MAX_HEAD_DIM, 0, own->frequency);
    return &own->rope;
}

/* >>rotation */
/* Cosine and sine of an angle; 2^64 is a full turn. */
static void tkvi_cos_sin(uint64_t angle, float *cosine, float *sine) {
    const uint32_t one = 0x80000000u;
    uint32_t p = (uint32_t)(angle >> 32), quarter = (p + 0x20000000u) >> 30, rest = p - (quarter << 30);
    uint32_t negative = rest >> 31, a = negative ? 0u - rest : rest; /* at most an eighth of a turn */
    uint64_t x = (uint64_t)a * 0x6487ed51u >> 29, z = x * x >> 31, t;
    int32_t c, s;
    t = one - z / 90u;
    t = one - (z * t >> 31) / 56u;
    t = one - (z * t >> 31) / 30u;
    t = one - (z * t >> 31) / 12u;
    c = (int32_t)((one - (z * t >> 31) / 2u) >> 1);
    t = one - z / 72u;
    t = one - (z * t >> 31) / 42u;
    t = one - (z * t >> 31) / 20u;
    t = one - (z * t >> 31) / 6u;
    s = (int32_t)((x * t >> 31) >> 1);
    if (negative) s = -s;
    if (quarter & 1u) { /* in the next quarter, cos is -sin and sin is cos */
        int32_t was = c;
        c = -s;
        s = was;
    }
    if (quarter & 2u) {
        c = -c;
        s = -s;
    }
    *cosine = (float)c * 9.3132257461547852e-10f; /* 2^-30 */
    *sine = (float)s * 9.3132257461547852e-10f;
}

/* The rotation by one number of positions, by pair. */
typedef struct tkvi_turn {
    float cosine[TKV_MAX_HEAD_DIM / 2 + 16], sine[TKV_MAX_HEAD_DIM / 2 + 16];
} tkvi_turn;

/* cosine, sine: [lanes]. back 1: the inverse rotation. Its bits are those of the rotation by -positions. */
static void tkvi_turn_make(const tkvi_rope *rope, int64_t positions, int back, float *cosine, float *sine) {
    const int is_inverse = (positions < 0) != back;
    const uint64_t distance = (uint64_t)(positions < 0 ? -positions : positions);
    int j;
    for (j = 0; j < rope->pairs; j++) {
        tkvi_cos_sin(distance * rope->frequency[j], &cosine[j], &sine[j]);
        if (is_inverse) sine[j] = -sine[j];
    }
    for (; j < rope->lanes; j++) {
        cosine[j] = 1.0f;
        sine[j] = 0.0f;
    }
}

static void tkvi_turn_apply(const tkvi_rope *rope, const float *cosine, const float *sine, float *x) {
    float a[TKV_MAX_HEAD_DIM / 2], b[TKV_MAX_HEAD_DIM / 2];
    float ac[TKV_MAX_HEAD_DIM / 2], bs[TKV_MAX_HEAD_DIM / 2];
    int j, n = rope->pairs;
    if (n < 1) return;
    x += rope->first;
    for (j = 0; j < n; j++) {
        a[j] = x[j * rope->step];
        b[j] = x[j * rope->step + rope->apart];
    }
    tkvi_multiply(ac, a, cosine, n);
    tkvi_multiply(bs, b, sine, n);
    for (j = 0; j < n; j++) x[j * rope->step] = tkvi_f32(ac[j] - bs[j]);
    tkvi_multiply(bs, b, cosine, n);
    tkvi_multiply(ac, a, sine, n);
    for (j = 0; j < n; j++) x[j * rope->step + rope->apart] = tkvi_f32(bs[j] + ac[j]);
}

/* Rotates the key of this position as the model does (back 0), or inverts that rotation (back 1). */
static void tkvi_rope_rotate(const tkvi_rope *rope, int64_t position, int back, float *x) {
    tkvi_turn turn;
    tkvi_turn_make(rope, position, back, turn.cosine, turn.sine);
    tkvi_turn_apply(rope, turn.cosine, turn.sine, x);
}

/* >>rows that are turned again and again, in any order of channels
 *
 *     out[i] = (plain[i] cosine[pair[i]] + partner[i] sine[pair[i]]) scale      channel i, its partner with the sign
 *
 * These are the numbers of tkvi_turn_apply, multiplied by scale, to the bit. The row behind n_rows is not scaled. */
typedef struct tkvi_turned_rows {
    const float *plain, *partner; /* [n_rows + 1][n] */
    const uint8_t *pair;          /* [n] */
    const float *cosine, *sine;   /* [lanes] */
    int lanes, n_rows, n;         /* n: a multiple of 16 */
    float scale;
    float *out;  /* [n_rows][n] */
    float *last; /* [n] of the row behind them */
} tkvi_turned_rows;

/* The channel that channel c of a rope is paired with, and its pair. *sign: of its sine. A channel without a pair has
 * the first lane behind the pairs, whose sine is 0. */
static int tkvi_partner_of(const tkvi_rope *rope, int c, int *pair, float *sign) {
    const int at = c - rope->first, is_second = rope->step == 2 ? at & 1 : at >= rope->apart;
    *pair = rope->pairs;
    *sign = 1.0f;
    if (at < 0 || at >= 2 * rope->pairs) return c;
    *pair = rope->step == 2 ? at / 2 : at - (is_second ? rope->apart : 0);
    *sign = is_second ? 1.0f : -1.0f;
    return is_second ? c - rope->apart : c + rope->apart;
}

static void tkvi_turn_rows_scalar(const tkvi_turned_rows *t) {
    float cosine[TKV_MAX_HEAD_DIM], sine[TKV_MAX_HEAD_DIM], x[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
    int i, r;
    for (i = 0; i < t->n; i++) {
        cosine[i] = t->cosine[t->pair[i]];
        sine[i] = t->sine[t->pair[i]];
    }
    for (r = 0; r <= t->n_rows; r++) {
        const float scale = r < t->n_rows ? t->scale : 1.0f;
        float *out = r < t->n_rows ? t->out + r * t->n : t->last;
        tkvi_multiply(x, t->plain + r * t->n, cosine, t->n);
        tkvi_multiply(y, t->partner + r * t->n, sine, t->n);
        for (i = 0; i < t->n; i++) out[i] = tkvi_f32(tkvi_f32(x[i] + y[i]) * scale);
    }
}

TKV_API tkv_status tkv_rotate_rope(const tkv_rope *rope, int head_dim, int positions, float *x) {
    tkvi_own_rope own;
    if (!rope || !x || head_dim < 1 || head_dim > TKV_MAX_HEAD_DIM || tkvi_rope_has_fault(rope, head_dim))
        return TKV_ERR_ARG;
    if (rope->dim == TKV_OFF && rope->kind == TKV_ROPE_FIXED) return TKV_OK;
    if (!TKVI_HAS_MOVES || !tkvi_rope_is_known(rope)) return TKV_ERR_UNSUPPORTED;
    tkvi_rope_rotate(tkvi_own_rope_make(&own, rope), positions, 0, x);
    return TKV_OK;
}

/* Copies a token, saturated to fp16. rope: undoes its rotation; NULL: none. */
static void tkvi_take_token(const tkvi_rope *rope, const float *x, int dim, int64_t position, float *y) {
    int c;
    for (c = 0; c < dim; c++) y[c] = tkvi_clampf(x[c], -TKVI_F16_MAX, TKVI_F16_MAX);
    if (rope) tkvi_rope_rotate(rope, position, 1, y);
}

#endif /* TKVI_CORE_ROPE_H */
