/*
 * metrics.c - metrics of a running cache over HTTP: GET /metrics is Prometheus text, GET /state the report as JSON.
 *
 * cc -O2 examples/metrics.c examples/tieredkv.c -o metrics -lmicrohttpd -lm -pthread && ./metrics
 *
 * A model writes 200 tokens a second into a cache under a byte budget. At 2,000 tokens the text begins anew. The main
 * thread owns the cache. It prints both reports between two tokens, four times a second. The thread of libmicrohttpd
 * (0.9.71 or later) sends the newest ones and never calls the cache, so no client holds up a token.
 *
 * The server listens on 127.0.0.1 and has no password. It answers GET and HEAD without a body, one request a
 * connection. Sizes are bounded: 64 connections of 8 KB, and 5 seconds for a request and its answer. Above 48
 * connections the server reads no more from the oldest ones, so silent clients keep no other out.
 *
 * The program needs POSIX. SIGINT and SIGTERM end it with status 0. `./metrics --help` lists the options. In this
 * order: options, reports, requests, connections, writing, the socket, main.
 */
#define PROGRAM "metrics"
#include "program.h" /* before system headers */

#include <arpa/inet.h>
#include <microhttpd.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

#define DEMO "examples/data/demo.gguf"
enum { PORT = 9464, BUDGET = 1400 * 1024, TEXT = 2000 };
enum { MOST_CONNECTIONS = 64, CROWD = 48, CONNECTION_BYTES = 8192, CONNECTION_SECONDS = 5 };
static const double token_seconds = .005, report_seconds = .25;

static const char usage[] = "metrics [MODEL] [options]\n"
                            "Without MODEL, the model is " DEMO ".\n" PROGRAM_HELP
                            "  --port N           TCP port; 0: a free one (9464)\n"
                            "  --bind ADDRESS     IPv4 address to listen on (127.0.0.1)\n"
                            "  --seconds N        ends after N seconds\n"
                            "\nThe plan of the cache:\n";

/* All answers: the reports, then the refusals. */
enum { METRICS, STATE, NO_PATH, BAD_METHOD, HAS_BODY, N_ANSWERS, N_REPORTS = NO_PATH };
static const char *const paths[] = {"/metrics", "/state"};
static const tkv_report_kind kinds[] = {TKV_REPORT_PROMETHEUS, TKV_REPORT_JSON};
static const unsigned statuses[] = {200, 200, 404, 405, 413};
static const char *const types[] = {"text/plain; version=0.0.4; charset=utf-8", "application/json",
                                    "text/plain", "text/plain", "text/plain"};
static const char *const refusals[] = {"There is no such path. Try /metrics or /state.\n",
                                       "Only GET and HEAD are answered.\n", "A request may have no body.\n"};

typedef struct server {
    pthread_mutex_t lock; /* of all fields below */
    struct MHD_Response *answers[N_ANSWERS];
    struct {
        int fd;
        double start;         /* by latency_now */
    } open[MOST_CONNECTIONS]; /* oldest first */
    int n_open;
} server;

typedef struct writer {
    options opt;
    llama_model model;
    tkv_config cfg;
    tkv_cache *kv;
    int *prompt, n_prompt, total, done; /* done: tokens in the cache */
    int next;                           /* the token after these */
    float *logits;                      /* of the newest token */
    choice *space;                      /* for sample() */
    uint64_t rng;
    double n_steps, step_seconds;
    const char *bind;
    int port, seconds; /* seconds 0: until a signal */
} writer;

/* >>options */
static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    writer *w = (writer *)ctx;
    int ok = 1;
    if (!value) return UNKNOWN;
    if (strcmp(name, "--port") == 0)
        ok = strspn(value, "0123456789") == strlen(value) && read_int(value, 0, 65535, &w->port);
    else if (strcmp(name, "--seconds") == 0) ok = read_int(value, 1, INT_MAX, &w->seconds);
    else if (strcmp(name, "--bind") == 0) w->bind = value;
    else return UNKNOWN;
    return ok ? WITH_VALUE : BAD_VALUE;
}

/* >>reports */
/* Makes an answer from a text of malloc, which it then owns. */
static struct MHD_Response *make_answer(int i, char *text) {
    struct MHD_Response *r = MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_MUST_FREE);
    if (!r || MHD_add_response_header(r, "Content-Type", types[i]) != MHD_YES ||
        MHD_add_response_header(r, "Cache-Control", "no-store") != MHD_YES ||
        MHD_add_response_header(r, "Connection", "close") != MHD_YES ||
        (i == BAD_METHOD && MHD_add_response_header(r, "Allow", "GET, HEAD") != MHD_YES))
        fail("out of memory for an answer");
    return r;
}

static void make_refusals(server *s) {
    for (int i = N_REPORTS; i < N_ANSWERS; i++) {
        const char *text = refusals[i - N_REPORTS];
        s->answers[i] = make_answer(i, (char *)memcpy(allocate(strlen(text) + 1, 1), text, strlen(text) + 1));
    }
}

/* Prints a report of the cache. A figure of this program follows Prometheus text. */
static struct MHD_Response *make_report(const writer *w, int i) {
    enum { OWN = 400 };
    size_t size = 0;
    if (tkv_print_report(w->kv, kinds[i], NULL, NULL, 0, &size) != TKV_OK) fail("no report");
    char *text = (char *)allocate(size + OWN, 1);
    if (tkv_print_report(w->kv, kinds[i], NULL, text, size, NULL) != TKV_OK) fail("no report");
    if (i == METRICS)
        snprintf(text + size - 1, OWN,
                 "# HELP model_step_seconds Time of a step: one token, or a part of the prompt.\n"
                 "# TYPE model_step_seconds summary\n"
                 "model_step_seconds_sum %.9g\nmodel_step_seconds_count %.0f\n",
                 w->step_seconds, w->n_steps);
    return make_answer(i, text);
}

/* Replaces the reports that are sent. libmicrohttpd counts the users of a response, and the last one frees it. */
static void publish(server *s, const writer *w) {
    struct MHD_Response *made[N_REPORTS], *old[N_REPORTS];
    for (int i = 0; i < N_REPORTS; i++) made[i] = make_report(w, i);
    pthread_mutex_lock(&s->lock);
    memcpy(old, s->answers, sizeof old);
    memcpy(s->answers, made, sizeof made);
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < N_REPORTS; i++)
        if (old[i]) MHD_destroy_response(old[i]);
}

/* >>requests. The thread of libmicrohttpd calls this after the headers of a request. */
static enum MHD_Result on_request(void *user, struct MHD_Connection *c, const char *path, const char *method,
                                  const char *version, const char *upload, size_t *upload_bytes,
                                  void **context) {
    server *s = (server *)user;
    const char *length = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Content-Length");
    const char *encoding = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Transfer-Encoding");
    int i = 0;
    (void)version, (void)upload, (void)upload_bytes, (void)context;
    while (i < N_REPORTS && strcmp(path, paths[i]) != 0) i++;
    if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0) i = BAD_METHOD;
    else if (encoding || (length && strcmp(length, "0") != 0)) i = HAS_BODY;
    pthread_mutex_lock(&s->lock);
    const enum MHD_Result result = MHD_queue_response(c, statuses[i], s->answers[i]);
    pthread_mutex_unlock(&s->lock);
    return result;
}

/* >>connections. libmicrohttpd's timeout begins anew with each byte, so it alone would let slow clients stay. When a
 * socket is shut, the library closes its connection. */
static void on_connection(void *user, struct MHD_Connection *c, void **context,
                          enum MHD_ConnectionNotificationCode code) {
    server *s = (server *)user;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    int i = 0;
    (void)context;
    if (!info) return;
    pthread_mutex_lock(&s->lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED && s->n_open < MOST_CONNECTIONS) {
        s->open[s->n_open].fd = info->connect_fd;
        s->open[s->n_open++].start = latency_now();
        for (; i + CROWD < s->n_open; i++) (void)shutdown(s->open[i].fd, SHUT_RD);
    } else if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
        while (i < s->n_open && s->open[i].fd != info->connect_fd) i++;
        for (s->n_open -= i < s->n_open; i < s->n_open; i++) s->open[i] = s->open[i + 1];
    }
    pthread_mutex_unlock(&s->lock);
}

static void shut_late_connections(server *s) {
    const double now = latency_now();
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < s->n_open && now - s->open[i].start > (double)CONNECTION_SECONDS; i++)
        (void)shutdown(s->open[i].fd, SHUT_RDWR);
    pthread_mutex_unlock(&s->lock);
}

/* >>writing */
/* Evaluates the next token, or the next part of the prompt. A text that the budget cannot hold begins anew. */
static void write_step(writer *w) {
    const double start = latency_now();
    const int *tokens = w->done < w->n_prompt ? w->prompt + w->done : &w->next;
    int n = w->done < w->n_prompt ? w->n_prompt - w->done : 1;
    if (n > TKV_BLOCK_TOKENS) n = TKV_BLOCK_TOKENS;
    tkv_status status = llama_forward(&w->model, w->kv, 0, tokens, n, w->logits, 1);
    if (status == TKV_OK) {
        w->next = sample(w->logits, w->model.vocab, &w->opt, &w->rng, w->space);
        w->done += n;
    }
    if (status == TKV_ERR_BUDGET || w->done == w->total) {
        status = tkv_seq_reset(w->kv, 0);
        w->done = 0;
    }
    if (status != TKV_OK) fail("token %d: %s", w->done, tkv_get_status_text(status));
    w->step_seconds += latency_now() - start;
    w->n_steps++;
}

static void begin_writing(writer *w) {
    if (!w->opt.model) w->opt.model = DEMO;
    load(&w->opt, &w->model, &w->cfg);
    w->kv = create(&w->cfg);
    load_tables(&w->opt, w->kv);
    w->total = context_of(&w->opt, &w->model);
    if (w->total > TEXT) w->total = TEXT;
    w->n_prompt = read_prompt(&w->model, &w->opt, w->total - 1, 0, 0, &w->prompt);
    w->logits = (float *)allocate((size_t)w->model.vocab, sizeof *w->logits);
    w->space = (choice *)allocate((size_t)w->model.vocab, sizeof *w->space);
    w->rng = rng_seed(&w->opt);
}

static void end_writing(writer *w) {
    tkv_destroy(w->kv);
    plan_free(&w->cfg);
    llama_free(&w->model);
    free(w->prompt);
    free(w->logits);
    free(w->space);
}

/* >>the socket */
/* Listens, and sets *port to the port in use. */
static int open_socket(const char *address, int *port) {
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    const int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_port = htons((uint16_t)*port);
    if (inet_pton(AF_INET, address, &at.sin_addr) != 1)
        fail("--bind %s: it must be an IPv4 address, such as 127.0.0.1", address);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
        bind(fd, (struct sockaddr *)&at, sizeof at) != 0 || listen(fd, SOMAXCONN) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &size) != 0)
        fail("cannot listen on %s, port %d: %s; choose another with --port (0: a free one) or --bind",
             address, *port, strerror(errno));
    *port = ntohs(at.sin_port);
    return fd;
}

/* >>main */
static void run(server *s, writer *w) {
    double now = latency_now(), next_token = now, next_report = now;
    const double end = now + w->seconds;
    sigset_t waits; /* signals that wait */
    do {
        write_step(w);
        shut_late_connections(s);
        now = latency_now();
        if (now >= next_report) {
            publish(s, w);
            next_report = now + report_seconds;
        }
        next_token += token_seconds;
        if (next_token < now) next_token = now; /* a late token is not made up for */
        const struct timespec pause = {0, (long)(1e9 * (next_token - now))};
        nanosleep(&pause, NULL);
        sigpending(&waits);
    } while (!sigismember(&waits, SIGINT) && !sigismember(&waits, SIGTERM) && (!w->seconds || now < end));
}

int main(int argc, char **argv) {
    static server s;
    writer w;
    sigset_t ends;
    memset(&w, 0, sizeof w);
    w.cfg = tkv_default_config();
    w.cfg.budget.bytes = BUDGET;
    w.opt.raw = 1;
    w.bind = "127.0.0.1";
    w.port = PORT;
    parse_options(argc, argv, usage, &w.opt, &w.cfg, parse_own_option, &w);
    sigemptyset(&ends); /* blocked in all threads; run() looks whether one waits */
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    pthread_mutex_init(&s.lock, NULL);
    const int fd = open_socket(w.bind, &w.port);
    begin_writing(&w);
    make_refusals(&s);
    publish(&s, &w);
    struct MHD_Daemon *daemon = MHD_start_daemon(
        MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_ITC, 0, NULL, NULL, on_request, &s,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)MOST_CONNECTIONS,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)CONNECTION_SECONDS, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)CONNECTION_BYTES, MHD_OPTION_NOTIFY_CONNECTION, on_connection, &s, MHD_OPTION_END);
    if (!daemon) fail("libmicrohttpd does not start");
    printf("http://%s:%d/metrics\n", w.bind, w.port);
    fflush(stdout);
    run(&s, &w);
    MHD_stop_daemon(daemon); /* closes fd too */
    for (int i = 0; i < N_ANSWERS; i++) MHD_destroy_response(s.answers[i]);
    pthread_mutex_destroy(&s.lock);
    printf("%s steps\n", commas(w.n_steps));
    end_writing(&w);
    return 0;
}
