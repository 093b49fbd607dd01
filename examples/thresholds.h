/*
 * thresholds.h - a threshold store in a file: the plans of tiers that were good for a model, with their scores. It adds
 * to program.h. In this order: a file, the plan of a run, its score.
 *
 *     plan_store store;
 *     store_open(&store, "plans.txt", model, context);    reads the file; a missing file is an empty store
 *     store_apply(&store, &cfg);                          the nearest plan, if the options give none
 *     ... run ...
 *     store_save(&store, &cfg, kv, score);                the plan of this run and its score
 *
 * An error in the file ends the program with one sentence and leaves the file.
 */
#ifndef EXAMPLE_THRESHOLDS_H
#define EXAMPLE_THRESHOLDS_H

#include "program.h"

typedef struct plan_store {
    tkv_thresholds entries; /* with space for one more than the file has */
    const char *path;
    char model[TKV_MODEL_NAME]; /* name of the model's file, cut to 63 bytes */
    int context;
} plan_store;

/* >>a file */
static inline int file_is_missing(const char *path) {
    FILE *f = fopen(path, "rb");
    if (f) fclose(f);
    return !f && errno == ENOENT;
}

static inline void store_open(plan_store *s, const char *path, const char *model, int context) {
    char reason[200];
    size_t size = 0;
    int n = 1;
    memset(s, 0, sizeof *s);
    s->path = path;
    s->context = context;
    for (const char *at = model; *at; at++)
        if (*at == '/' || *at == '\\') model = at + 1;
    snprintf(s->model, sizeof s->model, "%s", model);
    char *text = (char *)llama_read_file(path, &size);
    if (!text && !file_is_missing(path)) fail("cannot read %s", path);
    for (size_t i = 0; i < size; i++) n += text[i] == '\n'; /* at least one more than entries */
    s->entries.entry = (tkv_threshold *)allocate((size_t)n, sizeof *s->entries.entry);
    s->entries.capacity = n;
    if (text && tkv_parse_thresholds(&s->entries, text, size, reason, sizeof reason) != TKV_OK)
        fail("%s: %s", path, reason);
    free(text);
}

static inline void store_write(const plan_store *s) {
    size_t size = 0;
    if (tkv_print_thresholds(&s->entries, NULL, 0, &size) != TKV_OK) fail("%s: no text", s->path);
    char *text = (char *)allocate(size, 1);
    (void)tkv_print_thresholds(&s->entries, text, size, NULL); /* cannot fail: the size is right */
    save_file f = begin_file(s->path);
    fputs(text, f.out);
    end_file(&f);
    free(text);
}

/* >>the plan of a run */
static inline int has_own_plan(const tkv_config *cfg) {
    const tkv_tiers_config *t = &cfg->tiers;
    return t->hot_tokens || t->warm_tokens || t->archive.k != TKV_FORMAT_DEFAULT ||
           t->archive.v != TKV_FORMAT_DEFAULT || cfg->layers;
}

/* Applies the nearest plan of the store, unless the options give a plan. */
static inline void store_apply(const plan_store *s, tkv_config *cfg) {
    tkv_threshold found;
    char reason[200], archive[40];
    if (has_own_plan(cfg) ||
        tkv_find_thresholds(&s->entries, s->model, TKV_ALL_LAYERS, s->context, &found, 1, NULL) != TKV_OK)
        return;
    if (tkv_apply_threshold(cfg, NULL, &found, reason, sizeof reason) != TKV_OK)
        fail("%s: %s", s->path, reason);
    fprintf(stderr, PROGRAM ": the plan of %s for %s tokens: archive %s, score %.4f of %d run%s\n", s->path,
            commas(found.context), pair_name(&cfg->tiers.archive, archive, sizeof archive),
            (double)found.score, found.samples, found.samples == 1 ? "" : "s");
}

/* Adds the plan that the cache has now. The score of an equal plan is the mean over its runs; another plan of this
 * model and context is replaced. */
static inline void store_save(plan_store *s, const tkv_config *cfg, const tkv_cache *kv, float score) {
    tkv_threshold e, old;
    tkv_layer_info layer;
    memset(&e, 0, sizeof e);
    if (tkv_get_layer(kv, 0, 0, &layer) != TKV_OK) fail("%s: layer 0 has no cache", s->path);
    memcpy(e.model, s->model, sizeof e.model);
    e.layer = TKV_ALL_LAYERS;
    e.context = s->context;
    e.hot_tokens = cfg->tiers.hot_tokens;
    e.warm_tokens = cfg->tiers.warm_tokens;
    e.archive = layer.format[TKV_TIER_ARCHIVE]; /* a level of the cache may have changed it */
    e.score = score;
    e.samples = 1;
    if (tkv_find_thresholds(&s->entries, e.model, e.layer, e.context, &old, 1, NULL) == TKV_OK &&
        old.context == e.context && old.hot_tokens == e.hot_tokens && old.warm_tokens == e.warm_tokens &&
        old.archive.k == e.archive.k && old.archive.v == e.archive.v && old.samples < INT_MAX) {
        e.samples = old.samples + 1;
        e.score = old.score + (score - old.score) / (float)e.samples;
    }
    if (tkv_put_threshold(&s->entries, &e) != TKV_OK) fail("%s: no entry for \"%s\"", s->path, s->model);
    store_write(s);
    printf("  thresholds  %s: this plan has a score of %.4f, the mean of %d run%s\n", s->path,
           (double)e.score, e.samples, e.samples == 1 ? "" : "s");
}

/* >>its score */
/* Returns whether the meter, or else two perplexities of the same text, give a score. */
static inline int score_run(const tkv_cache *kv, int has_meter, double exact, double own, float *score) {
    tkv_quality_info meter;
    tkv_score_params p;
    memset(&p, 0, sizeof p);
    p.source = has_meter ? TKV_SCORE_METER : TKV_SCORE_PERPLEXITY;
    p.base = exact;
    p.value = own;
    if (has_meter && tkv_get_quality(kv, TKV_ALL_LAYERS, &meter) == TKV_OK) p.meter = &meter;
    return tkv_compute_score(&p, score) == TKV_OK;
}

#endif /* EXAMPLE_THRESHOLDS_H */
