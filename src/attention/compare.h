/*
 * attention/compare.h - the consumer of the quality meter (cache/meter.h): attention a second time, with exact copies
 * in place of coded blocks. It compares weights and output of both.
 */
#ifndef TKVI_ATTENTION_COMPARE_H
#define TKVI_ATTENTION_COMPARE_H

#include "attention/attend.h"

typedef struct tkvi_comparison { /* of a row */
    uint64_t keys, kept;         /* coded keys that the row sees; those of them with a copy */
    double l, shift;             /* sums over keys, p = exp(exact - m): of p; of p (exact - cached score) */
    float m, cached_m;           /* largest exact score; largest cached score */
    float choice;                /* the exact score of the key with the largest cached score */
    float first_m, first_l;      /* m and l of the first pass */
} tkvi_comparison;

typedef struct tkvi_comparing {
    unsigned rows; /* sampled rows that see a key */
    int from;      /* place in the list of copies (tkvi_head_probe_copy) */
    tkvi_comparison row[TKVI_ROWS];
    float cached[TKVI_ROW_CHANNELS]; /* [row][v_pad] tkvi_output_row of the first pass */
    float o[2 * TKVI_ROW_CHANNELS];  /* as tkvi_sums.o, with the copies */
} tkvi_comparing;

static int tkvi_comparison_wants(const tkv_cache *kv, const tkv_attend_params *p, int stored) {
    int i;
    (void)p;
    for (i = 0; kv->meter && i < kv->meter->n; i++)
        if (kv->meter->head_probe[i].layer == stored) return TKVI_WANTS_CALL;
    return 0;
}

static unsigned tkvi_comparison_sample(const tkvi_tile_view *v) {
    const tkvi_meter *m = v->kv->meter;
    const tkvi_head_probe *g = tkvi_head_probe_of(m, v->stored, v->head);
    return g && v->seq == m->seq ? tkvi_rows_every(v, g->phase, m->every) : 0;
}

/* Counts the coded keys of the rows, and those with a copy. */
static void tkvi_comparison_count(const tkvi_tile_view *v, const tkvi_head_probe *g, tkvi_comparing *c) {
    const tkv_cache *kv = v->kv;
    int i, r, from = 0;
    for (i = v->list->sinks; i < v->list->n; i++) {
        const tkvi_entry *e = &kv->pool.entry[v->ids[i]];
        int end = tkvi_block_end(kv, v->list, v->ids, i), copied;
        if (tkvi_is_hot_layout(kv, v->stored, tkvi_block_of(kv, v->ids[i])->layout)) continue;
        copied = tkvi_head_probe_copy(kv->meter, g, e->start, &from) != NULL && !e->n_packed;
        for (r = 0; r < v->rows; r++) {
            int low, high, n;
            tkvi_visible_keys(v, i, r, &low, &high);
            n = tkvi_min(high, end) - tkvi_max(low, e->start);
            if (!(c->rows >> r & 1) || n <= 0) continue;
            c->row[r].keys += (uint64_t)n;
            if (copied) c->row[r].kept += (uint64_t)n;
        }
    }
}

/* row: [v_head_dim] sum of p v of row r, with rotated values rotated back. Without sink logit and division by l. */
static void tkvi_output_row(const tkvi_work_tile *u, int r, const float *o, int rotated, float *row) {
    int dim = u->call->plan->geometry.v_head_dim, i;
    memset(row, 0, (size_t)u->v_pad * sizeof *row);
    if (rotated) {
        memcpy(row, o + tkvi_space_floats(u->v_pad) + r * u->v_pad, (size_t)u->v_pad * sizeof *row);
        tkvi_rotate_back(row, dim);
    }
    for (i = 0; i < dim; i++) row[i] += o[r * u->v_pad + i];
}

/* Returns the rows with a copy to compare with. Without one there is no difference. */
static TKVI_NOINLINE unsigned tkvi_comparison_begin(const tkvi_tile_view *v, unsigned rows, void *state) {
    tkvi_comparing *c = (tkvi_comparing *)state;
    const tkvi_sums *s = v->sums;
    unsigned compared = 0;
    int r;
    c->rows = 0;
    c->from = 0;
    for (r = 0; r < v->rows; r++) {
        tkvi_comparison *row = &c->row[r];
        memset(row, 0, sizeof *row);
        row->m = row->cached_m = TKVI_HIDDEN;
        row->first_m = s->m[r];
        row->first_l = s->l[r];
        if (s->l[r] > 0.0f) c->rows |= rows & 1u << r;
    }
    tkvi_comparison_count(v, tkvi_head_probe_of(v->kv->meter, v->stored, v->head), c);
    for (r = 0; r < v->rows; r++) {
        if (!c->row[r].kept) continue;
        compared |= 1u << r;
        tkvi_output_row(v->tile, r, s->o, s->any[1] > 0.0f, c->cached + r * v->tile->v_pad);
    }
    if (compared)
        memset(c->o, 0, (size_t)(tkvi_spaces(v->tile) * tkvi_space_floats(v->tile->v_pad)) * sizeof(float));
    return compared;
}

/* Adds one block to row r. s, cached: [64] exact and cached scores. w: [64] gets the weights of the exact scores.
 * Returns 0 if the row sees no key of the block. */
static int tkvi_comparison_add(const tkvi_work_tile *u, int r, tkvi_comparing *c, const float *s,
                               const float *cached, float *w) {
    const tkvi_kernels *kernels = u->call->kv->kernels;
    float most = kernels->max64(s), cached_most = kernels->max64(cached);
    tkvi_comparison *row = &c->row[r];
    double shift = 0.0;
    int t, space;
    if (TKVI_IS_HIDDEN(most)) return 0;
    if (most > row->m) {
        float shrink = TKVI_IS_HIDDEN(row->m) ? 0.0f : expf(row->m - most);
        for (space = 0; space < tkvi_spaces(u); space++)
            kernels->scale_add(c->o + space * tkvi_space_floats(u->v_pad) + r * u->v_pad, shrink, NULL, 0.0f,
                               u->v_pad);
        row->l *= (double)shrink;
        row->shift *= (double)shrink;
        row->m = most;
    }
    if (cached_most > row->cached_m) {
        row->cached_m = cached_most;
        for (t = 0; t < TKVI_BLOCK && cached[t] < cached_most;) t++;
        row->choice = s[t % TKVI_BLOCK];
    }
    row->l += (double)kernels->exp64(s, row->m, w);
    for (t = 0; t < TKVI_BLOCK; t++) shift += (double)(w[t] * (s[t] - cached[t])); /* a hidden key adds 0 */
    row->shift += shift;
    return 1;
}

/* Attention of the compared rows over block i, with its copy if there is one. */
static TKVI_NOINLINE void tkvi_comparison_observe(const tkvi_tile_view *v, int i, const float *cached,
                                                  void *state) {
    TKVI_ALIGNED float scores[TKVI_ROWS * TKVI_BLOCK], p[TKVI_ROWS * TKVI_BLOCK];
    const tkv_cache *kv = v->kv;
    const tkvi_scoring *scoring = v->scoring;
    const tkvi_work_tile *u = &scoring->tile;
    const int first = scoring->first, layout = kv->tables.plan[v->stored].now.layout[TKV_TIER_HOT];
    const int n = tkvi_block_tokens(kv, v->list, v->ids, i), start = tkvi_block_start(kv, v->ids, i);
    tkvi_comparing *c = (tkvi_comparing *)state;
    const uint8_t *bytes, *copy;
    const tkvi_record *rec = tkvi_record_of(u, i, &bytes);
    int r, any = 0;
    copy =
        tkvi_head_probe_copy(kv->meter, tkvi_head_probe_of(kv->meter, v->stored, v->head), start, &c->from);
    if (kv->pool.entry[v->ids[i]].n_packed) copy = NULL; /* it has other tokens */
    if (copy) {
        rec = &kv->tables.layout[layout].record[v->head];
        tkvi_score_record(scoring, rec, copy, i, scores);
    }
    memset(p, 0, sizeof p);
    for (r = 0; r < v->rows; r++)
        if (c->row[r].kept)
            any |= tkvi_comparison_add(v->tile, r, c, (copy ? scores : cached) + r * TKVI_BLOCK,
                                       cached + r * TKVI_BLOCK, p + r * TKVI_BLOCK);
    bytes = copy ? copy + rec->v_at : any ? tkvi_bytes_of(u, i, TKV_V) : NULL;
    if (any && bytes)
        tkvi_add_values(kv->kernels, &rec->v, bytes, NULL, p + first * TKVI_BLOCK, u->rows, n,
                        kv->tables.cfg.host.precise,
                        c->o + (rec->v.format->rotated ? tkvi_space_floats(u->v_pad) : 0) + first * u->v_pad);
}

/* Adds row r to error_sums: agreement of the top key, KL(exact || cached), |out - exact|^2 / |exact|^2. */
static void tkvi_comparison_sum(const tkvi_tile_view *v, int r, const tkvi_comparing *c,
                                tkvi_error_sums *error_sums) {
    const tkv_attend_params *p = v->params;
    const tkvi_comparison *row = &c->row[r];
    const float *y = c->cached + r * v->tile->v_pad;
    float x[TKV_MAX_HEAD_DIM];
    double lse = (double)row->m + log(row->l), cached = (double)row->first_m + log((double)row->first_l);
    double a, b, d = 0.0, size = 0.0;
    uint64_t divergence;
    int i, head = tkvi_head_of(v->tile, r);
    if (p->sink_logits && tkvi_is_finite(p->sink_logits[head])) {
        double sink = (double)p->sink_logits[head] - (p->softcap > 0.0f ? 0.0 : (double)v->origin[r]);
        lse = lse > sink ? lse + log1p(exp(sink - lse)) : sink + log1p(exp(lse - sink));
        cached = cached > sink ? cached + log1p(exp(sink - cached)) : sink + log1p(exp(cached - sink));
    }
    a = exp((double)row->m - lse);
    b = exp((double)row->first_m - cached);
    tkvi_output_row(v->tile, r, c->o, tkvi_spaces(v->tile) > 1, x);
    for (i = 0; i < v->tile->call->plan->geometry.v_head_dim; i++) {
        double e = (double)x[i] * a - (double)y[i] * b;
        d += e * e;
        size += (double)x[i] * a * ((double)x[i] * a);
    }
    divergence = tkvi_meter_fixed(row->shift * a - lse + cached);
    error_sums->agreed += row->choice >= row->m;
    error_sums->error += tkvi_meter_fixed(d > 0.0 ? (size > 0.0 ? d / size : (double)TKVI_METER_MOST) : 0.0);
    error_sums->divergence += divergence;
    if (divergence > error_sums->worst) error_sums->worst = divergence;
}

/* Adds the sampled rows to their head probe. */
static TKVI_NOINLINE void tkvi_comparison_end(const tkvi_tile_view *v, void *state) {
    const tkvi_comparing *c = (const tkvi_comparing *)state;
    tkvi_meter *m = v->kv->meter;
    tkvi_error_sums error_sums;
    int r;
    memset(&error_sums, 0, sizeof error_sums);
    for (r = 0; r < v->rows; r++) {
        if (!(c->rows >> r & 1)) continue;
        error_sums.samples++;
        error_sums.keys += c->row[r].keys;
        error_sums.kept += c->row[r].kept;
        if (c->row[r].kept && c->row[r].l > 0.0) tkvi_comparison_sum(v, r, c, &error_sums);
        else error_sums.agreed++; /* no copy, no difference */
    }
    if (!error_sums.samples) return;
    tkvi_lock(&m->lock);
    tkvi_error_sums_add(&tkvi_head_probe_of(m, v->stored, v->head)->sum, &error_sums);
    tkvi_unlock(&m->lock);
}

static const tkvi_consumer tkvi_comparison_consumer = {
    TKVI_OBSERVES_TILE,    sizeof(tkvi_comparing),  tkvi_comparison_wants, tkvi_comparison_sample,
    tkvi_comparison_begin, tkvi_comparison_observe, tkvi_comparison_end};

#endif /* TKVI_ATTENTION_COMPARE_H */
