/*
 * test_attend.c - attention against a double-precision computation written here (the oracle).
 *
 * The oracle takes keys and values as tkv_read decodes them. The difference is then the error of the arithmetic.
 * With the keys and values that were appended, the difference includes the error of the format. Errors are relative,
 * L2 over the whole output of a call.
 *
 * Bounds of the arithmetic error: 1e-5 if every block is F32, 2e-3 if every block is exact. With compressed blocks
 * its ratio to the format error of the call is bounded. One call has a ratio of at most 1/4. The root mean square
 * of the ratios of many calls is at most 1/10. With cfg.host.precise the bound 2e-3 holds as well.
 */
#include "../tieredkv.h"
#include "kit.h"

#include <math.h>

static double larger(double a, double b) { return a > b ? a : b; }

static double smaller(double a, double b) { return a < b ? a : b; }

static void *allocate_zeros(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size);
    if (!p) {
        printf("out of memory\n");
        exit(2);
    }
    return p;
}

static float *allocate_floats(int n) { return (float *)allocate_zeros((size_t)n, sizeof(float)); }

static double *allocate_doubles(int n) { return (double *)allocate_zeros((size_t)n, sizeof(double)); }

/* |a - b| / |b|, L2 */
static double relative_difference(const double *a, const double *b, int n) {
    double diff = 0.0, size = 0.0;
    int i;
    for (i = 0; i < n; i++) {
        diff += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return size > 0.0 ? sqrt(diff / size) : sqrt(diff);
}

/* >>fixture: a cache, the K and V appended to it, and the K and V read back */
enum { MAX_SEQUENCES = 8 };

typedef struct model_sequence { /* one layer of one sequence, [len][n_kv_heads][dim] */
    int len, expired;           /* tokens after the first `sinks` that have left the window */
    int sinks;                  /* tokens that a window does not hide */
    float *k, *v;               /* appended */
    float *dk, *dv;             /* decoded */
} model_sequence;

typedef struct fixture {
    tkv_config cfg; /* with defaults that the test relies on filled in */
    tkv_layer_config layers[4];
    tkv_cache *kv;
    tkv_rng rng;
    model_sequence s[MAX_SEQUENCES];  /* [seq][layer] */
    int has_tiles, has_16_bit_floats; /* whether such blocks exist */
} fixture;

static tkv_config make_config(int heads, int kv_heads, int dk, int dv) {
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = 1;
    cfg.model.n_heads = heads;
    cfg.model.n_kv_heads = kv_heads;
    cfg.model.head_dim = dk;
    cfg.model.v_head_dim = dv;
    cfg.host.isa = tkv_test_isa();
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4; /* they need no learned table */
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    return cfg;
}

static int open_fixture(fixture *f, const tkv_config *cfg, uint64_t seed) {
    char reason[200];
    tkv_status st;
    int i;
    memset(f, 0, sizeof *f);
    for (i = 0; i < MAX_SEQUENCES; i++) { /* empty, but not NULL */
        f->s[i].k = allocate_floats(0);
        f->s[i].v = allocate_floats(0);
        f->s[i].dk = allocate_floats(0);
        f->s[i].dv = allocate_floats(0);
    }
    f->cfg = *cfg;
    f->rng = tkv_rng_seed(seed);
    if (!f->cfg.limits.max_seqs) f->cfg.limits.max_seqs = 1;
    if (cfg->layers) {
        memcpy(f->layers, cfg->layers, (size_t)cfg->model.n_layers * sizeof *f->layers);
        f->cfg.layers = f->layers;
    }
    (void)tkv_validate_config(&f->cfg, reason, sizeof reason);
    st = tkv_create(&f->cfg, &f->kv);
    CHECK_MSG(st == TKV_OK, "%s: %s", tkv_get_status_text(st), reason);
    return st == TKV_OK;
}

static void close_fixture(fixture *f) {
    int i;
    for (i = 0; i < MAX_SEQUENCES; i++) {
        free(f->s[i].k);
        free(f->s[i].v);
        free(f->s[i].dk);
        free(f->s[i].dv);
    }
    tkv_destroy(f->kv);
}

static int kv_layer_of(const fixture *f, int layer) {
    return f->cfg.layers && f->layers[layer].share_kv ? f->layers[layer].share_kv - 1 : layer;
}

static model_sequence *model_sequence_of(fixture *f, int seq, int layer) {
    return &f->s[seq * f->cfg.model.n_layers + kv_layer_of(f, layer)];
}

static float *join_rows(float *old, int n_old, const float *rows, int n) {
    float *joined_rows = allocate_floats(n_old + n);
    if (n_old) memcpy(joined_rows, old, (size_t)n_old * sizeof(float));
    memcpy(joined_rows + n_old, rows, (size_t)n * sizeof(float));
    free(old);
    return joined_rows;
}

static void append_to_fixture(fixture *f, int seq, int layer, const float *k, const float *v, int n,
                              int chunk) {
    model_sequence *s = model_sequence_of(f, seq, layer);
    int rk = f->cfg.model.n_kv_heads * f->cfg.model.head_dim,
        rv = f->cfg.model.n_kv_heads * f->cfg.model.v_head_dim, i;
    for (i = 0; i < n; i += chunk) {
        int m = n - i < chunk ? n - i : chunk;
        CHECK_EQ(tkv_append(f->kv, seq, layer, k + i * rk, v + i * rv, m), TKV_OK);
    }
    s->k = join_rows(s->k, s->len * rk, k, n * rk);
    s->v = join_rows(s->v, s->len * rv, v, n * rv);
    s->len += n;
}

/* Appends n tokens of Gaussian numbers. */
static void append_random_tokens(fixture *f, int seq, int layer, int n, int chunk) {
    int nk = n * f->cfg.model.n_kv_heads * f->cfg.model.head_dim,
        nv = n * f->cfg.model.n_kv_heads * f->cfg.model.v_head_dim;
    float *k = allocate_floats(nk), *v = allocate_floats(nv);
    tkv_rng_fill(&f->rng, k, (size_t)nk, 1.0);
    tkv_rng_fill(&f->rng, v, (size_t)nv, 1.0);
    append_to_fixture(f, seq, layer, k, v, n, chunk);
    free(k);
    free(v);
}

static void record_format(fixture *f, tkv_format format) {
    if (format == TKV_F16 || format == TKV_BF16) f->has_16_bit_floats = 1;
    else if (format != TKV_F32) f->has_tiles = 1;
}

/* Records the formats of a tier: those of the layer, else those of the cache, else the default. */
static void record_tier_formats(fixture *f, int layer, tkv_tier tier) {
    static const tkv_format standard[TKV_TIER_COUNT] = {TKV_F16, TKV_KIVI4, TKV_KIVI2};
    const tkv_layer_config *l = &f->layers[layer];
    const tkv_format_pair *of_layer = tier == TKV_TIER_HOT    ? &l->hot
                                      : tier == TKV_TIER_WARM ? &l->warm
                                                              : &l->archive;
    const tkv_format_pair *of_cache = tier == TKV_TIER_HOT    ? &f->cfg.tiers.hot
                                      : tier == TKV_TIER_WARM ? &f->cfg.tiers.warm
                                                              : &f->cfg.tiers.archive;
    record_format(f, of_layer->k ? of_layer->k : of_cache->k ? of_cache->k : standard[tier]);
    record_format(f, of_layer->v ? of_layer->v : of_cache->v ? of_cache->v : standard[tier]);
}

/* Number of first tokens that queries of a layer see beyond its window. */
static int n_window_sinks(const fixture *f, int layer) {
    const tkv_layer_config *l = &f->layers[layer];
    const int sinks = f->layers[kv_layer_of(f, layer)].sink_tokens;
    const int n = sinks ? sinks : f->cfg.tiers.sink_tokens ? f->cfg.tiers.sink_tokens : 4;
    return (l->window_sinks ? l->window_sinks : f->cfg.model.window_sinks) == 1 && n != TKV_OFF ? n : 0;
}

/* Reads everything back. Expired tokens become huge numbers, so that any use of them shows. */
static void read_fixture_back(fixture *f) {
    int seq, layer, tier, i, from, rk = f->cfg.model.n_kv_heads * f->cfg.model.head_dim,
                                   rv = f->cfg.model.n_kv_heads * f->cfg.model.v_head_dim;
    f->has_tiles = f->has_16_bit_floats = 0;
    for (seq = 0; seq < f->cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < f->cfg.model.n_layers; layer++) {
            model_sequence *s = model_sequence_of(f, seq, layer);
            tkv_layer_info info;
            if (kv_layer_of(f, layer) != layer || f->layers[layer].no_cache) continue;
            CHECK_EQ(tkv_get_layer(f->kv, seq, layer, &info), TKV_OK);
            for (tier = 0; tier < TKV_TIER_COUNT; tier++)
                if (info.tokens[tier]) record_tier_formats(f, layer, (tkv_tier)tier);
            CHECK_EQ(tkv_get_length(f->kv, seq, layer), s->len);
            s->expired = info.expired;
            s->sinks = 0;
            if (s->expired) { /* a layer that reads this one's keys can keep the sinks */
                uint8_t tiers[64];
                CHECK_EQ(tkv_get_tiers(f->kv, seq, layer, 0, 64, tiers), TKV_OK);
                while (tiers[s->sinks] != TKV_TOKEN_GONE) s->sinks++;
            }
            from = s->sinks + s->expired;
            free(s->dk);
            free(s->dv);
            s->dk = allocate_floats(s->len * rk);
            s->dv = allocate_floats(s->len * rv);
            for (i = 0; i < from * rk; i++) s->dk[i] = 1e30f;
            for (i = 0; i < from * rv; i++) s->dv[i] = 1e30f;
            if (from) CHECK_EQ(tkv_read(f->kv, seq, layer, 0, s->sinks, s->dk, s->dv), TKV_OK);
            if (from) CHECK_EQ(tkv_read(f->kv, seq, layer, from - 1, 1, s->dk, s->dv), TKV_ERR_RANGE);
            CHECK_EQ(tkv_read(f->kv, seq, layer, from, s->len - from, s->dk + from * rk, s->dv + from * rv),
                     TKV_OK);
        }
}

/* >>oracle */
typedef struct oracle_result {
    int rows, max_len;
    /* [row][head][dv], [row][head], [item][max_len]; lse -1e300: no key is visible. */
    double *out, *lse, *scores;
    double *logit; /* [row][head][max_len], -1e300: hidden */
    double max_logit;
} oracle_result;

static void free_oracle_result(oracle_result *a) {
    free(a->out);
    free(a->lse);
    free(a->scores);
    free(a->logit);
}

/* The value of a finite fp16 or bf16 number. */
static double float_of_half(tkv_type type, int h) {
    int digits = type == TKV_TYPE_F16 ? 10 : 7, e = (h & 0x7fff) >> digits, m = h & ((1 << digits) - 1);
    double x = e ? ldexp((double)((1 << digits) + m), e) : ldexp((double)m, 1);
    x = ldexp(x, type == TKV_TYPE_F16 ? -25 : -134);
    return h & 0x8000 ? -x : x;
}

/* x as fp16 or bf16, truncated. Numbers out of the range of fp16 become 0. */
static uint16_t truncate_to_half(tkv_type type, float x) {
    uint32_t bits, e;
    memcpy(&bits, &x, sizeof bits);
    if (type == TKV_TYPE_BF16) return (uint16_t)(bits >> 16);
    e = bits >> 23 & 0xff;
    if (e <= 112 || e >= 143) return 0;
    return (uint16_t)((bits >> 16 & 0x8000) | (e - 112) << 10 | (bits >> 13 & 0x3ff));
}

static double read_element(const void *data, tkv_type type, ptrdiff_t at) {
    if (type == TKV_TYPE_F32) return (double)((const float *)data)[at];
    return float_of_half(type, ((const uint16_t *)data)[at]);
}

/* mask_at: where the row's numbers begin in the mask */
static int is_visible(const tkv_attend_params *p, int window, int sinks, ptrdiff_t mask_at, int row, int pos,
                      int j, int len) {
    int bit = j - (len - p->n_mask_bits);
    ptrdiff_t words = p->mask_bits_stride ? p->mask_bits_stride : (p->n_mask_bits + 63) / 64;
    if (!p->non_causal && j > pos) return 0;
    if (window && j <= pos - window && j >= sinks) return 0;
    if (p->mask && ((const float *)p->mask)[mask_at + j] <= -1e30f) return 0;
    if (p->mask_bits && bit >= 0 && !(p->mask_bits[row * words + bit / 64] >> (bit % 64) & 1u)) return 0;
    return 1;
}

static int effective_window(const fixture *f, const tkv_attend_params *p) {
    int w = p->window;
    if (!w) w = f->layers[p->layer].window;
    if (!w) w = f->cfg.model.window;
    return w == TKV_OFF ? 0 : w;
}

static double effective_scale(const fixture *f, const tkv_attend_params *p) {
    if (p->scale != 0.0f) return (double)p->scale;
    if (f->cfg.model.scale != 0.0f) return (double)f->cfg.model.scale;
    return (double)(float)(1.0 / sqrt((double)f->cfg.model.head_dim));
}

static oracle_result compute_oracle(fixture *f, const tkv_attend_params *p, int exact) {
    tkv_rows one;
    const tkv_rows *rows = p->batch ? p->batch : &one;
    int n_rows = p->batch ? p->n_batch : 1, heads = f->cfg.model.n_heads,
        heads_per_kv_head = heads / f->cfg.model.n_kv_heads;
    int dk = f->cfg.model.head_dim, dv = f->cfg.model.v_head_dim, window = effective_window(f, p);
    int item, query, head, j, c, row = 0;
    ptrdiff_t q_head = p->q_head_stride ? p->q_head_stride : dk, mask_stride;
    ptrdiff_t q_row = p->q_row_stride ? p->q_row_stride : (ptrdiff_t)heads * dk;
    double scale = effective_scale(f, p), q[TKV_MAX_HEAD_DIM], *weight, top, sum;
    oracle_result a;
    memset(&a, 0, sizeof a);
    one.seq = p->seq;
    one.n = p->n;
    for (item = 0; item < n_rows; item++) {
        int len = model_sequence_of(f, rows[item].seq, p->layer)->len;
        a.rows += rows[item].n;
        if (len > a.max_len) a.max_len = len;
    }
    mask_stride = p->mask_stride ? p->mask_stride : a.max_len;
    a.out = allocate_doubles(a.rows * heads * dv);
    a.lse = allocate_doubles(a.rows * heads);
    a.scores = allocate_doubles(n_rows * a.max_len);
    a.logit = allocate_doubles(a.rows * heads * a.max_len);
    weight = allocate_doubles(a.max_len);
    for (item = 0; item < n_rows; item++) {
        const model_sequence *sequence = model_sequence_of(f, rows[item].seq, p->layer);
        for (query = 0; query < rows[item].n; query++, row++)
            for (head = 0; head < heads; head++) {
                const float *k = (exact ? sequence->k : sequence->dk) + head / heads_per_kv_head * dk;
                const float *v = (exact ? sequence->v : sequence->dv) + head / heads_per_kv_head * dv;
                double *out = a.out + (row * heads + head) * dv;
                int pos = sequence->len - rows[item].n + query, sees_a_key = 0;
                const ptrdiff_t mask_at = row * mask_stride + head * p->mask_head_stride;
                top = -1e300;
                sum = 0.0;
                for (c = 0; c < dk; c++)
                    q[c] = read_element(p->q, p->q_type, row * q_row + head * q_head + c);
                for (j = 0; j < sequence->len; j++) {
                    const float *key = k + j * f->cfg.model.n_kv_heads * dk;
                    weight[j] = -1e300;
                    if (!is_visible(p, window, n_window_sinks(f, p->layer), mask_at, row, pos, j,
                                    sequence->len))
                        continue;
                    weight[j] = 0.0;
                    for (c = 0; c < dk; c++) weight[j] += q[c] * (double)key[c];
                    weight[j] *= scale;
                    if (p->softcap > 0.0f)
                        weight[j] = (double)p->softcap * tanh(weight[j] / (double)p->softcap);
                    if (p->alibi_slopes) weight[j] += (double)p->alibi_slopes[head] * (double)(j - pos);
                    if (p->mask) weight[j] += (double)((const float *)p->mask)[mask_at + j];
                    a.max_logit = larger(a.max_logit, fabs(weight[j]));
                    top = larger(top, weight[j]);
                    sees_a_key = 1;
                }
                for (j = 0; j < a.max_len; j++)
                    a.logit[(row * heads + head) * a.max_len + j] = j < sequence->len ? weight[j] : -1e300;
                if (p->sink_logits && tkv_test_is_finite((double)p->sink_logits[head])) {
                    top = larger(top, (double)p->sink_logits[head]);
                    sum = exp((double)p->sink_logits[head] - top);
                }
                for (j = 0; j < sequence->len; j++) {
                    const float *value = v + j * f->cfg.model.n_kv_heads * dv;
                    if (weight[j] <= -1e300) continue;
                    weight[j] = exp(weight[j] - top);
                    sum += weight[j];
                    for (c = 0; c < dv; c++) out[c] += weight[j] * (double)value[c];
                }
                a.lse[row * heads + head] = sum > 0.0 ? top + log(sum) : -1e300;
                for (c = 0; sees_a_key && c < dv; c++) out[c] /= sum;
                for (j = 0; sees_a_key && j < sequence->len; j++)
                    if (weight[j] > -1e300) a.scores[item * a.max_len + j] += weight[j] / sum;
            }
    }
    free(weight);
    return a;
}

/* >>one call of the library, with outputs in buffers whose gaps must not change */
typedef struct call_result {
    tkv_status status;
    double *out, *lse, *scores; /* packed as in oracle_result */
} call_result;

static void free_call_result(call_result *o) {
    free(o->out);
    free(o->lse);
    free(o->scores);
}

/* Outputs of a call. REFERENCE: compares the reference too. LOOSE_BOUND: half the format error is allowed. */
enum { LSE = 1, SCORES = 2, REFERENCE = 4, LOOSE_BOUND = 8 };
enum { GUARD = 64, FILLER = 0x5a };

static int are_gaps_untouched(const unsigned char *buffer, const unsigned char *is_output_byte, int bytes) {
    int i;
    for (i = 0; i < bytes; i++)
        if (!is_output_byte[i] && buffer[i] != FILLER) return 0;
    return 1;
}

typedef tkv_status (*attend_function)(tkv_cache *kv, const tkv_attend_params *p);

static call_result call_attention(fixture *f, attend_function attend, tkv_attend_params p, int want,
                                  const oracle_result *a) {
    int heads = f->cfg.model.n_heads, dv = f->cfg.model.v_head_dim, size = p.out_type == TKV_TYPE_F32 ? 4 : 2;
    int n_items = p.batch ? p.n_batch : 1, r, h, c, bytes, score_bytes, touched;
    ptrdiff_t head_stride = p.out_head_stride ? p.out_head_stride : dv;
    ptrdiff_t row_stride = p.out_row_stride ? p.out_row_stride : (ptrdiff_t)heads * dv;
    ptrdiff_t score_stride = p.score_stride ? p.score_stride : a->max_len;
    unsigned char *buffer, *is_output_byte, *is_score_byte;
    float *lse, *scores;
    call_result o;
    memset(&o, 0, sizeof o);
    bytes =
        ((a->rows ? a->rows - 1 : 0) * (int)row_stride + (heads - 1) * (int)head_stride + dv) * size + GUARD;
    buffer = (unsigned char *)allocate_zeros((size_t)bytes, 1);
    is_output_byte = (unsigned char *)allocate_zeros((size_t)bytes, 1);
    memset(buffer, FILLER, (size_t)bytes);
    score_bytes = n_items * (int)score_stride * 4 + GUARD;
    scores = allocate_floats(score_bytes / 4);
    is_score_byte = (unsigned char *)allocate_zeros((size_t)score_bytes, 1);
    memset(scores, FILLER, (size_t)score_bytes);
    lse = allocate_floats(a->rows * heads + 1);
    lse[a->rows * heads] = 42.0f;
    p.out = buffer;
    p.lse = want & (LSE | SCORES) ? lse : NULL;
    p.scores = want & SCORES ? scores : NULL;
    o.status = attend(f->kv, &p);
    o.out = allocate_doubles(a->rows * heads * dv);
    o.lse = allocate_doubles(a->rows * heads);
    o.scores = allocate_doubles(n_items * a->max_len);
    for (r = 0; r < a->rows; r++)
        for (h = 0; h < heads; h++) {
            for (c = 0; c < dv; c++) {
                ptrdiff_t at = r * row_stride + h * head_stride + c;
                o.out[(r * heads + h) * dv + c] = read_element(buffer, p.out_type, at);
                memset(is_output_byte + at * size, 1, (size_t)size);
            }
            o.lse[r * heads + h] = (double)lse[r * heads + h];
        }
    for (r = 0; r < n_items && (want & SCORES); r++)
        for (c = 0; c < model_sequence_of(f, p.batch ? p.batch[r].seq : p.seq, p.layer)->len; c++) {
            o.scores[r * a->max_len + c] = (double)scores[r * score_stride + c];
            memset(is_score_byte + (r * score_stride + c) * 4, 1, 4);
        }
    touched = !are_gaps_untouched(buffer, is_output_byte, bytes);
    CHECK_MSG(!touched, "the call changed gaps in out");
    touched = !are_gaps_untouched((const unsigned char *)scores, is_score_byte, score_bytes);
    CHECK_MSG(!touched, "the call changed gaps in scores");
    CHECK(lse[a->rows * heads] == 42.0f);
    free(buffer);
    free(is_output_byte);
    free(scores);
    free(is_score_byte);
    free(lse);
    return o;
}

/* >>comparison of a call with the oracle */
typedef struct error_report {
    double format_error, arithmetic_error, bound; /* of the output */
} error_report;

static double bound_arithmetic(const fixture *f, double format_error) {
    double quarter = larger(1e-5, format_error / 4);
    if (!f->has_tiles) return f->has_16_bit_floats ? 2e-3 : 1e-5;
    return f->cfg.host.precise ? smaller(2e-3, quarter) : quarter;
}

static double rounding_error_of(tkv_type type) {
    return type == TKV_TYPE_F32 ? 0.0 : type == TKV_TYPE_F16 ? 1.0 / 2048 : 1.0 / 256;
}

/* True if rows that are zero in the oracle (no key is visible) are exactly zero. */
static int has_zeros_where_expected(const oracle_result *a, const double *out, int rows, int dim) {
    int r, c, zero;
    for (r = 0; r < rows; r++) {
        for (c = 0, zero = 1; c < dim; c++) zero &= a->out[r * dim + c] == 0.0;
        for (c = 0; c < dim && zero; c++)
            if (out[r * dim + c] != 0.0) return 0;
    }
    return 1;
}

/* True if outputs lie between the smallest and the largest value. The slack allows for rounding to 8 bits. */
static int is_among_values(fixture *f, const tkv_attend_params *p, const double *out) {
    int heads = f->cfg.model.n_heads, kvh = f->cfg.model.n_kv_heads, dv = f->cfg.model.v_head_dim,
        items = p->batch ? p->n_batch : 1;
    int item, g, c, j, r, h, row = 0;
    double slack = (f->has_tiles ? 0.02 : 1e-5) + rounding_error_of(p->out_type);
    for (item = 0; item < items; item++) {
        const model_sequence *x = model_sequence_of(f, p->batch ? p->batch[item].seq : p->seq, p->layer);
        int n = p->batch ? p->batch[item].n : p->n;
        for (g = 0; g < kvh; g++)
            for (c = 0; c < dv; c++) {
                double lo = 0.0, hi = 0.0; /* 0: rows without a visible key, or with a sink logit */
                for (j = x->expired; j < x->len; j++) {
                    lo = smaller(lo, (double)x->dv[(j * kvh + g) * dv + c]);
                    hi = larger(hi, (double)x->dv[(j * kvh + g) * dv + c]);
                }
                for (r = row; r < row + n; r++)
                    for (h = g * (heads / kvh); h < (g + 1) * (heads / kvh); h++) {
                        double y = out[(r * heads + h) * dv + c];
                        if (y < lo - slack * (hi - lo) || y > hi + slack * (hi - lo)) return 0;
                    }
            }
        row += n;
    }
    return 1;
}

static double sum_values(const double *x, int n) {
    double sum = 0.0;
    int i;
    for (i = 0; i < n; i++) sum += x[i];
    return sum;
}

static int is_all_finite(const double *x, int n) {
    int i;
    for (i = 0; i < n; i++)
        if (!tkv_test_is_finite(x[i])) return 0;
    return 1;
}

/* Root mean square difference of the finite log-sum-exps. Where the oracle has -inf, lse must be -inf. */
static double lse_difference(const oracle_result *a, const double *lse, int n) {
    double sum = 0.0;
    float minus_infinity = tkv_test_float(0xff800000u), x;
    int i, n_finite = 0;
    for (i = 0; i < n; i++) {
        if (a->lse[i] <= -1e300) {
            x = (float)lse[i];
            if (memcmp(&x, &minus_infinity, sizeof x) != 0) return 1e30;
            continue;
        }
        if (!tkv_test_is_finite(lse[i])) return 1e30;
        sum += (lse[i] - a->lse[i]) * (lse[i] - a->lse[i]);
        n_finite++;
    }
    return n_finite ? sqrt(sum / n_finite) : 0.0;
}

/* Error of the logits caused by the formats: root mean square, weighted by attention. */
static double logit_error(const oracle_result *a, const oracle_result *exact, int heads) {
    double sum = 0.0, weights = 0.0;
    int i, j, n = a->rows * heads;
    for (i = 0; i < n; i++)
        for (j = 0; j < a->max_len && a->lse[i] > -1e300; j++) {
            double s = a->logit[i * a->max_len + j], d = s - exact->logit[i * a->max_len + j], w;
            if (s <= -1e300) continue;
            w = exp(s - a->lse[i]);
            sum += w * d * d;
            weights += w;
        }
    return weights > 0.0 ? sqrt(sum / weights) : 0.0;
}

static double score_difference(const double *x, const double *want, int n) { /* L1, relative */
    double diff = 0.0, sum = 0.0;
    int i;
    for (i = 0; i < n; i++) {
        diff += fabs(x[i] - want[i]);
        sum += want[i];
    }
    return sum > 0.0 ? diff / sum : diff;
}

/* Compares all outputs of one call with the oracle. */
static error_report check_call(fixture *f, const tkv_attend_params *p, int want, const char *label) {
    oracle_result a = compute_oracle(f, p, 0), exact;
    call_result o = call_attention(f, tkv_attend_ex, *p, want, &a);
    int rows = a.rows * f->cfg.model.n_heads, n = rows * f->cfg.model.v_head_dim,
        m = a.max_len * (p->batch ? p->n_batch : 1);
    double lse_format_error = 0.0, score_format_error = 0.0, lse_bound, difference;
    int finite = is_all_finite(o.out, n);
    error_report report;
    memset(&report, 0, sizeof report);
    CHECK_MSG(o.status == TKV_OK, "%s: %s", label, tkv_get_status_text(o.status));
    if (f->has_tiles || f->has_16_bit_floats) {
        exact = compute_oracle(f, p, 1);
        report.format_error = relative_difference(a.out, exact.out, n);
        lse_format_error = logit_error(&a, &exact, f->cfg.model.n_heads);
        score_format_error = score_difference(a.scores, exact.scores, m);
        free_oracle_result(&exact);
    }
    report.arithmetic_error = relative_difference(o.out, a.out, n);
    report.bound = bound_arithmetic(f, report.format_error) + rounding_error_of(p->out_type);
    if (want & LOOSE_BOUND) report.bound = larger(report.bound, report.format_error / 2);
    CHECK_MSG(finite, "%s: the output is not finite", label);
    CHECK_MSG(has_zeros_where_expected(&a, o.out, rows, f->cfg.model.v_head_dim),
              "%s: a row without a visible key is not zero", label);
    CHECK_MSG(report.arithmetic_error <= report.bound, "%s: arithmetic %.3g, format error %.3g, bound %.3g",
              label, report.arithmetic_error, report.format_error, report.bound);
    CHECK_MSG(is_among_values(f, p, o.out), "%s: the output is not among the values", label);
    lse_bound = bound_arithmetic(f, lse_format_error) + 1e-5 + 3e-7 * a.max_logit;
    if (want & (LSE | SCORES)) {
        difference = lse_difference(&a, o.lse, rows);
        CHECK_MSG(difference <= lse_bound, "%s: lse differs by %.3g, format error %.3g, bound %.3g", label,
                  difference, lse_format_error, lse_bound);
    }
    if (want & SCORES) {
        difference = score_difference(o.scores, a.scores, m);
        lse_bound = bound_arithmetic(f, score_format_error) + 1e-5 + 3e-7 * a.max_logit;
        if (want & LOOSE_BOUND) lse_bound = larger(lse_bound, score_format_error / 2);
        CHECK_MSG(difference <= lse_bound, "%s: scores differ by %.3g, format error %.3g, bound %.3g", label,
                  difference, score_format_error, lse_bound);
        if (!p->sink_logits) { /* each row with a visible key adds 1 in total */
            double sum = sum_values(o.scores, m), expected_sum = sum_values(a.scores, m);
            CHECK_MSG(fabs(sum - expected_sum) <= (1e-5 + 3e-7 * a.max_logit) * expected_sum,
                      "%s: scores add up to %.9g, not %.9g", label, sum, expected_sum);
        }
    }
    free_call_result(&o);
    if (want & REFERENCE) {
        o = call_attention(f, tkv_attend_reference, *p, want, &a);
        CHECK_EQ(o.status, TKV_OK);
        difference = relative_difference(o.out, a.out, n);
        CHECK_MSG(is_all_finite(o.out, n) && difference <= 1e-6 + rounding_error_of(p->out_type),
                  "%s: reference off by %.3g", label, difference);
        if (want & (LSE | SCORES)) {
            difference = lse_difference(&a, o.lse, rows);
            CHECK_MSG(difference <= 1e-6 * (1.0 + a.max_logit), "%s: reference's lse off by %.3g", label,
                      difference);
        }
        if (want & SCORES) {
            difference = score_difference(o.scores, a.scores, m);
            CHECK_MSG(difference <= 1e-6, "%s: reference's scores off by %.3g", label, difference);
        }
        free_call_result(&o);
    }
    free_oracle_result(&a);
    return report;
}

/* >>data */
typedef enum data_kind {
    GAUSS,
    PEAKED,
    NEEDLES,
    LARGE_KEYS,
    LARGE_VALUES,
    BIAS_ALL,
    BIAS_FEW,
    DATA_COUNT
} data_kind;

static const char *const data_name[DATA_COUNT] = {"gauss",        "peaked",   "needles", "large keys",
                                                  "large values", "bias all", "bias few"};

enum { N_NEEDLES = 4 }; /* one each in the sinks, the archive, the warm and the hot tier */

static int needle_at(int which, int len, int n) {
    int at = which == 0 ? 0 : which == 1 ? len / 4 : which == 2 ? len - 120 : len - n;
    return at < 0 ? 0 : at;
}

static float sign_of(int which, int channel) {
    tkv_rng r = tkv_rng_seed((uint64_t)(which * 1000 + channel));
    return tkv_rng_u64(&r) & 1 ? 1.0f : -1.0f;
}

/* Makes K and V of len tokens and queries of the last n. Logits have standard deviation 1 for GAUSS. */
static void make_data(data_kind kind, const tkv_config *cfg, tkv_rng *rng, int len, int n, float *k, float *v,
                      float *q) {
    int kvh = cfg->model.n_kv_heads, dk = cfg->model.head_dim, dv = cfg->model.v_head_dim, t, h, c, i;
    tkv_rng_fill(rng, k, (size_t)(len * kvh * dk), 1.0);
    tkv_rng_fill(rng, v, (size_t)(len * kvh * dv), 1.0);
    tkv_rng_fill(rng, q, (size_t)(n * cfg->model.n_heads * dk),
                 kind == PEAKED       ? 4.0
                 : kind == LARGE_KEYS ? 0.4
                                      : 1.0);
    for (t = 0; t < len; t++)
        for (h = 0; h < kvh; h++) {
            float *row = k + (t * kvh + h) * dk;
            for (c = 0; c < dk; c++) {
                if (kind == LARGE_KEYS && c % 16 == 0) row[c] *= 16.0f;
                if (kind == BIAS_ALL) row[c] += 600.0f * sign_of(9, c);
                if (kind == BIAS_FEW && c % 21 == 0) row[c] += 600.0f;
            }
            for (c = 0; c < dv; c++)
                if (kind == LARGE_VALUES && c % 16 == 3) v[(t * kvh + h) * dv + c] *= 16.0f;
        }
    if (kind != NEEDLES) return;
    /* Each needle has a direction, and each query follows one needle. Needles lie within the range of their
     * groups: at its ends KIVI would store them almost exactly, and the bound would be almost 0. */
    for (i = 0; i < N_NEEDLES; i++)
        for (h = 0; h < kvh; h++)
            for (c = 0; c < dk; c++) k[(needle_at(i, len, n) * kvh + h) * dk + c] = 1.5f * sign_of(i, c);
    for (t = 0; t < n; t++)
        for (h = 0; h < cfg->model.n_heads; h++)
            for (c = 0; c < dk; c++) {
                float *x = q + (t * cfg->model.n_heads + h) * dk + c;
                *x = 0.3f * *x +
                     10.0f / (1.5f * (float)sqrt((double)dk)) * sign_of((t * 7 + h) % N_NEEDLES, c);
            }
}

/* >>covering array: each pair of levels of two factors occurs in a case */
enum {
    BY_FORMAT,
    BY_HOT,
    BY_TIERS,
    BY_DIM,
    BY_GQA,
    BY_DATA,
    BY_ROWS,
    BY_LEN,
    BY_PRECISE,
    BY_GROUP,
    BY_WANT,
    BY_ISA
};
enum { N_FACTORS = 12, MAX_LEVELS = 16 };

typedef struct cover {
    int levels[N_FACTORS];
    unsigned char done[N_FACTORS][MAX_LEVELS][N_FACTORS][MAX_LEVELS]; /* pairs, a < b */
    tkv_rng rng;
} cover;

static void start_cover(cover *c) {
    int a, b, i, j;
    memset(c->done, 1, sizeof c->done);
    for (a = 0; a < N_FACTORS; a++)
        for (b = a + 1; b < N_FACTORS; b++)
            for (i = 0; i < c->levels[a]; i++)
                for (j = 0; j < c->levels[b]; j++) c->done[a][i][b][j] = 0;
}

static int n_new_pairs(const cover *c, const int *x, int a, int level) { /* new pairs if x[a] = level */
    int b, gain = 0;
    for (b = 0; b < N_FACTORS; b++) {
        if (b == a || x[b] < 0) continue;
        gain += a < b ? !c->done[a][level][b][x[b]] : !c->done[b][x[b]][a][level];
    }
    return gain;
}

/* Sets the factors of x that are -1, in random order, each to the level that adds most new pairs. */
static int complete_case(cover *c, int *x) {
    int order[N_FACTORS], i, j, level, gain_sum = 0;
    for (i = 0; i < N_FACTORS; i++) {
        j = tkv_rng_below(&c->rng, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (i = 0; i < N_FACTORS; i++) {
        int a = order[i], best = -1, first_level;
        if (x[a] >= 0) continue;
        first_level = tkv_rng_below(&c->rng, c->levels[a]);
        for (level = 0; level < c->levels[a]; level++) {
            int l = (level + first_level) % c->levels[a], gain = n_new_pairs(c, x, a, l);
            if (gain > best) {
                best = gain;
                x[a] = l;
            }
        }
        gain_sum += best;
    }
    return gain_sum;
}

/* Writes the next case to `best`. Returns 0 when every pair is covered. */
static int next_case(cover *c, int *best) {
    int a, b, i, j, k, try_, found = 0, seed[4], best_gain = -1;
    for (a = 0; a < N_FACTORS && !found; a++)
        for (b = a + 1; b < N_FACTORS && !found; b++)
            for (i = 0; i < c->levels[a] && !found; i++)
                for (j = 0; j < c->levels[b] && !found; j++)
                    if (!c->done[a][i][b][j]) {
                        seed[0] = a;
                        seed[1] = i;
                        seed[2] = b;
                        seed[3] = j;
                        found = 1;
                    }
    if (!found) return 0;
    for (try_ = 0; try_ < 20; try_++) {
        int x[N_FACTORS], gain;
        for (k = 0; k < N_FACTORS; k++) x[k] = -1;
        x[seed[0]] = seed[1];
        x[seed[2]] = seed[3];
        gain = complete_case(c, x);
        if (gain > best_gain) {
            best_gain = gain;
            memcpy(best, x, sizeof x);
        }
    }
    for (a = 0; a < N_FACTORS; a++)
        for (b = a + 1; b < N_FACTORS; b++) c->done[a][best[a]][b][best[b]] = 1;
    return 1;
}

typedef struct tier_formats {
    const char *name; /* warm, archive; K/V where they differ */
    tkv_format warm_k, warm_v, archive_k, archive_v;
} tier_formats;

static const tier_formats cover_formats[] = {
    {"kivi4, kivi2", TKV_KIVI4, TKV_KIVI4, TKV_KIVI2, TKV_KIVI2},
    {"q8, kivi3", TKV_Q8, TKV_Q8, TKV_KIVI3, TKV_KIVI3},
    {"f32, f32", TKV_F32, TKV_F32, TKV_F32, TKV_F32},
    {"f16, f16", TKV_F16, TKV_F16, TKV_F16, TKV_F16},
    {"bf16, bf16", TKV_BF16, TKV_BF16, TKV_BF16, TKV_BF16},
    {"q8, q8", TKV_Q8, TKV_Q8, TKV_Q8, TKV_Q8},
    {"kivi4, kivi4", TKV_KIVI4, TKV_KIVI4, TKV_KIVI4, TKV_KIVI4},
    {"kivi3, kivi3", TKV_KIVI3, TKV_KIVI3, TKV_KIVI3, TKV_KIVI3},
    {"kivi2, kivi2", TKV_KIVI2, TKV_KIVI2, TKV_KIVI2, TKV_KIVI2},
    {"f16, kivi2", TKV_F16, TKV_F16, TKV_KIVI2, TKV_KIVI2},
    {"q8/kivi2, kivi4/kivi3", TKV_Q8, TKV_KIVI2, TKV_KIVI4, TKV_KIVI3},
    {"kivi2/f16, f32/kivi2", TKV_KIVI2, TKV_F16, TKV_F32, TKV_KIVI2},
    {"bf16/kivi4, kivi3/bf16", TKV_BF16, TKV_KIVI4, TKV_KIVI3, TKV_BF16},
    {"a40/r40, a30/r20", TKV_A40, TKV_R40, TKV_A30, TKV_R20},
    {"a25/r30, a20/r15", TKV_A25, TKV_R30, TKV_A20, TKV_R15},
    {"kivi4/r10, a175/kivi2", TKV_KIVI4, TKV_R10, TKV_A175, TKV_KIVI2},
};
enum { N_FORMATS = (int)(sizeof cover_formats / sizeof cover_formats[0]) };

static const tkv_format cover_hot[] = {TKV_F16, TKV_F32, TKV_BF16};

typedef struct tier_setup {
    const char *name;
    int sink, hot, warm, window, flush;
} tier_setup;

static const tier_setup cover_tiers[] = {
    {"three tiers", 4, 64, 64, 0, 0},       {"no sinks", TKV_OFF, 32, 70, 0, 0},
    {"warm off", 4, 64, TKV_OFF, 0, 0},     {"archive off", 4, 20, TKV_UNLIMITED, 0, 0},
    {"all hot", 0, TKV_UNLIMITED, 0, 0, 0}, {"window", 4, 32, 64, 150, 0},
    {"all flushed", 64, 1, 64, 0, 1},       {"only archive", TKV_OFF, TKV_OFF, TKV_OFF, 0, 1},
    {"big window", 9, 64, 64, 333, 0},
};
enum { N_TIERS = (int)(sizeof cover_tiers / sizeof cover_tiers[0]) };

static const int cover_dim[][2] = {{128, 128}, {64, 64},   {80, 80},  {96, 96}, {112, 112}, {48, 48},
                                   {192, 192}, {256, 256}, {1, 1},    {8, 8},   {40, 40},   {100, 100},
                                   {192, 128}, {64, 256},  {100, 24}, {16, 16}};
static const int cover_gqa[][2] = {{4, 4}, {4, 2}, {3, 1}, {8, 2}, {5, 1}, {16, 2}, {71, 1}, {8, 1}};
static const int cover_rows[] = {1, 2, 7, 19};
static const int cover_len[] = {330, 417, 517, 260, 63};
static const int cover_want[] = {0, LSE, LSE | SCORES};

typedef struct error_summary {
    /* Extremes; ratio: arithmetic_error to its bound. */
    double arithmetic_error, ratio, min_format_error, max_format_error;
    double squares;                 /* sum of squares of arithmetic_error / format_error */
    int cases, n_with_format_error; /* cases; those with a format error of 1e-4 or more */
} error_summary;

static void add_to_summary(error_summary *w, const error_report *x) {
    w->min_format_error = w->cases ? smaller(w->min_format_error, x->format_error) : x->format_error;
    w->max_format_error = larger(w->max_format_error, x->format_error);
    w->arithmetic_error = larger(w->arithmetic_error, x->arithmetic_error);
    w->ratio = larger(w->ratio, x->arithmetic_error / x->bound);
    w->cases++;
    if (x->format_error < 1e-4) return;
    w->squares += x->arithmetic_error / x->format_error * (x->arithmetic_error / x->format_error);
    w->n_with_format_error++;
}

static error_report run_case(const int *x, tkv_isa isa, uint64_t seed) {
    const tier_formats *fmt = &cover_formats[x[BY_FORMAT]];
    const tier_setup *mix = &cover_tiers[x[BY_TIERS]];
    const int *dim = cover_dim[x[BY_DIM]], *gqa = cover_gqa[x[BY_GQA]];
    int n = cover_rows[x[BY_ROWS]], len = cover_len[x[BY_LEN]];
    data_kind data = (data_kind)x[BY_DATA];
    tkv_config cfg = make_config(gqa[0], gqa[1], dim[0], dim[1]);
    tkv_attend_params p;
    float *k = allocate_floats(len * gqa[1] * dim[0]), *v = allocate_floats(len * gqa[1] * dim[1]),
          *q = allocate_floats(n * gqa[0] * dim[0]);
    char label[256];
    fixture f;
    error_report result;
    memset(&result, 0, sizeof result);
    memset(&p, 0, sizeof p);
    cfg.tiers.hot = pair_of(cover_hot[x[BY_HOT]], cover_hot[x[BY_HOT]]);
    cfg.tiers.warm = pair_of(fmt->warm_k, fmt->warm_v);
    cfg.tiers.archive = pair_of(fmt->archive_k, fmt->archive_v);
    cfg.tiers.sink_tokens = mix->sink;
    cfg.tiers.hot_tokens = mix->hot;
    cfg.tiers.warm_tokens = mix->warm;
    cfg.model.window = mix->window;
    cfg.host.precise = x[BY_PRECISE];
    cfg.format.group_size = x[BY_GROUP] ? 32 : 64;
    cfg.host.isa = isa;
    snprintf(label, sizeof label, "%s, hot %s, %s, dim %d/%d, heads %d/%d, %s, n %d, len %d%s, group %d, %s",
             fmt->name, tkv_get_name(TKV_NAME_FORMAT, (int)cfg.tiers.hot.k), mix->name, dim[0], dim[1],
             gqa[0], gqa[1], data_name[data], n, len, cfg.host.precise ? ", precise" : "",
             cfg.format.group_size, tkv_get_name(TKV_NAME_ISA, (int)isa));
    if (open_fixture(&f, &cfg, seed)) {
        /* With tables, half of the tokens come first: at least one block. */
        int n_before_freeze =
            tkv_get_name(TKV_NAME_FORMAT, (int)fmt->archive_k)[0] == 'a' && len >= 128 ? len / 2 : len;
        make_data(data, &f.cfg, &f.rng, len, n, k, v, q);
        append_to_fixture(&f, 0, 0, k, v, n_before_freeze, 37);
        if (n_before_freeze < len) { /* learns tables from these tokens and queries */
            float *out = allocate_floats(n * gqa[0] * dim[1]);
            CHECK_EQ(tkv_attend(f.kv, 0, 0, q, n, out), TKV_OK);
            CHECK_MSG(tkv_freeze_calibration(f.kv) == TKV_OK, "%s", label);
            append_to_fixture(&f, 0, 0, k + n_before_freeze * gqa[1] * dim[0],
                              v + n_before_freeze * gqa[1] * dim[1], len - n_before_freeze, 37);
            free(out);
        }
        if (mix->flush) CHECK_EQ(tkv_seq_flush(f.kv, 0, TKV_FLUSH_ALL), TKV_OK);
        read_fixture_back(&f);
        p.q = q;
        p.n = n;
        result = check_call(&f, &p, cover_want[x[BY_WANT]], label);
        close_fixture(&f);
    }
    free(k);
    free(v);
    free(q);
    return result;
}

/* Prints a summary. Checks that the root mean square of the ratios is at most 1/10. */
static void check_summary(const char *name, const error_summary *w) {
    const double rms = w->n_with_format_error ? sqrt(w->squares / w->n_with_format_error) : 0.0;
    printf("      %-24s %3d cases, arithmetic up to %.1e, %3.0f%% of its bound; format error %.1e to %.1e, "
           "rms ratio %.3f\n",
           name, w->cases, w->arithmetic_error, 100.0 * w->ratio, w->min_format_error, w->max_format_error,
           rms);
    CHECK_MSG(rms <= 0.1, "%s: arithmetic is %.3f of the format error in the root mean square", name, rms);
}

TEST(covering_array_of_cases) {
    static cover c;
    tkv_isa isas[TKV_ISA_COUNT];
    error_summary of_format[N_FORMATS], of_isa[TKV_ISA_COUNT], of_data[DATA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int x[N_FACTORS], i, a, cases = 0;
    memset(of_format, 0, sizeof of_format);
    memset(of_isa, 0, sizeof of_isa);
    memset(of_data, 0, sizeof of_data);
    c.levels[BY_FORMAT] = N_FORMATS;
    c.levels[BY_HOT] = 3;
    c.levels[BY_TIERS] = N_TIERS;
    c.levels[BY_DIM] = (int)(sizeof cover_dim / sizeof cover_dim[0]);
    c.levels[BY_GQA] = (int)(sizeof cover_gqa / sizeof cover_gqa[0]);
    c.levels[BY_DATA] = DATA_COUNT;
    c.levels[BY_ROWS] = (int)(sizeof cover_rows / sizeof cover_rows[0]);
    c.levels[BY_LEN] = (int)(sizeof cover_len / sizeof cover_len[0]);
    c.levels[BY_PRECISE] = c.levels[BY_GROUP] = 2;
    c.levels[BY_WANT] = 3;
    c.levels[BY_ISA] = n_isas;
    c.rng = tkv_rng_seed(2402);
    start_cover(&c);
    for (;;) {
        error_report result;
        if (tkv_test_quick()) { /* each level of most factors once */
            if (cases == MAX_LEVELS) break;
            for (a = 0; a < N_FACTORS; a++) x[a] = (cases + a) % c.levels[a];
            if (x[BY_GQA] == 6) x[BY_ROWS] = 0;  /* 71 heads: one query */
            if (x[BY_ROWS] == 3) x[BY_ROWS] = 2; /* others: at most 7 */
        } else if (!next_case(&c, x)) {
            break;
        }
        result = run_case(x, isas[x[BY_ISA]], (uint64_t)cases);
        add_to_summary(&of_format[x[BY_FORMAT]], &result);
        add_to_summary(&of_isa[x[BY_ISA]], &result);
        add_to_summary(&of_data[x[BY_DATA]], &result);
        cases++;
    }
    printf("\n");
    for (i = 0; i < N_FORMATS; i++) check_summary(cover_formats[i].name, &of_format[i]);
    for (i = 0; i < DATA_COUNT; i++) check_summary(data_name[i], &of_data[i]);
    for (i = 0; i < n_isas; i++) check_summary(tkv_get_name(TKV_NAME_ISA, (int)isas[i]), &of_isa[i]);
}

/* The rule that gives weights a second limb (kernels/scalar.h), over many seeds because single calls vary too much.
 * Keys with a few large channels need the rule: without it their ratio is .11. */
TEST(second_limb_rule) {
    static const struct rule_case {
        int format, dim, data; /* indices of cover_formats and cover_dim; a data_kind */
        double max_error;
    } cases[] = {{7, 12, LARGE_KEYS, 0.05}, /* kivi3, head_dim 192 */
                 {7, 0, LARGE_KEYS, 0.05},
                 {6, 1, LARGE_VALUES, 0.06}, /* kivi4; .09 without the rule */
                 {13, 12, PEAKED, 0.1},      /* a40/r40: has the largest ratio with one limb */
                 {1, 2, PEAKED, 0.1}};
    const int seeds = tkv_test_quick() ? 12 : 48;
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int isa, i, s;
    for (isa = 0; isa < n_isas; isa++) {
        for (i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
            int x[N_FACTORS] = {0};
            double rms;
            error_summary w;
            memset(&w, 0, sizeof w);
            x[BY_FORMAT] = cases[i].format;
            x[BY_HOT] = 1; /* f32 */
            x[BY_DIM] = cases[i].dim;
            x[BY_GQA] = 1;
            x[BY_DATA] = cases[i].data;
            x[BY_LEN] = 3;
            x[BY_GROUP] = 1;
            for (s = 0; s < seeds; s++) {
                const error_report v = run_case(x, isas[isa], (uint64_t)s);
                add_to_summary(&w, &v);
            }
            CHECK_EQ(w.n_with_format_error, seeds);
            rms = sqrt(w.squares / (w.n_with_format_error ? w.n_with_format_error : 1));
            CHECK_MSG(rms <= cases[i].max_error, "%s, %s, %s: arithmetic is %.3f of the format error",
                      cover_formats[cases[i].format].name, data_name[cases[i].data],
                      tkv_get_name(TKV_NAME_ISA, (int)isas[isa]), rms);
        }
    }
}

/* >>parameters, one by one and together, on five kinds of caches */
typedef enum cache_kind { EXACT_F32, KIVI_TIERS, SHARED_TIERS, EXACT_F16, Q8_KIVI3, KIND_COUNT } cache_kind;

static const char *const kind_name[KIND_COUNT] = {"f32", "kivi4, kivi2", "a40/r40, a25/r15", "f16",
                                                  "q8, kivi3"};

/* Opens a fixture with sequences of 300, 70, 333 and 0 tokens, four query heads and two KV heads. */
static int open_kind(fixture *f, cache_kind kind) {
    tkv_config cfg = make_config(4, 2, 32, 48);
    cfg.limits.max_seqs = 4;
    cfg.tiers.warm_tokens = 64;
    cfg.tiers.sink_tokens = 4;
    cfg.tiers.hot_tokens = 40;
    if (kind == EXACT_F32) cfg.tiers.hot = cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F32, TKV_F32);
    if (kind == EXACT_F16) cfg.tiers.hot = cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F16, TKV_F16);
    if (kind == Q8_KIVI3) {
        cfg.tiers.hot = pair_of(TKV_BF16, TKV_F16);
        cfg.tiers.warm = pair_of(TKV_Q8, TKV_Q8);
        cfg.tiers.archive = pair_of(TKV_KIVI3, TKV_KIVI3);
    }
    if (kind == SHARED_TIERS) {
        cfg.tiers.warm = pair_of(TKV_A40, TKV_R40);
        cfg.tiers.archive = pair_of(TKV_A25, TKV_R15);
    }
    if (!open_fixture(f, &cfg, 77)) return 0;
    append_random_tokens(f, 0, 0, 300, 50);
    /* Learns a table and demotes sequence 0 now; the others are demoted during appends. */
    if (kind == SHARED_TIERS) {
        CHECK_EQ(tkv_freeze_calibration(f->kv), TKV_OK);
        CHECK_EQ(tkv_seq_flush(f->kv, 0, TKV_FLUSH_DUE), TKV_OK);
    }
    append_random_tokens(f, 1, 0, 70, 50);
    append_random_tokens(f, 2, 0, 333, 50);
    read_fixture_back(f);
    return 1;
}

/* The reference is slow: it runs on the first three kinds, and not in quick runs. */
static int n_kinds(void) { return tkv_test_quick() ? 3 : KIND_COUNT; }

static int wanted_outputs(cache_kind kind) {
    return LSE | SCORES | (kind <= SHARED_TIERS && !tkv_test_quick() ? REFERENCE : 0);
}

typedef void (*kind_body)(fixture *f, cache_kind kind);

static void for_each_kind(kind_body body) {
    int kind;
    for (kind = 0; kind < n_kinds(); kind++) {
        fixture f;
        if (open_kind(&f, (cache_kind)kind)) {
            body(&f, (cache_kind)kind);
            CHECK_EQ(tkv_check(f.kv, NULL, 0), TKV_OK);
            close_fixture(&f);
        }
    }
}

/* Layouts of queries and outputs. */
enum { PACKED, GAPS, HEAD_MAJOR, LAYOUT_COUNT };

static void set_strides(int layout, int rows, int heads, int dim, ptrdiff_t *row, ptrdiff_t *head) {
    *row = *head = 0;
    if (layout == GAPS) {
        *head = dim + 3;
        *row = heads * (dim + 3) + 5;
    } else if (layout == HEAD_MAJOR) {
        *row = dim;
        *head = (ptrdiff_t)rows * dim;
    }
}

/* Makes rows of queries in a type and a layout, with large numbers in the gaps. sd: standard deviation of logits. */
static void *make_queries(fixture *f, tkv_attend_params *p, int rows, tkv_type type, int layout, double sd) {
    int heads = f->cfg.model.n_heads, dim = f->cfg.model.head_dim,
        size = (rows + 1) * (heads * (dim + 3) + 5), i, r, h, c;
    float *x = allocate_floats(size);
    uint16_t *half = (uint16_t *)allocate_zeros((size_t)size, sizeof(uint16_t));
    ptrdiff_t row, head;
    p->q_type = type;
    set_strides(layout, rows, heads, dim, &p->q_row_stride, &p->q_head_stride);
    row = p->q_row_stride ? p->q_row_stride : (ptrdiff_t)heads * dim;
    head = p->q_head_stride ? p->q_head_stride : dim;
    for (i = 0; i < size; i++) x[i] = 60000.0f;
    for (r = 0; r < rows; r++)
        for (h = 0; h < heads; h++)
            for (c = 0; c < dim; c++) x[r * row + h * head + c] = (float)(sd * tkv_rng_gauss(&f->rng));
    for (i = 0; i < size; i++) half[i] = truncate_to_half(type, x[i]);
    p->q = type == TKV_TYPE_F32 ? (void *)x : (void *)half;
    if (type == TKV_TYPE_F32) free(half);
    else free(x);
    return type == TKV_TYPE_F32 ? (void *)x : (void *)half;
}

/* Checks a call, and that its output differs from that of `plain` by more than the bound: else the test could not
 * fail. The second check is left out with compressed formats, whose bounds may exceed the effect of a parameter. */
static void check_param(fixture *f, cache_kind kind, const tkv_attend_params *p,
                        const tkv_attend_params *plain, const char *what) {
    char label[128];
    error_report x;
    oracle_result a = compute_oracle(f, p, 0), b = compute_oracle(f, plain, 0);
    double change =
        relative_difference(a.out, b.out, a.rows * f->cfg.model.n_heads * f->cfg.model.v_head_dim);
    snprintf(label, sizeof label, "%s: %s", kind_name[kind], what);
    x = check_call(f, p, wanted_outputs(kind), label);
    CHECK_MSG(f->has_tiles || change > 1.5 * x.bound, "%s: changes the answer by %.3g only", label, change);
    free_oracle_result(&a);
    free_oracle_result(&b);
}

static void check_types_and_layouts(fixture *f, cache_kind kind) {
    static const char *const type_name[] = {"f32", "f16", "bf16"};
    int q_type, out_type, layout;
    for (q_type = 0; q_type < 3; q_type++)
        for (out_type = 0; out_type < 3; out_type++)
            for (layout = 0; layout < LAYOUT_COUNT; layout++) {
                tkv_attend_params p;
                char label[128];
                void *q;
                int want =
                    layout == PACKED ? 0 : wanted_outputs(kind) & ~(q_type == out_type ? 0 : REFERENCE);
                if (tkv_test_quick() && (q_type + out_type + layout) % 3) continue;
                memset(&p, 0, sizeof p);
                p.n = 3;
                p.out_type = (tkv_type)out_type;
                q = make_queries(f, &p, p.n, (tkv_type)q_type, layout, 1.0);
                set_strides((layout + out_type) % LAYOUT_COUNT, p.n, f->cfg.model.n_heads,
                            f->cfg.model.v_head_dim, &p.out_row_stride, &p.out_head_stride);
                snprintf(label, sizeof label, "%s: q %s, out %s, layout %d", kind_name[kind],
                         type_name[q_type], type_name[out_type], layout);
                (void)check_call(f, &p, want, label);
                free(q);
            }
}
TEST(types_and_layouts) { for_each_kind(check_types_and_layouts); }

static void check_logits(fixture *f, cache_kind kind) { /* scale, softcap, alibi, sink logits */
    static const float slopes[5] = {0.25f, 0.0625f, 0.015625f, -0.02f, (float)HUGE_VAL}, /* of 4 heads */
        strong[4] = {4.0f, 7.0f, -3.0f, 30.0f};
    float sinks[4] = {5.0f, -2.0f, 0.0f, 8.0f};
    tkv_attend_params plain, p;
    void *q;
    memset(&plain, 0, sizeof plain);
    plain.n = 3;
    q = make_queries(f, &plain, plain.n, TKV_TYPE_F32, PACKED, 1.5);
    p = plain;
    p.scale = 0.4f;
    check_param(f, kind, &p, &plain, "scale");
    p.softcap = 2.0f;
    check_param(f, kind, &p, &plain, "softcap");
    p = plain;
    p.alibi_slopes = slopes;
    check_param(f, kind, &p, &plain, "alibi");
    p = plain;
    p.sink_logits = strong;
    check_param(f, kind, &p, &plain, "learned sinks");
    sinks[1] = tkv_test_float(0xff800000u);
    p.sink_logits = sinks;
    check_param(f, kind, &p, &plain, "learned sinks, one of -inf");
    p.softcap = 3.0f;
    p.alibi_slopes = slopes;
    p.scale = 0.3f;
    check_param(f, kind, &p, &plain, "scale, softcap, alibi, sinks");
    free(q);
}
TEST(scale_softcap_alibi_sinks) { for_each_kind(check_logits); }

static void check_masks(fixture *f, cache_kind kind) {
    enum { N = 5, STRIDE = 311 };
    tkv_attend_params plain, p;
    float *mask = allocate_floats(4 * N * STRIDE);
    void *q;
    int i, j;
    memset(&plain, 0, sizeof plain);
    plain.n = N;
    q = make_queries(f, &plain, N, TKV_TYPE_F32, PACKED, 1.0);
    for (i = 0; i < 4 * N * STRIDE; i++) {
        j = tkv_rng_below(&f->rng, 8);
        mask[i] = j == 0   ? tkv_test_float(0xff800000u)
                  : j == 1 ? -3e38f
                  : j == 2 ? -1e30f
                  : j == 3 ? -1e4f
                  : j == 4 ? 0.0f
                           : (float)(2.0 * tkv_rng_gauss(&f->rng));
    }
    p = plain;
    p.mask = mask;
    p.mask_stride = STRIDE;
    check_param(f, kind, &p, &plain, "mask with a stride");
    p.mask_head_stride = N * STRIDE;
    check_param(f, kind, &p, &plain, "a mask for each head");
    p.mask_head_stride = 0;
    p.mask_stride = 0;
    check_param(f, kind, &p, &plain, "mask, packed");
    /* Row 0 sees all keys, row 2 one key, row 4 the first and last keys. Rows 1 and 3 see none. */
    for (i = 0; i < N; i++)
        for (j = 0; j < 300; j++) {
            int seen = i == 0 || (i == 2 && j == 150) || (i == 4 && (j < 5 || j > 280));
            mask[i * 300 + j] = seen ? 0.0f : j % 2 ? tkv_test_float(0xff800000u) : -1e30f;
        }
    check_param(f, kind, &p, &plain, "mask that hides whole rows");
    for (i = 0; i < N * 300; i++) mask[i] = tkv_test_float(0xff800000u);
    check_param(f, kind, &p, &plain, "mask that hides all");
    {
        static const float sinks[4] = {1.0f, -2.0f, 0.0f, 300.0f};
        p.sink_logits = sinks;
        check_param(f, kind, &p, &plain, "mask that hides all, learned sinks");
    }
    free(mask);
    free(q);
}
TEST(masks) { for_each_kind(check_masks); }

/* The same numbers in 16 bits, or in other columns, give the same bits. */
static void check_mask_types(fixture *f, cache_kind kind) {
    enum { N = 5, KEYS = 340, COLUMNS = 2 * KEYS };
    static const tkv_type types[] = {TKV_TYPE_F16, TKV_TYPE_BF16, TKV_TYPE_F32};
    static float want[N * 4 * 48], out[N * 4 * 48], mask[N * KEYS], moved[N * COLUMNS];
    static uint16_t half[N * COLUMNS];
    static int cells[KEYS];
    tkv_attend_params p;
    void *q;
    int i, j, t;
    memset(&p, 0, sizeof p);
    p.n = N;
    q = make_queries(f, &p, N, TKV_TYPE_F32, PACKED, 1.0);
    for (i = 0; i < N * KEYS; i++) /* numbers that both types have */
        mask[i] = tkv_rng_below(&f->rng, 5) ? (float)(tkv_rng_below(&f->rng, 64) - 32) / 16.0f
                                            : tkv_test_float(0xff800000u);
    for (j = 0; j < KEYS; j++) cells[j] = j * 7 % COLUMNS; /* 7 has no factor in common with COLUMNS */
    for (i = 0; i < N * COLUMNS; i++) moved[i] = 3.0f;
    for (i = 0; i < N; i++)
        for (j = 0; j < KEYS; j++) moved[i * COLUMNS + cells[j]] = mask[i * KEYS + j];
    p.mask = mask;
    p.mask_stride = KEYS;
    p.out = want;
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
    for (t = 0; t < 3; t++) {
        for (i = 0; i < N * COLUMNS; i++)
            half[i] = moved[i] > -1e30f          ? truncate_to_half(types[t], moved[i])
                      : types[t] == TKV_TYPE_F16 ? (uint16_t)0xfc00u /* -inf */
                                                 : (uint16_t)0xff80u;
        p.mask = types[t] == TKV_TYPE_F32 ? (const void *)moved : (const void *)half;
        p.mask_type = types[t];
        p.mask_stride = COLUMNS;
        p.mask_cells = cells;
        p.mask_cells_stride = KEYS;
        p.out = out;
        memset(out, 0, sizeof out);
        CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
        CHECK_MSG(memcmp(out, want, sizeof want) == 0, "%s, mask type %d", kind_name[kind], (int)types[t]);
        memset(out, 0, sizeof out);
        CHECK_EQ(tkv_attend_reference(f->kv, &p), TKV_OK);
        for (i = 0; i < N * 4 * 48; i++) CHECK_NEAR(out[i], want[i], 0.2);
    }
    p.mask_stride = COLUMNS - 1; /* a cell is beyond it */
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_ERR_ARG);
    p.mask_stride = COLUMNS;
    cells[3] = -1;
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_ERR_ARG);
    p.mask_type = (tkv_type)3;
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_ERR_ARG);
    free(q);
}
TEST(masks_of_other_types_and_cells) { for_each_kind(check_mask_types); }

/* Each entry of a batch has its own cells. Columns in any order give the bits of columns in order. */
static void check_cells_of_batches(fixture *f, cache_kind kind) {
    enum { N = 9, ENTRIES = 4 };
    static const tkv_rows rows[ENTRIES] = {{2, 3}, {3, 0}, {1, 4}, {0, 2}}; /* sequence 3 is empty */
    const int size = N * f->cfg.model.n_heads * f->cfg.model.v_head_dim;
    int *cells, longest = 0, given, e, i, j, row = 0;
    float *mask, *moved, *want = allocate_floats(size), *out = allocate_floats(size);
    tkv_attend_params p;
    void *q;
    memset(&p, 0, sizeof p);
    p.batch = rows;
    p.n_batch = ENTRIES;
    q = make_queries(f, &p, N, TKV_TYPE_F32, PACKED, 1.0);
    for (e = 0; e < ENTRIES; e++)
        if (tkv_get_length(f->kv, rows[e].seq, 0) > longest) longest = tkv_get_length(f->kv, rows[e].seq, 0);
    mask = allocate_floats(N * longest);
    moved = allocate_floats(N * longest);
    cells = (int *)allocate_zeros((size_t)(ENTRIES * (longest + 3)), sizeof *cells);
    for (i = 0; i < N * longest; i++)
        mask[i] = tkv_rng_below(&f->rng, 4) ? (float)tkv_rng_gauss(&f->rng) : -2e30f;
    p.mask = mask;
    p.out = want;
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
    p.out = out;
    for (given = 0; given < 2; given++) { /* the stride of cells: 0, and more than the longest sequence has */
        const int stride = given ? longest + 3 : longest;
        for (e = row = 0; e < ENTRIES; row += rows[e++].n) {
            fill_random_order(&f->rng, cells + e * stride, longest);
            for (i = row; i < row + rows[e].n; i++)
                for (j = 0; j < longest; j++)
                    moved[i * longest + cells[e * stride + j]] = mask[i * longest + j];
            for (j = tkv_get_length(f->kv, rows[e].seq, 0); j < stride; j++)
                cells[e * stride + j] = -7; /* of no key */
        }
        p.mask = moved;
        p.mask_cells = cells;
        p.mask_cells_stride = given ? stride : 0;
        memset(out, 0, (size_t)size * sizeof *out);
        CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
        CHECK_MSG(memcmp(out, want, (size_t)size * sizeof *out) == 0, "%s, stride %d", kind_name[kind],
                  stride);
        memset(out, 0, (size_t)size * sizeof *out);
        CHECK_EQ(tkv_attend_reference(f->kv, &p), TKV_OK);
        for (i = 0; i < size; i++) CHECK_NEAR(out[i], want[i], 0.2);
        for (e = 0; e < ENTRIES; e++) {
            const int len = tkv_get_length(f->kv, rows[e].seq, 0);
            int *last = cells + e * stride + len - 1, old;
            if (!len) continue;
            old = *last;
            *last = longest; /* no column: its number is the stride of the mask */
            CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_ERR_ARG);
            *last = old;
        }
    }
    free(q);
    free(mask);
    free(moved);
    free(cells);
    free(want);
    free(out);
}
TEST(each_entry_of_a_batch_has_its_own_cells) { for_each_kind(check_cells_of_batches); }

/* Draft trees: token i of the tree sees itself and its ancestors. */
static void check_trees(fixture *f, cache_kind kind) {
    static const int widths[] = {1, 7, 63, 64, 65, 130, 299, 340};
    int w, i, j;
    for (w = 0; w < (int)(sizeof widths / sizeof widths[0]); w++) {
        int bits = widths[w], n = bits > 9 ? 9 : bits, words = (bits + 63) / 64, extra = w % 2;
        uint64_t *mask = (uint64_t *)allocate_zeros((size_t)(n * (words + extra)), sizeof *mask);
        tkv_attend_params plain, p;
        char label[64];
        void *q;
        if (tkv_test_quick() && bits != 65) {
            free(mask);
            continue;
        }
        memset(&plain, 0, sizeof plain);
        plain.n = n;
        q = make_queries(f, &plain, n, TKV_TYPE_F32, PACKED, 1.0);
        p = plain;
        p.mask_bits = mask;
        p.n_mask_bits = bits;
        p.mask_bits_stride = extra ? words + 1 : 0;
        for (i = 0; i < n; i++)
            for (j = bits - n + i; j >= 0; j = j - 1 - tkv_rng_below(&f->rng, 3))
                mask[i * (words + extra) + j / 64] |= (uint64_t)1 << j % 64;
        snprintf(label, sizeof label, "tree of %d tokens", bits);
        if (bits > 1) check_param(f, kind, &p, &plain, label);
        memset(mask, 0, (size_t)(n * (words + extra)) * sizeof *mask);
        mask[0] = 1;
        snprintf(label, sizeof label, "tree of %d tokens that hides all of them", bits);
        (void)check_call(f, &p, wanted_outputs(kind), label);
        p.non_causal = 1;
        (void)check_call(f, &p, LSE, label);
        free(mask);
        free(q);
    }
}
TEST(trees) { for_each_kind(check_trees); }

static void check_windows(fixture *f, cache_kind kind) {
    static const int sizes[] = {1, 2, 17, 64, 100, 299, 300, 5000};
    int i;
    tkv_attend_params plain, p;
    void *q;
    memset(&plain, 0, sizeof plain);
    plain.n = 4;
    q = make_queries(f, &plain, plain.n, TKV_TYPE_F32, PACKED, 1.0);
    for (i = 0; i < (int)(sizeof sizes / sizeof sizes[0]); i++) {
        char label[64];
        p = plain;
        p.window = sizes[i];
        snprintf(label, sizeof label, "window %d", sizes[i]);
        if (sizes[i] <= 100) check_param(f, kind, &p, &plain, label);
        else (void)check_call(f, &p, LSE | SCORES, label);
        p.non_causal = 1;
        (void)check_call(f, &p, LSE, label);
        (void)check_call(f, &p, LSE | SCORES, label);
    }
    p = plain;
    p.window = TKV_OFF;
    (void)check_call(f, &p, LSE | SCORES, "no window");
    p.non_causal = 1;
    check_param(f, kind, &p, &plain, "non-causal");
    free(q);
    if (tkv_test_quick() && kind != EXACT_F32) return;
    p.n = 333; /* more queries than keys */
    q = make_queries(f, &p, p.n, TKV_TYPE_F32, PACKED, 1.0);
    (void)check_call(f, &p, LSE | SCORES, "non-causal, more queries than keys");
    free(q);
}
TEST(windows_and_non_causal) { for_each_kind(check_windows); }

static void check_batches(fixture *f, cache_kind kind) {
    static const tkv_rows rows[4] = {{2, 3}, {0, 0}, {1, 70}, {3, 0}};
    static const tkv_rows non_causal_rows[4] = {{3, 2}, {1, 5}, {0, 1}, {2, 9}}; /* sequence 3 is empty */
    static const float slopes[4] = {0.1f, 0.0f, 0.02f, 0.5f};
    tkv_attend_params p, plain;
    float *mask;
    uint64_t bits[73 * 2];
    void *q;
    int i;
    memset(&plain, 0, sizeof plain);
    plain.batch = rows;
    plain.n_batch = 4;
    plain.seq = 99; /* ignored, as is n */
    plain.n = -5;
    q = make_queries(f, &plain, 73, TKV_TYPE_F16, GAPS, 1.0);
    p = plain;
    (void)check_call(f, &p, wanted_outputs(kind), "batch");
    p.score_stride = 350;
    (void)check_call(f, &p, wanted_outputs(kind), "batch, stride of scores");
    p.score_stride = 0;
    p.alibi_slopes = slopes;
    p.window = 50;
    check_param(f, kind, &p, &plain, "batch, alibi, window");
    mask = allocate_floats(73 * 333);
    for (i = 0; i < 73 * 333; i++)
        mask[i] = tkv_rng_below(&f->rng, 4) ? (float)tkv_rng_gauss(&f->rng) : -2e30f;
    for (i = 0; i < 73 * 2; i++) bits[i] = tkv_rng_u64(&f->rng);
    p.mask = mask;
    p.mask_bits = bits;
    p.n_mask_bits = 80;
    check_param(f, kind, &p, &plain, "batch, alibi, window, mask, bits");
    free(q);
    memset(&p, 0, sizeof p);
    p.batch = non_causal_rows;
    p.n_batch = 4;
    p.non_causal = 1;
    q = make_queries(f, &p, 17, TKV_TYPE_F32, PACKED, 1.0);
    (void)check_call(f, &p, wanted_outputs(kind), "batch, non-causal, an empty sequence");
    p.n_batch = 0;
    p.batch = non_causal_rows;
    (void)check_call(f, &p, LSE, "batch of none");
    free(q);
    free(mask);
}
TEST(batches) { for_each_kind(check_batches); }

static void check_everything(fixture *f, cache_kind kind) {
    static const tkv_rows rows[2] = {{2, 11}, {1, 4}};
    static const float slopes[4] = {0.1f, 0.0f, 0.02f, 0.3f}, sinks[4] = {1.0f, 3.0f, -2.0f, 0.5f};
    tkv_attend_params p, plain;
    float *mask = allocate_floats(15 * 340);
    uint64_t bits[15 * 3];
    void *q;
    int i;
    memset(&plain, 0, sizeof plain);
    plain.batch = rows;
    plain.n_batch = 2;
    q = make_queries(f, &plain, 15, TKV_TYPE_BF16, HEAD_MAJOR, 1.0);
    p = plain;
    p.out_type = TKV_TYPE_F16;
    set_strides(GAPS, 15, 4, f->cfg.model.v_head_dim, &p.out_row_stride, &p.out_head_stride);
    p.scale = 0.5f;
    p.softcap = 5.0f;
    p.alibi_slopes = slopes;
    p.sink_logits = sinks;
    for (i = 0; i < 15 * 340; i++)
        mask[i] = tkv_rng_below(&f->rng, 9) ? (float)tkv_rng_gauss(&f->rng) : -1e30f;
    for (i = 0; i < 15 * 3; i++) bits[i] = tkv_rng_u64(&f->rng) | tkv_rng_u64(&f->rng);
    p.mask = mask;
    p.mask_stride = 340;
    p.mask_bits = bits;
    p.n_mask_bits = 150;
    p.window = 200;
    p.score_stride = 400;
    check_param(f, kind, &p, &plain, "everything at once");
    p.non_causal = 1;
    check_param(f, kind, &p, &plain, "everything at once, non-causal");
    free(q);
    free(mask);
}
TEST(everything_at_once) { for_each_kind(check_everything); }

/* >>shapes of calls */
TEST(prefill) { /* causal order inside a chunk: the first chunk, or after other tokens */
    static const int cases[][3] = {{0, 200, 130}, {1, 0, 130}, {0, 200, 512}, {1, 0, 512}, {1, 100, 65}};
    int i, n = tkv_test_quick() ? 2 : (int)(sizeof cases / sizeof cases[0]);
    for (i = 0; i < n; i++) {
        tkv_config cfg = make_config(3, 1, 24, 32);
        tkv_attend_params p;
        fixture f;
        void *q;
        cfg.tiers.hot_tokens = 16;
        cfg.tiers.warm_tokens = 64;
        if (cases[i][0]) cfg.tiers.hot = cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F32, TKV_F32);
        if (!open_fixture(&f, &cfg, (uint64_t)i)) return;
        if (cases[i][1]) append_random_tokens(&f, 0, 0, cases[i][1], 40);
        append_random_tokens(&f, 0, 0, cases[i][2], cases[i][2]);
        read_fixture_back(&f);
        memset(&p, 0, sizeof p);
        p.n = cases[i][2];
        q = make_queries(&f, &p, p.n, TKV_TYPE_F32, PACKED, 1.5);
        (void)check_call(&f, &p, LSE | SCORES, "prefill");
        (void)check_call(&f, &p, LSE, "prefill without scores"); /* only such calls take kernels/prefill.h */
        p.n = cases[i][1] + cases[i][2];                         /* queries for older tokens too */
        free(q);
        q = make_queries(&f, &p, p.n, TKV_TYPE_F32, PACKED, 1.5);
        if (!tkv_test_quick()) (void)check_call(&f, &p, LSE | SCORES, "prefill and before");
        free(q);
        close_fixture(&f);
    }
}

/* The parameters of a call, with 16 rows or more per KV head and without scores: the kernels of kernels/prefill.h. */
static void check_prefill_parameters(fixture *f, cache_kind kind) {
    enum { ROWS = 45, BATCH_ROWS = 113, LONGEST = 333 };
    static const tkv_rows rows[3] = {{2, 35}, {1, 70}, {0, 8}};
    static const float slopes[4] = {0.1f, 0.0f, 0.02f, 0.5f};
    static const uint32_t nonfinite[] = {0x7fc00000u, 0x7f800000u, 0xff800000u};
    float *mask = allocate_floats(BATCH_ROWS * LONGEST), *out = allocate_floats(2 * ROWS * 4 * 48), sinks[4],
          *x;
    tkv_attend_params p, plain;
    uint64_t bits[BATCH_ROWS * 2];
    void *q;
    int i, batch;
    for (i = 0; i < BATCH_ROWS * LONGEST; i++)
        mask[i] = tkv_rng_below(&f->rng, 4) ? (float)tkv_rng_gauss(&f->rng) : -2e30f;
    for (i = 0; i < BATCH_ROWS * 2; i++) bits[i] = tkv_rng_u64(&f->rng);
    for (i = 0; i < 4; i++) sinks[i] = 1.0f + (float)i;
    for (batch = 0; batch < 2; batch++) {
        memset(&plain, 0, sizeof plain);
        plain.n = ROWS;
        if (batch) plain.batch = rows, plain.n_batch = 3;
        q = make_queries(f, &plain, batch ? BATCH_ROWS : ROWS, batch ? TKV_TYPE_BF16 : TKV_TYPE_F32,
                         batch ? GAPS : PACKED, 1.0);
        (void)check_call(f, &plain, LSE, kind_name[kind]);
        for (i = 0; i < 6; i++) {
            p = plain;
            if (i == 0) p.softcap = 5.0f;
            if (i == 1) p.alibi_slopes = slopes, p.sink_logits = sinks;
            if (i == 2) p.mask = mask, p.mask_stride = LONGEST;
            if (i == 3) p.mask_bits = bits, p.n_mask_bits = batch ? 65 : 80;
            if (i == 4) p.window = 50;
            if (i == 5) p.non_causal = 1, p.out_type = TKV_TYPE_F16;
            (void)check_call(f, &p, LSE, kind_name[kind]);
        }
        p = plain;
        p.mask = mask, p.mask_stride = LONGEST;
        p.mask_bits = bits, p.n_mask_bits = 65;
        p.window = 90, p.softcap = 8.0f;
        p.alibi_slopes = slopes, p.sink_logits = sinks;
        (void)check_call(f, &p, LSE, kind_name[kind]);
        free(q);
    }
    memset(&p, 0, sizeof p); /* a query that is not finite leaves the bits of the other rows */
    p.n = ROWS;
    x = (float *)make_queries(f, &p, p.n, TKV_TYPE_F32, PACKED, 1.0);
    memset(x + 20 * 128, 0, 128 * sizeof *x);
    p.out = out;
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
    for (i = 0; i < 4; i++) x[20 * 128 + 33 * i] = tkv_test_float(nonfinite[i % 3]); /* one in each head */
    p.out = out + ROWS * 4 * 48;
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
    memset(out + 20 * 4 * 48, 0, 4 * 48 * sizeof *out);
    CHECK_MEM(out + ROWS * 4 * 48, out, ROWS * 4 * 48 * sizeof *out);
    free(x);
    free(mask);
    free(out);
}
TEST(prefill_parameters) { for_each_kind(check_prefill_parameters); }

TEST(empty_cache) {
    tkv_config cfg = make_config(4, 2, 64, 64);
    fixture f;
    tkv_attend_params p;
    float q[3 * 4 * 64], out[4 * 64];
    int i;
    if (!open_fixture(&f, &cfg, 5)) return;
    read_fixture_back(&f);
    tkv_rng_fill(&f.rng, q, 3 * 4 * 64, 1.0);
    memset(&p, 0, sizeof p);
    p.q = q;
    (void)check_call(&f, &p, LSE | SCORES | REFERENCE, "no query");
    p.n = 3;
    p.non_causal = 1;
    (void)check_call(&f, &p, LSE | SCORES | REFERENCE, "no key");
    for (i = 0; i < 4 * 64; i++) out[i] = 3.0f;
    CHECK_EQ(tkv_attend(f.kv, 0, 0, q, 0, out), TKV_OK);
    CHECK_EQ(tkv_attend(f.kv, 0, 0, q, 1, out), TKV_ERR_RANGE);
    for (i = 0; i < 4 * 64; i++) CHECK(out[i] == 3.0f);
    append_random_tokens(&f, 0, 0, 1, 1); /* with one key the output is its value for any q */
    read_fixture_back(&f);
    CHECK_EQ(tkv_attend(f.kv, 0, 0, q, 1, out), TKV_OK);
    for (i = 0; i < 4 * 64; i++) CHECK_NEAR(out[i], f.s[0].dv[i / 128 * 64 + i % 64], 1e-6);
    close_fixture(&f);
}

/* tkv_attend equals tkv_attend_ex with default parameters. */
TEST(attend_equals_attend_ex) {
    fixture f;
    tkv_attend_params p;
    float out[2][5 * 4 * 48];
    void *q;
    if (!open_kind(&f, KIVI_TIERS)) return;
    memset(&p, 0, sizeof p);
    p.seq = 2;
    p.n = 5;
    p.out = out[0];
    q = make_queries(&f, &p, 5, TKV_TYPE_F32, PACKED, 1.0);
    CHECK_EQ(tkv_attend_ex(f.kv, &p), TKV_OK);
    CHECK_EQ(tkv_attend(f.kv, 2, 0, (const float *)p.q, 5, out[1]), TKV_OK);
    CHECK_MEM(out[0], out[1], sizeof out[0]);
    (void)check_call(&f, &p, 0, "short form");
    free(q);
    close_fixture(&f);
}

/* The reference against the oracle, in every format. */
TEST(reference_in_every_format) {
    int i;
    for (i = 0; i < N_FORMATS; i++) {
        const tier_formats *fmt = &cover_formats[i];
        tkv_config cfg = make_config(2, 1, i % 3 ? 40 : 64, i % 2 ? 24 : 80);
        tkv_attend_params p;
        fixture f;
        void *q;
        if (tkv_test_quick() && i % 4) continue;
        cfg.tiers.hot = pair_of(cover_hot[i % 3], cover_hot[i / 3 % 3]);
        cfg.tiers.warm = pair_of(fmt->warm_k, fmt->warm_v);
        cfg.tiers.archive = pair_of(fmt->archive_k, fmt->archive_v);
        cfg.tiers.hot_tokens = 20;
        cfg.tiers.warm_tokens = 64;
        if (!open_fixture(&f, &cfg, 100 + (uint64_t)i)) return;
        append_random_tokens(&f, 0, 0, 230, 30);
        read_fixture_back(&f);
        memset(&p, 0, sizeof p);
        p.n = 2;
        q = make_queries(&f, &p, p.n, TKV_TYPE_F32, PACKED, 2.0);
        (void)check_call(&f, &p, LSE | SCORES | REFERENCE, fmt->name);
        free(q);
        close_fixture(&f);
    }
}

/* >>merging */
/* Cache 1 holds the tokens before `split`, cache 2 the rest, cache 0 all. Their merged outputs equal those of 0. */
static void check_merge(tkv_format format, int len, int split, double sd) {
    tkv_config cfg = make_config(6, 2, 64, 48);
    fixture f[3];
    tkv_attend_params p;
    enum { ROWS = 3 * 6, DIM = 48 };
    float out[3][ROWS * DIM], lse[3][ROWS];
    double format_error, a[ROWS * DIM], *got;
    oracle_result whole, exact;
    void *q = NULL;
    int i;
    memset(&p, 0, sizeof p);
    cfg.tiers.sink_tokens = TKV_OFF; /* blocks begin at multiples of 64 in all three */
    cfg.tiers.hot_tokens = 1;
    cfg.tiers.warm_tokens = TKV_UNLIMITED;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.warm = pair_of(format, format);
    for (i = 0; i < 3; i++) {
        if (!open_fixture(&f[i], &cfg, 31)) return;
        if (i == 0) append_random_tokens(&f[0], 0, 0, len, 512);
        if (i == 1) append_to_fixture(&f[1], 0, 0, f[0].s[0].k, f[0].s[0].v, split, 512);
        if (i == 2)
            append_to_fixture(&f[2], 0, 0, f[0].s[0].k + split * 2 * 64, f[0].s[0].v + split * 2 * 48,
                              len - split, 512);
        CHECK_EQ(tkv_seq_flush(f[i].kv, 0, TKV_FLUSH_ALL), TKV_OK);
        read_fixture_back(&f[i]);
    }
    p.n = 3;
    p.non_causal = 1;
    q = make_queries(&f[0], &p, p.n, TKV_TYPE_F32, PACKED, sd);
    for (i = 0; i < 3; i++) {
        p.out = out[i];
        p.lse = lse[i];
        CHECK_EQ(tkv_attend_ex(f[i].kv, &p), TKV_OK);
    }
    tkv_merge_attention(out[1], lse[1], out[2], lse[2], ROWS, DIM);
    whole = compute_oracle(&f[0], &p, 0);
    exact = compute_oracle(&f[0], &p, 1);
    format_error = relative_difference(whole.out, exact.out, ROWS * DIM);
    got = allocate_doubles(ROWS * DIM);
    for (i = 0; i < ROWS * DIM; i++) {
        got[i] = (double)out[1][i];
        a[i] = (double)out[0][i];
    }
    CHECK_LE(relative_difference(got, whole.out, ROWS * DIM), bound_arithmetic(&f[0], format_error));
    CHECK_LE(relative_difference(got, a, ROWS * DIM), 2 * bound_arithmetic(&f[0], format_error));
    format_error = logit_error(&whole, &exact, 6);
    for (i = 0; i < ROWS; i++)
        CHECK_NEAR(lse[1][i], whole.lse[i], 1e-5 + bound_arithmetic(&f[0], format_error));
    free(got);
    free(q);
    free_oracle_result(&whole);
    free_oracle_result(&exact);
    for (i = 0; i < 3; i++) close_fixture(&f[i]);
}

TEST(merge) {
    check_merge(TKV_F32, 300, 128, 1.0);
    check_merge(TKV_F32, 300, 64, 6.0);
    if (tkv_test_quick()) return;
    check_merge(TKV_F16, 200, 192, 1.0);
    check_merge(TKV_KIVI4, 300, 128, 1.0);
    check_merge(TKV_KIVI2, 300, 256, 4.0);
}

TEST(merge_with_empty_parts) { /* rows: first empty, second empty, both empty, logits far apart, near */
    float none = tkv_test_float(0xff800000u);
    float out[5][2] = {{0.0f, 0.0f}, {1.0f, 2.0f}, {0.0f, 0.0f}, {1.0f, 2.0f}, {1.0f, 2.0f}}, lse[5];
    float out2[5][2] = {{3.0f, 4.0f}, {0.0f, 0.0f}, {0.0f, 0.0f}, {3.0f, 4.0f}, {3.0f, 4.0f}}, lse2[5];
    static const float expected[5][2] = {
        {3.0f, 4.0f}, {1.0f, 2.0f}, {0.0f, 0.0f}, {3.0f, 4.0f}, {2.5f, 3.5f}};
    int r, c;
    lse[0] = lse[2] = lse2[1] = lse2[2] = none;
    lse2[0] = 0.5f;
    lse[1] = -700.0f;
    lse[3] = -500.0f;
    lse2[3] = 900.0f;
    lse[4] = 1000.0f;
    lse2[4] = 1000.0f + (float)log(3.0);
    tkv_merge_attention(&out[0][0], lse, &out2[0][0], lse2, 5, 2);
    for (r = 0; r < 5; r++)
        for (c = 0; c < 2; c++) CHECK_NEAR(out[r][c], expected[r][c], 1e-4);
    CHECK(lse[0] == 0.5f);
    CHECK(lse[1] == -700.0f);
    CHECK_MEM(&lse[2], &none, sizeof none);
    CHECK_NEAR(lse[3], 900.0, 1e-4);
    CHECK_NEAR(lse[4], 1000.0 + log(4.0), 2e-4);
}

/* >>layers that differ: formats, windows, shared K and V, no cache */
/* Queries see the sinks beyond the window: one query and many, a layer without this, and a layer that reads the keys
 * of another. */
TEST(sinks_beyond_windows) {
    tkv_layer_config layers[4];
    tkv_config cfg = make_config(4, 2, 48, 64);
    tkv_attend_params p;
    tkv_layer_info info;
    fixture f;
    int layer, n, i;
    memset(layers, 0, sizeof layers);
    layers[0].sink_tokens = 20;
    layers[1].window_sinks = TKV_OFF; /* but the layer that reads its keys sees them */
    layers[2].share_kv = 2;
    layers[3].window_sinks = TKV_OFF;
    cfg.model.n_layers = 4;
    cfg.layers = layers;
    cfg.tiers.warm_tokens = 64;
    cfg.model.window = 100;
    cfg.model.window_sinks = 1;
    if (!open_fixture(&f, &cfg, 21)) return;
    for (layer = 0; layer < 4; layer++)
        if (layer != 2) append_random_tokens(&f, 0, layer, 500, 33);
    read_fixture_back(&f);
    for (layer = 0; layer < 4; layer++) {
        uint8_t tier[500];
        const int sinks = layer == 0 ? 20 : layer == 3 ? 0 : 4;
        CHECK_EQ(tkv_get_layer(f.kv, 0, layer, &info), TKV_OK);
        CHECK(info.expired > 200);
        CHECK_EQ(info.evicted, 0);
        CHECK_EQ(tkv_get_tiers(f.kv, 0, layer, 0, 500, tier), TKV_OK);
        for (i = 0; i < 500; i++) CHECK_EQ(tier[i] == TKV_TOKEN_GONE, i >= sinks && i < sinks + info.expired);
        for (n = 1; n < 50; n += 39) {
            void *q;
            memset(&p, 0, sizeof p);
            p.layer = layer;
            p.n = n;
            q = make_queries(&f, &p, p.n, TKV_TYPE_F32, PACKED, 1.0);
            (void)check_call(&f, &p, LSE | SCORES | REFERENCE, "sinks beyond a window");
            (void)check_call(&f, &p, 0, "sinks beyond a window, no scores");
            p.window = 30;
            (void)check_call(&f, &p, LSE | SCORES, "sinks beyond a narrow window");
            free(q);
        }
    }
    CHECK_EQ(tkv_seq_truncate(f.kv, 0, 300), TKV_ERR_RANGE); /* the last one would see expired tokens */
    CHECK_EQ(tkv_check(f.kv, NULL, 0), TKV_OK);
    close_fixture(&f);
    layers[0].sink_tokens = TKV_OFF;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_OK); /* the layer does not ask for it itself */
    layers[0].window_sinks = 1;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    layers[0].window_sinks = 2;
    layers[0].sink_tokens = 0;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
    layers[0].window_sinks = 0;
    cfg.tiers.sink_tokens = TKV_OFF;
    CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
}

TEST(layers_that_differ) {
    tkv_config cfg = make_config(4, 2, 48, 64);
    tkv_layer_config layers[4];
    tkv_attend_params p;
    fixture f;
    void *q;
    int layer, window;
    memset(layers, 0, sizeof layers);
    layers[0].hot = layers[0].warm = layers[0].archive = pair_of(TKV_F32, TKV_F32);
    layers[1].warm = pair_of(TKV_KIVI3, TKV_Q8);
    layers[1].hot_tokens = 20;
    layers[1].sink_tokens = TKV_OFF;
    layers[1].window = 90; /* narrower than that of layer 2, which reads the same keys */
    layers[2].share_kv = 2;
    layers[3].no_cache = 1;
    cfg.model.n_layers = 4;
    cfg.layers = layers;
    cfg.tiers.warm_tokens = 64;
    cfg.model.window = 170;
    if (!open_fixture(&f, &cfg, 12)) return;
    append_random_tokens(&f, 0, 0, 400, 33);
    append_random_tokens(&f, 0, 1, 350, 33);
    read_fixture_back(&f);
    CHECK(f.s[0].expired > 0);
    CHECK(f.s[1].expired > 0);
    memset(&p, 0, sizeof p);
    p.n = 6;
    q = make_queries(&f, &p, p.n, TKV_TYPE_F32, PACKED, 1.0);
    for (layer = 0; layer < 3; layer++)
        for (window = 0; window < 2; window++) {
            tkv_attend_params wider;
            oracle_result a, b;
            char label[64];
            p.layer = layer;
            p.window = window ? 40 : 0;
            snprintf(label, sizeof label, "layer %d, window %d", layer, p.window);
            (void)check_call(&f, &p, LSE | SCORES | (tkv_test_quick() ? 0 : REFERENCE), label);
            wider = p;
            wider.window = 250; /* checks that the window changes the output */
            a = compute_oracle(&f, &p, 0);
            b = compute_oracle(&f, &wider, 1);
            CHECK(relative_difference(a.out, b.out, 6 * 4 * 64) > 0.1);
            free_oracle_result(&a);
            free_oracle_result(&b);
        }
    p.layer = 3;
    {
        float out[6 * 4 * 64];
        p.out = out;
        CHECK_EQ(tkv_attend_ex(f.kv, &p), TKV_ERR_ARG);
        CHECK_EQ(tkv_attend_reference(f.kv, &p), TKV_ERR_ARG);
    }
    free(q);
    close_fixture(&f);
}

/* >>extreme numbers */
static void check_extremes(fixture *f, cache_kind kind) {
    tkv_attend_params p;
    float *q;
    int i, size = 5 * 4 * 32, r;
    oracle_result a;
    memset(&p, 0, sizeof p);
    p.n = 5;
    q = (float *)make_queries(f, &p, p.n, TKV_TYPE_F32, PACKED, 1.0);
    a = compute_oracle(f, &p, 0);
    for (i = 0; i < size; i++) q[i] *= (float)(1e4 / a.max_logit);
    free_oracle_result(&a);
    a = compute_oracle(f, &p, 0);
    CHECK_NEAR(a.max_logit, 1e4, 1.0);
    free_oracle_result(&a);
    /* One key takes all weight. Rounding may decide which one. */
    (void)check_call(f, &p, wanted_outputs(kind) | LOOSE_BOUND, "logits of 1e4");
    free(q);
    q = (float *)make_queries(f, &p, p.n, TKV_TYPE_F32, PACKED, 1.0);
    for (r = 0; r < 5; r++) /* rows of zeros, of tiny and of huge numbers in one tile */
        for (i = 0; i < 4 * 32; i++)
            q[r * 128 + i] *= r == 0 ? 0.0f : r == 1 ? 1e-30f : r == 2 ? 1e-6f : 1.0f;
    (void)check_call(f, &p, wanted_outputs(kind), "queries of 0, 1e-30, 1e-6 and 1");
    for (i = 0; i < size; i++) q[i] = i % 2 ? 0.0f : -0.0f;
    (void)check_call(f, &p, wanted_outputs(kind), "zero queries");
    free(q);
}
TEST(extreme_queries) { for_each_kind(check_extremes); }

static void check_nonfinite(fixture *f, cache_kind kind) { /* other rows keep their bits */
    enum { ROW = 4 * 48 };
    float clean[5 * ROW], out[5 * ROW], lse[5 * 4], scores[300];
    static const uint32_t bits[] = {0x7fc00000u, 0xffc00000u, 0x7f800000u, 0xff800000u};
    tkv_attend_params p;
    float *q;
    int i, r;
    (void)kind;
    memset(&p, 0, sizeof p);
    p.n = 5;
    p.out = clean;
    q = (float *)make_queries(f, &p, p.n, TKV_TYPE_F32, PACKED, 1.0);
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
    p.out = out;
    p.lse = lse;
    p.scores = scores;
    for (i = 0; i < 4; i++) {
        q[2 * 128 + 37 * i] = tkv_test_float(bits[i]);
        CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
        for (r = 0; r < 5; r++)
            if (r != 2) CHECK_MEM(out + r * ROW, clean + r * ROW, ROW * sizeof(float));
    }
    for (i = 0; i < 5 * 128; i++) q[i] = tkv_test_float(bits[i % 4]);
    CHECK_EQ(tkv_attend_ex(f->kv, &p), TKV_OK);
    free(q);
}
TEST(nonfinite_queries) { for_each_kind(check_nonfinite); }

/* >>logits of 1e4 and more that are exact in floats, near ties in several blocks. The newest key, the reference, has
 * the logit 0. So the maxima are as large as the logits, and a rounded maximum would show: by 3e-4 at 1e4. Peaks rise
 * by a little less and a little more than e^8, where the kernels of prefill move their maximum. */
enum { LARGE_LEN = 320, LARGE_NEW = 24, LARGE_DIM = 32 };

static void check_large_logits(fixture *f, float base, int rows, tkv_isa isa) {
    static const float peaks[] = {0.0f, 7.75f, 8.25f, 16.0f, 16.5f};
    const int heads = f->cfg.model.n_heads, size = (LARGE_LEN + LARGE_NEW) * LARGE_DIM;
    float *k = allocate_floats(size), *v = allocate_floats(size),
          *q = allocate_floats(rows * heads * LARGE_DIM);
    float *mask = allocate_floats(rows * (LARGE_LEN + LARGE_NEW)), sinks[4];
    tkv_attend_params p;
    char label[96];
    int i, t;
    memset(&p, 0, sizeof p);
    tkv_rng_fill(&f->rng, v, (size_t)size, 1.0);
    for (t = 0; t < LARGE_LEN;
         t++) { /* logits are base + peak - below, plus a multiple of 1/64 for each row */
        const int below = t % 64 == 37 ? 0 : tkv_rng_below(&f->rng, 20 * 64);
        k[t * LARGE_DIM] = base + peaks[t / 64] - (float)below / 64.0f;
        k[t * LARGE_DIM + 1] = 1.0f;
    }
    append_to_fixture(f, 0, 0, k, v, LARGE_LEN + LARGE_NEW, 100);
    read_fixture_back(f);
    for (i = 0; i < rows * heads; i++) {
        q[i * LARGE_DIM] = 1.0f;
        q[i * LARGE_DIM + 1] = (float)(i * 37 % 1024) / 64.0f;
    }
    for (i = 0; i < heads; i++) sinks[i] = base + 20.0f;
    for (i = 0; i < rows * (LARGE_LEN + LARGE_NEW); i++)
        mask[i] = i % (LARGE_LEN + LARGE_NEW) < LARGE_LEN ? 0.0f : -1e30f;
    p.q = q;
    p.n = rows;
    p.scale = 1.0f;
    if (base < 0.0f) p.mask = mask;
    for (i = 0; i < 2; i++) {
        p.sink_logits = i ? sinks : NULL;
        snprintf(label, sizeof label, "logits of %g, %d rows%s, %s", (double)base, rows, i ? ", sinks" : "",
                 tkv_get_name(TKV_NAME_ISA, (int)isa));
        (void)check_call(f, &p, LSE, label);
    }
    free(k);
    free(v);
    free(q);
    free(mask);
}

TEST(large_logits_near_ties) {
    static const float bases[] = {1e4f, -1e4f, 1e5f, -1e5f};
    static const int rows[] = {1, 8, LARGE_NEW}; /* of two heads that share keys: the last two are prefills */
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int isa, base, i;
    for (isa = 0; isa < n_isas; isa++)
        for (base = 0; base < 4; base++)
            for (i = 0; i < 3; i++) {
                tkv_config cfg = make_config(2, 1, LARGE_DIM, LARGE_DIM);
                fixture f;
                cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
                cfg.tiers.hot_tokens = TKV_UNLIMITED;
                cfg.host.isa = isas[isa];
                if (!open_fixture(&f, &cfg, (uint64_t)base)) return;
                check_large_logits(&f, bases[base], rows[i], isas[isa]);
                close_fixture(&f);
            }
}

/* The first and the last key of the block before the newest, and the newest key: 1e7, 3e7 and 8e7 in a channel. As a
 * reference, the median would round the other logits to multiples of 2. */
TEST(large_keys_apart) {
    enum { LEN = 200, DIM = 32 };
    static const int rows[] = {1, 24};
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int isa, i, t, r;
    for (isa = 0; isa < n_isas; isa++)
        for (i = 0; i < 2; i++) {
            tkv_config cfg = make_config(2, 1, DIM, DIM);
            tkv_attend_params p;
            fixture f;
            float *k = allocate_floats(LEN * DIM), *v = allocate_floats(LEN * DIM),
                  *q = allocate_floats(rows[i] * 2 * DIM);
            cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
            cfg.tiers.hot_tokens = TKV_UNLIMITED;
            cfg.host.isa = isas[isa];
            if (!open_fixture(&f, &cfg, (uint64_t)i)) return;
            tkv_rng_fill(&f.rng, v, LEN * DIM, 1.0);
            for (t = 0; t < LEN; t++) k[t * DIM] = (float)tkv_rng_below(&f.rng, 256) / 64.0f;
            for (t = 128; t < LEN; t++) k[t * DIM] = t < 150 ? 1e7f : t < LEN - 1 ? 3e7f : 8e7f;
            append_to_fixture(&f, 0, 0, k, v, LEN, 100);
            read_fixture_back(&f);
            for (r = 0; r < rows[i] * 2; r++) q[r * DIM] = -1.0f; /* the large keys have no weight */
            memset(&p, 0, sizeof p);
            p.q = q;
            p.n = rows[i];
            p.scale = 1.0f;
            (void)check_call(&f, &p, LSE, tkv_get_name(TKV_NAME_ISA, (int)isas[isa]));
            free(k);
            free(v);
            free(q);
            close_fixture(&f);
        }
}

TEST(equal_keys) {
    int kind;
    for (kind = 0; kind < 3; kind++) {
        tkv_config cfg = make_config(4, 2, 64, 64);
        tkv_attend_params p;
        fixture f;
        float *k, *v;
        void *q;
        int i;
        oracle_result a;
        cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
        cfg.tiers.hot_tokens = 30;
        cfg.tiers.warm_tokens = 64;
        if (kind == 1) cfg.tiers.warm = cfg.tiers.archive = cfg.tiers.hot;
        if (kind == 2) cfg.host.precise = 1;
        if (!open_fixture(&f, &cfg, 3)) return;
        k = allocate_floats(250 * 128);
        v = allocate_floats(250 * 128);
        for (i = 0; i < 250 * 128; i++) k[i] = (float)(i % 128 - 60) * 0.25f; /* exact in fp16 */
        tkv_rng_fill(&f.rng, v, 250 * 128, 1.0);
        append_to_fixture(&f, 0, 0, k, v, 250, 41);
        read_fixture_back(&f);
        CHECK_MEM(f.s[0].dk, k, 250 * 128 * sizeof(float));
        memset(&p, 0, sizeof p);
        p.n = 3;
        q = make_queries(&f, &p, p.n, TKV_TYPE_F32, PACKED, 1.0);
        (void)check_call(&f, &p, LSE | SCORES | (tkv_test_quick() ? 0 : REFERENCE), "equal keys");
        a = compute_oracle(&f, &p, 0); /* checks the oracle: each weight is 1 / keys */
        CHECK_NEAR(a.scores[0], 4.0 / 248 + 4.0 / 249 + 4.0 / 250, 1e-12);
        free_oracle_result(&a);
        free(q);
        free(k);
        free(v);
        close_fixture(&f);
    }
}

/* >>bad arguments: the call returns the expected status and writes nothing */
enum {
    BAD_NONE,
    BAD_Q,
    BAD_OUT,
    BAD_LAYER,
    BAD_LAYER2,
    BAD_SEQ,
    BAD_SEQ2,
    BAD_N,
    BAD_N_PAST_START,
    BAD_SCORES,
    BAD_Q_TYPE,
    BAD_OUT_TYPE,
    BAD_WINDOW,
    BAD_SCALE,
    BAD_SOFTCAP,
    BAD_SOFTCAP2,
    BAD_BITS,
    BAD_BITS2,
    BAD_BATCH,
    BAD_BATCH2,
    BAD_BATCH_SEQ,
    BAD_BATCH_N,
    BAD_BATCH_N2,
    BAD_COUNT
};

static tkv_status make_bad_params(tkv_attend_params *p, int bad_field, tkv_rows *rows) {
    static const uint64_t bits[1] = {1};
    rows[0].seq = 0;
    rows[1].seq = 1;
    rows[0].n = rows[1].n = 1;
    switch (bad_field) {
    case BAD_Q: p->q = NULL; break;
    case BAD_OUT: p->out = NULL; break;
    case BAD_LAYER: p->layer = -1; break;
    case BAD_LAYER2: p->layer = 1; break;
    case BAD_SEQ: p->seq = -1; break;
    case BAD_SEQ2: p->seq = 4; break;
    case BAD_N: p->n = -1; break;
    case BAD_N_PAST_START: p->n = 301; return TKV_ERR_RANGE;
    case BAD_SCORES: p->lse = NULL; break;
    case BAD_Q_TYPE: p->q_type = (tkv_type)3; break;
    case BAD_OUT_TYPE: p->out_type = (tkv_type)3; break;
    case BAD_WINDOW: p->window = TKV_UNLIMITED; break;
    case BAD_SCALE: p->scale = tkv_test_float(0x7fc00000u); break;
    case BAD_SOFTCAP: p->softcap = -1.0f; break;
    case BAD_SOFTCAP2: p->softcap = tkv_test_float(0x7f800000u); break;
    case BAD_BITS: p->mask_bits = bits; break; /* n_mask_bits is 0 */
    case BAD_BITS2: p->n_mask_bits = -1; break;
    case BAD_BATCH:
        p->batch = rows;
        p->n_batch = -1;
        break;
    case BAD_BATCH2:
        p->batch = rows;
        p->n_batch = 5;
        break;
    case BAD_BATCH_SEQ:
        p->batch = rows;
        p->n_batch = 2;
        rows[1].seq = 4;
        break;
    case BAD_BATCH_N:
        p->batch = rows;
        p->n_batch = 2;
        rows[1].n = -1;
        break;
    case BAD_BATCH_N2:
        p->batch = rows;
        p->n_batch = 2;
        rows[1].n = 71;
        return TKV_ERR_RANGE;
    default: return TKV_OK;
    }
    return TKV_ERR_ARG;
}

TEST(bad_arguments) {
    enum { N_OUT = 2 * 4 * 48, N_LSE = 8, N_SCORES = 600 };
    float out[N_OUT], lse[N_LSE], scores[N_SCORES], filler[N_SCORES];
    tkv_attend_params good;
    fixture f;
    void *q;
    int bad_field, use_reference;
    if (!open_kind(&f, KIVI_TIERS)) return;
    memset(filler, FILLER, sizeof filler);
    memset(&good, 0, sizeof good);
    good.n = 1;
    q = make_queries(&f, &good, 2, TKV_TYPE_F32, PACKED, 1.0);
    good.out = out;
    good.lse = lse;
    good.scores = scores;
    for (use_reference = 0; use_reference < 2; use_reference++)
        for (bad_field = 0; bad_field < BAD_COUNT; bad_field++) {
            tkv_attend_params p = good;
            tkv_rows rows[5];
            tkv_status want, got;
            memset(rows, 0, sizeof rows);
            want = make_bad_params(&p, bad_field, rows);
            memcpy(out, filler, sizeof out);
            memcpy(lse, filler, sizeof lse);
            memcpy(scores, filler, sizeof scores);
            got = use_reference ? tkv_attend_reference(f.kv, &p) : tkv_attend_ex(f.kv, &p);
            CHECK_MSG(got == want, "case %d: %s, expected %s", bad_field, tkv_get_status_text(got),
                      tkv_get_status_text(want));
            CHECK((memcmp(out, filler, sizeof out) == 0) == (want != TKV_OK));
            CHECK((memcmp(lse, filler, sizeof lse) == 0) == (want != TKV_OK));
            CHECK((memcmp(scores, filler, sizeof scores) == 0) == (want != TKV_OK));
        }
    memcpy(out, filler, sizeof out);
    CHECK_EQ(tkv_attend_ex(NULL, &good), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_ex(f.kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_reference(NULL, &good), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend_reference(f.kv, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend(NULL, 0, 0, (const float *)good.q, 1, out), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend(f.kv, 0, 0, NULL, 1, out), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend(f.kv, 0, 0, (const float *)good.q, 1, NULL), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend(f.kv, 4, 0, (const float *)good.q, 1, out), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend(f.kv, 0, 1, (const float *)good.q, 1, out), TKV_ERR_ARG);
    CHECK_EQ(tkv_attend(f.kv, 3, 0, (const float *)good.q, 1, out), TKV_ERR_RANGE);
    CHECK_MEM(out, filler, sizeof out);
    free(q);
    close_fixture(&f);
}

/* Each refused call has a sentence with its number; a valid one has none. */
TEST(sentences_of_refused_calls) {
    static const int negative[1] = {-2}, beyond[1] = {1 << 30}, zero[1] = {0}, cells[400] = {0, 1, 2, 77};
    static const float slopes[4] = {0.5f, 0.5f, (float)HUGE_VAL, 0.5f};
    static float out[2 * 4 * 48], scores[600], mask[600];
    char reason[160];
    tkv_attend_params good, p;
    tkv_cache *kv;
    fixture f;
    void *q;
    if (!open_kind(&f, KIVI_TIERS)) return;
    kv = f.kv;
    memset(&good, 0, sizeof good);
    good.n = 1;
    q = make_queries(&f, &good, 2, TKV_TYPE_F32, PACKED, 1.0);
    good.out = out;
#define REFUSED(change, status, sentence)                                                                    \
    do {                                                                                                     \
        p = good;                                                                                            \
        (void)(change);                                                                                      \
        CHECK_EQ(tkv_validate_attend(kv, &p, reason, sizeof reason), status);                                \
        CHECK_MSG(strcmp(reason, sentence) == 0, "\"%s\" is not \"%s\"", reason, sentence);                  \
        CHECK_EQ(tkv_attend_ex(kv, &p), status);                                                             \
    } while (0)
    REFUSED(0, TKV_OK, "");
    REFUSED(p.layer = 7, TKV_ERR_ARG, "there is no layer 7 with a cache");
    REFUSED(p.seq = -3, TKV_ERR_ARG, "there is no sequence -3");
    REFUSED(p.n = -1, TKV_ERR_ARG, "n is -1; it must not be negative");
    REFUSED(p.n = 30000, TKV_ERR_RANGE, "more queries than tokens: append to sequence 0 first");
    REFUSED(p.window = -5, TKV_ERR_ARG, "window is -5");
    REFUSED(p.first_kv_head = 9, TKV_ERR_ARG, "first_kv_head and n_kv_heads reach beyond 2 KV heads");
    REFUSED(p.first_rows = negative, TKV_ERR_ARG, "first_rows has -2");
    REFUSED(p.first_queries = negative, TKV_ERR_ARG, "first_queries has -2");
    REFUSED(p.row_ends = zero, TKV_ERR_ARG,
            "row_ends has 0: more than the index of the query, at most the length");
    REFUSED(p.query_positions = beyond, TKV_ERR_ARG, "query_positions has 1073741824: 0 to 2^30 - 1");
    REFUSED((p.query_positions = zero, p.row_ends = zero), TKV_ERR_ARG,
            "query_positions exclude first_queries and row_ends");
    REFUSED(p.q = NULL, TKV_ERR_ARG, "q or out is missing");
    REFUSED(p.scores = scores, TKV_ERR_ARG, "scores need lse");
    REFUSED((p.scores = scores, p.lse = out, p.score_stride = 1), TKV_ERR_ARG,
            "score_stride is 1: less than the longest length");
    REFUSED(p.q_type = (tkv_type)3, TKV_ERR_ARG, "q_type is 3: no tkv_type");
    REFUSED(p.softcap = -1.0f, TKV_ERR_ARG, "softcap is negative or not finite");
    REFUSED(p.scale = (float)HUGE_VAL, TKV_ERR_ARG, "scale is not finite");
    REFUSED(p.alibi_slopes = slopes, TKV_ERR_ARG, "the slope of head 2 is not finite");
    REFUSED((p.mask = mask, p.mask_cells = cells, p.mask_stride = 77), TKV_ERR_ARG,
            "mask_cells has 77: 0 to mask_stride - 1");
#undef REFUSED
    CHECK_EQ(tkv_validate_attend(NULL, &good, reason, sizeof reason), TKV_ERR_ARG);
    CHECK_STR(reason, "the cache or the parameters are missing");
    CHECK_EQ(tkv_validate_attend(kv, NULL, reason, 10), TKV_ERR_ARG);
    CHECK_STR(reason, "the cache");
    CHECK_EQ(tkv_validate_attend(kv, NULL, NULL, 0), TKV_ERR_ARG);
    free(q);
    close_fixture(&f);
}

/* >>errors of formats: the output with all tokens in one format, compared with exact K and V */
enum { N_LOSS_KINDS = 5 }; /* gauss, peaked, needles, large keys, large values */

typedef struct loss_bounds {
    tkv_format format, v; /* of K and V; v = TKV_FORMAT_DEFAULT: that of K */
    int group;
    double max_error[N_LOSS_KINDS]; /* 0: not bounded */
} loss_bounds;

/* 1.3 times the measured errors, and less than 1, which is the error of zero output. */
static const loss_bounds losses[] = {
    {TKV_F32, TKV_FORMAT_DEFAULT, 64, {1e-5, 1e-5, 1e-5, 1e-5, 1e-5}},
    {TKV_F16, TKV_FORMAT_DEFAULT, 64, {0.0004, 0.0008, 0.0003, 0.0009, 0.0005}},
    {TKV_BF16, TKV_FORMAT_DEFAULT, 64, {0.0032, 0.0049, 0.0021, 0.0069, 0.0035}},
    {TKV_Q8, TKV_FORMAT_DEFAULT, 64, {0.0098, 0.0149, 0.0068, 0.0125, 0.0166}},
    {TKV_Q8, TKV_FORMAT_DEFAULT, 32, {0.0084, 0.0126, 0.0060, 0.0115, 0.0122}},
    {TKV_KIVI4, TKV_FORMAT_DEFAULT, 64, {0.168, 0.225, 0.115, 0.203, 0.288}},
    {TKV_KIVI4, TKV_FORMAT_DEFAULT, 32, {0.154, 0.259, 0.102, 0.175, 0.207}},
    {TKV_KIVI3, TKV_FORMAT_DEFAULT, 64, {0.367, 0.572, 0.236, 0.423, 0.623}},
    {TKV_KIVI3, TKV_FORMAT_DEFAULT, 32, {0.312, 0.484, 0.211, 0.382, 0.483}},
    {TKV_KIVI2, TKV_FORMAT_DEFAULT, 64, {0.957, 0.98, 0.570, 0.99, 0.0}},
    {TKV_KIVI2, TKV_FORMAT_DEFAULT, 32, {0.812, 0.98, 0.498, 0.965, 0.98}},
    {TKV_A40, TKV_R40, 64, {0.208, 0.315, 0.136, 0.158, 0.223}},
    {TKV_A30, TKV_R30, 64, {0.416, 0.605, 0.257, 0.284, 0.465}},
    {TKV_A30, TKV_R20, 64, {0.592, 0.732, 0.467, 0.491, 0.647}},
    {TKV_A25, TKV_R20, 64, {0.676, 0.94, 0.470, 0.507, 0.731}},
    {TKV_A20, TKV_R20, 64, {0.829, 0.98, 0.458, 0.527, 0.938}},
    {TKV_A15, TKV_R15, 64, {0.98, 0.0, 0.588, 0.758, 0.98}},
};
enum { QUICK_LOSS = 13 }; /* index of a30/r20, which quick runs include */

static double measure_loss(const loss_bounds *bounds, data_kind data) {
    enum { LEN = 500, N = 8, HEADS = 4, DIM = 128, N_OUT = N * HEADS * DIM };
    tkv_config cfg = make_config(HEADS, 1, DIM, DIM);
    float *k = allocate_floats(LEN * DIM), *v = allocate_floats(LEN * DIM), *q = allocate_floats(N_OUT),
          *out = allocate_floats(N_OUT);
    double *got = allocate_doubles(N_OUT), *zero = allocate_doubles(N_OUT), error = 1e30;
    tkv_attend_params p;
    fixture f;
    oracle_result exact;
    int i;
    cfg.tiers.sink_tokens = cfg.tiers.hot_tokens = TKV_OFF;
    cfg.tiers.warm_tokens = TKV_UNLIMITED;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.warm = pair_of(bounds->format, bounds->v ? bounds->v : bounds->format);
    cfg.format.group_size = bounds->group;
    if (open_fixture(&f, &cfg, 9)) {
        make_data(data, &f.cfg, &f.rng, LEN, N, k, v, q);
        append_to_fixture(&f, 0, 0, k, v, LEN, LEN);
        CHECK_EQ(tkv_seq_flush(f.kv, 0, TKV_FLUSH_ALL), TKV_OK);
        memset(&p, 0, sizeof p);
        p.n = N;
        p.q = q;
        exact = compute_oracle(&f, &p, 1);
        CHECK_EQ(tkv_attend(f.kv, 0, 0, q, N, out), TKV_OK);
        for (i = 0; i < N_OUT; i++) got[i] = (double)out[i];
        error = relative_difference(got, exact.out, N_OUT);
        if (bounds->max_error[data] > 0.0) {
            CHECK_LE(error, bounds->max_error[data]);
            CHECK(relative_difference(zero, exact.out, N_OUT) > bounds->max_error[data]);
        }
        free_oracle_result(&exact);
    }
    close_fixture(&f);
    free(k);
    free(v);
    free(q);
    free(out);
    free(got);
    free(zero);
    return error;
}

TEST(format_errors) {
    double error[N_LOSS_KINDS];
    int i, data;
    printf("\n");
    for (i = 0; i < (int)(sizeof losses / sizeof losses[0]); i++) {
        if (tkv_test_quick() && i % 6 && i != QUICK_LOSS) continue;
        for (data = 0; data < N_LOSS_KINDS; data++) error[data] = measure_loss(&losses[i], (data_kind)data);
        printf("      %-5s %-5s group %d:", tkv_get_name(TKV_NAME_FORMAT, (int)losses[i].format),
               losses[i].v ? tkv_get_name(TKV_NAME_FORMAT, (int)losses[i].v) : "", losses[i].group);
        for (data = 0; data < N_LOSS_KINDS; data++) printf(" %s %.3g", data_name[data], error[data]);
        printf("\n");
    }
}

/* A huge newest key of almost no weight must not reduce the precision of other keys. */
TEST(outlier_newest_key) {
    static const float huge[] = {1e4f, 65504.0f, 1e6f, 1e10f};
    int i, t, c;
    for (i = 0; i < 4; i++) {
        tkv_config cfg = make_config(1, 1, 64, 16);
        tkv_rng rng = tkv_rng_seed(5);
        tkv_attend_params p;
        tkv_cache *kv = NULL;
        float k[64], v[16], q[64], out[16], lse, expected[16], expected_lse;
        double error = 0.0;
        cfg.host.isa = tkv_test_isa();
        cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
        cfg.tiers.hot_tokens = TKV_UNLIMITED;
        CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
        if (!kv) return;
        for (t = 0; t < 200; t++) {
            for (c = 0; c < 64; c++) k[c] = (float)tkv_rng_gauss(&rng);
            for (c = 0; c < 16; c++) v[c] = (float)tkv_rng_gauss(&rng);
            if (t == 199) k[0] = huge[i];
            CHECK_EQ(tkv_append(kv, 0, 0, k, v, 1), TKV_OK);
        }
        for (c = 0; c < 64; c++) q[c] = (float)tkv_rng_gauss(&rng);
        q[0] = -1.0f;
        memset(&p, 0, sizeof p);
        p.n = 1;
        p.q = q;
        p.out = out;
        p.lse = &lse;
        CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
        p.out = expected;
        p.lse = &expected_lse;
        CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
        for (c = 0; c < 16; c++) error = fmax(error, fabs((double)out[c] - (double)expected[c]));
        CHECK_LE(error, 1e-5);
        CHECK_LE(fabs((double)lse - (double)expected_lse), 1e-5);
        tkv_destroy(kv);
    }
}

/* Errors: queries that need expired keys, a stride that is too small for the scores. +inf in a mask counts as the
 * largest number. */
TEST(unanswerable_calls_are_refused) {
    tkv_config cfg = make_config(2, 1, 16, 16);
    tkv_attend_params p;
    tkv_cache *kv = NULL;
    float k[16], v[16], q[900 * 32], out[900 * 32], lse[900 * 2], scores[1000], mask[1000];
    tkv_layer_info tiers;
    int t, c;
    cfg.host.isa = tkv_test_isa();
    cfg.model.window = 64;
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    if (!kv) return;
    for (t = 0; t < 1000; t++) {
        for (c = 0; c < 16; c++) k[c] = v[c] = (float)((t * 7 + c * 3) % 11);
        CHECK_EQ(tkv_append(kv, 0, 0, k, v, 1), TKV_OK);
    }
    for (c = 0; c < 900 * 32; c++) q[c] = (float)(c % 5);
    CHECK_EQ(tkv_get_layer(kv, 0, 0, &tiers), TKV_OK);
    CHECK(tiers.expired > 0);
    memset(&p, 0, sizeof p);
    p.q = q;
    p.out = out;
    p.n = 1000 - tiers.expired - 63; /* the first query sees exactly the keys that are left */
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.n++;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_RANGE);
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_ERR_RANGE);
    p.n = 1;
    p.window = TKV_OFF;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_RANGE);
    p.window = 0;
    p.lse = lse;
    p.scores = scores;
    p.score_stride = 999;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    p.score_stride = -1000;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    p.scores = NULL;
    p.n_mask_bits = 0x7fffffff; /* ignored: mask_bits is NULL */
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.n_mask_bits = 0;
    memset(mask, 0, sizeof mask);
    mask[990] = (float)HUGE_VAL;
    p.mask = mask;
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    for (c = 0; c < 16; c++) CHECK_NEAR(out[c], (990 * 7 + c * 3) % 11, 1e-6); /* all weight is on key 990 */
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
    for (c = 0; c < 16; c++) CHECK_NEAR(out[c], (990 * 7 + c * 3) % 11, 1e-6);
    tkv_destroy(kv);
    cfg.model.window = 0;
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    p.mask = NULL;
    p.non_causal = 1;
    p.n = 1 << 30; /* times two heads: the number of rows overflows */
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_ERR_ARG);
    tkv_destroy(kv);
}

/* >>mixing */
/* Compressed keys next to exact ones in one softmax. If decoded keys are too long or too short, the exact ones lose
 * or gain weight (KIVI with 2 bits makes keys longer). Keys are random, logits have standard deviation sd. The
 * error is the mean share of the weight that the newest 64 of 1,024 tokens have, minus the exact share. */
enum { MIX_LEN = 1024, MIX_HOT = 64, MIX_HEADS = 8, MIX_DIM = 64, MIX_N = 64 };
static float mix_keys[MIX_LEN * MIX_HEADS * MIX_DIM], mix_q[MIX_N * MIX_HEADS * MIX_DIM];

/* The exact share of the hot tokens, summed over rows. */
static double compute_hot_share(void) {
    double share = 0;
    int n, h, t, c;
    for (n = 0; n < MIX_N; n++)
        for (h = 0; h < MIX_HEADS; h++) {
            double sum = 0, hot = 0;
            for (t = 0; t < MIX_LEN; t++) {
                float dot = 0;
                for (c = 0; c < MIX_DIM; c++)
                    dot += mix_q[(n * MIX_HEADS + h) * MIX_DIM + c] *
                           mix_keys[(t * MIX_HEADS + h) * MIX_DIM + c];
                sum += exp((double)dot / 8.0);
                if (t >= MIX_LEN - MIX_HOT) hot += exp((double)dot / 8.0);
            }
            share += hot / sum;
        }
    return share;
}

static double measure_hot_share_error(tkv_format k, int fit, double sd) {
    static float out[MIX_N * MIX_HEADS * MIX_DIM], scores[MIX_LEN], lse[MIX_N * MIX_HEADS];
    static double exact[2]; /* for each sd; the queries are the same in each call */
    tkv_config cfg = tkv_default_config();
    tkv_attend_params p;
    tkv_cache *kv = NULL;
    tkv_rng rng = tkv_rng_seed(4711);
    double share = 0;
    int i, t, round, rounds = tkv_test_quick() ? 1 : 4, is_known = exact[sd > 2] > 0;
    cfg.model.n_layers = 1;
    cfg.model.n_heads = cfg.model.n_kv_heads = MIX_HEADS;
    cfg.model.head_dim = MIX_DIM;
    cfg.tiers.sink_tokens = TKV_OFF;
    cfg.tiers.warm_tokens = TKV_OFF;
    cfg.tiers.hot.k = cfg.tiers.hot.v = TKV_F32;
    cfg.tiers.archive.k = k;
    cfg.tiers.archive.v = TKV_Q8;
    cfg.format.fit = fit;
    cfg.host.isa = tkv_test_isa();
    if (tkv_create(&cfg, &kv) != TKV_OK) return 1.0;
    tkv_rng_fill(&rng, mix_keys, sizeof mix_keys / sizeof *mix_keys, 1.0);
    for (t = 0; t < MIX_LEN; t += MIX_HOT) { /* formats that learn see such queries too */
        const float *some = mix_keys + t * MIX_HEADS * MIX_DIM;
        (void)tkv_append(kv, 0, 0, some, some, MIX_HOT);
        tkv_rng_fill(&rng, mix_q, sizeof mix_q / sizeof *mix_q, 1.0);
        (void)tkv_attend(kv, 0, 0, mix_q, 8, out);
    }
    (void)tkv_seq_flush(kv, 0, TKV_FLUSH_DUE);
    for (round = 0; round < rounds; round++) {
        tkv_rng_fill(&rng, mix_q, sizeof mix_q / sizeof *mix_q, sd);
        memset(&p, 0, sizeof p);
        p.n = MIX_N;
        p.q = mix_q;
        p.out = out;
        p.scores = scores;
        p.lse = lse;
        p.non_causal = 1;
        if (tkv_attend_ex(kv, &p) != TKV_OK) share = 1e9;
        for (i = MIX_LEN - MIX_HOT; i < MIX_LEN; i++) share += (double)scores[i];
        if (!is_known) exact[sd > 2] += compute_hot_share();
    }
    tkv_destroy(kv);
    return (share - exact[sd > 2]) / (rounds * MIX_N * MIX_HEADS);
}

TEST(mixed_tiers_share_attention_fairly) {
    static const struct {
        tkv_format k;
        int fit;
        double max_error[2]; /* for logits of standard deviation 1 and 3 */
    } cases[] = {{TKV_KIVI2, TKV_FIT_NORM, {.0005, .0015}},
                 {TKV_KIVI4, 0, {.0005, .003}},
                 /* cov(x^, x) = var(x): decoded keys are a little longer than the keys */
                 {TKV_A40, 0, {.0006, .0035}},
                 {TKV_A30, 0, {.002, .011}},
                 {TKV_A25, 0, {.0035, .018}},
                 {TKV_A20, 0, {.0035, .018}}};
    int i, sd;
    double plain;
    for (i = 0; i < (int)(sizeof cases / sizeof *cases); i++)
        for (sd = 0; sd < 2; sd++) {
            double error;
            if (tkv_test_quick() && i % 4 != 0) continue;
            error = measure_hot_share_error(cases[i].k, cases[i].fit, sd ? 3.0 : 1.0);
            CHECK_MSG(error <= cases[i].max_error[sd] && error >= -cases[i].max_error[sd], "%s, sd %d: %.5f",
                      tkv_get_name(TKV_NAME_FORMAT, (int)cases[i].k), sd ? 3 : 1, error);
        }
    plain = measure_hot_share_error(TKV_KIVI2, 0, 3.0);
    /* Shows that the test detects a bias. */
    CHECK_MSG(plain < -.025, "2 bits between minimum and maximum: %.5f", plain);
}

/* >>the largest values of exact tiers in chapter 12: |v| to 3.4e38 / keys, as their sum is a float, or 1.1e35 / keys
 * with 16 query rows or more for a KV head; |k| to 1.6e38 */
enum { EXTREME_TOKENS = 2600, EXTREME_ROWS = 20, EXTREME_DIM = 80 };

static void run_in_order(void *user, int n, tkv_task task, void *ctx) {
    (void)user;
    while (n-- > 0) task(ctx, n);
}

/* The newest `rows` queries of n tokens against the reference. keys: 0: zeros; 1: logits of unit size; 2: the largest
 * keys, and queries that are small, but normal. */
static void check_large_values(tkv_isa isa, tkv_format format, int dim, int n, int rows, int keys,
                               tkv_rng *rng) {
    static float k[EXTREME_TOKENS * EXTREME_DIM], v[EXTREME_TOKENS * EXTREME_DIM],
        q[EXTREME_ROWS * EXTREME_DIM], out[EXTREME_ROWS * EXTREME_DIM], want[EXTREME_ROWS * EXTREME_DIM];
    const float most_summed = rows < 16 ? 3.38e38f : 1.13e35f; /* prefill: weights reach e^8 */
    const float most = most_summed / (float)n, largest_key = keys == 2 ? 1.6e38f : 1.0f;
    tkv_config cfg = make_sized_config(1, 1, 1, dim, 1, n);
    tkv_attend_params p;
    tkv_cache *kv;
    double worst = 0.0, logit[EXTREME_ROWS]; /* worst error, in parts of its bound; L of each row */
    int i;
    cfg.host.isa = isa;
    cfg.host.parallel_for = run_in_order;
    cfg.tiers.hot = pair_of(format, format);
    cfg.tiers.hot_tokens = TKV_UNLIMITED;
    for (i = 0; i < n * dim; i++) {
        v[i] = i / dim % 7 == 6 ? -most : most;
        k[i] = keys == 0 ? 0.0f : tkv_rng_below(rng, 2) ? largest_key : -largest_key;
    }
    tkv_rng_fill(rng, q, (size_t)(rows * dim), 1.0);
    for (i = 0; i < rows * dim; i++) {
        double *sum = &logit[i / dim];
        if (keys == 2) q[i] *= 4.0f / largest_key;
        *sum = (i % dim ? *sum : 0.0) + fabs((double)q[i]) * (double)(keys ? largest_key : 0.0f) / sqrt(dim);
    }
    kv = create_cache(&cfg);
    CHECK_EQ(tkv_append(kv, 0, 0, k, v, n), TKV_OK);
    memset(&p, 0, sizeof p);
    p.n = rows;
    p.q = q;
    p.out = out;
    p.non_causal = 1; /* each query sees all keys */
    CHECK_EQ(tkv_attend_ex(kv, &p), TKV_OK);
    p.out = want;
    CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
    for (i = 0; i < rows * dim; i++) {
        const double e =
            fabs((double)out[i] - (double)want[i]) / (1e-5 * (1.0 + logit[i / dim]) * (double)most);
        worst = e <= worst ? worst : e; /* NaN counts */
    }
    CHECK_MSG(worst <= 1.0, "%s, %s, %d channels, %d keys, %d rows, keys %d: %g of the bound",
              tkv_get_name(TKV_NAME_ISA, (int)isa), tkv_get_name(TKV_NAME_FORMAT, (int)format), dim, n, rows,
              keys, worst);
    tkv_destroy(kv);
}

TEST(the_largest_values_do_not_overflow) {
    static const int counts[] = {1, 2, 3, 64, 65, 330, EXTREME_TOKENS}, dims[] = {1, 16, EXTREME_DIM};
    static const tkv_format formats[] = {TKV_F32, TKV_BF16};
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    const int n_kinds = FAST_MATH ? 2 : 3; /* -Ofast makes subnormal numbers zero: the smallest queries */
    tkv_rng rng = tkv_rng_seed(92);
    int i, f, c, d, keys;
    for (i = 0; i < n_isas; i++)
        for (f = 0; f < COUNT(formats); f++)
            for (c = 0; c < COUNT(counts); c++)
                for (d = 0; d < COUNT(dims); d++)
                    for (keys = 0; keys < n_kinds; keys++) {
                        check_large_values(isas[i], formats[f], dims[d], counts[c], 1, keys, &rng);
                        if (counts[c] >= EXTREME_ROWS && (counts[c] < EXTREME_TOKENS || !tkv_test_quick()))
                            check_large_values(isas[i], formats[f], dims[d], counts[c], EXTREME_ROWS, keys,
                                               &rng);
                    }
}

/* Beyond them the sum overflows: the output is an infinity, not another finite number. */
TEST(larger_values_give_an_infinity) {
    static const int counts[] = {2, 64, 330};
    static const tkv_format formats[] = {TKV_F32, TKV_BF16};
    enum { MOST = 330, DIM_HERE = 16 };
    static float k[MOST * DIM_HERE], v[MOST * DIM_HERE], q[DIM_HERE], out[DIM_HERE];
    tkv_isa isas[TKV_ISA_COUNT];
    const int n_isas = tkv_test_isas(isas);
    int i, f, c, j;
    for (i = 0; i < n_isas; i++)
        for (f = 0; f < COUNT(formats); f++)
            for (c = 0; c < COUNT(counts); c++) {
                tkv_config cfg = make_sized_config(1, 1, 1, DIM_HERE, 1, MOST);
                tkv_attend_params p;
                tkv_cache *kv;
                cfg.host.isa = isas[i];
                cfg.tiers.hot = pair_of(formats[f], formats[f]);
                cfg.tiers.hot_tokens = TKV_UNLIMITED;
                kv = create_cache(&cfg);
                for (j = 0; j < MOST * DIM_HERE; j++) v[j] = j % 2 ? 3e38f : -3e38f;
                CHECK_EQ(tkv_append(kv, 0, 0, k, v, counts[c]), TKV_OK);
                CHECK_EQ(tkv_attend(kv, 0, 0, q, 1, out), TKV_OK);
                for (j = 0; j < DIM_HERE; j++) CHECK(j % 2 ? out[j] > 3.4e38f : out[j] < -3.4e38f);
                memset(&p, 0, sizeof p);
                p.n = 1;
                p.q = q;
                p.out = out;
                CHECK_EQ(tkv_attend_reference(kv, &p), TKV_OK);
                for (j = 0; j < DIM_HERE; j++) CHECK(fabs((double)out[j]) < 3.1e38);
                tkv_destroy(kv);
            }
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(covering_array_of_cases);
    RUN(second_limb_rule);
    RUN(format_errors);
    RUN(sentences_of_refused_calls);
    RUN(reference_in_every_format);
    RUN(types_and_layouts);
    RUN(scale_softcap_alibi_sinks);
    RUN(masks);
    RUN(masks_of_other_types_and_cells);
    RUN(each_entry_of_a_batch_has_its_own_cells);
    RUN(trees);
    RUN(windows_and_non_causal);
    RUN(batches);
    RUN(everything_at_once);
    RUN(prefill);
    RUN(prefill_parameters);
    RUN(empty_cache);
    RUN(attend_equals_attend_ex);
    RUN(merge);
    RUN(merge_with_empty_parts);
    RUN(sinks_beyond_windows);
    RUN(layers_that_differ);
    RUN(extreme_queries);
    RUN(nonfinite_queries);
    RUN(large_logits_near_ties);
    RUN(large_keys_apart);
    RUN(equal_keys);
    RUN(bad_arguments);
    RUN(outlier_newest_key);
    RUN(unanswerable_calls_are_refused);
    RUN(mixed_tiers_share_attention_fairly);
    RUN(the_largest_values_do_not_overflow);
    RUN(larger_values_give_an_infinity);
    return tkv_test_end();
}
