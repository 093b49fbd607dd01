/*
 * report/text.h - reads and writes configs as text: lines of `key = value`, TOML, or one JSON object. The keys are the
 * names of the fields. A table has one row for each field; the row's kind gives the functions that read and write it.
 * To add a field, add a row.
 *
 *     # comment                          {
 *     model.n_layers = 32                  "model.n_layers": 32,
 *     [tiers]                              "tiers": {
 *     archive = "a30/r20"                    "archive": "a30/r20"
 *                                          },
 *     [layers.0-5]                         "layers": {"0-5": {
 *     window = 1024                          "window": 1024
 *                                          }}
 *                                        }
 *
 * The reader knows one form of a key: the whole path, such as layers[0-5].window. Headers of tables and objects are
 * prefixes that it puts before the keys inside them.
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
    int json;        /* 0: lines; 1: JSON; 2: JSON on one line */
    int more;        /* 1: the object already has a value */
    tkv_status bad;  /* error: a value has no text */
    int tables;      /* 1: keys stand in tables (TOML) or in objects (JSON) */
    char table[64];  /* the table of the last key, such as layers.3.rope */
    const char *top; /* with tables: the first part of the names that are written now, up to a dot */
    int inside;      /* with tables: 1: of these, the fields in groups of their own, such as model.rope.dim */
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

/* JSON and TOML have strings in quotes, and lists in brackets. Lines have neither. */
static int tkvi_has_quotes(const tkvi_out *o) { return o->json || o->tables; }

static void tkvi_print_quote(tkvi_out *o) {
    if (tkvi_has_quotes(o)) tkvi_print(o, "\"");
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
#define TKVI_MAX_DEPTH 8      /* objects inside one another, with lists of them; fields need 4 */
#define TKVI_LONGEST_PATH 128 /* a longer one is cut; the longest key has 31 characters */
#define TKVI_SEEN_BYTES 12288 /* a bit per field: 23 fields of 4,096 layers, and 4,096 others */

typedef struct tkvi_object { /* an object, or a list of objects, that has begun and not ended */
    size_t path;             /* bytes of its path */
    int entry;               /* a list: index of the next entry; -1: an object */
    int begun;               /* 1: it has an item */
} tkvi_object;

typedef struct tkvi_parser {
    const tkvi_fields *fields;
    int n_fields;
    void *base[TKVI_MAX_FIELDS]; /* the structs; not used for lists while checking */
    const tkv_config_arrays *room;
    /* the place in the text */
    const char *text, *at, *end;
    int line, json;
    tkvi_span key, value; /* the key is the whole path, in `path` */
    int has_brackets;     /* 1: the value stands in [ ] */
    int key_line;
    char path[TKVI_LONGEST_PATH];
    size_t path_bytes, table;      /* of the key; of the TOML table that the text is in */
    int n_tables[TKVI_MAX_FIELDS]; /* tables [[name]] of each list so far */
    tkvi_object object[TKVI_MAX_DEPTH];
    int depth;
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

static int tkvi_is_digit(char c) { return c >= '0' && c <= '9'; }

/* Returns a number without underscores between its digits, and without a plus sign: 1_024 is 1024. The copy is in
 * `room`. A text that is no such number comes back as it is. */
static tkvi_span tkvi_plain_number(tkvi_span s, char room[64]) {
    tkvi_span plain = s;
    size_t i, n = 0;
    if (s.n > 1 && s.at[0] == '+' && tkvi_is_digit(s.at[1])) {
        s.at++;
        s.n--;
        plain = s;
    }
    if (s.n > 64) return plain;
    for (i = 0; i < s.n; i++) {
        const int joins = s.at[i] == '_';
        if (joins && (i == 0 || i + 1 == s.n || !tkvi_is_digit(s.at[i - 1]) || !tkvi_is_digit(s.at[i + 1])))
            return plain;
        if (!joins) room[n++] = s.at[i];
    }
    plain.at = room;
    plain.n = n;
    return plain;
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
    const char *word;
    uint64_t n = 0;
    int x = 0, i;
    (void)r;
    for (i = 0; (word = tkvi_word_at(row, i, &x)) != NULL && !tkvi_span_is(s, word); i++) continue;
    if (!word) {
        char room[64];
        const int negative = s.n > 0 && s.at[0] == '-';
        s = tkvi_plain_number(s, room);
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
    char room[64];
    size_t i, bytes;
    (void)r;
    (void)row;
    s = tkvi_plain_number(s, room);
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

/* Reads a number, or the word zero, which is TKV_ZERO. In a list of JSON or TOML the word has quotes. */
static int tkvi_read_number(tkvi_span s, float *x) {
    char room[64];
    if (!tkvi_span_is(s, "zero") && !tkvi_span_is(s, "\"zero\"") && !tkvi_span_is(s, "'zero'")) {
        s = tkvi_plain_number(s, room);
        return tkvi_float_read(s.at, s.n, x);
    }
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

/* Removes blanks and comments from the front of s. */
static void tkvi_skip_comments(tkvi_span *s) {
    int comment = 0;
    for (; s->n && (comment || *s->at == '#' || tkvi_blank(*s->at)); s->at++, s->n--)
        comment = *s->at != '\n' && (comment || *s->at == '#');
}

/* Removes the first item of a list, and a comma behind it, from the front of s. Returns the item. */
static tkvi_span tkvi_take_item(tkvi_span *s, int *has_comma) {
    tkvi_span item;
    tkvi_skip_comments(s);
    item = *s;
    for (; s->n && *s->at != ',' && *s->at != '#' && !tkvi_blank(*s->at); s->n--) s->at++;
    item.n -= s->n;
    tkvi_skip_comments(s);
    *has_comma = s->n > 0 && *s->at == ',';
    s->at += *has_comma;
    s->n -= (size_t)*has_comma;
    return item;
}

/* Reads up to `most` numbers with commas between them to `at` (NULL: only checks). Returns how many; 0: no list. */
static int tkvi_read_list(tkvi_span s, int most, float *at) {
    int n, has_comma = 1;
    for (n = 0; n < most && has_comma; n++) {
        float x;
        const tkvi_span item = tkvi_take_item(&s, &has_comma);
        if (!tkvi_read_number(item, &x)) return 0;
        if (at) at[n] = x;
    }
    return has_comma || s.n ? 0 : n;
}

static void tkvi_write_list(const float *x, int n, tkvi_out *o) {
    int i;
    if (tkvi_has_quotes(o)) tkvi_print(o, "[");
    for (i = 0; i < n; i++) {
        if (i) tkvi_print(o, ", ");
        tkvi_write_number(x[i], o);
    }
    if (tkvi_has_quotes(o)) tkvi_print(o, "]");
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
    if (strlen(name) != s.n) return 0;
    *out = tkvi_find_format(name);
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
    if (strlen(name) != s.n) return 0;
    return tkv_apply_preset(at ? (tkv_config *)at : &any, name) == TKV_OK;
}

static const tkvi_kind tkvi_kinds[] = {
    {"a whole number", tkvi_read_int, tkvi_write_int},
    {"bytes, such as 65536, 512K, 1.5G, 64MiB", tkvi_read_size, tkvi_write_size},
    {"a number", tkvi_read_float, tkvi_write_float},
    {"numbers with commas between them", tkvi_read_floats, tkvi_write_floats},
    {"formats of K and V, such as a30/r20, or one for both", tkvi_read_pair, tkvi_write_pair},
    {"names joined by +", tkvi_read_flags, tkvi_write_flags},
    {"a short name of letters, digits and _ - .", tkvi_read_name, tkvi_write_name},
    {"rope.dim / 2 numbers with commas between them", tkvi_read_frequencies, tkvi_write_frequencies},
    {"the name of a preset", tkvi_read_preset, NULL},
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
    {"preset", TKVI_PRESET, 0, 0, NULL, TKV_NAME_PRESET, 0, 0, 0, 0, NULL},
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
    TKVI_ROW(tkv_pressure_config, jump, TKVI_INT, tkvi_words_switch),
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

/* Bytes of the groups in front of a field's name, without the last dot: 4 of rope.dim. */
static size_t tkvi_parent_bytes(const char *name) {
    const size_t n = (size_t)(tkvi_last_part(name) - name);
    return n ? n - 1 : 0;
}

/* Appends the name of a field, or (is_group) of the group that it is in. */
static void tkvi_append_field(tkvi_text *t, const tkvi_fields *g, const char *name, int is_group) {
    char field[64];
    tkvi_span s;
    s.at = name;
    s.n = is_group ? tkvi_parent_bytes(name) : strlen(name);
    tkvi_copied(s, field, sizeof field);
    if (g->name) tkvi_append_text(t, g->name);
    if (g->most) {
        tkvi_append_text(t, "[i] or [i-j], up to ");
        tkvi_append_int(t, g->most - 1);
        if (s.n) tkvi_append_text(t, ", and ");
    }
    if (g->name && s.n) tkvi_append_text(t, ".");
    tkvi_append_text(t, field);
}

/* Compares the key with a field, or with its group: the edit distance of the nearer one of whole name and last part. */
static int tkvi_distance_to(const char *key, const tkvi_fields *g, const char *field, int is_group) {
    char name[64];
    size_t n;
    tkvi_text at = tkvi_text_begin(name, sizeof name);
    if (g->name) tkvi_append_text(&at, g->name);
    if (g->name) tkvi_append_text(&at, ".");
    tkvi_append_text(&at, field);
    n = tkvi_parent_bytes(name);
    if (is_group) name[n] = 0;
    if (is_group && !n) return 64;
    return tkvi_min(tkvi_distance(key, name), tkvi_distance(key, tkvi_last_part(name)));
}

/* Appends the error for an unknown key, with the nearest known one. The key may lack its group. is_group: the text has
 * keys inside it. */
static void tkvi_append_unknown(tkvi_parser *r, int is_group) {
    tkvi_text *t = tkvi_append_line(r, r->key_line);
    char key[48];
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
            const int distance = tkvi_distance_to(key, &r->fields[g], r->fields[g].row[row].name, is_group);
            if (distance >= best) continue;
            best = distance;
            best_g = g;
            best_row = row;
        }
    tkvi_append_span(t, r->key);
    tkvi_append_text(t, is_group ? " is no group of fields; " : " is no key; ");
    if (best_g < 0) {
        tkvi_append_text(t, is_group ? "groups are model, tiers and the others of the config"
                                     : "keys are the fields of the config");
        return;
    }
    tkvi_append_text(t, "the nearest one is ");
    tkvi_append_field(t, &r->fields[best_g], r->fields[best_g].row[best_row].name, is_group);
}

/* 1 if the value of a field can stand in brackets. */
static int tkvi_is_list(const tkvi_row *row) {
    return row->kind == TKVI_FLOATS || row->kind == TKVI_FREQUENCIES;
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
    if (r->has_brackets && !tkvi_is_list(row)) tkvi_append_text(t, " without [ ]");
    for (i = 0; (word = tkvi_word_at(row, i, &value)) != NULL; i++) {
        tkvi_append_text(t, i ? ", " : row->kind == TKVI_FLAGS || row->kind == TKVI_PRESET ? ": " : " or ");
        tkvi_append_text(t, word);
    }
    if (row->kind != TKVI_PAIR) return;
    tkvi_append_text(t, ": K");
    tkvi_append_formats(t, TKV_K);
    tkvi_append_text(t, "; V");
    tkvi_append_formats(t, TKV_V);
}

/* >>paths */
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

/* Removes the name of a group, and the index or range of a list's entries, from the front of a key. Returns 0 if it
 * does not begin with them. */
static int tkvi_take_group(tkvi_span *key, const tkvi_fields *g, int *from, int *to) {
    *from = *to = 0;
    if (g->name && !tkvi_take(key, g->name)) return 0;
    if (!g->most) return 1;
    if (!tkvi_take(key, "[")) return 0;
    *from = *to = tkvi_take_index(key, g->most);
    if (*from >= 0 && tkvi_take(key, "-")) *to = tkvi_take_index(key, g->most);
    return *from >= 0 && *to >= *from && tkvi_take(key, "]");
}

/* Finds the row of the present key, its group and, in a list, the entries `from` to `to`. NULL: unknown key. */
static const tkvi_row *tkvi_find_row(const tkvi_parser *r, int *group, int *from, int *to) {
    int i;
    for (*group = 0; *group < r->n_fields; ++*group) {
        const tkvi_fields *g = &r->fields[*group];
        tkvi_span field = r->key;
        if (!tkvi_take_group(&field, g, from, to) || (g->name && !tkvi_take(&field, "."))) continue;
        for (i = 0; i < g->n_rows; i++)
            if (tkvi_span_is(field, g->row[i].name)) return &g->row[i];
    }
    return NULL;
}

/* 1 if the path is a group above `name`: model of model.rope. */
static int tkvi_is_above(tkvi_span path, const char *name) {
    return strlen(name) > path.n && memcmp(name, path.at, path.n) == 0 && name[path.n] == '.';
}

/* 1 if the present key is a group of fields, a list of groups, or an entry of one. */
static int tkvi_is_group(const tkvi_parser *r) {
    int g, i, from, to;
    for (g = 0; g < r->n_fields; g++) {
        const tkvi_fields *f = &r->fields[g];
        tkvi_span rest = r->key;
        if (f->name && (tkvi_span_is(r->key, f->name) || tkvi_is_above(r->key, f->name))) return 1;
        if (!tkvi_take_group(&rest, f, &from, &to)) continue;
        if (f->name && !rest.n) return 1;
        if (f->name && !tkvi_take(&rest, ".")) continue;
        for (i = 0; i < f->n_rows; i++)
            if (tkvi_is_above(rest, f->row[i].name)) return 1;
    }
    return 0;
}

/* The list whose name is the present key; -1: it names none. */
static int tkvi_find_list(const tkvi_parser *r) {
    int g;
    for (g = 0; g < r->n_fields; g++)
        if (r->fields[g].most && tkvi_span_is(r->key, r->fields[g].name)) return g;
    return -1;
}

static void tkvi_extend_path(tkvi_parser *r, const char *s, size_t n) {
    const size_t left = sizeof r->path - r->path_bytes;
    memcpy(r->path + r->path_bytes, s, n < left ? n : left);
    r->path_bytes += n < left ? n : left;
    if (n > left)
        r->path[sizeof r->path - 1] = '?'; /* no key has it, so a path that is too long matches none */
    r->key.at = r->path;
    r->key.n = r->path_bytes;
}

/* Adds names with dots between them to the path. A name that begins with a digit is the index of an entry: 3 is [3]. */
static void tkvi_add_names(tkvi_parser *r, tkvi_span names, int *is_first) {
    const char *from = names.at, *const end = names.at + names.n, *at;
    for (at = from;; at++) {
        tkvi_span name;
        int is_index;
        if (at < end && *at != '.') continue;
        name = tkvi_trimmed(from, at);
        is_index = !*is_first && name.n > 0 && tkvi_is_digit(*name.at);
        if (!*is_first) tkvi_extend_path(r, is_index ? "[" : ".", 1);
        tkvi_extend_path(r, name.at, name.n);
        if (is_index) tkvi_extend_path(r, "]", 1);
        *is_first = 0;
        if (at == end) return;
        from = at + 1;
    }
}

/* Removes a part of a key and the dot behind it from the front of s. Returns it, without quotes if it may have them. */
static tkvi_span tkvi_take_part(tkvi_span *s, int may_have_quotes, int *has_more) {
    const tkvi_span all = tkvi_trimmed(s->at, s->at + s->n);
    tkvi_span part = all;
    size_t n = 0;
    if (may_have_quotes && all.n && (*all.at == '"' || *all.at == '\'')) {
        for (n = 1; n < all.n && all.at[n] != *all.at; n++) continue;
        part = tkvi_trimmed(all.at + 1, all.at + n);
        for (n++; n < all.n && tkvi_blank(all.at[n]); n++) continue;
        if (n > all.n || (n < all.n && all.at[n] != '.')) n = 0; /* not one string */
    }
    if (n == 0) {
        while (n < all.n && all.at[n] != '.') n++;
        part = tkvi_trimmed(all.at, all.at + n);
    }
    *has_more = n < all.n;
    s->at = all.at + n + *has_more;
    s->n = all.n - n - (size_t)*has_more;
    return part;
}

/* Makes `s`, below the first `above` bytes of the path, the present key. In lines, parts of s may be in quotes. */
static void tkvi_set_key(tkvi_parser *r, size_t above, tkvi_span s) {
    int is_first = above == 0, has_more = 1;
    r->path_bytes = above;
    while (has_more) {
        const tkvi_span part = tkvi_take_part(&s, !r->json, &has_more);
        tkvi_add_names(r, part, &is_first);
    }
}

/* Makes entry i of a list, whose path has `above` bytes, the present key. */
static void tkvi_set_entry(tkvi_parser *r, size_t above, int i) {
    char digits[16];
    tkvi_text t = tkvi_text_begin(digits, sizeof digits);
    tkvi_append_int(&t, i);
    r->path_bytes = above;
    tkvi_extend_path(r, "[", 1);
    tkvi_extend_path(r, digits, strlen(digits));
    tkvi_extend_path(r, "]", 1);
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

/* Reads a string up to the next character like the present one, a quote. *out excludes both. Returns 1, or -1 after an
 * error. */
static int tkvi_scan_string(tkvi_parser *r, tkvi_span *out) {
    const char quote = *r->at, *from = ++r->at;
    for (; r->at < r->end && *r->at != quote && *r->at != '\n'; r->at++)
        if (*r->at == '\\') return tkvi_unreadable(r, "there is a backslash; no key and no value needs one");
    if (!tkvi_is_next(r, quote))
        return tkvi_unreadable(r, quote == '"' ? "a \" is missing" : "a ' is missing");
    *out = tkvi_trimmed(from, r->at++);
    return 1;
}

/* Reads a list up to the next ]. It may have comments and, except in JSON, a comma at the end. */
static int tkvi_scan_list(tkvi_parser *r) {
    const char *from = ++r->at, *end = from;
    int comment = 0;
    for (; r->at < r->end && (comment || *r->at != ']'); r->at++) {
        comment = *r->at != '\n' && (comment || *r->at == '#');
        r->line += *r->at == '\n';
        if (!comment && *r->at == '\\')
            return tkvi_unreadable(r, "there is a backslash; no key and no value needs one");
        if (!comment && !tkvi_blank(*r->at)) end = r->at + 1;
    }
    if (!tkvi_is_next(r, ']')) return tkvi_unreadable(r, "a ] is missing");
    r->at++;
    if (!r->json && end > from && end[-1] == ',') end--;
    r->value = tkvi_trimmed(from, end);
    return 1;
}

static int tkvi_one_of(char c, const char *set) {
    while (*set && *set != c) set++;
    return *set != 0;
}

static void tkvi_skip_blanks_of_line(tkvi_parser *r) {
    while (r->at < r->end && *r->at != '\n' && tkvi_blank(*r->at)) r->at++;
}

/* Reads a value: in quotes, [a list], or plain text up to one of the characters in `ends`. */
static int tkvi_scan_value(tkvi_parser *r, const char *ends) {
    const char *from;
    tkvi_skip_blanks_of_line(r);
    r->has_brackets = tkvi_is_next(r, '[');
    if (tkvi_is_next(r, '"') || (!r->json && tkvi_is_next(r, '\''))) return tkvi_scan_string(r, &r->value);
    if (r->has_brackets) return tkvi_scan_list(r);
    for (from = r->at; r->at < r->end && !tkvi_one_of(*r->at, ends);) r->at++;
    r->value = tkvi_trimmed(from, r->at);
    return 1;
}

/* Begins an object, or a list of objects, at the present key. Returns 1, or -1 after an error. */
static int tkvi_begin_object(tkvi_parser *r, int is_list) {
    int group, from, to;
    const tkvi_row *row = tkvi_find_row(r, &group, &from, &to);
    tkvi_object *o = &r->object[r->depth];
    r->value.at = r->at;
    r->value.n = 1;
    if (row) tkvi_append_bad_value(r, row);
    else if (!tkvi_is_group(r)) tkvi_append_unknown(r, 1);
    else if (r->depth == TKVI_MAX_DEPTH) (void)tkvi_unreadable(r, "objects lie too deep inside one another");
    else {
        o->path = r->path_bytes;
        o->entry = is_list ? 0 : -1;
        o->begun = 0;
        r->depth++;
        r->at++;
        return 1;
    }
    return -1;
}

/* Reads a key and what separates it from its value. ends: what a key outside of quotes cannot have. */
static int tkvi_scan_key(tkvi_parser *r, size_t above, const char *ends) {
    tkvi_span key;
    if (r->json) {
        if (!tkvi_is_next(r, '"')) return tkvi_unreadable(r, "a key in quotes is missing");
        if (tkvi_scan_string(r, &key) < 0) return -1;
        tkvi_skip(r);
        if (!tkvi_is_next(r, ':')) return tkvi_unreadable(r, "a : is missing after the key");
    } else {
        const char *from = r->at;
        while (r->at < r->end && !tkvi_one_of(*r->at, ends)) r->at++;
        key = tkvi_trimmed(from, r->at);
        if (!tkvi_is_next(r, '=')) return tkvi_unreadable(r, "there is no =; write key = value");
    }
    r->at++;
    tkvi_set_key(r, above, key);
    return 1;
}

/* Reads the { of a list's next entry, or null. Returns 1, or -1 after an error. */
static int tkvi_next_entry(tkvi_parser *r, tkvi_object *list) {
    tkvi_set_entry(r, list->path, list->entry++);
    if (tkvi_is_next(r, '{')) return tkvi_begin_object(r, 0);
    if (!tkvi_is_group(r)) {
        tkvi_append_unknown(r, 1);
        return -1;
    }
    if (r->json && r->end - r->at >= 4 && memcmp(r->at, "null", 4) == 0) {
        r->at += 4;
        return 1;
    }
    tkvi_append_span(tkvi_append_line(r, r->line), r->key);
    tkvi_append_text(&r->reason,
                     r->json ? " is no object; it must be { } or null" : " is no table; it must be { }");
    return -1;
}

/* Begins what the present key has in the place of a value: an object or a list of them. 0: it has a value. */
static int tkvi_begin_inside(tkvi_parser *r) {
    if (tkvi_is_next(r, '{')) return tkvi_begin_object(r, 0);
    if (tkvi_is_next(r, '[') && tkvi_find_list(r) >= 0) return tkvi_begin_object(r, 1);
    return 0;
}

/* Goes to the next key in the objects that have begun. Returns 1 in front of its value, 0 if all have ended, -1 after
 * an error. */
static int tkvi_next_inside(tkvi_parser *r) {
    while (r->depth > 0) {
        tkvi_object *o = &r->object[r->depth - 1];
        const int is_list = o->entry >= 0;
        int has_comma, begins;
        tkvi_skip(r);
        has_comma = o->begun && tkvi_is_next(r, ',');
        r->at += has_comma;
        if (has_comma) tkvi_skip(r);
        if (tkvi_is_next(r, is_list ? ']' : '}') && !(has_comma && r->json)) {
            r->at++;
            r->depth--;
            continue;
        }
        if (o->begun && !has_comma)
            return tkvi_unreadable(r, is_list ? "a , or a ] is missing" : "a , or a } is missing");
        o->begun = 1;
        r->key_line = r->line;
        if (!is_list) {
            if (tkvi_scan_key(r, o->path, "=,{}\n#") < 0) return -1;
            tkvi_skip(r);
        }
        begins = is_list ? tkvi_next_entry(r, o) : tkvi_begin_inside(r);
        if (begins <= 0) return begins < 0 ? -1 : 1;
    }
    return 0;
}

/* Makes the next entry of the list [[name]] the present key. Returns 1, or -1 after an error. */
static int tkvi_add_table(tkvi_parser *r) {
    const int list = tkvi_find_list(r);
    int g, any = 0;
    if (list >= 0) {
        tkvi_set_entry(r, r->path_bytes, r->n_tables[list]++);
        return 1;
    }
    tkvi_append_span(tkvi_append_line(r, r->line), r->key);
    tkvi_append_text(&r->reason, " is no list; lists are ");
    for (g = 0; g < r->n_fields; g++) {
        if (!r->fields[g].most) continue;
        if (any++) tkvi_append_text(&r->reason, " and ");
        tkvi_append_text(&r->reason, r->fields[g].name);
    }
    return -1;
}

/* Behind [[layers]], the table layers.rope is that of the newest entry: layers[0].rope. */
static void tkvi_find_newest_table(tkvi_parser *r) {
    char below[TKVI_LONGEST_PATH];
    int g;
    for (g = 0; g < r->n_fields; g++) {
        tkvi_span rest = r->key;
        if (!r->n_tables[g] || !tkvi_take(&rest, r->fields[g].name) || !tkvi_take(&rest, ".")) continue;
        memcpy(below, rest.at, rest.n);
        tkvi_set_entry(r, r->path_bytes - rest.n - 1, r->n_tables[g] - 1);
        tkvi_extend_path(r, ".", 1);
        tkvi_extend_path(r, below, rest.n);
        return;
    }
}

/* Reads a header: [table], or [[list]] for its next entry. Returns 1, or -1 after an error. */
static int tkvi_read_header(tkvi_parser *r) {
    const char *from = r->at;
    tkvi_span s;
    size_t brackets;
    while (r->at < r->end && !tkvi_one_of(*r->at, "\n#")) r->at++;
    s = tkvi_trimmed(from, r->at);
    if (s.n < 2 || s.at[s.n - 1] != ']') return tkvi_unreadable(r, "a ] is missing at the end of a [table]");
    brackets = s.n > 3 && s.at[1] == '[' && s.at[s.n - 2] == ']' ? 2 : 1;
    tkvi_set_key(r, 0, tkvi_trimmed(s.at + brackets, s.at + s.n - brackets));
    if (brackets == 2 && tkvi_add_table(r) < 0) return -1;
    if (brackets == 1) tkvi_find_newest_table(r);
    r->table = r->path_bytes;
    if (tkvi_is_group(r)) return 1;
    tkvi_append_unknown(r, 1);
    return -1;
}

/* Checks that nothing but a comment follows in the line. Returns 1, or -1 after an error. */
static int tkvi_end_line(tkvi_parser *r) {
    tkvi_skip_blanks_of_line(r);
    if (r->at < r->end && !tkvi_one_of(*r->at, "\n#"))
        return tkvi_unreadable(r, "something follows the value");
    return 1;
}

/* Reads the next `key = value` of lines. Returns 1, 0 at the end, or -1 after an error. */
static int tkvi_next_line(tkvi_parser *r) {
    for (;;) {
        const int was_inside = r->depth > 0;
        int begins = tkvi_next_inside(r);
        if (begins < 0) return -1;
        if (begins) return tkvi_scan_value(r, ",}#\n");
        if (was_inside && tkvi_end_line(r) < 0) return -1;
        tkvi_skip(r);
        r->key_line = r->line;
        if (r->at == r->end) return 0;
        if (tkvi_is_next(r, '[')) {
            if (tkvi_read_header(r) < 0) return -1;
            continue;
        }
        if (tkvi_scan_key(r, r->table, "=\n#") < 0) return -1;
        tkvi_skip_blanks_of_line(r);
        begins = tkvi_begin_inside(r);
        if (begins < 0) return -1;
        if (!begins) return tkvi_scan_value(r, "\n#") < 0 ? -1 : tkvi_end_line(r);
    }
}

/* Reads the next pair of a JSON object. Returns 1, 0 at the end, or -1 after an error. */
static int tkvi_next_pair(tkvi_parser *r) {
    const int found = tkvi_next_inside(r);
    if (found) return found < 0 ? -1 : tkvi_scan_value(r, ",}#\n");
    tkvi_skip(r);
    return r->at < r->end ? tkvi_unreadable(r, "something follows the object") : 0;
}

/* Reads the next key and value. Returns 1, 0 at the end, or -1 after an error. */
static int tkvi_next(tkvi_parser *r) { return r->json ? tkvi_next_pair(r) : tkvi_next_line(r); }

static void tkvi_rewind(tkvi_parser *r) {
    r->at = r->text;
    r->line = 1;
    r->table = 0;
    r->depth = 0;
    memset(r->n_tables, 0, sizeof r->n_tables);
    if (r->end - r->at >= 3 && memcmp(r->at, "\xef\xbb\xbf", 3) == 0) r->at += 3; /* a byte order mark */
    tkvi_skip(r);
    r->json = tkvi_is_next(r, '{');
    if (!r->json) return;
    r->at++;
    r->depth = 1;
    r->object[0].path = 0;
    r->object[0].entry = -1;
    r->object[0].begun = 0;
}

/* >>reading */
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
            tkvi_append_unknown(r, 0);
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
            if ((r->has_brackets && !tkvi_is_list(row)) ||
                !tkvi_kinds[row->kind].read(r, row, r->value, at)) {
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
    if (highest && highest > n)
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
/* Number of names in a path of n bytes. */
static int tkvi_n_names(const char *path, size_t n) {
    int names = n > 0;
    size_t i;
    for (i = 0; i < n; i++) names += path[i] == '.';
    return names;
}

/* Bytes of the groups that a table and a path of n bytes have in common. */
static size_t tkvi_common_bytes(const char *table, const char *path, size_t n) {
    size_t common = 0, i;
    for (i = 0;; i++) {
        if ((!table[i] || table[i] == '.') && (i == n || path[i] == '.')) common = i;
        if (!table[i] || i == n || table[i] != path[i]) return common;
    }
}

/* Begins an item of a JSON object, `depth` objects inside the outermost one. */
static void tkvi_print_item(tkvi_out *o, int depth) {
    if (o->more) tkvi_print(o, ",");
    if (o->json == 1) tkvi_print(o, "\n");
    else if (o->more) tkvi_print(o, " ");
    for (; o->json == 1 && depth >= 0; depth--) tkvi_print(o, "  ");
    o->more = 1;
}

/* Ends JSON objects until `depth` are left inside the outermost one. */
static void tkvi_print_ends(tkvi_out *o, int depth) {
    int i;
    for (i = tkvi_n_names(o->table, strlen(o->table)); i > depth; i--) {
        o->more = 0;
        tkvi_print_item(o, i - 1);
        tkvi_print(o, "}");
    }
}

/* Goes to the object that is the first n bytes of the path. */
static void tkvi_enter_object(tkvi_out *o, const char *path, size_t n) {
    size_t from = tkvi_common_bytes(o->table, path, n), end;
    int depth = tkvi_n_names(path, from);
    tkvi_print_ends(o, depth);
    for (from += from > 0; from < n; from = end + 1) {
        for (end = from; end < n && path[end] != '.'; end++) continue;
        tkvi_print_item(o, depth++);
        tkvi_print(o, "\"");
        tkvi_print_bytes(o, path + from, end - from);
        tkvi_print(o, "\": {");
        o->more = 0;
    }
}

/* Goes to the table that is the first n bytes of the path. */
static void tkvi_enter_table(tkvi_out *o, const char *path, size_t n) {
    if (strlen(o->table) == n && memcmp(o->table, path, n) == 0) return;
    if (o->json) tkvi_enter_object(o, path, n);
    memcpy(o->table, path, n);
    o->table[n] = 0;
    if (o->json) return;
    tkvi_print(o, o->more ? "\n[" : "[");
    tkvi_print(o, o->table);
    tkvi_print(o, "]\n");
}

/* Prints the key of a field, up to its value. index: of a list's entry. */
static void tkvi_print_key(tkvi_out *o, const tkvi_fields *g, int index, const char *name) {
    char path[64];
    tkvi_text t = tkvi_text_begin(path, sizeof path);
    size_t n = 0;
    if (g->name) tkvi_append_text(&t, g->name);
    if (g->most) tkvi_append_text(&t, o->tables ? "." : "[");
    if (g->most) tkvi_append_int(&t, index);
    if (g->most && !o->tables) tkvi_append_text(&t, "]");
    if (g->name) tkvi_append_text(&t, ".");
    tkvi_append_text(&t, name);
    if (o->tables) {
        n = tkvi_parent_bytes(path);
        tkvi_enter_table(o, path, n);
        n += n > 0;
    }
    if (o->json) tkvi_print_item(o, tkvi_n_names(o->table, strlen(o->table)));
    o->more = 1;
    if (o->json) tkvi_print(o, "\"");
    tkvi_print(o, path + n);
    tkvi_print(o, o->json ? "\": " : " = ");
}

/* 1 if two names have the same first part: model.scale and model.rope. */
static int tkvi_has_same_top(const char *a, const char *b) {
    for (; *a && *a == *b && *a != '.'; a++, b++) continue;
    return (!*a || *a == '.') && (!*b || *b == '.');
}

static const char *tkvi_top_of(const tkvi_fields *g, const tkvi_row *row) {
    return g->name ? g->name : row->name;
}

/* 1 if a field is to be written now. With tables, fields of a group stand together, and those of groups inside it
 * follow. */
static int tkvi_is_due_now(const tkvi_out *o, const tkvi_fields *g, const tkvi_row *row) {
    const int names = (g->name ? tkvi_n_names(g->name, strlen(g->name)) : 0) + (g->most > 0) +
                      tkvi_n_names(row->name, strlen(row->name));
    return !o->tables || ((names > 2) == o->inside && tkvi_has_same_top(tkvi_top_of(g, row), o->top));
}

/* Writes the fields of one struct that are not zero. */
static void tkvi_write_fields(tkvi_out *o, const tkvi_fields *g, int index, const void *base) {
    int i;
    size_t k;
    for (i = 0; i < g->n_rows; i++) {
        const tkvi_row *row = &g->row[i];
        const uint8_t *at = (const uint8_t *)base + (size_t)index * g->stride + row->offset;
        for (k = 0; k < row->size && !at[k]; k++) continue;
        if (k == row->size || !tkvi_kinds[row->kind].write || !tkvi_is_due_now(o, g, row)) continue;
        tkvi_print_key(o, g, index, row->name);
        tkvi_kinds[row->kind].write(row, at, o);
        if (!o->json) tkvi_print(o, "\n");
    }
}

/* Writes all fields whose turn it is. */
static void tkvi_write_groups(tkvi_out *o, const tkv_config *cfg) {
    int g, i, n;
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
        if (o->tables && fields->name && !tkvi_has_same_top(fields->name, o->top)) continue;
        for (i = 0; i < n && !o->bad; i++) tkvi_write_fields(o, fields, i, part);
    }
}

/* 1 if no field before row `row` of group g has the same first part of its name. */
static int tkvi_is_new_top(int g, int row) {
    const char *top = tkvi_top_of(&tkvi_config_fields[g], &tkvi_config_fields[g].row[row]);
    int h, i;
    for (h = 0; h <= g; h++)
        for (i = 0; i < (h < g ? tkvi_config_fields[h].n_rows : row); i++)
            if (tkvi_has_same_top(tkvi_top_of(&tkvi_config_fields[h], &tkvi_config_fields[h].row[i]), top))
                return 0;
    return 1;
}

static void tkvi_write_config(tkvi_out *o, const tkv_config *cfg) {
    int g, row;
    if (o->json) tkvi_print(o, "{");
    if (!o->tables) tkvi_write_groups(o, cfg);
    for (g = 0; g < TKVI_CONFIG_FIELDS && o->tables; g++)
        for (row = 0; row < tkvi_config_fields[g].n_rows; row++) {
            if (!tkvi_is_new_top(g, row)) continue;
            o->top = tkvi_top_of(&tkvi_config_fields[g], &tkvi_config_fields[g].row[row]);
            for (o->inside = 0; o->inside < 2; o->inside++) tkvi_write_groups(o, cfg);
        }
    if (!o->json) return;
    tkvi_print_ends(o, 0);
    tkvi_print(o, o->json == 1 ? "\n}\n" : "}");
}

static void tkvi_config_lines(tkvi_out *o, const void *what) {
    tkvi_write_config(o, (const tkv_config *)what);
}

static void tkvi_config_json(tkvi_out *o, const void *what) {
    o->json = 1;
    tkvi_write_config(o, (const tkv_config *)what);
}

static void tkvi_config_toml(tkvi_out *o, const void *what) {
    o->tables = 1;
    tkvi_write_config(o, (const tkv_config *)what);
}

static void tkvi_config_nested_json(tkvi_out *o, const void *what) {
    o->tables = 1;
    tkvi_config_json(o, what);
}

TKV_API tkv_status tkv_print_config(const tkv_config *cfg, int style, char *buf, size_t size,
                                    size_t *needed) {
    static const tkvi_writer writers[TKV_TEXT_COUNT] = {tkvi_config_lines, tkvi_config_json, tkvi_config_toml,
                                                        tkvi_config_nested_json};
    if (!cfg || style < 0 || style >= TKV_TEXT_COUNT) return TKV_ERR_ARG;
    return tkvi_write_text(writers[style], cfg, buf, size, needed);
}

#endif /* TKV_NO_REPORTS */
#endif /* TKVI_REPORT_TEXT_H */
