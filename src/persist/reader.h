/*
 * persist/reader.h - the bytes of a save that is loaded: in memory, or through a callback (tkv_seq_load_from).
 *
 * From a callback the index and all sections but the records are read into memory, once. The records of blocks are
 * read one by one: when the file is verified, and again when a block is placed. So a load never has the whole file in
 * memory.
 *
 *     file      | head | model | ... | records | lists | ... | index | end |
 *     kept      index, end | head | model | ... | lists | ...
 *
 * The offsets in the kept index are then those of the kept sections; sections of records have none, and nothing looks
 * for them.
 */
#ifndef TKVI_PERSIST_READER_H
#define TKVI_PERSIST_READER_H

#include "persist/save.h"

#define TKVI_MOST_SECTIONS (1u << 22) /* a file that claims more is refused before memory is allocated */

typedef struct tkvi_reader {
    tkv_cache *kv;
    const uint8_t *bytes; /* of a file in memory; NULL: `read` gives them */
    tkv_read_bytes read;
    void *user;
    tkvi_saved_file file;
    uint8_t *room;        /* for a table, or for a record */
    tkvi_scratch scratch; /* has the room, the index and the sections */
    int has_failed;       /* 1: the callback failed */
} tkvi_reader;

/* >>bytes */
/* Reads from the callback, which is not called again after a failure. */
static tkv_status tkvi_read_at(tkvi_reader *r, size_t at, void *to, size_t n) {
    if (!n || (!r->has_failed && !r->read(r->user, at, to, n))) return TKV_OK;
    r->has_failed = 1;
    return tkvi_fail(r->kv, TKV_ERR_IO, "the read callback failed at byte", tkvi_int_of_size(at), "");
}

/* n bytes of the file: where they lie, or in the room. NULL: the callback failed. */
static const uint8_t *tkvi_bytes_at(tkvi_reader *r, size_t at, size_t n) {
    if (r->bytes) return r->bytes + at;
    return tkvi_read_at(r, at, r->room, n) ? NULL : r->room;
}

/* >>sections of a file that a callback reads */
/* Checks that the bytes before a section, fewer than 64, are zero. */
static tkv_status tkvi_read_gap(tkvi_reader *r, const tkvi_section_walk *w, const char **fault) {
    uint8_t gap[64];
    const tkv_status st = tkvi_read_at(r, w->gap_at, gap, w->gap);
    if (!st && !tkvi_are_zeros(gap, w->gap)) *fault = "the saved sequence has bytes in no section";
    return st;
}

/* Reads the sections into memory and checks them. The kept index gets their places there. */
static tkv_status tkvi_keep_sections(tkvi_reader *r, uint8_t *index, size_t index_at, const char **fault) {
    tkvi_saved_file *f = &r->file;
    tkvi_section_walk w;
    tkv_status st = TKV_OK;
    uint8_t *kept = NULL;
    size_t n_kept = 0, at = 0;
    uint32_t i;
    for (i = 0; i < f->n_sections; i++) {
        const uint8_t *e = tkvi_saved_index_entry(f, i);
        const uint64_t n = tkvi_load64(e + 16);
        if (tkvi_load32(e) == TKVI_SAVED_RECORDS) continue;
        if (n > f->end || n_kept > f->end - (size_t)n) {
            *fault = "the saved sequence has a section where none can be";
            return TKV_OK;
        }
        n_kept = tkvi_add_sizes(n_kept, tkvi_add_sizes((size_t)n, tkvi_gap_to((size_t)n, 64)));
    }
    st = tkvi_take_scratch(&r->scratch, tkvi_add_sizes(n_kept, 64), &kept);
    memset(&w, 0, sizeof w);
    w.at = f->start;
    while (!st && !*fault && w.i < f->n_sections) {
        uint8_t *e = index + (size_t)w.i * TKVI_SAVED_SECTION;
        const size_t n = (size_t)tkvi_load64(e + 16);
        *fault = tkvi_walk_section(f, index_at, &w);
        if (!*fault) st = tkvi_read_gap(r, &w, fault);
        if (st || *fault) break;
        if (tkvi_load32(e) == TKVI_SAVED_RECORDS) {
            if (tkvi_load64(e + 24))
                *fault = "the saved sequence was damaged: the checksum of a section is wrong";
            continue;
        }
        st = tkvi_read_at(r, (size_t)tkvi_load64(e + 8), kept + at, n);
        if (!st && tkvi_xxh64(0, kept + at, n) != tkvi_load64(e + 24))
            *fault = "the saved sequence was damaged: the checksum of a section is wrong";
        tkvi_store64(e + 8, (uint64_t)at);
        at += n + tkvi_gap_to(n, 64);
    }
    if (!st && !*fault) *fault = tkvi_end_walk(index_at, &w);
    if (!st && !*fault) st = tkvi_read_gap(r, &w, fault);
    f->bytes = kept;
    return st;
}

/* Opens the save that ends at `size`, and keeps its index and sections. *fault: NULL, or what is wrong with it. */
static tkv_status tkvi_keep_save(tkvi_reader *r, size_t size, const char **fault) {
    uint8_t head[8], end[TKVI_SAVED_END], *index;
    size_t index_at = 0, n;
    tkv_status st;
    *fault = NULL;
    tkvi_give_back(&r->scratch, 1);
    if (size < TKVI_SAVED_HEAD + TKVI_SAVED_END) {
        *fault = "these bytes are no saved sequence";
        return TKV_OK;
    }
    st = tkvi_read_at(r, 0, head, sizeof head);
    if (!st) st = tkvi_read_at(r, size - sizeof end, end, sizeof end);
    if (st) return st;
    *fault = tkvi_read_end(&r->file, head, end, size, &index_at);
    if (!*fault && r->file.n_sections > TKVI_MOST_SECTIONS)
        *fault = "the saved sequence has too many sections";
    if (*fault) return TKV_OK;
    n = (size_t)r->file.n_sections * TKVI_SAVED_SECTION + TKVI_SAVED_END;
    st = tkvi_take_scratch(&r->scratch, n, &index);
    if (!st) st = tkvi_read_at(r, index_at, index, n);
    if (st) return st;
    r->file.index = index;
    *fault = tkvi_check_index(&r->file);
    return *fault ? TKV_OK : tkvi_keep_sections(r, index, index_at, fault);
}

/* Looks for the end of a save at *size or before. *size 0: there is none. */
static tkv_status tkvi_find_end(tkvi_reader *r, size_t *size) {
    uint8_t ends[4096];
    tkv_status st = TKV_OK;
    for (*size -= *size % 64; *size && !st;) {
        const size_t n = *size < sizeof ends ? *size : sizeof ends;
        size_t within = n;
        st = tkvi_read_at(r, *size - n, ends, n);
        for (; within && !st; within -= 64)
            if (memcmp(ends + within - 8, "TKVSEND", 8) == 0) {
                *size -= n - within;
                return TKV_OK;
            }
        *size -= n;
    }
    return st;
}

/* Opens the save that ends at `size` or, with `recovers`, the last whole one before. */
static tkv_status tkvi_keep_last_save(tkvi_reader *r, size_t size, int recovers, const char **fault) {
    const char *earlier;
    tkv_status st = tkvi_keep_save(r, size, fault);
    while (!st && *fault && recovers) {
        st = tkvi_find_end(r, &size);
        if (st || !size) return st;
        st = tkvi_keep_save(r, size, &earlier);
        if (!st && !earlier) *fault = NULL;
        size -= 64;
    }
    return st;
}

#endif /* TKVI_PERSIST_READER_H */
