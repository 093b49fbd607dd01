/*
 * test_soak.c - a day of a chat server in simulated time, against a plain model.
 *
 * Conversations come, fork, answer, wait, are offloaded, saved, restored and dropped, under a byte budget. The hours of
 * the day are busy or quiet. The store for blocks fails now and then, and is full in hours 6, 12 and 18. Without
 * arguments the day is short. `make soak` runs a long one:
 *
 *     test_soak [--tokens N] [--hours N] [--seed N] [--seqs N]       N may end in K or M (1,000 or 1,000,000)
 *
 * Keys and values are a function of text, layer and index, so nothing has to be remembered. A conversation is a list of
 * pieces of texts: a fork, or an answer that is written again, begins a new piece.
 *
 * At all times the allocator holds no more than the budget. At 1,000 calls or more, between two steps:
 *   - the cache passes its self-check, and its bytes are those that the allocator counts;
 *   - lengths and positions are those of the model, and counters of the budget never fall.
 * For samples of queries:
 *   - exact tokens have the bits of FP16, and coded ones are within the error of the tightest format;
 *   - the output is near that of the decoded values (manual, chapter 12), and within the noise that coding adds to the
 *     output of the exact values.
 * A fork has the bits of its parent. A restored conversation has the bits that it was saved with, unless loading it made
 * the budget code blocks again. At the end every byte is back: of the cache, of the store and of attached files.
 *
 * A step is the appends and the attention of one token for up to 8 conversations, in all layers. The table has the
 * processor time of steps by hour. It is not tested.
 */
#if defined(__unix__) || defined(__APPLE__)
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include <unistd.h>
#define HAVE_ISATTY 1
#else
#define HAVE_ISATTY 0
#endif
#define KIT_STORE_KEYS 32768
#include "kit.h"

enum {
    LAYERS = 2,
    HEADS = 4,
    KV_HEADS = 2,
    GROUP = HEADS / KV_HEADS,
    DIM = 32,
    ROW = KV_HEADS * DIM,
    OUT_ROW = HEADS * DIM,
    CHUNK = 64,
    BATCH = 8,
    LONGEST = 1536,
    MAX_SEQS = 1000,
    MAX_PIECES = 8,
    MAX_SAVED = 60,
    CALLS_PER_CHECK = 1000,
    SEQ_BYTES = 72000, /* of the budget for each sequence */
    LAST_LEVEL = 3     /* of the default ladder: the plan, with A30 and R30 in the archive */
};

/* Bounds of squared errors of coded keys and values, relative to their squares: those of A30 and R30. */
static const double most_k_error = .04, most_v_error = .08;

/* >>the model */
typedef struct piece {
    int text, end; /* tokens of this text up to index end - 1 */
} piece;

typedef enum conversation_state {
    IS_FREE = 0, /* the sequence is empty */
    ANSWERS,
    WAITS,
    IS_BUSY /* in the middle of a call that may need memory */
} conversation_state;

typedef struct conversation {
    conversation_state state;
    piece pieces[MAX_PIECES];
    int n_pieces, length, answer_from, n_left; /* n_left: tokens of the answer still to come */
    int n_last;                                /* tokens of the last append, which are exact */
    uint64_t since;                            /* number of the step in which it began to wait */
} conversation;

typedef struct saved_conversation {
    conversation was;
    unsigned char *raw, *bytes; /* bytes: at a multiple of 64 in raw */
    size_t n;
    float out[LAYERS * OUT_ROW];
} saved_conversation;

typedef struct day_counts { /* the counts of an hour, or of the day */
    long tokens, steps, begun, forked, saved, restored, attached, dropped, cut, offloaded, refused, io_errors;
    double p50, p99, worst, held; /* held: most bytes */
} day_counts;

typedef struct soak {
    long tokens, hours, seed, seqs; /* the options */
    tkv_cache *kv;
    tkv_rng rng;
    counting_allocator memory;
    test_store store;
    size_t budget;
    conversation conversations[MAX_SEQS];
    saved_conversation saved[MAX_SAVED];
    int n_saved, n_texts, n_attached; /* n_attached: files of which the cache has bytes */
    uint64_t n_calls, n_checked_calls, n_steps;
    day_counts hour, all;
    float *times; /* microseconds of the steps of this hour */
    size_t n_times, times_capacity;
    tkv_budget_info last;
    int n_samples, n_same_forks, n_same_restores,
        n_other_restores;                       /* other: the budget coded blocks meanwhile */
    double k_error, v_error, noise, arithmetic; /* largest errors, relative to their bounds */
} soak;

static soak day;

static int rand_below(int n) { return tkv_rng_below(&day.rng, n); }

/* K or V of a token, all heads. Sums of two uniform numbers; some channels of K are larger or have an offset. */
static void fill_token(int text, int index, int layer, tkv_side side, float *x) {
    tkv_rng r = tkv_rng_seed((uint64_t)text << 32 | (uint64_t)index << 8 | (uint64_t)(2 * layer + (int)side));
    for (int i = 0; i < ROW; i += 2) {
        const uint64_t u = tkv_rng_u64(&r);
        const int a = (int)(u & 0xffffu) + (int)(u >> 16 & 0xffffu) - 65535,
                  b = (int)(u >> 32 & 0xffffu) + (int)(u >> 48) - 65535;
        x[i] = (float)a / 26755.0f;
        x[i + 1] = (float)b / 26755.0f;
    }
    for (int i = 0; side == TKV_K && i < ROW; i++) {
        if (i % DIM % 11 == 3) x[i] *= 3.0f;
        if (i % DIM % 7 == 2) x[i] += 2.0f;
    }
}

static void fill_query(int text, int index, int layer, float *q) {
    for (int g = 0; g < GROUP; g++) {
        float *x = q + g * ROW;
        fill_token(text, index, layer + LAYERS * (1 + g), TKV_V, x);
        for (int i = 0; i < ROW; i++) x[i] *= .7f;
    }
}

static int text_of(const conversation *c, int index) {
    int i = 0;
    while (i < c->n_pieces - 1 && index >= c->pieces[i].end) i++;
    return c->pieces[i].text;
}

/* The tokens from the present length on are those of a new text. Returns 0 if the list of pieces is full. */
static int begin_piece(conversation *c) {
    while (c->n_pieces > 1 && c->pieces[c->n_pieces - 2].end >= c->length) c->n_pieces--;
    if (c->length == 0) c->n_pieces = 0;
    if (c->n_pieces == MAX_PIECES) return 0;
    if (c->n_pieces) c->pieces[c->n_pieces - 1].end = c->length;
    c->pieces[c->n_pieces].text = ++day.n_texts;
    c->pieces[c->n_pieces++].end = LONGEST;
    return 1;
}

/* >>calls */
static int seq_of(const conversation *c) { return (int)(c - day.conversations); }

static tkv_status called(tkv_status st) {
    day.n_calls++;
    if (st == TKV_ERR_BUDGET) day.hour.refused++;
    if (st == TKV_ERR_IO) day.hour.io_errors++;
    return st;
}

static void expect(tkv_status st, const char *what) {
    CHECK_MSG(st == TKV_OK, "%s after %ld tokens: %s, %s", what, day.all.tokens, tkv_get_status_text(st),
              tkv_get_last_error(day.kv));
}

/* A retry after TKV_ERR_IO is allowed. */
static tkv_status attend(int seq, int layer, const float *q, int n, float *out) {
    tkv_status st = TKV_ERR_IO;
    for (int i = 0; i < 5 && st == TKV_ERR_IO; i++) st = called(tkv_attend(day.kv, seq, layer, q, n, out));
    return st;
}

/* Attention of a fixed query in all layers, to compare two states of a conversation. */
static void attend_fixed(int seq, float *out) {
    for (int layer = 0; layer < LAYERS; layer++) {
        float q[OUT_ROW];
        fill_query(0, 0, layer, q);
        expect(attend(seq, layer, q, 1, out + layer * OUT_ROW), "attention of a fixed query");
    }
}

static void drop(conversation *c) {
    expect(called(tkv_seq_reset(day.kv, seq_of(c))), "reset");
    memset(c, 0, sizeof *c);
}

/* >>saving */
static unsigned char scratch[1 << 19]; /* a full budget has no memory for the call */

static void free_saved(saved_conversation *s) {
    free(s->raw);
    *s = day.saved[--day.n_saved];
}

static void release_file(void *user, const void *bytes, size_t size) {
    (void)bytes, (void)size;
    free(user);
    day.n_attached--;
}

static tkv_save_params save_params_of(const conversation *c) {
    tkv_save_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq_of(c);
    p.model = "soak";
    p.model_bytes = 4;
    p.scratch = scratch;
    p.scratch_bytes = sizeof scratch;
    return p;
}

/* Saves, again after an error of the store. bytes: NULL only counts. */
static void save_bytes(const tkv_save_params *p, void *bytes, size_t size, size_t *needed, const char *what) {
    tkv_status st = TKV_ERR_IO;
    for (int i = 0; i < 5 && st == TKV_ERR_IO; i++) st = called(tkv_seq_save(day.kv, p, bytes, size, needed));
    expect(st, what);
}

/* Saves a waiting conversation and empties its sequence. Returns 0 if it stays. */
static int save_conversation(conversation *c) {
    const tkv_save_params p = save_params_of(c);
    saved_conversation *s = &day.saved[day.n_saved];
    size_t n = 0;
    if (day.n_saved == MAX_SAVED) return 0;
    attend_fixed(seq_of(c), s->out);
    save_bytes(&p, NULL, 0, &n, "size of a save");
    s->raw = (unsigned char *)malloc(n + 64);
    if (!s->raw) exit(2);
    s->bytes = s->raw + (64 - (size_t)((uintptr_t)s->raw % 64)) % 64;
    save_bytes(&p, s->bytes, n, &s->n, "save");
    CHECK_EQ(s->n, n);
    s->was = *c;
    day.n_saved++;
    day.hour.saved++;
    drop(c);
    return 1;
}

/* Makes room as a server would: the conversation that has waited longest is saved or dropped. Returns 0 if none waits.
 */
static int make_room(void) {
    conversation *oldest = NULL;
    for (int seq = 0; seq < day.seqs; seq++) {
        conversation *c = &day.conversations[seq];
        if (c->state == WAITS && (!oldest || c->since < oldest->since)) oldest = c;
    }
    if (!oldest) return 0;
    if (rand_below(2) && save_conversation(oldest)) return 1;
    drop(oldest);
    day.hour.dropped++;
    return 1;
}

static conversation *find_free(void) {
    for (int seq = 0; seq < day.seqs; seq++)
        if (day.conversations[seq].state == IS_FREE) return &day.conversations[seq];
    return NULL;
}

/* A random conversation that waits; NULL: there is none. */
static conversation *find_waiting(void) {
    const int first = rand_below((int)day.seqs);
    for (int i = 0; i < day.seqs; i++) {
        conversation *c = &day.conversations[(first + i) % day.seqs];
        if (c->state == WAITS) return c;
    }
    return NULL;
}

static int restore_conversation(conversation *c) {
    saved_conversation *s = &day.saved[rand_below(day.n_saved)];
    const int attached = rand_below(3) == 0;
    const uint64_t demoted = budget_of(day.kv).demoted;
    float out[LAYERS * OUT_ROW];
    tkv_load_params p;
    tkv_load_info info;
    tkv_status st;
    memset(&p, 0, sizeof p);
    p.seq = seq_of(c);
    p.model = "soak";
    p.model_bytes = 4;
    p.scratch = scratch;
    p.scratch_bytes = sizeof scratch;
    p.attach = attached;
    p.release = attached ? release_file : NULL;
    p.release_user = s->raw;
    c->state = IS_BUSY;
    do {
        day.n_attached += attached;
        st = called(tkv_seq_load(day.kv, &p, s->bytes, s->n, &info));
        if (st) day.n_attached -= attached; /* after an error the bytes are still ours */
    } while (st == TKV_ERR_BUDGET && day.n_saved < MAX_SAVED && make_room());
    c->state = IS_FREE;
    if (st == TKV_ERR_BUDGET) return 0;
    expect(st, "restore");
    *c = s->was;
    CHECK_EQ(info.n_tokens, c->length);
    CHECK_EQ(tkv_get_length(day.kv, seq_of(c), TKV_ALL_LAYERS), c->length);
    attend_fixed(seq_of(c), out);
    if (info.n_recoded == 0 && budget_of(day.kv).demoted == demoted) {
        CHECK_MEM(out, s->out, sizeof out);
        day.n_same_restores++;
    } else day.n_other_restores++;
    if (attached) s->raw = NULL;
    free_saved(s);
    day.hour.restored++;
    day.hour.attached += attached;
    return 1;
}

/* >>appending */
static float k_in[LAYERS][CHUNK * ROW], v_in[LAYERS][CHUNK * ROW], q_in[LAYERS][CHUNK * OUT_ROW],
    out_of[LAYERS][CHUNK * OUT_ROW];

static void generate(const conversation *c, int index, int row) {
    const int text = text_of(c, index);
    for (int layer = 0; layer < LAYERS; layer++) {
        fill_token(text, index, layer, TKV_K, k_in[layer] + row * ROW);
        fill_token(text, index, layer, TKV_V, v_in[layer] + row * ROW);
        fill_query(text, index, layer, q_in[layer] + row * OUT_ROW);
    }
}

/* Appends what was generated to a layer. The server makes room as often as the budget refuses. */
static void append_batch(int layer, const tkv_rows *rows, int n_rows) {
    tkv_append_params p;
    tkv_status st;
    memset(&p, 0, sizeof p);
    p.layer = layer;
    p.batch = rows;
    p.n_batch = n_rows;
    p.k = k_in[layer];
    p.v = v_in[layer];
    do st = called(tkv_append_ex(day.kv, &p));
    while (st == TKV_ERR_BUDGET && make_room());
    expect(st, "append");
}

static void attend_batch(int layer, const tkv_rows *rows, int n_rows) {
    tkv_attend_params p;
    tkv_status st = TKV_ERR_IO;
    memset(&p, 0, sizeof p);
    p.layer = layer;
    p.batch = rows;
    p.n_batch = n_rows;
    p.q = q_in[layer];
    p.out = out_of[layer];
    for (int i = 0; i < 5 && st == TKV_ERR_IO; i++) st = called(tkv_attend_ex(day.kv, &p));
    expect(st, "attention");
}

/* Reads a text of n tokens. Some go in as a step of all layers, and some of these steps are aborted once. */
static void read_text(conversation *c, int n) {
    c->state = IS_BUSY;
    while (n > 0) {
        const int is_step = rand_below(4) == 0;
        int aborts = is_step && rand_below(8) == 0;
        tkv_rows rows = {seq_of(c), n < CHUNK ? n : CHUNK};
        for (int i = 0; i < rows.n; i++) generate(c, c->length + i, i);
        for (int again = 1; again;) {
            tkv_status st = TKV_OK;
            if (is_step) {
                do st = called(tkv_seq_begin(day.kv, rows.seq));
                while (st == TKV_ERR_BUDGET && make_room());
                expect(st, "begin of a step");
            }
            for (int layer = 0; layer < LAYERS; layer++) {
                append_batch(layer, &rows, 1);
                attend_batch(layer, &rows, 1);
            }
            again = aborts;
            aborts = 0;
            if (again) expect(called(tkv_seq_abort(day.kv, rows.seq)), "abort of a step");
            else if (is_step) expect(called(tkv_seq_commit(day.kv, rows.seq)), "end of a step");
        }
        c->length += rows.n;
        c->n_last = rows.n;
        n -= rows.n;
        day.hour.tokens += rows.n;
        day.all.tokens += rows.n;
    }
}

/* A line of the user, which is answered from the next step on. */
static void begin_answer(conversation *c, int n_line) {
    read_text(c, n_line);
    c->answer_from = c->length;
    c->n_left = 20 + rand_below(100);
    c->state = ANSWERS;
}

/* >>samples against the model */
static float k_exact[LONGEST * ROW], v_exact[LONGEST * ROW], k_read[LONGEST * ROW], v_read[LONGEST * ROW];
static uint8_t tiers[LONGEST];
static double weights[LONGEST], read_weights[LONGEST];

/* The weights of n tokens for a query of a head. */
static void compute_weights(const float *q, const float *k, int n, double *w) {
    double most = -1e300, sum = 0.0;
    for (int i = 0; i < n; i++) {
        double s = 0.0;
        for (int c = 0; c < DIM; c++) s += (double)q[c] * (double)k[i * ROW + c];
        w[i] = s / sqrt((double)DIM);
        if (w[i] > most) most = w[i];
    }
    for (int i = 0; i < n; i++) sum += exp(w[i] - most);
    for (int i = 0; i < n; i++) w[i] = exp(w[i] - most) / sum;
}

static void average(const double *w, const float *v, int n, double *out) {
    for (int c = 0; c < DIM; c++) out[c] = 0.0;
    for (int i = 0; i < n; i++)
        for (int c = 0; c < DIM; c++) out[c] += w[i] * (double)v[i * ROW + c];
}

static double square_of(const double *a, const double *b, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sum;
}

static void keep_largest(double *most, double x) {
    if (x > *most) *most = x;
}

/* Compares what tkv_read gives with the model. */
static void check_values(const conversation *c, int seq, int layer) {
    const int n = c->length;
    double error[2] = {0.0, 0.0}, square[2] = {0.0, 0.0};
    tkv_status st = TKV_ERR_IO;
    for (int i = 0; i < n; i++) {
        fill_token(text_of(c, i), i, layer, TKV_K, k_exact + i * ROW);
        fill_token(text_of(c, i), i, layer, TKV_V, v_exact + i * ROW);
    }
    for (int i = 0; i < 5 && st == TKV_ERR_IO; i++)
        st = called(tkv_read(day.kv, seq, layer, 0, n, k_read, v_read));
    expect(st, "read");
    expect(called(tkv_get_tiers(day.kv, seq, layer, 0, n, tiers)), "tiers");
    for (int i = n - c->n_last; i < n; i++) CHECK_EQ(tiers[i], TKV_TIER_HOT);
    for (int i = 0; i < n; i++) {
        int n_other = 0;
        CHECK(tiers[i] < TKV_TIER_COUNT);
        for (int side = 0; side < 2; side++)
            for (int j = i * ROW; j < (i + 1) * ROW; j++) {
                const float x = side ? v_exact[j] : k_exact[j], y = side ? v_read[j] : k_read[j];
                if (tiers[i] == TKV_TIER_HOT) {
                    n_other += bits_of(as_stored(TKV_F16, x)) != bits_of(y);
                    continue;
                }
                error[side] += (double)(y - x) * (double)(y - x);
                square[side] += (double)x * (double)x;
            }
        CHECK_EQ(n_other, 0);
    }
    keep_largest(&day.k_error, error[TKV_K] / (most_k_error * square[TKV_K] + 1e-30));
    keep_largest(&day.v_error, error[TKV_V] / (most_v_error * square[TKV_V] + 1e-30));
    CHECK_LE(error[TKV_K], most_k_error * square[TKV_K]);
    CHECK_LE(error[TKV_V], most_v_error * square[TKV_V]);
}

/* Compares an output with the model: the exact values, and those that tkv_read gave. `noise` is what the errors of the
 * values add to the output if they are independent: the sum of p^2 (|dv|^2 + dl^2 |v - out|^2), with dl the error of a
 * logit. */
static void check_output(const conversation *c, int seq, int layer, const float *q, const float *out) {
    const int n = c->length;
    double noise = 0.0, error = 0.0, own = 0.0, arithmetic = 0.0, square = 0.0;
    check_values(c, seq, layer);
    for (int h = 0; h < HEADS; h++) {
        const int at = h / GROUP * DIM;
        double exact[DIM], of_read[DIM], got[DIM], zero[DIM] = {0.0};
        compute_weights(q + h * DIM, k_exact + at, n, weights);
        compute_weights(q + h * DIM, k_read + at, n, read_weights);
        average(weights, v_exact + at, n, exact);
        average(read_weights, v_read + at, n, of_read);
        for (int i = 0; i < DIM; i++) got[i] = (double)out[h * DIM + i];
        for (int i = 0; i < n; i++) {
            double dv = 0.0, dl = 0.0, from_mean = 0.0;
            for (int j = 0; j < DIM; j++) {
                const double d = (double)v_read[i * ROW + at + j] - (double)v_exact[i * ROW + at + j],
                             m = (double)v_exact[i * ROW + at + j] - exact[j];
                dv += d * d;
                from_mean += m * m;
                dl += (double)q[h * DIM + j] *
                      ((double)k_read[i * ROW + at + j] - (double)k_exact[i * ROW + at + j]);
            }
            dl /= sqrt((double)DIM);
            noise += weights[i] * weights[i] * (dv + dl * dl * from_mean);
        }
        error += square_of(got, exact, DIM);
        own += square_of(of_read, exact, DIM);
        arithmetic += square_of(got, of_read, DIM);
        square += square_of(of_read, zero, DIM);
    }
    day.n_samples++;
    keep_largest(&day.noise, sqrt(error / (16.0 * noise + 4e-6 * square)));
    keep_largest(&day.arithmetic, sqrt(arithmetic / (own / 16.0 + 4e-6 * square)));
    CHECK_LE(error, 16.0 * noise + 4e-6 * square);
    CHECK_LE(arithmetic, own / 16.0 + 4e-6 * square); /* a quarter of the formats' own error, or 2e-3 */
}

/* >>events */
static void begin_new(conversation *c) {
    memset(c, 0, sizeof *c);
    (void)begin_piece(c);
    begin_answer(c, 64 + rand_below(500));
    day.hour.begun++;
}

static int fork_conversation(conversation *c) {
    conversation *parent = find_waiting();
    float out[LAYERS * OUT_ROW], forked[LAYERS * OUT_ROW];
    tkv_status st;
    if (!parent) return 0;
    const int n = rand_below(2) ? parent->length : 1 + rand_below(parent->length);
    parent->state = c->state = IS_BUSY;
    do st = called(tkv_seq_fork(day.kv, seq_of(parent), seq_of(c), n));
    while (st == TKV_ERR_BUDGET && make_room());
    expect(st, "fork");
    *c = *parent;
    parent->state = WAITS;
    c->length = n;
    if (n < parent->length) c->n_last = 0;
    attend_fixed(seq_of(parent), out);
    attend_fixed(seq_of(c), forked);
    if (n == parent->length) {
        CHECK_MEM(forked, out, sizeof out);
        day.n_same_forks++;
    }
    if (c->length > LONGEST - 400 || !begin_piece(c)) { /* there is no room for a talk */
        drop(c);
        return 0;
    }
    begin_answer(c, 10 + rand_below(60));
    day.hour.forked++;
    return 1;
}

/* A user comes back to a conversation. One that is too long ends. */
static void wake(conversation *c) {
    if (c->length > LONGEST - 400) {
        drop(c);
        day.hour.dropped++;
        return;
    }
    if (rand_below(12) == 0 && c->answer_from < c->length) { /* the last answer is written again */
        expect(called(tkv_seq_truncate(day.kv, seq_of(c), c->answer_from)), "cut");
        c->length = c->answer_from;
        c->n_last = 0;
        if (!begin_piece(c)) {
            drop(c);
            day.hour.dropped++;
            return;
        }
        day.hour.cut++;
    }
    begin_answer(c, 10 + rand_below(60));
}

static void begin_turn(void) {
    conversation *c = find_free(), *waiting = find_waiting();
    const int what = rand_below(100);
    if (waiting && (what < 55 || !c)) {
        if (!c && what < 10) (void)make_room();
        else wake(waiting);
        return;
    }
    if (!c) return;
    if (what < 70 && day.n_saved) (void)restore_conversation(c);
    else if (what < 80) (void)fork_conversation(c);
    else begin_new(c);
    if (c->state == WAITS) wake(c); /* it was restored */
}

/* What a server does with those that wait, and in idle moments. */
static void tend(void) {
    conversation *c = find_waiting();
    int done = 0;
    const int what = rand_below(400);
    if (what < 4) expect(called(tkv_maintain(day.kv, 16, NULL, NULL, &done)), "idle work");
    if (!c) return;
    if (what >= 4 && what < 12) {
        const tkv_status st = called(tkv_offload(day.kv, seq_of(c), TKV_ALL_LAYERS, 4, &done));
        CHECK(st == TKV_OK || st == TKV_ERR_IO);
        day.hour.offloaded += done;
    } else if (what >= 12 && what < 16) (void)save_conversation(c);
    else if (what >= 16 && what < 18) {
        drop(c);
        day.hour.dropped++;
    } else if (what >= 18 && what < 20) {
        const tkv_status st = called(tkv_seq_flush(day.kv, seq_of(c), TKV_FLUSH_FULL));
        CHECK(st == TKV_OK || st == TKV_ERR_BUDGET);
        if (st == TKV_OK) c->n_last = 0;
    }
}

static double microseconds(void) { /* of the processor */
#ifdef __wasi__
    return 0.0;
#else
    return 1e6 * (double)clock() / (double)CLOCKS_PER_SEC;
#endif
}

static void note_time(double us) {
    if (day.n_times == day.times_capacity) {
        day.times_capacity = 2 * day.times_capacity + 1024;
        day.times = (float *)realloc(day.times, day.times_capacity * sizeof *day.times);
        if (!day.times) exit(2);
    }
    day.times[day.n_times++] = (float)us;
}

/* One token for each conversation that answers. */
static void run_step(int sample_every) {
    tkv_rows rows[BATCH];
    int n = 0;
    for (int seq = 0; seq < day.seqs && n < BATCH; seq++)
        if (day.conversations[seq].state == ANSWERS) {
            const conversation *c = &day.conversations[seq];
            generate(c, c->length, n);
            rows[n].seq = seq;
            rows[n++].n = 1;
        }
    if (!n) return;
    const int sampled = day.n_steps++ % (uint64_t)sample_every == 0 ? rand_below(LAYERS) : -1;
    double us = 0.0;
    for (int layer = 0; layer < LAYERS; layer++) {
        const double start = microseconds();
        append_batch(layer, rows, n);
        attend_batch(layer, rows, n);
        us += microseconds() - start;
        if (layer == sampled) { /* at once: the append of the next layer may code blocks of this one again */
            const int row = rand_below(n);
            conversation grown = day.conversations[rows[row].seq];
            grown.length++;
            grown.n_last = 1;
            check_output(&grown, rows[row].seq, layer, q_in[layer] + row * OUT_ROW,
                         out_of[layer] + row * OUT_ROW);
        }
    }
    note_time(us);
    for (int i = 0; i < n; i++) {
        conversation *c = &day.conversations[rows[i].seq];
        c->length++;
        c->n_last = 1;
        if (--c->n_left == 0) {
            c->state = WAITS;
            c->since = day.n_steps;
        }
    }
    day.hour.tokens += n;
    day.all.tokens += n;
    day.hour.steps++;
}

/* >>invariants */
static void check_counters(void) {
    const tkv_budget_info now = budget_of(day.kv), *was = &day.last;
    CHECK(now.used <= now.budget && now.budget == day.budget && now.peak <= day.budget);
    CHECK(now.demoted >= was->demoted && now.refused >= was->refused && now.offloaded >= was->offloaded);
    CHECK(now.unwritten >= was->unwritten && now.pressure.samples >= was->pressure.samples);
    CHECK(now.level >= 0 && now.level <= LAST_LEVEL);
    CHECK_EQ(now.evicted + now.discarded + now.promoted + now.recomputed + now.thinned, 0);
    day.last = now;
}

/* The tokens of all sequences, and their bytes, as the cache reports them. */
static void check_sequences(const tkv_memory_info *memory) {
    static int positions[LONGEST];
    size_t of_sequences = 0, of_blocks = 0, n_blocks = 0, n_tokens = 0;
    for (int seq = 0; seq < day.seqs; seq++) {
        const conversation *c = &day.conversations[seq];
        tkv_seq_memory_info m;
        for (int layer = 0; layer < LAYERS; layer++) CHECK_EQ(tkv_get_length(day.kv, seq, layer), c->length);
        CHECK_EQ(tkv_seq_get_memory(day.kv, seq, &m), TKV_OK);
        of_sequences += m.own + m.share;
        n_tokens += (size_t)(LAYERS * c->length);
        n_blocks += (size_t)(LAYERS * (c->length / 32 + 8));
    }
    for (int tier = 0; tier < TKV_TIER_COUNT; tier++) {
        of_blocks += memory->tier[tier].codes + memory->tier[tier].metadata;
        CHECK(memory->tier[tier].tokens <= n_tokens);
    }
    CHECK_MSG(of_sequences <= of_blocks + memory->slack && of_sequences + n_blocks >= of_blocks,
              "sequences have %.0f bytes, and their blocks %.0f", (double)of_sequences, (double)of_blocks);
    const conversation *c = &day.conversations[rand_below((int)day.seqs)];
    if (c->length)
        CHECK_EQ(tkv_get_positions(day.kv, seq_of(c), day.n_texts % LAYERS, 0, c->length, positions), TKV_OK);
    for (int i = 0; i < c->length; i++) CHECK_EQ(positions[i], i);
}

static void check_day(void) {
    tkv_memory_info memory;
    memset(&memory, 0, sizeof memory);
    check_cache(day.kv);
    CHECK_EQ(tkv_get_memory(day.kv, &memory), TKV_OK);
    CHECK_EQ(memory.total, day.memory.held);
    CHECK_EQ(memory.peak, day.memory.peak);
    CHECK(day.memory.peak <= day.budget);
    check_counters();
    check_sequences(&memory);
    day.n_checked_calls = day.n_calls;
}

/* >>the day */
static int is_busy_hour(long hour) { return hour % 24 >= 7 && hour % 24 < 22; }

static int compare_floats(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static int count_conversations(void) {
    int n = 0;
    for (int seq = 0; seq < day.seqs; seq++) n += day.conversations[seq].state != IS_FREE;
    return n;
}

static void add_hour(void) {
    day_counts *h = &day.hour, *a = &day.all;
    if (day.n_times) {
        qsort(day.times, day.n_times, sizeof *day.times, compare_floats);
        h->p50 = (double)day.times[day.n_times / 2];
        h->p99 = (double)day.times[day.n_times - 1 - day.n_times / 100];
        h->worst = (double)day.times[day.n_times - 1];
    }
    a->steps += h->steps, a->begun += h->begun, a->forked += h->forked, a->saved += h->saved;
    a->restored += h->restored, a->attached += h->attached, a->dropped += h->dropped, a->cut += h->cut;
    a->offloaded += h->offloaded, a->refused += h->refused, a->io_errors += h->io_errors;
    day.n_times = 0;
}

static void print_hour(const char *name, int n_held) {
    const day_counts *h = &day.hour;
    printf("%5s %9ld %7ld %6.0f %6.0f %7.0f  %9.0f  %4d %5ld %5ld %5ld %5ld %5ld %5ld %6ld %5ld\n", name,
           h->tokens, h->steps, h->p50, h->p99, h->worst, h->held, n_held, h->begun, h->forked, h->saved,
           h->restored, h->dropped, h->cut, h->refused, h->io_errors);
    fflush(stdout);
}

/* Runs until so many tokens were appended in this hour. */
static void run_hour(long hour, long tokens, int sample_every) {
    const int most = day.seqs / 3 < BATCH ? (int)day.seqs / 3
                                          : BATCH, /* so that the budget holds those that answer */
        answering = is_busy_hour(hour) ? most : most / 2 - 1;
    memset(&day.hour, 0, sizeof day.hour);
    while (day.hour.tokens < tokens) {
        int n = 0;
        day.store.is_full = hour % 6 == 5 && hour % 24 != 23;
        if (!day.store.fail_write) day.store.fail_write = 1 + rand_below(800);
        if (!day.store.fail_read) day.store.fail_read = 1 + rand_below(9000);
        for (int seq = 0; seq < day.seqs; seq++) n += day.conversations[seq].state == ANSWERS;
        if (n < answering) begin_turn();
        tend();
        run_step(sample_every);
        keep_largest(&day.hour.held, (double)day.memory.held);
        if (day.n_calls - day.n_checked_calls >= CALLS_PER_CHECK) check_day();
    }
    add_hour();
}

static void empty_server(void) {
    for (int seq = 0; seq < day.seqs; seq++)
        if (day.conversations[seq].state != IS_FREE) drop(&day.conversations[seq]);
    while (day.n_saved) free_saved(&day.saved[0]);
    check_day();
    CHECK_EQ(n_stored_keys(&day.store), 0);
    CHECK_EQ(day.n_attached, 0);
}

static tkv_memory_info memory_of_empty_server(void) {
    tkv_memory_info m;
    memset(&m, 0, sizeof m);
    empty_server();
    CHECK_EQ(tkv_get_memory(day.kv, &m), TKV_OK);
    return m;
}

static void print_empty(const char *when, const tkv_memory_info *m) {
    printf("an empty server %s: %.0f bytes; tables %.0f, index %.0f, work space %.0f, slack %.0f\n", when,
           (double)m->total, (double)m->tables, (double)m->index, (double)m->scratch, (double)m->slack);
}

static void create_server(void) {
    tkv_config cfg = make_sized_config(LAYERS, HEADS, KV_HEADS, DIM, (int)day.seqs, CHUNK);
    cfg.limits.max_tokens = LONGEST;
    cfg.tiers.hot_tokens = 32;
    cfg.tiers.warm_tokens = 96;
    cfg.budget.bytes = day.budget = (size_t)day.seqs * SEQ_BYTES;
    cfg.budget.pressure.max_level = LAST_LEVEL;
    attach_test_store(&day.store, &cfg);
    cfg.host.allocator = counting_allocator_of(&day.memory);
    day.kv = create_cache(&cfg);
}

/* Compares two hours with two later ones. */
static void print_flatness(const char *name, const double *p99, long first, long last) {
    const double before = .5 * (p99[first] + p99[first + 1]), after = .5 * (p99[last - 1] + p99[last]);
    printf(
        "p99 of a step in %s hours: %.0f us in hours %ld and %ld, %.0f us in hours %ld and %ld: %.2f times\n",
        name, before, first + 1, first + 2, after, last, last + 1, after / before);
}

/* The sequences are filled and emptied once, so that the cache has its tables and the size of its index. A day
 * follows. A busy hour has three times the tokens of a quiet one. */
static void run_day(int prints) {
    const int sample_every = day.tokens > 1000000 ? 400 : 20;
    double weight = 0.0, *p99 = (double *)calloc((size_t)day.hours, sizeof *p99);
    tkv_memory_info before, after;
    if (!p99) exit(2);
    create_server();
    if (prints)
        printf(" hour    tokens   steps  p50us  p99us worst us  most bytes  held begun forks saved  back "
               "drops  cuts  refuse   EIO\n");
    run_hour(0, day.seqs * 800, sample_every);
    before = memory_of_empty_server();
    if (prints) print_empty("the evening before", &before);
    run_hour(0, day.seqs * 800, sample_every);
    if (prints) print_hour("start", count_conversations());
    for (long hour = 0; hour < day.hours; hour++) weight += is_busy_hour(hour) ? 3.0 : 1.0;
    for (long hour = 0; hour < day.hours; hour++) {
        char name[24];
        run_hour(hour, (long)((double)day.tokens * (is_busy_hour(hour) ? 3.0 : 1.0) / weight), sample_every);
        p99[hour] = day.hour.p99;
        (void)snprintf(name, sizeof name, "%ld", hour + 1);
        if (prints) print_hour(name, count_conversations());
#if HAVE_ISATTY
        if (prints && !isatty(1) && isatty(2)) fprintf(stderr, "hour %ld of %ld\n", hour + 1, day.hours);
#endif
    }
    const long held = count_conversations();
    after = memory_of_empty_server();
    CHECK_LE(after.total - after.tables, before.total - before.tables);
    CHECK_LE(after.tables, 2 * before.tables); /* learned tables stay, in four versions at most */
    if (prints) {
        if (day.hours >= 24) print_flatness("quiet", p99, 0, day.hours / 24 * 24 - 1);
        if (day.hours >= 24) print_flatness("busy", p99, 7, day.hours / 24 * 24 - 3);
        print_empty("at the end", &after);
        printf("%.0f calls, %ld tokens, %d samples\n", (double)day.n_calls, day.all.tokens, day.n_samples);
        printf("%ld conversations held; %d forks and %d restores with the same bits, %d restores coded "
               "again, %ld "
               "attached; %.0f blocks offloaded, %.0f not written; %d store failures\n",
               held, day.n_same_forks, day.n_same_restores, day.n_other_restores, day.all.attached,
               (double)day.last.offloaded, (double)day.last.unwritten, day.store.n_failed);
        printf("largest errors, as shares of their bounds: keys %.2f, values %.2f, output %.2f, arithmetic "
               "%.2f\n",
               day.k_error, day.v_error, day.noise, day.arithmetic);
    }
    tkv_destroy(day.kv);
    CHECK_EQ(day.memory.held, 0);
    CHECK_EQ(day.n_attached, 0);
    destroy_test_store(&day.store);
    free(day.times);
    free(p99);
}

TEST(a_day_of_a_chat_server) {
    const int prints = day.tokens > 0;
    if (!prints) {
        day.tokens = tkv_test_quick() ? 12000 : 40000;
        day.hours = 12;
        day.seqs = tkv_test_quick() ? 12 : 18;
        day.seed = 1;
    }
    day.rng = tkv_rng_seed((uint64_t)day.seed);
    if (prints) printf("\n");
    run_day(prints);
    CHECK(day.n_samples > 20 && day.n_same_forks > 0 && day.n_same_restores > 0);
    CHECK(day.all.saved > 5 && day.all.restored > 5 && day.all.attached > 0 && day.all.cut > 0);
    CHECK(day.last.offloaded > 0 && day.last.unwritten > 0 && day.all.refused > 0);
}

static long number_of(const char *name, const char *text) {
    char *end;
    long n = text ? strtol(text, &end, 10) : 0;
    if (text && (*end == 'K' || *end == 'k')) n *= 1000, end++;
    else if (text && (*end == 'M' || *end == 'm')) n *= 1000000, end++;
    if (!text || *end || n < 1 || n > 2000000000) {
        printf("%s needs a number from 1 on\n", name);
        exit(2);
    }
    return n;
}

int main(int argc, char **argv) {
    if (argc > 1 && strncmp(argv[1], "--", 2) == 0 && strcmp(argv[1], "--list") != 0) {
        day.tokens = 10000000, day.hours = 24, day.seed = 1, day.seqs = 200;
        for (int i = 1; i < argc; i += 2) {
            const long n = number_of(argv[i], argv[i + 1]);
            if (strcmp(argv[i], "--tokens") == 0) day.tokens = n;
            else if (strcmp(argv[i], "--hours") == 0) day.hours = n;
            else if (strcmp(argv[i], "--seed") == 0) day.seed = n;
            else if (strcmp(argv[i], "--seqs") == 0)
                day.seqs = n > MAX_SEQS ? (long)MAX_SEQS : n < 12 ? 12 : n;
            else return printf("%s is no option\n", argv[i]), 2;
        }
        argc = 1;
    }
    tkv_test_begin(argc, argv);
    RUN(a_day_of_a_chat_server);
    return tkv_test_end();
}
