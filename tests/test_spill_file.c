/*
 * test_spill_file.c - the file store of examples/spill_file.h: offsets beyond 4 GiB, parallel reads by threads, the
 * end of the file, errors, and access by other programs. It runs on POSIX and on Windows.
 */
#if defined(_WIN32) || defined(__unix__) || defined(__APPLE__)
#include "../examples/spill_file.h" /* before system headers */
#define HAVE_FILES 1
#else
#define HAVE_FILES 0
#endif
#include "../tieredkv.h"
#include "tkv_test.h"

#if HAVE_FILES
#ifndef _WIN32
#include <pthread.h>
#endif

enum { SLOT_BYTES = 1 << 20, PIECE_BYTES = 5000, THREADS = 4, KEYS = 8, ROUNDS = 200 };

/* >>helpers */
static void fill_piece(unsigned char *piece, uint32_t key) {
    int i;
    for (i = 0; i < PIECE_BYTES; i++) piece[i] = (unsigned char)(key * 31u + (uint32_t)i * 7u + 1u);
}

static int write_piece(spill_file *f, uint32_t key, size_t offset) {
    unsigned char piece[PIECE_BYTES];
    fill_piece(piece, key);
    return spill_file_store(f, key, offset, piece, sizeof piece);
}

/* True if the file returns the piece of that key. */
static int read_piece(spill_file *f, uint32_t key, size_t offset) {
    unsigned char piece[PIECE_BYTES], expected[PIECE_BYTES];
    memset(piece, 0, sizeof piece);
    fill_piece(expected, key);
    return spill_file_fetch(f, key, offset, piece, sizeof piece) == 0 &&
           memcmp(piece, expected, PIECE_BYTES) == 0;
}

static int is_inherited(const spill_file *f) {
#ifdef _WIN32
    DWORD flags = HANDLE_FLAG_INHERIT;
    return !GetHandleInformation(f->handle, &flags) || (flags & HANDLE_FLAG_INHERIT);
#else
    return !(fcntl(f->fd, F_GETFD) & FD_CLOEXEC);
#endif
}

static int n_temporary_files(
    void) { /* files that other programs can see; 0 on POSIX, where the file has no name */
    int n = 0;
#ifdef _WIN32
    wchar_t pattern[MAX_PATH + 16];
    WIN32_FIND_DATAW found;
    const DWORD length = GetTempPathW(MAX_PATH, pattern);
    HANDLE search;
    memcpy(pattern + length, L"tkv*.tmp", sizeof L"tkv*.tmp");
    search = FindFirstFileW(pattern, &found);
    if (search == INVALID_HANDLE_VALUE) return 0;
    do n++;
    while (FindNextFileW(search, &found));
    (void)FindClose(search);
#endif
    return n;
}

/* Writes a path in the directory of temporary files. The name contains the process number. */
static void name_file(char *name, size_t size, const char *suffix) {
#ifdef _WIN32
    char dir[MAX_PATH + 1];
    if (!GetTempPathA(sizeof dir, dir)) dir[0] = 0;
    (void)snprintf(name, size, "%stest_spill_file_%lu%s", dir, (unsigned long)GetCurrentProcessId(), suffix);
#else
    const char *dir = getenv("TMPDIR");
    (void)snprintf(name, size, "%s/test_spill_file_%ld%s", dir && *dir ? dir : "/tmp", (long)getpid(),
                   suffix);
#endif
}

typedef struct reader {
    spill_file *file;
    uint32_t first;
    int n_wrong;
} reader;

static void read_pieces(reader *r) {
    int i;
    for (i = 0; i < ROUNDS; i++)
        r->n_wrong += !read_piece(r->file, (r->first + (uint32_t)i * 3u) % KEYS, 100);
}

#ifdef _WIN32
typedef HANDLE thread;

static DWORD WINAPI run_reader(LPVOID user) {
    read_pieces((reader *)user);
    return 0;
}

static int start_thread(thread *t, reader *r) {
    *t = CreateThread(NULL, 0, run_reader, r, 0, NULL);
    return *t != NULL;
}

static void join_thread(thread t) {
    (void)WaitForSingleObject(t, 60000);
    (void)CloseHandle(t);
}
#else
typedef pthread_t thread;

static void *run_reader(void *user) {
    read_pieces((reader *)user);
    return NULL;
}

static int start_thread(thread *t, reader *r) { return pthread_create(t, NULL, run_reader, r) == 0; }

static void join_thread(thread t) { (void)pthread_join(t, NULL); }
#endif

/* >>tests */
TEST(slots_beyond_4_gib) {
    const uint32_t last = 5000; /* key; the offset is key * 1 MiB */
    spill_file f;
    REQUIRE(spill_file_open(&f, NULL, SLOT_BYTES - 1) == 0);
    CHECK_EQ(f.bytes, SLOT_BYTES); /* whole pages */
    CHECK_EQ(write_piece(&f, 0, 0), 0);
    CHECK_EQ(write_piece(&f, last - 4096, 0), 0); /* the same low 32 bits as the last one */
    CHECK_EQ(write_piece(&f, last, 0), 0);
    CHECK_EQ(write_piece(&f, last, 77777), 0);
    CHECK(read_piece(&f, 0, 0));
    CHECK(read_piece(&f, last - 4096, 0));
    CHECK(read_piece(&f, last, 0));
    CHECK(read_piece(&f, last, 77777));
    spill_file_ahead(&f, last, 0, PIECE_BYTES);
    CHECK_MSG(spill_file_size(&f) < 1e9, "%.0f bytes on the disk", spill_file_size(&f));
    CHECK(!read_piece(&f, last, 77778)); /* other bytes, and beyond the end */
    spill_file_close(&f);
}

TEST(end_of_file_and_errors) {
    unsigned char last = 0;
    spill_file f;
    errno = 0;
    CHECK_EQ(spill_file_open(&f, "/nowhere/at/all", SLOT_BYTES), -1);
    CHECK_EQ(errno, ENOENT);
    REQUIRE(spill_file_open(&f, NULL, SLOT_BYTES) == 0);
    CHECK_EQ(spill_file_fetch(&f, 0, 0, &last, 1), -1); /* the file is empty */
    CHECK_EQ(write_piece(&f, 0, 0), 0);
    CHECK_EQ(spill_file_fetch(&f, 0, PIECE_BYTES - 1, &last, 1), 0);
    CHECK_EQ(spill_file_fetch(&f, 0, PIECE_BYTES, &last, 1), -1);
    CHECK_EQ(spill_file_fetch(&f, 3, 0, &last, 1), -1);
    CHECK_EQ(spill_file_fetch(&f, 3, 0, &last, 0), 0); /* reads of 0 bytes succeed */
    spill_file_close(&f);
}

TEST(threads_read_side_by_side) {
    reader readers[THREADS];
    thread threads[THREADS];
    spill_file f;
    uint32_t key;
    int i, started = 0;
    REQUIRE(spill_file_open(&f, NULL, SLOT_BYTES) == 0);
    for (key = 0; key < KEYS; key++) CHECK_EQ(write_piece(&f, key, 100), 0);
    for (i = 0; i < THREADS; i++) {
        readers[i].file = &f;
        readers[i].first = (uint32_t)i;
        readers[i].n_wrong = 0;
        if (!start_thread(&threads[i], &readers[i])) break;
        started++;
    }
    CHECK_EQ(started, THREADS);
    for (i = 0; i < started; i++) {
        join_thread(threads[i]);
        CHECK_EQ(readers[i].n_wrong, 0);
    }
    spill_file_close(&f);
}

TEST(other_programs_cannot_open_it) {
    const int before = n_temporary_files();
    char name[512];
    spill_file f;
    REQUIRE(spill_file_open(&f, NULL, SLOT_BYTES) == 0);
    CHECK(!is_inherited(&f));
    spill_file_close(&f);
    CHECK_EQ(n_temporary_files(), before); /* closing removed the file */
    name_file(name, sizeof name, "");
    REQUIRE(spill_file_open(&f, name, SLOT_BYTES) == 0);
    CHECK(!is_inherited(&f));
    spill_file_close(&f);
    CHECK_EQ(remove(name), 0); /* a file opened by name stays after closing */
}

TEST(open_empties_the_file_and_refuses_links) {
    unsigned char last = 0;
    char name[512];
    spill_file f;
    name_file(name, sizeof name, "");
    REQUIRE(spill_file_open(&f, name, SLOT_BYTES) == 0);
    CHECK_EQ(write_piece(&f, 1, 0), 0);
    spill_file_close(&f);
    REQUIRE(spill_file_open(&f, name, SLOT_BYTES) == 0);
    CHECK_EQ(spill_file_fetch(&f, 1, 0, &last, 1), -1);
    CHECK_EQ(write_piece(&f, 0, 0), 0);
    spill_file_close(&f);
#ifndef _WIN32
    {
        char link[512];
        struct stat s;
        name_file(link, sizeof link, "_link");
        REQUIRE(symlink(name, link) == 0);
        errno = 0;
        CHECK_EQ(spill_file_open(&f, link, SLOT_BYTES), -1);
        CHECK_EQ(errno, ELOOP);
        CHECK(stat(name, &s) == 0 && s.st_size == PIECE_BYTES); /* the target of the link is unchanged */
        CHECK_EQ(unlink(link), 0);
    }
#endif
    CHECK_EQ(remove(name), 0);
}
#endif

int main(int argc, char **argv) {
    tkv_test_begin(argc, argv);
#if HAVE_FILES
    RUN(slots_beyond_4_gib);
    RUN(end_of_file_and_errors);
    RUN(threads_read_side_by_side);
    RUN(other_programs_cannot_open_it);
    RUN(open_empties_the_file_and_refuses_links);
#endif
    return tkv_test_end();
}
