/*
 * Attention of tieredkv_cuda.cu on a processor (cuda_on_cpu.h), against double precision on the decoded values.
 *
 *     g++ -std=c++17 -O1 tests/test_cuda_attend.cpp -o test_cuda_attend -lm
 *
 * The cache is filled by tieredkv.h and imported; the same queries go to the kernels and to tkv_attend_reference.
 */
#include "cuda_on_cpu.h"
#include "../tieredkv_cuda.cu"
#include "tkv_test.h"

/* >>unpacking: every width and plane, as K and as V, against tile.h */
template <int W, int P> static void plane(const tkvcu_tile<W> *lanes, float *value) { /* [16 rows][16 k] */
    for (int lane = 0; lane < 32; lane++) {
        uint32_t a[4];
        const int g = lane / 4, t = lane % 4;
        tkvcu_fragment<W, P>(lanes[lane], a);
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < 2; h++)
                value[(g + i % 2 * 8) * 16 + 2 * t + h + i / 2 * 8] = cpu_half(a[i] >> 16 * h & 0xffffu);
    }
}

template <int W> static void one_width(tkv_rng *rng) {
    uint8_t code[8][TKVI_TILE_CODES], mem[8 * 256 + 8 * 64];
    tkvi_runs runs;
    tkvi_tile_at at;
    int i, j, p, row, k, slab;
    memset(&runs, 0, sizeof runs);
    memset(mem, 0, sizeof mem);
    runs.n[W] = 8;
    at = tkvi_tiles(&runs);
    for (i = 0; i < 8; i++) {
        for (j = 0; j < TKVI_TILE_CODES; j++) code[i][j] = (uint8_t)tkv_rng_below(rng, 1 << W);
        tkvi_pack_tile(mem, &at, W, code[i]);
        tkvi_next_tile(&at, W);
    }
    at = tkvi_tiles(&runs);
    for (slab = 0; slab < 2; slab++) {
        tkvcu_tile<W> lanes[32];
        float value[4][256];
        for (i = 0; i < 32; i++)
            tkvcu_fetch<W>(lanes[i], mem + (4 * slab + i % 4) * tkvi_wide_bytes[W],
                           mem + at.halves + (2 * slab + i % 4 / 2) * 64, i % 2 * 4, i / 4);
        plane<W, 0>(lanes, value[0]);
        plane<W, 1>(lanes, value[1]);
        plane<W, 2>(lanes, value[2]);
        plane<W, 3>(lanes, value[3]);
        for (p = 0; p < 4; p++)
            for (row = 0; row < 16; row++)
                for (k = 0; k < 16; k++) {
                    const int word = row < 8 ? 2 * row : 2 * (row - 8) + 1;
                    const int tile = k % 8 / 2, byte = k % 2 * 2 + k / 8;
                    const int c = code[4 * slab + tile][64 * p + 4 * word + byte];
                    CHECK_EQ(value[p][16 * row + k], 1024.0f + (float)(c << tkvcu_bit<W>(p)));
                }
    }
}

TEST(unpacking) {
    tkv_rng rng = tkv_rng_seed(3);
    one_width<1>(&rng);
    one_width<2>(&rng);
    one_width<3>(&rng);
    one_width<4>(&rng);
    one_width<5>(&rng);
    one_width<6>(&rng);
    one_width<8>(&rng);
}

/* >>attention */
typedef struct rig {
    tkv_config cfg;
    tkv_cache *kv;
    tkvcu *cu;
    void *cache, *work;
    tkv_rng rng;
} rig;

static void rig_close(rig *r) {
    tkvcu_destroy(r->cu);
    tkv_destroy(r->kv);
    free(r->cache);
    free(r->work);
}

static int rig_open(rig *r, const tkv_config *cfg) {
    tkvcu_desc desc = {cfg, 0, 0, 8};
    size_t cache = 0, work = 0;
    char why[160] = "";
    int st;
    memset(r, 0, sizeof *r);
    r->cfg = *cfg;
    r->rng = tkv_rng_seed(11);
    st = tkvcu_query(&desc, &cache, &work, why, sizeof why);
    CHECK_MSG(st == TKV_OK, "%d: %s", st, why);
    if (st) return 0;
    r->cache = aligned_alloc(256, cache);
    r->work = aligned_alloc(256, (work + 255) / 256 * 256);
    memset(r->cache, 0xff, cache);
    memset(r->work, 0xff, work);
    st = tkvcu_create(&desc, r->cache, cache, r->work, work, NULL, &r->cu);
    CHECK_EQ(st, TKV_OK);
    st |= tkv_create(cfg, &r->kv);
    CHECK_EQ(st, TKV_OK);
    return st == TKV_OK;
}

static tkv_config config_of(int head_dim, int n_heads, int n_kv_heads) {
    tkv_config cfg = tkv_config_default();
    cfg.n_layers = 1;
    cfg.n_heads = n_heads;
    cfg.n_kv_heads = n_kv_heads;
    cfg.head_dim = head_dim;
    cfg.max_seqs = 2;
    cfg.max_tokens = 4096;
    cfg.max_append = 64;
    cfg.warm_tokens = 128;
    cfg.allocation_unit = 16;
    cfg.isa = tkv_test_isa();
    return cfg;
}

/* Keys with channels of different sizes and means; values with a mean. */
static void fill(rig *r, int seq, int to) {
    const int row = r->cfg.n_kv_heads * r->cfg.head_dim;
    std::vector<float> k((size_t)(row * 64)), v((size_t)(row * 64));
    int len = tkv_seq_len(r->kv, seq);
    while (len < to) {
        const int n = tkvi_min(to - len, 1 + tkv_rng_below(&r->rng, 48));
        int i;
        tkv_rng_fill(&r->rng, k.data(), (size_t)(n * row), 1.0);
        tkv_rng_fill(&r->rng, v.data(), (size_t)(n * row), 0.7);
        for (i = 0; i < n * row; i++) {
            const int c = i % r->cfg.head_dim;
            k[(size_t)i] *= c % 16 == 3 ? 6.0f : 0.25f + 0.25f * (float)(c % 5);
            if (c % 32 == 7) k[(size_t)i] += 9.0f;
            if (c % 8 == 1) v[(size_t)i] += 0.5f;
        }
        CHECK_EQ(tkv_append(r->kv, seq, 0, k.data(), v.data(), n), TKV_OK);
        len += n;
    }
}

typedef struct options {
    float scale, softcap;
    int window, sinks, queries;
    tkv_type type;
} options;

static uint16_t as_half(tkv_type type, float x) {
    return (uint16_t)(type == TKV_TYPE_F16 ? cpu_to_half(x) : cpu_to_bfloat(x));
}

/* Relative L2 distance of the kernels' output to the reference's, all sequences; the worst head's. */
static double distance(rig *r, const options *o, double *lse_off) {
    const int n_seqs = r->cfg.max_seqs, heads = r->cfg.n_heads, dim = r->cfg.head_dim;
    const size_t row = (size_t)(o->queries * heads * dim), all = row * (size_t)n_seqs;
    std::vector<float> q(all), out(all), want(all), lse((size_t)(n_seqs * o->queries * heads)),
        lse_want(lse.size());
    std::vector<uint16_t> q16(all), out16(all);
    std::vector<float> sinks((size_t)heads);
    tkvcu_attend_params p = {o->scale, o->softcap, o->window, NULL};
    double worst = 0.0;
    size_t i;
    int s;
    tkv_rng_fill(&r->rng, q.data(), all, 1.0);
    for (i = 0; i < all; i++) {
        if (o->type == TKV_TYPE_F32) continue;
        q16[i] = as_half(o->type, q[i]);
        q[i] = o->type == TKV_TYPE_F16 ? cpu_half(q16[i]) : cpu_bfloat(q16[i]);
    }
    tkv_rng_fill(&r->rng, sinks.data(), sinks.size(), 2.0);
    if (o->sinks) p.d_sinks = sinks.data();
    CHECK_EQ(tkvcu_attend(r->cu, 0, o->type == TKV_TYPE_F32 ? (void *)q.data() : q16.data(), o->type,
                          o->queries, &p, o->type == TKV_TYPE_F32 ? (void *)out.data() : out16.data(),
                          lse.data(), NULL, NULL),
             TKV_OK);
    *lse_off = 0.0;
    for (s = 0; s < n_seqs; s++) {
        tkv_attend_params a;
        const int n = tkvi_min(o->queries, tkv_seq_len(r->kv, s));
        if (n < o->queries) continue;
        memset(&a, 0, sizeof a);
        a.layer = 0;
        a.seq = s;
        a.n = o->queries;
        a.q = q.data() + (size_t)s * row;
        a.out = want.data() + (size_t)s * row;
        a.lse = lse_want.data() + (size_t)(s * o->queries * heads);
        a.scale = o->scale;
        a.softcap = o->softcap;
        a.window = o->window;
        a.sinks = o->sinks ? sinks.data() : NULL;
        CHECK_EQ(tkv_attend_reference(r->kv, &a), TKV_OK);
    }
    for (i = 0; i < lse.size(); i++) {
        double d = 0.0, n = 0.0;
        int c;
        if (tkv_seq_len(r->kv, (int)i / (o->queries * heads)) < o->queries) continue;
        for (c = 0; c < dim; c++) {
            const size_t at = i * (size_t)dim + (size_t)c;
            const double x = o->type == TKV_TYPE_F32   ? (double)out[at]
                             : o->type == TKV_TYPE_F16 ? (double)cpu_half(out16[at])
                                                       : (double)cpu_bfloat(out16[at]);
            d += (x - (double)want[at]) * (x - (double)want[at]);
            n += (double)want[at] * (double)want[at];
        }
        if (!(d <= worst * worst * n)) worst = n > 0.0 ? sqrt(d / n) : d;
        if (!(fabs((double)lse[i] - (double)lse_want[i]) <= *lse_off))
            *lse_off = fabs((double)lse[i] - (double)lse_want[i]);
    }
    return worst;
}

static const options plain = {0.0f, 0.0f, 0, 0, 1, TKV_TYPE_F32};

static void measure(rig *r, const options *o, const char *name) {
    double lse, d = distance(r, o, &lse);
    if (getenv("SHOW")) printf("    %-24s %.1e, lse %.1e\n", name, d, lse);
    CHECK_MSG(d <= 3e-3 && lse <= 4e-3, "%s: relative error %g, lse off by %g", name, d, lse);
}

TEST(formats) {
    static const char *const pairs[] = {"kivi4",   "kivi2",   "kivi3",     "q8",       "a40/r40",
                                        "a30/r30", "a25/r20", "a20/r10",   "a15/r10",  "a27/r40",
                                        "a35/r30", "a22/r20", "kivi4/r20", "a30/kivi2"};
    size_t i;
    int dim, group;
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (dim = 64; dim <= 128; dim += 64)
            for (group = 64; group <= 64; group += 32) {
                tkv_config cfg = config_of(dim, 8, 2);
                char name[64], k[16];
                const char *v = strchr(pairs[i], '/');
                rig r;
                snprintf(k, sizeof k, "%s", pairs[i]);
                if (v) *strchr(k, '/') = 0;
                cfg.archive.k = tkv_format_from_name(k);
                cfg.archive.v = tkv_format_from_name(v ? v + 1 : k);
                cfg.warm.k = TKV_KIVI4;
                cfg.warm.v = TKV_R40;
                cfg.group_size = group;
                if (!rig_open(&r, &cfg)) return;
                fill(&r, 0, 1100);
                fill(&r, 1, 400);
                CHECK_EQ(tkvcu_import(r.cu, 0, r.kv, 0, NULL), TKV_OK);
                CHECK_EQ(tkvcu_import(r.cu, 1, r.kv, 1, NULL), TKV_OK);
                snprintf(name, sizeof name, "%s, %d, group %d", pairs[i], dim, group);
                measure(&r, &plain, name);
                rig_close(&r);
            }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(unpacking);
    RUN(formats);
    return tkv_test_end();
}
