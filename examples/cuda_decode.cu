/*
 * cuda_decode.cu - the CPU processes a prompt, the GPU imports it, and both decode the same tokens and agree.
 *
 *     nvcc -O3 -arch=native examples/cuda_decode.cu -o cuda_decode && ./cuda_decode
 *
 * Keys and values are random; a model would bring its own. At the end, the example exports the GPU's sequence and
 * compares all its tokens with the CPU's cache.
 */
#include "../tieredkv_cuda.cu"

#include <stdio.h>
#include <vector>

enum { LAYERS = 2, HEADS = 8, KV_HEADS = 2, DIM = 128, PROMPT = 900, CHUNK = 150, STEPS = 80 };

/* Returns a random number with approximately normal distribution. */
static float noise(uint32_t *state) {
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) {
        *state = *state * 1664525u + 1013904223u;
        sum += (float)(*state >> 8) / 16777216.0f;
    }
    return sum;
}

static void fill(std::vector<float> &x, uint32_t *state) {
    for (float &y : x) y = noise(state);
}

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        const int status_ = (int)(call);                                                                     \
        if (status_) {                                                                                       \
            fprintf(stderr, "%s: %s %s\n", #call, tkv_get_status_text((tkv_status)status_),                  \
                    tkvcu_get_last_error(cu));                                                               \
            return 1;                                                                                        \
        }                                                                                                    \
    } while (0)

static float *on_device(size_t floats) {
    void *p = NULL;
    return cudaMalloc(&p, floats * sizeof(float)) == cudaSuccess ? (float *)p : NULL;
}

static int upload(float *to, const std::vector<float> &x) {
    return cudaMemcpy(to, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice);
}

/* Counts the numbers that differ in the decoded keys and values of all tokens. */
static size_t count_differences(tkv_cache *a, tkv_cache *b) {
    const int tokens = tkv_get_length(a, 0, TKV_ALL_LAYERS);
    const size_t values = (size_t)(tokens * KV_HEADS * DIM);
    std::vector<float> k(values), v(values), k2(values), v2(values);
    size_t n = 0;
    if (tokens != tkv_get_length(b, 0, TKV_ALL_LAYERS)) return values;
    for (int layer = 0; layer < LAYERS; layer++) {
        if (tkv_read(a, 0, layer, 0, tokens, k.data(), v.data()) ||
            tkv_read(b, 0, layer, 0, tokens, k2.data(), v2.data()))
            return values;
        for (size_t i = 0; i < values; i++) n += (k[i] != k2[i]) + (v[i] != v2[i]);
    }
    return n;
}

int main(void) {
    tkv_config cfg = tkv_default_config();
    tkvcu_config config = {&cfg, 1, PROMPT + STEPS, 1};
    tkv_cache *kv = NULL, *back = NULL;
    tkvcu *cu = NULL;
    tkv_memory_info memory;
    size_t cache_bytes = 0, work_bytes = 0, row = KV_HEADS * DIM, out_row = HEADS * DIM;
    void *cache = NULL, *work = NULL;
    char reason[160];
    double error = 0.0, norm = 0.0;
    uint32_t state = 1, flags = 0;
    int devices = 0;

    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    cfg.format.allocation_unit = 16; /* the GPU reads slabs of 16 channels with equal bits */
    cfg.host.precise = 1;            /* for the CPU */
    if (tkvcu_get_required_bytes(&config, &cache_bytes, &work_bytes, reason, sizeof reason)) {
        fprintf(stderr, "%s\n", reason);
        return 1;
    }
    printf("%zu bytes for the cache, %zu to work in\n", cache_bytes, work_bytes);
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("There is no GPU here: nothing was decoded.\n");
        return 1;
    }

    /* The CPU processes the prompt, and learns which channels deserve more bits. */
    MUST(tkv_create(&cfg, &kv));
    std::vector<float> k(CHUNK * row), v(CHUNK * row), q(CHUNK * out_row), out(CHUNK * out_row), gpu(out_row);
    for (int n = 0; n < PROMPT; n += CHUNK)
        for (int layer = 0; layer < LAYERS; layer++) {
            fill(k, &state);
            fill(v, &state);
            fill(q, &state);
            MUST(tkv_append(kv, 0, layer, k.data(), v.data(), CHUNK));
            MUST(tkv_attend(kv, 0, layer, q.data(), CHUNK, out.data()));
        }
    MUST(tkv_freeze_calibration(kv));

    /* The GPU imports the prompt. Then both append and attend. */
    MUST(cudaMalloc(&cache, cache_bytes));
    MUST(cudaMalloc(&work, work_bytes));
    MUST(tkvcu_create(&config, cache, cache_bytes, work, work_bytes, NULL, &cu));
    MUST(tkvcu_import_seq(cu, 0, kv, 0, NULL));
    float *d_k = on_device(row), *d_v = on_device(row), *d_q = on_device(out_row),
          *d_out = on_device(out_row);
    k.resize(row);
    v.resize(row);
    q.resize(out_row);
    out.resize(out_row);
    for (int step = 0; step < STEPS; step++)
        for (int layer = 0; layer < LAYERS; layer++) {
            fill(k, &state);
            fill(v, &state);
            fill(q, &state);
            MUST(tkv_append(kv, 0, layer, k.data(), v.data(), 1));
            MUST(tkv_attend(kv, 0, layer, q.data(), 1, out.data()));
            MUST(upload(d_k, k) | upload(d_v, v) | upload(d_q, q));
            MUST(tkvcu_append(cu, layer, d_k, d_v, TKV_TYPE_F32, 1, NULL, NULL));
            MUST(tkvcu_attend(cu, layer, d_q, TKV_TYPE_F32, 1, NULL, d_out, NULL, NULL, NULL));
            MUST(cudaMemcpy(gpu.data(), d_out, out_row * sizeof(float), cudaMemcpyDeviceToHost));
            for (size_t i = 0; i < out_row; i++) {
                error += ((double)gpu[i] - (double)out[i]) * ((double)gpu[i] - (double)out[i]);
                norm += (double)out[i] * (double)out[i];
            }
        }
    MUST(tkvcu_get_flags(cu, &flags, 0, NULL));
    MUST(cudaDeviceSynchronize());
    MUST(tkv_create(&cfg, &back));
    MUST(tkvcu_export_seq(cu, 0, back, 0, NULL));
    MUST(tkv_get_memory(back, &memory));
    printf("%d tokens, %.2f times fewer bytes than FP16; errors on the GPU: %u\n",
           tkv_get_length(back, 0, TKV_ALL_LAYERS), memory.ratio, flags);
    printf("attention differs by %.1e of its size; %zu numbers of the caches differ\n", sqrt(error / norm),
           count_differences(kv, back));
    const int agree = flags == 0 && error / norm < 5e-3 * 5e-3 && count_differences(kv, back) == 0;
    printf(agree ? "CPU and GPU agree.\n" : "CPU and GPU do not agree.\n");
    tkvcu_destroy(cu);
    tkv_destroy(kv);
    tkv_destroy(back);
    for (void *p : {cache, work, (void *)d_k, (void *)d_v, (void *)d_q, (void *)d_out}) (void)cudaFree(p);
    return !agree;
}
