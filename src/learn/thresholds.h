/*
 * learn/thresholds.h - the threshold store. It keeps plans that were found good, by model, layer and context
 * length, in the caller's array. It prints them as text and reads the text back.
 *
 *     tieredkv-thresholds 1
 *     all 4096 64 448 128 a30 r30 0.981200 SmolLM2-135M
 *     sum 91a2c35b08d1f7e6
 *
 * An entry is a line of fields with one blank between two: layer (or all), context, hot tokens, warm tokens (or
 * none, all), samples, archive formats of K and V (or default), score, model. The model's name runs to the end of
 * the line.
 *
 * Entries rise by model (bytes), layer and context, and no two have the same key. So equal stores give equal texts.
 * The sum is FNV-1a, 64 bits, of all bytes before its line. The reader accepts a text only if the printer would
 * have printed the same bytes.
 */
#ifndef TKVI_LEARN_THRESHOLDS_H
#define TKVI_LEARN_THRESHOLDS_H

#include "core/checksum.h"
#include "cache/plan.h"

#include <stddef.h>

#define TKVI_THRESHOLDS_TITLE "tieredkv-thresholds "
#define TKVI_THRESHOLDS_VERSION "1"
#define TKVI_THRESHOLD_LINE 192 /* longer than any line: name 63, numbers 55, two formats */

/* >>valid entries */
/* Rule of a number: from `low` to `high`, or the word none or all. The table has the order of a line. */
typedef struct tkvi_threshold_number {
    const char *name;
    size_t at; /* offset in tkv_threshold */
    int low, high;
    int none, all; /* what the words none and all stand for; 0: the word is not valid */
} tkvi_threshold_number;

#define TKVI_THRESHOLD_AT(field) offsetof(tkv_threshold, field)
static const tkvi_threshold_number tkvi_threshold_numbers[] = {
    {"layer", TKVI_THRESHOLD_AT(layer), 0, TKVI_MAX_LAYERS - 1, 0, TKV_ALL_LAYERS},
    {"context", TKVI_THRESHOLD_AT(context), 1, TKVI_FOREVER, 0, 0},
    {"hot_tokens", TKVI_THRESHOLD_AT(hot_tokens), 0, TKVI_FOREVER, TKV_OFF, TKV_UNLIMITED},
    {"warm_tokens", TKVI_THRESHOLD_AT(warm_tokens), 0, TKVI_FOREVER, TKV_OFF, TKV_UNLIMITED},
    {"samples", TKVI_THRESHOLD_AT(samples), 0, 0x7fffffff, 0, 0},
};
#define TKVI_THRESHOLD_NUMBERS ((int)(sizeof tkvi_threshold_numbers / sizeof *tkvi_threshold_numbers))

static int tkvi_threshold_number_of(const tkv_threshold *e, int i) {
    int x;
    memcpy(&x, (const char *)e + tkvi_threshold_numbers[i].at, sizeof x);
    return x;
}

static int tkvi_number_valid(const tkvi_threshold_number *d, int x) {
    return (x >= d->low && x <= d->high) || (x < 0 && (x == d->none || x == d->all));
}

static int tkvi_store_format_valid(tkv_format f, tkv_side side) {
    return f == TKV_FORMAT_DEFAULT || (tkvi_format_known(f) && tkvi_format_stores(&tkvi_formats[f], side));
}

/* Returns whether a model's name is valid: 1 to 63 bytes and a final 0, no control characters, no blank at either
 * end. UTF-8 is allowed. */
static int tkvi_model_valid(const char *name) {
    int n;
    for (n = 0; n < TKV_MODEL_NAME && name[n]; n++)
        if ((unsigned char)name[n] < 0x20 || name[n] == 0x7f) return 0;
    return n > 0 && n < TKV_MODEL_NAME && name[0] != ' ' && name[n - 1] != ' ';
}

/* Returns the name of an invalid field, or NULL. */
static const char *tkvi_threshold_wrong(const tkv_threshold *e) {
    int i;
    for (i = 0; i < TKVI_THRESHOLD_NUMBERS; i++)
        if (!tkvi_number_valid(&tkvi_threshold_numbers[i], tkvi_threshold_number_of(e, i)))
            return tkvi_threshold_numbers[i].name;
    if (!tkvi_store_format_valid(e->archive.k, TKV_K)) return "archive.k";
    if (!tkvi_store_format_valid(e->archive.v, TKV_V)) return "archive.v";
    if (!tkvi_is_finite(e->score) || e->score < 0.0f || e->score > 1.0f) return "score";
    return tkvi_model_valid(e->model) ? NULL : "model";
}

/* Scores are stored in millionths, so a text holds them exactly. */
static int tkvi_millionths(float score) { return (int)((double)score * 1e6 + .5); }

static float tkvi_of_millionths(int n) { return (float)(n / 1e6); }

/* >>the array */
/* Compares by model, layer, context. Returns below 0, 0 or above 0. */
static int tkvi_threshold_order(const tkv_threshold *a, const tkv_threshold *b) {
    const int names = strcmp(a->model, b->model);
    if (names) return names;
    return a->layer != b->layer       ? (a->layer > b->layer) - (a->layer < b->layer)
           : a->context != b->context ? (a->context > b->context) - (a->context < b->context)
                                      : 0;
}

/* Returns whether the array is valid and sorted. The caller owns it, so every function checks it. */
static int tkvi_thresholds_sound(const tkv_thresholds *t) {
    int i;
    if (!t || t->n < 0 || t->n > t->capacity || (t->capacity > 0 && !t->entry)) return 0;
    for (i = 0; i < t->n; i++) {
        if (tkvi_threshold_wrong(&t->entry[i])) return 0;
        if (i && tkvi_threshold_order(&t->entry[i - 1], &t->entry[i]) >= 0) return 0;
    }
    return 1;
}

/* Returns the index where the entry is, or where it would be inserted. *found: 1 if it is there. */
static int tkvi_threshold_place(const tkv_thresholds *t, const tkv_threshold *e, int *found) {
    int i = 0, order = 1;
    while (i < t->n && (order = tkvi_threshold_order(&t->entry[i], e)) < 0) i++;
    *found = i < t->n && order == 0;
    return i;
}

/* Inserts or replaces an entry. The array is valid and has a free slot. */
static void tkvi_threshold_put(tkv_thresholds *t, const tkv_threshold *e) {
    int found, i = tkvi_threshold_place(t, e, &found);
    tkv_threshold *to = &t->entry[i];
    size_t length = strlen(e->model);
    if (!found) memmove(to + 1, to, (size_t)(t->n++ - i) * sizeof *to);
    *to = *e;
    memset(to->model + length, 0, sizeof to->model - length);
    to->score = tkvi_of_millionths(tkvi_millionths(e->score));
}

TKV_API tkv_status tkv_put_threshold(tkv_thresholds *t, const tkv_threshold *e) {
    tkv_threshold copy;
    int found;
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    if (!tkvi_thresholds_sound(t) || !e || tkvi_threshold_wrong(e)) return TKV_ERR_ARG;
    copy = *e; /* e may point into the array */
    tkvi_threshold_place(t, &copy, &found);
    if (!found && t->n == t->capacity) return TKV_ERR_CAPACITY;
    tkvi_threshold_put(t, &copy);
    return TKV_OK;
}

/* >>finding */
static int tkvi_context_distance(const tkv_threshold *e, int context) {
    return e->context > context ? e->context - context : context - e->context;
}

/* Compares two entries of a model; below 0: a is better for this layer and context. Two entries of a store are
 * never equal. */
static int tkvi_threshold_rank(const tkv_threshold *a, const tkv_threshold *b, int layer, int context) {
    int i, key[5][2];
    const tkv_threshold *e[2];
    e[0] = a;
    e[1] = b;
    for (i = 0; i < 2; i++) { /* the smaller key is better */
        key[0][i] = e[i]->layer != layer;
        key[1][i] = tkvi_context_distance(e[i], context);
        key[2][i] = -tkvi_millionths(e[i]->score);
        key[3][i] = -e[i]->samples;
        key[4][i] = -e[i]->context;
    }
    for (i = 0; i < 4; i++)
        if (key[i][0] != key[i][1]) return key[i][0] < key[i][1] ? -1 : 1;
    return key[4][0] < key[4][1] ? -1 : 1;
}

TKV_API tkv_status tkv_find_thresholds(const tkv_thresholds *t, const char *model, int layer, int context,
                                       tkv_threshold *out, int most, int *found) {
    int i, k, n = 0;
    if (found) *found = 0;
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    if (!tkvi_thresholds_sound(t) || !model || !out || most < 1) return TKV_ERR_ARG;
    if (!tkvi_number_valid(&tkvi_threshold_numbers[0], layer)) return TKV_ERR_RANGE;
    if (!tkvi_number_valid(&tkvi_threshold_numbers[1], context)) return TKV_ERR_RANGE;
    for (i = 0; i < t->n; i++) {
        const tkv_threshold *e = &t->entry[i];
        if ((e->layer != layer && e->layer != TKV_ALL_LAYERS) || strcmp(e->model, model) != 0) continue;
        for (k = n; k > 0 && tkvi_threshold_rank(e, &out[k - 1], layer, context) < 0; k--)
            if (k < most) out[k] = out[k - 1];
        if (k == most) continue;
        out[k] = *e;
        n += n < most;
    }
    if (found) *found = n;
    return n ? TKV_OK : TKV_ERR_RANGE;
}

/* >>applying */
/* Checks the arguments for an entry, before the config that it makes. */
static tkv_status tkvi_threshold_fault(const tkv_config *cfg, const tkv_layer_config *layers,
                                       const tkv_threshold *e, char *reason, size_t size) {
    tkvi_text t = tkvi_text_begin(reason, reason ? size : 0);
    const char *wrong;
    if (!cfg || !e) return tkvi_give_reason(TKV_ERR_ARG, "the config or the entry is missing", reason, size);
    wrong = tkvi_threshold_wrong(e);
    if (wrong) {
        tkvi_append_text(&t, wrong);
        tkvi_append_text(&t, " of the entry must be in the range that tkv_threshold gives");
        return TKV_ERR_ARG;
    }
    if (e->layer == TKV_ALL_LAYERS) return TKV_OK;
    if (e->layer >= cfg->model.n_layers) {
        tkvi_append_text(&t, "the entry is of layer ");
        tkvi_append_int(&t, e->layer);
        tkvi_append_text(&t, "; it must be below model.n_layers, ");
        tkvi_append_int(&t, cfg->model.n_layers);
        return TKV_ERR_RANGE;
    }
    if (!layers)
        return tkvi_give_reason(TKV_ERR_ARG, "the entry is of one layer: layers must be an array", reason,
                                size);
    if (cfg->layers && cfg->layers != layers)
        return tkvi_give_reason(TKV_ERR_ARG, "layers must be the array of cfg->layers", reason, size);
    return TKV_OK;
}

TKV_API tkv_status tkv_apply_threshold(tkv_config *cfg, tkv_layer_config *layers, const tkv_threshold *e,
                                       char *reason, size_t size) {
    tkv_config next;
    tkv_layer_config before;
    tkv_status st;
    if (!TKVI_HAS_METER)
        return tkvi_give_reason(TKV_ERR_UNSUPPORTED, "TKV_NO_METER leaves this out", reason, size);
    st = tkvi_threshold_fault(cfg, layers, e, reason, size);
    if (st) return st;
    next = *cfg;
    if (e->layer == TKV_ALL_LAYERS) {
        next.tiers.hot_tokens = e->hot_tokens;
        next.tiers.warm_tokens = e->warm_tokens;
        next.tiers.archive = e->archive;
        st = tkv_validate_config(&next, reason, size);
    } else {
        before = layers[e->layer];
        layers[e->layer].hot_tokens = e->hot_tokens;
        layers[e->layer].warm_tokens = e->warm_tokens;
        layers[e->layer].archive = e->archive;
        next.layers = layers;
        st = tkv_validate_config(&next, reason, size);
        if (st) layers[e->layer] = before;
    }
    if (!st) *cfg = next;
    return st;
}

/* >>transfer */
TKV_API tkv_status tkv_copy_thresholds(tkv_thresholds *t, const char *from, const char *to, float discount) {
    char model[2][TKV_MODEL_NAME]; /* copies: from and to may point into the array */
    tkv_threshold e;
    int i, pass, found, any = 0, fresh = 0;
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    if (tkvi_bits(discount) == 0) discount = .9f;
    if (!tkvi_thresholds_sound(t) || !from || !to || strcmp(from, to) == 0) return TKV_ERR_ARG;
    if (!tkvi_model_valid(from) || !tkvi_model_valid(to)) return TKV_ERR_ARG;
    if (!tkvi_is_finite(discount) || discount <= 0.0f || discount > 1.0f) return TKV_ERR_ARG;
    memset(model, 0, sizeof model);
    memcpy(model[0], from, strlen(from));
    memcpy(model[1], to, strlen(to));
    for (pass = 0; pass < 2; pass++) { /* pass 0 counts, pass 1 copies */
        for (i = 0; i < t->n; i++) {
            if (strcmp(t->entry[i].model, model[0]) != 0) continue;
            any = 1;
            e = t->entry[i];
            memcpy(e.model, model[1], sizeof e.model);
            tkvi_threshold_place(t, &e, &found);
            if (found) continue;
            e.score *= discount;
            e.samples = 0;
            if (pass == 0) fresh++;
            else tkvi_threshold_put(t, &e); /* may shift entry i: it is met again, and found */
        }
        if (!any) return TKV_ERR_RANGE;
        if (pass == 0 && fresh > t->capacity - t->n) return TKV_ERR_CAPACITY;
    }
    return TKV_OK;
}

/* >>printing */
/* Takes all the bytes and returns 0; another number stops. */
typedef int (*tkvi_write_bytes)(void *user, const char *bytes, size_t size);

typedef struct tkvi_printer {
    tkvi_write_bytes write;
    void *user;
    uint64_t sum;
    int failed;
} tkvi_printer;

static void tkvi_print_line(tkvi_printer *p, tkvi_text *t, const char *line) {
    const size_t n = (size_t)(t->at - line);
    p->sum = tkvi_fnv1a_more(p->sum, (const uint8_t *)line, n);
    if (!p->failed) p->failed = p->write(p->user, line, n) != 0;
}

static void tkvi_append_number(tkvi_text *t, int n) {
    if (n == TKV_OFF) tkvi_append_text(t, "none");
    else if (n == TKV_UNLIMITED || n == TKV_ALL_LAYERS) tkvi_append_text(t, "all");
    else tkvi_append_int(t, n);
}

static void tkvi_append_format(tkvi_text *t, tkv_format f) {
    tkvi_append_text(t, f == TKV_FORMAT_DEFAULT ? "default" : tkvi_formats[f].name);
}

static void tkvi_append_score(tkvi_text *t, float score) {
    char digits[9];
    int i, n = tkvi_millionths(score);
    for (i = 7; i >= 0; i--) {
        digits[i] = '.';
        if (i == 1) continue;
        digits[i] = (char)('0' + n % 10);
        n /= 10;
    }
    digits[8] = 0;
    tkvi_append_text(t, digits);
}

static void tkvi_append_sum(tkvi_text *t, uint64_t sum) {
    char digits[17];
    int i;
    for (i = 15; i >= 0; i--, sum >>= 4) digits[i] = "0123456789abcdef"[sum & 15u];
    digits[16] = 0;
    tkvi_append_text(t, "sum ");
    tkvi_append_text(t, digits);
    tkvi_append_text(t, "\n");
}

static void tkvi_append_threshold(tkvi_text *t, const tkv_threshold *e) {
    int i;
    for (i = 0; i < TKVI_THRESHOLD_NUMBERS; i++, tkvi_append_text(t, " "))
        tkvi_append_number(t, tkvi_threshold_number_of(e, i));
    tkvi_append_format(t, e->archive.k);
    tkvi_append_text(t, " ");
    tkvi_append_format(t, e->archive.v);
    tkvi_append_text(t, " ");
    tkvi_append_score(t, e->score);
    tkvi_append_text(t, " ");
    tkvi_append_text(t, e->model);
    tkvi_append_text(t, "\n");
}

static tkv_status tkvi_thresholds_write(const tkv_thresholds *t, tkvi_write_bytes write, void *user) {
    char line[TKVI_THRESHOLD_LINE];
    tkvi_printer p;
    tkvi_text at = tkvi_text_begin(line, sizeof line);
    int i;
    if (!tkvi_thresholds_sound(t) || !write) return TKV_ERR_ARG;
    p.write = write;
    p.user = user;
    p.sum = TKVI_FNV1A_START;
    p.failed = 0;
    tkvi_append_text(&at, TKVI_THRESHOLDS_TITLE TKVI_THRESHOLDS_VERSION "\n");
    tkvi_print_line(&p, &at, line);
    for (i = 0; i < t->n; i++) {
        at = tkvi_text_begin(line, sizeof line);
        tkvi_append_threshold(&at, &t->entry[i]);
        tkvi_print_line(&p, &at, line);
    }
    at = tkvi_text_begin(line, sizeof line);
    tkvi_append_sum(&at, p.sum);
    tkvi_print_line(&p, &at, line);
    return p.failed ? TKV_ERR_CAPACITY : TKV_OK;
}

/* A buffer to print into. at NULL: only counts. */
typedef struct tkvi_sheet {
    char *at;
    size_t used;
} tkvi_sheet;

static int tkvi_sheet_write(void *user, const char *bytes, size_t size) {
    tkvi_sheet *p = (tkvi_sheet *)user;
    if (p->at) memcpy(p->at + p->used, bytes, size);
    p->used += size;
    return 0;
}

TKV_API tkv_status tkv_print_thresholds(const tkv_thresholds *t, char *buf, size_t size, size_t *needed) {
    tkvi_sheet p;
    if (!TKVI_HAS_METER) return TKV_ERR_UNSUPPORTED;
    p.at = NULL;
    p.used = 0;
    if (!buf && !needed) return TKV_ERR_ARG;
    if (tkvi_thresholds_write(t, tkvi_sheet_write, &p)) return TKV_ERR_ARG;
    if (needed) *needed = p.used + 1;
    if (!buf) return TKV_OK;
    if (size < p.used + 1) return TKV_ERR_CAPACITY;
    buf[p.used] = 0;
    p.at = buf;
    p.used = 0;
    return tkvi_thresholds_write(t, tkvi_sheet_write, &p);
}

/* >>reading. Functions return 0 for a field that differs from its printed form. */
typedef struct tkvi_scan {
    const char *at, *end;
    int line;
} tkvi_scan;

/* Copies the bytes up to `stop` to out[room] and skips `stop`. stop: a blank, or a newline for the last field.
 * Returns 0 for an empty field, a wrong end or a full buffer. */
static int tkvi_scan_field(tkvi_scan *s, char stop, char *out, size_t room) {
    size_t n = 0;
    while (s->at < s->end && *s->at != stop && *s->at != '\n' && *s->at && n + 1 < room) out[n++] = *s->at++;
    out[n] = 0;
    return n > 0 && s->at < s->end && *s->at++ == stop;
}

/* Returns the number of a string of digits, or -1: above `high`, a leading zero, or any other character. */
static int tkvi_scan_digits(const char *s, int high) {
    int64_t n = 0;
    int i;
    for (i = 0; s[i] >= '0' && s[i] <= '9' && i < 10; i++) n = n * 10 + (s[i] - '0');
    return i == 0 || s[i] || (s[0] == '0' && i > 1) || n > high ? -1 : (int)n;
}

static int tkvi_scan_number(tkvi_scan *s, const tkvi_threshold_number *d, int *x) {
    char word[16];
    if (!tkvi_scan_field(s, ' ', word, sizeof word)) return 0;
    if (d->none && strcmp(word, "none") == 0) *x = d->none;
    else if (d->all && strcmp(word, "all") == 0) *x = d->all;
    else if ((*x = tkvi_scan_digits(word, d->high)) < 0) return 0;
    return tkvi_number_valid(d, *x);
}

static int tkvi_scan_format(tkvi_scan *s, tkv_side side, tkv_format *f) {
    char word[32];
    if (!tkvi_scan_field(s, ' ', word, sizeof word)) return 0;
    *f = tkvi_format_from_name(word);
    return *f == TKV_FORMAT_DEFAULT ? strcmp(word, "default") == 0 : tkvi_store_format_valid(*f, side);
}

static int tkvi_scan_score(tkvi_scan *s, float *score) {
    char word[16];
    int i, n = 0;
    if (!tkvi_scan_field(s, ' ', word, sizeof word) || strlen(word) != 8) return 0;
    for (i = 0; i < 8; i++) {
        if (i == 1 && word[i] == '.') continue;
        if (i == 1 || word[i] < '0' || word[i] > '9') return 0;
        n = n * 10 + (word[i] - '0');
    }
    *score = tkvi_of_millionths(n);
    return n <= 1000000;
}

/* Reads one line as an entry. Returns the name of a wrong field, or NULL. */
static const char *tkvi_scan_threshold(tkvi_scan *s, tkv_threshold *e) {
    int i, x;
    memset(e, 0, sizeof *e);
    for (i = 0; i < TKVI_THRESHOLD_NUMBERS; i++) {
        if (!tkvi_scan_number(s, &tkvi_threshold_numbers[i], &x)) return tkvi_threshold_numbers[i].name;
        memcpy((char *)e + tkvi_threshold_numbers[i].at, &x, sizeof x);
    }
    if (!tkvi_scan_format(s, TKV_K, &e->archive.k)) return "archive.k";
    if (!tkvi_scan_format(s, TKV_V, &e->archive.v)) return "archive.v";
    if (!tkvi_scan_score(s, &e->score)) return "score";
    if (!tkvi_scan_field(s, '\n', e->model, sizeof e->model)) return "model";
    return tkvi_threshold_wrong(e);
}

static int tkvi_starts_with(const tkvi_scan *s, const char *with) {
    const size_t n = strlen(with);
    return (size_t)(s->end - s->at) >= n && memcmp(s->at, with, n) == 0;
}

/* Writes the reason with the line's number. Returns TKV_ERR_DATA. */
static tkv_status tkvi_scan_bad(const tkvi_scan *s, const char *what, const char *why, tkvi_text *reason) {
    tkvi_append_text(reason, "line ");
    tkvi_append_int(reason, s->line);
    tkvi_append_text(reason, ": ");
    tkvi_append_text(reason, what);
    tkvi_append_text(reason, why);
    return TKV_ERR_DATA;
}

/* Checks a text and counts its entries in *n. `to` NULL: only that; else it also stores the entries. */
static tkv_status tkvi_thresholds_scan(const char *src, size_t size, tkv_threshold *to, int *n,
                                       tkvi_text *reason) {
    static const char title[] = TKVI_THRESHOLDS_TITLE TKVI_THRESHOLDS_VERSION "\n";
    char line[TKVI_THRESHOLD_LINE];
    tkvi_text sum = tkvi_text_begin(line, sizeof line);
    tkv_threshold e, last;
    tkvi_scan s;
    s.at = src;
    s.end = src + size;
    s.line = 1;
    *n = 0;
    if (!tkvi_starts_with(&s, TKVI_THRESHOLDS_TITLE))
        return tkvi_scan_bad(&s, "these bytes are not a threshold store", "", reason);
    if (!tkvi_starts_with(&s, title))
        return tkvi_scan_bad(&s, "the store is of another version: ask the library that wrote it", "",
                             reason);
    s.at += sizeof title - 1;
    for (s.line = 2; s.at < s.end && !tkvi_starts_with(&s, "sum "); s.line++, ++*n) {
        const char *wrong = tkvi_scan_threshold(&s, &e);
        if (wrong) return tkvi_scan_bad(&s, wrong, " is damaged or out of range: take an older copy", reason);
        if (*n && tkvi_threshold_order(&last, &e) >= 0)
            return tkvi_scan_bad(&s, "the entry", " is there twice or out of order", reason);
        if (s.line == TKVI_FOREVER) return tkvi_scan_bad(&s, "there are too many", "", reason);
        if (to) to[*n] = e;
        last = e;
    }
    tkvi_append_sum(&sum, tkvi_fnv1a_more(TKVI_FNV1A_START, (const uint8_t *)src, (size_t)(s.at - src)));
    if (!tkvi_starts_with(&s, line))
        return tkvi_scan_bad(&s, "the checksum", " is missing or wrong: take an older copy", reason);
    if ((size_t)(s.end - s.at) != strlen(line))
        return tkvi_scan_bad(&s, "there is something", " after the checksum", reason);
    return TKV_OK;
}

TKV_API tkv_status tkv_parse_thresholds(tkv_thresholds *t, const char *src, size_t size, char *reason,
                                        size_t reason_size) {
    tkvi_text why = tkvi_text_begin(reason, reason ? reason_size : 0);
    tkv_status st;
    int n;
    if (!TKVI_HAS_METER) {
        tkvi_append_text(&why, "TKV_NO_METER leaves this out");
        return TKV_ERR_UNSUPPORTED;
    }
    if (!t || t->capacity < 0 || (t->capacity > 0 && !t->entry) || (!src && size)) {
        tkvi_append_text(&why, "the store or the text is missing");
        return TKV_ERR_ARG;
    }
    st = tkvi_thresholds_scan(size ? src : "", size, NULL, &n, &why);
    if (st) return st;
    if (n > t->capacity) {
        tkvi_append_text(&why, "the text has ");
        tkvi_append_int(&why, n);
        tkvi_append_text(&why, " entries, the store has room for ");
        tkvi_append_int(&why, t->capacity);
        return TKV_ERR_CAPACITY;
    }
    (void)tkvi_thresholds_scan(src, size, t->entry, &t->n, &why); /* checked above: it cannot fail */
    return TKV_OK;
}

#endif /* TKVI_LEARN_THRESHOLDS_H */
