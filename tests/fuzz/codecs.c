/*
 * codecs.c - a fuzz target: the bytes of an input choose a codec, floats and arguments, and then change the block.
 *
 * Every field of tkv_codec can be out of range, RoPE and its frequencies too. The floats are a pattern of any exponent,
 * and single ones are any 32 bits. After each call:
 *   - the status is the one that the arguments ask for;
 *   - no byte outside the block, and no float between or behind the rows, is written; after an error none at all;
 *   - the same floats give the same bytes, at any address and with any stride;
 *   - decoded values of encoded floats are finite, and not much larger than the floats;
 *   - exact formats give the same bytes for what they decode;
 *   - the first rows of a block decode alike with and without the others, for hostile bytes too.
 *
 * Coverage-guided, with clang: make fuzz TARGET=codecs
 * As a plain program, with any compiler, for random inputs or for files of inputs:
 *     cc -O2 -DTKV_FUZZ_MAIN -include assert.h -DTKV_ASSERT=assert tests/fuzz/codecs.c examples/tieredkv.c \
 *         -o codecs -lm
 *     ./codecs --runs 1000000 [--seed 1] [--bytes 60]
 */
#include "target.h"

#include <limits.h>

enum { TOKENS = TKV_BLOCK_TOKENS, PATTERN = 0xa5, MOST_BYTES = 1 << 19 };

static long n_encoded, n_nonfinite, n_refused;

/* >>memory with borders. Some rooms have none, so that a sanitizer sees the first byte outside. */
typedef struct room {
    uint8_t *raw, *at;
    size_t n, before, behind;
} room;

static room make_room(size_t n, size_t unit) {
    room r;
    const int how = next_byte();
    r.n = n;
    r.before = unit * (size_t)(how % 5);
    r.behind = how / 5 % 2 ? 64 : 0;
    r.raw = (uint8_t *)malloc(r.before + n + r.behind + 1);
    if (!r.raw) exit(2);
    r.raw = (uint8_t *)realloc(r.raw, r.before + n + r.behind ? r.before + n + r.behind : 1);
    if (!r.raw) exit(2);
    memset(r.raw, PATTERN, r.before + n + r.behind);
    r.at = r.raw + r.before;
    return r;
}

/* 1 if nothing was written to n bytes of a room. */
static int is_untouched(const uint8_t *p, size_t n) {
    return n == 0 || (p[0] == PATTERN && memcmp(p, p + 1, n - 1) == 0);
}

static void check_borders_of(const room *r) {
    CHECK(is_untouched(r->raw, r->before));
    CHECK(is_untouched(r->at + r->n, r->behind));
}

static void free_room(room *r) { free(r->raw); }

/* >>codecs */
/* A number from low to high; now and then another one. */
static int choose_int(int low, int high) {
    static const int others[] = {INT_MIN, INT_MAX, -1, 0, 1, 3, 33, 577, 1 << 20, TKV_OFF, 65, 256};
    const int byte = next_byte();
    if (byte >= 253) return others[next_byte() % COUNT(others)];
    return low + (high - low < 253 ? byte : byte * 256 + next_byte()) % (high - low + 1);
}

/* 0, a power of two from `low` to `high`, or another number. */
static int choose_size(int low, int high) {
    const int byte = next_byte();
    return byte >= 250 ? choose_int(low, high) : byte % 3 == 0 ? 0 : byte % 3 == 1 ? low : high;
}

static float choose_bits(void) {
    uint32_t u = 0;
    int i;
    for (i = 0; i < 4; i++) u = u << 8 | (uint32_t)next_byte();
    return tkv_test_float(u);
}

static float frequencies[TKV_MAX_HEAD_DIM / 2];

static tkv_rope choose_rope(int head_dim) {
    static const float bases[] = {0.0f, 2.0f, 1e4f, 5e5f, 1e9f}, scales[] = {0.0f, 0.25f, 1.0f, 4.0f, 1e-9f};
    tkv_rope rope;
    int i, how = next_byte();
    memset(&rope, 0, sizeof rope);
    if (how < 100) return rope;
    rope.dim = how < 110 ? TKV_OFF : how < 200 ? head_dim / 2 * 2 : choose_int(0, head_dim);
    if (rope.dim > TKV_MAX_HEAD_DIM) rope.dim -= rope.dim % 2 ? 0 : 1; /* odd: refused before it is read */
    rope.interleaved = choose_int(0, 1);
    how = next_byte();
    rope.base = how >= 250 ? choose_bits() : bases[how % COUNT(bases)];
    rope.scale = how >= 245 ? choose_bits() : scales[how / 5 % COUNT(scales)];
    rope.kind = (tkv_rope_kind)(how % 7 ? 0 : choose_int(0, TKV_ROPE_COUNT));
    rope.first = how % 11 ? 0 : choose_int(0, head_dim);
    if (how % 3) return rope;
    for (i = 0; i < COUNT(frequencies); i++) frequencies[i] = (float)(how + i) / 1024.0f;
    if (how % 2) frequencies[next_byte() % COUNT(frequencies)] = choose_bits();
    rope.frequencies = frequencies;
    return rope;
}

static tkv_codec choose_codec(void) {
    static const int dims[] = {16, 1, 7, 32, 17, 2, 33, 8, 48, 5, 64, 24, 3, 40, 65, 12}; /* most are small */
    static const int large[] = {64, 80, 96, 112, 128, 128, 256, 576};
    tkv_codec c;
    int how;
    memset(&c, 0, sizeof c);
    c.format = (tkv_format)choose_int(TKV_F32, TKV_FORMAT_COUNT - 1);
    how = next_byte();
    c.side = (tkv_side)(how >= 250 ? choose_int(0, 1) : how % 2);
    c.head_dim = how >= 252   ? choose_int(1, TKV_MAX_HEAD_DIM)
                 : how >= 244 ? large[how % COUNT(large)]
                              : dims[how / 2 % COUNT(dims)];
    if (how % 8 && !tkv_get_block_bytes(&c))
        c.side = c.side == TKV_K ? TKV_V : TKV_K; /* A and R formats have one */
    how = next_byte();
    if (how % 4 == 0) {
        c.options.group_size = choose_size(32, 64);
        c.options.allocation_unit = choose_size(4, 16);
        c.options.fit = choose_int(0, 5);
        c.options.rotate = choose_int(0, 3);
        c.options.center_k = choose_int(0, 1);
        c.options.squat_block = choose_size(16, 64);
        c.options.subspaces = choose_int(0, 16);
        c.options.kvquant = choose_int(0, 63);
    }
    if (how % 4 == 1) {
        c.options.k_scales = choose_int(0, 2);
        c.options.v_scales = choose_int(0, 2);
        c.options.int_bits = choose_size(2 + next_byte() % 4, 8);
        c.options.unrotated = choose_int(0, 1);
        c.options.kvquant_outliers = choose_int(0, 30);
    }
    c.position = how % 5 ? choose_int(0, 9000) : 0;
    c.rope = choose_rope(c.head_dim < 1 || c.head_dim > TKV_MAX_HEAD_DIM ? 64 : c.head_dim);
    return c;
}

/* >>floats */
/* Rows of a pattern, with any exponent; then single floats of any bits. */
static void fill_rows_of(float *x, int n, int dim, size_t stride) {
    const int kind = next_byte(), exponent = next_byte();
    tkv_rng rng = tkv_rng_seed((uint64_t)next_byte());
    const double scale = kind < 200 ? 1.0 : ldexp(1.0, exponent % 2 ? exponent / 2 : -exponent / 2);
    int t, i, n_single;
    for (t = 0; t < n; t++)
        for (i = 0; i < dim; i++) {
            const double u = kind % 4 < 3 ? tkv_rng_uniform(&rng) * 2.0 - 1.0 : 1.0;
            x[(size_t)t * stride + (size_t)i] = (float)(scale * (kind % 4 == 0   ? u
                                                                 : kind % 4 == 1 ? 5.0 + u * (i + 1)
                                                                 : i % 7         ? u
                                                                                 : 50.0 * u));
        }
    for (n_single = next_byte() % 4; n_single > 0; n_single--) {
        const size_t at = (size_t)(next_byte() % n) * stride + (size_t)(next_below(1024) % dim);
        x[at] = choose_bits();
    }
}

static double largest_of(const float *x, int n, int dim, size_t stride) {
    double most = 0.0;
    int t, i;
    for (t = 0; t < n; t++)
        for (i = 0; i < dim; i++) {
            const double a = (double)x[(size_t)t * stride + (size_t)i];
            if (!tkv_test_is_finite(a)) return HUGE_VAL;
            if (fabs(a) > most) most = fabs(a);
        }
    return most;
}

/* 1 if the rows are alike, NaN for NaN. */
static int are_same_rows(const float *a, size_t stride_a, const float *b, size_t stride_b, int n, int dim) {
    int t, i;
    for (t = 0; t < n; t++)
        for (i = 0; i < dim; i++) {
            const uint32_t x = bits_of(a[(size_t)t * stride_a + (size_t)i]),
                           y = bits_of(b[(size_t)t * stride_b + (size_t)i]);
            if (x != y && ((x & 0x7fffffffu) <= 0x7f800000u || (y & 0x7fffffffu) <= 0x7f800000u)) return 0;
        }
    return 1;
}

/* >>calls */
static float first[TOKENS * TKV_MAX_HEAD_DIM], again[TOKENS * TKV_MAX_HEAD_DIM];
static uint8_t block[MOST_BYTES], copy[MOST_BYTES];

/* Floats from the first to the last one of n rows. */
static size_t n_floats(int n, int dim, size_t stride) { return (size_t)(n - 1) * stride + (size_t)dim; }

/* Decodes n rows into a room of its own, and checks that nothing else is written. Returns them without gaps in `to`. */
static void decode_rows(const tkv_codec *c, const room *b, int n, size_t stride, float *to) {
    room x = make_room(n_floats(n, c->head_dim, stride) * sizeof(float), sizeof(float));
    const size_t row = (size_t)c->head_dim * sizeof(float);
    int t;
    CHECK_EQ(tkv_decode_block(c, b->at, b->n, n, (float *)(void *)x.at, (ptrdiff_t)stride), TKV_OK);
    check_borders_of(&x);
    for (t = 0; t < n; t++) memcpy(to + t * c->head_dim, x.at + (size_t)t * stride * sizeof(float), row);
    for (t = 0; t + 1 < n; t++)
        CHECK(is_untouched(x.at + (size_t)t * stride * sizeof(float) + row, stride * sizeof(float) - row));
    free_room(&x);
}

/* A block of `size` bytes, at another address. */
static room make_block(const uint8_t *bytes, size_t size) {
    room b = make_room(size, 1);
    memcpy(b.at, bytes, size);
    return b;
}

/* Decodes all rows, then fewer. They must be alike. */
static void decode_twice(const tkv_codec *c, const uint8_t *bytes, size_t size, int n) {
    room b = make_block(bytes, size);
    const int fewer = 1 + next_byte() % n;
    decode_rows(c, &b, n, (size_t)c->head_dim, first);
    free_room(&b);
    b = make_block(bytes, size);
    decode_rows(c, &b, fewer, (size_t)(c->head_dim + next_byte() % 9), again);
    CHECK_MEM(b.at, bytes, size);
    free_room(&b);
    CHECK(are_same_rows(first, (size_t)c->head_dim, again, (size_t)c->head_dim, fewer, c->head_dim));
}

/* Encodes n rows, decodes them, and encodes what was decoded. */
static void check_codec(const tkv_codec *c, const float *x, int n, size_t stride, size_t size) {
    const int dim = c->head_dim;
    const double most = largest_of(x, n, dim, stride), root = sqrt((double)dim);
    /* A and R formats without statistics have scales from 2^-8 on, and rotated values of a row can add up. */
    const double least = dim > 256 ? root / 64.0 : 0.25;
    room b = make_room(size, 1);
    int t;
    CHECK_EQ(tkv_encode_block(c, x, (ptrdiff_t)stride, n, b.at, size), TKV_OK);
    check_borders_of(&b);
    memcpy(block, b.at, size);
    free_room(&b);
    for (t = 0; t < n; t++) memcpy(first + t * dim, x + (size_t)t * stride, (size_t)dim * sizeof(float));
    memset(copy, 0, size);
    CHECK_EQ(tkv_encode_block(c, first, 0, n, copy, size), TKV_OK);
    CHECK_MEM(block, copy, size);
    decode_twice(c, block, size, n);
    CHECK_MSG(largest_of(first, n, dim, (size_t)dim) <= 4.0 * root * most + least,
              "%s of %d channels: %g became %g", tkv_get_name(TKV_NAME_FORMAT, (int)c->format), dim, most,
              largest_of(first, n, dim, (size_t)dim));
    if (tkv_test_.n_bad) return;
    CHECK_EQ(tkv_encode_block(c, first, 0, n, copy, size), TKV_OK);
    if (c->format <= TKV_BF16) CHECK_MEM(block, copy, size);
    if (c->format == TKV_F32) CHECK(are_same_rows(x, stride, first, (size_t)dim, n, dim));
    else {
        CHECK_EQ(tkv_decode_block(c, copy, size, n, first, 0), TKV_OK);
        CHECK(tkv_test_is_finite(largest_of(first, n, dim, (size_t)dim)));
    }
}

static void change_block(uint8_t *bytes, size_t size) {
    const int how = next_byte();
    int i;
    if (how >= 240) memset(bytes, how % 2 ? 0xff : next_byte(), size);
    for (i = how % 16; i >= 0; i--) {
        const size_t at = (size_t)next_below(1 << 16) % size;
        bytes[at] = (uint8_t)(how % 3 ? next_byte() : bytes[at] ^ 1 << next_byte() % 8);
    }
}

/* A call with one wrong argument. It must be refused and write nothing. */
static void check_wrong_call(const tkv_codec *c, size_t size, int what) {
    const int dim = c->head_dim;
    const int n = what == 0 ? 0 : what == 1 ? TOKENS + 1 : what == 2 ? INT_MIN : 1;
    const ptrdiff_t stride = what == 3 ? (ptrdiff_t)dim - 1 : what == 4 ? -(ptrdiff_t)dim : 0;
    const size_t given = what == 5 ? size - 1 : size;
    room b = make_room(size, 1), x = make_room((size_t)dim * sizeof(float), sizeof(float));
    if (what == 3 && dim == 1) what = 7; /* a stride of 0 is right */
    if (what < 7) {
        memset(first, 0, (size_t)dim * sizeof(float));
        CHECK_EQ(tkv_encode_block(c, what == 6 ? NULL : first, stride, n, b.at, given), TKV_ERR_ARG);
        CHECK_EQ(tkv_decode_block(c, what == 6 ? NULL : b.at, given, n, (float *)(void *)x.at, stride),
                 TKV_ERR_ARG);
    }
    CHECK(is_untouched(b.at, size));
    CHECK(is_untouched(x.at, x.n));
    free_room(&b);
    free_room(&x);
}

static void check_bad_codec(const tkv_codec *c) {
    uint8_t bytes[64];
    float x[64];
    memset(bytes, PATTERN, sizeof bytes);
    memset(x, 0, sizeof x);
    CHECK_EQ(tkv_encode_block(c, x, 0, 1, bytes, sizeof bytes), TKV_ERR_ARG);
    CHECK_EQ(tkv_decode_block(c, bytes, sizeof bytes, 1, x, 0), TKV_ERR_ARG);
    CHECK(is_untouched(bytes, sizeof bytes));
    CHECK(is_zero((const uint8_t *)x, (int)sizeof x));
    n_refused++;
}

static void run_input(void) {
    const tkv_codec c = choose_codec();
    const size_t size = tkv_get_block_bytes(&c);
    const int n = next_byte() % 2 ? TOKENS : 1 + next_byte() % TOKENS;
    size_t stride;
    room x;
    if (!size) {
        check_bad_codec(&c);
        return;
    }
    CHECK(size % 64 == 0 && size <= (size_t)(c.head_dim + 16) * TOKENS * 4 + 4096);
    if (tkv_test_.n_bad) return;
    stride = (size_t)(c.head_dim + (next_byte() % 2 ? next_byte() % 9 : 0));
    x = make_room(n_floats(n, c.head_dim, stride) * sizeof(float), sizeof(float));
    fill_rows_of((float *)(void *)x.at, n, c.head_dim, stride);
    if (tkv_test_is_finite(largest_of((float *)(void *)x.at, n, c.head_dim, stride))) {
        check_codec(&c, (float *)(void *)x.at, n, stride, size);
        n_encoded++;
    } else {
        room b = make_room(size, 1);
        CHECK_EQ(tkv_encode_block(&c, (float *)(void *)x.at, (ptrdiff_t)stride, n, b.at, size),
                 TKV_ERR_NONFINITE);
        CHECK(is_untouched(b.at, size));
        memcpy(block, b.at, size);
        free_room(&b);
        n_nonfinite++;
    }
    free_room(&x);
    change_block(block, size);
    decode_twice(&c, block, size, TOKENS);
    check_wrong_call(&c, size, next_byte() % 16);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    begin_input(data, size);
    run_input();
    end_input();
    return 0;
}

#ifdef TKV_FUZZ_MAIN
static int make_random(int seed, int n_bytes, uint8_t *bytes) {
    return random_bytes(seed, 20, n_bytes, 60, bytes);
}

int main(int argc, char **argv) {
    int n_runs;
    const int status = run_inputs(argc, argv, "codecs", make_random, 60, 0, &n_runs);
    printf("%ld blocks encoded, %ld with floats that are not finite, %ld codecs refused\n", n_encoded,
           n_nonfinite, n_refused);
    return status;
}
#endif
