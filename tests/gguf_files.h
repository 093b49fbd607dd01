/*
 * gguf_files.h - small model files that tests build in memory: GGUF and llama2.c, valid ones. tests/test_gguf_hostile.c
 * and tests/fuzz/gguf.c damage them. try_file loads a file and runs its model.
 */
#ifndef TKV_GGUF_FILES_H
#define TKV_GGUF_FILES_H

#include "../tieredkv.h"

#include "../examples/llama.h"
#include "tkv_test.h"

/* >>building */
typedef struct file_bytes {
    unsigned char p[1 << 17];
    size_t n;
} file_bytes;

static inline void put(file_bytes *b, const void *data, size_t n) {
    if (n > sizeof b->p - b->n) n = sizeof b->p - b->n; /* the CHECK_LE at the end of build_* fails */
    memcpy(b->p + b->n, data, n);
    b->n += n;
}

static inline void put_int(file_bytes *b, uint64_t v, int size) { /* little-endian */
    unsigned char c[8];
    int i;
    for (i = 0; i < size; i++) c[i] = (unsigned char)(v >> (8 * i) & 255);
    put(b, c, (size_t)size);
}

static inline void put_float(file_bytes *b, float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    put_int(b, u, 4);
}

static inline void put_string(file_bytes *b, const char *s) {
    put_int(b, strlen(s), 8);
    put(b, s, strlen(s));
}

static inline void put_key_int(file_bytes *b, const char *key, uint32_t v) {
    put_string(b, key);
    put_int(b, 4, 4);
    put_int(b, v, 4);
}

static inline void put_key_string(file_bytes *b, const char *key, const char *v) {
    put_string(b, key);
    put_int(b, 8, 4);
    put_string(b, v);
}

static inline void put_key_number(file_bytes *b, const char *key, int type, double v) { /* a type of GGUF */
    static const int sizes[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    uint64_t bits = (uint64_t)(int64_t)v;
    if (type == 12) memcpy(&bits, &v, sizeof bits);
    put_string(b, key);
    put_int(b, (uint64_t)type, 4);
    if (type == 6) put_float(b, (float)v);
    else put_int(b, bits, sizes[type]);
}

static inline void put_key_array(file_bytes *b, const char *key, int type, int n) {
    put_string(b, key);
    put_int(b, 9, 4);
    put_int(b, (uint64_t)type, 4);
    put_int(b, (uint64_t)n, 8);
}

enum {
    DIM = 32,
    FFN = 64,
    HEADS = 4,
    KV_HEADS = 2,
    HEAD = 8,
    LAYERS = 2,
    VOCAB = 20,
    MERGES = 5,
    CONTEXT = 64,
    PARTS = LLAMA_PARTS
};
/* In octal: U+2581 (342 226 201) is the space of SentencePiece, U+0120 and U+010A are those of GPT-2. */
static const char *const spm_tokens[VOCAB] = {
    "<unk>", "<s>", "</s>", "<0x41>",         "<0x0A>", "\342\226\201",  "a",  "b",        "c",
    "d",     "ab",  "bc",   "\342\226\201ab", "abc",    "\342\226\201c", "dd", "\303\251", "cab",
    "ba",    "e"};
static const int spm_kinds[VOCAB] = {2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
static const char *const bpe_tokens[VOCAB] = {"<|endoftext|>",
                                              "<|im_start|>",
                                              "<|im_end|>",
                                              "\304\240",
                                              "\304\212",
                                              "a",
                                              "b",
                                              "c",
                                              "d",
                                              "e",
                                              "1",
                                              "2",
                                              "'",
                                              "s",
                                              "\304\240a",
                                              "ab",
                                              "\304\240ab",
                                              "'s",
                                              "12",
                                              "aba"};
static const int bpe_kinds[VOCAB] = {3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
static const char *const bpe_merges[MERGES] = {"\304\240 a", "a b", "\304\240a b", "' s", "1 2"};

typedef struct file_spec { /* contents of a file to build */
    int bpe, rope_halves;  /* rope_halves: rows of wq and wk are in the order of RoPE over (i, i + d/2) */
    int types[LLAMA_PARTS], head_type;
    uint64_t seed;
    const file_bytes *more; /* NULL, or n_more keys behind the others */
    int n_more;
    const char *pre;     /* NULL, or the name of another pre-tokenizer than smollm; "": the key is missing */
    const char *factors; /* NULL, or the bytes of rope_freqs.weight: HEAD / 2 floats */
} file_spec;

/* A weight of at most 0.3, which depends on the tensor, row and column only. */
static inline float weight_value(const file_spec *p, int tensor, int row, int col) {
    tkv_rng r = tkv_rng_seed(p->seed + (uint64_t)tensor * 1000003u + (uint64_t)row * 1009u + (uint64_t)col);
    return (float)(tkv_rng_uniform(&r) - 0.5) * 0.6f;
}

static inline unsigned to_f16(float f) { /* truncates a number from 2^-14 up to 1 */
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return (unsigned)((u >> 16 & 0x8000) | ((((u >> 23 & 255) - 112) << 10) & 0x7c00) | (u >> 13 & 0x3ff));
}

static inline void put_tensor(file_bytes *b, const file_spec *p, int tensor, int type, int rows, int cols) {
    int r, c, i, row;
    for (r = 0; r < rows; r++) {
        row = r;
        if (p->rope_halves && (tensor % 16 == LLAMA_Q || tensor % 16 == LLAMA_K) && tensor < 100)
            row = r / HEAD * HEAD + (r % HEAD < HEAD / 2 ? r % HEAD * 2 : (r % HEAD - HEAD / 2) * 2 + 1);
        for (c = 0; c < cols; c++) {
            const float x = rows == 1 ? 1.0f : weight_value(p, tensor, row, c);
            uint32_t u;
            memcpy(&u, &x, sizeof u);
            if (type == LLAMA_F32) put_float(b, x);
            if (type == LLAMA_F16) put_int(b, to_f16(x), 2);
            if (type == LLAMA_BF16) put_int(b, u >> 16, 2);
            if (type == LLAMA_F32 || type == LLAMA_F16 || type == LLAMA_BF16 || c % 32) continue;
            put_int(b, to_f16(0.0625f), 2); /* a quantized block; any codes are valid */
            if (type == LLAMA_Q4_1) put_int(b, to_f16(-0.5f), 2);
            for (i = 0; i < (type == LLAMA_Q8_0 ? 32 : 16); i++) {
                const int byte = (row * 7 + c + i * 29) & 255;
                put_int(b, (uint64_t)(type == LLAMA_Q8_0 ? byte % 15 - 7 : byte), 1);
            }
        }
    }
}

static inline void put_tensor_info(file_bytes *b, const char *name, int rows, int cols, int type,
                                   uint64_t *offset) {
    int values = 1, size = 4;
    CHECK(llama_block((uint64_t)type, &values, &size));
    put_string(b, name);
    put_int(b, rows == 1 ? 1 : 2, 4);
    put_int(b, (uint64_t)cols, 8);
    if (rows > 1) put_int(b, (uint64_t)rows, 8);
    put_int(b, (uint64_t)type, 4);
    put_int(b, *offset, 8);
    *offset += (uint64_t)(rows * cols / values * size);
}

static inline void build_gguf(file_bytes *b, const file_spec *p) {
    llama_model shape; /* for llama_size */
    uint64_t offset = 0;
    char name[64];
    int i, t;
    memset(&shape, 0, sizeof shape);
    shape.dim = DIM, shape.ffn_dim = FFN, shape.n_heads = HEADS, shape.n_kv_heads = KV_HEADS;
    shape.head_dim = shape.v_head_dim = HEAD;
    b->n = 0;
    put(b, "GGUF", 4);
    put_int(b, 3, 4);
    put_int(b, (uint64_t)(3 + LAYERS * PARTS + (p->factors != NULL)), 8);
    put_int(b, (uint64_t)((!p->bpe ? 17 : p->pre && !*p->pre ? 18 : 19) + p->n_more), 8);
    put_key_string(b, "general.architecture", "llama");
    put_key_int(b, "general.alignment", 32);
    put_key_int(b, "llama.block_count", LAYERS);
    put_key_int(b, "llama.context_length", CONTEXT);
    put_key_int(b, "llama.embedding_length", DIM);
    put_key_int(b, "llama.feed_forward_length", FFN);
    put_key_int(b, "llama.attention.head_count", HEADS);
    put_key_int(b, "llama.attention.head_count_kv", KV_HEADS);
    put_key_int(b, "llama.rope.dimension_count", HEAD);
    put_string(b, "llama.attention.layer_norm_rms_epsilon");
    put_int(b, 6, 4);
    put_float(b, 1e-5f);
    put_key_string(b, "tokenizer.ggml.model", p->bpe ? "gpt2" : "llama");
    put_key_array(b, "tokenizer.ggml.tokens", 8, VOCAB);
    for (i = 0; i < VOCAB; i++) put_string(b, p->bpe ? bpe_tokens[i] : spm_tokens[i]);
    put_key_array(b, "tokenizer.ggml.scores", 6, VOCAB);
    for (i = 0; i < VOCAB; i++) put_float(b, i < 9 ? 0.0f : (float)-i);
    put_key_array(b, "tokenizer.ggml.token_type", 5, VOCAB);
    for (i = 0; i < VOCAB; i++) put_int(b, (uint64_t)(p->bpe ? bpe_kinds[i] : spm_kinds[i]), 4);
    put_key_int(b, "tokenizer.ggml.bos_token_id", 1);
    put_key_int(b, "tokenizer.ggml.eos_token_id", 2);
    put_key_int(b, "tokenizer.ggml.unknown_token_id", 0);
    if (p->bpe) {
        put_key_array(b, "tokenizer.ggml.merges", 8, MERGES);
        for (i = 0; i < MERGES; i++) put_string(b, bpe_merges[i]);
        if (!p->pre || *p->pre) put_key_string(b, "tokenizer.ggml.pre", p->pre ? p->pre : "smollm");
    }
    if (p->more) put(b, p->more->p, p->more->n);
    put_tensor_info(b, "token_embd.weight", VOCAB, DIM, p->head_type, &offset);
    put_tensor_info(b, "output_norm.weight", 1, DIM, LLAMA_F32, &offset);
    put_tensor_info(b, "output.weight", VOCAB, DIM, p->head_type, &offset);
    for (i = 0; i < LAYERS * PARTS; i++) {
        t = i % PARTS;
        snprintf(name, sizeof name, "blk.%d.%s.weight", i / PARTS, llama_parts[t].name);
        put_tensor_info(b, name, llama_size(&shape, llama_parts[t].rows),
                        llama_size(&shape, llama_parts[t].cols), p->types[t], &offset);
    }
    if (p->factors) put_tensor_info(b, "rope_freqs.weight", 1, HEAD / 2, LLAMA_F32, &offset);
    while (b->n % 32) put_int(b, 0, 1);
    put_tensor(b, p, 100, p->head_type, VOCAB, DIM);
    put_tensor(b, p, 101, LLAMA_F32, 1, DIM);
    put_tensor(b, p, 102, p->head_type, VOCAB, DIM);
    for (i = 0; i < LAYERS * PARTS; i++) {
        t = i % PARTS;
        put_tensor(b, p, i / PARTS * 16 + t, p->types[t], llama_size(&shape, llama_parts[t].rows),
                   llama_size(&shape, llama_parts[t].cols));
    }
    if (p->factors) put(b, p->factors, HEAD / 2 * sizeof(float));
    CHECK_LE(b->n + 1, sizeof b->p);
}

static inline file_spec make_mixed_spec(int bpe) { /* every tensor type once or more */
    static const int types[LLAMA_PARTS] = {LLAMA_F32, LLAMA_Q8_0, LLAMA_F16,  LLAMA_BF16, LLAMA_Q4_0,
                                           LLAMA_F32, LLAMA_Q4_1, LLAMA_Q8_0, LLAMA_Q4_0};
    file_spec p;
    memset(&p, 0, sizeof p);
    p.bpe = bpe;
    p.head_type = LLAMA_Q8_0;
    p.seed = 7;
    memcpy(p.types, types, sizeof types);
    return p;
}

static inline file_spec make_float_spec(void) {
    file_spec p = make_mixed_spec(0);
    int i;
    for (i = 0; i < LLAMA_PARTS; i++) p.types[i] = LLAMA_F32;
    p.head_type = LLAMA_F32;
    return p;
}

static inline void build_llama2c(file_bytes *b, file_bytes *tok, int separate_head) {
    const file_spec p = make_float_spec();
    int i, t;
    llama_model shape;
    memset(&shape, 0, sizeof shape);
    shape.dim = DIM, shape.ffn_dim = FFN, shape.n_heads = HEADS, shape.n_kv_heads = KV_HEADS;
    shape.head_dim = shape.v_head_dim = HEAD;
    b->n = tok->n = 0;
    put_int(b, DIM, 4);
    put_int(b, FFN, 4);
    put_int(b, LAYERS, 4);
    put_int(b, HEADS, 4);
    put_int(b, KV_HEADS, 4);
    put_int(b, (uint64_t)(separate_head ? -VOCAB : +VOCAB), 4);
    put_int(b, CONTEXT, 4);
    put_tensor(b, &p, 100, LLAMA_F32, VOCAB, DIM);
    for (t = 0; t < LLAMA_PARTS; t++)
        for (i = 0; i < LAYERS; i++) {
            const int norm =
                llama_parts[t].rows == LLAMA_1; /* the norms of all layers are rows of one tensor */
            put_tensor(b, &p, norm ? 101 : i * 16 + t, LLAMA_F32, llama_size(&shape, llama_parts[t].rows),
                       llama_size(&shape, llama_parts[t].cols));
        }
    put_tensor(b, &p, 101, LLAMA_F32, 1, DIM);
    for (i = 0; i < CONTEXT * HEAD; i++) put_float(b, 0);
    if (separate_head) put_tensor(b, &p, 102, LLAMA_F32, VOCAB, DIM);
    CHECK_LE(b->n + 1, sizeof b->p);
    put_int(tok, 6, 4);
    for (i = 0; i < VOCAB; i++) {
        const char *s = i == 5 ? " " : i == 12 ? " ab" : i == 14 ? " c" : spm_tokens[i];
        put_float(tok, i < 9 ? 0.0f : (float)-i);
        put_int(tok, strlen(s), 4);
        put(tok, s, strlen(s));
    }
}

/* >>loading: a file is in memory of exactly its size, so that sanitizers find reads beyond it */
static inline unsigned char *copy_exactly(const unsigned char *p, size_t n) {
    unsigned char *c = (unsigned char *)malloc(n ? n : 1);
    if (c && n) memcpy(c, p, n);
    return c;
}

/* Results of try_file: an error sentence; logits; the model loads, but evaluating it fails. */
enum { REFUSED, RUNS, LOADS_AND_FAILS };

/* Tokenizes a text of fewer than 62 bytes and evaluates three tokens. */
static inline int try_model(const llama_model *m, const char *text, size_t n, float *logits) {
    tkv_config cfg = tkv_default_config();
    tkv_cache *kv = NULL;
    float *out = (float *)malloc((size_t)m->vocab * sizeof *out);
    int result = LOADS_AND_FAILS, i, len, count, tokens[64];
    count = llama_tokenize(m, text, n, LLAMA_BOS | LLAMA_SPECIAL, tokens);
    CHECK_LE(count, n + 2);
    for (i = 0; i < count; i++) {
        CHECK(tokens[i] >= 0 && tokens[i] < m->vocab);
        llama_piece(m, i ? tokens[i - 1] : -1, tokens[i], &len);
        CHECK(len >= 0);
    }
    llama_kv_config(m, &cfg);
    cfg.host.isa = tkv_test_isa();
    if (out && tkv_create(&cfg, &kv) == TKV_OK) {
        tokens[0] = 0, tokens[1] = m->vocab - 1, tokens[2] = m->vocab / 2;
        if (llama_forward(m, kv, 0, tokens, 3, out, 1) == TKV_OK) {
            result = RUNS;
            CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 3);
            if (logits) memcpy(logits, out, (size_t)m->vocab * sizeof *out);
        } else {
            CHECK_EQ(tkv_get_length(kv, 0, TKV_ALL_LAYERS), 0); /* the step was aborted */
        }
    }
    tkv_destroy(kv);
    free(out);
    return result;
}

/* The same with a model in a file. */
static inline int try_file_with(const unsigned char *file, size_t n, const unsigned char *tok, size_t n_tok,
                                const char *text, size_t n_text, char *err, size_t size, float *logits) {
    unsigned char *a = copy_exactly(file, n), *b = tok ? copy_exactly(tok, n_tok) : NULL;
    llama_model m;
    int result = REFUSED;
    err[0] = 0;
    if (llama_load_memory(a, n, b, n_tok, &m, err, size)) {
        result = try_model(&m, text, n_text, logits);
        llama_free(&m);
    } else {
        CHECK(err[0] != 0);
    }
    free(a);
    free(b);
    return result;
}

static inline int try_file(const unsigned char *file, size_t n, const unsigned char *tok, size_t n_tok,
                           char *err, size_t size, float *logits) {
    static const char text[] = "ab  abc's 12 cab\n\xc3\xa9 \xe2\x82 A<|im_end|>";
    return try_file_with(file, n, tok, n_tok, text, sizeof text, err, size, logits);
}

/* Offset of the end of a name that stands after its length; 0: none. */
static inline size_t find_name_end(const file_bytes *b, const char *name) {
    const size_t n = strlen(name);
    size_t i;
    for (i = 8; i + n <= b->n; i++)
        if (b->p[i - 8] == n && b->p[i - 7] == 0 && memcmp(b->p + i, name, n) == 0) return i + n;
    CHECK_MSG(0, "no %s in the file", name);
    return 0;
}

static inline size_t header_size(const file_bytes *b) { /* up to the tensors' data */
    const size_t last = find_name_end(b, "blk.1.ffn_up.weight") + 4 + 16 + 4 + 8;
    return (last + 31) / 32 * 32;
}

#endif /* TKV_GGUF_FILES_H */
