/*
 * generate.c - generates text with a real model that stores its keys and values in tieredkv, and reports costs and
 * savings.
 *
 * cc -O2 -o generate examples/generate.c examples/tieredkv.c -lm && ./generate model.gguf
 *
 * With -fopenmp it uses OMP_NUM_THREADS threads, and writes the same text.
 * The program prints the text as it is generated. Then it reports:
 *   - the tier of each token, and the bytes of each tier
 *   - the speed, and the latency: the time to the first token, and percentiles of the time between tokens
 *   - the KL divergence of the next token's distribution from that of an exact cache with the same tokens
 *   - with --recall: whether the model still finds numbers that the prompt states
 * --thresholds keeps the plans of runs and their scores in a file (thresholds.h). --save keeps the prompt's keys and
 * values in a file, and --load takes them from it, so that a prompt is read once:
 *
 *     ./generate model.gguf --raw -f long.txt --save long.tkv
 *     ./generate model.gguf --raw -f longer.txt --load long.tkv     long.txt is the beginning of longer.txt
 *
 * The file names the model by a checksum of all its bytes. `./generate --help` lists the options. The sampler follows
 * run.c of llama2.c.
 *
 * program.h has the code that it shares with other examples. In this order: options, running, saved prompts, recall,
 * comparing, tables, main.
 */
#define PROGRAM "generate"
#include "program.h" /* before system headers */
#include "thresholds.h"

static const char usage[] =
    "generate MODEL [options]\n" PROGRAM_HELP "  -n N               tokens to generate (256)\n"
    "  --compare N        newest positions to compare with an exact cache (256; none with --load,\n"
    "                     since the exact cache reads the whole prompt)\n"
    "  --no-compare       compares no positions\n"
    "  --recall TEXT      asks for the last word of each line of the prompt that begins with\n"
    "                     TEXT, after the text is generated\n"
    "  --thresholds FILE  begins with the plan that FILE has for this model, if the options give\n"
    "                     none, and writes the plan of this run with its score: of the meter\n"
    "                     (--meter), else the rise of perplexity of at least 64 tokens (--compare)\n"
    "  --save FILE        saves the prompt, when it was read\n"
    "  --load FILE        loads a saved prompt, and reads only what follows it in the prompt;\n"
    "                     without -p and -f the saved prompt is the prompt\n"
    "  --attach FILE      as --load, but compressed blocks stay in the file, which is mapped\n"
    "  --metrics FILE     writes the cache's figures and histograms of latency as Prometheus text\n"
    "\n"
    "Tiers from the oldest token to the newest: [sinks][archive ...][warm][hot]. Each line is\n"
    "an option, such as --archive FORMAT:\n";

typedef struct settings { /* options of this program only */
    const char *recall, *metrics, *thresholds, *save, *load;
    int attach;  /* 1: `load` is attached */
    int compare; /* -1: not given */
} settings;

enum { TIERED, EXACT, CACHES };
enum { SECRETS = 32, LINE = 200, ANSWER = 16 };

typedef struct secret { /* a line of the prompt; its last word is the secret */
    char line[LINE];    /* begins with the line feed before the line */
    int word;           /* where the secret begins in `line`; the text before it is the question */
    int at;             /* the last token of the line, or of its newest copy in the text */
    char answer[CACHES][ANSWER + 1]; /* "": this cache was not asked */
} secret;

typedef struct session {
    llama_model model;
    tkv_config cfg;
    tkv_cache *kv;
    int *tokens, n_tokens; /* tokens of prompt and text; the first tkv_get_length of them were evaluated */
    int n_prompt;          /* tokens of the prompt */
    int n_loaded;          /* of these were loaded, and have no logits */
    char name[MODEL_NAME]; /* of the model in saved prompts */
    int pos;               /* position of the present chunk's first token, for RoPE */
    float *logits;         /* logits of one chunk */
    float *kept; /* logits of position p in row p % n_kept, for the comparison with the exact cache */
    int n_kept;
    secret secrets[SECRETS];
    int n_secrets;
    double appending, attending; /* seconds in tkv_append (demotion included) and in tkv_attend */
} session;

/* >>options */
static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    settings *w = (settings *)ctx;
    int ok = 1;
    if (strcmp(name, "--no-compare") == 0) {
        w->compare = 0;
        return ALONE;
    }
    if (!value) return UNKNOWN;
    if (strcmp(name, "--recall") == 0) {
        w->recall = value;
        ok = *value != 0;
    } else if (strcmp(name, "--metrics") == 0) w->metrics = value;
    else if (strcmp(name, "--thresholds") == 0) w->thresholds = value;
    else if (strcmp(name, "--save") == 0) w->save = value;
    else if (strcmp(name, "--load") == 0) w->load = value;
    else if (strcmp(name, "--attach") == 0) w->load = value, w->attach = 1;
    else if (strcmp(name, "--compare") == 0) ok = read_int(value, 0, PROGRAM_MOST, &w->compare);
    else return UNKNOWN;
    return ok ? WITH_VALUE : BAD_VALUE;
}

/* >>running */
/* The attention of llama_forward_with: appends keys and values of a layer, attends, and measures both. */
static tkv_status timed_attention(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                                  float *out) {
    session *s = (session *)ctx;
    const double start = seconds();
    tkv_status status = llama_append_at(s->kv, 0, layer, s->pos, k, v, n);
    const double between = seconds();
    if (status == TKV_OK) status = tkv_attend(s->kv, 0, layer, q, n, out);
    s->appending += between - start;
    s->attending += seconds() - between;
    return status;
}

/* Evaluates the next n known tokens, and keeps the logits of the last n_logits. */
static void evaluate(session *s, int n, int n_logits) {
    const int pos = tkv_get_length(s->kv, 0, TKV_ALL_LAYERS), vocab = s->model.vocab;
    const double start = seconds();
    tkv_status status = tkv_seq_begin(s->kv, 0);
    s->pos = pos;
    s->appending += seconds() - start;
    if (status == TKV_OK)
        status =
            llama_forward_with(&s->model, s->tokens + pos, n, pos, timed_attention, s, s->logits, n_logits);
    if (status == TKV_OK) status = tkv_seq_commit(s->kv, 0);
    if (status != TKV_OK) fail("token %d: %s", pos, tkv_get_status_text(status));
    for (int i = 0; i < n_logits && s->n_kept > 0; i++)
        memcpy(s->kept + (size_t)((pos + n - n_logits + i) % s->n_kept) * (size_t)vocab,
               s->logits + (size_t)i * (size_t)vocab, (size_t)vocab * sizeof *s->kept);
}

/* Reads the prompt from token s->n_loaded to `end`, in chunks that end where a block leaves the hot tail
 * (measure_chunk). Returns the logits of the last token; NULL if there was nothing to read. */
static const float *read_tokens(session *s, int end) {
    const double start = seconds();
    int n_logits = 0;
    for (int pos; (pos = tkv_get_length(s->kv, 0, TKV_ALL_LAYERS)) < end;) {
        const int chunk =
            measure_chunk(&s->cfg, pos, end - pos < TKV_BLOCK_TOKENS ? end - pos : TKV_BLOCK_TOKENS);
        n_logits = pos + chunk - (s->n_prompt - s->n_kept); /* positions that may be compared later */
        if (n_logits > chunk) n_logits = chunk;
        if (n_logits < 1) n_logits = pos + chunk == s->n_prompt;
        show_bar("reading the prompt", pos, s->n_prompt, start);
        evaluate(s, chunk, n_logits);
    }
    show_bar("reading the prompt", s->n_prompt, s->n_prompt, start);
    return n_logits ? s->logits + (size_t)(n_logits - 1) * (size_t)s->model.vocab : NULL;
}

/* >>saved prompts */
/* The file has keys and values of all tokens but the last. That one is read again, since its logits choose the next
 * token. The numbers are all tokens, and at the end the milliseconds that reading them took. */
static void save_prompt(session *s, saved *to, const char *path, double reading) {
    *to = saved_at(path, s->name, 0);
    to->n_numbers = s->n_prompt + 1;
    to->numbers = (int *)allocate((size_t)to->n_numbers, sizeof *to->numbers);
    memcpy(to->numbers, s->tokens, (size_t)s->n_prompt * sizeof *s->tokens);
    to->numbers[s->n_prompt] = reading < 2e6 ? (int)(1e3 * reading + 0.5) : 2000000000;
    const tkv_status status = save_sequence(s->kv, to);
    if (status != TKV_OK) fail("cannot save to %s: %s", path, saved_fault(s->kv, status));
    free(to->numbers);
    to->numbers = NULL;
}

/* Loads a saved prompt into the empty cache. The caller frees from->numbers. */
static void load_prompt(session *s, saved *from, const char *path, int attach) {
    *from = saved_at(path, s->name, 0);
    from->attach = attach;
    const tkv_status status = load_sequence(s->kv, from);
    if (status != TKV_OK) fail("cannot load %s: %s", path, saved_fault(s->kv, status));
    if (from->n_numbers != from->n_tokens + 2 || !are_tokens(&s->model, from->numbers, from->n_tokens + 1))
        fail("%s has a sequence that generate did not save", path);
    s->n_loaded = from->n_tokens;
}

/* The prompt is the saved one. */
static void take_prompt(session *s, const saved *from, int most, int more) {
    s->n_prompt = from->n_tokens + 1;
    if (s->n_prompt > most)
        fail("%s has a prompt of %d tokens, and %d fit (-c, -n)", from->path, s->n_prompt, most);
    s->tokens = (int *)allocate((size_t)(s->n_prompt + more), sizeof *s->tokens);
    memcpy(s->tokens, from->numbers, (size_t)s->n_prompt * sizeof *s->tokens);
    printf("[the prompt of %s tokens from %s; the model continues:]\n", commas(s->n_prompt), from->path);
}

/* The prompt must begin with the saved one. */
static void check_prompt(const session *s, const saved *from) {
    int i = 0;
    while (i <= from->n_tokens && i < s->n_prompt && from->numbers[i] == s->tokens[i]) i++;
    if (i <= from->n_tokens)
        fail("the prompt does not begin with that of %s: they differ at token %d of %d", from->path, i + 1,
             from->n_tokens + 1);
}

static void print_saved(const char *what, const saved *x, double reading) {
    printf("  %-11s %s tokens, %s bytes, %s a token, in %.3f s; reading them took %.3f s", what,
           commas(x->n_tokens), commas((double)x->bytes),
           commas((double)x->bytes / (x->n_tokens > 0 ? x->n_tokens : 1)), x->seconds, reading);
    if (reading > x->seconds) printf(", %s times as long", commas(reading / x->seconds));
    if (x->n_attached) printf("; %s blocks stay in the file", commas(x->n_attached));
    printf("\n");
}

/* >>recall: several needles, and one question for each (RULER, arXiv 2404.06654, section 3) */
/* Returns a line feed and the text of the first n tokens; token i ends at ends[i]. The caller frees it. */
static char *text_of(const session *s, int n, int *ends) {
    char *text = NULL;
    int i, len, at = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass) text = (char *)allocate((size_t)at, 1);
        for (i = 0, at = 1; i < n; at += len, ends[i++] = at) {
            const char *piece = llama_piece(&s->model, i ? s->tokens[i - 1] : -1, s->tokens[i], &len);
            if (pass) memcpy(text + at, piece, (size_t)len);
        }
    }
    text[0] = '\n';
    text[at] = 0;
    return text;
}

/* Finds the lines of the prompt that begin with `start`. */
static void find_secrets(session *s, const char *start) {
    const int n = tkv_get_length(s->kv, 0, TKV_ALL_LAYERS);
    int *ends = (int *)allocate((size_t)n, sizeof *ends);
    char *text = text_of(s, n, ends), *from = text;
    while ((from = strchr(from, '\n')) != NULL && from - text < ends[s->n_prompt - 1] &&
           s->n_secrets < SECRETS) {
        secret *x = &s->secrets[s->n_secrets];
        const char *newest = from++;
        size_t size = 1 + strcspn(from, "\n");
        if (strncmp(from, start, strlen(start)) != 0 || size >= LINE) continue;
        if (from[size - 2] == '.') size--;
        memset(x, 0, sizeof *x);
        memcpy(x->line, from - 1, size);
        for (x->word = (int)size; x->word > 1 && x->line[x->word - 1] != ' ';) x->word--;
        if (x->word < 2 || x->word == (int)size || size - (size_t)x->word > ANSWER) continue;
        for (const char *copy = newest;
             (copy = strstr(copy + 1, x->line)) != NULL;) /* the model may have written copies */
            if (strchr(".\n", copy[size])) newest = copy;
        while (x->at + 1 < n && ends[x->at] < newest - text + (int)size) x->at++;
        s->n_secrets++;
    }
    free(text);
    free(ends);
}

/* Asks each question and stores the greedy answer. tkv_seq_truncate removes question and answer before the next
 * one. */
static void ask(session *s, int which) {
    const int before = tkv_get_length(s->kv, 0, TKV_ALL_LAYERS);
    int tokens[LINE + 2 * ANSWER], len;
    for (int k = 0; k < s->n_secrets; k++) {
        secret *x = &s->secrets[k];
        tkv_status status = TKV_OK;
        int n = llama_tokenize(&s->model, x->line, (size_t)x->word - 1, 0, tokens);
        int want = (int)strlen(x->line + x->word);
        int used = 0;
        for (int i = 0; status == TKV_OK && i < n + ANSWER; i++) {
            if (i >= n) { /* the question is complete: sample the answer */
                tokens[i] = llama_argmax(s->logits, s->model.vocab);
                const char *piece = llama_piece(&s->model, tokens[i - 1], tokens[i], &len);
                for (int j = 0; j < len && used < want; j++)
                    if (used > 0 || piece[j] != ' ')
                        x->answer[which][used++] = piece[j] < 32 || piece[j] > 126 ? '?' : piece[j];
                if (used == want) break;
            }
            status = llama_forward(&s->model, s->kv, 0, tokens + i, 1, s->logits, 1);
        }
        if (status == TKV_OK) status = tkv_seq_truncate(s->kv, 0, before);
        if (status != TKV_OK) fail("question %d: %s", k + 1, tkv_get_status_text(status));
    }
}

static int is_right(const secret *x, int which) { return strcmp(x->answer[which], x->line + x->word) == 0; }

/* >>comparing */
typedef struct comparison {
    int positions, same;     /* compared positions; those with the same likeliest token */
    int known;               /* tokens of the prompt that `loss` sums over */
    double mean, high, most; /* KL divergence; `high` is the 99th percentile */
    double loss[CACHES];
} comparison;

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Evaluates the same tokens in the same chunks with an exact cache, compares the logits, and asks the questions. */
static void compare(session *s, comparison *c) {
    const int n = tkv_get_length(s->kv, 0, TKV_ALL_LAYERS), vocab = s->model.vocab;
    const int count = n - s->n_loaded < s->n_kept ? n - s->n_loaded : s->n_kept;
    const int first = n - count;
    double *kl = (double *)allocate((size_t)count, sizeof *kl);
    const double start = seconds();
    session exact = *s;
    memset(c, 0, sizeof *c);
    exact.cfg.tiers.hot.k = exact.cfg.tiers.hot.v = TKV_F32;
    exact.cfg.tiers.warm = exact.cfg.tiers.archive = exact.cfg.tiers.hot;
    exact.cfg.layers = NULL;
    exact.kv = create(&exact.cfg);
    exact.n_kept = 0;
    for (int pos = 0; pos < n;) {
        const int chunk = measure_chunk(&s->cfg, pos, n - pos < 64 ? n - pos : 64);
        int from = pos < first ? first : pos; /* the chunk's first position to compare */
        if (from > pos + chunk) from = pos + chunk;
        show_bar("comparing", pos, n, start);
        evaluate(&exact, chunk, pos + chunk - from);
        for (int i = from; i < pos + chunk; i++) {
            const float *a = s->kept + (size_t)(i % s->n_kept) * (size_t)vocab;
            const float *b = exact.logits + (size_t)(i - from) * (size_t)vocab;
            kl[i - first] = measure_divergence(b, a, vocab);
            c->mean += kl[i - first] / count;
            c->same += llama_argmax(a, vocab) == llama_argmax(b, vocab);
            if (i + 1 >= s->n_prompt) continue; /* generated text favours the cache that generated it */
            c->known++;
            c->loss[EXACT] += measure_loss(b, vocab, s->tokens[i + 1]);
            c->loss[TIERED] += measure_loss(a, vocab, s->tokens[i + 1]);
        }
        pos += chunk;
    }
    show_bar("comparing", n, n, start);
    ask(&exact, EXACT);
    for (int i = 0; i < s->n_secrets; i++) s->secrets[i] = exact.secrets[i];
    qsort(kl, (size_t)count, sizeof *kl, by_size);
    c->positions = count;
    c->high = kl[(int)(0.99 * (count - 1))];
    c->most = kl[count - 1];
    tkv_destroy(exact.kv);
    free(kl);
}

/* >>tables */
static tkv_tier tier_of(const session *s, int token) {
    uint8_t tier = TKV_TIER_HOT;
    (void)tkv_get_tiers(s->kv, 0, 0, token, 1, &tier); /* cannot fail: the cache holds this token */
    return (tkv_tier)tier;
}

static void print_row(char mark, const char *name, int tokens, const char *format, double bytes,
                      double values) {
    printf("%c %-9s %11s   %-19s %13s", mark, name, tokens < 0 ? "" : commas(tokens), format, commas(bytes));
    if (values > 0) printf("%17.2f", 8 * bytes / values);
    printf("\n");
}

/* Returns FP16 bytes / bytes of the cache; 0 for an empty cache. */
static double print_memory(const session *s) {
    const double values = (double)s->model.n_kv_heads * (s->model.head_dim + s->model.v_head_dim);
    const int n = tkv_get_length(s->kv, 0, TKV_ALL_LAYERS);
    tkv_layer_info tiers;
    tkv_memory_info mem;
    double all = values * s->model.n_layers * n;
    char buf[32];
    if (tkv_get_layer(s->kv, 0, 0, &tiers) != TKV_OK || tkv_get_memory(s->kv, &mem) != TKV_OK || n == 0)
        return 0;
    const size_t layers = (size_t)s->model.n_layers; /* their tiers differ in length; rows show the mean */
    char map[65];
    int i;
    for (i = 0; i < 64; i++)
        map[i] = tier_marks[tier_of(s, (int)((double)i * n / 64))]; /* the first token of part i of 64 */
    map[i] = 0;
    printf("oldest %s newest\n\n", map);
    printf("  tier           tokens   format                      bytes   bits per value\n");
    double left = (double)mem.total;
    for (i = 0; i < TKV_TIER_COUNT; i++) {
        double bytes = (double)mem.tier[i].codes + (double)mem.tier[i].metadata;
        left -= bytes;
        print_row(tier_marks[i], tier_names[i], (int)((mem.tier[i].tokens + layers / 2) / layers),
                  pair_name(&tiers.format[i], buf, sizeof buf), bytes, (double)mem.tier[i].tokens * values);
    }
    print_row(' ', "other", -1, "tables, index, ...", left, 0);
    print_row(' ', "total", n, "", (double)mem.total, all);
    print_row(' ', "in FP16", -1, "", (double)mem.fp16_bytes, all);
    printf("\n");
    return mem.ratio;
}

static void print_answer(const secret *x, int which) {
    if (x->answer[which][0])
        printf("   %-*s %s", ANSWER - 8, x->answer[which], is_right(x, which) ? "right" : "wrong");
    else printf("   %-*s", ANSWER - 2, "-");
}

static void print_recall(const session *s, const char *start) {
    if (s->n_secrets == 0) return;
    printf("Questions after the text, \"%s ...\":\n\n", start);
    printf("  %-22s tokens back   tier      in the prompt   exact cache      tiers\n", "");
    for (int i = 0; i < s->n_secrets; i++) {
        const secret *x = &s->secrets[i];
        const int skip = 1 + (int)strlen(start);
        printf(" %-23.*s %11s   %-7s   %-13s", x->word > skip ? x->word - skip - 1 : 0, x->line + skip,
               commas(tkv_get_length(s->kv, 0, TKV_ALL_LAYERS) - x->at), tier_names[tier_of(s, x->at)],
               x->line + x->word);
        print_answer(x, EXACT);
        print_answer(x, TIERED);
        printf("\n");
    }
    printf("\n");
}

static void print_summary(const session *s, const comparison *c, double ratio) {
    int right[CACHES] = {0, 0}, archived = 0, archived_right = 0;
    for (int i = 0; i < s->n_secrets; i++) {
        const secret *x = &s->secrets[i];
        right[TIERED] += is_right(x, TIERED);
        right[EXACT] += is_right(x, EXACT);
        archived += tier_of(s, x->at) == TKV_TIER_ARCHIVE;
        archived_right += tier_of(s, x->at) == TKV_TIER_ARCHIVE && is_right(x, TIERED);
    }
    if (ratio > 1) printf("  memory      %.2f times fewer bytes than FP16\n", ratio);
    else printf("  memory      more than FP16: the text is short, and an empty cache already takes memory\n");
    if (c->positions) {
        printf("  next token  KL divergence from an exact F32 cache: mean %.5f, 99 %% below %.4f, most %.4f "
               "nats\n",
               c->mean, c->high, c->most);
        printf("              the same likeliest token at %.1f %% of the last %s positions\n",
               100.0 * c->same / c->positions, commas(c->positions));
    }
    if (c->known)
        printf("              perplexity of the prompt %.3f, %.3f with the exact cache\n",
               exp(c->loss[TIERED] / c->known), exp(c->loss[EXACT] / c->known));
    tkv_layer_info tiers;
    if (tkv_get_layer(s->kv, 0, 0, &tiers) == TKV_OK &&
        tiers.tokens[TKV_TIER_HOT] == tkv_get_length(s->kv, 0, TKV_ALL_LAYERS))
        printf("              (all tokens are still in the hot tail; a longer text shows more)\n");
    if (s->n_secrets == 0) return;
    printf("  recall      %d of %d from the tiers, %d of %d in the archive", right[TIERED], s->n_secrets,
           archived_right, archived);
    if (c->positions) printf("; %d of %d from the exact cache", right[EXACT], s->n_secrets);
    printf("\n");
}

/* Writes the plan of this run with its score to the store, and frees the store. */
static void keep_plan(plan_store *store, const session *s, const comparison *c) {
    float score;
    const int has_meter = s->cfg.meter.heads > 0, known = c->known >= 64;
    if (!has_meter && !known)
        printf("  thresholds  %s stays: a score takes --meter, or a prompt of 64 compared tokens\n",
               store->path);
    else if (!score_run(s->kv, has_meter, known ? exp(c->loss[EXACT] / c->known) : 0,
                        known ? exp(c->loss[TIERED] / c->known) : 0, &score))
        printf("  thresholds  %s stays: the run gave no score; a longer text may\n", store->path);
    else store_save(store, &s->cfg, s->kv, score);
    free(store->entries.entry);
}

int main(int argc, char **argv) {
    options o;
    settings w;
    session s;
    comparison c;
    memset(&o, 0, sizeof o);
    memset(&w, 0, sizeof w);
    memset(&s, 0, sizeof s);
    memset(&c, 0, sizeof c);
    o.n = 256;
    w.compare = -1;
    parse_options(argc, argv, usage, &o, &s.cfg, parse_own_option, &w);
    if (!o.model) help(usage, 1);
    uint64_t rng = rng_seed(&o);
    load(&o, &s.model, &s.cfg);
    plan_store store;
    if (w.thresholds && s.cfg.layers) fail("--thresholds keeps no plan of single layers (--layers)");
    if (w.thresholds) store_open(&store, w.thresholds, o.model, context_of(&o, &s.model));
    if (w.thresholds) store_apply(&store, &s.cfg);
    s.kv = create(&s.cfg);
    load_tables(&o, s.kv);
    int context = context_of(&o, &s.model);
    if (w.recall && context > 2 * LINE) context -= LINE / 2; /* space for a question */
    const int most = context - (o.n < context / 2 ? o.n : context / 2);
    double *times = (double *)allocate((size_t)o.n, sizeof *times);
    latency waits = latency_begin(times, o.n);
    saved from, to;
    memset(&from, 0, sizeof from);
    memset(&to, 0, sizeof to);
    if (w.load || w.save) name_model(&s.model, s.name);
    if (w.load) load_prompt(&s, &from, w.load, w.attach);
    if (w.load && !o.prompt && !o.file) take_prompt(&s, &from, most, o.n);
    else s.n_prompt = read_prompt(&s.model, &o, most, o.n, 1, &s.tokens);
    if (w.load) check_prompt(&s, &from);
    if (w.compare < 0) w.compare = w.load ? 0 : 256;
    s.n_tokens = s.n_prompt;
    s.n_kept = s.n_prompt - s.n_loaded + o.n;
    if (s.n_kept > w.compare) s.n_kept = w.compare;
    s.kept = (float *)allocate((size_t)s.n_kept * (size_t)s.model.vocab, sizeof *s.kept);
    s.logits = (float *)allocate((size_t)TKV_BLOCK_TOKENS * (size_t)s.model.vocab, sizeof *s.logits);
    choice *space = (choice *)allocate((size_t)s.model.vocab, sizeof *space);

    const double prompt_start = seconds(), read_start = latency_now();
    double saving = 0, reading_before = 0, reading = 0; /* `saving` in processor time, for prompt_time */
    if (w.load) reading_before = 1e-3 * from.numbers[from.n_numbers - 1];
    if (w.save) {
        (void)read_tokens(&s, s.n_prompt - 1);
        reading = reading_before + latency_now() - read_start;
        saving = seconds();
        save_prompt(&s, &to, w.save, reading);
        saving = seconds() - saving;
    }
    const float *last = read_tokens(&s, s.n_prompt);
    const double prompt_time = seconds() - prompt_start - saving;

    s.appending = 0;
    s.attending = 0;
    const double text_start = seconds();
    int n_text = 0;
    while (n_text < o.n && s.n_tokens < context) {
        if (n_text > 0) {
            evaluate(&s, 1, 1);
            last = s.logits;
        }
        const int token = sample(last, s.model.vocab, &o, &rng, space);
        if (!o.raw && s.model.entries[token].kind == LLAMA_CONTROL) break; /* the model ended the text */
        int len = 0;
        const char *piece = llama_piece(&s.model, s.tokens[s.n_tokens - 1], token, &len);
        fwrite(piece, 1, (size_t)len, stdout);
        fflush(stdout);
        latency_token(&waits);
        s.tokens[s.n_tokens++] = token;
        n_text++;
    }
    const double text_time = seconds() - text_start;
    const double attending = s.attending, appending = s.appending; /* the questions below would add to them */
    if (s.n_tokens >= context) printf(" [the context of %d tokens is full]", context);

    if (w.metrics) write_metrics(w.metrics, s.kv, &waits);
    printf("\n\n");
    double ratio = print_memory(&s);
    if (w.recall) find_secrets(&s, w.recall);
    if (w.recall && s.n_secrets == 0) fail("no line of the prompt begins with \"%s\"", w.recall);
    ask(&s, TIERED);
    if (s.n_kept > 0) compare(&s, &c);
    print_recall(&s, w.recall);
    print_summary(&s, &c, ratio);
    const int n_read = s.n_prompt - s.n_loaded;
    char threads[32] = "one thread";
    if (llama_threads() > 1) snprintf(threads, sizeof threads, "%d threads", llama_threads());
    printf("  speed       prompt %s tokens at %s per second, text %s at %s (%s, %s)\n", commas(n_read),
           commas(n_read / (prompt_time + 1e-9)), commas(n_text), commas(n_text / (text_time + 1e-9)),
           threads, tkv_get_name(TKV_NAME_ISA, (int)program_isa_of(s.kv)));
    if (n_text > 1)
        printf("  each token  %.1f ms: attention %.2f, appending %.2f, matrix products and the rest %.1f\n",
               1e3 * text_time / n_text, 1e3 * attending / n_text, 1e3 * appending / n_text,
               1e3 * (text_time - attending - appending) / n_text);
    latency_print(&waits, stdout);
    if (w.load) print_saved(w.attach ? "attached" : "loaded", &from, reading_before);
    if (w.save) print_saved("saved", &to, reading);
    if (w.thresholds) keep_plan(&store, &s, &c);
    tkv_destroy(s.kv);
    plan_free(&s.cfg);
    llama_free(&s.model);
    free(from.numbers);
    free(s.tokens);
    free(s.logits);
    free(s.kept);
    free(space);
    free(times);
    return 0;
}
