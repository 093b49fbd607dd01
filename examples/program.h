/*
 * program.h - code that the examples with a model share. It parses the options that load a model, plan its cache and
 * sample tokens, and it reads the prompt. It writes files so that no reader sees half of one, and keeps sequences in
 * such files.
 *
 *     #define PROGRAM "budget"     the name in messages
 *     #include "program.h"         before system headers: it defines _XOPEN_SOURCE (save_file.h)
 *
 * On an error the functions print one sentence on stderr and end the program. In this order: messages, options,
 * running, sampling, prompt, files, saved sequences.
 */
#ifndef PROGRAM_H
#define PROGRAM_H

#include "save_file.h" /* before system headers: it defines _XOPEN_SOURCE */
#include "map_file.h"

#include "latency.h"
#include "llama.h"
#include "plan.h"

#include <errno.h>
#include <float.h>
#include <time.h>

enum { PROGRAM_MOST = 1 << 24 }; /* most tokens; a sum of two such numbers fits into an int */

/* >>messages */
LLAMA_PRINTF(1, 2)
static inline void fail(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, PROGRAM ": ");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n");
    va_end(ap);
    exit(1);
}

static inline void *allocate(size_t n, size_t size) {
    void *p = n < SIZE_MAX / size ? malloc(n * size + 1) : NULL;
    if (!p) fail("out of memory for %.0f bytes", (double)n * (double)size);
    return p;
}

/* Returns why a call failed. */
static inline const char *cache_fault(const tkv_cache *kv, tkv_status status) {
    return *tkv_get_last_error(kv) ? tkv_get_last_error(kv) : tkv_get_status_text(status);
}

/* CPU time of a program with one thread; with -fopenmp, wall time. */
static inline double seconds(void) {
#ifdef _OPENMP
    return omp_get_wtime();
#else
    return (double)clock() / CLOCKS_PER_SEC;
#endif
}

#ifdef _OPENMP
static inline void run_by_openmp(void *user, int n_tasks, tkv_task task, void *ctx) {
    (void)user;
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < n_tasks; i++) task(ctx, i);
}
#endif

static inline const char *commas(double x) { /* writes 12,345,678; the last four results stay valid */
    static char bufs[4][40];
    static int next;
    next = (next + 1) % 4;
    char digits[32], *buf = bufs[next];
    const int n = snprintf(digits, sizeof digits, "%.0f", x);
    int to = 0;
    for (int i = 0; i < n && to < 38; i++) {
        if (i && (n - i) % 3 == 0) buf[to++] = ',';
        buf[to++] = digits[i];
    }
    buf[to] = 0;
    return buf;
}

static const char *const tier_names[TKV_TIER_COUNT] = {"hot", "warm", "archive"};
static const char tier_marks[] = "#+.";

static inline const char *pair_name(const tkv_format_pair *p, char *buf, size_t size) {
    const char *k = tkv_get_name(TKV_NAME_FORMAT, (int)p->k), *v = tkv_get_name(TKV_NAME_FORMAT, (int)p->v);
    if (strcmp(k, v) == 0) snprintf(buf, size, "%s", k);
    else snprintf(buf, size, "%s / %s", k, v);
    return buf;
}

/* >>options */
#define PROGRAM_HELP                                                                                         \
    "MODEL is a .gguf file, or a .bin of llama2.c with its tokenizer.bin in the same folder.\n"              \
    "\n"                                                                                                     \
    "  -p TEXT            prompt\n"                                                                          \
    "  -f FILE            file with the prompt\n"                                                            \
    "  -c N               length of the context (the model's)\n"                                             \
    "  -t T               temperature; 0 always takes the likeliest token (0.8)\n"                           \
    "  --top-p P          samples from the likeliest tokens with this probability together (0.95)\n"         \
    "  --seed N           seed of the random numbers (1)\n"                                                  \
    "  --raw              uses no chat template and continues after the end of the text\n"                   \
    "  -z FILE            tokenizer.bin of a llama2.c model\n"                                               \
    "  --tables FILE      loads tables that calibrate wrote\n"                                               \
    "  --theta X          base of RoPE (the model's)\n"                                                      \
    "  --yarn X           YaRN: RoPE for X times the model's context (the model's)\n"                        \
    "  --rope-halves      RoPE rotates the pairs of channels (i, i + d/2)\n"                                 \
    "  --isa NAME         instruction set: auto, scalar, avx2, avx512, neon or wasm (auto)\n"

typedef struct options {
    const char *model, *tokenizer, *prompt, *file, *tables;
    int n, context, raw, rope_halves;
    float temperature, top_p, theta, yarn;
    uint64_t seed;
} options;

/* The result of parsing an option. `value` is the next argument; NULL: there is none. */
typedef enum parsed { UNKNOWN, ALONE, WITH_VALUE, BAD_VALUE } parsed;
typedef parsed (*parse_option)(void *ctx, const char *name, const char *value);

/* Each reads a number into *out. Returns 0 if it is out of range. */
static inline int read_int(const char *text, int least, int most, int *out) {
    *out = atoi(text);
    return *out >= least && *out <= most;
}

static inline int read_float(const char *text, float least, float *out) {
    *out = (float)atof(text);
    return *out >= least;
}

static inline parsed parse_common_option(options *o, tkv_config *cfg, const char *name, const char *value) {
    int ok = 1;
    if (strcmp(name, "--raw") == 0) {
        o->raw = 1;
        return ALONE;
    }
    if (strcmp(name, "--rope-halves") == 0) {
        o->rope_halves = 1;
        return ALONE;
    }
    if (!value) return UNKNOWN;
    if (strcmp(name, "-p") == 0) o->prompt = value;
    else if (strcmp(name, "-f") == 0) o->file = value;
    else if (strcmp(name, "-z") == 0) o->tokenizer = value;
    else if (strcmp(name, "--tables") == 0) o->tables = value;
    else if (strcmp(name, "-n") == 0) ok = read_int(value, 1, PROGRAM_MOST, &o->n);
    else if (strcmp(name, "-c") == 0) ok = read_int(value, 2, PROGRAM_MOST, &o->context);
    else if (strcmp(name, "-t") == 0) ok = read_float(value, 0, &o->temperature);
    else if (strcmp(name, "--top-p") == 0) ok = read_float(value, FLT_MIN, &o->top_p);
    else if (strcmp(name, "--theta") == 0) ok = read_float(value, FLT_MIN, &o->theta);
    else if (strcmp(name, "--yarn") == 0) ok = read_float(value, 1, &o->yarn);
    else if (strcmp(name, "--seed") == 0) o->seed = strtoull(value, NULL, 10);
    else if (strncmp(name, "--", 2) == 0 && plan_knows(name + 2)) {
        const char *wrong = plan_word(cfg, name + 2, value);
        if (wrong) fail("%s %s: %s (" PROGRAM " --help)", name, value, wrong);
    } else if (strcmp(name, "--isa") == 0) {
        int isa = TKV_ISA_AUTO;
        ok = tkv_find_name(TKV_NAME_ISA, value, &isa) == TKV_OK;
        cfg->host.isa = (tkv_isa)isa;
    } else return UNKNOWN;
    return ok ? WITH_VALUE : BAD_VALUE;
}

/* Prints the usage, whose last line introduces the options of the plan, and ends the program. */
static inline void help(const char *usage, int status) {
    fputs(usage, stdout);
    fputs(PLAN_HELP, stdout);
    plan_print_names();
    exit(status);
}

/* Parses the command line. `own` parses the program's own options; it comes before parse_common_option. */
static inline void parse_options(int argc, char **argv, const char *usage, options *o, tkv_config *cfg,
                                 parse_option own, void *ctx) {
    o->temperature = 0.8f;
    o->top_p = 0.95f;
    o->seed = 1;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0) help(usage, 0);
        if (name[0] != '-' && o->model) fail("%s: there is already a model; write -p before a prompt", name);
        if (name[0] != '-') {
            o->model = name;
            continue;
        }
        parsed t = own(ctx, name, value);
        if (t == UNKNOWN) t = parse_common_option(o, cfg, name, value);
        if (t == UNKNOWN)
            fail("%s: unknown option%s (" PROGRAM " --help)", name, value ? "" : ", or its value is missing");
        if (t == BAD_VALUE) fail("%s %s: bad value for this option (" PROGRAM " --help)", name, value);
        i += t == WITH_VALUE;
    }
}

/* >>running */
/* Updates a progress line in place, beginning half a second after the start. */
static inline void show_bar(const char *what, int done, int of, double start) {
    static int shown;
    const double t = seconds() - start;
    char bar[33] = "................................";
    memset(bar, '#', (size_t)(32.0 * done / of));
    if (done < of && t > 0.5)
        shown = fprintf(stderr, "\r%s [%s] %d / %d, %.0f/s ", what, bar, done, of, done / t);
    if (done == of && shown) fprintf(stderr, "\r%78s\r", ""), shown = 0;
    fflush(stderr);
}

/* Loads the model and sets cfg.model. */
static inline void load(const options *o, llama_model *m, tkv_config *cfg) {
    char err[256];
    if (!llama_load(o->model, o->tokenizer, m, err, sizeof err)) fail("%s: %s", o->model, err);
    if (m->note[0]) fprintf(stderr, PROGRAM ": %s\n", m->note);
    if (o->theta > 0) m->rope_theta = o->theta;
    m->rope_halves = o->rope_halves;
    if (o->yarn > 0) m->rope_yarn = o->yarn;
    llama_kv_config(m, cfg);
#ifdef _OPENMP
    cfg->host.parallel_for = run_by_openmp;
#endif
    if (plan_too_far(cfg)) fail("%s", plan_too_far(cfg));
}

static inline tkv_isa program_isa_of(const tkv_cache *kv) {
    tkv_build_info build;
    return tkv_get_build(kv, &build) == TKV_OK ? build.isa : TKV_ISA_AUTO;
}

static inline tkv_cache *create(const tkv_config *cfg) {
    tkv_cache *kv = NULL;
    char reason[512];
    tkv_status status = tkv_validate_config(cfg, reason, sizeof reason);
    if (status != TKV_OK) fail("%s", reason);
    status = tkv_create(cfg, &kv);
    if (status != TKV_OK) fail("%s", tkv_get_status_text(status));
    return kv;
}

/* Loads the tables of --tables, which calibrate wrote, into an empty cache. */
static inline void load_tables(const options *o, tkv_cache *kv) {
    size_t size = 0;
    char *bytes;
    if (!o->tables) return;
    bytes = (char *)llama_read_file(o->tables, &size);
    if (!bytes) fail("cannot read %s", o->tables);
    if (tkv_load_calibration(kv, bytes, size) != TKV_OK) fail("%s: %s", o->tables, tkv_get_last_error(kv));
    free(bytes);
}

static inline int context_of(const options *o, const llama_model *m) {
    const int context = o->context ? o->context : llama_context(m);
    return context < PROGRAM_MOST ? context : PROGRAM_MOST;
}

/* >>sampling */
typedef struct choice { /* a candidate for the next token */
    float p;
    int token;
} choice;

static inline int by_p(const void *a, const void *b) {
    const float x = ((const choice *)a)->p, y = ((const choice *)b)->p;
    return (x < y) - (x > y);
}

/* Samples a token with top-p sampling: from the likeliest tokens that together have probability top_p. `space`
 * holds n choices. */
static inline int sample(const float *logits, int n, const options *o, uint64_t *rng, choice *space) {
    const int best = llama_argmax(logits, n);
    double sum = 0;
    int m = 0;
    if (o->temperature <= 0) return best;
    int i;
    for (i = 0; i < n; i++) sum += (double)expf((logits[i] - logits[best]) / o->temperature);
    float least = o->top_p < 1 ? (1 - o->top_p) / (float)n : 0; /* tokens below this are never among them */
    for (i = 0; i < n; i++) {
        const float p = expf((logits[i] - logits[best]) / o->temperature) / (float)sum;
        if (p < least) continue;
        space[m].p = p;
        space[m++].token = i;
    }
    qsort(space, (size_t)m, sizeof *space, by_p);
    for (i = 0, sum = 0; i < m && sum < (double)o->top_p;) sum += (double)space[i++].p;
    m = i;
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    *rng ^= *rng << 17; /* xorshift64, Marsaglia 2003 */
    double left = (double)(*rng >> 11) / 9007199254740992.0 * sum;
    for (i = 0; i + 1 < m && left >= (double)space[i].p; i++) left -= (double)space[i].p;
    return m > 0 ? space[i].token : best;
}

static inline uint64_t rng_seed(const options *o) {
    return o->seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
}

/* >>prompt */
/* Whether the model talks by its chat template. Without --raw, a template that the runner does not know ends the program. */
static inline int is_chat(const llama_model *m, const options *o) {
    if (!o->raw && m->chat_fault[0]) fail("%s; --raw continues the text without a template", m->chat_fault);
    return m->chat && !o->raw;
}

/* Reads the prompt, tokenizes it into *tokens and returns the number of tokens. The caller frees the array, which has
 * space for `more` further tokens. If the prompt has more than `most` tokens, its middle is left out. show: prints
 * the end of the prompt. */
static inline int read_prompt(const llama_model *m, const options *o, int most, int more, int show,
                              int **tokens) {
    static const char default_text[] = "Once upon a time";
    static const char default_question[] =
        "Tell me a story about a lighthouse keeper who finds a message in a bottle.";
    const int chat = is_chat(m, o), tail = most < 64 ? most / 2 : 32;
    const char *prompt = o->prompt ? o->prompt : chat ? default_question : default_text;
    size_t size = strlen(prompt), shown;
    char *file = NULL;
    if (o->file) {
        file = (char *)llama_read_file(o->file, &size);
        if (!file) fail("cannot read %s", o->file);
        if (size > 1 << 30) fail("%s is longer than any context", o->file);
        prompt = file;
    }
    int *out = (int *)allocate(size + LLAMA_TURN + (size_t)more, sizeof *out);
    int n = chat ? llama_tokenize_turn(m, prompt, size, 1, out)
                 : llama_tokenize(m, prompt, size, m->add_bos ? LLAMA_BOS : 0, out);
    if (n == 0 && m->bos >= 0) out[n++] = m->bos;
    if (n == 0) fail("the prompt is empty; give one with -p or -f");
    if (n > most) {
        fprintf(stderr, PROGRAM ": the prompt has %d tokens, and %d fit (-c, -n); its middle is left out\n",
                n, most);
        memmove(out + most - tail, out + n - tail, (size_t)tail * sizeof *out);
        n = most;
    }
    if (show) {
        shown = size > 400 ? size - 400 : 0;
        const char *line = shown ? (const char *)memchr(prompt + shown, '\n', 100) : NULL;
        if (line) shown = (size_t)(line + 1 - prompt);
        while (shown > 0 && shown < size && (prompt[shown] & 0xc0) == 0x80) shown++;
        if (shown) printf("[a prompt of %s tokens; it ends:]\n", commas(n));
        printf("%s%.*s%s", chat ? "> " : "", (int)(size - shown), prompt + shown, chat ? "\n\n" : "");
        if (shown && !chat) printf("%s[the model continues:]\n", prompt[size - 1] == '\n' ? "" : "\n");
        fflush(stdout);
    }
    *tokens = out;
    free(file);
    return n;
}

/* >>files */
static inline save_file begin_file(const char *path) {
    save_file f;
    if (save_file_begin(&f, path) != 0) fail("cannot write %s: %s", path, strerror(errno));
    return f;
}

static inline void end_file(save_file *f) {
    if (save_file_end(f) != 0) fail("cannot write %s: %s", f->path, strerror(errno));
}

/* Writes the report of a cache and the histograms of `l` as Prometheus text. */
static inline void write_metrics(const char *path, const tkv_cache *kv, const latency *l) {
    size_t size = 0;
    if (tkv_print_report(kv, TKV_REPORT_PROMETHEUS, NULL, NULL, 0, &size) != TKV_OK) fail("no report");
    char *text = (char *)allocate(size, 1);
    if (tkv_print_report(kv, TKV_REPORT_PROMETHEUS, NULL, text, size, NULL) != TKV_OK) fail("no report");
    save_file f = begin_file(path);
    fputs(text, f.out);
    latency_write_histograms(l, f.out);
    end_file(&f);
    free(text);
}

/* >>saved sequences */
/* A sequence in a file, with numbers of the program's: its tokens, and what else it needs. */
typedef struct saved {
    const char *path, *model; /* model: of name_model */
    int seq;
    int *numbers, n_numbers;
    int n_tokens;   /* tokens of the sequence */
    size_t bytes;   /* bytes of the file */
    double seconds; /* that saving or loading took, by the wall clock */
    void *scratch;  /* NULL, or memory for a cache in place, which has none to spare */
    size_t scratch_bytes;
    int attach;     /* 1: blocks stay in the file, which is mapped until the cache does not need it */
    int n_attached; /* blocks that do */
} saved;

enum { MODEL_NAME = 17 };

/* Writes the model's checksum into name[MODEL_NAME]. A saved sequence belongs to a model of this name. */
static inline void name_model(const llama_model *m, char *name) {
    const uint64_t sum = llama_checksum(m);
    snprintf(name, MODEL_NAME, "%08x%08x", (unsigned)(sum >> 32), (unsigned)(sum & 0xffffffffu));
}

static inline saved saved_at(const char *path, const char *model, int seq) {
    saved s;
    memset(&s, 0, sizeof s);
    s.path = path;
    s.model = model;
    s.seq = seq;
    return s;
}

/* Saves a sequence and s->numbers. After TKV_ERR_IO errno says why. */
static inline tkv_status save_sequence(tkv_cache *kv, saved *s) {
    const double start = latency_now();
    tkv_save_params p;
    memset(&p, 0, sizeof p);
    p.seq = s->seq;
    p.model = s->model;
    p.model_bytes = strlen(s->model);
    p.tokens = s->numbers;
    p.n_tokens = s->n_numbers;
    p.scratch = s->scratch;
    p.scratch_bytes = s->scratch_bytes;
    const tkv_status status = save_file_sequence(kv, &p, s->path, &s->bytes);
    s->n_tokens = tkv_get_length(kv, s->seq, TKV_ALL_LAYERS);
    s->seconds = latency_now() - start;
    return status;
}

/* Loads a sequence, or attaches it. s->numbers is allocated; the caller frees it. After TKV_ERR_IO errno says why. */
static inline tkv_status load_sequence(tkv_cache *kv, saved *s) {
    const double start = latency_now();
    tkv_load_info info;
    tkv_load_params p;
    memset(&info, 0, sizeof info);
    memset(&p, 0, sizeof p);
    errno = 0;
    map_file *mapped = s->attach ? map_file_open(s->path) : NULL;
    void *copy = s->attach ? NULL : llama_read_file(s->path, &s->bytes);
    const void *bytes = mapped ? mapped->bytes : copy;
    if (!bytes && errno == 0) errno = EIO;
    if (!bytes) return TKV_ERR_IO;
    if (mapped) s->bytes = mapped->size;
    s->numbers = (int *)allocate(s->bytes / 4 + 1, sizeof *s->numbers); /* the file has at most so many */
    p.seq = s->seq;
    p.model = s->model;
    p.model_bytes = strlen(s->model);
    p.tokens = s->numbers;
    p.token_capacity = s->bytes / 4 < PROGRAM_MOST ? (int)(s->bytes / 4) : PROGRAM_MOST;
    p.scratch = s->scratch;
    p.scratch_bytes = s->scratch_bytes;
    p.attach = s->attach;
    p.release = mapped ? map_file_release : NULL;
    p.release_user = mapped;
    const tkv_status status = tkv_seq_load(kv, &p, bytes, s->bytes, &info);
    s->n_tokens = info.n_tokens;
    s->n_numbers = info.n_saved_tokens;
    s->n_attached = info.n_attached;
    free(copy);
    if (status) map_file_close(mapped);
    s->seconds = latency_now() - start;
    return status;
}

/* Returns why a sequence was not saved or loaded. */
static inline const char *saved_fault(const tkv_cache *kv, tkv_status status) {
    return status == TKV_ERR_IO && errno ? strerror(errno) : cache_fault(kv, status);
}

static inline int are_tokens(const llama_model *m, const int *numbers, int n) {
    for (int i = 0; i < n; i++)
        if (numbers[i] < 0 || numbers[i] >= m->vocab) return 0;
    return 1;
}

#endif /* PROGRAM_H */
