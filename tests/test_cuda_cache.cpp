/*
 * tieredkv_cuda.cu as a whole, on a processor (cuda_on_cpu.h): sizes, transfer, appending, cuts, errors.
 *
 *     g++ -std=c++17 -O1 tests/test_cuda_cache.cpp -o test_cuda_cache -lm
 *
 * What the device holds is compared byte for byte with a cache of tieredkv.h that was given the same tokens.
 */
#include "cuda_on_cpu.h"
#include "../tieredkv_cuda.cu"
#include "tkv_test.h"

/* >>a cache on both sides */
enum { BORDER = 256, POISON = 0xff, FENCE = 0xa5 };

typedef struct arena {
    uint8_t *mem;
    size_t bytes;
} arena;

static arena arena_of(size_t bytes) {
    arena a;
    a.bytes = bytes;
    a.mem = (uint8_t *)aligned_alloc(BORDER, (bytes + BORDER - 1) / BORDER * BORDER + 2 * BORDER);
    memset(a.mem, FENCE, BORDER);
    memset(a.mem + BORDER, POISON, bytes);
    memset(a.mem + BORDER + bytes, FENCE, BORDER);
    return a;
}

static int fenced(const arena *a) {
    size_t i, whole = 0;
    for (i = 0; i < BORDER; i++) whole += a->mem[i] == FENCE && a->mem[BORDER + a->bytes + i] == FENCE;
    return whole == BORDER;
}

typedef struct rig {
    tkv_config cfg;
    tkv_cache *kv;
    tkvcu *cu;
    arena cache, work;
    tkv_rng rng;
    int step; /* tokens of an append at most */
} rig;

static tkv_config config_of(const char *preset, int head_dim) {
    tkv_config cfg = tkv_config_default();
    cfg.n_layers = 2;
    cfg.n_heads = 4;
    cfg.n_kv_heads = 2;
    cfg.head_dim = head_dim;
    cfg.max_seqs = 2;
    cfg.max_tokens = 700;
    cfg.max_append = 64;
    cfg.warm_tokens = 128;
    cfg.allocation_unit = 16;
    cfg.isa = tkv_test_isa();
    if (preset) {
        CHECK_EQ(tkv_config_preset(&cfg, preset), TKV_OK);
        cfg.warm_tokens = 128;
    }
    return cfg;
}

static int rig_open(rig *r, const tkv_config *cfg) {
    tkvcu_desc desc = {cfg, 0, 0, 8};
    size_t cache = 0, work = 0;
    char why[160];
    int st;
    memset(r, 0, sizeof *r);
    r->cfg = *cfg;
    r->rng = tkv_rng_seed(7);
    r->step = 8;
    st = tkvcu_query(&desc, &cache, &work, why, sizeof why);
    CHECK_MSG(st == TKV_OK, "%d: %s", st, why);
    if (st) return 0;
    r->cache = arena_of(cache);
    r->work = arena_of(work);
    CHECK_EQ(tkvcu_create(&desc, r->cache.mem + BORDER, cache, r->work.mem + BORDER, work, NULL, &r->cu),
             TKV_OK);
    CHECK_EQ(tkv_create(cfg, &r->kv), TKV_OK);
    return r->cu && r->kv;
}

static void rig_close(rig *r) {
    uint32_t word = 99;
    if (r->cu) {
        CHECK_EQ(tkvcu_status(r->cu, &word, 0, NULL), TKV_OK);
        CHECK_EQ(word, 0);
        CHECK(fenced(&r->cache) && fenced(&r->work));
    }
    if (r->kv) CHECK_EQ(tkv_check(r->kv, NULL, 0), TKV_OK);
    tkvcu_destroy(r->cu);
    tkv_destroy(r->kv);
    free(r->cache.mem);
    free(r->work.mem);
}

/* Keys with channels of different sizes and means, some of them flat for a while. */
static void tokens(rig *r, float *k, float *v, int n) {
    const int dim = r->cfg.head_dim, heads = r->cfg.n_kv_heads;
    int t, i;
    tkv_rng_fill(&r->rng, k, (size_t)(n * heads * dim), 1.0);
    tkv_rng_fill(&r->rng, v, (size_t)(n * heads * dim), 0.5);
    for (t = 0; t < n; t++)
        for (i = 0; i < heads * dim; i++) {
            k[t * heads * dim + i] *= i % 7 == 3 ? 8.0f : 0.5f + (float)(i % 5);
            if (i % 11 == 2) k[t * heads * dim + i] += 40.0f;
            if (i % 29 == 5) k[t * heads * dim + i] = 3.0f;
        }
    if (tkv_rng_below(&r->rng, 8) == 0) memset(v, 0, (size_t)dim * sizeof *v); /* a value of zeros */
}

/* What one sequence holds, on both sides; n: its length. */
static void same(const rig *r, int host_seq, int seq, int n) {
    int layer, i, h, which, block;
    for (layer = 0; layer < r->cfg.n_layers; layer++) {
        const tkvcu_view *v = &r->cu->view[layer];
        const tkvi_list *list = tkvi_list_of(r->kv, host_seq, layer);
        const uint32_t *ids = tkvi_ids(r->kv, host_seq, layer);
        CHECK_EQ(list->len, n);
        CHECK_EQ(v->list[seq].len, n);
        CHECK_EQ(v->list[seq].archive, list->archive);
        CHECK_EQ(v->list[seq].warm, list->warm);
        CHECK_EQ(v->list[seq].step, 0);
        for (i = 0; i < list->n; i++) {
            const tkvi_block *b = &r->kv->pool.block[ids[i]];
            const int region = tkvcu_region_of(list, i, &block);
            const uint8_t *x = tkvi_block_bytes(&r->kv->pool, b), *y = tkvcu_block_at(v, region, seq, block);
            const int version = region < TKVCU_SINKS ? v->version[seq * v->max_blocks + block] : 0;
            for (h = 0; h < r->cfg.n_kv_heads; h++)
                for (which = 0; which < 2; which++) {
                    const tkvi_record *rec = &r->kv->tables.coding[b->coding].record[h];
                    const tkvi_side *s = which ? &rec->v : &rec->k;
                    const tkvcu_side *d = tkvcu_side_at(v, version, region, h, which);
                    const size_t at = rec->at + (which ? rec->v_at : 0);
                    CHECK_EQ(d->at, at);
                    CHECK_EQ(d->bytes, s->bytes);
                    CHECK_MSG(memcmp(x + at, y + at, s->bytes) == 0,
                              "%s, layer %d, block %d, head %d, %s, length %d", s->format->name, layer, i, h,
                              which ? "v" : "k", n);
                }
        }
    }
}

/* The same tokens for both, in chunks of 1 to step, in each layer; compares where blocks have moved. */
static void grow(rig *r, int seq, int to, int compare) {
    const size_t row = (size_t)(r->cfg.n_kv_heads * r->cfg.head_dim);
    std::vector<float> k(row * 64 * 2), v(row * 64 * 2);
    std::vector<int32_t> map((size_t)r->cu->n_seqs, -1);
    int layer, len = tkv_seq_len(r->kv, seq);
    map[0] = seq;
    while (len < to) {
        const int n = tkvi_min(to - len, 1 + tkv_rng_below(&r->rng, r->step));
        for (layer = 0; layer < r->cfg.n_layers; layer++) {
            tokens(r, k.data(), v.data(), n);
            CHECK_EQ(tkv_append(r->kv, seq, layer, k.data(), v.data(), n), TKV_OK);
            CHECK_EQ(tkvcu_append(r->cu, layer, k.data(), v.data(), TKV_TYPE_F32, n, map.data(), NULL),
                     TKV_OK);
        }
        len += n;
        if (compare && (len % TKV_BLOCK_TOKENS < n + 8 || len == to)) same(r, seq, seq, len);
    }
}

/* >>tests */
static const char *const presets[] = {"quality", "balanced", "compact", "extreme", "kivi"};

TEST(append_is_the_hosts) {
    int i, dim;
    for (i = 0; i < 5; i++)
        for (dim = 64; dim <= 128; dim += 64) {
            tkv_config cfg = config_of(presets[i], dim);
            rig r;
            if (i == 4) cfg.group_size = dim == 64 ? 64 : 32;
            if (!rig_open(&r, &cfg)) return;
            CHECK_EQ(tkvcu_export(r.cu, 0, r.kv, 0, NULL), TKV_OK); /* the tables of equal shares */
            grow(&r, 0, 470, 1);
            grow(&r, 1, 200, 1);
            same(&r, 0, 0, 470);
            rig_close(&r);
        }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(append_is_the_hosts);
    return tkv_test_end();
}
