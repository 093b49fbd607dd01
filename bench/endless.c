/*
 * endless.c - a text without end in a fixed arena: perplexity of a model while tkv_seq_slide drops its oldest tokens and
 * closes up, against fresh contexts of the length that the model was trained for, and against a window whose positions
 * go on.
 *
 * cc -O2 bench/endless.c -o endless -lm -pthread && ./endless examples/data/demo.gguf TEXT
 *
 *   --tokens 100000       tokens of the endless text; the part of TEXT is read again and again
 *   --held 1024           tokens that the arena holds
 *   --context 2048        length of fresh contexts
 *   --from 95             percent of TEXT that is skipped: the demo model was trained on them
 *
 * Fresh contexts count their second half. The others count all tokens after the first --held. Each piece has 32 tokens.
 * Prints perplexity by decade of tokens, and the bytes of the cache.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#define TIEREDKV_IMPLEMENTATION
#include "../examples/llama.h"

#include "bench.h"

enum { PIECE = 32 };

typedef struct text {
    const llama_model *m;
    int *tokens;
    int n;
    float *logits;
} text;

/* Reads tokens at .. at + PIECE - 1 of the endless text. Returns the sum of losses of the tokens that follow them. */
static double read_piece(const text *t, tkv_cache *kv, int at) {
    int piece[PIECE + 1];
    double loss = 0.0;
    for (int i = 0; i <= PIECE; i++) piece[i] = t->tokens[(at + i) % t->n];
    bench_must(llama_forward(t->m, kv, 0, piece, PIECE, t->logits, PIECE), "llama_forward");
    for (int i = 0; i < PIECE; i++)
        loss += measure_loss(t->logits + (size_t)i * (size_t)t->m->vocab, t->m->vocab, piece[i + 1]);
    return loss;
}

/* Perplexity of fresh contexts: each token of the second half, with all before it. */
static double fresh_contexts(const text *t, const tkv_config *cfg, int context) {
    double loss = 0.0;
    int counted = 0;
    tkv_cache *kv;
    bench_must(tkv_create(cfg, &kv), "tkv_create");
    for (int at = 0; at + context <= t->n; at += context) {
        bench_must(tkv_seq_reset(kv, 0), "tkv_seq_reset");
        for (int i = 0; i < context; i += PIECE) {
            const double of_piece = read_piece(t, kv, at + i);
            if (i < context / 2) continue;
            loss += of_piece;
            counted += PIECE;
        }
    }
    tkv_destroy(kv);
    return exp(loss / counted);
}

/* Reads n tokens, and prints the perplexity by decade. slides: 1 calls tkv_seq_slide before each piece. */
static double read_endless(const text *t, tkv_cache *kv, const char *name, int n, int from, int slides) {
    double loss = 0.0, of_decade = 0.0;
    int counted = 0, in_decade = 0, decade = 10000;
    for (int at = 0; at < n; at += PIECE) {
        if (slides) bench_must(tkv_seq_slide(kv, 0, PIECE, NULL), "tkv_seq_slide");
        const double of_piece = read_piece(t, kv, at);
        if (at % 4096 == 0) fprintf(stderr, "\r%s: token %d   ", name, at);
        if (at < from) continue;
        loss += of_piece, of_decade += of_piece;
        counted += PIECE, in_decade += PIECE;
        if (at + PIECE < decade && at + PIECE < n) continue;
        bench_clear_line();
        printf("  %-34s to token %8d   perplexity %.3f\n", name, at + PIECE, exp(of_decade / in_decade));
        fflush(stdout);
        of_decade = 0.0;
        in_decade = 0;
        decade *= 10;
    }
    return exp(loss / counted);
}

int main(int argc, char **argv) {
    const int n = bench_number(argc, argv, "tokens", 100000), held = bench_number(argc, argv, "held", 1024),
              context = bench_number(argc, argv, "context", 2048),
              skip = bench_number(argc, argv, "from", 95);
    if (argc < 3) bench_fail("endless MODEL TEXT [options]; the top of bench/endless.c lists the options");
    llama_model m;
    char err[200];
    if (!llama_load(argv[1], NULL, &m, err, sizeof err)) bench_fail("endless: %s", err);
    size_t size;
    char *bytes = (char *)llama_read_file(argv[2], &size);
    if (!bytes) bench_fail("endless: cannot read %s", argv[2]);
    const size_t first = size / 100 * (size_t)skip;
    text t;
    t.m = &m;
    t.tokens = (int *)bench_alloc((size - first + 2) * sizeof *t.tokens);
    t.n = llama_tokenize(&m, bytes + first, size - first, 0, t.tokens);
    t.logits = (float *)bench_alloc((size_t)PIECE * (size_t)m.vocab * sizeof *t.logits);
    if (t.n < context + 1) bench_fail("endless: the text has only %d tokens", t.n);
    tkv_config cfg = tkv_default_config();
    llama_kv_config(&m, &cfg);
    cfg.limits.max_append = PIECE;
    printf("%d tokens of text, read again and again; model of %d layers, trained for %d tokens\n", t.n,
           m.n_layers, context);
    const double fresh = fresh_contexts(&t, &cfg, context);
    printf("  fresh contexts of %d tokens, second half %*s perplexity %.3f\n", context, 12, "", fresh);

    tkv_cache *kv;
    size_t arena_bytes;
    cfg.limits.max_tokens = held;
    bench_must(tkv_get_required_bytes(&cfg, &arena_bytes, NULL), "tkv_get_required_bytes");
    void *arena = bench_alloc(arena_bytes);
    bench_must(tkv_create_in_place(&cfg, arena, arena_bytes, &kv, err, sizeof err), err);
    const double slid = read_endless(&t, kv, "closed up (tkv_seq_slide)", n, held, 1);
    tkv_destroy(kv);
    free(arena);

    cfg.limits.max_tokens = 0;
    cfg.model.window = held;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    const double window = read_endless(&t, kv, "a window, positions go on", n, held, 0);
    tkv_destroy(kv);
    printf("closed up: %+.1f %% against fresh contexts, in an arena of %.0f bytes; a window: %+.1f %%\n",
           100.0 * (slid / fresh - 1.0), (double)arena_bytes, 100.0 * (window / fresh - 1.0));
    free(t.logits);
    free(t.tokens);
    free(bytes);
    llama_free(&m);
    return 0;
}
