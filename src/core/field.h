/*
 * core/field.h - a row of the tables of config fields: where the field is, how a text writes it (report/text.h), and
 * for an option of formats (formats/table.h) which values it takes.
 */
#ifndef TKVI_CORE_FIELD_H
#define TKVI_CORE_FIELD_H

#include "core/base.h"

typedef struct tkvi_word {
    const char *name;
    int value;
} tkvi_word;

/* Kinds of fields, as in tkvi_kinds (report/text.h). */
enum {
    TKVI_INT,
    TKVI_SIZE,
    TKVI_FLOAT,
    TKVI_FLOATS,
    TKVI_PAIR,
    TKVI_FLAGS,
    TKVI_NAME,
    TKVI_FREQUENCIES,
    TKVI_PRESET
};

typedef struct tkvi_row {
    const char *name;
    int kind;
    size_t offset, size;
    const tkvi_word *words; /* names of values, ended by a NULL name; NULL: none */
    tkv_name_kind names;    /* values have the names of tkv_get_name; TKV_NAME_COUNT: they have not */
    /* Options of formats: 0 stands for `standard`; other values are least, least + step .. most. want: the rule. */
    int8_t standard, least, most, step;
    const char *want;
} tkvi_row;

#define TKVI_OPTION(field, kind, words, standard, least, most, step, want)                                   \
    {                                                                                                        \
#field, kind, offsetof(tkv_format_options, field), sizeof(int), words, TKV_NAME_COUNT, standard,     \
            least, most, step, want                                                                          \
    }

static const tkvi_word tkvi_words_switch[] = {{"false", 0}, {"true", 1}, {NULL, 0}};

static int tkvi_member_int(const void *base, size_t offset) {
    int x;
    memcpy(&x, (const char *)base + offset, sizeof x);
    return x;
}

static void tkvi_set_member_int(void *base, size_t offset, int x) {
    memcpy((char *)base + offset, &x, sizeof x);
}

#endif /* TKVI_CORE_FIELD_H */
