/*
 * white_step.c - white-box test of src/step: random calls against a model that is plain arrays of floats.
 *
 * For each layer the model keeps every token as appended, every token as it must read now, and a list of blocks.
 * It follows the manual: which whole blocks move to the next tier and when, and which cuts are allowed. Blocks
 * wait until their layer has learned enough for a table. Coded values come from tkv_encode_block and
 * tkv_decode_block. Where heads share a layer's bytes, they come from the records of the table that the cache
 * made.
 *
 * After every call the cache must read as the model, to the bit, and pass its self-check. A call that runs out of
 * memory must have changed nothing.
 *
 *     TKV_RANDOM_OPS=100000 TKV_RANDOM_SEED=7 ./white_step     calls per config, first seed
 */
#include "white.h"
#include "kit.h"

enum { /* one enum: C++20 has doubts about sums of two */
       BLOCK = TKV_BLOCK_TOKENS,
       LONGEST = 1500,
       SEQS = 3,
       LAYERS = 3,
       KV_HEADS = 2,
       HEADS = 2 * KV_HEADS,
       DIM = 9,
       V_DIM = 4,
       K_ROW = KV_HEADS * DIM,
       V_ROW = KV_HEADS * V_DIM,
       BLOCKS = 2 * LONGEST
};

/* >>model */
typedef struct mblock {
    int start, tier, sink;
} mblock;

typedef struct mlayer {
    int own, sink, hot, warm, keep, margin, window, source; /* the plan, in tokens */
    tkv_format_pair pair[TKV_TIER_COUNT];
    int shared[TKV_TIER_COUNT], learns; /* needs a table; one of them does */
    int seen, made;                     /* tokens since it listens, -1: it does not; tables so far */
} mlayer;

typedef struct mlist {
    int len, first, n, step_len; /* blocks first .. n-1 are held */
    mblock block[BLOCKS];
    float k[LONGEST][K_ROW], v[LONGEST][V_ROW];         /* as it came, in the hot format */
    float k_now[LONGEST][K_ROW], v_now[LONGEST][V_ROW]; /* as it reads now */
} mlist;

static mlayer plan[LAYERS];
static mlist list[SEQS][LAYERS];
static int in_step[SEQS], group, max_append;
static float k_in[3 * LONGEST * K_ROW], v_in[3 * LONGEST * V_ROW], k_out[LONGEST * K_ROW],
    v_out[LONGEST * V_ROW];
static tkv_rng rng;
static counting_allocator memory;
static uint64_t seed;
static int op_number;
static const char *op_name;

#define OK(cond, ...) ok_((cond) ? 1 : 0, __LINE__, #cond, __VA_ARGS__)
TKV_TEST_PRINTF(4, 5)
static void ok_(int ok, int line, const char *what, const char *fmt, ...) {
    char text[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    tkv_test_msg_(ok, __FILE__, line, what, "seed %lu, call %d (%s): %s", (unsigned long)seed, op_number,
                  op_name, text);
}

static int block_end(const mlist *m, int i) { return i + 1 < m->n ? m->block[i + 1].start : m->len; }
static int dropped_of(const mlist *m) {
    return m->n > m->first ? m->block[m->first].start : m->first ? m->len : 0;
}

static tkv_cache *kv;

/* By the table that is used now; alone, the sides of a record know nothing of the cache. */
static void through_table(int layer, mlist *m, int tier, int start, int n) {
    static uint8_t bytes[64 * 1024];
#ifdef __FAST_MATH__ /* only there do vectors give other bytes */
    const tkvi_simd_ops *helpers = kv->kernels->simd_ops;
#else
    const tkvi_simd_ops *helpers = &tkvi_simd_ops_scalar;
#endif
    int h;
    for (h = 0; h < KV_HEADS; h++) {
        const tkvi_record *r =
            &kv->tables.layout[tkvi_layout_of(&kv->tables, layer, (tkv_tier)tier)].record[h];
        tkvi_side k = r->k;
        k.start = start;
        CHECK(r->k.bytes <= sizeof bytes && r->v.bytes <= sizeof bytes);
        tkvi_encode_side(&k, helpers, &m->k_now[start][h * DIM], K_ROW, n, bytes);
        tkvi_decode_side(&r->k, bytes, 0, n, &m->k_now[start][h * DIM], K_ROW);
        tkvi_encode_side(&r->v, helpers, &m->v_now[start][h * V_DIM], V_ROW, n, bytes);
        tkvi_decode_side(&r->v, bytes, 0, n, &m->v_now[start][h * V_DIM], V_ROW);
    }
}

static void through(const mlayer *p, mlist *m, int tier, int start, int n) {
    static uint8_t bytes[64 * 1024];
    int h;
    if (p->shared[tier]) {
        through_table((int)(p - plan), m, tier, start, n);
        return;
    }
    for (h = 0; h < KV_HEADS; h++) {
        tkv_codec c;
        memset(&c, 0, sizeof c);
        c.format = p->pair[tier].k;
        c.side = TKV_K;
        c.head_dim = DIM;
        c.options.group_size = group;
        CHECK_EQ(tkv_encode_block(&c, &m->k_now[start][h * DIM], K_ROW, n, bytes, sizeof bytes), TKV_OK);
        CHECK_EQ(tkv_decode_block(&c, bytes, sizeof bytes, n, &m->k_now[start][h * DIM], K_ROW), TKV_OK);
        c.format = p->pair[tier].v;
        c.side = TKV_V;
        c.head_dim = V_DIM;
        CHECK_EQ(tkv_encode_block(&c, &m->v_now[start][h * V_DIM], V_ROW, n, bytes, sizeof bytes), TKV_OK);
        CHECK_EQ(tkv_decode_block(&c, bytes, sizeof bytes, n, &m->v_now[start][h * V_DIM], V_ROW), TKV_OK);
    }
}

static int same_pair(tkv_format_pair a, tkv_format_pair b) { return a.k == b.k && a.v == b.v; }

/* A table comes when the layer has seen enough, or is asked to; not while a step is open in a sequence of the
 * call. */
static void learn(int layer, int forced) {
    mlayer *p = &plan[layer];
    int s, i, held = 0; /* what was seen may be gone */
    for (s = 0; s < SEQS; s++)
        for (i = list[s][layer].first; i < list[s][layer].n; i++) {
            const mblock *b = &list[s][layer].block[i];
            if (!b->sink && b->tier != TKV_TIER_ARCHIVE) held += block_end(&list[s][layer], i) - b->start;
        }
    forced = forced && !p->made;
    if (!p->learns || p->seen < (forced ? 1 : 512) || held < (forced ? 1 : BLOCK)) return;
    p->seen = -1;
    p->made++;
}

static void heard(int layer, int n) {
    mlayer *p = &plan[layer];
    if (p->learns && p->seen >= 0)
        p->seen = p->seen + n < TKVI_SECOND_TABLE_TOKENS ? p->seen + n : TKVI_SECOND_TABLE_TOKENS;
}

/* What is due at this length; `hot` is 0 in a flush, `partial` takes an unfinished block too. */
static void age(int seq, int layer, int hot, int partial) {
    const mlayer *p = &plan[layer];
    mlist *m = &list[seq][layer];
    int i;
    while (p->keep && m->first + 1 < m->n && block_end(m, m->first) + p->keep + p->margin <= m->len)
        m->first++;
    for (i = m->first; i < m->n; i++) {
        mblock *b = &m->block[i];
        int end = block_end(m, i), years = m->len - end, due;
        if (b->sink || b->tier == TKV_TIER_ARCHIVE) continue;
        if (b->tier == TKV_TIER_HOT && i + 1 == m->n && end - b->start < BLOCK && !partial) continue;
        due = years < hot ? TKV_TIER_HOT : years - hot < p->warm ? TKV_TIER_WARM : TKV_TIER_ARCHIVE;
        while (p->shared[due] && !p->made) due--;
        if (due <= b->tier) continue;
        if (!same_pair(p->pair[b->tier], p->pair[due])) through(p, m, due, b->start, end - b->start);
        b->tier = due;
    }
}

static float as_hot(tkv_format f, float x) {
    return f == TKV_F16    ? tkvi_f16_to_f32(tkvi_f32_to_f16(x))
           : f == TKV_BF16 ? tkvi_bf16_to_f32(tkvi_f32_to_bf16(x))
                           : x;
}

static void store(int seq, int layer, const float *k, const float *v, int n) {
    const mlayer *p = &plan[layer];
    mlist *m = &list[seq][layer];
    int t, i;
    if (n == 0) return;
    if (!in_step[seq]) age(seq, layer, p->hot, 0);
    for (t = 0; t < n; t++) {
        const mblock *last = m->n > m->first ? &m->block[m->n - 1] : NULL;
        if (!last || last->tier != TKV_TIER_HOT || m->len - last->start == (last->sink ? p->sink : BLOCK)) {
            mblock b;
            b.start = m->len;
            b.tier = TKV_TIER_HOT;
            b.sink = m->len == 0 && p->sink > 0;
            m->block[m->n++] = b;
        }
        for (i = 0; i < K_ROW; i++)
            m->k[m->len][i] = m->k_now[m->len][i] = as_hot(p->pair[0].k, k[t * K_ROW + i]);
        for (i = 0; i < V_ROW; i++)
            m->v[m->len][i] = m->v_now[m->len][i] = as_hot(p->pair[0].v, v[t * V_ROW + i]);
        m->len++;
    }
}

static void cut(int seq, int layer, int len) {
    mlist *m = &list[seq][layer];
    if (m->len <= len) return;
    while (m->n > m->first && m->block[m->n - 1].start >= len) m->n--;
    m->len = len;
}

/* First length that a cut may leave, not counting windows. */
static int coded_end(const mlist *m) {
    int i, must = 0;
    for (i = m->first; i < m->n; i++)
        if (m->block[i].tier != TKV_TIER_HOT) must = block_end(m, i);
    return must;
}

/* >>comparison */
static float bound_of(const mlayer *p, int tier, int side) {
    float sum = 0.01f;
    int t;
    for (t = TKV_TIER_WARM; t <= tier; t++) {
        tkv_format f = side ? p->pair[t].v : p->pair[t].k;
        /* half a step of the widest range; an exact format rounds; a channel may have no bits at all */
        if (tkvi_formats[f].shared || tkvi_is_kvquant(f)) sum += 9.0f;
        else if (f >= TKV_Q8) sum += 2.2f / (float)((1 << tkvi_formats[f].bits) - 1);
        else sum += f == TKV_BF16 ? 0.01f : 0.001f;
    }
    return sum;
}

static void compare(int seq, int layer) {
    const mlist *m = &list[seq][layer];
    const mlayer *p = &plan[layer];
    int from = dropped_of(m), n = m->len - from, i, t, c, tokens[3] = {0, 0, 0}, blocks[3] = {0, 0, 0};
    tkv_layer_info info;
    tkv_status st = tkv_read(kv, seq, layer, from, n, k_out, v_out);
    OK(st == TKV_OK, "read of %d from %d: %s", n, from, tkv_get_status_text(st));
    if (st) return;
    OK(n == 0 || memcmp(k_out, m->k_now[from], sizeof(float) * K_ROW * (size_t)n) == 0, "K of %d %d", seq,
       layer);
    OK(n == 0 || memcmp(v_out, m->v_now[from], sizeof(float) * V_ROW * (size_t)n) == 0, "V of %d %d", seq,
       layer);
    for (i = m->first; i < m->n; i++) {
        int tier = m->block[i].tier, end = block_end(m, i);
        float k_bound = bound_of(p, tier, 0), v_bound = bound_of(p, tier, 1), k_worst = 0, v_worst = 0;
        tokens[tier] += end - m->block[i].start;
        blocks[tier]++;
        if (tier == TKV_TIER_HOT) { /* as it came, to the bit */
            t = m->block[i].start;
            OK(memcmp(k_out + (t - from) * K_ROW, m->k[t], sizeof(float) * K_ROW * (size_t)(end - t)) == 0,
               "exact K at %d", t);
            OK(memcmp(v_out + (t - from) * V_ROW, m->v[t], sizeof(float) * V_ROW * (size_t)(end - t)) == 0,
               "exact V at %d", t);
            continue;
        }
        for (t = m->block[i].start; t < end; t++) {
            for (c = 0; c < K_ROW; c++) {
                float d = k_out[(t - from) * K_ROW + c] - m->k[t][c];
                k_worst = d > k_worst ? d : -d > k_worst ? -d : k_worst;
            }
            for (c = 0; c < V_ROW; c++) {
                float d = v_out[(t - from) * V_ROW + c] - m->v[t][c];
                v_worst = d > v_worst ? d : -d > v_worst ? -d : v_worst;
            }
        }
        OK(k_worst <= k_bound && v_worst <= v_bound, "block at %d: error %g of %g, %g of %g",
           m->block[i].start, (double)k_worst, (double)k_bound, (double)v_worst, (double)v_bound);
    }
    OK(tkv_get_layer(kv, seq, layer, &info) == TKV_OK, "%d", layer);
    OK(memcmp(info.tokens, tokens, sizeof tokens) == 0 && memcmp(info.blocks, blocks, sizeof blocks) == 0 &&
           info.expired == from,
       "tiers of sequence %d layer %d: %d %d %d tokens in %d %d %d blocks, %d dropped; not %d %d %d in %d %d "
       "%d, %d",
       seq, layer, info.tokens[0], info.tokens[1], info.tokens[2], info.blocks[0], info.blocks[1],
       info.blocks[2], info.expired, tokens[0], tokens[1], tokens[2], blocks[0], blocks[1], blocks[2], from);
    OK(tkv_get_length(kv, seq, layer) == m->len, "length %d", m->len);
}

/* Attention of the last n tokens from the model's numbers, in double. */
static void attend(int seq, int layer, int n) {
    static float q[4 * HEADS * DIM], out[4 * HEADS * V_DIM];
    const mlayer *p = &plan[layer];
    const mlist *m = &list[seq][p->source];
    double tolerance = 1e-5, weight[LONGEST];
    int i, h, j, c;
    tkv_status st;
    for (i = 0; i < 3; i++)
        if (p->pair[i].k >= TKV_Q8 || p->pair[i].v >= TKV_Q8)
            tolerance = 8e-3; /* 2e-3 of values up to 2, twice */
    tkv_rng_fill(&rng, q, sizeof q / sizeof *q, 1.0);
    st = tkv_attend(kv, seq, layer, q, n, out);
    OK(st == (n > m->len ? TKV_ERR_RANGE : TKV_OK), "%s", tkv_get_status_text(st));
    if (st) return;
    for (i = 0; i < n; i++)
        for (h = 0; h < HEADS; h++) {
            int kh = h / (HEADS / KV_HEADS), at = m->len - n + i, low = 0;
            double top = -1e300, sum = 0, o[V_DIM] = {0};
            if (p->window && at + 1 > p->window) low = at + 1 - p->window;
            if (low < dropped_of(m)) continue; /* an old query after the window went on */
            for (j = low; j <= at; j++) {
                weight[j] = 0;
                for (c = 0; c < DIM; c++)
                    weight[j] += (double)q[(i * HEADS + h) * DIM + c] * (double)m->k_now[j][kh * DIM + c];
                weight[j] /= 3.0; /* sqrt(DIM) */
                top = weight[j] > top ? weight[j] : top;
            }
            for (j = low; j <= at; j++) {
                double w = exp(weight[j] - top);
                sum += w;
                for (c = 0; c < V_DIM; c++) o[c] += w * (double)m->v_now[j][kh * V_DIM + c];
            }
            for (c = 0; c < V_DIM; c++) {
                double d = o[c] / sum - (double)out[(i * HEADS + h) * V_DIM + c];
                OK(d < tolerance && -d < tolerance, "row %d head %d: off by %g", i, h, d);
            }
        }
}

/* >>calls */
static int pick(int n) { return tkv_rng_below(&rng, n); }

static void fresh_rows(int n) {
    int i;
    for (i = 0; i < n * K_ROW; i++) k_in[i] = (float)tkv_rng_uniform(&rng) * 4.0f - 2.0f;
    for (i = 0; i < n * V_ROW; i++) v_in[i] = (float)tkv_rng_uniform(&rng) * 4.0f - 2.0f;
}

static int some_tokens(void) {
    int kind = pick(10);
    return kind < 5 ? 1 + pick(3) : kind < 8 ? 1 + pick(90) : 1 + pick(max_append);
}

static int own_layer(void) {
    int layer = pick(LAYERS);
    return plan[layer].own ? layer : 0;
}

static int step_room(int seq, int layer) {
    return max_append - (in_step[seq] ? list[seq][layer].len - list[seq][layer].step_len : 0);
}

static int model_len(int seq) { /* what every layer holds */
    int layer, len = LONGEST;
    for (layer = 0; layer < LAYERS; layer++)
        if (plan[layer].own && list[seq][layer].len < len) len = list[seq][layer].len;
    return len;
}

static void model_reset(int seq) {
    int layer;
    for (layer = 0; layer < LAYERS; layer++)
        list[seq][layer].len = list[seq][layer].n = list[seq][layer].first = 0;
    in_step[seq] = 0;
}

static tkv_status call_append(int seq, int layer, int n) {
    mlist *m = &list[seq][layer];
    tkv_status st;
    if (m->len + n > LONGEST) n = LONGEST - m->len;
    fresh_rows(n);
    if (n > 0 && n <= step_room(seq, layer) && !in_step[seq]) learn(layer, 0);
    st = tkv_append(kv, seq, layer, k_in, v_in, n);
    if (n > step_room(seq, layer)) OK(st == TKV_ERR_CAPACITY, "%s", tkv_get_status_text(st));
    else OK(st == TKV_OK || st == TKV_ERR_NOMEM, "%s", tkv_get_status_text(st));
    if (!st) store(seq, layer, k_in, v_in, n);
    if (!st) heard(layer, n);
    return st;
}

static tkv_status call_append_all(int seq) {
    int n = some_tokens(), layer;
    tkv_status st = TKV_OK;
    for (layer = 0; layer < LAYERS && !st; layer++)
        if (plan[layer].own) st = call_append(seq, layer, n);
    return st;
}

static tkv_status call_batch(void) {
    tkv_rows rows[SEQS];
    tkv_append_params p;
    int i, at = 0, full = 0, open = 0, total, first = pick(SEQS), n_rows = 1 + pick(SEQS);
    tkv_status st;
    memset(&p, 0, sizeof p);
    p.layer = own_layer();
    for (i = 0; i < n_rows; i++) {
        rows[i].seq = (first + i) % SEQS;
        rows[i].n = pick(4) ? some_tokens() : 0;
        if (list[rows[i].seq][p.layer].len + rows[i].n > LONGEST) rows[i].n = 0;
        full |= rows[i].n > step_room(rows[i].seq, p.layer);
        open |= in_step[rows[i].seq];
        at += rows[i].n;
    }
    total = at;
    fresh_rows(total);
    p.batch = rows;
    p.n_batch = n_rows;
    p.k = k_in;
    p.v = v_in;
    if (!full && total && !open) learn(p.layer, 0);
    st = tkv_append_ex(kv, &p);
    if (full) OK(st == TKV_ERR_CAPACITY, "%s", tkv_get_status_text(st));
    else OK(st == TKV_OK || st == TKV_ERR_NOMEM, "%s", tkv_get_status_text(st));
    for (i = at = 0; i < n_rows && !st; i++) {
        store(rows[i].seq, p.layer, k_in + at * K_ROW, v_in + at * V_ROW, rows[i].n);
        at += rows[i].n;
    }
    if (!st) heard(p.layer, total);
    return st;
}

static void learn_all(int seq, int forced) {
    int layer;
    for (layer = 0; layer < LAYERS && !in_step[seq]; layer++)
        if (plan[layer].own && list[seq][layer].n > list[seq][layer].first) learn(layer, forced);
}

static tkv_status call_begin(int seq) {
    int layer;
    tkv_status st;
    learn_all(seq, 0);
    st = tkv_seq_begin(kv, seq);
    if (in_step[seq]) OK(st == TKV_ERR_STATE, "%s", tkv_get_status_text(st));
    else OK(st == TKV_OK || st == TKV_ERR_NOMEM, "%s", tkv_get_status_text(st));
    if (st) return st;
    for (layer = 0; layer < LAYERS; layer++) {
        if (!plan[layer].own) continue;
        age(seq, layer, plan[layer].hot, 0);
        list[seq][layer].step_len = list[seq][layer].len;
    }
    in_step[seq] = 1;
    return st;
}

static tkv_status call_commit(int seq) {
    int layer, even = 1;
    tkv_status st = tkv_seq_commit(kv, seq);
    for (layer = 1; layer < LAYERS; layer++)
        if (plan[layer].own &&
            list[seq][layer].len - list[seq][layer].step_len != list[seq][0].len - list[seq][0].step_len)
            even = 0;
    OK(st == (in_step[seq] && even ? TKV_OK : TKV_ERR_STATE), "%s", tkv_get_status_text(st));
    if (!st) in_step[seq] = 0;
    return st;
}

static tkv_status call_abort(int seq) {
    int layer;
    tkv_status st = tkv_seq_abort(kv, seq);
    OK(st == (in_step[seq] ? TKV_OK : TKV_ERR_STATE), "%s", tkv_get_status_text(st));
    for (layer = 0; layer < LAYERS && !st; layer++) {
        const mlist *m = &list[seq][layer];
        if (!plan[layer].own) continue;
        if (plan[layer].seen > 0) {
            plan[layer].seen -= m->len - m->step_len;
            if (plan[layer].seen < 0) plan[layer].seen = 0;
        }
        cut(seq, layer, m->step_len);
    }
    in_step[seq] = 0;
    return st;
}

static tkv_status call_truncate(int seq) {
    int n = tkv_get_length(kv, seq, TKV_ALL_LAYERS) - (pick(3) ? pick(40) : pick(300)) + 2, layer, may = 1,
        must_not = 0;
    tkv_status st;
    if (n < 0) n = 0;
    st = tkv_seq_truncate(kv, seq, n);
    for (layer = 0; layer < LAYERS; layer++) {
        const mlist *m = &list[seq][layer];
        int gone = dropped_of(m);
        if (!plan[layer].own || m->len <= n) continue;
        if (n < coded_end(m)) must_not = 1;
        if (gone && n < gone + plan[layer].keep - 1) must_not = 1;
        if (gone && n < gone + plan[layer].keep) may = 0; /* the last key of the last token itself is gone */
    }
    if (in_step[seq]) OK(st == TKV_ERR_STATE, "%s", tkv_get_status_text(st));
    else if (must_not) OK(st == TKV_ERR_INEXACT, "%s to %d", tkv_get_status_text(st), n);
    else if (may) OK(st == TKV_OK, "%s to %d", tkv_get_status_text(st), n);
    for (layer = 0; layer < LAYERS && !st; layer++)
        if (plan[layer].own) cut(seq, layer, n);
    return st;
}

static tkv_status call_flush(int seq) {
    tkv_flush_mode mode = (tkv_flush_mode)pick(3);
    tkv_status st;
    int layer;
    learn_all(seq, mode != TKV_FLUSH_DUE);
    st = tkv_seq_flush(kv, seq, mode);
    if (in_step[seq]) OK(st == TKV_ERR_STATE, "%s", tkv_get_status_text(st));
    else OK(st == TKV_OK || st == TKV_ERR_NOMEM, "%s", tkv_get_status_text(st));
    for (layer = 0; layer < LAYERS && !st; layer++) {
        int exact = plan[layer].hot == 1 << 28; /* hot_tokens = TKV_UNLIMITED: nothing is ever coded */
        if (plan[layer].own)
            age(seq, layer, mode == TKV_FLUSH_DUE || exact ? plan[layer].hot : 0, mode == TKV_FLUSH_ALL);
    }
    return st;
}

/* Is there a version of this layer's table that no block has? */
static int version_free(int layer) {
    int used[TKVI_VERSIONS] = {0}, s, i, free_ones = 0;
    used[kv->tables.current_version[layer] < 0 ? 0 : kv->tables.current_version[layer]] =
        kv->tables.current_version[layer] >= 0;
    for (s = 0; s < SEQS; s++) {
        const tkvi_list *l = tkvi_list_of(kv, s, layer);
        for (i = 0; i < l->n; i++) {
            const tkvi_block *b = &kv->pool.block[tkvi_ids(kv, s, layer)[i]];
            const tkvi_plan *p = &kv->tables.plan[layer];
            int t;
            for (t = TKV_TIER_WARM; t < TKV_TIER_COUNT; t++)
                if (p->now.needs_table[t] && b->layout >= p->now.layout[t] &&
                    b->layout < p->now.layout[t] + TKVI_VERSIONS)
                    used[b->layout - p->now.layout[t]] = 1;
        }
    }
    for (i = 0; i < TKVI_VERSIONS; i++) free_ones += !used[i];
    return free_ones;
}

/* Learns anew, or gets back what it knows itself: another version with the same numbers. */
static tkv_status call_calibration(void) {
    static uint8_t saved[16 * 1024];
    size_t bytes = 0;
    int layer, open = 0, s, room = 1;
    tkv_status st;
    for (s = 0; s < SEQS; s++) open |= in_step[s];
    if (pick(2)) {
        st = tkv_refresh_calibration(kv);
        OK(st == (open ? TKV_ERR_STATE : TKV_OK), "%s", tkv_get_status_text(st));
        for (layer = 0; layer < LAYERS && !st; layer++)
            if (plan[layer].learns && plan[layer].seen < 0) plan[layer].seen = 0;
        return st;
    }
    CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &bytes), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++)
        if (plan[layer].learns && plan[layer].made) room &= version_free(layer) > 0;
    st = tkv_load_calibration(kv, saved, bytes);
    OK(st == (open ? TKV_ERR_STATE : room ? TKV_OK : TKV_ERR_CAPACITY), "%s", tkv_get_status_text(st));
    for (layer = 0; layer < LAYERS && !st; layer++)
        if (plan[layer].made) plan[layer].seen = -1;
    return st;
}

/* Reserves, and then takes it all while nothing can be allocated. */
static void call_reserve_and_use(int seq) {
    int n = some_tokens(), layer, goal = model_len(seq) + n, closed = memory.fail_at;
    tkv_status st;
    if (goal > LONGEST) return;
    if (in_step[seq]) call_abort(seq);
    goal = model_len(seq) + n;
    st = tkv_seq_reserve(kv, seq, n);
    OK(st == TKV_OK || st == TKV_ERR_NOMEM, "%s", tkv_get_status_text(st));
    if (st) return;
    memory.fail_at = 1;
    for (layer = 0; layer < LAYERS; layer++)
        while (plan[layer].own && list[seq][layer].len < goal) {
            int some = 1 + pick(goal - list[seq][layer].len);
            if (call_append(seq, layer, some)) {
                OK(0, "reserved to %d, failed at %d in layer %d", goal, list[seq][layer].len, layer);
                break;
            }
        }
    memory.fail_at = closed;
}

/* >>configs */
static tkv_config config_of(int kind, tkv_layer_config *layers) {
    static const tkv_format_pair a40_r40 = {TKV_A40, TKV_R40}, a25_r15 = {TKV_A25, TKV_R15};
    tkv_config cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    cfg.model.v_head_dim = V_DIM;
    cfg.limits.max_seqs = SEQS;
    cfg.host.precise = 1;
    cfg.host.isa = tkv_test_isa();
    cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4;
    cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    memset(layers, 0, LAYERS * sizeof *layers);
    if (kind == 1) { /* reads are exact all the time */
        cfg.tiers.hot.k = cfg.tiers.hot.v = cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k =
            cfg.tiers.archive.v = TKV_F32;
        cfg.model.window = 120;
    } else if (kind == 2) {
        cfg.tiers.sink_tokens = 10;
        cfg.tiers.hot_tokens = 30;
        cfg.tiers.warm_tokens = 100;
        cfg.format.group_size = 32;
        cfg.tiers.warm.v = TKV_Q8;
        cfg.tiers.archive.k = TKV_KIVI3;
    } else if (kind == 3) {
        cfg.layers = layers;
        layers[0].window = 70;
        layers[0].hot.v = TKV_BF16;
        layers[1].share_kv = 1;
        layers[1].window = 150;
        layers[2].hot_tokens = TKV_OFF;
        layers[2].sink_tokens = TKV_OFF;
        layers[2].warm_tokens = TKV_OFF;
    } else if (kind == 4) {
        cfg.tiers.hot_tokens = TKV_UNLIMITED;
        cfg.model.window = 1;
        cfg.tiers.sink_tokens = 64;
        cfg.limits.max_append = 100;
        cfg.tiers.warm.k = cfg.tiers.warm.v = cfg.tiers.archive.k = cfg.tiers.archive.v =
            TKV_KIVI4; /* one coding in two tiers */
    } else if (kind == 5) {
        cfg.tiers.warm = a40_r40;
        cfg.tiers.archive = a25_r15;
        cfg.tiers.warm_tokens = 200;
        cfg.tiers.sink_tokens = 1;
    } else if (kind == 6) {                           /* what waits where differs */
        cfg.tiers.warm = cfg.tiers.archive = a25_r15; /* one coding in two tiers */
        cfg.layers = layers;
        layers[0].window = 200;
        layers[1].warm.k = layers[1].warm.v = TKV_Q8;
        layers[1].hot_tokens = 20;
        layers[1].warm_tokens = 60;
        layers[2].archive.k = layers[2].archive.v = TKV_KIVI2;
        layers[2].sink_tokens = TKV_OFF;
    } else if (kind == 7) { /* tables of both kinds, in one layer and apart */
        cfg.tiers.archive.k = TKV_KVQUANT3;
        cfg.tiers.archive.v = TKV_KVQUANT2;
        cfg.model.rope.dim = DIM / 2 * 2;
        cfg.tiers.warm_tokens = 100;
        cfg.layers = layers;
        layers[0].window = 300;
        layers[1].warm.k = TKV_KVQUANT4;
        layers[1].warm.v = TKV_R40;
        layers[2].archive.k = TKV_A25;
    }
    if (kind == 2 || kind == 3 || kind == 6) { /* it must not be noticed */
        cfg.meter.heads = 4;
        cfg.meter.tokens = 192;
        cfg.meter.every = 1;
    }
    return cfg;
}

static int tokens_of(int layer, int cache, int standard) {
    int n = layer ? layer : cache ? cache : standard;
    return n == TKV_OFF ? 0 : n == TKV_UNLIMITED ? 1 << 28 : n;
}

static tkv_format format_of(tkv_format layer, tkv_format cache, tkv_format standard) {
    return layer ? layer : cache ? cache : standard;
}

static void model_of(const tkv_config *cfg, const tkv_layer_config *layers) {
    static const tkv_format standard[] = {TKV_F16, TKV_KIVI4, TKV_KIVI2};
    int i, t;
    group = cfg->format.group_size ? cfg->format.group_size : 64;
    max_append = cfg->limits.max_append ? cfg->limits.max_append : 512;
    for (i = 0; i < LAYERS; i++) {
        mlayer *p = &plan[i];
        const tkv_format_pair *of_cache[3], *of_layer[3];
        of_cache[0] = &cfg->tiers.hot;
        of_cache[1] = &cfg->tiers.warm;
        of_cache[2] = &cfg->tiers.archive;
        of_layer[0] = &layers[i].hot;
        of_layer[1] = &layers[i].warm;
        of_layer[2] = &layers[i].archive;
        p->own = layers[i].share_kv == 0;
        p->source = p->own ? i : layers[i].share_kv - 1;
        p->sink = tokens_of(layers[i].sink_tokens, cfg->tiers.sink_tokens, 4);
        p->hot = tokens_of(layers[i].hot_tokens, cfg->tiers.hot_tokens, 64);
        p->warm = tokens_of(layers[i].warm_tokens, cfg->tiers.warm_tokens, 448);
        p->window = p->keep = tokens_of(layers[i].window, cfg->model.window, TKV_OFF);
        p->margin = p->hot == 1 << 28 ? BLOCK : p->hot;
        for (t = 0; t < 3; t++) {
            p->pair[t].k = format_of(of_layer[t]->k, of_cache[t]->k, standard[t]);
            p->pair[t].v = format_of(of_layer[t]->v, of_cache[t]->v, standard[t]);
            p->shared[t] = tkvi_formats[p->pair[t].k].shared || tkvi_formats[p->pair[t].v].shared ||
                           tkvi_is_kvquant(p->pair[t].k) || tkvi_is_kvquant(p->pair[t].v);
        }
        p->learns = p->own && (p->shared[TKV_TIER_WARM] || p->shared[TKV_TIER_ARCHIVE]);
        p->seen = p->made = 0;
    }
    for (i = 0; i < LAYERS; i++) {
        mlayer *source = &plan[plan[i].source];
        if (plan[i].own) continue;
        source->keep = !source->keep || !plan[i].window ? 0
                       : source->keep > plan[i].window  ? source->keep
                                                        : plan[i].window;
    }
    for (i = 0; i < SEQS; i++) model_reset(i);
}

static int number_from(const char *name, int standard) {
    const char *s = getenv(name);
    return s && *s ? atoi(s) : standard;
}

static void play(int kind) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = config_of(kind, layers);
    int ops = number_from("TKV_RANDOM_OPS", tkv_test_quick() ? 500 : 6000), s, l;
    const char *s_env = getenv("TKV_RANDOM_SEED");
    seed = (uint64_t)(unsigned)number_from("TKV_RANDOM_SEED", 1) +
           (s_env && *s_env ? 0u : (unsigned)kind * 1000u);
    rng = tkv_rng_seed(seed);
    cfg.host.allocator = counting_allocator_of(&memory);
    model_of(&cfg, layers);
    op_number = 0;
    op_name = "create";
    kv = NULL;
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    if (!kv) return;
    for (op_number = 1; op_number <= ops && tkv_test_.n_bad < 5; op_number++) {
        int seq = pick(SEQS), op = pick(100), mutates = 1;
        char reason[160];
        tkv_memory_info m;
        tkv_status st = TKV_OK;
        memory.fail_at = pick(4) ? 0 : 1 + pick(6);
        if (op < 34) op_name = "append to a layer", st = call_append(seq, own_layer(), some_tokens());
        else if (op < 54) op_name = "append to all layers", st = call_append_all(seq);
        else if (op < 64) op_name = "batch", st = call_batch();
        else if (op < 69) op_name = "begin", st = call_begin(seq);
        else if (op < 73) op_name = "commit", st = call_commit(seq);
        else if (op < 76) op_name = "abort", st = call_abort(seq);
        else if (op < 84) op_name = "truncate", st = call_truncate(seq);
        else if (op < 88) op_name = "flush", st = call_flush(seq);
        else if (op < 91) op_name = "reserve and use", call_reserve_and_use(seq), mutates = 0;
        else if (op == 91 && pick(2)) op_name = "refresh or load", st = call_calibration();
        else if (op < 93) {
            op_name = "reserve";
            st = tkv_seq_reserve(kv, seq, some_tokens());
            OK(st == TKV_OK || st == TKV_ERR_NOMEM, "%s", tkv_get_status_text(st));
        } else if (op < 95 || list[seq][0].len > LONGEST - 100 || list[seq][LAYERS - 1].len > LONGEST - 100) {
            op_name = "reset";
            st = tkv_seq_reset(kv, seq);
            OK(st == TKV_OK, "%s", tkv_get_status_text(st));
            model_reset(seq);
        } else {
            op_name = "attend";
            memory.fail_at = 1;
            attend(seq, pick(LAYERS), pick(5));
            mutates = 0;
        }
        memory.fail_at = 0;
        if (mutates) OK((st == TKV_OK) == (tkv_get_last_error(kv)[0] == 0), "\"%s\"", tkv_get_last_error(kv));
        st = tkv_check(kv, reason, sizeof reason);
        OK(st == TKV_OK, "%s", reason);
        OK(tkv_get_memory(kv, &m) == TKV_OK && m.total == memory.held, "%lu held",
           (unsigned long)memory.held);
        OK(tkv_get_length(kv, seq, TKV_ALL_LAYERS) == model_len(seq), "%d",
           tkv_get_length(kv, seq, TKV_ALL_LAYERS));
        for (l = 0; l < LAYERS; l++)
            OK((kv->tables.current_version[l] >= 0) == (plan[l].made > 0), "layer %d has %d tables", l,
               plan[l].made);
        for (s = 0; s < SEQS; s++)
            for (l = 0; l < LAYERS; l++)
                if (plan[l].own && (s == seq || op_number % 16 == 0 || op_number == ops)) compare(s, l);
    }
    tkv_destroy(kv);
    CHECK_EQ(memory.held, 0);
    if (tkv_test_.n_bad) printf("    again: TKV_RANDOM_SEED=%lu\n", (unsigned long)seed);
}

TEST(default_plan) { play(0); }
TEST(exact_with_a_window) { play(1); }
TEST(odd_lengths) { play(2); }
TEST(layers_that_differ) { play(3); }
TEST(exact_tail_and_a_window_of_one) { play(4); }
TEST(allocated_and_rotated) { play(5); }
TEST(shared_layers_that_differ) { play(6); }
TEST(kvquant_and_shared) { play(7); }

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(default_plan);
    RUN(exact_with_a_window);
    RUN(odd_lengths);
    RUN(layers_that_differ);
    RUN(exact_tail_and_a_window_of_one);
    RUN(allocated_and_rotated);
    RUN(shared_layers_that_differ);
    RUN(kvquant_and_shared);
    return tkv_test_end();
}
