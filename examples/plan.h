/*
 * plan.h - a cache's plan in words: sinks=4 hot=64:f16 warm=448:a40/r40 archive=a30/r20. generate takes them
 * as options (--archive a30/r20), bench/quality as plans. Include tieredkv.h first.
 *
 *     wrong = plan_word(&cfg, "archive", "a30/r20");       NULL, or what is wrong with it
 *     wrong = plan_three(&cfg, "64,448:a40/r40,a30/r20");  hot, warm and archive at once
 *
 * Later words win, so a preset comes first. The config's other rules are tkv_validate_config's. The word
 * layers puts an array of exceptions into the config, which stay whatever comes later; plan_free gives it back.
 * When n_layers is known, plan_too_far says whether one is beyond it.
 */
#ifndef TKV_PLAN_H
#define TKV_PLAN_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PLAN_HELP                                                                                            \
    "  preset NAME        a plan with a name; what follows changes it\n"                                     \
    "  sinks N            the first tokens, exact for ever (4)\n"                                            \
    "  hot N:FORMAT       the newest (64:f16)\n"                                                             \
    "  warm N:FORMAT      the next older, N may be none or all (448:a40/r40)\n"                              \
    "  archive FORMAT     the others (a30/r30)\n"                                                            \
    "  layers N-M:FORMAT  the archive of these layers, or of one, N:FORMAT\n"                                \
    "  group N            values that share a scale in q8 and kivi: 64 or 32 (64)\n"                         \
    "  unit N             channels that get bits together in a: 4 or 16 (4)\n"                               \
    "  fit HOW            scales of q8, kivi and squat: clip, norm, unbiased, clip+norm ...\n"               \
    "  rotate SIDES       k, v or k+v of int, fp8 and fp4 behind a rotation\n"                               \
    "  center 1           in the same formats, each channel's mean in a block of K apart\n"                  \
    "  squat_block N      channels that squat codes together: 16 or 64 (16)\n"                               \
    "  subspaces N        parts of a token in subspace formats: 1 to 16 (4)\n"                               \
    "  kvquant HOW        of kvquant formats: post-rope, uniform, norm, dense, norm+dense ...\n"             \
    "  precise 1          two planes of queries and of weights\n"                                            \
    "  evict HOW:N        at most N tokens of a layer stay: sliding, h2o, snapkv, pyramidkv, tova, knorm,\n" \
    "                     keydiff, scissorhands, fifo, random, scores (tkv_evict_policy)\n"                  \
    "  anchors N          tokens of a layer that got most attention stay exact (none)\n"                     \
    "  every N            one query in N tells what it looked at, for those that want to know\n"             \
    "FORMAT is one for K and V, or two as in kivi2/kivi4.\n"

static inline void plan_print_names(void) {
    int i;
    printf("Presets:");
    for (i = 0; tkv_get_name(TKV_NAME_PRESET, i); i++) printf(" %s", tkv_get_name(TKV_NAME_PRESET, i));
    printf("\nFormats:");
    for (i = 1; i < TKV_FORMAT_COUNT; i++) printf(" %s", tkv_get_name(TKV_NAME_FORMAT, (tkv_format)i));
    printf("\n");
}

/* >>values */
static inline int plan_count(const char *s, size_t n, int *count) { /* the first n characters are a number */
    if (n == 0 || n > 8 || strspn(s, "0123456789") < n) return 0;
    *count = atoi(s);
    return 1;
}

static inline int plan_tokens(const char *s, size_t n, int *tokens) { /* 448, none, all */
    if (n == 4 && strncmp(s, "none", n) == 0) *tokens = TKV_OFF;
    else if (n == 3 && strncmp(s, "all", n) == 0) *tokens = TKV_UNLIMITED;
    else if (!plan_count(s, n, tokens)) return 0;
    else if (*tokens == 0) *tokens = TKV_OFF; /* to the library 0 is the default */
    return 1;
}

static inline tkv_format plan_format_named(
    const char *name) { /* TKV_FORMAT_DEFAULT: there is no such format */
    int value = TKV_FORMAT_DEFAULT;
    (void)tkv_find_name(TKV_NAME_FORMAT, name, &value);
    return (tkv_format)value;
}

/* N, N:FORMAT, FORMAT; tokens NULL: this tier has no length. */
static inline const char *plan_tier(const char *s, int *tokens, tkv_format_pair *pair) {
    static char unknown[64];
    size_t n = strcspn(s, ":"), i;
    if (tokens && plan_tokens(s, n, tokens)) {
        if (s[n] == 0) return NULL;
        s += n + 1;
    }
    for (i = 0; i < 2; i++) {
        char name[32];
        tkv_format f;
        n = strcspn(s, "/");
        snprintf(name, sizeof name, "%.*s", (int)(n < 31 ? n : 31), s);
        f = plan_format_named(name);
        if (f == TKV_FORMAT_DEFAULT) {
            snprintf(unknown, sizeof unknown, "there is no format \"%s\"", name);
            return unknown;
        }
        if (i == 0) pair->k = f;
        pair->v = f;
        if (s[n] == 0) return NULL;
        s += n + 1;
    }
    return "more than two formats";
}

/* N:FORMAT, N-M:FORMAT */
static inline const char *plan_layers(tkv_config *cfg, const char *s) {
    const size_t n = strcspn(s, "-:"), m = strcspn(s, ":");
    tkv_layer_config *layers;
    const char *wrong;
    tkv_format_pair pair;
    int first, last;
    if (s[m] != ':' || !plan_count(s, n, &first) || first > 4095) return "it wants N:FORMAT or N-M:FORMAT";
    last = first;
    if (n < m && (!plan_count(s + n + 1, m - n - 1, &last) || last < first || last > 4095))
        return "it wants N:FORMAT or N-M:FORMAT";
    wrong = plan_tier(s + m + 1, NULL, &pair);
    if (wrong) return wrong;
    memcpy(&layers, &cfg->layers, sizeof layers);
    if (!layers) layers = (tkv_layer_config *)calloc(4096, sizeof *layers); /* as many as a cache can have */
    if (!layers) return "out of memory";
    for (; first <= last; first++) layers[first].archive = pair;
    cfg->layers = layers;
    return NULL;
}

static inline const char *plan_too_far(const tkv_config *cfg) {
    int i;
    for (i = cfg->model.n_layers; cfg->layers && i < 4096; i++)
        if (cfg->layers[i].archive.k != TKV_FORMAT_DEFAULT) return "layers: the model has fewer";
    return NULL;
}

static inline void plan_free(tkv_config *cfg) {
    void *layers;
    memcpy(&layers, &cfg->layers, sizeof layers);
    free(layers);
    cfg->layers = NULL;
}

/* Names with + between them; bit i is the i-th of `names`, which has a NULL at its end. */
static inline int plan_bits(const char *s, const char *const *names, int *bits) {
    for (*bits = 0;; s++) {
        const size_t n = strcspn(s, "+");
        int i = 0;
        while (names[i] && (strlen(names[i]) != n || strncmp(s, names[i], n) != 0)) i++;
        if (!names[i]) return 0;
        *bits |= 1 << i;
        s += n;
        if (*s == 0) return 1;
    }
}

static inline const char *plan_evict(tkv_config *cfg, const char *s) { /* sliding:1024 */
    const size_t n = strcspn(s, ":");
    char name[32];
    int value;
    if (n >= sizeof name || s[n] == 0) return "it wants HOW:N, such as sliding:1024";
    memcpy(name, s, n);
    name[n] = 0;
    if (tkv_find_name(TKV_NAME_EVICT_POLICY, name, &value) != TKV_OK) return "there is no such policy";
    cfg->evict.policy = (tkv_evict_policy)value;
    return plan_count(s + n + 1, strlen(s + n + 1), &cfg->evict.keep_tokens) && cfg->evict.keep_tokens
               ? NULL
               : "it wants a number of tokens behind the colon";
}

/* >>words */
static inline int *plan_number(tkv_config *cfg, const char *word) { /* of a word that is a plain number */
    if (strcmp(word, "group") == 0) return &cfg->format.group_size;
    if (strcmp(word, "unit") == 0) return &cfg->format.allocation_unit;
    if (strcmp(word, "center") == 0) return &cfg->format.center_k;
    if (strcmp(word, "squat_block") == 0) return &cfg->format.squat_block;
    if (strcmp(word, "subspaces") == 0) return &cfg->format.subspaces;
    if (strcmp(word, "precise") == 0) return &cfg->host.precise;
    if (strcmp(word, "every") == 0) return &cfg->importance.sample_every;
    if (strcmp(word, "anchors") == 0) return &cfg->tiers.n_anchors;
    return NULL;
}

static inline int plan_knows(const char *word) {
    static const char *const words[] = {"preset", "sinks", "hot",    "warm",    "archive",
                                        "layers", "fit",   "rotate", "kvquant", "evict"};
    tkv_config cfg;
    size_t i;
    for (i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i]) == 0) return 1;
    return plan_number(&cfg, word) != NULL;
}

static inline const char *plan_word(tkv_config *cfg, const char *word, const char *value) {
    static const char *const fits[] = {"clip", "norm", "unbiased", NULL}, *const sides[] = {"k", "v", NULL};
    static const char *const kvquant[] = {"post-rope", "uniform", "norm", "dense", NULL};
    int *number = plan_number(cfg, word);
    if (number) return plan_count(value, strlen(value), number) ? NULL : "it wants a number";
    if (strcmp(word, "preset") == 0)
        return tkv_apply_preset(cfg, value) == TKV_OK ? NULL : "there is no such preset";
    if (strcmp(word, "hot") == 0) return plan_tier(value, &cfg->tiers.hot_tokens, &cfg->tiers.hot);
    if (strcmp(word, "warm") == 0) return plan_tier(value, &cfg->tiers.warm_tokens, &cfg->tiers.warm);
    if (strcmp(word, "archive") == 0) return plan_tier(value, NULL, &cfg->tiers.archive);
    if (strcmp(word, "layers") == 0) return plan_layers(cfg, value);
    if (strcmp(word, "evict") == 0) return plan_evict(cfg, value);
    if (strcmp(word, "sinks") == 0)
        return plan_tokens(value, strlen(value), &cfg->tiers.sink_tokens) ? NULL : "bad number of sinks";
    if (strcmp(word, "fit") == 0)
        return plan_bits(value, fits, &cfg->format.fit) ? NULL
                                                        : "it is clip, norm or unbiased, with + between them";
    if (strcmp(word, "rotate") == 0)
        return plan_bits(value, sides, &cfg->format.rotate) ? NULL : "it is k, v or k+v";
    if (strcmp(word, "kvquant") == 0)
        return plan_bits(value, kvquant, &cfg->format.kvquant)
                   ? NULL
                   : "it is post-rope, uniform, norm, dense, with +";
    return "there is no such word in a plan";
}

/* HOT,WARM,ARCHIVE, each as behind its word; empty or missing ones stay. */
static inline const char *plan_three(tkv_config *cfg, const char *text) {
    static const char *const tiers[] = {"hot", "warm", "archive"};
    const char *wrong = NULL;
    size_t n, i;
    for (i = 0; !wrong; i++, text += n + 1) {
        char value[64];
        n = strcspn(text, ",");
        if (i == 3) return "it has more than three parts";
        if (n >= sizeof value) return "a part is too long";
        memcpy(value, text, n);
        value[n] = 0;
        if (n) wrong = plan_word(cfg, tiers[i], value);
        if (text[n] == 0) break;
    }
    return wrong;
}

#endif /* TKV_PLAN_H */
