/*
 * test_marks.c - what each event does to each mark of a token, against a plain model with one struct for each token.
 *
 * Marks: gone, named sink, pinned, pinned with an end, anchored, listed in a packed block, attention scores. Events:
 * everything that changes, moves, codes or stores tokens. Each pair is a cell of a table. Systematic tests bring a row
 * of tokens with the mark to the event, random ones play long games. After each event the cache must answer as the
 * model: indices, positions, values, what is gone, tiers of sinks, scores. Pins and sinks are seen by what an eviction
 * of everything leaves. A cell that no event has reached fails.
 *
 *     TKV_RANDOM_OPS=100000 TKV_RANDOM_SEED=7 ./test_marks table     events for each config, first seed
 */
#include "kit.h"

enum {
    LAYERS = 2,
    DIM = 4,
    SEQS = 3,
    MOST = 700,
    CHUNK = 64,
    SINKS = 4,
    WINDOW = 100,
    ANCHORS = 8,
    MAX_ID = 2048
};

/* MIXED: layer 1 alone has a window, and no sinks beyond it, so it can be without any token. */
typedef enum kind { PLAIN = 0, WINDOWED, MIXED, STORED, ANCHORED_KIND, KINDS } kind;
typedef enum mark { GONE = 0, SINK, PINNED, PINNED_UNTIL, ANCHORED, LISTED, SCORED, MARKS } mark;
typedef enum event {
    APPEND = 0,
    CUT,
    REMOVE,
    SHIFT,
    UNITE,
    COPY,
    KEEP,
    SLIDE,
    FORK,
    REORDER,
    RECODE,
    JOIN,
    EVICT,
    EXPIRE,
    OFFLOAD,
    PROMOTE,
    DISCARD,
    RESTORE,
    SAVE,
    ABORT,
    EVENTS
} event;
static const char *const mark_name[] = {"gone", "sink", "pinned", "until", "anchor", "listed", "score"};
static const char *const event_name[] = {"append",  "cut",     "remove",  "shift",         "unite",
                                         "copy",    "keep",    "slide",   "fork",          "reorder",
                                         "recode",  "join",    "evict",   "expire",        "offload",
                                         "promote", "discard", "restore", "save and load", "abort"};

/* >>model */
typedef struct token {
    int id, position;
    int gone, sink, pinned, anchored;
    /* Lengths at which a pin ends; 0: none. The longest end of a block counts for all its pins, and the model knows no
     * blocks: until_most is the latest end that the token can have. */
    int until, until_most;
    double low, high; /* bounds of the score now */
    int stamp;        /* length when it was last scored */
} token;

typedef struct row {
    token t[MOST];
    int n, is_listed; /* is_listed: 1 if evicted tokens were coded, so that slots have moved */
    /* 1 if it began as a copy, or goes on where all of its sinks are gone: its first tokens may be no sinks. */
    int may_lack_sinks;
} row;

static row model[SEQS][LAYERS];
static int next_of[SEQS]; /* position of the next token, in every layer */
static kind now;
static tkv_cache *kv;
static test_store store;
static int next_id, hits[EVENTS][MARKS], refusals[EVENTS];
static tkv_rng rng;
static unsigned seed;
static event event_now; /* of the cell */
static mark mark_now;
static int step_number;
static const double decay = .98;

static int rand_below(int n) { return n > 0 ? tkv_rng_below(&rng, n) : 0; }
static int length_of(int seq) { return model[seq][0].n; }
static float value_of(int id, int layer) { return (float)(id % MAX_ID) * (layer ? -1.0f : 1.0f); }
static int has_window(int layer) { return now == WINDOWED || (now == MIXED && layer == 1); }

/* The position that follows the first len tokens of a sequence: of the last one that is there, in any layer, and as
 * many more as are gone behind it. If none is, the first one behind them tells it. */
static int position_behind(int seq, int len) {
    int layer, i, last = -1, position = 0;
    for (layer = 0; layer < LAYERS; layer++)
        for (i = len - 1; i > last; i--)
            if (!model[seq][layer].t[i].gone) {
                position = model[seq][layer].t[i].position - i;
                last = i;
            }
    for (i = len; len > 0 && last < 0 && i < length_of(seq); i++) /* none is: then the first one behind */
        for (layer = 0; layer < LAYERS; layer++)
            if (!model[seq][layer].t[i].gone) {
                position = model[seq][layer].t[i].position - i;
                last = i;
            }
    return len + position > 0 ? len + position : 0;
}

static int may_stay(const token *t, int len) { return t->sink || t->pinned || t->until_most > len; }
static int must_stay(const token *t, int len) { return t->sink || t->pinned || t->until > len; }

/* A token loses everything but its index. */
static void lose(token *t) {
    t->gone = 1;
    t->sink = t->pinned = t->anchored = t->until = t->until_most = 0;
    t->low = t->high = 0.0;
}

/* Ends pins, and lets pins of one row have the latest of their ends. */
static void settle_pins(row *r) {
    int i, latest = 0;
    for (i = 0; i < r->n; i++) {
        token *t = &r->t[i];
        if (t->until <= r->n) t->until = 0;
        if (t->until_most <= r->n) t->until_most = 0;
        if (t->until_most > latest) latest = t->until_most;
    }
    for (i = 0; i < r->n; i++)
        if (r->t[i].until_most) r->t[i].until_most = latest;
}

/* The row gets shorter. Scores of blocks that were scored behind the new end do not get older before it. */
static void rewind_scores(row *r, int old_len) {
    int i;
    for (i = 0; i < r->n; i++) {
        token *t = &r->t[i];
        if (t->stamp < old_len) t->high *= pow(decay, (r->n > t->stamp ? r->n : t->stamp) - old_len);
        if (t->stamp > r->n) t->stamp = r->n;
    }
}

static void cut_row(row *r, int len) {
    const int old_len = r->n;
    if (len >= old_len) return;
    r->n = len;
    rewind_scores(r, old_len);
}

static int has_mark(const row *r, mark m) {
    int i, any = 0;
    if (m == LISTED) return r->is_listed && r->n;
    for (i = 0; i < r->n; i++) {
        const token *t = &r->t[i];
        any |= m == GONE           ? t->gone
               : m == SINK         ? t->sink
               : m == PINNED       ? t->pinned
               : m == ANCHORED     ? t->anchored
               : m == PINNED_UNTIL ? t->until > r->n
                                   : t->low > 0.0;
    }
    return any;
}

/* Counts the cells of an event that is about to happen to a sequence. marks: of before. */
static unsigned marks_of(int seq) {
    unsigned marks = 0;
    int m, layer;
    for (layer = 0; layer < LAYERS; layer++)
        for (m = 0; m < MARKS; m++)
            if (has_mark(&model[seq][layer], (mark)m)) marks |= 1u << m;
    return marks;
}

static int count_hits(event e, unsigned marks) {
    int m;
    for (m = 0; m < MARKS; m++) hits[e][m] += (int)(marks >> m & 1u);
    return 1;
}

static int refuse(event e) {
    refusals[e]++;
    return 0;
}

/* >>comparison */
#define CHECK_STEP(cond, seq, layer, i)                                                                      \
    CHECK_MSG(cond, "%s on %s, config %d, seed %u, step %d: sequence %d, layer %d, index %d",                \
              event_name[event_now], mark_name[mark_now], (int)now, seed, step_number, seq, layer, i)

static void check_value(int seq, int layer, int i) {
    const token *t = &model[seq][layer].t[i];
    const double want = (double)value_of(t->id, layer),
                 bound = now == ANCHORED_KIND && !t->anchored ? 80.0 : 0.0;
    float k[DIM], v[DIM];
    CHECK_STEP(tkv_read(kv, seq, layer, i, 1, k, v) == TKV_OK, seq, layer, i);
    CHECK_STEP(fabs((double)k[0] - want) <= bound && fabs((double)v[1] + want) <= bound, seq, layer, i);
}

/* Tokens behind the window may expire, sinks and named ones excepted. */
static int may_expire(const row *r, int i, int last) {
    return (now == MIXED || ((i >= SINKS || r->may_lack_sinks) && !r->t[i].sink)) &&
           r->t[i].position <= last - WINDOW;
}

static void take_expired(int seq, int layer, const uint8_t *tier) {
    row *r = &model[seq][layer];
    int i;
    for (i = 0; i < r->n; i++)
        if (tier[i] == TKV_TOKEN_GONE && !r->t[i].gone && has_window(layer) &&
            may_expire(r, i, next_of[seq] - 1))
            lose(&r->t[i]);
}

static void check_row(int seq, int layer) {
    static uint8_t tier[MOST];
    static int position[MOST];
    static float score[MOST];
    row *r = &model[seq][layer];
    tkv_layer_info info;
    int i, sinks = 0, live = 0;
    CHECK_STEP(tkv_get_length(kv, seq, layer) == r->n, seq, layer, r->n);
    if (tkv_get_length(kv, seq, layer) != r->n) exit(1);
    CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, r->n, tier), TKV_OK);
    CHECK_EQ(tkv_get_positions(kv, seq, layer, 0, r->n, position), TKV_OK);
    CHECK_EQ(tkv_get_importance(kv, seq, layer, 0, r->n, score, NULL), TKV_OK);
    take_expired(seq, layer, tier);
    for (i = 0; i < r->n; i++) {
        token *t = &r->t[i];
        CHECK_STEP((tier[i] == TKV_TOKEN_GONE) == t->gone, seq, layer, i);
        sinks += t->sink;
        live += !t->gone;
        if (t->gone) t->position = position[i]; /* that of a neighbour */
        CHECK_STEP(position[i] == t->position, seq, layer, i);
        CHECK_STEP(!(t->sink || t->anchored) || tier[i] == TKV_TIER_HOT, seq, layer, i);
        if (tier[i] < TKV_TIER_COUNT)
            CHECK_STEP((double)score[i] >= t->low * .999 - 2e-3 && (double)score[i] <= t->high * 1.001 + 2e-3,
                       seq, layer, i);
        if (tier[i] < TKV_TIER_COUNT) check_value(seq, layer, i);
    }
    CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
    CHECK_STEP(info.named_sinks == sinks, seq, layer, sinks);
    CHECK_STEP(info.evicted + info.expired == r->n - live, seq, layer, live);
}

/* An append of no token is refused unless it is at the next position. */
static void check_next_position(int seq, int layer) {
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.layer = layer;
    p.positions = &next_of[seq];
    CHECK_STEP(tkv_append_ex(kv, &p) == TKV_OK, seq, layer, next_of[seq]);
}

static void check_all(void) {
    int seq, layer;
    check_cache(kv);
    for (seq = 0; seq < SEQS; seq++)
        for (layer = 0; layer < LAYERS; layer++) {
            check_row(seq, layer);
            check_next_position(seq, layer);
        }
}

/* >>a cache */
static tkv_config make_config(kind which) {
    tkv_config cfg = make_sized_config(LAYERS, 1, 1, DIM, SEQS, 512);
    cfg.limits.max_tokens = MOST;
    cfg.tiers.sink_tokens = SINKS;
    cfg.tiers.hot_tokens = which == PLAIN ? 600 : 64;
    cfg.tiers.warm_tokens = TKV_OFF;
    cfg.tiers.hot = pair_of(TKV_F32, TKV_F32);
    cfg.tiers.warm = cfg.tiers.archive = pair_of(TKV_F16, TKV_F16); /* exact for whole numbers to 2,048 */
    cfg.evict.policy = TKV_EVICT_H2O;
    cfg.evict.sink_tokens = TKV_OFF;
    cfg.importance.sample_every = 1;
    cfg.importance.decay = (float)decay;
    cfg.importance.attention = 1.0f;
    cfg.importance.recency = TKV_ZERO;
    cfg.model.rope.dim = which == ANCHORED_KIND ? 0 : TKV_OFF;
    if (which == WINDOWED) {
        cfg.model.window = WINDOW;
        cfg.model.window_sinks = 1;
    }
    if (which == MIXED) {
        static tkv_layer_config layers[LAYERS];
        layers[1].window = WINDOW;
        cfg.layers = layers;
    }
    if (which == ANCHORED_KIND) {
        cfg.tiers.archive = cfg.tiers.warm = pair_of(TKV_KIVI2, TKV_KIVI2);
        cfg.tiers.n_anchors = ANCHORS;
    }
    return cfg;
}

static void begin(kind which) {
    tkv_config cfg = make_config(which);
    now = which;
    if (which == STORED || which == ANCHORED_KIND) attach_test_store(&store, &cfg);
    kv = create_cache(&cfg);
    memset(model, 0, sizeof model);
    memset(next_of, 0, sizeof next_of);
    next_id = 1;
    step_number = 0;
}

static void end(void) {
    check_all();
    tkv_destroy(kv);
    if (now == STORED || now == ANCHORED_KIND) destroy_test_store(&store);
}

/* >>events. Each plays on the cache and on the model, and returns 1 if it happened. */
static void fill_value_rows(const row *r, int layer, int first, int n, float *k, float *v) {
    int t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < DIM; c++) {
            k[t * DIM + c] = value_of(r->t[first + t].id, layer);
            v[t * DIM + c] = -k[t * DIM + c];
        }
}

static void append_to_cache(int seq, int first, int n) {
    static float k[512 * DIM], v[512 * DIM];
    int layer;
    tkv_append_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.n = n;
    p.k = k;
    p.v = v;
    for (layer = 0; layer < LAYERS; layer++) {
        p.layer = layer;
        fill_value_rows(&model[seq][layer], layer, first, n, k, v);
        CHECK_EQ(tkv_append_ex(kv, &p), TKV_OK);
    }
}

/* Takes what expired with the last call, so that the events that follow see it. */
static int take_all_expired(int seq) {
    static uint8_t tier[MOST];
    int layer, i, n = 0;
    for (layer = 0; layer < LAYERS; layer++) {
        row *r = &model[seq][layer];
        for (i = 0; i < r->n; i++) n -= r->t[i].gone;
        CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, r->n, tier), TKV_OK);
        if (has_window(layer)) take_expired(seq, layer, tier);
        for (i = 0; i < r->n; i++) n += r->t[i].gone;
    }
    return n;
}

static int play_append(int seq, int n) {
    const int first = length_of(seq), position = next_of[seq];
    const unsigned marks = marks_of(seq);
    int layer, i;
    if (n <= 0 || first + n > MOST || position > 1000000) return refuse(APPEND);
    for (layer = 0; layer < LAYERS; layer++) {
        row *r = &model[seq][layer];
        int n_live = first >= SINKS;
        for (i = 0; i < first; i++) {
            n_live += !r->t[i].gone;
            r->t[i].low *= pow(decay, n);
            r->t[i].high *= pow(decay, n);
        }
        for (i = 0; i < n; i++) {
            token *t = &r->t[first + i];
            memset(t, 0, sizeof *t);
            t->id = next_id + i;
            t->position = position + i;
        }
        r->may_lack_sinks = first > 0 && (r->may_lack_sinks || n_live < 1);
        r->n += n;
    }
    next_id = (next_id + n) % MAX_ID;
    next_of[seq] += n;
    append_to_cache(seq, first, n);
    if (take_all_expired(seq)) count_hits(EXPIRE, marks);
    for (layer = 0; layer < LAYERS; layer++) settle_pins(&model[seq][layer]);
    return count_hits(APPEND, marks);
}

static int play_cut(int seq, int len) {
    const unsigned marks = marks_of(seq);
    int layer;
    if (len >= length_of(seq)) return refuse(CUT);
    if (tkv_seq_truncate(kv, seq, len)) return refuse(CUT);
    next_of[seq] = position_behind(seq, len);
    for (layer = 0; layer < LAYERS; layer++) cut_row(&model[seq][layer], len);
    return count_hits(CUT, marks);
}

/* A removal. The tokens in front of those that a range takes from the end decide the new length. */
static int play_remove(int seq, int first, int last) {
    const unsigned marks = marks_of(seq);
    int layer, i, len = 0, any = 0;
    tkv_status st;
    for (layer = 0; layer < LAYERS; layer++) {
        const row *r = &model[seq][layer];
        const int reaches = r->n && next_of[seq] > first && next_of[seq] <= last;
        int stays = reaches ? 0 : r->n;
        for (i = 0; i < r->n; i++) {
            const int is_in = r->t[i].position >= first && r->t[i].position < last;
            any |= is_in && !r->t[i].gone;
            if (!is_in && !r->t[i].gone && i + 1 > stays) stays = i + 1;
        }
        if (stays > len) len = stays;
    }
    st = tkv_seq_remove(kv, seq, first, last);
    if (st) return refuse(REMOVE);
    if (any && len < length_of(seq)) next_of[seq] = position_behind(seq, len);
    for (layer = 0; layer < LAYERS && any; layer++) {
        row *r = &model[seq][layer];
        cut_row(r, len);
        for (i = 0; i < r->n; i++)
            if (r->t[i].position >= first && r->t[i].position < last) lose(&r->t[i]);
    }
    return any ? count_hits(REMOVE, marks) : 0;
}

static int play_shift(int seq, int first, int last, int delta) {
    const unsigned marks = marks_of(seq);
    int layer, i, any = 0;
    if (tkv_seq_shift(kv, seq, first, last, delta)) return refuse(SHIFT);
    if (next_of[seq] > first && next_of[seq] <= last) {
        next_of[seq] += delta;
        if (next_of[seq] < 0) next_of[seq] = 0;
    }
    for (layer = 0; layer < LAYERS; layer++)
        for (i = 0; i < model[seq][layer].n; i++) {
            token *t = &model[seq][layer].t[i];
            if (t->gone || t->position < first || t->position >= last) continue;
            t->position += delta;
            any = 1;
        }
    check_all(); /* takes the positions of tokens that are gone */
    return any ? count_hits(SHIFT, marks) : 0;
}

/* There and back: the parts of split blocks become one again. */
static int play_unite(int seq, int first, int delta) {
    const unsigned marks = marks_of(seq);
    const int before = n_layer_blocks(kv, seq, 0);
    int split;
    if (!play_shift(seq, first, 1 << 29, delta)) return refuse(UNITE);
    split = n_layer_blocks(kv, seq, 0);
    if (!play_shift(seq, first + delta, 1 << 29, -delta)) return refuse(UNITE);
    CHECK_STEP(n_layer_blocks(kv, seq, 0) <= split, seq, 0, first);
    return split > before && n_layer_blocks(kv, seq, 0) < split ? count_hits(UNITE, marks) : 0;
}

/* dst gets the live tokens of the range in order, each at the same index in all layers. Indices between them are those
 * of tokens that are gone. */
static int play_copy(int src, int first, int last, int dst) {
    static uint8_t tier[MOST];
    static int copied_to[MOST]; /* by index in src: index in dst, of the layers so far; 0: none has it */
    const unsigned marks = marks_of(src);
    const int old_len = length_of(dst), at = next_of[dst];
    int layer, i, n, any = 0;
    if (tkv_seq_copy(kv, src, first, last, dst, at)) return refuse(COPY);
    n = tkv_get_length(kv, dst, 0) - old_len;
    memset(copied_to, 0, sizeof copied_to);
    for (layer = 0; layer < LAYERS && n > 0; layer++) {
        const row *from = &model[src][layer];
        row *to = &model[dst][layer];
        int j = 0;
        to->may_lack_sinks = old_len ? to->may_lack_sinks : 1;
        CHECK_EQ(tkv_get_tiers(kv, dst, layer, old_len, n, tier), TKV_OK);
        for (i = 0; i < old_len; i++) {
            to->t[i].low *= pow(decay, n);
            to->t[i].high *= pow(decay, n);
        }
        for (i = 0; i < n; i++) {
            token *t = &to->t[old_len + i];
            memset(t, 0, sizeof *t);
            t->gone = tier[i] == TKV_TOKEN_GONE;
            if (t->gone) continue;
            while (j < from->n &&
                   (from->t[j].gone || from->t[j].position < first || from->t[j].position >= last))
                j++;
            CHECK_STEP(j < from->n, dst, layer, old_len + i);
            if (j == from->n) break;
            CHECK_STEP(!copied_to[j] || copied_to[j] == old_len + i, dst, layer, old_len + i);
            copied_to[j] = old_len + i;
            *t = from->t[j++];
            t->position += at - first;
            t->pinned = t->until = t->until_most = 0;
            t->low *= pow(decay, n); /* they are as old as in src when they come, and others may follow */
            t->stamp = old_len + i;
            any = 1;
        }
        while (j < from->n && (from->t[j].gone || from->t[j].position < first || from->t[j].position >= last))
            j++;
        CHECK_STEP(j == from->n, dst, layer, j); /* none is left */
        to->n += n;
        to->is_listed |= from->is_listed;
        settle_pins(to);
    }
    if (n > 0) next_of[dst] = position_behind(dst, length_of(dst));
    return any ? count_hits(COPY, marks) : 0;
}

/* Keeps some tokens of the last `tail` ones, live in all layers. */
static int play_keep(int seq, int tail, int every) {
    const unsigned marks = marks_of(seq);
    const int len = length_of(seq), first = len - tail;
    int layer, i, n = 0, indices[MOST];
    if (first < 0) return refuse(KEEP);
    for (i = first; i < len; i++) {
        int gone = 0;
        for (layer = 0; layer < LAYERS; layer++) gone |= model[seq][layer].t[i].gone;
        if (now == ANCHORED_KIND ? i < first + tail / 2 : !gone && rand_below(every)) indices[n++] = i;
    }
    if (!n || tkv_seq_keep(kv, seq, first, indices, n)) return refuse(KEEP);
    for (layer = 0; layer < LAYERS; layer++) {
        row *r = &model[seq][layer];
        for (i = 0; i < n; i++) r->t[first + i] = r->t[indices[i]];
        r->n = first + n;
        rewind_scores(r, len);
    }
    next_of[seq] = position_behind(seq, first + n);
    return count_hits(KEEP, marks);
}

static int play_slide(int seq, int n) {
    const unsigned marks = marks_of(seq);
    int layer, i, n_removed = 0;
    if (tkv_seq_slide(kv, seq, n, &n_removed)) return refuse(SLIDE);
    for (layer = 0; layer < LAYERS && n_removed; layer++) {
        row *r = &model[seq][layer];
        for (i = SINKS + n_removed; i < r->n; i++) {
            r->t[i - n_removed] = r->t[i];
            r->t[i - n_removed].position -= n_removed;
        }
        r->n -= n_removed;
        for (i = 0; i < r->n; i++) {
            token *t = &r->t[i];
            t->stamp -= n_removed;
            if (t->until) t->until -= n_removed;
            if (t->until_most) t->until_most -= n_removed;
        }
    }
    next_of[seq] = next_of[seq] > n_removed ? next_of[seq] - n_removed : 0;
    return n_removed ? count_hits(SLIDE, marks) : 0;
}

static int play_fork(int src, int dst, int len) {
    const unsigned marks = marks_of(src);
    int layer;
    if (tkv_seq_fork(kv, src, dst, len)) return refuse(FORK);
    next_of[dst] = len < length_of(src) ? position_behind(src, len) : next_of[src];
    for (layer = 0; layer < LAYERS; layer++) {
        model[dst][layer] = model[src][layer];
        cut_row(&model[dst][layer], len);
    }
    return count_hits(FORK, marks);
}

/* Sequence 0 goes to 1, and to 2 as well. */
static int play_reorder(void) {
    static const int sources[SEQS] = {1, 0, 0};
    const unsigned marks = marks_of(0);
    int layer;
    if (tkv_seq_reorder(kv, 0, sources, SEQS)) return refuse(REORDER);
    next_of[2] = next_of[0];
    next_of[0] = next_of[1];
    next_of[1] = next_of[2];
    for (layer = 0; layer < LAYERS; layer++) {
        model[2][layer] = model[0][layer];
        model[0][layer] = model[1][layer];
        model[1][layer] = model[2][layer];
    }
    return count_hits(REORDER, marks);
}

static int n_hot(int seq) {
    tkv_layer_info info;
    int layer, n = 0;
    for (layer = 0; layer < LAYERS; layer++) {
        CHECK_EQ(tkv_get_layer(kv, seq, layer, &info), TKV_OK);
        n += info.tokens[TKV_TIER_HOT];
    }
    return n;
}

static int play_recode(int seq) {
    const unsigned marks = marks_of(seq);
    const int before = n_hot(seq);
    int layer;
    CHECK_EQ(tkv_seq_flush(kv, seq, TKV_FLUSH_ALL), TKV_OK);
    (void)take_all_expired(seq);
    if (n_hot(seq) == before) return 0;
    for (layer = 0; layer < LAYERS; layer++)
        model[seq][layer].is_listed |= has_mark(&model[seq][layer], GONE);
    return count_hits(RECODE, marks);
}

static int play_join(int seq) {
    const unsigned marks = marks_of(seq);
    const int before = n_layer_blocks(kv, seq, 0) + n_layer_blocks(kv, seq, 1);
    int s;
    CHECK_EQ(tkv_maintain(kv, 1000, NULL, NULL, NULL), TKV_OK);
    for (s = 0; s < SEQS; s++) (void)take_all_expired(s);
    return n_layer_blocks(kv, seq, 0) + n_layer_blocks(kv, seq, 1) < before ? count_hits(JOIN, marks) : 0;
}

/* Evicts each token for which a draw of `every` is not 0, in a layer or in all; every 0: all of them. */
static int play_evict(int seq, int only_layer, int every) {
    static uint64_t victims[(MOST + 63) / 64];
    static uint8_t tier[MOST];
    const unsigned marks = marks_of(seq);
    const int len = length_of(seq);
    int layer, i, any = 0;
    memset(victims, 0, sizeof victims);
    for (i = 0; i < len; i++)
        if (!every || !rand_below(every)) add_to_mask(victims, i);
    CHECK_EQ(evict_tokens(kv, seq, only_layer, victims, len), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++) {
        row *r = &model[seq][layer];
        if (only_layer != TKV_ALL_LAYERS && only_layer != layer) continue;
        CHECK_EQ(tkv_get_tiers(kv, seq, layer, 0, len, tier), TKV_OK);
        for (i = 0; i < len; i++) {
            token *t = &r->t[i];
            const int is_gone = tier[i] == TKV_TOKEN_GONE;
            if (t->gone || !is_in_mask(victims, i) || t->anchored) continue;
            CHECK_STEP(is_gone ? !must_stay(t, len) : may_stay(t, len) || now == ANCHORED_KIND, seq, layer,
                       i);
            any |= is_gone;
            if (is_gone) lose(t);
        }
    }
    return any ? count_hits(EVICT, marks) : 0;
}

static int play_offload(int seq, int n) {
    const unsigned marks = marks_of(seq);
    int done = 0;
    if (now != STORED && now != ANCHORED_KIND) return refuse(OFFLOAD);
    CHECK_EQ(tkv_offload(kv, seq, TKV_ALL_LAYERS, n, &done), TKV_OK);
    return done ? count_hits(OFFLOAD, marks) : 0;
}

static int play_promote(int seq, int layer) {
    const unsigned marks = marks_of(seq);
    int i, n = 0;
    for (i = 0; i < length_of(seq); i++) n += tkv_promote(kv, seq, layer, i) == TKV_OK;
    return n ? count_hits(PROMOTE, marks) : 0;
}

/* Discards blocks, looks at what is left, and computes them again. */
static int play_discard(int seq, int n_tokens) {
    static float k[MOST * DIM], v[MOST * DIM];
    const unsigned marks = marks_of(seq);
    int layer, start, n = 0;
    CHECK_EQ(tkv_seq_discard(kv, seq, n_tokens, &n), TKV_OK);
    if (!n) return 0;
    count_hits(DISCARD, marks);
    check_all();
    while (tkv_seq_find_discarded(kv, seq, &start, &n) == TKV_OK && n)
        for (layer = 0; layer < LAYERS; layer++) {
            fill_value_rows(&model[seq][layer], layer, start, n, k, v);
            CHECK_EQ(tkv_restore(kv, seq, layer, start, k, v, n), TKV_OK);
        }
    return count_hits(RESTORE, marks);
}

/* Saves a sequence, or its first tokens, and loads it into another one. */
static int play_save(int seq, int to, int len) {
    static uint8_t file[1 << 20];
    const unsigned marks = marks_of(seq);
    tkv_save_params save;
    tkv_load_params load;
    size_t size;
    int layer;
    memset(&save, 0, sizeof save);
    memset(&load, 0, sizeof load);
    save.seq = seq;
    save.length = len < length_of(seq) ? len : 0;
    save.with_scores = 1;
    load.seq = to;
    if (len < 1 || tkv_seq_save(kv, &save, file, sizeof file, &size)) return refuse(SAVE);
    CHECK_EQ(tkv_seq_reset(kv, to), TKV_OK);
    CHECK_EQ(tkv_seq_load(kv, &load, file, size, NULL), TKV_OK);
    next_of[to] = len < length_of(seq) ? position_behind(seq, len) : next_of[seq];
    for (layer = 0; layer < LAYERS; layer++) {
        model[to][layer] = model[seq][layer];
        cut_row(&model[to][layer], len);
    }
    return count_hits(SAVE, marks);
}

static int play_abort(int seq, int n) {
    const unsigned marks = marks_of(seq);
    const row was[LAYERS] = {model[seq][0], model[seq][1]};
    const int first = length_of(seq);
    int layer, i, taken;
    if (first + n > MOST) return refuse(ABORT);
    CHECK_EQ(tkv_seq_begin(kv, seq), TKV_OK);
    taken = take_all_expired(seq);
    for (layer = 0; layer < LAYERS; layer++)
        for (i = 0; i < n; i++) {
            model[seq][layer].t[first + i].id = 1;
            model[seq][layer].t[first + i].position = next_of[seq] + i;
        }
    append_to_cache(seq, first, n);
    CHECK_EQ(tkv_seq_abort(kv, seq), TKV_OK);
    if (!taken) memcpy(model[seq], was, sizeof was);
    return count_hits(ABORT, marks);
}

/* >>marks */
static void name_sinks(int seq, int first, int n, int on) {
    int layer, i;
    if (tkv_seq_set_sinks(kv, seq, first, n, on)) return;
    for (layer = 0; layer < LAYERS; layer++)
        for (i = first; i < first + n && i < length_of(seq); i++)
            if (!model[seq][layer].t[i].gone) model[seq][layer].t[i].sink = on;
    if (!on && now != STORED) (void)take_all_expired(seq);
}

/* until: as in tkv_seq_pin */
static void pin(int seq, int first, int n, int until) {
    int layer, i;
    CHECK_EQ(tkv_seq_pin(kv, seq, first, n, until), TKV_OK);
    for (layer = 0; layer < LAYERS; layer++) {
        row *r = &model[seq][layer];
        for (i = first; i < first + n && i < r->n; i++) {
            token *t = &r->t[i];
            if (t->gone) continue;
            if (until == TKV_UNLIMITED) t->pinned = 1;
            else if (until == TKV_OFF) t->pinned = t->until = t->until_most = 0;
            else {
                if (until > t->until) t->until = until;
                if (until > t->until_most) t->until_most = until;
            }
        }
        settle_pins(r);
    }
}

static void add_scores(int seq, int first, int n, double by) {
    float score[MOST];
    int layer, i;
    for (i = 0; i < n; i++) score[i] = (float)(by + .25 * (i % 5));
    for (layer = 0; layer < LAYERS; layer++) {
        CHECK_EQ(tkv_add_scores(kv, seq, layer, first, n, score), TKV_OK);
        for (i = 0; i < n; i++) {
            token *t = &model[seq][layer].t[first + i];
            if (t->gone) continue;
            t->low += (double)score[i];
            t->high += (double)score[i];
            t->stamp = length_of(seq);
        }
    }
}

/* Evicts everything, again and again: what a pin keeps, what is left when pins end, what sinks alone keep. */
static void check_pins(int seq) {
    int latest = 1, i, layer;
    while (latest) {
        (void)play_evict(seq, TKV_ALL_LAYERS, 0);
        check_all();
        latest = 0;
        for (layer = 0; layer < LAYERS; layer++)
            for (i = 0; i < length_of(seq); i++)
                if (model[seq][layer].t[i].until_most > latest) latest = model[seq][layer].t[i].until_most;
        if (latest > MOST) break;
        while (latest && length_of(seq) < latest)
            if (!play_append(seq, latest - length_of(seq) < CHUNK ? latest - length_of(seq) : CHUNK)) {
                latest = 0;
                break;
            }
    }
    pin(seq, 0, length_of(seq), TKV_OFF);
    (void)play_evict(seq, TKV_ALL_LAYERS, 0);
    check_all();
    for (i = 0; i < length_of(seq); i++) {
        int is_sink = 0;
        for (layer = 0; layer < LAYERS; layer++) is_sink |= model[seq][layer].t[i].sink;
        if (is_sink) name_sinks(seq, i, 1, 0);
    }
    (void)play_evict(seq, TKV_ALL_LAYERS, 0);
    check_all();
}

/* >>the table, one cell after another */
/* Puts a mark on every seventh token of a sequence, over all blocks. */
static void put_mark(int seq, mark m) {
    int i;
    if (m == GONE || m == LISTED) (void)play_evict(seq, TKV_ALL_LAYERS, 5);
    if (m == LISTED) (void)play_recode(seq);
    if (m == SCORED) {
        add_scores(seq, 0, length_of(seq) / 2, 2.0);
        (void)play_append(seq, 5);
        add_scores(seq, length_of(seq) / 4, length_of(seq) / 3, 1.0);
    }
    for (i = 3; i < length_of(seq); i += 7) {
        if (m == SINK && ((i - SINKS) / TKV_BLOCK_TOKENS) % 2)
            name_sinks(seq, i, 1, 1); /* other blocks can be coded */
        if (m == PINNED) pin(seq, i, 1, TKV_UNLIMITED);
        if (m == PINNED_UNTIL) pin(seq, i, 1, 650);
    }
}

/* The tokens with the highest scores become anchors when their blocks are coded. */
static int anchor_number(int i) { return 9 + 5 * i; }

static void note_anchors(int seq) {
    int layer, i;
    (void)play_recode(seq);
    for (layer = 0; layer < LAYERS; layer++)
        for (i = 0; i < ANCHORS; i++) {
            tkv_tier tier = TKV_TIER_COUNT;
            CHECK_EQ(tier_of(kv, seq, layer, anchor_number(i), &tier), TKV_OK);
            CHECK_EQ(tier, TKV_TIER_HOT);
            CHECK_EQ(tier_of(kv, seq, layer, anchor_number(i) + 1, &tier), TKV_OK);
            CHECK_EQ(tier, TKV_TIER_ARCHIVE);
            model[seq][layer].t[anchor_number(i)].anchored = 1;
        }
}

/* Brings a sequence to an event, and plays it. Returns 1 if it happened. */
static int play_cell(event e, mark m) {
    switch (e) {
    case APPEND: return play_append(0, 30);
    case CUT: return play_cut(0, 150);
    case REMOVE: return play_remove(0, 20, 90);
    case SHIFT: return play_shift(0, 30, 130, 3);
    case UNITE: return play_unite(0, 32, 5);
    case COPY: return play_append(1, 10) && play_copy(0, 8, 140, 1);
    case KEEP: return play_append(0, 50) && (m == LISTED || (put_mark(0, m), 1)) && play_keep(0, 45, 3);
    case SLIDE: return play_slide(0, 512);
    case FORK: return play_fork(0, 1, 100) && play_append(1, 20) && play_fork(0, 2, MOST);
    case REORDER: return play_reorder();
    case RECODE: return play_append(0, 20) && play_recode(0);
    case JOIN: return play_remove(0, 20, 68) && play_remove(0, 80, 132) && play_append(0, 64) && play_join(0);
    case EVICT: return play_evict(0, TKV_ALL_LAYERS, 2);
    case EXPIRE:
        while (length_of(0) < 500 && play_append(0, CHUNK)) continue;
        return length_of(0) >= 400;
    case OFFLOAD:
    case PROMOTE: return play_append(0, 100) && play_recode(0) && play_offload(0, 2) && play_promote(0, 0);
    case DISCARD:
    case RESTORE: return play_append(0, 100) && play_recode(0) && play_discard(0, 128);
    case SAVE: return play_save(0, 1, 120) && play_save(0, 2, MOST);
    default: return play_abort(0, 30);
    }
}

/* Anchors refuse moves, and layers with them have no window. */
static int is_refused_with_anchors(event e) {
    return e == SHIFT || e == UNITE || e == COPY || e == SLIDE || e == EXPIRE;
}

static void check_cell(event e, mark m) {
    const kind which = m == ANCHORED                                                  ? ANCHORED_KIND
                       : e == EXPIRE                                                  ? WINDOWED
                       : e == OFFLOAD || e == PROMOTE || e == DISCARD || e == RESTORE ? STORED
                                                                                      : PLAIN;
    const int before = hits[e][m];
    int i, n, happened, seq;
    event_now = e;
    mark_now = m;
    begin(which);
    rng = tkv_rng_seed(5);
    for (i = 0; i < 4; i++) {
        (void)play_append(0, 50);
        if (which != PLAIN && m == SINK && i % 2 == 0)
            name_sinks(0, 50 * i + 9, 1, 1); /* while they are exact */
        for (n = 0; m == ANCHORED && i == 0 && n < ANCHORS; n++) add_scores(0, anchor_number(n), 1, 50.0 + n);
    }
    if (m == ANCHORED) note_anchors(0);
    else if (which == PLAIN || m != SINK) put_mark(0, m);
    if (e == EXPIRE && m == ANCHORED) {
        tkv_config cfg = make_config(ANCHORED_KIND);
        cfg.model.window = WINDOW;
        CHECK_EQ(tkv_validate_config(&cfg, NULL, 0), TKV_ERR_CONFIG);
        happened = 0;
    } else happened = play_cell(e, m);
    check_all();
    if (m == ANCHORED && is_refused_with_anchors(e)) CHECK(!happened);
    else
        CHECK_MSG(happened && hits[e][m] > before, "%s was not reached with %s", event_name[e], mark_name[m]);
    for (seq = 0; seq < SEQS; seq++) check_pins(seq);
    end();
}

TEST(each_event_on_each_mark) {
    int e, m;
    for (e = 0; e < EVENTS; e++)
        for (m = 0; m < MARKS; m++) check_cell((event)e, (mark)m);
}

/* >>random games */
static int random_range(int seq, int *first) {
    const int end = next_of[seq];
    *first = rand_below(end + 10);
    return *first + 1 + rand_below(80);
}

static void mark_something(int seq) {
    const int len = length_of(seq), first = rand_below(len),
              n = 1 + rand_below(len - first < 6 ? len - first : 6);
    switch (rand_below(6)) {
    case 0: name_sinks(seq, first, n, 1); break;
    case 1: pin(seq, first, n, TKV_UNLIMITED); break;
    case 2: pin(seq, first, n, len + 1 + rand_below(120)); break;
    case 3: pin(seq, first, n, TKV_OFF); break;
    case 4: name_sinks(seq, first, n, 0); break;
    default: add_scores(seq, first, len - first, .5); break;
    }
}

static void play_something(int seq) {
    const int other = (seq + 1 + rand_below(SEQS - 1)) % SEQS, len = length_of(seq);
    int first, last = random_range(seq, &first), layer = rand_below(LAYERS + 1);
    const int delta = rand_below(40) - 20, is_open = rand_below(3); /* drawn in this order by any compiler */
    if (layer == LAYERS) layer = TKV_ALL_LAYERS;
    if (!is_open) last = 1 << 29;
    switch (rand_below(22)) {
    case 0: (void)play_cut(seq, len - rand_below(len < 60 ? len : 60)); break;
    case 1: (void)play_remove(seq, first, last); break;
    case 2: (void)play_shift(seq, first, last, delta); break;
    case 3: (void)play_unite(seq, first, 1 + rand_below(9)); break;
    case 4: (void)(length_of(other) < 300 && play_copy(seq, first, last, other)); break;
    case 5: (void)play_keep(seq, 1 + rand_below(40), 3); break;
    case 6: (void)play_slide(seq, rand_below(2) ? 512 : 100); break;
    case 7: (void)play_fork(seq, other, 1 + rand_below(len)); break;
    case 8: (void)(!rand_below(4) && play_reorder()); break;
    case 9: (void)play_recode(seq); break;
    case 10: (void)play_join(seq); break;
    case 11: (void)play_evict(seq, layer, 2 + rand_below(6)); break;
    case 12: (void)play_offload(seq, 2); break;
    case 13: (void)(now == STORED && play_promote(seq, rand_below(LAYERS))); break;
    case 14: (void)play_save(seq, other, 1 + rand_below(len)); break;
    case 15: (void)play_abort(seq, 1 + rand_below(30)); break;
    case 16: (void)(!rand_below(10) && (check_pins(seq), 1)); break;
    default: mark_something(seq); break;
    }
}

TEST(random_games) {
    const int ops = int_from_env("TKV_RANDOM_OPS", tkv_test_quick() ? 150 : 1500);
    int which, i;
    for (which = PLAIN; which <= STORED; which++) {
        seed = (unsigned)int_from_env("TKV_RANDOM_SEED", 1) + (unsigned)which;
        rng = tkv_rng_seed(seed);
        begin((kind)which);
        for (i = 0; i < ops; i++) {
            const int seq = rand_below(SEQS), len = length_of(seq);
            step_number = i;
            if (len < 20 || (len < 450 && rand_below(3) == 0)) (void)play_append(seq, 1 + rand_below(CHUNK));
            else play_something(seq);
            check_all();
        }
        for (i = 0; i < SEQS; i++) check_pins(i);
        end();
    }
}

/* Prints how often each cell was reached. -: the cache refuses it. */
TEST(table_of_cells) {
    int e, m;
    printf("\n    %-14s", "");
    for (m = 0; m < MARKS; m++) printf("%8s", mark_name[m]);
    for (e = 0; e < EVENTS; e++) {
        printf("\n    %-14s", event_name[e]);
        for (m = 0; m < MARKS; m++) {
            if (m == ANCHORED && is_refused_with_anchors((event)e)) printf("%8s", "-");
            else printf("%8d", hits[e][m]);
            CHECK_MSG((hits[e][m] > 0) == !(m == ANCHORED && is_refused_with_anchors((event)e)), "%s, %s",
                      event_name[e], mark_name[m]);
        }
    }
    printf("\n   ");
}

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
    RUN(each_event_on_each_mark);
    RUN(random_games);
    RUN(table_of_cells);
    return tkv_test_end();
}
