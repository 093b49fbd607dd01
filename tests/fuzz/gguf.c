/*
 * gguf.c - a fuzz target: the bytes of an input change a small model file, and examples/llama.h loads and runs it.
 *
 * The files are those of tests/gguf_files.h: GGUF with both tokenizers and all types of tensors, and llama2.c. An input
 * changes numbers behind names, texts of tokens with their lengths, types, bytes of the header and of weights; it cuts
 * and grows the file. Files and texts are in memory of exactly their size.
 *
 * Each file is refused with a sentence, or its model tokenizes a text of the input, and evaluates three tokens or fails
 * without a trace.
 *
 * Coverage-guided, with clang: make fuzz TARGET=gguf
 * As a plain program, with any compiler, for random inputs or for files of inputs:
 *     cc -O2 -DTKV_FUZZ_MAIN -include assert.h -DTKV_ASSERT=assert tests/fuzz/gguf.c examples/tieredkv.c -o gguf -lm
 *     ./gguf --runs 100000 [--seed 1] [--bytes 30]
 */
#include "../gguf_files.h"
#include "target.h"

enum { FILES = 5, TEXT = 40 };

static file_bytes files[FILES], token_file, file, tok;
static long n_results[3];

static void make_files(void) {
    file_spec p = make_mixed_spec(0);
    if (files[0].n) return;
    build_gguf(&files[0], &p);
    p = make_mixed_spec(1);
    build_gguf(&files[1], &p);
    p = make_float_spec();
    build_gguf(&files[2], &p);
    build_llama2c(&files[3], &token_file, 1);
    build_llama2c(&files[4], &token_file, 0);
}

static const char *const names[] = {"general.architecture",
                                    "general.alignment",
                                    "llama.block_count",
                                    "llama.context_length",
                                    "llama.embedding_length",
                                    "llama.feed_forward_length",
                                    "llama.attention.head_count",
                                    "llama.attention.head_count_kv",
                                    "llama.rope.dimension_count",
                                    "llama.attention.layer_norm_rms_epsilon",
                                    "tokenizer.ggml.model",
                                    "tokenizer.ggml.tokens",
                                    "tokenizer.ggml.scores",
                                    "tokenizer.ggml.token_type",
                                    "tokenizer.ggml.bos_token_id",
                                    "tokenizer.ggml.eos_token_id",
                                    "tokenizer.ggml.unknown_token_id",
                                    "token_embd.weight",
                                    "output_norm.weight",
                                    "output.weight",
                                    "blk.0.attn_q.weight",
                                    "blk.0.attn_k.weight",
                                    "blk.1.attn_v.weight",
                                    "blk.1.ffn_up.weight",
                                    "blk.0.ffn_down.weight"};

/* Places n bytes of the input, or of a piece, where `was` bytes are. */
static void replace_bytes(file_bytes *b, size_t at, size_t was, const char *with, size_t n) {
    if (at > b->n || was > b->n - at || b->n - was + n > sizeof b->p) return;
    memmove(b->p + at + n, b->p + at + was, b->n - at - was);
    memcpy(b->p + at, with, n);
    b->n = b->n - was + n;
}

static void write_number(file_bytes *b, size_t at, uint64_t x, int bytes) {
    int i;
    for (i = 0; i < bytes && at + (size_t)i < b->n; i++) b->p[at + (size_t)i] = (uint8_t)(x >> 8 * i & 255);
}

static uint64_t choose_number(void) {
    static const uint64_t numbers[] = {0,
                                       1,
                                       2,
                                       3,
                                       4,
                                       8,
                                       9,
                                       31,
                                       32,
                                       33,
                                       64,
                                       96,
                                       127,
                                       128,
                                       255,
                                       65536,
                                       0x7fffffff,
                                       0x80000000u,
                                       0xffffffffu,
                                       0x100000000u,
                                       (uint64_t)1 << 59,
                                       (uint64_t)1 << 60,
                                       (uint64_t)1 << 62,
                                       0x7fffffffffffffffu,
                                       (uint64_t)1 << 63,
                                       ~(uint64_t)0,
                                       0x7fc00000u,
                                       0x7f800000u,
                                       20,
                                       12,
                                       10,
                                       30};
    return numbers[next_byte() % COUNT(numbers)];
}

/* The end of a name that stands behind its length. 0: there is none. */
static size_t find_name(const char *name) {
    const size_t n = strlen(name);
    size_t i;
    for (i = 8; i + n <= file.n && i < 6000; i++)
        if (file.p[i - 8] == n && memcmp(file.p + i, name, n) == 0) return i + n;
    return 0;
}

/* Gives a token or a merge another text, with its length. */
static void change_text(int is_bpe) {
    static const char *const texts[] = {"",         "\342\226\201",
                                        "<0x41>",   "<0xZZ>",
                                        "a b",      " ",
                                        "b",        "aaaaaaaaaaaaaaaaaaaa",
                                        "\304\240", "\377\377",
                                        "abab",     "<|im_start|>",
                                        "a",        "ab a",
                                        "\342\226"};
    const char *text = texts[next_byte() % COUNT(texts)], *name = "tokenizer.ggml.tokens";
    size_t at, n;
    uint64_t length = 0;
    int i = next_byte() % VOCAB;
    if (is_bpe && next_byte() % 4 == 0) name = "tokenizer.ggml.merges", i %= MERGES;
    at = find_name(name);
    if (!at) return;
    for (at += 16; i >= 0 && at + 8 <= file.n; i--) {
        for (length = 0, n = 8; n--;) length = length << 8 | file.p[at + n];
        if (length > file.n - at - 8) return;
        if (i) at += 8 + (size_t)length;
        else break;
    }
    if (at + 8 > file.n) return;
    replace_bytes(&file, at + 8, (size_t)length, text, strlen(text));
    write_number(&file, at, strlen(text), 8);
}

static void change_file(int number) {
    static const int sizes[] = {1, 4, 4, 8};
    const int how = next_byte() % 16, is_gguf = number < 3;
    file_bytes *b = is_gguf || next_byte() % 2 ? &file : &tok;
    const size_t header = is_gguf ? 2200 : 28, most = how == 15 || b == &tok || b->n < header ? b->n : header;
    const size_t at = most ? (size_t)next_below(1 << 16) % most : 0;
    size_t end;
    char piece[32];
    int i;
    if (!b->n) return;
    if (how < 7) { /* a number behind a name, or anywhere in the header */
        end = is_gguf ? find_name(names[next_byte() % COUNT(names)]) : at / 4 * 4;
        if (is_gguf) end += (size_t)next_byte() % 8 * 4;
        write_number(b, end, choose_number(), sizes[next_byte() % COUNT(sizes)]);
    } else if (how < 10) {
        b->p[at] = (uint8_t)next_byte();
    } else if (how < 13) {
        if (is_gguf) change_text(number == 1);
        else write_number(b, at, choose_number(), 4);
    } else if (how == 13) {
        for (i = 0; i < COUNT(piece); i++) piece[i] = (char)next_byte();
        replace_bytes(b, at, (size_t)next_byte() % 40 / 10, piece, (size_t)next_byte() % 32);
    } else if (how == 14) {
        b->n = next_byte() % 4 ? b->n - (size_t)next_below(300) % b->n : at;
    } else {
        b->p[at] = (uint8_t)next_byte();
    }
}

static void run_input(void) {
    const int number = next_byte() % FILES, has_tok = number >= 3;
    char err[256], text[TEXT];
    int i, result, n_changes = next_byte() % 4 ? 1 : 4;
    file.n = files[number].n;
    memcpy(file.p, files[number].p, file.n);
    tok.n = token_file.n;
    memcpy(tok.p, token_file.p, tok.n);
    for (; n_changes > 0; n_changes--) change_file(number);
    for (i = 0; i < TEXT; i++) text[i] = (char)(i % 5 == 4 ? next_byte() : "ab c'd1\n"[next_byte() % 8]);
    result = try_file_with(file.p, file.n, has_tok ? tok.p : NULL, tok.n, text, TEXT, err, sizeof err, NULL);
    n_results[result]++;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    begin_input(data, size);
    make_files();
    run_input();
    end_input();
    return 0;
}

#ifdef TKV_FUZZ_MAIN
static int make_random(int seed, int n_bytes, uint8_t *bytes) {
    return random_bytes(seed, 8, n_bytes, 60, bytes);
}

int main(int argc, char **argv) {
    int n_runs;
    const int status = run_inputs(argc, argv, "gguf", make_random, 60, 0, &n_runs);
    printf("%ld files refused, %ld models run, %ld load and fail\n", n_results[REFUSED], n_results[RUNS],
           n_results[LOADS_AND_FAILS]);
    return status;
}
#endif
