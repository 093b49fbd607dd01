/*
 * Attention of many queries by tieredkv_cuda.cu on a processor (cuda_on_cpu.h), against double precision on the decoded
 * values, as in test_cuda_attend.cpp.
 *
 *     g++ -std=c++17 -O1 tests/test_cuda_prefill.cpp -o test_cuda_prefill -lm
 */
#define RIG_QUERIES 64
#include "cuda_rig.h"

static options many(int queries) {
    options o = plain;
    o.queries = queries;
    return o;
}

static void name_formats(tkv_config *cfg, const char *pair) { /* "k/v", or one for both */
    char k[16];
    const char *v = strchr(pair, '/');
    snprintf(k, sizeof k, "%s", pair);
    if (v) *strchr(k, '/') = 0;
    cfg->archive.k = tkv_format_from_name(k);
    cfg->archive.v = tkv_format_from_name(v ? v + 1 : k);
}

TEST(formats) {
    static const char *const pairs[] = {"kivi4",   "kivi2",   "kivi3",     "q8",        "a40/r40",
                                        "a30/r30", "a25/r20", "a20/r10",   "a15/r10",   "a27/r40",
                                        "a35/r30", "a22/r20", "kivi4/r20", "a30/kivi2", "a20/r15"};
    size_t i;
    int dim;
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (dim = 64; dim <= 128; dim += 64) {
            if (tkv_test_quick() && (i + (size_t)dim / 64) % 2) continue;
            tkv_config cfg = config_of(dim, 2, 2);
            const options o = many(9 + (int)i);
            char name[64];
            rig r;
            cfg.max_seqs = 1;
            cfg.warm.k = i % 2 ? TKV_KIVI4 : TKV_A40;
            cfg.warm.v = i % 2 ? TKV_R40 : TKV_KIVI3;
            name_formats(&cfg, pairs[i]);
            if (!rig_open(&r, &cfg)) return;
            fill(&r, 0, 640);
            import_all(&r);
            snprintf(name, sizeof name, "%s, %d", pairs[i], dim);
            measure(&r, &o, name);
            rig_close(&r);
        }
}

/* Rows of one warp to those of many blocks; the second sequence is shorter than most chunks of queries. */
TEST(groups_and_queries) {
    static const int groups[] = {1, 2, 4, 7, 16}, queries[] = {9, 16, 33, 64};
    size_t i, k;
    for (i = 0; i < sizeof groups / sizeof *groups; i++) {
        tkv_config cfg = config_of(i % 2 ? 128 : 64, groups[i] * (i < 4 ? 2 : 1), i < 4 ? 2 : 1);
        rig r;
        cfg.hot_tokens = 1; /* so that queries reach into coded blocks */
        cfg.warm_tokens = i % 2 ? 64 : TKV_NONE;
        cfg.archive.k = cfg.archive.v = i % 2 ? TKV_KIVI2 : TKV_KIVI3;
        cfg.warm.k = cfg.warm.v = TKV_KIVI4;
        if (!rig_open(&r, &cfg)) return;
        fill(&r, 0, 4 + 128 + 3);
        fill(&r, 1, 4 + 7 * (int)i);
        import_all(&r);
        for (k = 0; k < sizeof queries / sizeof *queries; k++) {
            if (tkv_test_quick() && (i + k) % 2) continue;
            options o = many(queries[k]);
            char name[64];
            o.window = k % 2 ? 0 : 9;
            o.sinks = k == 3;
            snprintf(name, sizeof name, "%d heads, %d queries", groups[i], queries[k]);
            measure(&r, &o, name);
        }
        rig_close(&r);
    }
}

TEST(exact_and_lengths) {
    static const int lengths[] = {0, 1, 5, 31, 32, 36, 37, 64, 68, 100, 133, 260};
    static const struct {
        tkv_format hot_k, hot_v;
        int hot, sinks, dim;
        tkv_type type;
    } row[] = {{TKV_F16, TKV_F16, TKV_ALL, 0, 128, TKV_TYPE_F32},
               {TKV_BF16, TKV_BF16, TKV_ALL, 0, 64, TKV_TYPE_F16},
               {TKV_BF16, TKV_F16, 100, 33, 128, TKV_TYPE_F16},
               {TKV_F16, TKV_BF16, 64, 4, 64, TKV_TYPE_BF16}};
    size_t i, l;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        tkv_config cfg = config_of(row[i].dim, 2, 1);
        options o = many(9);
        char name[64];
        rig r;
        cfg.hot.k = row[i].hot_k;
        cfg.hot.v = row[i].hot_v;
        cfg.hot_tokens = row[i].hot;
        cfg.sink_tokens = row[i].sinks;
        cfg.warm.k = cfg.warm.v = cfg.archive.k = cfg.archive.v = TKV_KIVI4;
        o.type = row[i].type;
        if (!rig_open(&r, &cfg)) return;
        for (l = 0; l < sizeof lengths / sizeof *lengths; l++) { /* ragged: the second is behind */
            fill(&r, 0, lengths[l]);
            fill(&r, 1, lengths[l > 3 ? l - 3 : 0]);
            import_all(&r);
            snprintf(name, sizeof name, "exact %zu, %d tokens", i, lengths[l]);
            measure(&r, &o, name);
        }
        rig_close(&r);
    }
}

TEST(options_of_a_call) {
    /* 600 tokens: sinks .. 3, archive .. 387, warm .. 515, hot; the edges in each of them, and of blocks */
    static const options row[] = {
        {0.0f, 0.0f, 300, 0, 12, TKV_TYPE_F32, NULL},    {0.0f, 0.0f, 150, 0, 40, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 30, 0, 64, TKV_TYPE_F32, NULL},     {0.0f, 0.0f, 1, 0, 9, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 588, 0, 10, TKV_TYPE_F32, NULL},    {0.0f, 0.0f, 532, 0, 10, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 531, 0, 10, TKV_TYPE_F32, NULL},    {0.0f, 0.0f, 5000, 0, 9, TKV_TYPE_F32, NULL},
        {0.0f, 20.0f, 0, 0, 9, TKV_TYPE_F32, NULL},      {0.0f, 5.0f, 200, 1, 33, TKV_TYPE_F16, NULL},
        {0.0f, 0.0f, 0, 1, 9, TKV_TYPE_BF16, NULL},      {0.11f, 0.0f, 0, 0, 9, TKV_TYPE_F32, NULL},
        {-0.05f, 3.0f, 0, 0, 9, TKV_TYPE_F32, NULL},     {-0.1f, 0.0f, 0, 0, 9, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, TKV_NONE, 0, 9, TKV_TYPE_F32, NULL}};
    size_t i;
    int own;
    for (own = 0; own < 2; own++) {
        tkv_config cfg = config_of(own ? 128 : 64, 4, 2);
        rig r;
        cfg.max_seqs = 1;
        if (own) cfg.warm.k = cfg.warm.v = cfg.archive.k = cfg.archive.v = TKV_KIVI2;
        if (!rig_open(&r, &cfg)) return;
        fill(&r, 0, 600);
        if (own) { /* the layer's window is the device's alone: the host would drop blocks */
            device_close(&r);
            cfg.window = r.cfg.window = 550;
            if (!device_open(&r, &cfg)) return;
        }
        import_all(&r);
        for (i = 0; i < sizeof row / sizeof *row; i++) {
            char name[64];
            if (own && i % 3) continue;
            snprintf(name, sizeof name, "options %zu%s", i, own ? ", window of the layer" : "");
            measure(&r, &row[i], name);
        }
        rig_close(&r);
    }
}

/* Rows of the batch are sequences as the map says; nothing is written for those that are skipped. */
TEST(rows_by_map) {
    static const int32_t map[] = {3, -1, 0, 1, 9}, known[] = {3, -1, 0, 1, -7}; /* there is no 9 */
    static const int length[] = {233, 0, 0, 70, 0}; /* nothing learns so early: KIVI */
    const size_t row = 11 * 6 * 64;
    tkv_config cfg = config_of(64, 6, 2);
    std::vector<float> q(5 * row, 1.0f), out(q.size(), UNWRITTEN), lse(5 * 11 * 6, UNWRITTEN);
    options o = many(11);
    uint32_t word = 0;
    size_t i, s;
    rig r;
    cfg.max_seqs = 5;
    cfg.warm.k = cfg.warm.v = cfg.archive.k = cfg.archive.v = TKV_KIVI4;
    o.map = known;
    if (!rig_open(&r, &cfg)) return;
    for (s = 0; s < 5; s++) fill(&r, (int)s, length[s]);
    import_all(&r);
    measure(&r, &o, "map");
    CHECK_EQ(tkvcu_status(r.cu, &word, 1, NULL), TKV_OK);
    CHECK_EQ(word, 0);
    CHECK_EQ(tkvcu_attend(r.cu, 0, q.data(), TKV_TYPE_F32, 11, NULL, out.data(), lse.data(), map, NULL),
             TKV_OK);
    for (i = 0; i < out.size(); i++) {
        const int skipped = map[i / row] < 0 || map[i / row] > 4;
        CHECK_MSG((out[i] == UNWRITTEN) == skipped, "element %zu of out is %g", i, (double)out[i]);
        CHECK_EQ(lse[i / 64] == UNWRITTEN, skipped);
    }
    CHECK_EQ(tkvcu_status(r.cu, &word, 0, NULL), TKV_OK);
    CHECK_EQ(word, TKVCU_WORD_SEQUENCE);
    rig_close(&r);
}

/* The host learns tables on the way: neighbouring blocks are coded by different ones. */
TEST(table_versions) {
    tkv_config cfg = config_of(128, 2, 2);
    const options o = many(10);
    const tkvcu_view *v;
    int b, changes = 0;
    rig r;
    CHECK_EQ(tkv_config_preset(&cfg, "extreme"), TKV_OK);
    cfg.warm_tokens = 256;
    cfg.max_seqs = 1;
    if (!rig_open(&r, &cfg)) return;
    fill(&r, 0, 2300);
    import_all(&r);
    v = tkvcu_view_of(r.cu, 0);
    for (b = 1; b < v->list[0].archive + v->list[0].warm; b++) changes += v->version[b] != v->version[b - 1];
    CHECK_MSG(changes > 0, "all blocks have one version");
    measure(&r, &o, "extreme");
    rig_close(&r);
}

/* The last 8 of many queries, by the kernel for so many. */
TEST(as_the_other_kernel) {
    static const char *const pairs[] = {"kivi4", "a25/r20"};
    size_t i, k;
    for (i = 0; i < 2; i++) {
        tkv_config cfg = config_of(64, 8, 2);
        const int last = 8, queries = 40, row = 8 * 64;
        std::vector<float> q((size_t)(2 * queries * row)), part, out(q.size()), few((size_t)(2 * last * row));
        rig r;
        name_formats(&cfg, pairs[i]);
        if (!rig_open(&r, &cfg)) return;
        fill(&r, 0, 700);
        fill(&r, 1, 90);
        import_all(&r);
        tkv_rng_fill(&r.rng, q.data(), q.size(), 1.0);
        for (k = 0; k < 2; k++)
            part.insert(part.end(), q.begin() + (long)((k + 1) * queries - last) * row,
                        q.begin() + (long)((k + 1) * queries) * row);
        CHECK_EQ(tkvcu_attend(r.cu, 0, q.data(), TKV_TYPE_F32, queries, NULL, out.data(), NULL, NULL, NULL),
                 TKV_OK);
        CHECK_EQ(tkvcu_attend(r.cu, 0, part.data(), TKV_TYPE_F32, last, NULL, few.data(), NULL, NULL, NULL),
                 TKV_OK);
        part.clear();
        for (k = 0; k < 2; k++)
            part.insert(part.end(), out.begin() + (long)((k + 1) * queries - last) * row,
                        out.begin() + (long)((k + 1) * queries) * row);
        CHECK_LE(distance(few, part, 64), 2 * 3e-3);
        rig_close(&r);
    }
}

/* A device gives the same bits always, whatever the order of its threads; another number of multiprocessors cuts the
 * work elsewhere. */
TEST(same_bits) {
    static const int processors[] = {1, 7, 132};
    const int usual = cpu_processors;
    tkv_config cfg = config_of(128, 8, 2);
    const options o = many(20);
    std::vector<float> first;
    size_t i;
    rig r;
    if (!rig_open(&r, &cfg)) return;
    fill(&r, 0, 560);
    fill(&r, 1, 70);
    for (i = 0; i < sizeof processors / sizeof *processors; i++) {
        if (tkv_test_quick() && i % 2) continue;
        result a, b;
        char name[64];
        device_close(&r);
        cpu_processors = processors[i];
        if (!device_open(&r, &cfg)) break;
        import_all(&r);
        snprintf(name, sizeof name, "%d multiprocessors", processors[i]);
        measure(&r, &o, name);
        r.no_reference = 1;
        a = attend(&r, &o, 5);
        setenv("TKVCU_ORDER", "1", 1);
        b = attend(&r, &o, 5);
        unsetenv("TKVCU_ORDER");
        r.no_reference = 0;
        CHECK(memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)) == 0 && a.lse == b.lse);
        if (i == 0) first = a.out;
        CHECK_MSG(distance(first, a.out, 128) <= 2e-3, "%s: %g", name, distance(first, a.out, 128));
    }
    cpu_processors = usual;
    rig_close(&r);
}

/* Large and tiny values: tiles are halves. Logits are brought back by the scale. */
TEST(sizes_of_values) {
    static const char *const pairs[] = {"kivi4", "kivi2", "a30/r30", "a30/kivi4", "a20/r20"};
    static const float sizes[][3] = {{1e3f, 1e3f, 1.0f},   {1e3f, 1.0f, 1e3f},    {1.0f, 2e4f, 1.0f},
                                     {1e-4f, 1e-4f, 1.0f}, {1.0f, 1e-3f, 1e-20f}, {1.0f, 1.0f, 3e30f}};
    size_t i, k;
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            tkv_config cfg = config_of(i % 2 ? 128 : 64, 1, 1);
            options o = many(9);
            char name[64];
            rig r;
            cfg.max_seqs = 1;
            name_formats(&cfg, pairs[i]);
            cfg.warm = cfg.archive;
            if (k > 3) cfg.hot.k = cfg.hot.v = TKV_BF16;
            if (!rig_open(&r, &cfg)) return;
            r.k_size = sizes[k][0];
            r.v_size = sizes[k][1];
            fill(&r, 0, 580);
            import_all(&r);
            o.q_size = sizes[k][2];
            o.scale = 0.1f / r.k_size / o.q_size;
            snprintf(name, sizeof name, "%s, K %g, V %g, q %g", pairs[i], (double)r.k_size, (double)r.v_size,
                     (double)o.q_size);
            measure(&r, &o, name);
            rig_close(&r);
        }
}

/* A prompt comes in chunks; the launches were captured while the cache was empty. */
TEST(a_prompt_in_chunks) {
    enum { CHUNK = 64, DIM = 64, HEADS = 4, KV = 2 };
    tkv_config cfg = config_of(DIM, HEADS, KV);
    std::vector<float> k(CHUNK * KV * DIM), v(k.size()), q(CHUNK * HEADS * DIM), out(q.size()),
        want(q.size());
    std::vector<float> lse(CHUNK * HEADS), lse_want(lse.size());
    tkv_attend_params a;
    cudaGraph_t graph;
    int i;
    rig r;
    cfg.max_seqs = 1;
    cfg.warm_tokens = 64;
    cfg.warm.k = cfg.warm.v = TKV_KIVI4; /* no tables: the host would learn others */
    cfg.archive.k = cfg.archive.v = TKV_KIVI2;
    if (!rig_open(&r, &cfg)) return;
    CHECK_EQ(cudaStreamBeginCapture(NULL, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    CHECK_EQ(tkvcu_append(r.cu, 0, k.data(), v.data(), TKV_TYPE_F32, CHUNK, NULL, NULL), TKV_OK);
    CHECK_EQ(tkvcu_attend(r.cu, 0, q.data(), TKV_TYPE_F32, CHUNK, NULL, out.data(), lse.data(), NULL, NULL),
             TKV_OK);
    CHECK_EQ(cudaStreamEndCapture(NULL, &graph), cudaSuccess);
    memset(&a, 0, sizeof a);
    a.n = CHUNK;
    a.q = q.data();
    a.out = want.data();
    a.lse = lse_want.data();
    for (i = 0; i < 6; i++) {
        tkv_rng_fill(&r.rng, k.data(), k.size(), 1.0);
        tkv_rng_fill(&r.rng, v.data(), v.size(), 1.0);
        tkv_rng_fill(&r.rng, q.data(), q.size(), 1.0);
        CHECK_EQ(tkv_append(r.kv, 0, 0, k.data(), v.data(), CHUNK), TKV_OK);
        CHECK_EQ(cudaGraphLaunch(graph, NULL), cudaSuccess);
        CHECK_EQ(tkv_attend_reference(r.kv, &a), TKV_OK);
        CHECK_LE(distance(want, out, DIM), 3e-3);
        CHECK_LE(distance(lse_want, lse, CHUNK * HEADS), 3e-3);
    }
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    rig_close(&r);
}

/* Keys that are all alike have scales of 0. */
TEST(flat_keys) {
    static const char *const formats[] = {"kivi4", "q8", "a30"};
    size_t i;
    for (i = 0; i < sizeof formats / sizeof *formats; i++) {
        tkv_config cfg = config_of(128, 4, 2);
        std::vector<float> k(600 * 256, 0.5f), v(600 * 256);
        options o = plain;
        rig r;
        cfg.max_seqs = 1;
        cfg.max_append = 600;
        cfg.warm.k = cfg.archive.k = tkv_format_from_name(formats[i]);
        cfg.warm.v = cfg.archive.v = TKV_KIVI4;
        if (!rig_open(&r, &cfg)) return;
        tkv_rng_fill(&r.rng, v.data(), v.size(), 1.0);
        CHECK_EQ(tkv_append(r.kv, 0, 0, k.data(), v.data(), 600), TKV_OK);
        import_all(&r);
        o.queries = 12;
        measure(&r, &o, formats[i]);
        rig_close(&r);
    }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(formats);
    RUN(groups_and_queries);
    RUN(exact_and_lengths);
    RUN(options_of_a_call);
    RUN(rows_by_map);
    RUN(table_versions);
    RUN(as_the_other_kernel);
    RUN(same_bits);
    RUN(sizes_of_values);
    RUN(flat_keys);
    RUN(a_prompt_in_chunks);
    return tkv_test_end();
}
