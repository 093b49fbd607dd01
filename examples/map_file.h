/*
 * map_file.h - a file that is read where it lies: mapped, read-only. Copy this file into your program.
 *
 *     map_file *f = map_file_open("talk.tkv");             NULL: errno says why
 *     load.attach = 1;                                     blocks stay in f->bytes [f->size]
 *     load.release = map_file_release;                     which closes it when no block needs it
 *     load.release_user = f;
 *     status = tkv_seq_load(kv, &load, f->bytes, f->size, &info);
 *     if (status) map_file_close(f);                       after an error the cache does not have it
 *
 * The system reads a page of the file when it is touched first, and may drop it again. The file must not become shorter
 * meanwhile: replace it as a whole (save_file.h), which leaves the old one to those that have it open. Windows does not
 * replace an open file.
 */
#ifndef MAP_FILE_H
#define MAP_FILE_H

#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

typedef struct map_file {
    const void *bytes; /* at the beginning of a page, so at a multiple of 64 */
    size_t size;
#ifdef _WIN32
    HANDLE file, mapping;
#endif
} map_file;

/* Unmaps the file. f may be NULL. */
static inline void map_file_close(map_file *f) {
    if (!f) return;
#ifdef _WIN32
    if (f->bytes) UnmapViewOfFile(f->bytes);
    if (f->mapping) CloseHandle(f->mapping);
    if (f->file != INVALID_HANDLE_VALUE) CloseHandle(f->file);
#else
    if (f->bytes) munmap((void *)(size_t)f->bytes, f->size);
#endif
    free(f);
}

#ifdef _WIN32
static inline int map_file_map(map_file *f, const char *path) {
    LARGE_INTEGER size;
    f->file =
        CreateFileA(path, GENERIC_READ, FILE_SHARE_READ, NULL, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    if (f->file == INVALID_HANDLE_VALUE) {
        errno = GetLastError() == ERROR_FILE_NOT_FOUND ? ENOENT : EACCES;
        return 0;
    }
    errno = EINVAL; /* an empty file, or one that is larger than the address space */
    if (!GetFileSizeEx(f->file, &size) || size.QuadPart <= 0 ||
        (unsigned long long)size.QuadPart > (size_t)-1)
        return 0;
    f->size = (size_t)size.QuadPart;
    f->mapping = CreateFileMappingA(f->file, NULL, PAGE_READONLY, 0, 0, NULL);
    if (f->mapping) f->bytes = MapViewOfFile(f->mapping, FILE_MAP_READ, 0, 0, 0);
    return f->bytes != NULL;
}
#else
static inline int map_file_map(map_file *f, const char *path) {
    struct stat s;
    const int fd = open(path, O_RDONLY);
    void *bytes = MAP_FAILED;
    if (fd < 0) return 0;
    if (fstat(fd, &s) == 0) {
        if (s.st_size <= 0 || (unsigned long long)s.st_size > (size_t)-1) errno = EINVAL;
        else bytes = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_SHARED, fd, 0);
    }
    if (bytes != MAP_FAILED) f->bytes = bytes, f->size = (size_t)s.st_size;
    close(fd); /* the mapping stays */
    return f->bytes != NULL;
}
#endif

/* Maps a file. Returns NULL and sets errno after a failure. */
static inline map_file *map_file_open(const char *path) {
    map_file *f = (map_file *)calloc(1, sizeof *f);
    int why;
    if (!f) return NULL;
#ifdef _WIN32
    f->file = INVALID_HANDLE_VALUE;
#endif
    if (map_file_map(f, path)) return f;
    why = errno;
    map_file_close(f);
    errno = why;
    return NULL;
}

/* For tkv_load_params.release, with release_user the map_file. */
static inline void map_file_release(void *user, const void *bytes, size_t size) {
    (void)bytes;
    (void)size;
    map_file_close((map_file *)user);
}

#endif /* MAP_FILE_H */
