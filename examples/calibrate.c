/*
 * calibrate.c - reads a text with a model, and writes what the cache has learned: the tables that A and R formats need.
 * A cache that loads them compresses from its first block on (bench/QUALITY.md, Tables of another text).
 *
 * cc -O2 -o calibrate examples/calibrate.c examples/tieredkv.c -lm && ./calibrate model.gguf -f text.txt -o tables.bin
 * ./generate model.gguf --tables tables.bin
 *
 * The tables belong to the model, not to the plan: any cache of this model can load them. A text like those that the
 * model will read later is best. 4,096 tokens are enough. After writing, the program loads the file into a new cache
 * and reads the beginning of the text once more: it compares the bytes and the loss of both caches.
 */
#define PROGRAM "calibrate"
#include "program.h" /* before system headers */

static const char usage[] = "calibrate MODEL -f FILE [options]\n" PROGRAM_HELP
                            "  -o FILE            writes the tables there (tables.bin)\n"
                            "  -n N               reads so many tokens (4096, or the model's context)\n"
                            "\n"
                            "Options of the plan matter little to tables:\n";

static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    if (strcmp(name, "-o") != 0 || !value) return UNKNOWN;
    *(const char **)ctx = value;
    return WITH_VALUE;
}

/* Returns the number of the file's first tokens, at most `most`. The caller frees *tokens. */
static int read_text(const llama_model *m, const char *file, int most, int **tokens) {
    size_t size = 0;
    char *text = (char *)llama_read_file(file, &size);
    int n;
    if (!text) fail("cannot read %s", file);
    if (size > 1 << 30) fail("%s is too long; a few thousand words are enough", file);
    *tokens = (int *)allocate(size + 64, sizeof **tokens);
    n = llama_tokenize(m, text, size, m->add_bos ? LLAMA_BOS : 0, *tokens);
    free(text);
    if (n < 2) fail("%s has no text", file);
    return n < most ? n : most;
}

/* Reads n tokens into sequence 0. Returns the mean loss in nats, of the tokens from `from` on. */
static double read_tokens(const llama_model *m, const tkv_config *cfg, tkv_cache *kv, const int *tokens,
                          int n, int from, const char *what) {
    float *logits = (float *)allocate((size_t)TKV_BLOCK_TOKENS * (size_t)m->vocab, sizeof *logits);
    const double start = seconds();
    double loss = 0;
    for (int pos = 0; pos < n;) {
        const int chunk = measure_chunk(cfg, pos, n - pos < TKV_BLOCK_TOKENS ? n - pos : TKV_BLOCK_TOKENS);
        const tkv_status status = llama_forward(m, kv, 0, tokens + pos, chunk, logits, chunk);
        if (status != TKV_OK) fail("token %d: %s", pos, tkv_get_last_error(kv));
        for (int i = 0; i < chunk && pos + i + 1 < n; i++)
            if (pos + i + 1 >= from)
                loss += measure_loss(logits + (size_t)i * (size_t)m->vocab, m->vocab, tokens[pos + i + 1]);
        pos += chunk;
        show_bar(what, pos, n, start);
    }
    free(logits);
    return n > from ? loss / (n - from) : 0;
}

static void write_file(const char *name, const void *bytes, size_t size) {
    save_file f = begin_file(name);
    fwrite(bytes, 1, size, f.out);
    end_file(&f);
}

/* Prints bytes and loss of a cache that has read n tokens. */
static void print_row(const char *name, tkv_cache *kv, int n, double loss) {
    tkv_memory_info mem;
    if (tkv_get_memory(kv, &mem) != TKV_OK) fail("cannot report the memory");
    printf("  %-26s %6s tokens in %11s bytes, %3.0f %% of FP16; perplexity %.3f\n", name, commas(n),
           commas((double)mem.total), 100 * (double)mem.total / (double)mem.fp16_bytes, exp(loss));
}

/* Length of the folder of a path, its last separator included. */
static int folder_length(const char *path) {
    int length = 0;
    for (int i = 0; path[i]; i++)
        if (path[i] == '/' || path[i] == '\\') length = i + 1;
    return length;
}

int main(int argc, char **argv) {
    const char *out = "tables.bin";
    options o;
    llama_model model;
    tkv_config cfg;
    tkv_cache *kv;
    tkv_calibration_info info;
    int *tokens;
    size_t size = 0;
    memset(&o, 0, sizeof o);
    memset(&cfg, 0, sizeof cfg);
    memset(&model, 0, sizeof model);
    parse_options(argc, argv, usage, &o, &cfg, parse_own_option, &out);
    if (!o.model || !o.file) help(usage, 1);
    load(&o, &model, &cfg);
    const int context = context_of(&o, &model), most = o.n ? o.n : 4096;
    const int n = read_text(&model, o.file, most < context ? most : context, &tokens);
    kv = create(&cfg);
    const double loss = read_tokens(&model, &cfg, kv, tokens, n, 1, "learning");
    if (tkv_freeze_calibration(kv) != TKV_OK) fail("%s", tkv_get_last_error(kv));
    if (tkv_get_calibration(kv, &info) != TKV_OK || info.n_calibrated == 0)
        fail("this plan has no format that learns (A, R or KVQuant)");
    if (tkv_save_calibration(kv, NULL, 0, &size) != TKV_OK) fail("cannot save the tables");
    void *bytes = allocate(size, 1);
    if (tkv_save_calibration(kv, bytes, size, &size) != TKV_OK) fail("cannot save the tables");
    write_file(out, bytes, size);
    printf("%s: %s bytes, tables of %d layers from %s tokens\n\n", out, commas((double)size),
           info.n_calibrated, commas(n));
    print_row("while learning", kv, n, loss);
    tkv_destroy(kv);

    const int again = n < 250 ? n : 250; /* below the 256 tokens of the first table */
    kv = create(&cfg);
    double short_loss = read_tokens(&model, &cfg, kv, tokens, again, 1, "the beginning, learning");
    print_row("the beginning, learning", kv, again, short_loss);
    tkv_destroy(kv);
    o.tables = out;
    kv = create(&cfg);
    load_tables(&o, kv);
    short_loss = read_tokens(&model, &cfg, kv, tokens, again, 1, "the beginning, with tables");
    print_row("the beginning, with tables", kv, again, short_loss);
    printf("\nLoad it: %.*sgenerate %s --tables %s, or tkv_load_calibration\n", folder_length(argv[0]),
           argv[0], o.model, out); /* generate stands beside this program */
    tkv_destroy(kv);
    plan_free(&cfg);
    llama_free(&model);
    free(tokens);
    free(bytes);
    return 0;
}
