/*
 * rivals.h - simulates caches of other projects. Keys and values are floats, coded and decoded in place by the
 * rival's rules at the time when the rival codes them. Attention over them is exact.
 *
 *   coded in the append   llama.cpp's q8_0, q5_0, q4_1, q4_0 (blocks of 32 in ggml-quants.c); +h: after the Hadamard
 *                         transform that llama.cpp applies since pull request 21038. TurboQuant (arXiv 2504.19874,
 *                         algorithm 1): norm, rotation, a grid of least squares for normal values
 *   coded in pages        groups per token as in the QuantizedCache of Hugging Face Transformers; Kitty (arXiv
 *                         2511.18643)
 *                         KVarN (arXiv 2606.03458) in tiles of 128 tokens
 *                         OSCAR (arXiv 2605.17757): 2 bits after a rotation per head, which a text teaches
 *   recoded by age        AgeTieredKV of VeloxQuant-MLX
 *   never coded           StreamingLLM (arXiv 2309.17453), which evicts tokens instead; noise-floor, an exact cache
 *                         whose attention adds in another order than the library's
 *
 * A name with a slash, such as turbo4/turbo2 or kvarn-k4v4/k2v2, puts a rival into the tiers of the library's default
 * plan: 4 exact sinks, at least 64 exact newest tokens, at least 448 tokens in the first code, older ones in the
 * second. In its favour, the second code is made from the exact values, where the library has those of the warm tier,
 * and tiles of KVarN stay 128 tokens, so 64 to 191 tokens are exact and 448 to 575 warm.
 *
 * Windows move at the start of a chunk of 64 tokens. So Kitty keeps the newest 128 to 191 values exact instead of
 * 128, in its favour. Bytes follow from the formats; they include metadata, and no other memory.
 */
#ifndef TKV_RIVALS_H
#define TKV_RIVALS_H

#include "../examples/llama.h"

enum { RIVAL_CHUNK = 64, RIVAL_PAGE = 128, RIVAL_TILE = 512, RIVAL_RECENT = 128, RIVAL_MID = 1024 };

/* >>codecs: code and decode in place */
static float rival_half(float x) { /* rounded to fp16, to nearest even */
    uint32_t u;
    if (fabsf(x) < 1.0f / 16384) return rintf(x * 16777216.0f) / 16777216.0f;
    memcpy(&u, &x, sizeof u);
    u = (u + 0xfffu + (u >> 13 & 1u)) & ~0x1fffu;
    memcpy(&x, &u, sizeof x);
    return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}

static float rival_largest(const float *x, int n) { /* the value with the largest magnitude */
    float largest = 0;
    for (int i = 0; i < n; i++)
        if (fabsf(x[i]) > fabsf(largest)) largest = x[i];
    return largest;
}

static void rival_q8_0(float *x, int n) {
    for (; n > 0; n -= 32, x += 32) {
        const float d = fabsf(rival_largest(x, 32)) / 127.0f, id = d > 0 ? 1.0f / d : 0.0f;
        const float scale = rival_half(d);
        for (int i = 0; i < 32; i++) x[i] = scale * roundf(x[i] * id);
    }
}

/* q4_0 and q5_0: levels -half to half - 1; the value with the largest magnitude gets level -half. */
static void rival_signed(float *x, int n, int half) {
    for (; n > 0; n -= 32, x += 32) {
        const float d = rival_largest(x, 32) / (float)-half, id = d > 0 || d < 0 ? 1.0f / d : 0.0f;
        const float scale = rival_half(d);
        for (int i = 0; i < 32; i++) {
            const int code = (int)(x[i] * id + (float)half + 0.5f);
            x[i] = scale * (float)((code > 2 * half - 1 ? 2 * half - 1 : code) - half);
        }
    }
}
static void rival_q4_0(float *x, int n) { rival_signed(x, n, 8); }
static void rival_q5_0(float *x, int n) { rival_signed(x, n, 16); }

static void rival_range(const float *x, size_t stride, int n, float *least, float *most) {
    *least = *most = x[0];
    for (int i = 1; i < n; i++) {
        const float y = x[(size_t)i * stride];
        if (y < *least) *least = y;
        if (y > *most) *most = y;
    }
}

static void rival_q4_1(float *x, int n) {
    for (; n > 0; n -= 32, x += 32) {
        float least, most;
        rival_range(x, 1, 32, &least, &most);
        float d = (most - least) / 15.0f;
        float id = d > 0 ? 1.0f / d : 0.0f;
        float scale;
        float zero;
        scale = rival_half(d);
        zero = rival_half(least);
        for (int i = 0; i < 32; i++) {
            const int code = (int)((x[i] - least) * id + 0.5f);
            x[i] = scale * (float)(code > 15 ? 15 : code) + zero;
        }
    }
}

/* Codes one group with its minimum and a scale, both fp16 (KIVI, arXiv 2402.02750, section 3). */
static void rival_min_max(float *x, size_t stride, int n, int bits) {
    const float top = (float)((1 << bits) - 1);
    float least, most;
    rival_range(x, stride, n, &least, &most);
    float scale;
    float zero;
    scale = rival_half((most - least) / top);
    zero = rival_half(least);
    for (int i = 0; i < n; i++, x += stride) {
        float code = scale > 0 ? rintf((*x - zero) / scale) : 0;
        code = code < 0 ? 0 : code > top ? top : code;
        *x = scale * code + zero;
    }
}
static void rival_groups(float *x, int n, int bits) { /* groups of at most 64 channels */
    for (; n > 0; n -= 64, x += 64) rival_min_max(x, 1, n < 64 ? n : 64, bits);
}
static void rival_int4(float *x, int n) { rival_groups(x, n, 4); }
static void rival_int2(float *x, int n) { rival_groups(x, n, 2); }

static void rival_hadamard(float *x, int n) { /* n: a power of two; the transform is its own inverse */
    const float norm = 1.0f / sqrtf((float)n);
    for (int step = 1; step < n; step *= 2)
        for (int i = 0; i < n; i += 2 * step)
            for (int j = i; j < i + step; j++) {
                const float a = x[j], b = x[j + step];
                x[j] = a + b;
                x[j + step] = a - b;
            }
    for (int i = 0; i < n; i++) x[i] *= norm;
}

/* TurboQuant: the row is rotated before. Its norm is fp16, and the coordinates of the unit vector are nearly normal. */
static void rival_turbo(float *x, int n, const float *levels, int half) {
    double squares = 0;
    for (int i = 0; i < n; i++) squares += (double)x[i] * (double)x[i];
    const float norm = rival_half((float)sqrt(squares / n)), by = norm > 0 ? 1.0f / norm : 0;
    for (int i = 0; i < n; i++) {
        const float y = fabsf(x[i]) * by;
        int k = 0;
        while (k + 1 < half && y > 0.5f * (levels[k] + levels[k + 1])) k++;
        x[i] = norm * (x[i] < 0 ? -levels[k] : levels[k]);
    }
}
/* The positive levels of Max, Quantizing for minimum distortion, IRE Trans. Inf. Theory 6, 1960, table I. */
static void rival_turbo4(float *x, int n) {
    static const float levels[8] = {0.1284f, 0.3881f, 0.6568f, 0.9424f, 1.256f, 1.618f, 2.069f, 2.733f};
    rival_turbo(x, n, levels, 8);
}
static void rival_turbo3(float *x, int n) {
    static const float levels[4] = {0.2451f, 0.7560f, 1.344f, 2.152f};
    rival_turbo(x, n, levels, 4);
}
static void rival_turbo2(float *x, int n) {
    static const float levels[2] = {0.4528f, 1.510f};
    rival_turbo(x, n, levels, 2);
}

static void rival_leave(float *x, int n) { /* codes nothing */
    (void)x;
    (void)n;
}

/* >>kinds */
typedef enum rival_rule {
    RIVAL_APPEND, /* codes rows in the append */
    RIVAL_KVARN,  /* codes tiles when they are full */
    RIVAL_OSCAR,
    RIVAL_PAGES, /* codes rows when a page is full */
    RIVAL_KITTY,
    RIVAL_AGE,
    RIVAL_STREAMING
} rival_rule;

typedef struct rival_kind {
    const char *name;
    rival_rule rule;
    int sinks;
    void (*row)(float *x, int n);
    double bits; /* bits of a coded value, metadata included; 0: see rival_bits */
    int hadamard;
    int k_bits, v_bits;  /* KVarN */
    int tail;            /* newest tokens that stay exact, at least */
    int warm;            /* tokens before them that keep this kind's code, at least */
    const char *archive; /* kind that codes older tokens again; NULL: none */
} rival_kind;

static const rival_kind rival_kinds[] = {
    {"noise-floor", RIVAL_APPEND, 0, rival_leave, 32.0, 0, 0, 0, 0, 0, NULL},
    {"q8_0", RIVAL_APPEND, 0, rival_q8_0, 8.5, 0, 0, 0, 0, 0, NULL},
    {"q8_0+h", RIVAL_APPEND, 0, rival_q8_0, 8.5, 1, 0, 0, 0, 0, NULL},
    {"q5_0", RIVAL_APPEND, 0, rival_q5_0, 5.5, 0, 0, 0, 0, 0, NULL},
    {"q5_0+h", RIVAL_APPEND, 0, rival_q5_0, 5.5, 1, 0, 0, 0, 0, NULL},
    {"q4_1", RIVAL_APPEND, 0, rival_q4_1, 5.0, 0, 0, 0, 0, 0, NULL},
    {"q4_1+h", RIVAL_APPEND, 0, rival_q4_1, 5.0, 1, 0, 0, 0, 0, NULL},
    {"q4_0", RIVAL_APPEND, 0, rival_q4_0, 4.5, 0, 0, 0, 0, 0, NULL},
    {"q4_0+h", RIVAL_APPEND, 0, rival_q4_0, 4.5, 1, 0, 0, 0, 0, NULL},
    {"hf-int4", RIVAL_PAGES, 0, rival_int4, 0, 0, 0, 0, 0, 0, NULL},
    {"hf-int2", RIVAL_PAGES, 0, rival_int2, 0, 0, 0, 0, 0, 0, NULL},
    {"turbo4", RIVAL_PAGES, 4, rival_turbo4, 0, 1, 0, 0, 0, 0, NULL},
    {"turbo3", RIVAL_PAGES, 4, rival_turbo3, 0, 1, 0, 0, 0, 0, NULL},
    {"turbo2", RIVAL_PAGES, 4, rival_turbo2, 0, 1, 0, 0, 0, 0, NULL},
    {"kvarn-k4v2", RIVAL_KVARN, 4, NULL, 0, 1, 4, 2, 0, 0, NULL},
    {"kvarn-k4v4", RIVAL_KVARN, 4, NULL, 0, 1, 4, 4, 0, 0, NULL},
    {"kvarn-k2v2", RIVAL_KVARN, 4, NULL, 0, 1, 2, 2, 0, 0, NULL},
    {"kvarn-k3v3", RIVAL_KVARN, 4, NULL, 0, 1, 3, 3, 0, 0, NULL},
    {"oscar", RIVAL_OSCAR, 64, NULL, 0, 0, 2, 2, 256, 0, NULL},
    {"oscar+tail", RIVAL_OSCAR, 4, NULL, 0, 0, 2, 2, 64, 0, NULL}, /* with the default plan's exact tokens */
    /* in the tiers of the library's default plan */
    {"turbo4/turbo3", RIVAL_PAGES, 4, rival_turbo4, 0, 1, 0, 0, 64, 448, "turbo3"},
    {"turbo4/turbo2", RIVAL_PAGES, 4, rival_turbo4, 0, 1, 0, 0, 64, 448, "turbo2"},
    {"kvarn-k4v4+tail", RIVAL_KVARN, 4, NULL, 0, 1, 4, 4, 64, 0, NULL},
    {"kvarn-k4v4/k4v2", RIVAL_KVARN, 4, NULL, 0, 1, 4, 4, 64, 448, "kvarn-k4v2"},
    {"kvarn-k4v4/k3v3", RIVAL_KVARN, 4, NULL, 0, 1, 4, 4, 64, 448, "kvarn-k3v3"},
    {"kvarn-k4v4/k2v2", RIVAL_KVARN, 4, NULL, 0, 1, 4, 4, 64, 448, "kvarn-k2v2"},
    {"kitty", RIVAL_KITTY, 32, rival_int2, 0, 0, 0, 0, 0, 0, NULL},
    {"age-8/4/2", RIVAL_AGE, 0, NULL, 3.0, 0, 0, 0, 0, 0, NULL},
    {"streaming", RIVAL_STREAMING, 4, NULL, 16.0, 0, 0, 0, 0, 0, NULL},
};

static const rival_kind *rival_find(const char *name) { /* NULL: unknown */
    for (size_t i = 0; i < sizeof rival_kinds / sizeof *rival_kinds; i++)
        if (strcmp(rival_kinds[i].name, name) == 0) return &rival_kinds[i];
    return NULL;
}

/* Returns NULL, or a text about the reason why this rival cannot hold this model. */
static inline const char *rival_refuses(const rival_kind *kind, const llama_model *m) {
    if (m->head_dim > TKV_MAX_HEAD_DIM || m->v_head_dim > TKV_MAX_HEAD_DIM) return "head_dim is too large";
    if (kind->rule == RIVAL_APPEND && kind->row != rival_leave && (m->head_dim % 32 || m->v_head_dim % 32))
        return "head_dim is not a multiple of its 32 values";
    if (kind->rule == RIVAL_OSCAR && (m->head_dim & (m->head_dim - 1) || m->v_head_dim & (m->v_head_dim - 1)))
        return "head_dim is not a power of two";
    if (kind->hadamard && (m->head_dim % 64 || m->v_head_dim % 64)) return "head_dim is not a multiple of 64";
    return NULL;
}

/* >>cache */
typedef struct rival_side { /* K or V of one KV head of one layer */
    float *p, *exact;       /* exact: the appended values, NULL without an archive */
    size_t token, channel;  /* strides: K is stored by channel and V by token, so attention adds rows */
    int dim, rotated;       /* rotated: channels of one Hadamard transform, as in llama.cpp */
    const float *rotation;  /* OSCAR's, see oscar_rotation */
} rival_side;

typedef struct rival {
    const rival_kind *kind;
    const llama_model *m;
    int max_tokens, n; /* n: tokens stored */
    int budget;        /* StreamingLLM: sinks and window */
    float *k, *v;      /* [layer][KV head][channel][max_tokens], [layer][KV head][max_tokens][channel] */
    float *exact_k, *exact_v; /* the appended values, for kinds with an archive; NULL for others */
    float *scores;            /* [rows of a chunk][max_tokens] */
    const float *rotations;   /* OSCAR, from rival_learn; NULL for others */
    float *angles; /* StreamingLLM: rotation of the sinks for each row of a chunk (rival_set_angles) */
} rival;

static void rival_destroy(rival *r) {
    if (!r) return;
    free(r->k);
    free(r->v);
    free(r->exact_k);
    free(r->exact_v);
    free(r->scores);
    free(r->angles);
    free(r);
}

/* Creates a cache of at most max_tokens; NULL: out of memory. Only StreamingLLM uses `budget`. */
static rival *rival_create(const rival_kind *kind, const llama_model *m, int max_tokens, int budget) {
    rival *r = (rival *)calloc(1, sizeof *r);
    if (!r) return NULL;
    size_t heads = (size_t)m->n_layers * (size_t)m->n_kv_heads;
    size_t rows = (size_t)(RIVAL_CHUNK * (m->n_heads / m->n_kv_heads));
    r->kind = kind;
    r->m = m;
    r->max_tokens = max_tokens;
    r->budget = budget;
    r->k = (float *)malloc(heads * (size_t)max_tokens * (size_t)m->head_dim * sizeof *r->k);
    r->v = (float *)malloc(heads * (size_t)max_tokens * (size_t)m->v_head_dim * sizeof *r->v);
    if (kind->archive) {
        r->exact_k = (float *)malloc(heads * (size_t)max_tokens * (size_t)m->head_dim * sizeof *r->k);
        r->exact_v = (float *)malloc(heads * (size_t)max_tokens * (size_t)m->v_head_dim * sizeof *r->v);
    }
    r->scores = (float *)malloc(rows * (size_t)max_tokens * sizeof *r->scores);
    r->angles = (float *)malloc((size_t)(RIVAL_CHUNK * m->rope_dim + m->rope_dim) * sizeof *r->angles);
    const int has_exact = !kind->archive || (r->exact_k && r->exact_v);
    if (r->k && r->v && has_exact && r->scores && r->angles) return r;
    rival_destroy(r);
    return NULL;
}

static size_t rival_rotation_size(const llama_model *m) { /* floats of a KV head's two rotations */
    return (size_t)(m->head_dim * m->head_dim + m->v_head_dim * m->v_head_dim);
}

static rival_side rival_side_of(const rival *r, tkv_side side, int layer, int head) {
    const size_t index = (size_t)layer * (size_t)r->m->n_kv_heads + (size_t)head;
    const size_t max_tokens = (size_t)r->max_tokens;
    rival_side s;
    s.dim = side == TKV_K ? r->m->head_dim : r->m->v_head_dim;
    s.p = (side == TKV_K ? r->k : r->v) + index * (size_t)s.dim * max_tokens;
    s.exact = side == TKV_K ? r->exact_k : r->exact_v;
    if (s.exact) s.exact += index * (size_t)s.dim * max_tokens;
    s.token = side == TKV_K ? 1 : (size_t)s.dim;
    s.channel = side == TKV_K ? max_tokens : 1;
    s.rotated = side == TKV_K ? s.dim & -s.dim : 64;
    s.rotation = r->rotations ? r->rotations + index * rival_rotation_size(r->m) : NULL;
    if (s.rotation && side == TKV_V) s.rotation += r->m->head_dim * r->m->head_dim;
    return s;
}

/* Codes tokens from to `to` - 1 with the kind's row codec. */
static void rival_code_rows(const rival_kind *kind, const rival_side *s, int from, int to) {
    float x[TKV_MAX_HEAD_DIM];
    for (int t = from; t < to; t++) {
        float *p = s->p + (size_t)t * s->token;
        for (int c = 0; c < s->dim; c++) x[c] = p[(size_t)c * s->channel];
        for (int c = 0; kind->hadamard && c < s->dim; c += s->rotated) rival_hadamard(x + c, s->rotated);
        kind->row(x, s->dim);
        for (int c = 0; kind->hadamard && c < s->dim; c += s->rotated) rival_hadamard(x + c, s->rotated);
        for (int c = 0; c < s->dim; c++) p[(size_t)c * s->channel] = x[c];
    }
}

/* Codes groups along tokens: `wide` bits for the n_wide channels with the largest mean magnitude, else `bits`. */
static void rival_code_channels(const rival_side *s, int from, int to, int bits, int n_wide, int wide) {
    float size[TKV_MAX_HEAD_DIM];
    for (int c = 0; c < s->dim; c++) {
        const float *p = s->p + (size_t)from * s->token + (size_t)c * s->channel;
        size[c] = 0;
        for (int t = from; t < to; t++, p += s->token) size[c] += fabsf(*p);
    }
    for (int c = 0; c < s->dim; c++) {
        int larger = 0;
        for (int i = 0; i < s->dim; i++) larger += size[i] > size[c] || (!(size[i] < size[c]) && i < c);
        rival_min_max(s->p + (size_t)from * s->token + (size_t)c * s->channel, s->token, to - from,
                      larger < n_wide ? wide : bits);
    }
}

/* >>KVarN (arXiv 2606.03458, section 4): a tile of RIVAL_PAGE tokens, rotated. Its rows share a grid: of K a channel, of V
 * a token. Rows and columns are divided by their standard deviations in turn, 16 times, and the most even result is
 * taken. Then each row is coded between its minimum and maximum. Scale, minimum and column factors are fp16. */
typedef struct rival_tile {
    float x[RIVAL_PAGE * TKV_MAX_HEAD_DIM], even[RIVAL_PAGE * TKV_MAX_HEAD_DIM]; /* [row][column] */
    int rows, columns;
    double row_log[TKV_MAX_HEAD_DIM], column_log[TKV_MAX_HEAD_DIM]; /* factors so far */
    double row[TKV_MAX_HEAD_DIM], column[TKV_MAX_HEAD_DIM];         /* those of the most even result */
} rival_tile;

/* Standard deviation of n values, with n - 1 in the denominator. */
static double rival_deviation(const float *x, size_t stride, int n) {
    double sum = 0, squares = 0;
    for (int i = 0; i < n; i++) sum += (double)x[(size_t)i * stride];
    for (int i = 0; i < n; i++) {
        const double d = (double)x[(size_t)i * stride] - sum / n;
        squares += d * d;
    }
    return sqrt(squares / (n - 1));
}

static double rival_row_deviation(const rival_tile *t, int row) {
    return rival_deviation(t->even + (size_t)row * (size_t)t->columns, 1, t->columns);
}

static double rival_column_deviation(const rival_tile *t, int column) {
    return rival_deviation(t->even + column, (size_t)t->columns, t->rows);
}

/* Ratio of the largest to the smallest deviation, of columns and of rows, added. */
static double rival_imbalance(const rival_tile *t) {
    double least[2] = {1e300, 1e300}, most[2] = {0, 0};
    for (int i = 0; i < t->rows + t->columns; i++) {
        const int is_column = i >= t->rows;
        const double d = is_column ? rival_column_deviation(t, i - t->rows) : rival_row_deviation(t, i);
        if (d < least[is_column]) least[is_column] = d;
        if (d > most[is_column]) most[is_column] = d;
    }
    return most[0] / (least[0] > 1e-8 ? least[0] : 1e-8) + most[1] / (least[1] > 1e-8 ? least[1] : 1e-8);
}

static void rival_even_out(rival_tile *t) {
    double row[TKV_MAX_HEAD_DIM], column[TKV_MAX_HEAD_DIM];
    for (int i = 0; i < t->rows; i++) row[i] = exp(t->row_log[i]);
    for (int j = 0; j < t->columns; j++) column[j] = exp(t->column_log[j]);
    for (int i = 0; i < t->rows; i++)
        for (int j = 0; j < t->columns; j++)
            t->even[i * t->columns + j] = (float)((double)t->x[i * t->columns + j] / row[i] / column[j]);
}

static double rival_more_log(double log_factor, double deviation) {
    deviation = deviation < 1e-3 ? 1e-3 : deviation > 1e3 ? 1e3 : deviation;
    log_factor += log(deviation);
    return log_factor < -0.3 ? -0.3 : log_factor > 10 ? 10 : log_factor;
}

static void rival_keep_factors(rival_tile *t) {
    for (int i = 0; i < t->rows; i++) t->row[i] = exp(t->row_log[i]);
    for (int j = 0; j < t->columns; j++) t->column[j] = exp(t->column_log[j]);
}

/* Codes and decodes t->x in place. */
static void rival_code_tile(rival_tile *t, int bits) {
    const double top = (double)((1 << bits) - 1);
    double best;
    int i, j;
    memset(t->row_log, 0, sizeof t->row_log);
    memset(t->column_log, 0, sizeof t->column_log);
    memcpy(t->even, t->x, (size_t)(t->rows * t->columns) * sizeof *t->x);
    rival_keep_factors(t);
    best = rival_imbalance(t);
    for (int round = 0; round < 16; round++) {
        double now;
        for (j = 0; j < t->columns; j++)
            t->column_log[j] = rival_more_log(t->column_log[j], rival_column_deviation(t, j));
        rival_even_out(t);
        for (i = 0; i < t->rows; i++)
            t->row_log[i] = rival_more_log(t->row_log[i], rival_row_deviation(t, i));
        rival_even_out(t);
        now = rival_imbalance(t);
        if (now > best) continue;
        best = now;
        rival_keep_factors(t);
    }
    for (j = 0; j < t->columns; j++) t->column_log[j] = log(t->column[j]);
    for (i = 0; i < t->rows; i++) t->row_log[i] = log(t->row[i]);
    rival_even_out(t);
    for (i = 0; i < t->rows; i++) {
        float least, most, scale, zero;
        double step;
        rival_range(t->even + i * t->columns, 1, t->columns, &least, &most);
        step = ((double)most - (double)least) / top;
        if (step < 1e-10) step = 1e-10;
        scale = rival_half((float)(t->row[i] * step));
        zero = rival_half((float)(t->row[i] * (double)least));
        for (j = 0; j < t->columns; j++) {
            double code = rint(((double)t->even[i * t->columns + j] - (double)least) / step);
            code = code < 0 ? 0 : code > top ? top : code;
            t->x[i * t->columns + j] = (scale * (float)code + zero) * rival_half((float)t->column[j]);
        }
    }
}

/* Codes the tile of tokens from `from` on. */
static void rival_code_kvarn(const rival_kind *kind, const rival_side *s, tkv_side side, int from) {
    rival_tile *t = (rival_tile *)malloc(sizeof *t);
    float x[TKV_MAX_HEAD_DIM];
    if (!t) abort();
    t->rows = side == TKV_K ? s->dim : RIVAL_PAGE;
    t->columns = side == TKV_K ? RIVAL_PAGE : s->dim;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < RIVAL_PAGE; i++) {
            float *p = s->p + (size_t)(from + i) * s->token;
            for (int c = 0; c < s->dim; c++) {
                float *in_tile = &t->x[side == TKV_K ? c * t->columns + i : i * t->columns + c];
                if (pass) x[c] = *in_tile;
                else x[c] = p[(size_t)c * s->channel];
            }
            for (int c = 0; c < s->dim; c += s->rotated) rival_hadamard(x + c, s->rotated);
            for (int c = 0; c < s->dim; c++) {
                float *in_tile = &t->x[side == TKV_K ? c * t->columns + i : i * t->columns + c];
                if (pass) p[(size_t)c * s->channel] = x[c];
                else *in_tile = x[c];
            }
        }
        if (!pass) rival_code_tile(t, side == TKV_K ? kind->k_bits : kind->v_bits);
    }
    free(t);
}

/* >>OSCAR (arXiv 2605.17757): K is rotated by U H P. U holds the eigenvectors of the queries' covariance, largest
 * eigenvalue first. H is the Hadamard transform, and P reverses the bits of the channels' numbers. For V the
 * covariance is that of the values, each weighted by the sum of its key's squared scores. A rotated row is clipped at a
 * quantile of its magnitudes, and coded with 2 bits in groups of 128 channels. Each KV head has its own rotations, as in
 * the authors' second version, since one per layer failed on some models. */
enum { OSCAR_GROUP = 128 };

/* Replaces the symmetric a [n][n] by its eigenvalues on the diagonal, with eigenvectors as columns of u (Jacobi). */
static void oscar_eigen(double *a, int n, double *u) {
    for (int i = 0; i < n * n; i++) u[i] = i % (n + 1) == 0;
    for (int sweep = 0; sweep < 12; sweep++)
        for (int p = 0; p < n; p++)
            for (int q = p + 1; q < n; q++) {
                const double apq = a[p * n + q];
                if (fabs(apq) < 1e-300) continue;
                const double angle = 0.5 * atan2(2 * apq, a[q * n + q] - a[p * n + p]), c = cos(angle),
                             s = sin(angle);
                for (int i = 0; i < n; i++) {
                    const double x = a[i * n + p], y = a[i * n + q], v = u[i * n + p], w = u[i * n + q];
                    a[i * n + p] = c * x - s * y, a[i * n + q] = s * x + c * y;
                    u[i * n + p] = c * v - s * w, u[i * n + q] = s * v + c * w;
                }
                for (int i = 0; i < n; i++) {
                    const double x = a[p * n + i], y = a[q * n + i];
                    a[p * n + i] = c * x - s * y, a[q * n + i] = s * x + c * y;
                }
            }
}

/* Makes the rotation [n][n] for a covariance [n][n], which it overwrites. n is a power of two. A row x becomes x R. */
static void oscar_rotation(double *covariance, int n, float *rotation) {
    double *u = (double *)malloc((size_t)(n * n) * sizeof *u);
    float row[TKV_MAX_HEAD_DIM];
    int order[TKV_MAX_HEAD_DIM];
    if (!u) abort();
    oscar_eigen(covariance, n, u);
    for (int i = 0; i < n; i++) {
        int rank = 0;
        const double x = covariance[i * (n + 1)];
        for (int j = 0; j < n; j++)
            rank += covariance[j * (n + 1)] > x || (!(covariance[j * (n + 1)] < x) && j < i);
        order[rank] = i;
    }
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++) row[j] = (float)u[i * n + order[j]];
        rival_hadamard(row, n);
        for (int j = 0; j < n; j++) {
            int reversed = 0;
            for (int bit = 1; bit < n; bit *= 2) reversed = 2 * reversed + ((j & bit) != 0);
            rotation[i * n + reversed] = row[j];
        }
    }
    free(u);
}

static int oscar_compare(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Codes a rotated row. It is clipped at value n * share of its sorted magnitudes. */
static void oscar_code(float *x, int n, double share) {
    float sorted[TKV_MAX_HEAD_DIM];
    const int at = (int)(share * n) < n ? (int)(share * n) : n - 1;
    for (int i = 0; i < n; i++) sorted[i] = fabsf(x[i]);
    qsort(sorted, (size_t)n, sizeof *sorted, oscar_compare);
    for (int i = 0; i < n; i++)
        x[i] = x[i] > sorted[at] ? sorted[at] : x[i] < -sorted[at] ? -sorted[at] : x[i];
    for (int i = 0; i < n; i += OSCAR_GROUP)
        rival_min_max(x + i, 1, n - i < OSCAR_GROUP ? n - i : OSCAR_GROUP, 2);
}

static void rival_code_oscar(const rival_side *s, tkv_side side, int from, int to) {
    const float *rotation = s->rotation;
    float x[TKV_MAX_HEAD_DIM];
    if (!rotation) abort();
    for (int t = from; t < to; t++) {
        float *p = s->p + (size_t)t * s->token;
        memset(x, 0, sizeof x);
        for (int i = 0; i < s->dim; i++)
            for (int c = 0; c < s->dim; c++) x[c] += p[(size_t)i * s->channel] * rotation[i * s->dim + c];
        oscar_code(x, s->dim, side == TKV_K ? 0.96 : 0.92);
        for (int i = 0; i < s->dim; i++) {
            float sum = 0;
            for (int c = 0; c < s->dim; c++) sum += x[c] * rotation[i * s->dim + c];
            p[(size_t)i * s->channel] = sum;
        }
    }
}

/* Returns the number of tokens between the sinks and the newest `exact` ones after n tokens, in whole pages. */
static int rival_left(const rival_kind *kind, int n, int exact) {
    const int page = kind->tail && kind->rule != RIVAL_KVARN ? RIVAL_CHUNK : RIVAL_PAGE;
    const int older = n - kind->sinks - exact;
    return older < 0 ? 0 : older / page * page;
}

/* Returns the number of coded tokens after n tokens, sinks included. */
static int rival_coded(const rival_kind *kind, int n) {
    if (kind->rule == RIVAL_APPEND || kind->rule == RIVAL_AGE) return n;
    return kind->sinks + rival_left(kind, n, kind->tail);
}

/* Returns the number of tokens that the archive's kind has coded after n tokens, sinks included. */
static int rival_archived(const rival_kind *kind, int n) {
    return kind->sinks + (kind->archive ? rival_left(kind, n, kind->tail + kind->warm) : 0);
}

static int rival_age_bits(int age) { return age < RIVAL_RECENT ? 8 : age < RIVAL_MID ? 4 : 2; }

/* Codes tokens from to `to` - 1 with a kind of the rules RIVAL_PAGES, RIVAL_KVARN or RIVAL_OSCAR. */
static void rival_code_pages(const rival_kind *kind, const rival_side *s, tkv_side side, int from, int to) {
    if (kind->rule == RIVAL_PAGES) rival_code_rows(kind, s, from, to);
    if (kind->rule == RIVAL_OSCAR) rival_code_oscar(s, side, from, to);
    for (; kind->rule == RIVAL_KVARN && from < to; from += RIVAL_PAGE) rival_code_kvarn(kind, s, side, from);
}

/* Copies tokens from to `to` - 1 of a side between arrays of its shape. */
static void rival_copy(const rival_side *s, const float *source, float *target, int from, int to) {
    for (int t = from; t < to; t++)
        for (int c = 0; c < s->dim; c++) {
            const size_t at = (size_t)t * s->token + (size_t)c * s->channel;
            target[at] = source[at];
        }
}

/* Codes tokens that are due when the length grows from `before` to n tokens. */
static void rival_age(const rival *r, const rival_side *s, tkv_side side, int before, int n) {
    const rival_kind *kind = r->kind;
    int from = rival_coded(kind, before), to = rival_coded(kind, n), t;
    rival_code_pages(kind, s, side, from, to);
    if (kind->archive) {
        from = rival_archived(kind, before);
        to = rival_archived(kind, n);
        rival_copy(s, s->exact, s->p, from, to);
        rival_code_pages(rival_find(kind->archive), s, side, from, to);
    }
    if (kind->rule == RIVAL_KITTY && side == TKV_K)
        for (; from < to; from += RIVAL_PAGE)
            rival_code_channels(s, from, from + RIVAL_PAGE, 2, s->dim / 4, 4);
    if (kind->rule == RIVAL_KITTY && side == TKV_V) {
        from = before - RIVAL_PAGE > kind->sinks ? before - RIVAL_PAGE : kind->sinks;
        to = n - RIVAL_PAGE > kind->sinks ? n - RIVAL_PAGE : kind->sinks;
        rival_code_rows(kind, s, from, to);
    }
    if (kind->rule == RIVAL_AGE) /* groups of 32; the age is that of a group's oldest token */
        for (t = 0; t < before; t += 32) {
            const int bits = rival_age_bits(n - 1 - t);
            if (bits < rival_age_bits(before - 1 - t))
                rival_code_channels(s, t, t + 32 < before ? t + 32 : before, bits, 0, 0);
        }
}

/* Returns the size of the next chunk at pos, at most `left`. Chunks end where pages end. */
static int rival_chunk(const rival_kind *kind, int pos, int left) {
    const int to_next =
        pos < kind->sinks ? kind->sinks - pos : RIVAL_CHUNK - (pos - kind->sinks) % RIVAL_CHUNK;
    const int n = to_next < RIVAL_CHUNK ? to_next : RIVAL_CHUNK;
    return n < left ? n : left;
}

/* Returns the bytes of a coded token in one KV head, for the rules RIVAL_PAGES, RIVAL_KVARN and RIVAL_OSCAR. */
static double rival_token_bytes(const rival_kind *kind, const llama_model *m) {
    const double k = m->head_dim, v = m->v_head_dim;
    const int turbo = kind->row == rival_turbo4   ? 4
                      : kind->row == rival_turbo3 ? 3
                      : kind->row == rival_turbo2 ? 2
                                                  : 0;
    if (kind->rule ==
        RIVAL_KVARN) /* K: scale and minimum per channel, a factor per token; V: the other way round */
        return k * kind->k_bits / 8 + k * 4 / (double)RIVAL_PAGE + 2 + v * kind->v_bits / 8 + 4 +
               v * 2 / (double)RIVAL_PAGE;
    if (kind->rule == RIVAL_OSCAR) /* a scale and a minimum per token and group */
        return (k + v) / 4 + 4 * (ceil(k / (double)OSCAR_GROUP) + ceil(v / (double)OSCAR_GROUP));
    if (turbo) return (k + v) * turbo / 8 + 4; /* a norm per token */
    /* a scale and a minimum per token and 64 channels */
    return (k + v) * (kind->row == rival_int4 ? 4 : 2) / 8 + 4 * (ceil(k / 64) + ceil(v / 64));
}

/* Returns the bytes of n tokens in all layers. */
static double rival_bytes(const rival_kind *kind, const llama_model *m, int n, int budget) {
    const double heads = (double)m->n_layers * m->n_kv_heads, k = m->head_dim, v = m->v_head_dim;
    const double fp16 = heads * (k + v) * 2;
    const int coded = rival_coded(kind, n), archived = rival_archived(kind, n);
    double bytes = 0;
    int t;
    switch (kind->rule) {
    case RIVAL_APPEND: bytes = n * heads * (k + v) * kind->bits / 8; break;
    case RIVAL_KVARN:
    case RIVAL_OSCAR:
    case RIVAL_PAGES:
        bytes = (coded - archived) * heads * rival_token_bytes(kind, m) + (n - coded + kind->sinks) * fp16;
        if (kind->archive)
            bytes += (archived - kind->sinks) * heads * rival_token_bytes(rival_find(kind->archive), m);
        break;
    case RIVAL_KITTY: /* K: a scale and a minimum per channel and page, and a bit for its width */
        bytes = (coded - kind->sinks) * heads * (k * 2.5 + k * 33 / (double)RIVAL_PAGE) / 8;
        bytes += (n - coded + kind->sinks) * heads * k * 2;
        t = n - kind->sinks - RIVAL_PAGE > 0 ? n - kind->sinks - RIVAL_PAGE : 0;
        bytes += t * heads * (v / 4 + 4 * ceil(v / 64)) + (n - t) * heads * v * 2;
        break;
    case RIVAL_AGE:
        for (t = 0; t < n; t += 32)
            bytes += (n - t < 32 ? n - t : 32) * heads * (k + v) * (rival_age_bits(n - 1 - t) + 1) / 8;
        break;
    case RIVAL_STREAMING: bytes = (n < budget ? n : budget) * fp16; break;
    }
    return bytes;
}

/* Returns the bits per value of old tokens, K and V together. */
static double rival_bits(const rival_kind *kind, const llama_model *m) {
    const int n = 1 << 20;
    if (kind->bits > 0) return kind->bits;
    return 8 * (rival_bytes(kind, m, 2 * n, 0) - rival_bytes(kind, m, n, 0)) /
           ((double)n * m->n_layers * m->n_kv_heads * (m->head_dim + m->v_head_dim));
}

/* >>attention */
/* Adds m <= 4 rows: y[i] += a[0] x[i] + a[1] x[stride + i] + ..., for i < n. */
static void rival_add(float *y, const float *a, int m, const float *x, size_t stride, size_t n) {
    size_t i = 0;
    if (m == 4) {
        float same[4][LLAMA_LANES];
        for (int j = 0; j < 4; j++)
            for (i = 0; i < LLAMA_LANES; i++) same[j][i] = a[j];
        llama_vec b[4];
        memcpy(b, same, sizeof b);
        for (i = 0; i + LLAMA_LANES <= n; i += LLAMA_LANES) {
            const float *p = x + i;
            llama_vec s = LLAMA_VEC(y + i) + b[0] * LLAMA_VEC(p) + b[1] * LLAMA_VEC(p + stride) +
                          (b[2] * LLAMA_VEC(p + 2 * stride) + b[3] * LLAMA_VEC(p + 3 * stride));
            memcpy(y + i, &s, sizeof s);
        }
    }
    for (; i < n; i++)
        for (int j = 0; j < m; j++) y[i] += a[j] * x[(size_t)j * stride + i];
}

/* Sets the rotation of the sinks for each row. StreamingLLM counts positions inside its cache, so the sinks move
 * along with the window. */
static void rival_set_angles(const rival *r, int n) {
    const llama_model *m = r->m;
    const int pairs = m->rope_dim / 2;
    float *factors = r->angles + (size_t)(RIVAL_CHUNK * m->rope_dim);
    if (m->rope_factors.data) llama_row(&m->rope_factors, 0, factors);
    for (int i = 0; i < n; i++) {
        const int shift = r->n + i + 1 > r->budget ? r->n + i + 1 - r->budget : 0;
        for (int j = 0; j < pairs; j++) {
            const double f = llama_frequency(m, factors, j);
            r->angles[2 * (i * pairs + j)] = (float)cos(f * shift);
            r->angles[2 * (i * pairs + j) + 1] = (float)-sin(f * shift);
        }
    }
}

/* Returns exp(x) for x <= 0 with a relative error of 1e-7. Compilers can vectorize it. */
static float rival_exp(float x) {
    const float y = (x < -86.0f ? -86.0f : x) * 1.44269504f;
    const int32_t n = (int32_t)(y - 0.5f), power = (n + 127) * (1 << 23);
    const float f = (y - (float)n) * 0.69314718f;
    float scale, e = 1.0f / 720;
    memcpy(&scale, &power, sizeof scale);
    e = e * f + 1.0f / 120;
    e = e * f + 1.0f / 24;
    e = e * f + 1.0f / 6;
    e = e * f + 0.5f;
    e = e * f + 1.0f;
    return (e * f + 1.0f) * scale;
}

/* Replaces p[i] by exp(p[i] - high) for i < n. Returns the sum. */
static double rival_exps(float *p, int n, float high) {
    double sum = 0;
    for (int i = 0; i < n; i++) p[i] = rival_exp(p[i] - high);
    for (int i = 0; i < n; i++) sum += (double)p[i];
    return sum;
}

/* Attends with the queries of one KV head for n tokens. q and out point to its first query head of [n][n_heads]. */
static void rival_attend(const rival *r, const rival_side *k, const rival_side *v, const float *q, int n,
                         float *out) {
    const llama_model *m = r->m;
    const int streaming = r->kind->rule == RIVAL_STREAMING, sinks = streaming ? r->kind->sinks : 0;
    const int group = m->n_heads / m->n_kv_heads, rows = n * group, end = r->n + n;
    const int first = streaming && end > r->budget ? (end - r->budget) / RIVAL_TILE * RIVAL_TILE : 0;
    const float scale = 1.0f / sqrtf((float)k->dim);
    for (int row = 0; row < rows; row++)
        memset(r->scores + (size_t)row * (size_t)r->max_tokens, 0, (size_t)end * sizeof *r->scores);
    float x[TKV_MAX_HEAD_DIM];
    int c;
    for (int tile = first; tile < end;
         tile += RIVAL_TILE) { /* keys of a tile stay in the processor's cache */
        const int count = end - tile < RIVAL_TILE ? end - tile : RIVAL_TILE;
        for (int row = 0; row < rows; row++) {
            const float *query = q + (row / group * m->n_heads + row % group) * k->dim;
            for (c = 0; c < k->dim; c++) x[c] = scale * query[c];
            for (c = 0; c < k->dim; c += 4)
                rival_add(r->scores + (size_t)row * (size_t)r->max_tokens + tile, x + c,
                          k->dim - c < 4 ? k->dim - c : 4, k->p + (size_t)c * k->channel + tile, k->channel,
                          (size_t)count);
        }
    }
    int t;
    for (int row = 0; row < rows; row++) { /* keys 0 to sinks - 1, and from to `to` - 1 */
        const int at = row / group * m->n_heads + row % group, to = r->n + row / group + 1;
        const int evicted = streaming && to > r->budget ? to - r->budget : 0,
                  from = sinks < to ? evicted + sinks : to;
        float *p = r->scores + (size_t)row * (size_t)r->max_tokens, *o = out + at * v->dim, high = -1e30f;
        if (evicted) {
            for (c = 0; c < k->dim; c++) x[c] = scale * q[at * k->dim + c];
            llama_rope(m, x, 1, 1, r->angles + row / group * m->rope_dim);
            for (t = 0; t < sinks; t++)
                for (c = 0, p[t] = 0; c < k->dim; c++)
                    p[t] += x[c] * k->p[(size_t)c * k->channel + (size_t)t];
        }
        for (t = 0; t < to; t = t + 1 == sinks ? from : t + 1)
            if (p[t] > high) high = p[t];
        double sum = rival_exps(p, sinks < to ? sinks : to, high) + rival_exps(p + from, to - from, high);
        for (t = 0; t < to; t++) p[t] = t < sinks || t >= from ? p[t] * (float)(1 / sum) : 0;
        for (; t < end; t++) p[t] = 0;
        for (c = 0; c < v->dim; c++) o[c] = 0;
        for (t = 0; first && t < sinks; t++) rival_add(o, p + t, 1, v->p + t * v->dim, 0, (size_t)v->dim);
    }
    for (int tile = first; tile < end; tile += RIVAL_TILE)
        for (int row = 0; row < rows; row++) {
            const float *p = r->scores + (size_t)row * (size_t)r->max_tokens;
            const int to = end - tile < RIVAL_TILE ? end : tile + RIVAL_TILE;
            float *o = out + (row / group * m->n_heads + row % group) * v->dim;
            for (t = tile; t < to; t += 4)
                rival_add(o, p + t, to - t < 4 ? to - t : 4, v->p + (size_t)t * v->token, v->token,
                          (size_t)v->dim);
        }
}

/* The attention of llama_forward_with; ctx is the rival. The last layer adds n to the length. */
static tkv_status rival_attention(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                                  float *out) {
    rival *r = (rival *)ctx;
    const llama_model *m = r->m;
    const int group = m->n_heads / m->n_kv_heads, before = r->n;
    if (n > RIVAL_CHUNK || n > r->max_tokens - r->n) return TKV_ERR_CAPACITY;
    if (layer == 0 && r->kind->rule == RIVAL_STREAMING) rival_set_angles(r, n);
    for (int head = 0; head < m->n_kv_heads; head++) {
        rival_side s[2];
        for (int side = 0; side < 2; side++) {
            const float *from = side == TKV_K ? k : v;
            s[side] = rival_side_of(r, (tkv_side)side, layer, head);
            for (int t = 0; t < n; t++)
                for (int c = 0; c < s[side].dim; c++)
                    s[side].p[(size_t)(before + t) * s[side].token + (size_t)c * s[side].channel] =
                        from[(size_t)(t * m->n_kv_heads + head) * (size_t)s[side].dim + (size_t)c];
            if (s[side].exact) rival_copy(&s[side], s[side].p, s[side].exact, before, before + n);
            if (r->kind->rule == RIVAL_APPEND) rival_code_rows(r->kind, &s[side], before, before + n);
            if (r->kind->rule == RIVAL_AGE) /* the newest tokens have 8 bits */
                for (int t = before; t < before + n; t += 32)
                    rival_code_channels(&s[side], t, t + 32 < before + n ? t + 32 : before + n, 8, 0, 0);
        }
        rival_attend(r, &s[TKV_K], &s[TKV_V], q + head * group * m->head_dim, n,
                     out + head * group * m->v_head_dim);
        for (int side = 0; side < 2; side++) rival_age(r, &s[side], (tkv_side)side, before, before + n);
    }
    if (layer == m->n_layers - 1) r->n += n;
    return TKV_OK;
}

/* >>learning OSCAR's rotations */
typedef struct rival_lesson {
    rival *r;
    double *q; /* [layer][KV head][head_dim][head_dim], sum of q q^T */
} rival_lesson;

static tkv_status rival_listen(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                               float *out) { /* the llama_attention of a rival_lesson */
    const rival_lesson *l = (const rival_lesson *)ctx;
    const llama_model *m = l->r->m;
    const int dim = m->head_dim, group = m->n_heads / m->n_kv_heads;
    for (int i = 0; i < n * m->n_heads; i++) {
        const float *x = q + (size_t)i * (size_t)dim;
        double *sum = l->q + (size_t)(layer * m->n_kv_heads + i % m->n_heads / group) * (size_t)(dim * dim);
        for (int a = 0; a < dim; a++)
            for (int b = 0; b < dim; b++) sum[a * dim + b] += (double)(x[a] * x[b]);
    }
    return rival_attention(l->r, layer, q, k, v, n, out);
}

/* Adds v v^T of n tokens, each weighted by k^T C k, to sum [v_head_dim][v_head_dim]. C is the queries' covariance. */
static void rival_weigh_values(const rival_side *k, const rival_side *v, int n, const double *c,
                               double *sum) {
    float key[TKV_MAX_HEAD_DIM];
    for (int t = 0; t < n; t++) {
        const float *value = v->p + (size_t)t * v->token;
        double weight = 0;
        for (int a = 0; a < k->dim; a++) key[a] = k->p[(size_t)t * k->token + (size_t)a * k->channel];
        for (int a = 0; a < k->dim; a++) {
            double product = 0;
            for (int b = 0; b < k->dim; b++) product += c[a * k->dim + b] * (double)key[b];
            weight += product * (double)key[a];
        }
        for (int a = 0; a < v->dim; a++)
            for (int b = 0; b < v->dim; b++) sum[a * v->dim + b] += weight * (double)(value[a] * value[b]);
    }
}

/* Makes the rotations of all KV heads from a text of n tokens. The caller frees them; NULL: out of memory. */
static inline float *rival_learn(const llama_model *m, const int *tokens, int n) {
    const int heads = m->n_layers * m->n_kv_heads, k_size = m->head_dim * m->head_dim;
    rival_lesson l;
    l.r = rival_create(rival_find("noise-floor"), m, n, 0);
    l.q = (double *)calloc((size_t)(heads * k_size), sizeof *l.q);
    float *rotations = (float *)malloc((size_t)heads * rival_rotation_size(m) * sizeof *rotations);
    double *values = (double *)malloc((size_t)(m->v_head_dim * m->v_head_dim) * sizeof *values);
    tkv_status status = l.r && l.q && rotations && values ? TKV_OK : TKV_ERR_NOMEM;
    for (int pos = 0, step; status == TKV_OK && pos < n; pos += step) {
        step = n - pos < RIVAL_CHUNK ? n - pos : RIVAL_CHUNK;
        status = llama_forward_with(m, tokens + pos, step, pos, rival_listen, &l, NULL, 0);
    }
    for (int i = 0; status == TKV_OK && i < heads; i++) {
        const rival_side k = rival_side_of(l.r, TKV_K, i / m->n_kv_heads, i % m->n_kv_heads);
        const rival_side v = rival_side_of(l.r, TKV_V, i / m->n_kv_heads, i % m->n_kv_heads);
        float *to = rotations + (size_t)i * rival_rotation_size(m);
        memset(values, 0, (size_t)(v.dim * v.dim) * sizeof *values);
        rival_weigh_values(&k, &v, n, l.q + (size_t)i * (size_t)k_size, values);
        oscar_rotation(l.q + (size_t)i * (size_t)k_size, k.dim, to);
        oscar_rotation(values, v.dim, to + k_size);
    }
    if (status != TKV_OK) free(rotations), rotations = NULL;
    rival_destroy(l.r);
    free(l.q);
    free(values);
    return rotations;
}

#endif /* TKV_RIVALS_H */
