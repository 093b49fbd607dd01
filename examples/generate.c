/*
 * generate.c - text from a real model whose keys and values live in tieredkv, and what that costs and saves.
 *
 * cc -O2 -o generate examples/generate.c -lm && ./generate model.gguf
 *
 * Streams text, then says where the tokens are, how many bytes they take, how fast it was, and how far the
 * distribution of the next token moved from that of an exact cache which saw the same tokens. `./generate`
 * alone lists the options. The sampler follows run.c of llama2.c.
 */
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "llama.h"

#include <time.h>

static const char usage[] = "generate MODEL [options]\n"
                            "MODEL is a .gguf file, or a .bin of llama2.c with its tokenizer.bin beside it.\n"
                            "\n"
                            "  -p TEXT            the prompt\n"
                            "  -f FILE            the prompt from a file\n"
                            "  -n N               tokens to generate (256)\n"
                            "  -c N               context (the model's)\n"
                            "  -t T               temperature, 0 takes the likeliest token (0.8)\n"
                            "  --top-p P          choose among the likeliest that have this share (0.95)\n"
                            "  --seed N           of the dice (1)\n"
                            "  --raw              no chat template, and go on after the end\n"
                            "  -z FILE            tokenizer.bin of a llama2.c model\n"
                            "  --theta X          base of RoPE (the model's)\n"
                            "  --rope-halves      RoPE turns channels (i, i + d/2)\n"
                            "  --isa NAME         auto, scalar, avx2 or avx512\n"
                            "  --compare N        newest positions to compare with an exact cache (256)\n"
                            "  --no-compare       do not\n"
                            "\n"
                            "Where tokens live, oldest to newest: [sinks][archive ...][warm][hot]\n"
                            "  --sinks N          the first tokens, exact for ever (4)\n"
                            "  --hot N:FORMAT     the newest (64:f16)\n"
                            "  --warm N:FORMAT    the next older, N may be none or all (448:kivi4)\n"
                            "  --archive FORMAT   the others (kivi2)\n"
                            "  --group N          values that share a scale: 64 or 32 (64)\n"
                            "FORMAT is one for K and V, or two as in kivi2/kivi4. There are\n ";

enum { MOST = 1 << 24 }; /* tokens; keeps every sum of two in an int */

typedef struct options {
    const char *model, *tokenizer, *prompt, *file;
    int n, context, raw, rope_halves, compare;
    float temperature, top_p, theta;
    uint64_t seed;
} options;

typedef struct session {
    llama_model model;
    tkv_config cfg;
    tkv_cache *kv;
    int *tokens, n_tokens; /* known tokens; tkv_seq_len of them have been evaluated */
    float *logits;         /* of one chunk */
    float *kept;           /* of position p in row p % n_kept: compared with the exact cache's in the end */
    int n_kept;
} session;

/* >>talking */
LLAMA_PRINTF(1, 2)
static void fail(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "generate: ");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n");
    va_end(ap);
    exit(1);
}

static void *room(size_t n, size_t size) {
    void *p = n < SIZE_MAX / size ? malloc(n * size + 1) : NULL;
    if (!p) fail("out of memory for %.0f bytes", (double)n * (double)size);
    return p;
}

static double seconds(void) {
    return (double)clock() / CLOCKS_PER_SEC;
} /* of one thread, which is all there is */

/* A line that is written over and over, from half a second after the start on. */
static void progress(const char *what, int done, int of, double start) {
    static int shown;
    const double t = seconds() - start;
    char bar[33] = "................................";
    memset(bar, '#', (size_t)(32.0 * done / of));
    if (done < of && t > 0.5)
        shown = fprintf(stderr, "\r%s [%s] %d / %d, %.0f/s ", what, bar, done, of, done / t);
    if (done == of && shown) fprintf(stderr, "\r%78s\r", ""), shown = 0;
    fflush(stderr);
}

static const char *commas(double x) { /* 12,345,678; good for four at a time */
    static char bufs[4][40];
    static int turn;
    char digits[32], *buf = bufs[turn = (turn + 1) % 4];
    int i, to = 0, n = snprintf(digits, sizeof digits, "%.0f", x);
    for (i = 0; i < n && to < 38; i++) {
        if (i && (n - i) % 3 == 0) buf[to++] = ',';
        buf[to++] = digits[i];
    }
    buf[to] = 0;
    return buf;
}

/* >>options */
static void help(int status) {
    int i;
    fputs(usage, stdout);
    for (i = 1; i < TKV_FORMAT_COUNT; i++) printf(" %s", tkv_format_name((tkv_format)i));
    printf(".\n");
    exit(status);
}

static int parse_tier(const char *s, int *tokens, tkv_pair *pair) { /* 448, none, 448:kivi4, kivi4, k/v */
    const size_t n = strcspn(s, ":"), digits = strspn(s, "0123456789");
    const int none = n == 4 && strncmp(s, "none", n) == 0, all = n == 3 && strncmp(s, "all", n) == 0;
    char name[16];
    size_t k;
    if (tokens && (none || all || (digits == n && n > 0 && n < 9))) {
        *tokens = none ? TKV_NONE : all ? TKV_ALL : atoi(s);
        if (*tokens == 0) *tokens = TKV_NONE; /* to the library 0 is the default */
        if (s[n] == 0) return 1;
        s += n + 1;
    }
    k = strcspn(s, "/");
    if (k >= sizeof name) return 0;
    memcpy(name, s, k);
    name[k] = 0;
    pair->k = tkv_format_from_name(name);
    pair->v = s[k] ? tkv_format_from_name(s + k + 1) : pair->k;
    return pair->k != TKV_FORMAT_DEFAULT && pair->v != TKV_FORMAT_DEFAULT;
}

static void parse(int argc, char **argv, options *o, tkv_config *cfg) {
    int i, ok = 1, sinks;
    for (i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0) help(0);
        else if (strcmp(name, "--raw") == 0) o->raw = 1;
        else if (strcmp(name, "--rope-halves") == 0) o->rope_halves = 1;
        else if (strcmp(name, "--no-compare") == 0) o->compare = 0;
        else if (name[0] != '-' && !o->model) o->model = name;
        else if (name[0] != '-') fail("%s: a second model? A prompt needs -p before it", name);
        else if (!value) fail("%s: no such option, or its value is missing (generate --help)", name);
        else if (i++, strcmp(name, "-p") == 0) o->prompt = value;
        else if (strcmp(name, "-f") == 0) o->file = value;
        else if (strcmp(name, "-z") == 0) o->tokenizer = value;
        else if (strcmp(name, "-n") == 0) ok = (o->n = atoi(value)) > 0 && o->n <= MOST;
        else if (strcmp(name, "-c") == 0) ok = (o->context = atoi(value)) > 1 && o->context <= MOST;
        else if (strcmp(name, "-t") == 0) ok = (o->temperature = (float)atof(value)) >= 0;
        else if (strcmp(name, "--top-p") == 0) ok = (o->top_p = (float)atof(value)) > 0;
        else if (strcmp(name, "--theta") == 0) ok = (o->theta = (float)atof(value)) > 0;
        else if (strcmp(name, "--seed") == 0) o->seed = strtoull(value, NULL, 10);
        else if (strcmp(name, "--compare") == 0) ok = (o->compare = atoi(value)) >= 0 && o->compare <= MOST;
        else if (strcmp(name, "--sinks") == 0)
            sinks = atoi(value), cfg->sink_tokens = sinks ? sinks : TKV_NONE;
        else if (strcmp(name, "--hot") == 0) ok = parse_tier(value, &cfg->hot_tokens, &cfg->hot);
        else if (strcmp(name, "--warm") == 0) ok = parse_tier(value, &cfg->warm_tokens, &cfg->warm);
        else if (strcmp(name, "--archive") == 0) ok = parse_tier(value, NULL, &cfg->archive);
        else if (strcmp(name, "--group") == 0) ok = (cfg->group_size = atoi(value)) > 0;
        else if (strcmp(name, "--isa") == 0) {
            for (ok = 0; ok < TKV_ISA_COUNT && strcmp(value, tkv_isa_name((tkv_isa)ok)) != 0;) ok++;
            cfg->isa = (tkv_isa)ok;
            ok = ok < TKV_ISA_COUNT;
        } else fail("%s: no such option (generate --help)", name);
        if (!ok) fail("%s %s: not a value for this option (generate --help)", name, value);
    }
    if (!o->model) help(1);
}

/* >>running */
static void evaluate(session *s, int n, int n_logits) { /* the next n known tokens */
    const int pos = tkv_seq_len(s->kv, 0), vocab = s->model.vocab;
    const tkv_status status = llama_forward(&s->model, s->kv, 0, s->tokens + pos, n, s->logits, n_logits);
    int i;
    if (status != TKV_OK) fail("token %d: %s", pos, tkv_status_text(status));
    for (i = 0; i < n_logits && s->n_kept > 0; i++)
        memcpy(s->kept + (size_t)((pos + n - n_logits + i) % s->n_kept) * (size_t)vocab,
               s->logits + (size_t)i * (size_t)vocab, (size_t)vocab * sizeof *s->kept);
}

static tkv_cache *create(const tkv_config *cfg) {
    tkv_cache *kv = NULL;
    char reason[200];
    tkv_status status = tkv_config_validate(cfg, reason, sizeof reason);
    if (status != TKV_OK) fail("%s", reason);
    status = tkv_create(cfg, &kv);
    if (status != TKV_OK) fail("%s", tkv_status_text(status));
    return kv;
}

typedef struct choice {
    float p;
    int token;
} choice;

static int by_p(const void *a, const void *b) {
    const float x = ((const choice *)a)->p, y = ((const choice *)b)->p;
    return (x < y) - (x > y);
}

/* Softmax at a temperature; then one of the most likely tokens that together have probability top_p. */
static int sample(const float *logits, int n, const options *o, uint64_t *rng, choice *space) {
    const int best = llama_argmax(logits, n);
    double sum = 0, left;
    float least;
    int i, m = 0;
    if (o->temperature <= 0) return best;
    for (i = 0; i < n; i++) sum += (double)expf((logits[i] - logits[best]) / o->temperature);
    least = o->top_p < 1 ? (1 - o->top_p) / (float)n : 0; /* smaller ones cannot be in the nucleus */
    for (i = 0; i < n; i++) {
        const float p = expf((logits[i] - logits[best]) / o->temperature) / (float)sum;
        if (p >= least) space[m].p = p, space[m++].token = i;
    }
    qsort(space, (size_t)m, sizeof *space, by_p);
    for (i = 0, sum = 0; i < m && sum < (double)o->top_p;) sum += (double)space[i++].p;
    m = i;
    *rng ^= *rng << 13, *rng ^= *rng >> 7, *rng ^= *rng << 17; /* xorshift64, Marsaglia 2003 */
    left = (double)(*rng >> 11) / 9007199254740992.0 * sum;
    for (i = 0; i + 1 < m && left >= (double)space[i].p; i++) left -= (double)space[i].p;
    return m > 0 ? space[i].token : best;
}

/* >>tables */
static const char *pair_name(const tkv_pair *p, tkv_format standard, char *buf, size_t size) {
    const char *k = tkv_format_name(p->k ? p->k : standard), *v = tkv_format_name(p->v ? p->v : standard);
    if (strcmp(k, v) == 0) snprintf(buf, size, "%s", k);
    else snprintf(buf, size, "%s / %s", k, v);
    return buf;
}

static void print_memory(const session *s) {
    static const char *const names[TKV_TIER_COUNT] = {"hot", "warm", "archive"};
    static const tkv_format standard[TKV_TIER_COUNT] = {TKV_F16, TKV_KIVI4, TKV_KIVI2};
    static const char marks[] = "#+.";
    const double values = (double)s->model.n_kv_heads * (s->model.head_dim + s->model.v_head_dim);
    const int n = tkv_seq_len(s->kv, 0);
    const tkv_pair *pairs[TKV_TIER_COUNT];
    tkv_tier_info tiers;
    tkv_memory_info mem;
    double bytes, left;
    char map[65], buf[32];
    int i;
    if (tkv_tier_counts(s->kv, 0, 0, &tiers) != TKV_OK || tkv_memory(s->kv, &mem) != TKV_OK || n == 0) return;
    for (i = 0; i < 64; i++) { /* of the first token in the i-th part */
        tkv_tier tier = TKV_HOT;
        tkv_tier_of(s->kv, 0, 0, (int)((double)i * n / 64), &tier);
        map[i] = marks[tier];
    }
    map[i] = 0;
    printf("oldest %s newest\n\n", map);
    printf("  tier           tokens   format                  bytes   bits per value\n");
    pairs[TKV_HOT] = &s->cfg.hot, pairs[TKV_WARM] = &s->cfg.warm, pairs[TKV_ARCHIVE] = &s->cfg.archive;
    left = (double)mem.total;
    for (i = 0; i < TKV_TIER_COUNT; i++) {
        bytes = (double)mem.tier[i].codes + (double)mem.tier[i].metadata;
        left -= bytes;
        printf("%c %-9s %11s   %-15s %13s", marks[i], names[i], commas(tiers.tokens[i]),
               pair_name(pairs[i], standard[i], buf, sizeof buf), commas(bytes));
        if (tiers.tokens[i]) printf("%17.2f", 8 * bytes / ((double)mem.tier[i].tokens * values));
        printf("\n");
    }
    printf("  other                     tables, index, ... %11s\n", commas(left));
    printf("  total     %11s                   %13s%17.2f\n", commas(n), commas((double)mem.total),
           8 * (double)mem.total / (values * s->model.n_layers * n));
    printf("  in FP16                                   %13s%17.2f\n\n", commas((double)mem.fp16_bytes),
           16.0);
    if (mem.ratio > 1) printf("%.2f times smaller than FP16.\n\n", mem.ratio);
    else printf("Larger than FP16: the text is too short for what a cache takes at the start.\n\n");
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The same tokens once more, in the same chunks, with an exact cache. */
static void compare(session *s) {
    const int n = tkv_seq_len(s->kv, 0), vocab = s->model.vocab, count = n < s->n_kept ? n : s->n_kept;
    const int first = n - count;
    double *kl = (double *)room((size_t)count, sizeof *kl), loss[2] = {0, 0}, sum = 0;
    const double start = seconds();
    session exact = *s;
    tkv_tier_info tiers;
    int pos, i, same = 0, known = 0;
    exact.cfg.hot.k = exact.cfg.hot.v = TKV_F32;
    exact.cfg.warm = exact.cfg.archive = exact.cfg.hot;
    exact.kv = create(&exact.cfg);
    exact.n_kept = 0;
    for (pos = 0; pos < n;) {
        const int chunk = llama_chunk(&s->cfg, pos, n - pos < 64 ? n - pos : 64);
        int from = pos < first ? first : pos; /* the first position of the chunk that is compared */
        if (from > pos + chunk) from = pos + chunk;
        progress("comparing", pos, n, start);
        evaluate(&exact, chunk, pos + chunk - from);
        for (i = from; i < pos + chunk; i++) {
            const float *a = s->kept + (size_t)(i % s->n_kept) * (size_t)vocab;
            const float *b = exact.logits + (size_t)(i - from) * (size_t)vocab;
            kl[i - first] = llama_divergence(b, a, vocab);
            sum += kl[i - first];
            same += llama_argmax(a, vocab) == llama_argmax(b, vocab);
            if (i + 1 == s->n_tokens) continue;
            known++;
            loss[0] += llama_loss(b, vocab, s->tokens[i + 1]);
            loss[1] += llama_loss(a, vocab, s->tokens[i + 1]);
        }
        pos += chunk;
    }
    progress("comparing", n, n, start);
    qsort(kl, (size_t)count, sizeof *kl, by_size);
    printf("\nAgainst an exact F32 cache that sees the same tokens, at the last %d positions:\n", count);
    printf("  mean KL divergence   %.5f nats; 99 %% of them are below %.5f\n", sum / count,
           kl[(int)(0.99 * (count - 1))]);
    printf("  same likeliest token %.1f %%\n", 100.0 * same / count);
    if (known)
        printf("  perplexity           %.3f exact, %.3f tiered\n", exp(loss[0] / known),
               exp(loss[1] / known));
    if (tkv_tier_counts(s->kv, 0, 0, &tiers) == TKV_OK && tiers.tokens[TKV_HOT] == n)
        printf("  (Nothing has left the hot tail yet: a longer text shows more.)\n");
    tkv_destroy(exact.kv);
    free(kl);
}

/* The prompt's tokens. What does not fit into `most` is left out of the middle. */
static void read_prompt(session *s, const options *o, int most) {
    static const char story[] = "Once upon a time";
    static const char question[] =
        "Tell me a story about a lighthouse keeper who finds a message in a bottle.";
    const int chat = s->model.chat && !o->raw, tail = most < 64 ? most / 2 : 32;
    const char *prompt = o->prompt ? o->prompt : chat ? question : story;
    size_t size = strlen(prompt), shown;
    char *file = NULL, *text;
    if (o->file) {
        file = (char *)llama_read_file(o->file, &size);
        if (!file) fail("cannot read %s", o->file);
        if (size > 1 << 30) fail("%s is longer than any context", o->file);
        prompt = file;
    }
    text = (char *)room(size + 64, 1);
    memcpy(text, "<|im_start|>user\n", 17);
    memcpy(text + 17, prompt, size);
    memcpy(text + 17 + size, "<|im_end|>\n<|im_start|>assistant\n", 33);
    s->tokens = (int *)room(size + 64 + (size_t)o->n, sizeof *s->tokens);
    s->n_tokens = chat ? llama_tokenize(&s->model, text, size + 50, LLAMA_SPECIAL, s->tokens)
                       : llama_tokenize(&s->model, prompt, size, s->model.add_bos ? LLAMA_BOS : 0, s->tokens);
    if (s->n_tokens == 0 && s->model.bos >= 0) s->tokens[s->n_tokens++] = s->model.bos;
    if (s->n_tokens == 0) fail("the prompt is empty; give one with -p or -f");
    if (s->n_tokens > most) {
        fprintf(stderr, "generate: the prompt has %d tokens and %d fit (-c, -n): its middle is left out\n",
                s->n_tokens, most);
        memmove(s->tokens + most - tail, s->tokens + s->n_tokens - tail, (size_t)tail * sizeof *s->tokens);
        s->n_tokens = most;
    }
    for (shown = size > 400 ? size - 400 : 0; shown > 0 && shown < size && (prompt[shown] & 0xc0) == 0x80;)
        shown++;
    printf("%s%s%.*s%s", chat ? "> " : "", shown ? "... " : "", (int)(size - shown), prompt + shown,
           chat ? "\n\n" : "");
    fflush(stdout);
    free(text);
    free(file);
}

int main(int argc, char **argv) {
    options o;
    session s;
    char err[256];
    choice *space;
    double start, prompt_time, text_time;
    uint64_t rng;
    int n_prompt, n_text = 0, context, n, logits = 1, before, token, len;

    memset(&o, 0, sizeof o);
    memset(&s, 0, sizeof s);
    o.n = o.compare = 256;
    o.temperature = 0.8f;
    o.top_p = 0.95f;
    o.seed = 1;
    parse(argc, argv, &o, &s.cfg);
    rng = o.seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
    if (!llama_load(o.model, o.tokenizer, &s.model, err, sizeof err)) fail("%s: %s", o.model, err);
    if (s.model.note[0]) fprintf(stderr, "generate: %s\n", s.model.note);
    if (o.theta > 0) s.model.rope_theta = o.theta;
    s.model.rope_halves = o.rope_halves;
    llama_kv_config(&s.model, &s.cfg);
    s.kv = create(&s.cfg);
    context = o.context ? o.context : s.model.context;
    if (context > MOST) context = MOST;
    read_prompt(&s, &o, context - (o.n < context / 2 ? o.n : context / 2));
    n_prompt = s.n_tokens;
    s.n_kept = o.compare < n_prompt + o.n ? o.compare : n_prompt + o.n;
    s.kept = (float *)room((size_t)s.n_kept * (size_t)s.model.vocab, sizeof *s.kept);
    s.logits = (float *)room((size_t)TKV_BLOCK_TOKENS * (size_t)s.model.vocab, sizeof *s.logits);
    space = (choice *)room((size_t)s.model.vocab, sizeof *space);

    start = seconds();
    while ((before = tkv_seq_len(s.kv, 0)) <
           n_prompt) { /* in chunks that see what token by token would see */
        n = n_prompt - before < TKV_BLOCK_TOKENS ? n_prompt - before : TKV_BLOCK_TOKENS;
        n = llama_chunk(&s.cfg, before, n);
        logits = before + n - (n_prompt - s.n_kept); /* the ones that may be compared later */
        if (logits > n) logits = n;
        if (logits < 1) logits = before + n == n_prompt;
        progress("reading the prompt", before, n_prompt, start);
        evaluate(&s, n, logits);
    }
    progress("reading the prompt", n_prompt, n_prompt, start);
    prompt_time = seconds() - start;

    start = seconds();
    for (; n_text < o.n && s.n_tokens < context; n_text++, logits = 1) {
        const float *last = s.logits + (size_t)(logits - 1) * (size_t)s.model.vocab;
        const char *piece;
        if (n_text > 0) evaluate(&s, 1, 1);
        token = sample(last, s.model.vocab, &o, &rng, space);
        if (!o.raw && s.model.entries[token].kind == LLAMA_CONTROL) break; /* the end of the text */
        piece = llama_piece(&s.model, s.tokens[s.n_tokens - 1], token, &len);
        fwrite(piece, 1, (size_t)len, stdout);
        fflush(stdout);
        s.tokens[s.n_tokens++] = token;
    }
    text_time = seconds() - start;
    if (s.n_tokens >= context) printf(" [the context of %d tokens is full]", context);

    printf("\n\n");
    print_memory(&s);
    printf("  prompt  %9d tokens %11.1f per second\n", n_prompt, n_prompt / (prompt_time + 1e-9));
    printf("  text    %9d tokens %11.1f per second   (one thread, %s)\n", n_text, n_text / (text_time + 1e-9),
           tkv_isa_name(tkv_isa_of(s.kv)));
    if (s.n_kept > 0) compare(&s);
    tkv_destroy(s.kv);
    llama_free(&s.model);
    free(s.tokens);
    free(s.logits);
    free(s.kept);
    free(space);
    return 0;
}
