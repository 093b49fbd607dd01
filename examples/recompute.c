/*
 * recompute.c - two conversations take turns in a cache that cannot hold both. The cache discards blocks of the
 * waiting conversation, and the model recomputes their keys and values before that conversation continues. The
 * generated texts do not change.
 *
 * cc -O2 examples/recompute.c examples/tieredkv.c -o recompute -lm && ./recompute
 *
 * The first part keeps exact keys and values under a budget, and the cache discards blocks (cfg.budget.discard). The
 * second part has compressed tiers, and the program discards blocks with tkv_seq_discard. Each part compares all
 * logits with those of a run that discards nothing. If one bit differs, the exit status is 1.
 *
 * The recomputed values have the same bits because the model repeats the same steps. It reads the text from its first
 * token on, in the same chunks, with a second cache of the same plan. The plan must not use formats that learn
 * tables, because the second cache would learn other tables. To recompute a few tokens, the model evaluates all
 * tokens before them. In this order: options, evaluating, recomputing, turns, main.
 */
#define PROGRAM "recompute"
#include "program.h" /* before system headers */

#define DEMO "examples/data/demo.gguf"
enum { CONVERSATIONS = 2, CHUNK = 64 };

static const char usage[] =
    "recompute [MODEL] [options]\n"
    "Without MODEL, the model is " DEMO ".\n" PROGRAM_HELP "  -n N               tokens per turn (64)\n"
    "  --turns N          turns of each conversation (2)\n"
    "  --budget PERCENT   budget, in percent of the bytes of both conversations (75)\n"
    "The program always sets --raw.\n"
    "\n"
    "The plan:\n";

typedef struct settings {
    int turns, percent;
} settings;

typedef struct conversation {
    int *tokens, n;
    int *chunk, n_chunks; /* sizes of all evaluated chunks, in order */
    uint64_t rng, hash;   /* hash: of all logits */
} conversation;

typedef struct run_state {
    llama_model *model;
    const options *o;
    tkv_config cfg;
    tkv_config chunking; /* measure_chunk ends chunks by this config; compared runs share it */
    tkv_cache *kv;
    conversation conversations[CONVERSATIONS];
    float *logits;
    choice *space;
    tkv_remat remat;
    int recomputed;        /* tokens */
    double seconds, flops; /* of recomputation */
} run_state;

/* >>options */
static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    settings *w = (settings *)ctx;
    if (!value) return UNKNOWN;
    int ok;
    if (strcmp(name, "--turns") == 0) ok = read_int(value, 1, 1000, &w->turns);
    else if (strcmp(name, "--budget") == 0) ok = read_int(value, 1, 100, &w->percent);
    else return UNKNOWN;
    return ok ? WITH_VALUE : BAD_VALUE;
}

/* >>evaluating */
/* Evaluates the next n known tokens of a conversation, and adds the logits to its hash. */
static void evaluate(run_state *w, int seq, int n) {
    conversation *t = &w->conversations[seq];
    const int pos = tkv_get_length(w->kv, seq, TKV_ALL_LAYERS);
    const tkv_status st = llama_forward(w->model, w->kv, seq, t->tokens + pos, n, w->logits, 1);
    const unsigned char *bytes = (const unsigned char *)w->logits;
    size_t i, size = (size_t)w->model->vocab * sizeof *w->logits;
    if (st) fail("token %d: %s (%s)", pos, tkv_get_status_text(st), tkv_get_last_error(w->kv));
    t->chunk[t->n_chunks++] = n;
    for (i = 0; i < size; i++) t->hash = (t->hash ^ bytes[i]) * 0x100000001b3u; /* FNV-1a */
}

/* >>recomputing */
typedef struct recorder { /* a second cache; it keeps the appended keys and values of some tokens */
    tkv_cache *kv;
    float *k, *v; /* [n_layers][n] rows of tokens start to start + n - 1 */
    int pos, start, n;
    size_t k_row, v_row; /* floats of a row */
} recorder;

/* Copies rows of tokens that the recorder keeps. `from` has n rows; the first is of token r->pos. */
static void keep_rows(const recorder *r, int layer, const float *from, size_t row, int n, float *to) {
    const int first = r->pos < r->start ? r->start : r->pos, end = r->start + r->n;
    const int last = r->pos + n < end ? r->pos + n : end;
    if (first < last)
        memcpy(to + ((size_t)layer * (size_t)r->n + (size_t)(first - r->start)) * row,
               from + (size_t)(first - r->pos) * row, (size_t)(last - first) * row * sizeof *to);
}

/* The attention of llama_forward_with: appends to the second cache, keeps rows, and attends. */
static tkv_status record_layer(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                               float *out) {
    const recorder *r = (const recorder *)ctx;
    const tkv_status st = llama_append_at(r->kv, 0, layer, r->pos, k, v, n);
    keep_rows(r, layer, k, r->k_row, n, r->k);
    keep_rows(r, layer, v, r->v_row, n, r->v);
    return st ? st : tkv_attend(r->kv, 0, layer, q, n, out);
}

/* Returns the FLOPs of the first n tokens in all layers, by the formula of tkv_remat_config. */
static double flops_of(const tkv_remat_config *c, int n) {
    return (double)n * c->n_layers * (2.0 * c->layer_params + 4.0 * c->n_heads * c->head_dim * (n / 2.0));
}

/* The callback of tkv_seq_recompute: recomputes tokens start to start + n - 1 and restores them. */
static tkv_status recompute(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers, int start,
                            int n) {
    run_state *w = (run_state *)user;
    const conversation *t = &w->conversations[seq];
    const int layers = w->model->n_layers;
    tkv_config cfg = w->cfg;
    tkv_status st = TKV_OK;
    if (cfg.budget.bytes) cfg.tiers.hot_tokens = TKV_UNLIMITED; /* the conversation was exact, too */
    cfg.budget.bytes = 0;
    cfg.limits.max_seqs = 1;
    recorder r;
    memset(&r, 0, sizeof r);
    r.kv = create(&cfg);
    r.start = start;
    r.n = n;
    r.k_row = (size_t)(w->model->n_kv_heads * w->model->head_dim);
    r.v_row = (size_t)(w->model->n_kv_heads * w->model->v_head_dim);
    r.k = (float *)allocate((size_t)layers * (size_t)n * r.k_row, sizeof *r.k);
    r.v = (float *)allocate((size_t)layers * (size_t)n * r.v_row, sizeof *r.v);
    for (int i = 0; r.pos < start + n && !st; r.pos += t->chunk[i++]) {
        st = tkv_seq_begin(r.kv, 0);
        if (!st)
            st = llama_forward_with(w->model, t->tokens + r.pos, t->chunk[i], r.pos, record_layer, &r, NULL,
                                    0);
        if (!st) st = tkv_seq_commit(r.kv, 0);
    }
    for (int i = first_layer; i < first_layer + n_layers && !st; i++)
        st = tkv_restore(kv, seq, i, start, r.k + (size_t)(i * n) * r.k_row, r.v + (size_t)(i * n) * r.v_row,
                         n);
    w->flops += flops_of(&w->remat.cfg, start + n);
    w->recomputed += n;
    tkv_destroy(r.kv);
    free(r.k);
    free(r.v);
    return st;
}

/* >>turns */
static void print_turn(const char *name, int turn, int discarded, int n, double took) {
    printf("  turn %d of %s: %5s of %5s tokens were discarded", turn + 1, name, commas(discarded), commas(n));
    if (discarded) printf(", recomputed in %.2f s", took);
    printf("\n");
}

typedef enum discarding { DISCARD_NONE, DISCARD_BY_BUDGET, DISCARD_BY_HAND } discarding;

/* Runs all turns of both conversations. */
static void run(run_state *w, const settings *s, discarding how) {
    static const char *const names[CONVERSATIONS] = {"A", "B"};
    int n, start;
    w->kv = create(&w->cfg);
    for (int turn = 0; turn < s->turns; turn++)
        for (int seq = 0; seq < CONVERSATIONS; seq++) {
            conversation *t = &w->conversations[seq];
            double begun = seconds();
            tkv_layer_info tiers;
            if (tkv_get_layer(w->kv, seq, 0, &tiers) != TKV_OK ||
                tkv_seq_find_discarded(w->kv, seq, &start, &n) != TKV_OK)
                fail("no sequence %d", seq);
            if (n) {
                const tkv_status st = tkv_seq_recompute(w->kv, seq, &w->remat, turn, recompute, w, NULL);
                if (st) fail("%s: %s", tkv_get_status_text(st), tkv_get_last_error(w->kv));
            }
            begun = seconds() - begun;
            w->seconds += begun;
            if (how != DISCARD_NONE && turn > 0)
                print_turn(names[seq], turn, tiers.discarded, tkv_get_length(w->kv, seq, TKV_ALL_LAYERS),
                           begun);
            while (tkv_get_length(w->kv, seq, TKV_ALL_LAYERS) < t->n) {
                const int pos = tkv_get_length(w->kv, seq, TKV_ALL_LAYERS), left = t->n - pos;
                evaluate(w, seq, measure_chunk(&w->chunking, pos, left < CHUNK ? left : CHUNK));
            }
            for (int i = 0; i < w->o->n; i++) {
                t->tokens[t->n++] = sample(w->logits, w->model->vocab, w->o, &t->rng, w->space);
                evaluate(w, seq, 1);
            }
            if (how == DISCARD_BY_HAND && tkv_seq_discard(w->kv, seq, t->n, &n) != TKV_OK)
                fail("%s", tkv_get_last_error(w->kv));
        }
    if (how != DISCARD_NONE) {
        tkv_budget_info info;
        if (tkv_get_budget(w->kv, &info) != TKV_OK) fail("no budget");
        printf("  %s blocks discarded, %s recomputed: %s tokens, about %.2f GFLOP, %.2f s\n",
               commas((double)info.discarded), commas((double)info.recomputed), commas(w->recomputed),
               w->flops / 1e9, w->seconds);
    }
    tkv_destroy(w->kv);
}

static void begin(run_state *w, const settings *s, const int *prompt, int n) {
    const int most = n + s->turns * w->o->n;
    for (int i = 0; i < CONVERSATIONS; i++) {
        conversation *t = &w->conversations[i];
        memset(t, 0, sizeof *t);
        t->tokens = (int *)allocate((size_t)most, sizeof *t->tokens);
        t->chunk = (int *)allocate((size_t)most, sizeof *t->chunk);
        memcpy(t->tokens, prompt, (size_t)n * sizeof *prompt);
        t->n = n;
        t->rng = rng_seed(w->o) + (uint64_t)i; /* one prompt, two texts */
        t->hash = 0xcbf29ce484222325u;
    }
    w->recomputed = 0;
    w->seconds = w->flops = 0;
}

static void end(run_state *w) {
    for (int i = 0; i < CONVERSATIONS; i++) free(w->conversations[i].tokens), free(w->conversations[i].chunk);
}

/* Compares a run that discards blocks with one that discards none. Returns 1 if texts and logits are equal. */
static int compare(run_state *w, const settings *s, const int *prompt, int n, const tkv_config *discard,
                   const tkv_config *keep, discarding how) {
    int same = 1;
    w->cfg = *discard;
    w->chunking = *discard;
    run_state other = *w;
    other.cfg = *keep;
    begin(w, s, prompt, n);
    begin(&other, s, prompt, n);
    run(w, s, how);
    run(&other, s, DISCARD_NONE);
    for (int i = 0; i < CONVERSATIONS; i++) {
        const conversation *a = &w->conversations[i], *b = &other.conversations[i];
        same &= a->n == b->n && a->hash == b->hash &&
                memcmp(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens) == 0;
    }
    printf("  both texts and all logits %s\n\n",
           same ? "equal those of a run that discards nothing, to the bit" : "DIFFER");
    if (same && !w->recomputed)
        printf("  (nothing was discarded: try a smaller --budget or a larger -n)\n\n");
    end(w);
    end(&other);
    return same;
}

/* >>main */
/* Returns the weights of one layer. */
static double layer_params(const llama_model *m) {
    const double q = (double)m->n_heads * m->head_dim, k = (double)m->n_kv_heads * m->head_dim;
    const double v = (double)m->n_kv_heads * m->v_head_dim, o = (double)m->n_heads * m->v_head_dim;
    return (double)m->dim * (q + k + v + o + 3.0 * m->ffn_dim);
}

int main(int argc, char **argv) {
    tkv_config cfg = tkv_default_config(), with_budget, unlimited;
    options o;
    memset(&o, 0, sizeof o);
    run_state w;
    memset(&w, 0, sizeof w);
    settings s;
    s.turns = 2;
    s.percent = 75;
    parse_options(argc, argv, usage, &o, &cfg, parse_own_option, &s);
    o.raw = 1;
    if (!o.model) {
        o.model = DEMO;
        if (!o.prompt && !o.file) o.file = "examples/data/demo_prompt.txt";
    }
    if (!o.n) o.n = 64;
    llama_model model;
    load(&o, &model, &cfg);
    cfg.limits.max_seqs = CONVERSATIONS;
    int n = context_of(&o, &model) - s.turns * o.n;
    if (n < 2) fail("%d turns of %d tokens exceed the context", s.turns, o.n);
    int *prompt;
    n = read_prompt(&model, &o, n, 0, 0, &prompt);
    w.model = &model;
    w.o = &o;
    w.logits = (float *)allocate((size_t)model.vocab, sizeof *w.logits);
    w.space = (choice *)allocate((size_t)model.vocab, sizeof *w.space);
    tkv_remat_config remat;
    memset(&remat, 0, sizeof remat);
    remat.n_layers = model.n_layers;
    remat.n_heads = model.n_heads;
    remat.head_dim = model.head_dim;
    remat.layer_params = layer_params(&model);
    if (tkv_init_remat(&w.remat, &remat, NULL, 0) != TKV_OK) fail("sizes of the model are out of range");

    unlimited = cfg;
    unlimited.tiers.hot_tokens = TKV_UNLIMITED;
    tkv_memory_info m;
    if (tkv_estimate_memory(&unlimited, n + s.turns * o.n, CONVERSATIONS, &m) != TKV_OK) fail("bad plan");
    with_budget = cfg;
    with_budget.budget.bytes = m.total / 100 * (size_t)s.percent;
    with_budget.budget.pressure.max_level = TKV_OFF; /* compresses nothing */
    with_budget.budget.discard = 1;
    printf("Exact tokens, a budget of %s bytes; both conversations take %s.\n",
           commas((double)with_budget.budget.bytes), commas((double)m.total));
    int same = compare(&w, &s, prompt, n, &with_budget, &unlimited, DISCARD_BY_BUDGET);

    if (cfg.tiers.warm.k == TKV_FORMAT_DEFAULT)
        cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4; /* KIVI formats learn no tables */
    if (cfg.tiers.archive.k == TKV_FORMAT_DEFAULT) cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    (void)tkv_init_remat(&w.remat, &remat, NULL, 0);
    printf("Tiers of %s and %s; tkv_seq_discard after each turn.\n",
           tkv_get_name(TKV_NAME_FORMAT, (int)cfg.tiers.warm.k),
           tkv_get_name(TKV_NAME_FORMAT, (int)cfg.tiers.archive.k));
    same &= compare(&w, &s, prompt, n, &cfg, &cfg, DISCARD_BY_HAND);
    free(prompt);
    free(w.logits);
    free(w.space);
    llama_free(&model);
    return same ? 0 : 1;
}
