/*
 * white_step.c - white-box test of src/step: random calls against a model that is plain arrays of floats.
 *
 * For each layer the model keeps every token as appended, every token as it must read now, and a list of blocks.
 * It follows the manual: which whole blocks move to the next tier and when, and which truncations are allowed. Blocks
 * wait until their layer has learned enough for a table. Decoded values come from tkv_encode_block and
 * tkv_decode_block. If heads share the bytes of a layer, they come from the records of the table that the cache made.
 *
 * After every call the cache must read as the model, to the bit, and pass its self-check. A call that runs out of
 * memory must have changed nothing.
 *
 *     TKV_RANDOM_OPS=100000 TKV_RANDOM_SEED=7 ./white_step     calls per config, first seed
 */
#include "white.h"
#include "kit.h"

enum { /* one enum: C++20 warns about arithmetic with two */
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
typedef struct model_block {
    int start, tier, sink;
    int version,
        seen_tier; /* of the table that codes it, at the last comparison; -1: none; and its tier then */
} model_block;

typedef struct model_layer {
    int own, source; /* own: the layer stores K and V; source: the layer that it reads */
    int sink, hot, warm, keep, margin, window; /* the plan, in tokens */
    tkv_format_pair pair[TKV_TIER_COUNT];
    int needs_table[TKV_TIER_COUNT], learns; /* learns: a tier needs a table */
    int delay;                               /* tokens by which the first table is delayed */
    int n_seen, n_tables;                    /* tokens seen, or -1: the layer collects nothing; tables made */
    int n_loaded;                            /* tables loaded */
    int due;                                 /* n_seen at which the next table is due */
} model_layer;

typedef struct model_list {
    int len, first, n, step_len; /* blocks first .. n-1 are held */
    int chunk_start;             /* length before the last append or step */
    int n_tables, table;         /* at the last comparison: made and loaded, version of the current one */
    model_block block[BLOCKS];
    float k[LONGEST][K_ROW], v[LONGEST][V_ROW];           /* as appended, in the hot format */
    float k_read[LONGEST][K_ROW], v_read[LONGEST][V_ROW]; /* as tkv_read must return it */
} model_list;

static model_layer plan[LAYERS];
static model_list list[SEQS][LAYERS];
static int in_step[SEQS], group, max_append;
static float k_in[3 * LONGEST * K_ROW], v_in[3 * LONGEST * V_ROW], k_out[LONGEST * K_ROW],
    v_out[LONGEST * V_ROW];
static tkv_rng rng;
static counting_allocator memory;
static uint64_t seed;
static int op_number;
static const char *op_name;

#define CHECK_CALL(cond, ...) check_call((cond) ? 1 : 0, __LINE__, #cond, __VA_ARGS__)
TKV_TEST_PRINTF(4, 5)
static void check_call(int ok, int line, const char *what, const char *fmt, ...) {
    char text[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    tkv_test_msg_(ok, __FILE__, line, what, "seed %lu, call %d (%s): %s", (unsigned long)seed, op_number,
                  op_name, text);
}

static int block_end(const model_list *m, int i) { return i + 1 < m->n ? m->block[i + 1].start : m->len; }
static int expired_of(const model_list *m) {
    return m->n > m->first ? m->block[m->first].start : m->first ? m->len : 0;
}

static tkv_cache *kv;

/* Encodes and decodes tokens with the current table of the layer. */
static void recode_with_table(int layer, model_list *m, int tier, int start, int n) {
    static uint8_t bytes[64 * 1024];
#ifdef __FAST_MATH__ /* vector code may give other bytes */
    const tkvi_simd_ops *ops = kv->kernels->simd_ops;
#else
    const tkvi_simd_ops *ops = &tkvi_simd_ops_scalar;
#endif
    int h;
    for (h = 0; h < KV_HEADS; h++) {
        const tkvi_record *r =
            &kv->tables.layout[tkvi_layout_of(&kv->tables, layer, (tkv_tier)tier)].record[h];
        tkvi_side k = r->k;
        k.start = start;
        CHECK(r->k.bytes <= sizeof bytes && r->v.bytes <= sizeof bytes);
        tkvi_encode_side(&k, ops, &m->k_read[start][h * DIM], K_ROW, n, bytes);
        tkvi_decode_side(&r->k, bytes, 0, n, &m->k_read[start][h * DIM], K_ROW);
        tkvi_encode_side(&r->v, ops, &m->v_read[start][h * V_DIM], V_ROW, n, bytes);
        tkvi_decode_side(&r->v, bytes, 0, n, &m->v_read[start][h * V_DIM], V_ROW);
    }
}

static void recode(const model_layer *p, model_list *m, int tier, int start, int n) {
    static uint8_t bytes[64 * 1024];
    int h;
    if (p->needs_table[tier]) {
        recode_with_table((int)(p - plan), m, tier, start, n);
        return;
    }
    for (h = 0; h < KV_HEADS; h++) {
        tkv_codec c;
        memset(&c, 0, sizeof c);
        c.format = p->pair[tier].k;
        c.side = TKV_K;
        c.head_dim = DIM;
        c.options.group_size = group;
        CHECK_EQ(tkv_encode_block(&c, &m->k_read[start][h * DIM], K_ROW, n, bytes, sizeof bytes), TKV_OK);
        CHECK_EQ(tkv_decode_block(&c, bytes, sizeof bytes, n, &m->k_read[start][h * DIM], K_ROW), TKV_OK);
        c.format = p->pair[tier].v;
        c.side = TKV_V;
        c.head_dim = V_DIM;
        CHECK_EQ(tkv_encode_block(&c, &m->v_read[start][h * V_DIM], V_ROW, n, bytes, sizeof bytes), TKV_OK);
        CHECK_EQ(tkv_decode_block(&c, bytes, sizeof bytes, n, &m->v_read[start][h * V_DIM], V_ROW), TKV_OK);
    }
}

static int is_same_pair(tkv_format_pair a, tkv_format_pair b) { return a.k == b.k && a.v == b.v; }

/* Makes a table if the layer has seen enough tokens, before n more. n 0: forced, makes the first one from any tokens.
 * Callers must not call it for a sequence with an open step. */
static void make_table_if_due(int layer, int n) {
    model_layer *p = &plan[layer];
    int s, i, forced = n == 0 && !p->n_tables,
              n_held = 0; /* tokens that were seen may be evicted or expired */
    for (s = 0; s < SEQS; s++)
        for (i = list[s][layer].first; i < list[s][layer].n; i++) {
            const model_block *b = &list[s][layer].block[i];
            if (!b->sink && b->tier != TKV_TIER_ARCHIVE) n_held += block_end(&list[s][layer], i) - b->start;
        }
    if (!p->learns || p->n_seen < (forced ? 1 : p->due) || n_held < (forced ? 1 : BLOCK)) return;
    if (!forced && p->n_seen + n <= p->due + p->delay) return; /* layers take turns */
    while (p->due <= p->n_seen) p->due *= 2;
    p->n_tables++;
}

static void count_seen(int layer, int n) {
    model_layer *p = &plan[layer];
    if (p->learns && p->n_seen >= 0) p->n_seen += n;
}

/* 1 if the cache has demoted as many blocks of a list as the model. */
static int has_demoted_as_many(int seq, int layer) {
    const model_list *m = &list[seq][layer];
    const tkvi_list *l = tkvi_list_of(kv, seq, layer);
    int i, n[TKV_TIER_COUNT] = {0};
    for (i = m->first; i < m->n; i++) n[m->block[i].tier]++;
    return n[TKV_TIER_WARM] == l->warm && n[TKV_TIER_ARCHIVE] == l->archive;
}

/* Expires blocks, and demotes those that are due, the oldest first: `least` of them, more if the cache did. hot: 0 in
 * a flush. partial: 1 demotes an unfinished block, too. */
static void demote_due(int seq, int layer, int hot, int partial, int least) {
    const model_layer *p = &plan[layer];
    model_list *m = &list[seq][layer];
    int i, demoted = 0;
    while (p->keep && m->first + 1 < m->n && block_end(m, m->first) + p->keep + p->margin <= m->len)
        m->first++;
    for (i = m->first; i < m->n; i++) {
        model_block *b = &m->block[i];
        int end = block_end(m, i), age = m->len - end, due;
        if (b->sink || b->tier == TKV_TIER_ARCHIVE) continue;
        if (b->tier == TKV_TIER_HOT && i + 1 == m->n && end - b->start < BLOCK && !partial) continue;
        due = age < hot ? TKV_TIER_HOT : age - hot < p->warm ? TKV_TIER_WARM : TKV_TIER_ARCHIVE;
        while (p->needs_table[due] && !p->n_tables) due--;
        if (due <= b->tier) continue;
        if (demoted >= least && has_demoted_as_many(seq, layer)) return; /* later appends demote the others */
        demoted++;
        if (!is_same_pair(p->pair[b->tier], p->pair[due])) recode(p, m, due, b->start, end - b->start);
        b->tier = due;
    }
}

static float round_to_hot(tkv_format f, float x) {
    return f == TKV_F16    ? tkvi_f16_to_f32(tkvi_f32_to_f16(x))
           : f == TKV_BF16 ? tkvi_bf16_to_f32(tkvi_f32_to_bf16(x))
                           : x;
}

static void append_to_model(int seq, int layer, const float *k, const float *v, int n) {
    const model_layer *p = &plan[layer];
    model_list *m = &list[seq][layer];
    int t, i;
    if (n == 0) return;
    if (!in_step[seq]) {
        demote_due(seq, layer, p->hot, 0, 2 + (m->len - m->chunk_start + n) / 16);
        m->chunk_start = m->len;
    }
    for (t = 0; t < n; t++) {
        const model_block *last = m->n > m->first ? &m->block[m->n - 1] : NULL;
        if (!last || last->tier != TKV_TIER_HOT || m->len - last->start == (last->sink ? p->sink : BLOCK)) {
            model_block b;
            b.start = m->len;
            b.version = -1;
            b.seen_tier = TKV_TIER_HOT;
            b.tier = TKV_TIER_HOT;
            b.sink = m->len == 0 && p->sink > 0;
            m->block[m->n++] = b;
        }
        for (i = 0; i < K_ROW; i++)
            m->k[m->len][i] = m->k_read[m->len][i] = round_to_hot(p->pair[0].k, k[t * K_ROW + i]);
        for (i = 0; i < V_ROW; i++)
            m->v[m->len][i] = m->v_read[m->len][i] = round_to_hot(p->pair[0].v, v[t * V_ROW + i]);
        m->len++;
    }
}

static void truncate_model(int seq, int layer, int len) {
    model_list *m = &list[seq][layer];
    if (m->len <= len) return;
    while (m->n > m->first && m->block[m->n - 1].start >= len) m->n--;
    m->len = len;
    if (m->chunk_start > len) m->chunk_start = len;
}

/* >>comparison */
static float error_bound(const model_layer *p, int tier, int side) {
    float sum = 0.01f;
    int t;
    for (t = TKV_TIER_WARM; t <= tier; t++) {
        tkv_format f = side ? p->pair[t].v : p->pair[t].k;
        /* half a step of the widest range; exact formats round; a channel may have no bits */
        if (tkvi_formats[f].shared || tkvi_formats[f].family->learn_tokens) sum += 9.0f;
        else if (f >= TKV_Q8) sum += 2.2f / (float)((1 << tkvi_formats[f].bits) - 1);
        else sum += f == TKV_BF16 ? 0.01f : 0.001f;
    }
    return sum;
}

/* 1 if blocks of this layer have the version of a table. */
static int is_version_used(int layer, int version) {
    int s, i, is_used = 0;
    for (s = 0; s < SEQS; s++)
        for (i = 0; i < tkvi_list_of(kv, s, layer)->n; i++)
            is_used |= tkvi_version_of(kv, tkvi_block_of(kv, tkvi_ids(kv, s, layer)[i])->layout) == version;
    return is_used;
}

/* A new table can take the version of old blocks, which are then coded again (reclaim/versions.h). Takes the values of
 * blocks that have another version than at the last comparison, in the same tier, from the cache. If a table was made
 * since then, takes those of all blocks that were coded before it. Their errors are checked below. */
static void take_recoded(int seq, int layer, int from) {
    model_list *m = &list[seq][layer];
    const int n_tables = plan[layer].n_tables + plan[layer].n_loaded,
              current = kv->tables.current_version[layer],
              has_new_table = n_tables != m->n_tables || current != m->table;
    int i, t;
    m->n_tables = n_tables;
    m->table = current;
    for (i = m->first; i < m->n; i++) {
        model_block *b = &m->block[i];
        const int version =
            tkvi_version_of(kv, tkvi_block_of(kv, tkvi_ids(kv, seq, layer)[i - m->first])->layout);
        const int was_coded = b->version >= 0 || (version >= 0 && version != current);
        const int is_recoded =
            was_coded && (has_new_table || (b->version != version && b->seen_tier == b->tier));
        for (t = b->start; t < block_end(m, i) && is_recoded; t++) {
            memcpy(m->k_read[t], k_out + (t - from) * K_ROW, sizeof m->k_read[t]);
            memcpy(m->v_read[t], v_out + (t - from) * V_ROW, sizeof m->v_read[t]);
        }
        b->version = version;
        b->seen_tier = b->tier;
    }
}

static void compare_with_model(int seq, int layer) {
    const model_list *m = &list[seq][layer];
    const model_layer *p = &plan[layer];
    int from = expired_of(m), n = m->len - from, i, t, c, tokens[3] = {0, 0, 0}, blocks[3] = {0, 0, 0};
    tkv_layer_info info;
    tkv_status st = tkv_read(kv, seq, layer, from, n, k_out, v_out);
    CHECK_CALL(st == TKV_OK, "read of %d from %d: %s", n, from, tkv_get_status_text(st));
    if (st) return;
    take_recoded(seq, layer, from);
    CHECK_CALL(n == 0 || memcmp(k_out, m->k_read[from], sizeof(float) * K_ROW * (size_t)n) == 0, "K of %d %d",
               seq, layer);
    CHECK_CALL(n == 0 || memcmp(v_out, m->v_read[from], sizeof(float) * V_ROW * (size_t)n) == 0, "V of %d %d",
               seq, layer);
    for (i = m->first; i < m->n; i++) {
        int tier = m->block[i].tier, end = block_end(m, i);
        float k_bound = error_bound(p, tier, 0), v_bound = error_bound(p, tier, 1), k_worst = 0, v_worst = 0;
        tokens[tier] += end - m->block[i].start;
        blocks[tier]++;
        if (tier == TKV_TIER_HOT) { /* as appended, to the bit */
            t = m->block[i].start;
            CHECK_CALL(
                memcmp(k_out + (t - from) * K_ROW, m->k[t], sizeof(float) * K_ROW * (size_t)(end - t)) == 0,
                "exact K at %d", t);
            CHECK_CALL(
                memcmp(v_out + (t - from) * V_ROW, m->v[t], sizeof(float) * V_ROW * (size_t)(end - t)) == 0,
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
        CHECK_CALL(k_worst <= k_bound && v_worst <= v_bound, "block at %d: error %g of %g, %g of %g",
                   m->block[i].start, (double)k_worst, (double)k_bound, (double)v_worst, (double)v_bound);
    }
    CHECK_CALL(tkv_get_layer(kv, seq, layer, &info) == TKV_OK, "%d", layer);
    CHECK_CALL(memcmp(info.tokens, tokens, sizeof tokens) == 0 &&
                   memcmp(info.blocks, blocks, sizeof blocks) == 0 && info.expired == from,
               "tiers of sequence %d layer %d: %d %d %d tokens in %d %d %d blocks, %d expired; not %d %d %d "
               "in %d %d "
               "%d, %d",
               seq, layer, info.tokens[0], info.tokens[1], info.tokens[2], info.blocks[0], info.blocks[1],
               info.blocks[2], info.expired, tokens[0], tokens[1], tokens[2], blocks[0], blocks[1], blocks[2],
               from);
    CHECK_CALL(tkv_get_length(kv, seq, layer) == m->len, "length %d", m->len);
}

/* Compares attention of the last n tokens with a computation in double from the model. */
static void check_attention(int seq, int layer, int n) {
    static float q[4 * HEADS * DIM], out[4 * HEADS * V_DIM];
    const model_layer *p = &plan[layer];
    const model_list *m = &list[seq][p->source];
    double tolerance = 1e-5, weight[LONGEST];
    int i, h, j, c, is_old;
    tkv_status st;
    for (i = 0; i < 3; i++)
        if (p->pair[i].k >= TKV_Q8 || p->pair[i].v >= TKV_Q8)
            tolerance = 8e-3; /* 2e-3 of values up to 2, twice */
    tkv_rng_fill(&rng, q, sizeof q / sizeof *q, 1.0);
    st = tkv_attend(kv, seq, layer, q, n, out);
    /* after a truncation, the window of an older query can reach expired tokens */
    is_old = n && p->window && expired_of(m) > 0 && m->len - n + 1 - p->window < expired_of(m);
    CHECK_CALL(st == (n > m->len || is_old ? TKV_ERR_RANGE : TKV_OK), "%s", tkv_get_status_text(st));
    if (st) return;
    for (i = 0; i < n; i++)
        for (h = 0; h < HEADS; h++) {
            int kh = h / (HEADS / KV_HEADS), at = m->len - n + i, low = 0;
            double top = -1e300, sum = 0, o[V_DIM] = {0};
            if (p->window && at + 1 > p->window) low = at + 1 - p->window;
            for (j = low; j <= at; j++) {
                weight[j] = 0;
                for (c = 0; c < DIM; c++)
                    weight[j] += (double)q[(i * HEADS + h) * DIM + c] * (double)m->k_read[j][kh * DIM + c];
                weight[j] /= 3.0; /* sqrt(DIM) */
                top = weight[j] > top ? weight[j] : top;
            }
            for (j = low; j <= at; j++) {
                double w = exp(weight[j] - top);
                sum += w;
                for (c = 0; c < V_DIM; c++) o[c] += w * (double)m->v_read[j][kh * V_DIM + c];
            }
            for (c = 0; c < V_DIM; c++) {
                double d = o[c] / sum - (double)out[(i * HEADS + h) * V_DIM + c];
                CHECK_CALL(d < tolerance && -d < tolerance, "row %d head %d: off by %g", i, h, d);
            }
        }
}

/* >>calls */
static int rand_below(int n) { return tkv_rng_below(&rng, n); }

static void fill_random_rows(int n) {
    int i;
    for (i = 0; i < n * K_ROW; i++) k_in[i] = (float)tkv_rng_uniform(&rng) * 4.0f - 2.0f;
    for (i = 0; i < n * V_ROW; i++) v_in[i] = (float)tkv_rng_uniform(&rng) * 4.0f - 2.0f;
}

static int random_n_tokens(void) {
    int kind = rand_below(10);
    return kind < 5 ? 1 + rand_below(3) : kind < 8 ? 1 + rand_below(90) : 1 + rand_below(max_append);
}

static int random_own_layer(void) {
    int layer = rand_below(LAYERS);
    return plan[layer].own ? layer : 0;
}

static int n_free_step_tokens(int seq, int layer) {
    return max_append - (in_step[seq] ? list[seq][layer].len - list[seq][layer].step_len : 0);
}

static int model_length(int seq) { /* the length that all layers have */
    int layer, len = LONGEST;
    for (layer = 0; layer < LAYERS; layer++)
        if (plan[layer].own && list[seq][layer].len < len) len = list[seq][layer].len;
    return len;
}

static void reset_model(int seq) {
    int layer;
    for (layer = 0; layer < LAYERS; layer++)
        list[seq][layer].len = list[seq][layer].n = list[seq][layer].first = 0;
    in_step[seq] = 0;
}

/* After a call that failed: 1 if it got no memory. Checks that no length changed, and lets memory be allocated. Blocks
 * may be recoded by then, but the same call again ends in the state of a call that did not fail. */
static int is_to_repeat(int seq, tkv_status st) {
    int layer;
    if (st != TKV_ERR_NOMEM) return 0;
    for (layer = 0; layer < LAYERS; layer++)
        if (plan[layer].own)
            CHECK_CALL(tkv_get_length(kv, seq, layer) == list[seq][layer].len, "%d",
                       tkv_get_length(kv, seq, layer));
    memory.fail_at = 0;
    return 1;
}

static tkv_status call_append(int seq, int layer, int n) {
    model_list *m = &list[seq][layer];
    tkv_status st;
    if (m->len + n > LONGEST) n = LONGEST - m->len;
    fill_random_rows(n);
    if (n > 0 && n <= n_free_step_tokens(seq, layer) && !in_step[seq]) make_table_if_due(layer, n);
    st = tkv_append(kv, seq, layer, k_in, v_in, n);
    if (is_to_repeat(seq, st)) st = tkv_append(kv, seq, layer, k_in, v_in, n);
    if (n > n_free_step_tokens(seq, layer)) CHECK_CALL(st == TKV_ERR_CAPACITY, "%s", tkv_get_status_text(st));
    else CHECK_CALL(st == TKV_OK, "%s", tkv_get_status_text(st));
    if (!st) append_to_model(seq, layer, k_in, v_in, n);
    if (!st) count_seen(layer, n);
    return st;
}

static tkv_status call_append_all(int seq) {
    int n = random_n_tokens(), layer;
    tkv_status st = TKV_OK;
    for (layer = 0; layer < LAYERS && !st; layer++)
        if (plan[layer].own) st = call_append(seq, layer, n);
    return st;
}

static tkv_status call_batch(void) {
    tkv_rows rows[SEQS];
    tkv_append_params p;
    int i, at = 0, over_capacity = 0, any_open = 0, total, first = rand_below(SEQS),
           n_rows = 1 + rand_below(SEQS);
    tkv_status st;
    memset(&p, 0, sizeof p);
    p.layer = random_own_layer();
    for (i = 0; i < n_rows; i++) {
        rows[i].seq = (first + i) % SEQS;
        rows[i].n = rand_below(4) ? random_n_tokens() : 0;
        if (list[rows[i].seq][p.layer].len + rows[i].n > LONGEST) rows[i].n = 0;
        over_capacity |= rows[i].n > n_free_step_tokens(rows[i].seq, p.layer);
        any_open |= in_step[rows[i].seq];
        at += rows[i].n;
    }
    total = at;
    fill_random_rows(total);
    p.batch = rows;
    p.n_batch = n_rows;
    p.k = k_in;
    p.v = v_in;
    if (!over_capacity && total && !any_open) make_table_if_due(p.layer, total);
    st = tkv_append_ex(kv, &p);
    if (is_to_repeat(rows[0].seq, st)) st = tkv_append_ex(kv, &p);
    if (over_capacity) CHECK_CALL(st == TKV_ERR_CAPACITY, "%s", tkv_get_status_text(st));
    else CHECK_CALL(st == TKV_OK, "%s", tkv_get_status_text(st));
    for (i = at = 0; i < n_rows && !st; i++) {
        append_to_model(rows[i].seq, p.layer, k_in + at * K_ROW, v_in + at * V_ROW, rows[i].n);
        at += rows[i].n;
    }
    if (!st) count_seen(p.layer, total);
    return st;
}

static int last_chunk(const model_list *m) { return m->len > m->chunk_start ? m->len - m->chunk_start : 1; }

static void make_due_tables(int seq, int forced) {
    int layer;
    for (layer = 0; layer < LAYERS && !in_step[seq]; layer++)
        if (plan[layer].own && list[seq][layer].n > list[seq][layer].first)
            make_table_if_due(layer, forced ? 0 : last_chunk(&list[seq][layer]));
}

static tkv_status call_begin(int seq) {
    int layer;
    tkv_status st;
    make_due_tables(seq, 0);
    st = tkv_seq_begin(kv, seq);
    if (is_to_repeat(seq, st)) st = tkv_seq_begin(kv, seq);
    if (in_step[seq]) CHECK_CALL(st == TKV_ERR_STATE, "%s", tkv_get_status_text(st));
    else CHECK_CALL(st == TKV_OK, "%s", tkv_get_status_text(st));
    if (st) return st;
    for (layer = 0; layer < LAYERS; layer++) {
        model_list *m = &list[seq][layer];
        if (!plan[layer].own) continue;
        demote_due(seq, layer, plan[layer].hot, 0, 2 + (m->len - m->chunk_start + last_chunk(m)) / 16);
        m->step_len = m->chunk_start = m->len;
    }
    in_step[seq] = 1;
    return st;
}

static tkv_status call_commit(int seq) {
    int layer, same_lengths = 1;
    tkv_status st = tkv_seq_commit(kv, seq);
    for (layer = 1; layer < LAYERS; layer++)
        if (plan[layer].own &&
            list[seq][layer].len - list[seq][layer].step_len != list[seq][0].len - list[seq][0].step_len)
            same_lengths = 0;
    CHECK_CALL(st == (in_step[seq] && same_lengths ? TKV_OK : TKV_ERR_STATE), "%s", tkv_get_status_text(st));
    if (!st) in_step[seq] = 0;
    return st;
}

static tkv_status call_abort(int seq) {
    int layer;
    tkv_status st = tkv_seq_abort(kv, seq);
    CHECK_CALL(st == (in_step[seq] ? TKV_OK : TKV_ERR_STATE), "%s", tkv_get_status_text(st));
    for (layer = 0; layer < LAYERS && !st; layer++) {
        const model_list *m = &list[seq][layer];
        if (!plan[layer].own) continue;
        if (plan[layer].n_seen > 0) {
            plan[layer].n_seen -= m->len - m->step_len;
            if (plan[layer].n_seen < 0) plan[layer].n_seen = 0;
        }
        truncate_model(seq, layer, m->step_len);
    }
    in_step[seq] = 0;
    return st;
}

static tkv_status call_truncate(int seq) {
    int n = tkv_get_length(kv, seq, TKV_ALL_LAYERS) - (rand_below(3) ? rand_below(40) : rand_below(300)) + 2,
        layer, must_succeed = 1, must_fail = 0;
    tkv_status st;
    if (n < 0) n = 0;
    st = tkv_seq_truncate(kv, seq, n);
    for (layer = 0; layer < LAYERS; layer++) {
        const model_list *m = &list[seq][layer];
        int expired = expired_of(m);
        if (!plan[layer].own || m->len <= n) continue;
        if (n && expired && n < expired + plan[layer].keep - 1) must_fail = 1;
        if (n && expired && n < expired + plan[layer].keep)
            must_succeed = 0; /* the window of the last token has lost a key: either result */
    }
    if (in_step[seq]) CHECK_CALL(st == TKV_ERR_STATE, "%s", tkv_get_status_text(st));
    else if (must_fail) CHECK_CALL(st == TKV_ERR_RANGE, "%s to %d", tkv_get_status_text(st), n);
    else if (must_succeed) CHECK_CALL(st == TKV_OK, "%s to %d", tkv_get_status_text(st), n);
    for (layer = 0; layer < LAYERS && !st; layer++)
        if (plan[layer].own) truncate_model(seq, layer, n);
    return st;
}

static tkv_status call_flush(int seq) {
    tkv_flush_mode mode = (tkv_flush_mode)rand_below(3);
    tkv_status st;
    int layer;
    make_due_tables(seq, mode != TKV_FLUSH_DUE);
    st = tkv_seq_flush(kv, seq, mode);
    if (is_to_repeat(seq, st)) st = tkv_seq_flush(kv, seq, mode);
    if (in_step[seq]) CHECK_CALL(st == TKV_ERR_STATE, "%s", tkv_get_status_text(st));
    else CHECK_CALL(st == TKV_OK, "%s", tkv_get_status_text(st));
    for (layer = 0; layer < LAYERS && !st; layer++) {
        int exact = plan[layer].hot == 1 << 28; /* hot_tokens = TKV_UNLIMITED: nothing is encoded */
        if (plan[layer].own)
            demote_due(seq, layer, mode == TKV_FLUSH_DUE || exact ? plan[layer].hot : 0,
                       mode == TKV_FLUSH_ALL, BLOCKS);
    }
    return st;
}

/* Returns the number of table versions of this layer that no block uses. */
static int n_free_versions(int layer) {
    int version, n = 0;
    for (version = 0; version < TKVI_VERSIONS; version++)
        n += version != kv->tables.current_version[layer] && !is_version_used(layer, version);
    return n;
}

/* Starts a refresh, or loads the calibration that the cache saves now: a new version with the same numbers. */
static tkv_status call_calibration(void) {
    static uint8_t saved[16 * 1024];
    size_t bytes = 0;
    int layer, any_open = 0, s, has_free_version = 1;
    tkv_status st;
    for (s = 0; s < SEQS; s++) any_open |= in_step[s];
    if (rand_below(2)) {
        st = tkv_refresh_calibration(kv);
        if (st == TKV_ERR_NOMEM) {
            memory.fail_at = 0;
            st = tkv_refresh_calibration(kv);
        }
        CHECK_CALL(st == (any_open ? TKV_ERR_STATE : TKV_OK), "%s", tkv_get_status_text(st));
        for (layer = 0; layer < LAYERS && !st; layer++)
            if (plan[layer].learns && plan[layer].n_tables) {
                plan[layer].n_seen = 0;
                plan[layer].due = TKVI_FIRST_TABLE_TOKENS;
            }
        return st;
    }
    CHECK_EQ(tkv_save_calibration(kv, saved, sizeof saved, &bytes), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++)
        if (plan[layer].learns && plan[layer].n_tables) has_free_version &= n_free_versions(layer) > 0;
    st = tkv_load_calibration(kv, saved, bytes);
    if (st == TKV_ERR_NOMEM) {
        memory.fail_at = 0;
        st = tkv_load_calibration(kv, saved, bytes);
    }
    CHECK_CALL(st == (any_open           ? TKV_ERR_STATE
                      : has_free_version ? TKV_OK
                                         : TKV_ERR_CAPACITY),
               "%s", tkv_get_status_text(st));
    for (layer = 0; layer < LAYERS && !st; layer++)
        if (plan[layer].n_tables) {
            plan[layer].n_seen = -1;
            plan[layer].n_loaded++;
        }
    return st;
}

/* Reserves tokens, then appends all of them while no memory can be allocated. */
static void call_reserve_and_use(int seq) {
    int n = random_n_tokens(), layer, goal = model_length(seq) + n, fail_at = memory.fail_at;
    tkv_status st;
    if (goal > LONGEST) return;
    if (in_step[seq]) call_abort(seq);
    goal = model_length(seq) + n;
    st = tkv_seq_reserve(kv, seq, n);
    CHECK_CALL(st == TKV_OK || st == TKV_ERR_NOMEM, "%s", tkv_get_status_text(st));
    if (st) return;
    memory.fail_at = 1;
    for (layer = 0; layer < LAYERS; layer++)
        while (plan[layer].own && list[seq][layer].len < goal) {
            int n_next = 1 + rand_below(goal - list[seq][layer].len);
            if (call_append(seq, layer, n_next)) {
                CHECK_CALL(0, "reserved to %d, failed at %d in layer %d", goal, list[seq][layer].len, layer);
                break;
            }
        }
    memory.fail_at = fail_at;
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
    if (kind == 1) { /* all tiers are exact */
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
            TKV_KIVI4; /* one format in two tiers */
    } else if (kind == 5) {
        cfg.tiers.warm = a40_r40;
        cfg.tiers.archive = a25_r15;
        cfg.tiers.warm_tokens = 200;
        cfg.tiers.sink_tokens = 1;
    } else if (kind == 6) {                           /* layers differ in the tiers that wait */
        cfg.tiers.warm = cfg.tiers.archive = a25_r15; /* one format in two tiers */
        cfg.layers = layers;
        layers[0].window = 200;
        layers[1].warm.k = layers[1].warm.v = TKV_Q8;
        layers[1].hot_tokens = 20;
        layers[1].warm_tokens = 60;
        layers[2].archive.k = layers[2].archive.v = TKV_KIVI2;
        layers[2].sink_tokens = TKV_OFF;
    } else if (kind == 7) { /* KVQuant and shared formats, in one layer and in separate ones */
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
    if (kind == 2 || kind == 3 || kind == 6) { /* the meter must not change results */
        cfg.meter.heads = 4;
        cfg.meter.tokens = 192;
        cfg.meter.every = 1;
    }
    return cfg;
}

static int tokens_of(int layer, int cache, int fallback) {
    int n = layer ? layer : cache ? cache : fallback;
    return n == TKV_OFF ? 0 : n == TKV_UNLIMITED ? 1 << 28 : n;
}

static tkv_format format_of(tkv_format layer, tkv_format cache, tkv_format fallback) {
    return layer ? layer : cache ? cache : fallback;
}

static void init_model(const tkv_config *cfg, const tkv_layer_config *layers) {
    static const tkv_format fallback[] = {TKV_F16, TKV_KIVI4, TKV_KIVI2};
    int i, t, n_own = 0, rank = 0;
    for (i = 0; i < LAYERS; i++) n_own += layers[i].share_kv == 0;
    group = cfg->format.group_size ? cfg->format.group_size : 64;
    max_append = cfg->limits.max_append ? cfg->limits.max_append : 512;
    for (i = 0; i < LAYERS; i++) {
        model_layer *p = &plan[i];
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
        p->hot = add_delay(tokens_of(layers[i].hot_tokens, cfg->tiers.hot_tokens, 64),
                           hot_delay_of(rank, n_own), 1 << 28);
        p->delay = p->hot > 0 && p->hot < 1 << 28 ? hot_delay_of(rank, n_own) : 0;
        p->warm = add_delay(tokens_of(layers[i].warm_tokens, cfg->tiers.warm_tokens, 448),
                            warm_delay_of(rank, n_own), 1 << 28);
        rank += p->own;
        p->window = p->keep = tokens_of(layers[i].window, cfg->model.window, TKV_OFF);
        p->margin = p->hot == 1 << 28 ? BLOCK : p->hot;
        for (t = 0; t < 3; t++) {
            p->pair[t].k = format_of(of_layer[t]->k, of_cache[t]->k, fallback[t]);
            p->pair[t].v = format_of(of_layer[t]->v, of_cache[t]->v, fallback[t]);
            p->needs_table[t] = tkvi_formats[p->pair[t].k].shared || tkvi_formats[p->pair[t].v].shared ||
                                tkvi_formats[p->pair[t].k].family->learn_tokens ||
                                tkvi_formats[p->pair[t].v].family->learn_tokens;
        }
        p->learns = p->own && (p->needs_table[TKV_TIER_WARM] || p->needs_table[TKV_TIER_ARCHIVE]);
        p->n_seen = p->n_tables = p->n_loaded = 0;
        p->due = TKVI_FIRST_TABLE_TOKENS;
    }
    for (i = 0; i < LAYERS; i++) {
        model_layer *source = &plan[plan[i].source];
        if (plan[i].own) continue;
        source->keep = !source->keep || !plan[i].window ? 0
                       : source->keep > plan[i].window  ? source->keep
                                                        : plan[i].window;
    }
    for (i = 0; i < SEQS; i++) reset_model(i);
}

static int read_env_int(const char *name, int fallback) {
    const char *s = getenv(name);
    return s && *s ? atoi(s) : fallback;
}

static void run_random_calls(int kind) {
    tkv_layer_config layers[LAYERS];
    tkv_config cfg = config_of(kind, layers);
    int ops = read_env_int("TKV_RANDOM_OPS", tkv_test_quick() ? 500 : 6000), s, l;
    const char *s_env = getenv("TKV_RANDOM_SEED");
    seed = (uint64_t)(unsigned)read_env_int("TKV_RANDOM_SEED", 1) +
           (s_env && *s_env ? 0u : (unsigned)kind * 1000u);
    rng = tkv_rng_seed(seed);
    cfg.host.allocator = counting_allocator_of(&memory);
    init_model(&cfg, layers);
    op_number = 0;
    op_name = "create";
    kv = NULL;
    CHECK_EQ(tkv_create(&cfg, &kv), TKV_OK);
    if (!kv) return;
    for (op_number = 1; op_number <= ops && tkv_test_.n_bad < 5; op_number++) {
        int seq = rand_below(SEQS), op = rand_below(100), mutates = 1;
        char reason[160];
        tkv_memory_info m;
        tkv_status st = TKV_OK;
        memory.fail_at = rand_below(4) ? 0 : 1 + rand_below(6);
        if (op < 34)
            op_name = "append to a layer", st = call_append(seq, random_own_layer(), random_n_tokens());
        else if (op < 54) op_name = "append to all layers", st = call_append_all(seq);
        else if (op < 64) op_name = "batch", st = call_batch();
        else if (op < 69) op_name = "begin", st = call_begin(seq);
        else if (op < 73) op_name = "commit", st = call_commit(seq);
        else if (op < 76) op_name = "abort", st = call_abort(seq);
        else if (op < 84) op_name = "truncate", st = call_truncate(seq);
        else if (op < 88) op_name = "flush", st = call_flush(seq);
        else if (op < 91) op_name = "reserve and use", call_reserve_and_use(seq), mutates = 0;
        else if (op == 91 && rand_below(2)) op_name = "refresh or load", st = call_calibration();
        else if (op < 93) {
            op_name = "reserve";
            st = tkv_seq_reserve(kv, seq, random_n_tokens());
            CHECK_CALL(st == TKV_OK || st == TKV_ERR_NOMEM, "%s", tkv_get_status_text(st));
        } else if (op < 95 || list[seq][0].len > LONGEST - 100 || list[seq][LAYERS - 1].len > LONGEST - 100) {
            op_name = "reset";
            st = tkv_seq_reset(kv, seq);
            CHECK_CALL(st == TKV_OK, "%s", tkv_get_status_text(st));
            reset_model(seq);
        } else {
            op_name = "attend";
            for (l = 0; l < LAYERS;
                 l++) /* a table for another sequence may have recoded blocks of this one */
                if (plan[l].own) compare_with_model(seq, l);
            memory.fail_at = 1;
            check_attention(seq, rand_below(LAYERS), rand_below(5));
            mutates = 0;
        }
        memory.fail_at = 0;
        if (mutates)
            CHECK_CALL((st == TKV_OK) == (tkv_get_last_error(kv)[0] == 0), "\"%s\"", tkv_get_last_error(kv));
        st = tkv_check(kv, reason, sizeof reason);
        CHECK_CALL(st == TKV_OK, "%s", reason);
        CHECK_CALL(tkv_get_memory(kv, &m) == TKV_OK && m.total == memory.held, "%lu held",
                   (unsigned long)memory.held);
        CHECK_CALL(tkv_get_length(kv, seq, TKV_ALL_LAYERS) == model_length(seq), "%d",
                   tkv_get_length(kv, seq, TKV_ALL_LAYERS));
        for (l = 0; l < LAYERS; l++)
            CHECK_CALL((kv->tables.current_version[l] >= 0) == (plan[l].n_tables > 0),
                       "layer %d has %d tables", l, plan[l].n_tables);
        for (s = 0; s < SEQS; s++)
            for (l = 0; l < LAYERS; l++)
                if (plan[l].own && (s == seq || op_number % 16 == 0 || op_number == ops))
                    compare_with_model(s, l);
    }
    tkv_destroy(kv);
    CHECK_EQ(memory.held, 0);
    if (tkv_test_.n_bad) printf("    again: TKV_RANDOM_SEED=%lu\n", (unsigned long)seed);
}

TEST(default_plan) { run_random_calls(0); }
TEST(exact_with_a_window) { run_random_calls(1); }
TEST(odd_lengths) { run_random_calls(2); }
TEST(layers_that_differ) { run_random_calls(3); }
TEST(exact_tail_and_a_window_of_one) { run_random_calls(4); }
TEST(a_and_r_formats) { run_random_calls(5); }
TEST(layers_with_shared_formats) { run_random_calls(6); }
TEST(kvquant_and_shared_formats) { run_random_calls(7); }

/* >>promotion */
/* Making room for a block can take later candidates out of the list. */
TEST(candidates_that_left_the_list_are_passed_over) {
    tkv_config cfg = make_sized_config(1, HEADS, KV_HEADS, DIM, 1, 256);
    tkv_promotion p;
    tkvi_promoting best;
    tkvi_ranking r;
    test_store store;
    tkv_cache *c;
    int done = 0, n = 0;
    cfg.importance.sample_every = 64;
    attach_test_store(&store, &cfg);
    c = create_cache(&cfg);
    rng = tkv_rng_seed(3);
    tkv_rng_fill(&rng, k_in, 256 * K_ROW, 1.0);
    for (n = 0; n < 4; n++) CHECK_EQ(tkv_append(c, 0, 0, k_in, k_in, 256), TKV_OK);
    CHECK_EQ(tkv_offload(c, 0, 0, 2, &n), TKV_OK);
    CHECK_EQ(n, 2);
    memset(&p, 0, sizeof p);
    memset(&best, 0, sizeof best);
    r = tkvi_ranking_of(c, 0, 0);
    best.found = 2;
    best.out[0] = (int)c->pool.free_entry;
    best.out[1] = (int)r.ids[2];
    CHECK_EQ(tkvi_promote_candidates(&r, 0, 0, &p, &best, &done), TKV_OK);
    CHECK_EQ(done, 1);
    CHECK(!tkvi_is_offloaded(tkvi_block_of(c, r.ids[2])) && tkvi_is_offloaded(tkvi_block_of(c, r.ids[1])));
    check_cache(c);
    tkv_destroy(c);
    destroy_test_store(&store);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(default_plan);
    RUN(exact_with_a_window);
    RUN(odd_lengths);
    RUN(layers_that_differ);
    RUN(exact_tail_and_a_window_of_one);
    RUN(a_and_r_formats);
    RUN(layers_with_shared_formats);
    RUN(kvquant_and_shared_formats);
    RUN(candidates_that_left_the_list_are_passed_over);
    return tkv_test_end();
}
