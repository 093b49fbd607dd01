/*
 * evict.h - which tokens of a layer to drop. Policies are rows of a table: a name, what they must see, what they
 * protect, and a function that scores all tokens; the lowest scores go, in one selection. No memory of its own, no
 * cache.
 *
 *     slots      0 1 2 3 4 5 6 7 8 9      keep 5, 2 sinks, 2 recent
 *     may go         x x x x x x          neither protected, pinned nor gone already
 *     score      . . 4 1 3 9 2 5 . .      5 of these 6 are too many: the lowest 5 go, of equal ones the older
 *     victims    0 0 1 1 1 0 1 1 0 0
 *
 * Where the definitions come from stands at each score. All see a layer's heads as one: sums or means over heads, so
 * that a token goes from all of them (the papers select per head). May call select, importance.
 */
#ifndef TKVI_EVICT_H
#define TKVI_EVICT_H

#include "importance.h"

/* A token has its place here: in range, and not gone before. */
static int tkvi_is_alive(const tkv_evict_view *v, int i) { return !v->alive || tkvi_has(v->alive, i); }

static int tkvi_position_of(const tkv_evict_view *v, int i) { return v->position ? v->position[i] : i; }

/* >>scores: out[i] for all that are alive; high ones stay. recent: the last so many are what a policy observes. */
typedef void (*tkvi_evict_score)(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent,
                                 float *out);

/* StreamingLLM (arXiv 2309.17453, section 3.2): first tokens, kept as sinks, and the newest. FIFO: without sinks. */
static void tkvi_score_age(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)cfg;
    (void)recent;
    for (i = 0; i < v->n; i++) out[i] = (float)tkvi_position_of(v, i);
}

/* Scores that are there already. H2O (2306.14048, section 4): attention probabilities, summed over all queries since
 * the token came. TOVA (2401.06104): those of the newest query, mean over the heads of the layer. */
static void tkvi_score_copy(const tkv_evict_view *v, const float *from, float sign, float *out) {
    int i;
    for (i = 0; i < v->n; i++)
        if (tkvi_is_alive(v, i)) out[i] = sign * from[i];
}

static void tkvi_score_mass(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->mass, 1.0f, out);
}

static void tkvi_score_last(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->last, 1.0f, out);
}

/* Knorm (2406.11430): keys of a small L2 norm get much attention, so the longest go. */
static void tkvi_score_norm(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->norms, -1.0f, out);
}

static void tkvi_score_given(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->scores, 1.0f, out);
}

/* ScissorHands (2305.17118): tokens are counted, in a history window, each time they get less than an even share; when
 * the budget is full those with the highest counts go, many at once, but for the recent ones. */
static void tkvi_score_lows(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)cfg;
    (void)recent;
    tkvi_score_copy(v, v->lows, 1.0f, out);
    for (i = 0; i < v->n; i++)
        if (tkvi_is_alive(v, i) && out[i] > 0.0f) out[i] = -out[i];
}

/* SnapKV (2404.14469, section 4): attention that the last queries of the prompt, the observation window, give to what
 * is before it, averaged over neighbours (beyond the ends there are zeros, as the authors' code has it); the window
 * itself stays. PyramidKV (2406.02069, section 4) selects in the same way. */
static void tkvi_score_pooled(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    const int before = tkvi_max(0, v->n - recent), half = cfg->pool / 2;
    float most = 0.0f;
    int i, j;
    for (i = 0; i < before; i++) {
        const int end = tkvi_min(before, i + half + 1);
        double sum = 0.0;
        for (j = tkvi_max(0, i - half); j < end; j++)
            if (tkvi_is_alive(v, j)) sum += (double)v->observed[j];
        out[i] = (float)(sum / cfg->pool);
        most = out[i] > most ? out[i] : most;
    }
    for (; i < v->n; i++)
        out[i] = most; /* where the budget is smaller than the window, the oldest of it go last */
}

static double tkvi_key_dot(const float *a, const double *b, int dim) {
    double sum = 0.0;
    int c;
    for (c = 0; c < dim; c++) sum += (double)a[c] * b[c];
    return sum;
}

static double tkvi_key_norm(const float *k, int dim) {
    double sum = 0.0;
    int c;
    for (c = 0; c < dim; c++) sum += (double)k[c] * (double)k[c];
    return sqrt(sum);
}

static const float *tkvi_key_of(const float *keys, int i, int n_kv_heads, int h, int head_dim) {
    return keys + ((size_t)i * (size_t)n_kv_heads + (size_t)h) * (size_t)head_dim;
}

/* KeyDiff (2504.15364, section 3): the anchor is the mean of the directions of all keys; the score is the cosine
 * between key and anchor, negated, and here its mean over the KV heads. */
static void tkvi_add_direction(const float *k, int dim, double *anchor) {
    const double norm = tkvi_key_norm(k, dim);
    int c;
    for (c = 0; norm > 0.0 && c < dim; c++) anchor[c] += (double)k[c] / norm;
}

static double tkvi_anchor_length(const double *x, int dim) {
    double sum = 0.0;
    int c;
    for (c = 0; c < dim; c++) sum += x[c] * x[c];
    return sqrt(sum);
}

/* The cosine; length: the anchor's. What is not finite stays so. */
static float tkvi_likeness(const float *k, const double *anchor, double length, int dim) {
    const double norm = tkvi_key_norm(k, dim) * length;
    if (!tkvi_is_finite((float)norm)) return (float)norm;
    return norm > 0.0 ? (float)(tkvi_key_dot(k, anchor, dim) / norm) : 0.0f;
}

static void tkvi_score_differing(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent,
                                 float *out) {
    double anchor[TKV_MAX_HEAD_DIM], length;
    const int dim = v->head_dim;
    int h, i;
    (void)cfg;
    (void)recent;
    for (i = 0; i < v->n; i++) out[i] = 0.0f;
    for (h = 0; h < v->n_kv_heads; h++) {
        memset(anchor, 0, sizeof anchor);
        for (i = 0; i < v->n; i++)
            if (tkvi_is_alive(v, i))
                tkvi_add_direction(tkvi_key_of(v->keys, i, v->n_kv_heads, h, dim), dim, anchor);
        length = tkvi_anchor_length(anchor, dim);
        for (i = 0; i < v->n; i++)
            if (tkvi_is_alive(v, i))
                out[i] -= tkvi_likeness(tkvi_key_of(v->keys, i, v->n_kv_heads, h, dim), anchor, length, dim) /
                          (float)v->n_kv_heads;
    }
}

/* A hash of seed and position (splitmix64): the same token has the same lot, whoever else is there. */
static void tkvi_score_lot(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)recent;
    for (i = 0; i < v->n; i++) {
        uint64_t z =
            (uint64_t)(uint32_t)cfg->seed + ((uint64_t)tkvi_position_of(v, i) + 1u) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        out[i] = (float)((z ^ (z >> 31)) >> 40) * 5.9604644775390625e-8f;
    }
}

static void tkvi_score_user(const tkv_evict_config *cfg, const tkv_evict_view *v, int recent, float *out) {
    int i;
    (void)recent;
    for (i = 0; i < v->n; i++)
        if (tkvi_is_alive(v, i)) out[i] = cfg->scorer(cfg->user, v, i);
}

/* >>the table, in the order of tkv_evict_kind */
typedef struct tkvi_evict_row {
    const char *name;
    int needs;
    int sinks, recent; /* what it protects if cfg does not say */
    tkvi_evict_score score;
} tkvi_evict_row;

static const tkvi_evict_row tkvi_evict_rows[] = {
    {"none", 0, 4, 32, tkvi_score_age},
    {"sliding", 0, 4, 1, tkvi_score_age},
    {"h2o", TKV_EVICT_NEEDS_MASS, 4, 32, tkvi_score_mass},
    {"snapkv", TKV_EVICT_NEEDS_OBSERVED, 4, 32, tkvi_score_pooled},
    {"pyramidkv", TKV_EVICT_NEEDS_OBSERVED, 4, 8, tkvi_score_pooled},
    {"tova", TKV_EVICT_NEEDS_LAST, 4, 32, tkvi_score_last},
    {"knorm", TKV_EVICT_NEEDS_NORMS, 4, 32, tkvi_score_norm},
    {"keydiff", TKV_EVICT_NEEDS_KEYS, 4, 32, tkvi_score_differing},
    {"scissorhands", TKV_EVICT_NEEDS_LOWS, 4, 32, tkvi_score_lows},
    {"fifo", 0, 0, 0, tkvi_score_age},
    {"random", 0, 0, 0, tkvi_score_lot},
    {"scores", TKV_EVICT_NEEDS_SCORES, 4, 32, tkvi_score_given},
    {"user", 0, 4, 32, tkvi_score_user},
};

static const tkvi_evict_row *tkvi_evict_row_of(tkv_evict_kind kind) {
    return (int)kind >= 0 && (int)kind < TKV_EVICT_KINDS ? &tkvi_evict_rows[kind] : NULL;
}

TKV_API const char *tkv_evict_name(tkv_evict_kind kind) {
    const tkvi_evict_row *row = tkvi_evict_row_of(kind);
    return row ? row->name : NULL;
}

TKV_API tkv_status tkv_evict_from_name(const char *name, tkv_evict_kind *kind) {
    int i;
    for (i = 0; name && kind && i < TKV_EVICT_KINDS; i++)
        if (strcmp(name, tkvi_evict_rows[i].name) == 0) {
            *kind = (tkv_evict_kind)i;
            return TKV_OK;
        }
    return TKV_ERR_ARG;
}

TKV_API int tkv_evict_needs(tkv_evict_kind kind) {
    const tkvi_evict_row *row = tkvi_evict_row_of(kind);
    return row ? row->needs : 0;
}

/* A length of the config's: its own, none, or the default. -2: it is no length. */
static int tkvi_evict_length(int given, int otherwise) {
    if (given == TKV_NONE) return 0;
    return given == 0 ? otherwise : given < 0 ? -2 : given;
}

/* The config with its defaults, or NULL. */
static const tkvi_evict_row *tkvi_evict_fill(const tkv_evict_config *from, tkv_evict_config *cfg) {
    const tkvi_evict_row *row = from ? tkvi_evict_row_of(from->kind) : NULL;
    if (!row) return NULL;
    *cfg = *from;
    cfg->sink_tokens = tkvi_evict_length(cfg->sink_tokens, row->sinks);
    cfg->recent_tokens = tkvi_evict_length(cfg->recent_tokens, row->recent);
    cfg->pool = cfg->pool == 0 ? 5 : cfg->pool;
    cfg->trigger = tkvi_or(cfg->trigger, 1.0f);
    if (cfg->sink_tokens < 0 || cfg->recent_tokens < 0 || cfg->batch < 0) return NULL;
    if (cfg->pool < 1 || cfg->pool > 63 || cfg->pool % 2 == 0) return NULL;
    if (!tkvi_within(cfg->trigger, 1e-6f, 1.0f)) return NULL;
    return cfg->kind == TKV_EVICT_USER && !cfg->scorer ? NULL : row;
}

static int tkvi_view_is_sound(const tkv_evict_view *v) {
    int i, last = -1;
    if (!v || v->n < 0 || v->n >= 1 << 30) return 0;
    for (i = 0; v->position && i < v->n; i++) {
        if (!tkvi_is_alive(v, i)) continue;
        if (v->position[i] <= last) return 0;
        last = v->position[i];
    }
    return 1;
}

/* Dimensions that a product of sizes can have. */
static int tkvi_keys_are_sound(const float *keys, int n, int n_kv_heads, int head_dim) {
    size_t size;
    if (n < 0 || n_kv_heads < 1 || head_dim < 1 || head_dim > TKV_MAX_HEAD_DIM) return 0;
    if (!tkvi_mul((size_t)n * sizeof(float), (size_t)n_kv_heads, &size) ||
        !tkvi_mul(size, (size_t)head_dim, &size))
        return 0;
    return keys || n == 0;
}

static int tkvi_view_has(const tkv_evict_view *v, int needs) {
    const void *what[6];
    int i;
    what[0] = v->mass;
    what[1] = v->observed;
    what[2] = v->last;
    what[3] = v->norms;
    what[4] = v->keys;
    what[5] = v->lows;
    for (i = 0; i < 6; i++)
        if ((needs >> i & 1) && !what[i]) return 0;
    if ((needs & TKV_EVICT_NEEDS_SCORES) && !v->scores) return 0;
    return !(needs & TKV_EVICT_NEEDS_KEYS) || tkvi_keys_are_sound(v->keys, v->n, v->n_kv_heads, v->head_dim);
}

TKV_API tkv_status tkv_evict_score(const tkv_evict_config *cfg, const tkv_evict_view *view, float *score) {
    tkv_evict_config full;
    const tkvi_evict_row *row = tkvi_evict_fill(cfg, &full);
    int i;
    if (!row) return TKV_ERR_CONFIG;
    if (!tkvi_view_is_sound(view) || (view->n > 0 && (!score || !tkvi_view_has(view, row->needs))))
        return TKV_ERR_ARG;
    row->score(&full, view, full.recent_tokens, score);
    for (i = 0; i < view->n; i++) {
        if (!tkvi_is_alive(view, i)) score[i] = 0.0f;
        if (!tkvi_is_finite(score[i])) return TKV_ERR_NONFINITE;
    }
    return TKV_OK;
}

/* >>selection */
/* Sinks and recent tokens within the budget: the newest first of all, then the sinks, then the other recent ones. */
static void tkvi_evict_protect(const tkv_evict_config *cfg, int asked, int sinks, int keep,
                               tkv_evict_result *r) {
    int recent = cfg->recent_tokens;
    r->sinks = tkvi_max(0, tkvi_min(sinks, keep - (recent > 0)));
    if (asked == 0) recent = tkvi_min(recent, tkvi_max(1, (keep - r->sinks) / 2));
    r->recent = tkvi_max(0, tkvi_min(recent, keep - r->sinks));
}

TKV_API tkv_status tkv_evict_select(const tkv_evict_config *cfg, const tkv_evict_view *view,
                                    const float *score, int keep, uint64_t *victims, tkv_evict_result *out) {
    tkv_evict_config full;
    tkv_evict_result r;
    tkvi_ranks ranks;
    uint64_t limit = 0, word = 0;
    int i, n, alive = 0, sinks = 0, may_go = 0, go, equal = 0, older;
    if (!tkvi_evict_fill(cfg, &full)) return TKV_ERR_CONFIG;
    if (keep < 0 || !tkvi_view_is_sound(view) || (view->n > 0 && (!score || !victims))) return TKV_ERR_ARG;
    n = view->n;
    for (i = 0; i < n; i++)
        if (tkvi_is_alive(view, i)) {
            if (!tkvi_is_finite(score[i])) return TKV_ERR_NONFINITE;
            alive++;
            sinks += tkvi_position_of(view, i) < full.sink_tokens;
        }
    if (full.kind == TKV_EVICT_NONE && alive > keep) return TKV_ERR_BUDGET;
    memset(&r, 0, sizeof r);
    tkvi_evict_protect(&full, cfg->recent_tokens, sinks, keep, &r);
    for (i = 0; i < tkvi_words(n); i++) victims[i] = 0; /* at first: what may not go */
    for (i = 0, older = 0; i < n; i++) {
        const int there = tkvi_is_alive(view, i), pinned = view->pinned && tkvi_has(view->pinned, i);
        if (!there || pinned || older < r.sinks || older >= alive - r.recent) tkvi_mark(victims, i);
        else may_go++;
        older += there;
    }
    go = tkvi_max(0, tkvi_min(alive - keep, may_go));
    memset(&ranks, 0, sizeof ranks);
    ranks.n = n;
    ranks.score = score;
    ranks.priority = view->priority;
    ranks.without = victims;
    if (go > 0) limit = tkvi_select(&ranks, go, &equal);
    for (i = 0; i < n; i++) { /* a word is written when all of it has been read */
        if (go > 0 && tkvi_takes_part(&ranks, i)) {
            const uint64_t rank = tkvi_rank(&ranks, i);
            if (rank < limit || (rank == limit && equal-- > 0)) word |= (uint64_t)1 << (i & 63);
        }
        if ((i & 63) == 63 || i == n - 1) {
            victims[i >> 6] = word;
            word = 0;
        }
    }
    r.evicted = go;
    r.kept = alive - go;
    r.over = tkvi_max(0, r.kept - keep);
    if (out) *out = r;
    return TKV_OK;
}

TKV_API int tkv_evict_due(const tkv_evict_config *cfg, int n, int incoming, int budget) {
    tkv_evict_config full;
    int64_t limit, due;
    int batch;
    if (!tkvi_evict_fill(cfg, &full) || n < 0 || incoming < 0 || budget < 0) return 0;
    limit = (int64_t)((double)full.trigger * budget + .5);
    due = (int64_t)n + incoming - limit;
    if (due <= 0) return 0;
    batch = full.batch ? full.batch : tkvi_max(1, tkvi_min(64, budget / 8));
    due = due > batch ? due : batch;
    return due < n ? (int)due : n;
}

/* >>what to do with the bits */
TKV_API int tkv_evict_list(const uint64_t *mask, int n, int *out) {
    int i, found = 0;
    if (n > 0 && (!mask || !out)) return 0;
    for (i = 0; i < n; i++)
        if (tkvi_has(mask, i)) out[found++] = i;
    return found;
}

TKV_API int tkv_evict_compact(const uint64_t *victims, int n, void *array, size_t size) {
    char *at = (char *)array;
    int i, kept = 0;
    if (n > 0 && (!victims || !array)) return 0;
    for (i = 0; i < n; i++) {
        if (tkvi_has(victims, i)) continue;
        if (kept < i) memcpy(at + (size_t)kept * size, at + (size_t)i * size, size);
        kept++;
    }
    return kept;
}

TKV_API tkv_status tkv_evict_key_norms(const float *keys, int n, int n_kv_heads, int head_dim, float *out) {
    int i, h;
    if (!tkvi_keys_are_sound(keys, n, n_kv_heads, head_dim) || (n > 0 && !out)) return TKV_ERR_ARG;
    for (i = 0; i < n; i++) {
        double sum = 0.0;
        for (h = 0; h < n_kv_heads; h++)
            sum += tkvi_key_norm(tkvi_key_of(keys, i, n_kv_heads, h, head_dim), head_dim);
        out[i] = (float)(sum / n_kv_heads);
    }
    return TKV_OK;
}

/* >>budgets. Every shape is a straight line: layer l gets base + (first - l * fall) / whole tokens, in whole
 * numbers. */
typedef struct tkvi_line {
    int64_t base, first, fall, whole;
} tkvi_line;

static int64_t tkvi_line_at(const tkvi_line *line, int l) { return line->first - l * line->fall; }

static tkvi_line tkvi_line_uniform(const tkv_evict_budget *b) {
    tkvi_line line;
    line.base = line.fall = 0;
    line.first = b->total;
    line.whole = b->n_layers;
    return line;
}

static tkvi_line tkvi_line_linear(const tkv_evict_budget *b) {
    tkvi_line line;
    line.base = 0;
    line.first = b->total * b->n_layers;
    line.fall = b->total;
    line.whole = (int64_t)b->n_layers * (b->n_layers + 1) / 2;
    return line;
}

/* PyramidKV (arXiv 2406.02069, section 4), as its authors' code has it but with fractions. With a = (C - w) * L tokens
 * to share and d = max - min in units of 1 / unit:  b_l = w + (max * (L - 1) - l * d) / (unit * (L - 1)). The authors
 * fall back to SnapKV's even budgets where n < 2 (C - w), kvpress unless n >= max >= min >= w. */
static tkvi_line tkvi_line_pyramid(const tkv_evict_budget *b) {
    const int64_t layers = b->n_layers, spare = b->total - layers * b->window;
    const int64_t rest = (int64_t)b->n_tokens - b->window;
    tkvi_line line;
    int64_t unit = layers * b->beta, least = spare, most = spare * (2 * (int64_t)b->beta - 1);
    if (layers < 2 || spare < 0 || rest < 0) return tkvi_line_uniform(b);
    if (most > rest * unit) {
        unit = layers;
        most = rest * unit;
        least = 2 * spare - most;
    }
    if (most < least || least < b->window * unit) return tkvi_line_uniform(b);
    line.base = b->window;
    line.first = most * (layers - 1);
    line.fall = most - least;
    line.whole = unit * (layers - 1);
    return line;
}

typedef tkvi_line (*tkvi_evict_line)(const tkv_evict_budget *b);
static const tkvi_evict_line tkvi_evict_lines[] = {tkvi_line_uniform, tkvi_line_pyramid, tkvi_line_linear};

/* Layers whose remainder is at least r. */
static int tkvi_line_count(const tkvi_line *line, int n_layers, int64_t r) {
    int l, count = 0;
    for (l = 0; l < n_layers; l++) count += tkvi_line_at(line, l) % line->whole >= r;
    return count;
}

TKV_API tkv_status tkv_evict_budgets(const tkv_evict_budget *b, int *out) {
    tkv_evict_budget full;
    tkvi_line line;
    int64_t left, low = 0, high;
    int l, last, more;
    if (!b || !out || (int)b->shape < 0 || b->shape > TKV_EVICT_LINEAR) return TKV_ERR_ARG;
    full = *b;
    full.window = tkvi_evict_length(b->window, 8);
    full.beta = b->beta ? b->beta : 20;
    if (full.n_layers < 1 || full.n_layers > 4096 || full.window < 0 || full.beta < 1 || full.beta > 100)
        return TKV_ERR_ARG;
    if (full.n_tokens < 0 || full.n_tokens >= 1 << 30 || full.window >= 1 << 30 || full.total < 0)
        return TKV_ERR_ARG;
    if (full.total > full.n_layers * (int64_t)((1 << 30) - 1)) return TKV_ERR_ARG;
    if (full.shape == TKV_EVICT_LINEAR && full.total < full.n_layers) return TKV_ERR_ARG;
    line = tkvi_evict_lines[full.shape](&full);
    left = full.total;
    for (l = 0; l < full.n_layers; l++) {
        const int64_t whole = line.base + tkvi_line_at(&line, l) / line.whole;
        if (whole >= 1 << 30) return TKV_ERR_ARG; /* of the linear shape's first layers */
        left -= whole;
    }
    for (l = 0; l < full.n_layers; l++) out[l] = (int)(line.base + tkvi_line_at(&line, l) / line.whole);
    high = line.whole; /* the least remainder that at most `left` layers reach: by bisection */
    while (low < high) {
        const int64_t mid = low + (high - low) / 2;
        if (tkvi_line_count(&line, full.n_layers, mid) <= left) high = mid;
        else low = mid + 1;
    }
    more = (int)left - tkvi_line_count(&line, full.n_layers, low); /* of those just below, the first */
    for (l = 0; l < full.n_layers; l++) {
        const int64_t r = tkvi_line_at(&line, l) % line.whole;
        if (r >= low || (r == low - 1 && more-- > 0)) out[l]++;
    }
    for (l = full.n_layers - 1, last = 0; full.shape == TKV_EVICT_LINEAR && l > 0 && out[l] == 0; l--) {
        while (last + 1 < l && out[last + 1] == out[0]) last++; /* the last of the largest gives one */
        while (last > 0 && out[last] < out[0]) last--;
        out[last]--;
        out[l]++;
    }
    return TKV_OK;
}

#endif /* TKVI_EVICT_H */
