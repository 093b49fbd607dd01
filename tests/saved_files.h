/*
 * saved_files.h - files of saved sequences in tests/test_save.c and tests/fuzz/load.c: the parameters that save and load
 * them, and a second reader of their bytes, which knows the format from its drawing (src/persist/saved.h): numbers,
 * XXH64 from its specification, the index and its checksums.
 */
#ifndef TKV_SAVED_FILES_H
#define TKV_SAVED_FILES_H

#include "kit.h"

static const char model_name[] = "a model";

static inline tkv_save_params save_params(int seq) {
    tkv_save_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.model = model_name;
    p.model_bytes = sizeof model_name;
    return p;
}

static inline tkv_load_params load_params(int seq) {
    tkv_load_params p;
    memset(&p, 0, sizeof p);
    p.seq = seq;
    p.model = model_name;
    p.model_bytes = sizeof model_name;
    return p;
}

enum { SAVED_END = 40, SAVED_RECORDS = 4, SAVED_LISTS = 5 }; /* bytes of the end; kinds of sections */

static inline uint32_t get32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t get64(const uint8_t *p) { return get32(p) | (uint64_t)get32(p + 4) << 32; }

static inline void put32(uint8_t *p, uint32_t x) {
    int i;
    for (i = 0; i < 4; i++) p[i] = (uint8_t)(x >> 8 * i & 255u);
}

static inline void put64(uint8_t *p, uint64_t x) {
    put32(p, (uint32_t)(x & 0xffffffffu));
    put32(p + 4, (uint32_t)(x >> 32));
}

#define SAVED_PRIME_1 0x9e3779b185ebca87u
#define SAVED_PRIME_2 0xc2b2ae3d27d4eb4fu
#define SAVED_PRIME_3 0x165667b19e3779f9u
#define SAVED_PRIME_4 0x85ebca77c2b2ae63u
#define SAVED_PRIME_5 0x27d4eb2f165667c5u

static inline uint64_t rotate_left(uint64_t x, int n) { return x << n | x >> (64 - n); }

/* XXH64 with seed 0. */
static inline uint64_t xxh64_of(const uint8_t *p, size_t n) {
    uint64_t lane[4] = {SAVED_PRIME_1 + SAVED_PRIME_2, SAVED_PRIME_2, 0, 0 - SAVED_PRIME_1},
             h = SAVED_PRIME_5;
    const size_t size = n;
    int i;
    for (; n >= 32; n -= 32)
        for (i = 0; i < 4; i++, p += 8)
            lane[i] = rotate_left(lane[i] + get64(p) * SAVED_PRIME_2, 31) * SAVED_PRIME_1;
    if (size >= 32) {
        h = rotate_left(lane[0], 1) + rotate_left(lane[1], 7) + rotate_left(lane[2], 12) +
            rotate_left(lane[3], 18);
        for (i = 0; i < 4; i++)
            h = (h ^ rotate_left(lane[i] * SAVED_PRIME_2, 31) * SAVED_PRIME_1) * SAVED_PRIME_1 +
                SAVED_PRIME_4;
    }
    h += size;
    for (; n >= 8; n -= 8, p += 8)
        h = rotate_left(h ^ rotate_left(get64(p) * SAVED_PRIME_2, 31) * SAVED_PRIME_1, 27) * SAVED_PRIME_1 +
            SAVED_PRIME_4;
    for (; n >= 4; n -= 4, p += 4)
        h = rotate_left(h ^ get32(p) * SAVED_PRIME_1, 23) * SAVED_PRIME_2 + SAVED_PRIME_3;
    for (; n > 0; n--, p++) h = rotate_left(h ^ *p * SAVED_PRIME_5, 11) * SAVED_PRIME_1;
    h = (h ^ h >> 33) * SAVED_PRIME_2;
    h = (h ^ h >> 29) * SAVED_PRIME_3;
    return h ^ h >> 32;
}

/* Where the index of a file of n bytes is, and how many sections it has. */
static inline uint64_t index_of(const uint8_t *at, size_t n) { return get64(at + n - SAVED_END); }
static inline uint32_t count_of(const uint8_t *at, size_t n) { return get32(at + n - SAVED_END + 16); }

/* The index entry of a section. NULL: there is none. */
static inline const uint8_t *find_in_index(const uint8_t *at, size_t n, uint32_t kind, uint32_t layer) {
    const uint8_t *e = at + index_of(at, n);
    for (; e < at + n - SAVED_END; e += 32)
        if (get32(e) == kind && get32(e + 4) == layer) return e;
    return NULL;
}

/* Repairs the checksums of sections and of the index, as far as the index is readable. Records have their own. */
static inline void repair_index(uint8_t *at, size_t n) {
    uint64_t index, count, i;
    if (n < 96) return;
    index = index_of(at, n);
    count = count_of(at, n);
    if (index > n - SAVED_END || count > (n - SAVED_END - index) / 32) return;
    for (i = 0; i < count; i++) {
        uint8_t *e = at + index + 32 * i;
        const uint64_t from = get64(e + 8), bytes = get64(e + 16);
        if (from <= index && bytes <= index - from)
            put64(e + 24, get32(e) == SAVED_RECORDS ? 0 : xxh64_of(at + from, (size_t)bytes));
    }
    put64(at + n - 16, xxh64_of(at + index, n - 16 - (size_t)index));
}

/* >>a file that a callback reads */
typedef struct read_file {
    const uint8_t *bytes;
    size_t n, most; /* most: of the largest read */
    int calls, fail_at;
    int spoil_from; /* not 0: from this call on a byte of each read of a record's size is wrong */
} read_file;

static inline int read_from_file(void *user, size_t at, void *bytes, size_t size) {
    read_file *f = (read_file *)user;
    if (++f->calls == f->fail_at || at > f->n || size > f->n - at) return 1;
    memcpy(bytes, f->bytes + at, size);
    if (f->spoil_from && f->calls >= f->spoil_from && size > 64) ((uint8_t *)bytes)[size / 3] ^= 1;
    if (size > f->most) f->most = size;
    return 0;
}

static inline read_file read_file_of(const uint8_t *bytes, size_t n) {
    read_file f;
    memset(&f, 0, sizeof f);
    f.bytes = bytes;
    f.n = n;
    return f;
}

#endif /* TKV_SAVED_FILES_H */
