/*
 * adapt.c - tests whether quality feedback finds a plan that reaches a target on a model. Two caches read a text in
 * windows: tkv_adapt_plan moves one along a ladder, the other is exact. Each piece of 64 tokens gives a score from
 * both perplexities.
 *
 * cc -O2 bench/adapt.c examples/tieredkv.c -o adapt -lm && ./adapt model.gguf ../shared/data/text/wiki.test.raw
 *
 *   --target 970 --window 1024 --windows 14 --level 3 --from 256         (the target in thousandths)
 *
 * The levels are those of cfg.budget.adapt, with 32 hot and no warm tokens. Their archives are A40/R40, A30/R30, A25/R20
 * and A20/R15. The caches are emptied before each window, so the levels of that time code all of it. Positions below
 * --from are not scored, because few tokens are coded there. The program prints one line for each change of the plan
 * and for each window.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* clock_gettime */
#endif
#include "../tieredkv.h"

#include "../examples/llama.h"
#include "bench.h"

#define PIECE TKV_BLOCK_TOKENS

static double loss_of(const float *logits, int vocab, int token) { /* nats */
    double top = (double)logits[0], sum = 0.0;
    for (int i = 1; i < vocab; i++)
        if ((double)logits[i] > top) top = (double)logits[i];
    for (int i = 0; i < vocab; i++) sum += exp((double)logits[i] - top);
    return top + log(sum) - (double)logits[token];
}

/* Reads the next piece, and returns the mean loss of its predictions. */
static double read_piece(const llama_model *m, tkv_cache *kv, const int *tokens, float *logits) {
    double loss = 0.0;
    bench_must(llama_forward(m, kv, 0, tokens, PIECE, logits, PIECE), "llama_forward");
    for (int i = 0; i < PIECE; i++)
        loss += loss_of(logits + (size_t)i * (size_t)m->vocab, m->vocab, tokens[i + 1]) / PIECE;
    return loss;
}

static float score_of(double base, double value) {
    tkv_score_params p;
    float score = -1.0f;
    memset(&p, 0, sizeof p);
    p.source = TKV_SCORE_PERPLEXITY;
    p.base = base;
    p.value = value;
    (void)tkv_compute_score(&p, &score);
    return score;
}

int main(int argc, char **argv) {
    const int window = bench_number(argc, argv, "window", 1024),
              windows = bench_number(argc, argv, "windows", 14);
    const int from = bench_number(argc, argv, "from", 256), target = bench_number(argc, argv, "target", 970);
    tkv_feedback_info info;
    int scores = 0;
    if (argc < 3) bench_fail("adapt MODEL TEXT [options]; the top of bench/adapt.c lists the options");
    llama_model m;
    char err[200];
    if (!llama_load(argv[1], NULL, &m, err, sizeof err)) bench_fail("adapt: %s", err);
    size_t size;
    char *text = (char *)llama_read_file(argv[2], &size);
    if (!text) bench_fail("adapt: cannot read %s", argv[2]);
    size = size < (size_t)window * (size_t)windows * 8 ? size : (size_t)window * (size_t)windows * 8;
    int *tokens = (int *)bench_alloc((size + 2) * sizeof *tokens);
    int n = llama_tokenize(&m, text, size, 0, tokens);
    if (window % PIECE || n < window * windows + 1 || from >= window)
        return fprintf(stderr,
                       "adapt: the text has %d tokens; windows must be multiples of 64 and fit into it\n", n),
               1;
    float *logits = (float *)bench_alloc((size_t)PIECE * (size_t)m.vocab * sizeof *logits);
    tkv_feedback_config want;
    memset(&want, 0, sizeof want);
    want.target = (float)target / 1000.0f;
    tkv_feedback f;
    bench_must(tkv_init_feedback(&f, &want, NULL, 0), "tkv_init_feedback");
    tkv_config cfg = tkv_default_config();
    llama_kv_config(&m, &cfg);
    tkv_config exact = cfg;
    exact.tiers.hot_tokens = TKV_UNLIMITED;
    cfg.tiers.hot_tokens = 32;
    cfg.tiers.warm_tokens = TKV_OFF;
    cfg.budget.adapt = 1;
    tkv_cache *kv;
    bench_must(tkv_create(&cfg, &kv), "tkv_create");
    tkv_cache *ref;
    bench_must(tkv_create(&exact, &ref), "tkv_create");
    bench_must(tkv_set_level(kv, bench_number(argc, argv, "level", 3)), "--level");
    printf("%d windows of %d tokens, target %.3f\n", windows, window, target / 1000.0);
    for (int w = 0; w < windows; w++) {
        double lost = 0.0, truth = 0.0;
        tkv_advice a;
        tkv_seq_reset(kv, 0);
        tkv_seq_reset(ref, 0);
        for (int at = 0; at < window; at += PIECE) {
            const int *piece = tokens + w * window + at;
            const double is = read_piece(&m, kv, piece, logits), best = read_piece(&m, ref, piece, logits);
            fprintf(stderr, "\rwindow %d, token %d   ", w, at);
            if (at < from) continue;
            lost += (is - best) * PIECE / (window - from);
            truth += best * PIECE / (window - from);
            bench_must(tkv_observe_score(&f, score_of(exp(best), exp(is))), "score");
            scores++;
            bench_must(tkv_adapt_plan(kv, &f, &a), "tkv_adapt_plan");
            if (a.kind == TKV_ADVICE_KEEP) continue;
            bench_clear_line();
            printf("  after %3d scores: mean %.4f of %d, now level %d, %d hot tokens: %s\n", scores,
                   (double)a.mean, a.samples, a.level, a.hot_tokens, a.reason);
        }
        tkv_layer_info layer_info;
        bench_must(tkv_get_layer(kv, 0, 0, &layer_info), "tkv_get_layer");
        bench_must(tkv_get_feedback(&f, (window - from) / PIECE, &info), "tkv_get_feedback");
        bench_clear_line();
        printf("window %2d: perplexity %.3f, exact %.3f (%+.2f %%); mean score %.4f; now %s/%s\n", w,
               exp(truth + lost), exp(truth), 100.0 * (exp(lost) - 1.0), (double)info.average,
               tkv_get_name(TKV_NAME_FORMAT, layer_info.format[TKV_TIER_ARCHIVE].k),
               tkv_get_name(TKV_NAME_FORMAT, layer_info.format[TKV_TIER_ARCHIVE].v));
        fflush(stdout);
    }
    tkv_destroy(kv);
    tkv_destroy(ref);
    free(logits);
    free(tokens);
    free(text);
    llama_free(&m);
    return 0;
}
