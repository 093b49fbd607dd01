/*
 * report/text.h - reads and writes configs as text: lines of `key = value`, or one flat JSON object. The keys are
 * the names of the fields. A table has one row for each field; the row's kind gives the functions that read and
 * write it. To add a field, add a row.
 *
 *     # comment                          {
 *     preset = balanced                    "preset": "balanced",
 *     n_layers = 32                        "n_layers": 32,
 *     archive = a30/r20                    "archive": "a30/r20",
 *     layers[0-5].window = 1024            "layers[0-5].window": 1024
 *                                        }
 *
 * A text is read three times. The first pass checks it and changes nothing of the caller's. The second pass
 * applies the preset, the third all other values.
 */
#ifndef TKVI_REPORT_TEXT_H
#define TKVI_REPORT_TEXT_H

#ifndef TKV_NO_REPORTS

#include "report/info.h"
#include "core/decimal.h"

/* >>out: a text is counted first and written second, so a buffer that is too small stays untouched */
typedef struct tkvi_out {
    char *at; /* NULL: only count */
    size_t room, used;
    int json;       /* 0: lines; 1: JSON; 2: JSON on one line */
    int more;       /* 1: the object already has a value */
    tkv_status bad; /* error: a value has no text */
} tkvi_out;

static void tkvi_print_bytes(tkvi_out *o, const char *s, size_t n) {
    if (o->at && o->used <= o->room && n <= o->room - o->used) memcpy(o->at + o->used, s, n);
    o->used += n;
}

static void tkvi_print(tkvi_out *o, const char *s) { tkvi_print_bytes(o, s, strlen(s)); }

static void tkvi_print_count(tkvi_out *o, uint64_t n) {
    char digits[20];
    int i = 20;
    do digits[--i] = (char)('0' + (int)(n % 10u));
    while (n /= 10u);
    tkvi_print_bytes(o, digits + i, (size_t)(20 - i));
}

static void tkvi_print_int(tkvi_out *o, int64_t n) {
    if (n < 0) tkvi_print(o, "-");
    tkvi_print_count(o, n < 0 ? 0u - (uint64_t)n : (uint64_t)n);
}

static void tkvi_print_float(tkvi_out *o, float x) {
    char text[TKVI_FLOAT_TEXT];
    if (!tkvi_is_finite(x)) {
        o->bad = TKV_ERR_CONFIG;
        return;
    }
    tkvi_float_write(x, text);
    tkvi_print(o, text);
}

/* In JSON, prints a quote. */
static void tkvi_print_quote(tkvi_out *o) {
    if (o->json) tkvi_print(o, "\"");
}

typedef void (*tkvi_writer)(tkvi_out *o, const void *what);

/* Writes the whole text to buf, or nothing if it does not fit. *needed: its bytes, final zero included. */
static tkv_status tkvi_write_text(tkvi_writer write, const void *what, char *buf, size_t size,
                                  size_t *needed) {
    tkvi_out o;
    size_t n;
    memset(&o, 0, sizeof o);
    write(&o, what);
    if (o.bad) return o.bad;
    n = o.used;
    if (needed) *needed = n + 1;
    if (!buf) return needed ? TKV_OK : TKV_ERR_ARG;
    if (size <= n) return TKV_ERR_CAPACITY;
    memset(&o, 0, sizeof o);
    o.at = buf;
    o.room = n;
    write(&o, what);
    buf[n] = 0;
    return TKV_OK;
}

/* >>rows */
typedef struct tkvi_span {
    const char *at;
    size_t n;
} tkvi_span;

struct tkvi_parser; /* the two types refer to each other */

typedef struct tkvi_kind {
    const char *want; /* describes a valid value, for error sentences */
    /* Reads s into the field at `at`; NULL: only checks. Returns 0 if s is no such value. */
    int (*read)(struct tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at);
    /* Writes the field. NULL: a key that is only read, before all other keys */
    void (*write)(const tkvi_row *row, const void *at, tkvi_out *o);
} tkvi_kind;

typedef struct tkvi_fields { /* rows of one struct */
    const char *name;        /* NULL: keys are `field`; else `name.field` */
    int most;                /* not 0: keys are `name[i].field` and `name[i-j].field`, i and j below it */
    size_t offset, stride;   /* of the struct in its config; of list entries */
    const tkvi_row *row;
    int n_rows;
} tkvi_fields;

#define TKVI_MAX_FIELDS 11
#define TKVI_SEEN_BYTES 12288 /* a bit per field: 23 fields of 4,096 layers, and 4,096 others */

typedef struct tkvi_parser {
    const tkvi_fields *fields;
    int n_fields;
    void *base[TKVI_MAX_FIELDS]; /* the structs; not used for lists while checking */
    const tkv_config_arrays *room;
    /* the place in the text */
    const char *text, *at, *end;
    int line, json, begun;
    tkvi_span key, value;
    int key_line;
    /* what the text has named so far */
    int highest[TKVI_MAX_FIELDS], highest_line[TKVI_MAX_FIELDS]; /* largest list index, plus 1; 0: none */
    int frequencies, frequencies_line;                           /* of model.rope: numbers, and line */
    int n_taken;            /* numbers of all lists of frequencies, in this pass */
    const char *taken_from; /* the last list of frequencies */
    int taken_line;         /* its line */
    int n_kept;             /* numbers in front of these lists that the config still uses */
    uint16_t
        pairs[TKVI_MAX_LAYERS]; /* layers[i].rope.dim / 2 less the numbers of its frequencies, modulo 65536 */
    uint8_t seen[TKVI_SEEN_BYTES];
    tkvi_text reason;
} tkvi_parser;

/* >>spans */
static int tkvi_span_is(tkvi_span s, const char *name) {
    return s.n == strlen(name) && memcmp(s.at, name, s.n) == 0;
}

static int tkvi_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

static tkvi_span tkvi_trimmed(const char *from, const char *to) {
    tkvi_span s;
    while (from < to && tkvi_blank(*from)) from++;
    while (from < to && tkvi_blank(to[-1])) to--;
    s.at = from;
    s.n = (size_t)(to - from);
    return s;
}

/* Removes the part before the separator from the front of s, and returns it trimmed. No separator: all of s. */
static tkvi_span tkvi_split_front(tkvi_span *s, char separator) {
    const char *from = s->at, *end = s->at + s->n, *at = from;
    while (at < end && *at != separator) at++;
    s->at = at < end ? at + 1 : end;
    s->n = (size_t)(end - s->at);
    return tkvi_trimmed(from, at);
}

/* Copies the span to `out` as a string, truncated to `room` bytes, final zero included. */
static void tkvi_copied(tkvi_span s, char *out, size_t room) {
    size_t n = s.n < room ? s.n : room - 1;
    memcpy(out, s.at, n);
    out[n] = 0;
}

/* Appends a span to an error sentence: at most 40 characters, control characters and non-ASCII as '?'. */
static void tkvi_append_span(tkvi_text *t, tkvi_span s) {
    char name[41];
    size_t i;
    tkvi_copied(s, name, sizeof name);
    for (i = 0; i < s.n && i < 40; i++)
        if (name[i] < ' ' || name[i] > '~') name[i] = '?';
    tkvi_append_text(t, name);
    if (s.n > 40) tkvi_append_text(t, "...");
}

/* >>kinds */
/* Reads an unsigned number: digits only, at most 2^63 - 1. Returns 0 if it is none. */
static int tkvi_digits(tkvi_span s, uint64_t *out) {
    const uint64_t most = (uint64_t)-1 >> 1;
    uint64_t n = 0;
    size_t i;
    for (i = 0; i < s.n; i++) {
        const unsigned digit = (unsigned)(s.at[i] - '0');
        if (digit > 9 || n > (most - digit) / 10u) return 0;
        n = 10u * n + digit;
    }
    *out = n;
    return s.n > 0;
}

/* Reads an int field, or an enum field; a compiler may store an enum in one byte. */
static int tkvi_field_int(const tkvi_row *row, const void *at) {
    int x;
    if (row->size < sizeof x) return *(const uint8_t *)at;
    memcpy(&x, at, sizeof x);
    return x;
}

/* Name number i of a field's values, and its value; NULL after the last. */
static const char *tkvi_word_at(const tkvi_row *row, int i, int *value) {
    *value = row->words ? row->words[i].value : i;
    return row->words ? row->words[i].name : tkv_get_name(row->names, i);
}

static int tkvi_read_int(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    const int negative = s.n > 0 && s.at[0] == '-';
    const char *word;
    uint64_t n = 0;
    int x = 0, i;
    (void)r;
    for (i = 0; (word = tkvi_word_at(row, i, &x)) != NULL && !tkvi_span_is(s, word); i++) continue;
    if (!word) {
        s.at += negative;
        s.n -= (size_t)negative;
        if (!tkvi_digits(s, &n) || n > 0x7fffffffu + (negative ? 1u : 0u)) return 0;
        x = negative ? (int)-(int64_t)n : (int)n;
    }
    if (!at) return 1;
    if (row->size < sizeof x) *(uint8_t *)at = (uint8_t)(x & 0xff);
    else memcpy(at, &x, sizeof x);
    return 1;
}

static void tkvi_write_int(const tkvi_row *row, const void *at, tkvi_out *o) {
    const int x = tkvi_field_int(row, at);
    const char *word;
    int i, value;
    for (i = 0; (word = tkvi_word_at(row, i, &value)) != NULL && value != x; i++) continue;
    if (!word) {
        tkvi_print_int(o, x);
        return;
    }
    if (strcmp(word, "true") != 0) tkvi_print_quote(o);
    tkvi_print(o, word);
    if (strcmp(word, "true") != 0) tkvi_print_quote(o);
}

/* Reads bytes such as 4096, 512K, 1.5G, 64MiB. K, M, G, T are powers of 1024. At most four digits after the
 * point. */
static int tkvi_read_size(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    static const char letters[] = "KMGT";
    uint64_t whole = 0, part = 0, unit = 1;
    tkvi_span fraction;
    size_t i, bytes;
    (void)r;
    (void)row;
    if (s.n > 2 && memcmp(s.at + s.n - 2, "iB", 2) == 0) {
        s.n -= 2;
        unit = 0; /* a letter must come before iB */
    }
    for (i = 0; s.n > 0 && i < 4; i++)
        if (s.at[s.n - 1] == letters[i]) {
            unit = (uint64_t)1 << (10u * (unsigned)(i + 1));
            s.n--;
            break;
        }
    fraction = s;
    s = tkvi_split_front(&fraction, '.');
    if (unit == 0 || !tkvi_digits(s, &whole) || whole > ((uint64_t)-1 >> 1) / unit) return 0;
    whole *= unit;
    for (i = 0; i < fraction.n; i++) { /* the result is rounded down to a byte */
        const unsigned digit = (unsigned)(fraction.at[i] - '0');
        if (digit > 9 || i > 3 || unit == 1) return 0;
        part = 10u * part + digit;
    }
    for (; i < 4; i++) part *= 10u;
    whole += part * unit / 10000u;
    bytes = (size_t)whole;
    if (whole != (uint64_t)bytes) return 0; /* more than this machine can address */
    if (at) memcpy(at, &bytes, sizeof bytes);
    return 1;
}

static void tkvi_write_size(const tkvi_row *row, const void *at, tkvi_out *o) {
    size_t bytes;
    (void)row;
    memcpy(&bytes, at, sizeof bytes);
    tkvi_print_count(o, bytes);
}

/* Reads a number, or the word zero, which is TKV_ZERO. In a JSON list the word has quotes. */
static int tkvi_read_number(tkvi_span s, float *x) {
    if (!tkvi_span_is(s, "zero") && !tkvi_span_is(s, "\"zero\"")) return tkvi_float_read(s.at, s.n, x);
    *x = TKV_ZERO;
    return 1;
}

static void tkvi_write_number(float x, tkvi_out *o) {
    if (!tkvi_is_named_zero(x)) {
        tkvi_print_float(o, x);
        return;
    }
    tkvi_print_quote(o);
    tkvi_print(o, "zero");
    tkvi_print_quote(o);
}

static int tkvi_read_float(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    float x;
    (void)r;
    (void)row;
    if (!tkvi_read_number(s, &x)) return 0;
    if (at) memcpy(at, &x, sizeof x);
    return 1;
}

static void tkvi_write_float(const tkvi_row *row, const void *at, tkvi_out *o) {
    float x;
    (void)row;
    memcpy(&x, at, sizeof x);
    tkvi_write_number(x, o);
}

/* Reads up to `most` numbers with commas between them to `at` (NULL: only checks). Returns how many; 0: no list. */
static int tkvi_read_list(tkvi_span s, int most, float *at) {
    int n;
    for (n = 0; n < most; n++) {
        float x;
        tkvi_span one = tkvi_split_front(&s, ',');
        if (!tkvi_read_number(one, &x)) return 0;
        if (at) at[n] = x;
        if (s.n == 0) return s.at[-1] == ',' ? 0 : n + 1; /* no comma at the end */
    }
    return 0;
}

static void tkvi_write_list(const float *x, int n, tkvi_out *o) {
    int i;
    if (o->json) tkvi_print(o, "[");
    for (i = 0; i < n; i++) {
        if (i) tkvi_print(o, ", ");
        tkvi_write_number(x[i], o);
    }
    if (o->json) tkvi_print(o, "]");
}

/* An array of floats; trailing zeros need not be written. */
static int tkvi_read_floats(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    const int most = (int)(row->size / sizeof(float));
    (void)r;
    if (!tkvi_read_list(s, most, NULL)) return 0;
    if (!at) return 1;
    memset(at, 0, row->size);
    return tkvi_read_list(s, most, (float *)at);
}

static void tkvi_write_floats(const tkvi_row *row, const void *at, tkvi_out *o) {
    const float *x = (const float *)at;
    int n = (int)(row->size / sizeof(float));
    while (n > 1 && tkvi_bits(x[n - 1]) == 0) n--;
    tkvi_write_list(x, n, o);
}

static int tkvi_read_format(tkvi_span s, tkv_format *out) {
    char name[16];
    if (s.n >= sizeof name) return 0;
    tkvi_copied(s, name, sizeof name);
    *out = tkvi_format_from_name(name);
    return *out != TKV_FORMAT_DEFAULT || strcmp(name, "default") == 0;
}

/* Reads formats of K and V: a30/r20, or one name for both sides. */
static int tkvi_read_pair(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    tkv_format_pair p;
    const size_t n = s.n;
    const tkvi_span k = tkvi_split_front(&s, '/');
    (void)r;
    (void)row;
    if (!tkvi_read_format(k, &p.k)) return 0;
    p.v = p.k;
    if (k.n < n && !tkvi_read_format(s, &p.v)) return 0;
    if (at) memcpy(at, &p, sizeof p);
    return 1;
}

static void tkvi_print_format(tkvi_out *o, tkv_format f) {
    const char *name = f == TKV_FORMAT_DEFAULT ? "default" : tkvi_format_name(f);
    if (!name) o->bad = TKV_ERR_CONFIG;
    else tkvi_print(o, name);
}

static void tkvi_print_pair(tkvi_out *o, tkv_format_pair p) {
    tkvi_print_quote(o);
    tkvi_print_format(o, p.k);
    if (p.k != p.v) {
        tkvi_print(o, "/");
        tkvi_print_format(o, p.v);
    }
    tkvi_print_quote(o);
}

static void tkvi_write_pair(const tkvi_row *row, const void *at, tkvi_out *o) {
    tkv_format_pair p;
    (void)row;
    memcpy(&p, at, sizeof p);
    tkvi_print_pair(o, p);
}

/* Reads names of bits joined by +, such as clip+norm, or none. */
static int tkvi_read_flags(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    int x = 0;
    (void)r;
    if (s.n == 0 || s.at[s.n - 1] == '+') return 0;
    while (s.n && !tkvi_span_is(s, "none")) {
        const tkvi_span one = tkvi_split_front(&s, '+');
        const tkvi_word *w;
        for (w = row->words; w->name && !tkvi_span_is(one, w->name); w++) continue;
        if (!w->name || (x & w->value)) return 0;
        x |= w->value;
    }
    if (s.n && x) return 0;
    if (at) memcpy(at, &x, sizeof x);
    return 1;
}

static void tkvi_write_flags(const tkvi_row *row, const void *at, tkvi_out *o) {
    int x = tkvi_field_int(row, at), any = 0;
    const tkvi_word *w;
    tkvi_print_quote(o);
    for (w = row->words; w->name; w++)
        if (x & w->value) {
            if (any++) tkvi_print(o, "+");
            tkvi_print(o, w->name);
            x &= ~w->value;
        }
    tkvi_print_quote(o);
    if (x) o->bad = TKV_ERR_CONFIG;
}

static int tkvi_name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
}

/* Reads a name into an array of characters that has room for the final zero. */
static int tkvi_read_name(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    size_t i;
    (void)r;
    if (s.n == 0 || s.n >= row->size) return 0;
    for (i = 0; i < s.n; i++)
        if (!tkvi_name_char(s.at[i])) return 0;
    if (!at) return 1;
    memset(at, 0, row->size);
    memcpy(at, s.at, s.n);
    return 1;
}

static void tkvi_write_name(const tkvi_row *row, const void *at, tkvi_out *o) {
    const char *name = (const char *)at;
    size_t n = 0;
    tkvi_print_quote(o);
    for (; n < row->size && name[n]; n++)
        if (!tkvi_name_char(name[n])) o->bad = TKV_ERR_CONFIG;
    if (n == row->size) o->bad = TKV_ERR_CONFIG;
    tkvi_print_bytes(o, name, n);
    tkvi_print_quote(o);
}

/* Entries of the caller's memory for frequencies. */
static int tkvi_frequencies_room(const tkvi_parser *r) {
    return r->room && r->room->frequencies ? r->room->n_frequencies : 0;
}

/* Reads rope.frequencies into the caller's memory (tkv_config_arrays), one list behind the other. The layers of a range
 * have one list. */
static int tkvi_read_frequencies(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    const int most = tkvi_frequencies_room(r), n = tkvi_read_list(s, TKV_MAX_HEAD_DIM / 2, NULL);
    (void)row;
    if (!n) return 0;
    if (r->taken_from != s.at) r->n_taken += n;
    r->taken_from = s.at;
    r->taken_line = r->key_line;
    if (!at || r->n_kept + r->n_taken > most) return 1; /* tkvi_check_frequencies reports it */
    {
        float *to = r->room->frequencies + (r->n_kept + r->n_taken - n);
        const float *x = to;
        tkvi_read_list(s, n, to);
        memcpy(at, &x, sizeof x);
    }
    return 1;
}

static void tkvi_write_frequencies(const tkvi_row *row, const void *at, tkvi_out *o) {
    const tkv_rope *rope =
        (const tkv_rope *)(const void *)((const char *)at - offsetof(tkv_rope, frequencies));
    (void)row;
    if (rope->dim < 2 || rope->dim > TKV_MAX_HEAD_DIM) o->bad = TKV_ERR_CONFIG;
    else tkvi_write_list(rope->frequencies, rope->dim / 2, o);
}

static int tkvi_read_preset(tkvi_parser *r, const tkvi_row *row, tkvi_span s, void *at) {
    char name[32];
    tkv_config any;
    (void)r;
    (void)row;
    memset(&any, 0, sizeof any);
    if (s.n >= sizeof name) return 0;
    tkvi_copied(s, name, sizeof name);
    return tkv_apply_preset(at ? (tkv_config *)at : &any, name) == TKV_OK;
}

static const tkvi_kind tkvi_kinds[] = {
    {"a whole number", tkvi_read_int, tkvi_write_int},
    {"bytes, such as 65536, 512K, 1.5G, 64MiB", tkvi_read_size, tkvi_write_size},
    {"a number", tkvi_read_float, tkvi_write_float},
    {"numbers with commas between them", tkvi_read_floats, tkvi_write_floats},
    {"formats of K and V, such as a30/r20, or one for both (tkv_get_name)", tkvi_read_pair, tkvi_write_pair},
    {"names joined by +", tkvi_read_flags, tkvi_write_flags},
    {"a short name of letters, digits and _ - .", tkvi_read_name, tkvi_write_name},
    {"rope.dim / 2 numbers with commas between them", tkvi_read_frequencies, tkvi_write_frequencies},
    {"the name of a preset (tkv_get_name)", tkvi_read_preset, NULL},
};

/* >>the table of all fields */
static const tkvi_word tkvi_words_off[] = {{"off", TKV_OFF}, {NULL, 0}};
static const tkvi_word tkvi_words_length[] = {{"off", TKV_OFF}, {"unlimited", TKV_UNLIMITED}, {NULL, 0}};
static const tkvi_word tkvi_words_rope[] = {{"fixed", TKV_ROPE_FIXED},
                                            {"mrope", TKV_ROPE_MROPE},
                                            {"dynamic", TKV_ROPE_DYNAMIC},
                                            {"learned", TKV_ROPE_LEARNED},
                                            {NULL, 0}};
static const tkvi_word tkvi_words_nonfinite[] = {
    {"refuse", TKV_NONFINITE_REFUSE}, {"saturate", TKV_NONFINITE_SATURATE}, {NULL, 0}};
static const tkvi_word tkvi_words_heads[] = {
    {"mean", TKV_IMPORTANCE_MEAN}, {"max", TKV_IMPORTANCE_MAX}, {"sum", TKV_IMPORTANCE_SUM}, {NULL, 0}};
#define TKVI_ROW(type, field, kind, words)                                                                   \
    {                                                                                                        \
#field, kind, offsetof(type, field), sizeof(((type *)0)->field), words, TKV_NAME_COUNT, 0, 0, 0, 0,  \
            NULL                                                                                             \
    }
#define TKVI_NAMED(type, field, names)                                                                       \
    { #field, TKVI_INT, offsetof(type, field), sizeof(((type *)0)->field), NULL, names, 0, 0, 0, 0, NULL }

static const tkvi_row tkvi_config_rows[] = {
    {"preset", TKVI_PRESET, 0, 0, NULL, TKV_NAME_COUNT, 0, 0, 0, 0, NULL},
    TKVI_ROW(tkv_config, model.n_layers, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, model.n_heads, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, model.n_kv_heads, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, model.head_dim, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, model.v_head_dim, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, model.v_in_k, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_config, model.scale, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_config, limits.max_seqs, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, limits.max_tokens, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, limits.max_append, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, limits.max_states, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, limits.state_bytes, TKVI_SIZE, NULL),
    TKVI_ROW(tkv_config, tiers.sink_tokens, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_config, tiers.hot_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_config, tiers.warm_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_config, model.window, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_config, model.window_sinks, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_config, tiers.hot, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_config, tiers.warm, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_config, tiers.archive, TKVI_PAIR, NULL),
};

static const tkvi_row tkvi_later_rows[] = {
    /* fields that a text has after those of cfg.format */
    TKVI_ROW(tkv_config, host.nonfinite, TKVI_INT, tkvi_words_nonfinite),
    TKVI_ROW(tkv_config, host.precise, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_config, host.wipe_freed, TKVI_INT, tkvi_words_switch),
    TKVI_NAMED(tkv_config, host.isa, TKV_NAME_ISA),
    TKVI_ROW(tkv_config, meter.heads, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, meter.tokens, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, meter.every, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, meter.target, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_config, budget.bytes, TKVI_SIZE, NULL),
    TKVI_ROW(tkv_config, budget.n_levels, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, tiers.n_anchors, TKVI_INT, NULL),
    TKVI_ROW(tkv_config, budget.discard, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_config, budget.adapt, TKVI_INT, tkvi_words_switch),
};

static const tkvi_row tkvi_rope_rows[] = {
    TKVI_ROW(tkv_rope, dim, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_rope, first, TKVI_INT, NULL),
    TKVI_ROW(tkv_rope, kind, TKVI_INT, tkvi_words_rope),
    TKVI_ROW(tkv_rope, interleaved, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_rope, base, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_rope, scale, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_rope, frequencies, TKVI_FREQUENCIES, NULL),
};

static const tkvi_row tkvi_layer_rows[] = {
    TKVI_ROW(tkv_layer_config, n_heads, TKVI_INT, NULL),
    TKVI_ROW(tkv_layer_config, n_kv_heads, TKVI_INT, NULL),
    TKVI_ROW(tkv_layer_config, head_dim, TKVI_INT, NULL),
    TKVI_ROW(tkv_layer_config, v_head_dim, TKVI_INT, NULL),
    TKVI_ROW(tkv_layer_config, v_in_k, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_layer_config, no_cache, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_layer_config, share_kv, TKVI_INT, NULL),
    TKVI_ROW(tkv_layer_config, sink_tokens, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_layer_config, hot_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_layer_config, warm_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_layer_config, window, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_layer_config, window_sinks, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_layer_config, hot, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_layer_config, warm, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_layer_config, archive, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_layer_config, rope.dim, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_layer_config, rope.first, TKVI_INT, NULL),
    TKVI_ROW(tkv_layer_config, rope.kind, TKVI_INT, tkvi_words_rope),
    TKVI_ROW(tkv_layer_config, rope.interleaved, TKVI_INT, tkvi_words_switch),
    TKVI_ROW(tkv_layer_config, rope.base, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_layer_config, rope.scale, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_layer_config, rope.frequencies, TKVI_FREQUENCIES, NULL),
};

static const tkvi_row tkvi_level_rows[] = {
    TKVI_ROW(tkv_level, hot_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_level, warm_tokens, TKVI_INT, tkvi_words_length),
    TKVI_ROW(tkv_level, warm, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_level, archive, TKVI_PAIR, NULL),
    TKVI_ROW(tkv_level, from_tokens, TKVI_INT, NULL),
};

static const tkvi_row tkvi_pressure_rows[] = {
    TKVI_NAMED(tkv_pressure_config, profile, TKV_NAME_PROFILE),
    TKVI_ROW(tkv_pressure_config, threshold, TKVI_FLOATS, NULL),
    TKVI_ROW(tkv_pressure_config, hysteresis, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_pressure_config, alpha, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_pressure_config, min_level, TKVI_INT, NULL),
    TKVI_ROW(tkv_pressure_config, max_level, TKVI_INT, tkvi_words_off),
};

static const tkvi_row tkvi_offload_rows[] = {
    TKVI_ROW(tkv_offload_config, keep_exact, TKVI_INT, tkvi_words_switch),
};

static const tkvi_row tkvi_evict_config_rows[] = {
    TKVI_NAMED(tkv_evict_config, policy, TKV_NAME_EVICT_POLICY),
    TKVI_ROW(tkv_evict_config, keep_tokens, TKVI_INT, NULL),
    TKVI_ROW(tkv_evict_config, keep_first, TKVI_INT, NULL),
    TKVI_ROW(tkv_evict_config, keep_last, TKVI_INT, NULL),
    TKVI_ROW(tkv_evict_config, sink_tokens, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_evict_config, recent_tokens, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_evict_config, pool, TKVI_INT, NULL),
    TKVI_ROW(tkv_evict_config, seed, TKVI_INT, NULL),
    TKVI_ROW(tkv_evict_config, trigger, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_evict_config, batch, TKVI_INT, NULL),
};

static const tkvi_row tkvi_importance_rows[] = {
    TKVI_NAMED(tkv_importance_config, strategy, TKV_NAME_IMPORTANCE),
    TKVI_ROW(tkv_importance_config, decay, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_importance_config, attention, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_importance_config, recency, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_importance_config, tau, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_importance_config, low, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_importance_config, heads, TKVI_INT, tkvi_words_heads),
    TKVI_ROW(tkv_importance_config, sample_every, TKVI_INT, NULL),
};

static const tkvi_row tkvi_promotion_rows[] = {
    TKVI_ROW(tkv_promotion_config, threshold, TKVI_FLOAT, NULL),
    TKVI_ROW(tkv_promotion_config, per_step, TKVI_INT, NULL),
    TKVI_ROW(tkv_promotion_config, cooldown, TKVI_INT, tkvi_words_off),
    TKVI_ROW(tkv_promotion_config, every, TKVI_INT, NULL),
};

#define TKVI_ROWS_OF(rows) rows, (int)(sizeof(rows) / sizeof *(rows))

/* tkvi_parser.seen has a bit for each field: check at compile time that it is large enough. */
enum { TKVI_LAYER_FIELDS = TKVI_MAX_LAYERS * (int)(sizeof tkvi_layer_rows / sizeof *tkvi_layer_rows) };
typedef char tkvi_seen_is_enough[TKVI_LAYER_FIELDS + 512 <= 8 * TKVI_SEEN_BYTES ? 1 : -1];

enum {
    TKVI_OF_CONFIG,
    TKVI_OF_FORMAT,
    TKVI_OF_LATER,
    TKVI_OF_ROPE,
    TKVI_OF_PRESSURE,
    TKVI_OF_EVICT,
    TKVI_OF_OFFLOAD,
    TKVI_OF_IMPORTANCE,
    TKVI_OF_PROMOTION,
    TKVI_OF_LADDER,
    TKVI_OF_LAYERS,
    TKVI_CONFIG_FIELDS
};

static const tkvi_fields tkvi_config_fields[TKVI_CONFIG_FIELDS] = {
    {NULL, 0, 0, 0, TKVI_ROWS_OF(tkvi_config_rows)},
    {"format", 0, offsetof(tkv_config, format), 0, TKVI_ROWS_OF(tkvi_option_rows)},
    {NULL, 0, 0, 0, TKVI_ROWS_OF(tkvi_later_rows)},
    {"model.rope", 0, offsetof(tkv_config, model.rope), 0, TKVI_ROWS_OF(tkvi_rope_rows)},
    {"budget.pressure", 0, offsetof(tkv_config, budget.pressure), 0, TKVI_ROWS_OF(tkvi_pressure_rows)},
    {"evict", 0, offsetof(tkv_config, evict), 0, TKVI_ROWS_OF(tkvi_evict_config_rows)},
    {"offload", 0, offsetof(tkv_config, offload), 0, TKVI_ROWS_OF(tkvi_offload_rows)},
    {"importance", 0, offsetof(tkv_config, importance), 0, TKVI_ROWS_OF(tkvi_importance_rows)},
    {"promotion", 0, offsetof(tkv_config, promotion), 0, TKVI_ROWS_OF(tkvi_promotion_rows)},
    {"budget.ladder", TKV_MAX_LEVELS, 0, sizeof(tkv_level), TKVI_ROWS_OF(tkvi_level_rows)},
    {"layers", TKVI_MAX_LAYERS, 0, sizeof(tkv_layer_config), TKVI_ROWS_OF(tkvi_layer_rows)},
};

/* The lists of a config: offsets of pointer and count in tkv_config, and in the caller's tkv_config_arrays. */
typedef struct tkvi_array {
    int group;
    const char *count_name;
    size_t at, count;           /* in tkv_config */
    size_t room_at, room_count; /* in tkv_config_arrays */
} tkvi_array;

#define TKVI_ARRAY(group, list, list_count, name, count)                                                     \
    {                                                                                                        \
        group, #list_count, offsetof(tkv_config, list), offsetof(tkv_config, list_count),                    \
            offsetof(tkv_config_arrays, name), offsetof(tkv_config_arrays, count)                            \
    }

static const tkvi_array tkvi_arrays[] = {
    TKVI_ARRAY(TKVI_OF_LAYERS, layers, model.n_layers, layers, n_layers),
    TKVI_ARRAY(TKVI_OF_LADDER, budget.ladder, budget.n_levels, ladder, n_levels)};

#define TKVI_ARRAYS ((int)(sizeof tkvi_arrays / sizeof *tkvi_arrays))

/* >>errors: the line, the error, and what a valid text would have */
static tkvi_text *tkvi_append_line(tkvi_parser *r, int line) {
    tkvi_append_text(&r->reason, "line ");
    tkvi_append_int(&r->reason, line);
    tkvi_append_text(&r->reason, ": ");
    return &r->reason;
}

static int tkvi_unreadable(tkvi_parser *r, const char *what) {
    tkvi_append_text(tkvi_append_line(r, r->line), what);
    return -1;
}

/* The edit distance of two names; b has at most 63 characters. */
static int tkvi_distance(const char *a, const char *b) {
    int row[64], i, k, n = (int)strlen(b);
    for (k = 0; k <= n; k++) row[k] = k;
    for (i = 1; a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (k = 1; k <= n; k++) {
            const int other = corner + (a[i - 1] != b[k - 1]);
            corner = row[k];
            row[k] = tkvi_min(other, 1 + tkvi_min(row[k], row[k - 1]));
        }
    }
    return row[n];
}

/* The name of a field without its groups: n_layers of model.n_layers. */
static const char *tkvi_last_part(const char *name) {
    const char *last = name;
    for (; *name; name++)
        if (*name == '.') last = name + 1;
    return last;
}

/* Appends the error for an unknown key, with the nearest known key. The key may lack its group. */
static void tkvi_append_unknown(tkvi_parser *r) {
    tkvi_text *t = tkvi_append_line(r, r->key_line);
    char key[48], name[64];
    size_t i, n = 0;
    int g, row, inside = 0, best = 4, best_g = -1, best_row = 0;
    for (i = 0; i < r->key.n && n + 1 < sizeof key; i++) { /* compares layers[3].window as layers.window */
        inside += r->key.at[i] == '[';
        if (!inside) key[n++] = r->key.at[i];
        inside -= r->key.at[i] == ']';
    }
    key[n] = 0;
    for (g = 0; g < r->n_fields; g++)
        for (row = 0; row < r->fields[g].n_rows; row++) {
            tkvi_text at = tkvi_text_begin(name, sizeof name);
            int distance;
            if (r->fields[g].name) tkvi_append_text(&at, r->fields[g].name);
            if (r->fields[g].name) tkvi_append_text(&at, ".");
            tkvi_append_text(&at, r->fields[g].row[row].name);
            distance = tkvi_min(tkvi_distance(key, name), tkvi_distance(key, tkvi_last_part(name)));
            if (distance >= best) continue;
            best = distance;
            best_g = g;
            best_row = row;
        }
    tkvi_append_span(t, r->key);
    tkvi_append_text(t, " is no key; ");
    tkvi_append_text(t, best_g < 0 ? "keys are the fields of the config" : "the nearest one is ");
    if (best_g < 0) return;
    if (r->fields[best_g].name) {
        tkvi_append_text(t, r->fields[best_g].name);
        if (r->fields[best_g].most) {
            tkvi_append_text(t, "[i] or [i-j], up to ");
            tkvi_append_int(t, r->fields[best_g].most - 1);
            tkvi_append_text(t, ", and ");
        }
        tkvi_append_text(t, ".");
    }
    tkvi_append_text(t, r->fields[best_g].row[best_row].name);
}

static void tkvi_append_bad_value(tkvi_parser *r, const tkvi_row *row) {
    tkvi_text *t = tkvi_append_line(r, r->key_line);
    const char *word;
    int i, value;
    tkvi_append_span(t, r->key);
    tkvi_append_text(t, r->value.n ? " is " : " has no value");
    tkvi_append_span(t, r->value);
    tkvi_append_text(t, "; it must be ");
    tkvi_append_text(t, tkvi_kinds[row->kind].want);
    for (i = 0; (word = tkvi_word_at(row, i, &value)) != NULL; i++) {
        tkvi_append_text(t, i ? ", " : row->kind == TKVI_FLAGS ? ": " : " or ");
        tkvi_append_text(t, word);
    }
}

/* >>scanning: finds the next key and its value */
/* Skips blanks, ends of lines and comments. */
static void tkvi_skip(tkvi_parser *r) {
    int comment = 0;
    for (; r->at < r->end && (comment || *r->at == '#' || tkvi_blank(*r->at)); r->at++) {
        comment = *r->at != '\n' && (comment || *r->at == '#');
        r->line += *r->at == '\n';
    }
}

static int tkvi_is_next(const tkvi_parser *r, char c) { return r->at < r->end && *r->at == c; }

/* Reads up to the closing character; the present character is the opening one. *out excludes both. Returns 1, or -1
 * after an error. */
static int tkvi_enclosed(tkvi_parser *r, char close, tkvi_span *out) {
    const char *from = ++r->at;
    for (; r->at < r->end && *r->at != close; r->at++) {
        if (*r->at == '\n' && close == '"') break;
        if (*r->at == '\\') return tkvi_unreadable(r, "there is a backslash; no key and no value needs one");
        r->line += *r->at == '\n';
    }
    if (!tkvi_is_next(r, close))
        return tkvi_unreadable(r, close == '"' ? "a \" is missing" : "a ] is missing");
    *out = tkvi_trimmed(from, r->at++);
    return 1;
}

static int tkvi_one_of(char c, const char *set) {
    while (*set && *set != c) set++;
    return *set != 0;
}

/* Reads a value: "in quotes", [a list], or plain text up to one of the characters in `ends`. */
static int tkvi_scan_value(tkvi_parser *r, const char *ends) {
    const char *from;
    while (r->at < r->end && *r->at != '\n' && tkvi_blank(*r->at)) r->at++;
    if (tkvi_is_next(r, '"')) return tkvi_enclosed(r, '"', &r->value);
    if (tkvi_is_next(r, '[')) return tkvi_enclosed(r, ']', &r->value);
    if (tkvi_is_next(r, '{'))
        return tkvi_unreadable(r, "an object in an object; write \"model.rope.dim\": 64 instead");
    for (from = r->at; r->at < r->end && !tkvi_one_of(*r->at, ends);) r->at++;
    r->value = tkvi_trimmed(from, r->at);
    return 1;
}

/* Reads a line `key = value`. Returns 1, or -1 after an error, with the reason written. */
static int tkvi_next_line(tkvi_parser *r) {
    const char *from = r->at;
    while (r->at < r->end && !tkvi_one_of(*r->at, "=\n#")) r->at++;
    r->key = tkvi_trimmed(from, r->at);
    if (!tkvi_is_next(r, '=')) return tkvi_unreadable(r, "there is no =; write key = value");
    r->at++;
    if (tkvi_scan_value(r, "\n#") < 0) return -1;
    while (r->at < r->end && *r->at != '\n' && tkvi_blank(*r->at)) r->at++;
    if (r->at < r->end && !tkvi_one_of(*r->at, "\n#"))
        return tkvi_unreadable(r, "something follows the value");
    return 1;
}

/* Reads the next pair of a JSON object. Returns 1, 0 at the end, or -1 after an error. */
static int tkvi_next_pair(tkvi_parser *r) {
    const int first = !r->begun;
    if (first) r->at++; /* the brace */
    r->begun = 1;
    tkvi_skip(r);
    if (tkvi_is_next(r, '}')) {
        r->at++;
        tkvi_skip(r);
        return r->at < r->end ? tkvi_unreadable(r, "something follows the object") : 0;
    }
    if (!first) {
        if (!tkvi_is_next(r, ',')) return tkvi_unreadable(r, "a , or a } is missing");
        r->at++;
        tkvi_skip(r);
    }
    r->key_line = r->line;
    if (!tkvi_is_next(r, '"')) return tkvi_unreadable(r, "a key in quotes is missing");
    if (tkvi_enclosed(r, '"', &r->key) < 0) return -1;
    tkvi_skip(r);
    if (!tkvi_is_next(r, ':')) return tkvi_unreadable(r, "a : is missing after the key");
    r->at++;
    tkvi_skip(r);
    return tkvi_scan_value(r, ",}#\n");
}

/* Reads the next key and value. Returns 1, 0 at the end, or -1 after an error. */
static int tkvi_next(tkvi_parser *r) {
    if (!r->json || r->begun) tkvi_skip(r);
    r->key_line = r->line;
    if (r->json) return tkvi_next_pair(r);
    return r->at < r->end ? tkvi_next_line(r) : 0;
}

static void tkvi_rewind(tkvi_parser *r) {
    r->at = r->text;
    r->line = 1;
    r->begun = 0;
    if (r->end - r->at >= 3 && memcmp(r->at, "\xef\xbb\xbf", 3) == 0) r->at += 3; /* a byte order mark */
    tkvi_skip(r);
    r->json = tkvi_is_next(r, '{');
}

/* >>reading */
/* Removes `name` from the front of s. Returns 0 if s does not begin with it. */
static int tkvi_take(tkvi_span *s, const char *name) {
    const size_t n = strlen(name);
    if (s->n < n || memcmp(s->at, name, n) != 0) return 0;
    s->at += n;
    s->n -= n;
    return 1;
}

/* Removes a number from the front of s and returns it; -1: there is none below `most`. */
static int tkvi_take_index(tkvi_span *s, int most) {
    tkvi_span number = *s;
    uint64_t n;
    for (number.n = 0; number.n < s->n && s->at[number.n] >= '0' && s->at[number.n] <= '9';) number.n++;
    if (!tkvi_digits(number, &n) || n >= (uint64_t)most) return -1;
    s->at += number.n;
    s->n -= number.n;
    return (int)n;
}

/* Finds the row of the present key, its group and, in a list, the entries `from` to `to`. NULL: unknown key. */
static const tkvi_row *tkvi_find_row(const tkvi_parser *r, int *group, int *from, int *to) {
    int i;
    for (*group = 0; *group < r->n_fields; ++*group) {
        const tkvi_fields *g = &r->fields[*group];
        tkvi_span field = r->key;
        *from = *to = 0;
        if (g->name && !tkvi_take(&field, g->name)) continue;
        if (g->most) {
            if (!tkvi_take(&field, "[")) continue;
            *from = *to = tkvi_take_index(&field, g->most);
            if (*from >= 0 && tkvi_take(&field, "-")) *to = tkvi_take_index(&field, g->most);
            if (*to < *from || *from < 0 || !tkvi_take(&field, "]")) continue;
        }
        if (g->name && !tkvi_take(&field, ".")) continue;
        for (i = 0; i < g->n_rows; i++)
            if (tkvi_span_is(field, g->row[i].name)) return &g->row[i];
    }
    return NULL;
}

/* Marks a field as given. Returns 0 if it was marked already. */
static int tkvi_mark_seen(tkvi_parser *r, int group, int index, const tkvi_row *row) {
    size_t bit = (size_t)index * (size_t)r->fields[group].n_rows + (size_t)(row - r->fields[group].row);
    int g;
    for (g = 0; g < group; g++) bit += (size_t)tkvi_max(1, r->fields[g].most) * (size_t)r->fields[g].n_rows;
    if (r->seen[bit / 8] >> bit % 8 & 1) return 0;
    r->seen[bit / 8] = (uint8_t)(r->seen[bit / 8] | 1 << bit % 8);
    return 1;
}

enum { TKVI_CHECK, TKVI_BEGIN, TKVI_TAKE }; /* the three passes over a text */

/* Keeps, in the check pass, what tkvi_check_frequencies needs. */
static void tkvi_note_rope(tkvi_parser *r, int group, int layer, const tkvi_row *row) {
    const int n = row->kind == TKVI_FREQUENCIES ? tkvi_read_list(r->value, TKV_MAX_HEAD_DIM / 2, NULL) : 0;
    int dim = 0;
    if (row->kind == TKVI_FREQUENCIES && group != TKVI_OF_LAYERS) {
        r->frequencies = n;
        r->frequencies_line = r->key_line;
    }
    if (group != TKVI_OF_LAYERS) return;
    if (row->offset == offsetof(tkv_layer_config, rope.dim) && tkvi_read_int(r, row, r->value, &dim))
        r->pairs[layer] = (uint16_t)(r->pairs[layer] + (dim > 0 && dim <= TKV_MAX_HEAD_DIM ? dim / 2 : 0));
    r->pairs[layer] = (uint16_t)(r->pairs[layer] - n);
}

/* Reads all values of one pass into their fields. The check pass does not write to lists or frequencies, whose
 * memory is the caller's, and does not apply presets. */
static tkv_status tkvi_parse_all(tkvi_parser *r, int pass) {
    int found, g, i, from, to;
    tkvi_rewind(r);
    r->n_taken = 0;
    r->taken_from = NULL;
    for (found = tkvi_next(r); found > 0; found = tkvi_next(r)) {
        const tkvi_row *row = tkvi_find_row(r, &g, &from, &to);
        int begins;
        if (!row) {
            tkvi_append_unknown(r);
            return TKV_ERR_CONFIG;
        }
        begins = !tkvi_kinds[row->kind].write;
        if (pass != TKVI_CHECK && begins != (pass == TKVI_BEGIN)) continue;
        if (to >= r->highest[g]) {
            r->highest[g] = to + 1;
            r->highest_line[g] = r->key_line;
        }
        for (i = from; i <= to; i++) {
            const int listed = r->fields[g].most || row->kind == TKVI_FREQUENCIES;
            const int later = pass == TKVI_CHECK && (begins || listed);
            char *at = later ? NULL : (char *)r->base[g] + (size_t)i * r->fields[g].stride + row->offset;
            if (pass == TKVI_CHECK && !tkvi_mark_seen(r, g, i, row)) {
                tkvi_append_span(tkvi_append_line(r, r->key_line), r->key);
                tkvi_append_text(&r->reason, " is there for the second time; it must be there once");
                return TKV_ERR_CONFIG;
            }
            if (!tkvi_kinds[row->kind].read(r, row, r->value, at)) {
                tkvi_append_bad_value(r, row);
                return TKV_ERR_CONFIG;
            }
            if (pass == TKVI_CHECK && r->fields == tkvi_config_fields) tkvi_note_rope(r, g, i, row);
        }
    }
    return found < 0 ? TKV_ERR_CONFIG : TKV_OK;
}

/* Prepares to read `text` into the parts of the struct `whole`. */
static void tkvi_parse_begin(tkvi_parser *r, const tkvi_fields *fields, int n, void *whole, const char *text,
                             size_t size, char *reason, size_t reason_size) {
    int g;
    memset(r, 0, sizeof *r);
    for (g = 0; g < n; g++) r->base[g] = (char *)whole + fields[g].offset;
    r->fields = fields;
    r->n_fields = n;
    r->text = text;
    r->end = text + size;
    r->reason = tkvi_text_begin(reason, reason ? reason_size : 0);
}

/* Appends the error for a number that is too small or too large, with the right one. */
static tkv_status tkvi_report_wrong_count(tkvi_parser *r, int line, const char *what, int room, int want,
                                          const char *why) {
    tkvi_text *t = tkvi_append_line(r, line);
    tkvi_append_text(t, what);
    tkvi_append_int(t, room);
    tkvi_append_text(t, "; it must be ");
    tkvi_append_int(t, want);
    tkvi_append_text(t, why);
    return TKV_ERR_CONFIG;
}

/* The line of a key that the text has. */
static int tkvi_line_of(tkvi_parser *r, const char *key) {
    tkvi_rewind(r);
    while (tkvi_next(r) > 0 && !tkvi_span_is(r->key, key)) continue;
    return r->key_line;
}

/* Reads a pointer field. It assumes that pointers to all object types have one representation. */
static void *tkvi_member_pointer(const void *base, size_t offset) {
    void *x;
    memcpy(&x, (const char *)base + offset, sizeof x);
    return x;
}

/* Checks a list of the config (was: the config before). If the text names entries, the caller's memory must hold
 * the whole list. If it does not, the list of the program stays, and the text must not make it longer. */
static tkv_status tkvi_check_array(tkvi_parser *r, const tkvi_array *a, const tkv_config *cfg,
                                   const tkv_config *was) {
    const int highest = r->highest[a->group], line = r->highest_line[a->group];
    const int n = tkvi_member_int(cfg, a->count), had = tkvi_member_int(was, a->count);
    char what[64];
    tkvi_text t = tkvi_text_begin(what, sizeof what);
    int room = 0;
    if (r->room && tkvi_member_pointer(r->room, a->room_at)) room = tkvi_member_int(r->room, a->room_count);
    tkvi_append_text(&t, a->count_name);
    tkvi_append_text(&t, " is ");
    if (highest > n)
        return tkvi_report_wrong_count(r, line, what, n, highest, " or more, by the highest one named");
    if (!highest && tkvi_member_pointer(was, a->at) && n > had)
        return tkvi_report_wrong_count(r, tkvi_line_of(r, a->count_name), what, n, had,
                                       " or less, as the program has them");
    t = tkvi_text_begin(what, sizeof what);
    tkvi_append_text(&t, "the program's room for ");
    tkvi_append_text(&t, r->fields[a->group].name);
    tkvi_append_text(&t, " is ");
    if (highest && n > room)
        return tkvi_report_wrong_count(r, line, what, room, n, " or more (tkv_config_arrays)");
    return TKV_OK;
}

/* Checks the frequencies of each layer that the text gives some. */
static tkv_status tkvi_check_layer_frequencies(tkvi_parser *r) {
    const tkvi_row *row;
    int found, g, from, to;
    tkvi_rewind(r);
    for (found = tkvi_next(r); found > 0; found = tkvi_next(r)) {
        row = tkvi_find_row(r, &g, &from, &to);
        if (!row || g != TKVI_OF_LAYERS || row->kind != TKVI_FREQUENCIES) continue;
        for (; from <= to; from++) {
            const int n = tkvi_read_list(r->value, TKV_MAX_HEAD_DIM / 2, NULL);
            char what[48];
            tkvi_text t = tkvi_text_begin(what, sizeof what);
            if (!r->pairs[from]) continue;
            tkvi_append_text(&t, "layers[");
            tkvi_append_int(&t, from);
            tkvi_append_text(&t, "].rope.dim is ");
            return tkvi_report_wrong_count(r, r->key_line, what, 2 * ((r->pairs[from] + n) & 255), 2 * n,
                                           ", two for each of its frequencies");
        }
    }
    return TKV_OK;
}

/* The same check for rope.frequencies, which has rope.dim / 2 entries. */
static tkv_status tkvi_check_frequencies(tkvi_parser *r, const tkv_config *cfg, const tkv_config *was) {
    const int n = r->frequencies, line = r->frequencies_line, room = tkvi_frequencies_room(r);
    if (n && n * 2 != cfg->model.rope.dim)
        return tkvi_report_wrong_count(r, line, "model.rope.dim is ", cfg->model.rope.dim, 2 * n,
                                       ", two for each of model.rope.frequencies");
    if (!n && room && was->model.rope.frequencies == r->room->frequencies)
        r->n_kept = tkvi_max(0, was->model.rope.dim / 2);
    if (r->n_taken && r->n_kept + r->n_taken > room)
        return tkvi_report_wrong_count(r, r->taken_line,
                                       n == r->n_taken ? "the program's room for model.rope.frequencies is "
                                                       : "the program's room for frequencies is ",
                                       room, r->n_kept + r->n_taken, " or more (tkv_config_arrays)");
    if (!n && was->model.rope.frequencies && cfg->model.rope.dim > was->model.rope.dim)
        return tkvi_report_wrong_count(r, tkvi_line_of(r, "model.rope.dim"), "model.rope.dim is ",
                                       cfg->model.rope.dim, was->model.rope.dim,
                                       " or less, as the program has frequencies");
    return tkvi_check_layer_frequencies(r);
}

TKV_API tkv_status tkv_parse_config(tkv_config *cfg, const tkv_config_arrays *room, const char *text,
                                    size_t size, char *reason, size_t reason_size) {
    tkvi_parser r;
    tkv_config full;
    tkv_status st;
    int i;
    if (reason && reason_size) *reason = 0;
    if (!cfg || !text) return TKV_ERR_ARG;
    full = *cfg;
    tkvi_parse_begin(&r, tkvi_config_fields, TKVI_CONFIG_FIELDS, &full, text, size, reason, reason_size);
    r.room = room;
    st = tkvi_parse_all(&r, TKVI_CHECK);
    if (!st) st = tkvi_check_frequencies(&r, &full, cfg);
    for (i = 0; i < TKVI_ARRAYS && !st; i++) st = tkvi_check_array(&r, &tkvi_arrays[i], &full, cfg);
    if (st) return st;
    for (i = 0; i < TKVI_ARRAYS; i++) {
        const tkvi_array *a = &tkvi_arrays[i];
        void *list;
        if (!r.highest[a->group]) continue;
        r.base[a->group] = list = tkvi_member_pointer(room, a->room_at);
        memset(list, 0, (size_t)tkvi_member_int(&full, a->count) * r.fields[a->group].stride);
    }
    st = tkvi_parse_all(&r, TKVI_BEGIN);
    for (i = 0; i < TKVI_ARRAYS; i++) /* after a preset, which can have a ladder of its own */
        if (r.highest[tkvi_arrays[i].group])
            memcpy((char *)&full + tkvi_arrays[i].at, &r.base[tkvi_arrays[i].group], sizeof(void *));
    if (!st) st = tkvi_parse_all(&r, TKVI_TAKE);
    if (!st) *cfg = full;
    return st;
}

/* >>writing */
static void tkvi_print_key(tkvi_out *o, const tkvi_fields *g, int index, const char *name) {
    if (o->json && o->more) tkvi_print(o, ",");
    if (o->json) tkvi_print(o, o->json == 1 ? "\n  \"" : o->more ? " \"" : "\"");
    o->more = 1;
    if (g && g->name) tkvi_print(o, g->name);
    if (g && g->most) {
        tkvi_print(o, "[");
        tkvi_print_int(o, index);
        tkvi_print(o, "]");
    }
    if (g && g->name) tkvi_print(o, ".");
    tkvi_print(o, name);
    tkvi_print(o, o->json ? "\": " : " = ");
}

/* Writes the fields of one struct that are not zero. */
static void tkvi_write_fields(tkvi_out *o, const tkvi_fields *g, int index, const void *base) {
    int i;
    size_t k;
    for (i = 0; i < g->n_rows; i++) {
        const tkvi_row *row = &g->row[i];
        const uint8_t *at = (const uint8_t *)base + (size_t)index * g->stride + row->offset;
        for (k = 0; k < row->size && !at[k]; k++) continue;
        if (k == row->size || !tkvi_kinds[row->kind].write) continue;
        tkvi_print_key(o, g, index, row->name);
        tkvi_kinds[row->kind].write(row, at, o);
        if (!o->json) tkvi_print(o, "\n");
    }
}

static void tkvi_write_config(tkvi_out *o, const tkv_config *cfg) {
    int g, i, n;
    if (o->json) tkvi_print(o, "{");
    for (g = 0; g < TKVI_CONFIG_FIELDS; g++) {
        const tkvi_fields *fields = &tkvi_config_fields[g];
        const void *part = (const char *)cfg + fields->offset;
        n = tkvi_max(1, fields->most);
        for (i = 0; i < TKVI_ARRAYS; i++) {
            if (tkvi_arrays[i].group != g) continue;
            part = tkvi_member_pointer(cfg, tkvi_arrays[i].at);
            n = part ? tkvi_member_int(cfg, tkvi_arrays[i].count) : 0;
        }
        if (n < 0 || n > tkvi_max(1, fields->most)) o->bad = TKV_ERR_CONFIG;
        for (i = 0; i < n && !o->bad; i++) tkvi_write_fields(o, fields, i, part);
    }
    if (o->json) tkvi_print(o, o->json == 1 ? "\n}\n" : "}");
}

static void tkvi_config_text(tkvi_out *o, const void *what) {
    tkvi_write_config(o, (const tkv_config *)what);
}

static void tkvi_config_json(tkvi_out *o, const void *what) {
    o->json = 1;
    tkvi_write_config(o, (const tkv_config *)what);
}

TKV_API tkv_status tkv_print_config(const tkv_config *cfg, int json, char *buf, size_t size, size_t *needed) {
    if (!cfg) return TKV_ERR_ARG;
    return tkvi_write_text(json ? tkvi_config_json : tkvi_config_text, cfg, buf, size, needed);
}

#endif /* TKV_NO_REPORTS */
#endif /* TKVI_REPORT_TEXT_H */
