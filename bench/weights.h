/*
 * weights.h - holds the weights of a model in another type, and rounds the vectors that they are multiplied with.
 * Include examples/llama.h and rivals.h first.
 *
 *     wrong = weights_hold(&m, LLAMA_Q8_0, &memory);    NULL, or a text about the error
 *     m.round_inputs = weights_rounding(LLAMA_Q8_0);
 *
 * The runner decodes each row of weights to floats and multiplies floats, so the type of the weights changes values
 * only. Engines such as ggml also round the vectors: to 8 bits for Q8_0 and Q4_1 weights, to fp16 for F16 weights.
 */
#ifndef TKV_WEIGHTS_H
#define TKV_WEIGHTS_H

static inline int weights_type(const char *name) { /* -1: unknown */
    return strcmp(name, "f32") == 0    ? LLAMA_F32
           : strcmp(name, "f16") == 0  ? LLAMA_F16
           : strcmp(name, "q8_0") == 0 ? LLAMA_Q8_0
                                       : -1;
}

static void weights_put(unsigned char *p, uint32_t bits, int bytes) { /* little-endian, as in the file */
    for (int i = 0; i < bytes; i++) p[i] = (unsigned char)(bits >> 8 * i);
}

static uint32_t weights_half(float x) { /* bits of x in fp16, rounded to nearest even */
    const float y = fabsf(rival_half(x));
    const uint32_t sign = signbit(x) ? 0x8000u : 0;
    int e;
    if (y < 1.0f / 16384) return sign | (uint32_t)(y * 16777216.0f);
    frexpf(y, &e);
    return sign | (((uint32_t)(e + 14) << 10) + (uint32_t)ldexpf(y, 11 - e) - 1024u);
}

/* Encodes n values as a row of LLAMA_F32, LLAMA_F16 or LLAMA_Q8_0. */
static void weights_encode(const float *x, int n, int type, unsigned char *p) {
    for (int i = 0; type != LLAMA_Q8_0 && i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        if (type == LLAMA_F32) weights_put(p + 4 * i, bits, 4);
        else weights_put(p + 2 * i, weights_half(x[i]), 2);
    }
    for (; type == LLAMA_Q8_0 && n > 0; n -= 32, x += 32, p += 34) {
        const float d = fabsf(rival_largest(x, 32)) / 127.0f, id = d > 0 ? 1.0f / d : 0.0f;
        weights_put(p, weights_half(d), 2);
        for (int i = 0; i < 32; i++) p[2 + i] = (unsigned char)(int)roundf(x[i] * id);
    }
}

static size_t weights_row_bytes(const llama_tensor *t, int type) {
    int values, bytes = 0;
    llama_block((uint64_t)type, &values, &bytes);
    return (size_t)(t->cols / values) * (size_t)bytes;
}

/* Matrix i of a model: the embedding, the head, then the tensors of the layers. */
static llama_tensor *weights_matrix(llama_model *m, int i) {
    if (i < 2) return i == 0 ? &m->embedding : &m->head;
    return &m->layers[(i - 2) / LLAMA_PARTS].w[(i - 2) % LLAMA_PARTS];
}

static unsigned char *weights_recode(llama_tensor *t, int type, float *row,
                                     unsigned char *p) { /* p: behind */
    const llama_tensor from = *t;
    t->type = type;
    t->row_bytes = weights_row_bytes(t, type);
    t->data = p;
    for (int r = 0; r < t->rows; r++, p += t->row_bytes) {
        llama_row(&from, r, row);
        weights_encode(row, t->cols, type, p);
    }
    return p;
}

/* Decodes all matrices and holds them in this type. *memory must outlive the model; the caller frees it. Norms stay.
 * Returns NULL, or a text about the error. */
static const char *weights_hold(llama_model *m, int type, void **memory) {
    const int tied = m->head.data == m->embedding.data;
    const int n = m->n_layers * LLAMA_PARTS + 2;
    size_t bytes = 0;
    int widest = 0;
    *memory = NULL;
    for (int i = 0; i < n; i++) {
        const llama_tensor *t = weights_matrix(m, i);
        if (t->rows == 1 || (i == 1 && tied)) continue;
        if (type == LLAMA_Q8_0 && t->cols % 32) return "a row of weights is not a multiple of 32 values";
        if (t->cols > widest) widest = t->cols;
        bytes += (size_t)t->rows * weights_row_bytes(t, type);
    }
    float *row = (float *)malloc((size_t)widest * sizeof *row);
    unsigned char *p = (unsigned char *)malloc(bytes);
    *memory = p;
    for (int i = 0; p && row && i < n; i++) {
        llama_tensor *t = weights_matrix(m, i);
        if (i == 1 && tied) *t = m->embedding;
        else if (t->rows > 1) p = weights_recode(t, type, row, p);
    }
    if (!row) free(*memory), *memory = p = NULL;
    free(row);
    return p ? NULL : "out of memory";
}

/* >>vectors */
static void weights_round_f16(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = rival_half(x[i]);
}

/* Returns the rounding of vectors that this type of numbers needs; NULL: none. */
static void (*weights_rounding(int type))(float *x, int n) {
    return type == LLAMA_Q8_0 ? rival_q8_0 : type == LLAMA_F16 ? weights_round_f16 : NULL;
}

#endif /* TKV_WEIGHTS_H */
