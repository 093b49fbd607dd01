/*
 * test_quality.c - the parts of bench/quality: codecs of the rivals on known values, attention of the rivals,
 * plans from command lines, calibration tables from a text.
 *
 * cc -O2 tests/test_quality.c examples/tieredkv.c -o test_quality -lm && ./test_quality [filter | --list]
 */
#include "../tieredkv.h"

#include "../bench/rivals.h"

#include "../bench/calibrate.h"
#include "../bench/weights.h"
#include "../examples/plan.h"
#include "tkv_test.h"

/* >>codecs */
static void fill_known_values(float *x) { /* two blocks of 32 */
    int i;
    for (i = 0; i < 64; i++) {
        const uint32_t u = (uint32_t)i * 2654435761u;
        x[i] = (float)((int)((u >> 18) % 4001) - 2000) / 512.0f * (i < 32 ? 1.0f : 0.001f);
    }
}

/* Codes of those values by the gguf package for Python; a value is scale * code + zero. */
typedef struct known_codes {
    void (*row)(float *x, int n);
    float scale[2], zero[2];
    signed char code[64];
} known_codes;

static const known_codes codes_of_gguf[] = {
    {rival_q8_0,
     {504.0f / 16384, 503.0f / 16777216},
     {0, 0},
     {-127, 8,    119,  -1,   110,  -33,  102, -42,  93,  -50, 61,  -59, 52,  -91, 44,  -100,
      35,   -108, 3,    -117, -6,   -125, -14, 96,   -23, 88,  -55, 80,  -64, 71,  -72, 38,
      -83,  31,   -116, 22,   -125, 13,   127, -20,  118, -29, 110, -37, 76,  -46, 67,  -80,
      59,   -88,  50,   -97,  17,   -106, 8,   -114, -1,  113, -9,  104, -43, 96,  -51, 87}},
    {rival_q5_0,
     {500.0f / 2048, -1997.0f / 8388608},
     {0, 0},
     {-16, 1,  15, 0,  14, -4, 13, -5, 12, -6, 8,  -7, 7,  -11, 6,  -13, 4,   -14, 0,   -15, -1,  -16,
      -2,  12, -3, 11, -7, 10, -8, 9,  -9, 5,  10, -4, 15, -3,  15, -2,  -16, 3,   -15, 4,   -14, 5,
      -10, 6,  -9, 10, -7, 11, -6, 12, -2, 13, -1, 14, 0,  -14, 1,  -13, 5,   -12, 6,   -11}},
    {rival_q4_1,
     {1031.0f / 2048, 33.0f / 65536},
     {-500.0f / 128, -491.0f / 131072},
     {0,  8,  15, 8,  14, 6,  14, 5,  13, 5,  11, 4, 11, 2,  10, 2,  10, 1,  8,  1, 7,  0,
      7,  14, 6,  13, 4,  13, 4,  12, 3,  10, 3,  9, 1,  9,  0,  8,  15, 6,  14, 6, 14, 5,
      12, 5,  11, 3,  11, 2,  10, 2,  8,  1,  8,  1, 7,  14, 7,  14, 5,  13, 4,  13}},
    {rival_q4_0,
     {500.0f / 1024, -1997.0f / 4194304},
     {0, 0},
     {-8, 0, 7,  0, 7,  -2, 6,  -3, 6,  -3, 4,  -4, 3, -6, 3, -6, 2,  -7, 0,  -7, 0,  -8,
      -1, 6, -1, 6, -3, 5,  -4, 4,  -5, 2,  5,  -2, 7, -1, 7, -1, -8, 1,  -7, 2,  -7, 2,
      -5, 3, -4, 5, -4, 6,  -3, 6,  -1, 7,  -1, 7,  0, -7, 1, -7, 3,  -6, 3,  -5}},
};

TEST(ggml_blocks) {
    float x[64];
    size_t k;
    int i;
    for (k = 0; k < sizeof codes_of_gguf / sizeof *codes_of_gguf; k++) {
        const known_codes *expected = &codes_of_gguf[k];
        fill_known_values(x);
        expected->row(x, 64);
        for (i = 0; i < 64; i++)
            CHECK_NEAR(x[i], expected->scale[i / 32] * (float)expected->code[i] + expected->zero[i / 32],
                       1e-7);
    }
    memset(x, 0, sizeof x);
    for (k = 0; k < sizeof codes_of_gguf / sizeof *codes_of_gguf; k++) codes_of_gguf[k].row(x, 64);
    for (i = 0; i < 64; i++) CHECK(x[i] >= 0 && x[i] <= 0);
}

TEST(min_max_codec) {
    float x[6] = {-1, 9, 0.4f, 9, 2, 9}, same[3] = {0.3f, 0.3f, 0.3f};
    rival_min_max(x, 2, 3, 2); /* levels -1, 0, 1, 2 */
    CHECK_NEAR(x[0], -1, 0);
    CHECK_NEAR(x[2], 0, 0);
    CHECK_NEAR(x[4], 2, 0);
    CHECK_NEAR(x[1], 9, 0); /* between the strided values: unchanged */
    rival_min_max(same, 1, 3, 2);
    CHECK_NEAR(same[1], 0.3, 2e-4); /* rounded to fp16 */
    CHECK_NEAR(rival_half(1.0f + 1.0f / 2048), 1, 0);
    CHECK_NEAR(rival_half(-3e-8f), -1.0 / 33554432 * 2, 0);
    CHECK_NEAR(rival_half(1e6f), 65504, 0);
    CHECK_NEAR(rival_half(1.0f + 3.0f / 2048), 1 + 2.0 / 1024, 0); /* ties go to even */
}

TEST(hadamard_keeps_norms) {
    tkv_rng rng = tkv_rng_seed(1);
    float x[64], y[64];
    double squares_before = 0, squares_after = 0;
    int i;
    tkv_rng_fill(&rng, x, 64, 1);
    memcpy(y, x, sizeof y);
    rival_hadamard(y, 64);
    for (i = 0; i < 64; i++) squares_before += (double)(x[i] * x[i]), squares_after += (double)(y[i] * y[i]);
    CHECK_NEAR(squares_after, squares_before, 1e-3);
    rival_hadamard(y, 64);
    for (i = 0; i < 64; i++) CHECK_NEAR(y[i], x[i], 1e-5);
}

TEST(rival_exp_is_accurate) {
    int i;
    for (i = 0; i < 800; i++) CHECK_NEAR(rival_exp(-0.1f * (float)i) / expf(-0.1f * (float)i), 1, 1e-5);
}

/* >>attention */
static llama_model make_model(int n_heads, int n_kv_heads, int dim, int v_dim) {
    llama_model m;
    memset(&m, 0, sizeof m);
    m.n_layers = 1;
    m.n_heads = n_heads, m.n_kv_heads = n_kv_heads;
    m.head_dim = m.rope_dim = dim, m.v_head_dim = v_dim;
    m.rope_theta = 10000.0f;
    return m;
}

/* Compares a rival whose codec changes nothing with the library's exact cache. */
static void check_exact_attention(int n_heads, int n_kv_heads, int dim, int v_dim) {
    const llama_model m = make_model(n_heads, n_kv_heads, dim, v_dim);
    const int total = 700, chunk = RIVAL_CHUNK;
    float *q = (float *)malloc((size_t)(chunk * n_heads * (dim + 2 * v_dim)) * sizeof *q);
    float *k = (float *)malloc((size_t)(chunk * n_kv_heads * (dim + v_dim)) * sizeof *k);
    float *v = k + chunk * n_kv_heads * dim, *a = q + chunk * n_heads * dim, *b = a + chunk * n_heads * v_dim;
    rival *r = rival_create(rival_find("noise-floor"), &m, total, 0);
    tkv_rng rng = tkv_rng_seed(2);
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv = NULL;
    int pos, n, i;
    llama_kv_config(&m, &cfg);
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.host.isa = tkv_test_isa();
    REQUIRE(tkv_create(&cfg, &kv) == TKV_OK && r);
    for (pos = 0; pos < total; pos += n) {
        n = total - pos < chunk ? total - pos : chunk;
        tkv_rng_fill(&rng, q, (size_t)(chunk * n_heads * dim), 2);
        tkv_rng_fill(&rng, k, (size_t)(chunk * n_kv_heads * (dim + v_dim)), 1);
        CHECK_EQ(rival_attention(r, 0, q, k, v, n, a), TKV_OK);
        CHECK_EQ(tkv_append(kv, 0, 0, k, v, n), TKV_OK);
        CHECK_EQ(tkv_attend(kv, 0, 0, q, n, b), TKV_OK);
        for (i = 0; i < n * n_heads * v_dim; i++) CHECK_NEAR(a[i], b[i], 2e-5);
    }
    CHECK_EQ(rival_attention(r, 0, q, k, v, 1, a), TKV_ERR_CAPACITY);
    rival_destroy(r);
    tkv_destroy(kv);
    free(q);
    free(k);
}

TEST(attention_is_exact) {
    check_exact_attention(6, 2, 64, 64);
    check_exact_attention(3, 3, 10, 6); /* odd sizes */
}

/* StreamingLLM by its definition: keys are stored without RoPE and rotated by their place in the cache. */
TEST(streaming_rival) {
    enum { N = 90, BUDGET = 40, SINKS = 4, DIM = 8 };
    const rival_kind *kind = rival_find("streaming");
    const llama_model m = make_model(1, 1, DIM, DIM);
    static float q[N][DIM], k[N][DIM], v[N][DIM], rows[3][N][DIM], out[N][DIM];
    rival *r = rival_create(kind, &m, N, BUDGET);
    tkv_rng rng = tkv_rng_seed(3);
    int i, j, c, n;
    tkv_rng_fill(&rng, &q[0][0], N * DIM, 2);
    tkv_rng_fill(&rng, &k[0][0], N * DIM, 1);
    tkv_rng_fill(&rng, &v[0][0], N * DIM, 1);
    REQUIRE(r != NULL);
    for (i = 0; i < N; i += n) {
        float rotation[DIM];
        n = rival_chunk(kind, i, N - i);
        for (j = i; j < i + n; j++) {
            for (c = 0; c < DIM / 2; c++) {
                const double f = pow(10000.0, -2.0 * c / (double)DIM);
                rotation[2 * c] = (float)cos(f * j), rotation[2 * c + 1] = (float)sin(f * j);
            }
            memcpy(rows[0][j], q[j], sizeof q[j]);
            memcpy(rows[1][j], k[j], sizeof k[j]);
            llama_rope(&m, rows[0][j], 1, 1, rotation);
            llama_rope(&m, rows[1][j], 1, 1, rotation);
        }
        CHECK_EQ(rival_attention(r, 0, rows[0][i], rows[1][i], v[i], n, out[i]), TKV_OK);
    }
    CHECK_NEAR(rival_bytes(kind, &m, N, BUDGET), BUDGET * 2 * DIM * 2, 0);
    for (i = 0; i < N; i++) {
        double p[N], sum = 0, o[DIM];
        int n_kept = 0;
        memset(o, 0, sizeof o);
        for (j = 0; j <= i; j++) {
            const int n_evicted = i + 1 > BUDGET ? i + 1 - BUDGET : 0, distance = i - n_evicted - n_kept;
            p[j] = 0;
            if (j >= SINKS && j < SINKS + n_evicted) continue;
            for (c = 0; c < DIM / 2; c++) { /* a dot product after RoPE depends on the distance only */
                const double f = pow(10000.0, -2.0 * c / (double)DIM) * distance;
                const double a = (double)q[i][2 * c], b = (double)q[i][2 * c + 1];
                const double x = (double)k[j][2 * c], y = (double)k[j][2 * c + 1];
                p[j] += (a * x + b * y) * cos(f) + (a * y - b * x) * sin(f);
            }
            p[j] = exp(p[j] / sqrt((double)DIM));
            sum += p[j];
            n_kept++;
            for (c = 0; c < DIM; c++) o[c] += p[j] * (double)v[j][c];
        }
        for (c = 0; c < DIM; c++) CHECK_NEAR(out[i][c], o[c] / sum, 1e-4);
    }
    rival_destroy(r);
}

/* >>which tokens a rival compresses, and the bytes that it reports */
static int n_distinct(const float *p, size_t stride, int n) { /* number of different values */
    int count = 0, i, j;
    for (i = 0; i < n; i++) {
        for (j = 0; j < i; j++)
            if (memcmp(p + (size_t)i * stride, p + (size_t)j * stride, sizeof *p) == 0) break;
        count += j == i;
    }
    return count;
}

/* Appends Gaussian tokens to a rival, one at a time. Returns the rival. */
static rival *make_fed_rival(const char *name, const llama_model *m, int n) {
    rival *r = rival_create(rival_find(name), m, n, 0);
    tkv_rng rng = tkv_rng_seed(4);
    float x[64], q[64], out[64];
    int i, c;
    for (i = 0; i < n && r; i++) {
        tkv_rng_fill(&rng, x, 64, 1);
        for (c = 0; c < 64; c += 5) x[c] *= 8; /* 13 channels are large */
        tkv_rng_fill(&rng, q, 64, 1);
        CHECK_EQ(rival_attention(r, 0, q, x, x, 1, out), TKV_OK);
    }
    return r;
}

TEST(hf_pages) {
    const llama_model m = make_model(1, 1, 64, 64);
    rival *r = make_fed_rival("hf-int2", &m, 300);
    rival_side k;
    REQUIRE(r != NULL);
    k = rival_side_of(r, TKV_K, 0, 0);
    /* Channels of the last token of two full pages of 128. */
    CHECK_LE(n_distinct(k.p + 255, k.channel, 64), 4);
    CHECK_LE(60, n_distinct(k.p + 256, k.channel, 64));
    CHECK_NEAR(rival_bits(r->kind, &m), 2.5, 1e-9);
    CHECK_NEAR(rival_bytes(r->kind, &m, 300, 0), 256 * 2 * (16 + 4) + 44 * 256, 0);
    CHECK_NEAR(rival_bits(rival_find("hf-int4"), &m), 4.5, 1e-9);
    rival_destroy(r);
}

/* Error of TurboQuant on normal values: that of the quantizers of Max, table I, and of the norm. */
TEST(turboquant_rival) {
    static const struct {
        const char *name;
        double error, bits;
    } known[3] = {{"turbo4", 0.009497, 4.25}, {"turbo3", 0.03454, 3.25}, {"turbo2", 0.1175, 2.25}};
    const llama_model m = make_model(1, 1, 64, 64);
    tkv_rng rng = tkv_rng_seed(5);
    int i, c, t;
    for (i = 0; i < 3; i++) {
        const rival_kind *kind = rival_find(known[i].name);
        double error = 0, size = 0;
        for (t = 0; t < 500; t++) {
            float x[256], y[256];
            tkv_rng_fill(&rng, x, 256, t % 2 ? 0.01 : 30.0);
            memcpy(y, x, sizeof y);
            kind->row(y, 256);
            for (c = 0; c < 256; c++) {
                error += pow((double)x[c] - (double)y[c], 2) / (t % 2 ? 1e-4 : 900.0);
                size += pow((double)x[c], 2) / (t % 2 ? 1e-4 : 900.0);
            }
        }
        CHECK_NEAR(error / size / known[i].error, 1, 0.03);
        CHECK_NEAR(rival_bits(kind, &m), known[i].bits, 1e-6);
    }
}

/* Mean squared error of KVarN relative to the values' squares, on tiles that its authors' reference has coded too (api_test.py of
 * their repository): 64 x 128 and 128 x 64, whose rows and columns have scales of their own. */
TEST(kvarn_matches_the_authors) {
    static const double known[4] = {0.21622920, 0.18716718, 0.0088612754, 0.0074551734};
    static rival_tile t;
    static float x[RIVAL_PAGE * 64];
    const llama_model m = make_model(1, 1, 64, 64);
    uint32_t z = 12345;
    int number, i, k;
    for (number = 0; number < 4; number++) {
        float by_row[256], by_column[256];
        double error = 0, size = 0;
        t.rows = number % 2 ? RIVAL_PAGE : 64;
        t.columns = number % 2 ? 64 : RIVAL_PAGE;
        for (i = 0; i < 256; i++) {
            z = z * 1664525u + 1013904223u;
            by_row[i] = expf(((float)(z >> 8) / 16777216.0f - 0.5f) * 3);
            z = z * 1664525u + 1013904223u;
            by_column[i] = expf(((float)(z >> 8) / 16777216.0f - 0.5f) * 2);
        }
        for (i = 0; i < RIVAL_PAGE * 64; i++) {
            float sum = -6;
            for (k = 0; k < 12; k++) {
                z = z * 1664525u + 1013904223u;
                sum += (float)(z >> 8) / 16777216.0f;
            }
            x[i] = t.x[i] = rival_half(sum * by_row[i / t.columns] * by_column[i % t.columns]);
        }
        rival_code_tile(&t, number < 2 ? 2 : 4);
        for (i = 0; i < RIVAL_PAGE * 64; i++) {
            error += pow((double)x[i] - (double)t.x[i], 2);
            size += pow((double)x[i], 2);
        }
        CHECK_NEAR(error / size / known[number], 1, 0.002);
    }
    CHECK_NEAR(rival_bits(rival_find("kvarn-k4v2"), &m), (4.5 + 2.625) / 2, 1e-6);
}

/* The first tile of 128 tokens behind the sinks is coded when it is full. */
TEST(kvarn_tiles) {
    const llama_model m = make_model(1, 1, 64, 64);
    rival *open = make_fed_rival("kvarn-k2v2", &m, 4 + 127),
          *full = make_fed_rival("kvarn-k2v2", &m, 4 + 128);
    rival_side a, b;
    int t, c, n_different = 0;
    REQUIRE(open && full);
    for (t = 0; t < 4 + 127; t++)
        for (c = 0; c < 64; c++) {
            a = rival_side_of(open, TKV_K, 0, 0), b = rival_side_of(full, TKV_K, 0, 0);
            if (t < 4)
                CHECK_NEAR(a.p[(size_t)t * a.token + (size_t)c * a.channel],
                           b.p[(size_t)t * b.token + (size_t)c * b.channel], 0);
            n_different += fabsf(a.p[(size_t)t * a.token + (size_t)c * a.channel] -
                                 b.p[(size_t)t * b.token + (size_t)c * b.channel]) > 0;
        }
    CHECK_LE(127 * 64 * 9 / 10, n_different);
    rival_destroy(open);
    rival_destroy(full);
}

/* Squared error of token t of K against the appended values, relative to their squares. */
static double token_error(const rival *r, const rival *exact, int t) {
    const rival_side a = rival_side_of(r, TKV_K, 0, 0), b = rival_side_of(exact, TKV_K, 0, 0);
    double error = 0, size = 0;
    int c;
    for (c = 0; c < a.dim; c++) {
        const double x = (double)a.p[(size_t)t * a.token + (size_t)c * a.channel];
        const double y = (double)b.p[(size_t)t * b.token + (size_t)c * b.channel];
        error += (x - y) * (x - y);
        size += y * y;
    }
    return error / size;
}

/* Mean of token_error over tokens from to `to` - 1. */
static double mean_error(const rival *r, const rival *exact, int from, int to) {
    double sum = 0;
    int t;
    for (t = from; t < to; t++) sum += token_error(r, exact, t);
    return sum / (to - from);
}

/* A rival in tiers: sinks and tail are exact, warm and archived tokens have the errors of their kinds. */
static void check_tiers(const char *name, const char *warm, int n, int archived, int coded, double bytes) {
    const llama_model m = make_model(1, 1, 64, 64);
    const char *archive = rival_find(name)->archive;
    rival *r = make_fed_rival(name, &m, n), *exact = make_fed_rival("noise-floor", &m, n);
    rival *a = make_fed_rival(warm, &m, n), *b = make_fed_rival(archive, &m, n);
    int t;
    REQUIRE(r && exact && a && b);
    for (t = 0; t < n; t++) CHECK_EQ(token_error(r, exact, t) > 0, t >= 4 && t < coded);
    CHECK_NEAR(mean_error(r, exact, archived, coded) / mean_error(a, exact, 4, 4 + 512), 1, 0.1);
    CHECK_NEAR(mean_error(r, exact, 4, archived) / mean_error(b, exact, 4, 4 + 512), 1, 0.1);
    CHECK_NEAR(rival_bytes(r->kind, &m, n, 0), bytes, 1e-6);
    CHECK_NEAR(rival_bits(r->kind, &m), rival_bits(b->kind, &m), 1e-9);
    rival_destroy(r);
    rival_destroy(exact);
    rival_destroy(a);
    rival_destroy(b);
}

TEST(rivals_in_tiers) {
    /* 64 to 127 newest tokens are exact, 448 to 511 are warm. */
    check_tiers("turbo4/turbo2", "turbo4", 4 + 192 + 448 + 127, 4 + 192, 4 + 192 + 448,
                131 * 256 + 448 * 68 + 192 * 36);
    check_tiers("turbo4/turbo3", "turbo4", 4 + 192 + 448 + 128, 4 + 256, 4 + 192 + 512,
                68 * 256 + 448 * 68 + 256 * 52);
    /* Tiles of 128 tokens: 64 to 191, and 448 to 575. */
    check_tiers("kvarn-k4v4/k2v2", "kvarn-k4v4", 4 + 256 + 512 + 64, 4 + 256, 4 + 256 + 512,
                68 * 256 + 512 * 73 + 256 * 41);
}

TEST(oscar_codec) {
    float x[8] = {1, -1, 3, 0, -2, 2, 9, -0.5f};
    static const double clipped[8] = {1.3333, -0.3333, 3, -0.3333,
                                      -2,     1.3333,  3, -0.3333}; /* at 3, in steps of 5/3 */
    const llama_model m = make_model(1, 1, 64, 64);
    int i;
    oscar_code(x, 8, 0.75);
    for (i = 0; i < 8; i++) CHECK_NEAR(x[i], clipped[i], 2e-3);
    CHECK_NEAR(rival_token_bytes(rival_find("oscar"), &m), 40, 0);
}

/* The rotation is orthogonal, and every channel of the rotated vectors has the same variance. */
TEST(oscar_rotations) {
    enum { N = 32 };
    static double c[N * N], rotated[N * N];
    static float x[200][N], rotation[N * N];
    tkv_rng rng = tkv_rng_seed(6);
    double trace = 0;
    int i, j, k, l;
    tkv_rng_fill(&rng, &x[0][0], 200 * N, 1);
    for (i = 0; i < 200; i++)
        for (j = 0; j < N; j++) x[i][j] = x[i][j] * (float)(1 + j % 7) + x[i][0];
    for (i = 0; i < 200; i++)
        for (j = 0; j < N * N; j++) c[j] += (double)(x[i][j / N] * x[i][j % N]);
    for (i = 0; i < N; i++) trace += c[i * (N + 1)];
    memcpy(rotated, c, sizeof c);
    oscar_rotation(rotated, N, rotation);
    for (i = 0; i < N; i++)
        for (j = 0; j < N; j++) {
            double product = 0, variance = 0;
            for (k = 0; k < N; k++) product += (double)(rotation[k * N + i] * rotation[k * N + j]);
            CHECK_NEAR(product, i == j, 1e-5);
            for (k = 0; i == j && k < N; k++)
                for (l = 0; l < N; l++)
                    variance += (double)(rotation[k * N + i] * rotation[l * N + i]) * c[k * N + l];
            if (i == j) CHECK_NEAR(variance / trace * (int)N, 1, 1e-4);
        }
}

/* Behind 64 sinks, tokens are coded when 256 newer ones are exact. */
TEST(oscar_rival) {
    enum { N = 64 + 192 + 256 };
    static float identity[2 * 64 * 64];
    const llama_model m = make_model(1, 1, 64, 64);
    rival *exact = make_fed_rival("noise-floor", &m, N), *r = rival_create(rival_find("oscar"), &m, N, 0);
    tkv_rng rng = tkv_rng_seed(4);
    float x[64], q[64], out[64];
    int i, c;
    REQUIRE(exact && r);
    for (i = 0; i < 64; i++) identity[i * 65] = identity[64 * 64 + i * 65] = 1;
    r->rotations = identity;
    for (i = 0; i < N; i++) { /* the tokens of make_fed_rival */
        tkv_rng_fill(&rng, x, 64, 1);
        for (c = 0; c < 64; c += 5) x[c] *= 8;
        tkv_rng_fill(&rng, q, 64, 1);
        CHECK_EQ(rival_attention(r, 0, q, x, x, 1, out), TKV_OK);
    }
    for (i = 0; i < N; i++) CHECK_EQ(token_error(r, exact, i) > 0, i >= 64 && i < 64 + 192);
    CHECK_NEAR(rival_bits(r->kind, &m), 2.5, 1e-9);
    CHECK_NEAR(rival_bytes(r->kind, &m, N, 0), 320 * 256 + 192 * 40, 0);
    rival_destroy(r);
    rival_destroy(exact);
}

TEST(kitty_rival) {
    const llama_model m = make_model(1, 1, 64, 64);
    rival *r = make_fed_rival("kitty", &m, 32 + 300);
    rival_side k, v;
    int c, page, n_4_bit = 0;
    REQUIRE(r != NULL);
    k = rival_side_of(r, TKV_K, 0, 0), v = rival_side_of(r, TKV_V, 0, 0);
    for (c = 0; c < 64; c++)
        for (page = 0; page < 2; page++) {
            const int n_levels = n_distinct(k.p + (size_t)c * k.channel + 32 + page * 128, k.token, 128);
            CHECK_LE(n_levels, 16);
            n_4_bit += n_levels > 4;
            if (c % 5 == 0) CHECK_LE(5, n_levels); /* a large channel */
        }
    CHECK_EQ(n_4_bit, 2 * 16);
    /* The open page, of 44 tokens, and the sinks are exact. */
    CHECK_LE(100, n_distinct(k.p + 32 + 256, k.token, 44) + 60);
    CHECK_LE(30, n_distinct(k.p, k.token, 32));
    /* The first 332 - 128 tokens of V are compressed. */
    CHECK_LE(n_distinct(v.p + 203 * v.token, v.channel, 64), 4);
    CHECK_LE(60, n_distinct(v.p + 204 * v.token, v.channel, 64));
    CHECK_NEAR(rival_bits(r->kind, &m), (2.5 + 33.0 / 128 + 2.5) / 2, 1e-6);
    rival_destroy(r);
}

TEST(age_rival) {
    const llama_model m = make_model(1, 1, 64, 64);
    rival *r = make_fed_rival("age-8/4/2", &m, 1280);
    rival_side k;
    REQUIRE(r != NULL);
    k = rival_side_of(r, TKV_K, 0, 0);
    /* One channel: tokens of an age of 1024 or more, then of 128 to 1023, then younger ones. */
    CHECK_LE(n_distinct(k.p, k.token, 32), 4);
    CHECK_LE(n_distinct(k.p + 1280 - 1024, k.token, 32), 16);
    CHECK_LE(5, n_distinct(k.p + 1280 - 1024, k.token, 32));
    CHECK_LE(17, n_distinct(k.p + 1280 - 128, k.token, 32));
    rival_destroy(r);
}

/* >>plans */
TEST(plan_options) {
    tkv_config a = tkv_default_config(), b = tkv_default_config();
    static const char *const number_words[] = {"group",       "unit",      "center",
                                               "squat_block", "subspaces", "precise"};
    size_t i;
    CHECK(!plan_three(&a, "128:f32,448:kivi4,kivi2/kivi4"));
    CHECK(!plan_word(&b, "hot", "128:f32"));
    CHECK(!plan_word(&b, "warm", "448:kivi4"));
    CHECK(!plan_word(&b, "archive", "kivi2/kivi4"));
    CHECK_MEM(&a, &b, sizeof a);
    CHECK_EQ(a.tiers.archive.k, TKV_KIVI2);
    CHECK_EQ(a.tiers.archive.v, TKV_KIVI4);
    CHECK(!plan_three(&a, ",none"));
    CHECK_EQ(a.tiers.warm_tokens, TKV_OFF);
    CHECK_EQ(a.tiers.hot_tokens, 128);
    CHECK(!plan_word(&a, "sinks", "0"));
    CHECK_EQ(a.tiers.sink_tokens, TKV_OFF);
    CHECK(!plan_word(&a, "hot", "all"));
    CHECK_EQ(a.tiers.hot_tokens, TKV_UNLIMITED);
    for (i = 0; i < sizeof number_words / sizeof *number_words; i++) {
        CHECK(plan_knows(number_words[i]));
        CHECK(!plan_word(&a, number_words[i], "16"));
        CHECK(plan_word(&a, number_words[i], "many") != NULL);
    }
    CHECK_EQ(a.format.group_size + a.format.allocation_unit + a.format.center_k + a.format.squat_block +
                 a.format.subspaces + a.host.precise,
             6 * 16);
    CHECK(!plan_word(&a, "fit", "clip+unbiased"));
    CHECK_EQ(a.format.fit, TKV_FIT_CLIP | TKV_FIT_UNBIASED);
    CHECK(!plan_word(&a, "fit", "norm"));
    CHECK_EQ(a.format.fit, TKV_FIT_NORM);
    CHECK(!plan_word(&a, "rotate", "k+v"));
    CHECK_EQ(a.format.rotate, TKV_ROTATE_K | TKV_ROTATE_V);
}

TEST(plan_layers) {
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv;
    tkv_layer_info info;
    int layer;
    cfg.model.n_layers = 6, cfg.model.n_heads = 1, cfg.model.head_dim = 32;
    CHECK(plan_knows("layers"));
    CHECK(!plan_word(&cfg, "archive", "kivi2"));
    CHECK(!plan_word(&cfg, "layers", "1-4:kivi3"));
    CHECK(!plan_word(&cfg, "layers", "4:q8/kivi4"));
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    for (layer = 0; layer < 6; layer++) {
        CHECK_EQ(tkv_get_layer(kv, 0, layer, &info), TKV_OK);
        CHECK_EQ(info.format[TKV_TIER_ARCHIVE].k, layer == 4                 ? TKV_Q8
                                                  : layer >= 1 && layer <= 3 ? TKV_KIVI3
                                                                             : TKV_KIVI2);
        CHECK_EQ(info.format[TKV_TIER_ARCHIVE].v, layer == 4                 ? TKV_KIVI4
                                                  : layer >= 1 && layer <= 3 ? TKV_KIVI3
                                                                             : TKV_KIVI2);
    }
    tkv_destroy(kv);
    CHECK(!plan_too_far(&cfg));
    cfg.model.n_layers = 4;
    CHECK(plan_too_far(&cfg) != NULL);
    plan_free(&cfg);
    CHECK(!plan_too_far(&cfg));
    CHECK(cfg.layers == NULL);
}

TEST(plan_presets) {
    int i;
    for (i = 0; tkv_get_name(TKV_NAME_PRESET, i); i++) {
        tkv_config a = tkv_default_config(), b = tkv_default_config();
        CHECK(!plan_word(&a, "preset", tkv_get_name(TKV_NAME_PRESET, i)));
        CHECK_EQ(tkv_apply_preset(&b, tkv_get_name(TKV_NAME_PRESET, i)), TKV_OK);
        CHECK_MEM(&a, &b, sizeof a);
    }
    CHECK(i > 0);
}

TEST(wrong_plans_are_refused) {
    static const char *const wrong[][2] = {
        {"preset", "best"},   {"sinks", "x"},        {"hot", "64:f17"},  {"warm", "kivi2/kivi2/kivi2"},
        {"archive", "64:q8"}, {"archive", ""},       {"fit", "clip+"},   {"fit", "clip,norm"},
        {"rotate", "both"},   {"group", "64k"},      {"group", ""},      {"subspaces", "-1"},
        {"bits", "2"},        {"warm", "1e3:q8"},    {"layers", "q8"},   {"layers", "3-1:q8"},
        {"layers", "1-:q8"},  {"layers", "4096:q8"}, {"layers", "1:q9"}, {"layers", "0-4096:q8"}};
    tkv_config cfg = tkv_default_config();
    size_t i;
    for (i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_MSG(plan_word(&cfg, wrong[i][0], wrong[i][1]) != NULL, "%s=%s", wrong[i][0], wrong[i][1]);
    CHECK(!plan_knows("bits"));
    CHECK(plan_three(&cfg, "64,448,q8,q8") != NULL);
    CHECK(plan_three(&cfg, "64,448,q9") != NULL);
}

/* >>tables from a text */
enum { EXACT_TOKENS = 60 }; /* so few that an online cache holds them all exactly */

static int load_demo_model(llama_model *m, int *tokens, int n) { /* the choice of tokens does not matter */
    char err[256];
    int i;
    if (!llama_load("examples/data/demo.gguf", NULL, m, err, sizeof err)) return 0;
    for (i = 0; i < n; i++) tokens[i] = 300 + i * 37 % 600;
    return 1;
}

/* Runs the model over n tokens in the chunks of a decoder. tables: NULL, or loaded first. */
static tkv_cache *run_model(const llama_model *m, const tkv_config *plan, const unsigned char *tables,
                            size_t bytes, const int *tokens, int n) {
    tkv_config cfg = *plan;
    tkv_cache *kv = NULL;
    int at, step;
    llama_kv_config(m, &cfg);
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    if (tables) CHECK_EQ(tkv_load_calibration(kv, tables, bytes), TKV_OK);
    for (at = 0; kv && at < n; at += step) {
        step = measure_chunk(&cfg, at, n - at < TKV_BLOCK_TOKENS ? n - at : TKV_BLOCK_TOKENS);
        CHECK_EQ(llama_forward(m, kv, 0, tokens + at, step, NULL, 0), TKV_OK);
    }
    return kv;
}

static int n_calibrated; /* sum of the arguments of count_calibrated */
static void count_calibrated(int n) { n_calibrated += n; }

TEST(tables_equal_those_of_the_library) { /* an online cache that demoted nothing learns the same tables */
    const tkv_config plan = tkv_default_config();
    unsigned char *tables, online[1 << 15];
    int tokens[EXACT_TOKENS];
    size_t bytes = 0, n = 0;
    tkv_status status;
    tkv_cache *kv;
    llama_model m;
    if (!load_demo_model(&m, tokens, EXACT_TOKENS)) SKIP("examples/data/demo.gguf is not here");
    n_calibrated = 0;
    tables = calibrate(&m, tokens, EXACT_TOKENS, 4096, count_calibrated, &bytes, &status);
    CHECK_EQ(status, TKV_OK);
    CHECK_EQ(n_calibrated, EXACT_TOKENS);
    kv = run_model(&m, &plan, NULL, 0, tokens, EXACT_TOKENS);
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_save_calibration(kv, online, sizeof online, &n), TKV_OK);
    CHECK_EQ(n, bytes);
    if (tables && n == bytes) CHECK_MEM(online, tables, n);
    tkv_destroy(kv);
    llama_free(&m);
    free(tables);
}

TEST(loaded_tables_apply_at_once) {
    enum { N = 250 };
    tkv_config plan = tkv_default_config();
    int tokens[N], loaded;
    size_t bytes = 0;
    unsigned char *tables;
    tkv_status status;
    llama_model m;
    if (!load_demo_model(&m, tokens, N)) SKIP("examples/data/demo.gguf is not here");
    CHECK(!plan_three(&plan, "16,64,a20/r15"));
    tables = calibrate(&m, tokens, 100, 32, NULL, &bytes, &status); /* four sequences */
    CHECK_EQ(status, TKV_OK);
    for (loaded = 0; loaded < 2 && tables; loaded++) {
        tkv_cache *kv = run_model(&m, &plan, loaded ? tables : NULL, bytes, tokens, N);
        tkv_layer_info tiers;
        CHECK_EQ(n_calibrated_layers(kv), loaded ? m.n_layers : 0);
        CHECK_EQ(tkv_get_layer(kv, 0, 0, &tiers), TKV_OK);
        /* Without tables all tokens wait in an exact tier. */
        CHECK_EQ(tiers.tokens[TKV_TIER_ARCHIVE] > 0, loaded);
        tkv_destroy(kv);
    }
    llama_free(&m);
    free(tables);
}

/* Logits of a model behind n tokens, with the cache of a rival. */
static void demo_logits(const llama_model *m, const char *name, const float *rotations, const int *tokens,
                        int n, float *logits) {
    rival *r = rival_create(rival_find(name), m, n, 0);
    int pos, step;
    REQUIRE(r != NULL);
    r->rotations = rotations;
    for (pos = 0; pos < n; pos += step) {
        step = rival_chunk(r->kind, pos, n - pos);
        CHECK_EQ(llama_forward_with(m, tokens + pos, step, pos, rival_attention, r, logits, 1), TKV_OK);
    }
    rival_destroy(r);
}

/* OSCAR's rotations of a model are orthogonal, and each KV head has its own. With them 2 bits lose less. */
TEST(rotations_of_a_model) {
    enum { N = 700 };
    int tokens[N], i, j, c, which;
    float *rotations, *logits;
    double kl[2];
    llama_model m;
    if (!load_demo_model(&m, tokens, N)) SKIP("examples/data/demo.gguf is not here");
    rotations = rival_learn(&m, tokens, 300);
    logits = (float *)malloc((size_t)(2 * m.vocab) * sizeof *logits);
    REQUIRE(rotations && logits);
    for (which = 0; which < 2; which++)
        for (i = 0; i < m.head_dim; i++)
            for (j = 0; j <= i; j++) {
                const float *x = rotations + which * m.head_dim * m.head_dim;
                double product = 0;
                for (c = 0; c < m.head_dim; c++)
                    product += (double)(x[i * m.head_dim + c] * x[j * m.head_dim + c]);
                CHECK_NEAR(product, i == j, 1e-4);
            }
    CHECK(memcmp(rotations, rotations + rival_rotation_size(&m), 64) != 0);
    demo_logits(&m, "noise-floor", NULL, tokens, N, logits);
    for (which = 0; which < 2; which++) {
        demo_logits(&m, which ? "oscar" : "hf-int2", which ? rotations : NULL, tokens, N, logits + m.vocab);
        kl[which] = measure_divergence(logits, logits + m.vocab, m.vocab);
    }
    CHECK_LE(1e-9, kl[1]);
    CHECK_LE(kl[1], kl[0]);
    free(logits);
    free(rotations);
    llama_free(&m);
}

TEST(plans_that_need_tables) {
    static const char *const plans[] = {"64,448,a30/r30", "64,none,a30/kivi2", "64,none,kivi2/r10",
                                        "64,none",        "64,448,kivi2",      "64,none,kivi2",
                                        "64,448:q8,q8",   "64,none,fp4"};
    size_t i;
    for (i = 0; i < sizeof plans / sizeof *plans; i++) {
        tkv_config cfg = tkv_default_config();
        CHECK(!plan_three(&cfg, plans[i]));
        CHECK_EQ(calibrate_changes(&cfg), i < 5); /* the fifth one has a warm tier by default */
    }
}

/* >>weights in another type */
TEST(fp16_bits) {
    static const struct {
        float x;
        unsigned bits;
    } known[] = {{0, 0},
                 {1, 0x3c00},
                 {-2, 0xc000},
                 {65504, 0x7bff},
                 {1e6f, 0x7bff},
                 {0.1f, 0x2e66},
                 {1.0f / 16384, 0x0400},
                 {1.0f / 16777216, 0x0001},
                 {1e-9f, 0x0000},
                 {1023.0f / 16777216, 0x03ff},
                 {-0.33325195f, 0xb555}};
    unsigned h;
    size_t i;
    for (i = 0; i < sizeof known / sizeof *known; i++) CHECK_EQ(weights_half(known[i].x), known[i].bits);
    for (h = 0; h < 0x7c00; h++) { /* all finite magnitudes */
        unsigned char p[2];
        weights_put(p, h, 2);
        CHECK_EQ(weights_half(llama_half(p)), h);
        CHECK_EQ(weights_half(-llama_half(p)), h | 0x8000u);
    }
}

TEST(weights_in_other_types) {
    enum { N = 40 };
    static const int types[] = {LLAMA_F32, LLAMA_F16, LLAMA_Q8_0};
    static const double error_limit[] = {0, 0.0005,
                                         0.005}; /* of a value, relative to its row's largest one */
    int tokens[N], i, j, row;
    float *before, *after;
    llama_model m;
    if (!load_demo_model(&m, tokens, N)) SKIP("examples/data/demo.gguf is not here");
    before = (float *)malloc((size_t)(2 * m.vocab) * sizeof *before);
    REQUIRE(before != NULL);
    after = before + m.vocab;
    demo_logits(&m, "noise-floor", NULL, tokens, N, before);
    for (i = 0; i < 3; i++) {
        llama_model held = m;
        void *memory;
        held.layers = (llama_layer *)malloc((size_t)m.n_layers * sizeof *held.layers);
        REQUIRE(held.layers != NULL);
        memcpy(held.layers, m.layers, (size_t)m.n_layers * sizeof *held.layers);
        CHECK(!weights_hold(&held, types[i], &memory));
        CHECK_EQ(held.layers[1].w[LLAMA_DOWN].type, types[i]);
        CHECK(held.layers[1].w[LLAMA_NORM1].data == m.layers[1].w[LLAMA_NORM1].data);
        CHECK_EQ(held.head.data == held.embedding.data, m.head.data == m.embedding.data);
        for (row = 0; row < held.layers[1].w[LLAMA_DOWN].rows; row++) {
            float a[2048], b[2048], largest = 0;
            llama_row(&m.layers[1].w[LLAMA_DOWN], row, a);
            llama_row(&held.layers[1].w[LLAMA_DOWN], row, b);
            for (j = 0; j < m.ffn_dim; j++) largest = fmaxf(largest, fabsf(a[j]));
            for (j = 0; j < m.ffn_dim; j++) CHECK_NEAR(b[j], a[j], error_limit[i] * (double)largest);
        }
        demo_logits(&held, "noise-floor", NULL, tokens, N, after);
        if (i == 0) CHECK_MEM(after, before, (size_t)m.vocab * sizeof *after);
        CHECK_LE(measure_divergence(before, after, m.vocab), 0.01);
        /* Rounded vectors change the result, and little. */
        held.round_inputs = weights_rounding(types[i]);
        CHECK_EQ(held.round_inputs == NULL, i == 0);
        demo_logits(&held, "noise-floor", NULL, tokens, N, after);
        CHECK_EQ(measure_divergence(before, after, m.vocab) > 1e-9, i > 0);
        CHECK_LE(measure_divergence(before, after, m.vocab), 0.05);
        free(held.layers);
        free(memory);
    }
    free(before);
    llama_free(&m);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(ggml_blocks);
    RUN(min_max_codec);
    RUN(hadamard_keeps_norms);
    RUN(rival_exp_is_accurate);
    RUN(attention_is_exact);
    RUN(streaming_rival);
    RUN(hf_pages);
    RUN(turboquant_rival);
    RUN(kvarn_matches_the_authors);
    RUN(kvarn_tiles);
    RUN(rivals_in_tiers);
    RUN(oscar_codec);
    RUN(oscar_rotations);
    RUN(oscar_rival);
    RUN(kitty_rival);
    RUN(age_rival);
    RUN(plan_options);
    RUN(plan_layers);
    RUN(plan_presets);
    RUN(wrong_plans_are_refused);
    RUN(tables_equal_those_of_the_library);
    RUN(loaded_tables_apply_at_once);
    RUN(rotations_of_a_model);
    RUN(plans_that_need_tables);
    RUN(fp16_bits);
    RUN(weights_in_other_types);
    return tkv_test_end();
}
