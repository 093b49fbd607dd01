/*
 * test_kvquant.c - KVQUANT formats: bytes and the saved table compared with a second reader. Also the benefit of each
 * part of the method, and tables in a cache: learning, saving, versions.
 *
 * cc -O2 tests/test_kvquant.c examples/tieredkv.c -o test_kvquant -lm && ./test_kvquant [filter | --list]
 */
#include "levels.h"

enum { BLOCK = TKV_BLOCK_TOKENS, MAX_VALUES = BLOCK * TKV_MAX_HEAD_DIM };

static const tkv_format kvquant_formats[] = {TKV_KVQUANT2, TKV_KVQUANT3, TKV_KVQUANT4};

static float in[MAX_VALUES], out[MAX_VALUES], want[MAX_VALUES];
static uint8_t bytes[4 * MAX_VALUES], other[4 * MAX_VALUES];

static size_t align64(size_t n) { return (n + 63) / 64 * 64; }

static tkv_codec make_codec(tkv_format format, int side, int dim) {
    tkv_codec c;
    memset(&c, 0, sizeof c);
    c.format = format;
    c.side = side ? TKV_V : TKV_K;
    c.head_dim = dim;
    return c;
}

static const char *format_name(tkv_format f) {
    const char *name = tkv_get_name(TKV_NAME_FORMAT, (int)f);
    return name ? name : "";
}

static double float_at(const uint8_t *p) {
    uint32_t u = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    float f;
    memcpy(&f, &u, 4);
    return (double)f;
}

/* >>a second reader of the bytes */
typedef struct block_reader {
    int bits, dim, n_slots, k, own_ranges;
    const uint8_t *src;
    double level[16];
    const double *radius, *middle; /* of K channels, from the table; NULL: from the block */
} block_reader;

/* share: thousandths */
static int n_slots_of(int dim, int share) {
    const int n = (dim * share + 999) / 1000;
    return n < dim ? n : dim - 1;
}

static block_reader make_reader(tkv_format f, int side, int dim, int flags, int share, const uint8_t *src) {
    block_reader r;
    memset(&r, 0, sizeof r);
    r.bits = f == TKV_KVQUANT4 ? 4 : f == TKV_KVQUANT3 ? 3 : 2;
    r.dim = dim;
    r.k = !side;
    r.n_slots = flags & TKV_KVQUANT_DENSE ? 0 : n_slots_of(dim, share);
    r.src = src;
    return r;
}

static int read_code(const block_reader *r, int t, int c) {
    int row = (r->dim * r->bits + 7) / 8, code = 0, b;
    for (b = 0; b < r->bits; b++) {
        int at = c * r->bits + b;
        code |= (r->src[t * row + at / 8] >> at % 8 & 1) << b;
    }
    return code;
}

/* Keys are before RoPE. */
static double read_value(const block_reader *r, int t, int c) {
    const uint8_t *meta = r->src + BLOCK * ((r->dim * r->bits + 7) / 8),
                  *slot = meta + (r->k ? 4 : 4 * BLOCK);
    const uint8_t *own_ranges = slot + 3 * BLOCK * r->n_slots;
    double radius = r->k ? 0 : read_f16(meta + 2 * t), middle = r->k ? 0 : read_f16(meta + 2 * BLOCK + 2 * t),
           x;
    int i;
    if (r->k) {
        radius = r->radius ? r->radius[c] : read_f16(own_ranges + 2 * c);
        middle = r->middle ? r->middle[c] : read_f16(own_ranges + 2 * r->dim + 2 * c);
    }
    x = (double)(float)(r->level[read_code(r, t, c)] * radius + middle);
    for (i = 0; i < r->n_slots; i++)
        if (slot[3 * (t * r->n_slots + i)] == c)
            x = (double)(float)(x + read_f16(slot + 3 * (t * r->n_slots + i) + 1));
    return x;
}

static void fill_input(tkv_rng *r, int kind, int n, int dim) {
    int i;
    for (i = 0; i < n * dim; i++) {
        double g = tkv_rng_gauss(r);
        switch (kind) {
        case 0: in[i] = (float)g; break;
        case 1: in[i] = (float)(g * (i % dim % 13 == 5 ? 40 : 1) + (i % dim % 7 == 2 ? 30 : 0)); break;
        case 2: in[i] = (float)(g * 0.001); break;
        case 3: in[i] = (float)floor(g * 8) / 4; break;
        case 4: in[i] = (float)(g * 8000); break;
        default: in[i] = tkv_rng_below(r, 3) ? 0.0f : (float)g;
        }
    }
}

static void encode_and_decode(const tkv_codec *c, int n) {
    size_t size = tkv_get_block_bytes(c);
    CHECK_EQ(tkv_encode_block(c, in, 0, n, bytes, size), TKV_OK);
    CHECK_EQ(tkv_decode_block(c, bytes, size, n, out, 0), TKV_OK);
}

static double clamp_to_f16(float x) { return x > 65504.0f ? 65504 : x < -65504.0f ? -65504 : (double)x; }

/* Range of the group of a value: its channel for K, its token for V. */
static double range_of(const float *x, int n, int dim, int side, int t, int c) {
    double low = 1e9, high = -1e9;
    int i;
    for (i = 0; i < (side ? dim : n); i++) {
        double y = clamp_to_f16(side ? x[t * dim + i] : x[i * dim + c]);
        low = y < low ? y : low;
        high = y > high ? y : high;
    }
    return high - low;
}

/* Levels without a table: evenly spaced from -1 to 1, or fitted to a normal distribution (core/codebook.h). */
static double standard_level(int bits, int side, int flags, int code) {
    static const int normal[3][8] = {{404, 1340, 0, 0, 0, 0, 0, 0}, /* in 1/2048; upper half */
                                     {207, 638, 1126, 1758, 0, 0, 0, 0},
                                     {102, 306, 518, 742, 983, 1253, 1567, 1955}};
    const int half = 1 << (bits - 1), i = code < half ? half - 1 - code : code - half;
    const double even = (double)float_of_f16(f16_of((float)((2.0 * i + 1) / ((1 << bits) - 1))));
    const int even_ones = TKV_KVQUANT_UNIFORM | (side ? TKV_KVQUANT_UNIFORM_V : TKV_KVQUANT_UNIFORM_K);
    const double y = flags & even_ones ? even : normal[bits - 2][i] / 2048.0;
    return code < half ? -y : y;
}

TEST(bytes_follow_the_layout) {
    static const int dims[] = {1, 2, 5, 16, 33, 64, 80, 100, 101, 128, 200, 201, 255, 256};
    tkv_rng rng = tkv_rng_seed(5);
    double range[256]; /* of a channel of K or a token of V */
    int f, i, side, flags, t, c, n, i_range;
    for (f = 0; f < 3; f++)
        for (i = 0; i < COUNT(dims); i++)
            for (side = 0; side < 2; side++)
                for (flags = 0; flags < 64; flags += tkv_test_quick() ? 14 : 2) {
                    static const int shares[] = {10, 1, 30, 25};
                    int dim = dims[i], bits = 2 + f, share = shares[(i + flags / 2) % 4],
                        n_slots = flags & TKV_KVQUANT_DENSE ? 0 : n_slots_of(dim, share);
                    tkv_codec cd = make_codec(kvquant_formats[f], side, dim);
                    block_reader r = make_reader(kvquant_formats[f], side, dim, flags, share, bytes);
                    int wrong = 0, n_far = 0;
                    size_t size = (size_t)(BLOCK * ((dim * bits + 7) / 8 + 3 * n_slots) +
                                           (side ? 4 * BLOCK : 4 + 4 * dim));
                    cd.options.kvquant = flags;
                    cd.options.kvquant_outliers = share == 10 ? 0 : share;
                    CHECK_EQ(tkv_get_block_bytes(&cd),
                             align64((size_t)(BLOCK * ((dim * bits + 7) / 8))) +
                                 align64(size - (size_t)(BLOCK * ((dim * bits + 7) / 8))));
                    n = flags % 4 ? BLOCK : 1 + tkv_rng_below(&rng, BLOCK);
                    fill_input(&rng, (i + flags / 2) % 6, n, dim);
                    encode_and_decode(&cd, n);
                    for (c = 0; c < 1 << bits; c++) r.level[c] = standard_level(bits, side, flags, c);
                    for (i_range = 0; i_range < (side ? n : dim); i_range++)
                        range[i_range] = range_of(in, n, dim, side, i_range, i_range);
                    for (t = 0; t < n; t++)
                        for (c = 0; c < dim; c++) {
                            double x = clamp_to_f16(in[t * dim + c]), y = (double)out[t * dim + c];
                            wrong += fabs(read_value(&r, t, c) - y) > 0;
                            /* half the widest step between levels */
                            n_far += fabs(x - y) > range[side ? t : c] * 0.18 + 1e-3 * fabs(x) + 1e-7;
                        }
                    CHECK_MSG(wrong == 0, "%s %d, dim %d, flags %d: %d values are read otherwise",
                              format_name(kvquant_formats[f]), side, dim, flags, wrong);
                    CHECK_MSG(n_far == 0, "%s %d, dim %d, flags %d: %d far off",
                              format_name(kvquant_formats[f]), side, dim, flags, n_far);
                }
}

/* Slots hold the differences of outliers from their levels in fp16. */
TEST(outliers_are_kept) {
    tkv_rng rng = tkv_rng_seed(6);
    int f, t, i;
    for (f = 0; f < 3; f++) {
        tkv_codec c = make_codec(kvquant_formats[f], 1, 128);
        double plain, dense;
        fill_input(&rng, 0, BLOCK, 128);
        encode_and_decode(&c, BLOCK);
        plain = squared_error(in, out, BLOCK * 128);
        for (t = 0; t < BLOCK; t++) { /* two of 128 values: at one end of the range, or at both */
            in[t * 128 + t] = 500.0f + (float)t;
            in[t * 128 + 127 - t % 60] = t % 2 ? 900.0f : -700.0f;
        }
        encode_and_decode(&c, BLOCK);
        for (t = 0, dense = 0; t < BLOCK; t++)
            for (i = 0; i < 128; i++) {
                double e = (double)out[t * 128 + i] - (double)in[t * 128 + i];
                if (in[t * 128 + i] > 100 || in[t * 128 + i] < -100) CHECK_NEAR(e, 0, 0.51);
                else dense += e * e;
            }
        CHECK_LE(dense, 1.6 * plain); /* the former outliers now widen the range */
        c.options.kvquant = TKV_KVQUANT_DENSE;
        encode_and_decode(&c, BLOCK);
        CHECK_LE(100 * plain, squared_error(in, out, BLOCK * 128));
    }
}

/* A codec of keys takes RoPE of the first channels only. Values are not rotated. */
TEST(codecs_take_rope_of_the_first_channels) {
    int side, post;
    for (side = 0; side < 2; side++)
        for (post = 0; post < 2; post++) {
            tkv_codec c = make_codec(TKV_KVQUANT4, side, 32);
            const size_t n = tkv_get_block_bytes(&c);
            c.options.kvquant = post ? TKV_KVQUANT_POST_ROPE : 0;
            c.rope.dim = 16;
            CHECK(n > 0 && tkv_get_block_bytes(&c) == n);
            c.rope.first = 8;
            CHECK_EQ(tkv_get_block_bytes(&c), side ? n : 0);
            c.format = TKV_KIVI4; /* it does not undo RoPE */
            CHECK(tkv_get_block_bytes(&c) > 0);
        }
}

/* Keys at both ends of a channel's range are no outliers, which would be stored exactly. */
TEST(ends_of_a_range_are_no_outliers) {
    int f, i, n_exact[2] = {0, 0};
    for (f = 0; f < 3; f++) {
        tkv_codec c = make_codec(kvquant_formats[f], 0, 32);
        for (i = 0; i < BLOCK * 32; i++) in[i] = (i / 32 + i) % 2 ? 1.0f : -1.0f;
        encode_and_decode(&c, BLOCK);
        for (i = 0; i < BLOCK * 32; i++) {
            CHECK_NEAR(out[i], f == 0 ? .65 * (double)in[i] : .9 * (double)in[i], .2);
            n_exact[in[i] > 0.0f] += out[i] == in[i];
        }
    }
    CHECK_EQ(n_exact[0], 0);
    CHECK_EQ(n_exact[1], 0);
}

/* Zeros stay zero, and no value becomes NaN or infinite. */
TEST(extreme_values) {
    static const float special_values[] = {0.0f,   -0.0f,   1e-45f, -1e-40f, 6e-8f, 1e-6f,    -3e-5f, 1.0f,
                                           -1e30f, 3.4e38f, 65504,  -65504,  65505, -3.4e38f, 1e10f,  0.3f};
    tkv_rng r = tkv_rng_seed(7);
    int f, i, k, flags, side, bad;
    for (f = 0; f < 3; f++)
        for (flags = 0; flags < 16; flags++)
            for (side = 0; side < 2; side++) {
                int dim = flags % 2 ? 38 : 64;
                tkv_codec c = make_codec(kvquant_formats[f], side, dim);
                c.options.kvquant = flags;
                c.rope = rope_of(32, 0, flags / 2 % 2, 0);
                c.position = 1000003;
                memset(in, 0, sizeof in);
                encode_and_decode(&c, BLOCK);
                for (i = 0, bad = 0; i < BLOCK * dim; i++) bad += fabs((double)out[i]) > 0;
                CHECK_EQ(bad, 0);
                for (k = 0; k < 8; k++) {
                    int n = 1 + tkv_rng_below(&r, BLOCK),
                        n_values = 2 + tkv_rng_below(&r, COUNT(special_values) - 1);
                    for (i = 0; i < n * dim; i++) in[i] = special_values[tkv_rng_below(&r, n_values)];
                    encode_and_decode(&c, n);
                    for (i = 0, bad = 0; i < n * dim; i++) bad += !tkv_test_is_finite((double)out[i]);
                    CHECK_MSG(bad == 0, "%s: not finite", format_name(c.format));
                }
                if (side || flags & TKV_KVQUANT_POST_ROPE) {
                    for (i = 0; i < BLOCK * dim; i++) in[i] = 600.25f; /* all equal */
                    encode_and_decode(&c, BLOCK);
                    for (i = 0; i < BLOCK * dim; i++) CHECK_NEAR(out[i], 600.25, 0.3);
                }
            }
}

TEST(any_bytes_decode) { /* for the sanitizers */
    tkv_rng r = tkv_rng_seed(8);
    size_t i;
    int k;
    for (k = 0; k < 300; k++) {
        tkv_codec c = make_codec(kvquant_formats[k % 3], k / 3 % 2, 1 + tkv_rng_below(&r, 256));
        size_t size = tkv_get_block_bytes(&c);
        c.options.kvquant = tkv_rng_below(&r, 16);
        c.rope = rope_of(c.head_dim & ~1, 0, k % 2, 0);
        for (i = 0; i < size; i++) bytes[i] = (uint8_t)(tkv_rng_u64(&r) >> 40);
        CHECK_EQ(tkv_decode_block(&c, bytes, size, BLOCK, out, 0),
                 size >= tkv_get_block_bytes(&c) ? TKV_OK : TKV_ERR_ARG);
    }
}

/* Keys that are constant before RoPE decode to the same keys at any position: both layouts, all or some channels. */
TEST(keys_are_rotated_back) {
    static const int positions[] = {0, 77, 131000, 1048000};
    tkv_rng rng = tkv_rng_seed(9);
    int f, p, layout, t, i;
    for (f = 0; f < 3; f++)
        for (p = 0; p < COUNT(positions); p++)
            for (layout = 0; layout < 4; layout++) {
                int dim = 96;
                tkv_codec c = make_codec(kvquant_formats[f], 0, dim);
                float key[96];
                double y[96], worst = 0;
                for (i = 0; i < dim; i++)
                    key[i] = (float)(tkv_rng_below(&rng, 4000) - 2000) / 64.0f; /* fp16 */
                c.rope = rope_of(layout / 2 ? 64 : 96, 500000, layout % 2, 0);
                c.position = positions[p];
                for (t = 0; t < BLOCK; t++) {
                    apply_rope_naively(&c.rope, positions[p] + t, 1, key, y, dim);
                    for (i = 0; i < dim; i++) in[t * dim + i] = (float)y[i];
                }
                encode_and_decode(&c, BLOCK);
                for (i = 0; i < BLOCK * dim; i++) {
                    double e = fabs((double)in[i] - (double)out[i]);
                    worst = e > worst ? e : worst;
                }
                CHECK_LE(worst, 4e-5); /* values reach 31: ranges are as narrow as the rounding of the keys */
                c.position = 0;        /* the block stores its position */
                CHECK_EQ(tkv_decode_block(&c, bytes, tkv_get_block_bytes(&c), BLOCK, want, 0), TKV_OK);
                CHECK_MEM(want, out, (size_t)(BLOCK * dim) * sizeof *out);
                c.options.kvquant = TKV_KVQUANT_POST_ROPE; /* after RoPE the keys are not constant */
                c.position = positions[p];
                encode_and_decode(&c, BLOCK);
                CHECK_LE(1.0, sqrt(squared_error(in, out, BLOCK * dim) / (BLOCK * dim)) * (f + 1) * (f + 1));
            }
}

TEST(golden) {
    static const uint64_t known[3] = {0xcf7527228b545469u, 0x5d1950d06977ad62u, 0x80f61573f4f562a2u};
    static const int dims[] = {2, 24, 80, 128};
    int f, i, side, flags;
    if (FAST_MATH) SKIP("encoders may round otherwise");
    for (f = 0; f < 3; f++) {
        tkv_rng r = tkv_rng_seed(99);
        uint64_t h = HASH_START;
        for (i = 0; i < COUNT(dims); i++)
            for (side = 0; side < 2; side++)
                for (flags = 0; flags < 16; flags++) {
                    tkv_codec c = make_codec(kvquant_formats[f], side, dims[i]);
                    c.options.kvquant = flags;
                    c.rope = rope_of(dims[i], flags % 3 ? 0 : 500000, flags % 2, 0);
                    c.position = flags * 4321;
                    fill_input(&r, flags % 6, 50, dims[i]);
                    CHECK_EQ(tkv_encode_block(&c, in, 0, 50, bytes, sizeof bytes), TKV_OK);
                    CHECK_EQ(tkv_decode_block(&c, bytes, sizeof bytes, 50, out, 0), TKV_OK);
                    h = hash_of_floats(hash_of(h, bytes, tkv_get_block_bytes(&c)), out, 50 * dims[i]);
                }
        CHECK_MSG(h == known[f], "%s: %016llx", format_name(kvquant_formats[f]), (unsigned long long)h);
    }
}

/* >>in a cache */
enum { HEADS = 2, TOKENS = 2048, MAX_DIM = 128 };

/* Keys and values like those of a model: before RoPE, channels of keys have ranges and means. */
typedef struct model_sequence {
    tkv_config cfg;
    int dim, v_dim, outlier_factor;
    tkv_rng rng;
    int at;
    float k[TOKENS * HEADS * MAX_DIM], v[TOKENS * HEADS * MAX_DIM];
} model_sequence;

static model_sequence the_sequence;
static float read_k[TOKENS * HEADS * MAX_DIM], read_v[TOKENS * HEADS * MAX_DIM];
static float q[64 * HEADS * 2 * MAX_DIM], out_attend[64 * HEADS * 2 * MAX_DIM],
    out_reference[64 * HEADS * 2 * MAX_DIM];

/* outlier_factor: one value in a hundred is multiplied by it; 0: none. */
static model_sequence *make_sequence(tkv_format k, tkv_format v, int dim, int v_dim, int outlier_factor,
                                     uint64_t seed) {
    model_sequence *s = &the_sequence;
    int t, h, c;
    memset(s, 0, sizeof *s);
    s->dim = dim, s->v_dim = v_dim, s->outlier_factor = outlier_factor;
    s->cfg.model.n_layers = 1, s->cfg.model.n_heads = 2 * HEADS, s->cfg.model.n_kv_heads = HEADS;
    s->cfg.model.head_dim = dim, s->cfg.model.v_head_dim = v_dim;
    s->cfg.tiers.hot.k = s->cfg.tiers.hot.v = TKV_F32;
    s->cfg.tiers.hot_tokens = 64;
    s->cfg.tiers.warm_tokens = TKV_OFF;
    s->cfg.tiers.archive.k = k, s->cfg.tiers.archive.v = v;
    s->cfg.tiers.warm = s->cfg.tiers.archive; /* the default, A and R, would learn tables, too */
    s->cfg.model.rope = rope_of(dim & ~1, 0, 0, 0);
    s->cfg.host.isa = tkv_test_isa();
    s->rng = tkv_rng_seed(seed);
    for (t = 0; t < TOKENS; t++)
        for (h = 0; h < HEADS; h++) {
            float key[MAX_DIM] = {0.0f};
            double y[MAX_DIM];
            for (c = 0; c < dim; c++) {
                double g = tkv_rng_gauss(&s->rng), size = c % 11 == 3 ? 6 : c % 5 ? 1 : 0.2;
                if (outlier_factor && tkv_rng_below(&s->rng, 100) == 0) g *= outlier_factor;
                key[c] = (float)(size * g + (c % 7 == 2 ? 12 : 0));
            }
            apply_rope_naively(&s->cfg.model.rope, t, 1, key, y, dim);
            for (c = 0; c < dim; c++) s->k[(t * HEADS + h) * dim + c] = (float)y[c];
            for (c = 0; c < v_dim; c++) {
                double g = tkv_rng_gauss(&s->rng);
                if (outlier_factor && tkv_rng_below(&s->rng, 100) == 0) g *= outlier_factor;
                s->v[(t * HEADS + h) * v_dim + c] = (float)g;
            }
        }
    return s;
}

static int append_tokens(tkv_cache *kv, model_sequence *s, int seq, int n, int chunk) {
    int end = s->at + n;
    while (s->at < end) {
        int m = end - s->at < chunk ? end - s->at : chunk;
        tkv_status st =
            tkv_append(kv, seq, 0, s->k + s->at * HEADS * s->dim, s->v + s->at * HEADS * s->v_dim, m);
        if (st) return st;
        s->at += m;
    }
    return TKV_OK;
}

/* Mean square errors of K and V of the archive, relative to the mean squares. The table is of the first 512 tokens. */
typedef struct decode_errors {
    double k, v, ratio_k, ratio_v; /* ratio: mean square after decoding / before */
} decode_errors;

static decode_errors measure_errors(tkv_config cfg, model_sequence *s) {
    decode_errors e;
    tkv_cache *kv = NULL;
    tkv_layer_info info;
    const float *k, *v;
    const int first = 4;
    int n;
    memset(&e, 0, sizeof e);
    s->at = 0;
    if (tkv_create(&cfg, &kv) != TKV_OK) {
        CHECK(0);
        return e;
    }
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK); /* an open step makes no table */
    CHECK_EQ(append_tokens(kv, s, 0, 512, 100), TKV_OK);
    CHECK_EQ(tkv_seq_commit(kv, 0), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(append_tokens(kv, s, 0, TOKENS - 512, 100), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    n = info.tokens[TKV_TIER_ARCHIVE];
    CHECK(n >= TOKENS - 256);
    k = s->k + first * HEADS * s->dim;
    v = s->v + first * HEADS * s->v_dim;
    CHECK_EQ(tkv_read(kv, 0, 0, first, n, read_k, read_v), TKV_OK);
    e.k = squared_error(read_k, k, n * HEADS * s->dim);
    e.v = squared_error(read_v, v, n * HEADS * s->v_dim);
    e.ratio_k = sum_of_squares(read_k, n * HEADS * s->dim) / sum_of_squares(k, n * HEADS * s->dim);
    e.ratio_v = sum_of_squares(read_v, n * HEADS * s->v_dim) / sum_of_squares(v, n * HEADS * s->v_dim);
    e.k /= sum_of_squares(k, n * HEADS * s->dim);
    e.v /= sum_of_squares(v, n * HEADS * s->v_dim);
    check_cache(kv);
    tkv_destroy(kv);
    return e;
}

TEST(each_part_lowers_errors) {
    decode_errors e[3], o;
    model_sequence *s = NULL;
    int f, show = getenv("TKV_TEST_SHOW") != NULL;
    for (f = 0; f < 3; f++) {
        s = make_sequence(kvquant_formats[f], kvquant_formats[f], 64, 64, 8, 20);
        e[f] = measure_errors(s->cfg, s);
        if (show) printf("\n    %d bits: K %.4g V %.4g", 2 + f, e[f].k, e[f].v);
        if (f) CHECK_LE(e[f].k, 0.45 * e[f - 1].k); /* one bit more */
        if (f) CHECK_LE(e[f].v, 0.45 * e[f - 1].v);
        s->cfg.format.kvquant = TKV_KVQUANT_UNIFORM;
        o = measure_errors(s->cfg, s);
        if (show) printf(", uniform %.4g %.4g", o.k, o.v);
        CHECK_LE(e[f].k, 0.85 * o.k);
        CHECK_LE(e[f].v, 0.97 * o.v);
        s->cfg.format.kvquant = TKV_KVQUANT_DENSE;
        o = measure_errors(s->cfg, s);
        if (show) printf(", dense %.4g %.4g", o.k, o.v);
        CHECK_LE(e[f].k, 0.6 * o.k);
        CHECK_LE(e[f].v, 0.8 * o.v);
        s->cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
        o = measure_errors(s->cfg, s);
        if (show) printf(", post-RoPE %.4g", o.k);
        CHECK_LE(e[f].k, 0.5 * o.k);
        CHECK_NEAR(e[f].v, o.v, 0);
        s->cfg.format.kvquant = TKV_KVQUANT_NORM;
        o = measure_errors(s->cfg, s);
        if (show)
            printf(", norm %.4g %.4g, variance of V %.4g after %.4g", o.k, o.v, o.ratio_v, e[f].ratio_v);
        CHECK_NEAR(o.ratio_v, 1, 0.04); /* outliers differ from token to token */
        CHECK_LE(fabs(1 - o.ratio_v), fabs(1 - e[f].ratio_v));
        CHECK_LE(fabs(1 - o.ratio_k), 0.01);
    }
    /* without outliers Q-Norm restores the variance, also of keys */
    s = make_sequence(TKV_KVQUANT2, TKV_KVQUANT2, 64, 64, 0, 34);
    o = measure_errors(s->cfg, s);
    CHECK_LE(o.ratio_v, 0.93);
    s->cfg.format.kvquant = TKV_KVQUANT_NORM;
    o = measure_errors(s->cfg, s);
    CHECK_NEAR(o.ratio_v, 1, 0.04); /* a token's middle is correlated with its values */
    CHECK_NEAR(o.ratio_k, 1, 0.005);
    /* with POST_ROPE the model's RoPE changes nothing */
    s->cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    s->cfg.model.rope.dim = 0;
    o = measure_errors(s->cfg, s);
    s->cfg.model.rope.dim = 64;
    CHECK_NEAR(o.k, measure_errors(s->cfg, s).k, 0);
}

/* A format that codes keys before RoPE needs the model's RoPE, or the option to code them after it. */
TEST(keys_need_rope_or_post_rope) {
    static const char *const presets[] = {"kvquant-3", "adr", "by-context", "by-length", "extreme_context"};
    int i, j;
    for (i = 0; tkv_get_name(TKV_NAME_PRESET, (int)i); i++) {
        char reason[240];
        tkv_config cfg = tkv_default_config();
        int needs_rope = 0;
        for (j = 0; j < COUNT(presets); j++)
            needs_rope |= strcmp(presets[j], tkv_get_name(TKV_NAME_PRESET, (int)i)) == 0;
        cfg.model.n_layers = cfg.model.n_heads = 1;
        cfg.model.head_dim = 64;
        CHECK_EQ(tkv_apply_preset(&cfg, tkv_get_name(TKV_NAME_PRESET, (int)i)), TKV_OK);
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), needs_rope ? TKV_ERR_CONFIG : TKV_OK);
        if (needs_rope) CHECK(strstr(reason, "rope.dim") && strstr(reason, "TKV_KVQUANT_POST_ROPE"));
        cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
        cfg.format.kvquant = 0;
        cfg.model.rope.dim = 64;
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
        cfg.model.rope.dim = 0;
        cfg.budget.ladder = NULL; /* of "by-length" */
        cfg.budget.n_levels = 0;
        cfg.tiers.warm.k = cfg.tiers.archive.k = TKV_KIVI4; /* values need no RoPE */
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
        cfg.tiers.archive = pair_of(TKV_KVQUANT2, TKV_KVQUANT2);
        cfg.tiers.warm_tokens = TKV_UNLIMITED; /* no block enters the archive */
        CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    }
}

/* A block's bytes in the store and the saved table, read by the second reader, give the values of tkv_read. */
TEST(offloaded_blocks_and_saved_tables) {
    int f, flags, h, t, c, i, b;
    for (f = 0; f < 3; f++)
        for (flags = 0; flags < 16; flags += tkv_test_quick() ? 5 : 1) {
            int dim = flags % 3 ? 48 : 104, v_dim = flags % 2 ? 80 : 128, bits = 2 + f, wrong = 0;
            model_sequence *s =
                make_sequence(kvquant_formats[f], kvquant_formats[(f + flags) % 3], dim, v_dim, 5, 21);
            int v_bits = 2 + (f + flags) % 3, n, block = 3;
            const uint8_t *at, *saved_table;
            size_t size = 0;
            double radius[128], middle[128], worst = 0, largest = 0;
            tkv_layer_info info;
            tkv_cache *kv = NULL;
            test_store d;
            int offloaded = 0;
            s->cfg.format.kvquant = flags;
            /* with interleaved RoPE the keys were not made for it, so only the bytes are checked */
            s->cfg.model.rope.interleaved = f % 2;
            attach_test_store(&d, &s->cfg);
            REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
            CHECK_EQ(append_tokens(kv, s, 0, 500, 33), TKV_OK);
            CHECK_EQ(tkv_save_calibration(kv, NULL, 0, &size), TKV_OK);
            CHECK_EQ(size, 24 + 4 + 8 + 8 + 224 + HEADS * dim * 6);
            CHECK_EQ(tkv_save_calibration(kv, other, sizeof other, &size), TKV_OK);
            CHECK_EQ(other[24], 2);
            saved_table = other + 24 + 4 + 8;
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
            n = info.tokens[TKV_TIER_ARCHIVE];
            CHECK(n >= 64 * 5);
            CHECK_EQ(tkv_offload(kv, 0, 0, 1 + block, &offloaded), TKV_OK);
            REQUIRE(offloaded == 1 + block); /* the store has the bytes of the block, in one part per head */
            CHECK_EQ(tkv_read(kv, 0, 0, 4 + 64 * block, 64, read_k, read_v), TKV_OK);
            for (h = 0; h < HEADS; h++) {
                block_reader k = make_reader(kvquant_formats[f], 0, dim, flags, 10, NULL), v;
                v = make_reader(kvquant_formats[(f + flags) % 3], 1, v_dim, flags, 10, NULL);
                k.src = d.key[d.last_key].bytes + d.key[d.last_key].at[h];
                v.src = k.src + align64((size_t)(BLOCK * ((dim * bits + 7) / 8))) +
                        align64((size_t)(4 + 3 * BLOCK * k.n_slots));
                at = saved_table;
                for (i = 0; i < 2; i++)
                    for (b = 2; b <= 4; b++, at += 4 << (b - 1))
                        for (c = 0; c < 1 << b; c++) {
                            double x = read_f16(at + 2 * c + (flags & TKV_KVQUANT_NORM ? 2 << b : 0));
                            if (i == 0 && b == bits) k.level[c] = x;
                            if (i == 1 && b == v_bits) v.level[c] = x;
                        }
                CHECK(at == saved_table + 224);
                at += h * dim * 6;
                for (c = 0; c < dim; c++) {
                    radius[c] = read_f16(at + 2 * c);
                    middle[c] = float_at(at + 2 * dim + 4 * c);
                }
                k.radius = radius, k.middle = middle;
                for (t = 0; t < 64; t++) {
                    float key[128];
                    double y[128];
                    for (c = 0; c < v_dim; c++)
                        wrong += fabs(read_value(&v, t, c) - (double)read_v[(t * HEADS + h) * v_dim + c]) > 0;
                    for (c = 0; c < dim; c++) key[c] = (float)read_value(&k, t, c);
                    for (c = 0; c < dim; c++) y[c] = (double)key[c];
                    if (!(flags & TKV_KVQUANT_POST_ROPE))
                        apply_rope_naively(&s->cfg.model.rope, 4 + 64 * block + t, 1, key, y, dim);
                    for (c = 0; c < dim; c++) {
                        double e = fabs(y[c] - (double)read_k[(t * HEADS + h) * dim + c]);
                        worst = e > worst ? e : worst;
                        largest = fabs(y[c]) > largest ? fabs(y[c]) : largest;
                    }
                }
            }
            CHECK_EQ(wrong, 0);
            CHECK_LE(worst, 5e-7 * largest);
            check_cache(kv);
            tkv_destroy(kv);
            destroy_test_store(&d);
        }
}

/* Reads the saved table of the only layer: the levels of a side. */
static void get_saved_levels(const tkv_cache *kv, int side, int bits, float *level) {
    const uint8_t *at = other + 24 + 4 + 8 + (side ? 112 : 0);
    size_t size;
    int b, c;
    CHECK_EQ(tkv_save_calibration(kv, other, sizeof other, &size), TKV_OK);
    for (b = 2; b < bits; b++) at += 4 << (b - 1);
    for (c = 0; c < 1 << bits; c++) level[c] = (float)read_f16(at + 2 * c);
}

/* Reads the radius and then the middle of the ranges of a head's channels. */
static void get_saved_range(const tkv_cache *kv, int head, int dim, float *range) {
    const uint8_t *at = other + 24 + 4 + 8 + 224 + head * dim * 6;
    size_t size;
    int c;
    CHECK_EQ(tkv_save_calibration(kv, other, sizeof other, &size), TKV_OK);
    for (c = 0; c < dim; c++) {
        range[c] = (float)read_f16(at + 2 * c);
        range[dim + c] = (float)float_at(at + 2 * dim + 4 * c);
    }
}

/* Ranges are percentiles of the samples' keys before RoPE. */
TEST(ranges_are_percentiles) {
    static const int counts[] = {1, 2, 150, 199, 200, 700, 2048};
    int i, flags, t, c, h, k;
    for (i = 0; i < COUNT(counts); i++)
        for (flags = 0; flags < 16; flags += 8) {
            int n = counts[i], share = i % 2 ? 30 : 10, n_excluded = flags ? 0 : n * share / 2000;
            model_sequence *s = make_sequence(TKV_KVQUANT3, TKV_KVQUANT3, 128, 16, 6, 22);
            tkv_samples samples;
            tkv_cache *kv = NULL;
            s->cfg.format.kvquant = flags;
            s->cfg.format.kvquant_outliers = share;
            REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
            memset(&samples, 0, sizeof samples);
            samples.n = n;
            samples.k = s->k;
            samples.v = s->v;
            CHECK_EQ(tkv_fit_calibration(kv, &samples), TKV_OK);
            CHECK_EQ(n_calibrated_layers(kv), 1);
            for (h = 0; h < HEADS; h++) {
                float range[2 * 128];
                static double keys[TOKENS][128];
                double worst = 0;
                get_saved_range(kv, h, 128, range);
                for (t = 0; t < n; t++)
                    apply_rope_naively(&s->cfg.model.rope, t, -1, s->k + (t * HEADS + h) * 128, keys[t], 128);
                for (c = 0; c < 128; c++) {
                    double low = -1e9, high = 1e9, e;
                    for (k = 0; k <= n_excluded; k++) { /* the next value inwards */
                        double lo = 1e9, hi = -1e9;
                        for (t = 0; t < n; t++) {
                            if (keys[t][c] > low && keys[t][c] < lo) lo = keys[t][c];
                            if (keys[t][c] < high && keys[t][c] > hi) hi = keys[t][c];
                        }
                        low = lo, high = hi;
                    }
                    e = fabs((double)range[128 + c] - 0.5 * (low + high)) / 100;
                    worst = e > worst ? e : worst;
                    e = fabs((double)range[c] - 0.5 * (high - low)) - 0.5 * (high - low) / 2048;
                    worst = e > worst ? e : worst;
                }
                CHECK_LE(worst, 5e-6);
            }
            tkv_destroy(kv);
        }
}

/* Levels move to the values with large weights. The squared range of a channel is part of its weights. */
TEST(weights_move_levels) {
    static float weight[TOKENS * HEADS * 64];
    model_sequence *s = make_sequence(TKV_KVQUANT2, TKV_KVQUANT2, 64, 64, 0, 23);
    tkv_samples samples;
    tkv_cache *kv = NULL;
    float level[4], before[4];
    double sums[2] = {0, 0};
    int i, c;
    s->cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
    memset(&samples, 0, sizeof samples);
    samples.n = TOKENS;
    samples.k = s->k;
    samples.v = s->v;
    CHECK_EQ(tkv_fit_calibration(kv, &samples), TKV_OK);
    get_saved_levels(kv, TKV_V, 2, before);
    CHECK_NEAR(before[0] + before[3], 0, 0.05);
    for (i = 0; i < COUNT(weight); i++)
        weight[i] = s->v[i] > 0.3f ? 1e-12f : 1e-15f; /* only ratios of weights matter */
    samples.v_weight = weight;
    CHECK_EQ(tkv_fit_calibration(kv, &samples), TKV_OK);
    get_saved_levels(kv, TKV_V, 2, level);
    for (i = 0, c = 0; i < 4; i++) c += level[i] > 0.1f;
    CHECK(c == 4 || (c == 3 && level[0] < 0.2f));
    /* the same weights for all change nothing */
    for (i = 0; i < COUNT(weight); i++) weight[i] = 1024.0f;
    CHECK_EQ(tkv_fit_calibration(kv, &samples), TKV_OK);
    get_saved_levels(kv, TKV_V, 2, level);
    CHECK_MEM(before, level, sizeof before);
    /* all zero: the standard levels */
    memset(weight, 0, sizeof weight);
    CHECK_EQ(tkv_fit_calibration(kv, &samples), TKV_OK);
    get_saved_levels(kv, TKV_V, 2, level);
    CHECK_NEAR(level[3], 1340 / 2048.0, 0);
    /* a channel with a wide range counts by its square: it alone gives the levels */
    for (i = 0; i < TOKENS * HEADS; i++)
        for (c = 0; c < 64; c++)
            s->k[i * 64 + c] = (float)(c == 9 ? i / 2 % 4 * 100 - 150 : (i % 7 - 3) * 0.01);
    samples.v_weight = NULL;
    CHECK_EQ(tkv_fit_calibration(kv, &samples), TKV_OK);
    get_saved_levels(kv, TKV_K, 2, level);
    for (i = 0; i < 4; i++) CHECK_NEAR(level[i], -1 + i * 2 / 3.0, 2e-3);
    for (i = 0; i < 4; i++) sums[i / 2] += (double)level[i];
    CHECK_NEAR(sums[0], -sums[1], 1e-2);
    tkv_destroy(kv);
}

TEST(fit_refuses_bad_samples) {
    static float weight[TOKENS * HEADS * 16];
    model_sequence *s = make_sequence(TKV_KVQUANT2, TKV_KVQUANT2, 16, 16, 0, 24);
    tkv_layer_config layers[4];
    tkv_samples good, x;
    tkv_cache *kv = NULL;
    memset(layers, 0, sizeof layers);
    layers[1].archive.k = TKV_KIVI2;
    layers[1].archive.v = TKV_KIVI2;
    layers[1].warm = layers[1].archive;
    layers[2].archive.k = TKV_A30;
    layers[3].share_kv = 1;
    s->cfg.layers = layers;
    s->cfg.model.n_layers = 4;
    REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
    memset(&good, 0, sizeof good);
    good.n = 100;
    good.k = s->k;
    good.v = s->v;
    CHECK_EQ(tkv_fit_calibration(NULL, &good), TKV_ERR_ARG);
    CHECK_EQ(tkv_fit_calibration(kv, NULL), TKV_ERR_ARG);
#define BAD(field, value, status)                                                                            \
    x = good;                                                                                                \
    x.field = value;                                                                                         \
    CHECK_EQ(tkv_fit_calibration(kv, &x), status)
    BAD(k, NULL, TKV_ERR_ARG);
    BAD(v, NULL, TKV_ERR_ARG);
    BAD(layer, -1, TKV_ERR_ARG);
    BAD(layer, 4, TKV_ERR_ARG);
    BAD(layer, 1, TKV_ERR_ARG);
    BAD(layer, 2, TKV_ERR_ARG);
    BAD(layer, 3, TKV_ERR_ARG);
    BAD(n, 0, TKV_ERR_ARG);
    BAD(n, (1 << 18) + 1, TKV_ERR_ARG);
    BAD(start, -1, TKV_ERR_ARG);
    BAD(start, 0x3fffffff, TKV_ERR_ARG);
    BAD(length, -1, TKV_ERR_ARG);
    weight[50] = -1.0f;
    BAD(k_weight, weight, TKV_ERR_NONFINITE);
    weight[50] = tkv_test_float(0x7fc00000u);
    BAD(v_weight, weight, TKV_ERR_NONFINITE);
    BAD(v, weight, TKV_ERR_NONFINITE);
    CHECK_EQ(n_calibrated_layers(kv), 0);
    CHECK_EQ(tkv_seq_begin(kv, 0), TKV_OK);
    CHECK_EQ(tkv_fit_calibration(kv, &good), TKV_ERR_STATE);
    CHECK_EQ(tkv_seq_abort(kv, 0), TKV_OK);
    CHECK_EQ(tkv_fit_calibration(kv, &good), TKV_OK);
    CHECK_EQ(n_calibrated_layers(kv), 1);
    tkv_destroy(kv);
}

/* Each sequence of samples starts at position 0: a sequence of 512 tokens twice has the ranges of one. */
TEST(fit_restarts_positions) {
    model_sequence *s = make_sequence(TKV_KVQUANT4, TKV_KVQUANT4, 32, 32, 0, 25);
    tkv_cache *kv = NULL;
    tkv_samples x;
    float range[2][64];
    REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
    memset(&x, 0, sizeof x);
    x.n = 512;
    x.k = s->k;
    x.v = s->v;
    CHECK_EQ(tkv_fit_calibration(kv, &x), TKV_OK);
    get_saved_range(kv, 1, 32, range[0]);
    memcpy(s->k + 512 * HEADS * 32, s->k, 512 * HEADS * 32 * sizeof *s->k);
    x.n = 1024;
    x.length = 512; /* the sixth largest of 512 pairs is the third largest of 512 values */
    CHECK_EQ(tkv_fit_calibration(kv, &x), TKV_OK);
    get_saved_range(kv, 1, 32, range[1]);
    CHECK_MEM(range[0], range[1], sizeof range[0]);
    tkv_destroy(kv);
}

/* >>tables: learning, saving, versions */
TEST(blocks_wait_for_a_table) {
    int warm, chunk;
    for (warm = 0; warm < 2; warm++)
        for (chunk = 1; chunk <= 128; chunk *= 4) {
            model_sequence *s = make_sequence(TKV_KVQUANT3, TKV_KVQUANT3, 32, 32, 0, 26);
            tkv_layer_info info;
            tkv_cache *kv = NULL;
            if (warm) s->cfg.tiers.warm = s->cfg.tiers.archive, s->cfg.tiers.warm_tokens = 128;
            REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
            CHECK_EQ(append_tokens(kv, s, 0, 240, chunk), TKV_OK);
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
            CHECK_EQ(info.tokens[TKV_TIER_HOT], 240);
            CHECK_EQ(n_calibrated_layers(kv), 0);
            CHECK_EQ(tkv_read(kv, 0, 0, 0, 240, read_k, read_v), TKV_OK);
            CHECK_MEM(read_k, s->k, 240 * HEADS * 32 * sizeof *read_k); /* exact */
            check_cache(kv);
            CHECK_EQ(append_tokens(kv, s, 0, 200, chunk), TKV_OK);
            CHECK_EQ(n_calibrated_layers(kv), 1);
            CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
            CHECK(info.tokens[TKV_TIER_HOT] < 4 + 64 + 64 + 128);
            check_cache(kv);
            tkv_destroy(kv);
        }
}

TEST(short_sequences) {
    model_sequence *s = make_sequence(TKV_KVQUANT2, TKV_KVQUANT2, 64, 64, 0, 27);
    tkv_layer_info info;
    tkv_cache *kv = NULL;
    s->cfg.limits.max_seqs = 20;
    REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_ERR_STATE); /* no tokens to learn from */
    CHECK_EQ(append_tokens(kv, s, 0, 5, 5), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK); /* four sinks and one token are enough */
    CHECK_EQ(n_calibrated_layers(kv), 1);
    CHECK_EQ(append_tokens(kv, s, 0, 300, 64), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK_EQ(info.tokens[TKV_TIER_ARCHIVE], 301);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 305, read_k, read_v), TKV_OK);
    check_cache(kv);
    tkv_destroy(kv);
    REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK); /* sequences of 100 tokens */
    {
        int seq;
        for (seq = 0; seq < 20; seq++) {
            s->at = seq * 100;
            CHECK_EQ(append_tokens(kv, s, seq, 100, 7), TKV_OK);
            CHECK_EQ(n_calibrated_layers(kv), seq >= 2); /* after 300 tokens */
        }
        for (seq = 0; seq < 20; seq++) {
            s->at = seq * 100;
            CHECK_EQ(append_tokens(kv, s, seq, 48, 48), TKV_OK);
            CHECK_EQ(tkv_get_layer(kv, seq, 0, &info), TKV_OK);
            check_cache(kv);
            CHECK_EQ(tkv_seq_flush(kv, seq, TKV_FLUSH_FULL), TKV_OK);
            CHECK_EQ(tkv_get_layer(kv, seq, 0, &info), TKV_OK);
            CHECK_EQ(info.tokens[TKV_TIER_ARCHIVE], 128);
        }
    }
    check_cache(kv);
    tkv_destroy(kv);
}

TEST(saved_tables) {
    model_sequence *s = make_sequence(TKV_KVQUANT3, TKV_KVQUANT2, 64, 48, 3, 28);
    static uint8_t saved[8192], again[8192];
    tkv_cache *a = NULL, *b = NULL;
    tkv_layer_info info;
    size_t size = 0, size2 = 0, i;
    tkv_config cfg;
    int wrong = 0, k;
    REQUIRE(tkv_create(&s->cfg, &a) == TKV_OK);
    CHECK_EQ(append_tokens(a, s, 0, 500, 50), TKV_OK);
    CHECK_EQ(tkv_save_calibration(a, saved, sizeof saved, &size), TKV_OK);
    CHECK_EQ(tkv_save_calibration(a, again, size - 1, &size2), TKV_ERR_CAPACITY);
    REQUIRE(tkv_create(&s->cfg, &b) == TKV_OK);
    CHECK_EQ(tkv_load_calibration(b, saved, size), TKV_OK);
    CHECK_EQ(tkv_save_calibration(b, again, sizeof again, &size2), TKV_OK);
    CHECK_EQ(size, size2);
    CHECK_MEM(saved, again, size);
    s->at = 0;
    CHECK_EQ(append_tokens(b, s, 0, 500, 50), TKV_OK); /* compresses at once */
    CHECK_EQ(tkv_read(a, 0, 0, 0, 500, read_k, read_v), TKV_OK);
    CHECK_EQ(tkv_read(b, 0, 0, 0, 500, read_k + TOKENS * HEADS * 32, NULL), TKV_OK);
    CHECK_MEM(read_k, read_k + TOKENS * HEADS * 32, 500 * HEADS * 64 * sizeof *read_k);
    tkv_destroy(b);
    /* the table serves other widths and Q-Norm */
    cfg = s->cfg;
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KVQUANT4;
    cfg.format.kvquant = TKV_KVQUANT_NORM;
    REQUIRE(tkv_create(&cfg, &b) == TKV_OK);
    CHECK_EQ(tkv_load_calibration(b, saved, size), TKV_OK);
    CHECK_EQ(n_calibrated_layers(b), 1);
    s->at = 0;
    CHECK_EQ(append_tokens(b, s, 0, 300, 50), TKV_OK);
    CHECK_EQ(tkv_get_layer(b, 0, 0, &info), TKV_OK);
    CHECK(info.tokens[TKV_TIER_ARCHIVE] >= 128);
    tkv_destroy(b);
    /* it does not serve another RoPE, mode or model */
    for (k = 0; k < 10; k++) {
        cfg = s->cfg;
        if (k == 0) cfg.model.rope.base = 20000;
        if (k == 1) cfg.model.rope.interleaved = 1;
        if (k == 2) cfg.model.rope.dim = 32;
        if (k == 3) cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
        if (k == 4) cfg.format.kvquant = TKV_KVQUANT_UNIFORM;
        if (k == 5) cfg.format.kvquant = TKV_KVQUANT_DENSE;
        if (k == 6) cfg.model.v_head_dim = 64;
        if (k == 7) cfg.format.kvquant = TKV_KVQUANT_UNIFORM_K;
        if (k == 8) cfg.format.kvquant = TKV_KVQUANT_UNIFORM_V;
        if (k == 9) cfg.format.kvquant_outliers = 9;
        REQUIRE(tkv_create(&cfg, &b) == TKV_OK);
        CHECK_EQ(tkv_load_calibration(b, saved, size), TKV_ERR_DATA);
        CHECK_EQ(n_calibrated_layers(b), 0);
        tkv_destroy(b);
    }
    /* a cache without these formats ignores it */
    cfg = s->cfg;
    cfg.tiers.archive.k = TKV_A30;
    cfg.tiers.archive.v = TKV_R30;
    cfg.tiers.warm = cfg.tiers.archive;
    cfg.model.rope.base = 20000;
    REQUIRE(tkv_create(&cfg, &b) == TKV_OK);
    CHECK_EQ(tkv_load_calibration(b, saved, size), TKV_OK);
    CHECK_EQ(n_calibrated_layers(b), 0);
    tkv_destroy(b);
    /* a damaged or truncated table is refused, and so are invalid values with a right checksum */
    REQUIRE(tkv_create(&s->cfg, &b) == TKV_OK);
    for (i = 0; i < size; i++) {
        saved[i] ^= 0x10;
        wrong += tkv_load_calibration(b, saved, size) != TKV_ERR_DATA;
        saved[i] ^= 0x10;
        wrong += tkv_load_calibration(b, saved, i) != TKV_ERR_DATA;
    }
    CHECK_EQ(wrong, 0);
    for (k = 0; k < 8; k++) {
        static const struct {
            size_t at;
            uint8_t byte;
        } bad[8] = {{36 + 1, 0x7c},
                    {36 + 1, 0x40},
                    {36 + 3, 0xbd},
                    {36 + 224 + 1, 0x7c},
                    {36 + 224 + 1, 0x80},
                    {36 + 224 + 128 + 3, 0x7f},
                    {36 + 224 + 128 + 3, 0x49},
                    {24, 4}};
        uint64_t sum;
        memcpy(again, saved, size);
        again[bad[k].at] = bad[k].byte;
        if (k == 0) again[36] = 1; /* a NaN */
        if (k == 6) again[36 + 224 + 128 + 2] = 0xff;
        sum = hash_of(HASH_START, again, size - 8);
        for (i = 0; i < 8; i++) again[size - 8 + i] = (uint8_t)(sum >> 8 * i & 255u);
        CHECK_EQ(tkv_load_calibration(b, again, size), TKV_ERR_DATA);
    }
    CHECK_EQ(n_calibrated_layers(b), 0);
    CHECK_EQ(tkv_load_calibration(b, saved, size), TKV_OK);
    tkv_destroy(b);
    tkv_destroy(a);
}

/* KVQUANT with A or R in one cache, and in one layer: all their tables are learned, saved and loaded. */
TEST(tables_of_several_formats) {
    model_sequence *s = make_sequence(TKV_KVQUANT3, TKV_R20, 64, 64, 0, 29);
    static uint8_t saved[16384];
    tkv_layer_config layers[3];
    tkv_cache *a = NULL, *b = NULL;
    size_t size = 0;
    int l, k;
    memset(layers, 0, sizeof layers);
    layers[1].archive.v = TKV_KVQUANT2; /* KVQUANT for K and V */
    layers[1].warm.v = TKV_KVQUANT2;
    layers[2].archive.k = layers[2].warm.k = TKV_A30; /* A and R only */
    s->cfg.model.n_layers = 3;
    s->cfg.layers = layers;
    REQUIRE(tkv_create(&s->cfg, &a) == TKV_OK);
    for (k = 0; k < 500; k += 50)
        for (l = 0; l < 3; l++) {
            CHECK_EQ(tkv_append(a, 0, l, s->k + k * HEADS * 64, s->v + k * HEADS * 64, 50), TKV_OK);
            CHECK_EQ(tkv_attend(a, 0, l, s->k + k * HEADS * 64, 10, out_attend), TKV_OK);
        }
    check_cache(a);
    CHECK_EQ(n_calibrated_layers(a), 3);
    CHECK_EQ(tkv_save_calibration(a, saved, sizeof saved, &size), TKV_OK);
    CHECK_EQ(saved[24], 3);
    REQUIRE(tkv_create(&s->cfg, &b) == TKV_OK);
    CHECK_EQ(tkv_load_calibration(b, saved, size), TKV_OK);
    CHECK_EQ(n_calibrated_layers(b), 3);
    for (k = 0; k < 500; k += 50)
        for (l = 0; l < 3; l++)
            CHECK_EQ(tkv_append(b, 0, l, s->k + k * HEADS * 64, s->v + k * HEADS * 64, 50), TKV_OK);
    for (l = 0; l < 3; l++) {
        CHECK_EQ(tkv_read(a, 0, l, 0, 400, read_k, read_v), TKV_OK);
        CHECK_EQ(tkv_read(b, 0, l, 0, 400, read_k + 400 * HEADS * 64, read_v + 400 * HEADS * 64), TKV_OK);
        CHECK_MEM(read_k, read_k + 400 * HEADS * 64, 400 * HEADS * 64 * sizeof *read_k);
        CHECK_MEM(read_v, read_v + 400 * HEADS * 64, 400 * HEADS * 64 * sizeof *read_v);
    }
    check_cache(b);
    tkv_destroy(b);
    /* a layer that needs two tables and loads one goes on learning */
    layers[1].archive.v = TKV_R20;
    REQUIRE(tkv_create(&s->cfg, &b) == TKV_OK);
    CHECK_EQ(tkv_load_calibration(b, saved, size), TKV_OK);
    CHECK_EQ(n_calibrated_layers(b), 2);
    tkv_destroy(b);
    tkv_destroy(a);
}

static void count_tables(void *user, const tkv_event *e) { *(int *)user += e->kind == TKV_EVENT_TABLE; }

/* tkv_refresh_calibration: two versions of a table exist side by side. */
TEST(table_versions) {
    model_sequence *s = make_sequence(TKV_KVQUANT2, TKV_KVQUANT2, 32, 32, 0, 30);
    static float before[320 * HEADS * 32];
    tkv_cache *kv = NULL;
    int i, tables = 0;
    s->cfg.limits.max_seqs = 2;
    s->cfg.host.on_event = count_tables;
    s->cfg.host.event_user = &tables;
    REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
    CHECK_EQ(append_tokens(kv, s, 0, 500, 64), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 320, before, NULL), TKV_OK);
    CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    for (i = 0; i < TOKENS * HEADS * 32; i++) s->k[i] *= 3;
    CHECK_EQ(tables, 1);
    s->at = 0;
    CHECK_EQ(append_tokens(kv, s, 0, 240, 64), TKV_OK);
    CHECK_EQ(tables, 1);
    CHECK_EQ(append_tokens(kv, s, 0, 100, 64), TKV_OK);
    CHECK_EQ(tables, 2);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 320, read_k, NULL), TKV_OK);
    CHECK_MEM(before, read_k, sizeof before);
    check_cache(kv);
    CHECK_EQ(tkv_seq_reset(kv, 0), TKV_OK); /* the old version is freed */
    CHECK_EQ(tkv_refresh_calibration(kv), TKV_OK);
    s->at = 0;
    CHECK_EQ(append_tokens(kv, s, 1, 360, 64), TKV_OK);
    CHECK_EQ(tables, 3);
    check_cache(kv);
    tkv_destroy(kv);
}

/* Attention that decodes these formats, compared with tkv_attend_reference, on every instruction set. */
TEST(attention) {
    static const tkv_isa isas[] = {TKV_ISA_SCALAR, TKV_ISA_AVX2, TKV_ISA_AVX512, TKV_ISA_NEON, TKV_ISA_WASM};
    static const int dims[][2] = {{2, 1}, {6, 3}, {16, 16}, {64, 64}, {80, 33}, {127, 128}};
    int d, i, f;
    for (d = 0; d < COUNT(dims); d++)
        for (i = 0; i < COUNT(isas); i++)
            for (f = 0; f < 3; f++) {
                model_sequence *s = make_sequence(kvquant_formats[f], kvquant_formats[(f + d) % 3],
                                                  dims[d][0], dims[d][1], 4, 31);
                int rows = 2 * 2 * HEADS * dims[d][1];
                tkv_attend_params p;
                tkv_cache *kv = NULL;
                double error;
                if (!is_isa_available(isas[i]) || (tkv_test_quick() && (d + i + f) % 3)) continue;
                s->cfg.host.isa = isas[i];
                s->cfg.format.kvquant = d % 2 ? TKV_KVQUANT_NORM : 0;
                if (d > 3) s->cfg.format.kvquant_outliers = d == 4 ? 5 : 30;
                s->cfg.model.rope.interleaved = f % 2;
                if (d >= 3 && (d + f) % 2)
                    s->cfg.model.rope.dim = 32; /* the other channels are not rotated */
                REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
                CHECK_EQ(append_tokens(kv, s, 0, 700 + 13 * d, 50), TKV_OK);
                tkv_rng_fill(&s->rng, q, (size_t)(2 * 2 * HEADS * dims[d][0]), 1);
                memset(&p, 0, sizeof p);
                p.n = 2;
                p.q = q;
                p.out = out_attend;
                CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
                p.out = out_reference;
                CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
                error = sqrt(squared_error(out_attend, out_reference, rows) /
                             sum_of_squares(out_reference, rows));
                CHECK_MSG(error <= 2e-5, "%s, head_dim %d and %d, %s: %g", format_name(kvquant_formats[f]),
                          dims[d][0], dims[d][1], tkv_get_name(TKV_NAME_ISA, (int)isas[i]), error);
                check_cache(kv);
                tkv_destroy(kv);
            }
}

/* Bytes by hand, as reported and as estimated. Also a cache in the caller's memory. */
TEST(bytes_of_a_cache) {
    static const double bits[3][2] = {{2.375, 2.625}, {3.375, 3.625}, {4.375, 4.625}};
    int f, side, i;
    for (f = 0; f < 3; f++) {
        model_sequence *s = make_sequence(kvquant_formats[f], kvquant_formats[f], 128, 128, 0, 32);
        tkv_memory_info m, estimate;
        tkv_cache *kv = NULL;
        size_t size = 0, coded, want_bytes = 0;
        void *mem;
        for (side = 0; side < 2; side++) {
            tkv_codec c = make_codec(kvquant_formats[f], side, 128);
            CHECK_NEAR(format_bits(&c), bits[f][side] + (side ? 0 : 0.5), 0.07); /* K has its ranges */
            c.options.kvquant = TKV_KVQUANT_DENSE;
            CHECK_NEAR(format_bits(&c), bits[f][side] + (side ? 0 : 0.5) - 0.375, 0.07);
            want_bytes += (size_t)(BLOCK * 128 / 8 * (2 + f)) + align64(side ? 640u : 388u);
        }
        REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
        CHECK_EQ(append_tokens(kv, s, 0, 1500, 1), TKV_OK);
        CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
        CHECK_EQ(tkv_estimate_memory(&s->cfg, 1500, 1, &estimate), TKV_OK);
        coded = m.tier[TKV_TIER_ARCHIVE].codes + m.tier[TKV_TIER_ARCHIVE].metadata;
        CHECK(m.tier[TKV_TIER_ARCHIVE].tokens >= 1300);
        CHECK_LE(coded, m.tier[TKV_TIER_ARCHIVE].tokens / BLOCK * HEADS * want_bytes);
        CHECK_LE(m.tier[TKV_TIER_ARCHIVE].tokens / BLOCK * HEADS * (want_bytes - 64), coded);
        CHECK_EQ(m.total, estimate.total);
        CHECK_EQ(m.tables, estimate.tables);
        CHECK(m.tables >= 2 * (2 * HEADS * 128 * sizeof(float) + 6 * 2 * 16 * sizeof(float)));
        tkv_destroy(kv);
        s->cfg.limits.max_tokens = 1600;
        s->cfg.tiers.warm.k = s->cfg.tiers.warm.v = TKV_KIVI4;
        s->cfg.tiers.warm_tokens = 200;
        REQUIRE(tkv_get_required_bytes(&s->cfg, &size, NULL) == TKV_OK);
        mem = malloc(size);
        REQUIRE(mem != NULL);
        REQUIRE(tkv_create_in_place(&s->cfg, mem, size, &kv, NULL, 0) == TKV_OK);
        s->at = 0;
        for (i = 0; i < 1600; i += 40) {
            CHECK_EQ(append_tokens(kv, s, 0, 40, 40), TKV_OK);
            CHECK_EQ(tkv_attend(kv, 0, 0, s->k, 4, out_attend), TKV_OK);
        }
        check_cache(kv);
        tkv_destroy(kv);
        free(mem);
    }
}

/* Sinks are exact; windows and truncation work as for other formats. */
TEST(presets_windows_and_truncation) {
    model_sequence *s = make_sequence(TKV_KVQUANT3, TKV_KVQUANT3, 64, 64, 0, 33);
    tkv_config cfg = s->cfg;
    tkv_cache *kv = NULL;
    tkv_layer_info info;
    tkv_format_pair pair = s->cfg.tiers.warm;
    CHECK_EQ(tkv_apply_preset(&cfg, "kvquant-3"), TKV_OK);
    REQUIRE(tkv_create(&cfg, &kv) == TKV_OK);
    CHECK_EQ(get_tier_formats(kv, 0, TKV_TIER_WARM, &pair), TKV_OK);
    CHECK(pair.k == TKV_KIVI4 && pair.v == TKV_KIVI4);
    CHECK_EQ(append_tokens(kv, s, 0, 1500, 100), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.tokens[TKV_TIER_WARM] >= 448 - 64 && info.tokens[TKV_TIER_ARCHIVE] >= 800);
    CHECK_EQ(tkv_seq_truncate(kv, 0, 1450), TKV_OK);
    check_cache(kv);
    tkv_destroy(kv);
    s->cfg.model.window = 700;
    s->cfg.tiers.sink_tokens = 8;
    REQUIRE(tkv_create(&s->cfg, &kv) == TKV_OK);
    s->at = 0;
    CHECK_EQ(append_tokens(kv, s, 0, 600, 100), TKV_OK);
    CHECK_EQ(tkv_read(kv, 0, 0, 0, 8, read_k, read_v), TKV_OK);
    CHECK_MEM(read_k, s->k, 8 * HEADS * 64 * sizeof *read_k);
    CHECK_EQ(append_tokens(kv, s, 0, 1400, 100), TKV_OK);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &info), TKV_OK);
    CHECK(info.expired > 1000);
    check_cache(kv);
    tkv_destroy(kv);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(bytes_follow_the_layout);
    RUN(outliers_are_kept);
    RUN(codecs_take_rope_of_the_first_channels);
    RUN(ends_of_a_range_are_no_outliers);
    RUN(extreme_values);
    RUN(any_bytes_decode);
    RUN(keys_are_rotated_back);
    RUN(golden);
    RUN(each_part_lowers_errors);
    RUN(keys_need_rope_or_post_rope);
    RUN(offloaded_blocks_and_saved_tables);
    RUN(ranges_are_percentiles);
    RUN(weights_move_levels);
    RUN(fit_refuses_bad_samples);
    RUN(fit_restarts_positions);
    RUN(blocks_wait_for_a_table);
    RUN(short_sequences);
    RUN(saved_tables);
    RUN(tables_of_several_formats);
    RUN(table_versions);
    RUN(attention);
    RUN(bytes_of_a_cache);
    RUN(presets_windows_and_truncation);
    return tkv_test_end();
}
