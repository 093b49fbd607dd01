/*
 * tieredkv_cuda.cu as a whole: sizes, transfer, append, attention, graphs, truncation, errors. It is a part of
 * test_cuda.cpp.
 *
 * A cache of tieredkv.h gets the same tokens. The tests compare the bytes of all blocks with it, and attention with
 * tkv_attend_reference. Device memory is filled with NaN first, and has borders that must not change.
 */
#include "cuda_rig.h" /* the functions about graphs; the rig here is another one */

/* >>device memory */
enum { BORDER = 256, POISON = 0xff, BORDER_BYTE = 0xa5 };

static std::vector<uint8_t> fetch(const void *p, size_t n) {
    std::vector<uint8_t> x(n);
    CHECK_EQ(cudaMemcpy(x.data(), p, n, cudaMemcpyDeviceToHost), cudaSuccess);
    return x;
}

template <class T> static T fetch_value(const T *p) {
    T x;
    CHECK_EQ(cudaMemcpy(&x, p, sizeof x, cudaMemcpyDeviceToHost), cudaSuccess);
    return x;
}

typedef struct guarded_buffer { /* device memory between two borders */
    uint8_t *mem;
    size_t bytes;
} guarded_buffer;

static guarded_buffer open_guarded(size_t bytes) {
    guarded_buffer a;
    void *p = NULL;
    CHECK_EQ(cudaMalloc(&p, bytes + 2 * BORDER), cudaSuccess);
    CHECK_EQ(cudaMemset(p, BORDER_BYTE, bytes + 2 * BORDER), cudaSuccess);
    a.mem = (uint8_t *)p + BORDER;
    a.bytes = bytes;
    CHECK_EQ(cudaMemset(a.mem, POISON, bytes), cudaSuccess);
    return a;
}

static int close_guarded(guarded_buffer *a) { /* returns 1 if the borders have not changed */
    std::vector<uint8_t> low, high;
    size_t i, n_intact = 0;
    if (!a->mem) return 1;
    low = fetch(a->mem - BORDER, BORDER);
    high = fetch(a->mem + a->bytes, BORDER);
    for (i = 0; i < BORDER; i++) n_intact += low[i] == BORDER_BYTE && high[i] == BORDER_BYTE;
    (void)cudaFree(a->mem - BORDER);
    return n_intact == BORDER;
}

static void copy_to_device(const guarded_buffer *a, const void *x, size_t n) {
    CHECK_LE(n, a->bytes);
    CHECK_EQ(cudaMemcpy(a->mem, x, n, cudaMemcpyHostToDevice), cudaSuccess);
}

/* >>a cache on the host and on the device */
typedef struct rig {
    tkv_config cfg;
    tkv_cache *kv;
    tkvcu *cu;
    guarded_buffer cache, work, k, v, map; /* k, v: space for 64 tokens of each sequence */
    tkv_rng rng;
    int step; /* largest number of tokens of an append */
} rig;

static tkv_config config_of(const char *preset, int head_dim) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 2;
    cfg.model.n_heads = 4;
    cfg.model.n_kv_heads = 2;
    cfg.model.head_dim = head_dim;
    cfg.limits.max_seqs = 2;
    cfg.limits.max_tokens = 700;
    cfg.limits.max_append = 64;
    cfg.format.allocation_unit = 16;
    if (preset) CHECK_EQ(tkv_apply_preset(&cfg, preset), TKV_OK);
    cfg.tiers.warm_tokens = 128;
    return cfg;
}

static int rig_open(rig *r, const tkv_config *cfg) {
    tkvcu_config config = {cfg, 0, 0, TKVCU_MAX_QUERIES};
    size_t cache = 0, work = 0, row = (size_t)(cfg->model.n_kv_heads * cfg->model.head_dim) * sizeof(float);
    char reason[160];
    int st;
    memset(r, 0, sizeof *r);
    r->cfg = *cfg;
    r->rng = tkv_rng_seed(7);
    r->step = 8;
    st = tkvcu_get_required_bytes(&config, &cache, &work, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%d: %s", st, reason);
    if (st) return 0;
    r->cache = open_guarded(cache);
    r->work = open_guarded(work);
    r->k = open_guarded(row * 64 * (size_t)cfg->limits.max_seqs);
    r->v = open_guarded(row * 64 * (size_t)cfg->limits.max_seqs);
    r->map = open_guarded((size_t)cfg->limits.max_seqs * sizeof(int32_t));
    CHECK_EQ(tkvcu_create(&config, r->cache.mem, cache, r->work.mem, work, NULL, &r->cu), TKV_OK);
    CHECK_EQ(tkv_create(cfg, &r->kv), TKV_OK);
    return r->cu && r->kv;
}

/* Returns the device's flags, and clears them. */
static uint32_t take_flags(const rig *r) {
    uint32_t flags = 99;
    CHECK_EQ(tkvcu_get_flags(r->cu, &flags, 1, NULL), TKV_OK);
    CHECK_EQ(cudaStreamSynchronize(NULL), cudaSuccess);
    return flags;
}

/* Checks that a slot of attention is large enough for every encoded side, with any table. */
static void check_slots(const rig *r) {
    const size_t n = tkvcu_n_sides(&r->cu->host->tables.cfg);
    std::vector<uint8_t> bytes;
    tkvcu_side side;
    size_t i;
    int layer;
    for (layer = 0; layer < r->cfg.model.n_layers; layer++) {
        if (r->cu->host->tables.plan[layer].stored_layer != layer) continue;
        bytes = fetch(r->cu->view[layer].side, n * sizeof side);
        for (i = 0; i < n; i++) {
            memcpy(&side, bytes.data() + i * sizeof side, sizeof side);
            if (side.kind != TKVCU_EXACT) CHECK_LE(side.bytes, r->cu->attend_plan.slot_bytes);
        }
    }
}

static void rig_close(rig *r) {
    if (r->cu) CHECK_EQ(take_flags(r), 0);
    if (r->cu) check_slots(r);
    if (r->kv) CHECK_EQ(tkv_check(r->kv, NULL, 0), TKV_OK);
    CHECK(close_guarded(&r->cache) & close_guarded(&r->work));
    CHECK(close_guarded(&r->k) & close_guarded(&r->v) & close_guarded(&r->map));
    tkvcu_destroy(r->cu);
    tkv_destroy(r->kv);
}

static const int32_t *map_of(const rig *r) { return (const int32_t *)(const void *)r->map.mem; }

/* Makes random tokens. Channels of keys differ in size and mean; some are constant. */
static void make_tokens(rig *r, float *k, float *v, int n) {
    const int dim = r->cfg.model.head_dim, heads = r->cfg.model.n_kv_heads;
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

/* Compares block b of the host with the bytes y of the same block. Free slots of exact blocks are not compared: the
 * host does not set them. length: tokens of the sequence. */
static void check_same_block(const tkv_cache *kv, const tkvi_block *b, int n_tokens, const uint8_t *y,
                             int layer, int length) {
    const uint8_t *x = tkvi_block_bytes(&kv->pool, b);
    int h, which;
    for (h = 0; h < kv->tables.cfg.model.n_kv_heads; h++)
        for (which = 0; which < 2; which++) {
            const tkvi_record *rec = &kv->tables.layout[b->layout].record[h];
            const tkvi_side *s = which ? &rec->v : &rec->k;
            const size_t at = rec->at + (which ? rec->v_at : 0);
            const size_t bytes =
                tkvi_is_exact(s->format) ? s->code_bytes / (size_t)s->tokens * (size_t)n_tokens : s->bytes;
            CHECK_MSG(memcmp(x + at, y + at, bytes) == 0, "%s, layer %d, start %d, head %d, %s, length %d",
                      s->format->name, layer, b->first_position, h, which ? "v" : "k", length);
        }
}

/* Compares one sequence of n tokens on host and device. */
static void check_same(const rig *r, int host_seq, int seq, int n) {
    int layer, i, block;
    for (layer = 0; layer < r->cfg.model.n_layers; layer++) {
        const tkvcu_view *v = &r->cu->view[layer];
        const tkvi_list *list = tkvi_list_of(r->kv, host_seq, layer);
        const uint32_t *ids = tkvi_ids(r->kv, host_seq, layer);
        const tkvcu_list state = fetch_value(&v->list[seq]);
        CHECK_EQ(list->len, n);
        CHECK_EQ(state.len, n);
        CHECK_EQ(state.archive, list->archive);
        CHECK_EQ(state.warm, list->warm);
        CHECK_EQ(state.tickets, 0);
        for (i = 0; i < list->n; i++) {
            const tkvi_block *b = tkvi_block_of(r->kv, ids[i]);
            const int region = tkvcu_find_region(list, i, &block);
            const std::vector<uint8_t> y = fetch(tkvcu_find_block(v, region, seq, block), v->block[region]);
            check_same_block(r->kv, b, tkvi_block_tokens(r->kv, list, ids, i), y.data(), layer, n);
        }
    }
}

/* Appends the same tokens to both, 1 to r->step at a time, in each layer. compare: 1 compares both after demotions. */
static void append_both(rig *r, int seq, int to, int compare) {
    const size_t row = (size_t)(r->cfg.model.n_kv_heads * r->cfg.model.head_dim);
    std::vector<float> k(row * 64), v(row * 64);
    std::vector<int32_t> map((size_t)r->cfg.limits.max_seqs, -1);
    int layer, len = tkv_get_length(r->kv, seq, TKV_ALL_LAYERS);
    map[0] = seq;
    copy_to_device(&r->map, map.data(), map.size() * sizeof(int32_t));
    while (len < to) {
        const int n = tkvi_min(to - len, 1 + tkv_rng_below(&r->rng, r->step));
        for (layer = 0; layer < r->cfg.model.n_layers; layer++) {
            make_tokens(r, k.data(), v.data(), n);
            copy_to_device(&r->k, k.data(), row * (size_t)n * sizeof(float));
            copy_to_device(&r->v, v.data(), row * (size_t)n * sizeof(float));
            CHECK_EQ(tkv_append(r->kv, seq, layer, k.data(), v.data(), n), TKV_OK);
            CHECK_EQ(tkvcu_append(r->cu, layer, r->k.mem, r->v.mem, TKV_TYPE_F32, n, map_of(r), NULL),
                     TKV_OK);
        }
        len += n;
        if (compare && (len % TKV_BLOCK_TOKENS < n + 8 || len == to)) check_same(r, seq, seq, len);
    }
}

/* >>tests */
static const char *const presets[] = {"quality", "balanced", "compact", "extreme", "kivi"};
enum { PRESETS = 5 };

static int is_skipped(int preset, int dim) { return tkv_test_quick() && (preset + dim / 64) % 2; }

/* Opens a rig whose host cache has the device's equal tables. */
static int rig_open_same_tables(rig *r, const tkv_config *cfg) {
    if (!rig_open(r, cfg)) return 0;
    CHECK_EQ(tkvcu_export_seq(r->cu, 0, r->kv, 0, NULL), TKV_OK);
    return 1;
}

TEST(append_gives_host_bytes) {
    int i, dim;
    for (i = 0; i < PRESETS; i++)
        for (dim = 64; dim <= 128; dim += 64) {
            if (is_skipped(i, dim)) continue;
            tkv_config cfg = config_of(presets[i], dim);
            rig r;

            if (rig_open_same_tables(&r, &cfg)) {
                append_both(&r, 0, 470, 1);
                append_both(&r, 1, 200, 1); /* another sequence of another length */
                check_same(&r, 0, 0, 470);
                CHECK(tkvi_list_of(r.kv, 0, 0)->archive > 0 && tkvi_list_of(r.kv, 0, 0)->warm == 2);
            }
            rig_close(&r);
        }
}

/* Learned tables, a prompt in large chunks, layers that share K and V or have none. */
TEST(import_and_export) {
    int i, dim;
    for (i = 0; i < PRESETS; i++)
        for (dim = 64; dim <= 128; dim += 64) {
            if (is_skipped(i, dim)) continue;
            tkv_config cfg = config_of(presets[i], dim);
            std::vector<float> k((size_t)(128 * dim)), q((size_t)(4 * dim)), out(q.size());
            tkv_layer_config layers[4];
            tkv_cache *back = NULL;
            rig r;
            int n, layer;
            memset(layers, 0, sizeof layers);
            layers[1].share_kv = 1;
            layers[2].no_cache = 1;
            layers[3].sink_tokens = TKV_OFF;
            cfg.model.n_layers = 4;
            cfg.layers = layers;
            if (rig_open(&r, &cfg)) {
                for (n = 0; n < 640; n += 64)
                    for (layer = 0; layer < 4; layer += 3) {
                        make_tokens(&r, k.data(), k.data(), 64);
                        CHECK_EQ(tkv_append(r.kv, 0, layer, k.data(), k.data(), 64), TKV_OK);
                        tkv_rng_fill(&r.rng, q.data(), q.size(), 1.0);
                        CHECK_EQ(tkv_attend(r.kv, 0, layer, q.data(), 1, out.data()), TKV_OK);
                    }
                CHECK_EQ(tkv_freeze_calibration(r.kv), TKV_OK); /* the host must not make a second table */
                CHECK_EQ(tkvcu_import_seq(r.cu, 1, r.kv, 0, NULL), TKV_OK);
                for (layer = 0; layer < 4; layer += 3)
                    CHECK_EQ(fetch_value(&r.cu->view[layer].list[1]).len, 640);
                CHECK_EQ(tkv_create(&cfg, &back), TKV_OK);
                CHECK_EQ(tkvcu_export_seq(r.cu, 1, back, 1, NULL), TKV_OK);
                CHECK_EQ(tkv_check(back, NULL, 0), TKV_OK);
                for (layer = 0; layer < 4; layer += 3) {
                    const tkvi_list *a = tkvi_list_of(r.kv, 0, layer), *b = tkvi_list_of(back, 1, layer);
                    CHECK_EQ(a->len, b->len);
                    CHECK(a->n == b->n && a->sinks == b->sinks && a->archive == b->archive &&
                          a->warm == b->warm);
                    for (n = 0; n < a->n; n++) {
                        const tkvi_block *x = tkvi_block_of(r.kv, tkvi_ids(r.kv, 0, layer)[n]);
                        const tkvi_block *y = tkvi_block_of(back, tkvi_ids(back, 1, layer)[n]);
                        CHECK_EQ(x->layout, y->layout);
                        CHECK_EQ(x->first_position, y->first_position);
                        check_same_block(r.kv, x, tkvi_block_tokens(r.kv, a, tkvi_ids(r.kv, 0, layer), n),
                                         tkvi_block_bytes(&back->pool, y), layer, a->len);
                    }
                }
                CHECK_EQ(tkvcu_export_seq(r.cu, 1, back, 1, NULL), TKV_ERR_STATE); /* not empty any more */
                tkv_destroy(back);
            }
            rig_close(&r);
        }
}

/* Imports a sequence, then continues on both sides. */
TEST(append_after_import) {
    int i;
    for (i = 0; i < PRESETS; i += 2) {
        tkv_config cfg = config_of(presets[i], 64);
        rig r;
        if (rig_open_same_tables(&r, &cfg)) {
            std::vector<float> k((size_t)(64 * 2 * 64));
            int n, layer;
            for (n = 0; n < 300; n += 60)
                for (layer = 0; layer < 2; layer++) {
                    make_tokens(&r, k.data(), k.data(), 60);
                    CHECK_EQ(tkv_append(r.kv, 0, layer, k.data(), k.data(), 60), TKV_OK);
                }
            CHECK_EQ(tkvcu_import_seq(r.cu, 0, r.kv, 0, NULL), TKV_OK);
            check_same(&r, 0, 0, 300);
            append_both(&r, 0, 520, 1);
        }
        rig_close(&r);
    }
}

TEST(types_of_input) {
    int type;
    for (type = TKV_TYPE_F32; type <= TKV_TYPE_BF16; type++) {
        tkv_config cfg = config_of("kivi", 64);
        const int values = 4 * 2 * 64, size = type == TKV_TYPE_F32 ? 4 : 2;
        const int32_t map[2] = {0, -5};
        std::vector<uint8_t> x((size_t)(values * size));
        tkv_append_params p;
        rig r;
        int i, step;
        if (rig_open(&r, &cfg)) {
            copy_to_device(&r.map, map, sizeof map);
            memset(&p, 0, sizeof p);
            p.n = 4;
            p.k = p.v = x.data();
            p.k_type = p.v_type = (tkv_type)type;
            for (step = 0; step < 80; step++)
                for (p.layer = 0; p.layer < 2; p.layer++) {
                    for (i = 0; i < values; i++) { /* 3e4 times a random number can be infinite in fp16 */
                        tkvi_store_element(x.data(), p.k_type, i, (float)(3e4 * tkv_rng_gauss(&r.rng)));
                        if (!tkvi_is_finite(tkvi_element(x.data(), p.k_type, i)))
                            tkvi_store_element(x.data(), p.k_type, i, 0.0f);
                    }
                    copy_to_device(&r.k, x.data(), x.size());
                    CHECK_EQ(tkv_append_ex(r.kv, &p), TKV_OK);
                    CHECK_EQ(tkvcu_append(r.cu, p.layer, r.k.mem, r.k.mem, p.k_type, 4, map_of(&r), NULL),
                             TKV_OK);
                }
            check_same(&r, 0, 0, 320);
        }
        rig_close(&r);
    }
}

/* Appends 64 given tokens, K equal to V, to both layers of sequence 0, on the host and on the device. */
static void append_given(rig *r, const std::vector<float> &x) {
    int layer;
    copy_to_device(&r->k, x.data(), x.size() * sizeof(float));
    for (layer = 0; layer < 2; layer++) {
        CHECK_EQ(tkv_append(r->kv, 0, layer, x.data(), x.data(), 64), TKV_OK);
        CHECK_EQ(tkvcu_append(r->cu, layer, r->k.mem, r->k.mem, TKV_TYPE_F32, 64, map_of(r), NULL), TKV_OK);
    }
}

/* BF16 has larger values than any code: encoders clamp them. */
TEST(huge_values) {
    tkv_config cfg = config_of("balanced", 128);
    const int32_t map[2] = {0, -1};
    std::vector<float> x((size_t)(64 * 2 * 128));
    rig r;
    int step;
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_BF16;
    if (rig_open_same_tables(&r, &cfg)) {
        copy_to_device(&r.map, map, sizeof map);
        for (step = 0; step < 4; step++) {
            tkv_rng_fill(&r.rng, x.data(), x.size(), 1e33);
            append_given(&r, x);
        }
        check_same(&r, 0, 0, 256);
    }
    rig_close(&r);
}

static void truncate_to(rig *r, int a, int b) {
    const int32_t to[2] = {a, b};
    copy_to_device(&r->map, to, sizeof to);
    CHECK_EQ(tkvcu_truncate(r->cu, map_of(r), NULL), TKV_OK);
}

TEST(truncation) {
    tkv_config cfg = config_of("balanced", 64);
    rig r;
    if (rig_open_same_tables(&r, &cfg)) {
        append_both(&r, 0, 300, 0);
        append_both(&r, 1, 20, 0);
        truncate_to(&r, 290, 2); /* in the hot tier; among the sinks */
        CHECK_EQ(tkv_seq_truncate(r.kv, 0, 290), TKV_OK);
        CHECK_EQ(tkv_seq_truncate(r.kv, 1, 2), TKV_OK);
        check_same(&r, 0, 0, 290);
        check_same(&r, 1, 1, 2);
        truncate_to(&r, 400, -1); /* no change */
        check_same(&r, 0, 0, 290);
        check_same(&r, 1, 1, 2);
        append_both(&r, 0, 300, 1);
        { /* to the end of what is coded, and not to one token less */
            const tkvi_list *list = tkvi_list_of(r.kv, 0, 0);
            const int coded = 4 + TKV_BLOCK_TOKENS * (list->archive + list->warm);
            CHECK(coded > 100 && list->archive + list->warm ==
                                     tkvi_list_of(r.kv, 0, 1)->archive + tkvi_list_of(r.kv, 0, 1)->warm);
            truncate_to(&r, coded - 1, -1);
            CHECK_EQ(take_flags(&r), TKVCU_FLAG_INEXACT);
            check_same(&r, 0, 0, 300);
            truncate_to(&r, coded, -1);
            CHECK_EQ(take_flags(&r), 0);
            CHECK_EQ(tkv_seq_truncate(r.kv, 0, coded), TKV_OK);
            check_same(&r, 0, 0, coded);
        }
        append_both(&r, 0, 400, 1);
        append_both(&r, 1, 200, 1);
        truncate_to(&r, 100, 0); /* sequence 0: refused; sequence 1: emptied */
        CHECK_EQ(tkv_seq_reset(r.kv, 1), TKV_OK);
        CHECK_EQ(take_flags(&r), TKVCU_FLAG_INEXACT);
        check_same(&r, 0, 0, 400);
        check_same(&r, 1, 1, 0);
        append_both(&r, 1, 250, 1);
    }
    rig_close(&r);
}

TEST(full_and_nonfinite) {
    tkv_config cfg = config_of("compact", 64);
    std::vector<float> x((size_t)(2 * 64 * 2 * 64), 1.0f);
    int32_t map[2] = {0, -1}, lengths[2] = {-9, -9};
    rig r;
    cfg.limits.max_tokens = 210;
    if (rig_open_same_tables(&r, &cfg)) {
        append_both(&r, 0, 205, 1);
        copy_to_device(&r.k, x.data(), x.size() * sizeof(float));
        CHECK_EQ(tkvcu_append(r.cu, 0, r.k.mem, r.k.mem, TKV_TYPE_F32, 6, map_of(&r), NULL), TKV_OK);
        CHECK_EQ(take_flags(&r), TKVCU_FLAG_FULL);
        check_same(&r, 0, 0, 205);
        append_both(&r, 0, 210, 1);
        CHECK_EQ(tkvcu_append(r.cu, 1, r.k.mem, r.k.mem, TKV_TYPE_F32, 1, map_of(&r), NULL), TKV_OK);
        map[0] = 2;
        copy_to_device(&r.map, map, sizeof map);
        CHECK_EQ(tkvcu_append(r.cu, 1, r.k.mem, r.k.mem, TKV_TYPE_F32, 1, map_of(&r), NULL), TKV_OK);
        CHECK_EQ(take_flags(&r), TKVCU_FLAG_FULL | TKVCU_FLAG_SEQUENCE);
        check_same(&r, 0, 0, 210);
        /* the whole batch: sequence 0 is full, sequence 1 has a NaN in v of one head */
        copy_to_device(&r.k, x.data(), x.size() * sizeof(float));
        x[3 * 64 + 1] = tkv_test_float(0x7fc00001u);
        copy_to_device(&r.v, x.data(), x.size() * sizeof(float));
        CHECK_EQ(tkvcu_append(r.cu, 0, r.k.mem, r.v.mem, TKV_TYPE_F32, 1, NULL, NULL), TKV_OK);
        CHECK_EQ(take_flags(&r), TKVCU_FLAG_FULL | TKVCU_FLAG_NONFINITE);
        CHECK_EQ(tkvcu_get_lengths(r.cu, 0, lengths, NULL), TKV_OK);
        CHECK_EQ(cudaStreamSynchronize(NULL), cudaSuccess);
        CHECK_EQ(lengths[0], 210);
        CHECK_EQ(lengths[1], 0);
        check_same(&r, 1, 1, 0);
        append_both(&r, 1, 130, 1);
    }
    rig_close(&r);
}

TEST(saturate_nonfinite) {
    tkv_config cfg = config_of("kivi", 64);
    std::vector<float> x((size_t)(64 * 2 * 64));
    const int32_t map[2] = {0, -1};
    rig r;
    int i, step;
    cfg.host.nonfinite = TKV_NONFINITE_SATURATE;
    if (rig_open(&r, &cfg)) {
        copy_to_device(&r.map, map, sizeof map);
        for (step = 0; step < 4; step++) {
            tkv_rng_fill(&r.rng, x.data(), x.size(), 1.0);
            for (i = 0; i < 64 * 2 * 64; i += 97)
                x[(size_t)i] = tkv_test_float(i % 2 ? 0x7fc00000u : i % 4 ? 0x7f800000u : 0xff800000u);
            append_given(&r, x);
        }
        check_same(&r, 0, 0, 256);
    }
    rig_close(&r);
}

/* >>attention */
typedef struct query { /* n queries of both sequences */
    guarded_buffer q, out, lse, sinks;
    std::vector<float> x, sink;
    int n;
    size_t row; /* floats of a query */
} query;

static query open_query(rig *r, int n) {
    query a;
    a.n = n;
    a.row = (size_t)(r->cfg.model.n_heads * r->cfg.model.head_dim);
    a.x.resize(2 * (size_t)n * a.row);
    a.sink.resize((size_t)r->cfg.model.n_heads);
    tkv_rng_fill(&r->rng, a.x.data(), a.x.size(), 0.5);
    tkv_rng_fill(&r->rng, a.sink.data(), a.sink.size(), 1.0);
    a.q = open_guarded(a.x.size() * sizeof(float));
    a.out = open_guarded(a.x.size() * sizeof(float));
    a.lse = open_guarded(2 * (size_t)(n * r->cfg.model.n_heads) * sizeof(float));
    a.sinks = open_guarded(a.sink.size() * sizeof(float));
    copy_to_device(&a.q, a.x.data(), a.x.size() * sizeof(float));
    copy_to_device(&a.sinks, a.sink.data(), a.sink.size() * sizeof(float));
    return a;
}

static void close_query(query *a) {
    CHECK(close_guarded(&a->q) & close_guarded(&a->out) & close_guarded(&a->lse) & close_guarded(&a->sinks));
}

static std::vector<float> fetch_floats(const guarded_buffer *a, size_t from, size_t n) {
    const std::vector<uint8_t> bytes = fetch(a->mem + from * sizeof(float), n * sizeof(float));
    std::vector<float> x(n);
    memcpy(x.data(), bytes.data(), bytes.size());
    return x;
}

/* |x - want| / |want| */
static double relative_error(const std::vector<float> &x, const std::vector<float> &want) {
    double error = 0.0, norm = 0.0;
    size_t i;
    for (i = 0; i < want.size(); i++) {
        error += ((double)x[i] - (double)want[i]) * ((double)x[i] - (double)want[i]);
        norm += (double)want[i] * (double)want[i];
    }
    return sqrt(error / norm);
}

/* Attends to sequence `seq` as row 1 of the batch, and compares with the reference. */
static void check_attend(rig *r, query *a, int seq, int layer, const tkvcu_attend_params *p) {
    const size_t values = (size_t)a->n * a->row, heads = (size_t)(a->n * r->cfg.model.n_heads);
    const int32_t map[2] = {-1, seq};
    std::vector<float> want(values), lse(heads), logs;
    std::vector<uint8_t> out;
    tkv_attend_params h;
    size_t i, poisoned = 0;
    copy_to_device(&r->map, map, sizeof map);
    CHECK_EQ(cudaMemset(a->out.mem, POISON, a->out.bytes), cudaSuccess);
    CHECK_EQ(tkvcu_attend(r->cu, layer, a->q.mem, TKV_TYPE_F32, a->n, p, a->out.mem,
                          (float *)(void *)a->lse.mem, map_of(r), NULL),
             TKV_OK);
    out = fetch(a->out.mem, a->out.bytes);
    logs = fetch_floats(&a->lse, heads, heads);
    memset(&h, 0, sizeof h);
    h.layer = layer;
    h.seq = seq;
    h.n = a->n;
    h.q = a->x.data() + values;
    h.out = want.data();
    h.lse = lse.data();
    if (p) {
        h.scale = p->scale;
        h.softcap = p->softcap;
        h.window = p->window;
        h.sink_logits = p->d_sink_logits ? a->sink.data() : NULL;
    }
    CHECK_EQ(tkv_attend_reference(r->kv, &h), TKV_OK);
    CHECK_LE(relative_error(fetch_floats(&a->out, values, values), want), 3e-3);
    for (i = 0; i < heads; i++) CHECK_NEAR(logs[i], lse[i], 2e-2); /* logits are 20 and more */
    for (i = 0; i < values * sizeof(float); i++) poisoned += out[i] == POISON;
    CHECK_EQ(poisoned, values * sizeof(float)); /* the skipped row */
    CHECK_EQ(tkvcu_attend(r->cu, layer, a->q.mem, TKV_TYPE_F32, a->n, p, a->out.mem, NULL, map_of(r), NULL),
             TKV_OK);
    CHECK(out == fetch(a->out.mem, a->out.bytes)); /* the same bits */
}

TEST(attend_matches_host) {
    int i, n;
    for (i = 0; i < PRESETS; i++) {
        tkv_config cfg = config_of(presets[i], i % 2 ? 128 : 64);
        tkvcu_attend_params p = {0.2f, 20.0f, 0, NULL};
        rig r;
        if (rig_open_same_tables(&r, &cfg)) {
            query a = open_query(&r, 1), b = open_query(&r, 5), c = open_query(&r, TKVCU_MAX_QUERIES);
            for (n = 1; n < 420; n = 2 * n + 5) {
                append_both(&r, 1, n, 0);
                check_attend(&r, &a, 1, 0, NULL);
            }
            check_attend(&r, &b, 1, 1, NULL);
            check_attend(&r, &c, 1, 1, NULL);
            check_attend(&r, &b, 1, 0, &p);
            p.window = 150;
            check_attend(&r, &a, 1, 0, &p);
            check_attend(&r, &c, 1, 0, &p);
            p.window = TKV_OFF;
            p.d_sink_logits = (const float *)(const void *)a.sinks.mem;
            check_attend(&r, &a, 1, 0, &p);
            p.d_sink_logits = (const float *)(const void *)b.sinks.mem;
            p.window = 3;
            check_attend(&r, &b, 1, 0, &p);
            close_query(&a);
            close_query(&b);
            close_query(&c);
        }
        rig_close(&r);
    }
}

TEST(other_plans) {
    static const struct {
        int sinks, hot, warm, group, fit, step;
        tkv_format exact, k[2], v[2];
    } plan[] = {
        {TKV_OFF, 1, 64, 64, TKV_FIT_CLIP, 64, TKV_BF16, {TKV_KIVI3, TKV_KIVI2}, {TKV_R30, TKV_KIVI2}},
        {64, 128, TKV_OFF, 64, TKV_FIT_UNBIASED, 40, TKV_F16, {TKV_Q8, TKV_KIVI2}, {TKV_Q8, TKV_KIVI3}},
        {5, TKV_OFF, 100, 64, TKV_FIT_NORM, 1, TKV_F16, {TKV_A225, TKV_A15}, {TKV_R20, TKV_R10}},
        {4, TKV_UNLIMITED, 0, 64, 0, 64, TKV_F16, {TKV_A40, TKV_A30}, {TKV_R40, TKV_R30}},
        {4, 64, TKV_UNLIMITED, 64, 0, 64, TKV_F16, {TKV_Q8, TKV_A30}, {TKV_KIVI4, TKV_R30}},
    };
    size_t i;
    for (i = 0; i < sizeof plan / sizeof *plan; i++) {
        tkv_config cfg = config_of(NULL, 64);
        rig r;
        cfg.tiers.sink_tokens = plan[i].sinks;
        cfg.tiers.hot_tokens = plan[i].hot;
        cfg.tiers.warm_tokens = plan[i].warm;
        cfg.format.group_size = plan[i].group;
        cfg.format.fit = plan[i].fit;
        cfg.tiers.hot.k = cfg.tiers.hot.v = plan[i].exact;
        cfg.tiers.warm.k = plan[i].k[0];
        cfg.tiers.warm.v = plan[i].v[0];
        cfg.tiers.archive.k = plan[i].k[1];
        cfg.tiers.archive.v = plan[i].v[1];
        if (rig_open_same_tables(&r, &cfg)) {
            r.step = plan[i].step;
            query a = open_query(&r, 2), b = open_query(&r, 13);
            append_both(&r, 1, 500, 1);
            check_attend(&r, &a, 1, 0, NULL);
            check_attend(&r, &b, 1, 0, NULL);
            close_query(&a);
            close_query(&b);
        }
        rig_close(&r);
    }
}

/* Graphs are captured while the cache is empty, and replayed through all tiers. Rows are permuted sequences. */
TEST(graphs_of_calls) {
    tkv_config cfg = config_of("compact", 64);
    const size_t row = (size_t)(cfg.model.n_kv_heads * cfg.model.head_dim);
    const int32_t map[2] = {1, 0};
    std::vector<float> k(2 * row), v(2 * row);
    cudaStream_t stream = NULL;
    cudaGraphExec_t append, attend[2];
    rig r;
    int n, i, j;
    cfg.model.n_layers = 1;
    cfg.host.precise = 1; /* on the host: error of 2e-3 at most */
    if (rig_open_same_tables(&r, &cfg)) {
        query a[2] = {open_query(&r, 1), open_query(&r, 9)};
        copy_to_device(&r.map, map, sizeof map);
        CHECK_EQ(cudaStreamCreate(&stream), cudaSuccess);
        begin_capture(stream);
        CHECK_EQ(tkvcu_append(r.cu, 0, r.k.mem, r.v.mem, TKV_TYPE_F32, 1, map_of(&r), stream), TKV_OK);
        append = end_capture(stream);
        for (i = 0; i < 2; i++) {
            begin_capture(stream);
            CHECK_EQ(tkvcu_attend(r.cu, 0, a[i].q.mem, TKV_TYPE_F32, a[i].n, NULL, a[i].out.mem, NULL,
                                  map_of(&r), stream),
                     TKV_OK);
            attend[i] = end_capture(stream);
        }
        for (n = 1; n <= 340; n++) {
            for (i = 0; i < 2; i++) {
                make_tokens(&r, k.data() + (size_t)i * row, v.data() + (size_t)i * row, 1);
                CHECK_EQ(
                    tkv_append(r.kv, map[i], 0, k.data() + (size_t)i * row, v.data() + (size_t)i * row, 1),
                    TKV_OK);
            }
            copy_to_device(&r.k, k.data(), k.size() * sizeof(float));
            copy_to_device(&r.v, v.data(), v.size() * sizeof(float));
            CHECK_EQ(cudaGraphLaunch(append, stream), cudaSuccess);
            CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            if (n % 64 > 5) continue;
            for (i = 0; i < 2; i++) check_same(&r, map[i], map[i], n);
            for (j = 0; j <= (n >= a[1].n && n % 64 == 5); j++) {
                const size_t values = (size_t)a[j].n * a[j].row;
                std::vector<float> want(values);
                CHECK_EQ(cudaGraphLaunch(attend[j], stream), cudaSuccess);
                CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
                for (i = 0; i < 2; i++) {
                    CHECK_EQ(
                        tkv_attend(r.kv, map[i], 0, a[j].x.data() + (size_t)i * values, a[j].n, want.data()),
                        TKV_OK);
                    /* both sides approximate */
                    CHECK_LE(relative_error(fetch_floats(&a[j].out, (size_t)i * values, values), want), 5e-3);
                }
            }
        }
        CHECK_EQ(cudaGraphExecDestroy(append), cudaSuccess);
        for (i = 0; i < 2; i++) {
            CHECK_EQ(cudaGraphExecDestroy(attend[i]), cudaSuccess);
            close_query(&a[i]);
        }
        CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
    rig_close(&r);
}

/* >>errors */
TEST(unsupported_configs) {
    struct {
        const char *text;
        int status;
        tkv_config cfg;
    } bad[13];
    const tkv_level ladder = {0, 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0};
    tkvcu_config config = {NULL, 0, 0, 0};
    size_t a = 0, b = 0, a2 = 0, b2 = 0;
    char reason[160];
    int i;
    for (i = 0; i < 13; i++) {
        bad[i].cfg = config_of("balanced", 128);
        bad[i].status = TKV_ERR_UNSUPPORTED;
    }
    bad[0].cfg.model.head_dim = 96;
    bad[0].text = "head_dim must be 64 or 128";
    bad[1].cfg.model.v_head_dim = 64;
    bad[1].text = "v_head_dim must be head_dim";
    bad[2].cfg.model.n_heads = 34;
    bad[2].text = "16 query heads";
    bad[3].cfg.budget.bytes = 1 << 28;
    bad[3].text = "budgets";
    bad[4].cfg.budget.ladder = &ladder;
    bad[4].cfg.budget.n_levels = 1;
    bad[4].text = "ladders";
    bad[5].cfg.tiers.n_anchors = 2;
    bad[5].text = "anchors";
    bad[6].cfg.budget.discard = 1;
    bad[6].text = "recomputation";
    bad[7].cfg.meter.heads = 1;
    bad[7].text = "meters";
    bad[8].cfg.format.allocation_unit = 4;
    bad[8].text = "cfg.format.allocation_unit = 16, layer 0";
    bad[9].cfg.tiers.hot.k = TKV_F32;
    bad[9].text = "without a GPU kernel, layer 0";
    bad[10].cfg.tiers.archive.k = TKV_SQUAT2;
    bad[10].text = "without a GPU kernel, layer 0";
    bad[11].cfg.limits.max_tokens = 0;
    bad[11].text = "max_tokens is 0";
    bad[11].status = TKV_ERR_CONFIG;
    bad[12].cfg = config_of("kivi", 128);
    bad[12].cfg.format.group_size = 32;
    bad[12].text = "cfg.format.group_size = 64";
    for (i = 0; i < 13; i++) {
        config.cfg = &bad[i].cfg;
        CHECK_EQ(tkvcu_get_required_bytes(&config, &a, &b, reason, sizeof reason), bad[i].status);
        CHECK_MSG(strstr(reason, bad[i].text), "\"%s\" has no \"%s\"", reason, bad[i].text);
        CHECK(a == 0 && b == 0);
    }
    config.cfg = &bad[11].cfg;
    config.max_tokens = 4096; /* the config has no max_tokens */
    CHECK_EQ(tkvcu_get_required_bytes(&config, &a, &b, NULL, 0), TKV_OK);
    config.max_tokens = 8192;
    CHECK_EQ(tkvcu_get_required_bytes(&config, &a2, &b2, reason, 0), TKV_OK);
    CHECK(a2 > a && a2 < 2 * a && b2 == b);
    config.n_seqs = 65536;
    CHECK_EQ(tkvcu_get_required_bytes(&config, &a, &b, NULL, 0), TKV_ERR_UNSUPPORTED);
    config.n_seqs = -1;
    CHECK_EQ(tkvcu_get_required_bytes(&config, &a, &b, reason, sizeof reason), TKV_ERR_CONFIG);
    config.n_seqs = 0;
    config.max_queries = 65;
    CHECK_EQ(tkvcu_get_required_bytes(&config, &a, &b, reason, sizeof reason), TKV_ERR_CONFIG);
    CHECK(strstr(reason, "max_queries is 65") != NULL);
}

TEST(wrong_arguments) {
    tkv_config cfg = config_of("balanced", 64), other = cfg;
    tkvcu_config config = {&cfg, 0, 0, 2};
    std::vector<float> x(4096, 1.0f);
    std::vector<uint8_t> before;
    tkv_cache *kv = NULL;
    tkvcu *cu = NULL, *const untouched = NULL;
    tkvcu_attend_params p = {0.0f, 0.0f, 0, NULL};
    int32_t n[2] = {0, 0};
    uint32_t flags = 0;
    size_t a = 0, b = 0;
    rig r;
    CHECK_EQ(tkvcu_get_required_bytes(NULL, &a, &b, NULL, 0), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_get_required_bytes(&config, NULL, &b, NULL, 0), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_get_required_bytes(&config, &a, NULL, NULL, 0), TKV_ERR_ARG);
    if (!rig_open(&r, &cfg)) return;
    CHECK_EQ(tkvcu_create(&config, NULL, r.cache.bytes, x.data(), 1, NULL, &cu), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_create(&config, r.cache.mem + 1, r.cache.bytes, r.work.mem, r.work.bytes, NULL, &cu),
             TKV_ERR_ARG);
    CHECK_EQ(tkvcu_create(&config, r.cache.mem, r.cache.bytes - 1, r.work.mem, r.work.bytes, NULL, &cu),
             TKV_ERR_CAPACITY);
    CHECK_EQ(tkvcu_create(&config, r.cache.mem, r.cache.bytes, r.work.mem, 0, NULL, &cu), TKV_ERR_CAPACITY);
#ifndef __CUDACC__ /* other devices */
    cpu_capability = 7;
    CHECK_EQ(tkvcu_create(&config, r.cache.mem, r.cache.bytes, r.work.mem, r.work.bytes, NULL, &cu),
             TKV_ERR_UNSUPPORTED);
    cpu_capability = 9;
    cpu_max_shared = 8192;
    CHECK_EQ(tkvcu_create(&config, r.cache.mem, r.cache.bytes, r.work.mem, r.work.bytes, NULL, &cu),
             TKV_ERR_UNSUPPORTED);
    cpu_max_shared = 232448;
#endif
    CHECK(cu == untouched);
    before = fetch(r.cache.mem, r.cache.bytes);
    CHECK_EQ(tkvcu_append(NULL, 0, x.data(), x.data(), TKV_TYPE_F32, 1, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_append(r.cu, -1, x.data(), x.data(), TKV_TYPE_F32, 1, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_append(r.cu, 2, x.data(), x.data(), TKV_TYPE_F32, 1, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_append(r.cu, 0, NULL, x.data(), TKV_TYPE_F32, 1, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_append(r.cu, 0, x.data(), NULL, TKV_TYPE_F32, 1, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_append(r.cu, 0, x.data(), x.data(), (tkv_type)3, 1, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_append(r.cu, 0, x.data(), x.data(), TKV_TYPE_F32, 0, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_append(r.cu, 0, x.data(), x.data(), TKV_TYPE_F32, 65, NULL, NULL), TKV_ERR_ARG);
    CHECK_STR(tkvcu_get_last_error(r.cu),
              "n_tokens is 65; it must be 1 to 64, and at most cfg.limits.max_append");
    CHECK_EQ(tkvcu_attend(NULL, 0, x.data(), TKV_TYPE_F32, 1, NULL, x.data(), NULL, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_attend(r.cu, 2, x.data(), TKV_TYPE_F32, 1, NULL, x.data(), NULL, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_attend(r.cu, 0, NULL, TKV_TYPE_F32, 1, NULL, x.data(), NULL, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_attend(r.cu, 0, x.data(), TKV_TYPE_F32, 1, NULL, NULL, NULL, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_attend(r.cu, 0, x.data(), TKV_TYPE_F32, 65, NULL, x.data(), NULL, NULL, NULL),
             TKV_ERR_ARG);
    p.softcap = -1.0f;
    CHECK_EQ(tkvcu_attend(r.cu, 0, x.data(), TKV_TYPE_F32, 1, &p, x.data(), NULL, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_truncate(NULL, n, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_truncate(r.cu, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_get_lengths(NULL, 0, n, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_get_lengths(r.cu, 2, n, NULL), TKV_ERR_ARG);
    CHECK_STR(tkvcu_get_last_error(r.cu), "no K and V: layer 2");
    CHECK_EQ(tkvcu_get_lengths(r.cu, 0, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_get_flags(NULL, &flags, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_get_flags(r.cu, NULL, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_load_calibration(NULL, r.kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_load_calibration(r.cu, NULL, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_import_seq(NULL, 0, r.kv, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_import_seq(r.cu, 2, r.kv, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_import_seq(r.cu, 0, r.kv, -1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_export_seq(r.cu, 0, NULL, 0, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkvcu_export_seq(r.cu, 0, r.kv, 2, NULL), TKV_ERR_ARG);
    other.tiers.hot_tokens = 128;
    CHECK_EQ(tkv_create(&other, &kv), TKV_OK);
    CHECK_EQ(tkvcu_import_seq(r.cu, 0, kv, 0, NULL), TKV_ERR_CONFIG);
    CHECK_STR(tkvcu_get_last_error(r.cu), "the cache has another plan: the tiers' lengths");
    tkv_destroy(kv);
    CHECK(before == fetch(r.cache.mem, r.cache.bytes)); /* no byte has changed */
    rig_close(&r);
}

/* Windows free no blocks here. Blocks that enter the warm ring never take the place of blocks that leave it. */
TEST(ring_sizes) {
    tkv_config cfg = config_of("balanced", 64);
    rig wide, narrow;
    int ok = rig_open(&wide, &cfg);
    cfg.model.window = 64;
    if (rig_open(&narrow, &cfg) && ok) {
        const tkvcu_view *a = &wide.cu->view[0], *b = &narrow.cu->view[0];
        CHECK_EQ(a->ring[TKVCU_ARCHIVE], b->ring[TKVCU_ARCHIVE]);
        CHECK(a->ring[TKVCU_ARCHIVE] * 64 + a->sinks >= cfg.limits.max_tokens - 64 - cfg.tiers.warm_tokens);
        CHECK(a->ring[TKVCU_WARM] >= cfg.tiers.warm_tokens / 64 + a->ring[TKVCU_HOT]);
    }
    rig_close(&wide);
    rig_close(&narrow);
}

TEST(short_prompts) { /* without a table, the error names the call that helps */
    tkv_config cfg = config_of("balanced", 64);
    rig r;
    if (rig_open(&r, &cfg)) {
        std::vector<float> x((size_t)(64 * 2 * 64));
        int n, layer;
        for (n = 0; n < 256; n += 64)
            for (layer = 0; layer < cfg.model.n_layers; layer++) {
                make_tokens(&r, x.data(), x.data(), 64);
                CHECK_EQ(tkv_append(r.kv, 0, layer, x.data(), x.data(), 64), TKV_OK);
            }
        CHECK_EQ(tkvcu_import_seq(r.cu, 0, r.kv, 0, NULL), TKV_ERR_CAPACITY);
        CHECK(strstr(tkvcu_get_last_error(r.cu), "tkv_freeze_calibration") != NULL);
        CHECK_EQ(tkv_freeze_calibration(r.kv), TKV_OK);
        CHECK_EQ(tkv_seq_begin(r.kv, 0), TKV_OK);
        CHECK_EQ(tkv_seq_commit(r.kv, 0), TKV_OK);
        CHECK_EQ(tkvcu_import_seq(r.cu, 0, r.kv, 0, NULL), TKV_OK);
        check_same(&r, 0, 0, 256);
    }
    rig_close(&r);
}

TEST(unsupported_imports) {
    tkv_config cfg = config_of("balanced", 64), wide;
    std::vector<float> x((size_t)(512 * 2 * 64));
    tkv_cache *kv = NULL;
    rig r;
    if (rig_open(&r, &cfg)) {
        tkv_rng_fill(&r.rng, x.data(), x.size(), 1.0);
        CHECK_EQ(tkv_append(r.kv, 0, 0, x.data(), x.data(), 64), TKV_OK);
        CHECK_EQ(tkv_append(r.kv, 0, 1, x.data(), x.data(), 64), TKV_OK);
        CHECK_EQ(tkv_seq_begin(r.kv, 0), TKV_OK);
        CHECK_EQ(tkvcu_import_seq(r.cu, 0, r.kv, 0, NULL), TKV_ERR_STATE);
        CHECK_EQ(tkv_seq_abort(r.kv, 0), TKV_OK);
        CHECK_EQ(tkv_seq_flush(r.kv, 0, TKV_FLUSH_ALL), TKV_OK);
        CHECK_EQ(tkv_append(r.kv, 0, 0, x.data(), x.data(), 3), TKV_OK);
        CHECK_EQ(tkvcu_import_seq(r.cu, 0, r.kv, 0, NULL), TKV_ERR_UNSUPPORTED);
        CHECK_STR(tkvcu_get_last_error(r.cu), "a flush made a block short");
        wide = cfg;
        wide.limits.max_append = 512;
        wide.model.window = 128;
        CHECK_EQ(tkv_create(&wide, &kv), TKV_OK);
        CHECK_EQ(tkv_append(kv, 0, 0, x.data(), x.data(), 512), TKV_OK); /* hot until the next append */
        CHECK_EQ(tkvcu_import_seq(r.cu, 0, kv, 0, NULL), TKV_ERR_CAPACITY);
        CHECK_EQ(tkv_append(kv, 0, 0, x.data(), x.data(), 1), TKV_OK);
        CHECK_EQ(tkv_append(kv, 0, 0, x.data(), x.data(), 1), TKV_OK);
        CHECK_EQ(tkvcu_import_seq(r.cu, 0, kv, 0, NULL), TKV_ERR_UNSUPPORTED);
        CHECK_STR(tkvcu_get_last_error(r.cu), "tokens have expired behind a window");
        tkv_destroy(kv);
    }
    rig_close(&r);
}

/* Returns learned tables as bytes, from 640 tokens. Keys of the two heads are multiplied by `first` and
 * `second`. Heads share the bytes of a layer, so their records get other offsets in a block. */
static std::vector<uint8_t> learn_tables(rig *r, float first, float second) {
    std::vector<float> x((size_t)(64 * 2 * 64));
    std::vector<uint8_t> table(1 << 16);
    size_t bytes = 0;
    tkv_cache *kv = NULL;
    int n;
    CHECK_EQ(tkv_create(&r->cfg, &kv), TKV_OK);
    for (n = 0; n < 640; n += 64) {
        make_tokens(r, x.data(), x.data(), 64);
        for (size_t i = 0; i < x.size(); i++) x[i] *= i / 64 % 2 ? second : first;
        CHECK_EQ(tkv_append(kv, 0, n / 64 % 2, x.data(), x.data(), 64), TKV_OK);
    }
    CHECK_EQ(tkv_freeze_calibration(kv), TKV_OK);
    CHECK_EQ(tkv_save_calibration(kv, table.data(), table.size(), &bytes), TKV_OK);
    table.resize(bytes);
    tkv_destroy(kv);
    return table;
}

TEST(tables_on_the_device) {
    tkv_config cfg = config_of("balanced", 64);
    std::vector<uint8_t> one, two;
    rig r, other, third;
    if (rig_open(&r, &cfg) && rig_open(&other, &cfg) && rig_open(&third, &cfg)) {
        one = learn_tables(&r, 9.0f, .5f);
        two = learn_tables(&r, .5f, 9.0f);
        CHECK_EQ(tkv_load_calibration(r.kv, one.data(), one.size()), TKV_OK);
        CHECK_EQ(tkvcu_load_calibration(r.cu, r.kv, NULL), TKV_OK);
        CHECK_EQ(tkvcu_load_calibration(r.cu, r.kv, NULL), TKV_OK); /* a second time */
        append_both(&r, 0, 400, 1);
        /* A second version: stored blocks keep theirs. */
        CHECK_EQ(tkv_load_calibration(r.kv, two.data(), two.size()), TKV_OK);
        CHECK_EQ(r.kv->tables.current_version[0], 1);
        CHECK_EQ(tkvcu_load_calibration(r.cu, r.kv, NULL), TKV_OK);
        append_both(&r, 0, 590, 1);
        CHECK_EQ(tkvcu_import_seq(third.cu, 1, r.kv, 0, NULL), TKV_OK);
        std::swap(third.kv, r.kv);
        check_same(&third, 0, 1, 590);
        std::swap(third.kv, r.kv);
        CHECK_EQ(tkvcu_export_seq(third.cu, 1, third.kv, 0, NULL), TKV_OK);
        CHECK_EQ(third.kv->tables.current_version[0], 1);
        check_same(&third, 0, 1, 590);
        /* When blocks may be coded with a table, no other table can have its number. */
        append_both(&other, 1, 64, 0);
        CHECK_EQ(tkvcu_load_calibration(other.cu, r.kv, NULL), TKV_ERR_STATE);
        CHECK_STR(tkvcu_get_last_error(other.cu),
                  "blocks here may be coded with another table of layer 0; take "
                  "over tables before the first append");
        CHECK_EQ(tkvcu_import_seq(other.cu, 0, r.kv, 0, NULL), TKV_ERR_STATE);
        CHECK_EQ(tkv_load_calibration(other.kv, two.data(), two.size()), TKV_OK);
        CHECK_EQ(tkvcu_export_seq(r.cu, 0, other.kv, 0, NULL), TKV_ERR_STATE); /* version 0 differs */
        CHECK_STR(tkvcu_get_last_error(r.cu), "the cache has another table in layer 0");
    }
    rig_close(&r);
    rig_close(&other);
    rig_close(&third);
}

/* Warm and archive have one coding: blocks are copied, and keep the table that they were coded with, whatever table is
 * the newest. Tables give heads other shares of a block, so a wrong one is a wrong place too. */
TEST(copied_blocks_keep_their_table) {
    tkv_config cfg = config_of("balanced", 64);
    rig r, other;
    int i, layer;
    cfg.tiers.archive = cfg.tiers.warm;
    for (i = 0; i < 2; i++)
        if (rig_open(&r, &cfg) && rig_open(&other, &cfg)) {
            const std::vector<uint8_t> one = learn_tables(&r, 9.0f, .5f), two = learn_tables(&r, .5f, 9.0f);
            const std::vector<uint8_t> &before = i ? two : one, &after = i ? one : two;
            std::vector<float> k[2], v[2];
            CHECK_EQ(tkv_load_calibration(r.kv, before.data(), before.size()), TKV_OK);
            CHECK_EQ(tkvcu_load_calibration(r.cu, r.kv, NULL), TKV_OK);
            append_both(&r, 0, 270, 1);
            CHECK(tkvi_list_of(r.kv, 0, 0)->warm > 0);
            CHECK_EQ(tkv_load_calibration(r.kv, after.data(), after.size()), TKV_OK);
            CHECK_EQ(tkvcu_load_calibration(r.cu, r.kv, NULL), TKV_OK);
            append_both(&r, 0, 590, 1);
            CHECK(tkvi_list_of(r.kv, 0, 0)->archive > 4); /* those of both tables */
            CHECK_EQ(tkvcu_export_seq(r.cu, 0, other.kv, 1, NULL), TKV_OK);
            for (layer = 0; layer < cfg.model.n_layers; layer++) {
                const rig *from[2] = {&r, &other};
                int x;
                for (x = 0; x < 2; x++) {
                    k[x].assign(590 * 2 * 64, 0.0f);
                    v[x].assign(590 * 2 * 64, 0.0f);
                    CHECK_EQ(tkv_read(from[x]->kv, x, layer, 0, 590, k[x].data(), v[x].data()), TKV_OK);
                }
                CHECK(k[0] == k[1] && v[0] == v[1]);
            }
            rig_close(&r);
            rig_close(&other);
        }
}

static int is_all_zero(const uint8_t *x, size_t n) {
    while (n && !*x) x++, n--;
    return !n;
}

/* Checks that nothing is left of what the memory held before: in the slots of exact blocks that have no token yet, and
 * behind the last side of a block. Returns the bytes behind the last sides. */
static size_t check_free_bytes(const rig *r, int seq) {
    size_t n_behind = 0;
    int layer, i, h, which, block;
    for (layer = 0; layer < r->cfg.model.n_layers; layer++) {
        const tkvcu_view *v = &r->cu->view[layer];
        const tkvi_list *list = tkvi_list_of(r->kv, seq, layer);
        const uint32_t *ids = tkvi_ids(r->kv, seq, layer);
        for (i = 0; i < list->n; i++) {
            const tkvi_block *b = tkvi_block_of(r->kv, ids[i]);
            const tkvi_layout *l = &r->kv->tables.layout[b->layout];
            const int region = tkvcu_find_region(list, i, &block), n = tkvi_block_tokens(r->kv, list, ids, i);
            const std::vector<uint8_t> y = fetch(tkvcu_find_block(v, region, seq, block), v->block[region]);
            size_t end = 0;
            for (h = 0; h < v->n_kv_heads; h++)
                for (which = 0; which < 2; which++) {
                    const tkvi_side *s = which ? &l->record[h].v : &l->record[h].k;
                    const size_t at = l->record[h].at + (which ? l->record[h].v_at : 0),
                                 used = s->code_bytes / (size_t)s->tokens * (size_t)n;
                    if (tkvi_is_exact(s->format))
                        CHECK_MSG(is_all_zero(&y[at + used], s->bytes - used),
                                  "layer %d, start %d, %d tokens", layer, b->first_position, n);
                    end = at + s->bytes;
                }
            if (region != TKVCU_HOT && region != TKVCU_SINKS) {
                CHECK_MSG(is_all_zero(y.data() + end, y.size() - end), "behind layer %d, start %d", layer,
                          b->first_position);
                n_behind += y.size() - end;
            }
        }
    }
    return n_behind;
}

TEST(free_slots_and_padding_are_zero) {
    static const int lengths[] = {1, 3, 4, 5, 67, 68, 69, 131, 132, 133, 300, 452, 453, 580};
    size_t i, n_behind = 0;
    int round, step;
    for (step = 1; step <= 64; step += 63) {
        tkv_config cfg = config_of("quality", 64);
        rig r;
        cfg.model.n_kv_heads = 1;
        if (rig_open_same_tables(&r, &cfg)) {
            r.step = step;
            for (round = 0; round < 2; round++) { /* memory of NaN, and of another sequence's tokens */
                for (i = 0; i < sizeof lengths / sizeof *lengths; i++) {
                    append_both(&r, 0, lengths[i], 0);
                    check_same(&r, 0, 0, lengths[i]);
                    n_behind += check_free_bytes(&r, 0);
                }
                CHECK_EQ(tkv_seq_reset(r.kv, 0), TKV_OK);
                truncate_to(&r, 0, 0);
            }
        }
        rig_close(&r);
    }
    CHECK_MSG(n_behind > 0, "no block has padding");
}

/* All fits of scale and zero, with both numbers of threads per group. */
TEST(all_fits) {
    static const int fit[] = {TKV_FIT_CLIP, TKV_FIT_NORM, TKV_FIT_UNBIASED, TKV_FIT_CLIP | TKV_FIT_NORM,
                              TKV_FIT_CLIP | TKV_FIT_UNBIASED};
    size_t i;
    int dim;
    for (i = 0; i < sizeof fit / sizeof *fit; i++)
        for (dim = 64; dim <= 128; dim += 64) {
            tkv_config cfg = config_of("kivi", dim);
            rig r;
            cfg.format.fit = fit[i];
            cfg.tiers.hot_tokens = cfg.tiers.warm_tokens = 64;
            if (rig_open_same_tables(&r, &cfg)) append_both(&r, 0, 280, 1);
            rig_close(&r);
        }
}

/* Thread blocks run in any order. One head's side enters the warm ring, with another table and so at another
 * offset, while another head's side is still read. */
TEST(blocks_of_threads_in_any_order) {
    const char *const given = getenv("TKVCU_ORDER");
    const std::string order = given ? given : "";
    int i;
    for (i = 0; i < 4; i++) {
        tkv_config cfg = config_of("balanced", 64);
        rig r;
        if (rig_open(&r, &cfg)) {
            const std::vector<uint8_t> one = learn_tables(&r, 9.0f, .5f), two = learn_tables(&r, .5f, 9.0f);
            const std::vector<uint8_t> &before = i / 2 ? one : two, &after = i / 2 ? two : one;
            setenv("TKVCU_ORDER", i % 2 ? "1" : "0", 1);
            CHECK_EQ(tkv_load_calibration(r.kv, before.data(), before.size()), TKV_OK);
            CHECK_EQ(tkvcu_load_calibration(r.cu, r.kv, NULL), TKV_OK);
            append_both(&r, 0, 400, 0);
            CHECK_EQ(tkv_load_calibration(r.kv, after.data(), after.size()), TKV_OK);
            CHECK_EQ(tkvcu_load_calibration(r.cu, r.kv, NULL), TKV_OK);
            append_both(&r, 0, 590, 1);
            setenv("TKVCU_ORDER", order.c_str(), 1);
        }
        rig_close(&r);
    }
}

TEST(error_texts) {
    CHECK(strstr(tkv_get_status_text(TKV_ERR_DEVICE), "tkvcu_get_last_error") != NULL);
    CHECK(strstr(tkv_get_status_text(TKV_ERR_UNSUPPORTED), "GPU") != NULL);
    CHECK_STR(tkvcu_get_last_error(NULL), "");
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(append_gives_host_bytes);
    RUN(import_and_export);
    RUN(append_after_import);
    RUN(types_of_input);
    RUN(huge_values);
    RUN(truncation);
    RUN(full_and_nonfinite);
    RUN(saturate_nonfinite);
    RUN(attend_matches_host);
    RUN(other_plans);
    RUN(graphs_of_calls);
    RUN(unsupported_configs);
    RUN(wrong_arguments);
    RUN(ring_sizes);
    RUN(short_prompts);
    RUN(unsupported_imports);
    RUN(tables_on_the_device);
    RUN(copied_blocks_keep_their_table);
    RUN(free_slots_and_padding_are_zero);
    RUN(all_fits);
    RUN(blocks_of_threads_in_any_order);
    RUN(error_texts);
    return tkv_test_end();
}
