/*
 * latency.h - the times that a reader of generated text waits: for the first token, and from a token to the next one.
 * The library measures no time, so the program does. Copy this file into yours.
 *
 *     latency l = latency_begin(times, n);     times: an array of n numbers, one for each token after the first
 *     ... read the prompt, and call latency_token(&l) after each generated token ...
 *     latency_print(&l, stdout);               the first token, and percentiles of the others
 *     latency_write_histograms(&l, file);      Prometheus text, version 0.0.4
 *
 * A percentile is exact: the least of the measured times that at least so many percent of them do not exceed (nearest
 * rank). Histograms count times in buckets, so that a server can add those of many programs.
 */
#ifndef LATENCY_H
#define LATENCY_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Upper bounds of the buckets, in seconds. The last bucket has no bound. */
static const double latency_bounds[] = {.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05,
                                        .1,    .25,    .5,    1,    2.5,   5,    10,  25,   60};
enum { LATENCY_BOUNDS = (int)(sizeof latency_bounds / sizeof *latency_bounds) };

typedef struct latency {
    double mark;   /* when the newest token was ready; before the first one, the start */
    double first;  /* seconds from the start to the first token */
    double *times; /* [n] seconds from a token to the next one */
    int n_tokens;  /* generated tokens */
    int n, n_fit;  /* times in use; times that fit */
} latency;

/* Returns a wall clock in seconds; the processor's time where C has no such clock. On Windows, clock() is one. */
static inline double latency_now(void) {
#if defined(CLOCK_MONOTONIC) && !defined(_WIN32)
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#else
    return (double)clock() / CLOCKS_PER_SEC;
#endif
}

static inline latency latency_begin(double *times, int n_fit) {
    latency l = {0, 0, NULL, 0, 0, 0};
    l.times = times;
    l.n_fit = n_fit;
    l.mark = latency_now();
    return l;
}

/* Adds a token that took so many seconds. A time that does not fit is left out. */
static inline void latency_add(latency *l, double seconds) {
    if (l->n_tokens == 0) l->first = seconds;
    else if (l->n < l->n_fit) l->times[l->n++] = seconds;
    l->n_tokens++;
}

static inline void latency_token(latency *l) { /* a generated token is ready */
    const double now = latency_now();
    latency_add(l, now - l->mark);
    l->mark = now;
}

/* Leaves out what the program did for itself since `since`, a result of latency_now. */
static inline void latency_exclude(latency *l, double since) { l->mark += latency_now() - since; }

static inline int latency_order(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the times. */
static inline void latency_sort(latency *l) {
    qsort(l->times, (size_t)l->n, sizeof *l->times, latency_order);
}

/* Returns a percentile, 1 to 100, of sorted times; 0 if there are none. */
static inline double latency_percentile(const latency *l, int percent) {
    return l->n ? l->times[((long)l->n * percent + 99) / 100 - 1] : 0;
}

/* Prints one line, and sorts the times. */
static inline void latency_print(latency *l, FILE *out) {
    if (l->n_tokens == 0) return;
    fprintf(out, "  latency     first token after %.1f ms", 1e3 * l->first);
    latency_sort(l);
    if (l->n)
        fprintf(out, "; between tokens P50 %.2f, P95 %.2f, P99 %.2f ms (%d times)",
                1e3 * latency_percentile(l, 50), 1e3 * latency_percentile(l, 95),
                1e3 * latency_percentile(l, 99), l->n);
    fprintf(out, "\n");
}

static inline void latency_write_histogram(const double *times, int n, const char *name, const char *help,
                                           FILE *out) {
    double sum = 0;
    fprintf(out, "# HELP %s %s\n# TYPE %s histogram\n", name, help, name);
    for (int i = 0; i < n; i++) sum += times[i];
    for (int b = 0; b < LATENCY_BOUNDS; b++) { /* buckets are cumulative */
        int count = 0;
        for (int i = 0; i < n; i++) count += times[i] <= latency_bounds[b];
        fprintf(out, "%s_bucket{le=\"%g\"} %d\n", name, latency_bounds[b], count);
    }
    fprintf(out, "%s_bucket{le=\"+Inf\"} %d\n%s_sum %.9g\n%s_count %d\n", name, n, name, sum, name, n);
}

static inline void latency_write_histograms(const latency *l, FILE *out) {
    latency_write_histogram(&l->first, l->n_tokens > 0, "model_time_to_first_token_seconds",
                            "Time from the start of a prompt to the first generated token.", out);
    latency_write_histogram(l->times, l->n, "model_time_between_tokens_seconds",
                            "Time from a generated token to the next one.", out);
}

#endif /* LATENCY_H */
