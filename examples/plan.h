/*
 * plan.h - a cache's plan in words, such as sinks=4 hot=64:f16 warm=448:a40/r40 archive=a30/r20. The examples take
 * the words as options (--archive a30/r20), and bench/quality takes them as plans. Include tieredkv.h first.
 *
 *     wrong = plan_word(&cfg, "archive", "a30/r20");       sets one word; returns NULL, or a text about the error
 *     wrong = plan_three(&cfg, "64,448:a40/r40,a30/r20");  sets hot, warm and archive at once
 *     wrong = plan_words(&cfg, "preset=compact sinks=8");  sets all words of a plan
 *
 * A later word overrides an earlier one, so put a preset first. tkv_validate_config checks the whole config. The word
 * `layers` allocates cfg.layers; plan_free frees it. Settings of a layer override other words, whatever their order.
 * Once n_layers is known, plan_too_far checks the numbers of those layers.
 */
#ifndef TKV_PLAN_H
#define TKV_PLAN_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PLAN_HELP                                                                                            \
    "  preset NAME        sets a named plan; later words change it\n"                                        \
    "  sinks N            first tokens, always exact (4)\n"                                                  \
    "  hot N:FORMAT       newest tokens (64:f16)\n"                                                          \
    "  warm N:FORMAT      tokens before the hot ones; N may be none or all (448:a40/r40)\n"                  \
    "  archive FORMAT     all older tokens (a30/r30)\n"                                                      \
    "  layers N-M:FORMAT  archive of layers N to M; N:FORMAT: of layer N\n"                                  \
    "  group N            values that share a scale in q8 and kivi: 64 or 32 (64)\n"                         \
    "  unit N             channels that get equal bits in a formats: 4 or 16 (4)\n"                          \
    "  fit HOW            scales of q8, kivi and squat: clip, norm, unbiased, clip+norm ...\n"               \
    "  rotate SIDES       int, fp8 and fp4 rotate this side before coding: k, v or k+v\n"                    \
    "  center 1           int, fp8 and fp4 store K's channel means apart\n"                                  \
    "  squat_block N      channels that squat codes together: 16 or 64 (16)\n"                               \
    "  subspaces N        parts of a token in subspace formats: 1 to 16 (4)\n"                               \
    "  kvquant HOW        options of kvquant: post-rope, uniform, norm, dense, uniform-k ..., joined by +\n" \
    "  kvquant_outliers N outliers of a token, in thousandths: 1 to 30 (10)\n"                               \
    "  int_bits N         bits of a code in int8 and int4: 2 to 8\n"                                         \
    "  k_scales N, v_scales N   values with one scale in q8, kivi and int: 0 a group, 1 a token, 2 a "       \
    "channel\n"                                                                                              \
    "  unrotated 1        subspace formats do not rotate\n"                                                  \
    "  precise 1          attention uses hi and lo limbs of queries and weights in every format\n"           \
    "  evict HOW:N        evicts tokens, so that each layer keeps N: sliding, h2o, snapkv, pyramidkv,\n"     \
    "                     tova, knorm, keydiff, scissorhands, fifo, random, scores (tkv_evict_policy)\n"     \
    "  anchors N          tokens of a layer with most attention stay exact (none)\n"                         \
    "  adapt 1            a ladder around the plan, for target (cfg.budget.adapt)\n"                         \
    "  meter N            KV heads that the quality meter watches (none)\n"                                  \
    "  copies N           coded tokens that it keeps exact for each of them (2048)\n"                        \
    "  meter_every N      positions per measurement of a head\n"                                             \
    "  target N           least score of the meter in ten thousandths, which the level follows (none)\n"     \
    "  promote N:SCORE    once in N tokens brings blocks of this importance or more back (cfg.promotion)\n"  \
    "  importance HOW     how scores add up: hybrid, accumulation, heavy_hitter, recency, persistence\n"     \
    "  every N            samples one query in N for the attention scores of tokens\n"                       \
    "FORMAT is one format for K and V, or two, as in kivi2/kivi4.\n"

static inline void plan_print_names(void) {
    printf("Presets:");
    for (int i = 0; tkv_get_name(TKV_NAME_PRESET, i); i++) printf(" %s", tkv_get_name(TKV_NAME_PRESET, i));
    printf("\nFormats:");
    for (int i = 1; i < TKV_FORMAT_COUNT; i++) printf(" %s", tkv_get_name(TKV_NAME_FORMAT, i));
    printf("\n");
}

/* >>values */
static inline int plan_count(const char *s, size_t n,
                             int *count) { /* parses the first n characters as a number; 1 if they are one */
    if (n == 0 || n > 8 || strspn(s, "0123456789") < n) return 0;
    *count = atoi(s);
    return 1;
}

static inline int plan_tokens(const char *s, size_t n, int *tokens) { /* 448, none or all */
    if (n == 4 && strncmp(s, "none", n) == 0) *tokens = TKV_OFF;
    else if (n == 3 && strncmp(s, "all", n) == 0) *tokens = TKV_UNLIMITED;
    else if (!plan_count(s, n, tokens)) return 0;
    else if (*tokens == 0) *tokens = TKV_OFF; /* in the library, 0 means the default */
    return 1;
}

static inline tkv_format plan_format_named(const char *name) { /* TKV_FORMAT_DEFAULT: the name is unknown */
    int value = TKV_FORMAT_DEFAULT;
    (void)tkv_find_name(TKV_NAME_FORMAT, name, &value);
    return (tkv_format)value;
}

/* Parses N, N:FORMAT or FORMAT. tokens NULL: this tier has no length. */
static inline const char *plan_tier(const char *s, int *tokens, tkv_format_pair *pair) {
    static char unknown[64];
    size_t n = strcspn(s, ":"), i;
    if (tokens && plan_tokens(s, n, tokens)) {
        if (s[n] == 0) return NULL;
        s += n + 1;
    }
    for (i = 0; i < 2; i++) {
        n = strcspn(s, "/");
        char name[32];
        snprintf(name, sizeof name, "%.*s", (int)(n < 31 ? n : 31), s);
        tkv_format f = plan_format_named(name);
        if (f == TKV_FORMAT_DEFAULT) {
            snprintf(unknown, sizeof unknown, "unknown format \"%s\"", name);
            return unknown;
        }
        if (i == 0) pair->k = f;
        pair->v = f;
        if (s[n] == 0) return NULL;
        s += n + 1;
    }
    return "it has more than two formats";
}

/* Parses N:FORMAT or N-M:FORMAT. */
static inline const char *plan_layers(tkv_config *cfg, const char *s) {
    const size_t n = strcspn(s, "-:"), m = strcspn(s, ":");
    int first;
    if (s[m] != ':' || !plan_count(s, n, &first) || first > 4095) return "it must be N:FORMAT or N-M:FORMAT";
    int last = first;
    if (n < m && (!plan_count(s + n + 1, m - n - 1, &last) || last < first || last > 4095))
        return "it must be N:FORMAT or N-M:FORMAT";
    tkv_format_pair pair;
    const char *wrong = plan_tier(s + m + 1, NULL, &pair);
    if (wrong) return wrong;
    tkv_layer_config *layers;
    memcpy(&layers, &cfg->layers, sizeof layers);
    if (!layers) layers = (tkv_layer_config *)calloc(4096, sizeof *layers); /* the most layers of a cache */
    if (!layers) return "out of memory";
    for (; first <= last; first++) layers[first].archive = pair;
    cfg->layers = layers;
    return NULL;
}

/* Returns NULL, or a text if `layers` named a layer that the model does not have. */
static inline const char *plan_too_far(const tkv_config *cfg) {
    for (int i = cfg->model.n_layers; cfg->layers && i < 4096; i++)
        if (cfg->layers[i].archive.k != TKV_FORMAT_DEFAULT) return "layers: the model has fewer";
    return NULL;
}

static inline void plan_free(tkv_config *cfg) {
    void *layers;
    memcpy(&layers, &cfg->layers, sizeof layers);
    free(layers);
    cfg->layers = NULL;
}

/* Parses names joined by +. Bit i of *bits is names[i]; a NULL ends `names`. Returns 0 for an unknown name. */
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
    if (n >= sizeof name || s[n] == 0) return "it must be HOW:N, such as sliding:1024";
    memcpy(name, s, n);
    name[n] = 0;
    int value;
    if (tkv_find_name(TKV_NAME_EVICT_POLICY, name, &value) != TKV_OK) return "unknown policy";
    cfg->evict.policy = (tkv_evict_policy)value;
    return plan_count(s + n + 1, strlen(s + n + 1), &cfg->evict.keep_tokens) && cfg->evict.keep_tokens
               ? NULL
               : "it must have a number of tokens after the colon";
}

/* >>words */
static inline int *plan_number(
    tkv_config *cfg, const char *word) { /* the field of a word whose value is a number; else NULL */
    if (strcmp(word, "group") == 0) return &cfg->format.group_size;
    if (strcmp(word, "unit") == 0) return &cfg->format.allocation_unit;
    if (strcmp(word, "center") == 0) return &cfg->format.center_k;
    if (strcmp(word, "squat_block") == 0) return &cfg->format.squat_block;
    if (strcmp(word, "subspaces") == 0) return &cfg->format.subspaces;
    if (strcmp(word, "kvquant_outliers") == 0) return &cfg->format.kvquant_outliers;
    if (strcmp(word, "int_bits") == 0) return &cfg->format.int_bits;
    if (strcmp(word, "k_scales") == 0) return &cfg->format.k_scales;
    if (strcmp(word, "v_scales") == 0) return &cfg->format.v_scales;
    if (strcmp(word, "unrotated") == 0) return &cfg->format.unrotated;
    if (strcmp(word, "precise") == 0) return &cfg->host.precise;
    if (strcmp(word, "every") == 0) return &cfg->importance.sample_every;
    if (strcmp(word, "anchors") == 0) return &cfg->tiers.n_anchors;
    if (strcmp(word, "adapt") == 0) return &cfg->budget.adapt;
    if (strcmp(word, "meter") == 0) return &cfg->meter.heads;
    if (strcmp(word, "copies") == 0) return &cfg->meter.tokens;
    if (strcmp(word, "meter_every") == 0) return &cfg->meter.every;
    return NULL;
}

static inline int plan_knows(const char *word) {
    static const char *const words[] = {"preset", "sinks",  "hot",     "warm",  "archive", "layers",
                                        "fit",    "rotate", "kvquant", "evict", "target",  "promote"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i]) == 0) return 1;
    tkv_config cfg;
    return plan_number(&cfg, word) != NULL;
}

/* The sentence for an unknown preset, with the names of all. */
static inline const char *plan_presets(void) {
    static char sentence[512];
    size_t n = (size_t)snprintf(sentence, sizeof sentence, "unknown preset; there are");
    for (int i = 0; tkv_get_name(TKV_NAME_PRESET, i) && n < sizeof sentence; i++)
        n += (size_t)snprintf(sentence + n, sizeof sentence - n, " %s", tkv_get_name(TKV_NAME_PRESET, i));
    return sentence;
}

static inline const char *plan_word(tkv_config *cfg, const char *word, const char *value) {
    static const char *const fits[] = {"clip", "norm", "unbiased", NULL}, *const sides[] = {"k", "v", NULL};
    static const char *const kvquant[] = {"post-rope", "uniform",   "norm", "dense",
                                          "uniform-k", "uniform-v", NULL};
    int *number = plan_number(cfg, word);
    if (number) return plan_count(value, strlen(value), number) ? NULL : "it must be a number";
    if (strcmp(word, "preset") == 0) return tkv_apply_preset(cfg, value) == TKV_OK ? NULL : plan_presets();
    if (strcmp(word, "hot") == 0) return plan_tier(value, &cfg->tiers.hot_tokens, &cfg->tiers.hot);
    if (strcmp(word, "warm") == 0) return plan_tier(value, &cfg->tiers.warm_tokens, &cfg->tiers.warm);
    if (strcmp(word, "archive") == 0) return plan_tier(value, NULL, &cfg->tiers.archive);
    if (strcmp(word, "layers") == 0) return plan_layers(cfg, value);
    if (strcmp(word, "evict") == 0) return plan_evict(cfg, value);
    if (strcmp(word, "promote") == 0) {
        const size_t n = strcspn(value, ":");
        if (!plan_count(value, n, &cfg->promotion.every) || !value[n]) return "it must be N:SCORE, as 64:2.5";
        cfg->promotion.threshold = (float)atof(value + n + 1);
        return NULL;
    }
    if (strcmp(word, "importance") == 0) {
        int strategy;
        if (tkv_find_name(TKV_NAME_IMPORTANCE, value, &strategy) != TKV_OK) return "unknown strategy";
        cfg->importance.strategy = (tkv_importance_strategy)strategy;
        return NULL;
    }
    if (strcmp(word, "target") == 0) {
        int target;
        if (!plan_count(value, strlen(value), &target)) return "it must be a number";
        cfg->meter.target = (float)target / 10000.0f;
        return NULL;
    }
    if (strcmp(word, "sinks") == 0)
        return plan_tokens(value, strlen(value), &cfg->tiers.sink_tokens) ? NULL
                                                                          : "it must be a number or none";
    if (strcmp(word, "fit") == 0)
        return plan_bits(value, fits, &cfg->format.fit) ? NULL
                                                        : "it must be clip, norm or unbiased, joined by +";
    if (strcmp(word, "rotate") == 0)
        return plan_bits(value, sides, &cfg->format.rotate) ? NULL : "it must be k, v or k+v";
    if (strcmp(word, "kvquant") == 0)
        return plan_bits(value, kvquant, &cfg->format.kvquant)
                   ? NULL
                   : "it must be post-rope, uniform, norm, dense, uniform-k or uniform-v, joined by +";
    return "unknown word of a plan";
}

/* Parses HOT,WARM,ARCHIVE, each with the syntax of its word. An empty or missing part changes nothing. */
static inline const char *plan_three(tkv_config *cfg, const char *text) {
    static const char *const tiers[] = {"hot", "warm", "archive"};
    const char *wrong = NULL;
    size_t n;
    for (size_t i = 0; !wrong; i++, text += n + 1) {
        n = strcspn(text, ",");
        if (i == 3) return "it has more than three parts";
        char value[64];
        if (n >= sizeof value) return "a part is too long";
        memcpy(value, text, n);
        value[n] = 0;
        if (n) wrong = plan_word(cfg, tiers[i], value);
        if (text[n] == 0) break;
    }
    return wrong;
}

/* Parses a whole plan: words joined by =, with blanks between them. A part without = is one for plan_three. */
static inline const char *plan_words(tkv_config *cfg, const char *text) {
    const char *wrong = NULL;
    char word[240];
    for (size_t n; *text && !wrong; text += n + (text[n] != 0)) {
        n = strcspn(text, " ");
        if (n >= sizeof word) return "a word is too long";
        memcpy(word, text, n);
        word[n] = 0;
        char *value = strchr(word, '=');
        if (value) *value++ = 0;
        if (n) wrong = value ? plan_word(cfg, word, value) : plan_three(cfg, word);
    }
    return wrong;
}

#endif /* TKV_PLAN_H */
