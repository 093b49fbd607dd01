/*
 * spill_file.h - a file as the place where tieredkv puts blocks that RAM has no room for (cfg.spill). To be copied.
 *
 *     spill_file file;
 *     size_t bytes;
 *     tkv_spill_bytes(&cfg, &bytes);                  the config as it will be, but for cfg.spill
 *     if (spill_file_open(&file, NULL, bytes)) ...    NULL: a temporary one that nobody else sees, in $TMPDIR or /tmp
 *     cfg.spill = spill_file_config(&file);
 *     tkv_create(&cfg, &kv); ... tkv_destroy(kv);
 *     spill_file_close(&file);
 *
 * Each key has a place of `bytes`, rounded up to pages; keys of dead blocks come again, so the file is as large as the
 * most blocks that were in use at once, and only what was written takes room on the disk. Calls that were cut short go
 * on where they were; a full disk, or a file that ends too early, is an error that the cache hands on. What is read is
 * what the cache checks. POSIX: include it before system headers, or define _XOPEN_SOURCE 600 and _FILE_OFFSET_BITS 64.
 */
#ifndef SPILL_FILE_H
#define SPILL_FILE_H

#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 600 /* pread, pwrite, mkstemp, posix_fadvise */
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "../tieredkv.h"

typedef struct spill_file {
    int fd;
    size_t bytes; /* of a key's place */
} spill_file;

static inline off_t spill_file_at(const spill_file *f, uint32_t key, size_t offset) {
    return (off_t)key * (off_t)f->bytes + (off_t)offset;
}

static inline int spill_file_store(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    const spill_file *f = (const spill_file *)user;
    const char *from = (const char *)bytes;
    off_t at = spill_file_at(f, key, offset);
    while (size > 0) {
        const ssize_t n = pwrite(f->fd, from, size, at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1; /* ENOSPC, EIO, ... */
        from += n;
        at += n;
        size -= (size_t)n;
    }
    return 0;
}

static inline int spill_file_fetch(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    const spill_file *f = (const spill_file *)user;
    char *to = (char *)bytes;
    off_t at = spill_file_at(f, key, offset);
    while (size > 0) {
        const ssize_t n = pread(f->fd, to, size, at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1; /* 0: the file ends here */
        to += n;
        at += n;
        size -= (size_t)n;
    }
    return 0;
}

static inline void spill_file_ahead(void *user, uint32_t key, size_t offset, size_t size) {
#ifdef POSIX_FADV_WILLNEED
    const spill_file *f = (const spill_file *)user;
    (void)posix_fadvise(f->fd, spill_file_at(f, key, offset), (off_t)size, POSIX_FADV_WILLNEED);
#else
    (void)user, (void)key, (void)offset, (void)size;
#endif
}

/* 0, or -1 and errno. A file that is there already is emptied. */
static inline int spill_file_open(spill_file *f, const char *path, size_t bytes) {
    const size_t page = 4096;
    char name[1024];
    const char *dir = getenv("TMPDIR");
    f->bytes = (bytes + page - 1) / page * page;
    if (path) {
        f->fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
        return f->fd < 0 ? -1 : 0;
    }
    if (snprintf(name, sizeof name, "%s/tieredkv-XXXXXX", dir && *dir ? dir : "/tmp") >= (int)sizeof name) {
        errno = ENAMETOOLONG;
        return -1;
    }
    f->fd = mkstemp(name);
    if (f->fd < 0) return -1;
    (void)unlink(name); /* it lives as long as it is open */
    return 0;
}

static inline tkv_spill_config spill_file_config(spill_file *f) {
    tkv_spill_config c;
    memset(&c, 0, sizeof c);
    c.store = spill_file_store;
    c.fetch = spill_file_fetch;
    c.ahead = spill_file_ahead;
    c.user = f;
    return c;
}

/* Bytes that it takes on the disk. */
static inline double spill_file_size(const spill_file *f) {
    struct stat s;
    return fstat(f->fd, &s) ? 0.0 : 512.0 * (double)s.st_blocks;
}

static inline void spill_file_close(spill_file *f) { (void)close(f->fd); }

#endif /* SPILL_FILE_H */
