/*
 * spill_file.h - a file as the store for offloaded blocks (cfg.offload). Copy it into your program.
 *
 *     spill_file file;
 *     size_t bytes;
 *     tkv_get_required_bytes(&cfg, NULL, &bytes);     the final config; cfg.offload may still be empty
 *     if (spill_file_open(&file, NULL, bytes)) ...    NULL: a temporary file that other programs cannot open by name
 *     cfg.offload = spill_file_config(&file);
 *     tkv_create(&cfg, &kv); ... tkv_destroy(kv);
 *     spill_file_close(&file);
 *
 * Each key has a slot of `bytes`, rounded up to 4096. The cache reuses the keys of dead blocks. So the file has as
 * many slots as blocks were offloaded at once. The file is sparse: only written bytes take space on the disk. Calls
 * continue after short reads and writes. A full disk or a file that ends too early is an error, which the cache
 * reports as TKV_ERR_IO. The cache verifies all bytes that it reads back. Several threads may read at once. Child
 * processes do not inherit the file.
 *
 * POSIX: the temporary file lies in $TMPDIR or /tmp. spill_file_open refuses a symbolic link (ELOOP). Include this
 * file before system headers, or define _XOPEN_SOURCE 700 and _FILE_OFFSET_BITS 64.
 * Windows: the temporary file lies in the folder that GetTempPathW returns. This file includes <windows.h>.
 */
#ifndef SPILL_FILE_H
#define SPILL_FILE_H

#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#include <winioctl.h>
#else
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 /* pread, pwrite, mkstemp, posix_fadvise, O_CLOEXEC, O_NOFOLLOW */
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#endif

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../tieredkv.h"

typedef struct spill_file {
#ifdef _WIN32
    HANDLE handle;
#else
    int fd;
#endif
    size_t bytes; /* size of a key's slot */
} spill_file;

static inline uint64_t spill_file_at(const spill_file *f, uint32_t key, size_t offset) {
    return (uint64_t)key * f->bytes + offset;
}

/* >>reads and writes at an offset. Each returns the bytes moved; 0 or less: an error, or the end of the file. */
#ifdef _WIN32
/* The handle is synchronous. The offset in the OVERLAPPED replaces the handle's file position. */
static inline OVERLAPPED spill_file_overlapped(uint64_t at) {
    OVERLAPPED o;
    memset(&o, 0, sizeof o);
    o.Offset = (DWORD)(at & 0xffffffffu);
    o.OffsetHigh = (DWORD)(at >> 32);
    return o;
}

static inline DWORD spill_file_limit(size_t size) { return size < 1u << 30 ? (DWORD)size : (DWORD)1 << 30; }

static inline ptrdiff_t spill_file_write(const spill_file *f, const char *from, size_t size, uint64_t at) {
    OVERLAPPED o = spill_file_overlapped(at);
    DWORD n = 0;
    return WriteFile(f->handle, from, spill_file_limit(size), &n, &o) ? (ptrdiff_t)n : -1;
}

static inline ptrdiff_t spill_file_read(const spill_file *f, char *to, size_t size, uint64_t at) {
    OVERLAPPED o = spill_file_overlapped(at);
    DWORD n = 0;
    return ReadFile(f->handle, to, spill_file_limit(size), &n, &o) ? (ptrdiff_t)n : -1;
}
#else
static inline ptrdiff_t spill_file_write(const spill_file *f, const char *from, size_t size, uint64_t at) {
    ssize_t n;
    do n = pwrite(f->fd, from, size, (off_t)at);
    while (n < 0 && errno == EINTR);
    return n;
}

static inline ptrdiff_t spill_file_read(const spill_file *f, char *to, size_t size, uint64_t at) {
    ssize_t n;
    do n = pread(f->fd, to, size, (off_t)at);
    while (n < 0 && errno == EINTR);
    return n;
}
#endif

/* >>callbacks of cfg.offload */
static inline int spill_file_store(void *user, uint32_t key, size_t offset, const void *bytes, size_t size) {
    const spill_file *f = (const spill_file *)user;
    const char *from = (const char *)bytes;
    uint64_t at = spill_file_at(f, key, offset);
    while (size > 0) {
        const ptrdiff_t n = spill_file_write(f, from, size, at);
        if (n <= 0) return -1; /* errno is ENOSPC, EIO, ... */
        from += n;
        at += (uint64_t)n;
        size -= (size_t)n;
    }
    return 0;
}

static inline int spill_file_fetch(void *user, uint32_t key, size_t offset, void *bytes, size_t size) {
    const spill_file *f = (const spill_file *)user;
    char *to = (char *)bytes;
    uint64_t at = spill_file_at(f, key, offset);
    while (size > 0) {
        const ptrdiff_t n = spill_file_read(f, to, size, at);
        if (n <= 0) return -1; /* 0: the end of the file */
        to += n;
        at += (uint64_t)n;
        size -= (size_t)n;
    }
    return 0;
}

static inline void spill_file_ahead(void *user, uint32_t key, size_t offset, size_t size) {
#if !defined(_WIN32) && defined(POSIX_FADV_WILLNEED)
    const spill_file *f = (const spill_file *)user;
    (void)posix_fadvise(f->fd, (off_t)spill_file_at(f, key, offset), (off_t)size, POSIX_FADV_WILLNEED);
#else
    (void)user;
    (void)key;
    (void)offset;
    (void)size;
#endif
}

/* >>opening and closing */
#ifdef _WIN32
static inline int spill_file_failed(void) { /* sets errno to the POSIX equivalent; returns -1 */
    const DWORD e = GetLastError();
    errno = e == ERROR_FILE_NOT_FOUND || e == ERROR_PATH_NOT_FOUND     ? ENOENT
            : e == ERROR_ACCESS_DENIED || e == ERROR_SHARING_VIOLATION ? EACCES
            : e == ERROR_DISK_FULL                                     ? ENOSPC
                                                                       : EIO;
    return -1;
}

static inline int spill_file_open_temporary(spill_file *f) {
    wchar_t dir[MAX_PATH + 1], name[MAX_PATH + 1];
    if (!GetTempPathW(MAX_PATH + 1, dir) || !GetTempFileNameW(dir, L"tkv", 0, name))
        return spill_file_failed();
    f->handle = CreateFileW(name, GENERIC_READ | GENERIC_WRITE, 0, NULL, CREATE_ALWAYS,
                            FILE_ATTRIBUTE_TEMPORARY | FILE_FLAG_DELETE_ON_CLOSE, NULL);
    if (f->handle != INVALID_HANDLE_VALUE) return 0;
    (void)spill_file_failed();
    (void)DeleteFileW(name); /* GetTempFileNameW created it */
    return -1;
}

static inline int spill_file_open_path(spill_file *f, const char *path) {
    f->handle = CreateFileA(path, GENERIC_READ | GENERIC_WRITE, FILE_SHARE_READ, NULL, CREATE_ALWAYS,
                            FILE_ATTRIBUTE_NORMAL, NULL);
    return f->handle == INVALID_HANDLE_VALUE ? spill_file_failed() : 0;
}
#else
static inline int spill_file_open_temporary(spill_file *f) {
    const char *dir = getenv("TMPDIR");
    char name[1024];
    if (snprintf(name, sizeof name, "%s/tieredkv-XXXXXX", dir && *dir ? dir : "/tmp") >= (int)sizeof name) {
        errno = ENAMETOOLONG;
        return -1;
    }
    f->fd = mkstemp(name); /* creates the file, so it follows no link */
    if (f->fd < 0) return -1;
    (void)unlink(name); /* the system deletes the file when it is closed */
    (void)fcntl(f->fd, F_SETFD, FD_CLOEXEC);
    return 0;
}

static inline int spill_file_open_path(spill_file *f, const char *path) {
    int flags = O_RDWR | O_CREAT | O_TRUNC;
#ifdef O_CLOEXEC
    flags |= O_CLOEXEC;
#endif
#ifdef O_NOFOLLOW
    flags |= O_NOFOLLOW;
#endif
    f->fd = open(path, flags, 0600);
    return f->fd < 0 ? -1 : 0;
}
#endif

/* Opens the store and empties an existing file. Returns 0, or -1 and sets errno. */
static inline int spill_file_open(spill_file *f, const char *path, size_t bytes) {
    const size_t page = 4096;
    f->bytes = (bytes + page - 1) / page * page;
    if (path ? spill_file_open_path(f, path) : spill_file_open_temporary(f)) return -1;
#ifdef _WIN32
    { /* without this, Windows fills the gaps between written slots with zeros on the disk */
        DWORD n;
        (void)DeviceIoControl(f->handle, FSCTL_SET_SPARSE, NULL, 0, NULL, 0, &n, NULL);
    }
#endif
    return 0;
}

static inline tkv_offload_config spill_file_config(spill_file *f) {
    tkv_offload_config c;
    memset(&c, 0, sizeof c);
    c.write = spill_file_store;
    c.read = spill_file_fetch;
    c.prefetch = spill_file_ahead;
    c.user = f;
    return c;
}

/* Returns the bytes that the file takes on the disk. */
static inline double spill_file_size(const spill_file *f) {
#ifdef _WIN32
    FILE_STANDARD_INFO s;
    if (!GetFileInformationByHandleEx(f->handle, FileStandardInfo, &s, sizeof s)) return 0.0;
    return (double)s.AllocationSize.QuadPart;
#else
    struct stat s;
    return fstat(f->fd, &s) ? 0.0 : 512.0 * (double)s.st_blocks;
#endif
}

static inline void spill_file_close(spill_file *f) {
#ifdef _WIN32
    (void)CloseHandle(f->handle);
#else
    (void)close(f->fd);
#endif
}

#endif /* SPILL_FILE_H */
