/*
 * Decode attention of tieredkv_cuda.cu on a GPU, or on an emulated one (cuda_on_cpu.h), against double precision on
 * decoded values. A part of test_cuda.cpp.
 *
 * The tests fill a cache of tieredkv.h and import it. The kernels and tkv_attend_reference get the same queries.
 */
#include "cuda_rig.h"

#include <algorithm>
#include <vector>

enum { MAX_QUERIES = 8 }; /* of a call */

#ifndef __CUDACC__ /* the host runs functions of the device */
/* >>unpacking: every width and plane, as K and as V, against core/tile.h */
#define N_TILES 16 /* tiles */

typedef struct packed { /* tiles of one width, as in a slot: swizzled and as they are */
    uint8_t code[N_TILES][TKVI_TILE_CODES];
    alignas(512) uint8_t unaligned[128]; /* a slot begins at a multiple of 128 */
    uint8_t swizzled[N_TILES * 256 + 512];
    uint8_t plain[N_TILES * 256 + 512];
} packed;

/* Packs tiles from a line of 128 bytes on. */
static void pack_tiles(packed *x, int width, int line, tkv_rng *rng) {
    memset(x->plain, 0, sizeof x->plain);
    for (int i = 0; i < N_TILES; i++) {
        for (int j = 0; j < TKVI_TILE_CODES; j++) x->code[i][j] = (uint8_t)tkv_rng_below(rng, 1 << width);
        tkvi_pack_tile(x->plain + 128 * line + i * TKVI_TILE_BYTES(width), width, x->code[i]);
    }
    for (size_t i = 0; i < sizeof x->plain; i++) x->swizzled[tkvcu_swizzle((uint32_t)i)] = x->plain[i];
}

/* Checks four planes of word i of a lane. They are codes at a bit. */
static void check_planes(const packed *x, const uint32_t plane[4], const int bit[4], int tile, int g, int i) {
    for (int p = 0; p < 4; p++)
        for (int byte = 0; byte < 4; byte++) {
            const int code = x->code[tile][64 * p + 4 * (2 * g + i) + byte];
            CHECK_EQ(plane[p] >> 8 * byte & 255u, (uint32_t)(code << bit[p]));
        }
}

/* Checks slabs 0 .. 3 as K. */
template <int W> static void check_k_width(const packed *x, int line) {
    constexpr int bit[4] = {tkvcu_k_bit(W, 0), tkvcu_k_bit(W, 1), tkvcu_k_bit(W, 2), tkvcu_k_bit(W, 3)};
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        tkvcu_cursor<W> path;
        tkvcu_start_cursor(path, tkvcu_shared_address(x->swizzled), 128 * (uint32_t)line, g, t);
        for (int slab = 0; slab < N_TILES / 4; slab++) {
            tkvcu_tile<W> y;
            tkvcu_load_tile(y, path, slab % 2, g / 4);
            if (slab % 2) tkvcu_advance_cursor(path);
            for (int i = 0; i < 2; i++) {
                const uint32_t plane[4] = {
                    tkvcu_take_plane<W, 0, bit[0]>(y, i), tkvcu_take_plane<W, 1, bit[1]>(y, i),
                    tkvcu_take_plane<W, 2, bit[2]>(y, i), tkvcu_take_plane<W, 3, bit[3]>(y, i)};
                check_planes(x, plane, bit, 4 * slab + t, g, i);
            }
        }
    }
}

template <int W> static tkvcu_v_path find_v_path(const packed *x, int g, int t) {
    const uint8_t *codes = W % 2 ? x->plain : x->swizzled;
    return tkvcu_find_v_path<W>(tkvcu_find_v_addresses(tkvcu_shared_address(codes), g, t), g, t);
}

/* Checks slabs 0 .. 3 as V. */
template <int W> static void check_v_width(const packed *x) {
    constexpr int bit[4] = {tkvcu_v_bit(W, 0), tkvcu_v_bit(W, 1), tkvcu_v_bit(W, 2), tkvcu_v_bit(W, 3)};
    for (int slab = 0; slab < N_TILES / 4; slab++)
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            tkvcu_tile<W> y;
            tkvcu_load_v_tile<W>(y, find_v_path<W>(x, g, t), slab, g / 4);
            for (int i = 0; i < 2; i++) {
                uint32_t plane[4];
                tkvcu_take_planes<W>(y, i, plane);
                check_planes(x, plane, bit, 4 * slab + t, g, i);
            }
        }
}

/* Checks pairs: coordinates are those of formats/r.h, and weights have the same order. */
static void check_pairs(const packed *x) {
    for (int slab = 0; slab < 2; slab++)
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            const uint32_t id[2] = {0x03020100u, 0x07060504u}; /* plane, byte */
            tkvcu_tile<3> y;
            uint32_t order[2];
            tkvcu_load_v_tile<3>(y, find_v_path<3>(x, g, t), slab, g / 4);
            tkvcu_reorder_pair_weights(id, order);
            for (int two = 0; two < 2; two++)
                for (int h = 0; h < 2; h++) {
                    uint32_t a[4], code[2];
                    for (int i = 0; i < 2; i++)
                        code[i] = two ? tkvcu_merge_pair_codes<2>(y, i) : tkvcu_merge_pair_codes<0>(y, i);
                    tkvcu_look_up_pairs(code, tkvcu_get_pair_table(h), a);
                    for (int k = 0; k < 8; k++)
                        for (int i = 0; i < 2; i++) {
                            const uint32_t place = order[k / 4] >> 8 * (k % 4) & 255u;
                            const int p = 2 * two + (int)place / 4, byte = (int)place % 4;
                            const int c = x->code[4 * slab + t][64 * p + 4 * (2 * g + i) + byte];
                            CHECK_EQ((int8_t)(a[2 * (k / 4) + i] >> 8 * (k % 4)), tkvi_r_pairs[16 * h + c]);
                        }
                }
        }
}

/* Returns how many different words of a bank 16 lanes read, at most. They are served together. */
static int count_bank_words(const uint32_t place[16]) {
    int most = 0;
    for (uint32_t bank = 0; bank < 32; bank++) {
        std::vector<uint32_t> words;
        for (int lane = 0; lane < 16; lane++)
            for (uint32_t at = place[lane] / 4; at < place[lane] / 4 + 2; at++)
                if (at % 32 == bank && std::find(words.begin(), words.end(), at) == words.end())
                    words.push_back(at);
        most = tkvi_max(most, (int)words.size());
    }
    return most;
}

/* Checks the table of unpack.h, for slabs that begin at any line. */
template <int W> static void check_banks(int swizzled, int plain) {
    int most[2] = {0, 0};
    for (int m = 0; m < 2; m++)
        for (uint32_t line = 0; line < 4; line++)
            for (int v = 0; v < 2 * (int)tkvcu_tile<W>::vectors; v++) {
                uint32_t place[16];
                for (int i = 0; i < 16; i++) {
                    const uint32_t at = 128 * line + (uint32_t)(TKVI_TILE_BYTES(W) * (i % 4)) +
                                        tkvcu_find_words(W, v / 2, 4 * (v % 2) + i / 4);
                    place[i] = m ? at : tkvcu_swizzle(at);
                }
                most[m] = tkvi_max(most[m], count_bank_words(place));
            }
    CHECK_MSG(most[0] == swizzled && most[1] == plain, "%d bits: %d and %d words of a bank", W, most[0],
              most[1]);
}

template <int W> static void check_width(tkv_rng *rng) {
    packed x;
    for (int line = 3; line >= 0; line--) {
        pack_tiles(&x, W, line, rng);
        check_k_width<W>(&x, line);
    }
    if constexpr (W != 5 && W != 6) check_v_width<W>(&x);
    if constexpr (W == 3) check_pairs(&x);
}

TEST(unpacking) {
    tkv_rng rng = tkv_rng_seed(3);
    check_width<1>(&rng);
    check_width<2>(&rng);
    check_width<3>(&rng);
    check_width<4>(&rng);
    check_width<5>(&rng);
    check_width<6>(&rng);
    check_width<8>(&rng);
    check_banks<1>(1, 1);
    check_banks<2>(1, 2);
    check_banks<3>(3, 1);
    check_banks<4>(1, 4);
    check_banks<5>(4, 1);
    check_banks<6>(2, 2);
    check_banks<8>(2, 4);
}

#endif /* __CUDACC__ */

/* >>attention */
TEST(formats) {
    static const char *const pairs[] = {"kivi4",   "kivi2",   "kivi3",     "q8",        "a40/r40",
                                        "a30/r30", "a25/r20", "a20/r10",   "a15/r10",   "a27/r40",
                                        "a35/r30", "a22/r20", "kivi4/r20", "a30/kivi2", "a20/r15"};
    size_t i;
    int dim;
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (dim = 64; dim <= 128; dim += 64) {
            if (tkv_test_quick() && (i + (size_t)dim / 64) % 2) continue;
            tkv_config cfg = config_of(dim, 8, 2);
            char name[64];
            rig r;
            cfg.tiers.archive = find_formats(pairs[i]);
            cfg.tiers.warm.k = TKV_KIVI4;
            cfg.tiers.warm.v = TKV_R40;
            if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
            append_random(&r, 0, 1100);
            append_random(&r, 1, 400);
            import_all(&r);
            snprintf(name, sizeof name, "%s, %d", pairs[i], dim);
            check_attend(&r, &plain, name);
            rig_close(&r);
        }
}

TEST(exact_formats_and_lengths) {
    static const int lengths[] = {0,  1,   3,   4,   5,   63,  64,  65,  66,  67,  68,
                                  69, 127, 128, 129, 130, 131, 132, 133, 500, 777, 1000};
    static const struct {
        tkv_format hot_k, hot_v;
        int hot, sinks, dim;
        tkv_type type;
    } row[] = {{TKV_F16, TKV_F16, TKV_UNLIMITED, 0, 128, TKV_TYPE_F32},
               {TKV_BF16, TKV_BF16, TKV_UNLIMITED, 0, 64, TKV_TYPE_F16},
               {TKV_BF16, TKV_F16, 300, 33, 128, TKV_TYPE_F16},
               {TKV_F16, TKV_BF16, 64, 0, 64, TKV_TYPE_BF16},
               {TKV_F16, TKV_F16, 1, 64, 64, TKV_TYPE_F32}};
    const size_t n = sizeof lengths / sizeof *lengths;
    size_t i, l;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        tkv_config cfg = config_of(row[i].dim, 4, 2);
        options o = plain;
        char name[64];
        rig r;
        cfg.tiers.hot.k = row[i].hot_k;
        cfg.tiers.hot.v = row[i].hot_v;
        cfg.tiers.hot_tokens = row[i].hot;
        cfg.tiers.sink_tokens = row[i].sinks;
        o.type = row[i].type;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        for (l = 0; l < n; l++) { /* the second sequence is shorter */
            append_random(&r, 0, lengths[l]);
            append_random(&r, 1, lengths[l > 3 ? l - 3 : 0]);
            import_all(&r);
            snprintf(name, sizeof name, "exact %zu, %d tokens", i, lengths[l]);
            check_attend(&r, &o, name);
        }
        rig_close(&r);
    }
}

TEST(head_groups_and_queries) {
    static const int groups[] = {1, 2, 3, 4, 8, 16};
    size_t i;
    int queries;
    for (i = 0; i < sizeof groups / sizeof *groups; i++) {
        tkv_config cfg = config_of(i % 2 ? 128 : 64, groups[i] * (i < 5 ? 2 : 1), i < 5 ? 2 : 1);
        char name[64];
        rig r;
        cfg.tiers.hot_tokens = 1; /* queries then reach into encoded blocks */
        cfg.tiers.warm_tokens = i % 2 ? 64 : TKV_OFF;
        cfg.tiers.archive.k = cfg.tiers.archive.v = i % 2 ? TKV_KIVI2 : TKV_KIVI3;
        cfg.tiers.warm.k = i % 4 == 1 ? TKV_KIVI4 : TKV_KIVI2;
        cfg.tiers.warm.v = TKV_KIVI4;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        append_random(&r, 0, 4 + 192 + 3);
        append_random(&r, 1, 4 + 64 + 1 + (int)i);
        import_all(&r);
        for (queries = 1; queries <= 8; queries++) {
            if (tkv_test_quick() && ((int)i + queries) % 3) continue;
            options o = plain;
            o.queries = queries;
            o.window = queries % 3 == 2 ? 9 : 0;
            snprintf(name, sizeof name, "%d heads, %d queries", groups[i], queries);
            check_attend(&r, &o, name);
        }
        rig_close(&r);
    }
}

TEST(options_of_a_call) {
    /* 1000 tokens: sinks to 3, archive to 771, warm to 899, then hot. Windows end in each of them, and at block
     * borders. */
    static const options row[] = {
        {0.0f, 0.0f, 600, 0, 1, TKV_TYPE_F32, NULL},    {0.0f, 0.0f, 150, 0, 3, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 30, 0, 2, TKV_TYPE_F32, NULL},     {0.0f, 0.0f, 1, 0, 4, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 998, 0, 1, TKV_TYPE_F32, NULL},    {0.0f, 0.0f, 999, 0, 8, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 932, 0, 1, TKV_TYPE_F32, NULL},    {0.0f, 0.0f, 933, 0, 1, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 5000, 0, 1, TKV_TYPE_F32, NULL},   {0.0f, 20.0f, 0, 0, 1, TKV_TYPE_F32, NULL},
        {0.0f, 5.0f, 300, 1, 4, TKV_TYPE_F16, NULL},    {0.0f, 0.0f, 0, 1, 1, TKV_TYPE_BF16, NULL},
        {0.11f, 0.0f, 0, 0, 1, TKV_TYPE_F32, NULL},     {0.01f, 0.0f, 0, 1, 2, TKV_TYPE_F32, NULL},
        {-0.05f, 3.0f, 0, 0, 1, TKV_TYPE_F32, NULL},    {-0.1f, 0.0f, 0, 0, 1, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, TKV_OFF, 0, 1, TKV_TYPE_F32, NULL}};
    size_t i;
    int has_layer_window;
    for (has_layer_window = 0; has_layer_window < 2; has_layer_window++) {
        tkv_config cfg = config_of(has_layer_window ? 128 : 64, 4, 2);
        rig r;
        if (has_layer_window)
            cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        append_random(&r, 0, 1000);
        append_random(&r, 1, has_layer_window ? 100 : 600);
        if (has_layer_window && !set_device_window(&r, 950)) return;
        import_all(&r);
        for (i = 0; i < sizeof row / sizeof *row; i++) {
            if (tkv_test_quick() && (i + (size_t)has_layer_window) % 2) continue;
            char name[64];
            snprintf(name, sizeof name, "options %zu%s", i, has_layer_window ? ", window of the layer" : "");
            check_attend(&r, &row[i], name);
        }
        rig_close(&r);
    }
}

/* Rows of the batch are sequences of the map. Skipped rows are not written. */
TEST(rows_by_map) {
    static const int32_t map[] = {3, -1, 0, 1, 9};  /* sequence 9 does not exist */
    static const int length[] = {333, 0, 0, 70, 0}; /* too short to learn tables: KIVI */
    tkv_config cfg = config_of(64, 6, 2);
    options o = plain;
    uint32_t flags = 0;
    size_t i, s;
    rig r;
    cfg.limits.max_seqs = 5;
    cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI4;
    o.map = map;
    o.queries = 2;
    if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
    for (s = 0; s < 5; s++) append_random(&r, (int)s, length[s]);
    import_all(&r);
    {
        static const int32_t known[] = {3, -1, 0, 1, -7};
        o.map = known;
        check_attend(&r, &o, "map");
        CHECK_EQ(tkvcu_get_flags(r.cu, &flags, 1, NULL), TKV_OK);
        CHECK_EQ(flags, 0);
    }
    o.map = map;
    {
        const result x = attend_both(&r, &(const options &)plain, 5);
        for (i = 0; i < 2 * x.row; i++) CHECK_MSG(i >= x.row || x.out[i] != UNWRITTEN, "%zu", i);
        for (i = x.row; i < 2 * x.row; i++) CHECK_EQ(x.out[i], 0.0f); /* empty sequence: zeros */
        for (i = 0; i < 6; i++) CHECK(x.lse[6 + i] == -INFINITY);
    }
    check_skipped_rows(&r, map, 2);
    rig_close(&r);
}

/* The host learns tables during the appends. Neighbouring blocks then use different table versions. */
TEST(table_versions) {
    static const char *const presets[] = {"balanced", "compact", "extreme"};
    int i;
    for (i = 0; i < 3; i++) {
        tkv_config cfg = config_of(i == 1 ? 64 : 128, 4, 2);
        rig r;
        CHECK_EQ(tkv_apply_preset(&cfg, presets[i]), TKV_OK);
        cfg.tiers.warm_tokens = 256;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        append_random(&r, 0, 3000);
        import_all(&r);
        CHECK_MSG(count_version_changes(&r) > 0, "all blocks have one version");
        check_attend(&r, &plain, presets[i]);
        rig_close(&r);
    }
}

TEST(same_bits_in_any_order) {
    static const int processors[] = {1, 3, 17, 132};
    tkv_config cfg = config_of(128, 8, 2);
    rig r;
    if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
    append_random(&r, 0, 900);
    append_random(&r, 1, 600);
    check_same_bits(&r, &plain, processors, sizeof processors / sizeof *processors, 1, 7);
    rig_close(&r);
}

/* Large and tiny values, although operands have 16 bits. The scale keeps logits in range. */
TEST(large_and_tiny_values) {
    static const char *const pairs[] = {"kivi4/kivi4", "kivi2/kivi2", "a30/r30", "a30/kivi4", "a20/r20"};
    static const float sizes[][2] = {{1e3f, 1e3f}, {1e3f, 1.0f}, {1.0f, 2e4f}, {1e-4f, 1e-4f}, {1.0f, 1e-3f}};
    size_t i, k;
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            tkv_config cfg = config_of(i % 2 ? 128 : 64, 4, 2);
            options o = plain;
            char name[64];
            rig r;
            cfg.tiers.warm = cfg.tiers.archive = find_formats(pairs[i]);
            if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
            r.k_size = sizes[k][0];
            r.v_size = sizes[k][1];
            append_random(&r, 0, 700);
            import_all(&r);
            o.scale = 0.1f / r.k_size;
            snprintf(name, sizeof name, "%s, K %g, V %g", pairs[i], (double)r.k_size, (double)r.v_size);
            check_attend(&r, &o, name);
            rig_close(&r);
        }
}

TEST(lone_keys) { check_lone_keys(MAX_QUERIES, 2); }

/* Windows that end at a block border: one query sees no key of a block that another query sees. With and without
 * a soft cap, which changes the unit of logits. */
TEST(blocks_that_only_one_query_sees) {
    static const char *const formats[] = {"kivi4", "a30"};
    size_t i;
    int window, capped;
    for (i = 0; i < 2; i++) {
        tkv_config cfg = config_of(64, 8, 2);
        rig r;
        cfg.tiers.warm.k = cfg.tiers.archive.k = find_format(formats[i]);
        cfg.tiers.warm.v = cfg.tiers.archive.v = i ? TKV_R30 : TKV_KIVI4;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        append_random(&r, 0, 1100);
        import_all(&r);
        for (window = 517; window <= 521; window++)
            for (capped = 0; capped < 2; capped++) {
                options o = plain;
                char name[64];
                o.window = window;
                o.queries = window % 2 ? 3 : 8;
                o.softcap = capped ? 30.0f : 0.0f;
                snprintf(name, sizeof name, "%s, window %d, soft cap %d", formats[i], window, capped);
                check_attend(&r, &o, name);
            }
        rig_close(&r);
    }
}

/* Query heads of different size. The query heads of a KV head are columns of one product. A large, infinite or NaN
 * query must not change the results of the others. */
TEST(query_heads_of_different_size) {
    static const char *const formats[] = {"kivi4", "kivi2", "a30", "q8"};
    enum { DIM = 128, HEADS = 4, LEN = 620 };
    size_t i;
    int kind, c;
    for (i = 0; i < sizeof formats / sizeof *formats; i++) {
        tkv_config cfg = config_of(DIM, HEADS, 1);
        std::vector<float> k(LEN * DIM), v(LEN * DIM), q(HEADS * DIM), out(HEADS * DIM), want(HEADS * DIM);
        tkv_attend_params a;
        rig r;
        cfg.limits.max_seqs = 1;
        cfg.limits.max_append = LEN;
        cfg.tiers.warm.k = cfg.tiers.archive.k = find_format(formats[i]);
        cfg.tiers.warm.v = cfg.tiers.archive.v = TKV_R40;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        tkv_rng_fill(&r.rng, k.data(), k.size(), 1.0);
        tkv_rng_fill(&r.rng, v.data(), v.size(), 1.0);
        for (c = 5; c < LEN * DIM; c += DIM) k[(size_t)c] *= 30.0f; /* a channel that one head reads */
        CHECK_EQ(tkv_append(r.kv, 0, 0, k.data(), v.data(), LEN), TKV_OK);
        import_all(&r);
        memset(&a, 0, sizeof a);
        a.n = 1;
        a.q = q.data();
        a.out = want.data();
        a.window = TKV_OFF;
        for (kind = 0; kind < 5; kind++) {
            tkv_rng_fill(&r.rng, q.data(), q.size(), 2.0);
            for (c = 0; c < HEADS; c++) q[(size_t)(c * DIM + 5)] = c ? 0.0f : 3.0f;
            for (c = 0; c < DIM; c++) {
                if (kind == 1) q[(size_t)c] *= 1e-30f;
                if (kind == 2) q[(size_t)c] *= 1e6f;
            }
            CHECK_EQ(tkv_attend_reference(r.kv, &a), TKV_OK);
            if (kind == 3) q[3] = INFINITY;
            if (kind == 4) q[7] = NAN;
            CHECK_EQ(attend_on_device(&r, q.data(), TKV_TYPE_F32, 1, NULL, out.data(), NULL, NULL), TKV_OK);
            for (c = 0; c < DIM; c++)
                CHECK_MSG((out[(size_t)c] == out[(size_t)c]) == (kind < 3), "%s, %d", formats[i], kind);
            for (c = kind >= 2 ? 1 : 0; c < HEADS; c++) {
                const std::vector<float> x(want.begin() + c * DIM, want.begin() + (c + 1) * DIM);
                const std::vector<float> y(out.begin() + c * DIM, out.begin() + (c + 1) * DIM);
                CHECK_MSG(relative_error(x, y, DIM) <= 3e-3, "%s, %d, head %d: %g", formats[i], kind, c,
                          relative_error(x, y, DIM));
            }
        }
        rig_close(&r);
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
#ifndef __CUDACC__
    RUN(unpacking);
#endif
    RUN(formats);
    RUN(exact_formats_and_lengths);
    RUN(head_groups_and_queries);
    RUN(options_of_a_call);
    RUN(rows_by_map);
    RUN(table_versions);
    RUN(same_bits_in_any_order);
    RUN(large_and_tiny_values);
    RUN(lone_keys);
    RUN(blocks_that_only_one_query_sees);
    RUN(query_heads_of_different_size);
    return tkv_test_end();
}
