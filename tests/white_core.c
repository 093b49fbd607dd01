/*
 * white_core.c - white-box test of src/core: floats and fp16 by their bits, rounding, checked sizes, memory, text,
 * floats as text, code books, RoPE, k-means against the optimum.
 *
 * It calls internal functions (white.h).
 */
#include "white.h"
#include "levels.h"

/* >>references: exact in double. They use ldexp, so that flags which flush subnormals do not matter. */
static double float_value(uint32_t u) { /* of a finite pattern */
    int e = (int)(u >> 23 & 0xffu), m = (int)(u & 0x7fffffu);
    double x = e ? ldexp((double)(m + 0x800000), e - 150) : ldexp((double)m, -149);
    return u >> 31 ? -x : x;
}

static double half_value(uint32_t h) { /* of a finite pattern */
    int e = (int)(h >> 10 & 0x1fu), m = (int)(h & 0x3ffu);
    double x = e ? ldexp((double)(m + 1024), e - 25) : ldexp((double)m, -24);
    return h >> 15 ? -x : x;
}

static double bf16_value(uint32_t h) { return float_value(h << 16); }

/* Returns the pattern nearest to |x| among 0 .. last, whose values ascend. Ties go to the even pattern. */
static uint32_t nearest_pattern(double x, double (*value)(uint32_t), uint32_t last) {
    uint32_t lo = 0, hi = last;
    double below, above;
    if (x < 0) x = -x;
    if (x >= value(last)) return last;
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (value(mid) <= x) lo = mid;
        else hi = mid;
    }
    below = x - value(lo);
    above = value(hi) - x;
    if (below == above) return lo & 1u ? hi : lo;
    return below < above ? lo : hi;
}

static void check_to_f16(uint32_t u) {
    uint32_t want = nearest_pattern(float_value(u), half_value, 0x7bffu) | (u >> 16 & 0x8000u);
    uint32_t got = tkvi_f32_to_f16(tkvi_from_bits(u));
    CHECK_MSG(got == want, "0x%08lx gives 0x%04lx, expected 0x%04lx", (unsigned long)u, (unsigned long)got,
              (unsigned long)want);
}

static void check_to_bf16(uint32_t u) {
    uint32_t want = nearest_pattern(float_value(u), bf16_value, 0x7f7fu) | (u >> 16 & 0x8000u);
    uint32_t got = tkvi_f32_to_bf16(tkvi_from_bits(u));
    CHECK_MSG(got == want, "0x%08lx gives 0x%04lx, expected 0x%04lx", (unsigned long)u, (unsigned long)got,
              (unsigned long)want);
}

static int is_finite_pattern(uint32_t u) { return (u >> 23 & 0xffu) != 0xffu; }

/* Returns the pattern of a random finite float. Half of them are in the range of fp16. */
static uint32_t random_finite_pattern(tkv_rng *r) {
    for (;;) {
        uint32_t u = (uint32_t)(tkv_rng_u64(r) >> 32);
        if (tkv_rng_below(r, 2)) u = (u & 0x807fffffu) | (uint32_t)(100 + tkv_rng_below(r, 45)) << 23;
        if (is_finite_pattern(u)) return u;
    }
}

/* >>fp16 and bf16 */
TEST(f16_all_patterns) {
    uint32_t h;
    for (h = 0; h < 0x10000u; h++) {
        uint32_t u = tkvi_bits(tkvi_f16_to_f32((uint16_t)h));
        uint32_t back = tkvi_f32_to_f16(tkvi_from_bits(u));
        if ((h & 0x7fffu) < 0x7c00u) {
            CHECK_MSG(float_value(u) == half_value(h) && u >> 31 == h >> 15 && back == h,
                      "0x%04lx: 0x%08lx, 0x%04lx", (unsigned long)h, (unsigned long)u, (unsigned long)back);
        } else if ((h & 0x7fffu) == 0x7c00u) {
            CHECK_EQ(u, (h & 0x8000u) << 16 | 0x7f800000u);
            CHECK_EQ(back, (h & 0x8000u) | 0x7bffu); /* infinity saturates */
        } else { /* x87 may make a signalling NaN quiet, so check no other bits */
            CHECK((u & 0x7fffffffu) > 0x7f800000u);
            CHECK_EQ(back & 0x7e00u, 0x7e00u);
        }
    }
}

TEST(f16_from_floats) {
    tkv_rng r = tkv_rng_seed(1);
    uint32_t h;
    int i, d, n = tkv_test_quick() ? 20000 : 500000;
    for (h = 0; h < 0x7bffu; h++) { /* all values and middles, and the floats beside them */
        uint32_t at = tkvi_bits((float)half_value(h));
        uint32_t middle = tkvi_bits((float)(0.5 * (half_value(h) + half_value(h + 1u))));
        for (d = -1; d <= 1; d++) {
            if (at > 0) check_to_f16(at + (uint32_t)d);
            check_to_f16((middle + (uint32_t)d) | 0x80000000u);
        }
    }
    for (i = 0; i < n; i++) check_to_f16(random_finite_pattern(&r));
}

TEST(f16_literal_patterns) {
    CHECK_EQ(tkvi_f32_to_f16(1.0f), 0x3c00);
    CHECK_EQ(tkvi_f32_to_f16(-2.0f), 0xc000);
    CHECK_EQ(tkvi_f32_to_f16(tkvi_from_bits(0x80000000u)), 0x8000);
    CHECK_EQ(tkvi_f32_to_f16(65504.0f), 0x7bff);
    CHECK_EQ(tkvi_f32_to_f16(65519.0f), 0x7bff);
    CHECK_EQ(tkvi_f32_to_f16(65520.0f), 0x7bff);
    CHECK_EQ(tkvi_f32_to_f16(-1e30f), 0xfbff);
    CHECK_EQ(tkvi_f32_to_f16(tkvi_from_bits(0xff800000u)), 0xfbff);
    CHECK_EQ(tkvi_f32_to_f16(tkvi_from_bits(0x7fc00000u)), 0x7e00);
    CHECK_EQ(tkvi_f32_to_f16(2049.0f), 0x6800);              /* tie, down to 2048 */
    CHECK_EQ(tkvi_f32_to_f16(2051.0f), 0x6802);              /* tie, up to 2052 */
    CHECK_EQ(tkvi_f32_to_f16(5.9604644775390625e-8f), 1);    /* 2^-24 */
    CHECK_EQ(tkvi_f32_to_f16(2.98023223876953125e-8f), 0);   /* 2^-25: tie, down to 0 */
    CHECK_EQ(tkvi_f32_to_f16(2.9802325940409414e-8f), 1);    /* the float above */
    CHECK_EQ(tkvi_f32_to_f16(8.94069671630859375e-8f), 2);   /* 1.5 * 2^-24: tie, up to 2 */
    CHECK_EQ(tkvi_f32_to_f16(6.097555160522461e-5f), 0x3ff); /* the largest subnormal */
    CHECK_EQ(tkvi_f32_to_f16(6.103515625e-5f), 0x400);       /* 2^-14 */
    CHECK_EQ(tkvi_f32_to_f16(0.42f), 0x36b8);
    CHECK_EQ(tkvi_bits(tkvi_f16_to_f32(0x3555)), 0x3eaaa000u);
    CHECK_EQ(tkvi_bits(tkvi_f16_to_f32(0x8001)), 0xb3800000u);
}

TEST(bf16) {
    tkv_rng r = tkv_rng_seed(2);
    uint32_t h;
    int i, d, n = tkv_test_quick() ? 20000 : 300000;
    for (h = 0; h < 0x10000u; h++) {
        uint32_t u = tkvi_bits(tkvi_bf16_to_f32((uint16_t)h));
        if ((h & 0x7fffu) < 0x7f80u) {
            CHECK_EQ(u, h << 16);
            CHECK_EQ(tkvi_f32_to_bf16(tkvi_from_bits(u)), h);
        } else if ((h & 0x7fffu) == 0x7f80u) {
            CHECK_EQ(tkvi_f32_to_bf16(tkvi_from_bits(u)), (h & 0x8000u) | 0x7f7fu);
        } else {
            CHECK((u & 0x7fffffffu) > 0x7f800000u);
            CHECK((tkvi_f32_to_bf16(tkvi_from_bits(u)) & 0x7fffu) > 0x7f80u);
        }
    }
    for (h = 0; h < 0x7f7fu; h += tkv_test_quick() ? 7u : 1u)
        for (d = -1; d <= 1; d++) check_to_bf16((h << 16 | 0x8000u) + (uint32_t)d);
    for (i = 0; i < n; i++) check_to_bf16(random_finite_pattern(&r));
    CHECK_EQ(tkvi_f32_to_bf16(tkvi_from_bits(0x7f7fffffu)), 0x7f7f); /* FLT_MAX saturates */
    CHECK_EQ(tkvi_f32_to_bf16(tkvi_from_bits(0xff7f8000u)), 0xff7f);
}

TEST(finite_patterns) {
    static const uint32_t mantissas[] = {0, 1, 0x3fffffu, 0x400000u, 0x400001u, 0x7fffffu};
    uint32_t e, s;
    size_t i;
    for (e = 0; e < 256; e++)
        for (s = 0; s < 2; s++)
            for (i = 0; i < sizeof mantissas / sizeof *mantissas; i++)
                CHECK_EQ(tkvi_is_finite(tkvi_from_bits(s << 31 | e << 23 | mantissas[i])), e != 255);
    CHECK(tkvi_is_finite(FLT_MAX));
}

/* >>rounding */
TEST(round_half_to_even) {
    static const struct {
        float x;
        int want;
    } cases[] = {{0.0f, 0},   {0.5f, 0},   {1.5f, 2},        {2.5f, 2},        {3.5f, 4},     {4.5f, 4},
                 {1.3f, 1},   {1.7f, 2},   {-0.5f, 0},       {-1.5f, -2},      {-2.5f, -2},   {-3.5f, -4},
                 {-1.3f, -1}, {-1.7f, -2}, {0.49999997f, 0}, {0.50000006f, 1}, {254.5f, 254}, {253.5f, 254}};
    tkv_rng r = tkv_rng_seed(3);
    size_t c;
    int i, k;
    for (c = 0; c < sizeof cases / sizeof *cases; c++) {
        int got = tkvi_rne(cases[c].x);
        CHECK_MSG(got == cases[c].want, "%.9g gives %d, expected %d", (double)cases[c].x, got, cases[c].want);
    }
    for (k = -70000; k <= 70000; k++) {
        volatile float x = (float)k; /* volatile: -ffast-math would add 0.5 to the constant in tkvi_rne */
        CHECK_EQ(tkvi_rne(x), k);
        x += 0.5f;
        CHECK_EQ(tkvi_rne(x), k % 2 ? k + 1 : k);
        x += 0.25f;
        CHECK_EQ(tkvi_rne(x), k + 1);
        x -= 0.5f;
        CHECK_EQ(tkvi_rne(x), k);
    }
    CHECK_EQ(tkvi_rne(4194303.0f), 4194303);
    CHECK_EQ(tkvi_rne(-4194303.0f), -4194303);
    CHECK_EQ(tkvi_rne(4194302.5f), 4194302);
    CHECK_EQ(tkvi_rne(-4194301.5f), -4194302);
    for (i = 0; i < 100000; i++) { /* against floor, in double */
        volatile float x = (float)((tkv_rng_uniform(&r) - 0.5) * 600.0);
        double f = floor((double)x), rest = (double)x - f;
        int want = (int)f + (rest > 0.5 || (rest == 0.5 && (int)f % 2 != 0));
        CHECK_EQ(tkvi_rne(x), want);
    }
}

/* tkvi_f32 makes each operation round to a float, also where the compiler keeps more bits (x87). The reference uses
 * double: rounding a difference or a quotient first to double and then to float gives the IEEE result. */
TEST(single_precision_operations) {
    volatile float one = 1.0f, tiny = 9.313225746154785e-10f, three = 3.0f;
    tkv_rng r = tkv_rng_seed(4);
    int i, n = tkv_test_quick() ? 20000 : 200000;
    CHECK_EQ(tkvi_bits(tkvi_f32(one + tiny)), 0x3f800000u);
    CHECK_EQ(tkvi_bits(tkvi_f32(one - tiny)), 0x3f800000u);
    if (FAST_MATH) return; /* it may multiply by a reciprocal in place of a division */
    CHECK_EQ(tkvi_bits(tkvi_f32(one / three)), 0x3eaaaaabu);
    for (i = 0; i < n; i++) {
        float a = (float)tkv_rng_gauss(&r), b = (float)(tkv_rng_gauss(&r) * (i % 3 ? 1.0 : 1e-4));
        float c = (float)(tkv_rng_uniform(&r) + 1e-3);
        float difference = tkvi_f32(a - b), quotient = tkvi_f32(difference / c);
        volatile double d = (double)a - (double)b, q;
        volatile float want = (float)d;
        CHECK_EQ(tkvi_bits(difference), tkvi_bits(want));
        q = (double)want / (double)c;
        want = (float)q;
        CHECK_EQ(tkvi_bits(quotient), tkvi_bits(want));
    }
}

TEST(small_helpers) {
    CHECK_EQ(tkvi_bits(tkvi_clampf(2.0f, -1.0f, 1.0f)), 0x3f800000u);
    CHECK_EQ(tkvi_bits(tkvi_clampf(-2.0f, -1.0f, 1.0f)), 0xbf800000u);
    CHECK_EQ(tkvi_bits(tkvi_clampf(0.5f, -1.0f, 1.0f)), 0x3f000000u);
    CHECK_EQ(tkvi_min(3, -4), -4);
    CHECK_EQ(tkvi_max(3, -4), 3);
    CHECK_EQ(tkvi_round_up(0, 16), 0);
    CHECK_EQ(tkvi_round_up(1, 16), 16);
    CHECK_EQ(tkvi_round_up(80, 16), 80);
    CHECK_EQ(tkvi_round_up(81, 16), 96);
    CHECK_EQ(tkvi_align_up(0), 0);
    CHECK_EQ(tkvi_align_up(1), 64);
    CHECK_EQ(tkvi_align_up(64), 64);
    CHECK_EQ(tkvi_align_up(65), 128);
}

TEST(bytes_are_little_endian) {
    uint8_t b[5] = {0xee, 0xee, 0xee, 0xee, 0xee};
    tkvi_store16(b + 1, 0x1234);
    CHECK(b[0] == 0xee && b[1] == 0x34 && b[2] == 0x12 && b[3] == 0xee);
    CHECK_EQ(tkvi_load16(b + 1), 0x1234);
    tkvi_store32(b + 1, 0x89abcdefu);
    CHECK(b[0] == 0xee && b[1] == 0xef && b[2] == 0xcd && b[3] == 0xab && b[4] == 0x89);
    CHECK_EQ(tkvi_load32(b + 1), 0x89abcdefu);
}

/* >>sizes */
TEST(sizes_that_do_not_fit_are_too_many) {
    const size_t most = TKVI_TOO_MANY, root = (size_t)1 << (sizeof(size_t) * 4);
    CHECK(most == (size_t)-1 - 63u);
    CHECK(tkvi_multiply_sizes(0, most) == 0 && tkvi_multiply_sizes(most, 0) == 0);
    CHECK(tkvi_multiply_sizes(1, most) == most && tkvi_multiply_sizes(most, 1) == most);
    CHECK(tkvi_multiply_sizes(root - 1, root) == (root - 1) * root);
    CHECK(tkvi_multiply_sizes(2, most / 2 - 1) == most - 2);
    CHECK(tkvi_multiply_sizes(12, 34) == 408);
    CHECK(tkvi_multiply_sizes(root, root) == most && tkvi_multiply_sizes(root - 1, root + 1) == most);
    CHECK(tkvi_multiply_sizes((size_t)-1, 1) == most && tkvi_multiply_sizes(2, most / 2 + 1) == most);
    CHECK(tkvi_add_sizes(12, 34) == 46 && tkvi_add_sizes(most - 1, 0) == most - 1);
    CHECK(tkvi_add_sizes(most / 2, most / 2 - 1) == most - 1);
    CHECK(tkvi_add_sizes(0, most) == most && tkvi_add_sizes(most, 0) == most);
    CHECK(tkvi_add_sizes(most - 1, 1) == most && tkvi_add_sizes(most / 2 + 1, most / 2 + 1) == most);
    CHECK(tkvi_add_sizes((size_t)-1, (size_t)-1) == most && tkvi_add_sizes(1, (size_t)-1) == most);
    CHECK(tkvi_align_up(most) == most && tkvi_align_up(most - 1) == most);
}

/* >>memory */
#ifndef TKV_NO_MALLOC
TEST(default_allocator) {
    static const size_t sizes[] = {0, 1, 7, 8, 63, 64, 65, 1000, 4096, 100001};
    size_t align, i;
    for (align = 1; align <= 64; align *= 2)
        for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            uint8_t *a = (uint8_t *)tkvi_malloc(NULL, sizes[i], align);
            uint8_t *b = (uint8_t *)tkvi_malloc(NULL, sizes[i], align);
            REQUIRE(a && b);
            CHECK_EQ((uintptr_t)a % align, 0);
            CHECK_EQ((uintptr_t)b % align, 0);
            memset(a, 0x11, sizes[i]); /* a sanitizer finds a byte too many */
            memset(b, 0x22, sizes[i]);
            CHECK(sizes[i] == 0 || (a[0] == 0x11 && a[sizes[i] - 1] == 0x11 && b[0] == 0x22));
            tkvi_mfree(NULL, a, sizes[i], align);
            tkvi_mfree(NULL, b, sizes[i], align);
        }
}
#endif

typedef struct call_counter {
    int allocs, releases, fail;
    size_t size, align;
} call_counter;

static void *count_alloc(void *user, size_t size, size_t align) {
    call_counter *c = (call_counter *)user;
    if (c->fail) return NULL;
    c->allocs++;
    c->size = size;
    c->align = align;
    return c; /* any pointer serves: the heap does not write to it */
}

static void count_release(void *user, void *ptr, size_t size, size_t align) {
    call_counter *c = (call_counter *)user;
    CHECK(ptr == c);
    c->releases++;
    c->size = size;
    c->align = align;
}

TEST(heap_counts_bytes) {
    call_counter c;
    tkvi_heap heap;
    void *p;
    memset(&c, 0, sizeof c);
    memset(&heap, 0, sizeof heap);
    heap.from.user = &c;
    heap.from.alloc = count_alloc;
    heap.from.release = count_release;
    p = tkvi_get(&heap, 100);
    CHECK(p && c.allocs == 1 && c.size == 100 && c.align == 64 && heap.held == 100 && heap.peak == 100);
    p = tkvi_get(&heap, 28);
    CHECK(p && heap.held == 128 && heap.peak == 128);
    c.fail = 1;
    CHECK(!tkvi_get(&heap, 1000));
    c.fail = 0;
    CHECK(!tkvi_get(&heap, TKVI_TOO_MANY) && !tkvi_get(&heap, (size_t)-1) && !heap.at_limit);
    CHECK(c.allocs == 2); /* what does not fit is not asked for */
    CHECK(heap.held == 128 && heap.peak == 128);
    tkvi_put(&heap, p, 100);
    CHECK(c.releases == 1 && c.size == 100 && c.align == 64 && heap.held == 28 && heap.peak == 128);
    tkvi_put(&heap, NULL, 100);
    CHECK(c.releases == 1 && heap.held == 28);
    tkvi_put(&heap, p, 28);
    CHECK(c.releases == 2 && heap.held == 0 && heap.peak == 128);
}

TEST(arena) {
    uint8_t buffer[1024 + 64];
    tkvi_arena a;
    uint8_t *p, *q;
    memset(&a, 0, sizeof a);
    a.base = buffer + (64 - (uintptr_t)buffer % 64) % 64;
    a.size = 1024;
    p = (uint8_t *)tkvi_arena_alloc(&a, 3, 64);
    q = (uint8_t *)tkvi_arena_alloc(&a, 10, 64);
    CHECK(p == a.base && q == a.base + 64 && a.used == 74);
    q = (uint8_t *)tkvi_arena_alloc(&a, 1, 1);
    CHECK(q == a.base + 74);
    q = (uint8_t *)tkvi_arena_alloc(&a, 8, 16);
    CHECK(q == a.base + 80);
    CHECK(!tkvi_arena_alloc(&a, (size_t)-1, 64));
    CHECK(!tkvi_arena_alloc(&a, 1024 - 128 + 1, 64));
    CHECK_EQ(a.used, 88);
    q = (uint8_t *)tkvi_arena_alloc(&a, 1024 - 128, 64);
    CHECK(q == a.base + 128 && a.used == 1024);
    CHECK(!tkvi_arena_alloc(&a, 1, 1));
    a.used = 0;
    a.closed = 1;
    CHECK(!tkvi_arena_alloc(&a, 1, 1));
    a.closed = 0;
    a.used = (size_t)-1 - 3; /* cannot happen, but the sum must not wrap */
    CHECK(!tkvi_arena_alloc(&a, 1, 64));
}

/* >>text */
static void write_sentence(char *buf, size_t size) {
    tkvi_text t = tkvi_text_begin(buf, size);
    tkvi_append_text(&t, "head_dim is ");
    tkvi_append_int(&t, -1203);
    tkvi_append_text(&t, "");
    tkvi_append_text(&t, ", at most 256");
}

static const char *int_text(int64_t n) {
    static char buf[32];
    tkvi_text t = tkvi_text_begin(buf, sizeof buf);
    tkvi_append_int(&t, n);
    return buf;
}

TEST(text_is_truncated) {
    const char *full_text = "head_dim is -1203, at most 256";
    size_t size, i, full_size = strlen(full_text) + 1;
    char buf[64];
    for (size = 0; size <= full_size + 3; size++) {
        size_t n_kept = size < full_size ? size : full_size; /* bytes, the final zero included */
        memset(buf, 0x5a, sizeof buf);
        write_sentence(buf, size);
        if (size > 0) CHECK(memcmp(buf, full_text, n_kept - 1) == 0 && buf[n_kept - 1] == 0);
        for (i = size; i < sizeof buf; i++) CHECK(buf[i] == 0x5a);
    }
    write_sentence(NULL, 0);
    write_sentence(NULL, 10);
    CHECK_STR(int_text(0), "0");
    CHECK_STR(int_text(7), "7");
    CHECK_STR(int_text(-10), "-10");
    CHECK_STR(int_text(INT64_MAX), "9223372036854775807");
    CHECK_STR(int_text(INT64_MIN), "-9223372036854775808");
}

/* >>checksums */
/* Makes the input of the test vectors of xxHash: the top bytes of a running product. */
static void xxh_sanity_bytes(uint8_t *p, size_t n) {
    uint64_t x = 2654435761u;
    size_t i;
    for (i = 0; i < n; i++, x *= 11400714785074694797u) p[i] = (uint8_t)(x >> 56);
}

TEST(xxh64_vectors) {
    static const struct {
        size_t n;
        uint64_t unseeded, seeded; /* seeded: the seed is 2654435761 */
    } known[] = {
        {0, 0xef46db3751d8e999u, 0xac75fda2929b17efu},  {1, 0xe934a84adb052768u, 0x5014607643a9b4c3u},
        {4, 0x9136a0dca57457eeu, 0xcaab286bd8e9fdb5u},  {14, 0x8282dcc4994e35c8u, 0xc3bd6bf63deb6df0u},
        {32, 0x18b216492bb44b70u, 0xb3f33bdf93ade409u}, {63, 0xa9efbe0fa0f3f4e7u, 0x6c911fadb05b6fc2u},
        {222, 0xb641ae8cb691c174u, 0x20cb8ab7ae10c14au}};
    uint8_t bytes[223];
    size_t i, shift;
    for (shift = 0; shift < 2; shift++) { /* aligned or not */
        xxh_sanity_bytes(bytes + shift, 222);
        for (i = 0; i < sizeof known / sizeof known[0]; i++) {
            CHECK(tkvi_xxh64(0, bytes + shift, known[i].n) == known[i].unseeded);
            CHECK(tkvi_xxh64(2654435761u, bytes + shift, known[i].n) == known[i].seeded);
        }
    }
    CHECK(tkvi_xxh64(0, (const uint8_t *)"abc", 3) == 0x44bc2cf5ad770999u);
    CHECK(tkvi_xxh64(0, (const uint8_t *)"Nobody inspects the spammish repetition", 39) ==
          0xfbcea83c8a378bf1u);
}

/* Flips one of 128 bits in two words. The second word starts next bytes after the first. */
static void flip_bit(uint8_t *word, size_t next, int bit) {
    word[(bit < 64 ? 0 : next) + (size_t)(bit % 64 / 8)] ^= (uint8_t)(1u << bit % 8);
}

/* Flips every set of 1, 2 or 3 bits in two words. The words are adjacent, or adjacent in a lane (32 bytes apart). */
/* Vectors of NIST: "abc", the empty string, two blocks and a million letters a (FIPS 180-4 examples, CAVP). */
TEST(sha256_vectors) {
    static const struct {
        const char *text, *hash;
    } known[] = {
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmno"
         "pqrstnopqrstu",
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
        {NULL, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
    char hex[65];
    uint8_t out[32];
    size_t i, k, piece;
    for (i = 0; i < sizeof known / sizeof known[0]; i++)
        for (piece = 1; piece < 200; piece += 66) { /* in pieces of any length */
            tkvi_sha256 s = tkvi_sha256_begin();
            const size_t n = known[i].text ? strlen(known[i].text) : 1000000;
            for (k = 0; k < n; k += piece) {
                static char letters[200];
                const size_t m = n - k < piece ? n - k : piece;
                memset(letters, 'a', sizeof letters);
                tkvi_sha256_add(&s, known[i].text ? known[i].text + k : letters, m);
            }
            tkvi_sha256_end(&s, out);
            for (k = 0; k < 32; k++) snprintf(hex + 2 * k, 3, "%02x", (unsigned)out[k]);
            CHECK_MSG(strcmp(hex, known[i].hash) == 0, "%d: %s", (int)i, hex);
        }
}

TEST(xxh64_detects_flipped_bits) {
    enum { SIZE = 104 }; /* three rounds and a tail of one word */
    static const size_t distance[] = {8, 32};
    uint8_t bytes[SIZE];
    uint64_t want;
    size_t d, at;
    long missed = 0, tried = 0;
    int i, j, k;
    xxh_sanity_bytes(bytes, SIZE);
    want = tkvi_xxh64(7, bytes, SIZE);
    for (d = 0; d < 2; d++)
        for (at = 0; at + distance[d] + 8 <= SIZE; at += tkv_test_quick() ? 40u : 8u)
            for (i = 0; i < 128; i++) {
                uint8_t *word = bytes + at;
                flip_bit(word, distance[d], i);
                for (j = i; j < 128; j++) { /* j == i: no second bit, k == j: no third one */
                    if (j > i) flip_bit(word, distance[d], j);
                    for (k = j; k < 128; k++) {
                        if (k > j) flip_bit(word, distance[d], k);
                        missed += tkvi_xxh64(7, bytes, SIZE) == want;
                        tried++;
                        if (k > j) flip_bit(word, distance[d], k);
                    }
                    if (j > i) flip_bit(word, distance[d], j);
                }
                flip_bit(word, distance[d], i);
            }
    CHECK(tkvi_xxh64(7, bytes, SIZE) == want);
    CHECK_MSG(missed == 0, "%ld of %ld changes missed", missed, tried);
    printf("\n      %ld changes\n", tried);
}

/* >>floats as text */
/* Compares bits: with -Ofast, arithmetic flushes the smallest floats to zero. */
static int reads_as(const char *s, float want) {
    float x = -1;
    return tkvi_float_read(s, strlen(s), &x) && memcmp(&x, &want, sizeof x) == 0;
}

TEST(floats_read) {
    static const char *const bad[] = {"",     "-",     "+",   ".",   "e5",    "1e",   "1e+",
                                      "1e5x", "1.2.3", "--1", "0x1", "nan",   "inf",  "1,5",
                                      "4e38", "1 ",    " 1",  "1_0", "1e999", "-4e38"};
    float x = 7;
    size_t i;
    CHECK(reads_as("0", 0));
    CHECK(reads_as("-1.5", -1.5f));
    CHECK(reads_as("+.5", .5f));
    CHECK(reads_as("5.", 5));
    CHECK(reads_as("10000", 10000));
    CHECK(reads_as("1e4", 10000));
    CHECK(reads_as("1000000000000000000000000000e-25", 100));
    CHECK(reads_as("0.00000000000000000000000000001E29", 1));
    CHECK(reads_as("0.1", .1f));
    CHECK(reads_as("3.4028235e38", tkv_test_float(0x7f7fffffu)));
    CHECK(reads_as("1.4e-45", tkv_test_float(1)));
    CHECK(reads_as("0.7e-45", 0)); /* less than half of the smallest */
    CHECK(reads_as("0.8e-45", tkv_test_float(1)));
    CHECK(reads_as("1e-9999", 0));
    CHECK(reads_as("0e9999", 0));
    CHECK(reads_as("16777217", 16777216)); /* a tie goes to the even float */
    CHECK(reads_as("16777219", 16777220));
    CHECK(reads_as("16777217.0000001", 16777218));
    CHECK(reads_as("16777218.9999999", 16777218));
    for (i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_MSG(!tkvi_float_read(bad[i], strlen(bad[i]), &x), "%s", bad[i]);
    CHECK_EQ((int)x, 7);
}

TEST(floats_round_trip) {
    static const struct {
        uint32_t bits;
        const char *text;
    } known[] = {{0, "0"},
                 {0x80000000u, "-0"},
                 {0x3f800000u, "1"},
                 {0xbf800000u, "-1"},
                 {0x3d4ccccdu, "0.05"},
                 {0x3dcccccdu, "0.1"},
                 {0x461c4000u, "10000"},
                 {0x48f42400u, "500000"},
                 {0x7f7fffffu, "3.4028235e38"},
                 {1, "1e-45"},
                 {0x00800000u, "1.1754944e-38"},
                 {0x4e6e6b28u, "1e9"},
                 {0x4b800000u, "16777216"},
                 {0x4d800000u, "268435460"},
                 {0x3a83126fu, "0.001"},
                 {0x38d1b717u, "0.0001"},
                 {0x3727c5acu, "1e-5"}};
    char text[TKVI_FLOAT_TEXT];
    tkv_rng r = tkv_rng_seed(1);
    int i;
    for (i = 0; i < COUNT(known); i++) {
        tkvi_float_write(tkv_test_float(known[i].bits), text);
        CHECK_STR(text, known[i].text);
    }
    for (i = 0; i < (tkv_test_quick() ? 500 : 5000); i++) {
        const float x = tkv_test_float((uint32_t)tkv_rng_u64(&r));
        float y = 0;
        if (!tkv_test_is_finite((double)x)) continue;
        tkvi_float_write(x, text);
        CHECK_MSG(tkvi_float_read(text, strlen(text), &y) && memcmp(&x, &y, sizeof x) == 0, "%s", text);
    }
}

/* >>code books */
TEST(code_books) {
    static const int nans[] = {0x7f, 0xff};
    int i;
    for (i = 0; i < 256; i++) {
        float e4 = tkvi_e4m3_level(i) * 64.0f, e5 = tkvi_e5m2_level(i) * 4096.0f;
        CHECK_NEAR(e4, value_of_code(TKV_FP8_E4M3, i), 0);
        CHECK_NEAR(e5, value_of_code(TKV_FP8_E5M2, i), 0);
        if (i != 0x80 && i != nans[0] && i != nans[1]) CHECK_EQ(tkvi_e4m3_code(e4 / 64.0f), i);
        if (i != 0x80 && (i & 0x7f) < 0x7c) CHECK_EQ(tkvi_e5m2_code(e5 / 4096.0f), i);
    }
    for (i = 0; i < 16; i++) {
        CHECK_NEAR(tkvi_e2m1_level(i), value_of_code(TKV_FP4, i), 0);
        if (i != 8) CHECK_EQ(tkvi_e2m1_code(tkvi_e2m1_level(i)), i);
        if (i != 8) CHECK_EQ(tkvi_int4_code(tkvi_int4_level(i)), i);
    }
    for (i = 1; i < 256; i++)
        if (i != 128) CHECK_EQ(tkvi_int8_code(tkvi_int8_level(i)), i);
    CHECK_EQ(tkvi_e4m3_code(-0.0f) | tkvi_e5m2_code(-0.0f) | tkvi_e2m1_code(-0.0f), 0); /* one zero */
    CHECK_EQ(tkvi_e4m3_code(-1e-9f) | tkvi_e2m1_code(-0.25f) | tkvi_int4_code(-0.5f), 0);
    CHECK_NEAR(tkvi_e4m3_level(0x7e), 448.0 / 64, 0);
    CHECK_NEAR(tkvi_e5m2_level(0x7b), 57344.0 / 4096, 0);
    CHECK_NEAR(tkvi_e4m3_level(1) * 64.0f, 1.0 / 512, 0);
    CHECK_NEAR(tkvi_e5m2_level(1) * 4096.0f, 1.0 / 65536, 0);
}

/* Halfway between two levels, the even code is chosen. Elsewhere the nearest code is chosen. */
TEST(ties_take_the_even_code) {
    struct {
        const char *name;
        int (*code)(float);
        float (*level)(int);
        int last;
    } const grids[] = {{"e4m3", tkvi_e4m3_code, tkvi_e4m3_level, 0x7e},
                       {"e5m2", tkvi_e5m2_code, tkvi_e5m2_level, 0x7b},
                       {"e2m1", tkvi_e2m1_code, tkvi_e2m1_level, 7},
                       {"int4", tkvi_int4_code, tkvi_int4_level, 7},
                       {"int8", tkvi_int8_code, tkvi_int8_level, 127}};
    int g, i;
    for (g = 0; g < COUNT(grids); g++) {
        float top = grids[g].level(grids[g].last);
        for (i = 0; i < grids[g].last; i++) {
            float a = grids[g].level(i), b = grids[g].level(i + 1), middle = 0.5f * (a + b);
            CHECK_MSG(grids[g].code(middle) == (i % 2 ? i + 1 : i), "%s, after %d", grids[g].name, i);
            CHECK_EQ(grids[g].code(middle * 0.99999f), i);
            CHECK_EQ(grids[g].code(middle * 1.00001f), i + 1);
            CHECK_NEAR(grids[g].level(grids[g].code(-middle)), -grids[g].level(grids[g].code(middle)), 0);
        }
        CHECK_EQ(grids[g].code(1.2f * top), grids[g].last); /* saturation */
        CHECK_EQ(grids[g].code(1e6f * top), grids[g].last);
        CHECK_EQ(grids[g].code(3e38f), grids[g].last);
        CHECK_NEAR(grids[g].level(grids[g].code(-3e38f)), -top, 0);
        CHECK_EQ(grids[g].code(1e-40f), 0);
    }
}

/* >>RoPE in integers against double precision */
TEST(rope_against_double) {
    static const int64_t positions[] = {0, 1, 2, 63, 64, 1000, 4095, 65537, 131072, 1048575, 1000000};
    static const float given[] = {1.0f, 0.3f, 0.017f, 1e-3f, 4e-6f, 0.0f};
    static const double bases[] = {0, 10000, 500000, 1e6, 1e7, 2};
    tkv_rng rng = tkv_rng_seed(1);
    int b, p, d, i, k;
    for (b = 0; b < COUNT(bases) + 1; b++)
        for (d = 0; d < 12; d++) {
            static const int dims[] = {2, 12, 64, 96, 128, 256};
            int dim = dims[d % 6];
            tkv_rope r = rope_of(dim, b < COUNT(bases) ? bases[b] : 0, d / 6,
                                 d % 3 == 1 ? 0.25
                                 : d % 4    ? 0
                                            : 1.75);
            tkvi_own_rope own;
            const tkvi_rope *rope = &own.rope;
            if (b == COUNT(bases)) {
                if (dim != 12) continue;
                r.frequencies = given;
            }
            CHECK(tkvi_rope_has_fault(&r, 256) == NULL);
            (void)tkvi_own_rope_make(&own, &r);
            for (p = 0; p < COUNT(positions); p++)
                for (k = 0; k < 2; k++) {
                    float x[256] = {0.0f}, y[256];
                    double ref[256], worst = 0, size = 0;
                    tkv_rng_fill(&rng, x, (size_t)dim, 1);
                    memcpy(y, x, sizeof y);
                    tkvi_rope_rotate(rope, positions[p], k, y);
                    apply_rope_naively(&r, (double)positions[p], k ? -1 : 1, x, ref, dim);
                    for (i = 0; i < dim; i++) {
                        double e = fabs((double)y[i] - ref[i]);
                        worst = e > worst ? e : worst;
                        size = fabs(ref[i]) > size ? fabs(ref[i]) : size;
                    }
                    /* scale and frequencies are floats, which bounds the precision */
                    CHECK_MSG(worst <= 1e-6 * size, "dim %d, base %g, position %ld: %g of %g", dim,
                              (double)r.base, (long)positions[p], worst, size);
                    tkvi_rope_rotate(rope, positions[p], !k, y);
                    CHECK_LE(sqrt(squared_error(x, y, dim)), 3e-7 * sqrt(sum_of_squares(x, dim)));
                }
        }
}

/* 2^64 / 2 pi, rounded down, is 0x28be60db9391054a. */
TEST(radians_in_turns) {
    CHECK(tkvi_radians_to_turns(1.0f) == 0x28be60db9391054aULL);
    CHECK(tkvi_radians_to_turns(2.0f) == 0x517cc1b727220a94ULL);
    CHECK(tkvi_radians_to_turns(3.0f) == 0x7a3b2292bab30fdeULL);
    CHECK(tkvi_radians_to_turns(1.0f / 65536) == 0x28be60db9391ULL);
    CHECK(tkvi_radians_to_turns(0.0f) == 0);
}

/* Codes 0 and 1 of values that differ by 2: fp16 misses the zero of 2048.5 by a quarter of the scale. More is refused. */
TEST(zeros_near_enough_for_fp16) {
    int i;
    for (i = 0; i < 2; i++) {
        tkvi_group g;
        uint8_t scale[2] = {0, 0}, zero[2] = {0, 0};
        memset(&g, 0, sizeof g);
        g.n = 2;
        g.low = i ? 2048.25f : 2048.0f;
        g.step = 1.0f;
        g.sum_u = 2;
        g.sum_uu = 4;
        tkvi_moments_of(&g, 1, 1, 2, 1, scale, zero);
        CHECK_NEAR(tkvi_f16_to_f32(tkvi_load16(scale)), i ? 0.0 : 2.0, 0.0);
        CHECK_NEAR(tkvi_f16_to_f32(tkvi_load16(zero)), i ? 0.0 : 2048.0, 0.0);
    }
}

/* A scale below all fp16 numbers leaves both unchanged, also where 0 is the exact zero. */
TEST(scales_too_small_for_fp16) {
    int i;
    for (i = 0; i < 2; i++) {
        tkvi_group g;
        uint8_t scale[2] = {7, 7}, zero[2] = {7, 7};
        memset(&g, 0, sizeof g);
        g.n = 2;
        g.step = i ? 1e-9f : 1.0f;
        g.low = -2.0f * g.step;
        g.sum_u = 3;
        g.sum_uu = 5;
        tkvi_moments_of(&g, 1, 1, 2, 1, scale, zero);
        CHECK_EQ(tkvi_load16(scale), i ? 0x0707 : 0x3c00);
        CHECK_EQ(tkvi_load16(zero), i ? 0x0707 : tkvi_f32_to_f16(-0.5f));
    }
}

TEST(invalid_rope_is_refused) {
    static const float bad[] = {1.0f, 2.0f}, negative[] = {1.0f, -0.5f}, endless[] = {1.0f, INFINITY};
    tkv_rope r = rope_of(64, 0, 0, 0);
    tkv_config cfg = tkv_default_config();
    char reason[200];
    CHECK(tkvi_rope_has_fault(&r, 64) == NULL);
    CHECK(tkvi_rope_has_fault(&r, 63) != NULL);
    r = rope_of(63, 0, 0, 0);
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(-2, 0, 0, 0);
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(TKV_OFF, 0, 0, 0);
    CHECK(tkvi_rope_has_fault(&r, 64) == NULL);
    r.kind = TKV_ROPE_COUNT;
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(2, 1.5, 0, 0);
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(2, 0, 2, 0);
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(2, 0, 0, 4.5);
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(2, 0, 0, -1);
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(4, 0, 0, 0);
    r.frequencies = bad;
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r.frequencies = negative;
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r.frequencies = endless;
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(4, 0, 0, 0);
    r.scale = NAN;
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(4, 0, 0, 0);
    r.base = 2e9f;
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r.base = NAN;
    CHECK(tkvi_rope_has_fault(&r, 64) != NULL);
    r = rope_of(512, 0, 0, 0);
    CHECK(tkvi_rope_has_fault(&r, 512) == NULL);
    CHECK(tkvi_rope_has_fault(&r, 514) != NULL);
    cfg.model.n_layers = cfg.model.n_heads = 1;
    cfg.model.head_dim = 32;
    cfg.model.rope.dim = 34;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "rope.dim is 34") != NULL);
    cfg.model.rope.dim = 32;
    cfg.format.kvquant = 64;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "kvquant is 64") != NULL);
    cfg.format.kvquant = 15;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
}

/* The rotated values have the same bits on every machine, with any compiler flags. */
TEST(rope_golden) {
    tkv_rng rng = tkv_rng_seed(2);
    uint64_t h = HASH_START;
    float x[128], c, s;
    int i;
    for (i = 0; i < 64; i++) {
        tkv_rope r = rope_of(128, i % 2 ? 500000 : 10000, i / 2 % 2, i % 5 ? 0 : 0.25);
        tkvi_own_rope own;
        const tkvi_rope *rope = tkvi_own_rope_make(&own, &r);
        tkv_rng_fill(&rng, x, 128, 1);
        tkvi_rope_rotate(rope, (int64_t)tkv_rng_below(&rng, 1 << 30) >> i % 30, i / 4 % 2, x);
        h = hash_of_floats(h, x, 128);
    }
    CHECK_MSG(h == 0xcaeaac5066f4fe89u, "%016llx", (unsigned long long)h);
    for (i = 0; i < 5000; i++) {
        uint64_t angle = tkv_rng_u64(&rng);
        double radians = 6.283185307179586477 * ldexp((double)(angle >> 11), -53);
        tkvi_cos_sin(angle, &c, &s);
        if (fabs((double)c - cos(radians)) > 4e-8 || fabs((double)s - sin(radians)) > 4e-8) CHECK(0);
    }
    tkvi_cos_sin(0, &c, &s);
    CHECK(c == 1.0f && s == 0.0f);
    tkvi_cos_sin((uint64_t)1 << 62, &c, &s);
    CHECK(c == 0.0f && s == 1.0f);
    tkvi_cos_sin((uint64_t)1 << 63, &c, &s);
    CHECK(c == -1.0f && s == 0.0f);
    tkvi_cos_sin((uint64_t)3 << 62, &c, &s);
    CHECK(c == 0.0f && s == -1.0f);
}

/* >>code books fitted to a histogram */
static int64_t histogram[TKVI_BOOK_BINS];

static double draw_value(tkv_rng *r, int kind) {
    double g = tkv_rng_gauss(r), u = tkv_rng_uniform(r);
    switch (kind) {
    case 0: return 0.35 * g;
    case 1:
        return u < 0.5 ? 0.15 * log(1 - tkv_rng_uniform(r))
                       : -0.15 * log(1 - tkv_rng_uniform(r)); /* Laplace */
    case 2: return u < 0.4 ? -0.6 + 0.05 * g : 0.4 + 0.2 * g;
    case 3: return -1 - 0.3 * log(1 - u);
    case 4: return 2 * u - 1;
    default: return 0.1 * g / (0.3 + fabs(tkv_rng_gauss(r))); /* heavy tails */
    }
}

static void fill_histogram(tkv_rng *r, int kind, int n) {
    memset(histogram, 0, sizeof histogram);
    while (n) {
        double x = draw_value(r, kind);
        if (x < -1 || x > 1) continue;
        histogram[tkvi_book_bin((float)x)] += 1 + kind * 1000;
        n--;
    }
}

static double bin_center(int i) { return (double)(2 * i + 1 - TKVI_BOOK_BINS) / TKVI_BOOK_BINS; }

/* Returns the mean square error if each value takes its nearest level. */
static double book_error(const float *level, int n) {
    double sum = 0, n_values = 0;
    int i, j;
    for (i = 0; i < TKVI_BOOK_BINS; i++) {
        double best = 100;
        for (j = 0; j < n; j++) {
            double e = bin_center(i) - (double)level[j];
            best = e * e < best ? e * e : best;
        }
        sum += best * (double)histogram[i];
        n_values += (double)histogram[i];
    }
    return sum / n_values;
}

/* Of the bins before a border: their weight, and the sums of x and of x * x. best: the smallest error of the first bins
 * with the cells so far, next: with one cell more. */
typedef struct cell_sums {
    double w[TKVI_BOOK_BINS + 1], x[TKVI_BOOK_BINS + 1], q[TKVI_BOOK_BINS + 1];
    double best[TKVI_BOOK_BINS + 1], next[TKVI_BOOK_BINS + 1];
} cell_sums;

/* Finds next[from .. end-1], where the last cell begins at first to last. A cell that ends later begins no earlier, so
 * that the middle border divides the others. */
static void add_cell(cell_sums *s, int from, int end, int first, int last) {
    const int i = (from + end) / 2;
    int j, at = first;
    double least = 1e300;
    if (from >= end) return;
    for (j = first; j <= last && j <= i; j++) {
        const double d = s->w[i] - s->w[j], sum = s->x[i] - s->x[j];
        const double error = s->best[j] + (d > 0 ? s->q[i] - s->q[j] - sum * sum / d : 0);
        if (error < least) least = error, at = j;
    }
    s->next[i] = least;
    add_cell(s, from, i, first, at);
    add_cell(s, i + 1, end, at, last);
}

/* Returns the smallest error that n levels can have, by dynamic programming over the ends of cells. */
static double best_error(int n) {
    static cell_sums s;
    double *w = s.w, *x = s.x, *q = s.q;
    int i, k;
    for (i = 0; i < TKVI_BOOK_BINS; i++) {
        double c = (double)histogram[i];
        w[i + 1] = w[i] + c;
        x[i + 1] = x[i] + c * bin_center(i);
        q[i + 1] = q[i] + c * bin_center(i) * bin_center(i);
        s.best[i + 1] = 1e300;
    }
    s.best[0] = 0;
    for (k = 0; k < n; k++) {
        add_cell(&s, 0, TKVI_BOOK_BINS + 1, 0, TKVI_BOOK_BINS);
        memcpy(s.best, s.next, sizeof s.best);
    }
    return s.best[TKVI_BOOK_BINS] / w[TKVI_BOOK_BINS];
}

/* Reach, weight and importance have 8 units an octave, scores 32. */
TEST(scores_have_32_units_an_octave) {
    uint8_t importance[16] = {40, 40, 40, 40, 40, 36, 36, 32, 20, 10, 0, 0, 0, 0, 0, 0};
    tkvi_head h;
    memset(&h, 0, sizeof h);
    h.importance = importance;
    h.reach = -8;
    h.k_weight = 5;
    CHECK_EQ(tkvi_score(&h, 0, 0), -32); /* a head of V */
    CHECK_EQ(tkvi_score(&h, 1, 0), 4 * 5 + 4 * 40);
    CHECK_EQ(tkvi_score(&h, 1, 1), 4 * 5 + 40 + 36 + 36 + 32);
    CHECK_EQ(tkvi_score(&h, 2, 0), 4 * 5 + (5 * 40 + 36 + 36 + 32) / 2);
    CHECK_EQ(tkvi_score(&h, 1, 3), TKVI_SCORE_NONE); /* channels without keys */
}

TEST(levels_are_near_the_optimum) {
    tkv_rng r = tkv_rng_seed(3);
    int kind, bits, j, i;
    for (kind = 0; kind < 6; kind++) {
        fill_histogram(&r, kind, 30000);
        for (bits = 2; bits <= 4; bits++) {
            tkvi_book book, uniform;
            double error, best = best_error(1 << bits);
            int n = 1 << bits;
            tkvi_book_make(histogram, bits, 0, &book);
            error = book_error(book.level, n);
            if (getenv("TKV_TEST_SHOW"))
                printf("\n    kind %d, %d bits: %.4f of the best", kind, bits, error / best);
            CHECK_MSG(error <= 1.08 * best, "kind %d, %d bits: %g, the best %g", kind, bits, error, best);
            tkvi_book_make(histogram, bits, 1, &uniform);
            CHECK_LE(error, book_error(uniform.level, n) * 1.02);
            for (j = 0; j < n; j++) { /* a level is the mean of its cell; uniform levels are evenly spaced */
                double sum = 0, n_values = 0;
                for (i = 0; i < TKVI_BOOK_BINS; i++) {
                    double x = bin_center(i),
                           lo = j ? 0.5 * ((double)book.level[j - 1] + (double)book.level[j]) : -2,
                           hi = j < n - 1 ? 0.5 * ((double)book.level[j] + (double)book.level[j + 1]) : 2;
                    if (x <= lo || x > hi) continue;
                    sum += x * (double)histogram[i];
                    n_values += (double)histogram[i];
                }
                if (n_values > 0) CHECK_NEAR(book.level[j], sum / n_values, 5e-3);
                CHECK_NEAR(uniform.level[j], -1 + 2.0 * j / (n - 1), 3e-4);
            }
        }
    }
}

/* Decoded values have the mean and the variance of the original values. */
TEST(normed_levels_keep_mean_and_variance) {
    tkv_rng r = tkv_rng_seed(4);
    int kind, bits, uniform, i, j;
    for (kind = 0; kind < 6; kind++) {
        fill_histogram(&r, kind, 20000);
        for (bits = 2; bits <= 4; bits++)
            for (uniform = 0; uniform < 2; uniform++) {
                tkvi_book b;
                double m[2][3] = {{0}};
                tkvi_book_make(histogram, bits, uniform, &b);
                for (i = 0; i < TKVI_BOOK_BINS; i++) {
                    double c = (double)histogram[i];
                    int best = 0;
                    for (j = 1; j < 1 << bits; j++)
                        if (fabs(bin_center(i) - (double)b.level[j]) <
                            fabs(bin_center(i) - (double)b.level[best]))
                            best = j;
                    m[0][0] += c, m[0][1] += c * bin_center(i), m[0][2] += c * bin_center(i) * bin_center(i);
                    m[1][0] += c, m[1][1] += c * (double)b.normed[best];
                    m[1][2] += c * (double)b.normed[best] * (double)b.normed[best];
                }
                for (i = 0; i < 2; i++) {
                    m[i][1] /= m[i][0];
                    m[i][2] = m[i][2] / m[i][0] - m[i][1] * m[i][1];
                }
                CHECK_NEAR(m[0][1], m[1][1], 2e-3);
                CHECK_NEAR(m[1][2] / m[0][2], 1, 0.01);
            }
    }
}

TEST(unusual_histograms) {
    int k, bits, j;
    for (k = 0; k < 7; k++)
        for (bits = 2; bits <= 4; bits++) {
            tkvi_book b;
            memset(histogram, 0, sizeof histogram);
            if (k == 1) histogram[0] = 1;
            if (k == 2) histogram[TKVI_BOOK_BINS - 1] = (int64_t)1 << 62;
            if (k == 3) histogram[0] = histogram[TKVI_BOOK_BINS - 1] = (int64_t)1 << 61;
            if (k == 4) histogram[1000] = histogram[1001] = 1;
            if (k == 5) histogram[3] = (int64_t)1 << 60, histogram[2000] = 1;
            if (k == 6)
                for (j = 0; j < TKVI_BOOK_BINS; j++) histogram[j] = (int64_t)1 << 50;
            tkvi_book_make(histogram, bits, 0, &b);
            for (j = 0; j < 1 << bits; j++) {
                CHECK(b.level[j] >= -1 && b.level[j] <= 1);
                CHECK(b.normed[j] >= -4 && b.normed[j] <= 4);
                if (j) CHECK(b.level[j] >= b.level[j - 1] && b.normed[j] >= b.normed[j - 1]);
            }
            if (k == 1 || k == 2) /* a level is at the only value */
                for (j = 0; j < 1 << bits; j++)
                    if (fabs((double)b.level[j]) > 0.999) break;
            if (k == 1 || k == 2) CHECK(j < 1 << bits);
        }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(f16_all_patterns);
    RUN(f16_from_floats);
    RUN(f16_literal_patterns);
    RUN(bf16);
    RUN(finite_patterns);
    RUN(round_half_to_even);
    RUN(single_precision_operations);
    RUN(small_helpers);
    RUN(bytes_are_little_endian);
    RUN(sizes_that_do_not_fit_are_too_many);
#ifndef TKV_NO_MALLOC
    RUN(default_allocator);
#endif
    RUN(heap_counts_bytes);
    RUN(arena);
    RUN(xxh64_vectors);
    RUN(xxh64_detects_flipped_bits);
    RUN(sha256_vectors);
    RUN(text_is_truncated);
    RUN(floats_read);
    RUN(floats_round_trip);
    RUN(code_books);
    RUN(ties_take_the_even_code);
    RUN(rope_against_double);
    RUN(radians_in_turns);
    RUN(zeros_near_enough_for_fp16);
    RUN(scales_too_small_for_fp16);
    RUN(invalid_rope_is_refused);
    RUN(rope_golden);
    RUN(scores_have_32_units_an_octave);
    RUN(levels_are_near_the_optimum);
    RUN(normed_levels_keep_mean_and_variance);
    RUN(unusual_histograms);
    return tkv_test_end();
}
