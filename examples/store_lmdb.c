/*
 * store_lmdb.c - programs on one machine share what they have read of a prompt, in a database of LMDB.
 *
 * cc -O2 examples/store_lmdb.c examples/tieredkv.c -o store_lmdb -llmdb -lm && ./store_lmdb --store build/prefixes
 *
 * The second program that reads a prompt finds its pages in the database, and begins to write in a fraction of the
 * time. Any number of programs may read and write at once. A killed program leaves a whole database.
 * Above --limit the values that were used longest ago go. Whatever fails is a miss, and the prompt is read. The first
 * failure of the database is printed, so that it does not look like an empty store.
 *
 *     pages    hash -> value
 *     last     hash -> number of its last use (8 bytes, big-endian)
 *     uses     number of a last use -> hash
 *     counts   "use" -> the last number given out, "bytes" -> bytes of all values
 *
 * A get writes only if the last use of a value is 256 uses ago or more, so the order of use is not exact.
 *
 * It needs POSIX, and liblmdb. `./store_lmdb --help` lists the options. In this order: numbers, get, put, main.
 */
#define PROGRAM "store_lmdb"
#include "shared_prompt.h" /* before system headers */

#include <lmdb.h>
#include <sys/stat.h>

enum { USE = 8, HASH = sizeof(tkv_prefix_hash), LIMIT_MIB = 256, OLD_USE = 256 };

static const char usage[] = "store_lmdb [MODEL] [options]\n"
                            "Without MODEL, the model is examples/data/demo.gguf.\n" SHARED_PROMPT_HELP
                            "  --store DIR        folder of the database, which is made (prefixes)\n"
                            "  --limit N          MiB of values; those used longest ago go (256)\n"
                            "\n"
                            "The plan of the cache:\n";

typedef struct lmdb_store {
    shared_prompt prompt;
    MDB_env *env;
    MDB_dbi pages, last, uses, counts;
    MDB_txn *reader; /* open while values of the last get are valid */
    const char *path;
    int limit;     /* MiB */
    int is_failed; /* 1: a failure was printed */
} lmdb_store;

/* >>numbers */
static void write_number(unsigned char *at, uint64_t x) {
    for (int i = 0; i < 8; i++) at[i] = (unsigned char)(x >> (56 - 8 * i) & 255);
}

static uint64_t read_number(const void *from) {
    const unsigned char *at = (const unsigned char *)from;
    uint64_t x = 0;
    for (int i = 0; i < 8; i++) x = x << 8 | at[i];
    return x;
}

static MDB_val val(const void *bytes, size_t n) {
    MDB_val v;
    v.mv_size = n;
    v.mv_data = (void *)(uintptr_t)bytes;
    return v;
}

static uint64_t get_count(const lmdb_store *s, MDB_txn *txn, const char *name) {
    MDB_val key = val(name, strlen(name)), v;
    return mdb_get(txn, s->counts, &key, &v) == 0 && v.mv_size == 8 ? read_number(v.mv_data) : 0;
}

static int put_count(const lmdb_store *s, MDB_txn *txn, const char *name, uint64_t x) {
    unsigned char at[8];
    write_number(at, x);
    MDB_val key = val(name, strlen(name)), v = val(at, sizeof at);
    return mdb_put(txn, s->counts, &key, &v, 0);
}

/* Gives a hash the next number of use, in the place of its last one. */
static int use_hash(const lmdb_store *s, MDB_txn *txn, const tkv_prefix_hash *hash) {
    const uint64_t use = get_count(s, txn, "use") + 1;
    unsigned char number[USE], before[USE];
    MDB_val key = val(hash, HASH), old;
    int failed = mdb_get(txn, s->last, &key, &old);
    if (!failed && old.mv_size == USE) {
        memcpy(before, old.mv_data, USE);
        old = val(before, USE);
        failed = mdb_del(txn, s->uses, &old, NULL);
    }
    if (failed && failed != MDB_NOTFOUND) return failed;
    write_number(number, use);
    MDB_val v = val(number, USE), hashed = val(hash, HASH);
    failed = put_count(s, txn, "use", use);
    if (!failed) failed = mdb_put(txn, s->last, &key, &v, 0);
    return failed ? failed : mdb_put(txn, s->uses, &v, &hashed, 0);
}

/* >>get */
/* Prints the first failure. Returns 1 if the call has failed. */
static int is_failure(lmdb_store *s, int failed) {
    if (!failed || failed == MDB_NOTFOUND || failed == MDB_KEYEXIST) return 0;
    if (!s->is_failed) fprintf(stderr, PROGRAM ": the store %s fails: %s\n", s->path, mdb_strerror(failed));
    s->is_failed = 1;
    return 1;
}

static void end_reading(lmdb_store *s) {
    if (s->reader) mdb_txn_abort(s->reader);
    s->reader = NULL;
}

/* Marks a value as used now. A failure only makes it look older. */
static void mark_used(const lmdb_store *s, const tkv_prefix_hash *hash) {
    MDB_val key = val(hash, HASH), v;
    MDB_txn *txn;
    if (mdb_txn_begin(s->env, NULL, 0, &txn)) return;
    /* another program may have removed it meanwhile */
    if (mdb_get(txn, s->pages, &key, &v) || use_hash(s, txn, hash)) mdb_txn_abort(txn);
    else (void)mdb_txn_commit(txn);
}

static int is_old(const lmdb_store *s, MDB_txn *txn, const tkv_prefix_hash *hash) {
    MDB_val key = val(hash, HASH), v;
    return mdb_get(txn, s->last, &key, &v) == 0 && v.mv_size == USE &&
           get_count(s, txn, "use") - read_number(v.mv_data) >= OLD_USE;
}

static int store_get(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes, size_t *sizes) {
    lmdb_store *s = (lmdb_store *)user;
    int found = 0, is_any_old = 0;
    end_reading(s);
    if (is_failure(s, mdb_txn_begin(s->env, NULL, MDB_RDONLY, &s->reader))) return 0;
    for (; found < n; found++) {
        MDB_val key = val(&hashes[found], HASH), v;
        const int failed = mdb_get(s->reader, s->pages, &key, &v);
        if (is_failure(s, failed) || failed) break;
        bytes[found] = v.mv_data;
        sizes[found] = v.mv_size;
        is_any_old |= is_old(s, s->reader, &hashes[found]);
    }
    for (int i = 0; i < found && is_any_old; i++)
        if (is_old(s, s->reader, &hashes[i])) mark_used(s, &hashes[i]);
    return found;
}

static int store_has(void *user, const tkv_prefix_hash *hash) {
    lmdb_store *s = (lmdb_store *)user;
    MDB_val key = val(hash, HASH), v;
    MDB_txn *txn;
    end_reading(s);
    if (is_failure(s, mdb_txn_begin(s->env, NULL, MDB_RDONLY, &txn))) return 0;
    const int found = mdb_get(txn, s->pages, &key, &v) == 0;
    mdb_txn_abort(txn);
    return found;
}

/* >>put */
/* Removes the value that was used longest ago. *bytes: of all values. */
static int remove_oldest(const lmdb_store *s, MDB_txn *txn, uint64_t *bytes) {
    MDB_cursor *cursor;
    MDB_val use, hash, v;
    unsigned char copy[HASH]; /* what LMDB gives is valid until the next change */
    int failed = mdb_cursor_open(txn, s->uses, &cursor);
    if (failed) return failed;
    failed = mdb_cursor_get(cursor, &use, &hash, MDB_FIRST);
    if (!failed && hash.mv_size != HASH) failed = MDB_CORRUPTED;
    if (!failed) memcpy(copy, hash.mv_data, HASH);
    hash = val(copy, HASH);
    if (!failed) failed = mdb_get(txn, s->pages, &hash, &v);
    if (!failed) {
        *bytes -= v.mv_size < *bytes ? v.mv_size : *bytes;
        failed = mdb_del(txn, s->pages, &hash, NULL);
    }
    if (!failed) failed = mdb_del(txn, s->last, &hash, NULL);
    if (!failed) failed = mdb_cursor_del(cursor, 0);
    mdb_cursor_close(cursor);
    return failed;
}

static int store_put(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
    lmdb_store *s = (lmdb_store *)user;
    const uint64_t limit = (uint64_t)s->limit << 20;
    MDB_val key = val(hash, HASH), v = val(bytes, size), old;
    MDB_txn *txn;
    end_reading(s);
    if (size > limit || is_failure(s, mdb_txn_begin(s->env, NULL, 0, &txn))) return 1;
    uint64_t all = get_count(s, txn, "bytes");
    if (s->prompt.replaces && mdb_get(txn, s->pages, &key, &old) == 0)
        all -= old.mv_size < all ? old.mv_size : all;
    int failed = mdb_put(txn, s->pages, &key, &v, s->prompt.replaces ? 0 : MDB_NOOVERWRITE);
    if (!failed) failed = use_hash(s, txn, hash);
    for (all += size; !failed && all > limit;) failed = remove_oldest(s, txn, &all);
    if (!failed) failed = put_count(s, txn, "bytes", all);
    if (failed) mdb_txn_abort(txn);
    else failed = mdb_txn_commit(txn);
    return is_failure(s, failed) || (failed != 0 && failed != MDB_KEYEXIST);
}

/* >>main */
static void set_defaults(lmdb_store *s) {
    s->path = "prefixes";
    s->limit = LIMIT_MIB;
}

static tkv_prefix_store open_store(lmdb_store *s) {
    const tkv_prefix_store store = {s, store_get, store_put, store_has};
    MDB_txn *txn = NULL;
    int failed;
    if (mkdir(s->path, 0700) && errno != EEXIST) fail("cannot make %s: %s", s->path, strerror(errno));
    failed = mdb_env_create(&s->env);
    if (!failed) failed = mdb_env_set_maxdbs(s->env, 4);
    /* twice the limit: LMDB writes a page of the database anew before it frees the old one */
    if (!failed) failed = mdb_env_set_mapsize(s->env, ((size_t)s->limit << 21) + (1 << 22));
    if (!failed) failed = mdb_env_open(s->env, s->path, 0, 0600);
    if (!failed) failed = mdb_txn_begin(s->env, NULL, 0, &txn);
    if (!failed) failed = mdb_dbi_open(txn, "pages", MDB_CREATE, &s->pages);
    if (!failed) failed = mdb_dbi_open(txn, "last", MDB_CREATE, &s->last);
    if (!failed) failed = mdb_dbi_open(txn, "uses", MDB_CREATE, &s->uses);
    if (!failed) failed = mdb_dbi_open(txn, "counts", MDB_CREATE, &s->counts);
    if (!failed) failed = mdb_txn_commit(txn);
    if (failed) fail("cannot open the store %s: %s", s->path, mdb_strerror(failed));
    return store;
}

static void close_store(lmdb_store *s) {
    end_reading(s);
    mdb_env_close(s->env);
}

static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    lmdb_store *s = (lmdb_store *)ctx;
    int ok = 1;
    if (value && strcmp(name, "--store") == 0) s->path = value;
    else if (value && strcmp(name, "--limit") == 0) ok = read_int(value, 1, 1 << 20, &s->limit);
    else return parse_shared_option(&s->prompt, name, value);
    return ok ? WITH_VALUE : BAD_VALUE;
}

int main(int argc, char **argv) {
    static lmdb_store s;
    set_defaults(&s);
    begin_shared_prompt(&s.prompt, argc, argv, usage, parse_own_option, &s);
    s.prompt.store = open_store(&s);
    run_shared_prompt(&s.prompt);
    close_store(&s);
    end_shared_prompt(&s.prompt);
    return 0;
}
