/*
 * rules/evict.h - selects the tokens of a layer to evict. An eviction policy is a row of a table: its name, the
 * inputs it needs, the tokens it protects and a function that scores all tokens. One selection then evicts the
 * lowest scores. The code allocates nothing and uses no cache.
 *
 *     slots       0 1 2 3 4 5 6 7 8 9      keep 5, 2 sinks, 2 recent tokens
 *     evictable       x x x x x x          live, not protected, not pinned
 *     score       . . 4 1 3 9 2 5 . .      10 - 5 = 5 too many: the lowest 5, the older of equals
 *     victims     0 0 1 1 1 0 1 1 0 0
 *
 * To add a policy:
 *   1. write evict_NAME.h: paper, section and formula at its top, a tkvi_evict_score (a loop over v->n), its row;
 *   2. name it in tkv_evict_policy (api.h), and at the same place in tkvi_evict_rows below; include the file here and
 *      list it in tieredkv.h.
 * CONTRIBUTING.md shows the whole change. No other code changes: cache, config, texts and tests use the table. The row
 * names the attention statistics that the policy needs, and reclaim/scores.h collects them.
 *
 * A policy sees the heads of a layer as one: its inputs are sums or means over heads. So a token is evicted from
 * all heads of the layer, while the papers select per head.
 */
#ifndef TKVI_RULES_EVICT_H
#define TKVI_RULES_EVICT_H

#include "rules/evict_sliding.h"
#include "rules/evict_h2o.h"
#include "rules/evict_tova.h"
#include "rules/evict_knorm.h"
#include "rules/evict_keydiff.h"
#include "rules/evict_scissorhands.h"
#include "rules/evict_snapkv.h"
#include "rules/evict_pyramidkv.h"
#include "rules/evict_random.h"
#include "rules/evict_given.h"

/* >>the table, in the order of tkv_evict_policy */
static const tkvi_evict_row *const tkvi_evict_rows[TKV_EVICT_COUNT] = {
    &tkvi_evict_none,         &tkvi_evict_sliding, &tkvi_evict_h2o,    &tkvi_evict_snapkv,
    &tkvi_evict_pyramidkv,    &tkvi_evict_tova,    &tkvi_evict_knorm,  &tkvi_evict_keydiff,
    &tkvi_evict_scissorhands, &tkvi_evict_fifo,    &tkvi_evict_random, &tkvi_evict_scores,
    &tkvi_evict_user};

static const tkvi_evict_row *tkvi_evict_row_of(tkv_evict_policy kind) {
    return (int)kind >= 0 && (int)kind < TKV_EVICT_COUNT ? tkvi_evict_rows[kind] : NULL;
}

static const char *tkvi_evict_name(tkv_evict_policy kind) {
    const tkvi_evict_row *row = tkvi_evict_row_of(kind);
    return row ? row->name : NULL;
}

static int tkvi_evict_needs(tkv_evict_policy kind) {
    const tkvi_evict_row *row = tkvi_evict_row_of(kind);
    return row ? row->needs : 0;
}

/* Resolves a length of the config: TKV_OFF is 0, 0 is the default, -2 is returned for an invalid length. */
static int tkvi_evict_length(int given, int otherwise) {
    if (given == TKV_OFF) return 0;
    return given == 0 ? otherwise : given < 0 ? -2 : given;
}

/* Checks a config. Returns NULL, or what the first invalid field must be, with its name and value. */
static const char *tkvi_evict_fault(const tkv_evict_config *cfg, const char **field, double *value) {
    *field = "evict.keep_tokens";
    *value = cfg->keep_tokens;
    if (cfg->keep_tokens < 0 || cfg->keep_tokens >= 1 << 30)
        return "it must be 1 to 2^30 - 1, or 0 for what the budget has room for";
    *field = "evict.keep_first";
    *value = cfg->keep_first;
    if (cfg->keep_first < 0 || cfg->keep_first >= 1 << 30 || !cfg->keep_first != !cfg->keep_last)
        return "it must be 1 to 2^30 - 1 with keep_last, or 0 with keep_last 0";
    *field = "evict.keep_last";
    *value = cfg->keep_last;
    if (cfg->keep_last < 0 || cfg->keep_last >= 1 << 30) return "it must be 1 to 2^30 - 1, or 0";
    *field = "evict.policy";
    *value = (int)cfg->policy;
    if (!tkvi_evict_row_of(cfg->policy)) return "it must be a tkv_evict_policy";
    *field = "evict.batch";
    *value = cfg->batch;
    if (cfg->batch < 0 || cfg->batch >= 1 << 30) return "it must be 1 to 2^30 - 1, or 0 for the default";
    *field = "evict.sink_tokens";
    *value = cfg->sink_tokens;
    if (cfg->sink_tokens < TKV_OFF || cfg->sink_tokens >= 1 << 30)
        return "it must be 1 to 2^30 - 1, 0 (default) or TKV_OFF";
    *field = "evict.recent_tokens";
    *value = cfg->recent_tokens;
    if (cfg->recent_tokens < TKV_OFF || cfg->recent_tokens >= 1 << 30)
        return "it must be 1 to 2^30 - 1, 0 (default) or TKV_OFF";
    *field = "evict.pool";
    *value = cfg->pool;
    if (cfg->pool && (cfg->pool < 1 || cfg->pool > 63 || cfg->pool % 2 == 0))
        return "it must be odd, 1 to 63, or 0 for 5";
    *field = "evict.trigger";
    *value = (double)cfg->trigger;
    if (!tkvi_within(tkvi_or(cfg->trigger, 1.0f), 1e-6f, 1.0f)) return "it must be 1e-6 to 1, or 0 for 1";
    *field = "evict.scorer";
    *value = 0;
    return cfg->policy == TKV_EVICT_USER && !cfg->scorer ? "it must be set for the policy \"user\"" : NULL;
}

/* Copies *from to *cfg and fills in defaults. Returns the policy's row, or NULL if the config is invalid. */
static const tkvi_evict_row *tkvi_evict_fill(const tkv_evict_config *from, tkv_evict_config *cfg) {
    const tkvi_evict_row *row;
    const char *field;
    double value;
    memset(cfg, 0, sizeof *cfg);
    if (from) *cfg = *from;
    if (!from || tkvi_evict_fault(from, &field, &value)) return NULL;
    row = tkvi_evict_row_of(from->policy);
    cfg->sink_tokens = tkvi_evict_length(cfg->sink_tokens, row->sinks);
    cfg->recent_tokens = tkvi_evict_length(cfg->recent_tokens, row->recent);
    cfg->pool = cfg->pool == 0 ? 5 : cfg->pool;
    cfg->trigger = tkvi_or(cfg->trigger, 1.0f);
    return row;
}

static int tkvi_view_is_sound(const tkv_evict_view *v) {
    int i, last = -1;
    if (!v || v->n < 0 || v->n >= 1 << 30) return 0;
    for (i = 0; v->positions && i < v->n; i++) {
        if (!tkvi_is_live(v, i)) continue;
        if (v->positions[i] <= last) return 0;
        last = v->positions[i];
    }
    return 1;
}

static int tkvi_view_has(const tkv_evict_view *v, int needs) {
    const void *what[6];
    int i;
    what[0] = v->total_scores;
    what[1] = v->prompt_scores;
    what[2] = v->last_scores;
    what[3] = v->norms;
    what[4] = v->keys;
    what[5] = v->low_counts;
    for (i = 0; i < 6; i++)
        if ((needs >> i & 1) && !what[i]) return 0;
    if ((needs & TKVI_NEEDS_USER_SCORES) && !v->user_scores) return 0;
    return !(needs & TKVI_NEEDS_KEYS) || tkvi_keys_are_sound(v->n, v->n_kv_heads, v->head_dim);
}

/* Scores all slots by the policy of cfg. Slots without a live token get 0. */
static tkv_status tkvi_score_tokens(const tkv_evict_config *cfg, const tkv_evict_view *view, float *score) {
    tkv_evict_config full;
    const tkvi_evict_row *row = tkvi_evict_fill(cfg, &full);
    int i;
    if (!row) return TKV_ERR_CONFIG;
    if (!tkvi_view_is_sound(view) || (view->n > 0 && (!score || !tkvi_view_has(view, row->needs))))
        return TKV_ERR_ARG;
    row->score(&full, view, full.recent_tokens, score);
    for (i = 0; i < view->n; i++) {
        if (!tkvi_is_live(view, i)) score[i] = 0.0f;
        if (!tkvi_is_finite(score[i])) return TKV_ERR_NONFINITE;
    }
    return TKV_OK;
}

/* >>selection */
/* Fits the protected tokens into `keep`: first the newest token, then sinks, then the other recent tokens. With a
 * default length (asked 0), recent tokens get at most half of the rest behind the sinks, as in H2O. asked: the
 * caller's recent_tokens. sinks: live tokens at sink positions. */
static void tkvi_evict_protect(const tkv_evict_config *cfg, int asked, int sinks, int keep,
                               tkv_evict_result *r) {
    int recent = cfg->recent_tokens;
    r->sinks = tkvi_max(0, tkvi_min(sinks, keep - (recent > 0)));
    if (asked == 0) recent = tkvi_min(recent, tkvi_max(1, (keep - r->sinks) / 2));
    r->recent = tkvi_max(0, tkvi_min(recent, keep - r->sinks));
}

/* Chooses the live tokens with the lowest scores, so that at most `keep` stay. Pinned tokens stay in any case. */
static tkv_status tkvi_select_victims(const tkv_evict_config *cfg, const tkv_evict_view *view,
                                      const float *score, int keep, uint64_t *victims,
                                      tkv_evict_result *out) {
    tkv_evict_config full;
    tkv_evict_result r;
    tkvi_ranks ranks;
    uint64_t limit = 0, word = 0;
    int i, n, alive = 0, sinks = 0, may_go = 0, go, equal = 0, older;
    if (!tkvi_evict_fill(cfg, &full)) return TKV_ERR_CONFIG;
    if (keep < 0 || !tkvi_view_is_sound(view) || (view->n > 0 && (!score || !victims))) return TKV_ERR_ARG;
    n = view->n;
    for (i = 0; i < n; i++)
        if (tkvi_is_live(view, i)) {
            if (!tkvi_is_finite(score[i])) return TKV_ERR_NONFINITE;
            alive++;
            sinks += tkvi_position_of(view, i) < full.sink_tokens;
        }
    if (full.policy == TKV_EVICT_NONE && alive > keep) return TKV_ERR_BUDGET;
    memset(&r, 0, sizeof r);
    tkvi_evict_protect(&full, cfg->recent_tokens, sinks, keep, &r);
    for (i = 0; i < tkvi_words(n); i++) victims[i] = 0; /* first a mask of tokens to keep */
    for (i = 0, older = 0; i < n; i++) {
        const int there = tkvi_is_live(view, i), pinned = view->pinned_mask && tkvi_has(view->pinned_mask, i);
        if (!there || pinned || older < r.sinks || older >= alive - r.recent) tkvi_mark(victims, i);
        else may_go++;
        older += there;
    }
    go = tkvi_max(0, tkvi_min(alive - keep, may_go));
    ranks.n = n;
    ranks.score = score;
    ranks.priority = view->priorities;
    ranks.without = victims;
    if (go > 0) limit = tkvi_select(&ranks, go, &equal);
    for (i = 0; i < n; i++) { /* overwrites a word after its last read */
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

TKV_API tkv_status tkv_select_victims(const tkv_evict_config *cfg, const tkv_evict_view *view, int keep,
                                      float *score, uint64_t *victims, tkv_evict_result *out) {
    tkv_status st;
    if (!TKVI_HAS_EVICT) return TKV_ERR_UNSUPPORTED;
    if (keep < 0 || (view && view->n > 0 && !victims)) return TKV_ERR_ARG;
    st = tkvi_score_tokens(cfg, view, score);
    return st ? st : tkvi_select_victims(cfg, view, score, keep, victims, out);
}

/* Number of tokens above which a layer with this budget evicts. cfg: filled */
static int64_t tkvi_evict_limit(const tkv_evict_config *cfg, int budget) {
    return (int64_t)((double)cfg->trigger * budget + .5);
}

/* Upper bound of the live tokens that no eviction for bytes takes from a list without pins: sinks and recent tokens of
 * the policy, and a block. Twice the recent ones, as tkvi_evict_protect protects them in half of `keep`. */
static int64_t tkvi_n_protected(const tkv_evict_config *cfg) {
    tkv_evict_config full;
    (void)tkvi_evict_fill(cfg, &full);
    return (int64_t)full.sink_tokens + 2 * (int64_t)full.recent_tokens + TKV_BLOCK_TOKENS;
}

/* The number of tokens to evict before `incoming` tokens join n tokens under a budget of `budget` tokens: 0, a batch,
 * or more if the budget requires it; never more than n. cfg is valid, the numbers are not negative. */
static int tkvi_evict_due(const tkv_evict_config *cfg, int n, int incoming, int budget) {
    tkv_evict_config full;
    int64_t limit, due;
    int batch;
    TKVI_ASSERT(n >= 0 && incoming >= 0 && budget >= 0);
    (void)tkvi_evict_fill(cfg, &full);
    limit = tkvi_evict_limit(&full, budget);
    due = (int64_t)n + incoming - limit;
    if (due <= 0) return 0;
    batch = full.batch ? full.batch : tkvi_max(1, tkvi_min(64, budget / 8));
    due = due > batch ? due : batch;
    return due < n ? (int)due : n;
}

/* >>budgets of layers: one line (rules/evict_policy.h) for each tkv_evict_shape. Every layer gets the whole part of
 * its share; tokens that are left go to the largest remainders. */
static int64_t tkvi_line_at(const tkvi_line *line, int l) { return line->first - l * line->fall; }

/* The share of layer l is proportional to n_layers - l. */
static tkvi_line tkvi_line_linear(const tkv_evict_budget *b) {
    tkvi_line line;
    line.base = 0;
    line.first = b->total * b->n_layers;
    line.fall = b->total;
    line.whole = (int64_t)b->n_layers * (b->n_layers + 1) / 2;
    return line;
}

/* Tokens that layers keep on average, on a line from the first to the last layer; rounded up. */
static int tkvi_mean_kept(const tkv_evict_config *cfg) {
    return (int)(((int64_t)cfg->keep_first + cfg->keep_last + 1) / 2);
}

/* Tokens that layer l of n keeps, on a line from the first to the last layer, if layers keep `mean` on average. */
static int tkvi_line_between(int first, int last, int mean, int l, int n) {
    const int64_t at = n > 1 ? (int64_t)first * (n - 1 - l) + (int64_t)last * l : (int64_t)first + last;
    const int64_t sum = ((int64_t)first + last) * (n > 1 ? n - 1 : 2);
    const double n_tokens = (double)at / (double)sum * 2.0 * mean + .5;
    return n_tokens < 1073741823.0 ? tkvi_max(1, (int)n_tokens) : 1073741823; /* 2^30 - 1: all */
}

/* In the order of tkv_evict_shape. */
static const tkvi_evict_line tkvi_evict_lines[] = {tkvi_line_uniform, tkvi_line_pyramid, tkvi_line_linear};

/* Returns the number of layers whose remainder is at least r. */
static int tkvi_line_count(const tkvi_line *line, int n_layers, int64_t r) {
    int l, count = 0;
    for (l = 0; l < n_layers; l++) count += tkvi_line_at(line, l) % line->whole >= r;
    return count;
}

TKV_API tkv_status tkv_split_evict_budget(const tkv_evict_budget *b, int *out) {
    tkv_evict_budget full;
    tkvi_line line;
    int64_t left, low = 0, high;
    int l, last, more;
    if (!TKVI_HAS_EVICT) return TKV_ERR_UNSUPPORTED;
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
        if (whole >= 1 << 30) return TKV_ERR_ARG; /* only first layers of the linear shape */
        left -= whole;
    }
    for (l = 0; l < full.n_layers; l++) out[l] = (int)(line.base + tkvi_line_at(&line, l) / line.whole);
    high = line.whole; /* bisects for the smallest remainder that at most `left` layers reach */
    while (low < high) {
        const int64_t mid = low + (high - low) / 2;
        if (tkvi_line_count(&line, full.n_layers, mid) <= left) high = mid;
        else low = mid + 1;
    }
    /* Layers with a remainder of at least low get one more token. So do the first `more` layers with low - 1. */
    more = (int)left - tkvi_line_count(&line, full.n_layers, low);
    for (l = 0; l < full.n_layers; l++) {
        const int64_t r = tkvi_line_at(&line, l) % line.whole;
        if (r >= low || (r == low - 1 && more-- > 0)) out[l]++;
    }
    /* LINEAR gives every layer a token: the last of the largest budgets gives one to each layer with 0. */
    for (l = full.n_layers - 1, last = 0; full.shape == TKV_EVICT_LINEAR && l > 0 && out[l] == 0; l--) {
        while (out[last + 1] == out[0]) last++; /* out[0] > 0: it ends at l */
        while (last > 0 && out[last] < out[0]) last--;
        out[last]--;
        out[l]++;
    }
    return TKV_OK;
}

#endif /* TKVI_RULES_EVICT_H */
