/*
 * budget.c - a real model generates text under a byte budget that is too small for FP16. The program shows how the
 * cache keeps the budget.
 *
 * cc -O2 examples/budget.c examples/tieredkv.c -o budget -lm && ./budget
 *
 * A progress line shows the tokens, the level of the ladder, the pressure, the bytes, and the share of each tier.
 * Each change of level prints a line. A table follows at the end: blocks that each level recoded, the peak against
 * the budget, the time to the first token, and percentiles of the time between tokens. --compare adds the KL
 * divergence from an unlimited cache with the same tokens; its work is in no time. --csv writes every step to a file
 * for `bench/plot.py --budget`. --spill offloads old blocks to a temporary file (spill_file.h) when the last level
 * is not enough; attention reads them there. --metrics writes the figures and histograms as Prometheus text.
 * `./budget --help` lists the options.
 *
 * program.h has the code that it shares with generate. In this order: options, progress, running, table, main.
 */
#include "spill_file.h" /* before system headers */

#include "../tieredkv.h"

#define PROGRAM "budget"
#include "program.h"

#ifdef _WIN32
#include <io.h>
#define isatty _isatty
#else
#include <unistd.h>
#endif

#define DEMO "examples/data/demo.gguf"
enum { DEFAULT_TOTAL = 2000 }; /* tokens of prompt and text without -n */

static const char usage[] =
    "budget [MODEL] [options]\n"
    "Without MODEL, the model is " DEMO ".\n" PROGRAM_HELP
    "  -n N               tokens to generate (to 2000 with the prompt, at most the context)\n"
    "  --budget B         bytes, or percent of the bytes of FP16 (35%); none: FP16 without a budget\n"
    "  --policy NAME      profile of the pressure controller: default, aggressive or fp16_only\n"
    "  --compare          compares with an unlimited cache\n"
    "  --spill            offloads blocks to a temporary file when the budget is full\n"
    "  --csv FILE         writes one line per step\n"
    "  --metrics FILE     writes the cache's figures and histograms of latency as Prometheus text\n"
    "The program always sets --raw.\n"
    "\n"
    "The plan of level 3 of the ladder. Each line is an option, such as --archive FORMAT:\n";

typedef struct settings {
    tkv_config *cfg;
    const char *budget, *csv, *metrics;
    int compare, spill;
} settings;

typedef struct stage {  /* a level since the cache first entered it */
    int from;           /* tokens at that time; -1: never entered */
    int compared, same; /* compared positions; those with the same likeliest token */
    double kl;
    char formats[80];
} stage;

typedef struct session {
    llama_model model;
    tkv_config cfg;
    tkv_cache *kv, *exact; /* exact: NULL without --compare */
    int *tokens, n_prompt, total, done;
    int refused;
    float *logits, *exact_logits; /* logits of one chunk */
    double loss, exact_loss;
    int known; /* tokens that the losses sum over */
    stage stages[TKV_MAX_LEVELS];
    latency waits;
    FILE *csv;
    int on_terminal, shown; /* shown: the progress line is on the screen */
    double next;            /* next update of it: in seconds on a terminal, else in tokens */
} session;

/* >>options */
static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    settings *w = (settings *)ctx;
    if (strcmp(name, "--compare") == 0) {
        w->compare = 1;
        return ALONE;
    }
    if (strcmp(name, "--spill") == 0) {
        w->spill = 1;
        return ALONE;
    }
    if (!value) return UNKNOWN;
    int profile;
    if (strcmp(name, "--budget") == 0) w->budget = value;
    else if (strcmp(name, "--csv") == 0) w->csv = value;
    else if (strcmp(name, "--metrics") == 0) w->metrics = value;
    else if (strcmp(name, "--policy") != 0) return UNKNOWN;
    else if (tkv_find_name(TKV_NAME_PROFILE, value, &profile) != TKV_OK) return BAD_VALUE;
    else w->cfg->budget.pressure.profile = (tkv_pressure_profile)profile;
    return WITH_VALUE;
}

static double fp16_bytes(const session *s, int tokens) {
    return 2.0 * s->model.n_layers * s->model.n_kv_heads * (s->model.head_dim + s->model.v_head_dim) * tokens;
}

/* Returns a text that names a budget for all tokens. */
static const char *advice(const session *s) {
    static char text[120];
    tkv_config cfg = s->cfg;
    int percent, n = 0; /* percent: the smallest budget that holds all tokens */
    for (percent = 1; percent < 100; percent++) {
        cfg.budget.bytes = (size_t)(fp16_bytes(s, s->total) * percent / 100);
        if (tkv_estimate_context(&cfg, 1, &n) == TKV_OK && n >= s->total) break;
    }
    if (percent < 100) snprintf(text, sizeof text, "--budget %d%% holds %s", percent, commas(s->total));
    else
        snprintf(text, sizeof text, "no budget below FP16 holds %s; try more tokens (-n) or --budget none",
                 commas(s->total));
    return text;
}

static void set_budget(session *s, const char *text) {
    char *end;
    double bytes = strtod(text, &end);
    int n = 0;
    if (strcmp(text, "none") == 0) {
        s->cfg.tiers.hot_tokens = TKV_UNLIMITED;
        return;
    }
    if (*end == '%') {
        bytes *= fp16_bytes(s, s->total) / 100;
        end++;
    }
    if (*end || !(bytes >= 1 && bytes < 1e15))
        fail("--budget %s: it must be bytes (2000000), percent of FP16 (35%%) or none", text);
    s->cfg.budget.bytes = (size_t)bytes;
    if (tkv_estimate_context(&s->cfg, 1, &n) != TKV_OK) return; /* create() reports the error */
    if (n == 0)
        fail("a budget of %s bytes is too small for any token of this model; %s", commas(bytes), advice(s));
    if (n < s->total && !s->cfg.offload.write)
        fprintf(stderr, PROGRAM ": this budget holds at most %s of %s tokens, even at the last level; %s\n",
                commas(n), commas(s->total), advice(s));
}

/* >>progress */
/* Draws the tokens from the oldest to the newest, one mark per tier. */
static const char *bar_of(const tkv_memory_info *mem) {
    enum { WIDTH = 16 }; /* the progress line fits into 80 columns */
    static char bar[WIDTH + 1];
    double all = 0, sum = 0;
    int from = 0;
    memset(bar, ' ', WIDTH);
    for (int tier = 0; tier < TKV_TIER_COUNT; tier++) all += (double)mem->tier[tier].tokens;
    int to;
    for (int tier = TKV_TIER_COUNT; all > 0 && tier--; from = to) {
        sum += (double)mem->tier[tier].tokens;
        to = (int)((double)WIDTH * sum / all + 0.5);
        memset(bar + from, tier_marks[tier], (size_t)(to - from));
    }
    return bar;
}

static void clear_progress(session *s) {
    if (s->shown && s->on_terminal) fprintf(stderr, "\r%79s\r", "");
    s->shown = 0;
}

/* Updates the progress: in place on a terminal, else as 16 lines. */
static void show_progress(session *s, const tkv_budget_info *b, const tkv_memory_info *mem) {
    const double now = s->on_terminal ? seconds() : s->done;
    if (now < s->next && s->done < s->total) return;
    s->next = now + (s->on_terminal ? 0.05 : s->total / 16.0);
    fprintf(stderr, "%s%6s tokens  level %d  pressure %3.0f %%  %6.2f", s->on_terminal ? "\r" : "",
            commas(s->done), b->level, 100 * (double)b->pressure.average, (double)mem->total / 1e6);
    if (b->budget) fprintf(stderr, " / %.2f", (double)b->budget / 1e6);
    fprintf(stderr, " MB  [%s]%s", bar_of(mem), s->on_terminal ? " " : "\n");
    s->shown = 1;
}

static void report_step(session *s) { /* progress line and CSV */
    tkv_budget_info b;
    tkv_memory_info mem;
    if (tkv_get_budget(s->kv, &b) != TKV_OK || tkv_get_memory(s->kv, &mem) != TKV_OK) return;
    show_progress(s, &b, &mem);
    if (s->csv)
        fprintf(s->csv, "%d,%.0f,%d,%.4f,%.0f,%.0f,%.0f,%.0f,%.0f,%d\n", s->done, (double)mem.total, b.level,
                (double)b.pressure.average, (double)mem.tier[TKV_TIER_HOT].tokens,
                (double)mem.tier[TKV_TIER_WARM].tokens, (double)mem.tier[TKV_TIER_ARCHIVE].tokens,
                (double)b.budget, (double)mem.fp16_bytes, s->total);
}

/* Records the first time at a level, and the formats of old tokens there. */
static void enter_level(session *s, int level) {
    stage *x = &s->stages[level];
    char warm[40] = "", archive[40] = "";
    if (x->from >= 0) return;
    x->from = s->done;
    tkv_layer_info layer;
    if (tkv_get_layer(s->kv, 0, 0, &layer) == TKV_OK) {
        pair_name(&layer.format[TKV_TIER_WARM], warm, sizeof warm);
        pair_name(&layer.format[TKV_TIER_ARCHIVE], archive, sizeof archive);
    }
    snprintf(x->formats, sizeof x->formats, "%s%s%s", warm, strcmp(warm, archive) ? ", then " : "",
             strcmp(warm, archive) ? archive : "");
    if (level == 0) snprintf(x->formats, sizeof x->formats, "exact");
}

static void on_event(void *user, const tkv_event *e) {
    session *s = (session *)user;
    if (!s->kv || e->kind == TKV_EVENT_TABLE) return;
    clear_progress(s);
    if (e->kind == TKV_EVENT_LEVEL) {
        enter_level(s, e->to);
        fprintf(stderr, "%6s tokens  level %d -> %d (%s): %s\n", commas(s->done), e->from, e->to,
                s->stages[e->to].formats, e->text);
    } else if (e->kind == TKV_EVENT_BUDGET)
        fprintf(stderr, "%6s tokens  refused: %s\n", commas(s->done), e->text);
}

/* >>running */
static void compare(session *s, int n) { /* compares the last n positions */
    const int vocab = s->model.vocab;
    tkv_budget_info b;
    if (tkv_get_budget(s->kv, &b) != TKV_OK) return;
    for (int i = 0; i < n; i++) {
        const float *got = s->logits + (size_t)i * (size_t)vocab,
                    *want = s->exact_logits + (size_t)i * (size_t)vocab;
        const int next = s->done - n + i + 1;
        stage *x = &s->stages[b.level];
        x->compared++;
        x->same += llama_argmax(got, vocab) == llama_argmax(want, vocab);
        x->kl += measure_divergence(want, got, vocab);
        if (next >= s->n_prompt) continue; /* generated text favours the cache that generated it */
        s->loss += measure_loss(got, vocab, s->tokens[next]);
        s->exact_loss += measure_loss(want, vocab, s->tokens[next]);
        s->known++;
    }
}

/* Evaluates the next n known tokens. Returns 0 if the budget is full. */
static int evaluate(session *s, int n) {
    const int n_logits = s->exact ? n : 1;
    tkv_status status = llama_forward(&s->model, s->kv, 0, s->tokens + s->done, n, s->logits, n_logits);
    const double evaluated = latency_now();
    if (status == TKV_ERR_BUDGET) return 0;
    if (status == TKV_OK && s->exact)
        status = llama_forward(&s->model, s->exact, 0, s->tokens + s->done, n, s->exact_logits, n_logits);
    if (status != TKV_OK) fail("token %d: %s", s->done, tkv_get_status_text(status));
    s->done += n;
    if (s->exact) compare(s, n);
    report_step(s);
    latency_exclude(&s->waits, evaluated);
    return 1;
}

static void run(session *s, const options *o) {
    const size_t vocab = (size_t)s->model.vocab;
    choice *space = (choice *)allocate(vocab, sizeof *space);
    double *times = (double *)allocate((size_t)s->total, sizeof *times);
    uint64_t rng = rng_seed(o);
    s->waits = latency_begin(times, s->total);
    while (s->done < s->total) {
        int n = s->n_prompt - s->done;
        if (n > TKV_BLOCK_TOKENS) n = TKV_BLOCK_TOKENS;
        if (n < 1) n = 1;
        s->refused = !evaluate(s, n);
        if (s->refused) break;
        if (s->done >= s->n_prompt) {
            s->tokens[s->done] =
                sample(s->logits + (s->exact ? (size_t)(n - 1) * vocab : 0), s->model.vocab, o, &rng, space);
            latency_token(&s->waits);
        }
    }
    free(space);
}

/* >>table */
static void print_text(const session *s) {
    int len, first = s->done - 60;
    if (first < s->n_prompt) first = s->n_prompt;
    if (s->done <= first) return;
    printf("The text ends:\n\n...");
    for (int i = first; i < s->done; i++) {
        const char *piece = llama_piece(&s->model, s->tokens[i - 1], s->tokens[i], &len);
        fwrite(piece, 1, (size_t)len, stdout);
    }
    printf("\n\n");
}

static void print_stage(const session *s, const tkv_budget_info *b, int level) {
    const stage *x = &s->stages[level];
    if (x->from < 0) return;
    printf("  %-6d %-30s %10s %15s", level, x->formats, commas(x->from), commas((double)b->recoded[level]));
    if (x->compared)
        printf("   %.5f   %5.1f %% of %s", x->kl / x->compared, 100.0 * x->same / x->compared,
               commas(x->compared));
    printf("\n");
}

static void print_table(session *s, double time) {
    tkv_budget_info b;
    tkv_memory_info mem;
    if (tkv_get_budget(s->kv, &b) != TKV_OK || tkv_get_memory(s->kv, &mem) != TKV_OK) return;
    printf("  level  formats of old tokens          from token  blocks recoded%s\n",
           s->exact ? "   KL to exact  same likeliest token" : "");
    for (int level = 0; level < b.n_levels; level++) print_stage(s, &b, level);
    printf("\n  tokens       %s of %s, %s per second (one thread, %s)\n", commas(s->done), commas(s->total),
           commas(s->done / (time + 1e-9)), tkv_get_name(TKV_NAME_ISA, (int)program_isa_of(s->kv)));
    latency_print(&s->waits, stdout);
    printf("  peak         %s bytes", commas((double)b.peak));
    if (b.budget)
        printf(" of a budget of %s, %.1f %%", commas((double)b.budget),
               100.0 * (double)b.peak / (double)b.budget);
    printf("; FP16 would take %s\n", commas(fp16_bytes(s, s->done)));
    if (mem.ratio > 1)
        printf("  compression  %.2f times fewer bytes than FP16, all memory counted\n", mem.ratio);
    else printf("  compression  none: tokens are exact, or few, and an empty cache already takes memory\n");
    printf("  refused      %s\n", commas((double)b.refused));
    if (s->cfg.offload.write)
        printf("  offloaded    %s bytes; %s token%s, summed over layers; %s blocks\n",
               commas((double)(mem.offloaded.codes + mem.offloaded.metadata)),
               commas((double)mem.offloaded.tokens), mem.offloaded.tokens == 1 ? "" : "s",
               commas((double)b.offloaded));
    if (s->known >= 64)
        printf("  perplexity   %.3f over %s tokens of the prompt; %.3f with the unlimited cache\n",
               exp(s->loss / s->known), commas(s->known), exp(s->exact_loss / s->known));
}

static void open_spill(session *s, spill_file *file) {
    size_t bytes;
    if (tkv_get_required_bytes(&s->cfg, NULL, &bytes) != TKV_OK) return; /* create() reports the error */
    if (spill_file_open(file, NULL, bytes)) fail("cannot open a temporary file: %s", strerror(errno));
    s->cfg.offload = spill_file_config(file);
}

int main(int argc, char **argv) {
    options o;
    session s;
    settings w;
    memset(&o, 0, sizeof o);
    memset(&s, 0, sizeof s);
    memset(&w, 0, sizeof w);
    w.cfg = &s.cfg;
    w.budget = "35%";
    o.raw = 1;
    parse_options(argc, argv, usage, &o, &s.cfg, parse_own_option, &w);
    if (!o.model) o.model = DEMO;
    load(&o, &s.model, &s.cfg);
    const int context = context_of(&o, &s.model);
    const int n_text = !o.n                ? 1
                       : o.n < context / 2 ? o.n
                                           : context / 2; /* tokens of the context kept for the text */
    s.n_prompt = read_prompt(&s.model, &o, context - n_text, (o.n ? o.n : DEFAULT_TOTAL) + 1, 0, &s.tokens);
    s.total = o.n ? s.n_prompt + o.n : s.n_prompt < DEFAULT_TOTAL ? DEFAULT_TOTAL : s.n_prompt + 1;
    if (s.total > context) s.total = context;

    spill_file file;
    if (w.spill) open_spill(&s, &file);
    set_budget(&s, w.budget);
    for (int i = 0; i < TKV_MAX_LEVELS; i++) s.stages[i].from = -1;
    s.on_terminal = isatty(2);
    s.cfg.host.on_event = on_event;
    s.cfg.host.event_user = &s;
    s.kv = create(&s.cfg);
    load_tables(&o, s.kv);
    enter_level(&s, 0);
    s.logits = (float *)allocate((size_t)TKV_BLOCK_TOKENS * (size_t)s.model.vocab, sizeof *s.logits);
    if (w.compare) {
        tkv_config exact = s.cfg;
        exact.budget.bytes = 0;
        exact.host.on_event = NULL;
        memset(&exact.offload, 0, sizeof exact.offload);
        exact.tiers.hot_tokens = TKV_UNLIMITED;
        s.exact = create(&exact);
        s.exact_logits =
            (float *)allocate((size_t)TKV_BLOCK_TOKENS * (size_t)s.model.vocab, sizeof *s.exact_logits);
    }
    if (w.csv) {
        s.csv = fopen(w.csv, "w");
        if (!s.csv) fail("cannot write %s", w.csv);
        fprintf(s.csv, "tokens,bytes,level,pressure,hot,warm,archive,budget,fp16,total\n");
    }

    const double start = seconds();
    run(&s, &o);
    const double took = seconds() - start;
    if (s.shown && s.on_terminal) fprintf(stderr, "\n");
    if (s.csv && fclose(s.csv) != 0) fail("cannot write %s", w.csv);
    printf("\n");
    print_text(&s);
    print_table(&s, took);
    if (s.refused) printf("\nThe budget is full. Use a larger budget or fewer tokens (-n): %s\n", advice(&s));
    if (w.metrics) write_metrics(w.metrics, s.kv, &s.waits);
    free(s.waits.times);
    tkv_destroy(s.kv);
    tkv_destroy(s.exact);
    if (w.spill) spill_file_close(&file);
    plan_free(&s.cfg);
    llama_free(&s.model);
    free(s.tokens);
    free(s.logits);
    free(s.exact_logits);
    return s.refused;
}
