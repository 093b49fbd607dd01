/*
 * white_formats.c - white-box test of src/formats and the tiles below them: the bits of tiles, ranges of tokens, mixed
 * widths, logarithmic scales, the rotation, how heads share the bits of a layer, A and R formats as codecs, SQuat,
 * golden hashes of the other formats.
 *
 * It calls internal functions (white.h).
 */
#include "white.h"
#include "blocks.h"
#include "levels.h"

static tkvi_tile_counts count_tiles(const int *widths, int n) {
    tkvi_tile_counts runs;
    int i;
    memset(&runs, 0, sizeof runs);
    for (i = 0; i < n; i++) runs.n[widths[i]]++;
    return runs;
}

static uint8_t *locate_tile(const int *widths, int tile) {
    int i, n = 0;
    for (i = 0; i < tile; i++) n += TKVI_TILE_BYTES(widths[i]);
    return bytes + n;
}

/* Packs tiles with one code bit set. Only the documented bit of the bytes must be set, and unpacking must return it. */
static void check_single_bits(const int *widths, int n) {
    tkvi_tile_counts runs = count_tiles(widths, n);
    size_t size = tkvi_tiles_bytes(&runs);
    uint8_t code[TKVI_TILE_CODES], back[TKVI_TILE_CODES];
    int tile, q, b, k;
    CHECK_EQ(size, run_bytes(widths, n));
    for (tile = 0; tile < n; tile++) {
        uint8_t *at = locate_tile(widths, tile);
        for (b = 0; b < widths[tile]; b++)
            for (q = 0; q < 256; q += tkv_test_quick() ? 7 : 1) {
                bit_position p = find_bit(widths, tile, q, b);
                int wrong = 0;
                memset(bytes, 0, size);
                memset(code, 0, sizeof code);
                code[q] = (uint8_t)(1 << b);
                tkvi_pack_tile(at, widths[tile], code);
                for (k = 0; k < (int)size; k++) wrong += bytes[k] != (k == p.byte ? 1 << p.bit : 0);
                tkvi_unpack_tile(at, widths[tile], back);
                wrong += memcmp(code, back, sizeof code) != 0;
                CHECK_MSG(wrong == 0, "width %d, tile %d, code %d, bit %d", widths[tile], tile, q, b);
            }
    }
}

TEST(tile_bits) {
    static const int mixed[] = {8, 6, 5, 5, 5, 4,
                                3, 3, 2, 1, 1}; /* tiles of an odd number of 32 bytes before others */
    int i;
    for (i = 0; i < COUNT(all_widths); i++) {
        int three[3];
        three[0] = three[1] = three[2] = all_widths[i];
        check_single_bits(three, 1);
        check_single_bits(three, 3);
    }
    check_single_bits(mixed, COUNT(mixed));
}

/* Compares with bytes written out by hand, without place(). */
TEST(tile_bits_literal) {
    static const int two[] = {2}, four[] = {4}, three[] = {3, 3, 3};
    tkvi_tile_counts runs = count_tiles(two, 1);
    uint8_t code[TKVI_TILE_CODES];
    memset(code, 0, sizeof code);
    memset(bytes, 0, BUFFER_BYTES);
    code[64 * 0 + 4 * 5 + 1] = 1; /* planes 0 to 3 of lane 5, index 1 of 4 in the lane */
    code[64 * 1 + 4 * 5 + 1] = 2;
    code[64 * 2 + 4 * 5 + 1] = 3;
    code[64 * 3 + 4 * 5 + 1] = 1;
    tkvi_pack_tile(bytes, 2, code);
    CHECK_EQ(bytes[21], 1 | 2 << 2 | 3 << 4 | 1 << 6);
    CHECK_EQ(bytes[20] | bytes[22], 0);
    CHECK_EQ(tkvi_tiles_bytes(&runs), 64);

    runs = count_tiles(four, 1);
    memset(bytes, 0, BUFFER_BYTES);
    tkvi_pack_tile(bytes, 4, code);
    CHECK_EQ(bytes[21], 1 | 2 << 4);
    CHECK_EQ(bytes[64 + 21], 3 | 1 << 4);
    CHECK_EQ(tkvi_tiles_bytes(&runs), 128);

    code[64 * 2 + 4 * 5 + 1] = 7;
    code[64 * 3 + 4 * 5 + 1] = 5;
    code[64 * 2 + 32 + 4 * 5 + 1] = 4;
    code[64 * 3 + 32 + 4 * 5 + 1] = 6;
    runs = count_tiles(three, 3);
    memset(bytes, 0, BUFFER_BYTES);
    tkvi_pack_tile(locate_tile(three, 1), 3, code);
    CHECK_EQ(bytes[96 + 21], 1 | 2 << 3 | 1 << 6);
    CHECK_EQ(bytes[96 + 32 + 21], 2 << 6);
    CHECK_EQ(bytes[96 + 64 + 21], 7 | 4 << 3 | 1 << 6 | 1 << 7);
    CHECK_EQ(tkvi_tiles_bytes(&runs), 320);
}

TEST(tile_round_trip) {
    tkv_rng r = tkv_rng_seed(11);
    int round, rounds = tkv_test_quick() ? 40 : 300;
    for (round = 0; round < rounds; round++) {
        int widths[16], n = random_widths(&r, widths, 16), tile, q, wrong = 0;
        tkvi_tile_counts runs = count_tiles(widths, n);
        uint8_t *at = bytes;
        size_t size = tkvi_tiles_bytes(&runs), i;
        uint8_t code[16][TKVI_TILE_CODES], back[TKVI_TILE_CODES];
        memset(bytes, 0, BUFFER_BYTES);
        memset(other, 0, BUFFER_BYTES);
        memset(bytes + size, 0x5a, 64);
        CHECK_EQ(size, run_bytes(widths, n));
        for (tile = 0; tile < n; tile++) {
            for (q = 0; q < 256; q++) {
                code[tile][q] = (uint8_t)(tkv_rng_u64(&r) & ((1u << widths[tile]) - 1u));
                put_code(other, widths, tile, q, code[tile][q]);
                back[q] = (uint8_t)~code[tile][q];
            }
            tkvi_pack_tile(at, widths[tile], back); /* a second packing replaces the first */
            tkvi_pack_tile(at, widths[tile], code[tile]);
            at += TKVI_TILE_BYTES(widths[tile]);
        }
        CHECK_MEM(bytes, other, size);
        for (i = size; i < size + 64; i++) wrong += bytes[i] != 0x5a;
        CHECK_EQ(wrong, 0);
        at = bytes;
        for (tile = 0; tile < n; tile++) {
            tkvi_unpack_tile(at, widths[tile], back);
            at += TKVI_TILE_BYTES(widths[tile]);
            CHECK_MEM(back, code[tile], 256);
        }
    }
}

/* >>decoding */
TEST(decode_a_range_of_tokens) {
    tkv_rng r = tkv_rng_seed(32);
    int f, side, i, round, t;
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        for (side = 0; side < 2; side++)
            for (i = 0; i < COUNT(head_dims); i++) {
                int dim = head_dims[i];
                tkv_codec c = make_codec((tkv_format)f, side, dim, i % 2 ? 32 : 64);
                tkv_format_options options;
                tkvi_side s;
                if (!tkv_get_block_bytes(&c)) continue; /* the format does not store this side */
                CHECK(tkvi_codec_side(&c, &options, &s));
                fill_input(OUTLIERS, &r, BLOCK, dim, in);
                CHECK_EQ(tkv_encode_block(&c, in, 0, BLOCK, bytes, BUFFER_BYTES), TKV_OK);
                CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, BLOCK, out, 0), TKV_OK);
                for (round = 0; round < 6; round++) {
                    int first = tkv_rng_below(&r, BLOCK), n = 1 + tkv_rng_below(&r, BLOCK - first);
                    int stride = dim + tkv_rng_below(&r, 8);
                    fill_nan(want, sizeof want);
                    fill_nan(in, sizeof in);
                    for (t = 0; t < n; t++)
                        memcpy(want + t * stride, out + (first + t) * dim, (size_t)dim * sizeof(float));
                    tkvi_decode_side(&s, bytes, first, n, in, (size_t)stride);
                    CHECK_MEM(in, want, sizeof want);
                    if (first > 0) continue;
                    fill_nan(in, sizeof in);
                    CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, n, in, stride), TKV_OK);
                    CHECK_MEM(in, want, sizeof want);
                }
            }
}

/* >>sides of mixed widths, with a channel order and a table of levels. They use a format of this test: its metadata
 * are the zero points, 32 unused bytes, and the scales. */
static void decode_gapped_meta(const tkvi_side *s, const uint8_t *src, const tkvi_simd_ops *help,
                               float *scale, float *zero) {
    int n = s->groups * (s->which == TKV_K ? (int)s->pad : BLOCK);
    help->f16_to_f32(src + s->code_bytes, n, zero);
    help->f16_to_f32(src + s->code_bytes + 2 * n + 32, n, scale);
}

static tkvi_format make_gapped_format(void) {
    tkvi_format f;
    memset(&f, 0, sizeof f);
    f.name = "own";
    f.bits = 2;
    f.stored = TKVI_AS_TILES;
    f.side[TKV_K].decode = tkvi_decode_tiles;
    f.side[TKV_K].meta = decode_gapped_meta;
    f.side[TKV_V].decode = tkvi_decode_tiles;
    f.side[TKV_V].meta = decode_gapped_meta;
    return f;
}

/* Draws widths of n tiles, widest first. Runs of n_equal tiles have the same width (V: the 4 tiles of a slab). */
static void draw_side_widths(tkv_rng *r, int *widths, int n, int n_equal, int widest) {
    int i, w;
    for (i = 0; i < n; i++) {
        do w = all_widths[tkv_rng_below(r, COUNT(all_widths))];
        while (w > widest);
        widths[i] = i % n_equal ? widths[i - 1] : w;
    }
    for (i = 1; i < n; i++)
        for (w = i; w > 0 && widths[w] > widths[w - 1]; w--) {
            int t = widths[w];
            widths[w] = widths[w - 1];
            widths[w - 1] = t;
        }
}

/* Sets the widths for pairs of channels: 3 bits for 32 channels on 16 lanes, 2 bits for 16 channels without partners.
 * Returns the number of tiles. */
static int set_pair_widths(int *widths, int pad) {
    int n = pad / 32 * 4 + pad % 32 / 4, i;
    for (i = 0; i < n; i++) widths[i] = i < pad / 32 * 4 ? 3 : 2;
    return n;
}

TEST(mixed_widths) {
    tkv_rng r = tkv_rng_seed(71);
    tkvi_format format = make_gapped_format();
    int round, rounds = tkv_test_quick() ? 60 : 300;
    for (round = 0; round < rounds; round++) {
        int side = round % 2, tabled = round / 2 % 2, dim = 1 + tkv_rng_below(&r, 96),
            pad = round_up(dim, 16);
        int group = tkv_rng_below(&r, 2) ? 32 : 64, n_meta, tiles = pad / 4, tile, q, i, u, first, n;
        int widths[TKV_MAX_HEAD_DIM / 4], pairs = side && round % 3 == 0;
        uint8_t order[TKV_MAX_HEAD_DIM];
        int8_t levels[48];
        uint8_t *scale, *zero;
        tkvi_side s;
        memset(&s, 0, sizeof s);
        s.format = &format;
        s.which = side ? TKV_V : TKV_K;
        s.dim = (int16_t)dim;
        s.pad = (int16_t)pad;
        s.tokens = BLOCK;
        s.group = (int16_t)group;
        s.groups = (int16_t)(side ? round_up(dim, group) / group : BLOCK / group);
        s.pairs = (int8_t)pairs;
        if (pairs) tiles = set_pair_widths(widths, pad);
        else draw_side_widths(&r, widths, tiles, side ? 4 : 1, tabled ? 4 : 8);
        s.tiles = count_tiles(widths, tiles);
        s.code_bytes = tkvi_tiles_bytes(&s.tiles);
        for (i = 0; i < 48; i++) levels[i] = (int8_t)(tkv_rng_below(&r, 255) - 127);
        if (tabled || pairs) s.levels = levels;
        for (i = 0; i < pad; i++) order[i] = (uint8_t)i;
        for (i = pad - 1; i > 0; i--) {
            int j = tkv_rng_below(&r, i + 1);
            uint8_t t = order[i];
            order[i] = order[j];
            order[j] = t;
        }
        if (!side && round % 3) s.order = order;

        memset(bytes, 0, BUFFER_BYTES);
        n_meta = s.groups * (side ? BLOCK : pad);
        zero = bytes + s.code_bytes;
        scale = zero + 2 * n_meta + 32;
        for (i = 0; i < n_meta; i++) {
            tkvi_store16(zero + 2 * i, tkvi_f32_to_f16((float)(10 * tkv_rng_gauss(&r))));
            tkvi_store16(scale + 2 * i, tkvi_f32_to_f16((float)(0.01 + tkv_rng_uniform(&r))));
        }
        fill_nan(want, sizeof want);
        first = tkv_rng_below(&r, BLOCK);
        n = 1 + tkv_rng_below(&r, BLOCK - first);
        for (tile = 0; tile < tiles; tile++)
            for (q = 0; q < 256; q++) {
                int code = (int)(tkv_rng_u64(&r) & ((1u << widths[tile]) - 1u)), plane = q / 64,
                    lane = q % 64 / 4;
                int token = side ? tile % 4 * 16 + 4 * plane + q % 4 : 16 * plane + lane;
                int position = side ? tile / 4 * (pairs ? 32 : 16) + lane : 4 * tile + q % 4;
                put_code(bytes, widths, tile, q, code);
                for (u = 0; u <= (pairs && widths[tile] == 3); u++, position += 16) {
                    int channel = s.order ? order[position] : position;
                    int m = side ? position / group * BLOCK + token : token / group * pad + position;
                    int level = pairs ? levels[(widths[tile] == 3 ? 16 * u : 32) + code] : levels[code & 15];
                    volatile double x;
                    if (channel >= dim || token < first || token >= first + n) continue;
                    x = f16_to_double(read_f16_bits(scale + 2 * m)) * (s.levels ? level : code) +
                        f16_to_double(read_f16_bits(zero + 2 * m));
                    want[(token - first) * (dim + 3) + channel] = (float)x;
                }
            }
        fill_nan(out, sizeof out);
        tkvi_decode_side(&s, bytes, first, n, out, (size_t)(dim + 3));
        CHECK_MEM(out, want, sizeof want);
    }
}

/* >>logarithmic scales, as defined in core/log_scale.h */
static double log_value(int code, int top) {
    return code ? ldexp((double)tkvi_log_mantissa[(code - 1) % 16] / 1024, top - 16 + (code - 1) / 16) : 0.0;
}

static float next_float(float x, int up_or_down) { /* x > 0 */
    uint32_t u = tkvi_bits(x);
    return tkvi_from_bits(up_or_down > 0 ? u + 1 : u - 1);
}

TEST(logarithmic_scales) {
    static const int tops[] = {-TKVI_LOG_TOP, -8, 0, TKVI_LOG_TOP_DEFAULT, TKVI_LOG_TOP};
    int i, code, e;
    for (code = 0; code < 16; code++) { /* 16 steps to the octave, of 11 bits */
        CHECK_NEAR(tkvi_log_mantissa[code], 1024 * pow(2.0, code / 16.0), 0.5);
        CHECK(tkvi_log_mantissa[code] < 2048);
    }
    for (i = 0; i < COUNT(tops); i++) {
        const int top = tops[i];
        for (code = 0; code < 256; code++) {
            float v = tkvi_log_value(code, top);
            CHECK_NEAR(v, log_value(code, top), 0);
            CHECK_EQ(tkvi_log_code(v, top), code);
            if (code < 2) continue;
            CHECK(v > tkvi_log_value(code - 1, top));
            { /* in the logarithm, the border is halfway between the steps before rounding to 11 bits */
                double border = ldexp(pow(2.0, (code - 2 + 0.5) / 16), top - 16);
                float below = (float)border;
                if ((double)below > border) below = next_float(below, -1);
                CHECK_EQ(tkvi_log_code(next_float(below, -1), top), code - 1); /* except the last bit */
                CHECK_EQ(tkvi_log_code(next_float(below, 1), top), code);
            }
            CHECK_EQ(tkvi_log_code(next_float(v, 1), top), code);
            CHECK_EQ(tkvi_log_code(next_float(v, -1), top), code);
        }
        CHECK_EQ(tkvi_log_code(tkvi_log_value(255, top) * 1.3f, top), 255);
        CHECK_EQ(tkvi_log_code(3.4e38f, top), 255);
        CHECK_EQ(tkvi_log_code(tkvi_log_value(1, top) * 0.3f, top), 1);
        CHECK_EQ(tkvi_log_code(1e-45f, top), 1);
        CHECK_EQ(tkvi_log_code(0.0f, top), 0);
        CHECK_EQ(tkvi_log_code(-0.0f, top), 0);
        CHECK_EQ(tkvi_log_code(-1.0f, top), 0);
    }
    for (e = -130; e < 128; e++) { /* the window holds the largest scale, with headroom */
        float largest = (float)ldexp(1.7, e);
        int top = tkvi_log_top(largest);
        CHECK(top >= -TKVI_LOG_TOP && top <= TKVI_LOG_TOP);
        if (e < -90 || e > 90) continue;
        CHECK_LE(3.5 * (double)largest, log_value(255, top));
        CHECK_LE(log_value(255, top), 9.0 * (double)largest);
    }
    CHECK_EQ(tkvi_log_top(0.0f), TKVI_LOG_TOP_DEFAULT);
}

/* >>the rotation */
TEST(rotation_keeps_norms_and_inverts) {
    static float x[TKV_MAX_HEAD_DIM], y[TKV_MAX_HEAD_DIM], z[TKV_MAX_HEAD_DIM];
    tkv_rng r = tkv_rng_seed(81);
    int dim, c;
    for (dim = 1; dim <= TKV_MAX_HEAD_DIM; dim++) {
        double xx = 0, yy = 0, max_error = 0;
        tkv_rng_fill(&r, x, (size_t)dim, 3.0);
        memcpy(y, x, sizeof y);
        tkvi_rotate(y, dim);
        memcpy(z, y, sizeof z);
        tkvi_rotate_back(z, dim);
        for (c = 0; c < dim; c++) {
            double d = fabs((double)z[c] - (double)x[c]);
            xx += (double)x[c] * (double)x[c];
            yy += (double)y[c] * (double)y[c];
            max_error = d > max_error ? d : max_error;
        }
        CHECK_NEAR(yy / xx, 1.0, 2e-6);
        CHECK_LE(max_error, 4e-6 * sqrt(xx));
        for (c = dim; c < TKV_MAX_HEAD_DIM; c++)
            CHECK(tkvi_bits(y[c]) == tkvi_bits(x[c])); /* channels beyond dim do not change */
    }
}

/* The matrix is orthonormal, and it spreads one channel over many. */
TEST(rotation_is_orthonormal_and_mixes) {
    static const int sizes[] = {1, 2, 3, 8, 16, 48, 64, 80, 96, 100, 128, 192, 255, 256};
    static float m[TKV_MAX_HEAD_DIM][TKV_MAX_HEAD_DIM];
    int s, i, j, c;
    for (s = 0; s < COUNT(sizes); s++) {
        const int dim = sizes[s];
        double max_error = 0, largest = 0;
        for (i = 0; i < dim; i++) {
            memset(m[i], 0, sizeof m[i]);
            m[i][i] = 1.0f;
            tkvi_rotate(m[i], dim);
            for (c = 0; c < dim; c++) {
                double a = fabs((double)m[i][c]);
                largest = a > largest ? a : largest;
            }
        }
        for (i = 0; i < dim; i++)
            for (j = 0; j <= i; j++) {
                double dot = 0;
                for (c = 0; c < dim; c++) dot += (double)m[i][c] * (double)m[j][c];
                dot = fabs(dot - (i == j));
                max_error = dot > max_error ? dot : max_error;
            }
        CHECK_LE(max_error, 1e-6);
        if ((dim & (dim - 1)) == 0) CHECK_NEAR(largest, 1 / sqrt((double)dim), 1e-6);
        else if (dim > 8) CHECK_LE(largest, 0.75);
    }
}

/* >>how heads share the bits of a layer */
enum { MAX_HEADS = 24, MAX_TILES = TKV_MAX_HEAD_DIM / 4 };

typedef struct head_set {
    tkvi_head head[MAX_HEADS];
    uint8_t importance[MAX_HEADS][TKV_MAX_HEAD_DIM];
    int n, dim, pad, unit;
} head_set;

/* alike: 1 makes all heads equal. */
static void draw_heads(tkv_rng *r, head_set *s, int n, int dim, int unit, int alike) {
    int h, c, spread = 1 + tkv_rng_below(r, 12);
    memset(s, 0, sizeof *s);
    s->n = n;
    s->dim = dim;
    s->pad = round_up(dim, 16);
    s->unit = unit;
    for (h = 0; h < n; h++) {
        int level = 255;
        if (alike && h) {
            memcpy(s->importance[h], s->importance[0], sizeof s->importance[h]);
            s->head[h] = s->head[0];
        } else {
            for (c = 0; c < dim; c++) {
                s->importance[h][c] = (uint8_t)level;
                level -= tkv_rng_below(r, spread);
                if (level < 1) level = 1;
            }
            s->head[h].reach = -tkv_rng_below(r, 97);
            s->head[h].k_weight = tkv_rng_below(r, 300) + s->head[h].reach;
        }
        s->head[h].importance = s->importance[h];
    }
}

static int sum_bits(const tkvi_tile_counts *runs) {
    int w, sum = 0;
    for (w = 1; w <= 8; w++) sum += w * runs->n[w];
    return sum;
}

/* Returns the gain of one more bit per code in an item: `unit` tiles of 4 channels. Channels descend in importance. */
static int gain_of(const head_set *s, int head, int item, int bits) {
    static const int ladder[6] = {-22, -63, -112, -169, -223, -277}; /* 32 log2 of D(b) - D(b + 1) */
    int c, sum = 0, n = 0, saved;
    for (c = 4 * s->unit * item; c < 4 * s->unit * (item + 1); c++) {
        sum += s->importance[head][c];
        n += s->importance[head][c] > 0;
    }
    if (n == 0) return -1000000;
    /* a group of n channels saves n / (4 unit) of what a full one saves */
    saved = (int)lround(8.0 * log2(n)) - (int)lround(8.0 * log2(4.0 * s->unit));
    return 4 * (s->head[head].k_weight + saved) + 4 * sum / n + ladder[bits];
}

/* Gives one bit after the other to the item with the largest gain. Among equal gains, the item with fewer bits is
 * chosen, then the first one. spent[h]: out, bits of head h. Returns 1 if another item had the gain of the last bit. */
static int share_greedily(const head_set *s, int budget, int cap, int (*bits)[MAX_TILES], int *spent) {
    int h, i, items = s->pad / 4 / s->unit, last = 0, has_tie = 0;
    for (h = 0; h < s->n; h++) {
        spent[h] = 0;
        for (i = 0; i < items; i++) bits[h][i] = 0;
    }
    for (;;) {
        int best_h = -1, best_i = 0, best = -1000000;
        for (h = 0; h < s->n; h++)
            for (i = 0; i < items && spent[h] + s->unit <= cap; i++) {
                int gain = bits[h][i] < 6 ? gain_of(s, h, i, bits[h][i]) : -1000000;
                if (gain > best || (gain == best && gain > -1000000 && bits[h][i] < bits[best_h][best_i])) {
                    best = gain;
                    best_h = h;
                    best_i = i;
                }
            }
        if (best_h < 0) return 0;
        if (budget < s->unit) return has_tie || best == last;
        bits[best_h][best_i]++;
        spent[best_h] += s->unit;
        budget -= s->unit;
        has_tie =
            spent[best_h] + s->unit > cap && best == last; /* a full head leaves equal gains to other heads */
        last = best;
    }
}

TEST(tile_widths_are_greedy) {
    static const int sizes[] = {1, 4, 8, 16, 20, 48, 64, 80, 100, 128, 192, 256};
    static int bits[MAX_HEADS][MAX_TILES];
    static head_set s;
    tkv_rng r = tkv_rng_seed(82);
    int round, rounds = tkv_test_quick() ? 60 : 500, w;
    for (round = 0; round < rounds; round++) {
        int dim = sizes[tkv_rng_below(&r, COUNT(sizes))], unit = round % 3 ? 1 : 4, spent[MAX_HEADS], i,
            budget;
        int count[9] = {0};
        tkvi_tile_counts runs;
        draw_heads(&r, &s, 1, dim, unit, 0);
        budget = tkv_rng_below(&r, s.pad + 8);
        tkvi_choose_widths(&s.head[0], s.pad, unit, budget, &runs);
        (void)share_greedily(&s, budget, 1 << 20, bits, spent);
        CHECK_EQ(sum_bits(&runs), spent[0]);
        CHECK_LE(spent[0], budget);
        for (i = 0; i < s.pad / 4 / unit; i++) count[bits[0][i]] += unit;
        for (w = 1; w <= 6; w++) CHECK_EQ(runs.n[w], count[w]);
        CHECK_EQ(runs.n[8], 0);
        /* less than a unit is left, unless all tiles have 6 bits */
        if (s.dim == s.pad && budget <= 6 * s.pad / 4) CHECK_LE(budget - spent[0], unit - 1);
    }
}

TEST(heads_share_the_whole_budget) {
    static const int quarters[] = {16, 14, 12, 11, 10, 9, 8, 7, 6},
                     sizes[] = {16, 48, 64, 80, 96, 128, 256, 20, 8};
    static int bits[MAX_HEADS][MAX_TILES];
    static head_set s;
    tkv_rng r = tkv_rng_seed(83);
    int round, rounds = tkv_test_quick() ? 80 : 600, n_compared = 0;
    for (round = 0; round < rounds; round++) {
        int n = 1 + tkv_rng_below(&r, round % 5 ? 6 : MAX_HEADS),
            q = quarters[tkv_rng_below(&r, COUNT(quarters))];
        int dim = sizes[tkv_rng_below(&r, COUNT(sizes))], unit = round % 3 ? 1 : 4, budget[MAX_HEADS],
            spent[MAX_HEADS];
        int h, sum = 0, total, all_full = 1, has_tie;
        draw_heads(&r, &s, n, dim, unit, 0);
        tkvi_share_k(s.head, n, q, dim, s.pad, round % 2, unit, budget);
        total = n * tkvi_head_budget(q, dim, unit, round % 2);
        has_tie = share_greedily(&s, total, s.pad, bits, spent);
        n_compared += !has_tie;
        for (h = 0; h < n; h++) {
            int max_bits = (dim + 4 * unit - 1) / (4 * unit) * 6 * unit;
            tkvi_tile_counts runs;
            sum += budget[h];
            CHECK(budget[h] % 2 == 0 && budget[h] >= 0);
            CHECK_LE(budget[h], s.pad + 1); /* 4 bits a channel */
            all_full &= spent[h] == s.pad || spent[h] == max_bits;
            /* budgets are rounded to even numbers, so they may differ by 2 from the greedy ones */
            if (!has_tie)
                CHECK_MSG(abs(budget[h] - spent[h]) <= 2, "head %d of %d, dim %d, unit %d: %d, greedy %d", h,
                          n, dim, unit, budget[h], spent[h]);
            tkvi_choose_widths(&s.head[h], s.pad, unit, budget[h], &runs);
            CHECK_LE(sum_bits(&runs), budget[h]);
            if (budget[h] <= max_bits) CHECK_LE(budget[h] - sum_bits(&runs), unit - 1);
        }
        CHECK_LE(sum, total);
        if (!all_full)
            CHECK_MSG(sum >= total - unit, "%d heads of %d, unit %d: %d of %d", n, dim, unit, sum, total);
    }
    CHECK_LE(rounds / 4, n_compared);
}

TEST(equal_heads_share_equally) {
    static const int sizes[] = {16, 48, 64, 80, 128, 256};
    static head_set s;
    tkv_rng r = tkv_rng_seed(84);
    int round, f, h;
    for (round = 0; round < 60; round++) {
        int n = 2 + round % 9, dim = sizes[round % COUNT(sizes)], unit = round % 2 ? 1 : 4, budget[MAX_HEADS],
            low, high;
        draw_heads(&r, &s, n, dim, unit, 1);
        if (round % 3 == 0) memset(s.importance, 255, sizeof s.importance); /* equal channels, too */
        for (f = TKV_A40; f <= TKV_A15; f++) {
            tkvi_share_k(s.head, n, tkvi_formats[f].bits, dim, s.pad, 1, unit, budget);
            low = high = budget[0];
            for (h = 1; h < n; h++) {
                low = budget[h] < low ? budget[h] : low;
                high = budget[h] > high ? budget[h] : high;
            }
            CHECK_MSG(high - low <= 2 * unit, "%s, %d heads of %d, unit %d: %d to %d", tkvi_formats[f].name,
                      n, dim, unit, low, high);
        }
        for (f = TKV_R40; f <= TKV_R10; f++) {
            tkvi_share_v(s.head, n, tkvi_formats[f].bits, budget);
            for (h = 0; h < n; h++) CHECK_EQ(budget[h], tkvi_formats[f].bits / 2);
        }
    }
}

TEST(heads_share_value_bits_by_reach) {
    static head_set s;
    tkv_rng r = tkv_rng_seed(85);
    int round, f, h, i;
    for (round = 0; round < 300; round++) {
        int n = 1 + tkv_rng_below(&r, MAX_HEADS), half_bits[MAX_HEADS];
        draw_heads(&r, &s, n, 16, 1, 0);
        for (f = TKV_R40; f <= TKV_R10; f++) {
            int sum = 0, quarters = tkvi_formats[f].bits;
            tkvi_share_v(s.head, n, quarters, half_bits);
            for (h = 0; h < n; h++) {
                int b = half_bits[h],
                    is_valid = b == 2 || b == 4 || b == 6 || b == 8 || (b == 3 && quarters < 8);
                sum += b;
                CHECK_MSG(is_valid, "%s gives %d half bits", tkvi_formats[f].name, b);
                for (i = 0; i < n; i++) /* a larger reach gives at least as many bits */
                    if (s.head[i].reach >= s.head[h].reach + 8) CHECK(half_bits[i] >= b);
            }
            CHECK_LE(sum, n * quarters / 2);
            /* less than the largest step remains */
            if (quarters < 16) CHECK_LE(n * quarters / 2 - sum, 1);
            CHECK_LE((double)sum * 4 * 64, (double)tkvi_budget_v(n, quarters, 64));
        }
    }
}

/* >>A and R formats as codecs */
typedef struct share_tables {
    tkvi_share share;
    uint8_t order[TKV_MAX_HEAD_DIM];
    float mean[TKV_MAX_HEAD_DIM];
} share_tables;

static tkvi_side make_k_side(share_tables *o, tkv_rng *r, int dim, int width, float mean, float largest) {
    tkvi_side s;
    int i, pad = round_up(dim, 16);
    memset(o, 0, sizeof *o);
    if (width) o->share.tiles.n[width] = (uint16_t)(pad / 4);
    for (i = 0; i < pad; i++) o->order[i] = (uint8_t)i;
    for (i = dim - 1; i > 0; i--) {
        int j = tkv_rng_below(r, i + 1);
        uint8_t t = o->order[i];
        o->order[i] = o->order[j];
        o->order[j] = t;
    }
    for (i = 0; i < dim; i++) o->mean[i] = mean;
    o->share.top = tkvi_log_top(largest);
    o->share.order = o->order;
    o->share.mean = o->mean;
    tkvi_side_init(&s, &tkvi_formats[TKV_A30], TKV_K, dim, 64, BLOCK, &o->share);
    return s;
}

static tkvi_side make_v_side(share_tables *o, int dim, int half_bits, float largest) {
    tkvi_side s;
    memset(o, 0, sizeof *o);
    o->share.half_bits = half_bits;
    o->share.top = tkvi_log_top(largest);
    tkvi_side_init(&s, &tkvi_formats[TKV_R20], TKV_V, dim, 64, BLOCK, &o->share);
    return s;
}

static void encode_and_decode(const tkvi_side *s, int n) { /* from in to out */
    CHECK(s->bytes <= BUFFER_BYTES);
    tkvi_encode_side(s, &tkvi_simd_ops_scalar, in, (size_t)s->dim, n, bytes);
    tkvi_decode_side(s, bytes, 0, n, out, (size_t)s->dim);
}

typedef struct moments {         /* of decoded values against exact ones */
    double slope, spread, error; /* cov / var, sd / sd, mean square error / var */
} moments;

/* Measures moments about the mean of each column of a block (K) or about 0 (V). */
static moments measure_moments(const tkvi_side *s, tkv_rng *r, int blocks) {
    double xx = 0, xy = 0, yy = 0, ee = 0;
    moments m;
    int b, t, c;
    for (b = 0; b < blocks; b++) {
        fill_input(GAUSSIAN, r, BLOCK, s->dim, in);
        encode_and_decode(s, BLOCK);
        for (c = 0; c < s->dim; c++) {
            double mx = 0, my = 0;
            for (t = 0; t < BLOCK && s->which == TKV_K; t++) {
                mx += (double)in[t * s->dim + c] / (int)BLOCK;
                my += (double)out[t * s->dim + c] / (int)BLOCK;
            }
            for (t = 0; t < BLOCK; t++) {
                double x = (double)in[t * s->dim + c] - mx, y = (double)out[t * s->dim + c] - my;
                double e = (double)in[t * s->dim + c] - (double)out[t * s->dim + c];
                xx += x * x;
                xy += x * y;
                yy += y * y;
                ee += e * e;
            }
        }
    }
    m.slope = xy / xx;
    m.spread = sqrt(yy / xx);
    m.error = ee / xx;
    return m;
}

/* Expected errors of V: D / (1 - D), where D is the error of the best uniform grid for a Gaussian. This is the cost of
 * an unbiased slope. Expected errors of K are measured, with the search of ranges. From three bits on they are smaller,
 * because 64 values have no long tails. One bit keeps the variance in place of the slope. */
TEST(decoded_values_are_unbiased) {
    static const double k_error[7] = {1.0, 0.42, 0.127, 0.0315, 0.0077, 0.0020, 0.00064};
    static const double v_error[9] = {0, 0, 0.571, 0.252, 0.135, 0, 0.0389, 0, 0.0117};
    static const int half_bits[] = {2, 3, 4, 6, 8};
    tkv_rng r = tkv_rng_seed(86);
    int w, i, blocks = tkv_test_quick() ? 10 : 40;
    double last_error = 2;
    share_tables o;
    for (w = 0; w <= 6; w++) {
        tkvi_side s = make_k_side(&o, &r, 64, w, 0.0f, 4.0f);
        moments m = measure_moments(&s, &r, blocks);
        if (w == 1) CHECK_NEAR(m.spread, 1.0, 0.02);
        if (w >= 2) CHECK_NEAR(m.slope, 1.0, 0.01);
        CHECK_MSG(m.error <= 1.08 * k_error[w] && m.error >= 0.9 * k_error[w], "%d bits: %g, not %g", w,
                  m.error, k_error[w]);
        CHECK(m.error < last_error);
        last_error = m.error;
    }
    last_error = 1;
    for (i = 0; i < COUNT(half_bits); i++) {
        tkvi_side s = make_v_side(&o, 128, half_bits[i], 4.0f);
        moments m = measure_moments(&s, &r, blocks);
        CHECK_NEAR(m.slope, 1.0, 0.005);
        CHECK_MSG(m.error <= 1.08 * v_error[half_bits[i]] && m.error >= 0.9 * v_error[half_bits[i]],
                  "%d half bits: %g, not %g", half_bits[i], m.error, v_error[half_bits[i]]);
        CHECK(m.error < last_error);
        last_error = m.error;
    }
}

/* Slot of the outlier that a block of A has. */
static int slot_of_outlier(const tkvi_side *s) { return tkvi_outlier_of(s, bytes).slot; }

/* Moves token t away from the others: to `by` standard deviations, in all channels. */
static void deviate(tkv_rng *r, int dim, int t, double by) {
    int c;
    for (c = 0; c < dim; c++) in[t * dim + c] = (float)(tkv_rng_below(r, 2) ? by : -by);
}

/* A token that is far from the others is found wherever it is, and its values have an error of half a step of 61st
 * parts of the largest one. The others lose nothing by it. */
TEST(an_outlier_keeps_its_values) {
    static const int sizes[] = {16, 48, 64, 80, 128, 5};
    tkv_rng r = tkv_rng_seed(91);
    share_tables o;
    int i, c, t, round;
    for (i = 0; i < COUNT(sizes); i++)
        for (round = 0; round < 40; round++) {
            const int dim = sizes[i], n = round % 3 ? BLOCK : 2 + tkv_rng_below(&r, BLOCK - 1);
            const int at = tkv_rng_below(&r, n);
            const tkvi_side s = make_k_side(&o, &r, dim, 2, round % 2 ? 600.0f : 0.0f, 16.0f);
            double most = 0.0, with = 0.0, without = 0.0;
            fill_input(GAUSSIAN, &r, n, dim, in);
            encode_and_decode(&s, n);
            for (t = 0; t < n; t++)
                for (c = 0; c < dim && t != at; c++)
                    without += pow((double)in[t * dim + c] - (double)out[t * dim + c], 2);
            if (n < 16) continue; /* so few have no usual distance */
            deviate(&r, dim, at, 8.0);
            encode_and_decode(&s, n);
            CHECK_EQ(slot_of_outlier(&s), at);
            for (c = 0; c < dim; c++) {
                const double x = fabs((double)in[at * dim + c] - (double)o.mean[0]);
                most = x > most ? x : most;
            }
            for (c = 0; c < dim; c++)
                CHECK_LE(fabs((double)in[at * dim + c] - (double)out[at * dim + c]),
                         0.53 * most / 61.0 + 1e-4);
            for (t = 0; t < n; t++)
                for (c = 0; c < dim && t != at; c++)
                    with += pow((double)in[t * dim + c] - (double)out[t * dim + c], 2);
            if (dim >= 16 && round % 2 == 0) CHECK_LE(with, 1.35 * without);
        }
}

/* None in blocks whose tokens are equal, or that have one; the first of two equal ones; none where V is inside K. A
 * channel of no importance does not count. */
TEST(which_token_is_the_outlier) {
    uint8_t importance[64];
    tkv_rng r = tkv_rng_seed(92);
    share_tables o;
    tkvi_side s = make_k_side(&o, &r, 64, 3, 0.0f, 16.0f);
    int i, p;
    for (i = 0; i < BLOCK * 64; i++) in[i] = (float)(i % 64);
    encode_and_decode(&s, BLOCK);
    CHECK_EQ(slot_of_outlier(&s), TKVI_NO_OUTLIER);
    fill_input(GAUSSIAN, &r, BLOCK, 64, in);
    encode_and_decode(&s, 1);
    CHECK_EQ(slot_of_outlier(&s), TKVI_NO_OUTLIER);
    deviate(&r, 64, 17, 8.0);
    memcpy(in + 41 * 64, in + 17 * 64, 64 * sizeof *in);
    encode_and_decode(&s, BLOCK);
    CHECK_EQ(slot_of_outlier(&s), 17);
    for (i = 0; i < 64; i++) { /* from here on token 41 deviates in even channels, token 17 in odd ones */
        in[(i % 2 ? 41 : 17) * 64 + i] = 0.0f;
        in[17 * 64 + i] *= 2.0f;
    }
    for (i = 0; i < 4; i++) {
        for (p = 0; p < 64; p++) importance[p] = o.order[p] % 2 == i % 2 ? 255 : i < 2 ? 100 : 0;
        s.importance = importance;
        encode_and_decode(&s, BLOCK);
        CHECK_EQ(slot_of_outlier(&s), i % 2 ? 17 : 41);
    }
    o.share.v_in_k = 1;
    tkvi_side_init(&s, &tkvi_formats[TKV_A30], TKV_K, 64, 64, BLOCK, &o.share);
    CHECK_EQ(s.meta_bytes, 128);
    encode_and_decode(&s, BLOCK);
    CHECK_EQ(slot_of_outlier(&s), TKVI_NO_OUTLIER);
}

/* Block sizes match the bits in the names of the formats. All head_dim give blocks of whole 64 bytes. */
TEST(sizes_match_format_names) {
    static const int heads[] = {32, 64, 96, 128, 192, 256};
    int f, i, dim;
    for (f = TKV_A40; f <= TKV_R10; f++)
        for (i = 0; i < COUNT(heads); i++) { /* the bits of the name, and 8 bits per token of V */
            int side = tkvi_formats[f].rotated, dim_ = heads[i];
            tkv_codec c = make_codec((tkv_format)f, side, dim_, 64),
                      wrong_side = make_codec((tkv_format)f, !side, dim_, 64);
            double want_bits = tkvi_formats[f].bits / 4.0 + (side ? 8.0 / dim_ : 0);
            CHECK_LE(format_bits(&c), want_bits + 8.0 / dim_ - 1e-9); /* an odd tile rounds up */
            CHECK_LE(want_bits - 1e-9, format_bits(&c));
            CHECK_EQ(tkv_get_block_bytes(&wrong_side), 0); /* one side only */
            CHECK(format_bits(&wrong_side) <= 0.0);
        }
    for (f = TKV_A40; f <= TKV_R10; f++)
        for (dim = 1; dim <= TKV_MAX_HEAD_DIM; dim++) {
            tkv_codec c = make_codec((tkv_format)f, tkvi_formats[f].rotated, dim, 64);
            CHECK_EQ(tkv_get_block_bytes(&c) % 64, 0);
            CHECK(tkv_get_block_bytes(&c) > 0 && tkv_get_block_bytes(&c) <= BUFFER_BYTES);
        }
}

TEST(zeros_decode_to_zeros) {
    int f, i, n;
    for (f = TKV_A40; f <= TKV_R10; f++)
        for (i = 0; i < COUNT(head_dims); i++)
            for (n = 1; n <= BLOCK; n += 21) {
                tkv_codec c = make_codec((tkv_format)f, tkvi_formats[f].rotated, head_dims[i], 64);
                int t, wrong = 0;
                memset(in, 0, sizeof in);
                fill_nan(out, sizeof out);
                CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, BUFFER_BYTES), TKV_OK);
                CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, n, out, 0), TKV_OK);
                for (t = 0; t < n * head_dims[i]; t++) wrong += tkvi_bits(out[t]) << 1 != 0;
                CHECK_EQ(wrong, 0);
            }
}

/* One token, or a constant channel: the range is 0, and the offset holds the value. */
TEST(flat_channels_of_keys) {
    static const float values[] = {0.42f, -1.0f, 5.0f, 600.0f, -0.1f, 1000.0f, 1e-3f};
    tkv_rng r = tkv_rng_seed(88);
    share_tables o;
    int w, v, n, t;
    for (w = 0; w <= 6; w++)
        for (v = 0; v < COUNT(values); v++)
            for (n = 1; n <= BLOCK; n += 9) {
                tkvi_side s = make_k_side(&o, &r, 20, w, 0.0f, fabsf(values[v]));
                double worst = 0;
                float round_to_f16;
                for (t = 0; t < n * 20; t++) in[t] = values[v];
                encode_and_decode(&s, n);
                for (t = 0; t < n * 20; t++) {
                    double d = fabs((double)out[t] - (double)values[v]) / fabs((double)values[v]);
                    worst = d > worst ? d : worst;
                }
                CHECK_MSG(worst <= 0.006, "%g: %g of it, %d bits, %d tokens", (double)values[v], worst, w, n);
                round_to_f16 =
                    tkvi_f16_to_f32(tkvi_f32_to_f16(values[v])); /* the static mean holds the value */
                s = make_k_side(&o, &r, 20, w, round_to_f16, 4.0f);
                for (t = 0; t < n * 20; t++) in[t] = round_to_f16;
                encode_and_decode(&s, n);
                CHECK_MEM(out, in, (size_t)(n * 20) * sizeof(float));
            }
}

/* A bias equal to the static mean costs no precision. Sums with 600 are exact here, so the codes are equal. */
TEST(known_biases_cost_nothing) {
    tkv_rng r = tkv_rng_seed(89);
    int w, t;
    for (w = 0; w <= 6; w++) {
        share_tables with, without;
        tkvi_side biased, plain;
        tkv_rng same_rng = r;
        double worst = 0;
        static float plain_out[BLOCK * 64];
        plain = make_k_side(&without, &same_rng, 64, w, 0.0f, 4.0f);
        biased = make_k_side(&with, &r, 64, w, 600.0f, 4.0f);
        for (t = 0; t < BLOCK * 64; t++) in[t] = (float)(tkv_rng_below(&r, 8192) - 4096) / 1024.0f;
        encode_and_decode(&plain, BLOCK);
        memcpy(plain_out, out, sizeof plain_out);
        memcpy(other, bytes, plain.bytes);
        for (t = 0; t < BLOCK * 64; t++) in[t] += 600.0f;
        encode_and_decode(&biased, BLOCK);
        CHECK_MEM(bytes, other, plain.bytes);
        for (t = 0; t < BLOCK * 64; t++) {
            double d = fabs((double)out[t] - 600.0 - (double)plain_out[t]);
            worst = d > worst ? d : worst;
        }
        CHECK_LE(worst, 1.0 / 8192); /* one or two roundings at 600 */
    }
}

/* A bias that the static mean does not contain costs precision: the offset is only one byte. */
TEST(unknown_biases_decode_sanely) {
    tkv_rng r = tkv_rng_seed(90);
    int w, t, k;
    for (w = 1; w <= 6; w++)
        for (k = 0; k < 6; k++) {
            static const double biases[] = {20, -100, 600, -600, 3000, 60000};
            share_tables o;
            tkvi_side s = make_k_side(&o, &r, 64, w, 0.0f, (float)fabs(biases[k]));
            double worst = 0;
            for (t = 0; t < BLOCK * 64; t++) in[t] = (float)(biases[k] + tkv_rng_gauss(&r));
            encode_and_decode(&s, BLOCK);
            for (t = 0; t < BLOCK * 64; t++) {
                double d = fabs((double)out[t] - (double)in[t]);
                worst = d > worst ? d : worst;
            }
            CHECK_MSG(worst <= 4.5 + fabs(biases[k]) * 0.01, "bias %g, %d bits: off by %g", biases[k], w,
                      worst);
        }
}

/* Each token has its own scale, so tokens of all norms keep their precision. */
TEST(values_of_all_norms) {
    static const int heads[] = {16, 64, 80, 96, 128, 192, 256}, half_bits[] = {2, 3, 4, 6, 8};
    static const double errors[] = {0.85, 0.58, 0.42, 0.23, 0.14};
    tkv_rng r = tkv_rng_seed(91);
    int i, b, t, c;
    for (i = 0; i < COUNT(heads); i++)
        for (b = 0; b < COUNT(half_bits); b++) {
            share_tables o;
            const int dim = heads[i];
            tkvi_side s = make_v_side(&o, dim, half_bits[b], 256.0f);
            double mean_error = 0;
            fill_input(GAUSSIAN, &r, BLOCK, dim, in);
            for (t = 0; t < BLOCK; t++)
                for (c = 0; c < dim; c++)
                    in[t * dim + c] *= (float)ldexp(t % 5 == 4 && c == t ? 30.0 : 1.0, t % 9 - 2);
            encode_and_decode(&s, BLOCK);
            for (t = 0; t < BLOCK; t++) {
                double xx = 0, xy = 0, ee = 0;
                for (c = 0; c < dim; c++) {
                    double x = (double)in[t * dim + c], y = (double)out[t * dim + c];
                    xx += x * x;
                    xy += x * y;
                    ee += (x - y) * (x - y);
                }
                CHECK_NEAR(xy / xx, 1.0, 0.03); /* half a step of the scale, and 12 bits */
                mean_error += sqrt(ee / xx) / (int)BLOCK;
            }
            CHECK_LE(mean_error, errors[b] * (dim < 64 ? 1.3 : 1.08));
        }
}

/* Values up to the largest fp16 value and far beyond decode to finite values, mostly of the same sign. */
TEST(large_values_stay_in_order) {
    tkv_rng r = tkv_rng_seed(92);
    int f, k, t;
    for (f = TKV_A40; f <= TKV_R10; f++)
        for (k = 0; k < 4; k++) {
            static const double sizes[] = {65504, 3e6, 1e30, 3e38};
            int side = tkvi_formats[f].rotated;
            tkv_codec c = make_codec((tkv_format)f, side, 64, 64);
            share_tables o;
            tkvi_side s;
            double xy = 0, xx = 0;
            for (t = 0; t < BLOCK * 64; t++) in[t] = (float)(sizes[k] * (2 * tkv_rng_uniform(&r) - 1));
            CHECK_EQ(tkv_encode_block(&c, in, 0, BLOCK, bytes, BUFFER_BYTES), TKV_OK); /* scales end at 2^8 */
            CHECK_EQ(tkv_decode_block(&c, bytes, BUFFER_BYTES, BLOCK, out, 0), TKV_OK);
            for (t = 0; t < BLOCK * 64; t++) {
                if (!tkv_test_is_finite((double)out[t])) xy -= 1e300;
                xy += (double)in[t] / sizes[k] * (double)out[t];
            }
            if (k < 3) CHECK_LE(0, xy);
            if (k) continue;
            s = side ? make_v_side(&o, 64, tkvi_formats[f].bits / 2, 65504.0f)
                     : make_k_side(&o, &r, 64, 3, 0.0f, 65504.0f);
            encode_and_decode(&s, BLOCK);
            for (t = 0, xy = 0; t < BLOCK * 64; t++) {
                xx += (double)in[t] * (double)in[t];
                xy += (double)in[t] * (double)out[t];
            }
            CHECK_NEAR(xy / xx, 1.0, 0.05);
        }
}

/* Any bytes can be decoded, and any finite floats encoded. Run this with -fsanitize=address,undefined. */
TEST(any_bytes_and_any_floats) {
    tkv_rng r = tkv_rng_seed(93);
    int f, round, i;
    for (f = TKV_A40; f <= TKV_R10; f++)
        for (round = 0; round < (tkv_test_quick() ? 10 : 60); round++) {
            int dim = 1 + tkv_rng_below(&r, TKV_MAX_HEAD_DIM), n = 1 + tkv_rng_below(&r, BLOCK), finite = 0;
            tkv_codec c = make_codec((tkv_format)f, tkvi_formats[f].rotated, dim, 64);
            size_t size = tkv_get_block_bytes(&c), k;
            for (k = 0; k < size; k++) bytes[k] = (uint8_t)(round == 0 ? 0xff : tkv_rng_below(&r, 256));
            CHECK_EQ(tkv_decode_block(&c, bytes, size, n, out, 0), TKV_OK);
            for (i = 0; i < n * dim; i++) finite += tkv_test_is_finite((double)out[i]);
            CHECK(!tkvi_formats[f].rotated || finite == n * dim);
            for (i = 0; i < n * dim; i++) {
                uint32_t u = (uint32_t)tkv_rng_u64(&r);
                if ((u & 0x7f800000u) == 0x7f800000u) u &= 0x807fffffu;
                if (round % 3 == 0) u &= 0x80ffffffu; /* tiny values */
                in[i] = tkvi_from_bits(u);
            }
            CHECK_EQ(tkv_encode_block(&c, in, 0, n, bytes, size), TKV_OK);
            CHECK_EQ(tkv_decode_block(&c, bytes, size, n, out, 0), TKV_OK);
            for (finite = 0, i = 0; i < n * dim; i++) finite += tkv_test_is_finite((double)out[i]);
            CHECK_EQ(finite, n * dim);
        }
}

/* Kernels multiply codes minus the centre. */
TEST(centre_of_codes) {
    static const int8_t levels[16] = {-127};
    tkvi_side s;
    memset(&s, 0, sizeof s);
    CHECK_NEAR(tkvi_centre(&s, 1), 0.5, 0);
    CHECK_NEAR(tkvi_centre(&s, 2), 1.5, 0);
    CHECK_NEAR(tkvi_centre(&s, 3), 3.5, 0);
    CHECK_NEAR(tkvi_centre(&s, 8), 127.5, 0);
    s.levels = levels;
    CHECK_NEAR(tkvi_centre(&s, 2), 0, 0);
}

/* >>SQuat */
enum { SAMPLE = 32, SAMPLE_DIM = 128 };
static double sample_q[SAMPLE][SAMPLE_DIM], sample_k[SAMPLE][SAMPLE_DIM];

static int load_sample(void) { /* tests/data/squat_qk.txt describes it */
    FILE *f = fopen("tests/data/squat_qk.bin", "rb");
    int i, c;
    if (!f) return 0;
    for (i = 0; i < 2 * SAMPLE; i++)
        for (c = 0; c < SAMPLE_DIM; c++) {
            int low = fgetc(f), high = fgetc(f);
            double x = (double)tkvi_bf16_to_f32((uint16_t)((high & 255) << 8 | (low & 255)));
            if (high == EOF) {
                fclose(f);
                return 0;
            }
            if (i < SAMPLE) sample_q[i][c] = x;
            else sample_k[i - SAMPLE][c] = x;
        }
    fclose(f);
    return 1;
}

/* Computes the eigenvalues (diagonal of a) and eigenvectors (columns of v), by Jacobi rotations. a is symmetric. */
static void diagonalize(double a[SAMPLE][SAMPLE], double v[SAMPLE][SAMPLE]) {
    int sweep, p, q, i;
    for (p = 0; p < SAMPLE; p++)
        for (q = 0; q < SAMPLE; q++) v[p][q] = p == q;
    for (sweep = 0; sweep < 30; sweep++)
        for (p = 0; p < SAMPLE; p++)
            for (q = p + 1; q < SAMPLE; q++) {
                double theta, t, c, s;
                if (fabs(a[p][q]) < 1e-300) continue;
                theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
                t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(theta * theta + 1));
                c = 1 / sqrt(t * t + 1);
                s = t * c;
                for (i = 0; i < SAMPLE; i++) {
                    double x = a[i][p], y = a[i][q];
                    a[i][p] = c * x - s * y;
                    a[i][q] = s * x + c * y;
                }
                for (i = 0; i < SAMPLE; i++) {
                    double x = a[p][i], y = a[q][i];
                    a[p][i] = c * x - s * y;
                    a[q][i] = s * x + c * y;
                    x = v[i][p], y = v[i][q];
                    v[i][p] = c * x - s * y;
                    v[i][q] = s * x + c * y;
                }
            }
}

/* Computes I + lambda Q^T Q over the r largest directions of the sample's queries. p: out, packed. */
static void sample_metric(int r, double lambda, float *p) {
    static double gram[SAMPLE][SAMPLE], vector[SAMPLE][SAMPLE], big[SAMPLE_DIM][SAMPLE_DIM];
    int i, j, k, c;
    for (i = 0; i < SAMPLE; i++)
        for (j = 0; j < SAMPLE; j++)
            for (gram[i][j] = 0, c = 0; c < SAMPLE_DIM; c++) gram[i][j] += sample_q[i][c] * sample_q[j][c];
    diagonalize(gram, vector);
    for (i = 0; i < SAMPLE_DIM; i++)
        for (j = 0; j < SAMPLE_DIM; j++) big[i][j] = i == j;
    for (k = 0; k < SAMPLE; k++) {
        double direction[SAMPLE_DIM];
        int larger = 0;
        for (i = 0; i < SAMPLE; i++) larger += gram[i][i] > gram[k][k];
        if (larger >= r) continue;
        for (c = 0; c < SAMPLE_DIM; c++)
            for (direction[c] = 0, i = 0; i < SAMPLE; i++) direction[c] += vector[i][k] * sample_q[i][c];
        for (i = 0; i < SAMPLE_DIM; i++)
            for (j = 0; j < SAMPLE_DIM; j++) big[i][j] += lambda * direction[i] * direction[j];
    }
    for (j = 0; j < SAMPLE_DIM; j++)
        for (i = 0; i <= j; i++) p[tkvi_packed(i, j)] = (float)big[i][j];
}

/* Returns the authors' attention gap: the sum of |differences| of causal softmax weights. */
static double attention_gap(double k[SAMPLE][SAMPLE_DIM]) {
    double gap = 0;
    int i, j, c, which;
    for (i = 0; i < SAMPLE; i++) {
        double p[2][SAMPLE];
        for (which = 0; which < 2; which++) {
            double top = -1e300, sum = 0;
            for (j = 0; j <= i; j++) {
                double s = 0;
                for (c = 0; c < SAMPLE_DIM; c++) s += sample_q[i][c] * (which ? k[j][c] : sample_k[j][c]);
                p[which][j] = s / sqrt((double)SAMPLE_DIM);
                top = p[which][j] > top ? p[which][j] : top;
            }
            for (j = 0; j <= i; j++) sum += p[which][j] = exp(p[which][j] - top);
            for (j = 0; j <= i; j++) p[which][j] /= sum;
        }
        for (j = 0; j <= i; j++) gap += fabs(p[0][j] - p[1][j]);
    }
    return gap;
}

/* The authors' quantizer with our U: 2 bits, groups of 32 tokens, float scales. u NULL: no feedback. */
static void quantize_like_the_paper(const float *u, int unit, double result[SAMPLE][SAMPLE_DIM]) {
    static double x[SAMPLE][SAMPLE_DIM];
    int from, c, f, t;
    memcpy(x, sample_k, sizeof x);
    for (from = 0; from < SAMPLE_DIM; from += unit) {
        int end = from + unit < SAMPLE_DIM ? from + unit : SAMPLE_DIM;
        for (c = from; c < end; c++) {
            double low = x[0][c], high = x[0][c], step;
            for (t = 1; t < SAMPLE; t++) {
                low = x[t][c] < low ? x[t][c] : low;
                high = x[t][c] > high ? x[t][c] : high;
            }
            step = (high - low) / 3;
            for (t = 0; t < SAMPLE; t++) result[t][c] = round_half_even((x[t][c] - low) / step) * step + low;
        }
        for (c = from; u && c < end && end < SAMPLE_DIM; c++)
            for (f = end; f < SAMPLE_DIM; f++)
                for (t = 0; t < SAMPLE; t++)
                    x[t][f] += (result[t][c] - x[t][c]) * (double)u[tkvi_packed(c, f)];
    }
}

static float packed[TKV_MAX_HEAD_DIM * (TKV_MAX_HEAD_DIM + 1) / 2];
static uint16_t factors[TKV_MAX_HEAD_DIM * TKV_MAX_HEAD_DIM / 2];

TEST(squat_matches_the_authors) {
    static double decoded[SAMPLE][SAMPLE_DIM];
    double gap;
    REQUIRE(load_sample());
    quantize_like_the_paper(NULL, SAMPLE_DIM, decoded);
    gap = attention_gap(decoded);
    CHECK_NEAR(gap, 5.1405296, 1e-5); /* the first number of their notebook */
    sample_metric(30, 0.1, packed);
    tkvi_feedback_from(packed, SAMPLE_DIM, 2);
    quantize_like_the_paper(packed, 2, decoded);
    gap = attention_gap(decoded);
    CHECK_NEAR(gap, 1.5488429, 1e-4); /* the second number */
}

static double measure_gap(int unit, int fit, double eta, int first) {
    static double decoded[SAMPLE][SAMPLE_DIM];
    tkv_format_options o;
    tkvi_side s;
    int t, c;
    memset(&o, 0, sizeof o);
    o.group_size = 32;
    o.fit = fit;
    o.squat_block = unit ? unit : 16;
    tkvi_side_make(&s, &tkvi_formats[TKV_SQUAT2], TKV_K, SAMPLE_DIM, BLOCK, &o, 0, 0, NULL);
    for (t = first; t < SAMPLE; t++)
        for (c = 0; c < SAMPLE_DIM; c++) in[(t - first) * SAMPLE_DIM + c] = (float)sample_k[t][c];
    if (unit) {
        double trace = 0;
        int i, q;
        for (q = 0; q < SAMPLE; q++)
            for (i = 0; i < SAMPLE_DIM; i++) trace += sample_q[q][i] * sample_q[q][i];
        for (c = 0; c < SAMPLE_DIM; c++)
            for (i = 0; i <= c; i++) {
                double sum = 0;
                for (q = 0; q < SAMPLE; q++) sum += sample_q[q][i] * sample_q[q][c];
                packed[tkvi_packed(i, c)] = (float)((i == c) + eta * sum * (int)SAMPLE_DIM / trace);
            }
        tkvi_feedback_from(packed, SAMPLE_DIM, unit);
        tkvi_feedback_store(packed, SAMPLE_DIM, unit, factors);
        s.head_state = factors;
    }
    tkvi_encode_side(&s, &tkvi_simd_ops_scalar, in, SAMPLE_DIM, SAMPLE - first, bytes);
    tkvi_decode_side(&s, bytes, 0, SAMPLE - first, out, SAMPLE_DIM);
    memcpy(decoded, sample_k, sizeof decoded);
    for (t = first; t < SAMPLE; t++)
        for (c = 0; c < SAMPLE_DIM; c++) decoded[t][c] = (double)out[(t - first) * SAMPLE_DIM + c];
    return attention_gap(decoded);
}

/* The library's encoder on the same sample. Scales and factors are fp16. */
TEST(squat_reduces_the_gap) {
    double plain, coarse, fine, kept_fine, kept_plain;
    REQUIRE(load_sample());
    plain = measure_gap(0, 0, 0, 0);
    coarse = measure_gap(64, 0, 5, 0);
    fine = measure_gap(16, 0, 5, 0);
    CHECK_NEAR(plain, 5.14, 0.02); /* fp16 scales do not change the gap */
    CHECK_LE(coarse, 0.8 * plain);
    CHECK_LE(fine, 0.6 * plain);
    kept_plain = measure_gap(0, 0, 0, 2); /* two sinks stay exact */
    kept_fine = measure_gap(16, TKV_FIT_CLIP, 5, 2);
    CHECK_LE(kept_plain, plain);
    CHECK_LE(kept_fine, 0.6 * kept_plain);
    if (getenv("TKV_TEST_SHOW"))
        printf("\n    plain %.4f, blocks of 64 %.4f, of 16 %.4f; sinks exact: plain %.4f, clip and 16 %.4f\n",
               plain, coarse, fine, kept_plain, kept_fine);
}

/* Computes one column of U from its definition, - P_ff^-1 P_fb, by elimination. */
static void naive_factors(const double *p, int dim, int from, int end, int c, double *u) {
    static double a[64][65];
    int n = dim - end, i, j, k;
    for (i = 0; i < n; i++) {
        for (j = 0; j < n; j++) a[i][j] = p[(end + i) * dim + end + j];
        a[i][n] = -p[(end + i) * dim + c];
    }
    (void)from;
    for (k = 0; k < n; k++) /* P is positive definite: no pivots */
        for (i = 0; i < n; i++) {
            double by = a[i][k] / a[k][k];
            if (i == k) continue;
            for (j = k; j <= n; j++) a[i][j] -= by * a[k][j];
        }
    for (i = 0; i < n; i++) u[i] = a[i][n] / a[i][i];
}

TEST(squat_factors) {
    static const int sizes[] = {1, 2, 15, 16, 17, 33, 48, 64};
    static double p[64 * 64];
    tkv_rng r = tkv_rng_seed(22);
    int k, unit, i, j, c, f, q;
    for (k = 0; k < COUNT(sizes); k++)
        for (unit = 1; unit <= 64; unit *= 4) {
            int dim = sizes[k], from;
            const uint16_t *u = factors;
            memset(p, 0, sizeof p);
            for (q = 0; q < 40; q++) {
                double x[64];
                for (i = 0; i < dim; i++) x[i] = tkv_rng_gauss(&r) * (i % 7 + 1) + (i % 5 == 2 ? 3 : 0);
                for (i = 0; i < dim; i++)
                    for (j = 0; j < dim; j++) p[i * dim + j] += x[i] * x[j] / 200;
            }
            for (i = 0; i < dim; i++) p[i * dim + i] += 1;
            for (j = 0; j < dim; j++)
                for (i = 0; i <= j; i++) packed[tkvi_packed(i, j)] = (float)p[i * dim + j];
            tkvi_feedback_from(packed, dim, unit);
            tkvi_feedback_store(packed, dim, unit, factors);
            for (from = 0; from + unit < dim; from += unit)
                for (c = from; c < from + unit; c++) {
                    double exact[64];
                    naive_factors(p, dim, from, from + unit, c, exact);
                    for (f = from + unit; f < dim; f++, u++)
                        CHECK_NEAR(tkvi_f16_to_f32(*u), exact[f - from - unit],
                                   1e-3 * fabs(exact[f - from - unit]) + 1e-4);
                }
            CHECK_EQ(u - factors, tkvi_feedback_count(dim, unit));
        }
}

/* Compares the encoder bit for bit with a plain loop over its definition. */
TEST(squat_matches_its_definition) {
    static const int sizes[] = {1, 7, 16, 31, 64, 80, 128, 255, 256};
    static float x[MAX_VALUES];
    tkv_rng r = tkv_rng_seed(23);
    int k, i, t, c, g, f;
    if (FAST_MATH) SKIP("the compiler may reorder sums");
    for (k = 0; k < 2 * COUNT(sizes); k++) {
        int dim = sizes[k / 2], n = k % 3 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK), from, levels;
        tkv_codec plain = make_codec(k % 2 ? TKV_KIVI4 : TKV_KIVI2, 0, dim, k % 4 < 2 ? 32 : 64);
        tkv_format_options o;
        tkvi_side s;
        memset(&o, 0, sizeof o);
        o.group_size = plain.options.group_size;
        o.squat_block = k % 5 ? 16 : 64;
        levels = k % 2 ? 15 : 3;
        tkvi_side_make(&s, &tkvi_formats[k % 2 ? TKV_SQUAT4 : TKV_SQUAT2], TKV_K, dim, BLOCK, &o, 0, 0, NULL);
        fill_block(&r, k % 3, in, n, dim);
        tkvi_encode_side(&s, &tkvi_simd_ops_scalar, in, (size_t)dim, n, bytes);
        CHECK_EQ(tkv_encode_block(&plain, in, 0, n, other, sizeof other), TKV_OK);
        CHECK_EQ(s.bytes, tkv_get_block_bytes(&plain));
        CHECK_MEM(bytes, other, s.bytes); /* without feedback, SQuat is KIVI */
        for (i = 0; i < (int)tkvi_feedback_count(dim, o.squat_block); i++)
            factors[i] = tkvi_f32_to_f16((float)(0.2 * tkv_rng_gauss(&r)));
        s.head_state = factors;
        tkvi_encode_side(&s, &tkvi_simd_ops_scalar, in, (size_t)dim, n, bytes);
        tkvi_decode_side(&s, bytes, 0, n, out, (size_t)dim);
        memcpy(x, in, (size_t)(n * dim) * sizeof *x);
        for (g = 0; g < n; g += o.group_size) {
            const uint16_t *u = factors;
            int stop = g + o.group_size < n ? g + o.group_size : n;
            for (from = 0; from < dim; from += o.squat_block) {
                int end = from + o.squat_block < dim ? from + o.squat_block : dim;
                for (c = from; c < end; c++) {
                    double low = 1e30, high = -1e30, scale, zero;
                    for (t = g; t < stop; t++) {
                        low = (double)x[t * dim + c] < low ? (double)x[t * dim + c] : low;
                        high = (double)x[t * dim + c] > high ? (double)x[t * dim + c] : high;
                    }
                    scale = round_to_f16((double)as_float((double)as_float(high - low) / levels));
                    zero = round_to_f16(low);
                    for (t = g; t < stop; t++) {
                        double v = (double)as_float((double)x[t * dim + c] - zero);
                        v = scale > 0 ? round_half_even((double)as_float(v / scale)) : 0;
                        v = v < 0 ? 0 : v > levels ? levels : v;
                        want[t * dim + c] = as_float(scale * v + zero);
                        x[t * dim + c] = as_float((double)want[t * dim + c] - (double)x[t * dim + c]);
                    }
                }
                for (c = from; c < end && end < dim; c++)
                    for (t = g; t < stop; t++)
                        for (f = end; f < dim; f++) {
                            double by = (double)tkvi_f16_to_f32(u[(c - from) * (dim - end) + f - end]);
                            by = (double)as_float((double)x[t * dim + c] * by);
                            x[t * dim + f] = as_float((double)x[t * dim + f] + by);
                        }
                u += (end - from) * (dim - end);
            }
        }
        for (i = 0, c = 0; i < n * dim; i++) c += tkvi_bits(out[i]) != tkvi_bits(want[i]);
        CHECK_MSG(c == 0, "head_dim %d, %d tokens: %d values", dim, n, c);
    }
}

/* >>the same bytes and values on every machine */
static uint64_t hash_of_block(uint64_t h, const tkvi_side *s, int n) {
    tkvi_encode_side(s, &tkvi_simd_ops_scalar, in, (size_t)s->dim, n, bytes);
    tkvi_decode_side(s, bytes, 0, n, out, (size_t)s->dim);
    return hash_of_floats(hash_of(h, bytes, s->bytes), out, n * s->dim);
}

TEST(golden) {
    static const struct {
        tkv_format format;
        uint64_t hash;
    } known[] = {{TKV_INT8, 0x569db05a008d5270u},     {TKV_INT4, 0xb1b0f22cbe956770u},
                 {TKV_FP8_E4M3, 0x23e500ce146cc013u}, {TKV_FP8_E5M2, 0x304c9ea1cb8e2201u},
                 {TKV_FP4, 0x0a503352a233339du},      {TKV_Q8, 0x8ac91b01595c58bbu},
                 {TKV_KIVI4, 0x630c128741a20805u},    {TKV_KIVI3, 0x16b2809d094809adu},
                 {TKV_KIVI2, 0x1cd40a8eebb6bb2bu},    {TKV_SQUAT4, 0xe5edfcec2f49622eu},
                 {TKV_SQUAT2, 0x4b7cf1a181dba730u},   {TKV_SUBSPACE4, 0x6dc2ae2a918aa249u},
                 {TKV_SUBSPACE2, 0xa85dd7501f1f9f15u}};
    static const int sizes[] = {1, 24, 80, 128};
    int f, i, side, flags, q, a, b;
    if (FAST_MATH) SKIP("encoders may round otherwise");
    for (f = 0; f < COUNT(known); f++) {
        const tkvi_format *format = &tkvi_formats[known[f].format];
        tkv_rng r = tkv_rng_seed(99);
        uint64_t h = HASH_START;
        for (i = 0; i < COUNT(sizes); i++)
            for (side = 0; side < 2; side++)
                for (flags = 0; flags < 6; flags++) {
                    tkv_format_options o;
                    tkvi_side s;
                    if (!tkvi_format_stores(format, side ? TKV_V : TKV_K)) continue;
                    memset(&o, 0, sizeof o);
                    o.group_size = flags % 2 ? 64 : 32;
                    o.fit = flags;
                    o.rotate = flags % 4;
                    o.center_k = flags / 3;
                    o.squat_block = flags < 4 ? 16 : 64;
                    o.subspaces = 1 + flags;
                    tkvi_side_make(&s, format, side ? TKV_V : TKV_K, sizes[i], BLOCK, &o, 0, 0, NULL);
                    if (tkvi_formats[known[f].format].family->learn_queries) {
                        memset(packed, 0, sizeof packed);
                        for (q = 0; q < 20; q++) {
                            float x[128];
                            for (a = 0; a < sizes[i]; a++) x[a] = (float)(tkv_rng_below(&r, 15) - 7 + a % 3);
                            for (b = 0; b < sizes[i]; b++)
                                for (a = 0; a <= b; a++)
                                    packed[tkvi_packed(a, b)] += x[a] * x[b]; /* integers: exact sums */
                        }
                        for (a = 0; a < sizes[i]; a++) packed[tkvi_packed(a, a)] += 100;
                        tkvi_feedback_from(packed, sizes[i], o.squat_block);
                        tkvi_feedback_store(packed, sizes[i], o.squat_block, factors);
                        s.head_state = factors;
                    }
                    fill_block(&r, flags, in, 50, sizes[i]);
                    h = hash_of_block(h, &s, 50);
                }
        if (getenv("TKV_TEST_SHOW")) printf("\n    {%s, 0x%016llxu}", format->name, (unsigned long long)h);
        CHECK_MSG(h == known[f].hash, "%s: %016llx", format->name, (unsigned long long)h);
    }
}

/* sums[t]: the sum of the codes of slot t in the tiles of a side. It is 0 if all are 0. */
static void sum_codes_of_slots(const tkvi_side *s, const uint8_t *side, int sums[TKVI_BLOCK]) {
    uint8_t code[TKVI_TILE_CODES];
    int width, i, k;
    memset(sums, 0, TKVI_BLOCK * sizeof *sums);
    for (width = TKVI_MAX_WIDTH; width > 0; width--)
        for (i = 0; i < s->tiles.n[width]; i++, side += TKVI_TILE_BYTES(width)) {
            tkvi_unpack_tile(side, width, code);
            for (k = 0; k < TKVI_TILE_CODES; k++)
                sums[s->which == TKV_K ? k / 4 : i % 4 * 16 + k / 64 * 4 + k % 4] += code[k];
        }
}

/* Clears slots of a side that was coded from x as `coded`, which decodes to `before`, and of one coded from x with the
 * rows of dead slots in another order. */
static void check_cleared(const tkvi_side *s, const float *x, const uint8_t *coded, const float *before,
                          uint64_t dead_mask, const char *what) {
    static float mixed[TKVI_BLOCK * TKV_MAX_HEAD_DIM], after[TKVI_BLOCK * TKV_MAX_HEAD_DIM];
    static uint8_t cleared[2][TKVI_BLOCK * TKV_MAX_HEAD_DIM * 5];
    const size_t dim = (size_t)s->dim;
    int t, group, first, last, n_set = 0, sums[TKVI_BLOCK] = {0};
    memcpy(mixed, x, TKVI_BLOCK * dim * sizeof *x);
    for (group = 0; group < TKVI_BLOCK; group += 32)
        for (first = group, last = group + 31; first < last; first++, last--) {
            while (first < last && !(dead_mask >> first & 1)) first++;
            while (first < last && !(dead_mask >> last & 1)) last--;
            memcpy(mixed + (size_t)first * dim, x + (size_t)last * dim, dim * sizeof *x);
            memcpy(mixed + (size_t)last * dim, x + (size_t)first * dim, dim * sizeof *x);
        }
    memcpy(cleared[0], coded, s->bytes);
    tkvi_encode_side(s, &tkvi_simd_ops_scalar, mixed, dim, TKVI_BLOCK, cleared[1]);
    tkvi_clear_slots(s, dead_mask, cleared[0]);
    tkvi_clear_slots(s, dead_mask, cleared[1]);
    tkvi_decode_side(s, cleared[0], 0, TKVI_BLOCK, after, dim);
    for (t = 0; t < TKVI_BLOCK; t++)
        CHECK_MSG((dead_mask >> t & 1) ||
                      memcmp(before + (size_t)t * dim, after + (size_t)t * dim, dim * sizeof *x) == 0,
                  "%s, %d channels, side %d: a live token has changed in slot %d", what, s->dim,
                  (int)s->which, t);
    if (!s->has_outlier || (dead_mask & 3u << 19) == 0) /* else a column has the codes of a neighbour */
        CHECK_MSG(memcmp(cleared[0], cleared[1], s->bytes) == 0, "%s, %d channels, side %d, dead %08x%08x",
                  what, s->dim, (int)s->which, (unsigned)(dead_mask >> 32),
                  (unsigned)(dead_mask & 0xffffffffu));
    if (s->format->stored == TKVI_AS_TILES) sum_codes_of_slots(s, cleared[0], sums);
    for (t = 0; t < TKVI_BLOCK && s->format->stored == TKVI_AS_TILES; t++)
        if (dead_mask >> t & 1) CHECK_EQ(sums[t], 0);
    if (s->has_outlier && s->dim > 2 && ~dead_mask) {
        const tkvi_outlier o = tkvi_outlier_of(s, cleared[0]);
        CHECK_EQ(o.slot, dead_mask >> 20 & 1 ? TKVI_NO_OUTLIER : 20);
        for (t = 0; t < s->pad && o.slot == TKVI_NO_OUTLIER; t++) n_set += o.row[t] & 254;
        if (dead_mask >> 19 & 3) CHECK_EQ(sums[20], 0);
    }
    for (t = 0; t < (int)s->bytes && !~dead_mask; t++) n_set += cleared[0][t];
    CHECK_EQ(n_set, 0);
}

/* Cleared slots hold nothing of their tokens, and the others decode to the same bits. Whole numbers have the same sums in
 * any order, so all that channels have in common stays when rows change places. Slot 20 is the outlier of formats A. */
TEST(cleared_slots_hold_nothing) {
    static const int dims[] = {1, 4, 16, 18, 64, 100, 576};
    static const uint64_t masks[] = {~(uint64_t)0,       0xffffffffu,        (uint64_t)0xffffffffu << 32,
                                     (uint64_t)3 << 2,   ~(uint64_t)0 << 21, ~((uint64_t)3 << 19),
                                     (uint64_t)3 << 19,  (uint64_t)1 << 20,  (uint64_t)1 << 19,
                                     (uint64_t)15 << 60, 0xf0f00f0f33335555u};
    static float x[TKVI_BLOCK * TKV_MAX_HEAD_DIM], before[TKVI_BLOCK * TKV_MAX_HEAD_DIM];
    static uint8_t coded[TKVI_BLOCK * TKV_MAX_HEAD_DIM * 5];
    int f, d, i, which, group;
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        for (which = 0; which < 2; which++)
            for (d = 0; d < COUNT(dims) && tkvi_format_stores(&tkvi_formats[f], (tkv_side)which); d++)
                for (group = 32; group <= 64; group += 32) {
                    const int step = dims[d] > 256 ? 5 : 1; /* wide rows take most of the time */
                    tkvi_side s;
                    if (dims[d] > 256 && tkvi_formats[f].family->too_wide) continue;
                    tkvi_side_init(&s, &tkvi_formats[f], (tkv_side)which, dims[d], group, TKVI_BLOCK, NULL);
                    for (i = 0; i < TKVI_BLOCK * dims[d]; i++)
                        x[i] =
                            (float)((i * 7919 + i / 31 * 101) % 61 - 30) * (i / dims[d] == 20 ? 60.0f : 1.0f);
                    for (i = 0; i < dims[d]; i++) x[20 * dims[d] + i] += 7.0f;
                    CHECK(s.bytes <= sizeof coded);
                    tkvi_encode_side(&s, &tkvi_simd_ops_scalar, x, (size_t)dims[d], TKVI_BLOCK, coded);
                    tkvi_decode_side(&s, coded, 0, TKVI_BLOCK, before, (size_t)dims[d]);
                    for (i = 0; i < COUNT(masks); i += step)
                        check_cleared(&s, x, coded, before, masks[i], tkvi_formats[f].name);
                }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(tile_bits);
    RUN(tile_bits_literal);
    RUN(tile_round_trip);
    RUN(decode_a_range_of_tokens);
    RUN(mixed_widths);
    RUN(centre_of_codes);
    RUN(logarithmic_scales);
    RUN(rotation_keeps_norms_and_inverts);
    RUN(rotation_is_orthonormal_and_mixes);
    RUN(tile_widths_are_greedy);
    RUN(heads_share_the_whole_budget);
    RUN(equal_heads_share_equally);
    RUN(heads_share_value_bits_by_reach);
    RUN(decoded_values_are_unbiased);
    RUN(an_outlier_keeps_its_values);
    RUN(which_token_is_the_outlier);
    RUN(sizes_match_format_names);
    RUN(zeros_decode_to_zeros);
    RUN(flat_channels_of_keys);
    RUN(known_biases_cost_nothing);
    RUN(unknown_biases_decode_sanely);
    RUN(values_of_all_norms);
    RUN(large_values_stay_in_order);
    RUN(any_bytes_and_any_floats);
    RUN(squat_matches_the_authors);
    RUN(squat_reduces_the_gap);
    RUN(squat_factors);
    RUN(squat_matches_its_definition);
    RUN(cleared_slots_hold_nothing);
    RUN(golden);
    return tkv_test_end();
}
