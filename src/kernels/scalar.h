/*
 * kernels/scalar.h - the interface of an attention kernel, and its scalar version, which defines the result.
 *
 * A kernel reads one side (K or V) of one KV head's block, for up to TKVI_ROWS query rows at once. The rows are
 * the query heads of a group and several queries. Each byte of the cache is then read and unpacked once for all
 * rows. The other kernel files compute the same with vectors, within the rounding of float sums.
 *
 * Integer attention on tiles. No code is multiplied by its scale; the scales go into the weights:
 *   K: q.k = sum_c q_c (scale_c code_c + zero_c). Fold w_c = q_c scale_c. Round w to 8 bits (one limb) or to 15
 *      (two limbs, hi * 128 + lo). Multiply by the codes in integers and add the rest in floats:
 *      step * (sum w code - sum w centre) + sum_c q_c (zero_c - ref_c + centre scale_c)
 *   V: the same with weights p_t scale_t per token, for each group of channels. These weights have no sign, so
 *      one limb is 0..255.
 *
 * One limb or two? A weight that is rounded to 1/127 of the largest adds an error. The error grows with the
 * spread of the codes that the weight multiplies. The format's own error is a third of a step at any width. So
 * wide K tiles always have two limbs: from 5 bits on in formats A and R, from 4 bits on in the others. Narrower
 * tiles have one limb, unless a few weights of a row are far larger than the rest (TKVI_NEEDS_TWO).
 * V decides for whole blocks: a side with tiles of 5 bits or more has two limbs everywhere.
 *
 * Source of the fold: KIVI, and the int8 folding measured in ggml's rivals. The centre terms come from the float
 * query, so the rounding of weights does not meet the mean of the codes.
 *
 * `ref` is any key. Scores are q.(k - ref), which softmax does not notice. A large bias that all keys share
 * (Qwen2's reaches 900) then costs no precision. The caller adds q.ref where it needs the absolute logit.
 *
 * q and ref come in the order of the codes. In rotated formats q and ref are rotated, and so is the output.
 */
#ifndef TKVI_KERNELS_SCALAR_H
#define TKVI_KERNELS_SCALAR_H

#include "formats/table.h"

/* Unrolls the loop that follows: of vectors that must stay in registers. */
#if defined(__clang__)
#define TKVI_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define TKVI_UNROLL _Pragma("GCC unroll 8")
#else
#define TKVI_UNROLL
#endif

/* Keeps a compiler from holding the memory at p in registers from here on. */
#if defined(__GNUC__) || defined(__clang__)
#define tkvi_forget_memory(p) __asm__ volatile("" : : "r"(p) : "memory")
#else
#define tkvi_forget_memory(p) ((void)(p))
#endif

/* m << 5 and m >> 3 of the upper ten bits m of mantissas of log scales: two bytes of a float (kernels/convert.inc). */
static const int8_t tkvi_log_bytes[2][16] = {
    {0, -96, -96, -64, 64, 0, 0, 96, 0, 0, 96, 32, 64, -64, -64, 32},
    {0, 5, 11, 17, 24, 31, 38, 45, 53, 61, 69, 78, 87, 96, 106, 117}};

/* The largest code by width. */
static const int32_t tkvi_tops[8] = {0, 1, 3, 7, 15, 31, 63, 127};

/* Query rows of a pass, and their channels together: wide heads have fewer rows, so that the stack stays small. */
#define TKVI_ROWS 8
#define TKVI_ROW_CHANNELS (TKVI_ROWS * 256)
#define TKVI_ROW_FLOATS (TKVI_ROW_CHANNELS + TKV_MAX_HEAD_DIM) /* with one more row */
#define TKVI_LIMB_MAX_K 127                                    /* largest weight of one limb in K */
#define TKVI_LIMB_MAX_V 255                                    /* and in V */
#define TKVI_TWO_LIMBS_MAX (127 * 128)                         /* largest weight of two limbs */
#define TKVI_WIDE 5 /* tiles of this many bits or more have two limbs */

/* Most rows of a pass for heads of `pad` channels. */
static int tkvi_rows_of(int pad) { return tkvi_min(TKVI_ROWS, TKVI_ROW_CHANNELS / pad); }

/* scores[row][64] = q[row] . (k[t] - ref). q: [rows][pad], zero beyond dim. ref: [pad]. n: tokens in the block.
 * Scores beyond n are finite and have no meaning. An exact side may end after n tokens: do not read further.
 * n_limbs: 1 or 2, see tkvi_n_limbs.
 * `next` is the same side of the next block, or NULL. The kernel prefetches its s->bytes line by line between the
 * products. Prefetching all at once would stall, and hardware prefetchers stop at the end of a record. */
typedef void (*tkvi_k_kernel)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                              const float *ref, int rows, int n, int n_limbs, float *scores);
/* out[row][pad] += sum_t p[row][t] v[t]. p: [rows][64], not negative, zero beyond n. */
typedef void (*tkvi_v_kernel)(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                              int rows, int n, int n_limbs, float *out);

typedef struct tkvi_kernels {
    tkv_isa isa;
    const char *name;
    tkvi_k_kernel k[TKVI_STORAGE_COUNT];
    tkvi_v_kernel v[TKVI_STORAGE_COUNT];
    const tkvi_simd_ops *simd_ops;
    /* p[t] = exp(s[t] - maximum) for 64 scores, all <= maximum. It may be 0 below maximum - 87. Returns the sum. */
    float (*exp64)(const float *s, float maximum, float *p);
    float (*max64)(const float *s); /* the largest of 64 scores */
    /* One step of the online softmax for scores [row][64]. m[r] grows to the largest score of row r. p = exp(s - m)
     * and sum[r] is the sum of p. A row that sees no key (all TKVI_HIDDEN) gets zeros. Returns 0 if no row sees a
     * key. */
    int (*softmax_step)(const float *s, int rows, float *m, float *sum, float *p);
    /* x = a x + b y, or a x if y is NULL. n is a multiple of 16. */
    void (*scale_add)(float *x, float a, const float *y, float b, int n);
    void (*rotate_back)(float *x, int dim); /* as core/rotate.h; x has dim values, rounded up to 16 */
    const struct tkvi_prefill *prefill;     /* kernels for many rows, or NULL */
} tkvi_kernels;

/* 2^r for |r| <= 1/2: a minimax fit with 2^0 = 1. The error is 9e-8. splat and madd are operations of a vocabulary. */
#define TKVI_EXP2_FRACTION(splat, madd, r)                                                                   \
    madd(madd(madd(madd(madd(splat(1.326472728e-03f), r, splat(9.671512657e-03f)), r,                        \
                        splat(5.550733743e-02f)),                                                            \
                   r, splat(2.402224208e-01f)),                                                              \
              r, splat(6.931469776e-01f)),                                                                   \
         r, splat(1.0f))

#define TKVI_HIDDEN (-1e30f) /* score of an unseen key; finite, because -ffast-math has no infinities */
#define TKVI_IS_HIDDEN(s) (!((s) > TKVI_HIDDEN))

/* Limbs to ask a kernel for. 2: every weight has two. 1: the kernel decides by the width of tiles and by the
 * weights. */
static int tkvi_n_limbs(const tkvi_side *s, int precise) {
    int width;
    if (s->which == TKV_V)
        for (width = TKVI_MAX_WIDTH; width >= TKVI_WIDE; width--)
            if (s->tiles.n[width]) return 2;
    return precise ? 2 : 1;
}

/* >>exact tiers: rows [token][pad] */
static void tkvi_exact_k(const tkvi_side *s, float (*load)(const uint8_t *), const uint8_t *src,
                         const float *q, const float *ref, int rows, int n, float *scores) {
    const int size = s->format->bits / 8;
    int r, t, c;
    memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (t = 0; t < n; t++, src += s->pad * size)
        for (c = 0; c < s->dim; c++) {
            const float k = load(src + c * size) - ref[c], *row = q + c;
            float *score = scores + t;
            for (r = 0; r < rows; r++, row += s->pad, score += TKVI_BLOCK) *score += *row * k;
        }
}

static void tkvi_exact_v(const tkvi_side *s, float (*load)(const uint8_t *), const uint8_t *src,
                         const float *p, int rows, int n, float *out) {
    const int size = s->format->bits / 8;
    float v[TKV_MAX_HEAD_DIM], weight;
    int r, t, c;
    for (t = 0; t < n; t++, src += s->pad * size) {
        for (c = 0; c < s->dim; c++) v[c] = load(src + c * size);
        for (r = 0; r < rows; r++) {
            float *row = out + r * s->pad;
            for (weight = p[r * TKVI_BLOCK + t], c = 0; c < s->dim; c++) row[c] += weight * v[c];
        }
    }
}

#define TKVI_EXACT_KERNEL_(t)                                                                                \
    static void tkvi_##t##_k_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next,             \
                                    const float *q, const float *ref, int rows, int n, int n_limbs,          \
                                    float *scores) {                                                         \
        (void)next;                                                                                          \
        (void)n_limbs;                                                                                       \
        tkvi_exact_k(s, tkvi_load_##t, src, q, ref, rows, n, scores);                                        \
    }                                                                                                        \
    static void tkvi_##t##_v_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next,             \
                                    const float *p, int rows, int n, int n_limbs, float *out) {              \
        (void)next;                                                                                          \
        (void)n_limbs;                                                                                       \
        tkvi_exact_v(s, tkvi_load_##t, src, p, rows, n, out);                                                \
    }
TKVI_EXACT_KERNEL_(f32)
TKVI_EXACT_KERNEL_(f16)
TKVI_EXACT_KERNEL_(bf16)
#undef TKVI_EXACT_KERNEL_

/* >>tiles */
/* The spread by width: the variance of codes in units of the format's own error. It scales the error of a rounded
 * weight. First row: A and R, whose grids cut off rare values (those of R are normal). Second row: ranges from the
 * smallest value to the largest. There, all codes of one large key in a block are at the ends of the ranges, and
 * exact. The value for 4 bits, which only V uses, lies between that case (340) and normal values (125). */
static const float tkvi_spread[2][TKVI_WIDE] = {{0.0f, 3.0f, 9.0f, 30.0f, 90.0f},
                                                {0.0f, 3.0f, 14.0f, 74.0f, 250.0f}};

/* Tiles of K with this many bits or more always have two limbs. */
static int tkvi_wide_k(const tkvi_side *s) { return s->format->shared ? TKVI_WIDE : TKVI_WIDE - 1; }

/* Number of positions in such tiles. They come first. */
static int tkvi_n_wide_positions(const tkvi_side *s) {
    int width, n = 0;
    for (width = TKVI_MAX_WIDTH; width >= tkvi_wide_k(s); width--) n += 4 * s->tiles.n[width];
    return n;
}

/* Sum of the spreads of the codes that one-limb weights multiply in a block. K: over all channels. V: over 64
 * tokens, for codes of one width. */
static float tkvi_coarse_k(const tkvi_side *s) {
    float sum = 0.0f;
    int width;
    for (width = 1; width < tkvi_wide_k(s); width++)
        sum += tkvi_spread[!s->format->shared][width] * (float)(4 * s->tiles.n[width]);
    return sum;
}

static float tkvi_coarse_v(const tkvi_side *s, int width) {
    if (s->pairs) width = 2; /* pairs of R15 (1.5 bits a value) */
    return width < TKVI_WIDE ? tkvi_spread[!s->format->shared][width] * (float)TKVI_BLOCK : 0.0f;
}

/* True if one limb, of weights up to `top`, would add more than 0.087 of the format's own error (root mean square).
 * So the added error stays below a tenth. Per weight, in the same unit, rounding has the squared error
 * step^2 spread / 12 with step = most / top; the format has w^2. Hence the limit is sqrt(0.09 / 12). This bounds an
 * expectation: the error of one row can be twice as large. */
#define TKVI_ERR_LIMIT(top) (0.09f * (float)(top) * (float)(top))
#define TKVI_NEEDS_TWO(coarse, most, squares, top)                                                           \
    ((coarse) * (most) * (most) > TKVI_ERR_LIMIT(top) * (squares))

/* x rounded and clamped to -top .. top. Not inlined, so that no compiler fuses a product x into tkvi_rne's sum (FMA):
 * the kernels round both. */
static TKVI_NOINLINE int tkvi_rounded(float x, int top) { return tkvi_max(-top, tkvi_min(top, tkvi_rne(x))); }

static float tkvi_inverse(float top, float most) {
    float inverse = most > 0.0f ? top / most : 0.0f;
    return tkvi_is_finite(inverse) ? inverse : 0.0f; /* weights below 1e-34 contribute nothing */
}

/* Weights of K as integers in units of the low limb. Returns the value of one unit. */
static float tkvi_round_k(const tkvi_side *s, const float *w, int n_limbs, int *rounded) {
    float most = tkvi_largest(w, s->pad), squares = 0.0f;
    float one = tkvi_inverse((float)TKVI_LIMB_MAX_K, most),
          two = tkvi_inverse((float)TKVI_TWO_LIMBS_MAX, most);
    int wide = tkvi_n_wide_positions(s), i;
    for (i = 0; i < s->pad; i++) squares += w[i] * w[i];
    if (n_limbs == 2 || TKVI_NEEDS_TWO(tkvi_coarse_k(s), most, squares, TKVI_LIMB_MAX_K)) wide = s->pad;
    for (i = 0; i < s->pad; i++)
        rounded[i] = i < wide ? tkvi_rounded(w[i] * two, TKVI_TWO_LIMBS_MAX)
                              : 128 * tkvi_rounded(w[i] * one, TKVI_LIMB_MAX_K);
    return two > 0.0f ? most / (float)TKVI_TWO_LIMBS_MAX : 0.0f;
}

/* The largest weight of V in one limb. Levels of a table, and codes of one bit, are multiplied as signed bytes, which
 * leaves seven bits for weights. */
static int tkvi_top_v(const tkvi_side *s) {
    return s->levels || s->tiles.n[1] > 0 ? TKVI_LIMB_MAX_K : TKVI_LIMB_MAX_V;
}

static float tkvi_round_v(const tkvi_side *s, const float *w, int width, int n_limbs, int *rounded) {
    float most = tkvi_largest(w, TKVI_BLOCK), squares = 0.0f, by;
    int top = tkvi_top_v(s), t;
    for (t = 0; t < TKVI_BLOCK; t++) squares += w[t] * w[t];
    if (n_limbs == 2 || TKVI_NEEDS_TWO(tkvi_coarse_v(s, width), most, squares, top)) top = TKVI_TWO_LIMBS_MAX;
    by = tkvi_inverse((float)top, most);
    for (t = 0; t < TKVI_BLOCK; t++) rounded[t] = tkvi_max(0, tkvi_rounded(w[t] * by, top));
    return by > 0.0f ? most / (float)top : 0.0f;
}

/* Heads of more than 256 channels are multiplied in parts of 256 positions: sums then fit 32 bits. */
#define TKVI_K_PART 256

/* The positions from `first` on, at most `most`, as a side of their own. *at: in and out, their codes. */
static tkvi_side tkvi_part_of_k(const tkvi_side *s, int first, int most, const uint8_t **at) {
    tkvi_side part = *s;
    int width, skip = first / 4, left;
    part.pad = (int16_t)tkvi_min(most, s->pad - first);
    left = part.pad / 4;
    memset(&part.tiles, 0, sizeof part.tiles);
    for (width = TKVI_MAX_WIDTH; width > 0; width--) {
        const int before = tkvi_min(skip, s->tiles.n[width]), n = tkvi_min(left, s->tiles.n[width] - before);
        *at += before * TKVI_TILE_BYTES(width);
        skip -= before;
        part.tiles.n[width] = (uint16_t)n;
        left -= n;
    }
    return part;
}

/* Replaces the scores of the outlier, which its columns do not hold. */
static void tkvi_outlier_k_scalar(const tkvi_side *s, const uint8_t *src, const float *q, const float *ref,
                                  int rows, float *scores) {
    const tkvi_outlier o = tkvi_outlier_of(s, src);
    int r, c;
    if (o.slot == TKVI_NO_OUTLIER) return;
    for (r = 0; r < rows; r++) {
        float sum = 0.0f;
        for (c = 0; c < s->pad; c++)
            sum += q[r * s->pad + c] *
                   (tkvi_outlier_value(o.row[c], o.half_step, s->mean ? s->mean[c] : 0.0f) - ref[c]);
        scores[r * TKVI_BLOCK + o.slot] = sum;
    }
}

static void tkvi_tiles_k_scalar(const tkvi_side *all, const uint8_t *src, const uint8_t *next, const float *q,
                                const float *ref, int rows, int n, int n_limbs, float *scores) {
    float scale[2 * TKV_MAX_HEAD_DIM], zero[2 * TKV_MAX_HEAD_DIM];
    int g, r, t, i, c, first;
    (void)next;
    all->format->side[TKV_K].meta(all, src, &tkvi_simd_ops_scalar, scale, zero);
    for (first = 0; first < all->pad; first += TKVI_K_PART) {
        const uint8_t *codes = src;
        const tkvi_side s = tkvi_part_of_k(all, first, TKVI_K_PART, &codes);
        for (r = 0; r < rows; r++)
            for (g = 0; g < s.groups; g++) {
                const float *x = q + r * all->pad + first, *by = scale + g * all->pad + first,
                            *plus = zero + g * all->pad + first;
                float folded[TKVI_K_PART], step, rest = 0.0f, middle = 0.0f;
                int w[TKVI_K_PART], sum[TKVI_BLOCK], width, position = 0;
                const uint8_t *at = codes;
                for (c = 0; c < s.pad; c++) folded[c] = x[c] * by[c];
                step = tkvi_round_k(&s, folded, n_limbs, w);
                memset(sum, 0, sizeof sum);
                for (width = TKVI_MAX_WIDTH; width > 0; width--)
                    for (i = 0; i < s.tiles.n[width]; i++, position += 4) {
                        uint8_t tile[TKVI_TILE_CODES];
                        float centre = tkvi_centre(&s, width);
                        TKVI_ASSERT(position + 4 <= s.pad);
                        tkvi_unpack_tile(at, width, tile);
                        at += TKVI_TILE_BYTES(width);
                        for (c = position; c < position + 4; c++) {
                            rest += x[c] * ((plus[c] - ref[first + c]) + centre * by[c]);
                            middle += centre * (float)w[c];
                            for (t = 0; t < n; t++) sum[t] += w[c] * tile[4 * t + c - position];
                        }
                    }
                for (; position < s.pad; position++) /* channels without codes */
                    rest += x[position] * (plus[position] - ref[first + position]);
                for (t = g * s.group; t < tkvi_min((g + 1) * s.group, TKVI_BLOCK); t++) {
                    float *score = scores + r * TKVI_BLOCK + t;
                    *score = step * ((float)sum[t] - middle) + rest + (first ? *score : 0.0f);
                }
            }
    }
    tkvi_outlier_k_scalar(all, src, q, ref, rows, scores);
}

static void tkvi_tiles_v_scalar(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                                int rows, int n, int n_limbs, float *out) {
    float scale[TKVI_MAX_GROUPS * TKVI_BLOCK], zero[TKVI_MAX_GROUPS * TKVI_BLOCK];
    int r, t, i, c, width, slab = 0; /* its first channel */
    const uint8_t *at = src;
    (void)next;
    s->format->side[TKV_V].meta(s, src, &tkvi_simd_ops_scalar, scale, zero);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i += 4) { /* a slab */
            uint8_t tile[4][TKVI_TILE_CODES];
            const float *sc = scale + slab / s->group * TKVI_BLOCK, *z = zero + slab / s->group * TKVI_BLOCK;
            float centre = tkvi_centre(s, width);
            int channels = tkvi_slab_channels(s, width);
            for (c = 0; c < 4; c++) {
                tkvi_unpack_tile(at, width, tile[c]);
                at += TKVI_TILE_BYTES(width);
            }
            for (r = 0; r < rows; r++) {
                float folded[TKVI_BLOCK], step, rest = 0.0f, middle = 0.0f;
                int w[TKVI_BLOCK], sum[32];
                for (t = 0; t < TKVI_BLOCK; t++) folded[t] = t < n ? p[r * TKVI_BLOCK + t] * sc[t] : 0.0f;
                step = tkvi_round_v(s, folded, width, n_limbs, w);
                memset(sum, 0, sizeof sum);
                for (t = 0; t < n; t++) {
                    const uint8_t *codes = tile[t / 16] + t % 16 / 4 * 64 + t % 4;
                    rest += p[r * TKVI_BLOCK + t] * (z[t] + centre * sc[t]);
                    middle += centre * (float)w[t];
                    for (c = 0; c < channels; c++) {
                        int code = codes[4 * (c % 16)];
                        sum[c] +=
                            w[t] *
                            (s->levels ? s->levels[tkvi_level_table(s, width, c / 16) + (code & 15)] : code);
                    }
                }
                for (c = 0; c < channels; c++)
                    out[r * s->pad + slab + c] += step * ((float)sum[c] - middle) + rest;
            }
            slab += channels;
        }
}

/* >>decoded: any format, through its decode function only. Kernels fall back to it (kernels/code_rows.inc). */
#define TKVI_AT_ONCE 16 /* tokens decoded at a time, limited by the stack */
#define TKVI_AT_ONCE_FLOATS (TKVI_AT_ONCE * 256)

static int tkvi_tokens_at_once(int pad) { return pad > 256 ? TKVI_AT_ONCE / 4 : TKVI_AT_ONCE; }

/* n is a multiple of 16. The inner loop of 16 lets compilers use vectors also at -O2. */
static float tkvi_float_dot(const float *a, const float *b, int n) {
    float sum[16] = {0.0f}, all = 0.0f;
    int i, k;
    for (i = 0; i < n; i += 16)
        for (k = 0; k < 16; k++) sum[k] += a[i + k] * b[i + k];
    for (k = 0; k < 16; k++) all += sum[k];
    return all;
}

static void tkvi_decoded_k(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *q,
                           const float *ref, int rows, int n, int n_limbs, float *scores) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE_FLOATS];
    const int at_once = tkvi_tokens_at_once(s->pad);
    int from, t, c, r;
    (void)next;
    (void)n_limbs;
    memset(x, 0, sizeof x);
    memset(scores, 0, (size_t)(rows * TKVI_BLOCK) * sizeof(float));
    for (from = 0; from < n; from += at_once) {
        int count = tkvi_min(at_once, n - from);
        tkvi_decode_side(s, src, from, count, x, (size_t)s->pad);
        for (t = 0; t < count; t++) {
            float *k = x + t * s->pad;
            for (c = 0; c < s->dim; c++) k[c] -= ref[c];
            for (r = 0; r < rows; r++)
                scores[r * TKVI_BLOCK + from + t] = tkvi_float_dot(q + r * s->pad, k, s->pad);
        }
    }
}

static void tkvi_decoded_v(const tkvi_side *s, const uint8_t *src, const uint8_t *next, const float *p,
                           int rows, int n, int n_limbs, float *out) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE_FLOATS];
    const int at_once = tkvi_tokens_at_once(s->pad);
    int from, t, c, k, r;
    (void)next;
    (void)n_limbs;
    memset(x, 0, sizeof x);
    for (from = 0; from < n; from += at_once) {
        int count = tkvi_min(at_once, n - from);
        tkvi_decode_side(s, src, from, count, x, (size_t)s->pad);
        for (r = 0; r < rows; r++)
            for (c = 0; c < s->pad; c += 16) {
                float sum[16], *o = out + r * s->pad + c;
                for (k = 0; k < 16; k++) sum[k] = o[k];
                for (t = 0; t < count; t++) {
                    float w = p[r * TKVI_BLOCK + from + t];
                    for (k = 0; k < 16; k++) sum[k] += w * x[t * s->pad + c + k];
                }
                for (k = 0; k < 16; k++) o[k] = sum[k];
            }
    }
}

static float tkvi_exp64_scalar(const float *s, float maximum, float *p) {
    float sum = 0.0f;
    int t;
    for (t = 0; t < TKVI_BLOCK; t++) {
        float x = s[t] - maximum;
        p[t] = x < -87.0f ? 0.0f : expf(x); /* no subnormals, under any compiler flags */
        sum += p[t];
    }
    return sum;
}

static float tkvi_max64_scalar(const float *s) {
    float maximum = s[0];
    int t;
    for (t = 1; t < TKVI_BLOCK; t++) maximum = s[t] > maximum ? s[t] : maximum;
    return maximum;
}

static int tkvi_softmax_step_scalar(const float *s, int rows, float *m, float *sum, float *p) {
    int r, seen = 0;
    for (r = 0; r < rows; r++, s += TKVI_BLOCK, p += TKVI_BLOCK) {
        float most = tkvi_max64_scalar(s);
        sum[r] = 0.0f;
        if (TKVI_IS_HIDDEN(most)) {
            memset(p, 0, TKVI_BLOCK * sizeof(float));
            continue;
        }
        m[r] = most > m[r] ? most : m[r];
        sum[r] = tkvi_exp64_scalar(s, m[r], p);
        seen++;
    }
    return seen;
}

static void tkvi_scale_add_scalar(float *x, float a, const float *y, float b, int n) {
    int i;
    for (i = 0; i < n; i++) x[i] = y ? a * x[i] + b * y[i] : a * x[i];
}

/* V inside K: out[row][pad of V] += sum_t p[row][t] v[t], as tkvi_v_kernel, where s is a view of K (tkvi_view_k_as_v).
 * Decodes 16 tokens at a time, and multiplies them as F32. It serves machines without vectors, and second passes: other
 * rows have the kernels of kernels/prefill.h, which do not decode. The scalar decoder takes least of the stack. */
static void tkvi_add_viewed_values(const tkvi_kernels *kernels, const tkvi_side *s, const uint8_t *src,
                                   const float *p, int rows, int n, float *out) {
    TKVI_ALIGNED float x[TKVI_AT_ONCE * TKV_MAX_HEAD_DIM];
    tkvi_side f32;
    int from;
    memset(&f32, 0, sizeof f32);
    f32.format = &tkvi_formats[TKV_F32];
    f32.which = TKV_V;
    f32.dim = s->dim;
    f32.pad = (int16_t)tkvi_round_up(s->dim, 16);
    f32.tokens = TKVI_BLOCK;
    memset(x, 0, sizeof x);
    for (from = 0; from < n; from += TKVI_AT_ONCE) {
        const int count = tkvi_min(TKVI_AT_ONCE, n - from);
        tkvi_decode_side(s, src, from, count, x, (size_t)f32.pad);
        kernels->v[TKVI_AS_F32](&f32, (const uint8_t *)x, NULL, p + from, rows, count, 1, out);
    }
}

/* out[row][pad of V] += sum_t p[row][t] v[t], stored as V or inside K. Parameters as tkvi_v_kernel. */
static void tkvi_add_values(const tkvi_kernels *kernels, const tkvi_side *s, const uint8_t *src,
                            const uint8_t *next, const float *p, int rows, int n, int precise, float *out) {
    if (tkvi_is_view(s)) tkvi_add_viewed_values(kernels, s, src, p, rows, n, out);
    else kernels->v[s->format->stored](s, src, next, p, rows, n, tkvi_n_limbs(s, precise), out);
}

static const tkvi_kernels tkvi_kernels_scalar = {
    TKV_ISA_SCALAR,
    "scalar",
    {tkvi_f32_k_scalar, tkvi_f16_k_scalar, tkvi_bf16_k_scalar, tkvi_tiles_k_scalar,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_k)},
    {tkvi_f32_v_scalar, tkvi_f16_v_scalar, tkvi_bf16_v_scalar, tkvi_tiles_v_scalar,
     TKVI_IF(TKVI_HAS_DECODED, tkvi_decoded_v)},
    &tkvi_simd_ops_scalar,
    tkvi_exp64_scalar,
    tkvi_max64_scalar,
    tkvi_softmax_step_scalar,
    tkvi_scale_add_scalar,
    tkvi_rotate_back,
    NULL,
};

#endif /* TKVI_KERNELS_SCALAR_H */
