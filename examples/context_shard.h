/*
 * context_shard.h - one rank of a context that several processes hold: the attention of all ranks, and the stripes of
 * tokens that change hands. Include program.h and context_job.h first.
 *
 * Rank 0 begins each action with an order to all. In this order: a rank, orders, attention, stripes.
 */
#ifndef CONTEXT_SHARD_H
#define CONTEXT_SHARD_H

#define OMPI_SKIP_MPICXX 1 /* the C interface, in C++ too */
#include <mpi.h>

enum { CONTEXT, SPARE, SEQUENCES }; /* sequences; SPARE: a stripe on its way */
enum { MOST_ROWS = 512 };           /* rows of a step */

/* >>a rank */
typedef struct traffic { /* bytes, without headers of MPI */
    double orders, q;
    double sent, received; /* outputs and log-sum-exps of this rank; of the others */
    double stripes;
    double n_steps, n_rows, n_moved; /* n_rows: rows of all layers; n_moved: tokens in the stripes */
} traffic;

typedef struct shard {
    tkv_config cfg;
    tkv_cache *kv;
    tkv_cache *whole; /* NULL, or on rank 0 one cache that has all tokens */
    int rank;
    progress at;
    char model[MODEL_NAME];
    int window, delay;           /* delay: most microseconds before a gather */
    float *slopes;               /* NULL, or of ALiBi */
    int n, positions[MOST_ROWS]; /* rows of this step */
    float *q, *part, *parts;     /* part: outputs and log-sum-exps [n][n_heads]; parts: of all ranks */
    uint64_t checksum;           /* of all merged outputs */
    traffic count;
} shard;

static inline void must(const shard *s, tkv_status status, const char *what) {
    if (status != TKV_OK) fail("rank %d cannot %s: %s", s->rank, what, cache_fault(s->kv, status));
}

/* Creates the cache and the space of a rank. The shape of the model is known. */
static inline void create_shard(shard *s, int alibi) {
    const tkv_model_config *m = &s->cfg.model;
    const size_t rows = (size_t)MOST_ROWS * (size_t)m->n_heads, part = rows * (size_t)(m->v_head_dim + 1);
    const int sinks = s->cfg.tiers.sink_tokens;
    s->at.sinks = sinks == TKV_OFF ? 0 : sinks ? sinks : 4;
    s->cfg.limits.max_seqs = SEQUENCES;
    s->kv = create(&s->cfg);
    s->q = (float *)allocate(rows * (size_t)m->head_dim, sizeof *s->q);
    s->part = (float *)allocate(part, sizeof *s->part);
    s->parts = (float *)allocate(part * (size_t)s->at.n_ranks, sizeof *s->parts);
    if (alibi) s->slopes = (float *)allocate((size_t)m->n_heads, sizeof *s->slopes);
    for (int h = 0; alibi && h < m->n_heads; h++)
        s->slopes[h] = (float)pow(2.0, -8.0 * (h + 1) / m->n_heads); /* arXiv 2108.12409 */
}

static inline void free_shard(shard *s) {
    tkv_destroy(s->kv);
    free(s->q);
    free(s->part);
    free(s->parts);
    free(s->slopes);
}

/* >>orders */
typedef enum order_kind { STEP, HAND_OVER, SAVE, DONE } order_kind;
typedef struct order { /* what comes next, from rank 0 to all */
    int kind;          /* order_kind */
    int n;             /* STEP: rows in each layer; HAND_OVER: the stripe */
    int value;         /* STEP: position of the first row; HAND_OVER: bytes of the stripe */
} order;

/* Gives an order on rank 0. On other ranks, waits for it and does not use the arguments. */
static inline order share_order(shard *s, order_kind kind, int n, int value) {
    order o;
    o.kind = (int)kind;
    o.n = n;
    o.value = value;
    MPI_Bcast(&o, sizeof o / sizeof(int), MPI_INT, 0, MPI_COMM_WORLD);
    s->count.orders += sizeof o;
    return o;
}

static inline void begin_step(shard *s, int n, int position) {
    if (n < 1 || n > MOST_ROWS || position < 0 || position > PROGRAM_MOST) fail("a step of %d rows", n);
    s->n = n;
    for (int i = 0; i < n; i++) s->positions[i] = position + i;
    s->count.n_steps++;
}

/* >>attention */
/* Attends to the keys of one cache. knows_rows: it has the tokens of the queries, as its newest ones. */
static inline void attend(const shard *s, tkv_cache *kv, int knows_rows, int layer, float *part) {
    tkv_attend_params p;
    memset(&p, 0, sizeof p);
    p.seq = CONTEXT;
    p.layer = layer;
    p.n = s->n;
    p.q = s->q;
    p.out = part;
    p.lse = part + s->n * s->cfg.model.n_heads * s->cfg.model.v_head_dim;
    p.window = s->window;
    p.alibi_slopes = s->slopes;
    p.query_positions = knows_rows ? NULL : s->positions;
    const tkv_status status = tkv_attend_ex(kv, &p);
    if (status != TKV_OK) fail("rank %d, layer %d: %s", s->rank, layer, tkv_get_status_text(status));
}

static inline void sleep_a_while(const shard *s) { /* --delay: another time on each rank and in each layer */
    const uint64_t x = ((uint64_t)s->rank << 40) + (uint64_t)s->count.sent + 1;
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = s->delay ? (long)((x * 0x9e3779b97f4a7c15u >> 33) % (uint64_t)s->delay) * 1000 : 0;
    if (s->delay) (void)nanosleep(&t, NULL);
}

/* Attends to the keys of all ranks. On rank 0, s->q has the queries. Returns the outputs. */
static inline const float *attend_together(shard *s, int layer) {
    const tkv_model_config *m = &s->cfg.model;
    const int n = s->n * m->n_heads, n_q = n * m->head_dim, n_out = n * m->v_head_dim, size = n_out + n;
    MPI_Bcast(s->q, n_q, MPI_FLOAT, 0, MPI_COMM_WORLD);
    attend(s, s->kv, s->rank == 0, layer, s->part);
    sleep_a_while(s);
    MPI_Allgather(s->part, size, MPI_FLOAT, s->parts, size, MPI_FLOAT, MPI_COMM_WORLD);
    for (int rank = 1; rank < s->at.n_ranks; rank++) {
        const float *part = s->parts + (size_t)rank * (size_t)size;
        tkv_merge_attention(s->parts, s->parts + n_out, part, part + n_out, n, m->v_head_dim);
    }
    s->checksum = llama_add_to_checksum(s->checksum, s->parts, (size_t)size * sizeof *s->parts);
    s->count.n_rows += s->n;
    s->count.q += (double)n_q * sizeof *s->q;
    s->count.sent += (double)size * sizeof *s->part;
    s->count.received += (double)size * (s->at.n_ranks - 1) * sizeof *s->part;
    return s->parts;
}

/* >>stripes */
/* The most bytes that a stripe can have: exact values and tables. */
static inline int most_bytes(const shard *s) {
    const tkv_model_config *m = &s->cfg.model;
    const double channels = (double)m->n_layers * m->n_kv_heads * (m->head_dim + m->v_head_dim);
    const double bytes = 8 * channels * s->at.stripe + 65536 * channels + (1 << 20);
    return bytes < INT_MAX ? (int)bytes : INT_MAX;
}

/* Returns the bytes of a stripe, saved as a sequence of its own. The caller frees them. */
static inline void *save_stripe(const shard *s, tkv_cache *kv, int stripe, size_t *size) {
    const int first = first_of_stripe(&s->at, stripe);
    tkv_save_params save;
    memset(&save, 0, sizeof save);
    save.seq = SPARE;
    must(s, tkv_seq_copy(kv, CONTEXT, first, first + s->at.stripe, SPARE, first), "copy a stripe");
    must(s, tkv_seq_save(kv, &save, NULL, 0, size), "count the bytes of a stripe");
    void *bytes = allocate(*size, 1);
    must(s, tkv_seq_save(kv, &save, bytes, *size, NULL), "save a stripe");
    must(s, tkv_seq_reset(kv, SPARE), "empty a sequence");
    return bytes;
}

static inline void send_stripe(shard *s, int stripe, int owner) {
    const int first = first_of_stripe(&s->at, stripe);
    size_t size = 0, size_whole = 0;
    void *bytes = save_stripe(s, s->kv, stripe, &size);
    if (s->whole) { /* the blocks of one cache are the same */
        void *expected = save_stripe(s, s->whole, stripe, &size_whole);
        if (size != size_whole || memcmp(bytes, expected, size) != 0)
            fail("stripe %d has other bytes", stripe);
        free(expected);
    }
    if (size > (size_t)most_bytes(s))
        fail("a stripe has %.0f bytes; make it shorter (--stripe)", (double)size);
    (void)share_order(s, HAND_OVER, stripe, (int)size);
    MPI_Send(bytes, (int)size, MPI_BYTE, owner, 0, MPI_COMM_WORLD);
    free(bytes);
    must(s, tkv_seq_remove(s->kv, CONTEXT, first, first + s->at.stripe), "remove a stripe");
    s->count.stripes += (double)size;
    s->count.n_moved += s->at.stripe;
}

/* Joins a stripe to those of this rank: the same blocks, at the same positions. */
static inline void take_stripe(shard *s, int stripe, int size) {
    const int first = first_of_stripe(&s->at, stripe), end = first + s->at.stripe;
    tkv_load_params load;
    tkv_load_info info;
    if (size < 1 || size > most_bytes(s)) fail("a stripe of %d bytes", size);
    void *bytes = allocate((size_t)size, 1);
    MPI_Recv(bytes, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    memset(&load, 0, sizeof load);
    memset(&info, 0, sizeof info);
    load.seq = SPARE;
    must(s, tkv_seq_load(s->kv, &load, bytes, (size_t)size, &info), "load a stripe");
    free(bytes);
    if (info.n_tokens != s->at.stripe) fail("a stripe of %d tokens", info.n_tokens);
    if (info.n_recoded) fail("rank %d coded %d blocks again, with other tables", s->rank, info.n_recoded);
    must(s, tkv_seq_copy(s->kv, SPARE, first, end, CONTEXT, first), "join a stripe");
    must(s, tkv_seq_reset(s->kv, SPARE), "empty a sequence");
    s->count.stripes += size;
    s->count.n_moved += s->at.stripe;
}

static inline int is_stripe_due(const shard *s) { /* its newest token is in the archive, in all layers */
    const int newest = first_of_stripe(&s->at, s->at.n_stripes + 1) - 1;
    for (int layer = 0; layer < s->cfg.model.n_layers; layer++) {
        uint8_t tier = TKV_TIER_HOT;
        if (newest >= tkv_get_length(s->kv, CONTEXT, layer)) return 0;
        must(s, tkv_get_tiers(s->kv, CONTEXT, layer, newest, 1, &tier), "find a stripe");
        if (tier != TKV_TIER_ARCHIVE) return 0;
    }
    return 1;
}

/* On rank 0: gives the stripes that are due to their owners. The first one freezes the tables: from then on rank 0 does
 * not see all attention. One process freezes them too. */
static inline void hand_over(shard *s) {
    progress *at = &s->at;
    at->n_cached = tkv_get_length(s->kv, CONTEXT, TKV_ALL_LAYERS);
    while (is_stripe_due(s)) {
        const int owner = at->n_stripes % at->n_ranks;
        if (at->n_stripes == 0) must(s, tkv_freeze_calibration(s->kv), "freeze tables");
        if (at->n_stripes == 0 && s->whole) must(s, tkv_freeze_calibration(s->whole), "freeze tables");
        if (owner) send_stripe(s, at->n_stripes, owner);
        else (void)share_order(s, HAND_OVER, at->n_stripes, 0);
        at->n_stripes++;
        write_note(s->model, at);
    }
}

/* On the other ranks: takes a stripe of `size` bytes, or sees it go to another rank. */
static inline void follow_hand_over(shard *s, int stripe, int size) {
    const int is_own = stripe % s->at.n_ranks == s->rank;
    if (stripe != s->at.n_stripes) fail("stripe %d comes behind %d others", stripe, s->at.n_stripes);
    if (is_own) take_stripe(s, stripe, size);
    s->at.n_stripes++;
    if (is_own) write_note(s->model, &s->at);
}

#endif /* CONTEXT_SHARD_H */
