/*
 * tasks.h - the parts of bench/tasks: a file of questions, contexts that hide numbers, and answers from a cache.
 *
 * A context is read once, as sequence 0. Each question is read by a fork of it (tkv_seq_fork), which is then reset. So
 * a question costs its own tokens only, and sees the context as if it were the first question.
 *
 * Include examples/llama.h and examples/plan.h first. No function prints or exits. Errors are sentences.
 */
#ifndef TKV_TASKS_H
#define TKV_TASKS_H

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TASK_MAX_OPTIONS = 8,
    TASK_MAX_LINE = 500, /* bytes of a line of a file, of a needle and of a question */
    TASK_MAX_PIECE = 64, /* tokens of an option */
    TASK_MAX_DEPTHS = 32,
    TASK_ANSWER = 8 /* most tokens of an answer with five digits */
};

LLAMA_PRINTF(3, 4)
static int task_fail(char *err, size_t size, const char *fmt, ...) { /* returns 0 */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, size, fmt, ap);
    va_end(ap);
    return 0;
}

/* >>shares */
typedef struct task_interval {
    double low, high; /* shares from 0 to 1 */
} task_interval;

/* The 95 % interval of a share of n cases (Wilson 1927). All shares are possible if n is 0. */
static inline task_interval task_wilson(int right, int n) {
    const double z = 1.959963985, p = n ? (double)right / n : 0.5, zz = n ? z * z / n : 0;
    const double middle = (p + zz / 2) / (1 + zz);
    const double half = n ? z * sqrt(p * (1 - p) / n + zz / (4 * n)) / (1 + zz) : 0.5;
    task_interval i;
    i.low = middle - half < 0 || right == 0 ? 0 : middle - half;
    i.high = middle + half > 1 || right == n ? 1 : middle + half;
    return i;
}

/* A passkey counts only where the exact cache answers right. */
typedef struct task_count {
    int asked, exact, right; /* all questions; right answers of the exact cache; of the plan, among these */
} task_count;

static inline void task_add(task_count *c, int exact_right, int right) {
    c->asked++;
    c->exact += exact_right != 0;
    c->right += exact_right && right;
}

/* >>questions. A file has blocks of lines, with an empty line between them:
 *
 *     # a comment
 *     question: What do bees make?       or  begin: Bees make       a sentence that the right option ends
 *     option: milk
 *     option: honey
 *     answer: 2                          the number of the right option, from 1
 */
typedef struct task_question {
    const char *text, *options[TASK_MAX_OPTIONS];
    int n_options, answer; /* answer: an index from 0 */
    int begins;            /* 1: the text is the beginning of a sentence */
} task_question;

typedef struct task_set {
    task_question *questions;
    int n;
    char *bytes; /* the file; questions point into it */
} task_set;

static inline void task_free_set(task_set *s) {
    free(s->questions);
    free(s->bytes);
    memset(s, 0, sizeof *s);
}

/* Returns the value of a line `key: value`, or NULL if the line has another key. */
static inline char *task_value(char *line, const char *key) {
    const size_t n = strlen(key);
    if (strncmp(line, key, n) != 0 || line[n] != ':') return NULL;
    return line + n + 1 + strspn(line + n + 1, " \t");
}

/* Ends a block. Returns NULL, or what is wrong. */
static inline const char *task_end_block(task_question *q) {
    if (!q->text) return NULL;
    if (q->n_options < 2) return "the question above has less than two options";
    if (q->answer < 0) return "the question above has no line \"answer: N\"";
    return NULL;
}

/* Reads a line into a question. Returns NULL, or what is wrong. */
static inline const char *task_parse_line(char *line, task_question *q) {
    char *question = task_value(line, "question"), *begin = task_value(line, "begin"), *value;
    if (question || begin) {
        if (q->text) return "an empty line must stand before the next question";
        q->text = question ? question : begin;
        q->begins = begin != NULL;
        return *q->text ? NULL : "the question is empty";
    }
    if (!q->text) return "a block must begin with \"question: TEXT\" or \"begin: TEXT\"";
    if (q->answer >= 0) return "the answer must be the last line of its block";
    value = task_value(line, "option");
    if (value) {
        if (q->n_options == TASK_MAX_OPTIONS) return "a question has at most 8 options";
        if (*value == 0) return "the option is empty";
        q->options[q->n_options++] = value;
        return NULL;
    }
    value = task_value(line, "answer");
    if (!value) return "a line must begin with \"question:\", \"begin:\", \"option:\", \"answer:\" or #";
    if (!plan_count(value, strlen(value), &q->answer) || q->answer < 1 || q->answer > q->n_options) {
        q->answer = -1;
        return "the answer must be the number of an option above it, from 1";
    }
    q->answer--;
    return NULL;
}

static inline void task_begin_question(task_question *q) {
    memset(q, 0, sizeof *q);
    q->answer = -1;
}

/* Parses a file of `size` bytes. Returns 1; or 0 with a sentence in err, which names the line. */
static inline int task_parse(const char *text, size_t size, task_set *s, char *err, size_t err_size) {
    const char *wrong = NULL;
    size_t lines = 1, length;
    int n_line = 0;
    memset(s, 0, sizeof *s);
    for (size_t i = 0; i < size; i++) lines += text[i] == '\n';
    if (size && memchr(text, 0, size))
        return task_fail(err, err_size, "the file has a zero byte; it must be plain text");
    if (lines > 1 << 20) return task_fail(err, err_size, "the file has more than a million lines");
    s->bytes = (char *)malloc(size + 1);
    s->questions = (task_question *)malloc((lines / 3 + 2) * sizeof *s->questions);
    if (!s->bytes || !s->questions) {
        task_free_set(s);
        return task_fail(err, err_size, "out of memory");
    }
    memcpy(s->bytes, text, size);
    s->bytes[size] = 0;
    task_begin_question(s->questions);
    for (char *line = s->bytes, *next; !wrong && line; line = next) {
        task_question *q = &s->questions[s->n];
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        n_line++;
        length = strlen(line);
        while (length && strchr(" \t\r", line[length - 1])) line[--length] = 0;
        if (length > TASK_MAX_LINE) wrong = "the line is longer than 500 bytes";
        else if (length && *line != '#') wrong = task_parse_line(line, q);
        if (!wrong && (length == 0 || !next)) wrong = task_end_block(q);
        if (!wrong && (length == 0 || !next) && q->text) task_begin_question(&s->questions[++s->n]);
    }
    if (!wrong && s->n == 0) wrong = "the file has no question";
    if (!wrong) return 1;
    task_free_set(s);
    return task_fail(err, err_size, "line %d: %s", n_line, wrong);
}

/* Writes the prompt of a question, or with its answer a solved example. Returns the number of bytes. */
static inline int task_prompt(const task_question *q, int solved, char *out, size_t size) {
    return snprintf(out, size, "%s%s%s%s%s%s", q->begins ? "" : "Question: ", q->text,
                    q->begins ? "" : "\nAnswer:", solved ? " " : "", solved ? q->options[q->answer] : "",
                    solved ? "\n\n" : "");
}

/* Returns the index of the highest score; with `norm`, of the highest score per byte of the option. */
static inline int task_choose(const task_question *q, const double *scores, int norm) {
    int best = 0;
    double most = 0;
    for (int i = 0; i < q->n_options; i++) {
        const double x = norm ? scores[i] / (double)strlen(q->options[i]) : scores[i];
        if (i == 0 || x > most) most = x, best = i;
    }
    return best;
}

/* Tokenizes the solved examples of a context: at most n_shots questions with i % folds != fold, in their order.
 * Returns the tokens, which the caller frees; NULL: out of memory. */
static inline int *task_tokenize_shots(const llama_model *m, const task_set *s, int fold, int folds,
                                       int n_shots, int *n) {
    const size_t most = 2 * TASK_MAX_LINE + 32;
    int shots = 0, *tokens = (int *)malloc(((size_t)s->n + 1) * most * sizeof *tokens);
    *n = tokens ? llama_tokenize(m, "\n\n", 2, 0, tokens) : 0;
    for (int i = 0; tokens && i < s->n && shots < n_shots; i++) {
        char text[2 * TASK_MAX_LINE + 30];
        if (i % folds == fold) continue;
        const int size = task_prompt(&s->questions[i], 1, text, sizeof text);
        *n += llama_tokenize(m, text, (size_t)size, 0, tokens + *n);
        shots++;
    }
    return tokens;
}

/* Makes the context of a fold: filler from text[n_text], then solved examples; `length` tokens in all. A text of 0
 * tokens gives examples alone. Returns the tokens, which the caller frees; NULL: a sentence stands in err. */
static inline int *task_make_shots(const llama_model *m, const task_set *s, int fold, int folds, int n_shots,
                                   const int *text, int n_text, int length, int *n, char *err,
                                   size_t err_size) {
    const int bos = m->add_bos && m->bos >= 0;
    int n_tokens, *shots = task_tokenize_shots(m, s, fold, folds, n_shots, &n_tokens);
    int filler = n_text ? length - n_tokens - bos : 0;
    int *tokens =
        shots && filler >= 0 ? (int *)malloc((size_t)(filler + n_tokens + 1) * sizeof *tokens) : NULL;
    if (!shots) (void)task_fail(err, err_size, "out of memory");
    else if (filler < 0)
        (void)task_fail(err, err_size,
                        "the examples have %d tokens, more than the context of %d; ask for less", n_tokens,
                        length);
    else if (!tokens) (void)task_fail(err, err_size, "out of memory");
    else if (filler > n_text) {
        (void)task_fail(err, err_size, "the text has %d tokens; %d tokens of it are needed", n_text, filler);
        free(tokens);
        tokens = NULL;
    }
    *n = bos + filler + n_tokens;
    if (tokens) {
        if (bos) tokens[0] = m->bos;
        memcpy(tokens + bos, text, (size_t)filler * sizeof *tokens);
        memcpy(tokens + bos + filler, shots, (size_t)n_tokens * sizeof *tokens);
    }
    free(shots);
    return tokens;
}

/* >>passkeys */
/* Names of the demo model's training (tools/train_demo.py). Other models know them as names too. */
static const char *const task_names[] = {
    "Anna",     "Pierre",   "Helene",   "Andrew",     "Natasha",   "Nicholas",  "Sonya",    "Boris",
    "Vera",     "Julie",    "Marya",    "Kutuzov",    "Bagration", "Denisov",   "Dolokhov", "Anatole",
    "Rostov",   "Platon",   "Barclay",  "Tushin",     "Hamlet",    "Ophelia",   "Romeo",    "Juliet",
    "Macbeth",  "Othello",  "Lear",     "Cordelia",   "Prospero",  "Miranda",   "Ariel",    "Brutus",
    "Cassius",  "Portia",   "Shylock",  "Antonio",    "Orlando",   "Rosalind",  "Viola",    "Benedick",
    "Beatrice", "Hero",     "Falstaff", "Richard",    "Edward",    "Henry",     "Clarence", "Gloucester",
    "Warwick",  "Margaret", "Volumnia", "Petruchio",  "Katharina", "Lucentio",  "Bianca",   "Perdita",
    "Angelo",   "Isabella", "Claudio",  "Coriolanus", "Lucio",     "Bolkonski", "Menenius", "Leontes"};
enum { TASK_NAMES = sizeof task_names / sizeof *task_names };

typedef struct task_hiding { /* how contexts are made */
    int depths[TASK_MAX_DEPTHS], n_depths, per_depth;
    int length;                    /* tokens of a context, with the longest question and its answer */
    const char *needle, *question; /* lines with ##### for the digits and <name> for the name */
} task_hiding;

typedef struct task_key {
    int depth;    /* index in depths */
    double share; /* of the filler before it */
    char digits[8];
    const char *name;
} task_key;

typedef struct task_context {
    int *tokens, n;
    task_key keys[TASK_NAMES]; /* in their order in the text */
    int n_keys;
} task_context;

static inline uint64_t task_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Writes a line with the key's digits and name in their places. Returns its length; 0: it is too long. */
static inline int task_fill(const char *line, const task_key *key, char *out, size_t size) {
    size_t n = 0;
    while (*line) {
        const int digits = strncmp(line, "#####", 5) == 0, name = strncmp(line, "<name>", 6) == 0;
        const char *from = digits ? key->digits : name ? key->name : line;
        const size_t length = digits || name ? strlen(from) : 1;
        if (n + length >= size) return 0;
        memcpy(out + n, from, length);
        n += length;
        line += digits ? 5 : name ? 6 : 1;
    }
    out[n] = 0;
    return (int)n;
}

/* Tokenizes a line with a line feed before it, and one behind a needle. Returns the number of tokens; 0: too long. */
static inline int task_tokenize(const llama_model *m, const char *line, const task_key *key, const char *end,
                                int *tokens) {
    char text[TASK_MAX_LINE + 4] = "\n";
    const int n = task_fill(line, key, text + 1, TASK_MAX_LINE);
    if (n == 0) return 0;
    strcat(text, end);
    return llama_tokenize(m, text, strlen(text), 0, tokens);
}

/* Checks depths and lines. Returns NULL, or what is wrong. */
static inline const char *task_check_keys(const task_hiding *p) {
    if (!strstr(p->needle, "#####")) return "the needle must have ##### in the place of the number";
    if (strstr(p->question, "#####")) return "the question must not have the number";
    if (strlen(p->needle) > TASK_MAX_LINE - 40 || strlen(p->question) > TASK_MAX_LINE - 40)
        return "the needle and the question may have at most 460 bytes";
    if (p->n_depths < 1 || p->per_depth < 1) return "there must be at least one needle";
    if (p->n_depths * p->per_depth > TASK_NAMES) return "a context holds at most 64 needles";
    if (p->n_depths * p->per_depth > 1 && (!strstr(p->needle, "<name>") || !strstr(p->question, "<name>")))
        return "with several needles in a context, needle and question must have <name>";
    for (int i = 0; i < p->n_depths; i++)
        if (p->depths[i] < 0 || p->depths[i] > 100) return "a depth must be from 0 to 100 percent";
    return NULL;
}

static inline int task_compare_keys(const void *a, const void *b) {
    const double x = ((const task_key *)a)->share, y = ((const task_key *)b)->share;
    return x < y ? -1 : x > y;
}

/* Chooses names, digits and places. Needles of one depth lie within 2.5 % of it. */
static inline void task_draw_keys(const task_hiding *p, int index, task_context *c) {
    uint64_t seed = (uint64_t)index + 1;
    int names[TASK_NAMES];
    c->n_keys = 0;
    for (int i = 0; i < TASK_NAMES; i++) {
        const int j = (int)(task_random(&seed) % (uint64_t)(i + 1));
        names[i] = names[j];
        names[j] = i;
    }
    for (int d = 0; d < p->n_depths; d++)
        for (int i = 0; i < p->per_depth; i++) {
            task_key *key = &c->keys[c->n_keys];
            const double share = (p->depths[d] + 5.0 * ((i + 0.5) / p->per_depth - 0.5)) / 100;
            key->depth = d;
            key->share = share < 0 ? 0 : share > 1 ? 1 : share;
            key->name = task_names[names[c->n_keys++]];
            snprintf(key->digits, sizeof key->digits, "%05d", (int)(10000 + task_random(&seed) % 90000));
        }
    qsort(c->keys, (size_t)c->n_keys, sizeof *c->keys, task_compare_keys);
}

/* Makes context `index`: filler from text[n_text], which begins at another token for each index, with the needles in
 * it. The caller frees c->tokens. Returns 1; or 0 with a sentence in err. */
static inline int task_make_context(const llama_model *m, const task_hiding *p, int index, const int *text,
                                    int n_text, task_context *c, char *err, size_t err_size) {
    int line[TASK_MAX_LINE + 8], needles = 0, question = 0;
    const int bos = m->add_bos && m->bos >= 0;
    memset(c, 0, sizeof *c);
    task_draw_keys(p, index, c);
    for (int i = 0; i < c->n_keys; i++) {
        const int n = task_tokenize(m, p->question, &c->keys[i], "", line);
        if (n > question) question = n;
        needles += task_tokenize(m, p->needle, &c->keys[i], "\n", line);
    }
    c->n = p->length - question - TASK_ANSWER;
    const int filler = c->n - bos - needles;
    if (filler < 16)
        return task_fail(err, err_size, "%d tokens have no room for %d needles", p->length, c->n_keys);
    if (filler > n_text)
        return task_fail(err, err_size, "the text has %d tokens; %d tokens of it are needed", n_text, filler);
    c->tokens = (int *)malloc((size_t)c->n * sizeof *c->tokens);
    if (!c->tokens) return task_fail(err, err_size, "out of memory");
    text += (int)((int64_t)index * p->length % (n_text - filler + 1));
    int at = 0, read = 0;
    if (bos) c->tokens[at++] = m->bos;
    for (int i = 0; i <= c->n_keys; i++) {
        const int to = i < c->n_keys ? (int)(c->keys[i].share * filler) : filler;
        memcpy(c->tokens + at, text + read, (size_t)(to - read) * sizeof *text);
        at += to - read;
        read = to;
        if (i == c->n_keys) break;
        const int n = task_tokenize(m, p->needle, &c->keys[i], "\n", line);
        memcpy(c->tokens + at, line, (size_t)n * sizeof *line);
        at += n;
    }
    return 1;
}

/* >>a cache with a context */
enum { TASK_CONTEXT, TASK_FORK, TASK_OPTION, TASK_SEQS }; /* sequences */

typedef struct task_cache {
    const llama_model *model;
    tkv_config cfg;
    tkv_cache *kv;
    float *logits;                         /* [TASK_MAX_PIECE][vocab] */
    void (*progress)(int position, int n); /* called after n tokens were read; NULL: nothing is */
} task_cache;

static inline void task_close(task_cache *c) {
    tkv_destroy(c->kv);
    free(c->logits);
    memset(c, 0, sizeof *c);
}

/* Creates a cache whose layers demote at the same token, as in bench/quality. Close it, also after an error. */
static inline tkv_status task_open(task_cache *c, const llama_model *m, const tkv_config *plan) {
    const size_t n_layers = (size_t)m->n_layers;
    tkv_layer_config *layers = (tkv_layer_config *)calloc(n_layers, sizeof *layers);
    memset(c, 0, sizeof *c);
    c->model = m;
    c->cfg = *plan;
    c->cfg.limits.max_seqs = TASK_SEQS;
    c->logits = (float *)malloc((size_t)TASK_MAX_PIECE * (size_t)m->vocab * sizeof *c->logits);
    tkv_status status = layers && c->logits ? TKV_OK : TKV_ERR_NOMEM;
    if (status == TKV_OK) {
        if (plan->layers) memcpy(layers, plan->layers, n_layers * sizeof *layers);
        measure_align_layers(&c->cfg, layers);
        c->cfg.layers = layers;
        status = tkv_create(&c->cfg, &c->kv);
        c->cfg.layers = NULL;
    }
    free(layers);
    return status;
}

/* Reads tokens behind those of a sequence. Then c->logits has those of the last token. */
static inline tkv_status task_read(task_cache *c, int seq, const int *tokens, int n) {
    tkv_status status = TKV_OK;
    for (int at = 0, step; at < n && status == TKV_OK; at += step) {
        const int left = n - at < TKV_BLOCK_TOKENS ? n - at : TKV_BLOCK_TOKENS;
        const int position = tkv_get_length(c->kv, seq, 0);
        step = measure_chunk(&c->cfg, position, left);
        status = llama_forward(c->model, c->kv, seq, tokens + at, step, c->logits, at + step == n);
        if (c->progress) c->progress(position, step);
    }
    return status;
}

/* Ends learning, so that no answer depends on the questions before it. A short context may have no table to keep. */
static inline tkv_status task_finish_context(task_cache *c) {
    const tkv_status status = tkv_freeze_calibration(c->kv);
    return status == TKV_ERR_STATE ? TKV_OK : status;
}

/* Asks for a key. Sets *right to 1 if the likeliest tokens are its digits. */
static inline tkv_status task_ask(task_cache *c, const char *question, const task_key *key, int *right) {
    int tokens[TASK_MAX_LINE + 8], len;
    const int n = task_tokenize(c->model, question, key, "", tokens);
    char answer[64];
    size_t size = 0;
    *right = 0;
    if (n == 0) return TKV_ERR_ARG;
    tkv_status status = tkv_seq_fork(c->kv, TASK_CONTEXT, TASK_FORK, TKV_UNLIMITED);
    if (status == TKV_OK) status = task_read(c, TASK_FORK, tokens, n);
    for (int i = 0, before = tokens[n - 1], token; i < TASK_ANSWER && size < 5 && status == TKV_OK; i++) {
        token = llama_argmax(c->logits, c->model->vocab);
        const char *piece = llama_piece(c->model, before, token, &len);
        for (int j = 0; j < len && size < sizeof answer - 1; j++)
            if (size || piece[j] != ' ') answer[size++] = piece[j]; /* skips a space before the digits */
        before = token;
        if (size < 5) status = task_read(c, TASK_FORK, &token, 1);
    }
    answer[size] = 0;
    *right = strncmp(answer, key->digits, 5) == 0;
    (void)tkv_seq_reset(c->kv, TASK_FORK);
    return status;
}

/* Returns the tokens of an option behind a prompt. The space before it belongs to it. */
static inline int task_tokenize_option(const llama_model *m, const char *option, int *tokens) {
    char text[TASK_MAX_LINE + 2];
    const int own_space = m->bpe || !m->add_space; /* SentencePiece adds one by itself */
    snprintf(text, sizeof text, "%s%s", own_space ? " " : "", option);
    return llama_tokenize(m, text, strlen(text), 0, tokens);
}

/* Scores the options of a question: scores[i] is the log likelihood of option i behind the prompt, in nats. */
static inline tkv_status task_score(task_cache *c, const task_question *q, double *scores) {
    const int vocab = c->model->vocab;
    int tokens[2 * TASK_MAX_LINE];
    char prompt[2 * TASK_MAX_LINE];
    const int size = task_prompt(q, 0, prompt, sizeof prompt);
    const int n = llama_tokenize(c->model, prompt, (size_t)size, 0, tokens);
    float *first = (float *)malloc((size_t)vocab * sizeof *first); /* logits behind the prompt */
    tkv_status status = first ? tkv_seq_fork(c->kv, TASK_CONTEXT, TASK_FORK, TKV_UNLIMITED) : TKV_ERR_NOMEM;
    if (status == TKV_OK) status = task_read(c, TASK_FORK, tokens, n);
    if (status == TKV_OK) memcpy(first, c->logits, (size_t)vocab * sizeof *first);
    for (int i = 0; i < q->n_options && status == TKV_OK; i++) {
        const int length = task_tokenize_option(c->model, q->options[i], tokens);
        if (length > TASK_MAX_PIECE) status = TKV_ERR_CAPACITY;
        if (length > 1 && status == TKV_OK)
            status = tkv_seq_fork(c->kv, TASK_FORK, TASK_OPTION, TKV_UNLIMITED);
        if (length > 1 && status == TKV_OK)
            status = llama_forward(c->model, c->kv, TASK_OPTION, tokens, length - 1, c->logits, length - 1);
        if (status != TKV_OK) break;
        scores[i] = -measure_loss(first, vocab, tokens[0]);
        for (int j = 1; j < length; j++)
            scores[i] -= measure_loss(c->logits + (size_t)(j - 1) * (size_t)vocab, vocab, tokens[j]);
    }
    (void)tkv_seq_reset(c->kv, TASK_OPTION);
    (void)tkv_seq_reset(c->kv, TASK_FORK);
    free(first);
    return status;
}

/* >>plans */
typedef struct task_plan {
    char name[240];
    tkv_config cfg;
} task_plan;

/* Parses the words of a plan, as bench/quality has them. Returns NULL, or what is wrong. */
static inline const char *task_parse_plan(const char *text, const llama_model *m, task_plan *p) {
    static char reason[300];
    char words[sizeof p->name];
    const char *wrong = NULL;
    memset(p, 0, sizeof *p);
    if (strlen(text) >= sizeof words || strpbrk(text, "\"\n")) return "it is too long, or has a quote";
    strcpy(p->name, text);
    strcpy(words, text);
    char *next;
    for (char *word = words; *word && !wrong; word = next) {
        const size_t n = strcspn(word, " ");
        next = word + n + (word[n] != 0);
        word[n] = 0;
        char *value = strchr(word, '=');
        if (value) *value++ = 0;
        if (n == 0) continue;
        if (!value) wrong = plan_three(&p->cfg, word);
        else if (strcmp(word, "name") == 0) strcpy(p->name, value);
        else wrong = plan_word(&p->cfg, word, value);
    }
    if (wrong) return wrong;
    llama_kv_config(m, &p->cfg);
    if (plan_too_far(&p->cfg)) return plan_too_far(&p->cfg);
    return tkv_validate_config(&p->cfg, reason, sizeof reason) == TKV_OK ? NULL : reason;
}

static inline void task_exact_plan(const llama_model *m, task_plan *p) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "exact");
    llama_kv_config(m, &p->cfg);
    p->cfg.tiers.hot.k = p->cfg.tiers.hot.v = TKV_F32;
    p->cfg.tiers.warm = p->cfg.tiers.archive = p->cfg.tiers.hot;
    p->cfg.tiers.hot_tokens = TKV_UNLIMITED;
}

#endif /* TKV_TASKS_H */
