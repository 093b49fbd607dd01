/*
 * test_format.c - the formats: golden bytes, sizes, decoding by the documented layout, errors, refusals.
 *
 * Blocks are read by the layouts documented in core/tile.h, formats/exact.h and formats/kivi.h, not by functions of
 * the library. Under -ffast-math encoding may differ in the last bits. Blocks are then checked by their error
 * bounds only. Decoding gives the same bits under any flags.
 */
#include "blocks.h"

#include "golden.h"

/* >>golden blocks */
static float golden_value(int seed, int i, int channel) { /* as golden_input in encoder.py */
    uint32_t h = ((uint32_t)i + 1000003u * (uint32_t)seed + 1u) * 2654435761u;
    int32_t v;
    h ^= h >> 16;
    h *= 2246822519u;
    h ^= h >> 13;
    v = (int32_t)(h >> 8 & 0xffffu) - 32768;
    if (h % 97u == 0) v *= 16;
    if (h % 101u == 0) v = 0;
    if (channel % 7 == 3) v += 300000;
    return (float)v / (float)(512 << channel % 5);
}

/* Makes the input of a golden block in `in` and encodes it into `bytes`. Returns the codec in *c. */
static void encode_golden_block(const golden_block *g, tkv_codec *c) {
    int i;
    *c = make_codec(g->format, g->side == TKV_V, g->head_dim, g->group_size);
    for (i = 0; i < g->n_tokens * g->head_dim; i++) in[i] = golden_value(g->seed, i, i % g->head_dim);
    CHECK_EQ(tkv_get_block_bytes(c), g->size);
    CHECK_EQ(tkv_encode_block(c, in, 0, g->n_tokens, bytes, g->size), TKV_OK);
}

TEST(golden_hashes) {
    int i;
    for (i = 0; i < COUNT(golden_hashed); i++) {
        const golden_block *g = &golden_hashed[i];
        int n = g->n_tokens * g->head_dim;
        tkv_codec c;
        encode_golden_block(g, &c);
        if (FAST_MATH && g->format >= TKV_Q8) continue;
        CHECK_MSG(hash_of(HASH_START, bytes, g->size) == g->encoded, "wrong bytes of %s",
                  describe_codec(&c, g->n_tokens));
        CHECK_EQ(tkv_decode_block(&c, bytes, g->size, g->n_tokens, out, 0), TKV_OK);
        CHECK_MSG(hash_of_floats(HASH_START, out, n) == g->decoded, "the values of %s",
                  describe_codec(&c, g->n_tokens));
    }
}

TEST(golden_blocks) {
    size_t at = 0;
    int i;
    for (i = 0; i < COUNT(golden_whole); i++) {
        const golden_block *g = &golden_whole[i];
        tkv_codec c;
        encode_golden_block(g, &c);
        if (!FAST_MATH) CHECK_MEM(bytes, golden_bytes + at, g->size);
        CHECK(hash_of(HASH_START, golden_bytes + at, g->size) == g->encoded);
        CHECK_EQ(tkv_decode_block(&c, golden_bytes + at, g->size, g->n_tokens, out, 0), TKV_OK);
        CHECK_MSG(hash_of_floats(HASH_START, out, g->n_tokens * g->head_dim) == g->decoded,
                  "the values of %s", describe_codec(&c, g->n_tokens));
        at += g->size;
    }
    CHECK_EQ(at, sizeof golden_bytes);
}

/* >>names and sizes */
TEST(names) {
    static const char *const names[] = {"f32", "f16", "bf16", "q8", "kivi4", "kivi3", "kivi2"};
    int f;
    for (f = 1; f < TKV_FORMAT_COUNT; f++) {
        const char *name = tkv_get_name(TKV_NAME_FORMAT, f);
        REQUIRE(name);
        if (f <= COUNT(names)) CHECK_STR(name, names[f - 1]);
        CHECK_EQ(find_format(name), f);
    }
    CHECK(tkv_get_name(TKV_NAME_FORMAT, TKV_FORMAT_DEFAULT) == NULL);
    CHECK(tkv_get_name(TKV_NAME_FORMAT, TKV_FORMAT_COUNT) == NULL);
    CHECK_EQ(find_format(NULL), TKV_FORMAT_DEFAULT);
    CHECK_EQ(find_format(""), TKV_FORMAT_DEFAULT);
    CHECK_EQ(find_format("kivi"), TKV_FORMAT_DEFAULT);
    CHECK_EQ(find_format("KIVI4"), TKV_FORMAT_DEFAULT);
}

TEST(sizes) {
    int f, side, group, dim, i;
    for (f = 0; f < COUNT(grid_formats); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (dim = 1; dim <= TKV_MAX_HEAD_DIM; dim++) {
                    tkv_codec c = make_codec(grid_formats[f], side, dim, group);
                    block_layout d = layout_of(&c);
                    CHECK_EQ(tkv_get_block_bytes(&c), d.size);
                    CHECK_NEAR(format_bits(&c), 8.0 * d.size / (BLOCK * dim), 1e-12);
                    /* multiples of 16 have no padding: codes take exactly their bits */
                    if (dim % 16 == 0) CHECK_EQ(d.scale_at, dim * BLOCK * d.bits / 8);
                }
    for (f = 0; f < COUNT(exact_formats); f++)
        for (side = 0; side < 2; side++)
            for (dim = 1; dim <= TKV_MAX_HEAD_DIM; dim++) {
                tkv_codec c = make_codec(exact_formats[f], side, dim, 0);
                CHECK_EQ(tkv_get_block_bytes(&c), round_up(dim, 16) * BLOCK * (f == 0 ? 4 : 2));
            }
    {
        tkv_codec c = make_codec(TKV_KIVI4, 0, 64, 0), same = make_codec(TKV_KIVI4, 0, 64, 64);
        CHECK_EQ(tkv_get_block_bytes(&c), tkv_get_block_bytes(&same)); /* a group size of 0 means 64 */
    }
    for (i = 0; i < COUNT(head_dims); i++) { /* exact formats ignore a valid group size */
        tkv_codec c = make_codec(TKV_F16, 0, head_dims[i], 32),
                  same = make_codec(TKV_F16, 0, head_dims[i], 64);
        CHECK_EQ(tkv_get_block_bytes(&c), tkv_get_block_bytes(&same));
    }
}

static double bits_per_value_of(tkv_format f, int side, int dim, int group) {
    tkv_codec c = make_codec(f, side, dim, group);
    return format_bits(&c);
}

TEST(bits_per_value) {
    static const int multiples_of_64[] = {64, 128, 192, 256}, other_dims[] = {48, 80, 96, 112};
    int i, side;
    for (i = 0; i < COUNT(multiples_of_64); i++)
        for (side = 0; side < 2; side++) {
            CHECK_EQ(1000 * bits_per_value_of(TKV_KIVI4, side, multiples_of_64[i], 64), 4500);
            CHECK_EQ(1000 * bits_per_value_of(TKV_KIVI4, side, multiples_of_64[i], 32), 5000);
            CHECK_EQ(1000 * bits_per_value_of(TKV_KIVI3, side, multiples_of_64[i], 64), 3500);
            CHECK_EQ(1000 * bits_per_value_of(TKV_KIVI3, side, multiples_of_64[i], 32), 4000);
            CHECK_EQ(1000 * bits_per_value_of(TKV_KIVI2, side, multiples_of_64[i], 64), 2500);
            CHECK_EQ(1000 * bits_per_value_of(TKV_KIVI2, side, multiples_of_64[i], 32), 3000);
            CHECK_EQ(1000 * bits_per_value_of(TKV_Q8, side, multiples_of_64[i], 64), 8500);
            CHECK_EQ(1000 * bits_per_value_of(TKV_Q8, side, multiples_of_64[i], 32), 9000);
            CHECK_EQ(1000 * bits_per_value_of(TKV_F32, side, multiples_of_64[i], 0), 32000);
            CHECK_EQ(1000 * bits_per_value_of(TKV_F16, side, multiples_of_64[i], 0), 16000);
            CHECK_EQ(1000 * bits_per_value_of(TKV_BF16, side, multiples_of_64[i], 0), 16000);
        }
    /* The last group of V is shorter, with the same 32 bits of metadata. */
    for (i = 0; i < COUNT(other_dims); i++) {
        CHECK_EQ(1000 * bits_per_value_of(TKV_KIVI4, 0, other_dims[i], 64), 4500);
        CHECK_EQ(1000 * bits_per_value_of(TKV_KIVI2, 0, other_dims[i], 32), 3000);
        CHECK_NEAR(bits_per_value_of(TKV_KIVI2, 1, other_dims[i], 32),
                   2 + 32.0 * (round_up(other_dims[i], 32) / 32) / other_dims[i], 1e-12);
    }
    CHECK_NEAR(bits_per_value_of(TKV_KIVI4, 1, 80, 64), 4.8, 1e-12);
    CHECK_NEAR(bits_per_value_of(TKV_KIVI4, 0, 5, 64), 4.5 * 16 / 5, 1e-12); /* padding is included */
    CHECK_NEAR(bits_per_value_of(TKV_F16, 1, 72, 64), 16.0 * 80 / 72, 1e-12);
}

/* >>exact formats: [token][channel], little-endian, padded to 16 channels with zeros */
TEST(exact_bytes) {
    tkv_rng r = tkv_rng_seed(21);
    int f, side, i, t, ch, k;
    for (f = 0; f < COUNT(exact_formats); f++)
        for (side = 0; side < 2; side++)
            for (i = 0; i < COUNT(head_dims); i++) {
                int dim = head_dims[i], pad = round_up(dim, 16),
                    n = i % 2 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK), size = f ? 2 : 4;
                tkv_codec c = make_codec(exact_formats[f], side, dim, 0);
                fill_input(LARGE, &r, n, dim, in);
                memset(other, 0, BUFFER_BYTES);
                for (t = 0; t < n; t++)
                    for (ch = 0; ch < dim; ch++) {
                        float x = in[t * dim + ch];
                        uint32_t u = f == 0 ? bits_of(x) : f == 1 ? f16_of(x) : bf16_of(x);
                        for (k = 0; k < size; k++)
                            other[(t * pad + ch) * size + k] = (uint8_t)(u >> 8 * k & 0xffu);
                        want[t * dim + ch] = f == 0   ? x
                                             : f == 1 ? float_of_f16((uint16_t)u)
                                                      : float_of_bf16((uint16_t)u);
                    }
                fill_nan(bytes, BUFFER_BYTES);
                CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, BUFFER_BYTES), TKV_OK);
                CHECK_MEM(bytes, other, tkv_get_block_bytes(&c));
                CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, n, out, 0), TKV_OK);
                CHECK_MEM(out, want, (size_t)(n * dim) * sizeof(float));
            }
}

TEST(exact_values) { /* F32 keeps every bit; F16 and BF16 saturate and keep the sign of zero */
    static const uint32_t x[] = {0x00000000u, 0x80000000u, 0x00000001u, 0x807fffffu,
                                 0x00800000u, 0x7f7fffffu, 0xff7fffffu, 0x3f800001u,
                                 0x477fe000u, 0xc77fefffu, 0x33000000u, 0xb3000001u};
    static const uint32_t f16[] = {0x00000000u, 0x80000000u, 0x00000000u, 0x80000000u,
                                   0x00000000u, 0x477fe000u, 0xc77fe000u, 0x3f800000u,
                                   0x477fe000u, 0xc77fe000u, 0x00000000u, 0xb3800000u};
    static const uint32_t bf16[] = {0x00000000u, 0x80000000u, 0x00000000u, 0x80800000u,
                                    0x00800000u, 0x7f7f0000u, 0xff7f0000u, 0x3f800000u,
                                    0x47800000u, 0xc7800000u, 0x33000000u, 0xb3000000u};
    const uint32_t *expected[3];
    int f;
    expected[0] = x;
    expected[1] = f16;
    expected[2] = bf16;
    for (f = 0; f < COUNT(exact_formats); f++) {
        tkv_codec c = make_codec(exact_formats[f], f % 2, COUNT(x), 0);
        memcpy(in, x, sizeof x);
        CHECK_EQ(tkv_encode_block(&c, in, 0, 1, bytes, BUFFER_BYTES), TKV_OK);
        CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, 1, out, 0), TKV_OK);
        CHECK_MEM(out, expected[f], sizeof x);
    }
}

/* >>decoding */
TEST(decode_is_scale_times_code_plus_zero) {
    tkv_rng r = tkv_rng_seed(31);
    int f, side, group, i, t, ch;
    for (f = 0; f < COUNT(grid_formats); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (i = 0; i < COUNT(head_dims); i++) {
                    int dim = head_dims[i], n = i % 2 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK);
                    tkv_codec c = make_codec(grid_formats[f], side, dim, group);
                    block_layout d = layout_of(&c);
                    random_block(&r, &d, bytes);
                    for (t = 0; t < n; t++)
                        for (ch = 0; ch < dim; ch++) want[t * dim + ch] = value_of(&d, bytes, t, ch);
                    CHECK_EQ(tkv_decode_block(&c, bytes, (size_t)d.size, n, out, 0), TKV_OK);
                    CHECK_MEM(out, want, (size_t)(n * dim) * sizeof(float));
                }
}

/* >>encoding */

/* Bound of the error: half a unit of code, scale and zero, and a few units of 2^-24 for the float arithmetic. */
static double error_bound(const block_layout *d, const uint8_t *p, int t, int ch, double v) {
    int s = scale_of(d, p, t, ch), z = zero_of(d, p, t, ch);
    double size = (v < 0 ? -v : v) + d->max_code * f16_to_double(s);
    return 0.5 * (f16_to_double(s) + f16_ulp(z) + d->max_code * f16_ulp(s)) + size * 4e-7;
}

TEST(error_is_bounded) {
    tkv_rng r = tkv_rng_seed(41);
    int f, side, group, kind, i, t, ch;
    for (f = 0; f < COUNT(grid_formats); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (kind = 0; kind < N_KINDS; kind++) {
                    int dim, n;
                    double worst = 0;
                    tkv_codec c;
                    block_layout d;
                    i = tkv_rng_below(&r, COUNT(head_dims));
                    dim = head_dims[i];
                    n = kind % 2 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK);
                    c = make_codec(grid_formats[f], side, dim, group);
                    d = layout_of(&c);
                    fill_input(kind, &r, n, dim, in);
                    CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, BUFFER_BYTES), TKV_OK);
                    CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, n, out, 0), TKV_OK);
                    for (t = 0; t < n; t++)
                        for (ch = 0; ch < dim; ch++) {
                            double v = (double)in[t * dim + ch], ratio;
                            v = v > 65504 ? 65504 : v < -65504 ? -65504 : v;
                            ratio = fabs(v - (double)out[t * dim + ch]) / error_bound(&d, bytes, t, ch, v);
                            if (ratio > worst) worst = ratio;
                            if (!tkv_test_is_finite((double)out[t * dim + ch])) worst = 1e9;
                        }
                    CHECK_MSG(worst <= 1.0, "%g of the error bound, input %d, %s", worst, kind,
                              describe_codec(&c, n));
                }
}

static double measure_squared_error(const tkv_codec *c, int kind, tkv_rng *r, int blocks) {
    double sum = 0;
    int b, i, n = BLOCK * c->head_dim;
    for (b = 0; b < blocks; b++) {
        fill_input(kind, r, BLOCK, c->head_dim, in);
        if (tkv_encode_block(c, in, 0, BLOCK, bytes, BUFFER_BYTES) != TKV_OK) return -1;
        if (tkv_decode_block(c, bytes, BUFFER_BYTES, BLOCK, out, 0) != TKV_OK) return -1;
        for (i = 0; i < n; i++) sum += ((double)in[i] - (double)out[i]) * ((double)in[i] - (double)out[i]);
    }
    return sum / (blocks * n);
}

/* Errors for N(0,1), simulated by python3 tests/encoder.py --anchors: 16 to 40 million values each, no fp16. */
TEST(error_of_gaussian_groups) {
    static const struct {
        tkv_format format;
        double groups_of_32, groups_of_64;
    } expected[] = {{TKV_KIVI2, 0.1544, 0.2024},
                    {TKV_KIVI3, 0.02814, 0.03692},
                    {TKV_KIVI4, 0.006121, 0.008027},
                    {TKV_Q8, 2.116e-5, 2.778e-5}};
    tkv_rng r = tkv_rng_seed(42);
    int i, side, blocks = tkv_test_quick() ? 20 : 120;
    double tolerance = tkv_test_quick() ? 0.04 : 0.02;
    for (i = 0; i < COUNT(expected); i++)
        for (side = 0; side < 2; side++) {
            tkv_codec c = make_codec(expected[i].format, side, 64, 32);
            double e = expected[i].groups_of_32;
            CHECK_NEAR(measure_squared_error(&c, GAUSSIAN, &r, blocks), e, tolerance * e);
            c.options.group_size = 64;
            e = expected[i].groups_of_64;
            CHECK_NEAR(measure_squared_error(&c, GAUSSIAN, &r, blocks), e, tolerance * e);
        }
}

TEST(more_bits_less_error) {
    static const int kinds[] = {GAUSSIAN, UNIFORM, OUTLIERS, BIAS, SCALES, SPARSE};
    tkv_rng r = tkv_rng_seed(43);
    int i, k, side;
    for (k = 0; k < COUNT(kinds); k++)
        for (side = 0; side < 2; side++) {
            double before = 0;
            for (i = 0; i < COUNT(grid_formats); i++) { /* 8, 4, 3, 2 bits */
                tkv_codec c = make_codec(grid_formats[i], side, 96, 64);
                double e = measure_squared_error(&c, kinds[k], &r, 4);
                /* Rounding the zero to fp16 adds an error. */
                CHECK(e > 2.5 * before || (e > before && kinds[k] == BIAS));
                before = e;
            }
        }
}

TEST(flat_groups_are_exact) {
    static const float values[] = {0.42f, -1.0f, 5.0f,  600.0f,  0.0f,   -0.1f,   65504.0f, 1e6f,
                                   -1e6f, 1e-7f, 1e-9f, -1e-30f, 600.3f, 3.4e38f, -7e-5f,   2049.0f};
    int f, side, group, v, i;
    for (f = 0; f < COUNT(grid_formats); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (v = 0; v < COUNT(values); v++) {
                    int dim = head_dims[v % COUNT(head_dims)], n = v % 3 ? BLOCK : 1 + v;
                    tkv_codec c = make_codec(grid_formats[f], side, dim, group);
                    block_layout d = layout_of(&c);
                    double half = f16_to_double(f16_of(values[v])); /* saturates */
                    int n_wrong = 0;
                    for (i = 0; i < n * dim; i++) in[i] = values[v];
                    CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, BUFFER_BYTES), TKV_OK);
                    CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, n, out, 0), TKV_OK);
                    for (i = 0; i < n * dim; i++)
                        n_wrong += (double)out[i] != half || scale_of(&d, bytes, i / dim, i % dim) != 0 ||
                                   code_of(&d, bytes, i / dim, i % dim) != 0;
                    CHECK_MSG(n_wrong == 0, "%d values of %.9g in %s", n_wrong, (double)values[v],
                              describe_codec(&c, n));
                }
}

static uint32_t round_through_f16(float x) { return bits_of(float_of_f16(f16_of(x))); }

TEST(groups_of_one_value) { /* K of one token: each group has one value, which decodes to its fp16 rounding */
    tkv_rng r = tkv_rng_seed(44);
    int f, group, i, ch;
    for (f = 0; f < COUNT(grid_formats); f++)
        for (group = 32; group <= 64; group += 32)
            for (i = 0; i < COUNT(head_dims); i++) {
                tkv_codec c = make_codec(grid_formats[f], 0, head_dims[i], group);
                fill_input(SCALES, &r, 1, head_dims[i], in);
                CHECK_EQ(tkv_encode_block(&c, in, 0, 1, bytes, BUFFER_BYTES), TKV_OK);
                CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, 1, out, 0), TKV_OK);
                for (ch = 0; ch < head_dims[i]; ch++) CHECK_EQ(bits_of(out[ch]), round_through_f16(in[ch]));
            }
    { /* V with a last group of one channel */
        tkv_codec c = make_codec(TKV_KIVI2, 1, 65, 64);
        fill_input(GAUSSIAN, &r, BLOCK, 65, in);
        CHECK_EQ(tkv_encode_block(&c, in, 0, BLOCK, bytes, BUFFER_BYTES), TKV_OK);
        CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, BLOCK, out, 0), TKV_OK);
        for (i = 64; i < BLOCK * 65; i += 65) CHECK_EQ(bits_of(out[i]), round_through_f16(in[i]));
    }
}

/* Values scale * code + zero decode exactly, if their group has both the lowest and the highest code. */
TEST(grid_values_are_exact) {
    tkv_rng r = tkv_rng_seed(45);
    int f, side, group, t, ch;
    for (f = 0; f < COUNT(grid_formats); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32) {
                int dim = 80;
                tkv_codec c = make_codec(grid_formats[f], side, dim, group);
                block_layout d = layout_of(&c);
                for (t = 0; t < BLOCK; t++)
                    for (ch = 0; ch < dim; ch++) {
                        int along = side ? ch : t, line = side ? t : ch;
                        int code =
                            along % 16 < 2 ? along % 16 * d.max_code : tkv_rng_below(&r, d.max_code + 1);
                        double s = ldexp((double)(1024 + line * 7), line % 9 - 20), z = (line - 40) / 4.0;
                        in[t * dim + ch] = (float)(s * code + z);
                    }
                CHECK_EQ(tkv_encode_block(&c, in, 0, BLOCK, bytes, BUFFER_BYTES), TKV_OK);
                CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, BLOCK, out, 0), TKV_OK);
                CHECK_MEM(out, in, (size_t)(BLOCK * dim) * sizeof(float));
            }
}

/* Decoded values encode to the same bytes. Grid formats need a range of the group that is not tiny against its
 * minimum, so such inputs are left out. */
TEST(encoding_decoded_values_gives_the_same_bytes) {
    static const int heads[] = {48, 64, 80, 128};
    tkv_rng r = tkv_rng_seed(46);
    int f, side, i, kind;
    for (f = TKV_F32; f <= TKV_KIVI2; f++)
        for (side = 0; side < 2; side++)
            for (i = 0; i < COUNT(heads); i++)
                for (kind = 0; kind < (f < TKV_Q8 ? N_KINDS : BIAS); kind++) {
                    tkv_codec c = make_codec((tkv_format)f, side, heads[i], kind % 2 ? 32 : 64);
                    fill_input(kind, &r, BLOCK, heads[i], in);
                    CHECK_EQ(tkv_encode_block(&c, in, 0, BLOCK, bytes, BUFFER_BYTES), TKV_OK);
                    CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, BLOCK, out, 0), TKV_OK);
                    CHECK_EQ(tkv_encode_block(&c, out, 0, BLOCK, other, BUFFER_BYTES), TKV_OK);
                    CHECK_MEM(bytes, other, tkv_get_block_bytes(&c));
                }
}

TEST(ties_go_to_even) {
    int f, side, i;
    if (FAST_MATH) SKIP("-ffast-math: a reciprocal of the scale may miss the tie by a bit");
    for (f = 0; f < COUNT(grid_formats); f++)
        for (side = 0; side < 2; side++) {
            int dim = side ? BLOCK : 1, n = side ? 1 : BLOCK;
            tkv_codec c = make_codec(grid_formats[f], side, dim, 64);
            block_layout d = layout_of(&c);
            int code[BLOCK];
            for (i = 0; i < BLOCK; i++) { /* values halfway between codes; scale 1/4, zero -2 */
                int k = i * (d.bits == 8 ? 4 : 1) % d.max_code;
                in[i] = (float)((k + 0.5) / 4 - 2);
                code[i] = k + k % 2;
            }
            in[0] = -2.0f;
            code[0] = 0;
            in[1] = (float)(d.max_code / 4.0 - 2);
            code[1] = d.max_code;
            CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, BUFFER_BYTES), TKV_OK);
            CHECK_EQ(scale_of(&d, bytes, 0, 0), 0x3400);
            CHECK_EQ(zero_of(&d, bytes, 0, 0), 0xc000);
            for (i = 0; i < BLOCK; i++) CHECK_EQ(code_of(&d, bytes, side ? 0 : i, side ? i : 0), code[i]);
        }
}

/* fp16 has steps of 2 from 2048 on: the stored zero lies above or below the minimum, and codes are clamped. */
TEST(codes_are_clamped) {
    static const float x[4][4] = {/* [token][channel] */
                                  {2049.5f, 2048.5f, -2051.5f, -70000.0f},
                                  {2052.5f, 2051.5f, -2048.5f, 70000.0f},
                                  {2051.0f, 2050.0f, -2050.25f, 0.0f},
                                  {2052.25f, 2049.0f, -2051.0f, 60000.0f}};
    static const int zeros[] = {2050, 2048, -2052, -65504};
    static const int codes[4][4] = {{0, 0, 0, 0}, {2, 3, 3, 3}, {1, 2, 2, 1}, {2, 1, 1, 3}};
    tkv_codec c = make_codec(TKV_KIVI2, 0, 4, 64);
    block_layout d = layout_of(&c);
    int t, ch;
    memcpy(in, x, sizeof x);
    CHECK_EQ(tkv_encode_block(&c, in, 0, 4, bytes, BUFFER_BYTES), TKV_OK);
    CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, 4, out, 0), TKV_OK);
    for (ch = 0; ch < 4; ch++) {
        double s = ch < 3 ? 1 : 43680; /* 131008 / 3 rounded to fp16 */
        CHECK_NEAR(f16_to_double(zero_of(&d, bytes, 0, ch)), zeros[ch], 0);
        CHECK_NEAR(f16_to_double(scale_of(&d, bytes, 0, ch)), s, 0);
        for (t = 0; t < 4; t++) {
            int is_tie = (ch == 0 && t < 2) || (ch == 1 && t == 0) || (ch == 2 && t == 0);
            if (FAST_MATH && is_tie) continue;
            CHECK_EQ(code_of(&d, bytes, t, ch), codes[t][ch]);
            CHECK_NEAR(out[4 * t + ch], zeros[ch] + s * codes[t][ch], 0);
        }
    }
}

/* Ranges near or below what an fp16 scale can express: no NaN, and errors stay within the bound. */
TEST(tiny_ranges) {
    static const double bases[] = {0, 1, -1, 0.42, 5, 600, -600, 60000};
    int f, side, b, e, i;
    for (f = 0; f < COUNT(grid_formats); f++)
        for (side = 0; side < 2; side++)
            for (b = 0; b < COUNT(bases); b++)
                for (e = -40; e <= -8; e += tkv_test_quick() ? 4 : 1) {
                    tkv_codec c = make_codec(grid_formats[f], side, 64, 64);
                    block_layout d = layout_of(&c);
                    double worst = 0;
                    for (i = 0; i < BLOCK * 64; i++)
                        in[i] = (float)(bases[b] + ldexp((double)(i % 64 * (i / 64) % 64) / 64.0, e));
                    CHECK_EQ(tkv_encode_block(&c, in, 0, BLOCK, bytes, BUFFER_BYTES), TKV_OK);
                    CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, BLOCK, out, 0), TKV_OK);
                    for (i = 0; i < BLOCK * 64; i++) {
                        double v = (double)in[i],
                               error = fabs(v - (double)out[i]) / error_bound(&d, bytes, i / 64, i % 64, v);
                        if (!tkv_test_is_finite((double)out[i])) error = 1e9;
                        if (error > worst) worst = error;
                    }
                    CHECK_MSG(worst <= 1.0, "%g of the error bound, %g + 2^%d, %s", worst, bases[b], e,
                              describe_codec(&c, BLOCK));
                }
}

/* >>bytes read and written, for every format */
TEST(bytes_depend_on_the_values_alone) {
    tkv_rng r = tkv_rng_seed(51);
    int f, side, i, t;
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        for (side = 0; side < 2; side++)
            for (i = 0; i < COUNT(head_dims); i++) {
                int dim = head_dims[i], n = i % 3 == 0 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK),
                    stride = dim + 1 + i % 7;
                tkv_codec c = make_codec((tkv_format)f, side, dim, i % 2 ? 32 : 64);
                size_t size = tkv_get_block_bytes(&c), k;
                int n_wrong = 0;
                if (!size) continue;
                REQUIRE(size + 64 <= BUFFER_BYTES);
                fill_input(OUTLIERS, &r, n, dim, in);
                memset(bytes, 0x00, BUFFER_BYTES);
                CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, size), TKV_OK);
                fill_nan(want, sizeof want); /* NaN between and behind the rows, which must not be read */
                for (t = 0; t < n; t++) memcpy(want + t * stride, in + t * dim, (size_t)dim * sizeof(float));
                memset(other, 0xa5, BUFFER_BYTES);
                CHECK_EQ(tkv_encode_block(&c, want, stride, n, other, size), TKV_OK);
                CHECK_MEM(bytes, other, size);
                for (k = size; k < BUFFER_BYTES; k++) n_wrong += other[k] != 0xa5;
                CHECK_MSG(n_wrong == 0, "%d bytes behind %s", n_wrong, describe_codec(&c, n));
            }
}

TEST(missing_tokens_and_channels_are_zero) {
    tkv_rng r = tkv_rng_seed(52);
    int f, side, group, i, t, ch;
    for (f = 0; f < COUNT(grid_formats); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (i = 0; i < 5; i++) {
                    int dim = head_dims[i], n = 1 + tkv_rng_below(&r, BLOCK), n_nonzero_codes = 0,
                        n_nonzero_metadata = 0, m;
                    tkv_codec c = make_codec(grid_formats[f], side, dim, group);
                    block_layout d = layout_of(&c);
                    fill_input(BIAS, &r, n, dim, in);
                    fill_nan(bytes, BUFFER_BYTES);
                    CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, BUFFER_BYTES), TKV_OK);
                    for (t = 0; t < BLOCK; t++)
                        for (ch = 0; ch < d.padded_dim; ch++)
                            if (t >= n || ch >= dim) n_nonzero_codes += code_of(&d, bytes, t, ch) != 0;
                    CHECK_EQ(n_nonzero_codes, 0);
                    for (m = 0; m < d.n_groups * d.row; m++) {
                        int is_missing = d.is_k ? m % d.row >= dim || m / d.row * group >= n : m % d.row >= n;
                        if (is_missing)
                            n_nonzero_metadata += read_f16_bits(bytes + d.scale_at + 2 * m) != 0 ||
                                                  read_f16_bits(bytes + d.zero_at + 2 * m) != 0;
                    }
                    CHECK_EQ(n_nonzero_metadata, 0);
                    for (m = d.zero_at + 2 * d.n_groups * d.row; m < d.size; m++) CHECK_EQ(bytes[m], 0);
                }
}

/* >>refusals */
TEST(nonfinite_is_refused) {
    static const uint32_t bad[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu};
    tkv_rng r = tkv_rng_seed(61);
    int f, side, b, at, i, n_wrong;
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        for (side = 0; side < 2; side++)
            for (b = 0; b < COUNT(bad); b++)
                for (at = 0; at < 3; at++) {
                    int dim = 48, n = 17;
                    tkv_codec c = make_codec((tkv_format)f, side, dim, 64);
                    if (!tkv_get_block_bytes(&c)) continue;
                    fill_input(GAUSSIAN, &r, n, dim, in);
                    memcpy(in + (at == 0 ? 0 : at == 1 ? n * dim / 2 + 5 : n * dim - 1), &bad[b], 4);
                    memset(bytes, 0xa5, BUFFER_BYTES);
                    CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, BUFFER_BYTES), TKV_ERR_NONFINITE);
                    for (n_wrong = 0, i = 0; i < BUFFER_BYTES; i++) n_wrong += bytes[i] != 0xa5;
                    CHECK_EQ(n_wrong, 0);
                }
}

static void check_refused(const tkv_codec *c, const float *x, ptrdiff_t stride, int n, size_t size) {
    int i, n_wrong = 0;
    memset(bytes, 0xa5, BUFFER_BYTES);
    memset(out, 0xa5, sizeof out);
    memset(want, 0xa5, sizeof want);
    CHECK_EQ(tkv_encode_block(c, x, stride, n, bytes, size), TKV_ERR_ARG);
    for (i = 0; i < BUFFER_BYTES; i++) n_wrong += bytes[i] != 0xa5;
    CHECK_EQ(n_wrong, 0);
    CHECK_EQ(tkv_decode_block(c, other, size, n, x ? out : NULL, stride), TKV_ERR_ARG);
    CHECK_MEM(out, want, sizeof out);
}

static void check_codec_refused(tkv_format format, int side, int dim, int group) {
    tkv_codec c = make_codec(format, side, dim, group);
    CHECK_EQ(tkv_get_block_bytes(&c), 0);
    CHECK(format_bits(&c) == 0.0);
    check_refused(&c, in, 0, 1, BUFFER_BYTES);
}

TEST(bad_arguments_are_refused) {
    tkv_codec c = make_codec(TKV_KIVI4, 0, 64, 64);
    size_t size = tkv_get_block_bytes(&c);
    int f;
    memset(in, 0, sizeof in);
    memset(other, 0, sizeof other);
    CHECK_EQ(tkv_get_block_bytes(NULL), 0);
    CHECK(format_bits(NULL) == 0.0);
    check_refused(NULL, in, 0, 1, BUFFER_BYTES);
    check_refused(&c, NULL, 0, 1, BUFFER_BYTES);
    CHECK_EQ(tkv_encode_block(&c, in, 0, 1, NULL, BUFFER_BYTES), TKV_ERR_ARG);
    CHECK_EQ(tkv_decode_block(&c, NULL, BUFFER_BYTES, 1, out, 0), TKV_ERR_ARG);
    check_refused(&c, in, 0, 0, BUFFER_BYTES);
    check_refused(&c, in, 0, -1, BUFFER_BYTES);
    check_refused(&c, in, 0, 65, BUFFER_BYTES);
    check_refused(&c, in, 0, 1, size - 1);
    check_refused(&c, in, 0, 1, 0);
    check_refused(&c, in, 63, 1, BUFFER_BYTES);
    check_refused(&c, in, -64, 1, BUFFER_BYTES);
    for (f = 1; f < TKV_FORMAT_COUNT; f++) {
        check_codec_refused((tkv_format)f, 0, 0, 64);
        check_codec_refused((tkv_format)f, 1, -16, 64);
        check_codec_refused((tkv_format)f, 0, TKV_MAX_HEAD_DIM + 1, 64);
        check_codec_refused((tkv_format)f, 1, 0x7fffffff, 64);
    }
    check_codec_refused(TKV_FORMAT_DEFAULT, 0, 64, 64);
    check_codec_refused(TKV_FORMAT_COUNT, 0, 64, 64);
    check_codec_refused(TKV_KIVI4, 0, 64, 16);
    check_codec_refused(TKV_KIVI4, 1, 64, 128);
    check_codec_refused(TKV_KIVI2, 1, 64, -64);
    check_codec_refused(TKV_Q8, 0, 64, 1);
    check_codec_refused(TKV_SQUAT4, 0, 257, 64); /* it takes heads of at most 256 channels */
#ifndef __cplusplus /* C++: an enumeration with another value is undefined behaviour */
    c.side = (tkv_side)2;
    check_refused(&c, in, 0, 1, BUFFER_BYTES);
    c.side = TKV_K;
    c.format = (tkv_format)-1;
    check_refused(&c, in, 0, 1, BUFFER_BYTES);
    CHECK(tkv_get_name(TKV_NAME_FORMAT, (tkv_format)1000) == NULL);
#endif
    c = make_codec(TKV_KIVI4, 0, 64, 64);
    CHECK_EQ(tkv_encode_block(&c, in, 64, 64, bytes, size), TKV_OK);
    CHECK_EQ(tkv_decode_block(&c, bytes, size, 64, out, 64), TKV_OK);
}

/* >>rotated values and allocated keys */
TEST(fewer_bits_more_error) {
    static const int heads[] = {16, 48, 64, 80, 96, 112, 128, 192, 256, 512, 576};
    tkv_rng r = tkv_rng_seed(87);
    int i, f;
    for (i = 0; i < COUNT(heads); i++) {
        double before = 0;
        for (f = TKV_A40; f <= TKV_A15; f++) {
            tkv_codec c = make_codec((tkv_format)f, 0, heads[i], 64);
            double e = measure_squared_error(&c, GAUSSIAN, &r, 4);
            CHECK_MSG(e > before, "%s of %d: %g after %g", tkv_get_name(TKV_NAME_FORMAT, (int)c.format),
                      heads[i], e, before);
            before = e;
        }
        CHECK_LE(before, 0.75);
        for (f = TKV_R40, before = 0; f <= TKV_R10; f++) {
            tkv_codec c = make_codec((tkv_format)f, 1, heads[i], 64);
            double e = measure_squared_error(&c, GAUSSIAN, &r, 4);
            /* 16 channels form no pair: R15 has the bits of R20. */
            if (f == TKV_R15 && heads[i] == 16) continue;
            CHECK_MSG(e > 1.5 * before, "%s of %d: %g after %g", tkv_get_name(TKV_NAME_FORMAT, (int)c.format),
                      heads[i], e, before);
            before = e;
        }
        CHECK_LE(before, 0.8);
    }
}

/* >>every head_dim: a head whose channels do not fill its tiles loses no more than its neighbours that do */
enum { LEAST_VALUES = 2048 }; /* of a measurement, for heads of few channels: they differ most by chance */

typedef struct head_error {
    double all, worst; /* root mean square error over that of zeros: of all values, of the worst channel */
} head_error;

/* The errors of n decoded tokens y. */
static head_error compare_rows(const float *x, const float *y, int n, int dim) {
    double err_sq = 0.0, sum_sq = 0.0;
    head_error e;
    int t, c;
    e.worst = 0.0;
    for (c = 0; c < dim; c++) {
        double err = 0.0, sum = 1e-30;
        for (t = 0; t < n; t++) {
            const double is = (double)x[t * dim + c], off = (double)y[t * dim + c] - is;
            err += off * off;
            sum += is * is;
        }
        e.worst = err / sum > e.worst ? err / sum : e.worst;
        err_sq += err;
        sum_sq += sum;
    }
    e.all = sqrt(err_sq / sum_sq);
    e.worst = sqrt(e.worst);
    return e;
}

/* The next head_dim to test, in steps of 4: all, or few of them beyond 20. Their neighbours are tested with each. */
static int next_group(int dim) { return dim < 20 || !tkv_test_quick() ? dim + 4 : dim + 112; }

/* values: random ones, enough for LEAST_VALUES and 8 tokens of the largest head. Encodes blocks of 8 tokens: most
 * formats code each token alone, and the ranges of columns are those of 8 tokens for every head_dim. */
static head_error codec_error(tkv_codec *c, int dim, const float *values) {
    const int n = 8 * dim < LEAST_VALUES ? LEAST_VALUES / dim / 8 * 8 : 8;
    int t;
    c->head_dim = dim;
    for (t = 0; t < n; t += 8) {
        CHECK_EQ(tkv_encode_block(c, values + t * dim, 0, 8, bytes, sizeof bytes), TKV_OK);
        CHECK_EQ(tkv_decode_block(c, bytes, sizeof bytes, 8, out + t * dim, 0), TKV_OK);
    }
    return compare_rows(values, out, n, dim);
}

static const char *format_name(int f) { return tkv_get_name(TKV_NAME_FORMAT, f); }

/* Blocks alone. Of A formats, which take longest, small heads only: the next test has all. */
TEST(every_head_dim_in_every_format) {
    tkv_rng r = tkv_rng_seed(88);
    int f, side, dim, i, n_pairs = 0;
    tkv_rng_fill(&r, in, MAX_VALUES, 1.0);
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        for (side = 0; side < 2; side++) {
            tkv_codec c = make_codec((tkv_format)f, side, 64, 64);
            const int is_a = f >= TKV_A40 && f <= TKV_A15, is_squat = f == TKV_SQUAT4 || f == TKV_SQUAT2;
            const int most = is_a ? 40 : is_squat ? 256 : TKV_MAX_HEAD_DIM;
            if (tkv_get_block_bytes(&c) == 0) continue;
            n_pairs++;
            for (dim = 4; dim <= most; dim = next_group(dim)) {
                const head_error whole = codec_error(&c, dim, in);
                /* a channel alone has no outlier in KVQUANT */
                for (i = dim - 3; i < dim; i++) {
                    const head_error e = codec_error(&c, i, in);
                    CHECK_MSG(e.all <= 1.3 * whole.all, "%s: %d channels err by %.4f, %d by %.4f",
                              format_name(f), i, e.all, dim, whole.all);
                }
            }
        }
    CHECK_LE(50, n_pairs);
}

/* Keys of A formats in a cache: a layer for each. All tokens are in the archive. */
enum { A_LAYERS = TKV_A15 - TKV_A40 + 1, A_TOKENS = 40 };

/* out: the error of each layer's keys. */
static void cache_errors(int dim, const float *values, head_error *e) {
    tkv_layer_config layers[A_LAYERS];
    tkv_config cfg = make_sized_config(A_LAYERS, 1, 1, dim, 1, A_TOKENS);
    tkv_cache *kv;
    int i;
    memset(layers, 0, sizeof layers);
    for (i = 0; i < A_LAYERS; i++) layers[i].archive = pair_of((tkv_format)(TKV_A40 + i), TKV_F16);
    cfg.model.v_head_dim = 1;
    cfg.layers = layers;
    cfg.tiers.warm_tokens = TKV_OFF;
    cfg.tiers.sink_tokens = TKV_OFF;
    kv = create_cache(&cfg);
    for (i = 0; i < A_LAYERS; i++) CHECK_EQ(tkv_append(kv, 0, i, values, values, A_TOKENS), TKV_OK);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_seq_flush(kv, 0, TKV_FLUSH_ALL), TKV_OK);
    for (i = 0; i < A_LAYERS; i++) {
        CHECK_EQ(tkv_read(kv, 0, i, 0, A_TOKENS, out, NULL), TKV_OK);
        e[i] = compare_rows(values, out, A_TOKENS, dim);
    }
    tkv_destroy(kv);
}

/* A tile of one channel has about one bit less than the others, so this channel may err twice as much as the worst one
 * of whole tiles. */
TEST(keys_of_every_head_dim_in_a_cache) {
    static head_error e[A_LAYERS], whole[A_LAYERS];
    tkv_rng r = tkv_rng_seed(89);
    int dim, i, f;
    tkv_rng_fill(&r, in, MAX_VALUES, 1.0);
    for (dim = 4; dim <= TKV_MAX_HEAD_DIM; dim = next_group(dim)) {
        cache_errors(dim, in, whole);
        for (i = dim - 3; i < dim; i++) {
            cache_errors(i, in, e);
            for (f = 0; f < A_LAYERS; f++) {
                CHECK_MSG(e[f].all <= 1.2 * whole[f].all, "%s: %d channels err by %.4f, %d by %.4f",
                          format_name(TKV_A40 + f), i, e[f].all, dim, whole[f].all);
                CHECK_MSG(e[f].worst <= 2.5 * whole[f].worst,
                          "%s: a channel of %d errs by %.4f, of %d by %.4f", format_name(TKV_A40 + f), i,
                          e[f].worst, dim, whole[f].worst);
            }
        }
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(golden_hashes);
    RUN(golden_blocks);
    RUN(names);
    RUN(sizes);
    RUN(bits_per_value);
    RUN(exact_bytes);
    RUN(exact_values);
    RUN(decode_is_scale_times_code_plus_zero);
    RUN(error_is_bounded);
    RUN(error_of_gaussian_groups);
    RUN(more_bits_less_error);
    RUN(flat_groups_are_exact);
    RUN(groups_of_one_value);
    RUN(grid_values_are_exact);
    RUN(encoding_decoded_values_gives_the_same_bytes);
    RUN(ties_go_to_even);
    RUN(codes_are_clamped);
    RUN(tiny_ranges);
    RUN(bytes_depend_on_the_values_alone);
    RUN(missing_tokens_and_channels_are_zero);
    RUN(nonfinite_is_refused);
    RUN(bad_arguments_are_refused);
    RUN(fewer_bits_more_error);
    RUN(every_head_dim_in_every_format);
    RUN(keys_of_every_head_dim_in_a_cache);
    return tkv_test_end();
}
