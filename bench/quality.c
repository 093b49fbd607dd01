/*
 * quality.c - measures the loss and the bytes of plans on a real model and real text: perplexity, KL divergence,
 * bytes per token.
 *
 * cc -O2 bench/quality.c -o quality -lm -pthread && ./quality model.gguf
 *
 * The text is read in chunks that end where a block leaves the hot tail. So every position sees the same coded tokens
 * as in decoding token by token. For this all layers demote at the same token (measure_align_layers). A cache as it is
 * demotes later in most layers, and loses less. The logits are compared with those of the same model and an exact F32 cache. The
 * exact logits are kept in a file for later runs. QUALITY.md explains the measurement. `./quality --help` lists the
 * options.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime, mkdir, getpid */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../tieredkv.h"

#include "../examples/llama.h"
#include "../examples/plan.h"
#include "bench.h"
#include "calibrate.h"
#include "rivals.h"
#include "weights.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

static const char usage[] =
    "quality MODEL [options]\n"
    "MODEL is a .gguf file, or a .bin of llama2.c with its tokenizer.bin in the same folder.\n"
    "\n"
    "  --text FILE           text (text/wiki.test.raw in $TKV_DATA or ../shared/data)\n"
    "  --window FROM:TOKENS  piece of the text, in tokens; may be repeated (windows of 4096 tokens, or of\n"
    "                        the model's context if that is shorter: the first 8,192 tokens, at most 8)\n"
    "  --from N              first position that is scored (512; half a window if one is short)\n"
    "  --tables-text FILE    text for the word tables= (the same text)\n"
    "  --plan PLAN           plan to measure; may be repeated (a list of plans for all kinds of formats)\n"
    "  --plans FILE          file with one plan per line; # begins a comment\n"
    "  --rivals, --no-rivals measures rivals, or does not (yes, unless there are --plan or --plans)\n"
    "  --passkey             hides a number at five depths of the first window and asks for it at the end\n"
    "  --needle TEXT         line with the number, which replaces ##### (The pass key is #####. Remember\n"
    "                        it. ##### is the pass key.)\n"
    "  --question TEXT       line with the question (What is the pass key? The pass key is)\n"
    "  --threads N           number of plans and windows measured at once (1)\n"
    "  --write N             instead of reading on, each plan writes N tokens behind the window. An exact\n"
    "                        cache reads them too. Logits are compared at each token. The last column is "
    "the\n"
    "                        number of tokens up to the first that the exact cache would not have written\n"
    "  --sample              samples these tokens by their probabilities (takes the likeliest)\n"
    "  --csv FILE            writes the table as CSV, one line per plan and window\n"
    "  --positions FILE      writes the KL divergence of each position as CSV (bench/pairs.py compares "
    "plans)\n"
    "  --weights TYPE        holds the decoded weights as f32, f16 or q8_0 (the file's types)\n"
    "  --activations TYPE    rounds each vector that weights multiply to f16 or q8_0, as ggml does for "
    "weights of\n"
    "                        F16, and of Q8_0 and Q4_1 (f32: it rounds nothing)\n"
    "  --cache DIR           folder of the exact logits (build/quality)\n"
    "  --theta X             base of RoPE (the model's)\n"
    "  --yarn N              YaRN: RoPE for N times the model's context (the file)\n"
    "  --rope-halves         RoPE rotates the pairs of channels (i, i + d/2)\n"
    "\n";

static const char usage_of_plans[] =
    "PLAN is a list of words, of which one may be hot,warm,archive; or a rival's name:\n"
    "  'sinks=4 hot=64:f16 warm=448:kivi4 archive=kivi2 group=64'    omitted words take their defaults\n"
    "  64,448:kivi4,kivi2/kivi4                                      one format for K, one for V\n"
    "  'preset=compact tables=4096'\n"
    "Words:\n" PLAN_HELP
    "  tables N           loads tables for A and R formats, instead of learning them in each window. They\n"
    "                     are made from the N tokens after the last window, or from the first N tokens of\n"
    "                     --tables-text. FROM:N: from N tokens at FROM\n"
    "  refresh N          calls tkv_refresh_calibration after N tokens of a window\n"
    "  budget N%          sets cfg.budget.bytes, in percent of the window's FP16 bytes\n"
    "  name NAME          name of the plan in the table\n"
    "Rivals: +h applies a Hadamard transform first. streaming:N keeps N tokens; without N, it keeps as many\n"
    "FP16 tokens as fit into the bytes of the default plan.\n";

static const char *const standard_plans[] = {
    /* the library's own formats, most bits first */
    "preset=quality", "preset=balanced", "64,448:a40/r40,a30/r20", "preset=compact", "64,448:a40/r40,a20/r20",
    "preset=extreme", "64,448:a40/r40,a15/r15", "64,none,a30/r20", "64,none,a20/r15",
    /* plans with tables from another part of the text */
    "preset=balanced tables=4096", "64,448:a40/r40,a30/r20 tables=4096", "preset=extreme tables=4096",
    /* designs of others */
    "64,448:q8,q8", "64,448:kivi4,kivi4", "64,448:kivi4,kivi3", "preset=kivi", "64,none,kivi2",
    "64,448:kivi4,kivi2 fit=clip+norm", "preset=squat", "preset=kvquant-3", "64,none,int4",
    "64,none,int4 rotate=k+v", "64,none,int4 rotate=k+v center=1", "64,none,fp8-e4m3",
    "64,none,fp4 rotate=k+v", "64,none,subspace4", "64,none,subspace2"};

/* Plans for windows that are too short for three tiers and for learning tables. */
static const char *const short_plans[] = {"64,none,a40/r40 tables=4096",
                                          "64,none,a30/r30 tables=4096",
                                          "64,none,a30/r20 tables=4096",
                                          "64,none,a25/r20 tables=4096",
                                          "64,none,a20/r15 tables=4096",
                                          "64,none,a15/r15 tables=4096",
                                          "64,none,q8",
                                          "64,none,kivi4",
                                          "64,none,kivi3",
                                          "64,none,kivi2",
                                          "64,none,kivi2 fit=clip+norm",
                                          "64,none,squat2/kivi2",
                                          "64,none,int4 rotate=k+v",
                                          "64,none,fp8-e4m3",
                                          "64,none,fp4 rotate=k+v",
                                          "64,none,subspace4",
                                          "64,none,subspace2"};

static const char *const rival_plans[] = {
    "name=kivi4-g32-r128 sinks=none hot=128 warm=none archive=kivi4 group=32",
    "name=kivi2-g32-r128 sinks=none hot=128 warm=none archive=kivi2 group=32",
    "noise-floor",
    "q8_0",
    "q5_0",
    "q4_1",
    "q4_0",
    "q4_0+h",
    "hf-int4",
    "hf-int2",
    "turbo4",
    "turbo3",
    "kvarn-k4v4",
    "kvarn-k4v2",
    "kvarn-k2v2",
    "oscar",
    "oscar+tail",
    "turbo4/turbo3",
    "turbo4/turbo2",
    "kvarn-k4v4+tail",
    "kvarn-k4v4/k4v2",
    "kvarn-k4v4/k3v3",
    "kvarn-k4v4/k2v2",
    "kitty",
    "age-8/4/2",
    "streaming"};

enum {
    MAX_PLANS = 256,
    MAX_LESSONS = 16,
    MAX_WINDOWS = 64,
    SHORT = 1024, /* windows of fewer tokens are short: see short_plans */
    MAX_KEYS = 5,
    MAX_NAME = 240,
    MAX_POS = 1 << 24 /* largest position and length of a window */
};

typedef struct lesson { /* a piece of text, and the tables made from it */
    int from, length;   /* from < 0: after the last window */
    unsigned char *tables;
    size_t bytes;
} lesson;

typedef struct plan {
    char name[MAX_NAME];
    tkv_config cfg;
    const rival_kind *rival; /* NULL: a plan of the library */
    int is_rival;   /* column `rival` of the CSV; 1 also for rivals built from the library's formats */
    int budget;     /* tokens that StreamingLLM keeps; 0: see fill_budget */
    int percent;    /* byte budget in percent of FP16; 0: none */
    int refresh;    /* tokens before tkv_refresh_calibration; 0: it is not called */
    lesson *tables; /* NULL: learns tables in each window */
} plan;

typedef struct window {
    int from, length;
    int *tokens; /* [length + 1]; the last one is -1 at the end of the text */
    uint64_t key;
    char path[1024]; /* file of the exact logits */
} window;

typedef struct passkey { /* filler with a number, then a question */
    int depth;           /* percent of the filler before the number */
    int *tokens, n;
    char digits[8];
    int known; /* 1: the exact cache answers correctly; other passkeys are left out */
} passkey;

typedef struct result {        /* result of a plan in a window, or with a passkey */
    int done, right;           /* right: the answer begins with the passkey's digits */
    int n, predicted;          /* scored positions; the first `predicted` have a known next token */
    double *kl, *loss, *delta; /* nats; delta: loss less the loss of the exact cache */
    int agreed;  /* written tokens before the first that the exact cache would not have written */
    double same; /* positions with the same likeliest token as the exact cache */
    double archive_bits, bytes, fp16_bytes;
} result;

/* State that all workers share. */
static struct {
    llama_model model;
    const char *weights, *activations; /* names of types; NULL: as in the file, none */
    const char *model_path, *text_path, *tables_path, *cache_dir, *needle, *question;
    int from, write,
        sample;        /* write: tokens that plans write; 0: they read the window. sample: 1: at random */
    int *text, n_text; /* tokens, without BOS */
    float *rotations;  /* OSCAR's; NULL: no plan needs them */
    window windows[MAX_WINDOWS];
    passkey keys[MAX_KEYS];
    plan plans[MAX_PLANS];
    lesson lessons[MAX_LESSONS];
    int n_windows, n_keys, n_plans, n_lessons;
    int per_plan;         /* jobs per plan: windows, then passkeys */
    int exact;            /* 1: the jobs run the exact cache */
    pthread_mutex_t lock; /* guards all fields below */
    pthread_cond_t finished;
    int n_rows;     /* rows printed */
    int next, last; /* job j is job j % per_plan of plan j / per_plan */
    result *results;
    const char *doing;
    double work, total_work, start, shown; /* shown: time of the last progress line; 0: no line */
} all;

LLAMA_PRINTF(1, 2)
static void fail(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%squality: ", all.shown > 0 ? "\n" : "");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n");
    va_end(ap);
    exit(1);
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* >>plans */
static const char *parse_tables(const char *text, lesson **tables) { /* 4096, 8192:4096 */
    const char *colon = strchr(text, ':');
    int from = -1, length;
    if ((colon && !plan_count(text, (size_t)(colon - text), &from)) ||
        !plan_count(colon ? colon + 1 : text, strlen(colon ? colon + 1 : text), &length) || length < 1)
        return "tables= must be TOKENS or FROM:TOKENS";
    int i;
    for (i = 0; i < all.n_lessons; i++)
        if (all.lessons[i].from == from && all.lessons[i].length == length) break;
    if (i == MAX_LESSONS) return "too many pieces of text for tables";
    if (i == all.n_lessons) all.n_lessons++;
    all.lessons[i].from = from;
    all.lessons[i].length = length;
    *tables = &all.lessons[i];
    return NULL;
}

static const char *parse_budget(const char *text, plan *p) {
    const size_t n = strcspn(text, "%");
    if (!plan_count(text, n, &p->percent) || strcmp(text + n, "%") != 0 || p->percent < 1 ||
        p->percent > 1000)
        return "budget= must be 1% to 1000% of FP16's bytes, such as 25%";
    p->cfg.budget.bytes = (size_t)1 << 30; /* for tkv_validate_config; subject_create sets the real budget */
    return NULL;
}

/* >>the exact copies of blocks, for the word promote=: outside the bytes that are counted */
typedef struct memory_store {
    unsigned char **bytes; /* [n] by key */
    size_t *sizes, n;
} memory_store;

static int memory_store_write(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    memory_store *s = (memory_store *)user;
    if (key >= s->n) {
        const size_t n = 2 * (size_t)key + 64;
        s->bytes = (unsigned char **)realloc(s->bytes, n * sizeof *s->bytes);
        s->sizes = (size_t *)realloc(s->sizes, n * sizeof *s->sizes);
        if (!s->bytes || !s->sizes) exit(1);
        memset(s->bytes + s->n, 0, (n - s->n) * sizeof *s->bytes);
        memset(s->sizes + s->n, 0, (n - s->n) * sizeof *s->sizes);
        s->n = n;
    }
    if (offset + size > s->sizes[key]) {
        s->bytes[key] = (unsigned char *)realloc(s->bytes[key], offset + size);
        if (!s->bytes[key]) exit(1);
        s->sizes[key] = offset + size;
    }
    memcpy(s->bytes[key] + offset, bytes, size);
    return 0;
}

static int memory_store_read(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    const memory_store *s = (const memory_store *)user;
    if (key >= s->n || offset + size > s->sizes[key]) return 1;
    memcpy(bytes, s->bytes[key] + offset, size);
    return 0;
}

static void memory_store_attach(memory_store *s, tkv_config *cfg) {
    cfg->offload.write = memory_store_write;
    cfg->offload.read = memory_store_read;
    cfg->offload.user = s;
    cfg->offload.keep_exact = 1;
}

static void memory_store_free(memory_store *s) {
    for (size_t i = 0; s && i < s->n; i++) free(s->bytes[i]);
    if (s) free(s->bytes), free(s->sizes);
    free(s);
}

/* Parses a plan. Returns NULL, or a text about the error. */
static const char *parse_plan(const char *text, const llama_model *m, plan *p) {
    static char reason[200];
    const char *wrong = NULL;
    memset(p, 0, sizeof *p);
    if (strlen(text) >= MAX_NAME) return "it is too long";
    if (strpbrk(text, "\"\n")) return "it contains a quote";
    strcpy(p->name, text);
    char words[MAX_NAME];
    strcpy(words, text);
    if (strncmp(text, "streaming:", 10) == 0) {
        p->budget = atoi(text + 10);
        words[9] = 0;
        if (p->budget < 8) return "StreamingLLM needs at least 8 tokens";
    }
    p->rival = rival_find(words);
    if (p->rival) return rival_refuses(p->rival, m);
    char *next;
    for (char *word = words; *word && !wrong; word = next) {
        const size_t n = strcspn(word, " ");
        next = word + n + (word[n] != 0);
        word[n] = 0;
        char *value = strchr(word, '=');
        if (value) *value++ = 0;
        if (n == 0) continue;
        if (!value) wrong = plan_three(&p->cfg, word);
        else if (strcmp(word, "tables") == 0) wrong = parse_tables(value, &p->tables);
        else if (strcmp(word, "budget") == 0) wrong = parse_budget(value, p);
        else if (strcmp(word, "name") == 0) strcpy(p->name, value);
        else if (strcmp(word, "refresh") == 0)
            wrong = plan_count(value, strlen(value), &p->refresh) && p->refresh > 0
                        ? NULL
                        : "refresh= must be a number of tokens";
        else wrong = plan_word(&p->cfg, word, value);
    }
    if (wrong) return wrong;
    if (p->tables && !calibrate_changes(&p->cfg)) return "none of its formats has tables";
    if (p->cfg.promotion.every) memory_store_attach(NULL, &p->cfg);
    llama_kv_config(m, &p->cfg);
    if (plan_too_far(&p->cfg)) return plan_too_far(&p->cfg);
    return tkv_validate_config(&p->cfg, reason, sizeof reason) == TKV_OK ? NULL : reason;
}

static void add_plan(const char *text, int optional, int is_rival) {
    if (all.n_plans == MAX_PLANS) fail("more than %d plans", MAX_PLANS);
    const char *wrong = parse_plan(text, &all.model, &all.plans[all.n_plans]);
    all.plans[all.n_plans].is_rival = is_rival || all.plans[all.n_plans].rival != NULL;
    if (!wrong) all.n_plans++;
    else if (optional) fprintf(stderr, "quality: left out: %s (%s)\n", text, wrong);
    else fail("plan %s: %s", text, wrong);
}

static void add_plans(const char *const *plans, size_t n, int is_rival) {
    for (size_t i = 0; i < n; i++) add_plan(plans[i], 1, is_rival);
}

static void add_plans_of_file(const char *path) {
    size_t size;
    char *text = (char *)llama_read_file(path, &size), *line = text;
    if (!text) fail("cannot read %s", path);
    text[size] = 0;
    for (size_t i = 0; i <= size; i++) {
        if (text[i] != '\n' && text[i] != 0) continue;
        text[i] = 0;
        line[strcspn(line, "#\r")] = 0;
        line += strspn(line, " \t");
        size_t n;
        for (n = strlen(line); n && (line[n - 1] == ' ' || line[n - 1] == '\t');) line[--n] = 0;
        if (n) add_plan(line, 1, 0);
        line = text + i + 1;
    }
    free(text);
}

/* >>text */
static uint64_t hash(uint64_t h, const void *data, size_t n) { /* FNV-1a over words of 8 bytes */
    const unsigned char *p = (const unsigned char *)data;
    for (; n; p += 8) {
        uint64_t word = 0;
        const size_t k = n < 8 ? n : 8;
        memcpy(&word, p, k);
        h = (h ^ word) * 1099511628211u;
        h ^= h >> 32;
        n -= k;
    }
    return h;
}

static uint64_t hash_model(const llama_model *m) {
    uint64_t h = hash(14695981039346656037u, &m->rope_theta, sizeof m->rope_theta);
    h = hash(h, &m->rope_halves, sizeof m->rope_halves);
    if (m->rope_yarn > 1) h = hash(h, &m->rope_yarn, sizeof m->rope_yarn);
    if (m->round_inputs) h = hash(h, all.activations, strlen(all.activations));
    h = hash(h, m->embedding.data, (size_t)m->embedding.rows * m->embedding.row_bytes);
    h = hash(h, m->head.data, (size_t)m->head.rows * m->head.row_bytes);
    for (int i = 0; i < m->n_layers; i++)
        for (int t = 0; t < LLAMA_PARTS; t++)
            h = hash(h, m->layers[i].w[t].data, (size_t)m->layers[i].w[t].rows * m->layers[i].w[t].row_bytes);
    return h;
}

/* Tokenizes a text. <|endoftext|>, which texts of llama2.c contain, becomes a BOS if the model has one. */
static int *tokenize(const llama_model *m, const char *text, size_t size, int *count) {
    static const char mark[] = "<|endoftext|>";
    const size_t len = sizeof mark - 1;
    int *tokens = (int *)bench_alloc((size + 2) * sizeof *tokens);
    size_t from = 0;
    *count = 0;
    for (size_t at = 0; at <= size; at++) {
        const int marked = size - at >= len && memcmp(text + at, mark, len) == 0;
        if (at < size && !marked) continue;
        if (m->add_bos && from && from < at && m->bos >= 0) tokens[(*count)++] = m->bos;
        *count += llama_tokenize(m, text + from, at - from, 0, tokens + *count);
        if (at == size) break;
        from = at + len;
        at += len - 1;
    }
    return tokens;
}

static void add_window(const char *text) {
    window *w = &all.windows[all.n_windows];
    if (all.n_windows == MAX_WINDOWS) fail("more than %d windows", MAX_WINDOWS);
    if (sscanf(text, "%d:%d", &w->from, &w->length) != 2 || w->from < 0 || w->from > MAX_POS ||
        w->length < 2 || w->length > MAX_POS)
        fail("--window %s: it must be FROM:TOKENS", text);
    for (int i = 0; i < all.n_windows; i++) /* counted twice, a window would make errors too small */
        if (all.windows[i].from == w->from && all.windows[i].length == w->length)
            fail("--window %s is given twice", text);
    all.n_windows++;
}

/* Tokenizes a line with the digits in place of #####. Returns the number of tokens. */
static int tokenize_line(const char *text, const char *digits, const char *end, int *tokens, int most) {
    char line[512];
    size_t n = 1;
    line[0] = '\n';
    while (*text && n < sizeof line - 8) {
        const size_t step = strncmp(text, "#####", 5) == 0 ? 5 : 1;
        memcpy(line + n, step == 5 ? digits : text, step);
        text += step;
        n += step;
    }
    line[n] = 0;
    strcat(line, end);
    if ((int)strlen(line) + 2 > most) fail("this line is too long: %s", line);
    return llama_tokenize(&all.model, line, strlen(line), 0, tokens);
}

/* Makes a prompt of `length` tokens: filler from the text with a number at this depth, and a question at the end. */
static void fill_key(passkey *key, int depth, int length, const int *text) {
    uint64_t z = ((uint64_t)depth + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 29)) * 0xbf58476d1ce4e5b9u;
    snprintf(key->digits, sizeof key->digits, "%05d", (int)(10000 + (z >> 33) % 90000));
    int needle[512];
    int n_needle = tokenize_line(all.needle, key->digits, "\n", needle, 512);
    int question[512];
    int n_question = tokenize_line(all.question, key->digits, "", question, 512);
    int filler = length - n_needle - n_question;
    int before = (int)((double)filler * depth / 100);
    if (filler < 16) fail("the first window is too short for a passkey");
    key->depth = depth;
    key->n = length;
    key->tokens = (int *)bench_alloc((size_t)length * sizeof *key->tokens);
    memcpy(key->tokens, text, (size_t)before * sizeof *text);
    memcpy(key->tokens + before, needle, (size_t)n_needle * sizeof *text);
    memcpy(key->tokens + before + n_needle, text + before, (size_t)(filler - before) * sizeof *text);
    memcpy(key->tokens + length - n_question, question, (size_t)n_question * sizeof *text);
}

static int *read_tokens(const char *path, int *n) {
    size_t size;
    char *text = (char *)llama_read_file(path, &size);
    if (!text) fail("cannot read %s; give a text with --text FILE", path);
    if (size > 1 << 28) fail("%s is longer than any context", path);
    int *tokens = tokenize(&all.model, text, size, n);
    free(text);
    return tokens;
}

/* Copies n tokens as a new sequence, with a BOS first if the model expects one; -1 after the end of the text. */
static void copy_piece(const int *text, int n_text, int from, int n, int *out) {
    const int bos = all.model.add_bos && all.model.bos >= 0;
    for (int i = 0; i < n; i++) {
        const int at = from + i - bos;
        out[i] = bos && i == 0 ? all.model.bos : at < n_text ? text[at] : -1;
    }
}

static void default_windows(void) { /* at most 8,192 tokens and 8 windows */
    const int length = all.model.context < 4096 ? all.model.context : 4096;
    char buf[64];
    for (int i = 0; i < 8 && (i + 1) * length <= 8192 && (i + 1) * length <= all.n_text; i++) {
        snprintf(buf, sizeof buf, "%d:%d", i * length, length);
        add_window(buf);
    }
    if (all.n_windows == 0) fail("%s has only %d tokens; use --window", all.text_path, all.n_text);
}

static void fill_windows(int passkeys) {
    const llama_model *m = &all.model;
    const int bos = m->add_bos && m->bos >= 0;
    const uint64_t model = hash_model(m);
    all.text = read_tokens(all.text_path, &all.n_text);
    if (all.n_windows == 0) default_windows();
    for (int i = 0; all.from < 0 && i < all.n_windows; i++)
        if (all.windows[i].length < SHORT) all.from = all.windows[i].length / 2;
    if (all.from < 0) all.from = 512;
    for (int i = 0; i < all.n_windows; i++) {
        window *w = &all.windows[i];
        if (w->from + w->length - bos > all.n_text)
            fail("--window %d:%d: the text has %d tokens", w->from, w->length, all.n_text);
        if (w->length <= all.from)
            fail("--window %d:%d: --from leaves no position to score", w->from, w->length);
        if (w->length > llama_context(m))
            fprintf(stderr, "quality: the window has %d tokens, the model's context %d\n", w->length,
                    llama_context(m));
        w->tokens = (int *)bench_alloc((size_t)(w->length + 1) * sizeof *w->tokens);
        copy_piece(all.text, all.n_text, w->from, w->length + 1, w->tokens);
        w->key = hash(model, w->tokens, (size_t)w->length * sizeof *w->tokens);
        w->key = hash(w->key, &all.from, sizeof all.from);
        snprintf(w->path, sizeof w->path, "%s/%08lx%08lx.logits", all.cache_dir,
                 (unsigned long)(w->key >> 32), (unsigned long)(w->key & 0xffffffffu));
    }
    for (int i = 0; passkeys && i < MAX_KEYS; i++)
        fill_key(&all.keys[all.n_keys++], 10 + 80 * i / (MAX_KEYS - 1), all.windows[0].length,
                 all.windows[0].tokens);
}

/* Gives StreamingLLM the bytes of the default plan for the first window. Returns 0 if they hold the whole window. */
static int fill_budget(plan *p) {
    const int tokens = all.windows[0].length;
    if (!p->rival || p->rival->rule != RIVAL_STREAMING || p->budget) return 1;
    tkv_config cfg;
    memset(&cfg, 0, sizeof cfg);
    llama_kv_config(&all.model, &cfg);
    tkv_memory_info mem;
    if (tkv_estimate_memory(&cfg, tokens, 1, &mem) != TKV_OK) fail("%s: tkv_estimate_memory failed", p->name);
    p->budget = (int)((double)mem.total / (double)mem.fp16_bytes * tokens);
    snprintf(p->name, sizeof p->name, "streaming:%d", p->budget);
    if (p->budget < tokens) return 1;
    fprintf(stderr, "quality: left out: streaming (the default plan's bytes hold the whole window)\n");
    return 0;
}

/* >>file of the exact logits: this header, then a row for each scored position */
typedef struct exact_head {
    char magic[8];
    uint64_t key, vocab, rows;
} exact_head;

static exact_head exact_head_of(const window *w) {
    exact_head h;
    memset(&h, 0, sizeof h);
    memcpy(h.magic, "tkvexact", 8);
    h.key = w->key;
    h.vocab = (uint64_t)all.model.vocab;
    h.rows = (uint64_t)(w->length - all.from);
    return h;
}

static FILE *exact_open(const window *w) { /* NULL: there is no file, or its header differs */
    const exact_head want = exact_head_of(w);
    FILE *f = fopen(w->path, "rb");
    exact_head have;
    if (f && (fread(&have, sizeof have, 1, f) != 1 || memcmp(&have, &want, sizeof want) != 0)) {
        fclose(f);
        f = NULL;
    }
    return f;
}

static void make_directory(const char *path) { /* makes its parents, too */
    char part[1024];
    for (size_t i = 1; i <= strlen(path) && i < sizeof part; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        memcpy(part, path, i);
        part[i] = 0;
        mkdir(part, 0777); /* an existing directory is fine */
    }
}

/* >>running */
static double work_of(int pos, int n) {
    return n * (1 + (pos + n / 2) / 4000.0);
} /* estimated work; attention grows with pos */

static void progress(double work) { /* call with the lock held; 0: clears the line */
    const double now = bench_seconds(0), t = now - all.start;
    all.work += work;
    if (work > 0 && t > 0.5 && now - all.shown > 0.5) {
        fprintf(stderr, "\r%s %.0f %%, %.0f seconds left   ", all.doing, 100 * all.work / all.total_work,
                t * (all.total_work / all.work - 1));
        all.shown = now;
    } else if (work <= 0 && all.shown > 0) {
        fprintf(stderr, "\r%60s\r", "");
        all.shown = 0;
    }
    fflush(stderr);
}

static void progress_begin(const char *doing, double total) {
    all.doing = doing;
    all.work = 0;
    all.total_work = total;
    all.start = bench_seconds(0);
}

/* >>tables for the word tables=, made once for all plans and windows: they depend on the model, not on the plan */
static void progress_of_tokens(int n) { progress(n); }

/* First token behind all windows. */
static int end_of_windows(void) {
    int end = 0;
    for (int i = 0; i < all.n_windows; i++)
        if (end < all.windows[i].from + all.windows[i].length)
            end = all.windows[i].from + all.windows[i].length;
    return end;
}

/* Makes OSCAR's rotations once, from the first 4,096 tokens behind the windows. Returns 0 if the text ends before. */
static int learn_rotations(const plan *p) {
    const int n = all.model.context < 4096 ? all.model.context : 4096, from = end_of_windows();
    if (!p->rival || p->rival->rule != RIVAL_OSCAR || all.rotations) return 1;
    if (n > all.n_text - from) {
        fprintf(stderr, "quality: left out: %s (the text has no %d tokens behind the windows)\n", p->name, n);
        return 0;
    }
    int *tokens = (int *)bench_alloc((size_t)n * sizeof *tokens);
    copy_piece(all.text, all.n_text, from, n, tokens);
    all.rotations = rival_learn(&all.model, tokens, n);
    if (!all.rotations) fail("%s: out of memory", p->name);
    printf("%s: rotations from tokens %d:%d of %s\n", p->name, from, n, base_name(all.text_path));
    free(tokens);
    return 1;
}

static void learn_tables(void) {
    const int context = all.model.context < 4096 ? all.model.context : 4096;
    int *text = all.text, n_text = all.n_text;
    if (all.tables_path && all.n_lessons) text = read_tokens(all.tables_path, &n_text);
    for (int i = 0; i < all.n_lessons; i++) {
        lesson *p = &all.lessons[i];
        int *tokens = (int *)bench_alloc((size_t)p->length * sizeof *tokens);
        const int from = p->from >= 0 ? p->from : all.tables_path ? 0 : end_of_windows();
        for (int j = 0; !all.tables_path && j < all.n_windows; j++) {
            const window *w = &all.windows[j];
            if (from < w->from + w->length && w->from < from + p->length)
                fail("tables=%d:%d overlaps window %d:%d; use another piece, or --tables-text FILE", from,
                     p->length, w->from, w->length);
        }
        if (p->length > n_text || from > n_text - p->length)
            fail("tables=%d:%d: the text has %d tokens; use another piece, or --tables-text FILE", from,
                 p->length, n_text);
        for (int at = 0; at < p->length; at += context)
            copy_piece(text, n_text, from + at, p->length - at < context ? p->length - at : context,
                       tokens + at);
        progress_begin("tables", p->length);
        tkv_status status;
        p->tables = calibrate(&all.model, tokens, p->length, context, progress_of_tokens, &p->bytes, &status);
        progress(0);
        if (!p->tables) fail("tables=%d:%d: %s", from, p->length, tkv_get_status_text(status));
        printf("tables=%s%d: tokens %d:%d of %s, in sequences of %d\n", p->from < 0 ? "" : "FROM:", p->length,
               from, p->length, base_name(all.tables_path ? all.tables_path : all.text_path),
               context < p->length ? context : p->length);
        free(tokens);
    }
    if (text != all.text) free(text);
}

/* Compares one row of logits with the exact row, in double: a divergence of 1e-4 sums terms of both signs. */
static void compare(const float *exact, const float *row, int n, double *kl, double *exact_lse, double *lse) {
    double a = (double)exact[0], b = (double)row[0], sum_a = 0, sum_b = 0, sum = 0;
    for (int i = 1; i < n; i++) {
        if ((double)exact[i] > a) a = (double)exact[i];
        if ((double)row[i] > b) b = (double)row[i];
    }
    for (int i = 0; i < n; i++) {
        const double x = (double)exact[i] - a, y = (double)row[i] - b, p = exp(x);
        sum_a += p;
        sum_b += exp(y);
        sum += p * (x - y);
    }
    *kl = sum / sum_a - log(sum_a) + log(sum_b);
    *exact_lse = a + log(sum_a);
    *lse = b + log(sum_b);
}

static void score(result *r, const window *w, int pos, const float *exact, const float *row) {
    const int vocab = all.model.vocab, next = w->tokens[pos + 1], i = r->n++;
    double exact_lse, lse;
    compare(exact, row, vocab, &r->kl[i], &exact_lse, &lse);
    r->same += llama_argmax(exact, vocab) == llama_argmax(row, vocab);
    if (next < 0) return;
    r->loss[i] = lse - (double)row[next];
    r->delta[i] = r->loss[i] - (exact_lse - (double)exact[next]);
    r->predicted = i + 1;
}

/* >>the cache under test: of the library or of a rival */
typedef struct subject {
    const plan *p;
    tkv_cache *kv;
    memory_store *store; /* NULL: none */
    rival *r;
    int n; /* tokens read */
} subject;

static subject subject_create(const plan *p, int max_tokens) {
    subject s;
    memset(&s, 0, sizeof s);
    s.p = p;
    if (p->rival) s.r = rival_create(p->rival, &all.model, max_tokens, p->budget);
    else {
        tkv_config cfg = p->cfg;
        const size_t dims =
            (size_t)(all.model.head_dim + all.model.v_head_dim) * (size_t)all.model.n_kv_heads;
        if (p->percent)
            cfg.budget.bytes =
                2 * dims * (size_t)all.model.n_layers * (size_t)max_tokens * (size_t)p->percent / 100;
        tkv_layer_config *layers =
            (tkv_layer_config *)bench_alloc((size_t)all.model.n_layers * sizeof *layers);
        memset(layers, 0, (size_t)all.model.n_layers * sizeof *layers);
        if (cfg.layers) memcpy(layers, cfg.layers, (size_t)all.model.n_layers * sizeof *layers);
        if (!cfg.budget.bytes) {
            measure_align_layers(&cfg, layers);
            cfg.layers = layers;
        }
        if (cfg.promotion.every) {
            s.store = (memory_store *)bench_alloc(sizeof *s.store);
            memset(s.store, 0, sizeof *s.store);
            memory_store_attach(s.store, &cfg);
        }
        tkv_create(&cfg, &s.kv);
        free(layers);
    }
    if (s.r) s.r->rotations = all.rotations;
    if (!s.r && !s.kv) fail("%s: out of memory", p->name);
    if (p->tables && tkv_load_calibration(s.kv, p->tables->tables, p->tables->bytes) != TKV_OK)
        fail("%s: %s", p->name, tkv_get_last_error(s.kv));
    return s;
}

static void subject_destroy(subject *s) {
    tkv_destroy(s->kv);
    memory_store_free(s->store);
    rival_destroy(s->r);
}

static int subject_chunk(const subject *s, int left) { /* size of the next chunk: see measure_chunk */
    if (s->r) return rival_chunk(s->p->rival, s->n, left);
    if (s->n < s->p->refresh && s->p->refresh - s->n < left) left = s->p->refresh - s->n;
    return measure_chunk(&s->p->cfg, s->n, left < TKV_BLOCK_TOKENS ? left : TKV_BLOCK_TOKENS);
}

static void subject_read(subject *s, const int *tokens, int n, float *logits, int n_logits) {
    const tkv_status status =
        s->r ? llama_forward_with(&all.model, tokens, n, s->n, rival_attention, s->r, logits, n_logits)
             : llama_forward(&all.model, s->kv, 0, tokens, n, logits, n_logits);
    if (status != TKV_OK) fail("%s, token %d: %s", s->p->name, s->n, tkv_get_status_text(status));
    s->n += n;
    if (s->kv && s->n == s->p->refresh && tkv_refresh_calibration(s->kv) != TKV_OK)
        fail("%s: %s", s->p->name, tkv_get_last_error(s->kv));
}

static void subject_bytes(const subject *s, result *r) {
    const double heads = all.model.n_kv_heads, dims = all.model.head_dim + all.model.v_head_dim;
    r->fp16_bytes = 2 * heads * dims * all.model.n_layers * s->n;
    tkv_memory_info mem;
    if (s->r) {
        r->archive_bits = rival_bits(s->p->rival, &all.model);
        r->bytes = rival_bytes(s->p->rival, &all.model, s->n, s->p->budget);
    } else if (tkv_get_memory(s->kv, &mem) == TKV_OK) {
        const tkv_tier_bytes *archive = &mem.tier[TKV_TIER_ARCHIVE];
        if (archive->tokens)
            r->archive_bits =
                8 * (double)(archive->codes + archive->metadata) / ((double)archive->tokens * heads * dims);
        r->bytes = (double)mem.total;
    }
}

/* >>jobs */
static void run_plan(const plan *p, const window *w, result *r, FILE *exact, FILE *write) {
    const size_t vocab = (size_t)all.model.vocab, count = (size_t)(w->length - all.from);
    float *logits = (float *)bench_alloc(TKV_BLOCK_TOKENS * vocab * sizeof *logits);
    float *row = (float *)bench_alloc(vocab * sizeof *row);
    subject s = subject_create(p, w->length);
    if (r) {
        r->kl = (double *)bench_alloc(3 * count * sizeof *r->kl);
        r->loss = r->kl + count;
        r->delta = r->loss + count;
    }
    int n;
    for (int pos = 0; pos < w->length; pos += n) {
        n = subject_chunk(&s, w->length - pos);
        int from = pos < all.from ? all.from : pos; /* the chunk's first position to score */
        if (from > pos + n) from = pos + n;
        subject_read(&s, w->tokens + pos, n, logits, pos + n - from);
        for (int i = from; i < pos + n; i++) {
            const float *mine = logits + (size_t)(i - from) * vocab;
            if (write && fwrite(mine, sizeof *mine, vocab, write) != vocab) fail("cannot write %s", w->path);
            if (!r) continue;
            if (fread(row, sizeof *row, vocab, exact) != vocab) fail("%s is too short: delete it", w->path);
            score(r, w, i, row, mine);
        }
        pthread_mutex_lock(&all.lock);
        progress(work_of(pos, n));
        pthread_mutex_unlock(&all.lock);
    }
    if (r) subject_bytes(&s, r);
    subject_destroy(&s);
    free(row);
    free(logits);
}

static plan exact_plan(void) {
    plan p;
    memset(&p, 0, sizeof p);
    strcpy(p.name, "the exact cache");
    llama_kv_config(&all.model, &p.cfg);
    p.cfg.tiers.hot.k = p.cfg.tiers.hot.v = TKV_F32;
    p.cfg.tiers.warm = p.cfg.tiers.archive = p.cfg.tiers.hot;
    p.cfg.tiers.hot_tokens = TKV_UNLIMITED;
    return p;
}

/* The token that is written after these logits. With --sample it is the likeliest after noise that depends on the seed
 * alone (Gumbel's trick): equal logits give equal tokens, and similar ones mostly do. */
static int written_token(const float *logits, uint64_t seed) {
    double most = -HUGE_VAL;
    int best = 0;
    if (!all.sample) return llama_argmax(logits, all.model.vocab);
    for (int i = 0; i < all.model.vocab; i++) {
        const double x = (double)logits[i] - log(-log(bench_uniform(&seed) + 1e-17));
        if (x > most) most = x, best = i;
    }
    return best;
}

/* Reads n tokens without logits, but for those of the last one. */
static void read_text(subject *s, const int *tokens, int n, float *logits) {
    while (s->n < n) {
        const int chunk = subject_chunk(s, n - s->n);
        subject_read(s, tokens + s->n, chunk, logits, s->n + chunk == n);
        pthread_mutex_lock(&all.lock);
        progress(work_of(s->n - chunk, chunk));
        pthread_mutex_unlock(&all.lock);
    }
}

/* Lets a plan write behind the window. An exact cache reads what it writes. */
static void run_writing(const plan *p, const window *w, result *r) {
    const size_t vocab = (size_t)all.model.vocab, count = (size_t)all.write;
    const plan exact = exact_plan();
    float *mine = (float *)bench_alloc(vocab * sizeof *mine),
          *row = (float *)bench_alloc(vocab * sizeof *row);
    subject s = subject_create(p, w->length + all.write), e = subject_create(&exact, w->length + all.write);
    window text = *w;
    text.tokens = (int *)bench_alloc(((size_t)w->length + count + 1) * sizeof *text.tokens);
    memcpy(text.tokens, w->tokens, (size_t)w->length * sizeof *text.tokens);
    r->kl = (double *)bench_alloc(3 * count * sizeof *r->kl);
    r->loss = r->kl + count;
    r->delta = r->loss + count;
    read_text(&s, w->tokens, w->length, mine);
    read_text(&e, w->tokens, w->length, row);
    subject_bytes(&s, r);
    for (int i = 0; i < all.write; i++) {
        const uint64_t seed = w->key + ((uint64_t)i << 32);
        const int token = written_token(mine, seed);
        text.tokens[w->length + i] = token;
        score(r, &text, w->length + i - 1, row, mine);
        if (r->agreed == i) r->agreed += token == written_token(row, seed);
        if (i + 1 == all.write) break;
        subject_read(&s, &token, 1, mine, 1);
        subject_read(&e, &token, 1, row, 1);
        pthread_mutex_lock(&all.lock);
        progress(2 * work_of(w->length + i, 1));
        pthread_mutex_unlock(&all.lock);
    }
    subject_destroy(&s);
    subject_destroy(&e);
    free(text.tokens);
    free(mine);
    free(row);
}

static int run_key(const plan *p, const passkey *key) { /* 1: the answer begins with the digits */
    const int vocab = all.model.vocab;
    float *logits = (float *)bench_alloc((size_t)vocab * sizeof *logits);
    subject s = subject_create(p, key->n + 16);
    size_t size = 0;
    int n, len;
    read_text(&s, key->tokens, key->n, logits);
    int before = key->tokens[key->n - 1];
    char answer[64];
    int token;
    for (int i = 0; i < 8 && size < 5; i++, before = token) {
        token = llama_argmax(logits, vocab);
        const char *piece = llama_piece(&all.model, before, token, &len);
        for (n = 0; n < len && size < sizeof answer - 1; n++)
            if (size || piece[n] != ' ') answer[size++] = piece[n]; /* skips a space before the digits */
        subject_read(&s, &token, 1, logits, 1);
    }
    answer[size] = 0;
    subject_destroy(&s);
    free(logits);
    return strncmp(answer, key->digits, 5) == 0;
}

static void run_exact(const window *w) {
    const exact_head head = exact_head_of(w);
    const plan p = exact_plan();
    char part[sizeof w->path + 24];
    FILE *f;
    /* Writes to another name and renames the finished file, since another program may write the same file now. */
    snprintf(part, sizeof part, "%s.%ld", w->path, (long)getpid());
    f = fopen(part, "wb");
    if (!f || fwrite(&head, sizeof head, 1, f) != 1) fail("cannot write %s", part);
    run_plan(&p, w, NULL, NULL, f);
    if (fclose(f) != 0 || rename(part, w->path) != 0) fail("cannot write %s", w->path);
}

static void run_job(int job) {
    const int which = job % all.per_plan, key = which - all.n_windows;
    if (all.write && key < 0) {
        if (!all.exact) run_writing(&all.plans[job / all.per_plan], &all.windows[which], &all.results[job]);
        return;
    }
    FILE *f = key < 0 ? exact_open(&all.windows[which]) : NULL;
    if (all.exact && key >= 0) {
        const plan p = exact_plan();
        all.keys[key].known = run_key(&p, &all.keys[key]);
    } else if (all.exact && !f) run_exact(&all.windows[which]);
    else if (!all.exact && key >= 0)
        all.results[job].right = run_key(&all.plans[job / all.per_plan], &all.keys[key]);
    else if (!all.exact && !f) fail("%s has disappeared", all.windows[which].path);
    else if (!all.exact)
        run_plan(&all.plans[job / all.per_plan], &all.windows[which], &all.results[job], f, NULL);
    if (f) fclose(f);
}

static void *worker(void *unused) {
    for (;;) {
        pthread_mutex_lock(&all.lock);
        int job = all.next < all.last ? all.next++ : -1;
        pthread_mutex_unlock(&all.lock);
        if (job < 0) return unused;
        run_job(job);
        pthread_mutex_lock(&all.lock);
        all.results[job].done = 1;
        pthread_cond_signal(&all.finished);
        pthread_mutex_unlock(&all.lock);
    }
}

/* >>tables */
typedef struct estimate {
    double mean, error;
} estimate;

static estimate estimate_of(const result *r, int n_results, size_t which) {
    measure_mean m = {0, 0, 0, 0, 0};
    for (int i = 0; i < n_results; i++)
        measure_add(&m,
                    which == 0   ? r[i].kl
                    : which == 1 ? r[i].loss
                                 : r[i].delta,
                    which == 0 ? r[i].n : r[i].predicted);
    const estimate e = {m.n ? m.total / m.n : 0, measure_error(&m)};
    return e;
}

static double percentile(const result *r, int n_results,
                         double share) { /* percentile of the KL divergences */
    int n = 0, i;
    for (i = 0; i < n_results; i++) n += r[i].n;
    double *x = (double *)bench_alloc((size_t)n * sizeof *x);
    for (i = n = 0; i < n_results; i++)
        for (int j = 0; j < r[i].n; j++) x[n++] = r[i].kl[j];
    qsort(x, (size_t)n, sizeof *x, bench_order);
    double at = share * (n - 1);
    i = (int)at;
    double y = i + 1 < n ? x[i] + (at - i) * (x[i + 1] - x[i]) : x[i];
    free(x);
    return y;
}

typedef struct summary {
    estimate kl, loss, delta;
    double kl_999, same, bits, bytes_per_token, ratio;
} summary;

static summary summarize(const result *r, const window *w, int n) { /* summary of n windows */
    summary s;
    double tokens = 0, bytes = 0, fp16 = 0, scored = 0;
    memset(&s, 0, sizeof s);
    s.kl = estimate_of(r, n, 0);
    s.loss = estimate_of(r, n, 1);
    s.delta = estimate_of(r, n, 2);
    s.kl_999 = percentile(r, n, 0.999);
    for (int i = 0; i < n; i++) {
        s.same += r[i].same;
        scored += r[i].n;
        tokens += w[i].length;
        bytes += r[i].bytes;
        fp16 += r[i].fp16_bytes;
        s.bits += r[i].archive_bits / n;
    }
    s.same *= 100 / scored;
    s.bytes_per_token = bytes / tokens;
    s.ratio = fp16 / bytes;
    return s;
}

static void keep_known_keys(void) { /* leaves out passkeys that the exact cache does not find */
    int n = 0;
    for (int i = 0; i < all.n_keys; i++) {
        if (all.keys[i].known) all.keys[n++] = all.keys[i];
        else
            fprintf(stderr, "quality: left out: passkey at %d %% (the exact cache does not find it)\n",
                    all.keys[i].depth);
    }
    all.n_keys = n;
}

static void print_head(void) {
    printf("%s: %d layers, %d query and %d KV heads, head_dim %d; %s", base_name(all.model_path),
           all.model.n_layers, all.model.n_heads, all.model.n_kv_heads, all.model.head_dim,
           base_name(all.text_path));
    if (all.weights) printf(", weights %s", all.weights);
    if (all.activations) printf(", activations %s", all.activations);
    printf(", windows");
    for (int i = 0; i < all.n_windows; i++) printf(" %d:%d", all.windows[i].from, all.windows[i].length);
    if (all.write)
        printf(", %d tokens written, %s\n", all.write, all.sample ? "sampled" : "always the likeliest");
    else printf(", positions from %d on\n", all.from);
    printf("%-30s %5s %7s %6s %19s %8s %7s %8s %17s", "plan", "bits", "B/token", "ratio", "KL divergence",
           "99.9 %", "top-1 %", "ppl", "dPPL %");
    if (all.n_keys) printf(" %7s", "passkey");
    printf("%s\n", all.write ? "  agrees for" : all.n_windows > 1 ? "  KL by window" : "");
    fflush(stdout);
}

static int count_right(const result *r) { /* right answers to passkeys */
    int right = 0;
    for (int i = 0; i < all.n_keys; i++) right += r[all.n_windows + i].right;
    return right;
}

static void write_csv(FILE *csv, const plan *p,
                      const result *r) { /* a line for each window, and one for all */
    for (int i = 0; i <= all.n_windows; i++) {
        const int one = i < all.n_windows;
        const window *w = &all.windows[one ? i : 0];
        const summary s = summarize(&r[one ? i : 0], w, one ? 1 : all.n_windows);
        const double growth = exp(s.delta.mean);
        fprintf(csv, "\"%s\",%d,", p->name, p->is_rival);
        if (one) fprintf(csv, "%d:%d,", w->from, w->length);
        else fprintf(csv, "all,");
        fprintf(csv, "%.4f,%.2f,%.4f,%.5e,%.5e,%.5e,%.4f,%.5f,%.5f,%.4f,%.4f,%d,%d\n", s.bits,
                s.bytes_per_token, s.ratio, s.kl.mean, s.kl.error, s.kl_999, s.same,
                exp(s.loss.mean - s.delta.mean), exp(s.loss.mean), 100 * (growth - 1),
                100 * growth * s.delta.error, count_right(r), all.n_keys);
    }
    fflush(csv);
}

static void write_positions(FILE *csv, const plan *p, const result *r) {
    for (int i = 0; i < all.n_windows; i++)
        for (int j = 0; j < r[i].n; j++)
            fprintf(csv, "\"%s\",%d:%d,%d,%.4e\n", p->name, all.windows[i].from, all.windows[i].length,
                    all.from + j, r[i].kl[j]);
    fflush(csv);
}

static void print_row(const plan *p, const result *r) {
    const summary s = summarize(r, all.windows, all.n_windows);
    const double growth = exp(s.delta.mean);
    char bits[16] = "-";
    if (s.bits > 0) snprintf(bits, sizeof bits, "%.2f", s.bits);
    if (all.n_rows++ == 0) /* the first row is the exact cache */
        printf("%-30s %5s %7.0f %6.2f %9s   %7s %8s %7s %8.3f\n", "exact", "32.00",
               2 * s.bytes_per_token * s.ratio, 0.5, "-", "-", "-", "-", exp(s.loss.mean - s.delta.mean));
    printf(s.kl.mean < 1e-5 ? "%-30s %5s %7.0f %6.2f %9.1e +-%8.1e %8.1e %7.2f %8.3f %+8.2f +-%7.2f"
                            : "%-30s %5s %7.0f %6.2f %9.5f +-%8.5f %8.4f %7.2f %8.3f %+8.2f +-%7.2f",
           p->name, bits, s.bytes_per_token, s.ratio, s.kl.mean, s.kl.error, s.kl_999, s.same,
           exp(s.loss.mean), 100 * (growth - 1), 100 * growth * s.delta.error);
    if (all.n_keys) printf("   %2d/%-2d", count_right(r), all.n_keys);
    printf(" ");
    for (int i = 0; all.write && i < all.n_windows; i++) printf(" %d", r[i].agreed);
    for (int i = 0; !all.write && all.n_windows > 1 && i < all.n_windows; i++)
        printf(" %.5f", estimate_of(&r[i], 1, 0).mean);
    printf("\n");
    fflush(stdout);
}

/* Runs the jobs on several threads. Prints a plan's row, in the order of the plans, as soon as its jobs are done. */
static void run_jobs(int jobs, int threads, FILE *csv, FILE *positions) {
    all.next = 0;
    all.last = jobs;
    memset(all.results, 0, (size_t)jobs * sizeof *all.results);
    if (threads > 64) threads = 64;
    pthread_t thread[64];
    for (int i = 0; i < threads; i++)
        if (pthread_create(&thread[i], NULL, worker, NULL) != 0) fail("cannot start a thread");
    for (int i = 0; !all.exact && i < all.n_plans; i++) {
        result *r = &all.results[i * all.per_plan];
        pthread_mutex_lock(&all.lock);
        for (int j = 0; j < all.per_plan; j++)
            while (!r[j].done) pthread_cond_wait(&all.finished, &all.lock);
        progress(0);
        print_row(&all.plans[i], r);
        if (csv) write_csv(csv, &all.plans[i], r);
        if (positions) write_positions(positions, &all.plans[i], r);
        pthread_mutex_unlock(&all.lock);
    }
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    progress(0);
}

/* >>options */
static void help(int status) {
    fputs(usage, stdout);
    fputs(usage_of_plans, stdout);
    plan_print_names();
    printf("Rivals:");
    for (int i = 0; i < (int)(sizeof rival_kinds / sizeof *rival_kinds); i++)
        printf(" %s", rival_kinds[i].name);
    printf("\n");
    exit(status);
}

static int option_number(const char *name, const char *value, int least) {
    int n;
    if (!plan_count(value, strlen(value), &n) || n < least)
        fail("%s %s: it must be a whole number from %d on", name, value, least);
    return n;
}

static void hold_weights(void) { /* obeys --weights and --activations */
    const int type = weights_type(all.weights ? all.weights : "f32"),
              rounded = weights_type(all.activations ? all.activations : "f32");
    void *memory;
    if (type < 0) fail("--weights %s: it must be f32, f16 or q8_0", all.weights);
    if (rounded < 0) fail("--activations %s: it must be f32, f16 or q8_0", all.activations);
    if (rounded == LLAMA_Q8_0 &&
        (all.model.dim % 32 || all.model.ffn_dim % 32 || all.model.n_heads * all.model.v_head_dim % 32))
        fail("--activations q8_0: the model's vectors are no multiples of 32");
    const char *wrong = all.weights ? weights_hold(&all.model, type, &memory) : NULL;
    if (wrong) fail("--weights %s: %s", all.weights, wrong);
    all.model.round_inputs = weights_rounding(rounded);
}

int main(int argc, char **argv) {
    const char *csv_path = NULL, *positions_path = NULL, *data = getenv("TKV_DATA");
    int n_plans = 0, rivals = -1, passkeys = 0, threads = 1, halves = 0, exact_jobs = 0;
    double work = 0;
    float theta = 0, yarn = 0;
    FILE *csv = NULL, *positions = NULL;
    all.from = -1;
    all.cache_dir = "build/quality";
    all.needle = "The pass key is #####. Remember it. ##### is the pass key.";
    all.question = "What is the pass key? The pass key is";
    int i;
    for (i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0) help(0);
        else if (strcmp(name, "--rope-halves") == 0) halves = 1;
        else if (strcmp(name, "--rivals") == 0) rivals = 1;
        else if (strcmp(name, "--no-rivals") == 0) rivals = 0;
        else if (strcmp(name, "--passkey") == 0) passkeys = 1;
        else if (strcmp(name, "--sample") == 0) all.sample = 1;
        else if (name[0] != '-' && !all.model_path) all.model_path = name;
        else if (!value || name[0] != '-') fail("%s: unknown option, or its value is missing", name);
        else if (i++, strcmp(name, "--text") == 0) all.text_path = value;
        else if (strcmp(name, "--tables-text") == 0) all.tables_path = value;
        else if (strcmp(name, "--window") == 0) add_window(value);
        else if (strcmp(name, "--from") == 0) all.from = option_number(name, value, 0);
        else if (strcmp(name, "--threads") == 0) threads = option_number(name, value, 1);
        else if (strcmp(name, "--write") == 0) all.write = option_number(name, value, 1);
        else if (strcmp(name, "--csv") == 0) csv_path = value;
        else if (strcmp(name, "--positions") == 0) positions_path = value;
        else if (strcmp(name, "--cache") == 0) all.cache_dir = value;
        else if (strcmp(name, "--weights") == 0) all.weights = value;
        else if (strcmp(name, "--activations") == 0) all.activations = value;
        else if (strcmp(name, "--needle") == 0) all.needle = value;
        else if (strcmp(name, "--question") == 0) all.question = value;
        else if (strcmp(name, "--theta") == 0) theta = (float)option_number(name, value, 2);
        else if (strcmp(name, "--yarn") == 0) yarn = (float)option_number(name, value, 1);
        else if (strcmp(name, "--plan") == 0 || strcmp(name, "--plans") == 0)
            n_plans++; /* parsed below: the check needs the model */
        else fail("%s: unknown option (quality --help)", name);
    }
    if (!all.model_path) help(1);
    char err[256];
    if (!llama_load(all.model_path, NULL, &all.model, err, sizeof err)) fail("%s: %s", all.model_path, err);
    if (all.model.note[0]) fprintf(stderr, "quality: %s\n", all.model.note);
    if (theta > 0) all.model.rope_theta = theta;
    all.model.rope_halves = halves;
    if (yarn > 0) all.model.rope_yarn = yarn;
    hold_weights();
    char text_path[1024];
    snprintf(text_path, sizeof text_path, "%s/text/wiki.test.raw", data && *data ? data : "../shared/data");
    if (!all.text_path) all.text_path = text_path;
    fill_windows(passkeys);
    for (i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--plan") == 0) add_plan(argv[++i], 0, 0);
        else if (strcmp(argv[i], "--plans") == 0) add_plans_of_file(argv[++i]);
    }
    if (!n_plans && all.windows[0].length < SHORT) {
        fprintf(stderr,
                "quality: windows of %d tokens: these plans have no warm tier, and load their tables\n",
                all.windows[0].length);
        add_plans(short_plans, sizeof short_plans / sizeof *short_plans, 0);
    } else if (!n_plans) add_plans(standard_plans, sizeof standard_plans / sizeof *standard_plans, 0);
    if (rivals < 0) rivals = !n_plans;
    if (rivals) add_plans(rival_plans, sizeof rival_plans / sizeof *rival_plans, 1);
    for (i = all.n_plans; i-- > 0;)
        if (!fill_budget(&all.plans[i]) || !learn_rotations(&all.plans[i]))
            memmove(&all.plans[i], &all.plans[i + 1], (size_t)(--all.n_plans - i) * sizeof *all.plans);
    if (!all.n_plans) fail("no plan is left");
    learn_tables();
    make_directory(all.cache_dir);
    if (positions_path) {
        positions = fopen(positions_path, "wb");
        if (!positions) fail("cannot write %s", positions_path);
        fprintf(positions, "plan,window,position,kl\n");
    }
    if (csv_path) {
        csv = fopen(csv_path, "wb");
        if (!csv) fail("cannot write %s", csv_path);
        fprintf(csv, "plan,rival,window,bits,bytes_per_token,ratio,kl,kl_error,kl_999,top1_percent,exact_ppl,"
                     "ppl,dppl_percent,dppl_error,passkey_right,passkey_asked\n");
    }
    all.per_plan = all.n_windows + all.n_keys;
    all.results = (result *)bench_alloc((size_t)((all.n_plans + 1) * all.per_plan) * sizeof *all.results);
    pthread_mutex_init(&all.lock, NULL);
    pthread_cond_init(&all.finished, NULL);

    for (i = 0; i < all.n_windows && !all.write; i++) {
        FILE *f = exact_open(&all.windows[i]);
        if (f) fclose(f);
        else exact_jobs = 1, work += work_of(0, all.windows[i].length);
    }
    for (i = 0; i < all.n_keys; i++, exact_jobs = 1) work += work_of(0, all.keys[i].n);
    all.exact = 1;
    progress_begin("exact", work);
    if (exact_jobs) run_jobs(all.per_plan, threads, NULL, NULL);
    all.exact = 0;
    keep_known_keys();
    all.per_plan = all.n_windows + all.n_keys;
    for (work = 0, i = 0; i < all.per_plan; i++)
        work += all.n_plans * work_of(0, i < all.n_windows ? all.windows[i].length : all.keys[0].n);
    for (i = 0; i < all.n_windows && all.write; i++)
        work +=
            all.n_plans * (work_of(0, all.windows[i].length) + 2 * work_of(all.windows[i].length, all.write));
    print_head();
    progress_begin("plans", work);
    run_jobs(all.n_plans * all.per_plan, threads, csv, positions);
    if (csv && fclose(csv) != 0) fail("cannot write %s", csv_path);
    if (positions && fclose(positions) != 0) fail("cannot write %s", positions_path);
    return 0;
}
