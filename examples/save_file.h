/*
 * save_file.h - a file that is replaced as a whole, and a sequence of a cache in it. Copy this file into your program.
 *
 *     save_file f;
 *     if (save_file_begin(&f, "talk.tkv")) ...          opens talk.tkv.NUMBER.new beside it
 *     fwrite(bytes, 1, n, f.out);                       errors are found at the end
 *     if (save_file_end(&f)) ...                        flushes it to the disk, and renames it to talk.tkv
 *
 *     status = save_file_sequence(kv, &save, "talk.tkv", &bytes);   all of the above with tkv_seq_save_to
 *
 * The order is: write a new file, flush it to the disk (fsync), close it, rename it over the old one, flush the
 * directory. So a crash, a kill or a power cut at any moment leaves the old file or the new one, each of them whole. A
 * failure, such as a full disk, removes the new file and leaves the old one.
 *
 * Several programs and threads may save to one path at once: each writes a file with a name of its own, which must not
 * exist, and the last one to finish wins. A killed program leaves its new file. The next save to the path removes it: a
 * new file that is being written is locked, so one without a lock is left over. Where the system has no flock, files
 * that are an hour old are (Windows: a minute, and nobody has them open).
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
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../tieredkv.h"

typedef struct save_file {
    FILE *out;
    const char *path;
    char beside[1024]; /* the new file's name until it is whole */
    int lock;          /* a descriptor of the new file, which holds its lock; -1: none */
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
    DWORD why = 0;
    for (int tries = 0; tries < 100; tries++) { /* others may read or replace the old file for a moment */
        if (MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return 0;
        why = GetLastError();
        if (why != ERROR_ACCESS_DENIED && why != ERROR_SHARING_VIOLATION) break;
        Sleep(2);
    }
    errno = why == ERROR_FILE_NOT_FOUND ? ENOENT : EACCES;
    return -1;
#else
    return rename(from, to);
#endif
}

/* Returns the length of the directory in a path, with the slash behind it; 0: the path is a name. */
static inline size_t save_file_directory(const char *path) {
    size_t n = strlen(path);
#ifdef _WIN32
    while (n && !strchr("/\\:", path[n - 1])) n--;
#else
    while (n && path[n - 1] != '/') n--;
#endif
    return n;
}

/* Flushes the directory of a path, so that a new name in it outlives a power cut. Some file systems cannot (EINVAL).
 * Returns 0, or -1 and sets errno. */
static inline int save_file_flush_directory(const char *path) {
#ifdef _WIN32
    (void)path; /* MOVEFILE_WRITE_THROUGH did */
    return 0;
#else
    char dir[1024] = ".";
    const size_t n = save_file_directory(path);
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

/* >>names. The new file of PATH is PATH.NUMBER.new, with eight digits. */
enum { SAVE_FILE_DIGITS = 8, SAVE_FILE_TRIES = 100 };
static const char save_file_ending[] = ".new";

/* Returns a number that hardly any other call has at this time. If one has, save_file_make takes another. */
static inline uint32_t save_file_number(const save_file *f, int tries) {
#ifdef _WIN32
    const uint64_t who = ((uint64_t)GetCurrentProcessId() << 32) ^ GetCurrentThreadId();
    LARGE_INTEGER ticks;
    const uint64_t now = QueryPerformanceCounter(&ticks) ? (uint64_t)ticks.QuadPart : 0;
#else
    struct timespec t = {0, 0};
    (void)clock_gettime(CLOCK_REALTIME, &t);
    const uint64_t who = (uint64_t)getpid() << 32,
                   now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
#endif
    uint64_t x = (who ^ now ^ (uint64_t)(uintptr_t)f) + (uint64_t)tries * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
    return (uint32_t)(x >> 32);
}

/* Whether a file in the directory of `path` is a new file of it. */
static inline int save_file_is_new(const char *path, const char *name) {
    const char *base = path + save_file_directory(path);
    const size_t n = strlen(base);
    if (strncmp(name, base, n) != 0 || name[n] != '.') return 0;
    return strspn(name + n + 1, "0123456789abcdef") == SAVE_FILE_DIGITS &&
           strcmp(name + n + 1 + SAVE_FILE_DIGITS, save_file_ending) == 0;
}

/* Writes the name of a file in the directory of `path`. Returns 0 if it is too long. */
static inline int save_file_beside(const char *path, const char *name, char *out, size_t size) {
    return snprintf(out, size, "%.*s%s", (int)save_file_directory(path), path, name) < (int)size;
}

#ifdef _WIN32
/* Removes what killed programs left. A file that is open cannot be removed. */
static inline void save_file_sweep(const char *path) {
    const uint64_t minute = 60u * 10000000u; /* in steps of 100 ns */
    char pattern[1024], name[1024];
    WIN32_FIND_DATAA found;
    FILETIME t;
    GetSystemTimeAsFileTime(&t);
    const uint64_t now = (uint64_t)t.dwHighDateTime << 32 | t.dwLowDateTime;
    if (snprintf(pattern, sizeof pattern, "%s.*%s", path, save_file_ending) >= (int)sizeof pattern) return;
    HANDLE all = FindFirstFileA(pattern, &found);
    if (all == INVALID_HANDLE_VALUE) return;
    do {
        t = found.ftLastWriteTime;
        const uint64_t then = (uint64_t)t.dwHighDateTime << 32 | t.dwLowDateTime;
        if (then + minute < now && save_file_is_new(path, found.cFileName) &&
            save_file_beside(path, found.cFileName, name, sizeof name))
            (void)DeleteFileA(name);
    } while (FindNextFileA(all, &found));
    FindClose(all);
}

/* Makes a file that does not exist yet. Others may read it meanwhile, and not remove it. */
static inline int save_file_make(save_file *f) {
    HANDLE made =
        CreateFileA(f->beside, GENERIC_WRITE, FILE_SHARE_READ, NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL);
    if (made == INVALID_HANDLE_VALUE) {
        const DWORD e = GetLastError();
        errno = e == ERROR_FILE_EXISTS                                   ? EEXIST
                : e == ERROR_PATH_NOT_FOUND || e == ERROR_FILE_NOT_FOUND ? ENOENT
                                                                         : EACCES;
        return -1;
    }
    const int fd = _open_osfhandle((intptr_t)made, 0);
    if (fd < 0) (void)CloseHandle(made);
    else f->out = _fdopen(fd, "wb");
    if (fd >= 0 && !f->out) (void)_close(fd);
    return f->out ? 0 : -1;
}

static inline void save_file_unlock(save_file *f) { (void)f; }
#else
/* Locks a file. Returns 1; 0 if another description has the lock; -1 if there are no locks. */
static inline int save_file_lock(int fd, int wait) {
#ifdef LOCK_EX
    int result;
    do result = flock(fd, LOCK_EX | (wait ? 0 : LOCK_NB));
    while (result != 0 && errno == EINTR);
    return result == 0 ? 1 : errno == EWOULDBLOCK ? 0 : -1;
#else
    (void)fd;
    (void)wait;
    return -1;
#endif
}

/* Removes what killed programs left. Threads of one program have descriptions, and so locks, of their own. */
static inline void save_file_sweep(const char *path) {
    char name[1024] = "";
    struct dirent *entry;
    struct stat s;
    if (!save_file_beside(path, "", name, sizeof name)) return;
    DIR *dir = opendir(*name ? name : ".");
    while (dir && (entry = readdir(dir)) != NULL) {
        if (!save_file_is_new(path, entry->d_name) ||
            !save_file_beside(path, entry->d_name, name, sizeof name))
            continue;
        const int fd = open(name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        const int locked = fd < 0 ? 0 : save_file_lock(fd, 0);
        if (locked > 0 || (locked < 0 && fstat(fd, &s) == 0 && s.st_mtime + 3600 < time(NULL)))
            (void)unlink(name);
        if (fd >= 0) (void)close(fd);
    }
    if (dir) (void)closedir(dir);
}

static inline void save_file_unlock(save_file *f) {
    if (f->lock >= 0) (void)close(f->lock);
    f->lock = -1;
}

/* Makes a file that does not exist yet, and locks it. */
static inline int save_file_make(save_file *f) {
    struct stat s;
    f->lock = open(f->beside, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (f->lock < 0) return -1;
    (void)save_file_lock(f->lock, 1);
    const int is_gone = fstat(f->lock, &s) == 0 && s.st_nlink == 0; /* a sweep came before the lock */
    f->out = is_gone ? NULL : fopen(f->beside, "wb");
    if (f->out) return 0;
    const int error = is_gone ? EEXIST : errno;
    if (!is_gone) (void)unlink(f->beside);
    save_file_unlock(f);
    errno = error;
    return -1;
}
#endif

/* >>a file. Each returns 0, or -1 and sets errno; then the old file is as it was. */
static inline int save_file_begin(save_file *f, const char *path) {
    memset(f, 0, sizeof *f);
    f->path = path;
    f->lock = -1;
    save_file_sweep(path);
    for (int tries = 0; tries < SAVE_FILE_TRIES; tries++) {
        if (snprintf(f->beside, sizeof f->beside, "%s.%08x%s", path, (unsigned)save_file_number(f, tries),
                     save_file_ending) >= (int)sizeof f->beside) {
            errno = ENAMETOOLONG;
            return -1;
        }
        if (save_file_make(f) == 0) return 0;
        if (errno != EEXIST) return -1;
    }
    return -1;
}

/* Gives up: closes and removes the new file, and keeps errno. */
static inline int save_file_abandon(save_file *f) {
    const int error = errno;
    if (f->out) (void)fclose(f->out);
    f->out = NULL;
    (void)remove(f->beside);
    save_file_unlock(f);
    errno = error;
    return -1;
}

/* The new file takes the place of the old one, but may not have reached the disk. */
static inline int save_file_end_unflushed(save_file *f) {
    int bad = ferror(f->out);
    bad |= fclose(f->out) != 0;
    f->out = NULL;
    if (bad || save_file_replace(f->beside, f->path) != 0) return save_file_abandon(f);
    save_file_unlock(f);
    return 0;
}

/* The new file takes the place of the old one. It stays there if only the last step fails, flushing the directory. */
static inline int save_file_end(save_file *f) {
    if (ferror(f->out) || save_file_flush(f->out) != 0) return save_file_abandon(f);
    if (save_file_end_unflushed(f) != 0) return -1;
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
