/*
 * Prefill attention of tieredkv_cuda.cu (9 to 64 queries), against double precision on decoded values, as in
 * cuda_attend.cpp. A part of test_cuda.cpp.
 */
#include "cuda_rig.h"

enum { MAX_QUERIES = 64 }; /* of a call */

static options options_with_queries(int queries) {
    options o = plain;
    o.queries = queries;
    return o;
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
            const options o = options_with_queries(9 + (int)i);
            char name[64];
            rig r;
            cfg.limits.max_seqs = 1;
            cfg.tiers.warm.k = i % 2 ? TKV_KIVI4 : TKV_A40;
            cfg.tiers.warm.v = i % 2 ? TKV_R40 : TKV_KIVI3;
            cfg.tiers.archive = find_formats(pairs[i]);
            if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
            append_random(&r, 0, 640);
            import_all(&r);
            snprintf(name, sizeof name, "%s, %d", pairs[i], dim);
            check_attend(&r, &o, name);
            rig_close(&r);
        }
}

/* Rows for one warp up to several thread blocks. The second sequence is shorter than most chunks
 * of queries. */
TEST(head_groups_and_queries) {
    static const int groups[] = {1, 2, 4, 7, 16}, queries[] = {9, 16, 33, 64};
    size_t i, k;
    for (i = 0; i < sizeof groups / sizeof *groups; i++) {
        tkv_config cfg = config_of(i % 2 ? 128 : 64, groups[i] * (i < 4 ? 2 : 1), i < 4 ? 2 : 1);
        rig r;
        cfg.tiers.hot_tokens = 1; /* queries then reach into encoded blocks */
        cfg.tiers.warm_tokens = i % 2 ? 64 : TKV_OFF;
        cfg.tiers.archive.k = cfg.tiers.archive.v = i % 2 ? TKV_KIVI2 : TKV_KIVI3;
        cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        append_random(&r, 0, 4 + 128 + 3);
        append_random(&r, 1, 4 + 7 * (int)i);
        import_all(&r);
        for (k = 0; k < sizeof queries / sizeof *queries; k++) {
            if (tkv_test_quick() && (i + k) % 2) continue;
            options o = options_with_queries(queries[k]);
            char name[64];
            o.window = k % 2 ? 0 : 9;
            o.sinks = k == 3;
            snprintf(name, sizeof name, "%d heads, %d queries", groups[i], queries[k]);
            check_attend(&r, &o, name);
        }
        rig_close(&r);
    }
}

TEST(exact_formats_and_lengths) {
    static const int lengths[] = {0, 1, 5, 31, 32, 36, 37, 64, 68, 100, 133, 260};
    static const struct {
        tkv_format hot_k, hot_v;
        int hot, sinks, dim;
        tkv_type type;
    } row[] = {{TKV_F16, TKV_F16, TKV_UNLIMITED, 0, 128, TKV_TYPE_F32},
               {TKV_BF16, TKV_BF16, TKV_UNLIMITED, 0, 64, TKV_TYPE_F16},
               {TKV_BF16, TKV_F16, 100, 33, 128, TKV_TYPE_F16},
               {TKV_F16, TKV_BF16, 64, 4, 64, TKV_TYPE_BF16}};
    size_t i, l;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        tkv_config cfg = config_of(row[i].dim, 2, 1);
        options o = options_with_queries(9);
        char name[64];
        rig r;
        cfg.tiers.hot.k = row[i].hot_k;
        cfg.tiers.hot.v = row[i].hot_v;
        cfg.tiers.hot_tokens = row[i].hot;
        cfg.tiers.sink_tokens = row[i].sinks;
        cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI4;
        o.type = row[i].type;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        for (l = 0; l < sizeof lengths / sizeof *lengths; l++) { /* the second sequence is shorter */
            append_random(&r, 0, lengths[l]);
            append_random(&r, 1, lengths[l > 3 ? l - 3 : 0]);
            import_all(&r);
            snprintf(name, sizeof name, "exact %zu, %d tokens", i, lengths[l]);
            check_attend(&r, &o, name);
        }
        rig_close(&r);
    }
}

TEST(options_of_a_call) {
    /* 600 tokens: sinks to 3, archive to 387, warm to 515, then hot. Windows end in each of them, and at block
     * borders. */
    static const options row[] = {
        {0.0f, 0.0f, 300, 0, 12, TKV_TYPE_F32, NULL},   {0.0f, 0.0f, 150, 0, 40, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 30, 0, 64, TKV_TYPE_F32, NULL},    {0.0f, 0.0f, 1, 0, 9, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 588, 0, 10, TKV_TYPE_F32, NULL},   {0.0f, 0.0f, 532, 0, 10, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, 531, 0, 10, TKV_TYPE_F32, NULL},   {0.0f, 0.0f, 5000, 0, 9, TKV_TYPE_F32, NULL},
        {0.0f, 20.0f, 0, 0, 9, TKV_TYPE_F32, NULL},     {0.0f, 5.0f, 200, 1, 33, TKV_TYPE_F16, NULL},
        {0.0f, 0.0f, 0, 1, 9, TKV_TYPE_BF16, NULL},     {0.11f, 0.0f, 0, 0, 9, TKV_TYPE_F32, NULL},
        {-0.05f, 3.0f, 0, 0, 9, TKV_TYPE_F32, NULL},    {-0.1f, 0.0f, 0, 0, 9, TKV_TYPE_F32, NULL},
        {0.0f, 0.0f, TKV_OFF, 0, 9, TKV_TYPE_F32, NULL}};
    size_t i;
    int has_layer_window;
    for (has_layer_window = 0; has_layer_window < 2; has_layer_window++) {
        tkv_config cfg = config_of(has_layer_window ? 128 : 64, 4, 2);
        rig r;
        cfg.limits.max_seqs = 1;
        if (has_layer_window)
            cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        append_random(&r, 0, 600);
        if (has_layer_window && !set_device_window(&r, 550)) return;
        import_all(&r);
        for (i = 0; i < sizeof row / sizeof *row; i++) {
            char name[64];
            if (has_layer_window && i % 3) continue;
            snprintf(name, sizeof name, "options %zu%s", i, has_layer_window ? ", window of the layer" : "");
            check_attend(&r, &row[i], name);
        }
        rig_close(&r);
    }
}

/* Rows of the batch are sequences of the map. Skipped rows are not written. */
TEST(rows_by_map) {
    static const int32_t map[] = {3, -1, 0, 1, 9},
                         known[] = {3, -1, 0, 1, -7}; /* sequence 9 does not exist */
    static const int length[] = {233, 0, 0, 70, 0};   /* too short to learn tables: KIVI */
    tkv_config cfg = config_of(64, 6, 2);
    options o = options_with_queries(11);
    uint32_t flags = 0;
    int s;
    rig r;
    cfg.limits.max_seqs = 5;
    cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI4;
    o.map = known;
    if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
    for (s = 0; s < 5; s++) append_random(&r, s, length[s]);
    import_all(&r);
    check_attend(&r, &o, "map");
    CHECK_EQ(tkvcu_get_flags(r.cu, &flags, 1, NULL), TKV_OK);
    CHECK_EQ(flags, 0);
    check_skipped_rows(&r, map, 11);
    rig_close(&r);
}

/* The host learns tables during the appends. Neighbouring blocks then use different table versions. */
TEST(table_versions) {
    tkv_config cfg = config_of(128, 2, 2);
    const options o = options_with_queries(10);
    rig r;
    CHECK_EQ(tkv_apply_preset(&cfg, "extreme"), TKV_OK);
    cfg.tiers.warm_tokens = 256;
    cfg.limits.max_seqs = 1;
    if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
    append_random(&r, 0, 2300);
    import_all(&r);
    CHECK_MSG(count_version_changes(&r) > 0, "all blocks have one version");
    check_attend(&r, &o, "extreme");
    rig_close(&r);
}

/* The last 8 of 40 queries give the same result in a call of their own, with the decode kernel. */
TEST(same_as_decode_kernel) {
    static const char *const pairs[] = {"kivi4", "a25/r20"};
    size_t i, k;
    for (i = 0; i < 2; i++) {
        tkv_config cfg = config_of(64, 8, 2);
        const int last = 8, queries = 40, row = 8 * 64;
        std::vector<float> q((size_t)(2 * queries * row)), part, out(q.size()),
            decode_out((size_t)(2 * last * row));
        rig r;
        cfg.tiers.archive = find_formats(pairs[i]);
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        append_random(&r, 0, 700);
        append_random(&r, 1, 90);
        import_all(&r);
        tkv_rng_fill(&r.rng, q.data(), q.size(), 1.0);
        for (k = 0; k < 2; k++)
            part.insert(part.end(), q.begin() + (long)((k + 1) * queries - last) * row,
                        q.begin() + (long)((k + 1) * queries) * row);
        CHECK_EQ(attend_on_device(&r, q.data(), TKV_TYPE_F32, queries, NULL, out.data(), NULL, NULL), TKV_OK);
        CHECK_EQ(attend_on_device(&r, part.data(), TKV_TYPE_F32, last, NULL, decode_out.data(), NULL, NULL),
                 TKV_OK);
        part.clear();
        for (k = 0; k < 2; k++)
            part.insert(part.end(), out.begin() + (long)((k + 1) * queries - last) * row,
                        out.begin() + (long)((k + 1) * queries) * row);
        CHECK_LE(relative_error(decode_out, part, 64), 2 * 3e-3);
        rig_close(&r);
    }
}

TEST(same_bits_in_any_order) {
    static const int processors[] = {1, 7, 132};
    tkv_config cfg = config_of(128, 8, 2);
    const options o = options_with_queries(20);
    rig r;
    if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
    append_random(&r, 0, 560);
    append_random(&r, 1, 70);
    check_same_bits(&r, &o, processors, sizeof processors / sizeof *processors, tkv_test_quick() ? 2 : 1, 5);
    rig_close(&r);
}

/* Large and tiny values, although the tiles are fp16. The scale keeps logits in range. */
TEST(large_and_tiny_values) {
    static const char *const pairs[] = {"kivi4", "kivi2", "a30/r30", "a30/kivi4", "a20/r20"};
    static const float sizes[][3] = {{1e3f, 1e3f, 1.0f},   {1e3f, 1.0f, 1e3f},    {1.0f, 2e4f, 1.0f},
                                     {1e-4f, 1e-4f, 1.0f}, {1.0f, 1e-3f, 1e-20f}, {1.0f, 1.0f, 3e30f}};
    size_t i, k;
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            tkv_config cfg = config_of(i % 2 ? 128 : 64, 1, 1);
            options o = options_with_queries(9);
            char name[64];
            rig r;
            cfg.limits.max_seqs = 1;
            cfg.tiers.archive = find_formats(pairs[i]);
            cfg.tiers.warm = cfg.tiers.archive;
            if (k > 3) cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_BF16;
            if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
            r.k_size = sizes[k][0];
            r.v_size = sizes[k][1];
            append_random(&r, 0, 580);
            import_all(&r);
            o.q_size = sizes[k][2];
            o.scale = 0.1f / r.k_size / o.q_size;
            snprintf(name, sizeof name, "%s, K %g, V %g, q %g", pairs[i], (double)r.k_size, (double)r.v_size,
                     (double)o.q_size);
            check_attend(&r, &o, name);
            rig_close(&r);
        }
}

/* A prompt in chunks. The launches are captured while the cache is empty. */
TEST(a_prompt_in_chunks) {
    enum { CHUNK = 64, DIM = 64, HEADS = 4, KV = 2 };
    tkv_config cfg = config_of(DIM, HEADS, KV);
    std::vector<float> k(CHUNK * KV * DIM), v(k.size()), q(CHUNK * HEADS * DIM), out(q.size()),
        want(q.size());
    std::vector<float> lse(CHUNK * HEADS), lse_want(lse.size());
    float *d_k, *d_v, *d_q, *d_out, *d_lse;
    tkv_attend_params a;
    cudaStream_t stream = NULL;
    cudaGraphExec_t run;
    int i;
    rig r;
    cfg.limits.max_seqs = 1;
    cfg.tiers.warm_tokens = 64;
    cfg.tiers.warm.k = cfg.tiers.warm.v =
        TKV_KIVI4; /* formats without tables: the host would learn other tables */
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
    d_k = copy_to_device(k.data(), k.size());
    d_v = copy_to_device(v.data(), v.size());
    d_q = copy_to_device(q.data(), q.size());
    d_out = copy_to_device(out.data(), out.size());
    d_lse = copy_to_device(lse.data(), lse.size());
    CHECK_EQ(cudaStreamCreate(&stream), cudaSuccess);
    begin_capture(stream);
    CHECK_EQ(tkvcu_append(r.cu, 0, d_k, d_v, TKV_TYPE_F32, CHUNK, NULL, stream), TKV_OK);
    CHECK_EQ(tkvcu_attend(r.cu, 0, d_q, TKV_TYPE_F32, CHUNK, NULL, d_out, d_lse, NULL, stream), TKV_OK);
    run = end_capture(stream);
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
        CHECK_EQ(cudaMemcpy(d_k, k.data(), k.size() * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
        CHECK_EQ(cudaMemcpy(d_v, v.data(), v.size() * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
        CHECK_EQ(cudaMemcpy(d_q, q.data(), q.size() * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
        CHECK_EQ(cudaGraphLaunch(run, stream), cudaSuccess);
        CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        copy_from_device(out.data(), d_out, out.size());
        copy_from_device(lse.data(), d_lse, lse.size());
        CHECK_EQ(tkv_attend_reference(r.kv, &a), TKV_OK);
        CHECK_LE(relative_error(want, out, DIM), 3e-3);
        CHECK_LE(relative_error(lse_want, lse, CHUNK * HEADS), 3e-3);
    }
    CHECK_EQ(cudaGraphExecDestroy(run), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    for (float *d : {d_k, d_v, d_q, d_out, d_lse}) (void)cudaFree(d);
    rig_close(&r);
}

/* Constant keys have scales of 0. */
TEST(constant_keys) {
    static const char *const formats[] = {"kivi4", "q8", "a30"};
    size_t i;
    for (i = 0; i < sizeof formats / sizeof *formats; i++) {
        tkv_config cfg = config_of(128, 4, 2);
        std::vector<float> k(600 * 256, 0.5f), v(600 * 256);
        options o = plain;
        rig r;
        cfg.limits.max_seqs = 1;
        cfg.limits.max_append = 600;
        cfg.tiers.warm.k = cfg.tiers.archive.k = find_format(formats[i]);
        cfg.tiers.warm.v = cfg.tiers.archive.v = TKV_KIVI4;
        if (!rig_open(&r, &cfg, MAX_QUERIES)) return;
        tkv_rng_fill(&r.rng, v.data(), v.size(), 1.0);
        CHECK_EQ(tkv_append(r.kv, 0, 0, k.data(), v.data(), 600), TKV_OK);
        import_all(&r);
        o.queries = 12;
        check_attend(&r, &o, formats[i]);
        rig_close(&r);
    }
}

TEST(lone_keys) { check_lone_keys(MAX_QUERIES, 12); }

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(formats);
    RUN(head_groups_and_queries);
    RUN(exact_formats_and_lengths);
    RUN(options_of_a_call);
    RUN(rows_by_map);
    RUN(table_versions);
    RUN(same_as_decode_kernel);
    RUN(same_bits_in_any_order);
    RUN(large_and_tiny_values);
    RUN(constant_keys);
    RUN(lone_keys);
    RUN(a_prompt_in_chunks);
    return tkv_test_end();
}
