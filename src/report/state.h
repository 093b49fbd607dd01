/*
 * report/state.h - reports the state of a cache to programs, as JSON and in the text format of Prometheus
 * (tkv_print_report). A table has one row for each figure; both writers print that table. Nothing
 * here changes the cache.
 *
 * To add a figure, add a field to tkvi_figures, fill it in tkvi_figures_of, and add a row. Rows of one section
 * stand together, and so do rows of one metric. A metric whose name ends in _total is a counter, any other is a
 * gauge.
 */
#ifndef TKVI_REPORT_STATE_H
#define TKVI_REPORT_STATE_H

#ifndef TKV_NO_REPORTS

#include "report/info.h"
#include "report/text.h"

enum { TKVI_MEMORY, TKVI_TOKENS, TKVI_SEQUENCES, TKVI_BUDGET, TKVI_RECLAIM, TKVI_QUALITY, TKVI_SECTIONS };

static const char *const tkvi_section_names[TKVI_SECTIONS] = {"memory", "tokens",  "sequences",
                                                              "budget", "reclaim", "quality"};

/* All figures, copied once before printing, because readers may add to the meter meanwhile. */
typedef struct tkvi_figures {
    const tkv_cache *kv;
    const char *labels;
    int has[TKVI_SECTIONS]; /* 0: this cache does not have the section */
    tkv_memory_info memory;
    tkv_quality_info quality;
    tkv_budget_info budget;
    uint64_t sequences, most_sequences, longest; /* not empty; cfg.limits.max_seqs; tokens of the longest */
    uint64_t missing;                            /* tokens that a model must recompute */
} tkvi_figures;

static void tkvi_figure_size(tkvi_out *o, const void *at) {
    size_t x;
    memcpy(&x, at, sizeof x);
    tkvi_print_count(o, x);
}

static void tkvi_figure_count(tkvi_out *o, const void *at) {
    uint64_t x;
    memcpy(&x, at, sizeof x);
    tkvi_print_count(o, x);
}

static void tkvi_figure_int(tkvi_out *o, const void *at) {
    int x;
    memcpy(&x, at, sizeof x);
    tkvi_print_int(o, x);
}

static void tkvi_figure_float(tkvi_out *o, const void *at) {
    float x;
    memcpy(&x, at, sizeof x);
    tkvi_print_float(o, x);
}

static void tkvi_figure_double(tkvi_out *o, const void *at) {
    double x;
    memcpy(&x, at, sizeof x);
    tkvi_print_float(o, (float)x);
}

typedef struct tkvi_figure {
    int section;
    const char *name; /* in JSON */
    void (*print)(tkvi_out *o, const void *at);
    size_t offset;
    const char *metric, *labels; /* of Prometheus; NULL: no metric; no labels */
    const char *help;            /* on the first row of a metric only */
} tkvi_figure;

#define TKVI_FIGURE(section, name, print, field, metric, labels, help)                                       \
    { section, name, print, offsetof(tkvi_figures, field), metric, labels, help }
#define TKVI_BYTES(name, field, labels, help)                                                                \
    TKVI_FIGURE(TKVI_MEMORY, name, tkvi_figure_size, memory.field, "tkv_memory_bytes", labels, help)

static const tkvi_figure tkvi_figure_rows[] = {
    TKVI_BYTES("hot_codes", tier[TKV_TIER_HOT].codes, "part=\"codes\",tier=\"hot\"",
               "Bytes held, by part and tier; their sum is tkv_memory_held_bytes."),
    TKVI_BYTES("hot_metadata", tier[TKV_TIER_HOT].metadata, "part=\"metadata\",tier=\"hot\"", NULL),
    TKVI_BYTES("warm_codes", tier[TKV_TIER_WARM].codes, "part=\"codes\",tier=\"warm\"", NULL),
    TKVI_BYTES("warm_metadata", tier[TKV_TIER_WARM].metadata, "part=\"metadata\",tier=\"warm\"", NULL),
    TKVI_BYTES("archive_codes", tier[TKV_TIER_ARCHIVE].codes, "part=\"codes\",tier=\"archive\"", NULL),
    TKVI_BYTES("archive_metadata", tier[TKV_TIER_ARCHIVE].metadata, "part=\"metadata\",tier=\"archive\"",
               NULL),
    TKVI_BYTES("tables", tables, "part=\"tables\"", NULL),
    TKVI_BYTES("index", index, "part=\"index\"", NULL),
    TKVI_BYTES("scratch", scratch, "part=\"scratch\"", NULL),
    TKVI_BYTES("exact_copies", exact_copies, "part=\"exact_copies\"", NULL),
    TKVI_BYTES("states", states, "part=\"states\"", NULL),
    TKVI_BYTES("slack", slack, "part=\"slack\"", NULL),
    TKVI_FIGURE(TKVI_MEMORY, "total", tkvi_figure_size, memory.total, "tkv_memory_held_bytes", NULL,
                "Bytes held, all together."),
    TKVI_FIGURE(TKVI_MEMORY, "peak", tkvi_figure_size, memory.peak, "tkv_memory_peak_bytes", NULL,
                "Most bytes held so far."),
    TKVI_FIGURE(TKVI_MEMORY, "fp16_bytes", tkvi_figure_size, memory.fp16_bytes, "tkv_memory_fp16_bytes", NULL,
                "Bytes of the same tokens in plain FP16."),
    TKVI_FIGURE(TKVI_MEMORY, "ratio", tkvi_figure_double, memory.ratio, "tkv_memory_ratio", NULL,
                "FP16 bytes over bytes held."),
    TKVI_FIGURE(TKVI_MEMORY, "ratio_f32", tkvi_figure_double, memory.ratio_f32, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_TOKENS, "hot", tkvi_figure_size, memory.tier[TKV_TIER_HOT].tokens, "tkv_tokens",
                "tier=\"hot\"",
                "Tokens held, by tier, summed over layers; those that sequences share count once."),
    TKVI_FIGURE(TKVI_TOKENS, "warm", tkvi_figure_size, memory.tier[TKV_TIER_WARM].tokens, "tkv_tokens",
                "tier=\"warm\"", NULL),
    TKVI_FIGURE(TKVI_TOKENS, "archive", tkvi_figure_size, memory.tier[TKV_TIER_ARCHIVE].tokens, "tkv_tokens",
                "tier=\"archive\"", NULL),
    TKVI_FIGURE(TKVI_TOKENS, "offloaded", tkvi_figure_size, memory.offloaded.tokens, "tkv_tokens_offloaded",
                NULL, "Tokens outside RAM; they count in their tier as well."),
    TKVI_FIGURE(TKVI_TOKENS, "discarded", tkvi_figure_count, missing, "tkv_tokens_discarded", NULL,
                "Tokens that a model must compute again; they are in no tier."),
    TKVI_FIGURE(TKVI_SEQUENCES, "count", tkvi_figure_count, sequences, "tkv_sequences", NULL,
                "Sequences that exist."),
    TKVI_FIGURE(TKVI_SEQUENCES, "most", tkvi_figure_count, most_sequences, "tkv_sequences_max", NULL,
                "Largest number of sequences."),
    TKVI_FIGURE(TKVI_SEQUENCES, "longest", tkvi_figure_count, longest, "tkv_sequence_tokens_max", NULL,
                "Tokens of the longest sequence."),
    TKVI_FIGURE(TKVI_BUDGET, "bytes", tkvi_figure_size, budget.budget, "tkv_budget_bytes", NULL,
                "Limit of the bytes that the cache holds; 0: none."),
    TKVI_FIGURE(TKVI_BUDGET, "used", tkvi_figure_size, budget.used, "tkv_budget_used_bytes", NULL,
                "Bytes that count against the budget."),
    TKVI_FIGURE(TKVI_BUDGET, "level", tkvi_figure_int, budget.level, "tkv_level", NULL,
                "Level of the ladder, 0 the loosest."),
    TKVI_FIGURE(TKVI_BUDGET, "levels", tkvi_figure_int, budget.n_levels, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_BUDGET, "pressure", tkvi_figure_float, budget.pressure.average, "tkv_pressure_ratio",
                NULL, "Moving average of bytes over the budget."),
    TKVI_FIGURE(TKVI_BUDGET, "trend", tkvi_figure_float, budget.pressure.trend, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_BUDGET, "samples_left", tkvi_figure_float, budget.pressure.samples_left, NULL, NULL,
                NULL),
    TKVI_FIGURE(TKVI_BUDGET, "tightened", tkvi_figure_count, budget.pressure.tightened,
                "tkv_levels_tightened_total", NULL, "Levels down the ladder."),
    TKVI_FIGURE(TKVI_BUDGET, "relaxed", tkvi_figure_count, budget.pressure.relaxed,
                "tkv_levels_relaxed_total", NULL, "Levels up the ladder."),
    TKVI_FIGURE(TKVI_BUDGET, "demoted", tkvi_figure_count, budget.demoted, "tkv_blocks_demoted_total", NULL,
                "Blocks that were recoded."),
    TKVI_FIGURE(TKVI_BUDGET, "pending", tkvi_figure_count, budget.pending, "tkv_blocks_pending", NULL,
                "Blocks that the present level would still recode."),
    TKVI_FIGURE(TKVI_BUDGET, "refused", tkvi_figure_count, budget.refused, "tkv_budget_refused_total", NULL,
                "Calls refused because the budget was full."),
    TKVI_FIGURE(TKVI_RECLAIM, "evicted", tkvi_figure_count, budget.evicted, "tkv_tokens_evicted_total", NULL,
                "Tokens that were evicted, counted per layer."),
    TKVI_FIGURE(TKVI_RECLAIM, "offloaded", tkvi_figure_count, budget.offloaded, "tkv_blocks_offloaded_total",
                NULL, "Blocks that were offloaded."),
    TKVI_FIGURE(TKVI_RECLAIM, "unwritten", tkvi_figure_count, budget.unwritten, "tkv_blocks_unwritten_total",
                NULL, "Blocks and exact copies that the store failed to write."),
    TKVI_FIGURE(TKVI_RECLAIM, "promoted", tkvi_figure_count, budget.promoted, "tkv_blocks_promoted_total",
                NULL, "Blocks that were brought back into RAM or to a better format."),
    TKVI_FIGURE(TKVI_RECLAIM, "discarded", tkvi_figure_count, budget.discarded, "tkv_blocks_discarded_total",
                NULL, "Blocks that were discarded, to be recomputed."),
    TKVI_FIGURE(TKVI_RECLAIM, "recomputed", tkvi_figure_count, budget.recomputed,
                "tkv_blocks_recomputed_total", NULL, "Blocks that were recomputed."),
    TKVI_FIGURE(TKVI_RECLAIM, "thinned", tkvi_figure_count, budget.thinned, "tkv_states_thinned_total", NULL,
                "States that were thinned out."),
    TKVI_FIGURE(TKVI_QUALITY, "samples", tkvi_figure_count, quality.samples, "tkv_quality_samples_total",
                NULL, "Comparisons of attention with exact keys and values."),
    TKVI_FIGURE(TKVI_QUALITY, "coverage", tkvi_figure_double, quality.coverage, "tkv_quality_coverage", NULL,
                "Share of the coded keys that had an exact copy."),
    TKVI_FIGURE(TKVI_QUALITY, "output_error", tkvi_figure_double, quality.output_error,
                "tkv_quality_output_error", NULL, "Mean squared error of attention's output, relative."),
    TKVI_FIGURE(TKVI_QUALITY, "kl", tkvi_figure_double, quality.kl, "tkv_quality_kl_nats", NULL,
                "Mean KL divergence of attention's weights."),
    TKVI_FIGURE(TKVI_QUALITY, "kl_max", tkvi_figure_double, quality.kl_max, "tkv_quality_kl_max_nats", NULL,
                "Largest KL divergence of attention's weights."),
    TKVI_FIGURE(TKVI_QUALITY, "top1", tkvi_figure_double, quality.top1, "tkv_quality_top1_ratio", NULL,
                "Share of comparisons whose strongest key is the exact one's."),
    TKVI_FIGURE(TKVI_QUALITY, "heads", tkvi_figure_int, quality.heads, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_QUALITY, "every", tkvi_figure_int, quality.every, NULL, NULL, NULL),
    TKVI_FIGURE(TKVI_QUALITY, "seq", tkvi_figure_int, quality.seq, NULL, NULL, NULL),
};

#define TKVI_FIGURES ((int)(sizeof tkvi_figure_rows / sizeof *tkvi_figure_rows))

/* The length of the sequence's longest layer; 0: the sequence is empty. */
static int tkvi_seq_max_len(const tkv_cache *kv, int seq) {
    int layer, most = 0;
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++)
        most = tkvi_max(most, tkv_get_length(kv, seq, layer));
    return most;
}

/* Live tokens of discarded blocks. A shared block counts once. */
static uint64_t tkvi_n_discarded_tokens(const tkv_cache *kv) {
    uint64_t n = 0;
    int seq, layer, i;
    for (seq = 0; kv->pool.n_discarded && seq < kv->tables.cfg.limits.max_seqs; seq++)
        for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
            const tkvi_list *list = tkvi_list_of(kv, seq, layer);
            const uint32_t *ids = tkvi_ids(kv, seq, layer);
            for (i = 0; i < list->n; i++)
                if (tkvi_is_discarded(tkvi_block_of(kv, ids[i])) && kv->pool.entry[ids[i]].is_first)
                    n += (uint64_t)tkvi_n_bits(tkvi_live_mask_in(kv, list, ids, i));
        }
    return n;
}

static tkv_status tkvi_figures_of(const tkv_cache *kv, tkvi_figures *f) {
    int seq;
    tkv_status st;
    memset(f, 0, sizeof *f);
    if (!kv) return TKV_ERR_ARG;
    f->kv = kv;
    f->has[TKVI_MEMORY] = f->has[TKVI_TOKENS] = f->has[TKVI_SEQUENCES] = 1;
    st = tkv_get_memory(kv, &f->memory);
    if (TKVI_HAS_METER && !st) st = tkv_get_quality(kv, TKV_ALL_LAYERS, &f->quality);
    if (!st) st = tkv_get_budget(kv, &f->budget);
    f->has[TKVI_BUDGET] = f->budget.n_levels > 1;
    f->has[TKVI_RECLAIM] = kv->tables.cfg.evict.policy || kv->tables.cfg.offload.write ||
                           kv->tables.cfg.budget.discard || kv->counts.discarded || kv->states.n_stateful;
    f->has[TKVI_QUALITY] = f->quality.heads > 0;
    f->missing = tkvi_n_discarded_tokens(kv);
    f->most_sequences = (uint64_t)kv->tables.cfg.limits.max_seqs;
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        const uint64_t tokens = (uint64_t)tkvi_seq_max_len(kv, seq);
        f->sequences += tokens > 0;
        f->longest = tokens > f->longest ? tokens : f->longest;
    }
    return st;
}

static void tkvi_print_figure(tkvi_out *o, const tkvi_figures *f, const tkvi_figure *row) {
    row->print(o, (const char *)f + row->offset);
}

/* >>JSON */
static void tkvi_print_comma(tkvi_out *o, int i) {
    if (i > 0) tkvi_print(o, ", ");
}

/* Prints one value for each layer with K and V of its own, and null for the others. */
typedef void (*tkvi_layer_writer)(tkvi_out *o, const tkv_cache *kv, int seq, int layer, int which);

static void tkvi_print_layers(tkvi_out *o, const tkv_cache *kv, const char *name, tkvi_layer_writer write,
                              int seq, int which) {
    int layer;
    tkvi_print(o, ", \"");
    tkvi_print(o, name);
    tkvi_print(o, "\": [");
    for (layer = 0; layer < kv->tables.cfg.model.n_layers; layer++) {
        tkvi_print_comma(o, layer);
        if (!tkvi_has_own_layer(kv, 0, layer)) tkvi_print(o, "null");
        else write(o, kv, seq, layer, which);
    }
    tkvi_print(o, "]");
}

static const char *const tkvi_tier_names[TKV_TIER_COUNT] = {"hot", "warm", "archive"};

static void tkvi_print_layer_pair(tkvi_out *o, const tkv_cache *kv, int seq, int layer, int tier) {
    (void)seq;
    tkvi_print_pair(o, tkvi_pair_now(kv, layer, tier));
}

/* Prints the layer's tokens in a tier; tier TKV_TIER_COUNT: its expired tokens. */
static void tkvi_print_layer_tokens(tkvi_out *o, const tkv_cache *kv, int seq, int layer, int tier) {
    tkv_layer_info info;
    memset(&info, 0, sizeof info);
    tkvi_count_layer(kv, seq, tkvi_stored_layer(kv, seq, layer), &info); /* tokens only, no memory */
    tkvi_print_int(o, tier == TKV_TIER_COUNT ? info.expired : info.tokens[tier]);
}

static void tkvi_print_layer_len(tkvi_out *o, const tkv_cache *kv, int seq, int layer, int which) {
    (void)which;
    tkvi_print_int(o, tkv_get_length(kv, seq, layer));
}

static void tkvi_print_sequences(tkvi_out *o, const tkv_cache *kv) {
    int seq, tier, any = 0;
    tkvi_print(o, ",\n  \"lengths\": [");
    for (seq = 0; seq < kv->tables.cfg.limits.max_seqs; seq++) {
        if (!tkvi_seq_max_len(kv, seq)) continue;
        tkvi_print(o, any++ ? ",\n    {\"seq\": " : "\n    {\"seq\": ");
        tkvi_print_int(o, seq);
        tkvi_print(o, ", \"tokens\": ");
        tkvi_print_int(o, tkv_get_length(kv, seq, TKV_ALL_LAYERS));
        tkvi_print_layers(o, kv, "length", tkvi_print_layer_len, seq, 0);
        for (tier = 0; tier < TKV_TIER_COUNT; tier++)
            tkvi_print_layers(o, kv, tkvi_tier_names[tier], tkvi_print_layer_tokens, seq, tier);
        tkvi_print_layers(o, kv, "expired", tkvi_print_layer_tokens, seq, TKV_TIER_COUNT);
        tkvi_print(o, "}");
    }
    tkvi_print(o, any ? "\n  ]" : "]");
}

static void tkvi_print_section(tkvi_out *o, const tkvi_figures *f, int section) {
    int i, any = 0;
    tkvi_print(o, ",\n  \"");
    tkvi_print(o, tkvi_section_names[section]);
    tkvi_print(o, f->has[section] ? "\": {" : "\": null");
    for (i = 0; f->has[section] && i < TKVI_FIGURES; i++) {
        if (tkvi_figure_rows[i].section != section) continue;
        tkvi_print(o, any++ ? ", \"" : "\"");
        tkvi_print(o, tkvi_figure_rows[i].name);
        tkvi_print(o, "\": ");
        tkvi_print_figure(o, f, &tkvi_figure_rows[i]);
    }
    if (f->has[section]) tkvi_print(o, "}");
}

static void tkvi_write_state(tkvi_out *o, const void *what) {
    const tkvi_figures *f = (const tkvi_figures *)what;
    const tkv_cache *kv = f->kv;
    tkv_config cfg = kv->tables.cfg;
    tkv_calibration_info calibration;
    int i;
    if (tkv_get_calibration(kv, &calibration)) return;
    o->json = 2;
    tkvi_print(o, "{\n  \"version\": \"" TKV_VERSION_STRING "\",\n  \"isa\": \"");
    tkvi_print(o, tkvi_isa_name(kv->kernels->isa));
    tkvi_print(o, "\",\n  \"config\": ");
    if (kv->tables.n_levels > 1 && !cfg.budget.pressure.max_level) cfg.budget.pressure.max_level = TKV_OFF;
    tkvi_write_config(o, &cfg);
    tkvi_print(o, ",\n  \"formats\": {\"calibrated_layers\": ");
    tkvi_print_int(o, calibration.n_calibrated);
    for (i = 0; i < TKV_TIER_COUNT; i++)
        tkvi_print_layers(o, kv, tkvi_tier_names[i], tkvi_print_layer_pair, 0, i);
    tkvi_print(o, "}");
    tkvi_print_sequences(o, kv);
    for (i = 0; i < TKVI_SECTIONS; i++) tkvi_print_section(o, f, i);
    tkvi_print(o, "\n}\n");
}

/* >>Prometheus */
static int tkvi_label_char(char c, int first) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (!first && c >= '0' && c <= '9');
}

/* May the caller use this label name? Not if the library uses it or Prometheus reserves it (two leading _). */
static int tkvi_label_free(tkvi_span name) {
    static const char *const taken[] = {"part", "tier", "version", "isa"};
    size_t i;
    for (i = 0; i < sizeof taken / sizeof *taken; i++)
        if (tkvi_span_is(name, taken[i])) return 0;
    return name.n > 0 && !(name.n > 1 && name.at[0] == '_' && name.at[1] == '_');
}

/* 1 if a label before this one has its name. The labels up to it are correct. */
static int tkvi_is_label_taken(const char *labels, tkvi_span name) {
    const char *s = labels;
    while (s < name.at) {
        if (memcmp(s, name.at, name.n + 1) == 0) return 1;
        for (; *s != ','; s++)
            if (*s == '\\') s++;
        s++;
    }
    return 0;
}

/* Prints `a=x,b=y` as `a="x",b="y"`. A backslash escapes the next character. Returns 0 if these are no labels. */
static int tkvi_print_labels(tkvi_out *o, const char *labels) {
    const char *s;
    for (s = labels; s && *s;) {
        tkvi_span name;
        name.at = s;
        for (; tkvi_label_char(*s, s == name.at);) s++;
        name.n = (size_t)(s - name.at);
        if (*s++ != '=' || !tkvi_label_free(name)) return 0;
        if (tkvi_is_label_taken(labels, name)) return 0;
        if (name.at != labels) tkvi_print(o, ",");
        tkvi_print_bytes(o, name.at, name.n);
        tkvi_print(o, "=\"");
        for (; *s && *s != ','; s++) {
            if (*s == '\\' && !*++s) return 0;
            if (*s == '\\' || *s == '"') tkvi_print(o, "\\");
            if (*s == '\n') tkvi_print(o, "\\n");
            else tkvi_print_bytes(o, s, 1);
        }
        tkvi_print(o, "\"");
        if (*s == ',' && !*++s) return 0;
    }
    return 1;
}

static void tkvi_print_head(tkvi_out *o, const char *metric, const char *help) {
    const size_t n = strlen(metric), end = sizeof "_total" - 1;
    const int counter = n > end && strcmp(metric + n - end, "_total") == 0;
    tkvi_print(o, "# HELP ");
    tkvi_print(o, metric);
    tkvi_print(o, " ");
    tkvi_print(o, help);
    tkvi_print(o, "\n# TYPE ");
    tkvi_print(o, metric);
    tkvi_print(o, counter ? " counter\n" : " gauge\n");
}

/* Prints the metric's name, its labels and the caller's labels. */
static void tkvi_print_metric(tkvi_out *o, const tkvi_figures *f, const char *metric, const char *labels) {
    const int own = labels != NULL, more = f->labels && *f->labels;
    tkvi_print(o, metric);
    if (own || more) tkvi_print(o, "{");
    if (own) tkvi_print(o, labels);
    if (own && more) tkvi_print(o, ",");
    if (!tkvi_print_labels(o, f->labels)) o->bad = TKV_ERR_ARG;
    if (own || more) tkvi_print(o, "}");
    tkvi_print(o, " ");
}

static void tkvi_write_prometheus(tkvi_out *o, const void *what) {
    const tkvi_figures *f = (const tkvi_figures *)what;
    char about[64];
    tkvi_text t = tkvi_text_begin(about, sizeof about);
    int i;
    tkvi_append_text(&t, "version=\"" TKV_VERSION_STRING "\",isa=\"");
    tkvi_append_text(&t, tkvi_isa_name(f->kv->kernels->isa));
    tkvi_append_text(&t, "\"");
    tkvi_print_head(o, "tkv_info", "What the cache runs on.");
    tkvi_print_metric(o, f, "tkv_info", about);
    tkvi_print(o, "1\n");
    for (i = 0; i < TKVI_FIGURES; i++) {
        const tkvi_figure *row = &tkvi_figure_rows[i];
        if (!row->metric || !f->has[row->section]) continue;
        if (row->help) tkvi_print_head(o, row->metric, row->help);
        tkvi_print_metric(o, f, row->metric, row->labels);
        tkvi_print_figure(o, f, row);
        tkvi_print(o, "\n");
    }
}

TKV_API tkv_status tkv_print_report(const tkv_cache *kv, tkv_report_kind kind, const char *labels, char *buf,
                                    size_t size, size_t *needed) {
    static const tkvi_writer writers[TKV_REPORT_COUNT] = {tkvi_write_state, tkvi_write_prometheus};
    tkvi_figures f;
    tkv_status st;
    if ((int)kind < 0 || (int)kind >= TKV_REPORT_COUNT) return TKV_ERR_ARG;
    st = tkvi_figures_of(kv, &f);
    f.labels = labels;
    return st ? st : tkvi_write_text(writers[kind], &f, buf, size, needed);
}

#endif /* TKV_NO_REPORTS */
#endif /* TKVI_REPORT_STATE_H */
