/*
 * store_valkey.c - programs on many machines share what they have read of a prompt, in a server of Valkey or Redis.
 *
 * cc -O2 examples/store_valkey.c examples/tieredkv.c -o store_valkey -lhiredis -lm && ./store_valkey --host 127.0.0.1
 *
 * One command asks for 8 pages (MGET). A value is set once (SET NX) and expires --ttl seconds later. The prompt never
 * waits long for the server: a call has 20 ms, and a millisecond more for each 50 KB that came. After a failure the
 * program leaves the server alone for a second, then for two, up to 30. Whatever fails is a miss: the prompt is read.
 *
 * What the server refuses (a missing password, a right that the user lacks, memory that is full) is counted and printed
 * once, in the server's words. A key that holds no string counts as a refused value, and is replaced. The user needs
 * the commands MGET and STRLEN, and SET to publish.
 *
 * A server is not trusted. A list or a value (--most) that is longer than asked fails before memory is taken for it,
 * and a call ends after 8 * --most bytes. The values are verified (tkv_seq_adopt_prefix). But their checksums can be
 * computed by anyone: give the server a password, and no stranger the right to write.
 *
 * The password is in the environment: TKV_STORE_PASSWORD, with --user NAME for a user of the server's ACL. TLS (--tls)
 * needs hiredis 1.0 or later and more words for the compiler (hiredis_any.h). Else use --socket PATH on one machine, or
 * a tunnel. It needs POSIX and hiredis 0.14 or later. Give an address as --host: looking up a name has no timeout.
 * `./store_valkey --help` lists the options. In this order: connection, commands, the store, metrics, main.
 */
#define PROGRAM "store_valkey"
#include "shared_prompt.h" /* before system headers */
#include "hiredis_any.h"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <poll.h>
#include <signal.h>
#include <sys/time.h>

enum { MOST_KEYS = 8, KEY = 72, LINE = 4096, TIMES = 1024 };
static const double bytes_per_second = 50e6, first_pause = 1, longest_pause = 30;

static const char usage[] = "store_valkey [MODEL] [options]\n"
                            "Without MODEL, the model is examples/data/demo.gguf.\n" SHARED_PROMPT_HELP
                            "  --host NAME        the server (127.0.0.1)\n"
                            "  --port N           its port (6379)\n"
                            "  --socket PATH      its unix socket, in the place of host and port\n" TLS_HELP
                            "  --user NAME        user of the server; the password is in TKV_STORE_PASSWORD\n"
                            "  --ttl N            seconds until a value expires (86400)\n"
                            "  --timeout N        milliseconds that a call may take (20)\n"
                            "  --most N           MiB of the largest value (16)\n"
                            "  --metrics FILE     writes counts and latencies as Prometheus text\n"
                            "\n"
                            "The plan of the cache:\n";

typedef struct valkey_store {
    shared_prompt prompt;
    const char *host, *socket, *user, *password, *metrics;
    int port, ttl, timeout, most; /* milliseconds; MiB */
    tls_link tls;
    redisContext *server; /* NULL: not connected */
    int is_shaking;       /* the handshake of TLS may not have ended */
    redisReply *values;   /* of the last get; they are valid until the next call */
    redisReplyObjectFunctions bounded;
    double closed_until, pause; /* the circuit breaker: no call before this time */
    int n_hits, n_misses, n_faults, n_skipped, n_denied, n_times;
    int is_too_long;            /* the last reply had a value of more than --most */
    char told[16];              /* the first word of the server's error that was printed last */
    double bytes, times[TIMES]; /* seconds of the first calls */
} valkey_store;

/* >>connection */
static void leave_alone(valkey_store *s) {
    if (s->server) redisFree(s->server);
    s->server = NULL;
    s->closed_until = latency_now() + s->pause;
    s->pause = 2 * s->pause < longest_pause ? 2 * s->pause : longest_pause;
}

/* A call has failed. The server is left alone for a while. */
static void *fault(valkey_store *s) {
    leave_alone(s);
    s->n_faults++;
    return NULL;
}

/* Refuses a list that is longer than any that was asked for, or in another, before memory is taken for it. */
static redisReplyObjectFunctions *plain_functions;
static void *create_short_list(const redisReadTask *task, list_length n) {
    return task->parent || (size_t)n > MOST_KEYS ? NULL : plain_functions->createArray(task, n);
}

/* Returns 1 if the item that is not whole yet may become whole: a value of few enough bytes, or a line. */
static int may_go_on(valkey_store *s) {
    const redisReader *r = s->server->reader;
    const long long length = reply_item(r) == REDIS_REPLY_STRING ? strtoll(r->buf + r->pos, NULL, 10) : 0;
    s->is_too_long = length > (long long)s->most << 20;
    return !s->is_too_long && (long long)(r->len - r->pos) <= length + LINE;
}

/* Waits for the socket. Returns 0 if it is not ready before the deadline. */
static int is_ready(const valkey_store *s, short events, double deadline) {
    const double left = deadline - latency_now();
    struct pollfd p;
    memset(&p, 0, sizeof p);
    p.fd = s->server->fd;
    p.events = events;
    return left > 0 && poll(&p, 1, (int)(1e3 * left) + 1) > 0;
}

/* Reads a reply of at most `most` bytes before the deadline. NULL: the call has failed. */
static redisReply *read_reply(valkey_store *s, double deadline, size_t most) {
    void *reply = NULL;
    for (size_t n = 0, came = 0; n <= most; n += came) {
        const double until = deadline + (double)n / bytes_per_second;
        if (redisGetReplyFromReader(s->server, &reply) != REDIS_OK) break;
        if (reply) return (redisReply *)reply;
        if (!may_go_on(s) || latency_now() > until) break;
        const size_t had = s->server->reader->len;
        if (redisBufferRead(s->server) != REDIS_OK) break;
        came = s->server->reader->len - had;
        if (came == 0 && !is_ready(s, POLLIN, until)) break;
    }
    return (redisReply *)fault(s);
}

/* Sends a command and reads its reply. An error of the server's is a reply too. */
static redisReply *call(valkey_store *s, int n, const char **words, const size_t *bytes, size_t most) {
    const double start = latency_now(), deadline = start + 1e-3 * s->timeout;
    int done = 0;
    if (redisAppendCommandArgv(s->server, n, words, bytes) != REDIS_OK) return (redisReply *)fault(s);
    while (!done)
        if (redisBufferWrite(s->server, &done) != REDIS_OK ||
            (!done && !is_ready(s, s->is_shaking ? POLLIN : POLLOUT, deadline)))
            return (redisReply *)fault(s);
    s->is_shaking = 0;
    redisReply *reply = read_reply(s, deadline, most);
    if (s->n_times < TIMES) s->times[s->n_times++] = latency_now() - start;
    return reply;
}

/* Counts an error that the server replied, and prints it once. Without the right to be there the server is left alone. */
static void deny(valkey_store *s, const redisReply *error) {
    char code[sizeof s->told];
    snprintf(code, sizeof code, "%.*s", (int)strcspn(error->str, " "), error->str);
    s->n_denied++;
    if (strcmp(code, s->told) != 0) {
        fprintf(stderr, PROGRAM ": the server refuses: ");
        for (int i = 0; i < 200 && error->str[i]; i++) /* no control characters of a stranger's */
            fputc(error->str[i] >= ' ' && error->str[i] < 127 ? error->str[i] : '?', stderr);
        fputc('\n', stderr);
    }
    memcpy(s->told, code, sizeof code);
    if (strcmp(code, "NOAUTH") == 0) leave_alone(s);
}

/* Connects, if there is no connection, and says who asks. Returns 0 if there is none, or must be none now. */
static int is_connected(valkey_store *s) {
    const struct timeval timeout = {s->timeout / 1000, 1000 * (s->timeout % 1000)};
    const char *words[] = {"AUTH", s->user ? s->user : s->password, s->password};
    size_t bytes[3];
    if (s->server) return 1;
    if (latency_now() < s->closed_until) {
        s->n_skipped++;
        return 0;
    }
    s->server = s->socket ? redisConnectUnixWithTimeout(s->socket, timeout)
                          : redisConnectWithTimeout(s->host, s->port, timeout);
    if (!s->server || s->server->err || fcntl(s->server->fd, F_SETFL, O_NONBLOCK) < 0)
        return fault(s) != NULL;
    s->server->flags &= ~REDIS_BLOCK; /* a call waits in is_ready only */
    s->is_shaking = s->tls.authority != NULL;
    if (s->is_shaking && !tls_begin(&s->tls, s->server, s->host)) return fault(s) != NULL;
    plain_functions = s->server->reader->fn;
    s->bounded = *plain_functions;
    s->bounded.createArray = create_short_list;
    s->server->reader->fn = &s->bounded;
    if (!s->password) return 1;
    for (int i = 0; i < 3; i++) bytes[i] = strlen(words[i]);
    redisReply *reply = call(s, s->user ? 3 : 2, words, bytes, 4096);
    const int ok = reply && reply->type == REDIS_REPLY_STATUS;
    if (reply && reply->type == REDIS_REPLY_ERROR) {
        deny(s, reply);
        if (s->server) leave_alone(s);
    } else if (reply && !ok) (void)fault(s);
    if (reply) freeReplyObject(reply);
    return ok;
}

/* >>commands */
static void write_key(char *key, const tkv_prefix_hash *hash) {
    memcpy(key, "tkv:", 4);
    for (int i = 0; i < 32; i++) snprintf(key + 4 + 2 * i, 3, "%02x", (unsigned)hash->bytes[i]);
}

static void forget_values(valkey_store *s) {
    if (s->values) freeReplyObject(s->values);
    s->values = NULL;
}

/* >>the store */
/* Asks for the length of a value. Returns 1 if the server has it, 0 if not, -1 if the call fails or is refused. A value
 * that is no string counts as refused, and is not there. */
static int find_value(valkey_store *s, const tkv_prefix_hash *hash) {
    char key[KEY];
    const char *words[] = {"STRLEN", key};
    write_key(key, hash);
    const size_t lengths[] = {6, strlen(key)};
    redisReply *reply = is_connected(s) ? call(s, 2, words, lengths, 256) : NULL;
    int found = reply && reply->type == REDIS_REPLY_INTEGER ? reply->integer > 0 : -1;
    if (reply && reply->type == REDIS_REPLY_ERROR && strncmp(reply->str, "WRONGTYPE", 9) == 0) {
        s->prompt.n_refused++;
        fprintf(stderr, PROGRAM ": the server has no string as %s\n", key);
        found = 0;
    } else if (reply && reply->type == REDIS_REPLY_ERROR) deny(s, reply);
    if (reply) freeReplyObject(reply);
    return found;
}

/* A value that is longer than any page counts as refused. The server has not failed: it is asked again. */
static void refuse_long_value(valkey_store *s) {
    s->prompt.n_refused++;
    s->closed_until = 0;
    s->pause = first_pause;
    fprintf(stderr, PROGRAM ": a value of the server is longer than --most (%d MiB)\n", s->most);
}

/* Asks for values. NULL: there is no list of n replies. */
static redisReply *ask_values(valkey_store *s, const tkv_prefix_hash *hashes, int n) {
    const char *words[1 + MOST_KEYS] = {"MGET"};
    char keys[MOST_KEYS][KEY];
    size_t lengths[1 + MOST_KEYS] = {4};
    for (int i = 0; i < n; i++) {
        write_key(keys[i], &hashes[i]);
        words[1 + i] = keys[i];
        lengths[1 + i] = strlen(keys[i]);
    }
    if (!is_connected(s)) return NULL;
    s->is_too_long = 0;
    redisReply *reply = call(s, 1 + n, words, lengths, (size_t)n * (((size_t)s->most << 20) + 64) + 64);
    if (!reply && s->is_too_long) refuse_long_value(s);
    if (!reply) return NULL;
    s->pause = first_pause;
    if (reply->type == REDIS_REPLY_ARRAY && reply->elements == (size_t)n) return reply;
    if (reply->type == REDIS_REPLY_ERROR) deny(s, reply);
    freeReplyObject(reply);
    return NULL;
}

static int store_get(void *user, const tkv_prefix_hash *hashes, int n, const void **bytes, size_t *sizes) {
    valkey_store *s = (valkey_store *)user;
    int found = 0;
    forget_values(s);
    n = n < MOST_KEYS ? n : MOST_KEYS;
    s->values = ask_values(s, hashes, n);
    for (; s->values && found < n && s->values->element[found]->type == REDIS_REPLY_STRING; found++) {
        const redisReply *r = s->values->element[found];
        bytes[found] = r->str;
        sizes[found] = (size_t)r->len;
        s->bytes += (double)sizes[found];
    }
    /* MGET says nil of a value that is no string too */
    if (s->values && found < n && s->values->element[found]->type == REDIS_REPLY_NIL)
        (void)find_value(s, &hashes[found]);
    s->n_hits += found;
    s->n_misses += n - found;
    return found;
}

static int store_has(void *user, const tkv_prefix_hash *hash) {
    valkey_store *s = (valkey_store *)user;
    const int n_refused = s->prompt.n_refused;
    forget_values(s);
    const int found = find_value(s, hash);
    if (s->prompt.n_refused > n_refused) s->prompt.replaces = 1;
    /* a page that cannot be put now need not be saved: it counts as there */
    return found != 0;
}

static int store_put(void *user, const tkv_prefix_hash *hash, const void *bytes, size_t size) {
    valkey_store *s = (valkey_store *)user;
    char key[KEY], ttl[16];
    const char *words[] = {"SET", key, (const char *)bytes, "EX", ttl, "NX"};
    const int n = s->prompt.replaces ? 5 : 6;
    forget_values(s);
    write_key(key, hash);
    snprintf(ttl, sizeof ttl, "%d", s->ttl);
    const size_t lengths[] = {3, strlen(key), size, 2, strlen(ttl), 2};
    if (size > (size_t)s->most << 20) return 1;
    redisReply *reply = is_connected(s) ? call(s, n, words, lengths, 4096) : NULL;
    if (reply && reply->type == REDIS_REPLY_ERROR) deny(s, reply);
    /* nil: another program was first, and its value stays */
    const int ok = reply && (reply->type == REDIS_REPLY_STATUS || reply->type == REDIS_REPLY_NIL);
    if (reply) freeReplyObject(reply);
    return !ok;
}

/* >>metrics */
static void write_counts(const valkey_store *s) {
    static const char *const names[] = {"hits", "misses", "faults", "skipped", "refused", "bytes"};
    static const char *const helps[] = {"Pages that the server had.",
                                        "Pages that it had not.",
                                        "Calls that failed.",
                                        "Calls left out meanwhile.",
                                        "Values that were wrong, and calls that the server refused.",
                                        "Bytes of values."};
    const int n_refused = s->prompt.n_refused + s->n_denied;
    const double counts[] = {1. * s->n_hits,    1. * s->n_misses, 1. * s->n_faults,
                             1. * s->n_skipped, 1. * n_refused,   s->bytes};
    if (!s->metrics) return;
    save_file f = begin_file(s->metrics);
    for (int i = 0; i < 6; i++) {
        fprintf(f.out, "# HELP prefix_store_%s_total %s\n", names[i], helps[i]);
        fprintf(f.out, "# TYPE prefix_store_%s_total counter\n", names[i]);
        fprintf(f.out, "prefix_store_%s_total %.0f\n", names[i], counts[i]);
    }
    latency_write_histogram(s->times, s->n_times, "prefix_store_call_seconds", "Time of a call.", f.out);
    end_file(&f);
}

/* >>main */
static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    valkey_store *s = (valkey_store *)ctx;
    int ok = 1;
    if (!value) return parse_shared_option(&s->prompt, name, value);
    if (tls_parse_option(&s->tls, name, value)) return WITH_VALUE;
    if (strcmp(name, "--host") == 0) s->host = value;
    else if (strcmp(name, "--socket") == 0) s->socket = value;
    else if (strcmp(name, "--user") == 0) s->user = value;
    else if (strcmp(name, "--metrics") == 0) s->metrics = value;
    else if (strcmp(name, "--port") == 0) ok = read_int(value, 1, 65535, &s->port);
    else if (strcmp(name, "--ttl") == 0) ok = read_int(value, 1, INT_MAX, &s->ttl);
    else if (strcmp(name, "--timeout") == 0) ok = read_int(value, 1, 60000, &s->timeout);
    else if (strcmp(name, "--most") == 0) ok = read_int(value, 1, 512, &s->most);
    else return parse_shared_option(&s->prompt, name, value);
    return ok ? WITH_VALUE : BAD_VALUE;
}

static void set_defaults(valkey_store *s) {
    s->host = "127.0.0.1";
    s->port = 6379;
    s->ttl = 86400;
    s->timeout = 20;
    s->most = 16;
    s->pause = first_pause;
    s->password = getenv("TKV_STORE_PASSWORD");
}

/* The connection comes with the first call. */
static tkv_prefix_store open_store(valkey_store *s) {
    const tkv_prefix_store store = {s, store_get, store_put, store_has};
    const char *reason = tls_open(&s->tls);
    if (reason) fail("%s", reason);
    if (s->tls.authority && s->socket) fail("--tls and --socket exclude each other");
    if (s->user && !s->password) fail("--user needs the password in TKV_STORE_PASSWORD");
    signal(SIGPIPE, SIG_IGN); /* a server that has gone is a fault of a call */
    return store;
}

static void close_store(valkey_store *s) {
    forget_values(s);
    if (s->server) redisFree(s->server);
    tls_close(&s->tls);
}

int main(int argc, char **argv) {
    static valkey_store s;
    set_defaults(&s);
    begin_shared_prompt(&s.prompt, argc, argv, usage, parse_own_option, &s);
    s.prompt.store = open_store(&s);
    run_shared_prompt(&s.prompt);
    printf("[server: %d pages there, %d not, %d calls failed, %d left out, %d refused]\n", s.n_hits,
           s.n_misses, s.n_faults, s.n_skipped, s.n_denied);
    write_counts(&s);
    close_store(&s);
    end_shared_prompt(&s.prompt);
    return 0;
}
