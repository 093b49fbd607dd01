/*
 * recompute.c - two conversations take turns in a cache that has not room for both: the one that waits is dropped,
 * and its keys and values are computed again by the model when its turn comes. The texts are those without
 * dropping.
 *
 * cc -O2 examples/recompute.c examples/tieredkv.c -o recompute -lm && ./recompute
 *
 * First with exact keys and values under a budget (cfg.budget.discard), where the cache drops what it must; then with
 * compressed tiers, where the program drops by hand (tkv_seq_discard). Every logit is compared with that of a run
 * which drops nothing: the exit status is 1 if one differs in a bit.
 *
 * What comes back is the same because the model does the same: it reads the text from its first token on, in the
 * same chunks, with a cache of its own that has the same plan (formats that learn tables would learn others there).
 * So a few tokens cost as much as all before them. In this order: options, evaluating, computing again, turns, main.
 */
#include "../tieredkv.h"

#define PROGRAM "recompute"
#include "program.h"

#define DEMO "examples/data/demo.gguf"
enum { TALKS = 2, CHUNK = 64 };

static const char usage[] =
    "recompute [MODEL] [options]\n"
    "Without MODEL it is " DEMO ". " PROGRAM_HELP "  -n N               tokens of a turn (64)\n"
    "  --turns N          of each conversation (2)\n"
    "  --budget SHARE     of what both take, in percent (75)\n"
    "It always goes on after the end of a text, and wants no chat template (--raw).\n"
    "\n" PLAN_HELP;

typedef struct wishes {
    int turns, share;
} wishes;

typedef struct talk {
    int *tokens, n;
    int *chunk, n_chunks; /* sizes of all evaluations, in order */
    uint64_t rng, hash;   /* of all logits */
} talk;

typedef struct work { /* a run */
    llama_model *model;
    const options *o;
    tkv_config cfg,
        cut; /* cut: chunks end where this one's blocks get tighter, in all runs that are compared */
    tkv_cache *kv;
    talk talks[TALKS];
    float *logits;
    choice *space;
    tkv_remat remat;
    int again, dropped; /* tokens */
    double seconds, flops;
} work;

/* >>options */
static taken own_option(void *ctx, const char *name, const char *value) {
    wishes *w = (wishes *)ctx;
    int ok;
    if (!value) return UNKNOWN;
    if (strcmp(name, "--turns") == 0) ok = (w->turns = atoi(value)) > 0 && w->turns <= 1000;
    else if (strcmp(name, "--budget") == 0) ok = (w->share = atoi(value)) > 0 && w->share <= 100;
    else return UNKNOWN;
    return ok ? WITH_VALUE : BAD_VALUE;
}

/* >>evaluating */
static void evaluate(work *w, int seq, int n) { /* the next n known tokens */
    talk *t = &w->talks[seq];
    const int pos = tkv_get_length(w->kv, seq, TKV_ALL_LAYERS);
    const tkv_status st = llama_forward(w->model, w->kv, seq, t->tokens + pos, n, w->logits, 1);
    const unsigned char *bytes = (const unsigned char *)w->logits;
    size_t i, size = (size_t)w->model->vocab * sizeof *w->logits;
    if (st) fail("token %d: %s (%s)", pos, tkv_get_status_text(st), tkv_get_last_error(w->kv));
    t->chunk[t->n_chunks++] = n;
    for (i = 0; i < size; i++) t->hash = (t->hash ^ bytes[i]) * 0x100000001b3u; /* FNV-1a */
}

/* >>computing again */
typedef struct reader {
    tkv_cache *kv;
    float *k, *v; /* [n_layers][n] rows of tokens start .. start + n - 1 */
    int pos, start, n;
    size_t k_row, v_row;
} reader;

static void keep_rows(const reader *r, int layer, const float *from, size_t row, int n, float *to) {
    const int first = r->pos < r->start ? r->start : r->pos, end = r->start + r->n;
    const int last = r->pos + n < end ? r->pos + n : end;
    if (first < last)
        memcpy(to + ((size_t)layer * (size_t)r->n + (size_t)(first - r->start)) * row,
               from + (size_t)(first - r->pos) * row, (size_t)(last - first) * row * sizeof *to);
}

static tkv_status read_layer(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                             float *out) {
    const reader *r = (const reader *)ctx;
    const tkv_status st = llama_append_at(r->kv, 0, layer, r->pos, k, v, n);
    keep_rows(r, layer, k, r->k_row, n, r->k);
    keep_rows(r, layer, v, r->v_row, n, r->v);
    return st ? st : tkv_attend(r->kv, 0, layer, q, n, out);
}

/* FLOPs of the first n tokens in all layers, by the formula of tkv_remat_config. */
static double flops_of(const tkv_remat_config *c, int n) {
    return (double)n * c->n_layers * (2.0 * c->layer_params + 4.0 * c->n_heads * c->head_dim * (n / 2.0));
}

static tkv_status compute(void *user, tkv_cache *kv, int seq, int first_layer, int n_layers, int start,
                          int n) {
    work *w = (work *)user;
    const talk *t = &w->talks[seq];
    const int layers = w->model->n_layers;
    tkv_config cfg = w->cfg;
    tkv_status st = TKV_OK;
    reader r;
    int i;
    if (cfg.budget.bytes) cfg.tiers.hot_tokens = TKV_UNLIMITED; /* as exact as it was */
    cfg.budget.bytes = 0;
    cfg.limits.max_seqs = 1;
    memset(&r, 0, sizeof r);
    r.kv = create(&cfg);
    r.start = start;
    r.n = n;
    r.k_row = (size_t)(w->model->n_kv_heads * w->model->head_dim);
    r.v_row = (size_t)(w->model->n_kv_heads * w->model->v_head_dim);
    r.k = (float *)room((size_t)layers * (size_t)n * r.k_row, sizeof *r.k);
    r.v = (float *)room((size_t)layers * (size_t)n * r.v_row, sizeof *r.v);
    for (i = 0; r.pos < start + n && !st; r.pos += t->chunk[i++]) {
        st = tkv_seq_begin(r.kv, 0);
        if (!st)
            st = llama_forward_with(w->model, t->tokens + r.pos, t->chunk[i], r.pos, read_layer, &r, NULL, 0);
        if (!st) st = tkv_seq_commit(r.kv, 0);
    }
    for (i = first_layer; i < first_layer + n_layers && !st; i++)
        st = tkv_restore(kv, seq, i, start, r.k + (size_t)(i * n) * r.k_row, r.v + (size_t)(i * n) * r.v_row,
                         n);
    w->flops += flops_of(&w->remat.cfg, start + n);
    w->again += n;
    tkv_destroy(r.kv);
    free(r.k);
    free(r.v);
    return st;
}

/* >>turns */
static void say(const char *name, int turn, int missing, int n, double took) {
    printf("  turn %d of %s: %5s tokens of %5s were missing", turn + 1, name, commas(missing), commas(n));
    if (missing) printf(", computed again in %.2f s", took);
    printf("\n");
}

/* share 0: nothing is dropped; below 0: by hand */
static void run(work *w, const wishes *wish, int share) {
    static const char *const names[TALKS] = {"A", "B"};
    int turn, seq, i, missing, start;
    w->kv = create(&w->cfg);
    for (turn = 0; turn < wish->turns; turn++)
        for (seq = 0; seq < TALKS; seq++) {
            talk *t = &w->talks[seq];
            tkv_layer_info tiers;
            double begun = seconds();
            if (tkv_get_layer(w->kv, seq, 0, &tiers) != TKV_OK ||
                tkv_seq_find_discarded(w->kv, seq, &start, &missing) != TKV_OK)
                fail("no sequence %d", seq);
            if (missing) {
                const tkv_status st = tkv_seq_recompute(w->kv, seq, &w->remat, turn, compute, w, NULL);
                if (st) fail("%s: %s", tkv_get_status_text(st), tkv_get_last_error(w->kv));
            }
            begun = seconds() - begun;
            w->seconds += begun;
            if (share && turn > 0)
                say(names[seq], turn, tiers.discarded, tkv_get_length(w->kv, seq, TKV_ALL_LAYERS), begun);
            while (tkv_get_length(w->kv, seq, TKV_ALL_LAYERS) < t->n) {
                const int pos = tkv_get_length(w->kv, seq, TKV_ALL_LAYERS), left = t->n - pos;
                evaluate(w, seq, llama_chunk(&w->cut, pos, left < CHUNK ? left : CHUNK));
            }
            for (i = 0; i < w->o->n; i++) {
                t->tokens[t->n++] = sample(w->logits, w->model->vocab, w->o, &t->rng, w->space);
                evaluate(w, seq, 1);
            }
            if (share < 0 && tkv_seq_discard(w->kv, seq, t->n, &missing) != TKV_OK)
                fail("%s", tkv_get_last_error(w->kv));
        }
    if (share) {
        tkv_budget_info info;
        if (tkv_get_budget(w->kv, &info) != TKV_OK) fail("no budget");
        printf("  %s blocks dropped, %s recomputed: %s tokens, about %.2f GFLOP, %.2f s\n",
               commas((double)info.discarded), commas((double)info.recomputed), commas(w->again),
               w->flops / 1e9, w->seconds);
    }
    tkv_destroy(w->kv);
}

static void begin(work *w, const wishes *wish, const int *prompt, int n) {
    const int most = n + wish->turns * w->o->n;
    int i;
    for (i = 0; i < TALKS; i++) {
        talk *t = &w->talks[i];
        memset(t, 0, sizeof *t);
        t->tokens = (int *)room((size_t)most, sizeof *t->tokens);
        t->chunk = (int *)room((size_t)most, sizeof *t->chunk);
        memcpy(t->tokens, prompt, (size_t)n * sizeof *prompt);
        t->n = n;
        t->rng = dice(w->o) + (uint64_t)i; /* the same prompt, other texts */
        t->hash = 0xcbf29ce484222325u;
    }
    w->again = 0;
    w->seconds = w->flops = 0;
}

static void end(work *w) {
    int i;
    for (i = 0; i < TALKS; i++) free(w->talks[i].tokens), free(w->talks[i].chunk);
}

/* A run that drops, and one with a plan that needs not: 0 if they are not the same. */
static int compare(work *w, const wishes *wish, const int *prompt, int n, const tkv_config *dropping,
                   const tkv_config *keeping, int share) {
    work other;
    int i, same = 1;
    w->cfg = w->cut = *dropping;
    other = *w;
    other.cfg = *keeping;
    begin(w, wish, prompt, n);
    begin(&other, wish, prompt, n);
    run(w, wish, share);
    run(&other, wish, 0);
    for (i = 0; i < TALKS; i++) {
        const talk *a = &w->talks[i], *b = &other.talks[i];
        same &= a->n == b->n && a->hash == b->hash &&
                memcmp(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens) == 0;
    }
    printf("  both texts and all logits %s\n\n",
           same ? "are those of a run that drops nothing, to the bit" : "DIFFER");
    if (same && !w->again) printf("  (nothing had to be dropped: try a smaller --budget or a larger -n)\n\n");
    end(w);
    end(&other);
    return same;
}

/* >>main */
static double layer_params(const llama_model *m) {
    const double q = (double)m->n_heads * m->head_dim, k = (double)m->n_kv_heads * m->head_dim;
    const double v = (double)m->n_kv_heads * m->v_head_dim, o = (double)m->n_heads * m->v_head_dim;
    return (double)m->dim * (q + k + v + o + 3.0 * m->ffn_dim);
}

int main(int argc, char **argv) {
    tkv_config cfg = tkv_default_config(), tight, loose;
    tkv_remat_config price;
    tkv_memory_info m;
    llama_model model;
    options o;
    wishes wish;
    work w;
    int *prompt, n, same;
    memset(&o, 0, sizeof o);
    memset(&w, 0, sizeof w);
    wish.turns = 2;
    wish.share = 75;
    parse(argc, argv, usage, &o, &cfg, own_option, &wish);
    o.raw = 1;
    if (!o.model) {
        o.model = DEMO;
        if (!o.prompt && !o.file) o.file = "examples/data/demo_prompt.txt";
    }
    if (!o.n) o.n = 64;
    load(&o, &model, &cfg);
    cfg.limits.max_seqs = TALKS;
    n = context_of(&o, &model) - wish.turns * o.n;
    if (n < 2) fail("%d turns of %d tokens are more than the context", wish.turns, o.n);
    n = read_prompt(&model, &o, n, 0, 0, &prompt);
    w.model = &model;
    w.o = &o;
    w.logits = (float *)room((size_t)model.vocab, sizeof *w.logits);
    w.space = (choice *)room((size_t)model.vocab, sizeof *w.space);
    memset(&price, 0, sizeof price);
    price.n_layers = model.n_layers;
    price.n_heads = model.n_heads;
    price.head_dim = model.head_dim;
    price.layer_params = layer_params(&model);
    if (tkv_init_remat(&w.remat, &price, NULL, 0) != TKV_OK) fail("the model has sizes that cannot be");

    loose = cfg;
    loose.tiers.hot_tokens = TKV_UNLIMITED;
    if (tkv_estimate_memory(&loose, n + wish.turns * o.n, TALKS, &m) != TKV_OK) fail("no such plan");
    tight = cfg;
    tight.budget.bytes = m.total / 100 * (size_t)wish.share;
    tight.budget.pressure.max_level = TKV_OFF; /* never compressed */
    tight.budget.discard = 1;
    printf("Exact, in %s bytes; both conversations take %s.\n", commas((double)tight.budget.bytes),
           commas((double)m.total));
    same = compare(&w, &wish, prompt, n, &tight, &loose, wish.share);

    if (cfg.tiers.warm.k == TKV_FORMAT_DEFAULT)
        cfg.tiers.warm.k = cfg.tiers.warm.v = TKV_KIVI4; /* they need no tables */
    if (cfg.tiers.archive.k == TKV_FORMAT_DEFAULT) cfg.tiers.archive.k = cfg.tiers.archive.v = TKV_KIVI2;
    (void)tkv_init_remat(&w.remat, &price, NULL, 0);
    printf("In tiers of %s and %s, dropped by hand after each turn.\n",
           tkv_get_name(TKV_NAME_FORMAT, cfg.tiers.warm.k),
           tkv_get_name(TKV_NAME_FORMAT, cfg.tiers.archive.k));
    same &= compare(&w, &wish, prompt, n, &cfg, &cfg, -1);
    free(prompt);
    free(w.logits);
    free(w.space);
    llama_free(&model);
    return same ? 0 : 1;
}
