/*
 * test_everything.c - random calls of every function that changes a cache, under random plans, against a model.
 *
 * The model is plain arrays: the exact keys and values of each position, the positions reported as evicted, and
 * the positions to be recomputed. Allocators and stores fail at random. Stores sometimes return wrong bytes. The
 * model that recomputes sometimes stops halfway.
 *
 * After each call:
 *   - the cache passes its self-check;
 *   - memory is within the budget, and was during the call;
 *   - lengths and positions are those of the model, and each missing token had an event;
 *   - exact tokens are equal to the bit, and coded ones within the error of their formats;
 *   - a refused call has changed nothing.
 * Attention must match a double-precision computation from the values that tkv_read gives.
 *
 *     TKV_RANDOM_SEED=7 TKV_RANDOM_RUNS=1 TKV_RANDOM_OPS=90 ./test_everything     first seed, seeds, calls
 *     TKV_RANDOM_LOG=1      prints each call; without it the last ones before a failure
 *
 * A seed gives a plan and its calls. They are the same on every machine where formats code alike.
 */
#include "../tieredkv.h"
#include "kit.h"

#include <math.h>

enum {
    BLOCK = TKV_BLOCK_TOKENS,
    SEQS = 3,
    LAYERS = 2,
    HEADS = 4,
    MOST_ROW = 96,
    CHUNK = 120,
    LONGEST = 800,
    WORDS = (LONGEST + 63) / 64,
    QUERIES = 40,
    CHECKED = 4, /* the last ones of them */
    WINDOW = 150,
    PIECES = 64, /* of tkv_seq_list_blocks */
    PLANS = 8
};

/* >>the model */
typedef struct model_sequence {
    int len, step_len;
    int last;   /* positions from here on came last: they are exact */
    int behind; /* positions before have left the window */
    uint64_t gone[WORDS], away[WORDS], pinned[WORDS];
    float k[LONGEST * MOST_ROW], v[LONGEST * MOST_ROW];
} model_sequence;

static model_sequence told[SEQS][LAYERS];
static int in_step[SEQS], reserved[SEQS];
static int blocks_discarded[SEQS]; /* blocks were given up: an anchor that is one no more may be missing */

/* >>what is under test */
static tkv_config cfg;
static tkv_cache *kv;
static counting_allocator memory;
static guarded_buffer arena;
static test_store store;
static tkv_remat remat;
static size_t top, image_size;
static uint8_t image[1 << 18]; /* of tkv_save_calibration */
static tkv_rng rng;
static int in_place, k_row, v_row, clock_of_remat, exact_only;
static int plan;                                     /* of formats[] */
static double token_bound, mean_bound, worst_attend; /* the largest of |error|^2 / |token|^2, K or V */
static double worst[PLANS][2], worst_mean[PLANS][2]; /* the same, without a budget and with one */

/* What a call may do beside its work. */
static struct {
    int evict[SEQS];                    /* tokens may go, as an event will tell */
    int away[SEQS];                     /* blocks may be given up, to be recomputed */
    int back[SEQS];                     /* they may come back */
    int room;                           /* room is made */
    int evicted, wrong, loosely, tells; /* tells: an error leaves a sentence */
    char text[160];
} may;

static float k_in[SEQS * CHUNK * MOST_ROW], v_in[SEQS * CHUNK * MOST_ROW];
static float k_out[LONGEST * MOST_ROW], v_out[LONGEST * MOST_ROW];

static int has(const uint64_t *bits, int i) { return (int)(bits[i / 64] >> i % 64 & 1); }
static void mark(uint64_t *bits, int i) { bits[i / 64] |= (uint64_t)1 << i % 64; }
static void unmark(uint64_t *bits, int i) { bits[i / 64] &= ~((uint64_t)1 << i % 64); }
static int rand_below(int n) { return tkv_rng_below(&rng, n); }
static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }

static int shortest(int seq) {
    int l, n = LONGEST;
    for (l = 0; l < LAYERS; l++) n = least(n, told[seq][l].len);
    return n;
}

static int longest(int seq) {
    int l, n = 0;
    for (l = 0; l < LAYERS; l++) n = most(n, told[seq][l].len);
    return n;
}

static int is_missing(int seq) {
    int l, i, n = 0;
    for (l = 0; l < LAYERS; l++)
        for (i = 0; i < WORDS; i++) n += told[seq][l].away[i] != 0;
    return n;
}

static void cut(int seq, int layer, int len) {
    model_sequence *s = &told[seq][layer];
    for (; s->len > len; s->len--) {
        unmark(s->gone, s->len - 1);
        unmark(s->away, s->len - 1);
        unmark(s->pinned, s->len - 1);
    }
    s->last = least(s->last, s->len);
}

static void forget(int seq) {
    int l;
    for (l = 0; l < LAYERS; l++) {
        cut(seq, l, 0);
        told[seq][l].behind = 0;
    }
    in_step[seq] = reserved[seq] = blocks_discarded[seq] = 0;
}

static int window_of(int layer) { return cfg.model.window ? cfg.model.window : cfg.layers[layer].window; }

static void backwards(void *user, int n_tasks, tkv_task task, void *ctx) {
    (void)user;
    while (n_tasks-- > 0) task(ctx, n_tasks);
}

/* Values with seven bits, which every exact format holds. */
static void fresh(int n) {
    int i;
    for (i = 0; i < n * most(k_row, v_row); i++) {
        const int a = (int)(tkv_rng_gauss(&rng) * 32.0), b = (int)(tkv_rng_gauss(&rng) * 32.0);
        k_in[i] = (float)(a > 127 ? 127 : a < -127 ? -127 : a) / 32.0f;
        v_in[i] = (float)(b > 127 ? 127 : b < -127 ? -127 : b) / 32.0f;
    }
}

static void tell(int seq, int layer, int from, int n) {
    model_sequence *s = &told[seq][layer];
    if (!in_step[seq] && n) s->last = s->len;
    memcpy(s->k + s->len * k_row, k_in + from * k_row, (size_t)(n * k_row) * sizeof(float));
    memcpy(s->v + s->len * v_row, v_in + from * v_row, (size_t)(n * v_row) * sizeof(float));
    s->len += n;
}

static void sees(void *user, const tkv_event *e) {
    int i;
    (void)user;
    if (!e->text || !e->text[0]) may.wrong++;
    if (e->kind != TKV_EVENT_EVICT) return;
    may.evicted += e->n;
    if (!may.evict[e->seq]) may.wrong++;
    for (i = 0; i < e->n; i++) {
        model_sequence *s = &told[e->seq][e->layer];
        const int at = e->positions[i];
        if (at < 0 || at >= s->len || has(s->gone, at) || has(s->pinned, at) ||
            (i && at <= e->positions[i - 1])) {
            may.wrong++;
            continue;
        }
        mark(s->gone, at);
        unmark(s->away, at);
    }
}

/* >>what is there: one look at everything, with all that must hold of it */
enum { THERE, GONE, AWAY, BEHIND };

typedef struct view {
    int len[SEQS][LAYERS], level;
    size_t bytes, budget, learned;
    uint8_t state[SEQS][LAYERS][LONGEST];
    uint32_t values[SEQS][LAYERS][LONGEST];
} view;

static view before, now;

static uint32_t digest(uint32_t h, const float *x, int n) {
    int i;
    for (i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        h = (h ^ bits) * 0x9e3779b1u;
        h ^= h >> 15;
    }
    return h;
}

/* |x - y|^2 / |y|^2, at least as large as that of a small token. */
static double off(const float *x, const float *y, int n) {
    double err = 0.0, all = 0.0;
    int i;
    for (i = 0; i < n; i++) {
        const double d = (double)x[i] - (double)y[i];
        err += d * d;
        all += (double)y[i] * (double)y[i];
    }
    return err / (all > 0.25 * n ? all : 0.25 * n);
}

static void look_at(int seq, int layer) {
    model_sequence *s = &told[seq][layer];
    uint8_t *state = now.state[seq][layer];
    uint8_t tier[LONGEST];
    uint64_t alive[WORDS];
    tkv_layer_info info;
    double sum = 0.0;
    int coded = 0, count[4] = {0}, i, j, n, held;
    now.len[seq][layer] = tkv_get_length(kv, seq, layer);
    CHECK_EQ(now.len[seq][layer], s->len);
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    CHECK_EQ(live_mask_of(kv, seq, layer, 0, s->len, alive), TKV_OK);
    if (tkv_test_.bad) return;
    CHECK_MSG(info.expired >= 0 && info.expired <= most(0, window_of(layer) ? s->len - WINDOW : 0),
              "sequence %d, layer %d: %d of %d have left the window", seq, layer, info.expired, s->len);
    /* those that went before the window left them are counted as such, or as dropped */
    for (; s->behind < s->len; s->behind++) {
        tkv_tier t;
        if (info.expired == 0 || (has(alive, s->behind)) || has(s->gone, s->behind)) break;
        if (tier_of(kv, seq, layer, s->behind, &t) != TKV_ERR_RANGE) break;
        if (s->behind >= s->len - WINDOW) break;
    }
    blocks_discarded[seq] |= may.away[seq];
    for (i = 0; i < s->len; i++) {
        tkv_tier t = TKV_TIER_HOT;
        const tkv_status st = tier_of(kv, seq, layer, i, &t);
        tier[i] = (uint8_t)t;
        state[i] = (uint8_t)(st == TKV_OK              ? THERE
                             : st == TKV_ERR_NO_SOURCE ? AWAY
                             : has(s->gone, i)         ? GONE
                                                       : BEHIND);
        CHECK(st == TKV_OK || st == TKV_ERR_NO_SOURCE || st == TKV_ERR_RANGE);
        CHECK_EQ(has(alive, i), st != TKV_ERR_RANGE);
        if (state[i] == BEHIND)
            CHECK_MSG(window_of(layer) && i < s->len - WINDOW,
                      "sequence %d, layer %d: nobody told that token %d went", seq, layer, i);
        if (has(s->gone, i))
            CHECK_MSG(state[i] == GONE, "sequence %d, layer %d: token %d went and is there", seq, layer, i);
        if (state[i] == AWAY && !has(s->away, i)) {
            CHECK_MSG(may.away[seq] || (cfg.tiers.n_anchors && blocks_discarded[seq]),
                      "sequence %d, layer %d: token %d is missing now", seq, layer, i);
            mark(s->away, i);
        }
        if (state[i] != AWAY && has(s->away, i)) {
            CHECK_MSG(state[i] == BEHIND || may.back[seq], "sequence %d, layer %d: token %d came back", seq,
                      layer, i);
            unmark(s->away, i);
        }
        count[state[i]]++;
    }
    held = info.tokens[TKV_TIER_HOT] + info.tokens[TKV_TIER_WARM] + info.tokens[TKV_TIER_ARCHIVE];
    CHECK_EQ(held, count[THERE]);
    CHECK_EQ(info.discarded, count[AWAY]);
    CHECK_EQ(held + info.discarded + info.expired + info.evicted, s->len);
    for (i = 0; i < s->len; i += n) {
        for (n = 1; i + n < s->len && state[i + n] == state[i]; n++) {}
        if (state[i] != THERE) {
            for (j = i; j < i + n; j++) now.values[seq][layer][j] = 0;
            CHECK_EQ(tkv_read(kv, seq, layer, i, n, k_out, v_out),
                     state[i] == AWAY ? TKV_ERR_NO_SOURCE : TKV_ERR_RANGE);
            continue;
        }
        CHECK_EQ(tkv_read(kv, seq, layer, i, n, k_out, v_out), TKV_OK);
        for (j = i; j < i + n; j++) {
            const float *k = k_out + (j - i) * k_row, *v = v_out + (j - i) * v_row;
            const int same = memcmp(k, s->k + j * k_row, (size_t)k_row * sizeof *k) == 0 &&
                             memcmp(v, s->v + j * v_row, (size_t)v_row * sizeof *v) == 0;
            now.values[seq][layer][j] = digest(digest(1, k, k_row), v, v_row);
            if (same) continue;
            CHECK_MSG(tier[j] != TKV_TIER_HOT && j < s->last && !exact_only,
                      "sequence %d, layer %d: exact token %d changed", seq, layer, j);
            {
                const double a = off(k, s->k + j * k_row, k_row), b = off(v, s->v + j * v_row, v_row);
                const double e = a > b ? a : b;
                CHECK_MSG(e <= token_bound, "sequence %d, layer %d: token %d is off by %.3f and %.3f", seq,
                          layer, j, a, b);
                if (e > worst[plan][cfg.budget.bytes > 0]) worst[plan][cfg.budget.bytes > 0] = e;
                coded++;
                sum += e;
            }
        }
    }
    if (coded < BLOCK / 2) return;
    sum /= coded;
    if (sum > worst_mean[plan][cfg.budget.bytes > 0]) worst_mean[plan][cfg.budget.bytes > 0] = sum;
    CHECK_MSG(sum <= mean_bound, "sequence %d, layer %d: tokens are off by %.3f", seq, layer, sum);
}

static void look(void) {
    tkv_memory_info m;
    int s, l;
    before = now;
    sound(kv);
    CHECK_EQ(tkv_get_memory(kv, &m), TKV_OK);
    now.bytes = m.total;
    now.level = budget_of(kv).level;
    now.budget = budget_of(kv).budget;
    CHECK_EQ(tkv_save_calibration(kv, NULL, 0, &now.learned), TKV_OK);
    if (!in_place) CHECK_EQ(m.total, memory.held);
    if (now.budget) CHECK_LE(m.total, in_place ? cfg.budget.bytes : now.budget);
    if (!in_place && now.budget && before.budget)
        CHECK_LE(memory.most, now.budget > before.budget ? now.budget : before.budget);
    for (s = 0; s < SEQS; s++)
        for (l = 0; l < LAYERS && !tkv_test_.bad; l++) look_at(s, l);
}

/* Nothing is as it was not before. loosely: but blocks that are tighter, or were given up to be recomputed. */
static void unchanged(int loosely) {
    int s, l, i;
    for (s = 0; s < SEQS; s++)
        for (l = 0; l < LAYERS; l++) {
            CHECK_EQ(now.len[s][l], before.len[s][l]);
            for (i = 0; i < now.len[s][l] && i < before.len[s][l]; i++) {
                const int was = before.state[s][l][i], is = now.state[s][l][i];
                if (is == BEHIND && now.budget) continue; /* what has left every window may go */
                CHECK_MSG(was == is || (loosely && (is == AWAY || (is == GONE && may.evicted))),
                          "sequence %d, layer %d, token %d: state %d, was %d", s, l, i, is, was);
                if (!loosely)
                    CHECK_MSG(now.values[s][l][i] == before.values[s][l][i],
                              "sequence %d, layer %d: token %d reads otherwise", s, l, i);
            }
        }
    CHECK_EQ(now.budget, before.budget);
    if (loosely) return;
    CHECK_EQ(now.level, before.level);
    CHECK_EQ(now.learned, before.learned);
}

/* >>calls. Each is one call of the library that may change something; the ones that may fail for other reasons than
 * memory say for which. */
#define OR(status) (1u << -(int)TKV_ERR_##status)
enum { BYTES = 1u << 3 | 1u << 4 | 1u << 12 }; /* NOMEM, CAPACITY, BUDGET */

static int lazy(void) { return now.budget != 0; }

/* Room is made: others give way. used: a sequence that is not idle. */
static void makes_room(int used) {
    int s;
    may.room = lazy();
    for (s = 0; s < SEQS && lazy(); s++) {
        if (in_step[s]) continue;
        if (cfg.evict.policy) may.evict[s] = 1;
        if (cfg.budget.discard && s != used) may.away[s] = 1;
    }
}

static tkv_status does_append(int seq, int layer) {
    model_sequence *s = &told[seq][layer];
    const int lag = longest(seq) - s->len, room = CHUNK - (in_step[seq] ? s->len - s->step_len : 0);
    int n = lag && rand_below(8) ? lag : 1 + rand_below(rand_below(3) ? 12 : CHUNK);
    tkv_status st;
    n = least(least(n, room), LONGEST - s->len);
    if (n <= 0) return TKV_OK;
    fresh(n);
    makes_room(seq);
    if (cfg.evict.keep_tokens && !in_step[seq]) may.evict[seq] = 1;
    sprintf(may.text, "append %d tokens to sequence %d, layer %d", n, seq, layer);
    st = tkv_append(kv, seq, layer, k_in, v_in, n);
    if (!st) tell(seq, layer, 0, n);
    else
        CHECK_MSG(s->len + n > reserved[seq], "refused what is reserved, up to %d: %s", reserved[seq],
                  tkv_get_last_error(kv));
    if (shortest(seq) >= reserved[seq] && !in_step[seq]) reserved[seq] = 0;
    return st;
}

static tkv_status does_batch(int seq, int layer) {
    tkv_append_params p;
    tkv_rows rows[SEQS];
    tkv_status st;
    int s, n = 0;
    memset(&p, 0, sizeof p);
    for (s = 0; s < SEQS; s++) {
        const model_sequence *t = &told[s][layer];
        rows[s].seq = s;
        rows[s].n =
            least(least(rand_below(40), CHUNK - (in_step[s] ? t->len - t->step_len : 0)), LONGEST - t->len);
        if (rand_below(4) == 0) rows[s].n = 0;
        n += rows[s].n;
    }
    fresh(n);
    p.layer = layer;
    p.batch = rows;
    p.n_batch = SEQS;
    p.k = k_in;
    p.v = v_in;
    makes_room(seq);
    for (s = 0; s < SEQS; s++)
        if (cfg.evict.keep_tokens && !in_step[s]) may.evict[s] = 1;
    for (s = 0; s < SEQS; s++) may.away[s] = may.away[s] && rows[s].n == 0;
    sprintf(may.text, "append %d, %d, %d tokens to layer %d", rows[0].n, rows[1].n, rows[2].n, layer);
    st = tkv_append_ex(kv, &p);
    for (s = 0, n = 0; s < SEQS && !st; s++) {
        tell(s, layer, n, rows[s].n);
        n += rows[s].n;
        if (shortest(s) >= reserved[s] && !in_step[s]) reserved[s] = 0;
    }
    return st;
}

static tkv_status does_begin(int seq, int layer) {
    tkv_status st;
    int l;
    (void)layer;
    makes_room(seq);
    if (cfg.evict.keep_tokens) may.evict[seq] = 1;
    st = tkv_seq_begin(kv, seq);
    CHECK_EQ(st == TKV_ERR_STATE, in_step[seq]);
    for (l = 0; l < LAYERS && !st; l++) told[seq][l].step_len = told[seq][l].last = told[seq][l].len;
    if (!st) in_step[seq] = 1;
    return st;
}

static tkv_status does_end(int seq, int layer) { /* commit or abort */
    const int even = told[seq][0].len - told[seq][0].step_len == told[seq][1].len - told[seq][1].step_len;
    tkv_status st;
    int l;
    (void)layer;
    if (!in_step[seq]) return rand_below(2) ? tkv_seq_commit(kv, seq) : tkv_seq_abort(kv, seq);
    if (rand_below(3)) {
        sprintf(may.text, "commit sequence %d", seq);
        st = tkv_seq_commit(kv, seq);
        CHECK_EQ(st, even ? TKV_OK : TKV_ERR_STATE);
        if (!st) in_step[seq] = 0;
    } else {
        sprintf(may.text, "abort sequence %d", seq);
        st = tkv_seq_abort(kv, seq);
        CHECK_EQ(st, TKV_OK);
        for (l = 0; l < LAYERS; l++) cut(seq, l, told[seq][l].step_len);
        in_step[seq] = 0;
    }
    if (shortest(seq) >= reserved[seq]) reserved[seq] = 0;
    return st;
}

static tkv_status does_reserve(int seq, int layer) {
    const int n = 1 + rand_below(least(CHUNK, LONGEST - shortest(seq)));
    tkv_status st;
    (void)layer;
    makes_room(seq);
    sprintf(may.text, "reserve %d for sequence %d", n, seq);
    if (shortest(seq) + n > LONGEST) return TKV_OK;
    st = tkv_seq_reserve(kv, seq, n);
    if (!st) reserved[seq] = most(reserved[seq], shortest(seq) + n);
    return st;
}

static tkv_status does_truncate(int seq, int layer) {
    const int to = most(0, shortest(seq) - rand_below(90));
    tkv_status st;
    int l;
    (void)layer;
    sprintf(may.text, "truncate sequence %d to %d", seq, to);
    st = tkv_seq_truncate(kv, seq, to);
    for (l = 0; l < LAYERS && !st; l++) cut(seq, l, to);
    if (!st && cfg.evict.policy) reserved[seq] = 0;
    return st;
}

static tkv_status does_reset(int seq, int layer) {
    (void)layer;
    if (longest(seq) < LONGEST - 20 && rand_below(4)) return TKV_OK;
    sprintf(may.text, "reset sequence %d", seq);
    forget(seq);
    return tkv_seq_reset(kv, seq);
}

static tkv_status does_flush(int seq, int layer) {
    const int mode = rand_below(3);
    tkv_status st;
    int l;
    (void)layer;
    sprintf(may.text, "flush sequence %d, mode %d", seq, mode);
    st = tkv_seq_flush(kv, seq, (tkv_flush_mode)mode);
    for (l = 0; l < LAYERS && !st; l++) told[seq][l].last = told[seq][l].len;
    if (!st && mode) reserved[seq] = 0;
    return st;
}

static tkv_status does_budget(int seq, int layer) {
    const size_t bytes = rand_below(8) || in_place ? top - (size_t)rand_below((int)(top / 2)) : 0;
    tkv_status st;
    int s;
    (void)seq;
    (void)layer;
    makes_room(-1);
    if (now.budget == 0)
        for (s = 0; s < SEQS; s++)
            may.evict[s] = !in_step[s] && cfg.evict.policy, may.away[s] = !in_step[s] && cfg.budget.discard;
    sprintf(may.text, "budget %lu", (unsigned long)bytes);
    st = tkv_set_budget(kv, bytes);
    if (!st && (now.budget == 0) != (bytes == 0)) memset(reserved, 0, sizeof reserved);
    return st;
}

static tkv_status does_level(int seq, int layer) {
    const tkv_budget_info b = budget_of(kv);
    const int level = rand_below(b.n_levels + 1);
    const tkv_status st = tkv_set_level(kv, level);
    (void)seq;
    (void)layer;
    sprintf(may.text, "level %d", level);
    if (!st && !lazy()) memset(reserved, 0, sizeof reserved);
    return st;
}

static tkv_status does_hot_tokens(int seq, int layer) {
    const int n = 1 + rand_below(200);
    const tkv_status st = tkv_set_hot_tokens(kv, n);
    (void)seq;
    (void)layer;
    sprintf(may.text, "hot_tokens %d", n);
    if (!st && !lazy()) memset(reserved, 0, sizeof reserved);
    return st;
}

static tkv_status does_idle_work(int seq, int layer) {
    const int n = rand_below(20);
    int done = -1;
    tkv_status st;
    (void)seq;
    (void)layer;
    sprintf(may.text, "maintain %d", n);
    CHECK_EQ(tkv_report_pressure(kv, rand_below(3) ? 0.0f : (float)tkv_rng_uniform(&rng)), TKV_OK);
    st = tkv_maintain(kv, n, &done);
    CHECK(done >= 0 && done <= n);
    return st;
}

static tkv_status does_calibration(int seq, int layer) {
    size_t bytes = 0;
    const int what = rand_below(4);
    (void)seq;
    (void)layer;
    sprintf(may.text, "calibration %d", what);
    if (what == 0) return tkv_freeze_calibration(kv);
    if (what == 1) return tkv_refresh_calibration(kv);
    if (what == 2 || image_size == 0) {
        CHECK_EQ(tkv_save_calibration(kv, NULL, 0, &bytes), TKV_OK);
        if (bytes <= sizeof image && tkv_save_calibration(kv, image, sizeof image, &image_size) == TKV_OK)
            CHECK_EQ(image_size, bytes);
        return TKV_OK;
    }
    return tkv_load_calibration(kv, image, image_size);
}

/* >>attention, in double, of what can be read or (exactly) of what was told */
static double weights[LONGEST];

static void attend_in_double(int seq, int layer, int n, const float *q, const float *k, const float *v,
                             double *out) {
    const model_sequence *s = &told[seq][layer];
    const int kv_heads = cfg.model.n_kv_heads, dim = cfg.model.head_dim,
              v_dim = cfg.model.v_head_dim ? cfg.model.v_head_dim : dim;
    const int window = window_of(layer) ? WINDOW : LONGEST;
    int r, h, i, c;
    for (r = 0; r < n; r++)
        for (h = 0; h < HEADS; h++) {
            const float *qh = q + (r * HEADS + h) * dim;
            double *o = out + (r * HEADS + h) * v_dim, top_logit = -1e300, sum = 0.0;
            const int at = s->len - n + r, g = h / (HEADS / kv_heads);
            for (c = 0; c < v_dim; c++) o[c] = 0.0;
            for (i = most(0, at - window + 1); i <= at; i++) {
                double x = 0.0;
                if (now.state[seq][layer][i] != THERE) continue;
                for (c = 0; c < dim; c++) x += (double)qh[c] * (double)k[i * k_row + g * dim + c];
                weights[i] = x / sqrt((double)dim);
                if (weights[i] > top_logit) top_logit = weights[i];
            }
            for (i = most(0, at - window + 1); i <= at; i++) {
                if (now.state[seq][layer][i] != THERE) continue;
                weights[i] = exp(weights[i] - top_logit);
                sum += weights[i];
                for (c = 0; c < v_dim; c++) o[c] += weights[i] * (double)v[i * v_row + g * v_dim + c];
            }
            for (c = 0; c < v_dim && sum > 0.0; c++) o[c] /= sum;
        }
}

static tkv_status does_attend(int seq, int layer) {
    static float q[QUERIES * HEADS * MOST_ROW], out[QUERIES * HEADS * MOST_ROW];
    static double mine[CHECKED * HEADS * MOST_ROW], exact[CHECKED * HEADS * MOST_ROW];
    const model_sequence *s = &told[seq][layer];
    const int v_dim = cfg.model.v_head_dim ? cfg.model.v_head_dim : cfg.model.head_dim,
              n = least(s->len, 1 + rand_below(rand_below(2) ? QUERIES : CHECKED)), rows = least(n, CHECKED),
              skip = (n - rows) * HEADS;
    const int window = window_of(layer) ? WINDOW : LONGEST;
    const int count = rows * HEADS * v_dim, fails = store.fetch_fails, lies = store.fetch_lies,
              failed = store.failed;
    double own = 0.0, err = 0.0, all = 0.0, bound;
    int i, lacks = 0, any = 0, late = 0;
    tkv_status st;
    may.tells = 0;
    sprintf(may.text, "attend, %d queries of sequence %d, layer %d", n, seq, layer);
    tkv_rng_fill(&rng, q, (size_t)(n * HEADS * cfg.model.head_dim), 1.5);
    st = tkv_attend(kv, seq, layer, q, n, out);
    for (i = 0; i < s->len && n; i++) {
        any |= has(s->away, i);
        if (i < s->len - n - window + 1) continue;
        lacks |= has(s->away, i);
        late |= now.state[seq][layer][i] == BEHIND;
    }
    if (store.failed == failed)
        CHECK_MSG(late    ? st == TKV_ERR_RANGE
                  : lacks ? st == TKV_ERR_NO_SOURCE
                          : any || st == TKV_OK,
                  "%d, lacks %d", (int)st, lacks);
    if (st || n == 0) return st;
    CHECK_EQ(store.failed, failed);
    store.fetch_fails = store.fetch_lies = 0;
    for (i = 0; i < s->len; i++)
        if (now.state[seq][layer][i] == THERE)
            CHECK_EQ(tkv_read(kv, seq, layer, i, 1, k_out + i * k_row, v_out + i * v_row), TKV_OK);
    store.fetch_fails = fails;
    store.fetch_lies = lies;
    attend_in_double(seq, layer, rows, q + skip * cfg.model.head_dim, k_out, v_out, mine);
    attend_in_double(seq, layer, rows, q + skip * cfg.model.head_dim, s->k, s->v, exact);
    for (i = 0; i < count; i++) {
        own += (mine[i] - exact[i]) * (mine[i] - exact[i]);
        err += (mine[i] - (double)out[skip * v_dim + i]) * (mine[i] - (double)out[skip * v_dim + i]);
        all += exact[i] * exact[i];
        CHECK(tkv_test_is_finite((double)out[skip * v_dim + i]));
    }
    bound = 2e-3 * sqrt(all) + (cfg.host.precise ? 0.0 : 0.25 * sqrt(own)); /* a tenth, of many calls */
    if (bound > 0.0 && sqrt(err) / bound > worst_attend) worst_attend = sqrt(err) / bound;
    CHECK_MSG(sqrt(err) <= bound, "attention is off by %.3g, bound %.3g; its formats by %.3g of %.3g",
              sqrt(err), bound, sqrt(own), sqrt(all));
    return st;
}

/* >>what to keep */
static float scorer(void *user, const tkv_evict_view *of, int i) {
    (void)user;
    return (float)((of->positions ? of->positions[i] : i) * 37 % 101);
}

/* Does the policy read an input beside the positions? */
static int reads_input(tkv_evict_policy policy) {
    return policy != TKV_EVICT_NONE && policy != TKV_EVICT_SLIDING && policy != TKV_EVICT_FIFO &&
           policy != TKV_EVICT_RANDOM && policy != TKV_EVICT_USER;
}

static tkv_status does_evict(int seq, int layer) {
    static float scores[LONGEST];
    static signed char priority[LONGEST];
    uint64_t pinned[WORDS], held[LAYERS][WORDS];
    tkv_evict_params p;
    tkv_evict_config other;
    tkv_status st;
    int i, l, mad = 0;
    memset(&p, 0, sizeof p);
    memset(&other, 0, sizeof other);
    p.seq = seq;
    p.layer = rand_below(3) ? layer : TKV_ALL_LAYERS;
    p.keep = 1 + rand_below(longest(seq) + 1);
    other.policy = (tkv_evict_policy)(1 + rand_below(TKV_EVICT_COUNT - 1));
    other.scorer = scorer;
    if (rand_below(2)) p.evict = &other;
    for (i = 0; i < WORDS; i++) pinned[i] = tkv_rng_u64(&rng) & tkv_rng_u64(&rng) & tkv_rng_u64(&rng);
    if (rand_below(3) == 0) p.pinned_mask = pinned;
    if (rand_below(3) == 0) p.scores = scores;
    if (rand_below(3) == 0) p.priorities = priority;
    for (i = 0; i < LONGEST; i++)
        scores[i] = (float)tkv_rng_uniform(&rng), priority[i] = (signed char)(rand_below(9) / 8);
    if (p.scores && longest(seq) && rand_below(6) == 0) {
        mad = 1;
        scores[rand_below(longest(seq))] = tkv_test_float(0x7fc00000u);
    }
    memset(held, 0, sizeof held);
    for (l = 0; l < LAYERS; l++)
        for (i = 0; i < told[seq][l].len; i++)
            if (now.state[seq][l][i] != GONE && now.state[seq][l][i] != BEHIND && p.pinned_mask &&
                has(pinned, i))
                mark(held[l], i);
    may.evict[seq] = 1;
    sprintf(may.text, "evict from sequence %d, layer %d, keep %d, by %s%s%s", seq, p.layer, p.keep,
            tkv_get_name(TKV_NAME_EVICT_POLICY, p.evict ? other.policy : cfg.evict.policy),
            p.scores ? ", scores" : "", mad ? ", mad" : "");
    st = tkv_evict(kv, &p);
    if (st == TKV_ERR_NONFINITE) CHECK(mad);
    if (st == TKV_ERR_CONFIG) CHECK(p.evict && !p.scores && reads_input(other.policy)); /* not gathered */
    if (!cfg.evict.policy || in_step[seq]) CHECK_EQ(st, TKV_ERR_STATE);
    for (l = 0; l < LAYERS && !st; l++)
        for (i = 0; i < told[seq][l].len; i++)
            if (has(held[l], i))
                CHECK_MSG(!has(told[seq][l].gone, i), "layer %d: token %d was to stay", l, i);
    return st;
}

static tkv_status does_drop(int seq, int layer) {
    uint64_t victims[WORDS];
    const int percent = rand_below(100), n = rand_below(longest(seq) + 1), all = rand_below(3) == 0;
    tkv_status st;
    int i, l;
    memset(victims, 0, sizeof victims);
    for (i = 0; i < n; i++)
        if (rand_below(100) < percent) mark(victims, i);
    may.evict[seq] = 1;
    sprintf(may.text, "drop %d %% of %d from sequence %d, layer %d", percent, n, seq,
            all ? TKV_ALL_LAYERS : layer);
    st = evict_named(kv, seq, all ? TKV_ALL_LAYERS : layer, victims, n);
    if (!cfg.evict.policy || in_step[seq]) CHECK_EQ(st, TKV_ERR_STATE);
    for (l = 0; l < LAYERS && !st; l++) /* anchors stay */
        for (i = 0; i < least(n, told[seq][l].len) && !cfg.tiers.n_anchors && (all || l == layer); i++)
            if (has(victims, i) && !has(told[seq][l].pinned, i) && now.state[seq][l][i] != BEHIND)
                CHECK_MSG(has(told[seq][l].gone, i), "layer %d: token %d was to go", l, i);
    return st;
}

static tkv_status does_pin(int seq, int layer) {
    const int start = rand_below(LONGEST), n = rand_below(40), pinned = rand_below(3) != 0;
    const tkv_status st = tkv_seq_pin(kv, seq, start, n, pinned ? TKV_UNLIMITED : TKV_OFF);
    int i;
    sprintf(may.text, "%s %d from %d on in sequence %d", pinned ? "pin" : "unpin", n, start, seq);
    for (layer = 0; layer < LAYERS && !st; layer++)
        for (i = start; i < least(start + n, told[seq][layer].len); i++) {
            if (now.state[seq][layer][i] == GONE || now.state[seq][layer][i] == BEHIND) continue;
            if (pinned) mark(told[seq][layer].pinned, i);
            else unmark(told[seq][layer].pinned, i);
        }
    return st;
}

static tkv_status does_importance(int seq, int layer) {
    static float mass[LONGEST], found[LONGEST];
    static tkv_ranked best[20];
    uint64_t gone[WORDS];
    const int len = told[seq][layer].len, start = rand_below(len + 1), n = rand_below(len - start + 1),
              bad = n && rand_below(8) == 0;
    int i, count = -1;
    tkv_status st;
    for (i = 0; i < n; i++) mass[i] = (float)tkv_rng_uniform(&rng);
    if (bad) mass[rand_below(n)] = -1.0f;
    sprintf(may.text, "importance of %d from %d on in sequence %d, layer %d", n, start, seq, layer);
    st = tkv_add_scores(kv, seq, layer, start, n, mass);
    if (bad) CHECK(st == TKV_ERR_NONFINITE || st == TKV_ERR_CONFIG);
    if (tkv_get_importance(kv, seq, layer, start, n, found, gone) == TKV_OK)
        for (i = 0; i < n; i++) {
            const int state = now.state[seq][layer][start + i];
            CHECK_EQ(has(gone, i), state == GONE || state == BEHIND);
            CHECK(tkv_test_is_finite((double)found[i]) && (!has(gone, i) || found[i] >= 0.0f));
        }
    if (tkv_find_top_tokens(kv, seq, layer, COUNT(best), rand_below(2), best, &count) == TKV_OK) {
        CHECK(count >= 0 && count <= COUNT(best));
        for (i = 0; i < count; i++) {
            const int state = now.state[seq][layer][best[i].position];
            CHECK(state == THERE || state == AWAY);
            if (i) CHECK(best[i - 1].importance >= best[i].importance);
        }
    }
    return st;
}

/* >>outside RAM, and back */
static tkv_status does_spill(int seq, int layer) {
    const int n = rand_below(6), all = rand_below(2);
    int done = -1;
    const tkv_status st = tkv_offload(kv, seq, all ? TKV_ALL_LAYERS : layer, n, &done);
    sprintf(may.text, "spill %d blocks of sequence %d, layer %d", n, seq, all ? TKV_ALL_LAYERS : layer);
    CHECK(done >= 0 && done <= n * LAYERS);
    if (st == TKV_OK && done) CHECK(cfg.offload.write != NULL);
    return st;
}

static tkv_status does_promote(int seq, int layer) {
    const int len = told[seq][layer].len;
    int at = rand_below(len + 2), state, tries;
    tkv_status st;
    for (tries = 0; len && tries < 4 && (at >= len || now.state[seq][layer][at] == GONE); tries++)
        at = rand_below(len);
    state = at < len ? now.state[seq][layer][at] : (int)GONE;
    if (cfg.offload.write && rand_below(2))
        (void)tkv_offload(kv, seq, layer, rand_below(4), NULL); /* nobody sees that */
    may.back[seq] = 1;
    sprintf(may.text, "promote %d of sequence %d, layer %d", at, seq, layer);
    st = tkv_promote(kv, seq, layer, at);
    CHECK_EQ(st == TKV_ERR_RANGE, state == GONE || state == BEHIND);
    return st;
}

/* >>dropped to be recomputed */
static tkv_status does_vacate(int seq, int layer) {
    const int n = rand_below(400);
    int dropped = -1;
    tkv_status st;
    (void)layer;
    may.away[seq] = 1;
    sprintf(may.text, "give up %d of sequence %d", n, seq);
    st = tkv_seq_discard(kv, seq, n, &dropped);
    CHECK_EQ(st, in_step[seq] ? TKV_ERR_STATE : TKV_OK);
    CHECK(dropped >= 0 && dropped <= n);
    if (dropped == 0) may.away[seq] = 0;
    return st;
}

static tkv_status give(int seq, int layer, int start, int n) {
    const model_sequence *s = &told[seq][layer];
    return tkv_restore(kv, seq, layer, start, s->k + start * k_row, s->v + start * v_row, n);
}

static tkv_status does_give(int seq, int layer) {
    model_sequence *s = &told[seq][layer];
    int start = 0, n = 0, bad;
    float keep = 0.0f;
    tkv_status st;
    CHECK_EQ(tkv_seq_find_discarded(kv, seq, &start, &n), TKV_OK);
    CHECK_EQ(n > 0, is_missing(seq) > 0);
    if (rand_below(4) == 0) start = most(0, start + (rand_below(3) - 1) * BLOCK);
    if (rand_below(2)) n = least(n, BLOCK * (1 + rand_below(3)));
    if (start + n > s->len) return TKV_OK;
    bad = n && rand_below(12) == 0;
    if (bad) keep = s->v[start * v_row], s->v[start * v_row] = tkv_test_float(0x7f800000u);
    makes_room(seq);
    may.back[seq] = 1;
    sprintf(may.text, "give back %d from %d on to sequence %d, layer %d", n, start, seq, layer);
    st = give(seq, layer, start, n);
    if (bad) s->v[start * v_row] = keep;
    if (st == TKV_ERR_NONFINITE) CHECK(bad);
    return st;
}

static int asked, stops; /* of the one that recomputes; stops: gives so many layers, then fails */

static tkv_status compute(void *user, tkv_cache *cache, int seq, int first_layer, int n_layers, int start,
                          int n) {
    tkv_status st = TKV_OK;
    int l;
    CHECK(user == &asked && cache == kv && n > 0 && start + n <= longest(seq));
    asked++;
    for (l = first_layer; l < first_layer + n_layers && !st; l++) {
        if (stops && --stops == 0) return TKV_ERR_ISA;
        if (start > 0 && now.state[seq][l][start - 1] == THERE)
            (void)tkv_read(kv, seq, l, start - 1, 1, k_out, v_out);
        if (told[seq][l].len > start) st = give(seq, l, start, least(n, told[seq][l].len - start));
    }
    return st;
}

static tkv_status does_recompute(int seq, int layer) {
    int missing = -1;
    tkv_status st;
    (void)layer;
    makes_room(seq);
    may.back[seq] = 1;
    may.loosely = 2; /* what was given stays */
    asked = 0;
    stops = rand_below(3) ? 0 : 1 + rand_below(4);
    sprintf(may.text, "recompute sequence %d%s", seq, stops ? ", and stop" : "");
    st = tkv_seq_recompute(kv, seq, &remat, ++clock_of_remat, compute, &asked, &missing);
    if (st == TKV_ERR_ISA) CHECK(asked > 0);
    CHECK(missing >= 0);
    return st;
}

static tkv_status does_free(int seq, int layer) {
    static tkv_remat_block blocks[PIECES];
    static tkv_remat_action actions[PIECES];
    const size_t need = (size_t)rand_below(60000);
    size_t freed = 0;
    int n = -1;
    (void)layer;
    CHECK_EQ(tkv_seq_list_blocks(kv, seq, NULL, 0, &n), TKV_OK);
    CHECK(n >= 0 && n <= PIECES);
    may.away[seq] = 1;
    sprintf(may.text, "free %lu bytes of sequence %d", (unsigned long)need, seq);
    return tkv_seq_free_bytes(kv, seq, &remat, (float)rand_below(101) * 0.01f, need, blocks, actions, PIECES,
                              &freed);
}

/* >>what cannot be */
static tkv_status does_nonsense(int seq, int layer) {
    const float one = 1.0f, nan = tkv_test_float(0x7fc00000u);
    uint8_t junk[64];
    tkv_evict_params p;
    tkv_status st = TKV_OK;
    const int what = rand_below(14);
    const uint64_t one_mask = 1;
    int n;
    memset(&p, 0, sizeof p);
    memset(junk, 0x5a, sizeof junk);
    p.seq = seq;
    fresh(4);
    sprintf(may.text, "nonsense %d", what);
    if (what == 0) k_in[3] = nan, st = tkv_append(kv, seq, layer, k_in, v_in, 4);
    if (what == 1) st = tkv_append(kv, seq, layer, k_in, v_in, CHUNK + 1);
    if (what == 2) st = tkv_append(kv, seq, LAYERS, k_in, v_in, 4);
    if (what == 3) st = tkv_append(kv, SEQS, layer, k_in, v_in, 4);
    if (what == 4) st = tkv_seq_truncate(kv, seq, -1);
    if (what == 5) p.keep = -1, st = tkv_evict(kv, &p);
    if (what == 6) st = evict_named(kv, seq, layer, &one_mask, -4);
    if (what == 7) st = tkv_seq_pin(kv, seq, -1, 4, TKV_UNLIMITED);
    if (what == 8) st = tkv_load_calibration(kv, junk, sizeof junk);
    if (what == 9) st = tkv_restore(kv, seq, layer, LONGEST, &one, &one, 1);
    if (what == 10) st = tkv_seq_discard(kv, seq, -3, &n);
    if (what == 11) st = tkv_set_level(kv, TKV_MAX_LEVELS);
    if (what == 12) st = tkv_add_scores(kv, seq, layer, 0, LONGEST + 1, k_in);
    if (what == 13) st = tkv_seq_reserve(kv, seq, CHUNK + 1);
    CHECK(st != TKV_OK);
    return st;
}

enum { EVICTION = 1, STORE = 2 };

static const struct {
    const char *name;
    int weight; /* of 1,000 or so */
    int needs;  /* of the plan: without it an eighth of these */
    tkv_status (*does)(int seq, int layer);
    unsigned refusals; /* statuses beside ok */
} calls[] = {
    {"append", 400, 0, does_append, BYTES},
    {"batch", 50, 0, does_batch, BYTES},
    {"begin", 30, 0, does_begin, BYTES | OR(STATE)},
    {"end", 90, 0, does_end, OR(STATE)},
    {"reserve", 25, 0, does_reserve, BYTES},
    {"truncate", 40, 0, does_truncate, OR(STATE) | OR(INEXACT)},
    {"reset", 12, 0, does_reset, 0},
    {"flush", 15, 0, does_flush, BYTES | OR(STATE)},
    {"budget", 25, 0, does_budget, BYTES | OR(ARG)},
    {"level", 15, 0, does_level, OR(ARG)},
    {"hot tokens", 8, 0, does_hot_tokens, OR(ARG)},
    {"maintain", 15, 0, does_idle_work, 0},
    {"calibration", 15, 0, does_calibration, BYTES | OR(STATE)},
    {"attend", 120, 0, does_attend, OR(IO) | OR(DATA) | OR(NO_SOURCE) | OR(RANGE)},
    {"evict", 25, EVICTION, does_evict, OR(STATE) | OR(CONFIG) | OR(NONFINITE)},
    {"drop", 25, EVICTION, does_drop, OR(STATE)},
    {"pin", 20, EVICTION, does_pin, OR(STATE)},
    {"importance", 30, 0, does_importance, OR(CONFIG) | OR(NONFINITE)},
    {"spill", 40, STORE, does_spill, OR(IO) | OR(ARG)},
    {"promote", 40, STORE, does_promote, BYTES | OR(IO) | OR(DATA) | OR(NO_SOURCE) | OR(RANGE)},
    {"vacate", 25, 0, does_vacate, OR(STATE)},
    {"give", 40, 0, does_give, BYTES | OR(STATE) | OR(RANGE) | OR(NONFINITE)},
    {"recompute", 25, 0, does_recompute, BYTES | OR(STATE) | OR(ISA)},
    {"free", 10, 0, does_free, OR(STATE)},
    {"nonsense", 15, 0, does_nonsense, ~0u},
};
static long done_of[COUNT(calls)], refused_of[COUNT(calls)];
static long unstored, lost; /* calls that a store failed for; that cost tokens, too */
static char last_calls[8][200];

/* One call, and all that must hold after it. */
static void step(int number) {
    const int seq = rand_below(SEQS), layer = rand_below(LAYERS), fails = rand_below(5) == 0;
    const int has_it = (cfg.evict.policy ? EVICTION : 0) | (cfg.offload.write ? STORE : 0);
    int which, at = 0, failed, known;
    unsigned bit;
    tkv_status st;
    for (which = 0; which < COUNT(calls); which++) at += calls[which].weight;
    do {
        int point = rand_below(at);
        for (which = 0; point >= calls[which].weight; which++) point -= calls[which].weight;
    } while (calls[which].needs & ~has_it && rand_below(8));
    memset(&may, 0, sizeof may);
    may.tells = 1;
    sprintf(may.text, "%s of sequence %d", calls[which].name, seq);
    if (fails && !in_place && rand_below(2)) memory.closed = 1 + rand_below(4);
    if (fails && cfg.offload.write && rand_below(2)) store.store_fails = 1 + rand_below(5);
    if (fails && cfg.offload.write && rand_below(2)) store.fetch_fails = 1 + rand_below(8);
    if (fails && cfg.offload.write && rand_below(3) == 0) store.fetch_lies = 1 + rand_below(8);
    memory.refused = store.failed = 0;
    memory.most = memory.held;
    st = calls[which].does(seq, layer);
    failed = memory.refused + store.failed;
    if (st && failed && may.room) /* room was made for an append before it failed: what came last has aged */
        for (at = 0; at < SEQS * LAYERS; at++)
            told[at / LAYERS][at % LAYERS].last = told[at / LAYERS][at % LAYERS].len;
    memory.closed = store.store_fails = store.fetch_fails = store.fetch_lies = 0;
    sprintf(last_calls[number % COUNT(last_calls)], "%d: %s%s: %d", number, may.text,
            memory.closed ? ""
            : failed      ? ", with failures"
                          : "",
            (int)st);
    if (from_env("TKV_RANDOM_LOG", 0)) printf("\n    %s", last_calls[number % COUNT(last_calls)]);
    done_of[which]++;
    refused_of[which] += st != TKV_OK;
    bit = 1u << (-(int)st & 31);
    CHECK_MSG(!st || calls[which].refusals & bit, "%s: %d, %s", calls[which].name, (int)st,
              tkv_get_last_error(kv));
    if (st == TKV_ERR_NOMEM) CHECK(memory.refused > 0);
    if (st == TKV_ERR_IO || st == TKV_ERR_DATA) CHECK(store.failed > 0 || calls[which].refusals == ~0u);
    if (st == TKV_ERR_CAPACITY) CHECK(in_place || calls[which].refusals == ~0u);
    if (st == TKV_ERR_BUDGET) CHECK(now.budget > 0 || calls[which].refusals & OR(ARG));
    if (st && may.tells) CHECK_MSG(tkv_get_last_error(kv)[0] != 0, "%s says nothing", calls[which].name);
    CHECK_MSG(may.wrong == 0, "%d events are wrong", may.wrong);
    look();
    if (!st || tkv_test_.bad || may.loosely == 2) return;
    /* room was made, and then a store or the allocator failed: blocks are tighter, and tokens are gone where it
     * was the allocator, or, seldom, the store */
    known = failed && may.room;
    if (!known) CHECK_EQ(may.evicted, 0);
    unstored += known && !memory.refused;
    lost += known && !memory.refused && may.evicted;
    unchanged(known || may.loosely);
}

/* >>plans */
static const struct {
    tkv_format_pair warm, archive;
    double token, mean; /* bounds */
} formats[PLANS + 1] =
    {/* seen in 1,500 runs: two thirds of these */
     {{TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, {TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT}, 0.75, 0.4},
     {{TKV_F16, TKV_F16}, {TKV_F16, TKV_F16}, 0.0, 0.0},
     {{TKV_KIVI4, TKV_KIVI4}, {TKV_KIVI2, TKV_KIVI2}, 1.1, 0.5},
     {{TKV_KVQUANT4, TKV_KVQUANT4}, {TKV_KVQUANT3, TKV_KVQUANT3}, 0.45, 0.2},
     {{TKV_Q8, TKV_Q8}, {TKV_Q8, TKV_Q8}, 0.0002, 0.0002},
     {{TKV_INT8, TKV_FP8_E4M3}, {TKV_FP4, TKV_INT4}, 0.05, 0.02},
     {{TKV_SQUAT4, TKV_KIVI4}, {TKV_SUBSPACE4, TKV_SUBSPACE2}, 0.25, 0.12},
     {{TKV_A40, TKV_R40}, {TKV_A25, TKV_R20}, 0.9, 0.4},
     {{TKV_A40, TKV_R40}, {TKV_A20, TKV_R15}, 2.0, 0.7}}; /* the last one: of a budget's ladder */

static void plan_of(uint64_t seed) {
    static const int kv_heads[] = {2, 1, 4, 2}, dims[] = {32, 64, 16, 48}, v_dims[] = {0, 32, 0, 16};
    static tkv_layer_config layers[LAYERS];
    const int shape = rand_below(4);
    cfg = shape_of(LAYERS, HEADS, kv_heads[shape], dims[shape], SEQS, CHUNK);
    cfg.model.v_head_dim = v_dims[shape];
    k_row = kv_heads[shape] * dims[shape];
    v_row = kv_heads[shape] * (v_dims[shape] ? v_dims[shape] : dims[shape]);
    plan = (int)(seed % PLANS);
    token_bound = formats[plan].token;
    mean_bound = formats[plan].mean;
    cfg.tiers.warm = formats[plan].warm;
    cfg.tiers.archive = formats[plan].archive;
    if (formats[plan].warm.k == TKV_KVQUANT4 && rand_below(2)) cfg.model.rope.dim = dims[shape];
    else cfg.format.kvquant = TKV_KVQUANT_POST_ROPE;
    cfg.tiers.hot_tokens = rand_below(3) ? 0 : 1 + rand_below(200);
    cfg.tiers.warm_tokens = 1 + rand_below(200);
    if (rand_below(4) == 0) cfg.tiers.sink_tokens = rand_below(2) ? TKV_OFF : 1 + rand_below(12);
    cfg.host.precise = rand_below(3) == 0;
    cfg.meter.heads = rand_below(4) == 0 ? 2 : 0;
    cfg.host.on_event = sees;
    if (rand_below(3)) cfg.budget.bytes = 150000 + (size_t)rand_below(500000);
    exact_only = cfg.budget.bytes ? rand_below(4) == 0 : token_bound <= 0.0;
    if (exact_only)
        cfg.budget.pressure.max_level =
            TKV_OFF; /* nothing is coded, under a budget: then the other resorts */
    if (cfg.budget.bytes && formats[PLANS].token > token_bound) token_bound = formats[PLANS].token;
    if (cfg.budget.bytes && formats[PLANS].mean > mean_bound) mean_bound = formats[PLANS].mean;
    if (rand_below(3)) cfg.evict.policy = (tkv_evict_policy)(1 + seed / PLANS % (TKV_EVICT_COUNT - 1));
    cfg.evict.scorer = scorer;
    if (cfg.evict.policy && rand_below(3) == 0) cfg.evict.keep_tokens = 70 + rand_below(300);
    if (cfg.evict.policy && rand_below(3) == 0) cfg.evict.batch = 1 + rand_below(100);
    if (rand_below(2)) cfg.importance.sample_every = 1 + rand_below(4);
    cfg.importance.strategy = (tkv_importance_strategy)rand_below(TKV_IMPORTANCE_COUNT);
    if (rand_below(4) == 0 && cfg.tiers.sink_tokens != TKV_OFF) cfg.tiers.n_anchors = 1 + rand_below(16);
    memset(layers, 0, sizeof layers);
    if (!cfg.tiers.n_anchors && rand_below(4) == 0) {
        if (rand_below(2)) cfg.model.window = WINDOW;
        else layers[1].window = WINDOW;
    }
    if (!exact_only && rand_below(4) == 0) {
        layers[0].hot_tokens = rand_below(2) ? TKV_UNLIMITED : 30;
        layers[1].archive = formats[2].archive;
        token_bound = formats[PLANS].token;
        mean_bound = formats[PLANS].mean;
    }
    cfg.layers = layers;
    if (rand_below(4) == 0) cfg.host.parallel_for = backwards;
    cfg.budget.discard = rand_below(2);
    if (rand_below(2)) {
        test_store_for(&store, &cfg);
        cfg.offload.keep_exact = rand_below(2);
    }
    in_place = rand_below(4) == 0;
    if (in_place) cfg.limits.max_tokens = LONGEST;
    else cfg.host.allocator = counting_allocator_of(&memory);
}

static void begin(void) {
    tkv_remat_config r;
    tkv_status st = TKV_ERR_BUDGET;
    char reason[200] = "";
    size_t bytes;
    kv = NULL;
    CHECK_EQ(tkv_validate_config(&cfg, reason, sizeof reason), TKV_OK);
    if (tkv_test_.bad) printf("    %s\n", reason);
    for (; st == TKV_ERR_BUDGET; cfg.budget.bytes += 50000) { /* some plans need more to begin with */
        st = in_place ? tkv_get_required_bytes(&cfg, &bytes, NULL) : tkv_create(&cfg, &kv);
        if (st != TKV_ERR_BUDGET) break;
    }
    top = cfg.budget.bytes ? cfg.budget.bytes : 500000;
    if (in_place) kv = make_in(&cfg, &arena, (size_t)rand_below(64));
    if (!kv) {
        printf("no cache: %d\n", (int)st);
        exit(2);
    }
    memset(&r, 0, sizeof r);
    r.n_layers = LAYERS;
    r.n_heads = HEADS;
    r.head_dim = cfg.model.head_dim;
    r.layer_params = 1e6;
    r.min_materialized = 128;
    CHECK_EQ(tkv_init_remat(&remat, &r, NULL, 0), TKV_OK);
    r.step_flops = 4.0 * flops_of(&remat, BLOCK);
    CHECK_EQ(tkv_init_remat(&remat, &r, NULL, 0), TKV_OK);
    clock_of_remat = 0;
    image_size = 0;
}

static void run(int seed, int ops) {
    static char text[4000];
    int i, s;
    memset(&cfg, 0, sizeof cfg);
    memset(&memory, 0, sizeof memory);
    memset(&arena, 0, sizeof arena);
    memset(&store, 0, sizeof store);
    memset(&may, 0, sizeof may);
    memset(last_calls, 0, sizeof last_calls);
    for (s = 0; s < SEQS; s++) forget(s);
    rng = tkv_rng_seed((uint64_t)seed);
    plan_of((uint64_t)seed);
    begin();
    look();
    for (i = 0; i < ops && !tkv_test_.bad; i++) {
        step(i);
        if (in_place && i % 50 == 0) borders(&arena);
    }
    if (tkv_test_.bad) {
        printf("    TKV_RANDOM_SEED=%d TKV_RANDOM_RUNS=1 TKV_RANDOM_OPS=%d; calls:", seed, i);
        for (s = most(0, i - COUNT(last_calls)); s < i; s++)
            printf("\n    %s", last_calls[s % COUNT(last_calls)]);
        printf("\n    %s", tkv_print_config(&cfg, 1, text, sizeof text, NULL) ? "" : text);
        printf("\n");
    }
    tkv_destroy(kv);
    if (in_place) borders(&arena);
    else CHECK_EQ(memory.held, 0);
    free(arena.raw);
    if (cfg.offload.write) test_store_end(&store);
}

TEST(everything) {
    const int first = from_env("TKV_RANDOM_SEED", 1);
    const int runs = from_env("TKV_RANDOM_RUNS", tkv_test_quick() ? 24 : 96);
    const int ops = from_env("TKV_RANDOM_OPS", 0); /* 0: some runs are long */
    int i;
    for (i = 0; i < runs && !tkv_test_.bad; i++) run(first + i, ops ? ops : (first + i) % 6 == 5 ? 600 : 120);
    printf("\n    seeds %d to %d; attention is off by %.2f of its bound at most", first, first + runs - 1,
           worst_attend);
    for (i = 0; i < PLANS; i++) /* without a budget, and with one */
        printf("\n    %s/%s: tokens are off by %.4f, %.4f at most, layers by %.4f, %.4f",
               formats[i].warm.k ? tkv_get_name(TKV_NAME_FORMAT, formats[i].warm.k) : "default",
               formats[i].warm.v ? tkv_get_name(TKV_NAME_FORMAT, formats[i].warm.v) : "default", worst[i][0],
               worst[i][1], worst_mean[i][0], worst_mean[i][1]);
    for (i = 0; i < COUNT(calls); i++)
        printf("%s%s %ld, refused %ld", i % 5 ? "; " : "\n    ", calls[i].name, done_of[i], refused_of[i]);
    printf("\n    a store failed for %ld calls; %ld of them cost tokens\n", unstored, lost);
    CHECK_LE(lost * 50, unstored + 50);
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(everything);
    return tkv_test_end();
}
