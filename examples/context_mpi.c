/*
 * context_mpi.c - one context over several processes or machines: each holds some of the keys, and all attend at once.
 *
 * mpicc -O2 examples/context_mpi.c examples/tieredkv.c -o context_mpi -lm && mpirun -n 4 ./context_mpi MODEL -f FILE
 *
 * Rank 0 runs the model and compresses each token. A stripe is 16 blocks of 64 tokens (--stripe). When all layers have
 * a stripe in the archive, rank 0 hands stripe s over to rank s % n. Blocks travel as they lie (tkv_seq_save), so they
 * are those of one process. Sinks, the newest tokens and every n-th stripe stay on rank 0.
 *
 * For each layer rank 0 broadcasts its queries, each rank attends to the keys that it has, and one gather gives the
 * outputs of all ranks to all. Each rank merges them in the order of ranks (tkv_merge_attention): the same bits
 * everywhere, whoever is late. Queries keep their true position on every rank (query_positions), for windows and ALiBi.
 *
 * --synthetic N takes made-up keys, values and queries in the place of a model. --check compares all attention with
 * that of one cache. --save DIR keeps checkpoints, and --resume DIR goes on from the last one. DIR may be a folder that
 * all machines share, or one on each. A rank that dies ends the job within seconds. `context_mpi --launch N ...` runs
 * `mpirun -n N` (options: its environment variables), and names the tokens that a dead rank held, by the notes in DIR
 * (context_job.h).
 *
 * Limits: one sequence. Rank 0 holds the newest tokens and compresses alone. All machines are of one kind.
 *
 * It needs POSIX and Open MPI 4. `./context_mpi --help` lists the options. context_shard.h has the attention and the
 * stripes of a rank. In this order: options, checkpoints, a model, synthetic tokens, report, main.
 */
#define PROGRAM "context_mpi"
#include "program.h" /* before system headers */

#include "context_job.h"
#include "context_shard.h"
#include "measure.h"

#include <mpi.h>

enum { ASKED_ROWS = 4 }; /* of a question about synthetic tokens */

static const char usage[] =
    "mpirun -n RANKS context_mpi MODEL [options]\n" PROGRAM_HELP
    "  -n N               most tokens to write (256)\n"
    "  --stripe N         blocks of 64 tokens that change hands together (16)\n"
    "  --synthetic N      N made-up tokens, without MODEL\n"
    "  --check            compares synthetic tokens and attention with one cache that has all\n"
    "  --window N         a query sees the newest N tokens\n"
    "  --alibi            scores fall with the distance (ALiBi)\n"
    "  --save DIR         saves checkpoints in a folder\n"
    "  --every N          tokens between two of them (1024)\n"
    "  --resume DIR       goes on from the last one with as many ranks, and saves there\n"
    "  --delay N          each rank sleeps up to N microseconds before each gather\n"
    "  --launch N         runs mpirun -n N; it comes first, and needs --save or --resume\n"
    "\n"
    "The plan of the cache:\n";

typedef struct job {
    shard s;
    options opt;
    llama_model model; /* on rank 0 */
    int *tokens;       /* on rank 0, unless they are synthetic */
    int synthetic, check, alibi;
    const char *dir, *resumes; /* resumes: NULL, or dir */
    int every, n_saved;        /* tokens between two checkpoints; in the last one */
    double worst;              /* largest difference from one cache */
} job;

/* >>options */
static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    job *j = (job *)ctx;
    int ok = 1;
    if (strcmp(name, "--check") == 0) j->check = 1;
    else if (strcmp(name, "--alibi") == 0) j->alibi = 1;
    else if (!value) return UNKNOWN;
    else {
        if (strcmp(name, "--stripe") == 0) ok = read_int(value, 1, 4096, &j->s.at.stripe);
        else if (strcmp(name, "--synthetic") == 0) ok = read_int(value, 1, PROGRAM_MOST, &j->synthetic);
        else if (strcmp(name, "--window") == 0) ok = read_int(value, 1, PROGRAM_MOST, &j->s.window);
        else if (strcmp(name, "--every") == 0) ok = read_int(value, 1, PROGRAM_MOST, &j->every);
        else if (strcmp(name, "--delay") == 0) ok = read_int(value, 0, 1000000, &j->s.delay);
        else if (strcmp(name, "--save") == 0) j->dir = value;
        else if (strcmp(name, "--resume") == 0) j->dir = j->resumes = value;
        else return UNKNOWN;
        return ok ? WITH_VALUE : BAD_VALUE;
    }
    return ALONE;
}

static void check_options(const job *j) {
    const tkv_config *c = &j->s.cfg;
    if (!j->opt.model && !j->synthetic) help(usage, 1);
    if (j->opt.model && j->synthetic) fail("--synthetic takes no model");
    if (j->check && (!j->synthetic || j->resumes)) fail("--check needs all tokens of --synthetic");
    if (c->tiers.hot_tokens == TKV_UNLIMITED || c->tiers.warm_tokens == TKV_UNLIMITED)
        fail("stripes leave from the archive: the hot and the warm tier must end");
    if (c->evict.policy || c->tiers.n_anchors || c->budget.adapt || c->meter.heads || c->promotion.every)
        fail("no rank sees all attention: it cannot evict, promote, adapt, or find anchors");
}

/* >>checkpoints. Each rank has two files, for even and odd generations. The file `state` says which ones count. */
static void name_file(const job *j, char *path) {
    const int odd = j->s.at.generation % 2;
    if (snprintf(path, JOB_PATH, "%s/rank-%d.%d.tkv", j->dir, j->s.rank, odd) >= JOB_PATH)
        fail("%s: the name is too long", j->dir);
}

static void share_progress(shard *s) { MPI_Bcast(&s->at, N_NUMBERS, MPI_INT, 0, MPI_COMM_WORLD); }

/* Saves the whole cache of this rank, with its progress, and on rank 0 with the tokens. Returns 0 after a failure. */
static int save_rank(job *j) {
    char path[JOB_PATH];
    shard *s = &j->s;
    const int n = j->tokens ? s->at.n_tokens : 0;
    name_file(j, path);
    saved file = saved_at(path, s->model, TKV_ALL_SEQS);
    file.n_numbers = N_NUMBERS + n;
    file.numbers = (int *)allocate((size_t)file.n_numbers, sizeof *file.numbers);
    memcpy(file.numbers, &s->at, sizeof s->at);
    if (n) memcpy(file.numbers + N_NUMBERS, j->tokens, (size_t)n * sizeof *j->tokens);
    const tkv_status status = save_sequence(s->kv, &file);
    if (status != TKV_OK)
        fprintf(stderr, PROGRAM ": %s was not saved: %s\n", path, saved_fault(s->kv, status));
    free(file.numbers);
    return status == TKV_OK;
}

/* All ranks save. When all files are whole, rank 0 writes the state. Else the last checkpoint stays. */
static void save_checkpoint(job *j) {
    char path[JOB_PATH];
    shard *s = &j->s;
    int ok = 0, all_ok = 0;
    memcpy(s->at.checksum, &s->checksum, sizeof s->checksum);
    s->at.generation++;
    share_progress(s);
    ok = save_rank(j);
    MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (s->rank) return;
    j->n_saved = s->at.n_cached;
    name_state(j->dir, path);
    ok = all_ok && write_progress(path, s->model, &s->at) == 0;
    if (all_ok && !ok) fprintf(stderr, PROGRAM ": %s was not written: %s\n", path, strerror(errno));
    if (!ok) s->at.generation--;
}

static void save_if_due(job *j) {
    if (!j->dir || j->s.at.n_cached - j->n_saved < j->every) return;
    (void)share_order(&j->s, SAVE, 0, 0);
    save_checkpoint(j);
}

static void read_state(job *j) {
    char path[JOB_PATH], model[MODEL_NAME];
    progress *at = &j->s.at;
    const progress now = *at;
    name_state(j->dir, path);
    if (!read_progress(path, model, at)) fail("%s is missing or damaged, so nothing can be resumed", path);
    if (strcmp(model, j->s.model) != 0) fail("%s is of another model", path);
    if (at->n_ranks != now.n_ranks || at->stripe != now.stripe || at->sinks != now.sinks)
        fail("%s is of %d ranks, stripes of %d tokens and %d sinks, and this job has %d, %d and %d", path,
             at->n_ranks, at->stripe, at->sinks, now.n_ranks, now.stripe, now.sinks);
}

static void load_checkpoint(job *j) {
    char path[JOB_PATH];
    shard *s = &j->s;
    if (s->rank == 0) read_state(j);
    share_progress(s);
    name_file(j, path);
    saved file = saved_at(path, s->model, TKV_ALL_SEQS);
    const tkv_status status = load_sequence(s->kv, &file);
    if (status != TKV_OK) fail("cannot load %s: %s", path, saved_fault(s->kv, status));
    const int n = j->tokens ? s->at.n_tokens : 0;
    if (file.n_numbers < N_NUMBERS || memcmp(file.numbers, &s->at, sizeof s->at) != 0 ||
        file.n_numbers != N_NUMBERS + n)
        fail("%s is of another checkpoint than the file state", path);
    if (n > context_of(&j->opt, &j->model)) fail("%s has %d tokens, more than the context (-c)", path, n);
    if (n) memcpy(j->tokens, file.numbers + N_NUMBERS, (size_t)n * sizeof *j->tokens);
    free(file.numbers);
    memcpy(&s->checksum, s->at.checksum, sizeof s->checksum);
    j->n_saved = s->at.n_cached;
}

/* >>a model, on rank 0 */
/* The attention of llama_forward_with. */
static tkv_status attend_for_model(void *ctx, int layer, const float *q, const float *k, const float *v,
                                   int n, float *out) {
    shard *s = (shard *)ctx;
    const tkv_model_config *m = &s->cfg.model;
    const size_t rows = (size_t)n * (size_t)m->n_heads;
    must(s, llama_append_at(s->kv, CONTEXT, layer, s->positions[0], k, v, n), "append");
    memcpy(s->q, q, rows * (size_t)m->head_dim * sizeof *q);
    memcpy(out, attend_together(s, layer), rows * (size_t)m->v_head_dim * sizeof *out);
    return TKV_OK;
}

static void evaluate(job *j, int n, float *logits) {
    shard *s = &j->s;
    const int at = s->at.n_cached;
    (void)share_order(s, STEP, n, at);
    begin_step(s, n, at);
    must(s, tkv_seq_begin(s->kv, CONTEXT), "begin a step");
    must(s, llama_forward_with(&j->model, j->tokens + at, n, at, attend_for_model, s, logits, 1), "evaluate");
    must(s, tkv_seq_commit(s->kv, CONTEXT), "commit a step");
    hand_over(s);
}

static void print_token(const job *j, int i) {
    int len = 0;
    const char *piece = llama_piece(&j->model, i > 0 ? j->tokens[i - 1] : -1, j->tokens[i], &len);
    fwrite(piece, 1, (size_t)len, stdout);
    fflush(stdout);
}

static void begin_text(job *j) {
    const int context = context_of(&j->opt, &j->model);
    const int most = context - (j->opt.n < context / 2 ? j->opt.n : context / 2);
    j->tokens = (int *)allocate((size_t)context, sizeof *j->tokens);
    if (j->resumes) return;
    int *prompt = NULL;
    const int n = read_prompt(&j->model, &j->opt, most, 0, 0, &prompt);
    memcpy(j->tokens, prompt, (size_t)n * sizeof *prompt);
    free(prompt);
    j->s.at.n_prompt = j->s.at.n_tokens = n;
}

/* Evaluates the tokens that no cache has, and writes new ones. Random numbers depend on --seed and the position alone,
 * so a resumed job writes the same text. */
static void write_text(job *j) {
    const int context = context_of(&j->opt, &j->model), vocab = j->model.vocab;
    progress *at = &j->s.at;
    float *logits = (float *)allocate((size_t)vocab, sizeof *logits);
    choice *space = (choice *)allocate((size_t)vocab, sizeof *space);
    for (int i = at->n_prompt; i < at->n_tokens; i++) print_token(j, i); /* written before the checkpoint */
    for (;;) {
        save_if_due(j);
        evaluate(j, measure_chunk(&j->s.cfg, at->n_cached, at->n_tokens - at->n_cached), logits);
        if (at->n_cached < at->n_tokens) continue;
        if (at->n_tokens - at->n_prompt >= j->opt.n || at->n_tokens >= context) break;
        uint64_t rng = rng_seed(&j->opt) + (uint64_t)at->n_tokens * 0x9e3779b97f4a7c15u;
        const int token = sample(logits, vocab, &j->opt, &rng, space);
        if (!j->opt.raw && j->model.entries[token].kind == LLAMA_CONTROL) break;
        j->tokens[at->n_tokens++] = token;
        print_token(j, at->n_tokens - 1);
    }
    printf("\n\n");
    free(logits);
    free(space);
}

/* >>synthetic tokens, on rank 0 */
/* Makes n rows of numbers between -size and size. They depend on position, layer, `what` and channel alone. */
static void make_up(float *x, int n, int dim, int position, int layer, int what, float size) {
    for (int i = 0; i < n * dim; i++) {
        const uint64_t row = ((uint64_t)(position + i / dim) * 64 + (uint64_t)layer) * 4 + (uint64_t)what;
        uint64_t z = (row * 4096 + (uint64_t)(i % dim)) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 31)) * 0xbf58476d1ce4e5b9u;
        x[i] = size * ((float)(z >> 40) / 8388608.0f - 1.0f);
    }
}

/* The newest tokens ask. With --check, one cache answers too. */
static void ask(job *j, float *expected) {
    shard *s = &j->s;
    const tkv_model_config *m = &s->cfg.model;
    const int n = s->at.n_cached < ASKED_ROWS ? s->at.n_cached : ASKED_ROWS;
    (void)share_order(s, STEP, n, s->at.n_cached - n);
    begin_step(s, n, s->at.n_cached - n);
    for (int layer = 0; layer < m->n_layers; layer++) {
        make_up(s->q, n, m->n_heads * m->head_dim, s->positions[0], layer, 0, 6.0f);
        const float *out = attend_together(s, layer);
        if (s->whole) attend(s, s->whole, 1, layer, expected);
        for (int i = 0; s->whole && i < n * m->n_heads * m->v_head_dim; i++) {
            const double difference = fabs((double)out[i] - (double)expected[i]);
            if (!(difference <= j->worst)) j->worst = difference;
        }
    }
}

static void append_synthetic(job *j) {
    shard *s = &j->s;
    const tkv_model_config *m = &s->cfg.model;
    const int dim = m->n_kv_heads * m->head_dim, between = j->synthetic / 16 + 1; /* between two questions */
    float *k = (float *)allocate((size_t)(2 * MOST_ROWS * dim), sizeof *k), *v = k + MOST_ROWS * dim;
    while (s->at.n_cached < j->synthetic) {
        save_if_due(j);
        const int at = s->at.n_cached, n = measure_chunk(&s->cfg, at, j->synthetic - at);
        for (int layer = 0; layer < m->n_layers; layer++) {
            make_up(k, n, dim, at, layer, 1, 1.0f);
            make_up(v, n, dim, at, layer, 2, 1.0f);
            must(s, llama_append_at(s->kv, CONTEXT, layer, at, k, v, n), "append");
            if (s->whole)
                must(s, llama_append_at(s->whole, CONTEXT, layer, at, k, v, n), "append to one cache");
        }
        hand_over(s);
        if (s->at.n_cached / between > at / between || s->at.n_cached == j->synthetic) ask(j, k);
    }
    free(k);
}

/* The most that the outputs of all ranks and those of one cache may differ. Sums have another order. Kernels of
 * compressed blocks also round softmax weights, in steps of the largest weight of a rank. */
static double most_difference(const shard *s) {
    int is_exact = 1;
    for (int layer = 0; layer < s->cfg.model.n_layers; layer++) {
        tkv_layer_info info;
        must(s, tkv_get_layer(s->kv, CONTEXT, layer, &info), "find formats");
        for (int tier = 0; tier < TKV_TIER_COUNT; tier++)
            is_exact &= info.format[tier].k <= TKV_BF16 && info.format[tier].v <= TKV_BF16;
    }
    return is_exact ? 1e-6 : 1e-3;
}

/* >>report */
typedef struct holding { /* what a rank has at the end */
    double tokens, bytes;
    traffic count;
} holding;
enum { N_HOLDING = sizeof(holding) / sizeof(double) };

static void print_rank(const shard *s, int rank, const holding *h) {
    const traffic *t = &h->count;
    const double rows = t->n_rows > 0 ? t->n_rows : 1, steps = t->n_steps > 0 ? t->n_steps : 1;
    const double moved = t->n_moved > 0 ? t->n_moved * s->cfg.model.n_layers : 1;
    printf("  %4d  %9s  %12s  %6.0f  %7.0f  %8.0f  %8.0f  %7.1f   ", rank, commas(h->tokens),
           commas(h->bytes), t->q / rows, t->sent / rows, t->received / rows, t->stripes / moved,
           t->orders / steps);
    print_ranges(stdout, &s->at, rank);
    printf("\n");
}

/* Prints what each rank holds and what it moved, on rank 0. All ranks must have merged the same bits. */
static void report(const job *j, double took) {
    const shard *s = &j->s;
    holding own, *all = (holding *)allocate((size_t)s->at.n_ranks, sizeof *all);
    uint64_t sum = s->checksum, least = 0, most = 0;
    tkv_memory_info memory;
    must(s, tkv_get_memory(s->kv, &memory), "count bytes");
    own.tokens = 0;
    for (int tier = 0; tier < TKV_TIER_COUNT; tier++)
        own.tokens += (double)memory.tier[tier].tokens / s->cfg.model.n_layers;
    own.bytes = (double)memory.total;
    own.count = s->count;
    MPI_Gather(&own, N_HOLDING, MPI_DOUBLE, all, N_HOLDING, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    MPI_Allreduce(&sum, &least, 1, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
    MPI_Allreduce(&sum, &most, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
    if (least != most) fail("rank %d: the ranks have merged different bits", s->rank);
    if (s->rank == 0) {
        printf("[%s tokens in %d stripes of %d, %.1f s; all ranks merged the same bits: %08x%08x]\n",
               commas(s->at.n_cached), s->at.n_stripes, s->at.stripe, took, (unsigned)(sum >> 32),
               (unsigned)(sum & 0xffffffffu));
        if (s->whole) printf("[one cache differs by at most %.2e]\n", j->worst);
        printf("\n                   bytes of  bytes a token and layer:             orders\n"
               "  rank     tokens     its cache       q  gather: sent, received  stripe  a step   holds\n");
        for (int rank = 0; rank < s->at.n_ranks; rank++) print_rank(s, rank, &all[rank]);
    }
    free(all);
}

/* >>main */
/* Rank 0 knows the model. The others need its shape and its name. */
static void share_model(job *j) {
    shard *s = &j->s;
    tkv_model_config *m = &s->cfg.model;
    if (s->rank == 0 && j->synthetic) {
        m->n_layers = 2;
        m->n_heads = 4;
        m->n_kv_heads = 2;
        m->head_dim = m->v_head_dim = 64;
        snprintf(s->model, sizeof s->model, "synthetic");
    } else if (s->rank == 0) {
        load(&j->opt, &j->model, &s->cfg);
        name_model(&j->model, s->model);
        begin_text(j);
    }
    MPI_Bcast(m, sizeof *m, MPI_BYTE, 0, MPI_COMM_WORLD);
    MPI_Bcast(s->model, sizeof s->model, MPI_CHAR, 0, MPI_COMM_WORLD);
}

/* Does on a rank > 0 what rank 0 orders. */
static void serve(job *j) {
    shard *s = &j->s;
    for (;;) {
        const order o = share_order(s, DONE, 0, 0);
        if (o.kind == DONE) return;
        if (o.kind == SAVE) save_checkpoint(j);
        if (o.kind == HAND_OVER) follow_hand_over(s, o.n, o.value);
        if (o.kind != STEP) continue;
        begin_step(s, o.n, o.value);
        for (int layer = 0; layer < s->cfg.model.n_layers; layer++) (void)attend_together(s, layer);
    }
}

/* A message failed, as when the other rank is dead. This rank is not the one that died. */
static void end_by_message(MPI_Comm *where, int *error, ...) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    (void)MPI_Error_string(*error, text, &n);
    fprintf(stderr, PROGRAM ": %s\n", text);
    remove_note();
    MPI_Abort(*where, 1);
}

static void begin_mpi(shard *s, int *argc, char ***argv) {
    MPI_Errhandler handler;
    MPI_Init(argc, argv);
    MPI_Comm_create_errhandler(end_by_message, &handler);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
    MPI_Errhandler_free(&handler);
    MPI_Comm_rank(MPI_COMM_WORLD, &s->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &s->at.n_ranks);
}

static void end(job *j) {
    MPI_Barrier(MPI_COMM_WORLD); /* all ranks have ended well */
    remove_note();
    tkv_destroy(j->s.whole);
    free_shard(&j->s);
    plan_free(&j->s.cfg);
    llama_free(&j->model);
    free(j->tokens);
    MPI_Finalize();
}

int main(int argc, char **argv) {
    static job j;
    shard *s = &j.s;
    if (argc > 1 && strcmp(argv[1], "--launch") == 0) return launch(argc, argv);
    j.opt.n = 256;
    j.every = 1024;
    s->at.stripe = 16;
    parse_options(argc, argv, usage, &j.opt, &s->cfg, parse_own_option, &j);
    check_options(&j);
    s->at.stripe *= TKV_BLOCK_TOKENS;
    begin_mpi(s, &argc, &argv);
    const double start = latency_now();
    share_model(&j);
    create_shard(s, j.alibi);
    if (j.check && s->rank == 0) s->whole = create(&s->cfg);
    if (s->rank == 0 && !j.resumes) load_tables(&j.opt, s->kv);
    if (j.resumes) load_checkpoint(&j);
    if (j.dir) begin_notes(j.dir, s->rank, s->model, &s->at);
    if (s->rank) serve(&j);
    else if (j.synthetic) append_synthetic(&j);
    else write_text(&j);
    if (s->rank == 0) (void)share_order(s, DONE, 0, 0);
    report(&j, latency_now() - start);
    if (s->whole && !(j.worst <= most_difference(s))) fail("one cache differs by %.2e", j.worst);
    end(&j);
    return 0;
}
