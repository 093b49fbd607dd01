/*
 * chat_save.c - talks with a model, and remembers the talk when the program is started again.
 *
 * cc -O2 -o chat_save examples/chat_save.c examples/tieredkv.c -lm && ./chat_save examples/data/demo.gguf
 *
 * It reads a line from the standard input, prints an answer, and saves the talk: keys and values of all tokens so far,
 * and the tokens themselves, so that --show can print the text. Started again, it loads the file and goes on. Nothing
 * is read by the model twice. `./chat_save MODEL --say "Who art thou?" --say "..."` takes the lines from arguments.
 *
 * The line /again takes the last answer back and asks for another one. The talk goes back to a fork that was made where
 * the answer began, so its newest tokens are as exact as then (manual, recipe R22). Cutting the answer off would leave
 * them in few bits. The file has no fork: after a restart the first answer to take back is a new one.
 *
 * A kill at any moment leaves the file of the last answer or of the one before (save_file.h). The test
 * tests/test_save_examples.py kills it 200 times. A damaged file gets the name FILE.damaged, and the talk begins anew.
 * A file of another model is left alone. If a talk cannot be saved, as on a full disk, the program says so and goes on.
 * It tries again after the next answer and at the end.
 *
 * Random numbers depend on --seed and the length of the talk, so a restarted program answers like one that never
 * stopped, as long as no table is learned. A file has the tables of its blocks, but not the statistics for the next
 * ones, so these may be others after a restart. A first table is learned from loaded tokens as from new ones.
 *
 * In this order: options, tokens, the file, talking, main.
 */
#define PROGRAM "chat_save"
#include "program.h" /* before system headers */

/* The talk with a model that knows no chat begins like a play. */
static const char opening[] = "\nROMEO:\nI am young Romeo, that do sigh for love,\n"
                              "And all my thoughts are but of Juliet.\n";
enum { TALK, PROMPT }; /* sequences: the talk, and the talk up to where the last answer began */
enum {
    REPLY = 64,
    LINE = 2000,
    SAYINGS = 64
}; /* most tokens of an answer; bytes of a line; lines from arguments */

static const char usage[] =
    "chat_save MODEL [options]\n" PROGRAM_HELP "  -n N               most tokens of an answer (64)\n"
    "  --save FILE        the talk (chat.tkv)\n"
    "  --say TEXT         a line to answer, instead of the standard input; may be repeated. The line\n"
    "                     /again asks for another answer to the line before\n"
    "  --show             prints the text of the loaded talk\n"
    "  --read-again       measures what loading saved: reads the loaded tokens into another cache\n"
    "\n"
    "The plan of the cache:\n";

typedef struct chat {
    options opt;
    llama_model model;
    tkv_config cfg;
    tkv_cache *kv;
    char name[MODEL_NAME]; /* of the model in the file */
    saved file;
    const char *path, *say[SAYINGS];
    int n_say, show, read_again;
    int *tokens, n_tokens; /* of the talk; the cache holds them all */
    int context, is_unsaved, has_template;
    float *logits; /* of the newest token */
    float *prompt_logits;
    int n_prompt, n_again; /* tokens of the fork, 0: there is none; answers that were taken back */
    choice *space;         /* for sample() */
} chat;

/* >>options */
static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    chat *c = (chat *)ctx;
    if (strcmp(name, "--show") == 0) c->show = 1;
    else if (strcmp(name, "--read-again") == 0) c->read_again = 1;
    else if (!value) return UNKNOWN;
    else if (strcmp(name, "--save") == 0) {
        c->path = value;
        return *value ? WITH_VALUE : BAD_VALUE;
    } else if (strcmp(name, "--say") == 0) {
        if (c->n_say == SAYINGS) fail("at most %d lines from arguments", SAYINGS);
        c->say[c->n_say++] = value;
        return WITH_VALUE;
    } else return UNKNOWN;
    return ALONE;
}

/* >>tokens */
/* Evaluates n known tokens behind those of a cache. */
static void evaluate(const chat *c, tkv_cache *kv, const int *tokens, int n) {
    while (n > 0) {
        const int chunk = measure_chunk(&c->cfg, tkv_get_length(kv, 0, TKV_ALL_LAYERS), n);
        const tkv_status status = llama_forward(&c->model, kv, 0, tokens, chunk, c->logits, 1);
        if (status != TKV_OK) fail("%s", cache_fault(kv, status));
        tokens += chunk;
        n -= chunk;
    }
}

/* Prints a token. Returns the number of bytes of its text, and the text. */
static int print_token(const chat *c, int i, const char **piece) {
    int len = 0;
    *piece = llama_piece(&c->model, i > 0 ? c->tokens[i - 1] : -1, c->tokens[i], &len);
    fwrite(*piece, 1, (size_t)len, stdout);
    fflush(stdout);
    return len;
}

/* >>the file */
static void print_file(const chat *c, const char *what) {
    printf("[%s: %s tokens, %s bytes, %s a token; %s in %.4f s]\n", c->path, commas(c->file.n_tokens),
           commas((double)c->file.bytes),
           commas((double)c->file.bytes / (c->file.n_tokens > 0 ? c->file.n_tokens : 1)), what,
           c->file.seconds);
    fflush(stdout);
}

static void save_talk(chat *c) {
    c->file = saved_at(c->path, c->name, 0);
    c->file.numbers = c->tokens;
    c->file.n_numbers = c->n_tokens;
    const tkv_status status = save_sequence(c->kv, &c->file);
    c->is_unsaved = status != TKV_OK;
    if (status != TKV_OK)
        fprintf(stderr, PROGRAM ": %s was not saved, the old one stays: %s\n", c->path,
                saved_fault(c->kv, status));
    else print_file(c, "saved");
}

/* Gives a damaged file another name, which must be free. */
static void set_aside(const chat *c, const char *why) {
    char aside[1024];
    const int n = snprintf(aside, sizeof aside, "%s.damaged", c->path);
    FILE *f = n < (int)sizeof aside ? fopen(aside, "rb") : NULL;
    if (f) fclose(f);
    if (f) fail("%s: %s; it stays, since %s exists already", c->path, why, aside);
    if (n >= (int)sizeof aside || save_file_replace(c->path, aside) != 0)
        fail("%s: %s; it cannot be renamed: %s", c->path, why, strerror(errno));
    fprintf(stderr, PROGRAM ": %s: %s. It is now %s, and the talk begins anew.\n", c->path, why, aside);
}

/* Loads the talk into the empty cache. A missing file is an empty talk. */
static void load_talk(chat *c) {
    c->file = saved_at(c->path, c->name, 0);
    const tkv_status status = load_sequence(c->kv, &c->file);
    if (status == TKV_ERR_IO && errno == ENOENT) return;
    if (status == TKV_ERR_DATA) {
        set_aside(c, saved_fault(c->kv, status));
    } else {
        if (status != TKV_OK) fail("cannot load %s: %s", c->path, saved_fault(c->kv, status));
        if (c->file.n_numbers != c->file.n_tokens ||
            !are_tokens(&c->model, c->file.numbers, c->file.n_tokens))
            fail("%s has a sequence that chat_save did not save", c->path);
        if (c->file.n_tokens > c->context)
            fail("%s has %d tokens, and the context %d (-c)", c->path, c->file.n_tokens, c->context);
        c->n_tokens = c->file.n_tokens;
        memcpy(c->tokens, c->file.numbers, (size_t)c->n_tokens * sizeof *c->tokens);
        print_file(c, "loaded");
    }
    free(c->file.numbers);
}

static void read_again(const chat *c) {
    tkv_cache *other = create(&c->cfg);
    load_tables(&c->opt, other);
    const double start = latency_now();
    evaluate(c, other, c->tokens, c->n_tokens);
    const double took = latency_now() - start;
    printf("[reading them again takes %.4f s, %.0f times as long]\n", took, took / (c->file.seconds + 1e-9));
    tkv_destroy(other);
}

/* >>talking */
/* Keeps the talk as it is where the answer begins. Under a budget it may not fit: then the answer stays. */
static void keep_prompt(chat *c) {
    const int is_kept = tkv_seq_fork(c->kv, TALK, PROMPT, TKV_UNLIMITED) == TKV_OK;
    c->n_prompt = is_kept ? c->n_tokens : 0;
    c->n_again = 0;
    memcpy(c->prompt_logits, c->logits, (size_t)c->model.vocab * sizeof *c->logits);
}

/* Lets the fork go: what it kept exact may be compressed now. */
static void drop_prompt(chat *c) {
    const tkv_status status = tkv_seq_reset(c->kv, PROMPT);
    if (status != TKV_OK) fail("%s", cache_fault(c->kv, status));
    c->n_prompt = 0;
}

/* Takes the last answer back. Returns 0 if there is none. */
static int take_back(chat *c) {
    if (c->n_prompt == 0) return 0;
    const tkv_status status = tkv_seq_fork(c->kv, PROMPT, TALK, TKV_UNLIMITED);
    if (status != TKV_OK) fail("%s", cache_fault(c->kv, status));
    c->n_tokens = c->n_prompt;
    c->n_again++;
    memcpy(c->logits, c->prompt_logits, (size_t)c->model.vocab * sizeof *c->logits);
    return 1;
}

/* Adds a line to the talk. Returns 0 if it and an answer do not fit. */
static int hear(chat *c, const char *line) {
    const int is_first = c->n_tokens == 0;
    const size_t size = strlen(line) + sizeof opening + 128;
    char *text = (char *)allocate(size, 1);
    int *tokens = (int *)allocate(size + LLAMA_TURN, sizeof *tokens);
    snprintf(text, size, "%s\nSTRANGER:\n%s\n\nROMEO:\n", is_first ? opening : "", line);
    const int n = c->has_template ? llama_tokenize_turn(&c->model, line, strlen(line), is_first, tokens)
                                  : llama_tokenize(&c->model, text, strlen(text),
                                                   is_first && c->model.add_bos ? LLAMA_BOS : 0, tokens);
    const int fits = n <= c->context - c->opt.n - c->n_tokens;
    if (fits) {
        drop_prompt(c);
        memcpy(c->tokens + c->n_tokens, tokens, (size_t)n * sizeof *tokens);
        evaluate(c, c->kv, tokens, n);
        c->n_tokens += n;
        keep_prompt(c);
    }
    free(tokens);
    free(text);
    return fits;
}

static int choose_token(const chat *c, uint64_t *rng) {
    return sample(c->logits, c->model.vocab, &c->opt, rng, c->space);
}

/* Chooses the first token of an answer, which does not begin with a line feed. */
static int choose_first_token(const chat *c, uint64_t *rng) {
    for (int tries = 0;; tries++) {
        int len;
        const int token = choose_token(c, rng);
        const char *piece = llama_piece(&c->model, -1, token, &len);
        if (len == 0 || *piece != '\n' || tries == 8) return token;
        c->logits[token] = -1e30f;
    }
}

/* Answers until an empty line, a control token, or so many tokens. */
static void answer(chat *c) {
    uint64_t rng = rng_seed(&c->opt) + (uint64_t)c->n_tokens * 0x9e3779b97f4a7c15u +
                   (uint64_t)c->n_again * 0xbf58476d1ce4e5b9u;
    int at_line_start = 1, ends = 0;
    for (int n = 0; n < c->opt.n && !ends; n++) {
        const char *piece;
        const int token = n == 0 ? choose_first_token(c, &rng) : choose_token(c, &rng);
        if (c->model.entries[token].kind == LLAMA_CONTROL) break;
        c->tokens[c->n_tokens] = token;
        const int len = print_token(c, c->n_tokens, &piece);
        evaluate(c, c->kv, &token, 1);
        c->n_tokens++;
        for (int i = 0; i < len; i++) {
            ends |= piece[i] == '\n' && at_line_start && !c->model.chat;
            at_line_start = piece[i] == '\n';
        }
    }
    if (!at_line_start) printf("\n");
    fflush(stdout);
}

/* The next line to answer; NULL: there is none. */
static const char *next_line(const chat *c, int i, char *line) {
    if (c->n_say) return i < c->n_say ? c->say[i] : NULL;
    if (!fgets(line, LINE, stdin)) return NULL;
    line[strcspn(line, "\r\n")] = 0;
    return line;
}

static void talk(chat *c) {
    char buf[LINE];
    const char *line;
    for (int i = 0; (line = next_line(c, i, buf)) != NULL; i++) {
        if (!*line) continue;
        if (c->n_say) printf("> %s\n", line);
        if (strcmp(line, "/again") == 0) {
            if (!take_back(c)) {
                printf("[there is no answer to take back]\n");
                continue;
            }
        } else if (!hear(c, line)) {
            printf("[the talk has %d of %d tokens: the line and an answer do not fit (-c, --save)]\n",
                   c->n_tokens, c->context);
            break;
        }
        c->is_unsaved = 1;
        answer(c);
        save_talk(c);
    }
    if (c->is_unsaved) save_talk(c);
}

/* >>main */
int main(int argc, char **argv) {
    chat c;
    memset(&c, 0, sizeof c);
    c.path = "chat.tkv";
    c.opt.n = REPLY;
    parse_options(argc, argv, usage, &c.opt, &c.cfg, parse_own_option, &c);
    if (!c.opt.model) help(usage, 1);
    load(&c.opt, &c.model, &c.cfg);
    c.has_template = is_chat(&c.model, &c.opt);
    c.context = context_of(&c.opt, &c.model);
    c.cfg.limits.max_seqs = 2; /* TALK and PROMPT */
    c.kv = create(&c.cfg);
    load_tables(&c.opt, c.kv);
    c.tokens = (int *)allocate((size_t)c.context, sizeof *c.tokens);
    c.logits = (float *)allocate((size_t)c.model.vocab, sizeof *c.logits);
    c.prompt_logits = (float *)allocate((size_t)c.model.vocab, sizeof *c.prompt_logits);
    c.space = (choice *)allocate((size_t)c.model.vocab, sizeof *c.space);
    name_model(&c.model, c.name);
    load_talk(&c);
    if (c.read_again && c.n_tokens) read_again(&c);
    if (c.show) {
        const char *piece;
        for (int i = 0; i < c.n_tokens; i++) (void)print_token(&c, i, &piece);
        printf("\n");
    }
    talk(&c);
    tkv_destroy(c.kv);
    plan_free(&c.cfg);
    llama_free(&c.model);
    free(c.tokens);
    free(c.logits);
    free(c.prompt_logits);
    free(c.space);
    return c.is_unsaved;
}
