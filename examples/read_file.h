/*
 * read_file.h - reads a whole file into memory, also one that is larger than 2 GiB. Copy this file into your program.
 *
 *     size_t size;
 *     void *bytes = read_file("model.gguf", &size);      NULL: the file cannot be read; free it at the end
 *
 * A `long` has 32 bits on Windows, so fseek and ftell end at 2 GiB there. Elsewhere a long is as wide as an address.
 */
#ifndef READ_FILE_H
#define READ_FILE_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Returns the size of a file and goes back to its beginning; -1: the file has none, as a pipe. */
static inline int64_t read_file_size(FILE *f) {
#ifdef _WIN32
    const int64_t n = _fseeki64(f, 0, SEEK_END) == 0 ? _ftelli64(f) : -1;
    if (n >= 0 && _fseeki64(f, 0, SEEK_SET) != 0) return -1;
#else
    const int64_t n = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    if (n == LONG_MAX) return -1; /* a directory, on some systems */
    if (n >= 0 && fseek(f, 0, SEEK_SET) != 0) return -1;
#endif
    return n;
}

/* Returns the bytes of a file and a byte more, which the caller frees. NULL: the file cannot be read. */
static inline void *read_file(const char *path, size_t *size) {
    const size_t most = (size_t)1 << 30; /* bytes of a call: some libraries count them in an int */
    FILE *f = fopen(path, "rb");
    const int64_t n = f ? read_file_size(f) : -1;
    char *data = NULL;
    size_t at = 0, got = 1;
    if (n >= 0 && (uint64_t)n < SIZE_MAX) data = (char *)malloc((size_t)n + 1);
    while (data && at < (size_t)n && got) {
        got = fread(data + at, 1, (size_t)n - at < most ? (size_t)n - at : most, f);
        at += got;
    }
    if (data && at != (size_t)n) {
        free(data);
        data = NULL;
    }
    *size = data ? at : 0;
    if (f) fclose(f);
    return data;
}

#endif /* READ_FILE_H */
