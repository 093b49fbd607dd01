/*
 * test_formats_other.c - INT8, INT4, FP8, FP4, the options of the encoders (fit, rotate, center_k), SQUAT.
 *
 * Each is compared with a second, simple version, which follows the papers and the documented layout of the bytes.
 * Other tests check published and measured numbers, and attention that decodes these formats.
 *
 * cc -O2 tests/test_formats_other.c examples/tieredkv.c -o test_formats_other -lm && ./test_formats_other [filter
 * | --list]
 */
#include "levels.h"
#include "stream.h"

enum { BLOCK = TKV_BLOCK_TOKENS, MAX_VALUES = BLOCK * TKV_MAX_HEAD_DIM };

static float in[MAX_VALUES], out[MAX_VALUES], want[MAX_VALUES];
static uint8_t bytes[4 * MAX_VALUES], other[4 * MAX_VALUES];

static const tkv_format decoded_formats[] = {TKV_INT8, TKV_INT4,      TKV_FP8_E4M3, TKV_FP8_E5M2,
                                             TKV_FP4,  TKV_SUBSPACE4, TKV_SUBSPACE2};
static const tkv_format tokenwise_formats[] = {TKV_INT8, TKV_INT4, TKV_FP8_E4M3, TKV_FP8_E5M2, TKV_FP4};
static const tkv_format grouped_formats[] = {TKV_Q8, TKV_KIVI4, TKV_KIVI3, TKV_KIVI2};

static tkv_codec make_codec(tkv_format format, int side, int dim, int group) {
    tkv_codec c;
    memset(&c, 0, sizeof c);
    c.format = format;
    c.side = side ? TKV_V : TKV_K;
    c.head_dim = dim;
    c.options.group_size = group;
    return c;
}

static const char *describe_codec(const tkv_codec *c, int n) {
    static char text[128];
    snprintf(text, sizeof text, "%s %c, head_dim %d, group %d, fit %d, rotate %d, center %d, %d tokens",
             tkv_get_name(TKV_NAME_FORMAT, (int)c->format), c->side == TKV_K ? 'K' : 'V', c->head_dim,
             c->options.group_size, c->options.fit, c->options.rotate, c->options.center_k, n);
    return text;
}

static void encode_and_decode(const tkv_codec *c, const float *x, int n, float *y) {
    CHECK_EQ(tkv_encode_block(c, x, 0, n, bytes, sizeof bytes), TKV_OK);
    CHECK_EQ(tkv_decode_block(c, bytes, sizeof bytes, n, y, 0), TKV_OK);
}

/* >>formats per token: a second encoder and decoder */
/* The values that n tokens should decode to without options. */
static void quantize_tokens_naively(tkv_format f, int dim, int group, const float *x, int n, float *y) {
    int t, c, p;
    int span = f == TKV_INT8 || f == TKV_INT4 ? group : dim;
    /* FP8 codes are divided by this, so that the largest level is 7 (E4M3) or 14 (E5M2) */
    double unit = f == TKV_FP8_E4M3 ? 64 : f == TKV_FP8_E5M2 ? 4096 : 1;
    for (t = 0; t < n; t++)
        for (c = 0; c < dim; c += span) {
            int end = c + span < dim ? c + span : dim, i;
            double most = 0, scale;
            for (i = c; i < end; i++) {
                double a = fabs((double)x[t * dim + i]);
                most = a > most ? a : most;
            }
            most = most > 65504 ? 65504 : most;
            scale = (double)as_float(most / (max_value_of(f) / unit));
            if (f == TKV_FP4) scale = (double)as_float(scale / 7.0);
            scale = round_to_f16(scale);
            for (p = c; p < end; p += f == TKV_FP4 ? 16 : end) {
                int stop = f == TKV_FP4 && p + 16 < end ? p + 16 : end;
                double part_scale = 1;
                if (f == TKV_FP4) {
                    for (most = 0, i = p; i < stop; i++) {
                        double a = fabs((double)x[t * dim + i]);
                        most = a > most ? a : most;
                    }
                    most = most > 65504 ? 65504 : most;
                    part_scale = scale > 0 ? (double)as_float((double)as_float(most / 6.0) / scale) : 0;
                    part_scale = round_to_minifloat(part_scale * 64, 3, -6, 448) / 64;
                }
                for (i = p; i < stop; i++) {
                    double v = (double)x[t * dim + i], s = scale * part_scale;
                    v = v > 65504 ? 65504 : v < -65504 ? -65504 : v;
                    v = s > 0 ? round_to_format(f, (double)as_float(v / s) * unit) / unit : 0;
                    y[t * dim + i] = as_float(s * v);
                }
            }
        }
}

/* Reads one value from `bytes`, by the documented layout. */
static double read_value(const tkv_codec *c, int token, int channel) {
    int dim = c->head_dim, is_4_bit = c->format == TKV_INT4 || c->format == TKV_FP4;
    int span = c->format == TKV_INT8 || c->format == TKV_INT4 ? c->options.group_size : 256;
    int row = is_4_bit ? (dim + 1) / 2 : dim, scales = (dim + span - 1) / span, code;
    const uint8_t *scale = bytes + BLOCK * row + 2 * (token * scales + channel / span);
    const uint8_t *part_scale =
        bytes + BLOCK * row + BLOCK * scales * 2 + token * ((dim + 15) / 16) + channel / 16;
    double x;
    code = is_4_bit ? bytes[token * row + channel / 2] >> channel % 2 * 4 & 15 : bytes[token * row + channel];
    x = read_f16(scale) * value_of_code(c->format, code);
    if (c->format == TKV_FP4) x *= value_of_code(TKV_FP8_E4M3, *part_scale) / 64;
    return c->format == TKV_FP8_E4M3 ? x / 64 : c->format == TKV_FP8_E5M2 ? x / 4096 : x;
}

TEST(tokenwise_formats_by_definition) {
    tkv_rng r = tkv_rng_seed(11);
    int f, dim, side, kind = 0, n, i, t;
    for (f = 0; f < COUNT(tokenwise_formats); f++)
        for (dim = 1; dim <= 256; dim += tkv_test_quick() ? 29 : dim < 70 ? 1 : 7)
            for (side = 0; side < 2; side++, kind++) {
                tkv_codec c = make_codec(tokenwise_formats[f], side, dim, kind % 3 ? 64 : 32);
                int n_wrong = 0, n_misread = 0;
                n = kind % 2 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK);
                fill_block(&r, kind % 6, in, n, dim);
                encode_and_decode(&c, in, n, out);
                quantize_tokens_naively(c.format, dim, c.options.group_size, in, n, want);
                for (t = 0; t < n; t++)
                    for (i = 0; i < dim; i++) {
                        double d = read_value(&c, t, i), x = (double)out[t * dim + i];
                        n_misread += fabs(d - x) > 0;
                        d = fabs((double)want[t * dim + i] - x);
                        /* -ffast-math may round to the neighbouring code */
                        n_wrong += FAST_MATH ? d > 0.3 * fabs(x) + 1e-3 : d > 0;
                    }
                CHECK_MSG(n_misread == 0, "%s: %d values are read otherwise", describe_codec(&c, n),
                          n_misread);
                CHECK_MSG(n_wrong == 0, "%s: %d values are wrong", describe_codec(&c, n), n_wrong);
            }
}

/* What a symmetric grid of `bits` bits with a scale per `span` channels makes of a token. */
static void quantize_to_integers(int bits, int span, const float *x, int dim, float *y) {
    const double top = (1 << (bits - 1)) - 1;
    for (int from = 0; from < dim; from += span) {
        const int end = from + span < dim ? from + span : dim;
        double most = 0;
        for (int c = from; c < end; c++) most = fabs((double)x[c]) > most ? fabs((double)x[c]) : most;
        const double scale = round_to_f16((double)as_float((most > 65504 ? 65504 : most) / top));
        for (int c = from; c < end; c++) {
            double v = (double)x[c] > 65504 ? 65504 : (double)x[c] < -65504 ? -65504 : (double)x[c];
            v = scale > 0 ? nearbyint((double)as_float(v / scale)) : 0; /* half to even */
            y[c] = as_float(scale * (v > top ? top : v < -top ? -top : v));
        }
    }
}

TEST(integers_of_2_to_8_bits) {
    tkv_rng r = tkv_rng_seed(71);
    for (int bits = 2; bits <= 8; bits++)
        for (int dim = 1; dim <= 256; dim += tkv_test_quick() ? 51 : 17)
            for (int kind = 0; kind < 4; kind++) {
                tkv_codec c = make_codec(kind % 2 ? TKV_INT8 : TKV_INT4, kind / 2, dim, 32);
                int span = 32, n_wrong = 0, n = 1 + tkv_rng_below(&r, BLOCK);
                c.options.int_bits = bits;
                if ((dim + bits) % 2) {
                    span = dim;
                    c.options.k_scales = c.options.v_scales = TKV_SCALES_TOKEN;
                }
                CHECK_EQ(tkv_get_block_bytes(&c),
                         BLOCK * ((dim * bits + 7) / 8) + BLOCK * 2 * ((dim + span - 1) / span));
                fill_block(&r, (dim + kind) % 6, in, n, dim);
                encode_and_decode(&c, in, n, out);
                for (int t = 0; t < n; t++)
                    quantize_to_integers(bits, span, in + t * dim, dim, want + t * dim);
                for (int i = 0; i < n * dim; i++) {
                    const double d = fabs((double)want[i] - (double)out[i]), x = fabs((double)out[i]);
                    n_wrong += FAST_MATH ? d > (bits < 4 ? 1.01 : .3) * (x > 0 ? x : 1e9) : d > 0;
                }
                CHECK_MSG(n_wrong == 0, "%d bits, %s: %d values are wrong", bits, describe_codec(&c, n),
                          n_wrong);
            }
    tkv_codec c = make_codec(TKV_INT4, 0, 128, 64);
    c.options.k_scales = TKV_SCALES_TOKEN;
    CHECK_NEAR(format_bits(&c), 4.125, 1e-9);
}

/* Q8 and KIVI: one scale per token of V, and per channel of K whatever group_size says. */
TEST(scales_of_grouped_formats) {
    tkv_rng r = tkv_rng_seed(72);
    for (int f = 0; f < COUNT(grouped_formats); f++)
        for (int dim = 16; dim <= 256; dim += 40) {
            tkv_codec c = make_codec(grouped_formats[f], 1, dim, 32);
            const double top = (1 << (f ? 5 - f : 8)) - 1;
            int n = 1 + tkv_rng_below(&r, BLOCK), n_far = 0;
            c.options.v_scales = TKV_SCALES_TOKEN;
            fill_block(&r, 1, in, n, dim);
            encode_and_decode(&c, in, n, out);
            for (int t = 0; t < n; t++) {
                double low = 1e9, high = -1e9;
                for (int i = t * dim; i < (t + 1) * dim; i++) {
                    low = (double)in[i] < low ? (double)in[i] : low;
                    high = (double)in[i] > high ? (double)in[i] : high;
                }
                for (int i = t * dim; i < (t + 1) * dim; i++)
                    n_far += fabs((double)in[i] - (double)out[i]) >
                             .51 * (high - low) / top + 2e-3 * fabs(high) + 2e-3 * fabs(low);
            }
            CHECK_MSG(n_far == 0, "%s: %d values are far off", describe_codec(&c, n), n_far);
            c = make_codec(grouped_formats[f], 0, dim, 32);
            c.options.k_scales = TKV_SCALES_CHANNEL;
            CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, sizeof bytes), TKV_OK);
            c = make_codec(grouped_formats[f], 0, dim, 64);
            CHECK_EQ(tkv_encode_block(&c, in, 0, n, other, sizeof other), TKV_OK);
            CHECK_EQ(memcmp(bytes, other, tkv_get_block_bytes(&c)), 0);
            c.options.k_scales = TKV_SCALES_TOKEN;
            CHECK_EQ(tkv_get_block_bytes(&c), 0);
        }
    tkv_codec c = make_codec(TKV_KIVI4, 1, 128, 64);
    c.options.v_scales = TKV_SCALES_TOKEN;
    CHECK_NEAR(format_bits(&c), 4.25, 1e-9);
    c.options.v_scales = TKV_SCALES_CHANNEL;
    CHECK_EQ(tkv_get_block_bytes(&c), 0);
}

TEST(tokenwise_sizes) {
    static const struct {
        tkv_format format;
        double at_128, at_64, at_100;
    } sizes[] = {{TKV_INT8, 8.25, 8.25, 8 + 32 / 100.0},
                 {TKV_INT4, 4.25, 4.25, 4 + 32 / 100.0},
                 {TKV_FP8_E4M3, 8.125, 8.25, 8 + 16 / 100.0},
                 {TKV_FP8_E5M2, 8.125, 8.25, 8 + 16 / 100.0},
                 {TKV_FP4, 4.625, 4.75, 4 + (16 + 7 * 8) / 100.0}};
    int i;
    for (i = 0; i < COUNT(sizes); i++) {
        tkv_codec c = make_codec(sizes[i].format, i % 2, 128, 64);
        size_t plain = tkv_get_block_bytes(&c);
        CHECK_NEAR(format_bits(&c), sizes[i].at_128, 1e-9);
        c.options.rotate = 3;
        CHECK_EQ(tkv_get_block_bytes(&c), plain);
        c.options.center_k = 1;
        CHECK_EQ(tkv_get_block_bytes(&c), plain + (c.side == TKV_K ? 256 : 0)); /* 1/4 bit per value */
        c = make_codec(sizes[i].format, i % 2, 64, 64);
        CHECK_NEAR(format_bits(&c), sizes[i].at_64, 1e-9);
        c = make_codec(sizes[i].format, i % 2, 100, 64);
        CHECK_LE(format_bits(&c), sizes[i].at_100 + 0.1); /* rounded up to 64 bytes */
        CHECK_LE(sizes[i].at_100, format_bits(&c) + 1e-9);
    }
    {
        tkv_codec c = make_codec(TKV_INT4, 0, 128, 32);
        CHECK_NEAR(format_bits(&c), 4.5, 1e-9);
    }
}

/* Mean square errors of Gaussian values. The expected ones were computed elsewhere, with an exact scale. */
TEST(tokenwise_errors) {
    static const struct {
        tkv_format format;
        double error; /* part of the variance, at head_dim 128 */
    } errors[] = {{TKV_INT4, 0.0116},
                  {TKV_FP4, 0.0090},
                  {TKV_INT8, 3.5e-5},
                  {TKV_FP8_E4M3, 7.0e-4},
                  {TKV_FP8_E5M2, 2.8e-3}};
    tkv_rng r = tkv_rng_seed(12);
    int i, k;
    for (i = 0; i < COUNT(errors); i++) {
        tkv_codec c = make_codec(errors[i].format, i % 2, 128, 64);
        double sum = 0, all = 0;
        for (k = 0; k < 8; k++) {
            fill_block(&r, 0, in, BLOCK, 128);
            encode_and_decode(&c, in, BLOCK, out);
            sum += squared_error(in, out, BLOCK * 128);
            all += sum_of_squares(in, BLOCK * 128);
        }
        CHECK_NEAR(sum / all / errors[i].error, 1, 0.1);
    }
}

/* Zeros stay zero, and no value becomes NaN or infinite, also with subnormal scales. */
TEST(extreme_values) {
    static const float special_values[] = {0.0f,   -0.0f,   1e-45f, -1e-40f, 6e-8f, 1e-6f,    -3e-5f, 1.0f,
                                           -1e30f, 3.4e38f, 65504,  -65504,  65505, -3.4e38f, 1e10f,  0.3f};
    int f, i, k, flags, side;
    tkv_rng r = tkv_rng_seed(13);
    for (f = 0; f < COUNT(tokenwise_formats) + COUNT(grouped_formats); f++)
        for (flags = 0; flags < 8; flags++)
            for (side = 0; side < 2; side++) {
                int dim = flags % 2 ? 37 : 64, n_bad = 0;
                tkv_codec c =
                    make_codec(f < COUNT(tokenwise_formats) ? tokenwise_formats[f]
                                                            : grouped_formats[f - COUNT(tokenwise_formats)],
                               side, dim, 64);
                if (f < COUNT(tokenwise_formats)) {
                    c.options.rotate = flags % 4;
                    c.options.center_k = flags / 4;
                } else {
                    c.options.fit = flags < 6 ? flags : 4;
                }
                memset(in, 0, sizeof in);
                encode_and_decode(&c, in, BLOCK, out);
                for (i = 0; i < BLOCK * dim; i++) n_bad += bits_of(out[i]) << 1 != 0;
                CHECK_MSG(n_bad == 0, "%s: zeros", describe_codec(&c, BLOCK));
                for (k = 0; k < 8; k++) {
                    int n = 1 + tkv_rng_below(&r, BLOCK),
                        n_values = 2 + tkv_rng_below(&r, COUNT(special_values) - 1);
                    for (i = 0; i < n * dim; i++) in[i] = special_values[tkv_rng_below(&r, n_values)];
                    encode_and_decode(&c, in, n, out);
                    for (i = 0, n_bad = 0; i < n * dim; i++) n_bad += !tkv_test_is_finite((double)out[i]);
                    CHECK_MSG(n_bad == 0, "%s: not finite", describe_codec(&c, n));
                }
                for (i = 0; i < BLOCK * dim; i++) in[i] = 600.25f; /* all equal */
                encode_and_decode(&c, in, BLOCK, out);
                for (i = 0; i < BLOCK * dim; i++) CHECK_NEAR(out[i], 600.25, c.options.rotate ? 250 : 0.6);
            }
}

TEST(any_bytes_decode) { /* for the sanitizers */
    tkv_rng r = tkv_rng_seed(14);
    size_t i;
    int f, k;
    for (f = 0; f < COUNT(tokenwise_formats); f++)
        for (k = 0; k < 20; k++) {
            tkv_codec c =
                make_codec(tokenwise_formats[f], k % 2, 1 + tkv_rng_below(&r, 256), k % 3 ? 64 : 32);
            size_t size = tkv_get_block_bytes(&c);
            c.options.rotate = k % 4;
            for (i = 0; i < size; i++) bytes[i] = (uint8_t)(tkv_rng_u64(&r) >> 40);
            CHECK_EQ(tkv_decode_block(&c, bytes, size, BLOCK, out, 0), TKV_OK);
            c.options.center_k = c.side == TKV_K;
            CHECK_EQ(tkv_decode_block(&c, bytes, size, BLOCK, out, 0),
                     c.options.center_k ? TKV_ERR_ARG : TKV_OK);
        }
}

TEST(codec_refuses) {
    tkv_codec c = make_codec(TKV_SQUAT2, 1, 64, 64);
    CHECK_EQ(tkv_get_block_bytes(&c), 0); /* K only */
    c = make_codec(TKV_KIVI2, 0, 64, 64);
    c.options.fit = TKV_FIT_NORM | TKV_FIT_UNBIASED;
    CHECK_EQ(tkv_get_block_bytes(&c), 0);
    c.options.fit = 8;
    CHECK_EQ(tkv_get_block_bytes(&c), 0);
    c.options.fit = -1;
    CHECK_EQ(tkv_get_block_bytes(&c), 0);
    c.options.fit = TKV_FIT_CLIP | TKV_FIT_NORM;
    CHECK(tkv_get_block_bytes(&c) > 0);
    c.options.rotate = 4;
    CHECK_EQ(tkv_get_block_bytes(&c), 0);
    c.options.rotate = 0;
    c.options.center_k = 2;
    CHECK_EQ(tkv_get_block_bytes(&c), 0);
}

/* >>options of tokens */
static int rotation_sign(int channel) { /* the signs of core/rotate.h */
    static const uint32_t signs[TKV_MAX_HEAD_DIM / 32] = {0x7176da20u, 0x332a2459u, 0x5c761011u, 0x5d6d9a20u,
                                                          0x3ab82810u, 0x0674eccau, 0xc8b52373u, 0x868e3452u};
    return signs[channel / 32] >> channel % 32 & 1 ? -1 : 1;
}

/* The rotation by its definition: signs, a Hadamard matrix over the first 2^k channels, one over the last. */
static void rotate_naively(double *x, int dim) {
    double y[TKV_MAX_HEAD_DIM];
    int n = 1, i, j, pass;
    while (2 * n <= dim) n *= 2;
    for (i = 0; i < dim; i++) x[i] *= rotation_sign(i);
    for (pass = 0; pass < (n < dim ? 2 : 1); pass++) {
        double *w = x + (pass ? dim - n : 0);
        for (i = 0; i < n; i++)
            for (y[i] = 0, j = 0; j < n; j++) {
                int bits = i & j, special_values = 0;
                for (; bits; bits &= bits - 1) special_values ^= 1;
                y[i] += special_values ? -w[j] : w[j];
            }
        for (i = 0; i < n; i++) w[i] = y[i] / sqrt((double)n);
    }
}

/* Rotating first and encoding without rotation gives the same codes, except for values near a rounding edge. */
TEST(rotation) {
    tkv_rng r = tkv_rng_seed(15);
    int f, dim, t, i;
    for (f = 0; f < COUNT(tokenwise_formats); f++)
        for (dim = 1; dim <= 256; dim += tkv_test_quick() ? 51 : 17) {
            tkv_codec c = make_codec(tokenwise_formats[f], f % 2, dim, 64);
            double error = 0, same = 0;
            fill_block(&r, 1, in, BLOCK, dim);
            c.options.rotate = c.side == TKV_K ? TKV_ROTATE_K : TKV_ROTATE_V;
            encode_and_decode(&c, in, BLOCK, out);
            for (t = 0; t < BLOCK; t++) {
                double x[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
                for (i = 0; i < dim; i++) {
                    x[i] = (double)in[t * dim + i];
                    y[i] = (double)out[t * dim + i];
                }
                rotate_naively(x, dim);
                rotate_naively(y, dim);
                for (i = 0; i < dim; i++) {
                    want[i] = (float)x[i];
                    out[i] = (float)y[i];
                }
                quantize_tokens_naively(c.format, dim, 64, want, 1, want + TKV_MAX_HEAD_DIM);
                error += squared_error(out, want + TKV_MAX_HEAD_DIM, dim);
                same += sum_of_squares(want, dim);
            }
            CHECK_LE(error / same, 1e-5);
            c.options.rotate =
                c.side == TKV_K ? TKV_ROTATE_V : TKV_ROTATE_K; /* the other side's option changes nothing */
            CHECK_EQ(tkv_encode_block(&c, in, 0, BLOCK, bytes, sizeof bytes), TKV_OK);
            c.options.rotate = 0;
            CHECK_EQ(tkv_encode_block(&c, in, 0, BLOCK, other, sizeof other), TKV_OK);
            CHECK_MEM(bytes, other, tkv_get_block_bytes(&c));
        }
}

/* Rotation lowers the error of large channels, center_k that of large means. */
TEST(options_lower_errors) {
    tkv_rng r = tkv_rng_seed(16);
    int i, k;
    for (k = 0; k < 2; k++) {
        tkv_codec c = make_codec(TKV_INT4, 0, 128, 64);
        double plain, rotated, biased, centred, both;
        fill_block(&r, 0, in, BLOCK, 128);
        for (i = 0; i < BLOCK * 128; i++)
            if (i % 64 == 9) in[i] *= 20; /* large channels, with the rest of their group under one scale */
        encode_and_decode(&c, in, BLOCK, out);
        plain = squared_error(in, out, BLOCK * 128);
        c.options.rotate = TKV_ROTATE_K;
        encode_and_decode(&c, in, BLOCK, out);
        rotated = squared_error(in, out, BLOCK * 128);
        CHECK_LE(rotated, 0.15 * plain);
        for (i = 0; i < BLOCK * 128; i++)
            if (i % 128 % 16 == 3) in[i] += 300;
        c.options.rotate = 0;
        encode_and_decode(&c, in, BLOCK, out);
        biased = squared_error(in, out, BLOCK * 128);
        c.options.center_k = 1;
        encode_and_decode(&c, in, BLOCK, out);
        centred = squared_error(in, out, BLOCK * 128);
        c.options.rotate = TKV_ROTATE_K;
        encode_and_decode(&c, in, BLOCK, out);
        both = squared_error(in, out, BLOCK * 128);
        CHECK_LE(centred, 0.15 * biased);
        CHECK_LE(centred, 1.2 * plain);
        CHECK_LE(both, 1.1 * rotated);
    }
}

/* The block stores the mean of each channel, and codes of the differences. */
TEST(stored_means) {
    tkv_rng r = tkv_rng_seed(17);
    int dim, n, i, t;
    for (dim = 1; dim <= 256; dim += 51) {
        tkv_codec c = make_codec(TKV_INT8, 0, dim, 64);
        const uint8_t *mean;
        n = 1 + tkv_rng_below(&r, BLOCK);
        fill_block(&r, 0, in, n, dim);
        for (i = 0; i < n * dim; i++) in[i] += (float)(i % dim);
        c.options.center_k = 1;
        encode_and_decode(&c, in, n, out);
        mean = bytes + BLOCK * dim + BLOCK * 2 * ((dim + 63) / 64);
        for (i = 0; i < dim; i++) {
            double sum = 0;
            for (t = 0; t < n; t++) sum += (double)in[t * dim + i];
            CHECK_NEAR(read_f16(mean + 2 * i), sum / n, 1e-3 * (fabs(sum / n) + 0.01));
            for (t = 0; t < n; t++) CHECK_NEAR(out[t * dim + i], in[t * dim + i], 0.04);
        }
    }
}

/* >>fit */
static double random_deviate(tkv_rng *r, int kind) { /* mean 0, variance 1 */
    double u = tkv_rng_uniform(r);
    if (kind == 0) return tkv_rng_gauss(r);
    if (kind == 1) return (u < 0.5 ? 1 : -1) * log(1 - tkv_rng_uniform(r)) / sqrt(2.0);
    return (u - 0.5) * sqrt(12.0);
}

/* Mean square errors of 2 bits in groups of 32, with the whole range and with the best of 12 ranges. */
TEST(fit_clip) {
    static const struct {
        double plain, clipped;
    } known[] = {{0.154, 0.097}, {0.213, 0.134}, {0.092, 0.058}}; /* Gauss, Laplace, uniform */
    tkv_rng r = tkv_rng_seed(18);
    int kind, side, k, i;
    for (kind = 0; kind < 3; kind++)
        for (side = 0; side < 2; side++) {
            tkv_codec c = make_codec(TKV_KIVI2, side, 64, 32);
            double plain = 0, clipped = 0;
            for (k = 0; k < 40; k++) {
                for (i = 0; i < BLOCK * 64; i++) in[i] = (float)random_deviate(&r, kind);
                c.options.fit = 0;
                encode_and_decode(&c, in, BLOCK, out);
                plain += squared_error(in, out, BLOCK * 64);
                c.options.fit = TKV_FIT_CLIP;
                encode_and_decode(&c, in, BLOCK, out);
                clipped += squared_error(in, out, BLOCK * 64);
            }
            CHECK_NEAR(plain / (40 * BLOCK * 64) / known[kind].plain, 1, 0.02);
            CHECK_NEAR(clipped / (40 * BLOCK * 64) / known[kind].clipped, 1, 0.03);
        }
}

typedef struct moments {
    double mean, var, cov, mean_y, var_y;
} moments;

static moments compute_moments(const float *x, const float *y, int stride, int n) {
    moments m;
    int i;
    memset(&m, 0, sizeof m);
    for (i = 0; i < n; i++) {
        m.mean += (double)x[i * stride] / n;
        m.mean_y += (double)y[i * stride] / n;
    }
    for (i = 0; i < n; i++) {
        double a = (double)x[i * stride] - m.mean, b = (double)y[i * stride] - m.mean_y;
        m.var += a * a;
        m.var_y += b * b;
        m.cov += a * b;
    }
    return m;
}

TEST(fit_moments) {
    tkv_rng r = tkv_rng_seed(19);
    int f, side, fit, k, g;
    for (f = 0; f < COUNT(grouped_formats); f++)
        for (side = 0; side < 2; side++)
            for (fit = 2; fit < 6; fit++)
                for (k = 0; k < 4; k++) {
                    tkv_codec c = make_codec(grouped_formats[f], side, 64, k % 2 ? 32 : 64);
                    int n = k < 2 ? BLOCK : 40, group, i;
                    c.options.fit = fit;
                    fill_block(&r, 0, in, n, 64);
                    for (i = 0; i < n * 64; i++) in[i] = in[i] * 3 + 7;
                    encode_and_decode(&c, in, n, out);
                    group = c.options.group_size;
                    for (g = 0; g < 64; g++) {
                        /* the first group of channel g, or of token g % n */
                        int n_group = side ? group : group < n ? group : n, from = side ? g % n * 64 : g;
                        moments m = compute_moments(in + from, out + from, side ? 1 : 64, n_group);
                        CHECK_NEAR(m.mean_y, m.mean, 0.01);
                        if (fit & TKV_FIT_NORM) CHECK_NEAR(m.var_y / m.var, 1, 0.01);
                        else if (fit & TKV_FIT_UNBIASED) CHECK_NEAR(m.cov / m.var, 1, 0.01);
                    }
                }
}

/* fit changes neither the size of a block nor its decoder. */
TEST(fit_changes_encoders_only) {
    tkv_rng r = tkv_rng_seed(20);
    int f, side, fit;
    for (f = 0; f < COUNT(grouped_formats); f++)
        for (side = 0; side < 2; side++)
            for (fit = 1; fit < 6; fit++) {
                tkv_codec c = make_codec(grouped_formats[f], side, 80, 64), plain = c;
                c.options.fit = fit;
                fill_block(&r, fit, in, BLOCK, 80);
                encode_and_decode(&c, in, BLOCK, out);
                CHECK_EQ(tkv_get_block_bytes(&c), tkv_get_block_bytes(&plain));
                CHECK_EQ(tkv_decode_block(&plain, bytes, sizeof bytes, BLOCK, want, 0), TKV_OK);
                CHECK_MEM(out, want, BLOCK * 80 * sizeof(float));
                CHECK_LE(squared_error(in, out, BLOCK * 80), 0.8 * sum_of_squares(in, BLOCK * 80) + 1e-9);
            }
}

/* A second search of the range, in double. The library's error is within 2 percent of the best of the 12. */
TEST(fit_clip_finds_the_best) {
    tkv_rng r = tkv_rng_seed(21);
    int k, i, j;
    for (k = 0; k < 200; k++) {
        tkv_codec c = make_codec(k % 2 ? TKV_KIVI2 : TKV_KIVI3, 1, 64, 64);
        double best = 1e300, low = 1e9, high = -1e9, levels = k % 2 ? 3 : 7, found;
        for (i = 0; i < 64; i++) {
            in[i] = (float)(random_deviate(&r, k % 3) * 2 + k % 5);
            low = (double)in[i] < low ? (double)in[i] : low;
            high = (double)in[i] > high ? (double)in[i] : high;
        }
        for (j = 0; j < 12; j++) {
            double cut = j * 102 / 4096.0 * (high - low), step = (high - low - 2 * cut) / levels, sum = 0;
            for (i = 0; i < 64; i++) {
                double v = round_half_even(((double)in[i] - low - cut) / step);
                v = low + cut + step * (v < 0 ? 0 : v > levels ? levels : v);
                sum += (v - (double)in[i]) * (v - (double)in[i]);
            }
            best = sum < best ? sum : best;
        }
        c.options.fit = TKV_FIT_CLIP;
        encode_and_decode(&c, in, 1, out);
        found = squared_error(in, out, 64);
        CHECK_LE(found, best * 1.02);
        CHECK_LE(best, found * 1.02);
    }
}

/* >>subspaces: parts of a rotated basis */
TEST(subspaces) {
    tkv_rng r = tkv_rng_seed(24);
    int dim, parts, is_4_bit, n, t, i, p, unrotated = 0;
    for (dim = 1; dim <= 256; dim += tkv_test_quick() ? 51 : 15)
        for (parts = 1; parts <= 16; parts += 3)
            for (is_4_bit = 0; is_4_bit < 2; is_4_bit++) {
                tkv_codec c = make_codec(is_4_bit ? TKV_SUBSPACE4 : TKV_SUBSPACE2, parts % 2, dim, 64);
                double levels = is_4_bit ? 15 : 3;
                int n_parts = parts < dim ? parts : dim, row = (dim * (is_4_bit ? 4 : 2) + 7) / 8;
                n = 1 + tkv_rng_below(&r, BLOCK);
                c.options.subspaces = parts;
                c.options.unrotated = unrotated = !unrotated;
                CHECK_EQ(tkv_get_block_bytes(&c), BLOCK * row + (BLOCK * n_parts * 4));
                fill_block(&r, 1, in, n, dim);
                encode_and_decode(&c, in, n, out);
                for (t = 0; t < n; t++) {
                    double x[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM];
                    for (i = 0; i < dim; i++) {
                        x[i] = (double)in[t * dim + i];
                        y[i] = (double)out[t * dim + i];
                    }
                    if (!unrotated) rotate_naively(x, dim);
                    if (!unrotated) rotate_naively(y, dim);
                    for (p = 0; p < n_parts; p++) {
                        int from = dim * p / n_parts, end = dim * (p + 1) / n_parts;
                        const uint8_t *meta = bytes + BLOCK * row + 2 * (t * n_parts + p);
                        double low = 1e30, high = -1e30, scale = read_f16(meta);
                        for (i = from; i < end; i++) {
                            low = x[i] < low ? x[i] : low;
                            high = x[i] > high ? x[i] : high;
                        }
                        CHECK_NEAR(scale, (high - low) / levels, 1e-3 * scale + 1e-6);
                        CHECK_NEAR(read_f16(meta + BLOCK * n_parts * 2), low, 1e-3 * fabs(low) + 1e-6);
                        for (i = from; i < end; i++) {
                            CHECK_LE(fabs(x[i] - y[i]), 0.51 * scale + 1e-3 * fabs(x[i]) + 1e-5);
                        }
                    }
                }
            }
    {
        tkv_codec c = make_codec(TKV_SUBSPACE2, 0, 128, 64);
        CHECK_NEAR(format_bits(&c), 3.0, 1e-9);
        c.options.subspaces = 8;
        CHECK_NEAR(format_bits(&c), 4.0, 1e-9);
        c.options.subspaces = 17;
        CHECK_EQ(tkv_get_block_bytes(&c), 0);
    }
}

/* >>in a cache */
/* Attention that decodes these formats, compared with tkv_attend_reference, on every instruction set. */
static void check_attention(const tkv_config *base, model_sequence *s, int tokens, double bound,
                            const char *what) {
    static const tkv_isa isas[] = {TKV_ISA_SCALAR, TKV_ISA_AVX2, TKV_ISA_AVX512, TKV_ISA_NEON, TKV_ISA_WASM};
    static float reference[8 * 256 * 4];
    char reason[200];
    int i, k, at, rows = s->heads * s->v_dim * 2;
    for (i = 0; i < COUNT(isas); i++) {
        tkv_config cfg = *base;
        tkv_attend_params p;
        tkv_cache *kv = NULL;
        double error, all;
        if (!is_isa_available(isas[i])) continue;
        cfg.host.isa = isas[i];
        REQUIRE(tkv_create(&cfg, &kv) == TKV_OK);
        s->rng = tkv_rng_seed(31);
        for (at = 0; at < tokens; at += k) {
            k = tokens - at < 50 ? tokens - at : 50;
            generate_tokens(s, k);
            CHECK_EQ(tkv_append(kv, 0, 0, s->k, s->v, k), TKV_OK);
        }
        generate_queries(s, 2);
        memset(&p, 0, sizeof p);
        p.n = 2;
        p.q = s->q;
        p.out = s->out;
        CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
        p.out = reference;
        CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
        error = sqrt(squared_error(s->out, reference, rows));
        all = sqrt(sum_of_squares(reference, rows));
        CHECK_MSG(error <= bound * all, "%s, head_dim %d and %d, %s: %g", what, s->dim, s->v_dim,
                  tkv_get_name(TKV_NAME_ISA, (int)isas[i]), error / all);
        CHECK_MSG(tkv_check(kv, reason, sizeof reason) == TKV_OK, "%s", reason);
        tkv_destroy(kv);
    }
}

TEST(attention_with_decoded_formats) {
    static const int dims[][2] = {{1, 1},   {5, 3},   {16, 16},   {31, 48},
                                  {64, 64}, {80, 33}, {128, 127}, {255, 256}};
    int f, i;
    for (f = 0; f < COUNT(decoded_formats); f++)
        for (i = 0; i < COUNT(dims); i++) {
            model_sequence *s;
            tkv_config cfg;
            if (tkv_test_quick() && (f + i) % 3) continue;
            s = start_model_sequence(i % 2 ? 6 : 2, 2, dims[i][0], dims[i][1], 30);
            cfg = config_of(s, decoded_formats[f], decoded_formats[(f + i) % COUNT(decoded_formats)]);
            cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
            cfg.format.group_size = i % 3 ? 64 : 32;
            cfg.format.rotate = (i + f) % 4;
            cfg.format.center_k = i / 2 % 2;
            cfg.format.int_bits = (i + 2 * f) % 9 > 1 ? (i + 2 * f) % 9 : 0;
            cfg.format.k_scales = i / 3 % 2 ? TKV_SCALES_TOKEN : TKV_SCALES_GROUP;
            cfg.format.v_scales = (i + f) % 2 ? TKV_SCALES_TOKEN : TKV_SCALES_GROUP;
            cfg.format.unrotated = i / 2 % 2;
            cfg.format.subspaces = cfg.format.unrotated && i % 2 ? 1 : 0;
            check_attention(&cfg, s, 230 + 7 * i, 2e-5,
                            tkv_get_name(TKV_NAME_FORMAT, (int)decoded_formats[f]));
        }
}

/* One scale per token of V goes through the kernels of tiles. */
TEST(attention_with_a_scale_per_token) {
    static const int dims[] = {16, 48, 64, 80, 128, 192, 256};
    for (int f = 0; f < COUNT(grouped_formats); f++)
        for (int i = 0; i < COUNT(dims); i++) {
            if (tkv_test_quick() && (f + i) % 3) continue;
            model_sequence *s = start_model_sequence(i % 2 ? 6 : 2, 2, dims[i], dims[i], 30);
            tkv_config cfg = config_of(s, grouped_formats[f], grouped_formats[f]);
            cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
            cfg.format.group_size = 32;
            cfg.format.k_scales = TKV_SCALES_CHANNEL;
            cfg.format.v_scales = TKV_SCALES_TOKEN;
            cfg.host.precise = 1;
            check_attention(&cfg, s, 230 + 7 * i, 2e-3,
                            tkv_get_name(TKV_NAME_FORMAT, (int)grouped_formats[f]));
        }
}

/* Bytes by hand, as reported and as estimated. */
TEST(cache_counts_bytes) {
    int f, opts;
    for (f = 0; f < COUNT(tokenwise_formats); f++)
        for (opts = 0; opts < 2; opts++) {
            model_sequence *s = start_model_sequence(2, 2, 64, 64, 40);
            tkv_config cfg = config_of(s, tokenwise_formats[f], tokenwise_formats[f]);
            tkv_codec c = make_codec(tokenwise_formats[f], 0, 64, 64);
            tkv_memory_info m, estimate;
            tkv_cache *kv = NULL;
            int i;
            cfg.format.center_k = c.options.center_k = opts;
            cfg.format.rotate = c.options.rotate = opts * 3;
            REQUIRE(tkv_create(&cfg, &kv) == TKV_OK);
            for (i = 0; i < 4 + 16 + 64 * 3; i++) {
                generate_tokens(s, 1);
                CHECK_EQ(tkv_append(kv, 0, 0, s->k, s->v, 1), TKV_OK);
            }
            CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
            CHECK_EQ(tkv_estimate_memory(&cfg, 4 + 16 + 64 * 3, 1, &estimate), TKV_OK);
            CHECK_EQ(m.tier[TKV_TIER_ARCHIVE].tokens % 64, 0);
            CHECK(m.tier[TKV_TIER_ARCHIVE].tokens > 0);
            CHECK_EQ(m.tier[TKV_TIER_ARCHIVE].codes + m.tier[TKV_TIER_ARCHIVE].metadata,
                     m.tier[TKV_TIER_ARCHIVE].tokens / 64 * 2 *
                         (2 * tkv_get_block_bytes(&c) - (opts ? 128 : 0)));
            CHECK_EQ(m.total, estimate.total);
            tkv_destroy(kv);
        }
}

TEST(config_refuses) {
    tkv_config cfg = config_of(start_model_sequence(2, 2, 64, 64, 1), TKV_INT4, TKV_INT4);
    char reason[200];
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    cfg.format.fit = 6;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "fit is 6") != NULL);
    cfg.format.fit = 5;
    cfg.format.rotate = 4;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "rotate is 4") != NULL);
    cfg.format.rotate = 3;
    cfg.format.center_k = 2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    cfg.format.center_k = 1;
    cfg.format.squat_block = 32;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "squat_block is 32") != NULL);
    cfg.format.squat_block = 64;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    cfg.format.int_bits = 9;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "int_bits is 9") != NULL);
    cfg.format.int_bits = 2;
    cfg.format.k_scales = cfg.format.v_scales = TKV_SCALES_TOKEN;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    cfg.format.v_scales = TKV_SCALES_CHANNEL;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "v_scales is 2; no kernel reads a scale per channel of this side") != NULL);
    cfg.format.v_scales = TKV_SCALES_TOKEN;
    cfg.tiers.archive.k = TKV_KIVI2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "k_scales is 1; no kernel reads a scale per token of keys") != NULL);
    cfg.tiers.archive.k = TKV_SUBSPACE2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    cfg.format.k_scales = cfg.format.v_scales = TKV_SCALES_GROUP;
    cfg.tiers.archive.v = TKV_SQUAT2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    cfg.tiers.archive.v = TKV_KIVI2;
    cfg.tiers.hot.k = TKV_INT8;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
}

static void backward_for(void *user, int n, tkv_task task, void *ctx) {
    int i;
    (void)user;
    for (i = n - 1; i >= 0; i--) task(ctx, i); /* last task first */
}

/* Appends the stream to a cache and attends after each append. Returns the error of later scores, relative to their
 * squares. `decoded` receives the keys. */
static double measure_score_error(tkv_config cfg, model_sequence *s, int tokens, int chunk, float *decoded) {
    static float keys[1024 * 2 * 64];
    tkv_cache *kv = NULL;
    double error = 0, all = 0;
    int at, i, h, c, n = 0;
    if (tkv_create(&cfg, &kv) != TKV_OK) return -1;
    s->rng = tkv_rng_seed(50);
    for (at = 0; at < tokens; at += n) {
        n = tokens - at < chunk ? tokens - at : chunk;
        generate_tokens(s, n);
        memcpy(keys + at * s->kv_heads * s->dim, s->k, (size_t)(n * s->kv_heads * s->dim) * sizeof *keys);
        CHECK_EQ(tkv_append(kv, 0, 0, s->k, s->v, n), TKV_OK);
        generate_queries(s, n > 4 ? 4 : n);
        CHECK_EQ(tkv_attend(kv, 0, 0, s->q, n > 4 ? 4 : n, s->out), TKV_OK);
    }
    CHECK_EQ(tkv_read(kv, 0, 0, 0, tokens, decoded, NULL), TKV_OK);
    for (i = 0; i < 200; i++) { /* new queries of the same directions */
        generate_queries(s, 1);
        for (h = 0; h < s->heads; h++) {
            int head = h / (s->heads / s->kv_heads);
            for (at = 200; at < tokens - 100; at += 3) {
                double e = 0, k = 0;
                for (c = 0; c < s->dim; c++) {
                    int index = (at * s->kv_heads + head) * s->dim + c;
                    double q = (double)s->q[h * s->dim + c];
                    e += q * ((double)decoded[index] - (double)keys[index]);
                    k += q * (double)keys[index];
                }
                error += e * e;
                all += k * k;
            }
        }
    }
    tkv_destroy(kv);
    return error / all;
}

TEST(squat_in_a_cache) {
    static float a[1024 * 2 * 64], b[1024 * 2 * 64];
    model_sequence *s = start_model_sequence(4, 2, 64, 32, 50);
    tkv_config cfg = config_of(s, TKV_KIVI2, TKV_KIVI2);
    double plain = measure_score_error(cfg, s, 900, 7, a), squat, wide;
    tkv_memory_info m, without;
    tkv_estimate_memory(&cfg, 900, 1, &without);
    cfg.tiers.archive.k = TKV_SQUAT2;
    tkv_estimate_memory(&cfg, 900, 1, &m);
    CHECK_EQ(m.tier[TKV_TIER_ARCHIVE].codes, without.tier[TKV_TIER_ARCHIVE].codes); /* the same blocks */
    CHECK_EQ(m.tier[TKV_TIER_ARCHIVE].metadata, without.tier[TKV_TIER_ARCHIVE].metadata);
    CHECK(m.tables > without.tables + 2 * 64 * 65 / 2 * 8); /* and statistics of the queries */
    squat = measure_score_error(cfg, s, 900, 7, a);
    CHECK(squat >= 0);
#if defined(__GNUC__) || defined(__clang__)
    CHECK_LE(squat, 0.3 * plain); /* the queries have few directions */
#endif
    cfg.host.parallel_for = backward_for; /* the order of tasks changes nothing */
    CHECK_NEAR(measure_score_error(cfg, s, 900, 7, b), squat, 0);
    CHECK_MEM(a, b, sizeof a);
    cfg.format.squat_block = 64;
    wide = measure_score_error(cfg, s, 900, 7, b);
#if defined(__GNUC__) || defined(__clang__)
    CHECK_LE(squat, wide);
    CHECK_LE(wide, plain);
#endif
    if (getenv("TKV_TEST_SHOW"))
        printf("\n    kivi2 %.4g, squat2 %.4g, in blocks of 64 %.4g\n", plain, squat, wide);
}

TEST(squat_takes_heads_of_256_channels) {
    model_sequence *s = start_model_sequence(2, 1, 64, 64, 90);
    tkv_config cfg = config_of(s, TKV_SQUAT2, TKV_KIVI2);
    char reason[100];
    cfg.model.head_dim = cfg.model.v_head_dim = 256;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    cfg.model.v_head_dim = 264; /* of another format */
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    cfg.model.head_dim = 264;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK_STR(reason, "head_dim is 264; SQUAT formats take heads of at most 256 channels");
    cfg.tiers.archive.k = TKV_KIVI2;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
}

/* A cache in the caller's memory, with all options at once. */
TEST(in_place) {
    model_sequence *s = start_model_sequence(4, 2, 48, 48, 70);
    tkv_config cfg = config_of(s, TKV_SQUAT2, TKV_FP4);
    tkv_cache *kv = NULL;
    void *mem;
    size_t size = 0;
    int i;
    cfg.tiers.warm_tokens = 128;
    cfg.tiers.warm.k = TKV_INT8;
    cfg.tiers.warm.v = TKV_FP8_E4M3;
    cfg.format.fit = TKV_FIT_CLIP | TKV_FIT_NORM;
    cfg.format.rotate = TKV_ROTATE_K | TKV_ROTATE_V;
    cfg.format.center_k = 1;
    cfg.limits.max_tokens = 800;
    REQUIRE(tkv_get_required_bytes(&cfg, &size, NULL) == TKV_OK);
    mem = malloc(size);
    REQUIRE(mem != NULL);
    REQUIRE(tkv_create_in_place(&cfg, mem, size, &kv, NULL, 0) == TKV_OK);
    for (i = 0; i < 800; i += 20) {
        generate_tokens(s, 20);
        CHECK_EQ(tkv_append(kv, 0, 0, s->k, s->v, 20), TKV_OK);
        generate_queries(s, 4);
        CHECK_EQ(tkv_attend(kv, 0, 0, s->q, 4, s->out), TKV_OK);
    }
    CHECK_EQ(tkv_append(kv, 0, 0, s->k, s->v, 1), TKV_ERR_CAPACITY);
    tkv_destroy(kv);
    free(mem);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(tokenwise_formats_by_definition);
    RUN(integers_of_2_to_8_bits);
    RUN(scales_of_grouped_formats);
    RUN(tokenwise_sizes);
    RUN(tokenwise_errors);
    RUN(extreme_values);
    RUN(any_bytes_decode);
    RUN(codec_refuses);
    RUN(rotation);
    RUN(options_lower_errors);
    RUN(stored_means);
    RUN(fit_clip);
    RUN(fit_moments);
    RUN(fit_changes_encoders_only);
    RUN(fit_clip_finds_the_best);
    RUN(subspaces);
    RUN(attention_with_decoded_formats);
    RUN(attention_with_a_scale_per_token);
    RUN(cache_counts_bytes);
    RUN(config_refuses);
    RUN(squat_in_a_cache);
    RUN(squat_takes_heads_of_256_channels);
    RUN(in_place);
    return tkv_test_end();
}
