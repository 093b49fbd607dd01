/*
 * gpu_bench.cu - speed of attention of tieredkv_cuda.cu: microseconds per layer, bytes per second, and their share of
 * the read bandwidth, which it measures first.
 *
 *     nvcc -O3 -arch=native bench/gpu_bench.cu -o gpu_bench && ./gpu_bench                    make gpu-bench
 *     ./gpu_bench --csv file       also writes the results for a program; gpu_sdpa.py adds PyTorch's
 *     ./gpu_bench --small          small shapes, as a check that it runs
 *     ./gpu_bench --plan balanced --batch 8 --tokens 32768 --queries 1        one row, for a profiler
 *
 * Shapes have 32 query heads and 8 KV heads of 128 channels, and one query per sequence. The last ones have 64
 * queries, a chunk of a prompt. A shape has enough layers (at most 96) for 4 times the L2 cache. A graph runs through
 * all of them, so every byte comes from memory. Times are medians of 50 graphs. Kernels read lengths on the device,
 * as in use. Values are random. Tables give all channels equal bits.
 */
#include "../tieredkv_cuda.cu"

#include <algorithm>
#include <stdio.h>
#include <vector>

enum { HEADS = 32, KV_HEADS = 8, DIM = 128, CHUNK = 64, RUNS = 50, MAX_LAYERS = 96 };

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        const int status_ = (int)(call);                                                                     \
        if (status_) {                                                                                       \
            fprintf(stderr, "%s: %d\n", #call, status_);                                                     \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* >>kernels */
struct alignas(16) words {
    uint32_t a, b, c, d;
};

enum { READERS = 256, IN_FLIGHT = 8 };

__global__ void __launch_bounds__(READERS) read_kernel(const words *x, size_t n, uint32_t *never) {
    const size_t all = (size_t)gridDim.x * READERS;
    size_t i = (size_t)blockIdx.x * READERS + threadIdx.x;
    uint32_t sum = 0;
    for (; i + (IN_FLIGHT - 1) * all < n; i += IN_FLIGHT * all) {
        words w[IN_FLIGHT];
        int k;
        for (k = 0; k < IN_FLIGHT; k++) w[k] = x[i + (size_t)k * all];
        for (k = 0; k < IN_FLIGHT; k++) sum |= w[k].a ^ w[k].b ^ w[k].c ^ w[k].d;
    }
    if (sum == 0x12345678u) *never = sum; /* keeps the loads */
}

/* Writes fp16 numbers between -2 and 2. */
__global__ void __launch_bounds__(READERS) noise_kernel(uint16_t *x, size_t n, uint32_t seed) {
    size_t i = (size_t)blockIdx.x * READERS + threadIdx.x;
    for (; i < n; i += (size_t)gridDim.x * READERS) {
        uint32_t u = (uint32_t)i * 2654435761u + seed;
        u = (u ^ u >> 15) * 2246822519u;
        u = (u ^ u >> 13) * 3266489917u;
        x[i] = tkvi_f32_to_f16((float)(int32_t)(u ^ u >> 16) * (1.0f / 1073741824.0f));
    }
}

/* >>the device */
typedef struct device {
    int processors;
    size_t l2, free;
    double read; /* bytes per second */
} device;

static void *memory(size_t bytes) { /* NULL: not enough memory */
    void *p = NULL;
    if (cudaMalloc(&p, bytes) == cudaSuccess) return p;
    (void)cudaGetLastError();
    return NULL;
}

typedef struct graph {
    cudaGraphExec_t run;
    cudaStream_t stream;
    cudaEvent_t from, to;
} graph;

static graph graph_begin(void) {
    graph g;
    MUST(cudaStreamCreate(&g.stream));
    MUST(cudaEventCreate(&g.from));
    MUST(cudaEventCreate(&g.to));
    MUST(cudaStreamBeginCapture(g.stream, cudaStreamCaptureModeThreadLocal));
    return g;
}

static void graph_end(graph *g) {
    cudaGraph_t captured;
    MUST(cudaStreamEndCapture(g->stream, &captured));
    MUST(cudaGraphInstantiate(&g->run, captured, 0));
    MUST(cudaGraphDestroy(captured));
}

static void graph_close(graph *g) {
    MUST(cudaGraphExecDestroy(g->run));
    MUST(cudaEventDestroy(g->from));
    MUST(cudaEventDestroy(g->to));
    MUST(cudaStreamDestroy(g->stream));
}

/* Returns the microseconds of each run. */
static std::vector<double> timed(graph *g, int runs) {
    std::vector<double> us;
    int i;
    for (i = 0; i < runs; i++) {
        float ms = 0.0f;
        MUST(cudaEventRecord(g->from, g->stream));
        MUST(cudaGraphLaunch(g->run, g->stream));
        MUST(cudaEventRecord(g->to, g->stream));
        MUST(cudaEventSynchronize(g->to));
        MUST(cudaEventElapsedTime(&ms, g->from, g->to));
        us.push_back((double)ms * 1e3);
    }
    return us;
}

static double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

/* Measures the read bandwidth: the best of 20 runs over 4 GiB, or less if memory is short. */
static double read_bandwidth(const device *d, int quick) {
    size_t bytes = quick ? (size_t)1 << 20 : (size_t)4 << 30, n;
    words *x;
    graph g;
    double best;
    while (bytes > d->free / 2) bytes /= 2;
    x = (words *)memory(bytes);
    if (!x) return 0.0;
    MUST(cudaMemset(x, 1, bytes));
    n = bytes / sizeof *x;
    g = graph_begin();
    TKVCU_LAUNCH(read_kernel, dim3((unsigned)d->processors * 8), dim3(READERS), 0, g.stream, (const words *)x,
                 n, (uint32_t *)x);
    graph_end(&g);
    const std::vector<double> us = timed(&g, 20);
    best = *std::min_element(us.begin(), us.end());
    graph_close(&g);
    MUST(cudaFree(x));
    return (double)bytes / best * 1e6;
}

/* >>shapes */
typedef struct plan {
    const char *name;
    int hot; /* tokens; 0: 64 */
    tkv_format_pair warm, archive;
    int chunks; /* 1: also measured with CHUNK queries */
} plan;

static const plan plans[] = {
    {"fp16",
     TKV_UNLIMITED,
     {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
     {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
     1},
    {"8 bits", 0, {TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0},
    {"4 bits", 0, {TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI4, TKV_KIVI4}, 1},
    {"3 bits", 0, {TKV_KIVI3, TKV_KIVI3}, {TKV_KIVI3, TKV_KIVI3}, 0},
    {"2 bits", 0, {TKV_KIVI2, TKV_KIVI2}, {TKV_KIVI2, TKV_KIVI2}, 0},
    {"balanced", 0, {TKV_A40, TKV_R40}, {TKV_A30, TKV_R30}, 1},
    {"compact", 0, {TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}, 0},
};
enum { PLANS = sizeof plans / sizeof *plans };

static tkv_config config_of(const plan *p, int batch, int context) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 1;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    cfg.limits.max_seqs = batch;
    cfg.limits.max_tokens = context + 4 * CHUNK;
    cfg.limits.max_append = CHUNK;
    cfg.format.allocation_unit = 16;
    cfg.tiers.hot_tokens = p->hot;
    cfg.tiers.warm = p->warm;
    cfg.tiers.archive = p->archive;
    return cfg;
}

/* Returns the bytes that attention reads in one layer. */
static double bytes_of(const tkvcu *cu, int batch) {
    const tkvcu_view *v = &cu->view[0];
    const size_t row = (size_t)(2 * KV_HEADS * DIM) * 2;
    tkvcu_list l;
    MUST(cudaMemcpy(&l, v->list, sizeof l, cudaMemcpyDeviceToHost));
    return (double)batch *
           ((double)l.archive * v->block[TKVCU_ARCHIVE] + (double)l.warm * v->block[TKVCU_WARM] +
            (double)row * (double)(l.len - TKVI_BLOCK * (l.archive + l.warm)));
}

typedef struct figures {
    double bytes, attend, append, append_most; /* of a layer; times in microseconds */
    int layers;
} figures;

/* Measures one shape. Appends as many tokens at a time as there are queries. Returns 0 if it does not fit into
 * memory. */
static int measure(const device *d, const plan *p, int batch, int context, int queries, int runs,
                   figures *f) {
    tkv_config cfg = config_of(p, batch, context);
    tkvcu_config config = {&cfg, 0, 0, queries};
    const size_t values = (size_t)batch * CHUNK * KV_HEADS * DIM, row = (size_t)batch * queries * HEADS * DIM;
    size_t cache_bytes, work_bytes;
    uint16_t *k, *v, *q, *out;
    uint32_t flags = 1;
    void *cache, *work;
    tkvcu *cu = NULL;
    int i, at, fits;
    graph attend, append;
    MUST(tkvcu_get_required_bytes(&config, &cache_bytes, &work_bytes, NULL, 0));
    cfg.model.n_layers = (int)(4 * d->l2 / cache_bytes) + 1;
    cfg.model.n_layers = cfg.model.n_layers > MAX_LAYERS ? MAX_LAYERS
                         : cfg.model.n_layers < 2        ? 2
                                                         : cfg.model.n_layers;
    MUST(tkvcu_get_required_bytes(&config, &cache_bytes, &work_bytes, NULL, 0));
    cache = memory(cache_bytes);
    work = memory(work_bytes);
    k = (uint16_t *)memory(values * 2);
    v = (uint16_t *)memory(values * 2);
    q = (uint16_t *)memory(row * 2);
    out = (uint16_t *)memory(row * 2);
    fits = cache && work && k && v && q && out;
    if (fits) {
        MUST(tkvcu_create(&config, cache, cache_bytes, work, work_bytes, NULL, &cu));
        TKVCU_LAUNCH(noise_kernel, dim3(64), dim3(READERS), 0, (cudaStream_t)NULL, q, row, 1u);
        for (at = 0; at < context; at += CHUNK) {
            TKVCU_LAUNCH(noise_kernel, dim3(64), dim3(READERS), 0, (cudaStream_t)NULL, k, values,
                         (uint32_t)at);
            TKVCU_LAUNCH(noise_kernel, dim3(64), dim3(READERS), 0, (cudaStream_t)NULL, v, values,
                         ~(uint32_t)at);
            for (i = 0; i < cfg.model.n_layers; i++)
                MUST(tkvcu_append(cu, i, k, v, TKV_TYPE_F16, CHUNK, NULL, NULL));
        }
        MUST(cudaDeviceSynchronize());
        attend = graph_begin();
        for (i = 0; i < cfg.model.n_layers; i++)
            MUST(tkvcu_attend(cu, i, q, TKV_TYPE_F16, queries, NULL, out, NULL, NULL, attend.stream));
        graph_end(&attend);
        (void)timed(&attend, 3);
        f->layers = cfg.model.n_layers;
        f->bytes = bytes_of(cu, batch);
        f->attend = median(timed(&attend, runs)) / cfg.model.n_layers;
        append = graph_begin();
        for (i = 0; i < cfg.model.n_layers; i++)
            MUST(tkvcu_append(cu, i, k, v, TKV_TYPE_F16, queries, NULL, append.stream));
        graph_end(&append);
        (void)timed(&append, 1);
        const std::vector<double> us =
            timed(&append, 2 * TKVI_BLOCK / queries); /* two blocks leave each tier */
        f->append = f->append_most = 0.0;
        for (double x : us) {
            f->append += x / cfg.model.n_layers / (double)us.size();
            if (x / cfg.model.n_layers > f->append_most) f->append_most = x / cfg.model.n_layers;
        }
        MUST(tkvcu_get_flags(cu, &flags, 0, NULL));
        MUST(cudaDeviceSynchronize());
        MUST(flags);
        graph_close(&attend);
        graph_close(&append);
        tkvcu_destroy(cu);
    }
    for (void *m : {cache, work, (void *)k, (void *)v, (void *)q, (void *)out})
        if (m) MUST(cudaFree(m));
    return fits;
}

/* Measures one shape and writes its line. Returns 0 if it does not fit. */
static int report(const device *d, const plan *p, int batch, int context, int queries, int quick, FILE *csv,
                  figures *f) {
    if (!measure(d, p, batch, context, queries, quick ? 1 : RUNS, f)) {
        printf("%-9s %5d %7d   more memory than there is\n", p->name, batch, context);
        return 0;
    }
    if (csv)
        fprintf(csv, "%s,%d,%d,%d,%.0f,%.3f,%.0f,%.3f,%.3f,%d\n", p->name, batch, queries, context, f->bytes,
                f->attend, d->read, f->append, f->append_most, f->layers);
    return 1;
}

static void print_row(const char *plan, int batch, int context, const figures *f, double fp16, double read) {
    printf("%-9s %5d %7d %9.2f %9.1f %6.2f %5.0f%% %7.2fx %8.1f %8.1f\n", plan, batch, context,
           f->bytes / 1e6, f->attend, f->bytes / f->attend / 1e6, 100.0 * f->bytes / f->attend * 1e6 / read,
           fp16 / f->attend, f->append, f->append_most);
    fflush(stdout);
}

int main(int argc, char **argv) {
    static const int contexts[] = {8192, 32768, 131072}, batches[] = {1, 8};
    const char *csv_name = NULL, *only = NULL;
    int quick = 0, devices = 0, only_batch = 1, only_tokens = 32768, only_queries = 1, i, c, b;
    FILE *csv = NULL;
    device d;
    cudaDeviceProp about;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0) quick = 1;
        else if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc) csv_name = argv[++i];
        else if (strcmp(argv[i], "--plan") == 0 && i + 1 < argc) only = argv[++i];
        else if (strcmp(argv[i], "--batch") == 0 && i + 1 < argc) only_batch = atoi(argv[++i]);
        else if (strcmp(argv[i], "--tokens") == 0 && i + 1 < argc) only_tokens = atoi(argv[++i]);
        else if (strcmp(argv[i], "--queries") == 0 && i + 1 < argc) only_queries = atoi(argv[++i]);
        else {
            fprintf(stderr,
                    "%s [--csv file] [--small] [--plan name] [--batch n] [--tokens n] [--queries n]\n",
                    argv[0]);
            return 2;
        }
    }
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("There is no GPU here: nothing was measured.\n");
        return 1;
    }
    MUST(cudaGetDeviceProperties(&about, 0));
    MUST(cudaMemGetInfo(&d.free, &d.l2));
    d.processors = about.multiProcessorCount;
    d.l2 = (size_t)about.l2CacheSize;
    d.read = read_bandwidth(&d, quick);
    printf("%s, %d processors, L2 cache of %.0f MB; reading alone: %.2f TB/s\n", about.name, d.processors,
           (double)d.l2 / 1e6, d.read / 1e12);
    if (csv_name) csv = fopen(csv_name, "w");
    if (csv) fprintf(csv, "plan,batch,queries,tokens,bytes,us,read,append,append_most,layers\n");
    printf("us, MB: of a layer; append: mean of 128 tokens, the most of one\n\n");
    printf("%-9s %5s %7s %9s %9s %6s %6s %8s %8s %8s\n", "plan", "batch", "tokens", "MB", "us", "TB/s",
           "share", "by fp16", "append", "most");
    if (only) {
        figures f;
        for (i = 0; i < PLANS && strcmp(plans[i].name, only) != 0; i++) {}
        if (i == PLANS || only_batch < 1 || only_tokens < CHUNK || only_queries < 1 || only_queries > CHUNK) {
            fprintf(stderr, "no such plan, batch or number of tokens or queries\n");
            return 2;
        }
        if (report(&d, &plans[i], only_batch, only_tokens, only_queries, quick, csv, &f))
            print_row(only, only_batch, only_tokens, &f, f.attend, d.read);
        return 0;
    }
    for (b = 0; b < 2; b++)
        for (c = 0; c < (quick ? 1 : 3); c++) {
            const int context = quick ? 256 : contexts[c], batch = batches[b];
            double fp16 = 0.0;
            for (i = 0; i < PLANS; i++) {
                figures f;
                if (!report(&d, &plans[i], batch, context, 1, quick, csv, &f)) continue;
                if (i == 0) fp16 = f.attend;
                print_row(plans[i].name, batch, context, &f, fp16, d.read);
            }
        }
    printf("\n%d queries at the end of so many tokens, batch 1; append: of %d tokens\n\n", CHUNK, CHUNK);
    printf("%-9s %7s %9s %8s %8s %8s\n", "plan", "tokens", "us", "TFLOP/s", "by fp16", "append");
    for (c = 0; c < (quick ? 1 : 2); c++) {
        const int context = quick ? 256 : contexts[c];
        double fp16 = 0.0;
        for (i = 0; i < PLANS; i++) {
            figures f;
            if (!plans[i].chunks || !report(&d, &plans[i], 1, context, CHUNK, quick, csv, &f)) continue;
            if (i == 0) fp16 = f.attend;
            printf("%-9s %7d %9.1f %8.1f %7.2fx %8.1f\n", plans[i].name, context, f.attend,
                   4.0 * CHUNK * context * HEADS * DIM / f.attend / 1e6, fp16 / f.attend, f.append);
            fflush(stdout);
        }
    }
    if (csv && fclose(csv)) {
        fprintf(stderr, "%s was not written\n", csv_name);
        return 1;
    }
    return 0;
}
