/*
 * saved_changes.h - changes of saved bytes that the fuzz targets load_cache.c and prefixes.c share. They change words of
 * sections, as the bytes of an input choose; checksums are repaired later (repair_index).
 */
#ifndef TKV_SAVED_CHANGES_H
#define TKV_SAVED_CHANGES_H

#include "../saved_files.h"
#include "target.h"

/* A word from the one that was there. */
static uint32_t choose_word(uint32_t was) {
    static const uint32_t values[] = {0,  1,  2,   3,   4,          5,           31,         63,
                                      64, 65, 127, 255, 0x7fffffff, 0x80000000u, 0xffffffffu};
    const int how = next_byte() % 4;
    if (how == 0) return was + (uint32_t)next_byte() % 7 - 3u;
    if (how == 1) return was ^ (uint32_t)1 << next_byte() % 32;
    if (how == 2) return (was & 0xffff0000u) | (uint32_t)next_below(1 << 16);
    return values[next_byte() % COUNT(values)];
}

/* Changes a word of a section that is not of records. */
static void change_word(uint8_t *at, size_t n) {
    const int n_sections = (int)count_of(at, n);
    int i = next_below(n_sections), tries = 0;
    const uint8_t *e = at + index_of(at, n) + 32 * (size_t)i;
    size_t words, word;
    while ((get32(e) == SAVED_RECORDS || get64(e + 16) < 4) && tries++ < n_sections)
        e = at + index_of(at, n) + 32 * (size_t)(i = (i + 1) % n_sections);
    if (next_byte() % 4 == 0)
        e = at + index_of(at, n) + 32 * (size_t)(n_sections - 1); /* the cache's numbers */
    words = (size_t)get64(e + 16) / 4;
    if (get32(e) == SAVED_RECORDS || !words) return;
    word = (size_t)next_below(1 << 16) % (next_byte() % 2 && words > 128 ? 128 : words);
    word = (size_t)get64(e + 8) + 4 * word;
    put32(at + word, choose_word(get32(at + word)));
}

/* Copies 16 bytes of a section to another place of it: entries get the holders of others. */
static void copy_words(uint8_t *at, size_t n) {
    const uint8_t *e = at + index_of(at, n) + 32 * (size_t)next_below((int)count_of(at, n));
    const size_t bytes = (size_t)get64(e + 16), from = (size_t)next_below(1 << 15) * 8;
    const size_t to = (size_t)next_below(1 << 15) * 8;
    if (get32(e) == SAVED_RECORDS || bytes < 16) return;
    memmove(at + get64(e + 8) + to % (bytes - 15), at + get64(e + 8) + from % (bytes - 15), 16);
}

#endif /* TKV_SAVED_CHANGES_H */
