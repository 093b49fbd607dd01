/*
 * cuda_rig.h - a cache on the host, its copy on the device (a GPU, or one emulated by cuda_on_cpu.h), and attention of
 * both.
 */
#ifndef CUDA_RIG_H
#define CUDA_RIG_H

#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "../tieredkv_cuda.cu"
#include "tkv_test.h"

#include <string>
#include <vector>

typedef struct rig {
    tkv_config cfg;
    tkv_cache *kv;
    tkvcu *cu;
    void *cache, *work;
    tkv_rng rng;
    float k_size, v_size; /* factors on keys and values that are appended */
    int max_queries;      /* most queries of a call */
    int no_reference;     /* 1: attend_both() computes no reference */
} rig;

/* Returns a copy of n elements in device memory. NULL stays NULL. */
template <class T> static T *copy_to_device(const T *x, size_t n) {
    void *p = NULL;
    if (!x) return NULL;
    CHECK_EQ(cudaMalloc(&p, n * sizeof *x), cudaSuccess);
    CHECK_EQ(cudaMemcpy(p, x, n * sizeof *x, cudaMemcpyHostToDevice), cudaSuccess);
    return (T *)p;
}

template <class T> static void copy_from_device(T *x, const T *p, size_t n) {
    if (x) CHECK_EQ(cudaMemcpy(x, p, n * sizeof *x, cudaMemcpyDeviceToHost), cudaSuccess);
}

/* Device memory that is filled with NaN. */
static void *take_device_memory(size_t bytes) {
    void *p = NULL;
    CHECK_EQ(cudaMalloc(&p, bytes), cudaSuccess);
    CHECK_EQ(cudaMemset(p, 0xff, bytes), cudaSuccess);
    return p;
}

/* Work between begin_capture and end_capture becomes a graph. */
static void begin_capture(cudaStream_t stream) {
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
}

static cudaGraphExec_t end_capture(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t run = NULL;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphInstantiate(&run, graph, 0), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return run;
}

static void device_close(rig *r) {
    tkvcu_destroy(r->cu);
    r->cu = NULL;
    (void)cudaFree(r->cache);
    (void)cudaFree(r->work);
    r->cache = r->work = NULL;
}

static void rig_close(rig *r) {
    device_close(r);
    tkv_destroy(r->kv);
}

static int device_open(rig *r, const tkv_config *cfg) {
    tkvcu_config config = {cfg, 0, 0, r->max_queries};
    size_t cache = 0, work = 0;
    char reason[160] = "";
    int st = tkvcu_get_required_bytes(&config, &cache, &work, reason, sizeof reason);
    CHECK_MSG(st == TKV_OK, "%d: %s", st, reason);
    if (st) return 0;
    r->cache = take_device_memory(cache);
    r->work = take_device_memory(work);
    st = tkvcu_create(&config, r->cache, cache, r->work, work, NULL, &r->cu);
    CHECK_EQ(st, TKV_OK);
    return st == TKV_OK;
}

static int rig_open(rig *r, const tkv_config *cfg, int max_queries) {
    int st;
    memset(r, 0, sizeof *r);
    r->cfg = *cfg;
    r->max_queries = max_queries;
    r->rng = tkv_rng_seed(11);
    r->k_size = r->v_size = 1.0f;
    st = tkv_create(cfg, &r->kv);
    CHECK_EQ(st, TKV_OK);
    return st == TKV_OK && device_open(r, cfg);
}

static tkv_config config_of(int head_dim, int n_heads, int n_kv_heads) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 1;
    cfg.model.n_heads = n_heads;
    cfg.model.n_kv_heads = n_kv_heads;
    cfg.model.head_dim = head_dim;
    cfg.limits.max_seqs = 2;
    cfg.limits.max_tokens = 4096;
    cfg.limits.max_append = 64;
    cfg.tiers.warm_tokens = 128;
    cfg.format.allocation_unit = 16;
    cfg.host.isa = tkv_test_isa();
    return cfg;
}

/* Splits "k/v", or one name for both. */
static tkv_format_pair find_formats(const char *names) {
    const std::string pair = names;
    const size_t slash = pair.find('/');
    tkv_format_pair formats;
    formats.k = find_format(pair.substr(0, slash).c_str());
    formats.v = find_format(pair.substr(slash == std::string::npos ? 0 : slash + 1).c_str());
    return formats;
}

/* Gives only the device a window: the host would free blocks. Returns 0 if the device cannot be opened. */
static int set_device_window(rig *r, int window) {
    device_close(r);
    r->cfg.model.window = window;
    return device_open(r, &r->cfg);
}

/* Appends random tokens to the host's cache. Channels of keys differ in size and mean; values have a mean. */
static void append_random(rig *r, int seq, int to) {
    const int row = r->cfg.model.n_kv_heads * r->cfg.model.head_dim;
    std::vector<float> k((size_t)(row * 64)), v((size_t)(row * 64));
    int len = tkv_get_length(r->kv, seq, TKV_ALL_LAYERS);
    while (len < to) {
        const int n = tkvi_min(to - len, 1 + tkv_rng_below(&r->rng, 48));
        int i;
        tkv_rng_fill(&r->rng, k.data(), (size_t)(n * row), 1.0);
        tkv_rng_fill(&r->rng, v.data(), (size_t)(n * row), 0.7);
        for (i = 0; i < n * row; i++) {
            const int c = i % r->cfg.model.head_dim;
            k[(size_t)i] *= c % 16 == 3 ? 6.0f : 0.25f + 0.25f * (float)(c % 5);
            if (c % 32 == 7) k[(size_t)i] += 9.0f;
            if (c % 8 == 1) v[(size_t)i] += 0.5f;
            k[(size_t)i] *= r->k_size;
            v[(size_t)i] *= r->v_size;
        }
        CHECK_EQ(tkv_append(r->kv, seq, 0, k.data(), v.data(), n), TKV_OK);
        len += n;
    }
}

/* Appends 600 tokens to sequence 0. One key in 50 has the size r->k_size in all channels, so that most blocks have two
 * of them or one. Others have the size `rest`; 0: they are 0, and so are the static means. */
static void append_lone_keys(rig *r, float rest) {
    const int row = r->cfg.model.n_kv_heads * r->cfg.model.head_dim;
    std::vector<float> k((size_t)row), v((size_t)row);
    int i, c;
    for (i = 0; i < 600; i++) {
        tkv_rng_fill(&r->rng, k.data(), (size_t)row, (double)(i % 50 == 17 ? r->k_size : 1.0f));
        tkv_rng_fill(&r->rng, v.data(), (size_t)row, 1.0);
        for (c = 0; c < row && i % 50 != 17; c++) k[(size_t)c] *= rest;
        CHECK_EQ(tkv_append(r->kv, 0, 0, k.data(), v.data(), 1), TKV_OK);
        if (i == 15 && rest == 0.0f) CHECK_EQ(tkv_freeze_calibration(r->kv), TKV_OK);
    }
}

typedef struct options {
    float scale, softcap;
    int window, sinks, queries;
    tkv_type type;
    const int32_t *map; /* NULL: row i is sequence i */
    float q_size;       /* factor on queries; 0: 1 */
} options;

#define UNWRITTEN 7.5f

static uint16_t to_16_bits(tkv_type type, float x) {
    return type == TKV_TYPE_F16 ? tkvi_f32_to_f16(x) : tkvi_f32_to_bf16(x);
}

static float from_16_bits(tkv_type type, uint16_t x) {
    return type == TKV_TYPE_F16 ? tkvi_f16_to_f32(x) : tkvi_bf16_to_f32(x);
}

/* tkvcu_attend() with copies of all arguments in device memory. p, lse and map may be NULL. */
static tkv_status attend_on_device(rig *r, const void *q, tkv_type type, int queries,
                                   const tkvcu_attend_params *p, void *out, float *lse, const int32_t *map) {
    const size_t n_seqs = (size_t)r->cfg.limits.max_seqs, heads = (size_t)r->cfg.model.n_heads,
                 rows = n_seqs * (size_t)queries * heads,
                 bytes = rows * (size_t)r->cfg.model.head_dim * (type == TKV_TYPE_F32 ? 4 : 2);
    uint8_t *d_q = copy_to_device((const uint8_t *)q, bytes), *d_out = copy_to_device((uint8_t *)out, bytes);
    float *d_lse = copy_to_device(lse, rows), *d_sinks = copy_to_device(p ? p->d_sink_logits : NULL, heads);
    int32_t *d_map = copy_to_device(map, n_seqs);
    tkvcu_attend_params d_p;
    tkv_status st;
    if (p) {
        d_p = *p;
        d_p.d_sink_logits = d_sinks;
    }
    st = tkvcu_attend(r->cu, 0, d_q, type, queries, p ? &d_p : NULL, d_out, d_lse, d_map, NULL);
    CHECK_EQ(cudaStreamSynchronize(NULL), cudaSuccess);
    copy_from_device((uint8_t *)out, d_out, bytes);
    copy_from_device(lse, d_lse, rows);
    for (void *d : {(void *)d_q, (void *)d_out, (void *)d_lse, (void *)d_sinks, (void *)d_map})
        (void)cudaFree(d);
    return st;
}

/* Results of a call, as floats, and of the reference. Queries before the first token have zeros. */
typedef struct result {
    std::vector<float> out, lse, want, lse_want;
    size_t row; /* floats of a row of the batch */
} result;

/* Attends on the device and, unless r->no_reference is set, with the reference. Queries are random. */
static result attend_both(rig *r, const options *o, uint64_t seed) {
    const int n_seqs = r->cfg.limits.max_seqs, heads = r->cfg.model.n_heads, dim = r->cfg.model.head_dim;
    const size_t row = (size_t)(o->queries * heads * dim), all = row * (size_t)n_seqs;
    const int is_f32 = o->type == TKV_TYPE_F32;
    std::vector<float> q(all), sinks((size_t)heads);
    std::vector<uint16_t> q16(all), out16(all, to_16_bits(o->type, UNWRITTEN));
    tkvcu_attend_params p = {o->scale, o->softcap, o->window, NULL};
    tkv_rng rng = tkv_rng_seed(seed);
    result x;
    size_t i;
    int s;
    x.row = row;
    x.out.assign(all, UNWRITTEN);
    x.want.assign(all, UNWRITTEN);
    x.lse.assign((size_t)(n_seqs * o->queries * heads), UNWRITTEN);
    x.lse_want = x.lse;
    tkv_rng_fill(&rng, q.data(), all, o->q_size != 0.0f ? o->q_size : 1.0);
    for (i = 0; i < all && !is_f32; i++) {
        q16[i] = to_16_bits(o->type, q[i]);
        q[i] = from_16_bits(o->type, q16[i]);
    }
    tkv_rng_fill(&rng, sinks.data(), sinks.size(), 2.0);
    if (o->sinks) p.d_sink_logits = sinks.data();
    CHECK_EQ(attend_on_device(r, is_f32 ? (void *)q.data() : q16.data(), o->type, o->queries, &p,
                              is_f32 ? (void *)x.out.data() : out16.data(), x.lse.data(), o->map),
             TKV_OK);
    for (i = 0; i < all && !is_f32; i++) x.out[i] = from_16_bits(o->type, out16[i]);
    for (s = 0; s < n_seqs && !r->no_reference; s++) {
        tkv_attend_params a;
        memset(&a, 0, sizeof a);
        a.seq = o->map ? o->map[s] : s;
        if (a.seq < 0) continue;
        /* queries before the first token see no key */
        a.n = tkvi_min(o->queries, tkv_get_length(r->kv, a.seq, TKV_ALL_LAYERS));
        i = (size_t)(o->queries - a.n);
        a.q = q.data() + (size_t)s * row + i * (size_t)(heads * dim);
        a.out = x.want.data() + (size_t)s * row + i * (size_t)(heads * dim);
        a.lse = x.lse_want.data() + (size_t)(s * o->queries * heads) + i * (size_t)heads;
        a.scale = o->scale;
        a.softcap = o->softcap;
        a.window = o->window ? o->window : r->cfg.model.window ? r->cfg.model.window : TKV_OFF;
        a.sink_logits = o->sinks ? sinks.data() : NULL;
        if (a.n > 0) CHECK_EQ(tkv_attend_reference(r->kv, &a), TKV_OK);
        for (i *= (size_t)heads; i-- > 0;) {
            const size_t at = (size_t)(s * o->queries * heads) + i;
            memset(&x.want[at * (size_t)dim], 0, (size_t)dim * sizeof(float));
            x.lse_want[at] = o->sinks ? sinks[i % (size_t)heads] : -INFINITY;
        }
    }
    return x;
}

/* Returns the relative L2 error of b against a, the largest over the heads. */
static double relative_error(const std::vector<float> &a, const std::vector<float> &b, int dim) {
    double largest = 0.0;
    size_t i, c, n = (size_t)dim;
    for (i = 0; i < a.size(); i += n) {
        double d = 0.0, norm = 0.0;
        for (c = i; c < i + n; c++) {
            d += ((double)b[c] - (double)a[c]) * ((double)b[c] - (double)a[c]);
            norm += (double)a[c] * (double)a[c];
        }
        d = norm > 0.0 ? sqrt(d / norm) : d;
        if (!(d <= largest)) largest = d;
    }
    return largest;
}

static const options plain = {0.0f, 0.0f, 0, 0, 1, TKV_TYPE_F32, NULL, 0.0f};

/* Compares attention with the reference. The bound is 3e-3, or 5e-3 with bfloat16 outputs. */
static void check_attend(rig *r, const options *o, const char *name) {
    const result x = attend_both(r, o, 5);
    const double error = relative_error(x.want, x.out, r->cfg.model.head_dim),
                 bound = o->type == TKV_TYPE_BF16 ? 5e-3 : 3e-3;
    double lse_error = 0.0;
    size_t i;
    for (i = 0; i < x.lse.size(); i++) {
        if (x.lse[i] == x.lse_want[i]) continue; /* equal, infinities included */
        if (!(fabs((double)x.lse[i] - (double)x.lse_want[i]) <= lse_error))
            lse_error = fabs((double)x.lse[i] - (double)x.lse_want[i]);
    }
    if (getenv("SHOW")) printf("    %-32s %.1e, lse %.1e\n", name, error, lse_error);
    CHECK_MSG(error <= bound && lse_error <= 4e-3, "%s: relative error %g, lse off by %g", name, error,
              lse_error);
}

/* Imports all sequences of the host that are not empty. */
static void import_all(rig *r) {
    int s;
    for (s = 0; s < r->cfg.limits.max_seqs; s++)
        if (tkv_get_length(r->kv, s, TKV_ALL_LAYERS) > 0)
            CHECK_MSG(tkvcu_import_seq(r->cu, s, r->kv, s, NULL) == TKV_OK, "%s",
                      tkvcu_get_last_error(r->cu));
}

/* Returns how many blocks of sequence 0 have another table version than the block before. */
static int count_version_changes(const rig *r) {
    const tkvcu_view *v = tkvcu_find_view(r->cu, 0);
    std::vector<uint8_t> version;
    tkvcu_list list;
    size_t b;
    int changes = 0;
    copy_from_device(&list, v->list, 1);
    version.resize((size_t)(list.archive + list.warm));
    copy_from_device(version.data(), v->version, version.size());
    for (b = 1; b < version.size(); b++) changes += version[b] != version[b - 1];
    return changes;
}

/* Attends to lone keys among others of several sizes, in all formats A and both head_dims. */
static void check_lone_keys(int max_queries, int queries) {
    static const struct {
        float lone, rest;
    } size[] = {{5.0f, 0.5f}, {5.0f, 1e-3f}, {5.0f, 0.0f}, {1e4f, 0.0f}, {0.1f, 0.0f}};
    int f;
    size_t i;
    for (f = TKV_A40; f <= TKV_A15; f++)
        for (i = 0; i < sizeof size / sizeof *size; i++) {
            tkv_config cfg = config_of(f % 2 ? 64 : 128, 4, 2);
            options o = {0.0f, 0.0f, 0, 0, queries, TKV_TYPE_F32, NULL, 0.0f};
            char name[64];
            rig r;
            cfg.limits.max_seqs = 1;
            cfg.tiers.warm.k = cfg.tiers.archive.k = (tkv_format)f;
            if (!rig_open(&r, &cfg, max_queries)) return;
            r.k_size = size[i].lone;
            append_lone_keys(&r, size[i].rest);
            import_all(&r);
            o.scale = 0.25f / size[i].lone;
            o.softcap = f % 3 ? 0.0f : 20.0f;
            snprintf(name, sizeof name, "format %d, sizes %g and %g", f, (double)size[i].lone,
                     (double)size[i].rest);
            check_attend(&r, &o, name);
            rig_close(&r);
        }
}

/* Attends for a map with skipped rows (negative, or no such sequence). Skipped rows are not written, and the flag for
 * an unknown sequence is set. */
static void check_skipped_rows(rig *r, const int32_t *map, int queries) {
    const int n_seqs = r->cfg.limits.max_seqs, heads = r->cfg.model.n_heads, dim = r->cfg.model.head_dim;
    const size_t row = (size_t)(queries * heads * dim), all = row * (size_t)n_seqs;
    std::vector<float> q(all, 1.0f), out(all, UNWRITTEN), lse(all / (size_t)dim, UNWRITTEN);
    uint32_t flags = 0;
    size_t i;
    CHECK_EQ(attend_on_device(r, q.data(), TKV_TYPE_F32, queries, NULL, out.data(), lse.data(), map), TKV_OK);
    for (i = 0; i < all; i++) {
        const int skipped = map[i / row] < 0 || map[i / row] >= n_seqs;
        CHECK_MSG((out[i] == UNWRITTEN) == skipped, "element %zu of out is %g", i, (double)out[i]);
        CHECK_EQ(lse[i / (size_t)dim] == UNWRITTEN, skipped);
    }
    CHECK_EQ(tkvcu_get_flags(r->cu, &flags, 0, NULL), TKV_OK);
    CHECK_EQ(flags, TKVCU_FLAG_SEQUENCE);
}

/* Sets the number of multiprocessors of the emulated device. Returns 0 on a GPU, which keeps its own. */
static int set_processors(int n) {
#ifdef __CUDACC__
    (void)n;
    return 0;
#else
    cpu_processors = n;
    return 1;
#endif
}

/* A device gives the same bits in every call and in any order of threads. Another number of multiprocessors divides
 * the work differently: results then agree within 2e-3. step: 2 leaves out every second number. A GPU is measured
 * once, as it is. */
static void check_same_bits(rig *r, const options *o, const int *processors, size_t n, size_t step,
                            uint64_t seed) {
    std::vector<float> first;
    size_t i;
    int more = 1;
    for (i = 0; i < n && more; i += step) {
        result a, again, reversed;
        char name[64];
        device_close(r);
        more = set_processors(processors[i]);
        if (!device_open(r, &r->cfg)) break;
        import_all(r);
        snprintf(name, sizeof name, "%d multiprocessors", processors[i]);
        check_attend(r, o, name);
        r->no_reference = 1;
        a = attend_both(r, o, seed);
        again = attend_both(r, o, seed);
        setenv("TKVCU_ORDER", "1", 1);
        reversed = attend_both(r, o, seed);
        unsetenv("TKVCU_ORDER");
        r->no_reference = 0;
        CHECK(memcmp(a.out.data(), again.out.data(), a.out.size() * sizeof(float)) == 0 &&
              a.lse == again.lse);
        CHECK(memcmp(a.out.data(), reversed.out.data(), a.out.size() * sizeof(float)) == 0 &&
              a.lse == reversed.lse);
        if (i == 0) first = a.out;
        CHECK_MSG(relative_error(first, a.out, r->cfg.model.head_dim) <= 2e-3, "%s: %g", name,
                  relative_error(first, a.out, r->cfg.model.head_dim));
    }
    (void)set_processors(3); /* as cuda_on_cpu.h begins */
}

#endif /* CUDA_RIG_H */
