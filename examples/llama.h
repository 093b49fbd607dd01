/*
 * llama.h - a small runner for Llama-family models, for the examples and tests of tieredkv.
 *
 *     llama_model m;
 *     char err[256];
 *     if (!llama_load("model.gguf", NULL, &m, err, sizeof err)) ...
 *     tkv_config cfg = {0};
 *     llama_kv_config(&m, &cfg);
 *     tkv_create(&cfg, &kv);
 *     n = llama_tokenize(&m, text, strlen(text), LLAMA_BOS, tokens);
 *     llama_forward(&m, kv, 0, tokens, n, logits, 1);         m.vocab logits of the last token
 *
 * It reads GGUF v2 and v3 (architecture llama; F32, F16, BF16, Q8_0, Q4_0, Q4_1) and llama2.c's legacy .bin with its
 * tokenizer.bin. A GGUF file is refused if it has a key that this runner neither follows nor knows to be harmless. Weights keep the format of the file; each row is decoded when it is multiplied. Keys and values are
 * stored only in tieredkv. The code uses libc and libm, and one thread; with -fopenmp the threads of OpenMP share the
 * products with weights. It compiles as C99 and as C++11.
 *
 * A model file is untrusted: every count, size, offset and type is checked before use. An error is returned as one
 * sentence in `err`. No function prints or exits.
 *
 * Sources: Touvron et al. 2023 (arXiv 2302.13971) for the network; gguf.md of ggml and export.py of llama2.c for the
 * files. In this order: data, bytes, weights, tokenizer, loading, gguf, llama2.c, forward, argmax.
 */
#ifndef LLAMA_H
#define LLAMA_H

#include "../tieredkv.h"

#include "measure.h"
#include "read_file.h"

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__GNUC__) || defined(__clang__)
#define LLAMA_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define LLAMA_PRINTF(fmt, args)
#endif

/* >>data */
/* Types of tensors and kinds of tokens have the numbers of GGUF. Tensors of a layer have the order of llama2.c. */
enum { LLAMA_F32 = 0, LLAMA_F16 = 1, LLAMA_Q4_0 = 2, LLAMA_Q4_1 = 3, LLAMA_Q8_0 = 8, LLAMA_BF16 = 30 };
enum { LLAMA_NORMAL = 1, LLAMA_UNKNOWN, LLAMA_CONTROL, LLAMA_USER, LLAMA_UNUSED, LLAMA_BYTE };
enum {
    LLAMA_NORM1,
    LLAMA_Q,
    LLAMA_K,
    LLAMA_V,
    LLAMA_O,
    LLAMA_NORM2,
    LLAMA_GATE,
    LLAMA_DOWN,
    LLAMA_UP,
    LLAMA_PARTS
};
/* Flags of llama_tokenize:
 *   LLAMA_BOS         begins with BOS
 *   LLAMA_SPECIAL     parses control tokens such as <|im_end|>. Text that a user wrote never gets this flag.
 *   LLAMA_CONTINUED   the text follows other tokens, so SentencePiece puts no space before it */
enum { LLAMA_BOS = 1, LLAMA_SPECIAL = 2, LLAMA_CONTINUED = 4 };
enum { LLAMA_TURN = 256 };      /* most tokens of a turn of a chat without the user's text */
enum { LLAMA_MAX_WORD = 1024 }; /* most bytes of a word; a longer one is split */

typedef struct llama_tensor { /* [rows][cols] values; a row takes row_bytes; data has any alignment */
    const unsigned char *data;
    int type, rows, cols;
    size_t row_bytes;
} llama_tensor;

typedef struct llama_layer {
    llama_tensor w[LLAMA_PARTS];
} llama_layer;

typedef struct llama_entry { /* a token, or a merge of the first `cut` bytes with the rest */
    const char *text;
    int len, cut, kind;
    float
        score; /* SentencePiece's score, or -rank of a merge; the pair with the highest score is joined first */
} llama_entry;

typedef struct llama_chat { /* a family of chat templates */
    const char *name;
    const char *marks[2], *lacks; /* the template's text has both marks, and not `lacks` */
    const char *tokens[3];        /* control tokens that the vocabulary must have */
    const char *before, *after,
        *end; /* of the user's text; `end` is behind a reply. {eos} is the EOS token */
} llama_chat;

typedef struct llama_model {
    int n_layers, n_heads, n_kv_heads, head_dim, v_head_dim, dim, ffn_dim, vocab, context;
    float eps;
    /* The five rope fields may be changed after loading. */
    float rope_theta;  /* base */
    float rope_yarn;   /* YaRN for so many times the trained context; up to 1: none */
    float rope_linear; /* positions are divided by it (arXiv 2306.15595); 0: they are not */
    int rope_halves; /* 0: channels (2i, 2i+1) are a pair, as in both file formats; 1: (i, i + rope_dim/2) */
    int rope_dim;    /* RoPE rotates the first rope_dim channels of a head */
    /* NULL; or it rounds each vector that matrices multiply, as engines with other arithmetic do (bench/weights.h). */
    void (*round_inputs)(float *x, int n);
    llama_tensor embedding, final_norm, head, rope_factors;
    llama_layer *layers;
    /* tokenizer */
    int bpe;                /* 1: byte pairs as in GPT-2; 0: SentencePiece */
    int digits;             /* 1: every digit is a word */
    int llama3_digits;      /* 0: words are GPT-2's; else Llama 3's, with at most so many digits in a word */
    int whole_words;        /* 1: a word that is a token needs no merges */
    int add_space;          /* 1: SentencePiece puts a space before the text */
    int add_bos;            /* 1: the model expects LLAMA_BOS */
    int bos, eos, unknown;  /* tokens; -1: none */
    const llama_chat *chat; /* NULL: the file has no chat template, or none that this runner knows */
    int byte_token[256];    /* -1: none */
    llama_entry *entries;   /* vocab tokens, then the merges */
    int n_entries;
    int *control, n_control; /* control tokens */
    int *table;              /* hash table: 1 + index of an entry; 0: free */
    size_t table_size;       /* a power of two */
    char *texts;             /* the bytes of all entries */
    void *file, *tokenizer_file;
    size_t file_size, tokenizer_size;
    char note[128];       /* a warning for the user, or "" */
    char chat_fault[160]; /* why the file's chat template cannot be used, or "" */
} llama_model;

/* >>bytes */
typedef struct
    llama_span { /* bytes to read; a read past the end sets ok to 0, and all later reads give zeros */
    const unsigned char *p;
    size_t left;
    int ok;
} llama_span;

static llama_span llama_span_of(const void *p, size_t n) {
    llama_span s;
    s.p = (const unsigned char *)p;
    s.left = n;
    s.ok = 1;
    return s;
}

static const unsigned char *llama_take(llama_span *s, uint64_t n) {
    const unsigned char *p = s->p;
    if (n > s->left) s->ok = 0;
    if (!s->ok) return NULL;
    s->p += n;
    s->left -= (size_t)n;
    return p;
}

static uint64_t llama_le(const unsigned char *p, int bytes) { /* reads little-endian on every machine */
    uint64_t v = 0;
    while (bytes--) v = v << 8 | p[bytes];
    return v;
}

static uint64_t llama_int(llama_span *s, int bytes) {
    const unsigned char *p = llama_take(s, (uint64_t)bytes);
    return p ? llama_le(p, bytes) : 0;
}

static float llama_bits(uint64_t u) {
    const uint32_t low = (uint32_t)u;
    float f;
    memcpy(&f, &low, sizeof f);
    return f;
}

static llama_span llama_string(llama_span *s) { /* a string of GGUF: 64 bits of length, then the bytes */
    uint64_t n = llama_int(s, 8);
    const unsigned char *p = llama_take(s, n);
    return llama_span_of(p ? (const void *)p : "", p ? (size_t)n : 0);
}

static int llama_is(const llama_span *s, const char *text) {
    return s->left == strlen(text) && memcmp(s->p, text, s->left) == 0;
}

/* >>weights */
/* Sets the values and bytes of a block. Returns 0 for an unsupported type.
 *   Q4_0   fp16 scale, 32 nibbles; value = scale * (nibble - 8)
 *   Q4_1   fp16 scale, fp16 minimum, 32 nibbles; value = scale * nibble + minimum
 *   Q8_0   fp16 scale, 32 signed bytes; value = scale * byte */
static int llama_block(uint64_t type, int *values, int *bytes) {
    *values = 32;
    switch (type) {
    case LLAMA_F32: *values = 1, *bytes = 4; return 1;
    case LLAMA_F16: *values = 1, *bytes = 2; return 1;
    case LLAMA_BF16: *values = 1, *bytes = 2; return 1;
    case LLAMA_Q4_0: *bytes = 18; return 1;
    case LLAMA_Q4_1: *bytes = 20; return 1;
    case LLAMA_Q8_0: *bytes = 34; return 1;
    default: return 0;
    }
}

static int llama_little_endian(void) {
    const uint16_t one = 1;
    return *(const unsigned char *)&one;
}

static float llama_half(const unsigned char *p) {
    const uint32_t h = (uint32_t)p[0] | (uint32_t)p[1] << 8, magnitude = h & 0x7fff;
    /* times 2^112: converts fp16's exponent to fp32's, for subnormals too */
    float f = llama_bits(magnitude << 13) * 5192296858534827628530496329220096.0f;
    if (magnitude >= 0x7c00) f = llama_bits(0x7f800000u | magnitude << 13); /* infinity, NaN */
    return h & 0x8000 ? -f : f;
}

static void llama_row(const llama_tensor *t, int row, float *out) { /* decodes one row */
    const unsigned char *p = t->data + (size_t)row * t->row_bytes;
    if (t->type == LLAMA_F32 && llama_little_endian()) {
        memcpy(out, p, t->row_bytes);
    } else if (t->type == LLAMA_F32) {
        for (int i = 0; i < t->cols; i++, p += 4) out[i] = llama_bits(llama_le(p, 4));
    } else if (t->type == LLAMA_F16) {
        for (int i = 0; i < t->cols; i++, p += 2) out[i] = llama_half(p);
    } else if (t->type == LLAMA_BF16) {
        for (int i = 0; i < t->cols; i++, p += 2) out[i] = llama_bits(llama_le(p, 2) << 16);
    } else if (t->type == LLAMA_Q8_0) {
        for (int i = 0; i < t->cols; i += 32, p += 34) {
            const float d = llama_half(p);
            unsigned char q[32]; /* a copy tells the compiler that out does not overlap */
            memcpy(q, p + 2, sizeof q);
            for (int j = 0; j < 32; j++) out[i + j] = d * (float)((q[j] ^ 128) - 128);
        }
    } else { /* Q4_0, Q4_1: byte j has value j in its low nibble and value j + 16 in its high nibble */
        const int head = t->type == LLAMA_Q4_1 ? 4 : 2;
        for (int i = 0; i < t->cols; i += 32, p += head + 16, out += 32) {
            const float d = llama_half(p), lowest = head == 4 ? llama_half(p + 2) : -8.0f * d;
            unsigned char q[16];
            memcpy(q, p + head, sizeof q);
            for (int j = 0; j < 16; j++) out[j] = d * (float)(q[j] & 15) + lowest;
            for (int j = 0; j < 16; j++) out[j + 16] = d * (float)(q[j] >> 4) + lowest;
        }
    }
}

/* gcc and clang: four floats, or eight with AVX. With vector types gcc 12 keeps the sums in registers at -O2; an
 * array of sums would stay in memory. Other compilers: one float. */
#if (defined(__GNUC__) || defined(__clang__)) && defined(__AVX__)
typedef float llama_vec __attribute__((vector_size(32), aligned(4), may_alias));
#elif defined(__GNUC__) || defined(__clang__)
typedef float llama_vec __attribute__((vector_size(16), aligned(4), may_alias));
#else
typedef float llama_vec;
#endif
enum { LLAMA_LANES = sizeof(llama_vec) / sizeof(float) };
#define LLAMA_VEC(p) (*(const llama_vec *)(const void *)(p))

/* Multiplies four rows of w with x (out[0..3]), and with y unless y is NULL (out[4..7]). Each loaded value is used in
 * several products. Independent sums hide the latency of additions. */
static void llama_dots(const float *w, size_t cols, const float *x, const float *y, float *out) {
    const float *w1 = w + cols, *w2 = w1 + cols, *w3 = w2 + cols;
    llama_vec zero;
    memset(&zero, 0, sizeof zero);
    llama_vec a0 = zero, a1 = zero, a2 = zero, a3 = zero, b0 = zero, b1 = zero, b2 = zero, b3 = zero;
    size_t i = 0;
    for (; !y && i + LLAMA_LANES <= cols; i += LLAMA_LANES) {
        const llama_vec u = LLAMA_VEC(x + i);
        a0 += LLAMA_VEC(w + i) * u;
        a1 += LLAMA_VEC(w1 + i) * u;
        a2 += LLAMA_VEC(w2 + i) * u;
        a3 += LLAMA_VEC(w3 + i) * u;
    }
    for (; y && i + LLAMA_LANES <= cols; i += LLAMA_LANES) {
        const llama_vec u = LLAMA_VEC(x + i), v = LLAMA_VEC(y + i);
        const llama_vec t0 = LLAMA_VEC(w + i), t1 = LLAMA_VEC(w1 + i);
        const llama_vec t2 = LLAMA_VEC(w2 + i), t3 = LLAMA_VEC(w3 + i);
        a0 += t0 * u;
        a1 += t1 * u;
        a2 += t2 * u;
        a3 += t3 * u;
        b0 += t0 * v;
        b1 += t1 * v;
        b2 += t2 * v;
        b3 += t3 * v;
    }
    float lanes[8 * LLAMA_LANES];
    {
        const llama_vec sums[8] = {a0, a1, a2, a3, b0, b1, b2, b3};
        memcpy(lanes, sums, sizeof lanes);
    }
    for (size_t r = 0; r < (y ? 8u : 4u); r++) {
        float sum = 0;
        for (size_t j = 0; j < LLAMA_LANES; j++) sum += lanes[r * LLAMA_LANES + j];
        for (size_t j = i; j < cols; j++) sum += w[r % 4 * cols + j] * (r < 4 ? x : y)[j];
        out[r] = sum;
    }
}

static inline int llama_threads(void) { /* of a product */
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static inline int llama_thread(void) { /* the calling one, from 0 on */
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Computes out[i] = W x[i] for n vectors. Decodes four rows of W at a time, once for all vectors. `rows` is scratch
 * space of 4 * cols floats for each thread. */
static void llama_matmul(const llama_tensor *w, const float *x, int n, float *out, float *rows) {
    const size_t cols = (size_t)w->cols, height = (size_t)w->rows;
    const int in_place =
        w->type == LLAMA_F32 && llama_little_endian() && (uintptr_t)w->data % sizeof(float) == 0;
#ifdef _OPENMP
#pragma omp parallel for
#endif
    for (int r = 0; r < w->rows; r += 4) {
        const int m = w->rows - r < 4 ? w->rows - r : 4;
        float *own = rows + (size_t)llama_thread() * 4 * cols;
        const float *four = own;
        if (in_place && m == 4) four = (const float *)(const void *)(w->data + (size_t)r * w->row_bytes);
        for (int j = 0; four == own && j < 4; j++) llama_row(w, r + (j < m ? j : 0), own + (size_t)j * cols);
        for (int i = 0; i < n; i += 2) {
            const float *a = x + (size_t)i * cols, *b = i + 1 < n ? a + cols : NULL;
            float sums[8], *to = out + (size_t)i * height + (size_t)r;
            llama_dots(four, cols, a, b, sums);
            memcpy(to, sums, (size_t)m * sizeof *to);
            if (b) memcpy(to + height, sums + 4, (size_t)m * sizeof *to);
        }
    }
}

/* Computes the RMS norm of n vectors. `row` is scratch space of cols floats. */
static void llama_rmsnorm(const llama_tensor *weight, float eps, const float *x, int n, float *out,
                          float *row) {
    const size_t dim = (size_t)weight->cols;
    llama_row(weight, 0, row);
    for (; n--; x += dim, out += dim) {
        float s = 0;
        for (size_t i = 0; i < dim; i++) s += x[i] * x[i];
        s = 1.0f / sqrtf(s / (float)dim + eps);
        for (size_t i = 0; i < dim; i++) out[i] = x[i] * s * row[i];
    }
}

/* >>tokenizer. Both kinds split a word into its smallest pieces and join neighbours, the pair with the highest score
 * first. The score of byte pairs (Sennrich et al. 2016) is the merge's -rank. The score of SentencePiece is that
 * of the joined token. */
static size_t llama_hash(const char *s, int len, int cut) { /* FNV-1a */
    uint64_t h = 14695981039346656037u ^ (uint64_t)(unsigned)cut;
    while (len--) h = (h ^ (unsigned char)*s++) * 1099511628211u;
    return (size_t)(h ^ h >> 32);
}

/* Finds the token of these bytes (cut 0), or the merge of their first `cut` bytes with the rest; -1: not found. */
static int llama_find(const llama_model *m, const char *s, int len, int cut) {
    size_t at = llama_hash(s, len, cut);
    for (;; at++) {
        const int i = m->table[at & (m->table_size - 1)] - 1;
        const llama_entry *e = &m->entries[i < 0 ? 0 : i];
        if (i < 0 || (e->len == len && e->cut == cut && memcmp(e->text, s, (size_t)len) == 0)) return i;
    }
}

#define LLAMA_NEVER (-1e30f)
static float llama_join_score(const llama_model *m, const char *s, int len, int cut) {
    const int i = llama_find(m, s, len, m->bpe ? cut : 0);
    return i < 0 ? LLAMA_NEVER : m->entries[i].score;
}

static int llama_utf8_len(const char *s, size_t n) { /* of the character at s; 1 for an invalid byte */
    const unsigned char c = (unsigned char)*s;
    const int len = c < 0xc2 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 1;
    if ((size_t)len > n) return 1;
    for (int i = 1; i < len; i++)
        if (((unsigned char)s[i] & 0xc0) != 0x80) return 1;
    return len;
}

/* Tokenizes a word of len <= LLAMA_MAX_WORD bytes. Returns the number of tokens. */
static int llama_encode_word(const llama_model *m, const char *s, int len, int *out) {
    int start[LLAMA_MAX_WORD + 1]; /* first byte of each piece */
    float score[LLAMA_MAX_WORD];   /* score of joining a piece with the next one */
    int n = 0, count = 0, best;
    const int whole = m->whole_words ? llama_find(m, s, len, 0) : -1;
    if (whole >= 0) {
        *out = whole;
        return 1;
    }
    for (int at = 0; at < len; at += m->bpe ? 1 : llama_utf8_len(s + at, (size_t)(len - at))) start[n++] = at;
    start[n] = len;
    int i;
    for (i = 0; i + 1 < n; i++)
        score[i] = llama_join_score(m, s + start[i], start[i + 2] - start[i], start[i + 1] - start[i]);
    for (;;) {
        float high = LLAMA_NEVER;
        for (i = 0, best = -1; i + 1 < n; i++)
            if (score[i] > high) {
                best = i;
                high = score[i];
            }
        if (best < 0) break;
        memmove(start + best + 1, start + best + 2, (size_t)(n - best - 1) * sizeof *start);
        memmove(score + best, score + best + 1, (size_t)(n - best - 2) * sizeof *score);
        n--;
        for (i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++)
            score[i] = llama_join_score(m, s + start[i], start[i + 2] - start[i], start[i + 1] - start[i]);
    }
    for (i = 0; i < n; i++) {
        const int id = llama_find(m, s + start[i], start[i + 1] - start[i], 0);
        if (id >= 0) out[count++] = id;
        for (int at = start[i]; id < 0 && at < start[i + 1];
             at++) { /* not in the vocabulary: one token per byte */
            const int b = m->byte_token[(unsigned char)s[at]];
            if (b >= 0 || m->unknown >= 0) out[count++] = b >= 0 ? b : m->unknown;
        }
    }
    return count;
}

/* Classifies a character as letter, number, space or other. The table is exact for ASCII, Latin, Greek, Cyrillic,
 * Armenian and punctuation. Other scripts count as letters, with their marks and digits: an exact table would have
 * 870 entries. */
static char llama_class(const char *s, size_t n, int *len) {
    static const struct {
        uint32_t first;
        char kind;
    } from[] = {
        {0x80, 'O'},    {0x85, 'S'},    {0x86, 'O'},    {0xa0, 'S'},    {0xa1, 'O'},    {0xaa, 'L'},
        {0xab, 'O'},    {0xb2, 'N'},    {0xb4, 'O'},    {0xb5, 'L'},    {0xb6, 'O'},    {0xb9, 'N'},
        {0xba, 'L'},    {0xbb, 'O'},    {0xbc, 'N'},    {0xbf, 'O'},    {0xc0, 'L'},    {0xd7, 'O'},
        {0xd8, 'L'},    {0xf7, 'O'},    {0xf8, 'L'},    {0x2c2, 'O'},   {0x2c6, 'L'},   {0x2d2, 'O'},
        {0x2e0, 'L'},   {0x2e5, 'O'},   {0x2ec, 'L'},   {0x2ed, 'O'},   {0x2ee, 'L'},   {0x2ef, 'O'},
        {0x370, 'L'},   {0x375, 'O'},   {0x376, 'L'},   {0x37e, 'O'},   {0x37f, 'L'},   {0x384, 'O'},
        {0x386, 'L'},   {0x387, 'O'},   {0x388, 'L'},   {0x3f6, 'O'},   {0x3f7, 'L'},   {0x482, 'O'},
        {0x48a, 'L'},   {0x55a, 'O'},   {0x560, 'L'},   {0x589, 'O'},   {0x5d0, 'L'},   {0x5f3, 'O'},
        {0x620, 'L'},   {0x64b, 'O'},   {0x660, 'N'},   {0x66a, 'O'},   {0x66e, 'L'},   {0x6d4, 'O'},
        {0x6d5, 'L'},   {0x93e, 'O'},   {0x958, 'L'},   {0x1680, 'S'},  {0x1681, 'L'},  {0x2000, 'S'},
        {0x200b, 'O'},  {0x2028, 'S'},  {0x202a, 'O'},  {0x202f, 'S'},  {0x2030, 'O'},  {0x205f, 'S'},
        {0x2060, 'O'},  {0x2070, 'N'},  {0x207a, 'O'},  {0x2080, 'N'},  {0x208a, 'O'},  {0x2090, 'L'},
        {0x20a0, 'O'},  {0x2150, 'N'},  {0x218a, 'O'},  {0x2460, 'N'},  {0x249c, 'O'},  {0x24ea, 'N'},
        {0x2500, 'O'},  {0x2776, 'N'},  {0x2794, 'O'},  {0x2c00, 'L'},  {0x2e00, 'O'},  {0x3000, 'S'},
        {0x3001, 'O'},  {0x3021, 'N'},  {0x302a, 'O'},  {0x3041, 'L'},  {0x3099, 'O'},  {0x309d, 'L'},
        {0x4dc0, 'O'},  {0x4e00, 'L'},  {0xfdfc, 'O'},  {0xfe70, 'L'},  {0xff01, 'O'},  {0xff10, 'N'},
        {0xff1a, 'O'},  {0xff21, 'L'},  {0xff3b, 'O'},  {0xff41, 'L'},  {0xff5b, 'O'},  {0xff66, 'L'},
        {0xfff9, 'O'},  {0x10000, 'L'}, {0x1d000, 'O'}, {0x1d400, 'L'}, {0x1f000, 'O'}, {0x20000, 'L'},
        {0xe0001, 'O'},
    };
    uint32_t c = (unsigned char)*s;
    size_t low = 0, high = sizeof from / sizeof *from;
    *len = llama_utf8_len(s, n);
    if (c < 0x80) {
        if ((c | 32) >= 'a' && (c | 32) <= 'z') return 'L';
        return c >= '0' && c <= '9' ? 'N' : c == ' ' || (c >= 9 && c <= 13) ? 'S' : 'O';
    }
    if (*len == 1) return 'O'; /* an invalid byte */
    c &= 0xffu >> (*len + 1);
    for (size_t i = 1; i < (size_t)*len; i++) c = c << 6 | ((unsigned char)s[i] & 0x3f);
    while (high - low > 1) {
        size_t mid = (low + high) / 2;
        if (from[mid].first <= c) low = mid;
        else high = mid;
    }
    return from[low].kind;
}

/* Returns the length of the first word, by GPT-2's rule:
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 * With `digits` (SmolLM) each digit is a word, and the rule applies to the text between digits. */
static size_t llama_word_gpt2(const char *s, size_t n, int digits) {
    static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    size_t at = 0, last = 0;
    int len;
    char kind = llama_class(s, n, &len), k = kind;
    if (digits && kind == 'N') return (size_t)len;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (n >= strlen(endings[i]) && memcmp(s, endings[i], strlen(endings[i])) == 0)
            return strlen(endings[i]);
    if (*s == ' ' && n > 1) { /* a single space belongs to the next word */
        k = llama_class(s + 1, n - 1, &len);
        if (k != 'S' && !(digits && k == 'N')) {
            kind = k;
            at = 1;
        }
    }
    for (k = kind; at < n; at += (size_t)len) {
        k = llama_class(s + at, n - at, &len);
        if (k != kind) break;
        last = at;
    }
    if (kind != 'S' || at == n || (digits && k == 'N')) return at;
    return last ? last : at; /* the last of several spaces belongs to the next word */
}

/* Returns the length of the first word, by Llama 3's rule; Qwen 2's takes one digit for three:
 *     (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|
 *     \s+(?!\S)|\s+ */
static size_t llama_word_llama3(const char *s, size_t n, int digits) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    int len, next_len = 0, count = 0;
    const char first = llama_class(s, n, &len);
    const char next = (size_t)len < n ? llama_class(s + len, n - (size_t)len, &next_len) : 0;
    size_t at = 0;
    for (size_t i = 0; *s == '\'' && i < sizeof endings / sizeof *endings; i++) {
        const size_t k = strlen(endings[i]);
        size_t same = 0;
        while (same < k && same + 1 < n && (s[same + 1] | 32) == endings[i][same]) same++;
        if (same == k) return k + 1;
    }
    if (first == 'L' || (next == 'L' && first != 'N' && *s != '\r' && *s != '\n')) {
        for (at = (size_t)len; at < n && llama_class(s + at, n - at, &len) == 'L';) at += (size_t)len;
        return at;
    }
    if (first == 'N') {
        for (; count < digits && at < n && llama_class(s + at, n - at, &len) == 'N'; count++)
            at += (size_t)len;
        return at;
    }
    if (first == 'O' || (*s == ' ' && next == 'O')) {
        for (at = (size_t)len; at < n && llama_class(s + at, n - at, &len) == 'O';) at += (size_t)len;
        while (at < n && (s[at] == '\r' || s[at] == '\n')) at++;
        return at;
    }
    size_t last = 0, line = 0; /* the last character of white space; the end of the last line feed */
    for (; at < n && llama_class(s + at, n - at, &len) == 'S'; at += (size_t)len) {
        last = at;
        if (s[at] == '\r' || s[at] == '\n') line = at + 1;
    }
    if (line) return line;
    return at == n || last == 0 ? at : last; /* the last of several spaces belongs to the next word */
}

/* Returns the length of the first word; a space begins a word. This is exact for vocabularies, such as Llama's, in
 * which no token has a space after another character. */
static size_t llama_word_spm(const char *s, size_t n) {
    size_t at = 1;
    while (at < n && !(s[at] == ' ' && s[at - 1] != ' ')) at++;
    return at;
}

static int llama_encode_text(const llama_model *m, const char *s, size_t n, int space, int *out) {
    char first[LLAMA_MAX_WORD];
    int count = 0;
    for (; n; space = 0) {
        const size_t most = n < LLAMA_MAX_WORD ? n : LLAMA_MAX_WORD - 1;
        size_t word = !m->bpe            ? llama_word_spm(s, most)
                      : m->llama3_digits ? llama_word_llama3(s, most, m->llama3_digits)
                                         : llama_word_gpt2(s, most, m->digits);
        if (word == most && most < n) /* split between characters */
            while (word > LLAMA_MAX_WORD - 4 && ((unsigned char)s[word] & 0xc0) == 0x80) word--;
        first[0] = ' ';
        if (space) memcpy(first + 1, s, word);
        count += llama_encode_word(m, space ? first : s, (int)word + space, out + count);
        s += word;
        n -= word;
    }
    return count;
}

/* Tokenizes a text of n < 2^31 - 2 bytes. `out` has space for n + 2 tokens. Returns their number. Only with
 * LLAMA_SPECIAL can control tokens be among them, apart from BOS. */
static inline int llama_tokenize(const llama_model *m, const char *text, size_t n, int flags, int *out) {
    int count = 0, n_special = flags & LLAMA_SPECIAL ? m->n_control : 0;
    size_t from = 0, at = 0;
    if ((flags & LLAMA_BOS) && m->bos >= 0) out[count++] = m->bos;
    while (at < n || from < n) {
        int i = n_special;
        for (; at < n; at++) {
            for (i = 0; i < n_special; i++) {
                const llama_entry *p = &m->entries[m->control[i]];
                if ((size_t)p->len <= n - at && memcmp(p->text, text + at, (size_t)p->len) == 0) break;
            }
            if (i < n_special) break;
        }
        const int space = m->add_space && from == 0 && !(flags & LLAMA_CONTINUED);
        if (at > from) count += llama_encode_text(m, text + from, at - from, space, out + count);
        if (i < n_special) {
            out[count++] = m->control[i];
            at += (size_t)m->entries[m->control[i]].len;
        }
        from = at;
    }
    return count;
}

/* Tokenizes a part of a chat template, in which {eos} is the EOS token. */
static int llama_tokenize_template(const llama_model *m, const char *text, int flags, int *out) {
    const char *mark = strstr(text, "{eos}");
    int n = llama_tokenize(m, text, mark ? (size_t)(mark - text) : strlen(text), LLAMA_SPECIAL | flags, out);
    if (!mark) return n;
    out[n++] = m->eos;
    return n + llama_tokenize(m, mark + 5, strlen(mark + 5), LLAMA_SPECIAL | LLAMA_CONTINUED, out + n);
}

/* Tokenizes a turn of a chat, from the user's text to where the reply begins. m->chat is not NULL. Template and text are
 * tokenized apart, so whatever the user wrote stays text. is_first: 0 also ends the reply before. `out` has space for
 * n + LLAMA_TURN tokens. Returns their number. */
static inline int llama_tokenize_turn(const llama_model *m, const char *text, size_t n, int is_first,
                                      int *out) {
    const int bos = is_first && m->add_bos ? LLAMA_BOS : 0;
    int count = 0;
    if (!is_first) count = llama_tokenize_template(m, m->chat->end, LLAMA_CONTINUED, out);
    count += llama_tokenize_template(m, m->chat->before, is_first ? bos : LLAMA_CONTINUED, out + count);
    count += llama_tokenize(m, text, n, LLAMA_CONTINUED, out + count);
    return count + llama_tokenize_template(m, m->chat->after, LLAMA_CONTINUED, out + count);
}

/* Returns the bytes of a token, without a final zero; they may be part of a character. `before` is the previous
 * token, or -1. The function omits the space that SentencePiece puts before a text. */
static inline const char *llama_piece(const llama_model *m, int before, int token, int *len) {
    *len = 0;
    if (token < 0 || token >= m->vocab || m->entries[token].kind == LLAMA_CONTROL) return "";
    const llama_entry *p = &m->entries[token];
    int skip = m->add_space && (before < 0 || before == m->bos) && p->len > 0 && p->text[0] == ' ';
    *len = p->len - skip;
    return p->text + skip;
}

/* >>loading */
typedef struct llama_key { /* a key of a GGUF file; `value` begins at the bytes of its value */
    llama_span name, value;
    uint64_t type;
    int used; /* 1: llama_get found it */
} llama_key;

typedef struct llama_item { /* a tensor of a GGUF file */
    llama_span name;
    uint64_t dims[4], type, offset;
    int used;
} llama_item;

typedef struct llama_loader {
    llama_model *m;
    char *err;
    size_t err_size;
    llama_key *keys;
    llama_item *items;
    size_t n_keys, n_items, texts_used;
    llama_span data; /* offsets of tensors are relative to it */
    llama_span arch; /* general.architecture, which begins the names of the network's keys */
} llama_loader;

LLAMA_PRINTF(2, 3)
static int llama_fail(const llama_loader *l, const char *fmt, ...) { /* writes the sentence; returns 0 */
    va_list ap;
    va_start(ap, fmt);
    if (l->err && l->err_size) vsnprintf(l->err, l->err_size, fmt, ap);
    va_end(ap);
    return 0;
}

/* Checks the sizes of both file formats. The limits keep every later product far below 2^63. */
static int llama_check_sizes(const llama_loader *l) {
    const llama_model *m = l->m;
    if (m->dim < 1 || m->dim > 1 << 16 || m->ffn_dim < 1 || m->ffn_dim > 1 << 20)
        return llama_fail(l, "vectors of %d and %d values in the network cannot be", m->dim, m->ffn_dim);
    if (m->n_layers < 1 || m->n_layers > 4096) return llama_fail(l, "%d layers cannot be", m->n_layers);
    if (m->vocab < 1 || m->vocab > 1 << 21) return llama_fail(l, "%d tokens cannot be", m->vocab);
    if (m->context < 1) return llama_fail(l, "a context of %d tokens cannot be", m->context);
    if (m->n_heads < 1 || m->n_heads > 4096 || m->n_kv_heads < 1 || m->n_heads % m->n_kv_heads)
        return llama_fail(l, "%d query heads cannot share %d KV heads", m->n_heads, m->n_kv_heads);
    if (m->head_dim < 1 || m->head_dim > TKV_MAX_HEAD_DIM || m->v_head_dim < 1 ||
        m->v_head_dim > TKV_MAX_HEAD_DIM)
        return llama_fail(l, "heads of %d (K) and %d (V) channels; tieredkv takes 1 to %d", m->head_dim,
                          m->v_head_dim, TKV_MAX_HEAD_DIM);
    if (m->rope_dim < 0 || m->rope_dim > m->head_dim || m->rope_dim % 2)
        return llama_fail(l, "RoPE over %d of %d channels cannot be", m->rope_dim, m->head_dim);
    return 1;
}

enum { LLAMA_1, LLAMA_DIM, LLAMA_FFN, LLAMA_Q_SIZE, LLAMA_K_SIZE, LLAMA_V_SIZE, LLAMA_O_SIZE };
static const struct {
    const char *name; /* GGUF calls it blk.0.name.weight */
    int rows, cols;
} llama_parts[LLAMA_PARTS] = {
    {"attn_norm", LLAMA_1, LLAMA_DIM},        {"attn_q", LLAMA_Q_SIZE, LLAMA_DIM},
    {"attn_k", LLAMA_K_SIZE, LLAMA_DIM},      {"attn_v", LLAMA_V_SIZE, LLAMA_DIM},
    {"attn_output", LLAMA_DIM, LLAMA_O_SIZE}, {"ffn_norm", LLAMA_1, LLAMA_DIM},
    {"ffn_gate", LLAMA_FFN, LLAMA_DIM},       {"ffn_down", LLAMA_DIM, LLAMA_FFN},
    {"ffn_up", LLAMA_FFN, LLAMA_DIM},
};

static int llama_size(const llama_model *m, int which) {
    const int sizes[7] = {1,
                          m->dim,
                          m->ffn_dim,
                          m->n_heads * m->head_dim,
                          m->n_kv_heads * m->head_dim,
                          m->n_kv_heads * m->v_head_dim,
                          m->n_heads * m->v_head_dim};
    return sizes[which];
}

static int llama_alloc_entries(llama_loader *l, size_t n, size_t bytes) {
    llama_model *m = l->m;
    m->entries = (llama_entry *)calloc(n + 1, sizeof *m->entries);
    m->control = (int *)malloc(((size_t)m->vocab + 1) * sizeof *m->control);
    m->texts = (char *)malloc(bytes + 1);
    for (int i = 0; i < 256; i++) m->byte_token[i] = -1;
    return m->entries && m->control && m->texts ? 1 : llama_fail(l, "out of memory for the tokenizer");
}

/* Returns the byte that character c stands for, or -1. GPT-2 writes each byte as a printable character: 33-126,
 * 161-172 and 174-255 as themselves, the others as 256, 257, ... */
static int llama_unmapped(int c) {
    int next = 256;
    for (int b = 0; b < 256; b++) {
        const int printable = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
        if (c == (printable ? b : next++)) return b;
    }
    return -1;
}

/* Adds an entry: decodes the bytes of a token, or of one part of a merge, to m->texts + l->texts_used. */
static void llama_add_entry(llama_loader *l, llama_span text, float score, int kind) {
    llama_model *m = l->m;
    llama_entry *e = &m->entries[m->n_entries];
    static const char space[] = "\xe2\x96\x81"; /* U+2581, SentencePiece's space */
    char *s = m->texts + l->texts_used;
    const int n = (int)text.left, plain = kind == LLAMA_CONTROL || kind == LLAMA_USER;
    int to = 0;
    memcpy(s, text.p, text.left);
    s[n] = 0;
    unsigned value;
    if (kind == LLAMA_BYTE && n == 6 && sscanf(s, "<0x%2X>", &value) == 1) {
        m->byte_token[value & 255] = m->n_entries;
        s[to++] = (char)value;
    }
    int len;
    for (int at = to > 0 ? n : 0; at < n; at += len) {
        len = plain ? 1 : llama_utf8_len(s + at, (size_t)(n - at));
        if (m->bpe && !plain && len <= 2) {
            const int c = len == 1 ? (unsigned char)s[at] : (s[at] & 31) << 6 | (s[at + 1] & 63);
            const int byte = llama_unmapped(c);
            if (byte >= 0) {
                s[to++] = (char)byte;
                continue;
            }
        }
        if (!m->bpe && len == 3 && memcmp(s + at, space, 3) == 0) {
            s[to++] = ' ';
            continue;
        }
        memmove(s + to, s + at, (size_t)len);
        to += len;
    }
    if (kind == LLAMA_CONTROL && to > 0) m->control[m->n_control++] = m->n_entries;
    e->text = s;
    e->len = to;
    e->score = score;
    e->kind = kind;
    l->texts_used += (size_t)to;
    m->n_entries++;
}

/* A token that ends a text or belongs to the template never comes from plain text, whatever kind the file gives it. */
static void llama_make_control(llama_model *m, int token) {
    if (token < 0 || m->entries[token].kind == LLAMA_CONTROL || m->entries[token].len == 0) return;
    m->entries[token].kind = LLAMA_CONTROL;
    m->control[m->n_control++] = token;
    for (int i = 0; i < 256; i++)
        if (m->byte_token[i] == token) m->byte_token[i] = -1;
}

static int llama_index_entries(llama_loader *l) {
    llama_model *m = l->m;
    for (m->table_size = 16; m->table_size / 2 < (size_t)m->n_entries;) m->table_size *= 2;
    m->table = (int *)calloc(m->table_size, sizeof *m->table);
    if (!m->table) return llama_fail(l, "out of memory for the tokenizer");
    size_t mask = m->table_size - 1;
    for (int i = 0; i < m->n_entries; i++) {
        const llama_entry *e = &m->entries[i];
        size_t at = llama_hash(e->text, e->len, e->cut);
        /* plain text never means a control token; the first of two equal entries counts */
        if (e->len == 0 || (e->kind != LLAMA_NORMAL && e->kind != LLAMA_USER)) continue;
        if (llama_find(m, e->text, e->len, e->cut) >= 0) continue;
        while (m->table[at & mask]) at++;
        m->table[at & mask] = i + 1;
    }
    for (int i = 0; i < 256; i++) {
        const char c = (char)i;
        if (m->byte_token[i] < 0) m->byte_token[i] = llama_find(m, &c, 1, 0);
    }
    return 1;
}

/* >>gguf */
static int llama_skip_value(llama_span *s, uint64_t type) {
    static const unsigned char sizes[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (type == 8) {
        llama_string(s);
    } else if (type == 9) { /* an array; arrays of arrays are refused */
        const uint64_t of = llama_int(s, 4), n = llama_int(s, 8);
        if (of > 12 || of == 9 || n > s->left) s->ok = 0;
        for (uint64_t i = 0; of == 8 && s->ok && i < n; i++) llama_string(s);
        if (of != 8 && s->ok) llama_take(s, n * sizes[of]);
    } else if (type <= 12) {
        llama_take(s, sizes[type]);
    } else {
        s->ok = 0;
    }
    return s->ok;
}

static int llama_index_gguf(llama_loader *l, llama_span s) { /* finds every key and tensor */
    const size_t total = s.left;
    uint64_t align = 32;
    int has_align = 0;
    llama_take(&s, 4); /* "GGUF" */
    uint64_t version = llama_int(&s, 4);
    uint64_t n_items = llama_int(&s, 8);
    uint64_t n_keys = llama_int(&s, 8);
    if (version != 2 && version != 3)
        return llama_fail(l, "GGUF version %lu; supported are versions 2 and 3, little-endian",
                          (unsigned long)version);
    /* a key takes at least 13 bytes, a tensor 24 */
    if (!s.ok || n_keys > s.left / 13 || n_items > s.left / 24)
        return llama_fail(l, "the file is too short for the keys and tensors that it announces");
    l->keys = (llama_key *)calloc((size_t)n_keys + 1, sizeof *l->keys);
    l->items = (llama_item *)calloc((size_t)n_items + 1, sizeof *l->items);
    if (!l->keys || !l->items) return llama_fail(l, "out of memory for the index of the file");
    for (uint64_t i = 0; i < n_keys; i++) {
        llama_key *k = &l->keys[l->n_keys++];
        k->name = llama_string(&s);
        k->type = llama_int(&s, 4);
        k->value = s;
        if (!llama_skip_value(&s, k->type)) return llama_fail(l, "key %d is damaged or cut short", (int)i);
        if (!llama_is(&k->name, "general.alignment") || k->type != 4) continue;
        if (has_align++) return llama_fail(l, "the file has the key general.alignment twice");
        align = llama_le(k->value.p, 4);
        k->used = 1;
    }
    for (uint64_t i = 0; i < n_items; i++) {
        llama_item *t = &l->items[l->n_items++];
        t->name = llama_string(&s);
        uint64_t n_dims = llama_int(&s, 4);
        for (uint64_t d = 0; d < 4; d++) t->dims[d] = d < n_dims ? llama_int(&s, 8) : 1;
        t->type = llama_int(&s, 4);
        t->offset = llama_int(&s, 8);
        if (!s.ok || n_dims > 4) return llama_fail(l, "tensor %d is damaged or cut short", (int)i);
    }
    if (align == 0 || (align & (align - 1))) return llama_fail(l, "general.alignment is not a power of two");
    if (!llama_take(&s, (align - (total - s.left) % align) % align))
        return llama_fail(l, "the file ends before its tensors");
    l->data = s;
    return 1;
}

/* Whether a key has a name. A name that begins with a dot stands behind the architecture's, and one that ends with a star
 * stands for all that begin so. */
static int llama_key_is(const llama_loader *l, const llama_key *k, const char *name) {
    llama_span rest = k->name;
    size_t n = strlen(name);
    if (*name == '.') {
        const unsigned char *arch = llama_take(&rest, l->arch.left);
        if (!arch || memcmp(arch, l->arch.p, l->arch.left) != 0) return 0;
    }
    if (n && name[n - 1] == '*') return rest.left >= --n && memcmp(rest.p, name, n) == 0;
    return llama_is(&rest, name);
}

/* Finds a key and marks it as used; NULL: not found. */
static llama_key *llama_get(const llama_loader *l, const char *name) {
    for (size_t i = 0; i < l->n_keys; i++) {
        if (!llama_key_is(l, &l->keys[i], name)) continue;
        l->keys[i].used = 1;
        return &l->keys[i];
    }
    return NULL;
}

/* Fails because of a key: `name` as llama_key_is takes it, and the rest of the sentence. */
static int llama_fail_key(const llama_loader *l, const char *name, const char *why) {
    return llama_fail(l, "%.*s%s %s", *name == '.' ? (int)l->arch.left : 0, (const char *)l->arch.p, name,
                      why);
}

/* Reads a number of any type. Returns 0 if the value is a string or an array. */
static int llama_number(const llama_key *k, double *out) {
    static const unsigned char sizes[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    const int bits = k->type <= 12 ? 8 * sizes[k->type] : 0;
    if (bits == 0) return 0;
    const uint64_t v = llama_le(k->value.p, bits / 8);
    if (k->type == 6) {
        *out = (double)llama_bits(v);
    } else if (k->type == 12) {
        memcpy(out, &v, sizeof v);
    } else {
        const int is_signed = k->type == 1 || k->type == 3 || k->type == 5 || k->type == 11;
        const int is_negative = is_signed && (v >> (bits - 1) & 1);
        *out = is_negative ? -(double)((~v & (UINT64_MAX >> (64 - bits))) + 1) : (double)v;
    }
    return 1;
}

static int llama_is_whole(uint64_t type) { /* whole numbers and booleans */
    return type <= 5 || type == 7 || type == 10 || type == 11;
}

/* Reads a whole number from 0 to 2^31 - 1. Without the key, *out is `absent`; a negative `absent` makes that an
 * error. */
static int llama_get_int(const llama_loader *l, const char *name, int absent, int *out) {
    const llama_key *k = llama_get(l, name);
    double v = 0;
    *out = absent;
    if (!k) return absent >= 0 ? 1 : llama_fail_key(l, name, "is missing, and the file needs it");
    if (!llama_is_whole(k->type)) return llama_fail_key(l, name, "is not a whole number");
    (void)llama_number(k, &v);
    if (!(v >= 0 && v <= (double)INT32_MAX)) return llama_fail_key(l, name, "is out of range");
    *out = (int)v;
    return 1;
}

/* Reads a token; -1: the file has none. */
static int llama_get_token(const llama_loader *l, const char *name, int *out) {
    const llama_key *k = llama_get(l, name);
    double v = -1;
    *out = -1;
    if (!k) return 1;
    if (!llama_is_whole(k->type)) return llama_fail_key(l, name, "is not a whole number");
    (void)llama_number(k, &v);
    if (v == -1.0 || (k->type == 4 && v == 4294967295.0)) return 1; /* converters write none like this */
    if (!(v >= 0 && v < (double)l->m->vocab)) return llama_fail_key(l, name, "is no token of the vocabulary");
    *out = (int)v;
    return 1;
}

static int llama_get_float(const llama_loader *l, const char *name, float absent, float *out) {
    const llama_key *k = llama_get(l, name);
    *out = absent;
    if (!k) return 1;
    double v = 0;
    uint32_t bits;
    if ((k->type == 6 || k->type == 12) && llama_number(k, &v)) *out = (float)v;
    else *out = 0;
    memcpy(&bits, out, sizeof bits);
    /* The bits of positive floats have the order of the floats. This rejects NaN, under -ffast-math too. */
    return bits > 0 && bits < 0x7f000000 ? 1 : llama_fail_key(l, name, "is not a positive float");
}

static llama_span llama_get_string(const llama_loader *l, const char *name) { /* empty: not found */
    llama_key *k = llama_get(l, name);
    llama_span s = llama_span_of("", 0);
    if (k) k->used = k->type == 8; /* a key of another type was not read: llama_check_keys refuses it */
    if (!k || !k->used) return s;
    s = k->value;
    return llama_string(&s);
}

/* Finds the elements of an array; without the key, *out is empty. If *n is 0, the function sets it; else the array
 * must have *n elements. */
static int llama_get_array(const llama_loader *l, const char *name, uint64_t type, uint64_t *n,
                           llama_span *out) {
    const llama_key *k = llama_get(l, name);
    *out = llama_span_of("", 0);
    if (!k) return 1;
    *out = k->value;
    if (k->type != 9 || llama_int(out, 4) != type)
        return llama_fail(l, "%s is not an array of the expected type", name);
    uint64_t count = llama_int(out, 8);
    if (*n && count != *n) return llama_fail(l, "%s does not have one value for each token", name);
    *n = count;
    return 1;
}

/* Copies a word from the file, with ? for characters that are not safe to print. */
static const char *llama_printable(const llama_span *s, char *buf, size_t size) {
    size_t i;
    for (i = 0; i < s->left && i + 1 < size; i++)
        buf[i] = s->p[i] > 32 && s->p[i] < 127 ? (char)s->p[i] : '?';
    buf[i] = 0;
    return buf;
}

static llama_item *llama_find_item(const llama_loader *l, const char *name) {
    for (size_t i = 0; i < l->n_items; i++)
        if (llama_is(&l->items[i].name, name)) return &l->items[i];
    return NULL;
}

static int llama_get_tensor(const llama_loader *l, const char *name, int rows, int cols, llama_tensor *out) {
    llama_item *t = llama_find_item(l, name);
    if (!t) return llama_fail(l, "the file has no tensor %s", name);
    if (t->dims[0] != (uint64_t)cols || t->dims[1] != (uint64_t)rows || t->dims[2] != 1 || t->dims[3] != 1)
        return llama_fail(l, "tensor %s should have the size %d x %d", name, cols, rows);
    int values;
    int bytes;
    if (!llama_block(t->type, &values, &bytes) || cols % values)
        return llama_fail(l, "tensor %s has type %lu; supported are F32, F16, BF16, Q8_0, Q4_0 and Q4_1",
                          name, (unsigned long)t->type);
    out->type = (int)t->type;
    out->rows = rows;
    out->cols = cols;
    out->row_bytes = (size_t)(cols / values) * (size_t)bytes;
    uint64_t size = (uint64_t)rows * out->row_bytes;
    if (t->offset > l->data.left || size > l->data.left - t->offset)
        return llama_fail(l, "tensor %s lies outside the file", name);
    out->data = l->data.p + t->offset;
    t->used = 1;
    return 1;
}

/* >>keys. A file is refused if a key was not read, and is not in this table: it may change the results. Names are as for
 * llama_key_is. value NULL: the key changes no logits. Else the key must have one of these values, between bars: with
 * them it means what a network without the key does. An architecture with more keys reads them, or adds rows. */
static const struct {
    const char *name, *value;
} llama_idle_keys[] = {
    /* what a person reads */
    {"general.type", "model"},
    {"general.quantization_version", "2"},
    {"general.name", NULL},
    {"general.author", NULL},
    {"general.version", NULL},
    {"general.organization", NULL},
    {"general.finetune", NULL},
    {"general.basename", NULL},
    {"general.description", NULL},
    {"general.quantized_by", NULL},
    {"general.size_label", NULL},
    {"general.parameter_count", NULL},
    {"general.file_type", NULL},
    {"general.license*", NULL},
    {"general.url", NULL},
    {"general.doi", NULL},
    {"general.uuid", NULL},
    {"general.repo_url", NULL},
    {"general.source.*", NULL},
    {"general.base_model.*", NULL},
    {"general.dataset.*", NULL},
    {"general.datasets", NULL},
    {"general.tags", NULL},
    {"general.languages", NULL},
    {"general.sampling.*", NULL}, /* the program has its own options */
    {"quantize.imatrix.*", NULL}, /* how the weights were made */
    {"mradermacher.*", NULL},
    {"split.count", "0|1"}, /* a file of several has not all tensors */
    {"split.no", "0"},
    {"split.tensors.count", NULL},
    /* the network */
    {".tensor_data_layout", "Meta AI original pth"},
    {".use_parallel_residual", "0"},
    {".expert_count", "0"},
    {".expert_*", NULL}, /* there are none */
    {".pooling_type", "0"},
    {".logit_scale", "0|1"},
    {".residual_scale", "0|1"},
    {".embedding_scale", "0|1"},
    {".attn_logit_softcapping", "0"},
    {".final_logit_softcapping", "0"},
    {".swin_norm", "0"},
    {".attention.scale", "0"},
    {".attention.causal", "1"},
    {".attention.clamp_kqv", "0"},
    {".attention.max_alibi_bias", "0"},
    {".rope.scaling.finetuned", NULL},
    {".rope.scaling.attn_factor", "1"},
    {".rope.scaling.yarn_ext_factor", "1"},
    {".rope.scaling.yarn_attn_factor", "1"},
    {".rope.scaling.yarn_beta_fast", "32"},
    {".rope.scaling.yarn_beta_slow", "1"},
    {".rope.scaling.yarn_log_multiplier", "0"},
    /* the tokenizer: tokens that plain text never has, and other programs' copies of the vocabulary */
    {"tokenizer.ggml.add_eos_token", "0"},
    {"tokenizer.ggml.add_sep_token", "0"},
    {"tokenizer.ggml.remove_extra_whitespaces", "0"},
    {"tokenizer.ggml.padding_token_id", NULL},
    {"tokenizer.ggml.seperator_token_id", NULL}, /* as gguf.md spells it */
    {"tokenizer.ggml.separator_token_id", NULL},
    {"tokenizer.ggml.mask_token_id", NULL},
    {"tokenizer.ggml.cls_token_id", NULL},
    {"tokenizer.ggml.fim_*", NULL},
    {"tokenizer.ggml.prefix_token_id", NULL},
    {"tokenizer.ggml.suffix_token_id", NULL},
    {"tokenizer.ggml.middle_token_id", NULL},
    {"tokenizer.ggml.added_tokens", NULL},
    {"tokenizer.huggingface.json", NULL},
    {"tokenizer.rwkv.world", NULL},
    {"tokenizer.chat_template.*", NULL}, /* the default one is tokenizer.chat_template */
    {"tokenizer.chat_templates", NULL},
};

/* Whether the value of a key is one of those between bars. */
static int llama_has_value(const llama_key *k, const char *values) {
    llama_span text = k->value;
    double number = 0;
    const int is_number = llama_number(k, &number);
    if (k->type == 8) text = llama_string(&text);
    for (const char *end; *values; values = *end ? end + 1 : end) {
        end = values + strcspn(values, "|");
        const size_t n = (size_t)(end - values);
        if (is_number && strtod(values, NULL) == number) return 1;
        if (k->type == 8 && text.left == n && memcmp(text.p, values, n) == 0) return 1;
    }
    return 0;
}

/* Refuses a file with a key that this runner does not follow. Call it when everything else was read. */
static int llama_check_keys(const llama_loader *l) {
    const size_t rows = sizeof llama_idle_keys / sizeof *llama_idle_keys;
    for (size_t i = 0; i < l->n_keys; i++) {
        const llama_key *k = &l->keys[i];
        size_t r = 0;
        while (r < rows && !llama_key_is(l, k, llama_idle_keys[r].name)) r++;
        if (k->used ||
            (r < rows && (!llama_idle_keys[r].value || llama_has_value(k, llama_idle_keys[r].value))))
            continue;
        char shown[80];
        llama_printable(&k->name, shown, sizeof shown);
        for (size_t j = 0; j < i; j++)
            if (l->keys[j].used && l->keys[j].name.left == k->name.left &&
                memcmp(l->keys[j].name.p, k->name.p, k->name.left) == 0)
                return llama_fail(l, "the file has the key %s twice", shown);
        if (r == rows)
            return llama_fail(
                l, "the file has the key %s, which this runner does not know; it may change the results",
                shown);
        return llama_fail(l, "the key %s asks for something that this runner does not do; it takes %s", shown,
                          llama_idle_keys[r].value);
    }
    return 1;
}

static size_t llama_strings_size(llama_span s,
                                 uint64_t n) { /* bytes of the next n strings and their lengths */
    const size_t before = s.left;
    while (n--) llama_string(&s);
    return before - s.left;
}

/* Byte pairs within words: how the text is cut into words. */
static int llama_gguf_words(llama_loader *l) {
    static const struct {
        const char *name;
        int digits, llama3_digits, whole_words, add_bos;
    } rules[] = {{"gpt-2", 0, 0, 0, 0},    {"smollm", 1, 0, 0, 0}, {"llama-bpe", 0, 3, 1, 1},
                 {"llama-v3", 0, 3, 1, 1}, {"llama3", 0, 3, 1, 1}, {"qwen2", 0, 1, 0, 0},
                 {"default", 0, 0, 0, 0}}; /* the converter did not know it */
    const size_t n = sizeof rules / sizeof *rules;
    llama_model *m = l->m;
    llama_span name = llama_get_string(l, "tokenizer.ggml.pre");
    char shown[40];
    size_t i = name.left ? 0 : n - 1;
    while (m->bpe && i < n && name.left && !llama_is(&name, rules[i].name)) i++;
    if (m->bpe && i == n)
        return llama_fail(l, "tokenizer.ggml.pre '%s'; supported are gpt-2, smollm, llama-bpe and qwen2",
                          llama_printable(&name, shown, sizeof shown));
    if (m->bpe && i == n - 1)
        snprintf(m->note, sizeof m->note,
                 "the file does not say how its tokenizer finds words; GPT-2's rule is used");
    if (m->bpe) {
        m->digits = rules[i].digits;
        m->llama3_digits = rules[i].llama3_digits;
        m->whole_words = rules[i].whole_words;
    }
    return llama_get_int(l, "tokenizer.ggml.add_bos_token", m->bpe ? rules[i].add_bos : 1, &m->add_bos) &&
           llama_get_int(l, "tokenizer.ggml.add_space_prefix", !m->bpe, &m->add_space);
}

static int llama_has_text(llama_span s, const char *text) {
    const size_t n = strlen(text);
    for (; s.left >= n; llama_take(&s, 1))
        if (memcmp(s.p, text, n) == 0) return 1;
    return 0;
}

/* Templates are programs of Jinja, which this runner does not run: it knows families of them by their marks. */
static const llama_chat llama_chats[] = {
    {"ChatML",
     {"<|im_start|>", ""},
     "<|im_sep|>",
     {"<|im_start|>", "<|im_end|>", NULL},
     "<|im_start|>user\n",
     "<|im_end|>\n<|im_start|>assistant\n",
     "<|im_end|>\n"},
    {"Llama 3's",
     {"<|start_header_id|>", ""},
     "<|header_start|>",
     {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     "<|start_header_id|>user<|end_header_id|>\n\n",
     "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
     "<|eot_id|>"},
    /* Zephyr's marks of roles are plain text, so a user can write them; only the ends of turns are safe */
    {"Zephyr's",
     {"<|user|>", "eos_token"},
     "<|end|>",
     {NULL, NULL, NULL},
     "<|user|>\n",
     "{eos}\n<|assistant|>\n",
     "{eos}\n"},
};

/* Sets m->chat or m->chat_fault. */
static void llama_find_chat(llama_model *m, llama_span text) {
    static const char *const others[][2] = {{"<start_of_turn>", "Gemma's"},
                                            {"<|im_sep|>", "Phi 4's"},
                                            {"<|end|>", "Phi 3's"},
                                            {"<|header_start|>", "Llama 4's"},
                                            {"[INST]", "Llama 2's or Mistral's"},
                                            {"### Instruction", "Alpaca's"},
                                            {"<|start_of_role|>", "Granite's"},
                                            {"<\xef\xbd\x9cUser\xef\xbd\x9c>", "DeepSeek's"}};
    const char *name = "unknown", *missing = NULL;
    const llama_chat *chat = NULL;
    for (size_t i = 0; !chat && i < sizeof llama_chats / sizeof *llama_chats; i++) {
        const llama_chat *c = &llama_chats[i];
        if (llama_has_text(text, c->marks[0]) && llama_has_text(text, c->marks[1]) &&
            !llama_has_text(text, c->lacks))
            chat = c;
    }
    for (size_t i = 0; !chat && i < sizeof others / sizeof *others; i++) {
        if (!llama_has_text(text, others[i][0])) continue;
        name = others[i][1];
        break;
    }
    if (chat && strstr(chat->after, "{eos}") && m->eos < 0) missing = "EOS";
    for (int i = 0; chat && i < 3 && chat->tokens[i]; i++) {
        int token = 0;
        while (token < m->vocab &&
               (m->entries[token].len != (int)strlen(chat->tokens[i]) ||
                memcmp(m->entries[token].text, chat->tokens[i], strlen(chat->tokens[i])) != 0))
            token++;
        if (token == m->vocab) missing = chat->tokens[i];
        else llama_make_control(m, token);
    }
    if (missing)
        snprintf(m->chat_fault, sizeof m->chat_fault,
                 "the chat template is %s, and the vocabulary has no token %s", chat->name, missing);
    else if (chat) m->chat = chat;
    else if (text.left)
        snprintf(m->chat_fault, sizeof m->chat_fault,
                 "the chat template is %s; supported are ChatML, Llama 3's and Zephyr's", name);
}

/* Finds tokens that plain text never gives, and the chat template. */
static int llama_gguf_special(llama_loader *l) {
    llama_model *m = l->m;
    int turn_end, message_end;
    if (!llama_get_token(l, "tokenizer.ggml.bos_token_id", &m->bos) ||
        !llama_get_token(l, "tokenizer.ggml.eos_token_id", &m->eos) ||
        !llama_get_token(l, "tokenizer.ggml.unknown_token_id", &m->unknown) ||
        !llama_get_token(l, "tokenizer.ggml.eot_token_id", &turn_end) ||
        !llama_get_token(l, "tokenizer.ggml.eom_token_id", &message_end))
        return 0;
    llama_make_control(m, m->bos);
    llama_make_control(m, m->eos);
    llama_make_control(m, turn_end);
    llama_make_control(m, message_end);
    llama_find_chat(m, llama_get_string(l, "tokenizer.chat_template"));
    /* text without tokens must not become a control token either: then it is left out */
    if (m->unknown >= 0 && m->entries[m->unknown].kind == LLAMA_CONTROL) m->unknown = -1;
    return 1;
}

static int llama_gguf_tokenizer(llama_loader *l) {
    llama_model *m = l->m;
    llama_span tokens, scores, kinds, merges, text = llama_get_string(l, "tokenizer.ggml.model");
    uint64_t n = 0, n_merges = 0;
    m->bpe = llama_is(&text, "gpt2");
    char shown[40];
    if (!m->bpe && !llama_is(&text, "llama"))
        return llama_fail(l, "tokenizer '%s'; supported are gpt2 and llama",
                          llama_printable(&text, shown, sizeof shown));
    if (!llama_get_array(l, "tokenizer.ggml.tokens", 8, &n, &tokens)) return 0;
    if (n < 1 || n > 1 << 21) return llama_fail(l, "a vocabulary of %lu tokens cannot be", (unsigned long)n);
    if (!llama_get_array(l, "tokenizer.ggml.scores", 6, &n, &scores) ||
        !llama_get_array(l, "tokenizer.ggml.token_type", 5, &n, &kinds) ||
        !llama_get_array(l, "tokenizer.ggml.merges", 8, &n_merges, &merges))
        return 0;
    if (m->bpe && !n_merges)
        return llama_fail(l, "tokenizer.ggml.merges is missing, and gpt2's tokenizer needs it");
    if (!m->bpe) n_merges = 0;
    if (n_merges > 1 << 22) return llama_fail(l, "%lu merges cannot be", (unsigned long)n_merges);
    m->vocab = (int)n;
    if (!llama_alloc_entries(l, (size_t)(n + n_merges),
                             llama_strings_size(tokens, n) + llama_strings_size(merges, n_merges)))
        return 0;
    for (uint64_t i = 0; i < n; i++) {
        const float score = llama_bits(llama_int(&scores, 4));
        const int kind = kinds.left ? (int)llama_int(&kinds, 4) : LLAMA_NORMAL;
        text = llama_string(&tokens);
        if (text.left > 1 << 16)
            return llama_fail(l, "token %d is %lu bytes long", (int)i, (unsigned long)text.left);
        llama_add_entry(l, text, score, kind);
    }
    for (uint64_t i = 0; i < n_merges; i++) { /* "left right" */
        llama_entry *e = &m->entries[m->n_entries];
        llama_span left = llama_string(&merges), right = left;
        const unsigned char *space = (const unsigned char *)memchr(left.p, ' ', left.left);
        if (!space || left.left > 1 << 16)
            return llama_fail(l, "merge %d is not two pieces and a space", (int)i);
        left.left = (size_t)(space - left.p);
        llama_take(&right, left.left + 1);
        llama_add_entry(l, left, 0, LLAMA_NORMAL);
        llama_add_entry(l, right, 0, LLAMA_NORMAL);
        m->n_entries--; /* joins both entries: their bytes are adjacent */
        e->cut = e->len;
        e->len += e[1].len;
        e->score = -(float)i;
    }
    return llama_gguf_words(l) && llama_gguf_special(l) && llama_index_entries(l);
}

static int llama_gguf_sizes(llama_loader *l) {
    llama_model *m = l->m;
    int vocab, window;
    if (!llama_get_int(l, ".block_count", -1, &m->n_layers) ||
        !llama_get_int(l, ".embedding_length", -1, &m->dim) ||
        !llama_get_int(l, ".feed_forward_length", -1, &m->ffn_dim) ||
        !llama_get_int(l, ".context_length", 2048, &m->context) ||
        !llama_get_int(l, ".vocab_size", m->vocab, &vocab) ||
        !llama_get_int(l, ".attention.head_count", -1, &m->n_heads) ||
        !llama_get_int(l, ".attention.head_count_kv", m->n_heads, &m->n_kv_heads) ||
        !llama_get_int(l, ".attention.key_length", m->dim / (m->n_heads ? m->n_heads : 1), &m->head_dim) ||
        !llama_get_int(l, ".attention.value_length", m->head_dim, &m->v_head_dim) ||
        !llama_get_int(l, ".attention.sliding_window", 0, &window) ||
        !llama_get_float(l, ".attention.layer_norm_rms_epsilon", 1e-5f, &m->eps))
        return 0;
    if (vocab != m->vocab)
        return llama_fail_key(l, ".vocab_size", "is not the number of tokens in tokenizer.ggml.tokens");
    if (window > 0 && window < m->context)
        return llama_fail_key(l, ".attention.sliding_window",
                              "is shorter than the context: no layer here has a window");
    return 1;
}

/* RoPE and its scaling. A factor without a type is that of linear scaling, as in llama.cpp. */
static int llama_gguf_rope(llama_loader *l) {
    llama_model *m = l->m;
    float factor, old;
    int trained;
    char shown[64];
    llama_span type = llama_get_string(l, ".rope.scaling.type");
    if (!llama_get_int(l, ".rope.dimension_count", m->head_dim, &m->rope_dim) ||
        !llama_get_float(l, ".rope.freq_base", 10000.0f, &m->rope_theta) ||
        !llama_get_float(l, ".rope.scale_linear", 1.0f, &old) || /* files of 2023 */
        !llama_get_float(l, ".rope.scaling.factor", old, &factor) ||
        !llama_get_int(l, ".rope.scaling.original_context_length", m->context, &trained))
        return 0;
    if (llama_is(&type, "none")) return 1;
    if (llama_is(&type, "yarn")) {
        if (factor < 1.0f)
            return llama_fail_key(l, ".rope.scaling.factor", "is below 1, which YaRN cannot be");
        m->rope_yarn = factor;
        m->context = trained;
    } else if (type.left == 0 || llama_is(&type, "linear")) {
        m->rope_linear = factor > 1.0f || factor < 1.0f ? factor : 0;
    } else {
        return llama_fail(l, "RoPE scaling '%s' is not supported; linear and yarn are",
                          llama_printable(&type, shown, sizeof shown));
    }
    return 1;
}

/* Llama 3.1 divides the frequency of each pair by a factor. */
static int llama_gguf_factors(llama_loader *l) {
    llama_model *m = l->m;
    float row[TKV_MAX_HEAD_DIM];
    if (!llama_find_item(l, "rope_freqs.weight")) return 1;
    if (!llama_get_tensor(l, "rope_freqs.weight", 1, m->rope_dim / 2, &m->rope_factors)) return 0;
    llama_row(&m->rope_factors, 0, row);
    for (int i = 0; i < m->rope_dim / 2; i++) {
        uint32_t bits;
        memcpy(&bits, &row[i], sizeof bits);
        if (bits == 0 || bits >= 0x7f800000)
            return llama_fail(l, "tensor rope_freqs.weight has a factor that is not a positive float");
    }
    return 1;
}

static int llama_load_gguf(llama_loader *l, llama_span file) {
    llama_model *m = l->m;
    if (!llama_index_gguf(l, file)) return 0;
    llama_span text = llama_get_string(l, "general.architecture");
    char shown[64];
    if (!llama_is(&text, "llama"))
        return llama_fail(l, "architecture '%s'; only llama is supported",
                          llama_printable(&text, shown, sizeof shown));
    l->arch = text;
    if (!llama_gguf_tokenizer(l) || !llama_gguf_sizes(l) || !llama_gguf_rope(l) || !llama_check_sizes(l))
        return 0;
    if (!llama_get_tensor(l, "token_embd.weight", m->vocab, m->dim, &m->embedding) ||
        !llama_get_tensor(l, "output_norm.weight", 1, m->dim, &m->final_norm))
        return 0;
    m->head = m->embedding; /* tied, unless the file has output.weight */
    if (llama_find_item(l, "output.weight") &&
        !llama_get_tensor(l, "output.weight", m->vocab, m->dim, &m->head))
        return 0;
    if (!llama_gguf_factors(l)) return 0;
    m->layers = (llama_layer *)calloc((size_t)m->n_layers, sizeof *m->layers);
    if (!m->layers) return llama_fail(l, "out of memory for %d layers", m->n_layers);
    for (int layer = 0; layer < m->n_layers; layer++) {
        for (int t = 0; t < LLAMA_PARTS; t++) {
            snprintf(shown, sizeof shown, "blk.%d.%s.weight", layer, llama_parts[t].name);
            if (!llama_get_tensor(l, shown, llama_size(m, llama_parts[t].rows),
                                  llama_size(m, llama_parts[t].cols), &m->layers[layer].w[t]))
                return 0;
        }
    }
    for (size_t i = 0; i < l->n_items; i++) /* a bias, for example; without it, results would be wrong */
        if (!l->items[i].used)
            return llama_fail(l, "tensor %s has no place in a plain Llama",
                              llama_printable(&l->items[i].name, shown, sizeof shown));
    return llama_check_keys(l);
}

/* >>llama2.c. A checkpoint has seven int32, then all tensors as float32; each kind has all layers in a row. */
static void llama_slice(llama_span *s, int rows, int cols, llama_tensor *out) {
    out->type = LLAMA_F32;
    out->rows = rows;
    out->cols = cols;
    out->row_bytes = (size_t)cols * 4;
    out->data = llama_take(s, (uint64_t)rows * (uint64_t)cols * 4);
}

static int llama_load_llama2c(llama_loader *l, llama_span file, llama_span tok) {
    llama_model *m = l->m;
    const int separate_head = file.left > 23 && file.p[23] > 127; /* a negative vocabulary size */
    m->dim = (int)(int32_t)llama_int(&file, 4);
    m->ffn_dim = (int)(int32_t)llama_int(&file, 4);
    m->n_layers = (int)(int32_t)llama_int(&file, 4);
    m->n_heads = (int)(int32_t)llama_int(&file, 4);
    m->n_kv_heads = (int)(int32_t)llama_int(&file, 4);
    uint64_t vocab = llama_int(&file, 4);
    m->vocab = (int)(int32_t)(separate_head ? 0 - vocab : vocab);
    m->context = (int)(int32_t)llama_int(&file, 4);
    m->head_dim = m->v_head_dim = m->rope_dim = m->n_heads > 0 ? m->dim / m->n_heads : 0;
    m->rope_theta = 10000.0f;
    m->eps = 1e-5f;
    if (!llama_check_sizes(l) || m->dim % m->n_heads)
        return llama_fail(l, "neither a GGUF file nor a llama2.c checkpoint");
    m->layers = (llama_layer *)calloc((size_t)m->n_layers, sizeof *m->layers);
    if (!m->layers) return llama_fail(l, "out of memory for %d layers", m->n_layers);
    llama_slice(&file, m->vocab, m->dim, &m->embedding);
    int t;
    for (t = 0; t < LLAMA_PARTS; t++)
        for (int i = 0; i < m->n_layers; i++)
            llama_slice(&file, llama_size(m, llama_parts[t].rows), llama_size(m, llama_parts[t].cols),
                        &m->layers[i].w[t]);
    llama_slice(&file, 1, m->dim, &m->final_norm);
    llama_take(&file, (uint64_t)m->context * (uint64_t)m->head_dim * 4); /* skips cosines and sines */
    m->head = m->embedding;
    if (separate_head) llama_slice(&file, m->vocab, m->dim, &m->head);
    if (!file.ok || file.left)
        return llama_fail(l, "a llama2.c checkpoint whose size does not match its header");

    if (!tok.left) return llama_fail(l, "a llama2.c checkpoint needs a tokenizer.bin, and there is none");
    m->add_bos = m->add_space = m->bos = 1;
    m->eos = m->vocab > 2 ? 2 : -1;
    m->unknown = 0;
    llama_take(&tok, 4); /* length of the longest token */
    if (!llama_alloc_entries(l, (size_t)m->vocab, tok.left)) return 0;
    for (int i = 0; i < m->vocab; i++) {
        const float score = llama_bits(llama_int(&tok, 4));
        const uint64_t n = llama_int(&tok, 4);
        const unsigned char *p = llama_take(&tok, n);
        if (!p || n > 1 << 16) return llama_fail(l, "this is not a tokenizer.bin of %d tokens", m->vocab);
        t = i == 0 ? LLAMA_UNKNOWN : i < 3 ? LLAMA_CONTROL : LLAMA_NORMAL;
        if (n == 6 && memcmp(p, "<0x", 3) == 0) t = LLAMA_BYTE;
        llama_add_entry(l, llama_span_of(p, (size_t)n), score, t);
    }
    if (tok.left) return llama_fail(l, "the tokenizer.bin has more than the model's %d tokens", m->vocab);
    return llama_index_entries(l);
}

static inline void llama_free(llama_model *m) {
    free(m->layers);
    free(m->entries);
    free(m->control);
    free(m->table);
    free(m->texts);
    free(m->file);
    free(m->tokenizer_file);
    memset(m, 0, sizeof *m);
}

/* Loads a model from memory, which must outlive the model. `tok` is llama2.c's tokenizer.bin; NULL and 0 for GGUF.
 * Returns 1; or 0 with a sentence in err, and then there is nothing to free. */
static inline int llama_load_memory(const void *data, size_t size, const void *tok, size_t tok_size,
                                    llama_model *m, char *err, size_t err_size) {
    memset(m, 0, sizeof *m);
    llama_loader l;
    memset(&l, 0, sizeof l);
    m->bos = m->eos = m->unknown = -1;
    l.m = m;
    l.err = err;
    l.err_size = err_size;
    int ok;
    if (size >= 4 && memcmp(data, "GGUF", 4) == 0) ok = llama_load_gguf(&l, llama_span_of(data, size));
    else ok = llama_load_llama2c(&l, llama_span_of(data, size), llama_span_of(tok, tok_size));
    free(l.keys);
    free(l.items);
    if (!ok) llama_free(m);
    return ok;
}

static void *llama_read_file(const char *path, size_t *size) { /* NULL: the file cannot be read */
    return read_file(path, size);
}

/* Loads a model from a file. The tokenizer of a llama2.c checkpoint is tokenizer_path. If that is NULL, it is
 * tok<vocabulary>.bin or tokenizer.bin in the same directory. Returns as llama_load_memory. */
static inline int llama_load(const char *path, const char *tokenizer_path, llama_model *m, char *err,
                             size_t err_size) {
    size_t size, tok_size = 0, dir = strlen(path);
    void *data = llama_read_file(path, &size), *tok = NULL;
    char *name = (char *)malloc(dir + 32);
    int ok = 0;
    if (tokenizer_path) {
        tok = llama_read_file(tokenizer_path, &tok_size);
    } else if (name && size >= 24 && memcmp(data, "GGUF", 4) != 0) {
        const int vocab = (int)(int32_t)llama_le((const unsigned char *)data + 20, 4);
        while (dir && path[dir - 1] != '/' && path[dir - 1] != '\\') dir--;
        snprintf(name, dir + 32, "%.*stok%d.bin", (int)dir, path, vocab);
        tok = llama_read_file(name, &tok_size);
        snprintf(name, dir + 32, "%.*stokenizer.bin", (int)dir, path);
        if (!tok) tok = llama_read_file(name, &tok_size);
    }
    if (!data || (tokenizer_path && !tok))
        snprintf(err, err_size, "cannot read %s", data ? tokenizer_path : path);
    else ok = llama_load_memory(data, size, tok, tok_size, m, err, err_size);
    free(name);
    if (ok) {
        m->file = data;
        m->file_size = size;
        m->tokenizer_file = tok;
        m->tokenizer_size = tok_size;
    } else {
        free(data);
        free(tok);
    }
    return ok;
}

static uint64_t llama_add_to_checksum(uint64_t sum, const void *data, size_t size) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t at = 0; at < size; at += 8) {
        const uint64_t word = size - at < 8 ? llama_le(p + at, (int)(size - at)) : llama_le(p + at, 8);
        sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 32;
    }
    return sum;
}

/* Returns a checksum of all that decides keys and values: the files that llama_load read, and the fields for RoPE that
 * may be changed after it. It finds accidents, such as a file of another model; it stops no attacker. Cost: O(bytes of
 * the files). */
static inline uint64_t llama_checksum(const llama_model *m) {
    uint32_t theta, yarn, linear;
    memcpy(&theta, &m->rope_theta, sizeof theta);
    memcpy(&yarn, &m->rope_yarn, sizeof yarn);
    memcpy(&linear, &m->rope_linear, sizeof linear);
    uint64_t sum = llama_add_to_checksum((uint64_t)m->file_size, m->file, m->file_size);
    sum = llama_add_to_checksum(sum ^ (uint64_t)m->tokenizer_size, m->tokenizer_file, m->tokenizer_size);
    return (sum ^ theta) * 0x9e3779b97f4a7c15u + (uint64_t)m->rope_halves + 2 * (uint64_t)yarn +
           4 * (uint64_t)linear;
}

/* >>forward */
/* Appends n keys [n][n_kv_heads][head_dim] and values [n][n_kv_heads][v_head_dim] of a layer. Attends to all
 * tokens so far with n queries [n][n_heads][head_dim]; out is [n][n_heads][v_head_dim]. llama_forward uses
 * tieredkv here, and a test uses arrays. */
typedef tkv_status (*llama_attention)(void *ctx, int layer, const float *q, const float *k, const float *v,
                                      int n, float *out);

/* Returns the frequency of pair j of RoPE. factors: a row of rope_factors, if the model has them. YaRN (arXiv 2309.00071,
 * section 3.2): a pair with more than 32 turns in the trained context keeps its frequency, one with less than one turn is
 * slowed by the factor, and those between are mixed. The limits are whole pairs, as in llama.cpp. */
static inline double llama_frequency(const llama_model *m, const float *factors, int j) {
    const double d = (double)m->rope_dim, base = (double)m->rope_theta;
    double f = pow(base, -2.0 * (double)j / d), kept;
    if (m->rope_factors.data) f /= (double)factors[j];
    if (m->rope_linear > 0) f /= (double)m->rope_linear;
    if (m->rope_yarn <= 1.0f) return f;
    const double turns = (double)m->context / 6.283185307179586, per_pair = d / (2.0 * log(base));
    double first = floor(per_pair * log(turns / 32.0)), last = ceil(per_pair * log(turns));
    first = first > 0 ? first : 0;
    last = last < d - 1 ? last : d - 1;
    kept = 1.0 - ((double)j - first) / (last - first > 0.001 ? last - first : 0.001);
    kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
    return f * (kept + (1.0 - kept) / (double)m->rope_yarn);
}

/* Returns the positions that RoPE is for: the trained context, which YaRN stretches. */
static inline int llama_context(const llama_model *m) {
    const double n = (double)m->context * (m->rope_yarn > 1.0f ? (double)m->rope_yarn : 1.0);
    return n < 2147483647.0 ? (int)n : 2147483647;
}

/* Returns the factor of cosine and sine: YaRN makes scores larger (section 3.4). */
static inline double llama_rope_size(const llama_model *m) {
    return m->rope_yarn > 1.0f ? 1.0 + 0.1 * log((double)m->rope_yarn) : 1.0;
}

/* Rotates each pair of channels of x [n][n_heads][head_dim] by position * frequency. `angles` has cosine and sine of
 * each token and pair. */
static void llama_rope(const llama_model *m, float *x, int n, int n_heads, const float *angles) {
    const int pairs = m->rope_dim / 2, step = m->rope_halves ? 1 : 2, offset = m->rope_halves ? pairs : 1;
    for (int i = 0; i < n; i++, angles += 2 * pairs) {
        for (int h = 0; h < n_heads; h++, x += m->head_dim) {
            for (int j = 0; j < pairs; j++) {
                float *a = x + j * step, *b = a + offset;
                const float c = angles[2 * j], s = angles[2 * j + 1], t = *a * s + *b * c;
                *a = *a * c - *b * s;
                *b = t;
            }
        }
    }
}

static void llama_round(const llama_model *m, float *x, int n, size_t dim) {
    for (; m->round_inputs && n > 0; n--, x += dim) m->round_inputs(x, (int)dim);
}

/* Evaluates n tokens at positions pos, pos + 1, ... and returns the logits of the last n_logits of them (0 to n). */
static inline tkv_status llama_forward_with(const llama_model *m, const int *tokens, int n, int pos,
                                            llama_attention attention, void *ctx, float *logits,
                                            int n_logits) {
    const size_t dim = (size_t)m->dim, ffn = (size_t)m->ffn_dim, count = (size_t)n,
                 pairs = (size_t)(m->rope_dim / 2);
    const size_t q_size = (size_t)(m->n_heads * m->head_dim), k_size = (size_t)(m->n_kv_heads * m->head_dim);
    const size_t v_size = (size_t)(m->n_kv_heads * m->v_head_dim),
                 o_size = (size_t)(m->n_heads * m->v_head_dim);
    const size_t widest = dim + ffn + o_size + pairs; /* at least the length of any row */
    const size_t per_token = 2 * dim + q_size + k_size + v_size + o_size + 2 * ffn + 2 * pairs;
    const size_t scratch = 4 * widest * (size_t)llama_threads();
    tkv_status status = TKV_OK;
    if (n < 1 || n_logits < 0 || n_logits > n || pos < 0 || (n_logits && !logits)) return TKV_ERR_ARG;
    for (size_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= m->vocab) return TKV_ERR_ARG;
    float *x;
    if (count > (SIZE_MAX / sizeof *x - scratch) / per_token) return TKV_ERR_NOMEM;
    x = (float *)malloc((count * per_token + scratch) * sizeof *x);
    if (!x) return TKV_ERR_NOMEM;
    float *norm = x + count * dim;
    float *q = norm + count * dim;
    float *k = q + count * q_size;
    float *v = k + count * k_size;
    float *o = v + count * v_size;
    float *gate = o + count * o_size;
    float *up = gate + count * ffn;
    float *angles = up + count * ffn;
    float *rows = angles + count * 2 * pairs;

    const double size = llama_rope_size(m);
    if (m->rope_factors.data) llama_row(&m->rope_factors, 0, rows);
    for (size_t j = 0; j < pairs; j++) {
        const double frequency = llama_frequency(m, rows, (int)j);
        for (size_t i = 0; i < count; i++) {
            angles[2 * (i * pairs + j)] = (float)(size * cos(frequency * (double)((size_t)pos + i)));
            angles[2 * (i * pairs + j) + 1] = (float)(size * sin(frequency * (double)((size_t)pos + i)));
        }
    }
    for (size_t i = 0; i < count; i++) llama_row(&m->embedding, tokens[i], x + i * dim);
    for (int layer = 0; layer < m->n_layers && status == TKV_OK; layer++) {
        const llama_tensor *w = m->layers[layer].w;
        llama_rmsnorm(&w[LLAMA_NORM1], m->eps, x, n, norm, rows);
        llama_round(m, norm, n, dim);
        llama_matmul(&w[LLAMA_Q], norm, n, q, rows);
        llama_matmul(&w[LLAMA_K], norm, n, k, rows);
        llama_matmul(&w[LLAMA_V], norm, n, v, rows);
        llama_rope(m, q, n, m->n_heads, angles);
        llama_rope(m, k, n, m->n_kv_heads, angles);
        status = attention(ctx, layer, q, k, v, n, o);
        if (status != TKV_OK) break;
        llama_round(m, o, n, o_size);
        llama_matmul(&w[LLAMA_O], o, n, norm, rows);
        for (size_t i = 0; i < count * dim; i++) x[i] += norm[i];

        llama_rmsnorm(&w[LLAMA_NORM2], m->eps, x, n, norm, rows);
        llama_round(m, norm, n, dim);
        llama_matmul(&w[LLAMA_GATE], norm, n, gate, rows);
        llama_matmul(&w[LLAMA_UP], norm, n, up, rows);
        for (size_t i = 0; i < count * ffn; i++) gate[i] *= up[i] / (1.0f + expf(-gate[i])); /* SwiGLU */
        llama_round(m, gate, n, ffn);
        llama_matmul(&w[LLAMA_DOWN], gate, n, norm, rows);
        for (size_t i = 0; i < count * dim; i++) x[i] += norm[i];
    }
    if (status == TKV_OK && n_logits) {
        llama_rmsnorm(&m->final_norm, m->eps, x + (count - (size_t)n_logits) * dim, n_logits, norm, rows);
        llama_round(m, norm, n_logits, dim);
        llama_matmul(&m->head, norm, n_logits, logits, rows);
    }
    free(x);
    return status;
}

/* Appends keys that RoPE rotated for positions from `position` on. An error if the sequence has another length. */
static tkv_status llama_append_at(tkv_cache *kv, int seq, int layer, int position, const float *k,
                                  const float *v, int n) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.n = n;
    p.k = k;
    p.v = v;
    p.positions = &position;
    return tkv_append_ex(kv, &p);
}

typedef struct llama_cache {
    tkv_cache *kv;
    int seq, pos; /* pos: position of the chunk's first token */
} llama_cache;

/* The llama_attention of a llama_cache. */
static tkv_status llama_tiered(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                               float *out) {
    const llama_cache *c = (const llama_cache *)ctx;
    const tkv_status status = llama_append_at(c->kv, c->seq, layer, c->pos, k, v, n);
    return status == TKV_OK ? tkv_attend(c->kv, c->seq, layer, q, n, out) : status;
}

/* Evaluates n tokens behind those of sequence seq, with keys and values in a cache. n is at most
 * cfg.limits.max_append. After an error the sequence is as before. */
static inline tkv_status llama_forward(const llama_model *m, tkv_cache *kv, int seq, const int *tokens, int n,
                                       float *logits, int n_logits) {
    const int pos = tkv_get_length(kv, seq, TKV_ALL_LAYERS);
    tkv_status status = tkv_seq_begin(kv, seq);
    llama_cache cache;
    cache.kv = kv;
    cache.seq = seq;
    cache.pos = pos;
    if (status != TKV_OK) return status;
    status = llama_forward_with(m, tokens, n, pos, llama_tiered, &cache, logits, n_logits);
    if (status == TKV_OK) return tkv_seq_commit(kv, seq);
    tkv_seq_abort(kv, seq);
    return status;
}

static inline void llama_kv_config(const llama_model *m, tkv_config *cfg) { /* sets cfg->model */
    cfg->model.n_layers = m->n_layers;
    cfg->model.n_heads = m->n_heads;
    cfg->model.n_kv_heads = m->n_kv_heads;
    cfg->model.head_dim = m->head_dim;
    cfg->model.v_head_dim = m->v_head_dim;
    if (m->rope_factors.data || m->rope_yarn > 1.0f || m->rope_linear > 0 ||
        !(m->rope_theta >= 2 && m->rope_theta <= 1e9f))
        return;
    cfg->model.rope.dim = m->rope_dim; /* KVQUANT formats undo RoPE before coding */
    cfg->model.rope.base = m->rope_theta;
    cfg->model.rope.interleaved = !m->rope_halves;
}

/* >>argmax */
static inline int llama_argmax(const float *logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

#endif /* LLAMA_H */
