/*
 * test_format.c - the formats: golden bytes, sizes, decoding by the documented bits, error, refusals, tiles.
 *
 * Blocks are read here from the drawings in tile.h, format_exact.h and format_kivi.h, not by the library's
 * own functions. Under -ffast-math encoding may differ in the last bits: then blocks are held to the error
 * bounds alone. Decoding is the same to the bit under any flags.
 */
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"
#include "tkv_test.h"

#include "golden.h"

#if defined(__FAST_MATH__) || defined(_M_FP_FAST)
enum { FAST_MATH = 1 };
#else
enum { FAST_MATH = 0 };
#endif

enum { BLOCK = TKV_BLOCK_TOKENS, MOST = BLOCK * TKV_MAX_HEAD_DIM };
enum { WIDE = MOST + 8 * BLOCK }; /* floats, with some room between rows */
enum { ROOM = 4 * MOST + 128 };   /* bytes of the largest block, and some behind it */

static float in[WIDE], out[WIDE], want[WIDE];
static uint8_t bytes[ROOM], other[ROOM];

static const tkv_format grids[] = {TKV_Q8, TKV_KIVI4, TKV_KIVI3, TKV_KIVI2};
static const tkv_format exacts[] = {TKV_F32, TKV_F16, TKV_BF16};
static const int dims[] = {1, 5, 16, 31, 48, 64, 80, 96, 112, 128, 192, 255, 256};
#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static tkv_codec codec(tkv_format format, int side, int dim, int group) {
    tkv_codec c;
    c.format = format;
    c.side = side ? TKV_V : TKV_K;
    c.head_dim = dim;
    c.group_size = group;
    return c;
}

static int up(int n, int to) { return (n + to - 1) / to * to; }

static void poison(void *p, size_t n) { /* as floats: NaN */
    memset(p, 0xff, n);
}

static const char *describe(const tkv_codec *c, int n) {
    static char text[96];
    const char *name = tkv_format_name(c->format);
    snprintf(text, sizeof text, "%s %c, head_dim %d, group %d, %d tokens", name ? name : "?",
             c->side == TKV_K ? 'K' : 'V', c->head_dim, c->group_size, n);
    return text;
}

/* >>tiles, as drawn in tile.h */
typedef struct bit_place {
    int byte, bit;
} bit_place;

static int wide_part(int width) {
    return width == 8 ? 256 : width == 6 ? 192 : width >= 4 ? 128 : width >= 2 ? 64 : 0;
}

static int has_half(int width) { return width < 6 && width % 2 == 1; }

/* Where bit `bit` of code q of one tile is, in a run of tiles of these widths. */
static bit_place place(const int *widths, int n_tiles, int tile, int q, int bit) {
    int plane = q / 64, j = q % 64, width = widths[tile], wide = 0, halves = 0, half = 0, i;
    bit_place at;
    for (i = 0; i < n_tiles; i++) {
        if (i < tile) {
            wide += wide_part(widths[i]);
            half += has_half(widths[i]);
        }
        halves += wide_part(widths[i]);
    }
    if (width == 8) {
        at.byte = wide + 64 * plane + j;
        at.bit = bit;
    } else if (width >= 4 && bit < 4) {
        at.byte = wide + 64 * (plane / 2) + j;
        at.bit = 4 * (plane % 2) + bit;
    } else if (width == 6) {
        at.byte = wide + 128 + j;
        at.bit = 2 * plane + bit - 4;
    } else if ((width == 2 || width == 3) && bit < 2) {
        at.byte = wide + j;
        at.bit = 2 * plane + bit;
    } else { /* the top bit of 5 and 3, the only one of 1 */
        at.byte = halves + half / 2 * 64 + j;
        at.bit = half % 2 * 4 + plane;
    }
    return at;
}

static int run_bytes(const int *widths, int n_tiles) {
    int i, wide = 0, halves = 0;
    for (i = 0; i < n_tiles; i++) {
        wide += wide_part(widths[i]);
        halves += has_half(widths[i]);
    }
    return wide + (halves + 1) / 2 * 64;
}

static int get_code(const uint8_t *p, const int *widths, int n_tiles, int tile, int q) {
    int code = 0, b;
    for (b = 0; b < widths[tile]; b++) {
        bit_place at = place(widths, n_tiles, tile, q, b);
        code |= (p[at.byte] >> at.bit & 1) << b;
    }
    return code;
}

static void put_code(uint8_t *p, const int *widths, int n_tiles, int tile, int q, int code) {
    int b;
    for (b = 0; b < widths[tile]; b++) {
        bit_place at = place(widths, n_tiles, tile, q, b);
        p[at.byte] = (uint8_t)(p[at.byte] | (code >> b & 1) << at.bit);
    }
}

static const int all_widths[] = {8, 6, 5, 4, 3, 2, 1};

/* Tiles widest first, as in a record. */
static int random_widths(tkv_rng *r, int *widths, int most) {
    int n = 0, i, k;
    for (i = 0; i < COUNT(all_widths); i++)
        for (k = tkv_rng_below(r, 4); k > 0 && n < most; k--) widths[n++] = all_widths[i];
    if (n == 0) widths[n++] = 1;
    return n;
}

static tkvi_runs runs_of(const int *widths, int n) {
    tkvi_runs runs;
    int i;
    memset(&runs, 0, sizeof runs);
    for (i = 0; i < n; i++) runs.n[widths[i]]++;
    return runs;
}

static tkvi_tile_at tile_at(const tkvi_runs *runs, const int *widths, int tile) {
    tkvi_tile_at at = tkvi_tiles(runs);
    int i;
    for (i = 0; i < tile; i++) tkvi_next_tile(&at, widths[i]);
    return at;
}

/* One code bit set gives one bit in the bytes, the documented one, and is read from it. */
static void check_single_bits(const int *widths, int n) {
    tkvi_runs runs = runs_of(widths, n);
    size_t size = tkvi_runs_bytes(&runs);
    uint8_t code[TKVI_TILE_CODES], back[TKVI_TILE_CODES];
    int tile, q, b, k;
    CHECK_EQ(size, run_bytes(widths, n));
    for (tile = 0; tile < n; tile++) {
        tkvi_tile_at at = tile_at(&runs, widths, tile);
        for (b = 0; b < widths[tile]; b++)
            for (q = 0; q < 256; q += tkv_test_quick() ? 7 : 1) {
                bit_place p = place(widths, n, tile, q, b);
                int wrong = 0;
                memset(bytes, 0, size);
                memset(code, 0, sizeof code);
                code[q] = (uint8_t)(1 << b);
                tkvi_pack_tile(bytes, &at, widths[tile], code);
                for (k = 0; k < (int)size; k++) wrong += bytes[k] != (k == p.byte ? 1 << p.bit : 0);
                tkvi_unpack_tile(bytes, &at, widths[tile], back);
                wrong += memcmp(code, back, sizeof code) != 0;
                CHECK_MSG(wrong == 0, "width %d, tile %d, code %d, bit %d", widths[tile], tile, q, b);
            }
    }
}

TEST(tile_bits) {
    static const int mixed[] = {8, 6, 5, 5, 5, 4, 3, 3, 2, 1, 1}; /* an odd number of halves before the 3s */
    int i;
    for (i = 0; i < COUNT(all_widths); i++) {
        int three[3];
        three[0] = three[1] = three[2] = all_widths[i];
        check_single_bits(three, 1);
        check_single_bits(three, 3);
    }
    check_single_bits(mixed, COUNT(mixed));
}

/* The drawing once more, without `place`: bytes written out by hand. */
TEST(tile_bits_literal) {
    static const int two[] = {2}, four[] = {4}, three[] = {3, 3, 3};
    tkvi_runs runs = runs_of(two, 1);
    tkvi_tile_at at = tkvi_tiles(&runs);
    uint8_t code[TKVI_TILE_CODES];
    memset(code, 0, sizeof code);
    memset(bytes, 0, ROOM);
    code[64 * 0 + 4 * 5 + 1] = 1; /* planes 0 to 3 of lane 5, reduced 1 */
    code[64 * 1 + 4 * 5 + 1] = 2;
    code[64 * 2 + 4 * 5 + 1] = 3;
    code[64 * 3 + 4 * 5 + 1] = 1;
    tkvi_pack_tile(bytes, &at, 2, code);
    CHECK_EQ(bytes[21], 1 | 2 << 2 | 3 << 4 | 1 << 6);
    CHECK_EQ(bytes[20] | bytes[22], 0);
    CHECK_EQ(tkvi_runs_bytes(&runs), 64);

    runs = runs_of(four, 1);
    at = tkvi_tiles(&runs);
    memset(bytes, 0, ROOM);
    tkvi_pack_tile(bytes, &at, 4, code);
    CHECK_EQ(bytes[21], 1 | 2 << 4);
    CHECK_EQ(bytes[64 + 21], 3 | 1 << 4);
    CHECK_EQ(tkvi_runs_bytes(&runs), 128);

    code[64 * 2 + 4 * 5 + 1] = 7;
    runs = runs_of(three, 3);
    at = tile_at(&runs, three, 1);
    memset(bytes, 0, ROOM);
    tkvi_pack_tile(bytes, &at, 3, code);
    CHECK_EQ(bytes[64 + 21], 1 | 2 << 2 | 3 << 4 | 1 << 6);
    CHECK_EQ(bytes[192 + 21], 1 << (4 + 2)); /* the second half of the first vector behind three tiles */
    CHECK_EQ(tkvi_runs_bytes(&runs), 192 + 128);
}

TEST(tile_round_trip) {
    tkv_rng r = tkv_rng_seed(11);
    int round, rounds = tkv_test_quick() ? 40 : 300;
    for (round = 0; round < rounds; round++) {
        int widths[16], n = random_widths(&r, widths, 16), tile, q, wrong = 0;
        tkvi_runs runs = runs_of(widths, n);
        tkvi_tile_at at = tkvi_tiles(&runs);
        size_t size = tkvi_runs_bytes(&runs), i;
        uint8_t code[16][TKVI_TILE_CODES], back[TKVI_TILE_CODES];
        memset(bytes, 0, ROOM);
        memset(other, 0, ROOM);
        memset(bytes + size, 0x5a, 64);
        CHECK_EQ(size, run_bytes(widths, n));
        for (tile = 0; tile < n; tile++) {
            for (q = 0; q < 256; q++) {
                code[tile][q] = (uint8_t)(tkv_rng_u64(&r) & ((1u << widths[tile]) - 1u));
                put_code(other, widths, n, tile, q, code[tile][q]);
                back[q] = (uint8_t)~code[tile][q];
            }
            tkvi_pack_tile(bytes, &at, widths[tile], back); /* a second packing replaces the first */
            tkvi_pack_tile(bytes, &at, widths[tile], code[tile]);
            tkvi_next_tile(&at, widths[tile]);
        }
        CHECK_MEM(bytes, other, size);
        for (i = size; i < size + 64; i++) wrong += bytes[i] != 0x5a;
        CHECK_EQ(wrong, 0);
        at = tkvi_tiles(&runs);
        for (tile = 0; tile < n; tile++) {
            tkvi_unpack_tile(bytes, &at, widths[tile], back);
            tkvi_next_tile(&at, widths[tile]);
            CHECK_MEM(back, code[tile], 256);
        }
    }
}

/* >>blocks of Q8 and KIVI formats, as drawn in format_kivi.h */
typedef struct drawing {
    int k, bits, top, dim, group, groups, pad, tiles, row;
    int scale, zero, size; /* byte offsets */
    int widths[TKV_MAX_HEAD_DIM / 4];
} drawing;

static drawing draw(const tkv_codec *c) {
    drawing d;
    int i;
    d.k = c->side == TKV_K;
    d.bits = c->format == TKV_Q8 ? 8 : c->format == TKV_KIVI4 ? 4 : c->format == TKV_KIVI3 ? 3 : 2;
    d.top = (1 << d.bits) - 1;
    d.dim = c->head_dim;
    d.group = c->group_size ? c->group_size : 64;
    d.pad = up(d.dim, 16);
    d.tiles = d.pad / 4;
    d.groups = d.k ? BLOCK / d.group : up(d.dim, d.group) / d.group;
    d.row = d.k ? d.pad : BLOCK;
    for (i = 0; i < d.tiles; i++) d.widths[i] = d.bits;
    d.scale = run_bytes(d.widths, d.tiles);
    d.zero = d.scale + 2 * d.groups * d.row;
    d.size = up(d.zero + 2 * d.groups * d.row, 64);
    return d;
}

static int code_of(const drawing *d, const uint8_t *p, int token, int channel) {
    int tile = d->k ? channel / 4 : channel / 16 * 4 + token / 16;
    int q = d->k ? 64 * (token / 16) + 4 * (token % 16) + channel % 4
                 : 64 * (token % 16 / 4) + 4 * (channel % 16) + token % 4;
    return get_code(p, d->widths, d->tiles, tile, q);
}

static int half_at(const uint8_t *p) { return p[0] | p[1] << 8; }

static double half_value(int h) { /* of a finite half */
    int e = h >> 10 & 31, m = h & 1023;
    double x = e ? ldexp((double)(m + 1024), e - 25) : ldexp((double)m, -24);
    return h >> 15 ? -x : x;
}

static double half_place(int h) { /* what its last bit is worth */
    int e = h >> 10 & 31;
    return ldexp(1.0, (e ? e : 1) - 25);
}

/* Halves of scale and zero of this value. */
static int scale_of(const drawing *d, const uint8_t *p, int token, int channel) {
    return half_at(p + d->scale +
                   2 * (d->k ? token / d->group * d->row + channel : channel / d->group * d->row + token));
}

static int zero_of(const drawing *d, const uint8_t *p, int token, int channel) {
    return scale_of(d, p + (d->zero - d->scale), token, channel);
}

/* scale * code + zero: exact in double, so that the float is the one rounding. */
static float value_of(const drawing *d, const uint8_t *p, int token, int channel) {
    double s = half_value(scale_of(d, p, token, channel)), z = half_value(zero_of(d, p, token, channel));
    volatile double x = s * code_of(d, p, token, channel) + z;
    return (float)x;
}

/* Any bytes are a block, as long as scales and zeros are finite. */
static void random_block(tkv_rng *r, const drawing *d, uint8_t *p) {
    int i;
    for (i = 0; i < d->size; i++) p[i] = (uint8_t)(tkv_rng_u64(r) & 0xffu);
    for (i = d->scale; i < d->zero + (d->zero - d->scale); i += 2) {
        if ((p[i + 1] & 0x7c) == 0x7c) p[i + 1] = (uint8_t)(p[i + 1] & ~0x40);
        if (i < d->zero) p[i + 1] = (uint8_t)(p[i + 1] & 0x7f);
    }
}

/* >>inputs */
enum { GAUSSIAN, UNIFORM, OUTLIERS, BIAS, SCALES, TINY_RANGE, LARGE, SMALL, SPARSE, KINDS };

static void fill(int kind, tkv_rng *r, int n, int dim, float *x) {
    double base = (double)(tkv_rng_below(r, 1201) - 600);
    int t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < dim; c++) {
            double v = tkv_rng_gauss(r);
            switch (kind) {
            case UNIFORM: v = 2 * tkv_rng_uniform(r) - 1; break;
            case OUTLIERS: v *= tkv_rng_below(r, 50) ? 1 : 16; break;
            case BIAS: v += c % 2 ? 600 : -600; break;
            case SCALES: v *= ldexp(1.0, c % 21 - 10); break;
            case TINY_RANGE: v = base + v * ldexp(1.0, -c % 24); break;
            case LARGE: v *= 40000; break;
            case SMALL: v = ldexp(v, -10 - tkv_rng_below(r, 135)); break;
            case SPARSE: v = tkv_rng_below(r, 4) ? 0 : v; break;
            default: break;
            }
            x[t * dim + c] = (float)v;
        }
}

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

static uint64_t fnv(const uint8_t *p, size_t n) {
    uint64_t h = 0xcbf29ce484222325u;
    size_t i;
    for (i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

static uint64_t fnv_of_floats(const float *x, int n) {
    int i;
    for (i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, 4);
        other[4 * i] = (uint8_t)(u & 0xffu);
        other[4 * i + 1] = (uint8_t)(u >> 8 & 0xffu);
        other[4 * i + 2] = (uint8_t)(u >> 16 & 0xffu);
        other[4 * i + 3] = (uint8_t)(u >> 24);
    }
    return fnv(other, 4 * (size_t)n);
}

/* Encodes the block's input into `bytes`. */
static void golden_encode(const golden_block *g, tkv_codec *c) {
    int i;
    *c = codec(g->format, g->side == TKV_V, g->head_dim, g->group_size);
    for (i = 0; i < g->n_tokens * g->head_dim; i++) in[i] = golden_value(g->seed, i, i % g->head_dim);
    CHECK_EQ(tkv_encoded_size(c), g->size);
    CHECK_EQ(tkv_encode(c, in, 0, g->n_tokens, bytes, g->size), TKV_OK);
}

TEST(golden_hashes) {
    int i;
    for (i = 0; i < COUNT(golden_hashed); i++) {
        const golden_block *g = &golden_hashed[i];
        int n = g->n_tokens * g->head_dim;
        tkv_codec c;
        golden_encode(g, &c);
        if (FAST_MATH && g->format >= TKV_Q8) continue;
        CHECK_MSG(fnv(bytes, g->size) == g->encoded, "the bytes of %s", describe(&c, g->n_tokens));
        CHECK_EQ(tkv_decode(&c, bytes, g->size, g->n_tokens, out, 0), TKV_OK);
        CHECK_MSG(fnv_of_floats(out, n) == g->decoded, "the values of %s", describe(&c, g->n_tokens));
    }
}

TEST(golden_blocks) {
    size_t at = 0;
    int i;
    for (i = 0; i < COUNT(golden_whole); i++) {
        const golden_block *g = &golden_whole[i];
        tkv_codec c;
        golden_encode(g, &c);
        if (!FAST_MATH) CHECK_MEM(bytes, golden_bytes + at, g->size);
        CHECK(fnv(golden_bytes + at, g->size) == g->encoded);
        CHECK_EQ(tkv_decode(&c, golden_bytes + at, g->size, g->n_tokens, out, 0), TKV_OK);
        CHECK_MSG(fnv_of_floats(out, g->n_tokens * g->head_dim) == g->decoded, "the values of %s",
                  describe(&c, g->n_tokens));
        at += g->size;
    }
    CHECK_EQ(at, sizeof golden_bytes);
}

/* >>names and sizes */
TEST(names) {
    static const char *const names[] = {"f32", "f16", "bf16", "q8", "kivi4", "kivi3", "kivi2"};
    int f;
    for (f = 1; f < TKV_FORMAT_COUNT; f++) {
        const char *name = tkv_format_name((tkv_format)f);
        REQUIRE(name);
        if (f <= COUNT(names)) CHECK_STR(name, names[f - 1]);
        CHECK_EQ(tkv_format_from_name(name), f);
    }
    CHECK(tkv_format_name(TKV_FORMAT_DEFAULT) == NULL);
    CHECK(tkv_format_name(TKV_FORMAT_COUNT) == NULL);
    CHECK_EQ(tkv_format_from_name(NULL), TKV_FORMAT_DEFAULT);
    CHECK_EQ(tkv_format_from_name(""), TKV_FORMAT_DEFAULT);
    CHECK_EQ(tkv_format_from_name("kivi"), TKV_FORMAT_DEFAULT);
    CHECK_EQ(tkv_format_from_name("KIVI4"), TKV_FORMAT_DEFAULT);
}

TEST(sizes) {
    int f, side, group, dim, i;
    for (f = 0; f < COUNT(grids); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (dim = 1; dim <= TKV_MAX_HEAD_DIM; dim++) {
                    tkv_codec c = codec(grids[f], side, dim, group);
                    drawing d = draw(&c);
                    CHECK_EQ(tkv_encoded_size(&c), d.size);
                    CHECK_NEAR(tkv_format_bits(&c), 8.0 * d.size / (BLOCK * dim), 1e-12);
                    /* no multiple of 16 wastes a bit: the codes are exactly their bits */
                    if (dim % 16 == 0) CHECK_EQ(d.scale, dim * BLOCK * d.bits / 8);
                }
    for (f = 0; f < COUNT(exacts); f++)
        for (side = 0; side < 2; side++)
            for (dim = 1; dim <= TKV_MAX_HEAD_DIM; dim++) {
                tkv_codec c = codec(exacts[f], side, dim, 0);
                CHECK_EQ(tkv_encoded_size(&c), up(dim, 16) * BLOCK * (f == 0 ? 4 : 2));
            }
    {
        tkv_codec c = codec(TKV_KIVI4, 0, 64, 0), same = codec(TKV_KIVI4, 0, 64, 64);
        CHECK_EQ(tkv_encoded_size(&c), tkv_encoded_size(&same)); /* 0 is 64 */
    }
    for (i = 0; i < COUNT(dims); i++) { /* exact formats ignore the group, if it is a valid one */
        tkv_codec c = codec(TKV_F16, 0, dims[i], 32), same = codec(TKV_F16, 0, dims[i], 64);
        CHECK_EQ(tkv_encoded_size(&c), tkv_encoded_size(&same));
    }
}

static double stored_bits(tkv_format f, int side, int dim, int group) {
    tkv_codec c = codec(f, side, dim, group);
    return tkv_format_bits(&c);
}

TEST(bits_per_value) {
    static const int even[] = {64, 128, 192, 256}, others[] = {48, 80, 96, 112};
    int i, side;
    for (i = 0; i < COUNT(even); i++)
        for (side = 0; side < 2; side++) {
            CHECK_EQ(1000 * stored_bits(TKV_KIVI4, side, even[i], 64), 4500);
            CHECK_EQ(1000 * stored_bits(TKV_KIVI4, side, even[i], 32), 5000);
            CHECK_EQ(1000 * stored_bits(TKV_KIVI3, side, even[i], 64), 3500);
            CHECK_EQ(1000 * stored_bits(TKV_KIVI3, side, even[i], 32), 4000);
            CHECK_EQ(1000 * stored_bits(TKV_KIVI2, side, even[i], 64), 2500);
            CHECK_EQ(1000 * stored_bits(TKV_KIVI2, side, even[i], 32), 3000);
            CHECK_EQ(1000 * stored_bits(TKV_Q8, side, even[i], 64), 8500);
            CHECK_EQ(1000 * stored_bits(TKV_Q8, side, even[i], 32), 9000);
            CHECK_EQ(1000 * stored_bits(TKV_F32, side, even[i], 0), 32000);
            CHECK_EQ(1000 * stored_bits(TKV_F16, side, even[i], 0), 16000);
            CHECK_EQ(1000 * stored_bits(TKV_BF16, side, even[i], 0), 16000);
        }
    for (i = 0; i < COUNT(others);
         i++) { /* K as above; V has a shorter last group, whose 32 bits weigh more */
        CHECK_EQ(1000 * stored_bits(TKV_KIVI4, 0, others[i], 64), 4500);
        CHECK_EQ(1000 * stored_bits(TKV_KIVI2, 0, others[i], 32), 3000);
        CHECK_NEAR(stored_bits(TKV_KIVI2, 1, others[i], 32), 2 + 32.0 * (up(others[i], 32) / 32) / others[i],
                   1e-12);
    }
    CHECK_NEAR(stored_bits(TKV_KIVI4, 1, 80, 64), 4.8, 1e-12);
    CHECK_NEAR(stored_bits(TKV_KIVI4, 0, 5, 64), 4.5 * 16 / 5, 1e-12); /* padding counts */
    CHECK_NEAR(stored_bits(TKV_F16, 1, 72, 64), 16.0 * 80 / 72, 1e-12);
}

/* >>exact formats: [token][channel], little-endian, padded to 16 channels with zeros */
TEST(exact_bytes) {
    tkv_rng r = tkv_rng_seed(21);
    int f, side, i, t, ch, k;
    for (f = 0; f < COUNT(exacts); f++)
        for (side = 0; side < 2; side++)
            for (i = 0; i < COUNT(dims); i++) {
                int dim = dims[i], pad = up(dim, 16), n = i % 2 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK),
                    size = f ? 2 : 4;
                tkv_codec c = codec(exacts[f], side, dim, 0);
                fill(LARGE, &r, n, dim, in);
                memset(other, 0, ROOM);
                for (t = 0; t < n; t++)
                    for (ch = 0; ch < dim; ch++) {
                        float x = in[t * dim + ch];
                        uint32_t u = f == 0   ? tkvi_bits(x)
                                     : f == 1 ? tkvi_f32_to_f16(x)
                                              : tkvi_f32_to_bf16(x);
                        for (k = 0; k < size; k++)
                            other[(t * pad + ch) * size + k] = (uint8_t)(u >> 8 * k & 0xffu);
                        want[t * dim + ch] = f == 0   ? x
                                             : f == 1 ? tkvi_f16_to_f32((uint16_t)u)
                                                      : tkvi_bf16_to_f32((uint16_t)u);
                    }
                poison(bytes, ROOM);
                CHECK_EQ(tkv_encode(&c, in, 0, n, bytes, ROOM), TKV_OK);
                CHECK_MEM(bytes, other, tkv_encoded_size(&c));
                CHECK_EQ(tkv_decode(&c, bytes, ROOM, n, out, 0), TKV_OK);
                CHECK_MEM(out, want, (size_t)(n * dim) * sizeof(float));
            }
}

TEST(exact_values) { /* F32 gives back every bit; the others saturate and keep the sign of zero */
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
    for (f = 0; f < COUNT(exacts); f++) {
        tkv_codec c = codec(exacts[f], f % 2, COUNT(x), 0);
        memcpy(in, x, sizeof x);
        CHECK_EQ(tkv_encode(&c, in, 0, 1, bytes, ROOM), TKV_OK);
        CHECK_EQ(tkv_decode(&c, bytes, ROOM, 1, out, 0), TKV_OK);
        CHECK_MEM(out, expected[f], sizeof x);
    }
}

/* >>decoding */
TEST(decode_is_scale_times_code_plus_zero) {
    tkv_rng r = tkv_rng_seed(31);
    int f, side, group, i, t, ch;
    for (f = 0; f < COUNT(grids); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (i = 0; i < COUNT(dims); i++) {
                    int dim = dims[i], n = i % 2 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK);
                    tkv_codec c = codec(grids[f], side, dim, group);
                    drawing d = draw(&c);
                    random_block(&r, &d, bytes);
                    for (t = 0; t < n; t++)
                        for (ch = 0; ch < dim; ch++) want[t * dim + ch] = value_of(&d, bytes, t, ch);
                    CHECK_EQ(tkv_decode(&c, bytes, (size_t)d.size, n, out, 0), TKV_OK);
                    CHECK_MEM(out, want, (size_t)(n * dim) * sizeof(float));
                }
}

/* Every format, later ones too: any tokens of a block decode as in the whole, and nothing else is written. */
TEST(decode_of_a_part) {
    tkv_rng r = tkv_rng_seed(32);
    int f, side, i, round, t;
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        for (side = 0; side < 2; side++)
            for (i = 0; i < COUNT(dims); i++) {
                int dim = dims[i];
                tkv_codec c = codec((tkv_format)f, side, dim, i % 2 ? 32 : 64);
                tkvi_side s;
                if (!tkv_encoded_size(&c)) continue; /* a format for the other side alone */
                CHECK(tkvi_codec_side(&c, &s));
                fill(OUTLIERS, &r, BLOCK, dim, in);
                CHECK_EQ(tkv_encode(&c, in, 0, BLOCK, bytes, ROOM), TKV_OK);
                CHECK_EQ(tkv_decode(&c, bytes, ROOM, BLOCK, out, 0), TKV_OK);
                for (round = 0; round < 6; round++) {
                    int first = tkv_rng_below(&r, BLOCK), n = 1 + tkv_rng_below(&r, BLOCK - first);
                    int stride = dim + tkv_rng_below(&r, 8);
                    poison(want, sizeof want);
                    poison(in, sizeof in);
                    for (t = 0; t < n; t++)
                        memcpy(want + t * stride, out + (first + t) * dim, (size_t)dim * sizeof(float));
                    tkvi_decode_side(&s, bytes, first, n, in, (size_t)stride);
                    CHECK_MEM(in, want, sizeof want);
                    if (first > 0) continue;
                    poison(in, sizeof in);
                    CHECK_EQ(tkv_decode(&c, bytes, ROOM, n, in, stride), TKV_OK);
                    CHECK_MEM(in, want, sizeof want);
                }
            }
}

/* >>encoding */

/* The largest error that the rounding of code, scale and zero explains. y loses a few units of 2^-24. */
static double bound(const drawing *d, const uint8_t *p, int t, int ch, double v) {
    int s = scale_of(d, p, t, ch), z = zero_of(d, p, t, ch);
    double size = (v < 0 ? -v : v) + d->top * half_value(s);
    return 0.5 * (half_value(s) + half_place(z) + d->top * half_place(s)) + size * 4e-7;
}

TEST(error_is_bounded) {
    tkv_rng r = tkv_rng_seed(41);
    int f, side, group, kind, i, t, ch;
    for (f = 0; f < COUNT(grids); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (kind = 0; kind < KINDS; kind++) {
                    int dim, n;
                    double worst = 0;
                    tkv_codec c;
                    drawing d;
                    i = tkv_rng_below(&r, COUNT(dims));
                    dim = dims[i];
                    n = kind % 2 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK);
                    c = codec(grids[f], side, dim, group);
                    d = draw(&c);
                    fill(kind, &r, n, dim, in);
                    CHECK_EQ(tkv_encode(&c, in, 0, n, bytes, ROOM), TKV_OK);
                    CHECK_EQ(tkv_decode(&c, bytes, ROOM, n, out, 0), TKV_OK);
                    for (t = 0; t < n; t++)
                        for (ch = 0; ch < dim; ch++) {
                            double v = (double)in[t * dim + ch], e;
                            v = v > 65504 ? 65504 : v < -65504 ? -65504 : v;
                            e = fabs(v - (double)out[t * dim + ch]) / bound(&d, bytes, t, ch, v);
                            if (e > worst) worst = e;
                            if (!tkv_test_is_finite((double)out[t * dim + ch])) worst = 1e9;
                        }
                    CHECK_MSG(worst <= 1.0, "%g of the bound, input %d, %s", worst, kind, describe(&c, n));
                }
}

static double mean_squared_error(const tkv_codec *c, int kind, tkv_rng *r, int blocks) {
    double sum = 0;
    int b, i, n = BLOCK * c->head_dim;
    for (b = 0; b < blocks; b++) {
        fill(kind, r, BLOCK, c->head_dim, in);
        if (tkv_encode(c, in, 0, BLOCK, bytes, ROOM) != TKV_OK) return -1;
        if (tkv_decode(c, bytes, ROOM, BLOCK, out, 0) != TKV_OK) return -1;
        for (i = 0; i < n; i++) sum += ((double)in[i] - (double)out[i]) * ((double)in[i] - (double)out[i]);
    }
    return sum / (blocks * n);
}

/* Of N(0,1). python3 tests/encoder.py --anchors simulates them: 16 to 40 million values each, no fp16. */
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
    double share = tkv_test_quick() ? 0.04 : 0.02;
    for (i = 0; i < COUNT(expected); i++)
        for (side = 0; side < 2; side++) {
            tkv_codec c = codec(expected[i].format, side, 64, 32);
            double e = expected[i].groups_of_32;
            CHECK_NEAR(mean_squared_error(&c, GAUSSIAN, &r, blocks), e, share * e);
            c.group_size = 64;
            e = expected[i].groups_of_64;
            CHECK_NEAR(mean_squared_error(&c, GAUSSIAN, &r, blocks), e, share * e);
        }
}

TEST(more_bits_less_error) {
    static const int kinds[] = {GAUSSIAN, UNIFORM, OUTLIERS, BIAS, SCALES, SPARSE};
    tkv_rng r = tkv_rng_seed(43);
    int i, k, side;
    for (k = 0; k < COUNT(kinds); k++)
        for (side = 0; side < 2; side++) {
            double before = 0;
            for (i = 0; i < COUNT(grids); i++) { /* 8, 4, 3, 2 bits */
                tkv_codec c = codec(grids[i], side, 96, 64);
                double e = mean_squared_error(&c, kinds[k], &r, 4);
                CHECK(e > 2.5 * before ||
                      (e > before && kinds[k] == BIAS)); /* fp16 zeros have an error of their own */
                before = e;
            }
        }
}

TEST(flat_groups_are_exact) {
    static const float values[] = {0.42f, -1.0f, 5.0f,  600.0f,  0.0f,   -0.1f,   65504.0f, 1e6f,
                                   -1e6f, 1e-7f, 1e-9f, -1e-30f, 600.3f, 3.4e38f, -7e-5f,   2049.0f};
    int f, side, group, v, i;
    for (f = 0; f < COUNT(grids); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (v = 0; v < COUNT(values); v++) {
                    int dim = dims[v % COUNT(dims)], n = v % 3 ? BLOCK : 1 + v;
                    tkv_codec c = codec(grids[f], side, dim, group);
                    drawing d = draw(&c);
                    double half = half_value(tkvi_f32_to_f16(values[v])); /* saturated */
                    int wrong = 0;
                    for (i = 0; i < n * dim; i++) in[i] = values[v];
                    CHECK_EQ(tkv_encode(&c, in, 0, n, bytes, ROOM), TKV_OK);
                    CHECK_EQ(tkv_decode(&c, bytes, ROOM, n, out, 0), TKV_OK);
                    for (i = 0; i < n * dim; i++)
                        wrong += (double)out[i] != half || scale_of(&d, bytes, i / dim, i % dim) != 0 ||
                                 code_of(&d, bytes, i / dim, i % dim) != 0;
                    CHECK_MSG(wrong == 0, "%d values of %.9g in %s", wrong, (double)values[v],
                              describe(&c, n));
                }
}

static uint32_t through_half(float x) { return tkvi_bits(tkvi_f16_to_f32(tkvi_f32_to_f16(x))); }

TEST(group_of_one) { /* one token: each channel's group has one value, and comes back as its half */
    tkv_rng r = tkv_rng_seed(44);
    int f, group, i, ch;
    for (f = 0; f < COUNT(grids); f++)
        for (group = 32; group <= 64; group += 32)
            for (i = 0; i < COUNT(dims); i++) {
                tkv_codec c = codec(grids[f], 0, dims[i], group);
                fill(SCALES, &r, 1, dims[i], in);
                CHECK_EQ(tkv_encode(&c, in, 0, 1, bytes, ROOM), TKV_OK);
                CHECK_EQ(tkv_decode(&c, bytes, ROOM, 1, out, 0), TKV_OK);
                for (ch = 0; ch < dims[i]; ch++) CHECK_EQ(tkvi_bits(out[ch]), through_half(in[ch]));
            }
    { /* and V with a last group of one channel */
        tkv_codec c = codec(TKV_KIVI2, 1, 65, 64);
        fill(GAUSSIAN, &r, BLOCK, 65, in);
        CHECK_EQ(tkv_encode(&c, in, 0, BLOCK, bytes, ROOM), TKV_OK);
        CHECK_EQ(tkv_decode(&c, bytes, ROOM, BLOCK, out, 0), TKV_OK);
        for (i = 64; i < BLOCK * 65; i += 65) CHECK_EQ(tkvi_bits(out[i]), through_half(in[i]));
    }
}

/* Values that are scale * code + zero with both ends present come back as they are. */
TEST(grid_values_are_exact) {
    tkv_rng r = tkv_rng_seed(45);
    int f, side, group, t, ch;
    for (f = 0; f < COUNT(grids); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32) {
                int dim = 80;
                tkv_codec c = codec(grids[f], side, dim, group);
                drawing d = draw(&c);
                for (t = 0; t < BLOCK; t++)
                    for (ch = 0; ch < dim; ch++) {
                        int along = side ? ch : t, line = side ? t : ch;
                        int code = along % 16 < 2 ? along % 16 * d.top : tkv_rng_below(&r, d.top + 1);
                        double s = ldexp((double)(1024 + line * 7), line % 9 - 20), z = (line - 40) / 4.0;
                        in[t * dim + ch] = (float)(s * code + z);
                    }
                CHECK_EQ(tkv_encode(&c, in, 0, BLOCK, bytes, ROOM), TKV_OK);
                CHECK_EQ(tkv_decode(&c, bytes, ROOM, BLOCK, out, 0), TKV_OK);
                CHECK_MEM(out, in, (size_t)(BLOCK * dim) * sizeof(float));
            }
}

/* What was decoded encodes to the same bytes: for exact formats always, for grids while the range of a group
 * is not tiny against its minimum. */
TEST(encoding_again_changes_nothing) {
    static const int heads[] = {48, 64, 80, 128};
    tkv_rng r = tkv_rng_seed(46);
    int f, side, i, kind;
    for (f = TKV_F32; f <= TKV_KIVI2; f++)
        for (side = 0; side < 2; side++)
            for (i = 0; i < COUNT(heads); i++)
                for (kind = 0; kind < (f < TKV_Q8 ? KINDS : BIAS); kind++) {
                    tkv_codec c = codec((tkv_format)f, side, heads[i], kind % 2 ? 32 : 64);
                    fill(kind, &r, BLOCK, heads[i], in);
                    CHECK_EQ(tkv_encode(&c, in, 0, BLOCK, bytes, ROOM), TKV_OK);
                    CHECK_EQ(tkv_decode(&c, bytes, ROOM, BLOCK, out, 0), TKV_OK);
                    CHECK_EQ(tkv_encode(&c, out, 0, BLOCK, other, ROOM), TKV_OK);
                    CHECK_MEM(bytes, other, tkv_encoded_size(&c));
                }
}

TEST(ties_go_to_even) {
    int f, side, i;
    if (FAST_MATH) SKIP("-ffast-math: a reciprocal of the scale may miss the tie by a bit");
    for (f = 0; f < COUNT(grids); f++)
        for (side = 0; side < 2; side++) {
            int dim = side ? BLOCK : 1, n = side ? 1 : BLOCK;
            tkv_codec c = codec(grids[f], side, dim, 64);
            drawing d = draw(&c);
            int code[BLOCK];
            for (i = 0; i < BLOCK; i++) { /* scale 1/4, zero -2 */
                int k = i * (d.bits == 8 ? 4 : 1) % d.top;
                in[i] = (float)((k + 0.5) / 4 - 2);
                code[i] = k + k % 2;
            }
            in[0] = -2.0f;
            code[0] = 0;
            in[1] = (float)(d.top / 4.0 - 2);
            code[1] = d.top;
            CHECK_EQ(tkv_encode(&c, in, 0, n, bytes, ROOM), TKV_OK);
            CHECK_EQ(scale_of(&d, bytes, 0, 0), 0x3400);
            CHECK_EQ(zero_of(&d, bytes, 0, 0), 0xc000);
            for (i = 0; i < BLOCK; i++) CHECK_EQ(code_of(&d, bytes, side ? 0 : i, side ? i : 0), code[i]);
        }
}

/* fp16 steps by 2 from 2048 on: the stored zero lies above or below the minimum, and codes meet the ends. */
TEST(ends_are_clamped) {
    static const float x[4][4] = {/* token by token */
                                  {2049.5f, 2048.5f, -2051.5f, -70000.0f},
                                  {2052.5f, 2051.5f, -2048.5f, 70000.0f},
                                  {2051.0f, 2050.0f, -2050.25f, 0.0f},
                                  {2052.25f, 2049.0f, -2051.0f, 60000.0f}};
    static const int zeros[] = {2050, 2048, -2052, -65504};
    static const int codes[4][4] = {{0, 0, 0, 0}, {2, 3, 3, 3}, {1, 2, 2, 1}, {2, 1, 1, 3}};
    tkv_codec c = codec(TKV_KIVI2, 0, 4, 64);
    drawing d = draw(&c);
    int t, ch;
    memcpy(in, x, sizeof x);
    CHECK_EQ(tkv_encode(&c, in, 0, 4, bytes, ROOM), TKV_OK);
    CHECK_EQ(tkv_decode(&c, bytes, ROOM, 4, out, 0), TKV_OK);
    for (ch = 0; ch < 4; ch++) {
        double s = ch < 3 ? 1 : 43680; /* 131008 / 3 as a half */
        CHECK_NEAR(half_value(zero_of(&d, bytes, 0, ch)), zeros[ch], 0);
        CHECK_NEAR(half_value(scale_of(&d, bytes, 0, ch)), s, 0);
        for (t = 0; t < 4; t++) {
            int tie = (ch == 0 && t < 2) || (ch == 1 && t == 0) || (ch == 2 && t == 0);
            if (FAST_MATH && tie) continue;
            CHECK_EQ(code_of(&d, bytes, t, ch), codes[t][ch]);
            CHECK_NEAR(out[4 * t + ch], zeros[ch] + s * codes[t][ch], 0);
        }
    }
}

/* A range below what an fp16 scale can say: flat, or the smallest scale; never NaN, never far off. */
TEST(tiny_ranges) {
    static const double bases[] = {0, 1, -1, 0.42, 5, 600, -600, 60000};
    int f, side, b, e, i;
    for (f = 0; f < COUNT(grids); f++)
        for (side = 0; side < 2; side++)
            for (b = 0; b < COUNT(bases); b++)
                for (e = -40; e <= -8; e++) {
                    tkv_codec c = codec(grids[f], side, 64, 64);
                    drawing d = draw(&c);
                    double worst = 0;
                    for (i = 0; i < BLOCK * 64; i++)
                        in[i] = (float)(bases[b] + ldexp((double)(i % 64 * (i / 64) % 64) / 64.0, e));
                    CHECK_EQ(tkv_encode(&c, in, 0, BLOCK, bytes, ROOM), TKV_OK);
                    CHECK_EQ(tkv_decode(&c, bytes, ROOM, BLOCK, out, 0), TKV_OK);
                    for (i = 0; i < BLOCK * 64; i++) {
                        double v = (double)in[i],
                               off = fabs(v - (double)out[i]) / bound(&d, bytes, i / 64, i % 64, v);
                        if (!tkv_test_is_finite((double)out[i])) off = 1e9;
                        if (off > worst) worst = off;
                    }
                    CHECK_MSG(worst <= 1.0, "%g of the bound, %g + 2^%d, %s", worst, bases[b], e,
                              describe(&c, BLOCK));
                }
}

/* >>what is touched. For every format, later ones too. */
TEST(bytes_depend_on_the_values_alone) {
    tkv_rng r = tkv_rng_seed(51);
    int f, side, i, t;
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        for (side = 0; side < 2; side++)
            for (i = 0; i < COUNT(dims); i++) {
                int dim = dims[i], n = i % 3 == 0 ? BLOCK : 1 + tkv_rng_below(&r, BLOCK),
                    stride = dim + 1 + i % 7;
                tkv_codec c = codec((tkv_format)f, side, dim, i % 2 ? 32 : 64);
                size_t size = tkv_encoded_size(&c), k;
                int wrong = 0;
                if (!size) continue;
                REQUIRE(size + 64 <= ROOM);
                fill(OUTLIERS, &r, n, dim, in);
                memset(bytes, 0x00, ROOM);
                CHECK_EQ(tkv_encode(&c, in, 0, n, bytes, size), TKV_OK);
                poison(want, sizeof want); /* between rows and behind them is NaN: not read */
                for (t = 0; t < n; t++) memcpy(want + t * stride, in + t * dim, (size_t)dim * sizeof(float));
                memset(other, 0xa5, ROOM);
                CHECK_EQ(tkv_encode(&c, want, stride, n, other, size), TKV_OK);
                CHECK_MEM(bytes, other, size);
                for (k = size; k < ROOM; k++) wrong += other[k] != 0xa5;
                CHECK_MSG(wrong == 0, "%d bytes behind %s", wrong, describe(&c, n));
            }
}

TEST(missing_tokens_and_channels_are_zero) {
    tkv_rng r = tkv_rng_seed(52);
    int f, side, group, i, t, ch;
    for (f = 0; f < COUNT(grids); f++)
        for (side = 0; side < 2; side++)
            for (group = 32; group <= 64; group += 32)
                for (i = 0; i < 5; i++) {
                    int dim = dims[i], n = 1 + tkv_rng_below(&r, BLOCK), codes = 0, metas = 0, m;
                    tkv_codec c = codec(grids[f], side, dim, group);
                    drawing d = draw(&c);
                    fill(BIAS, &r, n, dim, in);
                    poison(bytes, ROOM);
                    CHECK_EQ(tkv_encode(&c, in, 0, n, bytes, ROOM), TKV_OK);
                    for (t = 0; t < BLOCK; t++)
                        for (ch = 0; ch < d.pad; ch++)
                            if (t >= n || ch >= dim) codes += code_of(&d, bytes, t, ch) != 0;
                    CHECK_EQ(codes, 0);
                    for (m = 0; m < d.groups * d.row; m++) {
                        int missing = d.k ? m % d.row >= dim || m / d.row * group >= n : m % d.row >= n;
                        if (missing)
                            metas +=
                                half_at(bytes + d.scale + 2 * m) != 0 || half_at(bytes + d.zero + 2 * m) != 0;
                    }
                    CHECK_EQ(metas, 0);
                    for (m = d.zero + 2 * d.groups * d.row; m < d.size; m++) CHECK_EQ(bytes[m], 0);
                }
}

/* >>refusals */
TEST(nonfinite_is_refused) {
    static const uint32_t bad[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu};
    tkv_rng r = tkv_rng_seed(61);
    int f, side, b, at, i, wrong;
    for (f = 1; f < TKV_FORMAT_COUNT; f++)
        for (side = 0; side < 2; side++)
            for (b = 0; b < COUNT(bad); b++)
                for (at = 0; at < 3; at++) {
                    int dim = 48, n = 17;
                    tkv_codec c = codec((tkv_format)f, side, dim, 64);
                    if (!tkv_encoded_size(&c)) continue;
                    fill(GAUSSIAN, &r, n, dim, in);
                    memcpy(in + (at == 0 ? 0 : at == 1 ? n * dim / 2 + 5 : n * dim - 1), &bad[b], 4);
                    memset(bytes, 0xa5, ROOM);
                    CHECK_EQ(tkv_encode(&c, in, 0, n, bytes, ROOM), TKV_ERR_NONFINITE);
                    for (wrong = 0, i = 0; i < ROOM; i++) wrong += bytes[i] != 0xa5;
                    CHECK_EQ(wrong, 0);
                }
}

static void refused(const tkv_codec *c, const float *x, ptrdiff_t stride, int n, size_t size) {
    int i, wrong = 0;
    memset(bytes, 0xa5, ROOM);
    memset(out, 0xa5, sizeof out);
    memset(want, 0xa5, sizeof want);
    CHECK_EQ(tkv_encode(c, x, stride, n, bytes, size), TKV_ERR_ARG);
    for (i = 0; i < ROOM; i++) wrong += bytes[i] != 0xa5;
    CHECK_EQ(wrong, 0);
    CHECK_EQ(tkv_decode(c, other, size, n, x ? out : NULL, stride), TKV_ERR_ARG);
    CHECK_MEM(out, want, sizeof out);
}

static void refused_codec(tkv_format format, int side, int dim, int group) {
    tkv_codec c = codec(format, side, dim, group);
    CHECK_EQ(tkv_encoded_size(&c), 0);
    CHECK(tkv_format_bits(&c) == 0.0);
    refused(&c, in, 0, 1, ROOM);
}

TEST(bad_arguments_are_refused) {
    tkv_codec c = codec(TKV_KIVI4, 0, 64, 64);
    size_t size = tkv_encoded_size(&c);
    int f;
    memset(in, 0, sizeof in);
    memset(other, 0, sizeof other);
    CHECK_EQ(tkv_encoded_size(NULL), 0);
    CHECK(tkv_format_bits(NULL) == 0.0);
    refused(NULL, in, 0, 1, ROOM);
    refused(&c, NULL, 0, 1, ROOM);
    CHECK_EQ(tkv_encode(&c, in, 0, 1, NULL, ROOM), TKV_ERR_ARG);
    CHECK_EQ(tkv_decode(&c, NULL, ROOM, 1, out, 0), TKV_ERR_ARG);
    refused(&c, in, 0, 0, ROOM);
    refused(&c, in, 0, -1, ROOM);
    refused(&c, in, 0, 65, ROOM);
    refused(&c, in, 0, 1, size - 1);
    refused(&c, in, 0, 1, 0);
    refused(&c, in, 63, 1, ROOM);
    refused(&c, in, -64, 1, ROOM);
    for (f = 1; f < TKV_FORMAT_COUNT; f++) {
        refused_codec((tkv_format)f, 0, 0, 64);
        refused_codec((tkv_format)f, 1, -16, 64);
        refused_codec((tkv_format)f, 0, 257, 64);
        refused_codec((tkv_format)f, 1, 0x7fffffff, 64);
    }
    refused_codec(TKV_FORMAT_DEFAULT, 0, 64, 64);
    refused_codec(TKV_FORMAT_COUNT, 0, 64, 64);
    refused_codec(TKV_KIVI4, 0, 64, 16);
    refused_codec(TKV_KIVI4, 1, 64, 128);
    refused_codec(TKV_KIVI2, 1, 64, -64);
    refused_codec(TKV_Q8, 0, 64, 1);
#ifndef __cplusplus /* there, a value outside the enumeration is undefined before it arrives */
    c.side = (tkv_side)2;
    refused(&c, in, 0, 1, ROOM);
    c.side = TKV_K;
    c.format = (tkv_format)-1;
    refused(&c, in, 0, 1, ROOM);
    CHECK(tkv_format_name((tkv_format)1000) == NULL);
#endif
    c = codec(TKV_KIVI4, 0, 64, 64);
    CHECK_EQ(tkv_encode(&c, in, 64, 64, bytes, size), TKV_OK);
    CHECK_EQ(tkv_decode(&c, bytes, size, 64, out, 64), TKV_OK);
}

/* >>sides of mixed widths, with a channel order and a table of levels, through a format of the test's own:
 * its metadata are the zeros, then the scales, 16 halves apart from where KIVI has them */
static void own_meta(const tkvi_side *s, const uint8_t *src, tkvi_halves halves, float *scale, float *zero) {
    int n = s->groups * (s->which == TKV_K ? s->pad : BLOCK);
    halves(src + s->code_bytes, n, zero);
    halves(src + s->code_bytes + 2 * n + 32, n, scale);
}

static tkvi_format own_format(void) {
    tkvi_format f;
    memset(&f, 0, sizeof f);
    f.name = "own";
    f.bits = 2;
    f.stored = TKVI_AS_TILES;
    f.side[TKV_K].decode = tkvi_tiles_k_decode;
    f.side[TKV_K].meta = own_meta;
    f.side[TKV_V].decode = tkvi_tiles_v_decode;
    f.side[TKV_V].meta = own_meta;
    return f;
}

/* pad / 4 widths, widest first. */
static void widths_of_a_side(tkv_rng *r, int *widths, int n, int widest) {
    int i, w;
    for (i = 0; i < n; i++) {
        do w = all_widths[tkv_rng_below(r, COUNT(all_widths))];
        while (w > widest);
        widths[i] = w;
    }
    for (i = 1; i < n; i++)
        for (w = i; w > 0 && widths[w] > widths[w - 1]; w--) {
            int t = widths[w];
            widths[w] = widths[w - 1];
            widths[w - 1] = t;
        }
}

TEST(mixed_widths) {
    tkv_rng r = tkv_rng_seed(71);
    tkvi_format format = own_format();
    int round, rounds = tkv_test_quick() ? 40 : 200;
    for (round = 0; round < rounds; round++) {
        int side = round % 2, tabled = round / 2 % 2, dim = 1 + tkv_rng_below(&r, 96), pad = up(dim, 16);
        int group = tkv_rng_below(&r, 2) ? 32 : 64, n_meta, tiles = pad / 4, tile, q, i, first, n;
        int widths[TKV_MAX_HEAD_DIM / 4];
        uint16_t order[TKV_MAX_HEAD_DIM];
        int8_t levels[16];
        uint8_t *scale, *zero;
        tkvi_side s;
        memset(&s, 0, sizeof s);
        s.format = &format;
        s.which = side ? TKV_V : TKV_K;
        s.dim = dim;
        s.pad = pad;
        s.tokens = BLOCK;
        s.group = group;
        s.groups = side ? up(dim, group) / group : BLOCK / group;
        widths_of_a_side(&r, widths, tiles, tabled ? 4 : 8);
        s.runs = runs_of(widths, tiles);
        s.code_bytes = tkvi_runs_bytes(&s.runs);
        for (i = 0; i < 16; i++) levels[i] = (int8_t)(tkv_rng_below(&r, 255) - 127);
        if (tabled) s.levels = levels;
        for (i = 0; i < pad; i++) order[i] = (uint16_t)i;
        for (i = pad - 1; i > 0; i--) {
            int j = tkv_rng_below(&r, i + 1);
            uint16_t t = order[i];
            order[i] = order[j];
            order[j] = t;
        }
        if (!side && round % 3) s.order = order;

        memset(bytes, 0, ROOM);
        n_meta = s.groups * (side ? BLOCK : pad);
        zero = bytes + s.code_bytes;
        scale = zero + 2 * n_meta + 32;
        for (i = 0; i < n_meta; i++) {
            tkvi_store16(zero + 2 * i, tkvi_f32_to_f16((float)(10 * tkv_rng_gauss(&r))));
            tkvi_store16(scale + 2 * i, tkvi_f32_to_f16((float)(0.01 + tkv_rng_uniform(&r))));
        }
        poison(want, sizeof want);
        first = tkv_rng_below(&r, BLOCK);
        n = 1 + tkv_rng_below(&r, BLOCK - first);
        for (tile = 0; tile < tiles; tile++)
            for (q = 0; q < 256; q++) {
                int code = (int)(tkv_rng_u64(&r) & ((1u << widths[tile]) - 1u)), plane = q / 64,
                    lane = q % 64 / 4;
                int token = side ? tile % 4 * 16 + 4 * plane + q % 4 : 16 * plane + lane;
                int position = side ? tile / 4 * 16 + lane : 4 * tile + q % 4; /* in the channel order */
                int channel = s.order ? order[position] : position;
                int m = side ? position / group * BLOCK + token : token / group * pad + position;
                volatile double x;
                put_code(bytes, widths, tiles, tile, q, code);
                if (channel >= dim || token < first || token >= first + n) continue;
                x = half_value(half_at(scale + 2 * m)) * (tabled ? levels[code] : code) +
                    half_value(half_at(zero + 2 * m));
                want[(token - first) * (dim + 3) + channel] = (float)x;
            }
        poison(out, sizeof out);
        tkvi_decode_side(&s, bytes, first, n, out, (size_t)(dim + 3));
        CHECK_MEM(out, want, sizeof want);
    }
}

/* Kernels multiply codes minus the centre. */
TEST(centres) {
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

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(tile_bits);
    RUN(tile_bits_literal);
    RUN(tile_round_trip);
    RUN(golden_hashes);
    RUN(golden_blocks);
    RUN(names);
    RUN(sizes);
    RUN(bits_per_value);
    RUN(exact_bytes);
    RUN(exact_values);
    RUN(decode_is_scale_times_code_plus_zero);
    RUN(decode_of_a_part);
    RUN(error_is_bounded);
    RUN(error_of_gaussian_groups);
    RUN(more_bits_less_error);
    RUN(flat_groups_are_exact);
    RUN(group_of_one);
    RUN(grid_values_are_exact);
    RUN(encoding_again_changes_nothing);
    RUN(ties_go_to_even);
    RUN(ends_are_clamped);
    RUN(tiny_ranges);
    RUN(bytes_depend_on_the_values_alone);
    RUN(missing_tokens_and_channels_are_zero);
    RUN(nonfinite_is_refused);
    RUN(bad_arguments_are_refused);
    RUN(mixed_widths);
    RUN(centres);
    return tkv_test_end();
}
