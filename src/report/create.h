/*
 * report/create.h - tkv_create_ex reads a config text, checks it and creates a cache, in one call.
 *
 * If a line of the text is wrong, the error sentence begins with its number. This works also if every value is
 * valid by itself and only the whole config is not.
 */
#ifndef TKVI_REPORT_CREATE_H
#define TKVI_REPORT_CREATE_H

#include "cache/cache.h"
#include "report/text.h"

#ifndef TKV_NO_REPORTS

/* Layers for which the text needs a list: n_layers, or 0 if no key of the text begins with layers[. Errors in the
 * text are left to tkv_parse_config. */
static TKVI_NOINLINE int tkvi_text_layers(const tkv_config *host, const char *text, size_t size) {
    tkvi_parser r;
    tkv_config full = *host;
    tkvi_parse_begin(&r, tkvi_config_fields, TKVI_CONFIG_FIELDS, &full, text, size, NULL, 0);
    (void)tkvi_parse_all(&r, TKVI_CHECK);
    return r.highest[TKVI_OF_LAYERS] ? tkvi_max(0, full.model.n_layers) : 0;
}

/* The line of the text that sets the field whose name the sentence begins with; 0: no line sets it. */
static TKVI_NOINLINE int tkvi_text_line(const char *text, size_t size, const char *sentence) {
    tkvi_parser r;
    tkv_config any;
    const tkvi_row *row;
    int group, index, from, to;
    memset(&any, 0, sizeof any);
    tkvi_parse_begin(&r, tkvi_config_fields, TKVI_CONFIG_FIELDS, &any, text, size, NULL, 0);
    r.key.at = sentence;
    while (sentence[r.key.n] && sentence[r.key.n] != ' ') r.key.n++;
    row = tkvi_find_row(&r, &group, &index, &to);
    if (!row && r.key.n > 2 && r.key.at[r.key.n - 2] == '.') { /* .k or .v of a pair */
        r.key.n -= 2;
        row = tkvi_find_row(&r, &group, &index, &to);
    }
    tkvi_rewind(&r);
    while (row && tkvi_next(&r) > 0)
        if (tkvi_find_row(&r, &group, &from, &to) == row && from <= index && index <= to) return r.key_line;
    return 0;
}

/* Writes to `reason` the sentence, after the line that it is about if there is one. Returns st. */
static tkv_status tkvi_append_line_of(tkv_status st, const char *text, size_t size, const char *sentence,
                                      char *reason, size_t reason_size) {
    tkvi_text t = tkvi_text_begin(reason, reason ? reason_size : 0);
    const int line = st ? tkvi_text_line(text, size, sentence) : 0;
    if (line) {
        tkvi_append_text(&t, "line ");
        tkvi_append_int(&t, line);
        tkvi_append_text(&t, ": ");
    }
    tkvi_append_text(&t, sentence);
    return st;
}

/* Creates a cache from the config *host, changed by the keys of the text. */
static tkv_status tkvi_create_from_text(const char *text, size_t size, const tkv_config *host,
                                        tkv_cache **out, char *reason, size_t reason_size) {
    char sentence[400]; /* the names of all formats fit */
    tkv_level ladder[TKV_MAX_LEVELS];
    float frequencies[TKV_MAX_HEAD_DIM / 2];
    tkv_config_arrays room;
    tkv_config cfg = host ? *host : tkv_default_config();
    tkvi_heap heap;
    size_t bytes;
    tkv_status st = tkvi_validate_host(&cfg, reason, reason_size);
    if (!out) return tkvi_give_reason(TKV_ERR_ARG, "out is missing", reason, reason_size);
    if (!st) st = tkvi_init_heap(&cfg, &heap, reason, reason_size);
    if (st) return st;
    memset(&room, 0, sizeof room);
    room.ladder = ladder;
    room.n_levels = TKV_MAX_LEVELS;
    room.frequencies = frequencies;
    room.n_frequencies = TKV_MAX_HEAD_DIM / 2;
    room.n_layers = tkvi_text_layers(&cfg, text, size);
    if (room.n_layers > TKVI_MAX_LAYERS) { /* too many: the sentence of tkv_validate_config */
        cfg.model.n_layers = room.n_layers;
        st = tkv_validate_config(&cfg, sentence, sizeof sentence);
        return tkvi_append_line_of(st, text, size, sentence, reason, reason_size);
    }
    bytes = (size_t)room.n_layers * sizeof *room.layers;
    if (bytes) room.layers = (tkv_layer_config *)tkvi_get(&heap, bytes);
    if (bytes && !room.layers)
        return tkvi_give_reason(TKV_ERR_NOMEM, "the allocator gave no memory for the layers of the text",
                                reason, reason_size);
    st = tkv_parse_config(&cfg, &room, text, size, reason, reason_size);
    if (!st) {
        st = tkv_create_ex(&cfg, NULL, 0, out, sentence, sizeof sentence);
        (void)tkvi_append_line_of(st, text, size, sentence, reason, reason_size);
    }
    tkvi_put(&heap, room.layers, bytes);
    return st;
}

#endif /* TKV_NO_REPORTS */

TKV_API tkv_status tkv_create_ex(const tkv_config *cfg, const char *text, size_t text_size, tkv_cache **out,
                                 char *reason, size_t size) {
    if (!text) return tkvi_create(cfg, out, reason, size);
#ifdef TKV_NO_REPORTS
    (void)text_size;
    return tkvi_give_reason(TKV_ERR_UNSUPPORTED, "TKV_NO_REPORTS leaves configs as text out", reason, size);
#else
    return tkvi_create_from_text(text, text_size, cfg, out, reason, size);
#endif
}

#endif /* TKVI_REPORT_CREATE_H */
