/*
 * disk_faults.c - makes calls on files fail, one by one: a library that is loaded before a program (Linux with glibc).
 *
 *     cc -shared -fPIC tests/disk_faults.c -o disk_faults.so -ldl
 *     DISK_UNDER=/tmp/place/ DISK_AT=7 DISK_FAULT=EIO LD_PRELOAD=./disk_faults.so program ...
 *
 * Calls on paths that begin with DISK_UNDER count, from 1 on. DISK_LOG names a file that gets a line for each: what it
 * does. Call DISK_AT fails, and with DISK_STICKY=1 all later ones that can fail so. DISK_FAULT is one of these:
 *
 *   EIO      every kind of call
 *   ENOSPC   files that are made or written, and flushes
 *   EROFS    whatever changes files
 *   SHORT    a read or a write moves half of its bytes, at least one
 *   KILL     the program is killed before the call
 *   CUT      the power goes before the call: what was written and not flushed is lost, and renames in a directory that
 *            was not flushed have not happened. DISK_KEEP=N keeps N percent of the bytes. DISK_RENAMED=1 keeps renames
 *
 * A FILE of stdio is made anew here (fopencookie), since libc calls its own write. It goes on after a short write, as
 * that of libc does. Bytes written over flushed ones are not brought back by CUT. The program must have one thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_FILES = 1024, MOST_RENAMES = 64, MOST_PATH = 1024 };

typedef enum call_kind {
    OPENS,
    MAKES, /* opens to write */
    READS,
    WRITES,
    FLUSHES,
    CLOSES,
    RENAMES,
    REMOVES,
    CUTS, /* ftruncate */
    MEASURES,
    MAPS,
    N_KINDS
} call_kind;

static const char *const kind_names[N_KINDS] = {"open",   "make",   "read", "write",   "flush", "close",
                                                "rename", "remove", "cut",  "measure", "map"};

typedef struct open_file {
    int is_ours, is_directory;
    int copy;     /* a copy of the descriptor of a written file, for CUT; 0: none */
    FILE *stream; /* NULL: no FILE */
    ino_t inode;
    off_t flushed; /* bytes that outlive a cut */
} open_file;

typedef struct pending_rename {
    char from[MOST_PATH], to[MOST_PATH],
        before[MOST_PATH]; /* before: a second name of the file that was replaced */
    int replaced;
} pending_rename;

static struct {
    int is_ready, at, is_sticky, n_calls, log, keeps, keeps_renames, is_killed, is_cut, is_short, error,
        n_renames;
    const char *under;
    open_file files[MOST_FILES];  /* by descriptor */
    open_file closed[MOST_FILES]; /* written and closed */
    int n_closed;
    pending_rename renames[MOST_RENAMES];
} disk;

/* >>the functions of libc */
static void *find(const char *name) {
    void *f = dlsym(RTLD_NEXT, name);
    if (!f) _exit(99);
    return f;
}
#define REAL(result, name, ...) ((result(*)(__VA_ARGS__))find(#name))
#define real_open REAL(int, open, const char *, int, ...)
#define real_read REAL(ssize_t, read, int, void *, size_t)
#define real_write REAL(ssize_t, write, int, const void *, size_t)
#define real_writev REAL(ssize_t, writev, int, const struct iovec *, int)
#define real_pread REAL(ssize_t, pread64, int, void *, size_t, off64_t)
#define real_pwrite REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)
#define real_close REAL(int, close, int)
#define real_fsync REAL(int, fsync, int)
#define real_rename REAL(int, rename, const char *, const char *)
#define real_unlink REAL(int, unlink, const char *)
#define real_ftruncate REAL(int, ftruncate64, int, off64_t)
#define real_fstat REAL(int, fstat, int, struct stat *)
#define real_mmap REAL(void *, mmap, void *, size_t, int, int, int, off_t)
#define real_fopen REAL(FILE *, fopen, const char *, const char *)
#define real_fileno REAL(int, fileno, FILE *)

static int number_of(const char *name, int value_if_unset) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : value_if_unset;
}

static void prepare(void) {
    const char *fault = getenv("DISK_FAULT"), *log = getenv("DISK_LOG");
    if (disk.is_ready) return;
    disk.is_ready = 1;
    disk.under = getenv("DISK_UNDER");
    disk.at = number_of("DISK_AT", 0);
    disk.is_sticky = number_of("DISK_STICKY", 0);
    disk.keeps = number_of("DISK_KEEP", 0);
    disk.keeps_renames = number_of("DISK_RENAMED", 0);
    disk.log = log ? real_open(log, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (!fault) return;
    disk.is_killed = strcmp(fault, "KILL") == 0;
    disk.is_cut = strcmp(fault, "CUT") == 0;
    disk.is_short = strcmp(fault, "SHORT") == 0;
    disk.error = strcmp(fault, "EIO") == 0      ? EIO
                 : strcmp(fault, "ENOSPC") == 0 ? ENOSPC
                 : strcmp(fault, "EROFS") == 0  ? EROFS
                                                : 0;
}

static int is_under(const char *path) {
    prepare();
    return disk.under && strncmp(path, disk.under, strlen(disk.under)) == 0;
}

static int is_ours(int fd) { return fd >= 0 && fd < MOST_FILES && disk.files[fd].is_ours; }

/* >>the power goes */
static void forget_bytes(const open_file *f) {
    struct stat s;
    if (!f->copy || real_fstat(f->copy, &s) != 0 || s.st_size <= f->flushed) return;
    (void)real_ftruncate(f->copy, f->flushed + (s.st_size - f->flushed) * disk.keeps / 100);
}

static void cut_power(void) {
    for (int i = 0; i < MOST_FILES; i++) forget_bytes(&disk.files[i]);
    for (int i = 0; i < disk.n_closed; i++) forget_bytes(&disk.closed[i]);
    for (int i = disk.n_renames; i-- > 0;) {
        const pending_rename *r = &disk.renames[i];
        if (!disk.keeps_renames) {
            (void)real_rename(r->to, r->from);
            if (r->replaced) (void)real_rename(r->before, r->to);
        } else if (r->replaced) (void)real_unlink(r->before);
    }
}

/* A directory was flushed: renames in it have happened. */
static void settle_renames(void) {
    for (int i = 0; i < disk.n_renames; i++)
        if (disk.renames[i].replaced) (void)real_unlink(disk.renames[i].before);
    disk.n_renames = 0;
}

/* >>counting. Returns -1 with errno if the call must fail, 1 if it must be short, else 0. */
static int can_fail(call_kind kind) {
    if (disk.error == ENOSPC) return kind == MAKES || kind == WRITES || kind == FLUSHES;
    if (disk.error == EROFS)
        return kind == MAKES || kind == WRITES || kind == RENAMES || kind == REMOVES || kind == CUTS;
    if (disk.is_short) return kind == READS || kind == WRITES;
    return 1;
}

static int count_call(call_kind kind) {
    disk.n_calls++;
    if (disk.log >= 0) {
        (void)!real_write(disk.log, kind_names[kind], strlen(kind_names[kind]));
        (void)!real_write(disk.log, "\n", 1);
    }
    if (!disk.at || disk.n_calls < disk.at || (disk.n_calls > disk.at && !disk.is_sticky) || !can_fail(kind))
        return 0;
    if (disk.is_cut) cut_power();
    if (disk.is_cut || disk.is_killed) (void)raise(SIGKILL);
    if (disk.is_short) return 1;
    errno = disk.error;
    return disk.error ? -1 : 0;
}

static size_t half_of(size_t n) { return n > 1 ? n / 2 : n; }

/* >>calls on descriptors */
static int note_open(int fd, int flags) {
    struct stat s;
    if (fd < 0 || fd >= MOST_FILES) return fd;
    memset(&disk.files[fd], 0, sizeof disk.files[fd]);
    disk.files[fd].is_ours = 1;
    if (real_fstat(fd, &s) != 0) return fd;
    disk.files[fd].is_directory = S_ISDIR(s.st_mode);
    disk.files[fd].inode = s.st_ino;
    disk.files[fd].flushed = s.st_size; /* 0 after O_TRUNC */
    if (disk.is_cut && (flags & O_ACCMODE) != O_RDONLY) disk.files[fd].copy = dup(fd);
    return fd;
}

static int open_counted(const char *path, int flags, mode_t mode) {
    if (!is_under(path)) return real_open(path, flags, mode);
    if (count_call((flags & O_ACCMODE) == O_RDONLY ? OPENS : MAKES) < 0) return -1;
    return note_open(real_open(path, flags, mode), flags);
}

static mode_t mode_of(int flags, va_list args) { return flags & O_CREAT ? (mode_t)va_arg(args, int) : 0; }

int open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    const mode_t mode = mode_of(flags, args);
    va_end(args);
    return open_counted(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    const mode_t mode = mode_of(flags, args);
    va_end(args);
    return open_counted(path, flags, mode);
}

ssize_t read(int fd, void *to, size_t n) {
    const int how = is_ours(fd) ? count_call(READS) : 0;
    return how < 0 ? -1 : real_read(fd, to, how ? half_of(n) : n);
}

ssize_t write(int fd, const void *from, size_t n) {
    const int how = is_ours(fd) ? count_call(WRITES) : 0;
    return how < 0 ? -1 : real_write(fd, from, how ? half_of(n) : n);
}

/* A short one writes half of the first part. */
ssize_t writev(int fd, const struct iovec *parts, int n) {
    const int how = is_ours(fd) ? count_call(WRITES) : 0;
    if (how < 0) return -1;
    return how ? real_write(fd, parts[0].iov_base, half_of(parts[0].iov_len)) : real_writev(fd, parts, n);
}

ssize_t pread64(int fd, void *to, size_t n, off64_t at) {
    const int how = is_ours(fd) ? count_call(READS) : 0;
    return how < 0 ? -1 : real_pread(fd, to, how ? half_of(n) : n, at);
}

ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) {
    const int how = is_ours(fd) ? count_call(WRITES) : 0;
    return how < 0 ? -1 : real_pwrite(fd, from, how ? half_of(n) : n, at);
}

ssize_t pread(int fd, void *to, size_t n, off_t at) { return pread64(fd, to, n, at); }
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) { return pwrite64(fd, from, n, at); }

int fsync(int fd) {
    struct stat s;
    if (!is_ours(fd)) return real_fsync(fd);
    if (count_call(FLUSHES) < 0) return -1;
    if (disk.files[fd].is_directory) settle_renames();
    else if (real_fstat(fd, &s) == 0) {
        disk.files[fd].flushed = s.st_size;
        for (int i = 0; i < MOST_FILES; i++) /* other descriptors of the file */
            if (disk.files[i].inode == s.st_ino) disk.files[i].flushed = s.st_size;
        for (int i = 0; i < disk.n_closed; i++)
            if (disk.closed[i].inode == s.st_ino) disk.closed[i].flushed = s.st_size;
    }
    return 0; /* the test needs no real flush */
}

int fdatasync(int fd) { return fsync(fd); }

/* A descriptor is free also after an error, as on Linux. */
int close(int fd) {
    if (!is_ours(fd)) return real_close(fd);
    const int how = count_call(CLOSES), error = errno;
    disk.files[fd].is_ours = 0;
    if (disk.files[fd].copy && disk.n_closed < MOST_FILES) disk.closed[disk.n_closed++] = disk.files[fd];
    disk.files[fd].copy = 0;
    disk.files[fd].stream = NULL;
    const int result = real_close(fd);
    if (how < 0) errno = error;
    return how < 0 ? -1 : result;
}

int ftruncate64(int fd, off64_t size) {
    if (is_ours(fd) && count_call(CUTS) < 0) return -1;
    return real_ftruncate(fd, size);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int fstat(int fd, struct stat *s) {
    if (is_ours(fd) && count_call(MEASURES) < 0) return -1;
    return real_fstat(fd, s);
}

void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
    if (is_ours(fd) && count_call(MAPS) < 0) return MAP_FAILED;
    return real_mmap(at, n, protection, flags, fd, offset);
}

/* >>calls on paths */
int rename(const char *from, const char *to) {
    if (!is_under(to)) return real_rename(from, to);
    if (count_call(RENAMES) < 0) return -1;
    if (disk.is_cut && disk.n_renames < MOST_RENAMES) {
        pending_rename *r = &disk.renames[disk.n_renames];
        (void)snprintf(r->from, sizeof r->from, "%s", from);
        (void)snprintf(r->to, sizeof r->to, "%s", to);
        (void)snprintf(r->before, sizeof r->before, "%s.before%d", to, disk.n_renames);
        r->replaced = link(to, r->before) == 0;
        if (real_rename(from, to) != 0) return -1;
        disk.n_renames++;
        return 0;
    }
    return real_rename(from, to);
}

int unlink(const char *path) {
    if (is_under(path) && count_call(REMOVES) < 0) return -1;
    return real_unlink(path);
}

int remove(const char *path) { return unlink(path); }

/* >>stdio */
static int fd_of(void *cookie) { return (int)(size_t)cookie; }

static ssize_t read_stream(void *cookie, char *to, size_t n) { return read(fd_of(cookie), to, n); }

static ssize_t write_stream(void *cookie, const char *from, size_t n) {
    size_t done = 0;
    while (done < n) {
        const ssize_t k = write(fd_of(cookie), from + done, n - done);
        if (k <= 0) break;
        done += (size_t)k;
    }
    return (ssize_t)done;
}

static int seek_stream(void *cookie, off64_t *at, int whence) {
    const off64_t found = lseek64(fd_of(cookie), *at, whence);
    if (found < 0) return -1;
    *at = found;
    return 0;
}

static int close_stream(void *cookie) { return close(fd_of(cookie)); }

FILE *fopen(const char *path, const char *mode) {
    static const cookie_io_functions_t functions = {read_stream, write_stream, seek_stream, close_stream};
    const int flags = *mode == 'r'   ? O_RDONLY
                      : *mode == 'w' ? O_WRONLY | O_CREAT | O_TRUNC
                                     : O_WRONLY | O_CREAT | O_APPEND;
    if (!is_under(path) || strchr(mode, '+')) return real_fopen(path, mode);
    const int fd = open_counted(path, flags, 0666);
    if (fd < 0) return NULL;
    FILE *f = fopencookie((void *)(size_t)fd, mode, functions);
    if (fd < MOST_FILES) disk.files[fd].stream = f;
    return f;
}

FILE *fopen64(const char *path, const char *mode) { return fopen(path, mode); }

int fileno(FILE *f) {
    for (int i = 0; i < MOST_FILES; i++)
        if (disk.files[i].is_ours && disk.files[i].stream == f) return i;
    return real_fileno(f);
}
