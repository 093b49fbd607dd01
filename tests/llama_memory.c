/*
 * llama_memory.c - sequences of llama.cpp on a KV cache in tiers, through llama.h alone. tests/test_llama_patch.py builds
 * and runs it: llama_memory MODEL TEXT FILE, which is written.
 */
#include <llama.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 2048, SHORT = 300 };

static const char exact_plan[] = "tiers.hot_tokens = unlimited, tiers.hot = f32";
static const char tiered_plan[] = "preset = balanced, tiers.warm_tokens = 64";
static struct llama_model *model;
static int tokens[MOST], vocab, n_checks, n_failed, n_bad_allocs;

static void expect(int ok, const char *what, double x) {
    n_checks++;
    if (ok) return;
    n_failed++;
    printf("failed: %s (%g)\n", what, x);
}

static struct llama_context *create(const char *plan, int n_ctx) {
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = (uint32_t)n_ctx;
    p.n_batch = 512;
    p.n_ubatch = 64;
    p.n_seq_max = 4;
    p.kv_unified = true;
    p.n_threads = p.n_threads_batch = 1;
    p.kv_plan = plan;
    struct llama_context *ctx = llama_init_from_model(model, p);
    if (!ctx) exit((printf("no context: %s\n", plan), 1));
    return ctx;
}

/* Decodes n tokens, from `first` of the text on, for sequences seq to seq + n_seqs - 1. */
static int decode(struct llama_context *ctx, int first, int n, int pos, int seq, int n_seqs) {
    struct llama_batch batch = llama_batch_init(n, 0, n_seqs);
    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = tokens[first + i];
        batch.pos[i] = pos + i;
        batch.n_seq_id[i] = n_seqs;
        for (int j = 0; j < n_seqs; j++) batch.seq_id[i][j] = seq + j;
        batch.logits[i] = i == n - 1;
    }
    const int status = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return status;
}

/* Decodes one token behind a sequence, copies its logits, and removes it. */
static float *look(struct llama_context *ctx, int seq) {
    llama_memory_t mem = llama_get_memory(ctx);
    const int pos = llama_memory_seq_pos_max(mem, seq) + 1;
    float *logits = malloc((size_t)vocab * sizeof *logits);
    expect(decode(ctx, MOST - 1, 1, pos, seq, 1) == 0, "a token is decoded", pos);
    memcpy(logits, llama_get_logits_ith(ctx, -1), (size_t)vocab * sizeof *logits);
    expect(llama_memory_seq_rm(mem, seq, pos, -1), "a token is removed", pos);
    return logits;
}

/* Largest difference, relative to the range of a. Frees both. */
static double difference(float *a, float *b) {
    double most = 0, range = 1e-9;
    for (int i = 0; i < vocab; i++) {
        const double d = fabs((double)a[i] - (double)b[i]);
        if (d > most || isnan(d)) most = d;
        if (fabs((double)a[i]) > range) range = fabs((double)a[i]);
    }
    free(a);
    free(b);
    return most / range;
}

/* Compressed tokens of two sequences can differ: the first one that goes on has blocks coded that the other still has
 * exact. */
static void check_same(struct llama_context *ctx, int a, int b, const char *plan, const char *what) {
    const double d = difference(look(ctx, a), look(ctx, b));
    expect(d <= (plan == exact_plan ? 0 : 0.05), what, d);
}

static void test_copies(const char *plan) {
    struct llama_context *ctx = create(plan, 2048);
    llama_memory_t mem = llama_get_memory(ctx);
    expect(decode(ctx, 0, SHORT, 0, 0, 1) == 0, "a prompt is decoded", 0);
    llama_memory_seq_cp(mem, 0, 1, -1, -1);
    expect(llama_memory_seq_pos_max(mem, 1) == SHORT - 1, "a copy has the positions", 0);
    check_same(ctx, 0, 1, plan, "a copy gives the same logits");
    expect(decode(ctx, SHORT, 40, SHORT, 1, 1) == 0, "a copy goes on", 0);
    expect(llama_memory_seq_pos_max(mem, 0) == SHORT - 1, "a copy does not change its source", 0);
    expect(decode(ctx, SHORT, 40, SHORT, 0, 1) == 0, "the source goes on", 0);
    check_same(ctx, 0, 1, plan, "both go on alike");
    llama_memory_seq_cp(mem, 0, 2, 0, 100);
    expect(llama_memory_seq_pos_max(mem, 2) == 99, "a part is copied", 0);
    expect(llama_memory_seq_rm(mem, 1, 100, -1), "a sequence is cut", 0);
    check_same(ctx, 1, 2, plan, "a cut sequence and a copied part are alike");
    llama_memory_seq_keep(mem, 2);
    expect(llama_memory_seq_pos_max(mem, 0) == -1 && llama_memory_seq_pos_max(mem, 1) == -1, "the others go",
           0);
    expect(llama_memory_seq_pos_max(mem, 2) == 99 && llama_memory_seq_pos_min(mem, 2) == 0, "one stays", 0);
    llama_memory_clear(mem, true);
    expect(llama_memory_seq_pos_max(mem, 2) == -1, "clear", 0);
    llama_free(ctx);
}

static void test_coupled(const char *plan) {
    struct llama_context *ctx = create(plan, 2048);
    expect(decode(ctx, 0, SHORT, 0, 0, 3) == 0, "a batch for three sequences", 0);
    for (int i = 1; i < 3; i++) check_same(ctx, 0, i, plan, "coupled sequences are alike");
    expect(decode(ctx, SHORT, 10, SHORT, 0, 3) == 0, "a second one", 0);
    expect(decode(ctx, SHORT + 10, 10, SHORT + 10, 1, 1) == 0, "one goes on alone", 0);
    check_same(ctx, 0, 2, plan, "the others stay alike");
    llama_free(ctx);
}

/* Four sequences of different lengths in the same batches, against each one alone. Products for more rows round in
 * another way. */
static void test_parallel(const char *plan) {
    enum { SEQS = 4, STEPS = 6 };
    struct llama_context *ctx = create(plan, 2048), *alone = create(plan, 2048);
    float *logits[SEQS];
    int pos[SEQS] = {0};
    for (int step = 0; step < STEPS; step++) {
        struct llama_batch batch = llama_batch_init(512, 0, 1);
        int *n = &batch.n_tokens;
        for (int s = 0; s < SEQS; s++) {
            const int count = step % 2 ? 1 : 10 + 29 * s;
            for (int i = 0; i < count; i++, ++*n) {
                batch.token[*n] = tokens[400 * s + pos[s]];
                batch.pos[*n] = pos[s]++;
                batch.n_seq_id[*n] = 1;
                batch.seq_id[*n][0] = s;
                batch.logits[*n] = i == count - 1;
            }
        }
        expect(llama_decode(ctx, batch) == 0, "a batch of four sequences", step);
        if (step == STEPS - 1) {
            for (int s = 0; s < SEQS; s++) {
                logits[s] = malloc((size_t)vocab * sizeof **logits);
                memcpy(logits[s], llama_get_logits_ith(ctx, s), (size_t)vocab * sizeof **logits);
            }
        }
        llama_batch_free(batch);
    }
    for (int s = 0; s < SEQS; s++) {
        float *own = malloc((size_t)vocab * sizeof *own);
        llama_memory_clear(llama_get_memory(alone), true);
        expect(decode(alone, 400 * s, pos[s], 0, s, 1) == 0, "a sequence alone", s);
        memcpy(own, llama_get_logits_ith(alone, -1), (size_t)vocab * sizeof *own);
        const double d = difference(own, logits[s]);
        expect(d < (plan == exact_plan ? 0.06 : 0.1), "parallel sequences are as alone", d);
    }
    llama_free(ctx);
    llama_free(alone);
}

/* Removed and moved tokens, against llama.cpp's own cache. */
static void test_moves(void) {
    float *logits[2];
    for (int i = 0; i < 2; i++) {
        struct llama_context *ctx = create(i ? exact_plan : NULL, 2048);
        llama_memory_t mem = llama_get_memory(ctx);
        expect(llama_memory_can_shift(mem), "positions can move", i);
        expect(decode(ctx, 0, SHORT, 0, 0, 1) == 0, "a prompt is decoded", i);
        expect(llama_memory_seq_rm(mem, 0, 4, 104), "tokens are removed", i);
        expect(llama_memory_seq_pos_max(mem, 0) == SHORT - 1, "the last position stays", i);
        llama_memory_seq_add(mem, 0, 104, -1, -100);
        expect(llama_memory_seq_pos_max(mem, 0) == SHORT - 101, "positions have moved", i);
        expect(decode(ctx, SHORT, 50, SHORT - 100, 0, 1) == 0, "the sequence goes on", i);
        logits[i] = look(ctx, 0);
        if (i) {
            llama_memory_seq_div(mem, 0, 0, -1, 2);
            expect(decode(ctx, SHORT, 1, 100, 0, 1) == -1, "positions that were divided are refused", i);
        }
        llama_free(ctx);
    }
    const double d = difference(logits[0], logits[1]);
    expect(d < 0.03, "moved tokens are as in llama.cpp's cache", d);
}

static int n_calls;
static bool abort_now(void *user) {
    (void)user;
    return ++n_calls > 200;
}

static void test_failures(void) {
    struct llama_context *ctx = create("budget.bytes = 10M", 2048), *other;
    llama_memory_t mem = llama_get_memory(ctx);
    int n = 0, status = 0;
    expect(decode(ctx, 0, 64, 0, 1, 1) == 0, "a prompt is decoded", 0);
    while (!status && n + 64 < MOST) {
        status = decode(ctx, n, 64, n, 0, 1);
        if (!status) n += 64;
    }
    expect(status == 1, "a full budget is an error", status);
    expect(llama_memory_seq_pos_max(mem, 0) == n - 1 && n > 256, "the sequence is as before", n);
    expect(llama_memory_seq_rm(mem, 0, 128, -1), "a full sequence is cut", 0);
    expect(decode(ctx, 128, 64, 128, 0, 1) == 0, "and goes on", 0);
    free(look(ctx, 1));
    llama_free(ctx);

    ctx = create(tiered_plan, 256);
    expect(decode(ctx, 0, 256, 0, 0, 1) == 0, "the context is filled", 0);
    expect(decode(ctx, 256, 1, 256, 0, 1) == 1, "it is full", 0);
    llama_free(ctx);

    ctx = create(exact_plan, 2048);
    other = create(exact_plan, 2048);
    mem = llama_get_memory(ctx);
    expect(decode(ctx, 0, 128, 0, 0, 1) == 0, "a prompt is decoded", 0);
    llama_set_abort_callback(ctx, abort_now, NULL);
    n_calls = 0;
    expect(decode(ctx, 128, 64, 128, 0, 1) == 2, "a batch is aborted", n_calls);
    llama_set_abort_callback(ctx, NULL, NULL);
    expect(llama_memory_seq_pos_max(mem, 0) == 127, "no token stays", llama_memory_seq_pos_max(mem, 0));
    expect(decode(ctx, 128, 64, 128, 0, 1) == 0, "it is decoded again", 0);
    expect(decode(other, 0, 128, 0, 0, 1) == 0 && decode(other, 128, 64, 128, 0, 1) == 0, "without an abort",
           0);
    const double d = difference(look(ctx, 0), look(other, 0));
    expect(d == 0, "an aborted batch leaves nothing", d);
    llama_free(ctx);
    llama_free(other);
}

static void test_states(const char *plan) {
    struct llama_context *ctx = create(plan, 2048), *other = create(plan, 2048);
    llama_memory_t mem = llama_get_memory(other);
    expect(decode(ctx, 0, SHORT, 0, 0, 1) == 0, "a prompt is decoded", 0);
    expect(decode(ctx, 40, 70, 0, 2, 1) == 0, "a second one", 0);
    const size_t size = llama_state_seq_get_size(ctx, 0), all = llama_state_get_size(ctx);
    unsigned char *bytes = malloc(size), *whole = malloc(all);
    expect(llama_state_seq_get_data(ctx, bytes, size, 0) == size, "a sequence is saved", (double)size);
    expect(llama_state_get_data(ctx, whole, all) == all, "all is saved", (double)all);
    expect(llama_state_seq_set_data(other, bytes, size, 3) == size, "a sequence is loaded", 0);
    float *a = look(ctx, 0), *b = look(other, 3);
    double d = difference(a, b);
    expect(d == 0, "a loaded sequence gives the same logits", d);

    expect(decode(other, 100, 50, 0, 1, 1) == 0, "another sequence", 0);
    a = look(other, 1);
    for (int i = 0; i < 44; i++) { /* 8 bytes are llama.cpp's */
        unsigned char *byte = &bytes[i < 20 ? 8 + (size_t)i : (size / 44) * (size_t)i];
        *byte ^= 1;
        expect(llama_state_seq_set_data(other, bytes, size, 1) == 0, "damaged bytes are refused", i);
        *byte ^= 1;
    }
    expect(llama_state_seq_set_data(other, bytes, size / 2, 1) == 0, "cut bytes are refused", 0);
    d = difference(a, look(other, 1));
    expect(d == 0, "a failed load changes nothing", d);

    /* states of before had no magic number */
    memmove(bytes + 8, bytes + 12, size - 12);
    expect(llama_state_seq_set_data(other, bytes, size - 4, 1) == size - 4, "an older state is loaded", 0);
    d = difference(look(ctx, 0), look(other, 1));
    expect(d == 0, "it gives the same logits", d);

    expect(llama_state_set_data(other, whole, all) == all, "all is loaded", 0);
    expect(llama_memory_seq_pos_max(mem, 1) == -1 && llama_memory_seq_pos_max(mem, 3) == -1,
           "the others are gone", 0);
    d = difference(look(ctx, 0), look(other, 0));
    expect(d == 0, "the first sequence is the same", d);
    d = difference(look(ctx, 2), look(other, 2));
    expect(d == 0, "and the other one", d);
    free(bytes);
    free(whole);
    llama_free(ctx);
    llama_free(other);
}

/* States of a tiered cache and of a plain one refuse each other, in memory and in files. */
static void test_foreign_states(const char *path) {
    struct llama_context *ctx[2] = {create("", 2048), create(NULL, 2048)};
    for (int i = 0; i < 2; i++) expect(decode(ctx[i], 0, SHORT, 0, 0, 1) == 0, "a prompt is decoded", i);
    for (int i = 0; i < 2; i++) {
        struct llama_context *mine = ctx[i], *its = ctx[1 - i];
        int read[SHORT];
        size_t n = 0;
        const size_t size = llama_state_seq_get_size(mine, 0);
        unsigned char *bytes = malloc(size);
        expect(llama_state_seq_get_data(mine, bytes, size, 0) == size, "a sequence is saved", i);
        expect(llama_state_seq_set_data(its, bytes, size, 1) == 0, "the other cache refuses it", i);
        free(bytes);
        expect(llama_state_seq_save_file(mine, path, 0, tokens, SHORT) > 0, "a file is saved", i);
        expect(llama_state_seq_load_file(its, path, 1, read, SHORT, &n) == 0, "the other cache refuses it",
               i);
        expect(llama_state_seq_load_file(mine, path, 1, read, SHORT, &n) > 0 && n == SHORT,
               "its own loads it", i);
        check_same(mine, 0, 1, NULL, "it gives the same logits");
        expect(llama_state_save_file(mine, path, tokens, SHORT), "all is saved to a file", i);
        expect(!llama_state_load_file(its, path, read, SHORT, &n), "the other cache refuses it", i);
        expect(llama_state_load_file(mine, path, read, SHORT, &n) && n == SHORT, "its own loads it", i);
    }
    expect(n_bad_allocs == 0, "no size of a foreign state is believed", n_bad_allocs);
    for (int i = 0; i < 2; i++) llama_free(ctx[i]);
    remove(path);
}

/* 1 if sequence `seq` has the bytes of a state that was saved. */
static int has_state(struct llama_context *ctx, int seq, const unsigned char *bytes, size_t size) {
    const size_t n = llama_state_seq_get_size(ctx, seq);
    unsigned char *now = malloc(n);
    const int same = llama_state_seq_get_data(ctx, now, n, seq) == size && memcmp(now, bytes, size) == 0;
    free(now);
    return same;
}

static void reply(struct llama_context *ctx, int pos, int n, int seq) {
    for (int i = 0; i < n; i++)
        expect(decode(ctx, pos + i, 1, pos + i, seq, 1) == 0, "a token of a reply", i);
}

/* A reply that is removed leaves its prompt as it was before. */
static void test_replies(const char *plan, int has_marks) {
    enum { PROMPT = 400, REPLY = 160 };
    struct llama_context *ctx = create(plan, 2048);
    llama_memory_t mem = llama_get_memory(ctx);
    expect(decode(ctx, 0, PROMPT, 0, 0, 1) == 0, "a prompt is decoded", 0);
    const size_t size = llama_state_seq_get_size(ctx, 0);
    unsigned char *before = malloc(size);
    expect(llama_state_seq_get_data(ctx, before, size, 0) == size, "it is saved", 0);
    for (int i = 0; i < 2; i++) {
        reply(ctx, PROMPT, REPLY, 0);
        expect(llama_memory_seq_rm(mem, 0, PROMPT, -1), "the reply is removed", i);
        expect(llama_memory_seq_pos_max(mem, 0) == PROMPT - 1, "the prompt is left", i);
        expect(has_state(ctx, 0, before, size) == has_marks, "the prompt is what it was", i);
    }
    if (!has_marks) goto end;

    /* a server cuts the last token of the prompt too, and reads it again */
    reply(ctx, PROMPT, REPLY, 0);
    expect(llama_memory_seq_rm(mem, 0, PROMPT - 1, -1), "the last token of the prompt is removed too", 0);
    reply(ctx, PROMPT - 1, 1, 0);
    expect(llama_state_seq_get_size(ctx, 0) == size, "the prompt is as exact as before", 0);

    /* a mark goes with the tokens that it was made of */
    reply(ctx, PROMPT, REPLY, 0);
    expect(decode(ctx, 1000, 300, 0, 1, 1) == 0, "another prompt", 0);
    llama_memory_seq_cp(mem, 1, 0, -1, -1);
    llama_memory_seq_cp(mem, 1, 2, -1, -1);
    for (int i = 0; i < 3; i++) expect(llama_memory_seq_rm(mem, i, 200, -1), "the sequences are cut", i);
    check_same(ctx, 1, 2, plan, "a cut copy");
    check_same(ctx, 1, 0, plan, "a cut copy in the place of a sequence with a mark");
    reply(ctx, 200, 2, 2);
    llama_memory_seq_rm(mem, 2, 50, 60);
    llama_memory_seq_add(mem, 2, 60, -1, -10);
    expect(llama_memory_seq_rm(mem, 2, 150, -1), "a moved sequence is cut", 0);
    expect(llama_memory_seq_pos_max(mem, 2) == 149, "where it was moved to", 0);
    llama_memory_seq_rm(mem, 2, -1, -1);
    expect(llama_memory_seq_pos_max(mem, 2) == -1, "an empty sequence has no mark", 0);
end:
    free(before);
    llama_free(ctx);
}

static void print_error(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    n_bad_allocs += strstr(text, "bad_alloc") != NULL;
    if (level == GGML_LOG_LEVEL_ERROR && getenv("VERBOSE")) fputs(text, stderr);
}

int main(int argc, char **argv) {
    struct llama_model_params p = llama_model_default_params();
    static char text[16 * MOST];
    FILE *f = argc == 4 ? fopen(argv[2], "rb") : NULL;
    const size_t size = f ? fread(text, 1, sizeof text, f) : 0;
    llama_log_set(print_error, NULL);
    ggml_backend_load_all();
    model = size ? llama_model_load_from_file(argv[1], p) : NULL;
    if (!model) return puts("llama_memory MODEL TEXT FILE"), 1;
    const struct llama_vocab *v = llama_model_get_vocab(model);
    int *all = malloc((size + 16) * sizeof *all);
    vocab = llama_vocab_n_tokens(v);
    if (llama_tokenize(v, text, (int)size, all, (int)size + 16, true, false) < MOST)
        return puts("the text is too short"), 1;
    memcpy(tokens, all, sizeof tokens);
    free(all);
    fclose(f);
    test_copies(exact_plan);
    test_copies(tiered_plan);
    test_coupled(exact_plan);
    test_coupled(tiered_plan);
    test_parallel(exact_plan);
    test_parallel(NULL);
    test_parallel(tiered_plan);
    test_moves();
    test_failures();
    test_states(exact_plan);
    test_states(tiered_plan);
    test_foreign_states(argv[3]);
    test_replies("tiers.warm = kivi4, tiers.archive = kivi2, tiers.hot_tokens = 64, tiers.warm_tokens = 64",
                 1);
    test_replies("tiers.warm = kivi4, tiers.archive = kivi2, tiers.hot_tokens = 64, tiers.warm_tokens = 64, "
                 "budget.bytes = 14M, budget.pressure.threshold = .1",
                 0);
    llama_model_free(model);
    printf("%d checks, %d failed\n", n_checks, n_failed);
    return n_failed != 0;
}
