/*
 * stores.c - measures the stores of examples/store_lmdb.c and store_valkey.c under load: many processes ask for
 * prefixes, some more often than others, and put what they miss. POSIX; <lmdb.h> or <hiredis/hiredis.h>.
 *
 * cc -O2 -DSTORE_IS_lmdb bench/stores.c examples/tieredkv.c -o stores_lmdb -llmdb -lm && ./stores_lmdb --store build/load
 * cc -O2 -DSTORE_IS_valkey bench/stores.c examples/tieredkv.c -o stores_valkey -lhiredis -lm && ./stores_valkey --port 6379
 *
 *   --clients 64       processes
 *   --prefixes 10000   different prefixes, of 1 to 8 pages; prefix i is asked for in proportion to 1 / i
 *   --page 114000      bytes of a page, which are random
 *   --seconds 60
 *   --pause 0          milliseconds of a client between two gets
 *   and the options of the store
 *
 * A value begins with the hash of its page, and ends with a checksum. A client checks both: a wrong value is counted,
 * and the program ends with status 1. hit: pages that a get found, of those that it asked for.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#endif
#define main store_main /* the store's program is a part of this one */
#if defined(STORE_IS_lmdb)
#include "../examples/store_lmdb.c"
typedef lmdb_store any_store;
#elif defined(STORE_IS_valkey)
#include "../examples/store_valkey.c"
typedef valkey_store any_store;
#else
#error "compile with -DSTORE_IS_lmdb or -DSTORE_IS_valkey"
#endif
#undef main

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGES = 8, BUCKETS = 64 };

typedef struct load_counts { /* of one client, in shared memory */
    double asked, found, put, put_failed, wrong, bytes_in, bytes_out, gets;
    double bucket[BUCKETS]; /* gets by time: bucket i ends at 20 us * 1.25^i */
    double worst;
} load_counts;

typedef struct load {
    any_store store;
    int clients, prefixes, page, seconds, pause;
} load_run;

static uint64_t next_random(uint64_t *rng) {
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    *rng ^= *rng << 17;
    return *rng;
}

static tkv_prefix_hash hash_of_page(int prefix, int page) {
    tkv_prefix_hash h;
    uint64_t rng = (uint64_t)(prefix + 1) * 0x9e3779b97f4a7c15u + (uint64_t)page;
    for (int i = 0; i < 32; i++) h.bytes[i] = (unsigned char)(next_random(&rng) >> 32 & 255);
    return h;
}

static uint64_t sum_of(const unsigned char *p, size_t n) {
    uint64_t h = 0xcbf29ce484222325u, word;
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&word, p, 8);
        h = (h ^ word) * 0x100000001b3u;
    }
    return h;
}

static void add_time(load_counts *c, double s) {
    int i = 0;
    for (double end = 20e-6; s > end && i < BUCKETS - 1; i++) end *= 1.25;
    c->bucket[i]++;
    if (s > c->worst) c->worst = s;
}

static double percentile(const load_counts *c, double share) {
    double n = 0, end = 20e-6;
    for (int i = 0; i < BUCKETS; i++, end *= 1.25) {
        n += c->bucket[i];
        if (n >= share * c->gets) return end;
    }
    return c->worst;
}

/* Chooses a prefix in proportion to 1 / (i + 1). sums: of these, up to each prefix. */
static int choose_prefix(const double *sums, int n, uint64_t *rng) {
    const double x = (double)(next_random(rng) >> 11) / 9007199254740992.0 * sums[n - 1];
    int low = 0, high = n - 1;
    while (low < high) {
        const int mid = (low + high) / 2;
        if (sums[mid] < x) low = mid + 1;
        else high = mid;
    }
    return low;
}

static void run_client(load_run *r, const tkv_prefix_store *store, const double *sums, int client,
                       load_counts *c) {
    uint64_t rng = 0x2545f4914f6cdd1du * (uint64_t)(client + 1);
    const size_t size = (size_t)r->page / 8 * 8;
    unsigned char *value = (unsigned char *)allocate(size, 1);
    const double end = latency_now() + r->seconds;
    for (size_t i = 0; i < size; i++) value[i] = (unsigned char)(next_random(&rng) >> 40 & 255);
    const struct timespec pause = {r->pause / 1000, 1000000L * (r->pause % 1000)};
    while (latency_now() < end) {
        if (r->pause) nanosleep(&pause, NULL);
        const int prefix = choose_prefix(sums, r->prefixes, &rng), n = 1 + prefix % PAGES;
        tkv_prefix_hash hash[PAGES];
        const void *bytes[PAGES];
        size_t sizes[PAGES];
        for (int i = 0; i < n; i++) hash[i] = hash_of_page(prefix, i);
        const double start = latency_now();
        const int found = store->get(store->user, hash, n, bytes, sizes);
        add_time(c, latency_now() - start);
        c->gets++;
        c->asked += n;
        c->found += found;
        for (int i = 0; i < found; i++) {
            const unsigned char *p = (const unsigned char *)bytes[i];
            uint64_t sum = 0;
            c->bytes_in += (double)sizes[i];
            if (sizes[i] == size) memcpy(&sum, p + size - 8, 8);
            c->wrong +=
                sizes[i] != size || memcmp(p, &hash[i], sizeof *hash) != 0 || sum != sum_of(p, size - 8);
        }
        for (int i = found; i < n; i++) {
            memcpy(value, &hash[i], sizeof *hash);
            const uint64_t sum = sum_of(value, size - 8);
            memcpy(value + size - 8, &sum, 8);
            if (store->put(store->user, &hash[i], value, size)) {
                c->put_failed++;
                break;
            }
            c->put++;
            c->bytes_out += (double)size;
        }
    }
    free(value);
}

static parsed parse_load_option(void *ctx, const char *name, const char *value) {
    load_run *r = (load_run *)ctx;
    int ok = 1;
    if (value && strcmp(name, "--clients") == 0) ok = read_int(value, 1, 4096, &r->clients);
    else if (value && strcmp(name, "--prefixes") == 0) ok = read_int(value, 1, 1 << 24, &r->prefixes);
    else if (value && strcmp(name, "--page") == 0) ok = read_int(value, 64, 1 << 28, &r->page);
    else if (value && strcmp(name, "--seconds") == 0) ok = read_int(value, 1, 86400, &r->seconds);
    else if (value && strcmp(name, "--pause") == 0) ok = read_int(value, 0, 60000, &r->pause);
    else return parse_own_option(&r->store, name, value);
    return ok ? WITH_VALUE : BAD_VALUE;
}

int main(int argc, char **argv) {
    static load_run r;
    load_counts all;
    double sum = 0;
    r.clients = 64;
    r.prefixes = 10000;
    r.page = 114000;
    r.seconds = 60;
    set_defaults(&r.store);
    parse_options(argc, argv, usage, &r.store.prompt.opt, &r.store.prompt.cfg, parse_load_option, &r);
    double *sums = (double *)allocate((size_t)r.prefixes, sizeof *sums);
    for (int i = 0; i < r.prefixes; i++) sums[i] = sum += 1.0 / (i + 1);
    load_counts *counts = (load_counts *)mmap(NULL, (size_t)r.clients * sizeof *counts,
                                              PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (counts == (load_counts *)MAP_FAILED) fail("no memory for counts");
    for (int i = 0; i < r.clients; i++) {
        const pid_t child = fork();
        if (child < 0) fail("cannot start client %d", i);
        if (child) continue;
        const tkv_prefix_store store = open_store(&r.store);
        run_client(&r, &store, sums, i, &counts[i]);
        close_store(&r.store);
        _exit(0);
    }
    for (int i = 0, status; i < r.clients; i++)
        if (wait(&status) < 0 || status) fail("a client failed");
    memset(&all, 0, sizeof all);
    for (int i = 0; i < r.clients; i++) {
        const load_counts *c = &counts[i];
        all.asked += c->asked, all.found += c->found, all.put += c->put, all.put_failed += c->put_failed;
        all.wrong += c->wrong, all.bytes_in += c->bytes_in, all.bytes_out += c->bytes_out,
            all.gets += c->gets;
        for (int k = 0; k < BUCKETS; k++) all.bucket[k] += c->bucket[k];
        if (c->worst > all.worst) all.worst = c->worst;
    }
    printf("clients %d, prefixes %d, %d s: %.0f gets, hit %.1f %%, %.0f MB in, %.0f put (%.0f MB), %.0f not "
           "taken, %.0f wrong\n",
           r.clients, r.prefixes, r.seconds, all.gets, 100 * all.found / (all.asked > 0 ? all.asked : 1),
           1e-6 * all.bytes_in, all.put, 1e-6 * all.bytes_out, all.put_failed, all.wrong);
    printf("get: P50 %.2f, P95 %.2f, P99 %.2f, worst %.2f ms\n", 1e3 * percentile(&all, .5),
           1e3 * percentile(&all, .95), 1e3 * percentile(&all, .99), 1e3 * all.worst);
    free(sums);
    return all.wrong > 0;
}
