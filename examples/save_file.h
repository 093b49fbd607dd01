/*
 * save_file.h - a file that is replaced as a whole, and a sequence of a cache in it. Copy this file into your program.
 *
 *     save_file f;
 *     if (save_file_begin(&f, "talk.tkv")) ...          opens talk.tkv.new beside it
 *     fwrite(bytes, 1, n, f.out);                       errors are found at the end
 *     if (save_file_end(&f)) ...                        flushes it to the disk, and renames it to talk.tkv
 *
 *     status = save_file_sequence(kv, &save, "talk.tkv", &bytes);   all of the above with tkv_seq_save_to
 *
 * The order is: write a new file, flush it to the disk (fsync), close it, rename it over the old one, flush the
 * directory. So a crash, a kill or a power cut at any moment leaves the old file or the new one, each of them whole. A
 * failure, such as a full disk, removes the new file and leaves the old one. A kill may leave talk.tkv.new, which the
 * next save replaces. Two programs must not save to one path at once.
 *
 * POSIX: include this file before system headers, or define _XOPEN_SOURCE 700. Windows: this file includes <windows.h>.
 * MoveFileEx replaces a file there, but no one promises what a power cut leaves.
 */
#ifndef SAVE_FILE_H
#define SAVE_FILE_H

#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <io.h>
#include <windows.h>
#else
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 /* fsync, fileno, O_DIRECTORY */
#endif
#include <fcntl.h>
#include <unistd.h>
#endif

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "../tieredkv.h"

typedef struct save_file {
    FILE *out;
    const char *path;
    char beside[1024]; /* the new file's name until it is whole */
    size_t bytes;      /* written by save_file_write */
    int error;         /* errno of its first failure; 0: none */
} save_file;

/* >>the system */
static inline int save_file_flush(FILE *f) { /* to the disk, not only to the system */
    if (fflush(f) != 0) return -1;
#ifdef _WIN32
    return _commit(_fileno(f));
#else
    return fsync(fileno(f));
#endif
}

/* Renames a file. It takes the place of another one. Returns 0, or -1 and sets errno. */
static inline int save_file_replace(const char *from, const char *to) {
#ifdef _WIN32
    if (MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return 0;
    errno = GetLastError() == ERROR_FILE_NOT_FOUND ? ENOENT : EACCES;
    return -1;
#else
    return rename(from, to);
#endif
}

/* Flushes the directory of a path, so that a new name in it outlives a power cut. Some file systems cannot (EINVAL).
 * Returns 0, or -1 and sets errno. */
static inline int save_file_flush_directory(const char *path) {
#ifdef _WIN32
    (void)path; /* MOVEFILE_WRITE_THROUGH did */
    return 0;
#else
    char dir[1024] = ".";
    const char *slash = strrchr(path, '/');
    const size_t n = slash ? (size_t)(slash - path) + 1 : 0; /* with the slash: it may be the root */
    if (n >= sizeof dir) {
        errno = ENAMETOOLONG;
        return -1;
    }
    if (n) {
        memcpy(dir, path, n);
        dir[n] = 0;
    }
    const int fd = open(dir, O_RDONLY | O_DIRECTORY);
    if (fd < 0) return errno == EACCES ? 0 : -1; /* a directory to write in, but not to read */
    const int bad = fsync(fd) != 0 && errno != EINVAL, error = errno;
    (void)close(fd);
    errno = error;
    return bad ? -1 : 0;
#endif
}

/* >>a file. Each returns 0, or -1 and sets errno; then the old file is as it was. */
static inline int save_file_begin(save_file *f, const char *path) {
    memset(f, 0, sizeof *f);
    f->path = path;
    if (snprintf(f->beside, sizeof f->beside, "%s.new", path) >= (int)sizeof f->beside) {
        errno = ENAMETOOLONG;
        return -1;
    }
    f->out = fopen(f->beside, "wb");
    return f->out ? 0 : -1;
}

/* Gives up: closes and removes the new file, and keeps errno. */
static inline int save_file_abandon(save_file *f) {
    const int error = errno;
    if (f->out) (void)fclose(f->out);
    f->out = NULL;
    (void)remove(f->beside);
    errno = error;
    return -1;
}

/* The new file takes the place of the old one. It stays there if only the last step fails, flushing the directory. */
static inline int save_file_end(save_file *f) {
    int bad = ferror(f->out) || save_file_flush(f->out) != 0;
    if (bad) return save_file_abandon(f);
    bad = fclose(f->out) != 0;
    f->out = NULL;
    if (bad || save_file_replace(f->beside, f->path) != 0) return save_file_abandon(f);
    return save_file_flush_directory(f->path);
}

/* >>a sequence */
static inline int save_file_write(void *user, const void *bytes, size_t size) { /* a tkv_write_bytes */
    save_file *f = (save_file *)user;
    f->bytes += size;
    if (fwrite(bytes, 1, size, f->out) == size) return 0;
    f->error = errno;
    return -1;
}

/* Saves a sequence to a file.
 *   bytes   (may be NULL) receives the size of the file
 * Returns the status of tkv_seq_save_to; TKV_ERR_IO with errno if the file cannot be written. */
static inline tkv_status save_file_sequence(tkv_cache *kv, const tkv_save_params *p, const char *path,
                                            size_t *bytes) {
    save_file f;
    if (save_file_begin(&f, path) != 0) return TKV_ERR_IO;
    const tkv_status status = tkv_seq_save_to(kv, p, save_file_write, &f);
    if (bytes) *bytes = f.bytes;
    if (status == TKV_OK) return save_file_end(&f) == 0 ? TKV_OK : TKV_ERR_IO;
    errno = f.error;
    (void)save_file_abandon(&f);
    return status;
}

#endif /* SAVE_FILE_H */
