/*
 * llama_kv.c - speed and memory of KV caches in llama.cpp with examples/llama.patch: its own, and one in tiers.
 *
 *     llama_kv MODEL TEXT KIND N THREADS [UBATCH [PART]]
 *
 * KIND is f16-plain (attention in several operations), f16, q8_0, q4_0 (flash attention), or a plan, such as
 * preset=compact. It reads N - 32 tokens of the text, in pieces of UBATCH (512), then 32, one by one. It prints
 * tokens per second of CPU time and of wall time for both, the MiB of keys and values at the end and at most, and the peak memory of
 * the process. With several threads only wall time counts. bench/LLAMACPP.md shows how it is built.
 *
 * With PART, the N - 32 tokens are sequences of PART tokens that do not see each other, and then one sequence. That fills
 * a long cache in minutes where a prompt takes an hour. Only the second speed counts: it depends on the number of tokens.
 */
#define _POSIX_C_SOURCE 200809L
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { STEPS = 32 };

static double kv_mib, kv_most; /* at the end, and the peak, as llama.cpp logs them */

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void on_log(enum ggml_log_level level, const char *text, void *user) {
    const char *own = strstr(text, "llama_kv_cache: size = "), *tiers = strstr(text, "tiered KV cache: ");
    double held, most;
    (void)user;
    if (own && sscanf(own, "llama_kv_cache: size = %lf", &kv_mib) == 1) kv_most = kv_mib;
    if (tiers && sscanf(tiers, "tiered KV cache: %lf MiB held, %lf", &held, &most) == 2)
        kv_mib = held, kv_most = most;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

/* Decodes n tokens in pieces. Sets the tokens per second of CPU time and of wall time. */
static int decode(struct llama_context *ctx, int *tokens, int n, int piece, double *cpu, double *wall) {
    *cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    *wall = seconds(CLOCK_MONOTONIC);
    for (int i = 0; i < n; i += piece) {
        if (llama_decode(ctx, llama_batch_get_one(tokens + i, piece < n - i ? piece : n - i))) return 0;
        llama_synchronize(ctx);
    }
    *cpu = n / (seconds(CLOCK_PROCESS_CPUTIME_ID) - *cpu);
    *wall = n / (seconds(CLOCK_MONOTONIC) - *wall);
    return 1;
}

/* Decodes n tokens as sequences of `part` tokens, which continue each other's positions, and makes one sequence of them. */
static int decode_parts(struct llama_context *ctx, const int *tokens, int n, int part, int piece) {
    struct llama_batch batch = llama_batch_init(piece, 0, 1);
    int from, i, failed = 0;
    for (from = 0; from < n && !failed; from += batch.n_tokens) {
        const int seq = from / part, end = (seq + 1) * part < n ? (seq + 1) * part : n;
        batch.n_tokens = end - from < piece ? end - from : piece;
        for (i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = tokens[from + i];
            batch.pos[i] = from + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i] = 0;
        }
        failed = llama_decode(ctx, batch);
    }
    llama_batch_free(batch);
    for (i = 1; i * part < n; i++) {
        llama_memory_seq_cp(llama_get_memory(ctx), i, 0, -1, -1);
        llama_memory_seq_rm(llama_get_memory(ctx), i, -1, -1);
    }
    llama_synchronize(ctx);
    return !failed && llama_memory_seq_pos_min(llama_get_memory(ctx), 0) == 0 &&
           llama_memory_seq_pos_max(llama_get_memory(ctx), 0) == n - 1;
}

int main(int argc, char **argv) {
    if (argc < 6) return puts("llama_kv MODEL TEXT KIND N THREADS [UBATCH [PART]]"), 1;
    const char *kind = argv[3];
    const int n = atoi(argv[4]), size = 16 * n, part = argc > 7 ? atoi(argv[7]) : 0;
    char *text = (char *)malloc((size_t)size);
    int *tokens = (int *)malloc((size_t)size * sizeof *tokens);
    FILE *f = fopen(argv[2], "rb");
    double cpu[2] = {0, 0}, wall[2] = {0, 0};
    struct rusage used;
    llama_log_set(on_log, NULL);
    ggml_backend_load_all();
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!f || !model || n <= STEPS || !text || !tokens) return puts("cannot read the model or the text"), 1;
    const int bytes = (int)fread(text, 1, (size_t)size, f);
    if (llama_tokenize(llama_model_get_vocab(model), text, bytes, tokens, size, true, false) < n)
        return puts("the text is too short"), 1;
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = (uint32_t)n;
    p.n_ubatch = argc > 6 ? (uint32_t)atoi(argv[6]) : 512;
    p.n_batch = p.n_ubatch;
    if (part) p.n_seq_max = (uint32_t)((n - 1) / part + 1), p.kv_unified = true;
    p.n_threads = p.n_threads_batch = atoi(argv[5]);
    p.flash_attn_type =
        strcmp(kind, "f16-plain") == 0 ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;
    if (strcmp(kind, "q8_0") == 0) p.type_k = p.type_v = GGML_TYPE_Q8_0;
    else if (strcmp(kind, "q4_0") == 0) p.type_k = p.type_v = GGML_TYPE_Q4_0;
    else if (strncmp(kind, "f16", 3) != 0) p.kv_plan = kind;
    struct llama_context *ctx = llama_init_from_model(model, p);
    if (!ctx ||
        !(part ? decode_parts(ctx, tokens, n - STEPS, part, (int)p.n_ubatch)
               : decode(ctx, tokens, n - STEPS, (int)p.n_ubatch, &cpu[0], &wall[0])) ||
        !decode(ctx, tokens + n - STEPS, STEPS, 1, &cpu[1], &wall[1]))
        return puts("llama.cpp failed"), 1;
    getrusage(RUSAGE_SELF, &used);
    llama_free(ctx);
    printf("%s | %d | %s | %.1f | %.1f | %.2f | %.2f | %.1f | %.1f | %.0f\n", kind, n, argv[5], cpu[0],
           wall[0], cpu[1], wall[1], kv_mib, kv_most, (double)used.ru_maxrss / 1024);
    llama_model_free(model);
    return 0;
}
